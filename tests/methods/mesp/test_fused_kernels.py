"""Graphs of the kernels that an exported block calls."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from ondevice.methods.mesp.fused import FusedKernels  # noqa: E402
from ondevice.methods.mesp.torch.kernels import Scores  # noqa: E402


class Backward(torch.nn.Module):
    """The attention's backward pass of one row: 2 heads of queries, 1 of keys and values."""

    def forward(self, g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        return FusedKernels().attend_backward(g, q, k, v, None, Scores(0.5))


def test_the_backward_pass_of_attention_has_no_op_with_a_list_of_outputs() -> None:
    """ExecuTorch's verifier asks each number of such an op's first output for its type: a lowering
    of SmolLM2's blocks took 70 s in place of 7."""
    q = torch.randn(1, 5, 2, 4)
    k, v = torch.randn(1, 5, 1, 4), torch.randn(1, 5, 1, 4)
    graph = torch.export.export(Backward(), (torch.randn_like(q), q, k, v)).graph
    lists = [
        str(node.target)
        for node in graph.nodes
        for returned in getattr(getattr(node.target, "_schema", None), "returns", ())
        if isinstance(returned.type, torch.ListType)
    ]
    assert any("attend_backward" in str(node.target) for node in graph.nodes)
    assert not lists
