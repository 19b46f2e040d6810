"""A byte-level GPT on the source files of Python's standard library: real text that is on every machine.

    python train.py --config=configs/gpt.py

0.5 M parameters, 600 steps of 16 windows of 128 bytes. On 2 CPU cores, shared with other work, it took two and a half
minutes and reached 2.21 bits per byte (a token is a byte here) on the test files.
"""

from data.text import PackedText
from models import GPTConfig
from trainer import CheckpointConfig, Config, DataConfig, EvalConfig, LanguageModel, OptimizerConfig, ScheduleConfig


def get_config() -> Config:
    """The config."""
    return Config(
        trainer=LanguageModel,
        model=GPTConfig(
            vocab_size=256,
            context=128,
            num_layers=4,
            num_heads=4,
            embed_dim=96,
            hidden_dim=256,
            positions="rope",
            norm="rmsnorm",
            activation="swiglu",
            bias=False,
            z_loss=1e-4,
        ),
        data=DataConfig(PackedText(context=128)),
        evals=(EvalConfig(DataConfig(PackedText(split="test", context=128)), every="25%"),),
        batch_size=16,
        train_for="600 steps",
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=3e-3,
            arguments={"b2": 0.98},
            weight_decay=0.1,
            clip_norm=1.0,
            schedule=ScheduleConfig(
                "warmup_cosine_decay_schedule",
                {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": "5%", "decay_steps": "100%", "end_value": 0.1},
            ),
        ),
        checkpoint=CheckpointConfig(every="25%", best="bits_per_token", mode="min"),
    )
