"""A template of one's own: prompts, answer words and metrics of a data set that the package does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import ConfigError, DataError
from ondevice.data import encode, read_rows

Write = Callable[..., Path]
CB = """
prompt: |
  {premise}
  Question: {hypothesis} Yes, No or Maybe?
candidates: {entailment: Yes, contradiction: No, "2": Maybe, neutral: Maybe}
metric: macro_f1
"""
ARC = """
prompt: |-
  Question: {question}
  Answer:
label: answerKey
candidates: "{choices.text}"
labels: choices.label
"""


def rendered(write: Write, template: str, *records: dict[str, Any], **options: Any) -> Any:
    path = write(template, "own.yaml")
    return read_rows(write(list(records)), task=str(path), **options)


def test_label_texts_stay_text_and_labels_may_share_one(write: Write) -> None:
    row = {"premise": "It rains. ", "hypothesis": "It is wet."}
    rows = rendered(
        write,
        CB,
        *(row | {"label": label} for label in ("entailment", "contradiction", "neutral", 2)),
    )
    prompt = "It rains.\nQuestion: It is wet. Yes, No or Maybe?\n"
    assert rows.items[0].pairs == ((prompt, "Yes"), (prompt, "No"), (prompt, "Maybe"))
    assert [(row.gold, row.label) for row in rows.items] == [
        (0, "Yes"),
        (1, "No"),
        (2, "Maybe"),
        (2, "Maybe"),
    ]
    assert (rows.format, rows.task, rows.metric) == ("classification", "own", "macro_f1")


def test_an_unknown_label_is_a_problem(write: Write) -> None:
    row = {"premise": "a", "hypothesis": "b"}
    rows = rendered(
        write,
        CB,
        row | {"label": "neutral"},
        row | {"label": "other"},
        row | {"hypothesis": " "},
        row,
    )
    assert [(problem.line, problem.field) for problem in rows.problems] == [
        (2, "label"),
        (3, "hypothesis"),
        (4, "label"),
    ]
    assert (
        "expected a label of own: entailment, contradiction, 2, neutral; received 'other'"
        in rows.problems[0].reason
    )


def test_rows_with_candidates_of_their_own(write: Write) -> None:
    choices = {"text": ["red", "blue", "green"], "label": ["1", "2", "3"]}
    rows = rendered(write, ARC, {"question": "Sky?", "choices": choices, "answerKey": "2"})
    assert rows.items[0].pairs == tuple(
        ("Question: Sky?\nAnswer:", f" {text}") for text in choices["text"]
    )
    assert (rows.items[0].gold, rows.items[0].label, rows.format) == (1, "B", "multiple_choice")


def test_candidates_from_columns_and_a_list_in_the_prompt(write: Write) -> None:
    template = (
        "prompt: '{Q}\n\n  {options}\n\n  Answer:'\nlabel: right\ncandidates: ['{A}', '{B}']\n"
    )
    row = {"Q": "2 + 2?", "options": ["3", "4"], "A": "three", "B": "four"}
    rows = rendered(
        write, template, row | {"right": "B"}, row | {"right": 0}, row | {"right": "four"}
    )
    assert rows.items[0].pairs[0] == ("2 + 2?\nA. 3\nB. 4\nAnswer:", " three")
    assert [row.gold for row in rows.items] == [1, 0, 1]


def test_free_answers_are_completions_or_generated(write: Write, tokenizer: Any) -> None:
    template = "prompt: 'Question: {question}'\nlabel: [reply, answer]\n"
    rows = rendered(write, template, {"question": "Why?", "answer": "Because."})
    assert (rows.format, rows.items[0].pairs, rows.items[0].end) == (
        "completion", (("Question: Why?", " Because."),), True,
    )  # fmt: skip
    assert (
        encode(rows, tokenizer, max_length_tokens=99).items[0].example.ids[-1]
        == tokenizer.eos_token_id
    )
    rows = rendered(
        write, template + "metric: f1\n", {"question": "Why?", "answer": ["Because.", "So."]}
    )
    assert (rows.format, rows.items[0].answers, rows.items[0].pairs[0][1]) == (
        "qa", ("Because.", "So."), " Because.\n",
    )  # fmt: skip


def test_regression_takes_the_nearest_answer_and_keeps_the_number(
    write: Write, tokenizer: Any
) -> None:
    template = "prompt: '{a} {b}:'\nlabel: score\ncandidates: {0: none, 2.5: some, 5: all}\nmetric: pearson\n"
    records = [{"a": "x", "b": "y", "score": score} for score in (0.2, "3.4", 5, "many")]
    rows = rendered(write, template, *records)
    assert [(row.gold, row.value) for row in rows.items] == [(0, 0.2), (1, 3.4), (2, 5.0)]
    assert (rows.format, rows.values) == (
        "regression",
        (0.0, 2.5, 5.0),
    ) and "expected a number" in rows.problems[0].reason
    dataset = encode(rows, tokenizer, max_length_tokens=99)
    assert (dataset.metric, dataset.values, dataset.items[1].value) == (
        "pearson",
        (0.0, 2.5, 5.0),
        3.4,
    )


def test_fields_have_columns_and_columns_can_be_named(write: Write) -> None:
    template = "prompt: '{text} It was'\nfields: {text: [review, meta.body]}\ncandidates: {0: bad, 1: good}\n"
    records = [{"review": "A", "label": 1}, {"meta": {"body": "B"}, "label": 0.0}]
    assert [row.pairs[0][0] for row in rendered(write, template, *records).items] == [
        "A It was",
        "B It was",
    ]
    rows = rendered(write, template, {"X": "C", "Y": "1"}, columns={"text": "X", "label": "Y"})
    assert (rows.items[0].pairs[0][0], rows.items[0].gold) == ("C It was", 1)


def test_rows_of_another_task_are_taken(write: Write) -> None:
    row = {"task": "cb", "prompt_fields": {"premise": "a", "hypothesis": "b"}, "label": "neutral"}
    assert rendered(write, CB, row).items[0].gold == 2


MISTAKES = {
    "no prompt": ("candidates: {a: b, c: d}", "prompt"),
    "no field": ("prompt: Is it?\ncandidates: {a: b, c: d}", "the prompt has no field"),
    "an unknown key": ("promt: '{x}'\nprompt: '{x}'", "did you mean 'prompt'"),
    "a field without a place": (
        "prompt: '{x}'\nfields: {y: z}",
        "the prompt does not use the fields y",
    ),
    "one candidate": ("prompt: '{x}'\ncandidates: {a: b}", "two candidates or more"),
    "candidates that are a word": ("prompt: '{x}'\ncandidates: word", "one placeholder"),
    "a metric": ("prompt: '{x}'\nmetric: bleu", "metric"),
    "a metric without candidates": (
        "prompt: '{x}'\nmetric: matthews",
        "metric 'matthews' does not fit",
    ),
    "a generated metric with candidates": (
        "prompt: '{x}'\nmetric: f1\ncandidates: [a, b]",
        "metric 'f1' does not fit",
    ),
    "a regression of words": (
        "prompt: '{x}'\nmetric: pearson\ncandidates: {low: 0, high: 5}",
        "labels that are numbers",
    ),
    "a regression with one answer twice": (
        "prompt: '{x}'\nmetric: pearson\ncandidates: {0: a, 5: a}",
        "its own text",
    ),
    "a list": ("- prompt", "not a template"),
    "no YAML": ("prompt: {x: [", "not readable YAML"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_template_is_a_config_error(mistake: str, write: Write) -> None:
    template, message = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        rendered(write, template, {"x": "a", "label": "a"})
    assert message in str(caught.value) and "own.yaml" in str(caught.value)


def test_a_missing_template_is_a_config_error(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rows(write([{"text": "a"}]), task="no/such.yaml")
    assert caught.value.received == "no/such.yaml"


def test_candidates_that_are_all_alike_are_a_problem(write: Write) -> None:
    template = "prompt: '{x}'\nlabel: y\ncandidates: ['{a}', '{b}']\n"
    with pytest.raises(DataError) as caught:
        rendered(write, template, {"x": "q", "a": "same", "b": "same", "y": 0})
    assert "'same'" in caught.value.message
