"""The steps are exact: over micro-batches, devices, uneven tokens and padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models import MLPConfig
from tests.tiny import Kill, Tiny, examples, put, run, tiny_config, tiny_program
from trainer import DataConfig, EvalConfig, LogConfig, Loss, OptimizerConfig, ScheduleConfig, Trainer
from trainer.state import flatten_state

PLAIN = MLPConfig(in_features=4, hidden=(16,), out_features=3)
SGD = OptimizerConfig("sgd", learning_rate=1.0)
RATE = np.float32(1.0)
LAYOUTS = [(1, 1), (1, 8), (2, 1), (2, 8)]


def step_of(num_micro_batches, num_devices, rows, **changes):
    """A program, its fresh state and a batch of 16."""
    changes = {"batch_size": 16, "ema_decay": None, "num_micro_batches": num_micro_batches, **changes}
    program = tiny_program(jax.devices()[:num_devices], data=DataConfig(rows), **changes)
    return program, program.create_state(0), put(program, rows)


def gradient(num_micro_batches, num_devices, rows, **changes):
    """The gradient of one step, which SGD at rate 1 subtracts, and the step's metrics."""
    program, state, batch = step_of(num_micro_batches, num_devices, rows, optimizer=SGD, **changes)
    before = jax.device_get(state.params)
    after, metrics = program.train_step(state, batch, RATE)
    return before, {path: before[path] - np.asarray(after.params[path]) for path in before}, metrics


class Tokens(Trainer):
    """Ten tokens a row, of which `valid` count."""

    def build_model(self, rngs):
        return nnx.Linear(4, 3, rngs=rngs)

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])
        return Loss(losses, batch["valid"])


def token_rows():
    """Sixteen rows: the even ones, micro-batch 0 of 2, hold one valid token, the odd ones nine."""
    rng = np.random.default_rng(0)
    valid = np.zeros((16, 10), np.float32)
    valid[0::2, 3] = 1
    valid[1::2, :9] = 1
    labels = rng.integers(0, 3, (16, 10)).astype(np.int32)
    return {"x": rng.normal(size=(16, 10, 4)).astype(np.float32), "label": labels, "valid": valid}


TOKENS = {"trainer": Tokens, "model": None, "evals": ()}


@pytest.mark.parametrize(("num_micro_batches", "num_devices"), LAYOUTS)
def test_the_gradient_is_that_of_the_mean_over_all_valid_tokens(num_micro_batches, num_devices):
    """Case S28: micro-batches of 1 and of 9 valid tokens a row, over any number of devices."""
    rows = token_rows()
    params, found, metrics = gradient(num_micro_batches, num_devices, rows, **TOKENS)

    def mean(params):
        logits = rows["x"] @ params["kernel"] + params["bias"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
        return (losses * rows["valid"]).sum() / rows["valid"].sum()

    loss, expected = jax.value_and_grad(mean)(params)
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], atol=3e-7)
    assert metrics["loss"].compute() == pytest.approx(float(loss), rel=1e-6)
    assert metrics["loss"].count == rows["valid"].sum() == 80


def test_weights_weigh_and_a_nan_of_weight_zero_is_not_seen_in_the_loss():
    """A weight of 3 counts like three tokens; the loss of an element that means nothing may be NaN."""
    rows = token_rows()
    rows["valid"] = np.where(rows["valid"] > 0, np.float32(3), np.float32(0))
    rows["valid"][1, 0] = 1.5
    program, state, batch = step_of(1, 8, rows, **TOKENS)
    params = jax.device_get(state.params)
    logits = rows["x"] @ params["kernel"] + params["bias"]
    losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"]))
    expected = (losses * rows["valid"]).sum() / rows["valid"].sum()
    nothing = rows["valid"] == 0
    rows["x"] = np.where(nothing[..., None], np.float32(np.nan), rows["x"])
    for one in (batch, put(program, rows)):
        assert program.eval_step(state, one)["loss"].compute() == pytest.approx(expected, rel=1e-6)


def test_masked_rows_count_nothing_even_if_they_hold_nan():
    """The rows that fill up an evaluation's last batch; a batch of nothing else has no loss and moves nothing."""
    rows = {**examples(16), "mask": np.arange(16) < 5}
    program, state, batch = step_of(1, 8, rows, model=PLAIN, optimizer=SGD)
    whole = jax.device_get(program.eval_step(state, batch))
    rows["x"] = np.where(rows["mask"][:, None], rows["x"], np.float32(np.nan))
    padded = jax.device_get(program.eval_step(state, put(program, rows)))
    assert padded["loss"].count == padded["accuracy"].count == 5
    assert padded["loss"].total == whole["loss"].total
    assert padded["accuracy"].total == whole["accuracy"].total

    nothing = put(program, {**examples(16), "mask": np.zeros(16, bool)})
    metrics = program.eval_step(state, nothing)
    assert metrics["loss"].total == metrics["loss"].count == 0
    before = jax.device_get(state.params)
    after, metrics = program.train_step(state, nothing, RATE)
    assert metrics["grad_norm"].compute() == 0
    for path in before:
        np.testing.assert_array_equal(after.params[path], before[path])


@pytest.fixture(scope="module")
def accumulated():
    """Ten updates in AdamW, whole on one device, in two and in four micro-batches on one and two."""
    optimizer = OptimizerConfig("adam", learning_rate=0.01, clip_norm=0.1)
    final = {}
    for parts, devices in [(1, 1), (2, 1), (4, 2)]:
        program, state, _ = step_of(parts, devices, examples(32), model=PLAIN, optimizer=optimizer)
        metrics = []
        for step in range(10):
            batch = put(program, examples(32), start=16 * (step % 2))
            state, found = program.train_step(state, batch, np.float32(0.01))
            metrics.append(jax.device_get(found))
        final[parts] = jax.device_get(state), metrics
    return final


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_equal_the_batch_whole(accumulated, parts):
    """Case S31."""
    (whole, _), (split, _) = accumulated[1], accumulated[parts]
    for path in whole.params:
        np.testing.assert_allclose(split.params[path], whole.params[path], atol=1e-7)


def test_micro_batches_of_one_update_equal_the_batch_whole_to_the_last_digit():
    """Case S31, over one update by SGD: atol 1e-7."""
    _, whole, _ = gradient(1, 1, examples(16), model=PLAIN)
    _, split, _ = gradient(2, 1, examples(16), model=PLAIN)
    for path in whole:
        np.testing.assert_allclose(split[path], whole[path], atol=1e-7)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_step_is_one_update_however_many_micro_batches(accumulated, parts):
    """Case S25: the step, Adam's own count and the number of losses."""
    state, metrics = accumulated[parts]
    counts = [leaf for path, leaf in flatten_state(state).items() if path.endswith("/count")]
    assert state.step == 10
    assert counts and all(count == 10 for count in counts)
    assert all(found["loss"].count == 16 for found in metrics)
    assert all(found["grad_norm"].count == 1 for found in metrics)


@pytest.mark.parametrize(("num_micro_batches", "num_devices"), LAYOUTS)
def test_clipping_acts_once_on_the_mean_gradient(num_micro_batches, num_devices):
    """Case S30: the update has the clipped norm and the direction of the whole batch's gradient."""
    rows = examples(16)
    _, raw, _ = gradient(1, 1, rows, model=PLAIN)
    clipped = dataclasses.replace(SGD, clip_norm=0.05)
    program, state, batch = step_of(num_micro_batches, num_devices, rows, model=PLAIN, optimizer=clipped)
    before = jax.device_get(state.params)
    after, metrics = program.train_step(state, batch, RATE)
    norm = optax.tree.norm(raw)
    assert norm > 0.1
    assert metrics["grad_norm"].compute() == pytest.approx(float(norm), rel=1e-5)
    for path in raw:
        update = before[path] - np.asarray(after.params[path])
        np.testing.assert_allclose(update, raw[path] * (0.05 / norm), atol=3e-7)


def test_the_learning_rate_depends_on_updates_alone():
    """Case S35: after 10 updates the same for 1 and 4 micro-batches, and for 1 and 8 devices."""
    changes = {"batch_size": 32, "train_for": "10 steps", "evals": ()}
    one = Tiny(tiny_config(**changes), devices=jax.devices()[:1])
    many = Tiny(tiny_config(**changes, num_micro_batches=4), devices=jax.devices())
    np.testing.assert_array_equal(one._rates, many._rates)
    assert len(set(one._rates)) > 5


def batch_statistics(num_devices, num_micro_batches=1):
    program, state, batch = step_of(num_micro_batches, num_devices, examples(16))
    for _ in range(5):
        state, metrics = program.train_step(state, batch, np.float32(0.01))
    return jax.device_get((state.model_state, metrics))


def test_batch_norm_sees_the_global_batch():
    """Case S39; and dropout's masks are the same on any mesh, or losses would differ by far more."""
    (one, one_metrics), (eight, eight_metrics) = batch_statistics(1), batch_statistics(8)
    assert set(one) == {"blocks/0/norm/mean", "blocks/0/norm/var"}
    for path in one:
        np.testing.assert_allclose(eight[path], one[path], atol=1e-6)
    assert eight_metrics["loss"].total == pytest.approx(one_metrics["loss"].total, rel=1e-5)


def test_dropout_masks_do_not_depend_on_the_mesh():
    dropout = dataclasses.replace(PLAIN, dropout=0.5)
    rows = {**examples(16), "x": np.ones((16, 4), np.float32)}
    _, one, _ = gradient(1, 1, rows, model=dropout)
    _, eight, _ = gradient(1, 8, rows, model=dropout)
    for path in one:
        np.testing.assert_allclose(eight[path], one[path], atol=3e-7)
    _, other, _ = gradient(2, 1, rows, model=dropout)
    assert max(np.abs(other[path] - one[path]).max() for path in one) > 1e-3  # each micro-batch draws its own


def test_bfloat16_computes_while_the_state_stays_float32():
    changes = {"model": MLPConfig(4, (16,), 3, batch_norm=True, dtype="bfloat16"), "ema_decay": 0.9}
    program, state, batch = step_of(2, 8, examples(16), **changes)
    text = program.train_step.lower(state, batch, RATE).as_text()
    assert "bf16" in text
    after, metrics = program.train_step(state, batch, np.float32(0.01))
    floating = {
        path: leaf.dtype for path, leaf in flatten_state(after).items() if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    for part in ("params/", "model_state/", "opt_state/", "ema/"):
        assert any(path.startswith(part) for path in floating)
    assert set(floating.values()) == {jnp.dtype("float32")}
    assert metrics["grad_norm"].total.dtype == metrics["loss"].total.dtype == jnp.float32


def test_frozen_params_keep_their_bits_and_have_no_moments():
    optimizer = OptimizerConfig("adamw", learning_rate=0.1, weight_decay=0.1, frozen=("blocks/.*",))
    program, state, batch = step_of(2, 8, examples(16), optimizer=optimizer)
    before = jax.device_get(state.params)
    for _ in range(3):
        state, _ = program.train_step(state, batch, np.float32(0.1))
    for path, param in before.items():
        assert np.array_equal(state.params[path], param) == path.startswith("blocks/"), path
    moments = [path for path in flatten_state(state) if path.startswith("opt_state/")]
    assert any("head/kernel" in path for path in moments)
    assert not any("blocks/" in path for path in moments)


class Events:
    """Counts what JAX says that it traces and compiles under one name."""

    def __init__(self):
        self.seen = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, seconds, **labels):
        if "train_step" in str(labels.get("fun_name")):
            self.seen.append(event)

    def take(self):
        counts = [sum(kind in event for event in self.seen) for kind in ("jaxpr_trace", "backend_compile")]
        self.seen.clear()
        return counts


@pytest.fixture(scope="module")
def events():
    return Events()


def test_the_step_compiles_once_over_ten_steps_and_once_after_a_resume(tmp_path, events):
    """Case U1."""
    events.take()
    run(tmp_path, Kill(5), train_for="10 steps", evals=())
    assert events.take() == [1, 1]
    run(tmp_path, train_for="10 steps", evals=())
    assert events.take() == [1, 1]


def test_another_learning_rate_or_schedule_is_no_other_program(events):
    program, state, batch = step_of(1, 8, examples(16), model=PLAIN)
    state, _ = program.train_step(state, batch, np.float32(0.1))
    events.take()
    for rate in (0.2, 0.0, 1e-3):
        state, metrics = program.train_step(state, batch, np.float32(rate))
        assert metrics["learning_rate"].compute() == np.float32(rate)
    assert events.take() == [0, 0]

    schedule = ScheduleConfig("exponential_decay", {"init_value": 1, "transition_steps": 3, "decay_rate": 0.5})
    other = OptimizerConfig("adamw", learning_rate=7.0, schedule=schedule)
    programs = [tiny_program(optimizer=optimizer) for optimizer in (OptimizerConfig("adamw"), other)]
    texts = {program.train_step.lower(*abstract(program)).as_text() for program in programs}
    assert len(texts) == 1


def abstract(program):
    return program.state, program.batch, jax.ShapeDtypeStruct((), np.float32)


def test_the_state_is_donated():
    """Every byte of the old state is used for the new one."""
    program, state, _ = step_of(2, 8, examples(16), ema_decay=0.9)
    state_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert program.train_step.lower(*abstract(program)).compile().memory_analysis().alias_size_in_bytes >= state_bytes


def test_live_arrays_stay_constant_over_1000_steps():
    """Case E52, of the step."""
    program, state, batch = step_of(1, 1, examples(16), model=PLAIN)
    counts = []
    for step in range(1000):
        state, metrics = program.train_step(state, batch, np.float32(0.01))
        jax.block_until_ready(metrics)
        if step % 100 == 50:
            counts.append(len(jax.live_arrays()))
    assert len(set(counts)) == 1


def test_a_run_holds_no_more_arrays_at_its_end_than_at_its_start():
    """Case E52, of the whole loop: only batches in the queue make a difference, at most 3 of 4 features each."""
    counts = {}

    class Count(Kill):
        def on_step(self, step, metrics):
            counts[step] = len(jax.live_arrays())

    evals = (EvalConfig(DataConfig(examples(11)), every="50 steps"),)
    run(None, Count(0), train_for="300 steps", evals=evals, log=LogConfig(every="10 steps", tensorboard=False))
    early = [count for step, count in counts.items() if 10 < step <= 100]
    late = [count for step, count in counts.items() if step > 200]
    assert max(late) - min(early) <= 3 * 4 + 4
