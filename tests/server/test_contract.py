"""The daemon keeps the contract of its OpenAPI document, by schemathesis over every operation."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("schemathesis", reason="a development package")

from ondevice.server.openai import is_openai
from tests.server.running import DaemonProcess
from tests.warm import Warm

LIMITS_S = 25, 200
"""The second one is for a machine that is too busy to send `FEWEST` requests in the first."""
FEWEST = 100
CONFIG = Path(__file__).with_name("schemathesis.toml")


def test_a_method_that_a_path_does_not_take_names_those_that_it_does(served) -> None:
    document = served.client.ask("GET", "/v1/openapi.json")
    host = served.daemon.address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    for path, verbs in document["paths"].items():
        if not path.startswith("/v1/"):
            continue
        connection.request("OPTIONS", re.sub(r"{\w+}", "x", path))
        answer = connection.getresponse()
        answer.read()
        allowed = {verb.strip() for verb in answer.headers.get("Allow", "").split(",")}
        assert answer.status == 405, path
        assert allowed == {verb.upper() for verb in verbs if verb != "parameters"}, path


def test_the_paths_of_openai_declare_the_form_of_their_refusals(served) -> None:
    paths = served.client.ask("GET", "/v1/openapi.json")["paths"]
    declared = [
        (path, operation["responses"][status]["content"]["application/json"]["schema"])
        for path, operations in paths.items()
        if is_openai(path)
        for operation in operations.values()
        for status in ("4XX", "507")
    ]
    assert len(declared) > 20
    refusal = {"$ref": "#/components/schemas/RefusalResponse"}
    assert [path for path, schema in declared if schema != refusal] == []


def test_no_response_breaks_the_contract(tmp_path: Path, warm: Warm) -> None:
    """The boundary values of every schema, then random ones and chains of requests while time is left."""
    with DaemonProcess(tmp_path / "store", python=warm.python) as daemon:
        for limit in LIMITS_S:
            output, count = requests(daemon.address, limit, tmp_path)
            if count > FEWEST:
                break
        assert count > FEWEST, output[-2000:]
        told = daemon.stop()
    assert "Traceback" not in told


def requests(address: str, limit_s: int, folder: Path) -> tuple[str, int]:
    """Send requests for some seconds; return what schemathesis says of them and how many there were."""
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    limits = ["--max-time", str(limit_s), "--max-examples", "10", "--seed", "1", "--no-color"]
    done = subprocess.run(
        [*command, "--config-file", str(CONFIG), "run", f"{address}/v1/openapi.json", *limits],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=limit_s + 240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    found = re.search(r"(\d+) generated", done.stdout)
    return done.stdout, int(found[1]) if found else 0
