"""Block programs of golden cases, and what a step of each has to come to: gradients in float64 that nothing of ondevice
computed (`tests/golden/gradients.py`)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[5]
sys.path.insert(0, str(ROOT))
NAMES = ("llama, many labels", "gemma3_text")
"""The first has more labels than go through the head together, the second two kinds of blocks. With
`ONDEVICE_TESTS_ALL=1` there is every case that the app takes."""


def write(out: Path, make_artifact: Callable[..., None]) -> None:
    """Write every case into a folder of its name under `golden`, which has no others."""
    names = every() if os.environ.get("ONDEVICE_TESTS_ALL") else NAMES
    folder = out / "golden"
    for left in folder.iterdir() if folder.exists() else ():
        if left.is_dir() and left.name not in names:
            shutil.rmtree(left)
        elif left.is_file():
            left.unlink()
    for name in names:
        write_case(folder / name, name, make_artifact)


def every() -> tuple[str, ...]:
    """Every case that the app takes: not blocks that only PyTorch has, and no experts."""
    from tests.golden.cases import HOSTED

    return tuple(HOSTED)


def write_case(folder: Path, name: str, make_artifact: Callable[..., None]) -> None:
    """Write `program`, and next to it the batch, the adapter and the gradient as flat vectors.

    `case.json` has, for each A and B, its range of the vector and the largest norm of an error.
    """
    from ondevice.core.registry import method_config
    from ondevice.methods.mesp.check import IN_BLOCKS
    from ondevice.methods.mesp.lora import FlatLayout, lora_parameters
    from ondevice.models import read_dims
    from ondevice.models.registry import family_classes
    from tests.golden.gradients import FLOOR
    from tests.golden.test_gradients import BY_NAME, folder_of, golden, padded_batch, settings
    from tests.methods.rounding import ALLOWED

    case = BY_NAME[name]
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / f"model {hashlib.sha256(repr(case).encode()).hexdigest()[:8]}"
    if not model.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copytree(folder_of(case, Path(scratch)), model)
    ids, labels = padded_batch(case)
    tokens = ids.shape[1]
    flags = f"--method mesp --length {tokens} --batch-size {case.rows} --set method.loss_tiles=3"
    flags += f" --set method.rank={case.rank} --set method.alpha={case.alpha}"
    flags += f" --target-modules {','.join(case.targets)}"
    make_artifact(folder / "program", "android-cpu", flags, ["--model", str(model)])

    dims = read_dims(str(model))
    config = method_config("mesp", settings(case))
    family = family_classes()[dims.family]
    layout = FlatLayout.build(lora_parameters(dims, family, config, IN_BLOCKS, "a block program"), dims.layers)
    about, gradients = golden(case.name)
    norms = {key: float(np.linalg.norm(value)) for key, value in gradients.items()}
    least = FLOOR * max(norms.values())
    tensors = []
    for entry in layout.entries:
        for key, start in ((entry.parameters.a_name, entry.a), (entry.parameters.b_name, entry.b)):
            limit = ALLOWED * about["modelled_errors"][key] * max(norms[key], least)
            tensors.append({"name": key, "start": start, "size": gradients[key].size, "limit": limit})
    described = {
        "rows": case.rows, "tokens": tokens, "ids": ids.ravel().tolist(), "labels": labels.ravel().tolist(),
        "loss": about["loss"], "tensors": tensors,
    }  # fmt: skip
    save_file(
        {"adapter": layout.to_flat(case.adapter()), "gradient": layout.to_flat(gradients)},
        folder / "case.safetensors",
    )
    (folder / "case.json").write_text(json.dumps(described), encoding="utf-8")
