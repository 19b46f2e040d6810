"""ResNet v1.5 for images.

He et al. 2015, https://arxiv.org/abs/1512.03385, with a bottleneck's stride in its 3×3 convolution (v1.5) and
the initialisation of Goyal et al. 2017, https://arxiv.org/abs/1706.02677. Padding is that of the reference
implementations, kernel // 2 on every side, which is not "SAME" where the stride is 2.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from models.checks import check_choice, check_compute_dtype, check_positive_int

# depth → (bottleneck blocks?, blocks in each stage)
_LAYOUTS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}


@dataclasses.dataclass
class ResNetConfig:
    """Which ResNet. The defaults are the ResNet-50 of the literature, with 25,557,032 parameters.

    >>> config = ResNetConfig(depth=18, num_classes=10, stem="small")
    >>> nnx.eval_shape(lambda: config.build(nnx.Rngs(0))(jnp.ones((2, 32, 32, 3)))).shape
    (2, 10)
    """

    depth: int = 50  # convolutions and head on the longest path: 18, 34, 50, 101 or 152
    num_classes: int = 1000
    stem: str = "imagenet"  # 7×7 stride 2, then max-pool; "small", for up to 32 px: 3×3 stride 1
    width: int = 64  # features of the first stage; each later stage doubles them
    in_channels: int = 3
    dtype: str = "float32"  # of the computation, "float32" or "bfloat16"; parameters are float32

    def __post_init__(self) -> None:
        """Raises ValueError for a field that names no ResNet."""
        check_choice("ResNetConfig.depth", self.depth, _LAYOUTS, "For a smaller network lower `width`.")
        check_choice("ResNetConfig.stem", self.stem, ("imagenet", "small"), "Up to 32 px take 'small'.")
        check_positive_int("ResNetConfig.num_classes", self.num_classes, "Give the number of labels.")
        check_positive_int("ResNetConfig.width", self.width, "The literature's networks have 64.")
        check_positive_int("ResNetConfig.in_channels", self.in_channels, "Colour images have 3, grey ones 1.")
        check_compute_dtype("ResNetConfig.dtype", self.dtype)

    def build(self, rngs: nnx.Rngs) -> "ResNet":
        """The model with its parameters drawn from `rngs`."""
        return ResNet(self, rngs=rngs)

    def sharding_rules(self) -> tuple[tuple[str, P], ...]:
        """A residual branch's last two convolutions are split over `model`, by output then by input features.

        That leaves one sum over `model` per block and splits most of the weights (Shoeybi et al. 2019,
        https://arxiv.org/abs/1909.08053, for transformers). First match wins.
        """
        bottleneck, _ = _LAYOUTS[self.depth]
        split, summed = ("2", "3") if bottleneck else ("1", "2")
        block = r"stages/\d+/blocks/\d+"
        return (
            (rf"{block}/conv{split}/kernel", P(None, None, None, "model")),
            (rf"{block}/norm{split}/.*", P("model")),
            (rf"{block}/conv{summed}/kernel", P(None, None, "model", None)),
            (rf"{block}/.*", P()),
            (r"stem/.*", P()),
            (r"head/.*", P()),
        )


class ConvNorm(nnx.Module):
    """A convolution without bias and its BatchNorm, the part that stem and projection share."""

    def __init__(
        self, in_features: int, features: int, kernel: int, stride: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.conv = _conv(in_features, features, kernel, stride, dtype=dtype, rngs=rngs)
        self.norm = _norm(features, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "batch h w c_in"]) -> Float[Array, "batch h_out w_out c_out"]:
        return self.norm(self.conv(x))


class BasicBlock(nnx.Module):
    """Two 3×3 convolutions beside a shortcut. With a zero last scale it starts as the shortcut alone."""

    expansion = 1

    def __init__(self, in_features: int, features: int, stride: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.conv1 = _conv(in_features, features, 3, stride, dtype=dtype, rngs=rngs)
        self.norm1 = _norm(features, dtype=dtype, rngs=rngs)
        self.conv2 = _conv(features, features, 3, 1, dtype=dtype, rngs=rngs)
        self.norm2 = _norm(features, scale_init=nnx.initializers.zeros, dtype=dtype, rngs=rngs)
        self.projection = _projection(in_features, features, stride, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "batch h w c_in"]) -> Float[Array, "batch h_out w_out c_out"]:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.projection is None else self.projection(x)))


class BottleneckBlock(nnx.Module):
    """1×1, 3×3 and 1×1 convolutions, the last to four times the features, beside a shortcut."""

    expansion = 4

    def __init__(self, in_features: int, features: int, stride: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        out_features = features * self.expansion
        self.conv1 = _conv(in_features, features, 1, 1, dtype=dtype, rngs=rngs)
        self.norm1 = _norm(features, dtype=dtype, rngs=rngs)
        self.conv2 = _conv(features, features, 3, stride, dtype=dtype, rngs=rngs)
        self.norm2 = _norm(features, dtype=dtype, rngs=rngs)
        self.conv3 = _conv(features, out_features, 1, 1, dtype=dtype, rngs=rngs)
        self.norm3 = _norm(out_features, scale_init=nnx.initializers.zeros, dtype=dtype, rngs=rngs)
        self.projection = _projection(in_features, out_features, stride, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "batch h w c_in"]) -> Float[Array, "batch h_out w_out c_out"]:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (x if self.projection is None else self.projection(x)))


class Stage(nnx.Module):
    """Blocks at one resolution. The first takes the stride and changes the features."""

    def __init__(
        self,
        block: type[BasicBlock] | type[BottleneckBlock],
        num_blocks: int,
        in_features: int,
        features: int,
        stride: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        blocks = {"0": block(in_features, features, stride, dtype=dtype, rngs=rngs)}
        for index in range(1, num_blocks):
            blocks[str(index)] = block(features * block.expansion, features, 1, dtype=dtype, rngs=rngs)
        self.blocks = nnx.Dict(blocks)

    def __call__(self, x: Float[Array, "batch h w c_in"]) -> Float[Array, "batch h_out w_out c_out"]:
        for index in range(len(self.blocks)):  # by number: a merged Dict iterates "10" before "2"
            x = self.blocks[str(index)](x)
        return x


class ResNet(nnx.Module):
    """Stem, four stages, global average and a linear head. `train()` and `eval()` switch BatchNorm."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.dtype)
        bottleneck, depths = _LAYOUTS[config.depth]
        block = BottleneckBlock if bottleneck else BasicBlock

        self.max_pool = config.stem == "imagenet"
        kernel, stride = (7, 2) if self.max_pool else (3, 1)
        self.stem = ConvNorm(config.in_channels, config.width, kernel, stride, dtype=dtype, rngs=rngs)

        stages = {}
        in_features = config.width
        for index, num_blocks in enumerate(depths):
            features, stride = config.width * 2**index, 1 if index == 0 else 2
            stages[str(index)] = Stage(block, num_blocks, in_features, features, stride, dtype=dtype, rngs=rngs)
            in_features = features * block.expansion
        self.stages = nnx.Dict(stages)

        self.head = nnx.Linear(  # in float32, as the loss that reads its logits
            in_features, config.num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs
        )

    def __call__(self, images: Float[Array, "batch h w in_channels"]) -> Float[Array, "batch num_classes"]:
        """Float32 logits."""
        x = nnx.relu(self.stem(images))
        if self.max_pool:
            x = nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for index in range(len(self.stages)):
            x = self.stages[str(index)](x)
        return self.head(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))


def _conv(in_features: int, features: int, kernel: int, stride: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Conv:
    """Without bias, which the norm after it would subtract."""
    return nnx.Conv(
        in_features,
        features,
        (kernel, kernel),
        strides=stride,
        padding=kernel // 2,
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),  # He et al. 2015
        dtype=dtype,
        rngs=rngs,
    )


def _norm(
    features: int,
    *,
    scale_init: nnx.Initializer = nnx.initializers.ones,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> nnx.BatchNorm:
    """Statistics are kept in float32 under any compute dtype."""
    return nnx.BatchNorm(features, momentum=0.9, epsilon=1e-5, scale_init=scale_init, dtype=dtype, rngs=rngs)


def _projection(
    in_features: int, out_features: int, stride: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> ConvNorm | None:
    """The shortcut where a block changes the shape; None where the input itself can be added."""
    if stride == 1 and in_features == out_features:
        return None
    return ConvNorm(in_features, out_features, 1, stride, dtype=dtype, rngs=rngs)
