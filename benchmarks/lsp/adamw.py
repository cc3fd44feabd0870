"""LSP-Offload in memory, for any PyTorch model: `LspAdamW` next to a loop that calls `backward`.

It is what tests hold the engine against, which does the same with the subspace's moments on the
host, and what benchmarks train models with that the engine has no family for (RoBERTa with a
classification head).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ondevice.core.errors import ModelError
from ondevice.methods.lsp.config import ProjectorConfig
from ondevice.methods.lsp.linear import attach, detach, is_linear
from ondevice.methods.lsp.matrix import BiasCheck, Group, Matrix, Plane, carried
from ondevice.methods.lsp.projected import is_projected, numbered
from ondevice.offload.graphs import recorder
from ondevice.runtime_ops.layer_adam import AdamStep, torch_step


class LspAdamW:
    """AdamW in learned subspaces (LSP-Offload, Algorithm 2).

    Weights of linear layers never get a `.grad`. Of tables that are looked up in, of experts, and of
    weights that two modules share, autograd makes the gradient, and `step` projects it. Routers are
    trained as they are.

    Args:
        model: parameters that require a gradient are trained; floating point.
        config: of the projectors.
        seed: of their random numbers.
        beta1, beta2, eps, weight_decay: AdamW's.

    Attributes:
        bias_checks: the last one of every matrix, by parameter name.
        experts: by the number of a matrix that one of them has.
        sent: what becomes of the gradient of a parameter, or of its change, on its way to AdamW.

    Raises:
        ModelError: no parameter is trained.
    """

    def __init__(
        self, model: nn.Module, config: ProjectorConfig, seed: int = 0, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        self.config, self.count, self.bias_checks = config, 0, dict[str, BiasCheck]()
        self.adam = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ModelError(
                "no parameter of the model requires a gradient", expected="at least one"
            )
        self.sent: Callable[[nn.Parameter, Tensor], Tensor] = lambda parameter, gradient: gradient
        plane = Plane(recorder(next(iter(trained.values())).device))
        self.entries: list[tuple[nn.Parameter, Matrix | None, Tensor, Tensor]] = []
        matrices: dict[int, Matrix] = {}
        self.experts: dict[int, int] = {}
        numbers = {name: number for number, name in enumerate(trained)}
        routers = {
            id(module.weight)
            for module in model.modules()
            if hasattr(module, "top_k") and isinstance(getattr(module, "weight", None), Tensor)
        }
        for name, p in trained.items():
            experts: list[int | None] = [None]
            shape = tuple(p.shape)
            if len(shape) == 3 and shape[1] > 1 and is_projected(shape[1:], config.subspace):
                experts = list(range(shape[0]))
                shape = shape[1:]
            for e in experts:
                matrix = None
                if is_projected(shape, config.subspace) and id(p) not in routers:
                    own = name if e is None else f"{name}.{e}"
                    where = config, seed, Group(plane, p.device)
                    matrix = Matrix(own, (shape[0], shape[1]), numbered(name, numbers, e), *where)
                    matrix.gradient = torch.zeros(matrix.sizes, device=p.device)
                    if e is None:
                        matrices[id(p)] = matrix
                    else:
                        self.experts[matrix.number] = e
                sizes = shape if matrix is None else matrix.sizes
                m, v = (torch.zeros(sizes, device=p.device) for _ in range(2))
                self.entries.append((p, matrix, m, v))
        owners = [
            id(p)
            for module in model.modules()
            for p in module._parameters.values()
            if p is not None
        ]
        self.attached = [
            module for module in model.modules()
            if is_linear(module) and id(module.weight) in matrices and owners.count(id(module.weight)) == 1
        ]  # fmt: skip
        for module in self.attached:
            attach(module, matrices[id(module.weight)])
        self._watch()

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step with the gradients of the backward passes since the last one, which are
        cleared."""
        self.count += 1
        for p, matrix, m, v in self.entries:
            if p.grad is not None and matrix is not None:
                matrix.collect_whole(self._own(p.grad, matrix))
            gradient = p.grad if matrix is None else matrix.gradient
            if gradient is None:
                continue
            if matrix is None:
                adam = AdamStep(learning_rate, **self.adam, step=self.count)
                master = p.data.float()
                torch_step(master, self.sent(p, gradient).float(), m, v, adam)
                p.data.copy_(master)
            else:
                change = torch.zeros_like(m)
                settings = {**self.adam, "weight_decay": 0.0}
                adam = AdamStep(1.0, **settings, step=self.count)
                torch_step(change, self.sent(p, gradient), m, v, adam)
                decay = 1 - learning_rate * self.adam["weight_decay"]
                weight = self._own(p.data, matrix)
                matrix.effective(weight, (change * learning_rate).to(p.dtype), decay, weight)
                gradient.zero_()
        for p, *_ in self.entries:
            p.grad = None
        self._watch()

    def _own(self, values: Tensor, matrix: Matrix) -> Tensor:
        """Return a matrix's part of a parameter or gradient: all, or its expert's."""
        if matrix.number in self.experts:
            return values[self.experts[matrix.number]]
        return values

    def close(self) -> None:
        """Give the model's modules their own forward passes back."""
        for module in self.attached:
            detach(module)
            module.weight.requires_grad_(True)  # pyright: ignore[reportCallIssue]

    def _watch(self) -> None:
        """Before a step that is to check the bias, let every matrix do so at its first gradient."""
        moments: dict[int, tuple[Tensor, Tensor]] = {}

        @torch.no_grad()
        def check(matrix: Matrix, gradient: Tensor) -> None:
            if not gradient.any():  # no label in this micro-batch: the next one is checked
                matrix.watch = check
                return
            actual = self.bias_checks[matrix.name] = matrix.refresh(gradient)
            if actual.carry is not None:
                m, v = moments[matrix.number]
                for old, new in zip((m, v), carried(m, v, actual), strict=True):
                    old.copy_(new)

        for _, matrix, m, v in self.entries:
            if matrix is not None:
                due = matrix.checks(self.count)
                moments[matrix.number], matrix.watch = (m, v), check if due else None
