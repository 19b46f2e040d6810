"""Every example counts exactly once, whatever the batch size and the number of devices."""

import json

import jax
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics

from data import Pipeline
from tests.tiny import Kill, Tiny, digest, examples, lines, run, saved_steps, tiny_config, tiny_program
from trainer import CheckpointConfig, DataConfig, EvalConfig, LogConfig, Loss
from trainer.evaluation import Evaluation, padded_batch_size
from trainer.state import flatten_state


class Given(Tiny):
    """Losses and hits as the data say, so that a test knows the exact mean."""

    def loss(self, outputs, batch):
        return Loss(batch["loss"] + 0 * outputs.sum(-1))

    def metrics(self, outputs, batch):
        return {"accuracy": clu_metrics.Average.from_model_output(batch["hit"], mask=batch["mask"])}


def given(losses, hits=0.0):
    losses = np.asarray(losses, np.float32)
    return {
        "x": np.ones((len(losses), 4), np.float32),
        "loss": losses,
        "hit": np.broadcast_to(np.asarray(hits, np.float32), losses.shape).copy(),
        "id": np.arange(len(losses), dtype=np.int32),
    }


@pytest.fixture(scope="module")
def programs():
    """The evaluation step on one and on eight devices, and a state for each."""
    found = {}
    for num_devices in (1, 8):
        data = DataConfig(given(np.zeros(8)))
        program = tiny_program(jax.devices()[:num_devices], trainer=Given, data=data, evals=())
        found[num_devices] = program, program.create_state(0)
    return found


def evaluate(programs, num_devices, batch_size, rows, watch=lambda batch: None):
    """The metrics of `rows`; `watch` sees each batch that is evaluated."""
    program, state = programs[num_devices]
    size = padded_batch_size(batch_size, num_devices)

    def step(state, batch):
        watch(batch)
        return program.eval_step(state, batch)

    with Pipeline(DataConfig(rows), batch_size=size, seed=0) as pipeline:
        return Evaluation("test", pipeline, size, program.mesh, step)(state)


@pytest.mark.parametrize(
    ("num_devices", "batch_size", "losses"),
    [
        (1, 4, np.arange(10)),  # E41
        (8, 16, np.arange(499) ** 1.5),  # E42
        (1, 1, [1, 2, 3]),  # E47
        (8, 8, np.ones(23)),  # E48
        (8, 5, [7]),
    ],
)
def test_the_mean_is_over_examples(programs, num_devices, batch_size, losses):
    """Cases E41, E42, E47, E48: the mean of the losses in float64, not of batch means, and not the last."""
    values = evaluate(programs, num_devices, batch_size, given(losses))
    assert values["loss"] == pytest.approx(np.mean(np.float64(np.float32(losses))), rel=1e-7)


def test_a_short_last_batch_weighs_what_it_holds(programs):
    """Case E43: accuracies of about .7, .8 and .9 over 256, 256 and 10 examples."""
    hits = np.zeros(522)
    for start, size, rate in [(0, 256, 0.7), (256, 256, 0.8), (512, 10, 0.9)]:
        hits[start : start + round(size * rate)] = 1
    values = evaluate(programs, 8, 256, given(np.zeros(522), hits))
    assert values["accuracy"] == (179 + 205 + 9) / 522


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("batch_size", [5, 16])
@pytest.mark.parametrize("num", range(95, 101))
def test_each_id_is_evaluated_exactly_once(programs, num_devices, batch_size, num):
    """Case E45, of one host: in order, and the padding is masked."""
    seen = []
    evaluate(
        programs,
        num_devices,
        batch_size,
        given(np.zeros(num)),
        lambda batch: seen.extend(np.asarray(batch["id"])[np.asarray(batch["mask"])]),
    )
    assert seen == list(range(num))


def test_memory_does_not_grow_with_the_number_of_batches(programs):
    """Case E51: the bytes of live arrays peak at the same for 10 and for 300 batches."""

    def peak(num_batches):
        found = []
        evaluate(
            programs,
            8,
            8,
            given(np.zeros(8 * num_batches)),
            lambda batch: found.append(sum(array.nbytes for array in jax.live_arrays())),
        )
        return max(found)

    peak(10)
    batch_bytes = 8 * (4 * 4 + 4 + 4 + 4 + 1)
    assert abs(peak(300) - peak(10)) <= 2 * batch_bytes


class Watch(Kill):
    """Remembers the loss of each training step."""

    def __init__(self):
        self.losses = {}

    def on_step(self, step, metrics):
        self.losses[step] = float(metrics["loss"].compute())


EVERY_10 = {
    "train_for": "25 steps",
    "checkpoint": CheckpointConfig(every="10 steps", keep=20),
    "log": LogConfig(every="4 steps", tensorboard=False),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """25 steps with two evaluations: every 10 steps, and of 13 other examples every 6 in batches of 5."""
    workdir = tmp_path_factory.mktemp("trained")
    watch = Watch()
    evals = (
        EvalConfig(DataConfig(examples(11, seed=1)), every="10 steps"),
        EvalConfig(DataConfig(examples(13, seed=2)), name="other", every="6 steps", batch_size=5),
    )
    trainer = run(workdir, watch, evals=evals, **EVERY_10)
    return trainer, workdir, watch.losses


def test_evaluation_and_save_happen_at_their_interval_and_at_the_end(trained):
    """Case E57: 25 steps with an interval of 10, once each."""
    _, workdir, _ = trained
    assert [line["step"] for line in lines(workdir, "test")] == [10, 20, 25]
    assert saved_steps(workdir) == [10, 20, 25]


def test_evaluations_have_their_own_intervals(trained):
    _, workdir, _ = trained
    assert [line["step"] for line in lines(workdir, "other")] == [6, 12, 18, 24, 25]
    assert {line["split"] for line in lines(workdir)} == {"train", "test", "other"}


def test_a_line_of_training_covers_its_own_interval(trained):
    """Case E50: steps 1–4, 5–8, …, and the last one what is left."""
    _, workdir, losses = trained
    found = {line["step"]: line["loss"] for line in lines(workdir, "train")}
    assert list(found) == [4, 8, 12, 16, 20, 24, 25]
    starts = [0, *found]
    for start, (step, loss) in zip(starts, found.items(), strict=False):
        assert loss == pytest.approx(np.mean([losses[one] for one in range(start + 1, step + 1)]), rel=1e-6)


def test_evaluation_changes_no_leaf_and_no_rng(trained, tmp_path):
    """Case E53: of the state that it looks at, and of the run that it happens in."""
    trainer, workdir, _ = trained
    before = jax.device_get(flatten_state(trainer.state))
    trainer.evaluate()
    after = flatten_state(trainer.state)
    for path, leaf in before.items():
        np.testing.assert_array_equal(after[path], leaf, err_msg=path)
    run(tmp_path, evals=(), **EVERY_10)
    assert digest(tmp_path, 25) == digest(workdir, 25)


def test_evaluate_says_what_the_last_line_of_each_evaluation_says(trained):
    trainer, workdir, _ = trained
    for split in ("test", "other"):
        line = lines(workdir, split)[-1]
        expected = {f"{split}/{name}": line[name] for name in ("loss", "accuracy", "ids")}
        assert {name: value for name, value in trainer.evaluate().items() if name in expected} == expected


def manual_logits(trainer, params, x):
    program, state = trainer._program, trainer.state
    model = program.model_def.merge(params, state.model_state, jax.random.key(0))
    model.eval()
    return np.asarray(model(x))


def test_the_moving_average_is_what_is_evaluated(trained):
    """Bias-corrected, with BatchNorm's running statistics and without dropout."""
    trainer, _, _ = trained
    rows, ema = examples(11, seed=1), trainer.state.ema
    average = {path: mean / (1 - 0.9**25) for path, mean in ema.ema.items()}
    found = {}
    for name, params in [("average", average), ("last", trainer.state.params)]:
        logits = manual_logits(trainer, params, rows["x"])
        found[name] = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"]).mean()
    value = trainer.evaluate()["test/loss"]
    assert value == pytest.approx(float(found["average"]), rel=1e-5)
    assert value != pytest.approx(float(found["last"]), rel=1e-3)


@pytest.mark.parametrize("num", [1, 7, 8, 13])
def test_predict_takes_any_number_of_examples(trained, num):
    """Rows that fill up the devices are cut off; the model is the one that is evaluated."""
    trainer, _, _ = trained
    rows = examples(num, seed=3)
    average = {path: mean / (1 - 0.9**25) for path, mean in trainer.state.ema.ema.items()}
    found = trainer.predict({"x": rows["x"]})
    assert found.shape == (num, 3)
    np.testing.assert_allclose(found, manual_logits(trainer, average, rows["x"]), atol=1e-5)


def test_predict_refuses_features_of_different_lengths(trained):
    trainer, _, _ = trained
    with pytest.raises(ValueError, match=r"predict: expected features of one length ≥ 1, found {'x': 3, 'y': 2}"):
        trainer.predict({"x": np.zeros((3, 4)), "y": np.zeros(2)})
    with pytest.raises(ValueError, match=r"of one length ≥ 1, found {}"):
        trainer.predict({})


def test_a_fresh_trainer_evaluates_the_initial_state_and_one_with_a_workdir_its_newest(trained):
    fitted, workdir, _ = trained
    fresh = Tiny(tiny_config())
    first = fresh.evaluate()
    assert first == fresh.evaluate() and first["test/loss"] != fitted.evaluate()["test/loss"]
    again = Tiny(tiny_config(evals=fitted.config.evals, **EVERY_10), workdir)
    assert again.evaluate() == fitted.evaluate()


def test_values_of_metrics_are_numbers(trained):
    _, workdir, _ = trained
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        assert all(isinstance(values[name], int | float) for name in values if name != "split")
