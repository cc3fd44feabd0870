"""Families with traits of their own: gradients against autograd over transformers' forward, files, PEFT, the plan."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.core.errors import ModelError, Need
from ondevice.core.registry import method_config, open_session
from ondevice.methods.mesp.memory import memory, weights
from ondevice.models import load_model, open_model, save_tiny
from ondevice.models.load import tiny_model
from tests.methods.mesp.reference import errors, exact, learned, rows, session
from tests.methods.mesp.torch.live import LiveBytes
from tests.methods.reference import in_double, plain_loss

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {},
    "gemma4_text": {"layers": 5},
    "granite": {},
    "lfm2": {"conv_L_cache": 4},
    "mistral": {"sliding_window": 7},
    "olmo2": {},
    "phi3": {},
    "qwen3": {},
    "qwen3_5_text": {},
    "smollm3": {},
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "sizes", [{}, {"tied": False, "kv_heads": 1, "layers": 3}], ids=["tied", "untied"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_match_autograd_through_transformers(family, sizes) -> None:
    sizes, chosen = (
        FAMILIES[family] | sizes,
        {"mlp_chunk_tokens": 5} if sizes else {},
    )
    ids, labels = rows(2, 19, 1)
    double, plain = tiny_model(family, 3, **sizes), tiny_model(family, 3, **sizes)
    chosen["target_modules"] = tuple(plain.dims.linear_shapes)
    in_double(double.model)
    opened = session(double, **chosen)
    start = opened.adapter().tensors
    loss, ours = learned(opened, ids, labels)
    wanted, theirs = exact(tiny_model(family, 3, **sizes), start, opened.config.scale, ids, labels)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert len(ours) == 2 * len(plain.dims.linear_list)
    assert max(errors(ours, theirs).values()) <= 1e-6
    single = session(plain, **chosen)
    assert learned(single, ids, labels)[0] == pytest.approx(wanted, rel=3e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_weights_match_resident_ones_and_peft_reads_the_adapter(
    family, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", family, 3, **FAMILIES[family])
    ids, labels = rows(2, 12, 2)
    trained = []
    for model, placement in (
        (load_model(str(folder)), "resident"),
        (open_model(str(folder)), "streamed"),
    ):
        opened = open_session(
            model, method_config("mesp", {"rank": 2, "weight_placement": placement}), 3
        )
        losses = [opened.step(ids, labels, step, 1e-2).loss for step in range(3)]
        assert losses[2] < losses[0]
        trained.append((losses, opened.adapter(), opened.evaluate(ids, labels)[0]))
        opened.close()
    (losses, adapter, nll), (other, same, _) = trained
    assert losses == other
    assert all(np.array_equal(value, same.tensors[name]) for name, value in adapter.tensors.items())
    save_adapter(adapter, tmp_path / "adapter")
    wrapped = peft.PeftModel.from_pretrained(
        copy.deepcopy(load_model(str(folder)).model), str(tmp_path / "adapter")
    )
    with torch.no_grad():
        logits = (
            wrapped(input_ids=torch.from_numpy(ids), use_cache=False)
            .logits[:, :-1]
            .transpose(1, 2)
            .double()
        )
    wanted = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(labels)[:, 1:], reduction="none"
    )
    np.testing.assert_allclose(nll, wanted.sum(1).numpy(), rtol=2e-5)
    wrapped.save_pretrained(str(tmp_path / "theirs"))
    again = load_adapter(tmp_path / "theirs")
    assert again.linears == adapter.linears
    opened = open_session(load_model(str(folder)), method_config("mesp", {"rank": 2}), 3)
    opened.load_adapter(again)
    np.testing.assert_array_equal(opened.evaluate(ids, labels)[0], nll)


def test_weights_in_several_files_are_those_of_one(tmp_path: Path) -> None:
    """Resident, streamed, and as transformers reads them."""
    whole = load_model(str(save_tiny(tmp_path / "one", "qwen3", 3)))
    shutil.copytree(
        tmp_path / "one", tmp_path / "several", ignore=shutil.ignore_patterns("*.safetensors")
    )
    whole.model.save_pretrained(tmp_path / "several", max_shard_size="60KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 3
    ids, labels = rows(2, 9, 0)
    resident, streamed = (
        load_model(str(tmp_path / "several")),
        open_model(str(tmp_path / "several")),
    )
    read = resident.model.state_dict()
    assert all(torch.equal(value, read[name]) for name, value in whole.model.state_dict().items())
    losses = []
    for model, placement in ((whole, "resident"), (resident, "resident"), (streamed, "streamed")):
        opened = open_session(model, method_config("mesp", {"weight_placement": placement}), 3)
        losses.append(opened.step(ids, labels, 0, 1e-3).loss)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_that_move_blocks_compute_these_too(family) -> None:
    """The same two steps of AdamW as the method that keeps the model whole, over transformers' own forward."""
    ids, labels = rows(2, 19, 1)
    losses = {}
    for name in ("full", "slideformer"):
        settings = {} if name == "full" else {"compute": "float32"}
        opened = open_session(
            tiny_model(family, 3, **FAMILIES[family]), method_config(name, settings), 0
        )
        losses[name] = [opened.step(ids, labels, step, 1e-3).loss for step in range(3)]
        opened.close()
    with torch.no_grad():
        logits = (
            tiny_model(family, 3, **FAMILIES[family])
            .model(torch.from_numpy(ids), use_cache=False)
            .logits
        )
    assert losses["full"][0] == pytest.approx(
        float(plain_loss(logits, torch.from_numpy(labels))), rel=1e-5
    )
    assert losses["slideformer"] == pytest.approx(losses["full"], rel=1e-4)


WIDE_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""A gated delta rule as wide next to the residual stream as that of Qwen3.5."""


@pytest.mark.parametrize(
    ("family", "own"),
    [*((family, {}) for family in FAMILIES), ("qwen3_5_text", WIDE_DELTA)],
)
def test_the_plan_is_within_15_percent_of_a_step(family, own) -> None:
    sizes = own | {
        "layers": 3,
        "hidden": 256,
        "intermediate": 768,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 2000,
    }
    opened = session(tiny_model(family, **sizes), loss_tiles=4)
    planned = memory(opened.loaded.dims, opened.config, 2, 96, 4)
    ids, labels = rows(2, 96, 0)
    opened.step(ids, labels, 0, 1e-3)
    with LiveBytes() as live:
        opened.step(ids, labels, 1, 1e-3)
    working = sum(planned[part] for part in ("block inputs", "activations", "logits"))
    assert working == pytest.approx(live.peak, rel=0.15)


def test_the_plan_counts_embeddings_for_each_layer() -> None:
    loaded = tiny_model("gemma4_text", layers=5)
    found = weights(loaded.dims, method_config("mesp", {}), 4)
    assert found == 4 * sum(one.numel() for one in loaded.model.parameters())


@pytest.mark.parametrize(
    ("family", "words", "settings"),
    [
        ("gemma3_text", "norm weights of 1 + w", {"coupling": "paper"}),
        ("gemma4_text", "keys and values that layers share", {}),
        ("granite", "a factor", {"coupling": "paper"}),
    ],
)
def test_a_method_names_the_trait_it_does_not_support(
    family, words, settings, tmp_path: Path
) -> None:
    loaded = load_model(str(save_tiny(tmp_path / family, family, layers=4)))
    with pytest.raises(ModelError) as caught:
        open_session(loaded, method_config("revffn", settings), 0)
    assert words in caught.value.message
    what = "with coupling: paper " if settings else ""
    assert f"which method revffn {what}does not do" in str(caught.value)
    assert caught.value.needs is Need.ANY_DECODER
