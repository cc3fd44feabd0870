"""Full fine-tuning: gradients against autograd of the plain loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ondevice.models.load import tiny_model
from tests.methods.reference import batch, in_double, open_tiny, plain_loss


def full_gradients(
    family: str, sizes: dict, ids: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    model = in_double(tiny_model(family, **sizes).model).requires_grad_(True)
    loss = plain_loss(
        model(torch.from_numpy(ids), use_cache=False).logits, torch.from_numpy(labels)
    )
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("qwen2", {"tied": False, "layers": 1, "vocab": 263}),
        ("gpt2", {"tied": False}),
        ("mistral", {}),
    ],
)
def test_full_gradients_are_those_of_the_plain_loss(family, sizes) -> None:
    target = open_tiny("full", family, sizes)
    ids, labels = batch(3)
    loss, expected = full_gradients(family, sizes, ids, labels)
    assert target.step(ids, labels, 0, 0.0).loss == pytest.approx(loss, rel=2e-6)
    state = target.state()
    for key, gradient in expected.items():
        scale = max(np.abs(gradient).max(), 1e-6)
        np.testing.assert_allclose(
            state[f"exp_avg/{key}"] / 0.1, gradient, atol=2e-4 * scale, err_msg=key
        )
