"""Training loss of automatic differentiation, MeSP and MeZO on the same batches (the paper's
Figure 2).

    python -m benchmarks.mesp.curves --plot docs/images/mesp-curves.png     SmolLM2-135M, 12 CPU minutes
    python -m benchmarks.mesp.curves --from-results out.json --plot PNG     draws what --out wrote

All train the same pairs from the same start. MeZO moves them by one random direction a step, at
the rate of those tried that ends lowest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish, parse_args
from benchmarks.mesp.blocks import MODEL
from ondevice.core.registry import method_config, open_session
from ondevice.models import load_model

NEEDS = ("torch",)
RANK = 8
RATE = 3e-4
"""Of AdamW."""
MEZO_RATES = (1e-4, 3e-4)
SCALE = 1e-3
"""MeZO's own epsilon."""
LAST = 40
"""Steps whose mean loss a row has."""
WINDOW = 20
"""Steps that a curve of the picture is the mean of."""
COLORS = {"lora": "#1f5fa8", "mesp": "#c4541a", "mezo": "#777777"}
COLUMNS = [
    {"key": "method", "title": "Method"},
    {"key": "learning_rate", "title": "Rate"},
    {"key": "first_loss", "title": "Loss of the first step", "digits": 3},
    {"key": "last_loss", "title": f"mean of the last {LAST}", "digits": 3},
    {"key": "difference", "title": "Largest difference from lora's, of a step", "digits": 6},
]
Batch = tuple[np.ndarray, np.ndarray]


def batches(data: Path, tokenizer: Any, steps: int, rows: int, tokens: int) -> list[Batch]:
    """Return ids and labels, int64 [rows, tokens], of each step: pieces of WikiText-2."""
    text = (data / "wikitext2" / "train.txt").read_text(encoding="utf-8")[:2_000_000]
    ids = np.array(tokenizer(text, verbose=False)["input_ids"], np.int64)
    starts = np.random.default_rng(0).integers(0, len(ids) - tokens, (steps, rows))
    pieces = [np.stack([ids[start : start + tokens] for start in some]) for some in starts]
    return [(piece, piece) for piece in pieces]


def opened(method: str) -> Any:
    """Return a session with a pair on all seven linear layers."""
    fields = {"rank": RANK, "alpha": 2.0 * RANK, "target_modules": TARGETS, "learning_rate": RATE}
    return open_session(load_model(MODEL, dtype="float32"), method_config(method, fields), 0)


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def first_order(session: Any, start: Any, given: list[Batch]) -> list[float]:
    """Return the loss of each step."""
    session.load_adapter(start)
    return [session.step(*batch, step, RATE).loss for step, batch in enumerate(given)]


def zeroth_order(session: Any, start: Any, given: list[Batch], rate: float) -> list[float]:
    """Return the mean of each step's two losses."""
    values = dict(start.tensors)
    losses = []

    def loss_at(batch: Batch, z: dict[str, np.ndarray], distance: float) -> float:
        moved = {name: value + np.float32(distance) * z[name] for name, value in values.items()}
        session.load_adapter(replace(start, tensors=moved))
        nll, counts = session.evaluate(*batch)
        return float(nll.astype(np.float64).sum() / counts.sum())

    for step, batch in enumerate(given):
        random = np.random.default_rng((1, step))
        z = {
            name: random.standard_normal(value.shape, np.float32) for name, value in values.items()
        }
        ends = [loss_at(batch, z, distance) for distance in (SCALE, -SCALE)]
        slope = (ends[0] - ends[1]) / (2 * SCALE)
        values = {
            name: value - np.float32(rate * slope) * z[name] for name, value in values.items()
        }
        losses.append(fmean(ends))
    return losses


def row_of(method: str, rate: float, losses: list[float], lora: list[float]) -> dict[str, Any]:
    """Return a row of the table, with the curve."""
    first = method != "mezo"
    difference = max(abs(one - other) for one, other in zip(losses, lora, strict=True))
    row = {
        "method": method,
        "learning_rate": rate,
        "first_loss": losses[0],
        "last_loss": fmean(losses[-LAST:]),
        "difference": difference if first else None,
        "loss_curve": [round(loss, 5) for loss in losses],
    }
    print({name: value for name, value in row.items() if name != "loss_curve"}, flush=True)
    return row


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train each method."""
    session = opened("mesp")
    start = session.adapter()
    tokenizer = load_model(MODEL, dtype="float32").tokenizer
    given = batches(args.data, tokenizer, args.steps, args.rows, args.tokens)

    def run(train: Callable[..., list[float]], *more: Any) -> list[float]:
        return train(session, start, given, *more)

    mesp = run(first_order)
    print("mesp", fmean(mesp[-LAST:]), flush=True)
    mezo = {rate: run(zeroth_order, rate) for rate in MEZO_RATES}
    print({rate: fmean(losses[-LAST:]) for rate, losses in mezo.items()}, flush=True)
    session = opened("lora")
    lora = run(first_order)
    best = min(mezo, key=lambda rate: fmean(mezo[rate][-LAST:]))
    return [
        row_of("lora", RATE, lora, lora),
        row_of("mesp", RATE, mesp, lora),
        row_of("mezo", best, mezo[best], lora),
    ]


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw each method's running mean of the loss to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), dpi=150)
    for row in rows:
        means = np.convolve(row["loss_curve"], np.full(WINDOW, 1 / WINDOW), "valid")
        # Two curves that are one are both to be seen.
        style: dict[str, Any] = {"linewidth": 5, "alpha": 0.35} if row["method"] == "lora" else {}
        numbers = np.arange(WINDOW, WINDOW + len(means))
        axes.plot(numbers, means, color=COLORS[row["method"]], label=row["method"], **style)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss, mean of {WINDOW} steps (nats a token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def main() -> None:
    """Measure the curves, or draw those of a result."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", type=Path, default=Path("../shared/data"))
        parser.add_argument("--steps", type=int, default=160)
        parser.add_argument("--rows", type=int, default=2)
        parser.add_argument("--tokens", type=int, default=48)
        parser.add_argument("--from-results", type=Path, help="draw the curves of this result")
        parser.add_argument("--plot", type=Path, help="PNG file")

    args = parse_args(__doc__, more, repeats=1)
    if args.from_results:
        draw(json.loads(args.from_results.read_text(encoding="utf-8"))["rows"], args.plot)
        return
    torch.set_num_threads(1)
    rows = measured(args)
    if args.plot:
        draw(rows, args.plot)
    notes = [
        f"SmolLM2-135M, rank {RANK} on all seven linear layers, AdamW; {args.steps} steps of "
        f"{args.rows} rows of {args.tokens} tokens of WikiText-2. MeZO: one query, a scale of "
        f"{SCALE:g}, the best of the rates {', '.join(f'{rate:g}' for rate in MEZO_RATES)}."
    ]
    finish("mesp/curves", rows, args, COLUMNS, title="Training loss", notes=notes)


if __name__ == "__main__":
    main()
