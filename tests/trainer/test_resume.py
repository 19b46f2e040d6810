"""A resumed run equals a straight one, to the bit."""

import jax
import numpy as np
import pytest

from tests.tiny import (
    EPOCH_STEPS,
    Kill,
    Tiny,
    assert_same_run,
    digest,
    lines,
    run,
    saved_steps,
    tiny_config,
)
from trainer import CheckpointConfig, DataConfig, EarlyStoppingConfig, EvalConfig, LogConfig
from trainer.state import flatten_state


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    run(workdir, train_for="10 steps", checkpoint=CheckpointConfig(every="1 step", keep=20))
    return workdir


@pytest.mark.parametrize("cut", [1, 3, EPOCH_STEPS, 5, 2 * EPOCH_STEPS, 9])
def test_killed_after_any_step_and_resumed_equals_straight(straight, tmp_path, cut):
    """Cases R1, R2, R4, R6, R7, R8, R11, R14: inside an epoch, at its end and one step further."""
    every_step = CheckpointConfig(every="1 step", keep=20)
    run(tmp_path, Kill(cut + 1), train_for="10 steps", checkpoint=every_step)
    assert max(saved_steps(tmp_path)) in (cut, cut + 1)
    run(tmp_path, train_for="10 steps", checkpoint=every_step)
    assert_same_run(tmp_path, straight)
    assert len({line["ids"] for line in lines(tmp_path, "train")}) == 10


def test_a_kill_between_checkpoints_repeats_the_lost_steps(straight, tmp_path):
    """Cases R8, R22: lines after the restored step are cut and written again, equal; none stands twice."""
    changes = {"train_for": "10 steps", "checkpoint": CheckpointConfig(every="4 steps", keep=20)}
    run(tmp_path, Kill(7), **changes)
    assert saved_steps(tmp_path) == [4]
    assert max(line["step"] for line in lines(tmp_path)) >= 6
    run(tmp_path, **changes)
    assert lines(tmp_path) == lines(straight)
    assert saved_steps(tmp_path) == [4, 8, 10]
    assert digest(tmp_path, 10) == digest(straight, 10)
    for split in ("train", "test"):
        steps = [line["step"] for line in lines(tmp_path, split)]
        assert steps == sorted(set(steps))


def test_every_part_of_the_state_is_restored(straight):
    """Cases R9, R19: params, statistics, moments, EMA and its count, rng, step."""
    trainer = Tiny(tiny_config(train_for="10 steps"), straight)
    saved = flatten_state(trainer._ensure_state())
    fresh = flatten_state(trainer._program.create_state(0))
    assert int(saved["step"]) == 10 and int(saved["ema/count"]) == 10
    for part in ("params/", "model_state/", "opt_state/", "ema/ema/"):
        names = [name for name in saved if name.startswith(part)]
        assert names
        for name in names:
            assert not np.array_equal(saved[name], fresh[name]), name
    assert np.array_equal(saved["rng"], fresh["rng"])


def test_a_missing_leaf_is_an_error_that_names_it(tmp_path):
    """Case R9: never a silent re-initialisation."""
    run(tmp_path, train_for="3 steps")
    without_average = tiny_config(ema_decay=None)
    with pytest.raises(ValueError, match=r"ema_decay: 0\.9 → None"):
        Tiny(without_average, tmp_path)
    trainer = Tiny(without_average, tmp_path, accept_config_change=True)
    with pytest.raises(ValueError, match=r"only in the checkpoint: ema/count int32\[\]"):
        trainer.fit()


def test_dropout_differs_between_steps_and_resumes(straight):
    """Case R10: the masks of steps 1 and 2 differ; that of a resumed step equals straight (see above)."""
    trainer = Tiny(tiny_config(), straight)
    state = trainer._program.create_state(0)
    shape = jax.ShapeDtypeStruct((8, 16), np.float32)
    masks = [jax.random.bernoulli(state.replace(step=np.int32(step)).key, 0.8, shape.shape) for step in (1, 2, 2)]
    assert not np.array_equal(masks[0], masks[1])
    assert np.array_equal(masks[1], masks[2])


@pytest.mark.parametrize("cut", [5, 6, 7])
def test_an_interval_of_the_log_that_a_resume_cuts_is_whole(tmp_path, cut):
    """Cases R1, E50: with a line every 4 steps and a checkpoint within, the line still covers its own 4 steps."""
    changes = {
        "train_for": "10 steps",
        "log": LogConfig(every="4 steps", tensorboard=False),
        "checkpoint": CheckpointConfig(every="1 step", keep=20),
    }
    run(tmp_path / "straight", **changes)
    run(tmp_path / "resumed", Kill(cut + 1), **changes)
    run(tmp_path / "resumed", **changes)
    assert [line["step"] for line in lines(tmp_path / "straight", "train")] == [4, 8, 10]
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")


def test_the_learning_rate_of_a_line_is_the_schedules(straight):
    """Cases R14, S34: line n, written after update n, logs `schedule(n - 1)`; the first is `schedule(0)`."""
    trainer = Tiny(tiny_config(train_for="10 steps"), straight)
    rates = [line["learning_rate"] for line in lines(straight, "train")]
    np.testing.assert_array_equal(np.float32(rates), trainer._rates)
    assert rates[0] == pytest.approx(0.002)


def test_early_stopping_survives_a_resume(tmp_path):
    """Case R17: patience and best go on; the run ends at the same evaluation, and is then finished."""
    changes = {
        "train_for": "40 steps",
        "evals": (EvalConfig(DataConfig(_never_better), every="2 steps"),),
        "early_stopping": EarlyStoppingConfig("loss", "min", patience=4, min_delta=1e6),
        "checkpoint": CheckpointConfig(every="2 steps", keep=20),
    }
    run(tmp_path / "straight", **changes)
    run(tmp_path / "resumed", Kill(6), **changes)
    trainer = run(tmp_path / "resumed", **changes)
    assert trainer._step == 10  # the evaluation at 2 is the best; those at 4, 6, 8 and 10 are not better
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")
    assert "finished" in Tiny(tiny_config(**changes), tmp_path / "resumed").fit().reason


def _never_better():
    from tests.tiny import examples

    return examples(11, seed=1)


def test_a_target_of_123_steps_resumed_at_100_makes_23_updates(tmp_path):
    """Cases R20, R23."""
    log = LogConfig(every="50 steps", tensorboard=False)
    run(tmp_path, train_for="100 steps", checkpoint=CheckpointConfig(every="100 steps"), log=log)
    seen = []

    class Count(Kill):
        def on_step(self, step, metrics):
            seen.append(step)

    trainer = run(tmp_path, Count(0), train_for="123 steps", checkpoint=CheckpointConfig(every="100 steps"), log=log)
    assert seen == list(range(101, 124))
    assert int(trainer.state.step) == int(trainer.state.ema.count) == 123


def test_a_finished_run_changes_nothing(tmp_path):
    """Case R21."""
    run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    stop = Tiny(tiny_config(), tmp_path).fit()
    assert stop.finished and stop.exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("before", "after"), [(8, 2), (4, 1), (2, 8)])
def test_other_device_counts_see_the_same_examples(straight, tmp_path, before, after):
    """Case R13: the stream of ids is the same and the numbers agree to rounding."""
    every = {"train_for": "10 steps", "checkpoint": CheckpointConfig(every="5 steps", keep=20)}
    run(tmp_path, Kill(6), devices=jax.devices()[:before], **every)
    run(tmp_path, devices=jax.devices()[:after], **every)
    for ours, reference in zip(lines(tmp_path, "train"), lines(straight, "train"), strict=True):
        assert ours["ids"] == reference["ids"]
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-3)
