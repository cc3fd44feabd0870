"""A token that the model's embedding has no row for is named before the first step, whatever computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import ondevice
from ondevice.core.errors import DataError
from ondevice.data import Dataset, Example, Item
from ondevice.data.examples import check_ids, unknown_token
from ondevice.models.tiny import save_tiny
from ondevice.training.rows import OpenedRows, read_rows_of
from tests.cli.command import write_rows

ROWS = [{"text": "one two"}, {"text": "three <extra> four"}, {"text": "five"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a token more than its embedding has rows."""
    from transformers import AutoTokenizer

    folder = save_tiny(tmp_path_factory.mktemp("vocabulary") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("<extra>") == 260
    return folder


def settings(
    model: Path, tmp_path: Path, method: str, backend: str = "torch", **more: Any
) -> dict[str, Any]:
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    return {
        "model.source": str(model), "model.device": "cpu", "data.path": str(rows), "train.steps": 2,
        "train.batch_size": 1, "method.name": method, "train.backend": backend, "train.out": str(tmp_path / "run"),
        **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "backend", "more"),
    [
        ("full", "torch", {}), ("lora", "torch", {}), ("mezo", "torch", {}), ("prge", "torch", {}),
        ("mesp", "torch", {}), ("mesp", "torch", {"method.weight_placement": "streamed"}),
        ("slideformer", "torch", {}), ("revffn", "torch", {}), ("lora", "torch", {"data.streaming": True}),
        ("mesp", "mlx", {}), ("mesp", "mlx", {"method.weight_placement": "streamed"}),
    ],
)  # fmt: skip
def test_a_run_is_refused_before_its_first_step(
    method: str, backend: str, more: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    with pytest.raises(DataError) as caught:
        ondevice.train(settings(model, tmp_path, method, backend, **more))
    assert "rows.jsonl:2: token 260 is not in the model's vocabulary" in caught.value.message
    assert (
        "0 to 259" in str(caught.value.expected)
        and not (tmp_path / "run" / "events.jsonl").exists()
    )


def test_rows_to_evaluate_are_checked_too(model: Path, tmp_path: Path) -> None:
    held = write_rows(tmp_path / "held.jsonl", ROWS)
    options = settings(model, tmp_path, "lora", **{"data.eval_path": str(held)})
    write_rows(tmp_path / "rows.jsonl", [ROWS[0]])
    with pytest.raises(DataError) as caught:
        ondevice.train(options)
    assert caught.value.message.startswith("held.jsonl:2: token 260 ")


@pytest.mark.parametrize(("ids", "token"), [([1, 2, 900], 900), ([1, -1, 3], -1)])
def test_rows_that_are_token_ids_already_are_checked(
    ids: list[int], token: int, model: Path, tmp_path: Path
) -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": ids}]
    options = {
        key: value for key, value in settings(model, tmp_path, "lora").items() if key != "data.path"
    }
    with pytest.raises(DataError) as caught:
        ondevice.train(options, rows=rows)
    assert caught.value.message.startswith(f"rows:2: token {token} ")


def test_ondevice_data_with_a_model_lists_unknown_tokens(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ondevice.cli.app import run

    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(SystemExit) as ended:
        run(["data", str(rows), "--model", str(model), "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["sequences"] == 2
    assert [(one["line"], one["reason"]) for one in told["problems"]] == [
        (2, "token 260 is not in the model's vocabulary of 260")
    ]


def test_a_padding_token_beyond_the_embedding_is_not_used(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from ondevice.api.runfile import RunConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<another>"})
    write_rows(tmp_path / "rows.jsonl", [ROWS[0]])
    config = RunConfig.load(
        None, {"model.source": "tiny:llama", "data.path": str(tmp_path / "rows.jsonl")}
    )
    assert (
        tokenizer.pad_token_id > 260
        and read_rows_of(OpenedRows(config.data), tokenizer, 32, 0, vocabulary=260).pad == 0
    )


def test_candidates_are_checked_too() -> None:
    good, bad = Example((1, 2), (-100, 2)), Example((1, 50), (-100, 50))
    dataset = Dataset([Item(good, line=1), Item(good, (good, bad), 0, line=2)])
    with pytest.raises(DataError) as caught:
        check_ids(dataset, 50, "file")
    assert caught.value.message.startswith("file:2: token 50 ")
    assert check_ids(dataset, 51, "file") is dataset
    assert [unknown_token(item, 50) for item in dataset.items] == [None, 50]


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_a_nested_configuration_is_checked_against_its_language_models_vocabulary(
    kind: str, model: Path, tmp_path: Path
) -> None:
    import shutil

    from ondevice.core.errors import ModelError
    from ondevice.models.load import read_tokenizer

    folder = tmp_path / "nested"
    shutil.copytree(model, folder)
    inner = json.loads((folder / "config.json").read_text())
    inner = {name: inner[name] for name in ("hidden_size", "vocab_size", "eos_token_id")}
    outer = {"model_type": kind, "text_config": inner}
    (folder / "config.json").write_text(json.dumps(outer))
    assert read_tokenizer(folder).vocab_size <= 260
    outer["text_config"] = inner | {"vocab_size": 40}
    (folder / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ModelError):
        read_tokenizer(folder)
