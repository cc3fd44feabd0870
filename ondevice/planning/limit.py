"""A limit on the memory of this process, kept by the kernel: an allocation beyond it fails here.

Private writable memory counts (RLIMIT_DATA), pages of files do not. macOS and Windows have no such limit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ondevice.training.metrics import status_bytes


@contextmanager
def own_memory(limit_bytes: int | None) -> Iterator[None]:
    """Limit the private memory of this process to `limit_bytes` within the block; None sets no limit.

    What libraries had mapped without touching it, before the block, is added to the limit.
    """
    if limit_bytes is None or not sys.platform.startswith("linux"):
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = limit_bytes + max(0, status_bytes("VmData") - status_bytes("RssAnon"))
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
