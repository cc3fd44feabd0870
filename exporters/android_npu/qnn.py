"""Qualcomm's QNN libraries from the `qnn` extra, found and loaded here: nobody sets a variable.

The wheel `onnxruntime-qnn` carries the compiler for Hexagon and its simulator for x86 Linux. Only
one version of it takes what ExecuTorch 1.5 asks for, so the version is checked. Nothing is ever
downloaded: ExecuTorch's own package would fetch an SDK when it is imported, unless `QNN_SDK_ROOT`
is there, so it is set before.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import logging
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ondevice.core.errors import MissingPackageError
from ondevice.core.process import cache_root
from ondevice.exporters.executorch.quiet import without_native_output

PACKAGE = "onnxruntime-qnn"
VERSION = "2.5.0"
INSTALL = "pip install 'ondevice-train[qnn]'"
LICENCE = (
    "the extra holds Qualcomm's libraries under the Qualcomm AI Stack License (Qualcomm_LICENSE.pdf in the package): "
    "object code, inside your own application only"
)
HOST = "x86_64-linux-clang"
LIBRARIES = ("libQnnHtp.so", "libQnnSystem.so")
BACKEND = "qnn-htp-simulator"

CPP_RUNTIME = ("libstdc++.so.6", "libgcc_s.so.1")

_loaded: list[ctypes.CDLL] = []


def problem() -> str | None:
    """Return why QNN cannot be used here, in one sentence; None if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"QNN's compiler and simulator need Linux on x86-64; this is {platform.system()} {platform.machine()}"
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        return f"the `qnn` extra is not installed: {INSTALL}   ({LICENCE})"
    if installed != VERSION:
        return f"{PACKAGE} is {installed} and only {VERSION} compiles these programs: {INSTALL}"
    absent = [name for name in ("executorch", "cpuinfo") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: {INSTALL}" if absent else None


def package_folder() -> Path:
    """Find the folder with QNN's libraries.

    Raises:
        MissingPackageError: the extra is not installed, is of another version, or cannot run on
            this machine.
    """
    if reason := problem():
        raise MissingPackageError("the NPU's tools cannot be used: " + reason, hint=INSTALL)
    spec = importlib.util.find_spec("onnxruntime_qnn")
    assert spec is not None and spec.submodule_search_locations  # noqa: S101  `problem` looked
    return Path(next(iter(spec.submodule_search_locations)))


def sdk_root() -> Path:
    """Make a folder in the cache that has the shape of Qualcomm's SDK; a link in it points to the
    package."""
    package = package_folder()
    root = cache_root() / "qnn" / VERSION
    link = root / "lib" / HOST
    if not (link.is_symlink() and link.resolve() == package.resolve()):
        link.parent.mkdir(parents=True, exist_ok=True)
        part = link.with_name(f"{HOST}.{os.getpid()}")
        part.unlink(missing_ok=True)
        part.symlink_to(package, target_is_directory=True)
        part.replace(link)
    return root


def load() -> None:
    """Make the simulator usable in this process; does nothing the second time.

    The libraries are loaded by path, and after PyTorch (before it they crash), so that the later
    look-up by name finds them without `LD_LIBRARY_PATH`.

    Raises:
        MissingPackageError: as `package_folder`.
    """
    if _loaded:
        return
    folder = package_folder()
    import torch  # noqa: F401

    with quiet():
        _loaded.extend(ctypes.CDLL(str(folder / name)) for name in LIBRARIES)
    # ExecuTorch opens them again for all to see, with the C++ runtime of another compiler that they
    # bring: whatever is loaded later would call that one, and crash at its first exception. The
    # system's own goes first; QNN's libraries are bound already.
    _loaded.extend(ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL) for name in CPP_RUNTIME)


def load_compiler() -> None:
    """Call `load`, and import ExecuTorch's lowering to QNN, whose import wants an SDK.

    Raises:
        MissingPackageError: as `package_folder`.
    """
    os.environ["QNN_SDK_ROOT"] = str(sdk_root())
    load()
    import torch

    # The import turns oneDNN off for the whole process: a run after an export would have other bits
    # than one before.
    before = torch.backends.mkldnn.enabled
    with quiet(), redirect_stdout(io.StringIO()):
        import executorch.backends.qualcomm.utils.utils  # noqa: F401
    torch.backends.mkldnn.enabled = before


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, QNN's and ExecuTorch's chatter is dropped, and no log handler of theirs
    stays."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    disabled = root.manager.disable
    logging.disable(logging.CRITICAL)
    with without_native_output(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.handlers[:] = handlers
            logging.disable(disabled)
