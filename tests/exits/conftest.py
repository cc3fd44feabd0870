"""A tiny model of each family with an adapter that changes it, and what PyTorch computes with both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter, targets_of
from ondevice.models import LoadedModel, load_model, save_tiny
from tests.exits.table import FAMILIES

IDS = list(b"What is held against it.")


@dataclass(frozen=True)
class Case:
    """A model's folder, its adapter's, and logarithms of the next token's probabilities after `IDS`."""

    model: Path
    adapter: Path
    base: np.ndarray
    expected: np.ndarray


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """One case a family; the expected numbers are of PEFT's own merged model."""
    return {family: make_case(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def make_case(folder: Path, family: str, **sizes: Any) -> Case:
    from peft import PeftModel

    values = {"vocab": 288, "tied": family in ("lfm2", "llama", "qwen2"), **sizes}
    model = save_tiny(folder / "model", family, **values)
    loaded = load_model(str(model))
    save_adapter(random_adapter(loaded), folder / "adapter")
    base = log_probabilities(loaded.model)
    merged = PeftModel.from_pretrained(loaded.model, folder / "adapter").merge_and_unload()
    return Case(model, folder / "adapter", base, log_probabilities(merged))


def random_adapter(loaded: LoadedModel, scale: float = 0.05) -> Adapter:
    """Random pairs of rank 3 on every linear layer; alpha is no multiple of the rank."""
    rng, tensors = np.random.default_rng(0), {}
    for one in loaded.dims.linear_list:
        name = loaded.family.linear_name(one.layer, one.target)
        a = rng.normal(size=(3, one.inputs)) / one.inputs**0.5
        tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
        b = rng.normal(size=(one.outputs, 3)) * scale
        tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    return Adapter(tensors, 3, 7.0, targets_of(tensors), loaded.source.source)


def log_probabilities(model, ids=IDS) -> np.ndarray:
    """Return float64 [vocab] after `ids`."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return torch.log_softmax(logits.double(), -1).numpy()


def zero_adapter(folder: Path, like: Path) -> Path:
    """Write an adapter whose products are all zero."""
    adapter = load_adapter(like)
    tensors = {name: value * (".lora_A." in name) for name, value in adapter.tensors.items()}
    save_adapter(
        Adapter(tensors, adapter.rank, adapter.alpha, adapter.target_modules, adapter.base_model),
        folder,
    )
    return folder
