"""The shape of the house: which way imports point, and how long things may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("trainer", "models", "data", "configs")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SOURCES = [path for path in FILES if path.parent.name != "configs"]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(path):
    """The modules of this project that a file imports, lazily or not; a package stands for its `__init__`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [
                full if (full := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            ]
        else:
            continue
        found |= {name for name in names if name.partition(".")[0] in PACKAGES}
    return found


GRAPH = {name: imports(path) for name, path in MODULES.items()}


def imported_by(package):
    """Module → packages of this project that it imports, for the modules of `package`."""
    return {
        name: {target.partition(".")[0] for target in targets}
        for name, targets in GRAPH.items()
        if name.partition(".")[0] == package
    }


def test_imports_point_one_way():
    """`models` and `data` know nothing of the others; the framework knows no config."""
    for name, packages in imported_by("models").items():
        assert packages <= {"models"}, name
    for name, packages in imported_by("data").items():
        assert packages <= {"data"}, name
    for name, packages in imported_by("trainer").items():
        assert packages <= {"trainer", "data"}, name


def test_the_loop_knows_the_hook_protocol_only():
    """It imports no hook, and nothing that writes, reads or evaluates."""
    assert GRAPH["trainer.loop"] <= {"trainer.errors", "trainer.state", "trainer.step"}


def test_there_are_no_cycles_lazy_imports_included():
    """`trainer/__init__.py` only exports names lazily: to import a module of the package is not to import them."""
    graph = {
        name: {target for target in targets if target != "trainer"}
        for name, targets in GRAPH.items()
        if name != "trainer"
    }
    done = set()

    def visit(name, path):
        assert name not in path, "cycle: " + " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            visit(target, [*path, name])
        done.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_inside_the_framework_names_come_from_where_they_are_defined():
    for name, targets in GRAPH.items():
        if name.startswith("trainer."):
            assert "trainer" not in targets, f"{name} imports from trainer/__init__.py"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_functions_fit_on_a_screen_and_files_have_one_subject(path):
    """60 lines and 320 lines at most."""
    text = path.read_text()
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 60
    }
    assert not long
    assert len(text.splitlines()) <= 320


def test_no_file_is_called_utils_or_after_a_dependency():
    dependencies = {"jax", "flax", "nnx", "optax", "orbax", "clu", "tensorflow", "tfds", "tf", "numpy", "grain"}
    for path in SOURCES:
        assert path.stem not in {"utils", "util", "helpers", "misc", "common", *dependencies}, path


def test_the_reading_order_names_every_file_of_the_framework():
    """`trainer/__init__.py`, one line each; files below a folder are the folder's."""
    text = ast.get_docstring(ast.parse((ROOT / "trainer" / "__init__.py").read_text()))
    names = {path.name for path in (ROOT / "trainer").glob("*.py")} - {"__init__.py"}
    folders = {f"{path.name}/" for path in (ROOT / "trainer").iterdir() if (path / "__init__.py").exists()}
    missing = [name for name in sorted(names | folders) if name not in text]
    assert not missing
    mentioned = {word.strip("(:,;)") for word in text.split() if word.strip("(:,;)").endswith(".py")}
    assert mentioned <= names


def test_configs_hold_values_only():
    """Besides functions that return configs they define no class."""
    for path in (ROOT / "configs").glob("*.py"):
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)], path


def test_importing_data_or_the_config_does_not_import_tensorflow():
    """It takes 3 s; `--help` must not wait for it. Lazy imports stand inside functions; builders are TFDS's to load."""
    for path in FILES:
        if path.stem.endswith("_dataset_builder"):
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] not in {"tensorflow", "tensorflow_datasets"}, path
