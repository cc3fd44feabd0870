"""The ops in PyTorch: opcheck, the compiled library and the plain form against references,
refusals."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.library import opcheck

from ondevice.core.errors import ConfigError, DataError, ModelError
from ondevice.runtime_ops import (
    build,
    generator,
    golden,
    golden_blocks,
    native,
    quantized,
    torch_ops,
)

OPS = torch.ops.ondevice


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.fixture(params=["native", "plain"])
def form(request, monkeypatch) -> str:
    """Runs a test with the compiled library and without it."""
    if request.param == "plain":
        monkeypatch.setattr(native, "library", lambda: None)
    elif not torch_ops.native_available():
        pytest.skip("no C++ compiler")
    return request.param


def samples() -> dict[str, tuple]:
    torch.manual_seed(0)
    weight, table = torch.randn(33, 64), torch.randn(100, 16)
    labels = torch.tensor([1, -100, 99])
    q8 = quantized.quantize_q8_rows(table)
    return {
        "normal": (word(1), word(2), 0, 2, 3, 100),
        "rademacher": (word(1), word(2), 0, 2, 3, 100),
        "q4_linear": (torch.randn(2, 7, 64), *quantized.quantize_q4(weight), 32),
        "q8_embedding": (torch.tensor([[0, 99], [5, 5]]), *q8),
        "q8_linear_cross_entropy": (torch.randn(3, 16), *q8, labels),
        "linear_cross_entropy": (torch.randn(3, 16), table, labels),
        **{case["op"]: tensors(case) for case in golden_blocks.cases()},
    }


def tensors(case: dict) -> tuple:
    """A golden case's arguments."""
    return tuple(
        torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for value in golden.arguments(case)
    )


def test_samples_cover_every_op():
    assert sorted(samples()) == sorted(torch_ops.OP_NAMES)
    golden_ops = {case["op"] for case in golden.read_ops()}
    assert golden_ops | {"normal", "rademacher"} == set(torch_ops.OP_NAMES)


def test_the_readme_lists_every_op():
    text = (build.SOURCES.parent / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| .*\| .*\| .*\|$", text, re.MULTILINE)
    assert sorted(listed) == sorted(torch_ops.OP_NAMES)


@pytest.mark.parametrize("name", sorted(samples()))
def test_each_op_passes_opcheck(name):
    arguments = samples()[name]
    packet = getattr(OPS, name)
    opcheck(packet.default, arguments)
    # Out forms are for ExecuTorch's lowering; functionalisation refuses them by design.
    out = torch.empty_like(packet(*arguments))
    opcheck(packet.out, arguments, {"out": out}, test_utils=("test_schema", "test_faketensor"))
    torch.testing.assert_close(packet.out(*arguments, out=out), packet(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "tolerance"), [("normal", 1e-6), ("rademacher", 0.0)])
def test_each_form_gives_the_golden_values(form, kind, tolerance):
    for case in generator.read_golden():
        arguments = [case[k] for k in ("tensor", "queries", "start", "count")]
        values = getattr(OPS, kind)(word(case["seed"]), word(case["step"]), *arguments)
        np.testing.assert_allclose(values.numpy(), case[kind], rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", golden.read_ops(), ids=lambda case: case["op"])
def test_golden_values_of_the_other_ops(form, case):
    result = getattr(OPS, case["op"])(*tensors(case)).reshape(-1)
    tolerance = golden.TOLERANCE * np.maximum(1.0, np.abs(case["out"]))
    assert (np.abs(result.numpy() - case["out"]) <= tolerance).all()


@pytest.mark.parametrize(("kind", "tolerance"), [("normal", 1e-6), ("rademacher", 0.0)])
@pytest.mark.parametrize(
    ("start", "count"), [(0, 0), (0, 1), (1, 511), (511, 1027), (32_767, 70_001)]
)
def test_compiled_ranges_match_the_reference(kind, tolerance, start, count):
    if not torch_ops.native_available():
        pytest.skip("no C++ compiler")
    expected = getattr(generator, kind)(-5, 9, 1, 2, start, count)
    values = native.draw(kind, word(-5), word(9), 1, 2, start, count).numpy()
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance)


def test_compiled_normals_stay_close_over_many_and_are_never_nan():
    if not torch_ops.native_available():
        pytest.skip("no C++ compiler")
    values = native.draw("normal", word(8), word(8), 0, 1, 0, 1 << 20).numpy()
    assert np.abs(values - generator.normal(8, 8, 0, 1, 0, 1 << 20)).max() <= 1e-6


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 33, 64), (7, 96, 32), (130, 192, 576), (15, 31, 96)]
)
def test_q4_linear_matches_the_reference(form, rows, outputs, inputs):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    packed, scales, mins = quantized.quantize_q4(weight)
    expected = x.double() @ quantized.dequantize_q4(packed, scales, mins).double().T
    result = OPS.q4_linear(x, packed, scales, mins, 32).double()
    assert (result - expected).norm() / expected.norm() <= 1e-6
    three = OPS.q4_linear(x[None, :, None], packed, scales, mins, 32)
    torch.testing.assert_close(three.reshape(rows, outputs).double(), result, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "depth"), [(1, 33, 16), (7, 1000, 64), (130, 5000, 72), (300, 100, 8)]
)
def test_cross_entropy_matches_the_reference(form, rows, vocabulary, depth, quantize):
    torch.manual_seed(rows)
    hidden, weight = torch.randn(rows, depth), torch.randn(vocabulary, depth)
    labels = torch.randint(0, vocabulary, (rows,))
    labels[2::3] = -100
    labels[0], labels[-1] = vocabulary - 1, 0
    head = quantized.quantize_q8_rows(weight)
    dense = quantized.dequantize_q8_rows(*head) if quantize else weight
    expected = torch.nn.functional.cross_entropy(
        hidden.double() @ dense.double().T, labels, reduction="none", ignore_index=-100
    )
    if quantize:
        result = OPS.q8_linear_cross_entropy(hidden, *head, labels)
    else:
        result = OPS.linear_cross_entropy(hidden, weight, labels)
    assert (result[labels == -100] == 0).all()
    assert (result.double() - expected).norm() / expected.norm() <= 1e-6
    ignored = torch.full_like(labels, -100)
    assert OPS.linear_cross_entropy(hidden, weight, ignored).abs().max() == 0
    ignored[rows // 2] = 3
    one = OPS.linear_cross_entropy(hidden, weight, ignored)
    assert (one != 0).nonzero().flatten().tolist() == [rows // 2]


def test_cross_entropy_survives_large_logits_and_shows_nan(form):
    hidden, weight = torch.full((2, 8), 30.0), torch.eye(8).repeat(5, 1) * 10
    labels = torch.tensor([0, 1])
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
    torch.testing.assert_close(OPS.linear_cross_entropy(hidden, weight, labels), expected)
    hidden[1, 3] = float("nan")
    result = OPS.linear_cross_entropy(hidden, weight, labels)
    assert torch.isfinite(result[0]) and torch.isnan(result[1])


@pytest.mark.parametrize("threads", [2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads):
    if not torch_ops.native_available():
        pytest.skip("no C++ compiler")
    arguments = samples()
    before = torch.get_num_threads()
    try:
        # The ops of block programs run PyTorch's own kernels here.
        for name in sorted(set(torch_ops.OP_NAMES) - golden_blocks.OPS):
            torch.set_num_threads(1)
            one = getattr(OPS, name)(*arguments[name])
            torch.set_num_threads(threads)
            torch.testing.assert_close(getattr(OPS, name)(*arguments[name]), one, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


def test_gradients_reach_the_activations_or_are_refused(form):
    x, *weight, group = samples()["q4_linear"]
    x = x.clone().requires_grad_()
    OPS.q4_linear(x, *weight, group).square().sum().backward()
    dense, y = (
        quantized.dequantize_q4(*weight, group).double(),
        x.detach().double().requires_grad_(),
    )
    (y @ dense.T).square().sum().backward()
    # The bound of two products in a row: as many roundings as terms, of the sums of absolute
    # values.
    sizes = 2 * (y.detach().abs() @ dense.abs().T) @ dense.abs()
    bound = (sum(dense.shape) + 4) * 2.0**-24 * sizes
    assert bool(((x.grad.double() - y.grad).abs() <= bound).all())
    hidden, table, labels = samples()["linear_cross_entropy"]
    loss = OPS.linear_cross_entropy(hidden.requires_grad_(), table, labels).sum()
    with pytest.raises(ModelError) as error:
        loss.backward()
    assert "forward-only" in str(error.value.hint)


def test_embedding_matches_the_reference(form):
    ids = torch.tensor([[0, 99, 5], [7, 7, 7]])
    weight, scales = samples()["q8_embedding"][1:]
    expected = quantized.dequantize_q8_rows(weight, scales)[ids]
    torch.testing.assert_close(OPS.q8_embedding(ids, weight, scales), expected, rtol=0, atol=0)


def test_wrong_arguments_are_refused():
    x, packed, scales, mins, _ = samples()["q4_linear"]
    hidden, weight, labels = samples()["linear_cross_entropy"]
    for argument, call in {
        "x": lambda: OPS.q4_linear(x.double(), packed, scales, mins, 32),
        "packed": lambda: OPS.q4_linear(x, packed[:32], scales, mins, 32),
        "labels": lambda: OPS.linear_cross_entropy(hidden, weight, labels[:2]),
    }.items():
        with pytest.raises(ModelError) as error:
            call()
        assert error.value.message.split()[-1] == argument
    with pytest.raises(ModelError) as error:
        OPS.q4_linear(x[..., :48], packed, scales, mins, 32)
    assert (error.value.expected, error.value.received) == ("a multiple of 32", 48)
    with pytest.raises(ConfigError) as error:
        OPS.normal(word(1), word(1), 0, 1, -1, 4)
    assert "start -1" in error.value.received
    with pytest.raises(ConfigError) as error:
        torch_ops.noise("uniform")
    assert error.value.received == "uniform"


def test_ids_outside_the_vocabulary_are_refused(form):
    weight, scales = samples()["q8_embedding"][1:]
    hidden = torch.randn(3, 16)
    for bad in (100, -1):
        with pytest.raises(DataError) as error:
            OPS.q8_embedding(torch.tensor([0, bad]), weight, scales)
        assert error.value.received == bad
        with pytest.raises(DataError) as error:
            OPS.q8_linear_cross_entropy(hidden, weight, scales, torch.tensor([0, bad, 1]))
        assert error.value.received == bad


def test_each_form_names_its_backend(form):
    assert torch_ops.generator_backend() == ("native" if form == "native" else "aten")
    assert (
        torch_ops.noise("gaussian") is OPS.normal
        and torch_ops.noise("rademacher") is OPS.rademacher
    )
