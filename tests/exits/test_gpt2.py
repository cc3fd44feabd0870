"""GPT-2, whose layers are stored the other way round: what takes its adapter, and what refuses it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from ondevice.core.errors import ModelError, OndeviceError
from ondevice.exits import convert, form_names
from ondevice.models import load_model
from tests.exits.conftest import IDS, Case, log_probabilities, make_case

TAKES = {"mlx", "peft", "safetensors"}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    # As mlx-lm has every GPT-2: an MLP of 4 times the width, and a tied head.
    return make_case(tmp_path_factory.mktemp("gpt2"), "gpt2", intermediate=256, tied=True)


@pytest.mark.parametrize("form", form_names())
def test_a_dry_run_refuses_what_the_run_refuses(case: Case, tmp_path: Path, form: str) -> None:
    said = []
    for dry_run in (True, False):
        try:
            convert(case.adapter, form, tmp_path / "out", model=str(case.model), dry_run=dry_run)
            said.append("")
        except OndeviceError as error:
            said.append(str(error))
    assert said[0] == said[1]
    assert (said[0] == "") is (form in TAKES)
    assert form in TAKES or all(f"--to {one}" in said[0] for one in TAKES)


def test_the_fused_model_is_pefts(case: Case, tmp_path: Path) -> None:
    report = convert(case.adapter, "safetensors", tmp_path / "fused", model=str(case.model))
    assert report.max_abs_difference_from_adapter is not None
    assert report.max_abs_difference_from_adapter < 1e-4
    found = log_probabilities(load_model(str(tmp_path / "fused")).model)
    assert np.abs(found - case.expected).max() < 1e-4 < np.abs(found - case.base).max()


def test_mlx_lm_computes_with_the_adapter(case: Case, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.models.gpt2 import Model, ModelArgs
    from mlx_lm.tuner.utils import load_adapters

    convert(case.adapter, "mlx", tmp_path / "mlx", model=str(case.model))
    base = load_model(str(case.model)).model
    model = Model(ModelArgs.from_dict(base.config.to_dict() | {"n_ctx": 512}))
    weights = {
        name.removeprefix("transformer."): mx.array(value.numpy())
        for name, value in base.state_dict().items()
        if name != "lm_head.weight"
    }
    model.load_weights([*model.sanitize(weights).items()])
    load_adapters(model, str(tmp_path / "mlx"))
    logits = np.array(model(mx.array([IDS]))[0, -1].astype(mx.float32), dtype=np.float64)
    found = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert np.abs(found - case.expected).max() < 1e-4


@pytest.mark.parametrize("form", ["safetensors", "peft"])
@pytest.mark.parametrize("fault", ["cut", "header", "gone"])
def test_a_dry_run_finds_weights_that_cannot_be_read(
    case: Case, tmp_path: Path, fault: str, form: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(case.model, model)
    path = model / "model.safetensors"
    if fault == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif fault == "header":
        path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    else:
        path.unlink()
    with pytest.raises(ModelError) as caught:
        convert(case.adapter, form, tmp_path / "out", model=str(model), dry_run=True)
    assert "damaged" in str(caught.value) or "no safetensors weights" in str(caught.value)
    assert not (tmp_path / "out").exists()
