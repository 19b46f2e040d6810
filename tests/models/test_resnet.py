"""ResNet: the literature's sizes, its initialisation, its dtypes, its rules, wrong configs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import ResNetConfig
from models.resnet import BasicBlock, BottleneckBlock, ConvNorm, Stage


def abstract_model(config: ResNetConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))


def multiply_adds(config: ResNetConfig, size: int) -> int:
    """Of one image's forward pass: those of the convolutions and of the head."""
    graph, state = nnx.split(abstract_model(config))
    images = jax.ShapeDtypeStruct((1, size, size, config.in_channels), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda state, images: nnx.merge(graph, state)(images))(state, images)
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            kernel = equation.invars[1].aval.shape  # (…, in_features, out_features)
            total += math.prod(equation.outvars[0].aval.shape) * math.prod(kernel[:-1])
    return total


@pytest.mark.parametrize(
    ("depth", "num_params"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_parameter_counts_are_those_of_the_literature(depth: int, num_params: int) -> None:
    params = nnx.state(abstract_model(ResNetConfig(depth=depth)), nnx.Param)
    assert sum(math.prod(param.shape) for param in jax.tree.leaves(params)) == num_params


@pytest.mark.parametrize(
    ("depth", "stem", "size", "giga"),
    [(18, "imagenet", 224, 1.814), (50, "imagenet", 224, 4.089), (18, "small", 32, 0.556)],
)
def test_multiply_adds_are_those_of_the_literature(depth: int, stem: str, size: int, giga: float) -> None:
    """Strides and pooling, which parameter counts do not see. ResNet-50 v1 has 3.8, says its paper."""
    assert multiply_adds(ResNetConfig(depth=depth, stem=stem), size) / 1e9 == pytest.approx(giga, abs=1e-3)


@pytest.mark.parametrize(("depth", "stem", "size"), [(18, "small", 8), (50, "imagenet", 33)])
def test_logits_are_float32_for_any_image_size(depth: int, stem: str, size: int) -> None:
    config = ResNetConfig(depth=depth, num_classes=7, stem=stem, in_channels=1, dtype="bfloat16")
    images = jax.ShapeDtypeStruct((2, size, size, 1), jnp.float32)
    logits = nnx.eval_shape(lambda model, images: model(images), abstract_model(config), images)
    assert (logits.shape, logits.dtype) == ((2, 7), jnp.float32)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_state() -> None:
    model = abstract_model(ResNetConfig(depth=18, dtype="bfloat16"))
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    hidden = nnx.eval_shape(lambda model, x: model.stages["0"](model.stem(x)), model, images)
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("block_type", [BasicBlock, BottleneckBlock])
def test_a_residual_block_starts_as_its_shortcut(
    block_type: type[BasicBlock] | type[BottleneckBlock],
) -> None:
    in_features = 4 * block_type.expansion
    x = np.random.default_rng(0).uniform(size=(2, 8, 8, in_features)).astype(np.float32)

    @jax.jit
    def build_and_apply(x: jax.Array) -> jax.Array:
        return block_type(in_features, 4, 1, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))(x)

    np.testing.assert_array_equal(build_and_apply(x), x)


def test_convolutions_start_with_he_fan_out_variance() -> None:
    conv = ConvNorm(64, 256, 3, 1, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)).conv
    assert float(conv.kernel[...].std()) == pytest.approx(math.sqrt(2 / (3 * 3 * 256)), rel=0.01)


def test_blocks_run_in_numeric_order_after_a_merge() -> None:
    """A merged nnx.Dict holds "10" before "2"."""
    stage = Stage(BasicBlock, 12, 1, 1, 1, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    for index in range(12):  # relu(x ± index) in another order is another function
        stage.blocks[str(index)].norm2.bias[...] = jnp.full(1, index if index % 2 else -index, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 2, 2, 1))
    merged = nnx.merge(*nnx.split(stage))
    assert list(merged.blocks) != list(stage.blocks)
    np.testing.assert_array_equal(merged(x), stage(x))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("depth", 20, "one of 18, 34, 50, 101, 152; found 20"),
        ("stem", "cifar", "one of 'imagenet', 'small'; found 'cifar'"),
        ("dtype", "float16", "one of 'float32', 'bfloat16'; found 'float16'"),
        ("width", 0, "an integer of at least 1; found 0"),
        ("in_channels", 3.0, r"an integer of at least 1; found 3\.0"),
        ("num_classes", True, "an integer of at least 1; found True"),
    ],
)
def test_wrong_configs_say_what_was_expected_and_found(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"ResNetConfig\.{field}: expected {expected}"):
        ResNetConfig(**{field: value})
