"""Native libraries print to standard error by themselves; this keeps a known chatter from the user."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines(prefix: str) -> Iterator[None]:
    """Within the block, lines of standard error that start with `prefix` are dropped; all others come out after it."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no standard error to protect
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not line.startswith(prefix.encode()):
                    os.write(2, line)
