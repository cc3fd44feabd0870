"""How a fleet's server and its devices reach each other."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from ondevice.core.errors import ConfigError

DELAYS_S = (0.5, 15.0)
"""First and longest wait before a device tries to connect again."""


class News(StrEnum):
    """What the process for the network says of its connection: a word, and nothing of the server's
    own text."""

    CONNECTED = "connected"
    REPLIED = "replied"
    """A message was replied to."""
    UNREACHABLE = "unreachable"
    OTHER_CERTIFICATE = "other_certificate"
    NOT_ADMITTED = "not_admitted"
    REFUSED = "refused"
    ENDED = "ended"
    """The process for the network has ended."""


class Delays:
    """Waits before the next attempt: twice as long each time, less a random part, so that the
    devices of a fleet do not come back all at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with the shortest wait again."""
        self.longest_s = DELAYS_S[0]

    def __next__(self) -> float:
        wait_s = random.uniform(0.5, 1.0) * self.longest_s
        self.longest_s = min(2 * self.longest_s, DELAYS_S[1])
        return wait_s


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
        key: this device's private key.
        authority: certificate of the authority that signed the server's; None without TLS.
    """

    address: str
    device: str
    ports: list[int]
    key: str
    authority: str | None = None

    def to_json(self) -> str:
        """Return the one argument of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))
