"""SmolLM2 with weights that lie on no 4-bit grid: the models that a low-bit form is measured on.

    python -m benchmarks.models.off_grid FOLDER              FOLDER/dithered and FOLDER/tuned
    python -m benchmarks.models.off_grid FOLDER --steps 0    only the first

The package is published as Q4_1, so rounding its matrices to `q4` changes nothing and measures
nothing. `dithered` moves each weight of the blocks uniformly inside its cell. `tuned` trains all
parameters of that on WikiText and Alpaca, until its text is again as likely as before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.mesp.blocks import MODEL
from ondevice.models import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

GROUP = 32
LEVELS = 15
CHECKED_ROWS = 16
"""Of validation text whose loss is printed."""


def dither(weight: Tensor, random: torch.Generator) -> Tensor:
    """Move each weight uniformly inside its cell of a grid of 16 levels for each 32 inputs."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    cell = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / LEVELS
    drawn = torch.rand(groups.shape, generator=random).to(weight.device)
    moved = groups + (drawn - 0.5) * cell
    return moved.flatten(1).to(weight.dtype)


def texts(data: Path, part: str) -> str:
    """Join WikiText and Alpaca's answers."""
    wiki = (data / "wikitext2" / f"{part}.txt").read_text(encoding="utf-8")
    lines = (data / "alpaca" / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    alpaca = "\n\n".join(f"{row['instruction']}\n{row['input']}\n{row['output']}" for row in rows)
    size = min(len(wiki), len(alpaca), 4_000_000)
    return wiki[:size] + alpaca[:size]


def batches(ids: Tensor, rows: int, tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield random pieces, int64 [rows, tokens], without end."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - tokens, (rows,), generator=random)
        yield torch.stack([ids[start : start + tokens] for start in starts.tolist()])


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Return the mean loss of every next token."""
    ids = ids.to(model.device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def checked(model: Any, ids: Tensor, tokens: int) -> float:
    """Return the loss on the first pieces of validation text."""
    with torch.no_grad():
        pieces = ids[: CHECKED_ROWS * tokens].view(-1, 8, tokens)
        return float(torch.stack([loss_of(model, piece) for piece in pieces]).mean())


def tune(model: Any, train: Tensor, valid: Tensor, args: argparse.Namespace) -> None:
    """Train all parameters with AdamW; the rate rises over a tenth of the steps and falls to 0."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.0)
    pieces = batches(train, args.rows, args.tokens, seed=0)
    warm = max(1, args.steps // 10)
    for step in range(args.steps):
        share = min((step + 1) / warm, (args.steps - step) / (args.steps - warm))
        optimizer.param_groups[0]["lr"] = args.rate * share
        started = time.perf_counter()
        loss = loss_of(model, next(pieces))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(step, float(loss), f"{time.perf_counter() - started:.1f} s", flush=True)
    print("tuned", checked(model, valid, args.tokens), flush=True)


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    loaded = load_model(MODEL, dtype="float32", device=args.device)
    model: Any = loaded.model
    tokenizer: Any = loaded.tokenizer
    train, valid = (
        torch.tensor(tokenizer(texts(args.data, part)[:2_000_000], verbose=False)["input_ids"])
        for part in ("train", "valid")
    )
    print("published", checked(model, valid, args.tokens), flush=True)
    random = torch.Generator().manual_seed(0)
    for layer in range(loaded.dims.layers):
        for target in loaded.family.targets(layer):
            linear: Any = loaded.family.linear(layer, target)
            linear.weight.data = dither(linear.weight.data, random)
    print("dithered", checked(model, valid, args.tokens), flush=True)
    save(model, tokenizer, args.folder / "dithered")
    if args.steps:
        tune(model, train, valid, args)
        save(model, tokenizer, args.folder / "tuned")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `--model` takes."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
