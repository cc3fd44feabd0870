"""MMLU, GSM8K and MT-Bench: one record a question, written at once, and the figures over them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from ondevice.artifact.files import atomic_write, storage_errors
from ondevice.core.errors import DataError
from ondevice.core.session import Evaluator
from ondevice.data import Dataset, encode, pad_id_of
from ondevice.data.rows import Rows
from ondevice.data.tasks.benchmarks import LETTERS, Question, choice_row, sum_prompt
from ondevice.data.tasks.scoring import final_number, wilson_interval
from ondevice.training.evaluate import EvalResult, evaluate_dataset

Messages = list[dict[str, str]]
Answer = Callable[[str | Messages], str | None]
"""A prompt to the model's greedy answer; None if the prompt leaves no room for one."""

Record = dict[str, Any]
Shots = dict[str, list[Question]]
ANSWERS, FIGURES = "answers.jsonl", "figures.json"


@dataclass
class BenchmarkResult:
    """Figures over the questions that were asked.

    Attributes:
        task: `mmlu`, `gsm8k` or `mt_bench`.
        rows: questions asked.
        correct: those answered right; None for `mt_bench`, whose answers another model judges.
        accuracy: the share of them; None without rows.
        accuracy_interval: Wilson's 95% interval of the accuracy.
        groups: rows, and where they are scored correct, accuracy and its interval, of each subject (or category).
        cut_rows: questions whose prompt was too long: it lost examples or its beginning (`mmlu`, `gsm8k`), or was not
            answered.
        shots: worked examples before each question, at most.
        seconds_s: wall time.
        interrupted: stopped before the last question.
        answers: the file with one record a question.
    """

    task: str
    shots: int
    answers: Path
    rows: int = 0
    correct: int | None = None
    accuracy: float | None = None
    accuracy_interval: tuple[float, float] | None = None
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut_rows: int = 0
    seconds_s: float = 0.0
    interrupted: bool = False

    def figures(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"answers": str(self.answers)}


def run_benchmark(
    records: Iterator[Record],
    result: BenchmarkResult,
    on_row: Callable[[int], None] = lambda rows: None,
) -> BenchmarkResult:
    """Write every record as it comes and sum up; Ctrl-C ends it with the figures of the rows so far.

    Args:
        records: from `choose`, `solve` or `converse`.
        result: task, shots and the answers' file; the figures are filled in and saved next to the answers.
        on_row: called with the number of rows that are done.
    """
    started = time.perf_counter()
    done = list[Record]()
    result.answers.parent.mkdir(parents=True, exist_ok=True)
    with storage_errors(result.answers), open(result.answers, "w", encoding="utf-8") as file:
        try:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()  # generation is slow: a killed run keeps every answer that it had
                done.append(record)
                on_row(len(done))
        except KeyboardInterrupt:
            result.interrupted = True
    if (
        result.interrupted
    ):  # it may have come between a row's writing and its counting: a written row counts
        with open(result.answers, encoding="utf-8") as file:
            done = [json.loads(line) for line in file]
    result.seconds_s = time.perf_counter() - started
    result.cut_rows = sum(record["cut"] for record in done)
    for name, value in _counts(done).items():
        setattr(result, name, value)
    names = sorted({record["group"] for record in done} - {""})
    result.groups = {
        name: _counts([record for record in done if record["group"] == name]) for name in names
    }
    atomic_write(result.answers.with_name(FIGURES), json.dumps(result.figures(), indent=2) + "\n")
    return result


def choose(
    session: Evaluator,
    tokenizer: Any,
    questions: Sequence[Question],
    shots: Shots,
    max_length_tokens: int,
) -> Iterator[Record]:
    """Choose for `mmlu` the letter of the highest likelihood behind the question. Examples are dropped until it
    fits."""
    for question in questions:
        examples = _shots(question, shots)
        dataset, cut = _fitting(question, examples, tokenizer, max_length_tokens)
        result = evaluate_dataset(session, dataset, pad_id_of(tokenizer), batch_size=len(LETTERS))
        (row,) = cast(EvalResult, result).predictions  # nothing gives it up
        predicted = LETTERS[row.predicted or 0]
        yield _record(
            question, cut, gold=question.answer, predicted=predicted, scores=row.scores
        ) | {"correct": predicted == question.answer}


def solve(
    answer: Answer, questions: Sequence[Question], shots: Shots, chat: bool
) -> Iterator[Record]:
    """Solve `gsm8k`: compare the number that the greedy answer ends with, against the right one."""
    for question in questions:
        examples = _shots(question, shots)
        text = None
        used = len(examples)
        while (
            text is None and used >= 0
        ):  # one example fewer until the prompt leaves room for an answer
            text = answer(sum_prompt(question, examples[:used], chat))
            used -= text is None
        reply = (
            (text or "") if chat else (text or "").partition("\nQuestion:")[0]
        )  # plain text goes on to the next one
        gold = final_number(question.answer)
        predicted = final_number(reply)
        yield _record(question, used < len(examples), answer=reply, gold=str(gold)) | {
            "predicted": None if predicted is None else str(predicted),
            "correct": predicted is not None and predicted == gold,
        }


def converse(answer: Answer, questions: Sequence[Question], model: str) -> Iterator[Record]:
    """Answer `mt_bench`: an answer to each turn, in the layout of FastChat's model answers, for another model to
    judge."""
    for question in questions:
        messages = Messages()
        replies = list[str]()
        cut = False
        for turn in question.turns:
            messages.append({"role": "user", "content": turn})
            text = answer(messages)
            cut |= text is None
            replies.append(text or "")
            messages.append({"role": "assistant", "content": replies[-1]})
        fastchat = {
            "question_id": question.id,
            "answer_id": f"{model}-{question.id}",
            "model_id": model,
        }
        fastchat |= {"choices": [{"index": 0, "turns": replies}], "tstamp": time.time()}
        yield fastchat | _record(question, cut, turns=list(question.turns))


def _record(question: Question, cut: bool, **values: Any) -> Record:
    return {"line": question.line, "group": question.group, "cut": cut, **values}


def _shots(question: Question, shots: Shots) -> list[Question]:
    examples = shots.get(question.group, [])
    if shots and not examples:
        message = f"line {question.line} is of a group without examples"
        raise DataError(
            message,
            expected="examples of " + ", ".join(shots),
            received=question.group or "no subject",
        )
    return examples


def _fitting(
    question: Question, examples: list[Question], tokenizer: Any, limit: int
) -> tuple[Dataset, bool]:
    """Encode the question with as many examples as fit; return it with True if anything had to go."""
    for used in range(len(examples), -1, -1):
        rows = Rows("", "multiple_choice", [choice_row(question, examples[:used])])
        dataset = encode(rows, tokenizer, max_length_tokens=limit)
        if not dataset.items[0].dropped_tokens:
            return dataset, used < len(examples)
    return dataset, True


def _counts(records: list[Record]) -> dict[str, Any]:
    counts: dict[str, Any] = {"rows": len(records)}
    if any("correct" in record for record in records):
        right = sum(record["correct"] for record in records)
        counts |= {"correct": right, "accuracy": right / len(records)}
        counts["accuracy_interval"] = wilson_interval(right, len(records))
    return counts
