"""Blocks that are not known are computed again and differentiated: gradients against autograd over the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.errors import ConfigError, ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.methods.mesp.memory import memory
from ondevice.methods.mesp.torch.checkpointed import _checkpointed
from ondevice.models import load_model, open_model
from tests.methods.mesp.reference import errors, exact, learned, rows, session
from tests.methods.mesp.torch.live import LiveBytes
from tests.methods.reference import in_double
from tests.models.test_any_decoder import save

SHARED = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4,
          "vocab_size_per_layer_input": 300, "enable_moe_block": True, "top_k_experts": 2,
          "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}  # fmt: skip
"""Another number of rows for layers than the vocabulary has, which no block by hand reads."""
MODELS: dict[str, dict[str, Any]] = {
    "bamba": {},  # a layer with a state space before attention
    "gemma4_text": SHARED,  # experts; the last two layers take keys and values of layers before
    "gemma2": {},  # soft caps: the loss is from logits
    "olmoe": {},  # experts
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_match_autograd(name: str, tmp_path: Path) -> None:
    folder = str(save(tmp_path / "model", name.split()[0], **MODELS[name]))
    ids, labels = rows(2, 13, 1, 250)
    ids %= 250
    double = load_model(folder)
    assert double.dims.whole
    in_double(double.model)
    opened = session(double, loss_tiles=3)
    loss, ours = learned(opened, ids, labels)
    start = session(load_model(folder)).adapter().tensors
    wanted, theirs = exact(load_model(folder), start, opened.config.scale, ids, labels)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert len(ours) == 2 * len(double.dims.adapted(opened.config))
    # What no gradient reaches (the values of a router's probabilities, keys that a later layer has in its place) is 0.
    theirs = {name: theirs.get(name, np.zeros(ours[name].shape)) for name in ours}
    assert max(errors(ours, theirs).values()) <= 1e-6


def test_micro_batches_add_up_and_the_model_is_given_back(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path / "model", "bamba")))
    before = dict(loaded.model.named_modules())
    ids, labels = rows(3, 9, 2, 250)
    ids %= 250
    found = []
    for size in (None, 1):
        opened = session(loaded, micro_batch_size=size)
        found.append(learned(opened, ids, labels)[0:2])
        opened.close()
        assert dict(loaded.model.named_modules()) == before
    (loss, whole), (same, parts) = found
    assert loss == pytest.approx(same, rel=1e-6)
    assert set(whole) == set(parts)


def test_a_step_holds_one_block_and_the_plan_says_so(tmp_path: Path) -> None:
    """Twice the layers take their inputs more, and no block's activations."""
    peaks, planned = [], []
    for layers in (2, 6):
        sizes = {"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 512}
        folder = save(tmp_path / str(layers), "gemma2", **sizes)
        opened = session(load_model(str(folder)), loss_tiles=4)
        ids, labels = rows(2, 96, 0, 250)
        ids %= 250
        opened.step(ids, labels, 0, 1e-3)
        with LiveBytes() as live:
            opened.step(ids, labels, 1, 1e-3)
        peaks.append(live.peak)
        planned.append(memory(opened.loaded.dims, opened.config, 2, 96, 4))
    inputs = planned[1]["block inputs"] - planned[0]["block inputs"]
    assert peaks[1] - peaks[0] == pytest.approx(inputs, rel=0.35)
    assert planned[1]["activations"] == planned[0]["activations"]


def test_blocks_that_read_each_other_in_hidden_ways_have_exact_gradients(tmp_path: Path) -> None:
    """The second block's MLP adds the first block's output, which no argument carries."""
    folder = str(save(tmp_path / "model", "gpt_neox"))

    def hooked() -> Any:
        loaded = load_model(folder)
        first, second = loaded.model.gpt_neox.layers
        kept: list[torch.Tensor] = []
        first.register_forward_hook(
            lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        second.mlp.register_forward_hook(lambda _, __, out: out + kept[-1])
        return loaded

    ids, labels = rows(2, 9, 1, 250)
    ids %= 250
    double = hooked()
    in_double(double.model)
    opened = session(double, target_modules=["query_key_value"])
    start = opened.adapter().tensors
    loss, ours = learned(opened, ids, labels)
    expected, theirs = exact(hooked(), start, opened.config.scale, ids, labels)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert max(errors(ours, theirs).values()) <= 1e-6


def test_a_block_that_is_computed_again_sees_the_dictionary_of_its_first_call() -> None:
    """The third block writes over what the second one read."""
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    x = torch.tensor([5.0, 7.0], requires_grad=True)

    def first(x: torch.Tensor, *, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        shared["keys"] = x * weight
        return x * x

    def second(x: torch.Tensor, *, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        return (x * shared["keys"]).sin()

    def third(x: torch.Tensor, *, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        shared["keys"] = x * 0
        return x * x

    def gradients(wrapped: Any) -> tuple[torch.Tensor, ...]:
        shared: dict[str, torch.Tensor] = {}
        h = x
        for block in (first, second, third):
            h = wrapped(block)(h, shared=shared)
        return torch.autograd.grad(h.sum(), (x, weight))

    for ours, theirs in zip(gradients(_checkpointed), gradients(lambda block: block), strict=True):
        assert torch.equal(ours, theirs)


def test_settings_of_the_hand_written_pass_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "gpt_neox")
    with pytest.raises(ConfigError) as refused:
        open_session(load_model(str(folder)), method_config("mesp", {"mlp_chunk_tokens": 5}), 0)
    assert refused.value.received == 5 and refused.value.expected == "method.mlp_chunk_tokens: null"
    with pytest.raises(ModelError) as caught:
        open_session(
            open_model(str(folder)), method_config("mesp", {"weight_placement": "streamed"}), 0
        )
    assert "mesp with streamed weights" in str(caught.value)
