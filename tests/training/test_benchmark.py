"""The benchmarks against transformers' own logits and against answers that are known."""

from __future__ import annotations

import json
import linecache
import sys

import pytest
import torch

from ondevice.core.errors import DataError
from ondevice.data.tasks.benchmarks import LETTERS, Question, choice_row
from ondevice.methods.model_loss import ModelSession
from ondevice.models.load import tiny_model
from ondevice.training.benchmark import (
    ANSWERS,
    FIGURES,
    BenchmarkResult,
    choose,
    converse,
    run_benchmark,
    solve,
)

QUESTIONS = [
    Question(
        line,
        (f"Is it {line}?\nA. {'a' * line}\nB. b\nC. c\nD. d",),
        LETTERS[line % 4],
        "xy"[line % 2],
        line,
    )
    for line in range(1, 9)
]


def result(folder, task: str = "mmlu") -> BenchmarkResult:
    return BenchmarkResult(task, 0, folder / ANSWERS)


def test_mmlu_takes_the_letter_that_transformers_finds_likeliest(tmp_path) -> None:
    loaded = tiny_model("llama", 3, max_positions=2048)
    shots = {group: [one for one in QUESTIONS if one.group == group][:1] for group in "xy"}
    done = run_benchmark(
        choose(ModelSession(loaded), loaded.tokenizer, QUESTIONS, shots, 2048), result(tmp_path)
    )
    saved = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    right = {"x": 0, "y": 0}
    for question, row in zip(QUESTIONS, saved, strict=True):
        prompt = choice_row(question, shots[question.group]).pairs[0][0]
        likelihoods = []
        for letter in LETTERS:
            ids = torch.tensor([list(f"{prompt} {letter}".encode())])
            with torch.no_grad():
                told = loaded.model(ids).logits.log_softmax(-1)[0, -3:-1]
            likelihoods.append(float(told.gather(1, ids[0, -2:, None]).mean()))
        assert row["scores"] == pytest.approx(likelihoods, abs=1e-4)
        assert row["predicted"] == LETTERS[max(range(4), key=likelihoods.__getitem__)]
        assert (row["line"], row["gold"], row["cut"]) == (question.line, question.answer, False)
        assert row["correct"] == (row["predicted"] == question.answer)
        right[question.group] += row["correct"]
    assert (done.rows, done.correct, done.accuracy) == (
        8,
        sum(right.values()),
        sum(right.values()) / 8,
    )
    assert {name: (one["rows"], one["correct"]) for name, one in done.groups.items()} == {
        name: (4, right[name]) for name in "xy"
    }
    low, high = done.accuracy_interval or (1.0, 0.0)
    assert low <= (done.accuracy or 0) <= high
    assert json.loads((tmp_path / FIGURES).read_text())["correct"] == done.correct


def test_examples_are_dropped_until_the_question_fits(tmp_path) -> None:
    loaded = tiny_model("llama", 3)
    question, shots = QUESTIONS[0], {"y": QUESTIONS[:3]}
    room = len(choice_row(question, QUESTIONS[:1]).pairs[0][0]) + 2
    cut = {}
    for limit in (2048, room, 40):
        (row,) = choose(ModelSession(loaded), loaded.tokenizer, [question], shots, limit)
        cut[limit] = row["cut"], tuple(row["scores"])
    (one,) = choose(ModelSession(loaded), loaded.tokenizer, [question], {"y": QUESTIONS[:1]}, room)
    assert [cut[limit][0] for limit in cut] == [False, True, True]
    assert cut[room][1] == pytest.approx(one["scores"]) and not one["cut"]
    with pytest.raises(DataError):
        next(choose(ModelSession(loaded), loaded.tokenizer, [question], {"x": QUESTIONS[:1]}, 2048))


def test_gsm8k_compares_the_final_numbers(tmp_path) -> None:
    sums = [Question(line, (f"{line}?",), f"...\n#### {line},000") for line in (1, 2, 3, 4)]
    said = {
        "Question: 1?\nAnswer:": " It is $1000.00.\n\nQuestion: And 5?\nAnswer: 5",
        "Question: 2?\nAnswer:": " 2, then #### 2,000\nor 7",
        "Question: 3?\nAnswer:": " none",
        "Question: 4?\nAnswer:": None,
    }
    done = run_benchmark(solve(said.__getitem__, sums, {}, False), result(tmp_path, "gsm8k"))
    saved = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    assert [row["correct"] for row in saved] == [True, True, False, False]
    assert [row["predicted"] for row in saved] == ["1000.00", "2000", None, None]
    assert [row["cut"] for row in saved] == [False, False, False, True] and done.cut_rows == 1
    assert (done.rows, done.correct, done.accuracy, done.groups) == (4, 2, 0.5, {})


def test_gsm8k_with_examples_keeps_those_that_leave_room() -> None:
    examples = [Question(line, (f"{line}?",), f"#### {line}") for line in (1, 2)]
    asked = []

    def answer(messages) -> str | None:
        asked.append([turn["content"].split("?")[0] for turn in messages])
        return "#### 3" if len(messages) < 5 else None

    (row,) = solve(answer, [Question(9, ("3?",), "#### 3")], {"": examples}, True)
    assert asked == [["1", "#### 1", "2", "#### 2", "3"], ["1", "#### 1", "3"]]
    assert row["correct"] and row["cut"]


def test_mt_bench_gives_the_first_answer_back_before_the_second_turn(tmp_path) -> None:
    seen = []

    def answer(messages) -> str:
        seen.append([turn["content"] for turn in messages])
        return f"answer {len(seen)}"

    questions = [Question(1, ("a", "b"), group="math", id=101), Question(2, ("c",), id=102)]
    done = run_benchmark(converse(answer, questions, "mine"), result(tmp_path, "mt_bench"))
    assert seen == [["a"], ["a", "answer 1", "b"], ["c"]]
    first, second = (json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines())
    assert first["choices"] == [{"index": 0, "turns": ["answer 1", "answer 2"]}]
    assert (first["question_id"], first["model_id"], first["turns"]) == (101, "mine", ["a", "b"])
    assert second["choices"][0]["turns"] == ["answer 3"]
    assert (done.rows, done.correct, done.accuracy, done.groups) == (
        2,
        None,
        None,
        {"math": {"rows": 1}},
    )


def test_ctrl_c_keeps_what_was_answered(tmp_path) -> None:
    def stop(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    sums = [Question(line, (f"{line}?",), f"#### {line}") for line in range(1, 9)]
    done = run_benchmark(
        solve(lambda prompt: "#### 2", sums, {}, False), result(tmp_path, "gsm8k"), stop
    )
    assert (done.interrupted, done.rows, done.correct) == (True, 3, 1)
    assert len((tmp_path / ANSWERS).read_text().splitlines()) == 3
    assert json.loads((tmp_path / FIGURES).read_text())["interrupted"] is True


@pytest.mark.parametrize("line", ["file.write", "file.flush", "done.append", "on_row"])
def test_ctrl_c_at_any_line_counts_what_is_written(line, tmp_path) -> None:
    def stop_there(frame, event, argument):
        here = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and here.startswith(line) and (tmp_path / ANSWERS).stat().st_size:
            raise KeyboardInterrupt
        return stop_there if frame.f_code is run_benchmark.__code__ else None

    sums = [Question(number, (f"{number}?",), f"#### {number}") for number in range(1, 5)]
    before = sys.gettrace()
    sys.settrace(stop_there)
    try:
        done = run_benchmark(
            solve(lambda prompt: "#### 2", sums, {}, False), result(tmp_path, "gsm8k")
        )
    finally:
        sys.settrace(before)
    assert done.interrupted and done.rows == len((tmp_path / ANSWERS).read_text().splitlines()) > 0
