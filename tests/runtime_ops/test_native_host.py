"""The native host: built with CMake, it trains an artifact with the bits of `ondevice run`."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.artifact.adapter import load_adapter
from ondevice.exporters.android_cpu.target import TOLERANCE
from ondevice.runtime_ops import build
from tests.programs import parameters, program
from tests.runtime_ops.native_host import HOST, built, call, losses
from tests.runtime_ops.test_cmake import need, run

pytest.importorskip("executorch.exir")
pytestmark = pytest.mark.timeout(900)  # whoever comes first compiles

FORMS = ["blocks", "blocks, sgd", "blocks, int8", "blocks, q4", "blocks, 8da8w", "blocks, 8da4w"]
FORMS += ["pairs, int8"]
Q4DQ = pytest.param("blocks, q4dq", marks=pytest.mark.nightly)
STEPS = 5
FORWARD = ("program_spec", "methods", "block_forward_2x24", "inputs", 0)


@pytest.fixture(scope="module")
def host() -> Path:
    return built("x86_64")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows ä.jsonl"
    rows = [{"prompt": f"{i}:", "completion": f" né {i * 7}"[: 3 + i]} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def ids(texts: Path) -> Path:
    """The rows as token ids, by the flag that a user takes."""
    from ondevice.api.export import run_config
    from ondevice.api.train import write_tokens

    path = texts.with_name("ids.jsonl")
    artifact = program("blocks")
    count = write_tokens(artifact, run_config(artifact, None, {"data.path": str(texts)}), path)
    assert count == 7 == len(path.read_text().splitlines())
    return path


def by_python(artifact: Path, texts: Path, out: Path, **more: Any) -> None:
    from ondevice.api.export import run_config
    from ondevice.api.train import run_artifact

    settings = {
        "data.path": str(texts),
        "train.steps": STEPS,
        "train.checkpoint_every": 2,
        "train.out": str(out),
    }
    run_artifact(artifact, run_config(artifact, None, settings | more))


def files(out: Path) -> dict[str, bytes]:
    """The adapter and the checkpoints' states of a run."""
    paths = [*out.glob("adapter/adapter_*"), *out.glob("checkpoint-*/state.safetensors")]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("form", [*parameters(FORMS), Q4DQ])
def test_the_native_host_trains_with_the_bits_of_ondevice_run(
    form: str, host: Path, texts: Path, ids: Path, tmp_path: Path
) -> None:
    artifact = program(form)
    theirs, ours = tmp_path / "python", tmp_path / "nativ ä"
    by_python(artifact, texts, theirs)
    result = call(host, artifact, "-d", ids, "-o", ours, "-n", f"{STEPS}", "--checkpoint-every=2")
    assert result["steps"] == STEPS and result["unused_rows"] == 0
    assert len(files(theirs)) == 4 and files(ours) == files(theirs)
    assert losses(ours) == losses(theirs)


def test_layers_read_embeddings_of_their_own_and_keys_of_other_layers(
    host: Path, texts: Path, ids: Path, tmp_path: Path
) -> None:
    """Not to the bit: this host's runtime is of another version than Python's. B begins at zero, so
    it is what gradients have made of it, those of shared keys and values too."""
    artifact = program("blocks of gemma4_text, int8")
    theirs, ours = tmp_path / "python", tmp_path / "native"
    by_python(artifact, texts, theirs)
    call(host, artifact, "-d", ids, "-o", ours, "-n", f"{STEPS}", "--checkpoint-every=2")
    np.testing.assert_allclose(losses(ours), losses(theirs), rtol=TOLERANCE["int8"]["loss_free"])
    expected = load_adapter(theirs / "adapter").tensors
    for name, value in load_adapter(ours / "adapter").tensors.items():
        most = TOLERANCE["int8"]["gradient"] * float(np.abs(expected[name]).max())
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=most, err_msg=name)


def test_a_schedule_and_epochs_give_the_same_bits(
    host: Path, texts: Path, ids: Path, tmp_path: Path
) -> None:
    artifact, theirs, ours = program("blocks"), tmp_path / "python", tmp_path / "native"
    more = {"train.epochs": 1.5, "train.schedule": "cosine", "train.warmup_steps": 2}
    by_python(artifact, texts, theirs, **more, **{"method.learning_rate": 0.02})
    words = ["--epochs", "1.5", "--schedule", "cosine", "--warmup-steps", "2"]
    words += ["--learning-rate", "0.02", "--checkpoint-every", "2"]
    call(host, artifact, "-d", ids, "-o", ours, *words)
    assert losses(ours) == losses(theirs) and files(ours) == files(theirs)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    host: Path, ids: Path, tmp_path: Path
) -> None:
    artifact, whole, cut = program("blocks"), tmp_path / "whole", tmp_path / "cut"
    call(host, artifact, "-d", ids, "-o", whole, "-n", "5", "--checkpoint-every", "2")
    call(host, artifact, "-d", ids, "-o", cut, "-n", "3", "--checkpoint-every", "2")
    state = cut / "checkpoint-00000003" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1  # damaged: the one before it is taken
    state.write_bytes(content)
    call(host, artifact, "-d", ids, "-o", cut, "-n", "5", "--checkpoint-every", "2", "--resume")
    lines = [json.loads(line) for line in (cut / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(5))
    assert any("damaged" in line.get("message", "") for line in lines)
    assert losses(cut) == losses(whole)
    assert (
        files(cut)["adapter/adapter_model.safetensors"]
        == files(whole)["adapter/adapter_model.safetensors"]
    )


def test_a_signal_ends_the_step_and_saves(host: Path, ids: Path, tmp_path: Path) -> None:
    words = [host, program("blocks"), "-d", ids, "-o", tmp_path, "-n", "1000000", "--json"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "events.jsonl"
    while not log.exists() or log.read_text().count('"step"') < 20:
        time.sleep(0.02)
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=100)
    result = json.loads(output)
    assert running.returncode == 130 and result["interrupted"]
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["signal"], last["step"]) == ("interrupt", "SIGINT", result["steps"])
    assert (tmp_path / f"checkpoint-{result['steps']:08d}" / "state.safetensors").is_file()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "no artifact is given"),
        (["{artifact}"], 2, "no data is given"),
        (["{artifact}", "-d", "{ids}", "--steps", "0"], 2, "--steps takes a number"),
        (["{artifact}", "-d", "{ids}", "--schedule", "steep"], 2, "unknown schedule"),
        (["{artifact}", "-d", "{ids}", "--rate", "1"], 2, "unknown option"),
        (["{artifact}", "-d", "{ids}", "-n", "2", "--warmup-steps", "2"], 2, "the warmup must end"),
        (["{artifact}", "-d", "{out}/none.jsonl"], 3, "cannot be read"),
        (["{artifact}", "-d", "{texts}"], 3, "no row can be trained on"),
        (["{out}", "-d", "{ids}"], 5, "is not an artifact"),
        (["{artifact}", "-d", "{ids}", "-o", "{ids}/run"], 11, "cannot be written"),
    ],
)
def test_a_wrong_command_is_named_and_a_dry_run_refuses_it_too(
    words: list[str], status: int, message: str, host: Path, texts: Path, ids: Path, tmp_path: Path
) -> None:
    names = {"artifact": program("blocks"), "ids": ids, "texts": texts, "out": tmp_path}
    given = [word.format(**names) for word in words]
    for more in (["--dry-run"], []):
        error = call(host, *given, *more, status=status)
        assert message in error["message"] and error["exit_code"] == status
        assert error["try"] and not (tmp_path / "adapter").exists()


def test_a_dry_run_counts_rows_and_writes_nothing(host: Path, ids: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.jsonl"
    bad = ['{"input_ids": [1, 2], "labels": [2, -100]}', "[", '{"input_ids": [1, 2, "3"]}']
    bad += ['{"input_ids": ' + "[" * 5000 + "]" * 5000 + "}", json.dumps({"input_ids": [1] * 99})]
    bad += ['{"input_ids": [5, 6], "position_ids": [0, 1]}', '{"input_ids": [5], "labels": [1, 2]}']
    mixed.write_text(ids.read_text() + "\n".join(bad) + "\n")
    result = call(host, program("blocks"), "-d", mixed, "-o", tmp_path / "run", "--dry-run")
    assert result["rows"] == 7 and result["unused_rows"] == len(bad)
    assert not (tmp_path / "run").exists()
    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text('{"input_ids": [1, 260]}\n')
    error = call(host, program("blocks"), "-d", unknown, "-o", tmp_path / "run", status=3)
    assert "token 260" in error["message"] and error["expected"] == "ids from 0 to 259"


def damaged(folder: Path, change: Any) -> Path:
    """A copy of the artifact whose manifest is changed, with hashes that fit."""
    shutil.copytree(program("blocks"), folder)
    path = folder / "manifest.json"
    path.write_text(change(path.read_text(), folder))
    return folder


def field(*keys: str | int, value: Any) -> Any:
    """A change of one field of the manifest."""

    def change(text: str, folder: Path) -> str:
        values = json.loads(text)
        place = values
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return json.dumps(values)

    return change


def link(text: str, folder: Path) -> str:
    outside = folder.parent / "outside.safetensors"
    (folder / "weights.safetensors").rename(outside)
    (folder / "weights.safetensors").symlink_to(outside)
    return text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text, _: text[:900], "not JSON"),
        (lambda text, _: "[" * 100_000, "nested"),
        (lambda text, _: text.replace('"schema_version": 2', '"schema_version": 3'), "version"),
        (field("target", value="android-npu"), "not an artifact that this host runs"),
        (field("program_spec", "shape", value="step"), "not an artifact that this host runs"),
        (field(*FORWARD, "role", value="routing"), "which this host does not compute"),
        (field(*FORWARD, "role", value="normed_gradient"), "'normed_gradient', which this host"),
        (field("program", value="../program.pte"), "outside the folder"),
        (field("program_spec", "weights", value="/etc/passwd"), "outside the folder"),
        (link, "a link leads outside"),
        (field("files", "program.pte", value="0" * 64), "has changed"),
        (field("files", "missing", value="0" * 64), "lacks a file"),
        (field("program_spec", "vocab", value=1 << 39), "beyond the embedding"),
        (field("program_spec", "layers", value=1 << 39), "out of range"),
        (field("program_spec", "layers", value=4), "weights of another model"),
        (field("program_spec", "layout", 0, "offset", value=1 << 39), "beyond the adapter"),
        (field("program_spec", "adapter_size", value=7), "adapter_size"),
        (field("lengths_tokens", value=[]), "lengths_tokens"),
        (field("batch_size", value=3), "no function"),
        (field("program_spec", "state", value=[]), "adapter_size"),
    ],
)
def test_a_hostile_manifest_is_refused_by_name(
    change: Any, message: str, host: Path, ids: Path, tmp_path: Path
) -> None:
    folder = damaged(tmp_path / "artifact", change)
    error = call(host, folder, "-d", ids, "-o", tmp_path / "run", "-n", "1", status=5)
    assert message in error["message"] + str(error["received"]), error
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_run_is_neither_mixed_with_another_nor_replaced(
    host: Path, ids: Path, tmp_path: Path
) -> None:
    words = [program("blocks"), "-d", ids, "-o", tmp_path / "run", "-n", "2"]
    call(host, *words)
    assert "already holds a run" in call(host, *words, status=6)["message"]
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(f"{line}\n" for line in ids.read_text().splitlines()[:3]))
    others = [words[0], "-d", fewer, *words[3:], "--resume"]
    for more in (["--dry-run"], []):
        error = call(host, *others, *more, status=6)
        assert "another run: encoded.rows" in error["message"]
    assert "beyond the steps" in call(host, *words[:-1], "1", "--resume", status=6)["message"]
    call(host, *words, "--overwrite")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_host_for_64_bit_arm_trains_in_an_emulator(
    host: Path, ids: Path, tmp_path: Path
) -> None:
    need("aarch64-linux-gnu-g++", "qemu-aarch64-static")
    toolchain = build.SOURCES.resolve() / "toolchains" / "aarch64-linux-gnu.cmake"
    # Compiled in half the time; golden_check has the kernels with -O3.
    quick = "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"
    emulated = built("aarch64", "--toolchain", str(toolchain), quick)
    header = emulated.read_bytes()[:20]
    assert struct.unpack("<H", header[18:20])[0] == 183
    call(host, program("blocks"), "-d", ids, "-o", tmp_path / "here", "-n", "3")
    command = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", emulated, program("blocks")]
    run(*command, "-d", ids, "-o", tmp_path / "arm", "-n", "3", "--quiet")
    assert losses(tmp_path / "arm") == pytest.approx(losses(tmp_path / "here"), rel=1e-5)


def test_a_build_without_the_runtime_says_what_it_needs(tmp_path: Path) -> None:
    need("cmake")
    message = run("cmake", "-S", HOST, "-B", tmp_path, f"-DEXECUTORCH_ROOT={sys.prefix}", status=1)
    assert "libexecutorch.so" in message and "EXECUTORCH_ROOT" in message
