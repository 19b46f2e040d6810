"""An NNX model taken apart into flat dicts of arrays, and put together again inside a trace.

The step is a plain `jax.jit` over dicts keyed by path (`"stages/0/conv/kernel"`): one list of patterns then serves
the params, their moments and the checkpoint, and dispatch costs what a pytree costs (`nnx.jit` takes 15-20 times
more Python per call). The graph definition stays here, outside the state.
"""

from collections.abc import Callable

import jax
from flax import nnx

Arrays = dict[str, jax.Array]
Shapes = dict[str, jax.ShapeDtypeStruct]


class ModelDef:
    """What `build` builds, without its arrays.

    Random streams inside the model (`nnx.Dropout(rngs=rngs)`) are no part of the state: `merge` seeds them anew
    from a key, so that every mask is a function of that key alone.

    Attributes:
      params: path → shape and dtype of each `nnx.Param`.
      model_state: the same of every other variable, such as BatchNorm's statistics.
    """

    def __init__(self, build: Callable[[nnx.Rngs], nnx.Module]):
        """Traces `build` without allocating anything.

        Args:
          build: makes the model from an `nnx.Rngs`; called again under `jax.jit` by `init`.
        """
        self._build = build
        self._graphdef, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        self._variables = {_name(path): (path, variable) for path, variable in nnx.to_flat_state(state)}
        self.params = self._shapes(nnx.Param)
        self.model_state = {
            name: shape
            for name, shape in self._shapes(nnx.Variable).items()
            if name not in self.params and name not in self._shapes(nnx.RngState)
        }

    def _shapes(self, kind: type[nnx.Variable]) -> Shapes:
        return {
            name: jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for name, (_, variable) in self._variables.items()
            if isinstance(variable, kind)
        }

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """Fresh `(params, model_state)` drawn from `key`."""
        return self.split(self._build(nnx.Rngs(key)))

    def split(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """The `(params, model_state)` that `model` holds now."""
        arrays = {_name(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
        return (
            {name: arrays[name] for name in self.params},
            {name: arrays[name] for name in self.model_state},
        )

    def merge(self, params: Arrays, model_state: Arrays, key: jax.Array) -> nnx.Module:
        """A new model that holds these arrays and draws its randomness from `key`."""
        arrays = {**self._seed_streams(key), **model_state, **params}
        leaves = [(path, variable.replace(arrays[name])) for name, (path, variable) in self._variables.items()]
        return nnx.merge(self._graphdef, nnx.from_flat_state(leaves))

    def _seed_streams(self, key: jax.Array) -> Arrays:
        streams = {}
        for number, (name, shape) in enumerate(self._shapes(nnx.RngState).items()):
            if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
                stream = jax.random.fold_in(key, number)
                streams[name] = jax.random.split(stream, shape.shape) if shape.shape else stream
            else:
                streams[name] = jax.numpy.zeros(shape.shape, shape.dtype)
        return streams


def _name(path: tuple[object, ...]) -> str:
    name = "/".join(map(str, path))
    if "." in name:
        raise ValueError(f"the model has a variable named {name!r}; a name must not hold '.', rename it")
    return name
