"""Check this machine: the installed packages, and with `full` a real kernel in each backend.

Kernels run in separate processes, since a broken backend may crash. Together they take minutes.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ondevice.core.errors import ConfigError, MissingPackageError
from ondevice.core.process import python_command
from ondevice.core.registry import targets
from ondevice.planning import jetson
from ondevice.planning.devices import gpus
from ondevice.planning.system import COMPILER_FIX, JETSON_CHECKS, SYSTEM_CHECKS, Outcome

KERNEL_TIMEOUT_S = 180


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: of the check.
        ok: True if it works, False if it is broken, None if it is not installed.
        detail: version and result, or the fault.
        fix: a command that would help, or "".
        needed: the target cannot do without it.
    """

    name: str
    ok: bool | None
    detail: str
    fix: str = ""
    needed: bool = False
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """True if it is broken, or needed and absent."""
        return self.ok is False or (self.needed and self.ok is not True)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class _Kernel:
    """A check of `ondevice.planning.kernels`, with its packages and the commands to get them."""

    packages: tuple[str, ...]
    install: str
    repair: str = ""


ON_GPU = ("torch-cuda", "unified-memory")
JETPACK_6_REPAIRS = {
    "bitsandbytes": 'CMAKE_ARGS="-DCOMPUTE_BACKEND=cuda -DCOMPUTE_CAPABILITY=87" pip install '
    "--no-deps --force-reinstall --no-binary bitsandbytes "
    '"bitsandbytes @ git+https://github.com/bitsandbytes-foundation/bitsandbytes@0.50.2"   '
    "(PyPI's wheel for ARM is built for servers and ends at its first kernel here)",
    "torch-cuda": "use NVIDIA's container pytorch:25.06-py3-igpu from NGC   "
    "(PyPI's torch for ARM is for servers)",
}
_TORCH = "pip install 'ondevice-train[torch]'"
_EXECUTORCH = "pip install 'ondevice-train[executorch]'"
_REINSTALL = "pip install --force-reinstall --no-deps {}"
KERNELS: dict[str, _Kernel] = {
    "torch-cpu": _Kernel(("torch",), _TORCH, _REINSTALL.format("torch")),
    "torch-cuda": _Kernel(
        ("torch",),
        _TORCH,
        "nvidia-smi   (a driver that is older than torch's CUDA needs an update)",
    ),
    "transformers": _Kernel(
        ("transformers", "torch"), _TORCH, "pip install --upgrade 'ondevice-train[torch]'"
    ),
    "peft": _Kernel(("peft", "torch"), _TORCH, "pip install --upgrade peft"),
    "executorch": _Kernel(
        ("executorch", "torch"), _EXECUTORCH, "pip install --upgrade 'ondevice-train[executorch]'"
    ),
    "runtime-ops": _Kernel(("torch",), _TORCH, COMPILER_FIX),
    "executorch-ops": _Kernel(("executorch", "torch"), _EXECUTORCH, COMPILER_FIX),
    "qnn": _Kernel(
        ("onnxruntime_qnn", "executorch", "cpuinfo"),
        "pip install 'ondevice-train[qnn]'   "
        "(Qualcomm's libraries, under the Qualcomm AI Stack License)",
        "pip install --force-reinstall 'ondevice-train[qnn]'",
    ),
    "mlx": _Kernel(("mlx",), "pip install 'ondevice-train[mlx]'", _REINSTALL.format("mlx")),
    "unified-memory": _Kernel(("torch",), _TORCH, "nvidia-smi"),
    "bitsandbytes": _Kernel(
        ("bitsandbytes", "torch"),
        "pip install bitsandbytes",
        "pip install --upgrade --force-reinstall --no-deps bitsandbytes",
    ),
}
MACHINES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("torch-cpu", "transformers"), ("runtime-ops", "peft", "compiler")),
    "cuda": (("torch-cuda", "transformers"), ("peft", "bitsandbytes")),
    "mlx": (("mlx",), ()),
}
"""Checks that eager training on a device needs, and those of optional parts (ops, 4-bit weights)."""
ALWAYS = ("python", "memory", "disk", "model-cache")


def checks_by_target() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the targets of `doctor`, each with the checks that it needs and optional ones."""
    return MACHINES | {spec.name: (spec.needs, spec.uses) for spec in targets()}


def doctor(
    target: str | None = None,
    progress: Callable[[str], None] | None = None,
    names: Sequence[str] | None = None,
    full: bool = False,
) -> list[Check]:
    """Run every check, or those that concern `target`.

    Without `full` a backend's packages are looked for, which takes seconds, and nothing is
    computed. With it, a backend that crashes, hangs or gives a wrong result is a failed check,
    never an exception.

    Args:
        target: one of `checks_by_target()`; the checks that it needs become mandatory.
        progress: called with the name of each check before it runs.
        names: run only these checks.
        full: run a kernel in every backend, each for up to 15 s.

    Raises:
        ConfigError: for a target or check that is not known.
    """
    by_target = checks_by_target()
    if target is not None and target not in by_target:
        raise ConfigError(
            f"unknown target '{target}'", expected=", ".join(by_target), received=target
        )
    every = [*SYSTEM_CHECKS, *KERNELS]
    needed, useful = by_target.get(target or "", ((), ()))
    if names is not None:
        if unknown := [name for name in names if name not in every]:
            raise ConfigError(
                "unknown check", expected=", ".join(every), received=", ".join(unknown)
            )
        chosen = list(names)
    elif target is not None:
        chosen = [name for name in every if name in (*ALWAYS, *needed, *useful)]
    elif jetson.model():
        chosen = every
    else:
        chosen = [name for name in every if name not in (*JETSON_CHECKS, "unified-memory")]
    checks = []
    for name in chosen:
        if progress is not None:
            progress(name)
        checks.append(_run(name, name in needed, full))
    if target is None and names is None:
        checks.append(_training({check.name for check in checks if check.ok}))
    return checks


def _training(working: set[str]) -> Check:
    """List the devices that can train; a machine without any has failed the check."""
    devices = [name for name, (needed, _) in MACHINES.items() if set(needed) <= working]
    if devices:
        return Check("training", True, f"can train here: {', '.join(devices)}", needed=True)
    return Check("training", False, "nothing here can train", _TORCH, needed=True)


def exit_code(checks: Sequence[Check]) -> int:
    """Return 0, or 10 if something is broken, or needed and absent."""
    if any(check.failed for check in checks):
        return MissingPackageError.exit_code
    return 0


def _run(name: str, needed: bool, full: bool) -> Check:
    start = time.perf_counter()
    try:
        check = SYSTEM_CHECKS.get(name) or partial(_kernel, name, full)
        ok, detail, fix = check()
    except Exception as error:  # the doctor reports whatever goes wrong
        ok, detail, fix = False, f"{type(error).__name__}: {error}", ""
    return Check(name, ok, detail, "" if ok else fix, needed, round(time.perf_counter() - start, 2))


def _kernel(name: str, full: bool) -> Outcome:
    kernel = KERNELS[name]
    absent = [package for package in kernel.packages if importlib.util.find_spec(package) is None]
    if absent:
        return None, f"{' and '.join(absent)} not installed", kernel.install
    if name in ON_GPU and not gpus() and not jetson.model():
        return (
            None,
            "no GPU that the driver lists",
            "install the NVIDIA driver, if this machine has a GPU",
        )
    if name in ON_GPU and "+cpu" in _version("torch"):
        return None, f"{_version('torch')} is PyTorch's CPU build", "install PyTorch's CUDA build"
    if not full:
        return True, f"{', '.join(_version(package) for package in kernel.packages)} installed", ""
    # In a process: an imported package may crash at its first kernel, and the doctor must go on.
    ok, detail, fix = run_kernel(python_command("-m", "ondevice.planning.kernels", name))
    if not ok:
        detail = f"{_version(kernel.packages[0])}: {detail}"
    release = jetson.release()
    repair = kernel.repair
    if release and release[0] < 38:
        repair = JETPACK_6_REPAIRS.get(name, repair)
    return ok, detail, fix or repair or kernel.install


def run_kernel(command: Sequence[str], timeout_s: float = KERNEL_TIMEOUT_S) -> Outcome:
    """Run a process that prints `{"detail": ...}` or `{"error": ..., "fix": ...}`, or crashes."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no result in {timeout_s:g} s", ""
    except OSError as error:
        return False, str(error), ""
    if done.returncode < 0:
        try:
            killer = signal.Signals(-done.returncode).name
        except ValueError:
            killer = f"signal {-done.returncode}"
        return False, f"the kernel crashed: {killer}", ""
    result = _last_json(done.stdout)
    if done.returncode == 0 and "detail" in result:
        return True, str(result["detail"]), ""
    if "error" in result:
        return False, str(result["error"]), str(result.get("fix") or "")
    errors = [f"exit status {done.returncode} and no message"]
    errors += [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return False, errors[-1], ""


def _last_json(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        result = json.loads((lines or ["{}"])[-1])
    except ValueError:
        return {}
    if isinstance(result, dict):
        return result
    return {}


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
