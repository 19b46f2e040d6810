"""Metrics on their way from the device to `metrics.jsonl`, TensorBoard and the user's own writers.

clu's metrics are small sums on the device (float32, int32). What is added over many steps is added here, on the
host, in float64 and int64.
"""

import functools
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from clu import metrics as clu_metrics
from etils import epath

from trainer.errors import UserError

log = logging.getLogger(__name__)

Values = Mapping[str, float]


class MetricSums:
    """clu metrics merged over steps, in 64-bit on the host."""

    def __init__(self, template: Mapping[str, clu_metrics.Metric]):
        """`template` gives the names and the structure; its leaves may be abstract."""
        self._treedef = jax.tree.structure(dict(template))
        self._merged: dict[str, clu_metrics.Metric] | None = None

    def add(self, metrics: Mapping[str, clu_metrics.Metric]) -> None:
        """Merges the metrics of one more step; waits for the device if they are not computed yet."""
        new = jax.tree.map(_widen, jax.device_get(dict(metrics)))
        merged = self._merged
        self._merged = new if merged is None else {name: merged[name].merge(new[name]) for name in new}

    def take(self) -> dict[str, float]:
        """The values since the last `take`, and starts anew. Empty if nothing was added."""
        merged, self._merged = self._merged or {}, None
        with np.errstate(invalid="ignore"):
            return {name: _scalar(name, metric.compute()) for name, metric in merged.items()}

    def state(self) -> list[Any] | None:
        """The sums so far, as JSON."""
        if self._merged is None:
            return None
        return [[str(leaf.dtype), leaf.tolist()] for leaf in jax.tree.leaves(self._merged)]

    def restore(self, state: list[Any] | None) -> None:
        """Goes on from what `state` returned."""
        leaves = None if state is None else [np.asarray(values, dtype) for dtype, values in state]
        self._merged = None if leaves is None else jax.tree.unflatten(self._treedef, leaves)


def _widen(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.astype(np.int64 if np.issubdtype(leaf.dtype, np.integer) else np.float64)


def _scalar(name: str, value: Any) -> float:
    if np.size(value) != 1:
        raise UserError(f"metric {name!r} computes an array of shape {np.shape(value)}; a metric must be one number")
    return float(np.asarray(value).reshape(()))


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, `step`, `split` and values.

    Written and flushed at once, by one process. A value that is not finite is written as the string "nan", "inf" or
    "-inf", since JSON has no such numbers.
    """

    def __init__(self, path: epath.Path):
        self._path = path

    def cut(self, step: int) -> None:
        """Drops every line after `step`, and a last line that a kill left incomplete."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        partial = self._path.with_name(self._path.name + ".tmp")
        partial.write_text("".join(kept))
        partial.replace(self._path)

    def write(self, step: int, split: str, values: Values) -> None:
        """Appends one line."""
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "split": split, **finite}) + "\n")

    def sync(self) -> None:
        """Returns when all lines are on the disk."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                os.fsync(file.fileno())


class Recorder:
    """Sends each line of values to `metrics.jsonl` and to clu metric writers.

    The file is written at once. The writers run in threads of their own (clu's AsyncWriter), so that a slow one
    never holds up a step.
    """

    def __init__(self) -> None:
        self._file: MetricsFile | None = None
        self._writers: list[Any] = []
        self._failures = 0

    def open(self, file: MetricsFile | None, writers: Sequence[Any]) -> None:
        """Starts to record; before it nothing is written.

        Args:
          file: `metrics.jsonl`, or None.
          writers: `clu.metric_writers.MetricWriter`s; each gets a thread of its own.
        """
        self._file = file
        self._writers = [_in_background(writer) for writer in writers]

    def write(self, step: int, split: str, values: Values) -> None:
        """Records `values` of `split` after `step` updates."""
        if self._file is not None:
            self._file.write(step, split, values)
        named = {f"{split}/{name}": value for name, value in values.items()}
        for writer in self._writers:
            self._try(functools.partial(writer.write_scalars, step, named))

    def sync(self) -> None:
        """Returns when all lines of `metrics.jsonl` are on the disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Waits for the writers and closes them."""
        for writer in self._writers:
            self._try(writer.close)

    def _try(self, call: Callable[[], None]) -> None:
        """A writer that fails does not end the run: `metrics.jsonl` has every line."""
        try:
            call()
        except Exception as error:
            if not self._failures:
                log.warning("a metric writer failed, training goes on: %s", error)
            self._failures += 1


def _in_background(writer: Any) -> Any:
    from clu import metric_writers  # Imports TensorFlow, 3 s.

    return metric_writers.AsyncWriter(writer)


def check_monitored(name: str, known: Mapping[str, Any], where: str) -> None:
    """Raises a UserError if `name` is not among the metrics that an evaluation gives."""
    if name not in known:
        raise UserError(f"{where}: unknown metric {name!r}; the evaluation gives {', '.join(sorted(known))}")
