"""mlx-lm's adapters: the same logits in mlx-lm, in PEFT and here, in both directions; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
from ondevice.artifact.mlx_lm_files import load_mlx_lm_adapter, save_mlx_lm_adapter
from ondevice.core.errors import ArtifactError
from ondevice.models import load_model, save_tiny
from tests.cli.command import CommandLine

IDS = np.arange(12).reshape(1, 12) * 7 % 256


def adapter(
    targets: tuple[str, ...] = ("q_proj", "down_proj"), layers: tuple[int, ...] = (0, 1)
) -> Adapter:
    """Random pairs of rank 3 for the tiny model; alpha is no multiple of the rank."""
    random, tensors = np.random.default_rng(0), {}
    shapes = {"q_proj": ("self_attn", 64, 64), "down_proj": ("mlp", 128, 64)}
    for layer in layers:
        for target in targets:
            parent, inputs, outputs = shapes[target]
            name = f"model.layers.{layer}.{parent}.{target}"
            tensors[f"{name}.lora_A.weight"] = (
                random.standard_normal((3, inputs)).astype(np.float32) / 8
            )
            tensors[f"{name}.lora_B.weight"] = (
                random.standard_normal((outputs, 3)).astype(np.float32) / 8
            )
    return Adapter(tensors, 3, 7.0, tuple(sorted(targets)), "somewhere")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("mlx_lm") / "model", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where mlx-lm looks for it
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_mlx_lm(model: Path, folder: Path | None) -> np.ndarray:
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    from mlx_lm.tuner.utils import load_adapters

    loaded, _ = utils.load_model(model)
    if folder is not None:
        load_adapters(loaded, str(folder))
    loaded.eval()
    return np.array(loaded(mx.array(IDS)).astype(mx.float32))


def in_peft(model: Path, folder: Path) -> np.ndarray:
    import peft
    import torch

    with torch.no_grad():
        return peft.PeftModel.from_pretrained(load_model(str(model)).model, folder)(
            torch.from_numpy(IDS)
        ).logits.numpy()


@pytest.mark.parametrize(
    "lora", [adapter(), adapter(("q_proj",)), adapter(layers=(0,)), adapter(layers=(1,))]
)
def test_mlx_lm_and_peft_give_the_same_logits(model, tmp_path, lora) -> None:
    save_adapter(lora, tmp_path / "peft")
    save_mlx_lm_adapter(load_adapter(tmp_path / "peft"), tmp_path / "mlx")
    expected = in_peft(model, tmp_path / "peft")
    np.testing.assert_allclose(in_mlx_lm(model, tmp_path / "mlx"), expected, rtol=0, atol=2e-5)
    assert np.abs(in_mlx_lm(model, None) - expected).max() > 1e-2
    save_adapter(load_adapter(tmp_path / "mlx"), tmp_path / "back")
    np.testing.assert_array_equal(in_peft(model, tmp_path / "back"), expected)


def test_what_mlx_lm_trained_is_read(model, tmp_path) -> None:
    """An adapter as `mlx_lm.lora` writes it: the last layer only, its own file and settings."""
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    loaded, _ = utils.load_model(model)
    parameters = {
        "rank": 4,
        "scale": 20.0,
        "dropout": 0.0,
        "keys": ["self_attn.v_proj", "mlp.up_proj"],
    }
    loaded.freeze()
    linear_to_lora_layers(loaded, 1, parameters)
    trained = {name: value + 0.05 for name, value in tree_flatten(loaded.trainable_parameters())}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), trained)
    config = {
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": parameters,
        "model": "some/model",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    answer = load_adapter(tmp_path)
    assert (answer.rank, answer.alpha, answer.base_model) == (4, 80.0, "some/model")
    assert answer.linears == ("model.layers.1.mlp.up_proj", "model.layers.1.self_attn.v_proj")
    save_adapter(answer, tmp_path / "peft")
    np.testing.assert_allclose(
        in_peft(model, tmp_path / "peft"), in_mlx_lm(model, tmp_path), rtol=0, atol=5e-4
    )


def test_the_command_converts(tmp_path, capsys) -> None:
    save_adapter(adapter(), tmp_path / "peft")
    done = CommandLine(capsys)(
        "convert", str(tmp_path / "peft"), "--to", "mlx", "--out", str(tmp_path / "mlx"), "--json"
    )
    assert done.json["form"] == "mlx" and done.json["linears"] == 4
    there, here = load_adapter(tmp_path / "mlx"), adapter()
    assert there.alpha == pytest.approx(here.alpha) and there.tensors.keys() == here.tensors.keys()
    assert all(np.array_equal(there.tensors[name], here.tensors[name]) for name in here.tensors)


def edit(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BROKEN = {
    "dora": (lambda f: edit(f, fine_tune_type="dora"), "fine_tune_type"),
    "another rank": (
        lambda f: edit(f, lora_parameters={"rank": 8, "scale": 1.0}),
        "'rank' does not fit",
    ),
    "no scale": (lambda f: edit(f, lora_parameters={"rank": 3}), "'scale'"),
    "no parameters": (lambda f: edit(f, lora_parameters=None), "'rank' does not fit"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "lacks a file"),
    "config is no JSON": (
        lambda f: (f / "adapter_config.json").write_text("{"),
        "not readable JSON",
    ),
    "weights are cut off": (
        lambda f: (f / "adapters.safetensors").write_bytes(
            (f / "adapters.safetensors").read_bytes()[:-8]
        ),
        "damaged",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(tmp_path, name) -> None:
    save_mlx_lm_adapter(adapter(), tmp_path / "mlx")
    damage, match = BROKEN[name]
    damage(tmp_path / "mlx")
    with pytest.raises(ArtifactError) as caught:
        load_mlx_lm_adapter(tmp_path / "mlx")
    assert match in str(caught.value)


def test_layers_outside_the_blocks_are_refused(tmp_path) -> None:
    head = {
        "lm_head.lora_A.weight": np.ones((2, 4), np.float32),
        "lm_head.lora_B.weight": np.ones((5, 2), np.float32),
    }
    with pytest.raises(ArtifactError) as caught:
        save_mlx_lm_adapter(Adapter(head, 2, 2.0, ("lm_head",), ""), tmp_path / "mlx")
    assert "lm_head" in str(caught.value)
    assert not (tmp_path / "mlx").exists()
