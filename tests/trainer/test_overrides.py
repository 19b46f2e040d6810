"""Text becomes the field's own type, or an error that names the field."""

import dataclasses
from typing import Any, Literal

import pytest

from trainer import UserError
from trainer.overrides import override, parse, rebuild


@dataclasses.dataclass
class Leaf:
    rate: float = 1.0
    steps: int = 1
    flag: bool = True
    name: str = "a"
    limit: float | None = None
    count: int | None = 3
    sizes: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = ()
    mode: Literal["max", "min"] = "max"
    arguments: dict[str, Any] = dataclasses.field(default_factory=lambda: {"momentum": 0.9, "inner": {"x": 1}})

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be positive, found {self.steps}")


@dataclasses.dataclass
class Root:
    leaf: Leaf = dataclasses.field(default_factory=Leaf)
    evals: tuple[Leaf, ...] = dataclasses.field(default_factory=lambda: (Leaf(), Leaf(name="b")))
    maybe: Leaf | None = None
    model: Any = None


def changed(path, text):
    root = Root()
    override(root, {path: text})
    return rebuild(root)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("leaf.rate", "1e-5", 1e-5),
        ("leaf.rate", "3", 3.0),
        ("leaf.rate", "-.5", -0.5),
        ("leaf.steps", "7", 7),
        ("leaf.steps", "1_000", 1000),
        ("leaf.flag", "False", False),
        ("leaf.flag", "false", False),
        ("leaf.flag", "True", True),
        ("leaf.name", "1e-5", "1e-5"),
        ("leaf.name", "None", "None"),
        ("leaf.name", "a=b,c", "a=b,c"),
        ("leaf.name", "", ""),
        ("leaf.limit", "None", None),
        ("leaf.limit", "2", 2.0),
        ("leaf.count", "none", None),
        ("leaf.sizes", "3,4,5", (3, 4, 5)),
        ("leaf.sizes", "(3, 4)", (3, 4)),
        ("leaf.sizes", "[3]", (3,)),
        ("leaf.sizes", "3", (3,)),
        ("leaf.sizes", "()", ()),
        ("leaf.sizes", "", ()),
        ("leaf.names", "a,b", ("a", "b")),
        ("leaf.names", "('a', 'b')", ("a", "b")),
        ("leaf.names", "block.*", ("block.*",)),
        ("leaf.mode", "min", "min"),
        ("leaf.arguments.momentum", "0.95", 0.95),
        ("leaf.arguments.nesterov", "True", True),
        ("leaf.arguments.inner.x", "(1, 2)", (1, 2)),
        ("leaf.arguments", "{'b1': 0.5}", {"b1": 0.5}),
        ("evals[1].name", "c", "c"),
        ("evals[-1].rate", "2", 2.0),
        ("model", "3", 3),
    ],
)
def test_text_arrives_as_the_fields_type(path, text, expected):
    """Case U5: `1e-5` is a float and `False` a bool; tuples, None and new dict keys work."""
    value = changed(path, text)
    for part in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, tuple):
            value = value[int(part)]
        else:
            value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("leaf.rtae", "1", r"config\.leaf\.rtae: unknown field 'rtae'; did you mean 'rate'"),
        ("laef.rate", "1", r"config\.laef\.rate: unknown field 'laef'; did you mean 'leaf'"),
        ("leaf.arguments.inne.x", "1", r"unknown key 'inne'; did you mean 'inner'"),
        ("evals[2].name", "x", r"config\.evals\[2\]\.name: index 2 is out of range, there are 2"),
        ("evals.name", "x", r"config\.evals\.name: .*tuple"),
        ("leaf.rate.x", "1", r"config\.leaf\.rate\.x: .*float"),
        ("maybe.rate", "1", r"config\.maybe\.rate"),
        ("leaf.steps", "1.5", r"config\.leaf\.steps: expected int, found '1\.5'"),
        ("leaf.steps", "True", r"config\.leaf\.steps: expected int, found 'True'"),
        ("leaf.rate", "fast", r"config\.leaf\.rate: expected float, found 'fast'"),
        ("leaf.rate", "False", r"config\.leaf\.rate: expected float, found 'False'"),
        ("leaf.flag", "1", r"config\.leaf\.flag: expected bool, found '1'"),
        ("leaf.flag", "yes", r"config\.leaf\.flag: expected bool, found 'yes'"),
        ("leaf.sizes", "a,b", r"config\.leaf\.sizes: expected tuple\[int, \.\.\.\], found 'a,b'"),
        ("leaf.mode", "best", r"config\.leaf\.mode: expected .*'max', 'min'.*, found 'best'"),
        ("leaf", "1", r"config\.leaf: expected Leaf, found '1'"),
        ("leaf.steps", "0", r"config\.leaf: steps must be positive, found 0"),
        ("", "1", r"config\."),
        ("leaf[", "1", r"config\.leaf\["),
        ("evals[x].name", "1", r"config\.evals\[x\]\.name"),
    ],
)
def test_what_leads_nowhere_or_is_of_another_type_names_the_field(path, text, message):
    """Case U5."""
    with pytest.raises(UserError, match=message):
        changed(path, text)


def test_rebuilding_checks_what_was_set_in_python():
    root = Root()
    root.evals[1].sizes = ("a",)
    with pytest.raises(UserError, match=r"config\.evals\[1\]\.sizes: expected tuple\[int, \.\.\.\], found \('a',\)"):
        rebuild(root)
    root = Root(leaf=Leaf(steps=5))
    root.leaf.steps = -1
    with pytest.raises(UserError, match=r"config\.leaf: steps must be positive, found -1"):
        rebuild(root)


def test_rebuilding_runs_post_init_again_and_leaves_the_original_alone():
    @dataclasses.dataclass
    class Doubles:
        base: int
        double: int = dataclasses.field(init=False, default=0)

        def __post_init__(self):
            self.double = 2 * self.base

    config = Doubles(3)
    override(config, {"base": "5"})
    assert config.double == 6
    assert rebuild(config).double == 10 and config.double == 6


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_none_is_a_word(word):
    assert parse(word, int | None, "x") is None
