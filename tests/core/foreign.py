"""A training method in a package of its own, as somebody else would write it, and a distribution that offers it."""

from __future__ import annotations

from pathlib import Path

METHOD = '''
"""Head SGD: plain gradient descent on the final norm and the output head's bias-free scale."""

import numpy as np
import torch
from pydantic import Field
from typing import Annotated, Literal

from ondevice.core.config import StrictConfig
from ondevice.core.flags import Flag
from ondevice.core.method import MemoryModel, MethodSpec, StepCost
from ondevice.core.session import Session, StepResult
from ondevice.methods import model_loss
from ondevice.models.save import save_loaded


class NormSgdConfig(StrictConfig):
    """Gradient descent on the norms alone."""

    name: Literal["norm-sgd"] = "norm-sgd"
    learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate."""
    momentum: Annotated[float, Flag("--momentum")] = Field(default=0.0, ge=0, lt=1)
    """Momentum of the gradients."""


class NormSgdSession(Session):
    def __init__(self, loaded, config, seed, device=None):
        self.loaded, self.config, self.backend = loaded, config, "torch-cpu"
        for parameter in loaded.model.parameters():
            parameter.requires_grad_(False)
        self.parameters = {n: p.requires_grad_(True) for n, p in loaded.model.named_parameters() if "norm" in n}
        self.moments = {name: torch.zeros_like(value) for name, value in self.parameters.items()}

    def step(self, ids, labels, step, learning_rate):
        nll, count = model_loss.row_nll(self.loaded.family, torch.from_numpy(ids), torch.from_numpy(labels), 1)
        loss = nll.sum() / count.sum()
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(self.parameters.items(), gradients):
                self.moments[name].mul_(self.config.momentum).add_(gradient)
                parameter.sub_(learning_rate * self.moments[name])
        return StepResult(float(loss), (float(loss),))

    def evaluate(self, ids, labels):
        return model_loss.ModelSession(self.loaded, 1).evaluate(ids, labels)

    def state(self):
        tensors = {**self.parameters, **{"moment/" + name: value for name, value in self.moments.items()}}
        return {name: value.detach().numpy().copy() for name, value in tensors.items()}

    def load_state(self, state):
        model_loss.load_parameters(self.parameters, state)
        for name, moment in self.moments.items():
            moment.copy_(torch.from_numpy(np.array(state["moment/" + name])))

    def save_model(self, folder):
        save_loaded(self.loaded, folder)


MEMORY = MemoryModel(lambda dims, config, rows, length, item: {"activations": rows * length * dims.hidden * item})


def cost(dims, config, rows, length, weights):
    return StepCost(6.0 * rows * length * dims.matrices, 2 * weights)


METHOD = MethodSpec(
    name="norm-sgd", summary="gradient descent on the norms only", config=NormSgdConfig, trains="all", order="first",
    sessions={"torch": lambda: NormSgdSession}, memory=lambda: MEMORY, cost=lambda: cost,
)
'''


def install(
    folder: Path, entry: str, module: str, source: str, group: str = "ondevice.methods"
) -> Path:
    """Write the package and the distribution's metadata, as pip would leave them; gives the folder for PYTHONPATH."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(source)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n"
    )
    kind = "METHOD" if group.endswith("methods") else "TARGET"
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry} = {module}:{kind}\n")
    return folder
