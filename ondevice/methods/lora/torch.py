"""LoRA and LoRA-FA by backpropagation, with peft's layers."""

from __future__ import annotations

import logging
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.artifact.adapter_fit import check_fits
from ondevice.artifact.expert_pairs import own_names
from ondevice.core.errors import MissingPackageError
from ondevice.core.session import StepResult, Weigh
from ondevice.methods.adamw import AdamWSession
from ondevice.methods.lora.graphed import HiddenGraphs, graphs_for
from ondevice.methods.precision import round_base
from ondevice.offload.shapes import padded

if TYPE_CHECKING:
    from ondevice.models import LoadedModel

PREFIX = "base_model.model."


class LoraSession(AdamWSession):
    """The adapter's tensors are the trained parameters; A is frozen for LoRA-FA."""

    def __init__(self, loaded: LoadedModel, config: Any, seed: int) -> None:
        logging.getLogger("bitsandbytes").setLevel(
            logging.ERROR
        )  # peft imports it, and it tells of absent kernels
        try:
            import peft
        except ImportError:
            raise MissingPackageError(
                "peft is not installed", hint="pip install 'ondevice-train[torch]'"
            ) from None
        # Before peft changes the model: this refuses what carries no adapter, and layers that the
        # model never calls.
        places = loaded.dims.adapted(config)
        names = {item: loaded.family.linear_name(item.layer, item.target) for item in places}
        linears = [name for item, name in names.items() if item.experts == 1]
        experts = [name for item, name in names.items() if item.experts > 1]
        loaded.family.check_adapted(
            [*linears, *dict.fromkeys(name.rpartition(".")[0] for name in experts)]
        )
        # Full names: a last part may also name layers outside the blocks, such as those of an image
        # encoder.
        if config.base:
            round_base(loaded, config.base)
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=[*map(loaded.family.own_name, linears)],
            target_parameters=[*map(loaded.family.own_name, experts)] or None,
        )
        with torch.random.fork_rng(), warnings.catch_warnings():
            # peft asks transformers for a name that it will drop: nothing that a user can do
            # anything about.
            warnings.simplefilter("ignore", FutureWarning)
            torch.manual_seed(seed)
            self.peft_model = _inject(peft, loaded.model, settings)
        named = {
            loaded.family.adapter_name(name.removeprefix(PREFIX).replace(".default", "")): parameter
            for name, parameter in self.peft_model.named_parameters()
            if ".lora_" in name
        }
        if experts:
            modules = {name.rpartition(".lora_")[0] for name in named}
            own = own_names(modules, experts, "the model with peft's layers")
            named = {
                own[name.rpartition(".lora_")[0]] + name[name.rindex(".lora_") :]: parameter
                for name, parameter in named.items()
            }
        self.all_tensors = named
        frozen_a = not config.trains_a
        for name, parameter in named.items():
            parameter.requires_grad_(not (frozen_a and ".lora_A." in name))
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        super().__init__(loaded, trained, config)
        self.graphs: HiddenGraphs | None = None
        if config.cuda_graphs and loaded.family.head_weight.is_cuda:
            self.graphs = graphs_for(loaded, trained)

    def step_placed(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run one step, as CUDA graphs if it can be; see `PackingSession`."""
        if self.graphs is None:
            return super().step_placed(ids, labels, position_ids, step, learning_rate)
        if position_ids is None:
            longest = self.loaded.dims.max_positions
            ids, labels = padded(ids, labels, self.config.micro_batch_size, longest)
        else:
            self.graphs.tell("rows of one sequence are kept apart")
        with self.graphs.beside():
            return super().step_placed(ids, labels, position_ids, step, learning_rate)

    def backpropagate(
        self, ids: np.ndarray, labels: np.ndarray, position_ids: np.ndarray | None
    ) -> Tensor:
        """Add to the gradients; see `AdamWSession`."""
        compute = partial(super().backpropagate, ids, labels, position_ids)
        if self.graphs is None:
            return compute()
        graphs = self.graphs

        def from_zero() -> Tensor:
            graphs.begin()
            return compute()

        return graphs.with_room(from_zero)

    def hidden(self, ids_BT: Tensor, position_ids_BT: Tensor | None) -> Tensor:
        """Return the last hidden states [B, T, D], of a graph if their shape has one."""
        if self.graphs is None or position_ids_BT is not None:
            return super().hidden(ids_BT, position_ids_BT)
        return self.graphs.hidden(ids_BT)

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Backpropagate weighted rows without graphs; see `Weighing`."""
        if self.graphs is not None:
            self.graphs.tell("rows are weighed by their likelihoods")
        return super().weighted_step(ids, labels, weigh, step, learning_rate)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        compute = partial(super().evaluate, ids, labels)
        return compute() if self.graphs is None else self.graphs.with_room(compute)

    def evaluate_branches(self, *arrays: np.ndarray) -> np.ndarray:
        """Compute the labels' losses; see `Branching.evaluate_branches`."""
        compute = partial(super().evaluate_branches, *arrays)
        return compute() if self.graphs is None else self.graphs.with_room(compute)

    def writing(self) -> AbstractContextManager[LoadedModel]:
        """Give the model, and the memory of graphs; see `Writing`."""
        if self.graphs is not None:
            self.graphs.release()
        return super().writing()

    def release_model(self) -> None:
        """Give the model its own layers back."""
        self.graphs = None
        self.peft_model.unload()

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        tensors = {
            name: value.detach().float().cpu().numpy().copy()
            for name, value in self.all_tensors.items()
        }
        config = self.config
        return Adapter(
            tensors,
            config.rank,
            config.alpha,
            targets_of(tensors),
            self.loaded.source.source,
            config.base or "",
        )

    @torch.no_grad()
    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`; it must have the same rank, alpha and linear layers."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.all_tensors.items()}
        config = self.config
        tensors = check_fits(adapter, shapes, config.rank, config.alpha, self.loaded.dims)
        for name, parameter in self.all_tensors.items():
            parameter.copy_(torch.from_numpy(tensors[name]))

    def state(self) -> dict[str, np.ndarray]:
        """Return what every first-order method does, and the frozen A too."""
        frozen = {
            name: value for name, value in self.all_tensors.items() if name not in self.parameters
        }
        return super().state() | {
            name: value.detach().float().cpu().numpy().copy() for name, value in frozen.items()
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave."""
        super().load_state(state)
        for name, value in self.all_tensors.items():
            if name not in self.parameters and name in state:
                value.copy_(torch.from_numpy(state[name]))


def _inject(peft: Any, model: Any, settings: Any) -> Any:
    """Put peft's layers around the model's; adapters stay in float32."""
    with (
        warnings.catch_warnings()
    ):  # peft sets `fan_in_fan_out` for a Conv1D by itself, and says so for each
        warnings.filterwarnings("ignore", category=FutureWarning)  # what peft asks of transformers
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        return peft.get_peft_model(model, settings)


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> LoraSession:
    """Open a session; the model is computed on its own device."""
    return LoraSession(loaded, config, seed)
