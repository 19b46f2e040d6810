"""MeshConfig → jax.sharding.Mesh: the named axes over which a run is laid out."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError

BATCH_AXES = ("replica", "data")
"""The axes that share out the rows of a batch."""


@dataclasses.dataclass
class MeshConfig:
    """Number of devices along each axis; one of them may be -1: all that are left.

    Attributes:
      replica: copies of the data-parallel group, joined by a slower network.
      data: the batch is split over it.
      model: parameters are split over it where the sharding rules say so.
      seq: long sequences are split over it.
    """

    replica: int = 1
    data: int = -1
    model: int = 1
    seq: int = 1

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size != -1 and size < 1:
                raise UserError(f"mesh.{axis}: expected a number of devices ≥ 1, or -1 for the rest, found {size}")
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh: at most one axis may be -1, found {sizes}")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices`, by default all, in the order that suits their network.

    Raises:
      UserError: if the axes' product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dataclasses.asdict(config)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shape = tuple(len(devices) // fixed if size == -1 else size for size in sizes.values())
    if math.prod(shape) != len(devices):
        product = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise UserError(f"mesh: {product} does not make {len(devices)} devices; their product must be that number")
    return jax.make_mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first dim of an array is split over `BATCH_AXES`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def num_batch_shards(mesh: Mesh) -> int:
    """Number of parts that a batch is cut into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """The rows of a global batch that this host's devices hold, in order: int64[local_batch]."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices if index is not None]))
