"""A session over functions of one block: the host walks the layers, and hands in weights where the
file is mapped.

A step is embedding, every block forward, the head tile by tile over labelled positions, and every
block backward with its update (MeSP, section 4.2). Only block inputs, the adapter and the
optimizer's vectors are this session's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.weights import MappedWeights
from ondevice.core.errors import ArtifactError, CheckpointError, DataError, TrainingError
from ondevice.core.manifest import EXPERT, JOIN, LAYER_INPUT
from ondevice.core.program import FUSED
from ondevice.core.session import IGNORE, StepResult, Weigh
from ondevice.core.untrusted import Refused, inside
from ondevice.data.pictures import FIRST_ID
from ondevice.exporters.executorch.blocks_head import Head
from ondevice.exporters.executorch.blocks_model import BlocksModel
from ondevice.exporters.executorch.experts import Experts
from ondevice.exporters.executorch.pictures import HostTower
from ondevice.exporters.executorch.session import ExecutorchSession, execute, load_runtime
from ondevice.generation.sample import answers_of

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.manifest import Manifest, TensorPort
    from ondevice.data.pictures import Pictures

LOSS_SCALE = "loss_scale"
GRADIENTS = ("keys_gradient", "values_gradient")
SHARED = ("shared_keys", "shared_values", *GRADIENTS)
"""Roles of what blocks hand on to each other within a step."""
LOWER_RATE = "resume from the last checkpoint with a lower learning rate"
RELOAD = "copy the artifact again, or export it again"
SMALLEST_LOSS_SCALE = 1.0
"""A step that is not finite at this scale is an error."""

log = logging.getLogger("ondevice.exporters")


class BlocksSession(ExecutorchSession):
    """Runs a block program; see `ExecutorchSession`.

    Raises:
        ArtifactError: the weights file is damaged or of another model.
    """

    def __init__(self, folder: Path, manifest: Manifest, stock: bool = False) -> None:
        super().__init__(folder, manifest, stock)
        import torch

        self.weights = MappedWeights(self.folder / str(self.spec.weights))
        self._frozen_tensors: dict[str, Tensor] = {}
        for method_name, method in self.spec.methods.items():
            layers = self.spec.layers_of(method_name)
            for port in method.inputs:
                if port.role == "frozen":
                    for name in self._names(port.name, layers):
                        array = self.weights.tensor(name, port.shape, port.dtype)
                        self._frozen_tensors[name] = torch.from_numpy(array)
        self._frozen_inputs: dict[tuple[str, int, int, int], list[Tensor | None]] = {}
        """Of each call so far, by function, layer, tile and expert: a token is 30 calls, and names
        took as long as a tenth of them."""
        self.experts = self._experts()
        self._read: dict[str, Tensor] = {}
        """Of the pass that runs: its ids and first input, if layers have inputs of their own; keys
        and values that several blocks read, and the sums of their gradients."""
        self._pass_size = ""
        self.tower: HostTower | None = None
        self.head = Head(
            self.spec,
            lambda name, given, first: self._call_block(name, given, first=first),
            self.fused,
        )

    def take_pictures(self, pictures: Pictures) -> None:
        """Take rows with these pictures; see `Seeing`, and `HostTower.read` for errors."""
        self.tower = HostTower(pictures, self.manifest.model)

    def _names(self, name: str, layers: Sequence[int]) -> Iterator[str]:
        """Give the names of a frozen input's tensors in the file."""
        for layer in layers if "{layer}" in name else (0,):
            for expert in range(self.spec.experts) if "{expert}" in name else (0,):
                yield name.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    def _experts(self) -> Experts | None:
        if not self.spec.experts:
            return None
        method = next(one for name, one in self.spec.methods.items() if name.startswith(EXPERT))
        frozen = [port for port in method.inputs if port.role == "frozen"]
        sizes = (np.dtype(port.dtype).itemsize * int(np.prod(port.shape)) for port in frozen)
        return Experts(
            self.spec,
            lambda name, given, layer, expert: self._call_block(name, given, layer, expert=expert),
            sum(sizes),
        )

    def restart(self) -> None:
        """See `ExecutorchSession.restart`."""
        super().restart()
        self.loss_scale = self.spec.loss_scale
        self._partially_updated = False

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one training step; see `Session.step`.

        Raises:
            TrainingError: a loss or gradient is not finite; nothing has changed if it is the loss
                or the head's, or if the loss is scaled. There the step is left out, and the scale
                halved, as long as it can be.
        """

        def mean(nll: np.ndarray) -> tuple[float, np.ndarray]:
            count = max(1, int((labels[:, 1:] != IGNORE).sum()))
            return float(nll.sum()) / count, np.full(len(nll), 1 / count)

        return self.weighted_step(ids, labels, mean, step, learning_rate)

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one training step on weighted rows; see `Weighing`, and `step` for errors.

        The backward pass is linear in the head's gradient, so a row's weight multiplies the scale
        of its tokens there: the program is the one of a plain step.
        """
        self._check_whole()
        size = self._size(self.batch_size, ids)
        if self.experts is not None:
            self.experts.begin()
        inputs, x = self._forward(ids, size, keep=True)
        nll, gradient = self.head.step(x, labels)
        loss, weights = weigh(nll)
        g = gradient(weights * (self.loss_scale or 1.0))
        # By numpy: torch would wake threads of its own, which wait next to the runtime's.
        if not (np.isfinite(loss) and np.isfinite(g.numpy()).all()):
            raise TrainingError(
                f"step {step}: the loss is not finite; nothing was updated",
                received=loss,
                hint=LOWER_RATE,
            )
        # If the loss is scaled a step may overflow half-way: it is then undone, whole.
        before = None
        if self.loss_scale:
            before = {name: value.copy() for name, value in self._state.items()}
        self._partially_updated = True
        overflow = self._backward(inputs, g, size, self._scalars(step, learning_rate))
        if overflow is not None and before is not None:
            self._state = before
            self._partially_updated = False
            self._halve_loss_scale(step, overflow)
            return StepResult(loss, (loss,))
        if overflow is not None:
            raise TrainingError(
                f"step {step}: the gradient of layer {overflow} is not finite", hint=LOWER_RATE
            )
        self._partially_updated = False
        for counter in self.counts:
            self.counts[counter] += 1
        read = None if self.experts is None else self.experts.figures(ids.size)
        return StepResult(loss, (loss,), experts=read)

    def _halve_loss_scale(self, step: int, layer: int) -> None:
        assert self.loss_scale is not None  # noqa: S101 - the caller looked
        message = f"step {step}: the gradient of layer {layer} is not finite; nothing was updated"
        if self.loss_scale <= SMALLEST_LOSS_SCALE:
            raise TrainingError(
                message, received=f"loss scale {self.loss_scale:g}", hint=LOWER_RATE
            )
        self.loss_scale /= 2
        log.warning("%s; the loss scale is now %g", message, self.loss_scale)

    def _backward(
        self, inputs: list[Tensor], g: Tensor, size: str, scalars: dict[str, np.ndarray]
    ) -> int | None:
        """Every block's backward pass and update, from the last; the layer at which a number was
        not finite."""
        given = {key: _tensor(value) for key, value in scalars.items()}
        if self.loss_scale:
            given[LOSS_SCALE] = _tensor(np.array([self.loss_scale], np.float32))
        for layer in reversed(range(self.spec.layers)):
            given |= {"hidden": inputs.pop(), "gradient": g}
            if self.experts is not None and layer in self.experts.layers:
                given |= self._expert_gradients(self.experts, given, size, layer)
            outputs = self._call_block(f"block_backward_{size}{self.kind(layer)}", given, layer)
            g = outputs["gradient"]
            for tensor in self.spec.state:
                new = outputs[f"state {tensor.name}"].numpy()
                if tensor.role == "adapter" and not np.isfinite(new).all():
                    return layer
                self._range(tensor.name, layer)[:] = new
        return None

    def _expert_gradients(
        self, experts: Experts, given: dict[str, Tensor], size: str, layer: int
    ) -> dict[str, Tensor]:
        """What a block's backward pass takes of its experts. The forward pass runs again: what it
        gives the experts is not kept, as nothing of a block but its input is."""
        name = f"block_forward_{size}{self.kind(layer)}"
        outputs = self._call_block(name, {"hidden": given["hidden"]}, layer)
        g = given["gradient"]
        taken = {}
        if "dense" in outputs:
            taken = {"experts_sum": experts.total(layer, outputs)}
            name = f"{JOIN}backward_{size}{self.kind(layer)}"
            g = self._call_block(name, outputs | taken | {"gradient": g}, layer)["gradient"]
        gn, gweights = experts.backward(layer, outputs, g)
        return taken | {"normed_gradient": gn, "routing_gradient": gweights}

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        self._check_whole()
        _, x = self._forward(ids, self._size(self.eval_batch_size, ids), keep=False)
        return self.head.losses(x, labels), (labels[:, 1:] != IGNORE).sum(1)

    def next_token(self, ids: np.ndarray, length_tokens: int) -> np.ndarray:
        """Logits float32 [vocab]; see `ExecutorchSession.next_token`."""
        self._check_whole()
        if "head_logits" not in self.spec.methods:
            raise ArtifactError(
                "the program cannot write", hint="export it again with --set export.next_token=true"
            )
        _, x = self._forward(ids, self._size(1, ids), keep=False)
        return self.head.logits(x[length_tokens - 1 : length_tokens].contiguous())

    def answer_prompt(
        self, prompt: Sequence[int], samplers: Sequence[Any], most_tokens: int
    ) -> list[list[int]]:
        """Return an answer of each sampler; see `Answering`.

        Raises:
            ArtifactError: the program cannot generate.
        """
        self._check_whole()
        return answers_of(BlocksModel(self), prompt, samplers, most_tokens)

    def state(self) -> dict[str, np.ndarray]:
        """See `Session.state`."""
        self._check_whole()
        state = super().state()
        if self.loss_scale is not None:
            state[LOSS_SCALE] = np.array([self.loss_scale], np.float32)
        return state

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """See `Session.load_state`."""
        if self.loss_scale is not None and LOSS_SCALE not in state:
            raise CheckpointError(
                f"the checkpoint lacks {LOSS_SCALE}", hint="resume from an older checkpoint"
            )
        super().load_state(
            {name: value.copy() for name, value in state.items()}
        )  # a step writes into it
        if self.loss_scale is not None:
            self.loss_scale = float(state[LOSS_SCALE][0])
        self._partially_updated = False

    def close(self) -> None:
        """Release the program's methods and the mapped file."""
        super().close()
        self._frozen_tensors.clear()
        self._frozen_inputs.clear()

    def _check_whole(self) -> None:
        if self._partially_updated:
            raise TrainingError(
                "the step before ended half-way, with some layers updated and others not",
                hint="resume from the run's last checkpoint",
            )

    def _size(self, rows: int, ids: np.ndarray) -> str:
        self._bucket("program", rows, ids)
        return f"{rows}x{ids.shape[1]}"

    def kind(self, layer: int) -> str:
        """The end of the name of a function of that layer's block."""
        if not self.spec.kinds or not self.spec.kinds[layer]:
            return ""
        return f"_{self.spec.kinds[layer]}"

    def _forward(self, ids: np.ndarray, size: str, keep: bool) -> tuple[list[Tensor], Tensor]:
        """The input of every block if it is to be kept, and the last block's output, [N, D].

        Raises:
            DataError: the rows have tokens of pictures, and there is no tower that reads them.
        """
        pictured = ids >= FIRST_ID
        if self.tower is None and pictured.any():
            raise DataError(
                "the rows have tokens of pictures, and this session was given no pictures",
                expected="ids of the vocabulary, or the run's pictures",
                received=f"{int(pictured.sum())} tokens of pictures",
                hint="call take_pictures before a step, as `ondevice run` does",
            )
        text = _tensor(np.where(pictured, 0, ids))
        x = self._call_block(f"embed_{size}", {"ids": text})["hidden"]
        if self.tower is not None:
            x = self.tower.place(ids, x)
        self.begin_pass(size, text, x)
        inputs = []
        for layer in range(self.spec.layers):
            if keep:
                inputs.append(x)
            name = f"block_forward_{size}{self.kind(layer)}"
            x = self.run_block(name, {"hidden": x}, layer)["hidden"]
        return inputs, x

    def begin_pass(self, size: str, ids: Tensor, x: Tensor) -> None:
        """Keep what layers read of their tokens: ids, and the first block's input.

        Args:
            size: the end of the names of the pass's functions.
        """
        self._read = {"ids": ids, "hidden": x}
        self._pass_size = size

    def run_block(
        self, name: str, given: dict[str, Tensor], layer: int, tokens: int | None = None
    ) -> dict[str, Tensor]:
        """Run a block's forward function, with its experts; gives outputs by role.

        Args:
            given: inputs by role.
            tokens: the first so many are real, and only these need experts; None if all are.
        """
        outputs = self._call_block(name, given, layer)
        if self.experts is None or layer not in self.experts.layers:
            return outputs
        if "dense" not in outputs:
            outputs["hidden"] = self.experts.forward(layer, outputs, tokens)
            return outputs
        outputs["experts_sum"] = self.experts.total(layer, outputs, tokens)
        join = JOIN + name.removeprefix("block_").removeprefix("forward_")
        return outputs | self._call_block(join, outputs, layer)

    def _call_block(
        self, name: str, given: dict[str, Tensor], layer: int = 0, first: int = 0, expert: int = 0
    ) -> dict[str, Tensor]:
        """Run a function with inputs by role; gives outputs by role, and by name if a role has
        several.

        Args:
            layer: whose weights and ranges of the state go in.
            first: row of a table at which the tile begins.
            expert: whose weights go in, of a function of one expert.
        """
        if self.fused and FUSED + name in self.spec.methods:
            name = FUSED + name
        method = self.spec.methods[name]
        inputs = self.bound_inputs(name, given, layer, first, expert)
        outputs = execute(self._method(name, layer), inputs)
        found = dict(zip(map(_key, method.outputs), outputs, strict=True))
        for port in method.outputs:
            if port.role in SHARED:
                self._read[_key(port)] = found.pop(_key(port))
        return found

    def bound_inputs(
        self, name: str, given: dict[str, Tensor], layer: int = 0, first: int = 0, expert: int = 0
    ) -> list[Any]:
        """Return the inputs of a call in their order; see `_call_block`."""
        ports = self.spec.methods[name].inputs
        key = (name, layer, first, expert)
        if key not in self._frozen_inputs:
            self._frozen_inputs[key] = [self._bound(port, *key[1:]) for port in ports]
        inputs: list[Any] = [*self._frozen_inputs[key]]
        for place, port in enumerate(ports):
            if port.role == "frozen":
                continue
            if port.role == "state":
                inputs[place] = _tensor(self._range(port.name, layer))
            elif port.role == "layer_input":
                own = self._call_block(f"{LAYER_INPUT}{self._pass_size}", self._read, layer)
                inputs[place] = own["layer_input"]
            elif port.role in SHARED:
                inputs[place] = self._shared(port)
            else:
                inputs[place] = given[_key(port)]
        return inputs

    def state_array(self, name: str) -> np.ndarray:
        """Return the array that holds a state tensor now; another one after it was replaced."""
        return self._state[name]

    def loaded_method(self, name: str) -> Any:
        """Return a function that all layers share, to execute."""
        return self._method(name, 0)

    def _bound(self, port: TensorPort, layer: int, first: int, expert: int) -> Tensor | None:
        """A frozen input's tensor, or the tile of it that begins at row `first`."""
        if port.role != "frozen":
            return None
        tensor = self._frozen_tensors[port.name.format(layer=layer, expert=expert)]
        if tensor.shape == port.shape:
            return tensor
        return tensor[first : first + port.shape[0]]

    def _shared(self, port: TensorPort) -> Tensor:
        """Keys or values that another block computed, or the sum of their gradients so far."""
        import torch

        if _key(port) not in self._read and port.role in GRADIENTS:
            return torch.zeros(port.shape)
        return self._read[_key(port)]

    def _method(self, name: str, layer: int) -> Any:
        """A method to execute. One that every layer has its own of is not kept, because its weights
        were packed into memory when it was loaded."""
        file = self.spec.methods[name].program
        if file is None:
            if name not in self._methods:
                self._load(name)
            return self._methods[name]
        try:
            path = inside(self.folder, file.replace("{layer}", str(layer)))
            program = load_runtime().load_program(str(path))
            return program.load_method(name)
        except (RuntimeError, Refused) as error:
            raise ArtifactError(
                f"the runtime cannot load {file.replace('{layer}', str(layer))}",
                received=str(error),
                hint=RELOAD,
            ) from None

    def _range(self, name: str, layer: int) -> np.ndarray:
        """A layer's part of a state tensor, in its memory."""
        value = self._state[name]
        size = value.size // self.spec.layers
        return value[layer * size : (layer + 1) * size]


def _key(port: TensorPort) -> str:
    several = port.role in ("state", "counter", "constant", "tile_sums", *SHARED)
    return f"{port.role} {port.name}" if several else str(port.role)


def _tensor(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(value)
