"""A config file becomes a checked Config, or one message says what is wrong with it."""

import dataclasses
from pathlib import Path

import pytest

from tests.tiny import examples, tiny_config
from trainer import CheckpointConfig, Config, DataConfig, EarlyStoppingConfig, EvalConfig, UserError, load_config

ROOT = Path(__file__).parents[2]
GOOD = """
from tests.tiny import tiny_config

def get_config(variant="small"):
    return tiny_config(batch_size={"small": 8, "large": 16}[variant])
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="experiment.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_file_variant_and_overrides(write):
    path = write(GOOD)
    assert load_config(path).batch_size == 8
    config = load_config(f"{path}:large", {"optimizer.learning_rate": "0.3", "evals[0].every": "2 steps", "seed": "7"})
    assert (config.batch_size, config.optimizer.learning_rate, config.evals[0].every, config.seed) == (
        16,
        0.3,
        "2 steps",
        7,
    )


def test_a_config_may_import_what_lies_beside_it(write):
    write("SIZE = 24\n", "my_sizes.py")
    imports = "import my_sizes\nfrom tests.tiny import tiny_config\n"
    path = write(imports + "get_config = lambda: tiny_config(batch_size=my_sizes.SIZE)")
    assert load_config(path).batch_size == 24


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (GOOD, ":huge", r"get_config failed: KeyError: 'huge' \(line 5 of .*experiment\.py\)"),
        ("import no_such_module", "", r"cannot be imported: ModuleNotFoundError: .*no_such_module.*\(line 1 of .*py\)"),
        ("x = 1\ndef get_config(:\n", "", r"cannot be imported: SyntaxError: .*line 2"),
        ("x = 1 / 0\n", "", r"cannot be imported: ZeroDivisionError: division by zero \(line 1 of "),
        ("get = 1", "", "has no function get_config"),
        ("get_config = 3", "", "has no function get_config"),
        ("def get_config():\n    return {'batch_size': 3}", "", r"to return a trainer\.Config, found dict"),
        ("def get_config():\n    return None", "", r"to return a trainer\.Config, found NoneType"),
        ("def get_config():\n    return None", ":x", "has no variants, found ':x'"),
        ("def get_config(variant):\n    return None", "", "get_config failed: TypeError: .*'variant'"),
        ("from trainer import Config\ndef get_config():\n    return Config(bach_size=3)", "", "TypeError: .*bach_size"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_message(write, text, spec, message):
    path = write(text)
    with pytest.raises(UserError, match=message) as error:
        load_config(path + spec)
    assert "experiment.py" in str(error.value)


def test_a_missing_file_names_those_that_are_there(write):
    path = Path(write(GOOD))
    with pytest.raises(UserError, match=r"no config file '.*/experimnt\.py'; .* holds experiment\.py"):
        load_config(str(path.with_name("experimnt.py")))
    with pytest.raises(UserError, match=r"no config file .* no config"):
        load_config(str(path.parent / "none" / "x.py"))
    with pytest.raises(UserError, match="no config file"):
        load_config(str(path.parent))


def test_an_unknown_variant_or_field_gives_the_nearest_name():
    """Case U5."""
    with pytest.raises(UserError, match=r"resnet\.py:cifar11: unknown variant 'cifar11'; did you mean 'cifar10'"):
        load_config(f"{ROOT}/configs/resnet.py:cifar11")
    with pytest.raises(UserError, match=r"optimizer\.learning_rat: unknown field .* did you mean 'learning_rate'"):
        load_config(f"{ROOT}/configs/resnet.py", {"optimizer.learning_rat": "1"})


def test_overrides_pass_through_every_check(write):
    with pytest.raises(UserError, match="batch_size: expected a number ≥ 1, found 0"):
        load_config(write(GOOD), {"batch_size": "0"})
    with pytest.raises(UserError, match=r"config\.model: MLPConfig\.dropout: expected a probability"):
        load_config(write(GOOD), {"model.dropout": "1.5"})


def variants():
    for path in sorted((ROOT / "configs").glob("*.py")):
        if path.name != "__init__.py":
            text = path.read_text()
            names = text.split('"""')[1].partition("\n")[0]
            yield from (f"configs/{path.name}:{name.split('`')[1]}" for name in names.split(",") if "`" in name)


@pytest.mark.parametrize("spec", list(variants()))
def test_every_variant_of_every_config_loads(spec):
    """Those that its first line names."""
    config = load_config(f"{ROOT}/{spec}")
    assert isinstance(config, Config) and config.trainer is not None


def test_some_variants_were_found():
    assert {"configs/resnet.py:digits", "configs/resnet.py:imagenet"} <= set(variants()), list(variants())


EVAL = EvalConfig(DataConfig(examples(11)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches: expected a number ≥ 1, found 0"),
        ({"seed": -1}, r"seed: expected 0 ≤ seed < 2\*\*32, found -1"),
        ({"ema_decay": 1.0}, r"ema_decay: expected a number between 0 and 1, or None, found 1\.0"),
        ({"evals": (EVAL, EVAL)}, r"evals: names must differ, found \['test', 'test'\]"),
        ({"evals": (), "checkpoint": CheckpointConfig(best="loss")}, r"checkpoint\.best watches the first evaluation"),
        ({"evals": (), "early_stopping": EarlyStoppingConfig()}, "early_stopping watches the first evaluation"),
    ],
)
def test_fields_that_contradict_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "train"}, "expected a name other than 'train'"),
        ({"name": "a/b"}, "without '/', found 'a/b'"),
        ({"batch_size": 0}, "evals, 'test': expected a batch_size ≥ 1 or None, found 0"),
    ],
)
def test_an_evaluation_is_checked(fields, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(EVAL, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patience": 0}, r"early_stopping\.patience: expected a number of evaluations ≥ 1, found 0"),
        ({"min_delta": -1.0}, r"early_stopping\.min_delta: expected a number ≥ 0, found -1"),
        ({"min_delta": float("nan")}, r"early_stopping\.min_delta: expected a number ≥ 0, found nan"),
    ],
)
def test_early_stopping_is_checked(fields, message):
    with pytest.raises(UserError, match=message):
        EarlyStoppingConfig(**fields)
