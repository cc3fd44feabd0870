"""The C++ kernels built with CMake: for this machine, for 64-bit ARM under an emulator, and for
phones."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ondevice.runtime_ops import build, generator, native
from tests.sampling import ALL

CSRC = build.SOURCES.resolve()
GOLDEN = generator.GOLDEN_PATH
AARCH64 = 183
"""ELF's number of the machine."""
LIBRARIES = ["ondevice_ops", "ondevice_executorch"] if ALL else []
"""Compiled by the nightly job: on every change `build.py` compiles the same sources for this
machine, and `golden_check` has every kernel, with what is ARM's own."""
QUICKLY = [] if ALL else ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
"""How the checks are compiled for this machine: what all other tests load is compiled with -O3, and
so are the checks for ARM."""
HOW = {
    "cmake": "apt install cmake",
    "aarch64-linux-gnu-g++": "apt install g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "apt install qemu-user-static",
}


def need(*tools: str) -> None:
    """Skip by name what is missing; with ONDEVICE_REQUIRE_CROSS=1 that is a failure."""
    for tool in tools:
        if shutil.which(tool) is None:
            message = f"{tool} is missing; try: {HOW[tool]}"
            if os.environ.get("ONDEVICE_REQUIRE_CROSS") == "1":
                pytest.fail(message)
            pytest.skip(message)


def run(*command: str | Path, status: int = 0) -> str:
    """Standard output and error of a command that must end with this status."""
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=900, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == status, output[-4000:]
    return output


def configure(folder: Path, *options: str, status: int = 0) -> str:
    return run(
        "cmake",
        "-S",
        CSRC,
        "-B",
        folder,
        f"-DPython3_EXECUTABLE={sys.executable}",
        *options,
        status=status,
    )


def compile_targets(folder: Path) -> None:
    """Build the checks and, in the nightly job, the libraries."""
    targets = ["golden_check", *LIBRARIES]
    run("cmake", "--build", folder, "--parallel", "2", "--target", *targets)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder for this machine; with ExecuTorch installed, its kernels as a module of its
    runtime."""
    need("cmake")
    folder = tmp_path_factory.mktemp("here")
    runtime = []
    if importlib.util.find_spec("executorch") is not None:
        paths = ";".join(str(path) for path in build.runtime_libraries())
        runtime = [f"-DEXECUTORCH_RUNTIME={paths}"]
    configure(folder, *runtime, *QUICKLY)
    compile_targets(folder)
    return folder


def normals_of(output: str) -> str:
    """The fingerprint of 2^20 normals that golden_check prints."""
    return output.split("normals: ")[1].split()[0]


def test_golden_values_on_this_machine(here):
    output = run(here / "golden_check", GOLDEN)
    golden = json.loads(GOLDEN.read_text())
    ops = sum(len(case["out"]) for case in golden["ops"])
    numbers = sum(1 + len(c["last_words"]) + 2 * c["queries"] * c["count"] for c in golden["cases"])
    assert f"{numbers + ops} values agree" in output


def test_the_normals_are_those_of_pytorch(here):
    if native.library() is None:
        pytest.skip("no C++ compiler")
    values = native.draw("normal", torch.tensor([0]), torch.tensor([0]), 0, 1, 0, 1 << 20)[0]
    digest = 0xCBF29CE484222325
    for bits in values.view(torch.int32).tolist():
        digest = ((digest ^ (bits & 0xFFFFFFFF)) * 0x100000001B3) % 2**64
    assert normals_of(run(here / "golden_check", GOLDEN)) == f"{digest:016x}"


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (("cases", 2, "last_key"), "0" * 16, "last_key[0]"),
        (("cases", 1, "last_words", 1), "0" * 16, "last_words[1]"),
        (("cases", 0, "normal", 0, 3), 2e-6, "normal[3]"),
        (("cases", 5, "rademacher", 1, 0), 2.0, "rademacher[3]"),
        (("ops", 0, "out", 230), 1e-4, "q4_linear[230]"),
        (("ops", 1, "out", 0), 1e-4, "q8_embedding[0]"),
        (("ops", 2, "out", 8), 1e-3, "q8_linear_cross_entropy[8]"),
        (("ops", 3, "out", 1), 1e-4, "linear_cross_entropy[1]"),
    ],
)
def test_a_value_that_differs_is_named(here, tmp_path, path, change, message):
    content = json.loads(GOLDEN.read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = change if isinstance(change, str) else place[path[-1]] + change
    (tmp_path / "changed.json").write_text(json.dumps(content))
    assert message in run(here / "golden_check", tmp_path / "changed.json", status=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{}", "no golden values"),
        ('{"cases": [{"seed": 1, "step": 2}]}', "a case has no tensor"),
        ('{"ops": [{"op": "unheard_of", "out": [1]}]}', "unheard_of"),
        (
            '{"ops": [{"op": "q8_embedding", "vocabulary": 9, "depth": 5, "ids": [1], "out": [1]}]}',
            "another number",
        ),
    ],
)
def test_a_wrong_file_is_not_a_success(here, tmp_path, content, message):
    if content is not None:
        (tmp_path / "golden.json").write_text(content)
    assert message in run(here / "golden_check", tmp_path / "golden.json", status=2)


@pytest.mark.nightly
def test_the_library_draws_the_golden_signs(here):
    (library,) = here.glob("libondevice_ops.*")
    loaded, case = ctypes.CDLL(str(library)), generator.read_golden()[3]
    out = (ctypes.c_float * (case["queries"] * case["count"]))()
    counters = [ctypes.c_int64(case[key]) for key in ("tensor", "queries", "start", "count")]
    seed, step = (ctypes.c_uint64(case[key]) for key in ("seed", "step"))
    loaded.ondevice_rademacher(seed, step, *counters, out, ctypes.c_int64(2))
    assert list(out) == [sign for row in case["rademacher"] for sign in row]


@pytest.mark.nightly
def test_the_module_registers_every_kernel_with_the_runtime(here, warm):
    if importlib.util.find_spec("executorch") is None:
        pytest.skip("executorch is not installed")
    (module,) = here.glob("libondevice_executorch.*")
    program = (
        "import ctypes, sys, executorch.extension.pybindings.portable_lib\n"
        "from executorch.runtime import Runtime\n"
        "names = lambda: {n for n in Runtime.get().operator_registry.operator_names if n.startswith('ondevice::')}\n"
        "assert not names()\nctypes.CDLL(sys.argv[1])\nprint(*sorted(names()), sep='\\n')"
    )
    from ondevice.runtime_ops import torch_ops

    wanted = {f"ondevice::{name}.out" for name in torch_ops.OP_NAMES}
    assert wanted <= set(run(warm.python, "-c", program, module).splitlines())


@pytest.mark.slow
def test_golden_values_on_64_bit_arm(here, tmp_path):
    need("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64-static")
    configure(tmp_path, "--toolchain", str(CSRC / "toolchains/aarch64-linux-gnu.cmake"))
    compile_targets(tmp_path)
    program = tmp_path / "golden_check"
    header = program.read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and struct.unpack("<H", header[18:20])[0] == AARCH64
    # ctest runs it in the emulator, which takes some seconds, and puts a number before each line.
    said = run("ctest", "--test-dir", tmp_path, "--no-tests=error", "--verbose")
    output = "".join(f"{line.removeprefix('1: ')}\n" for line in said.splitlines())
    native_output = run(here / "golden_check", GOLDEN)
    agreed = [
        next(x for x in text.splitlines() if "values agree" in x)
        for text in (output, native_output)
    ]
    assert agreed[0].split(",")[0] == agreed[1].split(",")[0]
    forms = {f"integers: {form}" for form in ("i8mm", "dotprod", "neon", "plain")}
    assert forms <= set(output.splitlines())
    assert normals_of(output) == normals_of(native_output), "normals have other bits on ARM"
    names = ["generator", "integers"]
    if LIBRARIES:
        names.append("ops")
    if LIBRARIES and importlib.util.find_spec("executorch") is not None:
        names.append("executorch")
    for name in names:
        assert machines(tmp_path / f"libondevice_{name}.a") == {AARCH64}


def machines(archive: Path) -> set[int]:
    """The machines that an archive's object files are for."""
    content, collected = archive.read_bytes(), set()
    place = 8  # after "!<arch>\n"
    while place < len(content):
        size = int(content[place + 48 : place + 58])
        member = content[place + 60 : place + 80]
        if member.startswith(b"\x7fELF"):
            collected.add(struct.unpack("<H", member[18:20])[0])
        place += 60 + size + size % 2
    return collected


def test_the_toolchain_for_phones_says_what_it_misses(tmp_path, monkeypatch):
    need("cmake")
    monkeypatch.delenv("ANDROID_NDK", raising=False)
    toolchain = str(CSRC / "toolchains/android-ndk.cmake")
    assert "ANDROID_NDK" in configure(tmp_path, "--toolchain", toolchain, status=1)


def test_the_toolchain_for_phones_asks_the_ndk_for_its_app(tmp_path, monkeypatch):
    """The variables that the NDK's own file would be given; only an NDK can build."""
    need("cmake")
    (tmp_path / "ndk/build/cmake").mkdir(parents=True)
    words = "ABI=${ANDROID_ABI} PLATFORM=${ANDROID_PLATFORM} STL=${ANDROID_STL}"
    (tmp_path / "ndk/build/cmake/android.toolchain.cmake").write_text(
        f'message(FATAL_ERROR "{words}")\n'
    )
    monkeypatch.setenv("ANDROID_NDK", str(tmp_path / "ndk"))
    toolchain = str(CSRC / "toolchains/android-ndk.cmake")
    output = configure(tmp_path / "b", "--toolchain", toolchain, status=1)
    assert "ABI=arm64-v8a PLATFORM=android-26 STL=c++_shared" in output
    output = configure(tmp_path / "c", "--toolchain", toolchain, "-DANDROID_ABI=x86_64", status=1)
    assert "ABI=x86_64 PLATFORM=android-26" in output
