"""A fleet's device as a child of the daemon, with which it ends: `python -m ... PARENT FLAGS`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

CHECK_S = 1.0


def end_with(parent: int) -> None:
    """Stop this process once its parent changes: the daemon was killed."""
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from ondevice.cli.app import run

    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    sys.argv = ["ondevice", "fleet", "device", *sys.argv[2:]]
    run()
