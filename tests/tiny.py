"""The run that most tests look at: small, and whole. Dropout, BatchNorm, EMA, examples that carry ids."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
from clu import metrics as clu_metrics

from models import MLPConfig
from trainer import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    Loss,
    OptimizerConfig,
    ScheduleConfig,
    Trainer,
)
from trainer.loop import Hook
from trainer.manifest import read_manifest, state_digest
from trainer.mesh import make_mesh
from trainer.overrides import rebuild
from trainer.prefetch import to_device
from trainer.program import Program

NUM_EXAMPLES = 32
BATCH_SIZE = 8
EPOCH_STEPS = NUM_EXAMPLES // BATCH_SIZE


class Tiny(Trainer):
    """Classifies 4 features into 3 classes. The metric `ids` names the examples of a step, in order."""

    extra_hooks: tuple[Hook, ...] = ()

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return Loss(optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"]))

    def metrics(self, outputs, batch):
        numbered = batch["id"] * (1 + jax.numpy.arange(len(batch["id"])))
        return {
            "accuracy": clu_metrics.Accuracy.from_model_output(
                logits=outputs, labels=batch["label"], mask=batch["mask"]
            ),
            "ids": clu_metrics.LastValue(value=numbered.sum().astype(jax.numpy.float32)),
        }

    def hooks(self):
        return self.extra_hooks


class Killed(BaseException):
    """What a kill is within one process: nothing catches it."""


class Kill(Hook):
    """Ends the process, as it were, as soon as the metrics of `step` are there."""

    def __init__(self, step):
        self._step = step

    def on_step(self, step, metrics):
        if step == self._step:
            raise Killed


def examples(num=NUM_EXAMPLES, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 4)).astype(np.float32)
    return {
        "x": x,
        "label": np.argmax(x[:, :3], axis=1).astype(np.int32),
        "id": np.arange(num, dtype=np.int32),
    }


def tiny_config(**changes):
    fields = {
        "trainer": Tiny,
        "model": MLPConfig(in_features=4, hidden=(16,), out_features=3, dropout=0.2, batch_norm=True),
        "data": DataConfig(examples()),
        "evals": (EvalConfig(DataConfig(examples(11, seed=1)), every="1 epoch"),),
        "batch_size": BATCH_SIZE,
        "train_for": "6 steps",
        "optimizer": OptimizerConfig(
            "adamw",
            learning_rate=0.02,
            weight_decay=0.01,
            clip_norm=1.0,
            schedule=ScheduleConfig(
                "warmup_cosine_decay_schedule",
                {"init_value": 0.1, "peak_value": 1.0, "warmup_steps": 3, "decay_steps": 20},
            ),
        ),
        "checkpoint": CheckpointConfig(every="3 steps", keep=3),
        "log": LogConfig(every="1 step", tensorboard=False),
        "ema_decay": 0.9,
    }
    return Config(**{**fields, **changes})


def tiny_program(devices=None, **changes):
    """The steps of a Trainer alone, without data, hooks and files; `put` makes its batches."""
    config = rebuild(tiny_config(**changes))
    task = object.__new__(config.trainer)
    task.config = config
    element = {name: (array.shape[1:], array.dtype) for name, array in config.data.source.items()}
    return Program(task, make_mesh(config.mesh, devices), element)


def put(program, rows, start=0):
    """The global batch of `rows` from `start` on, every row valid unless `rows` has a mask."""
    size = program.batch["mask"].shape[0]
    batch = {name: array[start : start + size] for name, array in rows.items()}
    return to_device({"mask": np.ones(size, bool), **batch}, program.mesh, size)


def run(workdir, *hooks, devices=None, **changes):
    """Fits and returns the trainer; `Kill` hooks end it early, which is swallowed here."""
    trainer = Tiny(tiny_config(**changes), workdir, devices=devices)
    trainer.extra_hooks = hooks
    try:
        trainer.fit()
    except Killed:
        assert any(isinstance(hook, Kill) for hook in hooks)
    return trainer


def lines(workdir, split=None):
    """The lines of metrics.jsonl without what depends on clocks."""
    found = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")}
        for line in found
        if split in (None, line["split"])
    ]


def saved_steps(workdir):
    return sorted(int(path.parent.name) for path in (Path(workdir) / "checkpoints").glob("*/manifest.json"))


def digest(workdir, step):
    from etils import epath

    return state_digest(read_manifest(epath.Path(workdir) / "checkpoints" / str(step)))


def assert_same_run(one, other):
    """Equal to the bit: the last state, every logged value, the kept checkpoints."""
    assert lines(one) == lines(other)
    assert saved_steps(one) == saved_steps(other)
    for step in saved_steps(one):
        assert digest(one, step) == digest(other, step)
