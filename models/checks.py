"""Checks of config fields: what was expected, what was found, what to do."""

from collections.abc import Collection
from typing import Any


def check_choice(field: str, value: Any, choices: Collection[Any], advice: str) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{field}: expected one of {expected}; found {value!r}. {advice}")


def check_positive_int(field: str, value: Any, advice: str) -> None:
    """Raises ValueError unless `value` is an int of at least 1 (a bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}: expected an integer of at least 1; found {value!r}. {advice}")


def check_compute_dtype(field: str, value: Any) -> None:
    """Raises ValueError unless `value` names a dtype that models compute in."""
    check_choice(field, value, ("float32", "bfloat16"), "Parameters stay float32 under either.")
