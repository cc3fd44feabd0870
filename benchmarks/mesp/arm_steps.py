"""The gradients and steps of artifacts on the processor that runs this, into files: here, and in
the emulator.

    python -m benchmarks.mesp.arm_steps FOLDER OUT AGAIN

FOLDER/jobs.json has name, artifact and learning rate of each; FOLDER/<name>.npz has `probe`, the
adapter to begin with, and ids and labels, int64 [steps, rows, tokens]. OUT/<name>.npz gets
`gradient`, the first step's, `losses`, and `adapter`, which the steps end with, once as given and
AGAIN times with last bits of the first adapter changed at random; OUT/facts.json says what the
processor is. Needs numpy, the runtime and this package.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LAST_BITS = 1e-7
"""Relative, of float32."""


def main(folder: Path, out: Path, again: int) -> None:
    """Take every job's steps."""
    from ondevice.artifact.manifest import read_manifest
    from ondevice.core.registry import target

    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        started, artifact = time.perf_counter(), Path(job["artifact"])
        manifest = read_manifest(
            artifact, check_files=False
        )  # hashed by whoever wrote it, minutes ago
        session = target(manifest.target).open(artifact, manifest)
        with np.load(folder / f"{name}.npz") as given:
            found = [
                take(session, **given, rate=job["rate"], seed=seed) for seed in range(1 + again)
            ]
        stacked: dict[str, Any] = {key: np.stack([one[key] for one in found]) for key in found[0]}
        np.savez(out / f"{name}.npz", **stacked)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    (out / "facts.json").write_text(json.dumps(facts()))


def take(
    session: Any, probe: np.ndarray, ids: np.ndarray, labels: np.ndarray, rate: float, seed: int = 0
) -> dict[str, np.ndarray]:
    """AdamW steps from `probe` with moments of zero; with a seed other than 0, its last bits are
    changed.

    AdamW's first moment after one step from zero is the gradient times 1 - beta1.
    """
    if seed:
        moved = probe * (1.0 + LAST_BITS * np.random.default_rng(seed).standard_normal(probe.size))
        probe = moved.astype(np.float32)
    session.restart()
    session.load_state(session.state() | {"adapter": probe})
    losses, gradient = [], np.empty(0)
    for step, (row_ids, row_labels) in enumerate(zip(ids, labels)):
        losses.append(session.step(row_ids, row_labels, step, rate).loss)
        if step == 0:
            gradient = session.state()["exp_avg"].astype(np.float64) / (
                1.0 - session.manifest.method["beta1"]
            )
    return {"gradient": gradient, "losses": np.array(losses), "adapter": session.state()["adapter"]}


def facts() -> dict[str, Any]:
    """Machine and versions, and where the library with XNNPACK lies in this process."""
    from importlib.metadata import version

    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [
        int(end, 16)
        for line in lines
        if "/libexecutorch_backend_xnnpack." in line
        for end in line.split()[0].split("-")
    ]
    packages = {name: version(name) for name in ("torch", "executorch", "numpy")}
    return {"machine": platform.machine(), "libc": " ".join(platform.libc_ver()), "python": platform.python_version(),
            **packages, "runtime": [min(ends), max(ends)]}  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
