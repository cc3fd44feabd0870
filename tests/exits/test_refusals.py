"""What cannot be written is refused by name, early, and leaves nothing behind."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
from ondevice.core.errors import (
    ArtifactError,
    ConfigError,
    ModelError,
    OndeviceError,
    StorageError,
    VerificationError,
)
from ondevice.core.registry import method_config, open_session
from ondevice.exits import check, convert, form_names, gguf_lora
from ondevice.gguf import names
from ondevice.models import load_model, save_tiny, tiny_model
from tests.cli.command import CommandLine
from tests.exits.conftest import random_adapter, zero_adapter


def refused(kind: type[OndeviceError], words: str, *arguments, **options) -> None:
    """Call `convert` into a new folder: it raises, and the folder is as empty as before."""
    folder = options.pop("folder")
    folder.mkdir()
    with pytest.raises(kind) as caught:
        convert(*arguments, folder / "out", **options)
    assert re.search(words, str(caught.value))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("form", form_names())
def test_an_adapter_that_changes_nothing(cases, tmp_path: Path, form: str) -> None:
    case = cases["llama"]
    zero = zero_adapter(tmp_path / "zero", case.adapter)
    refused(
        VerificationError,
        "changes nothing",
        zero,
        form,
        model=str(case.model),
        folder=tmp_path / "f",
    )


def test_an_older_adapter_on_the_dense_mlp_of_a_mixture(tmp_path: Path) -> None:
    """LFM2-8B-A1B ran as any decoder does, with pairs on `w1` to `w3` of the layers without experts."""
    folder = save_tiny(tmp_path / "model", "lfm2_moe")
    loaded = load_model(str(folder))
    assert loaded.dims.dense_layers == (0,)
    tensors = {}
    for part in ("w1", "w2", "w3"):
        name = f"model.layers.0.feed_forward.{part}"
        outputs, inputs = loaded.model.get_parameter(f"{name}.weight").shape
        tensors[f"{name}.lora_A.weight"] = np.ones((4, inputs), np.float32)
        tensors[f"{name}.lora_B.weight"] = np.ones((outputs, 4), np.float32)
    save_adapter(Adapter(tensors, 4, 16.0, ("w1", "w2", "w3"), str(folder)), tmp_path / "old")
    for method in ("lora", "mesp"):
        session = open_session(load_model(str(folder)), method_config(method, {"rank": 4}), 0)
        with pytest.raises(ArtifactError) as caught:
            session.load_adapter(load_adapter(tmp_path / "old"))
        assert "model.layers.0.feed_forward.w1" in caught.value.message
        assert "train a new adapter" in caught.value.hint and "in_proj" in caught.value.hint
    with pytest.raises(ModelError) as unknown:
        open_session(
            load_model(str(folder)),
            method_config("mesp", {"target_modules": ("w1", "w2", "w3")}),
            0,
        )
    assert "in_proj" in str(unknown.value.expected)
    for form in ("gguf", "peft", "safetensors"):
        refused(
            ArtifactError,
            "'model.layers.0.feed_forward.w1', which is not a linear layer of a block",
            tmp_path / "old",
            form,
            model=str(folder),
            folder=tmp_path / form,
        )


@pytest.mark.parametrize(
    ("form", "words"),
    [("mlx-model", "mlx-lm has no models of type"), ("executorch", "a gated delta rule")],
)
def test_forms_without_a_gated_delta_rule(form: str, words: str, tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "model", "qwen3_5_text", vocab=288)))
    save_adapter(random_adapter(loaded), tmp_path / "adapter")
    arguments = (tmp_path / "adapter", form)
    model = str(tmp_path / "model")
    refused(ModelError, words, *arguments, model=model, folder=tmp_path / "f")


@pytest.mark.parametrize("form", form_names())
def test_an_adapter_of_another_model(cases, tmp_path: Path, form: str) -> None:
    other = save_tiny(tmp_path / "other", "llama", hidden=32, layers=1)
    adapter = cases["llama"].adapter
    refused(
        ArtifactError,
        "is not of .*other.*down_proj",
        adapter,
        form,
        model=str(other),
        folder=tmp_path / "f",
    )


@pytest.mark.parametrize(("name", "words"), [
    ("lm_head", "the output head is tied"),
    ("model.embed_tokens", "'model.embed_tokens', which is not a linear layer"),
    ("model.layers.0.input_layernorm", "'model.layers.0.input_layernorm', which is not a linear layer"),
])  # fmt: skip
def test_heads_embeddings_and_norms_are_named(cases, tmp_path: Path, name: str, words: str) -> None:
    adapter = load_adapter(cases["llama"].adapter)
    tensors = {
        f"{name}.lora_A.weight": np.ones((3, 64), np.float32),
        f"{name}.lora_B.weight": np.ones((288, 3), "f4"),
    }
    wider = replace(
        adapter, tensors=adapter.tensors | tensors, target_modules=(*adapter.target_modules, name)
    )
    save_adapter(wider, tmp_path / "wider")
    model = str(cases["llama"].model)
    refused(
        ArtifactError, words, tmp_path / "wider", "gguf-lora", model=model, folder=tmp_path / "f"
    )


def test_a_rank_beyond_the_readers_limit(cases, tmp_path: Path) -> None:
    adapter, rng = load_adapter(cases["llama"].adapter), np.random.default_rng(0)
    linear = adapter.linears[0]
    a, b = (rng.normal(size=size).astype(np.float32) for size in ((513, 128), (64, 513)))
    tensors = {f"{linear}.lora_A.weight": a, f"{linear}.lora_B.weight": b}
    save_adapter(
        replace(adapter, tensors=tensors, rank=513, target_modules=("down_proj",)),
        tmp_path / "wide",
    )
    refused(ConfigError, "vLLM does not take", tmp_path / "wide", "vllm", folder=tmp_path / "f")


def test_a_tiny_model_has_no_files_for_vllm(tmp_path: Path) -> None:
    """A dry run refuses it, too; its name is no path that is missing."""
    save_adapter(random_adapter(tiny_model("llama")), tmp_path / "a")
    words = "tiny:llama has no files that vLLM could load"
    for dry_run in (True, False):
        with pytest.raises(ConfigError) as caught:
            convert(tmp_path / "a", "vllm", tmp_path / "f", model="tiny:llama", dry_run=dry_run)
        assert caught.value.message == words
        assert "--to safetensors" in str(caught.value.hint)
    assert not (tmp_path / "f").exists()


def test_a_family_without_gguf_form(cases, tmp_path: Path, monkeypatch) -> None:
    case = cases["qwen2"]
    monkeypatch.setattr("ondevice.models.families.qwen2.Qwen2.gguf_architecture", None)
    for form in ("gguf-lora", "gguf", "ollama"):
        words = "qwen2 models have no GGUF form"
        refused(
            ModelError, words, case.adapter, form, model=str(case.model), folder=tmp_path / form
        )
    monkeypatch.setattr("ondevice.models.families.qwen2.Qwen2.gguf_architecture", "gpt2")
    words = "has no name in GGUF files of architecture gpt2"
    refused(
        ModelError, words, case.adapter, "gguf-lora", model=str(case.model), folder=tmp_path / "f"
    )
    refused(
        ModelError,
        "cannot become a merged GGUF file",
        case.adapter,
        "gguf",
        model=str(case.model),
        folder=tmp_path / "g",
    )


@pytest.mark.parametrize("form", form_names())
def test_a_full_disk(cases, tmp_path: Path, form: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    case = cases["llama"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))  # less than any of the forms needs
    try:
        refused(
            StorageError,
            "no space left|larger than a file may be",
            case.adapter,
            form,
            model=str(case.model),
            folder=tmp_path / "f",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_is_there_stays(cases, tmp_path: Path) -> None:
    case, model = cases["llama"], str(cases["llama"].model)
    precious = tmp_path / "notes.txt"
    precious.write_text("mine")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(StorageError):
            convert(case.adapter, "gguf-lora", precious, model=model, **options)
    with pytest.raises(StorageError) as caught:
        convert(case.adapter, "safetensors", case.model, model=model, overwrite=True)
    assert caught.value.expected == "another path"
    assert precious.read_text() == "mine" and load_model(model)
    out = tmp_path / "a.gguf"
    first = convert(case.adapter, "gguf-lora", out, model=model)
    with pytest.raises(StorageError) as caught:
        convert(case.adapter, "gguf-lora", out, model=model)
    assert "--overwrite" in caught.value.hint
    assert convert(case.adapter, "gguf-lora", out, model=model, overwrite=True).bytes == first.bytes


@pytest.mark.parametrize(
    "fault", ["no permutation", "no scale", "a tensor missing", "another number"]
)
def test_a_fault_of_the_writer_is_found(cases, tmp_path: Path, monkeypatch, fault: str) -> None:
    """Each of these would give an adapter that llama.cpp loads without a word."""
    case, plain = cases["llama"], gguf_lora.write_gguf
    if fault == "no permutation":
        monkeypatch.setattr(
            gguf_lora, "to_gguf", lambda family, name, weights, dims, is_weight: weights
        )
    elif fault == "no scale":
        monkeypatch.setattr(
            "gguf.GGUFWriter.add_float32", lambda self, key, value: self.add_key_value(key, 1.0, 6)
        )
    else:

        def faulty(writer, tensors, plan):
            values = list(tensors)
            if fault == "another number":
                values[3] = (values[3][0], values[3][1] + 1e-6, values[3][2])
            else:
                del plan[values.pop()[0]]
            plain(writer, values, plan)

        monkeypatch.setattr(gguf_lora, "write_gguf", faulty)
    refused(
        VerificationError,
        "",
        case.adapter,
        "gguf-lora",
        model=str(case.model),
        folder=tmp_path / "f",
    )


def test_a_merge_that_is_not_base_plus_adapter(cases, tmp_path: Path, monkeypatch) -> None:
    case = cases["llama"]
    monkeypatch.setattr(
        names, "to_gguf", lambda family, name, weights, dims, is_weight=True: weights
    )
    refused(
        VerificationError,
        "_proj",
        case.adapter,
        "gguf",
        model=str(case.model),
        folder=tmp_path / "f",
    )
    monkeypatch.undo()
    monkeypatch.setattr(check, "fuse_in_place", lambda loaded: [
        loaded.family.set_linear(i, t, loaded.family.linear(i, t).base)
        for i in range(2) for t in loaded.family.linear_targets
    ])  # fmt: skip
    refused(
        VerificationError,
        "",
        case.adapter,
        "gguf",
        model=str(case.model),
        dtype="float32",
        folder=tmp_path / "g",
    )


def test_an_adapter_that_rounding_swallows(cases, tmp_path: Path) -> None:
    adapter = load_adapter(cases["llama"].adapter)
    tensors = {
        name: value * (1e-9 if ".lora_B." in name else 1) for name, value in adapter.tensors.items()
    }
    save_adapter(replace(adapter, tensors=tensors), tmp_path / "small")
    model = str(cases["llama"].model)
    for dtype in ("float16", "q8_0", "q4_0"):
        refused(VerificationError, "rounds the adapter away|changes nothing", tmp_path / "small", "gguf", model=model,
                dtype=dtype, folder=tmp_path / dtype)  # fmt: skip


def test_the_command(cases, tmp_path: Path, capsys) -> None:
    case, command = cases["llama"], CommandLine(capsys)
    run = tmp_path / "a run"
    run.mkdir()
    save_adapter(replace(load_adapter(case.adapter), base_model=str(case.model)), run / "adapter")
    out = tmp_path / "a.gguf"
    planned = command("convert", run, "--to", "gguf-lora", "--out", out, "--dry-run", "--json")
    assert planned.json["bytes"] == 0 and not out.exists()
    done = command("convert", run, "--to", "gguf-lora", "--out", out, "--json")
    assert done.json["bytes"] == out.stat().st_size and done.json["model"] == str(case.model)
    assert command("convert", run, "--to", "gguf-lora", "--out", out).code == StorageError.exit_code
    shown = command("convert", run, "--to", "vllm", "--out", tmp_path / "served")
    assert (
        "--max-lora-rank 8" in " ".join(shown.err.split())
        and (tmp_path / "served" / "serve.sh").is_file()
    )
    for arguments, code in (
        (("--to", "onnx", "--out", tmp_path / "x"), ConfigError.exit_code),
        (("--to", "gguf"), ConfigError.exit_code),
        (("--to", "gguf", "--dtype", "q2_k", "--out", tmp_path / "x"), ConfigError.exit_code),
        (("--to", "peft", "--dtype", "float16", "--out", tmp_path / "x"), ConfigError.exit_code),
    ):
        assert command("convert", run, *arguments).code == code
    assert (
        command("convert", tmp_path / "nowhere", "--out", tmp_path / "x").code
        == ArtifactError.exit_code
    )


def test_an_adapter_that_names_no_model(cases, tmp_path: Path) -> None:
    save_adapter(
        replace(load_adapter(cases["llama"].adapter), base_model=""), tmp_path / "nameless"
    )
    refused(
        ConfigError,
        "does not name its model",
        tmp_path / "nameless",
        "gguf-lora",
        folder=tmp_path / "f",
    )
    assert (
        convert(tmp_path / "nameless", "mlx", tmp_path / "mlx").max_abs_difference_from_base is None
    )
