"""The models of benchmarks/slideformer/step.py: shapes with random weights, batches, the machine's
rates."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from benchmarks.common import median
from ondevice.core.dims import ModelDims
from ondevice.models.families.base import Family
from ondevice.models.registry import family_for
from ondevice.offload.device import Device, buffer
from ondevice.offload.host import moments_bytes, moments_in
from ondevice.runtime_ops import layer_adam as la

FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
NAMES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
SHAPES: dict[str, tuple[str, tuple[int, ...], bool]] = {
    "Qwen2.5-1.5B": ("qwen2", (1536, 8960, 28, 12, 2, 151936), True),
    "Qwen2.5-7B": ("qwen2", (3584, 18944, 28, 28, 4, 152064), False),
    "Qwen2.5-14B": ("qwen2", (5120, 13824, 48, 40, 8, 152064), False),
    "Qwen2.5-32B": ("qwen2", (5120, 27648, 64, 40, 8, 152064), False),
    "Llama-3.1-8B": ("llama", (4096, 14336, 32, 32, 8, 128256), False),
    "Llama-1.5B": ("llama", (2048, 8192, 16, 32, 8, 128256), False),
    "Llama2-7B": ("llama", (4096, 11008, 32, 32, 32, 32000), False),
    "GPT2-774M": ("gpt2", (1280, 5120, 36, 20, 20, 50257), True),
    "GPT2-1.3B": ("gpt2", (1600, 6400, 40, 25, 25, 50257), True),
    "tiny-gpt2": ("gpt2", (64, 256, 3, 2, 2, 512), True),
    "tiny": ("qwen2", (64, 128, 5, 4, 2, 512), False),
    "tiny-tied": ("llama", (64, 128, 5, 4, 2, 512), True),
}
"""model_type; hidden, intermediate, layers, heads, key and value heads, vocabulary; whether the
head is tied."""


def model_config(shape: str) -> tuple[type[Family], Any]:
    """The family of a shape and transformers' configuration of it."""
    model_type, sizes, tied = SHAPES[shape]
    family = family_for(model_type, shape)
    fields: dict[str, Any] = dict(zip(FIELDS, sizes, strict=True))
    fields |= {
        "tie_word_embeddings": tied,
        "attn_implementation": "sdpa",
        "max_position_embeddings": 1024 if model_type == "gpt2" else 32768,
    }
    return family, AutoConfig.for_model(model_type, **family.tiny_config(**fields))


def shape_dims(shape: str) -> tuple[ModelDims, list[int]]:
    """The sizes of a shape, and the elements of each of its parameters."""
    family, config = model_config(shape)
    dims = family.dims_from_config(config.to_dict())
    return dims, [int(np.prod(size)) for size in family.weight_shapes(dims).values()]


def random_block(shape: str, device: str) -> Tensor:
    """Normal numbers of standard deviation 0.02, bf16, in host memory: every weight is a window
    into them."""
    largest = max(shape_dims(shape)[1])
    torch.manual_seed(0)
    count = largest + min(largest, 8 << 20)
    return torch.randn(count, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()


def make_family(
    shape: str,
    block: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    liger: bool = False,
) -> Family:
    """The model of a shape. In bf16 on the host its weights are views of `block`, so it takes no
    memory."""
    import transformers

    family_class, config = model_config(shape)
    name = NAMES[family_class.model_type]
    with torch.device("meta"):
        model: Any = getattr(transformers, name)(config)
    fill(model, block, dtype, device)
    if family_class.model_type != "gpt2":
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        if torch.device(device).type != "cpu":
            model.model.rotary_emb.to(device)
    model.eval()
    family = family_class(model)
    if liger:
        from ondevice.offload.liger import patch_layers

        patch_layers(family)
    return family


def fill(model: Any, block: Tensor, dtype: torch.dtype, device: str) -> None:
    """Weights out of `block`, each from another place; norms 1, biases 0."""
    number = 0
    for name, parameter in list(model.named_parameters()):
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if (
            leaf == "bias"
            or "norm" in parent.rpartition(".")[2]
            or parent.rpartition(".")[2].startswith("ln_")
        ):
            value = torch.full(parameter.shape, float(leaf != "bias"), dtype=dtype, device=device)
        else:
            number += 1
            room = block.numel() - parameter.numel()
            offset = (number * 262_336) % (room + 1) // 64 * 64
            value = (
                block[offset : offset + parameter.numel()]
                .view(parameter.shape)
                .to(device=device, dtype=dtype)
            )
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight


class Batches:
    """Four batches of random token ids, all labelled, in turns."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.made: dict[tuple[int, int], np.ndarray] = {}

    def get(self, rows: int, turn: int) -> np.ndarray:
        """int64 [rows, length]; the first rows of turn 0 are the same for every batch size."""
        key = (rows, turn % 4)
        if key not in self.made:
            self.made[key] = np.random.default_rng(turn % 4).integers(
                0, self.vocabulary, (rows, self.length)
            )
        return self.made[key]


def release(device: str) -> None:
    """Give memory that nothing holds back to the GPU and to the system."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for name in ("_host_emptyCache", "_cuda_hostEmptyCache"):
            empty: Callable[[], None] | None = getattr(torch._C, name, None)
            if empty is not None:
                empty()
                break


def copy_rates(device: str) -> dict[str, float]:
    """Bytes a second of pinned copies: each way by itself, and both ways at once (the sum)."""
    from ondevice.offload.device import open_device

    opened = open_device(device)
    count = (512 << 20 if opened.type == "cuda" else 1 << 20) // 2
    host = [opened.pinned(count, torch.bfloat16) for _ in range(2)]
    there = [opened.empty(count, torch.bfloat16) for _ in range(2)]
    opened.synchronize()
    by_name: dict[str, float] = {}
    for name, lanes in {"h2d": ("h2d",), "d2h": ("d2h",), "both": ("h2d", "d2h")}.items():
        times = []
        for _ in range(6):
            started = time.perf_counter()
            for lane in lanes:
                at = 0 if lane == "h2d" else 1
                target, source = (there[at], host[at]) if lane == "h2d" else (host[at], there[at])
                opened.copy(lane, target, source)
            opened.synchronize()
            times.append(time.perf_counter() - started)
        by_name[name] = 2 * count * len(lanes) / median(times[1:])
    opened.close()
    return by_name


class Copies:
    """What a step copies for parameters that are updated: their weights twice to the GPU, their
    gradients back."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        self.host = [device.pinned(size, torch.bfloat16) for _ in range(2)]
        self.there = [device.empty(size, torch.bfloat16) for _ in range(2)]
        self.done = 0
        self.last: Any = None

    def follow(self, updated: int) -> None:
        """Copy until as many parameters were copied for as were updated."""
        while self.done < updated:
            if self.last is not None:
                self.last.wait()
            for _ in range(2):
                self.device.copy("h2d", self.there[0], self.host[0])
            self.device.copy("d2h", self.host[1], self.there[1])
            self.last = self.device.record("h2d")
            self.done += self.size


def update_rate(kind: str, threads: int, parameters: int, beside: Device | None = None) -> float:
    """Parameters a second of the fused update, with the state as the engine keeps it: by itself, or
    next to a step's copies to and from a device."""
    high, low = (buffer(2 * parameters, pin=False) for _ in range(2))
    moments = moments_in(buffer(moments_bytes(parameters, kind), pin=False), parameters, kind)
    halves = high.view(torch.bfloat16)[:parameters], low.view(torch.uint16)[:parameters]
    la.split_(torch.full((parameters,), 0.01), *halves, moments)
    state = la.HostState(None, *halves, moments)
    gradient = torch.full((parameters,), 1e-3, dtype=torch.bfloat16)
    copies, times = None if beside is None else Copies(beside, min(parameters, 1 << 26)), []
    for step in range(8):
        call = partial(
            la.layer_adam, gradient, state, la.AdamStep(1e-5, step=step + 1), threads=threads
        )
        started = time.perf_counter()
        if copies is None:
            call()
        else:
            update = threading.Thread(target=call)
            update.start()
            copies.follow((step + 1) * parameters)
            update.join()
        times.append(time.perf_counter() - started)
    return parameters / median(times[2:])


def host_need(
    name: str, shape: str, options: dict[str, Any], rows: int, length: int
) -> tuple[int, str]:
    """Host bytes of a variant, and how they come about. torch's own pinned memory is rounded up to
    powers of two."""
    dims, sizes = shape_dims(shape)
    total = sum(sizes)

    def pinned(width: int) -> int:
        return sum(1 << (width * size - 1).bit_length() for size in sizes)

    if name == "fsdp2" or name == "torchao-fp32":
        need = 2 * pinned(4) + 8 * total
        return (
            need,
            "fp32 parameters and gradients, pinned in powers of two, and 8 bytes a parameter of moments",
        )
    if name == "torchao":
        return 2 * pinned(
            2
        ) + 4 * total, "bf16 parameters and gradients, pinned in powers of two, and bf16 moments"
    if name.startswith(("deepspeed", "roundpipe")):
        return 20 * total, "float32 masters, moments and gradients, bf16 weights and gradients"
    if not name.startswith("slideformer"):
        return 0, "nothing on the host"
    stored = la.BYTES["split", sliding_moments(name)].stored
    on_disk = float(options.get("disk_fraction", 0)) * (stored - 4)
    layer, table = dims.block_parameters, dims.vocab * dims.hidden
    inputs = (
        dims.layers * rows * length * dims.hidden * (options.get("activations", "host") == "host")
    )
    buffers = min(int(options.get("gradient_buffers", 4)), dims.layers) * layer + table * (
        1 if dims.tied else 2
    )
    need = int((stored - on_disk) * total) + 2 * (buffers + inputs) + 4 * table
    return (
        need,
        f"{stored - on_disk:.2f} bytes a parameter, gradient buffers, inputs of {dims.layers} layers",
    )


def sliding_moments(name: str) -> str:
    return {"slideformer-bf16": "bfloat16", "slideformer-int8": "int8"}.get(name, "float32")
