"""Attached linear layers against autograd: outputs, gradients, and what the matrix is given."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

from ondevice.methods.lsp.config import ProjectorConfig  # noqa: E402
from ondevice.methods.lsp.linear import attach, detach, is_linear  # noqa: E402
from ondevice.methods.lsp.matrix import (  # noqa: E402
    Group,
    Matrix,
    Plane,
)
from tests.methods.lsp.dense import near, normal, sides  # noqa: E402

MAKERS = {
    "linear": lambda: nn.Linear(29, 41),
    "linear without bias": lambda: nn.Linear(29, 41, bias=False),
    "conv1d": lambda: Conv1D(41, 29),
}
each_layer = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
SHAPES = [(7, 29), (3, 5, 29), (29,), (2, 3, 1, 29)]


def layer(make: Any, dtype: Any = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().to(dtype)
        if module.bias is not None:
            nn.init.normal_(module.bias)
    return module


def matrix(module: Any, dtype: Any = torch.float32) -> Matrix:
    config = ProjectorConfig(subspace=13, nonzeros=4)
    projection = Matrix("w", tuple(module.weight.shape), 0, config, 5, Group(Plane(), "cpu"))
    projection.gradient = torch.zeros(projection.sizes, dtype=dtype)
    return projection


def passes(module: Any, x: Tensor, back: Tensor, learns: bool = True) -> tuple[Tensor, Any, Any]:
    """Output, and gradients of the input and the bias."""
    x = x.clone().requires_grad_(learns)
    y = module(x)
    y.backward(back)
    bias = None if module.bias is None else module.bias.grad
    return y.detach(), x.grad, bias


def projected(built: Matrix, gradient: Tensor) -> Tensor:
    p, q = sides(built.left, built.right)
    return p.T @ gradient.double() @ q


@each_layer
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "collected", "tolerance"),
    [
        (torch.float32, torch.float32, 3e-6),
        (torch.bfloat16, torch.float32, 2e-2),
        (torch.bfloat16, torch.bfloat16, 2e-2),
    ],
    ids=str,
)
def test_it_is_the_layer_but_for_the_weights_gradient(
    make: Any, shape: tuple[int, ...], dtype: Any, collected: Any, tolerance: float
) -> None:
    x, back = normal(*shape).to(dtype), normal(*shape[:-1], 41, seed=1).to(dtype)
    plain, module = layer(make, dtype), layer(make, dtype)
    projection = matrix(module, collected)
    attach(module, projection)
    if len(shape) == 1 and isinstance(plain, Conv1D):
        wanted = passes(plain, x[None], back[None])
        wanted = wanted[0][0], wanted[1][0], wanted[2]
    else:
        wanted = passes(plain, x, back)
    actual = passes(module, x, back)
    for one, other in zip(actual, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == dtype
            near(one, other, tolerance)
    assert module.weight.grad is None and plain.weight.grad is not None
    assert projection.gradient is not None and projection.gradient.dtype == collected
    near(projection.gradient, projected(projection, plain.weight.grad), tolerance)


@each_layer
def test_an_input_without_a_gradient_still_gives_the_weights(make: Any) -> None:
    x, back = normal(7, 29), normal(7, 41, seed=1)
    plain, module = layer(make), layer(make)
    projection = matrix(module)
    attach(module, projection)
    passes(plain, x, back, learns=False)
    assert passes(module, x, back, learns=False)[1] is None
    assert projection.gradient is not None
    near(projection.gradient, projected(projection, plain.weight.grad))


@each_layer
def test_without_gradients_nothing_is_collected(make: Any) -> None:
    module = layer(make)
    projection = matrix(module)
    attach(module, projection)
    with torch.no_grad():
        assert not module(normal(7, 29)).requires_grad
    assert projection.gradient is not None and not bool(projection.gradient.any())


@each_layer
def test_a_frozen_bias_stays_without_gradient(make: Any) -> None:
    module = layer(make)
    if module.bias is not None:
        module.bias.requires_grad_(False)
    attach(module, matrix(module))
    assert passes(module, normal(7, 29), normal(7, 41))[2] is None


@each_layer
def test_detach_restores_the_layer(make: Any) -> None:
    x, back, module = normal(7, 29), normal(7, 41, seed=1), layer(make)
    projection = matrix(module)
    own, named = module.forward, set(vars(module))
    attach(module, projection)
    assert module.forward != own and not module.weight.requires_grad
    detach(module)
    assert module.forward == own and set(vars(module)) == named
    detach(module)
    module.weight.requires_grad_(True)
    passes(module, x, back)
    assert (
        module.weight.grad is not None
        and projection.gradient is not None
        and not bool(projection.gradient.any())
    )


def test_only_layers_whose_forward_pass_is_known_are_attached() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    assert is_linear(nn.Linear(3, 4)) and is_linear(Conv1D(3, 4))
    attention = nn.MultiheadAttention(4, 2)
    for other in (
        Doubled(3, 4),
        attention.out_proj,
        nn.Embedding(3, 4),
        nn.Conv1d(3, 4, 1),
        nn.LayerNorm(4),
    ):
        assert not is_linear(other)
