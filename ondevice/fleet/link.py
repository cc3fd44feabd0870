"""How a fleet's server and its devices reach each other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ondevice.core.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """The address of a fleet's server, and its certificates.

    Attributes:
        host, port: of the server.
        certificates: folder with TLS certificates; None only if `insecure`.
        insecure: without TLS, for one machine or an otherwise private network.
    """

    host: str
    port: int
    certificates: Path | None = None
    insecure: bool = False

    def check(self, names: tuple[str, ...]) -> None:
        """Check that TLS is set up, or explicitly off.

        Raises:
            ConfigError: neither, or a certificate is missing.
        """
        if self.insecure:
            return
        if self.certificates is None:
            raise ConfigError(
                "a fleet's connections are encrypted",
                expected="--certificates DIR, or --insecure on one machine",
                hint="`ondevice fleet certificates DIR --host NAME` makes them",
            )
        for name in names:
            if not (self.certificates / name).is_file():
                raise ConfigError(f"{self.certificates} lacks {name}", expected=", ".join(names))

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    def file(self, name: str) -> str:
        """Return the path of one of the certificates."""
        return str((self.certificates or Path()).absolute() / name)


@dataclass(frozen=True)
class NodeSettings:
    """The settings of a device's process for the network.

    Attributes:
        address: the server's, `host:port`.
        device: the file that names the socket of the device's process.
        ports: that it may connect to.
        authority: certificate of the authority that signed the server's; None without TLS.
        key: this device's private key; None without TLS.
    """

    address: str
    device: str
    ports: list[int]
    authority: str | None = None
    key: str | None = None

    def to_json(self) -> str:
        """Return the one argument of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))
