"""Checkpoints: written by Orbax in the background, verified before they are believed.

    checkpoints/STEP/state/          Orbax: path → array, the whole state
    checkpoints/STEP/manifest.json   written last (trainer/manifest.py)

Orbax alone does not see a flipped bit in the data, and
casts a leaf to another dtype without a word; the manifest is there for both.

    python -m trainer.checkpoint list|verify|digest WORKDIR [--step=N]
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from etils import epath
from jax.sharding import Mesh

from trainer.digest import leaf_digest, to_hex
from trainer.errors import EXIT_DONE, NoValidCheckpointError, UserError, WriteError
from trainer.manifest import (
    DamagedError,
    check_files,
    complete_steps,
    describe_files,
    read_manifest,
    state_digest,
    write_manifest,
)
from trainer.mesh import MeshConfig, make_mesh, replicated
from trainer.state import TrainState, flatten_state, unflatten_state

log = logging.getLogger(__name__)


@dataclasses.dataclass
class CheckpointConfig:
    """When to save, and what to keep.

    Attributes:
      every: how often, a duration; also whenever `best` improves and at the end of the run.
      keep: number of checkpoints on disk: the latest and, with `best`, the `keep - 1` best; else the latest `keep`.
      best: a metric of the first evaluation.
      mode: whether a larger ("max") or a smaller ("min") value of `best` is better.
    """

    every: str = "1 epoch"
    keep: int = 2
    best: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        least = 1 if self.best is None else 2
        if self.keep < least:
            reason = "" if self.best is None else ": one for the latest, the others for the best"
            raise UserError(f"checkpoint.keep: expected at least {least}{reason}, found {self.keep}")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found: the state, its step, the hooks' state by hook name."""

    state: TrainState
    step: int
    hooks: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run. One save at a time is under way; its failure is raised by the next call."""

    def __init__(self, directory: epath.PathLike, config: CheckpointConfig, mesh: Mesh):
        self._directory = epath.Path(directory)
        self._config = config
        self._mesh = mesh
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: concurrent.futures.Future[None] | None = None

    def save(self, step: int, state: TrainState, *, hooks: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts to write `state`; returns once its arrays may be donated.

        Args:
          step: updates done.
          state: the whole state.
          hooks: hook name → its state, JSON.
          metrics: of the first evaluation at this step, or empty.

        Raises:
          WriteError: if this save cannot start or the one before it failed.
        """
        from orbax.checkpoint import v1 as ocp

        self.wait()
        leaves = flatten_state(state)
        digests = {path: leaf_digest(leaf, self._mesh) for path, leaf in leaves.items()}
        manifest = {
            "step": step,
            "metrics": dict(metrics),
            "hooks": dict(hooks),
            "leaves": {path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for path, leaf in leaves.items()},
        }
        folder = self._directory / str(step)
        try:
            if folder.exists():  # Left by a kill, or found to be damaged.
                folder.rmtree()
            folder.mkdir(parents=True)
            response = ocp.save_async(folder / "state", leaves)
        except Exception as error:
            raise _write_error(step, folder, error) from error
        self._saving = self._writer.submit(self._finish, step, response, manifest, digests)

    def _finish(self, step: int, response: Any, manifest: dict[str, Any], digests: Mapping[str, jax.Array]) -> None:
        folder = self._directory / str(step)
        try:
            response.result()
            for path, digest in digests.items():
                manifest["leaves"][path]["digest"] = to_hex(digest)
            manifest["files"] = describe_files(folder / "state")
            write_manifest(folder, manifest)
        except Exception as error:
            raise _write_error(step, folder, error) from error
        self._rotate()

    def poll(self) -> None:
        """Raises a `WriteError` if a save has failed meanwhile; does not wait."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Returns when the save under way is complete on disk, or raises its `WriteError`."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Waits, then ends the writing thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def steps(self) -> list[int]:
        """The complete steps on disk, oldest first."""
        return complete_steps(self._directory)

    def _rotate(self) -> None:
        steps = self.steps()
        if self._config.best is None:
            keep = set(steps[-self._config.keep :])
        else:
            keep = {steps[-1], *self._best_first(steps[:-1])[: self._config.keep - 1]}
        for step in set(steps) - keep:
            # The manifest goes first: a kill in between leaves an incomplete step, not a damaged one.
            (self._directory / str(step) / "manifest.json").unlink()
            (self._directory / str(step)).rmtree()

    def _best_first(self, steps: Sequence[int]) -> list[int]:
        """The steps that have a value of `best`, the best one first, the older one of equals."""
        values = {}
        for step in steps:
            with contextlib.suppress(DamagedError):
                values[step] = read_manifest(self._directory / str(step))["metrics"].get(self._config.best, math.nan)
        sign = -1 if self._config.mode == "max" else 1
        return sorted((step for step in values if not math.isnan(values[step])), key=lambda step: sign * values[step])

    def restore(self, abstract: TrainState) -> Restored | None:
        """The newest step that verifies, or None if there is no checkpoint.

        Args:
          abstract: shapes, dtypes and shardings to restore to; any mesh, whatever the state was saved on.

        Raises:
          UserError: if the checkpoint holds another state: the paths, shapes and dtypes that differ.
          NoValidCheckpointError: if there are checkpoints and none verifies.
        """
        failures = []
        for step in reversed(self.steps()):
            folder = self._directory / str(step)
            try:
                manifest = read_manifest(folder)
                check_files(folder, manifest)
                _check_same_leaves(flatten_state(abstract), manifest["leaves"], folder)
                leaves = load_leaves(folder, flatten_state(abstract))
                check_leaves(leaves, manifest, self._mesh)
            except DamagedError as error:
                log.warning("checkpoint of step %d does not verify, trying the one before it: %s", step, error)
                failures.append(f"  step {step}: {error}")
                continue
            return Restored(unflatten_state(abstract, leaves), step, manifest["hooks"])
        if failures:
            raise NoValidCheckpointError(
                f"no checkpoint in {self._directory} verifies; move the folder away to start anew:\n"
                + "\n".join(failures)
            )
        return None


def _write_error(step: int, folder: epath.Path, error: Exception) -> WriteError:
    return WriteError(
        f"the checkpoint of step {step} could not be written to {folder}: {error}; the checkpoints before it are "
        "intact. Make room or correct the path, then run the same command again"
    )


def load_leaves(folder: epath.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Path → array with the shapes, dtypes and shardings of `abstract`."""
    from orbax.checkpoint import v1 as ocp

    try:
        return ocp.load(folder / "state", dict(abstract))
    except Exception as error:
        raise DamagedError(f"{folder / 'state'} cannot be read: {error}") from error


def check_leaves(leaves: Mapping[str, jax.Array], manifest: Mapping[str, Any], mesh: Mesh) -> None:
    """Raises a `DamagedError` that names the leaves whose digest differs from the manifest."""
    digests = {path: leaf_digest(leaf, mesh) for path, leaf in leaves.items()}
    wrong = [path for path, digest in digests.items() if to_hex(digest) != manifest["leaves"][path]["digest"]]
    if wrong:
        raise DamagedError(f"{len(wrong)} leaves do not hold the values that were saved: {', '.join(wrong[:8])}")


def _check_same_leaves(wanted: Mapping[str, Any], saved: Mapping[str, Any], folder: epath.Path) -> None:
    def show(leaf: Mapping[str, Any]) -> str:
        return f"{leaf['dtype']}{list(leaf['shape'])}"

    here = {path: show({"dtype": leaf.dtype, "shape": leaf.shape}) for path, leaf in wanted.items()}
    there = {path: show(leaf) for path, leaf in saved.items()}
    lines = [f"  only in the checkpoint: {path} {there[path]}" for path in sorted(there.keys() - here.keys())]
    lines += [f"  only in this config: {path} {here[path]}" for path in sorted(here.keys() - there.keys())]
    lines += [
        f"  {path}: {there[path]} in the checkpoint, {here[path]} in this config"
        for path in sorted(here.keys() & there.keys())
        if here[path] != there[path]
    ]
    if lines:
        more = [f"  … {len(lines) - 40} more"] if len(lines) > 40 else []
        raise UserError(
            "\n".join([f"{folder} holds another state than this config builds:", *lines[:40], *more])
            + "\nuse the config that the run was started with, or another --workdir"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """`list`, `verify` or `digest` the checkpoints of a workdir; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.checkpoint", description=main.__doc__)
    parser.add_argument("command", choices=sorted(_COMMANDS))
    parser.add_argument("workdir", help="the run's folder")
    parser.add_argument("--step", type=int, help="this step alone (digest: by default the newest)")
    arguments = parser.parse_args(argv)
    directory = epath.Path(arguments.workdir).expanduser() / "checkpoints"
    steps = complete_steps(directory)
    if not steps or arguments.step not in (None, *steps):
        found = f"it holds steps {steps}" if steps else "it holds no complete checkpoint"
        print(
            f"no checkpoint{'' if arguments.step is None else f' of step {arguments.step}'} in {directory}: {found}",
            file=sys.stderr,
        )
        return UserError.exit_code
    chosen = steps if arguments.step is None else [arguments.step]
    return _COMMANDS[arguments.command](directory, chosen)


def _list(directory: epath.Path, steps: Sequence[int]) -> int:
    for step in steps:
        try:
            manifest = read_manifest(directory / str(step))
        except DamagedError as error:
            print(f"{step:>10}  damaged: {error}")
            continue
        size = sum(file["size"] for file in manifest["files"].values())
        metrics = "  ".join(f"{name}={value:.6g}" for name, value in manifest["metrics"].items())
        print(f"{step:>10}  {size / 2**20:10.1f} MiB  {len(manifest['leaves'])} leaves  {metrics}")
    return EXIT_DONE


def _verify(directory: epath.Path, steps: Sequence[int]) -> int:
    code = EXIT_DONE
    mesh = make_mesh(MeshConfig(), jax.devices("cpu")[:1])
    for step in steps:
        folder = directory / str(step)
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
            abstract = {
                path: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"], sharding=replicated(mesh))
                for path, leaf in manifest["leaves"].items()
            }
            check_leaves(load_leaves(folder, abstract), manifest, mesh)
        except DamagedError as error:
            print(f"{step:>10}  damaged: {error}")
            code = NoValidCheckpointError.exit_code
        else:
            print(f"{step:>10}  ok: {len(manifest['files'])} files, {len(manifest['leaves'])} leaves")
    return code


def _digest(directory: epath.Path, steps: Sequence[int]) -> int:
    step = steps[-1]
    try:
        manifest = read_manifest(directory / str(step))
        check_files(directory / str(step), manifest)
    except DamagedError as error:
        print(f"the checkpoint of step {step} is damaged: {error}", file=sys.stderr)
        return NoValidCheckpointError.exit_code
    print(step, state_digest(manifest))
    return EXIT_DONE


_COMMANDS = {"list": _list, "verify": _verify, "digest": _digest}

if __name__ == "__main__":
    sys.exit(main())
