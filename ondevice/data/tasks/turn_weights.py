"""Turns that a row trains on: OpenAI's and Mistral's `weight`, Axolotl's `train`, ms-swift's
`loss`, torchtune's `masked`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.data.rows import BadRow, describe

TRAINS = ("weight", "train", "training", "trainable", "loss")
"""Keys that are 0 or false in a turn that is only context."""

MASKS = ("masked",)
"""Keys that are 1 or true in such a turn."""

OBEYED = (*TRAINS, *MASKS)
REFUSED = ("mask", "train_detail", "training_detail", "loss_scale")
"""Keys whose meaning differs from tool to tool, or that weigh parts of a turn."""

ROW_MASKS = ("weights", "loss_mask", "train_mask", "turn_mask", "mask")
"""Columns with one number for each turn: 1 to train on it, 0 for context."""


def is_trained(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn with checked weights is an answer that the row trains on."""
    trains = [flag(turn[key], key) for key in TRAINS if turn.get(key) is not None]
    trains += [not flag(turn[key], key) for key in MASKS if turn.get(key) is not None]
    return turn["role"] == "assistant" and all(trains)


def check_weights(turn: Mapping[str, Any], where: str, role: str) -> None:
    """Check the weights of a turn.

    Raises:
        BadRow: a weight that is neither 0 nor 1, or a mask of unknown meaning.
    """
    if role != "assistant":
        return
    for key in REFUSED:
        if turn.get(key) is not None:
            reason = "cannot be obeyed: write weight: 0 or train: false for a turn that is context"
            raise BadRow(f"{where}.{key}", reason)
    for key in OBEYED:
        if turn.get(key) is not None:
            flag(turn[key], f"{where}.{key}")


def flag(value: Any, where: str) -> bool:
    """Read a weight.

    Raises:
        BadRow: it is neither 0 nor 1.
    """
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if value in (0, 1):  # also False, True, 0.0 and 1.0
        return bool(value)
    raise BadRow(where, f"expected 0 or 1, true or false; received {describe(value)}")
