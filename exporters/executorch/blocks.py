"""A session over functions of one block: the host walks the layers, and hands in weights where the
file is mapped.

A step is embedding, every block forward, the head tile by tile over labelled positions, and every
block backward with its update (MeSP, section 4.2). Only block inputs, the adapter and the
optimizer's vectors are this session's memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.weights import MappedWeights
from ondevice.core.errors import ArtifactError, CheckpointError, TrainingError
from ondevice.core.program import LOWEST
from ondevice.core.session import IGNORE, StepResult
from ondevice.core.untrusted import Refused, inside
from ondevice.exporters.executorch.session import ExecutorchSession, load_runtime

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.manifest import Manifest, TensorPort

LOSS_SCALE = "loss_scale"
LOWER_RATE = "resume from the last checkpoint with a lower learning rate"
RELOAD = "copy the artifact again, or export it again"
SHARED_PRODUCT = 1 << 30
"""Multiplications of a block's largest product from which threads share it."""
SMALLEST_LOSS_SCALE = 1.0
"""A step that is not finite at this scale is an error."""

log = logging.getLogger("ondevice.exporters")


def _in_threads(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let a session's method run in `BlocksSession.threads`."""

    @functools.wraps(run)
    def wrapped(self: BlocksSession, *arguments: Any, **named: Any) -> Any:
        with self.threads():
            return run(self, *arguments, **named)

    return wrapped


class BlocksSession(ExecutorchSession):
    """Runs a block program; see `ExecutorchSession`.

    Raises:
        ArtifactError: the weights file is damaged or of another model.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        import torch

        self.weights = MappedWeights(self.folder / str(self.spec.weights))
        self._frozen_tensors: dict[str, Tensor] = {}
        for method in self.spec.methods.values():
            for port in method.inputs:
                if port.role == "frozen":
                    for layer in range(self.spec.layers if "{layer}" in port.name else 1):
                        name = port.name.replace("{layer}", str(layer))
                        array = self.weights.tensor(name, port.shape, port.dtype)
                        self._frozen_tensors[name] = torch.from_numpy(array)
        self._product = self._largest_product()
        tile = self.spec.methods["head_sums"].inputs[-1].shape[0]
        starts = range(0, self.spec.vocab, tile)
        self.tiles = [(min(start, self.spec.vocab - tile), start) for start in starts]
        """(first row, first row that no tile before had) of each tile; all have the same number of
        rows."""
        self.head_rows = self.spec.methods["head_sums"].inputs[0].shape[0]

    def restart(self) -> None:
        """See `ExecutorchSession.restart`."""
        super().restart()
        self.loss_scale = self.spec.loss_scale
        self._partially_updated = False

    @_in_threads
    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one training step; see `Session.step`.

        Raises:
            TrainingError: a loss or gradient is not finite; nothing has changed if it is the loss
                or the head's, or if the loss is scaled. There the step is left out, and the scale
                halved, as long as it can be.
        """
        self._check_whole()
        size = self._size(self.batch_size, ids)
        inputs, x = self._forward(ids, size, keep=True)
        nll, counts, g = self._head(x, labels, gradient=True)
        loss = float(nll.sum() / max(1, counts.sum()))
        if not (np.isfinite(loss) and bool(g.isfinite().all())):
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
        return StepResult(loss, (loss,))

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
            outputs = self._call_block(f"block_backward_{size}{self._kind(layer)}", given, layer)
            g = outputs["gradient"]
            for tensor in self.spec.state:
                new = outputs[f"state {tensor.name}"]
                if tensor.role == "adapter" and not bool(new.isfinite().all()):
                    return layer
                self._range(tensor.name, layer)[:] = new.numpy()
        return None

    @_in_threads
    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        self._check_whole()
        _, x = self._forward(ids, self._size(self.eval_batch_size, ids), keep=False)
        nll, counts, _ = self._head(x, labels, gradient=False)
        return nll, counts

    @_in_threads
    def next_token(self, ids: np.ndarray, length_tokens: int) -> np.ndarray:
        """Logits float32 [vocab]; see `ExecutorchSession.next_token`."""
        self._check_whole()
        if "head_logits" not in self.spec.methods:
            raise ArtifactError(
                "the program cannot write", hint="export it again with --set export.next_token=true"
            )
        _, x = self._forward(ids, self._size(1, ids), keep=False)
        return self.head(x[length_tokens - 1 : length_tokens].contiguous())

    def head(self, hidden: Tensor) -> np.ndarray:
        """Logits float32 [vocab] of one position's hidden state [1, D]."""
        logits = np.empty(self.spec.vocab, np.float32)
        for low, _ in self.tiles:
            values = self._call_block("head_logits", {"hidden": hidden}, first=low)[
                "logits"
            ].numpy()[0]
            logits[low : low + values.size] = values
        return logits

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

    def _check_whole(self) -> None:
        if self._partially_updated:
            raise TrainingError(
                "the step before ended half-way, with some layers updated and others not",
                hint="resume from the run's last checkpoint",
            )

    def _size(self, rows: int, ids: np.ndarray) -> str:
        self._bucket("program", rows, ids)
        return f"{rows}x{ids.shape[1]}"

    def _kind(self, layer: int) -> str:
        """The end of the name of a function of that layer's block."""
        if not self.spec.kinds or not self.spec.kinds[layer]:
            return ""
        return f"_{self.spec.kinds[layer]}"

    def _forward(self, ids: np.ndarray, size: str, keep: bool) -> tuple[list[Tensor], Tensor]:
        """The input of every block if it is to be kept, and the last block's output, [N, D]."""
        x = self._call_block(f"embed_{size}", {"ids": _tensor(ids)})["hidden"]
        inputs = []
        for layer in range(self.spec.layers):
            if keep:
                inputs.append(x)
            x = self._call_block(f"block_forward_{size}{self._kind(layer)}", {"hidden": x}, layer)[
                "hidden"
            ]
        return inputs, x

    def _head(
        self, x: Tensor, labels: np.ndarray, gradient: bool
    ) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Each row's summed negative log likelihood and labelled tokens, and the mean loss's
        gradient of x, times the loss scale.

        Only positions with a label go through the head, `head_rows` at a time; the last of them are
        filled up with rows of weight 0.
        """
        import torch

        targets = np.full(labels.shape, IGNORE, np.int64)
        targets[:, :-1] = labels[:, 1:]
        counts = (targets != IGNORE).sum(1)
        nll = np.zeros(labels.shape[0], np.float32)
        g = torch.zeros_like(x)
        (where,) = np.nonzero(targets.reshape(-1) != IGNORE)
        for start in range(0, where.size, self.head_rows):
            places = where[start : start + self.head_rows]
            wanted = np.full(self.head_rows, -1, np.int64)
            scale = np.zeros(self.head_rows, np.float32)
            wanted[: places.size] = targets.reshape(-1)[places]
            scale[: places.size] = (self.loss_scale or 1.0) / where.size
            hidden = torch.zeros(self.head_rows, x.shape[1])
            hidden[: places.size] = x[places]
            given = {"hidden": hidden, "targets": _tensor(wanted), "token_scale": _tensor(scale)}
            sums = [
                torch.full((self.head_rows,), LOWEST),
                torch.zeros(self.head_rows),
                torch.zeros(self.head_rows),
            ]
            for tile in self.tiles:
                sums = list(self._tile("head_sums", given, sums, tile).values())
            maximum, total, logit = (value.numpy() for value in sums)
            # In float64, so that every host rounds it alike: numpy's float32 logarithm differs
            # between processors.
            logarithm = np.log(total.astype(np.float64)).astype(np.float32)
            rows = (maximum + logarithm - logit)[: places.size]
            np.add.at(nll, places // labels.shape[1], rows)
            if gradient:
                given["gradient"] = torch.zeros_like(hidden)
                for tile in self.tiles:
                    given["gradient"] = self._tile("head_gradient", given, sums, tile)["gradient"]
                g[places] = given["gradient"][: places.size]
        return nll, counts, g

    def _tile(
        self, name: str, given: dict[str, Tensor], sums: list[Tensor], tile: tuple[int, int]
    ) -> dict[str, Tensor]:
        first, start = tile
        names = [port.name for port in self.spec.methods["head_sums"].outputs]
        places = {
            "tile_first": _tensor(np.array([first])),
            "tile_skip": _tensor(np.array([start - first])),
        }
        return self._call_block(
            name,
            {**given, **places, **{f"tile_sums {key}": value for key, value in zip(names, sums)}},
            first=first,
        )

    def _call_block(
        self, name: str, given: dict[str, Tensor], layer: int = 0, first: int = 0
    ) -> dict[str, Tensor]:
        """Run a function with inputs by role; gives outputs by role, and by name if a role has
        several.

        Args:
            layer: whose weights and ranges of the state go in.
            first: row of a table at which the tile begins.
        """
        method = self.spec.methods[name]
        inputs = []
        for port in method.inputs:
            if port.role == "frozen":
                tensor = self._frozen_tensors[port.name.format(layer=layer)]
                if tensor.shape != port.shape:
                    tensor = tensor[first : first + port.shape[0]]
                inputs.append(tensor)
            elif port.role == "state":
                inputs.append(_tensor(self._range(port.name, layer)))
            else:
                inputs.append(given[_key(port)])
        outputs = self._method(name, layer).execute(inputs)
        return dict(zip(map(_key, method.outputs), outputs, strict=True))

    def _largest_product(self) -> int:
        """Multiplications of the largest product with a matrix that a block is given; 0 if it
        has its own."""
        products = [0]
        for name, method in self.spec.methods.items():
            if name.startswith("block_backward"):
                tokens = next(port.shape[0] for port in method.inputs if port.role == "hidden")
                products += [
                    tokens * int(np.prod(port.shape))
                    for port in method.inputs
                    if port.role == "frozen"
                ]
        return max(products)

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Let what follows compute in one thread, unless the products are large.

        The runtime's own kernels share a product among PyTorch's threads, which wait for each other
        by spinning. Small products gain nothing by that, and if another process has one of the
        cores a step took eight times as long.
        """
        import torch

        threads = torch.get_num_threads()
        if self._product >= SHARED_PRODUCT or threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

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
    several = port.role in ("state", "counter", "constant", "tile_sums")
    return f"{port.role} {port.name}" if several else str(port.role)


def _tensor(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(value)
