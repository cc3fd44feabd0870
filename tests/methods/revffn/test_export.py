"""The trained network as a Hugging Face folder: loaded by transformers alone, in a process without
this package."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ondevice.api.opened import network_method
from ondevice.core.errors import ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.methods.revffn import METHOD
from ondevice.methods.revffn.streams import StreamOverflow
from ondevice.methods.revffn.torch import open_reversible
from ondevice.models.load import tiny_model
from tests.methods.reference import batch
from tests.warm import Warm

CASES = [
    ("llama", "full", {}),
    ("qwen2", "exact", {"tied": False, "layers": 3}),
    ("mistral", "paper", {"tied": False}),
    ("gemma3_text", "full", {"sliding_window": 5, "layers": 3}),
]
READ = """
import json, sys
sys.modules["ondevice"] = None  # installed for development it would be found: any import of it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
dynamic_module_utils.HF_MODULES_CACHE = sys.argv[3]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor(json.loads(sys.argv[2]))
padded = torch.cat((torch.zeros(len(ids), 3, dtype=torch.long), ids), 1)
mask = (torch.arange(padded.shape[1]) >= 3).long().expand(padded.shape)
with torch.no_grad():
    output = model(ids, labels=ids)
    left = model(padded, attention_mask=mask).logits[:, 3:]
prompt = torch.tensor([tokenizer("good")["input_ids"]])
answer = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
print(json.dumps({"logits": output.logits.tolist(), "loss": output.loss.item(), "left": left.tolist(),
                  "tokens": answer.shape[1] - prompt.shape[1], "kind": type(model).__name__,
                  "dtype": str(model.dtype)}))
"""


def trained(
    family: str, coupling: str, sizes: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Any:
    loaded = tiny_model(family, **sizes)
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.to(dtype)
    settings = {"coupling": coupling, "skip_stage1": True, "learning_rate": 1e-3}
    if coupling == "paper":  # not every random block's iteration converges
        settings |= {"streams": "float32", "not_converged": "store"}
    session = open_session(loaded, method_config("revffn", settings), 3)
    for step in range(2):
        session.step(*batch(2), step, 1e-3)
    return session


def read(warm: Warm, folder: Path, ids: np.ndarray) -> dict[str, Any]:
    """Read the folder with transformers, in a process that cannot import this package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [str(folder), json.dumps(ids.tolist()), str(folder.parent / "modules")]
    done = subprocess.run(
        [str(warm.python), "-c", READ, *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("family", "coupling", "sizes"), CASES)
def test_the_folder_loads_without_this_package(family, coupling, sizes, tmp_path, warm) -> None:
    session = trained(family, coupling, sizes)
    session.save_model(tmp_path / "model")
    ids = batch(2)[0]
    loaded = read(warm, tmp_path / "model", ids)
    nll, count = session.evaluate(ids, ids)
    assert loaded["kind"] == "RevffnForCausalLM" and loaded["tokens"] == 4
    assert loaded["loss"] == pytest.approx(nll.sum() / count.sum(), rel=1e-5)
    logits, left = np.array(loaded["logits"]), np.array(loaded["left"])
    np.testing.assert_allclose(
        logits, left, atol=1e-4 * np.abs(logits).max()
    )  # padding on the left changes nothing


def test_bfloat16_and_a_tied_head_come_back(tmp_path, warm) -> None:
    session = trained("llama", "exact", {}, torch.bfloat16)
    session.save_model(tmp_path / "model")
    ids = batch(2)[0]
    loaded = read(warm, tmp_path / "model", ids)
    nll, count = session.evaluate(ids, ids)
    assert loaded["dtype"] == "torch.bfloat16"
    assert loaded["loss"] == pytest.approx(nll.sum() / count.sum(), rel=2e-2)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "coupling", "sizes"),
    [
        *CASES,
        ("qwen2_moe", "full", {}),
        ("granitemoe", "full", {}),
        ("granite", "exact", {}),
    ],
)
def test_the_folder_opens_again_with_the_bits_of_training(
    family, coupling, sizes, dtype, tmp_path
) -> None:
    session = trained(family, coupling, sizes, dtype)
    session.save_model(tmp_path / "model")
    assert network_method(tmp_path / "model") is METHOD and network_method(tmp_path) is None
    again = open_reversible(tmp_path / "model")
    ids, labels = batch(3)
    assert session.evaluate(ids, labels)[0].tobytes() == again.evaluate(ids, labels)[0].tobytes()
    assert again.network.fraction_bits == session.network.fraction_bits


@pytest.mark.parametrize("fraction_bits", [None, 20])
def test_data_that_overflows_is_evaluated_in_the_folder_as_in_training(
    fraction_bits, tmp_path
) -> None:
    session = open_session(
        tiny_model("llama"), method_config("revffn", {"fraction_bits": fraction_bits}), 3
    )
    with torch.no_grad():
        session.family.embedding.weight.mul_(2.0**14)
    session.save_model(tmp_path / "model")
    again, (ids, labels) = open_reversible(tmp_path / "model"), batch(3)
    if fraction_bits is None:
        assert (
            session.evaluate(ids, labels)[0].tobytes() == again.evaluate(ids, labels)[0].tobytes()
        )
    else:
        with pytest.raises(StreamOverflow):
            again.evaluate(ids, labels)


def test_a_folder_of_another_version_is_refused(tmp_path) -> None:
    trained("llama", "full", {}).save_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("late") == pytest.approx(1 / 15)
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        open_reversible(tmp_path / "model")
    assert caught.value.received == 0.0


def test_a_damaged_folder_says_what_is_missing(tmp_path) -> None:
    trained("llama", "exact", {}).save_model(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("model.layers.1.revffn.mlp_up")
    save_file(tensors, weights)
    with pytest.raises(ModelError) as caught:
        open_reversible(tmp_path / "model")
    assert caught.value.received == "model.layers.1.revffn.mlp_up"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError):
        open_reversible(tmp_path / "model")


def test_without_trust_nothing_else_is_loaded_in_its_place(tmp_path) -> None:
    """The folder must not pass for an ordinary model, whose function is another."""
    from transformers import AutoModelForCausalLM

    trained("llama", "exact", {}).save_model(tmp_path / "model")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=False)


def test_a_family_that_could_not_be_kept_is_refused_before_training() -> None:
    with pytest.raises(ModelError, check=lambda error: error.received == "gpt2"):
        open_session(tiny_model("gpt2"), method_config("revffn"), 3)
