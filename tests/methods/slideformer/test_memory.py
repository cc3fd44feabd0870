"""Host memory of the engine: what it says is what is there, and it is 12 bytes a parameter and a constant."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.offload.device import BLOCK_BYTES  # noqa: E402
from tests.methods.slideformer.reference import batches, run  # noqa: E402


@contextmanager
def only_new() -> Iterator[None]:
    """Hide from `live` what was there before: torch and transformers have a million objects to look through."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live() -> dict[int, Any]:
    """Every tensor memory that Python can see and that is not hidden, by address."""
    gc.collect()
    return storages(
        thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)
    )


def storages(tensors: Iterable[Any]) -> dict[int, Any]:
    """The memory of tensors by address. As long as it is held, no other takes its address."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage()
        for t in tensors
        if t.device.type == "cpu"
    }


CASES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"compute": "float32"}, False),
    ({"optimizer": "torch"}, True),
    ({"disk_fraction": 1.0}, False),
    ({"activations": "disk"}, False),
]


@pytest.mark.parametrize(("config", "tied"), CASES, ids=str)
def test_host_memory_is_12_bytes_a_parameter(
    config: dict[str, Any], tied: bool, engine: Any
) -> None:
    """And a constant: gradient buffers of 4 layers, one of the rest and one of each table, in the compute dtype; two of
    the largest unit to convert, and its gradient in float32, where there is no fused update. What the engine says is
    what is there."""
    with only_new():
        opened = engine(config, layers=8, intermediate=256, tied=tied)
        run(opened, batches(2))
        there = live()
    units, item = opened.units, opened.store.dtype.itemsize
    largest = max(unit.numel for unit in units.all)
    buffers = 4 * max(unit.numel for unit in units.layers) + units.rest.numel + units.head.numel
    buffers = item * (buffers + (0 if tied else units.embedding.numel))
    buffers += 2 * item * largest if opened.store.converted else 0
    buffers += 0 if opened.store.native else 4 * largest
    staged = 3 * 8 * (largest + 2 * BLOCK_BYTES) if opened.disk and opened.disk.states else 0
    steps = opened.activations.bytes + opened.window.bytes
    per_parameter = 4 if opened.disk and opened.disk.states else 12
    limit = per_parameter * units.parameters + buffers + staged + steps
    assert opened.host_bytes <= limit + 12 * 128 * sum(len(unit.pieces) for unit in units.all)
    assert opened.host_bytes >= 0.9 * limit
    window = opened.window
    slots = [*window.layers, *window.gradients, *window.head, *window.head_gradient, window.rest]
    slots += [window.rest_gradient, window.entering]
    device = sum(slot.memory.numel() * item for slot in slots)
    device += sum(memory.numel() * item for memory, _ in opened.activations.ring)
    total = sum(memory.nbytes() for memory in there.values())
    assert total - device == pytest.approx(opened.host_bytes, rel=0.03)


def test_the_first_step_makes_all_memory_that_is_locked(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones of its size have other tokens, and more or fewer of them, but unlock nothing: CUDA would wait for the
    accelerator, and a rank that is gone may hold that for ever."""
    opened, made = engine({}, tied=False), list[int]()
    pinned = opened.device.pinned

    def counted(numel: int, dtype: Any) -> Any:
        made.append(numel)
        return pinned(numel, dtype)

    monkeypatch.setattr(opened.device, "pinned", counted)
    few = np.full((5, 9), 7)
    run(opened, [(few, few)])
    first = len(made)
    run(opened, [*batches(3), *batches(1, rows=3)])
    assert first and len(made) == first
    run(opened, batches(1, rows=7))
    assert len(made) > first
