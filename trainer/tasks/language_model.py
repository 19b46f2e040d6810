"""Language modelling."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax import nnx
from jaxtyping import Array, Float, Int

from trainer.step import Batch, Loss, Metrics
from trainer.trainer import Trainer


class LanguageModel(Trainer):
    """Next-token prediction on batches of "inputs" and "targets": int[batch, context].

    `config.model.z_loss` weighs PaLM's z-loss (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5),
    the square of the log-normaliser, which keeps the logits from drifting.
    """

    def forward(self, model: nnx.Module, batch: Batch) -> Any:
        """Logits: float[batch, context, vocab]."""
        return model(batch["inputs"].astype(jnp.int32))

    def loss(self, outputs: jax.Array, batch: Batch) -> Loss:
        """Cross-entropy in nats, one per token, and the z-loss."""
        cross_entropy, log_normalizer = token_losses(outputs, batch["targets"].astype(jnp.int32))
        return Loss(cross_entropy + self.config.model.z_loss * log_normalizer**2)

    def metrics(self, outputs: jax.Array, batch: Batch) -> Metrics:
        """The cross-entropy alone, in bits per token."""
        cross_entropy, _ = token_losses(outputs, batch["targets"].astype(jnp.int32))
        mask = jnp.broadcast_to(batch["mask"][:, None], cross_entropy.shape)
        return {"bits_per_token": clu_metrics.Average.from_model_output(cross_entropy / math.log(2), mask)}


def token_losses(
    logits: Float[Array, "*dims vocab"], targets: Int[Array, "*dims"]
) -> tuple[Float[Array, "*dims"], Float[Array, "*dims"]]:
    """Cross-entropy of each token in nats, and the log-normaliser log Σ exp(logits).

    The z-loss of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5) is
    `1e-4 * log_normalizer**2`, to be added by the caller, so that the cross-entropy can be reported without it.

    Everything is a max or a sum over the vocabulary. Where that is split over devices they exchange one number per
    token for each, not the logits (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3); so the
    target's logit is found by comparison with every token, where `take_along_axis` would gather.

    >>> cross_entropy, log_normalizer = token_losses(jnp.zeros((2, 8)), jnp.array([3, 5]))
    >>> (cross_entropy / jnp.log(2)).tolist()
    [3.0, 3.0]
    """
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - largest
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    target_logits = jnp.sum(jnp.where(is_target, shifted, 0), axis=-1)
    return log_sum - target_logits, log_sum + largest[..., 0]
