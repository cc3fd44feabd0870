"""systemd's notifications: ready, alive, stopping. Without systemd nothing happens."""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> bool:
    """Send state lines such as `READY=1` to the service manager; False where there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(address)
            sender.sendall("\n".join(lines).encode())
    except OSError:
        return False
    return True


def watchdog_s() -> float | None:
    """How often the service manager wants to hear from this process; None where it does not."""
    try:
        micros = int(os.environ.get("WATCHDOG_USEC", ""))
        meant = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return None
    return micros / 1e6 if micros > 0 and meant == os.getpid() else None
