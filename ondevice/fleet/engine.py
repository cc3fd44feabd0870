"""A simulated fleet in Flower's own engine (Ray): the ServerApp of `apps`, and devices in Ray's
actors.

`simulate` needs neither and is what a test can follow; this is the same server and the same devices
under Flower's scheduling, on as many processes as Ray starts. Each device keeps its copy of the
fleet in a folder, because its next message may meet another actor."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError, FleetError, MissingPackageError
from ondevice.fleet.config import FleetRun
from ondevice.fleet.dates import with_date
from ondevice.fleet.device import Device, DeviceSettings
from ondevice.fleet.member import Member
from ondevice.fleet.messages import Task, TaskReply
from ondevice.fleet.open import open_run
from ondevice.fleet.post import Post, Sent
from ondevice.fleet.simulate import Simulation, lie
from ondevice.fleet.simulated import Simulated, make_room
from ondevice.fleet.store import FILE_NAME, Store
from ondevice.training.checkpoint import RunLock

if TYPE_CHECKING:
    from flwr.app import Context, Message

log = logging.getLogger("ondevice.fleet")


class SlowPost(Post):
    """A post in whose fleet some replies are late: the wait for them is over, and they come with
    the next message.

    Nobody waits in truth, so that a simulated round with slow devices is as short as one without.
    """

    def __init__(self, grid: Any, wait_s: float) -> None:
        super().__init__(grid, wait_s)
        self.held: dict[int, tuple[Sent, Message]] = {}
        self.released: list[tuple[Sent, Message | None]] = []

    def send(self, messages: Iterable[Message]) -> None:
        given = list(messages)
        for message in given:
            if message.metadata.dst_node_id in self.held:
                self.released.append(self.held.pop(message.metadata.dst_node_id))
        super().send(given)

    def take(self, numbers: Iterable[str] | None = None) -> list[tuple[Sent, Message | None]]:
        came: list[tuple[Sent, Message | None]] = []
        if numbers is None:
            came = self.released
            self.released = []
        for sent, reply in super().take(numbers):
            fate: Any = {} if reply is None or reply.has_error() else reply.content["fleet"]
            if reply is not None and "late" in fate:
                del fate["late"]  # a real device does not say so
                self.held[sent.node] = (replace(sent, overdue=True), reply)
                came.append((sent, None))
            else:
                came.append((sent, None if "away" in fate else reply))
        return came


def simulate_with_flower(
    config: FleetRun, *, resume: bool = False, overwrite: bool = False
) -> Simulated:
    """Run a fleet of numbers in Flower's engine; its folder is `config.train.out`.

    Returns:
        what `simulate` gives; `hashes_equal` is of what the devices themselves said.

    Raises:
        MissingPackageError: Flower or Ray is not installed.
        ConfigError: a setting that only `simulate` has.
        FleetError: the folder holds a fleet and neither flag is set, or Flower ended with an error.
    """
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
        raise MissingPackageError(
            "Flower's engine is not installed", hint="pip install 'flwr[simulation]==1.41.0'"
        )
    if (
        " " in sys.executable
    ):  # Ray starts its workers by a line of shell that it does not quote, and waits for ever
        raise ConfigError(
            "Ray cannot start a Python whose path has a space",
            received=sys.executable,
            hint="--engine own, or an environment in another folder",
        )
    if config.averages:
        raise ConfigError(
            "Flower's engine runs fleets of numbers",
            expected="--engine own",
            received="--engine flower",
        )
    if config.fleet.secure:
        raise ConfigError(
            "a device of Flower's engine keeps no secret between messages", expected="--engine own"
        )
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from ondevice.fleet.apps import Server

    out = config.train.out.absolute()
    given = with_date(config, resume).model_dump_json()
    with RunLock(out):
        make_room(out, FILE_NAME, resume, overwrite)
        if not (out / FILE_NAME).exists():  # devices of a fleet that was replaced
            for file in out.glob(f"device-*/{FILE_NAME}"):
                shutil.rmtree(file.parent)
        world = _world(given)
        Store.create(out, world.charter).close()
        server_app = ServerApp()
        errors = []

        @server_app.main()
        def serve(grid: Any, context: Context) -> None:
            fleet = config.fleet
            settings = {"rounds": fleet.rounds, "least_devices": config.simulation.devices, "sample": fleet.sample,
                        "wait_s": fleet.wait_s}  # fmt: skip
            try:
                with Store.open(out) as store:
                    Server(grid, store, settings, SlowPost(grid, fleet.wait_s)).run()
            except Exception as error:
                errors.append(error)
                raise

        resources = {"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}}
        with contextlib.redirect_stdout(sys.stderr):  # a command's own output is its result
            try:
                run_simulation(
                    server_app=server_app,
                    client_app=_client_app(given, str(out)),
                    num_supernodes=config.simulation.devices,
                    backend_config=resources,  # type: ignore[arg-type]
                )
            except RuntimeError as error:
                if not errors:
                    first: BaseException = error
                    while first.__cause__ is not None:
                        first = first.__cause__
                    raise FleetError(
                        "Flower's engine could not run",
                        received=str(first)[:500],
                        hint="--engine own needs no Ray; on a busy machine set RAY_raylet_start_wait_time_s=120",
                    ) from None
    if errors:
        raise (
            errors[0]
            if isinstance(errors[0], FleetError)
            else FleetError("Flower's engine failed", received=errors)
        )
    with Store.open(out) as store:
        said = json.loads(store.fact("devices") or "{}")
        refused = json.loads(store.fact("refused") or "{}")
    done = world.run(True, False, lambda done: None)  # no round is missing: only evaluate
    return replace(
        done, hashes_equal=bool(said) and all(said.values()), devices=len(said), refused=refused
    )


def _client_app(given: str, out: str) -> Any:
    """The app that Ray's actors run; it closes over text only, so that it can be sent."""
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from flwr.app import ConfigRecord, Message, RecordDict

        from ondevice.fleet.engine import reply

        record = reply(
            given,
            out,
            int(context.node_config["partition-id"]),
            dict(message.content["fleet"]),
            context,
        )
        return Message(content=RecordDict({"fleet": ConfigRecord(record)}), reply_to=message)

    return app


@functools.lru_cache(maxsize=1)
def _world(given: str) -> Any:
    """The simulated devices of a run file, opened once in a process: one session computes for
    all."""
    return Simulation(*open_run(FleetRun.model_validate(json.loads(given))))


def reply(
    given: str, out: str, number: int, content: dict[str, Any], context: Context
) -> dict[str, Any]:
    """Reply to a message as device `number`: if the run file says so, not at all, late, or with a
    lie."""
    world = _world(given)
    own: Member = world.members[number]
    folder = str(Path(out) / f"device-{number}")
    device = Device(
        DeviceSettings(
            folder=folder, data="", gives_subspace=number == world.giver, epsilon=math.inf
        )
    )
    device._member = own
    if "task" not in content:
        return device.reply(content, context.node_id)
    fate = world.fate(Task.from_bytes(content["task"]).round, number)
    if fate.away:
        return {"away": True}
    record = device.reply(content, context.node_id)
    if "answer" in record and number in world.hostile:
        attack = world.config.simulation.attack
        record["answer"] = lie(TaskReply.from_bytes(record["answer"]), attack, fate.draw).to_bytes()
    return record | ({"late": True} if fate.late else {})
