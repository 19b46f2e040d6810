"""Rules → PartitionSpecs, and what is wrong with them, said before anything compiles.

    DP      nothing is split but the batch
    ZeRO-1  `zero1`: moments and EMA are split over `data` (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054)
    ZeRO-3  `fsdp`: the parameters too
    TP      the rules split parameters over `model` (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053)

A rule is `(pattern, PartitionSpec)`; the pattern is a regular expression that must match a parameter's whole path
(`"stages/0/blocks/1/conv1/kernel"`). The first rule that matches decides.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError

log = logging.getLogger(__name__)

Rules = Sequence[tuple[str, PartitionSpec]]
Specs = dict[str, PartitionSpec]

_LARGE = 2**24  # bytes of a parameter whose copies are worth a word

REPLICATE: Rules = ((".*", PartitionSpec()),)
"""Every device holds every parameter."""


@dataclasses.dataclass
class ShardingConfig:
    """Where the parameters and what mirrors them go.

    Attributes:
      rules: `(pattern, PartitionSpec)` in place of the model's own.
      fsdp: what the rules left whole is split over `data`: params, gradients, moments and EMA (ZeRO-3).
      zero1: the same for moments and EMA alone (ZeRO-1).
      keep_whole: patterns of parameters that stay whole on every device, whatever rules and `fsdp` say.
    """

    rules: Rules | None = None
    fsdp: bool = False
    zero1: bool = False
    keep_whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.fsdp and self.zero1:
            raise UserError("sharding: fsdp splits all that zero1 does; set one of them")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The PartitionSpecs of a run, by parameter path.

    Attributes:
      params: of the parameters.
      mirrors: of what mirrors a parameter: gradient, moments, EMA.
    """

    params: Specs
    mirrors: Specs


def make_layout(config: ShardingConfig, rules: Rules, params: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh) -> Layout:
    """The layout that `config` and `rules` ask for.

    Args:
      config: fsdp, zero1, exceptions.
      rules: `(pattern, spec)`, first match wins.
      params: path → shape and dtype.
      mesh: gives the sizes of the axes.

    Raises:
      UserError: as `match_rules`; also for a pattern of `keep_whole` that matches nothing.
    """
    kept = matching_paths(config.keep_whole, params, "sharding.keep_whole")
    whole = frozenset(path for paths in kept.values() for path in paths)
    specs = match_rules(rules, params, mesh, whole)
    split = {
        path: spec if path in whole else _split_over_data(spec, params[path].shape, mesh)
        for path, spec in specs.items()
    }
    return Layout(params=split if config.fsdp else specs, mirrors=split if config.fsdp or config.zero1 else specs)


def _split_over_data(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """`spec` with `data` added to one dim: the least split so far that divides, the largest of those.

    A parameter of which no dim divides stays as it is; so do the few that are smaller than the axis.
    """
    entries = [_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    if any("data" in axes for axes in entries):
        return spec
    parts = [math.prod(mesh.shape[axis] for axis in axes) for axes in entries]
    free = [dim for dim, size in enumerate(shape) if size % (parts[dim] * mesh.shape["data"]) == 0]
    if not free:
        return spec
    chosen = min(free, key=lambda dim: (parts[dim], -shape[dim]))
    entries[chosen] = (*entries[chosen], "data")
    return PartitionSpec(*entries)


def nearest_multiples(size: int, parts: int) -> str:
    """The sizes next to `size` that divide into `parts`, for an error.

    >>> nearest_multiples(6, 4), nearest_multiples(3, 8)
    ('the nearest sizes that do are 4 and 8', 'the nearest size that does is 8')
    """
    lower = size // parts * parts
    return (
        f"the nearest sizes that do are {lower} and {lower + parts}"
        if lower
        else f"the nearest size that does is {parts}"
    )


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of one entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def match_rules(
    rules: Rules,
    params: Mapping[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    whole: frozenset[str] = frozenset(),
) -> Specs:
    """The PartitionSpec of each parameter.

    Args:
      rules: `(pattern, spec)`, first match wins.
      params: path → shape and dtype.
      mesh: gives the sizes of the axes.
      whole: paths that no rule splits.

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
    specs = dict.fromkeys(whole, PartitionSpec())
    for path, param in params.items():
        if path in whole:
            continue
        spec = next((spec for pattern, spec in compiled if pattern.fullmatch(path)), None)
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
    seen: set[str] = set()
    for dim, axes in enumerate(map(_axes, spec)):
        for axis in axes:
            if axis not in mesh.shape:
                raise UserError(f"{where}: the mesh has no axis {axis!r}; it has {', '.join(mesh.shape)}")
            if axis in seen:
                raise UserError(f"{where}: axis {axis!r} stands twice; an axis can split one dim only")
            seen.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % parts:
            raise UserError(
                f"{where}: dim {dim} of size {shape[dim]} does not divide over {parts} devices of {axes}; "
                f"{nearest_multiples(shape[dim], parts)}"
            )


def state_shardings(state: Any, layout: Layout, mesh: Mesh) -> Any:
    """The sharding of every leaf of an abstract TrainState.

    A leaf mirrors a parameter when its last key is the parameter's path and its shape is the parameter's: Optax's
    moments and the EMA do. Everything else is replicated.
    """
    shapes = {path: param.shape for path, param in state.params.items()}

    def shard(key_path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = str(getattr(key_path[-1], "key", ""))
        specs = layout.params if key_path[0].name == "params" else layout.mirrors
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
