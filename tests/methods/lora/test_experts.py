"""Pairs beside the matrices of experts: numbers, gradients and files against PEFT's own."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.core.errors import ArtifactError, ConfigError, ModelError
from ondevice.core.registry import method, method_config, open_session
from ondevice.exits.convert import convert
from ondevice.models import load_model
from ondevice.nn.adapters import adapted
from ondevice.training.fuse import PROMPTS, fuse, prompt_logits
from tests.models.test_any_decoder import IDS, LABELS, fresh, save, transformers_nll

BOTH = ("experts.gate_up_proj", "experts.down_proj")
CASES = [
    ("lora", "qwen2_moe", ("q_proj", *BOTH)),
    ("lora-fa", "qwen3_moe", BOTH),
    ("lora", "granitemoe", ("k_proj", *BOTH)),
    ("lora-fa", "lfm2_moe", ("in_proj", *BOTH)),
    ("lora", "mixtral", ("v_proj", *BOTH)),
    ("lora-fa", "deepseek_v3", ("mlp.experts.down_proj", "o_proj")),
    ("mesp", "lfm2_moe", ("in_proj", *BOTH)),
    ("mesp", "qwen3_moe", ("q_proj", *BOTH)),
    ("mesp", "mixtral", ("v_proj", *BOTH)),
]


@pytest.mark.parametrize(("name", "family", "targets"), CASES)
def test_experts_train_as_in_peft_and_load_there(
    name: str, family: str, targets: tuple, tmp_path: Path
) -> None:
    loaded = load_model(str(save(tmp_path / "m", family)))
    config = method_config(
        name, {"rank": 3, "alpha": 5, "loss_tiles": 3, "target_modules": targets}
    )
    session = open_session(fresh(loaded), config, 7)
    start = session.adapter()
    random = np.random.default_rng(0)
    for key, value in start.tensors.items():  # B is zero at first, and A's gradient with it
        if ".lora_B." in key:
            value[:] = 0.3 * random.standard_normal(value.shape)
    session.load_adapter(start)
    save_adapter(start, tmp_path / "start")
    theirs = peft.PeftModel.from_pretrained(
        copy.deepcopy(loaded.model), str(tmp_path / "start"), is_trainable=True
    )
    nll = transformers_nll(theirs, IDS, LABELS)
    np.testing.assert_allclose(session.evaluate(IDS, LABELS)[0], nll, rtol=1e-5)
    assert np.abs(nll - transformers_nll(loaded.model, IDS, LABELS)).min() > 1e-3

    session.step(IDS, LABELS, 0, 1e-2)
    theirs(
        input_ids=torch.from_numpy(IDS), labels=torch.from_numpy(LABELS), use_cache=False
    ).loss.backward()
    gradients = {
        n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if ".lora_" in n
    }
    saved, state = load_adapter(tmp_path / "start"), session.state()
    assert saved.linears == start.linears
    compared = 0
    for theirs_name, gradient in gradients.items():
        key = theirs_name.removeprefix("base_model.model.")
        if ".experts." in key:
            module, side = key.split(".experts.")[0] + ".experts", key[key.index(".lora_") :]
            inner = ".base_layer." in key
            key = f"{module}.{'gate_up_proj' if inner else 'down_proj'}{side}"
        if name == "lora-fa" and ".lora_A." in key:
            assert f"exp_avg/{key}" not in state
            continue
        np.testing.assert_allclose(
            state[f"exp_avg/{key}"] / 0.1,
            gradient,
            atol=2e-5 * float(gradient.abs().max()),
            err_msg=key,
        )
        compared += 1
    assert compared == len(start.tensors) // (2 if name == "lora-fa" else 1)

    kept = {key: value.copy() for key, value in session.state().items()}
    last = session.step(IDS, LABELS, 1, 1e-2).loss
    resumed = open_session(fresh(loaded), config, 7)
    resumed.load_state(kept)
    assert resumed.step(IDS, LABELS, 1, 1e-2).loss == last
    assert all(
        np.array_equal(value, resumed.state()[key]) for key, value in session.state().items()
    )

    adapter, trained = session.adapter(), session.evaluate(IDS, LABELS)[0]
    save_adapter(adapter, tmp_path / "a")
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert written["target_parameters"] == list(adapter.expert_parameters)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(loaded.model), str(tmp_path / "a"))
    np.testing.assert_allclose(transformers_nll(theirs, IDS, LABELS), trained, rtol=1e-5)
    theirs.save_pretrained(tmp_path / "back")  # and what PEFT writes is read here
    back = load_adapter(tmp_path / "back")
    assert all(np.array_equal(value, back.tensors[key]) for key, value in adapter.tensors.items())

    base = prompt_logits(loaded, PROMPTS[:1])[0]
    with adapted(loaded, adapter):
        np.testing.assert_allclose(transformers_nll(loaded.model, IDS, LABELS), trained, rtol=1e-5)
    assert torch.equal(prompt_logits(loaded, PROMPTS[:1])[0], base)

    numbers = sum(value.size for value in adapter.tensors.values())
    moved = sum(value.size for key, value in session.state().items() if key.startswith("exp_avg/"))
    parts = method(name).memory().step(loaded.dims, config, 2, 9, 4)
    gradients = 0 if name == "mesp" else moved  # there one layer's are, at a time
    assert parts["adapter"] == 4 * (numbers + gradients) and parts["optimizer"] == 8 * moved


def test_an_adapter_of_experts_is_fused_and_other_forms_refuse_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "qwen2_moe")
    loaded = load_model(str(folder))
    session = open_session(loaded, method_config("lora", {"rank": 2, "target_modules": BOTH}), 7)
    for step in range(2):
        session.step(IDS, LABELS, step, 1e-2)
    adapter, trained = session.adapter(), session.evaluate(IDS, LABELS)[0]
    save_adapter(adapter, tmp_path / "a")
    fuse(str(folder), tmp_path / "a", tmp_path / "fused")
    np.testing.assert_allclose(
        transformers_nll(load_model(str(tmp_path / "fused")).model, IDS, LABELS), trained, rtol=1e-5
    )
    assert convert(tmp_path / "a", "peft", tmp_path / "peft", model=str(folder)).linears == 4
    for form in ("gguf-lora", "gguf", "mlx", "vllm"):
        with pytest.raises(ConfigError):
            convert(tmp_path / "a", form, tmp_path / form, model=str(folder))
    path = tmp_path / "a" / "adapter_config.json"
    written = json.loads(path.read_text())
    for names, words in (
        (["experts.weird"], "names 'experts.weird'"),
        (["experts.down_proj"], "does not match the tensors"),
    ):
        path.write_text(json.dumps(written | {"target_parameters": names}))
        with pytest.raises(ArtifactError) as refused:
            load_adapter(tmp_path / "a")
        assert words in refused.value.message


def test_adapters_that_experts_cannot_carry_are_refused(tmp_path: Path) -> None:
    for family, name, words in (
        ("qwen2_moe", "prge", "prge does not adapt the matrices of experts"),
        ("mixtral", "prge", "prge does not adapt the matrices of experts"),
        ("gpt_oss", "mesp", "stored as [experts, inputs, outputs]"),
        ("gpt_oss", "lora", "stored as [experts, inputs, outputs]"),
        ("llama", "lora", "unknown linear layer"),
    ):
        loaded = load_model(str(save(tmp_path / f"{family}-{name}", family)))
        with pytest.raises(ModelError) as refused:
            open_session(loaded, method_config(name, {"target_modules": ["experts.down_proj"]}), 0)
        assert words in refused.value.message
