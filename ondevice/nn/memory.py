"""Memory that runs out, as an error that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ondevice.core.errors import DoesNotFitError


@contextmanager
def memory_errors(doing: str, hint: str) -> Iterator[None]:
    """Turn an out-of-memory error of the accelerator or the CPU into one that says what to change.

    Raises:
        DoesNotFitError: instead of torch's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0].split(". GPU")[0]
        raise DoesNotFitError(
            f"{doing} does not fit the accelerator", received=first, hint=hint
        ) from error
    except RuntimeError as error:  # the CPU's allocator has no error of its own
        if "can't allocate memory" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise DoesNotFitError(
            f"{doing} does not fit the memory", received=first, hint=hint
        ) from error
