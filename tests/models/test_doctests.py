"""The examples in the docstrings run."""

import doctest
from types import ModuleType

import pytest

from models import gpt, losses, mlp, resnet


@pytest.mark.parametrize("module", [gpt, losses, mlp, resnet])
def test_examples_run(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)
