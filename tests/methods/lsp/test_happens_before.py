"""Each access to the engine's memory happens after those that conflict with it; see `tests.offload.happens_before`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.methods.lsp import window as lsp_window  # noqa: E402
from ondevice.methods.lsp.config import LspConfig  # noqa: E402
from ondevice.methods.lsp.engine import LspEngine  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload import disk_states, presumed, store, updater  # noqa: E402
from ondevice.offload import engine as offload_engine  # noqa: E402
from ondevice.offload.units import SINGLE  # noqa: E402
from tests.methods.slideformer.reference import batches, run  # noqa: E402
from tests.offload.happens_before import CheckedRanks, checking, leave_out_hold, names  # noqa: E402

PROJECTORS: dict[str, Any] = {
    "subspace": 24,
    "nonzeros": 4,
    "check_every": 2,
    "threshold": 0.0,
    "learn_steps": 2,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"gradient_buffers": 2, "compute": "float32", "optimizer": "torch"},
    {"optimizer": "torch"},
    {"schedule": "zero"},
    {"weight_placement": "host", "window": 2},
    {"weight_dtype": "float32", "activations": "host", "micro_batch_size": 1},
    {"project": False},
    {"max_grad_norm": 0.1, "clip": "global"},
]


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_touches_memory_too_early(
    config: dict[str, Any], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert races(config, tied, False, monkeypatch) == []


@pytest.mark.parametrize(
    "config", [{"learned": True, "max_grad_norm": 0.1}, {"project": False}], ids=str
)
def test_ranks_do_one_thing_after_the_other(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert races({"micro_batch_size": 1, **config}, False, True, monkeypatch) == []


@pytest.mark.parametrize(
    ("module", "function", "config"),
    [
        ("transfers", "load", {"activations": "host", "micro_batch_size": 1}),
        ("bases", "fetch", {"weight_placement": "host", "window": 2}),
        ("bases", "source", {"weight_placement": "host", "window": 2}),
    ],
)
def test_a_lane_that_does_not_wait_is_noticed(
    module: str, function: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these is needed: without it, and only then, something touches memory too early.

    What leaves begins when it is computed, so `to_host` would not have to wait here; SlideFormer's has to.
    """
    leave_out_hold(monkeypatch, module, function)
    assert races(config, False, False, monkeypatch)


def races(
    config: dict[str, Any], tied: bool, ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the races of steps with and without a check of the bias, an evaluation, what a loaded
    checkpoint sends, and another step."""
    with checking(monkeypatch, lsp_window, updater, presumed, store, disk_states) as (
        checker,
        device,
    ):
        monkeypatch.setattr(offload_engine, "open_device", lambda name: device)
        model = tiny_model("llama", layers=4, tied=tied).family
        settings = LspConfig(**{"timeout_s": 20.0, "threads": 1, **PROJECTORS, **config})
        with checker.quiet():
            engine = LspEngine(
                model, settings, "cpu", ranks=CheckedRanks(checker) if ranked else SINGLE
            )
        names(checker, engine, "engine")
        try:
            data = batches(3, rows=2 + 2 * ranked, length=6)
            run(engine, data)
            engine.evaluate(*data[0])
            engine.window.forget_wires()
            run(engine, data[:1])
        finally:
            engine.close()
    assert checker.accesses > 2000
    return list(checker.races)
