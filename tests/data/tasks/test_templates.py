"""Every prompt of the P-RGE paper's Table 7, on a row of the data set itself where it is at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import ConfigError
from ondevice.data import TASKS, encode, find_task, read_rows

Write = Callable[..., Path]
DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "sst2": ({"sentence": "a joy "}, "1"),
    "rte": ({"index": "1", "sentence1": "Rain fell.", "sentence2": "It rained."}, "entailment"),
    "mrpc": ({"#1 ID": "1", "#2 ID": "2", "#1 String": "A b .", "#2 String": "B a ."}, "1"),
    "qqp": ({"question1": "Why?", "question2": "How?"}, "0"),
    "qnli": ({"index": "1", "question": "Who won?", "sentence": "Ann won."}, "not_entailment"),
    "wnli": ({"index": "1", "sentence1": "Bo left as he was ill.", "sentence2": "Bo was ill."}, "1"),
    "boolq": ({"question": "is tea hot", "passage": "Tea -- A drink.", "idx": 1}, True),
    "wsc": (
        {"text": "Sam saw Al and He ran.", "target": {"span1_text": "Sam", "span1_index": 0,
                                                      "span2_text": "He", "span2_index": 4}, "idx": 1},
        False,
    ),
    "wic": ({"word": "run", "sentence1": "I run.", "sentence2": "A long run.", "version": 1.1}, False),
    "multirc": ({"passage": "Al ate.", "question": "Who ate?", "answer": "Al", "answer_idx": 1}, 1),
    "copa": ({"premise": "It rained.", "choice1": "The grass grew.", "choice2": "I slept.",
              "question": "effect", "idx": 1}, 1),
    "winogrande": ({"sentence": "Al hit Bo so _ cried.", "option1": "Al", "option2": "Bo"}, "2"),
    "squad": ({"id": "1", "title": "Tea", "context": "Tea is hot.", "question": " What is hot?"},
              [{"text": "Tea", "answer_start": 0}, {"text": "tea", "answer_start": 0},
               {"text": "Tea", "answer_start": 0}]),
}  # fmt: skip

PROMPTS = {
    "sst2": "a joy It was",
    "rte": 'Rain fell.\nDoes this mean that "It rained." is true? Yes or No?\n',
    "mrpc": "Do the following two sentences mean the same thing? Yes or No?\nSentence 1: A b .\nSentence 2: B a .\n",
    "qqp": "Are these two questions asking the same thing? Yes or No?\nQuestion 1: Why?\nQuestion 2: How?\n",
    "qnli": "Does this sentence answer the question? Yes or No?\nSentence 1: Who won?\nSentence 2: Ann won.\n",
    "wnli": "Given the first sentence, is the second sentence true? Yes or No?\n"
    "Sentence 1: Bo left as he was ill.\nSentence 2: Bo was ill.\n",
    "boolq": "Tea -- A drink. Is tea hot?\n",
    "wsc": 'Sam saw Al and He ran.\nIn the previous sentence, does the pronoun "he" refer to Sam? Yes or No?\n',
    "wic": 'Does the word "run" have the same meaning in these two sentences? Yes, No?\nI run.\nA long run.\n',
    "multirc": 'Al ate.\nQuestion: Who ate?\nI found this answer "Al". Is that correct? Yes or No?\n',
    "copa": "It rained so",
    "winogrande": "Al hit Bo so Bo",
    "squad": "Title: Tea\nContext: Tea is hot.\nQuestion: What is hot?\nAnswer:",
}

ANSWERS = {
    "sst2": [" terrible", " great*"],
    "rte": ["Yes*", "No"],
    "mrpc": ["No", "Yes*"],
    "qqp": ["No*", "Yes"],
    "qnli": ["Yes", "No*"],
    "wnli": ["No", "Yes*"],
    "boolq": ["No", "Yes*"],
    "wsc": ["No*", "Yes"],
    "wic": ["No*", "Yes"],
    "multirc": ["No", "Yes*"],
    "copa": [" the grass grew.", " I slept.*"],
    "winogrande": [" cried.", " cried.*"],
    "squad": [" Tea\n"],
}


def test_the_table_is_table_7() -> None:
    assert list(TASKS) == list(ROWS) == list(PROMPTS) == list(ANSWERS)
    assert "mnli" not in TASKS


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answers(name: str, nested: bool, write: Write) -> None:
    fields, label = ROWS[name]
    row = (
        {"task": name, "prompt_fields": fields, "label": label}
        if nested
        else fields | {"label": label}
    )
    rows = read_rows(write([row]), task=None if nested else name)
    assert (rows.problems, rows.task, rows.format) == ([], name, TASKS[name].kind)
    (item,) = rows.items
    assert item.pairs[item.gold or 0][0] == PROMPTS[name]
    starred = [answer + "*" * (index == item.gold) for index, (_, answer) in enumerate(item.pairs)]
    assert starred == ANSWERS[name]
    assert item.answers == (("Tea", "tea") if name == "squad" else ())


@pytest.mark.parametrize("name", TASKS)
def test_every_row_of_a_public_data_set_is_encoded(name: str, write: Write, tokenizer: Any) -> None:
    path = DATA / name / "valid.jsonl"
    if not path.is_file():
        path = write([{"task": name, "prompt_fields": ROWS[name][0], "label": ROWS[name][1]}])
    with path.open(encoding="utf-8") as file:
        count = sum(1 for line in file if line.strip())
    rows = read_rows(path)
    assert (rows.task, rows.problems, len(rows)) == (name, [], count)
    rows.items = rows.items[:20]
    for item, row in zip(
        encode(rows, tokenizer, max_length_tokens=256).items, rows.items, strict=True
    ):
        assert len(item.candidates) == (0 if name == "squad" else len(row.pairs))
        assert bool(item.answers) == (name == "squad")
        judged = item.candidates or (item.example,)
        for example, (_, answer) in zip(judged, row.pairs, strict=True):
            labelled = [label for label in example.labels if label != -100]
            assert tokenizer.decode(labelled) == answer


def test_label_types_are_the_same_label(write: Write) -> None:
    labels = [1, "1", 1.0, " 1 ", "positive"]
    rows = read_rows(write([{"sentence": "x", "label": label} for label in labels]), task="SST-2")
    assert [row.label for row in rows.items] == ["great"] * len(labels)
    assert [read_rows(write([ROWS["boolq"][0] | {"answer": value}]), task="boolq").items[0].label
            for value in (True, "true", 1, "False")] == ["Yes", "Yes", "Yes", "No"]  # fmt: skip


@pytest.mark.parametrize("label", [2, -1, "grand", None, True, [1], {"a": 1}, 1e400])
def test_unknown_label_names_the_allowed(label: Any, write: Write) -> None:
    path = write(
        [
            json.loads(json.dumps(row))
            for row in ({"sentence": "x", "label": 0}, {"sentence": "y", "label": label})
        ]
    )
    (problem,) = read_rows(path, task="sst2").problems
    assert (problem.line, problem.field) == (2, "label")
    if label is not None:
        assert (
            "expected a label of sst2: 0 or negative (terrible), 1 or positive (great); received"
            in problem.reason
        )


def test_entailment_by_number_is_refused(write: Write) -> None:
    """0 is entailment in one copy of RTE and not in another: a guess could turn the task round."""
    rows = read_rows(
        write([{**ROWS["rte"][0], "label": label} for label in ("entailment", 0)]), task="rte"
    )
    assert "entailment (Yes), not_entailment (No)" in rows.problems[0].reason


BAD = [
    ("sst2", {"sentence": None}, "sentence", "is missing; expected one of the keys sentence, text"),
    ("sst2", {"sentence": 3}, "sentence", "expected a text"),
    ("copa", {"question": "why"}, "question", "expected 'cause' or 'effect'"),
    ("winogrande", {"sentence": "no blank"}, "sentence", "exactly one '_'"),
    ("winogrande", {"sentence": "_ and _ ran"}, "sentence", "exactly one '_'"),
    ("winogrande", {"sentence": "it was _"}, "sentence", "text after it"),
    ("wsc", {"target": "x"}, "span2_text", "is missing"),
    ("squad", {"label": []}, "label", "has no answer"),
    ("squad", {"label": [{"start": 1}]}, "label", "expected a text, received null"),
]


@pytest.mark.parametrize(("name", "change", "field", "reason"), BAD)
def test_bad_column_is_named(
    name: str, change: dict[str, Any], field: str, reason: str, write: Write
) -> None:
    fields, label = ROWS[name]
    good = fields | {"label": label}
    (problem,) = read_rows(write([good, good | change]), task=name).problems
    assert (problem.line, problem.field) == (2, field) and reason in problem.reason


def test_rows_of_another_task(write: Write) -> None:
    rows = [
        {"task": name, "prompt_fields": ROWS[name][0], "label": ROWS[name][1]}
        for name in ("sst2", "rte")
    ]
    (problem,) = read_rows(write(rows)).problems
    assert (problem.line, problem.field, problem.reason) == (
        2,
        "task",
        "expected 'sst2', received 'rte'",
    )


def test_hugging_face_answers(write: Write) -> None:
    row = {**ROWS["squad"][0], "answers": {"text": ["Tea", "hot tea"], "answer_start": [0, 3]}}
    assert read_rows(write([row]), task="squad").items[0].answers == ("Tea", "hot tea")


def test_copa_keeps_the_pronoun_i_large(write: Write) -> None:
    row = ROWS["copa"][0] | {
        "question": "cause",
        "choice1": "I'm old.",
        "choice2": "I Sang.",
        "label": 0,
    }
    (item,) = read_rows(write([row]), task="copa").items
    assert item.pairs == (("It rained because", " I'm old."), ("It rained because", " I Sang."))


def test_a_task_is_found_by_its_name() -> None:
    assert find_task("SST-2") is TASKS["sst2"] and find_task("Wino_Grande") is TASKS["winogrande"]
    with pytest.raises(ConfigError) as caught:
        find_task("mnli")
    assert caught.value.received == "mnli"
