"""Batches of examples: the stream of a run as a function of (seed, step), and one exact pass.

`Order` says which examples, a `Source` reads them, and a `Stream` runs that and the preprocessing ahead of time.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from data.order import Order
from data.source import DataError, Source, check_feature_name
from data.sources import open_source
from data.stream import Batch, Stream

ElementSpec = dict[str, tuple[tuple[int, ...], np.dtype]]
_END = 2**62  # of a stream without end


@dataclasses.dataclass
class DataConfig:
    """What to read, and what to do to each example.

    >>> DataConfig(source={"x": np.zeros((10, 3)), "y": np.arange(10)}).shuffle
    True
    """

    # A TFDS name ("digits", "cifar10:3.0.2"), a dict of equally long arrays, an object with len and [] whose
    # items are dicts, or a callable without arguments that returns one of these.
    source: Any
    split: str = "train"  # TFDS split expression, "train[:90%]" too; other sources have only the default
    # (features of one example, int64[2] seed) → features of fixed shapes, in tf.data. An attribute
    # `encoded: tuple[str, ...]` names image features that it takes as encoded bytes.
    preprocess: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None
    shuffle: bool = True  # another order each epoch; evaluations read in order whatever this says
    workers: int = 0  # processes that read an object with len and []; 0: one thread of this process

    def __post_init__(self) -> None:
        """Raises ValueError for a field of the wrong kind."""
        if not isinstance(self.split, str) or not self.split:
            raise ValueError(
                f"data.split: expected a name or an expression such as 'train[:90%]'; found {self.split!r}."
            )
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 0:
            raise ValueError(f"data.workers: expected a number of processes, 0 or more; found {self.workers!r}.")
        if self.preprocess is not None and not callable(self.preprocess):
            raise ValueError(
                "data.preprocess: expected a function of (example, seed) or an object called like one; found "
                f"{self.preprocess!r}. Classes in data.images are given as instances: ShiftedImage()."
            )


class Pipeline:
    """An open dataset, cut into batches of `batch_size` examples over all hosts.

    >>> pipeline = Pipeline(DataConfig(source={"x": np.arange(6)}, shuffle=False), batch_size=4, seed=0)
    >>> [batch["x"].tolist() for batch in pipeline.batches(start=0, rows=np.arange(4), num_steps=2)]
    [[0, 1, 2, 3], [4, 5, 0, 1]]
    >>> [batch["mask"].tolist() for batch in pipeline.eval_batches(rows=np.arange(4))]
    [[True, True, True, True], [True, True, False, False]]
    """

    num_examples: int
    element_spec: ElementSpec  # shape and dtype of each feature of one example as it comes out; no "mask"
    fingerprint: dict[str, Any]  # what the data are, as JSON: equal for equal data

    def __init__(self, config: DataConfig, *, batch_size: int, seed: int) -> None:
        """Opens the source and traces the preprocessing. Reading begins with the first stream.

        Raises:
          ValueError: The source, its split, a field of `config` or what `preprocess` returns cannot be used.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1 example; found {batch_size}.")
        _hide_gpus()
        self._preprocess = config.preprocess
        self._source: Source = open_source(
            config.source,
            split=config.split,
            encoded=tuple(getattr(config.preprocess, "encoded", ())),
            workers=config.workers,
        )
        try:
            if not self._source.num_examples:
                raise ValueError("data.source: expected at least one example; found none.")
            self.num_examples = self._source.num_examples
            self.fingerprint = self._source.fingerprint
            self._order = Order(self.num_examples, batch_size, seed, config.shuffle)
            self._eval_order = Order(self.num_examples, batch_size, seed, shuffle=False)
            self._prepare = self._trace()
            self.element_spec = _element_spec(self._prepare.structured_outputs)
        except BaseException:
            self.close()
            raise

    @property
    def num_eval_batches(self) -> int:
        """Batches of one pass over all examples, the padded one included."""
        return -(-self.num_examples // self._order.batch_size)

    def batches(self, *, start: int, rows: np.ndarray, num_steps: int | None = None) -> Iterator[Batch]:
        """The training stream from step `start`: without end, or for `num_steps`.

        Args:
          start: Global step. Any costs what 0 costs.
          rows: The rows of the global batch that this host reads, int[n] in [0, batch_size), ascending.
          num_steps: Batches to give; None is no end.

        Returns:
          An iterator of features, each of leading dim n, and "mask", bool[n], all True. It raises DataError
          for an example that cannot be read or prepared.
        """
        stop = _END if num_steps is None else start + num_steps
        return self._stream(self._order, range(start, stop), rows)

    def eval_batches(self, *, rows: np.ndarray) -> Iterator[Batch]:
        """One pass in order, `num_eval_batches` long on every host.

        Rows past the last example repeat it and have mask False. Otherwise as `batches`.
        """
        return self._stream(self._eval_order, range(self.num_eval_batches), rows)

    def close(self) -> None:
        """Ends worker processes and closes files. Iterators of this pipeline must not be used afterwards."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_rows(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        ascending = rows.ndim == 1 and rows.size > 0 and bool(np.all(np.diff(rows) > 0))
        if not ascending or rows[0] < 0 or rows[-1] >= self._order.batch_size:
            raise ValueError(
                f"rows: expected ascending row numbers in [0, {self._order.batch_size}), at least one; found {rows}."
            )
        return rows

    def _trace(self) -> Any:
        """Decoding and preprocessing of one example as a graph: (seed, *what the source reads) → features."""
        import tensorflow as tf

        specs = (tf.TensorSpec((2,), tf.int64), *self._source.tensor_specs())

        def prepare(seed: Any, *tensors: Any) -> dict[str, Any]:
            example = self._source.decode(*tensors)
            return example if self._preprocess is None else self._preprocess(example, seed)

        try:
            return tf.function(prepare, input_signature=specs).get_concrete_function()
        except Exception as error:
            raise ValueError(
                f"data.preprocess: {self._preprocess} failed on the examples of this source: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _stream(self, order: Order, steps: range, rows: np.ndarray) -> Stream:
        import tensorflow as tf

        rows = self._check_rows(rows)

        def read(step: int) -> tuple[np.ndarray, ...]:
            indices, epochs, mask = self._examples(order, step, rows)
            return (order.example_seeds(indices, epochs), mask, *self._source.read(indices))

        def prepare(seed: Any, mask: Any, *tensors: Any) -> dict[str, Any]:
            return {**self._prepare(seed, *tensors), "mask": mask}

        return Stream(
            read,
            prepare,
            steps=steps,
            rows=len(rows),
            specs=(tf.TensorSpec((2,), tf.int64), tf.TensorSpec((), tf.bool), *self._source.tensor_specs()),
            parallel_reads=self._source.parallel_reads,
            explain=lambda step, error: self._data_error(order, step, rows, error),
        )

    def _examples(self, order: Order, step: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Indices, epochs and mask of this host's rows of a step. Only an evaluation has padding."""
        indices, epochs = order.batch(step, rows)
        if order is not self._eval_order:
            return indices, epochs, np.ones(len(rows), bool)
        mask = epochs == 0
        return np.where(mask, indices, self.num_examples - 1), np.zeros_like(epochs), mask

    def _data_error(self, order: Order, step: int, rows: np.ndarray, error: Exception) -> DataError:
        """Prepares the examples of a failed batch one by one to name the one at fault."""
        import tensorflow as tf

        indices, epochs, _ = self._examples(order, step, rows)
        seeds = order.example_seeds(indices, epochs)
        for index, seed in zip(indices, seeds, strict=True):
            try:
                read = self._source.read(np.array([index]))
                self._prepare(tf.constant(seed), *(tf.constant(array[0]) for array in read))
            except tf.errors.OpError as found:
                return DataError(f"example {index} of {self.fingerprint}, at step {step}: {found.message}")
        return DataError(f"a batch of {self.fingerprint}, at step {step}: {error}")


def _hide_gpus() -> None:
    """TensorFlow only reads data here; the accelerator's memory belongs to JAX."""
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")


def _element_spec(outputs: Any) -> ElementSpec:
    """Shapes and dtypes of prepared features. Raises ValueError for what cannot go to a device in a batch."""
    import tensorflow as tf

    if not isinstance(outputs, dict) or not outputs:
        raise ValueError(f"data.preprocess: expected a dict of features; found {outputs!r}. Return a dict.")
    spec: ElementSpec = {}
    for name, tensor in outputs.items():
        check_feature_name(name, "data.preprocess")
        dense = isinstance(tensor, tf.TensorSpec | tf.Tensor)
        if not dense or not tensor.shape.is_fully_defined() or tensor.dtype == tf.string:
            found = f"dtype {tensor.dtype.name}, shape {tensor.shape}" if dense else type(tensor).__qualname__
            raise ValueError(
                f"data.preprocess: expected every feature to be numbers of one fixed shape, to go to a "
                f"device in a batch; found {name!r}: {found}. Select the features to train on in data.preprocess, "
                "for instance lambda example, seed: {'image': example['image'], 'label': example['label']}."
            )
        spec[name] = (tuple(tensor.shape), np.dtype(tensor.dtype.as_numpy_dtype))
    return spec
