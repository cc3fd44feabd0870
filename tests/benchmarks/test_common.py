"""The benchmarks' common part: order of measurement, result files, command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from benchmarks import __main__ as runner
from benchmarks import committed, common, tables

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "benchmarks/results/schema.json").read_text())


def test_interleaved_takes_turns_and_reverses_every_other_round() -> None:
    order: list[str] = []
    seconds = common.interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3
    )
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    assert all(value >= 0 for values in seconds.values() for value in values)


def test_interleaved_refuses_no_repeats() -> None:
    with pytest.raises(ValueError) as refused:
        common.interleaved({}, repeats=0)
    assert "repeats" in str(refused.value)


def test_a_written_result_is_valid_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "here.json"
    for value in (1.0, 2.0):
        rows = [{"method": "ours", "step_s": [value, value]}]
        written = common.write_result(
            "a_name", rows, path, columns=[{"key": "step_s"}], title="Title"
        )
    assert written == path
    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["rows"][0]["step_s"] == [2.0, 2.0]
    assert document["title"] == "Title"
    assert list(path.parent.iterdir()) == [path]


def test_the_recorded_command_omits_output_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "x --json --note --out --repeats 3 --out=/y --record --programs build --data /d --log /l --budget-s 9"
    monkeypatch.setattr(sys, "argv", words.split())
    assert (
        common.result("room/name", [{"a": 1}])["command"]
        == "python -m benchmarks.room.name --repeats 3"
    )


def test_a_benchmark_ends_with_one_json_object(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(
        "from benchmarks import common\n"
        "args = common.parse_args('Tiny.', lambda p: p.add_argument('--steps', type=int, default=1))\n"
        "seconds = common.interleaved({'sum': lambda: sum(range(args.steps))}, args.repeats)\n"
        "common.finish('tiny', [{'name': 'sum', 's': seconds['sum']}], args)\n"
    )
    command = [
        sys.executable,
        str(script),
        "--json",
        "--repeats",
        "2",
        "--steps",
        "5",
        "--out",
        str(tmp_path / "r.json"),
    ]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    assert len(document["rows"][0]["s"]) == 2
    assert document["command"] == "python -m benchmarks.tiny --repeats 2 --steps 5"
    assert json.loads((tmp_path / "r.json").read_text()) == document
    assert "| name | s |" in done.stdout


def test_the_needs_of_a_benchmark_are_read_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text(
        "NEEDS = ('nothing_of_that_name',)\nraise RuntimeError\n"
    )
    (tmp_path / "room" / "two.py").write_text("import nowhere\nNEEDS = ()\n")
    (tmp_path / "room" / "shared.py").write_text("import nowhere\n")
    (tmp_path / "common.py").write_text("NEEDS = ()\n")
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    assert runner.benchmarks() == {"room/one": ("nothing_of_that_name",), "room/two": ()}
    assert runner.missing(("nothing_of_that_name", "json")) == ["nothing_of_that_name"]
    assert runner.main(["room/three"]) == 2
    assert runner.main(["room/one"]) == 0


def test_every_benchmark_is_found_in_its_room() -> None:
    """A script with a command line of `parse_args` is one that `make bench` lists."""
    scripts = {
        path
        for path in (ROOT / "benchmarks").glob("*/*.py")
        if " = parse_args(" in path.read_text()
    }
    assert {ROOT / "benchmarks" / f"{name}.py" for name in runner.benchmarks()} == scripts
    assert len(scripts) >= 25


def test_a_table_has_the_columns_that_some_row_fills() -> None:
    columns = [{"key": "name"}, {"key": "step_s"}, {"key": "error"}]
    rows = [{"name": "a", "step_s": [0.1], "error": None}, {"name": "b"}]
    assert common.result("room/name", rows, columns)["columns"] == columns[:2]
    assert common.result("room/name", [], columns)["columns"] == columns


def test_a_committed_result_keeps_every_table_but_not_every_row() -> None:
    columns = [{"key": "name"}, {"key": "step_s"}, {"key": "parts"}]
    rows = [
        {
            "name": "a",
            "step_s": [0.4, 0.1, 0.2, 0.3],
            "losses": [[1.0, 2.0]],
            "parts": {"b": 1},
            "twice": [0.1, 0.2],
        },
        {
            "name": "b",
            "step_s": [0.5, 0.1, 1 / 3, 0.2, 0.3],
            "seeds": [0, 1, 2, 3, 4],
            "diverged_at": [None, 7],
        },
    ]
    document = common.result("room/name", rows, columns)
    actual = committed.concise(document)
    assert tables.render(actual) == tables.render(document)
    assert actual["rows"][0] == {
        "name": "a", "step_s": [0.1, 0.25, 0.4], "parts": {"b": 1}, "twice": [0.1, 0.2], "repeats": 4,
    }  # fmt: skip
    assert actual["rows"][1] == rows[1] | {"step_s": [0.5, 0.1, 0.3333333333, 0.2, 0.3]}
    assert committed.concise(actual) == actual
