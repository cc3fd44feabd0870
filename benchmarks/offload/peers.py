"""The peers that benchmarks/slideformer/step.py compares with: no offload at all, FSDP2 and
torchao. One step of each.

All of them keep one input a layer and compute the rest again (checkpointing), attend through SDPA
and take the loss of `ChunkedLoss`. A step gives the mean loss once it is known; what still runs
then belongs to the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.offload.model import SHAPES, make_family
from ondevice.models.families.base import Family
from ondevice.offload.gradients import ChunkedLoss
from ondevice.offload.liger import LigerLoss
from ondevice.offload.units import Unit, cut
from ondevice.offload.window import bind

CHUNK = 2048
RATE = 1e-5


class Resident:
    """Everything on the accelerator, layer by layer through the engine's own block code.

    `resident`: bf16 weights, no update: the fastest that a step can be. `resident_window`: the
    same, but all layers are one in memory, if the model does not fit. `resident_adamw`: with bf16
    weights, float32 masters and moments, and torch's fused AdamW after each layer's backward pass.
    """

    def __init__(self, family: Family, device: str, kind: str, liger: bool) -> None:
        self.family, self.device, self.liger, self.adamw = (
            family,
            device,
            liger,
            kind == "resident_adamw",
        )
        self.units, self.memory = cut(family), {}
        for unit in self.units.all:
            shared = kind == "resident_window" and unit.kind == "layer" and unit.index > 0
            self.memory[unit.index] = self.memory[0] if shared else self._load(unit)
            bind(unit, self.memory[unit.index])
        rotary = getattr(getattr(family.model, "model", None), "rotary_emb", None)
        if rotary is not None:
            rotary.to(device)
        self.known = torch.zeros(1, pin_memory=torch.device(device).type == "cuda")
        if self.adamw:
            self.states = {
                index: (
                    memory.float(),
                    *(torch.zeros(memory.numel(), device=device) for _ in range(2)),
                )
                for index, memory in self.memory.items()
            }
            largest = max(unit.numel for unit in self.units.layers)
            self.gradients = [
                torch.zeros(n, dtype=torch.bfloat16, device=device)
                for n in (largest, self._rest.numel)
            ]
            self.number = torch.zeros((), device=device)

    @property
    def _rest(self) -> Unit:
        return self.units.rest

    def _load(self, unit: Unit) -> Tensor:
        memory = torch.zeros(unit.numel, dtype=torch.bfloat16, device=self.device)
        for piece in unit.pieces:
            memory[piece.offset : piece.offset + piece.numel].copy_(
                piece.parameter.detach().reshape(-1)
            )
        return memory

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        family, count = self.family, labels[:, 1:].size
        if self.adamw:
            self.number += 1
        where = torch.from_numpy(ids).to(self.device)
        targets = torch.from_numpy(np.ascontiguousarray(labels[:, 1:])).to(self.device).reshape(-1)
        position = family.positions(ids.shape[1], self.device, torch.bfloat16)
        entered: list[Tensor] = []
        with torch.no_grad():
            h = family.embed(where)
            for i in range(len(self.units.layers)):
                entered.append(h)
                h = family.block(i, h, position)
        top = h.detach().requires_grad_(True)
        self._learn(self._rest, 1)
        normed = family.final_norm(top)
        hidden = normed.detach()[:, :-1].reshape(-1, normed.shape[-1])
        weight = family.head_weight.detach()
        head = torch.zeros_like(weight)
        score = (
            LigerLoss(hidden, targets, 1 / count)
            if self.liger
            else ChunkedLoss(hidden, targets, 1 / count, CHUNK)
        )
        self.known.copy_(score.forward_backward(weight, head).reshape(1) / count, non_blocking=True)
        event = self._record()
        whole = torch.zeros_like(normed)
        whole[:, :-1] = score.grad_hidden.view(len(ids), -1, normed.shape[-1])
        torch.autograd.backward(normed, whole)
        gradient: Any = top.grad
        del h, top, normed, whole, hidden, score
        for unit in reversed(self.units.layers):
            self._learn(unit, 0)
            x = entered.pop().detach().requires_grad_(True)
            torch.autograd.backward(family.block(unit.index, x, position), gradient)
            gradient = x.grad
            self._learned(unit, 0)
        rows = torch.ops.aten.embedding_dense_backward(gradient, where, weight.shape[0], -1, False)
        self._learned(self._rest, 1)
        if self.adamw:
            if self.units.tied:
                self._update(self.units.head, (head + rows).view(-1))
            else:
                self._update(self.units.embedding, rows.view(-1))
                self._update(self.units.head, head.view(-1))
        if event is not None:
            event.synchronize()
        return float(self.known)

    def _record(self) -> torch.cuda.Event | None:
        if torch.device(self.device).type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _learn(self, unit: Unit, which: int) -> None:
        if self.adamw:
            bind(unit, self.memory[unit.index], self.gradients[which][: unit.numel].zero_())
        for piece in unit.pieces:
            piece.parameter.requires_grad_(True)

    def _learned(self, unit: Unit, which: int) -> None:
        if self.adamw:
            self._update(unit, self.gradients[which][: unit.numel])
        for piece in unit.pieces:
            piece.parameter.grad = None

    @torch.no_grad()
    def _update(self, unit: Unit, gradient: Tensor) -> None:
        memory, (master, m, v) = self.memory[unit.index], self.states[unit.index]
        flat = torch.zeros_like(master)
        flat[: gradient.numel()] = gradient
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [master], [flat], [m], [v], [], [self.number], lr=RATE, beta1=0.9, beta2=0.999, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        memory.copy_(master)

    def flush(self) -> None:
        synchronize(self.device)

    def close(self) -> None:
        self.flush()


class _Loss(torch.autograd.Function):
    """The mean loss; `ChunkedLoss` finds both gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, liger: bool) -> Tensor:
        scale = 1 / targets.numel()
        score = (
            LigerLoss(hidden, targets, scale)
            if liger
            else ChunkedLoss(hidden, targets, scale, CHUNK)
        )
        grad_weight = torch.zeros_like(weight)
        total = score.forward_backward(weight.detach(), grad_weight)
        ctx.save_for_backward(score.grad_hidden, grad_weight)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *ctx.saved_tensors, None, None  # the loss is the root: its own gradient is 1


def head_loss(normed: Tensor, weight: Tensor, targets: Tensor, liger: bool) -> Any:
    """The mean loss of [B, T, H] and a head in any dtype, as a tensor to go backward from."""
    hidden = normed[:, :-1].reshape(-1, normed.shape[-1]).to(torch.bfloat16)
    return _Loss.apply(hidden, weight.to(torch.bfloat16), targets, liger)


def tensors_of(ids: np.ndarray, labels: np.ndarray, device: str) -> tuple[Tensor, Tensor]:
    targets = torch.from_numpy(np.ascontiguousarray(labels[:, 1:])).to(device).reshape(-1)
    return torch.from_numpy(ids).to(device), targets


def synchronize(device: str) -> None:
    """Wait for what a GPU still computes."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


class TorchAo:
    """torchao's CPUOffloadOptimizer with gradients offloaded, over torch's fused AdamW, one a
    parameter.

    `torchao`: bf16 parameters and moments, no float32 anywhere: less precision than any form of
    ours. `torchao-fp32`: float32 parameters on the GPU under bf16 autocast, float32 gradients and
    moments on the host.
    """

    def __init__(self, shape: str, block: Tensor, device: str, name: str, liger: bool) -> None:
        from torchao.optim import CPUOffloadOptimizer  # pyright: ignore[reportMissingImports]

        if torch.device(device).type != "cuda":
            raise RuntimeError("not run: torchao's CPUOffloadOptimizer needs a GPU")
        self.mixed = name == "torchao-fp32"
        dtype = torch.float32 if self.mixed else torch.bfloat16
        self.family, self.device, self.liger = (
            make_family(shape, block, dtype, device, liger),
            device,
            liger,
        )
        parameters = [
            parameter.requires_grad_(True) for parameter in self.family.model.parameters()
        ]
        self.optimizer: Any = CPUOffloadOptimizer(
            parameters, torch.optim.AdamW, offload_gradients=True, fused=True, lr=RATE
        )

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        where, targets = tensors_of(ids, labels, self.device)
        with torch.autocast(
            torch.device(self.device).type, torch.bfloat16, enabled=self.mixed, cache_enabled=False
        ):
            h = self.family.embed(where).to(torch.bfloat16)
            position = self.family.positions(ids.shape[1], self.device, h.dtype)
            for i in range(self.family.dims.layers):
                h = checkpoint(
                    self.family.block, i, h, position, use_reentrant=False, preserve_rng_state=False
                )
            normed = self.family.final_norm(h)
        loss = head_loss(normed, self.family.head_weight, targets, self.liger)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def flush(self) -> None:
        torch.cuda.synchronize()

    close = flush


class _Whole(nn.Module):
    """The model with its loss, so that FSDP2's root holds the head while the loss is computed."""

    def __init__(self, model: Any, liger: bool) -> None:
        super().__init__()
        self.lm, self.liger = model, liger

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        normed = self.lm.model(input_ids=ids, use_cache=False).last_hidden_state
        return head_loss(normed, self.lm.lm_head.weight, targets, self.liger)


@torch.no_grad()
def _fill(module: nn.Module, block: Tensor) -> None:
    """Values of each rank's shards: norms 1, biases 0, others out of `block`."""
    for name, parameter in module.named_parameters():
        local = parameter.to_local().reshape(-1)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        if "norm" in name or name.endswith("bias"):
            local.fill_(float(not name.endswith("bias")))
        elif local.numel():
            local.copy_(block[: local.numel()])


class Fsdp2:
    """`fully_shard` on each layer and on the rest, over the ranks that are there: float32
    parameters, gradients and moments on the host, bf16 computation, torch's fused AdamW on the CPU
    after the backward pass."""

    def __init__(
        self, shape: str, block: Tensor, device: str, liger: bool, lock: bool = True
    ) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        kind = torch.device(device).type
        if not dist.is_initialized():
            backend = "nccl" if kind == "cuda" else "gloo"
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        world, tied = dist.get_world_size(), SHAPES[shape][2]
        # Only shares of a large model fit; a tied table would be two after `to_empty`.
        later = world > 1 and not tied
        model: Any = make_family(
            shape, block, *((torch.bfloat16,) if later else (torch.float32,)), "cpu", liger
        ).model
        if later:
            model.to("meta").float()
        model.requires_grad_(True)
        keep = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keep)
        model.train()
        self.device, self.whole, self.version = device, _Whole(model, liger), torch.__version__
        options: Any = {
            "mesh": init_device_mesh(kind, (world,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=lock and kind == "cuda"),
        }
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self.whole, **options)
        if later:
            self.whole.to_empty(device="cpu")
            _fill(self.whole, block)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
        self.optimizer = torch.optim.AdamW(self.whole.parameters(), lr=RATE, fused=True)

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        loss = self.whole(*tensors_of(ids, labels, self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def flush(self) -> None:
        synchronize(self.device)

    def close(self) -> None:
        import torch.distributed as dist

        self.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
