"""LoRA's passes as CUDA graphs on a GPU, next to steps without."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.registry import method_config, open_session
from ondevice.models import load_model
from ondevice.models.load import tiny_model
from ondevice.offload.graphs import CudaRecord
from tests.methods.mesp.reference import errors, rows
from tests.methods.reference import LORA
from tests.models.test_any_decoder import save

pytestmark = pytest.mark.gpu
SIZES = {"layers": 3, "hidden": 256, "intermediate": 768, "heads": 8, "kv_heads": 2}
SHAPES = [(3, 90), (3, 90), (3, 85), (1, 90), (3, 130), (3, 130), (3, 90), (1, 81)]
"""Rows and tokens of steps: two lengths share a bucket, and a larger one comes later."""
RATE = 1e-3


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_gpu(
    name: str = "lora", family: str = "llama", dtype: torch.dtype = torch.float32, **values: Any
) -> Any:
    """A session whose B is not zero."""
    loaded = tiny_model(family, 1, **SIZES)
    model: Any = loaded.model
    model.to("cuda", dtype)
    session: Any = open_session(loaded, method_config(name, {**LORA, **values}), 3)
    adapter, random = session.adapter(), np.random.default_rng(5)
    for key, value in adapter.tensors.items():
        if ".lora_B." in key:
            value[:] = 0.1 * random.standard_normal(value.shape)
    session.load_adapter(adapter)
    return session


def steps(session: Any, shapes: list[tuple[int, int]] = SHAPES) -> list[float]:
    """Losses of steps; all labels are answers if the loss is over answers."""
    losses = []
    for number, shape in enumerate(shapes):
        ids, labels = rows(*shape, number)
        if session.answers:
            answers = np.array(session.answers)
            labels = np.where(labels >= 0, answers[labels % len(answers)], labels)
        losses.append(session.step(ids, labels, number, RATE).loss)
    return losses


@pytest.mark.parametrize("name", ["lora", "lora-fa"])
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("qwen3", {"micro_batch_size": 2, "max_grad_norm": 0.05}),
        ("gemma3_text", {}),
        ("phi3", {"target_modules": ("qkv_proj", "down_proj")}),
        ("lfm2", {"target_modules": ("q_proj", "in_proj")}),
        ("qwen2", {"answers": (5, 9, 70)}),
    ],
)
def test_steps_as_graphs_learn_what_other_steps_learn(name, family, values) -> None:
    """In float32, where padding changes only the order of sums."""
    plain, graphed = (
        on_gpu(name, family, cuda_graphs=graphs, **values) for graphs in (False, True)
    )
    losses = steps(plain)
    assert steps(graphed) == pytest.approx(losses, rel=1e-5)
    assert plain.graphs is None and graphed.graphs.record is not None
    assert len(graphed.graphs.made) == (4 if "micro_batch_size" in values else 3)
    assert max(errors(graphed.state(), plain.state()).values()) <= 1e-3


def test_in_bfloat16_the_adapter_learns_in_float32_as_without_graphs() -> None:
    plain, graphed = (on_gpu(dtype=torch.bfloat16, cuda_graphs=one) for one in (False, True))
    for number, shape in enumerate(SHAPES):
        taken = [one.step(*rows(*shape, number), number, RATE).loss for one in (plain, graphed)]
        assert taken[1] == pytest.approx(taken[0], rel=2e-3), number
    assert len(graphed.graphs.made) == 3
    assert {p.dtype for p in graphed.parameters.values()} == {torch.float32}


def test_evaluation_and_text_between_steps_are_of_the_weights_as_they_are() -> None:
    """With whatever memory is free overwritten."""
    plain, graphed = (on_gpu(cuda_graphs=graphs) for graphs in (False, True))
    ids = torch.from_numpy(rows(1, 9, 4)[0]).cuda()
    for number, shape in enumerate(SHAPES):
        taken = [one.step(*rows(*shape, number), number, RATE).loss for one in (plain, graphed)]
        assert taken[1] == pytest.approx(taken[0], rel=1e-5), number
        torch.full((1 << 24,), float("nan"), device="cuda")
        found = [one.evaluate(*rows(3, 200, number))[0] for one in (plain, graphed)]
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
        if number == 5:
            texts = []
            for one in (plain, graphed):
                with one.writing() as loaded, torch.no_grad():
                    texts.append(loaded.model(ids, use_cache=True).logits)
            torch.testing.assert_close(texts[1], texts[0], rtol=1e-4, atol=1e-4)
            assert not graphed.graphs.made
    assert len(graphed.graphs.made) == 2  # made again after the text: of the last two shapes


def test_graphs_hold_the_memory_of_their_largest_shape() -> None:
    steps(on_gpu(dtype=torch.bfloat16), [(1, 64)] * 3)  # workspaces of libraries are not theirs
    most = []
    for graphs in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        opened = on_gpu(dtype=torch.bfloat16, cuda_graphs=graphs)
        steps(opened, [(8, 512)] * 3)
        if graphs:
            steps(opened, [(count, 512) for count in (2, 4, 6, 1) for _ in range(3)])
            assert len(opened.graphs.made) == 5
        torch.cuda.synchronize()
        if graphs:
            torch.cuda.empty_cache()
            most.append(torch.cuda.memory_reserved())
        else:
            most.append(torch.cuda.max_memory_reserved())
        del opened
    assert most[1] <= 1.1 * most[0] + (24 << 20)


def test_a_batch_that_needs_the_memory_of_graphs_gets_it(caplog) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plain = on_gpu(cuda_graphs=False)
    expected = plain.step(*rows(16, 512, 1), 0, RATE).loss
    most = torch.cuda.max_memory_reserved()
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    opened = on_gpu()
    opened.graphs.tokens = 8 * 512
    for step in range(3):
        opened.step(*rows(8, 512, 0), step, 0.0)
    assert opened.graphs.made
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((most + (64 << 20)) / total)
    try:
        assert opened.step(*rows(16, 512, 1), 3, RATE).loss == pytest.approx(expected, rel=1e-5)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not opened.graphs.made
    assert "no memory for CUDA graphs and what runs next to them" in caplog.text


def test_a_model_that_reads_values_on_the_host_runs_without_graphs(tmp_path, caplog) -> None:
    folder = str(save(tmp_path / "model", "gpt_neox"))
    losses = []
    for graphs in (False, True):
        values = {"rank": 2, "target_modules": ("query_key_value",), "cuda_graphs": graphs}
        session: Any = open_session(
            load_model(folder, device="cuda"), method_config("lora", values), 3
        )
        losses.append(steps(session))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert not session.graphs.made
    assert caplog.text.count("waits for values on the host") == 1


class Ended:
    """What is only collected as garbage, as it holds itself."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.itself = graph, self


def test_a_graph_of_an_ended_session_stays_while_another_is_recorded() -> None:
    tensor = torch.zeros(1, device="cuda")

    def add() -> None:
        tensor.add_(1)

    ended = Ended(CudaRecord(tensor.device)(add))
    held, alive, before = weakref.ref(ended), [], gc.get_threshold()
    del ended

    def add_with_garbage() -> None:
        gc.set_threshold(1)
        alive.append([[number] for number in range(100)] and held() is not None)
        add()

    try:
        CudaRecord(tensor.device)(add_with_garbage)()
    finally:
        gc.set_threshold(*before)
    assert alive == [True] and float(tensor) == 1.0


def test_after_a_broken_capture_steps_go_on_and_other_sessions_make_graphs() -> None:
    """In a process of its own: what is left of a broken capture stays in PyTorch's allocator."""
    call = "from tests.methods.lora.test_gpu_graphs import break_a_capture; break_a_capture()"
    ended = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("CUDA graphs cannot hold the passes") == 1


def break_a_capture() -> None:
    logging.basicConfig()
    torch.backends.cuda.matmul.allow_tf32 = False
    plain, broken = (on_gpu(cuda_graphs=graphs) for graphs in (False, True))
    hidden = broken.family.hidden

    def reads(ids: Any, **more: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():  # a rehearsal does not see it
            ids.sum().item()
        return hidden(ids, **more)

    broken.family.hidden = reads
    losses = steps(plain)
    assert steps(broken) == pytest.approx(losses, rel=1e-5)
    assert not broken.graphs.made and broken.graphs.record is None
    another = on_gpu()
    assert steps(another) == pytest.approx(losses, rel=1e-5) and len(another.graphs.made) == 3
