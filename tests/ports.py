"""Ports for processes that must be told one before they listen."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_ports = itertools.count()


def free_port() -> int:
    """A port that nobody has now, and that the kernel gives nobody who asks for any: it is taken a
    moment later."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = min(32_768, int(given.read_text().split()[0])) if given.is_file() else 32_768
    while True:
        port = 10_000 + (37 * os.getpid() + 7 * next(_ports)) % (end - 10_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
