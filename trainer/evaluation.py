"""A dataset → exact metrics: every example counts once, whatever the batch size and the number of devices."""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from data import DataConfig, Pipeline
from trainer.errors import UserError
from trainer.mesh import local_rows
from trainer.metrics import MetricSums
from trainer.prefetch import Prefetcher
from trainer.state import TrainState
from trainer.step import Batch, Metrics


@dataclasses.dataclass
class EvalConfig:
    """One evaluation.

    Attributes:
      data: what is evaluated; read once in order, never shuffled.
      name: its `split` in `metrics.jsonl`.
      every: how often, a duration; also at the end of the run.
      batch_size: None: the batch size of training. The last batch is padded and masked.
    """

    data: DataConfig
    name: str = "test"
    every: str = "1 epoch"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.name == "train" or not self.name or "/" in self.name:
            raise UserError(f"evals: expected a name other than 'train' and without '/', found {self.name!r}")
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"evals, {self.name!r}: expected a batch_size ≥ 1 or None, found {self.batch_size}")


class Evaluation:
    """Computes the metrics of one dataset."""

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        batch_size: int,
        mesh: Mesh,
        eval_step: Callable[[TrainState, Batch], Metrics],
    ):
        """`batch_size` must divide over the mesh's batch axes; `pipeline` is built with it."""
        self.name = name
        self._pipeline = pipeline
        self._batch_size = batch_size
        self._mesh = mesh
        self._eval_step = eval_step

    def __call__(self, state: TrainState) -> dict[str, float]:
        """The value of each metric over the whole dataset. Reads one batch behind; changes nothing in `state`."""
        rows = local_rows(self._mesh, self._batch_size)
        batches = Prefetcher(self._pipeline.eval_batches(rows=rows), self._mesh, self._batch_size)
        sums, pending = None, None
        try:
            while (batch := batches.get()) is not None:
                metrics = self._eval_step(state, batch)
                sums = sums or MetricSums(metrics)
                if pending is not None:
                    sums.add(pending)
                pending = metrics
        finally:
            batches.close()
        assert sums is not None and pending is not None, "a pipeline is never empty"
        sums.add(pending)
        return sums.take()


def padded_batch_size(batch_size: int, num_shards: int) -> int:
    """The next size that divides over the devices; evaluation pads what is missing."""
    return -(-batch_size // num_shards) * num_shards
