"""A Flax NNX / Optax training framework. The files, in the order to read them:

config.py        what the user writes: the Config tree (overrides.py: from text; duration.py: '90 epochs')
mesh.py          MeshConfig → jax.sharding.Mesh
sharding.py      rules → PartitionSpecs, and what is wrong with them (layout_table.py: printed)
model_def.py     an NNX model taken apart into flat dicts of arrays
optimizer.py     OptimizerConfig → the Optax chain and the learning rate of every step
state.py         TrainState, born sharded
step.py          train, eval and predict step: pure functions of (state, batch)
program.py       the steps compiled for a mesh
trainer.py       Trainer: what a user subclasses
loop.py          get a batch, dispatch a step, call the hooks
hooks.py         log, evaluate, stop early, save
evaluation.py    a dataset → exact metrics
metrics.py       from the device to metrics.jsonl and TensorBoard (progress.py: to the terminal)
prefetch.py      host batches → device arrays
checkpoint.py    Orbax, verified (manifest.py: what was written; digest.py: which values)
workdir.py       the run's folder
runtime.py       compilation cache, deterministic operations
errors.py        exit codes
tasks/           Trainers for common work
safety/          signals
"""

from etils import epy

with epy.lazy_api_imports(globals()):
    from data import DataConfig
    from trainer.checkpoint import CheckpointConfig, Checkpoints
    from trainer.config import Config, load_config
    from trainer.errors import RunError, UserError
    from trainer.evaluation import EvalConfig
    from trainer.hooks import EarlyStoppingConfig, LogConfig
    from trainer.loop import Hook, Stop
    from trainer.mesh import MeshConfig
    from trainer.optimizer import OptimizerConfig, ScheduleConfig
    from trainer.sharding import ShardingConfig
    from trainer.state import TrainState
    from trainer.step import Loss
    from trainer.tasks.classification import ImageClassifier
    from trainer.tasks.language_model import LanguageModel
    from trainer.trainer import Trainer
