"""Rules → PartitionSpecs, and what is wrong with them, said before anything compiles.

A rule is `(pattern, PartitionSpec)`; the pattern is a regular expression that must match a parameter's whole path
(`"stages/0/blocks/1/conv1/kernel"`). The first rule that matches decides.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError

Rules = Sequence[tuple[str, PartitionSpec]]

REPLICATE: Rules = ((".*", PartitionSpec()),)
"""Every device holds every parameter."""


def match_rules(rules: Rules, params: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh) -> dict[str, PartitionSpec]:
    """The PartitionSpec of each parameter.

    Args:
      rules: `(pattern, spec)`, first match wins.
      params: path → shape and dtype.
      mesh: gives the sizes of the axes.

    Raises:
      UserError: for a pattern that is no regular expression or matches nothing, a parameter that no rule covers, a
        spec with more dims than the parameter, an axis that the mesh lacks or that stands twice, a dim that does
        not divide.
    """
    compiled = [(_compile(pattern, "sharding rule"), spec) for pattern, spec in rules]
    for pattern, _ in compiled:
        if not any(pattern.fullmatch(path) for path in params):
            raise UserError(
                f"sharding rule {pattern.pattern!r} matches no parameter; the parameters are {_some(params)}. "
                "Patterns must match the whole path: correct it or take it out"
            )
    specs = {}
    for path, param in params.items():
        matches = (spec for pattern, spec in compiled if pattern.fullmatch(path))
        spec = next(matches, None)
        if spec is None:
            raise UserError(
                f"no sharding rule covers parameter {path!r} {param.shape}; add one, for example "
                f"({re.escape(path)!r}, PartitionSpec()) to keep a copy on every device"
            )
        _check_spec(path, param.shape, spec, mesh)
        specs[path] = spec
    return specs


def _check_spec(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    where = f"sharding of parameter {path!r} {shape} by {spec}"
    if len(spec) > len(shape):
        raise UserError(f"{where}: the spec has {len(spec)} dims, the parameter {len(shape)}")
    dims = [(entry if isinstance(entry, tuple) else (entry,)) if entry is not None else () for entry in spec]
    seen: set[str] = set()
    for dim, axes in enumerate(dims):
        for axis in axes:
            if axis not in mesh.shape:
                raise UserError(f"{where}: the mesh has no axis {axis!r}; it has {', '.join(mesh.shape)}")
            if axis in seen:
                raise UserError(f"{where}: axis {axis!r} stands twice; an axis can split one dim only")
            seen.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % parts:
            lower = shape[dim] // parts * parts
            raise UserError(
                f"{where}: dim {dim} of size {shape[dim]} does not divide over {parts} devices of {axes}; "
                f"the nearest sizes that do are {lower or parts} and {lower + parts}"
            )


def state_shardings(state: Any, specs: Mapping[str, PartitionSpec], mesh: Mesh) -> Any:
    """The sharding of every leaf of an abstract TrainState: params by `specs`, all that mirrors one likewise.

    A leaf mirrors a parameter when its last key is the parameter's path and its shape is the parameter's: Optax's
    moments and the EMA do. Everything else is replicated.
    """
    shapes = {path: param.shape for path, param in state.params.items()}

    def shard(key_path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = str(getattr(key_path[-1], "key", ""))
        mirrors = name in specs and leaf.shape == shapes[name]
        return NamedSharding(mesh, specs[name] if mirrors else PartitionSpec())

    return jax.tree_util.tree_map_with_path(shard, state)


def matching_paths(patterns: Iterable[str], paths: Iterable[str], where: str) -> dict[str, list[str]]:
    """For each pattern the paths that it matches wholly.

    Args:
      patterns: regular expressions.
      paths: parameter paths.
      where: the config field that holds the patterns, for the error.

    Raises:
      UserError: for a pattern that is no regular expression or matches nothing.
    """
    paths = list(paths)
    found = {}
    for text in patterns:
        pattern = _compile(text, where)
        found[text] = [path for path in paths if pattern.fullmatch(path)]
        if not found[text]:
            raise UserError(f"{where}: pattern {text!r} matches no parameter; the parameters are {_some(paths)}")
    return found


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{where} {pattern!r} is not a regular expression: {error}") from None


def _some(paths: Iterable[str], limit: int = 8) -> str:
    names = sorted(paths)
    return ", ".join(names[:limit]) + (f", … ({len(names)} in all)" if len(names) > limit else "")
