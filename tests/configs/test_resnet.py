"""The ResNet configs are what they say: abstractly at full size, and for real on small data."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

from trainer import load_config
from trainer.duration import Calendar
from trainer.mesh import MeshConfig, make_mesh
from trainer.optimizer import learning_rates
from trainer.program import Program

NUM_PHOTOS = {"train": 16, "validation": 11}


class Photos(tfds.core.GeneratorBasedBuilder):
    """JPEGs of several sizes with text beside them, in the splits of ImageNet."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = Path(__file__).parent

    def _info(self):
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=4),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(num) for split, num in NUM_PHOTOS.items()}

    def _generate_examples(self, num):
        rng = np.random.default_rng(num)
        for index in range(num):
            image = rng.integers(0, 256, (40 + index, 60, 3), np.uint8)
            yield index, {"image": image, "label": index % 4, "file_name": f"{index}.jpg"}


@pytest.mark.parametrize(
    ("variant", "num_examples", "side", "num_steps", "peak"),
    [("cifar10", 50_000, 32, 78_125, 0.1), ("imagenet", 1_281_167, 224, 112_603, 0.4)],
)
def test_the_recipes_of_the_literature(variant, num_examples, side, num_steps, peak):
    """Epochs, linear scaling and warm-up give the published numbers, and the whole program traces on 8 devices."""
    config = load_config(f"configs/resnet.py:{variant}")
    calendar = Calendar(config.batch_size, num_examples)
    assert calendar.steps(config.train_for, "train_for") == num_steps
    rates = learning_rates(config.optimizer, Calendar(config.batch_size, num_examples, num_steps), num_steps)
    warmup = calendar.steps("5 epochs", "")
    assert rates[0] == 0 and rates.argmax() == warmup
    assert rates[warmup] == pytest.approx(peak)
    assert rates[-1] < 1e-6 * peak

    class Task(config.trainer):
        def __init__(self):
            self.config = config

    element = {"image": ((side, side, 3), np.dtype(np.float32)), "label": ((), np.dtype(np.int32))}
    program = Program(Task(), make_mesh(MeshConfig()), element)
    assert program.batch["image"].shape == (config.batch_size, side, side, 3)
    assert program.state.params["head/kernel"].shape[-1] == config.model.num_classes
    assert {leaf.dtype for leaf in program.state.params.values()} == {np.dtype(np.float32)}


def test_imagenet_trains_on_small_jpegs(tmp_path, monkeypatch):
    """The real path: decode, random crop, flip, normalise, bfloat16, evaluation on a padded last batch."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "tfds"))
    config = load_config(
        "configs/resnet.py:imagenet",
        {
            "data.source": "photos",
            "evals[0].data.source": "photos",
            "data.preprocess.size": "32",
            "evals[0].data.preprocess.size": "32",
            "evals[0].data.preprocess.resize": "36",
            "model.depth": "18",
            "model.width": "8",
            "model.num_classes": "4",
            "batch_size": "8",
            "train_for": "12 steps",
            "log.tensorboard": "False",
        },
    )
    trainer = config.trainer(config, tmp_path / "run", devices=jax.devices()[:2])
    assert trainer.fit().finished
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (test, *_), (train, *_) = ([line for line in lines if line["split"] == split] for split in ("test", "train"))
    assert test["accuracy"] * NUM_PHOTOS["validation"] == pytest.approx(round(test["accuracy"] * 11))
    assert np.isfinite(train["loss"]) and train["grad_norm"] > 0


@pytest.mark.drill
def test_digits_reach_their_accuracy(tmp_path):
    """The config's claim: at least 0.98 on the test split, each of its 360 examples counted once."""
    config = load_config("configs/resnet.py")
    trainer = config.trainer(config, tmp_path, devices=jax.devices()[:1])
    trainer.fit()
    accuracy = trainer.evaluate()["test/accuracy"]
    assert accuracy >= 0.98
    assert accuracy * 360 == pytest.approx(round(accuracy * 360))
