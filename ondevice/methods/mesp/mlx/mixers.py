"""What an instruction is: a stage, and the arrays that it takes and gives; and the instructions of what mixes a block's
tokens, forward and backward: attention, a short convolution, a gated delta rule. Imports no MLX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ondevice.core.traits import ATTENDS, DELTA
from ondevice.methods.mesp.mlx.settings import NORMS, Settings, matrix_parts


@dataclass(frozen=True)
class Operand:
    """An array by its name in the block, or a range of it along one axis."""

    name: str
    axis: int = -1
    start: int = 0
    stop: int = 0

    @property
    def whole(self) -> bool:
        return self.axis < 0


Operands = dict[str, Operand]


@dataclass(frozen=True)
class Instruction:
    """One stage to run, or an update of one layer's A and B if `stage` is `update`.

    Attributes:
        stage: method of `Stages`; several instructions share it.
        inputs: by the stage's name of each input, an array of the block.
        outputs: the stage's name of each output, and its name in the block.
        evaluate: compute here before anything else is asked for, so that the arrays in `free` can
            go.
        free: names in the block that nothing uses after this one.
    """

    stage: str
    inputs: Operands
    outputs: dict[str, str] = field(default_factory=dict)
    evaluate: bool = True
    free: tuple[str, ...] = ()


def norm_of(settings: Settings, position: str) -> Operands:
    return same(f"{NORMS[position]}.weight", when=settings.norm(position))


def update(target: str) -> Instruction:
    """Return the instruction that uses the gradients of one layer's A and B, and drops them."""
    gradients = {side: Operand(f"{target}.{side}") for side in ("dA", "dB")}
    return Instruction("update", gradients, {"target": target})


def updates(settings: Settings, *targets: str) -> list[Instruction]:
    return [update(target) for target in targets if target in settings.target_modules]


def trained(settings: Settings, target: str, name: str) -> dict[str, str]:
    """The gradients of A and B of `target`, which a stage calls `name`."""
    if target not in settings.target_modules:
        return {}
    return {f"g.{name}.{side}": f"{target}.d{side}" for side in "AB"}


def linear_of(settings: Settings, target: str, name: str) -> Operands:
    """All arrays of a linear layer, which a stage calls `name`."""
    operands = parts_of(settings, target)
    operands |= same(f"{target}.bias", when=settings.dims.linear_bias(target))
    operands |= same(f"{target}.A", f"{target}.B", when=target in settings.target_modules)
    return {name + key.removeprefix(target): operand for key, operand in operands.items()}


def parts_of(
    settings: Settings, target: str, own: str = "", tile: tuple[int, int, int] | None = None
) -> Operands:
    """The arrays of a frozen matrix, which the block calls `own`, or a tile of it: axis, start and
    stop."""
    operands = {}
    for part in matrix_parts(settings.bits):
        operand = Operand(f"{own or target}.{part}")
        if tile is not None:
            axis, start, stop = tile
            per = 1
            if axis and settings.bits:
                per = settings.group_size
                if part == "weight":
                    per = 32 // settings.bits
            operand = Operand(operand.name, axis, start // per, stop // per)
        operands[f"{target}.{part}"] = operand
    return operands


def same(*names: str, when: bool = True) -> Operands:
    return {name: Operand(name) for name in names if when}


def named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def numbered(name: str, chunks: list[tuple[int, int]]) -> list[str]:
    return [f"{name}@{i}" for i in range(len(chunks))]


DELTA_PROJECTIONS = ("qkv", "z", "b", "a")
"""Arrays that the linear layers of a gated delta rule give."""
WHOLE = [(0, 0)]
"""The one chunk of a convolution's tokens."""


def mix(settings: Settings, length_tokens: int) -> list[Instruction]:
    """x -> m, and what the backward pass of attention or of another mixer wants."""
    if settings.mixer == ATTENDS:
        return _attention(settings, length_tokens)
    if settings.mixer == DELTA:
        return _delta(settings, length_tokens)
    return [
        _attention_norm(settings),
        _plain(settings, "conv_in", "bcx"),
        Instruction("convolve", same("bcx", "taps.weight"), {"o": "o@0"}),
        Instruction("out", _out(settings, WHOLE, "conv_out"), named("m")),
    ]


def _plain(settings: Settings, part: str, name: str) -> Instruction:
    """The linear layer from n to `name`, not split by head."""
    stage = "project_plain" if part in settings.target_modules else "project_plain_frozen"
    inputs = same("n") | linear_of(settings, part, "linear")
    return Instruction(stage, inputs, {"y": name}, evaluate=False)


def _plain_backward(
    settings: Settings, part: str, gradients: list[str], add: bool = False
) -> list[Instruction]:
    """Its gradients, from that of what it gave, or from chunks of it."""
    forward = _plain(settings, part, "")
    inputs = forward.inputs | {f"g.y@{i}": Operand(name) for i, name in enumerate(gradients)}
    if add:
        inputs["sum.n"] = Operand("g.n")
    outputs = named("g.n") | trained(settings, part, "linear")
    return [Instruction(f"{forward.stage}_backward", inputs, outputs), *updates(settings, part)]


def _delta(settings: Settings, length_tokens: int) -> list[Instruction]:
    """x -> m, and the projections, the convolution's output and each chunk's state."""
    chunks = settings.delta_bounds(length_tokens)
    return [
        _attention_norm(settings),
        *(_plain(settings, f"delta_{name}", name) for name in DELTA_PROJECTIONS),
        Instruction("convolve_alone", same("qkv", "taps.weight"), named("c")),
        *(
            Instruction(
                "correct" if i else "correct_first",
                _corrected(i, chunk),
                {"o": f"o@{i}", "state": f"state@{i + 1}"},
            )
            for i, chunk in enumerate(chunks)
        ),
        Instruction("out", _out(settings, chunks, "delta_out"), named("m")),
    ]


def _corrected(number: int, chunk: tuple[int, int]) -> Operands:
    """What the delta rule of a chunk is of; the first one begins without a state."""
    inputs = {name: Operand(name, 1, *chunk) for name in ("c", "z", "b", "a")}
    if number:
        inputs["state"] = Operand(f"state@{number}")
    return inputs | same("decay.weight", "step.weight", "gate_norm.weight")


def delta_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    chunks = settings.delta_bounds(length_tokens)
    listed = _out_backward(settings, chunks, ["g.m"], "delta_out")
    for i, chunk in reversed(list(enumerate(chunks))):
        inputs = _corrected(i, chunk) | {"g.o": Operand(f"g.o@{i}")}
        if i < len(chunks) - 1:
            inputs["g.state"] = Operand(f"g.state@{i + 1}")
        outputs = {f"g.{name}": f"g.{name}@{i}" for name in ("c", "z", "b", "a")}
        stage = "correct_first_backward"
        if i:
            stage = "correct_backward"
            outputs["g.state"] = f"g.state@{i}"
        listed.append(Instruction(stage, inputs, outputs))
    inputs = same("qkv", "taps.weight", *numbered("g.c", chunks))
    listed.append(Instruction("convolve_alone_backward", inputs, named("g.qkv")))
    listed.append(_attention_norm(settings))
    listed += _plain_backward(settings, "delta_qkv", ["g.qkv"])
    for name in DELTA_PROJECTIONS[1:]:
        gradients = numbered(f"g.{name}", chunks)
        listed += _plain_backward(settings, f"delta_{name}", gradients, add=True)
    return [*listed, _norm_backward(settings)]


def convolution_backward(settings: Settings, g_m: list[str]) -> list[Instruction]:
    listed = _out_backward(settings, WHOLE, g_m, "conv_out")
    inputs = same("bcx", "taps.weight") | {"g.o": Operand("g.o@0")}
    listed.append(Instruction("convolve_backward", inputs, named("g.bcx")))
    listed.append(_attention_norm(settings))
    listed += _plain_backward(settings, "conv_in", ["g.bcx"])
    return [*listed, _norm_backward(settings)]


def _attention(settings: Settings, length_tokens: int) -> list[Instruction]:
    """x -> m, and q, k, v and o."""
    listed = [_attention_norm(settings)]
    for inputs, outputs, target in _projections(settings):
        stage = _project(settings, target)
        listed.append(Instruction(stage, inputs, outputs, evaluate=False))
    stage, rotated = "rope", ("q", "k")
    if settings.borrows_keys:
        stage, rotated = "rope_queries", ("q",)
    listed.append(Instruction(stage, same(*rotated) | _rope(settings), named(*rotated)))
    chunks = settings.query_bounds(length_tokens)
    for i, (low, high) in enumerate(chunks):
        listed.append(Instruction("attend", _seen(settings, low, high), {"o": f"o@{i}"}))
    stage = _out_stage(settings, "o_proj")
    return [*listed, Instruction(stage, _out(settings, chunks), named("m"))]


def _attention_norm(settings: Settings) -> Instruction:
    inputs = same("x") | norm_of(settings, "before_attention")
    return Instruction("norm", inputs, named("n"), evaluate=False)


def _projections(settings: Settings) -> Iterator[tuple[Operands, dict[str, str], str]]:
    """Yield inputs, outputs and name of each linear layer from n to q, k and v, or to all three."""
    for target in settings.attention_targets:
        names = {"y": target[0]}
        if settings.dims.traits.fused:
            names = named("q", "k", "v")
        elif settings.gates(target):
            names["gate"] = "gate"
        elif settings.doubles(target):
            names["v"] = "v"
        inputs = same("n") | linear_of(settings, target, "linear")
        for name, head in names.items():
            if head in ("q", "k", "v") and settings.norm(head):
                inputs[f"{name}.norm.weight"] = Operand(f"{NORMS[head]}.weight")
        yield inputs, names, target


def _project(settings: Settings, target: str) -> str:
    stage = "project"
    if settings.gates(target):
        stage = "project_gated"
    elif settings.doubles(target):
        stage = "project_keys"
    return stage if target in settings.target_modules else f"{stage}_frozen"


def _rope(settings: Settings) -> Operands:
    return same("rope.weight", when=settings.rope_by_layer)


def _seen(settings: Settings, low: int, high: int) -> Operands:
    """A chunk's queries, all keys and values up to its end, and the layer's window."""
    seen = {name: Operand(name, 2, 0, high) for name in "kv"}
    window = same("window.weight", when=bool(settings.dims.traits.windows))
    return {"q": Operand("q", 2, low, high)} | seen | window


def _out(settings: Settings, chunks: list[tuple[int, int]], part: str = "o_proj") -> Operands:
    inputs = same("x", *numbered("o", chunks)) | norm_of(settings, "after_attention")
    inputs |= same("gate", when=_out_stage(settings, part) == "out_gated")
    return inputs | linear_of(settings, part, "o_proj")


def _out_stage(settings: Settings, part: str) -> str:
    return "out_gated" if part == "o_proj" and settings.dims.traits.output_gate else "out"


def attention_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    chunks = settings.query_bounds(length_tokens)
    g_m = ["g.m"]
    if settings.routes:
        g_m = numbered("g.m", chunks)
    listed = _out_backward(settings, chunks, g_m, "o_proj")
    # The last chunk sees all keys, so it comes first and makes g.k and g.v in full length.
    for i, (low, high) in reversed(list(enumerate(chunks))):
        inputs = _seen(settings, low, high) | {"g.o": Operand(f"g.o@{i}")}
        if i < len(chunks) - 1 or settings.lends_keys or settings.borrows_keys:
            inputs |= {"sum.k": Operand("g.k"), "sum.v": Operand("g.v")}
        outputs = {"g.q": f"g.q@{i}"} | named("g.k", "g.v")
        listed.append(Instruction("attend_backward", inputs, outputs))
    # A rotation is linear: at any q and k of this shape it has the same gradient.
    inputs = same("q", *numbered("g.q", chunks)) | _rope(settings)
    stage, rotated = "rope_queries_backward", ["g.q"]
    if not settings.borrows_keys:
        stage, rotated = "rope_backward", ["g.q", "g.k"]
        inputs |= same("k", "g.k")
    listed.append(Instruction(stage, inputs, named(*rotated)))
    # n is computed again here, so that it takes no memory while attention's gradients are computed.
    listed.append(_attention_norm(settings))
    for number, (inputs, names, target) in enumerate(_projections(settings)):
        inputs |= {f"g.{name}": Operand(f"g.{head}") for name, head in names.items()}
        if number:
            inputs["sum.n"] = Operand("g.n")
        outputs = named("g.n") | trained(settings, target, "linear")
        listed.append(Instruction(f"{_project(settings, target)}_backward", inputs, outputs))
        listed += updates(settings, target)
    return [*listed, _norm_backward(settings)]


def _out_backward(
    settings: Settings, chunks: list[tuple[int, int]], g_m: list[str], part: str
) -> list[Instruction]:
    outputs = named("g.x", *numbered("g.o", chunks)) | trained(settings, part, "o_proj")
    inputs = _out(settings, chunks, part) | same(*g_m)
    stage = _out_stage(settings, part)
    if stage == "out_gated":
        outputs["g.gate"] = "g.gate"
    return [Instruction(f"{stage}_backward", inputs, outputs), *updates(settings, part)]


def _norm_backward(settings: Settings) -> Instruction:
    inputs = same("x", "g.n") | norm_of(settings, "before_attention") | {"sum.x": Operand("g.x")}
    return Instruction("norm_backward", inputs, {"g.x": "g"})
