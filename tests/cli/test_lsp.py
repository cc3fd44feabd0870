"""LSP-Offload through the command line: training, resume across a refresh, the model it leaves, the plan, mistakes."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch

from ondevice.artifact.files import read_tensors
from ondevice.core.errors import ConfigError
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import Replaying
from ondevice.models import load_model
from ondevice.offload.device import Device
from ondevice.training.events import read_log
from tests.cli.command import classes, tiny
from tests.cli.test_slideformer import weights

SMALL = {
    "learned": True,
    "subspace": 24,
    "nonzeros": 4,
    "check_every": 3,
    "learn_rounds": 1,
    "learn_steps": 2,
}


def train(data, *more: object, **settings: object) -> list[object]:
    sets = [
        part
        for item in {**SMALL, **settings}.items()
        for part in ("--set", f"method.{item[0]}={item[1]}")
    ]
    return ["train", *tiny("lsp", "--lr", "0.01"), "--data", data, *sets, *more]


def steps_of(out) -> list:
    return [
        entry.event
        for entry in read_log(out / "events.jsonl").entries
        if entry.event.kind == "step"
    ]


def test_every_look_is_logged_by_matrix_and_the_bus_says_that_it_is_simulated(
    ondevice, tmp_path
) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = ondevice(*train(data, "--steps", 5, "--out", out, "--bus-limit", "2"))
    assert done.code == 0, done.err
    assert "simulated bus of 2 GB/s" in done.err and "bound by" in done.err
    steps = steps_of(out)
    assert steps[0].overlap is None
    assert ["bias_checks" in step.overlap for step in steps[1:]] == [True, False, False, True]
    actual = steps[4].overlap["bias_checks"]
    assert len(actual) == 2 * 7 + 1 and all(len(pair) == 2 for pair in actual.values())
    for side, name in enumerate(("bias_before", "bias_after")):
        assert steps[4].overlap[name] == pytest.approx(
            np.mean([pair[side] for pair in actual.values()])
        )
    looks = steps[1].overlap
    assert 0 < looks["bias_after"] < looks["bias_before"]
    figures = ondevice(
        *train(data, "--steps", 2, "--out", tmp_path / "b", "--bus-limit", "2", "--json")
    ).json
    assert figures["overlap"]["simulated_gb_per_s"] == 2 and figures["overlap"]["bias_checks"]


SETTINGS = [
    {},
    {"learned": False},
    {"weight_placement": "host", "max_grad_norm": 0.5},
    {"compute": "float32", "schedule": "zero"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_resume_across_a_refresh_has_the_same_bits(settings, ondevice, tmp_path) -> None:
    data, out, straight = classes(tmp_path / "rows.jsonl"), tmp_path / "run", tmp_path / "straight"
    options = train(data, "--set", "train.checkpoint_every=1", threshold=0, **settings)
    assert ondevice(*options, "--steps", 5, "--out", out).code == 0
    done = ondevice(*options, "--steps", 8, "--out", out, "--resume", "--json")
    assert done.code == 0 and done.json["steps"] == 8, done.err
    assert ondevice(*options, "--steps", 8, "--out", straight).code == 0
    assert weights(out / "model") == weights(straight / "model")
    ours, theirs = (
        read_tensors(run / "checkpoint-00000008" / "state.safetensors") for run in (out, straight)
    )
    assert ours.keys() == theirs.keys() and "base/layer.0" in ours
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    assert [step.loss for step in steps_of(out)] == [step.loss for step in steps_of(straight)]


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_the_model_that_is_left_has_the_engine_s_losses_in_transformers(
    compute, ondevice, tmp_path
) -> None:
    from transformers import AutoModelForCausalLM

    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    options = train(data, "--steps", 5, "--eval-data", data, compute=compute)
    done = ondevice(*options, "--out", out, "--json")
    assert done.code == 0, done.err
    assert weights(out / "model") == weights(out / "checkpoint-00000005" / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype="auto")
    assert model.dtype == getattr(torch, compute)
    again = ondevice("eval", out / "model", "--data", data, "--json")
    assert again.code == 0, again.err
    tolerance = 1e-5 if compute == "float32" else 2e-2
    assert again.json["loss"] == pytest.approx(done.json["evaluation"]["loss"], rel=tolerance)


def test_the_session_takes_no_adapter_and_no_scalars() -> None:
    session = open_session(
        load_model("tiny:llama"), method_config("lsp", {**SMALL, "threads": 1}), 0
    )
    try:
        assert session.adapter() is None and session.backend == "torch-cpu"
        assert not isinstance(session, Replaying)
        with pytest.raises(ConfigError):
            session.load_adapter(None)
    finally:
        session.close()


def test_settings_that_cannot_be_met_say_so(ondevice, tmp_path, monkeypatch) -> None:
    data = classes(tmp_path / "rows.jsonl")

    def refused(name: str, *more: object, **settings: object):
        return ondevice(*train(data, *more, "--steps", 1, "--out", tmp_path / name, **settings))

    none = refused("a", nonzeros=0)
    assert none.code == 2 and "nonzeros" in none.err and "1 or more" in none.err
    near = refused("b", gradient_bufers=3)
    assert near.code == 2 and "did you mean 'gradient_buffers'" in near.err
    both = refused("c", project="false", weight_dtype="nf4")
    assert both.code == 2 and "project: true" in both.err
    whole = refused("g", project="false", gradient_dtype="int4")
    assert whole.code == 2 and "gradient_dtype: int4 is for project: true" in whole.err
    packed = refused("p", projector_values="followed", weight_dtype="nf4", learned="false")
    assert packed.code == 2 and "weight_dtype: nf4 retains all former ones" in packed.err
    two = refused("q", projector_values="followed", learned="true")
    assert two.code == 2 and "learned: true fits drawn values" in two.err
    bus = refused("d", "--bus-limit", "0")
    assert bus.code == 2 and "bus_limit_gb_per_s" in bus.err
    other = ondevice(
        "train", *tiny("full"), "--data", data, "--bus-limit", "3", "--out", tmp_path / "e"
    )
    assert other.code == 2 and "bus_limit_gb_per_s'; it is a key of lsp, slideformer" in other.err
    adapter = refused("f", "--adapter", tmp_path)
    assert adapter.code != 0 and "Traceback" not in adapter.err
    real = builtins.__import__

    def without(name: str, *more: object, **keywords: object):
        if name.startswith("bitsandbytes"):
            raise ImportError(name)
        return real(name, *more, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        missing = refused("g", weight_dtype="nf4")
    assert (
        missing.code == 10
        and "bitsandbytes" in missing.err
        and "ondevice-train[cuda]" in missing.err
    )


def test_an_accelerator_that_is_too_small_is_no_traceback(ondevice, tmp_path, monkeypatch) -> None:
    data = classes(tmp_path / "rows.jsonl")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
        )

    monkeypatch.setattr(Device, "empty", full)
    refused = ondevice(*train(data, "--steps", 1, "--out", tmp_path / "a"))
    assert (
        refused.code == 8
        and "method.weight_dtype: nf4 or method.weight_placement: host" in refused.err
        and "2.00 GiB" in refused.err
    )


def test_the_plan_recommends_and_says_why(ondevice) -> None:
    options = ("plan", "--model", "tiny:llama", "--method", "lsp", "--set", "method.subspace=24")
    planned = ondevice(*options, "--device", "h200", "--bus-limit", "15", "--json")
    assert planned.code == 0, planned.err
    actual = planned.json["recommendation"]
    assert (
        actual["given"]["to_host_bytes"] < actual["zero"]["to_host_bytes"] and actual["sentences"]
    )
    assert set(actual["settings"]) == {
        "subspace",
        "nonzeros",
        "batch_size",
        "weight_dtype",
        "weight_placement",
    }
    text = ondevice(*options, "--device", "h200", "--bus-limit", "15")
    assert (
        "simulated bus of 15 GB/s" in " ".join(text.out.split())
        and "recommended: subspace" in text.out
    )
    unknown = ondevice(*options, "--device", "orin-nano-8gb", "--json").json["recommendation"]
    assert unknown["settings"] is None and "--bus-limit" in unknown["sentences"][-1]
    measured = ondevice(
        *options, "--device", "this-cpu", "--bus-limit", "1", "--calibrate", "--json"
    )
    assert measured.code == 0, measured.err
    lanes = measured.json["offload"]
    assert lanes["h2d_s"] == pytest.approx(
        measured.json["recommendation"]["given"]["to_device_bytes"] / 1e9
    )
    assert lanes["update_s"] > 0 and measured.json["recommendation"]["settings"]
