"""Trainer: owns the TrainState, and is what a user subclasses.

A new task is `forward` and `loss`, and a model: `config.model`, or `build_model`. All else has a default that a method
of the same name replaces. Construction checks everything that can be known without a device; `fit` does the rest.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx
from rich import get_console
from rich.table import Table

from trainer import runtime
from trainer.checkpoint import Checkpoints
from trainer.config import Config, check_batch_size
from trainer.duration import Calendar
from trainer.errors import UserError
from trainer.evaluation import Evaluation, padded_batch_size
from trainer.hooks import CheckpointHook, Clock, EarlyStoppingHook, EvaluateHook, LogHook
from trainer.layout_table import layout_table
from trainer.loop import Hook, Stop, Stopwatch, run_loop
from trainer.mesh import local_rows, make_mesh, num_batch_shards
from trainer.metrics import MetricSums, Recorder, check_monitored
from trainer.optimizer import learning_rates, resolve_schedule
from trainer.overrides import rebuild
from trainer.prefetch import Prefetcher, open_pipeline, to_device
from trainer.program import Program, abstract_batch
from trainer.progress import ProgressHook
from trainer.safety.signals import listen
from trainer.sharding import REPLICATE, Rules
from trainer.state import TrainState
from trainer.step import Batch, Loss, Metrics
from trainer.workdir import Workdir

log = logging.getLogger(__name__)


class Trainer:
    """Trains one model on one dataset over one mesh.

    A subclass, whole:

        class Regression(Trainer):
            def build_model(self, rngs):
                return nnx.Linear(8, 1, rngs=rngs)

            def forward(self, model, batch):
                return model(batch["x"])[:, 0]

            def loss(self, outputs, batch):
                return Loss((outputs - batch["y"]) ** 2)

    Attributes:
      config: what the run is.
      mesh: over which devices.
      num_steps: updates of the whole run.
      state: the TrainState; None until `fit`, `evaluate` or `predict` needs it.
    """

    # ---- What a task says ----------------------------------------------------------------------------------------

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model, its parameters drawn from `rngs`. Default: `config.model.build(rngs)`."""
        if self.config.model is None:
            raise UserError(f"{type(self).__name__} has no model: set config.model, or override build_model")
        return self.config.model.build(rngs)

    def forward(self, model: nnx.Module, batch: Batch) -> Any:
        """The model's outputs for a batch: what `loss` and `metrics` see and `predict` returns.

        Args:
          model: in training or evaluation mode; its random layers are seeded from the run's seed and the step.
          batch: feature → array[batch, ...], and "mask": bool[batch], false for rows that only fill up the batch.
        """
        raise UserError(f"{type(self).__name__} must define forward(self, model, batch)")

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Losses, and weights if they differ, per element: never a mean."""
        raise UserError(f"{type(self).__name__} must define loss(self, outputs, batch)")

    def metrics(self, outputs: Any, batch: Batch) -> Metrics:
        """clu metrics besides the loss, by name; each must be given `mask=batch["mask"]`."""
        return {}

    def sharding_rules(self) -> Rules:
        """`(pattern, PartitionSpec)`. Default: the config's, else the model's own, else a copy on every device."""
        if self.config.sharding.rules is not None:
            return self.config.sharding.rules
        return REPLICATE if self.config.model is None else self.config.model.sharding_rules()

    def hooks(self) -> Sequence[Hook]:
        """The task's own hooks; they run before the checkpoint, and their state is saved in it."""
        return ()

    def writers(self) -> Sequence[Any]:
        """The task's own `clu.metric_writers.MetricWriter`s; each gets a thread of its own."""
        return ()

    # ---- What a user calls ---------------------------------------------------------------------------------------

    def __init__(
        self,
        config: Config,
        workdir: epath.PathLike | None = None,
        *,
        accept_config_change: bool = False,
        devices: Sequence[jax.Device] | None = None,
    ):
        """Checks everything and allocates nothing.

        Args:
          config: checked anew, since it may have been changed after it was built.
          workdir: the run's folder; None: nothing is written.
          accept_config_change: go on in a workdir whose run had other numbers.
          devices: default: all.

        Raises:
          UserError: for whatever cannot work, before any device does.
        """
        self.config = config = rebuild(config)
        if config.deterministic:
            runtime.check_deterministic_operations()
        self.mesh = make_mesh(config.mesh, devices)
        check_batch_size(config, num_batch_shards(self.mesh))
        self._data = open_pipeline(config.data, config.batch_size, config.seed, "")
        length = Calendar(config.batch_size, self._data.num_examples)
        self.num_steps = length.steps(config.train_for, "train_for")
        if self.num_steps < 1:
            raise UserError(f"train_for: expected at least one step, found {config.train_for!r}")
        self._calendar = Calendar(config.batch_size, self._data.num_examples, self.num_steps)
        self._schedule = resolve_schedule(config.optimizer.schedule, self._calendar)
        self._rates = learning_rates(config.optimizer, self._calendar, self.num_steps)
        self._program = Program(self, self.mesh, self._data.element_spec)
        self._evaluations = [self._open_evaluation(index) for index in range(len(config.evals))]
        self._check_hooks()
        self._workdir = None if workdir is None else Workdir(workdir)
        if self._workdir is not None:
            self._workdir.check(config, self._schedule, self._data.fingerprint, accept_config_change)
        self.state: TrainState | None = None
        self._step = 0

    def fit(self) -> Stop:
        """Trains to the end, from the newest checkpoint of the workdir if there is one.

        Returns:
          Why it ended: finished, or stopped by a signal after a save.

        Raises:
          RunError: what went wrong, with the exit code for it.
        """
        with contextlib.ExitStack() as stack:
            request = stack.enter_context(listen())
            checkpoints = self._checkpoints()
            if checkpoints is not None:
                stack.callback(checkpoints.close)
            state, saved = self._resume(checkpoints)
            if self._step >= self.num_steps:
                return Stop(f"finished: {self._step} steps", finished=True)
            recorder, stopwatch = Recorder(), Stopwatch()
            hooks = self._all_hooks(recorder, stopwatch, checkpoints)
            for hook in hooks:
                if hook.name in saved:
                    hook.restore(saved[hook.name])
                if (ended := hook.ended()) is not None:
                    return ended
            self._announce()
            self._open(recorder)
            stack.callback(recorder.close)
            batches = stack.enter_context(contextlib.closing(self._batches(state)))
            clock = Clock(self.config.batch_size, stopwatch)
            progress = ProgressHook(self._step, self.num_steps, clock, get_console())
            stack.callback(progress.close)
            self.state, self._step, stop = run_loop(
                self._program.train_step,
                state,
                batches,
                self._rates,
                [progress, *hooks],
                start=self._step,
                requested=lambda: request.stop,
                stopwatch=stopwatch,
            )
            return stop

    def layout_table(self) -> Table:
        """Where every parameter goes, and what it takes: print it with rich."""
        return layout_table(self._program.layout, self.sharding_rules(), self._program.state, self.mesh)

    def evaluate(self) -> dict[str, float]:
        """The metrics of every evaluation, by `"name/metric"`, for the present state.

        Raises:
          UserError: if the config has no evaluations.
        """
        if not self._evaluations:
            raise UserError("evaluate: config.evals is empty; add an EvalConfig")
        state = self._ensure_state()
        return {
            f"{evaluation.name}/{metric}": value
            for evaluation in self._evaluations
            for metric, value in evaluation(state).items()
        }

    def predict(self, batch: Mapping[str, Any]) -> Any:
        """What `forward` gives for a batch in evaluation mode, as numpy arrays.

        Args:
          batch: feature → array[n, ...] for any n, as it comes out of preprocessing.

        Raises:
          UserError: if the features differ in length.
        """
        rows = {name: np.asarray(values) for name, values in batch.items()}
        sizes = {name: len(values) for name, values in rows.items()}
        size = max(sizes.values(), default=0)
        if size == 0 or min(sizes.values()) != size:
            raise UserError(f"predict: expected features of one length ≥ 1, found {sizes}")
        padded = padded_batch_size(size, num_batch_shards(self.mesh))
        rows["mask"] = np.ones(size, bool)
        rows = {
            name: np.pad(values, [(0, padded - size)] + [(0, 0)] * (values.ndim - 1)) for name, values in rows.items()
        }
        outputs = self._program.predict_step(self._ensure_state(), to_device(rows, self.mesh, padded))
        return jax.tree.map(lambda output: output[:size], jax.device_get(outputs))

    # ---- You can skip the rest -----------------------------------------------------------------------------------

    def _open_evaluation(self, index: int) -> Evaluation:
        config = self.config.evals[index]
        size = padded_batch_size(config.batch_size or self.config.batch_size, num_batch_shards(self.mesh))
        pipeline = open_pipeline(config.data, size, self.config.seed, f"evals[{index}].")
        batch = abstract_batch(pipeline.element_spec, self.mesh, size)
        self._program.trace_evaluation(batch, f"evals[{index}]: ")
        return Evaluation(config.name, pipeline, size, self.mesh, self._program.eval_step)

    def _check_hooks(self) -> None:
        config = self.config
        known = self._program.eval_metrics
        if config.checkpoint.best is not None:
            check_monitored(config.checkpoint.best, known, "checkpoint.best")
        if config.early_stopping is not None:
            check_monitored(config.early_stopping.metric, known, "early_stopping.metric")
        intervals = {"log.every": config.log.every, "checkpoint.every": config.checkpoint.every}
        intervals |= {f"evals[{index}].every": evaluation.every for index, evaluation in enumerate(config.evals)}
        self._intervals = {where: self._calendar.steps(every, where) for where, every in intervals.items()}
        for where, steps in self._intervals.items():
            if steps < 1:
                raise UserError(f"{where}: expected at least one step, found {intervals[where]!r}")

    def _checkpoints(self) -> Checkpoints | None:
        if self._workdir is None:
            return None
        return Checkpoints(self._workdir.checkpoints, self.config.checkpoint, self.mesh)

    def _ensure_state(self) -> TrainState:
        return self._resume(self._checkpoints())[0] if self.state is None else self.state

    def _resume(self, checkpoints: Checkpoints | None) -> tuple[TrainState, Mapping[str, Any]]:
        """The state to go on from, which `self.state` and `self._step` become, and that of the hooks by name.

        With a workdir what counts is on disk, also for a second `fit`; without one it is the state in memory.
        """
        restored = None if checkpoints is None else checkpoints.restore(self._program.state)
        if restored is not None:
            self.state, self._step = restored.state, restored.step
            log.info(f"continuing after step {self._step:,}")
            return restored.state, restored.hooks
        if self.state is None or checkpoints is not None:
            self.state, self._step = self._program.create_state(self.config.seed), 0
        return self.state, {}

    def _batches(self, state: TrainState) -> Prefetcher:
        start = self._step + int(state.batch_offset)
        stream = self._data.batches(start=start, rows=local_rows(self.mesh, self.config.batch_size))
        return Prefetcher(stream, self.mesh, self.config.batch_size)

    def _announce(self) -> None:
        sizes = [leaf.size for leaf in self._program.model_def.params.values()]
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "1 device"
        log.info(
            f"{sum(sizes):,} parameters in {len(sizes)} arrays; {self._data.num_examples:,} examples; "
            f"step {self._step:,} of {self.num_steps:,}, {self.config.batch_size} examples each; {axes}"
        )

    def _open(self, recorder: Recorder) -> None:
        """Opens the run's files, on one host."""
        if jax.process_index() > 0:
            return
        if self._workdir is None:
            recorder.open(None, self.writers())
            return
        self._workdir.describe(self.config, self._schedule, self.mesh, self._data.fingerprint)
        file, tensorboard = self._workdir.open_metrics(self._step, self.config.log.tensorboard)
        recorder.open(file, [*self.writers(), *tensorboard])

    def _all_hooks(self, recorder: Recorder, stopwatch: Stopwatch, checkpoints: Checkpoints | None) -> list[Hook]:
        config, every = self.config, self._intervals
        evaluates = [
            EvaluateHook(every[f"evals[{index}].every"], evaluation, recorder)
            for index, evaluation in enumerate(self._evaluations)
        ]
        first, others = evaluates[:1], evaluates[1:]
        early = [EarlyStoppingHook(config.early_stopping, first[0])] if config.early_stopping else []
        clock = Clock(config.batch_size, stopwatch)
        logs = LogHook(every["log.every"], MetricSums(self._program.train_metrics), recorder, clock)
        hooks: list[Hook] = [*first, *early, logs, *others, *self.hooks()]
        if checkpoints is not None:
            watched, every_save = (first[0] if first else None), every["checkpoint.every"]
            hooks.append(CheckpointHook(every_save, config.checkpoint, checkpoints, recorder, hooks, watched))
        names = [hook.name for hook in hooks]
        if len(set(names)) < len(names):
            raise UserError(f"hooks: names must differ, found {names}; set `name` in the class of each")
        return hooks
