"""Block programs of mixtures: a host computes the experts that tokens choose, and reads no other.

`tests/methods/mesp/torch/test_routing.py` holds the parts against autograd, and the conformance
table the program."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api.export import run_config
from ondevice.api.open import open_artifact
from ondevice.api.predict import predict
from ondevice.api.train import run_artifact
from ondevice.artifact.manifest import read_manifest
from ondevice.artifact.weights import WEIGHTS_NAME
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.errors import ArtifactError, TrainingError
from ondevice.core.registry import method_config, open_session, target
from ondevice.core.untrusted import read_header
from ondevice.exporters.base import ExportJob
from ondevice.exporters.executorch.blocks import BlocksSession
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.models import load_model, save_tiny
from ondevice.training.events import read_log
from ondevice.training.progress import describe_experts
from tests.methods.reference import batch
from tests.programs import model, program

pytest.importorskip("executorch.exir")
NAME = "blocks of qwen3_moe"
KOTLIN = (
    Path(__file__).parents[3] / "android_app/core/src/main/kotlin/org/ondevice/core/Manifest.kt"
)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """A row of one token over and over, which is routed to the same experts everywhere."""
    ids = np.full((1, 16), 77)
    return ids, ids.copy()


def poisoned(folder: Path, keep: set[tuple[int, int]]) -> BlocksSession:
    """The artifact with NaN in the place of every expert but these."""
    shutil.copytree(program(NAME), folder)
    path = folder / WEIGHTS_NAME
    values = bytearray(path.read_bytes())
    for name, place in read_header(path).tensors.items():
        found = re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.", name)
        if found and (int(found[1]), int(found[2])) not in keep:
            size = int(np.prod(place.shape)) * 4
            values[place.start : place.start + size] = b"\xff" * size
    path.write_bytes(values)
    return BlocksSession(folder, read_manifest(folder, check_files=False))


def test_weights_of_experts_that_no_token_chose_are_not_read(tmp_path: Path) -> None:
    session = open_artifact(program(NAME))
    result = session.step(*rows(), 0, 1e-2)
    chosen = set(session.experts.read)
    assert result.experts is not None
    assert len(chosen) == result.experts["read"] == 4  # two of six in each of two layers
    assert result.experts["all"] == 12
    other = poisoned(tmp_path / "a", chosen)
    assert other.step(*rows(), 0, 1e-2).loss == result.loss
    assert other.flat().tobytes() == session.flat().tobytes()
    for ours, theirs in zip(other.evaluate(*rows()), session.evaluate(*rows()), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    with pytest.raises(TrainingError) as caught, np.errstate(all="ignore"):
        poisoned(tmp_path / "b", chosen - {min(chosen)}).step(*rows(), 0, 1e-2)
    assert "not finite" in caught.value.message


def test_a_run_reports_the_bytes_of_experts_that_a_token_reads(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1", "completion": "23"}\n' * 3)
    settings = {"data.path": str(data), "train.steps": 2, "train.out": str(tmp_path / "run")}
    folder = program(NAME)
    trained = run_artifact(folder, run_config(folder, None, settings))
    session = open_artifact(folder)
    tensors = read_header(folder / WEIGHTS_NAME).tensors
    names = [name for name in tensors if ".0.mlp.experts.3." in name]
    each = sum(int(np.prod(tensors[name].shape)) * 4 for name in names)
    assert each == session.experts.expert_bytes
    figures = trained.to_dict()["experts"]
    assert figures["bytes"] == figures["read"] * each
    assert 4 <= figures["read"] < 12
    assert figures["bytes_per_token"] == figures["bytes"] / 16
    assert read_log(tmp_path / "run/events.jsonl").steps()[-1].experts == figures
    assert f"{figures['read']} of 12 experts" in describe_experts(figures)


def test_predict_names_the_task_that_a_program_lacks_and_follows_its_adapter_s(
    tmp_path: Path,
) -> None:
    """The program was made without a task; a run's adapter records the run's."""
    data = tmp_path / "rows.csv"
    data.write_text("text,label\nso,a\nno,b\nso,a\n")
    folder = program(NAME)
    with pytest.raises(ArtifactError) as caught:
        predict(folder, [{"text": "so"}])
    assert "does not record its task" in caught.value.message
    assert "(--task)" in str(caught.value.hint)
    settings = {"data.path": str(data), "train.steps": 2, "train.out": str(tmp_path / "run")}
    trained = run_artifact(folder, run_config(folder, None, settings))
    texts = [{"text": text} for text in ("so", "no", "oh")]
    ours = predict(folder, texts, adapter=trained.adapter)
    wanted = predict(str(model("qwen3_moe")), texts, adapter=trained.adapter)
    for mine, eager in zip(ours, wanted, strict=True):
        assert mine.prediction == eager.prediction
        assert mine.probabilities == pytest.approx(eager.probabilities, rel=1e-4)


def test_evaluation_and_the_next_token_of_a_mixture_are_eager_s() -> None:
    session = open_artifact(program(NAME))
    eager = open_session(load_model(str(model("qwen3_moe"))), method_config("mesp", {"rank": 4}), 4)
    for step in range(2):
        session.step(*batch(1, 16, seed=step), step, 1e-2)
    eager.load_adapter(session.adapter())
    ids, labels = batch(1, 16, seed=9)
    for ours, theirs in zip(session.evaluate(ids, labels), eager.evaluate(ids, labels)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    logits = session.next_token(ids, 9)
    labels = np.full_like(ids, -100)
    ids[0, 9] = labels[0, 9] = 77
    wanted = eager.evaluate(ids, labels)[0][0]
    mine = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[77]
    assert mine == pytest.approx(wanted, rel=1e-4)


def test_the_app_does_not_know_the_roles_of_a_mixture() -> None:
    """It refuses a role that it does not know, by its name, as the C++ host does."""
    spec = read_manifest(program(NAME)).program_spec
    ports = [port for one in spec.methods.values() for port in (*one.inputs, *one.outputs)]
    known = set(re.findall(r'\("([a-z_]+)"\)', KOTLIN.read_text()))
    unknown = {"normed", "normed_gradient", "routing", "routing_gradient"}
    assert {port.role for port in ports} - known == unknown
    assert spec.experts == 6


def job(folder: Path, method: dict[str, Any], **export: Any) -> ExportJob:
    settings = ExportConfig(target="android-cpu", lengths_tokens=(16,), **export)
    return ExportJob(ModelConfig(source=str(folder)), method_config("mesp", method), settings)


@pytest.mark.parametrize(
    ("sizes", "method", "export", "words"),
    [
        ({}, {"target_modules": ["q_proj", "experts.down_proj"]}, {}, "no adapters on experts"),
        ({}, {}, {"quantize": "q4", "rounding": "rows"}, "levels of experts"),
        ({"moe_intermediate_size": 24}, {}, {"quantize": "int8"}, "expert 24"),
    ],
)
def test_what_a_program_of_a_mixture_does_not_do_is_named(
    sizes: dict[str, Any],
    method: dict[str, Any],
    export: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "m", "qwen3_moe", **sizes)
    problems = target("android-cpu").check(job(folder, method, **export))
    assert any(words in problem for problem in problems), problems
    assert not target("android-cpu").check(job(save_tiny(tmp_path / "n", "qwen3_moe"), {}))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("granitemoe", {}),
        ("lfm2_moe", {"layers": 4, "num_dense_layers": 2}),
        ("qwen2_moe", {"mlp_only_layers": [1]}),
    ],
)
def test_blocks_without_experts_and_other_mixers_are_kinds_of_a_program(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "m", family, **sizes)
    assert not target("android-cpu").check(job(folder, {}))
    functions = BlockFunctions(load_model(str(folder)), method_config("mesp"))
    kinds = {"lfm2_moe": (0, 1, 2, 3), "granitemoe": (0, 0), "qwen2_moe": (0, 1)}
    assert functions.kinds(16) == kinds[family]
    weights = functions.weights()
    dims: Any = functions.dims
    for layer in range(dims.layers):
        dense = layer in dims.dense_layers
        assert functions.routes(layer) != dense
        of_layer = [name for name in weights if f"layers.{layer}." in name]
        assert any(".experts." in name for name in of_layer) != dense
        ports = {one.name.format(layer=layer) for one in functions.frozen(layer)}
        assert ports <= set(of_layer)
    if family == "qwen2_moe":
        assert not target("android-cpu").check(job(folder, {}, context_tokens=40))


def test_a_host_calls_experts_only_of_blocks_that_have_some() -> None:
    """The first layer of two has none."""
    spec = read_manifest(program("blocks of lfm2_moe")).program_spec
    assert spec.expert_layers == spec.layers_of("expert_forward_1") == [1]
    session = open_artifact(program("blocks of lfm2_moe"))
    result = session.step(*rows(), 0, 1e-2)
    assert result.experts is not None
    assert result.experts["all"] == 6
    assert session.experts.read and {layer for layer, _ in session.experts.read} == {1}


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_mixtures_whose_blocks_are_not_known_are_refused_by_name(
    family: str, tmp_path: Path
) -> None:
    from tests.models.test_any_decoder import save

    problems = target("android-cpu").check(job(save(tmp_path / "m", family), {}))
    assert any(family in problem for problem in problems), problems


def test_the_readme_says_how_experts_are_called() -> None:
    text = (program(NAME) / "README.md").read_text(encoding="utf-8")
    assert "each of 6 experts" in text
    assert json.loads((program(NAME) / "manifest.json").read_text())["schema_version"] == 2
