"""Write the golden gradients: exact in float64, of every pair of every case.

    python -m tests.golden.gradients            writes tests/golden/gradients.safetensors

Loss and gradients come from `decoders` and autograd: nothing of ondevice takes part. A tensor's
modelled error, by which an implementation in float32 is judged, is that of `tests.methods.rounding`
on the same computation.

The file holds "CASE/NAME" in float64 and "CASE/ids", "CASE/labels" in int64. Its metadata has
`cases`: each one's config.json, rank, alpha, loss and modelled errors. Weights and the adapter are
those of `cases`, which says how any language makes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.golden.cases import CASES, Case
from tests.golden.decoders import loss
from tests.methods.rounding import modelled_errors

FILE = Path(__file__).with_name("gradients.safetensors")
FLOOR = 1e-4
"""Of the largest tensor's norm: what a tensor's error is relative to at least."""


def exact(case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """Loss of a case, and the gradient of every A and B."""
    weights = {name: torch.from_numpy(value).double() for name, value in case.weights().items()}
    leaves = {
        name: torch.from_numpy(value).double().requires_grad_()
        for name, value in case.adapter().items()
    }
    for name, a in leaves.items():
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            delta = leaves[f"{path}.lora_B.weight"] @ a
            weights[f"{path}.weight"] = weights[f"{path}.weight"] + case.alpha / case.rank * delta
    ids, labels = map(torch.from_numpy, case.batch())
    value = loss(case.config, weights, ids, labels)
    found = torch.autograd.grad(value, list(leaves.values()))
    return value.item(), {name: one.numpy() for name, one in zip(leaves, found, strict=True)}


def relative_errors(ours: dict[str, np.ndarray], golden: dict[str, np.ndarray]) -> dict[str, float]:
    """||ours - golden|| / ||golden|| of each tensor."""
    assert ours.keys() == golden.keys()
    norms = {name: float(np.linalg.norm(value)) for name, value in golden.items()}
    least = FLOOR * max(norms.values())
    return {
        name: float(np.linalg.norm(ours[name] - value)) / max(norms[name], least)
        for name, value in golden.items()
    }


def write() -> None:
    """Write the file."""
    tensors, cases = dict[str, np.ndarray](), dict[str, Any]()
    for case in CASES:
        value, _ = exact(case)
        found, rounding = modelled_errors(lambda case=case: exact(case)[1], relative_errors)
        arrays = dict(zip(("ids", "labels"), case.batch())) | found
        tensors |= {
            f"{case.name}/{name}": np.ascontiguousarray(one) for name, one in arrays.items()
        }
        cases[case.name] = {"config": case.config, "rank": case.rank, "alpha": case.alpha,
                            "loss": value, "modelled_errors": rounding}  # fmt: skip
    save_file(tensors, FILE, {"cases": json.dumps(cases)})
    print(f"{FILE}: {len(cases)} cases, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    write()
