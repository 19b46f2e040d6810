"""Models: NNX modules, each in one file with its config dataclass and its sharding rules.

A model config is anything with `build(rngs) -> nnx.Module` and
`sharding_rules() -> ((path pattern, PartitionSpec), ...)`; a user's own file serves as well as these.
"""

from models.gpt import GPTConfig
from models.mlp import MLPConfig
from models.resnet import ResNetConfig

__all__ = ["GPTConfig", "MLPConfig", "ResNetConfig"]
