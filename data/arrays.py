"""Arrays in memory, or mapped into it."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from data.source import Tensors, check_feature_name, specs_like


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


def _array_identity(array: np.ndarray) -> dict[str, Any]:
    """Shape, dtype and SHA-256, hashed in pieces so that a memory-mapped array is never loaded whole."""
    digest = hashlib.sha256()
    rows = max(1, 2**24 // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[start : start + rows]).tobytes())
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest.hexdigest()}
