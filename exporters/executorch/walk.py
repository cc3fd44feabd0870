"""One token through a function of every layer: the host's part of it is only the calls.

A session looks up each input of a call by its role. For a token that is 800 inputs, which takes as
long as a fifth of the computation; here each layer's inputs stay in a list from token to token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ondevice.core.program import FUSED

if TYPE_CHECKING:
    from torch import Tensor

NEW = ("hidden", "position")
"""Roles of what is another tensor with each token."""
ROLES = {*NEW, "keys", "values", "state", "frozen"}


class Layers(Protocol):
    """What a walk needs of a session over functions of one block."""

    spec: Any
    fused: bool
    experts: Any

    def state_array(self, name: str) -> Any: ...

    def bound_inputs(self, name: str, given: dict[str, Tensor], layer: int) -> list[Any]: ...

    def loaded_method(self, name: str) -> Any: ...


class Walk:
    """Runs a cached function of one token over all layers.

    Args:
        name: of the function, without `FUSED`.
        keys: of all layers, [L, K, h, C]; read and written in place, as `values` [L, K, C, h].
    """

    def __init__(self, session: Layers, name: str, keys: Tensor, values: Tensor) -> None:
        self.session = session
        self.keys = keys
        self.values = values
        full = FUSED + name
        self.name = full if session.fused and full in session.spec.methods else name
        self.ports = session.spec.methods[self.name].inputs
        self.places = [self._place(role) for role in NEW]
        outputs = [port.role for port in session.spec.methods[self.name].outputs]
        self.outputs = [outputs.index(role) for role in ("hidden", "keys", "values")]
        self.state: list[Any] = []
        self.inputs: list[list[Any]] = []

    def _place(self, role: str) -> int:
        return next(place for place, port in enumerate(self.ports) if port.role == role)

    def _prepare(self, given: dict[str, Tensor]) -> None:
        """Make the lists, if the session's state is in other arrays than before."""
        session = self.session
        names = [port.name for port in self.ports if port.role == "state"]
        state = [session.state_array(name) for name in names]
        if self.inputs and all(one is other for one, other in zip(state, self.state)):
            return
        self.state = state
        self.inputs = [
            session.bound_inputs(self.name, {**given, "keys": keys, "values": values}, layer)
            for layer, (keys, values) in enumerate(zip(self.keys, self.values))
        ]

    def run(self, x: Tensor, position: Tensor) -> Tensor:
        """Return the last hidden state [1, D] of a token whose embedding is x; its keys and values
        are written at `position`, int64 [1]."""
        self._prepare({"hidden": x, "position": position})
        hidden, start = self.places
        at_hidden, at_keys, at_values = self.outputs
        keys = []
        values = []
        execute = self.session.loaded_method(self.name).execute
        for inputs in self.inputs:
            inputs[hidden] = x
            inputs[start] = position
            outputs = execute(inputs)
            x = outputs[at_hidden]
            keys.append(outputs[at_keys])
            values.append(outputs[at_values])
        import torch

        at = int(position)
        self.keys[..., at : at + 1] = torch.stack(keys)
        self.values[:, :, at : at + 1] = torch.stack(values)
        return x


def can_walk(session: Layers, name: str) -> bool:
    """Return True if one function that stays loaded is all that a layer runs for a token."""
    full = FUSED + name
    methods = session.spec.methods
    method = methods[full if session.fused and full in methods else name]
    return (
        session.experts is None
        and not session.spec.kinds
        and method.program is None
        and {str(port.role) for port in method.inputs} <= ROLES
    )
