"""Runs of zeroth-order variants side by side, for `benchmarks.prge.race`: each seed and rate is an
adapter of one pass.

A variant is what moves (the whole of B behind a random, a gradient's or the activations' A; or a
small square R between an A and a C that a gradient's singular vectors give), how it is estimated
(queries, one or both signs), the rule that turns the estimate into a step, and the loss. A step of
a group of runs is one forward pass of `packed.PackedModel`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.prge.calibrating import refresh
from benchmarks.prge.packed import Packed
from benchmarks.prge.racing_model import TARGETS, AnswerRows, RacingModel
from benchmarks.prge.variants import RULES, Variant
from ondevice.data.batching import Batches
from ondevice.data.examples import Dataset

AVERAGE = 0.99
"""Decay a step of the averaged adapter."""
EVAL_TOKENS = 150_000


class Group:
    """Runs of one group of variants: [(variant, rate, seed)]."""

    def __init__(
        self, model: RacingModel, train: Dataset, members: Sequence[tuple[Variant, float, int]]
    ) -> None:
        self.model, self.members, self.shape, self.device = (
            model,
            list(members),
            members[0][0],
            model.device,
        )
        self.table = AnswerRows(train, self.device)
        seeds = sorted({seed for _, _, seed in members})
        self.seed_index = torch.tensor(
            [seeds.index(seed) for _, _, seed in members], device=self.device
        )
        self.generators = [torch.Generator(self.device).manual_seed(1000 + seed) for seed in seeds]
        orders = {seed: Batches(train, self.shape.batch, None, seed, 0) for seed in seeds}
        rows = {
            seed: np.array([orders[seed].rows_at(t) for t in range(self.shape.steps)])
            for seed in seeds
        }
        self.jobs = np.stack([rows[seed] for _, _, seed in members], 1)
        self.calibration = [np.random.default_rng([seed, 7]) for _, _, seed in members]
        self.rate = torch.tensor(
            [rate for _, rate, _ in members], device=self.device, dtype=torch.float32
        )
        self.layout: list[tuple[int, str, int, int]] = []
        offset, rank = 0, self.shape.rank
        for layer in range(model.dims.layers):
            for target in TARGETS:
                width = self.shape.width(model.dims.linear_shape(target)[1])
                self.layout.append((layer, target, offset, width))
                offset += rank * width
        runs = len(members)
        self.state = torch.zeros(runs, offset, device=self.device)
        self.average = torch.zeros_like(self.state)
        self.mean, self.square = torch.zeros_like(self.state), torch.zeros_like(self.state)
        self.spread, self.age = (
            torch.zeros(runs, device=self.device),
            torch.zeros(runs, device=self.device),
        )
        self.is_rule = {rule: self._mask(lambda v, rule=rule: v.rule == rule) for rule in RULES}
        self.a, self.c = self._random_factors()
        self.delta: list[dict[str, Tensor]] | None = None
        self.done = 0
        below = [torch.full((rank * width,), float(layer < model.dims.layers - self.shape.top))
                 for layer, _, _, width in self.layout]  # fmt: skip
        self.estimated = torch.cat(below).to(self.device)

    def _mask(self, test: Callable[[Variant], bool]) -> Tensor:
        return torch.tensor([test(variant) for variant, _, _ in self.members], device=self.device)

    def _random_factors(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """A of variance 1 / inputs, and for a small R a C of variance 1 / rank, drawn from each
        run's seed."""
        a: list[dict[str, Tensor]] = []
        c: list[dict[str, Tensor]] = []
        draws = [torch.Generator().manual_seed(seed) for _, _, seed in self.members]
        rank, dims = self.shape.rank, self.model.dims
        for _ in range(dims.layers):
            a.append({})
            c.append({})
            for target in TARGETS:
                inputs, outputs = dims.linear_shape(target)
                values = [torch.randn(inputs, rank, generator=g) / inputs**0.5 for g in draws]
                a[-1][target] = torch.stack(values).to(self.device)
                if self.shape.small:
                    values = [torch.randn(rank, outputs, generator=g) / rank**0.5 for g in draws]
                    c[-1][target] = torch.stack(values).to(self.device)
        return a, c

    @contextmanager
    def fitted(self, copies_SCP: Tensor | None, runs: slice = slice(None)) -> Iterator[None]:
        """Give the model these runs' matrices and the copies' R or B; None leaves the adapter
        out."""
        model, dtype = self.model, self.model.dtype
        model.a, model.b = [], []
        if copies_SCP is not None:
            flat = copies_SCP.reshape(-1, copies_SCP.shape[2])
            model.a = [
                {target: a[runs].to(dtype) for target, a in layer.items()} for layer in self.a
            ]
            model.b = [{} for _ in self.a]
            for layer, target, offset, width in self.layout:
                part = flat[:, offset : offset + self.shape.rank * width].view(
                    -1, self.shape.rank, width
                )
                if self.shape.small:
                    part = self.spread_out(part, self.c[layer][target][runs])
                model.b[layer][target] = part.to(dtype)
        if self.delta is not None:
            model.delta = [{target: d[runs] for target, d in layer.items()} for layer in self.delta]
        yield
        model.a, model.b, model.delta, model.covariance = [], [], None, None

    def spread_out(self, small: Tensor, c: Tensor) -> Tensor:
        """Return R C, [runs * copies, rank, outputs], of a square or diagonal R [runs * copies,
        rank, width]."""
        runs, rank, outputs = c.shape
        if self.shape.space == "diag":
            return (small.view(runs, -1, rank, 1) * c[:, None]).view(-1, rank, outputs)
        return torch.bmm(small.reshape(runs, -1, small.shape[2]), c).view(-1, rank, outputs)

    def losses(self, logits: Tensor, rows_SB: Tensor) -> Tensor:
        """Loss of each row, float32 [runs, copies, rows]."""
        gold = self.table.gold[rows_SB]
        target = gold if self.shape.loss == "answers" else self.table.answers[gold]
        picked = logits.gather(3, target[:, None, :, None].expand(*logits.shape[:3], 1))[..., 0]
        return logits.logsumexp(3) - picked

    def run(self, stop: int) -> None:
        """Train up to step `stop`."""
        for step in range(self.done, stop):
            informed = [variant.space not in ("full", "rand") for variant, _, _ in self.members]
            due = [
                number
                for number, (variant, _, _) in enumerate(self.members)
                if informed[number]
                and (step == 0 or (variant.refresh and step % variant.refresh == 0))
            ]
            if due:
                refresh(self, due, step)
            self._step(step)
        self.done = max(self.done, stop)

    def _step(self, step: int) -> None:
        packed, rows = self.table.pack(self.jobs[step])
        rate = self.rate * (1 - step / self.shape.steps)
        if self.shape.first_order:
            gradient = self._backpropagated(packed, rows)
        else:
            gradient = self._estimate(packed, rows, step)
            if (
                self.shape.top
            ):  # exact gradients of the top layers' numbers, whose noise is left out below
                gradient += (1 - self.estimated) * self._backpropagated(packed, rows)
        with torch.no_grad():
            self._update(gradient, rate)

    def _backpropagated(self, packed: Packed, rows: Tensor) -> Tensor:
        state = self.state.requires_grad_(True)
        with torch.enable_grad(), self.fitted(state[:, None]):
            logits = self.model.logits(self.table, packed, rows, 1, self.shape.loss == "answers")
            (gradient,) = torch.autograd.grad(self.losses(logits, rows).mean(2).sum(), state)
        self.state.requires_grad_(False)
        return gradient

    def _mean_losses(self, copies: Tensor, packed: Packed, rows: Tensor) -> Tensor:
        """Mean loss over the rows, [runs, copies]."""
        with self.fitted(copies):
            logits = self.model.logits(
                self.table, packed, rows, copies.shape[1], self.shape.loss == "answers"
            )
            return self.losses(logits, rows).mean(2)

    def _noise(self, queries: int) -> Tensor:
        """Directions, [runs, queries, numbers]; none of the numbers whose gradient is exact."""
        size = self.state.shape[1]
        noise = torch.stack(
            [torch.randn(queries, size, device=self.device, generator=g) for g in self.generators]
        )
        return noise.index_select(0, self.seed_index) * self.estimated

    def _in_cone(self, noise: Tensor) -> Tensor:
        """Directions around the mean of earlier estimates (ConMeZO): `cone` of their squared length
        lies along it."""
        axis = self.mean * self.estimated
        axis = axis / axis.norm(dim=1, keepdim=True).clamp(min=1e-30) * self.estimated.sum().sqrt()
        share = self.shape.cone * (self.age > 0).float()[:, None, None]
        return share.sqrt() * axis[:, None] + (1 - share).sqrt() * noise

    def _guided(self, packed: Packed, rows: Tensor) -> Tensor:
        """One direction out of a pool (MeZO-GV): the mean of the half with the lower losses less
        that of the other."""
        pool = self._noise(self.shape.pool)
        losses = self._mean_losses(self.state[:, None] + self.shape.epsilon * pool, packed, rows)
        lower = self.shape.pool // 2
        weight = torch.full_like(losses, -1.0 / (self.shape.pool - lower))
        weight.scatter_(1, losses.argsort(1)[:, :lower], 1.0 / lower)
        return torch.einsum("sq,sqd->sd", weight, pool)[:, None]

    @torch.no_grad()
    def _estimate(self, packed: Packed, rows: Tensor, step: int) -> Tensor:
        q, epsilon = self.shape.queries_at(step), self.shape.epsilon
        noise = self._guided(packed, rows) if self.shape.pool else self._noise(q)
        if self.shape.cone:
            noise = self._in_cone(noise)
        base, moved = self.state[:, None], epsilon * noise
        copies = torch.cat(
            [base, base + moved] if self.shape.one_sided else [base + moved, base - moved], 1
        )
        losses = self._mean_losses(copies, packed, rows)
        slope = (
            losses[:, 1:] - losses[:, :1]
            if self.shape.one_sided
            else (losses[:, :q] - losses[:, q:]) / 2
        )
        slope = slope / epsilon
        self.spread.mul_(0.98).add_(0.02 * slope.square().mean(1))
        return torch.einsum("sq,sqd->sd", slope, noise) / q

    def _update(self, gradient: Tensor, rate: Tensor) -> None:
        """Apply each run's rule. `norm` divides by the running root mean square of the projected
        gradients."""
        self.age += 1
        age = self.age[:, None]
        self.mean.lerp_(gradient, 0.1)
        self.square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        mean = self.mean / (1 - 0.9**age)
        spread = (self.spread / (1 - 0.98**self.age)).sqrt().clamp(min=1e-12)[:, None]
        steps = {
            "sgd": lambda: gradient,
            "momentum": lambda: self.mean,
            "adam": lambda: mean / ((self.square / (1 - 0.999**age)).sqrt() + 1e-8),
            "sign": lambda: self.mean.sign(),
            "muon": lambda: self._orthogonal(self.mean),
            "norm": lambda: gradient / spread,
            "norm-momentum": lambda: self.mean / spread,
        }
        update = torch.zeros_like(gradient)
        for rule, make in steps.items():
            if any(variant.rule == rule for variant, _, _ in self.members):
                update = torch.where(self.is_rule[rule][:, None], make(), update)
        self.state.addcmul_(rate[:, None], update, value=-1)
        weight = torch.clamp(1 / self.age, min=1 - AVERAGE)  # a plain mean while it is young
        self.average.lerp_(self.state, weight[:, None])

    def _orthogonal(self, value: Tensor) -> Tensor:
        """Newton-Schulz of each square R (Muon's quintic, five rounds)."""
        rank = self.shape.rank
        x = value.view(value.shape[0], -1, rank, rank)
        x = x / x.norm(dim=(2, 3), keepdim=True).clamp(min=1e-30)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.reshape(value.shape)

    @torch.no_grad()
    def evaluate(self, table: AnswerRows, averaged: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy and mean loss over the answers of every run, [runs] each."""
        state = (self.average if averaged else self.state)[:, None]
        runs, order = len(self.members), np.argsort(table.lengths, kind="stable")
        right = losses = torch.zeros(runs, device=self.device)
        start = 0
        while start < len(order):
            rows = max(
                1,
                EVAL_TOKENS // (runs * int(table.lengths[order[min(start + 64, len(order) - 1)]])),
            )
            part = order[start : start + min(rows, 256)]
            packed, rows_SB = table.pack(np.broadcast_to(part, (runs, len(part))).copy())
            with self.fitted(state):
                logits = self.model.logits(table, packed, rows_SB, 1, answers=True)[:, 0]
            gold = table.gold[rows_SB]
            right = right + (logits.argmax(2) == gold).sum(1)
            losses = losses + functional.cross_entropy(
                logits.flatten(0, 1), gold.flatten(), reduction="none"
            ).view(runs, -1).sum(1)
            start += len(part)
        return (right / len(order)).cpu().numpy(), (losses / len(order)).cpu().numpy()


def race(
    model: RacingModel, sets: tuple[Dataset, Dataset, Dataset], members: Sequence[tuple[Variant, float, int]],
    every: int, deadline: float, report: Callable[[list[dict[str, Any]]], None],
) -> bool:  # fmt: skip
    """Train one group and hand its figures to `report` at every evaluation; False if the deadline
    ended it.

    `curve` has [step, accuracy and loss where rates are chosen, accuracy and loss where they are
    reported, the same accuracies of the averaged adapter]. `sets` are to train on, to choose rates
    on and to report on.
    """
    train, chosen_on, reported_on = sets
    group = Group(model, train, members)
    choose, judge = AnswerRows(chosen_on, model.device), AnswerRows(reported_on, model.device)
    curves: list[list[list[float]]] = [[] for _ in members]
    started, evaluating = time.perf_counter(), 0.0
    while group.done < group.shape.steps:
        if time.perf_counter() > deadline:
            return False
        group.run(min(group.done + every, group.shape.steps))
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        values = [*group.evaluate(choose), *group.evaluate(judge)]
        values += [group.evaluate(table, averaged=True)[0] for table in (choose, judge)]
        evaluating += time.perf_counter() - before
        for i, curve in enumerate(curves):
            curve.append([group.done, *(round(float(value[i]), 4) for value in values)])
        seconds = (time.perf_counter() - started - evaluating) / len(members)
        report([
            {"variant": variant.text, "rate": rate, "seed": seed, "steps": group.done,
             "finished": group.done == variant.steps, "row_forwards": round(variant.row_forwards(model.dims.layers), 2),
             "numbers": group.state.shape[1], "seconds": round(seconds, 2), "curve": curves[i]}
            for i, (variant, rate, seed) in enumerate(members)
        ])  # fmt: skip
    return True
