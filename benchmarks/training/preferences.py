"""Do 100 judgements teach what was preferred? Two made preferences over Alpaca's rows, five seeds.

    python -m benchmarks.training.preferences --device cuda --processes 6 --record
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
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_arguments, finish, parse_args

NEEDS = ("cuda",)
KINDS = ("short", "plain")
OBJECTIVES = ("dpo", "kto", "sft")
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
    {"key": "peak_bytes", "title": "Peak on the GPU (MB)", "scale": 1e-6, "digits": 0},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", default="mesp")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--processes", type=int, default=1)
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


def measure(args: argparse.Namespace, name: str, kind: str, seed: int) -> dict[str, Any]:
    """Train with one objective, preference and seed; return what came out."""
    import torch

    from ondevice import method_config, open_session
    from ondevice.data.batching import Batches
    from ondevice.models import load_model
    from ondevice.objectives import Dpo, objective
    from ondevice.training.preferences import PreferenceBatches, PreferenceRows, Preferences

    loaded = load_model(args.model, device=args.device)
    session: Any = open_session(loaded, method_config(args.method), seed)
    made = pairs(args.data / "alpaca/train.jsonl", kind, JUDGEMENTS)
    # Of the judgements' file come those that follow them, if the other has too few.
    test = pairs(args.data / "alpaca/valid.jsonl", kind, args.held_out)
    more = pairs(args.data / "alpaca/train.jsonl", kind, JUDGEMENTS + args.held_out - len(test))
    test += more[JUDGEMENTS:]
    train = encoded(rated(made) if name == "kto" else made, loaded.tokenizer)
    held_out = PreferenceRows(encoded(test, loaded.tokenizer))
    learns = Preferences(objective("dpo" if name == "sft" else name), train, None, 0, {})
    with tempfile.TemporaryDirectory() as folder:
        learns.begin(session, Path(folder))
    held_out.reference = likelihoods(held_out, session)
    before = text_loss(session, loaded.tokenizer, args.data)
    batches = PreferenceBatches(learns, Batches(train, 4, None, seed, 0))
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(args.steps):
        batch = batches.at(step)
        began = time.perf_counter()
        if name == "sft":
            session.step(batch.ids, batch.labels, step, args.rate)
        else:
            learns.step(session, batch, step, args.rate)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    found = likelihoods(held_out, session)
    graded = Dpo().grade(held_out.scores(np.arange(len(found)), found))
    return {
        "objective": name,
        "prefers": kind,
        "seed": seed,
        "order": float(graded.right.mean()),
        "text": text_loss(session, loaded.tokenizer, args.data) - before,
        "step_s": statistics.median(seconds),
        "peak_bytes": peak,
    }


def likelihoods(rows: Any, session: Any) -> np.ndarray:
    """Return the rows' log likelihoods, float64 [rows, 2]."""
    found = rows.log_likelihoods(session, 0)
    assert found is not None
    return found


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each objective and preference."""
    rows = []
    for kind in KINDS:
        for name in OBJECTIVES:
            some = sorted(
                (run for run in runs if (run["objective"], run["prefers"]) == (name, kind)),
                key=lambda run: run["seed"],
            )
            row: dict[str, Any] = {"objective": name, "prefers": kind}
            for key in ("order", "text"):
                values = [run[key] for run in some]
                row |= {f"mean_{key}": statistics.mean(values), key: values}
            row["step_s"] = [run["step_s"] for run in some]
            if some[0]["peak_bytes"]:
                row["peak_bytes"] = max(run["peak_bytes"] for run in some)
            rows.append(row)
    return rows


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
    jobs = [
        (name, kind, seed) for seed in range(args.seeds) for kind in KINDS for name in OBJECTIVES
    ]
    runs = []
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        for run in pool.map(partial(_measure, args), jobs):
            print(json.dumps(run), flush=True)
            runs.append(run)
    notes = [
        f"{args.model}, {args.method}, {args.steps} steps of 4 rows (8 texts), learning rate "
        f"{args.rate:g}, {JUDGEMENTS} judgements, {args.held_out} held-out pairs; "
        f"{args.processes} runs at a time, which share the device. The order is by the log ratio to "
        "the model before training. `sft` takes both texts of a pair, too."
    ]
    title = "Preferences: 100 judgements over Alpaca's rows, SmolLM2-135M"
    finish("training/preferences", table(runs), args, COLUMNS, title=title, notes=notes)


def _measure(args: argparse.Namespace, job: tuple[str, str, int]) -> dict[str, Any]:
    return measure(args, *job)


if __name__ == "__main__":
    main()
