"""Host batches → global device arrays, prepared by a thread while the device works."""

import queue
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from data import DataConfig, DataError, Pipeline
from trainer.errors import BadDataError, UserError
from trainer.mesh import batch_sharding
from trainer.step import Batch

HostBatch = dict[str, np.ndarray]


def open_pipeline(config: DataConfig, batch_size: int, seed: int, prefix: str) -> Pipeline:
    """The pipeline that `config` asks for.

    Raises:
      UserError: what is wrong with the data; `prefix` says where in the config they stand.
    """
    try:
        return Pipeline(config, batch_size=batch_size, seed=seed)
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from error


def to_device(batch: HostBatch, mesh: Mesh, batch_size: int) -> Batch:
    """This host's rows of a batch as part of the global arrays, split over the mesh's batch axes.

    Args:
      batch: name → array[local_batch, ...].
      mesh: the run's mesh.
      batch_size: rows of the global batch.

    Raises:
      UserError: if an integer does not fit the 32 bits that JAX gives it.
    """
    sharding = batch_sharding(mesh)

    def place(name: str, rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, _narrow(name, rows), (batch_size, *rows.shape[1:]))

    return {name: place(name, np.asarray(rows)) for name, rows in batch.items()}


def _narrow(name: str, rows: np.ndarray) -> np.ndarray:
    dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
    narrow = rows.astype(dtype, copy=False)
    if dtype != rows.dtype and np.issubdtype(dtype, np.integer) and not np.array_equal(narrow, rows):
        example = rows.flat[np.argmax(narrow != rows)]
        raise UserError(
            f"feature {name!r} holds {rows.dtype} values that do not fit {dtype}, such as {example}; "
            "reduce them in preprocess, or enable jax_enable_x64"
        )
    return narrow


class Prefetcher:
    """Runs ahead of the loop by `depth` batches, in a thread."""

    def __init__(self, batches: Iterator[HostBatch], mesh: Mesh, batch_size: int, depth: int = 2):
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(batches, mesh, batch_size), name="prefetch", daemon=True
        )
        self._thread.start()

    def _fill(self, batches: Iterator[HostBatch], mesh: Mesh, batch_size: int) -> None:
        item: Batch | BaseException | None
        try:
            for batch in batches:
                if not self._put(to_device(batch, mesh, batch_size)):
                    break
            item = None
        except BaseException as error:  # Raised again where the batch is asked for.
            item = error
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        self._put(item)

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def get(self, cancelled: Callable[[], bool] = lambda: False) -> Batch | None:
        """The next batch; None at the end of the data, or as soon as `cancelled()` is true while it waits.

        Raises:
          BadDataError: an example cannot be read or prepared.
          Exception: whatever else the pipeline raised.
        """
        while not cancelled():
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, DataError):
                raise BadDataError(str(item)) from item
            if isinstance(item, BaseException):
                raise item
            return item
        return None

    def close(self) -> None:
        """Ends the thread. One that a stalled source holds up is left behind; it does not keep the process alive."""
        self._closed.set()
        self._thread.join(timeout=1)
