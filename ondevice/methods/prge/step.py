"""P-RGE as a PyTorch program: one functional step that runs in eager and exports as it stands.

The state is one flat float32 vector of all B matrices (`layout.py`). A step generates the noise of
a layer where the layer needs it, and again for the update, so no noise is stored (the master-copy
form that section 3.2 describes). Copies are ordered +z_1 .. +z_q, -z_1 .. -z_q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ondevice.methods.model_loss import method_token_nll
from ondevice.methods.prge.layout import NOISE_TENSOR, AdapterLayout, Entry
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
    bias1 = 1.0 - beta1**count
    bias2 = 1.0 - beta2**count
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
        if self.c_RO is None:
            return copies_GRW
        return copies_GRW * self.c_RO

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
    adapter. `scalars` are seed and step, int64 [1], which key the noise, and the learning rate,
    float32 [1].

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
        self.family = family
        self.layout = layout
        self.config = config
        self.noise = noise
        self.model = family.model
        self.token_loss = token_loss or (
            lambda h, y: method_token_nll(family, h, y, config.loss_tiles, config.answers)
        )
        self.linears: dict[Entry, DualForwardingLinear] = {}
        for entry in layout.entries:
            a = torch.from_numpy(layout.frozen_a(entry)).to(self.device)
            name = family.linear_name(entry.layer, entry.target)
            linear = DualForwardingLinear(family.module(name), a, config.alpha / config.rank)
            family.replace(name, linear)
            self.linears[entry] = linear
        self.masks: dict[int, str] = {}
        self.run_copies: Callable[[Tensor, Tensor], Tensor] | None = None
        """Stands for `copies_hidden` if all copies are one pass and rows are not packed."""
        self.labelled_tokens: int | None = None
        """Labelled tokens of a row at most, if shapes are fixed; None computes the loss at all
        positions."""

    def release(self) -> None:
        """Give the model its own layers back; a second call does nothing."""
        for entry, linear in self.linears.items():
            name = self.family.linear_name(entry.layer, entry.target)
            if self.family.module(name) is linear:
                self.family.replace(name, linear.base)

    @property
    def device(self) -> torch.device:
        return self.family.head_weight.device

    @property
    def state_size(self) -> int:
        """Elements of the state: the adapter, and behind it Adam's two moments."""
        return self.layout.size * (3 if self.config.optimizer == "adam" else 1)

    @property
    def state_shapes(self) -> dict[str, int]:
        """Elements of each tensor of an exported program's state, the adapter first; Adam's moments
        are followed by the number of updates that they have seen."""
        shapes = {"adapter": self.layout.size}
        if self.config.optimizer == "adam":
            shapes["moments"] = 2 * self.layout.size + 1
        return shapes

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
        self, state: Sequence[Tensor], gradients_Q: Tensor, *scalars: Tensor
    ) -> tuple[Tensor, ...]:
        """Return an exported program's state after `apply_update`."""
        if self.config.optimizer != "adam":
            return (self.apply_update(state[0], gradients_Q, *scalars),)
        adapter, moments = state
        size = self.layout.size
        count = moments[2 * size :] + 1.0
        parts = adapter, moments[:size], moments[size : 2 * size]
        adapter, mean, square = self._adam(parts, count, gradients_Q, *scalars)
        return adapter, torch.cat([mean, square, count])

    def stepped(
        self, ids: Tensor, labels: Tensor, state: Sequence[Tensor], *scalars: Tensor
    ) -> tuple[Tensor, ...]:
        """Return losses, projected gradients, and an exported program's state after the step; see
        `train_step`."""
        with self.bound(state):
            losses = self.losses(ids, labels, self.perturbed(state[0], *scalars[:2]))
        gradients = self.projected_gradients(losses)
        return losses, gradients, *self.update(state, gradients, *scalars)

    def use_explicit_masks(self, lengths_tokens: tuple[int, ...]) -> None:
        """Add the causal mask as a constant of the program, as graphs for other runtimes need it."""
        for length in lengths_tokens:
            mask = torch.full((1, 1, length, length), -1e9).triu(1)
            self.masks[length] = f"causal_mask_{length}"
            self.register_buffer(self.masks[length], mask)

    def _mask(self, length_tokens: int) -> Tensor | None:
        if length_tokens not in self.masks:
            return None
        return getattr(self, self.masks[length_tokens])

    def train_step(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        adapter_P: Tensor,
        *scalars: Tensor,
        position_ids_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one ZO-SGD step.

        Args:
            ids_BT, labels_BT: int64 [batch, tokens].
            adapter_P: float32 [layout.size].
            position_ids_BT: int64 [batch, tokens], if a sequence has several rows; see
                `Packing.packed_step`.

        Returns:
            losses float32 [copies], projected gradients float32 [q], the new adapter float32
            [layout.size].
        """
        copies_of = self.perturbed(adapter_P, *scalars[:2])
        losses = self.losses(ids_BT, labels_BT, copies_of, position_ids_BT)
        gradients = self.projected_gradients(losses)
        return losses, gradients, self.apply_update(adapter_P, gradients, *scalars)

    def losses(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        copies_of: CopiesOf,
        position_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Return mean loss a labelled token of each copy, float32 [copies]."""
        passes = self.passes()
        if len(passes) == 1 and self.run_copies is not None and position_ids_BT is None:
            hidden = self.run_copies(ids_BT, copies_of(0, self.layout.size))
            return self._mean_losses(hidden, labels_BT, len(passes[0]))
        prefix = self._run_prefix(ids_BT, position_ids_BT)
        if len(passes) == 1:
            return self._pass_losses(prefix, labels_BT, copies_of, len(passes[0]), position_ids_BT)
        losses = torch.empty(self.config.copies, device=self.device)
        for copies in passes:
            at = slice(copies.start, copies.stop, copies.step)

            def selected(start: int, count: int, at: slice = at) -> Tensor:
                return copies_of(start, count)[at]

            losses[at] = self._pass_losses(
                prefix, labels_BT, selected, len(copies), position_ids_BT
            )
        return losses

    def _pass_losses(
        self,
        prefix: Tensor,
        labels_BT: Tensor,
        copies_of: CopiesOf,
        copies: int,
        position_ids_BT: Tensor | None,
    ) -> Tensor:
        """Return the mean losses of the copies of one forward pass, float32 [copies]."""
        positions = None if position_ids_BT is None else position_ids_BT.repeat(copies, 1)
        hidden = self._run_suffix(prefix.repeat(copies, 1, 1), copies_of, positions)
        return self._mean_losses(hidden, labels_BT, copies)

    def copies_hidden(self, ids_BT: Tensor, copies_GP: Tensor, *placed: Tensor | None) -> Tensor:
        """Return the hidden states of every copy of the flat adapter, [copies * batch, tokens,
        hidden]; see `hidden`."""
        prefix = self._run_prefix(ids_BT, *placed)
        if len(copies_GP) > 1:
            prefix = prefix.repeat(len(copies_GP), 1, 1)
        return self._run_suffix(
            prefix, lambda start, count: copies_GP[:, start : start + count], *placed
        )

    def _mean_losses(self, hidden: Tensor, labels_BT: Tensor, copies: int) -> Tensor:
        """Return the mean losses of the copies from their hidden states, float32 [copies]."""
        nll, count = self.row_nll(hidden, labels_BT.repeat(copies, 1))
        return nll.reshape(copies, -1).sum(1) / count.reshape(copies, -1).sum(1)

    def passes(self) -> list[range]:
        """Group the numbers of the copies by forward pass."""
        config = self.config
        q = self.config.queries
        both_signs = config.estimator == "central" and config.batch_signs
        if config.batch_queries and (both_signs or config.estimator == "one_sided"):
            return [range(config.copies)]
        if config.batch_queries:
            return [range(q), range(q, 2 * q)]
        if both_signs:
            return [range(i, 2 * q, q) for i in range(q)]
        return [range(i, i + 1) for i in range(config.copies)]

    def projected_gradients(self, losses: Tensor, scale: Tensor | float | None = None) -> Tensor:
        """Return (L+ - L-) / 2 epsilon of each query (Eq. 1), or the one-sided differences over
        their deviation (FZOO).

        Args:
            losses: float32 [copies], of the copies that `perturbed` gives.
            scale: epsilon; the config's by default.
        """
        q = self.config.queries
        if self.config.estimator == "central":
            if scale is None:
                scale = self.config.perturbation_scale
            return (losses[:q] - losses[q:]) / (2.0 * scale)
        # Copy 0 is unperturbed; the deviation's scale takes the place of epsilon, so epsilon drops
        # out.
        differences = losses[1:] - losses[:1]
        centred = differences - differences.mean(dim=0, keepdim=True)
        deviation = (centred * centred).sum(dim=0, keepdim=True).div(q - 1).sqrt()
        return differences / (deviation + 1e-12)

    def apply_update(self, adapter_P: Tensor, gradients_Q: Tensor, *scalars: Tensor) -> Tensor:
        """Return adapter - learning_rate / q * sum_i g_i z_i, with z regenerated; float32
        [layout.size]."""
        seed, step, learning_rate = scalars
        if self.config.optimizer == "adam":
            # A new subspace begins with new moments; in a random one they are never new.
            if self.config.subspace == "gradient" and self.config.refresh_every is not None:
                step_of_subspace = step % self.config.refresh_every
            else:
                step_of_subspace = step
            count = step_of_subspace.to(torch.float32) + 1.0
            parts = adapter_P.split(self.layout.size)
            return torch.cat(self._adam(parts, count, gradients_Q, *scalars))
        coefficients_Q = gradients_Q * (learning_rate / self.config.queries)
        parts = []
        for at in self._chunks():
            z = self._noise_at(at, seed, step)
            parts.append(adapter_P[at] - (coefficients_Q[:, None] * z).sum(dim=0))
        return _cat(parts)

    def _chunks(self) -> list[slice]:
        """Cut the adapter into ranges that are updated at once."""
        size = self.layout.size
        starts = range(0, size, UPDATE_CHUNK)
        return [slice(start, min(start + UPDATE_CHUNK, size)) for start in starts]

    def _noise_at(self, at: slice, seed: Tensor, step: Tensor) -> Tensor:
        count = at.stop - at.start
        return self.noise(seed, step, NOISE_TENSOR, self.config.queries, at.start, count)

    def _adam(
        self, state: Sequence[Tensor], count: Tensor, gradients_Q: Tensor, *scalars: Tensor
    ) -> tuple[Tensor, ...]:
        """Return adapter and moments after Adam's `count`-th step with the estimate (1/q) sum_i g_i
        z_i, float32 [layout.size] each; `state` is the three before it."""
        seed, step, learning_rate = scalars
        parts = []
        for at in self._chunks():
            adapter, mean, square = (value[at] for value in state)
            z = self._noise_at(at, seed, step)
            estimate = ((gradients_Q / self.config.queries)[:, None] * z).sum(dim=0)
            update, mean, square = adam(estimate, mean, square, count)
            parts.append((adapter - learning_rate * update, mean, square))
        return tuple(_cat(column) for column in zip(*parts, strict=True))

    def hidden(self, ids_ET: Tensor, adapter_P: Tensor, *placed: Tensor | None) -> Tensor:
        """Return hidden states under the unperturbed adapter, [rows, tokens, hidden].

        Args:
            placed: positions and branches of prompts with their continuations, as in
                `core.session.Branching`.
        """
        return self.copies_hidden(ids_ET, adapter_P[None], *placed)

    def evaluate(
        self, ids_ET: Tensor, labels_ET: Tensor, adapter_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return negative log likelihood summed over each row's labelled tokens and their count,
        float32 [rows] each."""
        return self.row_nll(self.hidden(ids_ET, adapter_P), labels_ET)

    def perturbed(
        self, adapter_P: Tensor, seed: Tensor, step: Tensor, scale: Tensor | float | None = None
    ) -> CopiesOf:
        """Return the step's copies, made range by range when a layer asks for them.

        They are moved by `scale` (the config's by default) along the noise both ways, or one way
        and not at all.
        """
        epsilon = self.config.perturbation_scale
        if scale is not None:
            epsilon = scale

        def copies_of(start: int, count: int) -> Tensor:
            base = adapter_P[None, start : start + count]
            z = self.noise(seed, step, NOISE_TENSOR, self.config.queries, start, count) * epsilon
            if self.config.estimator == "central":
                return torch.cat([base + z, base - z])
            return torch.cat([base, base + z])

        return copies_of

    def _placed(
        self, hidden: Tensor, position_ids: Tensor | None = None, branches: Tensor | None = None
    ) -> tuple[Any, Tensor | None]:
        """Return what blocks take next to the hidden states: positions and mask."""
        if position_ids is not None and branches is not None:
            return self.family.branched(hidden, position_ids, branches)
        if position_ids is not None:
            return self.family.packed(hidden, position_ids)
        length = hidden.shape[1]
        return self.family.positions(length, hidden.device, hidden.dtype), self._mask(length)

    def _run_prefix(self, ids_BT: Tensor, *placed: Tensor | None) -> Tensor:
        hidden = self.family.embed(ids_BT, *placed[:1])
        position, mask = self._placed(hidden, *placed)
        for layer in range(self.layout.first_layer):
            hidden = self.family.block(layer, hidden, position, mask)
        return hidden

    def _run_suffix(
        self, hidden_RTD: Tensor, copies_of: CopiesOf, *placed: Tensor | None
    ) -> Tensor:
        position, mask = self._placed(hidden_RTD, *placed)
        for layer in range(self.layout.first_layer, self.family.dims.layers):
            for entry, copies in self.layer_copies(layer, copies_of):
                self._give(entry, copies)
            hidden_RTD = self.family.block(layer, hidden_RTD, position, mask)
            for entry in self.layout.of_layer(layer):
                self.linears[entry].slot.copies = None
        return self.family.final_norm(hidden_RTD)

    def _give(self, entry: Entry, copies: Tensor) -> None:
        """Put the copies of a trained matrix into its layer, as the Bs that they stand for."""
        linear = self.linears[entry]
        if not entry.diagonal or linear.c_RO is not None:  # else before the first subspace
            linear.slot.copies = linear.matrices(entry.shaped(copies))

    def layer_copies(self, layer: int, copies_of: CopiesOf) -> Iterator[tuple[Entry, Tensor]]:
        """Yield the copies [copies, entry.count] of each trained matrix of a layer."""
        base, count = self.layout.layer_range(layer)
        if not count:
            return
        layer_copies = copies_of(base, count)
        for entry in self.layout.of_layer(layer):
            low = entry.offset - base
            yield entry, layer_copies[:, low : low + entry.count]

    def every_copy(self, copies_of: CopiesOf) -> list[Tensor]:
        """Return the copies of each trained matrix, [copies, rank, width]."""
        copies = copies_of(0, self.layout.size)
        entries = self.layout.entries
        flat = [copies[:, entry.offset : entry.offset + entry.count] for entry in entries]
        return [entry.shaped(values) for entry, values in zip(entries, flat, strict=True)]

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


def _cat(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))
