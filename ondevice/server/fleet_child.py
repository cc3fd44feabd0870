"""A device of a fleet as a daemon's child, which ends with it: `-m ondevice.server.fleet_child PARENT FLAGS`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

CHECK_S = 1.0


def end_with(parent: int) -> None:
    """Ask this process to stop once its parent is another: the daemon was killed, and its successor starts its own."""
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from ondevice.cli.app import run

    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    sys.argv = ["ondevice", "fleet", "device", *sys.argv[2:]]
    run()
