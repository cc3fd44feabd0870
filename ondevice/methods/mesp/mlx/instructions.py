"""The order in which a block's stages run, with the arrays that each takes and those that are dead
after it, as instructions: data, not code. `mixers` has what they are made of, and those of attention.

A backend that can run the stages needs nothing else: the Python session, an exported artifact's
session and the C++ host all interpret this list. Imports no MLX.
"""

from __future__ import annotations

from dataclasses import replace

from ondevice.core.traits import CONVOLUTION, DELTA
from ondevice.methods.mesp.mlx.mixers import (
    Instruction,
    Operand,
    Operands,
    attention_backward,
    convolution_backward,
    delta_backward,
    linear_of,
    mix,
    named,
    norm_of,
    numbered,
    parts_of,
    same,
    trained,
    updates,
)
from ondevice.methods.mesp.mlx.settings import GATE_UP, SHARED, Settings

LAYER_INPUT = ("layer_gate", "layer_out")
"""Linear layers of the branch behind the MLP."""
MIX_FROM = ("rope", "rope_queries", "convolve", "convolve_alone")
"""The stage of each mixer in which tokens first see others."""
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
    norm = same("x", "final_norm.weight")
    if name == "forward":
        listed = _forward(settings, length_tokens, row_tokens)
    elif name == "backward":
        listed = _backward(settings, length_tokens)
    elif name == LAYER_INPUT_LIST:
        inputs = same("x", "layer_input_norm.weight") | parts_of(settings, "rows")
        inputs |= parts_of(settings, "layer_projection")
        listed = [Instruction(name, inputs, {"input": "input.weight"})]
    elif name == "embed":
        listed = [Instruction("embed", parts_of(settings, "rows"), named("x"))]
    elif name == "final_norm":
        listed = [Instruction("final_norm", norm, named("hn"))]
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
    listed = mix(settings, row_tokens or length_tokens)
    if row_tokens:
        listed = _rows_apart(listed)
    if not settings.routes:
        listed += [_mlp_norm(settings), *_mlp_tiles(settings)]
        return [*listed, *_experts_beside(settings, length_tokens), *_end(settings, length_tokens)]
    chunks = settings.query_bounds(length_tokens)
    for i, (low, high) in enumerate(chunks):
        inputs = {"m": Operand("m", 1, low, high)} | _experts(settings)
        listed.append(Instruction("mixture", inputs, {"x": f"x@{i}"}))
    return [*listed, Instruction("mixture_end", same(*numbered("x", chunks)), named("x"))]


def _experts_beside(settings: Settings, length_tokens: int) -> list[Instruction]:
    """m -> r, in chunks, of experts next to the MLP; nothing if there are none."""
    if not settings.beside:
        return []
    return [
        Instruction("experts", {"m": Operand("m", 1, *chunk)} | _experts(settings), {"r": f"r@{i}"})
        for i, chunk in enumerate(settings.query_bounds(length_tokens))
    ]


def _experts_beside_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """The gradients of r and of m without them -> that of m."""
    listed = []
    chunks = settings.query_bounds(length_tokens)
    for i, chunk in enumerate(chunks):
        inputs = {"m": Operand("m", 1, *chunk), "g.r": Operand(f"g.r@{i}")} | _experts(settings)
        inputs["sum.m"] = Operand("g.m", 1, *chunk)
        listed.append(Instruction("experts_backward", inputs, {"g.m": f"g.m@{i}"}))
    joined = {f"x@{i}": Operand(f"g.m@{i}") for i in range(len(chunks))}
    return [*listed, Instruction("mixture_end", joined, {"x": "g.m"})]


def _branch(settings: Settings, length_tokens: int) -> Operands:
    """What the end of the MLP's branch takes in addition to y."""
    inputs = same("m", when=settings.branch_apart) | norm_of(settings, "after_mlp")
    if settings.beside:
        inputs |= norm_of(settings, "after_dense")
        inputs |= same(*numbered("r", settings.query_bounds(length_tokens)))
    return inputs


def _end(settings: Settings, length_tokens: int) -> list[Instruction]:
    """y -> the next block's input, and e in front of the norms after the MLP."""
    branch = _branch(settings, length_tokens)
    if not settings.has_behind:
        return [Instruction("end", same("y") | branch, named("x"))]
    end = Instruction("end", same("y") | branch, {"x": "e"})
    return [end, Instruction("behind", _behind(settings), named("x"))]


def _behind(settings: Settings) -> Operands:
    """e, and what is behind the MLP."""
    inputs = same("e") | same("output_scale.weight", when=settings.dims.traits.output_scale)
    if settings.dims.traits.layer_input:
        inputs |= same("input.weight") | norm_of(settings, "after_layer_input")
        for part in LAYER_INPUT:
            inputs |= linear_of(settings, part, part)
    return inputs


def _behind_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """y and g, the gradient of the block's output -> g, that of e."""
    outputs = {"g.e": "g"}
    for part in LAYER_INPUT:
        outputs |= trained(settings, part, part)
    inputs = _behind(settings) | {"g.x": Operand("g")}
    end = _end(settings, length_tokens)[0]
    backward = Instruction("behind_backward", inputs, outputs)
    return [end, backward, *updates(settings, *LAYER_INPUT)]


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
        Instruction("take_apart", same(*projections, "apart"), named(*projections)),
        *listed[first:last],
        Instruction("put_together", same(*mixed, "together"), named("o@0")),
        replace(out, inputs=inputs),
    ]


def _backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    listed = mix(settings, length_tokens)
    mixer = settings.mixer
    if not settings.routes:
        listed += _mlp_backward(settings, length_tokens)
        if mixer == CONVOLUTION:
            return [*listed, *convolution_backward(settings, ["g.m"])]
        if mixer == DELTA:
            return [*listed, *delta_backward(settings, length_tokens)]
        return [*listed, *attention_backward(settings, length_tokens)]
    chunks = settings.query_bounds(length_tokens)
    for i, (low, high) in enumerate(chunks):
        inputs = {"m": Operand("m", 1, low, high), "g.x": Operand("g", 1, low, high)}
        inputs |= _experts(settings)
        listed.append(Instruction("mixture_backward", inputs, {"g.m": f"g.m@{i}"}))
    if mixer == CONVOLUTION:
        return listed + convolution_backward(settings, numbered("g.m", chunks))
    return listed + attention_backward(settings, length_tokens)


def _experts(settings: Settings) -> Operands:
    """The norm before a mixture of experts, and all its arrays."""
    inputs = same("router.weight")
    if settings.beside:
        inputs |= norm_of(settings, "before_experts") | norm_of(settings, "after_experts")
        inputs |= same("router_scale.weight", "expert_scale.weight")
    else:
        inputs |= norm_of(settings, "before_mlp")
    inputs |= same("router.bias", when=settings.routing.bias)
    inputs |= same("shared_gate.weight", when=settings.shared)
    for name in ("experts.gate_up", "experts.down", *SHARED):
        if settings.shared or name not in SHARED:
            inputs |= parts_of(settings, name)
    return inputs


def _mlp_norm(settings: Settings) -> Instruction:
    inputs = same("m") | norm_of(settings, "before_mlp")
    inputs |= same("down_proj.bias", when=settings.dims.linear_bias("down_proj"))
    gate_up = _trained_gate_up(settings)
    inputs |= same(*(f"{target}.A" for target in gate_up))
    return Instruction("mlp_norm", inputs, named("n", "y", *(f"{one}.h" for one in gate_up)))


def _trained_gate_up(settings: Settings) -> list[str]:
    return [t for t in settings.gate_up_targets if t in settings.target_modules]


def _mlp_tiles(settings: Settings) -> list[Instruction]:
    """n -> y: the sum with the MLP, or the MLP only (`Settings.branch_apart`)."""
    return [
        Instruction("mlp", same("y") | _mlp(settings, low, high), named("y"))
        for low, high in settings.mlp_bounds()
    ]


def _mlp(settings: Settings, low: int, high: int) -> Operands:
    """n, h of gate and up, and a tile of gate, up and down."""
    inputs = same("n", *(f"{target}.h" for target in _trained_gate_up(settings)))
    for target in GATE_UP:
        own, first = settings.place(target)
        rows = (0, first + low, first + high)
        inputs |= parts_of(settings, target, own, rows)
        if settings.dims.linear_bias(own):
            inputs[f"{target}.bias"] = Operand(f"{own}.bias", *rows)
        if settings.has(target):
            inputs[f"{target}.B"] = Operand(f"{own}.B", *rows)
    inputs |= parts_of(settings, "down_proj", "down_proj", (1, low, high))
    if settings.has("down_proj"):
        inputs |= {"down_proj.A": Operand("down_proj.A", 1, low, high)} | same("down_proj.B")
    return inputs


def _mlp_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """m and g -> g.m."""
    norm = _mlp_norm(settings)
    listed = [norm]
    branch, total = "g", "g"
    again = [*_mlp_tiles(settings), *_experts_beside(settings, length_tokens)]
    if settings.has_behind:
        listed += [*again, *_behind_backward(settings, length_tokens)]
    if settings.branch_apart:
        if settings.norm("after_mlp") and not settings.has_behind:
            listed += again  # a norm needs its input; a factor only its shape
        inputs = same("y") | _branch(settings, length_tokens) | {"g.x": Operand("g")}
        parts = [name for name in inputs if name[:2] == "r@"]
        outputs = named("g.m", "g.y", *(f"g.{part}" for part in parts))
        listed.append(Instruction("end_backward", inputs, outputs))
        if settings.beside:
            listed += _experts_beside_backward(settings, length_tokens)
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
        outputs = named(*(f"g.{name}" for name in added))
        outputs |= {f"g.{name}": f"g.{name}@{i}" for name in tiled}
        listed.append(Instruction("mlp_backward", inputs, outputs))
        joined |= {f"{name}@{i}": Operand(f"g.{name}@{i}") for name in tiled}
    if gradients:
        listed.append(Instruction("mlp_join", joined, named(*gradients)))
    inputs = norm.inputs | {"sum.m": Operand(total)}
    inputs |= same("g.n", *(f"g.{target}.h" for target in gate_up))
    outputs = named("g.m") | {f"g.{target}.A": f"{target}.dA" for target in gate_up}
    listed.append(Instruction("mlp_norm_backward", inputs, outputs))
    return [*listed, *updates(settings, *settings.gate_up_targets, "down_proj")]


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
    sums = named("maximum", "total")
    begin = same("hn") | parts_of(settings, "rows")
    listed = [Instruction("loss_begin", begin, named("target") | sums, evaluate=False)]
    for tile in tiles:
        inputs = same("hn", "maximum", "total") | parts_of(settings, "head", "head", (0, *tile))
        listed.append(Instruction("loss_tile", inputs, sums))
    end = same("target", "maximum", "total")
    return [*listed, Instruction("loss_end", end, named("nll", "logsumexp"))]


def _loss_backward(settings: Settings, tiles: list[tuple[int, int]]) -> list[Instruction]:
    begin = same("hn") | parts_of(settings, "rows") | {"g.target": Operand("weight")}
    listed = [Instruction("loss_begin_backward", begin, {"g.hn": "gh"})]
    for tile in tiles:
        inputs = same("hn", "logsumexp", "weight", "gh")
        inputs |= parts_of(settings, "head", "head", (0, *tile))
        listed.append(Instruction("loss_tile_backward", inputs, named("gh")))
    return listed
