"""An adapter as a first-order fleet names and sends it: PEFT's tensors in safetensors' form, and
their hash."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ondevice.artifact.adapter import targets_of
from ondevice.core.errors import FleetError
from ondevice.core.session import MOMENTS, OPTIMIZER_STEP
from ondevice.core.untrusted import parse_header
from ondevice.fleet.averaging.rules import Arrays

if TYPE_CHECKING:
    from ondevice.core.session import Session

DOMAIN = b"ondevice-fleet-adapter-1\0"


def to_bytes(arrays: Arrays) -> bytes:
    """Return arrays as the bytes of a safetensors file."""
    return save({name: np.ascontiguousarray(value) for name, value in sorted(arrays.items())})


def from_bytes(data: bytes) -> Arrays:
    """Read what `to_bytes` gave.

    Raises:
        FleetError: it is damaged.
    """
    try:
        parse_header(data)  # its sizes first: the library believes them
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise FleetError("not valid tensors", received=str(error)[:300]) from None


def digest(arrays: Arrays) -> str:
    """Return the SHA-256 of names, shapes and numbers, 64 hexadecimal digits."""
    found = hashlib.sha256(DOMAIN)
    for name, value in sorted(arrays.items()):
        found.update(f"{name} {list(value.shape)}\0".encode())
        found.update(value.astype("<f4", copy=False).tobytes())
    return found.hexdigest()


def arrays_of(session: Session) -> Arrays:
    """Return a session's adapter, float32 by PEFT's names.

    Raises:
        FleetError: it has none.
    """
    adapter = session.adapter()
    if adapter is None:
        raise FleetError(
            "the session trains no adapter", expected="a method that trains an adapter"
        )
    return {name: np.array(value, dtype=np.float32) for name, value in adapter.tensors.items()}


def trained_names(session: Session) -> set[str]:
    """Return the names of the tensors that a session trains, once it has done a step; all if
    unknown."""
    names = arrays_of(session).keys()
    state = session.state()
    return {name for name in names if f"{MOMENTS[0]}/{name}" in state} or set(names)


def put(session: Session, arrays: Arrays) -> None:
    """Put an adapter into a session, and reset its optimizer."""
    state = session.state()
    beginning = {
        name: np.zeros_like(value) if _is_moment(name) else value for name, value in state.items()
    }
    if any(map(_is_moment, state)):
        session.load_state(beginning)
    adapter = session.adapter()
    assert adapter is not None  # noqa: S101  `arrays_of` has refused such a session
    tensors = {name: arrays.get(name, value) for name, value in adapter.tensors.items()}
    session.load_adapter(replace(adapter, tensors=tensors, target_modules=targets_of(tensors)))


def _is_moment(name: str) -> bool:
    return name == OPTIMIZER_STEP or name.split("/", 1)[0] in MOMENTS
