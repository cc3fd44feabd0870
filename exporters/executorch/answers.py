"""A program that answers, with weights of its own as constants: XNNPACK packs them once, and
multiplies packed matrices.

One method takes a prompt's next tokens, or one token; `answer_model` is the module. Matrices are
float32, or 8 or 4 bits (groups of 32) with activations that are rounded to 8 bits as they come;
with either the head has 8 bits, and the embedding, too. Nothing of a training program is shared, so
this is as good without one.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ondevice.artifact.adapter import Adapter
from ondevice.core.errors import ArtifactError, MissingPackageError, VerificationError
from ondevice.core.untrusted import read_object
from ondevice.exporters.executorch.answer_model import AnswerModel, Norm, flatten, linear
from ondevice.exporters.executorch.blocks_model import check_tokens
from ondevice.exporters.executorch.packed import (
    ANSWERS_FILE,
    FORMAT,
    PROGRAM_FILE,
    PackedModel,
    load_operators,
)
from ondevice.nn.adapters import adapted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ondevice.models import LoadedModel

log = logging.getLogger("ondevice.exporters")
FORMS = {
    "none": "none",
    "int8": "8da8w",
    "8da8w": "8da8w",
    "q4": "8da4w",
    "q4dq": "8da4w",
    "8da4w": "8da4w",
    "w8": "8da8w",
}
"""Of the weights that answer, by `export.quantize`."""
CHUNK_TOKENS = 128
"""Most tokens of a call. Memory for activations is planned for so many."""
GROUP = 32
LOGIT_ERROR = {"none": 1e-4, "8da8w": 5e-2, "8da4w": 5e-2}
"""Largest error against eager PyTorch over the same rounded weights: in float32 of any logit, as a
part of the largest; else the root mean square, as a part of the logits' standard deviation. Where
activations are rounded, the last bit of a sum decides to which level, and blocks pass that on: so
it may also be `NUDGED` times what eager's own logits move by when every norm's weight is changed by
`NUDGE`, relative."""
NUDGE = 1e-5
NUDGED = 1.25


def write_answers(
    folder: Path,
    loaded: LoadedModel,
    form: str,
    context_tokens: int,
    linears: Sequence[str] = (),
    rank: int = 0,
) -> tuple[AnswerModel, dict[str, Any]]:
    """Write `model.pte` and `answers.json` into `folder`; return what was lowered, in eager, and
    its description.

    Args:
        form: `none`, `8da8w` or `8da4w`.
        linears: layers that an adapter is on, by full names, with its `rank`.

    Raises:
        ModelError: the model has no such form.
        MissingPackageError: torchao or ExecuTorch is not installed.
    """
    load_operators()
    started = time.perf_counter()
    model = AnswerModel(loaded, context_tokens, linears, rank).eval()
    _round(model, form)
    chunk = min(CHUNK_TOKENS, context_tokens)
    log.info("lowering the program that answers (%s): minutes for 30 layers", form)
    program, delegates = _lower(model, chunk)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / PROGRAM_FILE, "wb") as file:
        program.write_to_file(file)
    plan = program.executorch_program.execution_plan[0]
    described = {
        "format": FORMAT,
        "weights": form,
        "vocab": loaded.dims.vocab,
        "context_tokens": context_tokens,
        "chunk_tokens": chunk,
        "rank": rank if linears else 0,
        "adapter_size": model.adapter_size,
        "layout": [asdict(pair) for pair in model.pairs],
        "planned_bytes": sum(plan.non_const_buffer_sizes),
        "delegates": delegates,
        "ops": sorted({f"{op.name}.{op.overload}".rstrip(".") for op in plan.operators}),
    }
    (folder / ANSWERS_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    log.info("lowered in %.0f s", time.perf_counter() - started)
    return model, described


def check_answers(
    folder: Path,
    model: AnswerModel,
    described: dict[str, Any],
    loaded: LoadedModel,
    adapter: Adapter | None = None,
) -> dict[str, float]:
    """Compare logits behind a prompt, and behind each of some tokens more, with eager PyTorch's.

    Args:
        loaded: the model in float32, as it was before anything was rounded.
        adapter: one that the program takes as an input.

    Returns:
        As parts of the largest logit: `max_rel_logit_error` against the same rounded weights,
            `max_rel_logit_error_float32` against the float32 model. If weights are rounded,
            `rel_logit_error` as `LOGIT_ERROR` has it.

    Raises:
        VerificationError: the program is further off than `LOGIT_ERROR` says.
    """
    program = PackedModel(folder)
    form = described["weights"]
    if adapter is not None:
        program.use(adapter)
    ids, length = check_tokens(loaded, described["context_tokens"], described["chunk_tokens"])
    found = np.stack(
        [program.feed(ids[:length]), *(program.feed([token]) for token in ids[length:])]
    )
    program.close()
    vector = (
        () if adapter is None else (torch.from_numpy(flatten(adapter, model.pairs, model.rank)),)
    )

    def eager() -> np.ndarray:
        cuts = ((0, length), (length, length + 1), (length + 1, length + 2))
        return np.stack(
            [
                model(torch.tensor([ids[a:b]]), torch.tensor([a]), *vector)[0].numpy()
                for a, b in cuts
            ]
        )

    with torch.no_grad():
        rounded = eager()
        with nullcontext() if adapter is None else adapted(loaded, adapter):
            exact = loaded.model(torch.tensor([ids])).logits[0, length - 1 :].float().numpy()
        moved = rounded
        if form != "none":
            with _nudged(model):
                moved = eager()
    largest = max(1.0, float(np.abs(exact).max()))
    values = {
        "max_rel_logit_error": float(np.abs(found - rounded).max()) / largest,
        "max_rel_logit_error_float32": float(np.abs(found - exact).max()) / largest,
    }
    worst = max(values.values())
    limit = LOGIT_ERROR[form]
    if form != "none":
        spread = max(_rms(exact - exact.mean()), 1e-30)
        values["rel_logit_error"] = worst = _rms(found - rounded) / spread
        limit = max(limit, NUDGED * _rms(moved - rounded) / spread)
    if not worst <= limit:
        raise VerificationError(
            "the program does not answer as eager PyTorch does; nothing was written",
            expected=f"logits within {limit:.3g} of {'the largest' if form == 'none' else 'their standard deviation'}",
            received=f"{worst:.3g}",
        )
    return values


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values.astype(np.float64)).mean()))


@contextmanager
def _nudged(model: AnswerModel) -> Iterator[None]:
    """Change the weights of norms by about `NUDGE` for the duration of a block."""
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    before = [norm.weight for norm in norms]
    generator = torch.Generator().manual_seed(0)
    try:
        for norm in norms:
            norm.weight = norm.weight * (
                1.0 + NUDGE * torch.randn(norm.weight.shape, generator=generator)
            )
        yield
    finally:
        for norm, weight in zip(norms, before):
            norm.weight = weight


def trial_adapter(described: dict[str, Any]) -> Adapter:
    """Return random pairs for every layer that a program takes an adapter for; they change its
    answers."""
    random = np.random.default_rng(0)
    tensors = {}
    rank = described["rank"]
    for pair in described["layout"]:
        a, b = (
            random.normal(size=(rank, pair["inputs"])),
            random.normal(size=(pair["outputs"], rank)),
        )
        tensors[f"{pair['linear']}.lora_A.weight"] = (a / pair["inputs"] ** 0.5).astype(np.float32)
        tensors[f"{pair['linear']}.lora_B.weight"] = (b * 0.05).astype(np.float32)
    targets = tuple(sorted({pair["linear"].rpartition(".")[2] for pair in described["layout"]}))
    return Adapter(tensors, rank, float(rank), targets, "")


def verify_answers(folder: Path, loaded: LoadedModel) -> dict[str, float]:
    """Repeat the check of an artifact's program; `loaded` is its model in float32, as it is.

    Raises:
        VerificationError: as `check_answers`.
    """
    load_operators()
    described = read_object(folder / ANSWERS_FILE, ArtifactError, hint="export the model again")
    linears = [pair["linear"] for pair in described["layout"]]
    model = AnswerModel(loaded, described["context_tokens"], linears, described["rank"]).eval()
    _round(model, described["weights"])
    return check_answers(folder, model, described, loaded, trial_adapter(described))


def rounded(weight: torch.Tensor, four_bits: bool) -> torch.Tensor:
    """Return a matrix as a program has it, float32 [outputs, inputs]."""
    layer = linear(weight)
    _quantize(layer, _linears(four_bits))
    return layer.weight.dequantize()  # type: ignore[operator]


def _round(model: AnswerModel, form: str) -> None:
    """Round the linear layers, the head and the embedding in place."""
    if form == "none":
        return
    _torchao()
    from torchao.quantization.granularity import PerAxis
    from torchao.quantization.quant_api import IntxWeightOnlyConfig

    rows = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    _quantize(model, rows, nn.Embedding)
    _quantize(model.head, _linears(False))
    _quantize(model.blocks, _linears(form == "8da4w"))


def _torchao() -> None:
    try:
        import torchao.quantization  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "torchao is not installed", hint="pip install 'ondevice-train[executorch]'"
        ) from None


def _linears(four_bits: bool) -> Any:
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig

    dtype, granularity = (torch.int4, PerGroup(GROUP)) if four_bits else (torch.int8, PerAxis(0))  # pyright: ignore[reportAttributeAccessIssue]
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)


def _quantize(module: nn.Module, config: Any, kind: type[nn.Module] = nn.Linear) -> None:
    from torchao.quantization import quantize_

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(module, config, lambda child, name: isinstance(child, kind))


def _lower(model: AnswerModel, chunk: int) -> tuple[Any, int]:
    """Export for 1 to `chunk` tokens; XNNPACK takes all but the cache, attention and the
    embedding's rows."""
    import executorch.kernels.quantized  # noqa: F401 - registers the kernel that looks packed rows up
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )
    from executorch.exir.passes import MemoryPlanningPass

    from ondevice.exporters.executorch.shortcuts import shortcuts

    logging.getLogger("executorch").setLevel(logging.ERROR)
    adapter = (torch.zeros(model.adapter_size),) if model.pairs else ()
    inputs = (
        torch.zeros(1, min(7, chunk), dtype=torch.long),
        torch.zeros(1, dtype=torch.long),
        *adapter,
    )
    shapes: dict[str, Any] = {"ids": {1: torch.export.Dim("tokens", max=chunk)}, "start": None}
    shapes |= {"adapter": (None,)} if adapter else {}
    with torch.no_grad(), shortcuts(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[XnnpackPartitioner()],
            # The operators of the cache are none of the core's.
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        program = edge.to_executorch(
            ExecutorchBackendConfig(
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
                do_quant_fusion_and_const_prop=True,
            )
        )
    plan = program.executorch_program.execution_plan[0]
    return program, len(plan.delegates)
