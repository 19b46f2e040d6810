"""Trains what a config says: python train.py --config=configs/resnet.py[:variant] [--config.FIELD=VALUE ...]"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

_EPILOG = """\
Any field of the config can be set:
  --config.train_for='5 epochs' --config.optimizer.learning_rate=0.05 --config.evals[0].every='100 steps'

The same command, run again, continues the run. Exit codes:
  0 done   1 a bug   2 bad input   4 no checkpoint verifies   5 a write failed   6 bad data
  75 saved after SIGTERM or Ctrl-C, run the same command again   130, 143 second signal
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The command's own flags, and the overrides of config fields: path → text."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        allow_abbrev=False,
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="a Python file with get_config(), and maybe :variant")
    parser.add_argument("--workdir", help="the run's folder (default: runs/CONFIG[-VARIANT])")
    parser.add_argument(
        "--accept_config_change", action="store_true", help="continue a run although its numbers will differ"
    )
    parser.add_argument("--layout", action="store_true", help="print where every parameter goes, and stop")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    own, overrides, words = [], {}, list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--config."):
            own.append(word)
            continue
        name, equals, value = word.removeprefix("--config.").partition("=")
        if not equals and not words:
            parser.error(f"{word} needs a value: {word}=VALUE")
        overrides[name] = value if equals else words.pop(0)
    return parser.parse_args(own, None), overrides


def default_workdir(config: str) -> str:
    """`runs/resnet-cifar10` for `configs/resnet.py:cifar10`."""
    path, _, variant = config.partition(":")
    return os.path.join("runs", "-".join(filter(None, (Path(path).stem, variant.replace("/", "-")))))


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    flags, overrides = parse(argv)
    from trainer.errors import RunError

    try:
        return run(flags, overrides)
    except RunError as error:
        if flags.traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run(flags: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Config → Trainer → fit."""
    from rich import get_console
    from rich.logging import RichHandler

    from trainer import runtime
    from trainer.config import load_config
    from trainer.errors import UserError
    from trainer.trainer import Trainer

    # In a terminal messages must go through the console that draws the bar; in a file they must not be wrapped.
    live = RichHandler(console=get_console(), show_path=False, show_level=False, log_time_format="%X")
    for name in ("trainer", "data"):
        logger = logging.getLogger(name)
        logger.addHandler(live if get_console().is_terminal else logging.StreamHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False
    config = load_config(flags.config, overrides)
    if config.trainer is None or not issubclass(config.trainer, Trainer):
        raise UserError(f"{flags.config}: set `trainer` to the Trainer subclass that runs it, found {config.trainer}")
    runtime.enable_compilation_cache()
    if config.deterministic:
        runtime.enable_deterministic_operations()
    workdir = flags.workdir or default_workdir(flags.config)
    if flags.layout:
        get_console().print(config.trainer(config).layout_table())
        return 0
    trainer = config.trainer(config, workdir, accept_config_change=flags.accept_config_change)
    stop = trainer.fit()
    advice = "" if stop.finished else "; saved, run the same command again to go on"
    print(f"{stop.reason}{advice}; {workdir}")
    return stop.exit_code


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SystemExit as end:  # argparse's own
        code = end.code if isinstance(end.code, int) else 2
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # All files are closed; a source that hangs must not hold up the end.
