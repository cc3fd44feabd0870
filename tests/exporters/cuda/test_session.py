"""Artifacts of jetson and cuda-server in PyTorch: every verb on them, resume to the bits, and what
they refuse."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from ondevice.api import export as artifacts
from ondevice.api.evaluate import evaluate
from ondevice.api.open import open_artifact
from ondevice.api.replay import replay
from ondevice.api.runfile import RunConfig
from ondevice.api.train import run_artifact
from ondevice.api.verify import verify
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import ArtifactError, DoesNotFitError
from ondevice.exporters.base import random_batches
from ondevice.exporters.cuda.session import TorchProgramSession
from ondevice.exporters.cuda.target import compare
from ondevice.models import load_model, save_tiny
from ondevice.training.fuse import fuse
from tests.cli.command import classes
from tests.methods.reference import batch

METHODS = ("prge", "mesp", "lora", "lora-fa")


def configured(folder, tmp_path, steps: int = 6, out: str = "run", **more):
    given = {"data.path": classes(tmp_path / "rows.jsonl"), "train.out": tmp_path / out}
    values = {name: str(path) for name, path in given.items()} | {
        "train.steps": steps,
        "train.checkpoint_every": 2,
    }
    return artifacts.run_config(folder, None, values | more)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_stops_and_goes_on_with_the_same_bits(artifact_of, tmp_path, method) -> None:
    folder = artifact_of(method)
    whole = run_artifact(folder, configured(folder, tmp_path))
    run_artifact(folder, configured(folder, tmp_path, 4, "parts"))
    parts = run_artifact(folder, configured(folder, tmp_path, 6, "parts"), resume=True)
    assert whole.adapter and parts.adapter and whole.result.steps == parts.result.steps == 6
    ours, theirs = load_adapter(whole.adapter).tensors, load_adapter(parts.adapter).tensors
    assert ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == theirs[name].tobytes() for name in ours
    )
    assert whole.result.first_loss is not None and whole.result.final_loss is not None


@pytest.mark.parametrize("method", METHODS)
def test_the_manifest_names_the_state_of_a_session(artifact_of, tmp_path, method) -> None:
    folder = artifact_of(method)
    spec, session = read_manifest(folder).program_spec, open_artifact(folder)
    session.step(*next(random_batches(session, 97, 1)), 0, 1e-3)
    state = {name: array for name, array in session.state().items() if array.dtype == np.float32}
    assert {tensor.name: tensor.shape for tensor in spec.state} == {
        name: array.shape for name, array in state.items()
    }
    moments = {tensor.name for tensor in spec.state if tensor.role == "optimizer"}
    assert moments == {name for name in state if name.startswith("exp_avg")}
    assert [counter.name for counter in spec.counters] == (
        [] if method == "prge" else ["optimizer_step"]
    )


def test_a_zeroth_order_run_is_rebuilt_from_its_log(artifact_of, tmp_path) -> None:
    folder = artifact_of()
    trained = run_artifact(folder, configured(folder, tmp_path))
    rebuilt = replay(tmp_path / "run", artifact=folder)
    assert rebuilt is not None and trained.adapter is not None
    for name, value in load_adapter(trained.adapter).tensors.items():
        assert rebuilt.tensors[name].tobytes() == value.tobytes(), name


def test_prge_as_it_comes_takes_new_subspaces_resumes_and_replays(source, tmp_path) -> None:
    """PyTorch is on the machine, so an artifact is not the paper's: exact gradients of packed
    weights, and Adam."""
    values = {"name": "prge", "rank": 1, "queries": 2, "calibration_rows": 3, "refresh_every": 2}
    export = {
        "target": "jetson",
        "lengths_tokens": [32],
        "batch_size": 2,
        "check_steps": 1,
        "quantize": "int8",
    }
    given = {
        "model": {"source": str(source), "dtype": "float32"},
        "method": values,
        "export": export,
    }
    artifacts.export(RunConfig.parse(given), folder := tmp_path / "a")
    method = read_manifest(folder).method
    assert (method["subspace"], method["optimizer"]) == ("gradient", "adam") and verify(
        folder, steps=2
    )["ok"]
    assert artifacts.run_config(folder).train.schedule == "linear"
    more = {"train.schedule": "constant", "data.max_length_tokens": 32}
    whole = run_artifact(folder, configured(folder, tmp_path, 5, "whole", **more))
    run_artifact(folder, configured(folder, tmp_path, 3, "parts", **more))
    parts = run_artifact(folder, configured(folder, tmp_path, 5, "parts", **more), resume=True)
    rebuilt = replay(tmp_path / "whole", artifact=folder)
    assert (
        len(list((tmp_path / "whole").glob("subspace-*.safetensors"))) == 3 and rebuilt is not None
    )
    for name, value in load_adapter(whole.adapter).tensors.items():
        assert (
            load_adapter(parts.adapter).tensors[name].tobytes()
            == value.tobytes()
            == rebuilt.tensors[name].tobytes()
        )


def test_an_evaluation_with_and_without_the_adapter(artifact_of, tmp_path) -> None:
    folder = artifact_of("lora")
    config = configured(folder, tmp_path, 8, **{"method.learning_rate": 0.05})
    trained = run_artifact(folder, config)
    before, after = (
        evaluate(folder, config.data.path, adapter=adapter) for adapter in (None, trained.adapter)
    )
    assert after.loss < before.loss and after.rows == before.rows == 12


@pytest.mark.parametrize(
    ("method", "quantize"),
    [
        *((method, "nf4") for method in METHODS),
        ("prge", "int8"),
        ("lora", "int8"),
        ("prge", "none"),
        ("lora", "none"),
    ],
)
def test_verify_holds_it_against_the_original_model(artifact_of, method, quantize) -> None:
    result = verify(artifact_of(method, quantize), steps=3)
    assert result["ok"] and result["steps"] == 3 and result["backend"] == "torch-cpu"
    assert result["max_rel_loss_error"] == result["max_abs_adapter_error"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_update_shows_where_other_rounding_is_allowed(
    artifact_of, monkeypatch, method, dtype
) -> None:
    """As on a GPU, where adapters are not held bit for bit: a step of twice the rate is no
    rounding."""
    session, reference = open_artifact(artifact_of(method)), open_artifact(artifact_of(method))
    batches = list(random_batches(session, session.manifest.model.dims["vocab"], 2))
    session.backend = "torch-cuda"
    right = compare(session, reference, batches, 0.01, dtype)
    assert right["ok"] and right["update_error"] < 1e-6
    step = session.step
    monkeypatch.setattr(
        session, "step", lambda ids, labels, number, rate: step(ids, labels, number, 2 * rate)
    )
    assert not compare(session, reference, batches, 0.01, dtype)["ok"]


def test_verify_notices_other_weights_and_another_model(artifact_of, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(artifact_of(), tmp_path / "a")
    path = tmp_path / "a" / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] ^= 255
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError) as raised:
        verify(tmp_path / "a", steps=1)
    assert "model.safetensors" in raised.value.message
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["files"].pop("model/model.safetensors")
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    assert not verify(tmp_path / "a", steps=1)["ok"]
    other = save_tiny(tmp_path / "other", "llama", 1)
    with pytest.raises(ArtifactError) as raised:
        verify(artifact_of(), steps=1, model=str(other))
    assert "--model" in str(raised.value.hint)


def test_an_adapter_is_fused_into_the_original_model(artifact_of, tmp_path, source) -> None:
    folder = artifact_of("lora")
    trained = run_artifact(
        folder, configured(folder, tmp_path, 4, **{"method.learning_rate": 0.05})
    )
    report = fuse(str(folder), str(trained.adapter), tmp_path / "merged")
    assert report.ok and report.dtype == "float32"
    original, merged = (load_model(str(path)).family for path in (source, tmp_path / "merged"))
    adapter = load_adapter(trained.adapter)
    a, b = adapter.pair("model.layers.0.self_attn.q_proj")
    change = (
        (merged.linear(0, "q_proj").weight - original.linear(0, "q_proj").weight).detach().numpy()
    )
    np.testing.assert_allclose(change, adapter.alpha / adapter.rank * b @ a, atol=1e-6)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model"]["sha256"] = "0" * 64
    shutil.copytree(folder, tmp_path / "foreign")
    (tmp_path / "foreign" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError) as raised:
        fuse(str(tmp_path / "foreign"), str(trained.adapter), tmp_path / "other")
    assert raised.value.expected == "0" * 64


def test_only_its_own_shapes_and_version_are_taken(artifact_of, tmp_path) -> None:
    session = open_artifact(artifact_of())
    for refused, received in (
        (lambda: session.step(*batch(2, 24), 0, 0.01), 24),
        (lambda: session.step(*batch(3, 16), 0, 0.01), 3),
        (lambda: session.evaluate(*batch(2, 24)), 24),
    ):
        with pytest.raises(ArtifactError) as raised:
            refused()
        assert raised.value.received == received
    nll, count = session.evaluate(*batch(5, 16))
    assert nll.shape == count.shape == (5,)
    session.close()
    shutil.copytree(artifact_of(), tmp_path / "a")
    program = json.loads((tmp_path / "a" / "program.json").read_text())
    (tmp_path / "a" / "program.json").write_text(json.dumps({**program, "format": 99}))
    with pytest.raises(ArtifactError) as raised:
        TorchProgramSession(tmp_path / "a", read_manifest(tmp_path / "a", check_files=False))
    assert raised.value.received == 99


def test_a_memory_limit_refuses_before_anything_is_loaded(
    artifact_of, tmp_path, monkeypatch
) -> None:
    from ondevice.exporters.cuda.target import Cuda

    monkeypatch.setattr(Cuda, "open", lambda *given: pytest.fail("the artifact was opened"))
    folder = artifact_of()
    with pytest.raises(DoesNotFitError) as caught:
        run_artifact(folder, configured(folder, tmp_path, **{"train.memory_limit_bytes": "64MiB"}))
    text = str(caught.value)
    assert "the memory limit" in text and "64.0 MiB (--memory-limit" in text
    assert all(
        part in text for part in ("weights", "dense matrix", "activations", "logits", "runtime")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_runs_it_as_the_cpu_does(artifact_of, method) -> None:
    folder = artifact_of(method)
    sessions = [
        TorchProgramSession(folder, read_manifest(folder), device) for device in ("cpu", "cuda")
    ]
    assert [session.backend for session in sessions] == ["torch-cpu", "torch-cuda"]
    for step in range(4):
        sessions[1].load_state(sessions[0].state())
        ours, theirs = (
            session.step(*batch(2, 16, seed=step), step, 0.01) for session in reversed(sessions)
        )
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4)


@pytest.mark.gpu
def test_the_memory_limit_caps_the_gpu(artifact_of, tmp_path) -> None:
    import torch

    from ondevice.planning.artifacts import plan_artifact
    from ondevice.planning.fits import CONTEXT_BYTES, memory_limit

    plan = plan_artifact(artifact_of(), read_manifest(artifact_of()), 2 << 30)
    with pytest.raises(DoesNotFitError), memory_limit(2 << 30, plan):
        torch.zeros((2 << 30) - CONTEXT_BYTES + (64 << 20), dtype=torch.uint8, device="cuda")
    torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
