"""Rules say where parameters go; what is wrong with them is said before anything compiles."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models import MLPConfig
from tests.tiny import tiny_program
from trainer import MeshConfig, UserError
from trainer.mesh import make_mesh
from trainer.sharding import REPLICATE, match_rules
from trainer.state import flatten_state

PARAMS = {
    name: jax.ShapeDtypeStruct(shape, np.float32)
    for name, shape in {"blocks/0/kernel": (6, 16), "blocks/0/bias": (16,), "head/kernel": (16, 6)}.items()
}
REST = (".*", P())


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, model=4))


def test_the_first_rule_that_matches_the_whole_path_decides(mesh):
    rules = (("head/kernel", P("model")), (r"(.*/)?kernel", P(None, "model")), (r".*/bias", P("model")))
    assert match_rules(rules, PARAMS, mesh) == {
        "blocks/0/kernel": P(None, "model"),
        "blocks/0/bias": P("model"),
        "head/kernel": P("model"),
    }
    assert set(match_rules(REPLICATE, PARAMS, mesh).values()) == {P()}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("kernel", P()), REST], r"rule 'kernel' matches no parameter; the parameters are blocks.*whole path"),
        ([("(", P())], r"sharding rule '\(' is not a regular expression"),
        ([("head/.*", P())], r"no sharding rule covers parameter 'blocks/0/kernel' \(6, 16\); add one, for example"),
        ([(".*/bias", P(None, "model")), REST], r"'blocks/0/bias' \(16,\) by .*: the spec has 2 dims, the parameter 1"),
        ([("head/.*", P("modle")), REST], "the mesh has no axis 'modle'; it has replica, data, model, seq"),
        ([("head/.*", P("data", "data")), REST], "axis 'data' stands twice"),
        ([("head/.*", P(("data", "model"), "data")), REST], "axis 'data' stands twice"),
        (
            [("head/.*", P(None, "model")), REST],
            r"'head/kernel' \(16, 6\) .* dim 1 of size 6 does not divide over 4 devices .* are 4 and 8",
        ),
        (
            [("blocks/0/kernel", P(("data", "model"))), REST],
            r"dim 0 of size 6 does not divide over 8 devices of \('data', 'model'\); the nearest size that does is 8",
        ),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(mesh, rules, message):
    with pytest.raises(UserError, match=message):
        match_rules(rules, PARAMS, mesh)


def test_the_suggested_rule_is_one_that_works(mesh):
    with pytest.raises(UserError) as error:
        match_rules([("head/.*", P()), (".*/bias", P())], PARAMS, mesh)
    suggested = str(error.value).partition("for example ")[2].partition(" to keep")[0]
    rule = eval(suggested, {"PartitionSpec": P})
    assert match_rules([rule, ("head/.*", P()), (".*/bias", P())], PARAMS, mesh)["blocks/0/kernel"] == P()


def test_moments_and_average_follow_their_parameter_and_the_rest_is_replicated():
    """Also where two leaves of other kinds share a parameter's shape."""
    model = MLPConfig(in_features=4, hidden=(16,), out_features=3, batch_norm=True)
    program = tiny_program(mesh=MeshConfig(model=4), model=model)
    leaves = flatten_state(program.state)
    split = {path for path, leaf in leaves.items() if not leaf.sharding.is_fully_replicated}
    for param in program.model_def.params:
        spec = leaves[f"params/{param}"].sharding.spec
        followers = [path for path in leaves if path.endswith(f"/{param}")]
        assert len(followers) == 4, followers  # the parameter, two moments, the average
        assert {leaves[path].sharding.spec for path in followers} == {spec}
    assert "params/blocks/0/linear/kernel" in split and "params/head/bias" not in split
    assert {path.split("/")[0] for path in split} == {"params", "opt_state", "ema"}


def test_every_device_holds_only_its_part_from_birth():
    """No device ever holds a whole copy of a split parameter."""
    state = tiny_program(mesh=MeshConfig(model=4)).create_state(0)
    kernel = state.params["blocks/0/linear/kernel"]
    assert kernel.shape == (4, 16)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 4)}
