"""MeSP on a GPU: time and memory of a step against automatic differentiation with checkpoints, and
the longest row.

python -m benchmarks.mesp.cuda              an 8B-shape model of some layers, bfloat16 and NF4, each way to gradients
python -m benchmarks.mesp.cuda --longest    the longest row that a step in NF4 fits with

Weights are random; every method has the same ones, the same loss, and AdamW on rank-8 LoRA next to
all seven linears.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from benchmarks.common import finish, parse_args

NEEDS = ("cuda",)
SHAPE = {
    "hidden": 4096,
    "intermediate": 14336,
    "heads": 32,
    "kv_heads": 8,
    "vocab": 128256,
    "tied": False,
}
COLUMNS = [
    {"key": "method", "title": "Method"},
    {"key": "weights", "title": "Weights"},
    {"key": "layers", "title": "Layers"},
    {"key": "tokens", "title": "Tokens"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "ratio", "title": "× checkpoint"},
    {"key": "step_bytes", "title": "Step (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "peak_bytes", "title": "Peak (MiB)", "scale": 2**-20, "digits": 0},
]
LONGEST = [
    *COLUMNS[:5],
    {"key": "peak_bytes", "title": "Peak (GiB)", "scale": 2**-30, "digits": 1},
    {"key": "computed_bytes", "title": "computed (GiB)", "scale": 2**-30, "digits": 1},
]
COMPUTED = (
    "Rows of 32,768 tokens were run with all layers. Longer ones were run with two; computed is what that took, the "
    "NF4 weights of 30 more layers, and their inputs if those stay on the GPU. The next power of two is above 80 GB."
)
METHODS = {
    "manual": {"kernels": "torch"},
    "manual, liger": {"kernels": "liger"},
    "blockwise": {"gradients": "blockwise"},
    "checkpoint": {"gradients": "checkpoint"},
}


def main() -> None:
    """Measure and write the table."""

    def more(parser: Any) -> None:
        parser.add_argument("--layers", type=int, default=8)
        parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
        parser.add_argument("--longest", action="store_true")

    args = parse_args(__doc__, more)
    if args.longest:
        shown = {"command": "python -m benchmarks.mesp.cuda --longest", "notes": [COMPUTED]}
        title = "The longest row in 80 GB, 8B shape, NF4"
        finish("mesp/cuda_longest", longest(), args, columns=LONGEST, title=title, **shown)
        return
    rows = [
        row for bits in (None, 4) for row in compare(args.layers, args.tokens, bits, args.repeats)
    ]
    finish(
        "mesp/cuda", rows, args, columns=COLUMNS, title="MeSP on a GPU, 8B shape, one row, rank 8"
    )


def model(layers: int) -> Any:
    """A random bfloat16 model, made on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ondevice.models.families.llama import Llama
    from ondevice.models.load import wrap
    from ondevice.models.sources.resolve import SourceInfo
    from ondevice.models.tiny import tiny_tokenizer

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["intermediate"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        vocab_size=SHAPE["vocab"],
        tie_word_embeddings=False,
        max_position_embeddings=1 << 22,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    with torch.device("cuda"):
        built: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        )
    return wrap(built, tiny_tokenizer(), Llama, SourceInfo("random:8b", None, known_sha256="0"))


def batch(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab"], (1, tokens))
    return ids, ids.copy()


def opened(loaded: Any, bits: int | None, gradients: str = "manual", **settings: Any) -> Any:
    """A session; `loss_chunk_tokens` bounds the logits of long rows for every method."""
    from benchmarks.mesp.baselines_torch import blockwise_session
    from ondevice.core.registry import method_config
    from ondevice.methods.mesp.torch.reference import reference_session
    from ondevice.methods.mesp.torch.session import open_session

    values = {"bits": bits, "loss_tiles": 8, "loss_chunk_tokens": 4096, **settings}
    open_it = {
        "manual": open_session,
        "blockwise": blockwise_session,
        "checkpoint": reference_session,
    }[gradients]
    return open_it(loaded, method_config("mesp", values), 0, "cuda")


class Peft:
    """The usual way: transformers' model with its gradient checkpointing, peft's LoRA, NF4 by
    bitsandbytes (QLoRA)."""

    def __init__(self, layers: int, bits: int | None) -> None:
        import peft
        import torch

        network = model(layers).model
        self.targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        if bits:
            for block in network.model.layers:
                for parent in (block.self_attn, block.mlp):
                    for name in self.targets:
                        if hasattr(parent, name):
                            setattr(parent, name, nf4(getattr(parent, name)))
        network.config.use_cache = False
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        settings = peft.LoraConfig(
            r=8, lora_alpha=16, target_modules=list(self.targets), lora_dropout=0.0
        )
        self.model: Any = peft.get_peft_model(network, settings).train()
        self.model.enable_input_require_grads()
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], fused=True
        )

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> None:
        import torch

        ids_BT = torch.from_numpy(ids).to(next(self.model.parameters()).device)
        with torch.autocast(ids_BT.device.type, torch.bfloat16):
            self.model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def nf4(linear: Any) -> Any:
    """A linear layer's weights in NF4, on the same device."""
    import bitsandbytes
    import torch

    kinds: Any = bitsandbytes.nn
    sizes = (linear.in_features, linear.out_features)
    layer = kinds.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.weight = kinds.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return layer.to(linear.weight.device)


def compare(
    layers: int, lengths: list[int], bits: int | None, repeats: int
) -> list[dict[str, Any]]:
    """Every method at every length, in turns; the weights are shared, so only the steps differ."""
    import torch

    loaded = model(layers)
    first = opened(loaded, bits)
    sessions = {}
    for name, settings in METHODS.items():
        try:
            sessions[name] = opened(loaded, None, **settings)
        except Exception as error:
            print(f"{name}: {error}", flush=True)
            continue
        sessions[name].weights = sessions[name].model.weights = first.weights
        sessions[name].model.loss.head = first.weights
    sessions["peft, HF checkpointing"] = Peft(layers, bits)
    torch.cuda.synchronize()
    rows = []
    for tokens in lengths:
        given, seconds, memory = batch(tokens), {name: [] for name in sessions}, {}
        for turn in range(repeats + 1):
            for name, session in sessions.items():
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                resident, started = torch.cuda.memory_allocated(), time.perf_counter()
                session.step(*given, turn, 1e-4)
                torch.cuda.synchronize()
                if turn:
                    seconds[name].append(time.perf_counter() - started)
                peak = torch.cuda.max_memory_allocated()
                memory[name] = (peak - resident, peak)
        base = float(np.median(seconds["checkpoint"]))
        for name in sessions:
            step, peak = memory[name]
            rows.append(
                {
                    "method": name,
                    "weights": "NF4" if bits else "bfloat16",
                    "layers": layers,
                    "tokens": tokens,
                    "step_s": seconds[name],
                    "ratio": float(np.median(seconds[name])) / base,
                    "step_bytes": step,
                    "peak_bytes": peak,
                }
            )
            print(rows[-1], flush=True)
    return rows


def longest(
    layers: int = 32, limit_bytes: int = 80 * 10**9, start: int = 32768
) -> list[dict[str, Any]]:
    """The longest row whose step stays below `limit_bytes` in NF4, by powers of two.

    Rows are run with two layers, since attention over a million tokens takes minutes a layer; to
    what that needs, the weights of the other layers are added, and their inputs if those stay on
    the GPU. A row of `start` tokens is run with all layers, too, and says how near that is.
    """
    ways = {
        "checkpoint": {"gradients": "checkpoint"},
        "manual": {},
        "manual, inputs on the host": {"activations": "host"},
    }
    whole = LoadedWeights(layers)
    measured = {name: whole.step(settings, start) for name, settings in ways.items()}
    resident = whole.resident
    del whole
    few, rows = LoadedWeights(2), []
    block = (resident - few.resident) // (layers - 2)
    for name, settings in ways.items():
        tokens, best = start, None
        while tokens <= 1 << 20:
            actual = few.step(settings, tokens)
            if actual is None:
                break
            kept = 0 if "host" in name else tokens * SHAPE["hidden"] * 2
            peak = actual[1] + (layers - 2) * (block + kept)
            print(
                name,
                tokens,
                f"{actual[0]:.1f} s, {peak / 2**30:.1f} GiB with {layers} layers",
                flush=True,
            )
            if tokens == start and (run := measured[name]) is not None:
                rows.append(row(name, layers, start, run[0], run[1], computed_bytes=peak))
            if peak > limit_bytes:
                break
            best = row(name, layers, tokens, None, None, computed_bytes=peak)
            if peak + actual[1] - few.resident > limit_bytes:  # twice the row needs at least this
                break
            tokens *= 2
        rows += [] if best is None else [best]
    return rows


class LoadedWeights:
    """A model's weights in NF4 on the GPU, and steps with them."""

    def __init__(self, layers: int) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        self.loaded = model(layers)
        self.weights = opened(self.loaded, 4).weights
        gc.collect()
        self.resident = torch.cuda.memory_allocated()

    def step(self, settings: dict[str, Any], tokens: int) -> tuple[float, int] | None:
        """Seconds and peak bytes of a step, None if the GPU's memory does not suffice."""
        import torch

        from ondevice.core.errors import DoesNotFitError

        session = opened(self.loaded, None, loss_chunk_tokens=2048, **settings)
        session.weights = session.model.weights = session.model.loss.head = self.weights
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            session.step(*batch(tokens), 0, 1e-4)
            torch.cuda.synchronize()
        except (DoesNotFitError, torch.OutOfMemoryError) as error:
            print(tokens, str(error).splitlines()[0], flush=True)
            return None
        return time.perf_counter() - started, torch.cuda.max_memory_allocated()


def row(
    name: str, layers: int, tokens: int, seconds: float | None, peak: int | None, **more: Any
) -> dict[str, Any]:
    """A row of the longest rows' table."""
    seconds_list = None if seconds is None else [seconds]
    return {"method": name, "weights": "NF4", "layers": layers, "tokens": tokens, "step_s": seconds_list,
            "peak_bytes": peak, **more}  # fmt: skip


if __name__ == "__main__":
    main()
