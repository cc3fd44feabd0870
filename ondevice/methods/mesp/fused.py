"""The functions of one block over this project's ops: the same stages, each product with its bias,
its LoRA and its sum in one op that reads the frozen matrix where the file is mapped, and each chain
between products in one pass.

They take what the stock functions take, so a host chooses between the two when it opens an
artifact: `FUSED` and a function's name is the same function in these ops. The head is one function
of all positions of a batch: what has no label costs nothing, and the vocabulary is walked
inside the op.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ondevice.core.manifest import port
from ondevice.core.program import FUSED, ProgramModule
from ondevice.core.session import IGNORE
from ondevice.methods.mesp.block_modules import BlockBackward, BlockForward, Embed, OneBlock
from ondevice.methods.mesp.cached import BlockCached, BlockRecurrent, cached_module
from ondevice.methods.mesp.frozen import Int8Matrix, Q4Matrix
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.methods.mesp.torch.kernels import Dense
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.runtime_ops import torch_ops

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.block_functions import BlockFunctions
    from ondevice.methods.mesp.torch.block import Block
    from ondevice.methods.mesp.torch.kernels import Matrix, Position, Scores

torch_ops.register()
OPS = torch.ops.ondevice
WIDE = "read"
"""In the names of the functions that read many tokens of a prompt."""
WIDE_TOKENS = 128
"""A matrix is packed once for so many; short questions go through `prefill`."""


def parts(matrix: Matrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the weight, scales and minima that `block_linear` takes."""
    if isinstance(matrix, Int8Matrix):
        return matrix.levels, matrix.scales, None
    if isinstance(matrix, Q4Matrix):
        return matrix.packed, matrix.scales, matrix.mins
    assert isinstance(matrix, Dense)  # noqa: S101 - the forms are these
    return matrix.weight, None, None


def placed(functions: BlockFunctions, block: Block, adapter: Tensor) -> Block:
    """Say where A and B of the block's layers lie in its range of the adapter, [layer_size], so that
    a product reads them there and no slice is copied."""
    linears = dict(block.linears)
    for entry in functions.entries(block.layer):
        part = functions.dims.traits.part(entry.parameters.target)
        if part in linears and linears[part].a is not None:
            place = (adapter, entry.a, entry.b, entry.parameters.rank)
            linears[part] = replace(linears[part], place=place)
    return replace(block, linears=linears)


class FusedKernels(GraphKernels):
    """What a block computes between products, in ops of this project."""

    name = "fused"

    def __init__(self) -> None:
        super().__init__(torch.zeros(0))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return OPS.rms_norm(x, weight, eps)

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor
    ) -> Tensor:
        return OPS.rms_norm_backward(x, weight, eps, gn, g)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return OPS.swiglu(gate, up)

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return OPS.swiglu_gate(gate, up, g), OPS.swiglu(gate, g)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Any]:
        return OPS.attend(q, k, v, how.scale, how.window), None

    def attend_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Any, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = OPS.attend_backward(g, q, k, v, how.scale, how.window)
        # Slices, not `split`: of an op with a list of outputs ExecuTorch's verifier asks each number
        # of the first output for its type, one after the other.
        of_k = q.numel()
        of_v = of_k + k.numel()
        return flat[:of_k].view(q.shape), flat[of_k:of_v].view(k.shape), flat[of_v:].view(v.shape)


class FusedStages(Stages):
    """The stages with whole linear layers as one op.

    Args:
        integers: products with frozen matrices are of integers.
    """

    def __init__(self, dims: ModelDims, integers: bool) -> None:
        super().__init__(dims, FusedKernels())
        self.integers = integers

    def linear(
        self,
        block: Block,
        target: str,
        x: Tensor,
        into: Tensor | None = None,
        h: Tensor | None = None,
    ) -> Tensor:
        layer = block.linears[target]
        weight, scales, mins = parts(layer.matrix)
        if h is None and layer.place is not None:
            adapter, a, b, rank = layer.place
            return OPS.adapted_linear(
                x, weight, scales, mins, layer.bias, adapter, into, a, b, rank, layer.scale, self.integers
            )  # fmt: skip
        return OPS.block_linear(
            x, weight, scales, mins, layer.bias, h, layer.b, into, layer.scale, False, self.integers
        )

    def lora_backward(
        self, block: Block, target: str, x: Tensor, g: Tensor, gh: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        layer = block.linears[target]
        if layer.a is None or layer.b is None:
            return None, None
        h = OPS.narrow_linear(x, layer.a, 1.0)
        if gh is None:
            gh = OPS.narrow_linear(g, layer.b, layer.scale)
        ga = OPS.narrow_gradient(gh, x, 1.0)
        return (ga, OPS.narrow_gradient(h, g, layer.scale)), gh

    def input_backward(
        self, block: Block, target: str, g: Tensor, gh: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        layer = block.linears[target]
        weight, scales, mins = parts(layer.matrix)
        a = None if gh is None else layer.a
        return OPS.block_linear(
            g, weight, scales, mins, None, gh, a, into, 1.0, True, self.integers
        )

    def rotated(
        self, block: Block, q: Tensor, k: Tensor, position: Position, sign: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if not self.traits.rotated(block.layer):
            return q, k
        cos, sin = position
        return OPS.rotate(q, cos, sin, sign), OPS.rotate(k, cos, sin, sign)

    def rope_backward(
        self,
        block: Block,
        gq: Tensor,
        gk: Tensor,
        position: Position,
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.rotated(block, gq, gk, position, -1.0)


class _Placed(OneBlock):
    """A block whose products read A and B where they lie in the adapter."""

    def block(self, adapter: Tensor, frozen: tuple[Tensor, ...]) -> Block:
        block = super().block(self.functions.in_rows(adapter, self.layer), frozen)
        return placed(self.functions, block, adapter)


class _Fused(_Placed):
    """A block's functions over `FusedStages`."""

    def __init__(
        self, functions: BlockFunctions, rows: int, length_tokens: int, layer: int = 0
    ) -> None:
        super().__init__(functions, rows, length_tokens, layer)
        self.mask = None  # the op knows which keys a query sees
        self.cos = self.cos.reshape(length_tokens, -1)
        self.sin = self.sin.reshape(length_tokens, -1)

    @property
    def blocks(self) -> Blocks:
        return Blocks(FusedStages(self.functions.dims, self.functions.integers), None)


class FusedForward(_Fused, BlockForward):
    """See `BlockForward`."""


class FusedCached(_Placed, BlockCached):
    """See `BlockCached`."""

    def __init__(
        self, functions: BlockFunctions, tokens: int, context: int, layer: int = 0
    ) -> None:
        super().__init__(functions, tokens, context, layer)
        self.cos = self.cos.reshape(context, -1)
        self.sin = self.sin.reshape(context, -1)

    @property
    def blocks(self) -> Blocks:
        return Blocks(FusedStages(self.functions.dims, self.functions.integers), None)

    def position(self, at: Tensor) -> tuple[Tensor, Tensor]:
        return torch.index_select(self.cos, 0, at), torch.index_select(self.sin, 0, at)

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor],
        start: Tensor,
    ) -> Tensor:
        if self.window:
            return super().attend(q, kv, cache, new, start)
        return OPS.attend_cached(q, *kv, *cache, start, self.scale).view(self.tokens, -1)


class FusedRecurrent(FusedCached, BlockRecurrent):
    """See `BlockRecurrent`."""


class FusedLogits(nn.Module):
    """[1, D] -> logits [1, V]."""

    def __init__(self, functions: BlockFunctions) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor, norm: Tensor, *head: Tensor) -> Tensor:
        weight, scales = (*head, None)[:2]
        functions = self.functions
        n = OPS.rms_norm(x, norm, functions.dims.norm_eps)
        added = (None,) * 5
        return OPS.block_linear(n, weight, scales, *added, 1.0, False, functions.integers)


class FusedBackward(_Fused, BlockBackward):
    """See `BlockBackward`."""

    def updated(
        self, gradient: Tensor, vectors: tuple[Tensor, ...], step: Tensor, rate: Tensor
    ) -> tuple[Tensor, ...]:
        config = self.functions.config
        if config.optimizer != "adamw":
            return super().updated(gradient, vectors, step, rate)
        settings = (config.beta1, config.beta2, config.eps, config.weight_decay)
        value, m, v = OPS.block_adam(
            vectors[0], gradient, vectors[1], vectors[2], step, rate, *settings
        ).unbind(0)
        return value, m, v


class FusedHead(nn.Module):
    """[N, D], targets [N] (-1: none) and weights [N] -> losses [N], and the gradient [N, D] of
    their weighted sum."""

    def __init__(self, functions: BlockFunctions) -> None:
        super().__init__()
        self.functions = functions

    def forward(
        self, x: Tensor, targets: Tensor, scale: Tensor, norm: Tensor, *head: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight, scales = (*head, None)[:2]
        eps = self.functions.dims.norm_eps
        n = OPS.rms_norm(x, norm, eps)
        both = OPS.head_step(n, weight, scales, targets, scale, self.functions.integers)
        gn = both[:, 1:].contiguous()
        return both[:, 0], OPS.rms_norm_backward(x, norm, eps, gn, torch.zeros_like(x))


class FusedLosses(FusedHead):
    """[N, D] and targets [N] -> losses [N], for evaluations."""

    def forward(self, x: Tensor, targets: Tensor, norm: Tensor, *head: Tensor) -> Tensor:
        n = OPS.rms_norm(x, norm, self.functions.dims.norm_eps)
        labels = torch.where(targets < 0, IGNORE, targets)
        if len(head) == 1:
            return OPS.linear_cross_entropy(n, *head, labels)
        return OPS.q8_linear_cross_entropy(n, *head, labels)


def fused_modules(functions: BlockFunctions, stock: Iterable[ProgramModule]) -> list[ProgramModule]:
    """Return the functions of `stock` that have a form in these ops, and the heads of their
    sizes."""
    stock = list(stock)
    modules = cached_in_ops(functions, stock)
    heads = {}
    for one in stock:
        block = one.module
        if not isinstance(block, (BlockForward, BlockBackward)):
            continue
        kind = FusedForward if isinstance(block, BlockForward) else FusedBackward
        fused = kind(functions, block.rows, block.length_tokens, block.layer)
        inputs = tuple(given for given in one.inputs if given.role != "frozen")
        modules.append(
            ProgramModule(
                FUSED + one.name, fused, (*inputs, *functions.frozen(block.layer)), one.outputs
            )
        )
        heads[f"{block.rows}x{block.length_tokens}"] = inputs[0]
    head = functions.table_form.ports(
        functions.head_name, (functions.dims.vocab, functions.dims.hidden)
    )
    for size, hidden in heads.items():
        rows = hidden.shape[:1]
        targets = port("targets", "targets", rows, "int64", "token id")
        scale = port("scale", "token_scale", rows)
        losses = port("losses", "losses", rows)
        gradient = port("gradient", "gradient", hidden.shape)
        given = (hidden, targets, scale, functions.norm, *head)
        modules.append(
            ProgramModule(f"{FUSED}head_{size}", FusedHead(functions), given, (losses, gradient))
        )
        given = (hidden, targets, functions.norm, *head)
        modules.append(
            ProgramModule(f"{FUSED}losses_{size}", FusedLosses(functions), given, (losses,))
        )
    return modules


def cached_in_ops(functions: BlockFunctions, stock: list[ProgramModule]) -> list[ProgramModule]:
    """Return the functions that answer: those of `stock`, one that reads `WIDE_TOKENS` of a prompt,
    and the logits of one position over the whole head."""
    dims = functions.dims
    blocks = [one for one in stock if isinstance(one.module, BlockCached)]
    if not blocks:
        return []
    modules = []
    wide = 0
    for one in blocks:
        stocks: Any = one.module
        context = len(stocks.places)
        kind = FusedRecurrent if isinstance(stocks, BlockRecurrent) else FusedCached
        adapter = next(given for given in one.inputs if given.role == "state")
        sizes = {one.name: stocks.tokens}
        if stocks.tokens == 1:
            wide = min(WIDE_TOKENS, context)
            sizes[one.name.replace("decode", WIDE)] = wide
        modules += [
            cached_module(kind, functions, FUSED + name, tokens, context, adapter, stocks.layer)
            for name, tokens in sizes.items()
        ]
    ids = port("ids", "ids", (1, wide), "int64", "token id")
    hidden = port("hidden", "hidden", (wide, dims.hidden))
    embed = Embed(functions)
    modules.append(ProgramModule(f"{FUSED}embed_{WIDE}", embed, (ids, *functions.table), (hidden,)))
    head = functions.table_form.ports(functions.head_name, (dims.vocab, dims.hidden))
    one = port("hidden", "hidden", (1, dims.hidden))
    logits = port("logits", "logits", (1, dims.vocab))
    given = (one, functions.norm, *head)
    modules.append(ProgramModule(f"{FUSED}logits", FusedLogits(functions), given, (logits,)))
    return modules
