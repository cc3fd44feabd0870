"""Hold a MeSP program in the runtime against automatic differentiation in eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.methods.mesp.torch.session import MespSession

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel
    from ondevice.runtime.first_order import FirstOrderProgramSession

Batch = tuple[np.ndarray, np.ndarray]
PROBE_SCALE = 0.02
"""Of the B matrices at which gradients are compared: at zero, those of A are zero."""


@dataclass(frozen=True)
class Agreement:
    """Errors of the runtime against eager PyTorch.

    Attributes:
        gradient_error: largest relative error ||ours - theirs|| / ||theirs|| of a tensor's gradient; the program's is
            read from what one step does: to the adapter with SGD, to the first moments with AdamW.
        max_rel_loss_error: over the steps, each side following its own updates.
        max_abs_adapter_error: after the steps.
    """

    steps: int
    gradient_error: float
    max_rel_loss_error: float
    max_abs_adapter_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    session: FirstOrderProgramSession, loaded: LoadedModel, config: MespConfig, batches: Iterable[Batch], rate: float
) -> Agreement:
    """Gradients at an adapter that is not zero, by `gradients: checkpoint`; then the steps from the beginning."""
    eager_config = config.model_copy(update={"gradients": "checkpoint", "micro_batch_size": None, "bits": None})
    given = list(batches)
    gradient = gradient_error(session, MespSession(loaded, eager_config, session.seed, "cpu"), *given[0])
    session.restart()
    eager, losses = MespSession(loaded, eager_config, session.seed, "cpu"), [0.0]
    for number, (ids, labels) in enumerate(given):
        ours, theirs = session.step(ids, labels, number, rate).loss, eager.step(ids, labels, number, rate).loss
        losses.append(abs(ours - theirs) / abs(theirs))
    adapter = session.adapter().tensors
    errors = [float(np.abs(adapter[name] - value).max()) for name, value in eager.adapter().tensors.items()]
    return Agreement(len(given), gradient, float(np.max(losses)), float(np.max(errors)))


def gradient_error(session: FirstOrderProgramSession, eager: MespSession, ids: np.ndarray, labels: np.ndarray) -> float:
    """The program's gradients against `eager`'s, at random B; both sessions are somewhere else afterwards."""
    adapter, random = eager.adapter(), np.random.default_rng(0)
    for name, value in adapter.tensors.items():
        if ".lora_B." in name:
            value[:] = PROBE_SCALE * random.standard_normal(value.shape)
    session.restart()
    session.load_adapter(adapter)
    eager.load_adapter(adapter)
    theirs: dict[str, np.ndarray] = {}

    def keep(pair: Any, ga: torch.Tensor, gb: torch.Tensor) -> None:
        theirs[pair.a_name], theirs[pair.b_name] = ga.double().numpy(), gb.double().numpy()

    eager.updates.apply = keep
    eager.step(ids, labels, 0, 0.0)
    ours = session.gradients(ids, labels)
    least = 1e-4 * max(float(np.linalg.norm(value)) for value in theirs.values())
    return max(
        float(np.linalg.norm(ours[name] - value)) / max(float(np.linalg.norm(value)), least)
        for name, value in theirs.items()
    )
