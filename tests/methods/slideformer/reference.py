"""AdamW in memory, written once more: the whole model at once, plain autograd, torch's optimizer over all masters.

Masters are float32 and held aside; a step copies them into the parameters in the compute dtype, runs the model part by
part under autograd, and gives `torch.optim.AdamW(fused=True)` the gradients converted to float32. The head alone is
`ChunkedLoss`, so that its rounding is the engine's; test_loss.py holds that against `cross_entropy`.

Order of the roundings, which bits depend on: gradients of the micro-batches are rounded to the compute dtype, added in
float32, in order, and rounded once more. In float32 the head's chunks are added to one sum. Of a tied embedding the
head's are summed over all micro-batches, the looked-up rows' too, and then the one is added to the other. (Plain
autograd adds head, rows, head, rows.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.models.load import tiny_model
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.gradients import ChunkedLoss

Batch = tuple[np.ndarray, np.ndarray]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LEARNING_RATE = 1e-2


def open_engine(config: dict[str, Any], family: str = "llama", **sizes: Any) -> OffloadEngine:
    """An engine over a tiny model; its threads wait so long that only a hang is given up, on a busy machine too."""
    settings = {"timeout_s": 120.0, "threads": 1, **config}
    return OffloadEngine(tiny_model(family, **sizes).family, SlideformerConfig(**settings), "cpu")


def batches(
    count: int, rows: int = 5, length: int = 9, vocab: int = 260, seed: int = 0
) -> list[Batch]:
    """Random ids with repeats; the prompt's labels are -100, and those of padded ends, of other lengths each row. The
    last row begins with padding, too, and so that has a gradient."""
    random = np.random.default_rng(seed)
    collected = []
    for _ in range(count):
        ids = random.integers(0, vocab, (rows, length))
        ids[:, 1::3] = ids[:, :1]
        ids[-1, 0] = 256
        labels = ids.copy()
        labels[:, : length // 4] = -100
        for row in range(rows):
            end = int(random.integers(length // 2, length + 1))
            ids[row, end:], labels[row, end:] = 256, -100
        collected.append((ids, labels))
    return collected


def run(engine: Any, data: Iterable[Batch], learning_rate: float = LEARNING_RATE) -> list[float]:
    """Losses of one step a batch, the learning rate falling; the state is at rest after."""
    losses = [
        engine.step(*batch, step, learning_rate / (1 + step / 10))
        for step, batch in enumerate(data)
    ]
    engine.flush()
    return losses


def outcome(
    config: dict[str, Any], family: str, sizes: dict[str, Any], data: list[Batch]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and masters of an engine that is opened and closed for it."""
    engine = open_engine(config, family, **sizes)
    try:
        return run(engine, data), engine.store.masters()
    finally:
        engine.close()


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal in every bit (but for the sign of zero)."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


class InMemory:
    """The reference. `units` names runs of parameters that the optimizer sees as one flat array, each beginning at a
    multiple of 128 as in the engine: what a vectorised kernel does with the tail of an array depends on that."""

    def __init__(
        self,
        config: dict[str, Any],
        family: str = "llama",
        units: list[list[str]] | None = None,
        **sizes: Any,
    ) -> None:
        self.config = SlideformerConfig(**config)
        self.family = tiny_model(family, **sizes).family
        self.dtype = DTYPES[self.config.compute]
        self.parameters = dict(self.family.model.named_parameters())
        head = self.family.head_weight
        self.head = next(name for name, parameter in self.parameters.items() if parameter is head)
        self.flat, self.masters = self._lay_out(units or [[name] for name in self.parameters])
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        c = self.config
        self.optimizer = torch.optim.AdamW(
            self.flat, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay, fused=True
        )

    def _lay_out(
        self, units: list[list[str]]
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        flat, masters = [], {}
        for names in units:
            offsets, end = [], 0
            for name in names:
                offsets.append(-(-end // 128) * 128)
                end = offsets[-1] + self.parameters[name].numel()
            flat.append(torch.zeros(end))
            flat[-1].grad = torch.zeros(end)
            for name, offset in zip(names, offsets, strict=True):
                parameter = self.parameters[name]
                masters[name] = flat[-1][offset : offset + parameter.numel()].view(parameter.shape)
                masters[name].copy_(parameter)
                masters[name].grad = (
                    flat[-1].grad[offset : offset + parameter.numel()].view(parameter.shape)
                )
        return flat, masters

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> float:
        loss, gradients = self.gradients(ids, labels)
        self.update({name: gradient.float() for name, gradient in gradients.items()}, learning_rate)
        return loss

    def gradients(
        self, ids: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """The mean loss, and every gradient in the compute dtype."""
        for name, parameter in self.parameters.items():
            parameter.data, parameter.grad = self.masters[name].to(self.dtype), None
        count = int((labels[:, 1:] != -100).sum())
        losses, size = [], self.config.micro_batch_size or len(ids)
        totals: dict[str, torch.Tensor] = {}
        heads = torch.zeros_like(self.parameters[self.head], dtype=torch.float32)
        for low in range(0, len(ids), size):
            part, head = slice(low, low + size), heads
            if self.dtype != torch.float32:
                head = torch.zeros_like(self.parameters[self.head])
            losses.append(
                self._micro_batch(torch.from_numpy(ids[part]), labels[part], 1.0 / count, head)
            )
            if head is not heads:
                heads += head
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    totals[name] = totals.get(name, 0.0) + parameter.grad.float()
                    parameter.grad = None
        head = heads.to(self.dtype)
        by_name = {
            name: totals[name].to(self.dtype) if name in totals else torch.zeros_like(parameter)
            for name, parameter in self.parameters.items()
        }
        by_name[self.head] = head + by_name[self.head]
        return float(torch.stack(losses).sum()) / count, by_name

    def update(self, gradients: dict[str, torch.Tensor], learning_rate: float) -> None:
        """One step of the optimizer on float32 gradients."""
        for name, gradient in gradients.items():
            self.masters[name].grad.copy_(gradient)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()

    def _micro_batch(
        self, ids: torch.Tensor, labels: np.ndarray, scale: float, head: torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward; the head's gradient is added to `head`."""
        h = self.family.embed(ids)
        position = self.family.positions(ids.shape[1], "cpu", self.dtype)
        for i in range(self.family.dims.layers):
            h = self.family.block(i, h, position)
        normed = self.family.final_norm(h)
        hidden = normed.detach()[:, :-1].reshape(-1, normed.shape[-1])
        targets = torch.from_numpy(labels[:, 1:].copy()).reshape(-1)
        score = ChunkedLoss(hidden, targets, scale, self.config.loss_chunk_tokens)
        loss = score.forward_backward(self.parameters[self.head].detach(), head)
        gradient = torch.zeros_like(normed)
        gradient[:, :-1] = score.grad_hidden.view(len(ids), -1, normed.shape[-1])
        normed.backward(gradient)
        return loss
