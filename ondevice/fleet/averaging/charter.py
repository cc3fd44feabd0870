"""The charter of a fleet of first-order devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ondevice.core.config import StrictConfig
from ondevice.fleet.averaging.rules import Rule
from ondevice.fleet.charter import CommonCharter


class Averaging(StrictConfig):
    """The rule that averages first-order devices' adapters, one of Flower's strategies."""

    strategy: Rule = "fedavg"
    """`fedavg`: the mean weighted by rows. `fedadam`, `fedyogi`, `fedadagrad`: a step of an optimizer along the mean
    change (FedOpt). `fedmedian`, `fedtrimmedavg`: against devices that lie; every device counts alike."""

    server_rate: float = Field(default=0.1, gt=0)
    """Learning rate of the server's optimizer, where the strategy has one."""

    beta_1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of its first moment (fedadam, fedyogi)."""

    beta_2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of its second moment (fedadam, fedyogi)."""

    tau: float = Field(default=1e-3, gt=0)
    """Added to the root of its second moment."""

    trim: float = Field(default=0.2, ge=0, lt=0.5)
    """Share of the devices that `fedtrimmedavg` drops at each end, for each number."""

    @property
    def first_beta(self) -> float:
        """Decay of the first moment; FedAdagrad has none."""
        return 0.0 if self.strategy == "fedadagrad" else self.beta_1


class AdapterCharter(CommonCharter):
    """The head of a first-order fleet's log."""

    kind_of_fleet = "first-order fleet"

    kind: Literal["adapters"] = "adapters"
    """Devices answer with adapters."""

    local_steps: int = Field(ge=1, le=65535)
    """Steps of a device before it answers; its optimizer begins anew in each round."""

    averaging: Averaging
    """The rule that combines answers."""
