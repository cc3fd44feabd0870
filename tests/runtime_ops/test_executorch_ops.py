"""Every op called through a lowered program in the ExecuTorch runtime, against float32 PyTorch, at
odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ondevice.runtime_ops import build, generator, golden, native, quantized, torch_ops

exir = pytest.importorskip("executorch.exir")
OPS = torch.ops.ondevice
ROWS = (1, 7, 130)


@pytest.fixture(scope="module")
def run():
    """Lowers a module for example inputs and returns a function that runs it."""
    build.load_executorch_ops()
    from executorch.runtime import Runtime

    alive = []

    def lower(module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes=None):
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
        lowered = exir.to_edge_transform_and_lower(program).to_executorch()
        operators = lowered.executorch_program.execution_plan[0].operators
        assert any(operator.name.startswith("ondevice::") for operator in operators)
        loaded = Runtime.get().load_program(lowered.buffer)
        method = loaded.load_method("forward")
        alive.append((lowered, loaded))  # a method does not keep its program alive
        return lambda *values: method.execute(list(values))

    return lower


class Call(nn.Module):
    """Calls an op with buffers after the inputs, once for each input."""

    def __init__(self, op, *buffers: Tensor, extra: tuple = ()) -> None:
        super().__init__()
        self.op, self.extra = op, extra
        for i, buffer in enumerate(buffers):
            self.register_buffer(f"b{i}", buffer)
        self.count = len(buffers)

    def forward(self, *inputs):
        buffers = [getattr(self, f"b{i}") for i in range(self.count)]
        return tuple(self.op(x, *buffers, *self.extra) for x in inputs)


class Loss(Call):
    """Calls a cross-entropy op for pairs of hidden states and labels."""

    def forward(self, *inputs):
        buffers = [getattr(self, f"b{i}") for i in range(self.count)]
        return tuple(
            self.op(h, *buffers, y) for h, y in zip(inputs[::2], inputs[1::2], strict=True)
        )


def assert_close(result: Tensor, expected: Tensor) -> None:
    error = (result.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error <= 1e-5, f"relative error {error:.2e}"


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (192, 576)])
def test_q4_linear_matches_the_reference(run, outputs, inputs):
    torch.manual_seed(0)
    weight = quantized.quantize_q4(torch.randn(outputs, inputs))
    examples = (*(torch.randn(rows, inputs) for rows in ROWS), torch.randn(2, 3, inputs))
    results = run(Call(OPS.q4_linear, *weight, extra=(32,)), examples)(*examples)
    for x, result in zip(examples, results, strict=True):
        assert result.shape == (*x.shape[:-1], outputs)
        assert_close(result, x @ quantized.dequantize_q4(*weight).T)


def test_q4_linear_of_any_number_of_rows(run):
    torch.manual_seed(0)
    weight = quantized.quantize_q4(torch.randn(33, 64))
    rows = torch.export.Dim("rows", min=2, max=256)
    program = run(Call(OPS.q4_linear, *weight, extra=(32,)), (torch.randn(5, 64),), (({0: rows},),))
    for count in (2, 131, 256):
        x = torch.randn(count, 64)
        assert_close(program(x)[0], x @ quantized.dequantize_q4(*weight).T)


def test_q8_embedding_matches_the_reference(run):
    torch.manual_seed(0)
    weight = quantized.quantize_q8_rows(torch.randn(1000, 33))
    examples = (torch.tensor([999]), torch.randint(0, 1000, (7, 130)))
    program = run(Call(OPS.q8_embedding, *weight), examples)
    for ids, result in zip(examples, program(*examples), strict=True):
        torch.testing.assert_close(
            result, quantized.dequantize_q8_rows(*weight)[ids], rtol=0, atol=0
        )
    with pytest.raises(RuntimeError):
        program(torch.tensor([1000]), examples[1])


@pytest.mark.parametrize("quantize", [False, True])
def test_cross_entropy_matches_the_reference(run, quantize):
    torch.manual_seed(0)
    weight = torch.randn(1000, 64)
    head = quantized.quantize_q8_rows(weight)
    dense = quantized.dequantize_q8_rows(*head) if quantize else weight
    inputs: list[Tensor] = []
    for rows in ROWS:
        labels = torch.randint(0, 1000, (rows,))
        labels[1::3] = -100
        inputs += [torch.randn(rows, 64), labels]
    only = torch.full((130,), -100)
    inputs += [torch.randn(130, 64), only]
    one = only.clone()
    one[77] = 999
    inputs += [torch.randn(130, 64), one]
    op = OPS.q8_linear_cross_entropy if quantize else OPS.linear_cross_entropy
    program = run(Loss(op, *(head if quantize else (weight,))), tuple(inputs))
    for hidden, labels, result in zip(inputs[::2], inputs[1::2], program(*inputs), strict=True):
        expected = nn.functional.cross_entropy(
            hidden @ dense.T, labels, reduction="none", ignore_index=-100
        )
        assert (result[labels == -100] == 0).all()
        assert_close(result, expected)
    inputs[1] = torch.tensor([1000])
    with pytest.raises(RuntimeError):
        program(*inputs)


class Draw(nn.Module):
    def forward(self, seed, step):
        return tuple(
            op(seed, step, 3, 2, start, count)
            for op in (OPS.normal, OPS.rademacher)
            for start, count in ((0, 640), (63, 1001), (1, 1))
        )


def test_the_generator_matches_the_reference(run):
    def words(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([seed]), torch.tensor([step])

    program = run(Draw(), words(0, 0))
    for seed, step in ((2**63 - 1, 7), (42, 20_000)):
        results = iter(program(*words(seed, step)))
        for kind, tolerance in (("normal", 1e-6), ("rademacher", 0.0)):
            for start, count in ((0, 640), (63, 1001), (1, 1)):
                result = next(results)
                expected = getattr(generator, kind)(seed, step, 3, 2, start, count)
                torch.testing.assert_close(
                    result, torch.from_numpy(expected), rtol=0, atol=tolerance
                )
                if native.library() is not None:
                    same = native.draw(kind, *words(seed, step), 3, 2, start, count)
                    assert torch.equal(result, same), (
                        "the runtime and the compiled CPU op give other bits"
                    )


class Golden(nn.Module):
    """Every golden case in one program: seed and step of each, then the tensors of the other ops'
    cases."""

    def forward(self, *inputs):
        given, results = iter(inputs), []
        for case in generator.read_golden():
            counters = (
                next(given),
                next(given),
                *(case[key] for key in ("tensor", "queries", "start", "count")),
            )
            results += [OPS.normal(*counters), OPS.rademacher(*counters)]
        for case in golden.read_ops():
            values = [
                next(given) if isinstance(v, np.ndarray) else v for v in golden.arguments(case)
            ]
            results.append(getattr(OPS, case["op"])(*values))
        return tuple(results)


def test_the_runtime_gives_the_golden_values(run):
    cases, others = generator.read_golden(), golden.read_ops()
    inputs = [torch.tensor([case[key]]) for case in cases for key in ("seed", "step")]
    arguments = [v for case in others for v in golden.arguments(case) if isinstance(v, np.ndarray)]
    inputs += [torch.from_numpy(v) for v in arguments]
    results = iter(run(Golden(), tuple(inputs))(*inputs))
    for case in cases:
        for kind, tolerance in (("normal", 1e-6), ("rademacher", 0.0)):
            np.testing.assert_allclose(next(results).numpy(), case[kind], rtol=0, atol=tolerance)
    for case in others:
        tolerance = golden.TOLERANCE * np.maximum(1.0, np.abs(case["out"]))
        assert (np.abs(next(results).reshape(-1).numpy() - case["out"]) <= tolerance).all(), case[
            "op"
        ]


def test_every_op_is_registered_with_the_runtime():
    from executorch.runtime import Runtime

    build.load_executorch_ops()
    names = Runtime.get().operator_registry.operator_names
    assert {f"ondevice::{name}.out" for name in torch_ops.OP_NAMES} <= set(names)
