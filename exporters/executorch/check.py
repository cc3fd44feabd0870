"""Hold a program in the ExecuTorch runtime against the same program in eager PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ondevice.methods.prge.torch import PrgeProgram
    from ondevice.runtime.executorch import ExecutorchSession

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """Errors of the runtime against eager.

    Attributes:
        max_rel_loss_error: free-running: each side follows its own projected gradients.
        max_rel_loss_error_replayed: the runtime's projected gradients are fed to both sides.
        max_abs_adapter_error: of the adapter after the steps, replayed.
        max_abs_adapter_error_free: of the adapter after the steps, free-running.
        gradient_correlation: of the projected gradients at the same adapter (NaN below three directions).
    """

    steps: int
    max_rel_loss_error: float
    max_rel_loss_error_replayed: float
    max_abs_adapter_error: float
    max_abs_adapter_error_free: float
    gradient_correlation: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def random_batches(session: ExecutorchSession, vocabulary: int, steps: int, seed: int = 0) -> Iterable[Batch]:
    """Random token ids in every bucket, with some labels masked."""
    random = np.random.default_rng(seed)
    for step in range(steps):
        length = session.lengths_tokens[step % len(session.lengths_tokens)]
        ids = random.integers(0, vocabulary, (session.batch_size, length))
        labels = np.where(random.random(ids.shape) < 0.5, ids, -100)
        labels[:, -1] = ids[:, -1]
        yield ids, labels


def compare(
    session: ExecutorchSession, program: PrgeProgram, batches: Iterable[Batch], learning_rate: float
) -> Comparison:
    """Run both sides over `batches`, once free-running and once with the runtime's projected gradients."""
    seed = torch.tensor([session.seed])
    rate = torch.tensor([learning_rate], dtype=torch.float32)
    free = replayed = torch.from_numpy(session.flat().copy())
    free_error = replay_error = 0.0
    pairs: list[tuple[float, float]] = []
    steps = 0
    with torch.inference_mode():
        for number, (ids, labels) in enumerate(batches):
            step = torch.tensor([number])
            tokens = torch.from_numpy(ids), torch.from_numpy(labels)
            result = session.step(ids, labels, number, learning_rate)
            losses, gradients, free = program.train_step(*tokens, free, seed, step, rate)
            free_error = float(np.maximum(free_error, _relative(result.losses, losses)))  # NaN stays NaN
            if number:
                losses = program.losses(*tokens, program.perturbed(replayed, seed, step))
                gradients = program.projected_gradients(losses)
            replay_error = float(np.maximum(replay_error, _relative(result.losses, losses)))
            pairs += zip(result.projected_gradients, gradients.tolist(), strict=True)
            own = torch.tensor(result.projected_gradients, dtype=torch.float32)
            replayed = program.apply_update(replayed, own, seed, step, rate)
            steps += 1
    flat = session.flat()
    correlation = float(np.corrcoef(np.array(pairs).T)[0, 1]) if len(pairs) > 2 else float("nan")
    return Comparison(
        steps,
        free_error,
        replay_error,
        float(np.abs(flat - replayed.numpy()).max()),
        float(np.abs(flat - free.numpy()).max()),
        correlation,
    )


def gradient_correlation(session: ExecutorchSession, program: PrgeProgram, batches: Iterable[Batch]) -> float:
    """How the session's projected gradients correlate with those of `program` in eager, at the adapter zero.

    Args:
        program: of the same method and seed; it may be another model, such as the one before quantisation.
    """
    seed, zero = torch.tensor([session.seed]), torch.zeros(program.layout.size)
    session.load_state({"adapter": zero.numpy(), "seed": seed.numpy()})
    received, expected = [], []
    with torch.inference_mode():
        for number, (ids, labels) in enumerate(batches):
            received += session.step(ids, labels, number, 0.0).projected_gradients
            copies_of = program.perturbed(zero, seed, torch.tensor([number]))
            losses = program.losses(torch.from_numpy(ids), torch.from_numpy(labels), copies_of)
            expected += program.projected_gradients(losses).tolist()
    return float(np.corrcoef(received, expected)[0, 1])


def _relative(received: tuple[float, ...], expected: torch.Tensor) -> float:
    reference = expected.double().numpy()
    return float(np.max(np.abs(np.array(received) - reference) / np.maximum(np.abs(reference), 1e-12)))
