"""The GPT config is what it says."""

import jax
import pytest

from trainer import load_config


def test_a_small_gpt_learns_bytes_under_a_split_model(tmp_path):
    """Tensor parallel and fully sharded at once, through the command's own path: config, data, task."""
    overrides = {
        "model.num_layers": "1",
        "model.embed_dim": "32",
        "model.hidden_dim": "64",
        "batch_size": "8",
        "train_for": "30 steps",
        "mesh.model": "2",
        "sharding.fsdp": "True",
        "log.tensorboard": "False",
    }
    config = load_config("configs/gpt.py", overrides)
    config.evals[0].data.source.text, config.evals[0].every = "python_stdlib", "100%"
    trainer = config.trainer(config, devices=jax.devices()[:4])
    assert trainer.fit().finished
    metrics = trainer.evaluate()
    assert metrics["test/bits_per_token"] < 6.5  # 8 before training
    assert metrics["test/loss"] > metrics["test/bits_per_token"] * 0.69  # the z-loss is in the loss alone


def test_a_number_of_heads_that_does_not_divide_is_an_error():
    config = load_config("configs/gpt.py", {"mesh.model": "8", "mesh.data": "1"})
    with pytest.raises(
        ValueError, match=r"attention/out/kernel.*dim 0 of size 4 does not divide over 8 devices.*does is 8"
    ):
        config.trainer(config)
