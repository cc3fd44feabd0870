"""A fleet of two devices for the JVM tests: PyTorch in float32, and a phone whose answers Python computes, too.

The phone's rounds lie as files, as `ondevice fleet carry` writes them; so do the answers that it must give.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 20
AWAY = (5, 6)
"""Rounds that the phone is not asked in: it gets their outcomes later."""
PHONE, OTHER = 3, 1


def write(out: Path, artifact: Path) -> None:
    """Write `round-N.odfleet` for the phone, `answer-N.odfleet` that it gives, `end-N.odfleet` and `fleet.json`."""
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

    phone, other = member(program, PHONE), member(computer, OTHER)
    for file in out.glob("*"):
        file.unlink()
    hashes = []
    with Store.create(out, charter) as store:
        for number in range(ROUNDS):
            desk = Desk(store)
            for device in (other,) if number in AWAY else (other, phone):
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
            desk.close()
            hashes.append(store.state().digest().hex())
        for place, file in enumerate(Desk(store).out(PHONE, last=True)):
            (out / f"end-{place}.odfleet").write_bytes(file)
        final = store.state()
    flat = [float(value) for value in final.flat()]
    if np.abs(flat).max() <= 1e-3:
        sys.exit("the fleet's adapter has not moved, so its hash would prove little")
    document = {"rounds": ROUNDS, "away": AWAY, "device": PHONE, "hashes": hashes, "adapter": flat,
                "charter": charter.to_bytes().decode()}  # fmt: skip
    (out / "fleet.json").write_text(json.dumps(document))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
