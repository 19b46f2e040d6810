"""What `DataConfig.source` means."""

from collections.abc import Mapping
from typing import Any

from data.arrays import ArraySource
from data.source import Source


def open_source(source: Any, *, split: str, encoded: tuple[str, ...], workers: int) -> Source:
    """The `Source` that `DataConfig.source` means.

    Args:
      source: A TFDS name, a dict of arrays, a map-style object, or a callable that returns one of them.
      split: A TFDS split expression. "train", the default, for all other sources.
      encoded: Image features that stay encoded. Other sources hand over bytes if they hold bytes.
      workers: Processes that read a map-style source.

    Raises:
      ValueError: The source is none of these, does not open, or a field is set that it does not use.
    """
    make = source
    if not is_map_style(source) and not isinstance(source, str | Mapping) and callable(source):
        try:
            source = source()
        except Exception as error:
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"data.source: {make!r} failed: {type(error).__name__}: {error}") from error
    if workers and (isinstance(source, str | Mapping) or not is_map_style(source)):
        raise ValueError(
            f"data.workers: expected 0 for this source; found {workers}. TFDS and arrays are read by threads "
            "without Python's lock; only an object with len and [] uses worker processes."
        )
    if isinstance(source, str):
        from data.records import RecordSource  # imports TFDS

        return RecordSource(source, split, encoded)
    if split != "train":
        raise ValueError(
            f"data.split: expected the default 'train', since only TFDS datasets have splits; found "
            f"{split!r}. Slice the arrays or the object that is given as data.source."
        )
    if isinstance(source, Mapping):
        return ArraySource(source)
    if is_map_style(source):
        from data.map_style import MapSource

        return MapSource(source, make=make, workers=workers)
    raise ValueError(
        "data.source: expected a TFDS name, a dict of arrays, an object with len and [], or a callable "
        f"without arguments that returns one of these; found {type(source).__qualname__}. Give one of them."
    )


def is_map_style(source: Any) -> bool:
    """Whether `source` is an object with len and [], not the class of such objects."""
    return not isinstance(source, type) and hasattr(source, "__len__") and hasattr(source, "__getitem__")
