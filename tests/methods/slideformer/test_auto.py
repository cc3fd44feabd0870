"""What `auto` decides: within the memory of both sides, never against a number that is set, and shown by the plan."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.core.dims import ModelDims
from ondevice.methods.slideformer.auto import (
    HOST_SHARE,
    SHARE,
    Room,
    Work,
    lanes_of,
    moved_bytes,
    needed_bytes,
    presumed_within,
    resolve,
)
from ondevice.methods.slideformer.config import BUFFERS, WINDOW, SlideformerConfig
from ondevice.methods.slideformer.memory import MEMORY, resident_parameters
from ondevice.offload.config import RECORD_BYTES, Rates
from ondevice.planning.estimate import plan

DIMS = ModelDims(
    family="qwen2", layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064,
    tied=False, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6, max_positions=32768,
)  # fmt: skip
RATES = Rates(700e12, 54e9, 54e9, 5.2e9, 3e9)
HOST = 120 * 10**9


def chosen(
    gpu_gb: float, rows: int, host: int | None = HOST, world: int = 1, **settings: Any
) -> SlideformerConfig:
    room = Room(int(gpu_gb * 1e9), host)
    resolved, why = resolve(
        SlideformerConfig(**settings), DIMS, Work(rows, 1024, world), room, RATES
    )
    assert not resolved.is_auto and why
    return resolved


@pytest.mark.parametrize("gpu_gb", [24, 48, 80, 200])
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_the_choice_fits_both_memories(gpu_gb: int, rows: int, moments: str) -> None:
    resolved = chosen(gpu_gb, rows, moments=moments)
    assert sum(MEMORY.step(DIMS, resolved, rows, 1024, 4).values()) <= SHARE * gpu_gb * 1e9
    assert MEMORY.host is not None
    assert sum(MEMORY.host(DIMS, resolved, rows, 1024, 4).values()) <= HOST_SHARE * HOST


def test_a_small_batch_leaves_more_on_the_accelerator_and_a_large_one_little() -> None:
    small, large = chosen(80, 8), chosen(80, 32)
    assert small.kept_layers >= 10 and small.keeps_tables and small.buffers > BUFFERS
    assert large.kept_layers <= 2 and large.buffers == BUFFERS
    assert chosen(24, 8).kept_layers < small.kept_layers


def test_given_numbers_are_not_changed() -> None:
    resolved = chosen(80, 8, window=5, resident_layers=3)
    assert (resolved.window, resolved.resident_layers) == (5, 3)
    assert chosen(80, 8, gradient_buffers=9, resident_tables=False).gradient_buffers == 9


def test_settings_that_exclude_resident_states_are_respected() -> None:
    exact = chosen(80, 8, max_grad_norm=1.0, clip="global", moments="int8")
    assert exact.resident_layers == 0 and exact.resident_tables is False
    assert chosen(80, 8, max_grad_norm=1.0, loss_tiles=4).keeps_tables


def test_exact_clipping_presumes_what_fits_the_host() -> None:
    """Fewer where the update hides under the forward pass; `host_memory_bytes` is the whole room of a loop."""
    exact: dict[str, Any] = {"max_grad_norm": 1.0, "clip": "global", "moments": "int8"}
    plenty, little = chosen(80, 8, 500 * 10**9, **exact), chosen(80, 8, 75 * 10**9, **exact)
    assert 28 >= plenty.presumed > little.presumed > 0
    assert chosen(80, 64, 500 * 10**9, **exact).presumed < plenty.presumed
    assert chosen(80, 8, 500 * 10**9, **exact, presumed_layers=3).presumed == 3
    assert chosen(80, 8, 500 * 10**9, max_grad_norm=1.0).presumed == 0
    host = 90 * 10**9
    loop = SlideformerConfig(**exact, host_memory_bytes=host)
    layers = presumed_within(loop, DIMS.parameters, DIMS.block_parameters, DIMS.layers)
    parts = MEMORY.host and MEMORY.host(DIMS, loop.decided(presumed_layers=layers), 1, 1, 4)
    assert parts and 0 < layers < 28 and sum(parts.values()) <= host
    open_ended = loop.model_copy(update={"host_memory_bytes": None})
    assert presumed_within(open_ended, DIMS.parameters, DIMS.block_parameters, 28) == 0


def test_a_presumed_update_takes_as_long_as_its_record_adds() -> None:
    """The bytes of a record are a sixth of those that an update with float32 moments moves."""
    exact = SlideformerConfig(max_grad_norm=1.0, clip="global")
    without, every = (
        lanes_of(DIMS, exact.decided(presumed_layers=layers), Work(8, 1024), RATES, 1.0)["update"]
        for layers in (0, DIMS.layers)
    )
    record = RECORD_BYTES["float32"] / moved_bytes(exact)
    of_layers = DIMS.layers * DIMS.block_parameters / RATES.parameters_s
    assert every - without == pytest.approx(record * of_layers)
    assert 0.1 < record < 0.2


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_muon_s_update_moves_master_and_update_and_its_momentum_crosses_the_bus(
    moments: str,
) -> None:
    """On the host 10 bytes a parameter of a matrix, AdamW's 26 or 18; both ways 4 or 2 more."""
    adam, muon = (
        SlideformerConfig(moments=moments, optimizer=optimizer).fixed()
        for optimizer in ("auto", "muon")
    )
    of_adam, of_muon = (
        lanes_of(DIMS, config, Work(8, 1024), RATES, 1.0) for config in (adam, muon)
    )
    matrices = DIMS.layers * DIMS.matrices_of_block
    momentum = {"float32": 4, "bfloat16": 2}[moments] * matrices
    moved = {"float32": 26, "bfloat16": 18}[moments]
    saved = (moved - 10) * matrices - 2 * momentum  # copies pass through the host's memory, too
    assert of_adam["update"] - of_muon["update"] == pytest.approx(
        saved / moved / RATES.parameters_s
    )
    assert of_muon["d2h"] - of_adam["d2h"] == pytest.approx(momentum / RATES.d2h_bytes_s)


def test_ranks_leave_about_as_much_on_the_accelerator() -> None:
    """Four ranks compute as long as one with as many rows each, and one host updates as long: not more stays."""
    for rows in (8, 32):
        four, one = chosen(80, rows, world=4), chosen(80, rows)
        assert four.kept_layers > 0
        assert abs(four.kept_layers - one.kept_layers) <= 6


def test_ranks_have_a_shard_of_resident_states() -> None:
    """What one accelerator of 60 GB cannot hold of them, four can: each has all weights, and a quarter of the rest."""
    four, one = chosen(60, 4, world=4), chosen(60, 4)
    assert four.keeps_tables and four.kept_layers > one.kept_layers
    work = Work(4, 1024, 4)
    assert (
        needed_bytes(four, DIMS, work)
        <= SHARE * 60e9
        < sum(MEMORY.step(DIMS, four, 4, 1024, 4).values())
    )
    stays = resident_parameters(DIMS, four)
    alone, shared = (needed_bytes(four, DIMS, Work(4, 1024, world)) for world in (1, 4))
    assert alone - shared == pytest.approx(10 * stays * 3 / 4)
    fixed = SlideformerConfig(resident_layers=20, resident_tables=False, window=3)
    shared_by = {"batch_size": 4, "length_tokens": 1024, "device": "h200", "runtime": "torch"}
    plans = [plan(DIMS, fixed, world=world, **shared_by) for world in (1, 4)]
    states = [one.parts["resident states"] for one in plans]
    assert states[0] - states[1] == pytest.approx(10 * 20 * DIMS.block_parameters * 3 / 4)


def test_the_smallest_choice_is_taken_if_nothing_fits() -> None:
    resolved = chosen(4, 8)
    assert (resolved.window, resolved.resident_layers, resolved.gradient_buffers) == (
        WINDOW,
        0,
        BUFFERS,
    )
