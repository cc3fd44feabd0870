"""A fleet over Flower whose server, devices and link are killed again and again: does it end by
itself, and with the adapter of a fleet that was left alone?

Everything runs through the command (`ondevice fleet server`, `ondevice fleet device`), with TLS and a
key for each device. Devices reach the server through a small proxy, which is the link. A kill takes
the server, a device, its process for the network, or the link (refused, or silent), with SIGKILL or
SIGTERM. What was killed is started again, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT, finish, parse_args
from ondevice.fleet.ledger import FILE_NAME as LEDGER
from ondevice.fleet.store import FILE_NAME, Store

NEEDS = ()
KINDS = ("server", "device", "link", "network")
"""What is killed: `network` is a device's process for the network, which the device starts again."""
END_S = 600.0
ROUND_S = 240.0
"""Longest wait for the next round after a kill."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)


class Proxy:
    """The link: passes connections on to the server's port until it is cut."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.pairs: list[socket.socket] = []
        self.is_silent = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.to), 5)
            except OSError:
                near.close()
                continue
            self.pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_silent.is_set():
                    time.sleep(0.05)
                sink.sendall(data)
        for end in (source, sink):
            end.close()

    def cut(self, silent: bool, for_s: float) -> None:
        """Pass nothing on for a while, and refuse connections unless `silent`; then break those
        that there were."""
        if silent:
            self.is_silent.set()
            time.sleep(for_s)
        else:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
        for end in self.pairs:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.pairs.clear()
        self.is_silent.clear()
        if not silent:
            time.sleep(for_s)
            self.listener = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()


class Fleet:
    """The processes of one run; `processes` has the server's and each device's by name."""

    def __init__(self, folder: Path, devices: int, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.names = ["server", *(f"device-{number}" for number in range(1, devices + 1))]
        self.exits: list[tuple[str, int]] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        self.proxy = Proxy(self.port)
        data = (ROOT / "examples/data/reviews_train.jsonl").read_text().splitlines()
        for number in range(1, devices + 1):
            rows = "\n".join(data[number - 1 : 20 * devices : devices])
            (folder / f"rows-{number}.jsonl").write_text(rows + "\n")
        begin = ["begin", "--model", "tiny:llama", "--task", "sst2", "--max-length", "64"]
        self.call([*begin, "--queries", "4", "--out", str(folder / "server")])
        keys = [str(folder / "keys"), "--host", "localhost", "--devices", str(devices)]
        self.call(["certificates", *keys])

    def call(self, arguments: list[str]) -> None:
        subprocess.run(
            [sys.executable, "-m", "ondevice", "fleet", *arguments],
            check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=self.environment,
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(self, name: str) -> None:
        """Start the server or a device."""
        keys = self.folder / "keys"
        link = ["--host", "localhost", "--certificates", str(keys)]
        if name == "server":
            count = str(len(self.names) - 1)
            arguments = ["server", str(self.folder / "server"), "--rounds", str(self.rounds)]
            arguments += ["--devices", count, "--wait", "300", "--port", str(self.port), "--end"]
        else:
            number = name.removeprefix("device-")
            arguments = ["device", "--data", str(self.folder / f"rows-{number}.jsonl")]
            arguments += ["--out", str(self.folder / name), "--batch-size", "2"]
            arguments += [
                "--port",
                str(self.proxy.port),
                "--key",
                str(keys / f"devices/{number}.key"),
            ]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "ondevice", "fleet", *arguments, *link, "--json"],
                cwd=ROOT, stdout=log, stderr=log, env=self.environment, start_new_session=True,
            )  # fmt: skip

    def kill(self, kind: str, draw: random.Random) -> str:
        """Kill something of this kind; return what it was."""
        number = draw.choice((signal.SIGKILL, signal.SIGTERM))
        if kind == "link":
            is_silent = draw.random() < 0.5
            self.proxy.cut(is_silent, draw.uniform(1, 6))
            return f"link ({'silent' if is_silent else 'refused'})"
        name = "server" if kind == "server" else draw.choice(self.names[1:])
        process = self.processes[name]
        if kind == "network":
            children = psutil.Process(process.pid).children()
            for child in children:
                child.send_signal(number)
            return f"{name}'s process for the network ({number.name}, {len(children)})"
        process.send_signal(number)
        self.exits.append((name, process.wait(60)))
        time.sleep(draw.uniform(0, 3))
        self.start(name)
        return f"{name} ({number.name})"

    def done(self) -> int:
        """Return how many rounds the server has done."""
        with closing(sqlite3.connect(self.folder / "server" / FILE_NAME, timeout=30)) as file:
            return file.execute("SELECT COUNT(*) FROM events").fetchone()[0]

    def wait_for(self, rounds: int) -> None:
        """Wait until so many rounds are done.

        Raises:
            SystemExit: a process has ended, or nothing moves.
        """
        until = time.monotonic() + ROUND_S
        while self.done() < min(rounds, self.rounds):
            ended = [name for name in self.names if self.processes[name].poll() is not None]
            if ended or time.monotonic() > until:
                raise SystemExit(f"round {rounds} does not come; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self.folder.glob("*.log"))
        )

    def end(self) -> list[int]:
        """Wait until each process has ended by itself; return their exit statuses."""
        return [self.processes[name].wait(END_S) for name in self.names]

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(
    folder: Path, rounds: int, kinds: list[str], devices: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Run a fleet and kill one of each of `kinds` after the other, each after a round; return what
    came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    fleet = Fleet(folder, devices, rounds)
    began = time.perf_counter()
    killed = []
    try:
        for name in fleet.names:
            fleet.start(name)
        fleet.wait_for(1)
        for kind in kinds:
            time.sleep(draw.uniform(0, 1.0))
            if fleet.done() >= rounds:
                break
            killed.append(fleet.kill(kind, draw))
            print(
                f"{time.perf_counter() - began:6.1f} s  {killed[-1]}", file=sys.stderr, flush=True
            )
            fleet.wait_for(fleet.done() + 1)
        statuses = fleet.end()
    except BaseException:
        print(fleet.logs(), file=sys.stderr)
        raise
    finally:
        fleet.stop()
    return {
        "kills": len(killed),
        "killed": "; ".join(killed),
        "seconds": time.perf_counter() - began,
        "most_status": max(map(abs, statuses)),
        "killed_with_status_0": sum(status == 0 for _, status in fleet.exits),
        **_result(folder, fleet.names),
    }


def _result(folder: Path, names: list[str]) -> dict[str, Any]:
    hashes = {}
    most = 0
    for name in names:
        with Store.open(folder / name) as store:
            hashes[name] = store.state().digest().hex()
            if name == "server":
                table = store.table()
        if name != "server":
            with closing(sqlite3.connect(folder / name / LEDGER)) as file:
                count = "SELECT COUNT(*) FROM answered GROUP BY fleet, round"
                most = max(most, *(number for (number,) in file.execute(count)))
    result = [json.loads(line) for line in (folder / "server.log").read_text().splitlines()
              if line.startswith("{")][-1]  # fmt: skip
    return {
        "rounds": len(table),
        "failed_rounds": len(result["failed_rounds"]),
        "least_replies": min(row["answers"] for row in table),
        "most_answers_to_a_round": most,
        "hashes": len(set(hashes.values())),
        "hash": hashes["server"],
    }


def main() -> None:
    args = parse_args(__doc__, arguments)
    draw = random.Random(args.seed)
    kinds = [KINDS[place % len(KINDS)] for place in range(args.kills)]
    draw.shuffle(kinds)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            run(Path(folder) / "alone", args.rounds, [], args.devices),
            run(Path(folder) / "killed", args.rounds, kinds, args.devices, args.seed),
        ]
    for row in rows:
        row["same"] = "yes" if row["hash"] == rows[0]["hash"] and row["hashes"] == 1 else "no"
        row["exits"] = "yes" if row["most_status"] == 0 else "no"
    finish(
        "fleet/reconnect",
        rows,
        args,
        show_versions=["python", "torch"],
        title="A fleet over Flower whose server, devices and link are killed",
        columns=[
            {"key": "kills", "title": "Kills"},
            {"key": "rounds", "title": "Rounds"},
            {"key": "failed_rounds", "title": "Rounds without a reply"},
            {"key": "least_replies", "title": "Fewest replies of a round"},
            {"key": "most_answers_to_a_round", "title": "Most replies of a device to a round"},
            {"key": "killed_with_status_0", "title": "Killed processes with status 0"},
            {"key": "exits", "title": "All others end with status 0"},
            {"key": "hashes", "title": "Different hashes at the end"},
            {"key": "same", "title": "The undisturbed fleet's hash"},
            {"key": "seconds", "title": "Seconds", "digits": 0},
        ],
        notes=[
            f"{args.devices} devices of tiny:llama, TLS and keys. Killed in turn: "
            + rows[1]["killed"]
        ],
    )


if __name__ == "__main__":
    main()
