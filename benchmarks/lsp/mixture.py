"""A mixture whose experts change in subspaces of their own, next to training in full: the loss, and
the bytes of gradients that cross the bus.

    python -m benchmarks.lsp.mixture --record

A small Qwen3-MoE first learns WikiText-2's bytes from nothing, in full. Its weights then learn
SST-2's sentences for `--steps` steps: in full, and by LSP with each subspace and rate. Losses are
of rows that no step saw. `off` is how far a loss is above that of full training.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import finish, parse_args

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
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of sst2/ and wikitext2/"
    )
    parser.add_argument("--before", type=int, default=600, help="steps on WikiText-2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-3, help="of full training")
    parser.add_argument("--subspaces", default="32,48")
    parser.add_argument("--rates", default="1e-3,2e-3", help="of LSP")


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    wiki = (args.data / "wikitext2" / "train.txt").read_text(encoding="utf-8")
    lines = (args.data / "sst2" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    sentences = bytes_of("\n".join(json.loads(line)["prompt_fields"]["sentence"] for line in lines))
    start = learn("slideformer", None, bytes_of(wiki), args.before, args.rate)
    print("before", start["loss"], flush=True)
    rows = [{"variant": "full", "rate": args.rate} | tuned(start, sentences, args, {}, args.rate)]
    for subspace in map(int, args.subspaces.split(",")):
        for rate in map(float, args.rates.split(",")):
            own = tuned(start, sentences, args, {"subspace": subspace, "nonzeros": 4}, rate)
            rows.append({"variant": f"lsp s{subspace}", "rate": rate} | own)
    for row in rows:
        row["off"] = row["loss"] / rows[0]["loss"] - 1
        row["of_full"] = row["gradient_bytes"] / rows[0]["gradient_bytes"]
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items())
    notes = [
        f"tiny:qwen3_moe ({sizes}), {args.before} steps on WikiText-2's bytes (held-out loss {start['loss']:.4f}), "
        f"then {args.steps} on SST-2's; {ROWS} rows of {LENGTH} bytes a step, float32, drawn projectors. "
        "Gradients are those of projected matrices and of all that is trained as it is."
    ]  # fmt: skip
    finish(NAME, rows, args, COLUMNS, title="LSP-Offload: a mixture's experts", notes=notes)


def tuned(
    start: dict[str, Any], sentences: np.ndarray, args: Any, lsp: dict[str, Any], rate: float
) -> dict[str, Any]:
    """The row of a variant."""
    name = "lsp" if lsp else "slideformer"
    found = learn(name, start["weights"], sentences, args.steps, rate, **lsp)
    del found["weights"]
    print(name, lsp, rate, found, flush=True)
    return found


def learn(
    name: str, weights: Any, data: np.ndarray, steps: int, rate: float, **settings: Any
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
    kind = LspEngine if name == "lsp" else OffloadEngine
    engine = kind(family, config if name == "lsp" else config.fixed(), "cpu")
    places = np.random.default_rng(1)
    ends = int(0.9 * len(data)), len(data) - LENGTH
    losses = []
    for step in range(steps):
        ids = rows_of(data, places.integers(0, ends[0] - LENGTH, ROWS))
        losses.append(engine.step(ids, ids, step, rate))
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
        "weights": trained,
    }


def bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def rows_of(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.stack([data[place : place + LENGTH] for place in places])


if __name__ == "__main__":
    main()
