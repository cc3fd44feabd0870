"""This process: its version, its folders, how its threads wait, and how it starts Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ondevice.core.errors import ConfigError, MissingPackageError

DISTRIBUTION = "ondevice-train"
POLICY = "OMP_WAIT_POLICY"
NAMED = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user says how threads wait."""


def expanded(path: str | Path, hint: str = "set HOME, or write the path in full") -> Path:
    """Return the path with the user's folder in place of `~`.

    Raises:
        ConfigError: the folder does not exist, as in a container whose user has no entry.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path}: the user has no home folder",
            expected="HOME, or an entry of the user in /etc/passwd",
            received="neither",
            hint=hint,
        ) from None


def cache_root() -> Path:
    """Return the cache's folder, `$ONDEVICE_CACHE`, or `ondevice` in `$XDG_CACHE_HOME` or `~/.cache`.

    It is not created.
    """
    if own := os.environ.get("ONDEVICE_CACHE"):
        return expanded(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return expanded(base or "~/.cache", hint="set HOME or ONDEVICE_CACHE") / "ondevice"


def own_version() -> str:
    """Return the installed version.

    Raises:
        MissingPackageError: the files are on the path, and the distribution is not installed.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        raise MissingPackageError(
            f"the metadata of {DISTRIBUTION} is missing: its files are on Python's path, but it is not installed",
            expected=f"an installed {DISTRIBUTION}",
            hint="pip install -e . in the checkout, or pip install ondevice-train",
        ) from None


def wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user says otherwise.

    A library's own choice is to spin, which takes the core from other processes: next to five busy
    ones on two cores a step then takes many times as long. On an idle machine sleeping costs
    nothing that was measured (`benchmarks/training/neighbour.py`). The number of threads stays: a
    run's bits depend on it. It must be called before a library that reads the policy is loaded.
    """
    if not any(name in os.environ for name in NAMED) and "torch" not in sys.modules:
        os.environ[POLICY] = "PASSIVE"


def described() -> str:
    """Say how threads wait, in a few words for a log."""
    named = [f"{name}={os.environ[name]}" for name in NAMED if name in os.environ]
    return ", ".join(named) or "as the libraries choose: torch was loaded first"


def python_command(*arguments: str, python: str | None = None) -> list[str]:
    """Return the command that runs Python on `arguments`, such as `-m NAME`.

    With `-P`, because `-m` and `-c` import from the working folder first, where others may write: a `pip.py` there
    would run in place of pip.

    Args:
        python: another interpreter than this one.
    """
    return [python or sys.executable, "-P", *arguments]


def path_of(value: object, what: str) -> Path:
    """Return a path that somebody gave from Python.

    Raises:
        ConfigError: it is not one.
    """
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise ConfigError(
        f"{what} is of the wrong type", expected="a path", received=type(value).__name__
    )
