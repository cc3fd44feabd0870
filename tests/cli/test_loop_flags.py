"""Flags of the loop and of the adapter: what they set, what a resume may change, and what a misspelt one finds."""

from __future__ import annotations

import pytest

from ondevice.training.events import Resume, Step, read_log
from tests.cli.command import classes


def test_a_run_of_epochs_that_goes_on_with_another_rate(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    common = [
        "train",
        "tiny:llama",
        "--data",
        data,
        "--method",
        "lora",
        "--validation-split",
        "0.25",
        "--out",
        out,
    ]
    shape = ["--rank", "2", "--alpha", "4", "--target-modules", "q_proj,o_proj", "--batch-size", "3",
             "--micro-batch-size", "1", "--max-grad-norm", "0.5"]  # fmt: skip
    first = ondevice(
        *common, *shape, "--epochs", "2", "--schedule", "linear", "--restore-best", "--json"
    )
    assert first.code == 0, first.err
    assert first.json["steps"] == 6 and first.json["evaluation"] is not None
    done = ondevice(*common, *shape, "--steps", "7", "--lr", "1e-3", "--resume")
    assert done.code == 0, done.err
    assert "resumed at step 6 of 7 (method.learning_rate 0.0003 -> 0.001" in done.err
    log = [entry.event for entry in read_log(out / "events.jsonl").entries]
    (resume,) = [event for event in log if isinstance(event, Resume)]
    assert resume.changed["train.schedule"] == ["linear", "constant"] and resume.changed[
        "train.steps"
    ] == [6, 7]
    assert [event.learning_rate for event in log if isinstance(event, Step)][-1] == 1e-3
    config = read_log(out / "events.jsonl").start.config["method"]
    assert config["target_modules"] == ["q_proj", "o_proj"] and config["max_grad_norm"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-rank", "4"], "did you mean --rank?"),
        (["--num-train-epochs", "4"], "did you mean --epochs?"),
        (["--set", "train.num_epochs=3"], "did you mean 'epochs'?"),
        (["--set", "method.epochs=3"], "it is a key of train"),
        (["--epochs", "2", "--steps", "9"], "--steps and --epochs both say"),
        (["--patience", "2"], "there are no rows to evaluate"),
        (["--patience", "2", "--validation-split", "0.5"], "train.patience counts evaluations"),
        (["--report-to", "abacus"], "'tensorboard', 'wandb', 'mlflow' or 'trackio'"),
        (["--model", "tiny:qwen2"], "the model is given twice"),
    ],
)
def test_a_mistake_in_the_flags_is_told_what_was_meant(
    arguments, words, ondevice, tmp_path
) -> None:
    data = classes(tmp_path / "rows.jsonl")
    done = ondevice("train", "tiny:llama", "--data", data, "--out", tmp_path / "run", *arguments)
    assert done.code == 2 and words in done.err and not (tmp_path / "run" / "events.jsonl").exists()
