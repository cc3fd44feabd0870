"""The order in which a block's stages run, with the arrays that each takes and those that are dead
after it, as instructions: data, not code.

A backend that can run the stages needs nothing else: the Python session, an exported artifact's
session and the C++ host all interpret this list. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ondevice.core.traits import ATTENDS, CONVOLUTION, DELTA
from ondevice.methods.mesp.mlx.settings import GATE_UP, NORMS, SHARED, Settings, matrix_parts


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


LAYER_INPUT = ("layer_gate", "layer_out")
"""Linear layers of the branch behind the MLP."""
DELTA_PROJECTIONS = ("qkv", "z", "b", "a")
"""Arrays that the linear layers of a gated delta rule give."""
MIX_FROM = ("rope", "rope_queries", "convolve", "convolve_alone")
"""The stage of each mixer in which tokens first see others."""
WHOLE = [(0, 0)]
"""The one chunk of a convolution's tokens."""
BY_LENGTH = ("forward", "backward")
ANY_LENGTH = ("embed", "final_norm", "final_norm_backward", "loss", "loss_only")
"""Names of the lists, those of a block first."""
LAYER_INPUT_LIST = "layer_input"
"""The list of what a layer reads of a token's own embedding for it; all layers have one list."""
_RESULTS = {
    "forward": ("x",), "backward": ("g",), "embed": ("x",), "final_norm": ("hn",),
    "final_norm_backward": ("g",), "loss": ("nll", "gh"), "loss_only": ("nll",),
    LAYER_INPUT_LIST: ("input.weight",),
}  # fmt: skip


def of(
    name: str,
    settings: Settings,
    tiles: list[tuple[int, int]],
    length_tokens: int = 0,
    row_tokens: int = 0,
) -> list[Instruction]:
    """Return the list of that name.

    `forward` is x -> the next block's x. `backward` is x and g, the gradient of the block's output
    -> g, that of its input; A and B are updated as soon as their gradients are known. `embed` takes
    the embedding's rows of all tokens, and `loss` hn of label tokens, the head's rows of these
    tokens, and each one's weight.

    Args:
        settings: those of the block (`Settings.at`).
        tiles: of the vocabulary.
        row_tokens: if x has prompts with their continuations, the length of the rows that
            `apart` and `together` make of them (`branch_rows`); only forward.
    """
    norm = _same("x", "final_norm.weight")
    if name == "forward":
        listed = _forward(settings, length_tokens, row_tokens)
    elif name == "backward":
        listed = _backward(settings, length_tokens)
    elif name == LAYER_INPUT_LIST:
        inputs = _same("x", "layer_input_norm.weight") | _parts(settings, "rows")
        inputs |= _parts(settings, "layer_projection")
        listed = [Instruction(name, inputs, {"input": "input.weight"})]
    elif name == "embed":
        listed = [Instruction("embed", _parts(settings, "rows"), _named("x"))]
    elif name == "final_norm":
        listed = [Instruction("final_norm", norm, _named("hn"))]
    elif name == "final_norm_backward":
        listed = [Instruction(name, norm | {"g.hn": Operand("ghn")}, {"g.x": "g"})]
    else:
        listed = _loss(settings, tiles)
        if name == "loss":
            listed += _loss_backward(settings, tiles)
    return _with_frees(listed, _results(name, settings))


def _results(name: str, settings: Settings) -> tuple[str, ...]:
    """Return the arrays that a list leaves; a block's keys and values, or their gradients, if other
    blocks attend to them."""
    if name == "forward" and settings.lends_keys:
        return ("x", "k", "v")
    if name == "backward" and settings.borrows_keys:
        return ("g", "g.k", "g.v")
    return _RESULTS[name]


def _forward(settings: Settings, length_tokens: int, row_tokens: int) -> list[Instruction]:
    listed = _mix(settings, row_tokens or length_tokens)
    if row_tokens:
        listed = _rows_apart(listed)
    if not settings.routes:
        return [*listed, _mlp_norm(settings), *_mlp_tiles(settings), *_end(settings)]
    chunks = settings.query_bounds(length_tokens)
    for i, (low, high) in enumerate(chunks):
        inputs = {"m": Operand("m", 1, low, high)} | _experts(settings)
        listed.append(Instruction("mixture", inputs, {"x": f"x@{i}"}))
    return [*listed, Instruction("mixture_end", _same(*_numbered("x", chunks)), _named("x"))]


def _end(settings: Settings) -> list[Instruction]:
    """y -> the next block's input, and e in front of the norms after the MLP."""
    branch = _same("m", when=settings.branch_apart) | _norm(settings, "after_mlp")
    if not settings.has_behind:
        return [Instruction("end", _same("y") | branch, _named("x"))]
    end = Instruction("end", _same("y") | branch, {"x": "e"})
    return [end, Instruction("behind", _behind(settings), _named("x"))]


def _behind(settings: Settings) -> Operands:
    """e, and what is behind the MLP."""
    inputs = _same("e") | _same("output_scale.weight", when=settings.dims.traits.output_scale)
    if settings.dims.traits.layer_input:
        inputs |= _same("input.weight") | _norm(settings, "after_layer_input")
        for part in LAYER_INPUT:
            inputs |= _linear(settings, part, part)
    return inputs


def _behind_backward(settings: Settings) -> list[Instruction]:
    """y and g, the gradient of the block's output -> g, that of e."""
    outputs = {"g.e": "g"}
    for part in LAYER_INPUT:
        outputs |= _trained(settings, part, part)
    inputs = _behind(settings) | {"g.x": Operand("g")}
    end = _end(settings)[0]
    backward = Instruction("behind_backward", inputs, outputs)
    return [end, backward, *_updates(settings, *LAYER_INPUT)]


def _rows_apart(listed: list[Instruction]) -> list[Instruction]:
    """Let what mixes tokens have rows: from after the projections until before `out`."""
    stages = [one.stage for one in listed]
    first = next(i for i, stage in enumerate(stages) if stage in MIX_FROM)
    last = next(i for i, stage in enumerate(stages) if stage in ("out", "out_gated"))
    projected = [name for one in listed[1:first] for name in one.outputs.values()]
    projections = [name for name in projected if name != "gate"]  # `out` has it by token
    mixed = [
        name for one in listed[first:last] for name in one.outputs.values() if name[:2] == "o@"
    ]
    out = listed[last]
    inputs = {name: one for name, one in out.inputs.items() if name not in mixed[1:]}
    return [
        *listed[:first],
        Instruction("take_apart", _same(*projections, "apart"), _named(*projections)),
        *listed[first:last],
        Instruction("put_together", _same(*mixed, "together"), _named("o@0")),
        replace(out, inputs=inputs),
    ]


def _backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    listed = _mix(settings, length_tokens)
    mixer = settings.mixer
    if not settings.routes:
        listed += _mlp_backward(settings)
        if mixer == CONVOLUTION:
            return [*listed, *_convolution_backward(settings, ["g.m"])]
        if mixer == DELTA:
            return [*listed, *_delta_backward(settings, length_tokens)]
        return [*listed, *_attention_backward(settings, length_tokens)]
    chunks = settings.query_bounds(length_tokens)
    for i, (low, high) in enumerate(chunks):
        inputs = {"m": Operand("m", 1, low, high), "g.x": Operand("g", 1, low, high)}
        inputs |= _experts(settings)
        listed.append(Instruction("mixture_backward", inputs, {"g.m": f"g.m@{i}"}))
    if mixer == CONVOLUTION:
        return listed + _convolution_backward(settings, _numbered("g.m", chunks))
    return listed + _attention_backward(settings, length_tokens)


def _experts(settings: Settings) -> Operands:
    """The norm before a mixture of experts, and all its arrays."""
    inputs = _norm(settings, "before_mlp") | _same("router.weight")
    inputs |= _same("router.bias", when=settings.routing.bias)
    inputs |= _same("shared_gate.weight", when=settings.shared)
    for name in ("experts.gate_up", "experts.down", *SHARED):
        if settings.shared or name not in SHARED:
            inputs |= _parts(settings, name)
    return inputs


def _mix(settings: Settings, length_tokens: int) -> list[Instruction]:
    """x -> m, and what the backward pass of attention or of another mixer wants."""
    if settings.mixer == ATTENDS:
        return _attention(settings, length_tokens)
    if settings.mixer == DELTA:
        return _delta(settings, length_tokens)
    return [
        _attention_norm(settings),
        _plain(settings, "conv_in", "bcx"),
        Instruction("convolve", _same("bcx", "taps.weight"), {"o": "o@0"}),
        Instruction("out", _out(settings, WHOLE, "conv_out"), _named("m")),
    ]


def _plain(settings: Settings, part: str, name: str) -> Instruction:
    """The linear layer from n to `name`, not split by head."""
    stage = "project_plain" if part in settings.target_modules else "project_plain_frozen"
    inputs = _same("n") | _linear(settings, part, "linear")
    return Instruction(stage, inputs, {"y": name}, evaluate=False)


def _plain_backward(
    settings: Settings, part: str, gradients: list[str], add: bool = False
) -> list[Instruction]:
    """Its gradients, from that of what it gave, or from chunks of it."""
    forward = _plain(settings, part, "")
    inputs = forward.inputs | {f"g.y@{i}": Operand(name) for i, name in enumerate(gradients)}
    if add:
        inputs["sum.n"] = Operand("g.n")
    outputs = _named("g.n") | _trained(settings, part, "linear")
    return [Instruction(f"{forward.stage}_backward", inputs, outputs), *_updates(settings, part)]


def _delta(settings: Settings, length_tokens: int) -> list[Instruction]:
    """x -> m, and the projections, the convolution's output and each chunk's state."""
    chunks = settings.delta_bounds(length_tokens)
    return [
        _attention_norm(settings),
        *(_plain(settings, f"delta_{name}", name) for name in DELTA_PROJECTIONS),
        Instruction("convolve_alone", _same("qkv", "taps.weight"), _named("c")),
        *(
            Instruction(
                "correct" if i else "correct_first",
                _corrected(i, chunk),
                {"o": f"o@{i}", "state": f"state@{i + 1}"},
            )
            for i, chunk in enumerate(chunks)
        ),
        Instruction("out", _out(settings, chunks, "delta_out"), _named("m")),
    ]


def _corrected(number: int, chunk: tuple[int, int]) -> Operands:
    """What the delta rule of a chunk is of; the first one begins without a state."""
    inputs = {name: Operand(name, 1, *chunk) for name in ("c", "z", "b", "a")}
    if number:
        inputs["state"] = Operand(f"state@{number}")
    return inputs | _same("decay.weight", "step.weight", "gate_norm.weight")


def _delta_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
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
    inputs = _same("qkv", "taps.weight", *_numbered("g.c", chunks))
    listed.append(Instruction("convolve_alone_backward", inputs, _named("g.qkv")))
    listed.append(_attention_norm(settings))
    listed += _plain_backward(settings, "delta_qkv", ["g.qkv"])
    for name in DELTA_PROJECTIONS[1:]:
        gradients = _numbered(f"g.{name}", chunks)
        listed += _plain_backward(settings, f"delta_{name}", gradients, add=True)
    return [*listed, _norm_backward(settings)]


def _convolution_backward(settings: Settings, g_m: list[str]) -> list[Instruction]:
    listed = _out_backward(settings, WHOLE, g_m, "conv_out")
    inputs = _same("bcx", "taps.weight") | {"g.o": Operand("g.o@0")}
    listed.append(Instruction("convolve_backward", inputs, _named("g.bcx")))
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
    listed.append(Instruction(stage, _same(*rotated) | _rope(settings), _named(*rotated)))
    chunks = settings.query_bounds(length_tokens)
    for i, (low, high) in enumerate(chunks):
        listed.append(Instruction("attend", _seen(settings, low, high), {"o": f"o@{i}"}))
    stage = _out_stage(settings, "o_proj")
    return [*listed, Instruction(stage, _out(settings, chunks), _named("m"))]


def _attention_norm(settings: Settings) -> Instruction:
    inputs = _same("x") | _norm(settings, "before_attention")
    return Instruction("norm", inputs, _named("n"), evaluate=False)


def _projections(settings: Settings) -> Iterator[tuple[Operands, dict[str, str], str]]:
    """Yield inputs, outputs and name of each linear layer from n to q, k and v, or to all three."""
    for target in settings.attention_targets:
        names = {"y": target[0]}
        if settings.dims.traits.fused:
            names = _named("q", "k", "v")
        elif settings.gates(target):
            names["gate"] = "gate"
        elif settings.doubles(target):
            names["v"] = "v"
        inputs = _same("n") | _linear(settings, target, "linear")
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
    return _same("rope.weight", when=settings.rope_by_layer)


def _seen(settings: Settings, low: int, high: int) -> Operands:
    """A chunk's queries, all keys and values up to its end, and the layer's window."""
    seen = {name: Operand(name, 2, 0, high) for name in "kv"}
    window = _same("window.weight", when=bool(settings.dims.traits.windows))
    return {"q": Operand("q", 2, low, high)} | seen | window


def _out(settings: Settings, chunks: list[tuple[int, int]], part: str = "o_proj") -> Operands:
    inputs = _same("x", *_numbered("o", chunks)) | _norm(settings, "after_attention")
    inputs |= _same("gate", when=_out_stage(settings, part) == "out_gated")
    return inputs | _linear(settings, part, "o_proj")


def _out_stage(settings: Settings, part: str) -> str:
    return "out_gated" if part == "o_proj" and settings.dims.traits.output_gate else "out"


def _norm(settings: Settings, position: str) -> Operands:
    return _same(f"{NORMS[position]}.weight", when=settings.norm(position))


def _mlp_norm(settings: Settings) -> Instruction:
    inputs = _same("m") | _norm(settings, "before_mlp")
    inputs |= _same("down_proj.bias", when=settings.dims.linear_bias("down_proj"))
    gate_up = _trained_gate_up(settings)
    inputs |= _same(*(f"{target}.A" for target in gate_up))
    return Instruction("mlp_norm", inputs, _named("n", "y", *(f"{one}.h" for one in gate_up)))


def _trained_gate_up(settings: Settings) -> list[str]:
    return [t for t in settings.gate_up_targets if t in settings.target_modules]


def _mlp_tiles(settings: Settings) -> list[Instruction]:
    """n -> y: the sum with the MLP, or the MLP only (`Settings.branch_apart`)."""
    return [
        Instruction("mlp", _same("y") | _mlp(settings, low, high), _named("y"))
        for low, high in settings.mlp_bounds()
    ]


def _mlp(settings: Settings, low: int, high: int) -> Operands:
    """n, h of gate and up, and a tile of gate, up and down."""
    inputs = _same("n", *(f"{target}.h" for target in _trained_gate_up(settings)))
    for target in GATE_UP:
        own, first = settings.place(target)
        rows = (0, first + low, first + high)
        inputs |= _parts(settings, target, own, rows)
        if settings.dims.linear_bias(own):
            inputs[f"{target}.bias"] = Operand(f"{own}.bias", *rows)
        if settings.has(target):
            inputs[f"{target}.B"] = Operand(f"{own}.B", *rows)
    inputs |= _parts(settings, "down_proj", "down_proj", (1, low, high))
    if settings.has("down_proj"):
        inputs |= {"down_proj.A": Operand("down_proj.A", 1, low, high)} | _same("down_proj.B")
    return inputs


def _mlp_backward(settings: Settings) -> list[Instruction]:
    """m and g -> g.m."""
    norm = _mlp_norm(settings)
    listed = [norm]
    branch, total = "g", "g"
    if settings.has_behind:
        listed += [*_mlp_tiles(settings), *_behind_backward(settings)]
    if settings.branch_apart:
        if settings.norm("after_mlp") and not settings.has_behind:
            listed += _mlp_tiles(settings)  # a norm needs its input; a factor only its shape
        inputs = _same("m", "y") | _norm(settings, "after_mlp") | {"g.x": Operand("g")}
        listed.append(Instruction("end_backward", inputs, _named("g.m", "g.y")))
        branch, total = "g.y", "g.m"
    # A tile has a range of the columns of down's A and of the rows of gate's and up's B: these are
    # joined. All other gradients are sums over the tiles.
    gate_up = _trained_gate_up(settings)
    added = ["n", *(f"{target}.h" for target in gate_up)]
    tiled = [f"{target}.B" for target in GATE_UP if settings.has(target)]
    gradients = [f"{target}.dB" for target in gate_up]
    joined: Operands = {}
    if settings.has("down_proj"):
        added.append("down_proj.B")
        tiled.append("down_proj.A")
        gradients += ["down_proj.dA", "down_proj.dB"]
        joined["down_proj.B"] = Operand("g.down_proj.B")
    tiles = settings.mlp_bounds()
    for i, (low, high) in enumerate(tiles):
        inputs = _mlp(settings, low, high) | {"g.y": Operand(branch)}
        if i:
            inputs |= {f"sum.{name}": Operand(f"g.{name}") for name in added}
        outputs = _named(*(f"g.{name}" for name in added))
        outputs |= {f"g.{name}": f"g.{name}@{i}" for name in tiled}
        listed.append(Instruction("mlp_backward", inputs, outputs))
        joined |= {f"{name}@{i}": Operand(f"g.{name}@{i}") for name in tiled}
    if gradients:
        listed.append(Instruction("mlp_join", joined, _named(*gradients)))
    inputs = norm.inputs | {"sum.m": Operand(total)}
    inputs |= _same("g.n", *(f"g.{target}.h" for target in gate_up))
    outputs = _named("g.m") | {f"g.{target}.A": f"{target}.dA" for target in gate_up}
    listed.append(Instruction("mlp_norm_backward", inputs, outputs))
    return [*listed, *_updates(settings, *settings.gate_up_targets, "down_proj")]


def _attention_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    chunks = settings.query_bounds(length_tokens)
    g_m = ["g.m"]
    if settings.routes:
        g_m = _numbered("g.m", chunks)
    listed = _out_backward(settings, chunks, g_m, "o_proj")
    # The last chunk sees all keys, so it comes first and makes g.k and g.v in full length.
    for i, (low, high) in reversed(list(enumerate(chunks))):
        inputs = _seen(settings, low, high) | {"g.o": Operand(f"g.o@{i}")}
        if i < len(chunks) - 1 or settings.lends_keys or settings.borrows_keys:
            inputs |= {"sum.k": Operand("g.k"), "sum.v": Operand("g.v")}
        outputs = {"g.q": f"g.q@{i}"} | _named("g.k", "g.v")
        listed.append(Instruction("attend_backward", inputs, outputs))
    # A rotation is linear: at any q and k of this shape it has the same gradient.
    inputs = _same("q", *_numbered("g.q", chunks)) | _rope(settings)
    stage, rotated = "rope_queries_backward", ["g.q"]
    if not settings.borrows_keys:
        stage, rotated = "rope_backward", ["g.q", "g.k"]
        inputs |= _same("k", "g.k")
    listed.append(Instruction(stage, inputs, _named(*rotated)))
    # n is computed again here, so that it takes no memory while attention's gradients are computed.
    listed.append(_attention_norm(settings))
    for number, (inputs, names, target) in enumerate(_projections(settings)):
        inputs |= {f"g.{name}": Operand(f"g.{head}") for name, head in names.items()}
        if number:
            inputs["sum.n"] = Operand("g.n")
        outputs = _named("g.n") | _trained(settings, target, "linear")
        listed.append(Instruction(f"{_project(settings, target)}_backward", inputs, outputs))
        listed += _updates(settings, target)
    return [*listed, _norm_backward(settings)]


def _out_backward(
    settings: Settings, chunks: list[tuple[int, int]], g_m: list[str], part: str
) -> list[Instruction]:
    outputs = _named("g.x", *_numbered("g.o", chunks)) | _trained(settings, part, "o_proj")
    inputs = _out(settings, chunks, part) | _same(*g_m)
    stage = _out_stage(settings, part)
    if stage == "out_gated":
        outputs["g.gate"] = "g.gate"
    return [Instruction(f"{stage}_backward", inputs, outputs), *_updates(settings, part)]


def _norm_backward(settings: Settings) -> Instruction:
    inputs = _same("x", "g.n") | _norm(settings, "before_attention") | {"sum.x": Operand("g.x")}
    return Instruction("norm_backward", inputs, {"g.x": "g"})


def update(target: str) -> Instruction:
    """Return the instruction that uses the gradients of one layer's A and B, and drops them."""
    gradients = {side: Operand(f"{target}.{side}") for side in ("dA", "dB")}
    return Instruction("update", gradients, {"target": target})


def _updates(settings: Settings, *targets: str) -> list[Instruction]:
    return [update(target) for target in targets if target in settings.target_modules]


def _trained(settings: Settings, target: str, name: str) -> dict[str, str]:
    """The gradients of A and B of `target`, which a stage calls `name`."""
    if target not in settings.target_modules:
        return {}
    return {f"g.{name}.{side}": f"{target}.d{side}" for side in "AB"}


def _linear(settings: Settings, target: str, name: str) -> Operands:
    """All arrays of a linear layer, which a stage calls `name`."""
    operands = _parts(settings, target)
    operands |= _same(f"{target}.bias", when=settings.dims.linear_bias(target))
    operands |= _same(f"{target}.A", f"{target}.B", when=target in settings.target_modules)
    return {name + key.removeprefix(target): operand for key, operand in operands.items()}


def _parts(
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


def _same(*names: str, when: bool = True) -> Operands:
    return {name: Operand(name) for name in names if when}


def _named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _numbered(name: str, chunks: list[tuple[int, int]]) -> list[str]:
    return [f"{name}@{i}" for i in range(len(chunks))]


def _with_frees(listed: list[Instruction], results: tuple[str, ...]) -> list[Instruction]:
    """Return `listed`, each with the names that nothing after it reads; an output that nothing
    reads goes at once."""
    annotated = []
    needed = set(results)
    for instruction in reversed(listed):
        outputs: set[str] = set()
        if instruction.stage != "update":
            outputs.update(instruction.outputs.values())
        used = {operand.name for operand in instruction.inputs.values()}
        free = (used | outputs) - needed
        adapter = {n for n in free if n.endswith((".A", ".B")) and not n.startswith("g.")}
        annotated.append(replace(instruction, free=tuple(sorted(free - adapter))))
        needed = (needed - outputs) | used
    return annotated[::-1]


def _loss(settings: Settings, tiles: list[tuple[int, int]]) -> list[Instruction]:
    sums = _named("maximum", "total")
    begin = _same("hn") | _parts(settings, "rows")
    listed = [Instruction("loss_begin", begin, _named("target") | sums, evaluate=False)]
    for tile in tiles:
        inputs = _same("hn", "maximum", "total") | _parts(settings, "head", "head", (0, *tile))
        listed.append(Instruction("loss_tile", inputs, sums))
    end = _same("target", "maximum", "total")
    return [*listed, Instruction("loss_end", end, _named("nll", "logsumexp"))]


def _loss_backward(settings: Settings, tiles: list[tuple[int, int]]) -> list[Instruction]:
    begin = _same("hn") | _parts(settings, "rows") | {"g.target": Operand("weight")}
    listed = [Instruction("loss_begin_backward", begin, {"g.hn": "gh"})]
    for tile in tiles:
        inputs = _same("hn", "logsumexp", "weight", "gh")
        inputs |= _parts(settings, "head", "head", (0, *tile))
        listed.append(Instruction("loss_tile_backward", inputs, _named("gh")))
    return listed
