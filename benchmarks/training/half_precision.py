"""Do parameters in bfloat16 move as float32 ones do, at each method's default rate?

    python -m benchmarks.training.half_precision --record

A random Llama trains for so many steps on the same random rows, once in float32 and once in
bfloat16, from the same bfloat16 values. A run's movement is what it adds to its parameters. `moved`
is the share of the parameters that are others at the end; `length` is the length of the movement
and `along` its part along float32's movement, both as shares of float32's length. The variants with
nearest rounding are what PyTorch does by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.common import finish, parse_args

NEEDS = ("torch",)

COLUMNS = [
    {"key": "method", "title": "Method"},
    {"key": "rate", "title": "Rate", "digits": 6},
    {"key": "numbers", "title": "Numbers"},
    {"key": "moved", "title": "Moved", "digits": 3},
    {"key": "length", "title": "Length", "digits": 3},
    {"key": "along", "title": "Along float32's", "digits": 3},
]
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4}  # fmt: skip
NEAREST = "bfloat16, nearest"
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "revffn": {},
    "mezo": {},
    "lora": {},
    "lora-fa": {},
}
"""Methods, with the settings of the variant that rounds to the nearest."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=4, help="rows of 32 random tokens a step")
    parser.add_argument("--methods", default=",".join(METHODS))


def start_model(dtype: torch.dtype) -> Any:
    """Build the same model in either precision: its weights are bfloat16 values."""
    from ondevice.models.load import tiny_model

    loaded = tiny_model("llama", **SIZES)
    random = torch.Generator().manual_seed(0)
    for parameter in loaded.model.parameters():
        if parameter.ndim > 1:  # as transformers initialises a Llama; the norms stay 1
            parameter.data.normal_(0.0, 0.02, generator=random)
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return loaded


def train(
    name: str, dtype: torch.dtype, steps: int, rows: int, **settings: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Train so many steps; return the parameters before and after, float32 and flat."""
    from ondevice.core.registry import method_config, open_session

    config = method_config(name, settings)
    session = open_session(start_model(dtype), config, 1)
    before = _parameters(session)
    for step in range(steps):
        ids = np.random.default_rng(step).integers(0, 256, (rows, 32))
        session.step(ids, ids.copy(), step, config.learning_rate)
    return before, _parameters(session)


def _parameters(session: Any) -> np.ndarray:
    values = {
        name: value for name, value in session.state().items() if "/" not in name and value.ndim > 0
    }
    adapter = session.adapter()
    if adapter is not None:
        values = adapter.tensors
    wide = [
        (value.astype(np.uint32) << 16).view(np.float32) if value.dtype == np.uint16 else value.astype(np.float32)
        for _, value in sorted(values.items()) if value.dtype.kind in "fu" and value.size > 1
    ]  # fmt: skip
    return np.concatenate([value.ravel() for value in wide]).astype(np.float64)


def nearest(name: str, run: Callable[..., Any]) -> Any:
    """Run a method with PyTorch's own rounding of bfloat16 parameters; None for one that has
    none."""
    if name == "revffn":
        return run(rounding="nearest")
    if name == "full":
        from ondevice.methods.adamw import TorchAdamW

        def plain(parameters: Any, decay: float) -> Any:
            return [TorchAdamW(parameters, decay)]

        with mock.patch("ondevice.methods.adamw.open_adamw", plain):
            return run()
    if name == "mezo":
        with mock.patch(
            "ondevice.methods.mezo.torch.stochastic_round",
            lambda out, weight, seed: out.copy_(weight),
        ):
            return run()
    return None


def main() -> None:
    """Train each method in each precision, and compare the movements."""
    args = parse_args(__doc__, arguments, repeats=1)
    from ondevice.core.registry import method_config

    rows = []
    for name in args.methods.split(","):

        def run(dtype: torch.dtype = torch.bfloat16, name: str = name, **settings: Any) -> Any:
            return train(name, dtype, args.steps, args.rows, **settings)

        reference = run(torch.float32)
        along = reference[1] - reference[0]
        for numbers, result in (
            ("float32", reference),
            ("bfloat16", run()),
            (NEAREST, nearest(name, run)),
        ):
            if result is None:
                continue
            movement = result[1] - result[0]
            rows.append({
                "method": name,
                "rate": method_config(name).learning_rate,
                "numbers": numbers,
                "moved": float((movement != 0).mean()),
                "length": float(np.linalg.norm(movement) / np.linalg.norm(along)),
                "along": float(movement @ along / (along @ along)),
            })  # fmt: skip
            print(rows[-1], flush=True)
    notes = [
        f"A random Llama of {SIZES['num_hidden_layers']} layers and hidden size {SIZES['hidden_size']}, {args.steps} "
        f"steps of {args.rows} rows of 32 tokens, at the method's default rate and without a schedule."
    ]
    finish(
        "training/half_precision",
        rows,
        args,
        COLUMNS,
        title="Movement of bfloat16 parameters",
        notes=notes,
    )


if __name__ == "__main__":
    main()
