"""Keys for the devices of a test, as `ondevice fleet certificates` makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ondevice.fleet.keys import fingerprints


@dataclass(frozen=True)
class Keys:
    """Private keys by device, and what a charter has of them."""

    files: dict[int, Path]
    names: tuple[str, ...]


def make_keys(folder: Path, devices: Iterable[int]) -> Keys:
    """Make a key for each device."""
    from ondevice.fleet.certificates import make

    numbers = list(devices)
    make(folder / "keys", ("localhost",), len(numbers))
    files = {
        number: folder / f"keys/devices/{place}.key" for place, number in enumerate(numbers, 1)
    }
    return Keys(files, fingerprints(folder / "keys/devices"))
