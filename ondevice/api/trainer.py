"""Trainers of transformers and TRL over a model that is larger than the GPU.

from ondevice.api.trainer import offloaded
trainer = offloaded(SFTTrainer)(model=model, args=args, train_dataset=rows)
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from ondevice.api.offload import offload

T = TypeVar("T", bound=type)


def offloaded(trainer: T, **settings: Any) -> T:
    """Return a subclass of a trainer that keeps the model and AdamW's states on the host.

    Args:
        trainer: `transformers.Trainer` or a subclass, such as TRL's for SFT, DPO and GRPO.
        settings: of `ondevice.offload`, which override the trainer's arguments.
    """

    class OffloadedTrainer(_Offloads, trainer):  # type: ignore[misc]
        offload_settings = settings

    OffloadedTrainer.__name__ = f"Offloaded{trainer.__name__}"
    return OffloadedTrainer  # type: ignore[return-value]


class _Offloads:
    """What a trainer leaves to the engine: placing, updating, clipping and saving the model."""

    offload_settings: dict[str, Any]
    model: Any
    args: Any
    optimizer: Any
    processing_class: Any
    accelerator: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        args = self.args
        self.optimizer = self.offload.optimizer
        args.max_grad_norm = 0.0  # the engine clips

    @cached_property
    def offload(self) -> Any:
        """The engine, with the trainer's settings; the model's values move into it."""
        args = self.args
        if getattr(args, "gradient_checkpointing", False):
            self.model.gradient_checkpointing_disable()  # every block is computed again as it is
        names = {name for name, _ in self.model.named_parameters()}
        decaying = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        values = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            "undecayed": names - decaying,
            "max_grad_norm": args.max_grad_norm or None,
            "device": str(args.device),
        }
        return offload(self.model, **values | self.offload_settings)

    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Any:
        """Let DPO's model be its own reference before it trains: already by the engine."""
        _ = self.offload
        return super()._precompute_ref_logps(*arguments, **named)  # type: ignore[misc]

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Let all batches but the last of a step only add their gradients."""
        self.offload.accumulates = not self.accelerator.sync_gradients
        return super().training_step(*arguments, **named)  # type: ignore[misc]

    def _get_grad_norm(self, *arguments: Any, **named: Any) -> float | None:
        """Return the engine's: the model's own gradients have left."""
        return self.offload.grad_norm()

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model on the host."""

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        """Return the engine's."""
        self.optimizer = self.offload.optimizer
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the trained model, its tokenizer and the arguments."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.offload.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: the optimizer's state has the weights."""
