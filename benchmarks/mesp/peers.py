"""An adapter's step on one GPU next to its peers': time, memory, and where the time goes.

python -m benchmarks.mesp.peers                    8 layers of an 8B shape, bfloat16 and NF4, and Qwen3-0.6B's shape
python -m benchmarks.mesp.peers --profile          the same, and a table of kernels of each method
python -m benchmarks.mesp.peers --groups 3         longer rows, which are not among these

Rank 8 on all seven linears, AdamW, random weights. Every method is a process of its own, and steps
are taken in turns; PyTorch's allocator is never emptied. Peers are peft with liger-kernel and
transformers' checkpointing, and Unsloth if it can be imported: it needs wheels of unsloth and
unsloth_zoo with `--no-deps` in a version that takes the installed transformers, and of trl, datasets,
diffusers, cut_cross_entropy, tyro, msgspec, hf_transfer, structlog and bitsandbytes.

Memory is the peak of allocated bytes less the frozen weights; of CUDA graphs, what their pools hold.
Shapes grow, as a run has the memory of its largest one. `method.recompute: auto` computes nothing
again on a GPU that has the memory. With `--out` the file is written after each group.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.committed import write
from benchmarks.common import ROOT, finish, median, parse_args, result

NEEDS = ("cuda",)
TITLE = "An adapter's step next to its peers'"
MODELS: dict[str, dict[str, Any]] = {
    "8B, 8 layers": {
        "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip
GROUPS = [
    ("8B, 8 layers", None, [(1, 2048), (1, 8192)]),
    ("8B, 8 layers", 4, [(1, 2048), (1, 8192)]),
    ("Qwen3-0.6B", None, [(1, 128), (4, 512), (4, 2048)]),
    ("8B, 8 layers", None, [(4, 2048), (1, 32768)]),
]
OURS: dict[str, dict[str, Any]] = {
    "ours, all computed again": {"recompute": "all"},
    "ours, nothing computed again": {"recompute": "none"},
    "ours, inputs on the host": {"recompute": "all", "activations": "host"},
}
IN_ITS_MEMORY = "ours, in Unsloth's memory"
ON_HOST: dict[str, Any] = {"recompute": "all", "activations": "host"}
FITTING: dict[tuple[str, str, int, int], dict[str, Any]] = {
    ("8B, 8 layers", "bfloat16", 1, 2048): ON_HOST,
    ("8B, 8 layers", "NF4", 1, 2048): {**ON_HOST, "loss_chunk_tokens": 256},
    ("8B, 8 layers", "bfloat16", 1, 8192): {**ON_HOST, "recompute": (8, 1, 3)},
    ("8B, 8 layers", "NF4", 1, 8192): {**ON_HOST, "recompute": (8, 1, 1)},
    ("8B, 8 layers", "bfloat16", 4, 2048): {**ON_HOST, "recompute": (8, 1, 3)},
    ("8B, 8 layers", "bfloat16", 1, 32768): {**ON_HOST, "recompute": (8, 2, 1)},
    ("Qwen3-0.6B", "bfloat16", 1, 128): {**ON_HOST, "loss_chunk_tokens": 32},
    ("Qwen3-0.6B", "bfloat16", 4, 512): {**ON_HOST, "loss_chunk_tokens": 128},
    ("Qwen3-0.6B", "bfloat16", 4, 2048): {**ON_HOST, "loss_chunk_tokens": 192},
}
"""Settings with which a step takes at most Unsloth's memory: the blocks' inputs on the host, which
makes room for the loss or for attention's output of 8 layers, gate and up of one or two, and the
projections of one to three; and less of the loss at once for small models."""
LORA: dict[str, dict[str, Any]] = {
    "ours, lora": {},
    "ours, lora without CUDA graphs": {"cuda_graphs": False},
}
"""Sessions of `lora`, which keep all activations and take no NF4."""
METHODS = (*OURS, IN_ITS_MEMORY, *LORA, "peft + liger", "Unsloth")
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "weights", "title": "Weights"},
    {"key": "rows", "title": "Rows"},
    {"key": "tokens", "title": "Tokens"},
    {"key": "method", "title": "Method"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "ratio", "title": "× Unsloth"},
    {"key": "step_bytes", "title": "Step (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "reserved_bytes", "title": "Reserved (MiB)", "scale": 2**-20, "digits": 0},
]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {
    "attention": ("flash", "fmha", "cudnn_generated", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas", "gemv"),
    "Triton": ("triton", "_rotate", "_swiglu", "_norm", "_loss", "rms_norm", "liger", "_rope"),
    "copies": ("memcpy", "memset"),
    "dequantise": ("dequantize", "kdequant"),
}
"""Parts of kernels' names by kind; the rest is element by element."""


def main() -> None:
    """Measure and write the table."""

    def more(parser: Any) -> None:
        parser.add_argument("--worker", nargs=3, metavar=("METHOD", "GROUP", "MODEL"))
        parser.add_argument("--methods", nargs="+", default=list(METHODS))
        parser.add_argument("--groups", type=int, nargs="+", default=[0, 1, 2])
        parser.add_argument("--profile", action="store_true")

    args = parse_args(__doc__, more)
    if args.worker:
        serve(args.worker[0], GROUPS[int(args.worker[1])], Path(args.worker[2]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in args.groups:
            rows += measure_group(number, args, Path(folder) / "model")
            if args.out:
                write(result("mesp/peers", rows, COLUMNS, title=TITLE), args.out)
    finish("mesp/peers", rows, args, columns=COLUMNS, title=TITLE)


def measure_group(number: int, args: Any, folder: Path) -> list[dict[str, Any]]:
    """Start a process for each method, and take their steps in turns."""
    name, bits, shapes = GROUPS[number]
    save_model(name, folder)
    started = {method: Worker(__file__, method, number, folder) for method in args.methods}
    workers = {method: worker for method, worker in started.items() if worker.ready()}
    rows = []
    for batch in shapes:
        results: dict[str, list[dict[str, Any]]] = {method: [] for method in workers}
        for turn in range(-4, args.repeats):
            names = list(workers)
            for method in reversed(names) if turn % 2 else names:
                answer = workers[method].ask(step=batch, number=turn)
                if turn >= 0 and answer is not None:
                    results[method].append(answer)
        if args.profile:
            for method, worker in workers.items():
                print(f"\n{name} {bits or 'bf16'} {batch} {method}:", flush=True)
                print((worker.ask(profile=batch) or {}).get("table"), flush=True)
        rows += table(name, bits, batch, results)
        print(*(line(row) for row in rows if row["tokens"] == batch[1]), sep="\n", flush=True)
    for worker in started.values():
        worker.end()
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row for people who wait."""
    sizes = [row[key] >> 20 for key in ("step_bytes", "reserved_bytes", "pool_bytes")]
    ratio = row["ratio"] and f"{row['ratio']:.2f}"
    shape = f"{row['model']} {row['weights']} {row['rows']} x {row['tokens']}"
    return f"| {shape} | {row['method']} | {median(row['step_s']):.4f} s | {ratio} | MiB {sizes}"


def table(
    name: str, bits: int | None, batch: tuple[int, int], results: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return a row for each method that has steps."""
    peer = [answer["s"] for answer in results.get("Unsloth", [])]
    return [
        {
            "model": name,
            "weights": "NF4" if bits else "bfloat16",
            "rows": batch[0],
            "tokens": batch[1],
            "method": method,
            "step_s": [answer["s"] for answer in answers],
            "ratio": median([a["s"] for a in answers]) / median(peer) if peer else None,
            "step_bytes": max(answer["step_bytes"] for answer in answers),
            "reserved_bytes": max(answer["reserved_bytes"] for answer in answers),
            "pool_bytes": max(answer["pool_bytes"] for answer in answers),
        }
        for method, answers in results.items()
        if answers
    ]


class Worker:
    """A method in a process of its own, which answers a line of JSON with another.

    Args:
        script: it runs this with `--worker METHOD`, and what else it is to know.
    """

    def __init__(self, script: str, method: str, *more: Any) -> None:
        self.method = method
        paths = os.environ.get("PYTHONPATH", "")
        self.process = subprocess.Popen(
            [sys.executable, "-P", script, "--worker", method, *map(str, more)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{paths}", "HF_HUB_OFFLINE": "1"},
        )

    def ready(self) -> bool:
        """Wait for the model; False if it cannot be had."""
        answer = self._read()
        print(f"{self.method}: {answer}", flush=True)
        return answer is not None

    def ask(self, **request: Any) -> dict[str, Any] | None:
        """Return the answer; None if the process has failed."""
        if self.process.poll() is not None or self.process.stdin is None:
            return None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        return None

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def serve(method: str, group: tuple[str, int | None, Any], folder: Path) -> None:
    """Take steps as they are asked for, until the input ends."""
    import torch

    torch.manual_seed(0)
    builds = {"peft + liger": peft_step, "Unsloth": unsloth_step, **dict.fromkeys(LORA, lora_step)}
    build = builds.get(method, our_step)
    step, weights = build(method, group[1], folder)
    vocab = MODELS[group[0]]["vocab_size"]
    answer({"weights_MiB": weights >> 20, "torch": torch.__version__})
    serve_steps(step, weights, vocab)


def serve_steps(step: Any, weights: int, vocab: int) -> None:
    """Take the steps, or their profiles, that standard input asks for."""
    import torch

    for line in sys.stdin:
        request = json.loads(line)
        batch = request.get("step") or request["profile"]
        ids = torch.randint(0, vocab, tuple(batch), generator=torch.Generator().manual_seed(0))
        if "profile" in request:
            answer({"table": profile(partial(step, ids, 100))})
            continue
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(ids, request["number"] + 4)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        pool, idle = pool_bytes()
        answer(
            {
                "s": seconds,
                "step_bytes": torch.cuda.max_memory_allocated() + idle - weights,
                "reserved_bytes": torch.cuda.memory_reserved() - weights,
                "pool_bytes": pool,
            }
        )


def answer(values: dict[str, Any]) -> None:
    print("answer " + json.dumps(values), flush=True)


def pool_bytes() -> tuple[int, int]:
    """Return what CUDA graphs keep for their replays, and how much of it counts as free."""
    import torch

    segments = torch.cuda.memory_snapshot()
    private = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    total = sum(s["total_size"] for s in private)
    return total, total - sum(s["allocated_size"] for s in private)


def profile(run: Any) -> str:
    """Return GPU milliseconds and kernels by kind, and the costliest kernels."""
    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as took:
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for event in took.events() or ():
        if event.device_type.name != "CUDA":
            continue
        low = event.name.lower()
        kind = next((k for k, words in KINDS.items() if any(w in low for w in words)), "element")
        milliseconds = event.device_time_total / 1e3
        spent[kind] += milliseconds
        counts[kind] += 1
        by_name[event.name[:110]] += milliseconds
        numbers[event.name[:110]] += 1
    lines = [f"wall {wall * 1e3:.1f} ms, kernels {sum(counts.values())}, {sum(spent.values()):.1f}"]
    lines += [f"  {kind}: {ms:.2f} ms in {counts[kind]}" for kind, ms in spent.most_common()]
    lines += [f"    {ms:8.3f} {numbers[n]:5d} {n}" for n, ms in by_name.most_common(24)]
    return "\n".join(lines)


def save_model(name: str, folder: Path) -> None:
    """Save a random model with a tokenizer, once for all methods."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ondevice.models.tiny import tiny_tokenizer

    marker = folder / "name"
    if marker.exists() and marker.read_text() == name:
        return
    shape = dict(MODELS[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20GB")
    tiny_tokenizer().save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    marker.write_text(name)


def load(folder: Path, device: str = "cuda") -> Any:
    """Return the saved model in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device, attn_implementation="sdpa"
    )


def wrapped(folder: Path, packs: bool) -> Any:
    """Return the saved model as a run has it, on the CPU if its matrices are to be packed."""
    from ondevice.models.load import wrap
    from ondevice.models.registry import family_for
    from ondevice.models.sources.resolve import SourceInfo
    from ondevice.models.tiny import tiny_tokenizer

    network = load(folder, "cpu" if packs else "cuda")
    kind = family_for(network.config.model_type, "this benchmark")
    return wrap(network, tiny_tokenizer(), kind, SourceInfo("random", None, known_sha256="0"))


def our_step(method: str, bits: int | None, folder: Path) -> tuple[Any, int]:
    """A session of mesp."""
    import torch

    from ondevice.core.registry import method_config, open_session

    loaded = wrapped(folder, bits is not None)

    def opened(values: dict[str, Any]) -> Any:
        return open_session(loaded, method_config("mesp", {"bits": bits, **values}), 0, "cuda")

    name = (folder / "name").read_text()
    session = opened(OURS.get(method, ON_HOST))
    torch.cuda.empty_cache()
    adapters = sum(t.nbytes for t in session.optimizer.tensors.values())
    weights = torch.cuda.memory_allocated() - adapters
    sessions: dict[Any, Any] = {None: session}
    del session

    def of_shape(ids: Any) -> Any:
        if method != IN_ITS_MEMORY:
            return sessions[None]
        shape = (name, "NF4" if bits else "bfloat16", *ids.shape)
        if shape not in sessions:  # its memory is that of one shape
            sessions.clear()
            gc.collect()  # graphs hold what they read
            torch.cuda.empty_cache()
            sessions[shape] = opened(FITTING[shape])
        return sessions[shape]

    def step(ids: Any, number: int) -> None:
        of_shape(ids).step(ids.numpy(), ids.numpy().copy(), number, 1e-4)

    return step, weights


def lora_step(method: str, bits: int | None, folder: Path) -> tuple[Any, int]:
    """A session of lora."""
    import torch

    from ondevice.core.registry import method_config, open_session

    if bits is not None:
        raise SystemExit("lora has no weights in NF4")
    loaded = wrapped(folder, packs=False)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated()
    values = {"rank": 8, "target_modules": TARGETS, **LORA[method]}
    session: Any = open_session(loaded, method_config("lora", values), 0, "cuda")

    def step(ids: Any, number: int) -> None:
        session.step(ids.numpy(), ids.numpy().copy(), number, 1e-4)

    return step, weights


def peft_step(method: str, bits: int | None, folder: Path) -> tuple[Any, int]:
    """peft's LoRA on transformers' model with liger's kernels and gradient checkpointing; QLoRA by
    bitsandbytes."""
    import peft
    import torch
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance,
    )

    from benchmarks.mesp.cuda import nf4

    network = load(folder)
    for block in network.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name in TARGETS:
                if bits and hasattr(parent, name):
                    setattr(parent, name, nf4(getattr(parent, name)))
    _apply_liger_kernel_to_instance(model=network)
    network.config.use_cache = False
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated()
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS), lora_dropout=0.0)
    model: Any = peft.get_peft_model(network, settings).train()
    model.enable_input_require_grads()
    return trained(model), weights


def unsloth_step(method: str, bits: int | None, folder: Path) -> tuple[Any, int]:
    """Unsloth's model and adapter, with its own checkpointing."""
    from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports] # isort: skip
    import torch

    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=32768, dtype=torch.bfloat16, load_in_4bit=bits is not None
    )
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated()
    model = FastLanguageModel.get_peft_model(
        model, r=8, lora_alpha=16, lora_dropout=0, bias="none", target_modules=list(TARGETS),
        use_gradient_checkpointing="unsloth",
    )  # fmt: skip
    return trained(model.train()), weights


def trained(model: Any) -> Any:
    """Return a step of AdamW as transformers' Trainer takes it."""
    import torch

    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=True)

    def step(ids: Any, number: int) -> None:
        ids_BT = ids.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss)

    return step


if __name__ == "__main__":
    main()
