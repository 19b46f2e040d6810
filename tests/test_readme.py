"""The README's task runs as it stands there."""

import re
import runpy
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def linear(tmp_path, monkeypatch):
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("linear.py").write_text(text)
    return "linear.py"


def test_the_task_of_the_readme_is_short_and_learns(linear, capsys):
    """In about 30 lines: y = x · (0, …, 7) + 1, learnt from 1,000 points; without a workdir nothing is written."""
    namespace = runpy.run_path(linear, run_name="__main__")
    *_, metrics, predicted = capsys.readouterr().out.strip().splitlines()
    assert float(re.findall(r"[\d.e-]+", metrics)[-1]) < 1e-2
    assert [round(float(value)) for value in re.findall(r"-?[\d.]+", predicted)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [path.name for path in Path().iterdir()] == [linear]
    assert namespace["LinearRegression"].__mro__[1].__name__ == "Trainer"


def test_train_py_runs_the_same_file(linear):
    import train

    assert train.main(["--config=linear.py", "--config.train_for=20 steps"]) == 0
    assert sorted(path.name for path in Path("runs/linear").iterdir()) == [
        "checkpoints",
        "config.json",
        "manifest.json",
        "metrics.jsonl",
        "tensorboard",
    ]
    sys.modules.pop("linear")
