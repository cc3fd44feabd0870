"""A mixed fleet for the JVM tests: a phone whose answers Python computes, too, beside every other runtime that is here.

PyTorch in float32 and in NF4, the phone's own program in ExecuTorch, and the same step in the NPU's simulator answer;
MLX, which has no session of this method, follows the log with its own signs. The phone's rounds lie as files, as
`ondevice fleet carry` writes them; so do the answers that it must give.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ondevice.fleet.charter import Charter
    from ondevice.fleet.member import Member
    from ondevice.fleet.messages import Outcome
    from ondevice.fleet.state import State

ROUNDS = 20
AWAY = (5, 6)
"""Rounds that the phone is not asked in: it gets their outcomes later."""
PHONE = 3


def write(out: Path, artifact: Path, programs: Sequence[Path]) -> None:
    """Write `round-N.odfleet` for the phone, `answer-N.odfleet` that it gives, `end-N.odfleet` and `fleet.json`.

    Args:
        artifact: the phone's.
        programs: of other targets, for the same step; each is a device.
    """
    from ondevice.core.registry import open_session
    from ondevice.data import Batches, pad_id_of, read_dataset
    from ondevice.fleet.carry import Desk, Parcel, files_of, parcel_of
    from ondevice.fleet.config import FleetRun
    from ondevice.fleet.member import Member
    from ondevice.fleet.messages import Task, read_event
    from ondevice.fleet.open import open_for
    from ondevice.fleet.store import Store
    from ondevice.models import load_model

    manifest = json.loads((artifact / "manifest.json").read_text())
    config = FleetRun.parse({
        "model": {"source": manifest["model"]["source"]}, "method": manifest["method"], "train": {"seed": 7},
        "data": {"path": "rows.jsonl", "task": "sst2", "max_length_tokens": 64},
        "fleet": {"local_steps": 2, "momentum": 0.5, "clip_norm": 40.0},
    })  # fmt: skip
    loaded = load_model(config.model.source)
    computer = open_session(loaded, config.method, 7)
    charter = config.charter(computer, loaded.source)
    program, tokenizer = open_for(charter, artifact=artifact)
    rows = read_dataset(out.parent / "train.jsonl", tokenizer, task="sst2", max_length_tokens=64)

    def member(session: Any, number: int) -> Member:
        size = session.batch_size or 3
        return Member(charter, session, Batches(rows, size, session.lengths_tokens, 7, pad_id_of(tokenizer)), number)

    phone = member(program, PHONE)
    others = {"torch-cpu float32": member(computer, 1)}
    for number, place in enumerate(programs, start=PHONE + 1):
        session = open_for(charter, artifact=place)[0]
        others[f"{session.backend} {place.name.split()[-1]}"] = member(session, number)
    first = [answer_of(device, charter) for device in (phone, *others.values())]
    if len(set(first)) != len(first):
        sys.exit("runtimes measured equal numbers, so equal hashes would prove nothing")
    follower = mlx_state(charter)
    for file in out.glob("*"):
        file.unlink()
    hashes = []
    with Store.create(out, charter) as store:
        for number in range(ROUNDS):
            desk = Desk(store)
            for device in (*others.values(),) if number in AWAY else (*others.values(), phone):
                files = desk.out(device.device)
                parcels = [parcel_of(file) for file in files]
                device.follow([read_event(event) for parcel in parcels for event in parcel.events])
                answer = device.answer(Task.from_bytes(parcels[-1].task or b""))
                (given,) = files_of(Parcel(device=device.device, answer=answer.to_bytes()))
                if device is phone:
                    for place, file in enumerate(files):
                        (out / f"round-{number}-{place}.odfleet").write_bytes(file)
                    (out / f"answer-{number}.odfleet").write_bytes(given)
                desk.take(given)
            outcome = desk.close()
            hashes.append(store.state().digest().hex())
            follower.apply(outcome)
        for place, file in enumerate(Desk(store).out(PHONE, last=True)):
            (out / f"end-{place}.odfleet").write_bytes(file)
        for device in (phone, *others.values()):
            for file in Desk(store).out(device.device, last=True):
                device.follow([read_event(event) for event in parcel_of(file).events])
        final = store.state()
    flat = [float(value) for value in final.flat()]
    if np.abs(flat).max() <= 1e-3:
        sys.exit("the fleet's adapter has not moved, so its hash would prove little")
    ends = {name: device.state for name, device in others.items()}
    ends |= {"executorch python": phone.state, "mlx signs": follower}
    document = {"ends": {name: state.digest().hex() for name, state in ends.items()}, "rounds": ROUNDS,
                "away": AWAY, "device": PHONE, "hashes": hashes, "adapter": flat,
                "charter": charter.to_bytes().decode()}  # fmt: skip
    (out / "fleet.json").write_text(json.dumps(document))


def answer_of(device: Member, charter: Charter) -> tuple[float, ...]:
    """Return what a device measures in the first round; all have the same rows."""
    from ondevice.fleet.rounds import Rounds

    return tuple(device.answer(Rounds(charter).begin([device.device]).tasks[device.device]).numbers.values())


def mlx_state(charter: Charter) -> State:
    """Return the state of a device that sums the directions in MLX."""
    import mlx.core as mx

    from ondevice.fleet.noise import STREAM
    from ondevice.fleet.state import State
    from ondevice.runtime_ops import mlx_ops

    class MlxState(State):
        def change(self, outcome: Outcome) -> np.ndarray:
            total = mx.zeros(self.size, dtype=mx.int64)
            for group in outcome.groups:
                numbers = np.array(group.coefficients.mantissas, np.int64) << (group.coefficients.exponent + 32)
                for step, some in enumerate(numbers.reshape(-1, self.queries), start=group.first_step):
                    signs = mlx_ops.rademacher(self.seed, step, STREAM, self.queries, 0, self.size)
                    total = total + (signs.astype(mx.int64) * mx.array(some)[:, None]).sum(axis=0)
            return np.array(total)

    plain = charter.state()
    return MlxState(plain.size, plain.seed, plain.noise, plain.queries, plain.momentum)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), [Path(place) for place in sys.argv[3:]])
