"""How much of the exact gradient a zeroth-order estimate has (the paper's Table 3), by the number of
parameters that it moves.

    python -m benchmarks.mesp.mezo_gradient                 SmolLM2-135M, 4 rows of WikiText, a minute

An estimate of one query is ((L(x + e z) - L(x - e z)) / 2e) z of the loss L at the parameters x. The
exact gradient is MeSP's. If n numbers move, the cosine of the two has the mean sqrt(2 / (pi n)),
whatever the model is: z is random, and one of n directions is the gradient's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish, parse_args
from benchmarks.mesp.blocks import MODEL
from ondevice.core.registry import method_config
from ondevice.methods.mesp.agreement import probe
from ondevice.methods.mesp.torch.session import MespSession
from ondevice.models import load_model

NEEDS = ("torch",)
SCALE = 1e-3
"""e, MeZO's own."""
ADAPTER_SCALE = 0.002
"""Of B: an adapter after a few steps."""
PARTS = {
    "one B": lambda name: ".15.self_attn.q_proj.lora_B" in name,
    "pairs of one block": lambda name: ".layers.15." in name,
    "pairs of ten blocks": lambda name: ".layers.1" in name and ".layers.1." not in name,
    "all pairs": lambda name: True,
}
COLUMNS = [
    {"key": "part", "title": "What moves"},
    {"key": "numbers", "title": "Numbers"},
    {"key": "cosine", "title": "Cosine with the exact gradient, mean", "digits": 4},
    {"key": "cosines", "title": "by seed", "digits": 4},
    {"key": "chance", "title": "sqrt(2 / πn)", "digits": 4},
    {"key": "sign_agreement", "title": "Signs that agree", "digits": 3},
    {"key": "relative_error", "title": "Relative error", "digits": 0},
]


class Loss:
    """A model with pairs, and its loss on some rows of text."""

    def __init__(self, data: Path, rows: int, tokens: int) -> None:
        loaded = load_model(MODEL, dtype="float32", device="cpu")
        text = (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8")[:200_000]
        tokenizer: Any = loaded.tokenizer
        ids = tokenizer(text, verbose=False)["input_ids"][: rows * tokens]
        self.ids = np.array(ids, np.int64).reshape(rows, tokens)
        config = method_config("mesp", {"rank": 8, "alpha": 16.0, "kernels": "torch"})
        self.session: Any = MespSession(loaded, config, 0, "cpu")  # type: ignore[arg-type]
        self.adapter = probe(self.session, ADAPTER_SCALE)

    def gradient(self) -> dict[str, np.ndarray]:
        """Return the exact gradient of the mean loss, by PEFT's names."""
        self.session.load_adapter(self.adapter)
        shapes = {name: value.shape for name, value in self.adapter.tensors.items()}
        found: dict[str, np.ndarray] = {}

        def keep(one: Any, ga: torch.Tensor, gb: torch.Tensor) -> None:
            for name, value in ((one.a_name, ga), (one.b_name, gb)):
                own = value.double().numpy()
                found[name] = own if own.shape == shapes[name] else own.T

        apply, self.session.optimizer.apply = self.session.optimizer.apply, keep
        self.session.step(self.ids, self.ids, 0, 0.0)
        self.session.optimizer.apply = apply
        return found

    def __call__(self, change: dict[str, np.ndarray]) -> float:
        """Return the mean loss with a change added to the pairs."""
        moved = {
            name: value + change[name] if name in change else value
            for name, value in self.adapter.tensors.items()
        }
        self.session.load_adapter(replace(self.adapter, tensors=moved))
        nll, counts = self.session.evaluate(self.ids, self.ids)
        return float(nll.astype(np.float64).sum() / counts.sum())


def measured(loss: Loss, exact: dict[str, np.ndarray], part: str, seeds: int) -> dict[str, Any]:
    """Return a row of the table."""
    names = [name for name in exact if PARTS[part](name)]
    gradient = np.concatenate([exact[name].ravel() for name in names])
    cosines, signs, errors = [], [], []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        z = {name: random.standard_normal(exact[name].shape).astype(np.float32) for name in names}
        ends = [loss({name: e * value for name, value in z.items()}) for e in (SCALE, -SCALE)]
        estimate = np.concatenate([value.ravel() for value in z.values()]).astype(np.float64)
        estimate *= (ends[0] - ends[1]) / (2 * SCALE)
        norms = np.linalg.norm(estimate) * np.linalg.norm(gradient)
        cosines.append(float(estimate @ gradient / norms))
        signs.append(float((np.sign(estimate) == np.sign(gradient)).mean()))
        errors.append(float(np.linalg.norm(estimate - gradient) / np.linalg.norm(gradient)))
    row = {
        "part": part,
        "numbers": gradient.size,
        "cosine": float(np.mean(cosines)),
        "cosines": cosines,
        "chance": float(np.sqrt(2 / (np.pi * gradient.size))),
        "sign_agreement": float(np.mean(signs)),
        "relative_error": float(np.mean(errors)),
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Measure every part."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", type=Path, default=Path("../shared/data"))
        parser.add_argument("--rows", type=int, default=4)
        parser.add_argument("--tokens", type=int, default=64)
        parser.add_argument("--seeds", type=int, default=16)

    args = parse_args(__doc__, more, repeats=1)
    torch.set_num_threads(1)
    loss = Loss(args.data, args.rows, args.tokens)
    exact = loss.gradient()
    rows = [measured(loss, exact, part, args.seeds) for part in PARTS]
    notes = [
        f"SmolLM2-135M, rank 8 on all seven linear layers, {args.rows} rows of {args.tokens} tokens of "
        f"WikiText-2, one query, a scale of {SCALE:g}, {args.seeds} seeds."
    ]
    finish(
        "mesp/mezo_gradient",
        rows,
        args,
        COLUMNS,
        title="Zeroth-order estimates and the exact gradient",
        notes=notes,
    )


if __name__ == "__main__":
    main()
