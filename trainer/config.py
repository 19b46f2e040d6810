"""The Config tree: what the user wrote. Assembled here from the dataclasses that stand beside the code they configure.

    load_config("configs/resnet.py:cifar10", {"optimizer.learning_rate": "0.3"})

`load_config` reads the file, sets the overrides and rebuilds the tree, so that every `__post_init__` sees the final
values. Config classes are mutable and keep their annotations as types (no `from __future__ import annotations`).
"""

import dataclasses
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data import DataConfig
from trainer.checkpoint import CheckpointConfig
from trainer.errors import UserError
from trainer.evaluation import EvalConfig
from trainer.hooks import EarlyStoppingConfig, LogConfig
from trainer.mesh import MeshConfig
from trainer.optimizer import OptimizerConfig
from trainer.overrides import override, rebuild
from trainer.sharding import ShardingConfig, nearest_multiples


@dataclasses.dataclass
class Config:
    """One experiment.

    Attributes:
      data: what is trained on.
      train_for: length of the run, a duration: '90 epochs', '500 steps', '1e7 examples'.
      batch_size: examples of one update, over all devices and micro-batches.
      trainer: the Trainer subclass that `train.py` runs.
      model: the dataclass beside the model; None if the Trainer builds its model itself.
      evals: the evaluations; `checkpoint.best` and `early_stopping` watch the first.
      optimizer, mesh, sharding, checkpoint, log: see their classes.
      early_stopping: None: the run goes on to its end.
      num_micro_batches: the batch is worked off in so many parts, for less memory.
      ema_decay: decay of the moving average of the params, which is then what is evaluated; None: no average.
      deterministic: on GPUs, operations that give the same bits every time, at some cost; without it a resumed run
        equals the straight one to rounding. CPUs and TPUs are deterministic anyway.
      seed: of initialisation, order, augmentation and dropout.
    """

    data: DataConfig
    train_for: str
    batch_size: int
    trainer: type | None = None
    model: Any = None
    evals: tuple[EvalConfig, ...] = ()
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    early_stopping: EarlyStoppingConfig | None = None
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    num_micro_batches: int = 1
    ema_decay: float | None = None
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("batch_size", "num_micro_batches"):
            if getattr(self, field) < 1:
                raise UserError(f"{field}: expected a number ≥ 1, found {getattr(self, field)}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed: expected 0 ≤ seed < 2**32, found {self.seed}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise UserError(f"ema_decay: expected a number between 0 and 1, or None, found {self.ema_decay}")
        if self.model is not None and not all(hasattr(self.model, name) for name in ("build", "sharding_rules")):
            raise UserError(
                f"model: expected a model config with build(rngs) and sharding_rules(), found {self.model!r}; None if "
                "the Trainer overrides build_model"
            )
        names = [evaluation.name for evaluation in self.evals]
        if len(set(names)) < len(names):
            raise UserError(f"evals: names must differ, found {names}")
        watching = {"checkpoint.best": self.checkpoint.best, "early_stopping": self.early_stopping}
        for field, value in watching.items():
            if value is not None and not self.evals:
                raise UserError(f"{field} watches the first evaluation, and evals is empty: add one or unset {field}")


def check_batch_size(config: Config, num_shards: int) -> None:
    """Raises a UserError if the batch does not divide over micro-batches and devices, with the sizes that do."""
    size, parts = config.batch_size, config.num_micro_batches
    if size < parts:
        raise UserError(f"num_micro_batches: {parts} micro-batches cannot be made of a batch_size of {size} examples")
    unit = parts * num_shards
    if size % unit:
        over = f"{num_shards} devices" + (f" in {parts} micro-batches" if parts > 1 else "")
        raise UserError(f"batch_size: {size} does not divide over {over}; {nearest_multiples(size, unit)}")


def load_config(spec: str, overrides: Mapping[str, str] | None = None) -> Config:
    """The config of a file, with overrides, checked.

    Args:
      spec: path of a Python file with a function `get_config([variant])`, and after a colon the variant.
      overrides: path of a field → text, as on the command line.

    Raises:
      UserError: for a missing file, an error inside it, an unknown variant or field, a value of the wrong type.
    """
    path, _, variant = spec.partition(":")
    get_config = _load_function(Path(path).expanduser())
    takes_variant = bool(inspect.signature(get_config).parameters)
    if variant and not takes_variant:
        raise UserError(f"{path} has no variants, found ':{variant}'")
    try:
        config = get_config(variant) if variant else get_config()
    except UserError as error:
        raise UserError(f"{spec}: {error}") from error
    except Exception as error:
        raise UserError(f"{spec}: get_config failed: {_describe(error)}") from error
    if not isinstance(config, Config):
        raise UserError(f"{spec}: expected get_config to return a trainer.Config, found {type(config).__name__}")
    override(config, overrides or {})
    return rebuild(config)


def _load_function(path: Path) -> Callable[..., Any]:
    path = path.resolve()
    if not path.is_file():
        nearby = sorted(file.name for file in path.parent.glob("*.py") if file.name != "__init__.py")
        raise UserError(f"no config file {str(path)!r}; {path.parent} holds {', '.join(nearby) or 'no config'}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # A config may import what lies beside it.
    loaded = sys.modules.get(path.stem)
    own = loaded is None or getattr(loaded, "__file__", None) == str(path)
    module_spec = importlib.util.spec_from_file_location(path.stem if own else f"config_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {_describe(error)}") from error
    if not callable(getattr(module, "get_config", None)):
        raise UserError(f"{path} has no function get_config")
    return module.get_config


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
