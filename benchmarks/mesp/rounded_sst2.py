"""The cost of rounding in accuracy: SST-2 with the weights of each form of block programs, in eager
PyTorch.

python -m benchmarks.mesp.rounded_sst2          300 steps of 8 rows, five seeds, every form; on a GPU if there is one

The programs' gradients are those of eager PyTorch over the same rounded weights (an export checks
it: 1e-4, or for products of integers a cosine of 0.98), so many runs can be made if they are quick.
Integers are taken here as XNNPACK has them: each row of activations, or of scaled gradients,
rounded to 8 bits between its smallest and its largest number. `benchmarks.mesp.blocks_sst2` makes
the same runs with the programs in their runtime.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import finish, parse_args
from benchmarks.mesp import blocks_sst2

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = ("cuda",)
COLUMNS = [
    column
    for column in blocks_sst2.COLUMNS
    if column["key"] not in ("gradient_cosine_float32", "step_s")
]


def main() -> None:
    """Train every seed of every form, and write the table."""

    def more(parser: Any) -> None:
        blocks_sst2.add_protocol(parser, valid_rows=500, processes=1)
        parser.add_argument("--tokens", type=int, default=64, help="longer rows are left out")

    args = parse_args(__doc__, more)
    forms = args.forms.split(",")
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        data = blocks_sst2.protocol_rows(args, Path(scratch), args.tokens)
        common = (args.model, data["train"], data["valid"], args.tokens, args.batch, args.rate)
        futures = {
            form: [pool.submit(run, form, *common, args.steps, seed) for seed in range(args.seeds)]
            for form in forms
        }
        before = {form: pool.submit(run, form, *common, 0, 0) for form in forms}
        for form in forms:
            results = [future.result() for future in futures[form]]
            blocks_sst2.add_row(rows, form, args, before[form].result(), results)
    notes = [
        f"{args.steps} steps of {args.batch} rows, AdamW, rate {args.rate:g} falling to 0, rank 8; eager PyTorch over "
        "rounded weights, not the runtime."
    ]
    finish("mesp/rounded_sst2", rows, args, columns=COLUMNS, title="SST-2 by rounding", notes=notes)


def run(
    form: str,
    model: str,
    train: Path,
    valid: Path,
    tokens: int,
    batch: int,
    rate: float,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """Return accuracy and loss on the validation rows after a run, and seconds of the median
    step."""
    import torch

    from ondevice.core.registry import method_config
    from ondevice.data import Batches, pad_id_of, read_dataset
    from ondevice.methods.mesp.torch.session import MespSession
    from ondevice.models import load_model
    from ondevice.training.evaluate import evaluate_dataset

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(model, dtype="float32", device="cpu")
    kernels = round_weights(loaded, form)
    network: Any = loaded.model
    network.to(device)
    config = method_config("mesp", {"rank": 8, "alpha": 16.0, "kernels": "torch"})
    session: Any = MespSession(loaded, config, seed, device)  # type: ignore[arg-type]
    if kernels is not None:
        session.model.blocks.stages.kernels = kernels
    pad = pad_id_of(loaded.tokenizer)
    rows, kept = (
        read_dataset(path, loaded.tokenizer, task="sst2", max_length_tokens=tokens)
        for path in (train, valid)
    )
    batches, seconds = Batches(rows, batch, (32, tokens), seed, pad), [0.0]
    for step in range(steps):
        given, started = batches.at(step), time.perf_counter()
        session.step(given.ids, given.labels, step, rate * (1 - step / steps))
        seconds.append(time.perf_counter() - started)
    result = evaluate_dataset(session, kept, pad)
    assert result is not None
    return {"accuracy": result.accuracy, "loss": result.loss, "step_s": statistics.median(seconds)}


def round_weights(loaded: Any, form: str) -> Any:
    """Round a model's matrices as a form does; return kernels that multiply integers, if its
    products are of them."""
    import torch

    from ondevice.methods.mesp.block_functions import LINEAR_FORMS, TABLE_FORMS
    from ondevice.methods.mesp.frozen import Q4
    from ondevice.methods.mesp.torch.kernels import TorchKernels
    from ondevice.runtime_ops.block_ops import grouped

    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if weight.ndim == 2:
                kind = (
                    TABLE_FORMS if "embed_tokens" in name or "lm_head" in name else LINEAR_FORMS
                )[form]
                packed = kind.pack(name, weight.float())
                weight.copy_(
                    Q4.unpack(name, packed)[1]
                    if form in ("q4", "8da4w") and len(packed) == 3
                    else kind.matrix(name, packed).dense()
                )
    if not form.startswith("8da"):
        return None
    by_group = form == "8da4w"

    class Integers(TorchKernels):
        """Products of a frozen matrix with rows in 8 bits; the scale of W's rows goes with g
        (`mesp.integer`)."""

        def frozen_linear(
            self, x: Tensor, matrix: Any, bias: Tensor | None, into: Tensor | None
        ) -> Tensor:
            return super().frozen_linear(
                (grouped if by_group else eight_bits)(x), matrix, bias, into
            )

        def frozen_backward(self, g: Tensor, matrix: Any, into: Tensor | None) -> Tensor:
            weight = matrix.dense()
            scales = weight.abs().amax(-1) / 127
            levels = weight / scales[:, None]
            if by_group:
                levels = levels.round()
            return self.add_product(into, eight_bits(g * scales), levels)

    return Integers()


def eight_bits(x: Tensor) -> Tensor:
    """Round each row to 256 levels between its smallest and its largest number, zero among them, as
    XNNPACK does."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    scale = scale.where(scale > 0, 1.0)
    middle = (-128 - low / scale).round().clamp(-128, 127)
    return ((x / scale).round() + middle).clamp(-128, 127).sub(middle) * scale


if __name__ == "__main__":
    main()
