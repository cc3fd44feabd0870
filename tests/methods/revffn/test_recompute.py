"""What the last blocks keep of the forward pass: gradients have the same bits for every number of
them, nothing is stored twice, and `auto` keeps what the memory has room for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.common import peak_bytes
from benchmarks.revffn.peers import make
from ondevice.api import resolve
from ondevice.core.errors import ConfigError, DoesNotFitError, TrainingError
from ondevice.core.registry import method_config, open_session, spec_of
from ondevice.methods.revffn.memory import MEMORY
from ondevice.methods.revffn.reversible import Reversible
from ondevice.models.load import tiny_model
from ondevice.planning.devices import find_device
from ondevice.planning.estimate import plan
from ondevice.planning.fits import does_not_fit
from tests.methods.reference import batch
from tests.methods.revffn.networks import (
    Gradients,
    direction,
    network,
    random_ids,
    same_bits,
    stored,
)

LAYERS = 3
COUPLINGS: list[dict[str, Any]] = [
    {"coupling": "full"},
    {"coupling": "full", "gamma_bits": 0},
    {"coupling": "exact"},
]
FAMILIES = ["llama", "mistral", "smollm3", "qwen2", "qwen3", "phi3", "granite", "olmo2", "gemma3_text",
            "granitemoe", "qwen2_moe", "qwen3_moe"]  # fmt: skip


def with_kept(built: Reversible, ids: Tensor, kept: int) -> tuple[Tensor, Gradients]:
    """The hidden states and all gradients if so many blocks keep their graphs."""
    saved = built.forward(ids, kept=kept)
    hidden = built.hidden(saved)
    gradients: Gradients = {}
    into = direction(hidden)
    gradients["embedding"] = built.backward(saved, into, lambda _, grads: gradients.update(grads))
    return hidden, gradients


def opened(family: str = "llama", **settings: Any) -> Any:
    loaded = tiny_model(family, layers=LAYERS)
    return open_session(loaded, method_config("revffn", {"skip_stage1": True, **settings}), 3)


def trained(session: Any, rows: int = 5) -> dict[str, bytes]:
    """Two steps' losses and the state after them, as bytes."""
    losses = [session.step(*batch(rows), step, 1e-3).loss for step in range(2)]
    found = {name: value.tobytes() for name, value in session.state().items()}
    return found | {"losses": np.array(losses).tobytes()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_kept_blocks_gives_the_stored_networks_bits(family: str) -> None:
    """An odd number of odd rows."""
    sizes = {"layers": LAYERS, "heads": 2, "kv_heads": 2}
    for settings in COUPLINGS:
        built = network(family, sizes=sizes, **settings)
        ids = random_ids(built, 3, 7)
        reference, expected = stored(built, ids)
        for kept in range(LAYERS + 1):
            hidden, actual = with_kept(built, ids, kept)
            assert torch.equal(hidden, reference), kept
            assert same_bits(actual, expected), kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("coupling", ["full", "exact"])
def test_kept_blocks_have_the_bits_in_either_precision(coupling: str, dtype: str) -> None:
    built = network("qwen2_moe", sizes={"layers": LAYERS}, dtype=dtype, coupling=coupling)
    ids = random_ids(built, 2, 5)
    _, expected = with_kept(built, ids, 0)
    for kept in range(1, LAYERS + 1):
        assert same_bits(with_kept(built, ids, kept)[1], expected), kept


@pytest.mark.parametrize("settings", COUPLINGS, ids=str)
@pytest.mark.parametrize(
    "step",
    [
        {},
        {"micro_batch_size": 2},
        {"fused_update": False},
        {"max_grad_norm": 0.3, "clip": "global", "micro_batch_size": 3},
    ],
    ids=str,
)
def test_training_does_not_depend_on_what_is_kept(settings, step) -> None:
    expected = trained(opened(**settings, **step, recompute="reversible"))
    for recompute in (0, *range(1, LAYERS + 1), "stored", LAYERS + 5):
        actual = trained(opened(**settings, **step, recompute=recompute))
        assert actual == expected, recompute


def test_the_papers_network_kept_whole_has_the_stored_networks_bits() -> None:
    """Kept in part, its first blocks read inputs of an iteration, which are only near the true ones."""
    built = network("llama", sizes={"layers": LAYERS}, coupling="paper")
    ids = random_ids(built, 3, 7)
    assert same_bits(with_kept(built, ids, LAYERS)[1], stored(built, ids)[1])


def test_the_papers_kept_blocks_are_not_iterated() -> None:
    built = network("llama", sizes={"layers": LAYERS}, coupling="paper", not_converged="store")
    ids = random_ids(built)
    saved = built.forward(ids, kept=1)
    assert {step.block for step in built.steps if step.crossed} == {0, 1, 2}
    assert {built.steps[number].block for number in saved.side} == {0, 1}
    assert {built.steps[number].block for number in built.iterations} == {0, 1}


def test_a_kept_block_stores_nothing_for_its_inversion() -> None:
    for kept in range(LAYERS + 1):
        built = network("llama", sizes={"layers": LAYERS}, coupling="full")
        saved = built.forward(random_ids(built), kept=kept)
        rebuilt = LAYERS - kept
        assert set(saved.side) == set(range(1, rebuilt))
        assert set(saved.graphs) == set(range(rebuilt, LAYERS))
        assert len(saved.sums) == rebuilt
        assert (saved.middle is None) == (kept in (0, LAYERS))
        saved.leave_end()
        assert bool(saved.u.numel()) == (rebuilt > 0)


def test_a_block_is_updated_when_its_gradients_are_there_and_its_graph_is_gone() -> None:
    built = network("qwen2_moe", sizes={"layers": LAYERS}, coupling="full")
    ids = random_ids(built)
    _, expected = with_kept(built, ids, 0)
    saved = built.forward(ids, kept=2)
    into = direction(built.hidden(saved))
    actual: Gradients = {}
    graphs = []

    def update(block: int, gradients: Gradients) -> None:
        graphs.append(sorted(saved.graphs))
        actual.update({name: value.clone() for name, value in gradients.items()})
        with torch.no_grad():
            for name, parameter in built.block_parameters(block).items():
                parameter.add_(gradients[name], alpha=-0.5)

    actual["embedding"] = built.backward(saved, into, update)
    assert graphs == [[1], [], []]
    assert same_bits(actual, expected)


def test_a_rebuilt_block_before_kept_ones_is_still_compared(monkeypatch) -> None:
    built = network(sizes={"layers": LAYERS}, coupling="exact")
    branch = built.coupling.branch
    unit = 4 * 2.0 ** -(built.fraction_bits or 0)
    ids = random_ids(built)
    saved = built.forward(ids, kept=1)
    into = direction(built.hidden(saved))

    def other(step: Any, place: Any, *inputs: Tensor) -> Tensor:
        return branch(step, place, *inputs) + unit * (step.block == 1)

    monkeypatch.setattr(built.coupling, "branch", other)
    with pytest.raises(TrainingError) as refused:
        built.backward(saved, into, lambda *_: None)
    assert "layer 1: " in str(refused.value)


@pytest.mark.parametrize("coupling", ["full", "exact"])
def test_the_plan_counts_what_is_kept(coupling) -> None:
    loaded = make("tiny-moe", LAYERS)
    ids = np.random.default_rng(0).integers(0, 500, (8, 96))
    for recompute in (1, "stored"):
        chosen = {"skip_stage1": True, "coupling": coupling, "optimizer": "sgd"}
        config = method_config("revffn", {**chosen, "recompute": recompute})
        session = open_session(loaded, config, 3)
        session.step(ids, ids, 0, 1e-5)
        measured = peak_bytes(partial(session.step, ids, ids, 1, 1e-5))
        parts = MEMORY.step(loaded.dims, config, 8, 96, 4)
        planned = sum(size for part, size in parts.items() if part != "adapter")
        assert 0.75 * measured <= planned <= 1.4 * measured, (recompute, parts)


def qwen_dims() -> Any:
    with torch.device("meta"):
        return make("Qwen1.5-MoE-A2.7B", device="meta").dims


def planned_with(gib: float, **settings: Any) -> Any:
    config = method_config("revffn", {"optimizer": "adafactor", **settings})
    device = find_device("h100").within(int(gib * 2**30))
    shape = {"batch_size": 16, "length_tokens": 512, "dtype": "bfloat16", "device": device}
    return plan(qwen_dims(), config, **shape)


def test_auto_keeps_what_the_memory_has_room_for() -> None:
    kept = []
    for gib in (30, 45, 50, 60, 72):
        planned = planned_with(gib)
        chosen = planned.request.method.recompute
        part = planned.parts.get("kept of the forward pass", 0)
        assert any("method.recompute" in note for note in planned.notes)
        assert (part == 0) == (chosen == "reversible")
        assert planned.fits or chosen == "reversible"
        kept.append({"reversible": 0, "stored": 24}.get(chosen, chosen))
    assert kept[0] == 0 < kept[2] < kept[3] < kept[4]
    assert kept == sorted(kept)
    assert not planned_with(30).fits  # and the run is refused before its first step


def test_a_number_that_is_set_stays_and_is_planned() -> None:
    sizes = {}
    for recompute in ("reversible", 1, 3, "stored", 99):
        planned = planned_with(200, recompute=recompute)
        assert planned.request.method.recompute == recompute
        sizes[recompute] = planned.parts.get("kept of the forward pass", 0)
        sizes[recompute, "host"] = sum(planned.host_parts.values())
    assert sizes["reversible"] == 0 < sizes[1] and sizes[3] == 3 * sizes[1]
    assert sizes["stored"] == sizes[99] == 24 * sizes[1]
    bits = 16 * 512 * 2048 * 4 // 8
    hosts = [sizes[recompute, "host"] for recompute in ("reversible", 1, 3, "stored")]
    assert hosts == [23 * bits, 22 * bits, 20 * bits, 0]


def test_auto_is_reversible_on_a_cpu_and_without_a_plan() -> None:
    dims = tiny_model("llama").dims
    config = method_config("revffn", {})
    planned = plan(dims, config, batch_size=1, length_tokens=64)
    assert planned.request.method.recompute == "reversible"
    assert opened().passes.kept == 0


def test_a_plan_that_does_not_fit_offers_to_keep_nothing() -> None:
    error = does_not_fit(planned_with(48, recompute="stored"))
    assert "method.recompute: reversible" in str(error.hint)


@contextmanager
def _no_memory(*_: object) -> Iterator[None]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has")
    yield


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ("stored", "method.recompute: 1 (3 of 3 blocks are kept)"),
        (1, "method.recompute: reversible (1 of 3 blocks are kept)"),
        ("reversible", ""),
    ],
)
def test_memory_that_runs_out_in_a_step_names_what_to_keep(recompute, words, monkeypatch) -> None:
    session = opened(recompute=recompute)
    monkeypatch.setattr(session.passes, "run", lambda *_, **__: _no_memory().__enter__())
    with pytest.raises(DoesNotFitError) as error:
        session.step(*batch(2), 0, 1e-3)
    hint = str(error.value.hint)
    assert words in hint and "method.micro_batch_size: 1" in hint
    assert ("method.recompute" in hint) == bool(words)


def test_a_network_that_cannot_be_inverted_is_stored_whole() -> None:
    apart = {"coupling": "full", "streams": "float32"}
    for recompute in ("auto", "reversible", 1):
        with pytest.raises(ConfigError) as refused:
            method_config("revffn", {**apart, "recompute": recompute})
        assert "recompute: stored" in str(refused.value)
    assert trained(opened(**apart, recompute="stored"))


@pytest.mark.parametrize("method", ["revffn", "mesp"])
def test_a_method_that_does_not_offload_is_not_measured(method, monkeypatch) -> None:
    """Its `auto` is decided from the memory only."""
    decided = SimpleNamespace(request=SimpleNamespace(method="decided"))
    monkeypatch.setattr(resolve, "plan_run", lambda *_: decided)
    placement = SimpleNamespace(spec=spec_of(method_config(method, {})), device="cuda", world=1)
    config = SimpleNamespace(method=method_config(method, {}))
    assert resolve._plan(config, placement, None, None) is decided  # type: ignore[arg-type]
