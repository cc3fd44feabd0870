"""MeZO in eager PyTorch: perturb, run, perturb back, run, restore, update; the noise is never
stored.

In half precision the parameters are restored from a copy, and an update is rounded by chance, so
that steps below their last bit are kept on average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.session import PackingSession, StepResult
from ondevice.methods import model_loss
from ondevice.models.save import save_loaded
from ondevice.nn.rounding import stochastic_round
from ondevice.runtime_ops import torch_ops
from ondevice.runtime_ops.generator import stream_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ondevice.methods.mezo.config import MezoConfig
    from ondevice.models import LoadedModel

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements perturbed at once: bounds the noise that exists."""


class MezoSession(model_loss.PlainEvaluation, PackingSession):
    """All parameters move in place; each parameter is one tensor of the generator, in the order of
    their names."""

    def __init__(self, loaded: LoadedModel, config: MezoConfig, seed: int) -> None:
        self.loaded = loaded
        self.config = config
        self.loss_tiles = config.loss_tiles
        self.answers = config.answers
        self.family = loaded.family
        self.device = loaded.family.head_weight.device
        self.backend = f"torch-{self.device.type}"
        self.generator_backend = torch_ops.generator_backend(self.device)
        self.noise = torch_ops.noise(config.noise)
        self.parameters = dict(sorted(loaded.model.named_parameters()))
        self.seed = torch.tensor([seed], device=self.device)

    @torch.no_grad()
    def _move(
        self,
        step: int,
        query: int,
        scale: float,
        kept: list[Tensor] | None = None,
        by_chance: bool = False,
    ) -> None:
        """theta += scale * z(step, query), tensor by tensor and chunk by chunk (PerturbParameters).

        Args:
            kept: theta before; the parameters are then set to kept + scale * z instead, rounded
                once.
            by_chance: round 16-bit parameters up or down by chance, a function of seed, step,
                query and element.
        """
        # One query is one step of the generator's stream: a query's noise is asked for without the
        # others'.
        number = torch.tensor([step * self.config.queries + query], device=self.device)
        chunk = CHUNK[self.device.type]
        seed = int(self.seed)
        for tensor, parameter in enumerate(self.parameters.values()):
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), chunk):
                count = min(chunk, flat.numel() - start)
                z = self.noise(self.seed, number, tensor, 1, start, count)[0]
                if by_chance and flat.dtype != torch.float32:
                    key = stream_key(seed, int(number), 1 + start // chunk, tensor)
                    stochastic_round(
                        flat[start : start + count],
                        flat[start : start + count].float() + z * scale,
                        key,
                    )
                elif kept is None:
                    flat[start : start + count] += (z * scale).to(flat.dtype)
                else:
                    base = kept[tensor].view(-1)[start : start + count]
                    flat[start : start + count] = (base.float() + z * scale).to(flat.dtype)

    @torch.no_grad()
    def _copy(self) -> list[Tensor] | None:
        """Copy parameters of half precision: there, across and back along the noise, each time
        rounded, would leave them elsewhere even at learning rate 0. In float32 the way back ends
        where it began, but for some 1e-8."""
        if all(parameter.dtype == torch.float32 for parameter in self.parameters.values()):
            return None
        return [parameter.detach().clone() for parameter in self.parameters.values()]

    @torch.no_grad()
    def _loss(
        self, ids_BT: Tensor, labels_BT: Tensor, position_ids_BT: Tensor | None = None
    ) -> float:
        settings = self.config.loss_tiles, self.config.answers
        nll, count = model_loss.row_nll(self.family, ids_BT, labels_BT, *settings, position_ids_BT)
        return float(nll.sum() / count.sum())

    def step_placed(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run algorithm 2 with q queries; see `PackingSession`.

        Raises:
            ConfigError: `fresh_batches`, and the step has fewer rows than queries.
        """
        arrays = (array for array in (ids, labels, position_ids) if array is not None)
        return self._two_sided(self._losses_of(*arrays), step, learning_rate)

    def _losses_of(self, *arrays: np.ndarray) -> Callable[[int], float]:
        """Return the loss of a query's rows by its number: all, or its share of them."""
        self.config.check_rows(len(arrays[0]))
        parts = self.config.queries if self.config.fresh_batches else 1
        each = []
        for rows in zip(*(np.array_split(array, parts) for array in arrays), strict=True):
            each.append(
                [torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for array in rows]
            )
        return lambda query: self._loss(*each[query % parts])

    def _two_sided(
        self, loss: Callable[[int], float], step: int, learning_rate: float
    ) -> StepResult:
        """Move there and back along each query's noise, take the losses, and apply the update."""
        epsilon = self.config.perturbation_scale
        plus = []
        minus = []
        kept = self._copy()
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        for query in range(self.config.queries):
            # In float32 the noise is drawn three times, there, across and back, and no copy is
            # needed.
            self._move(step, query, epsilon, kept)
            plus.append(loss(query))
            self._move(step, query, -2 * epsilon if kept is None else -epsilon, kept)
            minus.append(loss(query))
            if kept is None:
                self._move(step, query, epsilon)
            else:
                with torch.no_grad():
                    for parameter, value in zip(parameters, kept, strict=True):
                        parameter.copy_(value)
        gradients = [
            float(np.float32((p - m) / (2 * epsilon))) for p, m in zip(plus, minus, strict=True)
        ]
        self.apply_update(tuple(gradients), step, learning_rate)
        losses = (*plus, *minus)
        return StepResult(sum(losses) / len(losses), losses, tuple(gradients))

    def score_step(self, score: Callable[[], float], step: int, learning_rate: float) -> StepResult:
        """Run algorithm 2 on a score in place of the loss; see `Scoring.score_step`."""
        return self._two_sided(lambda query: 1.0 - score(), step, learning_rate)

    def whole_model(self) -> LoadedModel:
        """Return the model, whose parameters are trained."""
        return self.loaded

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply theta -= eta / q * g_i z_i for every query."""
        for query, gradient in enumerate(projected_gradients):
            self._move(step, query, -learning_rate / self.config.queries * gradient, by_chance=True)

    def state(self) -> dict[str, np.ndarray]:
        """Return all parameters, in float32 (exact for narrower types), and the seed."""
        tensors = {
            name: value.detach().float().cpu().numpy() for name, value in self.parameters.items()
        }
        return {**tensors, "seed": self.seed.cpu().numpy()}

    @torch.no_grad()
    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave."""
        model_loss.load_parameters(self.parameters, state)
        self.seed = torch.from_numpy(state["seed"].copy()).to(self.device)

    def save_model(self, folder: Path) -> None:
        """Write the trained model as transformers loads it, with its tokenizer."""
        save_loaded(self.loaded, folder)


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> MezoSession:
    """Open a session; the model is computed on its own device."""
    return MezoSession(loaded, config, seed)
