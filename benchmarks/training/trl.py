"""A step on preference pairs: MeSP beside TRL with peft, the same rows, LoRA and float32 weights.

    python -m benchmarks.training.trl --record
    python -m benchmarks.training.trl --objectives simpo --repeats 3
    python -m benchmarks.training.trl --device cuda --shape Qwen2.5-1.5B --repeats 10 --record

Each trains in a process of its own, a step of one and then of the other. TRL trains by its own
`train()` with its defaults, so it recomputes blocks (gradient checkpointing). Its head's kernel for
dpo needs a GPU: on a CPU its log likelihoods are computed in plain PyTorch; its trainer of simpo
runs as it is. The likelihoods before training are computed before the first step by both. On a GPU
both have the weights of `--shape`, random, in bfloat16; memory is what PyTorch allocated there.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, median, parse_args
from benchmarks.training.preferences import encoded, pairs

LORA: dict[str, Any] = {
    "rank": 8,
    "alpha": 16.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
RATE = 1e-4
NEEDS = ("trl",)
STREAMED = "ours, weights streamed"
SYSTEMS = {"cpu": ("ours", "trl"), "cuda": ("ours", STREAMED, "trl")}
COLUMNS = [
    {"key": "objective", "title": "Objective"},
    {"key": "system", "title": "System"},
    {"key": "tokens", "title": "Tokens a step"},
    {"key": "step_s", "title": "Step (s)", "digits": 2},
    {"key": "cpu_s", "title": "CPU (s)", "digits": 2},
    {"key": "peak_bytes", "title": "Peak (MB)", "scale": 1e-6, "digits": 0},
    {"key": "above_bytes", "title": "above the loaded model (MB)", "scale": 1e-6, "digits": 0},
    {"key": "memory_of_trl", "title": "Peak, of TRL's", "digits": 2},
    {"key": "above_of_trl", "title": "above the model, of TRL's", "digits": 2},
    {"key": "time_of_trl", "title": "Time, of TRL's", "digits": 2},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data")
    parser.add_argument("--objectives", nargs="+", default=["dpo", "simpo"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", help="of random weights, with the tokenizer of --model")


def save_shape(args: argparse.Namespace, folder: str) -> None:
    """Write random bfloat16 weights of `--shape`, and a tokenizer whose ids they have."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.offload.model import model_config
    from ondevice.models import load_model

    config = model_config(args.shape)[1]
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    load_model(args.model).tokenizer.save_pretrained(folder)
    del model
    gc.collect()


def longest_pairs(args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the made pairs with the longest answers, the rows of every step."""
    made = pairs(args.data / "alpaca/train.jsonl", "short", 400)
    made.sort(key=lambda row: -len(row["rejected"]))
    return made[: args.rows]


class GpuMemory:
    """What PyTorch allocates on the GPU, in bytes; its peak is counted from here on."""

    def __init__(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def figures(self) -> dict[str, int]:
        import torch

        peak = torch.cuda.max_memory_allocated()
        return {"peak_bytes": peak, "above_bytes": peak - self.before}


class Memory:
    """Resident memory of this process, in bytes; its peak is counted from here on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self.before = self.read("VmRSS")

    @staticmethod
    def read(name: str) -> int:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {name}")

    def figures(self) -> dict[str, int]:
        peak = self.read("VmHWM")
        return {"peak_bytes": peak, "above_bytes": peak - self.before}


class Turns:
    """A worker's side of the steps: each waits for its turn, and sends its seconds."""

    def __init__(self, pipe: Any, device: str) -> None:
        self.pipe, self.device = pipe, device

    def begin(self) -> None:
        self.pipe.recv()
        self.began = time.perf_counter(), time.process_time()

    def end(self, tokens: int) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        wall, cpu = self.began
        self.pipe.send((time.perf_counter() - wall, time.process_time() - cpu, tokens))


def ours(
    args: argparse.Namespace, name: str, turns: Turns, streamed: bool = False
) -> dict[str, int]:
    """Train with MeSP."""
    from ondevice import method_config, open_session
    from ondevice.data.batching import Batches
    from ondevice.models import load_model, open_model
    from ondevice.objectives import objective
    from ondevice.training.preferences import PreferenceBatches, Preferences

    settings = dict(LORA)
    loaded: Any
    if streamed:
        loaded = open_model(args.model, dtype=args.dtype)
        settings["weight_placement"] = "streamed"
    else:
        loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    memory = Memory() if args.device == "cpu" else GpuMemory()
    config = method_config("mesp", settings)
    session: Any = open_session(loaded, config, 0, device=args.device)
    dataset = encoded(longest_pairs(args), loaded.tokenizer)
    learns = Preferences(objective(name), dataset, None, 0, {})
    with tempfile.TemporaryDirectory() as folder:
        learns.begin(session, Path(folder))
    batches = PreferenceBatches(learns, Batches(dataset, args.rows, None, 0, 0))
    for step in range(args.repeats + 1):
        batch = batches.at(step)
        turns.begin()
        learns.step(session, batch, step, RATE)
        turns.end(int(batch.ids.size))
    return memory.figures()


def theirs(args: argparse.Namespace, name: str, turns: Turns) -> dict[str, int]:
    """Train with TRL and peft."""
    import torch
    import trl
    import trl.trainer.utils
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    from ondevice.models import load_model

    peer: Any = trl
    loaded = load_model(args.model)
    tokenizer = loaded.tokenizer
    path = str(loaded.source.path)
    del loaded
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype))
    model.to(args.device)
    memory = Memory() if args.device == "cpu" else GpuMemory()
    lora = LoraConfig(
        r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=list(LORA["target_modules"])
    )
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{
                side: [{"role": "assistant", "content": row[side]}]
                for side in ("chosen", "rejected")
            },
        }
        for row in longest_pairs(args)
    ]
    dataset = Dataset.from_list(rows * (args.repeats + 1))

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end(0)

    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "use_cpu": args.device == "cpu",
            "bf16": args.device == "cuda",
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "learning_rate": RATE,
            "max_steps": args.repeats + 1,
            "per_device_train_batch_size": args.rows,
            "dataloader_pin_memory": False,
        }
        shared = {"train_dataset": dataset, "processing_class": tokenizer}
        shared["callbacks"] = [Steps()]
        if name == "simpo":
            config = CPOConfig(**common, loss_type="simpo", cpo_alpha=0.0, max_length=512)
            trainer: Any = CPOTrainer(get_peft_model(model, lora), args=config, **shared)
        else:
            if args.device == "cpu":
                peer.trainer.utils._ChunkedLogProbFunction = PlainHead
            config = peer.DPOConfig(**common, precompute_ref_log_probs=True)
            trainer = peer.DPOTrainer(model, args=config, peft_config=lora, **shared)
        trainer.train()
    return memory.figures()


class PlainHead:
    """The log likelihoods of TRL's head in plain PyTorch."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, targets: Any, *_: Any) -> tuple[Any, ...]:
        import torch

        logits = torch.nn.functional.linear(hidden, weight, bias)
        logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        zeros = torch.zeros_like(logp.detach())
        return logp, zeros, zeros, zeros, zeros.bool()


def work(args: argparse.Namespace, system: str, name: str, pipe: Any) -> None:
    """Run one system in this process."""
    import torch

    torch.set_num_threads(args.threads)
    run = {"ours": ours, STREAMED: partial(ours, streamed=True), "trl": theirs}[system]
    pipe.send(run(args, name, Turns(pipe, args.device)))


def measure(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Train both systems with one objective, a step of each in turn; the first is not counted."""
    context = get_context("spawn")
    pipes: dict[str, Any] = {}
    systems = SYSTEMS[args.device]
    for system in systems:
        pipes[system], end = context.Pipe()
        context.Process(target=work, args=(args, system, name, end), daemon=True).start()
        end.close()  # so that a worker that fails ends the run
    times: dict[str, list[tuple[float, float, int]]] = {system: [] for system in systems}
    for step in range(args.repeats + 1):
        for system in systems[:: 1 if step % 2 else -1]:
            pipes[system].send("step")
            found = pipes[system].recv()
            if step:
                times[system].append(found)
    rows = []
    for system in systems:
        walls, cpus, tokens = zip(*times[system], strict=True)
        row = {"objective": name, "system": system, "step_s": list(walls), "cpu_s": list(cpus)}
        rows.append({**row, "tokens": tokens[0] or None, **pipes[system].recv()})
    *own, peer = rows
    clock = "cpu_s" if args.device == "cpu" else "step_s"
    for mine in own:
        mine["memory_of_trl"] = mine["peak_bytes"] / peer["peak_bytes"]
        mine["above_of_trl"] = mine["above_bytes"] / peer["above_bytes"]
        mine["time_of_trl"] = median(mine[clock]) / median(peer[clock])
    return rows


def main() -> None:
    """Measure; print the table."""
    args = parse_args(__doc__, arguments, repeats=4)
    args.dtype = "float32" if args.device == "cpu" else "bfloat16"
    named = args.shape or args.model
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            save_shape(args, folder)
            args.model = folder
        rows = [row for name in args.objectives for row in measure(args, name)]
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    notes = [
        f"{named}, {args.dtype}, {args.rows} pairs a step, LoRA of rank {LORA['rank']} on all "
        f"linear layers, {args.threads} thread; load of the machine after the run: {load}."
    ]
    if args.device == "cpu":
        notes.append(
            "Time is CPU seconds. TRL's dpo computes its head in plain PyTorch, as its kernel "
            "needs a GPU."
        )
    title = "A step on preference pairs: MeSP and TRL with peft"
    finish("training/trl", rows, args, COLUMNS, title=title, notes=notes)


if __name__ == "__main__":
    main()
