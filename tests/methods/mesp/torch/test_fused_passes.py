"""Passes with fused kernels, with what a step keeps, and as graphs: gradients are those of the exact
reference, and settings that only save time change no bit."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.methods.mesp.block_modules import seen
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.methods.mesp.torch.graphed import StepGraphs
from ondevice.methods.mesp.torch.kernels import TorchKernels
from ondevice.models.load import tiny_model
from ondevice.nn.packed import Int8Matrix, pack_model
from ondevice.offload.shapes import TOKENS, bucket
from tests.interpreter import needs_interpreter
from tests.methods.mesp.reference import errors, exact, learned, rows, session

FAMILIES = ["llama", "qwen3", "phi3", "gemma3_text", "olmo2"]
SETTINGS = ["none", (0, 2, 0), (2, 0, 0), (1, 0, 2), (0, 1, 1)]


class FusedTorch(TorchKernels):
    """The operations of fused kernels, in PyTorch."""

    fused = True


def opened_with(kernels: TorchKernels, family: str, **chosen: Any) -> Any:
    opened = session(tiny_model(family, 1), **chosen)
    model = opened.model
    model.blocks.stages.kernels = kernels
    model.loss.kernels = kernels
    model.loss.once = kernels.fused
    return opened


def check_exact(opened: Any, family: str, tolerance: float) -> None:
    ids, labels = rows(3, 21, 1)
    start = opened.adapter().tensors
    loss, ours = learned(opened, ids, labels)
    wanted, theirs = exact(tiny_model(family, 1), start, 2.0, ids, labels)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert max(errors(ours, theirs).values()) <= tolerance


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [{}, {"mlp_chunk_tokens": 20, "recompute": "none"}])
def test_fused_passes_give_the_exact_gradients(family, chosen) -> None:
    check_exact(opened_with(FusedTorch(), family, **chosen), family, 1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_passes_with_a_graph_s_kernels_give_the_exact_gradients(family) -> None:
    check_exact(opened_with(GraphKernels(seen(21, 0)), family), family, 1e-5)


@needs_interpreter
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_triton_passes_give_the_exact_gradients(family, monkeypatch) -> None:
    from ondevice.methods.mesp.torch import triton_kernels
    from ondevice.nn import fused

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when a kernel is decorated
    importlib.reload(fused)
    try:
        kernels = importlib.reload(triton_kernels).TritonKernels()
        check_exact(opened_with(kernels, family), family, 1e-5)
    finally:
        monkeypatch.undo()
        importlib.reload(fused)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", [TorchKernels, FusedTorch])
def test_what_a_step_keeps_changes_no_bit(family, kernels) -> None:
    """Over two chunks of the MLP."""
    ids, labels = rows(2, 19, 4)
    wanted = learned(opened_with(kernels(), family, mlp_chunk_tokens=20), ids, labels)
    for recompute in SETTINGS:
        opened = opened_with(kernels(), family, mlp_chunk_tokens=20, recompute=recompute)
        loss, gradients = learned(opened, ids, labels)
        assert loss == wanted[0]
        for name, gradient in gradients.items():
            assert np.array_equal(gradient, wanted[1][name]), (recompute, name)


@pytest.mark.parametrize(("recompute", "products"), [("all", 37), ("none", 25), ((0, 2, 0), 33)])
def test_what_is_kept_is_not_multiplied_again(recompute, products, monkeypatch) -> None:
    """Frozen products of two layers: 7, then 6 again, and 7 of gradients; 4 of the first layer."""
    opened = session(tiny_model("llama", 1), recompute=recompute)
    kernels = opened.model.blocks.stages.kernels
    count = 0
    for name in ("frozen_linear", "frozen_backward"):
        run = getattr(kernels, name)

        def counted(*arguments: Any, run: Any = run) -> Any:
            nonlocal count
            count += 1
            return run(*arguments)

        monkeypatch.setattr(kernels, name, counted)
    opened.step(*rows(2, 9, 0), 0, 1e-3)
    assert opened.model.dims.layers == 2 and count == products


def test_packed_matrices_of_the_mlp_are_made_dense_once_for_all_chunks(monkeypatch) -> None:
    """Two rows of 19 tokens: three chunks, two, or one."""
    made: list[tuple[int, ...]] = []
    dense = Int8Matrix.dense

    def counted(matrix: Int8Matrix) -> torch.Tensor:
        made.append(matrix.shape)
        return dense(matrix)

    monkeypatch.setattr(Int8Matrix, "dense", counted)
    counts = []
    for chunk in (13, 20, 40):
        made.clear()
        loaded = tiny_model("llama", 1)
        pack_model(loaded.family, "int8")
        opened = session(loaded, mlp_chunk_tokens=chunk)
        opened.model.blocks.stages.kernels = FusedTorch()
        learned(opened, *rows(2, 19, 4))
        dims = opened.model.dims
        inner = {(dims.intermediate, dims.hidden), (dims.hidden, dims.intermediate)}
        counts.append(sum(shape in inner for shape in made))
    # Of each of two layers: three in each pass, or eight for each chunk, as the backward pass takes
    # gate and up twice.
    assert counts == [12, 32, 16]


def again(run: Any) -> Any:
    """A recorder of graphs that does the work again."""
    return run


class Weak:
    """A recorder that keeps alive what it recorded as little as a graph does."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, run: Any) -> Any:
        held = [weakref.ref(run), *(weakref.ref(x) for x in tensors_read(run))]
        self.made += 1

        def replay() -> None:
            assert all(one() is not None for one in held), "what the graph reads is gone"
            held[0]()()

        return replay


def tensors_read(run: Any) -> list[torch.Tensor]:
    """Rotations that a pass reads: they are made before it is recorded."""
    cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
    pairs = cells["pairs"].cell_contents
    return [x for pair in pairs for x in pair]


def test_what_graphs_read_lives_as_long_as_they_do() -> None:
    opened = session(tiny_model("llama", 1))
    weak = Weak()
    opened.model.graphs = StepGraphs(weak)
    for step in range(4):
        opened.step(*rows(2, 40, step), step, 1e-2)
        gc.collect()
    assert weak.made == 2


def test_a_larger_shape_drops_the_graphs_before_it() -> None:
    opened = session(tiny_model("llama", 1))
    model: Any = opened.model
    model.graphs = StepGraphs(again)
    made = []
    for step, length in enumerate((40, 40, 100, 100, 40, 64, 40)):
        opened.step(*rows(2, length, step), step, 1e-2)
        made.append({tuple(shape) for shape in model.graphs.made})
    small, large = (2, 64), (2, 128)
    assert made == [
        set(),
        {small},
        {small},
        {large},
        {large, small},
        {large, small},
        {large, small},
    ]


@pytest.mark.parametrize("activations", ["device", "host"])
def test_steps_as_graphs_change_no_bit(activations) -> None:
    """Lengths that share a bucket, another number of rows, and parts of a batch."""
    shapes = [(3, 40), (3, 40), (3, 37), (1, 40), (3, 64), (3, 33), (3, 40), (1, 40)]
    states = []
    for record, place in ((None, "device"), (again, activations)):
        opened = session(tiny_model("llama", 1), activations=place)
        model: Any = opened.model
        model.graphs = StepGraphs(record)  # type: ignore[arg-type]
        losses = [
            opened.step(*rows(*shape, number), number, 1e-2).loss
            for number, shape in enumerate(shapes)
        ]
        assert len(model.graphs.made) == (0 if record is None else 2)
        states.append((losses, opened.state()))
    assert states[0][0] == states[1][0]
    for name, value in states[0][1].items():
        assert np.array_equal(value, states[1][1][name]), name


def test_batches_whose_kernels_hide_their_launches_get_no_graphs() -> None:
    opened = session(tiny_model("llama", 1))
    opened.model.graphs = StepGraphs(again, tokens=128)  # type: ignore[arg-type]
    for step, shape in enumerate([(2, 40), (2, 40), (3, 64), (3, 64), (2, 64)]):
        opened.step(*rows(*shape, step), step, 1e-2)
    assert [tuple(shape) for shape in opened.model.graphs.made] == [(2, 64)]


def test_gradients_of_graphs_are_summed_over_parts() -> None:
    states = []
    for record in (None, again):
        opened = session(tiny_model("llama", 1), micro_batch_size=2, max_grad_norm=0.1)
        model: Any = opened.model
        model.graphs = StepGraphs(record)  # type: ignore[arg-type]
        for step in range(3):
            opened.step(*rows(4, 40, step), step, 1e-2)
        assert bool(model.graphs.made) == (record is not None)
        states.append(opened.state())
    for name, value in states[0].items():
        assert np.array_equal(value, states[1][name]), name


def test_padding_to_a_bucket_changes_nothing_but_rounding() -> None:
    ids, labels = rows(3, 37, 5)
    wanted = learned(session(tiny_model("llama", 1)), ids, labels)
    opened = session(tiny_model("llama", 1))
    opened.model.graphs = StepGraphs(None)  # type: ignore[arg-type]
    loss, gradients = learned(opened, ids, labels)
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    assert max(errors(gradients, wanted[1]).values()) <= 1e-5


def test_memory_that_is_short_for_graphs_ends_them_and_is_said(caplog) -> None:
    def short(run: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    opened = session(tiny_model("llama", 1))
    opened.model.graphs = StepGraphs(short)
    for step in range(3):
        opened.step(*rows(2, 40, step), step, 1e-2)
    assert "steps run without" in caplog.text and not opened.model.graphs.made


@pytest.mark.parametrize("length", [1, 2, 31, 33, 100, 511, 512, 513, 1500, 2048])
def test_a_bucket_holds_its_lengths_with_little_padding(length) -> None:
    padded = bucket(4, length)
    assert padded >= length and bucket(4, padded) == padded
    assert padded <= max(length + 31, length * 1.13)
    assert 4 * padded <= TOKENS


def test_long_batches_are_not_padded() -> None:
    assert bucket(5, 1637) == 1637
    assert bucket(1, 10001) == 10001
