"""Row losses and parameters of a whole model, for methods that keep the model's own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import CheckpointError
from ondevice.core.session import IGNORE
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.save import save_loaded
from ondevice.nn.cross_entropy import label_columns, shift

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.models import Family


def method_token_nll(
    family: Family, hidden_ND: Tensor, labels_N: Tensor, tiles: int, answers: Sequence[int] = ()
) -> Tensor:
    """Return the loss of a method's settings, float32 [N]; backpropagates into the head if it is
    trained.

    Over the answers if every label is one of them, as in a task's rows; else over the vocabulary:
    rows of another kind may be evaluated too.
    """
    if answers:
        index_A = torch.tensor(tuple(answers), device=labels_N.device)
        places_N = label_columns(labels_N, index_A)
        if bool(((places_N != IGNORE) == (labels_N != IGNORE)).all()):
            return family.answer_nll(hidden_ND, places_N, index_A)
    return family.token_nll(hidden_ND, labels_N, tiles)


def row_nll(
    family: Family,
    ids_RT: Tensor,
    labels_RT: Tensor,
    tiles: int,
    answers: tuple[int, ...] = (),
    position_ids_RT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return negative log likelihood of each row's labelled tokens and their count, float32 [rows]
    each; among only `answers` if there are any. With `position_ids_RT` a row is a sequence of
    several."""
    return evaluate_hidden(
        family,
        ids_RT,
        labels_RT,
        lambda h, y: method_token_nll(family, h, y, tiles, answers),
        position_ids_RT,
    )


def evaluate_hidden(
    family: Family,
    ids_RT: Tensor,
    labels_RT: Tensor,
    token_loss: Callable[[Tensor, Tensor], Tensor],
    position_ids_RT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `row_nll` with any loss of hidden states and labels, such as one of fixed shapes."""
    return hidden_nll(family.hidden(ids_RT, position_ids=position_ids_RT), labels_RT, token_loss)


def hidden_nll(
    hidden_RTD: Tensor, labels_RT: Tensor, token_loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what `evaluate_hidden` does, of hidden states [rows, T, hidden]."""
    rows = labels_RT.shape[0]
    hidden_ND, labels_N = shift(hidden_RTD, labels_RT)
    nll = token_loss(hidden_ND, labels_N).reshape(rows, -1).sum(1)
    return nll, (labels_N >= 0).reshape(rows, -1).to(torch.float32).sum(1)


def nll_in_parts(
    evaluate: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    ids: np.ndarray,
    labels: np.ndarray,
    rows: int,
) -> np.ndarray:
    """Return each row's negative log likelihood, float64 [B], computed so many rows at once."""
    parts = range(0, len(ids), rows)
    found = [evaluate(ids[i : i + rows], labels[i : i + rows])[0] for i in parts]
    return np.concatenate(found).astype(np.float64)


class BranchedEvaluation:
    """`Branching` of a session that computes the hidden states of all tokens at once."""

    family: Family

    def branched_hidden(self, ids: Tensor, position_ids: Tensor, branches: Tensor) -> Tensor:
        """Return the final norm's output [B, T, hidden] of prompts with their continuations."""
        raise NotImplementedError

    def labels_nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Return each label's negative log likelihood from the hidden state before it, [N]."""
        raise NotImplementedError

    def takes_branches(self, length_tokens: int) -> bool:
        """Return whether the model's sequences can branch; see `Branching.takes_branches`."""
        return self.family.takes_branches(length_tokens)

    @torch.inference_mode()
    def evaluate_branches(
        self,
        ids: np.ndarray,
        position_ids: np.ndarray,
        branches: np.ndarray,
        sources: np.ndarray,
        labels: np.ndarray,
    ) -> np.ndarray:
        """Compute the labels' losses; see `Branching.evaluate_branches`."""
        device = self.family.head_weight.device
        arrays = (ids, position_ids, branches, sources, labels)
        *tree, sources_N, labels_N = (torch.from_numpy(part).to(device) for part in arrays)
        hidden_ND = self.branched_hidden(*tree).flatten(0, 1)[sources_N]
        return self.labels_nll(hidden_ND, labels_N).float().cpu().numpy()


class PlainEvaluation(BranchedEvaluation):
    """The evaluation of a model with its own layers: `Session.evaluate`, and `Branching`."""

    loss_tiles: int
    answers: tuple[int, ...] = ()
    """The tokens that the loss is over; all of the vocabulary if empty."""

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        device = self.family.head_weight.device
        with torch.inference_mode():
            tokens = torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)
            nll, count = row_nll(self.family, *tokens, self.loss_tiles, self.answers)
        return nll.float().cpu().numpy(), count.cpu().numpy().astype(np.int64)

    def branched_hidden(self, ids: Tensor, position_ids: Tensor, branches: Tensor) -> Tensor:
        """Compute the model's own; see `BranchedEvaluation`."""
        return self.family.branched_hidden(ids, position_ids, branches)

    def labels_nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Compute the loss of the settings; see `BranchedEvaluation`."""
        return method_token_nll(self.family, hidden_ND, labels_N, self.loss_tiles, self.answers)


@torch.no_grad()
def load_parameters(parameters: dict[str, Any], state: dict[str, np.ndarray]) -> None:
    """Copy arrays into parameters of the same names and shapes.

    Raises:
        CheckpointError: naming the first parameter that does not fit.
    """
    for name, parameter in parameters.items():
        value = state.get(name)
        if value is None or value.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"the checkpoint is not of this model: {name}",
                expected=list(parameter.shape),
                received=None if value is None else list(value.shape),
            )
        parameter.copy_(torch.from_numpy(value))


class ModelSession(PlainEvaluation):
    """A plain model that only evaluates."""

    batch_size: int | None = None
    eval_batch_size: int | None = None
    lengths_tokens: tuple[int, ...] | None = None

    def __init__(self, loaded: Any, tiles: int = 8) -> None:
        self.loaded = loaded
        self.family = loaded.family
        self.loss_tiles = tiles
        self.backend = f"torch-{loaded.family.head_weight.device.type}"

    def save_model(self, folder: Path) -> None:
        """Write the model as transformers loads it, with its tokenizer."""
        with quiet_transformers():
            save_loaded(self.loaded, folder)
