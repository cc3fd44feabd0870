"""What a fleet of first-order devices agrees on."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, model_validator

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError, FleetError
from ondevice.fleet.averaging.rules import Rule
from ondevice.fleet.messages import VERSION


class Averaging(StrictConfig):
    """What a server makes of first-order devices' adapters, by Flower's strategies."""

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


class AdapterCharter(StrictConfig):
    """The head of a first-order fleet: what all devices have in common."""

    kind: Literal["adapters"] = "adapters"
    """Devices answer with adapters."""

    version: int = VERSION
    """Of the protocol."""

    model_source: str
    """The base model, as the server named it; a device may have it under another name."""

    model_sha256: str
    """Of the base model's weights."""

    method: dict[str, Any]
    """Settings of the training method."""

    data: dict[str, Any]
    """How rows become tokens: task and longest row."""

    seed: int = Field(ge=0, lt=2**63)
    """Of the first adapter and of the order of rows."""

    learning_rate: float = Field(gt=0)
    """Of the local steps."""

    local_steps: int = Field(ge=1, le=65535)
    """Steps of a device before it answers; its optimizer begins anew in each round."""

    averaging: Averaging
    """What the server makes of answers."""

    @model_validator(mode="after")
    def _version(self) -> AdapterCharter:
        if self.version != VERSION:
            raise ValueError(f"version {self.version}: this is version {VERSION} of the protocol")
        return self

    def to_bytes(self) -> bytes:
        """Return the charter as JSON with sorted keys, UTF-8."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> AdapterCharter:
        """Read what `to_bytes` gave.

        Raises:
            FleetError: it is no charter, or of another version.
        """
        try:
            return cls.parse(json.loads(data), "charter")
        except (ValueError, RecursionError, ConfigError) as error:
            raise FleetError(
                "this is no charter of a first-order fleet", received=getattr(error, "message", str(error))[:500]
            ) from None

    @property
    def id(self) -> int:
        """Number of the fleet: the first four bytes of the charter's SHA-256, little-endian."""
        return int.from_bytes(hashlib.sha256(self.to_bytes()).digest()[:4], "little")
