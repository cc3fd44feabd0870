"""MeSP's step as a program: settings that it refuses, its build, and its comparison with
autodiff."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.dims import MoeDims
from ondevice.core.errors import OndeviceError
from ondevice.core.program import GraphProgram, TorchProgram
from ondevice.core.traits import is_expert_parameter
from ondevice.methods.mesp import blocks
from ondevice.methods.mesp.agreement import compare, rounding
from ondevice.methods.mesp.block_functions import LINEAR_FORMS, choose, restore
from ondevice.methods.mesp.check import IN_BLOCKS, check_family
from ondevice.methods.precision import base_problems
from ondevice.runtime_ops.build import has_compiler

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig


def problems(
    config: MespConfig,
    export: ExportConfig,
    dims: ModelDims,
    known: tuple[str, ...] = IN_BLOCKS,
    what: str = "a block program",
) -> list[str]:
    """Return the reasons against such a program, `what` in messages; `known` are traits that its
    blocks may have."""
    problems = []
    try:
        check_family(dims, known, what, max(export.lengths_tokens))
        dims.adapted(config)
    except OndeviceError as error:
        problems.append(error.reason)
    if export.quantize not in LINEAR_FORMS:
        problems.append(
            f"export.quantize is {export.quantize}: a mesp program has {' or '.join(LINEAR_FORMS)}"
        )
    for name, value, expected in (
        ("export.form", export.form, "functional"),
        ("method.weight_placement", config.weight_placement, "resident"),
        ("method.bits", config.bits, None),
    ):
        if value != expected:
            problems.append(f"{name} is {value}: a mesp program has {name}={expected}")
    problems += base_problems(config)
    if export.loss not in ("auto", "tiled") or export.generator == "op":
        problems.append(
            "a mesp program needs no ops of this project: export.loss tiled, "
            "export.generator auto or aten"
        )
    if export.shared_context:
        problems += _context_problems(export, dims, export.shared_context)
    if export.quantize == "8da4w":
        problems += _four_bit_problems(export, dims)
    if export.rounding == "rows" and dims.traits.hands_on:
        problems.append(
            f"export.rounding is rows: blocks of {dims.family} read more than their input, so their "
            "outputs are not kept one by one; expected nearest"
        )
    if isinstance(dims, MoeDims):
        problems += _mixture_problems(config, export, dims)
    if config.max_grad_norm is not None:
        problems.append(
            "a mesp program updates each block as its gradients are known: "
            "method.max_grad_norm=null"
        )
    if config.loss == "answers" or config.answers:
        problems.append("method.loss is answers: a mesp program computes over the vocabulary")
    if config.micro_batch_size is not None and config.micro_batch_size < export.batch_size:
        problems.append(
            "a mesp program computes all rows of a batch at once: method.micro_batch_size=null"
        )
    return problems


def _four_bit_problems(export: ExportConfig, dims: ModelDims) -> list[str]:
    """Without this project's ops `8da4w` would be `q4`."""
    reasons = [
        (export.kernels == "stock", "export.kernels is stock"),
        (not has_compiler(), "no C++ compiler was found"),
        (not blocks.in_ops(dims), f"these ops know no blocks of {dims.family}"),
    ]
    return [
        f"export.quantize is 8da4w: its products of integers are this project's ops, and {reason}; "
        "expected q4"
        for applies, reason in reasons
        if applies
    ]


def _mixture_problems(config: MespConfig, export: ExportConfig, dims: MoeDims) -> list[str]:
    problems = []
    on_experts = [target for target in config.target_modules if is_expert_parameter(target)]
    if on_experts:
        problems.append(
            f"method.target_modules has {', '.join(on_experts)}: a block program has no adapters on "
            f"experts; expected {', '.join(dims.linear_shapes)}"
        )
    if export.rounding == "rows":
        problems.append(
            "export.rounding is rows: levels of experts are not chosen on rows; expected nearest"
        )
    return problems


def _context_problems(export: ExportConfig, dims: ModelDims, context_tokens: int) -> list[str]:
    problems = []
    if export.quantize == "8da8w":
        problems.append(
            "export.context_tokens needs weights that are none, int8 or q4, or answers=packed"
        )
    if not any(map(dims.traits.attends, range(dims.layers))):
        problems.append("export.context_tokens needs a layer with attention; this model has none")
    if context_tokens > dims.max_positions:
        problems.append(
            f"export.context_tokens is {context_tokens}: the model takes {dims.max_positions}"
        )
    return problems


def _torch_problems(config: MespConfig) -> list[str]:
    problems = []
    if config.weight_placement != "resident" or config.bits is not None:
        problems.append(
            "the artifact holds the weights: leave weight_placement and bits out, "
            "and use --quantize nf4"
        )
    return [*problems, *base_problems(config)]


EXECUTORCH = GraphProgram(
    problems,
    blocks.build,
    compare,
    rounding,
    rounded=("int8", "q4", "q4dq", "8da8w", "8da4w"),
    chosen=("q4", "q4dq", "8da4w"),
    choose=choose,
    restore=restore,
    uses_ops=lambda export: False,
)
TORCH = TorchProgram(_torch_problems)
