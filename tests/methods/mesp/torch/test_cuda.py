"""The same on a GPU: FlashAttention's own backward pass, 4-bit weights, inputs on the host, liger's kernels."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.methods.mesp.torch import kernels
from ondevice.models import open_model, save_tiny
from ondevice.models.load import tiny_model
from tests.methods.mesp.reference import errors, exact, learned, rows, session, sums_rounding

pytestmark = pytest.mark.gpu
SIZES = {"layers": 3, "hidden": 256, "intermediate": 768, "heads": 8, "kv_heads": 2}


def on_gpu(dtype: torch.dtype = torch.float32, family: str = "qwen2", **chosen: Any) -> Any:
    loaded = tiny_model(family, 1, **SIZES)
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.to(dtype)
    loaded.model.cuda()
    return session(loaded, device="cuda", **chosen)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize(
    "chosen",
    [{"kernels": "torch"}, {"mlp_chunk_tokens": 16, "activations": "host"}, {"recompute": "none"}],
)
def test_float32_gradients_match_autograd(family, chosen) -> None:
    ids, labels = rows(3, 100, 1)
    opened = on_gpu(family=family, **chosen)
    start = opened.adapter().tensors
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    loss, ours = learned(opened, ids, labels)
    torch.backends.cuda.matmul.allow_tf32 = before
    wanted, theirs = exact(tiny_model(family, 1, **SIZES), start, 2.0, ids, labels)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert max(errors(ours, theirs).values()) <= 1e-5


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_half_precision_errs_no_more_than_automatic_differentiation(kernels) -> None:
    ids, labels = rows(2, 130, 1)
    actual = {}
    for name, chosen in (("manual", {"kernels": kernels}), ("autodiff", {"gradients": "autodiff"})):
        actual[name] = learned(on_gpu(torch.bfloat16, **chosen), ids, labels)
    half = tiny_model("qwen2", 1, **SIZES)
    for parameter in half.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    wanted, theirs = exact(half, on_gpu().adapter().tensors, 2.0, ids, labels)
    wrong = {
        name: float(np.median(list(errors(ours, theirs).values())))
        for name, (_, ours) in actual.items()
    }
    assert wrong["manual"] <= 1.2 * wrong["autodiff"] and wrong["autodiff"] < 0.1
    assert actual["manual"][0] == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize("algorithm", ["flash", "cudnn"])
@pytest.mark.parametrize("length", [2, 130, 512])
def test_both_pairs_of_kernels_give_the_tiles_gradients(algorithm, length, monkeypatch) -> None:
    """Against the tiled form in float32; cuDNN's where it takes the shape."""
    rng = torch.Generator("cuda").manual_seed(length)
    q, g = (torch.randn(2, length, 8, 128, generator=rng, device="cuda") for _ in range(2))
    k, v = (torch.randn(2, length, 2, 128, generator=rng, device="cuda") for _ in range(2))
    wanted = (kernels.attend(q, k, v)[0], *kernels.attend_backward(g, q, k, v, None))
    monkeypatch.setattr(kernels, "algorithm_for", lambda *_: algorithm)
    half = [x.bfloat16() for x in (q, k, v)]
    out, kept = kernels.attend(*half)
    actual = (out, *kernels.attend_backward(g.bfloat16(), *half, kept))
    for ours, theirs in zip(actual, wanted, strict=True):
        assert (ours.float() - theirs).norm() <= 1e-2 * theirs.norm()


def test_inputs_on_the_host_change_no_bit() -> None:
    """Under deterministic kernels: flash attention's backward pass adds in any order otherwise.
    Rows of graphs are padded, which may round otherwise."""
    losses: list[list[float]] = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        _steps_by_place(losses)
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[2] and losses[1] == losses[3]


def _steps_by_place(losses: list[list[float]]) -> None:
    for place in ("device", "host"):
        opened = on_gpu(torch.bfloat16, activations=place, cuda_graphs=False)
        losses.append(
            [opened.step(*rows(2, 64 + 8 * step, step), step, 1e-2).loss for step in range(4)]
        )
        losses.append(opened.evaluate(*rows(2, 40, 9))[0].tolist())


def test_graphs_with_inputs_on_the_host_change_no_bit() -> None:
    """A larger batch in between gets other host memory, which graphs of smaller ones do not read."""
    shapes = [(2, 64), (2, 64), (2, 64), (4, 256), (2, 64), (4, 256), (4, 256), (2, 64)]
    found = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for place in ("device", "host"):
            opened = on_gpu(torch.bfloat16, activations=place)
            for step, shape in enumerate(shapes):
                opened.step(*rows(*shape, step), step, 1e-2)
            assert len(opened.model.graphs.made) == 2
            found.append(opened.state())
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in found[0].items():
        assert np.array_equal(value, found[1][name]), name


def test_what_a_step_keeps_and_graphs_change_no_bit() -> None:
    """Under deterministic kernels, with lengths that share a bucket."""
    settings = [
        {"cuda_graphs": graphs, "recompute": recompute}
        for graphs in (False, True)
        for recompute in ("all", "none", (1, 2, 0))
    ]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        states = [_state_after_steps(**one) for one in settings]
    finally:
        torch.use_deterministic_algorithms(False)
    for one, state in zip(settings[1:], states[1:], strict=True):
        # Without graphs rows are not padded, and products of other lengths may round otherwise.
        wanted = states[0] if not one["cuda_graphs"] else states[3]
        for name, value in wanted.items():
            assert np.array_equal(value, state[name]), (one, name)


def _state_after_steps(**chosen: Any) -> dict[str, np.ndarray]:
    opened = on_gpu(torch.bfloat16, family="qwen3", **chosen)
    for step, length in enumerate((96, 96, 90, 96, 81)):
        opened.step(*rows(2, length, step), step, 1e-2)
    made = 0 if opened.model.graphs is None else len(opened.model.graphs.made)
    assert made == (1 if chosen["cuda_graphs"] else 0)
    return opened.state()


def test_steps_as_graphs_learn_what_other_steps_learn() -> None:
    """In float32, where padding changes only the order of sums."""
    learned_by = []
    for graphs in (False, True):
        opened = on_gpu(family="llama", cuda_graphs=graphs, kernels="triton")
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        losses = [
            opened.step(*rows(2, length, step), step, 1e-3).loss
            for step, length in enumerate((96, 96, 90, 130, 130, 96, 121))
        ]
        torch.backends.cuda.matmul.allow_tf32 = before
        learned_by.append((losses, opened.adapter().tensors))
    assert learned_by[0][0] == pytest.approx(learned_by[1][0], rel=1e-5)
    for name, value in learned_by[0][1].items():
        assert np.allclose(value, learned_by[1][1][name], atol=2e-4), name


def test_a_larger_shape_takes_the_memory_of_the_graphs_before_it() -> None:
    """Steps of a small shape, a large one, and the small one again, with other work between."""
    opened = on_gpu(torch.bfloat16, family="llama")
    plain = on_gpu(torch.bfloat16, family="llama", cuda_graphs=False)
    for step, (count, length) in enumerate([(2, 96)] * 3 + [(4, 512)] * 3 + [(2, 96)] * 4):
        ids, labels = rows(count, length, step)
        taken = [one.step(ids, labels, step, 1e-3).loss for one in (opened, plain)]
        assert taken[0] == pytest.approx(taken[1], rel=2e-3), step
        torch.full((1 << 22,), float("nan"), device="cuda")  # in whatever memory is free
        opened.evaluate(*rows(3, 200, step))
        assert len(opened.model.graphs.made) == (0, 1, 1, 1, 1, 1, 2, 2, 2, 2)[step]


def test_steps_of_graphs_leave_no_more_memory_than_their_largest_shape() -> None:
    used = []
    lengths = (2, 6, 8, 12, 16, 1)
    for shapes in ([(16, 512)], [(count, 512) for count in lengths]):
        opened = on_gpu(torch.bfloat16, family="llama")
        for count, length in shapes:
            for step in range(3):
                opened.step(*rows(count, length, step), step, 1e-3)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
        del opened
        gc.collect()
        torch.cuda.empty_cache()
    assert used[1] <= used[0] + (24 << 20)


def test_graphs_of_packed_weights_give_the_gradients_of_other_steps() -> None:
    pytest.importorskip("bitsandbytes")
    ids, labels = rows(2, 96, 3)
    gradients = []
    for graphs in (False, True):
        opened = on_gpu(torch.bfloat16, bits=4, cuda_graphs=graphs)
        for step in range(2):
            opened.step(ids, labels, step, 0.0)
        gradients.append(learned(opened, ids, labels))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-3)
    assert max(errors(gradients[1][1], gradients[0][1]).values()) <= 1e-2


def test_nf4_weights_are_dequantised_in_both_passes() -> None:
    """Against automatic differentiation over the same dequantised weights, and against weights kept in bfloat16."""
    pytest.importorskip("bitsandbytes")
    ids, labels = rows(2, 64, 3)
    by_name = {}
    for gradients in ("manual", "blockwise"):
        opened = on_gpu(torch.bfloat16, bits=4, gradients=gradients)
        packed = opened.weights.blocks[0].linears["up_proj"][0]
        assert packed.weight.dtype == torch.uint8 and packed.weight.numel() * 2 == 256 * 768
        by_name[gradients] = learned(opened, ids, labels)
    assert (
        float(np.median(list(errors(by_name["manual"][1], by_name["blockwise"][1]).values())))
        < 3e-2
    )
    assert by_name["manual"][0] == pytest.approx(by_name["blockwise"][0], rel=5e-3)
    whole, _ = learned(on_gpu(torch.bfloat16), ids, labels)
    assert by_name["manual"][0] == pytest.approx(whole, rel=0.1)


def test_streamed_weights_match_resident_weights_bit_for_bit(tmp_path) -> None:
    """With the loss from tiles in both; from whole logits, as weights in memory have it, its sums
    are in another order."""
    from ondevice.models import load_model

    folder = save_tiny(tmp_path / "model", "llama", 1, tied=False, **SIZES)
    chosen: Any = {"device": "cuda", "loss_tiles": 3, "cuda_graphs": False}
    resident = session(load_model(str(folder), device="cuda"), **chosen)
    streamed = session(open_model(str(folder)), weight_placement="streamed", **chosen)
    ids, labels = rows(2, 40, 7)
    wanted, theirs = learned(streamed, ids, labels)
    start = streamed.state()
    loss, ours = learned(resident, ids, labels)
    assert loss == pytest.approx(wanted, rel=sums_rounding(labels, resident.model.dims.vocab))
    assert max(errors(ours, theirs).values()) <= 2e-5  # each is within 1e-5 of the exact ones
    resident.load_state(start)
    resident.model.loss.once = False
    for step in range(3):
        ids, labels = rows(2, 40, step)
        assert resident.step(ids, labels, step, 1e-2) == streamed.step(ids, labels, step, 1e-2)
    streamed.close()


def test_running_out_of_gpu_memory_names_a_setting() -> None:
    from ondevice.core.errors import DoesNotFitError

    opened = on_gpu(torch.bfloat16)
    ids, labels = rows(1, 64, 0)
    opened.step(ids, labels, 0, 1e-3)
    kept = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(DoesNotFitError) as refused:
            opened.step(*rows(64, 500, 1), 1, 1e-3)
        assert "mlp_chunk_tokens" in str(refused.value.hint)
    finally:
        torch.cuda.set_per_process_memory_fraction(kept)
