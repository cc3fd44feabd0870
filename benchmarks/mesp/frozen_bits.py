"""Frozen weights in 16, 8 and 4 bits on one GPU: time, memory and gradient of a step.

    python -m benchmarks.mesp.frozen_bits

8 layers of an 8B shape, random weights, rank 8 on all seven linears, AdamW, everything computed
again. `method.bits` has int8 (8) and NF4 (4), whose matrices are made dense when their product
needs them. FP8 (e4m3, one scale a row) is measured here only: made dense as the others, and with
products of FP8 on the tensor cores, for which activations and gradients are rounded as well, one
scale a token. Each form is a process of its own; steps are taken in turns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import finish, median, parse_args
from benchmarks.mesp import peers

NEEDS = ("cuda",)
TITLE = "Frozen weights in 16, 8 and 4 bits"
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"bits": 8},
    "NF4": {"bits": 4},
    "FP8, made dense": {"bits": 8},
    "FP8 products": {"bits": 8, "mlp_chunk_tokens": 8192},  # chunks would make matrices dense
}
SHAPES = [(1, 512), (1, 2048), (1, 8192)]
COLUMNS = [
    {"key": "form", "title": "Weights"},
    {"key": "tokens", "title": "Tokens"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "ratio", "title": "× bfloat16"},
    {"key": "weights_bytes", "title": "Weights (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "step_bytes", "title": "Step (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "cosine", "title": "Gradient's cosine with bfloat16's", "digits": 4},
]


def main() -> None:
    """Measure and write the table."""

    def more(parser: Any) -> None:
        parser.add_argument("--worker", nargs=2, metavar=("FORM", "MODEL"))

    args = parse_args(__doc__, more)
    if args.worker:
        serve(args.worker[0], Path(args.worker[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        peers.save_model("8B, 8 layers", folder)
        rows = measure(folder, args.repeats)
    finish("mesp/frozen_bits", rows, args, columns=COLUMNS, title=TITLE)


def measure(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Take steps of all forms in turns, and compare their gradients."""
    started = {form: peers.Worker(__file__, form, folder) for form in FORMS}
    workers = {form: worker for form, worker in started.items() if worker.ready()}
    found = {form: np.load(folder / f"{form}.npz") for form in workers}
    rows = []
    for shape in SHAPES:
        steps: dict[str, list[dict[str, Any]]] = {form: [] for form in workers}
        for turn in range(-3, repeats):
            names = list(workers)
            for form in reversed(names) if turn % 2 else names:
                one = workers[form].ask(step=shape, number=turn)
                if turn >= 0 and one is not None:
                    steps[form].append(one)
        whole = median([one["s"] for one in steps["bfloat16"]])
        for form, taken in steps.items():
            seconds = [one["s"] for one in taken]
            rows.append({
                "form": form, "tokens": shape[1], "step_s": seconds,
                "ratio": median(seconds) / whole,
                "weights_bytes": int(found[form]["weights_bytes"]),
                "step_bytes": max(one["step_bytes"] for one in taken),
                "cosine": cosine(found[form]["gradient"], found["bfloat16"]["gradient"]),
            })  # fmt: skip
            print(rows[-1], flush=True)
    for worker in started.values():
        worker.end()
    return rows


def cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the cosine of two gradients, float64."""
    a = ours.astype(np.float64)
    b = theirs.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def serve(form: str, folder: Path) -> None:
    """Take steps as they are asked for, until the input ends."""
    import torch

    torch.manual_seed(0)
    session, weights = opened(form, folder)
    vocab = peers.MODELS["8B, 8 layers"]["vocab_size"]
    ids = np.random.default_rng(1).integers(0, vocab, (1, 512))
    np.savez(folder / f"{form}.npz", gradient=gradient(session, ids), weights_bytes=weights)
    peers.answer({"weights_MiB": weights >> 20, "torch": torch.__version__})

    def step(ids: Any, number: int) -> None:
        session.step(ids.numpy(), ids.numpy().copy(), number, 1e-4)

    peers.serve_steps(step, weights, vocab)


def gradient(session: Any, ids: np.ndarray) -> np.ndarray:
    """Return the gradient of every B at the start, where A's is 0: float32, one dimension."""
    found = {}
    apply = session.optimizer.apply

    def keep(parameters: Any, ga: Any, gb: Any) -> None:
        found[parameters.b_name] = gb.float().flatten().cpu().numpy()

    session.optimizer.apply = keep
    session.step(ids, ids.copy(), 0, 0.0)
    session.optimizer.apply = apply
    return np.concatenate([found[name] for name in sorted(found)])


def opened(form: str, folder: Path) -> tuple[Any, int]:
    """A session of mesp over weights of this form, and their bytes with embedding and head."""
    import torch

    from ondevice.core.registry import method_config, open_session
    from ondevice.methods.mesp.torch import weights as mesp_weights

    loaded = peers.wrapped(folder, "bits" in FORMS[form])
    if form.startswith("FP8"):
        mesp_weights.packed = lambda weight, bits: Fp8Matrix(weight)
    config = method_config("mesp", {**FORMS[form], "recompute": "all"})
    session: Any = open_session(loaded, config, 0, "cuda")
    if form == "FP8 products":
        with_products(session.model)
    torch.cuda.empty_cache()
    adapters = sum(tensor.nbytes for tensor in session.optimizer.tensors.values())
    return session, torch.cuda.memory_allocated() - adapters


class Fp8Matrix:
    """e4m3 with a scale a row: the largest magnitude of the row over 448."""

    kind = "fp8"

    def __init__(self, weight: Any) -> None:
        self.dtype = weight.dtype
        self.shape = tuple(weight.shape)
        self.weight, self.scale = rounded(weight)

    def dense(self) -> Any:
        return self.weight.to(self.dtype) * self.scale.to(self.dtype)


def rounded(x: Any) -> tuple[Any, Any]:
    """Round rows to e4m3: the numbers, and their scales, float32 [rows, 1]."""
    import torch

    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (x / scale.to(x.dtype)).to(torch.float8_e4m3fn), scale


def with_products(model: Any) -> None:
    """Let the stages multiply FP8 by FP8: x W^T, and g W with W's scales in g before it is
    rounded."""
    import torch

    kernels = model.blocks.stages.kernels
    operations: Any = torch
    multiply = operations._scaled_mm  # what torchao calls, too

    def frozen_linear(x: Any, matrix: Any, bias: Any, into: Any) -> Any:
        x8, scale = rounded(x)
        y = multiply(x8, matrix.weight.t(), scale, matrix.scale.t(), out_dtype=x.dtype)
        if bias is not None:
            y = y.add_(bias)
        return y if into is None else into.add_(y)

    def frozen_backward(g: Any, matrix: Any, into: Any) -> Any:
        g8, scale = rounded(g * matrix.scale.t().to(g.dtype))
        columns = matrix.weight.t().contiguous().t()  # the product reads its second factor so
        ones = torch.ones(1, columns.shape[1], device=g.device)
        y = multiply(g8, columns, scale, ones, out_dtype=g.dtype)
        return y if into is None else into.add_(y)

    kernels.frozen_linear = frozen_linear
    kernels.frozen_backward = frozen_backward


if __name__ == "__main__":
    main()
