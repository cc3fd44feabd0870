"""Devices that lie: no reply ends a server, none counts for more than an honest one, and the rest of a round goes on.

ONDEVICE_FUZZ is the number of damaged replies of each kind, 60 by default; 2,500 of each of four kinds are 10,000.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.rules import bounded
from ondevice.fleet.carry import MAGIC, Desk, Parcel, files_of, parcel_of
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.messages import Task
from ondevice.fleet.replies import reply_of
from ondevice.fleet.store import Store
from tests.fleet.fleets import answer, charter, drawn
from tests.fleet.grids import LocalGrid, name_the_run
from tests.fleet.mutations import damaged, in_json, mutated

COUNT = int(os.environ.get("ONDEVICE_FUZZ", "60"))
HONEST, LIAR = (7, 8), 9
SETTINGS = {"least_devices": 3, "sample": 1.0, "wait_s": 20.0}
NAN = float("nan")
MALFORMED: list[dict[str, Any]] = [
    {}, {"note": "x"}, {"answer": b""}, {"answer": "text"}, {"answer": 3}, {"answer": [b"a", b"b"]},
    {"answer": b"\xd7" * 60}, {"answer": b"x" * 100_000}, {"answer": b"x", "place": 0}, {"place": -1}, {"place": "3"},
    {"place": 0.5}, {"place": 1 << 40}, {"place": True}, {"place": 99}, {"error": "a text"}, {"error": 3},
    {"error": b"data"}, {"error": "data", "about": "me"}, {"digest": b"short", "place": 0}, {"digest": "z" * 64},
    {"secure": b"{}"}, {"frozen": b"ODFROZEN1", "place": 0}, {"adapter": b"", "rows": 0, "loss": NAN},
    {"gives_subspace": "yes", "place": 0},
]  # fmt: skip


class Grid(LocalGrid):
    """Two honest devices and a liar, whose reply is what `lies` makes of an honest one."""

    def __init__(self, lies: Callable[[dict[str, Any], int], Any]) -> None:
        super().__init__((*HONEST, LIAR))
        self.lies, self.count_of_lies = lies, 0

    def reply(self, node: int, content: Any) -> Any:
        asked = dict(content["fleet"])
        if "task" not in asked:
            return {
                "fleet": {"place": 0}
                if "events" not in asked
                else {"digest": bytes(32), "place": 0}
            }
        task = Task.from_bytes(asked["task"])
        record = {"answer": answer(task, node, drawn(2, 100 * task.round + node)).to_bytes()}
        if node != LIAR:
            return {"fleet": record}
        self.count_of_lies += 1
        return {"fleet": self.lies(record, task.round)}


def served(folder: Path, grid: Grid, rounds: int, monkeypatch: pytest.MonkeyPatch) -> Store:
    from ondevice.fleet import apps

    name_the_run(monkeypatch)
    monkeypatch.setattr(apps, "POLL_S", 0.001)
    monkeypatch.setattr("ondevice.fleet.post.POLL_S", 0.001)
    monkeypatch.setattr("ondevice.fleet.devices.GREET_S", 0.0)
    store = Store.create(folder, charter())
    store.connection.execute("PRAGMA synchronous = OFF")
    apps.Server(grid, store, {**SETTINGS, "rounds": rounds}).run()  # type: ignore[arg-type]
    return store


@pytest.mark.flower
def test_malformed_replies_of_25_kinds_are_dropped_counted_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    assert len(MALFORMED) == 25
    grid = Grid(lambda record, number: MALFORMED[number])
    with caplog.at_level(logging.WARNING, "ondevice.fleet"):
        store = served(tmp_path, grid, len(MALFORMED), monkeypatch)
    assert [row["answers"] for row in store.table()] == [2] * len(MALFORMED)
    assert grid.count_of_lies == len(MALFORMED)
    assert (
        store.table()[-1]["refused"] >= len(MALFORMED) - 1
    )  # a known code is a reply like any other
    said = [record.getMessage() for record in caplog.records if "device 9" in record.getMessage()]
    assert len(said) >= len(MALFORMED)
    assert all(line.split(": ")[-1] in set(Code) for line in said), said


@pytest.mark.flower
@pytest.mark.timeout(3600)
def test_damaged_numbers_never_end_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    draw = np.random.default_rng(1)
    grid = Grid(lambda record, number: mutated(record, draw))
    store = served(tmp_path, grid, COUNT, monkeypatch)
    assert {row["answers"] for row in store.table()} == {2, 3}
    assert grid.count_of_lies == COUNT
    assert np.isfinite(store.state().flat()).all()


def adapters(node: int, number: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([node, number])
    return {
        name: draw.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in (("a", (3, 4)), ("b", (5,)))
    }


def damaged_adapter(reply: Any, place: int, draw: np.random.Generator) -> Any:
    """Return a first-order reply with something wrong in its tensors, its figures or its records: each kind in turn."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    turn, kind = divmod(place, 9)
    arrays = {name: array.numpy() for name, array in reply["arrays"].items()}
    metrics = dict(reply["metrics"])
    record = reply["arrays"]
    if kind == 0:
        del reply[("arrays", "metrics")[int(draw.integers(2))]]
        if draw.random() < 0.5:
            reply["config"] = ConfigRecord({"error": "a text of the device"})
        return reply
    if kind == 1:
        metrics = {name: value for name, value in metrics.items() if draw.random() < 0.5}
    elif kind == 2:
        odd: list[Any] = [-1, 0, 10**15, NAN, float("inf"), 0.5, 1e308, [1, 2], [0.5]]
        metrics[("num-examples", "loss")[int(draw.integers(2))]] = odd[turn % len(odd)]
    elif kind == 3:
        arrays["a"][0, 0] = (np.nan, np.inf, -np.inf, 1e30, 3e38)[turn % 5]
        record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    elif kind == 4:
        arrays = {name: value for name, value in arrays.items() if draw.random() < 0.5}
        record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    elif kind == 5:
        arrays["a"] = (
            arrays["a"].T,
            arrays["a"].astype(np.float64),
            np.zeros((0,), np.float32),
            np.zeros((999, 999)),
        )[int(draw.integers(4))]
        record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    elif kind == 6:
        array = Array(arrays["a"])
        array.data = damaged(array.data, draw)
        record = ArrayRecord({"a": array, "b": Array(arrays["b"])})
    elif kind == 7:
        array = Array(arrays["a"])
        array.stype = ("pickle", "", "numpy.ndarray ")[int(draw.integers(3))]
        record = ArrayRecord({"a": array, "b": Array(arrays["b"])})
    else:
        record = ArrayRecord({f"{name}odd": Array(value) for name, value in arrays.items()})
    return RecordDict({"arrays": record, "metrics": MetricRecord(metrics)})


@pytest.mark.flower
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", ["fedavg", "fedmedian", "fedadam", "fedtrimmedavg"])
def test_damaged_adapters_never_end_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.averaging import apps
    from ondevice.fleet.averaging.arrays import digest
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.fleet.averaging.records import CONFIG, arrays_of, content_of, request_of
    from ondevice.fleet.averaging.rules import Averaging
    from ondevice.fleet.averaging.store import AdapterStore

    name_the_run(monkeypatch)
    monkeypatch.setattr("ondevice.fleet.post.POLL_S", 0.001)
    draw, rounds = np.random.default_rng(2), max(45, COUNT // 4)
    lies = []

    class Adapters(LocalGrid):
        def reply(self, node: int, content: Any) -> Any:
            asked = request_of(content)
            arrays = arrays_of(content["arrays"])
            if asked["last"]:
                return {CONFIG: {"digest": digest(arrays)}}
            given = {
                name: value + adapters(node, asked["round"])[name] for name, value in arrays.items()
            }
            from ondevice.fleet.averaging.arrays import to_bytes

            reply = content_of({"adapter": to_bytes(given), "rows": 4, "loss": 0.5})
            if node != LIAR:
                return reply
            lies.append(asked["round"])
            return damaged_adapter(reply, asked["round"], draw)

    fleet = AdapterCharter(
        model_source="tiny:llama", model_sha256="0" * 64, method={"name": "lora"}, data={}, seed=1,
        learning_rate=1e-3, local_steps=1, averaging=Averaging(strategy=strategy),
    )  # fmt: skip
    with AdapterStore.create(tmp_path, fleet, adapters(0, 0)) as store:
        store.connection.execute("PRAGMA synchronous = OFF")
        apps.AdapterServer(Adapters((*HONEST, LIAR)), store, {**SETTINGS, "rounds": rounds}).run()  # type: ignore[arg-type]
        assert {row["answers"] for row in store.table()} <= {2, 3}
        assert len(lies) == rounds
        assert store.table()[-1]["refused"] > rounds // 3
        assert all(np.isfinite(value).all() for value in store.tensors().values())
        # Steps of some 0.1 a number and round by honest devices: no lie has moved the adapter further.
        assert (
            max(float(np.abs(value).max()) for value in store.tensors().values()) < 0.6 * rounds + 1
        )


@pytest.mark.timeout(3600)
def test_damaged_files_never_end_a_desk(tmp_path: Path) -> None:
    draw, taken, refused = np.random.default_rng(3), 0, 0
    with Store.create(tmp_path, charter()) as store:
        store.connection.execute("PRAGMA synchronous = OFF")
        desk = Desk(store)
        for place in range(COUNT):
            task = Task.from_bytes(parcel_of(desk.out(place)[-1]).task or b"")
            whole = files_of(Parcel(device=place, answer=answer(task, place, drawn(2)).to_bytes()))[
                0
            ]
            data = damaged(whole, draw)
            if (
                draw.random() < 0.7
            ):  # what is inside is damaged, and whoever damaged it made the checksum anew
                body = damaged(whole[len(MAGIC) : -4], draw)
                data = MAGIC + body + struct.pack("<I", zlib.crc32(MAGIC + body))
            try:
                desk.take(data)
                taken += 1
            except FleetError:
                refused += 1
        desk.close()
        assert np.isfinite(store.state().flat()).all()
    assert refused > COUNT // 2
    assert taken + refused == COUNT


@pytest.mark.flower
@pytest.mark.timeout(3600)
def test_damaged_stages_never_end_a_secure_sum(tmp_path: Path) -> None:
    """Five devices, of which one damages one of its replies: the sum is that of the others, or of all."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.sums import SecureSum
    from tests.fleet.keyring import make_keys
    from tests.fleet.test_secure import secrets_of

    draw, keys = np.random.default_rng(4), make_keys(tmp_path, range(5))
    stages, sums = 0, 0
    recorded: list[bytes] = []
    for place in range(max(12, COUNT // 50)):
        devices, number, blamed = secrets_of(keys), 0, []

        def send(
            contents: dict[int, dict[str, Any]],
            place: int = place,
            devices: Any = devices,
            blamed: Any = blamed,
        ) -> Any:
            nonlocal number
            replies = {}
            for node, content in contents.items():
                vector = np.array([node, -3], np.int64).view(np.uint64)
                reply = devices[node].reply(content["secure"], lambda vector=vector: vector)
                recorded.append(reply)
                if node == 4 and number == place % 4:
                    reply = (
                        in_json(reply, draw, "odd") if draw.random() < 0.7 else damaged(reply, draw)
                    )
                replies[node] = reply_of({"secure": reply})
            number += 1
            return replies

        sum_ = SecureSum(
            send, b"task", keys.names, lambda node, code, blamed=blamed: blamed.append(node)
        )
        total, alive = sum_.collect({node: {} for node in devices}, 2)
        # A vector whose numbers were changed under its mask is a vector: what it spoils is found by `suspects`.
        whole = total.view(np.int64).tolist() == [sum(alive), -3 * len(alive)]
        assert whole or (place % 4 == 2 and 4 in alive)
        assert set(alive) >= {0, 1, 2, 3}
        assert set(blamed) <= {4}
        sums += 1
    from ondevice.fleet.stages import Keys, Masked, Revealed, Shares, read

    for _ in range(COUNT):
        reply = recorded[int(draw.integers(len(recorded)))]
        changed = in_json(reply, draw, "odd") if draw.random() < 0.7 else damaged(reply, draw)
        for kind in (Keys, Shares, Masked, Revealed):
            try:
                read(kind, changed or b"")
            except Refusal as error:
                assert error.code == Code.MALFORMED
            stages += 1
    assert (sums, stages) == (max(12, COUNT // 50), 4 * COUNT)


@pytest.mark.flower
def test_a_device_with_shares_that_nobody_can_read_loses_its_place_and_the_others_sum(
    tmp_path: Path,
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.stages import Masked, Shares, read
    from ondevice.fleet.sums import SecureSum
    from tests.fleet.keyring import make_keys
    from tests.fleet.test_secure import secrets_of

    keys = make_keys(tmp_path, range(6))

    def run(lie: Callable[[int, bytes], bytes]) -> tuple[list[int], list[int], list[int]]:
        devices, blamed = secrets_of(keys), []

        def send(contents: dict[int, dict[str, Any]]) -> Any:
            replies = {}
            for node, content in contents.items():
                vector = np.array([node, 1], np.int64).view(np.uint64)
                replies[node] = reply_of(
                    {
                        "secure": lie(
                            node,
                            devices[node].reply(content["secure"], lambda vector=vector: vector),
                        )
                    }
                )
            return replies

        total, alive = SecureSum(
            send, b"task", keys.names, lambda node, code: blamed.append(node)
        ).collect({node: {} for node in devices}, 2)
        return total.view(np.int64).tolist(), alive, sorted(set(blamed))

    def garbage(reached: set[int]) -> Callable[[int, bytes], bytes]:
        def lie(node: int, reply: bytes) -> bytes:
            if node != 5 or b'"shares"' not in reply:
                return reply
            shares = {peer: b"?" * len(data) if peer in reached else data
                      for peer, data in read(Shares, reply).shares.items()}  # fmt: skip
            return Shares(shares=shares).to_bytes()

        return lie

    def accuser(node: int, reply: bytes) -> bytes:
        if node != 5 or b'"masked"' not in reply:
            return reply
        return Masked(masked=read(Masked, reply).masked, without=frozenset({0, 1, 2})).to_bytes()

    assert run(lambda node, reply: reply) == ([15, 6], [0, 1, 2, 3, 4, 5], [])
    assert run(garbage({0, 1, 2, 3, 4})) == ([10, 5], [0, 1, 2, 3, 4], [5])
    # Too few others hold shares of its key to cancel its masks: it is in this one sum, and in no other.
    assert run(garbage({0, 1})) == ([14, 4], [2, 3, 4, 5], [5])
    total, alive, blamed = run(
        garbage({2})
    )  # its word against another's: one goes, neither is asked again
    assert total == [sum(alive), len(alive)]
    assert (len(alive), blamed) == (5, [2, 5])
    assert run(accuser) == ([10, 5], [0, 1, 2, 3, 4], [5])


def test_a_first_order_liar_moves_the_adapter_no_further_than_an_honest_device() -> None:
    before = adapters(0, 0)
    honest = [
        ({name: value + adapters(node, 1)[name] for name, value in before.items()}, 4)
        for node in (1, 2, 3)
    ]
    lie = ({name: np.full_like(value, 1e14) for name, value in before.items()}, (1 << 32) - 1)
    given = bounded(before, [*honest, lie], "fedavg")

    def length(arrays: dict[str, np.ndarray]) -> float:
        return float(
            np.sqrt(sum(np.square(value - before[name]).sum() for name, value in arrays.items()))
        )

    assert [rows for _, rows in given] == [4] * 4
    assert length(given[3][0]) <= max(length(arrays) for arrays, _ in honest) * 1.001
    assert sum(arrays is item[0] for (arrays, _), item in zip(given, honest, strict=False)) >= 2, (
        "honest ones stay"
    )


@pytest.mark.flower
def test_a_lone_liar_does_not_choose_the_tensors_of_a_first_order_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds that only it answers, it sends one tensor of two: server's moments of the other would be missing."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.averaging import apps
    from ondevice.fleet.averaging.arrays import digest, to_bytes
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.fleet.averaging.records import CONFIG, arrays_of, content_of, request_of
    from ondevice.fleet.averaging.rules import Averaging
    from ondevice.fleet.averaging.store import AdapterStore

    name_the_run(monkeypatch)
    monkeypatch.setattr("ondevice.fleet.post.POLL_S", 0.001)

    class Lone(LocalGrid):
        def reply(self, node: int, content: Any) -> Any:
            asked, arrays = request_of(content), arrays_of(content["arrays"])
            if asked["last"]:
                return {CONFIG: {"digest": digest(arrays)}}
            if node == LIAR:
                arrays = {"a": arrays["a"] + np.float32(1)}
            elif asked["round"] == 1:
                return content_of({"error": "training"})
            return content_of({"adapter": to_bytes(arrays), "rows": 4, "loss": 0.5})

    fleet = AdapterCharter(
        model_source="tiny:llama", model_sha256="0" * 64, method={"name": "lora"}, data={}, seed=1,
        learning_rate=1e-3, local_steps=1, averaging=Averaging(strategy="fedadam"),
    )  # fmt: skip
    with AdapterStore.create(tmp_path, fleet, adapters(0, 0)) as store:
        apps.AdapterServer(Lone((*HONEST, LIAR)), store, {**SETTINGS, "rounds": 3}).run()  # type: ignore[arg-type]
        assert [row["answers"] for row in store.table()] == [2, 0, 2]
        assert store.table()[-1]["refused"] == 3
