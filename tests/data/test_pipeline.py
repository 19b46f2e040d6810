"""The stream over hosts, cuts and epochs; evaluations; sources in Python."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import data as data_package
from data import DataConfig, DataError, Pipeline


class Squares:
    """A map-style dataset."""

    def __init__(self, length: int = 20, bad: int = -1) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise OSError("disk on fire")
        return {"id": index, "x": np.full((2, 3), index**2, np.float32)}


class Pairs(Squares):
    def __getitem__(self, index: int) -> Any:
        return index, index


class Growing(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.zeros(1 + index // 5)}


def ids(n: int) -> dict[str, np.ndarray]:
    return {"id": np.arange(n)}


def pipeline(source: Any, batch_size: int = 4, seed: int = 0, **fields: Any) -> Pipeline:
    return Pipeline(DataConfig(source, **fields), batch_size=batch_size, seed=seed)


def take(stream: Iterator[dict[str, np.ndarray]], name: str = "id") -> list[list[Any]]:
    return [batch[name].tolist() for batch in stream]


@hypothesis.given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    num_hosts=st.integers(1, 4),
    cut=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
@hypothesis.settings(deadline=None, max_examples=12)
def test_hosts_equal_one_and_a_cut_equals_straight(
    n: int, batch_size: int, num_hosts: int, cut: int, seed: int
) -> None:
    """Cases R6, R7, R8, R11, R13."""
    hypothesis.assume(num_hosts <= batch_size)
    data = pipeline(ids(n), batch_size, seed)
    straight = take(data.batches(start=0, rows=np.arange(batch_size), num_steps=14))
    hosts = [
        take(data.batches(start=cut, rows=rows, num_steps=14 - cut))
        for rows in np.array_split(np.arange(batch_size), num_hosts)
    ]
    together = [[i for host in batch for i in host] for batch in zip(*hosts, strict=True)]
    assert together == straight[cut:]


def test_epochs_follow_each_other_without_loss() -> None:
    """Batches straddle epochs; every epoch holds every example once. Cases R1, R2, R4, D61."""
    stream = np.ravel(take(pipeline(ids(10)).batches(start=0, rows=np.arange(4), num_steps=10)))
    epochs = stream.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_training_masks_are_all_true_and_spec_describes_the_batch() -> None:
    data = pipeline({"x": np.zeros((6, 2, 3), np.float32), "y": np.arange(6)})
    batch = next(data.batches(start=0, rows=np.arange(1, 4)))
    assert batch.pop("mask").tolist() == [True] * 3
    assert data.element_spec == {"x": ((2, 3), np.float32), "y": ((), np.int64)}
    assert {name: (array.shape[1:], array.dtype) for name, array in batch.items()} == data.element_spec


@pytest.mark.parametrize("batch_size", [5, 16])
@pytest.mark.parametrize("n", range(95, 101))
def test_evaluation_sees_each_example_once(n: int, batch_size: int) -> None:
    """For 1, 2 and 3 hosts. Cases E41, E42, E45."""
    data = pipeline(ids(n), batch_size)
    for num_hosts in (1, 2, 3):
        seen = []
        for rows in np.array_split(np.arange(batch_size), num_hosts):
            batches = list(data.eval_batches(rows=rows))
            assert len(batches) == data.num_eval_batches
            assert all(len(batch["id"]) == len(rows) for batch in batches)
            seen += [i for batch in batches for i in batch["id"][batch["mask"]]]
        assert sorted(seen) == list(range(n))


def test_one_batch_is_the_same_at_every_step() -> None:
    """Case U6."""
    for batch in take(pipeline(ids(8), batch_size=8).batches(start=0, rows=np.arange(8), num_steps=20)):
        assert sorted(batch) == list(range(8))


def test_a_far_step_starts_as_soon_as_the_first() -> None:
    """Two attempts: other work on the machine may delay one."""
    data = pipeline(ids(100_000), batch_size=64)

    def seconds(start: int) -> float:
        begin = time.perf_counter()
        next(data.batches(start=start, rows=np.arange(64)))
        return time.perf_counter() - begin

    seconds(0)
    assert any(seconds(10**6) < 2 * seconds(0) + 0.2 for _ in range(2))


def test_preprocessing_randomness_belongs_to_example_and_epoch() -> None:
    """Differs by epoch; equals on resume and on any number of hosts. Cases R10, R13."""
    import tensorflow as tf

    def preprocess(example: Any, seed: Any) -> dict[str, Any]:
        return {"id": example["id"], "noise": tf.random.stateless_uniform((), seed)}

    data = pipeline(ids(8), preprocess=preprocess)
    straight = list(data.batches(start=0, rows=np.arange(4), num_steps=8))
    noise = {}
    for step, batch in enumerate(straight):
        for example, value in zip(batch["id"], batch["noise"], strict=True):
            noise[(int(example), step // 2)] = float(value)
    assert len(set(noise.values())) == 8 * 4
    resumed = next(data.batches(start=5, rows=np.array([1, 3])))
    np.testing.assert_array_equal(resumed["noise"], straight[5]["noise"][[1, 3]])


def test_workers_equal_no_workers() -> None:
    """A map-style object read by processes gives the stream that it gives without; so does a callable."""
    rows = np.arange(4)
    with (
        pipeline(Squares(), workers=2) as with_workers,
        pipeline(Squares()) as without,
        pipeline(Squares, workers=1) as made,
    ):
        expected = take(without.batches(start=0, rows=rows, num_steps=12), "x")
        assert take(with_workers.batches(start=0, rows=rows, num_steps=12), "x") == expected
        assert take(made.batches(start=0, rows=rows, num_steps=12), "x") == expected


def test_a_bad_item_is_named() -> None:
    data = pipeline(Squares(bad=13), shuffle=False)
    stream = data.batches(start=0, rows=np.arange(4))
    assert take(next(stream) for _ in range(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError, match=r"source\[13\]: OSError: disk on fire"):
        list(stream)


def test_an_example_that_fails_in_preprocessing_is_named() -> None:
    import tensorflow as tf

    def preprocess(example: Any, seed: Any) -> dict[str, Any]:
        with tf.control_dependencies([tf.debugging.assert_less(example["id"], np.int64(9))]):
            return {"id": tf.identity(example["id"])}

    stream = pipeline(ids(12), shuffle=False, preprocess=preprocess).batches(start=0, rows=np.arange(4))
    with pytest.raises(DataError, match=r"example 9 of .* at step 2"):
        list(stream)


def test_items_of_changing_shape_are_refused() -> None:
    stream = pipeline(Growing(), shuffle=False).batches(start=0, rows=np.arange(4))
    with pytest.raises(DataError, match=r"source\[5\]: expected the features, shapes and dtypes"):
        list(stream)


def test_memory_stays_flat_over_epochs() -> None:
    """24 MB of examples, four epochs: far more than the buffers hold."""
    page = 4096
    data = pipeline({"x": np.zeros((3000, 2000), np.float32)}, batch_size=50)
    resident = []
    for step, _ in enumerate(data.batches(start=0, rows=np.arange(50), num_steps=240)):
        if step in (59, 239):
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * page)
    assert resident[1] - resident[0] < 12e6


def test_an_abandoned_stream_does_not_hang_the_program(tmp_path: Path) -> None:
    """With workers, from a failing program, while reads are under way; nothing is printed but the failure."""
    program = """
        import time
        import numpy as np
        from data import DataConfig, Pipeline

        class Slow:
            def __len__(self):
                return 100

            def __getitem__(self, index):
                time.sleep(0.01)
                return {"id": index}

        def main():
            pipelines = [Pipeline(DataConfig(Slow(), workers=n), batch_size=8, seed=0) for n in (0, 1)]
            streams = [p.batches(start=0, rows=np.arange(8)) for p in pipelines]
            for stream in streams:
                next(stream)
            raise KeyError("the end")

        if __name__ == "__main__":
            main()
        """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": str(Path(data_package.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=50, env=environment, check=False
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("KeyError: 'the end'")


def ranges(example: Any, seed: Any) -> dict[str, Any]:
    import tensorflow as tf

    return {"x": tf.range(example["id"])}


def names(example: Any, seed: Any) -> dict[str, Any]:
    import tensorflow as tf

    return {"name": tf.as_string(example["id"])}


BAD = {
    "unequal": ({"x": np.zeros(3), "y": np.zeros(4)}, {}, r"equal length; found lengths {'x': 3, 'y': 4}"),
    "empty": (ids(0), {}, "at least one example; found none"),
    "no arrays": ({}, {}, "equal length"),
    "text": ({"x": np.array(["a"])}, {}, r"source\['x'\]: expected an array of numbers"),
    "scalar": ({"x": np.array(1)}, {}, "a row for each example"),
    "mask": ({"mask": np.zeros(3)}, {}, "other than 'mask'"),
    "source": (3, {}, "expected a TFDS name, a dict of arrays"),
    "split": (ids(3), {"split": "test"}, "only TFDS datasets have splits"),
    "workers for arrays": (ids(3), {"workers": 2}, "workers: expected 0 for this source; found 2"),
    "tuples": (Pairs(), {}, r"expected a dict of features .* found tuple"),
    "local class": (type("Local", (Squares,), {})(), {"workers": 1}, "expected a data.source that pickles"),
    "shape": (ids(3), {"preprocess": ranges}, "'x': dtype int64"),
    "string": (ids(3), {"preprocess": names}, "'name': dtype string"),
    "no dict": (ids(3), {"preprocess": lambda e, s: e["id"]}, "expected a dict of features"),
    "key": (
        ids(3),
        {"preprocess": lambda e, s: {"x": e["nope"]}},
        r"(?s)failed on the examples .* "
        "KeyError: 'nope'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    source, fields, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        pipeline(source, **fields)


@pytest.mark.parametrize("rows", [[], [1, 0], [0, 0], [-1], [4]])
def test_bad_rows_are_named(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows: expected ascending row numbers in \[0, 4\)"):
        pipeline(ids(3)).batches(start=0, rows=np.array(rows))


@pytest.mark.parametrize("field", [{"workers": -1}, {"workers": True}, {"split": ""}, {"preprocess": 3}])
def test_bad_fields_are_named(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"data.{next(iter(field))}: expected"):
        DataConfig(ids(3), **field)


def test_fingerprint_follows_the_data() -> None:
    a, b, c = (pipeline({"x": np.full((5, 2), v)}).fingerprint for v in (1, 1, 2))
    assert a == b != c
    assert pipeline(Squares(7)).fingerprint["num_examples"] == 7


def test_importing_data_is_light() -> None:
    code = "import sys, data; assert not {'tensorflow', 'jax', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_in_the_source_ends_the_program_with_its_name(tmp_path: Path) -> None:
    """The error's traceback holds TensorFlow's iterator; letting go of it must not wait for a thread that waits."""
    program = """
        import numpy as np
        from data import DataConfig, Pipeline

        class Torn:
            def __len__(self):
                return 100

            def __getitem__(self, index):
                if index == 77:
                    raise FileNotFoundError("77.png")
                return {"id": index}

        pipeline = Pipeline(DataConfig(Torn(), shuffle=False), batch_size=8, seed=0)
        for attempt in range(20):
            try:
                for batch in pipeline.batches(start=0, rows=np.arange(8)):
                    pass
            except Exception as error:
                print(attempt, error)
        """
    environment = {**os.environ, "PYTHONPATH": str(Path(data_package.__file__).parent.parent)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "19 data.source[77]: FileNotFoundError: 77.png"
