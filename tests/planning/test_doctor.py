"""The doctor reports crashes, hangs and wrong results, and raises none of them."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.core.errors import ConfigError
from ondevice.planning import doctor as module
from ondevice.planning import kernels, system
from ondevice.planning.doctor import KERNELS, Check, checks_by_target, doctor, exit_code, run_kernel
from ondevice.planning.render import render_checks


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_real_kernel_runs() -> None:
    seen: list[str] = []
    (check,) = doctor(names=["torch-cpu"], progress=seen.append, full=True)
    assert check.ok is True and check.detail.startswith("torch ") and "error" in check.detail
    assert seen == ["torch-cpu"] and check.fix == "" and check.seconds > 0
    assert exit_code([check]) == 0


def test_no_backend_is_imported_and_no_kernel_run_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(
        module, "run_kernel", lambda command: ran.append(command) or (False, "crashed", "")
    )
    (check,) = doctor(names=["torch-cpu"])
    assert check.ok is True and "installed" in check.detail and ran == []
    (check,) = doctor(names=["torch-cpu"], full=True)
    assert check.ok is False and "crashed" in check.detail and len(ran) == 1


def test_the_quick_doctor_takes_a_few_seconds_and_loads_no_framework() -> None:
    program = (
        "import sys\nfrom ondevice.planning.doctor import doctor\nchecks = doctor()\n"
        "print(sum(check.seconds for check in checks), 'torch' in sys.modules, len(checks))"
    )
    done = subprocess.run(python(program), capture_output=True, text=True, check=True)
    seconds, loaded, count = done.stdout.split()
    assert float(seconds) < 20 and loaded == "False" and int(count) > 10


def test_a_build_for_cpus_is_named_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", lambda: ["a GPU"])
    monkeypatch.setattr(module, "version", lambda package: "2.13.0+cpu")
    (check,) = doctor(names=["torch-cuda"])
    assert check.ok is None and "CPU build" in check.detail and "CUDA" in check.fix


def test_every_kernel_has_a_program_and_every_target_known_checks() -> None:
    assert set(KERNELS) == set(kernels.KERNELS)
    for needed, useful in checks_by_target().values():
        assert set(needed) | set(useful) <= {*KERNELS, *system.SYSTEM_CHECKS}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os; os.abort()", "SIGABRT"),
        ("raise ImportError('no libcudart')", "no libcudart"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("print('fine')", "no message"),
        ('print(\'{"error": "wrong by 7"}\')', "wrong by 7"),
    ],
)
def test_a_broken_backend_is_a_failed_check(code: str, reason: str) -> None:
    ok, detail, _ = run_kernel(python(code))
    assert ok is False and reason in detail


def test_a_backend_that_hangs_is_a_failed_check() -> None:
    ok, detail, _ = run_kernel(python("import time; time.sleep(60)"), timeout_s=0.5)
    assert ok is False and "0.5 s" in detail


def test_output_before_a_kernels_result_is_ignored() -> None:
    ok, detail, _ = run_kernel(python('print("warming up"); print(\'{"detail": "2.0"}\')'))
    assert (ok, detail) == (True, "2.0")


def test_a_wrong_result_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kernels.WrongResult):
        kernels._expect_close("sum", [1.0, 2.5], [1.0, 2.0], 0.1)
    with pytest.raises(kernels.WrongResult):
        kernels._expect_close("sum", [float("nan")], [1.0], 0.1)

    def broken() -> str:
        raise kernels.WrongResult("sum: wrong")

    monkeypatch.setitem(kernels.KERNELS, "torch-cpu", broken)
    assert kernels.main(["torch-cpu"]) == 1
    assert "WrongResult: sum: wrong" in capsys.readouterr().out


def test_a_backend_that_is_not_installed_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    (check,) = doctor(names=["bitsandbytes"])
    assert check.ok is None and not check.failed and "not installed" in check.detail
    assert check.fix.startswith("pip install") and exit_code([check]) == 0


def test_a_target_makes_what_it_needs_mandatory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    checks = {check.name: check for check in doctor("android-cpu")}
    assert checks["executorch"].needed and checks["executorch"].failed
    assert "executorch" in checks["executorch"].fix
    assert exit_code(list(checks.values())) == 10
    assert "mlx" not in checks and "bitsandbytes" not in checks
    assert checks["python"].ok and checks["disk"].detail and not checks["runtime-ops"].needed


def test_a_machine_that_cannot_train_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a framework every backend is merely not installed, and still nobody can train."""
    monkeypatch.setattr(
        "ondevice.planning.doctor._run", lambda name, needed, full: Check(name, None, "absent")
    )
    checks = doctor()
    assert checks[-1].name == "training" and "[torch]" in checks[-1].fix and exit_code(checks) == 10
    monkeypatch.setattr(
        "ondevice.planning.doctor._run",
        lambda name, needed, full: Check(name, name == "mlx" or None, ""),
    )
    assert doctor()[-1].detail.endswith("mlx") and exit_code(doctor()) == 0


def test_a_check_that_raises_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies() -> system.Outcome:
        raise OSError("the disk is gone")

    monkeypatch.setitem(system.SYSTEM_CHECKS, "disk", dies)
    (check,) = doctor(names=["disk"])
    assert check.ok is False and "the disk is gone" in check.detail and exit_code([check]) == 10


def test_the_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "fake++"
    fake.write_text("#!/bin/sh\necho 'unknown option -std=c++20' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    (check,) = doctor(names=["compiler"])
    assert check.ok is False and "unknown option" in check.detail and "g++" in check.fix
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    (check,) = doctor(names=["compiler"])
    assert check.ok is None


def test_the_doctor_reports_a_damaged_model_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ondevice.models.sources import cache

    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path))
    (check,) = doctor(names=["model-cache"])
    assert check.ok and "no converted models" in check.detail

    def build(folder: Path) -> dict[str, object]:
        (folder / "weights.bin").write_bytes(b"1234")
        return {}

    folder = cache.convert_once("package/some-1.0", "package:some", build)
    (check,) = doctor(names=["model-cache"])
    assert check.ok and "some-1.0" in check.detail
    (folder / "weights.bin").write_bytes(b"12")
    (check,) = doctor(names=["model-cache"])
    assert check.ok is False and "has changed" in check.detail and "delete" in check.fix


def test_unknown_names_are_config_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        doctor("android-gpu")
    assert caught.value.received == "android-gpu"
    with pytest.raises(ConfigError) as caught:
        doctor(names=["nothing"])
    assert caught.value.received == "nothing"


def test_the_table_shows_marks_and_fixes() -> None:
    from rich.console import Console

    checks = [
        Check("torch-cpu", True, "torch 2.13"),
        Check("executorch", None, "not installed", "pip install x", needed=True),
        Check("mlx", None, "not installed", "pip install mlx"),
        Check("bitsandbytes", False, "the kernel crashed: SIGSEGV", "pip install y"),
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(render_checks(checks))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "✓" in text and text.count("✗") == 2 and "executorch: pip install x" in text
    assert "bitsandbytes: pip install y" in text and "pip install mlx" not in text
    assert checks[1].to_dict()["needed"] is True


def test_importing_the_planner_loads_no_framework(root: Path) -> None:
    code = (
        "import sys\nfrom ondevice.planning import doctor, estimate, fits, render\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'executorch', 'mlx')))"
    )
    assert subprocess.run(python(code), cwd=root, check=False).returncode == 0
