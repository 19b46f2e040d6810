"""Runs reads and preprocessing of a range of steps in the background, in tf.data, and gives batches in order.

steps → read (Python, once a batch) → decode and preprocess (one example at a time, parallel) → batch → prefetch
"""

import atexit
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]
Read = Callable[[int], tuple[np.ndarray, ...]]

_PREFETCH = 2  # batches ready before they are asked for: one in hand, one in the making


class Stream(Iterator[Batch]):
    """An iterator over the batches of `steps`.

    `close`, the last reference going, and the end of the program each end it.
    """

    def __init__(
        self,
        read: Read,
        prepare: Callable[..., dict[str, Any]],
        *,
        steps: range,
        rows: int,
        specs: tuple[Any, ...],
        parallel_reads: int,
        explain: Callable[[int, Exception], Exception],
    ) -> None:
        """Starts reading at once.

        Args:
          read: A step's arrays, each of leading dim `rows`. Called from threads, `parallel_reads` at a time.
          prepare: One row of each array → features and mask, in the tf.data graph.
          steps: Which steps.
          rows: Examples a batch.
          specs: A tf.TensorSpec of one row of each array.
          parallel_reads: Calls of `read` under way at once.
          explain: (step, TensorFlow's error in `prepare`) → what to raise instead.
        """
        import tensorflow as tf

        self._iterator: Iterator[Batch] | None = None
        self._reads = _Reads(read, rows, specs)
        self._explain = explain
        self._step = steps.start
        self._ended = tf.Variable(False)
        dataset = _dataset(self._reads, prepare, steps, self._ended, rows, specs, parallel_reads)
        self._iterator = dataset.as_numpy_iterator()
        _streams.add(self)

    def __next__(self) -> Batch:
        """Raises what `read` raised or `explain` says if the batch failed."""
        import tensorflow as tf

        if self._iterator is None:
            raise StopIteration
        try:
            batch = next(self._iterator)
        except (StopIteration, tf.errors.OpError) as error:
            self.close()
            if self._reads.failure is not None:
                raise self._reads.failure from None
            if isinstance(error, StopIteration):
                raise
            raise self._explain(self._step, error) from error
        self._step += 1
        return batch

    def close(self) -> None:
        """Ends the reading, and waits for reads that are under way. Batches that were ready are dropped.

        TensorFlow's iterator may only go when none of its threads is in Python or on the way there: it holds Python's
        lock while it waits for them. So no further step begins, and those that have begun are drained.
        """
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return
        import tensorflow as tf

        self._reads.closing = True
        self._ended.assign(True)
        while True:
            try:
                next(iterator)
            except StopIteration:
                break
            except tf.errors.OpError:
                continue

    def __del__(self) -> None:
        self.close()


class _Reads:
    """Calls `read` for tf.data, and keeps what it raised: tf.data would reduce it to a message."""

    def __init__(self, read: Read, rows: int, specs: tuple[Any, ...]) -> None:
        self.failure: Exception | None = None
        self.closing = False
        self._read = read
        self._blank = tuple(_blank((rows, *spec.shape), spec.dtype.as_numpy_dtype) for spec in specs)

    def __call__(self, step: np.ndarray) -> tuple[np.ndarray, ...]:
        try:
            return self._read(int(step))
        except Exception as error:
            if self.closing:  # Nobody will look at the batch.
                return self._blank
            self.failure = self.failure or error
            raise StopIteration from None  # tf.data makes less noise of it than of any other


def _blank(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, b"", object) if dtype is object else np.zeros(shape, dtype)


def _dataset(
    reads: _Reads,
    prepare: Callable[..., dict[str, Any]],
    steps: range,
    ended: Any,
    rows: int,
    specs: tuple[Any, ...],
    parallel_reads: int,
) -> Any:
    """The tf.data.Dataset of batches, until `ended`, a bool tf.Variable, is true.

    Decoding examples in parallel is faster than decoding batches.
    """
    import tensorflow as tf

    def read_tensors(step: Any) -> tuple[Any, ...]:
        tensors = tf.numpy_function(reads, [step], [spec.dtype for spec in specs], stateful=True)
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape((rows, *spec.shape))
        return tuple(tensors)

    options = tf.data.Options()
    options.deterministic = True
    return (
        tf.data.Dataset.range(steps.start, steps.stop)
        .take_while(lambda _: tf.logical_not(ended))
        .map(read_tensors, num_parallel_calls=parallel_reads)
        .unbatch()
        .map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(rows, drop_remainder=True)
        .prefetch(_PREFETCH)
        .with_options(options)
    )


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


@atexit.register
def _close_streams() -> None:
    """Ends streams that nobody closed: a tf.data thread waiting for Python's lock would hang the exit."""
    for stream in list(_streams):
        stream.close()
