"""Fleets of first-order devices: the rules are Flower's, and every way to run one gives the same adapter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.arrays import digest, from_bytes, to_bytes
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.averaging.rules import Arrays, Averaging, Combiner, Rule, check_alike
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.codes import Code
from ondevice.fleet.config import FleetRun
from tests.cli.command import CommandLine
from tests.fleet.fleets import refused
from tests.fleet.grids import LocalGrid, name_the_run
from tests.fleet.test_simulate import rows

TINY = ("--model", "tiny:llama", "--batch-size", 2, "--set", "method.rank=2", "--seed", 3)


def simulate(ondevice: CommandLine, folder: Path, *more: object, method: str = "lora") -> Any:
    data = rows(folder / "rows.jsonl")
    return ondevice("fleet", "simulate", *TINY, "--method", method, "--data", data, "--task", "sst2", "--devices", 4,
                    "--learning-rate", 1e-2, "--rounds", 3, "--out", folder / "a fleet", "--json", *more)  # fmt: skip


def drawn(seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    return {
        name: draw.normal(0, 1, shape).astype(np.float32)
        for name, shape in (("a", (3, 4)), ("b", (5,)))
    }


@pytest.mark.flower
@pytest.mark.parametrize("strategy", get_args(Rule))
def test_rules_have_the_bits_of_flowers_strategies(strategy: Rule) -> None:
    """Five devices of different rows, over three rounds, so that moments count."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    from ondevice.fleet.averaging.apps import strategy_of

    config = Averaging(strategy=strategy, server_rate=0.05)
    theirs, ours, before = strategy_of(config, 1.0, 1), Combiner(config), drawn(0)
    for number in (1, 2, 3):
        answers = [(drawn(10 * number + device), 3 + device) for device in range(5)]
        theirs.current_arrays = before
        replies = []
        for arrays, count in answers:
            content = RecordDict({
                "arrays": ArrayRecord({name: Array(value) for name, value in arrays.items()}),
                "metrics": MetricRecord({"num-examples": count, "loss": 0.5}),
            })  # fmt: skip
            replies.append(SimpleNamespace(content=content, has_error=lambda: False))
        expected = {name: value.numpy().astype(np.float32) for name, value in
                    theirs.aggregate_train(number, replies)[0].items()}  # fmt: skip
        after = ours.combine(number, before, answers)
        for name, value in expected.items():
            assert np.array_equal(after[name], value), (strategy, number, name)
        before = after


def test_a_first_order_fleet_learns_and_goes_on_to_the_same_hash(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    adaptive = (
        "--set",
        "averaging.strategy=fedadam",
        "--set",
        "simulation.eval_every=1",
        "--local-steps",
        2,
    )
    whole = simulate(ondevice, tmp_path / "whole", *adaptive).json
    assert whole["hashes_equal"] is True
    assert whole["loss_last"] < whole["loss_first"]
    assert [point["round"] for point in whole["curve"]] == [0, 1, 2, 3]
    assert whole["curve"][-1]["bytes"] == pytest.approx(3 * whole["bytes_per_device_round"], abs=3)
    simulate(ondevice, tmp_path, *adaptive, "--rounds", 1)
    assert simulate(ondevice, tmp_path, *adaptive).code == 14, "a fleet is never replaced unasked"
    again = simulate(ondevice, tmp_path, *adaptive, "--resume").json
    assert again["final_hash"] == whole["final_hash"]
    status = ondevice("fleet", "status", tmp_path / "a fleet", "--json").json
    assert (status["hash"], status["rounds"]) == (whole["final_hash"], 3)
    assert (
        "no log to replay"
        in ondevice("fleet", "replay", tmp_path / "a fleet", "--json").json["message"]
    )


def test_weak_devices_send_numbers_and_the_rest_their_adapters(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    weak = ("--set", "simulation.weak=0.5", "--set", "simulation.weak_rate=0.05")
    mixed = simulate(ondevice, tmp_path, *weak, method="lora-fa").json
    strong = simulate(ondevice, tmp_path, "--overwrite", method="lora-fa").json
    assert mixed["final_hash"] != strong["final_hash"]
    assert mixed["bytes_per_device_round"] < 0.8 * strong["bytes_per_device_round"]
    refused = simulate(ondevice, tmp_path, "--overwrite", *weak).json
    assert "train only B" in refused["message"]


def test_curves_of_two_kinds_of_fleets_are_drawn_by_round_and_by_bytes(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    simulate(ondevice, tmp_path, "--rounds", 1)
    numbers = tmp_path / "numbers ü"
    simulate(
        ondevice,
        tmp_path,
        "--rounds",
        2,
        "--set",
        "simulation.eval_every=1",
        "--out",
        numbers,
        method="prge",
    )
    done = ondevice(
        "fleet", "plot", tmp_path / "a fleet", numbers, "--out", tmp_path / "both.png", "--json"
    ).json
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert [point["round"] for point in done["curves"][str(numbers)]] == [0, 1, 2]
    assert done["curves"][str(numbers)][2]["bytes"] == 2 * done["curves"][str(numbers)][1]["bytes"]
    begun = ondevice("fleet", "begin", "--model", "tiny:llama", "--out", tmp_path / "begun")
    assert begun.code == 0
    assert (
        "no evaluations" in ondevice("fleet", "plot", tmp_path / "begun", "--json").json["message"]
    )


def test_robust_strategies_keep_what_hostile_devices_would_ruin(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    """One device of four sends its change turned around, ten times as large: a mean walks away from the data."""
    hostile = ("--set", "simulation.hostile=0.25", "--set", "simulation.attack=flip")
    honest = simulate(ondevice, tmp_path, "--overwrite").json["loss_last"]
    mean = simulate(ondevice, tmp_path, "--overwrite", *hostile).json["loss_last"]
    trimmed = simulate(
        ondevice, tmp_path, "--overwrite", *hostile, "--set", "averaging.strategy=fedtrimmedavg",
        "--set", "averaging.trim=0.25",
    ).json["loss_last"]  # fmt: skip
    assert abs(trimmed - honest) < 0.1 * (mean - honest)


def test_wrong_settings_are_refused(ondevice: CommandLine, tmp_path: Path) -> None:
    assert (
        "replies with adapters"
        in simulate(ondevice, tmp_path, "--set", "fleet.combine=median").json["message"]
    )
    whole = ondevice(
        "fleet", "simulate", "--model", "tiny:llama", "--method", "full", "--json"
    ).json
    assert "a fleet cannot share" in whole["message"]
    expected = drawn(0)
    for odd, said in (
        ({"a": expected["a"]}, Code.NUMBERS),
        (expected | {"b": expected["b"][:2]}, Code.NUMBERS),
        (expected | {"b": expected["b"] * np.float32(np.nan)}, Code.NOT_FINITE),
    ):
        with refused(said):
            check_alike(odd, expected)
    with pytest.raises(FleetError):
        from_bytes(to_bytes(expected)[:40])
    with pytest.raises(FleetError):
        AdapterCharter.from_bytes(b"{}")


@pytest.mark.flower
def test_the_server_over_flower_gives_the_simulations_adapter(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """A grid in this process, whose nodes are the simulation's members."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.averaging.apps import AdapterServer
    from ondevice.fleet.averaging.records import CONFIG, content_of, request_of
    from ondevice.fleet.averaging.simulate import AveragingSimulation
    from ondevice.fleet.open import open_run

    name_the_run(monkeypatch)
    values = {
        "model": {"source": "tiny:llama"}, "method": {"name": "lora", "rank": 2, "learning_rate": 1e-2},
        "data": {"path": rows(tmp_path / "rows.jsonl"), "task": "sst2", "max_length_tokens": 64},
        "train": {"out": tmp_path / "simulated", "batch_size": 2}, "fleet": {"rounds": 3},
        "averaging": {"strategy": "fedyogi"}, "simulation": {"devices": 3},
    }  # fmt: skip
    config, session, read, source = open_run(FleetRun.parse(values))
    simulation = AveragingSimulation(config, session, read, source)
    expected = simulation.run(False, False, lambda done: None).final_hash

    class Grid(LocalGrid):
        def reply(self, node: int, content: Any) -> Any:
            asked = request_of(content)
            arrays = from_bytes(asked["adapter"])
            if asked["last"]:
                return {CONFIG: {"digest": digest(arrays)}}
            answer = simulation.members[node].answer(asked["round"], arrays)
            return content_of(
                {"adapter": to_bytes(answer.arrays), "rows": answer.rows, "loss": answer.loss}
            )

    for rounds in (2, 3):  # a server that is started again goes on with its moments
        with AdapterStore.create(
            tmp_path / "served", simulation.charter, simulation.first
        ) as store:
            settings = {"rounds": rounds, "least_devices": 3, "sample": 1.0, "wait_s": 1.0}
            AdapterServer(Grid([2, 0, 1]), store, settings).run()  # type: ignore[arg-type]
            assert store.count() == rounds
            assert (digest(store.tensors()) == expected) is (rounds == 3)


def test_a_device_replies_with_the_tensors_that_it_trains(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    from ondevice.fleet.device import Device, DeviceSettings

    begun = ondevice("fleet", "begin", "--model", "tiny:llama", "--method", "lora-fa", "--set", "method.rank=2",
                     "--task", "sst2", "--max-length", 64, "--out", tmp_path / "server", "--json").json  # fmt: skip
    with AdapterStore.open(tmp_path / "server") as store:
        charter, first = store.charter, store.tensors()
    assert begun["elements"] == sum(value.size for value in first.values())
    device = Device(
        DeviceSettings(str(tmp_path / "a device"), str(rows(tmp_path / "rows.jsonl")), batch_size=2)
    )
    message = {"charter": charter.to_bytes(), "adapter": to_bytes(first), "round": 0, "last": False}
    reply = device.reply(message, 1)
    trained = from_bytes(reply["adapter"])
    assert trained.keys() == {name for name in first if "lora_B" in name}
    assert any((value != first[name]).any() for name, value in trained.items())
    assert device.reply(message, 1) == reply, "the optimizer begins anew in each round"
    last = device.reply({**message, "adapter": to_bytes(first | trained), "last": True}, 1)
    assert last == {"digest": digest(first | trained)}
    other = charter.model_copy(update={"seed": 9}).to_bytes()
    assert device.reply({**message, "charter": other}, 1) == {"error": "other_fleet"}
