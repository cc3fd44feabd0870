"""The step around the NPU's delegate: embedding, noise, loss, projected gradient and update, on the CPU in float32.

One method does everything, because the compiled graph belongs to one method and a second one would store the
weights again: with perturbation scale 0 all copies are the adapter itself, and the method evaluates as many rows as
it has copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ondevice.exporters.executorch.programs import ApplyUpdate, MethodSpec, Port
from ondevice.exporters.executorch.qnn.body import METHOD

if TYPE_CHECKING:
    from ondevice.methods.prge.torch import PrgeProgram

SMALLEST_SCALE = 1e-12
"""Divisor in place of a perturbation scale of 0, whose projected gradients mean nothing."""


class NpuStep(nn.Module):
    """One ZO-SGD step on rows that the host repeats: copies * batch of them, copy after copy."""

    def __init__(self, program: PrgeProgram, body: nn.Module) -> None:
        super().__init__()
        self.program, self.body = program, body

    def forward(
        self,
        ids_RT: Tensor,
        labels_RT: Tensor,
        adapter_P: Tensor,
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
        scale: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        program, layout, copies = self.program, self.program.layout, self.program.config.copies
        copies_GP = program.perturbed(adapter_P, seed, step, scale)(0, layout.size)
        b = [
            copies_GP[:, entry.offset : entry.offset + entry.count].reshape(-1, entry.rank, entry.outputs)
            for entry in layout.entries
        ]
        hidden = self.body(program.family.embed(ids_RT), *b)
        hidden = program.family.final_norm(hidden[0] if isinstance(hidden, list | tuple) else hidden)
        nll, tokens = program.row_nll(hidden, labels_RT)
        losses = nll.reshape(copies, -1).sum(1) / tokens.reshape(copies, -1).sum(1)
        gradients = program.projected_gradients(losses, scale.clamp(min=SMALLEST_SCALE))
        adapter = program.apply_update(adapter_P, gradients, seed, step, learning_rate)
        return losses, gradients, adapter, nll, tokens


def example_body_inputs(program: PrgeProgram, rows: int, length_tokens: int) -> tuple[Tensor, ...]:
    """Zeros of the shapes that `Body.forward` takes; for a program that is not calibrated only shapes matter."""
    copies = program.config.copies
    hidden = torch.zeros(rows, length_tokens, program.family.dims.hidden)
    return hidden, *(torch.zeros(copies, entry.rank, entry.outputs) for entry in program.layout.entries)


def npu_methods(program: PrgeProgram, body: Any, rows: int, length_tokens: int) -> list[MethodSpec]:
    """`train_step` with the delegate in it, and `apply_update`, which needs no model."""
    config, size = program.config, program.layout.size
    tokens = tuple(Port(name, "int64", (rows, length_tokens), "token id") for name in ("ids", "labels"))
    adapter = Port("adapter", "float32", (size,))
    scalars = (Port("seed", "int64", (1,)), Port("step", "int64", (1,)), Port("learning_rate", "float32", (1,)))
    gradients = Port("projected_gradients", "float32", (config.queries,), "nats per unit of perturbation")
    inputs = (*tokens, adapter, *scalars, Port("perturbation_scale", "float32", (1,)))
    outputs = (
        Port("losses", "float32", (config.copies,), "nats per labelled token"),
        gradients,
        adapter,
        Port("nll_sum", "float32", (rows,), "nats"),
        Port("tokens", "float32", (rows,)),
    )
    return [
        MethodSpec(METHOD, NpuStep(program, body), inputs, outputs),
        MethodSpec("apply_update", ApplyUpdate(program), (adapter, gradients, *scalars), (adapter,)),
    ]
