"""A batch through all blocks: forward keeps block inputs, the head gives the loss and its gradient,
backward goes down block by block.

A block's forward pass keeps nothing; its backward pass computes it again stage by stage, the MLP
first and attention after it, and each tensor goes at its last use. Of the MLP's wide tensors only a
chunk of tokens exists at a time, so that attention's own and the residual stream bound long rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ondevice.core.dims import EXPERTS
from ondevice.core.errors import CheckpointError
from ondevice.core.session import IGNORE, MOMENTS, OPTIMIZER_STEP
from ondevice.methods.mesp.check import check_resident
from ondevice.methods.mesp.lora import LoraParameters, check_state, initial_tensors
from ondevice.methods.mesp.memory import MLP_CHUNK_TOKENS, MLP_CHUNK_TOKENS_GPU
from ondevice.methods.mesp.torch.kernels import Matrix, Position, choose
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
    AnswerHead,
    Loss,
    Scale,
    label_columns,
    wide,
)
from ondevice.nn.experts import pair_of
from ondevice.nn.packed import Nf4Matrix, PackedLinear
from ondevice.nn.row_mask import of_rows
from ondevice.offload.device import Timeline, open_device
from ondevice.offload.transfers import Activations
from ondevice.runtime_ops.layer_adam import AdamStep, torch_steps

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig
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
    """A loaded model's own tensors. With `bits` quantised matrices replace its own.

    Raises:
        ConfigError: 4 bits without a GPU.
        MissingPackageError: bitsandbytes is not installed.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device, bits: int | None = None) -> None:
        family: Family = loaded.family
        check_resident(str(device), bits)
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
            bias = linear.bias
            if bias is not None:
                bias = bias.detach().to(device)
            if isinstance(linear, PackedLinear):
                matrix: Matrix = linear
            elif bits:
                matrix = Nf4Matrix.pack(linear.weight.detach().to(device), double=False)
                family.set_linear(i, target, PackedLinear(matrix, bias))
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
    if dims.traits.norm_offset:
        return 1.0 + wide(weight)
    return weight


def scaled(dims: ModelDims, rows: Tensor) -> Tensor:
    """Return rows of the embedding, in new memory, times the model's factor."""
    scale = dims.traits.embedding_scale
    return rows if scale == 1.0 else rows.mul_(rows.new_tensor(scale))


def halves(position: tuple[Tensor, Tensor]) -> Position:
    """Return transformers' cos and sin [1, T, head_dim] repeat their first half."""
    cos, sin = (tensor[:, :, None, : tensor.shape[-1] // 2].contiguous() for tensor in position)
    return cos, sin


_OPS: Any = torch  # what torch.optim itself calls


class Optimizer:
    """SGD or AdamW on every A and B, float32, with AdamW's moments, and the summed gradients of
    several micro-batches."""

    def __init__(
        self,
        parameters: tuple[LoraParameters, ...],
        config: MespConfig,
        seed: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self.device = device
        self.parameters = {(lora.layer, lora.target): lora for lora in parameters}
        self.tensors = {
            name: torch.from_numpy(v).to(device)
            for name, v in initial_tensors(parameters, seed).items()
        }
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.sums: dict[str, Tensor] = {}
        self.done = 0
        self.waiting: list[tuple[str, Tensor]] = []
        self.learning_rate = 0.0
        self.accumulate = False

    def begin(self, learning_rate: float, accumulate: bool) -> None:
        """Begin a step; with `accumulate` its gradients are summed until `end`, else each is
        applied and dropped."""
        self.learning_rate = learning_rate
        self.accumulate = accumulate

    def apply(self, parameters: LoraParameters, ga: Tensor, gb: Tensor) -> None:
        """Use both gradients, float32 in the shapes of A and B.

        On a GPU the matrices of a block are updated together (`flush`): their gradients are small,
        launches are not.
        """
        for name, gradient in ((parameters.a_name, ga), (parameters.b_name, gb)):
            if not self.accumulate:
                self.waiting.append((name, gradient.contiguous()))
            elif name in self.sums:
                self.sums[name].add_(gradient)
            else:
                self.sums[name] = gradient.contiguous()
        if self.device.type == "cpu":
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Update what waits."""
        waiting = self.waiting
        self.waiting = []
        if not waiting:
            return
        values = [self.tensors[name] for name, _ in waiting]
        gradients = [gradient for _, gradient in waiting]
        config = self.config
        rate = self.learning_rate
        if config.optimizer == "sgd":
            _OPS._foreach_mul_(values, 1.0 - rate * config.weight_decay)
            _OPS._foreach_add_(values, gradients, alpha=-rate)
            return
        for (name, _), value in zip(waiting, values):
            if name not in self.moments:
                self.moments[name] = torch.zeros_like(value), torch.zeros_like(value)
        m, v = ([self.moments[name][which] for name, _ in waiting] for which in (0, 1))
        torch_steps(
            values,
            gradients,
            m,
            v,
            AdamStep(
                rate, config.beta1, config.beta2, config.eps, config.weight_decay, self.done + 1
            ),
        )

    def end(self) -> None:
        """End the step: sums are clipped, applied and dropped."""
        limit = self.config.max_grad_norm
        if limit is not None and self.sums:
            norm = torch.stack([sums.square().sum() for sums in self.sums.values()]).sum().sqrt()
            _OPS._foreach_mul_(
                list(self.sums.values()), (limit / (norm + 1e-6)).clamp(max=1.0)
            )  # as in torch's
        self.waiting = [*self.waiting, *self.sums.items()]
        self.sums = {}
        self.flush()
        self.done += 1

    def state(self) -> dict[str, np.ndarray]:
        """Return A, B and moments, float32, and the number of steps."""
        result = self.arrays()
        for name, moments in self.moments.items():
            for moment, value in zip(MOMENTS, moments):
                result[f"{moment}/{name}"] = value.cpu().numpy().copy()
        result[OPTIMIZER_STEP] = np.array([self.done], dtype=np.int64)
        return result

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every A and B by PEFT's name."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.tensors.items()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave; nothing is changed if something does not fit.

        Raises:
            CheckpointError: naming the first tensor that is missing or of another shape.
        """
        if OPTIMIZER_STEP not in state:
            raise CheckpointError(
                "the checkpoint lacks optimizer_step", hint="resume from an older checkpoint"
            )
        done = int(state[OPTIMIZER_STEP][0])
        shapes = {
            name: shape for lora in self.parameters.values() for name, shape in lora.shapes.items()
        }
        moments = bool(self.config.optimizer == "adamw" and done)
        check_state(state, shapes)
        if moments:
            check_state(
                state,
                {f"{moment}/{name}": shape for moment in MOMENTS for name, shape in shapes.items()},
            )
        self.assign({name: state[name] for name in shapes})
        self.done = done
        self.moments = {}
        if moments:
            for name in shapes:
                m, v = (
                    torch.from_numpy(state[f"{moment}/{name}"].copy()).to(self.device)
                    for moment in MOMENTS
                )
                self.moments[name] = (m, v)

    @torch.no_grad()
    def assign(self, arrays: dict[str, np.ndarray]) -> None:
        """Copy arrays of the right shapes into A and B."""
        for name, value in arrays.items():
            self.tensors[name].copy_(
                torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))
            )


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


def in_order(layers: range) -> Iterable[tuple[int, int | None]]:
    """Return each layer with the one that is needed after it."""
    return zip(layers, [*layers[1:], None], strict=True)


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
        self.inputs = Inputs(weights.device)
        if config.activations == "host":
            self.inputs = HostInputs(weights.device)

    @torch.no_grad()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]."""
        x = self.weights.embed(ids_BT)
        positions = self.positions(ids_BT, None)
        for i, then in in_order(range(self.dims.layers)):
            with self.weights.block(i, then) as frozen:
                x = self.blocks.forward(self.block(i, frozen), x, positions(i), ids_BT.shape[0])
        loss, labels = self.loss_of(labels_BT)
        return loss.row_nll(x, labels)

    @torch.no_grad()
    def forward_backward(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: Scale, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss, float32 []; `scale` times its gradients go to the optimizer as
        they arise (`Loss.backward`).

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
        for i, then in in_order(range(layers)):
            self.inputs.save(i, x)
            with self.weights.block(i, then) as frozen:
                x = self.blocks.forward(self.block(i, frozen), x, positions(i), rows)
        loss, labels = self.loss_of(labels_BT)
        total, g = loss.backward(x, labels, scale)
        del x
        for i, then in in_order(range(layers)[::-1]):
            x = self.inputs.load(i, tuple(g.shape))
            with self.weights.block(i, then) as frozen:
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
        for target in EXPERTS:
            if (lora := self.optimizer.parameters.get((i, target))) is not None:
                a = self.optimizer.tensors[lora.a_name]
                b = self.optimizer.tensors[lora.b_name]
                pairs[target] = pair_of(a, b, lora.experts, self.config.scale)
        return Block(frozen.norms, linears, i, frozen.mlp, pairs)
