"""4-bit levels chosen on rows of the task: asked for, said in a line, and verified from the
artifact."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ondevice.api import export as artifacts
from ondevice.api.runfile import RunConfig
from ondevice.api.verify import verify
from ondevice.artifact.manifest import read_manifest
from ondevice.artifact.weights import WEIGHTS_NAME, MappedWeights
from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.exporters.executorch.target import choose_levels
from ondevice.methods.mesp.block_functions import restore
from ondevice.methods.mesp.frozen import Q4
from ondevice.methods.mesp.program import EXECUTORCH
from ondevice.models import load_model
from ondevice.models.load import tiny_model
from tests.programs import model

pytest.importorskip("executorch.exir")
MATRIX = "model.layers.1.mlp.down_proj.weight"


def settings(rows: Any = None, **more: Any) -> RunConfig:
    values = {
        "model.source": str(model("two layers")),
        "method.name": "mesp",
        "method.rank": 2,
        "export.target": "android-cpu",
        "export.quantize": "q4",
        "export.kernels": "stock",
        "export.lengths_tokens": [16],
        "export.check_steps": 1,
        **{f"export.{key}": value for key, value in more.items()},
    }
    if rows is not None:
        values["data.path"] = str(rows)
    return RunConfig.load(None, values)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("rows with spaces") / "süß.csv"
    lines = [f"message {number} about parcel,{'ab'[number % 2]}" for number in range(12)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chosen(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chosen") / "program"
    artifacts.export(settings(rows, rounding="rows"), folder)
    return folder


def matrix(folder: Any, name: str = MATRIX) -> bytes:
    return MappedWeights(folder / WEIGHTS_NAME).whole(name).tobytes()


def test_rows_choose_the_levels_and_the_artifact_is_verified_over_them(chosen: Any) -> None:
    check = read_manifest(chosen).check
    assert check["rounding_rows"] == 12
    result = verify(chosen, steps=2)
    assert result["ok"] and result["max_rel_gradient_error"] < 1e-4


def test_chosen_levels_are_the_same_a_second_time_and_the_default_is_the_nearest(
    chosen: Any, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(str(model("two layers")))
    for more, count in (({}, 0), ({"rounding": "rows"}, 12)):
        [job] = artifacts.export_jobs(settings(rows, **more))
        with caplog.at_level(logging.INFO, "ondevice.exporters"):
            assert choose_levels(job, EXECUTORCH, loaded) == count
        assert bool(loaded.grids) == bool(count)
    assert "choosing the levels of q4 on 12 rows of the data" in caplog.text
    form = Q4(loaded.grids[MATRIX])
    packed = form.pack(MATRIX, loaded.model.get_parameter(MATRIX).detach())
    assert packed[MATRIX].numpy().tobytes() == matrix(chosen)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"quantize": "q4"}, "name rows of the task (--data)"),
        ({"quantize": "int8"}, "it is for --method mesp --quantize q4"),
    ],
)
def test_rows_without_rows_or_for_another_form_are_refused(more, reason, tmp_path: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        artifacts.export(settings(rounding="rows", **more), tmp_path / "program")
    assert f"export.rounding is rows: {reason}" in str(caught.value)
    assert not (tmp_path / "program").exists()


def test_another_model_s_matrices_are_refused(chosen: Any) -> None:
    weights = MappedWeights(chosen / WEIGHTS_NAME)
    tensors = {name: weights.whole(name) for name in weights}
    loaded = load_model(str(model("two layers")))
    restore(loaded, tensors)
    assert MATRIX in loaded.grids
    other = tiny_model("llama", seed=5, layers=2, hidden=loaded.dims.hidden)
    with pytest.raises(ArtifactError) as caught:
        restore(other, tensors)
    assert "is not that of the model" in str(caught.value)
