"""The engine under a loop of one's own: the model stays a PyTorch module, and its forward and
backward passes run through the window.

    engine = ondevice.offload(model, optimizer="adamw", lr=1e-5)
    loss = engine(batch)
    engine.backward(loss)
    engine.step()

Any loss of the model's outputs does, and `loss.backward()` is `engine.backward(loss)`. Updates begin
in the backward pass, with the learning rate that the optimizer's group has when the forward pass
begins; `clip="global"` clips by the norm of all gradients, as `clip_grad_norm_` does.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ondevice.core.errors import ConfigError, TrainingError
from ondevice.methods.slideformer.auto import presumed_within
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.units import Joined
from ondevice.offload.whole import WholePasses


class WholeModel(AnyDecoder):
    """A model of which any loss is taken, so that its head may compute anything."""

    @cached_property
    def head_is_plain(self) -> bool:
        """False, whatever its head is."""
        return False

    def __init__(self, model: Any, undecayed: frozenset[str] = frozenset()) -> None:
        super().__init__(model)
        learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        every = {name for name, _ in model.named_parameters()}
        self.undecayed = undecayed
        self.frozen = frozenset(every - learns if learns else ())


class Offloaded:
    """A model whose layers slide through the accelerator in a loop of one's own.

    Args:
        model: a decoder of transformers on the CPU; its values move into the engine until `close`.
            What requires no gradient stays as it is, unless nothing requires one.
        config: SlideFormer's; `auto` is as on a machine that is not known, but for
            `presumed_layers` within `host_memory_bytes`.
        device: `cpu`, `cuda` or `cuda:N`, where inputs have to be.
        undecayed: names of parameters that weight decay leaves alone.

    Attributes:
        model: the same module; outputs of `model(**inputs)` are for losses of one's own.
        optimizer: has the learning rate in `param_groups`, for PyTorch's schedulers.
        steps: optimizer steps so far.
        accumulates: the next backward pass only adds its gradients to those of the one after it.
    """

    def __init__(
        self,
        model: Any,
        config: SlideformerConfig,
        device: str,
        undecayed: frozenset[str] = frozenset(),
    ) -> None:
        self.model = model
        self.family = WholeModel(model, undecayed)
        every, of_layer = (
            sum(p.numel() for p in part.parameters()) for part in (model, self.family.layer(0))
        )
        presumed = presumed_within(config, every, of_layer, self.family.dims.layers)
        self.config = config.decided(presumed_layers=presumed).fixed()
        self.engine = OffloadEngine(self.family, self.config, device)
        passes = self.engine.passes
        assert isinstance(passes, WholePasses)  # noqa: S101  no family of its own was asked for
        self.passes = passes
        passes.starting = self._start_backward
        passes.ending = self._end_backward
        self.steps = 0
        self.phase = "forward"  # then backward, and step
        self.accumulates = False
        self.optimizer = OffloadedAdamW(self, config.learning_rate)
        self.own_forward = model.forward
        model.forward = self._forward

    def __call__(self, batch: Mapping[str, Any] | None = None, **inputs: Any) -> Any:
        """Return the model's loss on a batch with `labels`; without, its outputs."""
        outputs = self.model(**(batch or {}), **inputs)
        loss = getattr(outputs, "loss", None)
        if loss is None:
            return outputs
        return loss

    def backward(self, loss: Tensor, update: bool = True) -> None:
        """Differentiate; every layer's gradients leave, and its update begins.

        Args:
            update: False adds the gradients to those of the next backward pass, in float32 on the
                host: 4 bytes a parameter until then.
        """
        self.accumulates = not update
        self._check_resident()
        with self.engine.watch.whole("the step"):
            loss.backward()

    def step(self) -> None:
        """End an optimizer step, whose last updates run on while the next one begins.

        Raises:
            TrainingError: there was no backward pass since the last one.
        """
        if self.phase != "step":
            raise TrainingError(
                "a step without a backward pass", expected="forward, backward, step", received=self.phase
            )  # fmt: skip
        self.steps += 1
        self.phase = "forward"

    def _forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the model's own forward pass, for a backward pass if gradients are enabled."""
        ids = inputs.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise ConfigError(
                "the offloaded model computes token ids only", expected="input_ids [rows, tokens]",
                received=", ".join(inputs) or "nothing",
            )  # fmt: skip
        keep = torch.is_grad_enabled()
        self._check_phase(keep)
        engine = self.engine
        numbers = ids.detach().cpu().numpy()
        engine._open(keep)
        if keep:
            self.phase = "backward"
        parts = engine._micro_batches(numbers)
        caches = self.model.config.get_text_config()
        before = getattr(caches, "use_cache", None)
        if keep:
            caches.use_cache = False  # a block that is computed again would append to it twice
        try:
            with self.passes.running(numbers, parts, keep, numbers):
                outputs = self.own_forward(*arguments, **inputs)
        finally:
            caches.use_cache = before
        if keep:
            for unit in engine.store.resident.units:
                engine.updater.wait(unit)
        return outputs

    def _check_phase(self, keep: bool) -> None:
        """Refuse what would mix two passes."""
        if self.phase == "backward":
            gc.collect()
            if self.passes.graph() is None:
                self.phase = "forward"  # its outputs were dropped
        if self.phase == "backward":
            raise TrainingError(
                "a forward pass while another waits for its backward pass",
                expected="backward, or no reference to the outputs of the pass before",
                received="two forward passes",
                hint="put all rows into one batch; evaluate before the forward pass",
            )
        if keep and self.phase == "step":
            raise TrainingError(
                "a second backward pass before a step",
                expected="step() after each backward pass",
                received="gradient accumulation",
                hint="backward(loss, update=False) for all but the last batch of a step",
            )

    def _check_resident(self) -> None:
        if self.accumulates and self.config.optimizer == "muon":
            raise ConfigError(
                "Muon's updates are made on the accelerator, and do not add up",
                expected="all rows of a step in one batch, in parts of micro_batch_size",
                received="backward(loss, update=False)",
            )
        if self.accumulates and self.engine.store.resident.units:
            raise ConfigError(
                "gradients of resident units are not added to those of the next batch",
                expected="resident_layers: 0 and resident_tables: false",
                received=f"{len(self.engine.store.resident.units)} resident units",
            )

    def _start_backward(self) -> None:
        """Begin the updates, before the last layer's gradients leave.

        Raises:
            ConfigError: gradients of units that stay on the accelerator cannot wait.
        """
        self._check_resident()
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.engine.updater.clipping.begin(self.steps, rate, self.accumulates)

    def _end_backward(self) -> None:
        """Send the rest of the model; autograd calls it once all gradients are there."""
        engine = self.engine
        self.passes.send_others()
        engine.last = engine.transfers.submit("the end of the step", engine.updater.end_backward)
        self.phase = "forward" if self.accumulates else "step"

    def grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last backward pass, before clipping; None if no
        global norm is asked for, or gradients only add up."""
        clipping = self.engine.updater.clipping
        if not clipping.exact or self.accumulates or self.engine.last is None:
            return None
        self.engine.last.wait()
        return clipping.now.norm

    def flush(self) -> None:
        """Wait until all updates are done."""
        self.engine.flush()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained parameters by name, on the host, in the dtypes that they had."""
        self.flush()
        weights = self.engine.store.masters()
        return {
            name: weights[name].to(dtype, copy=True) for name, dtype in self.engine.dtypes.items()
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the trained model as transformers loads it."""
        weights = self.state_dict()
        names = {id(p): name for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            weights.setdefault(name, weights[names[id(p)]])
        self.model.save_pretrained(folder, state_dict=weights)

    def close(self) -> None:
        """Give the model its trained values and its own forward pass back; after a step that
        failed, only the threads end."""
        try:
            weights = self.state_dict()
        finally:
            self.engine.close()
            del self.model.forward
            if self.model.forward != self.own_forward:
                self.model.forward = self.own_forward
        for module in self.model.modules():  # the passes had taken them to the accelerator
            for name, value in module._buffers.items():
                module._buffers[name] = None if value is None else value.cpu()
        for name, parameter in self.model.named_parameters():
            parameter.grad = None
            parameter.data = weights[name]
            parameter.requires_grad_(name not in self.family.frozen)


class OffloadedAdamW(torch.optim.Optimizer):
    """What schedulers, loops and trainers expect of an optimizer; the engine updates."""

    def __init__(self, offloaded: Offloaded, learning_rate: float) -> None:
        self.offloaded = offloaded
        config = offloaded.config
        super().__init__(
            [nn.Parameter(torch.zeros(0))],
            {"lr": learning_rate, "betas": (config.beta1, config.beta2), "eps": config.eps,
             "weight_decay": config.weight_decay},
        )  # fmt: skip

    def step(self, closure: Any = None) -> None:
        """See `Offloaded.step`."""
        self.offloaded.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients leave, and none stays."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resume needs: masters, moments, norms and the learning rate."""
        offloaded = self.offloaded
        offloaded.flush()
        arrays = {name: value.clone() for name, value in offloaded.engine.store.arrays().items()}
        arrays |= offloaded.engine.updater.clipping.norms()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": arrays, "steps": offloaded.steps, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        offloaded = self.offloaded
        offloaded.flush()
        state = {name: _words(value) for name, value in state_dict["state"].items()}
        offloaded.engine.load(Joined(state))
        offloaded.steps = int(state_dict["steps"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)


def _words(tensor: Tensor) -> Any:
    """Return an array; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.cpu().numpy()
