"""Questions of MMLU, GSM8K and MT-Bench in every form that their files have, and the prompts made of them."""

from __future__ import annotations

import json

import pytest

from ondevice.core.errors import ConfigError, DataError
from ondevice.data.tasks.benchmarks import (
    choice_row,
    find_benchmark,
    find_file,
    read_questions,
    read_shots,
    sum_prompt,
)
from tests.cli.command import write_rows

CHOICES = {
    "subject": "high_school_physics",
    "question": "How many?",
    "A": "0",
    "B": "1",
    "C": "2",
    "D": "3",
}


def mmlu(**changes: object) -> dict[str, object]:
    return CHOICES | {"answer": "B"} | changes


@pytest.mark.parametrize(
    "row",
    [
        mmlu(),
        {"task": "mmlu", "prompt_fields": CHOICES, "label": "B"},
        {
            "question": "How many?",
            "choices": ["0", "1", "2", "3"],
            "answer": 1,
            "subject": "high_school_physics",
        },
        mmlu(answer="1"),  # the index and not the choice's text
    ],
)
def test_mmlu_in_the_forms_that_its_files_have(row, tmp_path) -> None:
    (question,) = read_questions(write_rows(tmp_path / "test.jsonl", [row]), "mmlu")
    assert (question.turns, question.answer) == (("How many?\nA. 0\nB. 1\nC. 2\nD. 3",), "B")
    asked = choice_row(question, [question])
    once = "How many?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer:"
    head = (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
    )
    assert asked.pairs == tuple((f"{head}{once} B\n\n{once}", f" {letter}") for letter in "ABCD")
    assert (asked.gold, asked.end) == (1, False)


def test_csv_and_a_file_without_subjects(tmp_path) -> None:
    path = tmp_path / "test.csv"
    path.write_text('question,A,B,C,D,answer\n"One, two?",a,b,c,d,D\n', encoding="utf-8")
    (question,) = read_questions(path, "mmlu")
    assert (question.answer, question.group, question.line) == ("D", "", 2)
    assert (
        choice_row(question, [])
        .pairs[0][0]
        .startswith("The following are multiple choice questions (with answers).")
    )


def test_gsm8k_as_text_and_as_chat(tmp_path) -> None:
    rows = [
        {"question": "1 + 1?", "answer": "Two.\n#### 2"},
        {"question": "2 + 2?", "answer": "#### 4"},
    ]
    first, second = read_questions(write_rows(tmp_path / "test.jsonl", rows), "gsm8k")
    assert sum_prompt(second, [first], chat=False) == (
        "Question: 1 + 1?\nAnswer: Two.\n#### 2\n\nQuestion: 2 + 2?\nAnswer:"
    )
    turns = sum_prompt(second, [first], chat=True)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]  # type: ignore[index]
    assert turns[1]["content"] == first.answer and turns[2]["content"].startswith("2 + 2?")  # type: ignore[index]


def test_mt_bench_keeps_turns_and_ids(tmp_path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"question": "Sing."},
    ]
    two, one = read_questions(write_rows(tmp_path / "question.jsonl", rows), "mt_bench")
    assert (two.id, two.group, two.turns) == (81, "writing", ("Write.", "Rewrite."))
    assert (one.id, one.group, one.turns) == (2, "", ("Sing.",))


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("mmlu", mmlu(answer="E"), "'answer': expected one of the choices, A to D"),
        ("mmlu", {key: value for key, value in mmlu().items() if key != "C"}, "'C': is missing"),
        ("mmlu", mmlu(choices=["a", "b", "c"]), "'choices': expected 4 choices, received 3"),
        (
            "mmlu",
            {"task": "rte", "prompt_fields": CHOICES, "label": "B"},
            "'task': expected 'mmlu'",
        ),
        (
            "gsm8k",
            {"question": "1 + 1?", "answer": "two"},
            "'answer': expected an answer that ends with a number",
        ),
        ("gsm8k", {"question": " ", "answer": "2"}, "'question': is empty"),
        ("mt_bench", {"turns": []}, "'turns': expected a list of at least one text"),
        ("mt_bench", {"turns": ["a", 1]}, "'turns.1': expected a text, received a number"),
        ("mt_bench", {"turns": ["a"], "question_id": [1]}, "'question_id'"),
    ],
)
def test_a_bad_row_of_a_benchmark_is_reported_and_never_left_out(task, row, said, tmp_path) -> None:
    good = {
        "mmlu": mmlu(),
        "gsm8k": {"question": "q", "answer": "1"},
        "mt_bench": {"turns": ["a"]},
    }[task]
    path = write_rows(tmp_path / "test.jsonl", [good, row])
    with pytest.raises(DataError) as caught:
        read_questions(path, task)
    assert f"{path}:2: {said}" in str(caught.value) and "1 bad rows" in str(caught.value)


def test_the_file_of_a_folder_and_its_examples(tmp_path) -> None:
    with pytest.raises(DataError) as caught:
        find_file(tmp_path / "mmlu")
    assert caught.value.received == str(tmp_path / "mmlu")
    write_rows(
        tmp_path / "dev.jsonl", [mmlu(subject=f"{i % 2}", question=f"{i}?") for i in range(6)]
    )
    with pytest.raises(DataError) as caught:
        find_file(tmp_path)
    assert caught.value.received == "dev.jsonl"
    write_rows(tmp_path / "valid.jsonl", [mmlu()])
    assert find_file(tmp_path).name == "valid.jsonl"
    for start in (tmp_path, tmp_path / "valid.jsonl"):
        shots = read_shots(start, "mmlu", 2)
        assert {key: [one.turns[0][0] for one in some] for key, some in shots.items()} == {
            "0": ["0", "2"],
            "1": ["1", "3"],
        }
    assert read_shots(tmp_path, "mmlu", 0) == {}
    with pytest.raises(ConfigError) as refused:
        read_shots(tmp_path, "mt_bench", 1)
    assert refused.value.received == "--shots 1"
    (tmp_path / "none.jsonl").write_text(json.dumps({}) + "\n")
    with pytest.raises(DataError) as caught:
        read_questions(tmp_path / "none.jsonl", "gsm8k")
    assert "'question': is missing" in str(caught.value.received)


def test_benchmarks_are_found_by_name_in_any_case() -> None:
    assert [find_benchmark(name) for name in ("MT-Bench", "GSM8K", "mmlu", "sst2", None)] == [
        "mt_bench",
        "gsm8k",
        "mmlu",
        None,
        None,
    ]
