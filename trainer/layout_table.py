"""The linter's table: for each parameter the rule that matched, the spec, its bytes in all and on each device."""

import math
import re
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from rich.table import Table

from trainer.sharding import Layout, Rules
from trainer.state import TrainState


def layout_table(layout: Layout, rules: Rules, state: TrainState, mesh: Mesh) -> Table:
    """A table for people.

    Args:
      layout: what was decided.
      rules: the rules that decided.
      state: the abstract state, its params and all the rest.
      mesh: gives the number of parts.
    """
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    table = Table("parameter", "shape", "rule", "spec", "bytes", "per device", title=f"mesh: {axes}")
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[4:]:
        column.justify = "right"
    for path, param in state.params.items():
        rule = next((pattern for pattern, _ in rules if re.fullmatch(pattern, path)), "sharding.keep_whole")
        table.add_row(path, _shape(param.shape), rule, _spec(layout.params[path]), *_bytes([param]))
    table.add_section()
    table.add_row("the whole state", "", "", "", *_bytes(jax.tree.leaves(state)))
    return table


def _bytes(leaves: list[Any]) -> tuple[str, str]:
    """Bytes in all, and of one device's part."""
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    each = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return f"{whole:,}", f"{each:,}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _spec(spec: PartitionSpec) -> str:
    return ", ".join("-" if entry is None else str(entry).replace("'", "") for entry in spec) or "whole"
