"""The public names stay what they are, in whatever order modules are imported."""

from __future__ import annotations

import json
import subprocess

from tests.warm import Warm

ORDERS = {
    "first": "import ondevice",
    "after the package": "import ondevice, ondevice.training.loop, ondevice.planning.fits",
    "after the function": "import ondevice\nondevice.train, ondevice.plan\nimport ondevice.training.loop",
    "from the package": "from ondevice.training import events\nfrom ondevice.planning import devices\nimport ondevice",
}
CHECK = """
for _ in range(2):
    for name in ondevice.__all__:
        assert callable(getattr(ondevice, name)), name
try:
    ondevice.train(ondevice.RunConfig.load(None, {"model.source": "tiny:llama"}))
except ondevice.OndeviceError as error:
    names = [error.message]
import ondevice.training.loop, ondevice.training.events as events
names += [ondevice.training.loop.Run.__name__, events.Step.kind]
plan = ondevice.plan("tiny:llama", ondevice.method_config("prge"), batch_size=1, length_tokens=16)
names += [plan.model]
"""
EACH = """
import json, sys
answers = {}
for order, code in json.loads(sys.argv[1]).items():
    for name in [name for name in sys.modules if name.partition(".")[0] == "ondevice"]:
        del sys.modules[name]  # the package is imported anew, what it needs is not
    place = {}
    exec(code, place)
    answers[order] = place["names"]
print(json.dumps(answers))
"""


def test_a_function_with_the_name_of_a_package_can_be_called(warm: Warm, tmp_path) -> None:
    programs = json.dumps({order: f"{imports}\n{CHECK}" for order, imports in ORDERS.items()})
    command = [str(warm.python), "-c", EACH, programs]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    expected = ["no data is given", "Run", "step", "tiny:llama"]
    assert json.loads(done.stdout) == dict.fromkeys(ORDERS, expected)
