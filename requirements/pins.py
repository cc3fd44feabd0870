"""Write requirements/dev.txt, fleet.txt and clients.txt: every package, its version and its hashes.

    python requirements/pins.py             the versions that this environment has (`make pins`)
    python requirements/pins.py --newest    the newest versions that pyproject.toml allows

uv resolves for Linux, macOS and Python 3.11 to 3.13 at once, so the hashes of all wheels are there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("dev", "qnn", "cuda")
# What `.ci/setup` installs without its dependencies: the installer, the builders, chat templates.
ALONE = ("uv", "wheel", "trl")
# The oldest Python for which every pinned package has a version.
OLDEST_PYTHON = "3.11.5"
HEADER = "# Every package of the {} environment with its hashes; `make pins` writes this file.\n"


def present() -> dict[str, str]:
    """Return the pinned version of each package by name, or the installed one if it differs."""
    text = (ROOT / "requirements/dev.txt").read_text()
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"].lower())
        if name not in ("ondevice-train", "pip"):
            versions[name] = distribution.version.partition("+")[0]
    return versions


def compiled(inputs: list[str], preferred: str, *arguments: str) -> str:
    """Return uv's resolution of the inputs with hashes; it keeps the preferred versions."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "pins.txt")
        out.write_text(preferred)
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *inputs]
        command += ["--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes"]
        command += [
            "--no-annotate",
            "--no-header",
            "--no-emit-index-url",
            "--output-file",
            str(out),
        ]
        subprocess.run([*command, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return out.read_text()


def development(preferred: str) -> str:
    """Return the pins of the development environment."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "alone.in")
        names.write_text("\n".join(ALONE) + "\n")
        pins = compiled(["pyproject.toml"], preferred, *extras)
        return pins + compiled([str(names)], preferred, "--no-deps")


def fleet(preferred: str) -> str:
    """Return the pins of what `.ci/on-top fleet` installs: Flower pins some packages lower."""
    extras = ("fleet", "fleet-privacy", "fleet-qr")
    words = [word for extra in extras for word in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder, "engine.in")
        engine.write_text("flwr[simulation]\n")
        return compiled(["pyproject.toml", str(engine)], preferred, *words)


def clients(preferred: str, dev: str) -> str:
    """Return the pins of what `.ci/on-top clients` installs: those that `dev` does not have alike."""
    pins = compiled(["pyproject.toml"], preferred, "--extra", "clients", "--extra", "dev")
    same = {entry.split()[0] for entry in entries(dev)}
    return "".join(entry for entry in entries(pins) if entry.split()[0] not in same)


def entries(pins: str) -> list[str]:
    """Return the packages of pins, each with its hashes."""
    return re.findall(r"^\S.*\n(?:[ ].*\n)*", pins, re.MULTILINE)


def main() -> None:
    """Write the files."""
    preferred = ""
    if "--newest" not in sys.argv[1:]:
        preferred = "".join(f"{name}=={version}\n" for name, version in present().items())
    dev = development(preferred)
    own = clients(preferred, dev)
    for name, pins in (("dev", dev), ("fleet", fleet(preferred)), ("clients", own)):
        (ROOT / f"requirements/{name}.txt").write_text(HEADER.format(name) + pins)


if __name__ == "__main__":
    main()
