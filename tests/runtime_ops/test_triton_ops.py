"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib
import os

import numpy as np
import pytest
import torch

from ondevice.core.errors import ConfigError, ModelError
from ondevice.runtime_ops import generator, native
from tests.interpreter import needs_interpreter

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = () if CUDA else needs_interpreter
KINDS = [("normal", 1e-6), ("rademacher", 0.0)]


@pytest.fixture(scope="module")
def ops():
    if CUDA:
        return importlib.import_module("ondevice.runtime_ops.triton_ops")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
    try:
        with np.errstate(over="ignore"):
            return importlib.reload(importlib.import_module("ondevice.runtime_ops.triton_ops"))
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
def test_triton_gives_the_golden_values(ops, kind, tolerance):
    for case in generator.read_golden():
        values = ops.draw(
            word(case["seed"]),
            word(case["step"]),
            *(case[k] for k in ("tensor", "queries", "start", "count")),
            kind=kind,
        )
        np.testing.assert_allclose(values.cpu().numpy(), case[kind], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("start", "count"), [(0, 4096), (1, 1023), (1000, 3001), (2**33 + 7, 130)])
@pytest.mark.parametrize("kind", ["normal", "rademacher"])
def test_same_bits_as_the_compiled_cpu_form(ops, kind, start, count):
    if native.library() is None:
        pytest.skip("no C++ compiler")
    values = ops.draw(word(-3), word(5), 1, 2, start, count, kind).cpu()
    expected = native.draw(kind, torch.tensor([-3]), torch.tensor([5]), 1, 2, start, count)
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_perturb_matches_the_reference(ops, kind, dtype, one_sided):
    size, queries, eps = 1500, 3, 1e-2
    flat = torch.linspace(-1, 1, size, device=DEVICE)
    copies = ops.perturb(flat, word(11), word(4), queries, eps, kind, dtype, one_sided)
    form = getattr(generator, generator.noise_kind(kind))
    z = torch.from_numpy(form(11, 4, 0, queries, 0, size)).to(DEVICE)
    if one_sided:
        expected = torch.cat([flat[None], flat + eps * z])
    else:
        expected = torch.cat([flat + eps * z, flat - eps * z])
    assert copies.dtype == dtype and copies.shape == expected.shape
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(copies.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_apply_update_matches_the_reference(ops, kind):
    size, queries = 1500, 3
    flat = torch.linspace(-1, 1, size, device=DEVICE)
    coefficients = torch.tensor([0.5, -0.25, 2.0], device=DEVICE)
    form = getattr(generator, generator.noise_kind(kind))
    z = torch.from_numpy(form(11, 4, 0, queries, 0, size)).to(DEVICE)
    updated = ops.apply_update(flat, word(11), word(4), coefficients, kind)
    torch.testing.assert_close(
        updated, flat - (coefficients[:, None] * z).sum(0), rtol=1e-5, atol=5e-6
    )


def test_wrong_arguments_are_refused(ops):
    with pytest.raises(ModelError) as error:
        ops.perturb(torch.zeros(2, 3, device=DEVICE), word(1), word(1), 1, 0.1, "gaussian")
    assert error.value.expected == "contiguous float32 [P]"
    flat, coefficients = (torch.zeros(n, device=DEVICE) for n in (3, 1))
    with pytest.raises(ConfigError) as error:
        ops.apply_update(flat, word(1), word(1), coefficients, "uniform")
    assert error.value.received == "uniform"


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_graph_reads_seed_and_step_from_the_device(ops):
    flat, seed, step = torch.zeros(5000, device=DEVICE), word(1), word(0)
    coefficients = torch.ones(2, device=DEVICE)
    ops.apply_update(flat, seed, step, coefficients, "gaussian")
    ops.perturb(flat, seed, step, 2, 0.1, "gaussian")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = ops.perturb(flat, seed, step, 2, 0.1, "gaussian")
        updated = ops.apply_update(flat, seed, step, coefficients, "gaussian")
    for value in (3, 4):
        step.fill_(value)
        graph.replay()
        z = generator.normal(1, value, 0, 2, 0, 5000)
        np.testing.assert_allclose(copies[:2].cpu().numpy(), 0.1 * z, atol=1e-6)
        np.testing.assert_allclose(updated.cpu().numpy(), -z.sum(0), atol=2e-6)
