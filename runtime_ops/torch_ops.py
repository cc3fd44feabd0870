"""All ops of the `ondevice` namespace in PyTorch; importing this file registers them.

`torch.ops.ondevice.normal` and `.rademacher` are the generator; the quantised ops are in
`quantized`. On CPU an op runs the compiled library if there is one, else PyTorch; on CUDA the
generator runs in Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from ondevice.core.errors import ConfigError
from ondevice.runtime_ops import block_ops, graph, native, quantized
from ondevice.runtime_ops.generator import noise_kind
from ondevice.runtime_ops.registry import OP_NAMES, define, expect

__all__ = [
    "OP_NAMES",
    "block_ops",
    "generator_backend",
    "native_available",
    "noise",
    "quantized",
    "register",
]


def register() -> None:
    """Make sure that the ops exist; importing this file has done it."""


def native_available() -> bool:
    """Return True if CPU ops run the compiled library; compiles it if it has not been yet."""
    return native.library() is not None


def generator_backend(device: torch.device | str = "cpu") -> str:
    """Name the form of the generator that a device runs: "native", "triton" or "aten".

    "native" and "triton" give the same bits. Gaussians of "aten" may differ from them by 1e-6
    (signs never do), so a run that must be replayed to the bit must not change between the two.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and _triton_available():
        return "triton"
    if not on_gpu and native_available():
        return "native"
    return "aten"


def noise(kind: str) -> torch._ops.OpOverloadPacket:
    """Return the generator's op by the name that configurations use: "gaussian" (or "normal") or
    "rademacher".

    Raises:
        ConfigError: another name.
    """
    return getattr(torch.ops.ondevice, noise_kind(kind))


def _triton_available() -> bool:
    return importlib.util.find_spec("triton") is not None


def _shape(seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int) -> Tensor:
    expect("normal", "seed", seed, torch.int64, (1,))
    expect("normal", "step", step, torch.int64, (1,))
    if min(tensor, queries, start, count) < 0:
        raise ConfigError(
            "the generator's counters are not negative",
            received=f"tensor {tensor}, queries {queries}, start {start}, count {count}",
        )
    return torch.empty(queries, count, dtype=torch.float32, device=seed.device)


def _register_generator(kind: str, reference: Callable[..., Tensor]) -> None:
    def on_cpu(
        seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int
    ) -> Tensor:
        if native_available():
            return native.draw(kind, seed, step, tensor, queries, start, count)
        return reference(seed, step, tensor, queries, start, count)

    def on_cuda(
        seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int
    ) -> Tensor:
        if not _triton_available():
            return reference(seed, step, tensor, queries, start, count)
        from ondevice.runtime_ops import triton_ops

        return triton_ops.draw(seed, step, tensor, queries, start, count, kind)

    define(
        kind,
        "Tensor seed, Tensor step, int tensor, int queries, int start, int count",
        fake=_shape,
        reference=reference,
        cpu=on_cpu,
        cuda=on_cuda,
    )


_register_generator("normal", graph.aten_normal)
_register_generator("rademacher", graph.aten_rademacher)
