"""What a device claims of itself: rows, lengths, its signature, and its neighbours' shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.fleet.carry import Desk, Parcel, files_of, parcel_of
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.combine import combined, length_of, longest_of, shortened, weights_of
from ondevice.fleet.keys import REPLY_DOMAIN
from ondevice.fleet.messages import Task, TaskReply
from ondevice.fleet.numbers import LIMIT, Numbers
from ondevice.fleet.replies import reply_of
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.store import Store
from tests.fleet.fleets import answer, charter, drawn


def test_rows_and_lengths_that_a_liar_claims_count_no_more_than_an_honest_devices() -> None:
    server = Rounds(charter())
    current = server.begin([1, 2, 3, 4])
    honest = [
        answer(current.tasks[n], n, drawn(2, n), rows=rows) for n, rows in ((1, 5), (2, 9), (3, 7))
    ]
    lie = TaskReply(
        honest[0].fleet, 0, current.begin, 4, (1 << 32) - 1, 0.5, Numbers((LIMIT, -LIMIT), 100)
    )
    for item in (*honest, lie):
        server.receive(item.to_bytes(), item.device)
    weights = weights_of([item.rows for item in (*honest, lie)], 10_000)
    assert weights == [5, 7, 7, 7]
    most = max(length_of(item.numbers.values()) for item in honest)
    taken = shortened((*honest, lie), server.charter.fleet)
    assert length_of(taken[3]) <= most * 1.001
    assert combined((*honest, lie), server.charter.fleet) == pytest.approx(
        np.average(taken, axis=0, weights=weights)
    )
    assert server.open[0].loss == pytest.approx(0.5)
    for count in range(3, 40):
        lengths = np.random.default_rng(count).uniform(1, 2, count)
        liars = max(1, count // 4)
        lengths[:liars] = 1e30
        assert longest_of(lengths.tolist()) <= lengths[liars:].max()


@pytest.mark.flower
def test_replies_by_file_are_signed_by_the_devices_of_the_charter(tmp_path: Path) -> None:
    pytest.importorskip(
        "cryptography", reason="cryptography is not installed; try: make fleet-test"
    )
    from ondevice.fleet.keys import DeviceKey
    from tests.fleet.keyring import make_keys

    keys, others = make_keys(tmp_path, (5, 6)), make_keys(tmp_path / "others", (5,))
    fleet = charter().model_copy(update={"device_keys": keys.names})
    with Store.create(tmp_path / "server", fleet) as store:
        task = Task.from_bytes(parcel_of(Desk(store).out(5)[0]).task or b"")
        Desk(store).out(6)
        five, six = (answer(task, number, drawn(2)).to_bytes() for number in (5, 6))

        def taken(
            number: int, data: bytes, key: Path | None, signed: bytes | None = None
        ) -> Code | None:
            mark = None if key is None else DeviceKey(key).sign(REPLY_DOMAIN + (signed or data))
            try:
                Desk(store).take(files_of(Parcel(device=number, answer=data, signed=mark))[0])
            except Refusal as error:
                return error.code
            return None

        assert taken(5, five, None) == Code.SIGNATURE
        assert taken(5, five, others.files[5]) == Code.SIGNATURE
        assert taken(5, five, keys.files[5], signed=six) == Code.SIGNATURE
        assert taken(5, five, keys.files[5]) is None
        assert taken(6, six, keys.files[5]) == Code.SIGNATURE, "one key is one device"
        assert taken(6, six, keys.files[6]) is None
        Desk(store).close()
        task = Task.from_bytes(parcel_of(Desk(store).out(5)[0]).task or b"")
        assert taken(5, answer(task, 5, drawn(2)).to_bytes(), keys.files[6]) == Code.SIGNATURE, (
            "nor may it change"
        )


@pytest.mark.flower
def test_many_neighbours_of_whom_a_few_give_wrong_shares_still_make_a_sum(tmp_path: Path) -> None:
    """The first shares in order are wrong: subsets that all begin with them would never do."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.stages import Revealed, read
    from ondevice.fleet.sums import SecureSum
    from tests.fleet.keyring import make_keys
    from tests.fleet.test_secure import secrets_of

    devices, blamed = secrets_of(keys := make_keys(tmp_path, range(15))), set()

    def send(contents: dict[int, dict[str, Any]]) -> Any:
        replies = {}
        for node, content in contents.items():
            vector = np.array([node, 1], np.int64).view(np.uint64)
            reply = devices[node].reply(content["secure"], lambda vector=vector: vector)
            if node < 3 and b'"seeds"' in reply:
                shares = {
                    peer: data[:4] + bytes(len(data) - 4)
                    for peer, data in read(Revealed, reply).seeds.items()
                }
                reply = Revealed(seeds=shares, keys={}).to_bytes()
            replies[node] = reply_of({"secure": reply})
        return replies

    sums = SecureSum(send, b"task", keys.names, lambda node, code: blamed.add(node))
    total, alive = sums.collect({node: {} for node in devices}, 2)
    assert total.view(np.int64).tolist() == [sum(range(15)), 15]
    assert (len(alive), blamed) == (15, {0, 1, 2})
