"""The ops of block programs through a lowered program in the ExecuTorch runtime, against float64, at odd
sizes."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from ondevice.methods.mesp.frozen import Q4, Int8
from ondevice.runtime_ops import block_ops, build, torch_ops
from ondevice.training.metrics import PeakMemory, resident_bytes

exir = pytest.importorskip("executorch.exir")
OPS = torch.ops.ondevice
FORMS = ("float", "int8", "q4")


class Calls(nn.Module):
    """Calls (op, arguments); those that are tensors come in."""

    def __init__(self, calls) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors):
        given = iter(tensors)
        return tuple(
            getattr(OPS, op)(*(next(given) if torch.is_tensor(v) else v for v in arguments))
            for op, arguments in self.calls
        )


def loaded(*calls):
    """One program of all calls, its method, and what that takes; a method reads its program, which
    has to outlive it."""
    torch_ops.register()
    build.load_executorch_ops()
    from executorch.runtime import Runtime

    tensors = [v for _, arguments in calls for v in arguments if torch.is_tensor(v)]
    program = torch.export.export(Calls(calls), tuple(tensors), strict=False)
    lowered = exir.to_edge_transform_and_lower(program).to_executorch()
    whole = Runtime.get().load_program(lowered.buffer)
    method = whole.load_method("forward")
    assert method is not None
    return (whole, lowered), method, tensors


def run(*calls):
    """Results of all calls, by one program."""
    program, method, tensors = loaded(*calls)
    results = [value.clone() for value in method.execute(tensors)]
    del program
    return results


def references(*calls):
    """The same in float64 PyTorch."""
    results = []
    for op, arguments in calls:
        wide = [
            v.double() if torch.is_tensor(v) and v.is_floating_point() else v for v in arguments
        ]
        results.append(REFERENCES[op](*wide))
    return results


REFERENCES = {
    "block_linear": block_ops._linear,
    "adapted_linear": block_ops._adapted,
    "narrow_linear": lambda x, a, scale: scale * x @ a.t(),
    "narrow_gradient": lambda left, right, scale: scale * left.t() @ right,
    "rms_norm": block_ops._norm,
    "rms_norm_backward": block_ops._norm_backward,
    "rotate": block_ops._rotate,
    "swiglu": lambda gate, up: nn.functional.silu(gate) * up,
    "swiglu_gate": block_ops._swiglu_gate,
    "attend": block_ops._attend,
    "attend_cached": block_ops._attend_cached,
    "attend_backward": block_ops._attend_backward,
    "head_step": block_ops._head,
    "block_adam": block_ops._adam,
}


def check(*calls, limit: float = 2e-6) -> None:
    for (op, _), result, expected in zip(calls, run(*calls), references(*calls), strict=True):
        error = (result.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error <= limit, f"{op}: relative error {error:.2e}"


def matrix(form: str, outputs: int, inputs: int):
    weight = torch.randn(outputs, inputs)
    if form == "float":
        return weight, None, None
    packed = (Q4() if form == "q4" else Int8()).pack("w", weight)
    return packed["w"], packed["w_scale"], packed.get("w_min")


def linear(
    form: str, rows: int, outputs: int, inputs: int, rank: int, transposed: bool, integers=False
):
    width, length = (inputs, outputs) if transposed else (outputs, inputs)
    added = [None] * 4
    if rank:
        shapes = ((width,), (rows, rank), (rank, width), (rows, width))
        added = [torch.randn(*shape) for shape in shapes]
    x = torch.randn(rows, length)
    return "block_linear", (x, *matrix(form, outputs, inputs), *added, 0.7, transposed, integers)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_products_with_frozen_matrices_match_float64(form, transposed):
    torch.manual_seed(0)
    # One row is multiplied without panels, and its scales come 16 groups at a time.
    wide = 608 if form == "q4" else 615
    sizes = [
        (1, 33, 64, 0),
        (1, 70, 96, 3),
        (1, 37, wide, 3),
        (13, 96, 32, 3),
        (130, 70, 576, 8),
        (29, 515, 96, 300),
    ]
    check(*(linear(form, *size, transposed) for size in sizes))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_integers_are_those_of_the_rounded_rows(transposed):
    torch.manual_seed(0)
    sizes = [(1, 33, 66, 0), (27, 35, 2053, 3), (130, 2050, 37, 8)]
    # A level that float32 rounds to the other side of a half is one of 254 of its group.
    check(*(linear("int8", *size, transposed, integers=True) for size in sizes), limit=3e-4)


def test_one_row_by_integers_is_what_it_is_among_others():
    # One row is multiplied without panels, 64 rows of W and 2,048 inputs at a time.
    torch.manual_seed(0)
    op, (x, *rest) = linear("int8", 3, 131, 2150, 0, False, integers=True)
    whole, one = run((op, (x, *rest)), (op, (x[1:2].contiguous(), *rest)))
    # Integers are exact: two sums of floats differ by how they are rounded.
    assert (whole[1] - one[0]).abs().max() <= 4 * torch.finfo().eps * whole[1].abs().max()


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_integers_with_four_bits_are_those_of_the_rounded_rows(transposed):
    torch.manual_seed(0)
    sizes = [
        (1, 33, 64, 0),
        (1, 37, 608, 3),
        (27, 35, 2080, 3),
        (130, 2050, 32, 8),
        (13, 70, 96, 300),
    ]
    # A level of x that float32 rounds to the other side of a half is one of 254 of its group, for
    # g W also one of W's row.
    check(*(linear("q4", *size, transposed, integers=True) for size in sizes), limit=3e-4)


@pytest.mark.parametrize(
    ("form", "transposed"), [("int8", False), ("int8", True), ("q4", False), ("q4", True)]
)
def test_an_outlier_costs_only_its_group_in_products_of_integers(form, transposed):
    torch.manual_seed(0)
    outputs, inputs = (576, 64) if transposed else (70, 576)
    op, (x, *rest) = linear(form, 13, outputs, inputs, 0, transposed, integers=True)
    x[:, 5] = 3000.0
    (result,) = run((op, (x, *rest)))
    (exact,) = references((op, (x, *rest[:-1], False)))
    matrix = block_ops.dense(*rest[:3]).double()
    if transposed and form == "q4":  # W is rounded too, and with an outlier that counts
        levels, rows = block_ops.in_8_bits(matrix, *(part.double() for part in rest[1:3]))
        matrix = levels * rows[:, None]
        exact = x.double() @ matrix
    of_outlier = 3000.0 * (matrix[5] if transposed else matrix[:, 5])
    error = (result.double() - exact).norm() / (exact - of_outlier).norm()
    # The outlier's 31 neighbours are lost, 0.23 of the norm; with a scale a row all 575 were.
    assert error <= 0.3


def test_groups_of_zeros_and_rows_that_are_not_finite_in_products_with_four_bits():
    torch.manual_seed(0)
    op, (x, *rest) = linear("q4", 4, 33, 64, 0, False, integers=True)
    x[0, :32] = 0.0
    x[1, 5] = float("inf")
    x[2, 63] = float("nan")
    x[3] = 0.0
    (result,) = run((op, (x, *rest)))
    assert result[0].isfinite().all() and (result[3] == 0).all()
    assert result[1].isnan().all() and result[2].isnan().all()


def test_a_row_that_is_not_finite_stays_so_in_products_of_integers():
    torch.manual_seed(0)
    op, (x, *rest) = linear("int8", 3, 33, 64, 0, False, integers=True)
    x[1, 5] = float("inf")
    x[2, 63] = float("nan")
    (result,) = run((op, (x, *rest)))
    assert result[0].isfinite().all() and result[1].isnan().all() and result[2].isnan().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_product_reads_its_adapter_where_a_vector_has_it(form):
    torch.manual_seed(0)
    calls = []
    for rows, outputs, inputs, rank in ((1, 37, 96, 3), (29, 70, 64, 9)):
        bias, into, x = torch.randn(outputs), torch.randn(rows, outputs), torch.randn(rows, inputs)
        places = (5, 11 + rank * inputs, rank)
        adapter = torch.randn(places[1] + rank * outputs + 2)
        frozen = matrix(form, outputs, inputs)
        calls.append(("adapted_linear", (x, *frozen, bias, adapter, into, *places, 0.7, False)))
    check(*calls)


def test_what_lies_between_products_matches_float64():
    torch.manual_seed(0)
    x, g = torch.randn(2, 37, 75)
    weight = torch.randn(75)
    check(
        ("narrow_linear", (x, torch.randn(19, 75), 0.5)),
        ("narrow_gradient", (torch.randn(37, 11), x, 0.5)),
        ("rms_norm", (x, weight, 1e-5)),
        ("rms_norm_backward", (x, weight, 1e-5, g, torch.randn(37, 75))),
        ("rotate", (torch.randn(2, 9, 3, 11), torch.randn(9, 4), torch.randn(9, 4), -1.0)),
        ("swiglu", (9 * x, g)),
        ("swiglu_gate", (9 * x, g, torch.randn(37, 75))),
        ("block_adam", (*torch.randn(3, 1001), torch.rand(1001), torch.tensor([4]), torch.tensor([0.1]),
                        0.9, 0.999, 1e-8, 0.01)),
    )  # fmt: skip


@pytest.mark.parametrize("window", [0, 40])
def test_attention_forward_and_backward_match_float64(window):
    torch.manual_seed(0)
    calls = []
    for rows, tokens, heads, kv_heads, width in (
        (2, 131, 4, 2, 20),
        (1, 5, 3, 1, 64),
        (1, 200, 2, 2, 33),
    ):
        q, g = torch.randn(2, rows, tokens, heads, width)
        k, v = torch.randn(2, rows, tokens, kv_heads, width)
        calls += [
            ("attend", (q, k, v, 0.2, window)),
            ("attend_backward", (g, q, k, v, 0.2, window)),
        ]
    check(*calls)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory can be reset on Linux")
def test_attention_over_a_long_row_takes_less_memory_than_the_scores_of_one_head():
    tokens = 2048
    q, k, v, g = torch.randn(4, 1, tokens, 4, 8)
    program, method, tensors = loaded(
        ("attend", (q, k, v, 0.2, 0)), ("attend_backward", (g, q, k, v, 0.2, 0))
    )
    before = resident_bytes()
    peak = PeakMemory()
    method.execute(tensors)
    assert peak.resident_bytes() - before < tokens * tokens * q.element_size()
    del program


def test_attention_to_a_cache_matches_float64_and_reads_nothing_behind_its_tokens():
    torch.manual_seed(0)
    calls = []
    for tokens, heads, kv_heads, width, context, start in (
        (131, 4, 2, 20, 333, 77),
        (1, 3, 1, 64, 50, 49),
        (5, 2, 2, 33, 40, 0),
        (1, 6, 2, 22, 37, 18),
        (1, 2, 2, 8, 5, 5),
    ):
        q = torch.randn(1, tokens, heads, width)
        k, v = torch.randn(2, 1, tokens, kv_heads, width)
        keys = torch.randn(kv_heads, width, context)
        values = torch.randn(kv_heads, context, width)
        calls.append(("attend_cached", (q, k, v, keys, values, torch.tensor([start]), 0.2)))
    check(*calls)
    some = calls[0], calls[3]
    first = run(*some)
    for (_, arguments), start in zip(some, (77, 18)):
        arguments[3][..., start:] = arguments[4][:, start:] = float("nan")
    assert all(map(torch.equal, run(*some), first))


def test_a_start_outside_the_cache_is_refused():
    x = torch.randn(1, 2, 1, 8)
    with pytest.raises(RuntimeError):
        run(
            (
                "attend_cached",
                (x, x, x, torch.zeros(1, 8, 4), torch.zeros(1, 4, 8), torch.tensor([5]), 1.0),
            )
        )


def test_the_head_in_one_pass_matches_float64():
    torch.manual_seed(0)
    for form in ("float", "int8"):
        weight, scales, _ = matrix(form, 1503, 40)
        x = torch.randn(300, 40)
        x[4] = 9 * x[4]  # near a probability of 1
        labels = torch.randint(0, 1503, (300,))
        labels[::3] = -1
        labels[4] = (x[4] @ block_ops.dense(weight, scales, None).t()).argmax()
        call = ("head_step", (x, weight, scales, labels, torch.rand(300), False))
        check(call)
        (result,) = run(call)
        assert (result[::3] == 0).all()
        (expected,) = references(call)
        assert (result[4].double() - expected[4]).norm() <= 1e-4 * expected[4].norm()


def test_the_head_in_integers_keeps_the_gradients_direction():
    torch.manual_seed(0)
    weight, scales, _ = matrix("int8", 1503, 64)
    arguments = torch.randn(60, 64), weight, scales, torch.randint(0, 1503, (60,)), torch.rand(60)
    (result,) = run(("head_step", (*arguments, True)))
    (expected,) = references(("head_step", (*arguments, False)))
    cosine = nn.functional.cosine_similarity(
        result[:, 1:].double().flatten(), expected[:, 1:].flatten(), 0
    )
    assert cosine >= 0.999


def test_a_label_outside_the_vocabulary_is_refused():
    weight = torch.randn(7, 8)
    with pytest.raises(RuntimeError):
        run(
            (
                "head_step",
                (torch.randn(2, 8), weight, None, torch.tensor([0, 7]), torch.ones(2), False),
            )
        )
