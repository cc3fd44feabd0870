"""A block program of a golden case, and what its step has to come to: gradients in float64 that nothing of ondevice
computed (`tests/golden/gradients.py`)."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[5]
sys.path.insert(0, str(ROOT))
CASE = "llama, many labels"
"""It has more labels than go through the head together."""


def write(out: Path, make_artifact: Callable[..., None]) -> None:
    """Write `golden/program`, and next to it the batch, the adapter and the gradient as flat vectors.

    `case.json` has, for each A and B, its range of the vector and the largest norm of an error.
    """
    from ondevice.core.registry import method_config
    from ondevice.methods.mesp.lora import FlatLayout, lora_parameters
    from ondevice.models import read_dims
    from ondevice.models.registry import family_classes
    from tests.golden.gradients import FLOOR
    from tests.golden.test_gradients import BY_NAME, folder_of, golden, settings
    from tests.methods.rounding import ALLOWED

    case = BY_NAME[CASE]
    folder = out / "golden"
    folder.mkdir(exist_ok=True)
    model = folder / f"model {hashlib.sha256(repr(case).encode()).hexdigest()[:8]}"
    if not model.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copytree(folder_of(case, Path(scratch)), model)
    flags = f"--method mesp --length {case.tokens} --batch-size {case.rows} --set method.loss_tiles=3"
    flags += f" --set method.rank={case.rank} --set method.alpha={case.alpha}"
    make_artifact(folder / "program", "android-cpu", flags, ["--model", str(model)])

    dims = read_dims(str(model))
    config = method_config("mesp", settings(case))
    layout = FlatLayout.build(lora_parameters(dims, family_classes()[dims.family], config), dims.layers)
    about, gradients = golden(case.name)
    norms = {name: float(np.linalg.norm(value)) for name, value in gradients.items()}
    least = FLOOR * max(norms.values())
    tensors = []
    for entry in layout.entries:
        for name, start in ((entry.parameters.a_name, entry.a), (entry.parameters.b_name, entry.b)):
            limit = ALLOWED * about["modelled_errors"][name] * max(norms[name], least)
            tensors.append({"name": name, "start": start, "size": gradients[name].size, "limit": limit})
    ids, labels = case.batch()
    described = {
        "rows": case.rows, "tokens": case.tokens, "ids": ids.ravel().tolist(), "labels": labels.ravel().tolist(),
        "loss": about["loss"], "tensors": tensors,
    }  # fmt: skip
    save_file(
        {"adapter": layout.to_flat(case.adapter()), "gradient": layout.to_flat(gradients)},
        folder / "case.safetensors",
    )
    (folder / "case.json").write_text(json.dumps(described), encoding="utf-8")
