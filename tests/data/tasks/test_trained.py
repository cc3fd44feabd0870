"""The record of a trained task turns rows without answers into the prompts of the training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.config import DataConfig
from ondevice.core.errors import ArtifactError, ConfigError, DataError
from ondevice.data.encode import encode
from ondevice.data.readers.objects import take_rows
from ondevice.data.readers.source import Record, Source
from ondevice.data.reading import as_rows
from ondevice.data.tasks.trained import (
    TrainedTask,
    for_hosts,
    parse_trained_task,
    to_text,
    trained_task,
)

YAML = "prompt: |\n  {a} or {b}?\ncandidates: {x: first, y: second}\nlabel: [right]\n"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "classes": ({"text": "my card", "label": "billing"}, {"text": "my card"}, {}),
    "classes with a label never seen": (
        {"text": "my card", "label": "billing"},
        {"text": "my card", "label": "unknown"},
        {},
    ),
    "columns in another case": (
        {"Text": "my card", "Label": "billing"},
        {"Text": "my card"},
        {},
    ),
    "columns that the user named": (
        {"Ticket": "my card", "Kind": "billing"},
        {"Ticket": "my card"},
        {"columns": {"text": "Ticket", "label": "Kind"}},
    ),
    "completion": ({"prompt": "one", "completion": " two"}, {"prompt": "one"}, {}),
    "question": ({"question": "who?", "answer": "me"}, {"question": "who?"}, {}),
    "named question": (
        {"Q": "who?", "A": "me"},
        {"Q": "who?", "A": ""},
        {"columns": {"question": "Q", "answer": "A"}},
    ),
    "instruction": (
        {"instruction": "who?", "input": "context", "output": "me"},
        {"instruction": "who?", "input": "context"},
        {},
    ),
    "chat": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {},
    ),
    "chat with its answer": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]},
        {},
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}]},
        {},
    ),
    "a task": ({"sentence": "nice", "label": 1}, {"sentence": "nice"}, {"task": "sst2"}),
    "a task's named columns": (
        {"Review": "nice", "Stars": 1},
        {"Review": "nice"},
        {"task": "sst2", "columns": {"text": "Review", "label": "Stars"}},
    ),
    "choices": (
        {"question": "q", "choices": ["a", "b"], "answer": "b"},
        {"question": "q", "choices": ["a", "b"]},
        {},
    ),
    "a custom template": (
        {"a": "one", "b": "two", "right": "y"},
        {"a": "one", "b": "two"},
        {"task": "own.yaml"},
    ),
}


def ask(task: TrainedTask, record: dict[str, Any], tokenizer: Any) -> Any:
    rows = task.prompt_rows(Source("json", iter([Record(1, record)]), []), "rows to predict")
    return encode(rows, task.with_template(tokenizer), max_length_tokens=96).items[-1]


def recorded(record: dict[str, Any], settings: dict[str, Any], tokenizer: Any) -> Any:
    data = DataConfig(**settings)
    other = {**record, "label": "technical"} if "label" in record and not data.task else record
    rows = as_rows(take_rows([record, other]), data.task, data.columns)
    dataset = encode(rows, tokenizer, max_length_tokens=96)
    written = to_text(trained_task(data, dataset, tokenizer))
    return parse_trained_task(json.loads(written), "ondevice_task.json"), dataset


@pytest.mark.parametrize("case", CASES)
def test_a_row_to_predict_has_the_prompt_of_the_training(
    case: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(YAML)
    record, unlabelled, settings = CASES[case]
    task, dataset = recorded(record, settings, tokenizer)
    Path("own.yaml").unlink()  # the record has its text
    actual, trained = ask(task, unlabelled, tokenizer), dataset.items[0]
    start = trained.prompt_tokens
    assert start and actual.prompt_tokens == start
    assert actual.example.ids[:start] == trained.example.ids[:start]
    assert actual.candidates == trained.candidates


@pytest.mark.parametrize(
    ("case", "inputs"),
    [
        ("classes", ["text"]),
        ("columns that the user named", ["Ticket"]),
        ("completion", ["prompt"]),
        ("question", ["instruction"]),
        ("named question", ["Q"]),
        ("chat", ["messages"]),
        ("a task", ["sentence"]),
        ("a task's named columns", ["Review"]),
        ("choices", ["question", "choices"]),
        ("a custom template", ["a", "b"]),
    ],
)
def test_a_row_with_only_the_inputs_has_the_prompt_of_the_training(
    case: str,
    inputs: list[str],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(YAML)
    record, unlabelled, settings = CASES[case]
    task, dataset = recorded(record, settings, tokenizer)
    assert list(task.inputs.values()) == inputs
    values = [unlabelled.get(name) for name in inputs]
    if case == "question":
        values = [unlabelled["question"]]
    asked = ask(task, dict(zip(inputs, values, strict=True)), tokenizer)
    start = dataset.items[0].prompt_tokens
    assert asked.example.ids[:start] == dataset.items[0].example.ids[:start]


def test_the_template_of_the_training_frames_the_prompt(tokenizer: Any) -> None:
    record, unlabelled, settings = CASES["chat"]
    task, dataset = recorded(record, settings, tokenizer)
    other = copy.copy(tokenizer)
    other.chat_template = "{{ messages[0]['content'] }}"
    start = dataset.items[0].prompt_tokens
    assert ask(task, unlabelled, other).example.ids[:start] == dataset.items[0].example.ids[:start]
    assert task.ends and task.framing == "chat template"


def test_rows_without_the_columns_of_the_task_are_refused(tokenizer: Any) -> None:
    record, _, settings = CASES["columns that the user named"]
    task, _ = recorded(record, settings, tokenizer)
    with pytest.raises(DataError) as refused:
        ask(task, {"Message": "my card"}, tokenizer)
    assert refused.value.received == "Ticket" and "Message" in refused.value.expected


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"format": "poem"}, {"labels": {}}, {"surprise": 1}, {"ends": 3}]
)
def test_a_damaged_record_is_refused(change: dict[str, Any], tokenizer: Any) -> None:
    record, _, settings = CASES["classes"]
    task, _ = recorded(record, settings, tokenizer)
    with pytest.raises(ArtifactError):
        parse_trained_task(json.loads(to_text(task)) | change, "ondevice_task.json")


def test_a_template_for_hosts_is_json_and_renders_the_same_rows(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(YAML.replace("first", '"fi\\u2028\\x7f\\ufeff: 🐈"'))
    record, unlabelled, settings = CASES["a custom template"]
    task, _ = recorded(record, settings, tokenizer)
    portable = for_hosts(task)
    assert json.loads(portable.template or "")["label"] == ["right"]
    assert ask(portable, unlabelled, tokenizer) == ask(task, unlabelled, tokenizer)


def test_a_template_that_json_would_change_is_refused_for_hosts(tokenizer: Any) -> None:
    long = YAML.replace("x: first", f"? {'x' * 1100}\n  : first")
    with pytest.raises(ConfigError):
        for_hosts(TrainedTask(format="classification", task="own", template=long))
