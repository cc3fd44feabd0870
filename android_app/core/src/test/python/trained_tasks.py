"""Tables, templates of one's own and records of trained tasks: what Python makes of them, for the app to do the same."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

TICKETS = "\ufeffBody;Team;Note\r\n" + "\r\n".join(
    f'"{text}";{label};' for text, label in (("My card, please", "billing"), ("It does ""not"" start", "technical"))
)
CELLS = 'text,label\r\n"a, b",x\r\n"two\nlines",y\r\n"he said ""no""",x\r\n'
TABLES: dict[str, bytes] = {
    "comma.csv": CELLS.encode(),
    "semicolon.csv": b"text;label\r\nso, it is;a\r\nno, it is not;b\r\n;b\r\n",
    "tab.csv": b"text\tlabel\nso; it is\ta\nno\tb\n",
    "tab.tsv": b"text\tlabel\nso, it is\ta\nno\tb\n",
    "comma.tsv": b"text,label\nso,a\nno,b\n",
    "pipe.csv": b"text|label\rso, it is|a\rno|b\r",
    "mixed.csv": b"text,label\nso;it,a\nno;it;is,b\nthe;row\n",
    "both.csv": b"text;more,label\na;b,x\nc;d,y\n",
    "widths.csv": b"text,label\nso,a\ntoo,many,cells\nfew\n\n , \nno,b\nthis;b\n",
    "other.csv": b"text,label\na,x\nb;y\nc,x\nd,y\n",
    "quotes.csv": b'text,label\n"a" b,x\nc,"y\nd,z\n',
    "open.csv": b'text,label\na,x\nb,"never closed\nc,y\n',
    "inside.csv": b'text,label\na "quoted" word,x\n"",y\n',
    "bytes.csv": b"text,label\n\xff\xfea,x\nb,y\ncaf\xc3,z\n",
    "null.csv": b"text,label\na\x00b,x\nb,y\n",
    "bom.csv": "\ufeffText,LABEL\nä,Größe\nö,klein\n".encode(),
    "empty cells.csv": b"\n\n  text , label ,\na,x,1\nb,y,2\n",
    "twice.csv": b"text,label,text\na,x,b\n",
    "header only.csv": b"text,label\n",
    "json.csv": b'{"text": "a", "label": "b"}\n',
    "one column.csv": b"text\nso\nno\n",
    "prompts.csv": b"Prompt;Completion\nOne?; one\nTwo?; two\n",
    "questions.csv": b"question;answer\nWho?;me\nWhy?;\n",
    "choices.csv": b'question,choices,answer\nWho?,"[""me"", ""you""]",B\nWho?,me,A\n',
    "numbers.csv": b"text,label\na,1\nb,1.0\nc, 1 \nd,0\n",
    "unknown.csv": b"Body;Team\nso;a\n",
    "blank.csv": b"  \n",
}
NAMED = {"named.csv": (TICKETS.encode(), {"text": "Body", "label": "Team"}), "none.csv": (CELLS.encode(), {"text": "Body", "label": "Team"})}
"""Tables whose columns the user named."""
TEMPLATES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "classes": (
        'prompt: |\n  Ticket: {body}\n  Team:\nfields: {body: [Text, text]}\nlabel: Kind\n'
        'candidates: {0: Billing, 1: "Tech: nical", 2: Größe 🐈, 3: Billing}\n',
        [{"Text": " a ", "Kind": "1"}, {"text": "b", "Kind": 2.0}, {"text": "c", "Kind": 3}, {"text": "d"}, {"Kind": 1}, {"text": "e", "Kind": "7"}, {"text": " ", "Kind": 0}],
    ),
    "texts": (
        "name: own\nprompt: '{a} and {b}:  '\ncandidates: [Yes, No]\nlabel: [right, gold]\n",
        [{"a": 1, "b": 2.5, "right": "Yes"}, {"a": True, "b": 1e-7, "gold": "B"}, {"a": 1e22, "b": -0.0, "right": 0}, {"a": "x", "b": ["p", "q"], "right": "1"}, {"a": "{b}", "b": "$1", "right": "No"}],
    ),
    "choices of the row": (
        "prompt: |\n  {question}\n  {choices}\n  Answer:\ncandidates: '{choices}'\nlabel: answer\n",
        [{"question": "q", "choices": ["one", "two"], "answer": "B"}, {"question": "q", "choices": '["one", "two"]', "answer": "two"}, {"question": "q", "choices": ["one", "one"], "answer": 0}, {"question": "q", "choices": [], "answer": 0}],
    ),
    "named choices": (
        "prompt: '{question}'\nfields: {texts: choices.text}\ncandidates: '{texts}'\nlabels: '{choices.label}'\nlabel: answerKey\n",
        [{"question": "q", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "2"}, {"question": "q", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "C"}],
    ),
    "candidates with a field": (
        "prompt: '{premise}'\ncandidates: ['so {first}', 'so {second}']\nlabel: label\n",
        [{"premise": "p", "first": "x", "second": "y", "label": 1}, {"premise": "p", "first": "x", "second": "x", "label": 1}],
    ),
    "numbers": (
        "prompt: '{a} / {b}'\ncandidates: {0: none, 2.5: some, 5: all}\nmetric: pearson\n",
        [{"a": "x", "b": "y", "label": 3.1}, {"a": "x", "b": "y", "label": "4.2"}, {"a": "x", "b": "y", "label": "much"}, {"a": "x", "b": "y", "label": True}],
    ),
    "free": ("prompt: 'Q: {question} A:'\nlabel: answer\n", [{"question": "who", "answer": "me"}, {"question": "how many", "answer": 3}, {"question": "x", "answer": None}]),
    "questions": (
        "prompt: |\n  {context}\n  Q: {question}\n  A:\nlabel: answers\nmetric: f1\n",
        [{"context": "c", "question": "q", "answers": {"text": ["a", " a ", "b"]}}, {"context": "c", "question": "q", "answers": [{"text": "z"}]}],
    ),
}
RECORDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]] = {
    "classes": ([{"text": "my card", "label": "Billing"}, {"text": "no start", "label": "technical"}, {"text": "x", "label": "Ä 🐈"}], {}, {"text": " I was charged twice. "}),
    "sst2": ([{"sentence": "so", "label": 1}], {"task": "sst2"}, {"sentence": "A warm film."}),
    "copa": ([{"premise": "It rained.", "choice1": "I got wet.", "choice2": "The Sun shone.", "question": "effect", "label": 0}], {"task": "copa"}, {"premise": "He ran.", "choice1": "He was late.", "choice2": "It was warm.", "question": "cause"}),
    "squad": ([{"title": "t", "context": "c", "question": "q", "label": "a"}], {"task": "squad"}, {"title": "T", "context": "C is D.", "question": "What is C?"}),
    "choices": ([{"question": "q", "choices": ["a", "b"], "answer": "A"}], {}, {"question": "Who?", "choices": "me\n you \n\nnobody"}),
    "completion": ([{"prompt": "One?", "completion": " one"}], {}, {"prompt": "Two? Zwei?"}),
    "question": ([{"question": "Who?", "answer": "me"}], {}, {"instruction": "Who is it?"}),
    "instruction": ([{"instruction": "i", "input": "c", "output": "o"}], {}, {"instruction": "Do it", "input": "with care"}),
    "chat": ([{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}], {}, {"prompt": "How are you?"}),
    "template": ([{"Text": "a", "Kind": "1"}], {"task": "classes.yaml"}, {"Text": "my card"}),
    "template with choices": ([{"question": "q", "choices": ["one", "two"], "answer": "B"}], {"task": "choices of the row.yaml"}, {"question": "Who?", "choices": "me\nyou"}),
    "free template": ([{"question": "who", "answer": "me"}], {"task": "free.yaml"}, {"question": "When?"}),
    "template of questions": ([{"context": "c", "question": "q", "answers": ["a"]}], {"task": "questions.yaml"}, {"context": "C", "question": "Q"}),
}
"""Rows that were trained on, the settings of `data`, and what a user writes into the fields of Try."""


def rows_as_json(read: Any) -> dict[str, Any]:
    """The rows that `read` gives, or the kind of its error."""
    from ondevice.core.errors import OndeviceError

    try:
        rows = read()
    except OndeviceError as error:
        return {"error": type(error).__name__}
    return {
        "format": rows.format,
        "labels": list(rows.labels.values()),
        "problems": [[problem.line, problem.field] for problem in rows.problems],
        "rows": [
            {"line": row.line, "pairs": row.pairs, "gold": row.gold, "answers": row.answers, "label": row.label, "end": row.end,
             "turns": [list(turn[:2]) for turn in row.messages]}
            for row in rows.items
        ],
    }  # fmt: skip


def tables() -> list[dict[str, Any]]:
    from ondevice.data import read_rows

    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (content, columns) in {**{name: (content, {}) for name, content in TABLES.items()}, **NAMED}.items():
            path = Path(folder) / name
            path.write_bytes(content)
            rows = rows_as_json(lambda path=path, columns=columns: read_rows(path, columns=columns))
            made.append({"name": name, "bytes": base64.b64encode(content).decode(), "columns": columns} | rows)
    return made


def templates() -> list[dict[str, Any]]:
    from ondevice.data.readers.source import Record, Source
    from ondevice.data.reading import rows_of
    from ondevice.data.tasks.custom import read_task, template_json

    made = []
    for name, (text, records) in TEMPLATES.items():
        source = Source("json", iter([Record(line, dict(record)) for line, record in enumerate(records, 1)]), [])
        rows = rows_as_json(lambda source=source, text=text, name=name: rows_of(source, "f", read_task(text, name)))
        made.append({"name": name, "template": template_json(text), "records": records} | rows)
    return made


def records(tokenizers: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt, the candidates and the ends that each record gives a text."""
    from ondevice.core.config import DataConfig
    from ondevice.data import encode
    from ondevice.data.readers.objects import take_rows
    from ondevice.data.readers.source import Record, Source
    from ondevice.data.reading import as_rows
    from ondevice.data.tasks.trained import for_hosts, to_text, trained_task

    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (text, _) in TEMPLATES.items():
            (Path(folder) / f"{name}.yaml").write_text(text, encoding="utf-8")
        for name, (rows, settings, fields) in RECORDS.items():
            data = DataConfig(**settings)
            if (data.task or "").endswith(".yaml"):
                data = data.model_copy(update={"task": str(Path(folder) / str(data.task))})
            for spoken, tokenizer in tokenizers.items():
                trained = encode(as_rows(take_rows(rows), data.task, data.columns), tokenizer, max_length_tokens=48)
                task = for_hosts(trained_task(data, trained, tokenizer))
                record: dict[str, Any] = dict(fields)
                if "choices" in fields:
                    record["choices"] = [line.strip() for line in fields["choices"].split("\n") if line.strip()]
                if name == "chat":
                    record = {"messages": [{"role": "user", "content": fields["prompt"]}]}
                asked = task.prompt_rows(Source("json", iter([Record(1, record)]), []), "rows to predict")
                item = encode(asked, task.with_template(tokenizer), max_length_tokens=48).items[0]
                made.append({
                    "name": name, "tokenizer": spoken, "record": to_text(task), "fields": fields,
                    "prompt": item.example.ids[: item.prompt_tokens],
                    "candidates": [[c.ids, c.labels] for c in item.candidates], "ends": task.ends, "longest": task.longest_answer_tokens,
                })  # fmt: skip
    return made


def scores(artifact: Path, adapter: Path) -> list[dict[str, Any]]:
    """What the artifact's program says of texts by its own record, before and after: as `ondevice eval` scores them."""
    import numpy as np
    from transformers import AutoTokenizer

    from ondevice.api.open import open_artifact
    from ondevice.artifact.adapter import load_adapter
    from ondevice.data import encode, pad_id_of
    from ondevice.data.readers.source import Record, Source
    from ondevice.data.tasks.trained import read_trained_task
    from ondevice.training.evaluate import evaluate_dataset

    session = open_artifact(artifact)
    tokenizer = AutoTokenizer.from_pretrained(str(artifact / "tokenizer"))
    task = read_trained_task(artifact)
    assert task is not None
    texts = ["I was charged twice.", "It does not start", "Größe 🐈?", "x"]
    rows = task.prompt_rows(Source("json", (Record(line, {"Body": text}) for line, text in enumerate(texts, 1)), []), "texts")
    dataset = encode(rows, task.with_template(tokenizer), max_length_tokens=task.max_length_tokens)
    sides = []
    for folder in (None, adapter):
        if folder is not None:
            session.load_adapter(load_adapter(folder))
        result = evaluate_dataset(session, dataset, pad_id_of(tokenizer))
        assert result is not None
        sides.append([list(prediction.scores) for prediction in result.predictions])
    session.close()

    def shares(row: list[float]) -> list[float]:
        weights = np.exp(np.array(row) - max(row))
        return (weights / weights.sum()).tolist()

    return [
        {"text": text, "before": sides[0][index], "after": sides[1][index], "shares": shares(sides[1][index])}
        for index, text in enumerate(texts)
    ]


def write_rows(folder: Path) -> list[str]:
    """The tickets and their template as files; returns the words of `ondevice export` that name them."""
    (folder / "tickets.csv").write_text(TICKETS, encoding="utf-8")
    (folder / "desk.yaml").write_text(
        "prompt: |\n  Ticket: {Body}\n  Team:\nlabel: Team\ncandidates: {billing: Billing, technical: Technical help, sales: Größe 🐈}\n", encoding="utf-8"
    )
    return ["--data", str(folder / "tickets.csv"), "--task", str(folder / "desk.yaml")]

