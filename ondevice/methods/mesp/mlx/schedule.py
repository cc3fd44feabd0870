"""The order in which a block's stages run, what each takes, and what is dead after it; data, not code.

A backend that can run the stages needs nothing else: the Python session, an exported artifact's session and the C++
host all walk this list. Imports no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ondevice.methods.mesp.mlx.settings import Settings

ATTENTION = ("q_proj", "k_proj", "v_proj")
KEPT = (".A", ".B")
"""Ends of names that are never freed: the adapter."""


@dataclass(frozen=True)
class Ref:
    """An array by its name in the block, or a range of it along one axis."""

    name: str
    axis: int = -1
    start: int = 0
    stop: int = 0

    @property
    def whole(self) -> bool:
        return self.axis < 0


@dataclass(frozen=True)
class Call:
    """One stage, or an update of one pair where `stage` is `update`.

    Attributes:
        stage: method of `Stages`; several calls share it.
        inputs: the stage's name of each input, and what it is in the block.
        outputs: the stage's name of each output, and its name in the block.
        evaluate: compute here before anything else is asked for, so that what is in `free` can go.
        free: names in the block that nothing uses after this call.
    """

    stage: str
    inputs: dict[str, Ref]
    outputs: dict[str, str] = field(default_factory=dict)
    evaluate: bool = True
    free: tuple[str, ...] = ()


def forward(settings: Settings, length_tokens: int) -> list[Call]:
    """x -> the next block's x."""
    calls = [*_attention(settings, length_tokens, False), _mlp_norm("mlp_norm", settings)]
    for low, high in settings.mlp_bounds():
        calls.append(_gate_up(settings, low, high))
        calls.append(Call("act", _same("gate", "up"), _named("act"), evaluate=False))
        down = _parts(settings, "down_proj", low, high) | _lora(settings, "down_proj", low, high)
        calls.append(Call("down", _same("act", "y") | down, _named("y")))
    calls.append(Call("end", _same("y"), _named("x")))
    return with_frees(calls, ("x",))


def backward(settings: Settings, length_tokens: int) -> list[Call]:
    """x and g, the gradient of the block's output -> g, that of its input; each pair is updated on the way."""
    calls = [*_attention(settings, length_tokens, settings.store_h), _mlp_norm("mlp_norm_again", settings)]
    calls += _mlp_backward(settings)
    calls += _attention_backward(settings, length_tokens)
    return with_frees(calls, ("g",))


def _attention(settings: Settings, length_tokens: int, store_h: bool) -> list[Call]:
    """x -> m, with q, k, v, o and n beside it."""
    given = [f"{target}.h" for target in ATTENTION if target in settings.targets] if store_h else []
    weights = {key: ref for target in ATTENTION for key, ref in _linear(settings, target).items()}
    calls = [
        Call("norm", _same("x", "input_norm.weight"), _named("n"), evaluate=False),
        Call("project", _same("n") | weights, _named("q", "k", "v", *given), evaluate=False),
        Call("rope", _same("q", "k"), _named("q", "k")),
    ]
    for i, (low, high) in enumerate(settings.query_bounds(length_tokens)):
        seen = {"q": Ref("q", 2, low, high), "k": Ref("k", 2, 0, high), "v": Ref("v", 2, 0, high)}
        calls.append(Call("attend", seen, {"o": f"o@{i}"}))
    h = ["o_proj.h"] if store_h and "o_proj" in settings.targets else []
    inputs = _same("x", *_pieces("o", len(settings.query_bounds(length_tokens))))
    calls.append(Call("out", inputs | _linear(settings, "o_proj"), _named("m", *h)))
    return calls


def _mlp_norm(stage: str, settings: Settings) -> Call:
    inputs, outputs = _same("m", "mlp_norm.weight"), _named("mn")
    if stage == "mlp_norm":
        outputs |= _named("y")
        if settings.dims.linear_bias("down_proj"):
            inputs |= _same("down_proj.bias")
    for target in ("gate_proj", "up_proj"):
        if target in settings.targets:
            inputs |= _same(f"{target}.A")
            outputs |= _named(f"{target}.h")
    return Call(stage, inputs, outputs, evaluate=stage != "mlp_norm")


def _gate_up(settings: Settings, low: int, high: int) -> Call:
    inputs = _same("mn")
    for target in ("gate_proj", "up_proj"):
        inputs |= _parts(settings, target, low, high) | _bias(settings, target, low, high)
        if target in settings.targets:
            inputs |= _same(f"{target}.h") | {f"{target}.B": Ref(f"{target}.B", 0, low, high)}
    return Call("gate_up", inputs, _named("gate", "up"), evaluate=False)


def _mlp_backward(settings: Settings) -> list[Call]:
    calls, tiles = [], settings.mlp_bounds()
    lora = {target for target in ("gate_proj", "up_proj", "down_proj") if target in settings.targets}
    for i, (low, high) in enumerate(tiles):
        calls.append(_gate_up(settings, low, high))
        inputs = _same("g", "gate", "up") | _parts(settings, "down_proj", low, high)
        outputs = _named("gact")
        if "down_proj" in lora:
            inputs |= _lora(settings, "down_proj", low, high) | (_same("down_proj.h") if i else {})
            outputs |= {"down_proj.dA": f"down_proj.dA@{i}", "down_proj.h": "down_proj.h"}
        calls.append(Call("down_backward", inputs, outputs, evaluate=False))
        calls.append(Call("act_backward", _same("gate", "up", "gact"), _named("ggate", "gup"), evaluate=False))
        inputs, outputs = _same("ggate", "gup") | (_same("gn") if i else {}), _named("gn")
        for target in ("gate_proj", "up_proj"):
            inputs |= _parts(settings, target, low, high)
            if target in lora:
                inputs |= _same(f"{target}.h", *([f"{target}.gh"] if i else []))
                inputs |= {f"{target}.B": Ref(f"{target}.B", 0, low, high)}
                outputs |= {f"{target}.dB": f"{target}.dB@{i}", f"{target}.gh": f"{target}.gh"}
        calls.append(Call("gate_up_backward", inputs, outputs))
    inputs, outputs = _same("m", "mlp_norm.weight", "g", "gn"), _named("gm")
    for target in ("gate_proj", "up_proj"):
        if target in lora:
            names = (f"{target}.gh", f"{target}.A", *_pieces(f"{target}.dB", len(tiles)))
            inputs |= _same("mn", *names)
            outputs |= _gradients(target)
    if "down_proj" in lora:
        inputs |= _same("down_proj.h", *_pieces("down_proj.dA", len(tiles)))
        outputs |= _gradients("down_proj")
    return [
        *calls,
        Call("mlp_norm_backward", inputs, outputs),
        *_updates(settings, "gate_proj", "up_proj", "down_proj"),
    ]


def _attention_backward(settings: Settings, length_tokens: int) -> list[Call]:
    chunks = settings.query_bounds(length_tokens)
    inputs = _same("gm", *_pieces("o", len(chunks))) | _linear(settings, "o_proj", bias=False)
    calls = [Call("out_backward", inputs | _h(settings, "o_proj"), _named("go") | _trained(settings, "o_proj"))]
    calls += _updates(settings, "o_proj")
    for i, (low, high) in reversed(list(enumerate(chunks))):
        seen = {"q": Ref("q", 2, low, high), "k": Ref("k", 2, 0, high), "v": Ref("v", 2, 0, high)}
        inputs = seen | {"go": Ref("go", 1, low, high)} | ({} if i == len(chunks) - 1 else _same("gk", "gv"))
        calls.append(Call("attend_backward", inputs, {"gq": f"gq@{i}"} | _named("gk", "gv")))
    calls.append(Call("rope_backward", _same("gk", *_pieces("gq", len(chunks))), _named("gq", "gk")))
    inputs, outputs = _same("n", "gq", "gk", "gv"), _named("gn")
    for target in ATTENTION:
        inputs |= _linear(settings, target, bias=False) | _h(settings, target)
        outputs |= _trained(settings, target)
    calls += [Call("project_backward", inputs, outputs), *_updates(settings, *ATTENTION)]
    return [*calls, Call("norm_backward", _same("x", "input_norm.weight", "gm", "gn"), _named("g"))]


def _updates(settings: Settings, *targets: str) -> list[Call]:
    """Each pair's gradients are used and dropped."""
    return [
        Call("update", {side: Ref(f"{target}.{side}") for side in ("dA", "dB")}, {"target": target})
        for target in targets
        if target in settings.targets
    ]


def _trained(settings: Settings, target: str) -> dict[str, str]:
    return _gradients(target) if target in settings.targets else {}


def _gradients(target: str) -> dict[str, str]:
    return _named(f"{target}.dA", f"{target}.dB")


def _h(settings: Settings, target: str) -> dict[str, Ref]:
    return _same(f"{target}.h") if settings.store_h and target in settings.targets else {}


def _linear(settings: Settings, target: str, bias: bool = True) -> dict[str, Ref]:
    """All parts of a linear layer, whole."""
    found = _parts(settings, target) | (_bias(settings, target) if bias else {})
    return found | (_same(f"{target}.A", f"{target}.B") if target in settings.targets else {})


def _lora(settings: Settings, target: str, low: int, high: int) -> dict[str, Ref]:
    """A's columns of a tile of the inputs, and B."""
    if target not in settings.targets:
        return {}
    return {f"{target}.A": Ref(f"{target}.A", 1, low, high), f"{target}.B": Ref(f"{target}.B")}


def _bias(settings: Settings, target: str, low: int = 0, high: int = 0) -> dict[str, Ref]:
    name = f"{target}.bias"
    if not settings.dims.linear_bias(target):
        return {}
    return {name: Ref(name, 0, low, high) if high else Ref(name)}


def _parts(settings: Settings, target: str, low: int = 0, high: int = 0) -> dict[str, Ref]:
    """A frozen matrix, or a tile of it: rows of gate and up, columns of down."""
    axis = 1 if target == "down_proj" else 0
    names = ("weight", "scales", "biases") if settings.bits else ("weight",)
    found = {}
    for part in names:
        name, per = f"{target}.{part}", 1
        if axis and settings.bits:
            per = 32 // settings.bits if part == "weight" else settings.group_size
        found[name] = Ref(name, axis, low // per, high // per) if high else Ref(name)
    return found


def _same(*names: str) -> dict[str, Ref]:
    return {name: Ref(name) for name in names}


def _named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _pieces(name: str, count: int) -> list[str]:
    return [f"{name}@{i}" for i in range(count)]


def with_frees(calls: list[Call], results: tuple[str, ...]) -> list[Call]:
    """`calls`, each with the names that nothing after it reads; an output that nothing reads goes at once."""
    found, needed = [], set(results)
    for call in reversed(calls):
        made = set() if call.stage == "update" else set(call.outputs.values())
        used = {ref.name for ref in call.inputs.values()}
        free = {name for name in used | made if name not in needed and not name.endswith(KEPT)}
        found.append(replace(call, free=tuple(sorted(free - (made & needed)))))
        needed = (needed - made) | used
    return found[::-1]


def embed(settings: Settings) -> list[Call]:
    """Gathered rows of the embedding -> x."""
    return with_frees([Call("embed", _rows(settings), _named("x"))], ("x",))


def final_norm() -> list[Call]:
    """x -> hn; x stays for the backward pass."""
    return with_frees([Call("final_norm", _same("x", "final_norm.weight"), _named("hn"))], ("hn",))


def final_norm_backward() -> list[Call]:
    """x and ghn -> g."""
    call = Call("final_norm_backward", _same("x", "final_norm.weight", "ghn"), _named("g"))
    return with_frees([call], ("g",))


def loss(settings: Settings, tiles: list[tuple[int, int]], gradient: bool) -> list[Call]:
    """hn of labelled tokens, the head's rows of their labels, each token's weight -> nll, and gh with `gradient`."""
    calls = [Call("loss_begin", _same("hn") | _rows(settings), _named("target", "maximum", "total"), evaluate=False)]
    for low, high in tiles:
        head = {ref.name: ref for ref in _head(settings, low, high)}
        calls.append(Call("loss_tile", _same("hn", "maximum", "total") | head, _named("maximum", "total")))
    calls.append(Call("loss_end", _same("target", "maximum", "total"), _named("nll", "logsumexp")))
    if not gradient:
        return with_frees(calls, ("nll",))
    calls.append(Call("loss_begin_backward", _rows(settings) | _same("weight"), _named("gh")))
    for low, high in tiles:
        head = {ref.name: ref for ref in _head(settings, low, high)}
        calls.append(Call("loss_tile_backward", _same("hn", "logsumexp", "weight", "gh") | head, _named("gh")))
    return with_frees(calls, ("nll", "gh"))


def _rows(settings: Settings) -> dict[str, Ref]:
    parts = ("weight", "scales", "biases") if settings.bits else ("weight",)
    return _same(*(f"rows.{part}" for part in parts))


def _head(settings: Settings, low: int, high: int) -> list[Ref]:
    parts = ("weight", "scales", "biases") if settings.bits else ("weight",)
    return [Ref(f"head.{part}", 0, low, high) for part in parts]
