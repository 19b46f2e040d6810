"""The program of a run: its pure functions compiled for a mesh, and the shapes of all that flows through them."""

import dataclasses
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from trainer.config import Config
from trainer.errors import UserError
from trainer.mesh import batch_sharding, replicated
from trainer.model_def import ModelDef
from trainer.optimizer import Optimizer
from trainer.sharding import Rules, make_layout
from trainer.state import TrainState, abstract_state, create_state, flatten_state, make_init
from trainer.step import Task, make_eval_step, make_predict_step, make_train_step

_T = TypeVar("_T")


class Experiment(Task, Protocol):
    """The part of a Trainer that the program is made of."""

    config: Config

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model."""

    def sharding_rules(self) -> Rules:
        """Where its parameters go."""


@dataclasses.dataclass(frozen=True)
class MeshFunction:
    """A jitted function that is traced and called with its mesh set, so that a model may name the mesh's axes."""

    function: jax.stages.Wrapped
    mesh: Mesh

    def __call__(self, *arguments: Any) -> Any:
        """Runs it, compiling on the first call."""
        with jax.set_mesh(self.mesh):
            return self.function(*arguments)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """As `jax.jit`'s."""
        with jax.set_mesh(self.mesh):
            return self.function.lower(*arguments)

    def eval_shape(self, *arguments: Any) -> Any:
        """The shapes of what it returns."""
        with jax.set_mesh(self.mesh):
            return jax.eval_shape(self.function, *arguments)


class Program:
    """Compiled on first use; construction only traces.

    Attributes:
      model_def: the model without its arrays.
      layout: where each parameter goes.
      state: the abstract TrainState: shapes, dtypes, shardings.
      batch: the abstract global batch.
      train_step: `(state, batch, learning_rate) → (state, metrics)`; donates `state`.
      eval_step: `(state, batch) → metrics`.
      predict_step: `(state, batch) → outputs`.
      train_metrics, eval_metrics: abstract metrics by name.
    """

    def __init__(self, task: Experiment, mesh: Mesh, element: Mapping[str, tuple[tuple[int, ...], np.dtype]]):
        """Traces every function once.

        Args:
          task: what is trained.
          mesh: where.
          element: feature → shape and dtype of one example.

        Raises:
          UserError: for rules, patterns or optimizer arguments that do not fit the model, and for a model or loss that
            cannot take the batch.
        """
        config = task.config
        ema = None if config.ema_decay is None else optax.ema(config.ema_decay)
        self.mesh = mesh
        self.model_def = _call("building the model", ModelDef, task.build_model)
        self.layout = make_layout(config.sharding, task.sharding_rules(), self.model_def.params, mesh)
        optimizer = Optimizer(config.optimizer, self.model_def.params)
        self._init = make_init(self.model_def, optimizer, ema)
        self.state = abstract_state(self._init, self.layout, mesh)
        self.batch = abstract_batch(element, mesh, config.batch_size)

        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        grads = {path: NamedSharding(mesh, self.layout.mirrors[path]) for path in optimizer.trainable}
        train_step = make_train_step(task, self.model_def, optimizer, ema, grads, config.num_micro_batches)
        train_jit = jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, replicated(mesh)))
        self.train_step = MeshFunction(train_jit, mesh)
        eval_step = make_eval_step(task, self.model_def, config.ema_decay)
        self.eval_step = MeshFunction(jax.jit(eval_step, out_shardings=replicated(mesh)), mesh)
        predict_step = make_predict_step(task, self.model_def, config.ema_decay)
        self.predict_step = MeshFunction(jax.jit(predict_step, out_shardings=replicated(mesh)), mesh)

        rate = jax.ShapeDtypeStruct((), np.float32)
        state, self.train_metrics = self._trace("a training step", self.train_step, self.batch, rate)
        _check_same_structure(self.state, state)
        self.eval_metrics = self.trace_evaluation(self.batch)

    def trace_evaluation(self, batch: Mapping[str, jax.ShapeDtypeStruct], where: str = "") -> dict[str, Any]:
        """The abstract metrics of `batch`.

        Raises:
          UserError: if model, loss or metrics cannot take it; `where` says which evaluation it is of.
        """
        return self._trace(f"{where}an evaluation step", self.eval_step, batch)

    def _trace(self, what: str, step: MeshFunction, batch: Mapping[str, Any], *arguments: Any) -> Any:
        features = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in batch.items())
        return _call(f"{what} on a batch of {features}", step.eval_shape, self.state, batch, *arguments)

    def create_state(self, seed: int) -> TrainState:
        """A fresh state on the mesh."""
        return create_state(self._init, self.state, seed)


def abstract_batch(
    element: Mapping[str, tuple[tuple[int, ...], np.dtype]], mesh: Mesh, batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """The global batch as the step sees it, the mask included."""
    features = {**element, "mask": ((), np.dtype(bool))}
    return {
        name: jax.ShapeDtypeStruct(
            (batch_size, *shape), jax.dtypes.canonicalize_dtype(dtype), sharding=batch_sharding(mesh)
        )
        for name, (shape, dtype) in features.items()
    }


def _call(what: str, function: Callable[..., _T], *arguments: Any) -> _T:
    """Calls into the user's model or loss; what it raises becomes one message that names the user's own line."""
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:
        libraries = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)
        ]
        place = f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}"
        raise UserError(f"{what} failed in {place}\n{type(error).__name__}: {error}") from error


def _check_same_structure(before: TrainState, after: TrainState) -> None:
    """A step must give back the state it got, or the next one would compile anew."""
    wanted = flatten_state(before)
    for path, leaf in flatten_state(after).items():
        if path not in wanted or (leaf.shape, leaf.dtype) != (wanted[path].shape, wanted[path].dtype):
            was = f"{wanted[path].dtype}{list(wanted[path].shape)}" if path in wanted else "absent"
            raise UserError(
                f"a training step changes {path} from {was} to {leaf.dtype}{list(leaf.shape)}; "
                "the model must keep the shapes and dtypes of its variables"
            )
