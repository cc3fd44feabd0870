"""Training from Python: rows, models and callbacks that the program holds, and what is said of wrong types."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import ondevice
from ondevice.core.errors import CheckpointError, ConfigError, DataError, ModelError
from ondevice.training.events import Evaluate, Start, Step, read_log
from tests.cli.command import classes

ROWS = [{"text": f"{'ab'[i % 2]}{i}", "label": ["no", "yes"][i % 2]} for i in range(12)]


@pytest.fixture
def settings(tmp_path) -> dict[str, object]:
    """A short run of the tiny model with LoRA, one row after the other of two."""
    return {
        "model.source": "tiny:llama",
        "method.name": "lora",
        "method.rank": 2,
        "train.steps": 2,
        "train.batch_size": 2,
        "train.out": str(tmp_path / "run"),
    }


def losses(out: object) -> list[float]:
    return [entry.event.loss for entry in read_log(Path(str(out)) / "events.jsonl").entries
            if isinstance(entry.event, Step)]  # fmt: skip


def test_rows_of_python_train_like_those_of_a_file(settings, tmp_path) -> None:
    ondevice.train(settings, rows=(row for row in ROWS), eval_rows=ROWS[:4])
    seen = read_log(tmp_path / "run" / "events.jsonl")
    assert any(isinstance(entry.event, Evaluate) for entry in seen.entries)
    file = classes(tmp_path / "rows.jsonl")
    from_file = ondevice.train(
        settings | {"data.path": str(file), "train.out": str(tmp_path / "file")}
    )
    assert losses(settings["train.out"]) == losses(tmp_path / "file") and from_file.adapter.is_dir()
    with pytest.raises(CheckpointError) as caught:
        ondevice.train(settings | {"train.steps": 3}, rows=ROWS[1:], resume=True)
    assert caught.value.expected.startswith("data.sha256 = ")


def test_a_data_loader_gives_its_rows_and_its_batch_size(settings, tmp_path) -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(ROWS, batch_size=3)
    del settings["train.batch_size"]
    ondevice.train(settings, rows=loader)
    start = read_log(tmp_path / "run" / "events.jsonl").start
    assert isinstance(start, Start) and start.config["train"]["batch_size"] == 3
    assert (
        start.data["train"]["sequences"] == 12 and "DataLoader" in start.data["train"]["notes"][0]
    )


def test_rows_that_are_token_ids_are_taken_as_they_are(settings) -> None:
    masked = [
        {
            "input_ids": [5, 6, 7, 8, 0],
            "attention_mask": [1, 1, 1, 1, 0],
            "labels": [-100, -100, 7, 8, 0],
        }
    ] * 4
    plain = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}] * 4
    ondevice.train(settings, rows=masked)
    first = losses(settings["train.out"])
    ondevice.train(settings, rows=plain, overwrite=True)
    assert losses(settings["train.out"]) == first
    with pytest.raises(DataError):
        ondevice.train(settings, rows=[{"input_ids": "five six"}], overwrite=True)


def test_a_data_set_of_hugging_face_is_rows(settings) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    ondevice.train(settings, rows=rows)
    with pytest.raises(DataError) as caught:
        ondevice.train(settings, rows=datasets.DatasetDict({"train": rows}), overwrite=True)
    assert "pass one of its splits: train" in str(caught.value)


def test_a_model_that_is_loaded_is_trained_itself(settings) -> None:
    loaded = ondevice.load_model("tiny:llama")
    fresh = ondevice.load_model("tiny:llama")
    del settings["model.source"]
    settings["method.name"] = "full"
    del settings["method.rank"]
    before = fresh.model.get_input_embeddings().weight.detach().clone()
    result = ondevice.train(
        settings | {"method.learning_rate": 0.1},
        rows=ROWS,
        model=fresh.model,
        tokenizer=fresh.tokenizer,
    )
    assert not (fresh.model.get_input_embeddings().weight == before).all() and result.model.is_dir()
    source = {
        "model.source": "tiny:llama",
        "method.learning_rate": 0.1,
        "train.out": f"{settings['train.out']}-2",
    }
    ondevice.train(settings | source, rows=ROWS)
    assert losses(source["train.out"]) == losses(settings["train.out"])
    with pytest.raises(ConfigError) as caught:
        ondevice.train(settings, rows=ROWS, model=loaded.model)
    assert "tokenizer" in caught.value.message


class Fails(ondevice.Callback):
    """Raises in its second step."""

    def on_step(self, event) -> None:
        if event.step == 1:
            raise RuntimeError("my own mistake")


def test_what_a_callback_raises_comes_out_and_the_adapter_is_saved(settings, tmp_path) -> None:
    with pytest.raises(RuntimeError, match="my own mistake") as caught:
        ondevice.train(settings | {"train.steps": 9}, rows=ROWS, callbacks=[Fails()])
    assert "ended after step 2" in caught.value.__notes__[0]
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
    assert ondevice.train(settings | {"train.steps": 3}, rows=ROWS, resume=True).result.steps == 3


def test_epochs_and_the_best_state(settings, tmp_path) -> None:
    epochs = {"train.epochs": 1.5, "train.restore_best": True, "method.learning_rate": 5.0}
    trained = ondevice.train(settings | epochs, rows=ROWS, eval_rows=ROWS)
    log = [entry.event for entry in read_log(tmp_path / "run" / "events.jsonl").entries]
    seen = [event for event in log if isinstance(event, Evaluate)]
    assert trained.result.steps == 9 and [event.step for event in seen] == [6, 9]
    best = next(event for event in reversed(seen) if event.best)
    again = ondevice.evaluate(
        "tiny:llama", classes(tmp_path / "rows.jsonl"), adapter=trained.adapter
    )
    assert (
        trained.result.evaluation.loss
        == pytest.approx(best.loss)
        == pytest.approx(again.loss, rel=1e-4)
    )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda s: ondevice.train(3), ConfigError, "the run is of the wrong type"),
        (lambda s: ondevice.train(s, rows=3), DataError, "rows of the wrong type"),
        (lambda s: ondevice.train(s, rows=[1, 2]), DataError, "row 1 is of the wrong type"),
        (lambda s: ondevice.train(s, rows=[]), DataError, "there are no rows"),
        (lambda s: ondevice.train(s), ConfigError, "no data is given"),
        (lambda s: ondevice.train(s, rows=ROWS, model=3), ConfigError, "not a model"),
        (lambda s: ondevice.train(s | {"train.patience": 2}, rows=ROWS), ConfigError, "no rows to evaluate"),
        (lambda s: ondevice.train(s | {"train.patience": 2}, rows=ROWS, eval_rows=ROWS), ConfigError, "eval_every"),
        (lambda s: ondevice.open_session(nn.Linear(2, 2), object(), 0), ConfigError, "wrap_model"),
        (lambda s: ondevice.open_session(None, {}, 0), ConfigError, "received: dict"),
        (lambda s: ondevice.RunConfig(model={"source": "tiny:llama"}, train={"stepz": 3}), ConfigError, "'steps'"),
        (lambda s: ondevice.load_model(3), ModelError, "received: int"),
        (lambda s: ondevice.plan(3, ondevice.method_config("mesp"), batch_size=1, length_tokens=8), ConfigError, "int"),
        (lambda s: ondevice.plan("tiny:llama", "mesp", batch_size=1, length_tokens=8), ConfigError, "(NAME)"),
        (lambda s: ondevice.train(s, rows=ROWS, callbacks=ondevice.Callback()), ConfigError, "callbacks are"),
        (lambda s: ondevice.train(s, rows=ROWS, callbacks=[print]), ConfigError, "a callback is of the wrong type"),
        (lambda s: ondevice.train(s, rows=ROWS, sinks=[3]), ConfigError, "a function of an event"),
        (lambda s: ondevice.train(s, rows=ROWS, adapter=3), ConfigError, "the adapter's folder is of the wrong type"),
        (lambda s: ondevice.evaluate("tiny:llama", 3), DataError, "rows of the wrong type"),
        (lambda s: ondevice.evaluate(3, "rows.jsonl"), ConfigError, "not a model"),
        (lambda s: ondevice.load_adapter(3), ConfigError, "the adapter's folder is of the wrong type"),
        (lambda s: ondevice.fuse("tiny:llama", 3, "x"), ConfigError, "of the wrong type"),
        (lambda s: ondevice.open_artifact(3), ConfigError, "the artifact is of the wrong type"),
        (lambda s: ondevice.read_dataset(3, None, task=None, max_length_tokens=8), ConfigError, "the data is of the"),
    ],
)  # fmt: skip
def test_wrong_types_are_errors_of_ours(settings, call, error, words) -> None:
    with pytest.raises(error) as caught:
        call(settings)
    assert words in str(caught.value)
