"""Is there room to work: cores, memory, shared memory, the cache folder, a compiler?

In: the operating system. Out: findings.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hp_components.data.cache import cache_root
from hp_trainer.doctor.findings import Finding, Level

__all__ = ["examine_machine"]

GIB = 2**30
SHARED_MEMORY_NEEDED = GIB // 4


def examine_machine() -> list[Finding]:
    """Cores, memory, /dev/shm, the cache folder, a C++ compiler, and the variables that change behaviour."""
    findings = [_cores(), _shared_memory(), _cache(), _compiler()]
    names = ("HYPER_PARALLEL_PLATFORM", "HP_DEVICE", "HP_CACHE_DIR", "OMP_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    variables = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    findings.append(Finding("variables", Level.OK, ", ".join(variables) or "none set"))
    return [finding for finding in findings if finding is not None]


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = ""
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB memory"
    return Finding("cores", Level.OK, f"{cores}{memory}")


def _shared_memory() -> Finding | None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    if free < SHARED_MEMORY_NEEDED:
        remedy = "worker processes of the dataloader hand batches over there: docker run --shm-size=8g"
        return Finding("shared memory", Level.WARNING, found, remedy)
    return Finding("shared memory", Level.OK, found)


def _cache() -> Finding:
    root = cache_root()
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding("cache", Level.BROKEN, f"{root} cannot be written: {error.strerror}", "set HP_CACHE_DIR")
    return Finding("cache", Level.OK, f"{root}, {free:.0f} GiB free")


def _compiler() -> Finding:
    """torch.compile on a CPU builds C++."""
    compiler = os.environ.get("CXX") or next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        remedy = "install g++ for compile.mode=blocks on a CPU"
        return Finding("C++ compiler", Level.OPTIONAL, "none", remedy)
    return Finding("C++ compiler", Level.OK, shutil.which(compiler) or compiler)
