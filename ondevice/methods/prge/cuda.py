"""P-RGE on CUDA: noise and update in one fused kernel each, and the step as a CUDA graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ondevice.methods.prge.step import CopiesOf, PrgeProgram


def _kernels() -> Any:
    """Return Triton's kernels; the package is on machines with a GPU."""
    from ondevice.runtime_ops import triton_ops

    return triton_ops


class CudaPrgeProgram(PrgeProgram):
    """All copies of the flat adapter are made by one kernel, in the model's precision; z is never
    stored."""

    def perturbed(
        self, adapter_P: Tensor, seed: Tensor, step: Tensor, scale: Tensor | float | None = None
    ) -> CopiesOf:
        if self.config.subspace == "gradient":  # few numbers, and R is multiplied by C in float32
            return super().perturbed(adapter_P, seed, step, scale)
        config = self.config
        epsilon = self.config.perturbation_scale
        if scale is not None:
            epsilon = float(scale)
        flat = adapter_P[: self.layout.size]  # without Adam's moments
        dtype = self.family.head_weight.dtype
        one_sided = config.estimator == "one_sided"
        copies_GP = _kernels().perturb(
            flat, seed, step, config.queries, epsilon, config.noise, dtype, one_sided
        )
        return lambda start, count: copies_GP[:, start : start + count]

    def apply_update(self, adapter_P: Tensor, gradients_Q: Tensor, *scalars: Tensor) -> Tensor:
        if self.config.optimizer == "adam":  # a few numbers: plain operations will do
            return super().apply_update(adapter_P, gradients_Q, *scalars)
        seed, step, learning_rate = scalars
        coefficients = gradients_Q * (learning_rate / self.config.queries)
        return _kernels().apply_update(adapter_P, seed, step, coefficients, self.config.noise)


@cache
def _warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs of a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


class GraphedStep:
    """The whole step captured once and replayed: launch gaps vanish, shapes are fixed. On a CPU it
    runs as it is.

    Args:
        program: with loss tiles and labels that need no data-dependent shape (`token_loss` of fixed
            shape).
        ids_BT, labels_BT: an example batch on the device, int64 [batch, tokens].
        adapter_P: the state, updated in place by every replay.
        pool: memory that other graphs of which only one runs at a time use too.
    """

    def __init__(
        self,
        program: PrgeProgram,
        ids_BT: Tensor,
        labels_BT: Tensor,
        adapter_P: Tensor,
        seed: int,
        pool: Any = None,
    ) -> None:
        device = adapter_P.device
        self.ids = ids_BT.clone()
        self.labels = labels_BT.clone()
        self.adapter = adapter_P
        self.seed = torch.tensor([seed], device=device)
        self.step_number = torch.zeros(1, dtype=torch.int64, device=device)
        self.learning_rate = torch.zeros(1, device=device)
        self.program = program
        if device.type != "cuda":
            self.replay = self._step
            return
        stream = _warm_up_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()  # the graph's own comes from its pool, and stays there for its replays
        with torch.cuda.graph(graph, pool=pool):
            self._step()
        self.replay = graph.replay
        torch._C._cuda_clearCublasWorkspaces()  # else each stream keeps one of 32 MB, and each graph another

    def _run(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.program.train_step(
            self.ids, self.labels, self.adapter, self.seed, self.step_number, self.learning_rate
        )

    def _step(self) -> None:
        self.losses, self.gradients, new = self._run()
        self.adapter.copy_(new)

    def __call__(
        self, ids_BT: Tensor, labels_BT: Tensor, step: int, learning_rate: float
    ) -> tuple[Tensor, Tensor]:
        """Losses [copies] and projected gradients [q] of this step; they are overwritten by the
        next."""
        self.ids.copy_(ids_BT, non_blocking=True)
        self.labels.copy_(labels_BT, non_blocking=True)
        self.step_number.fill_(step)
        self.learning_rate.fill_(learning_rate)
        self.replay()
        return self.losses, self.gradients
