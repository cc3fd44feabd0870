"""LoRA and LoRA-FA: gradients against autograd of the plain loss, and the adapter out and in."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from ondevice.core.errors import ArtifactError
from ondevice.core.registry import method_config, open_session
from ondevice.models.load import tiny_model
from tests.methods.mesp.reference import exact
from tests.methods.reference import LORA, batch, open_tiny

MODELS = [("llama", {}), ("qwen2", {"tied": False, "layers": 1, "vocab": 263})]


def lora_gradients(
    tensors: dict[str, np.ndarray], family: str, sizes: dict, ids: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """The adapter added to the weights: W + (alpha / rank) B A, float64."""
    return exact(tiny_model(family, **sizes), tensors, 2.0, ids, labels)


@pytest.mark.parametrize(("family", "sizes"), MODELS)
@pytest.mark.parametrize("name", ["lora", "lora-fa"])
def test_lora_gradients_are_those_of_the_plain_loss(name, family, sizes) -> None:
    target = open_tiny(name, family, sizes)
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
        np.testing.assert_allclose(
            state[f"exp_avg/{key}"] / 0.1, gradient, atol=1e-4 * scale, err_msg=key
        )
        assert not np.array_equal(after[key], start.tensors[key])
    trained = [p for p in target.loaded.model.parameters() if p.requires_grad]
    assert len(trained) == len(expected) // (2 if name == "lora-fa" else 1)


@pytest.mark.parametrize("name", ["lora", "lora-fa"])
def test_an_adapter_survives_saving_and_loading(name) -> None:
    target, other = open_tiny(name), open_tiny(name)
    for step in range(2):
        target.step(*batch(2, seed=step), step, 1e-2)
    other.load_adapter(target.adapter())
    ids, labels = batch(3, seed=9)
    assert other.evaluate(ids, labels)[0].tobytes() == target.evaluate(ids, labels)[0].tobytes()
    with pytest.raises(ArtifactError):
        open_tiny(name, alpha=7.0).load_adapter(target.adapter())
    with pytest.raises(ArtifactError):
        open_tiny(name, rank=4).load_adapter(target.adapter())
    with pytest.raises(ArtifactError):
        open_tiny(name, target_modules=("q_proj", "v_proj")).load_adapter(target.adapter())


def test_a_half_precision_model_trains_its_adapter_in_float32() -> None:
    loaded = tiny_model("llama")
    loaded.model.to(torch.bfloat16)
    target = open_session(loaded, method_config("lora", LORA), 0)
    assert {value.dtype for value in target.parameters.values()} == {torch.float32}
    result = target.step(*batch(2), 0, 1e-3)
    assert np.isfinite(result.loss) and {v.dtype for v in target.all_tensors.values()} == {
        torch.float32
    }


@pytest.mark.parametrize("name", ["lora", "lora-fa"])
def test_a_run_prints_no_warnings(name) -> None:
    """A user cannot act on a warning of the libraries below."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = open_tiny(name, "llama", {})
        session.step(*batch(3), 0, 1e-3)
        session.load_adapter(session.adapter())
