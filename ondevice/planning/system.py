"""The doctor's checks of the system: Python, memory, disk, the model cache, the compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from ondevice.core.errors import MissingPackageError, ModelError
from ondevice.core.process import cache_root
from ondevice.models.sources.cache import RECORD_NAME, read_record
from ondevice.planning import jetson
from ondevice.planning.devices import available_bytes, total_bytes
from ondevice.planning.jetson import Outcome
from ondevice.runtime_ops.build import find_compiler

NEEDED_DISK_BYTES = 4 << 30
"""A converted model, a program and a checkpoint of a model of about 100M parameters, with room."""
MODELS_SHOWN = 5
"""Names of converted models that are listed."""
ADB_FIX = "sudo apt-get install adb   (macOS: brew install android-platform-tools)"
COMPILER_FIX = "sudo apt-get install g++   (macOS: xcode-select --install)"


def python() -> Outcome:
    """Check that the version is one that the packages exist for."""
    version = ".".join(map(str, sys.version_info[:3]))
    return (
        (3, 11) <= sys.version_info[:2] < (3, 14),
        f"{version} ({sys.executable})",
        "use Python 3.11, 3.12 or 3.13",
    )


def memory() -> Outcome:
    """Check that some memory is free."""
    free = available_bytes() / 2**30
    total = total_bytes() / 2**30
    return (
        free > 1,
        f"{free:.1f} of {total:.1f} GiB free",
        "end other programs; `ondevice plan` says what a run needs",
    )


def disk() -> Outcome:
    """Check the free space on the disk of the model cache."""
    cache = cache_root()
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    fix = "free space, or set ONDEVICE_CACHE to a folder on another disk"
    return free >= NEEDED_DISK_BYTES, f"{free / 2**30:.1f} GiB free at {folder}", fix


def model_cache() -> Outcome:
    """Check that the cache can be written, and that the converted models in it are complete."""
    cache = cache_root()
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        return (
            False,
            f"{folder} is not writable",
            "set ONDEVICE_CACHE to a folder that you may write to",
        )
    names = []
    size = 0
    for record in sorted((cache / "models").rglob(RECORD_NAME)):
        try:
            size += sum(entry["bytes"] for entry in read_record(record.parent).files.values())
        except ModelError as error:
            return False, error.message, error.hint or ""
        names.append(record.parent.name)
    if not names:
        return True, f"no converted models yet in {cache}", ""
    shown = ", ".join(names[:MODELS_SHOWN])
    if len(names) > MODELS_SHOWN:
        shown += f" and {len(names) - MODELS_SHOWN} more"
    return True, f"{shown} ({size / 2**20:.0f} MiB) in {cache}", ""


def compiler() -> Outcome:
    """Check that the compiler of this project's ops takes a C++20 program."""
    try:
        path = find_compiler()
    except MissingPackageError as error:
        return None, error.message, COMPILER_FIX
    program = (
        "#include <vector>\nint main() { std::vector<int> v{1, 2}; return v[0] + v[1] - 3; }\n"
    )
    command = [path, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(
        command, input=program, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return False, f"{path} does not take C++20: {reason}", COMPILER_FIX
    first = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return True, (first.stdout.splitlines() or [path])[0], ""


def adb() -> Outcome:
    """Check that the tool for phones runs."""
    path = shutil.which("adb")
    if path is None:
        return None, "adb not installed: `ondevice push` and `pull` need it", ADB_FIX
    done = subprocess.run(
        [path, "version"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode == 0, (done.stdout.splitlines() or [path])[0], ADB_FIX


JETSON_CHECKS: dict[str, Callable[[], Outcome]] = {
    "board": jetson.board,
    "swap": jetson.swap,
    "power-mode": jetson.power_mode,
    "clocks": jetson.clocks,
}
"""Checks of a Jetson; left out on other machines unless asked for."""
SYSTEM_CHECKS: dict[str, Callable[[], Outcome]] = {
    "python": python,
    "memory": memory,
    "disk": disk,
    "model-cache": model_cache,
    "compiler": compiler,
    "adb": adb,
    **JETSON_CHECKS,
}
