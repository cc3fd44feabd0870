"""The op-free form: equal to the reference in eager and in the ExecuTorch runtime, from graph
inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ondevice.runtime_ops import generator, graph

FORMS = [
    (graph.aten_normal, generator.normal, 1e-6),
    (graph.aten_rademacher, generator.rademacher, 0.0),
]


class Draw(torch.nn.Module):
    """Draws from one stream; `seed` and `step` are inputs of the program."""

    def __init__(self, form, *arguments: int) -> None:
        super().__init__()
        self.form, self.arguments = form, arguments

    def forward(self, seed, step):
        return self.form(seed, step, *self.arguments)


def scalar(value: int) -> torch.Tensor:
    return torch.tensor([graph.signed(value)], dtype=torch.int64)


def run_lowered(program):
    executorch = pytest.importorskip("executorch.exir")
    from executorch.runtime import Runtime

    from ondevice.exporters.executorch.shortcuts import shortcuts

    with shortcuts():
        lowered = executorch.to_edge_transform_and_lower(
            program, compile_config=graph.edge_compile_config()
        )
        buffer = lowered.to_executorch().buffer
    loaded = Runtime.get().load_program(buffer)
    method = loaded.load_method("forward")

    def run(*inputs, _alive=(buffer, loaded)):  # the method does not keep its program alive
        return method.execute(list(inputs))

    return run


@pytest.mark.parametrize(("form", "reference", "tolerance"), FORMS)
def test_graphs_give_the_golden_values(form, reference, tolerance):
    for case in generator.read_golden():
        values = form(
            scalar(case["seed"]),
            scalar(case["step"]),
            *(case[k] for k in ("tensor", "queries", "start", "count")),
        )
        assert values.dtype == torch.float32
        np.testing.assert_allclose(values.numpy(), case[reference.__name__], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("form", "reference", "tolerance"), FORMS)
@pytest.mark.parametrize("arguments", [(3, 4, 63, 1001), (0, 2, 128, 640), (7, 1, 1, 1)])
def test_lowered_program_reproduces_the_reference_for_any_seed_and_step(
    form, reference, tolerance, arguments
):
    program = torch.export.export(Draw(form, *arguments), (scalar(1), scalar(2)))
    run = run_lowered(program)
    for seed, step in ((2**63 - 1, 7), (0, 0), (42, 20_000)):
        (values,) = run(scalar(seed), scalar(step))
        np.testing.assert_allclose(
            values.numpy(), reference(seed, step, *arguments), rtol=0, atol=tolerance
        )


def test_given_keys_are_used():
    keys = graph.aten_keys(scalar(5), scalar(6), 1, 3)
    expected = [generator.stream_key(5, 6, query, 1) for query in range(3)]
    assert [int(key) & generator.MASK64 for key in keys[:, 0]] == expected
    for form, _, _ in FORMS:
        a = form(scalar(5), scalar(6), 1, 3, 10, 100)
        torch.testing.assert_close(
            form(scalar(0), scalar(0), 1, 3, 10, 100, keys=keys), a, rtol=0, atol=0
        )


class ManyRanges(torch.nn.Module):
    def forward(self, seed, step):
        draws = [graph.aten_rademacher(seed, step, 0, 2, start, 64) for start in range(0, 512, 64)]
        return draws[0], torch.cat(draws, dim=1)


def test_deduplication_keeps_results_and_drops_repeated_keys():
    inputs = (scalar(11), scalar(12))
    program = torch.export.export(ManyRanges(), inputs)
    expected = generator.rademacher(11, 12, 0, 2, 0, 512)
    smaller = graph.deduplicate(program)
    assert len(smaller.graph.nodes) < 0.5 * len(program.graph.nodes)
    first, whole = run_lowered(smaller)(*inputs)
    np.testing.assert_array_equal(whole.numpy(), expected)
    np.testing.assert_array_equal(first.numpy(), expected[:, :64])


class Counter(torch.nn.Module):
    """The same expression before and after a buffer changes: it must be computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(3))

    def forward(self, x):
        before = self.state * x
        self.state.add_(1.0)
        return before, self.state * x


def test_deduplication_respects_buffers_that_change():
    program = graph.deduplicate(torch.export.export(Counter(), (torch.ones(3),)))
    before, after = program.module()(torch.ones(3))
    assert before.tolist() == [1.0] * 3 and after.tolist() == [2.0] * 3
