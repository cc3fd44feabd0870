"""Compiles the C++ ops at first use and loads them into Python and into the ExecuTorch runtime.

The compiled libraries are cached under `$ONDEVICE_CACHE`, else `$XDG_CACHE_HOME/ondevice`, else
`~/.cache/ondevice`, keyed by sources, flags, compiler, processor and ExecuTorch's version.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ondevice.core.errors import MissingPackageError, StorageError
from ondevice.core.process import cache_root

SOURCES = Path(__file__).with_name("csrc")
OPTIMISE = (
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
)
CONTRACTION = {"generator.cpp": "-ffp-contract=off", "layer_adam.cpp": "-ffp-contract=off"}
"""The bits of the generator and of AdamW must not depend on fused multiply-adds; the other ops want
them."""


def find_compiler() -> str:
    """Return the path of the C++ compiler: `$CXX`, else g++, clang++ or c++.

    Raises:
        MissingPackageError: if there is none.
    """
    chosen = os.environ.get("CXX")
    wanted = [chosen] if chosen else ["g++", "clang++", "c++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise MissingPackageError(
        "no C++ compiler was found, and the fast ops are compiled at first use",
        expected=" or ".join(wanted),
        hint="install g++ (Debian: apt install g++; macOS: xcode-select --install) or set CXX",
    )


def has_compiler() -> bool:
    """Return True if the ops can be compiled here."""
    try:
        return bool(find_compiler())
    except MissingPackageError:
        return False


def build_library() -> Path:
    """Compile the plain C library (`csrc/c_api.cpp`, `layer_adam.cpp`) for this processor, unless
    it is in the cache, and return its path.

    Raises:
        MissingPackageError: no compiler, or the compiler fails.
        StorageError: the cache cannot be written.
    """
    return _build(
        "ondevice_ops",
        ["c_api.cpp", "generator.cpp", "layer_adam.cpp"],
        ["-std=c++17"],
        [],
    )


def build_executorch_library() -> Path:
    """Compile the ExecuTorch kernels (`csrc/executorch_ops.cpp`) against the installed runtime.

    The library names the runtime's own as dependencies, so that it registers its kernels there and
    shares its thread pool.

    Raises:
        MissingPackageError: no compiler, no executorch, or the compiler fails.
        StorageError: the cache cannot be written.
    """
    flags, link = runtime_flags()
    flags = ["-std=c++17", *flags, "-DET_USE_THREADPOOL"]
    if sys.platform == "darwin":
        link = ["-undefined", "dynamic_lookup"]
    return _build(
        "ondevice_executorch",
        ["executorch_ops.cpp", "executorch_block_ops.cpp", "integer_product.cpp", "generator.cpp"],
        flags,
        link,
    )


@functools.cache
def load_executorch_ops() -> str:
    """Register the ops' kernels with the ExecuTorch runtime of this process; returns the library's
    path.

    Call it before a program that uses them is loaded. Calling it again does nothing.

    Raises:
        MissingPackageError: as for `build_executorch_library`.
    """
    path = build_executorch_library()
    import executorch.extension.pybindings.portable_lib  # noqa: F401  loads the runtime that the library extends

    ctypes.CDLL(
        str(path)
    )  # never RTLD_GLOBAL: a second copy of the runtime's symbols aborts the process
    return str(path)


def runtime_libraries() -> list[Path]:
    """Return the shared libraries that export the installed runtime.

    Raises:
        MissingPackageError: executorch is not installed, or is older than 1.5.1, whose package has them first.
    """
    try:
        package = importlib.metadata.distribution("executorch")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError(
            "the ExecuTorch runtime is not installed",
            hint='pip install "ondevice-train[executorch]"',
        ) from None
    folder = Path(str(package.locate_file("executorch"))).resolve()
    suffix = "dylib" if sys.platform == "darwin" else "so"
    names = ("libexecutorch", "libexecutorch_threadpool")
    libraries = [folder / "lib" / f"{name}.{suffix}" for name in names]
    if all(path.is_file() for path in libraries):
        return libraries
    raise MissingPackageError(
        f"executorch {package.version} has no runtime that the ops can link",
        expected=" and ".join(path.name for path in libraries),
        hint='pip install "ondevice-train[executorch]"',
    )


def runtime_flags() -> tuple[list[str], list[str]]:
    """Return a compiler's and a linker's flags for the installed runtime."""
    libraries = runtime_libraries()
    folder = libraries[0].parent
    package = next(path for path in folder.parents if path.name == "executorch")
    compiling = [
        f"-I{package / 'include'}",
        f"-I{package / 'include/executorch/runtime/core/portable_type/c10'}",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
    ]
    return compiling, [f"-L{folder}", *(f"-l:{path.name}" for path in libraries)]


def _build(name: str, sources: list[str], flags: list[str], link: list[str]) -> Path:
    compiler = find_compiler()
    flags = [*OPTIMISE, "-march=native", *flags]
    target = cache_root() / f"lib{name}-{_key(compiler, flags, link)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                _compile(compiler, flags, sources, link, target)
    except OSError as error:
        raise StorageError(
            f"cannot write the compiled ops to {target.parent}: {error.strerror or error}",
            hint="free some space there, or set ONDEVICE_CACHE to a folder that can be written",
        ) from None
    return target


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process compile, and the others wait for its library: the ranks of a run all ask for
    it when they start."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: two may compile the same library
            pass
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who has waited for it finds the library


def _compile(
    compiler: str, flags: list[str], sources: list[str], link: list[str], target: Path
) -> None:
    # In the target's own folder: a rename from another disk would be a copy, and not atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.stem}-") as folder:
        objects = []
        for source in sources:
            objects.append(str(Path(folder) / f"{source}.o"))
            contraction = CONTRACTION.get(source, "-ffp-contract=fast")
            _run([compiler, *flags, contraction, "-c", str(SOURCES / source), "-o", objects[-1]])
        built = Path(folder) / target.name
        _run([compiler, "-shared", "-pthread", *objects, *link, "-o", str(built)])
        os.replace(built, target)  # atomic: another process sees a whole library or none


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MissingPackageError(
            f"{command[0]} could not compile the ops",
            expected="a C++ compiler with C++17 and vector extensions (g++ 11, clang 14 or newer)",
            received=done.stderr[-2000:].strip() or f"exit status {done.returncode}",
            hint="install a newer compiler or set CXX",
        )


def _key(compiler: str, flags: list[str], link: list[str]) -> str:
    """Hash everything that the library's bytes and its validity depend on."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = [compiler, version, *flags, *link, platform.machine(), _processor()]
    if link:
        parts.append(importlib.metadata.version("executorch"))
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Describe the processor as far as `-march=native` depends on it, so that a cache shared by two
    machines serves both."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(wanted)}))
