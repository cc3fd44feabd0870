"""The decoder that keeps its own cache is the model itself, in every family that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ondevice.core.errors import ModelError
from ondevice.models import load_model, save_tiny
from ondevice.nn.adapters import adapted
from tests.exits.conftest import random_adapter

pytest.importorskip("executorch.exir")
from ondevice.exporters.executorch.answer_model import AnswerModel, flatten
from ondevice.exporters.executorch.packed import load_operators

IDS = list(range(40, 63))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"])
def test_cut_anywhere_it_computes_what_the_model_does(tmp_path: Path, family: str) -> None:
    load_operators()
    loaded = load_model(
        str(save_tiny(tmp_path / "model", family, layers=4 if family == "smollm3" else 2))
    )
    adapter = random_adapter(loaded)
    model = AnswerModel(loaded, 32, adapter.linears, adapter.rank)
    flat = torch.from_numpy(flatten(adapter, model.pairs, adapter.rank))
    with torch.no_grad():
        with adapted(loaded, adapter):
            expected = loaded.model(torch.tensor([IDS])).logits[0]
        base = loaded.model(torch.tensor([IDS])).logits[0]
        for low, high in ((0, 9), (9, 10), (10, 23)):
            found = model(torch.tensor([IDS[low:high]]), torch.tensor([low]), flat)[0]
            torch.testing.assert_close(found, expected[high - 1], rtol=0, atol=2e-5)
        plain = model(torch.tensor([IDS]), torch.tensor([0]), torch.zeros_like(flat))[0]
    torch.testing.assert_close(plain, base[-1], rtol=0, atol=2e-5)
    assert (base - expected).abs().max() > 0.05


def test_other_blocks_are_refused_by_their_traits(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "model", "gemma3_text")))
    with pytest.raises(ModelError):
        AnswerModel(loaded, 32)
