"""Data as people have it through the command line: looked at, trained on and evaluated, with what was left out told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ondevice.models import save_tiny
from tests.cli.command import tiny, write_rows

CONFIG, DATA = 2, 3
TICKETS = "Body;Team\nIt broke, again.;repairs\nWhere is it?;post\nIt is torn.;repairs\n;post\n"
TEMPLATE = "prompt: '{Body} Team:'\nlabel: Team\ncandidates: {repairs: Repairs, post: Post}\nmetric: macro_f1\n"


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.csv"
    path.write_text(TICKETS, encoding="utf-8")
    return path


def started(folder: Path) -> dict[str, Any]:
    """The head of a run's log."""
    return json.loads((folder / "events.jsonl").read_text().splitlines()[0])


def test_named_columns_train_evaluate_and_are_shown(ondevice, tickets, tmp_path) -> None:
    named = ["--column", "text=Body", "--column", "label=Team"]
    shown = ondevice("data", tickets, "--model", "tiny:llama", *named, "--json")
    assert (shown.code, shown.json["format"], shown.json["labels"]) == (
        0,
        "classification",
        {"repairs": 2, "post": 1},
    )
    assert shown.json["notes"][:2] == [
        "columns are separated by a semicolon",
        "columns: text is 'Body', label is 'Team'",
    ]
    out = tmp_path / "run"
    done = ondevice(
        "train", *tiny(), "--data", tickets, *named, "--steps", 1, "--out", out, "--json"
    )
    assert done.code == 0, done.err
    assert (
        done.json["data"]["train"]["left_out"] == {"text: is empty": 1}
        and done.json["unused_rows"] == 1
    )
    length = shown.json["max_length_tokens"]
    assert started(out)["config"]["data"]["max_length_tokens"] == length and length < 64
    run_file = tmp_path / "run.yaml"
    run_file.write_text("data:\n  columns: {text: Body, label: Team}\n")
    again = ondevice(
        "train",
        "--config",
        run_file,
        *tiny(),
        "--data",
        tickets,
        "--steps",
        2,
        "--out",
        out,
        "--resume",
    )
    assert again.code == 0, again.err
    scored = ondevice("eval", "tiny:llama", "--data", tickets, *named, "--json")
    assert scored.json["rows"] == 3 and scored.json["accuracy"] is not None


def test_a_template_of_ones_own_trains_and_evaluates(ondevice, tickets, tmp_path) -> None:
    template = tmp_path / "tickets.yaml"
    template.write_text(TEMPLATE)
    options = ["--data", tickets, "--task", template]
    out = tmp_path / "run"
    train = ("train", *tiny("lora"), *options, "--eval-data", tickets, "--steps", 1, "--out", out)
    done = ondevice(*train, "--json")
    assert done.code == 0, done.err
    assert (
        done.json["evaluation"]["metric"] == "macro_f1"
        and 0 <= done.json["evaluation"]["metric_value"] <= 1
    )
    scored = ondevice("eval", "tiny:llama", *options, "--adapter", out / "adapter", "--json")
    assert scored.json["metric_value"] == done.json["evaluation"]["metric_value"]
    template.write_text(TEMPLATE.replace("Team:", "Who?"))
    changed = ondevice(*train, "--resume")
    assert changed.code == 6 and "task_sha256" in changed.err


def test_what_was_cut_and_left_out_is_told_with_reasons(ondevice, tmp_path) -> None:
    rows = [{"prompt": "long " * 30, "completion": "a"}, {"prompt": "b", "completion": "c" * 90},
            {"prompt": "b", "completion": ""}, {"prompt": "b", "completion": ""}]  # fmt: skip
    data = write_rows(tmp_path / "rows.jsonl", rows)
    done = ondevice(
        "train",
        *tiny(),
        "--data",
        data,
        "--max-length",
        32,
        "--steps",
        1,
        "--out",
        tmp_path / "run",
    )
    assert done.code == 0, done.err
    assert "train data: 1 sequences, 3 rows left out, 1 cut to 32 tokens" in done.err
    assert "2 left out: completion: is empty\n  1 left out: the answer has N tokens;" in done.err
    assert started(tmp_path / "run")["data"]["train"]["cut_tokens"] > 100


def test_a_validation_split_is_evaluated_and_not_trained_on(ondevice, tmp_path) -> None:
    data = write_rows(
        tmp_path / "rows.jsonl",
        [{"text": f"row {number}", "label": number % 2} for number in range(10)],
    )
    split = ("--data", data, "--validation-split", 0.3, "--steps", 1)
    done = ondevice("train", *tiny(), *split, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert {part: figures["sequences"] for part, figures in done.json["data"].items()} == {
        "train": 7,
        "evaluation": 3,
    }
    assert done.json["evaluation"]["rows"] == 3
    both = ondevice("train", *tiny(), *split, "--eval-data", data, "--out", tmp_path / "other")
    assert both.code == CONFIG and "give one of them" in both.err


def test_a_dry_run_says_the_length(ondevice, tmp_path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b" * 40}] * 3)
    done = ondevice("train", *tiny(), "--data", data, "--dry-run")
    assert done.code == 0 and "max length 48 tokens: the longest row has" in done.err, done.err


def test_data_without_a_usable_row_has_an_exit_code(ondevice, tmp_path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": ""}])
    listed = ondevice("data", data, "--model", "tiny:llama")
    assert listed.code == 1 and "is empty" in listed.out
    (tmp_path / "rows.csv").write_text("text^label\ngood^1\n")
    wrong = ondevice("data", tmp_path / "rows.csv", "--model", "tiny:llama")
    assert wrong.code == DATA and "if '^' separates the columns" in wrong.err and wrong.out == ""


def test_a_chat_template_that_fails_on_a_row_names_file_row_field_and_reason(
    ondevice, tmp_path
) -> None:
    model = save_tiny(tmp_path / "m", "llama")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bad = {"messages": [{"role": "system", "content": "x"}, *turns]}
    data = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}, bad])
    settings = (
        "train",
        "--method",
        "lora",
        "--model",
        model,
        "--steps",
        1,
        "--json",
        "--out",
        tmp_path / "run",
    )
    done = ondevice(*settings, "--data", data)
    reason = "messages: the tokenizer's chat template refuses the turns: no system turns"
    assert done.code == 0, done.err
    assert done.json["unused_rows"] == 1 and done.json["data"]["train"]["left_out"] == {reason: 1}
    listed = ondevice("data", data, "--model", model, "--json")
    (problem,) = listed.json["problems"]
    assert (problem["line"], problem["field"]) == (2, "messages") and "no system turns" in problem[
        "reason"
    ]
    none = ondevice(*settings, "--data", write_rows(tmp_path / "bad.jsonl", [bad]))
    assert none.code == DATA and f"{tmp_path / 'bad.jsonl'}:1: 'messages'" in none.err
    assert "change its chat_template.jinja" in none.err


@pytest.mark.parametrize("pair", ["Question", "=x", "prompt=", "prompt=a --column prompt=b"])
def test_a_column_that_is_no_pair_is_a_mistake(pair, ondevice, tickets) -> None:
    done = ondevice("data", tickets, "--column", *pair.split())
    assert done.code == CONFIG and "field=column" in done.err


def test_preferences_are_shown_learnt_from_and_not_evaluated_as_text(ondevice, tmp_path) -> None:
    data = write_rows(
        tmp_path / "pairs.jsonl", [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}]
    )
    shown = ondevice("data", data, "--model", "tiny:llama")
    assert shown.code == 0 and "example 2: rejected" in shown.out
    run = tmp_path / "run"
    trained = ondevice("train", *tiny(), "--data", data, "--steps", 1, "--out", run)
    assert trained.code == 0 and "objective: dpo" in trained.err
    refused = ondevice("eval", "tiny:llama", "--data", data)
    assert refused.code == DATA and "--column completion=chosen" in refused.err


@pytest.mark.parametrize("verb", ["data", "train", "eval"])
def test_a_missing_file_is_told_before_a_framework_is_loaded(verb, tmp_path) -> None:
    """Seconds of imports are seconds of waiting for a typing mistake; the modules are counted, as times vary."""
    words = {
        "data": ["data", "none.jsonl"],
        "train": ["train", "--model", "tiny:llama", "--data", "none.jsonl"],
        "eval": ["eval", "tiny:llama", "--data", "none.jsonl"],
    }[verb]
    program = (
        "import sys\nfrom ondevice.cli.app import run\n"
        f"try:\n    run({words!r})\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print(code, [name for name in ('torch', 'transformers', 'mlx') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == f"{DATA} []", done.stderr
    assert "no such data file: none.jsonl" in done.stderr


@pytest.mark.parametrize("verb", ["train", "eval", "chat"])
@pytest.mark.parametrize("model", ["other.gguf", "nobody/none"])
def test_a_model_that_cannot_be_had_is_told_before_a_framework_is_loaded(
    verb, model, tmp_path
) -> None:
    """An unsupported GGUF file, and a hub that takes no connection: asked once, then what is cached."""
    gguf = pytest.importorskip("gguf")
    data = write_rows(
        tmp_path / "rows.jsonl", [{"text": "a", "label": "b"}, {"text": "c", "label": "d"}]
    )
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = [verb, model, *(["--prompt", "a"] if verb == "chat" else ["--data", str(data)])]
    program = (
        "import sys\nfrom ondevice.cli.app import run\n"
        f"try:\n    run({words!r})\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print(code, [name for name in ('torch', 'transformers', 'mlx') if name in sys.modules])"
    )
    hub = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
    }
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={**os.environ, **hub})  # fmt: skip
    assert done.stdout.splitlines()[-1] == "4 []", done.stderr
    said = (
        "GGUF files of architecture 'mamba' are not supported"
        if model.endswith("f")
        else "the hub cannot be reached"
    )
    assert said in done.stderr and "Traceback" not in done.stderr


def test_what_nothing_reads_is_named_and_refused_if_asked(ondevice, tmp_path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [
        {"id": number, "instruction": "Name a fruit.", "output": "Apple.", "system": "Be brief.", "mood": None}
        for number in range(4)])  # fmt: skip
    shown = ondevice("data", data, "--model", "tiny:llama", "--json").json
    assert shown["unread"] == {"id": 4} and shown["example_unread"] == [["id"]] * 3
    assert "not read" in ondevice("data", data, "--model", "tiny:llama").out
    assert ondevice("data", data, "--model", "tiny:llama", "--strict-columns").code == DATA
    options = [*tiny(), "--data", data, "--steps", 1, "--out", tmp_path / "run"]
    done = ondevice("train", *options)
    assert done.code == 0 and done.err.count("columns and keys that nothing reads: id (4)") == 1
    assert started(tmp_path / "run")["data"]["train"]["unread"] == {"id": 4}
    for verb in (["train", *options, "--overwrite"], ["train", *options, "--overwrite", "--streaming"],
                 ["eval", "tiny:llama", "--data", data]):  # fmt: skip
        refused = ondevice(*verb, "--strict-columns")
        assert refused.code == DATA and "id (4)" in refused.err, refused.err
    for extra in ([], ["--max-length", 64], ["--streaming"]):
        dry = ("train", *options, "--overwrite", "--dry-run", *extra)
        refused = ondevice(*dry, "--strict-columns")
        assert refused.code == DATA and "id (4)" in refused.err, refused.err
        assert ondevice(*dry).code == 0
    held_out = write_rows(
        tmp_path / "held-out.jsonl", [{"instruction": "Name a nut.", "output": "Hazel."}]
    )
    mixed = ["train", *tiny(), "--data", held_out, "--eval-data", data, "--dry-run"]
    refused = ondevice(*mixed, "--strict-columns")
    assert refused.code == DATA and "id (4)" in refused.err, refused.err
    streamed = ondevice("train", *options, "--overwrite", "--streaming", "--json")
    assert streamed.json["data"]["train"]["unread"] == {"id": 4}
