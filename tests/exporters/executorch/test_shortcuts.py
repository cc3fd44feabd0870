"""The steps left out of a lowering change no byte of the program."""

from __future__ import annotations

import gc
import operator
from contextlib import nullcontext

import pytest

pytest.importorskip("executorch.exir")
torch = pytest.importorskip("torch")

from ondevice.core.manifest import TensorPort  # noqa: E402
from ondevice.core.program import ProgramModule  # noqa: E402
from ondevice.exporters.executorch import lower as lowering  # noqa: E402
from ondevice.exporters.executorch import shortcuts  # noqa: E402


class Attention(torch.nn.Module):
    """A masked attention between two linear layers, and a feed-forward part: each kind of operation
    of a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.up(x).chunk(3, -1)
        y = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + mask, -1) @ v
        y = torch.cat([y[..., 4:], y[..., :4]], -1)
        return self.down(
            torch.nn.functional.silu(y) * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)
        )


class Ordered(torch.nn.Module):
    """A sum over an image whose channels come last, in whole numbers, times other numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.to(torch.int32, memory_format=torch.channels_last)
        return whole.sum((2, 3)) * x[..., 0, 0]


class Five(torch.nn.Module):
    """One concatenation of many tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + 1, x * 2, x - 3, x * 4, x + 5, x * 6], -1)


def buffer(kind: type[torch.nn.Module]) -> bytes:
    ports = {
        Attention: (
            TensorPort(name="x", dtype="float32", shape=(2, 5, 8)),
            TensorPort(name="mask", dtype="float32", shape=(5, 5)),
        ),
        Ordered: (TensorPort(name="x", dtype="float32", shape=(2, 3, 4, 5)),),
    }[kind]
    module = ProgramModule("forward", kind(), ports, ports[:1])
    return lowering.lower([module]).buffer


@pytest.mark.parametrize("kind", [Attention, Ordered])
def test_the_program_has_the_same_bytes(kind: type[torch.nn.Module], monkeypatch) -> None:
    thresholds = gc.get_threshold()
    gc.unfreeze()
    ours = buffer(kind)
    assert gc.get_threshold() == thresholds and gc.get_freeze_count() == 0
    monkeypatch.setattr(lowering, "shortcuts", nullcontext)
    assert ours == buffer(kind)


def test_a_pass_that_a_program_needs_would_be_missed(monkeypatch) -> None:
    """Five tensors in one concatenation are more than XNNPACK joins at once."""
    port = TensorPort(name="x", dtype="float32", shape=(2, 8))
    module = ProgramModule("forward", Five(), (port,), (port,))
    lowering.lower([module])
    monkeypatch.setattr(shortcuts, "VISION", (*shortcuts.VISION, "DecomposeConcatenate"))
    with pytest.raises(Exception, match="cat"):
        lowering.lower([module])


def test_a_graph_that_is_changed_computes_what_it_says_now() -> None:
    """Its code is written late, and is whole for whoever calls or reads it, within the block and
    after."""
    x = torch.arange(16.0).reshape(2, 8)
    with shortcuts.shortcuts():
        graph = torch.fx.symbolic_trace(Five())
        assert torch.equal(graph(x), Five()(x))
        for node in graph.graph.nodes:
            if node.target is operator.mul:
                node.target = operator.truediv
        graph.recompile()
        assert "/" in graph.code and "*" not in graph.code
        inside = graph(x)
        graph.recompile()
    expected = torch.cat([x + 1, x / 2, x - 3, x / 4, x + 5, x / 6], -1)
    for actual in (inside, graph(x)):
        assert torch.equal(actual, expected)


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    before = gc.get_freeze_count()
    gc.unfreeze()
    try:
        with shortcuts.shortcuts():
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()
        gc.freeze()
        with shortcuts.shortcuts():
            pass
        assert gc.get_freeze_count()
    finally:
        if not before:
            gc.unfreeze()
