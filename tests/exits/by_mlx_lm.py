"""What mlx-lm computes of the files of an exit, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exits.conftest import IDS


def mlx_log_probabilities(model: Any) -> np.ndarray:
    """Return float64 [vocab] after `IDS`."""
    mx: Any = pytest.importorskip("mlx.core")
    logits = np.array(model(mx.array([IDS])).astype(mx.float32))[0, -1].astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def dense_weights(folder: Path) -> dict[str, np.ndarray]:
    """Read a packed model with mlx-lm's loader, and make it dense with mlx-lm's function.

    Returns: every parameter in float32, by transformers' name and in its shape.
    """
    mx: Any = pytest.importorskip("mlx.core")
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model, load_model

    found = {}
    for name, value in tree_flatten(dequantize_model(load_model(folder)[0]).parameters()):
        assert value.dtype == mx.float16, name
        array = np.array(value.astype(mx.float32))
        # A convolution: MLX has the taps before the channels.
        found[name] = array.transpose(0, 2, 1) if array.ndim == 3 else array
    return found


def opened_pair(folder: Path, dense: bool = False) -> Any:
    """Open `mlx-pair` as `mlx_lm.generate --model --adapter-path` does.

    Args:
        dense: make mlx-lm's weights dense, and compute in float32: a product with packed weights
            in float16 rounds as it goes.
    """
    mx: Any = pytest.importorskip("mlx.core")
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import dequantize_model, load_model

    model, config = load_model(folder / "model")
    assert "quantization" in config
    if dense:
        model = dequantize_model(model)
    model = load_adapters(model, str(folder / "adapter"))
    model.eval()
    if dense:
        model.set_dtype(mx.float32)
    return model
