"""Optax's own optimizers and schedules by name; what surrounds them acts as it says."""

import inspect

import jax
import numpy as np
import optax
import pytest

from trainer import OptimizerConfig, ScheduleConfig, UserError
from trainer.duration import Calendar
from trainer.optimizer import Optimizer, learning_rates, resolve_schedule

PARAMS = {
    "embed/embedding": np.full((5, 3), 2, np.float32),
    "block/kernel": np.full((3, 3), 2, np.float32),
    "block/bias": np.full(3, 2, np.float32),
    "norm/scale": np.full(3, 2, np.float32),
    "head/kernel": np.full((3, 2), 2, np.float32),
}
CALENDAR = Calendar(batch_size=10, num_examples=40, run_steps=20)
ONES = {path: np.ones_like(param) for path, param in PARAMS.items()}
ZEROS = {path: np.zeros_like(param) for path, param in PARAMS.items()}


def update(config, grads, rate=0.5, num_steps=1):
    """The params after `num_steps` equal updates."""
    optimizer = Optimizer(config, PARAMS)
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    grads = {path: grads[path] for path in optimizer.trainable}
    for _ in range(num_steps):
        params, opt_state = optimizer.update(grads, opt_state, params, np.float32(rate))
    return params


NAMES = sorted(
    name
    for name, value in vars(optax).items()
    if inspect.isfunction(value) and "learning_rate" in inspect.signature(value).parameters
    if not name.startswith(("_", "scale_"))
)

REFUSED = {
    "lbfgs": "cannot update .*value_fn",  # its line search calls the loss
    "rprop": "learning_rate",  # takes the rate of the first step into its state, where no schedule reaches it
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_every_optimizer_of_optax_updates_or_says_why_not(name):
    config = OptimizerConfig(name, weight_decay=0.1)
    if name in REFUSED:
        with pytest.raises(UserError, match=rf"optax\.{name} .*{REFUSED[name]}"):
            Optimizer(config, PARAMS)
        return
    optimizer = Optimizer(config, PARAMS)

    @jax.jit
    def steps(params):
        opt_state = optimizer.init(params)
        for _ in range(3):
            params, opt_state = optimizer.update(ONES, opt_state, params, np.float32(0.1))
        return params

    for path, param in steps(PARAMS).items():
        assert np.all(np.isfinite(param)), path
        assert np.any(param != PARAMS[path]), path


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "novograd"])
def test_weight_decay_without_gradient_shrinks_kernels_only(name):
    """Case S37: biases, norm scales and embeddings keep their bits."""
    after = update(OptimizerConfig(name, weight_decay=0.1), ZEROS)
    for path, param in after.items():
        if path.endswith("kernel"):
            assert np.all(param < PARAMS[path]) and np.all(param > 0), path
        else:
            np.testing.assert_array_equal(param, PARAMS[path], err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_is_the_rate_times_the_decay(name):
    after = update(OptimizerConfig(name, weight_decay=0.1), ZEROS, rate=0.5)
    np.testing.assert_allclose(after["head/kernel"], 2 - 0.5 * 0.1 * 2, rtol=1e-6)


def test_decay_params_chooses_what_decays():
    after = update(OptimizerConfig("sgd", weight_decay=0.1, decay_params=("embed/.*", ".*/scale")), ZEROS)
    shrunk = [path for path in after if not np.array_equal(after[path], PARAMS[path])]
    assert shrunk == ["embed/embedding", "norm/scale"]


def test_factors_multiply_the_update_and_the_first_match_wins():
    factors = {"head/kernel": 0.1, "(.*/)?kernel": 0.5, "norm/scale": 0.0}
    after = update(OptimizerConfig("sgd", learning_rate_factors=factors), ONES, rate=1.0)
    moved = {path: float(PARAMS[path].max() - after[path].max()) for path in PARAMS}
    assert moved == pytest.approx(
        {"embed/embedding": 1, "block/kernel": 0.5, "block/bias": 1, "norm/scale": 0, "head/kernel": 0.1}
    )


def test_a_factor_is_not_undone_by_adam():
    """The factor scales the update, not the gradient, which Adam would normalise."""
    after = update(OptimizerConfig("adam", learning_rate_factors={"block/bias": 0.1}), ONES, rate=1.0)
    np.testing.assert_allclose(2 - after["block/bias"], 0.1 * (2 - after["norm/scale"]), rtol=1e-5)


def test_frozen_params_keep_their_bits():
    config = OptimizerConfig("adamw", weight_decay=0.1, frozen=("block/.*", "embed/.*"))
    after = update(config, ONES, num_steps=3)
    assert list(after) == list(PARAMS)
    unmoved = [path for path in after if np.array_equal(after[path], PARAMS[path])]
    assert unmoved == ["embed/embedding", "block/kernel", "block/bias"]


def test_clipping_is_by_the_norm_of_all_gradients_together():
    after = update(OptimizerConfig("sgd", clip_norm=1.0), ONES, rate=1.0)
    moved = np.concatenate([(PARAMS[path] - after[path]).ravel() for path in PARAMS])
    assert np.linalg.norm(moved) == pytest.approx(1.0, rel=1e-6)


def rates(name, arguments, **fields):
    return learning_rates(OptimizerConfig(schedule=ScheduleConfig(name, arguments), **fields), CALENDAR, 20)


def test_the_first_update_uses_the_schedule_at_zero():
    """Case S34: `schedule(0)`, and then each step's own."""
    found = rates("linear_schedule", {"init_value": 0.25, "end_value": 1.0, "transition_steps": 3}, learning_rate=2)
    np.testing.assert_allclose(found[:5], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
    assert found.dtype == np.float32 and found.shape == (20,)


@pytest.mark.parametrize(("per_examples", "expected"), [(None, 0.1), (10, 0.1), (5, 0.2), (40, 0.025)])
def test_the_rate_may_be_stated_per_batch_size(per_examples, expected):
    """Linear scaling: the rate that is used is the stated one times batch_size / per_examples."""
    found = rates("constant_schedule", {"value": 1.0}, learning_rate=0.1, per_examples=per_examples)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_schedules_take_durations():
    """Four steps an epoch, 10 examples a step, 20 steps in all."""
    resolved = resolve_schedule(
        ScheduleConfig(
            "warmup_cosine_decay_schedule",
            {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": "1.5 epochs", "decay_steps": "100%"},
        ),
        CALENDAR,
    )
    assert resolved == {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 6, "decay_steps": 20}
    found = rates(
        "piecewise_constant_schedule",
        {"init_value": 1.0, "boundaries_and_scales": {"1 epoch": 0.1, "50%": 0.1, "150 examples": 0.1}},
        learning_rate=1.0,
    )
    np.testing.assert_allclose(found[[3, 4, 9, 10, 14, 15]], [1, 0.1, 0.1, 0.01, 0.01, 0.001], rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "adamv"}, r"optimizer\.name: unknown optimizer 'adamv'; did you mean .*'adamw'"),
        ({"arguments": {"b3": 0.9}}, r"optax\.adamw: unknown argument 'b3'; expected one of: b1, b2"),
        ({"arguments": {"learning_rate": 1}}, "'learning_rate' is set by the optimizer's own fields"),
        ({"arguments": {"weight_decay": 1}}, "'weight_decay' is set by the optimizer's own fields"),
        ({"name": "sgd", "arguments": {"momentum": "high"}}, r"optax\.sgd with arguments {'momentum': 'high'}"),
        ({"frozen": ("blok/.*",)}, r"optimizer\.frozen: pattern 'blok/\.\*' matches no parameter.*block/bias"),
        ({"frozen": (".*",)}, "freezes every parameter"),
        ({"frozen": ("(",)}, r"optimizer\.frozen '\(' is not a regular expression"),
        ({"weight_decay": 0.1, "decay_params": ("x",)}, r"optimizer\.decay_params: pattern 'x' matches no"),
        ({"learning_rate_factors": {"x": 1.0}}, r"optimizer\.learning_rate_factors: pattern 'x' matches no"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_said_at_construction(config, message):
    with pytest.raises(UserError, match=message):
        Optimizer(OptimizerConfig(**config), PARAMS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": -1.0}, r"optimizer\.learning_rate: expected a number ≥ 0, found -1"),
        ({"learning_rate": float("nan")}, r"optimizer\.learning_rate: expected a number ≥ 0, found nan"),
        ({"weight_decay": float("inf")}, r"optimizer\.weight_decay: expected a number ≥ 0, found inf"),
        ({"per_examples": 0}, r"optimizer\.per_examples: expected a batch size"),
        ({"clip_norm": 0.0}, r"optimizer\.clip_norm: expected a norm > 0 or None, found 0"),
    ],
)
def test_numbers_that_make_no_optimizer_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**fields)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cosine", {}, r"optimizer\.schedule\.name: unknown schedule 'cosine'"),
        ("cosine_decay_schedul", {}, "did you mean 'cosine_decay_schedule'"),
        ("constant_schedule", {"valu": 1}, r"optax\.constant_schedule: unknown argument 'valu'; did you mean 'value'"),
        ("constant_schedule", {}, r"optax\.constant_schedule refuses {}.*missing 1 required"),
        ("constant_schedule", {"value": -1.0}, r"the learning rate of step 0 is -0\.001\d*; expected ≥ 0"),
        ("cosine_decay_schedule", {"init_value": 1, "decay_steps": 0}, "refuses .* positive"),
        ("cosine_decay_schedule", {"init_value": 1, "decay_steps": "many"}, r"cosine_decay_schedule refuses"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(name, arguments, message):
    with pytest.raises(UserError, match=message):
        rates(name, arguments)
