"""Twenty instruct checkpoints of 2026 at tiny sizes: three steps, read back in peft, and the plan.

    python -m benchmarks.models.checkpoints
    python -m benchmarks.models.checkpoints --only SmolLM3-3B,gemma-3-4b-it

One process plans each LoRA run as `ondevice train` does, trains three steps, and compares logits of
the trained model with those of peft over the whole checkpoint. Measured is the high-water mark of
resident memory of the run, libraries included; it begins anew for each (Linux), but the process
keeps some of what the ones before took.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish, parse_args

NEEDS = ("torch",)
ROWS = ROOT / "ondevice" / "data" / "demo" / "tickets.csv"
COLUMNS = [
    {"key": "checkpoint", "title": "Checkpoint"},
    {"key": "model_type", "title": "Class"},
    {"key": "loss_first", "title": "First loss", "digits": 3},
    {"key": "loss_last", "title": "Third loss", "digits": 3},
    {"key": "peft_difference", "title": "Logits in peft, difference / largest", "digits": 9},
    {"key": "planned_bytes", "title": "Planned (MB)", "digits": 0, "scale": 1e-6},
    {"key": "measured_bytes", "title": "Measured (MB)", "digits": 0, "scale": 1e-6},
    {"key": "ratio", "title": "Planned / measured", "digits": 2},
]


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Plan and train one checkpoint; return its row."""
    import ondevice
    from ondevice.training.metrics import status_bytes

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    settings: dict[str, Any] = {"method": "lora", "batch_size": 4}
    source = str(folder / "model")
    plan = ondevice.plan(source, str(ROWS), **settings)
    run = ondevice.train(
        source, str(ROWS), steps=3, out=folder / "run", learning_rate=1e-2, **settings
    )
    measured = status_bytes("VmHWM")
    return {
        "checkpoint": name,
        "model_type": json.loads((folder / "model" / "config.json").read_text())["model_type"],
        "loss_first": run.result.first_loss,
        "loss_last": run.result.final_loss,
        "peft_difference": _difference(source, str(folder / "run" / "adapter")),
        "planned_bytes": plan.total_bytes,
        "measured_bytes": measured,
        "ratio": plan.total_bytes / (measured or 1),
    }


def _difference(source: str, adapter: str) -> float:
    """Return the largest difference of logits, peft's from ours, as a part of the largest logit."""
    import peft
    import torch

    from ondevice.artifact.adapter import load_adapter
    from ondevice.models import load_model
    from ondevice.nn.adapters import apply_adapter

    ids = torch.arange(1, 17)[None] * 11 % 250
    own, theirs = load_model(source), load_model(source)
    apply_adapter(own, load_adapter(adapter))
    wrapped = peft.PeftModel.from_pretrained(theirs.model, adapter).eval()
    with torch.no_grad():
        one = own.model(input_ids=ids, use_cache=False).logits
        other = wrapped(input_ids=ids, use_cache=False).logits
    return float((one - other).abs().max() / one.abs().max())


def main() -> None:
    """Every checkpoint, one after the other."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default="", help="some of them, by name, with commas")

    args = parse_args(__doc__, add, repeats=1)
    from tests.models.checkpoints import CHECKPOINTS, save_checkpoint

    rows = []
    for name in args.only.split(",") if args.only else CHECKPOINTS:
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(Path(folder) / "model", name)
            rows.append(measure(name, Path(folder)))
        print(f"{name}: {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    finish("models/checkpoints", rows, args, COLUMNS, title="Twenty checkpoints of 2026")


if __name__ == "__main__":
    main()
