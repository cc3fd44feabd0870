"""How true a program's projected gradients are: against eager PyTorch, and against float32.

    python -m benchmarks.prge.executorch_gradients --programs build/programs --record
    python -m benchmarks.prge.executorch_gradients --losses FOLDER SPEC      losses of one quantisation, as JSON

Projected gradients of 12 directions are correlated, each on its own row of text.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish, parse_args
from benchmarks.prge.programs import (
    Q4,
    SEED,
    Program,
    Spec,
    add_programs,
    build_program,
    child,
    ensure,
    folder_of,
    recall,
    remember,
    wanted,
)

NEEDS = ("executorch",)
DATA = ROOT / "examples/data/reviews_train.jsonl"
SCALES = (1e-3, 1e-2, 3e-2)
DIRECTIONS = 12
LOSSES = {
    "fp32": {"method": "losses", "generator": "op"},
    "8da4w": {"method": "losses", "generator": "op", "quantize": "8da4w"},
    "q4": {"method": "losses", **Q4},
}
PAIRS = (
    ("fp32", "program", "fp32", "eager"), ("q4", "program", "q4", "eager"), ("q4", "program", "fp32", "program"),
    ("8da4w", "program", "8da4w", "eager"), ("8da4w", "program", "fp32", "program"),
)  # fmt: skip
COLUMNS = [
    {"key": "tested", "title": "Tested"},
    {"key": "against", "title": "Against"},
    {"key": "scale", "title": "ε"},
    {"key": "correlation", "title": "Correlation", "digits": 4},
    {"key": "same_sign", "title": "Same sign of 12"},
    {"key": "relative_error", "title": "Relative error", "digits": 4},
    {"key": "loss_error", "title": "Relative loss error"},
]


def losses(folder: Path, spec: Spec) -> dict[str, Any]:
    """Losses [scale][direction] -> [plus, minus] of one quantisation, from its program and from
    eager PyTorch."""
    import torch

    from ondevice.methods.prge.layout import NOISE_TENSOR
    from ondevice.runtime_ops import generator

    program, (loaded, eager) = Program(spec, folder), build_program(spec)
    batches = text_batches(loaded.tokenizer, spec.length)
    by_name: dict[str, Any] = {"program": [], "eager": []}
    for scale in SCALES:
        for side in by_name.values():
            side.append([])
        for step, (ids, labels) in enumerate(batches):
            z = generator.normal(SEED, step, NOISE_TENSOR, 1, 0, eager.layout.size)[0] * np.float32(
                scale
            )
            copies = np.stack([z, -z])
            by_name["program"][-1].append(program.run(ids, labels, copies)[0].tolist())
            tensors = [torch.from_numpy(value) for value in (ids, labels, copies)]
            with torch.inference_mode():
                values = eager.losses(
                    *tensors[:2], lambda start, n, c=tensors[2]: c[:, start : start + n]
                )
            by_name["eager"][-1].append(values.tolist())
    return by_name


def text_batches(tokenizer: Any, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """One row of reviews each, as training would see it: only the answer carries labels."""
    from ondevice.data import encode, pad_examples, read_rows

    dataset = encode(read_rows(DATA, task="sst2"), tokenizer, max_length_tokens=length)
    examples = [item.example for item in dataset.items if len(item.example.ids) <= length][
        :DIRECTIONS
    ]
    batches = [pad_examples([example], length, tokenizer.pad_token_id or 0) for example in examples]
    return [(batch.ids, batch.labels) for batch in batches]


def gradient_rows(losses: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pair at every scale."""
    rows = []
    for tested, tested_side, against, against_side in PAIRS:
        if tested not in losses or against not in losses:
            continue
        for index, scale in enumerate(SCALES):
            pair = [
                np.array(losses[tested][tested_side][index]),
                np.array(losses[against][against_side][index]),
            ]
            ours, reference = ((loss[:, 0] - loss[:, 1]) / (2 * scale) for loss in pair)
            rows.append({
                "tested": f"{tested} {tested_side}",
                "against": f"{against} {against_side}",
                "scale": scale,
                "correlation": float(np.corrcoef(ours, reference)[0, 1]),
                "same_sign": int((np.sign(ours) == np.sign(reference)).sum()),
                "relative_error": float(np.linalg.norm(ours - reference) / np.linalg.norm(reference)),
                "loss_error": float(np.max(np.abs(pair[0] - pair[1]) / np.abs(pair[1]))),
            })  # fmt: skip
    return rows


def main() -> None:
    args = parse_args(__doc__, add_programs)
    recalled = {}
    with folder_of(args) as folder:
        for name, values in LOSSES.items():
            spec = replace(Spec(), **values, model=args.model)
            if not wanted(spec, folder, args):
                continue
            ensure(spec, folder)
            key = f"gradients {spec.name}"
            if key not in recall(folder):
                words = "--losses", str(folder), json.dumps(asdict(spec))
                remember(folder, key, child("benchmarks.prge.executorch_gradients", *words))
            recalled[name] = recall(folder)[key]
    if not recalled:
        raise SystemExit("--cached: expected lowered programs in --programs, found none")
    title = f"Projected gradients of {DIRECTIONS} directions on text, {args.model.split(':')[-1]}, 64 tokens"
    shown = {"title": title, "show_versions": ["torch", "executorch"]}
    finish("prge/executorch_gradients", gradient_rows(recalled), args, COLUMNS, **shown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--losses"]:
        print(json.dumps(losses(Path(sys.argv[2]), Spec(**json.loads(sys.argv[3])))))
    else:
        main()
