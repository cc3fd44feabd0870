"""P-RGE as a PyTorch program: one functional step that runs in eager and exports as it stands.

The state is one flat float32 vector of all B matrices (`layout.py`). A step generates the noise of
a layer where the layer needs it, and again for the update, so no noise is stored (the master-copy
form that section 3.2 describes). Copies are ordered +z_1 .. +z_q, -z_1 .. -z_q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ondevice.methods.model_loss import method_token_nll
from ondevice.methods.prge.layout import NOISE_TENSOR, AdapterLayout, Entry, Factors
from ondevice.nn.cross_entropy import shift
from ondevice.nn.graph_loss import labelled_only

if TYPE_CHECKING:
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.models import Family

ADAM = (0.9, 0.999, 1e-8)
"""Decay rates of Adam's moments, and its epsilon."""
UPDATE_CHUNK = 1 << 18
"""Elements updated at once: bounds the noise that exists during the update."""

Noise = Callable[[Tensor, Tensor, int, int, int, int], Tensor]
"""(seed, step, tensor, queries, start, count) -> float32 [queries, count]."""
TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""(hidden [N, hidden], labels [N]) -> negative log likelihood float32 [N]."""
CopiesOf = Callable[[int, int], Tensor]
"""(start, count) of a range of the flat adapter -> its copies, float32 [copies, count]."""


def adam(
    estimate: Tensor, mean: Tensor, square: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Adam's change before the learning rate, and both moments after the `count`-th
    estimate, [n] each."""
    beta1, beta2, epsilon = ADAM
    mean = beta1 * mean + (1.0 - beta1) * estimate
    square = beta2 * square + (1.0 - beta2) * estimate * estimate
    bias1, bias2 = 1.0 - beta1**count, 1.0 - beta2**count
    return (mean / bias1) / ((square / bias2).sqrt() + epsilon), mean, square


class Slot:
    """Holds the perturbed copies of one B while its layer runs; not a buffer, so that a program
    stays functional."""

    def __init__(self) -> None:
        self.copies: Tensor | None = None
        self.a: Tensor | None = None
        """A with the factor alpha / rank, if it is not a constant."""


class DualForwardingLinear(nn.Module):
    """x W + bmm(x A, B_g) for every group g of rows (Algorithm 1, line 7); A carries the factor
    alpha / rank."""

    lora_a: Tensor

    def __init__(self, base: nn.Module, a_IR: Tensor, scale: float) -> None:
        super().__init__()
        self.base = base
        weight = next(iter(base.parameters()), a_IR)
        dtype = getattr(base, "compute_dtype", None) or (
            weight.dtype if weight.is_floating_point() else a_IR.dtype
        )
        self.register_buffer("lora_a", (a_IR * scale).to(dtype))
        self.scale = scale
        self.c_RO: Tensor | None = None
        self.past: tuple[Tensor, Tensor] | None = None
        self.probe: Tensor | None = None
        self.slot = Slot()

    @property
    def weight(self) -> Any:
        """The frozen weight, which some models ask for its dtype."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """The frozen bias, or None."""
        return self.base.bias

    def matrices(self, copies_GRW: Tensor) -> Tensor:
        """Return each copy's B [copies, rank, outputs]: the copy itself, or R C of a diagonal R."""
        return copies_GRW if self.c_RO is None else copies_GRW * self.c_RO

    def forward(self, x_RTI: Tensor) -> Tensor:
        y_RTO = self.base(x_RTI)
        if self.past is not None:  # of earlier subspaces
            y_RTO = y_RTO + (x_RTI @ self.past[0].to(x_RTI.dtype)) @ self.past[1].to(x_RTI.dtype)
        if self.probe is not None:
            return y_RTO + x_RTI @ self.probe.to(x_RTI.dtype)
        b_GRO = self.slot.copies
        if b_GRO is None:
            return y_RTO
        groups = b_GRO.shape[0]
        a_IR = self.lora_a if self.slot.a is None else self.slot.a.to(x_RTI.dtype)
        xa = (x_RTI @ a_IR).reshape(groups, -1, b_GRO.shape[1])
        b = b_GRO.to(x_RTI.dtype)
        if x_RTI.is_cuda:  # product and sum in one kernel
            return torch.baddbmm(y_RTO.reshape(groups, -1, b.shape[2]), xa, b).reshape(y_RTO.shape)
        return y_RTO + torch.bmm(xa, b).reshape(y_RTO.shape)


class PrgeProgram(nn.Module):
    """The training program: `train_step`, `evaluate` and `apply_update`, all functional in the
    adapter.

    Args:
        family: the model, whose target linears are replaced in place.
        layout: where each B lies in the flat vector.
        noise: the generator's normal or Rademacher op, in the lowering wanted.
        token_loss: hidden states and labels to losses; by default the vocabulary-tiled one.
    """

    def __init__(
        self,
        family: Family,
        layout: AdapterLayout,
        config: PrgeConfig,
        noise: Noise,
        token_loss: TokenLoss | None = None,
    ) -> None:
        super().__init__()
        self.family, self.layout, self.config, self.noise = family, layout, config, noise
        self.model = family.model
        self.token_loss = token_loss or (
            lambda h, y: method_token_nll(family, h, y, config.loss_tiles, config.answers)
        )
        device = family.head_weight.device
        self.linears: dict[Entry, DualForwardingLinear] = {}
        for entry in layout.entries:
            a = torch.from_numpy(layout.frozen_a(entry)).to(device)
            name = family.linear_name(entry.layer, entry.target)
            linear = DualForwardingLinear(family.module(name), a, config.alpha / config.rank)
            family.replace(name, linear)
            self.linears[entry] = linear
        self.masks: dict[int, str] = {}
        self.labelled_tokens: int | None = None
        """Labelled tokens of a row at most, if shapes are fixed; None computes the loss at all
        positions."""

    @property
    def state_size(self) -> int:
        """Elements of the state: the adapter, and behind it Adam's two moments."""
        return self.layout.size * (3 if self.config.optimizer == "adam" else 1)

    @property
    def state_shapes(self) -> dict[str, int]:
        """Elements of each tensor of an exported program's state, the adapter first; Adam's moments
        are followed by the number of updates that they have seen."""
        size = self.layout.size
        return {"adapter": size} | (
            {"moments": 2 * size + 1} if self.config.optimizer == "adam" else {}
        )

    def bindings(self, adapter_P: Tensor) -> tuple[Tensor, ...]:
        """Return what the layers take of the adapter next to its copies."""
        return ()

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Put what `bindings` gave into the layers."""

    @contextmanager
    def bound(self, state: Sequence[Tensor]) -> Iterator[None]:
        """Compute with this state within the block, if more than the copies of B is taken from
        it."""
        yield

    def update(
        self,
        state: Sequence[Tensor],
        gradients_Q: Tensor,
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return an exported program's state after `apply_update`."""
        if self.config.optimizer != "adam":
            return (self.apply_update(state[0], gradients_Q, seed, step, learning_rate),)
        adapter, moments = state
        size = self.layout.size
        count = moments[2 * size :] + 1.0
        parts = adapter, moments[:size], moments[size : 2 * size]
        adapter, mean, square = self._adam(parts, count, gradients_Q, seed, step, learning_rate)
        return adapter, torch.cat([mean, square, count])

    def stepped(
        self,
        ids: Tensor,
        labels: Tensor,
        state: Sequence[Tensor],
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return losses, projected gradients, and an exported program's state after the step; see
        `train_step`."""
        with self.bound(state):
            losses = self.losses(ids, labels, self.perturbed(state[0], seed, step))
        gradients = self.projected_gradients(losses)
        return losses, gradients, *self.update(state, gradients, seed, step, learning_rate)

    @property
    def device(self) -> torch.device:
        return self.family.head_weight.device

    def set_factors(self, factors: dict[Entry, Factors]) -> None:
        """Put A and C of a subspace into the linear layers."""
        for entry, value in factors.items():
            linear = self.linears[entry]
            linear.lora_a = (value.a * linear.scale).to(linear.lora_a.dtype)
            linear.c_RO = value.c

    def plain_hidden(self, ids_ET: Tensor) -> Tensor:
        """Return hidden states of the model and of earlier subspaces only, [rows, tokens, hidden]."""
        return self.family.hidden(ids_ET, self._mask(ids_ET.shape[1]))

    def use_explicit_masks(self, lengths_tokens: tuple[int, ...]) -> None:
        """Add the causal mask as a constant of the program, as graphs for other runtimes need it."""
        for length in lengths_tokens:
            mask = torch.full((1, 1, length, length), -1e9).triu(1)
            self.masks[length] = f"causal_mask_{length}"
            self.register_buffer(self.masks[length], mask)

    def _mask(self, length_tokens: int) -> Tensor | None:
        name = self.masks.get(length_tokens)
        return None if name is None else getattr(self, name)

    def train_step(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        adapter_P: Tensor,
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
        position_ids_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one ZO-SGD step.

        Args:
            ids_BT, labels_BT: int64 [batch, tokens].
            adapter_P: float32 [layout.size].
            seed, step: int64 [1]; they key the noise.
            learning_rate: float32 [1].
            position_ids_BT: int64 [batch, tokens], where a sequence has several rows: see `Packing.packed_step`.

        Returns:
            losses float32 [copies], projected gradients float32 [q], the new adapter float32
            [layout.size].
        """
        losses = self.losses(
            ids_BT, labels_BT, self.perturbed(adapter_P, seed, step), position_ids_BT
        )
        gradients = self.projected_gradients(losses)
        return losses, gradients, self.apply_update(adapter_P, gradients, seed, step, learning_rate)

    def losses(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        copies_of: CopiesOf,
        position_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Return mean loss a labelled token of each copy, float32 [copies]."""
        prefix = self._run_prefix(ids_BT, position_ids_BT)
        passes, parts = self._passes(), []
        for members in passes:
            selected = copies_of if len(passes) == 1 else self._select(copies_of, members)
            places = None if position_ids_BT is None else position_ids_BT.repeat(len(members), 1)
            hidden = self._run_suffix(prefix.repeat(len(members), 1, 1), selected, places)
            nll, count = self.row_nll(hidden, labels_BT.repeat(len(members), 1))
            parts.append(
                nll.reshape(len(members), -1).sum(1) / count.reshape(len(members), -1).sum(1)
            )
        if len(parts) == 1:
            return parts[0]
        place = {
            member: part[i : i + 1]
            for members, part in zip(passes, parts)
            for i, member in enumerate(members)
        }
        return torch.cat([place[copy] for copy in range(self.config.copies)])

    @staticmethod
    def _select(copies_of: CopiesOf, members: list[int]) -> CopiesOf:
        stride = members[1] - members[0] if len(members) > 1 else 1
        return lambda start, count: copies_of(start, count)[members[0] : members[-1] + 1 : stride]

    def projected_gradients(self, losses: Tensor, scale: Tensor | float | None = None) -> Tensor:
        """Return (L+ - L-) / 2 epsilon of each query (Eq. 1), or the one-sided differences over
        their deviation (FZOO).

        Args:
            losses: float32 [copies], of the copies that `perturbed` gives.
            scale: epsilon; the config's by default.
        """
        q = self.config.queries
        if self.config.estimator == "central":
            return (losses[:q] - losses[q:]) / (
                2.0 * (self.config.perturbation_scale if scale is None else scale)
            )
        # Copy 0 is unperturbed; the deviation's scale takes the place of epsilon, so epsilon drops
        # out.
        differences = losses[1:] - losses[:1]
        centred = differences - differences.mean(dim=0, keepdim=True)
        deviation = (centred * centred).sum(dim=0, keepdim=True).div(q - 1).sqrt()
        return differences / (deviation + 1e-12)

    def apply_update(
        self,
        adapter_P: Tensor,
        gradients_Q: Tensor,
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
    ) -> Tensor:
        """Return adapter - learning_rate / q * sum_i g_i z_i, with z regenerated; float32
        [layout.size]."""
        if self.config.optimizer == "adam":
            # A new subspace begins with new moments; in a random one they are never new.
            every = self.config.refresh_every if self.config.subspace == "gradient" else None
            count = (step if every is None else step % every).to(torch.float32) + 1.0
            parts = adapter_P.split(self.layout.size)
            return torch.cat(self._adam(parts, count, gradients_Q, seed, step, learning_rate))
        coefficients = gradients_Q * (learning_rate / self.config.queries)
        parts = []
        for start in range(0, self.layout.size, UPDATE_CHUNK):
            count = min(UPDATE_CHUNK, self.layout.size - start)
            z = self.noise(seed, step, NOISE_TENSOR, self.config.queries, start, count)
            parts.append(adapter_P[start : start + count] - (coefficients[:, None] * z).sum(dim=0))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _adam(
        self,
        state: Sequence[Tensor],
        count: Tensor,
        gradients_Q: Tensor,
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return adapter and moments after Adam's `count`-th step with the estimate (1/q) sum_i g_i
        z_i, float32 [layout.size] each; `state` is the three before it."""
        size, q, parts = self.layout.size, self.config.queries, ([], [], [])
        for start in range(0, size, UPDATE_CHUNK):
            number = min(UPDATE_CHUNK, size - start)
            adapter, mean, square = (value[start : start + number] for value in state)
            z = self.noise(seed, step, NOISE_TENSOR, q, start, number)
            estimate = ((gradients_Q / q)[:, None] * z).sum(dim=0)
            update, mean, square = adam(estimate, mean, square, count)
            for part, value in zip(
                parts, (adapter - learning_rate * update, mean, square), strict=True
            ):
                part.append(value)
        adapter, mean, square = (torch.cat(part) if len(part) > 1 else part[0] for part in parts)
        return adapter, mean, square

    def hidden(self, ids_ET: Tensor, adapter_P: Tensor) -> Tensor:
        """Return hidden states under the unperturbed adapter, [rows, tokens, hidden]."""
        return self._run_suffix(
            self._run_prefix(ids_ET), lambda start, count: adapter_P[None, start : start + count]
        )

    def evaluate(
        self, ids_ET: Tensor, labels_ET: Tensor, adapter_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return negative log likelihood summed over each row's labelled tokens and their count,
        float32 [rows] each."""
        hidden = self.hidden(ids_ET, adapter_P)
        return self.row_nll(hidden, labels_ET)

    def perturbed(
        self, adapter_P: Tensor, seed: Tensor, step: Tensor, scale: Tensor | float | None = None
    ) -> CopiesOf:
        """Return the step's copies, made range by range when a layer asks for them.

        They are moved by `scale` (the config's by default) along the noise both ways, or one way
        and not at all.
        """
        config = self.config

        def copies_of(start: int, count: int) -> Tensor:
            base = adapter_P[None, start : start + count]
            z = self.noise(seed, step, NOISE_TENSOR, config.queries, start, count)
            z = z * (config.perturbation_scale if scale is None else scale)
            return torch.cat(
                [base + z, base - z] if config.estimator == "central" else [base, base + z]
            )

        return copies_of

    def _passes(self) -> list[list[int]]:
        """Group the numbers of the copies by forward pass."""
        config, q = self.config, self.config.queries
        if config.estimator == "one_sided":
            return (
                [list(range(q + 1))] if config.batch_queries else [[copy] for copy in range(q + 1)]
            )
        queries = [list(range(q))] if config.batch_queries else [[i] for i in range(q)]
        if config.batch_signs:
            return [group + [i + q for i in group] for group in queries]
        return [half for group in queries for half in (group, [i + q for i in group])]

    def _places(self, hidden: Tensor, position_ids: Tensor | None) -> tuple[Any, Tensor | None]:
        """Return what blocks take next to the hidden states: positions and mask."""
        if position_ids is not None:
            return self.family.packed(hidden, position_ids)
        length = hidden.shape[1]
        return self.family.positions(length, hidden.device, hidden.dtype), self._mask(length)

    def _run_prefix(self, ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        hidden = self.family.embed(ids_BT, position_ids_BT)
        position, mask = self._places(hidden, position_ids_BT)
        for layer in range(self.layout.first_layer):
            hidden = self.family.block(layer, hidden, position, mask)
        return hidden

    def _run_suffix(
        self, hidden_RTD: Tensor, copies_of: CopiesOf, position_ids_RT: Tensor | None = None
    ) -> Tensor:
        position, mask = self._places(hidden_RTD, position_ids_RT)
        for layer in range(self.layout.first_layer, self.family.dims.layers):
            for entry, copies in self.layer_copies(layer, copies_of):
                if entry.diagonal and self.linears[entry].c_RO is None:  # before the first subspace
                    continue
                shaped = copies.reshape(-1, entry.rank, entry.width)
                self.linears[entry].slot.copies = self.linears[entry].matrices(shaped)
            hidden_RTD = self.family.block(layer, hidden_RTD, position, mask)
            for entry in self.layout.of_layer(layer):
                self.linears[entry].slot.copies = None
        return self.family.final_norm(hidden_RTD)

    def layer_copies(self, layer: int, copies_of: CopiesOf) -> Iterator[tuple[Entry, Tensor]]:
        """Yield the copies [copies, entry.count] of each trained matrix of a layer."""
        base, count = self.layout.layer_range(layer)
        layer_copies = copies_of(base, count)
        for entry in self.layout.of_layer(layer):
            low = entry.offset - base
            yield entry, layer_copies[:, low : low + entry.count]

    def every_copy(self, copies_of: CopiesOf) -> list[Tensor]:
        """Return the copies of each trained matrix, [copies, rank, width]."""
        whole = copies_of(0, self.layout.size)
        found = [
            (entry, whole[:, entry.offset : entry.offset + entry.count])
            for entry in self.layout.entries
        ]
        return [values.reshape(-1, entry.rank, entry.width) for entry, values in found]

    def row_nll(self, hidden_RTD: Tensor, labels_RT: Tensor) -> tuple[Tensor, Tensor]:
        rows = labels_RT.shape[0]
        hidden, labels = shift(hidden_RTD, labels_RT)
        count = (labels >= 0).reshape(rows, -1).to(torch.float32).sum(1)
        if self.labelled_tokens is None:
            return self.token_loss(hidden, labels).reshape(rows, -1).sum(1), count
        limit = rows * self.labelled_tokens
        nll = labelled_only(self.token_loss, limit)(hidden, labels).reshape(rows, -1).sum(1)
        # Labels beyond the limit were not seen: no number is better than a wrong one.
        return torch.where(count.sum() > limit, torch.full_like(nll, float("nan")), nll), count


def flat_adapter(
    layout: AdapterLayout, device: torch.device | str, size: int | None = None
) -> Tensor:
    """Return B = 0: the adapter that leaves the model as it is; `size` counts the moments behind it
    too."""
    return torch.from_numpy(np.zeros(size or layout.size, dtype=np.float32)).to(device)
