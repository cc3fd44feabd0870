"""The order in which a block's stages run, what each takes, and what is dead after it, as
instructions: data, not code.

A backend that can run the stages needs nothing else: the Python session, an exported artifact's
session and the C++ host all interpret this list. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class Instruction:
    """One stage to run, or an update of one layer's A and B where `stage` is `update`.

    Attributes:
        stage: method of `Stages`; several instructions share it.
        inputs: the stage's name of each input, and what it is in the block.
        outputs: the stage's name of each output, and its name in the block.
        evaluate: compute here before anything else is asked for, so that what is in `free` can go.
        free: names in the block that nothing uses after this one.
    """

    stage: str
    inputs: dict[str, Operand]
    outputs: dict[str, str] = field(default_factory=dict)
    evaluate: bool = True
    free: tuple[str, ...] = ()


BY_LENGTH = ("forward", "backward")
ANY_LENGTH = ("embed", "final_norm", "final_norm_backward", "loss", "loss_only")
"""Names of the lists, those of a block first."""


def of(
    name: str, settings: Settings, tiles: list[tuple[int, int]], length_tokens: int
) -> list[Instruction]:
    """Return the list of that name; `tiles` are the vocabulary's."""
    if name in BY_LENGTH:
        return (forward if name == "forward" else backward)(settings, length_tokens)
    if name in ("loss", "loss_only"):
        return loss(settings, tiles, name == "loss")
    if name == "embed":
        return embed(settings)
    return final_norm() if name == "final_norm" else final_norm_backward()


def forward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """List the instructions of a block's forward pass: x -> the next block's x."""
    listed = _attention(settings, length_tokens)
    if settings.active_experts:
        return with_frees([*listed, *_mixture(settings, length_tokens)], ("x",))
    listed += [_mlp_norm(settings), *_mlp_tiles(settings)]
    branch = _same("m") | _norm(settings, "after_mlp") if settings.branch_apart else {}
    return with_frees([*listed, Instruction("end", _same("y") | branch, _named("x"))], ("x",))


def backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """List the instructions of a block's backward pass.

    x and g, the gradient of the block's output -> g, that of its input. A and B are updated as soon
    as their gradients are known.
    """
    listed = _attention(settings, length_tokens)
    if settings.active_experts:
        chunks, experts = settings.query_bounds(length_tokens), _experts(settings)
        for i, (low, high) in enumerate(chunks):
            inputs = {"m": Operand("m", 1, low, high), "g.x": Operand("g", 1, low, high)}
            listed.append(Instruction("mixture_backward", inputs | experts, {"g.m": f"g.m@{i}"}))
    else:
        listed += _mlp_backward(settings)
    listed += _attention_backward(settings, length_tokens)
    return with_frees(listed, ("g",))


def _mixture(settings: Settings, length_tokens: int) -> list[Instruction]:
    """m -> x, a chunk of the tokens after the other."""
    chunks, weights = settings.query_bounds(length_tokens), _experts(settings)
    listed = [
        Instruction("mixture", {"m": Operand("m", 1, low, high)} | weights, {"x": f"x@{i}"})
        for i, (low, high) in enumerate(chunks)
    ]
    return [*listed, Instruction("mixture_end", _same(*_numbered("x", len(chunks))), _named("x"))]


def _experts(settings: Settings) -> dict[str, Operand]:
    """The norm before a mixture of experts, and all its arrays."""
    names = ["experts.gate_up", "experts.down", *(SHARED if settings.shared else ())]
    matrices = [f"{name}.{part}" for name in names for part in matrix_parts(settings.bits)]
    gates = ["router.weight", *(["shared_gate.weight"] if settings.shared else [])]
    return _norm(settings, "before_mlp") | _same(*gates, *matrices)


def _attention(settings: Settings, length_tokens: int) -> list[Instruction]:
    """x -> m, and q, k, v and o."""
    listed = [_attention_norm(settings)]
    for inputs, outputs, target in _projections(settings):
        listed.append(Instruction(_project(settings, target), inputs, outputs, evaluate=False))
    listed.append(Instruction("rope", _same("q", "k") | _rope(settings), _named("q", "k")))
    chunks = settings.query_bounds(length_tokens)
    for i, (low, high) in enumerate(chunks):
        listed.append(Instruction("attend", _seen(settings, low, high), {"o": f"o@{i}"}))
    return [*listed, Instruction("out", _out(settings, len(chunks)), _named("m"))]


def _attention_norm(settings: Settings) -> Instruction:
    inputs = _same("x") | _norm(settings, "before_attention")
    return Instruction("norm", inputs, _named("n"), evaluate=False)


def _projections(settings: Settings) -> Iterator[tuple[dict[str, Operand], dict[str, str], str]]:
    """Yield inputs, outputs and name of each linear layer from n to q, k and v, or to all three."""
    for target in settings.attention_targets:
        names = {"q": "q", "k": "k", "v": "v"} if settings.dims.traits.fused else {"y": target[0]}
        inputs = _same("n")
        for name, operand in _linear(settings, target).items():
            inputs["linear" + name.removeprefix(target)] = operand
        for name, head in names.items():
            if head != "v" and settings.norm(head):
                inputs[f"{name}.norm.weight"] = Operand(f"{NORMS[head]}.weight")
        yield inputs, names, target


def _project(settings: Settings, target: str) -> str:
    return "project" if target in settings.target_modules else "project_frozen"


def _rope(settings: Settings) -> dict[str, Operand]:
    return _same("rope.weight") if settings.rope_by_layer else {}


def _seen(settings: Settings, low: int, high: int) -> dict[str, Operand]:
    """A chunk's queries, all keys and values up to its end, and the layer's window."""
    seen = {
        "q": Operand("q", 2, low, high),
        "k": Operand("k", 2, 0, high),
        "v": Operand("v", 2, 0, high),
    }
    return seen | (_same("window.weight") if settings.dims.traits.windows else {})


def _out(settings: Settings, chunks: int) -> dict[str, Operand]:
    inputs = _same("x", *_numbered("o", chunks)) | _norm(settings, "after_attention")
    return inputs | _linear(settings, "o_proj")


def _norm(settings: Settings, position: str) -> dict[str, Operand]:
    return _same(f"{NORMS[position]}.weight") if settings.norm(position) else {}


def _mlp_norm(settings: Settings) -> Instruction:
    inputs, outputs = _same("m") | _norm(settings, "before_mlp"), _named("n", "y")
    inputs |= _same("down_proj.bias") if settings.dims.linear_bias("down_proj") else {}
    for target in _trained_gate_up(settings):
        inputs |= _same(f"{target}.A")
        outputs |= _named(f"{target}.h")
    return Instruction("mlp_norm", inputs, outputs)


def _trained_gate_up(settings: Settings) -> list[str]:
    return [t for t in settings.gate_up_targets if t in settings.target_modules]


def _mlp_tiles(settings: Settings) -> list[Instruction]:
    """n -> y: the sum with the MLP, or the MLP only (`Settings.branch_apart`)."""
    tiles = settings.mlp_bounds()
    return [
        Instruction("mlp", _same("y") | _mlp(settings, low, high), _named("y"))
        for low, high in tiles
    ]


def _mlp(settings: Settings, low: int, high: int) -> dict[str, Operand]:
    """n, h of gate and up, and a tile of gate, up and down."""
    inputs = _same("n", *(f"{target}.h" for target in _trained_gate_up(settings)))
    for target in (*GATE_UP, "down_proj"):
        inputs |= _matrix(settings, target, low, high)
        own, first = settings.place(target)
        if target != "down_proj":
            inputs |= _bias(settings, target, low, high)
            b = Operand(f"{own}.B", 0, first + low, first + high)
            inputs |= {f"{target}.B": b} if settings.has(target) else {}
        elif settings.has(target):
            inputs |= {f"{target}.A": Operand(f"{target}.A", 1, low, high)} | _same(f"{target}.B")
    return inputs


def _mlp_backward(settings: Settings) -> list[Instruction]:
    """m and g -> g.m."""
    listed, tiles = [_mlp_norm(settings)], settings.mlp_bounds()
    g_y, rest = Operand("g"), {"sum.m": Operand("g")}
    if settings.branch_apart:
        # A norm needs what it normed; a factor needs only its shape.
        listed += _mlp_tiles(settings) if settings.norm("after_mlp") else []
        inputs = _same("m", "y") | _norm(settings, "after_mlp") | {"g.x": Operand("g")}
        listed.append(Instruction("end_backward", inputs, _named("g.m", "g.y")))
        g_y, rest = Operand("g.y"), {"sum.m": Operand("g.m")}
    # A tile has a range of the columns of down's A and of the rows of gate's and up's B: these are
    # joined. All other gradients are sums over the tiles.
    gate_up = _trained_gate_up(settings)
    added = ["n", *(f"{target}.h" for target in gate_up)]
    tiled = [f"{target}.B" for target in GATE_UP if settings.has(target)]
    gradients = [f"{target}.dB" for target in gate_up]
    if settings.has("down_proj"):
        added.append("down_proj.B")
        tiled.append("down_proj.A")
        gradients += ["down_proj.dA", "down_proj.dB"]
    for i, (low, high) in enumerate(tiles):
        inputs = _mlp(settings, low, high) | {"g.y": g_y}
        inputs |= {f"sum.{name}": Operand(f"g.{name}") for name in added} if i else {}
        outputs = {f"g.{name}": f"g.{name}" for name in added}
        outputs |= {f"g.{name}": f"g.{name}@{i}" for name in tiled}
        listed.append(Instruction("mlp_backward", inputs, outputs))
    if gradients:
        inputs = {name: Operand(f"g.{name}") for name in added if name.endswith(".B")}
        for name in tiled:
            inputs |= {f"{name}@{i}": Operand(f"g.{name}@{i}") for i in range(len(tiles))}
        listed.append(Instruction("mlp_join", inputs, _named(*gradients)))
    inputs, outputs = _mlp_norm(settings).inputs | rest, _named("g.m")
    for target in gate_up:
        inputs |= _same(f"g.{target}.h")
        outputs[f"g.{target}.A"] = f"{target}.dA"
    listed.append(Instruction("mlp_norm_backward", inputs | _same("g.n"), outputs))
    return [*listed, *_updates(settings, *settings.gate_up_targets, "down_proj")]


def _attention_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    chunks = settings.query_bounds(length_tokens)
    g_m = ["g.m"] if not settings.active_experts else _numbered("g.m", len(chunks))
    inputs, outputs = _out(settings, len(chunks)) | _same(*g_m), _named("g.x")
    outputs |= _named(*(f"g.{name}" for name in _numbered("o", len(chunks))))
    listed = [Instruction("out_backward", inputs, outputs | _trained(settings, "o_proj", "o_proj"))]
    listed += _updates(settings, "o_proj")
    # The last chunk sees all keys, so it comes first and makes g.k and g.v in full length.
    for i, (low, high) in reversed(list(enumerate(chunks))):
        inputs = _seen(settings, low, high) | {"g.o": Operand(f"g.o@{i}")}
        if i < len(chunks) - 1:
            inputs |= {"sum.k": Operand("g.k"), "sum.v": Operand("g.v")}
        outputs = {"g.q": f"g.q@{i}"} | _named("g.k", "g.v")
        listed.append(Instruction("attend_backward", inputs, outputs))
    # A rotation is linear: at any q and k of this shape it has the same gradient.
    inputs = _same("q", "k", "g.k", *_numbered("g.q", len(chunks))) | _rope(settings)
    listed.append(Instruction("rope_backward", inputs, _named("g.q", "g.k")))
    # n is computed again here, so that it takes no memory while attention's gradients are computed.
    listed.append(_attention_norm(settings))
    for number, (inputs, names, target) in enumerate(_projections(settings)):
        inputs |= {f"g.{name}": Operand(f"g.{head}") for name, head in names.items()}
        inputs |= {"sum.n": Operand("g.n")} if number else {}
        outputs = _named("g.n") | _trained(settings, target, "linear")
        listed.append(Instruction(f"{_project(settings, target)}_backward", inputs, outputs))
        listed += _updates(settings, target)
    inputs = _same("x", "g.n") | _norm(settings, "before_attention") | {"sum.x": Operand("g.x")}
    return [*listed, Instruction("norm_backward", inputs, {"g.x": "g"})]


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


def _linear(settings: Settings, target: str) -> dict[str, Operand]:
    """All arrays of a linear layer."""
    operands = _matrix(settings, target) | _bias(settings, target)
    trained = target in settings.target_modules
    return operands | (_same(f"{target}.A", f"{target}.B") if trained else {})


def _bias(settings: Settings, target: str, low: int = 0, high: int = 0) -> dict[str, Operand]:
    own, first = settings.place(target)
    if not settings.dims.linear_bias(own):
        return {}
    part = Operand(f"{own}.bias", 0, first + low, first + high)
    return {f"{target}.bias": part if high else Operand(f"{own}.bias")}


def _matrix(settings: Settings, target: str, low: int = 0, high: int = 0) -> dict[str, Operand]:
    """A frozen matrix, or a tile of it: rows of gate and up, columns of down."""
    axis, (own, first) = 1 if target == "down_proj" else 0, settings.place(target)
    operands = {}
    for part in matrix_parts(settings.bits):
        name, per = f"{own}.{part}", 1
        if axis and settings.bits:
            per = 32 // settings.bits if part == "weight" else settings.group_size
        tile = (
            Operand(name, axis, (first + low) // per, (first + high) // per)
            if high
            else Operand(name)
        )
        operands[f"{target}.{part}"] = tile
    return operands


def _same(*names: str) -> dict[str, Operand]:
    return {name: Operand(name) for name in names}


def _named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}@{i}" for i in range(count)]


def _is_adapter(name: str) -> bool:
    return name.endswith((".A", ".B")) and not name.startswith("g.")


def with_frees(listed: list[Instruction], results: tuple[str, ...]) -> list[Instruction]:
    """Return `listed`, each with the names that nothing after it reads; an output that nothing
    reads goes at once."""
    annotated, needed = [], set(results)
    for instruction in reversed(listed):
        outputs = set() if instruction.stage == "update" else set(instruction.outputs.values())
        used = {operand.name for operand in instruction.inputs.values()}
        free = {name for name in used | outputs if name not in needed and not _is_adapter(name)}
        annotated.append(replace(instruction, free=tuple(sorted(free - (outputs & needed)))))
        needed = (needed - outputs) | used
    return annotated[::-1]


def embed(settings: Settings) -> list[Instruction]:
    """List the instructions of the embedding: its rows of all tokens -> x."""
    return with_frees([Instruction("embed", _rows(settings), _named("x"))], ("x",))


def final_norm() -> list[Instruction]:
    """List those of the norm before the head: x -> hn; x stays for the backward pass."""
    return with_frees(
        [Instruction("final_norm", _same("x", "final_norm.weight"), _named("hn"))], ("hn",)
    )


def final_norm_backward() -> list[Instruction]:
    """List the instructions of that norm's backward pass: x and ghn -> g."""
    inputs = _same("x", "final_norm.weight") | {"g.hn": Operand("ghn")}
    return with_frees([Instruction("final_norm_backward", inputs, {"g.x": "g"})], ("g",))


def loss(settings: Settings, tiles: list[tuple[int, int]], gradient: bool) -> list[Instruction]:
    """List those of the loss: hn of labelled tokens, the head's rows of their labels, each token's
    weight -> nll, and gh with `gradient`."""
    listed = [
        Instruction(
            "loss_begin",
            _same("hn") | _rows(settings),
            _named("target", "maximum", "total"),
            evaluate=False,
        )
    ]
    for low, high in tiles:
        head = _head(settings, low, high)
        listed.append(
            Instruction(
                "loss_tile", _same("hn", "maximum", "total") | head, _named("maximum", "total")
            )
        )
    listed.append(
        Instruction("loss_end", _same("target", "maximum", "total"), _named("nll", "logsumexp"))
    )
    if not gradient:
        return with_frees(listed, ("nll",))
    begin = _same("hn") | _rows(settings) | {"g.target": Operand("weight")}
    listed.append(Instruction("loss_begin_backward", begin, {"g.hn": "gh"}))
    for low, high in tiles:
        inputs = _same("hn", "logsumexp", "weight", "gh") | _head(settings, low, high)
        listed.append(Instruction("loss_tile_backward", inputs, _named("gh")))
    return with_frees(listed, ("nll", "gh"))


def _rows(settings: Settings) -> dict[str, Operand]:
    return _same(*(f"rows.{part}" for part in matrix_parts(settings.bits)))


def _head(settings: Settings, low: int, high: int) -> dict[str, Operand]:
    return {
        f"head.{part}": Operand(f"head.{part}", 0, low, high)
        for part in matrix_parts(settings.bits)
    }
