"""Curves of fleets: accuracy or loss by round and by bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ondevice.core.errors import FleetError, MissingPackageError
from ondevice.fleet.averaging.store import FILE_NAME as ADAPTERS
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.store import Store


def curve_of(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a simulated fleet: `round`, `bytes` to and from a device, `loss`,
    `accuracy`.

    Raises:
        FleetError: the folder has no fleet, or one that was not evaluated.
    """
    store = AdapterStore.open(folder) if (folder / ADAPTERS).is_file() else Store.open(folder)
    with store:
        points = json.loads(store.fact("curve") or "[]")
    if not points:
        raise FleetError(
            f"{folder} has no evaluations", expected="a fleet of `ondevice fleet simulate`"
        )
    return points


def plot(folders: Sequence[Path], out: Path) -> None:
    """Draw accuracy, or loss if a fleet has none, by round and by bytes; `out`'s suffix is the
    format.

    Raises:
        FleetError: as `curve_of`.
        MissingPackageError: matplotlib is not installed.
    """
    curves = {folder.name: curve_of(folder) for folder in folders}
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingPackageError(
            "plots need the package matplotlib", hint="pip install matplotlib"
        ) from None
    known = all(point["accuracy"] is not None for points in curves.values() for point in points)
    value = "accuracy" if known else "loss"
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axes, key, label in (
        (both[0], "round", "round"),
        (both[1], "bytes", "bytes to and from a device"),
    ):
        for name, points in curves.items():
            axes.plot(
                [point[key] for point in points],
                [point[value] for point in points],
                marker="o",
                label=name,
            )
        axes.set_xlabel(label)
    # Kinds of fleets differ by powers of ten in what they send; a linear range near zero keeps the
    # first point.
    both[1].set_xscale("symlog", linthresh=100)
    both[0].set_ylabel(value)
    both[0].legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    pyplot.close(figure)
