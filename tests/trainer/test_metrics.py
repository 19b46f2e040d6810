"""Sums are 64-bit, metrics.jsonl stays valid, and no writer holds up or ends a run."""

import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from clu import metric_writers
from clu import metrics as clu_metrics
from etils import epath

from tests.tiny import Kill, Tiny, lines, run, tiny_config
from trainer import LogConfig, UserError
from trainer.metrics import MetricsFile, MetricSums, check_monitored


def average(total, count):
    return {"loss": clu_metrics.Average(total=jnp.float32(total), count=jnp.int32(count))}


def test_sums_are_64_bit():
    """float32 would stop at 2**24 and int32 overflow at 2**31."""
    sums = MetricSums(average(0, 0))
    sums.add(average(2.0**24, 2**30))
    for _ in range(3):
        sums.add(average(1.0, 2**30))
    assert sums.take()["loss"] == (2**24 + 3) / 2**32


def test_taking_starts_anew():
    sums = MetricSums(average(0, 0))
    assert sums.take() == {}
    sums.add(average(3, 1))
    sums.add(average(1, 3))
    assert sums.take() == {"loss": 1.0}
    assert sums.take() == {} and sums.state() is None


def test_the_state_goes_through_json():
    """An interval that is cut by a resume has the value of one that is not."""
    rng = np.random.default_rng(0)
    parts = [
        {
            **average(rng.normal(), rng.integers(1, 9)),
            "hits": clu_metrics.Accuracy(total=jnp.float32(rng.random()), count=jnp.int32(7)),
            "rate": clu_metrics.LastValue(value=jnp.float32(rng.random())),
        }
        for _ in range(6)
    ]
    whole, cut = MetricSums(parts[0]), MetricSums(parts[0])
    for part in parts:
        whole.add(part)
    for part in parts[:3]:
        cut.add(part)
    resumed = MetricSums(parts[0])
    resumed.restore(json.loads(json.dumps(cut.state())))
    for part in parts[3:]:
        resumed.add(part)
    assert resumed.take() == whole.take()


def test_a_metric_that_is_no_number_is_named():
    sums = MetricSums({"per_class": clu_metrics.Average(total=jnp.ones(3), count=jnp.int32(1))})
    sums.add({"per_class": clu_metrics.Average(total=jnp.ones(3), count=jnp.int32(1))})
    with pytest.raises(ValueError, match=r"metric 'per_class' computes an array of shape \(3,\)"):
        sums.take()


@pytest.fixture
def file(tmp_path):
    return MetricsFile(epath.Path(tmp_path) / "metrics.jsonl")


def written(file):
    return [json.loads(line) for line in file._path.read_text().splitlines()]


def test_lines_after_the_step_are_cut_with_a_half_written_one(file):
    for step in range(1, 6):
        file.write(step, "train", {"loss": step})
        file.write(step, "test", {"loss": step})
    with open(file._path, "a") as raw:
        raw.write('{"step": 3, "split": "tr')
    file.cut(3)
    assert [(line["step"], line["split"]) for line in written(file)] == [
        (step, split) for step in (1, 2, 3) for split in ("train", "test")
    ]
    file.write(4, "train", {"loss": 4})
    assert written(file)[-1] == {"step": 4, "split": "train", "loss": 4}
    file.cut(0)
    assert written(file) == []


def test_cutting_what_is_not_there_makes_no_file(file):
    file.cut(3)
    file.sync()
    assert not file._path.exists()


def test_values_that_are_not_finite_stay_valid_json(file):
    file.write(1, "train", {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e-30})

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads(file._path.read_text(), parse_constant=refuse)
    assert line == {"step": 1, "split": "train", "a": "nan", "b": "inf", "c": "-inf", "d": 1e-30}


def test_an_unknown_metric_to_watch_is_an_error():
    with pytest.raises(UserError, match=r"best: unknown metric 'acuracy'; the evaluation gives accuracy, loss"):
        check_monitored("acuracy", {"loss": 0, "accuracy": 0}, "best")


class Writer(metric_writers.MetricWriter):
    """A user's own writer: `act` is called with the step of each line."""

    def __init__(self, act):
        self._act = act
        self.steps = []

    def write_scalars(self, step, scalars):
        self._act(step)
        self.steps.append(step)

    def flush(self):
        pass

    def close(self):
        pass

    write_summaries = write_images = write_videos = write_audios = write_texts = None
    write_histograms = write_pointcloud = write_hparams = None


def with_writer(writer, workdir, *hooks):
    class WithWriter(Tiny):
        extra_hooks = hooks

        def writers(self):
            return (writer,)

    return WithWriter(tiny_config(trainer=WithWriter, evals=()), workdir)


def test_steps_complete_while_a_writer_is_blocked(tmp_path):
    """Case U3: the writer hangs in the first line until the last step is done; then it gets every line."""
    all_steps_done, entered = threading.Event(), threading.Event()

    def block(step):
        entered.set()
        assert all_steps_done.wait(60)

    class Release(Kill):
        def on_step(self, step, metrics):
            if step == 6:
                assert entered.wait(60)
                assert writer.steps == []
                all_steps_done.set()

    writer = Writer(block)
    stop = with_writer(writer, tmp_path, Release(0)).fit()
    assert stop.finished and all_steps_done.is_set()
    assert writer.steps == [1, 2, 3, 4, 5, 6]


def test_a_writer_that_raises_does_not_end_the_run(tmp_path, caplog):
    def fail(step):
        raise OSError("the tracker is down")

    stop = with_writer(Writer(fail), tmp_path).fit()
    assert stop.finished
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("a metric writer failed, training goes on") == 1


def test_tensorboard_leaves_a_folder_only_when_it_is_on(tmp_path):
    """Case U4."""
    run(tmp_path / "off", train_for="2 steps", evals=())
    assert {path.name for path in (tmp_path / "off").iterdir()} == {
        "checkpoints",
        "config.json",
        "manifest.json",
        "metrics.jsonl",
    }
    run(tmp_path / "on", train_for="2 steps", evals=(), log=LogConfig(every="1 step", tensorboard=True))
    assert len(list((tmp_path / "on" / "tensorboard").iterdir())) == 1


def test_without_a_workdir_nothing_is_written(tmp_path, monkeypatch):
    """Case U4: training, evaluating and predicting leave the current folder empty."""
    monkeypatch.chdir(tmp_path)
    trainer = run(None, train_for="3 steps", log=LogConfig(every="1 step", tensorboard=True))
    trainer.evaluate()
    trainer.predict({"x": np.zeros((3, 4), np.float32)})
    assert list(tmp_path.iterdir()) == []
