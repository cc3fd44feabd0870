"""A simulated fleet in Flower's own engine (Ray): the ServerApp of `apps`, and devices in Ray's actors.

`simulate` needs neither and is what a test can follow; this is the same server and the same devices under Flower's
scheduling, on as many processes as Ray starts. Each device keeps its copy of the fleet in a folder, because its next
message may meet another actor.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError, FleetError, MissingPackageError
from ondevice.fleet.device import Device, DeviceSettings
from ondevice.fleet.member import Member
from ondevice.fleet.status import status
from ondevice.fleet.store import FILE_NAME, Store

if TYPE_CHECKING:
    from flwr.app import Context, Message

    from ondevice.fleet.config import FleetRun

log = logging.getLogger("ondevice.fleet")
IGNORED = ("late", "hostile", "weak", "eval_every")
"""Settings of `simulation` that the engine has nothing for."""


def simulate_with_flower(
    config: FleetRun, *, resume: bool = False, overwrite: bool = False, processors: float = 1.0
) -> dict[str, Any]:
    """Run a fleet of numbers in Flower's engine; its folder is `config.train.out`.

    Args:
        processors: of an actor, as Ray counts them.

    Returns:
        what `ondevice fleet status` says, and `final_hash`.

    Raises:
        MissingPackageError: Flower or Ray is not installed.
        ConfigError: a setting that only `simulate` has.
        FleetError: the folder holds a fleet and neither flag is set, or Flower ended with an error.
    """
    from ondevice.fleet.simulate import make_room
    from ondevice.training.checkpoint import RunLock

    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
        raise MissingPackageError("Flower's engine is not installed", hint="pip install 'flwr[simulation]==1.41.0'")
    if " " in sys.executable:  # Ray starts its workers by a line of shell that it does not quote, and waits for ever
        raise ConfigError(
            "Ray cannot start a Python whose path has a space",
            received=sys.executable,
            hint="--engine own, or an environment in another folder",
        )
    if config.averages:
        raise ConfigError("Flower's engine runs fleets of numbers", expected="--engine own", received="--engine flower")
    odd = [name for name in IGNORED if getattr(config.simulation, name)]
    if config.fleet.secure:
        raise ConfigError("a device of Flower's engine keeps no secret between messages", expected="--engine own")
    if odd:
        raise ConfigError(f"simulation.{odd[0]} needs the own engine", expected="--engine own", received=", ".join(odd))
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from ondevice.fleet.apps import Server

    out, given = config.train.out.absolute(), config.model_dump_json()
    with RunLock(out):
        make_room(out, FILE_NAME, resume, overwrite)
        if not (out / FILE_NAME).exists():  # devices of a fleet that was replaced
            for file in out.glob(f"device-*/{FILE_NAME}"):
                shutil.rmtree(file.parent)
        world = _world(given)
        Store.create(out, world.charter).close()
        server_app, errors = ServerApp(), []

        @server_app.main()
        def serve(grid: Any, context: Context) -> None:
            fleet = config.fleet
            settings = {"rounds": fleet.rounds, "least_devices": config.simulation.devices, "sample": fleet.sample,
                        "wait_s": fleet.wait_s}  # fmt: skip
            try:
                with Store.open(out) as store:
                    Server(grid, store, settings).run()
            except Exception as error:
                errors.append(error)
                raise

        resources = {"client_resources": {"num_cpus": processors, "num_gpus": 0.0}}
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
        raise errors[0] if isinstance(errors[0], FleetError) else FleetError("Flower's engine failed", received=errors)
    found = status(out)
    shown = {key: value for key, value in found.items() if key not in ("charter", "rounds_table")}
    return {**shown, "final_hash": found["hash"]}


def _client_app(given: str, out: str) -> Any:
    """The app that Ray's actors run; what it closes over is text, so that it can be sent."""
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from flwr.app import ConfigRecord, Message, RecordDict

        from ondevice.fleet.engine import reply

        record = reply(given, out, int(context.node_config["partition-id"]), dict(message.content["fleet"]), context)
        return Message(content=RecordDict({"fleet": ConfigRecord(record)}), reply_to=message)

    return app


@functools.lru_cache(maxsize=1)
def _world(given: str) -> Any:
    """The simulated devices of a run file, opened once in a process: one session computes for all."""
    from ondevice.fleet.config import FleetRun
    from ondevice.fleet.open import open_run
    from ondevice.fleet.simulate import Simulation

    return Simulation(*open_run(FleetRun.model_validate(json.loads(given))))


def reply(given: str, out: str, number: int, content: dict[str, Any], context: Context) -> dict[str, Any]:
    """Answer a message as device `number`; a share of the devices, drawn anew for each round, does not."""
    import numpy as np

    from ondevice.fleet.messages import Task

    world = _world(given)
    own: Member = world.members[number]
    if "task" in content:
        draw = np.random.default_rng([world.config.train.seed, 7, Task.from_bytes(content["task"]).round, number])
        if draw.random() < world.config.simulation.dropout:
            return {"error": "this device dropped out of the round"}
    device = Device(DeviceSettings(folder=str(Path(out) / f"device-{number}"), data=""))
    device._member = own
    return device.reply(content, context.node_id)
