"""Durations in the units people think in: '500 steps', '90 epochs', '1.28e6 examples', '10%' of the run."""

import dataclasses
import math
import re

from trainer.errors import UserError

_DURATION = re.compile(
    r"\s*(?P<count>[0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*(?P<unit>steps?|epochs?|examples?|%)\s*"
)


@dataclasses.dataclass(frozen=True)
class Calendar:
    """What turns durations into steps.

    Attributes:
      batch_size: examples per step.
      num_examples: examples per epoch.
      run_steps: steps of the whole run, what '100%' means; None where a percentage makes no sense.
    """

    batch_size: int
    num_examples: int
    run_steps: int | None = None

    def steps(self, duration: str, where: str) -> int:
        """`duration` in whole steps, rounded up.

        Args:
          duration: a number and a unit: step(s), epoch(s), example(s), or % of the run.
          where: the config field that it comes from, for the error.

        Raises:
          UserError: if `duration` is no duration, or is shorter than one step but not zero.

        >>> Calendar(batch_size=64, num_examples=1437).steps("2 epochs", "train_for")
        45
        """
        match = _DURATION.fullmatch(duration)
        if match is None or (match["unit"] == "%" and self.run_steps is None):
            percent = "" if self.run_steps is None else " or '10%' of the run"
            raise UserError(
                f"{where}: expected a duration such as '500 steps', '90 epochs' or '1e6 examples'{percent}, "
                f"found {duration!r}"
            )
        count = float(match["count"])
        unit = match["unit"].rstrip("s")
        if unit == "step":
            steps = count
        elif unit == "epoch":
            steps = count * self.num_examples / self.batch_size
        elif unit == "example":
            steps = count / self.batch_size
        else:
            steps = count / 100 * (self.run_steps or 0)
        return math.ceil(round(steps, 6))


def is_duration(value: object) -> bool:
    """Whether `value` is text that reads as a duration."""
    return isinstance(value, str) and _DURATION.fullmatch(value) is not None
