"""The digest of an array is one value on every layout, and another for any other array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.digest import leaf_digest, to_hex
from trainer.mesh import MeshConfig, make_mesh

MESHES = [MeshConfig(data=data, model=8 // data) for data in (8, 4, 2, 1)]
REPLICATED = P()
DTYPES = ["float32", "bfloat16", "bool", "int8", "int32", "uint32"]


def array(dtype):
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.integers(0, 2, (16, 8)).astype(bool)
    return np.array(jnp.asarray(rng.normal(size=(16, 8)) * 50).astype(dtype))


def digest(values, mesh_config=MESHES[0], spec=REPLICATED):
    mesh = make_mesh(mesh_config)
    return to_hex(leaf_digest(jax.device_put(values, NamedSharding(mesh, spec)), mesh))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_on_every_layout(dtype):
    values = array(dtype)
    found = {digest(values, mesh, P("data", "model")) for mesh in MESHES}
    found |= {digest(values), digest(values, MESHES[1], P("model", None)), digest(values, MESHES[2], P(None, "data"))}
    (one,) = found
    assert len(one) == 16 and int(one, 16)


def test_one_value_on_one_device():
    values = array("float32")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert to_hex(leaf_digest(jax.device_put(values, jax.devices()[0]), mesh)) == digest(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_single_flipped_bit_changes_it(dtype):
    """200 flips at random; a flipped bit of a bool is the other bool."""
    values = array(dtype)
    rng = np.random.default_rng(1)
    before = digest(values)
    for _ in range(200):
        flipped = values.copy()
        raw = flipped.view(np.uint8).reshape(-1)
        raw[rng.integers(raw.size)] ^= 1 if dtype == "bool" else 1 << rng.integers(8)
        assert digest(flipped) != before


def test_nan_and_the_sign_of_zero_count_by_their_bits():
    values = array("float32")
    values[3, 3] = np.nan
    assert digest(values) == digest(values.copy())
    found = set()
    for special in (0.0, -0.0, np.nan, np.inf, np.float32(1e-45)):
        values[3, 3] = special
        found.add(digest(values))
    assert len(found) == 5


def test_swapped_elements_rows_and_leaves_change_it():
    values = array("float32")
    others = [values.T.copy().reshape(16, 8), values[::-1], np.roll(values, 1), np.roll(values, 1, axis=1)]
    for first, second in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((2, 3), (3, 2)), ((15, 7), (0, 0))]:
        swapped = values.copy()
        swapped[first], swapped[second] = values[second], values[first]
        others.append(swapped)
    found = {digest(other) for other in (values, *others)}
    assert len(found) == 1 + len(others)


def test_the_shape_counts():
    zeros = [np.zeros(shape, np.float32) for shape in [(), (1,), (2,), (4,), (2, 2), (4, 1), (1, 4)]]
    assert len({digest(zero) for zero in zeros}) == len(zeros)


def test_no_element_is_gathered():
    """Each device hashes what it holds: the compiled digest moves two numbers, not the array."""
    from trainer.digest import _compiled

    mesh = make_mesh(MESHES[1])
    leaf = jax.ShapeDtypeStruct((1024, 64), np.float32, sharding=NamedSharding(mesh, P("data", "model")))
    text = _compiled(mesh).lower(leaf).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text and "all-to-all" not in text


def test_float64_has_two_words():
    """Either half of a 64-bit element counts."""
    with jax.enable_x64(True):
        values = np.linspace(0, 1, 64).reshape(8, 8)
        low, high = values.copy(), values.copy()
        low.view(np.uint32)[3, 4] ^= 1
        high.view(np.uint32)[3, 5] ^= 1
        assert len({digest(one) for one in (values, low, high)}) == 3
        assert digest(values, MESHES[1], P("data", "model")) == digest(values)
