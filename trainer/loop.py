"""The loop: get a batch, dispatch a step, hand the metrics of the step before to the hooks.

It knows the hook protocol and nothing else. Step n + 1 is dispatched before the metrics of step n are read, so the
device never waits for the host, except where a hook asks for the state.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from trainer.errors import EXIT_DONE, EXIT_SAVED_RUN_AGAIN
from trainer.state import TrainState
from trainer.step import Batch, Metrics


@dataclasses.dataclass(frozen=True)
class Stop:
    """Why a run ends.

    Attributes:
      reason: for people.
      finished: whether the run is done, or goes on when it is started again.
    """

    reason: str
    finished: bool

    @property
    def exit_code(self) -> int:
        """Of the process."""
        return EXIT_DONE if self.finished else EXIT_SAVED_RUN_AGAIN


class Hook:
    """Something that happens during a run; a subclass overrides what it needs.

    `name`, by default that of the class, keeps the hook's state apart from that of others in a checkpoint.
    """

    name: str

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Sees the metrics of every step, in order, one step behind the device; `step` counts updates."""

    def due(self, step: int, stop: Stop | None) -> bool:
        """Whether `on_state` is wanted after `step`; the loop then waits for the device.

        Asked in the order of the hooks, so that a hook sees what those before it did at this step.

        Args:
          step: updates done; 0 if the run is stopped before its first.
          stop: if the run ends here, why.
        """
        return False

    def on_state(self, step: int, state: TrainState) -> Stop | None:
        """Acts on the state after `step`, at most once; all of `on_step` up to it is done. May end the run."""
        return None

    def state(self) -> Any:
        """What the hook needs to go on exactly, as JSON; None: nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Takes up what `state` returned in the run that is being resumed."""

    def ended(self) -> Stop | None:
        """After `restore`: whether the hook had ended the run for good."""
        return None


class Batches(Protocol):
    """Where the loop gets its batches from."""

    def get(self, cancelled: Callable[[], bool]) -> Batch | None:
        """The next batch; None as soon as `cancelled()` while waiting for it."""


@dataclasses.dataclass
class Stopwatch:
    """Where the loop's own time goes, in seconds: waiting for data, and in `on_state` of hooks."""

    waiting: float = 0.0
    in_hooks: float = 0.0

    @contextlib.contextmanager
    def measure(self, field: str) -> Iterator[None]:
        """Adds the time that the context takes to `field`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + time.monotonic() - begin)


def run_loop(
    train_step: Callable[[TrainState, Batch, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Batches,
    learning_rates: np.ndarray,
    hooks: Sequence[Hook],
    *,
    start: int,
    requested: Callable[[], Stop | None],
    stopwatch: Stopwatch,
) -> tuple[TrainState, int, Stop]:
    """Runs steps until the end of `learning_rates` or until something stops the run.

    Args:
      train_step: compiled; `state` is donated to it.
      state: after `start` steps.
      batches: from step `start` on.
      learning_rates: float32[num_steps], one for each step of the whole run.
      hooks: called in this order.
      start: steps that are done already.
      requested: whether somebody asks the run to stop; asked at every step and while waiting for data.
      stopwatch: gets the time that waiting and hooks take.

    Returns:
      The state, the steps done, why it ended.
    """
    step, pending = start, None
    # A hook acts once after a step; after the step that a run is resumed at, it has acted already.
    acted = {id(hook) for hook in hooks} if start else set()
    while True:
        with stopwatch.measure("waiting"):
            batch = batches.get(cancelled=lambda: requested() is not None)
        if batch is not None:
            state, metrics = train_step(state, batch, learning_rates[step])
            _report(hooks, pending)
            step, pending, acted = step + 1, (step + 1, metrics), set()
        assert batch is not None or requested() is not None, "the stream of batches has no end"
        stop = Stop(f"finished: {step} steps", finished=True) if step == len(learning_rates) else requested()
        waiting = [hook for hook in hooks if id(hook) not in acted]
        if any(hook.due(step, stop) for hook in waiting):
            _report(hooks, pending)
            pending = None
            for hook in waiting:
                if hook.due(step, stop):
                    acted.add(id(hook))
                    with stopwatch.measure("in_hooks"):
                        stop = hook.on_state(step, state) or stop
        if stop is not None:
            _report(hooks, pending)
            return state, step, stop


def _report(hooks: Sequence[Hook], pending: tuple[int, Metrics] | None) -> None:
    if pending is not None:
        step, metrics = pending
        metrics = jax.device_get(metrics)
        for hook in hooks:
            hook.on_step(step, metrics)
