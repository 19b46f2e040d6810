"""Input pipeline against the usual one: sequential TFRecord files behind a shuffle buffer, on the same JPEGs.

    python -m bench.input_pipeline

Writes 3,000 JPEGs of 64×64 once, as ArrayRecord and as TFRecord, then lets both pipelines read them in turn
through the same decoding and preprocessing. Expected on 2 CPU cores: a ratio of at least 0.9, the same time
to the first batch at step 0 and 1,000,000, and memory that does not grow with the epochs. About a minute.
"""

import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from data import DataConfig, Pipeline, RandomResizedCrop

NUM_IMAGES = 3_000
BATCH_SIZE = 128
RUNS = 7  # of each pipeline, alternating
STEPS = 50  # of each run: about two epochs
PREPROCESS = RandomResizedCrop(size=56)


class Jpegs(tfds.core.GeneratorBasedBuilder):
    """Smooth random colour images: they compress like photographs, noise would not."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(64, 64, 3), encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        rng = np.random.default_rng(0)
        for index in range(NUM_IMAGES):
            coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
            image = tf.cast(tf.image.resize(coarse, (64, 64)), tf.uint8).numpy()
            yield index, {"image": image, "label": index % 10}


def sequential(builder: Any, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """The usual pipeline, as TFDS users write it: endless, shuffled through a buffer, decoded in parallel."""
    read_config = tfds.ReadConfig(shuffle_seed=seed)
    decoders = {name: tfds.decode.SkipDecoding() for name in PREPROCESS.encoded}
    examples = builder.as_dataset("train", decoders=decoders, shuffle_files=True, read_config=read_config)
    seeds = tf.data.Dataset.random(seed).batch(2)
    shuffled = examples.repeat().shuffle(1_000, seed=seed)
    return (
        tf.data.Dataset.zip(shuffled, seeds)
        .map(PREPROCESS, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH_SIZE, drop_remainder=True)
        .prefetch(2)
        .as_numpy_iterator()
    )


def examples_per_second(batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Over STEPS batches, the start left out."""
    stream = iter(batches)
    next(stream)
    start = time.perf_counter()
    count = sum(len(batch["label"]) for batch in itertools.islice(stream, STEPS))
    return count / (time.perf_counter() - start)


def seconds_to_first_batch(pipeline: Pipeline, step: int) -> float:
    """From asking for a stream at `step` to holding its first batch."""
    start = time.perf_counter()
    next(pipeline.batches(start=step, rows=np.arange(BATCH_SIZE)))
    return time.perf_counter() - start


def resident_mib() -> float:
    """Memory of this process that is in RAM now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def compare_speed(pipeline: Pipeline, tfrecord: Any) -> None:
    """Prints each run of both pipelines, and the ratio of their medians."""
    speeds: dict[str, list[float]] = {"flaxloom": [], "sequential": []}
    for run in range(RUNS):
        ours = pipeline.batches(start=run * STEPS, rows=np.arange(BATCH_SIZE))
        speeds["flaxloom"].append(examples_per_second(ours))
        speeds["sequential"].append(examples_per_second(sequential(tfrecord, seed=run)))
        shown = ", ".join(f"{name} {values[-1]:7,.0f} examples/s" for name, values in speeds.items())
        print(f"run {run}: {shown}; memory {resident_mib():.0f} MiB")
    ours, theirs = (statistics.median(values) for values in speeds.values())
    print(f"median: flaxloom {ours:,.0f}, sequential {theirs:,.0f} examples/s; ratio {ours / theirs:.3f}")


def main() -> None:
    """Prints every run, the ratio of medians, starting times and memory."""
    tfds.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        Jpegs(data_dir=f"{folder}/random_access", file_format="array_record").download_and_prepare()
        tfds.core.add_data_dir(f"{folder}/random_access")  # where Pipeline finds "jpegs"
        tfrecord = Jpegs(data_dir=f"{folder}/sequential", file_format="tfrecord")
        tfrecord.download_and_prepare()
        with Pipeline(DataConfig("jpegs", preprocess=PREPROCESS), batch_size=BATCH_SIZE, seed=0) as pipeline:
            compare_speed(pipeline, tfrecord)
            for step in (0, 1_000_000, 0, 1_000_000):
                print(f"first batch from step {step:>9,}: {seconds_to_first_batch(pipeline, step):.3f} s")
            print(f"memory after all: {resident_mib():.0f} MiB")


if __name__ == "__main__":
    main()
