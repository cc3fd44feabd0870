"""MeSP's memory in MLX on a CPU: Qwen2.5-0.5B's shape, random 4-bit weights, float32, LoRA on all
seven projections.

    python -m benchmarks.mesp.memory                      all methods at 256 tokens, and where the saving comes from
    python -m benchmarks.mesp.memory --part sequence      128 to 1024 tokens (the paper's Table 2)
    python -m benchmarks.mesp.memory --part rank          ranks 4 to 32 (Table 4)
    python -m benchmarks.mesp.memory --part time          processor seconds of a step, in turns, with a tuned BLAS

Every method has a process of its own. `peak_bytes` and `resident_bytes` are MLX's accounting,
executed task by task so that they repeat; `step_bytes` is their difference. `rss_anon_bytes` is how
much the process' anonymous memory grew from before the weights were made: Linux's counterpart of
`phys_footprint`. What is measured is kept in `--keep`, so a run that was stopped goes on.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish, median, parse_args
from benchmarks.mesp.ways import Spec

NEEDS = ("mlx",)
MIB = 2**-20
PLAIN = Spec("mesp")
STREAMED = "streamed"
METHODS: dict[str, Spec] = {
    "plain autodiff, all logits": replace(PLAIN, way="autodiff", tiled_loss=False),
    "plain autodiff": replace(PLAIN, way="autodiff"),
    "checkpoint a block, all logits": replace(PLAIN, way="checkpoint", tiled_loss=False),
    "checkpoint a block": replace(PLAIN, way="checkpoint"),
    "block-wise autodiff, no clearing": replace(PLAIN, way="blockwise", clear=False),
    "block-wise autodiff (MeBP)": replace(PLAIN, way="blockwise"),
    "MeSP, untiled": replace(PLAIN, tiles=False),
    "MeSP": PLAIN,
    "MeZO": replace(PLAIN, way="mezo"),
    "block-wise autodiff, streamed": replace(PLAIN, way="blockwise", folder=STREAMED),
    "MeSP, streamed": replace(PLAIN, folder=STREAMED),
    "MeZO, streamed": replace(PLAIN, way="mezo", folder=STREAMED),
}
COMPARED = ("checkpoint a block", "block-wise autodiff (MeBP)", "MeSP", "MeSP, streamed")
ABLATION = (
    ("checkpointing", "plain autodiff, all logits", "checkpoint a block, all logits"),
    ("the loss in tiles", "checkpoint a block, all logits", "checkpoint a block"),
    ("evaluation block by block", "checkpoint a block", "block-wise autodiff, no clearing"),
    ("clearing", "block-wise autodiff, no clearing", "block-wise autodiff (MeBP)"),
    ("backward stage by stage", "block-wise autodiff (MeBP)", "MeSP, untiled"),
    ("MLP and scores in tiles", "MeSP, untiled", "MeSP"),
    ("weights streamed", "MeSP", "MeSP, streamed"),
)
SIZES = [
    {"key": f"{name}_bytes", "title": f"{title} (MiB)", "digits": 1, "scale": MIB}
    for name, title in (
        ("peak", "Peak"),
        ("resident", "Resident"),
        ("step", "Step"),
        ("rss_anon", "Anonymous RSS"),
    )
]
SAVED = [
    {"key": f"saved_{name}bytes", "title": title, "digits": 1, "scale": MIB}
    for name, title in (("", "Saves of the peak (MiB)"), ("rss_", "of anonymous RSS (MiB)"))
]
SECONDS = {"key": "cpu_s", "title": "Step (CPU s)", "digits": 1}
SYSTEM = (
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
)
SHIM = """
#define P int o, int a, int b, int m, int n, int k
void scipy_cblas_sgemm(P, float x, const float* A, int p, const float* B, int q, float y, float* C, int r);
void cblas_sgemm(P, float x, const float* A, int p, const float* B, int q, float y, float* C, int r) {
  scipy_cblas_sgemm(o, a, b, m, n, k, x, A, p, B, q, y, C, r);
}
"""


class Bench:
    """Measures each spec once, in a process of its own, and remembers it."""

    def __init__(self, keep: Path, length: int, **shape: int) -> None:
        self.keep, self.base = keep, shape
        self.length = length
        self.known: dict[str, Any] = json.loads(keep.read_text()) if keep.is_file() else {}

    def of(self, spec: Spec) -> dict[str, Any]:
        """Return the bytes that the spec needed."""
        spec = replace(spec, **self.base)
        key = json.dumps(asdict(spec), sort_keys=True)
        if key not in self.known:
            with tempfile.TemporaryDirectory() as folder:
                place = self.keep.parent / "weights" if spec.folder else None
                self.known[key] = child(replace(spec, folder=str(place) if place else ""), folder)
            self.keep.parent.mkdir(parents=True, exist_ok=True)
            self.keep.write_text(json.dumps(self.known, indent=1))
        return self.known[key]


def child(spec: Spec, folder: str) -> dict[str, Any]:
    """Run a spec in a process whose heap gives back what it frees."""
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | blas()
    command = [sys.executable, "-m", "benchmarks.mesp.ways", json.dumps(asdict(spec))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{spec} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def blas() -> dict[str, str]:
    """Environment that gives a child a tuned BLAS; empty if there is none.

    MLX's wheel for Linux brings the reference BLAS. Debian's OpenBLAS, or scipy's own copy of it
    behind a shim, makes a float32 product some twenty times faster with the same memory.
    """
    if sys.platform != "linux":
        return {}
    library = next((path for path in SYSTEM if Path(path).is_file()), None) or _shim()
    before = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library} {before}".strip()} if library else {}


def _shim() -> str | None:
    spec, compiler = importlib.util.find_spec("scipy"), shutil.which("gcc") or shutil.which("cc")
    if spec is None or spec.origin is None or compiler is None:
        return None
    folder = Path(spec.origin).parents[1] / "scipy.libs"
    libraries = sorted(folder.glob("libscipy_openblas-*.so"))
    if not libraries:
        return None
    target = ROOT / "build/bench/mesp/libblas_of_scipy.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), "-x", "none", str(libraries[0]),
               f"-Wl,-rpath,{folder}"]  # fmt: skip
    done = subprocess.run(command, input=SHIM, text=True, capture_output=True, check=False)
    return str(target) if done.returncode == 0 else None


def methods(bench: Bench) -> list[dict[str, Any]]:
    """Every method."""
    return [
        {"method": name, **bench.of(replace(spec, length=bench.length))}
        for name, spec in METHODS.items()
    ]


def bars(rows: list[dict[str, Any]]) -> list[str]:
    """The issue's bars, with what was measured."""
    by = {row["method"]: row for row in rows}
    ours, streamed = by["MeSP"], by["MeSP, streamed"]
    against = {name: ours["step_bytes"] / by[name]["step_bytes"] for name in COMPARED[:2]}
    checkpoint, blockwise = against.values()
    return [
        f"Step bytes of MeSP against a checkpoint a block: {checkpoint:.3f} (bar 0.43); against "
        f"block-wise autodiff: {blockwise:.3f} (bar 0.70). Streamed, all in: {streamed['peak_bytes'] * MIB:.1f} MiB "
        "(bar 110).",
        "All first-order rows have the same loss: "
        f"{min(row['loss'] for row in rows if 'MeZO' not in row['method']):.6f} to "
        f"{max(row['loss'] for row in rows if 'MeZO' not in row['method']):.6f}.",
    ]


def ablation(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure what each idea saves of the peak, in the order in which they are added."""
    by = {row["method"]: row for row in rows}
    return [
        {"what": what, "before": before, "after": after,
         "saved_bytes": by[before]["peak_bytes"] - by[after]["peak_bytes"],
         "saved_rss_bytes": by[before]["rss_anon_bytes"] - by[after]["rss_anon_bytes"]}
        for what, before, after in ABLATION
    ]  # fmt: skip


def varied(bench: Bench, field: str, values: tuple[int, ...]) -> list[dict[str, Any]]:
    """The compared methods at each value of one field."""
    rows = []
    for name in COMPARED:
        base = replace(METHODS[name], length=bench.length)
        rows += [
            {"method": name, field: value, **bench.of(replace(base, **{field: value}))}
            for value in values
        ]
    return rows


def times(bench: Bench, repeats: int) -> list[dict[str, Any]]:
    """Processor seconds of a step, the methods in turns; without the limit that executes task by
    task. Other work on the machine hardly changes them."""
    seconds: dict[str, list[float]] = {name: [] for name in COMPARED}
    for _ in range(repeats):
        for name in COMPARED:
            spec = replace(
                METHODS[name],
                length=bench.length,
                limit=False,
                product="dequantized",
                steps=2,
                **bench.base,
            )
            with tempfile.TemporaryDirectory() as folder:
                place = str(bench.keep.parent / "weights") if spec.folder else ""
                seconds[name].append(child(replace(spec, folder=place), folder)["cpu_s"][-1])
    return [{"method": name, "cpu_s": actual, "ratio": median(actual) / median(seconds[COMPARED[0]])}
            for name, actual in seconds.items()]  # fmt: skip


def main() -> None:
    def add(parser: Any) -> None:
        parser.add_argument(
            "--part", choices=("methods", "sequence", "rank", "time"), default="methods"
        )
        parser.add_argument("--layers", type=int, default=24)
        parser.add_argument("--vocab", type=int, default=151936)
        parser.add_argument("--hidden", type=int, default=896)
        parser.add_argument("--intermediate", type=int, default=4864)
        parser.add_argument("--length", type=int, default=256)
        parser.add_argument(
            "--values", type=int, nargs="+", help="tokens or ranks instead of the paper's"
        )
        parser.add_argument("--keep", type=Path, default=ROOT / "build/bench/mesp/measured.json")

    args = parse_args(__doc__, add, repeats=3)
    shape = {name: getattr(args, name) for name in ("layers", "hidden", "intermediate", "vocab")}
    bench = Bench(args.keep, args.length, **shape)
    size = f"{args.layers} layers, {args.vocab} tokens of vocabulary"
    shown: dict[str, Any] = {"show_versions": ["mlx"]}
    if args.part == "methods":
        rows = methods(bench)
        title, columns = (
            f"MeSP: memory of a step at {args.length} tokens, rank 8",
            [column("method"), *SIZES],
        )
        finish(
            "mesp/memory",
            rows,
            args,
            columns,
            title=title,
            notes=[f"{size}.", *bars(rows)],
            **shown,
        )
        args.json, title = False, "MeSP: where the saving comes from"
        columns = [column("what"), column("before", "From"), column("after", "To"), *SAVED]
        shown["command"] = "python -m benchmarks.mesp.memory"
        finish("mesp/memory_ablation", ablation(rows), args, columns, title=title, **shown)
        return
    shown |= {
        "command": f"python -m benchmarks.mesp.memory --part {args.part}",
        "notes": [f"{size}."],
    }
    if args.part == "time":
        columns = [
            column("method"),
            SECONDS,
            {"key": "ratio", "title": "× checkpoint", "digits": 2},
        ]
        title = f"MeSP: processor seconds of a step of {args.length} tokens"
        finish("mesp/memory_time", times(bench, args.repeats), args, columns, title=title, **shown)
        return
    field, values = (
        ("length", (128, 256, 512, 1024)) if args.part == "sequence" else ("rank", (4, 8, 16, 32))
    )
    rows = varied(bench, field, tuple(args.values or values))
    columns, title = [column("method"), column(field), *SIZES], f"MeSP: memory by {field}"
    finish(f"mesp/memory_{args.part}", rows, args, columns, title=title, **shown)


def column(key: str, title: str = "") -> dict[str, Any]:
    """A column of words."""
    return {"key": key, "title": title or key.capitalize()}


if __name__ == "__main__":
    main()
