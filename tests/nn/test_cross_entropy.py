"""The tiled cross-entropies against torch's over all logits: values, gradients, masks, odd vocabularies."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ondevice.nn.cross_entropy import shift, tile_bounds, token_nll
from ondevice.nn.graph_loss import graph_token_nll, labelled_only, weight_tiles

TILES = range(1, 10)


def case(rows: int = 11, vocab: int = 37, width: int = 16, seed: int = 0, scale: float = 1.0):
    random = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(rows, width, generator=random)
    weight = torch.randn(vocab, width, generator=random)
    labels = torch.randint(0, vocab, (rows,), generator=random)
    labels[::3] = -100
    labels[1], labels[2] = 0, vocab - 1  # the first row of the first tile and the last of the last
    return hidden, weight, labels


def reference(hidden, weight, labels):
    return functional.cross_entropy(
        hidden.double() @ weight.double().T, labels, ignore_index=-100, reduction="none"
    )


def graph(hidden, weight, labels, tiles):
    return graph_token_nll(weight_tiles(weight, tiles))(hidden, labels)


@pytest.mark.parametrize("form", [token_nll, graph])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("vocab", [37, 64, 7])
def test_losses_match_torch_cross_entropy(form, tiles, vocab) -> None:
    hidden, weight, labels = case(vocab=vocab)
    received = form(hidden, weight, labels, tiles)
    assert received.dtype == torch.float32 and received.shape == labels.shape
    torch.testing.assert_close(
        received.double(), reference(hidden, weight, labels), rtol=2e-6, atol=5e-6
    )
    assert (received[labels == -100] == 0).all() and (received[labels != -100] > 0).all()


@pytest.mark.parametrize("tiles", TILES)
def test_gradients_match_torch_cross_entropy(tiles) -> None:
    hidden, weight, labels = case(vocab=41)
    upstream = torch.randn(labels.shape, generator=torch.Generator().manual_seed(1))
    received, expected = [], []
    for target, form, kind in (
        (received, token_nll, torch.float32),
        (expected, None, torch.float64),
    ):
        h, w = (value.clone().to(kind).requires_grad_(True) for value in (hidden, weight))
        nll = form(h, w, labels, tiles) if form else reference(h, w, labels)
        (nll * upstream.to(kind)).sum().backward()
        target += [h.grad.double(), w.grad.double()]
    for ours, theirs in zip(received, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (received[0][labels == -100] == 0).all()


def test_only_the_gradient_that_is_needed_is_computed() -> None:
    hidden, weight, labels = case()
    hidden.requires_grad_(True)
    token_nll(hidden, weight, labels, 3).sum().backward()
    assert weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("form", [token_nll, graph])
def test_rows_without_labels_have_loss_and_gradient_zero(form) -> None:
    hidden, weight, labels = case()
    labels[:] = -100
    hidden.requires_grad_(True)
    nll = form(hidden, weight, labels, 4)
    assert (nll == 0).all()
    if nll.requires_grad:
        nll.sum().backward()
        assert (hidden.grad == 0).all()


@pytest.mark.parametrize("form", [token_nll, graph])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_extreme_logits_neither_overflow_nor_vanish(form, scale) -> None:
    hidden, weight, labels = case(scale=scale)
    expected = reference(hidden, weight, labels)
    torch.testing.assert_close(
        form(hidden, weight, labels, 5).double(), expected, rtol=1e-5, atol=1e-5 * max(1, scale)
    )


def test_half_precision_inputs_are_summed_in_float32() -> None:
    hidden, weight, labels = case(vocab=600, width=64)
    expected = reference(hidden.bfloat16().float(), weight.bfloat16().float(), labels)
    for form in (token_nll, graph):
        ours = form(hidden.bfloat16(), weight.bfloat16(), labels, 3)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_pass_gradcheck() -> None:
    hidden, weight, labels = case(rows=5, vocab=9, width=3)
    inputs = hidden.requires_grad_(True), weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(
            lambda h, w: token_nll(h, w, labels, 4),
            inputs,
            eps=1e-2,
            atol=2e-2,
            rtol=2e-2,
            nondet_tol=0.0,
        )


@pytest.mark.parametrize(("vocab", "tiles"), [(37, 8), (8, 8), (5, 9), (49152, 8), (1, 1), (10, 3)])
def test_tiles_cover_the_vocabulary_once(vocab, tiles) -> None:
    bounds = tile_bounds(vocab, tiles)
    assert [v for low, high in bounds for v in range(low, high)] == list(range(vocab))
    assert len(bounds) <= tiles and len({high - low for low, high in bounds[:-1]}) <= 1


def test_each_position_is_paired_with_the_next_token() -> None:
    hidden = torch.arange(2 * 4 * 3).reshape(2, 4, 3).float()
    labels = torch.tensor([[9, 1, 2, 3], [9, 4, -100, 6]])
    h, y = shift(hidden, labels)
    assert y.tolist() == [1, 2, 3, 4, -100, 6]
    assert (
        h[0].tolist() == hidden[0, 0].tolist()
        and h[3].tolist() == hidden[1, 0].tolist()
        and len(h) == 6
    )


@pytest.mark.parametrize("limit", [8, 11, 50])
def test_computing_only_label_positions_gives_the_same_loss(limit) -> None:
    hidden, weight, labels = case()
    assert (labels != -100).sum() <= 8
    loss = graph_token_nll(weight_tiles(weight, 3))
    torch.testing.assert_close(labelled_only(loss, limit)(hidden, labels), loss(hidden, labels))


def test_the_graph_form_shares_the_weight() -> None:
    """Tiles are views of the head: a tied embedding is in an exported program once."""
    hidden, weight, labels = case()

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)
            self.loss = graph_token_nll(weight_tiles(self.weight, 4))

        def forward(self, h, y):
            return self.loss(h, y)

    program = torch.export.export(Head(), (hidden, labels))
    assert [tuple(value.shape) for value in program.state_dict.values()] == [tuple(weight.shape)]
    torch.testing.assert_close(
        program.module()(hidden, labels), reference(hidden, weight, labels).float()
    )
