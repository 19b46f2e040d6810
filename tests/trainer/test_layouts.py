"""Any layout, the same numbers: a mesh and a few words of config change where things are, never what they are."""

import jax
import numpy as np
import pytest

from models import MLPConfig
from tests.tiny import Tiny, lines, tiny_config
from trainer import MeshConfig, ShardingConfig
from trainer.state import flatten_state

LAYOUTS = {
    "data": (MeshConfig(data=8), ShardingConfig()),
    "zero1": (MeshConfig(data=8), ShardingConfig(zero1=True)),
    "fsdp": (MeshConfig(data=8), ShardingConfig(fsdp=True)),
    "model": (MeshConfig(data=1, model=8), ShardingConfig()),
    "data x model": (MeshConfig(data=4, model=2), ShardingConfig()),
    "data x model, fsdp": (MeshConfig(data=2, model=4), ShardingConfig(fsdp=True)),
    "replica x data x model": (MeshConfig(replica=2, data=2, model=2), ShardingConfig(fsdp=True)),
}
STEPS = "20 steps"


def losses(workdir, mesh, sharding, devices):
    config = tiny_config(mesh=mesh, sharding=sharding, train_for=STEPS)
    trainer = Tiny(config, workdir, devices=devices)
    trainer.fit()
    return trainer, lines(workdir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return losses(tmp_path_factory.mktemp("one"), MeshConfig(), ShardingConfig(), jax.devices()[:1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_to_the_same_numbers(layout, reference, tmp_path):
    """The same examples and masks; losses, evaluations and statistics agree to float32's rounding."""
    one, expected = reference
    trainer, found = losses(tmp_path, *LAYOUTS[layout], jax.devices())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["step"] == theirs["step"] and ours.get("ids") == theirs.get("ids")
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    for name, leaf in trainer.state.model_state.items():
        np.testing.assert_allclose(leaf, one.state.model_state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["fsdp", "zero1", "replica x data x model"])
def test_a_split_state_takes_its_share_of_memory(layout):
    """Case S38: what is split takes 1/n of its bytes on every device, moments and EMA included."""
    mesh, sharding = LAYOUTS[layout]
    model = MLPConfig(in_features=4, hidden=(512, 512), out_features=8)
    trainer = Tiny(tiny_config(model=model, mesh=mesh, sharding=sharding))
    state = flatten_state(trainer._program.state)
    split = {name: leaf for name, leaf in state.items() if sharding.fsdp or not name.startswith("params/")}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in split.values())
    each = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in split.values())
    parts = trainer.mesh.shape["data"] * trainer.mesh.shape["model"]
    assert each == pytest.approx(total / parts, rel=0.01)


def test_the_table_shows_rule_spec_and_bytes(capsys):
    """Every parameter, and the state as a whole; `keep_whole` keeps one from being split."""
    import rich

    config = tiny_config(mesh=MeshConfig(data=8), sharding=ShardingConfig(fsdp=True, keep_whole=("head/.*",)))
    trainer = Tiny(config)
    rich.get_console().width = 200
    rich.print(trainer.layout_table())
    shown = capsys.readouterr().out
    for path, spec in trainer._program.layout.params.items():
        assert path in shown
        assert ("data" in str(spec)) == (not path.startswith("head/"))
    assert "the whole state" in shown and "data=8" in shown
