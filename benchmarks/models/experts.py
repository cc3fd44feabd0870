"""Mixtures of experts in block programs: what a step reads of the experts in the mapped file.

    python -m benchmarks.models.experts

Random models of three families, exported in 4 bits and in 8 bits for `android-cpu`. A step's rows are
texts of the demo rows. What is counted are the experts whose weights a function was given.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish, parse_args

NEEDS = ("executorch",)
ROWS = ROOT / "ondevice" / "data" / "demo" / "tickets.csv"
EXPERTS = 32
A_TOKEN = 4
LENGTHS = (8, 16, 64)
STEPS = 8
FORMS = ("q4", "8da8w")
SIZES: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"layers": 4, "num_experts": EXPERTS, "num_experts_per_tok": A_TOKEN,
                  "moe_intermediate_size": 128},
    "lfm2_moe": {"layers": 5, "num_experts": EXPERTS, "num_experts_per_tok": A_TOKEN,
                 "moe_intermediate_size": 128},
    "granitemoe": {"layers": 4, "num_local_experts": EXPERTS, "num_experts_per_tok": A_TOKEN,
                   "intermediate": 512},
}  # fmt: skip
"""Four layers of each have experts."""
COLUMNS = [
    {"key": "family", "title": "Family"},
    {"key": "form", "title": "Form"},
    {"key": "tokens", "title": "Tokens a step"},
    {"key": "read", "title": "Experts read, of 128", "digits": 1},
    {"key": "read_bytes", "title": "Read a step (kB)", "digits": 0, "scale": 1e-3},
    {"key": "bytes_per_token", "title": "Read a token (kB)", "digits": 0, "scale": 1e-3},
    {"key": "all_bytes", "title": "All experts (kB)", "digits": 0, "scale": 1e-3},
]


def batches(length_tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return one row of text a step, int64 [1, length_tokens]: bytes are the tiny tokenizer's ids."""
    with open(ROWS, newline="", encoding="utf-8") as file:
        texts = [" ".join(row).encode() for row in csv.reader(file)][1:]
    long = [text for text in texts if len(text) >= length_tokens][:STEPS]
    rows = [np.frombuffer(text[:length_tokens], np.uint8).astype(np.int64)[None] for text in long]
    return [(row, row) for row in rows]


def measure(family: str, form: str, folder: Path) -> list[dict[str, Any]]:
    """Export one family's model in one form and step; return a row for each length."""
    from ondevice.api import export as artifacts
    from ondevice.api.open import open_artifact
    from ondevice.api.runfile import RunConfig
    from ondevice.models import save_tiny

    model = save_tiny(folder / "model", family, **SIZES, **FAMILIES[family])
    settings = {
        "model.source": str(model), "method.name": "mesp", "method.optimizer": "sgd",
        "export.lengths_tokens": list(LENGTHS), "export.batch_size": 1,
        "export.eval_batch_size": 1, "export.quantize": form, "export.check_steps": 1,
    }  # fmt: skip
    artifacts.export(RunConfig.load(None, settings), folder / "program")
    session: Any = open_artifact(folder / "program")
    rows = []
    for length in LENGTHS:
        figures = [
            session.step(*batch, step, 1e-4).experts for step, batch in enumerate(batches(length))
        ]
        mean = {key: statistics.fmean(one[key] for one in figures) for key in figures[0]}
        each = mean["bytes"] / mean["read"]
        rows.append({
            "family": family, "form": form, "tokens": length, "read": mean["read"], "read_bytes": mean["bytes"],
            "bytes_per_token": mean["bytes_per_token"], "all_bytes": each * mean["all"],
            "repeats": len(figures),
        })  # fmt: skip
        assert mean["all"] == 4 * EXPERTS, mean
    return rows


def main() -> None:
    """Every family."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--families", default=",".join(FAMILIES), help="default: %(default)s")

    args = parse_args(__doc__, add, repeats=1)
    rows = []
    for family in args.families.split(","):
        for form in FORMS:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(family, form, Path(folder))
    notes = [
        f"Random models, four layers with {EXPERTS} experts, of which a token takes {A_TOKEN}; one row"
        f" a step, means of {STEPS} steps. Forward and backward count an expert once. In `8da8w` an"
        " expert's matrices are 8-bit weights."
    ]
    finish("models/experts", rows, args, columns=COLUMNS, notes=notes,
           title="What a step reads of a mixture's experts")  # fmt: skip


if __name__ == "__main__":
    main()
