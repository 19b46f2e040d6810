"""Examples of a TFDS dataset, by random access into its ArrayRecord files."""

import difflib
import logging
import socket
import sys
import urllib.parse
import urllib.request
from typing import Any

import numpy as np
from etils import epath

from data.source import Tensors

log = logging.getLogger(__name__)


class RecordSource:
    """A split of any TFDS dataset, downloaded and prepared as ArrayRecord on first use.

    Files lie where TFDS keeps its datasets: ~/tensorflow_datasets, or TFDS_DATA_DIR.
    """

    parallel_reads = 2  # the reader releases Python's lock

    def __init__(self, name: str, split: str, encoded: tuple[str, ...]) -> None:
        """Raises ValueError, with one message, for whatever keeps the split from being read."""
        import tensorflow_datasets as tfds
        from array_record.python import array_record_data_source

        builder = _prepared_builder(name)
        instructions = _file_instructions(builder, split)
        self._records = array_record_data_source.ArrayRecordDataSource(instructions)
        self._features = builder.info.features
        unknown = sorted(set(encoded) - set(self._features))
        if unknown:
            raise ValueError(
                f"data.preprocess: expected image features of {name!r}, which has {sorted(self._features)}; "
                f"found "
                f"{unknown} among those to be left encoded. Choose a preprocess that fits this dataset."
            )
        self._decoders = {feature: tfds.decode.SkipDecoding() for feature in encoded}
        self.num_examples = len(self._records)
        self.fingerprint = {
            "kind": "tfds",
            "name": builder.info.full_name,
            "split": split,
            "num_examples": self.num_examples,
        }

    def tensor_specs(self) -> tuple[Any, ...]:
        """A record's bytes."""
        import tensorflow as tf

        return (tf.TensorSpec((), tf.string),)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """The records' bytes, object[n]."""
        return (np.array(self._records.__getitems__(indices.tolist()), object),)

    def decode(self, *tensors: Any) -> Tensors:
        """Parses one record; images are decoded but for those asked for encoded."""
        return self._features.deserialize_example(tensors[0], decoders=self._decoders)

    def feature(self, name: str) -> list[Any]:
        """One feature of every example, in order, in memory. Raises ValueError if there is none of that name."""
        if name not in self._features:
            raise ValueError(f"data.source: expected a feature {name!r}; the dataset has {sorted(self._features)}.")
        (records,) = self.read(np.arange(self.num_examples))
        return [self._features.deserialize_example_np(record)[name] for record in records]

    def close(self) -> None:
        """Closes the files."""
        self._records.__exit__(None, None, None)


def _prepared_builder(name: str) -> Any:
    """The dataset's builder, prepared on disk as ArrayRecord. Raises ValueError."""
    builder = _builder(name)
    if not builder.is_prepared():
        log.info("preparing %s in %s (once)", name, builder.data_dir)
        _prepare(name, builder)
        builder = _builder(name)
    found = builder.info.file_format.value
    if found != "array_record":
        raise ValueError(
            f"data.source={name!r}: expected ArrayRecord files, which can be read in any order; found "
            f"{found} in {builder.data_dir}. Convert them (tfds convert_format --help), or set TFDS_DATA_DIR to "
            "another folder, where the dataset is then prepared as ArrayRecord."
        )
    return builder


def _builder(name: str) -> Any:
    """The builder of `name`, for instance "cifar10:3.0.2". Raises ValueError."""
    import tensorflow_datasets as tfds

    import data.digits.digits_dataset_builder
    import data.python_stdlib.python_stdlib_dataset_builder  # noqa: F401 (both register their names)

    try:
        return tfds.builder(name, file_format="array_record")
    except tfds.core.registered.DatasetNotFoundError:
        plain = name.split(":")[0].split("/")[0]
        known = sorted({*tfds.list_builders(with_community_datasets=False), "digits", "python_stdlib"})
        near = difflib.get_close_matches(plain, known, n=3) or [*known[:3], "…"]
        raise ValueError(
            f"data.source: unknown dataset {name!r}; the nearest of {len(known)} TFDS names: "
            f"{', '.join(near)}. Give a TFDS name, or a dict of arrays, or an object with len and []."
        ) from None
    except Exception as error:  # TFDS raises AssertionError, ValueError and others for a version or config
        if "File format is already set" in str(error):
            return tfds.builder(name)
        raise ValueError(f"data.source={name!r}: TFDS does not open it: {_one_line(error)}") from error


def _prepare(name: str, builder: Any) -> None:
    """Downloads and writes the dataset. Raises ValueError unless it is there afterwards, whoever wrote it."""
    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    _check_network(name, builder)
    try:
        builder.download_and_prepare()
    except Exception as error:
        # Another process that prepared the same dataset meanwhile has won: its folder is complete.
        if _builder(name).is_prepared():
            return
        raise ValueError(
            f"data.source={name!r}: it is not in {builder.data_dir} and could not be prepared: "
            f"{_one_line(error)} (Without a network, copy a prepared folder there; 'digits' needs no download.)"
        ) from error


def _check_network(name: str, builder: Any) -> None:
    """Raises ValueError at once where no download can succeed; TFDS would retry for over three minutes."""
    hosts = sorted({urllib.parse.urlsplit(url).hostname or "" for url in builder.url_infos or {}})
    downloads = epath.Path(builder.data_dir_root) / "downloads"
    finished = downloads.exists() and any(downloads.glob("*/*.INFO"))  # TFDS may not need the network
    if not hosts or finished or urllib.request.getproxies():
        return
    for host in hosts:
        try:
            socket.getaddrinfo(host, 443)
            return
        except OSError:
            continue
    raise ValueError(
        f"data.source={name!r}: it is not in {builder.data_dir}, and no network: none of its download hosts "
        f"can be found ({', '.join(hosts)}). Copy a prepared folder there, or use 'digits', which needs no download."
    )


def _file_instructions(builder: Any, split: str) -> list[Any]:
    """Files and ranges of a split expression. Raises ValueError if it is unknown or empty."""
    from tensorflow_datasets.core.data_sources import base

    splits = {name: info.num_examples for name, info in builder.info.splits.items()}
    try:
        instructions = base.file_instructions(builder.info, split)
    except Exception as error:  # ValueError, KeyError or AssertionError, by the kind of mistake
        raise ValueError(
            f"data.split: unknown split {split!r} of {builder.info.full_name}, which has (examples) "
            f"{splits}. Give one of them, or a slice such as 'train[:90%]'. TFDS says: {_one_line(error)}"
        ) from None
    if not instructions:
        raise ValueError(
            f"data.split: expected at least one example; {split!r} of {builder.info.full_name} is empty. "
            f"It has (examples) {splits}."
        )
    return instructions


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
