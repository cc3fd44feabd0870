"""Optimizers that update one tensor at a time, in place, as soon as its gradient is known.

All arithmetic is in float32, chunk by chunk, so that what an update needs next to the weights does
not grow with them. A bfloat16 weight is rounded once, after the update. SGD has no state (with the
fused update that is LOMO, arXiv 2306.09782); AdamW's and the 8-bit one's arithmetic are torch's and
bitsandbytes' own kernels; Adafactor's is `torch.optim.Adafactor`'s, which would hold several
float32 copies of the largest tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ondevice.core.errors import CheckpointError, MissingPackageError
from ondevice.nn.rounding import stochastic_round
from ondevice.runtime_ops.generator import stream_key
from ondevice.runtime_ops.layer_adam import AdamStep, torch_step

if TYPE_CHECKING:
    from ondevice.methods.revffn.config import RevffnConfig

CHUNK = 1 << 24
"""Elements that are updated at once; a multiple of the 256 that share a scale in bitsandbytes."""
SMALL = 4096
"""Tensors of fewer elements keep float32 moments under `adamw8bit`, as in bitsandbytes."""
BETA2_DECAY = -0.8
EPS2 = 1e-3
"""Adafactor's, as `torch.optim.Adafactor` has them by default; its eps1 is the epsilon of float32.
"""
State = dict[str, Tensor]


class Rule(Protocol):
    """One optimizer's arithmetic."""

    def state(self, parameter: Tensor) -> State:
        """Return state of a parameter before its first step."""
        ...

    def apply(
        self, write: ParameterWriter, gradient: ScaledGradient, state: State, adam: AdamStep
    ) -> None:
        """Apply one step with a gradient of the parameter's shape."""
        ...


class ParameterWriter:
    """A parameter that is updated chunk by chunk: float32 in between, rounded once if it has
    fewer bits."""

    def __init__(self, parameter: Tensor, key: int | None) -> None:
        """`key`: of stochastic rounding; None rounds to the nearest."""
        self.parameter = parameter.detach()
        self.key = key

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of the flat parameter, each as float32; what was done to a chunk is written
        before the next."""
        flat = self.parameter.view(-1)
        for number, low in enumerate(range(0, flat.numel(), CHUNK)):
            span = slice(low, min(low + CHUNK, flat.numel()))
            yield span, (work := flat[span].float())
            self.write(flat[span], work, number)

    def write(self, out: Tensor, work: Tensor, number: int) -> None:
        """Round `work` into `out`, a view of the parameter; chunk `number` draws its own random
        bits."""
        if out.dtype == torch.float32:
            if out.data_ptr() != work.data_ptr():
                out.copy_(work)
        elif self.key is None or out.dtype != torch.bfloat16:
            out.copy_(work)
        else:
            stochastic_round(out, work, stream_key(self.key, number, 0, 0))


class ScaledGradient:
    """A gradient that is multiplied as it is read, in float32; the gradient itself stays as it is."""

    def __init__(self, values: Tensor, scale: Tensor | None) -> None:
        self.values = values
        self.scale = scale

    def view(self, *shape: int) -> ScaledGradient:
        """Return the same in another shape."""
        return ScaledGradient(self.values.view(*shape), self.scale)

    def __getitem__(self, span: Any) -> Tensor:
        chunk = self.values[span].float()
        if self.scale is None:
            return chunk
        return chunk * self.scale


class Sgd:
    """w -= rate * g; no state."""

    def state(self, parameter: Tensor) -> State:
        return {}

    def apply(
        self, write: ParameterWriter, gradient: ScaledGradient, state: State, adam: AdamStep
    ) -> None:
        for span, work in write.chunks():
            if adam.weight_decay:
                work.mul_(1 - adam.learning_rate * adam.weight_decay)
            work.add_(gradient.view(-1)[span], alpha=-adam.learning_rate)


class AdamW:
    """`torch.optim.AdamW(fused=True)` with float32 moments."""

    def state(self, parameter: Tensor) -> State:
        make = {"device": parameter.device, "dtype": torch.float32}
        return {name: torch.zeros(parameter.numel(), **make) for name in ("exp_avg", "exp_avg_sq")}

    def apply(
        self, write: ParameterWriter, gradient: ScaledGradient, state: State, adam: AdamStep
    ) -> None:
        for span, work in write.chunks():
            torch_step(
                work,
                gradient.view(-1)[span],
                state["exp_avg"][span],
                state["exp_avg_sq"][span],
                adam,
            )


class AdamW8bit:
    """`bitsandbytes.optim.AdamW8bit`: moments in 8 bits with a scale for 256 of them."""

    def __init__(self) -> None:
        try:
            import bitsandbytes.functional as functional
        except ImportError:
            raise MissingPackageError(
                "bitsandbytes is not installed",
                hint="pip install 'ondevice-train[cuda]', or method.optimizer: adafactor",
            ) from None
        self.functional = functional
        self.small = AdamW()
        self.maps = {kind: functional.create_dynamic_map(signed=kind == 1) for kind in (1, 2)}

    def state(self, parameter: Tensor) -> State:
        count = parameter.numel()
        device = parameter.device
        if count < SMALL:
            return self.small.state(parameter)
        blocks = -(-count // 256)
        state: State = {}
        for kind in (1, 2):
            state[f"state{kind}"] = torch.zeros(count, dtype=torch.uint8, device=device)
            state[f"absmax{kind}"] = torch.zeros(blocks, dtype=torch.float32, device=device)
        return state

    def apply(
        self, write: ParameterWriter, gradient: ScaledGradient, state: State, adam: AdamStep
    ) -> None:
        if "exp_avg" in state:
            return self.small.apply(write, gradient, state, adam)
        maps = self.maps = {
            kind: values.to(write.parameter.device) for kind, values in self.maps.items()
        }
        for span, work in write.chunks():
            blocks = slice(span.start // 256, -(-span.stop // 256))
            self.functional.optimizer_update_8bit_blockwise(
                "adam", gradient.view(-1)[span], work, state["state1"][span], state["state2"][span],
                adam.beta1, adam.beta2, 0.0, 0.0, adam.eps, adam.step, adam.learning_rate, maps[1], maps[2],
                state["absmax1"][blocks], state["absmax2"][blocks], adam.weight_decay,
            )  # fmt: skip
        return None


class Adafactor:
    """`torch.optim.Adafactor`: second moments as a row and a column of each matrix (a 3-D tensor is
    a stack of them), no first moment; the rate is relative to the root mean square of the
    parameter."""

    def state(self, parameter: Tensor) -> State:
        make = {"device": parameter.device, "dtype": torch.float32}
        if parameter.ndim < 2:
            return {"variance": torch.zeros(parameter.shape, **make)}
        *outer, rows, columns = parameter.shape
        return {
            "row_var": torch.zeros(*outer, rows, 1, **make),
            "col_var": torch.zeros(*outer, 1, columns, **make),
        }

    def apply(
        self, write: ParameterWriter, gradient: ScaledGradient, state: State, adam: AdamStep
    ) -> None:
        parameter = write.parameter
        eps1 = torch.finfo(torch.float32).eps
        stack = parameter
        if parameter.ndim < 2:
            stack = parameter[None]
        *_, rows, columns = stack.shape
        stack = stack.view(-1, rows, columns)
        gradient = gradient.view(-1, rows, columns)
        new = adam.step**BETA2_DECAY
        chunks = list(_chunks(stack.shape))
        square = torch.zeros((), device=parameter.device)
        row = torch.zeros(*stack.shape[:2], 1, device=parameter.device)
        column = torch.zeros(stack.shape[0], 1, columns, device=parameter.device)
        # In chunks, three times over the gradient: the update's norm must be known before any of it
        # is applied, and a float32 copy of the parameter would take the memory that factored
        # moments save.
        for chunk in chunks:
            square += stack[chunk].float().square().sum()
            squares = gradient[chunk].square()
            row[chunk] = squares.mean(-1, keepdim=True)
            column[chunk[0]] += squares.sum(-2, keepdim=True) / rows
        if parameter.ndim > 1:
            state["row_var"].view_as(row).lerp_(row, new)
            state["col_var"].view_as(column).lerp_(column, new)
            row = state["row_var"].view_as(row)
            column = state["col_var"].view_as(column)
            row = row / row.mean(-2, keepdim=True).clamp(min=eps1)
        else:
            state["variance"].lerp_(column.view(-1), new)
            row = torch.ones_like(row)
            column = state["variance"].view_as(column)

        def update(chunk: tuple[slice, slice]) -> Tensor:
            variance = row[chunk] * column[chunk[0]]
            return variance.clamp_(min=eps1 * eps1).rsqrt_().mul_(gradient[chunk])

        total = sum((update(chunk).square_().sum() for chunk in chunks), torch.zeros_like(square))
        size = (square / parameter.numel()).sqrt_().clamp_(min=EPS2) * min(
            adam.learning_rate, adam.step**-0.5
        )
        size /= (total / parameter.numel()).sqrt_().clamp_(min=1.0)
        for number, chunk in enumerate(chunks):
            work = stack[chunk].float()
            if adam.weight_decay:
                work.mul_(1 - adam.learning_rate * adam.weight_decay)
            work.sub_(update(chunk).mul_(size))
            write.write(stack[chunk], work, number)


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Ranges of matrices and of rows of a stack of them, at most about CHUNK elements each."""
    matrices, rows, columns = shape
    several = max(1, CHUNK // (rows * columns))
    at_once = rows
    if several == 1:
        at_once = max(1, CHUNK // columns)
    for first in range(0, matrices, several):
        for low in range(0, rows, at_once):
            yield slice(first, min(first + several, matrices)), slice(low, min(low + at_once, rows))


RULES: dict[str, type[Any]] = {
    "sgd": Sgd,
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "adafactor": Adafactor,
}


class Updates:
    """The optimizer of some tensors: their states, and one step of any of them.

    Args:
        parameters: names to tensors; states are made with a tensor's first step.
        seed: of stochastic rounding.
    """

    def __init__(self, config: RevffnConfig, parameters: dict[str, Tensor], seed: int) -> None:
        self.config = config
        self.seed = seed
        self.parameters = parameters
        self.rule: Rule = RULES[config.optimizer]()
        self.numbers = {name: number for number, name in enumerate(sorted(parameters))}
        self.states: dict[str, State] = {}

    @torch.no_grad()
    def apply(
        self, name: str, gradient: Tensor, count: int, rate: float, scale: Tensor | None = None
    ) -> None:
        """Apply step `count` (1 for the first) of a tensor.

        Args:
            gradient: of its shape, in its dtype or float32; unchanged.
            rate: learning rate.
            scale: what the gradient is multiplied by first, float32 []; None: 1.
        """
        c = self.config
        parameter = self.parameters[name]
        if name not in self.states:
            self.states[name] = self.rule.state(parameter)
        adam = AdamStep(rate, c.beta1, c.beta2, c.eps, c.weight_decay, count)
        chance = c.rounding == "stochastic"
        key = None
        if chance:
            key = stream_key(self.seed, count, 0, self.numbers[name])
        self.rule.apply(
            ParameterWriter(parameter, key),
            ScaledGradient(gradient.contiguous(), scale),
            self.states[name],
            adam,
        )

    def arrays(self) -> dict[str, Tensor]:
        """Return all states, by `kind/name`."""
        return {
            f"{kind}/{name}": value
            for name, state in self.states.items()
            for kind, value in state.items()
        }

    def load(self, arrays: dict[str, Tensor]) -> None:
        """Restore the states of `arrays`.

        Raises:
            CheckpointError: a state is missing in part, or of another size.
        """
        self.states = {}
        for name, parameter in self.parameters.items():
            state = self.rule.state(parameter)
            saved = {kind: arrays.get(f"{kind}/{name}") for kind in state}
            if all(value is None for value in saved.values()):
                continue  # a tensor that has had no step yet has no state
            for kind, value in saved.items():
                if (
                    value is None
                    or value.numel() != state[kind].numel()
                    or value.dtype != state[kind].dtype
                ):
                    raise CheckpointError(
                        f"the checkpoint's {kind} of {name} does not fit",
                        expected=f"{state[kind].numel()} values of {state[kind].dtype}",
                        received=None if value is None else f"{value.numel()} of {value.dtype}",
                        hint="method.optimizer must be that of the run",
                    )
                state[kind].copy_(value.view_as(state[kind]))
            self.states[name] = state


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the sum of all squares, float32 [] on the device, chunk by chunk."""
    parts = [
        chunk.float().square().sum()
        for gradient in gradients
        for chunk in gradient.detach().reshape(-1).split(CHUNK)
    ]
    return torch.stack(parts).sum()


def clip_scale(square: Tensor, limit: float) -> Tensor:
    """Compute min(1, limit / norm), as `torch.nn.utils.clip_grad_norm_` has it."""
    return (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
