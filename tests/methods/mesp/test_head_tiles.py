"""The head of a block program, tile by tile, is the cross-entropy and its gradient, for every label there is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.nn import functional  # noqa: E402

from ondevice.core.program import LOWEST  # noqa: E402
from ondevice.core.registry import method_config  # noqa: E402
from ondevice.methods.mesp.block_functions import BlockFunctions  # noqa: E402
from ondevice.methods.mesp.blocks import HeadGradient, HeadSums  # noqa: E402
from ondevice.methods.mesp.memory import HEAD_ROWS  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402


@pytest.mark.parametrize("tiles", [1, 3, 7])
def test_every_label_counts_once_in_tiles_that_overlap(tiles: int) -> None:
    """Of 260 rows in 3 tiles of 87, or 7 of 38, the last tile begins inside the one before."""
    loaded = tiny_model("llama", hidden=32, heads=2, kv_heads=1, layers=1)
    functions = BlockFunctions(loaded, method_config("mesp", {"loss_tiles": tiles}))
    head, norm = (
        loaded.family.head_weight.detach(),
        loaded.model.get_parameter("model.norm.weight").detach(),
    )
    vocab, rows = head.shape[0], functions.tile_rows
    assert (vocab % rows != 0) == (tiles > 1)
    starts = [min(low, vocab - rows) for low in range(0, vocab, rows)]
    skips = [low - start for low, start in zip(range(0, vocab, rows), starts)]
    sums_of, gradient_of = HeadSums(functions), HeadGradient(functions)
    for first_label in range(0, vocab, HEAD_ROWS):
        targets = (torch.arange(HEAD_ROWS) + first_label) % vocab
        x = torch.randn(HEAD_ROWS, 32, generator=torch.Generator().manual_seed(first_label))
        sums = (torch.full((HEAD_ROWS,), LOWEST), torch.zeros(HEAD_ROWS), torch.zeros(HEAD_ROWS))
        scale, gradient = torch.rand(HEAD_ROWS), torch.zeros_like(x)
        places = [(torch.tensor([start]), torch.tensor([skip]), head[start : start + rows])
                  for start, skip in zip(starts, skips)]  # fmt: skip
        for first, skip, tile in places:
            sums = sums_of(x, targets, first, skip, *sums, norm, tile)
        for first, skip, tile in places:
            gradient = gradient_of(x, targets, first, skip, *sums, scale, gradient, norm, tile)
        leaf = x.double().requires_grad_()
        normed = functional.rms_norm(leaf, (32,), norm.double(), loaded.dims.norm_eps)
        nll = functional.cross_entropy(normed @ head.double().T, targets, reduction="none")
        (nll * scale.double()).sum().backward()
        maximum, total, wanted = sums
        torch.testing.assert_close(
            (maximum + total.log() - wanted).double(), nll.detach(), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-6)
