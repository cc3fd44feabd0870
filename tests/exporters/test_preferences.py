"""Exported programs on preference pairs and rated answers: gradients and whole runs against torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ondevice
from ondevice.api.export import export as export_artifact
from ondevice.api.export import run_config
from ondevice.api.open import open_artifact
from ondevice.api.runfile import RunConfig
from ondevice.api.train import check_artifact, run_artifact
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.cli.app import app
from ondevice.core.errors import CheckpointError, ConfigError, DataError
from ondevice.core.session import OPTIMIZER_STEP, Weigh
from ondevice.fleet.device import DeviceSettings, open_member
from ondevice.models import load_model, save_tiny
from ondevice.models.save import save_loaded
from ondevice.objectives import Scores, objective
from ondevice.training.events import read_log
from ondevice.training.preferences import FILE_NAME
from tests.fleet.fleets import charter
from tests.methods.mesp.reference import errors, exact, rows
from tests.methods.test_weighted_steps import whole_loss
from tests.objectives.test_objectives import FORMULAS, SETTINGS
from tests.programs import config, model, needs_qnn, parameters, program

REFERENCE = np.random.default_rng(5).normal(-40, 3, (1, 2))
LIKED = np.array([True])
BLOCKS = ("pairs", "pairs, int8")


def short_pairs(count: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{number}?",
            "chosen": "ab"[: number % 2 + 1],
            "rejected": "xyzuvw"[number % 3 :],
        }
        for number in range(count)
    ]


def short_thumbs(count: int = 12) -> list[dict[str, Any]]:
    sides = ("chosen", "rejected")
    return [
        {
            "prompt": row["prompt"],
            "completion": row[sides[number % 2]],
            "label": number % 2 == 0,
        }
        for number, row in enumerate(short_pairs(count))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def weigh(name: str, labels: np.ndarray) -> Weigh:
    """An objective over one pair of rows."""
    tokens = (labels[:, 1:] >= 0).sum(1).reshape(1, 2)

    def weighed(nll: np.ndarray) -> tuple[float, np.ndarray]:
        scores = Scores(-nll.astype(np.float64).reshape(1, 2), REFERENCE, tokens, LIKED)
        graded = objective(name, **SETTINGS[name]).grade(scores)
        return graded.loss, -graded.coefficients.reshape(-1)

    return weighed


def gradients(session: Any, ids: np.ndarray, labels: np.ndarray, name: str) -> Any:
    """Loss and gradients of a program's step: AdamW's first moment after one step from zero."""
    before = session.state()
    moments = {key: np.zeros_like(before[key]) for key in ("exp_avg", "exp_avg_sq", OPTIMIZER_STEP)}
    session.load_state(before | moments)
    loss = session.weighted_step(ids, labels, weigh(name, labels), 0, 0.0).loss
    session.load_state(before | {"adapter": session.state()["exp_avg"] / np.float32(0.1)})
    found = session.adapter().tensors
    session.load_state(before)
    return loss, {key: value.astype(np.float64) for key, value in found.items()}


def rounded(name: str) -> Any:
    """The model that a program computes with."""
    loaded = load_model(str(model("two layers")))
    if config(name).export.quantize != "none":
        from ondevice.methods.mesp.program import EXECUTORCH

        EXECUTORCH.build(loaded, config(name).method, config(name).export, 4)
    return loaded


def with_random_b(session: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    adapter = session.adapter()
    for key, value in adapter.tensors.items():
        if ".lora_B." in key:
            value[:] = 0.3 * random.standard_normal(value.shape) / value.shape[1] ** 0.5
    session.load_adapter(adapter)
    return session.adapter().tensors


@pytest.mark.parametrize("program_name", parameters(BLOCKS))
def test_a_block_program_learns_the_gradient_of_the_whole_loss(program_name: str) -> None:
    pytest.importorskip("executorch.exir")
    session = open_artifact(program(program_name))
    tensors = with_random_b(session)
    for seed, name in enumerate(FORMULAS):
        ids, labels = rows(2, 64, seed, 250)
        ids = ids % 250
        if name == "kto":  # the pair's other rows are another answer, which has no gradient
            labels[1] = -100
            labels[1, 5:9] = ids[1, 5:9]
        loss, ours = gradients(session, ids, labels, name)
        theirs, expected = exact(
            rounded(program_name),
            tensors,
            session.config.scale,
            ids,
            labels,
            whole_loss(name, REFERENCE, LIKED),
        )
        assert loss == pytest.approx(theirs, rel=1e-5)
        assert max(errors(ours, expected).values()) < 1e-4, name


def steps_of(out: Path) -> list[Any]:
    entries = read_log(out / "events.jsonl").entries
    return [entry.event for entry in entries if entry.event.kind == "step"]


@pytest.mark.parametrize("made", [short_pairs, short_thumbs], ids=["pairs", "thumbs"])
@pytest.mark.parametrize("program_name", parameters(BLOCKS))
def test_run_learns_what_train_learns(program_name: str, made: Any, tmp_path: Path) -> None:
    pytest.importorskip("executorch.exir")
    loaded = rounded(program_name)
    save_loaded(loaded, tmp_path / "model")
    data = write(tmp_path / "rows.jsonl", made())
    held_out = write(tmp_path / "held out.jsonl", made(5))
    common = ["--data", str(data), "--eval-data", str(held_out), "--steps", "5", "--lr", "0.01"]
    texts = 2 if made is short_pairs else 1
    ours = [str(program(program_name)), *common, "--out", str(tmp_path / "ours")]
    theirs = [
        *(str(tmp_path / "model"), *common, "--method", "mesp", "--rank", "4"),
        *("--batch-size", str(2 // texts), "--max-length", "64", "--seed", "4"),
        *("--out", str(tmp_path / "theirs")),
    ]
    for verb, arguments in (("run", ours), ("train", theirs)):
        done = CliRunner().invoke(app, [verb, *arguments, "--quiet"])
        assert done.exit_code == 0, (done.output, done.exception)
    mine, expected = (steps_of(tmp_path / part) for part in ("ours", "theirs"))
    assert len(mine) == 5
    for one, other in zip(mine, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.preferences.keys() == other.preferences.keys()
        for key in one.preferences.keys() - {"accuracy"}:  # ties of the first step are rounding's
            value = one.preferences[key]
            assert value == pytest.approx(other.preferences[key], rel=1e-3, abs=1e-4), key
    adapters = [load_adapter(tmp_path / part / "adapter").tensors for part in ("ours", "theirs")]
    assert adapters[0].keys() == adapters[1].keys()
    for key, value in adapters[1].items():
        np.testing.assert_allclose(adapters[0][key], value, atol=2e-4)


@pytest.mark.parametrize("made", [short_pairs, short_thumbs], ids=["pairs", "thumbs"])
def test_a_stopped_run_of_a_program_goes_on_with_the_same_bits(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("executorch.exir")
    folder = program("pairs")
    data = write(tmp_path / "rows.jsonl", made())

    def run(out: str, steps: int, **options: Any) -> bytes:
        settings = {
            "data.path": str(data),
            "data.validation_split": 0.25,
            "train.out": str(tmp_path / out),
            "train.steps": steps,
            "train.checkpoint_every": 2,
            "method.learning_rate": 0.01,
        }
        trained = run_artifact(folder, run_config(folder, None, settings), **options)
        assert trained.adapter is not None
        return (trained.adapter / "adapter_model.safetensors").read_bytes()

    whole = run("whole", 6)
    run("parts", 4)
    reference = (tmp_path / "parts" / FILE_NAME).read_bytes()
    assert json.loads(reference)["model"] == read_manifest(folder).model.sha256
    assert run("parts", 6, resume=True) == whole
    assert (tmp_path / "parts" / FILE_NAME).read_bytes() == reference
    other = json.loads(reference) | {"model": "0" * 64}
    (tmp_path / "parts" / FILE_NAME).write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        run("parts", 8, resume=True)
    assert "of another model" in caught.value.message
    assert json.loads((tmp_path / "parts" / FILE_NAME).read_bytes()) == other
    assert run("parts", 6, overwrite=True) == whole


@pytest.mark.parametrize(
    ("name", "made", "expected"),
    [
        ("blocks, sgd", short_pairs, "an even number of rows in a step"),
        ("functional", short_pairs, "a program of mesp"),
        ("pairs", lambda: [row for row in short_thumbs() if row["label"]], "liked and disliked answers"),
    ],
)  # fmt: skip
def test_a_run_and_its_check_refuse_the_same(
    name: str, made: Any, expected: str, tmp_path: Path
) -> None:
    pytest.importorskip("executorch.exir")
    folder = program(name)
    data = write(tmp_path / "rows.jsonl", made())
    settings = {"data.path": str(data), "train.out": str(tmp_path / "run")}
    for start in (run_artifact, check_artifact):
        with pytest.raises((ConfigError, DataError)) as caught:
            start(folder, run_config(folder, None, settings))
        assert caught.value.expected == expected
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_fleet_s_device_refuses_a_program_that_learns_no_preferences(tmp_path: Path) -> None:
    pytest.importorskip("executorch.exir")
    folder = program("functional")
    manifest = read_manifest(folder)
    values = {"model_sha256": manifest.model.sha256, "method": dict(manifest.method)}
    objective = {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0}
    fleet = charter().model_copy(update={**values, "objective": objective})
    data = write(tmp_path / "rows.jsonl", short_pairs())
    settings = DeviceSettings(folder=str(tmp_path / "device"), data=str(data), artifact=str(folder))
    with pytest.raises(ConfigError) as caught:
        open_member(fleet, settings, 1)
    assert "does not learn from preferences" in caught.value.message
    assert not (tmp_path / "device" / FILE_NAME).exists()


def test_the_npu_s_simulator_learns_the_gradient_of_the_whole_loss() -> None:
    pytest.importorskip("executorch.exir")
    needs_qnn()
    session = open_artifact(program("npu blocks"))
    tensors = with_random_b(session)
    for seed, name in enumerate(("dpo", "orpo")):
        ids, labels = rows(2, 16, seed, 250)
        ids = ids % 250
        loss, ours = gradients(session, ids, labels, name)
        loaded = load_model(str(model("wide")))
        formula = whole_loss(name, REFERENCE, LIKED)
        theirs, expected = exact(loaded, tensors, session.config.scale, ids, labels, formula)
        assert loss == pytest.approx(theirs, rel=2e-3)
        for key, value in expected.items():
            cosine = (ours[key] * value).sum() / np.linalg.norm(ours[key]) / np.linalg.norm(value)
            assert cosine > 0.9995, (name, key)
            norms = np.linalg.norm(ours[key]) / np.linalg.norm(value)
            assert norms == pytest.approx(1, abs=0.02), (name, key)
    session.close()


@pytest.mark.parametrize(
    ("target", "method"),
    [("jetson", "mesp"), ("jetson", "lora"), ("jetson", "prge"), ("apple-mlx", "mesp")],
)
@pytest.mark.parametrize("made", [short_pairs, short_thumbs], ids=["pairs", "thumbs"])
def test_an_artifact_for_a_computer_learns_what_train_learns(
    target: str, method: str, made: Any, tmp_path: Path
) -> None:
    pytest.importorskip({"jetson": "bitsandbytes", "apple-mlx": "mlx.core"}[target])
    source = save_tiny(tmp_path / "model", "llama")
    data = write(tmp_path / "rows.jsonl", made())
    export = {
        "model.source": str(source),
        "model.dtype": "float32",
        "method.name": method,
        "export.target": target,
        "export.batch_size": 2,
        "export.lengths_tokens": [64],
        "export.quantize": "none",
        "train.seed": 4,
    }
    artifact = tmp_path / "artifact"
    export_artifact(RunConfig.load(None, export), artifact)
    common = {
        "data.path": str(data),
        "data.validation_split": 0.25,
        "train.steps": 4,
        "method.learning_rate": 0.01,
    }
    settings = {**common, "train.out": str(tmp_path / "ours")}
    run_artifact(artifact, run_config(artifact, None, settings))
    texts = 2 if made is short_pairs else 1
    ondevice.train(
        {
            **common,
            "model.source": str(source),
            "model.dtype": "float32",
            "method.name": method,
            "train.batch_size": 2 // texts,
            "train.seed": 4,
            "data.max_length_tokens": 64,
            "train.out": str(tmp_path / "theirs"),
        }
    )
    mine, expected = (steps_of(tmp_path / part) for part in ("ours", "theirs"))
    for one, other in zip(mine, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
