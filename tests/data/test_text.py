"""Text becomes windows: every token once, in its place, whatever it came from."""

import numpy as np
import pytest

from data import DataConfig, Pipeline
from data.text import END_OF_TEXT, PackedText


@pytest.fixture
def folder(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_bytes(bytes([ord("a") + index]) * (10 + index))
    return str(tmp_path)


def test_every_token_is_a_target_once_and_follows_its_input(folder):
    source = PackedText(folder, context=4)()
    tokens = b"\0".join([b"a" * 10, b"b" * 11, b"c" * 12]) + bytes([END_OF_TEXT])
    num_windows = (len(tokens) - 1) // 4
    np.testing.assert_array_equal(source["inputs"].reshape(-1), list(tokens[: 4 * num_windows]))
    np.testing.assert_array_equal(source["targets"].reshape(-1), list(tokens[1 : 4 * num_windows + 1]))


def test_the_last_files_are_for_testing(folder):
    assert set(PackedText(folder, "test", context=4)()["inputs"].reshape(-1)) == {ord("d")}


def test_windows_are_read_by_random_access_without_a_copy_of_the_text(folder):
    source = PackedText(folder, context=4)
    assert source()["inputs"].base is not None
    pipeline = Pipeline(DataConfig(source), batch_size=4, seed=0)
    (batch,) = pipeline.batches(start=1_000_000, rows=np.arange(4), num_steps=1)
    assert batch["inputs"].shape == batch["targets"].shape == (4, 4)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_the_standard_library_is_a_dataset():
    train, test = (PackedText(split=split, context=256)() for split in ("train", "test"))
    assert len(train["inputs"]) > 20_000 and len(test["inputs"]) > 500
    assert b"import" in test["inputs"].tobytes()


def test_a_tokenizers_file_gives_its_tokens(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"aaaaaaaaaa": 3, "?": 0, "</s>": 7}, unk_token="?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = PackedText(folder, context=2, tokenizer=str(tmp_path / "tokenizer.json"))()
    assert source["inputs"].dtype == np.int32
    assert source["inputs"].reshape(-1).tolist() == [3, 7, 0, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "at least 1 token"),
        ({"context": 99}, "more than context=99 tokens"),
        ({"split": "valid"}, "'train' or 'test'"),
        ({"pattern": "*.md"}, "0 files"),
        ({"text": "python_stdlb"}, "unknown dataset 'python_stdlb'.*python_stdlib"),
        ({"text": "digits"}, "expected a feature 'text'"),
        ({"tokenizer": "nowhere.json"}, "tokenizer"),
    ],
)
def test_what_is_no_text_is_said(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        PackedText(**{"text": folder, "context": 4, **changes})()
