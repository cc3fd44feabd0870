"""A resume of the engine: the same bits in the steps after, and errors that name what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.core.errors import CheckpointError  # noqa: E402
from ondevice.methods.lsp import torch as saved  # noqa: E402
from ondevice.methods.lsp.config import LspConfig  # noqa: E402
from ondevice.methods.lsp.engine import LspEngine  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.models.save import as_numpy  # noqa: E402
from tests.methods.slideformer.reference import batches  # noqa: E402

SMALL = {
    "learned": True,
    "subspace": 24,
    "nonzeros": 4,
    "check_every": 3,
    "learn_rounds": 1,
    "learn_steps": 2,
}
BEFORE, AFTER = 5, 6
"""Steps before the state is taken, of which two look, and after, of which two look again."""
DATA = batches(BEFORE + AFTER, rows=3)
CASES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({}, False),
    ({"compute": "float32"}, True),
    ({"compute": "float32", "optimizer": "torch", "weight_decay": 0.1}, False),
    ({"weight_dtype": "float32"}, True),
    ({"weight_placement": "host"}, False),
    ({"weight_placement": "host", "compute": "float32"}, True),
    ({"weight_dtype": "nf4"}, True),
    ({"weight_dtype": "nf4", "compute": "float32", "weight_decay": 0.1}, False),
    ({"weight_dtype": "int8"}, False),
    ({"project": False}, True),
    ({"project": False, "compute": "float32"}, False),
    ({"max_grad_norm": 0.5, "schedule": "zero"}, True),
    ({"learned": False, "micro_batch_size": 2}, True),
    ({"moments": "bfloat16", "weight_decay": 0.1}, True),
    ({"learned": False, "projector_values": "followed", "compute": "float32"}, False),
    ({"gradient_dtype": "int4", "micro_batch_size": 2}, True),
    ({"disk_fraction": 1.0, "disk_masters": True}, False),
]


@pytest.fixture
def opened() -> Iterator[Callable[..., LspEngine]]:
    collected = []

    def make(config: dict[str, Any], tied: bool = True) -> LspEngine:
        if config.get("weight_dtype") in ("nf4", "int8"):
            pytest.importorskip("bitsandbytes")
        settings = {**SMALL, "threshold": 0.0, "timeout_s": 120.0, "threads": 1, **config}
        collected.append(
            LspEngine(tiny_model(tied=tied).family, LspConfig(**settings), "cpu", seed=3)
        )
        return collected[-1]

    yield make
    for engine in collected:
        engine.close()


def run(engine: LspEngine, first: int, count: int) -> list[float]:
    losses = [engine.step(*DATA[step], step, 0.01) for step in range(first, first + count)]
    engine.flush()
    return losses


def state(engine: LspEngine) -> dict[str, np.ndarray]:
    return {name: as_numpy(tensor).copy() for name, tensor in saved.state_arrays(engine).items()}


@pytest.mark.sampled
@pytest.mark.parametrize(("config", "tied"), CASES, ids=str)
def test_a_resume_across_a_refresh_has_the_same_bits(config, tied, opened) -> None:
    straight, resumed = opened(config, tied), opened(config, tied)
    run(straight, 0, BEFORE)
    kept = state(straight)
    losses = run(straight, BEFORE, AFTER)
    assert kept.keys() == {
        name for name in kept if not np.shares_memory(kept[name], kept[name].copy())
    }
    saved.load_arrays(resumed, kept)
    assert run(resumed, BEFORE, AFTER) == losses
    ours, theirs = state(straight), state(resumed)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    for name, value in straight.weights().items():
        assert torch.equal(value, resumed.weights()[name]), name
    projected = config.get("project", True)
    assert (
        any(name.startswith("turn/") and value[0] > 2 for name, value in ours.items()) == projected
    )
    layers = [name for name in ours if name.startswith("base/layer")]
    assert bool(layers) == (projected and config.get("weight_dtype") not in ("nf4", "int8"))
    assert any(name.startswith("older/1/") for name in ours) == (
        config.get("weight_dtype") in ("nf4", "int8")
    )


def test_a_saved_state_does_not_change_with_the_next_step(opened) -> None:
    engine = opened({})
    run(engine, 0, BEFORE)
    taken = {name: as_numpy(tensor) for name, tensor in saved.state_arrays(engine).items()}
    before = {name: value.tobytes() for name, value in taken.items()}
    run(engine, BEFORE, 3)
    assert {name: value.tobytes() for name, value in taken.items()} == before


@pytest.mark.parametrize("weights", ["compute", "nf4"])
def test_every_array_of_a_checkpoint_is_required_and_checked(weights, opened) -> None:
    engine = opened({"weight_dtype": weights})
    run(engine, 0, BEFORE)
    kept, fresh = state(engine), opened({"weight_dtype": weights})
    for name in kept:
        with pytest.raises(CheckpointError) as caught:
            saved.load_arrays(
                fresh, {other: value for other, value in kept.items() if other != name}
            )
        assert name.partition("@")[0] in caught.value.message
        for foreign in (kept[name].reshape(-1)[:-1], kept[name].astype(np.int8)):
            with pytest.raises(CheckpointError) as caught:
                saved.load_arrays(fresh, {**kept, name: foreign})
            assert name in caught.value.message
            assert str(foreign.dtype) in str(caught.value.received)
    saved.load_arrays(fresh, kept)


def test_a_checkpoint_from_before_the_weights_changed_is_refused(opened) -> None:
    engine = opened({})
    run(engine, 0, 2)
    early = state(engine)
    run(engine, 2, 3)
    with pytest.raises(CheckpointError):
        saved.load_arrays(engine, early)


def test_a_checkpoint_of_an_older_version_is_refused_by_name(opened) -> None:
    engine = opened({})
    old = {"change/layer.0": np.zeros(4, dtype=np.float32), **state(engine)}
    with pytest.raises(CheckpointError) as caught:
        saved.load_arrays(engine, old)
    assert "older version of lsp" in caught.value.message
    assert "model/" in str(caught.value.hint)
