"""The methods that `lsp.quality` compares, each on its own copy of the base model, and its loss on
answer tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.galore import GaloreAdamW
from benchmarks.lsp.adamw import LspAdamW
from benchmarks.tasks import LENGTHS
from ondevice.data import IGNORE, Batch
from ondevice.methods.lsp.config import ProjectorConfig, checks_bias
from ondevice.methods.lsp.fit import relative_bias
from ondevice.methods.lsp.linear import is_linear
from ondevice.methods.lsp.matrix import Matrix
from ondevice.models import LoadedModel

ALPHAS = {"galore": 0.25, "galore-4": 4.0}
"""Of GaLore's projected update: what its paper pre-trains with, and what it fine-tunes on GLUE
with."""
METHODS = ("full", "lsp", "lsp-random", *ALPHAS, "lora")
NEVER = 1 << 30


class Trained:
    """A copy of the base model on a device; an `Evaluator` for `evaluate_dataset`.

    Args:
        half: compute in bfloat16 (autocast); weights and losses stay float32.
    """

    eval_batch_size: int | None = None
    lengths_tokens: tuple[int, ...] | None = LENGTHS

    def __init__(self, loaded: LoadedModel, device: torch.device, half: bool) -> None:
        self.model: Any = copy.deepcopy(loaded.model).to(device)  # pyright: ignore[reportArgumentType]
        self.family = type(loaded.family)(self.model)
        self.device, self.half = device, half
        layers = [self.family.layer(i) for i in range(loaded.dims.layers)]
        names = {id(module): name for name, module in self.model.named_modules()}
        self.linears = {
            names[id(m)]: m for layer in layers for m in layer.modules() if is_linear(m)
        }

    def loss(self, batch: Batch) -> Tensor:
        """Mean negative log likelihood of the batch's labelled tokens, nats."""
        return self._nll(batch.ids, batch.labels)[0].mean()

    @torch.no_grad()
    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's negative log likelihood over labelled tokens, and their count."""
        nll, rows = self._nll(ids, labels)
        return np.bincount(rows, nll.cpu().numpy(), len(ids)), np.bincount(rows, minlength=len(ids))

    def _nll(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Of every labelled token, float32 [N], and its row; only these tokens go through the
        output head."""
        rows, places = np.nonzero(labels[:, 1:] != IGNORE)
        flat = rows * ids.shape[1] + places
        tokens, chosen, targets = (
            torch.from_numpy(array).to(self.device)
            for array in (ids, flat, labels[rows, places + 1])
        )
        with self._autocast():
            hidden = self.family.hidden(tokens)
            logits = self.model.lm_head(hidden.flatten(0, 1).index_select(0, chosen))
        return cross_entropy(logits.float(), targets, reduction="none"), rows

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()


class Method(Protocol):
    """An optimizer of one run."""

    looked: bool
    """Return True if the last step looked at projectors or decomposed gradients."""

    def step(self, learning_rate: float) -> None:
        """One step with the gradients of the last backward pass, which are cleared."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """All its state but the gradients."""
        ...


class Adam:
    """torch's fused AdamW, without weight decay."""

    looked = False

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(list(parameters), lr=0.0, weight_decay=0.0, fused=True)

    def step(self, learning_rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[Tensor]:
        return (
            t for state in self.optimizer.state.values() for t in state.values() if t.numel() > 1
        )


class Galore(GaloreAdamW):
    """GaLore, and whether its last step decomposed gradients."""

    looked = False

    def step(self, learning_rate: float) -> None:
        self.looked = self.count % self.refresh == 0
        super().step(learning_rate)


class Lsp:
    """`LspAdamW`, and what its looks at the bias found.

    Attributes:
        looks: of every look the means over all matrices: step (from 0), before, after (the
            projectors that were kept count as they are), renewed (share of matrices), held_out
            (None until `held_out` was called).
    """

    def __init__(self, run: Trained, config: ProjectorConfig, seed: int) -> None:
        self.optimizer = LspAdamW(run.model, config, seed)
        self.config, self.looked, self.looks = config, False, list[dict[str, Any]]()
        self.matrices = [
            (p, matrix) for p, matrix, _, _ in self.optimizer.entries if matrix is not None
        ]
        if run.half:
            for module in self.optimizer.attached:
                _in_half(module)

    def step(self, learning_rate: float) -> None:
        self.looked = checks_bias(self.config, self.optimizer.count)
        self.optimizer.step(learning_rate)

    @torch.no_grad()
    def finish_look(self) -> bool:
        """After a backward pass that looked at matrices: look at those whose gradient autograd
        made, too, as `step` would, and add the figures to `looks`. False if there was no look."""
        if not checks_bias(self.config, self.optimizer.count):
            return False
        for p, matrix in self.matrices:
            if p.grad is not None:
                matrix.collect_whole(p.grad)
                p.grad = None
        checks = list(self.optimizer.bias_checks.values())
        if checks:
            self.looks.append({
                "step": self.optimizer.count,
                "before": float(np.mean([look.before for look in checks])),
                "after": float(np.mean([look.before if look.after is None else look.after for look in checks])),
                "renewed": float(np.mean([look.after is not None for look in checks])),
                "held_out": None,
            })  # fmt: skip
        return bool(checks)

    def held_out(self, backward: Callable[[], None]) -> None:
        """Add to the last look the bias on the gradient of `backward`, of other data; gradients
        stay as they are."""
        checks: list[float] = []

        @torch.no_grad()
        def look(matrix: Matrix, gradient: Tensor) -> None:
            checks.append(relative_bias(matrix.left, matrix.right, gradient))

        kept = [(p, p.grad) for p, _, _, _ in self.optimizer.entries]
        sums = [(matrix, matrix.gradient) for _, matrix in self.matrices]
        for matrix, gradient in sums:
            matrix.watch, matrix.gradient = (
                look,
                None if gradient is None else torch.zeros_like(gradient),
            )
        for p, _ in kept:
            p.grad = None
        backward()
        for p, matrix in self.matrices:
            if p.grad is not None:
                look(matrix, p.grad)
            matrix.watch = None
        for p, gradient in kept:
            p.grad = gradient
        for matrix, gradient in sums:
            matrix.gradient = gradient
        self.looks[-1]["held_out"] = float(np.mean(checks))

    def tensors(self) -> Iterator[Tensor]:
        for _, matrix, m, v in self.optimizer.entries:
            yield from (m, v)
            for side in (matrix.left, matrix.right) if matrix is not None else ():
                yield from (t for t in (side.positions, side.values) if t is not None)
        groups = [matrix.group for _, matrix in self.matrices]
        yield from (t for group in groups for pair in group.known.values() for t in pair)
        yield from {id(t): t for group in groups for t in group.plane.memory.values()}.values()


def looks_every(name: str, otherwise: int) -> tuple[str, int]:
    """A method without its `@K`, and the steps between two looks at its projectors: K, or `never`
    after the first."""
    name, _, steps = name.partition("@")
    return name, NEVER if steps == "never" else int(steps or otherwise)


def open_method(
    name: str, run: Trained, seed: int, projectors: ProjectorConfig, rank: int, refresh: int
) -> Method:
    """Prepare the model of `run` for a method of METHODS.

    Args:
        projectors: of lsp (learned) and lsp-random (drawn), which may have other looks: `lsp@20`,
            `lsp@never`.
        rank: of GaLore and LoRA; `refresh`, steps between GaLore's decompositions.

    Raises:
        ValueError: an unknown method.
    """
    if name == "lora":
        import peft

        torch.manual_seed(seed)
        settings = peft.LoraConfig(
            r=rank, lora_alpha=rank, target_modules=list(run.linears), lora_dropout=0.0
        )
        peft.get_peft_model(run.model, settings)  # changes the linear layers in place
        return Adam(p for p in run.model.parameters() if p.requires_grad)
    run.model.requires_grad_(True)
    name, every = looks_every(name, projectors.check_every)
    if name == "full":
        return Adam(run.model.parameters())
    if name.startswith("lsp"):
        return Lsp(
            run,
            projectors.model_copy(update={"learned": name == "lsp", "check_every": every}),
            seed,
        )
    if name in ALPHAS:
        weights: Any = [module.weight for module in run.linears.values()]
        chosen = {id(weight) for weight in weights}
        others = [p for p in run.model.parameters() if id(p) not in chosen]
        return Galore(weights, others, rank, refresh, ALPHAS[name])
    raise ValueError(f"unknown method: expected one of {', '.join(METHODS)}, received {name}")


def gradient_bytes(run: Trained, method: Method) -> int:
    """Bytes of the gradients that are there between a backward pass and a step."""
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if isinstance(method, Lsp):
        gradients += [
            matrix.gradient for _, matrix in method.matrices if matrix.gradient is not None
        ]
    return nbytes(gradients)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors, each memory once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _in_half(module: nn.Module) -> None:
    """Let a layer that `LspAdamW` attached compute in bfloat16: its function knows nothing of
    autocast, and its backward pass multiplies tokens, gradients and weights, which must be of one
    dtype."""
    forward: Any = module.forward
    layer: Any = module
    function, (_, matrix, rows_first) = forward.func, forward.args

    def run(x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.bfloat16()
        cast = SimpleNamespace(weight=layer.weight.detach().bfloat16(), bias=bias)
        return function(cast, matrix, rows_first, x.bfloat16())

    layer.forward = run
