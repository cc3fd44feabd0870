"""Reading a Jetson's files, on a copied tree: paths and contents as on an Orin Nano with JetPack 6.2."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from ondevice.planning import doctor as doctoring
from ondevice.planning import jetson
from ondevice.planning.doctor import checks_by_target, doctor

NVPMODEL = "< PM_CONFIG DEFAULT=2 >\n" + "".join(
    f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1\n"
    for number, name in enumerate(("15W", "25W", "MAXN_SUPER", "7W"))
)
TREE = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed",
    "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0\tpartition\t651072\t0\t5\n"
    "/dev/zram1\tpartition\t651072\t0\t5\n",
    "etc/nvpmodel.conf": NVPMODEL,
    "var/lib/nvpmodel/status": "pmode:0000 fmode:quiet\n",
    "sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
    "sys/class/devfreq/17000000.gpu/min_freq": "306000000\n",
    "sys/class/devfreq/17000000.gpu/max_freq": "612000000\n",
    "sys/class/devfreq/17000000.gpu/available_frequencies": "306000000 408000000 510000000 612000000 1020000000\n",
    "sys/class/devfreq/17000000.gpu/governor": "nvhost_podgov\n",
    "sys/class/devfreq/17000000.gpu/device/of_node/name": "gpu\0",
    "sys/class/devfreq/15340000.vic/device/of_node/name": "vic\0",
    "sys/class/devfreq/15340000.vic/cur_freq": "115200000\n",
}
LINE = (
    "11-22-2026 03:00:00 RAM 3456/7620MB (lfb 20x4MB) SWAP 12/3810MB (cached 0MB) "
    "CPU [12%@1420,8%@1420,off,off,5%@1420,3%@1420] EMC_FREQ 24%@2133 GR3D_FREQ 37%@[306] "
    "cpu@52.5C soc2@50C gpu@51C tj@53.5C VDD_IN 5000mW/5000mW VDD_CPU_GPU_CV 696mW/700mW"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_board_and_its_jetpack(tree: Path) -> None:
    assert jetson.board(tree) == (
        True,
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super, L4T R36.4.3, JetPack 6",
        "flash JetPack 6 or 7: older ones have no Python and CUDA that this package runs with",
    )
    (tree / "etc/nv_tegra_release").write_text("# R35 (release), REVISION: 4.1, GCID: 1")
    ok, detail, fix = jetson.board(tree)
    assert ok is False and "JetPack 5" in detail and fix.startswith("flash JetPack")
    (tree / "etc/nv_tegra_release").write_text("# R39 (release), REVISION: 2.0, GCID: 1")
    assert "JetPack 7" in jetson.board(tree)[1]
    (tree / "etc/nv_tegra_release").unlink()
    assert jetson.board(tree)[0] is False


@pytest.mark.parametrize("check", [jetson.board, jetson.swap, jetson.power_mode, jetson.clocks])
def test_other_machines_are_not_a_jetson(check, tmp_path: Path) -> None:
    assert check(tmp_path) == (None, "not a Jetson", "")


def test_zram_does_not_count_as_swap_and_a_disk_does(tree: Path) -> None:
    ok, detail, fix = jetson.swap(tree)
    assert ok is None and detail.startswith("1.2 GiB on zram") and "mkswap" in fix
    with (tree / "proc/swaps").open("a") as file:
        file.write("/swapfile\tfile\t8388604\t0\t-2\n")
    assert jetson.swap(tree) == (True, "1.2 GiB on zram, 8.0 GiB on disk", "")
    (tree / "proc/swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n")
    assert jetson.swap(tree)[:2] == (
        None,
        "no swap: nothing else that runs can be moved out of training's way",
    )


def test_the_fastest_power_mode_is_not_the_one_with_the_highest_number(tree: Path) -> None:
    assert jetson.power_mode(tree) == (True, "15W; MAXN_SUPER is faster: sudo nvpmodel -m 2", "")
    (tree / "var/lib/nvpmodel/status").write_text("pmode:0002\n")
    assert jetson.power_mode(tree) == (True, "MAXN_SUPER", "")
    (tree / "var/lib/nvpmodel/status").write_text("pmode:0009\n")
    assert jetson.power_mode(tree)[1].startswith("mode 9; MAXN_SUPER")
    (tree / "var/lib/nvpmodel/status").unlink()
    assert jetson.power_mode(tree)[0] is False


def test_clocks_and_what_caps_them(tree: Path) -> None:
    ok, detail, _ = jetson.clocks(tree)
    assert ok and detail == (
        "GPU at 306 MHz, 306 to 612 (the chip reaches 1020; the power mode caps it), nvhost_podgov; "
        "sudo jetson_clocks holds it up"
    )
    gpu = tree / "sys/class/devfreq/17000000.gpu"
    for name in ("cur_freq", "min_freq", "max_freq"):
        (gpu / name).write_text("1020000000\n")
    assert jetson.clocks(tree) == (True, "GPU at 1020 MHz, 1020 to 1020, held", "")
    (gpu / "device/of_node/name").write_text("nvdec")
    assert jetson.gpu_folder(tree) is None and jetson.clocks(tree)[0] is False


def test_a_line_of_tegrastats() -> None:
    assert jetson.parse_tegrastats(LINE) == {
        "memory_used_mib": 3456, "memory_total_mib": 7620, "swap_used_mib": 12, "swap_total_mib": 3810,
        "gpu_percent": 37, "gpu_mhz": 306, "cpu_c": 52.5, "soc2_c": 50, "gpu_c": 51, "tj_c": 53.5,
        "vdd_in_mw": 5000, "vdd_cpu_gpu_cv_mw": 696,
    }  # fmt: skip
    older = "RAM 2387/7774MB (lfb 961x4MB) SWAP 0/3887MB (cached 0MB) GR3D_FREQ 0% GPU@31.5C VDD_IN 3528/3569"
    assert jetson.parse_tegrastats(older)[
        "vdd_in_mw"
    ] == 3528 and "gpu_mhz" not in jetson.parse_tegrastats(older)
    assert jetson.parse_tegrastats("") == {}


def test_tegrastats_is_run_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "tegrastats"
    tool.write_text(f"#!/bin/sh\nwhile true; do echo '{LINE}'; sleep 0.1; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert jetson.tegrastats(timeout_s=60)["gpu_mhz"] == 306
    tool.unlink()
    assert jetson.tegrastats() == {}


def test_jetson_stats_comes_first_and_may_fail(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Jtop:
        stats = {"nvp model": "25W", "jetson_clocks": "OFF"}

        def __enter__(self) -> Jtop:
            return self

        def __exit__(self, *error: object) -> None: ...

    assert jetson.from_jetson_stats() is None  # not installed
    module = types.ModuleType("jtop")
    module.__spec__ = types.SimpleNamespace(name="jtop")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "jtop", module)
    module.jtop = Jtop  # type: ignore[attr-defined]
    monkeypatch.setattr(jetson, "ROOT", tree)
    assert jetson.power_mode(tree) == (True, "25W; MAXN_SUPER is faster: sudo nvpmodel -m 2", "")
    module.jtop = lambda: (_ for _ in ()).throw(OSError("no service"))  # type: ignore[attr-defined]
    assert jetson.from_jetson_stats() is None and jetson.power_mode(tree)[1].startswith("15W")


def test_the_doctor_asks_a_jetson_only_on_a_jetson(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(
        doctoring,
        "_run",
        lambda name, needed, full: ran.append(name) or doctoring.Check(name, True, ""),
    )
    doctor()
    assert "board" not in ran and "unified-memory" not in ran and "bitsandbytes" in ran
    ran.clear()
    monkeypatch.setattr(jetson, "model", lambda root=tree: "NVIDIA Jetson Orin Nano")
    doctor()
    assert {"board", "swap", "power-mode", "clocks", "unified-memory"} <= set(ran)
    ran.clear()
    doctor("jetson")
    assert set(ran) == {
        *doctoring.ALWAYS,
        *checks_by_target()["jetson"][0],
        *checks_by_target()["jetson"][1],
    }


def test_a_broken_nf4_kernel_on_jetpack_6_says_how_to_build_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes #1930: it imports, and ends at the first kernel."""
    answer = (False, "Error named symbol not found at line 233 in file /src/csrc/ops.cu", "")
    monkeypatch.setattr(doctoring, "run_kernel", lambda command: answer)
    monkeypatch.setattr(jetson, "release", lambda root=tree: (36, "4.3"))
    (check,) = doctor(names=["bitsandbytes"], full=True)
    assert (
        check.ok is False
        and "named symbol not found" in check.detail
        and "COMPUTE_CAPABILITY=87" in check.fix
    )
    monkeypatch.setattr(jetson, "release", lambda root=tree: (39, "2.0"))
    (check,) = doctor(names=["bitsandbytes"], full=True)
    assert "COMPUTE_CAPABILITY" not in check.fix
