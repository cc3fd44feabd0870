"""MLPs in tiles of tokens: the same losses and weights, in the memory that the plan counts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.errors import ConfigError
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.lsp.engine import LspEngine
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.memory import memory, step_cost
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.load import tiny_model
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.tiles import tile
from tests.offload.test_whole import RATE, data, decoder

KNOWN = ("llama", "gpt2", "phi3", "qwen2_moe")
SETTINGS: dict[str, Any] = {"compute": "float32", "timeout_s": 120.0, "threads": 1, "eps": 1e-4}


def family_of(kind: str) -> Any:
    if kind in KNOWN:
        return tiny_model(kind, layers=2, **({} if kind == "gpt2" else {"tied": False})).family
    return AnyDecoder(decoder(kind))


def train(family: Any, method: str = "slideformer", **values: Any) -> tuple[list[float], Any]:
    settings = SETTINGS | values
    if method == "lsp":
        engine: Any = LspEngine(family, LspConfig(subspace=24, nonzeros=4, **settings), "cpu")
    else:
        engine = OffloadEngine(family, SlideformerConfig(**settings).fixed(), "cpu")
    try:
        losses = [engine.step(*batch, step, RATE) for step, batch in enumerate(data(3))]
        engine.flush()
        return losses, engine.weights() if method == "lsp" else engine.store.masters()
    finally:
        engine.close()


@pytest.mark.parametrize("kind", [*KNOWN, "gemma2"])
@pytest.mark.parametrize("micro", [None, 3])
def test_tiles_of_tokens_change_no_loss(kind: str, micro: int | None) -> None:
    """Rows of 12 tokens in tiles of 5, 5 and 2."""
    family = family_of(kind)
    own = [module.forward for module in family.model.modules()]
    expected, weights = train(copy.deepcopy(family), micro_batch_size=micro)
    losses, trained = train(family, micro_batch_size=micro, mlp_chunk_tokens=5)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
    assert [module.forward for module in family.model.modules()] == own


def test_tiles_go_with_projected_gradients() -> None:
    expected, weights = train(family_of("llama"), "lsp")
    losses, trained = train(family_of("llama"), "lsp", mlp_chunk_tokens=5)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "rows", "length", "size"), [("llama", 3, 64, 8), ("gpt2", 2, 48, 16)]
)
def test_a_block_keeps_less_by_what_the_plan_says(
    kind: str, rows: int, length: int, size: int
) -> None:
    """What a block keeps for its backward pass, and that of one tile while it is computed again."""
    family = family_of(kind)
    family.model.requires_grad_(True)
    h = torch.randn(rows, length, family.dims.hidden, requires_grad=True)
    held = {int(p.data_ptr()) for p in family.model.parameters()}

    def kept() -> int:
        seen: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            memory = x.untyped_storage()
            if memory.data_ptr() not in held:
                seen[memory.data_ptr()] = memory.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            family.mlp_branch(0, h)
        return sum(seen.values())

    whole = kept()
    undo = tile(family, size)
    tiled = kept()
    undo()
    planned = []
    for chunk in (None, size):
        config = SlideformerConfig(compute="float32", mlp_chunk_tokens=chunk).fixed()
        planned.append(memory(family.dims, config, rows, length)["activations"])
    one = (whole - tiled) * size // length  # a tile's own are there while it is computed
    assert planned[0] - planned[1] == pytest.approx(whole - tiled - one, rel=0.1)


def test_a_plan_counts_the_forward_passes_that_are_done_again() -> None:
    dims = family_of("llama").dims
    flops = []
    for chunk in (None, 64, 8):
        config = SlideformerConfig(mlp_chunk_tokens=chunk).fixed()
        flops.append(step_cost(dims, config, 2, 64, 0).flops)
    assert flops[0] == flops[1]
    assert flops[2] - flops[0] == 2 * 2 * 128 * 3 * dims.hidden * dims.intermediate


@pytest.mark.parametrize("kind", ["bloom", "mixtral"])
def test_a_model_without_such_mlps_is_refused(kind: str) -> None:
    """Bloom's adds the residual inside; Mixtral has only experts."""
    with pytest.raises(ConfigError) as caught:
        train(family_of(kind), mlp_chunk_tokens=5)
    assert "mlp_chunk_tokens: 5" in str(caught.value.received)
