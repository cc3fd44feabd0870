"""`mlx-pair`: the base model in MLX's packed form and the adapter as two folders, for
`mlx_lm.generate --model model --adapter-path adapter`.

The adapter is not rounded, and one that was trained on rounded weights (`method.base`) finds the
very weights.
"""

from __future__ import annotations

from pathlib import Path

from ondevice.exits import mlx, mlx_model
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import Rounding, check_beside, open_base
from ondevice.models.rounded import round_weights

MODEL_NAME = "model"
ADAPTER_NAME = "adapter"
ROUNDS = {"mlx_4bit": "4bit"}


def write(request: Request, folder: Path) -> Checked:
    """Write both folders, read them back and compare: bit for bit, if it was trained on such weights."""
    mlx.write_adapter(request, folder / ADAPTER_NAME)
    kind = request.adapter.base_weights
    exact = ROUNDS.get(kind) == request.dtype
    base = open_base(request, rounded=not exact)
    path = folder / MODEL_NAME
    limits = mlx_model.write_model(request, base, path)
    if exact:  # after the packing: packed once more, rounded weights would change
        round_weights(base, kind)
        limits = dict.fromkeys(limits, Rounding(0.0))
    written = mlx_model.read_tensors(path, limits, mlx_model.BITS[request.dtype])
    return check_beside(request, base, written, limits)


FORM = Form(
    "mlx-pair",
    "mlx-lm",
    write,
    marker=f"{MODEL_NAME}/config.json",
    dtypes=tuple(mlx_model.BITS),
    merged=True,
    check=mlx_model.check,
    rounds=ROUNDS,
)
