"""Folders, hub ids and dimensions: what loads, and what the errors say when something does not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ondevice.core.errors import ModelError
from ondevice.core.registry import method
from ondevice.models import (
    find_cached,
    load_model,
    load_tokenizer,
    read_dims,
    save_tiny,
    save_tokenizer,
    tiny_model,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", "llama", 5)


def test_folder_round_trip(folder: Path) -> None:
    loaded, built = load_model(str(folder)), tiny_model("llama", 5)
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    assert loaded.dims == built.dims == read_dims(str(folder))
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.family.embedding.padding_idx is None
    assert len(loaded.source.sha256) == 64
    assert find_cached(str(folder)) == folder


def test_identity_follows_the_weights(folder: Path, tmp_path: Path) -> None:
    first = load_model(str(folder)).source.sha256
    assert load_model(str(save_tiny(tmp_path / "same", "llama", 5))).source.sha256 == first
    assert load_model(str(save_tiny(tmp_path / "other", "llama", 6))).source.sha256 != first
    assert tiny_model("llama", 5).source.sha256 != tiny_model("llama", 6).source.sha256


@pytest.mark.parametrize(
    "sizes", [{}, {"tied": False, "hidden": 96, "heads": 3, "kv_heads": 1, "vocab": 300}]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_dims_without_weights(family: str, sizes: dict, tmp_path: Path) -> None:
    """From the raw file, also as transformers 4 wrote it, equal to those of the model."""
    dims = tiny_model(family, **sizes).dims
    path = save_tiny(tmp_path / "model", family, **sizes)
    (path / "model.safetensors").unlink()
    assert read_dims(str(path)) == dims
    config = json.loads((path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (path / "config.json").write_text(json.dumps(config))
    assert read_dims(str(path)) == dims
    assert read_dims(f"tiny:{family}").family == family


def edit(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return change


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_tokenizer(folder: Path) -> None:
    edit_weights(
        lambda t: t.update(
            {"model.embed_tokens.weight": t["model.embed_tokens.weight"][:200].clone()}
        )
    )(folder)
    edit(vocab_size=200)(folder)


def lost_unknown_token(folder: Path) -> None:
    """A vocabulary of whole words that names an unknown token which it lacks."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "true"}
    values |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    path.write_text(json.dumps(values | {"normalizer": None}))


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        "give its base model",
    ),
    "config cut off": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json is not readable JSON",
    ),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "tokenizer cut off": (
        lambda f: (f / "tokenizer.json").write_text('{"model": '),
        "tokenizer cannot be read",
    ),
    "unknown token not in the vocabulary": (lost_unknown_token, "tokenizer cannot be read"),
    "tokenizer of another model": (other_tokenizer, "the tokenizer is another model's"),
    "tokenizer of a smaller model": (
        edit(vocab_size=49152, eos_token_id=[49151]),
        "the tokenizer is another model's",
    ),
    "pickled": (pickle_only, "pickled weights are refused"),
    "shard lost": (lost_shard, "model-00002-of-00002.safetensors"),
    "weights cut off": (damage, "model.safetensors is damaged"),
    "tensor lost": (edit_weights(lambda t: t.pop(NORM)), NORM),
    "tensor of another shape": (edit_weights(lambda t: t.update({NORM: torch.ones(3)})), NORM),
    "other family": (edit(model_type="phi99"), "models of type 'phi99' are not supported"),
    "no family": (edit(model_type=...), "model_type None"),
    "family is a list": (edit(model_type=["llama"], architectures=...), "model_type ['llama']"),
    "classes are a number": (edit(architectures=7), "`architectures` of a wrong type"),
    "a class is a number": (edit(architectures=[7]), "`architectures` of a wrong type"),
    "no sizes": (edit(hidden_size=...), "'hidden_size'"),
    "size is text": (edit(num_hidden_layers="2"), "'num_hidden_layers'"),
    "heads do not divide": (edit(num_key_value_heads=3), "'num_key_value_heads'"),
    "quantised": (edit(quantization_config={"quant_method": "gptq"}), "gptq"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(case: str, folder: Path) -> None:
    damage, words = BROKEN[case]
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)
    assert caught.value.exit_code == 4


TRAITS = {
    "other activation": (edit(hidden_act="gelu"), "'hidden_act'"),
    "rope by length": (edit(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    "sliding window": (
        edit(
            model_type="qwen2",
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
            layer_types=None,
        ),
        "sliding window",
    ),
}


@pytest.mark.parametrize("case", TRAITS)
def test_what_a_family_does_not_do_is_said_to_methods_that_compute_blocks(
    case: str, folder: Path
) -> None:
    damage, words = TRAITS[case]
    damage(folder)
    dims = read_dims(str(folder))
    assert dims.whole
    with pytest.raises(ModelError) as caught:
        method("revffn").check_model(dims)
    assert words in str(caught.value)
    method("lora").check_model(dims)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        (
            "phi99",
            "pip install -U transformers; or choose another model: `ondevice models --types`",
        ),
        ("vit", "vit is not a decoder"),
        (..., "is this a folder that transformers saved?"),
    ],
)
def test_an_unsupported_type_says_what_to_do(model_type: object, words: str, folder: Path) -> None:
    """What to do, for somebody who has the model: not how to write a class."""
    edit(model_type=model_type)(folder)
    with pytest.raises(ModelError) as caught:
        read_dims(str(folder))
    assert caught.value.expected.startswith(
        "a decoder of the installed transformers, or one of gemma3_text, gemma4_text, gpt2, "
    )
    assert words in caught.value.hint and "ondevice/models/" not in caught.value.hint


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/no/such/folder", "does not exist"),
        ("./nothing", "does not exist"),
        ("no/such.gguf", "does not exist"),
        ("tiny:gpt5", "unknown tiny model"),
        ("package:", "cannot be read"),
        ("package:a b", "cannot be read"),
        ("somebody/some-model", "the hub cannot be reached"),
        ("not a model!", "does not exist"),
    ],
)
def test_sources_that_are_not_there(source: str, words: str) -> None:
    for call in (load_model, read_dims, load_tokenizer):
        with pytest.raises(ModelError) as caught:
            call(source)
        assert words in str(caught.value)


def test_a_hub_model_of_the_cache_needs_no_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--somebody--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    loaded = load_model("somebody/tiny")
    assert loaded.dims == read_dims("somebody/tiny") == tiny_model().dims
    assert loaded.source.path == repository / "snapshots" / commit
    with pytest.raises(ModelError) as caught:
        load_model("somebody/tiny", revision="v2")
    assert "somebody/tiny@v2" in str(caught.value)


def test_wrong_dtype_and_device(folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), dtype="int8")
    assert caught.value.received == "int8"
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), device="npu9000")
    assert caught.value.received == "npu9000"
    if not torch.cuda.is_available():
        with pytest.raises(ModelError) as caught:
            load_model(str(folder), device="cuda")
        assert caught.value.received == "cuda"
        assert load_model(str(folder), device="auto").model.device.type == "cpu"


def test_importing_loads_no_framework(folder: Path) -> None:
    code = (
        f"import sys; import ondevice.models as m; print(m.read_dims({str(folder)!r}).layers); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr


def test_tokenizer_is_bytes_and_has_a_chat(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    text = "één 🙂\n\tab  c"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 257)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat)["input_ids"][:3] == [258, ord("u"), ord("s")]
    for source in (str(folder), "tiny:llama"):
        save_tokenizer(load_model(source), tmp_path / "copy")
        assert load_tokenizer(source)("<|im_end|>a")["input_ids"] == [259, 97]
    assert (tmp_path / "copy" / "tokenizer.json").is_file()


@pytest.mark.parametrize("sizes", [{"hidden": 48}, {"heads": 3}, {"kv_heads": 3}, {"vocab": 256}])
def test_tiny_sizes_that_do_not_fit(sizes: dict) -> None:
    with pytest.raises(ModelError):
        tiny_model(**sizes)


def test_a_hub_that_cannot_be_reached_is_asked_once_and_for_a_moment(monkeypatch) -> None:
    """huggingface_hub itself tries for half a minute before it says that nobody answers."""
    from ondevice.models.sources import hub

    tried: list[str] = []
    connect = hub._connects
    monkeypatch.setattr(hub, "_asked", None)
    monkeypatch.setattr(
        hub, "_connects", lambda within_s: tried.append("once") or connect(within_s)
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            load_model("nobody/has-this-model")
        assert "nobody/has-this-model" in str(caught.value)
    assert tried == ["once"]
