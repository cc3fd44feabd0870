"""Many fleets' devices in one forward pass, for `benchmarks.fleet.sst2`: each device is a run of
`racing.RacingModel`.

What is said between them is the fleet's own: tasks, answers and outcomes are bytes, a server is
`ondevice.fleet.rounds`, and the adapter is its state in whole numbers. First-order devices run
FedAvg over LoRA: A and B by plain gradient steps, and the mean of what the devices end with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.prge.racing import EVAL_TOKENS
from benchmarks.prge.racing_model import TARGETS, AnswerRows, RacingModel
from ondevice.data.batching import Batches
from ondevice.data.examples import Dataset
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.charter import Charter
from ondevice.fleet.member import private
from ondevice.fleet.messages import TaskReply
from ondevice.fleet.numbers import pack
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.simulate import lie
from ondevice.fleet.split import split
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.runtime_ops import torch_ops

EPSILON = 1e-2
"""How far B is moved along a direction."""


@dataclass(frozen=True)
class Setting:
    """One kind of fleet.

    Attributes:
        devices: 1 is central training, in whole numbers as a fleet is.
        rows: of a device's step; if `share_rows`, of a device's step on average.
        share_rows: a device's step reads rows in proportion to those that it has, one at least, and
            its answer counts by those that it has; else every device reads `rows`, and all count
            alike.
        hostile: devices that lie (`flip`: their numbers negated, ten times as large).
        weak: the last so many devices of a first-order fleet, which send numbers; they are away if
            `weak_rate` is 0.
        agreement: combination, clipping and noise, as keywords of `Agreement`.
    """

    name: str
    devices: int
    rows: int
    rounds: int
    local_steps: int
    queries: int
    dirichlet: float | None = None
    rank: int = 16
    first_order: bool = False
    share_rows: bool = False
    hostile: int = 0
    weak: int = 0
    weak_rate: float = 0.0
    agreement: tuple[tuple[str, Any], ...] = ()

    def group(self) -> tuple[Any, ...]:
        """Fleets of one value run in the same pass."""
        return (self.first_order, self.devices, self.rows, self.rounds, self.local_steps, self.queries, self.rank,
                self.weak, self.weak_rate, self.share_rows)  # fmt: skip

    @property
    def row_forwards(self) -> int:
        """Rows that pass forward on one device in all; a backward pass counts as two."""
        each = 3 if self.first_order else 2 * self.queries
        return self.rounds * self.local_steps * self.rows * each


class Group:
    """Fleets of one shape, [(setting, rate, seed)].

    Attributes:
        state: float32 [fleets, elements] on the model's device: what each fleet's devices begin the
            next round from.
        bytes: sent to and from each device so far, mean over the devices.
        done: rounds.
    """

    def __init__(
        self, model: RacingModel, train: Dataset, members: Sequence[tuple[Setting, float, int]]
    ) -> None:
        self.model, self.members, self.shape, self.device = (
            model,
            list(members),
            members[0][0],
            model.device,
        )
        self.fleets, self.devices = len(members), self.shape.devices
        self.table = AnswerRows(train, self.device)
        self.rates = torch.tensor(
            [rate for _, rate, _ in members], device=self.device, dtype=torch.float32
        )
        self.held = np.zeros((self.fleets, self.devices), dtype=np.int64)
        self.jobs, self.owners = self._jobs(train)
        config = PrgeConfig(target_modules=TARGETS, rank=self.shape.rank, subspace="random")
        seeds = sorted({seed for _, _, seed in members})
        layouts = {seed: AdapterLayout.build(model.dims, config, seed) for seed in seeds}
        self.layout = layouts[seeds[0]]
        self.bytes, self.done = np.zeros(self.fleets), 0
        first = [torch.from_numpy(self._flat_a(layouts[seed])) for _, _, seed in members]
        self.a = torch.stack(first).to(self.device)

    def _jobs(self, train: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Rows of every step, int64 [steps, runs, rows], as indices into all rows; and each run's
        device, [runs], counted through all fleets. A run is a device, or one row of a device where
        these have different numbers."""
        places = {id(item): place for place, item in enumerate(train.items)}
        steps, columns, owners = self.shape.rounds * self.shape.local_steps, [], []
        for fleet, (setting, _, seed) in enumerate(self.members):
            for device, part in enumerate(split(train, self.devices, setting.dirichlet, seed)):
                own = np.array([places[id(item)] for item in part.items])
                size = setting.rows
                if setting.share_rows:
                    size = max(1, round(setting.rows * self.devices * len(own) / len(train.items)))
                batches = Batches(part, size, None, seed, 0)
                jobs = own[np.array([batches.rows_at(step) for step in range(steps)])]
                runs = size if setting.share_rows else 1
                columns += np.split(jobs, runs, axis=1)
                owners += [fleet * self.devices + device] * runs
                self.held[fleet, device] = len(own)
        return np.stack(columns, 1), np.array(owners)

    def row_forwards(self, fleet: int) -> int:
        """Rows that pass forward on one device of a fleet in all, mean over its devices."""
        runs = int((self.owners // self.devices == fleet).sum())
        each = self.devices * (self.shape.rows if self.shape.share_rows else 1)
        return round(self.shape.row_forwards * runs / each)

    def _flat_a(self, layout: AdapterLayout) -> np.ndarray:
        return np.concatenate([layout.frozen_a(entry).reshape(-1) for entry in layout.entries])

    @contextmanager
    def _fitted(self, a_RP: Tensor, b_SP: Tensor) -> Iterator[None]:
        """Give the model A of each run, float32 [runs, elements], and B of each copy, float32
        [copies, elements]."""
        model, dtype, offset = self.model, self.model.dtype, 0
        model.a, model.b = ([{} for _ in range(model.dims.layers)] for _ in range(2))
        for entry in self.layout.entries:
            count = entry.inputs * entry.rank
            a = a_RP[:, offset : offset + count].view(-1, entry.inputs, entry.rank)
            b = b_SP[:, entry.offset : entry.offset + entry.count].view(
                -1, entry.rank, entry.outputs
            )
            model.a[entry.layer][entry.target], model.b[entry.layer][entry.target] = (
                a.to(dtype),
                b.to(dtype),
            )
            offset += count
        yield
        model.a, model.b = [], []

    def _losses(self, rows_RB: np.ndarray, copies: int) -> Tensor:
        """Loss over the answers of each run and copy, float32 [runs, copies]; inside `_fitted`."""
        packed, rows = self.table.pack(rows_RB)
        logits = self.model.logits(self.table, packed, rows, copies, answers=True)
        gold = self.table.gold[rows][:, None].expand(logits.shape[:3])
        return (
            functional.cross_entropy(logits.flatten(0, 2), gold.flatten(), reduction="none")
            .view(gold.shape)
            .mean(2)
        )

    @torch.no_grad()
    def _answers(
        self,
        state_FP: Tensor,
        each_a: Tensor,
        jobs: np.ndarray,
        rates_F: Tensor,
        owners: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Zeroth-order local steps from `state_FP`, the same directions on each device of a fleet.

        Args:
            each_a: A of every run.
            jobs: rows of the local steps, int64 [steps, runs, rows].
            owners: the device of each run, [runs], counted through all fleets; a device's loss is
                its runs' mean.

        Returns:
            numbers, float64 [fleets, devices, steps * queries], and mean losses, float32 [fleets,
            devices].
        """
        q, size = self.shape.queries, self.layout.size
        devices = (int(owners[-1]) + 1) // self.fleets
        owner = torch.from_numpy(owners).to(self.device)
        mean = (
            functional.one_hot(owner).double().T
        )  # float64: a loss in TF32 would lose what a direction changes
        mean /= mean.sum(1, keepdim=True)
        local = state_FP.repeat_interleave(devices, 0).view(self.fleets, devices, size)
        numbers, losses = [], []
        for place in range(self.shape.local_steps):
            noise_FQP = self._noise(self.done * self.shape.local_steps + place)
            moved = EPSILON * noise_FQP[:, None]
            copies = torch.cat([local[:, :, None] + moved, local[:, :, None] - moved], 2).view(
                -1, 2 * q, size
            )
            with self._fitted(each_a, copies[owner].view(-1, size)):
                loss = (
                    (mean @ self._losses(jobs[place], 2 * q).double())
                    .float()
                    .view(self.fleets, devices, 2 * q)
                )
            slope = (loss[..., :q] - loss[..., q:]) / (2 * EPSILON)
            local -= (rates_F / q)[:, None, None] * torch.einsum("fdq,fqp->fdp", slope, noise_FQP)
            numbers.append(slope)
            losses.append(loss.mean(2))
        return torch.cat(numbers, 2).double().cpu().numpy(), torch.stack(losses).mean(
            0
        ).cpu().numpy()

    def _noise(self, step: int) -> Tensor:
        """The directions of a step, float32 [fleets, queries, elements]: those that the servers
        apply."""
        drawn: dict[int, Tensor] = {}
        for _, _, seed in self.members:
            if seed not in drawn:
                keys = (torch.tensor([value], device=self.device) for value in (seed, step))
                drawn[seed] = torch_ops.noise("rademacher")(
                    *keys, 0, self.shape.queries, 0, self.layout.size
                )
        return torch.stack([drawn[seed] for _, _, seed in self.members])

    @property
    def adapters(self) -> tuple[Tensor, Tensor]:
        """A and B of every fleet, float32 [fleets, elements] each."""
        raise NotImplementedError

    def round(self) -> None:
        """Train one round."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, table: AnswerRows) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy and mean loss over the answers of every fleet, [fleets] each."""
        order = np.argsort(table.lengths, kind="stable")
        right = losses = torch.zeros(self.fleets, device=self.device)
        start = 0
        with self._fitted(*self.adapters):
            while start < len(order):
                longest = int(table.lengths[order[min(start + 64, len(order) - 1)]])
                part = order[
                    start : start + min(256, max(1, EVAL_TOKENS // (self.fleets * longest)))
                ]
                packed, rows = table.pack(np.broadcast_to(part, (self.fleets, len(part))).copy())
                logits = self.model.logits(table, packed, rows, 1, answers=True)[:, 0]
                gold = table.gold[rows]
                loss = functional.cross_entropy(
                    logits.flatten(0, 1), gold.flatten(), reduction="none"
                )
                right, losses = (
                    right + (logits.argmax(2) == gold).sum(1),
                    losses + loss.view(gold.shape).sum(1),
                )
                start += len(part)
        return (right / len(order)).cpu().numpy(), (losses / len(order)).cpu().numpy()


class ZerothOrder(Group):
    """Devices that answer with numbers; `servers` decide what comes of them."""

    def __init__(
        self, model: RacingModel, train: Dataset, members: Sequence[tuple[Setting, float, int]]
    ) -> None:
        super().__init__(model, train, members)
        self.servers = [Rounds(self._charter(*member)) for member in members]
        self.draws = [np.random.default_rng([seed, 11]) for _, _, seed in members]
        self.state = torch.zeros(self.fleets, self.layout.size, device=self.device)
        self.each_a = self.a[torch.from_numpy(self.owners // self.devices).to(self.device)]
        self.threads = ThreadPoolExecutor(16)

    def _charter(self, setting: Setting, rate: float, seed: int) -> Charter:
        agreement = Agreement(
            local_steps=setting.local_steps, most_rows=1 << 31, **dict(setting.agreement)
        )
        return Charter(
            model_source="sst2", model_sha256="0" * 64, method={}, data={}, seed=seed, size=self.layout.size,
            noise="rademacher", queries=setting.queries, learning_rate=rate, fleet=agreement,
        )  # fmt: skip

    @property
    def adapters(self) -> tuple[Tensor, Tensor]:
        return self.a, self.state

    def round(self) -> None:
        jobs = self.jobs[self.done * self.shape.local_steps :]
        values, loss = self._answers(self.state, self.each_a, jobs, self.rates, self.owners)
        states = list(self.threads.map(self._close, range(self.fleets), values, loss))
        self.state = torch.from_numpy(np.stack(states)).to(self.device)
        self.done += 1

    def _close(self, fleet: int, values_DN: np.ndarray, loss_D: np.ndarray) -> np.ndarray:
        """Give a fleet's server the answers of a round as bytes, and return its adapter."""
        server, draw, setting = self.servers[fleet], self.draws[fleet], self.members[fleet][0]
        current = server.begin(range(self.devices))
        sent = 0
        for device, task in current.tasks.items():
            numbers = pack(private(values_DN[device].tolist(), server.charter.fleet, draw))
            rows = int(self.held[fleet, device]) if setting.share_rows else 1
            answer = TaskReply(
                task.fleet, task.round, task.begin, device, rows, float(loss_D[device]), numbers
            )
            if device < setting.hostile:
                answer = lie(answer, "flip", draw)
            data = answer.to_bytes()
            server.receive(data, device)
            sent += len(task.to_bytes()) + len(data)
        outcome = server.close(current.number)
        self.bytes[fleet] += sent / self.devices + len(outcome.to_bytes())
        return server.state.flat()

    def hashes(self) -> list[str]:
        """Return each fleet's hash."""
        return [server.state.digest().hex() for server in self.servers]


class FirstOrder(Group):
    """FedAvg over LoRA (McMahan et al., 2017): A and B by plain gradient steps, then the devices'
    mean."""

    VALUE_BYTES = 4

    def __init__(
        self, model: RacingModel, train: Dataset, members: Sequence[tuple[Setting, float, int]]
    ) -> None:
        super().__init__(model, train, members)
        self.b = torch.zeros(self.fleets, self.layout.size, device=self.device)

    @property
    def adapters(self) -> tuple[Tensor, Tensor]:
        return self.a, self.b

    def round(self) -> None:
        local = [x.repeat_interleave(self.devices, 0) for x in self.adapters]
        rate = self.rates.repeat_interleave(self.devices)[:, None]
        for place in range(self.shape.local_steps):
            step = self.done * self.shape.local_steps + place
            leaves = [x.detach().requires_grad_(True) for x in local]
            with torch.enable_grad(), self._fitted(*leaves):
                gradients = torch.autograd.grad(self._losses(self.jobs[step], 1).sum(), leaves)
            local = [x - rate * g for x, g in zip(local, gradients, strict=True)]
        self.a, self.b = (x.detach().view(self.fleets, self.devices, -1).mean(1) for x in local)
        self.bytes += (
            2
            * self.VALUE_BYTES
            * sum(entry.count + entry.inputs * entry.rank for entry in self.layout.entries)
        )
        self.done += 1

    def hashes(self) -> list[str]:
        """Return nothing to compare: the mean of floats is not the same on every machine."""
        return [""] * self.fleets


class Mixed(FirstOrder):
    """FedAvg over LoRA-FA: strong devices train B by gradient steps, weak ones send numbers that B
    is made of.

    An answer counts by the rows that it read. A weak device reads one row a step.
    """

    WEAK_ROWS = 1

    def __init__(
        self, model: RacingModel, train: Dataset, members: Sequence[tuple[Setting, float, int]]
    ) -> None:
        super().__init__(model, train, members)
        self.strong = self.devices - self.shape.weak
        self.weak_rates = torch.full_like(self.rates, self.shape.weak_rate)

    def round(self) -> None:
        steps, size, fleets = self.shape.local_steps, self.layout.size, self.fleets
        jobs = self.jobs[self.done * steps : (self.done + 1) * steps]
        by_device = jobs.reshape(steps, fleets, self.devices, -1)
        strong_jobs = by_device[:, :, : self.strong].reshape(steps, fleets * self.strong, -1)
        local, a = (
            self.b.repeat_interleave(self.strong, 0),
            self.a.repeat_interleave(self.strong, 0),
        )
        rate = self.rates.repeat_interleave(self.strong)[:, None]
        for place in range(steps):
            leaf = local.detach().requires_grad_(True)
            with torch.enable_grad(), self._fitted(a, leaf):
                (gradient,) = torch.autograd.grad(self._losses(strong_jobs[place], 1).sum(), leaf)
            local = (leaf - rate * gradient).detach()
        total = self.shape.rows * local.view(fleets, self.strong, size).sum(1)
        rows, weak_bytes = self.shape.rows * self.strong, 0
        if self.shape.weak and self.shape.weak_rate:
            total = total + self.WEAK_ROWS * self._weak(by_device).sum(1)
            rows += self.WEAK_ROWS * self.shape.weak
            weak_bytes = self.VALUE_BYTES * size + 38 + 2 * steps * self.shape.queries
        self.b = total / rows
        self.bytes += (
            2 * self.VALUE_BYTES * size * self.strong + weak_bytes * self.shape.weak
        ) / self.devices
        self.done += 1

    def _weak(self, jobs: np.ndarray) -> Tensor:
        """B that the weak devices' numbers make, as 16 bits hold them: float32 [fleets, weak,
        elements]."""
        weak, steps, q = self.shape.weak, self.shape.local_steps, self.shape.queries
        rows = jobs[:, :, self.strong :, : self.WEAK_ROWS].reshape(steps, self.fleets * weak, -1)
        owners = np.arange(self.fleets * weak)
        values, _ = self._answers(
            self.b, self.a.repeat_interleave(weak, 0), rows, self.weak_rates, owners
        )
        sent = [[pack(device.tolist()).values() for device in fleet] for fleet in values]
        numbers = torch.tensor(sent, dtype=torch.float32, device=self.device)
        found = self.b[:, None].repeat(1, weak, 1)
        for place in range(steps):
            part = numbers[..., place * q : (place + 1) * q]
            noise = self._noise(self.done * steps + place)
            found -= (self.weak_rates / q)[:, None, None] * torch.einsum(
                "fdq,fqp->fdp", part, noise
            )
        return found
