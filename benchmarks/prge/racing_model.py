"""A model through which many runs of a race pass at once, and rows that end where their answers
begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.prge.packed import LENGTHS, Packed, PackedModel, flat_index, rounded
from ondevice.core.session import IGNORE
from ondevice.data.examples import Dataset
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import AdapterLayout

TARGETS = ("q_proj", "v_proj")


class AnswerRows:
    """Rows that end before the first token in which their candidates differ, on the device."""

    def __init__(self, dataset: Dataset, device: Any) -> None:
        items = dataset.items
        answers = [
            [[label for label in c.labels if label != IGNORE] for c in item.candidates]
            for item in items
        ]
        if any(answer != answers[0] for answer in answers):
            raise ValueError("a race needs a task whose rows share their candidates")
        same = next(
            i
            for i, tokens in enumerate(zip(*answers[0], strict=False))
            if len(set(tokens)) == len(tokens)
        )
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
        self.ids, self.length = (
            torch.from_numpy(ids).to(device),
            torch.from_numpy(self.lengths).to(device),
        )
        self.gold = torch.tensor([int(item.gold or 0) for item in items], device=device)

    def pack(self, jobs_SB: np.ndarray) -> tuple[Packed, Tensor]:
        """Return the packed rows, int64 [runs, rows] into this table, and the rows themselves on
        the device."""
        lengths = self.lengths[jobs_SB]
        tokens = rounded(int(lengths.sum(1).max()))
        longest = next(size for size in LENGTHS if size >= lengths.max())
        rows = torch.from_numpy(jobs_SB).to(self.ids.device)
        return Packed.of(self, rows, tokens, longest), rows  # type: ignore[arg-type]


class RacingModel(PackedModel):
    """A forward pass in which every run has its own A, C and dense change of the weights, and every
    copy its R or B."""

    def __init__(self, loaded: Any) -> None:
        super().__init__(
            loaded, [AdapterLayout.build(loaded.dims, PrgeConfig(target_modules=TARGETS), 0)], 1.0
        )
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
        """As `PackedModel._adapt`, with this run's matrices; `copies_SCP` gives runs and copies
        alone."""
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
                xa = torch.bmm(h_run, self.a[layer][target]).view(
                    runs * copies, -1, self.a[layer][target].shape[2]
                )
                y = qkv.view(runs * copies, -1, qkv.shape[1])
                y[..., columns].baddbmm_(xa, self.b[layer][target])

    def logits(
        self, table: AnswerRows, packed: Packed, rows_SB: Tensor, copies: int, answers: bool
    ) -> Tensor:
        """Logits of the token behind each row, float32 [runs, copies, rows, answers or
        vocabulary]."""
        runs = rows_SB.shape[0]
        x = self.hidden(packed, torch.empty(runs, copies, 0, device=self.device))
        last = packed.starts + table.length[rows_SB] - 1
        h = x.view(-1, x.shape[3]).index_select(0, flat_index(last, copies, x.shape[2]))
        h = functional.rms_norm(h, (h.shape[1],), self.norm, self.dims.norm_eps).float()
        head = self.head[table.answers] if answers else self.head
        return (h @ head.t()).view(runs, copies, rows_SB.shape[1], -1)
