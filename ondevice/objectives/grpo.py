"""Group relative policy optimisation (Shao et al., arXiv 2402.03300), with a ratio for each answer.

The paper's ratio is a token's. That of an answer, the mean over its tokens as in GSPO (Zheng et
al., arXiv 2507.18071, equation 7), is a function of the answer's log likelihood, as every objective
here is. Both have the same gradient in the first update of a step, in which they are 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ondevice.objectives.base import Graded

_SMALLEST = 1e-4
"""Added to a group's deviation, as in TRL: a group of equal rewards has no advantage."""
_LARGEST = 60.0
"""A mean log ratio is at most this, so that no exponential overflows."""


@dataclass(frozen=True)
class Answers:
    """n sampled answers; those of one prompt are next to each other.

    Attributes:
        log_likelihoods: by the model as it is, float64 [n], nats, summed over the answer.
        old: by the model that sampled them.
        reference: by the model before training; None without a KL term.
        tokens: of each answer, int64 [n].
        rewards: float64 [n].
        size: answers of a prompt.
    """

    log_likelihoods: np.ndarray
    old: np.ndarray
    reference: np.ndarray | None
    tokens: np.ndarray
    rewards: np.ndarray
    size: int

    @property
    def advantages(self) -> np.ndarray:
        """Return how much better each answer is than its group's mean, in deviations, float64 [n]."""
        groups = self.rewards.reshape(-1, self.size)
        centred = groups - groups.mean(1, keepdims=True)
        return (centred / (groups.std(1, keepdims=True) + _SMALLEST)).reshape(-1)


@dataclass(frozen=True)
class Grpo:
    """-min(r A, clip(r, 1 - clip, 1 + clip) A) + beta KL, the mean over the answers.

    r is the exponential of the mean log ratio of an answer's tokens to the model that sampled it, A
    its advantage. KL is exp(d) - d - 1 of the mean log ratio d of the reference to the model.

    Attributes:
        beta: strength of the KL term.
        clip: by how much a ratio may differ from 1 before it has no gradient.
    """

    beta: float = 0.04
    clip: float = 0.2

    def grade(self, answers: Answers) -> Graded:
        """Return loss, dL / d(log p) of each answer, float64 [n], and figures."""
        advantages = answers.advantages
        counts = np.maximum(answers.tokens, 1)
        count = len(advantages)
        change = (answers.log_likelihoods - answers.old) / counts
        ratios = np.exp(np.clip(change, -_LARGEST, _LARGEST))
        gains = ratios * advantages
        bounded = np.clip(ratios, 1 - self.clip, 1 + self.clip) * advantages
        is_clipped = bounded < gains
        loss = -np.minimum(gains, bounded)
        slopes = np.where(is_clipped, 0.0, -gains) / counts
        figures = {
            "reward": float(answers.rewards.mean()),
            "reward_deviation": float(answers.rewards.reshape(-1, answers.size).std(1).mean()),
            "clipped": float(is_clipped.mean()),
        }
        if answers.reference is not None:
            distance = (answers.reference - answers.log_likelihoods) / counts
            distance = np.clip(distance, -_LARGEST, _LARGEST)
            kl = np.exp(distance) - distance - 1
            loss = loss + self.beta * kl
            slopes = slopes + self.beta * (1 - np.exp(distance)) / counts
            figures["kl"] = float(kl.mean())
        return Graded(float(loss.mean()), slopes / count, figures)
