"""The tiny models: what a plan reads of them without transformers is what transformers builds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ondevice.models import load_model
from ondevice.models.registry import family_classes
from ondevice.models.tiny import tiny_dims

WITHOUT = """
import sys
sys.modules["transformers"] = sys.modules["torch"] = None
from ondevice.models import read_dims
print(read_dims("tiny:qwen2_moe").layers)
"""


@pytest.mark.parametrize("family", list(family_classes()))
def test_dimensions_are_those_of_the_model(family: str) -> None:
    pytest.importorskip("transformers")
    from ondevice.models.load import tiny_model

    assert tiny_dims(family) == (tiny_model(family).dims, family_classes()[family])


@pytest.mark.parametrize("family", sorted(set(family_classes()) - {"bert", "roberta"}))
def test_dimensions_count_the_models_parameters_and_name_its_layers(family: str) -> None:
    pytest.importorskip("torch")
    loaded = load_model(f"tiny:{family}")
    parameters = dict(loaded.model.named_parameters())
    assert loaded.dims.parameters == sum(value.numel() for value in parameters.values())
    assert loaded.dims.linear_list
    for one in loaded.dims.linear_list:
        shape = parameters[f"{loaded.family.linear_name(one.layer, one.target)}.weight"].shape
        assert sorted(shape) == sorted((one.inputs, one.outputs))


@pytest.mark.parametrize("family", ["gemma4_text", "llama", "qwen3"])
def test_a_token_attends_to_many(family: str) -> None:
    """Else a random model is no test of rounding: a small change of a score changes the token that is
    attended to."""
    torch = pytest.importorskip("torch")
    loaded = load_model(f"tiny:{family}")
    loaded.model.set_attn_implementation("eager")
    ids = torch.arange(32, 48)[None]
    for weights in loaded.model(ids, output_attentions=True).attentions:
        last = weights[0, :, -1]
        effective = torch.exp(-(last * torch.log(last.clamp_min(1e-9))).sum(-1))
        assert float(effective.mean()) > 4  # of 12 or 16


def test_dimensions_need_neither_torch_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
