"""Mixtures of experts in MLX: 4 bits, streamed weights, both layouts of files, what is refused.

`test_gradients` holds their gradients against autograd in float64.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

mx = pytest.importorskip("mlx.core")

from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.core.registry import method_config, open_session  # noqa: E402
from ondevice.methods.mesp.mlx.model import Model  # noqa: E402
from ondevice.models import open_model, save_tiny  # noqa: E402
from tests.methods.mesp.mlx.models import error, gradients, tokens  # noqa: E402

SIZES = {
    "hidden": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 5,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed weights are converted into the cache."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("mixture") / "model", "qwen2_moe", **SIZES)


def opened(folder: Path, **settings: Any) -> Any:
    session: Any = open_session(
        open_model(str(folder)), method_config("mesp", {"rank": 2, **settings}), 3, backend="mlx"
    )
    start, random = session.adapter(), np.random.default_rng(0)
    for name, value in start.tensors.items():
        if ".lora_B." in name:
            value[:] = 0.1 * random.standard_normal(value.shape)
    session.load_adapter(start)
    return session


def test_four_bits_have_the_gradients_of_the_rounded_weights(folder: Path) -> None:
    packed, dense = opened(folder, bits=4), opened(folder)
    for ours, theirs in zip(packed.model.weights.blocks, dense.model.weights.blocks, strict=True):
        assert sum(name.endswith(".scales") for name in ours.arrays) == len("qkvo") + 2 + 3
        for name in [
            name.removesuffix(".scales") for name in ours.arrays if name.endswith(".scales")
        ]:
            parts = (ours.arrays[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
            theirs.arrays[f"{name}.weight"] = mx.dequantize(*parts, group_size=64, bits=4)
    table = packed.model.weights.table.arrays
    parts = (table[f"embedding.{part}"] for part in ("weight", "scales", "biases"))
    rounded = mx.dequantize(*parts, group_size=64, bits=4)
    for name in ("embedding", "head"):  # tied
        dense.model.weights.table.arrays[f"{name}.weight"] = rounded
    ids, labels = tokens(2, 12, 256)
    (loss, ours), (other, theirs) = (
        gradients(s.model, Model.forward_backward, ids, labels) for s in (packed, dense)
    )
    assert loss == pytest.approx(other, rel=1e-6)
    assert max(error(ours[name], theirs[name]) for name in ours) <= 1e-5


def test_streamed_weights_and_both_file_layouts_give_the_same_bits(
    folder: Path, tmp_path: Path
) -> None:
    """transformers holds all experts of a layer in one tensor; published files have each expert's
    matrices apart."""
    (path,) = folder.glob("*.safetensors")
    there = load_file(path)
    fused = any(name.endswith(".experts.gate_up_proj") for name in there)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = {name: value for name, value in there.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        if fused:
            for number in range(SIZES["num_experts"]):
                gate, up = there[f"{at}.gate_up_proj"][number].chunk(2)
                one = {"gate": gate, "up": up, "down": there[f"{at}.down_proj"][number]}
                tensors |= {
                    f"{at}.{number}.{name}_proj.weight": value.clone()
                    for name, value in one.items()
                }
        else:
            import torch

            each = [
                {
                    name: there[f"{at}.{number}.{name}_proj.weight"]
                    for name in ("gate", "up", "down")
                }
                for number in range(SIZES["num_experts"])
            ]
            tensors[f"{at}.gate_up_proj"] = torch.stack(
                [torch.cat([one["gate"], one["up"]]) for one in each]
            )
            tensors[f"{at}.down_proj"] = torch.stack([one["down"] for one in each])
    save_file(tensors, other / path.name, metadata={"format": "pt"})
    ids, labels = tokens(2, 12, 256)
    sessions = [opened(folder), opened(folder, weight_placement="streamed"), opened(other)]
    losses = [
        [session.step(ids, labels, step, 1e-2).loss for step in range(2)] for session in sessions
    ]
    assert losses[0][1] < losses[0][0]
    assert losses[0] == losses[1] == losses[2]


def test_adapters_on_experts_and_odd_widths_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(folder, target_modules=["q_proj", "experts.down_proj"])
    assert caught.value.hint is not None and "--backend torch" in caught.value.hint
    odd = save_tiny(tmp_path / "odd", "qwen2_moe", **{**SIZES, "moe_intermediate_size": 24})
    with pytest.raises(ConfigError) as packing:
        opened(odd, bits=4)
    assert packing.value.received == "24 inputs"
