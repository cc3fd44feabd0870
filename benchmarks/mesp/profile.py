"""Where a block program's step spends its time: CPU seconds by function and operator.

python -m benchmarks.mesp.profile                         SmolLM2-135M, 128 labelled tokens, every form
python -m benchmarks.mesp.profile --forms none            some forms: none, int8, q4, 8da8w, 8da4w
python -m benchmarks.mesp.profile --programs DIR          artifacts that lie in DIR by form, instead of new ones
python -m benchmarks.mesp.profile --top 8                 operators of each function that are listed

The wheel's runtime has no event tracer, so a small library (profiler.cpp) puts a clock around every
kernel. CPU time is of the whole process: threads that wait by spinning are in it. What a function
takes beyond its kernels is that of its delegates and of the runtime.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, command_of, finish, parse_args
from benchmarks.mesp.blocks import FORMS, RATE, SMOLLM

NEEDS = ("executorch",)
REST = "delegates and runtime"
LEAST_S = 0.01
"""CPU seconds a step below which an operator has no row."""
COLUMNS = [
    {"key": "program", "title": "Program"},
    {"key": "kernels", "title": "Kernels"},
    {"key": "function", "title": "Function"},
    {"key": "operator", "title": "Operator"},
    {"key": "calls", "title": "Calls a step", "digits": 0},
    {"key": "cpu_s", "title": "CPU s a step", "digits": 3},
    {"key": "others_s", "title": "of other threads", "digits": 3},
]
Figures = dict[str, np.ndarray]
"""Calls, CPU seconds, and those of the calling thread, by operator."""


def main() -> None:
    """Profile the programs of all forms."""

    def more(parser: Any) -> None:
        parser.add_argument("--forms", default=",".join(FORMS))
        parser.add_argument("--programs", type=Path)
        parser.add_argument("--tokens", type=int, default=128)
        parser.add_argument("--layers", type=int, default=30)
        parser.add_argument("--top", type=int, default=5)

    args = parse_args(__doc__, more)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        profiler = Profiler(Path(scratch))
        for form in args.forms.split(","):
            folder = args.programs / form if args.programs else Path(scratch) / form
            if not args.programs:
                make(form, args.layers, args.tokens, folder)
            for stock in (True, False):
                rows += profile(profiler, folder, form, stock, args.repeats, args.top)
    notes = [
        f"{args.tokens} labelled tokens in one row, rank 8 on all seven linear layers, AdamW. "
        "'Of other threads': CPU time beyond the calling thread's, waiting included."
    ]
    title = "A step of block programs by operator"
    shown = {"command": command_of("mesp/profile"), "show_versions": ("torch", "executorch")}
    finish("mesp/profile", rows, args, columns=COLUMNS, title=title, notes=notes, **shown)


def make(form: str, layers: int, tokens: int, folder: Path) -> None:
    """Export in a process of its own: the compiler's memory goes with it."""
    folder.mkdir()
    words = ["--make", form, SMOLLM, str(layers), str(tokens), str(folder)]
    subprocess.run([sys.executable, "-m", "benchmarks.mesp.blocks", *words], cwd=ROOT, check=True)


class Profiler:
    """The library with the clocks, compiled in `folder`, and what they have counted."""

    def __init__(self, folder: Path) -> None:
        import executorch.kernels.quantized  # noqa: F401  its kernels get clocks, too

        from ondevice.runtime_ops import build

        build.load_executorch_ops()
        flags, link = build.runtime_flags()
        library = folder / "profiler.so"
        command = [build.find_compiler(), "-std=c++17", "-O2", "-shared", "-fPIC", *flags]
        command += [str(Path(__file__).with_name("profiler.cpp")), "-o", str(library), *link]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.profiler_name.restype = ctypes.c_char_p
        self.library.profiler_figure.restype = ctypes.c_int64
        self.names = [
            self.library.profiler_name(slot).decode()
            for slot in range(self.library.profiler_begin())
        ]

    def read(self) -> Figures:
        """Return what was counted so far."""
        totals: Figures = defaultdict(lambda: np.zeros(3))
        for slot, name in enumerate(self.names):
            figures = [self.library.profiler_figure(slot, which) for which in range(3)]
            totals[name] += np.array(figures) * (1.0, 1e-9, 1e-9)
        return totals


def profile(
    profiler: Profiler, folder: Path, form: str, stock: bool, repeats: int, top: int
) -> list[dict[str, Any]]:
    """Rows of the table for one program."""
    from ondevice.artifact.manifest import read_manifest
    from ondevice.exporters.executorch.blocks import BlocksSession

    session = BlocksSession(folder, read_manifest(folder, check_files=False), stock=stock)
    with np.load(folder / "batch.npz") as file:
        ids, labels = file["ids"], file["labels"]
    session.step(ids, labels, 0, RATE)
    by_function: dict[str, Figures] = defaultdict(lambda: defaultdict(lambda: np.zeros(3)))
    call = session._call_block

    def timed(name: str, *arguments: Any, **named: Any) -> Any:
        before, cpu, own = profiler.read(), time.process_time(), time.thread_time()
        outputs = call(name, *arguments, **named)
        spent = np.array([1.0, time.process_time() - cpu, time.thread_time() - own])
        for operator, after in profiler.read().items():
            figures = after - before[operator]
            if figures[0]:
                by_function[name][operator] += figures
                spent[1:] -= figures[1:]
        by_function[name][REST] += spent
        return outputs

    session._call_block = timed  # type: ignore[method-assign]
    for number in range(repeats):
        session.step(ids, labels, 1 + number, RATE)
    session.close()
    rows = []
    for function, operators in by_function.items():
        ordered = sorted(operators.items(), key=lambda item: -item[1][1])
        listed = [(name, figures) for name, figures in ordered[:top]]
        listed.append(("others", sum((figures for _, figures in ordered[top:]), np.zeros(3))))
        listed.append(("all", sum(operators.values(), np.zeros(3))))
        for operator, (calls, cpu, own) in listed:
            if cpu < LEAST_S * repeats and operator != "all":
                continue
            rows.append(
                {
                    "program": FORMS[form],
                    "kernels": "stock" if stock else "ours",
                    "function": function,
                    "operator": operator,
                    "calls": calls / repeats,
                    "cpu_s": cpu / repeats,
                    "others_s": (cpu - own) / repeats,
                }
            )
            if operator == "all":
                print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
