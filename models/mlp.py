"""A multilayer perceptron: the smallest model, for tests, examples and regression."""

import dataclasses
import math

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from models.checks import check_compute_dtype, check_positive_int


@dataclasses.dataclass
class MLPConfig:
    """Sizes of an `MLP`. Without hidden layers it is a linear model.

    >>> model = MLPConfig(in_features=64, hidden=(32,), out_features=10).build(nnx.Rngs(0))
    >>> model(jnp.ones((2, 8, 8, 1))).shape
    (2, 10)
    """

    in_features: int  # features of one example, all its dims multiplied
    hidden: tuple[int, ...]  # features of each hidden layer
    out_features: int
    dropout: float = 0.0  # probability that a hidden feature is zeroed while training
    batch_norm: bool = False  # normalise each hidden layer before its activation
    dtype: str = "float32"  # of the computation, "float32" or "bfloat16"; parameters are float32

    def __post_init__(self) -> None:
        """Raises ValueError for a size, a rate or a dtype that makes no model."""
        check_positive_int("MLPConfig.in_features", self.in_features, "Give the size of one example.")
        check_positive_int("MLPConfig.out_features", self.out_features, "Give the number of outputs.")
        if not isinstance(self.hidden, tuple | list):
            raise ValueError(
                f"MLPConfig.hidden: expected a tuple of layer sizes such as (64, 64); found {self.hidden!r}. "
                "One layer is written (64,), none is ()."
            )
        for index, features in enumerate(self.hidden):
            check_positive_int(f"MLPConfig.hidden[{index}]", features, "Give each hidden layer's features.")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"MLPConfig.dropout: expected a probability in [0, 1); found {self.dropout!r}. "
                "Give the share of features to zero; 0 turns dropout off."
            )
        check_compute_dtype("MLPConfig.dtype", self.dtype)

    def build(self, rngs: nnx.Rngs) -> "MLP":
        """The model with its parameters drawn from `rngs`, from which dropout takes its stream as well."""
        return MLP(self, rngs=rngs)

    def sharding_rules(self) -> tuple[tuple[str, P], ...]:
        """Hidden features are split over `model`; the head sums over the split ones. First match wins."""
        if not self.hidden:
            return ((r"head/.*", P()),)
        return (
            (r"blocks/\d+/linear/kernel", P(None, "model")),
            (r"blocks/\d+/(linear|norm)/.*", P("model")),
            (r"head/kernel", P("model", None)),
            (r"head/bias", P()),
        )


class HiddenBlock(nnx.Module):
    """Linear, optional BatchNorm, ReLU, optional dropout."""

    def __init__(self, in_features: int, out_features: int, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.dtype)
        self.linear = nnx.Linear(
            in_features,
            out_features,
            use_bias=not config.batch_norm,  # the norm subtracts a bias: its gradient would be pure noise
            kernel_init=nnx.initializers.he_normal(),
            dtype=dtype,
            rngs=rngs,
        )
        norm = nnx.BatchNorm(out_features, momentum=0.9, dtype=dtype, rngs=rngs)
        self.norm = norm if config.batch_norm else None
        # Only where it is used: a Dropout adds the state of its random stream to the model's.
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def __call__(self, x: Float[Array, "batch in_features"]) -> Float[Array, "batch out_features"]:
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x)
        x = nnx.relu(x)
        return x if self.dropout is None else self.dropout(x)


class MLP(nnx.Module):
    """Hidden blocks and a linear head. `train()` and `eval()` switch BatchNorm and dropout."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        self.in_features = config.in_features
        sizes = (config.in_features, *config.hidden)
        self.blocks = nnx.Dict(
            {
                str(index): HiddenBlock(sizes[index], sizes[index + 1], config, rngs=rngs)
                for index in range(len(config.hidden))
            }
        )
        self.head = nnx.Linear(sizes[-1], config.out_features, rngs=rngs)  # in float32, as the loss is

    def __call__(self, x: Float[Array, "batch ..."]) -> Float[Array, "batch out_features"]:
        """Float32 outputs of examples of any rank, which are flattened.

        Raises ValueError where an example's size is not `in_features`.
        """
        if math.prod(x.shape[1:]) != self.in_features:
            raise ValueError(
                f"MLP: expected examples of {self.in_features} features; found a batch of shape {x.shape}. "
                "Set MLPConfig.in_features to the product of the dims after the first."
            )
        x = x.reshape(x.shape[0], -1)
        for index in range(len(self.blocks)):  # by number: a merged Dict iterates "10" before "2"
            x = self.blocks[str(index)](x)
        return self.head(x.astype(jnp.float32))
