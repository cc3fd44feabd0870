"""`plan`, `doctor`, `config` and `data` through the command line."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from tests.cli.command import classes, write_rows


@pytest.mark.parametrize("method", ["prge", "mezo", "lora", "lora-fa", "full", "lsp"])
def test_what_config_show_prints_satisfies_the_schema(method, ondevice) -> None:
    schema = json.loads(ondevice("config", "schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    shown = ondevice("config", "show", "--model", "tiny:llama", "--method", method, "--json")
    assert shown.code == 0
    jsonschema.validate(shown.json, schema)
    text = ondevice("config", "show", "--model", "tiny:llama", "--method", method).out
    assert yaml.safe_load(text) == shown.json and shown.json["method"]["name"] == method
    for broken in (
        {**shown.json, "trian": {}},
        {**shown.json, "method": {"name": method, "rnak": 3}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_what_config_show_prints_is_a_run_file(ondevice, tmp_path) -> None:
    file = tmp_path / "run ü.yaml"
    settings = (
        "--model",
        "tiny:llama",
        "--set",
        "method.rank=3",
        "--set",
        "data.path=/tmp/données.jsonl",
    )
    file.write_text(ondevice("config", "show", *settings).out, encoding="utf-8")
    again = ondevice("config", "show", file, "--json")
    assert again.code == 0 and again.json == ondevice("config", "show", *settings, "--json").json
    assert again.json["method"]["rank"] == 3 and again.json["data"]["path"] == "/tmp/données.jsonl"
    assert ondevice("config", "show").code == 2


def test_every_key_has_a_description(ondevice) -> None:
    schema = json.loads(ondevice("config", "schema").out)
    sections = [schema, *schema["$defs"].values()]
    missing = [
        f"{section.get('title')}.{key}"
        for section in sections
        for key, value in section.get("properties", {}).items()
        if "description" not in value
    ]
    assert missing == []


def test_a_plan_that_does_not_fit_has_an_exit_code(ondevice, tmp_path) -> None:
    plan = ("plan", "--model", "tiny:llama", "--json", "--method", "prge")
    fits = ondevice(*plan, "--device", "h200")
    assert (
        fits.code == 0
        and fits.json["fits"]
        and sum(fits.json["parts_bytes"].values()) == fits.json["total_bytes"]
    )
    assert {"weights", "adapter", "activations", "logits"} <= fits.json["parts_bytes"].keys()
    large = ("--set", "train.batch_size=100000", "--max-length", "4096", "--device", "oneplus-12")
    done = ondevice(*plan, *large)
    assert done.code == 8 and not done.json["fits"]
    assert ondevice(*plan, *large, "--force").code == 0
    for option in (["--device", "toaster"], ["--method", "prgee"]):
        assert ondevice(*plan, *option).code == 2
    text = ondevice(
        "plan",
        "--model",
        "tiny:qwen2",
        "--exported",
        "--quantize",
        "q4",
        "--device",
        "orin-nano-8gb",
    )
    assert text.code == 0 and "weights" in text.out


def test_plan_takes_the_flags_of_train(ondevice, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))  # other processes measure, too
    data = classes(tmp_path / "rows.jsonl")
    flags = ["tiny:llama", "--data", data, "--epochs", 2, "--lr", "1e-3", "--rank", 4, "--batch-size", 2,
             "--validation-split", "0.25", "--memory-limit", "9GiB", "--json"]  # fmt: skip
    trained = ondevice("train", *flags, "--dry-run")  # first: it measures the machine if it can
    planned = ondevice("plan", *flags)
    assert planned.code == trained.code == 0, planned.err + trained.err
    assert planned.json["parts_bytes"] == trained.json["plan"]["parts_bytes"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"),
        (0.5, "500 ms"),
        (3.84, "3.8 s"),
        (99.7, "100 s"),
        (142.0, "140 s"),
        (1500.0, "25 min"),
    ],
)
def test_times_have_two_digits_and_no_exponent(seconds, text) -> None:
    from ondevice.planning.render import _seconds

    assert _seconds(seconds) == text


def test_presets_are_run_files(ondevice, tmp_path) -> None:
    listed = ondevice("config", "preset", "--json").json["presets"]
    assert set(listed) == {"phone", "jetson", "one-gpu", "mac"}
    for name, text in listed.items():
        shown = ondevice("config", "show", name, "--model", "tiny:llama", "--json").json
        kept = tmp_path / f"{name}.yaml"
        kept.write_text(ondevice("config", "preset", name).out)
        assert kept.read_text() == text
        assert ondevice("config", "show", kept, "--model", "tiny:llama", "--json").json == shown
        program = (
            ["--exported"] if shown["export"]["target"] == "android-cpu" and name == "phone" else []
        )
        planned = ondevice(
            "plan", "tiny:llama", "--config", name, *program, "--device", "orin-nano-8gb", "--json"
        )
        assert planned.code == 0, planned.err
    assert ondevice("config", "show", "toaster").code == 2


def test_training_stops_before_it_loads_what_does_not_fit(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    options = ("--model", "tiny:llama", "--data", data, "--steps", 1, "--out", out, "--batch-size", 2_000_000,
               "--memory-limit", "4GiB")  # fmt: skip
    done = ondevice("train", *options, "--max-length", 100_000)
    assert done.code == 8 and "a higher --memory-limit" in done.err and not out.exists()
    dry = ondevice("train", *options, "--max-length", 16, "--dry-run", "--json")
    assert dry.code == 8 and dry.json["plan"]["fits"] is False and not out.exists()


def test_force_runs_what_the_plan_refuses(ondevice, tmp_path, monkeypatch) -> None:
    from ondevice.planning import estimate

    monkeypatch.setattr(estimate.Plan, "fits", property(lambda plan: False))
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    options = ("--model", "tiny:llama", "--data", data, "--steps", 1, "--out", out)
    assert ondevice("train", *options).code == 8 and not out.exists()
    assert ondevice("train", *options, "--force").code == 0 and (out / "adapter").is_dir()


def test_data_shows_examples_and_every_bad_row(ondevice, tmp_path) -> None:
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": 5}, {"promt": "x"}]
    file = write_rows(tmp_path / "lignes [x].jsonl", rows)
    done = ondevice("data", file, "--model", "tiny:llama", "--json")
    assert done.code == 0, done.err
    problems = done.json["problems"]
    assert [problem["line"] for problem in problems] == [2, 3] and all(
        problem["reason"] for problem in problems
    )
    text = ondevice("data", file, "--model", "tiny:llama")
    assert text.code == 0 and "2+2=" in text.out and "lignes[x].jsonl" in "".join(text.out.split())


def test_doctor_says_what_a_target_lacks(ondevice, monkeypatch) -> None:
    from ondevice.planning import doctor

    checks = [
        doctor.Check("python", True, "3.11"),
        doctor.Check("executorch", None, "absent", "pip install", True),
    ]
    monkeypatch.setattr(doctor, "doctor", lambda target, progress=None, full=False: checks)
    done = ondevice("doctor", "--target", "android-cpu", "--json")
    assert (
        done.code == 10
        and done.json["ok"] is False
        and done.json["checks"][1]["fix"] == "pip install"
    )
    text = ondevice("doctor", "--target", "android-cpu")
    assert text.code == 10 and "pip install" in text.out
    checks.pop()
    assert ondevice("doctor").code == 0
