"""A fleet in a gradient's subspace, with Adam: its subspaces are in its log, and so is its adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.artifact.adapter import load_adapter
from ondevice.core.errors import ConfigError, FleetError
from ondevice.data import Batches
from ondevice.fleet.carry import Desk
from ondevice.fleet.config import FleetRun
from ondevice.fleet.device import Device, DeviceSettings
from ondevice.fleet.frozen import Frozen
from ondevice.fleet.messages import Refresh
from ondevice.fleet.open import open_run
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.simulate import simulate
from ondevice.fleet.split import split
from ondevice.fleet.store import Store, read_file
from tests.cli.command import CommandLine
from tests.fleet.test_simulate import rows


def run(folder: Path, devices: int, rounds: int = 4, **method: Any) -> FleetRun:
    settings = {"name": "prge", "rank": 2, "queries": 2, "noise": "rademacher", "subspace": "gradient",
                "refresh_every": 4, "calibration_rows": 4, "perturbation_scale": 0.1, **method}  # fmt: skip
    values = {
        "model": {"source": "tiny:llama"}, "method": settings,
        "data": {"path": rows(folder / "rows.jsonl"), "task": "sst2", "max_length_tokens": 64},
        "train": {"out": folder / "a fleet", "batch_size": 2, "seed": 3},
        "fleet": {"rounds": rounds, "local_steps": 2}, "simulation": {"devices": devices},
    }  # fmt: skip
    return FleetRun.parse(values).decided()


def test_one_device_ends_where_training_without_a_fleet_does(tmp_path: Path) -> None:
    """Two subspaces, and Adam's moments of each: the float32 session itself is the reference."""
    done = simulate(run(tmp_path, devices=1))
    config, session, read, _ = open_run(run(tmp_path, devices=1))
    batches = Batches(split(read.train, 1, None, 3)[0], 2, None, 3, read.pad)
    taken, own = tmp_path / "a fleet" / "subspaces", tmp_path
    session.before_step(0, batches.at, own)
    assert (own / "subspace-00000000.safetensors").read_bytes() == (
        taken / "subspace-00000000.safetensors"
    ).read_bytes()
    for step in range(8):
        session.before_replay(
            step, taken
        )  # the second gradient's weakest directions are those of rounding errors
        batch = batches.at(step)
        session.step(batch.ids, batch.labels, step, config.method.learning_rate)
    own_adapter = session.adapter()
    assert own_adapter is not None
    assert done.adapter is not None
    alone, fleet = own_adapter.tensors, load_adapter(done.adapter).tensors
    for name, value in alone.items():
        assert np.linalg.norm(fleet[name] - value) < 1e-3 * np.linalg.norm(value), name


def test_devices_that_follow_the_log_have_its_subspaces(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    done = simulate(run(tmp_path, devices=3))
    assert done.hashes_equal
    assert done.rounds == 4
    log = read_file(Path(done.log))
    assert [event.round for event in log.events if isinstance(event, Refresh)] == [0, 2]
    assert done.bytes_per_device_round > 1e4, "the subspaces count"
    assert done.adapter is not None
    again = ondevice("fleet", "replay", done.log, "--out", tmp_path / "again", "--json").json
    assert again["final_hash"] == done.final_hash
    first, second = load_adapter(done.adapter).tensors, load_adapter(tmp_path / "again").tensors
    assert all(np.array_equal(first[name], second[name]) for name in first)
    grown = simulate(run(tmp_path, devices=3, rounds=5), resume=True)  # from its file alone
    whole = simulate(run(tmp_path, devices=3, rounds=5), overwrite=True)
    assert grown.final_hash == whole.final_hash


def test_a_device_over_a_network_takes_gives_and_checks_subspaces(tmp_path: Path) -> None:
    config = run(tmp_path, devices=2)
    done = simulate(config)
    with Store.open(Path(done.log).parent) as store:
        charter, events, files = (
            store.charter,
            store.events(),
            [file.to_bytes() for file in store.files()],
        )
        with pytest.raises(FleetError):
            Desk(store)

    def settings(name: str, **more: Any) -> DeviceSettings:
        return DeviceSettings(
            str(tmp_path / name), str(tmp_path / "rows.jsonl"), batch_size=2, **more
        )

    device = Device(settings("device", gives_subspace=True))
    assert device.reply({"charter": charter.to_bytes()}, 1) == {"place": 0, "gives_subspace": True}
    assert device.reply({"events": events}, 1) == {"error": "malformed"}
    changed = Frozen("subspace-00000000.safetensors", b"other bytes").to_bytes()
    assert device.reply({"events": events, "frozen": [changed, files[1]]}, 1) == {
        "error": "malformed"
    }
    assert device.reply({"events": events, "frozen": [b"../../x"]}, 1) == {"error": "malformed"}
    said = device.reply({"events": events, "frozen": files}, 1)
    assert said["digest"].hex() == done.final_hash
    server = Rounds(charter, device._state(Store.open(tmp_path / "device")))
    assert charter.due(server.state)  # the third
    with pytest.raises(FleetError):
        server.begin([1])
    given = device.reply({"events": [], "subspace": True}, 1)
    refused = Device(settings("other"))
    refused.reply({"charter": charter.to_bytes()}, 1)
    assert refused.reply({"events": events, "frozen": files, "subspace": True}, 1) == {
        "error": "subspace"
    }
    event = server.refresh(Frozen.from_bytes(given["frozen"]).digest)
    task = server.begin([1]).tasks[1].to_bytes()
    answers = [
        each.reply(
            {
                "events": [*events, event.to_bytes()],
                "frozen": [*files, given["frozen"]],
                "task": task,
            },
            1,
        )
        for each in (device, Device(settings("new")))
        if each is device or each.reply({"charter": charter.to_bytes()}, 1)
    ]
    assert "answer" in answers[0]
    assert answers[0] == answers[1], "one that was always here, and one that came late"
    shutil.rmtree(tmp_path / "device")


def test_adam_and_subspaces_are_refused_where_a_fleet_cannot_share_them(tmp_path: Path) -> None:
    for change in ({"refresh_every": 3}, {"subspace": "random", "optimizer": "adam"}):
        with pytest.raises(ConfigError):
            simulate(run(tmp_path, 2, **change))
