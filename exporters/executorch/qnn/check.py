"""Hold the NPU's projected gradients against float32 eager: signs, correlation, losses, and the update on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ondevice.exporters.executorch.check import Batch
    from ondevice.methods.prge.torch import PrgeProgram
    from ondevice.runtime.npu import NpuSession

LOSS_LIMIT = {"none": 1e-2, "w8": 5e-2}
"""Largest relative error of a loss, by quantisation: float16 in the blocks, and 8-bit weights."""
ADAPTER_LIMIT = 1e-5
"""Largest error of the update, given the program's own projected gradients: float32 on the CPU."""
SIGN_LIMIT, CORRELATION_LIMIT = 0.85, 0.9
"""What eight directions must reach: one of them may be so close to zero that its sign is chance."""
ENOUGH = 8
"""Directions below which signs and correlation are reported and not judged."""


@dataclass(frozen=True)
class Agreement:
    """The program against float32 eager at one perturbation scale.

    Attributes:
        directions: projected gradients that were compared.
        sign_agreement: share of them with the same sign.
        correlation: of the two lists (NaN below three directions).
        loss_error: largest relative error of a loss.
        adapter_error: largest absolute error of the update, from the program's own projected gradients.
    """

    perturbation_scale: float
    directions: int
    sign_agreement: float
    correlation: float
    loss_error: float
    adapter_error: float

    def reasons(self, quantize: str) -> list[tuple[str, str]]:
        """(expected, received) of every limit that is not kept; NaN keeps none."""
        wanted = [
            ("loss_error", self.loss_error, LOSS_LIMIT[quantize]),
            ("adapter_error", self.adapter_error, ADAPTER_LIMIT),
        ]
        found = [(f"{name} <= {limit:g}", f"{value:.3g}") for name, value, limit in wanted if not value <= limit]
        if self.directions >= ENOUGH:
            least = [
                ("sign_agreement", self.sign_agreement, SIGN_LIMIT),
                ("correlation", self.correlation, CORRELATION_LIMIT),
            ]
            found += [(f"{name} >= {limit:g}", f"{value:.3g}") for name, value, limit in least if not value >= limit]
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def agreement(
    session: NpuSession, program: PrgeProgram, batches: Iterable[Batch], learning_rate: float, scale: float
) -> Agreement:
    """Run a step of the program on each batch, from the session's adapter, and the same in float32 eager.

    Args:
        session: its adapter moves; eager takes it over before each step, so that every step starts alike.
        program: of the same model, method and seed, in float32.
        scale: the perturbation scale on both sides.
    """
    seed, rate = torch.tensor([session.seed]), torch.tensor([learning_rate], dtype=torch.float32)
    own_scale, session.perturbation_scale = session.perturbation_scale, scale
    received: list[float] = []
    expected: list[float] = []
    loss_error = adapter_error = 0.0
    try:
        for number, (ids, labels) in enumerate(batches):
            before, step = torch.from_numpy(session.flat().copy()), torch.tensor([number])
            result = session.step(ids, labels, number, learning_rate)
            gradients = torch.tensor(result.projected_gradients, dtype=torch.float32)
            tokens = torch.from_numpy(ids), torch.from_numpy(labels)
            with torch.inference_mode():
                losses = program.losses(*tokens, program.perturbed(before, seed, step, scale))
                updated = program.apply_update(before, gradients, seed, step, rate)
            reference = losses.double().numpy()
            difference = np.abs(np.array(result.losses) - reference) / np.maximum(np.abs(reference), 1e-12)
            loss_error = float(np.maximum(loss_error, difference.max()))  # NaN stays NaN
            adapter_error = float(np.maximum(adapter_error, np.abs(session.flat() - updated.numpy()).max()))
            received += result.projected_gradients
            expected += program.projected_gradients(losses, scale).tolist()
    finally:
        session.perturbation_scale = own_scale
    signs = float(np.mean(np.sign(received) == np.sign(expected)))
    correlation = float(np.corrcoef(received, expected)[0, 1]) if len(received) > 2 else float("nan")
    return Agreement(scale, len(received), signs, correlation, loss_error, adapter_error)
