"""GaLore is Adam if nothing is projected away, in the basis of the largest singular vectors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.galore import GaloreAdamW, largest_vectors  # noqa: E402


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (12, 12)])
def test_galore_of_full_rank_keeps_the_first_moment(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    galore, expected = GaloreAdamW([weight], [], rank=99, refresh=100), torch.zeros(shape)
    for _ in range(5):
        weight.grad = torch.randn(shape, generator=generator)
        expected.lerp_(weight.grad, 0.1)
        galore.step(1e-3)
    (entry,) = galore.entries
    assert entry.basis is not None and entry.m is not None
    torch.testing.assert_close(entry.back(entry.m, entry.basis), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tall", [False, True])
def test_galore_in_a_basis_of_unit_vectors_is_adam_times_alpha(tall: bool) -> None:
    """Rows that are orthogonal have unit vectors as singular vectors, and Adam does not care for
    order and sign."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.linalg.qr(torch.randn(16, 6, generator=generator)).Q.T
    weights = [
        torch.nn.Parameter(torch.ones(16, 6) if tall else torch.ones(6, 16)) for _ in range(2)
    ]
    galore = GaloreAdamW([weights[0]], [], rank=6, refresh=100, alpha=0.25)
    adam = torch.optim.AdamW([weights[1]], lr=0.25e-2, weight_decay=0.0)
    for _ in range(4):
        gradient = torch.arange(1.0, 7.0)[:, None] * torch.randn(6, 1, generator=generator) * rows
        for weight in weights:
            weight.grad = gradient.T.contiguous() if tall else gradient.clone()
        galore.step(1e-2)
        adam.step()
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=1e-5)


def test_the_basis_is_the_largest_singular_vectors() -> None:
    gradient = torch.randn(9, 30, generator=torch.Generator().manual_seed(2))
    basis, expected = largest_vectors(gradient, 3), torch.linalg.svd(gradient).U[:, :3].T
    torch.testing.assert_close((basis @ expected.T).abs(), torch.eye(3), atol=1e-4, rtol=0)
