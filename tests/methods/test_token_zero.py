"""The token whose id is 0 is a label as any other: counted, and learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from ondevice.core.registry import methods
from tests.methods.reference import batch, open_tiny

ROUNDED = 0.02
"""Of a row's loss, by methods that compute in bfloat16; a label that is left out is a sixth of it."""
TORCH = [spec.name for spec in methods() if "torch" in spec.sessions]


@pytest.mark.parametrize("name", TORCH)
def test_the_token_of_id_0_is_counted_and_its_loss_is_added(name: str) -> None:
    session = open_tiny(name)
    ids, labels = batch(2)
    ids[0, -1] = labels[0, -1] = 0
    ids[1, -3] = labels[1, -3] = 0
    nll, counts = session.evaluate(ids, labels)
    assert counts.tolist() == [6, 5]
    with torch.no_grad():
        logits = open_tiny("full").family.model(input_ids=torch.from_numpy(ids)).logits.double()
    targets = torch.from_numpy(labels)[:, 1:].reshape(-1)
    each = functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), targets, reduction="none"
    )
    np.testing.assert_allclose(nll, each.reshape(2, -1).sum(1), rtol=ROUNDED)
