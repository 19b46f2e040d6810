"""The TFDS builder of `python_stdlib`, in the layout that TFDS asks of a dataset package."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

_TEST_SHARE = 20  # one file in so many is for testing
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}

_DESCRIPTION = """The .py files of the standard library of the Python that prepared it, tests left out, as UTF-8 bytes.
A file is in the test split if the hash of its path says so, so that it is in the same split in every version."""


class Builder(tfds.core.GeneratorBasedBuilder):
    """`python_stdlib`: one example a file; path and text, both bytes."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}  # noqa: RUF012 (TFDS declares it so)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"path": tfds.features.Text(), "text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, description=_DESCRIPTION, features=features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[str, dict[str, Any]]]]:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
        names = {path: path.relative_to(root).as_posix() for path in files}
        test = {path for path in files if _hash(names[path]) % _TEST_SHARE == 0}
        return {
            "train": self._generate_examples({path: names[path] for path in files if path not in test}),
            "test": self._generate_examples({path: names[path] for path in files if path in test}),
        }

    def _generate_examples(self, names: dict[Path, str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, name in names.items():
            yield name, {"path": name, "text": path.read_bytes()}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
