"""The public names stay what they are, in whatever order modules are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDERS = {
    "first": "import ondevice",
    "after the package": "import ondevice, ondevice.training.loop, ondevice.planning.fits",
    "after the function": "import ondevice\nondevice.train, ondevice.plan\nimport ondevice.training.loop",
    "from the package": "from ondevice.training import events\nfrom ondevice.planning import devices\nimport ondevice",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_function_with_the_name_of_a_package_can_be_called(order, tmp_path) -> None:
    program = f"""{ORDERS[order]}
for _ in range(2):
    for name in ondevice.__all__:
        assert callable(getattr(ondevice, name)), name
try:
    ondevice.train(ondevice.RunConfig.load(None, {{"model.source": "tiny:llama"}}))
except ondevice.OndeviceError as error:
    print(error.message)
import ondevice.training.loop, ondevice.training.events as events
print(ondevice.training.loop.run_loop.__name__, events.Step.kind)
plan = ondevice.plan("tiny:llama", ondevice.method_config("prge"), batch_size=1, length_tokens=16)
print(plan.model)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.splitlines() == ["no data is given", "run_loop step", "tiny:llama"], done.stderr
