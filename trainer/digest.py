"""A digest per array that does not depend on how the array is laid out over devices.

    digest(x) = sum over elements i of h(i, bits(x[i]))  mod 2^32, in two lanes

h mixes an element's global index and its bits with MurmurHash3's finalizer (Appleby 2011). A sum does not care about
order, so every device hashes what it holds and nothing is gathered.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer.mesh import replicated

_LANES = (0x9E3779B9, 0x7F4A7C15)


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of each element as one uint32 array, or two for elements of 64 bits."""
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype.itemsize == 8:
        halves = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    return [jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)]


def _digest(x: jax.Array) -> jax.Array:
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        index = _mix(index ^ (jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(0x9E3779B1) + dim + 1))
    lanes = []
    for seed in _LANES:
        h = _mix(index ^ jnp.uint32(seed))
        for word in _words(x):
            h = _mix(h + word * jnp.uint32(0xCC9E2D51))
        lanes.append(jnp.sum(h, dtype=jnp.uint32))
    return jnp.stack(lanes)


@functools.cache
def _compiled(mesh: Mesh) -> jax.stages.Wrapped:
    return jax.jit(_digest, out_shardings=replicated(mesh))


def leaf_digest(x: jax.Array, mesh: Mesh) -> jax.Array:
    """uint32[2], dispatched to the devices of `mesh` and not waited for. One compilation per shape and layout."""
    return _compiled(mesh)(x)


def to_hex(digest: jax.Array) -> str:
    """16 hexadecimal digits of a `leaf_digest`; waits for it."""
    return "".join(f"{lane:08x}" for lane in jax.device_get(digest).tolist())
