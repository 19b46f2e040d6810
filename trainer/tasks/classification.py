"""Image classification."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from clu import metrics as clu_metrics
from flax import nnx

from trainer.step import Batch, Loss, Metrics
from trainer.trainer import Trainer


class ImageClassifier(Trainer):
    """Softmax cross-entropy and accuracy on batches of "image": float[batch, height, width, channels] and
    "label": int32[batch].
    """

    def forward(self, model: nnx.Module, batch: Batch) -> Any:
        """Logits: float[batch, num_classes]."""
        return model(batch["image"])

    def loss(self, outputs: jax.Array, batch: Batch) -> Loss:
        """Cross-entropy in nats, one per image."""
        return Loss(optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"]))

    def metrics(self, outputs: jax.Array, batch: Batch) -> Metrics:
        """Top-1 accuracy."""
        labels = batch["label"].astype(jnp.int32)
        return {"accuracy": clu_metrics.Accuracy.from_model_output(logits=outputs, labels=labels, mask=batch["mask"])}
