"""The fleets that this machine takes part in, as the page shows them. Only the machine's owner adds one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ondevice.server.jobs import Window
from ondevice.server.routes import Serving
from ondevice.server.schemas import Answer

router = APIRouter(tags=["fleets"])


class FleetSeat(Answer):
    """A fleet that this machine is a device of."""

    name: str
    running: bool
    """Its device runs: it waits for its server, or trains."""
    why: str
    """Why it does not run; empty while it does."""
    server: str | None
    """Host and port."""
    window: Window | None
    fleet: str | None
    """The fleet's number; null until its server has given the charter."""
    model: str | None
    rounds: int
    """That this device has applied, or trained in a fleet of first-order devices."""
    hash: str | None
    """SHA-256 of the adapter."""
    bytes: int
    """Of messages to and from this device, transport apart."""


@router.get("/v1/fleets", response_model=list[FleetSeat])
def fleets(daemon: Serving) -> list[dict[str, Any]]:
    """List the fleets that this machine takes part in: rounds, bytes, and the adapter's hash."""
    return daemon.fleets.table()
