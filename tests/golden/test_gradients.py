"""Every implementation of MeSP meets the golden gradients: torch, MLX and exported block programs,
also in the native host."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ondevice.api import export as artifacts
from ondevice.api.open import open_artifact
from ondevice.api.runfile import RunConfig
from ondevice.artifact.files import read_tensors, write_tensors
from ondevice.artifact.manifest import read_manifest, write_manifest
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import IGNORE, OPTIMIZER_STEP
from ondevice.methods.mesp.memory import HEAD_ROWS
from ondevice.models import load_model, open_model
from ondevice.models.tiny import tiny_tokenizer
from tests.eager_program import computing_in_pytorch
from tests.golden.cases import BLOCKS, CASES, HOSTED, IMPLEMENTATIONS, Case
from tests.golden.gradients import FILE, exact, relative_errors
from tests.methods.mesp.reference import learned
from tests.methods.rounding import ALLOWED
from tests.runtime_ops.native_host import built, call, losses
from tests.shared import cached

NAMES = [case.name for case in CASES]
BY_NAME = {case.name: case for case in CASES}


def lowered(names: list[str]) -> list[Any]:
    """Cases that are lowered for the runtime; each takes 20 seconds, so one of every change."""
    return [
        name if name == "llama, many labels" else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]


FEWEST_TOKENS = 8
"""Of a program's rows."""
Found = tuple[float, dict[str, np.ndarray]]


@functools.cache
def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A case's metadata and gradients."""
    with safe_open(FILE, "numpy") as file:
        about = json.loads(file.metadata()["cases"])[name]
        names = [
            key for key in sorted(file.keys()) if key.startswith(f"{name}/") and ".lora_" in key
        ]
        return about, {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in names}


def folder_of(case: Case, place: Path) -> str:
    """The case's model as a published checkpoint."""
    folder = place / case.name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config))
    save_file(case.weights(), folder / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def settings(case: Case) -> dict[str, Any]:
    return {"rank": case.rank, "alpha": case.alpha, "target_modules": case.targets}


def give_adapter(session: Any, case: Case) -> None:
    adapter, tensors = session.adapter(), case.adapter()
    assert adapter.tensors.keys() == tensors.keys()
    session.load_adapter(replace(adapter, tensors=tensors))


def compare(name: str, found: Found) -> None:
    """Within the error that float32 is modelled to make in each tensor."""
    about, gradients = golden(name)
    loss, ours = found
    assert loss == pytest.approx(about["loss"], rel=3e-6)
    for key, error in relative_errors(ours, gradients).items():
        limit = ALLOWED * about["modelled_errors"][key]
        assert error <= limit, f"{key}: {error:.2e}, expected at most {limit:.2e}"


def test_the_file_is_what_the_script_writes() -> None:
    with safe_open(FILE, "numpy") as file:
        assert list(json.loads(file.metadata()["cases"])) == NAMES
        for case in CASES:
            assert json.loads(file.metadata()["cases"])[case.name]["config"] == case.config
            for name, value in zip(("ids", "labels"), case.batch()):
                np.testing.assert_array_equal(file.get_tensor(f"{case.name}/{name}"), value)
    for case in CASES:
        about, gradients = golden(case.name)
        loss, found = exact(case)
        assert loss == pytest.approx(about["loss"], rel=1e-12)
        assert max(relative_errors(found, gradients).values()) <= 1e-9, case.name


def test_all_implementations_meet_thirty_of_the_same_cases() -> None:
    taken = [set(names) for names, _ in IMPLEMENTATIONS.values()]
    assert len(set.intersection(*taken)) >= 30


def test_no_limit_is_wide() -> None:
    """A wrong term changes a gradient by far more than the widest limit."""
    for name in NAMES:
        about, gradients = golden(name)
        assert gradients.keys() == about["modelled_errors"].keys()
        assert ALLOWED * max(about["modelled_errors"].values()) <= 1e-3, name


@pytest.mark.parametrize("name", NAMES)
def test_torch_meets_the_golden_gradients(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    config = method_config("mesp", settings(case))
    session = open_session(load_model(folder_of(case, tmp_path)), config, 0)
    give_adapter(session, case)
    compare(name, learned(session, *case.batch()))


@pytest.mark.parametrize("name", BLOCKS)
def test_mlx_meets_the_golden_gradients(name: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    from ondevice.methods.mesp.mlx.model import Model
    from tests.methods.mesp.mlx.models import gradients

    case = BY_NAME[name]
    config = method_config("mesp", settings(case))
    files = open_model(folder_of(case, tmp_path))
    session: Any = open_session(files, config, 0, backend="mlx")
    give_adapter(session, case)
    loss, found = gradients(session.model, Model.forward_backward, *case.batch())
    part, ours = session.model.settings.dims.traits.part, {}
    for one in session.parameters:
        for side, key in (("A", one.a_name), ("B", one.b_name)):
            ours[key] = found[f"{one.layer}.{part(one.target)}.{side}"]
    compare(name, (loss, ours))


def block_settings(case: Case) -> dict[str, Any]:
    """Those of an export whose step takes the case's batch as it is."""
    values = {f"method.{key}": value for key, value in settings(case).items()}
    values |= {"method.name": "mesp", "method.loss_tiles": 3, "train.seed": 0}
    values |= {"export.batch_size": case.rows, "export.eval_batch_size": 1}
    length = padded_batch(case)[0].shape[1]
    return values | {"export.lengths_tokens": [length], "export.check_steps": 1}


def padded_batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels, int64 [rows, tokens], filled up to the fewest tokens that a program takes."""
    missing = ((0, 0), (0, max(0, FEWEST_TOKENS - case.tokens)))
    ids, labels = case.batch()
    padding = case.config["pad_token_id"]
    ids = np.pad(ids, missing, constant_values=padding)
    return ids, np.pad(labels, missing, constant_values=IGNORE)


@functools.cache
def block_program(name: str) -> Path:
    """The artifact of a case."""
    case = BY_NAME[name]
    values = block_settings(case)

    def make(place: Path) -> Path:
        config = RunConfig.load(None, {**values, "model.source": folder_of(case, place)})
        return artifacts.export(config, place / "program").path

    return cached(f"golden {name}", json.dumps([repr(case), values]), make)


def learned_by_program(session: Any, ids: np.ndarray, labels: np.ndarray) -> Found:
    """Loss and gradients of a step: AdamW's first moment after one from zero."""
    before = session.state()
    moments = {key: np.zeros_like(before[key]) for key in ("exp_avg", "exp_avg_sq", OPTIMIZER_STEP)}
    session.load_state(before | moments)
    loss = session.step(ids, labels, 0, 0.0).loss
    session.load_state(before | {"adapter": session.state()["exp_avg"] / np.float32(0.1)})
    return loss, session.adapter().tensors


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kernels", ["stock", "auto"])
def test_functions_of_blocks_meet_the_golden_gradients(
    name: str, kernels: str, tmp_path: Path
) -> None:
    """A session walks the blocks as it does in the runtime; `auto` is in this project's ops."""
    case = BY_NAME[name]
    values = block_settings(case) | {"export.kernels": kernels}
    config = RunConfig.load(None, {**values, "model.source": folder_of(case, tmp_path)})
    with computing_in_pytorch():
        session: Any = open_artifact(artifacts.export(config, tmp_path / "program").path)
        assert session.fused == (kernels == "auto" and not case.family.endswith("moe"))
        give_adapter(session, case)
        compare(name, learned_by_program(session, *padded_batch(case)))


@pytest.mark.parametrize("name", lowered(BLOCKS))
def test_block_programs_meet_the_golden_gradients(name: str) -> None:
    """The first has more labelled tokens than go through the head together."""
    pytest.importorskip("executorch.exir")
    case = BY_NAME[name]
    ids, labels = padded_batch(case)
    if name == "llama, many labels":
        assert (labels[:, 1:] >= 0).sum() > HEAD_ROWS
    session = open_artifact(block_program(name))
    give_adapter(session, case)
    compare(name, learned_by_program(session, ids, labels))


@pytest.mark.timeout(900)  # whoever comes first compiles the host
@pytest.mark.parametrize("name", lowered(HOSTED))
def test_the_native_host_meets_the_golden_gradients(name: str, tmp_path: Path) -> None:
    """It begins with the case's adapter, and its checkpoint has the first moment of one step."""
    pytest.importorskip("executorch.exir")
    host, case, folder = built("x86_64"), BY_NAME[name], tmp_path / "program"
    shutil.copytree(block_program(name), folder)
    session: Any = open_artifact(folder)
    give_adapter(session, case)
    write_tensors(folder / "state_first.safetensors", {"adapter": session.flat()})
    write_manifest(read_manifest(folder, check_files=False), folder)
    rows = tmp_path / "rows.jsonl"
    pairs = zip(*(part.tolist() for part in case.batch()))
    lines = [json.dumps({"input_ids": ids, "labels": labels}) for ids, labels in pairs]
    rows.write_text("\n".join(lines))
    out = tmp_path / "run"
    call(host, folder, "-d", rows, "-o", out, "-n", "1", "--learning-rate", "1e-30")
    moments = read_tensors(out / "checkpoint-00000001" / "state.safetensors")["exp_avg"]
    session.load_state(session.state() | {"adapter": moments / np.float32(0.1)})
    compare(name, (losses(out)[0], session.adapter().tensors))
