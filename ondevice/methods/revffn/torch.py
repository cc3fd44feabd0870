"""The session of RevFFN: updates inside the backward pass, the two stages (section 3.3), the
trained model, and its folder opened again in the numbers that it was trained in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.capabilities import OpenedNetwork
from ondevice.core.errors import CheckpointError, ModelError
from ondevice.core.session import Session, StepResult, Weigh
from ondevice.core.untrusted import read_header, read_object, well_formed
from ondevice.methods.model_loss import BranchedEvaluation, ModelSession
from ondevice.methods.revffn.config import RevffnConfig, check_family
from ondevice.methods.revffn.export import save_reversible
from ondevice.methods.revffn.memory import kept_blocks
from ondevice.methods.revffn.passes import Passes
from ondevice.methods.revffn.reversible import Gradients, Reversible
from ondevice.methods.revffn.updates import Updates, clip_scale, squared_norm
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.load import load_tokenizer, wrap
from ondevice.models.registry import family_for
from ondevice.models.save import FILE_NAME, as_numpy
from ondevice.models.sources.resolve import SourceInfo
from ondevice.nn.cross_entropy import WeighedRows, token_nll
from ondevice.offload.device import memory_errors

if TYPE_CHECKING:
    from ondevice.models import LoadedModel

STEP_HINT = (
    "method.micro_batch_size: 1, a larger method.loss_tiles, method.optimizer: adafactor; `ondevice plan` lists what "
    "each part needs"
)
BITS = "fraction_bits"
"""The scale of int32 streams in a checkpoint: a resumed run keeps what its first start chose."""


class RevffnSession(BranchedEvaluation, Session):
    """Training of all parameters by a backward pass through reversible blocks; see `Session`."""

    def __init__(self, loaded: LoadedModel, config: RevffnConfig, seed: int) -> None:
        check_family(loaded.dims, config.coupling == "paper")
        self.loaded = loaded
        self.family = loaded.family
        self.config = config
        self.device = loaded.family.head_weight.device
        self.backend = f"torch-{self.device.type}"
        self.network = Reversible(loaded.family, config, seed=seed)
        self.passes = Passes(
            self.network,
            kept_blocks(config.recompute, loaded.dims.layers),
            config.micro_batch_size,
            config.loss_tiles,
        )
        self.adapters = self.network.adapters
        self.parameters: dict[str, Tensor] = dict(self.adapters)
        if not config.stage1_only:
            named = loaded.model.named_parameters()
            # Section 3.3: "MoE gating networks remain frozen".
            router = f".{loaded.dims.traits.path('mlp.gate')}."
            self.parameters |= {
                name: value for name, value in named if config.train_router or router not in name
            }
        self.updates = Updates(config, self.parameters, seed)
        self.active: dict[str, Any] | None = None

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step over all rows; see `Session.step`."""
        loss = float(self._trained(ids, labels, step, learning_rate, None))
        return StepResult(loss, (loss,))

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step on weighted rows; see `Weighing`."""
        weighed = WeighedRows(weigh)
        self._trained(ids, labels, step, learning_rate, weighed)
        return StepResult(weighed.loss, (weighed.loss,))

    def _trained(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        step: int,
        learning_rate: float,
        weighed: WeighedRows | None,
    ) -> Tensor:
        rate = self._begin(step, learning_rate)
        batch = self._batch(ids, labels)
        with memory_errors(f"a step of {ids.shape[0]} rows of {ids.shape[1]} tokens", self._hint()):
            return self._train(batch, weighed, step, rate)

    def _hint(self) -> str:
        """Say what a step that does not fit could keep instead, and do without."""
        kept = self.passes.kept
        if not kept:
            return STEP_HINT
        fewer = kept // 2 or "reversible"
        of = f"{kept} of {self.network.blocks} blocks are kept"
        return f"method.recompute: {fewer} ({of}), {STEP_HINT}"

    def gradients(
        self, ids: np.ndarray, labels: np.ndarray, step: int = 0
    ) -> tuple[float, Gradients]:
        """Return loss and gradients of step `step`, with nothing updated."""
        self._begin(step, 0.0)
        gradients: Gradients = {}
        return float(self.passes.run(*self._batch(ids, labels), gradients.update)), gradients

    def _train(
        self, batch: tuple[Tensor, Tensor], weighed: WeighedRows | None, step: int, rate: float
    ) -> Tensor:
        """One backward pass with updates inside; a norm of the whole gradient takes another pass
        before, or all gradients at once."""
        c = self.config
        run = partial(self.passes.run, weighed=weighed)
        global_clip = c.max_grad_norm is not None and c.clip == "global"
        if c.fused_update and not global_clip:
            return run(*batch, lambda unit: self._update(unit, step, rate))
        units: list[Gradients] = []
        squares: list[Tensor] = []

        def keep(unit: Gradients) -> None:
            squares.append(squared_norm(unit.values()))
            if not c.fused_update:
                units.append(unit)

        loss = run(*batch, keep)
        scale = None
        if global_clip:
            scale = clip_scale(torch.stack(squares).sum(), c.max_grad_norm or 0.0)
        if c.fused_update:
            return run(*batch, lambda unit: self._update(unit, step, rate, scale))
        for unit in units:
            self._update(unit, step, rate, scale)
        return loss

    def _update(self, unit: Gradients, step: int, rate: float, scale: Tensor | None = None) -> None:
        """Update a unit's parameters and free its gradients; without a `scale`, they are clipped by
        themselves."""
        limit = self.config.max_grad_norm
        later = self.config.stage1 or 0
        if scale is None and limit is not None:
            scale = clip_scale(squared_norm(unit.values()), limit)
        while unit:
            name, gradient = unit.popitem()
            self.updates.apply(
                name, gradient, step + 1 - (0 if name in self.adapters else later), rate, scale
            )

    def _begin(self, step: int, learning_rate: float) -> float:
        """Let the parameters of the step's stage require gradients; gives its learning rate."""
        stage1 = self.config.stage1
        first = stage1 is None or step < stage1
        active = self.parameters
        if first:
            active = self.adapters
        if active is not self.active:
            self.active = active
            for name, parameter in [*self.loaded.model.named_parameters(), *self.adapters.items()]:
                parameter.requires_grad_(name in active)
        return learning_rate * (
            self.config.stage1_learning_rate / self.config.learning_rate if first else 1.0
        )

    def _batch(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        return ids_BT, labels_BT

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts of the reversible network; see `Session.evaluate`."""
        nll, count = self.passes.row_nll(*self._batch(ids, labels))
        return nll.float().cpu().numpy(), count.cpu().numpy().astype(np.int64)

    def branched_hidden(self, ids: Tensor, position_ids: Tensor, branches: Tensor) -> Tensor:
        """Compute the reversible network's; see `BranchedEvaluation`."""
        return self.passes.final_hidden(ids, (position_ids, branches))

    def labels_nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Compute the loss over the vocabulary; see `BranchedEvaluation`."""
        return token_nll(hidden_ND, self.family.head_weight, labels_N, self.config.loss_tiles)

    def state(self) -> dict[str, np.ndarray]:
        """Return the trained parameters, the optimizer's state and the streams' scale, as they are;
        bfloat16 as uint16."""
        tensors = self.parameters | self.updates.arrays()
        arrays = {name: as_numpy(value.detach().cpu().clone()) for name, value in tensors.items()}
        if self.network.fraction_bits is None:
            return arrays
        return arrays | {BITS: np.array([self.network.fraction_bits])}

    @torch.no_grad()
    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave."""
        arrays = {name: torch.from_numpy(value) for name, value in state.items()}
        for name, parameter in self.parameters.items():
            value = arrays.get(name)
            if value is not None and value.dtype == torch.uint16:
                value = value.view(torch.bfloat16)
            if value is None or value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise CheckpointError(
                    f"the checkpoint is not of this model: {name}",
                    expected=f"{parameter.dtype} {list(parameter.shape)}",
                    received=None if value is None else f"{value.dtype} {list(value.shape)}",
                )
            parameter.copy_(value)
        self.updates.load(arrays)
        if BITS in state:
            self.network.fraction_bits = int(state[BITS][0])

    def save_model(self, folder: Path) -> None:
        """Write the trained network as a Hugging Face folder with its own modelling file; see
        `export`."""
        save_reversible(folder, self.loaded, self.network)

    @property
    def ordinary_session(self) -> ModelSession | None:
        """The same weights in the ordinary architecture; None if adapters and half-width streams
        forbid it."""
        if self.adapters:
            return None
        return ModelSession(self.loaded, self.config.loss_tiles)


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> RevffnSession:
    """See `MethodSpec.open_session`; the model is computed where it is."""
    return RevffnSession(loaded, config, seed)


def open_reversible(folder: Path, device: str = "cpu") -> RevffnSession:
    """Open a folder that `export` wrote; the session's `loaded` holds the ordinary model around the
    network.

    Raises:
        ModelError: the folder is not whole.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "config.json"
    hint = "copy it again"
    config = {"late": 0.0, "fraction_bits": None} | read_object(path, ModelError, hint=hint)
    with well_formed(path, ModelError, hint=hint):
        base: dict[str, Any] = dict(config["base"])
        settings: dict[str, Any] = dict(config["settings"])
        dtype = getattr(torch, config["dtype"])
    family = family_for(base.get("model_type"), str(folder / "config.json"))
    try:
        read_header(folder / FILE_NAME)
        tensors = load_file(folder / FILE_NAME)
    except Exception as error:  # safetensors raises its own kinds
        raise ModelError(
            f"{folder}: the weights cannot be read", received=str(error), hint="copy it again"
        ) from error
    with quiet_transformers():
        plain = AutoConfig.for_model(base.pop("model_type"), **base)
        model = AutoModelForCausalLM.from_config(plain, attn_implementation="sdpa", dtype=dtype)
    named = dict(model.named_parameters())
    model.to(torch.device(device))
    loaded = wrap(
        model, load_tokenizer(str(folder), config=plain), family, SourceInfo(str(folder), folder)
    )
    scaled = settings
    if config["fraction_bits"] is not None:
        scaled = settings | {"fraction_bits": config["fraction_bits"]}
    session = RevffnSession(loaded, RevffnConfig.parse(scaled, "config.json"), 0)
    session.network.config = RevffnConfig.parse(
        settings, "config.json"
    )  # a scale not set by hand may become coarser
    if config["late"] != session.network.coupling.late:
        raise ModelError(
            f"{folder}: written by another version, whose network reads its end differently",
            expected=f"late: {session.network.coupling.late:g}",
            received=config["late"],
            hint="load it with transformers and trust_remote_code=True, by the file next to it",
        )
    wanted = named | session.adapters
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ModelError(
            f"{folder}: the weights lack a tensor", received=missing[0], hint="copy the model again"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])
    return session


def open_network(folder: Path, device: str) -> OpenedNetwork:
    """See `OpensNetwork`."""
    session = open_reversible(folder, device)
    return OpenedNetwork(session, session.loaded, partial(continue_reversible, session))


def continue_reversible(session: RevffnSession, ids: Sequence[int], max_new_tokens: int) -> str:
    """Return greedy text behind token ids, in the numbers of the training; it computes the whole
    sequence for each token."""
    loaded = session.loaded
    stops = loaded.model.generation_config.eos_token_id
    if stops is None:
        stops = loaded.tokenizer.eos_token_id
    written: list[int] = []
    while len(written) < max_new_tokens:
        written.append(
            session.passes.next_token(torch.tensor([[*ids, *written]], device=session.device))
        )
        if written[-1] in (stops if isinstance(stops, list) else [stops]):
            break
    return str(loaded.tokenizer.decode(written, skip_special_tokens=True))
