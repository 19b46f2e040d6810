"""What every model family's rules must do: cover each variable, and each be of use."""

import re

import jax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from models import GPTConfig, MLPConfig, ResNetConfig

Config = GPTConfig | MLPConfig | ResNetConfig

CONFIGS = [
    GPTConfig(vocab_size=64, num_layers=12, embed_dim=32, num_heads=4, dropout=0.1),
    GPTConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, scan_layers=True),
    GPTConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, activation="swiglu", scan_layers=True),
    GPTConfig.llama3_8b(),
    GPTConfig.llama3_1b(scan_layers=True),
    ResNetConfig(depth=18, num_classes=10, stem="small", width=8),
    ResNetConfig(depth=50),
    MLPConfig(in_features=4, hidden=(8, 8), out_features=3),
    MLPConfig(in_features=4, hidden=(8,), out_features=3, dropout=0.1, batch_norm=True),
    MLPConfig(in_features=4, hidden=(), out_features=1),
]


def abstract_variables(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    model = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    return {"/".join(path): variable.get_value() for path, variable in flat}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_variable_is_covered_and_divides(config: Config) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for path, variable in abstract_variables(config).items():
        spec = next(spec for pattern, spec in config.sharding_rules() if re.fullmatch(pattern, path))
        assert len(spec) <= len(variable.shape), path
        NamedSharding(mesh, spec).shard_shape(variable.shape)  # raises where a dim does not divide


@pytest.mark.parametrize("config", CONFIGS)
def test_every_rule_is_the_first_to_match_some_parameter(config: Config) -> None:
    patterns = [pattern for pattern, _ in config.sharding_rules()]
    paths = abstract_variables(config)
    first = {next(pattern for pattern in patterns if re.fullmatch(pattern, path)) for path in paths}
    assert first == set(patterns)


@pytest.mark.parametrize("config", CONFIGS)
def test_paths_are_strings_without_dots(config: Config) -> None:
    """Integer keys break jax.export and Orbax; a dot is Orbax's own separator."""
    model = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    for path, _ in nnx.to_flat_state(nnx.state(model)):
        assert all(isinstance(key, str) and "." not in key for key in path)
