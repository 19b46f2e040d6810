"""Seconds from the start of the process to the first finished step, and what each part costs.

    python -m bench.startup

Each run is a process of its own that does what `train.py --config=configs/resnet.py` does: the first with an empty
compilation cache, the others with the cache that it left. Expected on 2 CPU cores: at most 10 s with a warm cache.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

WARM_RUNS = 3


def measure(started: float) -> dict[str, float]:
    """Trains one step; the seconds of each part, from `started` (Unix time) on."""
    parts, last = {}, started

    def lap(name):
        nonlocal last
        now = time.time()
        parts[name], last = now - last, now

    import jax
    from flax import nnx  # noqa: F401

    from trainer import load_config, runtime
    from trainer.loop import Hook

    lap("import JAX, Flax, Optax, Trainer")
    import tensorflow  # noqa: F401
    import tensorflow_datasets  # noqa: F401

    lap("import TensorFlow, TFDS")

    class FirstStep(Hook):
        def on_step(self, step, metrics):
            if step == 1:
                lap("start the pipeline, compile, first step")

    runtime.enable_compilation_cache()
    config = load_config("configs/resnet.py", {"train_for": "3 steps"})
    config.evals, config.checkpoint.best = (), None
    config.trainer = type("Bench", (config.trainer,), {"hooks": lambda self: [FirstStep()]})
    with tempfile.TemporaryDirectory() as workdir:
        trainer = config.trainer(config, workdir)
        lap("open the data, trace")
        state = jax.block_until_ready(trainer._ensure_state())
        lap("state")
        trainer.state = state
        trainer.fit()
    return {**parts, "total": sum(parts.values())}


def run(cache: str) -> dict[str, float]:
    """One process with its compilation cache in `cache`."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", "bench.startup", str(time.time())]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as cache:
        cold = run(cache)
        warm = [run(cache) for _ in range(WARM_RUNS)]
    print(f"{'seconds':<36}{'cold':>8}{'warm (median of ' + str(WARM_RUNS) + ')':>24}")
    for part in cold:
        print(f"{part:<36}{cold[part]:>8.2f}{statistics.median(run[part] for run in warm):>24.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(float(sys.argv[1]))))
    else:
        main()
