"""Runs reads and preprocessing of a range of steps in the background, in tf.data, and gives batches in order.

steps → read (Python, once a batch) → decode and preprocess (one example at a time, parallel) → batch → prefetch
"""

import atexit
import threading
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
        self._reads = _Reads(read)
        self._explain = explain
        self._step = steps.start
        dataset = _dataset(self._reads, prepare, steps, rows, specs, parallel_reads)
        self._iterator: Iterator[Batch] | None = dataset.as_numpy_iterator()
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
        """Ends the reading. Batches that were ready are dropped."""
        self._reads.stop()
        self._iterator = None

    def __del__(self) -> None:
        self._reads.stop()


class _Reads:
    """Calls `read` for tf.data, which knows neither Python's exceptions nor the end of the program."""

    def __init__(self, read: Read) -> None:
        self.failure: Exception | None = None  # tf.data would reduce it to a message
        self._read = read
        self._stopped = False
        self._active = 0
        self._change = threading.Condition()

    def __call__(self, step: np.ndarray) -> tuple[np.ndarray, ...]:
        with self._change:
            if self._stopped:
                raise StopIteration  # tf.data ends without a word
            self._active += 1
        try:
            return self._read(int(step))
        except Exception as error:
            self.failure = self.failure or error
            self.stop()
            raise StopIteration from None
        finally:
            with self._change:
                self._active -= 1
                self._change.notify_all()

    def stop(self) -> None:
        """Lets no further read begin."""
        self._stopped = True

    def wait(self) -> None:
        """Returns when no read is under way."""
        with self._change:
            self._change.wait_for(lambda: not self._active)


def _dataset(
    reads: _Reads,
    prepare: Callable[..., dict[str, Any]],
    steps: range,
    rows: int,
    specs: tuple[Any, ...],
    parallel_reads: int,
) -> Any:
    """The tf.data.Dataset of batches. Decoding examples in parallel is faster than decoding batches."""
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
        stream._reads.wait()
