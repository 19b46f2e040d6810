"""MLP: shapes, dtypes, dropout and BatchNorm modes, wrong configs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import MLPConfig


def test_without_hidden_layers_it_is_linear() -> None:
    model = MLPConfig(in_features=3, hidden=(), out_features=2).build(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (5, 3))
    np.testing.assert_allclose(model(x), x @ model.head.kernel[...] + model.head.bias[...], rtol=1e-6)


def test_flattens_examples_and_returns_float32() -> None:
    config = MLPConfig(in_features=64, hidden=(16,) * 11, out_features=10, batch_norm=True, dtype="bfloat16")
    model = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    images = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)
    outputs = nnx.eval_shape(lambda model, x: model(x), model, images)
    hidden = nnx.eval_shape(lambda model, x: model.blocks["0"](x.reshape(2, 64)), model, images)
    assert (outputs.shape, outputs.dtype, hidden.dtype) == ((2, 10), jnp.float32, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_dropout_draws_while_training_only() -> None:
    model = MLPConfig(in_features=8, hidden=(64,), out_features=2, dropout=0.5).build(nnx.Rngs(0))
    x = jnp.ones((4, 8))
    assert not np.array_equal(model(x), model(x))
    model.eval()
    np.testing.assert_array_equal(model(x), model(x))


def test_random_streams_alone_decide_what_dropout_draws() -> None:
    """The trainer sets them from (rng, step), so that a step's noise depends on nothing else."""
    model = MLPConfig(in_features=8, hidden=(64, 64), out_features=2, dropout=0.5).build(nnx.Rngs(0))
    x = jnp.ones((4, 8))
    streams = jax.tree.map(jnp.copy, nnx.state(model, nnx.RngState))
    first = model(x)
    nnx.update(model, streams)
    np.testing.assert_array_equal(model(x), first)


def test_has_random_state_only_with_dropout() -> None:
    without = MLPConfig(in_features=2, hidden=(2,), out_features=2).build(nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(without, nnx.RngState))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("in_features", 0, "an integer of at least 1; found 0"),
        ("out_features", None, "an integer of at least 1; found None"),
        ("hidden", "64,64", r"a tuple of layer sizes such as \(64, 64\); found '64,64'"),
        ("hidden", 64, r"a tuple of layer sizes such as \(64, 64\); found 64"),
        ("dropout", 1.0, r"a probability in \[0, 1\); found 1\.0"),
        ("dropout", "0.5", r"a probability in \[0, 1\); found '0\.5'"),
        ("dtype", "half", "one of 'float32', 'bfloat16'; found 'half'"),
    ],
)
def test_wrong_configs_say_what_was_expected_and_found(field: str, value: Any, expected: str) -> None:
    fields = {"in_features": 4, "hidden": (4,), "out_features": 2, field: value}
    with pytest.raises(ValueError, match=rf"MLPConfig\.{field}: expected {expected}"):
        MLPConfig(**fields)


def test_a_wrong_layer_size_is_named_by_its_index() -> None:
    with pytest.raises(ValueError, match=r"MLPConfig\.hidden\[1\]: expected an integer .* found 0"):
        MLPConfig(in_features=4, hidden=(8, 0), out_features=2)


def test_an_example_of_another_size_is_an_error_with_both() -> None:
    model = MLPConfig(in_features=4, hidden=(), out_features=1).build(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"examples of 4 features; found a batch of shape \(2, 5\)"):
        model(jnp.ones((2, 5)))
