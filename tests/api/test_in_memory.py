"""A model in memory is trained itself, and `evaluate`, `predict` and `plan` take what `train` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ondevice
from ondevice.core.errors import ArtifactError, ConfigError, DataError
from ondevice.core.registry import method_names
from ondevice.nn.adapters import has_adapter
from ondevice.training.events import Step

ROWS = [{"text": f"{'ab'[i % 2]}{i}", "label": ["no", "yes"][i % 2]} for i in range(12)]
UNLABELLED = [{"text": row["text"]} for row in ROWS]
FAST: dict[str, Any] = {"method": "lora", "rank": 2, "batch_size": 2, "steps": 2}
STRONG: dict[str, Any] = {"steps": 3, "batch_size": 2, "learning_rate": 0.05}
REVERSIBLE = "revffn"
"""Trains another architecture: its model in memory has the ordinary form's weights."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def same(value: Any) -> Any:
    """Return what equals a value: on a GPU the model's source is computed there, and it is not."""
    return pytest.approx(value, rel=1e-3 if torch.cuda.is_available() else 1e-9)


def loss_of(model: Any, **options: Any) -> float:
    return ondevice.evaluate(model, ROWS, **options).loss


@pytest.mark.parametrize("method", method_names())
def test_a_model_in_memory_computes_with_what_was_trained(method: str) -> None:
    loaded = ondevice.load_model("tiny:llama")
    before = loss_of(loaded)
    run = ondevice.train(loaded, ROWS, method=method, **STRONG)
    trained = run.model
    options: dict[str, Any] = {}
    if run.adapter is not None:
        trained, options = Path("tiny:llama"), {"adapter": run}
    elif method == REVERSIBLE:
        trained = run.out / "model-ordinary"
    after = loss_of(loaded)
    assert abs(after - before) > 1e-3
    assert after == same(loss_of(trained, **options))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt2", {"method": "prge"}),
        ("gpt2", {"method": "lora"}),
        ("qwen3_moe", {"method": "lora"}),
        ("qwen3_moe", {"method": "lora", "target_modules": ["experts.down_proj"]}),
        ("llama", {"method": "prge", "subspace": "gradient"}),
    ],
)
def test_models_of_other_layers_compute_with_their_adapter(family: str, settings: Any) -> None:
    loaded = ondevice.load_model(f"tiny:{family}")
    before = loss_of(loaded)
    run = ondevice.train(loaded, ROWS, **settings, **STRONG)
    after = loss_of(loaded)
    assert abs(after - before) > 1e-4
    assert after == same(loss_of(f"tiny:{family}", adapter=run))


@pytest.mark.parametrize("method", ["lora", "mesp", "prge"])
def test_a_second_run_begins_at_the_base_model(method: str) -> None:
    loaded = ondevice.load_model("tiny:llama")
    settings = {**STRONG, "method": method}
    first = ondevice.train(loaded, ROWS, **settings)
    notes: list[Any] = []
    second = ondevice.train(loaded, ROWS, sinks=[notes.append], **settings)
    assert second.history.losses == same(first.history.losses)
    assert any("taken out of the model" in text for text in notes[0].said)
    assert loss_of(loaded) == same(loss_of("tiny:llama", adapter=second))


@pytest.mark.parametrize("base", ["q4_0", "mlx_4bit"])
@pytest.mark.parametrize("method", ["lora", "mesp"])
def test_a_model_whose_weights_a_run_rounds_is_said_to_stay_rounded(method: str, base: str) -> None:
    if base == "mlx_4bit":
        pytest.importorskip("mlx_lm")
    notes: list[Any] = []
    settings: dict[str, Any] = {**FAST, "method": method, "sinks": [notes.append]}
    loaded = ondevice.load_model("tiny:llama", dtype="float32")
    ondevice.train(loaded, ROWS, **settings)
    assert not any("stay rounded" in text for text in notes[0].said)
    notes.clear()
    loaded = ondevice.load_model("tiny:llama", dtype="float32")
    weight: Any = loaded.family.linear(0, "up_proj").weight
    before = weight.detach().clone()
    ondevice.train(loaded, ROWS, base=base, **settings)
    assert not torch.equal(before, weight)
    assert any("stay rounded" in text for text in notes[0].said)


def test_a_run_that_fails_leaves_a_model_that_trains_again() -> None:
    loaded = ondevice.load_model("tiny:llama")

    def broken(event: Any) -> None:
        if isinstance(event, Step):
            raise OSError("the disk is full")

    before = loss_of(loaded)
    with pytest.raises(OSError, match="the disk is full"):
        ondevice.train(loaded, ROWS, method="prge", sinks=[broken], steps=3)
    assert loss_of(loaded) == before
    ondevice.train(loaded, ROWS, method="prge", **STRONG)


def test_a_model_of_transformers_and_its_tokenizer_go_the_whole_way() -> None:
    loaded = ondevice.load_model("tiny:llama")
    both: dict[str, Any] = {"tokenizer": loaded.tokenizer}
    run = ondevice.train(loaded.model, ROWS, **FAST, **both)
    assert ondevice.evaluate(loaded.model, ROWS, **both).accuracy is not None
    predicted = ondevice.predict(loaded.model, UNLABELLED, **both)
    assert predicted.texts == ondevice.predict(run, UNLABELLED, model="tiny:llama").texts
    assert ondevice.plan(loaded.model, ROWS, method="lora", **both).total_bytes > 0
    fresh = ondevice.load_model("tiny:llama")
    swapped = ondevice.predict(fresh.model, UNLABELLED, adapter=run, tokenizer=fresh.tokenizer)
    named = ondevice.predict(run, UNLABELLED, model=fresh.model, tokenizer=fresh.tokenizer)
    assert swapped.rows == named.rows == predicted.rows
    assert not has_adapter(fresh.model) and has_adapter(loaded.model)


def tables() -> dict[str, Any]:
    """The same rows in every form that a program holds."""
    pandas = pytest.importorskip("pandas")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    forms = {
        "dictionaries": ROWS,
        "a generator": (row for row in ROWS),
        "a DataFrame": pandas.DataFrame(ROWS),
        "a path": Path("rows.jsonl"),
        "a text": "rows.jsonl",
    }
    try:
        import datasets
    except ImportError:
        return forms
    return forms | {"a Dataset": datasets.Dataset.from_list(ROWS)}


def test_each_form_of_rows_gives_the_same_everywhere() -> None:
    run = ondevice.train("tiny:llama", ROWS, **FAST)
    losses = {name: ondevice.evaluate(run, rows).loss for name, rows in tables().items()}
    texts = {name: ondevice.predict(run, rows).texts for name, rows in tables().items()}
    lengths = {
        name: ondevice.plan("tiny:llama", rows, **FAST).request.length_tokens
        for name, rows in tables().items()
    }
    assert len(losses) >= 5 and len(set(losses.values())) == 1
    assert all(each == texts["dictionaries"] for each in texts.values())
    assert set(lengths.values()) == {16}


def test_texts_are_rows_to_predict() -> None:
    run = ondevice.train("tiny:llama", ROWS, **FAST)
    texts = (row["text"] for row in ROWS)
    assert ondevice.predict(run, texts).rows == ondevice.predict(run, UNLABELLED).rows


def test_a_run_stands_for_its_folder() -> None:
    run = ondevice.train("tiny:llama", ROWS, **FAST)
    assert loss_of(run) == loss_of(run.out) == loss_of("tiny:llama", adapter=run)
    more = ondevice.train("tiny:llama", ROWS, adapter=run, **FAST)
    assert more.history.losses[0] != run.history.losses[0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: ondevice.evaluate(m, 3), DataError, "rows of the wrong type"),
        (lambda m: ondevice.evaluate(3, ROWS), ConfigError, "not a model"),
        (lambda m: ondevice.evaluate(m.model, ROWS), ConfigError, "needs its tokenizer"),
        (lambda m: ondevice.evaluate(m, ROWS, adapter=m), ConfigError, "the adapter's folder"),
        (lambda m: ondevice.evaluate(m, [{"input_ids": [1, 2]}]), DataError, "only trained on"),
        (lambda m: ondevice.predict(m, ROWS), ArtifactError, "does not record its task"),
        (lambda m: ondevice.predict(m, [{"input_ids": [1]}]), DataError, "only trained on"),
        (lambda m: ondevice.predict(3, ROWS), ConfigError, "not a model"),
        (lambda m: ondevice.predict(m, 3), DataError, "rows of the wrong type"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call(ondevice.load_model("tiny:llama"))
    assert words in str(caught.value)
