"""A batch through all blocks: forward keeps block inputs, the head gives the loss and its gradient,
backward goes down block by block.

A block's forward pass keeps nothing; its backward pass computes it again stage by stage, the MLP
first and attention after it, and each tensor goes at its last use. Of the MLP's wide tensors only a
chunk of tokens exists at a time, so that attention's own and the residual stream bound long rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ondevice.core.dims import EXPERTS
from ondevice.core.errors import ConfigError
from ondevice.core.session import IGNORE
from ondevice.methods.mesp.memory import MLP_CHUNK_TOKENS, MLP_CHUNK_TOKENS_GPU
from ondevice.methods.mesp.torch.kernels import Matrix, Position, TorchKernels, cast, choose
from ondevice.methods.mesp.torch.stages import (
    Block,
    Blocks,
    Linear,
    OnGradient,
    OtherMlp,
    RowsApart,
    Stages,
)
from ondevice.models.families.moe import MoeFamily
from ondevice.nn.cross_entropy import (
    exp_sums,
    float32_logits,
    label_columns,
    label_logits,
    logits_gradient,
    tile_bounds,
    wide,
)
from ondevice.nn.experts import pair_of
from ondevice.nn.packed import Nf4Matrix, PackedLinear
from ondevice.nn.row_mask import of_rows
from ondevice.offload.device import Timeline, open_device
from ondevice.offload.transfers import Activations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.session import Optimizer
    from ondevice.models import Family, LoadedModel


@dataclass(frozen=True)
class Frozen:
    """One block's weights: the factors of its norms by place, and matrix and bias of each linear
    layer; `mlp` is an MLP that has other ones."""

    norms: dict[str, Tensor]
    linears: dict[str, tuple[Matrix, Tensor | None]]
    mlp: OtherMlp | None = None


class Weights(Protocol):
    """All frozen weights of a model, wherever they are."""

    dims: ModelDims
    dtype: torch.dtype
    device: torch.device
    norm: Tensor
    """Factor of the norm before the head, [D]."""
    vocab: int

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return int64 [B, T] -> [B * T, D], new memory."""
        ...

    def positions(self, length_tokens: int) -> Positions:
        """Return a function of a block's number to its cos and sin, [1, T, 1, head_dim / 2]
        each."""
        ...

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        """Return block `i`, until the context ends; `then` is the block that will be asked for
        next."""
        ...

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return rows of the output head."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Dense:
    """A matrix as it is."""

    weight: Tensor

    def dense(self) -> Tensor:
        return self.weight


class Resident:
    """A loaded model's own tensors. With `bits` its matrices are quantised and its own are let go.

    Raises:
        ConfigError: 4 bits without a GPU.
        MissingPackageError: bitsandbytes is not installed.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device, bits: int | None = None) -> None:
        family: Family = loaded.family
        if bits and device.type != "cuda":
            raise ConfigError(
                "method.bits: 4 needs a GPU in torch",
                expected="--backend mlx, or model.device: cuda",
                received=str(device),
                hint="weight_placement: streamed needs less memory still",
            )
        self.dims = loaded.dims
        self.device = device
        self.vocab = loaded.dims.vocab
        self.blocks = [
            self._frozen_layer(family, i, device, bits) for i in range(loaded.dims.layers)
        ]
        if family.head_weight.device != device:
            model: Any = loaded.model
            model.to(device)
        self.family = family
        self.table = family.embedding.weight
        self.dtype = self.table.dtype
        self.norm = factor(self.dims, family.model.model.norm.weight.detach())

    def _frozen_layer(
        self, family: Family, i: int, device: torch.device, bits: int | None
    ) -> Frozen:
        layer: Any = family.layer(i)
        if not bits:
            layer.to(device)
        linears: dict[str, tuple[Matrix, Tensor | None]] = {}
        for target in family.linear_targets:
            linear: Any = family.linear(i, target)
            bias = None if linear.bias is None else linear.bias.detach().to(device)
            if isinstance(linear, PackedLinear):
                matrix: Matrix = linear
            elif bits:
                matrix = Nf4Matrix.pack(linear.weight.detach().to(device), double=False)
                linear.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            else:
                matrix = Dense(linear.weight.detach())
            linears[target] = (matrix, bias)
        weights = {
            place: layer.get_submodule(name).weight for place, name in self.dims.traits.norms
        }
        norms = {place: factor(self.dims, w.detach().to(device)) for place, w in weights.items()}
        mlp = None
        if isinstance(family, MoeFamily):
            layer.mlp.to(device)
            mlp = partial(family.mlp_of, i)
        return Frozen(norms, linears, mlp)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return scaled(self.dims, self.table.detach()[ids_BT.reshape(-1)])

    def positions(self, length_tokens: int) -> Positions:
        return by_layer(self.family, length_tokens, self.device, self.dtype)

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        return nullcontext(self.blocks[i])

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        return self.family.head_weight.detach()[low:high]

    def close(self) -> None:
        """Leave the model to its owner."""


Positions = Callable[[int], "Position"]


def by_layer(
    family: Family, length_tokens: int, device: torch.device, dtype: torch.dtype
) -> Positions:
    """Return a function of a block's number to its cos and sin."""
    tables = family.positions(length_tokens, device, dtype)
    made: dict[int, Position] = {}

    def of(i: int) -> Position:
        pair = family.layer_position(i, tables)
        if id(pair[0]) not in made:
            made[id(pair[0])] = halves(pair)
        return made[id(pair[0])]

    return of


def factor(dims: ModelDims, weight: Tensor) -> Tensor:
    """Return what a norm multiplies by: its weight, or 1 + w, in float32 at least."""
    return 1.0 + wide(weight) if dims.traits.norm_offset else weight


def scaled(dims: ModelDims, rows: Tensor) -> Tensor:
    """Return rows of the embedding, in new memory, times the model's factor."""
    scale = dims.traits.embedding_scale
    return rows if scale == 1.0 else rows.mul_(rows.new_tensor(scale))


def halves(position: tuple[Tensor, Tensor]) -> Position:
    """Return transformers' cos and sin [1, T, head_dim] repeat their first half."""
    cos, sin = (tensor[:, :, None, : tensor.shape[-1] // 2].contiguous() for tensor in position)
    return cos, sin


class Head(Protocol):
    """The output head, read in tiles of rows."""

    vocab: int

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return its rows [high - low, D]; `then` is the tile that will be asked for next."""
        ...


class AnswerHead:
    """The rows of a head that stand for a task's answers, kept once read."""

    def __init__(self, head: Head, answers: tuple[int, ...]) -> None:
        self.head = head
        self.answers = answers
        self.vocab = len(answers)
        self.rows: Tensor | None = None

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        if self.rows is None:
            self.rows = torch.cat([self.head.tile(row, row + 1).clone() for row in self.answers])
        return self.rows[low:high]


class Loss:
    """Final norm, head and cross-entropy over [N, D].

    Args:
        tiles: of the vocabulary.
        chunk_tokens: tokens whose logits exist at once; None is all.
        scale: factor of the logits.
    """

    def __init__(
        self,
        head: Head,
        norm: Tensor,
        eps: float,
        kernels: TorchKernels,
        tiles: int,
        chunk_tokens: int | None,
        scale: float = 1.0,
    ) -> None:
        self.head = head
        self.norm_weight = norm
        self.eps = eps
        self.kernels = kernels
        self.scale = scale
        self.bounds = tile_bounds(head.vocab, tiles)
        self.chunk_tokens = chunk_tokens

    def row_nll(self, x: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]; only label tokens are
        computed."""
        targets = next_labels(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        rows = torch.zeros(labels_BT.shape[0], dtype=torch.float32, device=x.device)
        if where.numel() == 0:
            return rows
        lse, label = self.log_sum_exp(self.norm(x[where]), targets[where], again=False)
        return rows.index_add_(0, where // labels_BT.shape[1], (lse - label).float())

    def backward(self, x: Tensor, labels_BT: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the summed loss, float32 [], and `scale` times its gradient in the memory of
        `x`."""
        targets = next_labels(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        if where.numel() == 0:
            return torch.zeros((), device=x.device), x.zero_()
        rows = x[where]
        targets = targets[where]
        hidden = self.norm(rows)
        lse, label = self.log_sum_exp(hidden, targets, again=True)
        gradient = self.hidden_gradient(hidden, targets, lse, torch.full_like(lse, scale))
        del hidden
        gradient = gradient.to(x.dtype)
        x.zero_()
        x[where] = self.norm_backward(rows, gradient)
        return (lse - label).sum().float(), x

    def norm(self, x: Tensor) -> Tensor:
        """Return the norm of [n, D], times the logits' factor."""
        normed = self.kernels.rms_norm(x, self.norm_weight, self.eps)
        return normed if self.scale == 1.0 else normed * self.scale

    def norm_backward(self, x: Tensor, gn: Tensor) -> Tensor:
        """Return the gradient of x from that of its norm."""
        gn = gn if self.scale == 1.0 else gn * self.scale
        return self.kernels.rms_norm_backward(
            x, self.norm_weight, self.eps, gn, torch.zeros_like(x)
        )

    def log_sum_exp(self, hidden: Tensor, targets: Tensor, again: bool) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp of each token's logits, and its label's logit (0 without a label),
        float32 [n].

        Args:
            hidden: [n, D], normed.
            targets: int64 [n]; tokens without a label have one that is below 0.
            again: a second pass over the head follows.
        """
        chunks = list(zip(self._chunks(hidden), self._chunks(targets)))
        sums: list[tuple[Tensor, Tensor] | None] = [None] * len(chunks)
        label = torch.zeros_like(hidden[:, 0], dtype=wide(hidden[:0]).dtype)
        for low, weight in self._tiles(again):
            for number, ((h, t), label_h) in enumerate(zip(chunks, self._chunks(label))):
                logits = float32_logits(h, weight)
                label_h += label_logits(logits, t - low)
                sums[number] = exp_sums(sums[number], logits)
        maximum, total = (
            _joined([chunk_sums[i] for chunk_sums in sums if chunk_sums is not None])
            for i in range(2)
        )
        return maximum + total.log(), label

    def hidden_gradient(
        self, hidden: Tensor, targets: Tensor, lse: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the gradient of `hidden`, float32 [n, D]: `weights` [n] times (softmax - one-hot)
        W, summed over tiles."""
        chunks = list(zip(*(self._chunks(x) for x in (hidden, targets, lse, weights))))
        # Chunks are summed into one tensor: joined at the end, the gradient of a long row would be
        # there twice.
        summed = torch.zeros_like(hidden, dtype=lse.dtype) if len(chunks) > 1 else None
        sums: list[Tensor | None] = [None] if summed is None else list(self._chunks(summed))
        for low, weight in self._tiles(False):
            for number, (h, t, lse_of_h, w) in enumerate(chunks):
                p = logits_gradient(float32_logits(h, weight), t - low, lse_of_h, w)
                gradient = torch.mm(cast(p, weight.dtype), weight)
                before = sums[number]
                del p
                sums[number] = wide(gradient) if before is None else before.add_(gradient)
        gradient = sums[0] if summed is None else summed
        assert gradient is not None  # noqa: S101 - there is a tile
        return gradient

    def _tiles(self, again: bool) -> Iterator[tuple[int, Tensor]]:
        """First row and rows of each tile."""
        for number, (low, high) in enumerate(self.bounds):
            coming = self.bounds[number + 1 :] or (self.bounds if again else [None])
            yield low, self.head.tile(low, high, coming[0])

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        size = self.chunk_tokens or x.shape[0]
        return (x,) if x.shape[0] <= size else x.split(size)


def labelled(labels_BT: Tensor) -> int:
    """Count the tokens that the loss of these rows is over."""
    return int((labels_BT[:, 1:] != IGNORE).sum())


def next_labels(labels_BT: Tensor) -> Tensor:
    """Return the label that each position predicts, int64 [N]; the last position of a row predicts
    nothing."""
    last = torch.full(
        (labels_BT.shape[0], 1), IGNORE, dtype=labels_BT.dtype, device=labels_BT.device
    )
    return torch.cat((labels_BT[:, 1:], last), 1).view(-1)


def _joined(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks) if len(chunks) > 1 else chunks[0]


class Inputs:
    """The inputs of blocks between the two passes, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.saved: list[Tensor] = []

    def begin(self, layers: int, like: Tensor) -> None:
        """Begin a step; `like` is an input."""
        self.saved = []

    def save(self, i: int, x: Tensor) -> None:
        self.saved.append(x)

    def load(self, i: int, shape: tuple[int, ...]) -> Tensor:
        """Return the input of block `i`, which comes after block `i + 1`'s."""
        return self.saved.pop()

    def done(self, i: int) -> None:
        """Release an input: what was computed until now is the last that reads it."""


class HostInputs(Inputs):
    """See `Inputs`; they wait in pinned host memory, and come back a block ahead."""

    def __init__(self, device: torch.device) -> None:
        opened = open_device(str(device))
        self.timeline = Timeline(opened)
        self.activations = Activations(opened, self.timeline, "host", None)

    def begin(self, layers: int, like: Tensor) -> None:
        self.activations.begin(layers, 1, like)

    def save(self, i: int, x: Tensor) -> None:
        self.activations.save(i, 0, x)

    def load(self, i: int, shape: tuple[int, ...]) -> Tensor:
        x = self.activations.load(i, 0, shape)
        self.activations.prefetch(i - 1, 0)
        return x

    def done(self, i: int) -> None:
        self.activations.done(i, 0)
        if i == 0:
            self.timeline.drain()


class Model:
    """A frozen model with its trained parameters; nothing here is kept from one call to the
    next."""

    def __init__(self, weights: Weights, optimizer: Optimizer, config: MespConfig) -> None:
        self.weights = weights
        self.optimizer = optimizer
        self.config = config
        self.dims = weights.dims
        kernels = choose(config.kernels, weights.device.type)
        stages = Stages(weights.dims, kernels)
        usual = MLP_CHUNK_TOKENS if weights.device.type == "cpu" else MLP_CHUNK_TOKENS_GPU
        self.blocks = Blocks(stages, config.mlp_chunk_tokens or usual)
        loss = (
            weights.norm,
            weights.dims.norm_eps,
            kernels,
            config.loss_tiles,
            config.loss_chunk_tokens,
        )
        self.loss = Loss(weights, *loss, scale=weights.dims.traits.logit_scale)
        self.answer_loss = None
        if config.answers:
            head = AnswerHead(weights, config.answers)
            self.answer_loss = Loss(head, *loss, scale=weights.dims.traits.logit_scale)
        self.inputs = (Inputs if config.activations == "device" else HostInputs)(weights.device)

    @torch.no_grad()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]."""
        x = self.weights.embed(ids_BT)
        positions = self.positions(ids_BT, None)
        for i in range(self.dims.layers):
            with self.weights.block(i, self.above(i)) as frozen:
                x = self.blocks.forward(self.block(i, frozen), x, positions(i), ids_BT.shape[0])
        loss, labels = self.loss_of(labels_BT)
        return loss.row_nll(x, labels)

    @torch.no_grad()
    def forward_backward(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: float, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss, float32 []; `scale` times its gradients go to the optimizer as
        they arise.

        Args:
            ids_BT: int64 [rows, tokens], all of them computed at once.
            position_ids_BT: int64 [rows, tokens], if these are sequences of several rows: see
                `Packing.packed_step`.
        """
        x = self.weights.embed(ids_BT)
        positions = self.positions(ids_BT, position_ids_BT)
        layers = self.dims.layers
        rows = ids_BT.shape[0]
        self.inputs.begin(layers, x)
        for i in range(layers):
            self.inputs.save(i, x)
            with self.weights.block(i, self.above(i)) as frozen:
                x = self.blocks.forward(self.block(i, frozen), x, positions(i), rows)
        loss, labels = self.loss_of(labels_BT)
        total, g = loss.backward(x, labels, scale)
        del x
        for i in reversed(range(layers)):
            x = self.inputs.load(i, tuple(g.shape))
            with self.weights.block(i, i - 1 if i else None) as frozen:
                block = self.block(i, frozen)
                g = self.blocks.backward(
                    block, x, g, positions(i), rows, self.on_gradient(i), last=i == 0
                )
            self.optimizer.flush()
            self.inputs.done(i)
            del x
        return total

    def positions(self, ids_BT: Tensor, position_ids_BT: Tensor | None) -> Positions:
        """Return a function of a block's number to its cos and sin, and keep rows apart in
        attention, or not."""
        of_block = self.weights.positions(ids_BT.shape[1])
        self.blocks.stages.apart = None
        if position_ids_BT is None:
            return of_block
        self.blocks.stages.apart = RowsApart.of(position_ids_BT)
        made: dict[int, Position] = {}

        def packed(i: int) -> Position:
            cos, sin = of_block(i)
            if id(cos) not in made:
                made[id(cos)] = of_rows(cos, position_ids_BT), of_rows(sin, position_ids_BT)
            return made[id(cos)]

        return packed

    def loss_of(self, labels_BT: Tensor) -> tuple[Loss, Tensor]:
        """Return the loss over the answers, with their indices as labels, if all labels are
        answers; else that over the vocabulary."""
        if self.answer_loss is not None:
            answers = torch.tensor(self.config.answers, device=labels_BT.device)
            places = label_columns(labels_BT.reshape(-1), answers).view(labels_BT.shape)
            if bool(((places != IGNORE) == (labels_BT != IGNORE)).all()):
                return self.answer_loss, places
        return self.loss, labels_BT

    def above(self, i: int) -> int | None:
        """Return the block that is needed after block `i` in a forward pass."""
        return i + 1 if i + 1 < self.dims.layers else None

    def on_gradient(self, layer: int) -> OnGradient:
        """Return a callback that gives gradients of one layer's A and B to the optimizer."""
        parameters = self.optimizer.parameters
        apply = self.optimizer.apply
        return lambda target, ga, gb: apply(parameters[(layer, target)], ga, gb.t())

    def block(self, i: int, frozen: Frozen) -> Block:
        """Return a block's frozen tensors with its A and B."""
        linears = {}
        for target, (matrix, bias) in frozen.linears.items():
            lora = self.optimizer.parameters.get((i, target))
            a = None
            b = None
            if lora is not None:
                a = self.optimizer.tensors[lora.a_name]
                b = self.optimizer.tensors[lora.b_name].t()
            linears[target] = Linear(matrix, bias, a, b, self.config.scale)
        pairs = {}
        for target in EXPERTS if frozen.mlp is not None else ():
            if (lora := self.optimizer.parameters.get((i, target))) is not None:
                a = self.optimizer.tensors[lora.a_name]
                b = self.optimizer.tensors[lora.b_name]
                pairs[target] = pair_of(a, b, lora.experts, self.config.scale)
        return Block(frozen.norms, linears, i, frozen.mlp, pairs)
