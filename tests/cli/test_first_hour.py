"""The first hour of a new user: files as they are, labels of their own, a callback, a tracker, another rate on resume.

The wheel's part of that hour is in `tests/test_packaging.py`, in an environment that has nothing else.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import ondevice as sdk
from ondevice.artifact.adapter import WEIGHTS_NAME
from ondevice.training.events import Resume, Step, read_log
from tests.cli.command import write_rows

ROWS = [
    {"text": f"{'good' if n % 2 else 'bad'} day {n}", "label": "up" if n % 2 else "down"}
    for n in range(12)
]
TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]


def table(path: Path, separator: str) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label"], delimiter=separator)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def excel(path: Path) -> Path:
    book = pytest.importorskip("openpyxl").Workbook()
    for row in (["text", "label"], *([row["text"], row["label"]] for row in ROWS)):
        book.active.append(row)
    book.save(path)
    return path


def parquet(path: Path) -> Path:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def texts(path: Path) -> Path:
    path.mkdir()
    for number in range(3):
        (path / f"{number}.txt").write_text(f"A text of my own, number {number}.\n")
    return path


def saved(path: Path) -> Path:
    """A folder as `datasets` saves one."""
    pytest.importorskip("pyarrow")
    import pyarrow

    path.mkdir()
    whole = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as sink:
        with pyarrow.ipc.new_stream(sink, whole.schema) as writer:
            writer.write_table(whole)
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (path / "dataset_info.json").write_text("{}")
    return path


def lines(*rows: dict[str, Any]) -> Callable[[Path], Path]:
    return lambda path: write_rows(path, list(rows))


FILES: dict[str, tuple[Callable[[Path], Path], str, int]] = {
    "table.csv": (lambda path: table(path, ","), "classification", 12),
    "table.tsv": (lambda path: table(path, "\t"), "classification", 12),
    "excel-saved-this.csv": (lambda path: table(path, ";"), "classification", 12),
    "book.xlsx": (excel, "classification", 12),
    "array.json": (lambda path: path.write_text(json.dumps(ROWS)) and path, "classification", 12),
    "lines.jsonl": (lines(*ROWS), "classification", 12),
    "rows.parquet": (parquet, "classification", 12),
    "texts": (texts, "text", 3),
    "saved": (saved, "classification", 12),
    "sharegpt.json": (
        lines({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]}), "chat", 1
    ),
    "chatml.jsonl": (lines({"messages": TURNS}), "chat", 1),
    "alpaca.json": (
        lambda path: path.write_text(json.dumps([{"instruction": "Add.", "input": "1 1", "output": "2"}])) and path,
        "instruct", 1,
    ),
    "completion.jsonl": (lines({"prompt": "1 + 1 =", "completion": " 2"}), "completion", 1),
    "preferences.jsonl": (lines({"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}), "preference", 1),
    "thumbs.jsonl": (lines({"prompt": "Hi?", "completion": "Yes.", "label": True}), "thumbs", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_as_people_have_it_is_shown(name, ondevice, tmp_path) -> None:
    write, format_, rows = FILES[name]
    done = ondevice("data", write(tmp_path / name), "--model", "tiny:llama", "--json")
    assert done.code == 0, done.err
    assert (done.json["format"], done.json["rows"], done.json["problems"]) == (format_, rows, [])


CHOICES = {"text": ["one", "two"], "label": ["A", "B"]}
TEMPLATES = {
    "cb": (
        {"prompt": "{premise}\nQuestion: {hypothesis} True, False or Neither?\n", "metric": "macro_f1",
         "candidates": {"entailment": "True", "contradiction": "False", "neutral": "Neither"}},
        [{"premise": f"It rains, {n}.", "hypothesis": "It is wet.", "label": label}
         for n, label in enumerate(["entailment", "contradiction", "neutral"] * 2)],
    ),
    "arc": (
        {"prompt": "Question: {question}\nAnswer:", "label": "answerKey", "candidates": "{choices.text}",
         "labels": "choices.label"},
        [{"question": f"Which is {n}?", "choices": CHOICES, "answerKey": "AB"[n % 2]} for n in range(6)],
    ),
    "tickets": (
        {"prompt": "{body}\nTeam:", "label": "team", "candidates": {"billing": "money", "network": "cable"}},
        [{"body": f"Ticket {n}", "team": ["billing", "network"][n % 2]} for n in range(6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_data_set_with_labels_of_its_own_trains_and_evaluates(name, ondevice, tmp_path) -> None:
    template, rows = TEMPLATES[name]
    (tmp_path / f"{name}.yaml").write_text(json.dumps(template))  # JSON is YAML
    data = write_rows(tmp_path / "rows.jsonl", rows)
    common = ("tiny:llama", "--data", data, "--task", tmp_path / f"{name}.yaml", "--json")
    trained = ondevice("train", *common, "--steps", 2, "--batch-size", 2, "--out", tmp_path / "run")
    assert trained.code == 0, trained.err
    evaluated = ondevice("eval", *common, "--adapter", trained.json["adapter"])
    assert evaluated.code == 0 and evaluated.json["rows"] == 6, evaluated.err
    assert evaluated.json["metric"] in (None, template.get("metric"))


class Watch(sdk.Callback):
    """Counts what it is told, and stops after the fourth step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step(self, event: Any) -> None:
        self.seen.append("step")
        if event.step == 3:
            self.stop("enough")

    def on_checkpoint(self, event: Any) -> None:
        self.seen.append("checkpoint")


def test_a_callback_a_tracker_and_a_resume_with_another_rate(ondevice, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    data, out, watch = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "my run", Watch()
    settings = {"model.source": "tiny:llama", "train.steps": 9, "train.batch_size": 2, "train.out": str(out),
                "train.report_to": ["tensorboard"], "data.path": str(data)}  # fmt: skip
    stopped = sdk.train(settings, callbacks=[watch])
    assert stopped.result.interrupted and watch.seen == ["step"] * 4 + ["checkpoint"]
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    resumed = ondevice("train", "tiny:llama", "--data", data, "--batch-size", 2, "--out", out, "--steps", 6,
                       "--lr", "1e-4", "--resume", "--json")  # fmt: skip
    assert resumed.code == 0 and resumed.json["steps"] == 6, resumed.err
    log = [entry.event for entry in read_log(out / "events.jsonl").entries]
    (event,) = [event for event in log if isinstance(event, Resume)]
    assert event.changed["method.learning_rate"] == [3e-4, 1e-4]
    assert ondevice("runs", "show", out, "--json").json["config"]["method.learning_rate"] == 1e-4


def test_rows_packed_and_rows_streamed(ondevice, tmp_path) -> None:
    rows = [
        {"prompt": f"Say {n} " + "and on " * (n % 5), "completion": f" {n}" if n != 9 else ""}
        for n in range(22)
    ]
    path = write_rows(tmp_path / "my rows.jsonl", rows)

    def losses(out: str, *flags: str) -> list[float]:
        where = ["--out", tmp_path / out, "--json"]
        done = ondevice(
            "train",
            "tiny:llama",
            "--data",
            path,
            "--max-length",
            "48",
            "--steps",
            "6",
            *flags,
            *where,
        )
        assert done.code == 0, done.err
        assert done.json["data"]["train"]["sequences"] == 21 and done.json["unused_rows"] == 1
        return [event.loss for event in log(tmp_path / out) if isinstance(event, Step)]

    def log(folder: Path) -> list[Any]:
        return [entry.event for entry in read_log(folder / "events.jsonl").entries]

    plain, packed = losses("plain"), losses("packed", "--packing")
    assert packed == pytest.approx(plain, rel=1e-5) and packed != plain
    places = [
        sum(e.tokens for e in log(tmp_path / out) if isinstance(e, Step))
        for out in ("plain", "packed")
    ]
    assert places[1] < 0.9 * places[0]  # less padding

    window = ["--streaming", "--set", "data.shuffle_records=5"]
    whole = losses("streamed", *window)
    assert set(whole) != set(plain)
    first = ondevice("train", "tiny:llama", "--data", path, "--max-length", "48", "--steps", "4", *window,
                     "--out", tmp_path / "resumed")  # fmt: skip
    assert first.code == 0 and "streamed: 4 windows of 5 records, so far" in first.err
    assert losses("resumed", *window, "--resume") == whole  # the same rows, and the same bits
    one, other = (
        load_file(tmp_path / out / "adapter" / WEIGHTS_NAME) for out in ("streamed", "resumed")
    )
    assert all((one[name] == other[name]).all() for name in one) and set(one) == set(other)
    for flags, why in (
        (["--validation-split", "0.2"], "a streamed file is not split"),
        (["--epochs", "1"], "how many steps an epoch has is known at its end"),
    ):
        done = ondevice(
            "train", "tiny:llama", "--data", path, *window, *flags, "--out", tmp_path / "no"
        )
        assert done.code == 2 and why in done.err
    done = ondevice(
        "train",
        "tiny:llama",
        "--data",
        path,
        "--packing",
        "--method",
        "revffn",
        "--out",
        tmp_path / "no",
    )
    assert done.code == 2 and "method revffn does not pack rows here" in done.err
