"""Debian's arm64 userland in a folder, with the ARM wheels of the runtime, run by an emulator.

    python -m benchmarks.mesp.arm_userland build/arm      make it: about 5 GB, a minute or two

The emulator is QEMU's user mode (`apt install qemu-user-static`): ARM instructions, this machine's
kernel. Packages come from Debian 12's archive through `apt-get`, as this machine has set it up, and
from Python's index through `pip`. torch's wheel for ARM is the build for CUDA, and its libraries
link to CUDA's, so those wheels are fetched too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import ROOT
from ondevice.artifact.files import atomic_directory
from ondevice.core.errors import MissingPackageError

EMULATOR = "qemu-aarch64-static"
DEBIAN = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6")
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
WITH_DEPENDENCIES = ("torch",)
ALONE = ("executorch", "torchao", "numpy", "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
         "safetensors", "PyYAML", "ruamel.yaml", "flatbuffers", "tabulate", "tqdm", "packaging")  # fmt: skip
"""What opening an artifact imports; the rest of what ExecuTorch asks for is its exporter's. All in
the versions that are installed here."""
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)))
PROCESSORS = {
    "cortex-a53": ("0xd03", "0x00000000410fd034", "fp asimd aes pmull sha1 sha2 crc32"),
    "neoverse-n1": (
        "0xd0c",
        "0x00000000414fd0c1",
        "fp asimd aes pmull sha1 sha2 crc32 atomics asimdrdm asimddp",
    ),
    "max,sme=off": (
        "0xd49",
        "0x00000000410fd490",
        "fp asimd aes pmull sha1 sha2 crc32 atomics asimddp sve i8mm",
    ),
}
"""What is emulated, with the part number, identification and features that its kernel would show.
XNNPACK asks the emulated processor itself for its features: plain NEON, dot products of four 8-bit
integers, and products of small integer matrices (i8mm)."""
MARKER = "usr/bin/python3.11"


class Userland:
    """A userland that `make` has made.

    Raises:
        MissingPackageError: there is none in `root`, or no emulator.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).resolve()
        if not (self.root / MARKER).is_file():
            raise MissingPackageError(
                f"no ARM userland in {root}", hint=f"python -m benchmarks.mesp.arm_userland {root}"
            )
        if shutil.which(EMULATOR) is None:
            raise MissingPackageError(f"{EMULATOR} is missing", hint="apt install qemu-user-static")

    def python(self, *arguments: str | Path, processor: str, log: Path | None = None) -> str:
        """Run Python on an emulated processor and return its standard output.

        Args:
            processor: one of PROCESSORS.
            log: if the emulator writes every block of instructions when it first meets it.

        Raises:
            RuntimeError: it failed; the message ends with its standard error.
        """
        self._describe(processor)
        traced = [] if log is None else ["-d", "in_asm", "-D", str(log)]
        path = os.pathsep.join((str(self.root / "site"), str(ROOT)))
        command = [EMULATOR, "-cpu", processor, "-L", str(self.root), "-E", f"PYTHONPATH={path}", *traced,
                   str(self.root / MARKER), *map(str, arguments)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"Python on {processor} ended with {done.returncode}: {done.stderr[-3000:]}"
            )
        return done.stdout

    def _describe(self, processor: str) -> None:
        """Write what an ARM kernel says of its processor; here it would be this machine's, and
        torch ends at that."""
        part, identification, features = PROCESSORS[processor]
        cpu = self.root / "sys/devices/system/cpu"
        (cpu / "cpu0/regs/identification").mkdir(parents=True, exist_ok=True)
        (self.root / "proc").mkdir(exist_ok=True)
        lines = {"processor": "0", "Features": features, "CPU implementer": "0x41", "CPU architecture": "8",
                 "CPU variant": "0x0", "CPU part": part, "CPU revision": "0"}  # fmt: skip
        text = "".join(f"{name}\t: {value}\n" for name, value in lines.items())
        (self.root / "proc/cpuinfo").write_text(f"{text}\n")
        (cpu / "cpu0/regs/identification/midr_el1").write_text(f"{identification}\n")
        for name in ("possible", "present", "online"):
            (cpu / name).write_text("0\n")


def make(root: Path) -> Userland:
    """Fetch and unpack a userland into `root`, whole or not at all; one that is there is taken as
    it is."""
    if not (root / MARKER).is_file():
        root.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(root) as partial:
            _unpack_debian(partial)
            _install_wheels(partial / "site")
    return Userland(root)


def _unpack_debian(root: Path) -> None:
    """Python and its libraries, by an `apt-get` of its own that knows nothing but arm64 and
    installs nothing here."""
    state = root / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "", "Dir::State": state,
        "Dir::State::status": state / "status", "Dir::Cache": state, "Dir::Etc::sourcelist": SOURCES,
        "Dir::Etc::sourceparts": "/dev/null",
    }  # fmt: skip
    apt = [
        "apt-get",
        "-q",
        *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
    ]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run(
        [*apt, "install", "--yes", "--download-only", "--no-install-recommends", *DEBIAN],
        check=True,
    )
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    shutil.rmtree(state)


def _install_wheels(site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site), "--only-binary=:all:",
           "--python-version", "3.11", "--implementation", "cp", "--ignore-installed", "--upgrade",
           "--no-compile", "--no-cache-dir"]  # fmt: skip
    pip += [word for platform in PLATFORMS for word in ("--platform", platform)]
    for names, more in ((WITH_DEPENDENCIES, []), (ALONE, ["--no-deps"])):
        subprocess.run(
            [*pip, *more, *(f"{name}=={version(name).partition('+')[0]}" for name in names)],
            check=True,
        )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
