"""The base of the offload engines and of their sessions: the device, a model cut into units,
evaluation, and a report of what overlapped in a step."""

from __future__ import annotations

import json
import os
import time
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import CheckpointError, DataError
from ondevice.core.session import IGNORE, OPTIMIZER_STEP, Session, StepResult
from ondevice.models.save import save_weights
from ondevice.nn.memory import memory_errors
from ondevice.offload.bus import throttled
from ondevice.offload.device import Spans, Timeline, open_device
from ondevice.offload.liger import patch_layers, use_liger
from ondevice.offload.overdue import Overdue
from ondevice.offload.units import SINGLE, Joined, Ranks, cut
from ondevice.offload.worker import Watch, Worker

if TYPE_CHECKING:
    from ondevice.models import Family, LoadedModel
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.passes import Passes
    from ondevice.offload.transfers import Transfers
    from ondevice.offload.units import Arrays

FIRST = -(1 << 40)
"""Priority of a task that comes before all others."""


class OffloadEngine:
    """A model cut into units, on a device that is open, with its clock.

    Attributes:
        ranks: those that train together. All make the same calls with the same batches; a step
            computes this rank's rows of its batch, and so does an evaluation.
        kernels: `liger` or `torch`, of the layers.
        dtypes: of the parameters before, by name.
        overlap: of the last step whose end the next pass has seen; `spans` likewise.
    """

    config: EngineConfig
    passes: Passes

    def __init__(
        self, family: Family, config: EngineConfig, device: str, ranks: Ranks = SINGLE
    ) -> None:
        self.config = config
        self.where = torch.device(device)
        self.ranks = ranks
        self.device = open_device(device)
        if config.bus_limit_gb_per_s is not None:
            self.device = throttled(self.device, config.bus_limit_gb_per_s)
        on_cpu = self.device.type == "cpu" and config.kernels != "liger"
        self.liger = not on_cpu and use_liger(config, self.device.type)
        self.kernels = "torch"
        if self.liger and patch_layers(family):
            self.kernels = "liger"
        self.dtypes = {name: value.dtype for name, value in family.model.named_parameters()}
        self.units = cut(family)
        self.watch = Watch(config.timeout_s)
        self.timeline = Timeline(self.device)
        self.began: float | None = None  # of the last pass, if it was a step's
        self.overlap: Overlap | None = None
        self.spans: Spans = []
        self.overdue: Overdue | None = None

    def _meet_ranks(self, transfers: Transfers, workers: Iterable[Worker]) -> None:
        """Watch over what several ranks do together; their threads use this rank's device."""
        if self.ranks.single:
            return
        self.overdue = Overdue(self.watch, self.ranks)
        transfers.expect = self.overdue.expect
        for worker in workers:
            worker.submit("its device", self.device.enter, FIRST)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood, float32 [rows], and its labelled tokens, int64
        [rows].

        Each rank computes its rows, and all get the result. If the rows do not divide evenly, the
        first one fills up."""
        count = len(ids)
        world = self.ranks.world
        filled = np.concatenate([np.arange(count), np.zeros(-count % world, dtype=np.int64)])
        rows = filled[self.ranks.rows(len(filled))]
        nll = self._row_losses(ids[rows], labels[rows], ids)
        return self.ranks.collect(nll).T.reshape(-1)[:count].numpy(), self._labels_a_row(labels)

    def _row_losses(self, ids: np.ndarray, labels: np.ndarray, every: np.ndarray) -> Tensor:
        """Float32 [rows] on the host; `every` is what all ranks read together."""
        self._open(False)
        micro_batches = self._micro_batches(ids)
        h = self.passes.forward(ids, micro_batches, False, every)
        return self.passes.score(h, [labels[rows] for rows in micro_batches]).cpu()

    def _labels_a_row(self, labels: np.ndarray) -> np.ndarray:
        return (labels[:, 1:] != IGNORE).sum(1).astype(np.int64)

    def _open(self, step: bool) -> bool:
        """Begin a pass. True if the one before was a step, whose spans are taken."""
        self.watch.check()
        now = time.perf_counter()
        spans = self.timeline.drain()
        seen = self.began is not None
        if self.began is not None:
            self.spans = spans
            self.overlap = overlap(spans, now - self.began, self.config.bus_limit_gb_per_s)
        self.began = now if step else None
        return seen

    def _labelled(self, labels: np.ndarray) -> int:
        """The number of labelled tokens of int64 [B, T].

        Raises:
            DataError: none is.
        """
        count = int((labels[:, 1:] != IGNORE).sum())
        if not count:
            raise DataError(
                "a batch has no token to learn from", hint="longer rows, or data.max_length_tokens"
            )
        return count

    def _micro_batches(self, ids: np.ndarray) -> list[slice]:
        size = self.config.micro_batch_size or len(ids)
        return [slice(low, min(low + size, len(ids))) for low in range(0, len(ids), size)]


class EngineSession(Session):
    """AdamW over all parameters of a model by an engine that keeps optimizer states on the host;
    see `Session`."""

    step_hint: ClassVar[str]
    """Hint for a step that does not fit into the accelerator's memory."""

    def __init__(self, loaded: LoadedModel, config: Any, engine: Any) -> None:
        self.loaded = loaded
        self.config = config
        self.engine = engine
        self.ranks = engine.ranks
        self.backend = f"torch-{engine.where.type}"
        self.steps_done = 0
        self.arrays: dict[str, torch.Tensor] = {}  # of the last `state`, if they are views

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one AdamW step; its last updates run on while the next step begins."""
        with memory_errors(
            f"a step of {ids.shape[0]} rows of {ids.shape[1]} tokens", self.step_hint
        ):
            loss = self.engine.step(ids, labels, self.steps_done, learning_rate)
        self.steps_done += 1
        return StepResult(loss, (loss,), overlap=self.report())

    def report(self) -> dict[str, Any] | None:
        """Return the overlap report of the step before the last; None before the second."""
        overlap = self.engine.overlap
        if overlap is None:
            return None
        return overlap.to_dict()

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        return self.engine.evaluate(ids, labels)

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Load the `state` of any number of ranks; rank 0 serves the others."""
        self.engine.flush()
        problem: Exception | None = None
        with self.ranks.lent(Joined(state or {})) as arrays:
            try:
                done = steps_of(arrays.get(OPTIMIZER_STEP))
                self._load(arrays)
                self.steps_done = done
            except CheckpointError as error:
                problem = error
        self.ranks.agree(problem)
        self._after_load()

    @abstractmethod
    def _load(self, arrays: Arrays) -> None:
        """Load the engine's arrays.

        Raises:
            CheckpointError: naming the first array that is missing or of another size or type.
        """

    @abstractmethod
    def _after_load(self) -> None:
        """Give the accelerator the loaded state, on all ranks together."""

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, on the host."""

    def save_model(self, folder: Path) -> None:
        """Write the trained model as transformers loads it, with its tokenizer."""
        save_weights(folder, self.weights(), self.loaded)

    def release_model(self) -> None:
        """Give the model its weights back; of several ranks, none has them all."""
        if not self.ranks.single:
            return
        weights = self.weights()
        for name, parameter in self.loaded.model.named_parameters():
            parameter.data = weights[name].to(self.engine.dtypes[name], copy=True)

    def make_model(self, folder: Path) -> None:
        """Make the model's folder before any rank writes into it, on rank 0; here it is all that is
        written."""
        save_weights(folder, self.weights(), self.loaded)

    def write_model(self, folder: Path, arrays: dict[str, torch.Tensor] | None) -> None:
        """Write this rank's share of the weights, as they are now or as `arrays` of a state have
        them."""

    def hold(self) -> None:
        """Do nothing: `state` gives copies, unless a subclass says otherwise (`HoldsState`)."""

    def written(self, name: str | None) -> None:
        """Do nothing; see `hold`."""

    def close(self) -> None:
        """End the engine's threads; host memory is unlocked."""
        self.engine.close()


def steps_of(value: np.ndarray | None) -> int:
    """Return steps that a checkpoint's `optimizer_step` tells.

    Raises:
        CheckpointError: the checkpoint lacks it.
    """
    if value is None:
        raise CheckpointError(
            "the checkpoint lacks optimizer_step", hint="resume from an older checkpoint"
        )
    return int(value[:1].item())


def join(device: str, timeout_s: float) -> tuple[Ranks, str]:
    """Return the ranks of this run and this one's device; see `ranks.join_processes`."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return SINGLE, device
    from ondevice.offload.ranks import join_processes  # starts torch.distributed

    return join_processes(device, timeout_s)


def host_threads(device: str, sharing: int = 1) -> int:
    """Return the number of cores for this process of the `sharing` ones; with an accelerator, two
    less, which feed it."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    return max(1, processors // sharing - 2 * (device != "cpu"))


LANES = ("forward", "backward", "h2d", "d2h", "comm", "update", "disk")


@dataclass(frozen=True)
class Overlap:
    """One step, seconds and bytes. Sums are over what a lane was busy, not over wall time.

    Attributes:
        forward_s, backward_s: of the accelerator's computation; recomputation counts as backward.
        h2d_s, d2h_s: of copies; update_s: of AdamW on the host; disk_s: wall time with
            transfers to or from the disk under way.
        wall_s: from the step's begin to the next one's.
        idle_s: wall time in which the accelerator computed nothing.
        hiding_factor: backward_s / (d2h_s + max(update_s, disk_s)) (SlideFormer section 3.1); from
            1 on the update is hidden.
        bound: the lane that was busy longest.
        comm_s: of gathers and sums over ranks, including waits for other ranks; 0 in one process.
        simulated_gb_per_s: GB/s of a simulated bus (`bus_limit_gb_per_s`); None is the real one.
    """

    forward_s: float
    backward_s: float
    h2d_s: float
    d2h_s: float
    update_s: float
    disk_s: float
    wall_s: float
    idle_s: float
    hiding_factor: float
    h2d_bytes: int
    d2h_bytes: int
    bound: str
    comm_s: float = 0.0
    simulated_gb_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def overlap(spans: Spans, wall_s: float, simulated_gb_per_s: float | None = None) -> Overlap:
    """Sum up the spans of one step."""
    busy: dict[str, float] = dict.fromkeys(LANES, 0.0)
    sizes = {"h2d": 0, "d2h": 0}
    for lane, _, start, end, size in spans:
        busy[lane] += (end - start) * (lane != "disk")
        if lane in sizes:
            sizes[lane] += size
    busy["disk"] = _covered([(start, end) for lane, _, start, end, _ in spans if lane == "disk"])
    computed = busy["forward"] + busy["backward"]
    groups = {
        "compute": computed,
        **{lane: busy[lane] for lane in ("h2d", "d2h", "comm", "update", "disk")},
    }
    leaving = busy["d2h"] + max(busy["update"], busy["disk"])
    return Overlap(
        forward_s=busy["forward"],
        backward_s=busy["backward"],
        h2d_s=busy["h2d"],
        d2h_s=busy["d2h"],
        update_s=busy["update"],
        disk_s=busy["disk"],
        wall_s=wall_s,
        idle_s=max(0.0, wall_s - computed),
        hiding_factor=busy["backward"] / leaving if leaving else float("inf"),
        h2d_bytes=sizes["h2d"],
        d2h_bytes=sizes["d2h"],
        bound=max(groups, key=lambda lane: groups[lane]),
        comm_s=busy["comm"],
        simulated_gb_per_s=simulated_gb_per_s,
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one span runs: the disk works at several transfers at once."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def chrome_trace(spans: Spans, path: Path) -> None:
    """Write spans for chrome://tracing or Perfetto, microseconds from the first."""
    first = min((span[2] for span in spans), default=0.0)
    events = [
        {
            "name": name, "cat": lane, "ph": "X", "pid": 0, "tid": LANES.index(lane),
            "ts": round((start - first) * 1e6, 1), "dur": round((end - start) * 1e6, 1), "args": {"bytes": size},
        }
        for lane, name, start, end, size in spans
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(LANES)
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}) + "\n", encoding="utf-8")
