"""The device table, devices of the user's own, and this machine."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.core.errors import ConfigError
from ondevice.planning import devices
from ondevice.planning import devices as machine
from ondevice.planning.devices import GIB, device_table, find_device

MINE = """
my-phone:
  description: a phone
  kind: phone
  memory_gib: 6
  usable_fraction: 0.4
  rule: measured with my app
  bandwidth_gb_s: 30
  tflops: {float32: 0.1}
  sustained: 0.5
"""


def test_a_phone_lends_one_app_half_of_its_memory() -> None:
    phone = find_device("oneplus-12")
    assert (phone.kind, phone.torch_device) == ("phone", "cpu")
    assert phone.memory_bytes == 12 * GIB and phone.usable_bytes == 6 * GIB
    assert "50% of 12 GiB" in phone.rule


@pytest.mark.parametrize("name", list(device_table()))
def test_every_device_says_how_much_is_usable_and_why(name: str) -> None:
    device = find_device(name)
    assert 0 < device.usable_bytes <= device.memory_bytes
    assert device.bandwidth_bytes_s and len(device.rule) > 20
    assert device.to_dict()["usable_bytes"] == device.usable_bytes


def test_an_unknown_device_is_named_with_the_list_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        find_device("oneplus12")
    assert "did you mean 'oneplus-12'" in caught.value.message
    assert "orin-nano-8gb" in str(caught.value.expected)
    with pytest.raises(ConfigError) as caught:
        find_device("zzz")
    assert "did you mean" not in caught.value.message


def test_a_device_file_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(MINE + MINE.replace("my-phone", "oneplus-12"))
    device = find_device("my-phone", file)
    assert device.usable_bytes == int(6 * GIB * 0.4)
    assert device.flops_s == {"float32": pytest.approx(0.05e12)}
    assert device.bandwidth_bytes_s == pytest.approx(15e9)
    assert find_device("oneplus-12", file).memory_bytes == 6 * GIB
    assert "my-phone" in device_table(file) and "my-phone" not in device_table()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("- a\n- b", "expected a device name"),
        (MINE.replace("memory_gib", "memory_gb"), "did you mean 'memory_gib'"),
        (MINE.replace("0.4", "1.4"), "my-phone: 'usable_fraction'"),
        (re.sub(r"memory_gib: [0-9.]+", "memory_gib: .inf", MINE), "my-phone: 'memory_gib'"),
        (re.sub(r"memory_gib: [0-9.]+", "memory_gib: 1.0e+308", MINE), "my-phone: 'memory_gib'"),
    ],
)
def test_a_wrong_device_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_device("my-phone", file)
    assert "devices.yaml" in caught.value.message and re.search(message, str(caught.value))


def test_a_missing_device_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_device("this", tmp_path / "absent.yaml")
    assert caught.value.expected == "a YAML file of devices"


def test_this_machine_is_measured() -> None:
    import psutil

    device = find_device("this-cpu")
    assert 0 < device.usable_bytes < device.memory_bytes <= psutil.virtual_memory().total
    assert (
        device.flops_s["float32"] > 1e8
        and device.bandwidth_bytes_s
        and device.bandwidth_bytes_s > 1e8
    )
    assert device.cores == machine.cores() >= 1


def test_a_gpu_of_the_table_brings_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = machine.parse_tool("NVIDIA H200, 143771, 143000\n")
    monkeypatch.setattr(devices, "gpus", lambda: planned)
    device = find_device("this")
    assert device.torch_device == "cuda" and device.memory_bytes == 143771 << 20
    assert device.usable_bytes == pytest.approx((143000 << 20) * 0.9, abs=1)
    assert device.flops_s == find_device("h200").flops_s
    assert find_device("this-cpu").torch_device == "cpu"


def test_a_jetson_shares_the_memory_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = machine.parse_tool("Orin (nvgpu), [N/A], [N/A]\n")
    assert gpu.memory_bytes is None
    monkeypatch.setattr(devices, "gpus", lambda: [gpu])
    device = find_device("this-cuda")
    assert device.kind == "board" and device.memory_bytes == machine.total_bytes()
    assert device.flops_s == find_device("orin-nano-8gb").flops_s


def test_the_device_this_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", list)
    with pytest.raises(ConfigError) as caught:
        find_device("this-cuda")
    assert caught.value.expected == "an NVIDIA GPU"
    assert find_device("this").torch_device == "cpu"


@pytest.mark.parametrize(
    ("limit", "expected"), [("2000", (2000, 500)), ("max", (None, 0)), (str(1 << 62), (None, 0))]
)
def test_a_containers_limit_counts(
    tmp_path: Path, limit: str, expected: tuple[int | None, int]
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 400\n")
    assert machine._container(tmp_path) == expected


def limited(folder: Path, limit: str, used: int, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(limit)
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(str(used))
    (folder / "memory.stat").write_text("inactive_file 0\n")


@pytest.mark.parametrize("v1", [False, True])
def test_the_limit_of_a_nested_cgroup_counts(tmp_path: Path, v1: bool) -> None:
    """`systemd-run --scope -p MemoryMax=2G`, or a job of Slurm: the limit is not at the root."""
    mounted = tmp_path / "memory" if v1 else tmp_path
    line = "4:memory:" if v1 else "0::"
    limited(mounted / "user.slice" / "run-1.scope", "2000", 100, v1)
    own = f"{line}/user.slice/run-1.scope\n"
    assert machine._container(tmp_path, own) == (2000, 100)
    assert machine._container(tmp_path, f"{line}/user.slice/run-1.scope/leaf\n") == (2000, 100)
    assert machine._container(tmp_path, f"{line}/other\n") == (None, 0)
    limited(mounted / "user.slice", "5000", 4500, v1)  # the others in it leave 500
    assert machine._container(tmp_path, own) == (2000, 1500)
    assert machine._container(tmp_path, f"{line}/../../etc\n")[0] is None


def test_the_address_space_that_this_process_may_have_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ulimit -v`: what the process has mapped already is taken."""
    monkeypatch.setattr(machine, "_own_limit", lambda: 1000)
    assert machine.total_bytes() == 1000
    assert machine.available_bytes() == 0


def test_the_limit_of_this_process_is_the_shell_s() -> None:
    code = "from ondevice.planning.devices import total_bytes; print(total_bytes())"
    line = f"ulimit -v 4000000; {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert int(done.stdout) == min(4_000_000 << 10, machine.total_bytes())


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, "abc"), ("", ""), ("-1", ""), ("1", "b"), ("2, 0", "ca"), ("0,7,1", "a"), ("0,x", "a"),
        ("GPU-8932f937", "abc"),
    ],
)  # fmt: skip
def test_gpus_that_the_environment_hides_are_not_planned_with(chosen, names) -> None:
    """A plan for a GPU that CUDA does not show ended in PyTorch's error."""
    listed = [machine.Gpu(name, 1 << 30, 1 << 30) for name in "abc"]
    assert "".join(gpu.name for gpu in machine.visible(listed, chosen)) == names
