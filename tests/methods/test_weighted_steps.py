"""Steps on preferences: gradients of weighted rows against float64 autograd of the whole loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ondevice.core.session import Weighing
from ondevice.models import load_model
from ondevice.models.load import tiny_model
from ondevice.objectives import Scores, objective
from tests.methods.mesp.reference import errors, exact, learned, rows, session
from tests.methods.reference import in_double, open_tiny
from tests.models.test_any_decoder import save
from tests.objectives.test_objectives import FORMULAS, SETTINGS

REFERENCE = np.random.default_rng(5).normal(-40, 3, (3, 2))
LIKED = np.array([True, False, True])


def pairs(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Six random rows of odd lengths: three pairs."""
    ids, labels = rows(6, 21, seed, 250)
    return ids % 250, labels


def weigh(name: str, labels: np.ndarray) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    tokens = (labels[:, 1:] >= 0).sum(1).reshape(3, 2)

    def weighed(nll: np.ndarray) -> tuple[float, np.ndarray]:
        scores = Scores(-nll.reshape(3, 2), REFERENCE, tokens, LIKED)
        graded = objective(name, **SETTINGS[name]).grade(scores)
        return graded.loss, -graded.coefficients.reshape(-1)

    return weighed


def whole_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        chosen = labels[:, 1:]
        logp = logits[:, :-1].double().log_softmax(-1)
        logp = logp.gather(2, chosen.clamp(min=0)[..., None])[..., 0] * (chosen >= 0)
        tokens = (chosen >= 0).sum(1).reshape(3, 2)
        rest = torch.from_numpy(REFERENCE), tokens, torch.from_numpy(LIKED), SETTINGS[name]
        return FORMULAS[name](logp.sum(1).reshape(3, 2), *rest)

    return loss


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_mesp_learns_the_gradient_of_the_whole_loss(
    name: str, micro: Any, family: str, tmp_path: Path
) -> None:
    def opened_model() -> Any:
        if family != "lfm2":
            return tiny_model(family)
        return load_model(str(tmp_path / "model"))  # its blocks are differentiated by autograd

    if family == "lfm2":
        save(tmp_path / "model", family)
    ids, labels = pairs()
    opened = session(opened_model(), micro_batch_size=micro)
    assert isinstance(opened, Weighing)
    tensors = opened.adapter().tensors
    loss, gradients = learned(opened, ids, labels, weigh(name, labels))
    theirs, expected = exact(
        opened_model(), tensors, opened.config.scale, ids, labels, whole_loss(name)
    )
    assert loss == pytest.approx(theirs, rel=2e-6)
    assert max(errors(gradients, expected).values()) < 2e-5


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("method", ["lora", "lora-fa", "full"])
def test_backpropagation_learns_the_gradient_of_the_whole_loss(method: str, micro: Any) -> None:
    ids, labels = pairs()
    opened = open_tiny(method, micro_batch_size=micro)
    gradients: dict[str, np.ndarray] = {}
    optimizer = opened.optimizers[0]
    optimizer.step = lambda rate: gradients.update(
        {name: one.grad.double().numpy().copy() for name, one in opened.parameters.items()}
    )
    loss = opened.weighted_step(ids, labels, weigh("dpo", labels), 0, 1e-3).loss
    model = in_double(opened.loaded.model)
    output = model(torch.from_numpy(ids), use_cache=False)
    expected = whole_loss("dpo")(output.logits, torch.from_numpy(labels))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=2e-6)
    theirs = {name: one.grad.numpy() for name, one in opened.parameters.items()}
    assert max(errors(gradients, theirs).values()) < 2e-5
