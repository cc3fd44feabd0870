"""Training on the weights that are served: rounded once, by the code that writes the files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.mlx_lm_files import save_mlx_lm_adapter
from ondevice.artifact.pairs import BASE_KEY
from ondevice.core.errors import ArtifactError, ConfigError, MissingPackageError, ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.exits import convert, gguf
from ondevice.exits.gguf import read_tensors
from ondevice.exits.gguf_text import reading_of
from ondevice.models import LoadedModel, load_model, mlx_packing, save_tiny
from ondevice.models.rounded import round_weights, rounded_names, rounded_weights
from ondevice.nn.adapters import adapted, apply_adapter
from tests.cli.command import CommandLine, write_rows
from tests.exits.by_mlx_lm import dense_weights, mlx_log_probabilities, opened_pair
from tests.exits.conftest import IDS, Case, log_probabilities, make_case, random_adapter
from tests.exits.llama_cpp import LlamaCpp
from tests.exits.table import FAMILIES
from tests.exits.test_families import FORMS

PRODUCTS = 1e-3
"""Of float32 products in another order, as in `test_readers`."""
ACTIVATIONS = 0.13
"""As in `test_k_quants`, of two layers."""
HALF_PRODUCTS = 0.05
"""Of products in float16, of two layers: 0.02 was seen."""
ROWS = [
    {"text": "a good one", "label": "great"},
    {"text": "a bad one", "label": "poor"},
    {"text": "one more, fine", "label": "great"},
    {"text": "no, never", "label": "poor"},
]
PAIRS = {"q4_0": ("gguf-pair", "q4_0"), "mlx_4bit": ("mlx-pair", "4bit")}
"""Form and type that have the very weights of a training on rounded ones."""
MERGED = {"q4_0": "gguf", "mlx_4bit": "mlx-model"}
WITHOUT_MLX = {"granitemoe", "lfm2_moe", "qwen2_moe", "qwen3_5_text", "qwen3_moe"}
"""Mixtures, and a type that mlx-lm has under another name."""
NAMES = (*FAMILIES, *FORMS)
OF_KINDS = [(kind, name) for kind in PAIRS for name in NAMES
            if kind == "q4_0" or name not in WITHOUT_MLX]  # fmt: skip
ARRAYS = np.array([IDS, IDS[::-1]]), np.array([IDS, IDS[::-1]])


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """A rounding of the frozen weights; the test is left out without its package."""
    if request.param == "mlx_4bit":
        pytest.importorskip("mlx_lm")
    return request.param


kinds = pytest.mark.parametrize("kind", PAIRS, indirect=True)


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
@pytest.mark.parametrize(("kind", "name"), OF_KINDS, indirect=["kind"])
def test_the_file_has_the_very_weights(kind: str, name: str, tmp_path: Path) -> None:
    """Every tensor of the written file is that of the model in memory, which is rounded only once."""
    form, dtype = PAIRS[kind]
    family, sizes = FORMS.get(name, (name, {"tied": name in ("llama", "qwen2")}))
    model = save_tiny(tmp_path / "model", family, vocab=288, **sizes)
    loaded = load_model(str(model))
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    adapter = replace(random_adapter(loaded), base_weights=kind)
    save_adapter(adapter, tmp_path / "adapter")
    report = convert(tmp_path / "adapter", form, tmp_path / "out", model=str(model))
    assert report.dtype == dtype
    assert not any("rounding" in note or "rounded" in note for note in report.notes)
    largest = (
        report.max_abs_logit or 0.0
    )  # a file has functions of some vectors, which stay float32
    assert report.max_abs_difference_from_adapter is not None
    assert report.max_abs_difference_from_adapter <= 1e-5 * largest
    round_weights(loaded, kind)
    state = loaded.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], state[name])}
    own = rounded_names(loaded, kind)
    assert {name for name in own if before[name].ndim > 1} <= changed
    assert changed - own <= {"lm_head.weight"}  # a tied head
    stored = stored_weights(kind, tmp_path / "out", loaded)
    assert own <= stored.keys()
    for name in own:
        np.testing.assert_array_equal(stored[name], state[name].numpy().reshape(stored[name].shape))


def stored_weights(kind: str, out: Path, loaded: LoadedModel) -> dict[str, np.ndarray]:
    """Read the base of a pair back, by transformers' names."""
    if kind == "q4_0":
        return dict(read_tensors(out / "model.gguf", loaded))
    return dense_weights(out / "model")


def test_a_second_rounding_to_mlx_groups_gives_other_weights(case: Case, tmp_path: Path) -> None:
    """Why `mlx-pair` packs the model as it was before the training's rounding."""
    pytest.importorskip("mlx_lm")
    loaded = load_model(str(case.model))
    round_weights(loaded, "mlx_4bit")
    weight = loaded.model.get_parameter("model.layers.0.mlp.up_proj.weight").numpy()
    assert (mlx_packing.rounded(weight, 4) != weight).mean() > 0.01


@kinds
@pytest.mark.parametrize("name", ["lora", "lora-fa", "mesp"])
def test_a_session_trains_on_rounded_weights(
    name: str, kind: str, case: Case, tmp_path: Path
) -> None:
    config = method_config(name, {"rank": 3, "base": kind})
    plain = method_config(name, {"rank": 3})
    served = load_model(str(case.model))
    round_weights(served, kind)
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
    assert adapter is not None and adapter.base_weights == kind
    session.load_adapter(adapter)
    save_adapter(adapter, tmp_path / "adapter")
    assert load_adapter(tmp_path / "adapter").base_weights == kind
    save_mlx_lm_adapter(adapter, tmp_path / "mlx")
    assert load_adapter(tmp_path / "mlx").base_weights == kind
    from peft import PeftModel

    session.release_model()
    fresh = load_model(str(case.model))
    round_weights(fresh, kind)
    theirs = log_probabilities(PeftModel.from_pretrained(fresh.model, tmp_path / "adapter"))
    ours = load_model(str(case.model))
    apply_adapter(ours, adapter)  # which rounds by itself
    np.testing.assert_allclose(log_probabilities(ours.model), theirs, rtol=0, atol=PRODUCTS)


@kinds
def test_rounded_weights_are_given_back(kind: str, case: Case) -> None:
    loaded = load_model(str(case.model))
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    adapter = replace(load_adapter(case.adapter), base_weights=kind)
    with adapted(loaded, adapter):
        inside = log_probabilities(loaded.model)
        with rounded_weights(loaded, kind):  # it is so already
            pass
        np.testing.assert_array_equal(log_probabilities(loaded.model), inside)
    state = loaded.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in before.items())
    round_weights(loaded, kind)
    apply_adapter(loaded, replace(adapter, base_weights=""))
    np.testing.assert_array_equal(log_probabilities(loaded.model), inside)


@kinds
@pytest.mark.parametrize("name", ["lora", "mesp"])
def test_the_command_trains_predicts_and_serves_the_same(
    name: str, kind: str, case: Case, tmp_path: Path, capsys
) -> None:
    """Readers compute the training's numbers: within products of float32, as far as the weights go,
    and with their own rounding of activations and products in 4 bits."""
    command = CommandLine(capsys)
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    run = tmp_path / "run"
    options = ["--method", name, "--steps", "8", "--lr", "0.02", "--set", f"method.base={kind}"]
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
    form, exact = PAIRS[kind]
    errors = {"4bit": HALF_PRODUCTS}
    if kind == "q4_0":
        errors = {"float32": PRODUCTS, "q4_0": ACTIVATIONS * expected.std()}
    for dtype, error in errors.items():
        out = tmp_path / dtype
        done = command("convert", run, "--to", form, "--dtype", dtype, "--out", out, "--json")
        assert done.code == 0, done.err
        assert np.abs(served(kind, out) - expected).max() < error, dtype
    if kind == "mlx_4bit":
        dense = mlx_log_probabilities(opened_pair(tmp_path / "4bit", dense=True))
        np.testing.assert_allclose(dense, expected, rtol=0, atol=PRODUCTS)
    merged = command("convert", run, "--to", MERGED[kind], "--dtype", exact, "--out",
                     tmp_path / "merged", "--json")  # fmt: skip
    if merged.code == 0:
        assert any(f"--to {form} --dtype {exact}" in note for note in merged.json["notes"])
    fused = command("fuse", run, "--out", tmp_path / "fused", "--json")
    assert fused.code == 0, fused.err
    whole = log_probabilities(load_model(str(tmp_path / "fused")).model)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=PRODUCTS)


def served(kind: str, out: Path) -> np.ndarray:
    """Ask a pair's own reader."""
    if kind == "mlx_4bit":
        return mlx_log_probabilities(opened_pair(out))
    return LlamaCpp(out / "model.gguf", out / "adapter.gguf").log_probabilities(IDS, 288)


@kinds
def test_another_type_of_a_pair_says_which_has_the_very_weights(
    kind: str, case: Case, tmp_path: Path
) -> None:
    form, exact = PAIRS[kind]
    save_adapter(replace(load_adapter(case.adapter), base_weights=kind), tmp_path / "adapter")
    finer = {"q4_0": "q8_0", "mlx_4bit": "8bit"}[kind]
    for to, dtype, said in ((form, finer, 1), (form, None, 0), ("peft", None, 1)):
        out = tmp_path / f"{to}-{dtype}"
        report = convert(tmp_path / "adapter", to, out, model=str(case.model), dtype=dtype)
        found = [note for note in report.notes if f"--to {form} --dtype {exact}" in note]
        assert len(found) == said, (to, report.notes)


def refused_settings(kind: str) -> dict[str, tuple[list[str], str]]:
    rounded = ["--set", f"method.base={kind}"]
    return {
        "precision": (
            ["--method", "lora", "--dtype", "bfloat16", *rounded],
            "model.dtype: float32",
        ),
        "packed": (["--method", "mesp", "--set", "method.bits=4", *rounded], "method.bits: null"),
        "streamed": (
            ["--method", "mesp", "--set", "method.weight_placement=streamed", *rounded],
            "method.weight_placement: resident",
        ),
        "another method": (["--method", "prge", *rounded], "base"),
        "another type": (["--method", "lora", "--set", "method.base=q5_0"], kind),
    }


@kinds
@pytest.mark.parametrize(
    "name", ["precision", "packed", "streamed", "another method", "another type"]
)
def test_what_cannot_be_rounded_is_refused_by_name(
    name: str, kind: str, case: Case, tmp_path: Path, capsys
) -> None:
    options, words = refused_settings(kind)[name]
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    for more in ([], ["--dry-run"]):
        done = CommandLine(capsys)("train", case.model, "--data", data, "--out", tmp_path / "run",
                                   "--steps", 1, *options, *more)  # fmt: skip
        assert done.code == ConfigError.exit_code and words in " ".join(done.err.split())


@pytest.mark.parametrize("name", ["lora", "mesp"])
def test_rounding_to_mlx_groups_without_mlx_names_the_extra(
    name: str, case: Case, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    for more in ([], ["--dry-run"]):
        done = CommandLine(capsys)("train", case.model, "--data", data, "--out", tmp_path / "run",
                                   "--method", name, "--steps", 1, "--set", "method.base=mlx_4bit",
                                   *more)  # fmt: skip
        assert done.code == MissingPackageError.exit_code
        assert "ondevice-train[mlx]" in done.err
    with pytest.raises(MissingPackageError):
        apply_adapter(
            load_model(str(case.model)),
            replace(load_adapter(case.adapter), base_weights="mlx_4bit"),
        )


@pytest.mark.parametrize(
    ("kind", "family", "words"),
    [
        ("q4_0", "gpt2", "gpt2"),
        ("mlx_4bit", "gpt2", "gpt2 models have no packed MLX form here"),
        ("mlx_4bit", "qwen2_moe", "a mixture of experts (qwen2_moe) has no packed MLX form here"),
        ("mlx_4bit", "qwen3_5_text", "mlx-lm has no models of type qwen3_5_text"),
    ],
    indirect=["kind"],
)
def test_a_model_without_the_form_is_refused(
    kind: str, family: str, words: str, tmp_path: Path
) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "model", family, vocab=288)))
    settings: dict[str, Any] = {"target_modules": ["c_attn"]} if family == "gpt2" else {}
    with pytest.raises(ModelError) as caught:
        open_session(loaded, method_config("lora", {"base": kind, **settings}), 0)
    assert words in caught.value.message
    if kind == "mlx_4bit":
        save_adapter(random_adapter(loaded), tmp_path / "adapter")
        with pytest.raises(ModelError) as again:
            convert(tmp_path / "adapter", "mlx-pair", tmp_path / "out", model=loaded.source.source)
        assert again.value.message == caught.value.message


def test_weights_that_are_rounded_otherwise_are_refused(case: Case) -> None:
    pytest.importorskip("mlx_lm")
    loaded = load_model(str(case.model))
    round_weights(loaded, "q4_0")
    with pytest.raises(ConfigError) as caught:
        open_session(loaded, method_config("lora", {"base": "mlx_4bit"}), 0)
    assert caught.value.received == "q4_0" and caught.value.hint == "load the model again"


def test_a_session_refuses_another_precision_and_chat_does_not(case: Case) -> None:
    loaded = load_model(str(case.model), dtype="bfloat16")
    with pytest.raises(ConfigError) as caught:
        open_session(loaded, method_config("lora", {"base": "q4_0"}), 0)
    assert caught.value.expected == "model.dtype: float32"
    with adapted(loaded, replace(load_adapter(case.adapter), base_weights="q4_0")):
        assert np.isfinite(log_probabilities(loaded.model)).all()


@pytest.mark.parametrize("kind", PAIRS)
def test_mlx_and_programs_are_refused_by_name(kind: str, case: Case) -> None:
    from ondevice.core.config import ExportConfig
    from ondevice.methods.lora import TORCH_PROGRAM
    from ondevice.methods.mesp.check import check_mlx_settings
    from ondevice.methods.mesp.program import EXECUTORCH, TORCH

    config = method_config("mesp", {"base": kind})
    with pytest.raises(ConfigError) as caught:
        check_mlx_settings(config)
    assert "method.base" in caught.value.message
    dims = load_model(str(case.model)).dims
    problems = EXECUTORCH.problems(config, ExportConfig(target="android-cpu"), dims)
    lora = TORCH_PROGRAM.problems(method_config("lora", {"base": kind}))
    for found in (problems, TORCH.problems(config), lora):
        assert any(f"method.base is {kind}" in problem for problem in found)


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
