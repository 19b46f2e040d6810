"""What the Trainer costs beside a bare loop: the ratio of step times, for the default ResNet and an MLP of many leaves.

    python -m bench.step_overhead

Inside one `Trainer.fit` a hook hands over to a bare loop and back every few steps: both run the same model, optimizer
and batches in the same process, and each block of one is compared with its neighbours of the other. The bare loop is
what a person would write: `jax.jit` over `nnx.merge`, `jax.grad`, `optax`, the loss read one step behind. Then the same
run again with its real input pipeline. Expected on 2 CPU cores: a ratio of at most 1.02 for the ResNet.
"""

import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from data import DataConfig
from models import MLPConfig
from trainer import Config, ImageClassifier, OptimizerConfig, load_config, runtime
from trainer.loop import Hook
from trainer.mesh import local_rows
from trainer.prefetch import to_device


class PreparedBatches:
    """The same few batches, on the device already, again and again."""

    def __init__(self, batches):
        self._batches = itertools.cycle(batches)

    def get(self, cancelled):
        """The next one."""
        return next(self._batches)

    def close(self):
        """Nothing to end."""


class BareLoop:
    """The step without a framework, on a model and state of its own."""

    def __init__(self, config, rates, batches):
        model = config.model.build(nnx.Rngs(0))
        self._graphdef, self.params, self.rest = nnx.split(model, nnx.Param, ...)
        self._rates = itertools.cycle(rates)
        self._batches = itertools.cycle(batches)
        self._make = lambda rate: _optimizer(config, rate, self.params)
        self.opt_state = self._make(0.0).init(self.params)
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1, 2))

    def _train_step(self, params, rest, opt_state, batch, rate):
        def loss(params):
            model = nnx.merge(self._graphdef, params, rest, copy=True)
            model.train()
            logits = model(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
            return losses.mean(), (nnx.state(model, nnx.Not(nnx.Param)), accuracy)

        (value, (rest, accuracy)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = self._make(rate).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, (value, accuracy, optax.tree.norm(grads))

    def run(self, num_steps):
        """Seconds per step."""
        begin, pending = time.perf_counter(), None
        for _ in range(num_steps):
            self.params, self.rest, self.opt_state, metrics = self._step(
                self.params, self.rest, self.opt_state, next(self._batches), next(self._rates)
            )
            if pending is not None:
                jax.device_get(pending)
            pending = metrics
        jax.block_until_ready(self.params)
        return (time.perf_counter() - begin) / num_steps


def _optimizer(config, rate, params):
    mask = jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)
    optimizer = config.optimizer
    return optax.chain(
        optax.add_decayed_weights(optimizer.weight_decay, mask),
        optax.sgd(rate, **optimizer.arguments),
    )


class Alternate(Hook):
    """Times each block of the Trainer's steps, and after it a block of the bare loop's."""

    def __init__(self, steps_per_block, bare):
        self._steps = steps_per_block
        self._bare = bare
        self._begin = None
        self.trainer_seconds, self.bare_seconds = [], []

    def due(self, step, stop):
        return step % self._steps == 0

    def on_state(self, step, state):
        jax.block_until_ready(state)
        if self._begin is not None:
            self.trainer_seconds.append((time.perf_counter() - self._begin) / self._steps)
        self.bare_seconds.append(self._bare.run(self._steps))
        self._begin = time.perf_counter()


def alternate(config, num_blocks, steps_per_block, prepared):
    """The hook after a run of `num_blocks` blocks of the Trainer, each followed by one of the bare loop."""
    config.train_for = f"{num_blocks * steps_per_block} steps"
    config.log.every = "50 steps"
    config.evals, config.checkpoint.best = (), None

    class Bench(ImageClassifier):
        def _batches(self, state):
            return PreparedBatches(batches) if prepared else super()._batches(state)

        def hooks(self):
            return [hook]

    trainer = Bench(config, devices=jax.devices()[:1])
    rows = local_rows(trainer.mesh, config.batch_size)
    host = trainer._data.batches(start=0, rows=rows, num_steps=4)
    batches = [to_device(batch, trainer.mesh, config.batch_size) for batch in host]
    hook = Alternate(steps_per_block, BareLoop(config, trainer._rates, batches))
    trainer.fit()
    return hook


def report(name, hook):
    """One line: the median step times after the first blocks, which compile, and their ratio."""
    ours, bare = hook.trainer_seconds[1:], hook.bare_seconds[1:]
    around = [(before + after) / 2 for before, after in itertools.pairwise(bare)]
    ratios = [mine / theirs for mine, theirs in zip(ours, around, strict=False)]
    low, high = np.quantile(ratios, [0.25, 0.75])
    print(
        f"{name:<32} Trainer {statistics.median(ours) * 1e3:8.2f} ms   bare {statistics.median(bare) * 1e3:8.2f} ms   "
        f"ratio {statistics.median(ratios):.3f}  (quartiles {low:.3f} to {high:.3f}, {len(ratios)} blocks)",
        flush=True,
    )


def many_leaves():
    """64 layers, 130 parameters, 520 kB: as much dispatch as arithmetic."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(512, 32)).astype(np.float32)
    return Config(
        model=MLPConfig(in_features=32, hidden=(32,) * 64, out_features=10),
        data=DataConfig({"image": images, "label": rng.integers(0, 10, 512).astype(np.int32)}),
        train_for="1 step",
        batch_size=64,
        optimizer=OptimizerConfig("sgd", 1e-3, arguments={"momentum": 0.9}, weight_decay=1e-4),
    )


def main():
    """Prints the lines."""
    runtime.enable_compilation_cache()
    report("ResNet, prepared batches", alternate(load_config("configs/resnet.py"), 24, 8, prepared=True))
    report("ResNet, real input pipeline", alternate(load_config("configs/resnet.py"), 24, 8, prepared=False))
    report("MLP of 130 leaves, prepared", alternate(many_leaves(), 30, 100, prepared=True))
    report("MLP of 130 leaves, real input", alternate(many_leaves(), 30, 100, prepared=False))


if __name__ == "__main__":
    main()
