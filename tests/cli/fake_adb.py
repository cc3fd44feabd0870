#!/usr/bin/env python3
"""`adb` and the phone behind it: the one piece of hardware that tests do without.

$PHONE is the phone's disk: `app` is the app's private folder, `sdcard` the shared one, `devices` what is connected,
and `release`, `uninstalled`, `full` or `corrupts` change what the phone does.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

phone = Path(os.environ["PHONE"])
arguments = sys.argv[1:]
if arguments == ["devices"]:
    print("List of devices attached\n" + (phone / "devices").read_text())
    sys.exit(0)
if arguments[0] == "-s":
    arguments = arguments[2:]
verb, rest = arguments[0], arguments[1:]
if verb == "push":
    target = Path(str(phone) + rest[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(rest[0], target)
    sys.exit(0)
words = shlex.split(" ".join(rest))
if words[:3] == ["pm", "list", "packages"]:
    print("" if (phone / "uninstalled").exists() else f"package:{words[3]}")
    sys.exit(0)
if words[0] != "run-as" or (phone / "release").exists():
    sys.exit("run-as: package not debuggable: org.ondevice.app")
if (phone / "full").exists() and verb == "exec-in":
    sys.stdin.buffer.read(1000)
    sys.exit("tar: write: No space left on device")
script = words[words.index("-c") + 1]
code = subprocess.run(["sh", "-c", script], cwd=phone / "app").returncode
if (phone / "corrupts").exists() and verb == "exec-in":
    for program in (phone / "app").rglob("program.pte"):
        program.write_bytes(program.read_bytes()[:-1] + b"?")
sys.exit(code)
