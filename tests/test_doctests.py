"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ("trainer", "models", "data")
MODULES = [
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    if not module.name.endswith("_dataset_builder")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed
