"""Plans and check-ups as tables for the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ondevice.core.config import size_text
from ondevice.core.table import Table
from ondevice.planning.fits import alternatives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ondevice.planning.doctor import Check
    from ondevice.planning.estimate import Plan

MEANING = {
    "weights": "frozen weights that every step reads",
    "packed weights": "the backend's own copies of the linear layers",
    "dense matrix": "the largest packed matrix, dense for its product",
    "adapter": "trained tensors, their copies and gradients",
    "subspace": "of a gradient: its frozen factors, and a refresh's gradients",
    "noise": "random directions that exist at once",
    "activations": "of a block, or all that backward needs",
    "logits": "of one tile of the vocabulary, and the loss",
    "optimizer": "AdamW's moments",
    "sums": "of micro-batches' gradients, float32",
    "head tiles": "the output head's tile as the runtime copies it",
    "allocator": "freed memory that it holds back",
    "tokenizer": "the vocabulary and its merges",
    "runtime": "the process before a model is loaded",
    "window": "layers and their gradients on the accelerator",
    "head": "the output head and its gradient",
    "kept of the forward pass": "what the backward pass would compute again (method.recompute)",
    "block inputs": "saved inputs of each block, or of a few while the others are on the host",
    "kept inputs": "of the layers, for the backward pass",
    "inputs on the host": "of the layers, for the backward pass",
    "masters and moments": "float32 parameters and AdamW's moments",
    "resident states": "masters and moments that stay on the accelerator",
    "disk staging": "states on their way from and to the disk",
    "gradients": "waiting for their update",
    "exact parameters": "without a subspace: norms, biases, small matrices",
    "tables": "embedding and head, if they are trained in a subspace",
    "projectors": "positions and values of the subspaces",
    "dense projectors": "one of each side, shared by all matrices",
    "changes": "of the weights, in their subspaces, and the answers",
    "gradients on the way": "of a few layers and of the tables",
    "bias check": "fitting one matrix' projectors, every check_every steps",
    "answers": "steps in the subspaces, to the accelerator",
    "weights on the host": "of the layers, sliding through the accelerator",
}


def render(plan: Plan) -> RenderableType:
    """Render a plan: parts, total, the device's memory, the verdict, and changes that would help."""
    from rich.console import Group
    from rich.text import Text

    request = plan.request
    quantize = "none"
    if request.export:
        quantize = request.export.quantize
    precision = request.dtype if quantize == "none" else quantize
    table = Table(
        title=f"{plan.model}, {request.method.name}, {request.runtime} {precision}, "
        f"{request.batch_size} x {request.length_tokens} tokens on {request.device.name}",
        title_justify="left",
        show_footer=True,
    )
    table.add_column("part", footer="total")
    table.add_column("memory", justify="right", footer=size_text(plan.total_bytes))
    table.add_column("share", justify="right")
    table.add_column("contents", footer=f"of {size_text(plan.usable_bytes)} usable")
    for part, size in plan.parts.items():
        table.add_row(
            part, size_text(size), f"{size / plan.total_bytes:.0%}", MEANING.get(part, "")
        )
    lines: list[RenderableType] = [table]
    if plan.host_parts:
        usable = plan.host_usable_bytes
        footer = "" if usable is None else f"of {size_text(usable)} usable"
        host = Table(title="host memory", title_justify="left", show_footer=True)
        host.add_column("part", footer="total")
        host.add_column("memory", justify="right", footer=size_text(plan.host_total_bytes))
        host.add_column("contents", footer=footer)
        for part, size in plan.host_parts.items():
            host.add_row(part, size_text(size), MEANING.get(part, ""))
        lines.append(host)
    if plan.fits:
        verdict = f"fits, {size_text(plan.margin_bytes)} to spare"
        if plan.host_parts and plan.host_usable_bytes is None:
            verdict = f"fits the GPU, {size_text(plan.margin_bytes)} to spare; its host needs "
            verdict += f"{size_text(plan.host_total_bytes)}: --host-memory checks it"
        lines.append(Text(verdict, style="green"))
    else:
        # The device or the host may be too small; the larger lack is the one to repair first.
        over = max(
            -plan.margin_bytes,
            plan.host_total_bytes - (plan.host_usable_bytes or plan.host_total_bytes),
        )
        lines.append(Text(f"does not fit: {size_text(over)} too much", style="bold red"))
        for words, other in alternatives(plan):
            verdict = "fits" if other.fits else "still too much"
            lines.append(Text(f"  try {words}: {size_text(other.total_bytes)}, {verdict}"))
    lines.append(Text(f"usable: {request.device.rule}", style="dim"))
    if plan.file_bytes:
        file = (
            f"program file about {size_text(plan.file_bytes)}; pages not read again cost no memory"
        )
        lines.append(Text(file, style="dim"))
    if plan.step_s is not None:
        lines.append(Text(f"about {_seconds(plan.step_s)} a step ({plan.step_basis})", style="dim"))
    else:
        lines.append(Text(f"time of a step: {plan.step_basis}", style="dim"))
    lines += [Text(note, style="dim") for note in plan.notes]
    return Group(*lines)


def render_checks(checks: Sequence[Check]) -> RenderableType:
    """Render every check with its mark, and below the table the fixes of those that fail."""
    from rich.console import Group
    from rich.text import Text

    table = Table(title="doctor", title_justify="left")
    for heading in ("", "check", "found", "s"):
        table.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    lines: list[RenderableType] = [table]
    for check in checks:
        mark, style, text_style = "–", "dim", "dim"
        if check.ok:
            mark, style, text_style = "✓", "green", ""
        elif check.failed:
            mark, style, text_style = "✗", "bold red", ""
        name = check.name + " (needed)" * check.needed
        detail = Text(check.detail, style=text_style)
        table.add_row(Text(mark, style=style), name, detail, f"{check.seconds:.1f}")
        if check.failed and check.fix:
            lines.append(Text.assemble((f"{check.name}: ", "bold"), check.fix))
    absent = [check for check in checks if check.ok is None and not check.failed]
    if absent:
        listed = ", ".join(check.name for check in absent)
        lines.append(Text(f"not installed, and not needed for this: {listed}", style="dim"))
    return Group(*lines)


def _seconds(value: float) -> str:
    """Format two digits without an exponent: 12 ms, 3.8 s, 110 s, 25 min."""
    if value >= 600:
        return f"{value / 60:,.0f} min"
    unit = "s"
    if value < 1:
        value *= 1e3
        unit = "ms"
    if value <= 0:
        return f"0 {unit}"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):.{max(0, digits)}f} {unit}"
