"""The events between computation, copies and updates: the bits are the same when every copy runs as late as it may."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.offload import engine as offload_engine  # noqa: E402
from tests.methods.slideformer.reference import batches, differing, outcome, run  # noqa: E402
from tests.offload.faults import LateDevice, NumberedDevice  # noqa: E402

CONFIGS: list[dict[str, Any]] = [
    {},
    {"window": 2, "gradient_buffers": 2, "micro_batch_size": 2},
    {"optimizer": "torch", "window": 2},
    {"compute": "float32", "loss_tiles": 3},
    {"loss_tiles": 4, "micro_batch_size": 1},
    {"activations": "disk", "micro_batch_size": 2, "disk_fraction": 0.5},
    {"activations": "device"},
    {"max_grad_norm": 0.1, "clip": "previous"},
    {"max_grad_norm": 0.1, "clip": "global", "loss_tiles": 2},
]


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gpt2", False)])
def test_late_copies_give_the_same_bits(
    config: dict[str, Any], family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, data = {"layers": 6, "tied": tied}, batches(3, rows=3)
    losses, masters = outcome(config, family, sizes, data)
    device = LateDevice()
    monkeypatch.setattr(offload_engine, "open_device", lambda name: device)
    again = outcome(config, family, sizes, data)
    assert device.late > 3 * 2 * sizes["layers"]
    assert again[0] == losses
    assert differing(again[1], masters) == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_norm_leaves_after_it_is_computed(
    tied: bool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane that copies a squared norm waits for a point behind its computation."""
    device, computed = NumberedDevice(), []
    norm = torch.linalg.vector_norm

    def counted(gradient: Any, **options: Any) -> Any:
        if gradient.dim() == 1:  # of a whole unit, on the accelerator
            computed.append(device.number())
        return norm(gradient, **options)

    monkeypatch.setattr(offload_engine, "open_device", lambda name: device)
    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    opened = engine({"max_grad_norm": 0.1, "clip": "layer"}, layers=3, tied=tied)
    run(opened, batches(1))
    norms = opened.window.norms.untyped_storage().data_ptr()
    waited = [held for held, _, target in device.copies if target == norms]
    assert len(waited) == len(computed) == 4 + (not tied)
    assert all(held > number for held, number in zip(waited, computed, strict=True))
