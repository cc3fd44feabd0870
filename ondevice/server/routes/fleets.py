"""The fleets that this machine takes part in. Only the machine's owner can add one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ondevice.server.jobs import Window
from ondevice.server.routes import Serving
from ondevice.server.schemas import ResponseBody

router = APIRouter(tags=["fleets"])


class FleetSeat(ResponseBody):
    """A fleet with this machine as a device."""

    name: str
    running: bool
    """True while its device waits for its server or trains."""
    why: str
    """Reason why it does not run, has no server, or did not reply in its last round; else empty."""
    server: str | None
    """Host and port."""
    window: Window | None
    fleet: str | None
    """The fleet's number; null until its server has sent the charter."""
    model: str | None
    rounds: int
    """Rounds that this device has applied, or trained in a first-order fleet."""
    hash: str | None
    """SHA-256 of the adapter."""
    bytes: int
    """Bytes of messages to and from this device, without transport."""


@router.get("/v1/fleets", response_model=list[FleetSeat])
def fleets(daemon: Serving) -> list[dict[str, Any]]:
    """List the fleets that this machine takes part in: rounds, bytes, and the adapter's hash."""
    return daemon.fleets.table()
