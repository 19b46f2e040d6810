"""The folder of a run: what belongs to it, and whether a config may go on in it.

config.json     what the run was started with      metrics.jsonl   what it measured
manifest.json   versions, devices, data            tensorboard/    the same for TensorBoard
                                                   checkpoints/
"""

import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, PartitionSpec

from trainer.config import Config
from trainer.errors import UserError
from trainer.manifest import write_atomically
from trainer.metrics import MetricsFile

_NUMBERS = ("trainer", "model", "data", "batch_size", "num_micro_batches", "optimizer", "ema_decay", "seed")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "numpy")


class Workdir:
    """The files of one run below one folder."""

    def __init__(self, path: epath.PathLike):
        self.path = epath.Path(path).expanduser().resolve()
        self._metrics = self.path / "metrics.jsonl"
        self._tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self._config = self.path / "config.json"
        self._manifest = self.path / "manifest.json"

    def check(
        self, config: Config, schedule: Mapping[str, Any], data: Mapping[str, Any], accept_config_change: bool
    ) -> None:
        """Makes the folder and compares `config` with that of the run in it, if there is one.

        Args:
          config: of this start.
          schedule: the schedule's arguments in steps, since a duration such as '100%' depends on the run's length.
          data: fingerprint of the training data.
          accept_config_change: go on although the numbers will differ.

        Raises:
          UserError: if the folder cannot be written, or holds a run whose numbers differ: the fields that do.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / ".writable", "")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise UserError(
                f"the workdir {self.path} cannot be written: {error}; choose another with --workdir"
            ) from error
        if not self._config.exists():
            return
        try:
            before = json.loads(self._config.read_text())["numbers"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._config} cannot be read: {error}; restore it or use another --workdir") from error
        changes = _changes(_flatten(before), _flatten(_numbers(config, schedule, data)))
        if changes and not accept_config_change:
            raise UserError(
                f"{self.path} holds a run whose numbers differ from this config:\n"
                + "\n".join(f"  {change}" for change in changes)
                + "\nuse another --workdir, or go on with the new values with --accept_config_change"
            )

    def describe(self, config: Config, schedule: Mapping[str, Any], mesh: Mesh, data: Mapping[str, Any]) -> None:
        """Writes `config.json` and `manifest.json`."""
        if jax.process_index() > 0:
            return
        text = json.dumps({"config": describe(config), "numbers": _numbers(config, schedule, data)}, indent=1)
        write_atomically(self._config, text)
        manifest = {
            "command": sys.argv,
            "python": platform.python_version(),
            "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "devices": {"count": mesh.devices.size, "kind": mesh.devices.flat[0].device_kind},
            "mesh": dict(mesh.shape),
            "processes": jax.process_count(),
            "data": data,
        }
        write_atomically(self._manifest, json.dumps(manifest, indent=1))

    def open_metrics(self, step: int, tensorboard: bool) -> tuple[MetricsFile, list[Any]]:
        """`metrics.jsonl`, cut to `step`, and a list of the clu writer for TensorBoard if it is wanted."""
        file = MetricsFile(self._metrics)
        file.cut(step)
        if not tensorboard:
            return file, []
        from clu import metric_writers  # Imports TensorFlow, 3 s.

        return file, [metric_writers.SummaryWriter(str(self._tensorboard))]


def _numbers(config: Config, schedule: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """What alters the numbers of a run, as JSON; lengths, intervals, layout and logging do not."""
    numbers = {name: describe(getattr(config, name)) for name in _NUMBERS}
    numbers["optimizer"]["schedule"]["arguments"] = describe(schedule)
    numbers["data"]["fingerprint"] = data
    return json.loads(json.dumps(numbers))


def describe(value: Any) -> Any:
    """`value` as JSON: dataclasses by their fields, code as `module:qualname`, arrays by shape and dtype."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": _qualname(type(value)), **fields}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PartitionSpec):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}{list(value.shape)}"
    return _qualname(value if hasattr(value, "__qualname__") else type(value))


def _qualname(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _flatten(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if not items:
        return {path: tree}
    return {name: leaf for key, item in items for name, leaf in _flatten(item, f"{path}.{key}".lstrip(".")).items()}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    absent = "(absent)"
    return [
        f"{name}: {before.get(name, absent)!r} → {now.get(name, absent)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, absent) != now.get(name, absent)
    ]
