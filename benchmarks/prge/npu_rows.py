"""One effective batch on the NPU's simulator in three forms: one batch, single rows unrolled,
several short calls.

    python -m benchmarks.prge.npu_rows             six random layers of SmolLM2-135M's shape; about ten minutes

All forms compute the losses of the same eight rows (two queries, both signs, two rows of data).
Seconds are the simulator's: they count work, and say nothing about a phone's clock. Needs the `qnn`
extra.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import finish, interleaved, parse_args
from ondevice.artifact.manifest import read_manifest

NEEDS = ("executorch",)
SHAPE: dict[str, Any] = {
    "hidden": 576,
    "intermediate": 1536,
    "heads": 9,
    "kv_heads": 3,
    "vocab": 8192,
}
LENGTH, QUERIES, BATCH = 32, 2, 2
FORMS = {
    "one batch of 8": ({}, 1),
    "8 rows unrolled": ({"export.rows": "unrolled"}, 1),
    "4 calls of 2": ({"method.queries": 1, "export.batch_size": 1}, 4),
    "one batch of 8, 8-bit weights": ({"export.quantize": "w8"}, 1),
}
COLUMNS = [
    {"key": "form", "title": "Form"},
    {"key": "lowering_s", "title": "Lowering (s)", "digits": 0},
    {"key": "program_bytes", "title": "Program (MB)", "digits": 1, "scale": 1e-6},
    {"key": "npu_bytes", "title": "Of it the NPU's (MB)", "digits": 1, "scale": 1e-6},
    {"key": "planned_bytes", "title": "Planned memory (MB)", "digits": 1, "scale": 1e-6},
    {"key": "step_s", "title": "Simulated step (s)", "digits": 2},
    {"key": "ratio", "title": "Of one batch", "digits": 2},
]


def export(model: Path, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Write the program; what its export says of it."""
    from ondevice.api.export import export as write
    from ondevice.api.runfile import RunConfig

    values = {
        "model.source": str(model),
        "method.name": "prge",
        "method.queries": QUERIES,
        "export.target": "android-npu",
        "export.batch_size": BATCH,
        "export.lengths_tokens": [LENGTH],
    }
    started = time.perf_counter()
    report = write(RunConfig.load(None, values | changes), folder)
    npu = next(share for share in report.partition["train_step"] if share.backend == "QnnBackend")
    print(f"{folder.name}: {time.perf_counter() - started:.0f} s", flush=True)
    return {
        "lowering_s": report.lowering_s,
        "program_bytes": report.program_bytes,
        "npu_bytes": npu.bytes,
        "planned_bytes": report.planned_bytes["train_step"],
    }


def stepper(folder: Path, calls: int) -> Any:
    """A function that runs the effective batch once."""
    from ondevice.exporters.android_npu.session import NpuSession

    session = NpuSession(folder, read_manifest(folder))
    assert session.batch_size is not None
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab"], (session.batch_size, LENGTH))

    def step() -> None:
        for call in range(calls):
            session.step(ids, ids, call, 0.0)

    return step


def main() -> None:
    """Export every form, then run them in turns."""
    from ondevice.models.tiny import save_tiny

    args = parse_args(
        __doc__,
        lambda parser: parser.add_argument(
            "--layers", type=int, default=6, help="layers (%(default)s)"
        ),
    )
    with tempfile.TemporaryDirectory() as temporary:
        model = save_tiny(Path(temporary) / "model", "llama", layers=args.layers, **SHAPE)
        by_form = {
            form: export(model, Path(temporary) / f"form {number}", changes)
            for number, (form, (changes, _)) in enumerate(FORMS.items())
        }
        steps = {
            form: stepper(Path(temporary) / f"form {number}", calls)
            for number, (form, (_, calls)) in enumerate(FORMS.items())
        }
        seconds = interleaved(steps, repeats=args.repeats)
    first = np.array(seconds["one batch of 8"])
    rows = [
        {
            "form": form,
            **by_form[form],
            "step_s": values,
            "ratio": float(np.median(np.array(values) / first)),
        }
        for form, values in seconds.items()
    ]
    finish(
        "prge/npu_rows",
        rows,
        args,
        columns=COLUMNS,
        title="An effective batch of eight rows on the NPU's simulator",
        show_versions=["executorch", "onnxruntime-qnn"],
        notes=[
            f"{args.layers} random layers of SmolLM2-135M's shape, {LENGTH} tokens, SM8650, float16."
        ],
    )


if __name__ == "__main__":
    main()
