"""Host memory: float32 masters and AdamW's moments, flat for each unit (SlideFormer section 3.2).

In `split` form a master is its bfloat16 value, pinned, which the accelerator reads as it is, and
the 16 bits that are missing to float32: no conversion pass and no conversion buffer. In `plain`
form it is float32, and what goes to the accelerator is converted into one of two buffers that all
units share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.core.errors import MissingPackageError
from ondevice.offload import muon
from ondevice.offload.device import buffer
from ondevice.offload.units import array_name, checked_array, extent
from ondevice.runtime_ops import layer_adam

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device, Event
    from ondevice.offload.units import Arrays, Unit

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RESUME_HINT = (
    "resume with the same settings and version, with a compiler if one wrote it; or begin a new run "
    "from the checkpoint's folder model/"
)
FIELD_BYTES = 64
"""Moments begin at multiples of it in one run of bytes."""


def release(unit: Unit, dtype: torch.dtype) -> None:
    """Release the memory of a unit's parameters."""
    for piece in unit.pieces:
        piece.parameter.grad = None
        piece.parameter.data = torch.empty(0, dtype=dtype)


def parameters(unit: Unit, flat: Tensor) -> dict[str, Tensor]:
    """Return a unit's parameters by name, views of its flat memory."""
    return {p.name: flat[p.offset : p.offset + p.numel].view(p.shape) for p in unit.pieces}


def native(config: EngineConfig) -> bool:
    """Return True if the update is the C++ pass.

    Raises:
        MissingPackageError: it is requested and no compiler is installed.
    """
    if config.optimizer == "torch":
        return False
    available = layer_adam.available()
    if not available and (config.optimizer == "native" or config.moments != "float32"):
        raise MissingPackageError(
            "the fused update needs a C++ compiler, and none was found",
            expected="g++ or clang++",
            hint="install one, or set method.optimizer: torch with method.moments: float32",
        )
    return available


def moments_in(memory: Tensor, numel: int, kind: str) -> layer_adam.Moments:
    """Return moments of `numel` elements as views of uint8 `memory`, of at least
    `moments_bytes`."""
    fields = {}
    offset = 0
    for name, like in layer_adam.Moments.empty(0, kind).tensors().items():
        count = -(-numel // 128) if name.endswith("_scale") else numel
        size = count * like.element_size()
        fields[name] = memory[offset : offset + size].view(like.dtype)
        offset += -(-size // FIELD_BYTES) * FIELD_BYTES
    return layer_adam.Moments(kind, **fields)


def moments_bytes(numel: int, kind: str) -> int:
    """Return the bytes that `moments_in` needs."""
    each = {"float32": 4, "bfloat16": 2, "int8": 1}[kind]
    scales = 4 * -(-numel // 128) * (kind == "int8")
    return 2 * (-(-numel * each // FIELD_BYTES) * FIELD_BYTES + scales + FIELD_BYTES)


def is_split(config: EngineConfig) -> bool:
    """Return True if masters are stored as bfloat16 values and the 16 bits missing to float32."""
    return config.compute == "bfloat16" and native(config)


def fields(state: layer_adam.HostState) -> dict[str, Tensor]:
    """Return a state's tensors by the name that a checkpoint has for them."""
    named = {
        "master": state.master,
        "high": state.high,
        "low": state.low,
        **state.moments.tensors(),
        "momentum": state.momentum,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _ranges(
    unit: Unit, state: layer_adam.HostState
) -> tuple[tuple[slice, layer_adam.Moments | None], ...]:
    """Return the elements of Muon, which have no moments, and those of AdamW with theirs."""
    hidden = unit.matrices
    return (slice(0, hidden), None), (slice(hidden, unit.numel), state.moments)


class HostStore:
    """Masters and moments of `owned` units; takes the values out of the model's parameters.

    Attributes:
        states: of each unit, by its index.
        split, native: the form of masters, and whether updates are the C++ pass.
    """

    def __init__(self, owned: Iterable[Unit], config: EngineConfig, device: Device) -> None:
        self.device = device
        self.owned = tuple(owned)
        self.dtype = DTYPES[config.compute]
        self.native = native(config)
        self.split = is_split(config)
        self.converted: list[tuple[Tensor, Event | None]] = []
        self.turn = 0
        self.states = {unit.index: self._host_state(unit, config.moments) for unit in self.owned}
        if self.dtype == torch.bfloat16 and not self.split:
            largest = max((unit.numel for unit in self.owned), default=0)
            self.converted = [(device.pinned(largest, self.dtype), None) for _ in range(2)]

    def _host_state(self, unit: Unit, moments: str) -> layer_adam.HostState:
        """Fill a unit's state from its parameters, and let go of their memory."""
        state = None if self.split else self.blank(unit, moments)
        master = torch.zeros(unit.numel) if state is None else self._master(state)
        for piece in unit.pieces:
            master[piece.offset : piece.offset + piece.numel].copy_(piece.values)
        release(unit, self.dtype)
        if state is not None:
            return state
        state = self.blank(unit, moments)
        assert state.high is not None and state.low is not None  # noqa: S101  split
        for span, own in _ranges(unit, state):
            layer_adam.split_(master[span], state.high[span], state.low[span], own)
        return state

    def blank(self, unit: Unit, moments: str) -> layer_adam.HostState:
        """Return memory for a state of the unit's size, zeros."""
        seed = unit.index + (unit.low << 16)  # stochastic rounding: each shard has its own numbers
        adam = unit.numel - unit.matrices
        own = moments_in(buffer(moments_bytes(adam, moments), pin=False), adam, moments)
        momentum = None
        if unit.matrices:
            momentum = self.device.pinned(unit.matrices, muon.TYPES[moments])
        if not self.split:
            master = self.device.pinned(unit.numel, torch.float32)
            return layer_adam.HostState(master, None, None, own, seed, momentum)
        high = self.device.pinned(unit.numel, torch.bfloat16)
        low = buffer(2 * unit.numel, pin=False).view(torch.uint16)[: unit.numel]
        return layer_adam.HostState(None, high, low, own, seed, momentum)

    def state(self, unit: Unit) -> layer_adam.HostState:
        """Return a unit's state: views."""
        return self.states[unit.index]

    def moments(self, unit: Unit) -> layer_adam.Moments:
        """Return a unit's moments: views."""
        return self.state(unit).moments

    def outgoing(self, unit: Unit, span: slice) -> Tensor:
        """Return elements `span` of a unit in the compute dtype, for the accelerator; then call
        `sent`."""
        weights = self._weights(unit)[span]
        if not self.converted:
            return weights
        self.turn = 1 - self.turn
        memory, event = self.converted[self.turn]
        if event is not None:
            event.wait()
        return memory[: weights.numel()].copy_(weights)

    def _weights(self, unit: Unit) -> Tensor:
        """A unit's weights: what the accelerator reads, or is converted for it."""
        state = self.states[unit.index]
        if state.high is None:
            return self._master(state)
        return state.high

    def sent(self, event: Event) -> None:
        """Note that the copy of the last `outgoing` ends at `event`."""
        if self.converted:
            self.converted[self.turn] = (self.converted[self.turn][0], event)

    def masters(self) -> dict[str, Tensor]:
        """Return every parameter of the units by name in float32, as copies."""
        masters = {}
        for unit in self.owned:
            state = self.state(unit)
            if state.high is not None and state.low is not None:
                flat = torch.empty(unit.numel)
                for span, own in _ranges(unit, state):
                    layer_adam.merge(state.high[span], state.low[span], own, flat[span])
            else:
                flat = self._master(state)
            masters |= {name: part.clone() for name, part in parameters(unit, flat).items()}
        return masters

    def arrays(self) -> dict[str, Tensor]:
        """Return everything a resume needs, as views."""
        arrays: dict[str, Tensor] = {}
        for unit in self.owned:
            arrays |= self._named(unit)
        return arrays

    def _named(self, unit: Unit) -> dict[str, Tensor]:
        """The parts of a unit's state for a checkpoint; of a shard, without its padding."""
        parts = {
            part: tensor[: extent(part, unit)[1]] for part, tensor in self._parts(unit).items()
        }
        return {
            array_name(part, unit): tensor
            for part, tensor in parts.items()
            if len(tensor) or not unit.of
        }

    def _parts(self, unit: Unit) -> dict[str, Tensor]:
        return fields(self.state(unit))

    def load(self, arrays: Arrays) -> None:
        """Take back what `arrays` gave, bfloat16 as uint16.

        Raises:
            CheckpointError: naming the first array that is missing or of another size or type.
        """
        for unit in self.owned:
            self._load(unit, arrays)

    def _load(self, unit: Unit, arrays: Arrays) -> dict[str, Tensor]:
        """The unit's parts, filled from `arrays`, which have those of the whole unit."""
        parts = self._parts(unit)
        for part, tensor in parts.items():
            target = tensor
            if tensor.dtype == torch.bfloat16:
                target = tensor.view(torch.uint16)
            low, count, size = extent(part, unit)
            dtype = target.numpy().dtype
            value = checked_array(arrays, f"{part}/{unit.key}", (size,), dtype, RESUME_HINT)
            target[:count].copy_(torch.from_numpy(value[low : low + count]))
        return parts

    @property
    def bytes(self) -> int:
        """Of masters, moments, and buffers for conversion."""
        tensors = [memory for memory, _ in self.converted]
        for state in self.states.values():
            split = (state.master, state.high, state.low, state.momentum)
            tensors += [t for t in split if t is not None]
            tensors += state.moments.tensors().values()
        return sum(tensor.nbytes for tensor in tensors)

    @staticmethod
    def _master(state: layer_adam.HostState) -> Tensor:
        if state.master is None:
            raise RuntimeError("a state in split form has no float32 master")
        return state.master
