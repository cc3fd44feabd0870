"""Runs of zeroth-order variants side by side, for `benchmarks.prge.race`: each seed and rate is an adapter of one pass.

A variant is what moves (the whole of B behind a random, a gradient's or the activations' A; or a small square R between
an A and a C that a gradient's singular vectors give), how it is estimated (queries, one or both signs), the rule that
turns the estimate into a step, and the loss. A step of a group of runs is one forward pass of `packed.PackedModel`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.prge.packed import LENGTHS, Packed, PackedModel, flat_index, rounded
from ondevice.data.batching import Batches
from ondevice.data.encode import IGNORE, Dataset
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import AdapterLayout

TARGETS = ("q_proj", "v_proj")
SPACES = ("full", "grad-a", "act", "xs", "diag", "rand")
RULES = ("sgd", "momentum", "adam", "sign", "muon", "norm", "norm-momentum")
CALIBRATION_ROWS = 64
AVERAGE = 0.99
"""Decay a step of the averaged adapter."""
GRADIENT_TOKENS = 12_000
"""Tokens whose activations an exact gradient keeps at once."""
EVAL_TOKENS = 150_000


@dataclass(frozen=True)
class Variant:
    """One way to train; `parse` reads it from words such as 'xs q4 r16 adam refresh500'."""

    text: str
    space: str = "xs"
    rank: int = 16
    queries: int = 4
    batch: int = 0
    one_sided: bool = False
    rule: str = "sgd"
    loss: str = "answers"
    refresh: int = 0
    power: float = 0.0
    epsilon: float = 1e-2
    steps: int = 0
    calibration: int = CALIBRATION_ROWS
    first_order: bool = False

    @classmethod
    def parse(cls, text: str, steps: int, first_order_steps: int) -> Variant:
        """Read the words of a variant; a batch that is not named makes q times batch 16 (first order: 8 rows)."""
        fields: dict[str, Any] = {}
        numbers = {"q": "queries", "r": "rank", "b": "batch", "t": "steps", "refresh": "refresh", "power": "power",
                   "eps": "epsilon", "cal": "calibration"}  # fmt: skip
        for word in text.split():
            match = re.fullmatch(r"(q|r|b|t|refresh|power|eps|cal)([0-9.e-]+)", word)
            if word in SPACES:
                fields["space"] = word
            elif word in RULES:
                fields["rule"] = word
            elif word in ("vocab", "answers"):
                fields["loss"] = word
            elif word == "onesided":
                fields["one_sided"] = True
            elif word == "fo":
                fields["first_order"] = True
            elif match:
                value = float(match[2])
                fields[numbers[match[1]]] = value if match[1] in ("power", "eps") else int(value)
            else:
                raise ValueError(f"{text!r}: {word!r} is no word of a variant")
        first = fields.get("first_order", False)
        fields.setdefault("steps", first_order_steps if first else steps)
        fields.setdefault("batch", 8 if first else max(1, 16 // fields.get("queries", 4)))
        return cls(text, **fields)

    @property
    def copies(self) -> int:
        """Forward passes of a row in one step."""
        if self.first_order:
            return 1
        return self.queries + 1 if self.one_sided else 2 * self.queries

    @property
    def row_forwards(self) -> float:
        """Rows that pass forward in a step; a backward pass counts as two, calibrations are spread over the steps."""
        calibrations = 0.0
        if self.space in ("grad-a", "xs", "diag", "act"):
            calibrations = 3 * self.calibration * (1 + (self.steps - 1) // self.refresh if self.refresh else 1)
        return self.batch * (3 if self.first_order else self.copies) + calibrations / self.steps

    @property
    def small(self) -> bool:
        """Whether R is what moves, rank by rank, rather than B."""
        return self.space in ("xs", "diag", "rand")

    def width(self, outputs: int) -> int:
        """Return the columns of what moves: R's, one where R is diagonal, or B's."""
        if self.space == "diag":
            return 1
        return self.rank if self.small else outputs

    def group(self) -> tuple[Any, ...]:
        """Variants of one value run in the same pass."""
        return (self.small, self.space == "diag", self.rank, self.queries, self.batch, self.one_sided, self.loss,
                self.steps, self.epsilon, self.first_order)  # fmt: skip


class AnswerRows:
    """Rows that end before the first token in which their candidates differ, on the device."""

    def __init__(self, dataset: Dataset, device: Any) -> None:
        items = dataset.items
        answers = [[[label for label in c.labels if label != IGNORE] for c in item.candidates] for item in items]
        if any(answer != answers[0] for answer in answers):
            raise ValueError("a race needs a task whose rows share their candidates")
        same = next(i for i, tokens in enumerate(zip(*answers[0], strict=False)) if len(set(tokens)) == len(tokens))
        self.answers = torch.tensor([tokens[same] for tokens in answers[0]], device=device)
        inputs = []
        for item in items:
            example = item.candidates[int(item.gold or 0)]
            first = next(t for t, label in enumerate(example.labels) if t and label != IGNORE)
            inputs.append(example.ids[: first + same])
        self.lengths = np.array([len(ids) for ids in inputs])
        ids = np.zeros((len(inputs), max(LENGTHS)), dtype=np.int64)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = tokens
        self.ids, self.length = torch.from_numpy(ids).to(device), torch.from_numpy(self.lengths).to(device)
        self.gold = torch.tensor([int(item.gold or 0) for item in items], device=device)

    def pack(self, jobs_SB: np.ndarray) -> tuple[Packed, Tensor]:
        """Return the packed rows, int64 [runs, rows] into this table, and the rows themselves on the device."""
        lengths = self.lengths[jobs_SB]
        tokens = rounded(int(lengths.sum(1).max()))
        longest = next(size for size in LENGTHS if size >= lengths.max())
        rows = torch.from_numpy(jobs_SB).to(self.ids.device)
        return Packed.of(self, rows, tokens, longest), rows  # type: ignore[arg-type]


class RacingModel(PackedModel):
    """A forward pass in which every run has its own A, C and dense change of the weights, and every copy its R or B."""

    def __init__(self, loaded: Any) -> None:
        super().__init__(loaded, [AdapterLayout.build(loaded.dims, PrgeConfig(target_modules=TARGETS), 0)], 1.0)
        self.device = self.head.device
        self.columns: dict[str, slice] = {}
        for target in TARGETS:
            outputs = self.dims.linear_shape(target)[1]
            self.columns[target] = slice(self.offsets[target], self.offsets[target] + outputs)
        self.inputs = self.dims.linear_shape(TARGETS[0])[0]
        self.a: list[dict[str, Tensor]] = []
        self.b: list[dict[str, Tensor]] = []
        self.delta: list[dict[str, Tensor]] | None = None
        self.covariance: list[Tensor] | None = None
        self.weight = torch.ones(1)

    def _adapt(self, layer: int, h: Tensor, qkv: Tensor, copies_SCP: Tensor) -> None:
        """As `PackedModel._adapt`, with this run's matrices; `copies_SCP` gives runs and copies alone."""
        runs, copies = copies_SCP.shape[:2]
        h_run = h.view(runs, -1, h.shape[1])
        if self.covariance is not None:
            weighted = h_run.detach().float() * self.weight
            self.covariance[layer] += torch.bmm(weighted.transpose(1, 2), weighted)
        for target, columns in self.columns.items():
            if self.delta is not None:
                y = qkv.view(runs, -1, qkv.shape[1])
                y[..., columns].baddbmm_(h_run, self.delta[layer][target].to(h.dtype))
            if self.a:
                xa = torch.bmm(h_run, self.a[layer][target]).view(runs * copies, -1, self.a[layer][target].shape[2])
                y = qkv.view(runs * copies, -1, qkv.shape[1])
                y[..., columns].baddbmm_(xa, self.b[layer][target])

    def logits(self, table: AnswerRows, packed: Packed, rows_SB: Tensor, copies: int, answers: bool) -> Tensor:
        """Logits of the token behind each row, float32 [runs, copies, rows, answers or vocabulary]."""
        runs = rows_SB.shape[0]
        x = self.hidden(packed, torch.empty(runs, copies, 0, device=self.device))
        last = packed.starts + table.length[rows_SB] - 1
        h = x.view(-1, x.shape[3]).index_select(0, flat_index(last, copies, x.shape[2]))
        h = functional.rms_norm(h, (h.shape[1],), self.norm, self.dims.norm_eps).float()
        head = self.head[table.answers] if answers else self.head
        return (h @ head.t()).view(runs, copies, rows_SB.shape[1], -1)


def top_subspace(matrix_NOI: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [N, out, rank], s [N, rank] and V [N, in, rank] of the largest singular values, by subspace iteration
    in float64 (three powers, eight columns more than asked for)."""
    matrix = matrix_NOI.double()
    wide = min(rank + 8, *matrix.shape[1:])
    generator = torch.Generator(matrix.device).manual_seed(0)
    y = matrix @ torch.randn(matrix.shape[2], wide, device=matrix.device, generator=generator, dtype=matrix.dtype)
    for _ in range(3):
        y = matrix @ (matrix.mT @ _orthonormal(y))
    q = _orthonormal(y)
    small = q.mT @ matrix
    values, vectors = torch.linalg.eigh((small @ small.mT).cpu())
    order = values.argsort(1, descending=True)[:, :rank]
    s = values.gather(1, order).clamp(min=0).sqrt().to(matrix.device)
    left = vectors.gather(2, order[:, None].expand(-1, wide, -1)).to(matrix.device)
    v = (small.mT @ left) / s.clamp(min=1e-30)[:, None]
    return q @ left, s, v


def _orthonormal(y: Tensor) -> Tensor:
    for _ in range(2):  # twice, since once leaves the square of the condition
        y = y / y.norm(dim=1, keepdim=True).clamp(min=1e-30)
        gram = y.mT @ y + 1e-14 * torch.eye(y.shape[2], device=y.device, dtype=y.dtype)
        y = torch.linalg.solve_triangular(torch.linalg.cholesky(gram).mT, y, upper=True, left=False)
    return y


class Group:
    """Runs of one group of variants: [(variant, rate, seed)]."""

    def __init__(self, model: RacingModel, train: Dataset, members: Sequence[tuple[Variant, float, int]]) -> None:
        self.model, self.members, self.shape, self.device = model, list(members), members[0][0], model.device
        self.table = AnswerRows(train, self.device)
        seeds = sorted({seed for _, _, seed in members})
        self.seed_index = torch.tensor([seeds.index(seed) for _, _, seed in members], device=self.device)
        self.generators = [torch.Generator(self.device).manual_seed(1000 + seed) for seed in seeds]
        orders = {seed: Batches(train, self.shape.batch, None, seed, 0) for seed in seeds}
        rows = {seed: np.array([orders[seed].rows_at(t) for t in range(self.shape.steps)]) for seed in seeds}
        self.jobs = np.stack([rows[seed] for _, _, seed in members], 1)
        self.calibration = [np.random.default_rng([seed, 7]) for _, _, seed in members]
        self.rate = torch.tensor([rate for _, rate, _ in members], device=self.device, dtype=torch.float32)
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
        self.spread, self.age = torch.zeros(runs, device=self.device), torch.zeros(runs, device=self.device)
        self.is_rule = {rule: self._mask(lambda v, rule=rule: v.rule == rule) for rule in RULES}
        self.a, self.c = self._random_factors()
        self.delta: list[dict[str, Tensor]] | None = None
        self.done = 0

    def _mask(self, test: Callable[[Variant], bool]) -> Tensor:
        return torch.tensor([test(variant) for variant, _, _ in self.members], device=self.device)

    def _random_factors(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """A of variance 1 / inputs, and for a small R a C of variance 1 / rank, drawn from each run's seed."""
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
    def _fitted(self, copies_SCP: Tensor | None, runs: slice = slice(None)) -> Iterator[None]:
        """Give the model these runs' matrices and the copies' R or B; None leaves the adapter out."""
        model, dtype = self.model, self.model.dtype
        model.a, model.b = [], []
        if copies_SCP is not None:
            flat = copies_SCP.reshape(-1, copies_SCP.shape[2])
            model.a = [{target: a[runs].to(dtype) for target, a in layer.items()} for layer in self.a]
            model.b = [{} for _ in self.a]
            for layer, target, offset, width in self.layout:
                part = flat[:, offset : offset + self.shape.rank * width].view(-1, self.shape.rank, width)
                if self.shape.small:
                    part = self._spread(part, self.c[layer][target][runs])
                model.b[layer][target] = part.to(dtype)
        if self.delta is not None:
            model.delta = [{target: d[runs] for target, d in layer.items()} for layer in self.delta]
        yield
        model.a, model.b, model.delta, model.covariance = [], [], None, None

    def _spread(self, small: Tensor, c: Tensor) -> Tensor:
        """Return R C, [runs * copies, rank, outputs], of a square or diagonal R [runs * copies, rank, width]."""
        runs, rank, outputs = c.shape
        if self.shape.space == "diag":
            return (small.view(runs, -1, rank, 1) * c[:, None]).view(-1, rank, outputs)
        return torch.bmm(small.reshape(runs, -1, small.shape[2]), c).view(-1, rank, outputs)

    def _losses(self, logits: Tensor, rows_SB: Tensor) -> Tensor:
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
                if informed[number] and (step == 0 or (variant.refresh and step % variant.refresh == 0))
            ]
            if due:
                self._refresh(due, first=step == 0)
            self._step(step)
        self.done = max(self.done, stop)

    def _step(self, step: int) -> None:
        packed, rows = self.table.pack(self.jobs[step])
        rate = self.rate * (1 - step / self.shape.steps)
        if self.shape.first_order:
            state = self.state.requires_grad_(True)
            with torch.enable_grad(), self._fitted(state[:, None]):
                logits = self.model.logits(self.table, packed, rows, 1, self.shape.loss == "answers")
                (gradient,) = torch.autograd.grad(self._losses(logits, rows).mean(2).sum(), state)
            self.state.requires_grad_(False)
        else:
            gradient = self._estimate(packed, rows)
        with torch.no_grad():
            self._update(gradient, rate)

    @torch.no_grad()
    def _estimate(self, packed: Packed, rows: Tensor) -> Tensor:
        q, size, epsilon = self.shape.queries, self.state.shape[1], self.shape.epsilon
        noise = torch.stack([torch.randn(q, size, device=self.device, generator=g) for g in self.generators])
        noise = noise.index_select(0, self.seed_index)
        base, moved = self.state[:, None], epsilon * noise
        copies = torch.cat([base, base + moved] if self.shape.one_sided else [base + moved, base - moved], 1)
        with self._fitted(copies):
            logits = self.model.logits(self.table, packed, rows, copies.shape[1], self.shape.loss == "answers")
            losses = self._losses(logits, rows).mean(2)
        slope = losses[:, 1:] - losses[:, :1] if self.shape.one_sided else (losses[:, :q] - losses[:, q:]) / 2
        slope = slope / epsilon
        self.spread.mul_(0.98).add_(0.02 * slope.square().mean(1))
        return torch.einsum("sq,sqd->sd", slope, noise) / q

    def _update(self, gradient: Tensor, rate: Tensor) -> None:
        """Apply each run's rule. `norm` divides by the running root mean square of the projected gradients."""
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

    def _refresh(self, runs: list[int], first: bool) -> None:
        """Fold what these runs have learned into their dense change, and take a new subspace from an exact gradient."""
        sizes = self.table.lengths
        if not first:
            self._fold(runs)
        rows = [self.calibration[n].permutation(len(sizes))[: self.members[n][0].calibration] for n in runs]
        if first:  # all runs of a seed and of so many rows are the same model yet
            keys = [(self.members[n][2], self.members[n][0].calibration) for n in runs]
            alike = {key: i for i, key in enumerate(keys)}
            found = dict(zip(alike, self._gradients(list(alike.values()), rows, runs), strict=True))
            gradients = [found[key] for key in keys]
        else:
            gradients = self._gradients(list(range(len(runs))), rows, runs)
        self._take(runs, gradients)

    @torch.no_grad()
    def _fold(self, runs: list[int]) -> None:
        if self.delta is None:
            shapes = [(layer, target, self.model.dims.linear_shape(target)) for layer, target, _, _ in self.layout]
            self.delta = [{} for _ in self.a]
            for layer, target, (inputs, outputs) in shapes:
                self.delta[layer][target] = torch.zeros(len(self.members), inputs, outputs, device=self.device)
        index = torch.tensor(runs, device=self.device)
        for layer, target, offset, width in self.layout:
            part = self.state[index, offset : offset + self.shape.rank * width].view(-1, self.shape.rank, width)
            if self.shape.small:
                part = self._spread(part, self.c[layer][target][index])
            self.delta[layer][target].index_add_(0, index, torch.bmm(self.a[layer][target][index], part))
        for value in (self.state, self.average, self.mean, self.square):
            value[index] = 0
        self.age[index], self.spread[index] = 0, 0

    def _gradients(self, places: list[int], rows: list[np.ndarray], runs: list[int]) -> list[list[dict[str, Any]]]:
        """Exact gradients of the loss by the weights, and second moments of the layers' inputs, of `runs[place]`."""
        found = []
        model, lengths = self.model, self.table.lengths
        for place in places:
            only, total = slice(runs[place], runs[place] + 1), None
            zeros = [
                {
                    t: torch.zeros(1, *model.dims.linear_shape(t), device=self.device, requires_grad=True)
                    for t in TARGETS
                }
                for _ in range(model.dims.layers)
            ]
            leaves = [d[t] for d in zeros for t in TARGETS]
            covariance = [torch.zeros(1, model.inputs, model.inputs, device=self.device) for _ in zeros]
            order = rows[place]
            parts = max(1, -(-int(lengths[order].sum()) // GRADIENT_TOKENS))
            for part in np.array_split(order, parts):
                packed, rows_SB = self.table.pack(part[None])
                used = int(lengths[part].sum())
                with torch.enable_grad(), self._fitted(None, only):
                    if model.delta is not None:
                        with_base = [{t: z[t] + d[t] for t in TARGETS} for z, d in zip(zeros, model.delta, strict=True)]
                        model.delta = with_base
                    else:
                        model.delta = zeros
                    model.covariance = covariance
                    model.weight = (torch.arange(packed.ids.shape[1], device=self.device) < used).float()[None, :, None]
                    logits = model.logits(self.table, packed, rows_SB, 1, self.shape.loss == "answers")
                    got = torch.autograd.grad(self._losses(logits, rows_SB).sum(), leaves)
                total = got if total is None else [x + y for x, y in zip(total, got, strict=True)]
            assert total is not None
            named = iter(total)
            found.append([{t: next(named)[0] for t in TARGETS} | {"moment": c[0]} for c in covariance])
        return found

    @torch.no_grad()
    def _take(self, runs: list[int], gradients: list[list[dict[str, Any]]]) -> None:
        """Set A (and C) of these runs: columns that let as much through as a random A does."""
        rank, index = self.shape.rank, torch.tensor(runs, device=self.device)
        layers = range(len(self.a))
        for target in TARGETS:
            unique: dict[int, int] = {}
            for gradient in gradients:
                unique.setdefault(id(gradient), len(unique))
            first = {number: gradient for gradient in gradients for number in [unique[id(gradient)]]}
            stack = torch.stack([first[n][layer][target].mT for n in range(len(first)) for layer in layers])
            u, s, v = (z.view(len(first), len(self.a), *z.shape[1:]) for z in top_subspace(stack, rank))
            pick = torch.tensor([unique[id(gradient)] for gradient in gradients], device=self.device)
            strength = s / s.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-30)
            power = torch.tensor([self.members[n][0].power for n in runs], device=self.device, dtype=s.dtype)
            weight = strength[pick].clamp(min=1e-4) ** power[:, None, None]
            weight = weight / weight.square().mean((1, 2), keepdim=True).sqrt()
            for layer in layers:
                moment = torch.stack([gradient[layer]["moment"].diagonal() for gradient in gradients])
                a = v[pick, layer].float()
                acts = [i for i, n in enumerate(runs) if self.members[n][0].space == "act"]
                for i in acts:
                    _, vectors = torch.linalg.eigh(gradients[i][layer]["moment"].double())
                    a[i] = vectors[:, -rank:].float()
                passed = (a.square() * moment[..., None]).sum((1, 2))
                scale = (rank * moment.mean(1) / passed.clamp(min=1e-30)).sqrt()
                columns = weight[:, layer].float() if self.shape.small else torch.ones_like(weight[:, layer].float())
                self.a[layer][target][index] = a * scale[:, None, None] * columns[:, None]
                if self.shape.small:
                    outputs = u.shape[2]
                    self.c[layer][target][index] = u[pick, layer].mT.float() * (outputs / rank) ** 0.5

    @torch.no_grad()
    def evaluate(self, table: AnswerRows, averaged: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy and mean loss over the answers of every run, [runs] each."""
        state = (self.average if averaged else self.state)[:, None]
        runs, order = len(self.members), np.argsort(table.lengths, kind="stable")
        right = losses = torch.zeros(runs, device=self.device)
        start = 0
        while start < len(order):
            rows = max(1, EVAL_TOKENS // (runs * int(table.lengths[order[min(start + 64, len(order) - 1)]])))
            part = order[start : start + min(rows, 256)]
            packed, rows_SB = table.pack(np.broadcast_to(part, (runs, len(part))).copy())
            with self._fitted(state):
                logits = self.model.logits(table, packed, rows_SB, 1, answers=True)[:, 0]
            gold = table.gold[rows_SB]
            right = right + (logits.argmax(2) == gold).sum(1)
            losses = losses + functional.cross_entropy(logits.flatten(0, 1), gold.flatten(), reduction="none").view(
                runs, -1
            ).sum(1)
            start += len(part)
        return (right / len(order)).cpu().numpy(), (losses / len(order)).cpu().numpy()


def race(
    model: RacingModel, sets: tuple[Dataset, Dataset, Dataset], members: Sequence[tuple[Variant, float, int]],
    every: int, deadline: float, report: Callable[[list[dict[str, Any]]], None],
) -> bool:  # fmt: skip
    """Train one group and hand its figures to `report` at every evaluation; False where the deadline ended it.

    `curve` has [step, accuracy and loss where rates are chosen, accuracy and loss where they are reported, the same
    accuracies of the averaged adapter]. `sets` are to train on, to choose rates on and to report on.
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
             "finished": group.done == variant.steps, "row_forwards": round(variant.row_forwards, 2),
             "numbers": group.state.shape[1], "seconds": round(seconds, 2), "curve": curves[i]}
            for i, (variant, rate, seed) in enumerate(members)
        ])  # fmt: skip
    return True
