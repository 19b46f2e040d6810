"""What a run can end with, and the exit code of each end.

An error says what was expected, what was found, where, and what to do. `train.py` prints it as one message and
exits with its code; in a notebook it is an ordinary exception.
"""

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_SAVED_RUN_AGAIN = 75


class RunError(Exception):
    """Ends the run with one message and `exit_code`."""

    exit_code = 1


class UserError(RunError, ValueError):
    """Bad input: a config, a path, a dataset, a rule. Nothing was lost; nothing was started."""

    exit_code = 2


class NoValidCheckpointError(RunError):
    """Checkpoints exist and none of them verifies. Never answered by a fresh start."""

    exit_code = 4


class WriteError(RunError):
    """A checkpoint could not be written. The one before it is intact."""

    exit_code = 5


class BadDataError(RunError):
    """An example that cannot be read or prepared."""

    exit_code = 6


def unknown_name(what: str, name: str, known: Iterable[str]) -> UserError:
    """An error for a name that is not among `known`, with the nearest ones.

    >>> print(unknown_name("optimizer", "adamv", ["adam", "adamw", "sgd"]))
    unknown optimizer 'adamv'; did you mean 'adam' or 'adamw'?
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"expected one of: {', '.join(known) or 'none'}"
    return UserError(f"unknown {what} {name!r}; {hint}")
