"""The linter's table: for each parameter the rule that matched, the spec, its bytes in all and on each device."""

import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from trainer.sharding import Layout, Rules


def layout_table(
    layout: Layout, rules: Rules, params: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh, state_bytes: tuple[int, int]
) -> Table:
    """A table for people.

    Args:
      layout: what was decided.
      rules: the rules that decided.
      params: path → shape and dtype.
      mesh: gives the number of parts.
      state_bytes: of the whole train state, in all and on each device.
    """
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    table = Table("parameter", "shape", "rule", "spec", "bytes", "per device", title=f"mesh: {axes}")
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[4:]:
        column.justify = "right"
    for path, param in params.items():
        rule = next((pattern for pattern, _ in rules if re.fullmatch(pattern, path)), "sharding.keep_whole")
        spec = layout.params[path]
        table.add_row(path, _shape(param.shape), rule, _spec(spec), *_bytes(param, spec, mesh))
    table.add_section()
    table.add_row("the whole state", "", "", "", *(f"{count:,}" for count in state_bytes))
    return table


def bytes_per_device(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> int:
    """Bytes of one device's part of `leaf`."""
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _bytes(param: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> tuple[str, str]:
    whole = param.size * param.dtype.itemsize
    return f"{whole:,}", f"{bytes_per_device(param, NamedSharding(mesh, spec)):,}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _spec(spec: PartitionSpec) -> str:
    return ", ".join("-" if entry is None else str(entry).replace("'", "") for entry in spec) or "whole"
