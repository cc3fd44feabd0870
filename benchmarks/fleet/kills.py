"""A fleet whose server and devices are killed again and again (kill -9): does it end where an
undisturbed one does?

A server (`carry.Desk`) and three devices (`device.Device`, over a session that needs no model: half
the squared distance to a target) are processes of their own. They pass rounds as files, and keep
what they know in SQLite. The first run is left alone; in the second one process after the other is
killed at a random moment and started again. Both must end with the same hash, on the server and on
every device.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish, parse_args
from ondevice.artifact.files import atomic_write
from ondevice.core.errors import OndeviceError
from ondevice.core.session import Session, StepResult
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.carry import Desk, Parcel, files_of, parcel_of
from ondevice.fleet.charter import Charter
from ondevice.fleet.device import Device, DeviceSettings
from ondevice.fleet.member import Member
from ondevice.fleet.store import Store
from ondevice.runtime_ops import generator

NEEDS = ()
SIZE, QUERIES, DEVICES, SEED = 4096, 2, 3, 5
END = "end"
WAIT_S = 0.005


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=60)


class Distance(Session):
    """Zeroth-order numbers of half the squared distance to a device's own target."""

    backend = "numpy"

    def __init__(self, device: int) -> None:
        self.target = np.random.default_rng(device).normal(0, 1, SIZE).astype(np.float32)
        self.vector = np.zeros(SIZE, dtype=np.float32)

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        noise = generator.rademacher(SEED, step, 0, QUERIES, 0, SIZE)
        offset = self.vector.astype(np.float64) - self.target
        numbers = tuple(
            float(offset @ direction) for direction in noise
        )  # what central differences of a quadratic are
        self.vector = self.vector - (learning_rate / QUERIES * np.array(numbers) @ noise).astype(
            np.float32
        )
        loss = float(0.5 * (offset**2).sum())
        return StepResult(loss, (loss,), numbers)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        return {"adapter": self.vector.copy(), "seed": np.array([SEED])}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self.vector = state["adapter"].copy()


def charter() -> Charter:
    return Charter(
        model_source="none", model_sha256="0" * 64, method={}, data={}, seed=SEED, size=SIZE, noise="rademacher",
        queries=QUERIES, learning_rate=1e-4, fleet=Agreement(local_steps=2, momentum=0.5),
    )  # fmt: skip


def serve(folder: Path, rounds: int) -> None:
    """Be the server until `rounds` are done: tasks out, answers in, close; then what each device
    lacks."""
    with Store.create(folder / "server", charter()) as store:
        desk = Desk(store)
        while store.count() < rounds:
            for device in range(DEVICES):
                answered = any(device in current.answers for current in desk.rounds.open.values())
                if not answered:
                    _put(folder, f"to-{device}", desk.out(device))
            waiting = set(range(DEVICES)) - {
                d for current in desk.rounds.open.values() for d in current.answers
            }
            while waiting:
                for device in sorted(waiting):
                    file = folder / f"from-{device}"
                    try:
                        desk.take(file.read_bytes())
                        waiting.discard(device)
                    except (OSError, OndeviceError):
                        continue  # nothing yet, or the answer to an older round
                time.sleep(WAIT_S)
            desk.close()
        for device in range(DEVICES):
            _put(folder, f"to-{device}", desk.out(device, last=True))
        atomic_write(folder / END, store.state().digest().hex())


def _put(folder: Path, name: str, files: list[bytes]) -> None:
    """One exchange is several files if a device was long away; they are numbered."""
    for place, data in enumerate(files):
        atomic_write(folder / f"{name}.{place}", data)
    atomic_write(folder / name, str(len(files)))


def take_part(folder: Path, number: int) -> None:
    """Be a device until the fleet ends."""
    end = Device(DeviceSettings(str(folder / f"device-{number}"), ""))
    batches: Any = SimpleNamespace(
        rows=1, at=lambda step: SimpleNamespace(ids=np.zeros((1, 2)), labels=None)
    )
    opened: list[Member] = []

    def member(fleet: Charter, device: int) -> Member:
        opened[:] = opened or [Member(fleet, Distance(device), batches, device)]
        return opened[0]

    end._open = member  # type: ignore[method-assign, assignment]  # no model, no rows
    while True:
        over = (folder / END).exists()
        try:
            count = int((folder / f"to-{number}").read_text())
            for place in range(count):
                parcel = parcel_of((folder / f"to-{number}.{place}").read_bytes())
                if parcel.charter is not None:
                    end.take({"charter": parcel.charter}, number)
                end.take({"events": parcel.events}, number)
                if parcel.task is not None:
                    answer = end.take({"task": parcel.task}, number)["answer"]
                    (data,) = files_of(Parcel(device=number, answer=answer))
                    atomic_write(folder / f"from-{number}", data)
        except (OSError, ValueError, OndeviceError):
            over = False  # nothing yet, or half of an exchange
        if over:
            return
        time.sleep(WAIT_S)


class Fleet:
    """The processes of one run."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.running = {role: self.start(role) for role in range(-1, DEVICES)}

    def start(self, role: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.fleet.kills", "--role", str(role), "--folder", str(self.folder),
                   "--rounds", str(self.rounds)]  # fmt: skip
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def kill(self, role: int) -> bool:
        """Kill a process and start it again; False if it had ended."""
        process = self.running[role]
        if process.poll() is not None:
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self.running[role] = self.start(role)
        return True

    def end(self, timeout_s: float) -> dict[str, str]:
        """Wait for the last round; returns the hash of the server and of every device."""
        for process in self.running.values():
            if process.wait(timeout_s):
                raise SystemExit(f"a process of the fleet ended with {process.returncode}")
        found = {"server": (self.folder / END).read_text()}
        for device in range(DEVICES):
            with Store.open(self.folder / f"device-{device}") as store:
                found[f"device {device}"] = store.state().digest().hex()
        return found


def run(
    folder: Path, rounds: int, kills: int, seed: int = 0, timeout_s: float = 300.0
) -> dict[str, Any]:
    """Run a fleet and kill its processes `kills` times, at moments that are spread over the
    rounds."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, fleet, done, server = random.Random(seed), Fleet(folder, rounds), 0, 0
    began = time.perf_counter()
    try:
        while done < kills and not (folder / END).exists():
            time.sleep(draw.uniform(0.02, 0.4))
            role = draw.randrange(-1, DEVICES) if done % 2 else -1
            if fleet.kill(role):
                done, server = done + 1, server + (role < 0)
        hashes = fleet.end(timeout_s)
    finally:
        for process in fleet.running.values():
            process.kill()
    return {"kills": done, "server_kills": server, "rounds": rounds, "seconds": time.perf_counter() - began,
            "hashes": len(set(hashes.values())), "hash": hashes["server"]}  # fmt: skip


def main() -> None:
    if "--role" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--role", type=int)
        parser.add_argument("--folder", type=Path)
        parser.add_argument("--rounds", type=int)
        args = parser.parse_args()
        serve(args.folder, args.rounds) if args.role < 0 else take_part(args.folder, args.role)
        return
    args = parse_args(__doc__, arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(Path(folder) / str(kills), args.rounds, kills) for kills in (0, args.kills)]
    for row in rows:
        row["same"] = "yes" if row["hash"] == rows[0]["hash"] and row["hashes"] == 1 else "no"
    finish(
        "fleet/kills",
        rows,
        args,
        show_versions=["numpy"],
        title="A fleet of a server and three devices under kill -9",
        columns=[
            {"key": "kills", "title": "Kills"},
            {"key": "server_kills", "title": "Of the server"},
            {"key": "rounds", "title": "Rounds"},
            {"key": "seconds", "title": "Seconds", "digits": 1},
            {"key": "hashes", "title": "Different hashes at the end"},
            {"key": "same", "title": "The undisturbed run's hash"},
        ],
        notes=[
            "Rounds pass as files between processes; a session without a model, 4,096 elements, momentum 0.5."
        ],
    )


if __name__ == "__main__":
    main()
