"""The paper's coupling: its attention, its inverse by iteration, and what is done where that does
not converge."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ondevice.core.errors import ModelError, TrainingError
from ondevice.methods.revffn.couplings import Place, attention_between
from ondevice.methods.revffn.inversion import measure
from ondevice.methods.revffn.passes import Passes
from ondevice.methods.revffn.reversible import Reversible
from ondevice.models import tiny_model
from tests.methods.revffn.networks import network, random_ids, rebuilt, relative_error, stored


def weak(factor: float = 0.1, **settings: Any) -> Reversible:
    """A paper's network whose attention is `factor` times as strong as that of a random model."""
    reversible = network(sizes={"layers": 4}, coupling="paper", **settings)
    with torch.no_grad():
        for i in range(reversible.blocks):
            reversible.family.linear(i, "o_proj").weight.mul_(factor)  # type: ignore[operator]
    return reversible


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen2_moe"])
@torch.no_grad()
def test_attention_between_a_stream_and_itself_is_the_familys(family: str) -> None:
    source = tiny_model(family, 2, tied=False).family
    h, other = torch.randn(2, 2, 9, 64, generator=torch.Generator().manual_seed(1))
    place = Place(source.positions(9, "cpu", torch.float32))
    torch.testing.assert_close(
        attention_between(source, 1, h, h, place), source.attention_branch(1, h, *place)
    )
    crossed = attention_between(source, 1, h, other, place)
    changed = other.clone()
    changed[:, 5] += 1.0
    seen = attention_between(source, 1, h, changed, place) - crossed
    assert (
        seen[:, 5:].abs().amax(-1).min() > 1e-4 and not seen[:, :5].any()
    )  # keys and values, causally
    changed = h.clone()
    changed[:, 5] += 1.0
    seen = attention_between(source, 1, changed, other, place) - crossed
    assert (
        seen[:, 5].abs().max() > 1e-4 and not seen[:, 6:].any() and not seen[:, :5].any()
    )  # queries: this token's


def test_gpt2_has_no_separate_queries() -> None:
    with pytest.raises(ModelError, check=lambda error: error.received == "gpt2"):
        network("gpt2", coupling="paper", streams="float32").forward(
            torch.zeros(1, 3, dtype=torch.int64)
        )


def test_an_odd_width_cannot_be_halved() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from ondevice.models.families.gpt2 import Gpt2

    model = GPT2LMHeadModel(
        GPT2Config(n_embd=33, n_head=3, n_layer=1, vocab_size=260, n_positions=16)
    )
    with pytest.raises(ModelError, check=lambda error: error.received == 33):
        network(Gpt2(model), coupling="exact")


@pytest.mark.parametrize("streams", ["int32", "float32"])
def test_a_contraction_is_inverted_to_the_tolerance(streams: str) -> None:
    reversible = weak(streams=streams, tolerance=1e-6)
    ids = random_ids(reversible)
    assert relative_error(rebuilt(reversible, ids)[1], stored(reversible, ids)[1]) < 1e-4
    collected = [layer for layer in measure(reversible, ids) if layer.part == "attention"]
    for layer in collected:
        went = layer.iteration
        assert went is not None and went.converged and went.movement <= 1e-6 and layer.error < 1e-5
        assert went.contraction is not None and went.contraction < 0.7
    assert [layer.block for layer in collected] == [0, 1, 2, 3]


def test_one_iteration_as_in_the_paper_is_not_enough() -> None:
    """Section 3.1 claims an error below machine epsilon."""
    ids = random_ids(weak())
    one, many = (measure(weak(max_iterations=limit, tolerance=1e-6), ids) for limit in (1, 50))
    for few, enough in zip(one, many, strict=True):
        if few.part == "attention":
            assert (
                few.iteration is not None
                and few.iteration.iterations == 1
                and few.iteration.contraction is None
            )
            assert few.error > 1e-3 > 100 * enough.error
    assert all(layer.error == layer.mismatched == 0 for layer in one if layer.part == "mlp")


def test_what_does_not_converge_is_refused_with_layer_and_numbers() -> None:
    reversible = weak(1.0, streams="float32", max_iterations=20)
    ids = random_ids(reversible)
    failing = [
        layer.block
        for layer in measure(reversible, ids)
        if layer.iteration and not layer.iteration.converged
    ]
    with pytest.raises(TrainingError) as caught:
        rebuilt(reversible, ids)
    assert f"layer {max(failing)} " in caught.value.message
    assert (
        "after 20 iterations, norm off by" in caught.value.received
        and "contraction" in caught.value.received
    )
    assert "not_converged: store" in (caught.value.hint or "")


def test_another_root_is_no_inverse() -> None:
    """Eq. (1) is no bijection: here the iteration settles, at an input that did not go in."""
    reversible = weak(0.2, streams="float32", max_iterations=300)
    ids = random_ids(reversible)
    wrong = [layer for layer in measure(reversible, ids) if layer.iteration and layer.error > 1e-2]
    assert wrong
    for layer in wrong:
        went = layer.iteration
        assert (
            went is not None
            and went.movement <= 1e-6
            and went.norm_error > 1e-3
            and not went.converged
        )
    with pytest.raises(TrainingError) as caught:
        rebuilt(reversible, ids)
    assert f"layer {wrong[-1].block} " in caught.value.message


def test_or_its_input_is_stored() -> None:
    reversible = weak(1.0, streams="int32", max_iterations=20, not_converged="store")
    ids = random_ids(reversible)
    saved = reversible.forward(ids)
    kept = len(saved.stored)
    assert kept >= 3 and kept == sum(not went.converged for went in reversible.iterations.values())
    assert (
        saved.bytes == (2 + kept) * 4 * 2 * 7 * 16 + 4 * 4 * 2 * 7
    )  # streams and inputs; a norm a token and block
    assert relative_error(rebuilt(reversible, ids)[1], stored(reversible, ids)[1]) < 1e-4
    with torch.no_grad():
        for i in range(4):
            reversible.family.linear(i, "o_proj").weight.mul_(0.05)  # type: ignore[operator]
    assert not reversible.forward(ids).stored


def test_the_first_pass_says_how_each_layer_inverts(caplog: pytest.LogCaptureFixture) -> None:
    reversible = weak(1.0, streams="float32", max_iterations=20, not_converged="store")
    ids = random_ids(reversible)
    passes = Passes(reversible, kept=0, micro_batch_size=None, loss_tiles=8)
    with caplog.at_level(logging.INFO, "ondevice"):
        passes.row_nll(ids, ids)
        passes.row_nll(ids, ids)
    records = [
        record for record in caplog.records if record.name.startswith("ondevice.methods.revffn")
    ]
    lines = [record.getMessage() for record in records if record.levelno == logging.INFO]
    assert [line.partition(":")[0] for line in lines] == [f"layer {i}" for i in range(4)]
    went = [layer.iteration for layer in measure(reversible, ids[:1]) if layer.iteration]
    for line, each in zip(lines, went, strict=True):
        assert (
            f"contraction factor {each.contraction:.3g}," in line
            and f"after {each.iterations} iter" in line
        )
    failed = ", ".join(str(block) for block, each in enumerate(went) if not each.converged)
    (warning,) = (record.getMessage() for record in records if record.levelno == logging.WARNING)
    assert failed and f"layers {failed}: their inputs are stored" in warning


def test_measured_errors_of_the_closed_forms() -> None:
    for settings in ({"coupling": "exact"}, {"coupling": "full"}):
        reversible = network("qwen2_moe", sizes={"layers": 3}, **settings)
        measured = measure(reversible, random_ids(reversible))
        assert len(measured) == len(reversible.steps)
        assert all(
            layer.mismatched == layer.chained_mismatched == 0 and layer.chained == 0.0
            for layer in measured
        )
        assert all(layer.iteration is None for layer in measured)
    rounded = network(sizes={"layers": 3}, coupling="exact", streams="bfloat16")
    measured = measure(rounded, random_ids(rounded))
    assert measured[0].chained > measured[-1].chained > 1e-4 and measured[0].chained_mismatched > 0
