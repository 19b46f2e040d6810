"""Examples from any object with `len` and `[]`, as PyTorch's and grain's map-style datasets are."""

import concurrent.futures
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from data.source import DataError, Tensors, check_feature_name, specs_like

log = logging.getLogger(__name__)


class MapSource:
    """Items of a map-style object: dicts of numbers, arrays of a fixed shape each, or bytes.

    With `workers`, each process holds its own copy of the object: pickled to it or, where the config gave a
    callable, made by that callable in the process. Without, one thread of this process reads.
    """

    def __init__(self, items: Any, *, make: Any, workers: int) -> None:
        self.num_examples = len(items)
        kind = type(items)
        self.fingerprint = {
            "kind": "map-style",
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "num_examples": self.num_examples,
        }
        self._items = items
        self._features = _as_arrays(items[0], 0) if self.num_examples else {}
        for name in self._features:
            check_feature_name(name, "data.source[0]")
        self._pool = _start_pool(make, workers) if workers else None
        self._workers = workers
        self._closed = False
        self.parallel_reads = 2 if workers else 1  # the second keeps workers busy while the first is stacked
        if not workers:
            log.warning(
                "%s is read by one thread of this process, which shares Python's lock with the "
                "training loop. If that is too slow, set data.workers to a number of processes.",
                self.fingerprint["type"],
            )

    def tensor_specs(self) -> tuple[Any, ...]:
        """Specs of the first item's features, which every item must match."""
        return specs_like(self._features, lambda array: array.shape)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """The items `indices`, each feature stacked; workers read contiguous shares."""
        if self._pool is None:
            return _read_items(self._items, indices.tolist(), self._features)
        shares = [share.tolist() for share in np.array_split(indices, self._workers) if share.size]
        try:
            futures = [self._pool.submit(_read_in_worker, share, self._features) for share in shares]
            parts = [future.result() for future in futures]
        except BrokenProcessPool:
            raise DataError(
                "a data worker process ended. If this is the first batch, the program that starts workers "
                "may lack `if __name__ == '__main__':`, or data.source may not unpickle; later, it was killed, "
                "perhaps for memory. data.workers=0 reads in this process."
            ) from None
        except RuntimeError:
            if self._closed:
                raise
            # The program is ending and has ended the workers first; nobody will look at this batch.
            return tuple(np.stack([array] * len(indices)) for array in self._features.values())
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def decode(self, *tensors: Any) -> Tensors:
        """Names the features."""
        return dict(zip(self._features, tensors, strict=True))

    def close(self) -> None:
        """Ends the worker processes once the reads under way are done."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _start_pool(make: Any, workers: int) -> concurrent.futures.ProcessPoolExecutor:
    """Spawned, not forked: TensorFlow and JAX run threads, which a fork would leave holding locks."""
    try:
        payload = pickle.dumps(make)
    except Exception as error:
        raise ValueError(
            f"data.workers: expected a data.source that pickles, to be sent to {workers} processes; pickling "
            f"{type(make).__qualname__} failed: {error}. Give a function at the top of a module that makes "
            "the object, or set data.workers=0."
        ) from error
    return concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_init_worker,
        initargs=(payload,),
    )


_worker_items: Any = None  # the dataset, in a worker process


def _init_worker(payload: bytes) -> None:
    """Opens the dataset in a worker; leaves Ctrl-C to the parent, and ends when the parent has ended."""
    global _worker_items
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    made = pickle.loads(payload)
    _worker_items = made if hasattr(made, "__len__") and not isinstance(made, type) else made()


def _exit_with_parent() -> None:
    """Without this a worker whose parent was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _read_in_worker(indices: list[int], features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    return _read_items(_worker_items, indices, features)


def _read_items(items: Any, indices: Sequence[int], features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Reads items one by one and stacks each feature. Raises DataError, which names the item at fault."""
    read = []
    for index in indices:
        try:
            item = _as_arrays(items[index], index)
        except Exception as error:
            raise DataError(f"data.source[{index}]: {type(error).__name__}: {error}") from error
        found = {name: (array.shape, array.dtype) for name, array in item.items()}
        expected = {name: (array.shape, array.dtype) for name, array in features.items()}
        if found != expected:
            raise DataError(
                f"data.source[{index}]: expected the features, shapes and dtypes of data.source[0], "
                f"{expected}; found {found}. Make them equal in the dataset, or hand over encoded bytes and decode "
                "them in data.preprocess."
            )
        read.append(item)
    return tuple(np.stack([item[name] for item in read]) for name in features)


def _as_arrays(item: Any, index: int) -> dict[str, np.ndarray]:
    """One item's features as arrays; bytes and text as object scalars, which tf.data takes for strings."""
    if not isinstance(item, Mapping):
        raise ValueError(
            f"data.source[{index}]: expected a dict of features such as {{'image': …, 'label': …}}; found "
            f"{type(item).__qualname__}. Wrap the dataset so that [] returns a dict."
        )
    arrays = {}
    for name, value in item.items():
        is_text = isinstance(value, bytes | str)
        arrays[name] = np.array(value, object) if is_text else np.asarray(value)
        if arrays[name].dtype.kind == "O" and not is_text:
            raise ValueError(
                f"data.source[{index}][{name!r}]: expected a number, an array of numbers, bytes or text; found "
                f"{type(value).__qualname__}. Convert it or leave it out."
            )
    return arrays
