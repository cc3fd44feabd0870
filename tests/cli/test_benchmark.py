"""`eval --task mmlu|gsm8k|mt_bench` through the command line, on every kind of model."""

from __future__ import annotations

import json
import signal
import time

import pytest

from ondevice.models.tiny import save_tiny
from tests.cli.command import classes, tiny, write_rows
from tests.cli.test_interrupt import start
from tests.warm import Warm


@pytest.fixture
def folder(tmp_path):
    """The three benchmarks, as folders of a few short rows."""
    choices = [
        {"subject": "xy"[i % 2], "question": f"{i}?", "choices": list("abcd"), "answer": i % 4}
        for i in range(6)
    ]
    sums = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(6)]
    talks = [
        {"question_id": 80 + i, "category": "math", "turns": ["Hi.", "And?"]} for i in range(2)
    ]
    for name, rows in {"mmlu": choices, "gsm8k": sums, "mt_bench": talks}.items():
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "test.jsonl", rows)
        write_rows(tmp_path / name / "dev.jsonl", rows)
    return tmp_path


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_and_a_model_with_an_adapter(folder, ondevice) -> None:
    data, model = classes(folder / "rows.jsonl"), save_tiny(folder / "model", max_positions=1024)
    trained = ondevice("train", *tiny("lora", "--lr", "0.1", model=str(model)), "--data", data, "--steps", 5,
                       "--out", folder / "run", "--json").json  # fmt: skip
    scores = {}
    for name, more in {"base": [], "adapter": ["--adapter", trained["adapter"]]}.items():
        out = folder / f"mmlu-{name}"
        asked = ("--task", "mmlu", "--data", folder / "mmlu", "--shots", 1)
        done = ondevice("eval", model, *asked, "--out", out, "--json", *more)
        assert done.code == 0, done.err
        actual, rows = done.json, lines(out / "answers.jsonl")
        assert actual == json.loads((out / "figures.json").read_text())
        assert actual["rows"] == 6 and actual["correct"] == sum(row["correct"] for row in rows)
        assert (
            actual["accuracy_interval"][0] <= actual["accuracy"] <= actual["accuracy_interval"][1]
        )
        assert {key: one["rows"] for key, one in actual["groups"].items()} == {"x": 3, "y": 3}
        scores[name] = [row["scores"] for row in rows]
    assert scores["base"] != scores["adapter"]
    shown = ondevice("eval", model, "--task", "gsm8k", "--data", folder / "gsm8k", "--limit", 2, "--max-new-tokens", 3,
                     "--out", folder / "g")  # fmt: skip
    assert shown.code == 0 and "95%) of 2" in shown.out and "row 2/2  0:00 left" in shown.err
    again = ondevice(
        "eval", model, "--task", "gsm8k", "--data", folder / "gsm8k", "--out", folder / "g"
    )
    assert again.code == 2 and "--overwrite" in again.err
    chat = ondevice("eval", model, "--task", "mt_bench", "--data", folder / "mt_bench", "--max-new-tokens", 3, "--out",
                    folder / "t", "--rows", 1)  # fmt: skip
    assert chat.code == 0 and "not judged" in chat.err and "accuracy" not in chat.out
    (row,) = lines(folder / "t" / "answers.jsonl")
    assert (
        row["question_id"] == 80
        and len(row["choices"][0]["turns"]) == 2
        and row["model_id"] == "model"
    )


def test_a_network_that_revffn_trained(folder, ondevice) -> None:
    """Also that the next token is the one of which `evaluate` says that it is the likeliest."""
    import numpy as np
    import torch

    from ondevice.methods.revffn.torch import continue_reversible, open_reversible

    data = classes(folder / "rows.jsonl")
    run = ondevice("train", *tiny("revffn", "--lr", "0.001", model="tiny:qwen2_moe"), "--data", data, "--steps", 2,
                   "--out", folder / "run", "--json").json  # fmt: skip
    for task, rows in {"mmlu": 6, "gsm8k": 6, "mt_bench": 2}.items():
        done = ondevice("eval", run["model"], "--task", task, "--data", folder / task, "--max-new-tokens", 2, "--out",
                        folder / f"out-{task}", "--json")  # fmt: skip
        assert done.code == 0 and done.json["rows"] == rows, done.err
    session = open_reversible(folder / "run" / "model")
    ids = list(b"It was")
    tokens = session.loaded.model.config.vocab_size
    each = np.array([[*ids, token] for token in range(tokens)])
    labels = np.where(np.arange(len(ids) + 1) == len(ids), each, -100)
    nll, _ = session.evaluate(each, labels)
    following = session.passes.next_token(torch.tensor([ids]))
    assert following == int(nll.argmin())
    assert continue_reversible(session, ids, 1) == session.loaded.tokenizer.decode(
        [following], skip_special_tokens=True
    )


def test_mistakes_say_what_to_do(folder, ondevice) -> None:
    def said(*options: object, code: int) -> str:
        done = ondevice("eval", "tiny:llama", *options)
        assert done.code == code and "Traceback" not in done.err, done.err
        return done.err

    assert "no such file or folder" in said("--task", "mmlu", "--data", folder / "none", code=3)
    rows = write_rows(folder / "bad.jsonl", [{"question": "q", "answer": "none"}])
    assert "bad.jsonl:1: 'answer'" in said("--task", "gsm8k", "--data", rows, code=3)
    assert "--shots is only for a benchmark" in said(
        "--task", "sst2", "--data", rows, "--shots", 1, code=2
    )
    assert "without examples" in said(
        "--task", "mt-bench", "--data", folder / "mt_bench", "--shots", 1, code=2
    )
    bare = save_tiny(folder / "bare")
    (bare / "chat_template.jinja").unlink()
    done = ondevice(
        "eval", bare, "--task", "mt_bench", "--data", folder / "mt_bench", "--out", folder / "b"
    )
    assert done.code == 4 and "no chat template" in done.err
    assert not (folder / "b").exists()


def test_the_accuracy_of_other_rows_has_its_interval(folder, ondevice) -> None:
    data = classes(folder / "rows.jsonl")
    actual = ondevice("eval", "tiny:llama", "--data", data, "--json").json
    assert actual["correct"] == round(actual["accuracy"] * 12)
    assert actual["accuracy_interval"][0] <= actual["accuracy"] <= actual["accuracy_interval"][1]
    assert "95%) of 12" in ondevice("eval", "tiny:llama", "--data", data).out


def test_ctrl_c_keeps_the_answers(folder, warm: Warm) -> None:
    data = write_rows(
        folder / "many.jsonl", [{"question": f"{i}?", "answer": f"{i}"} for i in range(50_000)]
    )
    out = folder / "out"
    process = start("eval", "tiny:llama", "--task", "gsm8k", "--data", data, "--max-new-tokens", 4, "--out", out,
                    "--json", cwd=folder, python=warm.python)  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if (out / "answers.jsonl").is_file() and (out / "answers.jsonl").read_text().count(
                "\n"
            ) >= 3:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    loaded = json.loads(printed.splitlines()[-1])
    assert loaded["interrupted"] is True and 3 <= loaded["rows"] < 50_000
    assert (
        len(lines(out / "answers.jsonl")) == loaded["rows"]
        and f"stopped after {loaded['rows']} rows" in errors
    )
