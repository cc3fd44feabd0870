"""The charter of a fleet of first-order devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ondevice.fleet.averaging.rules import Averaging
from ondevice.fleet.charter import CommonCharter


class AdapterCharter(CommonCharter):
    """The head of a first-order fleet's log."""

    kind_of_fleet = "first-order fleet"

    kind: Literal["adapters"] = "adapters"
    """Devices reply with adapters."""

    local_steps: int = Field(ge=1, le=65535)
    """Steps of a device before it replies; each round resets its optimizer."""

    averaging: Averaging
    """The rule that combines replies."""
