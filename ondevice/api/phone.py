"""Talk to a phone through `adb`: put an artifact into the app's storage, and bring its adapters back.

The app's folders are private; a build that can be debugged (`make apk` makes one) opens them to `adb shell run-as`.
For any other build an artifact goes to the phone's Download folder as a zip, to be imported by hand.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import MANIFEST_NAME, read_manifest
from ondevice.core.errors import ArtifactError, ConfigError, DeviceError, MissingPackageError
from ondevice.core.manifest import Manifest

APP = "org.ondevice.app"
MODELS, ADAPTERS = "files/models", "files/adapters"
RECORD = "pulled.json"
"""The file that marks a folder as one that `pull` wrote, and may replace."""
DOWNLOADS = "/sdcard/Download"
INSTALL = "sudo apt-get install adb   (macOS: brew install android-platform-tools)"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CHUNK = 1 << 20
DTYPES = ("int64", "float32")
WEIGHT_DTYPES = ("float32", "float16", "int8", "uint8")
"""Of tensors that the app can hand to a program: those it computes, and frozen weights if they are mapped."""
BLOCK_FUNCTIONS = ("embed_", "block_forward_", "block_backward_", "head_sums", "head_gradient")
"""Of a block program, what the app calls in a step."""
Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and all bytes."""


class Phone:
    """One phone that `adb` reaches.

    Args:
        serial: which one, if several are connected.

    Raises:
        MissingPackageError: `adb` is not installed.
        DeviceError: no phone, several, or one that has not allowed debugging.
    """

    def __init__(self, serial: str | None = None) -> None:
        program = shutil.which("adb")
        if program is None:
            raise MissingPackageError(
                "adb is not installed", expected="adb on the PATH", hint=INSTALL
            )
        self._adb = program
        self._options = []
        self.serial = self._choose(serial)
        self._options = ["-s", self.serial]

    def _choose(self, serial: str | None) -> str:
        lines = self.adb("devices").splitlines()[1:]
        states = dict(line.split("\t", 1) for line in lines if "\t" in line)
        if serial is not None and serial not in states:
            raise DeviceError(
                "that phone is not connected",
                expected=", ".join(states) or "a connected phone",
                received=serial,
            )
        if not states:
            raise DeviceError(
                "no phone is connected",
                expected="one phone in `adb devices`",
                hint="connect it by USB and turn on USB debugging in its developer options",
            )
        if serial is None and len(states) > 1:
            raise DeviceError(
                "several phones are connected",
                received=", ".join(states),
                hint="choose with --serial",
            )
        chosen = serial or next(iter(states))
        if states[chosen].strip() != "device":
            raise DeviceError(
                "the phone does not answer",
                expected="device",
                received=f"{chosen}: {states[chosen].strip()}",
                hint="unlock it and allow this computer to debug it",
            )
        return chosen

    def adb(self, *arguments: str, **options: Any) -> str:
        """Run `adb` and return its output.

        Raises:
            DeviceError: it fails; with the last line that it printed.
        """
        command = [self._adb, *self._options, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, **options
        )
        if done.returncode:
            raise _failed(arguments, done.stderr or done.stdout)
        return done.stdout

    def as_app(self, script: str, direction: str = "shell") -> list[str]:
        """Build the command that runs a shell script as the app, in its folder."""
        return [self._adb, *self._options, direction, f"run-as {APP} sh -c {shlex.quote(script)}"]

    def run_as_app(self, script: str) -> str:
        """Run a shell script as the app and return its output.

        Raises:
            DeviceError: as `adb`.
        """
        done = subprocess.run(
            self.as_app(script), capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            raise _failed((script,), done.stderr or done.stdout)
        return done.stdout

    def has_app(self) -> bool:
        """Return True if the app is installed."""
        return APP in self.adb("shell", f"pm list packages {APP}").split("package:")[-1]

    def opens(self) -> bool:
        """Return True if the app's folders can be reached: its build can be debugged."""
        return not subprocess.run(
            self.as_app("cd files 2>/dev/null || mkdir files"), capture_output=True
        ).returncode


def push(
    folder: Path,
    *,
    name: str | None = None,
    serial: str | None = None,
    progress: Progress | None = None,
) -> dict:
    """Put an artifact into the app, whole or not at all; an artifact of that name is replaced.

    Args:
        folder: the artifact; every file's SHA-256 is checked before, and on the phone after.
        name: what the app calls it; the folder's name unless given.

    Returns:
        `phone`, `name`, `bytes`, `place`, and `import_by_hand` if only the Download folder could be reached.

    Raises:
        ArtifactError: `folder` is no whole artifact for a phone, or it changed on the way.
        ConfigError: not a file name.
        DeviceError, MissingPackageError: as `Phone`; or the app is not installed, or the phone is full.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    _check_runs(manifest)
    name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "model"
    if not NAME.fullmatch(name):
        raise ConfigError(
            "a model's name",
            expected="letters, digits, '.', '_' and '-', at most 64",
            received=name,
        )
    phone = Phone(serial)
    if not phone.has_app():
        raise DeviceError(
            "the app is not installed on the phone",
            expected=APP,
            hint="`make apk`, then `adb install FILE.apk`",
        )
    files = [folder / MANIFEST_NAME, *(folder / path for path in manifest.files)]
    total = sum(path.stat().st_size for path in files)
    answer = {"phone": phone.serial, "name": name, "bytes": total}
    if not phone.opens():
        return answer | {"place": _to_downloads(phone, folder, files, name), "import_by_hand": True}
    # Sent beside the model's place and renamed there once every hash is right: the app lists whole models only.
    beside = f"{MODELS}/.push-{name}"
    target = f"{MODELS}/{name}"
    try:
        _send(phone, folder, files, beside, total, progress)
        _check_there(phone, beside, dict(manifest.files))
        old = f"{MODELS}/.old-{name}"
        phone.run_as_app(
            f"rm -rf {old}; [ ! -e {target} ] || mv {target} {old}; mv {beside} {target} && rm -rf {old}"
        )
    except BaseException:
        subprocess.run(phone.as_app(f"rm -rf {beside}"), capture_output=True)
        raise
    return answer | {"place": f"{APP}/{target}", "import_by_hand": False}


def pull(out: Path, *, serial: str | None = None) -> list[Path]:
    """Bring every adapter of the app here, as `out/MODEL/ADAPTER`; existing files in `out` are replaced.

    Raises:
        DeviceError, MissingPackageError: as `Phone`; or the app has no adapters, or is not a debuggable build.
        ArtifactError: what came is not an adapter.
    """
    phone = Phone(serial)
    if not phone.opens():
        raise DeviceError(
            "the app's folders cannot be reached",
            expected="a debuggable build of the app, as `make apk` makes",
            hint="share the adapter from the app's Adapters screen",
        )
    if not phone.run_as_app(f"ls {ADAPTERS} 2>/dev/null || true").split():
        raise DeviceError("the app has no adapters", hint="train one first")
    with tempfile.TemporaryFile() as stream:
        done = subprocess.run(
            phone.as_app(f"tar -c -C {ADAPTERS} .", "exec-out"),
            stdout=stream,
            stderr=subprocess.PIPE,
        )
        if done.returncode:
            raise _failed(("tar",), done.stderr.decode(errors="replace"))
        stream.seek(0)
        with atomic_directory(out, marker=RECORD) as folder:
            _unpack(stream, folder)
            adapters = sorted(
                path.parent.relative_to(folder) for path in folder.rglob("adapter_config.json")
            )
            for adapter in adapters:
                load_adapter(folder / adapter)
            record = {
                "phone": phone.serial,
                "adapters": [adapter.as_posix() for adapter in adapters],
            }
            (folder / RECORD).write_text(
                json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
    return [Path(out) / adapter for adapter in adapters]


def _check_runs(manifest: Manifest) -> None:
    """Refuse a program that the app cannot hold."""
    program = manifest.program_spec
    kinds = {"step": ("train_step", program.evaluates_with), "blocks": BLOCK_FUNCTIONS}.get(
        program.shape
    )
    methods = [
        kind for kind in kinds or () if not any(name.startswith(kind) for name in program.methods)
    ]
    ports = [
        port for method in program.methods.values() for port in (*method.inputs, *method.outputs)
    ]
    for wrong, message, expected in (
        (
            kinds is None or methods,
            "the app does not run such programs",
            "a program of whole steps, or of blocks",
        ),
        (
            any(tensor.kept == "program" for tensor in program.state),
            "the program keeps its state in mutable buffers, which the runtime's Java API cannot read",
            "form functional",
        ),
        (
            any(
                port.dtype not in (WEIGHT_DTYPES if port.role == "frozen" else DTYPES)
                for port in ports
            ),
            "the program has tensors that the app cannot hand over",
            f"{' or '.join(DTYPES)}, frozen weights {' or '.join(WEIGHT_DTYPES)}",
        ),
    ):
        if wrong:
            raise ArtifactError(
                message,
                expected=expected,
                received=f"a program for {manifest.target}",
                hint="the artifact's README says how an app of your own runs it",
            )


def _send(
    phone: Phone,
    folder: Path,
    files: list[Path],
    target: str,
    total: int,
    progress: Progress | None,
) -> None:
    script = f"rm -rf {target} && mkdir -p {target} && tar -x -C {target}"
    process = subprocess.Popen(
        phone.as_app(script, "exec-in"), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stderr is not None  # noqa: S101  both are pipes
    try:
        counted: Any = _Counted(process.stdin, total, progress)
        with tarfile.open(fileobj=counted, mode="w|") as tar:
            for path in files:
                tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
        process.stdin.close()
    except BrokenPipeError:
        pass  # the phone says why
    # Any word on stderr is a failure: `adb exec-in` does not pass on the exit status of the phone's command.
    words = process.stderr.read().decode(errors="replace")
    if process.wait() or words.strip():
        raise _failed(("tar",), words or "the connection broke")


def _check_there(phone: Phone, target: str, wanted: dict[str, str]) -> None:
    listed = phone.run_as_app(f"cd {target} && find . -type f -exec sha256sum {{}} +")
    digests = {
        name.removeprefix("./"): digest
        for digest, _, name in (line.partition("  ") for line in _lines(listed))
    }
    for name, digest in wanted.items():
        if digests.get(name) != digest:
            raise ArtifactError(
                f"{name} did not arrive whole",
                expected=digest,
                received=digests.get(name),
                hint="push it again",
            )


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip())


def _to_downloads(phone: Phone, folder: Path, files: list[Path], name: str) -> str:
    target = f"{DOWNLOADS}/{name}.zip"
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / f"{name}.zip"
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:  # weights hardly compress
            for path in files:
                archive.write(path, path.relative_to(folder).as_posix())
        phone.adb("push", str(packed), target)
    return target


def _unpack(stream: IO[bytes], folder: Path) -> None:
    try:
        with tarfile.open(fileobj=stream) as tar:
            tar.extractall(
                folder, filter="data"
            )  # refuses names and links that lead out of the folder
    except tarfile.TarError as error:
        raise ArtifactError("the phone did not send a valid archive", received=str(error)) from None


class _Counted:
    """A stream to write to that reports its progress."""

    def __init__(self, stream: IO[bytes], total: int, progress: Progress | None) -> None:
        self.stream, self.total, self.progress = stream, total, progress
        self.sent = 0

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), CHUNK):
            self.stream.write(data[start : start + CHUNK])
        self.sent += len(data)
        if self.progress is not None:
            self.progress(min(self.sent, self.total), self.total)
        return len(data)


def _failed(arguments: tuple[str, ...], words: str) -> DeviceError:
    last = next(reversed([line for line in words.splitlines() if line.strip()]), "no message")
    hint = "`adb devices` lists the connected devices"
    if "No space left" in words:
        hint = "free space on the phone"
    return DeviceError(f"adb {arguments[0]} failed", received=last.strip(), hint=hint)
