"""Decoders whose blocks are not known: the engine against AdamW in memory, by transformers' own backward pass."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lsp.adamw import LspAdamW
from ondevice.core.errors import ModelError
from ondevice.methods.lsp.config import LspConfig, ProjectorConfig
from ondevice.methods.lsp.engine import LspEngine
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.nn.cross_entropy import WeighedRows
from ondevice.offload.engine import OffloadEngine
from tests.models.decoders import DECODERS, tiny_config

STEPS, RATE, EPS = 4, 2e-4, 1e-4
ACROSS_A_REFRESH = 7
REFUSED: dict[str, str] = {}
"""What the refusal of a type says."""


def decoder(model_type: str, **fields: Any) -> Any:
    """A model with values that show every parameter's gradient."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type].from_dict(tiny_config(model_type, **fields))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def data(count: int = STEPS) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    found = []
    for _ in range(count):
        ids = random.integers(0, 256, (4, 12))
        labels = ids.copy()
        labels[:, :3] = -100
        labels[2, 7:] = -100
        found.append((ids, labels))
    return found


def engine_of(model: Any, device: str = "cpu", **config: Any) -> OffloadEngine:
    settings = {"compute": "float32", "timeout_s": 120.0, "threads": 1, "eps": EPS, **config}
    return OffloadEngine(AnyDecoder(model), SlideformerConfig(**settings), device)


def in_memory(model: Any, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same steps by torch's AdamW."""
    trained = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, eps=EPS, weight_decay=0.0)
    losses = []
    for ids, labels in data(steps):
        optimizer.zero_grad()
        logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, :-1]
        targets = torch.from_numpy(labels)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, trained


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_decoder_is_trained_as_in_memory(model_type: str) -> None:
    """Losses within 1e-5. The rate is low: at 1e-3 a change of 1e-7 in the weights of gemma4_text
    moves the losses of a run in memory by 2e-4."""
    model = decoder(model_type)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected, weights = in_memory(copy.deepcopy(model))
    if model_type in REFUSED:
        with pytest.raises(ModelError) as caught:
            train(model)
        assert REFUSED[model_type] in caught.value.message
        return
    losses, trained = train(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    same_weights(trained, weights, before)


def same_weights(
    trained: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
) -> None:
    """Each tensor is within 1e-3 of what it moved, or 1e-6 of itself."""
    assert trained.keys() == weights.keys()
    for name, value in weights.items():
        moved = float((value - before[name]).norm())
        away = float((trained[name] - value).norm())
        assert away <= max(1e-3 * moved, 1e-6 * float(value.norm())), name


def train(
    model: Any, steps: int = STEPS, **config: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_of(model, **config)
    try:
        losses = [engine.step(*batch, step, RATE) for step, batch in enumerate(data(steps))]
        engine.flush()
        return losses, engine.store.masters()
    finally:
        engine.close()


SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SETTINGS: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 3},
    {"micro_batch_size": 2, "activations": "disk", "disk_fraction": 1.0},
    {"activations": "device", "resident_layers": 1, "resident_tables": True},
    {"window": 2, "gradient_buffers": 2, "max_grad_norm": 1e9, "clip": "global"},
]


@pytest.mark.sampled
@pytest.mark.parametrize("model_type", ["gemma2", "gemma4_text", "gpt_oss", "lfm2", "bloom"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_placements_and_micro_batches_train_the_same(
    model_type: str, settings: dict[str, Any]
) -> None:
    fields = SHARED if model_type == "gemma4_text" else {}
    model = decoder(model_type, **fields)
    expected, _ = train(copy.deepcopy(model))
    losses, _ = train(model, **settings)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_keys_and_values_that_later_blocks_read_get_their_gradients() -> None:
    """Both kinds of layers write into one dictionary, from which the last two read."""
    model = decoder("gemma4_text", **SHARED)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected, weights = in_memory(copy.deepcopy(model), 3)
    losses, trained = train(model, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    same_weights(trained, weights, before)


@pytest.mark.parametrize("model_type", ["gemma2", "lfm2"])
def test_evaluation_is_transformers_own(model_type: str) -> None:
    model = decoder(model_type)
    ids, labels = data(1)[0]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, :-1]
    targets = torch.from_numpy(labels)[:, 1:]
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    engine = engine_of(model, micro_batch_size=3)
    try:
        losses, counts = engine.evaluate(ids, labels)
    finally:
        engine.close()
    np.testing.assert_allclose(losses, nll.sum(1).numpy(), rtol=1e-5)
    assert counts.tolist() == (labels[:, 1:] != -100).sum(1).tolist()


def test_bfloat16_follows_float32() -> None:
    model = decoder("gemma2")
    exact, _ = train(copy.deepcopy(model))
    losses, _ = train(model, compute="bfloat16", micro_batch_size=2)
    np.testing.assert_allclose(losses, exact, rtol=2e-2)


def test_a_model_that_leaves_out_a_block_is_refused() -> None:
    model = decoder("gemma2")
    engine = engine_of(model)
    blocks = model.model.layers
    model.model.layers = blocks[1:]
    try:
        with pytest.raises(ModelError) as caught:
            engine.step(*data(1)[0], 0, RATE)
    finally:
        model.model.layers = blocks
        engine.close()
    assert "does not call its blocks once each" in caught.value.message


@pytest.mark.parametrize("model_type", ["gemma2", "lfm2", "bloom", "gpt_neox"])
def test_lsp_trains_the_same_decoders(model_type: str) -> None:
    """In subspaces, against the same method in memory, across a refresh."""
    model = decoder(model_type)
    projectors = {"subspace": 8, "nonzeros": 2, "check_every": 5}
    reference = copy.deepcopy(model).requires_grad_(True)
    optimizer = LspAdamW(reference, ProjectorConfig(**projectors), eps=EPS)
    expected = []
    for ids, labels in data(ACROSS_A_REFRESH):
        logits = reference(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, :-1]
        targets = torch.from_numpy(labels)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        loss.backward()
        expected.append(float(loss))
        optimizer.step(RATE)
    config = LspConfig(compute="float32", timeout_s=120.0, threads=1, eps=EPS, **projectors)
    engine = LspEngine(AnyDecoder(model), config, "cpu")
    try:
        losses = [
            engine.step(*batch, step, RATE) for step, batch in enumerate(data(ACROSS_A_REFRESH))
        ]
    finally:
        engine.close()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "lfm2", "bloom", "gemma4_text"])
def test_a_gpu_follows_the_cpu(model_type: str) -> None:
    """Blocks arrive, compute and leave in CUDA's streams, and autograd calls from its own thread."""
    model = decoder(model_type, **(SHARED if model_type == "gemma4_text" else {}))
    expected, _ = train(copy.deepcopy(model), 4)
    losses, _ = train(copy.deepcopy(model), 4, device="cuda")
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    small = {"window": 2, "gradient_buffers": 2, "micro_batch_size": 2, "activations": "host"}
    again, _ = train(model, 4, device="cuda", **small)
    np.testing.assert_allclose(again, expected, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["gemma2", "lfm2"])
def test_weighted_rows_have_the_gradients_of_their_loss(model_type: str) -> None:
    """A head that is more than a matrix, and one that is not; rows weigh by all rows' losses."""
    model = decoder(model_type)
    ids, labels = data(1)[0]
    reference = copy.deepcopy(model)
    logits = reference(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, :-1]
    targets = torch.from_numpy(labels)[:, 1:]
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    loss = (nll.sum(1) ** 2).mean()
    loss.backward()
    weighed = WeighedRows(lambda rows: (float((rows**2).mean()), 2 * rows / len(rows)))
    engine = engine_of(model, micro_batch_size=3, optimizer="torch")
    try:
        assert engine.step(ids, labels, 0, RATE, weighed) == pytest.approx(float(loss), rel=1e-5)
        engine.flush()
        for unit in engine.units.all:
            moments = engine.store.states[unit.index].moments.m
            for piece in unit.pieces:
                own = moments[piece.offset : piece.offset + piece.numel].view(piece.shape) / 0.1
                gradient = dict(reference.named_parameters())[piece.name].grad
                if gradient is not None:
                    away = float((own - gradient).norm())
                    assert away <= 1e-4 * float(gradient.norm()) + 1e-6, piece.name
    finally:
        engine.close()
