"""Training on the weights that are served: rounded once, by the code that writes the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.mlx_lm_files import save_mlx_lm_adapter
from ondevice.artifact.pairs import BASE_KEY
from ondevice.core.errors import ArtifactError, ConfigError, ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.exits import convert, gguf
from ondevice.exits.gguf import read_tensors
from ondevice.exits.gguf_text import reading_of
from ondevice.models import load_model, save_tiny
from ondevice.models.rounded import round_weights, rounded_names, rounded_weights
from ondevice.nn.adapters import adapted, apply_adapter
from tests.cli.command import CommandLine, write_rows
from tests.exits.conftest import IDS, Case, log_probabilities, make_case, random_adapter
from tests.exits.llama_cpp import LlamaCpp
from tests.exits.table import FAMILIES
from tests.exits.test_families import FORMS

PRODUCTS = 1e-3
"""Of float32 products in another order, as in `test_readers`."""
ACTIVATIONS = 0.13
"""As in `test_k_quants`, of two layers."""
ROWS = [
    {"text": "a good one", "label": "great"},
    {"text": "a bad one", "label": "poor"},
    {"text": "one more, fine", "label": "great"},
    {"text": "no, never", "label": "poor"},
]
ARRAYS = np.array([IDS, IDS[::-1]]), np.array([IDS, IDS[::-1]])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A llama whose weights lie on no grid."""
    return make_case(tmp_path_factory.mktemp("pair"), "llama")


@pytest.mark.parametrize("form", ["gguf", "gguf-pair"])
def test_texts_are_checked_once(form: str, case: Case, tmp_path: Path, monkeypatch) -> None:
    checks = []
    monkeypatch.setattr(
        gguf, "reading_of", lambda *asked: checks.append(asked) or reading_of(*asked)
    )
    convert(case.adapter, form, tmp_path / "model.gguf", model=str(case.model))
    assert len(checks) == 1


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", (*FAMILIES, *FORMS))
def test_the_file_has_the_very_weights(name: str, tmp_path: Path) -> None:
    """Every tensor of the written file is that of the model in memory, which is rounded only once."""
    family, sizes = FORMS.get(name, (name, {"tied": name in ("llama", "qwen2")}))
    model = save_tiny(tmp_path / "model", family, vocab=288, **sizes)
    loaded = load_model(str(model))
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    adapter = replace(random_adapter(loaded), base_weights="q4_0")
    save_adapter(adapter, tmp_path / "adapter")
    report = convert(tmp_path / "adapter", "gguf-pair", tmp_path / "out", model=str(model))
    assert report.dtype == "q4_0"
    assert not any("rounding" in note or "rounded" in note for note in report.notes)
    largest = (
        report.max_abs_logit or 0.0
    )  # a file has functions of some vectors, which stay float32
    assert report.max_abs_difference_from_adapter is not None
    assert report.max_abs_difference_from_adapter <= 1e-5 * largest
    round_weights(loaded, "q4_0")
    state = loaded.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], state[name])}
    own = rounded_names(loaded, "q4_0")
    assert own <= changed and changed - own <= {"lm_head.weight"}  # a tied head
    stored = dict(read_tensors(tmp_path / "out" / "model.gguf", loaded))
    assert own <= stored.keys()
    for name in own:
        np.testing.assert_array_equal(stored[name], state[name].numpy().reshape(stored[name].shape))


@pytest.mark.parametrize("name", ["lora", "lora-fa", "mesp"])
def test_a_session_trains_on_rounded_weights(name: str, case: Case, tmp_path: Path) -> None:
    config = method_config(name, {"rank": 3, "base": "q4_0"})
    plain = method_config(name, {"rank": 3})
    served = load_model(str(case.model))
    round_weights(served, "q4_0")
    session = open_session(load_model(str(case.model)), config, 0)
    expected = open_session(served, plain, 0)
    other = open_session(load_model(str(case.model)), plain, 0)
    for one in (session, expected, other):
        for step in range(2):
            one.step(*ARRAYS, step, 1e-2)
    values, wanted, differs = (one.evaluate(*ARRAYS)[0] for one in (session, expected, other))
    np.testing.assert_array_equal(values, wanted)
    assert np.abs(values - differs).min() > 1e-3
    adapter = session.adapter()
    assert adapter is not None and adapter.base_weights == "q4_0"
    session.load_adapter(adapter)
    save_adapter(adapter, tmp_path / "adapter")
    assert load_adapter(tmp_path / "adapter").base_weights == "q4_0"
    save_mlx_lm_adapter(adapter, tmp_path / "mlx")
    assert load_adapter(tmp_path / "mlx").base_weights == "q4_0"
    from peft import PeftModel

    session.release_model()
    fresh = load_model(str(case.model))
    round_weights(fresh, "q4_0")
    theirs = log_probabilities(PeftModel.from_pretrained(fresh.model, tmp_path / "adapter"))
    ours = load_model(str(case.model))
    apply_adapter(ours, adapter)  # which rounds by itself
    np.testing.assert_allclose(log_probabilities(ours.model), theirs, rtol=0, atol=PRODUCTS)


def test_rounded_weights_are_given_back(case: Case) -> None:
    loaded = load_model(str(case.model))
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    adapter = replace(load_adapter(case.adapter), base_weights="q4_0")
    with adapted(loaded, adapter):
        inside = log_probabilities(loaded.model)
        with rounded_weights(loaded, "q4_0"):  # it is so already
            pass
        np.testing.assert_array_equal(log_probabilities(loaded.model), inside)
    state = loaded.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in before.items())
    round_weights(loaded, "q4_0")
    apply_adapter(loaded, replace(adapter, base_weights=""))
    np.testing.assert_array_equal(log_probabilities(loaded.model), inside)


@pytest.mark.parametrize("name", ["lora", "mesp"])
def test_the_command_trains_predicts_and_serves_the_same(
    name: str, case: Case, tmp_path: Path, capsys
) -> None:
    """llama.cpp computes the training's numbers: within products of float32, as far as the weights
    go, and with its rounded activations in 4 bits."""
    command = CommandLine(capsys)
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    run = tmp_path / "run"
    options = ["--method", name, "--steps", "8", "--lr", "0.02", "--set", "method.base=q4_0"]
    done = command("train", case.model, "--data", data, "--eval-data", data, "--out", run,
                   *options, "--json")  # fmt: skip
    assert done.code == 0, done.err
    trained = done.json["evaluation"]
    again = command("eval", run, "--data", data, "--json").json
    assert again["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    assert again["accuracy"] == trained["accuracy"]
    loaded = load_model(str(case.model))
    apply_adapter(loaded, load_adapter(run / "adapter"))
    expected = log_probabilities(loaded.model)
    assert np.abs(expected - case.base).max() > 10 * PRODUCTS
    for dtype, error in (("float32", PRODUCTS), ("q4_0", ACTIVATIONS * expected.std())):
        out = tmp_path / dtype
        done = command(
            "convert", run, "--to", "gguf-pair", "--dtype", dtype, "--out", out, "--json"
        )
        assert done.code == 0, done.err
        found = LlamaCpp(out / "model.gguf", out / "adapter.gguf").log_probabilities(IDS, 288)
        assert np.abs(found - expected).max() < error, dtype
    merged = command("convert", run, "--to", "gguf", "--dtype", "q4_0", "--out", tmp_path / "m.gguf",
                     "--json")  # fmt: skip
    if merged.code == 0:
        assert any("--to gguf-pair" in note for note in merged.json["notes"])
    fused = command("fuse", run, "--out", tmp_path / "fused", "--json")
    assert fused.code == 0, fused.err
    whole = log_probabilities(load_model(str(tmp_path / "fused")).model)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=PRODUCTS)


def refused_settings(case: Case) -> dict[str, tuple[list[str], str]]:
    q4 = ["--set", "method.base=q4_0"]
    return {
        "precision": (["--method", "lora", "--dtype", "bfloat16", *q4], "model.dtype: float32"),
        "packed": (["--method", "mesp", "--set", "method.bits=4", *q4], "method.bits: null"),
        "streamed": (
            ["--method", "mesp", "--set", "method.weight_placement=streamed", *q4],
            "method.weight_placement: resident",
        ),
        "another method": (["--method", "prge", *q4], "base"),
        "another type": (["--method", "lora", "--set", "method.base=q5_0"], "q4_0"),
    }


@pytest.mark.parametrize(
    "name", ["precision", "packed", "streamed", "another method", "another type"]
)
def test_what_cannot_be_rounded_is_refused_by_name(
    name: str, case: Case, tmp_path: Path, capsys
) -> None:
    options, words = refused_settings(case)[name]
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    for more in ([], ["--dry-run"]):
        done = CommandLine(capsys)("train", case.model, "--data", data, "--out", tmp_path / "run",
                                   "--steps", 1, *options, *more)  # fmt: skip
        assert done.code == ConfigError.exit_code and words in " ".join(done.err.split())


def test_a_model_without_a_gguf_form_is_refused(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "model", "gpt2", vocab=288)))
    with pytest.raises(ModelError):
        open_session(
            loaded, method_config("lora", {"base": "q4_0", "target_modules": ["c_attn"]}), 0
        )


def test_a_session_refuses_another_precision_and_chat_does_not(case: Case) -> None:
    loaded = load_model(str(case.model), dtype="bfloat16")
    with pytest.raises(ConfigError) as caught:
        open_session(loaded, method_config("lora", {"base": "q4_0"}), 0)
    assert caught.value.expected == "model.dtype: float32"
    with adapted(loaded, replace(load_adapter(case.adapter), base_weights="q4_0")):
        assert np.isfinite(log_probabilities(loaded.model)).all()


def test_mlx_and_programs_are_refused_by_name(case: Case) -> None:
    from ondevice.core.config import ExportConfig
    from ondevice.methods.lora import TORCH_PROGRAM
    from ondevice.methods.mesp.check import check_mlx_settings
    from ondevice.methods.mesp.program import EXECUTORCH, TORCH

    config = method_config("mesp", {"base": "q4_0"})
    with pytest.raises(ConfigError) as caught:
        check_mlx_settings(config)
    assert "method.base" in caught.value.message
    dims = load_model(str(case.model)).dims
    problems = EXECUTORCH.problems(config, ExportConfig(target="android-cpu"), dims)
    lora = TORCH_PROGRAM.problems(method_config("lora", {"base": "q4_0"}))
    for found in (problems, TORCH.problems(config), lora):
        assert any("method.base is q4_0" in problem for problem in found)


def test_a_run_does_not_go_on_from_an_adapter_of_other_weights(
    case: Case, tmp_path: Path, capsys
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    command = CommandLine(capsys)
    shape = ["--method", "mesp", "--rank", 3, "--alpha", 7, "--steps", 1]
    start = ("train", case.model, "--data", data, *shape, "--adapter", case.adapter)
    done = command(*start, "--out", tmp_path / "a", "--set", "method.base=q4_0", "--dry-run")
    assert done.code == ArtifactError.exit_code and "method.base=null" in done.err
    done = command(*start, "--out", tmp_path / "b", "--set", "method.base=q4_0")
    assert done.code == ArtifactError.exit_code
    assert command(*start, "--out", tmp_path / "c").code == 0


def test_an_unknown_rounding_in_a_file_is_named(case: Case, tmp_path: Path) -> None:
    save_adapter(replace(load_adapter(case.adapter), base_weights="q4_0"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"][BASE_KEY] = "q1_z"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ArtifactError) as caught:
        load_adapter(tmp_path / "adapter")
    assert caught.value.received == "q1_z"
