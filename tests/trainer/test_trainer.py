"""The Trainer checks before it starts, and does what its config says."""

import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.tiny import Kill, Tiny, assert_same_run, examples, lines, run, tiny_config
from trainer import (
    CheckpointConfig,
    DataConfig,
    EarlyStoppingConfig,
    EvalConfig,
    LogConfig,
    Loss,
    OptimizerConfig,
    ShardingConfig,
    Trainer,
    UserError,
)
from trainer.loop import Hook
from trainer.trainer import check_batch_size


@pytest.mark.parametrize(
    ("batch_size", "parts", "shards", "message"),
    [
        (6, 1, 4, "batch_size: 6 does not divide over 4 devices; the nearest sizes that do are 4 and 8"),
        (3, 1, 4, "batch_size: 3 does not divide over 4 devices; the nearest size that does is 4$"),
        (12, 2, 4, "12 does not divide over 4 devices in 2 micro-batches; the nearest sizes that do are 8 and 16"),
        (8, 16, 1, "num_micro_batches: 16 micro-batches cannot be made of a batch_size of 8 examples"),  # S27
    ],
)
def test_a_batch_that_does_not_divide(batch_size, parts, shards, message):
    """Cases U2, S27: both numbers and the nearest sizes that do."""
    config = tiny_config(batch_size=batch_size, num_micro_batches=parts)
    with pytest.raises(UserError, match=message):
        check_batch_size(config, shards)


@pytest.mark.parametrize(("batch_size", "parts", "shards"), [(8, 1, 4), (16, 2, 8), (1, 1, 1), (12, 3, 4)])
def test_a_batch_that_divides(batch_size, parts, shards):
    check_batch_size(tiny_config(batch_size=batch_size, num_micro_batches=parts), shards)


class Forgets(Trainer):
    """Has neither forward nor loss."""


class BadForward(Tiny):
    def forward(self, model, batch):
        return model(batch["x"]) + batch["pixels"]


class BadLoss(Tiny):
    def loss(self, outputs, batch):
        return Loss(outputs[:, None] + np.zeros((5, 7)))


class Grows(Tiny):
    """A statistic changes its dtype in the first step."""

    def build_model(self, rngs):
        class Counting(nnx.Module):
            def __init__(self):
                self.linear = nnx.Linear(4, 3, rngs=rngs)
                self.seen = nnx.BatchStat(jax.numpy.int32(0))

            def __call__(self, x):
                self.seen.set_value(self.seen[...] + 0.5)
                return self.linear(x)

        return Counting()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6}, "batch_size: 6 does not divide over 8 devices; the nearest size that does is 8"),
        ({"batch_size": 8, "num_micro_batches": 16}, "16 micro-batches cannot be made of a batch_size of 8"),
        ({"trainer": Forgets}, r"Forgets must define forward\(self, model, batch\)"),
        ({"model": None}, "Tiny has no model: set config.model, or override build_model"),
        ({"trainer": BadForward}, r"a training step on a batch of x .*test_trainer\.py, line \d+: .*pixels"),
        ({"trainer": BadLoss}, r"a training step on a batch of .*test_trainer\.py, line \d+: .*np\.zeros\(\(5, 7\)\)"),
        ({"train_for": "0 epochs"}, "train_for: expected at least one step, found '0 epochs'"),
        ({"train_for": "long"}, r"train_for: expected a duration such as '500 steps', .* found 'long'"),
        ({"train_for": "50%"}, "train_for: expected a duration"),
        ({"log": LogConfig(every="0 steps")}, r"log\.every: expected at least one step, found '0 steps'"),
        ({"log": LogConfig(every="sometimes")}, r"log\.every: expected a duration .* or '10%' of the run"),
        (
            {"checkpoint": CheckpointConfig(best="acuracy")},
            r"checkpoint\.best: unknown metric 'acuracy'; the evaluation gives accuracy, ids, loss",
        ),
        (
            {"early_stopping": EarlyStoppingConfig("f1")},
            r"early_stopping\.metric: unknown metric 'f1'; the evaluation gives accuracy, ids, loss",
        ),
        ({"evals": (), "early_stopping": EarlyStoppingConfig()}, "early_stopping watches the first evaluation"),
        ({"sharding": ShardingConfig(rules=((".*", P()), ("convs/.*", P())))}, "rule 'convs/.*' matches no parameter"),
        (
            {"sharding": ShardingConfig(rules=(("head/.*", P()),))},
            "no sharding rule covers parameter 'blocks/0/linear/kernel'",
        ),
        ({"optimizer": OptimizerConfig("adamv")}, "unknown optimizer 'adamv'"),
        ({"data": DataConfig({"x": np.zeros((0, 4))})}, "data.*at least one example"),
        ({"evals": (EvalConfig(DataConfig({"y": np.zeros(3)}, split="test")),)}, r"evals\[0\]\.data.*only TFDS"),
    ],
)
def test_what_cannot_work_is_said_at_construction(changes, message):
    """Cases U2, S27; an error in the user's own forward or loss names the user's file and line."""
    with pytest.raises(UserError, match=f"(?s){message}") as error:
        Tiny.__init__(object.__new__(changes.get("trainer", Tiny)), tiny_config(**changes))
    assert error.value.exit_code == 2


def test_a_variable_that_changes_its_dtype_is_named():
    with pytest.raises(UserError, match=r"changes model_state/seen from int32\[\] to float32\[\]; the model must keep"):
        Grows(tiny_config(trainer=Grows, model=None))


def test_overfitting_one_batch_sees_the_same_ids_at_every_step(tmp_path):
    """Case U6: a dataset of one batch, not shuffled."""
    run(tmp_path, data=DataConfig(examples(8), shuffle=False), evals=())
    assert len({line["ids"] for line in lines(tmp_path, "train")}) == 1


class Total(Hook):
    """A user's own hook: the sum of all losses, and a poor man's early end."""

    name = "total"

    def __init__(self, limit=np.inf):
        self.total = 0.0
        self.restored = False
        self._limit = limit

    def on_step(self, step, metrics):
        self.total += float(metrics["loss"].compute())

    def state(self):
        return self.total

    def restore(self, state):
        self.total, self.restored = state, True


def test_a_users_hook_goes_on_where_it_was(tmp_path):
    """Its state is in the checkpoint and exact after a kill."""
    straight, killed, resumed = Total(), Total(), Total()
    run(tmp_path / "straight", straight)
    run(tmp_path / "resumed", killed, Kill(5))
    run(tmp_path / "resumed", resumed, Kill(-1))
    assert resumed.restored and not straight.restored
    assert resumed.total == straight.total > killed.total
    assert [line["step"] for line in lines(tmp_path / "resumed", "train")] == [1, 2, 3, 4, 5, 6]


def test_a_users_hook_can_end_the_run(tmp_path):
    from trainer.loop import Stop

    class Enough(Kill):
        def due(self, step, stop):
            return step == 4

        def on_state(self, step, state):
            return Stop("enough", finished=True)

    trainer = Tiny(tiny_config(), tmp_path)
    trainer.extra_hooks = (Enough(-1),)
    stop = trainer.fit()
    assert stop.reason == "enough" and stop.exit_code == 0
    assert trainer._step == 4 and int(trainer.state.step) == 4
    assert (tmp_path / "checkpoints" / "4" / "manifest.json").exists()
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2, 3, 4]


def test_two_hooks_of_one_name_are_refused():
    trainer = Tiny(tiny_config(evals=()))
    trainer.extra_hooks = (Total(), Total())
    with pytest.raises(UserError, match=r"hooks: names must differ, found .*'total', 'total'.*set `name`"):
        trainer.fit()


def test_early_stopping_ends_at_the_last_of_patience_poor_evaluations(tmp_path):
    """With mode max and a metric that cannot improve: the first evaluation is the best, two more end it."""
    changes = {
        "train_for": "40 steps",
        "evals": (EvalConfig(DataConfig(examples(11, seed=1)), every="3 steps"),),
        "early_stopping": EarlyStoppingConfig("ids", "max", patience=2),
    }
    trainer = Tiny(tiny_config(**changes), tmp_path)
    stop = trainer.fit()
    assert stop.finished and "ids" in stop.reason and "no better than" in stop.reason and "2 evaluations" in stop.reason
    assert trainer._step == 9
    assert [line["step"] for line in lines(tmp_path, "test")] == [3, 6, 9]


def test_fit_without_a_workdir_goes_on_in_memory(tmp_path):
    """A notebook: fit ends, a second fit is already finished, evaluate uses the state that there is."""
    trainer = run(None, train_for="4 steps")
    assert trainer._step == 4
    value = trainer.evaluate()
    assert trainer.fit().finished and trainer.evaluate() == value


def test_the_seed_decides_the_run_and_nothing_else_does(tmp_path):
    run(tmp_path / "one", train_for="4 steps")
    run(tmp_path / "two", train_for="4 steps")
    run(tmp_path / "other", train_for="4 steps", seed=1)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert lines(tmp_path / "other") != lines(tmp_path / "one")


def test_a_workdir_of_other_numbers_is_refused_with_a_diff(tmp_path):
    """Intervals, lengths and logging may change; what alters the numbers may not."""
    run(tmp_path, train_for="3 steps")
    allowed = {
        "train_for": "4 steps",
        "log": LogConfig(every="2 steps", tensorboard=False),
        "checkpoint": CheckpointConfig(every="2 steps", keep=5),
        "evals": (),
    }
    Tiny(tiny_config(**allowed), tmp_path)
    optimizer = tiny_config().optimizer
    optimizer.learning_rate, optimizer.arguments = 0.5, {"b1": 0.5}
    changed = tiny_config(optimizer=optimizer, batch_size=16, data=DataConfig(examples(40)))
    with pytest.raises(UserError, match="holds a run whose numbers differ") as error:
        Tiny(changed, tmp_path)
    text = str(error.value)
    assert "  batch_size: 8 → 16\n" in text
    assert "  optimizer.learning_rate: 0.02 → 0.5\n" in text
    assert "  optimizer.arguments" in text and "0.5" in text
    assert "  data.source.x: 'array float32[32, 4]' → 'array float32[40, 4]'\n" in text
    assert "--accept_config_change" in text
    other = {**examples(), "x": examples()["x"] + 1}
    with pytest.raises(UserError, match=r"  data\.fingerprint\.features\.x\.sha256: '"):
        Tiny(tiny_config(data=DataConfig(other)), tmp_path)
    Tiny(changed, tmp_path, accept_config_change=True)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["numbers"]["batch_size"] == 8  # construction alone changes nothing


def test_a_trainer_that_builds_its_model_itself_needs_no_config_model():
    class Own(Trainer):
        def build_model(self, rngs):
            return nnx.Linear(4, 3, rngs=rngs)

        def forward(self, model, batch):
            return model(batch["x"])

        def loss(self, outputs, batch):
            return Loss(optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"]))

    trainer = Own(tiny_config(trainer=Own, model=None, checkpoint=CheckpointConfig()))
    assert trainer.fit().finished
    assert trainer.evaluate().keys() == {"test/loss"}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda values: values, r"expected a trainer\.Loss\(values\), found"),
        (lambda values: Loss(values.mean()), r"each of the 8 rows.*found shape \(\).*not their mean"),
        (lambda values: Loss(values[:4]), r"each of the 8 rows.*found shape \(4,\)"),
        (lambda values: Loss(values, weights=values.mean()), r"weights of the losses' shape \(8,\), found \(\)"),
    ],
    ids=["no Loss", "a mean", "half a batch", "a mean weight"],
)
def test_a_loss_is_one_number_per_element(loss, message):
    class Wrong(Tiny):
        def loss(self, outputs, batch):
            return loss(super().loss(outputs, batch).values)

    with pytest.raises(UserError, match=message):
        Wrong(tiny_config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 5}, r"model: expected a model config with build\(rngs\)"),
        (
            {"evals": (EvalConfig(DataConfig({"x": examples(8)["x"]})),)},
            r"(?s)evals\[0\]: an evaluation step .*tiny\.py.*KeyError: 'label'",
        ),
        ({"data": DataConfig(lambda: np.load("nowhere.npz"))}, r"data\.source: .* failed: FileNotFoundError"),
        ({"optimizer": OptimizerConfig("sgd", learning_rate_factors={".*": 1.0})}, None),
    ],
    ids=["no model", "evaluation without labels", "a source that fails", "valid"],
)
def test_what_would_fail_later_is_said_at_construction(changes, message):
    if message is None:
        Tiny(tiny_config(**changes))
        return
    with pytest.raises(UserError, match=message):
        Tiny(tiny_config(**changes))


def test_a_metric_that_is_a_plain_array_is_refused():
    class Plain(Tiny):
        def metrics(self, outputs, batch):
            return {"largest": outputs.max()}

    with pytest.raises(UserError, match=r"Plain\.metrics: expected a clu metric for 'largest'"):
        Plain(tiny_config())


def test_a_negative_factor_is_refused():
    with pytest.raises(UserError, match=r"learning_rate_factors\['a'\]: expected a number ≥ 0, found -1.0"):
        OptimizerConfig(learning_rate_factors={"a": -1.0})
