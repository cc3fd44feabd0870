"""Run the numerical tests with the instructions of other processors: `python -m tests.processors
[--jobs N]`.

PyTorch, oneDNN and MKL choose kernels by the processor, and each rounds in its own order. Their own
variables hold them to older instructions, so one machine stands for several. A value that this
processor lacks means its best one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

NUMERICS = ("tests/methods", "tests/nn", "tests/offload", "tests/runtime_ops", "tests/conformance")
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
PROCESSORS = (
    ("default", "SSE41", "COMPATIBLE"),
    ("default", "AVX", "SSE4_2"),
    ("avx2", "AVX2", "AVX2"),
    ("avx2", "AVX2_VNNI", "AVX"),
    ("avx512", "AVX512_CORE", "AVX512"),
    ("avx512", "AVX512_CORE_VNNI", "AUTO"),
    ("avx512", "AVX512_CORE_BF16", "AVX512_E1"),
    ("avx512", "AVX512_CORE_FP16", "AUTO"),
)


def main() -> int:
    """Run all, print the counts of each, and return 1 if any test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3, help="processes of each run")
    parser.add_argument("--only", type=int, help="number of one row of PROCESSORS")
    jobs, only = vars(parser.parse_args()).values()
    failed = False
    for number, values in enumerate(PROCESSORS):
        if only not in (None, number):
            continue
        chosen = dict(zip(VARIABLES, values, strict=True))
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "pytest",
            *NUMERICS,
            "-q",
            "-n",
            str(jobs),
            "--dist",
            "worksteal",
        ]
        environment = {**os.environ, "CI": "true", "OMP_NUM_THREADS": "1", **chosen}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        failed = failed or done.returncode != 0
        names = " ".join(f"{name}={value}" for name, value in chosen.items())
        counts = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
        print(f"{number}: {names}: {counts[0]} ({time.monotonic() - began:.0f} s)", flush=True)
        for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
            print(f"   {line[:300]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
