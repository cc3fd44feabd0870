"""`ondevice.offload`: a PyTorch loop of one's own, over a model that is larger than the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from ondevice.core.capabilities import DrivesLoops
from ondevice.core.errors import ConfigError
from ondevice.core.registry import method_config, methods
from ondevice.planning.devices import available_bytes

OPTIMIZERS = ("adamw", "muon")


def offload(
    model: Any, optimizer: Literal["adamw", "muon"] = "adamw", *, lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 0.0, undecayed: Iterable[str] = (), max_grad_norm: float | None = None,
    device: str | None = None, **settings: Any,
) -> Any:  # fmt: skip
    """Let a model train with its states on the host, in a loop of one's own.

    Args:
        model: a decoder of transformers, on the CPU, in the dtype of the computation.
        optimizer: `muon` updates the layers' matrices by Muon, and the rest by AdamW.
        lr, betas, eps, weight_decay: AdamW's; Muon's steps are as long, unless
            `muon_rate="original"`.
        undecayed: names of parameters that do not decay; `decayed="matrices"` names norms and
            biases.
        max_grad_norm: of all gradients, as `clip_grad_norm_` clips.
        device: the GPU if None, or the CPU without one.
        settings: of `slideformer`.

    Returns:
        The engine: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`;
        `engine.optimizer`, `engine.save_pretrained(folder)`, `engine.close()`.

    Raises:
        ConfigError: a setting that does not exist or does not fit.
        ModelError: the model's blocks cannot slide.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            "the optimizer of offload()", expected=", ".join(OPTIMIZERS), received=optimizer
        )
    computes = "float32" if next(model.parameters()).dtype == torch.float32 else "bfloat16"
    values = {
        "learning_rate": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay,
        "compute": computes, **settings,
    }  # fmt: skip
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where != "cpu":
        values.setdefault("host_memory_bytes", available_bytes())
    if optimizer == "muon":
        values["optimizer"] = "muon"
    if max_grad_norm:
        values |= {"max_grad_norm": max_grad_norm, "clip": settings.get("clip", "global")}
    spec, drives = next(
        (spec, found) for spec in methods() if (found := spec.capability(DrivesLoops))
    )
    config = method_config(spec.name, values)
    return drives.opener()(model, config, where, frozenset(undecayed))
