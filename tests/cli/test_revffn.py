"""RevFFN through the command line: stages, Ctrl-C and resume, the exported folder, the conversion back, the plan."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from ondevice.training.events import FILE_NAME, read_start
from tests.cli.command import classes, tiny
from tests.cli.test_interrupt import start, wait_for_steps
from tests.methods.revffn.test_export import read
from tests.warm import Warm

MOE = "tiny:qwen2_moe"


def train(data, *more: object, model: str = MOE) -> list[object]:
    return ["train", *tiny("revffn", "--lr", "0.001", model=model), "--data", data, *more]


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_leaves_the_network_and_the_ordinary_model(ondevice, warm: Warm, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = ondevice(*train(data, "--steps", 4, "--out", out, "--json"))
    assert done.code == 0, done.err
    actual = done.json
    assert actual["final_loss"] < actual["first_loss"] and actual["model"] == str(out / "model")
    assert actual["ordinary_loss_difference"] == pytest.approx(
        actual["ordinary_loss"] - actual["reversible_loss"]
    )
    again = ondevice("eval", actual["ordinary_model"], "--data", data, "--json")
    assert again.code == 0 and again.json["loss"] == pytest.approx(
        actual["ordinary_loss"], rel=1e-5
    ), again.err
    itself = ondevice("eval", actual["model"], "--data", data, "--json")
    assert itself.code == 0 and itself.json["loss"] == pytest.approx(
        actual["reversible_loss"], rel=1e-6
    ), itself.err
    onward = ondevice(
        *train(data, "--steps", 1, "--out", tmp_path / "onward", model=actual["model"])
    )
    assert onward.code != 0 and "model-ordinary" in onward.err
    assert read(warm, out / "model", np.arange(8)[None])["kind"] == "RevffnForCausalLM"
    shown = ondevice(*train(data, "--steps", 1, "--out", tmp_path / "other"))
    assert shown.code == 0 and "ordinary loss difference" in shown.out


def test_a_precision_that_was_open_is_in_the_log_and_in_a_gpus_plan(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = ondevice(*train(data, "--steps", 1, "--out", out))
    assert done.code == 0 and "precision: float32" in done.err, done.err
    started = read_start(out / FILE_NAME)
    assert started is not None and started.decided["model.dtype"] == "float32"
    gpu = ("plan", *tiny("revffn", model=MOE), "--device", "h100", "--json")
    assert ondevice(*gpu).json["dtype"] == "bfloat16"
    assert ondevice(*gpu, "--dtype", "float32").json["dtype"] == "float32"
    assert ondevice(*gpu[:-3], "--device", "this-cpu", "--json").json["dtype"] == "float32"


def test_ablations_are_flags(ondevice, tmp_path) -> None:
    """Table 3: the adapters alone leave every pretrained weight; without stage 1 all of them move at once."""
    data, half = classes(tmp_path / "rows.jsonl"), ("--set", "method.coupling=exact")
    states = {}
    for name, flags in {"only": ["--stage1-only"], "skip": ["--skip-stage1"], "both": []}.items():
        done = ondevice(
            *train(data, "--steps", 2, "--out", tmp_path / name, *half, *flags, "--json")
        )
        assert done.code == 0 and "ordinary_model" not in done.json, done.err
        states[name] = load_file(tmp_path / name / "model" / "model.safetensors")
    embedding, adapter = "model.embed_tokens.weight", "model.layers.0.revffn.mlp_up"
    assert states["only"][embedding].tobytes() == states["both"][embedding].tobytes()
    assert states["only"][embedding].tobytes() != states["skip"][embedding].tobytes()
    assert (
        len({states[name][adapter].tobytes() for name in states}) == 2
    )  # two steps of stage 1, or none
    refused = ondevice(*train(data, "--steps", 2, "--out", tmp_path / "full", "--stage1-only"))
    assert refused.code == 2 and "coupling: exact or paper" in refused.err
    other = ondevice("train", *tiny("lora"), "--data", data, "--stage1-only")
    assert other.code == 2 and "stage1_only" in other.err and "it is a key of revffn" in other.err


@pytest.mark.parametrize(
    "more", [("--dtype=float32",), ("--dtype=bfloat16", "--set", "method.optimizer=adafactor")]
)
def test_ctrl_c_saves_and_a_resume_ends_with_the_same_bits(
    more, ondevice, warm: Warm, tmp_path
) -> None:
    data, out, straight = classes(tmp_path / "rows.jsonl"), tmp_path / "run", tmp_path / "straight"
    dtype = ("--set", f"model.dtype={more[0].removeprefix('--dtype=')}")
    options = train(data, *dtype, *more[1:], "--set", "method.micro_batch_size=1")
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
    assert not (out / "model").exists()
    assert ondevice(*options, "--steps", done + 2, "--out", out, "--resume").code == 0
    assert ondevice(*options, "--steps", done + 2, "--out", straight).code == 0
    assert weights(out / "model") == weights(straight / "model")
    assert (out / "model" / "config.json").read_bytes() == (
        straight / "model" / "config.json"
    ).read_bytes()


@pytest.mark.parametrize("more", [[], ["coupling=exact"], ["recompute=stored", "streams=float32"]])
def test_a_run_that_ends_without_a_finite_loss_leaves_no_model(ondevice, tmp_path, more) -> None:
    """Its parameters are finite after its only step, and its loss is of those before."""
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    words = ["optimizer=sgd", "skip_stage1=true", *more]
    changes = [part for word in words for part in ("--set", f"method.{word}")]
    done = ondevice(*train(data, "--steps", 1, "--lr", "1e37", "--out", out, *changes))
    assert done.code != 0 and "a smaller learning rate" in done.err, done.err
    assert "Traceback" not in done.err
    assert not (out / "model").exists() and not (out / "model-ordinary").exists()


def test_settings_that_cannot_be_met_say_so(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    near = ondevice(*train(data, "--steps", 1, "--set", "method.stream=float32"))
    assert near.code == 2 and "did you mean 'streams'" in near.err
    other = ondevice(*train(data, "--steps", 1, "--out", tmp_path / "a", model="tiny:gpt2"))
    assert (
        other.code != 0
        and "does not train this family" in other.err
        and "Traceback" not in other.err
    )
    adapter = ondevice(*train(data, "--steps", 1, "--out", tmp_path / "b", "--adapter", tmp_path))
    assert adapter.code != 0 and "Traceback" not in adapter.err


def test_the_plan_says_what_would_need_less(ondevice) -> None:
    options = ("--model", MOE, "--method", "revffn", "--device", "h200", "--json")
    planned = ondevice("plan", *options)
    assert planned.code == 0, planned.err
    assert any("method.recompute: stored" in note for note in planned.json["notes"])
    of = {}
    for recompute in ("reversible", 1, "stored"):
        answer = ondevice("plan", *options, "--set", f"method.recompute={recompute}").json
        of[recompute] = answer["parts_bytes"]
    parts = of["reversible"]
    assert {"gradients", "optimizer", "streams", "activations"} <= parts.keys()
    part = "kept of the forward pass"
    assert part not in parts and 0 < of[1][part] < of["stored"][part]
    assert of["stored"] == planned.json["parts_bytes"]
    assert of["stored"]["gradients"] == parts["gradients"]
    factored = ondevice("plan", *options, "--set", "method.optimizer=adafactor").json["parts_bytes"]
    assert factored["optimizer"] < 0.3 * parts["optimizer"]
