"""P-RGE's step around an NPU's delegate: embedding, noise, loss, projected gradient and update, on
the CPU in float32.

One method does everything, because the compiled graph belongs to one method and a second one would
store the weights again: with perturbation scale 0 all copies are the adapter itself, and the method
evaluates as many rows as it has copies.

The delegate ends at the hidden state. Inside its float16 the difference of two losses would be one
rounding step (measured: half of the projected gradients were exactly zero).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ondevice.core.errors import ModelError
from ondevice.core.manifest import Constant, port, row_ports, token_ports
from ondevice.core.program import Agreement, BuiltProgram, GraphProgram, ProgramModule
from ondevice.core.traits import check_traits
from ondevice.methods.prge.modules import ApplyUpdate
from ondevice.methods.prge.program import (
    build_program,
    built,
    correlation,
    largest,
    ports,
    relative_errors,
    state_of,
    stepping,
)
from ondevice.methods.prge.program import problems as graph_problems
from ondevice.methods.prge.rounding import update_limit
from ondevice.methods.prge.subspace_program import ProgramSubspace, at_export

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.step import PrgeProgram
    from ondevice.models import LoadedModel

IN_NPU = (
    "norms", "rotary", "fused", "rotary_width", "norm_offset", "activation", "score_scale", "embedding_scale",
)  # fmt: skip
"""Traits of a block with which programs in QNN's simulator were held against eager PyTorch."""
SCALE = "perturbation_scale"
"""Name of the program's constant."""
SMALLEST_SCALE = 1e-12
"""Divisor in place of a perturbation scale of 0, whose projected gradients mean nothing."""


def problems(config: PrgeConfig, export: ExportConfig, dims: ModelDims) -> list[str]:
    """Return settings that a program does not have."""
    problems = graph_problems(config, export.model_copy(update={"next_token": False}), dims)
    try:
        check_traits(dims, "a program of prge for the NPU", IN_NPU, max(export.lengths_tokens))
    except ModelError as error:
        problems.append(error.reason)
    if export.next_token:
        problems.append("next_token is for the CPU: the NPU's program has one method")
    return problems


class Body(nn.Module):
    """All blocks: hidden [copies * batch, T, D] and one B [copies, rank, outputs] for each linear,
    and behind them what else the layers take of the adapter (`PrgeProgram.bindings`), to the new
    hidden.

    Args:
        program: the training program whose model and layout these are.
        length_tokens: T.
        unrolled: run row after row with shared weights instead of one batch.
    """

    mask: Tensor

    def __init__(self, program: PrgeProgram, length_tokens: int, unrolled: bool = False) -> None:
        super().__init__()
        self.model = program.model
        self.family = program.family
        self.unrolled = unrolled
        self.bind = program.bind
        self.linears = len(program.layout.entries)
        positions = {entry: index for index, entry in enumerate(program.layout.entries)}
        self.slots = [
            [
                (program.linears[entry].slot, positions[entry])
                for entry in program.layout.of_layer(layer)
            ]
            for layer in range(program.family.dims.layers)
        ]
        tables: tuple[Tensor, ...] = program.family.positions(length_tokens, "cpu", torch.float32)
        # Constants: the angles would be rounded to float16, which has steps of 1/32 at position 63.
        self.tables = [f"table_{number}" for number in range(len(tables))]
        for name, table in zip(self.tables, tables, strict=True):
            self.register_buffer(name, table.detach().clone())
        self.register_buffer("mask", torch.full((1, 1, length_tokens, length_tokens), -1e4).triu(1))

    def forward(self, hidden: Tensor, *given: Tensor) -> Tensor:
        b = given[: self.linears]
        rest = given[self.linears :]
        self.bind(rest)
        try:
            return self._blocks(hidden, b)
        finally:
            self.bind(())

    def _blocks(self, hidden: Tensor, b: tuple[Tensor, ...]) -> Tensor:
        if not self.unrolled:
            return self._rows(hidden, b)
        rows, copies = hidden.shape[0], b[0].shape[0]
        parts = []
        for row in range(rows):
            copy = row // (rows // copies)
            parts.append(
                self._rows(hidden[row : row + 1], tuple(value[copy : copy + 1] for value in b))
            )
        return torch.cat(parts)

    def _rows(self, hidden: Tensor, b: tuple[Tensor, ...]) -> Tensor:
        position: Any = tuple(getattr(self, name) for name in self.tables)
        for layer, slots in enumerate(self.slots):
            for slot, index in slots:
                slot.copies = b[index]
            hidden = self.family.block(layer, hidden, position, self.mask)
            for slot, _ in slots:
                slot.copies = None
        return hidden


class NpuStep(nn.Module):
    """One ZO-SGD step on rows that the host repeats: copies * batch of them, copy after copy."""

    def __init__(self, program: PrgeProgram, body: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.body = body

    def forward(
        self,
        ids_RT: Tensor,
        labels_RT: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        """`rest` is the state, seed, step, learning rate and the perturbation's scale."""
        state, (seed, step, learning_rate, scale) = rest[:-4], rest[-4:]
        program = self.program
        copies = self.program.config.copies
        with program.bound(state):
            b = program.every_copy(program.perturbed(state[0], seed, step, scale))
        hidden = self.body(program.family.embed(ids_RT), *b, *program.bindings(state[0]))
        hidden = program.family.final_norm(
            hidden[0] if isinstance(hidden, list | tuple) else hidden
        )
        nll, tokens = program.row_nll(hidden, labels_RT)
        losses = nll.reshape(copies, -1).sum(1) / tokens.reshape(copies, -1).sum(1)
        gradients = program.projected_gradients(losses, scale.clamp(min=SMALLEST_SCALE))
        return (
            losses,
            gradients,
            *program.update(state, gradients, seed, step, learning_rate),
            nll,
            tokens,
        )


def build(loaded: LoadedModel, config: PrgeConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """Return `train_step` with the compiled blocks in it, and `apply_update`, which needs no model."""
    program, (length,) = build_program(loaded, config, export, seed), export.lengths_tokens
    rows = config.copies * export.batch_size
    hidden = torch.zeros(rows, length, loaded.dims.hidden)
    copies = (
        torch.zeros(config.copies, entry.rank, entry.outputs) for entry in program.layout.entries
    )
    given = program.bindings(torch.zeros(next(iter(program.state_shapes.values()))))
    blocks = Body(program, length, export.rows == "unrolled"), (hidden, *copies, *given)

    def finish(body: nn.Module) -> tuple[ProgramModule, ...]:
        state, scalars, gradients, losses = ports(program)
        scale = port(SCALE, "constant", (1,))
        inputs = (*token_ports(rows, length), *state, *scalars, scale)
        outputs = (losses, gradients, *state, *row_ports(rows))
        return (
            ProgramModule("train_step", NpuStep(program, body), inputs, outputs),
            ProgramModule(
                "apply_update", ApplyUpdate(program), (*state, gradients, *scalars), state
            ),
        )

    constants = (Constant(name=SCALE, train=config.perturbation_scale, evaluate=0.0),)
    return built(
        program, loaded, (), constants=constants, batch_copies=config.copies, evaluates_with="train_step",
        blocks=blocks, finish=finish,
    )  # fmt: skip


def compare(
    session: ProgramSession, built: BuiltProgram, batches: Iterable[Batch], learning_rate: float
) -> Agreement:
    """Run a step of the program on each batch, and the same in float32 eager from the same adapter,
    at the session's perturbation scale.

    Values: `directions`, projected gradients that were compared; `sign_agreement`, the share of
    them with the same sign; `correlation` of the two lists (NaN below three directions);
    `loss_error`, the largest relative one; `adapter_error`, the largest absolute one of the update
    from the program's own projected gradients; `update_error`, the largest as a part of
    `update_limit`.
    """
    program: PrgeProgram = built.eager
    scale = session.constants[SCALE]
    received: list[float] = []
    expected: list[float] = []
    loss_error = adapter_error = update_error = 0.0
    before = state_of(session, program)
    with torch.inference_mode():
        for tokens, result, scalars in stepping(session, batches, learning_rate):
            with program.bound(before):
                copies_of = program.perturbed(before[0], *scalars[:2], scale)
                losses = program.losses(*tokens, copies_of)
            gradients = torch.tensor(result.projected_gradients, dtype=torch.float32)
            updated = program.update(before, gradients, *scalars)[0]
            limit = update_limit(program, before[0], gradients, *scalars)
            before = state_of(session, program)
            errors = (before[0] - updated).abs()
            loss_error = largest(loss_error, relative_errors(result.losses, losses))
            adapter_error = largest(adapter_error, errors.numpy())
            update_error = largest(update_error, (errors / limit).numpy())
            received += result.projected_gradients
            expected += program.projected_gradients(losses, scale).tolist()
    shares = {
        "sign_agreement": float(np.mean(np.sign(received) == np.sign(expected))),
        "correlation": correlation(received, expected),
    }
    values: dict[str, Any] = {
        "perturbation_scale": scale,
        "directions": len(received),
        **shares,
        "loss_error": loss_error,
        "adapter_error": adapter_error,
        "update_error": update_error,
    }
    return Agreement(values, {"loss": loss_error, "update": update_error}, shares)


QNN = GraphProgram(problems, build, compare, calibrate=at_export, refresh=ProgramSubspace)
