"""Exported programs that several tests look at: each is lowered once a run, by the worker that
first asks for it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import export as artifacts
from ondevice.api.runfile import RunConfig
from ondevice.exporters.android_npu import qnn
from ondevice.exporters.base import ExportReport
from ondevice.models.tiny import save_tiny
from tests.program_tables import ALL, BLOCKS, METHOD, MODELS, NIGHTLY, NPU, NPU_BLOCKS, SEED
from tests.shared import cached


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test of the program of that name."""
    return [pytest.mark.nightly] if name in NIGHTLY else []


def parameters(names: Iterable[str]) -> list[Any]:
    """Return names of programs as parameters of a test, those of `NIGHTLY` marked."""
    return [pytest.param(name, marks=marks(name)) for name in names]


def needs_qnn() -> None:
    """Skip a test by name if QNN's simulator cannot run, or fail if `ONDEVICE_REQUIRE_QNN` is
    set."""
    if reason := qnn.problem():
        (pytest.fail if os.environ.get("ONDEVICE_REQUIRE_QNN") else pytest.skip)(reason)


@functools.cache
def model(name: str) -> Path:
    """A tiny model as a folder. Programs name it as their source, so it stays where it is for later
    runs."""

    def save(place: Path) -> Path:
        sizes = dict(MODELS[name])
        return save_tiny(place / "modèles et données" / name, sizes.pop("family"), **sizes)

    return cached(name, json.dumps(["model", MODELS[name]], sort_keys=True), save)


@functools.cache
def subspace(source: str) -> Path:
    """The subspace of a gradient of the model of that name, as a run writes it; for rank 4."""
    from ondevice.data.batching import Batch
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.torch import PrgeSession
    from ondevice.models import load_model
    from tests.methods.reference import batch

    def save(place: Path) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        settings = PrgeConfig(subspace="gradient", rank=4, calibration_rows=4)
        session = PrgeSession(load_model(str(model(source))), settings, SEED)
        path = session.before_step(0, lambda step: Batch(*batch(4, seed=step)), place)
        assert path is not None
        return path

    return cached("subspace", json.dumps(["subspace", MODELS[source]], sort_keys=True), save)


def config(name: str, **more: Any) -> RunConfig:
    """The run file of one of `PROGRAMS`."""
    source, values = ALL[name]
    values = {
        key: str(subspace(source)) if value == "@subspace" else value
        for key, value in values.items()
    }
    if name in NPU or name in NPU_BLOCKS:
        values = {"export.target": "android-npu", **values}
    if name in BLOCKS or name in NPU_BLOCKS:
        method = {
            "method.name": "mesp",
            "method.rank": 4,
            "method.loss_tiles": 2,
            "method.learning_rate": 1e-2,
        }
        base = {
            "model.source": str(model(source)),
            "train.seed": SEED,
            "export.lengths_tokens": [16],
        }
        return RunConfig.load(None, {**base, **method, **values, **more})
    base = {"model.source": str(model(source)), "train.seed": SEED, "export.lengths_tokens": [16]}
    return RunConfig.load(None, {**base, **METHOD, **values, **more})


@functools.cache
def report(name: str) -> ExportReport:
    """The report of the export of one of `PROGRAMS`; the artifact is in its `path`."""
    source, values = ALL[name]
    settings = json.dumps(
        [name, SEED, MODELS[source], METHOD, values], sort_keys=True, default=lambda null: "null"
    )

    def export(place: Path) -> ExportReport:
        # A name that is hard on code that builds command lines and URLs.
        return artifacts.export(config(name), place / "modèles et données" / "program")

    return cached(name, settings, export)


def program(name: str) -> Path:
    """The artifact of one of `PROGRAMS`. Do not change it: copy it."""
    return report(name).path
