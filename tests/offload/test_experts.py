"""Layers of mixtures whose experts come when the router has chosen, against layers that move whole."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.errors import ConfigError
from ondevice.methods.slideformer.auto import Work, lanes_of
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.load import tiny_model
from ondevice.offload.config import Rates
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.experts import open_window
from tests.offload.test_whole import decoder

EXPERTS, CHOSEN, LAYERS, STEPS, RATE = 16, 2, 3, 4, 1e-2
KNOWN = ("granitemoe", "lfm2_moe", "qwen2_moe", "qwen3_moe")
KINDS = (*KNOWN, "mixtral", "gpt_oss")
SLIDES = {"window": 2, "resident_layers": 0, "resident_tables": False}
"""Of three layers, the first comes again for the backward pass."""


def family_of(kind: str) -> Any:
    """A mixture of 16 experts of which a token takes 2."""
    if kind in KNOWN:
        field = "num_local_experts" if kind == "granitemoe" else "num_experts"
        sizes = {field: EXPERTS, "num_experts_per_tok": CHOSEN}
        if kind == "lfm2_moe":
            sizes["num_dense_layers"] = 0
        return tiny_model(kind, layers=LAYERS, hidden=32, tied=False, **sizes).family
    more = {"num_local_experts": EXPERTS, "num_hidden_layers": LAYERS}
    if kind == "gpt_oss":
        more["layer_types"] = ["full_attention"] * LAYERS
    return AnyDecoder(decoder(kind, **more))


def batches(length: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two rows; of six tokens at most 12 of 16 experts are used."""
    random = np.random.default_rng(3)
    ids = [random.integers(0, 200, (2, length)) for _ in range(STEPS)]
    return [(one, one.copy()) for one in ids]


@contextmanager
def opened(family: Any, **settings: Any) -> Iterator[OffloadEngine]:
    values = {"compute": "float32", "timeout_s": 120.0, "threads": 1, **SLIDES, **settings}
    engine = OffloadEngine(family, SlideformerConfig(**values), "cpu")
    try:
        yield engine
    finally:
        engine.close()


def train(family: Any, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Losses, everything a resume needs, and what each step but the last moved."""
    with opened(family, **settings) as engine:
        losses = []
        moved = []
        for step, batch in enumerate(batches()):
            losses.append(engine.step(*batch, step, RATE))
            moved.append(engine.overlap)
        losses.append(float(engine.evaluate(*batches()[0])[0].sum()))
        engine.flush()
        arrays = {name: value.clone() for name, value in engine.store.arrays().items()}
    return losses, arrays, moved[1:]


def experts_of(layer: Any) -> Any:
    """The module of a layer's experts."""
    return next(one for name, one in layer.named_modules() if name.endswith(".experts"))


def routed(model: Any, ids: np.ndarray) -> list[set[int]]:
    """The experts that each layer's tokens are sent to, by transformers' own forward pass."""
    found: list[set[int]] = [set() for _ in range(LAYERS)]
    hooks = []
    for i in range(LAYERS):
        hooks.append(
            experts_of(model.model.layers[i]).register_forward_pre_hook(
                lambda _, given, i=i: found[i].update(given[1].flatten().tolist())
            )
        )
    with torch.no_grad():
        model(input_ids=torch.from_numpy(ids), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_experts_train_to_the_bits_of_whole_layers_with_fewer_bytes(kind: str) -> None:
    """And the bytes are fewer by those of the experts that transformers' router does not choose."""
    family = family_of(kind)
    used = routed(family.model, batches()[0][0])
    held = experts_of(family.model.model.layers[-1]).parameters(recurse=False)
    each = sum(p.numel() // EXPERTS for p in held) * 4
    expected, arrays, whole = train(family, experts="all")
    losses, streamed, parts = train(family_of(kind), experts="used")
    assert losses == expected
    assert all(torch.equal(value, streamed[name]) for name, value in arrays.items())
    idle = [EXPERTS - len(experts) for experts in used]
    assert min(idle) >= 4
    assert whole[0].d2h_bytes - parts[0].d2h_bytes == sum(idle) * each
    assert whole[0].h2d_bytes - parts[0].h2d_bytes == (sum(idle) + idle[0]) * each


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 1},
        {"max_grad_norm": 0.1, "clip": "global"},
        {"max_grad_norm": 0.1, "weight_decay": 0.1, "moments": "bfloat16"},
        {"resident_layers": 1, "compute": "bfloat16"},
        {"disk_fraction": 1.0, "activations": "disk"},
        {"disk_fraction": 0.5, "disk_masters": True},
    ],
    ids=str,
)
def test_other_settings_have_the_same_bits(settings: dict[str, Any]) -> None:
    """Masters in a file are read as one, so of these layers all experts move."""
    expected, arrays, whole = train(family_of("mixtral"), experts="all", **settings)
    losses, streamed, parts = train(family_of("mixtral"), experts="used", **settings)
    assert losses == expected
    assert all(torch.equal(value, streamed[name]) for name, value in arrays.items())
    assert parts[0].h2d_bytes < whole[0].h2d_bytes
    assert parts[0].d2h_bytes < whole[0].d2h_bytes


def test_experts_without_tokens_decay_and_move_as_those_of_adamw_in_memory() -> None:
    """Their gradient is zero, not absent: moments decay, and masters move by them and shrink."""
    family = family_of("mixtral")
    reference = copy.deepcopy(family.model).requires_grad_(True)
    before = {name: value.detach().clone() for name, value in reference.named_parameters()}
    optimizer = torch.optim.AdamW(reference.parameters(), lr=RATE, eps=1e-6, weight_decay=0.1)
    seen = []
    with opened(family, experts="used", eps=1e-6, weight_decay=0.1) as engine:
        for step, (ids, labels) in enumerate(batches()[:3]):
            seen.append(routed(reference, ids))
            loss = reference(input_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert engine.step(ids, labels, step, RATE) == pytest.approx(float(loss), rel=1e-5)
        engine.flush()
        trained = engine.store.masters()
    layers = [[step[i] for step in seen] for i in range(LAYERS)]
    assert all(any(a - b for a, b in itertools.pairwise(steps)) for steps in layers)
    assert any(len(set().union(*steps)) < EXPERTS for steps in layers), "some are never used"
    for name, value in reference.named_parameters():
        moved = float((value - before[name]).norm())
        assert moved > 0, name
        assert float((trained[name] - value).norm()) <= 1e-3 * moved, name


def test_few_tokens_copy_few_experts_unless_settings_say_otherwise() -> None:
    """`auto` copies whole layers if half of the experts are expected to be used: from 6 tokens on."""
    for kind in ("qwen3_moe", "gpt_oss"):
        for setting, streams in (("auto", (True, False)), ("used", (True, True))):
            with opened(family_of(kind), experts=setting) as engine:
                for length, expected in zip((2, 12), streams, strict=True):
                    engine.evaluate(*batches(length)[0])
                    assert engine.window.streams is expected, (kind, setting, length)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_plan_knows_the_bytes_of_streamed_experts(kind: str) -> None:
    """Those of routers that choose by chance; biases of experts are not counted."""
    family = family_of(kind)
    held = family.model.model.layers[0].mlp.experts.parameters(recurse=False)
    each = sum(p.numel() // EXPERTS for p in held) * 4
    random = np.random.default_rng(0)
    draws = [
        {int(e) for _ in range(6) for e in random.choice(EXPERTS, CHOSEN, replace=False)}
        for _ in range(2000)
    ]
    idle = EXPERTS - np.mean([len(used) for used in draws])
    rates = Rates(1e30, 1.0, 1.0, 1e30, None)  # a byte a second
    planned = []
    for setting in ("all", "used"):
        config = SlideformerConfig(compute="float32", experts=setting, **SLIDES)
        planned.append(lanes_of(family.dims, config, Work(2, 3, 1), rates, 1.0))
    for lane, layers in (("h2d", LAYERS + 1), ("d2h", LAYERS)):
        saved = planned[0][lane] - planned[1][lane]
        assert saved == pytest.approx(idle * each * layers, rel=0.06), lane


def test_ranks_and_muon_take_whole_layers_or_refuse() -> None:
    family = family_of("qwen3_moe")
    store = SimpleNamespace(ranks=SimpleNamespace(single=False, world=2))
    with pytest.raises(ConfigError) as caught:
        open_window(family, None, store, SlideformerConfig(experts="used"))  # type: ignore[arg-type]
    assert "several processes" in caught.value.message
    with pytest.raises(ConfigError):
        SlideformerConfig(optimizer="muon", experts="used").fixed().check_training()
    SlideformerConfig(optimizer="muon").fixed().check_training()
