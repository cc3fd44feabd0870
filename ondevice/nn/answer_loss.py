"""Cross-entropy over the words that a task's rows can be answered with, instead of the whole vocabulary.

A classifier by prompt asks which of some words comes next; that all other words are unlikely is nothing to learn. It
also needs as many rows of the head as there are answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ondevice.core.session import IGNORE


def answer_labels(labels_N: Tensor, answers_A: Tensor) -> Tensor:
    """Return each label's place among the answers, int64 [N]; -100 where it is none of them or -100."""
    same_NA = (labels_N[:, None] == answers_A[None]).to(torch.int64)
    place_N = (same_NA * torch.arange(answers_A.shape[0], device=labels_N.device)).sum(1)
    return torch.where(same_NA.sum(1) > 0, place_N, torch.full_like(place_N, IGNORE))


def answer_loss(
    weight_VD: Tensor, rows: Sequence[int], answers: Sequence[int] | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Build a loss of fixed shapes: hidden [N, D] and labels [N] to float32 [N], 0 where no answer is labelled.

    Args:
        weight_VD: the output head, or some rows of it.
        rows: of the answers in `weight_VD`.
        answers: their tokens, where those are not the rows.
    """
    index_A = torch.tensor(tuple(rows if answers is None else answers), device=weight_VD.device)
    weight_AD = weight_VD[list(rows)].detach().float()

    def nll(hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        places_N = answer_labels(labels_N, index_A.to(labels_N.device))
        active_N = places_N != IGNORE
        logits_NA = hidden_ND.float() @ weight_AD.t()
        safe_N = torch.where(active_N, places_N, torch.zeros_like(places_N))
        picked_N = logits_NA.gather(1, safe_N[:, None])[:, 0]
        top_N1 = logits_NA.amax(dim=-1, keepdim=True)
        total_N = (logits_NA - top_N1).exp().sum(dim=-1).log() + top_N1[:, 0]
        return torch.where(active_N, total_N - picked_N, torch.zeros_like(picked_N))

    return nll
