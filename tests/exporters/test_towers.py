"""A checkpoint that also reads images is exported as its language model, by the command; what a
device trains has the names that peft gives in the whole checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForMultimodalLM

from ondevice.artifact.adapter import load_adapter
from ondevice.core.config import ExportConfig
from ondevice.core.registry import method_config
from ondevice.models import load_model, read_dims
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.text_model import load_text_model
from ondevice.nn.adapters import apply_adapter
from ondevice.planning.estimate import plan
from tests.cli.command import CommandLine, write_rows
from tests.models.checkpoints import save_checkpoint, save_unknown

ROWS = [{"prompt": f"{n} and {n}?", "completion": f" {2 * n} it is"} for n in range(4)]
IDS = torch.arange(1, 10)[None] * 11 % 250
EXPORTS = [
    ("Mistral-Small-3.2-24B-Instruct", "android-cpu", "mesp"),
    ("gemma-3-4b-it", "jetson", "prge"),
    ("Qwen3.5-0.8B", "apple-mlx", "mesp"),
    ("gemma-3-4b-it", "apple-mlx", "mesp"),
    ("Qwen3.5-0.8B", "jetson", "mesp"),
    ("gemma-3-4b-it", "jetson", "lora"),
]


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.numpy()


@pytest.mark.parametrize(("name", "target", "method"), EXPORTS)
def test_a_tower_is_exported_trained_and_merged_into_the_whole_checkpoint(
    name: str, target: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if target == "apple-mlx":
        pytest.importorskip("mlx.core")
    command = CommandLine(capsys)
    folder = save_checkpoint(tmp_path / "model", name)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    artifact, run = tmp_path / "artifact", tmp_path / "run"
    settings = ["--set", "export.lengths_tokens=[32]", "--set", "method.rank=2"]
    options = ["--target", target, "--method", method, *settings, "--set", "model.dtype=float32"]
    done = command("export", "-m", folder, *options, "-o", artifact)
    assert done.code == 0, done.err
    done = command("run", artifact, "-d", rows, "-n", 3, "--lr", 0.01, "-o", run, "-q")
    assert done.code == 0, done.err

    trained = load_adapter(run / "adapter")
    dims: Any = read_dims(str(folder))
    places = {f"{dims.blocks}.{one.layer}.{one.target}" for one in dims.linear_list}
    assert trained.linears and set(trained.linears) <= places
    with quiet_transformers():
        whole: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before = logits(whole)
    changed = logits(peft.PeftModel.from_pretrained(whole, str(run / "adapter")).eval())
    assert np.abs(changed - before).max() > 1e-4
    text = load_text_model(str(folder))
    apply_adapter(text, trained)
    assert np.abs(logits(text.model) - changed).max() <= 1e-5

    done = command("convert", run, "--to", "safetensors", "-o", tmp_path / "merged")
    assert done.code == 0, done.err
    merged = load_model(str(tmp_path / "merged"))
    assert np.abs(logits(merged.model) - changed).max() <= 1e-5
    now, then = (load_file(one / "model.safetensors") for one in (tmp_path / "merged", folder))
    pictures = [key for key in then if "vision" in key or "visual" in key]
    assert pictures and all(now[key].tobytes() == then[key].tobytes() for key in pictures)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "vision_config" in config


@pytest.mark.parametrize("name", ["SmolVLM2-2.2B-Instruct", "gemma-3-4b-it"])
def test_the_plan_of_a_program_leaves_out_the_tower_that_it_does_not_have(
    name: str, tmp_path: Path
) -> None:
    """It is the plan of the same language model saved as a model of text."""
    folder = str(save_checkpoint(tmp_path / "model", name))
    text = load_text_model(folder).model
    text.save_pretrained(tmp_path / "text")
    method = method_config("mesp", {})
    sizes: dict[str, Any] = {"batch_size": 1, "length_tokens": 32}
    for options in (
        {"runtime": "executorch"},
        {"export": ExportConfig.parse({"target": "jetson"}, "test")},
    ):
        whole, own = (
            plan(one, method, **sizes, **options).to_dict()["parts_bytes"]
            for one in (folder, tmp_path / "text")
        )
        assert whole == own
    weights = 4 * sum(one.numel() for one in text.parameters())
    assert whole["weights"] == weights
    trained = plan(folder, method, **sizes).to_dict()[
        "parts_bytes"
    ]  # in PyTorch the whole checkpoint is loaded
    every = 4 * sum(one.numel() for one in load_model(folder).model.parameters())
    assert trained["weights"] == every > 2 * weights


@pytest.mark.parametrize("target", ["android-cpu", "apple-mlx"])
def test_a_language_model_beyond_its_family_is_refused_by_its_trait(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_unknown(tmp_path / "model")
    words = ("-m", folder, "--target", target, "--method", "mesp", "-o", tmp_path / "artifact")
    done = CommandLine(capsys)("export", *words)
    assert done.code != 0
    assert "'use_bidirectional_attention' (all; known: null)" in done.err
    assert "ondevice train" in done.err
