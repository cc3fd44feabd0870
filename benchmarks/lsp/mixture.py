"""A mixture whose experts change in subspaces of their own, next to training in full: the loss, and
the bytes of gradients that cross the bus.

    python -m benchmarks.lsp.mixture --record

A small Qwen3-MoE first learns WikiText-2's bytes from nothing, in full. Its weights then learn
SST-2's sentences for `--steps` steps: in full, and by LSP with each variant and rate. Losses are
of rows that no step saw. `off` is how far a loss is above that of full training with the same seed,
which draws rows and projectors.

A variant is a subspace and words after colons: `48:signs:tables` has `projector_values: signs` with
`nonzeros: 1` instead of four normal numbers a row, and `project_tables: false`; `followed` has
`projector_values: followed`; `every25` checks projectors every 25 steps; `int4` is of gradients;
`@2e-3` is its own rate. Moments and changes that a check moves are counted apart, in the mean of
steps.
With `--log` finished runs are kept there, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_arguments, finish, parse_args

NEEDS = ()
NAME = "lsp/mixture"
SIZES = {
    "layers": 3, "hidden": 128, "intermediate": 256, "moe_intermediate_size": 96, "num_experts": 8,
    "num_experts_per_tok": 2, "tied": False,
}  # fmt: skip
ROWS, LENGTH, HELD_OUT, LAST = 4, 64, 64, 50
COLUMNS = [
    {"key": "variant", "title": "Variant"},
    {"key": "rate", "title": "Rate", "digits": 4},
    {"key": "loss", "title": "Held-out loss", "digits": 4},
    {"key": "off", "title": "above full", "digits": 4},
    {"key": "trained", "title": f"Training loss, last {LAST} steps", "digits": 4},
    {"key": "gradient_bytes", "title": "Gradients a step (bytes)"},
    {"key": "of_full", "title": "of full", "digits": 3},
    {"key": "check_bytes", "title": "Checks, of a step (bytes)"},
]
STATES = 3 * 4
"""Bytes of a number of a change that a refresh moves each way: itself and its moments, float32."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of sst2/ and wikitext2/"
    )
    parser.add_argument("--before", type=int, default=600, help="steps on WikiText-2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-3, help="of full training")
    parser.add_argument("--variants", default="48,48:signs,48:signs:tables")
    parser.add_argument("--rates", default="1e-3,3e-3", help="of LSP")
    parser.add_argument("--seeds", type=int, default=1)
    add_arguments(parser, "--log")


def settings_of(variant: str) -> dict[str, Any]:
    """LSP's settings of a variant."""
    subspace, *words = variant.split(":")
    settings: dict[str, Any] = {"subspace": int(subspace), "nonzeros": 4}
    for word in words:
        if word == "signs":
            settings |= {"projector_values": "signs", "nonzeros": 1}
        elif word == "followed":
            settings["projector_values"] = "followed"
        elif word == "tables":
            settings["project_tables"] = False
        elif word == "int4":
            settings["gradient_dtype"] = "int4"
        else:
            settings["check_every"] = int(word.removeprefix("every"))
    return settings


class Runs:
    """Runs from the same weights, those in the log not again."""

    def __init__(self, args: Any) -> None:
        self.args = args
        wiki = (args.data / "wikitext2" / "train.txt").read_text(encoding="utf-8")
        lines = (args.data / "sst2" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        self.wiki = bytes_of(wiki)
        rows = [json.loads(line)["prompt_fields"]["sentence"] for line in lines]
        self.sentences = bytes_of("\n".join(rows))
        self.found: dict[str, dict[str, Any]] = {}
        if args.log is not None and args.log.exists():
            entries = [json.loads(line) for line in args.log.read_text().splitlines()]
            self.found = {entry.pop("run"): entry for entry in entries}

    @cached_property
    def start(self) -> dict[str, Any]:
        """The loss and the weights before."""
        path = None if self.args.log is None else self.args.log.with_suffix(".pt")
        if path is not None and path.exists():
            return torch.load(path)
        start = learn("slideformer", None, self.wiki, self.args.before, self.args.rate, 0)
        if path is not None:
            torch.save(start, path)
        return start

    def run(self, variant: str, rate: float, seed: int) -> dict[str, Any]:
        """The result of a run."""
        key = f"{variant} {rate:g} {seed} {self.args.before} {self.args.steps}"
        if key not in self.found:
            name = "slideformer" if variant == "full" else "lsp"
            lsp = {} if variant == "full" else settings_of(variant)
            work = (self.start["weights"], self.sentences, self.args.steps, rate, seed)
            found = learn(name, *work, **lsp)
            del found["weights"]
            print(key, found, flush=True)
            self.found[key] = found
            if self.args.log is not None:
                with self.args.log.open("a") as file:
                    file.write(json.dumps({"run": key, **found}) + "\n")
        return self.found[key]

    def row(self, variant: str, rate: float) -> dict[str, Any]:
        """The row of a variant, a value for each seed."""
        seeds = range(self.args.seeds)
        whole = [self.run("full", self.args.rate, seed) for seed in seeds]
        found = [self.run(variant, rate, seed) for seed in seeds]
        pairs = list(zip(found, whole, strict=True))
        sent = found[0]["gradient_bytes"]
        return {
            "variant": variant, "rate": rate, "seeds": list(seeds), "gradient_bytes": sent,
            "loss": [one["loss"] for one in found], "trained": [one["trained"] for one in found],
            "off": [one["loss"] / full["loss"] - 1 for one, full in pairs],
            "of_full": sent / whole[0]["gradient_bytes"],
            "check_bytes": found[0]["check_bytes"],
        }  # fmt: skip


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    runs = Runs(args)
    rows = [runs.row("full", args.rate)]
    for word in args.variants.split(","):
        variant, _, own = word.partition("@")
        rates = [own] if own else args.rates.split(",")
        rows += [runs.row(variant, float(rate)) for rate in rates]
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items())
    notes = [
        f"tiny:qwen3_moe ({sizes}), {args.before} steps on WikiText-2's bytes (held-out loss "
        f"{runs.start['loss']:.4f}), then {args.steps} on SST-2's; {ROWS} rows of {LENGTH} bytes a step, float32. "
        "Gradients are those of projected matrices and of all that is trained as it is."
    ]  # fmt: skip
    finish(NAME, rows, args, COLUMNS, title="LSP-Offload: a mixture's experts", notes=notes)


def learn(
    name: str, weights: Any, data: np.ndarray, steps: int, rate: float, seed: int, **settings: Any
) -> dict[str, Any]:
    """Train on the first nine tenths of `data`; the loss is of rows of the last one."""
    from ondevice.core.registry import method_config
    from ondevice.methods.lsp.engine import LspEngine
    from ondevice.models.load import tiny_model
    from ondevice.offload.engine import OffloadEngine

    family = tiny_model("qwen3_moe", 0, **SIZES).family
    if weights is not None:
        family.model.load_state_dict(weights)
    config: Any = method_config(name, {"compute": "float32", "threads": 1, **settings})
    engine: Any = (
        LspEngine(family, config, "cpu", seed)
        if name == "lsp"
        else OffloadEngine(family, config.fixed(), "cpu")
    )
    places = np.random.default_rng(1 + seed)
    ends = int(0.9 * len(data)), len(data) - LENGTH
    losses = []
    for step in range(steps):
        ids = rows_of(data, places.integers(0, ends[0] - LENGTH, ROWS))
        losses.append(engine.step(ids, ids, step, rate))
    matrices = [m for part in getattr(engine, "parts", ()) for _, m, _ in part.matrices]
    refreshed = sum(matrix.turn * matrix.numel for matrix in matrices)
    moved = [span[-1] for span in engine.spans if span[0] == "d2h" and span[1] != "activations"]
    held_out = rows_of(data, np.linspace(*ends, HELD_OUT).astype(np.int64))
    nll, labelled = engine.evaluate(held_out, held_out)
    engine.flush()
    trained = engine.weights() if isinstance(engine, LspEngine) else engine.store.masters()
    engine.close()
    return {
        "loss": float(nll.sum() / labelled.sum()),
        "trained": statistics.mean(losses[-LAST:]),
        "gradient_bytes": int(sum(moved)),
        "check_bytes": STATES * refreshed // steps,
        "weights": trained,
    }


def bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def rows_of(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.stack([data[place : place + LENGTH] for place in places])


if __name__ == "__main__":
    main()
