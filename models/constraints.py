"""Where activations lie on the mesh, said at the points where the compiler alone decides badly.

Without these a fully sharded transformer compiles to all-reduces of activations and to temporaries that grow with the
number of devices. They say nothing of values, and act where a mesh is set (`jax.set_mesh`) around the trace.
"""

import math

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Int

BATCH = ("replica", "data")
"""The axes that split the batch dim."""

SEQ = ("seq",)
"""The axis that splits the sequence dim."""

MODEL = ("model",)
"""The axis that splits heads, hidden features and vocabulary."""


def constrain(x: Array, *dims: tuple[str, ...]) -> Array:
    """`x` with its leading dims split over the given mesh axes, and its other dims as the compiler likes.

    Axes that the mesh lacks, or that `jax.shard_map` has in hand, are left out. A dim that its axes do not divide is
    the compiler's too: one decoded token cannot be split over `seq`. `check_divides` and the linter of the sharding
    rules say where that would cost something.

    Args:
      x: any array.
      dims: the axes of each leading dim, `()` for one that every device has whole.
    """
    sizes = _auto_axes()
    if not sizes:
        return x
    spec: list[object] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for dim, axes in enumerate(dims):
        if x.shape[dim] % _parts(sizes, axes) == 0:
            spec[dim] = tuple(axis for axis in axes if axis in sizes) or None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def by_device(x: Array) -> Array:
    """[batch, seq, ...] as [devices, batch / d, seq / s, ...], where d × s devices hold a part each; moves nothing.

    The gradient of a matmul's kernel sums over batch and sequence. If both are split the compiler sums over the
    devices of one axis, then of the other, with twice the bytes; over one dim of devices it sums once.
    """
    (rows, columns), (batch, seq, *rest) = _token_parts(x.shape[:2]), x.shape
    x = x.reshape(rows, batch // rows, columns, seq // columns, *rest).swapaxes(1, 2)
    return constrain(x.reshape(rows * columns, batch // rows, seq // columns, *rest), BATCH + SEQ)


def by_batch(x: Array, batch: int, seq: int) -> Array:
    """The inverse of `by_device`."""
    (rows, columns), rest = _token_parts((batch, seq)), x.shape[3:]
    x = x.reshape(rows, columns, batch // rows, seq // columns, *rest).swapaxes(1, 2)
    return constrain(x.reshape(batch, seq, *rest), BATCH, SEQ)


def check_divides(tokens: Int[Array, "batch seq"], name: str) -> None:
    """Raises ValueError unless the mesh's axes divide the batch and the sequence: else devices would repeat work."""
    for dim, size, axes in zip(("batch", "sequence"), tokens.shape, (BATCH, SEQ), strict=True):
        parts = _parts(_auto_axes(), axes)
        if size % parts:
            lower = size // parts * parts
            raise ValueError(
                f"{name}: expected a {dim} that divides over {parts} devices of {axes}; found {size}. "
                f"Pad it, or take a size that does: the nearest are {lower or parts} and {lower + parts}."
            )


def _token_parts(shape: tuple[int, ...]) -> tuple[int, int]:
    """Into how many parts the mesh cuts the batch and the sequence; 1 where it cannot."""
    sizes = _auto_axes()
    rows, columns = _parts(sizes, BATCH), _parts(sizes, SEQ)
    return (1, 1) if shape[0] % rows or shape[1] % columns else (rows, columns)


def _auto_axes() -> dict[str, int]:
    """Size of each axis of the mesh around this trace that the compiler lays arrays over; empty without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis: mesh.shape[axis] for axis, kind in kinds if kind == AxisType.Auto}


def _parts(sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)
