"""Paths that a user writes."""

from __future__ import annotations

from pathlib import Path

from ondevice.core.errors import ConfigError


def expanded(path: str | Path, hint: str = "set HOME, or write the path in full") -> Path:
    """Return the path with the user's folder in place of `~`.

    Raises:
        ConfigError: there is no such folder, as in a container whose user has no entry.
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
