"""What stops the engine: a thread that dies or hangs, an interrupted step, a batch without labels."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.core.errors import DataError, TrainingError
from ondevice.methods.lsp.engine import LspEngine
from ondevice.models.load import tiny_model
from ondevice.offload import updater
from tests.methods.lsp.test_engine import RATE, settings
from tests.methods.slideformer.reference import batches


def test_a_thread_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LspEngine(tiny_model("llama", layers=3).family, settings(), "cpu")
    data = batches(3)
    engine.step(*data[0], 0, RATE)
    engine.flush()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(updater, "layer_adam", fail)
    monkeypatch.setattr(updater, "torch_adam", fail)
    with pytest.raises(TrainingError) as caught:
        for step in (1, 2):
            engine.step(*data[step], step, RATE)
    assert caught.value.message.startswith("update of ")
    assert "no such memory" in str(caught.value.__cause__)
    engine.close()


def test_a_thread_that_hangs_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LspEngine(tiny_model("llama", layers=2).family, settings(timeout_s=1.0), "cpu")
    monkeypatch.setattr(updater, "layer_adam", lambda *_, **__: time.sleep(4))
    monkeypatch.setattr(updater, "torch_adam", lambda *_, **__: time.sleep(4))
    began = time.monotonic()
    with pytest.raises(TrainingError):
        for step, batch in enumerate(batches(2)):
            engine.step(*batch, step, RATE)
    assert time.monotonic() - began < 60
    engine.close()


@pytest.mark.parametrize("schedule", ["zero", "layerwise"])
def test_no_step_follows_a_half_finished_one(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LspEngine(
        tiny_model("llama", layers=3).family, settings(schedule=schedule, timeout_s=20.0), "cpu"
    )
    backward = engine.passes.backward

    def interrupted(*rest: Any) -> None:
        backward(*rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.passes, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step(*batches(1)[0], 0, RATE)
    monkeypatch.setattr(engine.passes, "backward", backward)
    with pytest.raises(
        TrainingError, check=lambda error: isinstance(error.__cause__, KeyboardInterrupt)
    ):
        engine.step(*batches(1)[0], 0, RATE)
    engine.close()


def test_a_batch_without_labels_is_refused() -> None:
    engine = LspEngine(tiny_model("llama", layers=1).family, settings(), "cpu")
    ids = np.ones((2, 5), dtype=np.int64)
    with pytest.raises(DataError):
        engine.step(ids, np.full_like(ids, -100), 0, RATE)
    engine.close()
