"""Many runs of one method at once, for `prge.quality`: every seed and rate is one adapter of one
forward pass.

A P-RGE step is `PrgeProgram`'s own perturbation, projected gradients and update; only the forward
pass is written for speed (`benchmarks.prge.packed`), and a test holds a run against `PrgeSession`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.prge.packed import LENGTHS, Packed, PackedModel, Rows, rounded
from ondevice.data.examples import Dataset
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.step import PrgeProgram
from ondevice.runtime_ops import torch_ops

EVAL_ROWS = 128
ADAM = (0.9, 0.999, 1e-8)
"""AdamW's betas and epsilon, torch's defaults."""


class BatchedRuns:
    """All runs of one method on one task.

    Args:
        loaded: the model, in the precision of the forward pass; its linear layers are replaced.
        config: a `PrgeConfig`, or a `LoraFaConfig` for AdamW by backpropagation.
        seeds: seed of each run (noise, frozen A, order of the rows).
        batches: for each run the `Batches` of its seed.
        rates: float32 [steps, runs], the learning rate of every step.
    """

    def __init__(
        self,
        loaded: Any,
        config: Any,
        train: Dataset,
        valid: Dataset,
        seeds: list[int],
        batches: list[Any],
        rates: Any,
    ) -> None:
        torch_ops.register()
        self.device = loaded.family.head_weight.device
        self.zeroth = isinstance(config, PrgeConfig)
        shape = (
            config
            if self.zeroth
            else PrgeConfig(
                rank=config.rank, alpha=config.alpha, target_modules=config.target_modules
            )
        )
        layouts = [AdapterLayout.build(loaded.dims, shape, seed) for seed in seeds]
        self.model = PackedModel(loaded, layouts, shape.alpha / shape.rank)
        normal = shape.noise == "gaussian"
        program: Any = PrgeProgram
        if self.device.type == "cuda":
            from ondevice.methods.prge.cuda import CudaPrgeProgram as program
        noise = torch.ops.ondevice.normal if normal else torch.ops.ondevice.rademacher
        self.program = program(loaded.family, layouts[0], shape, noise)
        self.train = Rows([item.example for item in train.items], self.device)
        self.valid_items = valid.items
        examples = [candidate for item in valid.items for candidate in item.candidates]
        self.valid = Rows(examples, self.device)
        steps, runs = rates.shape
        orders = {
            b: np.array([b.rows_at(step) for step in range(steps)]) for b in dict.fromkeys(batches)
        }
        jobs = np.stack([orders[b] for b in batches], 1)
        lengths = self.train.lengths[self.train.row_of_job[jobs]]
        longest = lengths.max((1, 2))
        self.keys = [
            (rounded(int(n)), next(size for size in LENGTHS if size >= t))
            for n, t in zip(lengths.sum(2).max(1), longest, strict=True)
        ]
        self.table, self.rates = (torch.from_numpy(x).to(self.device) for x in (jobs, rates))
        self.seeds = torch.tensor(seeds, device=self.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.adapters = torch.zeros(
            runs, layouts[0].size, device=self.device, requires_grad=not self.zeroth
        )
        self.moments = [torch.zeros_like(self.adapters) for _ in range(0 if self.zeroth else 2)]
        self.losses = torch.zeros(runs, device=self.device)
        self.graphs: dict[tuple[int, int], Any] = {}
        self.pool: Any = None

    def run(self, start: int, stop: int) -> None:
        """Train from step `start` up to `stop`; on CUDA a step is a graph."""
        for step in range(start, stop):
            if self.device.type != "cuda":
                self._step(*self.keys[step])
                continue
            if self.keys[step] not in self.graphs:
                self._capture(self.keys[step])
            self.graphs[self.keys[step]].replay()

    def _capture(self, key: tuple[int, int]) -> None:
        if not self.graphs:
            state = [self.adapters, self.number, *self.moments]
            saved = [value.detach().clone() for value in state]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(*key)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.no_grad():
                for value, old in zip(state, saved, strict=True):
                    value.copy_(old)
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._step(*key)
        self.graphs[key] = graph

    def _batch_losses(
        self, jobs_SB: Tensor, copies_SCP: Tensor, tokens: int, length: int
    ) -> Tensor:
        """Mean loss a labelled token of each run and copy, float32 [runs, copies]."""
        packed = Packed.of(self.train, self.train.row[jobs_SB], tokens, length)
        x = self.model.hidden(packed, copies_SCP.to(self.model.dtype))
        rows = torch.arange(jobs_SB.shape[1], device=self.device).expand_as(jobs_SB)
        target = self.train.target[jobs_SB]
        nll = self.model.nll(x, packed, rows, self.train.place[jobs_SB], target)
        return nll.sum((2, 3)) / (target >= 0).sum((1, 2))[:, None]

    def _step(self, tokens: int, length: int) -> None:
        jobs = self.table.index_select(0, self.number)[0]
        rates = self.rates.index_select(0, self.number)[0]
        if self.zeroth:
            with torch.no_grad():
                self._zeroth_step(jobs, rates, tokens, length)
        else:
            self._adam_step(jobs, rates, tokens, length)
        self.number.add_(1)

    def _zeroth_step(self, jobs: Tensor, rates: Tensor, tokens: int, length: int) -> None:
        size, runs = self.adapters.shape[1], range(self.adapters.shape[0])
        seeds = [self.seeds[i : i + 1] for i in runs]
        copies = [
            self.program.perturbed(self.adapters[i], seeds[i], self.number)(0, size) for i in runs
        ]
        losses = self._batch_losses(jobs, torch.stack(copies), tokens, length)
        gradients = self.program.projected_gradients(losses.t())
        for i in runs:
            update = (
                self.adapters[i],
                gradients[:, i].contiguous(),
                seeds[i],
                self.number,
                rates[i : i + 1],
            )
            self.adapters[i].copy_(self.program.apply_update(*update))
        self.losses.copy_(losses.mean(1))

    def _adam_step(self, jobs: Tensor, rates: Tensor, tokens: int, length: int) -> None:
        losses = self._batch_losses(jobs, self.adapters[:, None], tokens, length)[:, 0]
        (gradient,) = torch.autograd.grad(losses.sum(), self.adapters)
        (mean, square), (beta1, beta2, epsilon) = self.moments, ADAM
        with torch.no_grad():
            count = (self.number + 1).float()
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (square / (1 - beta2**count)).sqrt().add_(epsilon)
            self.adapters.sub_(rates[:, None] * (mean / (1 - beta1**count)) / scale)
            self.losses.copy_(losses)

    @torch.no_grad()
    def evaluate(self) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy by label likelihood, and mean loss of the right answer, of every run: [runs]
        each."""
        runs, table = self.adapters.shape[0], self.valid
        scores = np.zeros((runs, len(table.row_of_job)))
        order = np.argsort(table.lengths, kind="stable")
        for start in range(0, len(order), EVAL_ROWS):
            rows = order[start : start + EVAL_ROWS]
            place = {int(row): i for i, row in enumerate(rows)}
            jobs = [job for job, row in enumerate(table.row_of_job) if int(row) in place]
            tokens, longest = (
                rounded(int(table.lengths[rows].sum())),
                int(table.lengths[rows].max()),
            )
            length = next(size for size in LENGTHS if size >= longest)
            row_SB = torch.from_numpy(rows).to(self.device).expand(runs, -1)
            packed = Packed.of(table, row_SB, tokens, length)
            x = self.model.hidden(packed, self.adapters.detach()[:, None].to(self.model.dtype))
            local = torch.tensor(
                [place[int(table.row_of_job[job])] for job in jobs], device=self.device
            )
            index = torch.tensor(jobs, device=self.device)
            parts = [z[index].expand(runs, -1, -1) for z in (table.place, table.target)]
            nll = self.model.nll(x, packed, local.expand(runs, -1), *parts)[:, 0].sum(-1)
            scores[:, jobs] = nll.double().cpu().numpy()
        return self._judge(scores, (table.target >= 0).sum(1).cpu().numpy())

    def _judge(self, nll_SJ: np.ndarray, count_J: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        job, right, losses, tokens = 0, [], [], 0
        for item in self.valid_items:
            gold, span = int(item.gold or 0), slice(job, job + len(item.candidates))
            right.append((nll_SJ[:, span] / count_J[span]).argmin(1) == gold)
            losses.append(nll_SJ[:, job + gold])
            tokens, job = tokens + int(count_J[job + gold]), span.stop
        return np.mean(right, 0), np.sum(losses, 0) / tokens
