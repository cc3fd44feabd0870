"""The order in which a block's stages run, what each takes, and what is dead after it, as instructions: data, not code.

A backend that can run the stages needs nothing else: the Python session, an exported artifact's session and the C++
host all interpret this list. Imports no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ondevice.methods.mesp.mlx.settings import GATE_UP, NORMS, SHARED, Settings, matrix_parts

KEPT = (".A", ".B")
"""Ends of names that are never freed: the adapter."""


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


def forward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """List the instructions of a block's forward pass: x -> the next block's x."""
    if settings.active_experts:
        return with_frees(
            [*_attention(settings, length_tokens, False), *_mixture(settings, length_tokens)],
            ("x",),
        )
    listed = [*_attention(settings, length_tokens, False), *_mlp(settings)]
    behind = (_same("m") | _norm(settings, "after_mlp")) if settings.branch_apart else {}
    listed.append(Instruction("end", _same("y") | behind, _named("x")))
    return with_frees(listed, ("x",))


def backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """List those of its backward pass: x and g, the gradient of its output -> g, that of its input. A and B are updated
    on the way."""
    listed = _attention(settings, length_tokens, settings.store_h)
    if settings.active_experts:
        listed += [
            *_mixture_backward(settings, length_tokens),
            *_attention_backward(settings, length_tokens),
        ]
        return with_frees(listed, ("g",))
    if settings.norm("after_mlp"):  # its backward pass needs what it normed
        listed += _mlp(settings)
        branch = _same("y", "g") | _norm(settings, "after_mlp")
        listed.append(Instruction("branch_backward", branch, _named("gb")))
    else:
        listed.append(_mlp_norm("mlp_norm_again", settings))
        if settings.branch_apart:
            listed.append(Instruction("branch_backward", _same("g"), _named("gb"), evaluate=False))
    listed += _mlp_backward(settings)
    listed += _attention_backward(settings, length_tokens)
    return with_frees(listed, ("g",))


def _mlp(settings: Settings) -> list[Instruction]:
    """m -> y: the sum with the MLP, or the MLP alone where something is between (`Settings.branch_apart`)."""
    listed = [_mlp_norm("mlp_norm", settings)]
    for low, high in settings.mlp_bounds():
        listed.append(_gate_up(settings, low, high))
        listed.append(Instruction("act", _same("gate", "up"), _named("act"), evaluate=False))
        down = _matrix(settings, "down_proj", low, high) | _lora(settings, "down_proj", low, high)
        listed.append(Instruction("down", _same("act", "y") | down, _named("y")))
    return listed


def _mixture(settings: Settings, length_tokens: int) -> list[Instruction]:
    """m -> x, a chunk of the tokens after the other."""
    chunks, weights = settings.query_bounds(length_tokens), _experts(settings)
    listed = [
        Instruction("mixture", {"m": Operand("m", 1, low, high)} | weights, {"x": f"x@{i}"})
        for i, (low, high) in enumerate(chunks)
    ]
    return [*listed, Instruction("mixture_end", _same(*_numbered("x", len(chunks))), _named("x"))]


def _mixture_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    """m and g -> gm."""
    chunks, weights, listed = settings.query_bounds(length_tokens), _experts(settings), []
    for i, (low, high) in enumerate(chunks):
        inputs = {name: Operand(name, 1, low, high) for name in ("m", "g")} | weights
        listed.append(Instruction("mixture_backward", inputs, {"gm": f"gm@{i}"}))
    return [
        *listed,
        Instruction("mixture_join", _same(*_numbered("gm", len(chunks))), _named("gm")),
    ]


def _experts(settings: Settings) -> dict[str, Operand]:
    """The norm before a mixture of experts, and all its arrays."""
    names = ["experts.gate_up", "experts.down", *(SHARED if settings.shared else ())]
    matrices = [f"{name}.{part}" for name in names for part in matrix_parts(settings.bits)]
    gates = ["router.weight", *(["shared_gate.weight"] if settings.shared else [])]
    return _norm(settings, "before_mlp") | _same(*gates, *matrices)


def _attention(settings: Settings, length_tokens: int, store_h: bool) -> list[Instruction]:
    """x -> m, with q, k, v, o and n beside it."""
    targets = settings.attention_targets
    h_names = (
        [f"{target}.h" for target in targets if target in settings.target_modules]
        if store_h
        else []
    )
    weights = {key: ref for target in targets for key, ref in _linear(settings, target).items()}
    heads = _norm(settings, "q") | _norm(settings, "k")
    listed = [
        Instruction(
            "norm", _same("x") | _norm(settings, "before_attention"), _named("n"), evaluate=False
        ),
        Instruction(
            "project", _same("n") | weights | heads, _named("q", "k", "v", *h_names), evaluate=False
        ),
        Instruction("rope", _same("q", "k") | _rope(settings), _named("q", "k")),
    ]
    for i, (low, high) in enumerate(settings.query_bounds(length_tokens)):
        listed.append(Instruction("attend", _seen(settings, low, high), {"o": f"o@{i}"}))
    h = ["o_proj.h"] if store_h and "o_proj" in settings.target_modules else []
    inputs = _same("x", *_numbered("o", len(settings.query_bounds(length_tokens)))) | _norm(
        settings, "after_attention"
    )
    listed.append(Instruction("out", inputs | _linear(settings, "o_proj"), _named("m", *h)))
    return listed


def _seen(settings: Settings, low: int, high: int) -> dict[str, Operand]:
    """A chunk's queries, all keys and values up to its end, and the layer's window."""
    seen = {
        "q": Operand("q", 2, low, high),
        "k": Operand("k", 2, 0, high),
        "v": Operand("v", 2, 0, high),
    }
    return seen | (_same("window.weight") if settings.dims.traits.windows else {})


def _rope(settings: Settings) -> dict[str, Operand]:
    return _same("rope.weight") if settings.rope_by_layer else {}


def _norm(settings: Settings, place: str) -> dict[str, Operand]:
    return _same(f"{NORMS[place]}.weight") if settings.norm(place) else {}


def _mlp_norm(stage: str, settings: Settings) -> Instruction:
    inputs, outputs = _same("m") | _norm(settings, "before_mlp"), _named("mn")
    if stage == "mlp_norm":
        outputs |= _named("y")
        if settings.dims.linear_bias("down_proj"):
            inputs |= _same("down_proj.bias")
    for target in settings.gate_up_targets:
        if target in settings.target_modules:
            inputs |= _same(f"{target}.A")
            outputs |= _named(f"{target}.h")
    return Instruction(stage, inputs, outputs, evaluate=stage != "mlp_norm")


def _gate_up(settings: Settings, low: int, high: int) -> Instruction:
    inputs = _same("mn")
    for target in GATE_UP:
        inputs |= _matrix(settings, target, low, high) | _bias(settings, target, low, high)
        if settings.has(target):
            inputs |= {f"{target}.h": Operand(f"{settings.place(target)[0]}.h")} | _b_rows(
                settings, target, low, high
            )
    return Instruction("gate_up", inputs, _named("gate", "up"), evaluate=False)


def _mlp_backward(settings: Settings) -> list[Instruction]:
    listed, tiles = [], settings.mlp_bounds()
    lora = {target for target in (*GATE_UP, "down_proj") if settings.has(target)}
    branch = {"g": Operand("gb" if settings.branch_apart else "g")}
    # A tile gives a range of the columns of dA and of the rows of dB; `mlp_norm_backward` joins them.
    for i, (low, high) in enumerate(tiles):
        listed.append(_gate_up(settings, low, high))
        inputs = branch | _same("gate", "up") | _matrix(settings, "down_proj", low, high)
        outputs = _named("gact")
        if "down_proj" in lora:
            inputs |= _lora(settings, "down_proj", low, high) | (_same("down_proj.h") if i else {})
            outputs |= {"down_proj.dA": f"down_proj.dA@{i}", "down_proj.h": "down_proj.h"}
        listed.append(Instruction("down_backward", inputs, outputs, evaluate=False))
        listed.append(
            Instruction(
                "act_backward", _same("gate", "up", "gact"), _named("ggate", "gup"), evaluate=False
            )
        )
        inputs, outputs = _same("ggate", "gup") | (_same("gn") if i else {}), _named("gn")
        for target in GATE_UP:
            inputs |= _matrix(settings, target, low, high)
            if target in lora:
                inputs |= {f"{target}.h": Operand(f"{settings.place(target)[0]}.h")}
                inputs |= (_same(f"{target}.gh") if i else {}) | _b_rows(
                    settings, target, low, high
                )
                outputs |= {f"{target}.dB": f"{target}.dB@{i}", f"{target}.gh": f"{target}.gh"}
        listed.append(Instruction("gate_up_backward", inputs, outputs))
    inputs, outputs = _same("m", "g", "gn") | _norm(settings, "before_mlp"), _named("gm")
    inputs |= _same("gb") if settings.branch_apart else {}
    for target in GATE_UP:
        if target in lora:
            own = settings.place(target)[0]
            inputs |= _same(
                "mn", f"{target}.gh", f"{own}.A", *_numbered(f"{target}.dB", len(tiles))
            )
            outputs |= _gradients(own)
    if "down_proj" in lora:
        inputs |= _same("down_proj.h", *_numbered("down_proj.dA", len(tiles)))
        outputs |= _gradients("down_proj")
    return [
        *listed,
        Instruction("mlp_norm_backward", inputs, outputs),
        *_updates(settings, *settings.gate_up_targets, "down_proj"),
    ]


def _attention_backward(settings: Settings, length_tokens: int) -> list[Instruction]:
    chunks = settings.query_bounds(length_tokens)
    normed = settings.norm("after_attention")
    inputs = _same("gm", *_numbered("o", len(chunks))) | _linear(settings, "o_proj", bias=normed)
    inputs |= _norm(settings, "after_attention")
    listed = [
        Instruction(
            "out_backward",
            inputs | _h(settings, "o_proj"),
            _named("go") | _trained(settings, "o_proj"),
        )
    ]
    listed += _updates(settings, "o_proj")
    for i, (low, high) in reversed(list(enumerate(chunks))):
        inputs = (
            _seen(settings, low, high)
            | {"go": Operand("go", 1, low, high)}
            | ({} if i == len(chunks) - 1 else _same("gk", "gv"))
        )
        listed.append(
            Instruction("attend_backward", inputs, {"gq": f"gq@{i}"} | _named("gk", "gv"))
        )
    inputs = _same("gk", *_numbered("gq", len(chunks))) | _rope(settings)
    listed.append(Instruction("rope_backward", inputs, _named("gq", "gk")))
    if settings.norm("q"):
        inputs = _same("n", "gq", "gk") | _norm(settings, "q") | _norm(settings, "k")
        for target in settings.attention_targets[:2]:  # what was normed is computed again
            inputs |= _linear(settings, target) | _h(settings, target)
        listed.append(Instruction("head_norms_backward", inputs, _named("gq", "gk")))
    inputs, outputs = _same("n", "gq", "gk", "gv"), _named("gn")
    for target in settings.attention_targets:
        inputs |= _linear(settings, target, bias=False) | _h(settings, target)
        outputs |= _trained(settings, target)
    listed += [
        Instruction("project_backward", inputs, outputs),
        *_updates(settings, *settings.attention_targets),
    ]
    inputs = _same("x", "gm", "gn") | _norm(settings, "before_attention")
    return [*listed, Instruction("norm_backward", inputs, _named("g"))]


def _updates(settings: Settings, *targets: str) -> list[Instruction]:
    """Gradients of A and B are used and dropped."""
    return [
        Instruction(
            "update",
            {side: Operand(f"{target}.{side}") for side in ("dA", "dB")},
            {"target": target},
        )
        for target in targets
        if target in settings.target_modules
    ]


def _trained(settings: Settings, target: str) -> dict[str, str]:
    return _gradients(target) if target in settings.target_modules else {}


def _gradients(target: str) -> dict[str, str]:
    return _named(f"{target}.dA", f"{target}.dB")


def _h(settings: Settings, target: str) -> dict[str, Operand]:
    return _same(f"{target}.h") if settings.store_h and target in settings.target_modules else {}


def _linear(settings: Settings, target: str, bias: bool = True) -> dict[str, Operand]:
    """All arrays of a linear layer, whole."""
    operands = _matrix(settings, target) | (_bias(settings, target) if bias else {})
    return operands | (
        _same(f"{target}.A", f"{target}.B") if target in settings.target_modules else {}
    )


def _lora(settings: Settings, target: str, low: int, high: int) -> dict[str, Operand]:
    """A's columns of a tile of the inputs, and B."""
    if target not in settings.target_modules:
        return {}
    return {
        f"{target}.A": Operand(f"{target}.A", 1, low, high),
        f"{target}.B": Operand(f"{target}.B"),
    }


def _bias(settings: Settings, target: str, low: int = 0, high: int = 0) -> dict[str, Operand]:
    own, first = settings.place(target)
    if not settings.dims.linear_bias(own):
        return {}
    return {
        f"{target}.bias": Operand(f"{own}.bias", 0, first + low, first + high)
        if high
        else Operand(f"{own}.bias")
    }


def _b_rows(settings: Settings, target: str, low: int, high: int) -> dict[str, Operand]:
    """B's rows of a tile of gate or up."""
    own, first = settings.place(target)
    return {f"{target}.B": Operand(f"{own}.B", 0, first + low, first + high)}


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


def with_frees(listed: list[Instruction], results: tuple[str, ...]) -> list[Instruction]:
    """Return `listed`, each with the names that nothing after it reads; an output that nothing reads goes at once."""
    annotated, needed = [], set(results)
    for instruction in reversed(listed):
        outputs = set() if instruction.stage == "update" else set(instruction.outputs.values())
        used = {operand.name for operand in instruction.inputs.values()}
        free = {name for name in used | outputs if name not in needed and not name.endswith(KEPT)}
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
    """List those of that norm's backward pass: x and ghn -> g."""
    instruction = Instruction(
        "final_norm_backward", _same("x", "final_norm.weight", "ghn"), _named("g")
    )
    return with_frees([instruction], ("g",))


def loss(settings: Settings, tiles: list[tuple[int, int]], gradient: bool) -> list[Instruction]:
    """List those of the loss: hn of labelled tokens, the head's rows of their labels, each token's weight -> nll, and
    gh with `gradient`."""
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
    listed.append(
        Instruction("loss_begin_backward", _rows(settings) | _same("weight"), _named("gh"))
    )
    for low, high in tiles:
        head = _head(settings, low, high)
        listed.append(
            Instruction(
                "loss_tile_backward", _same("hn", "logsumexp", "weight", "gh") | head, _named("gh")
            )
        )
    return with_frees(listed, ("nll", "gh"))


def _rows(settings: Settings) -> dict[str, Operand]:
    return _same(*(f"rows.{part}" for part in matrix_parts(settings.bits)))


def _head(settings: Settings, low: int, high: int) -> dict[str, Operand]:
    return {
        f"head.{part}": Operand(f"head.{part}", 0, low, high)
        for part in matrix_parts(settings.bits)
    }
