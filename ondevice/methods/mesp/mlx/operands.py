"""What an instruction is: the stage that runs, the arrays that it takes, and the operands of a linear layer, a norm
or an update. Imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass, field

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
