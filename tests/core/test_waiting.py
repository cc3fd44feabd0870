"""How threads wait for each other, in a process that has loaded nothing yet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "import os; print(os.environ.get('OMP_WAIT_POLICY'))"


def policy(code: str, **named: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", f"{code}; {SHOW}"]
    done = subprocess.run(
        command, env={**environment, **named}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_threads_wait_asleep_in_the_command_the_daemon_and_the_api() -> None:
    for module in ("ondevice", "ondevice.cli.app", "ondevice.server.supervisor"):
        assert policy(f"import {module}") == "PASSIVE"


@pytest.mark.parametrize("named", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "9"}])
def test_a_users_own_choice_stays(named) -> None:
    assert policy("import ondevice", **named) == named.get("OMP_WAIT_POLICY", "None")
    told = "import ondevice; from ondevice.core.process import described; print(described())"
    assert "=".join(*named.items()) in policy(told, **named)


def test_a_library_that_was_loaded_first_is_said() -> None:
    code = "import sys; sys.modules['torch'] = sys; import ondevice"
    told = f"{code}; from ondevice.core.process import described; print(described())"
    assert policy(code) == "None"
    assert "torch was loaded first" in policy(told)
