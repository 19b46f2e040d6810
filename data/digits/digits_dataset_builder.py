"""The TFDS builder of `digits`, in the layout that TFDS asks of a dataset package."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_SPLIT_SEED = 0  # part of version 1.0.0: another seed is another dataset
_NUM_TEST = 360

_DESCRIPTION = """1,797 handwritten digits of 8×8 pixels: the UCI test set, as scikit-learn ships it.
The grey values 0–16 are scaled by 15 to fill uint8. Split into 1,437 for training and 360 for testing,
stratified by label (the original order groups writers: an SVM scores 0.99 on a stratified split and 0.96 on
the last 360)."""

_CITATION = """@misc{alpaydin1998optical,
  title={Optical Recognition of Handwritten Digits},
  author={Alpaydin, E. and Kaynak, C.},
  year={1998},
  howpublished={UCI Machine Learning Repository},
  doi={10.24432/C50P49}
}"""


class Builder(tfds.core.GeneratorBasedBuilder):
    """`digits`: image uint8[8, 8, 1], label 0–9, and id, the position in scikit-learn's array."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}  # noqa: RUF012 (TFDS declares it so)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    "id": np.int64,
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://scikit-learn.org/stable/datasets/toy_dataset.html#digits-dataset",
            citation=_CITATION,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        from sklearn import datasets, model_selection

        digits = datasets.load_digits()
        train, test = model_selection.train_test_split(
            np.arange(len(digits.target)),
            test_size=_NUM_TEST,
            stratify=digits.target,
            random_state=_SPLIT_SEED,
        )
        return {
            "train": self._generate_examples(digits, train),
            "test": self._generate_examples(digits, test),
        }

    def _generate_examples(self, digits: Any, ids: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        images = (digits.images * 15).astype(np.uint8)[..., np.newaxis]
        for index in ids.tolist():
            yield index, {"id": index, "image": images[index], "label": int(digits.target[index])}
