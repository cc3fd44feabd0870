"""Layers that stay on the accelerator: the same bits as on the host, resume, clipping, and what excludes them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.runtime_ops.layer_adam import KINDS  # noqa: E402
from tests.methods.slideformer.reference import batches, differing, open_engine, outcome, run  # noqa: E402

SIZES = {"layers": 5, "intermediate": 77}
TORCH = {"optimizer": "torch", "weight_decay": 0.1}


EVERYTHING = {"resident_layers": 5, "resident_tables": True, "window": 5, "gradient_buffers": 5}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
@pytest.mark.parametrize("kind", ["torch", *KINDS])
def test_the_bits_are_those_of_units_on_the_host(
    family: str, tied: bool, compute: str, kind: str
) -> None:
    optimizer = {"optimizer": "torch"} if kind == "torch" else {"moments": kind}
    config = {**optimizer, "weight_decay": 0.1, "compute": compute, "micro_batch_size": 2}
    sizes, data = {**SIZES, "tied": tied}, batches(4)
    on_host = outcome(config, family, sizes, data)
    for choice in ({"resident_layers": 2}, {"resident_tables": True}, EVERYTHING):
        here = outcome({**config, **choice}, family, sizes, data)
        assert here[0] == on_host[0] and differing(here[1], on_host[1]) == []


@pytest.mark.parametrize(("tied", "tiles"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("clip", ["previous", "layer"])
def test_clipping_is_the_same(clip: str, tied: bool, tiles: int) -> None:
    config = {
        "weight_decay": 0.1,
        "eps": 1e-4,
        "max_grad_norm": 0.1,
        "clip": clip,
        "loss_tiles": tiles,
    }
    sizes, data = {**SIZES, "tied": tied}, batches(4)
    on_host, free = outcome(config, "llama", sizes, data), outcome({}, "llama", sizes, data)
    for choice in ({"resident_layers": 3}, {"resident_tables": True}, EVERYTHING):
        here = outcome({**config, **choice}, "llama", sizes, data)
        assert here[0] == on_host[0] and differing(here[1], on_host[1]) == []
        assert differing(here[1], free[1])


@pytest.mark.parametrize(
    "config",
    [
        {"resident_tables": True, "max_grad_norm": 0.1},
        TORCH,
        {"max_grad_norm": 0.1},
        {"moments": "int8"},
    ],
)
def test_a_state_goes_through_arrays(config: dict[str, Any], request: Any) -> None:
    """Three steps, the state into another engine, three steps: the bits of six steps."""
    config, data = {"resident_layers": 2, **config}, batches(6)
    straight, first, second = (open_engine(config, **SIZES) for _ in range(3))
    for engine in (straight, first, second):
        request.addfinalizer(engine.close)
    expected = run(straight, data)
    losses = run(first, data[:3])
    arrays = first.store.arrays() | first.updater.clipping.norms()
    held = {
        name: (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()
        for name, t in arrays.items()
    }
    second.store.load(held)
    second.updater.clipping.restore(held)
    losses += [
        second.step(*batch, step, 1e-2 / (1 + step / 10))
        for step, batch in enumerate(data)
        if step >= 3
    ]
    second.flush()
    assert losses == expected
    assert differing(second.store.masters(), straight.store.masters()) == []
    weights = second.store.weights(second.store.flats())
    for name, master in second.store.masters().items():
        bits = master.view(torch.int32)
        # Codes have no sign that could say which way a tie went.
        away = ((bits + 0x8000) & -0x10000).view(torch.float32).bfloat16()
        nearest = away if config.get("moments") == "int8" else master.bfloat16()
        assert torch.equal(weights[name], nearest if second.store.split else master)


def test_less_host_memory_is_taken(request: Any) -> None:
    host = []
    for count in (0, 3):
        config = {
            "resident_layers": count,
            "resident_tables": False,
            "activations": "device",
            "gradient_buffers": 2,
        }
        engine = open_engine(config, **SIZES)
        request.addfinalizer(engine.close)
        host.append(engine.host_bytes)
    layers = sum(unit.numel for unit in engine.units.layers[:3])
    assert host[0] - host[1] == pytest.approx(12 * layers, rel=0.05)


def test_global_clipping_excludes_resident_units() -> None:
    for choice in ({"resident_layers": 1}, {"resident_tables": True}):
        with pytest.raises(ConfigError, check=lambda error: "clip: previous" in error.expected):
            open_engine({**choice, "max_grad_norm": 1.0, "clip": "global"}, **SIZES)
