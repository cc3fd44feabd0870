"""The generator as plain ATen ops on int64 tensors: a program that uses it needs no custom op.

The forms here trace under `torch.export` and lower to ExecuTorch's portable kernels, so they run in
an unmodified runtime, such as the one in the Android archive. Integer arithmetic wraps around in
int64 exactly as in uint64; a logical right shift is an arithmetic shift and a mask. Constants are
folded in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ondevice.runtime_ops.generator import GAMMA, MASK64, MULTIPLIER_1, MULTIPLIER_2, SHIFTS, TWO_PI

if TYPE_CHECKING:
    from executorch.exir import EdgeCompileConfig
    from torch.export import ExportedProgram

CORE_ATEN_EXCEPTIONS = ("bitwise_right_shift.Tensor_Scalar",)
"""ATen overloads that these forms use, that ExecuTorch 1.4 has a portable kernel for, and that its
check for core ATen ops does not list: all that lowering needs beyond the defaults."""


_POWERS = torch.from_numpy(
    np.left_shift(np.uint64(1), np.arange(64, dtype=np.uint64)).view(np.int64)
)
"""2^j for j in 0..63 with wraparound, int64 [64]: one object, so that a program holds it once; a
tensor made inside a trace would be one constant and one copy for each use."""


def edge_compile_config(**options: Any) -> EdgeCompileConfig:
    """Return ExecuTorch's `EdgeCompileConfig` that lets the ops of this file through; `options` are
    passed on.

    IR validity stays checked. Needs executorch.
    """
    from executorch.exir import EdgeCompileConfig

    exceptions = list(options.pop("_core_aten_ops_exception_list", []))
    for name in CORE_ATEN_EXCEPTIONS:
        op, overload = name.split(".")
        exceptions.append(getattr(getattr(torch.ops.aten, op), overload))
    return EdgeCompileConfig(_core_aten_ops_exception_list=exceptions, **options)


def deduplicate(program: ExportedProgram) -> ExportedProgram:
    """Do every repeated pure computation of a program once (common subexpressions), and return the
    program.

    Two layers that draw from one stream both compute its keys: with this, a program of many layers
    has less than half of the generator's instructions and lowers in half the time. Run it between
    `torch.export` and lowering; it makes the program functional first, so that buffers updated in
    place stay right.
    """
    program = program.run_decompositions({})
    graph = program.graph_module.graph
    kept = set(graph.output_node().all_input_nodes)
    seen: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        leaves, structure = tree_flatten((node.args, node.kwargs))
        key = (node.target, structure, tuple((type(leaf), leaf) for leaf in leaves))
        # The types count too: 1, 1.0 and True are equal keys and other arguments.
        first = seen.setdefault(key, node)
        if first is not node and node not in kept:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


def signed(value: int) -> int:
    """Return the int64 with the same 64 bits as `value` modulo 2^64."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def aten_keys(seed: Tensor, step: Tensor, tensor: int, queries: int) -> Tensor:
    """Return keys of the streams of queries 0 to `queries - 1`.

    They are the same for every range of a stream: a program that draws several ranges of one tensor
    may compute them once and pass them on.

    Args:
        seed, step: int64 [1]; may be inputs of the program.

    Returns:
        int64 [queries, 1].
    """
    key = _mix(_mix(seed + signed(GAMMA)) + (step * signed(GAMMA) + signed(GAMMA)))
    query = torch.arange(1, queries + 1, dtype=torch.int64, device=seed.device).unsqueeze(1)
    key = _mix(key + query * signed(GAMMA))
    return _mix(key + signed(GAMMA * (tensor + 1)))


def aten_normal(
    seed: Tensor,
    step: Tensor,
    tensor: int,
    queries: int,
    start: int,
    count: int,
    keys: Tensor | None = None,
) -> Tensor:
    """Return `generator.normal` in ATen ops: float32 [queries, count], within 1e-6 of it.

    Lowered to XNNPACK, whose logarithm is worse near 1, it is within 5e-4 where the radius is near
    0.

    Args:
        seed, step: int64 [1]; may be inputs of the program.
        keys: what `aten_keys` returned for the same seed, step, tensor and queries, to compute them
            once.
    """
    if keys is None:
        keys = aten_keys(seed, step, tensor, queries)
    first, last = start >> 1, (start + count + 1) >> 1
    word = _words(keys, first, last)
    uniform = (_shift(word, 32).to(torch.float32) + 0.5) * 2.0**-32
    # 2^-24 is a power of two, so that folding it into 2 pi changes no rounding.
    angle = ((word & 0xFFFFFF).to(torch.float32) - 2.0**23) * (float(TWO_PI) * 2.0**-24)
    radius = (uniform.log() * -2.0).sqrt()
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).reshape(queries, -1)
    return _window(pairs, start - 2 * first, count)


def aten_rademacher(
    seed: Tensor,
    step: Tensor,
    tensor: int,
    queries: int,
    start: int,
    count: int,
    keys: Tensor | None = None,
) -> Tensor:
    """Return `generator.rademacher` in ATen ops: float32 [queries, count], bit-identical to it.

    One word holds 64 signs: multiplying it by 2^j moves bit 63 - j to the sign bit. Ranges whose
    start and count are multiples of 64 need no slice. Arguments as for `aten_normal`.
    """
    if keys is None:
        keys = aten_keys(seed, step, tensor, queries)
    first, last = start >> 6, (start + count + 63) >> 6
    negative = (_words(keys, first, last).unsqueeze(-1) * _POWERS.to(seed.device) < 0).reshape(
        queries, -1
    )
    return torch.where(_window(negative, start - 64 * first, count), -1.0, 1.0)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, SHIFTS[0])) * signed(MULTIPLIER_1)
    x = (x ^ _shift(x, SHIFTS[1])) * signed(MULTIPLIER_2)
    return x ^ _shift(x, SHIFTS[2])


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return torch.bitwise_right_shift(x, bits) & ((1 << (64 - bits)) - 1)


def _words(keys: Tensor, first: int, last: int) -> Tensor:
    """Words `first` to `last - 1` of each stream: int64 [queries, last - first]."""
    index = torch.arange(first + 1, last + 1, dtype=torch.int64, device=keys.device)
    return _mix(keys + index * signed(GAMMA))


def _window(values: Tensor, offset: int, count: int) -> Tensor:
    if (offset, count) == (0, values.shape[1]):
        return values
    return values[:, offset : offset + count]
