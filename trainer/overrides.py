"""Text → config fields: `--config.optimizer.learning_rate=0.3`, checked against the fields' own annotations.

A path is addressed as in ml_collections (`evals[0].data.split`, `optimizer.arguments.momentum`). Its flag parser is not
used: it cannot set None, add a dict key, or set a field of a union type, and turns `a,b` for a tuple into one string.
"""

import ast
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import typeguard
from ml_collections.config_flags import config_path

from trainer.errors import UserError, unknown_name

_WORDS = {"true": True, "false": False, "none": None}


def override(config: Any, assignments: Mapping[str, str]) -> None:
    """Sets fields of a dataclass tree in place.

    Args:
      config: a mutable dataclass that may hold dataclasses, dicts and tuples.
      assignments: path → text.

    Raises:
      UserError: for a path that leads nowhere (with the nearest name) or a value that the field's type refuses.
    """
    for path, text in assignments.items():
        try:
            *parents, leaf = config_path.split(path)
        except (ValueError, AttributeError):
            raise UserError(
                f"config.{path}: expected a path such as optimizer.learning_rate or evals[0].every"
            ) from None
        holder = config
        for name in parents:
            holder = _child(holder, name, path)
        if dataclasses.is_dataclass(holder):
            _child(holder, leaf, path)
            setattr(holder, leaf, parse(text, _annotations(type(holder))[leaf], f"config.{path}"))
        elif isinstance(holder, dict):
            holder[leaf] = parse(text, Any, f"config.{path}")
        else:
            raise UserError(f"config.{path}: {type(holder).__name__} has no fields to set; set the whole of it")


def _child(holder: Any, name: Any, path: str) -> Any:
    if dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        names = [field.name for field in dataclasses.fields(holder)]
        if name not in names:
            raise UserError(f"config.{path}: {unknown_name('field', str(name), names)}")
        return getattr(holder, name)
    if isinstance(holder, dict):
        if name not in holder:
            raise UserError(f"config.{path}: {unknown_name('key', str(name), map(str, holder))}")
        return holder[name]
    if isinstance(holder, tuple | list) and isinstance(name, int):
        if not -len(holder) <= name < len(holder):
            raise UserError(f"config.{path}: index {name} is out of range, there are {len(holder)}")
        return holder[name]
    raise UserError(f"config.{path}: {name!r} leads nowhere, the value before it is {holder!r}")


def parse(text: str, annotation: Any, where: str) -> Any:
    """`text` as the value of a field annotated with `annotation`.

    Raises:
      UserError: if it is none.

    >>> parse("1e-5", float, "rate"), parse("False", bool, "flag"), parse("3,3", tuple[int, ...], "kernel")
    (1e-05, False, (3, 3))
    """
    if annotation is str:
        return text
    value = _literal(text)
    candidates = [value, text]
    if typing.get_origin(annotation) is tuple:
        parts = value if isinstance(value, tuple | list) else [_literal(part) for part in text.split(",") if part]
        candidates = [tuple(parts), tuple(part.strip() for part in text.split(","))]
    for candidate in candidates:
        if conforms(candidate, annotation):
            return float(candidate) if annotation in (float, float | None) and candidate is not None else candidate
    raise UserError(f"{where}: expected {_show(annotation)}, found {text!r}")


def _literal(text: str) -> Any:
    try:
        return _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def conforms(value: Any, annotation: Any) -> bool:
    """Whether `value` is of the annotated type; True is no number."""
    if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
        return False
    try:
        typeguard.check_type(value, annotation)
    except typeguard.TypeCheckError:
        return False
    return True


def rebuild(value: Any, where: str = "config") -> Any:
    """A copy of a dataclass tree, each field checked against its annotation and every `__post_init__` run again.

    Raises:
      UserError: names the first field that does not hold what its annotation says.
    """
    if isinstance(value, tuple | list):
        return type(value)(rebuild(item, f"{where}[{index}]") for index, item in enumerate(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    annotations = _annotations(type(value))
    fields = {}
    for field in dataclasses.fields(value):
        if field.init:
            found = getattr(value, field.name)
            if not conforms(found, annotations[field.name]):
                raise UserError(f"{where}.{field.name}: expected {_show(annotations[field.name])}, found {found!r}")
            fields[field.name] = rebuild(found, f"{where}.{field.name}")
    try:
        return type(value)(**fields)
    except ValueError as error:
        raise UserError(str(error) if isinstance(error, UserError) else f"{where}: {error}") from error


def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _show(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
