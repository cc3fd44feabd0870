"""SlideFormer through the command line: checkpoints beside the steps, resume, kill, the plan."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from ondevice.artifact.files import read_tensors
from ondevice.models.families.llama import Llama
from ondevice.offload.device import Device
from ondevice.training.events import read_log
from tests.cli.command import classes, tiny
from tests.cli.test_interrupt import start, wait_for_steps
from tests.warm import Warm


def train(data, *more: object) -> list[object]:
    return ["train", *tiny("slideformer", "--lr", "0.01"), "--data", data, *more]


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_checkpoint_is_of_its_step_although_the_next_steps_run(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    long, short = tmp_path / "long run", tmp_path / "kurz"
    every = (
        "--set",
        "train.checkpoint_every=2",
        "--set",
        "method.compute=bfloat16",
    )  # a slow CPU takes float32
    assert ondevice(*train(data, "--steps", 6, "--out", long, *every)).code == 0
    assert ondevice(*train(data, "--steps", 4, "--out", short, *every)).code == 0
    (of_long, of_short) = (
        read_tensors(run / "checkpoint-00000004" / "state.safetensors") for run in (long, short)
    )
    assert of_long.keys() == of_short.keys() and "high/layer.0" in of_long
    for name, value in of_long.items():
        assert value.tobytes() == of_short[name].tobytes(), name
    assert (
        weights(long / "checkpoint-00000004" / "model")
        == weights(short / "model")
        != weights(long / "model")
    )


def test_a_checkpoint_is_a_model_that_other_commands_take(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = ondevice(*train(data, "--steps", 3, "--out", out, "--eval-data", data, "--json"))
    assert done.code == 0, done.err
    again = ondevice("eval", out / "checkpoint-00000003" / "model", "--data", data, "--json")
    assert again.code == 0, again.err
    assert again.json["loss"] == pytest.approx(
        done.json["evaluation"]["loss"], rel=2e-2
    )  # bfloat16 against float32
    assert weights(out / "model") == weights(out / "checkpoint-00000003" / "model")


SMALLER = ("--set", "method.moments=int8", "--set", "method.disk_fraction=0.5")
CLIPPED = ("--set", "method.max_grad_norm=0.05", "--set", "method.moments=bfloat16")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="float32", marks=pytest.mark.nightly),
        pytest.param(SMALLER, id="int8 and disk"),
        pytest.param(CLIPPED, id="clipped, bfloat16"),
    ],
)
def test_a_killed_run_goes_on_with_the_same_bits(more, ondevice, tmp_path) -> None:
    data, out, straight = classes(tmp_path / "rows.jsonl"), tmp_path / "run", tmp_path / "straight"
    options = train(data, "--set", "train.checkpoint_every=1", *more)
    process = start(*options, "--steps", 100_000, "--out", out, cwd=tmp_path)
    try:
        wait_for_steps(process, out, 4)
        process.send_signal(
            signal.SIGKILL
        )  # with a checkpoint after every step, most likely while one is written
    finally:
        process.kill()
        process.wait()
    done = ondevice(*options, "--steps", 100_000, "--out", out, "--resume", "--dry-run")
    assert done.code == 0, done.err
    latest = max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    steps = latest + 3
    done = ondevice(*options, "--steps", steps, "--out", out, "--resume", "--json")
    assert done.code == 0 and done.json["steps"] == steps, done.err
    assert ondevice(*options, "--steps", steps, "--out", straight).code == 0
    assert weights(out / "model") == weights(straight / "model")


@pytest.mark.parametrize("method", ["slideformer", "lsp", "revffn"])
def test_bfloat16_weights_that_are_not_numbers_end_the_run(method, ondevice, tmp_path) -> None:
    """In a state bfloat16 is uint16, of which numpy calls every value finite."""
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    half = ("--dtype", "bfloat16")
    if method != "revffn":
        half = ("--set", "method.compute=bfloat16")
    options = [*tiny(method, "--lr", "1e38"), "--data", data, *half, "--steps", 1, "--out", out]
    done = ondevice("train", *options)
    assert done.code != 0 and "NaN or infinity in" in done.err, done.err
    assert not (out / "model").exists() and not list(out.glob("checkpoint-*"))


def test_settings_that_cannot_be_met_say_so(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    refused = ondevice(
        *train(data, "--steps", 1, "--out", tmp_path / "a", "--set", "method.kernels=liger")
    )
    assert refused.code == 10 and "liger-kernel" in refused.err
    near = ondevice(
        *train(data, "--steps", 1, "--out", tmp_path / "b", "--set", "method.moment=int8")
    )
    assert near.code == 2 and "did you mean 'moments'" in near.err
    adapter = ondevice(*train(data, "--steps", 1, "--out", tmp_path / "c", "--adapter", tmp_path))
    assert adapter.code != 0 and "Traceback" not in adapter.err


def test_the_plan_counts_host_memory_and_predicts_the_step(ondevice) -> None:
    options = ("--model", "tiny:llama", "--method", "slideformer", "--json")
    planned = ondevice("plan", *options, "--device", "h200")
    assert planned.code == 0, planned.err
    host, states = (
        planned.json["host_parts_bytes"],
        planned.json["host_parts_bytes"]["masters and moments"],
    )
    smaller = ondevice("plan", *options, "--device", "h200", "--set", "method.moments=int8").json[
        "host_parts_bytes"
    ]
    assert (
        sum(host.values()) == planned.json["host_total_bytes"]
        and smaller["masters and moments"] < 0.6 * states
    )
    measured = ondevice(
        "plan", *options, "--device", "this-cpu", "--calibrate", "--batch-size", "2"
    )
    assert measured.code == 0, measured.err
    actual = measured.json["offload"]
    lanes = [actual[f"{lane}_s"] for lane in ("compute", "h2d", "d2h", "update", "disk")]
    assert actual["step_s"] == max(lanes) > 0 and actual["bound"] in ("compute", "update")
    other = ondevice("plan", "--model", "tiny:llama", "--method", "full", "--calibrate")
    assert other.code == 2 and "offload" in other.err


def test_the_plan_shows_the_choice_and_why(ondevice) -> None:
    options = ("plan", "--model", "tiny:llama", "--method", "slideformer", "--json")
    planned = ondevice(*options, "--device", "h200").json
    assert all(
        isinstance(planned["method"][name], int)
        for name in ("window", "resident_layers", "gradient_buffers")
    )
    assert any(note.startswith("auto: ") and "stay on the GPU" in note for note in planned["notes"])
    fixed = ondevice(*options, "--device", "h200", "--set", "method.resident_layers=1").json
    assert fixed["method"]["resident_layers"] == 1 and "resident states" in fixed["parts_bytes"]
    here = ondevice(*options, "--device", "this-cpu").json
    assert here["method"]["resident_layers"] == 0 and here["method"]["window"] == 3


def test_ctrl_c_saves_and_the_run_goes_on(ondevice, warm: Warm, tmp_path) -> None:
    data, out, straight = classes(tmp_path / "rows.jsonl"), tmp_path / "run", tmp_path / "straight"
    options = train(data, "--set", "train.checkpoint_every=2")
    process = start(
        *options, "--steps", 100_000, "--out", out, "--json", cwd=tmp_path, python=warm.python
    )
    try:
        wait_for_steps(process, out, 3)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    done = json.loads(printed.splitlines()[-1])["steps"]
    assert (out / f"checkpoint-{done:08d}" / "model" / "model.safetensors").is_file()
    assert ondevice(*options, "--steps", done + 2, "--out", out, "--resume").code == 0
    assert ondevice(*options, "--steps", done + 2, "--out", straight).code == 0
    assert weights(out / "model") == weights(straight / "model")


def test_every_step_says_what_ran_beside_what(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = ondevice(*train(data, "--steps", 3, "--out", out))
    assert done.code == 0 and "bound by" in done.err and "hiding factor" in done.err
    steps = [
        entry.event
        for entry in read_log(out / "events.jsonl").entries
        if entry.event.kind == "step"
    ]
    assert steps[0].overlap is None and steps[2].overlap["backward_s"] > 0
    figures = ondevice(*train(data, "--steps", 3, "--out", tmp_path / "again", "--json")).json
    assert figures["overlap"]["bound"] in ("compute", "update", "h2d", "d2h")


def test_an_accelerator_that_is_too_small_is_no_traceback(ondevice, tmp_path, monkeypatch) -> None:
    data = classes(tmp_path / "rows.jsonl")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
        )

    with monkeypatch.context() as patch:
        patch.setattr(Device, "empty", full)
        refused = ondevice(*train(data, "--steps", 1, "--out", tmp_path / "a"))
    assert refused.code == 8 and "method.window" in refused.err and "2.00 GiB" in refused.err
    monkeypatch.setattr(Llama, "block", full)
    refused = ondevice(*train(data, "--steps", 1, "--out", tmp_path / "b"))
    assert refused.code == 8 and "2 rows of" in refused.err and "micro_batch_size" in refused.err
