"""Steps on preferences: gradients of weighted rows against float64 autograd of the whole loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.revffn.stored import stored_hidden
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import Weighing
from ondevice.models import load_model, open_model, save_tiny
from ondevice.models.load import tiny_model
from ondevice.nn.cross_entropy import WeighedRows
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


def whole_loss(
    name: str, reference: np.ndarray = REFERENCE, liked: np.ndarray = LIKED
) -> Callable[[Tensor, Tensor], Tensor]:
    shape = reference.shape

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        chosen = labels[:, 1:]
        logp = logits[:, :-1].double().log_softmax(-1)
        logp = logp.gather(2, chosen.clamp(min=0)[..., None])[..., 0] * (chosen >= 0)
        tokens = (chosen >= 0).sum(1).reshape(shape)
        rest = torch.from_numpy(reference), tokens, torch.from_numpy(liked), SETTINGS[name]
        return FORMULAS[name](logp.sum(1).reshape(shape), *rest)

    return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2"])
def test_mesp_learns_the_gradient_of_the_whole_loss(
    name: str, micro: Any, family: str, tmp_path: Path
) -> None:
    def opened_model() -> Any:
        if family != "gemma2":
            return tiny_model(family)
        return load_model(str(tmp_path / "model"))  # its blocks are differentiated by autograd

    if family == "gemma2":
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


def in_memory(model: Any, ids: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of all parameters by autograd in float64."""
    double = in_double(model)
    for parameter in double.parameters():
        parameter.requires_grad_(True)
    output = double(torch.from_numpy(ids), use_cache=False)
    loss = whole_loss("dpo")(output.logits, torch.from_numpy(labels))
    loss.backward()
    return loss.item(), {name: one.grad.numpy() for name, one in double.named_parameters()}


OFFLOADED = {
    "slideformer": {"micro_batch_size": 4},
    "slideformer, tiles": {"loss_tiles": 3},
    "lsp": {"project": False},
    "lsp, parts": {"project": False, "micro_batch_size": 2},
}


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("tied", [True, False])
def test_offloaded_layers_learn_the_gradient_of_the_whole_loss(name: str, tied: bool) -> None:
    ids, labels = pairs()
    values = {"compute": "float32", "threads": 1, **OFFLOADED[name]}
    opened = open_tiny(name.partition(",")[0], sizes={"tied": tied}, **values)
    loss = opened.weighted_step(ids, labels, weigh("dpo", labels), 0, 0.0).loss
    opened.engine.flush()
    ours = {}
    for unit in opened.engine.store.owned:
        moment = opened.engine.store.moments(unit).m.double().numpy() / (1 - opened.config.beta1)
        for piece in unit.pieces:
            part = moment[piece.offset : piece.offset + piece.numel]
            ours[piece.name] = part.reshape(piece.shape)
    opened.close()
    theirs, expected = in_memory(tiny_model("llama", tied=tied).model, ids, labels)
    assert loss == pytest.approx(theirs, rel=2e-6)
    assert max(errors(ours, expected).values()) < 2e-5


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("recompute", ["stored", "reversible"])
def test_reversible_blocks_learn_the_gradient_of_the_whole_loss(micro: Any, recompute: str) -> None:
    ids, labels = pairs()
    opened = open_tiny("revffn", micro_batch_size=micro, recompute=recompute)
    opened._begin(0, 0.0)
    batch = opened._batch(ids, labels)
    hidden = stored_hidden(opened.network, batch[0])
    logits = opened.family.final_norm(hidden) @ opened.family.head_weight.T
    theirs = whole_loss("dpo")(logits, batch[1])
    theirs.backward()
    expected = {name: one.grad.double().numpy() for name, one in opened.parameters.items()}
    for one in opened.parameters.values():
        one.grad = None
    found: dict[str, Tensor] = {}
    weighed = WeighedRows(weigh("dpo", labels))
    opened.passes.run(*batch, found.update, weighed)
    assert weighed.loss == pytest.approx(theirs.item(), rel=1e-5)
    ours = {name: one.double().numpy() for name, one in found.items()}
    assert max(errors(ours, expected).values()) < 1e-4
    assert opened.weighted_step(ids, labels, weigh("dpo", labels), 0, 1e-3).loss == weighed.loss


@pytest.mark.sampled
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("name", FORMULAS)
def test_mlx_learns_the_gradient_of_the_whole_loss(name: str, micro: Any, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    save_tiny(tmp_path / "model", "llama")
    ids, labels = pairs()
    config = method_config("mesp", {"micro_batch_size": micro, "rank": 3})
    opened = open_session(open_model(str(tmp_path / "model")), config, 3, backend="mlx")
    start = opened.adapter()
    random = np.random.default_rng(2)
    for key, value in start.tensors.items():
        if ".lora_B." in key:
            value[:] = 0.1 * random.standard_normal(value.shape)
    opened.load_adapter(start)
    loss = opened.weighted_step(ids, labels, weigh(name, labels), 0, 0.0).loss
    ours = {
        key: np.array(moments[0], np.float64) / (1 - config.beta1)
        for key, moments in opened.optimizer.moments.items()
    }
    theirs, expected = exact(
        load_model(str(tmp_path / "model")), start.tensors, config.scale, ids, labels,
        whole_loss(name),
    )  # fmt: skip
    assert loss == pytest.approx(theirs, rel=2e-6)
    assert max(errors(ours, expected).values()) < 2e-5
