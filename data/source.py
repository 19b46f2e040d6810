"""A `Source` reads any examples in any order; what sources have in common.

The order of a run is random access; what can only be read front to back is not a source.
"""

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


def check_feature_name(name: Any, where: str) -> None:
    """Raises ValueError unless `name` can name a feature of a batch."""
    if not isinstance(name, str) or name == "mask":
        raise ValueError(
            f"{where}: expected features named by strings other than 'mask', which marks padding in a batch; "
            f"found {name!r}. Rename it."
        )


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
