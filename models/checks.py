"""Checks of config fields: what was expected, what was found, what to do."""

import difflib
from collections.abc import Collection
from typing import Any


def check_choice(field: str, value: Any, choices: Collection[Any], advice: str) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        near = difflib.get_close_matches(str(value), [choice for choice in choices if isinstance(choice, str)], 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{field}: expected one of {expected}; found {value!r}.{meant} {advice}")


def check_positive_int(field: str, value: Any, advice: str) -> None:
    """Raises ValueError unless `value` is an int of at least 1 (a bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}: expected an integer of at least 1; found {value!r}. {advice}")


def check_positive(field: str, value: Any, advice: str) -> None:
    """Raises ValueError unless `value` is a number greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{field}: expected a positive number; found {value!r}. {advice}")


def check_compute_dtype(field: str, value: Any) -> None:
    """Raises ValueError unless `value` names a dtype that models compute in."""
    check_choice(field, value, ("float32", "bfloat16"), "Parameters stay float32 under either.")
