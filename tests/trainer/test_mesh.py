"""MeshConfig → Mesh, and what is said when they do not fit."""

import jax
import numpy as np
import pytest

from trainer import MeshConfig, UserError
from trainer.mesh import local_rows, make_mesh, num_batch_shards


@pytest.mark.parametrize(
    ("config", "shape", "shards"),
    [
        (MeshConfig(), (1, 8, 1, 1), 8),
        (MeshConfig(model=2), (1, 4, 2, 1), 4),
        (MeshConfig(replica=2, data=2, model=2), (2, 2, 2, 1), 4),
        (MeshConfig(data=2, model=-1), (1, 2, 4, 1), 2),
        (MeshConfig(data=1, seq=8), (1, 1, 1, 8), 1),
    ],
)
def test_minus_one_is_what_is_left(config, shape, shards):
    mesh = make_mesh(config)
    assert mesh.axis_names == ("replica", "data", "model", "seq")
    assert mesh.devices.shape == shape
    assert num_batch_shards(mesh) == shards
    np.testing.assert_array_equal(local_rows(mesh, 16), np.arange(16))


def test_devices_may_be_chosen():
    assert list(make_mesh(MeshConfig(), jax.devices()[2:5]).devices.flat) == jax.devices()[2:5]


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        (MeshConfig(data=3), "replica=1 x data=3 x model=1 x seq=1"),
        (MeshConfig(model=3), "replica=1 x data=-1 x model=3 x seq=1"),
        (MeshConfig(data=8, model=2), "replica=1 x data=8 x model=2 x seq=1"),
        (MeshConfig(model=16), "replica=1 x data=-1 x model=16 x seq=1"),
    ],
)
def test_a_product_that_is_not_the_number_of_devices_names_every_factor(config, factors):
    with pytest.raises(UserError, match=rf"mesh: {factors} does not make 8 devices"):
        make_mesh(config)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 0}, r"mesh\.data: expected a number of devices ≥ 1, or -1 for the rest, found 0"),
        ({"model": -2}, r"mesh\.model: .* found -2"),
        ({"model": -1}, r"mesh: at most one axis may be -1, found .*'data': -1, 'model': -1"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        MeshConfig(**sizes)
