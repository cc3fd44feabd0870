"""Every decoder of transformers trains with the methods that know no block: train, save, resume, load in peft."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ondevice
from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.core.errors import ModelError, Need
from ondevice.core.registry import method, method_config, open_session
from ondevice.models import LoadedModel, load_model, read_dims
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.load import wrap
from ondevice.models.tiny import tiny_tokenizer
from ondevice.nn.adapters import apply_adapter
from ondevice.planning.estimate import plan
from tests.models.checkpoints import TOWERS, save_checkpoint
from tests.models.decoders import DECODERS, tiny_config
from tests.sampling import ALL

RATES = {"lora": 1e-2, "lora-fa": 1e-2, "prge": 1e-3, "mezo": 1e-5, "full": 1e-3, "mesp": 1e-2}
TURNS = ("full", "lora-fa", "prge", "mezo", "mesp")
"""What a type trains with next to LoRA, the types in turn; with ONDEVICE_TESTS_ALL each with all."""
IDS = np.random.default_rng(0).integers(1, 250, (2, 9))
LABELS = np.where(np.arange(9) < 2, -100, IDS)


def save(folder: Path, model_type: str, **fields: Any) -> Path:
    """Write a random model of `model_type` as `save_pretrained` does, with a tokenizer."""
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model_type].from_dict(tiny_config(model_type, **fields))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases that are not zero, norms that are not one
                parameter.add_(0.05 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def settings(name: str, loaded: LoadedModel | None = None) -> Any:
    values: dict[str, Any] = {"rank": 2} if method(name).trains == "adapter" else {}
    if (
        name == "mesp" and loaded is not None
    ):  # PEFT takes gate_proj of a shared expert for the experts' own, too
        values["target_modules"] = loaded.dims.resolve_targets(method("lora").config())
    return method_config(name, {**values, "loss_tiles": 3})


def fresh(loaded: LoadedModel) -> LoadedModel:
    return wrap(copy.deepcopy(loaded.model), loaded.tokenizer, type(loaded.family), loaded.source)


def transformers_nll(model: Any, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, :-1].double()
    targets = torch.from_numpy(labels)[:, 1:]
    nll = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none", ignore_index=-100
    )
    return nll.sum(1).numpy()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("turn", "name"), enumerate([*DECODERS, *TOWERS]), ids=[*DECODERS, *TOWERS]
)
def test_a_decoder_trains_resumes_saves_and_loads_in_peft(
    turn: int, name: str, tmp_path: Path
) -> None:
    if name in TOWERS:
        folder = save_checkpoint(tmp_path / "model", name)
    else:
        folder = save(tmp_path / "model", name)
    loaded = load_model(str(folder))
    assert read_dims(str(folder)) == loaded.dims
    assert loaded.dims.parameters == sum(
        parameter.numel() for parameter in loaded.model.parameters()
    )
    chosen = RATES if ALL else ("lora", TURNS[turn % len(TURNS)])
    for name in chosen:
        rate = RATES[name]
        if name == "mesp" and not loaded.dims.whole:
            continue  # tests of its own hold the blocks that it knows
        model, config = fresh(loaded), settings(name, loaded)
        session = open_session(model, config, 7)
        untrained = session.evaluate(IDS, LABELS)[0]
        np.testing.assert_allclose(
            untrained, transformers_nll(loaded.model, IDS, LABELS), rtol=2e-5
        )
        first = session.step(IDS, LABELS, 0, rate).loss
        session.step(IDS, LABELS, 1, rate)
        saved = {key: value.copy() for key, value in session.state().items()}
        last = session.step(IDS, LABELS, 2, rate).loss
        assert np.isfinite(last)
        if method(name).order == "first":
            assert last < first
        resumed = open_session(fresh(loaded), config, 7)
        resumed.load_state(saved)
        assert resumed.step(IDS, LABELS, 2, rate).loss == last
        state = session.state()
        assert all(np.array_equal(value, state[key]) for key, value in resumed.state().items())
        assert any(not np.array_equal(value, state[key]) for key, value in saved.items())

        trained = session.evaluate(IDS, LABELS)[0]
        adapter = session.adapter()
        if adapter is None:
            session.save_model(tmp_path / name)
            again: Any = load_model(str(tmp_path / name)).model
        else:
            save_adapter(adapter, tmp_path / name)
            assert load_adapter(tmp_path / name).linears == adapter.linears
            again = peft.PeftModel.from_pretrained(
                copy.deepcopy(loaded.model), str(tmp_path / name)
            ).eval()
            applied = fresh(loaded)
            apply_adapter(applied, adapter)
            np.testing.assert_allclose(
                transformers_nll(applied.model, IDS, LABELS), trained, rtol=2e-5
            )
        np.testing.assert_allclose(transformers_nll(again, IDS, LABELS), trained, rtol=2e-5)
        assert not np.array_equal(trained, untrained)


def test_a_method_that_computes_blocks_refuses_an_unknown_one_and_names_those_that_do_not(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path / "model", "gpt_neox")
    for call in (
        lambda: plan(str(folder), method_config("revffn"), batch_size=1, length_tokens=8),
        lambda: open_session(load_model(str(folder)), method_config("revffn"), 0),
    ):
        with pytest.raises(ModelError) as caught:
            call()
        assert caught.value.needs is Need.ANY_DECODER
        assert "method revffn" in caught.value.received


def test_a_trait_that_a_family_does_not_do_leaves_the_model_to_the_others(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama", hidden_act="gelu")
    loaded = load_model(str(folder))
    assert isinstance(loaded.family, AnyDecoder) and loaded.dims == read_dims(str(folder))
    with pytest.raises(ModelError) as caught:
        open_session(loaded, method_config("revffn"), 0)
    assert "hidden_act" in str(caught.value)
    session = open_session(loaded, settings("lora"), 0)
    assert session.step(IDS, LABELS, 1, 1e-2).loss > session.step(IDS, LABELS, 2, 1e-2).loss


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path / "model", "bert", is_decoder=False)))
    with pytest.raises(ModelError) as caught:
        open_session(loaded, settings("lora"), 0)
    assert caught.value.received.startswith("logits")
    decoder = load_model(str(save(tmp_path / "decoder", "bert", is_decoder=True)))
    assert open_session(decoder, settings("lora"), 0).step(IDS, LABELS, 0, 1e-2).loss > 0


def test_a_layer_that_the_model_never_calls_carries_no_adapter(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path / "model", "mamba")))
    for name in ("lora", "prge"):
        config = method_config(name, {"target_modules": ["in_proj", "dt_proj"], "rank": 2})
        with pytest.raises(ModelError) as caught:
            open_session(loaded, config, 0)
        assert caught.value.received == "dt_proj"
    with pytest.raises(ModelError) as caught:
        open_session(loaded, method_config("lora", {"target_modules": ["q_proj"]}), 0)
    assert "in_proj" in caught.value.expected


def test_a_plan_says_what_was_guessed_and_which_layers_are_taken(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "mamba")
    estimate = plan(str(folder), settings("lora"), batch_size=2, length_tokens=16)
    assert any("num_attention_heads" in note for note in estimate.notes)
    assert any("in_proj" in note for note in estimate.notes)
    rank, shapes = 2, [(16, 64)] * 2
    count = sum(rank * (inputs + outputs) for inputs, outputs in shapes)
    assert (
        estimate.parts["adapter"] == 8 * count
        and estimate.parts["weights"] == 4 * read_dims(str(folder)).parameters
    )


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "gpt_neox")
    weights, name = (
        load_file(folder / "model.safetensors"),
        "gpt_neox.layers.1.mlp.dense_h_to_4h.weight",
    )
    rows, columns = weights[name].shape
    weights[name] = np.zeros((rows + 1, columns), np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert name in str(caught.value)
    assert (caught.value.expected, caught.value.received) == ((rows, columns), (rows + 1, columns))


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "gpt_neox")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": "wide"}))
    with pytest.raises(ModelError) as caught:
        read_dims(str(folder))
    assert str(path) in str(caught.value)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", DECODERS)
def test_a_run_of_prge_with_nothing_set_trains_a_decoder(name: str, tmp_path: Path) -> None:
    """Its default takes a gradient's subspace, whose trained matrices are no copies of B."""
    loaded = load_model(str(save(tmp_path / "model", name)))
    rows = [{"text": text, "label": "ab"[i % 2]} for i, text in enumerate(["one", "two", "three"])]
    result = ondevice.train(
        loaded, rows, method="prge", steps=2, max_length_tokens=16, out=tmp_path / "run"
    )
    adapter = load_adapter(result.adapter)
    assert all(np.isfinite(values).all() for values in adapter.tensors.values())
    assert any(values.any() for key, values in adapter.tensors.items() if "lora_B" in key)


@pytest.mark.parametrize("name", ["slideformer", "lsp"])
def test_a_model_that_sums_in_float32_slides_in_half_precision(name: str, tmp_path: Path) -> None:
    """Mamba's hidden states are in float32 before its head in bfloat16."""
    rows = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]
    result = ondevice.train(
        load_model(str(save(tmp_path / "model", "mamba"))),
        rows,
        method=name,
        compute="bfloat16",
        steps=2,
        max_length_tokens=16,
        out=tmp_path / "run",
    )
    assert result.result.steps == 2


def test_a_rotary_embedding_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    config = tiny_config("llama") | {"rope_parameters": {"rope_type": "spiral"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_dims(str(tmp_path))
    assert "unknown rope_type" in str(caught.value) and caught.value.received == "spiral"
    assert "yarn" in caught.value.expected
