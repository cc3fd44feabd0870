"""Frozen weights in 4 and 8 bits: the modules against their dequantised weights, and a model of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ondevice.core.errors import ModelError
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.torch import PrgeSession
from ondevice.models.load import tiny_model
from ondevice.nn.quantized import GROUP, Q4Linear, Q8Embedding, quantize_q4_model
from ondevice.runtime_ops import torch_ops
from ondevice.runtime_ops.quantized import dequantize_q4, dequantize_q8_rows

torch_ops.register()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (32, 33), (96, 1)])
def test_a_linear_computes_with_its_dequantised_weight(inputs, outputs, bias) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias)
    module = Q4Linear(linear)
    weight = dequantize_q4(module.packed, module.scales, module.mins, GROUP)
    assert weight.shape == linear.weight.shape and list(module.parameters()) == []
    groups = linear.weight.detach().reshape(outputs, -1, GROUP)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (weight - linear.weight.detach()).reshape(outputs, -1, GROUP).abs().amax(-1)
    assert (error <= 0.51 * step + 1e-3 * groups.abs().amax(-1)).all()
    x = torch.randn(2, 3, inputs)
    torch.testing.assert_close(
        module(x), functional.linear(x, weight, linear.bias), rtol=1e-5, atol=1e-5
    )


def test_an_embedding_and_its_loss_read_one_table() -> None:
    torch.manual_seed(0)
    table = torch.randn(37, 32)
    module = Q8Embedding(table)
    weight = dequantize_q8_rows(module.weight, module.scales)
    assert (weight - table).abs().max() <= table.abs().max() / 127
    ids = torch.tensor([[0, 36], [5, 5]])
    torch.testing.assert_close(module(ids), weight[ids])
    hidden, labels = torch.randn(6, 32), torch.tensor([0, 36, -100, 5, 7, -100])
    expected = functional.cross_entropy(
        hidden @ weight.T, labels, ignore_index=-100, reduction="none"
    )
    torch.testing.assert_close(module.token_nll(hidden, labels), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_a_model_is_the_model_of_its_dequantised_weights(family, tied) -> None:
    loaded, plain = tiny_model(family, tied=tied), tiny_model(family, tied=tied)
    table = quantize_q4_model(loaded.family)
    assert (table is loaded.family.embedding) == tied
    for layer in range(loaded.dims.layers):
        for target in loaded.family.linear_targets:
            module = loaded.family.linear(layer, target)
            assert isinstance(module, Q4Linear)
            with torch.no_grad():
                weight = dequantize_q4(module.packed, module.scales, module.mins, GROUP)
                plain.family.linear(layer, target).weight.copy_(weight)
    embedding = loaded.family.embedding
    with torch.no_grad():
        plain.family.embedding.weight.copy_(dequantize_q8_rows(embedding.weight, embedding.scales))
        if not tied:
            plain.family.head_weight.copy_(dequantize_q8_rows(table.weight, table.scales))
    random = np.random.default_rng(0)
    ids = random.integers(0, 256, (2, 12))
    config = PrgeConfig(queries=2, rank=4)
    expected, received = PrgeSession(plain, config, 1), PrgeSession(loaded, config, 1)
    received.program.token_loss = table.token_nll
    ours, theirs = (s.step(ids, ids, 0, 0.1) for s in (received, expected))
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    np.testing.assert_allclose(ours.projected_gradients, theirs.projected_gradients, atol=2e-3)


def test_inputs_that_are_no_multiple_of_the_group_are_refused() -> None:
    with pytest.raises(ModelError):
        Q4Linear(nn.Linear(40, 8))
