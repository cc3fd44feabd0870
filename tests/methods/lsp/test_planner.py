"""Recommendations for LSP-Offload on devices of given rates, against counts made here once more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ondevice.core.dims import ModelDims
from ondevice.core.registry import method_config
from ondevice.methods.lsp.planner import LARGEST_BATCH, SIZES
from ondevice.methods.lsp.sizes import extra
from ondevice.methods.step_model import recomputed_flops
from ondevice.planning.advice import recommend
from ondevice.planning.devices import Device, DeviceEntry, find_device
from ondevice.planning.estimate import Plan, plan
from ondevice.planning.fits import alternatives, does_not_fit

LLAMA_7B = ModelDims("llama", 32, 4096, 11008, 32, 32, 128, 32000, False, False, 1e4, 1e-5, 4096)
SIDES = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
MATRICES = 32 * SIDES
CARD = replace(
    find_device("h200"),
    name="card",
    usable_bytes=int(22.5 * 2**30),
    listed_rates=({"bfloat16": 80e12}, None),
    bus_bytes_s=15e9,
)


def planned(rows: int = 4, length: int = 512, device: Device = CARD, **settings: object) -> Plan:
    method = method_config("lsp", settings)
    return plan(
        LLAMA_7B, method, batch_size=rows, length_tokens=length, dtype="bfloat16", device=device
    )


def test_bytes_over_the_bus_are_two_a_number_in_each_direction() -> None:
    advice = recommend(planned(subspace=512))
    norms, tables = 65 * 4096, 2
    assert advice["given"]["to_host_bytes"] == 2 * ((len(MATRICES) + tables) * 512**2 + norms)
    assert advice["given"]["to_device_bytes"] == advice["given"]["to_host_bytes"]
    read = 4 * 512  # rows of the embedding: one a token of the batch
    whole = 2 * (LLAMA_7B.parameters - (LLAMA_7B.vocab - read) * LLAMA_7B.hidden)
    assert advice["zero"]["to_host_bytes"] == advice["zero"]["to_device_bytes"] == whole
    assert advice["given"]["to_host_s"] == pytest.approx(advice["given"]["to_host_bytes"] / 15e9)
    coded = (len(MATRICES) + tables) * 512**2 + 64 * 4096  # but for the norm after the layers
    small = recommend(planned(subspace=512, gradient_dtype="int4"))
    assert small["given"]["to_host_bytes"] == coded * 18 // 32 + 2 * 4096
    assert small["given"]["to_device_bytes"] == advice["given"]["to_device_bytes"]
    assert small["zero"] == advice["zero"]
    window = method_config(
        "lsp", {}
    ).window  # the uppermost layers are there when the backward pass begins
    layers = 2 * (2 * 32 - window) * LLAMA_7B.block_parameters
    sliding = recommend(planned(subspace=512, weight_placement="host"))["given"]
    assert sliding["to_device_bytes"] - sliding["to_host_bytes"] == layers


def test_multiplications_of_the_projection() -> None:
    s, tokens, hidden, vocab = 256, 4 * 512, 4096, 32000
    cost = extra(LLAMA_7B, method_config("lsp", {"subspace": s, "window": 2}), 4, 512)
    collecting = sum(tokens * s * (m + n + s) for m, n in MATRICES)
    head = vocab * hidden * s + vocab * s * s  # P^T G Q of a gradient that is there
    embedding = tokens * hidden * s + tokens * s * s
    assert cost.collecting == collecting + head + embedding
    once = sum(
        m * s * s + m * s * n for m, n in SIDES
    )  # of a layer; the last two are made in one pass alone
    tables = (vocab + tokens) * (s * s + s * hidden)
    assert cost.making == (2 * 32 - 2) * once + tables
    assert cost.saved == sum(tokens * m * n for m, n in MATRICES)
    assert cost.flops == 2 * (cost.making + cost.collecting - cost.saved)
    none = extra(LLAMA_7B, method_config("lsp", {"project": False}), 4, 512)
    assert (none.making, none.collecting, none.saved) == (0, 0, 0)
    native = recomputed_flops(LLAMA_7B, 4, 512)
    layers = sum(
        8 * tokens * m * n for m, n in MATRICES
    )  # forward twice, and gradients of inputs and weights
    assert (
        layers + 6 * tokens * vocab * hidden
        <= native
        <= 1.05 * (layers + 6 * tokens * vocab * hidden)
    )


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_the_largest_subspace_within_a_tenth_is_taken(rows: int) -> None:
    advice = recommend(planned(rows))
    size = advice["settings"]["subspace"]
    ratios = {s: recommend(planned(rows, subspace=s))["given"]["unhidden"] for s in SIZES}
    allowed = [s for s, ratio in ratios.items() if ratio <= 1.1]
    assert size == max(allowed) and advice["settings"]["batch_size"] == rows
    assert advice["recommended"]["unhidden"] == pytest.approx(ratios[size])
    assert f"subspace {size}" in " ".join(advice["sentences"])
    given = advice["given"]
    parts = given["compute_s"] + given["to_host_s"] + given["to_device_s"]
    assert given["unhidden"] == pytest.approx(parts / given["native_s"])


def test_a_bus_that_is_too_slow_wants_a_larger_batch() -> None:
    advice = recommend(planned(1, bus_limit_gb_per_s=0.1))
    rows = advice["settings"]["batch_size"]
    assert advice["settings"]["subspace"] == 512 and 1 < rows <= LARGEST_BATCH
    assert advice["recommended"]["unhidden"] <= 1.1
    assert (
        recommend(planned(rows - 1, bus_limit_gb_per_s=0.1, subspace=512))["given"]["unhidden"]
        > 1.1
    )
    text = " ".join(advice["sentences"])
    assert "simulated bus of 0.1 GB/s" in text and "smallest batch at which 512 does" in text
    never = recommend(planned(1, 16, bus_limit_gb_per_s=1e-5))
    assert (
        "no batch up to 1024" in " ".join(never["sentences"])
        and never["settings"]["batch_size"] == 1
    )


def test_projectors_take_at_most_a_twentieth_of_the_weights() -> None:
    for rows, bus in ((1, 50.0), (16, 50.0)):
        actual = recommend(planned(rows, bus_limit_gb_per_s=bus))["settings"]
        used = planned(rows, subspace=actual["subspace"], nonzeros=actual["nonzeros"]).parts[
            "projectors"
        ]
        assert used <= 0.05 * 2 * LLAMA_7B.parameters or actual["nonzeros"] == 4
        if actual["nonzeros"] < 16 and actual["subspace"] >= 512:
            more = planned(
                rows, subspace=actual["subspace"], nonzeros=2 * actual["nonzeros"]
            ).parts["projectors"]
            assert more > 0.05 * 2 * LLAMA_7B.parameters
    few = recommend(planned(1, bus_limit_gb_per_s=15.0))["settings"]
    assert few["subspace"] >= 512 or few["nonzeros"] <= 8


def test_weights_that_do_not_fit_become_smaller() -> None:
    roomy = recommend(planned())
    assert roomy["fits"] and roomy["settings"]["weight_dtype"] == "compute"
    tight = recommend(planned(device=replace(CARD, usable_bytes=12 << 30)))
    assert (
        tight["fits"]
        and tight["settings"]["weight_dtype"] == "nf4"
        and "with weights nf4" in tight["sentences"][-1]
    )
    tighter = recommend(planned(1, device=replace(CARD, usable_bytes=7 << 30)))
    assert tighter["settings"]["weight_placement"] == "host" and tighter["fits"]
    none = recommend(planned(device=replace(CARD, usable_bytes=1 << 30)))
    assert not none["fits"] and "nf4 or host" in none["sentences"][-1]


def test_without_rates_nothing_is_recommended() -> None:
    advice = recommend(planned(device=replace(CARD, bus_bytes_s=None)))
    assert advice["settings"] is None and "the bus of card is not known" in advice["sentences"][-1]
    assert advice["given"]["compute_s"] > 0 and advice["given"]["to_host_s"] is None
    advice = recommend(planned(device=replace(CARD, listed_rates=({}, None))))
    assert advice["recommended"] is None and "matrix products" in advice["sentences"][-1]


def test_a_plan_that_does_not_fit_offers_other_weights() -> None:
    estimate = planned(device=replace(CARD, usable_bytes=12 << 30))
    words = {words: other for words, other in alternatives(estimate)}
    assert words["method.weight_dtype: nf4"].fits and words["method.weight_placement: host"].fits
    assert words["method.weight_dtype: nf4"].parts["weights"] < 0.3 * estimate.parts["weights"]
    assert "method.weight_dtype" in str(does_not_fit(estimate).hint)
    assert not any("moments" in words for words in words)
    noted = planned(weight_dtype="nf4").notes
    assert any("stay on the accelerator" in note for note in noted)


def test_a_table_s_bus_is_bytes_a_second(tmp_path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(
        "card:\n  description: a card\n  kind: gpu\n  torch_device: cuda\n  memory_gib: 24\n"
        "  usable_fraction: 0.9\n  rule: r\n  bus_gb_s: 12.5\n  tflops: {bfloat16: 100}\n"
    )
    assert find_device("card", file).bus_bytes_s == 12.5e9
    assert "bus_gb_s" in DeviceEntry.model_fields and find_device("oneplus-12").bus_bytes_s is None
