"""Questions of MMLU, GSM8K and MT-Bench from local files, and the prompts that they are asked with.

| task     | columns                                                                                    |
|----------|--------------------------------------------------------------------------------------------|
| mmlu     | question; A, B, C, D or choices: [...]; answer (or label): letter or index; maybe subject  |
| gsm8k    | question; answer (or label): the worked answer, which ends with `#### 18`                  |
| mt_bench | turns (or question): one text or more; maybe question_id and category                      |

The columns stand flat or under `prompt_fields`, as in the other tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.core.errors import ConfigError, DataError
from ondevice.data.readers.files import read_records
from ondevice.data.rows import BadRow, Row, RowProblem, check_text, describe
from ondevice.data.tasks.formats import task_fields
from ondevice.data.tasks.scoring import final_number
from ondevice.data.tasks.task import choice_index, column, plain_name, texts_of

BENCHMARKS = ("mmlu", "gsm8k", "mt_bench")
LETTERS = ("A", "B", "C", "D")
EVAL_NAMES = ("test", "valid", "validation", "val", "question")
SHOT_NAMES = ("fewshot", "dev", "train")
"""Names that the files of a folder have, without .jsonl or .csv; the first that exists is used."""

_GOLD = ("answer", "label")
_SUFFIXES = (".jsonl", ".csv")


@dataclass(frozen=True, slots=True)
class Question:
    """One row.

    Attributes:
        line: line of the file, from 1.
        turns: what the user says, turn by turn; of `mmlu` the question with its choices.
        answer: the letter of `mmlu`, the worked answer of `gsm8k`, "" of `mt_bench`.
        group: the subject of `mmlu`, the category of `mt_bench`; "" if the file names none.
        id: `question_id` of `mt_bench`; the line elsewhere.
    """

    line: int
    turns: tuple[str, ...]
    answer: str = ""
    group: str = ""
    id: int | str = 0


def find_benchmark(task: str | None) -> str | None:
    """Find a benchmark by name, without regard to case, '-' and '_'; None if it is unknown."""
    return {plain_name(name): name for name in BENCHMARKS}.get(plain_name(task or ""))


def find_file(path: Path, names: Sequence[str] = EVAL_NAMES) -> Path:
    """Return the file itself, or the first of a folder's that has one of `names`.

    Raises:
        DataError: the folder has none of them.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(
            f"no such file or folder: {path}",
            received=str(path),
            hint="check the path; nothing is fetched",
        )
    for name in names:
        for suffix in _SUFFIXES:
            if (path / f"{name}{suffix}").is_file():
                return path / f"{name}{suffix}"
    files = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    raise DataError(
        f"{path} has no such file", expected=f"{' or '.join(names)}, .jsonl or .csv", received=files
    )


def read_questions(path: Path, task: str) -> list[Question]:
    """Read all questions of a file. Scores are compared, so no row is left out.

    Raises:
        DataError: a row is bad, with file, line and field; or the file has no rows.
    """
    read = {"mmlu": _mmlu, "gsm8k": _gsm8k, "mt_bench": _mt_bench}[task]
    questions, problems = [], []
    for line, record, _ in read_records(path).records:
        try:
            if isinstance(record, BadRow):
                raise record
            questions.append(read(line, task_fields(task, record)))
        except BadRow as bad:
            problems.append(RowProblem(str(path), line, bad.field, bad.reason))
    if problems or not questions:
        raise DataError(
            f"{path} is not usable as {task}: {len(problems)} bad rows",
            received="; ".join(map(str, problems[:3])) or "no row",
            hint="correct or remove the rows: a score over other rows is another score",
        )
    return questions


def read_shots(path: Path, task: str, count: int) -> dict[str, list[Question]]:
    """Read at most `count` worked examples of each group, from the folder of the questions.

    Raises:
        ConfigError: `mt_bench` has no examples.
        DataError: the file with examples is missing, or one of its rows is bad.
    """
    if count and task == "mt_bench":
        raise ConfigError(
            "mt_bench is asked without examples", expected="no --shots", received=f"--shots {count}"
        )
    shots: dict[str, list[Question]] = {}
    if count:
        folder = path if path.is_dir() else path.parent
        for question in read_questions(find_file(folder, SHOT_NAMES), task):
            examples = shots.setdefault(question.group, [])
            if len(examples) < count:
                examples.append(question)
    return shots


def choice_row(question: Question, shots: Sequence[Question]) -> Row:
    """Build a row of `mmlu` as the benchmark's authors ask it; the candidates are the letters."""
    subject = f" about {question.group.replace('_', ' ')}" * bool(question.group)
    head = f"The following are multiple choice questions (with answers){subject}.\n\n"
    asked = "".join(f"{shot.turns[0]}\nAnswer: {shot.answer}\n\n" for shot in shots)
    prompt = f"{head}{asked}{question.turns[0]}\nAnswer:"
    pairs = tuple((prompt, f" {letter}") for letter in LETTERS)
    return Row(
        question.line, pairs, LETTERS.index(question.answer), label=question.answer, end=False
    )


def sum_prompt(
    question: Question, shots: Sequence[Question], chat: bool
) -> str | list[dict[str, str]]:
    """Build a prompt of `gsm8k` as a chat, or as plain text for a model without a chat template."""
    if not chat:
        asked = "".join(f"Question: {shot.turns[0]}\nAnswer: {shot.answer}\n\n" for shot in shots)
        return f"{asked}Question: {question.turns[0]}\nAnswer:"
    messages = []
    for asked in (*shots, question):
        messages.append(
            {"role": "user", "content": f"{asked.turns[0]}\n\nWrite the final number after ####."}
        )
        messages.append({"role": "assistant", "content": asked.answer})
    return messages[:-1]


def _mmlu(line: int, fields: dict[str, Any]) -> Question:
    if fields.get("choices") is not None:
        texts = texts_of(fields["choices"], "choices", least=2)
    else:
        texts = [check_text(column(fields, (letter,)), letter).strip() for letter in LETTERS]
    if len(texts) != len(LETTERS):
        raise BadRow("choices", f"expected {len(LETTERS)} choices, received {len(texts)}")
    gold = LETTERS[choice_index(column(fields, _GOLD), list(LETTERS))]
    lines = [check_text(column(fields, ("question",)), "question").strip()]
    lines += [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=True)]
    subject = fields.get("subject")
    group = "" if subject is None else check_text(subject, "subject").strip()
    return Question(line, ("\n".join(lines),), gold, group, line)


def _gsm8k(line: int, fields: dict[str, Any]) -> Question:
    asked = check_text(column(fields, ("question",)), "question").strip()
    answer = check_text(column(fields, _GOLD), _GOLD[0]).strip()
    if final_number(answer) is None:
        raise BadRow(
            _GOLD[0], f"expected an answer that ends with a number, received {describe(answer)}"
        )
    return Question(line, (asked,), answer, id=line)


def _mt_bench(line: int, fields: dict[str, Any]) -> Question:
    turns = column(fields, ("turns", "question"))
    texts = (
        texts_of(turns, "turns")
        if not isinstance(turns, str) or turns[:1] == "["
        else [check_text(turns, "turns")]
    )
    category, name = fields.get("category"), fields.get("question_id", line)
    if not isinstance(name, int | str):
        raise BadRow("question_id", f"expected a number or a text, received {describe(name)}")
    return Question(
        line,
        tuple(texts),
        group="" if category is None else check_text(category, "category"),
        id=name,
    )
