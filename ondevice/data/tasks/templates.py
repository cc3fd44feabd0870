"""The prompts of the P-RGE paper's Table 7 and MeZO's verbalisers, as one table.

A candidate is a (prompt, answer) pair. The answer begins with a space, or after the prompt's
newline, so that tokenizers do not merge across the boundary. The candidate with the lowest mean
negative log likelihood per label token is picked (`scoring.pick_candidate`).

MNLI is missing because Table 7 does not have it. Line breaks that its typesetting leaves open are
MeZO's (P-RGE, appendix A.3: "adopting the same prompt template from MeZO").
"""

from __future__ import annotations

import difflib
from typing import Any

from ondevice.core.errors import ConfigError
from ondevice.data.rows import BadRow, check_text, describe
from ondevice.data.tasks.custom import load_task
from ondevice.data.tasks.task import (
    Choice,
    Pairs,
    Rendered,
    Task,
    answers_of,
    column,
    is_template,
    label_key,
    plain_name,
)


def find_task(name: str) -> Task:
    """Return the task called `name`, without regard to case, '-' and '_' ("SST-2" is sst2).

    The path of a `.yaml` file is a custom template.

    Raises:
        ConfigError: no such task, or the template cannot be used.
    """
    if is_template(name):
        return load_task(name)
    task = TASKS.get(plain_name(name))
    if task is None:
        near = difflib.get_close_matches(plain_name(name), TASKS, n=1)
        hint = "write a custom template and name its file: --task my.yaml"
        if near:
            hint = f"did you mean '{near[0]}'?"
        expected = f"{', '.join(TASKS)}, or a .yaml file"
        raise ConfigError(f"unknown task '{name}'", expected=expected, received=name, hint=hint)
    return task


def render(task: Task, fields: dict[str, Any]) -> Rendered:
    """Render the candidates of one row, whose columns and label are in `fields`.

    Raises:
        BadRow: a column is missing, not a text or empty, or the label is not one of the task's.
    """
    if task.own is not None:
        return task.own(task, fields)
    values = {
        name: check_text(column(fields, keys), keys[0]).strip()
        for name, keys in task.columns.items()
    }
    values = task.clean(values)
    if task.kind == "qa":
        answers = answers_of(column(fields, task.label), task.label[0])
        return Rendered(((task.prompt.format(**values), f" {answers[0]}\n"),), answers=answers)
    pairs = task.pairs(values) if task.pairs else _append(task, values)
    gold = _gold(task, fields)
    return Rendered(pairs, gold, label=_shown(task.choices[gold]))


def _append(task: Task, values: dict[str, str]) -> Pairs:
    prompt = task.prompt.format(**values)
    return tuple((prompt, choice.text) for choice in task.choices)


def _gold(task: Task, fields: dict[str, Any]) -> int:
    value = column(fields, task.label)
    key = label_key(value)
    for index, choice in enumerate(task.choices):
        if key in choice.labels:
            return index
    allowed = ", ".join(
        f"{' or '.join(choice.labels)} ({choice.text.strip() or index + 1})"
        for index, choice in enumerate(task.choices)
    )
    reason = f"expected a label of {task.name}: {allowed}; received {describe(value)}"
    raise BadRow(task.label[0], reason)


def _shown(choice: Choice) -> str:
    return choice.text.strip() or choice.labels[-1]


def _boolq(values: dict[str, str]) -> dict[str, str]:
    question = values["question"].removesuffix("?")
    return values | {"question": question[:1].upper() + question[1:]}


def _wsc(values: dict[str, str]) -> dict[str, str]:
    return values | {"pronoun": values["pronoun"].lower()}


def _copa(values: dict[str, str]) -> Pairs:
    """<premise> so/because <candidate>, the candidate in lower case except "I"."""
    question = values["question"]
    word = {"effect": "so", "cause": "because"}.get(question.lower())
    if word is None:
        raise BadRow("question", f"expected 'cause' or 'effect', received {describe(question)}")
    prompt = f"{values['premise'].removesuffix('.')} {word}"
    return tuple((prompt, " " + _lower_first(values[key])) for key in ("choice1", "choice2"))


def _lower_first(sentence: str) -> str:
    first = sentence.split(" ", 1)[0]
    if first == "I" or first.startswith(("I'", "I\u2019")):
        return sentence
    return first.lower() + sentence[len(first) :]


def _winogrande(values: dict[str, str]) -> Pairs:
    """Put each option into the context (Table 7: <context> <subject> <object>) and score only the
    continuation, which both candidates share: partial evaluation."""
    before, blank, after = values["sentence"].partition("_")
    if not blank or "_" in after or not after.strip():
        raise BadRow("sentence", "expected exactly one '_', with text after it")
    return tuple((before + values[key], after) for key in ("option1", "option2"))


_YES = ("true", "1")
_NO = ("false", "0")
_TWO_SENTENCES = "\nSentence 1: {sentence1}\nSentence 2: {sentence2}\n"
_ENTAILS = (Choice("Yes", ("entailment",)), Choice("No", ("not_entailment",)))
_DIFFERENT = Choice("No", ("0", "not_equivalent", "not_duplicate"))
_SAME = (_DIFFERENT, Choice("Yes", ("1", "equivalent", "duplicate")))
_SENTENCE1 = ("sentence1", "premise")
_SENTENCE2 = ("sentence2", "hypothesis")

TASKS: dict[str, Task] = {}
for _task in (
    Task("sst2", "classification", {"text": ("sentence", "text")},
         (Choice(" terrible", ("0", "negative")), Choice(" great", ("1", "positive"))), "{text} It was"),
    Task("rte", "classification", {"premise": _SENTENCE1, "hypothesis": _SENTENCE2}, _ENTAILS,
         '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n'),
    Task("mrpc", "classification",
         {"sentence1": ("sentence1", "#1 String"), "sentence2": ("sentence2", "#2 String")}, _SAME,
         "Do the following two sentences mean the same thing? Yes or No?" + _TWO_SENTENCES,
         label=("label", "Quality")),
    Task("qqp", "classification", {"question1": ("question1",), "question2": ("question2",)}, _SAME,
         "Are these two questions asking the same thing? Yes or No?\n"
         "Question 1: {question1}\nQuestion 2: {question2}\n", label=("label", "is_duplicate")),
    Task("qnli", "classification", {"sentence1": ("question",), "sentence2": ("sentence",)}, _ENTAILS,
         "Does this sentence answer the question? Yes or No?" + _TWO_SENTENCES),
    Task("wnli", "classification", {"sentence1": ("sentence1",), "sentence2": ("sentence2",)},
         (Choice("No", ("0", "not_entailment")), Choice("Yes", ("1", "entailment"))),
         "Given the first sentence, is the second sentence true? Yes or No?" + _TWO_SENTENCES),
    Task("boolq", "classification", {"passage": ("passage",), "question": ("question",)},
         (Choice("No", _NO), Choice("Yes", _YES)), "{passage} {question}?\n",
         label=("label", "answer"), clean=_boolq),
    Task("wsc", "classification",
         {"text": ("text",), "pronoun": ("span2_text", "target.span2_text"),
          "noun": ("span1_text", "target.span1_text")}, (Choice("No", _NO), Choice("Yes", _YES)),
         '{text}\nIn the previous sentence, does the pronoun "{pronoun}" refer to {noun}? Yes or No?\n',
         clean=_wsc),
    Task("wic", "classification",
         {"word": ("word",), "sentence1": ("sentence1",), "sentence2": ("sentence2",)},
         (Choice("No", _NO), Choice("Yes", _YES)),
         'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n'
         "{sentence1}\n{sentence2}\n"),
    Task("multirc", "classification",
         {"paragraph": ("passage", "paragraph"), "question": ("question",), "answer": ("answer",)},
         (Choice("No", _NO), Choice("Yes", _YES)),
         "{paragraph}\nQuestion: {question}\n"
         'I found this answer "{answer}". Is that correct? Yes or No?\n'),
    Task("copa", "multiple_choice",
         {"premise": ("premise",), "choice1": ("choice1",), "choice2": ("choice2",), "question": ("question",)},
         (Choice("", ("0", "choice1")), Choice("", ("1", "choice2"))), pairs=_copa),
    Task("winogrande", "multiple_choice",
         {"sentence": ("sentence",), "option1": ("option1",), "option2": ("option2",)},
         (Choice("", ("1", "option1")), Choice("", ("2", "option2"))), label=("label", "answer"),
         pairs=_winogrande),
    Task("squad", "qa", {"title": ("title",), "context": ("context",), "question": ("question",)},
         prompt="Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:",
         label=("label", "answers")),
):  # fmt: skip
    TASKS[_task.name] = _task
