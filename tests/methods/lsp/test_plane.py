"""The memory of a group of matrices: dense projectors, made together and only where needed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ondevice.methods.lsp.matrix import Matrix, Plane  # noqa: E402
from tests.methods.lsp.dense import near, normal, table  # noqa: E402
from tests.methods.lsp.matrices import MEMBERS, members, projected, shows  # noqa: E402
from tests.methods.lsp.matrices import changed as changed_weight  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_group_shows_the_dense_projectors_of_each_member(dtype: Any) -> None:
    plane = Plane()
    group, other = members(plane), members(plane, [(120, 61), (77, 130)], first=len(MEMBERS))
    shows(group, dtype)
    for changed in range(len(group)):
        group[changed].put(*group[changed].drawn(changed + 1))
        shows(group, dtype)
    shows(other, dtype)
    shows(group, dtype)
    other[1].dense_projectors(dtype)
    group[2].put(*group[2].drawn(20))  # while another group is shown
    other[0].put(*other[0].drawn(20))
    shows(group, dtype)
    shows(other, dtype)


def test_a_group_shows_its_projectors_in_two_dtypes_at_once() -> None:
    plane = Plane()
    group, other = members(plane), members(plane, [(120, 61)], first=len(MEMBERS))
    for turn, dtypes in enumerate(
        [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
    ):
        rough, fine = [[one.dense_projectors(dtype)[1] for one in group[:3]] for dtype in dtypes]
        shows(group, dtypes[0])
        for actual, dtype in ((rough, dtypes[0]), (fine, dtypes[1])):
            for one, seen in zip(group[:3], actual, strict=True):
                assert torch.equal(seen, table(one.right).to(dtype))
        shows(other, dtypes[0])
        shows(group, dtypes[1])
        shows(group, dtypes[0])
        group[0].put(*group[0].drawn(turn + 1))
        shows(other, dtypes[1])
        for dtype in dtypes:
            shows(group, dtype)
            shows(other, dtype)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_projectors_are_made_dense_only_where_others_were(device: str) -> None:
    """Numbers written over them stay until they must be made anew, in the same memory; a member's own are, where it
    gets others. A device with an index is the one without, as `cuda` is where tensors say `cuda:0`."""
    plane, dtypes = Plane(), (torch.float32, torch.bfloat16)
    group, other = members(plane, device=device), members(plane, [(31, 33)], len(MEMBERS), device)
    for dtype in dtypes:
        shows(group, dtype)
    memory = dict(plane.memory)
    sizes = [
        side.rows * side.size for one in group for side in (one.left, one.right) if not side.exact
    ]
    assert {dtype: (actual.dtype, actual.numel()) for dtype, actual in memory.items()} == {
        dtype: (dtype, sum(sizes)) for dtype in dtypes
    }

    def made_anew(one: Matrix, dtype: Any = torch.float32) -> bool:
        plane.memory[dtype].fill_(7.0)
        return not bool((one.dense_projectors(dtype)[1] == 7).all())

    other[0].put(*other[0].drawn(1))
    assert not any(made_anew(one, dtype) for one in (group[0], group[-1]) for dtype in dtypes)
    for dtype in dtypes:
        plane.memory[dtype].fill_(7.0)
    before = {dtype: [x.data_ptr() for x in group[0].group.flat(dtype)] for dtype in dtypes}
    group[0].put(*group[0].drawn(1))
    for dtype in dtypes:
        for side, pair in zip(
            (group[0].left, group[0].right), group[0].dense_projectors(dtype), strict=True
        ):
            assert side.exact if pair is None else torch.equal(pair, table(side).to(dtype))
        assert bool((group[-1].dense_projectors(dtype)[1] == 7).all())
        assert before[dtype] == [x.data_ptr() for x in group[0].group.flat(dtype)], (
            "a graph reads it"
        )
        del plane.shown[dtype]
        shows(group, dtype)
    assert made_anew(other[0]) and not made_anew(other[0])
    assert not made_anew(group[0], torch.bfloat16)
    assert made_anew(group[0]) and not made_anew(group[0])
    for dtype in dtypes:
        shows(other, dtype)
        shows(group, dtype)
    assert plane.memory.keys() == memory.keys()
    assert all(actual is memory[dtype] for dtype, actual in plane.memory.items())


def test_members_of_a_group_match_single_matrices() -> None:
    """Backward through the group and the other one, with projectors put by a look on the way."""
    plane = Plane()
    group, other = members(plane), members(plane, [(31, 33)], first=len(MEMBERS))
    group[3].watch = lambda who, gradient: who.put(*who.drawn(9))
    wanted = dict[str, Tensor]()
    for step, one in enumerate([*group[:2:-1], other[0], *group[2::-1]]):
        rows, columns, gradient = (
            normal(5, one.shape[0], seed=step),
            normal(5, one.shape[1]),
            normal(*one.shape),
        )
        one.collect(rows, columns)
        one.collect_whole(gradient)
        wanted[one.name if one is not other[0] else "other"] = rows.T @ columns + gradient
    for one in (*group, other[0]):
        assert one.gradient is not None
        near(one.gradient, projected(one, wanted[one.name if one is not other[0] else "other"]))
        base, change = normal(*one.shape), normal(*one.sizes, seed=1)
        near(
            one.effective(base, change, 0.9, torch.empty_like(base)),
            changed_weight(one, base, change, 0.9),
        )


def test_a_group_of_exact_matrices_needs_no_memory() -> None:
    plane = Plane()
    (built,) = members(plane, [(9, 8)])
    gradient, base, change = normal(9, 8), normal(9, 8, seed=1), normal(9, 8, seed=2)
    built.collect(normal(5, 9), normal(5, 8))
    built.collect_whole(gradient)
    built.collect_rows(torch.tensor([8, 3]), gradient[:2])
    assert built.gradient is not None
    near(
        built.gradient,
        (normal(5, 9).T @ normal(5, 8) + gradient).index_add(0, torch.tensor([8, 3]), gradient[:2]),
    )
    near(built.effective(base, change, 0.9, torch.empty_like(base)), 0.9 * base + change)
    assert not plane.memory and built.dense_projectors(torch.float32) == (None, None)
