"""`program.json`: everything that a host needs to train, as data, so that a host has no formula and no layer in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ondevice.exporters.mlx.functions import chunk_tokens
from ondevice.methods.mesp.mlx import schedule
from ondevice.methods.mesp.mlx.schedule import Call

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.mlx.model import Model
    from ondevice.methods.mesp.pairs import Pair

FORMAT = 1


def program(
    model: Model, config: MespConfig, pairs: tuple[Pair, ...], functions: dict[str, Any], batch_size: int,
    lengths_tokens: tuple[int, ...], mlx_version: str,
) -> dict[str, Any]:  # fmt: skip
    """The program's whole description; see docs/methods/mesp.md for what a host does with it."""
    settings = model.settings
    return {
        "format": FORMAT,
        "mlx_version": mlx_version,
        "layers": settings.dims.layers,
        "hidden": settings.dims.hidden,
        "tied": settings.dims.tied,
        "parts": list(model.weights.parts),
        "dtype": settings.dtype,
        "settings": {name: value for name, value in asdict(settings).items() if name != "dims"},
        "loss_tiles": [list(tile) for tile in model.tiles],
        "batch_size": batch_size,
        "optimizer": {
            name: getattr(config, name) for name in ("beta1", "beta2", "eps", "weight_decay", "learning_rate")
        }
        | {"name": config.optimizer},
        "pairs": [{"layer": pair.layer, "target": pair.target, "A": pair.a_name, "B": pair.b_name} for pair in pairs],
        "functions": functions,
        "schedules": {
            "embed": calls(schedule.embed(settings)),
            "final_norm": calls(schedule.final_norm()),
            "final_norm_backward": calls(schedule.final_norm_backward()),
            "loss": calls(schedule.loss(settings, model.tiles, True)),
            "loss_only": calls(schedule.loss(settings, model.tiles, False)),
        },
        "lengths": {
            str(length): {
                "loss_rows": chunk_tokens(config, batch_size, length),
                "forward": calls(schedule.forward(settings, length)),
                "backward": calls(schedule.backward(settings, length)),
            }
            for length in lengths_tokens
        },
    }


def calls(listed: list[Call]) -> list[dict[str, Any]]:
    """A schedule as JSON: an input is [the function's name of it, its name in the block, axis, start, stop], axis -1
    for all of it; `free` is dead after the call."""
    found: list[dict[str, Any]] = []
    for call in listed:
        if call.stage == "update":
            found.append({"update": call.outputs["target"]})
            continue
        inputs = [[name, ref.name, ref.axis, ref.start, ref.stop] for name, ref in call.inputs.items()]
        outputs = [[name, place] for name, place in call.outputs.items()]
        found.append({"function": call.stage, "inputs": inputs, "outputs": outputs, "evaluate": call.evaluate,
                      "free": list(call.free)})  # fmt: skip
    return found
