"""What happens around the steps: log, evaluate, stop early, save.

The checkpoint comes last: lines up to step N are on disk before the checkpoint of N is, and the evaluation at N is
known to it. The evaluation that may end the run comes first, so that the others see the end.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, Literal

from trainer.checkpoint import CheckpointConfig, Checkpoints
from trainer.errors import UserError
from trainer.evaluation import Evaluation
from trainer.loop import Hook, Stop, Stopwatch
from trainer.metrics import MetricSums, Recorder
from trainer.state import TrainState
from trainer.step import Metrics


@dataclasses.dataclass
class LogConfig:
    """What is written while training.

    Attributes:
      every: how often a line of training metrics is written, a duration.
      tensorboard: whether TensorBoard events are written too.
    """

    every: str = "50 steps"
    tensorboard: bool = True


@dataclasses.dataclass
class EarlyStoppingConfig:
    """Ends the run when the first evaluation does not improve any more.

    Attributes:
      metric: of the first evaluation.
      mode: whether a larger or a smaller value is better.
      patience: evaluations in a row without improvement that end the run.
      min_delta: an improvement is a change by more than this.
    """

    metric: str = "loss"
    mode: Literal["max", "min"] = "min"
    patience: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UserError(f"early_stopping.patience: expected a number of evaluations ≥ 1, found {self.patience}")
        if not self.min_delta >= 0:
            raise UserError(f"early_stopping.min_delta: expected a number ≥ 0, found {self.min_delta}")


class Clock:
    """Rates and waits since the last reading. Hooks' own time is not training time, nor is the compiling first step."""

    def __init__(self, batch_size: int, stopwatch: Stopwatch):
        """`stopwatch` is the loop's."""
        self._batch_size = batch_size
        self._stopwatch = stopwatch
        self._last: tuple[int, float, float] | None = None

    def start(self, step: int) -> None:
        """Called after every step; the first call starts the clock."""
        if self._last is None:
            self._last = self._now(step)

    def read(self, step: int) -> dict[str, float]:
        """Steps and examples per second, and the share of the time spent waiting for data; empty without a step."""
        now = self._now(step)
        (steps, seconds, waited), self._last = self._last or now, now
        if now[0] == steps:
            return {}
        steps_per_s = (now[0] - steps) / (now[1] - seconds)
        return {
            "time/steps_per_s": steps_per_s,
            "time/examples_per_s": steps_per_s * self._batch_size,
            "time/data_wait_share": min(1.0, (now[2] - waited) / (now[1] - seconds)),
        }

    def _now(self, step: int) -> tuple[int, float, float]:
        return step, time.monotonic() - self._stopwatch.in_hooks, self._stopwatch.waiting


class LogHook(Hook):
    """Writes the metrics of each interval: sums over exactly its steps, and the last learning rate."""

    name = "log"

    def __init__(self, every: int, sums: MetricSums, recorder: Recorder, clock: Clock):
        self._every = every
        self._sums = sums
        self._recorder = recorder
        self._clock = clock

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._sums.add(metrics)
        self._clock.start(step)
        if step % self._every == 0:
            self._write(step)

    def due(self, step: int, stop: Stop | None) -> bool:
        return stop is not None and stop.finished

    def on_state(self, step: int, state: TrainState) -> None:
        self._write(step)

    def _write(self, step: int) -> None:
        values = self._sums.take()
        if values:
            self._recorder.write(step, "train", {**values, **self._clock.read(step)})

    def state(self) -> Any:
        return self._sums.state()

    def restore(self, state: Any) -> None:
        self._sums.restore(state)


class EvaluateHook(Hook):
    """Runs one evaluation at its interval and at the end.

    Attributes:
      latest: step and metrics of the last evaluation, or None.
    """

    def __init__(self, every: int, evaluation: Evaluation, recorder: Recorder):
        self.name = f"evaluate/{evaluation.name}"
        self.latest: tuple[int, Mapping[str, float]] | None = None
        self._every = every
        self._evaluation = evaluation
        self._recorder = recorder

    def due(self, step: int, stop: Stop | None) -> bool:
        return step > 0 and (step % self._every == 0 or (stop is not None and stop.finished))

    def on_state(self, step: int, state: TrainState) -> None:
        begin = time.monotonic()
        values = self._evaluation(state)
        self.latest = step, values
        self._recorder.write(step, self._evaluation.name, {**values, "time/seconds": time.monotonic() - begin})

    def at(self, step: int) -> Mapping[str, float]:
        """The metrics of the evaluation after `step`, empty if there was none."""
        return self.latest[1] if self.latest is not None and self.latest[0] == step else {}

    def state(self) -> Any:
        return self.latest

    def restore(self, state: Any) -> None:
        self.latest = None if state is None else (state[0], state[1])


class EarlyStoppingHook(Hook):
    """Ends the run after `patience` evaluations in a row that were no better than the best.

    Flax's `EarlyStopping` ends it one evaluation later, and never recovers from a NaN at the first.
    """

    name = "early_stopping"

    def __init__(self, config: EarlyStoppingConfig, evaluate: EvaluateHook):
        self._config = config
        self._evaluate = evaluate
        self._best: float | None = None
        self._num_poor = 0

    def due(self, step: int, stop: Stop | None) -> bool:
        return bool(self._evaluate.at(step))

    def on_state(self, step: int, state: TrainState) -> Stop | None:
        value = self._evaluate.at(step)[self._config.metric]
        if improves(value, self._best, self._config.mode, self._config.min_delta):
            self._best, self._num_poor = value, 0
        else:
            self._num_poor += 1
        return self.ended()

    def ended(self) -> Stop | None:
        if self._num_poor < self._config.patience:
            return None
        best = "NaN" if self._best is None else f"{self._best:.6g}"
        return Stop(
            f"finished: {self._config.metric} was no better than {best} in {self._num_poor} evaluations", finished=True
        )

    def state(self) -> Any:
        return {"best": self._best, "num_poor": self._num_poor}

    def restore(self, state: Any) -> None:
        self._best, self._num_poor = state["best"], state["num_poor"]


def improves(value: float, best: float | None, mode: Literal["max", "min"], min_delta: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `min_delta`; NaN never does, any number beats None."""
    if math.isnan(value) or best is None:
        return not math.isnan(value)
    return (value - best if mode == "max" else best - value) > min_delta


class CheckpointHook(Hook):
    """Saves the state at its interval, when the watched metric improves, and whenever the run ends."""

    name = "checkpoint"

    def __init__(
        self,
        every: int,
        config: CheckpointConfig,
        checkpoints: Checkpoints,
        recorder: Recorder,
        hooks: list[Hook],
        evaluate: EvaluateHook | None,
    ):
        """
        Args:
          every: steps between two saves.
          config: what is kept.
          checkpoints: where to.
          recorder: its lines must be on disk first.
          hooks: the hooks before this one, whose state is saved too.
          evaluate: the evaluation that is watched for the best.
        """
        self._every = every
        self._config = config
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._hooks = tuple(hooks)
        self._evaluate = evaluate
        self._best: float | None = None

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._checkpoints.poll()

    def due(self, step: int, stop: Stop | None) -> bool:
        return step % self._every == 0 or stop is not None or self._improved(step)

    def _improved(self, step: int) -> bool:
        value = self._watched(step)
        return value is not None and improves(value, self._best, self._config.mode)

    def _watched(self, step: int) -> float | None:
        if self._evaluate is None or self._config.best is None:
            return None
        return self._evaluate.at(step).get(self._config.best)

    def on_state(self, step: int, state: TrainState) -> None:
        if self._improved(step):
            self._best = self._watched(step)
        self._recorder.sync()
        self._checkpoints.save(
            step,
            state,
            hooks={hook.name: hook.state() for hook in (*self._hooks, self)},
            metrics=self._evaluate.at(step) if self._evaluate is not None else {},
        )

    def state(self) -> Any:
        return self._best

    def restore(self, state: Any) -> None:
        self._best = state
