"""Settings of JAX that belong to a process, made before its devices start."""

import hashlib
import os
import platform
from pathlib import Path

import jax

from trainer.errors import UserError

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR says where (or is empty).

    One folder per CPU type: XLA compiles for the instructions of the CPU at hand, and a program from another one may
    crash or round differently.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(root / "flaxloom" / f"xla-{_cpu_type()}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cpu_type() -> str:
    """The architecture and a hash of what /proc/cpuinfo says of the model and its instructions."""
    described = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        described += sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)})
    return f"{platform.machine()}-{hashlib.sha256(repr(described).encode()).hexdigest()[:12]}"


def enable_deterministic_operations() -> None:
    """Makes XLA choose operations on GPUs that give the same bits every time; call it before JAX starts its devices."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DETERMINISTIC}".strip()


def check_deterministic_operations() -> None:
    """Raises a UserError if this process has GPUs that started without deterministic operations."""
    if jax.default_backend() == "gpu" and _DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        raise UserError(f"deterministic: start Python with XLA_FLAGS={_DETERMINISTIC} in its environment")
