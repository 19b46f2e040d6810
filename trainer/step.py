"""The train, eval and predict steps: pure functions of (state, batch).

A task gives losses and weights *per element*, never a mean. The gradient of the weighted sum is accumulated over
micro-batches and divided once by the total weight, so padding, uneven numbers of tokens and the number of devices
change nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from clu import metrics as clu_metrics
from flax import nnx, struct
from jax.sharding import NamedSharding

from trainer.errors import UserError
from trainer.model_def import Arrays, ModelDef
from trainer.optimizer import Optimizer
from trainer.state import TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, clu_metrics.Metric]

_OWN_METRICS = {"loss", "grad_norm", "learning_rate"}


@struct.dataclass
class Loss:
    """What a task says of a batch.

    Attributes:
      values: float[batch, ...], the loss of each element (an image, a token).
      weights: float[batch, ...], how much each counts; None: one each. An element of weight zero counts nothing, but
        what leads to its loss must be finite: the gradient of a NaN is NaN, whatever it is multiplied by.
    """

    values: jax.Array
    weights: jax.Array | None = None


class Task(Protocol):
    """The part of a Trainer that the steps call."""

    def forward(self, model: nnx.Module, batch: Batch) -> Any:
        """The model's outputs."""

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Losses and weights per element."""

    def metrics(self, outputs: Any, batch: Batch) -> Metrics:
        """Further metrics, each counting only the rows where `batch["mask"]` is true."""


def _forward(task: Task, model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
    """Sum of weighted losses, sum of weights, metrics."""
    outputs = task.forward(model, batch)
    loss = task.loss(outputs, batch)
    _check_loss(loss, len(batch["mask"]), type(task).__name__)
    weights = jnp.ones_like(loss.values) if loss.weights is None else loss.weights
    mask = batch["mask"].reshape(-1, *(1,) * (loss.values.ndim - 1))
    # Selected, not multiplied: an element of weight zero may have any loss, even NaN.
    dtype = jnp.promote_types(loss.values.dtype, jnp.float32)
    weights = jnp.where(mask, weights, 0).astype(dtype)
    values = jnp.where(weights != 0, loss.values, 0).astype(dtype)
    loss_sum, weight_sum = jnp.sum(values * weights), jnp.sum(weights)
    metrics = task.metrics(outputs, batch)
    if taken := metrics.keys() & _OWN_METRICS:
        raise UserError(f"{type(task).__name__}.metrics: the names {sorted(taken)} are the framework's own; use others")
    for name, metric in metrics.items():
        if not isinstance(metric, clu_metrics.Metric):
            raise UserError(
                f"{type(task).__name__}.metrics: expected a clu metric for {name!r}, such as "
                f"clu.metrics.Average.from_model_output(values, mask=batch['mask']), found {type(metric).__name__}"
            )
    return loss_sum, weight_sum, {"loss": clu_metrics.Average(total=loss_sum, count=weight_sum), **metrics}


def _check_loss(loss: Any, num_rows: int, task: str) -> None:
    if not isinstance(loss, Loss):
        raise UserError(f"{task}.loss: expected a trainer.Loss(values), found {type(loss).__name__}")
    if loss.values.ndim == 0 or len(loss.values) != num_rows:
        raise UserError(
            f"{task}.loss: expected a loss for each of the {num_rows} rows, float[batch, ...], found shape "
            f"{loss.values.shape}; return the losses of the elements, not their mean"
        )
    if loss.weights is not None and loss.weights.shape != loss.values.shape:
        raise UserError(
            f"{task}.loss: expected weights of the losses' shape {loss.values.shape}, found {loss.weights.shape}"
        )


def _make_gradients(
    task: Task, model_def: ModelDef, optimizer: Optimizer
) -> Callable[[Arrays, Arrays, Batch, jax.Array], tuple[Arrays, jax.Array, Arrays, Metrics]]:
    """`(params, model_state, batch, key) → (gradient of the weighted sum, sum of weights, model_state, metrics)`."""

    def gradients(
        params: Arrays, model_state: Arrays, batch: Batch, key: jax.Array
    ) -> tuple[Arrays, jax.Array, Arrays, Metrics]:
        trained = {path: params[path] for path in optimizer.trainable}

        def loss_sum(trained: Arrays) -> tuple[jax.Array, tuple[jax.Array, Arrays, Metrics]]:
            model = model_def.merge({**params, **trained}, model_state, key)
            model.train()
            total, weight, metrics = _forward(task, model, batch)
            return total, (weight, model_def.split(model)[1], metrics)

        grads, (weight, model_state, metrics) = jax.grad(loss_sum, has_aux=True)(trained)
        return grads, weight, model_state, metrics

    return gradients


def make_train_step(
    task: Task,
    model_def: ModelDef,
    optimizer: Optimizer,
    ema: optax.GradientTransformation | None,
    grad_shardings: Mapping[str, NamedSharding],
    num_micro_batches: int,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """One update: `(state, batch, learning_rate) → (state, metrics)`.

    Args:
      task: gives losses per element.
      model_def: puts the model together.
      optimizer: clips, decays, updates.
      ema: the moving average of the params, or None.
      grad_shardings: path → where the gradient is summed up; split over `data` it costs a reduce-scatter only.
      num_micro_batches: the batch is worked off in so many parts; micro-batch a of k takes rows a::k, so that no
        row changes device.
    """
    gradients = _make_gradients(task, model_def, optimizer)

    def accumulate(state: TrainState, batch: Batch) -> tuple[Arrays, jax.Array, Arrays, Metrics]:
        if num_micro_batches == 1:
            return gradients(state.params, state.model_state, batch, state.key)

        def add(carry: tuple[Arrays, jax.Array, Arrays], inputs: tuple[Batch, jax.Array]) -> tuple[Any, Metrics]:
            grad_sum, weight_sum, model_state = carry
            grads, weight, model_state, metrics = gradients(state.params, model_state, *inputs)
            return (optax.tree.add(grad_sum, grads), weight_sum + weight, model_state), metrics

        def micro(rows: jax.Array) -> jax.Array:
            return rows.reshape(-1, num_micro_batches, *rows.shape[1:]).swapaxes(0, 1)

        inputs = jax.tree.map(micro, batch), jax.random.split(state.key, num_micro_batches)
        first = jax.tree.map(lambda leaf: leaf[0], inputs)
        shapes = jax.eval_shape(gradients, state.params, state.model_state, *first)
        zeros = optax.tree.zeros_like(shapes[:2])
        (grads, weight, model_state), metrics = jax.lax.scan(add, (*zeros, state.model_state), inputs)
        return grads, weight, model_state, {name: metric.reduce() for name, metric in metrics.items()}

    def train_step(state: TrainState, batch: Batch, learning_rate: jax.Array) -> tuple[TrainState, Metrics]:
        grads, weight, model_state, metrics = accumulate(state, batch)
        grads = jax.lax.with_sharding_constraint(grads, dict(grad_shardings))
        grads = optax.tree.scale(1 / jnp.where(weight > 0, weight, 1), grads)
        params, opt_state = optimizer.update(grads, state.opt_state, state.params, learning_rate)
        metrics["grad_norm"] = clu_metrics.Average(total=optax.tree.norm(grads), count=jnp.int32(1))
        metrics["learning_rate"] = clu_metrics.LastValue(value=learning_rate)
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            ema=ema and ema.update(params, state.ema)[1],
        )
        return state, metrics

    return train_step


def eval_params(state: TrainState, ema_decay: float | None) -> Arrays:
    """The params to evaluate: the bias-corrected moving average where there is one, once it has averaged any."""
    if state.ema is None:
        return state.params
    count = state.ema.count
    average = optax.tree.bias_correction(state.ema.ema, ema_decay, jnp.maximum(count, 1))
    return jax.tree.map(lambda mean, param: jnp.where(count > 0, mean, param), average, state.params)


def _eval_model(model_def: ModelDef, state: TrainState, ema_decay: float | None) -> nnx.Module:
    model = model_def.merge(eval_params(state, ema_decay), state.model_state, jax.random.wrap_key_data(state.rng))
    model.eval()
    return model


def make_eval_step(task: Task, model_def: ModelDef, ema_decay: float | None) -> Callable[[TrainState, Batch], Metrics]:
    """`(state, batch) → metrics` with the model in evaluation mode; rows whose mask is false count nothing."""

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return _forward(task, _eval_model(model_def, state, ema_decay), batch)[2]

    return eval_step


def make_predict_step(task: Task, model_def: ModelDef, ema_decay: float | None) -> Callable[[TrainState, Batch], Any]:
    """`(state, batch) → outputs` with the model in evaluation mode."""

    def predict_step(state: TrainState, batch: Batch) -> Any:
        return task.forward(_eval_model(model_def, state, ema_decay), batch)

    return predict_step
