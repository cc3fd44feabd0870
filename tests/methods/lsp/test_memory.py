"""Planned bytes against those of an engine that has trained: on the host, and of what stays on the accelerator."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.methods.lsp.config import LspConfig  # noqa: E402
from ondevice.methods.lsp.engine import LspEngine  # noqa: E402
from ondevice.methods.lsp.memory import host_memory, memory  # noqa: E402
from ondevice.methods.lsp.sizes import bus_bytes, exact, narrow  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from tests.methods.slideformer.reference import batches, run  # noqa: E402
from tests.methods.slideformer.test_memory import live, only_new, storages  # noqa: E402

ROWS, LENGTH = 4, 16
SMALL = {"subspace": 48, "nonzeros": 4, "threshold": 10.0, "threads": 1, "timeout_s": 120.0}
SIZES = {"layers": 6, "hidden": 128, "intermediate": 384, "vocab": 512}
STEP = ("bias check", "kept inputs", "activations", "logits", "gradients of experts")
"""Parts that are there during a step alone."""
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"compute": "float32"}, {"tied": False}),
    ({"weight_dtype": "float32"}, {}),
    ({"weight_placement": "host"}, {"tied": False}),
    ({"weight_dtype": "int8"}, {}),
    ({"weight_dtype": "nf4"}, {"tied": False}),
    ({"activations": "host"}, {"family": "gpt2"}),
    ({"schedule": "zero"}, {"family": "qwen2"}),
    ({"subspace": 200}, {"tied": False}),
    ({"project": False}, {}),
    ({"project": False, "schedule": "zero"}, {"tied": False}),
    ({"moments": "bfloat16"}, {}),
    ({"loss_tiles": 5}, {"tied": False}),
    ({"project_tables": False}, {}),
    ({"project_tables": False, "projector_values": "signs"}, {"tied": False}),
    ({"projector_values": "followed"}, {"tied": False}),
    ({"projector_values": "followed", "compute": "float32"}, {"family": "qwen3_moe"}),
    ({"gradient_dtype": "int4"}, {"tied": False}),
    ({"gradient_dtype": "int4", "project_tables": False, "compute": "float32"}, {"tied": False}),
    ({}, {"family": "granitemoe"}),
    ({}, {"family": "lfm2"}),
    ({}, {"family": "lfm2_moe"}),
    ({}, {"family": "qwen2_moe"}),
    ({"compute": "float32"}, {"family": "qwen3_moe", "tied": False}),
]


@pytest.mark.parametrize(("config", "sizes"), CASES, ids=str)
def test_planned_bytes_are_those_of_the_engine(
    config: dict[str, Any], sizes: dict[str, Any]
) -> None:
    if config.get("weight_dtype") in ("nf4", "int8"):
        pytest.importorskip("bitsandbytes")
    loaded = tiny_model(**{**SIZES, **sizes})
    settings = LspConfig(**{**SMALL, **config})
    model = storages((*loaded.model.parameters(), *loaded.model.buffers()))
    with only_new():
        engine = LspEngine(loaded.family, settings, "cpu", 1)
        try:
            run(engine, batches(2, ROWS, LENGTH))
            if not engine.store.native and settings.compute == "bfloat16":
                pytest.skip("without the fused update there are buffers for conversion")
            host = host_memory(loaded.dims, settings, ROWS, LENGTH)
            assert sum(host.values()) == pytest.approx(engine.host_bytes, rel=0.1), host
            planned = memory(loaded.dims, settings, ROWS, LENGTH)
            stays = sum(size for part, size in planned.items() if part not in STEP)
            total = sum(
                storage.nbytes() for address, storage in live().items() if address not in model
            )
            inputs = [
                *engine.activations.kept.values(),
                *(memory for memory, _ in engine.activations.ring),
            ]
            assert total - engine.host_bytes - sum(one.nbytes for one in inputs) == pytest.approx(
                stays, rel=0.1
            ), planned
            assert narrow(loaded.dims, settings) == sum(
                own.numel for part in engine.parts for _, _, own in part.matrices
            )
            whole = sum(piece.numel for part in engine.parts for piece in part.exact)
            assert exact(loaded.dims, settings) == whole
            engine.timeline.drain()
            engine.began = None
            for step in (2, 3):  # the second one takes the spans of the first
                engine.step(*batches(1, ROWS, LENGTH)[0], step, 0.0)
                engine.flush()
            moved = bus_bytes(
                loaded.dims, settings, ROWS, LENGTH, 2 if settings.compute == "bfloat16" else 4
            )
            assert engine.overlap is not None
            assert (engine.overlap.d2h_bytes, engine.overlap.h2d_bytes) == pytest.approx(
                moved, rel=0.05
            )
        finally:
            engine.close()
