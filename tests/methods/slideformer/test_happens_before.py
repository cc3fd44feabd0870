"""Every access to the engine's memory happens after those that conflict with it; see `tests.offload.happens_before`."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.methods.slideformer.config import SlideformerConfig  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload import disk, disk_states, presumed, store, updater  # noqa: E402
from ondevice.offload import engine as offload_engine  # noqa: E402
from ondevice.offload.engine import OffloadEngine  # noqa: E402
from ondevice.offload.units import SINGLE  # noqa: E402
from tests.methods.slideformer.reference import batches, run  # noqa: E402
from tests.offload import mutations  # noqa: E402
from tests.offload.happens_before import CheckedRanks, checking, leave_out_hold, names  # noqa: E402

CONFIGS: list[dict[str, Any]] = [
    {},
    {"window": 2, "gradient_buffers": 2, "micro_batch_size": 2},
    {"optimizer": "torch", "window": 2},
    {"compute": "float32", "loss_tiles": 3},
    {"loss_tiles": 4, "micro_batch_size": 1, "window": 2},
    {"activations": "disk", "micro_batch_size": 2, "disk_fraction": 0.5},
    {"activations": "device", "disk_fraction": 1.0, "moments": "int8"},
    {"max_grad_norm": 0.1, "clip": "previous", "resident_layers": 2},
    {"max_grad_norm": 0.1, "clip": "global", "loss_tiles": 2},
    {"max_grad_norm": 1e6, "clip": "global", "presumed_layers": 3},
    {"max_grad_norm": 1e6, "clip": "global", "presumed_layers": 5, "optimizer": "torch"},
    {"resident_layers": 2, "resident_tables": True, "micro_batch_size": 1},
    {"resident_layers": 5, "resident_tables": True, "optimizer": "torch"},
    {"resident_tables": True, "max_grad_norm": 0.1, "loss_tiles": 3},
    {"disk_fraction": 1.0, "disk_masters": True, "window": 2},
    {"disk_fraction": 0.5, "disk_masters": True, "optimizer": "torch", "resident_layers": 1},
    {"experts": "used", "window": 2},
]
MIXTURE = {"num_experts": 16, "num_experts_per_tok": 1}


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_touches_memory_too_early(
    config: dict[str, Any], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert races(config, tied, False, monkeypatch) == []


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "config",
    [
        {"window": 2},
        {"max_grad_norm": 0.1, "clip": "layer", "loss_tiles": 2},
        {"max_grad_norm": 0.1, "resident_layers": 2, "disk_fraction": 0.5, "optimizer": "torch"},
        {
            "resident_layers": 1,
            "disk_fraction": 1.0,
            "disk_masters": True,
            "window": 2,
            "micro_batch_size": 1,
        },
        {"max_grad_norm": 0.1, "clip": "global", "optimizer": "torch"},
        {"max_grad_norm": 0.1, "resident_layers": 1, "resident_tables": True, "loss_tiles": 2},
        {"resident_layers": 5, "resident_tables": True, "micro_batch_size": 1},
    ],
    ids=str,
)
def test_ranks_do_one_thing_after_the_other(
    config: dict[str, Any], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathers and sums have a lane of their own, beside both copies, and share one communicator."""
    assert races(config, tied, True, monkeypatch) == []


@pytest.mark.parametrize(
    ("module", "function", "config", "ranked"),
    [
        ("transfers", "to_device", {}, False),
        ("transfers", "to_host", {}, False),
        ("transfers", "all_reduce", {"max_grad_norm": 0.1, "clip": "layer", "loss_tiles": 2}, True),
        ("transfers", "together", {"window": 2}, True),
        ("transfers", "to_device", {"window": 2}, True),
        ("transfers", "to_host", {"window": 2}, True),
        ("window", "arrive", {"resident_layers": 5}, True),
        ("window", "arrive", {}, False),
        ("transfers", "save", {}, False),
        ("transfers", "prefetch", {}, False),
        ("transfers", "load", {}, False),
    ],
)
def test_a_lane_that_does_not_wait_is_noticed(
    module: str,
    function: str,
    config: dict[str, Any],
    ranked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of these is needed: without it, and only then, something touches memory too early."""
    leave_out_hold(monkeypatch, module, function)
    assert races(config, False, ranked, monkeypatch)


def test_the_mutation_list_matches_the_sources() -> None:
    """`python -m tests.offload.mutations TEXT` tries a place again."""
    known = json.loads(mutations.LIST.read_text())
    assert list(known) == [site.place for site in mutations.sites()]
    assert "NOT NOTICED" not in known.values()


@pytest.mark.parametrize(
    "text",
    [
        "DiskStates.load",
        "Window._update_here: self.device.hold",
        "Transfers._ended",
        "OnHost.source",
    ],
)
def test_each_mutation_is_noticed(text: str) -> None:
    site = next(site for site in mutations.sites() if text in site.place)
    name = json.loads(mutations.LIST.read_text())[site.place].removeprefix("noticed: ")
    assert (
        mutations.noticed(
            site, [config for config in mutations.configs_of(site) if config[0] == name]
        )
        == name
    )


def races(
    config: dict[str, Any], tied: bool, ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the races of some steps, an evaluation and another step."""
    with checking(monkeypatch, updater, presumed, store, disk, disk_states) as (checker, device):
        monkeypatch.setattr(offload_engine, "open_device", lambda name: device)
        ranks = CheckedRanks(checker) if ranked else SINGLE
        model = tiny_model("llama", layers=5, tied=tied).family
        if "experts" in config:
            model = tiny_model("qwen3_moe", layers=4, tied=tied, **MIXTURE).family
        settings = SlideformerConfig(**{"timeout_s": 20.0, "threads": 1, **config})
        with checker.quiet():
            engine = OffloadEngine(model, settings, "cpu", ranks)
        names(checker, engine, "engine")
        try:
            data = batches(3, rows=2 + 2 * ranked, length=6)
            run(engine, data)
            for state in engine.store.arrays().values():  # as a checkpoint does
                state.clone()
            engine.evaluate(*data[0])
            for shard in engine.store.resident.shards:  # as loading one does
                engine.store.resident.load(shard, engine.store.resident.arrays(shard))
            if ranked:
                engine.window.gather_resident()
            run(engine, data[:1])
        finally:
            engine.close()
    assert checker.accesses > 2000
    return list(checker.races)
