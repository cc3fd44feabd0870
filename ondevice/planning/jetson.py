"""Checks of a Jetson: the board, its swap, power mode and clocks.

jetson-stats comes first, if it is installed and its service responds; then the files of NVIDIA's
own tools, and tegrastats for figures that no file has. Each function takes the root of the file
system, so that a copied tree works, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

Outcome = tuple[bool | None, str, str]
"""True if it works (None: not installed), the detail to show, and the command that would help."""

ROOT = Path("/")
MODEL = ("proc/device-tree/model", "sys/firmware/devicetree/base/model")
GPU_NAMES = ("gpu", "ga10b", "gv11b", "gp10b")
JETPACK = {35: "JetPack 5", 36: "JetPack 6", 38: "JetPack 7", 39: "JetPack 7"}
"""By release of L4T."""
NOT_HERE = (None, "not a Jetson", "")
SWAP_FIX = (
    "sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && "
    "sudo swapon /swapfile   (on an NVMe disk; idle memory then makes room for training)"
)


def read(path: Path) -> str | None:
    """Read a file's text without zero bytes and surrounding space; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").replace("\0", "").strip()
    except OSError:
        return None


def model(root: Path = ROOT) -> str | None:
    """Return the board's name; None if this is not a Jetson."""
    for name in MODEL:
        text = read(root / name)
        if text and ("Jetson" in text or "Tegra" in text or "Orin" in text):
            return text
    return None


def release(root: Path = ROOT) -> tuple[int, str] | None:
    """Read the major release of L4T and its revision from /etc/nv_tegra_release; None without one."""
    match = re.search(
        r"# R(\d+) \(release\), REVISION: ([\d.]+)", read(root / "etc/nv_tegra_release") or ""
    )
    if match:
        return (int(match[1]), match[2])
    return None


def board(root: Path = ROOT) -> Outcome:
    """Check that the board has a JetPack that this package runs with."""
    name = model(root)
    l4t = release(root)
    if name is None:
        return NOT_HERE
    if l4t is None:
        return False, f"{name}, and no /etc/nv_tegra_release", "sudo apt-get install nvidia-jetpack"
    major, revision = l4t
    jetpack = JETPACK.get(major, "a JetPack that is not known here")
    detail = f"{name}, L4T R{major}.{revision}, {jetpack}"
    return (
        major >= 36,
        detail,
        "flash JetPack 6 or 7: older ones have no Python and CUDA that this package runs with",
    )


def swap(root: Path = ROOT) -> Outcome:
    """Check for swap on a disk: zram only compresses the memory that CPU and GPU share."""
    if model(root) is None:
        return NOT_HERE
    lines = (read(root / "proc/swaps") or "").splitlines()[1:]
    sizes: dict[str, int] = {}
    for line in lines:
        name, _, kibibytes, *_ = line.split()
        kind = "zram" if "zram" in name else "disk"
        sizes[kind] = sizes.get(kind, 0) + (int(kibibytes) << 10)
    listed = ", ".join(f"{size / 2**30:.1f} GiB on {kind}" for kind, size in sizes.items())
    if "disk" in sizes:
        return True, listed, ""
    return (
        None,
        f"{listed or 'no swap'}: nothing else that runs can be moved out of training's way",
        SWAP_FIX,
    )


def power_mode(root: Path = ROOT) -> Outcome:
    """Report the power mode, and a faster one if the board has it."""
    if model(root) is None:
        return NOT_HERE
    modes = dict(
        re.findall(
            r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)\s*>",
            read(root / "etc/nvpmodel.conf") or "",
        )
    )
    stats = None
    if root == ROOT:
        stats = from_jetson_stats()
    name = None
    if stats:
        name = stats.get("nvp model")
    if name is None:
        match = re.search(r"pmode:0*(\d+)", read(root / "var/lib/nvpmodel/status") or "")
        name = None
        if match:
            name = modes.get(match[1], f"mode {match[1]}")
    if name is None:
        return False, "the power mode cannot be read", "sudo nvpmodel -q"
    fastest = max(modes.items(), key=lambda item: _watts(item[1]), default=None)
    if fastest is not None and _watts(fastest[1]) > _watts(name):
        return True, f"{name}; {fastest[1]} is faster: sudo nvpmodel -m {fastest[0]}", ""
    return True, name, ""


def _watts(name: str) -> float:
    """Rank a mode by its watts; MAXN has no cap."""
    if name.upper().startswith("MAXN"):
        return 1e9 + name.upper().endswith("SUPER")
    match = re.search(r"(\d+)\s*W", name)
    if match:
        return float(match[1])
    return 0.0


def clocks(root: Path = ROOT) -> Outcome:
    """Report the GPU's clock now, its range, and if jetson_clocks keeps it at the top."""
    if model(root) is None:
        return NOT_HERE
    folder = gpu_folder(root)
    if folder is None:
        figures = tegrastats() if root == ROOT else {}
        if "gpu_mhz" in figures:
            return True, f"GPU at {figures['gpu_mhz']:.0f} MHz (tegrastats)", ""
        return False, "the GPU's clock cannot be read", "sudo jetson_clocks --show"
    now, low, high = (_hertz(folder / name) for name in ("cur_freq", "min_freq", "max_freq"))
    all_clocks = [
        int(word)
        for word in (read(folder / "available_frequencies") or "").split()
        if word.isdigit()
    ]
    words = f"GPU at {now / 1e6:.0f} MHz, {low / 1e6:.0f} to {high / 1e6:.0f}"
    if all_clocks and max(all_clocks) > high:
        words += f" (the chip reaches {max(all_clocks) / 1e6:.0f}; the power mode caps it)"
    if low < high:
        return (
            True,
            f"{words}, {read(folder / 'governor') or 'unknown governor'}; sudo jetson_clocks holds it up",
            "",
        )
    return True, f"{words}, held", ""


def gpu_folder(root: Path = ROOT) -> Path | None:
    """Find the GPU's folder of clocks, among all devices with clocks."""
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        name = read(folder / "device/of_node/name") or folder.name.rpartition(".")[2]
        if name in GPU_NAMES or folder.name.startswith("gpu"):
            return folder
    return None


def _hertz(path: Path) -> int:
    text = read(path)
    if text and text.isdigit():
        return int(text)
    return 0


def from_jetson_stats() -> dict[str, Any] | None:
    """Ask jetson-stats' service; None if it is not installed or does not respond."""
    if importlib.util.find_spec("jtop") is None:
        return None
    try:
        with importlib.import_module("jtop").jtop() as jetson:
            return dict(jetson.stats)
    except Exception:  # its own kinds: no service, another version, no right to its socket
        return None


def tegrastats(timeout_s: float = 5.0) -> dict[str, float]:
    """Run NVIDIA's own tool for one line; empty if it is not installed."""
    try:
        with subprocess.Popen(
            ["tegrastats", "--interval", "100"], stdout=subprocess.PIPE, text=True
        ) as process:
            timer = threading.Timer(timeout_s, process.kill)
            timer.start()
            try:
                line = process.stdout.readline() if process.stdout is not None else ""
            finally:
                timer.cancel()
                process.kill()
    except OSError:
        return {}
    return parse_tegrastats(line)


def parse_tegrastats(line: str) -> dict[str, float]:
    """Parse a line: memory, swap (MiB), GPU load (%), clock (MHz), temperatures (C), power (mW)."""
    figures: dict[str, float] = {}
    for name, key in (("RAM", "memory"), ("SWAP", "swap")):
        if match := re.search(rf"{name} (\d+)/(\d+)MB", line):
            figures[f"{key}_used_mib"] = float(match[1])
            figures[f"{key}_total_mib"] = float(match[2])
    if match := re.search(r"GR3D_FREQ (\d+)%(?:@\[?(\d+))?", line):
        figures["gpu_percent"] = float(match[1])
        if match[2]:
            figures["gpu_mhz"] = float(match[2])
    for name, value in re.findall(r"\b([A-Za-z]\w*)@([-\d.]+)C\b", line):
        figures[f"{name.lower()}_c"] = float(value)
    for name, value in re.findall(r"\b((?:VDD|VIN|POM)_\w+) (\d+)(?:mW)?/", line):
        figures[f"{name.lower()}_mw"] = float(value)
    return figures
