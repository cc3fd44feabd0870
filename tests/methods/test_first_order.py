"""LoRA, LoRA-FA and full fine-tuning: gradients against autograd of the plain loss, AdamW, resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ondevice.errors import ArtifactError, CheckpointError, ConfigError
from ondevice.methods.registry import method_config, open_session
from ondevice.models.tiny import tiny_model
from tests.methods.mesp.reference import exact
from tests.methods.reference import batch, in_double, plain_loss

BETAS, EPSILON = (0.9, 0.999), 1e-8
MODELS = [("llama", {}), ("qwen2", {"tied": False, "layers": 1, "vocab": 263})]
LORA = {"rank": 3, "alpha": 6.0, "targets": ("q_proj", "v_proj", "down_proj")}


def session(name: str, family: str = "llama", sizes: dict[str, Any] | None = None, **values: Any) -> Any:
    defaults = LORA if name.startswith("lora") else {}
    return open_session(tiny_model(family, **(sizes or {})), method_config(name, {**defaults, **values}), 3)


def full_gradients(
    family: str, sizes: dict, ids: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    model = in_double(tiny_model(family, **sizes).model).requires_grad_(True)
    loss = plain_loss(model(torch.from_numpy(ids), use_cache=False).logits, torch.from_numpy(labels))
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in model.named_parameters()}


def lora_gradients(
    tensors: dict[str, np.ndarray], family: str, sizes: dict, ids: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """The adapter added to the weights: W + (alpha / rank) B A, float64."""
    return exact(tiny_model(family, **sizes), tensors, 2.0, ids, labels)


def adamw(value: np.ndarray, gradients: list[np.ndarray], rate: float, decay: float) -> np.ndarray:
    """Loshchilov and Hutter's update, float64."""
    value, m, v = value.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
        value = value * (1 - rate * decay)
        value = value - rate * (m / (1 - BETAS[0] ** t)) / (np.sqrt(v / (1 - BETAS[1] ** t)) + EPSILON)
    return value


@pytest.mark.parametrize(("family", "sizes"), MODELS)
@pytest.mark.parametrize("name", ["lora", "lora-fa"])
def test_lora_gradients_are_those_of_the_plain_loss(name, family, sizes) -> None:
    target = session(name, family, sizes)
    random = np.random.default_rng(0)
    start = target.adapter()
    for key, value in start.tensors.items():  # B is zero at first, and A's gradient with it
        if ".lora_B." in key:
            value[:] = 0.1 * random.standard_normal(value.shape)
    target.load_adapter(start)
    ids, labels = batch(3)
    loss, expected = lora_gradients(start.tensors, family, sizes, ids, labels)
    result = target.step(ids, labels, 0, 1e-3)
    assert result.loss == pytest.approx(loss, rel=2e-6) and result.losses == (result.loss,)
    assert result.projected_gradients == ()
    state, after = target.state(), target.adapter().tensors
    for key, gradient in expected.items():
        frozen = name == "lora-fa" and ".lora_A." in key
        assert (f"exp_avg/{key}" in state) == (not frozen)
        if frozen:
            assert after[key].tobytes() == start.tensors[key].tobytes()
            continue
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(state[f"exp_avg/{key}"] / 0.1, gradient, atol=1e-4 * scale, err_msg=key)
        assert not np.array_equal(after[key], start.tensors[key])
    trained = [p for p in target.loaded.model.parameters() if p.requires_grad]
    assert len(trained) == len(expected) // (2 if name == "lora-fa" else 1)


@pytest.mark.parametrize(("family", "sizes"), [*MODELS, ("gpt2", {"tied": False}), ("mistral", {})])
def test_full_gradients_are_those_of_the_plain_loss(family, sizes) -> None:
    target = session("full", family, sizes)
    ids, labels = batch(3)
    loss, expected = full_gradients(family, sizes, ids, labels)
    assert target.step(ids, labels, 0, 0.0).loss == pytest.approx(loss, rel=2e-6)
    state = target.state()
    for key, gradient in expected.items():
        scale = max(np.abs(gradient).max(), 1e-6)
        np.testing.assert_allclose(state[f"exp_avg/{key}"] / 0.1, gradient, atol=2e-4 * scale, err_msg=key)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_optimizer_is_adamw_at_the_loop_s_learning_rate(decay) -> None:
    target = session("lora", weight_decay=decay, learning_rate=123.0)
    key = "model.layers.0.self_attn.q_proj.lora_B.weight"
    start, gradients, m = target.state()[key], [], 0.0
    for step in range(3):
        target.step(*batch(2, seed=step), step, 1e-2)
        moment = target.state()[f"exp_avg/{key}"].astype(np.float64)
        gradients.append((moment - BETAS[0] * m) / (1 - BETAS[0]))
        m = moment
    np.testing.assert_allclose(target.state()[key], adamw(start, gradients, 1e-2, decay), atol=2e-5)


@pytest.mark.parametrize("name", ["lora", "lora-fa", "full"])
def test_resumed_it_has_the_same_bits(name) -> None:
    straight, first = session(name), session(name)
    batches = [batch(2, seed=step) for step in range(5)]
    results = [straight.step(*batches[step], step, 1e-3) for step in range(5)]
    for step in range(2):
        first.step(*batches[step], step, 1e-3)
    second = session(name, sizes={"seed": 0})
    second.load_state({key: value.copy() for key, value in first.state().items()})
    for step in range(2, 5):
        assert second.step(*batches[step], step, 1e-3) == results[step]
    ours, theirs = straight.state(), second.state()
    assert ours.keys() == theirs.keys() and all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)


@pytest.mark.parametrize("name", ["lora", "lora-fa"])
def test_the_adapter_goes_out_and_in(name) -> None:
    target, other = session(name), session(name)
    for step in range(2):
        target.step(*batch(2, seed=step), step, 1e-2)
    other.load_adapter(target.adapter())
    ids, labels = batch(3, seed=9)
    assert other.evaluate(ids, labels)[0].tobytes() == target.evaluate(ids, labels)[0].tobytes()
    with pytest.raises(ArtifactError, match="alpha"):
        session(name, alpha=7.0).load_adapter(target.adapter())
    with pytest.raises(ArtifactError, match=r"does not fit"):
        session(name, rank=4).load_adapter(target.adapter())
    with pytest.raises(ArtifactError, match=r"down_proj"):
        session(name, targets=("q_proj", "v_proj")).load_adapter(target.adapter())


def test_a_half_precision_model_trains_its_adapter_in_float32() -> None:
    loaded = tiny_model("llama")
    loaded.model.to(torch.bfloat16)
    target = open_session(loaded, method_config("lora", LORA), 0)
    assert {value.dtype for value in target.parameters.values()} == {torch.float32}
    result = target.step(*batch(2), 0, 1e-3)
    assert np.isfinite(result.loss) and {v.dtype for v in target.all_tensors.values()} == {torch.float32}


def test_what_is_not_for_it_is_refused() -> None:
    target = session("full")
    with pytest.raises(ConfigError, match="replay"):
        target.apply_update((1.0,), 0, 1e-3)
    with pytest.raises(ConfigError, match="takes no adapter"):
        target.load_adapter(session("lora").adapter())
    other = session("lora")
    other.step(*batch(2), 0, 1e-3)
    state = other.state()
    with pytest.raises(CheckpointError, match="exp_avg"):
        session("lora").load_state({k: v for k, v in state.items() if not k.startswith("exp_avg/")})
