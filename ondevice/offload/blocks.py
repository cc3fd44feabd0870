"""Blocks that are not known, as units that arrive, compute and leave where the model calls them.

The forward pass keeps a block's inputs only. In the backward pass autograd reaches a block when the
gradients of all that it handed on are there: hidden states, tensors in a dictionary that later
blocks read, or values that it returned besides. Then the block is computed again and
differentiated, and its gradients leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from ondevice.core.errors import ModelError
from ondevice.offload.calls import Call, stores
from ondevice.offload.passes import Passes

if TYPE_CHECKING:
    from ondevice.models.families.any_decoder import AnyDecoder


class Graph:
    """Lives as long as the graph of a forward pass, which a backward pass may follow."""


class BlockPasses(Passes):
    """The passes of a model's blocks; `WholePasses` has what stands around them.

    Attributes:
        starting, ending: called at both ends of a backward pass that somebody else began.
        graph: of the last forward pass, None once it is freed.
    """

    family: AnyDecoder

    def __init__(self, family: AnyDecoder, *ahead: Any) -> None:
        super().__init__(family, *ahead)
        self.plain = family.head_is_plain
        self.starting: Callable[[], None] | None = None
        self.ending: Callable[[], None] | None = None
        self.graph: Callable[[], Graph | None] = lambda: None
        self.blocks = [family.layer(i) for i in range(self.layers)]
        self.forwards = [block.forward for block in self.blocks]
        self.micro_batches: list[slice] = []
        self.called = 0

    def _block(self, i: int, keep: bool, *arguments: Any, **named: Any) -> Any:
        """Compute block `i` where the model calls it."""
        if i != self.called:
            raise self._not_in_order(i)
        self.called += 1
        call = Call.of(self.forwards[i], arguments, named)
        tensors = call.tensors
        if keep and i == 0:
            like = call.split(tensors[0], self.micro_batches[0])
            self.activations.begin(self.layers, len(self.micro_batches), like)
        if keep:
            left = list(_Block.apply(self, i, call, *tensors))  # pyright: ignore[reportArgumentType]
            leaves = [left.pop(0) if kept is None else kept.value for kept in call.given[1]]
            given = call.given[0]
        else:
            leaves = self._forward_block(i, call, tensors, False)
            given = call.given
        result, written = pytree.tree_unflatten(leaves, given)
        for store, values in zip(stores(arguments, named), written, strict=True):
            store.clear()
            store.update(values)
        return result

    def _forward_block(self, i: int, call: Call, tensors: list[Tensor], keep: bool) -> list[Any]:
        """Compute a block of all micro-batches while it is there; returns leaves of its results."""
        window = self.window
        unit = self.units.layers[i]
        slot = window.layer(i)
        window.bind(unit, slot)
        self._gate()
        parts = []
        with torch.no_grad(), self._computing("forward", unit.name):
            for m, rows in enumerate(self._parts_of(call)):
                given = [call.split(tensor, rows) for tensor in tensors]
                if keep:
                    self.activations.save(i, m, given[0].detach())  # else it would hold the graph
                    call.random.append(self._random(i))
                parts.append(call.run(given))
        slot.used = self._end()
        if i + len(window.layers) < self.layers:
            window.fetch_layer(i + len(window.layers))
        if i == max(0, self.layers - len(window.layers)):
            window.fetch_head(0)
        if i + 1 == self.layers and not self.plain:
            window.head_tile(0)  # what follows waits for it
        return [_joined(one, self._parts_of(call)) for one in zip(*parts, strict=True)]

    def _backward_block(
        self, i: int, call: Call, tensors: list[Tensor | None], needs: list[bool],
        shape: torch.Size, gradients: tuple[Tensor | None, ...],
    ) -> list[Tensor | None]:  # fmt: skip
        """Compute block `i` again and differentiate it; returns the gradients of its inputs."""
        window = self.window
        unit = self.units.layers[i]
        if i + 1 == self.layers:
            self.activations.prefetch(i, 0)
            if self.starting is not None:
                self.starting()
            if self.ending is not None:
                Variable._execution_engine.queue_callback(self.ending)
        window.fetch_layer(i)
        slot = window.layer(i)
        leaving = window.layer_gradient(i)
        window.bind(unit, slot, leaving)
        self._gate()
        parts = self._parts_of(call)
        self.sums.begin(len(parts))
        entered: list[list[Tensor]] = []
        for m, rows in enumerate(parts):
            size = (rows.stop - rows.start, *shape[1:])
            first = self.activations.load(i, m, size if len(parts) > 1 else tuple(shape))
            self._prefetch(i, m, len(parts))
            own = [first, *(call.split(there(tensor), rows) for tensor in tensors[1:])]
            own = [x.detach().requires_grad_(need) for x, need in zip(own, needs, strict=True)]
            with (
                torch.enable_grad(),
                self._computing("backward", unit.name),
                self._repeating(call.random[m]),
            ):
                left = [leaf for leaf in call.run(own) if isinstance(leaf, Tensor)]
                own_gradients = [
                    None if gradient is None else _part(gradient, leaf, rows)
                    for leaf, gradient in zip(left, gradients, strict=True)
                ]
                pairs = [
                    (leaf, gradient)
                    for leaf, gradient in zip(left, own_gradients, strict=True)
                    if gradient is not None and leaf.requires_grad
                ]
                torch.autograd.backward(
                    [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]
                )
            self.sums.add(leaving.memory)
            self.activations.done(i, m)
            entered.append(own)
        self.sums.finish(leaving.memory)
        slot.used = self._end()
        window.send_layer(i, leaving)
        if i >= len(window.layers):
            window.fetch_layer(i - len(window.layers))
        return [
            _gathered([own[at] for own in entered], call.rows if len(parts) > 1 else None)
            if need
            else None
            for at, need in enumerate(needs)
        ]

    def _random(self, i: int) -> Any:
        """Return the state of dropout's numbers; None for a block that has none."""
        if not self.blocks[i].training:
            return None
        if self.where.type == "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(self.where)
        return torch.get_rng_state(), None

    @contextmanager
    def _repeating(self, state: Any) -> Iterator[None]:
        """Draw the numbers of the forward pass again."""
        if state is None:
            yield
            return
        devices = [] if state[1] is None else [self.where]
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(state[0])
            if devices:
                torch.cuda.set_rng_state(state[1], self.where)
            yield

    def _prefetch(self, i: int, m: int, count: int) -> None:
        """Ask for the inputs that are needed next."""
        if m + 1 < count:
            self.activations.prefetch(i, m + 1)
        else:
            self.activations.prefetch(i - 1, 0)

    def _parts_of(self, call: Call) -> list[slice]:
        if len(self.micro_batches) == 1:
            return [slice(0, call.rows)]
        if call.rows != self.micro_batches[-1].stop:
            raise self.family.dims.unknown("a micro-batch of a block")
        return self.micro_batches

    def _not_in_order(self, i: int) -> ModelError:
        return ModelError(
            f"{self.family.dims.family} does not call its blocks once each, in their order",
            expected=f"block {self.called} of {self.layers}",
            received=f"block {i}",
        )


@dataclass(frozen=True)
class Kept:
    """A leaf of a block's results that is not a tensor."""

    value: Any


class _Block(torch.autograd.Function):
    """A block among autograd's operations; its weights are no inputs."""

    @staticmethod
    def forward(ctx: Any, passes: BlockPasses, i: int, call: Call, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graph = passes.graph()
        ctx.passes = passes
        ctx.i = i
        ctx.call = call
        ctx.shape = tensors[0].shape
        leaves = passes._forward_block(i, call, list(tensors), True)
        call.given = (
            call.given,
            [None if isinstance(leaf, Tensor) else Kept(leaf) for leaf in leaves],
        )
        call.forget()
        ctx.tensors = [None, *tensors[1:]]  # the hidden states are among the saved inputs
        left = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ctx.mark_non_differentiable(*(leaf for leaf in left if not leaf.is_floating_point()))
        return tuple(left)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        needs = list(ctx.needs_input_grad[3:])
        inputs = ctx.passes._backward_block(
            ctx.i, ctx.call, ctx.tensors, needs, ctx.shape, gradients
        )
        ctx.tensors = ctx.call = None
        return (None, None, None, *inputs)


def _joined(parts: tuple[Any, ...], rows: list[slice]) -> Any:
    """Join a result of all micro-batches, unless it is the same in each."""
    if len(parts) == 1 or not isinstance(parts[0], Tensor) or not parts[0].ndim:
        return parts[0]
    counts = [one.stop - one.start for one in rows]
    each = len(parts[0]) / counts[0]
    if [len(part) for part in parts] == [int(each) * count for count in counts]:
        return torch.cat(parts)
    return parts[0]


def _part(gradient: Tensor, leaf: Tensor, rows: slice) -> Tensor | None:
    """Return what belongs to a micro-batch of a result's gradient; of a result that is the same in
    each, the first micro-batch's was used."""
    if gradient.shape == leaf.shape:
        return None if rows.start else gradient
    each = len(leaf) // (rows.stop - rows.start)
    return gradient[rows.start * each : rows.stop * each]


def _gathered(parts: list[Tensor], rows: int | None) -> Tensor | None:
    """Return an input's gradient out of those of its parts, or of what all of them read."""
    gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
    if len(gradients) == 1:
        return gradients[0]
    if rows is not None and sum(map(len, gradients)) == rows:
        return torch.cat(gradients)
    return torch.stack(gradients).sum(0)


def there(value: Any) -> Any:
    assert value is not None  # noqa: S101  a pass has begun
    return value
