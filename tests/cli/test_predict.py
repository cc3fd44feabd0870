"""`ondevice predict`: files in and out, what is refused, and a second call after the first was ended."""

from __future__ import annotations

import csv
import json
import signal
import time
from pathlib import Path

import pytest

from ondevice.api import predict_file as module
from ondevice.api.predict import Predictor
from tests.cli.command import write_rows
from tests.cli.test_interrupt import start

ROWS = [{"text": f"{'ab'[i % 2]} näher; {i}", "label": ["No", "Yes"][i % 2]} for i in range(20)]
TEXTS = ["; a, 1", '"b" 2', "=1+1", "", "雪 4"]


@pytest.fixture
def run(ondevice, tmp_path: Path) -> Path:
    """A run on rows with two labels, in a folder whose name has a space."""
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    out = tmp_path / "my run"
    options = ["--method", "lora", "--steps", "2", "--batch-size", "2"]
    done = ondevice("train", "tiny:llama", "--data", data, "--out", out, *options, "--json")
    assert done.code == 0, done.err
    return out


def table(path: Path, separator: str = ",") -> Path:
    """A table with the texts, and a number."""
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["id", "text"])
        writer.writerows(enumerate(TEXTS, 1))
    return path


def excel(path: Path) -> list[dict]:
    import openpyxl

    names, *rows = openpyxl.load_workbook(path).active.iter_rows(values_only=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_csv_json_lines_and_excel_say_the_same(ondevice, run: Path, tmp_path: Path) -> None:
    data = table(tmp_path / "texts.csv", ";")
    for name in ("out.csv", "out.jsonl", "out.xlsx"):
        done = ondevice("predict", run, data, "--out", tmp_path / name, "--json")
        assert done.code == 0, done.err
    summary = done.json
    assert (summary["rows"], summary["predicted"]) == (5, 4)
    assert summary["not_predicted"] == [{"row": 4, "reason": "is empty"}]
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["text"] for row in rows] == TEXTS
    assert list(rows[0]) == [
        *("id", "text", "prediction", "probability", "probability:No", "probability:Yes", "reason")
    ]
    for row in rows[:3]:
        named = {name: row[f"probability:{name}"] for name in ("No", "Yes")}
        assert row["prediction"] == max(named, key=named.__getitem__)
        assert row["probability"] == max(named.values())
    with (tmp_path / "out.csv").open(encoding="utf-8-sig", newline="") as file:
        cells = list(csv.DictReader(file, delimiter=";"))
    shown = [{name: "" if row[name] is None else str(row[name]) for name in row} for row in rows]
    assert cells == shown
    sheet = excel(tmp_path / "out.xlsx")
    assert [row["prediction"] for row in sheet] == [row["prediction"] for row in rows]
    assert sheet[2]["text"] == "=1+1" and sheet[0]["probability"] == rows[0]["probability"]
    again = ondevice("predict", run, tmp_path / "out.xlsx", "--out", tmp_path / "b.csv", "--json")
    assert again.code == 3 and "a column 'prediction'" in again.json["message"]


def test_nothing_is_written_for_a_file_that_cannot_be_predicted(
    ondevice, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "p.csv"
    other = write_rows(tmp_path / "other.jsonl", [{"Body": "a"}])
    empty = tmp_path / "empty.csv"
    empty.write_text("text\n")
    blank = tmp_path / "blank.csv"
    blank.write_text("")
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    for data in (other, empty, blank, pairs, tmp_path / "missing.csv"):
        done = ondevice("predict", run, data, "--out", out)
        assert done.code == 3, (data, done.err)
    assert "--column text=NAME" in ondevice("predict", run, other, "--out", out).err
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert "does not record" in ondevice("predict", "tiny:llama", data, "--out", out).err
    assert "cannot write" in ondevice("predict", run, data, "--out", tmp_path / "a.docx").err
    assert "the input" in ondevice("predict", run, data, "--out", data).err
    assert not out.parent.exists()
    taken = ondevice("predict", run, data, "--out", empty)
    assert taken.code == 11 and empty.read_text() == "text\n"


def test_rows_that_are_done_are_not_computed_again(
    ondevice, run: Path, tmp_path: Path, monkeypatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    whole, out = tmp_path / "whole.csv", tmp_path / "out.csv"
    assert ondevice("predict", run, data, "--out", whole).code == 0
    real, asked = Predictor._choose, []

    def interrupted(self, rows, item, scores):
        asked.append(item.line)
        if len(asked) == 8:
            raise KeyboardInterrupt
        return real(self, rows, item, scores)

    monkeypatch.setattr(Predictor, "_choose", interrupted)
    done = ondevice("predict", run, data, "--out", out)
    assert done.code == 130 and "stopped after 7 of 20 rows" in done.err and not out.exists()
    partial = tmp_path / f"out.csv{module.PARTIAL}"
    with partial.open("a") as file:
        file.write('{"line": 8, "pred')  # a kill in the middle of a line
    other = ondevice("predict", run, data, "--out", out, "--max-new-tokens", "3")
    assert other.code == 11 and "--overwrite" in other.err
    saved = partial.read_text()
    partial.write_text(saved.replace("{", "[", 2).replace("[", "{", 1))
    damaged = ondevice("predict", run, data, "--out", out)
    assert damaged.code == 11 and "is damaged" in damaged.err
    partial.write_text(saved)
    summary = ondevice("predict", run, data, "--out", out, "--json").json
    assert summary["resumed"] == 7 and summary["rows"] == 20 and asked[8:] == list(range(8, 21))
    assert out.read_bytes() == whole.read_bytes() and not partial.exists()


def test_ctrl_c_keeps_rows_of_a_process(ondevice, run: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "many.jsonl", ROWS * 100)
    out = tmp_path / "out.csv"
    partial = tmp_path / f"out.csv{module.PARTIAL}"
    process = start("predict", run, data, "--out", out, "--json", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if partial.is_file() and partial.read_text().count("\n") > 20:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(printed)["interrupted"] and not out.exists()
    summary = ondevice("predict", run, data, "--out", out, "--json").json
    assert summary["resumed"] > 20 and summary["compared"] == 2000


def test_labels_that_were_not_trained_are_counted(ondevice, run: Path, tmp_path: Path) -> None:
    rows = [
        {"text": "a näher; 1", "label": label} for label in ("new", "new", "other", "No", "yes")
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    done = ondevice("predict", run, data, "--out", tmp_path / "out.csv", "--json")
    assert done.json["unseen_labels"] == {"new": 2, "other": 1}, done.json
    said = ondevice("predict", run, data, "--out", tmp_path / "again.csv")
    assert "warning: 3 rows have labels that were not trained ('new' 2, 'other' 1)" in said.err


def test_rows_that_are_too_long_are_predicted_and_counted(
    ondevice, run: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "long.jsonl", [{"text": "a näher; 1"}, {"text": "word " * 90}])
    done = ondevice("predict", run, data, "--out", tmp_path / "out.csv", "--json")
    assert done.code == 0, done.err
    assert (done.json["predicted"], done.json["shortened"]) == (2, 1)
    said = ondevice("predict", run, data, "--out", tmp_path / "again.csv")
    assert "warning: 1 row is longer than was trained or exported" in said.err
