#!/usr/bin/env python3
"""Build build/ondevice-debug.apk with Maven, aapt2, dx, zipalign and apksigner; Python's standard library only.

python3 build_apk.py              the APK
python3 build_apk.py --prepare    only what Maven needs to compile and test: R.java, resources, the runtime's classes
FLAVOUR=qnn                       Qualcomm's runtime and ExecuTorch's QNN build from Maven Central
EXECUTORCH_AAR=FILE               an ExecuTorch AAR of your own
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tools import bundle, dex, fetch, locked, resources
from tools.steps import BUILD, BuildError, missing_tools, tool

FLAVOURS = ("cpu", "qnn")


def build(prepare: bool, flavour: str) -> Path | None:
    start = time.monotonic()
    if flavour not in FLAVOURS:
        raise BuildError(f"FLAVOUR: expected one of {', '.join(FLAVOURS)}, received {flavour!r}")
    for name in missing_tools(("aapt2", "java", "mvn")) if prepare else missing_tools():
        tool(name)
    BUILD.mkdir(exist_ok=True)
    locked.fetch_all(tests=prepare)
    fetch.chain()
    runtime = fetch.runtime(flavour)
    base = resources.link(flavour, fetch.RUNTIME / "runtime.json")
    if prepare:
        return None
    name = "ondevice-debug.apk" if flavour == "cpu" else f"ondevice-{flavour}-debug.apk"
    apk = bundle.bundle(base, dex.dex(), BUILD / name)
    megabytes = apk.stat().st_size / 1e6
    abis = ", ".join(runtime["abis"])
    print(f"apk: ExecuTorch {runtime['executorch']} ({runtime['name']}, {runtime['source']}), {abis}")
    print(f"apk: {apk} ({megabytes:.1f} MB, signed and aligned) in {time.monotonic() - start:.0f} s")
    return apk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="only what Maven needs to compile and test")
    arguments = parser.parse_args()
    try:
        build(arguments.prepare, os.environ.get("FLAVOUR") or "cpu")
    except BuildError as error:
        print(f"apk: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
