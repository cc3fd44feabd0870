"""A batch through all blocks: forward keeps block inputs, the head gives the loss and its gradient,
backward goes down block by block.

A block's forward pass keeps nothing; its backward pass computes it again stage by stage, the MLP
first and attention after it, and each tensor goes at its last use. Of the MLP's wide tensors only a
chunk of tokens exists at a time, so that attention's own and the residual stream bound long rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import MissingPackageError
from ondevice.core.method import has_triton
from ondevice.core.session import IGNORE
from ondevice.core.traits import EXPERTS
from ondevice.methods.mesp.memory import MLP_CHUNK_TOKENS, gpu_chunk_tokens, kept_layers
from ondevice.methods.mesp.torch.block import Block, Linear, OnGradient, SharedKeys
from ondevice.methods.mesp.torch.kept import HostInputs, Inputs, Kept
from ondevice.methods.mesp.torch.kernels import Position, TorchKernels
from ondevice.methods.mesp.torch.optimizer import Optimizer
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.methods.mesp.torch.weights import Frozen, OfLayer, Positions, Weights
from ondevice.nn.cross_entropy import (
    AnswerHead,
    Loss,
    Scale,
    find_labelled,
    label_columns,
)
from ondevice.nn.experts import pair_of
from ondevice.nn.row_mask import of_rows
from ondevice.nn.rows_apart import BranchesApart, RowsApart
from ondevice.offload.shapes import padded

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig


def choose(kernels: str, device: str) -> TorchKernels:
    """Choose what `method.kernels` asks for; `auto` is Triton's on a GPU if the package is
    installed, otherwise torch's.

    Raises:
        MissingPackageError: triton is asked for but not installed, or there is no GPU.
    """
    possible = has_triton(device)
    if kernels == "triton" and not possible:
        raise MissingPackageError(
            "Triton's kernels are asked for and cannot be used",
            expected="a GPU and the package triton",
            received="no package" if device.startswith("cuda") else "no GPU",
            hint="method.kernels: torch, or PyTorch's own build for CUDA, which brings triton",
        )
    if possible and kernels != "torch":
        from ondevice.methods.mesp.torch.triton_kernels import TritonKernels

        return TritonKernels()
    return TorchKernels()


class Passes(Protocol):
    """Both passes over batches of one shape."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the last block's output [N, D], to be overwritten with its gradient."""
        ...

    def backward(self, model: Model) -> None:
        """Give every gradient to the optimizer."""
        ...


class Graphs(Protocol):
    """Passes that are recorded; see `graphed.StepGraphs`."""

    def passes(self, model: Model, ids_BT: Tensor) -> Passes | None: ...

    def beside(self) -> AbstractContextManager[None]: ...


def in_order(layers: range) -> Iterable[tuple[int, int | None]]:
    """Return each layer with the one that is needed after it."""
    return zip(layers, [*layers[1:], None], strict=True)


class Model:
    """A frozen model with its trained parameters; nothing here is kept from one call to the
    next."""

    def __init__(
        self,
        weights: Weights,
        optimizer: Optimizer,
        config: MespConfig,
        graphs: Graphs | None = None,
    ) -> None:
        self.weights = weights
        self.optimizer = optimizer
        self.config = config
        self.dims = weights.dims
        kernels = choose(config.kernels, weights.device.type)
        stages = Stages(weights.dims, kernels)
        usual = MLP_CHUNK_TOKENS if weights.device.type == "cpu" else gpu_chunk_tokens
        self.blocks = Blocks(stages, config.mlp_chunk_tokens or usual)
        loss = (
            weights.norm,
            weights.dims.norm_eps,
            kernels,
            config.loss_tiles,
            config.loss_chunk_tokens,
        )
        once = kernels.fused and config.weight_placement == "resident"
        traits = weights.dims.traits
        of_logits: dict[str, Any] = {"scale": traits.logit_scale, "cap": traits.logit_cap}
        self.loss = Loss(weights, *loss, **of_logits, once=once)
        self.answer_loss = None
        if config.answers:
            head = AnswerHead(weights, config.answers)
            self.answer_loss = Loss(head, *loss, **of_logits)
        self.inputs = Inputs(weights.device)
        if config.activations == "host":
            self.inputs = HostInputs(weights.device)
        self.keeps = kept_layers(config.recompute, weights.dims)
        self.adapters: Mapping[str, Tensor] = {}
        """A and B by name in the dtype of activations, in a step."""
        self.shared: dict[int, SharedKeys] = {}
        """Of a pass, keys and values by the layer that computes them, if others read them, too."""
        self.layer_inputs: OfLayer = lambda i: None
        self.graphs = graphs

    def beside(self) -> AbstractContextManager[None]:
        """Return a context for the work of a call, on the stream of its graphs."""
        return self.graphs.beside() if self.graphs is not None else nullcontext()

    @torch.no_grad()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]."""
        x = self._evaluated(ids_BT, self.positions(ids_BT, None))
        loss, labels = self.loss_of(labels_BT)
        return loss.row_nll(x, labels)

    @torch.no_grad()
    def branches_nll(
        self,
        ids_BT: Tensor,
        position_ids_BT: Tensor,
        branches: BranchesApart,
        sources_N: Tensor,
        labels_N: Tensor,
    ) -> Tensor:
        """Return each label's negative log likelihood, float32 [N]; see `core.session.Branching`."""
        positions = self.packed_positions(int(position_ids_BT.max()) + 1, position_ids_BT)
        self.blocks.stages.apart = branches
        x = self._evaluated(ids_BT, positions)[sources_N]
        loss, labels = self.loss_of(labels_N)
        return loss.token_nll(x, labels)

    def _evaluated(self, ids_BT: Tensor, positions: Positions) -> Tensor:
        """Return the last block's output [N, D], with nothing kept for a backward pass."""
        x = self._begin(ids_BT)
        for i, then in in_order(range(self.dims.layers)):
            with self.weights.block(i, then) as frozen:
                x = self.blocks.forward(self.block(i, frozen), x, positions(i), ids_BT.shape[0])
        return x

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
        loss, labels = self.loss_of(labels_BT)
        labelled = find_labelled(labels)  # now, as it waits for the device
        graphed = None
        if self.graphs is not None and position_ids_BT is None:
            graphed = self.graphs.passes(self, ids_BT)
        if graphed is not None:
            total, _ = loss.backward(graphed.forward(ids_BT), labels, scale, labelled)
            graphed.backward(self)
            return total
        positions = self.positions(ids_BT, position_ids_BT)
        rows = ids_BT.shape[0]
        kept = [self.kept(i) for i in range(self.dims.layers)]
        x = self.run_forward(ids_BT, positions, kept)
        total, g = loss.backward(x, labels, scale, labelled)
        del x

        def done(i: int) -> None:
            self.optimizer.flush()

        self.run_backward(g, positions, rows, kept, self.on_gradient, done)
        return total

    def run_forward(self, ids_BT: Tensor, positions: Positions, kept: list[Kept]) -> Tensor:
        """Return the last block's output [N, D]; inputs of blocks and what `kept` keeps wait for
        `run_backward`."""
        self.adapters = self.optimizer.rounded(self.weights.dtype)
        x = self._begin(ids_BT)
        layers = self.dims.layers
        self.inputs.begin(layers, x)
        for i, then in in_order(range(layers)):
            self.inputs.save(i, x)
            with self.weights.block(i, then) as frozen:
                block = self.block(i, frozen, self.adapters)
                x = self.blocks.forward(block, x, positions(i), ids_BT.shape[0], kept[i])
        return x

    def _begin(self, ids_BT: Tensor) -> Tensor:
        """Return the first block's input [N, D]; what blocks read besides is that of these ids."""
        x = self.weights.embed(ids_BT)
        self.layer_inputs = self.weights.layer_inputs(ids_BT, x)
        lend = self.dims.traits.lends_keys
        self.shared = {i: SharedKeys() for i in range(self.dims.layers) if lend(i)}
        return x

    def run_backward(
        self,
        g: Tensor,
        positions: Positions,
        rows: int,
        kept: list[Kept],
        on_gradient: Callable[[int], OnGradient],
        done: Callable[[int], None],
    ) -> None:
        """Give every gradient to `on_gradient` of its layer; `g` [N, D] is that of the last block's
        output, whose memory is used up. `done` is called after each layer."""
        layers = self.dims.layers
        for i, then in in_order(range(layers)[::-1]):
            x = self.inputs.load(i, tuple(g.shape))
            with self.weights.block(i, then) as frozen:
                block = self.block(i, frozen, self.adapters)
                gradients = on_gradient(i)
                g = self.blocks.backward(
                    block, x, g, positions(i), rows, gradients, last=i == 0, kept=kept[i]
                )
            done(i)
            del x

    def padded(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at a length that has graphs; padding has no label."""
        if self.graphs is None:
            return ids, labels
        return padded(ids, labels, self.config.micro_batch_size, self.dims.max_positions)

    def kept(self, layer: int) -> Kept:
        """Return what that layer's backward pass will find of its forward pass; the last layers
        keep, since they wait for the shortest time."""
        after = self.dims.layers - layer
        keeps = self.keeps
        return Kept(after <= keeps.attention, after <= keeps.mlp, after <= keeps.projections)

    def positions(self, ids_BT: Tensor, position_ids_BT: Tensor | None) -> Positions:
        """Return a function of a block's number to its cos and sin, and keep rows apart in
        attention, or not."""
        self.blocks.stages.apart = None
        if position_ids_BT is None:
            return self.weights.positions(ids_BT.shape[1])
        self.blocks.stages.apart = RowsApart.of(position_ids_BT)
        return self.packed_positions(ids_BT.shape[1], position_ids_BT)

    def packed_positions(self, length_tokens: int, position_ids_BT: Tensor) -> Positions:
        """Return a function of a block's number to each token's cos and sin, of tables that long."""
        of_block = self.weights.positions(length_tokens)
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
        path = self.dims.traits.path
        return lambda part, ga, gb: apply(parameters[(layer, path(part))], ga, gb.t())

    def block(self, i: int, frozen: Frozen, adapters: Mapping[str, Tensor] | None = None) -> Block:
        """Return a block's frozen tensors with its A and B; `adapters` has these by name, in the
        dtype of activations."""
        adapters = adapters or self.optimizer.tensors
        linears = {}
        for part, (matrix, bias) in frozen.linears.items():
            lora = self.optimizer.parameters.get((i, self.dims.traits.path(part)))
            a = None
            b = None
            if lora is not None:
                a = adapters[lora.a_name]
                b = adapters[lora.b_name].t()
            linears[part] = Linear(matrix, bias, a, b, self.config.scale)
        pairs = {}
        for target in EXPERTS:
            if (lora := self.optimizer.parameters.get((i, target))) is not None:
                a = self.optimizer.tensors[lora.a_name]
                b = self.optimizer.tensors[lora.b_name]
                pairs[target] = pair_of(a, b, lora.experts, self.config.scale)
        shared = self.shared.get(self.dims.traits.key_layer(i))
        own = self.layer_inputs(i)
        return Block(frozen.norms, linears, i, frozen.mlp, pairs, frozen.mixer, shared, own)
