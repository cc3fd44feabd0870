"""Adapters, artifacts, checkpoints and settings: whole examples, and how a user reads them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")


# Adapters


def adapter() -> Any:
    from ondevice.artifact.adapter import Adapter

    tensors = {}
    for linear in LINEARS:
        tensors[f"{linear}.lora_A.weight"] = np.ones((2, 8), np.float32)
        tensors[f"{linear}.lora_B.weight"] = np.ones((8, 2), np.float32)
    return Adapter(tensors, 2, 4.0, ("q_proj", "v_proj"), "tiny:llama")


def build_adapter(folder: Path) -> None:
    from ondevice.artifact.adapter import save_adapter

    save_adapter(adapter(), folder / "adapter")


def build_mlx_adapter(folder: Path) -> None:
    from ondevice.artifact.mlx_lm_files import save_mlx_lm_adapter

    save_mlx_lm_adapter(adapter(), folder / "adapter")


def read_adapter(folder: Path) -> None:
    from ondevice.artifact.adapter import load_adapter

    found = load_adapter(folder / "adapter")
    _ = found.linears, found.changes_nothing


# Artifacts and checkpoints


def build_artifact(folder: Path) -> None:
    from ondevice.artifact.manifest import write_manifest
    from ondevice.artifact.weights import WEIGHTS_NAME, write_weights
    from tests.exporters.executorch.test_session import manifest

    written = manifest(folder)
    write_weights(
        folder / WEIGHTS_NAME, {"w": np.ones((4, 4), np.float32), "codes": np.ones(3, np.int8)}
    )
    (folder / "program.json").write_text(
        json.dumps({"format": 1, "dtype": "float32", "functions": {}})
    )
    spec = written.program_spec.model_copy(update={"weights": WEIGHTS_NAME})
    write_manifest(
        written.model_copy(update={"program_spec": spec, "program": "program.json"}), folder
    )


def read_artifact(folder: Path) -> None:
    """Read what every session reads, whatever its runtime."""
    from ondevice.artifact.files import read_tensors
    from ondevice.artifact.manifest import read_manifest
    from ondevice.artifact.weights import MappedWeights
    from ondevice.core.errors import ArtifactError
    from ondevice.core.untrusted import read_object

    found = read_manifest(folder)
    spec = found.program_spec
    for tensor in spec.state:
        if tensor.first is not None:
            read_tensors(folder / tensor.first)
    if spec.weights is not None:
        weights = MappedWeights(folder / spec.weights)
        for name in weights:
            weights.whole(name).sum()
    read_object(folder / found.program, ArtifactError)


def hash_again(folder: Path) -> None:
    """Give every file the hash that the manifest names, as somebody who means harm does."""
    path = folder / "manifest.json"
    try:
        values = json.loads(path.read_bytes())
        for name in values["files"]:
            if (folder / name).is_file():
                values["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        path.write_text(json.dumps(values))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass


IDENTITY = {"method": {"name": "prge", "rank": 2}, "seed": 1}


def build_checkpoints(folder: Path) -> None:
    from ondevice.training.checkpoint import CheckpointStore

    for step in (1, 2):
        state = {
            "adapter": np.ones(6, np.float32),
            "seed": np.array([1]),
            "moment": np.ones((2, 2), np.float16),
        }
        CheckpointStore(folder, IDENTITY, seed=1, backend="torch").save(
            step, state, evaluation={"loss": 1.0}, score=(-1.0,)
        )
    # A checkpoint of two ranks: its second file is a part.
    path = folder / "checkpoint-00000002"
    shutil.copy(path / "state.safetensors", path / "state-00001.safetensors")
    meta = json.loads((path / "meta.json").read_text())
    meta["parts"] = {"state-00001.safetensors": meta["state_sha256"]}
    (path / "meta.json").write_text(json.dumps(meta))


def read_checkpoints(folder: Path) -> None:
    from ondevice.training.checkpoint import CheckpointStore

    store = CheckpointStore(folder, IDENTITY, seed=1, backend="torch")
    store.best()
    found = store.newest(lambda message: None)
    assert found is not None
    for value in found.state.values():
        value.sum()


def state_hash(folder: Path) -> None:
    """Give the state the hash that `meta.json` names."""
    path = folder / "checkpoint-00000002"
    if (path / "state.safetensors").is_file():
        meta = json.loads((path / "meta.json").read_text())
        meta["state_sha256"] = hashlib.sha256((path / "state.safetensors").read_bytes()).hexdigest()
        (path / "meta.json").write_text(json.dumps(meta))


def build_log(folder: Path) -> None:
    from ondevice.training.events import Evaluate, EventLog, Finish, Start, Step, Warning

    values: dict[type, dict[str, Any]] = {
        kind: _example_of(kind) for kind in (Start, Step, Evaluate, Warning, Finish)
    }
    with EventLog(folder / "events.jsonl") as log:
        for kind, fields in values.items():
            log.write(kind(**fields))
            if kind is Step:
                for step in range(1, 4):
                    log.write(kind(**{**fields, "step": step}))


def _example_of(kind: Any) -> dict[str, Any]:
    import dataclasses

    example = {
        "float": 0.5,
        "int": 0,
        "str": "x",
        "bool": False,
        "dict[str, Any]": {"a": 1},
        "tuple": (0.5,),
    }
    found = {}
    for item in dataclasses.fields(kind):
        key = str(item.type).partition(" |")[0]
        key = (
            "tuple"
            if key.startswith("tuple")
            else "dict[str, Any]"
            if key.startswith("dict")
            else key
        )
        found[item.name] = example.get(key, "x")
    return found


def read_events(folder: Path) -> None:
    from ondevice.core.errors import OndeviceError
    from ondevice.server import events as server
    from ondevice.training import events, replay, runs

    content = events.read_log(folder / "events.jsonl")
    _ = content.start, content.steps()
    progress: dict[str, Any] = {}
    for line in (
        (folder / "events.jsonl").read_bytes().splitlines()
        if (folder / "events.jsonl").is_file()
        else ()
    ):
        event = server.parse(line)
        if event is not None:
            server.note(progress, event)
    for read in (lambda: runs.read_run(folder), lambda: replay.read_run(folder)):
        try:
            read()
        except OndeviceError as error:
            str(error).encode()


# Settings


def build_run_file(folder: Path) -> None:
    text = "model: {source: 'tiny:llama', dtype: float32}\ndata:\n  path: rows.jsonl\n  columns: {prompt: q}\n"
    text += (
        "method: {name: mesp, rank: 4, target_modules: [q_proj, v_proj], learning_rate: 0.001}\n"
    )
    text += "train: {steps: 10, batch_size: 2, out: runs/x}\nexport: {target: android-cpu, lengths_tokens: [32]}\n"
    (folder / "run.yaml").write_text(text)


def read_run_file(folder: Path) -> None:
    from ondevice.api.runfile import RunConfig

    RunConfig.load(folder / "run.yaml")


def build_template(folder: Path) -> None:
    text = "prompt: |\n  {premise}\n  Question: {hypothesis}?\nfields: {premise: [premise, a.b]}\nlabel: label\n"
    text += "candidates: {entailment: 'True', contradiction: 'False', neutral: Neither}\nmetric: macro_f1\n"
    (folder / "task.yaml").write_text(text)
    rows = [{"premise": "x", "hypothesis": "y", "label": "neutral", "a": {"b": 1}}] * 3
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_template(folder: Path) -> None:
    from ondevice.data.reading import read_rows

    read_rows(folder / "rows.jsonl", task=str(folder / "task.yaml"))


def build_devices(folder: Path) -> None:
    text = "board: {description: a board, kind: board, memory_gib: 8, usable_fraction: 0.8, rule: measured,\n"
    text += "  bandwidth_gb_s: 102, sustained: 0.5, tflops: {float32: 1.0}}\n"
    (folder / "devices.yaml").write_text(text)


def read_devices(folder: Path) -> None:
    from ondevice.planning.devices import device_table, find_device

    device_table(folder / "devices.yaml")
    find_device("board", folder / "devices.yaml")
