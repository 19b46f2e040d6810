"""What a checkpoint's manifest says, and whether the files still say the same. No device is needed for it.

`manifest.json` is written last: size and SHA-256 of every file, shape, dtype and digest of every leaf, the hooks' own
state, the metrics. A step without its manifest is incomplete and does not count.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath


class DamagedError(Exception):
    """A checkpoint that is not what was written."""


def complete_steps(directory: epath.Path) -> list[int]:
    """The steps below `directory` that have a manifest, oldest first."""
    if not directory.exists():
        return []
    folders = [folder for folder in directory.iterdir() if folder.name.isdecimal()]
    return sorted(int(folder.name) for folder in folders if (folder / "manifest.json").exists())


def read_manifest(folder: epath.Path) -> dict[str, Any]:
    """The manifest of one step.

    Raises:
      DamagedError: if it is not what `write_manifest` wrote.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        checksum = manifest.pop("checksum")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if checksum != _checksum(manifest):
        raise DamagedError(f"{path} does not hold what was written (its checksum differs)")
    return manifest


def write_manifest(folder: epath.Path, manifest: Mapping[str, Any]) -> None:
    """Makes the step complete."""
    write_atomically(folder / "manifest.json", json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes `path` so that it holds either what it held or all of `text`, whenever the power goes."""
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def describe_files(root: epath.Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below `root`, by its path relative to it."""
    files = sorted(_files_below(root))
    return {str(path.relative_to(root)): {"size": path.stat().length, "sha256": _sha256(path)} for path in files}


def _files_below(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        yield from _files_below(path) if path.is_dir() else (path,)


def _sha256(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(folder: epath.Path, manifest: Mapping[str, Any]) -> None:
    """Raises a `DamagedError` that names the first file that is missing or differs from the manifest."""
    for name, written in manifest["files"].items():
        path = folder / "state" / name
        if not path.exists():
            raise DamagedError(f"{path} is missing")
        size = path.stat().length
        if size != written["size"]:
            raise DamagedError(f"{path} has {size} bytes, {written['size']} were written")
        if _sha256(path) != written["sha256"]:
            raise DamagedError(f"{path} does not hold what was written (SHA-256 differs)")


def state_digest(manifest: Mapping[str, Any]) -> str:
    """One SHA-256 over every leaf of a checkpoint, in path order; equal states have equal digests on any layout."""
    digest = hashlib.sha256()
    for path, leaf in sorted(manifest["leaves"].items()):
        digest.update(f"{path} {leaf['dtype']} {list(leaf['shape'])} {leaf['digest']}\n".encode())
    return digest.hexdigest()
