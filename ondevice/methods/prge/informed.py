"""P-RGE's step where the subspace is a part of the state: a program that takes a new one, and needs no new export.

The state is an ordinary adapter with both of its matrices, so that hosts read, write and average it as they do any
other. Of each linear layer its first directions are those that are trained: B's rows there are R C, and a step moves
them by a change of the diagonal R times C. The directions behind are what earlier subspaces changed. C, and with Adam
the moments of R, are states of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ondevice.methods.prge.layout import KEPT_BLOCKS, NOISE_TENSOR, AdapterLayout, Entry
from ondevice.methods.prge.step import CopiesOf, PrgeProgram, adam

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.step import Noise, TokenLoss
    from ondevice.methods.prge.subspace import Factors
    from ondevice.models import Family


class Places:
    """Where everything lies in the state.

    Attributes:
        small: of R, as a session in PyTorch has it.
        trained: B's rows of the subspace, in the flat adapter.
        directions: rows of the subspace; a small matrix has fewer, and zeros behind.
        kept: rows of earlier subspaces.
        a_offsets: where A is, float32 [directions + kept, inputs].
        c_offsets: where C is in the state `subspace`, float32 [entry's rank, outputs].
        size, c_size: elements of the adapter, and of the state `subspace`.
    """

    def __init__(self, dims: ModelDims, config: PrgeConfig, seed: int) -> None:
        diagonal = config.model_copy(update={"subspace": "gradient"})
        self.small = AdapterLayout.build(dims, diagonal, seed)
        self.directions = max(entry.rank for entry in self.small.entries)
        self.kept = 0 if config.refresh_every is None else KEPT_BLOCKS * self.directions
        entries, offset = [], 0
        for entry in self.small.entries:
            entries.append(replace(entry, offset=offset, diagonal=False))
            offset += self.rank * entry.outputs
        self.a_offsets: dict[Entry, int] = {}
        self.c_offsets: dict[Entry, int] = {}
        self.c_size = 0
        for entry in entries:
            self.a_offsets[entry], offset = offset, offset + self.rank * entry.inputs
            self.c_offsets[entry], self.c_size = self.c_size, self.c_size + entry.count
        self.size = offset
        self.trained = AdapterLayout(tuple(entries), offset, seed)

    @property
    def rank(self) -> int:
        """Of the adapter."""
        return self.directions + self.kept

    def a(self, adapter: Tensor, entry: Entry) -> Tensor:
        """Return A of the flat adapter, [rank, inputs]."""
        start = self.a_offsets[entry]
        return adapter[start : start + self.rank * entry.inputs].reshape(self.rank, entry.inputs)

    def b(self, adapter: Tensor, entry: Entry) -> Tensor:
        """Return B of the flat adapter, [rank, outputs]."""
        return adapter[entry.offset : entry.offset + self.rank * entry.outputs].reshape(
            self.rank, entry.outputs
        )

    def c(self, subspace: Tensor, entry: Entry) -> Tensor:
        """Return C, [entry's rank, outputs]."""
        start = self.c_offsets[entry]
        return subspace[start : start + entry.count].reshape(entry.rank, entry.outputs)

    def begun(
        self, factors: Mapping[Entry, Factors], adapter: Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """Return adapter and C at the first step in a subspace.

        Args:
            factors: by the entries of `small`.
            adapter: whose directions behind the subspace's are kept; None for zeros.
        """
        flat = torch.zeros(self.size) if adapter is None else adapter.clone()
        c = torch.zeros(self.c_size)
        for of_r, entry in zip(self.small.entries, self.trained.entries, strict=True):
            value = factors[of_r]
            self.a(flat, entry)[: self.directions] = 0
            self.a(flat, entry)[: entry.rank] = value.a.t()
            self.b(flat, entry)[: self.directions] = 0
            self.c(c, entry)[:] = value.c
        return {"adapter": flat.numpy(), "subspace": c.numpy()}


class InformedProgram(PrgeProgram):
    """The training program over states `adapter`, `subspace`, and with Adam `moments`.

    Args:
        draw: noise of R.
        places: of the state.
    """

    def __init__(
        self,
        family: Family,
        places: Places,
        config: PrgeConfig,
        draw: Noise,
        token_loss: TokenLoss | None = None,
    ) -> None:
        super().__init__(family, places.trained, config, self._directions, token_loss)
        self.places, self.draw = places, draw
        self.c: dict[Entry, Tensor] = {}
        self.pairs = {
            b.offset: (r, b)
            for r, b in zip(places.small.entries, places.trained.entries, strict=True)
        }
        for linear in self.linears.values():
            linear.lora_a = torch.zeros(())  # it is a part of the state

    @property
    def state_shapes(self) -> dict[str, int]:
        """See `PrgeProgram.state_shapes`; the moments are followed by the number of updates they have seen."""
        shapes = {"adapter": self.places.size, "subspace": self.places.c_size}
        return shapes | (
            {"moments": 2 * self.places.small.size + 1} if self.config.optimizer == "adam" else {}
        )

    def bindings(self, adapter_P: Tensor) -> tuple[Tensor, ...]:
        """Return of each linear layer A [inputs, directions] and, where there is room for them, A and B of earlier
        subspaces."""
        found = []
        for entry, linear in self.linears.items():
            a, b = self.places.a(adapter_P, entry), self.places.b(adapter_P, entry)
            a = a if linear.scale == 1.0 else a * linear.scale
            found.append(a[: entry.rank].t())
            if self.places.kept:
                found += [a[self.places.directions :].t(), b[self.places.directions :]]
        return tuple(found)

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Put what `bindings` gave into the layers; nothing takes it out."""
        each = 3 if self.places.kept else 1
        for number, linear in enumerate(self.linears.values()):
            given = tensors[number * each : (number + 1) * each]
            linear.slot.a = given[0] if given else None
            linear.past = (given[1], given[2]) if len(given) == 3 else None

    @contextmanager
    def bound(self, state: Sequence[Tensor]) -> Iterator[None]:
        """See `PrgeProgram.bound`."""
        self.bind(self.bindings(state[0]))
        if len(state) > 1:
            self.c = {entry: self.places.c(state[1], entry) for entry in self.linears}
        try:
            yield
        finally:
            self.bind(())
            self.c = {}

    def _directions(
        self, seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int
    ) -> Tensor:
        """Return Z C of the linear layer whose B is at `start`."""
        of_r, entry = self.pairs[start]
        z = self.draw(seed, step, tensor, queries, of_r.offset, of_r.count)
        return (z[:, :, None] * self.c[entry]).reshape(queries, count)

    def layer_copies(self, layer: int, copies_of: CopiesOf) -> Iterator[tuple[Entry, Tensor]]:
        """See `PrgeProgram.layer_copies`; other directions lie between those of two linear layers."""
        for entry in self.layout.of_layer(layer):
            yield entry, copies_of(entry.offset, entry.count)

    def every_copy(self, copies_of: CopiesOf) -> list[Tensor]:
        """See `PrgeProgram.every_copy`."""
        return [
            copies_of(e.offset, e.count).reshape(-1, e.rank, e.outputs) for e in self.layout.entries
        ]

    def update(
        self,
        state: Sequence[Tensor],
        gradients_Q: Tensor,
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
    ) -> tuple[Tensor, ...]:
        """See `PrgeProgram.update`."""
        adapter, subspace, *moments = state
        places, size, q = self.places, self.places.small.size, self.config.queries
        z = self.draw(seed, step, NOISE_TENSOR, q, 0, size)
        change = ((gradients_Q / q)[:, None] * z).sum(dim=0)
        if moments:
            before, count = moments[0], moments[0][2 * size :] + 1.0
            change, mean, square = adam(change, before[:size], before[size : 2 * size], count)
            moments = [torch.cat([mean, square, count])]
        change = learning_rate * change
        parts, at = [], 0
        for of_r, entry in self.pairs.values():
            if entry.offset > at:
                parts.append(adapter[at : entry.offset])
            at = entry.offset + entry.count
            moved = change[of_r.offset : of_r.offset + of_r.count, None] * places.c(subspace, entry)
            parts.append(adapter[entry.offset : at] - moved.reshape(-1))
        # A tensor of the state that a host keeps goes in and comes out.
        return torch.cat([*parts, adapter[at:]]), subspace.clone(), *moments
