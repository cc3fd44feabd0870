"""`train`, `eval`, `replay`, `fuse` through the command line: what they print and what they write."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ondevice.artifact.adapter import load_adapter
from ondevice.training.events import read_log
from tests.cli.command import classes, tiny, write_rows

METHODS = ("prge", "mezo", "lora", "lora-fa", "full", "slideformer", "lsp")
FIGURES = {"final_loss", "steps", "peak_memory_bytes", "step_time_s"}


def bits(folder) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_adapter(folder).tensors.items()}


@pytest.mark.parametrize("method", METHODS)
def test_training_ends_with_one_json_object(method, ondevice, tmp_path, recwarn) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = ondevice("train", *tiny(method), "--data", data, "--steps", 3, "--out", out, "--json")
    assert done.code == 0, done.err
    assert not [
        one.message for one in recwarn if issubclass(one.category, FutureWarning)
    ]  # PEFT asks transformers
    figures = done.json
    assert figures.keys() >= FIGURES and figures["steps"] == 3 and not figures["interrupted"]
    assert (
        0 < figures["final_loss"] < 20
        and figures["step_time_s"] > 0
        and figures["peak_memory_bytes"] > 10**7
    )
    trains_all = method in ("mezo", "full", "slideformer", "lsp")
    assert (figures["adapter"] is None) == trains_all and (
        figures["model"] is not None
    ) == trains_all
    if trains_all:
        result = ondevice("eval", figures["model"], "--data", data, "--json")
    else:
        assert load_adapter(figures["adapter"]).target_modules == ("q_proj", "v_proj")
        result = ondevice(
            "eval", "tiny:llama", "--data", data, "--adapter", figures["adapter"], "--json"
        )
    assert result.code == 0, result.err
    assert (
        0 <= result.json["accuracy"] <= 1
        and result.json["rows"] == 12
        and result.json["majority_share"] == 0.5
    )


def test_the_trained_adapter_is_what_eval_uses(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    train = (
        "train",
        *tiny("lora", "--lr", "0.02"),
        "--data",
        data,
        "--eval-data",
        data,
        "--steps",
        15,
        "--out",
        out,
    )
    figures = ondevice(*train, "--json").json
    before = ondevice("eval", "tiny:llama", "--data", data, "--json").json
    after = ondevice(
        "eval", "tiny:llama", "--data", data, "--adapter", out / "adapter", "--json"
    ).json
    assert after["loss"] < 0.5 * before["loss"] and after["accuracy"] >= before["accuracy"]
    assert figures["evaluation"]["loss"] == pytest.approx(after["loss"], rel=1e-5)
    assert ondevice("eval", "tiny:llama", "--data", data, "--rows", 5, "--json").json["rows"] == 5


def test_a_replay_rebuilds_the_adapter_bit_for_bit(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    options = tiny("prge", "--set", "train.schedule=cosine", "--lr", "0.1")
    assert (
        ondevice("train", *options, "--data", data, "--steps", 6, "--out", out, "--json").code == 0
    )
    data.unlink()  # no data and no forward pass
    done = ondevice("replay", out, "--out", tmp_path / "again", "--json")
    assert done.code == 0, done.err
    assert done.json["warnings"] == [] and bits(tmp_path / "again") == bits(out / "adapter")
    assert any(
        np.frombuffer(value, np.float32).any()
        for name, value in bits(out / "adapter").items()
        if "_B" in name
    )
    ondevice("replay", out / "events.jsonl", "--out", tmp_path / "half", "--steps", 3)
    assert bits(tmp_path / "half") != bits(out / "adapter")


def test_a_replay_starts_from_the_adapter_that_the_run_started_from(ondevice, tmp_path) -> None:
    data, first, second = classes(tmp_path / "rows.jsonl"), tmp_path / "first", tmp_path / "second"
    options = [*tiny("prge", "--lr", "0.1"), "--data", data, "--steps", 3]
    assert ondevice("train", *options, "--out", first).code == 0
    done = ondevice("train", *options, "--out", second, "--adapter", first / "adapter")
    assert done.code == 0, done.err
    refused = ondevice("replay", second, "--out", tmp_path / "again")
    assert refused.code == 2 and "--adapter" in refused.err
    wrong = ondevice("replay", second, "--out", tmp_path / "again", "--adapter", second / "adapter")
    assert wrong.code == 5 and "not the adapter" in wrong.err
    assert (
        ondevice("replay", second, "--out", tmp_path / "again", "--adapter", first / "adapter").code
        == 0
    )
    assert bits(tmp_path / "again") == bits(second / "adapter") != bits(first / "adapter")


def test_what_cannot_be_replayed_says_so(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    for method, word in (("lora", "no projected gradients"), ("mezo", "no adapter to rebuild")):
        out = tmp_path / method
        assert (
            ondevice("train", *tiny(method), "--data", data, "--steps", 2, "--out", out).code == 0
        )
        done = ondevice("replay", out)
        assert done.code == 2 and word in done.err
    assert ondevice("replay", tmp_path / "nothing").code == 6


def test_a_fused_model_is_base_plus_adapter(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    assert (
        ondevice(
            "train", *tiny("prge", "--lr", "0.001"), "--data", data, "--steps", 5, "--out", out
        ).code
        == 0
    )
    done = ondevice("fuse", "tiny:llama", out / "adapter", "--out", tmp_path / "fused", "--json")
    assert done.code == 0, done.err
    report = done.json
    assert (
        report["ok"]
        and report["max_abs_difference_from_base"]
        > 1e-3
        > report["max_abs_difference_from_adapter"]
    )
    with_adapter = ondevice(
        "eval", "tiny:llama", "--data", data, "--adapter", out / "adapter", "--json"
    ).json
    fused = ondevice("eval", tmp_path / "fused", "--data", data, "--json").json
    assert fused["loss"] == pytest.approx(with_adapter["loss"], rel=1e-5)
    answer = ondevice(
        "chat", tmp_path / "fused", "--prompt", "hello", "--max-new-tokens", 4, "--json"
    )
    assert (
        answer.code == 0
        and answer.json["prompt"] == "hello"
        and isinstance(answer.json["answer"], str)
    )


def test_paths_with_spaces_and_letters_of_other_alphabets(ondevice, tmp_path) -> None:
    folder = tmp_path / "mes données [bold] ü 数据"
    folder.mkdir()
    data, out = classes(folder / "lignes [1].jsonl"), folder / "le résultat"
    done = ondevice("train", *tiny(), "--data", data, "--steps", 2, "--out", out)
    assert done.code == 0, done.err
    assert load_adapter(out / "adapter").rank == 8  # four directions for each
    done = ondevice("eval", "tiny:llama", "--data", data, "--adapter", out / "adapter", "--json")
    assert done.code == 0 and done.json["accuracy"] is not None
    done = ondevice("train", *tiny(), "--data", data, "--steps", 2, "--out", out, "--json")
    assert done.code == 6 and "le résultat" in done.err


def test_a_run_file_and_flags_that_win_over_it(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    path = tmp_path / "run file.yaml"
    path.write_text(
        f"model: {{source: 'tiny:qwen2'}}\ndata: {{path: '{data}'}}\nmethod: {{name: prge, rank: 2, queries: 3}}\n"
        f"train: {{steps: 50, batch_size: 1, out: '{tmp_path / 'run'}'}}\n"
    )
    done = ondevice("train", "--config", path, "--steps", 2, "--queries", 2, "--json")
    assert done.code == 0 and done.json["steps"] == 2, done.err
    start = read_log(tmp_path / "run" / "events.jsonl").start
    assert (
        start is not None
        and start.config["method"]["queries"] == 2
        and start.config["method"]["rank"] == 2
    )
    assert start.model_source == "tiny:qwen2" and json.dumps(start.config)


def test_rows_that_are_not_used_are_counted(ondevice, tmp_path) -> None:
    rows = [
        {"task": "sst2", "prompt_fields": {"sentence": "good"}, "label": label}
        for label in ("1", "0", "maybe")
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    options = (
        "--data",
        data,
        "--task",
        "sst2",
        "--max-length",
        64,
        "--steps",
        1,
        "--out",
        tmp_path / "run",
    )
    done = ondevice("train", *tiny(), *options, "--json")
    assert done.code == 0 and done.json["unused_rows"] == 1 and "1 row" in done.err


def test_question_answering_has_the_f1_of_generated_answers(ondevice, tmp_path) -> None:
    fields = {"title": "T", "context": "The sky is blue.", "question": "What is the sky?"}
    rows = [
        {"task": "squad", "prompt_fields": fields, "label": answer} for answer in ("blue", "red")
    ]
    data = write_rows(tmp_path / "rows.jsonl", [{**row, "label": [row["label"]]} for row in rows])
    done = ondevice(
        "eval", "tiny:llama", "--data", data, "--task", "squad", "--max-length", 128, "--json"
    )
    assert done.code == 0, done.err
    assert (
        0 <= done.json["f1"] <= 1
        and 0 <= done.json["exact_match"] <= 1
        and done.json["accuracy"] is None
    )
