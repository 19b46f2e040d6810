"""`train.py` as a person meets it: one message for a wrong input, and a run that a kill does not harm."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import train
from trainer.checkpoint import main as checkpoint

ROOT = Path(__file__).parents[1]
CONFIG = """
import numpy as np
import optax

from models import MLPConfig
from trainer import CheckpointConfig, Config, DataConfig, EvalConfig, LogConfig, Loss, OptimizerConfig
from trainer import ShardingConfig, Trainer


class Points(Trainer):
    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return Loss(optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"]))


def points(num):
    rng = np.random.default_rng(num)
    x = rng.normal(size=(num, 4)).astype(np.float32)
    return {"x": x, "label": np.argmax(x[:, :3], axis=1).astype(np.int32)}


def get_config(variant="short"):
    return Config(
        trainer=Points,
        model=MLPConfig(in_features=4, hidden=(16,), out_features=3, dropout=0.1, batch_norm=True),
        data=DataConfig(points(1000)),
        evals=(EvalConfig(DataConfig(points(100))),),
        batch_size=16,
        train_for={"short": "5 steps", "long": "3000 steps"}[variant],
        optimizer=OptimizerConfig("adamw", learning_rate=0.01),
        checkpoint=CheckpointConfig(every="20 steps", keep=3),
        log=LogConfig(every="20 steps", tensorboard=False),
    )
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config file in an otherwise empty current folder. This process keeps its devices and compilation cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir or "")
    Path("points.py").write_text(CONFIG)
    yield "points.py"
    sys.modules.pop("points", None)


@pytest.mark.parametrize(
    ("argv", "overrides"),
    [
        (["--config=a.py"], {}),
        (["--config", "a.py", "--config.seed=3"], {"seed": "3"}),
        (["--config.seed", "3", "--config=a.py"], {"seed": "3"}),
        (["--config=a.py", "--config.model.name=x=y"], {"model.name": "x=y"}),
        (["--config=a.py", "--config.evals[0].every=2 steps"], {"evals[0].every": "2 steps"}),
        (["--config=a.py", "--config.optimizer.learning_rate", "-1"], {"optimizer.learning_rate": "-1"}),
    ],
)
def test_flags_and_fields(argv, overrides):
    flags, found = train.parse(argv)
    assert (flags.config, flags.workdir, flags.accept_config_change) == ("a.py", None, False)
    assert found == overrides


@pytest.mark.parametrize("argv", [[], ["--konfig=a.py"], ["--config=a.py", "--config.seed"], ["--config=a.py", "x"]])
def test_flags_that_are_none_exit_2(argv, capsys):
    with pytest.raises(SystemExit) as error:
        train.main(argv)
    assert error.value.code == 2
    assert "usage: train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "workdir"),
    [
        ("configs/resnet.py", "runs/resnet"),
        ("configs/resnet.py:cifar10", "runs/resnet-cifar10"),
        ("/else/where/my.py:a/b", "runs/my-a-b"),
    ],
)
def test_the_default_workdir(config, workdir):
    assert train.default_workdir(config) == workdir


def failure(capsys, *argv):
    """The message of a command that must exit with 2."""
    capsys.readouterr()
    assert train.main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and "Traceback" not in out + err
    return err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config=point.py"], r"no config file '.*point\.py'; .* holds points\.py"),
        (["--config=points.py:big"], "KeyError: 'big'"),
        (["--config=points.py", "--config.bach_size=8"], "unknown field 'bach_size'; did you mean 'batch_size'"),
        (["--config=points.py", "--config.batch_size=8.5"], r"config\.batch_size: expected int, found '8\.5'"),
        (["--config=points.py", "--config.batch_size=12"], "12 does not divide over 8 devices; .* 8 and 16"),
        (["--config=points.py", "--config.num_micro_batches=32"], "32 micro-batches cannot be made of .* 16 examples"),
        (["--config=points.py", "--config.data.source=digit"], "digit"),
        (["--config=points.py", "--config.data.source=digits", "--config.data.split=trian"], "trian"),
        (["--config=points.py", "--config.optimizer.name=adamv"], "unknown optimizer 'adamv'"),
        (["--config=points.py", "--config.optimizer.schedule.name=cosine"], "unknown schedule 'cosine'"),
        (["--config=points.py", "--config.optimizer.frozen=nothing.*"], "pattern 'nothing.*' matches no parameter"),
        (["--config=points.py", "--config.checkpoint.best=acc"], "unknown metric 'acc'; the evaluation gives loss"),
        (["--config=points.py", "--config.mesh.model=3"], "does not make 8 devices"),
        (["--config=points.py", "--workdir=points.py/run"], "the workdir .*points.py/run cannot be written"),
        (["--config=points.py", "--workdir=points.py"], "the workdir .*points.py cannot be written"),
    ],
)
def test_a_wrong_input_is_one_message_and_exit_code_2(config, capsys, flags, message):
    """And leaves nothing behind."""
    assert re.search(message, failure(capsys, *flags))
    assert {path.name for path in Path().iterdir()} <= {"points.py", "__pycache__"}


def test_an_import_error_names_file_and_line(config, capsys):
    Path("broken.py").write_text("import numpy\nimport no_such_module\n")
    text = failure(capsys, "--config=broken.py")
    assert "no_such_module" in text and "line 2 of" in text and "broken.py" in text


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ('(("conv/.*", P()), (".*", P()))', "sharding rule 'conv/.*' matches no parameter"),
        ('(("head/.*", P()),)', "no sharding rule covers parameter 'blocks/0/linear/kernel'"),
        ('((".*bias", P("model")), (".*", P()))', "does not divide over 8 devices"),
    ],
)
def test_wrong_rules(config, capsys, rules, message):
    text = CONFIG.replace("    return Config(", f"    return Config(sharding=ShardingConfig(rules={rules}),")
    imports = "import optax\nfrom jax.sharding import PartitionSpec as P\n"
    Path("ruled.py").write_text(text.replace("import optax\n", imports))
    mesh = ["--config.mesh.model=8", "--config.mesh.data=1"]
    assert message in failure(capsys, "--config=ruled.py", *mesh)


def test_traceback_shows_where_an_error_came_from(config, capsys):
    assert train.main(["--config=points.py", "--config.optimizer.name=adamv", "--traceback"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "optimizer.py" in shown
    assert shown.splitlines()[-1].startswith("error: optimizer.name: unknown optimizer")


def test_a_run_that_goes_on_and_one_whose_numbers_differ(config, capsys):
    """The same command continues; another learning rate is refused with a diff, until it is accepted."""
    command = ["--config=points.py", "--workdir=run"]
    assert train.main(command) == 0
    assert "finished" in capsys.readouterr().out
    assert train.main(command) == 0
    assert train.main([*command, "--config.train_for=8 steps"]) == 0
    assert checkpoint(["digest", "run"]) == 0
    before = capsys.readouterr().out.splitlines()[-1]
    assert before.startswith("8 ")

    changed = [*command, "--config.optimizer.learning_rate=0.5", "--config.train_for=9 steps"]
    text = failure(capsys, *changed)
    assert "  optimizer.learning_rate: 0.01 → 0.5\n" in text and "--accept_config_change" in text
    assert "train_for" not in text
    assert checkpoint(["digest", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == before
    assert train.main([*changed, "--accept_config_change"]) == 0
    assert checkpoint(["digest", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("9 ")


def test_the_default_workdir_is_below_runs(config):
    assert train.main(["--config=points.py:short"]) == 0
    assert {path.name for path in Path("runs/points-short").iterdir()} == {
        "checkpoints",
        "config.json",
        "manifest.json",
        "metrics.jsonl",
    }


def test_help_imports_no_framework():
    code = """
import sys, train
try:
    train.main(["--help"])
finally:
    heavy = {"jax", "flax", "optax", "orbax", "clu", "tensorflow", "numpy", "trainer", "data", "models"}
    found = sorted(heavy & {name.partition(".")[0] for name in sys.modules})
    print("imported:", found)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: train.py" in done.stdout and "Exit codes" in done.stdout
    assert "imported: []" in done.stdout


def start(workdir, **options):
    command = [sys.executable, str(ROOT / "train.py"), "--config=points.py:long", f"--workdir={workdir}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, **options)


def wait_for_step(process, workdir, step):
    """Until a checkpoint of at least `step` is there."""
    for _ in range(2400):
        steps = [int(path.parent.name) for path in Path(workdir).glob("checkpoints/*/manifest.json")]
        if max(steps, default=0) >= step:
            return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    raise AssertionError(f"no step {step} after 120 s")


@pytest.mark.drill
def test_a_run_that_is_killed_and_stopped_ends_in_the_bits_of_a_straight_one(config, capsys):
    """`kill -9`, then SIGTERM, each from another process; the same command goes on (Cases R1, C67, C75)."""
    assert start("straight").wait(300) == 0

    process = start("cut")
    wait_for_step(process, "cut", 40)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL

    process = start("cut")
    wait_for_step(process, "cut", 400)
    process.terminate()
    assert process.wait(60) == 75
    assert start("cut").wait(300) == 0

    lines = []
    for workdir in ("straight", "cut"):
        assert checkpoint(["digest", workdir]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
    assert lines[0] == lines[1] and lines[0].startswith("3000 ")
