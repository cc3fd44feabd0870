"""A run's folder is an adapter to `fuse`, `convert`, `replay` and `eval`; `eval` refuses in sentences."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ondevice.artifact.adapter import load_adapter
from ondevice.models import save_tiny
from tests.cli.command import classes, write_rows

COMMAND = (
    *("--method", "prge", "--set", "method.rank=2", "--queries", "2"),
    *("--batch-size", "2", "--steps", "2", "--json"),
)


@pytest.fixture
def run(ondevice, tmp_path: Path) -> Path:
    """A zeroth-order run of two steps, in a folder whose name has a space."""
    out = tmp_path / "my run"
    data = classes(tmp_path / "rows.jsonl")
    done = ondevice("train", "tiny:llama", "--data", data, "--out", out, *COMMAND)
    assert done.code == 0, done.err
    return out


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".gguf")
    }


def test_a_run_is_fused_and_converted_as_its_adapter_is(ondevice, run: Path, tmp_path: Path):
    for name, place in (("run", run), ("adapter", run / "adapter")):
        fused = ondevice("fuse", "tiny:llama", place, "--out", tmp_path / f"fused {name}", "--json")
        assert fused.code == 0 and fused.json["max_abs_difference_from_adapter"] < 1e-4, fused.err
        options = ["--to", "mlx", "--out", tmp_path / f"mlx {name}", "--json"]
        converted = ondevice("convert", place, *options)
        assert converted.code == 0, converted.err
    for kind in ("fused", "mlx"):
        written = digests(tmp_path / f"{kind} run")
        assert written and written == digests(tmp_path / f"{kind} adapter")


def test_a_run_or_its_adapter_alone_names_its_base_model(ondevice, run: Path, tmp_path: Path):
    """As a word or as --adapter."""
    files = []
    for name, words in (
        ("whole", ["tiny:llama", run]),
        ("word", [run]),
        ("flag", ["--adapter", run / "adapter"]),
    ):
        fused = ondevice("fuse", *words, "--out", tmp_path / name)
        assert fused.code == 0, fused.err
        files.append(digests(tmp_path / name))
    assert files[0] and files[0] == files[1] == files[2]
    rows = ["--data", tmp_path / "rows.jsonl", "--json"]
    wanted = ondevice("eval", run, *rows).json["loss"]
    assert ondevice("eval", "--adapter", run, *rows).json["loss"] == wanted
    asked = ["--prompt", "good", "--json"]
    answer = ondevice("chat", "tiny:llama", "--adapter", run, *asked).json["answer"]
    assert ondevice("chat", "--adapter", run, *asked).json["answer"] == answer


def test_a_run_is_replayed_to_the_bits_of_its_adapter(ondevice, run: Path, tmp_path: Path):
    done = ondevice("replay", run, "--out", tmp_path / "again", "--json")
    assert done.code == 0, done.err
    rebuilt = load_adapter(tmp_path / "again").tensors
    trained = load_adapter(run / "adapter").tensors
    assert rebuilt.keys() == trained.keys()
    assert all((rebuilt[name] == trained[name]).all() for name in trained)
    on_top = tmp_path / "second"
    more = ["--data", tmp_path / "rows.jsonl", "--out", on_top, "--adapter", run, *COMMAND]
    assert ondevice("train", "tiny:llama", *more).code == 0
    assert ondevice("replay", on_top, "--json").code != 0
    assert ondevice("replay", on_top, "--adapter", run, "--json").code == 0
    last = load_adapter(on_top / "adapter").tensors
    again = load_adapter(on_top / "adapter-replayed").tensors
    assert all((again[name] == last[name]).all() for name in last)


@pytest.mark.parametrize("verb", ["fuse", "convert", "eval", "replay"])
def test_a_folder_without_a_run_is_refused_and_nothing_is_written(
    ondevice, tmp_path: Path, verb: str
):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    words: dict[str, list[object]] = {
        "fuse": ["tiny:llama", tmp_path / "empty", "--out", out],
        "convert": [tmp_path / "empty", "--to", "mlx", "--out", out],
        "eval": [tmp_path / "empty", "--data", classes(tmp_path / "rows.jsonl")],
        "replay": [tmp_path / "empty", "--out", out],
    }
    done = ondevice(verb, *words[verb])
    assert done.code not in (0, 1) and "expected: " in done.err and "empty" in done.err
    assert "Traceback" not in done.err and not out.exists()


def test_eval_refuses_another_base_missing_columns_and_an_empty_file(
    ondevice, run: Path, tmp_path: Path
):
    other = save_tiny(tmp_path / "other", hidden=64, seed=5)
    rows = tmp_path / "rows.jsonl"
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text("")
    without = write_rows(tmp_path / "without.jsonl", [{"body": "a", "score": 3}])
    unlabelled = write_rows(tmp_path / "unlabelled.jsonl", [{"text": "a1"}, {"text": "b2"}])
    unseen = write_rows(tmp_path / "unseen.jsonl", [{"text": "a1", "label": "perhaps"}])
    cases = [
        ([other, "--adapter", run, "--data", rows], "trained on another model", "--model"),
        ([run, "--data", nothing], "nothing.jsonl", "row"),
        ([run, "--data", without], "without.jsonl", "--column"),
        ([run, "--data", unlabelled], "has no labels to compare with", "ondevice predict"),
        ([run, "--data", unseen], "labels that were not trained", "no, yes"),
        ([run, "--data", tmp_path / "none.csv"], "none.csv", "file"),
    ]
    for words, problem, way_out in cases:
        done = ondevice("eval", *words, "--predictions", tmp_path / "out.jsonl")
        assert done.code not in (0, 1), words
        assert problem in done.err and way_out in done.err, done.err
        assert done.err.startswith("error: ") and "Traceback" not in done.err
        assert not (tmp_path / "out.jsonl").exists()
