"""What a person sees of a run: a live bar in a terminal, plain lines elsewhere."""

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trainer.hooks import Clock
from trainer.loop import Hook
from trainer.step import Metrics

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_READINGS = 0.5


class ProgressHook(Hook):
    """Shows step, loss, examples/s, the share of time spent waiting for data, and the time left.

    Rates and the time left come from this process's own steps, not from those before a resume.
    """

    def __init__(self, start: int, num_steps: int, clock: Clock, console: Console):
        """`start`: steps done before this process; `num_steps`: of the whole run."""
        self._num_steps = num_steps
        self._clock = clock
        self._console = console
        self._shown = -math.inf
        self._first_step = start
        self._first_time: float | None = None
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.completed:,}/{task.total:,}"),
                BarColumn(None),
                TextColumn("{task.fields[line]}"),
            )
            self._bar = Progress(*columns, console=console, expand=True)
            self._task = self._bar.add_task("", total=num_steps, completed=start, line="compiling …")
            self._bar.start()

    def on_step(self, step: int, metrics: Metrics) -> None:
        now = time.monotonic()
        if self._first_time is None:  # The first step compiles; no rate says anything about it.
            self._first_step, self._first_time = step, now
        self._clock.start(step)
        pause = _SECONDS_BETWEEN_LINES if self._bar is None else _SECONDS_BETWEEN_READINGS
        if now - self._shown < pause and step < self._num_steps:
            return
        self._shown = now
        line = self._line(step, float(metrics["loss"].compute()), now)
        if self._bar is None:
            self._console.print(f"step {step:,}/{self._num_steps:,}  {line}", highlight=False)
        else:
            self._bar.update(self._task, completed=step, line=line)

    def _line(self, step: int, loss: float, now: float) -> str:
        rates = self._clock.read(step)
        if not rates:
            return f"loss {loss:.4f}"
        steps_per_s = (step - self._first_step) / (now - (self._first_time or now))
        return (
            f"loss {loss:.4f}  {rates['time/examples_per_s']:,.0f} examples/s  "
            f"data wait {rates['time/data_wait_share']:.0%}  ETA {_duration((self._num_steps - step) / steps_per_s)}"
        )

    def close(self) -> None:
        """Takes the bar down."""
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
