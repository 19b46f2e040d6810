"""TFDS datasets in ArrayRecord: digits, JPEGs through the ImageNet path, and wrong names."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import CentreCrop, DataConfig, DataError, NormalizedImage, Pipeline, RandomResizedCrop, ShiftedImage
from data.images import DIGITS_MEAN, DIGITS_STD
from data.records import RecordSource

NUM = 24


class TinyJpegs(tfds.core.GeneratorBasedBuilder):
    """Photographs of several sizes with a text id, as ImageNet has them: image i is grey 8·i, redder right."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=NUM),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in range(NUM):
            image = np.full((40 + index, 60, 3), 8 * index, np.uint8)
            image[..., 0] = np.linspace(0, 255, 60)
            yield index, {"image": image, "label": index, "file_name": f"{index}.jpg"}


class TinySequential(TinyJpegs):
    """The same, prepared as TFRecord."""


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tfds")
    TinyJpegs(data_dir=folder, file_format="array_record").download_and_prepare()
    TinySequential(data_dir=folder, file_format="tfrecord").download_and_prepare()
    tfds.core.add_data_dir(folder)


def open_jpegs(preprocess: Any, **fields: Any) -> Pipeline:
    return Pipeline(DataConfig("tiny_jpegs", preprocess=preprocess, **fields), batch_size=8, seed=0)


def epochs(pipeline: Pipeline, num: int) -> list[dict[int, np.ndarray]]:
    """The images of each epoch by label."""
    batches = list(pipeline.batches(start=0, rows=np.arange(8), num_steps=num * NUM // 8))
    images = np.concatenate([batch["image"] for batch in batches])
    labels = np.concatenate([batch["label"] for batch in batches]).tolist()
    return [
        dict(zip(labels[start : start + NUM], images[start : start + NUM], strict=True))
        for start in range(0, num * NUM, NUM)
    ]


def test_imagenet_training_path() -> None:
    """Decode, random crop, flip, normalise, on real JPEGs of several sizes. Cases D61, R11."""
    crop = RandomResizedCrop(size=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    first, second = epochs(open_jpegs(crop), 2)
    assert sorted(first) == list(range(NUM))
    flipped = 0
    for label, image in first.items():
        assert image.shape == (16, 16, 3)
        assert image.dtype == np.float32
        np.testing.assert_allclose(image[..., 2].mean() * 255, 8 * label, atol=4)
        flipped += bool(image[:, 0, 0].mean() > image[:, -1, 0].mean())
        assert np.abs(image - second[label]).max() > 1e-3
    assert 4 <= flipped <= 20
    again = epochs(open_jpegs(crop), 1)[0]
    assert all(np.array_equal(again[label], first[label]) for label in first)


def test_imagenet_evaluation_path() -> None:
    """The central square: symmetric in the ramp, as wide as size/resize of the shorter side."""
    crop = CentreCrop(size=14, resize=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    (batch, *_) = open_jpegs(crop).eval_batches(rows=np.arange(8))
    assert batch["image"].shape == (8, 14, 14, 3)
    for label, image in zip(batch["label"], batch["image"], strict=True):
        ramp = image[..., 0].mean(axis=0)
        assert ramp.mean() == pytest.approx(0.5, abs=0.02)
        width = round((40 + label) * 14 / 16) / 60
        assert ramp[-1] - ramp[0] == pytest.approx(width * 13 / 14, abs=0.04)


def test_decoded_images_go_through_shift_and_flip() -> None:
    """What the pipeline decodes and shifts is the image, moved, on black. (CIFAR's path.)"""
    image = tf.constant(np.arange(1, 17, dtype=np.uint8).reshape(4, 4, 1))
    example = {"image": image, "label": tf.constant(3), "id": tf.constant("a")}
    shift = ShiftedImage(pixels=2, flip=True, mean=(0.0,), std=(1 / 255,))
    outputs = shift(example, tf.constant([3, 4], tf.int64))
    assert sorted(outputs) == ["image", "label"]
    shifted = outputs["image"].numpy()[..., 0]
    padded = np.pad(image.numpy()[..., 0], 2)
    windows = [padded[r : r + 4, c : c + 4] for r in range(5) for c in range(5)]
    assert any(np.allclose(shifted, w) or np.allclose(shifted, w[:, ::-1]) for w in windows)


def test_means_must_fit_the_channels() -> None:
    with pytest.raises(ValueError, match="a mean and a std for each of the image's 1 channels"):
        Pipeline(DataConfig("digits", preprocess=NormalizedImage()), batch_size=4, seed=0)


def test_digits() -> None:
    """1,437 and 360 examples, stratified, without overlap, normalised to zero mean and unit variance."""
    preprocess = NormalizedImage(DIGITS_MEAN, DIGITS_STD)
    seen: list[int] = []
    for split, size in (("train", 1437), ("test", 360)):
        data = Pipeline(DataConfig("digits", split, preprocess), batch_size=size, seed=0)
        (batch,) = data.eval_batches(rows=np.arange(size))
        assert batch["image"].shape == (size, 8, 8, 1)
        assert abs(np.bincount(batch["label"]) - size / 10).max() <= 0.04 * size / 10 + 1
        assert abs(batch["image"].mean()) < 0.02
        assert abs(batch["image"].std() - 1) < 0.02
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(1797))


def test_splits_can_be_sliced() -> None:
    data = Pipeline(DataConfig("digits", "train[:64]"), batch_size=64, seed=0)
    assert data.num_examples == 64
    assert data.fingerprint == {
        "kind": "tfds",
        "name": "digits/1.0.0",
        "split": "train[:64]",
        "num_examples": 64,
    }


def test_two_processes_prepare_at_once(tmp_path: Path) -> None:
    """Both open the dataset, whoever finishes first."""
    code = "from data import *; print(Pipeline(DataConfig('digits'), batch_size=1, seed=0).num_examples)"
    environment = {"TFDS_DATA_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    for process in processes:
        assert process.communicate(timeout=60)[0].strip().endswith("1437")
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [
        ("digit", "train", "unknown dataset 'digit'; .*digits"),
        ("digits:9.0.0", "train", "only: 1.0.0"),
        ("digits", "val", r"unknown split 'val' of digits/1.0.0, which has .*'train': 1437, 'test': 360"),
        ("digits", "train[:0]", "at least one example; 'train.:0.' .* is empty"),
        ("digits", "train[,", "unknown split"),
        ("tiny_sequential", "train", "expected ArrayRecord files.*found tfrecord"),
        ("tiny_jpegs", "train", "'file_name': dtype string"),
    ],
)
def test_bad_names_are_named(source: str, split: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(DataConfig(source, split), batch_size=4, seed=0)


def test_encoded_features_must_exist() -> None:
    with pytest.raises(ValueError, match=r"found \['picture'\] among those to be left encoded"):
        RecordSource("tiny_jpegs", "train", ("picture",))


def test_no_network_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TFDS alone retries for over three minutes."""

    def no_address(*args: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_address)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"no network: none of its download hosts .*www\.cs\.toronto\.edu"):
        Pipeline(DataConfig("cifar10"), batch_size=4, seed=0)


def test_a_file_that_is_no_jpeg_is_named() -> None:
    source = [{"image": b"not a jpeg", "label": 0}]
    stream = Pipeline(DataConfig(source, preprocess=CentreCrop()), batch_size=1, seed=0)
    with pytest.raises(DataError, match="example 0 of"):
        next(stream.batches(start=0, rows=np.arange(1)))
