"""Devices in different runtimes and precisions measure different numbers, and hold one adapter bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.errors import ArtifactError
from ondevice.core.registry import open_session
from ondevice.core.registry import target as find_target
from ondevice.core.session import Session
from ondevice.data import Batches
from ondevice.data.examples import Dataset, Example, Item
from ondevice.exporters.base import ExportJob
from ondevice.fleet.codes import Code
from ondevice.fleet.config import FleetRun
from ondevice.fleet.member import Member
from ondevice.fleet.noise import weighted_sum
from ondevice.fleet.open import open_for
from ondevice.fleet.rounds import Rounds
from ondevice.models import load_model
from tests import programs
from tests.fleet.fleets import refused
from tests.shared import cached

ROUNDS = 8


def nf4(name: str) -> Path:
    """The model of a program again, in 4 bits, as a Jetson runs it."""
    pytest.importorskip("bitsandbytes")
    run = programs.config(name)

    def export(place: Path) -> Path:
        rows = run.export.batch_size
        settings = ExportConfig(
            target="jetson", lengths_tokens=(16,), batch_size=rows, check_steps=1, quantize="nf4"
        )
        job = ExportJob(
            ModelConfig(source=run.model.source, dtype="float32"),
            run.method,
            settings,
            programs.SEED,
        )
        find_target("jetson").export(job, place / "nf4")
        return place / "nf4"

    return cached(f"nf4 {name}", f"nf4 of {name}, {run.export.batch_size} rows", export)


def rows(session: Session, device: int) -> Batches:
    """Random rows of a device, at most 16 tokens."""
    draw = np.random.default_rng(device)
    ids = [
        tuple(int(token) for token in draw.integers(0, 256, draw.integers(5, 14))) for _ in range(9)
    ]
    items = [Item(Example(row, (-100, *row[1:])), line=line) for line, row in enumerate(ids)]
    return Batches(
        Dataset(items=items), session.batch_size or 3, session.lengths_tokens, device, pad_id=0
    )


def fleet_of(name: str, **agreement: Any):
    """A session in float32 of what a program trains, and the charter of a fleet around it."""
    run = programs.config(name)
    fleet = FleetRun.parse({
        "model": run.model.model_dump(), "method": run.method.model_dump(), "train": {"seed": programs.SEED},
        "fleet": {"local_steps": 2, **agreement},
    })  # fmt: skip
    loaded = load_model(run.model.source)
    session = open_session(loaded, run.method, programs.SEED)
    return session, fleet.charter(session, loaded.source)


@pytest.mark.parametrize(("name", "more"), [
    ("stateful", {}),
    ("functional", {"momentum": 0.9, "combine": "median"}),
])  # fmt: skip
def test_pytorch_4_bit_and_executorch_devices_end_with_one_hash(
    name: str, more: dict[str, Any]
) -> None:
    session, charter = fleet_of(name, **more)
    assert charter.noise == ("rademacher" if name == "stateful" else "gaussian")
    sessions = [
        session,
        *(open_for(charter, artifact=place)[0] for place in (programs.program(name), nf4(name))),
    ]
    assert [item.backend for item in sessions] == ["torch-cpu", "executorch", "torch-cpu"]
    members = [
        Member(charter, item, rows(item, device), device) for device, item in enumerate(sessions)
    ]
    server, outcomes, differing = Rounds(charter), [], 0
    for number in range(ROUNDS):
        current = server.begin([0, 1, 2])
        present = [
            member for member in members if (number, member.device) not in ((2, 1), (3, 1), (5, 2))
        ]
        for member in present:
            member.follow(outcomes)  # one that was away takes what it lacks
            server.receive(member.answer(current.tasks[member.device]).to_bytes(), member.device)
        if number == 0:  # the same rows, measured in every runtime
            member, numbers = members[0], []
            for item in sessions:
                tried = Member(charter, item, members[1].batches, 0).answer(current.tasks[0])
                numbers.append(tried.numbers.values())
            exact, program, rounded = map(np.array, numbers)
            differing = int((program != exact).sum() + (rounded != exact).sum())
            assert np.abs(program - exact).max() < 0.05 * np.abs(exact).max()
        outcomes.append(server.close(number))
    for member in members:
        member.follow(outcomes)
    assert differing, "equal numbers would prove nothing"
    assert {member.state.digest() for member in members} == {server.state.digest()}
    flats = [member.session.state() for member in members if member.adapter() is not None]
    assert len(flats) == 3
    tensors = [member.adapter().tensors for member in members]
    for key, value in tensors[0].items():
        if key.endswith("lora_B.weight"):
            assert all(np.array_equal(value, other[key]) for other in tensors[1:]), key
            assert value.any()


@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_fleet_of_one_device_is_the_same_number_of_central_steps(local_steps: int) -> None:
    """The reference is the session itself, which updates in float32 with its own noise."""
    session, charter = fleet_of("stateful", local_steps=local_steps)
    member = Member(charter, session, rows(session, 0), 0)
    server = Rounds(charter)
    for number in range(6):
        server.receive(member.answer(server.begin([0]).tasks[0]))
        member.follow([server.close(number)])
    central, _ = fleet_of("stateful")
    batches = rows(central, 0)
    for step in range(6 * local_steps):
        batch = batches.at(step)
        central.step(batch.ids, batch.labels, step, charter.learning_rate)
    expected = central.state()["adapter"]
    assert np.abs(expected).max() > 0.01
    assert np.abs(member.state.flat() - expected).max() < 2e-3 * np.abs(expected).max()


def test_mlx_gives_the_same_sum_of_signs() -> None:
    pytest.importorskip("mlx.core")
    from ondevice.runtime_ops import mlx_ops

    directions = [(3, query, c) for query, c in enumerate((5, -70_000, 1 << 28, 11))]
    signs = np.array(mlx_ops.rademacher(9, 3, 0, 4, 0, 1000)).astype(np.int64)
    expected = sum(c * signs[query] for _, query, c in directions)
    assert np.array_equal(weighted_sum("rademacher", 9, directions, 1000), expected)


def test_a_device_of_another_fleet_is_refused(tmp_path: Path) -> None:
    session, charter = fleet_of("stateful")
    other = charter.model_copy(update={"model_sha256": "1" * 64})
    with pytest.raises(ArtifactError, check=lambda error: error.expected == "1" * 64):
        open_for(other, artifact=programs.program("stateful"))
    with refused(Code.MODEL):
        open_for(other)
    with pytest.raises(ArtifactError):
        Member(charter.model_copy(update={"seed": 1}), session, rows(session, 0), 0)
    with pytest.raises(ArtifactError, check=lambda error: "65" in error.expected):
        Member(charter.model_copy(update={"size": 65}), session, rows(session, 0), 0)


def test_a_task_that_is_not_this_devices_is_refused() -> None:
    from dataclasses import replace

    session, charter = fleet_of("stateful")
    member = Member(charter, session, rows(session, 0), 0)
    task = Rounds(charter).begin([0]).tasks[0]
    for wrong, code in (
        (replace(task, fleet=1), Code.OTHER_FLEET),
        (replace(task, begin=b"\1" * 8), Code.OTHER_STATE),
        (replace(task, local_steps=7), Code.OTHER_TASK),
    ):
        with refused(code):
            member.answer(wrong)
    before = member.state.hash
    assert member.answer(task) == member.answer(task), (
        "an answer is a function of the task and the rows"
    )
    assert member.state.hash == before


def test_private_numbers_are_clipped_and_noisy() -> None:
    session, charter = fleet_of("stateful")
    task = Rounds(charter).begin([0]).tasks[0]
    plain = np.linalg.norm(
        Member(charter, session, rows(session, 0), 0).answer(task).numbers.values()
    )
    norm = float(plain / 2)
    _, clipped = fleet_of("stateful", clip_norm=norm)
    task = Rounds(clipped).begin([0]).tasks[0]
    short = Member(clipped, session, rows(session, 0), 0).answer(task).numbers.values()
    assert np.linalg.norm(short) == pytest.approx(norm, rel=1e-3)
    _, noisy = fleet_of("stateful", clip_norm=norm, noise_multiplier=2.0)
    task = Rounds(noisy).begin([0]).tasks[0]
    member = Member(noisy, session, rows(session, 0), 0, noise=np.random.default_rng(0))
    drawn = np.array([member.answer(task).numbers.values() for _ in range(100)])
    assert drawn.std() == pytest.approx(2.0 * norm, rel=0.15)
    first, second = (Member(noisy, session, rows(session, 0), 0).answer(task) for _ in range(2))
    assert first.numbers != second.numbers, "the noise is not of a seed that others know"
