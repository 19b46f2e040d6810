"""Where examples come from. A `Source` reads any examples in any order; the rest is the same for all.

The order of a run is random access; what can only be read front to back is not a source.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

Tensors = dict[str, Any]  # feature name → tf.Tensor


class DataError(Exception):
    """An example could not be read or prepared during a run: the data are bad, not the configuration."""


class Source(Protocol):
    """Examples 0 … num_examples − 1."""

    num_examples: int
    fingerprint: dict[str, Any]  # what the data are; becomes JSON
    parallel_reads: int  # calls of `read` that may run at once

    def tensor_specs(self) -> tuple[Any, ...]:
        """A tf.TensorSpec, without the batch dim, for each array that `read` returns."""

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """The examples `indices` (int64[n]) as arrays of leading dim n."""

    def decode(self, *tensors: Any) -> Tensors:
        """One example's features from its row of each array. Runs in the tf.data graph."""

    def close(self) -> None:
        """Ends what the source started."""


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
        source = source()
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


def check_feature_name(name: Any, where: str) -> None:
    """Raises ValueError unless `name` can name a feature of a batch."""
    if not isinstance(name, str) or name == "mask":
        raise ValueError(
            f"{where}: expected features named by strings other than 'mask', which marks padding in a batch; "
            f"found {name!r}. Rename it."
        )


class ArraySource:
    """Arrays in memory (or memory-mapped) of equal length, one row an example."""

    parallel_reads = 1  # a read is a copy

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = {name: np.asanyarray(array) for name, array in arrays.items()}
        for name, array in self._arrays.items():
            check_feature_name(name, "data.source")
            if array.ndim == 0 or array.dtype.kind not in "biufV":  # V: bfloat16 and its like
                raise ValueError(
                    f"data.source[{name!r}]: expected an array of numbers with a row for each example; found "
                    f"shape {array.shape}, dtype {array.dtype}. Convert it or leave it out."
                )
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"data.source: expected a dict of arrays of equal length; found lengths {lengths}. "
                "Give every array one row for each example."
            )
        self.num_examples = next(iter(lengths.values()))
        self.fingerprint = {
            "kind": "arrays",
            "num_examples": self.num_examples,
            "features": {name: _array_identity(array) for name, array in self._arrays.items()},
        }

    def tensor_specs(self) -> tuple[Any, ...]:
        """One spec for each array."""
        return specs_like(self._arrays, lambda array: array.shape[1:])

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """The rows `indices` of each array."""
        return tuple(np.asarray(array[indices]) for array in self._arrays.values())

    def decode(self, *tensors: Any) -> Tensors:
        """Names the rows."""
        return dict(zip(self._arrays, tensors, strict=True))

    def close(self) -> None:
        """Nothing was started."""


def specs_like(arrays: Mapping[str, np.ndarray], shape: Callable[[np.ndarray], tuple[int, ...]]) -> tuple[Any, ...]:
    """A tf.TensorSpec for each array, of the given shape; bytes and text become strings.

    Raises ValueError for a dtype that tf.data does not know.
    """
    import tensorflow as tf

    specs = []
    for name, array in arrays.items():
        try:
            dtype = tf.string if array.dtype.kind in "SUO" else tf.as_dtype(array.dtype)
        except TypeError:
            raise ValueError(
                f"data.source: feature {name!r} has dtype {array.dtype}, which tf.data lacks. Convert it."
            ) from None
        specs.append(tf.TensorSpec(shape(array), dtype))
    return tuple(specs)


def _array_identity(array: np.ndarray) -> dict[str, Any]:
    """Shape, dtype and SHA-256, hashed in pieces so that a memory-mapped array is never loaded whole."""
    digest = hashlib.sha256()
    rows = max(1, 2**24 // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[start : start + rows]).tobytes())
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest.hexdigest()}
