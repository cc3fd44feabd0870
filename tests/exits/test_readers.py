"""Every form is opened by the program that it is for, and computes what PEFT's merged model computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.cli.adapters import FORMS
from ondevice.exits import convert, form_names
from ondevice.exits.base import form_of
from ondevice.generation.torch_model import TorchModel
from ondevice.models import load_model
from tests.exits.by_mlx_lm import mlx_log_probabilities, opened_pair
from tests.exits.conftest import IDS, Case, log_probabilities
from tests.exits.llama_cpp import LlamaCpp, base_gguf, check_zeros_change_nothing
from tests.exits.table import CELLS, FAMILIES, PAGE, READERS, update

GGUF_ERROR = {"float32": 1e-4, "float16": 2e-2, "q8_0": 0.4, "q4_0": 3.0}
"""Largest difference of a logarithm of a probability: float32 products in another order, and what rounding does."""


def test_the_table_names_every_form() -> None:
    assert tuple(READERS) == form_names()
    assert FORMS.replace(" or ", ", ").rstrip(".") == ", ".join(form_names())
    assert all(form_of(name).name == name for name in form_names())


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == update(text), "try: make docs"


def by_llama_cpp(case: Case, form: str, out: Path) -> np.ndarray:
    if form == "gguf-lora":
        base = base_gguf(case)
        return LlamaCpp(base, out).log_probabilities(IDS, case.base.size)
    if form == "gguf-pair":
        pair = LlamaCpp(out / "model.gguf", out / "adapter.gguf")
        return pair.log_probabilities(IDS, case.base.size)
    return LlamaCpp(out / "model.gguf" if form == "ollama" else out).log_probabilities(
        IDS, case.base.size
    )


def by_peft(case: Case, form: str, out: Path) -> np.ndarray:
    from peft import PeftModel

    return log_probabilities(PeftModel.from_pretrained(load_model(str(case.model)).model, out))


def by_transformers(case: Case, form: str, out: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    return log_probabilities(AutoModelForCausalLM.from_pretrained(out))


def by_mlx_lm(case: Case, form: str, out: Path) -> np.ndarray:
    pytest.importorskip("mlx.core")
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model as load_mlx

    if form == "mlx-pair":
        return mlx_log_probabilities(opened_pair(out))
    if form == "mlx-model":
        packed, config = load_mlx(out)
        names = [name for name, _ in tree_flatten(packed.model.layers[0].parameters())]
        assert config["quantization"]["bits"] == 8 and any("scales" in name for name in names)
        return mlx_log_probabilities(packed)
    config = json.loads((case.model / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where mlx-lm looks for it
    loaded, _ = load_mlx(case.model, model_config=config)
    load_adapters(loaded, str(out))
    loaded.eval()
    return mlx_log_probabilities(loaded)


def by_executorch(case: Case, form: str, out: Path) -> np.ndarray:
    from ondevice.exporters.executorch.packed import PackedModel

    logits = PackedModel(out).feed(IDS).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


OPEN = {
    "ExecuTorch": by_executorch,
    "llama.cpp": by_llama_cpp,
    "PEFT": by_peft,
    "transformers": by_transformers,
    "mlx-lm": by_mlx_lm,
}


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "family"), CELLS)
def test_the_reader_computes_base_plus_adapter(
    cases, tmp_path: Path, form: str, family: str
) -> None:
    case, out = cases[family], tmp_path / "out ä"
    exact = {
        "dtype": next((one for one in ("float32", "8bit") if one in form_of(form).dtypes), None)
    }
    report = convert(case.adapter, form, out, model=str(case.model), **exact)
    rounds = exact["dtype"] == "8bit"
    assert report.bytes and report.max_abs_difference_from_base and report.kept is not None
    assert report.kept == pytest.approx(1.0, abs=0.05) if rounds else report.kept == 1.0
    found = OPEN[READERS[form]](case, form, out)
    np.testing.assert_allclose(
        found, case.expected, rtol=0, atol=GGUF_ERROR["q8_0"] if rounds else 1e-3
    )
    assert np.abs(found - case.base).max() > 0.1


@pytest.mark.parametrize("dtype", GGUF_ERROR)
def test_gguf_types_round_no_more_than_they_must(cases, tmp_path: Path, dtype: str) -> None:
    case, out = cases["llama"], tmp_path / "out.gguf"
    report = convert(case.adapter, "gguf", out, model=str(case.model), dtype=dtype)
    found = LlamaCpp(out).log_probabilities(IDS, case.base.size)
    assert np.abs(found - case.expected).max() < GGUF_ERROR[dtype]
    # What llama.cpp computes is as far from base plus adapter as the report says, its own activations aside.
    assert report.max_abs_difference_from_adapter < GGUF_ERROR[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_zeros_leaves_llama_cpp_as_it_is(cases, tmp_path: Path, family: str) -> None:
    check_zeros_change_nothing(cases[family], tmp_path)


def test_rank_stabilised_lora_keeps_its_scale(cases, tmp_path: Path) -> None:
    from peft import PeftModel

    case = cases["llama"]
    folder = tmp_path / "rslora"
    save_adapter(load_adapter(case.adapter), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    out = tmp_path / "rs.gguf"
    convert(folder, "gguf-lora", out, model=str(case.model))
    expected = log_probabilities(
        PeftModel.from_pretrained(load_model(str(case.model)).model, folder)
    )
    assert np.abs(expected - case.expected).max() > 0.1
    found = LlamaCpp(base_gguf(case), out).log_probabilities(IDS, case.base.size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def test_readers_write_the_same_letters_with_their_own_state(cases, tmp_path: Path) -> None:
    """The likeliest of 26 letters, 24 times; each reader keeps what a convolution saw in its own
    way."""
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model as load_mlx

    case = cases["lfm2"]
    letters = range(97, 123)
    convert(case.adapter, "safetensors", tmp_path / "whole", model=str(case.model))
    convert(case.adapter, "gguf", tmp_path / "m.gguf", model=str(case.model), dtype="float32")
    ours = TorchModel(load_model(str(tmp_path / "whole")))
    theirs, _ = load_mlx(tmp_path / "whole")
    cache = make_prompt_cache(theirs)

    def mlx_feed(ids: list[int]) -> np.ndarray:
        return np.array(theirs(mx.array([ids]), cache=cache).astype(mx.float32))[0, -1]

    written = []
    for feed in (lambda ids: ours.feed(ids).numpy(), mlx_feed):
        ids = list(IDS)
        for _ in range(24):
            logits = feed(ids[-1:] if len(ids) > len(IDS) else ids)
            ids.append(97 + int(logits[97:123].argmax()))
        written.append(ids[len(IDS) :])
    others = [[token, -1000.0] for token in range(case.base.size) if token not in letters]
    answer = LlamaCpp(tmp_path / "m.gguf").complete(list(IDS), n_predict=24, logit_bias=others)
    assert len({*written[0]}) > 2
    assert written[0] == written[1] == list(answer["text"].encode())
