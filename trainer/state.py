"""TrainState: all that changes in a run, one pytree, born sharded."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from trainer.model_def import Arrays, ModelDef
from trainer.optimizer import Optimizer
from trainer.sharding import Layout, state_shardings


@struct.dataclass
class TrainState:
    """All that a run needs to go on in the same bits.

    Attributes:
      step: int32[], updates done.
      batch_offset: int32[], batches that the data stream is ahead of `step`.
      params: path → array.
      model_state: path → array, what the model keeps besides parameters (BatchNorm's statistics).
      opt_state: Optax's state of the trainable params.
      ema: Optax's exponential moving average of the params, or None.
      rng: uint32[2], the key data of the run; step n draws from `fold_in(rng, n)`.
    """

    step: jax.Array
    batch_offset: jax.Array
    params: Arrays
    model_state: Arrays
    opt_state: Any
    ema: optax.EmaState | None
    rng: jax.Array

    @property
    def key(self) -> jax.Array:
        """The key of the next step's randomness."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.rng), self.step)


def make_init(
    model_def: ModelDef, optimizer: Optimizer, ema: optax.GradientTransformation | None
) -> Callable[[jax.Array], TrainState]:
    """A function key → TrainState at step 0, to be traced by `jax.eval_shape` and `jax.jit`."""

    def init(key: jax.Array) -> TrainState:
        init_key, run_key = jax.random.split(key)
        params, model_state = model_def.init(init_key)
        return TrainState(
            step=jnp.int32(0),
            batch_offset=jnp.int32(0),
            params=params,
            model_state=model_state,
            opt_state=optimizer.init(params),
            ema=ema and ema.init(params),
            rng=jax.random.key_data(run_key),
        )

    return init


def abstract_state(init: Callable[[jax.Array], TrainState], layout: Layout, mesh: Mesh) -> TrainState:
    """The state's shapes, dtypes and shardings; nothing is allocated."""
    shapes = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, layout, mesh),
    )


def create_state(init: Callable[[jax.Array], TrainState], abstract: TrainState, seed: int) -> TrainState:
    """The state at step 0; each device computes only its own part of it."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))


def flatten_state(state: TrainState) -> dict[str, Any]:
    """Path → leaf, in path order: `"params/head/kernel"`, `"opt_state/1/0/mu/head/kernel"`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return dict(sorted(named.items()))


def unflatten_state(abstract: TrainState, leaves: Mapping[str, Any]) -> TrainState:
    """The inverse of `flatten_state` for the structure of `abstract`."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    return jax.tree_util.tree_unflatten(treedef, [leaves[name] for name in names])
