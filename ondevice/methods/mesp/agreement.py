"""How a program's gradients and steps agree with automatic differentiation in eager PyTorch: over
the same weights, and over the float32 ones that its own were rounded from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.program import Agreement, BuiltProgram
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.methods.mesp.torch.reference import reference_session

if TYPE_CHECKING:
    import torch

    from ondevice.artifact.adapter import Adapter
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.session import MespSession

Gradients = dict[str, np.ndarray]
"""float64, by PEFT's names of A and B."""
PROBE_SCALE = 0.02
"""Of the B matrices at which gradients are compared: at zero, those of A are zero."""
ROUGH_COSINE = 0.9
"""Below it, an export warns that the rounded model is another one."""


def compare(
    session: ProgramSession, built: BuiltProgram, batches: Iterable[Batch], learning_rate: float
) -> Agreement:
    """Gradients at an adapter that is not zero, against autograd's; then the steps from the
    beginning.

    Values: `max_rel_gradient_error`, the largest relative error ||ours - theirs|| / ||theirs|| of a
    tensor's gradient; the cosines of `cosines`; `max_rel_loss_error` over the steps, each side
    following its own updates; `max_abs_adapter_error` after them.
    """
    batches = list(batches)
    start = session.state()
    ours, theirs = both_gradients(session, eager_session(session, built), built, *batches[0])
    gradient = relative_error(ours, theirs)
    session.load_state(start)
    eager = eager_session(session, built)
    losses = [0.0]
    for number, (ids, labels) in enumerate(batches):
        ours_loss, their_loss = (
            side.step(ids, labels, number, learning_rate).loss for side in (session, eager)
        )
        losses.append(abs(ours_loss - their_loss) / abs(their_loss))
    adapter = session.adapter()
    expected = eager.adapter()
    assert adapter is not None  # noqa: S101 - the program has one
    errors = [
        float(np.abs(adapter.tensors[name] - value).max())
        for name, value in expected.tensors.items()
    ]
    values: dict[str, Any] = {
        "steps": len(batches),
        "max_rel_gradient_error": gradient,
        **cosines(ours, theirs),
        "max_rel_loss_error": float(np.max(losses)),
        "max_abs_adapter_error": float(np.max(errors)),
    }
    largest = {"gradient": gradient, "loss_free": values["max_rel_loss_error"]}
    return Agreement(values, largest, {"gradient_cosine": values["gradient_cosine"]})


def rounding(
    session: ProgramSession,
    float32: BuiltProgram,
    config: MespConfig,
    batches: Callable[[int], Iterable[Batch]],
) -> tuple[dict[str, Any], list[str]]:
    """Cosines of the program's gradients with those of the float32 model, as `cosines` with
    `_float32`."""
    batch = next(iter(batches(1)))
    ours, theirs = both_gradients(session, eager_session(session, float32), float32, *batch)
    values = {f"{name}_float32": value for name, value in cosines(ours, theirs).items()}
    cosine = values["gradient_cosine_float32"]
    warnings = []
    if not cosine >= ROUGH_COSINE:
        warnings.append(
            f"the gradient's cosine with float32's is {cosine:.2f}: these weights are another "
            "model's; --quantize int8 rounds less"
        )
    return values, warnings


def eager_session(session: ProgramSession, built: BuiltProgram) -> MespSession:
    """Open a session of the same steps by automatic differentiation, from the same start."""
    config: MespConfig = built.eager.config
    autodiff = config.model_copy(update={"micro_batch_size": None, "bits": None})
    return reference_session(built.loaded, autodiff, session.seed, "cpu")


def probe(session: Any, scale: float = PROBE_SCALE) -> Adapter:
    """Return a session's adapter with random B, always the same."""
    adapter = session.adapter()
    random = np.random.default_rng(0)
    for name, value in adapter.tensors.items():
        if ".lora_B." in name:
            value[:] = scale * random.standard_normal(value.shape)
    return adapter


def both_gradients(
    session: ProgramSession,
    eager: MespSession,
    built: BuiltProgram,
    ids: np.ndarray,
    labels: np.ndarray,
) -> tuple[Gradients, Gradients]:
    """Return the program's and `eager`'s gradients, at random B; both sessions are somewhere else
    afterwards."""
    adapter = probe(eager)
    session.load_adapter(adapter)
    eager.load_adapter(adapter)
    theirs: Gradients = {}

    def keep(parameters: Any, ga: torch.Tensor, gb: torch.Tensor) -> None:
        theirs[parameters.a_name], theirs[parameters.b_name] = (
            ga.double().numpy(),
            gb.double().numpy(),
        )

    eager.optimizer.apply = keep
    eager.step(ids, labels, 0, 0.0)
    return program_gradients(session, built, ids, labels), theirs


def program_gradients(
    session: ProgramSession, built: BuiltProgram, ids: np.ndarray, labels: np.ndarray
) -> Gradients:
    """Compute a step's gradients at the session's adapter, read from what the step changes.

    SGD at rate 1 leaves the adapter less its gradient; AdamW's first moment after one step is the
    gradient times 1 - beta1.
    """
    program = built.eager
    config = program.config
    before = session.state()
    fresh = {name: np.zeros_like(before[name]) for name in (*program.moments, OPTIMIZER_STEP)}
    session.load_state(before | fresh)
    session.step(ids, labels, 0, 0.0 if program.moments else 1.0)
    after = session.state()
    if program.moments:
        flat = after["exp_avg"].astype(np.float64) / (1.0 - config.beta1)
    else:
        flat = before["adapter"].astype(np.float64) * (1.0 - config.weight_decay) - after["adapter"]
    return program.layout.to_tensors(flat)


def relative_error(ours: Gradients, theirs: Gradients) -> float:
    """Return the largest ||ours - theirs|| / ||theirs|| of a tensor; a norm counts as 1e-4 of the
    largest at least."""
    least = 1e-4 * max(float(np.linalg.norm(value)) for value in theirs.values())
    return max(
        float(np.linalg.norm(ours[name] - value)) / max(float(np.linalg.norm(value)), least)
        for name, value in theirs.items()
    )


def cosines(ours: Gradients, theirs: Gradients) -> dict[str, float]:
    """Return `gradient_cosine` of all as one vector, `min_gradient_cosine` and
    `median_gradient_cosine` of tensors.

    A tensor whose gradient is zero on both sides has cosine 1, on one side 0.
    """
    each = [_cosine(ours[name].ravel(), value.ravel()) for name, value in theirs.items()]
    whole = (np.concatenate([side[name].ravel() for name in theirs]) for side in (ours, theirs))
    return {
        "gradient_cosine": _cosine(*whole),
        "min_gradient_cosine": float(np.min(each)),
        "median_gradient_cosine": float(np.median(each)),
    }


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms else float(np.array_equal(a, b))
