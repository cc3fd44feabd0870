"""Files in K-quants: written by the command, read by llama.cpp, and read again as a base model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.core.errors import MissingPackageError
from ondevice.gguf.quants import MIXTURES
from ondevice.models import load_model
from tests.cli.command import CommandLine
from tests.exits.conftest import IDS, Case, log_probabilities, make_case
from tests.exits.llama_cpp import LlamaCpp

SIZES = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 512, "layers": 4}
ACTIVATIONS = 0.18
"""llama.cpp rounds what it multiplies K-quants by to 8 bits of the largest of a block. That is 0.8%
of a product's root mean square. Four products after each other in each of four layers are each that
far off at random: 3.2% of the logits' spread. The largest of 288 numbers is within 5.5 times that."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model whose rows are whole blocks of K-quants."""
    return make_case(tmp_path_factory.mktemp("wide"), "llama", **SIZES)


@pytest.mark.parametrize("dtype", MIXTURES)
def test_a_k_quant_is_read_back(
    dtype: str, case: Case, tmp_path: Path, capsys, own_cache: Path
) -> None:
    run = tmp_path / "run"
    save_adapter(replace(load_adapter(case.adapter), base_model=str(case.model)), run / "adapter")
    out = tmp_path / "out.gguf"
    done = CommandLine(capsys)(
        "convert", run, "--to", "gguf", "--dtype", dtype, "--out", out, "--json"
    )
    assert done.code == 0, done.err
    assert done.json["dtype"] == dtype and 0.5 < done.json["kept"] < 1.5
    ours = log_probabilities(load_model(str(out)).model)
    theirs = LlamaCpp(out).log_probabilities(IDS, case.base.size)
    assert np.abs(theirs - ours).max() < ACTIVATIONS * ours.std()
    assert np.abs(ours - case.expected).max() < np.abs(ours - case.base).max()
    from gguf import GGUFReader, LlamaFileType

    reader = GGUFReader(out)
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"F32", "Q6_K", MIXTURES[dtype].upper()}
    field = reader.get_field("general.file_type")
    assert field and LlamaFileType(field.contents()).name == f"MOSTLY_{dtype.upper()}"


def test_without_llama_cpp_the_command_names_what_is_missing(
    case: Case, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("ondevice.gguf.quants._ggml_quantize", lambda: None)
    out = tmp_path / "out.gguf"
    done = CommandLine(capsys)("convert", case.adapter, "--model", case.model, "--to", "gguf",
                               "--dtype", "q4_k_m", "--out", out, "--dry-run")  # fmt: skip
    assert done.code == MissingPackageError.exit_code
    assert "xllamacpp" in done.err and not out.exists()
