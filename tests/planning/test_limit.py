"""--memory-limit: sizes as text, plans of packed weights, and a limit that holds, in a cgroup where one can be made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.core.config import ExportConfig, TrainConfig, parse_bytes
from ondevice.core.errors import ConfigError, DoesNotFitError
from ondevice.core.registry import method_config
from ondevice.offload.device import memory_errors
from ondevice.planning.devices import find_device
from ondevice.planning.estimate import plan, weight_bytes
from ondevice.planning.fits import memory_limit

LIMIT = 1200 << 20
ROWS = '{"text": "a b c d", "label": "yes"}\n{"text": "c d e", "label": "no"}\n'


@given(
    st.integers(1, 10**6),
    st.sampled_from(["", "B", "K", "KB", "KiB", "MiB", "GiB", "gib", "TB", " MiB"]),
)
def test_a_size_is_a_number_with_a_unit(number, unit) -> None:
    scale = {
        "": 1,
        "b": 1,
        "k": 10**3,
        "kb": 10**3,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tb": 10**12,
    }
    assert parse_bytes(f"{number}{unit}") == number * scale[unit.strip().lower()]


@pytest.mark.parametrize("text", ["", "6 cows", "GiB", "-1GiB", "1iB", "1.GiB", "1e9"])
def test_an_invalid_memory_size_is_refused(text) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse({"memory_limit_bytes": text})
    assert "memory_limit_bytes" in str(caught.value)


def test_a_run_file_takes_text_and_numbers() -> None:
    assert TrainConfig.parse({"memory_limit_bytes": "1.5GiB"}).memory_limit_bytes == 3 << 29
    assert TrainConfig.parse({"memory_limit_bytes": 3 << 29}).memory_limit_bytes == 3 << 29
    assert TrainConfig().memory_limit_bytes is None
    with pytest.raises(ConfigError):
        TrainConfig.parse({"memory_limit_bytes": "100"})


def test_a_memory_limit_reduces_a_devices_usable_memory() -> None:
    board = find_device("orin-nano-8gb")
    assert board.within(None) is board and board.within(64 << 30) is board
    planned = board.within(4 << 30)
    assert planned.usable_bytes == 4 << 30 and planned.limited and "--memory-limit" in planned.rule


@pytest.mark.parametrize(("quantize", "gib"), [("nf4", 3.60), ("int8", 6.5), ("none", 12.55)])
def test_llama2_7b_s_weights_are_what_the_paper_says(quantize, gib) -> None:
    """P-RGE, Table 9 (in GiB): NF4 3.50, INT8 6.52, FP16 12.56."""
    dims = llama2_7b()
    assert sum(weight_bytes(dims, "bfloat16", quantize)) / 2**30 == pytest.approx(gib, rel=0.02)


def llama2_7b():
    from ondevice.core.dims import ModelDims

    return ModelDims("llama", 32, 4096, 11008, 32, 32, 128, 32000, False, False, 1e4, 1e-5, 4096)


def test_an_nf4_plan_of_7b_fits_a_board_and_a_step_within_4_5_gb() -> None:
    export = ExportConfig(target="jetson", quantize="nf4", lengths_tokens=(128,), batch_size=2)
    settings = {
        "batch_size": 2,
        "length_tokens": 128,
        "dtype": "bfloat16",
        "export": export,
        "runtime": "torch",
    }
    planned = plan(
        llama2_7b(), method_config("prge", {"queries": 1}), device="orin-nano-8gb", **settings
    )
    on_the_gpu = sum(
        size for part, size in planned.parts.items() if part not in ("runtime", "tokenizer")
    )
    assert planned.fits and on_the_gpu < 4.5e9 and planned.parts["dense matrix"] == 4096 * 11008 * 2


def test_packed_weights_are_planned_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    from ondevice.models.load import tiny_model
    from ondevice.nn.packed import pack_model

    for quantize in ("nf4", "int8"):
        loaded = tiny_model("llama", hidden=256, intermediate=512)
        pack_model(loaded.family, quantize)
        tables = sum(p.nbytes for name, p in loaded.model.named_parameters() if "_proj" not in name)
        matrices = [
            loaded.family.linear(i, t).matrix
            for i in range(2)
            for t in loaded.family.linear_targets
        ]
        held = [
            tensor
            for one in matrices
            for name, tensor in one.tensors().items()
            if not name.startswith("quant_state")
        ]
        held += [one.scale for one in matrices if quantize == "int8"]
        kept = sum(
            tensor.nbytes
            for tensor in held
            if tensor.numel() not in (16, 256) or tensor.dtype != torch.float32
        )
        planned = sum(weight_bytes(loaded.dims, "float32", quantize))
        assert planned == pytest.approx(tables + kept, rel=0.01), quantize


def test_nothing_is_loaded_if_the_plan_does_not_fit(tmp_path, monkeypatch) -> None:
    from ondevice.api.runfile import RunConfig
    from ondevice.api.train import train
    from ondevice.training import fit

    monkeypatch.setattr(fit, "load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    (tmp_path / "rows.jsonl").write_text(ROWS)
    values = {
        "model.source": "tiny:llama",
        "method.name": "prge",
        "data.path": str(tmp_path / "rows.jsonl"),
        "train.memory_limit_bytes": "64MiB",
    }
    with pytest.raises(DoesNotFitError) as caught:
        train(RunConfig.load(None, values))
    text = str(caught.value)
    assert (
        re.search(r"does not fit the memory limit; parts: runtime \d+ MiB", text)
        and "at most 64.0 MiB" in text
    )
    assert all(
        part in text
        for part in ("weights", "adapter", "activations", "logits", "a higher --memory-limit")
    )


def test_other_errors_pass_and_the_limit_is_taken_back() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    planned = plan(
        "tiny:llama", method_config("prge"), batch_size=1, length_tokens=16, device="this-cpu"
    )
    with pytest.raises(RuntimeError, match="shapes"), memory_limit(64 << 30, planned):
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
        raise RuntimeError("shapes do not match")
    limit = 64 << 30
    with pytest.raises(DoesNotFitError) as caught, memory_limit(limit, planned):
        raise MemoryError
    assert caught.value.expected == "at most 64.00 GiB (--memory-limit)"
    # Also if a method says it first.
    refused = pytest.raises(DoesNotFitError)
    with refused as caught, memory_limit(limit, planned), memory_errors("a step", "less"):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")
    assert caught.value.expected == "at most 64.00 GiB (--memory-limit)"
    with pytest.raises(DoesNotFitError) as caught, memory_limit(limit, planned):
        raise DoesNotFitError("by hand")
    assert caught.value.message == "by hand"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_in_mlx_the_plan_is_held_to_the_limit_and_the_run_is_not(
    tmp_path, capsys, caplog, monkeypatch
) -> None:
    pytest.importorskip("mlx.core")
    from ondevice.models import save_tiny
    from ondevice.planning import fits as limit
    from tests.cli.command import CommandLine

    monkeypatch.setattr(limit, "own_memory", lambda _: pytest.fail("MLX would end by a signal"))
    (tmp_path / "rows.jsonl").write_text(ROWS)
    model, ondevice = save_tiny(tmp_path / "model", "qwen2", 1), CommandLine(capsys)
    words = [
        "train",
        "--method",
        "mesp",
        "--backend",
        "mlx",
        "--model",
        model,
        "--data",
        tmp_path / "rows.jsonl",
    ]
    words += ["--steps", 1, "--batch-size", 2, "--max-length", 32]
    done = ondevice(*words, "--out", tmp_path / "one", "--memory-limit", "64MiB")
    assert done.code == DoesNotFitError.exit_code and "does not fit the memory limit" in done.err
    assert not any("MLX" in message for message in caplog.messages)
    assert not (tmp_path / "one").exists()
    done = ondevice(*words, "--out", tmp_path / "two", "--memory-limit", "900MiB")
    assert done.code == 0, done.err
    assert any("limit MLX" in message for message in caplog.messages)


class Cgroup:
    """A group of this test's own, version 2 or 1, with a limit that the kernel keeps by killing."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        two = (folder / "memory.max").exists()
        (folder / ("memory.max" if two else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        for name in ("memory.swap.max", "memory.swappiness"):
            if (folder / name).exists():
                (folder / name).write_text("0")
        self.peak = folder / ("memory.peak" if two else "memory.max_usage_in_bytes")

    def killed(self) -> int:
        """Processes that the kernel ended in it."""
        for name in ("memory.events", "memory.oom_control"):
            if (self.folder / name).exists():
                lines = (self.folder / name).read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0


def kept(group: Cgroup) -> bool:
    """True if the kernel keeps the group's limit; some sandboxes have the files only."""
    join = (
        f"open({str(group.folder / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid()))"
    )
    done = subprocess.run([sys.executable, "-c", f"{join}; b'x' * (200 << 20)"], check=False)
    return done.returncode == -9


@pytest.fixture
def group():
    """A group of our own at the top of either version's tree; None if its memory cannot be limited there."""
    for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):
        if not any(
            (Path(base) / name).exists() for name in ("cgroup.controllers", "memory.limit_in_bytes")
        ):
            continue  # no tree of groups
        folder = Path(base) / f"ondevice-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not kept(Cgroup(folder, 64 << 20)):
                raise OSError("the kernel counts nothing in it")
            folder.rmdir()  # the probe was counted
            folder.mkdir()
            actual = Cgroup(folder, LIMIT + (300 << 20))
        except OSError:
            folder.rmdir()
            continue
        yield actual
        folder.rmdir()
        return
    yield None


def limited_runs(
    tmp_path: Path, *runs: tuple[str, ...], group: Cgroup | None
) -> subprocess.CompletedProcess[str]:
    """`ondevice train` of the tiny model, once with each of the options, in a process that enters the group first. Its
    last line gives the exit codes."""
    (tmp_path / "rows.jsonl").write_text(ROWS * 2048)
    words = ["train", "--model", "tiny:llama", "--method", "lora", "--steps", "2"]
    words += ["--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "run"), "--overwrite"]
    words += ["--memory-limit", str(LIMIT)]
    enter = f"open({str(group.folder / 'cgroup.procs')!r}, 'w').write('0')" if group else ""
    code = f"""{enter}
import sys
sys.argv[0] = "ondevice"
from ondevice.cli.app import run
codes = []
for words in {[[*words, *more] for more in runs]}:
    try:
        run(words)
    except SystemExit as ended:
        codes.append(ended.code or 0)
print(*codes)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


FITS = ("--batch-size", "2")
TOO_MUCH = ("--batch-size", "4096", "--max-length", "512", "--force")


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts mappings on Linux alone"
)
def test_the_limit_holds_and_the_kernel_has_nothing_to_end(
    tmp_path: Path, group: Cgroup | None
) -> None:
    """A run that fits ends well; one that does not ends by its own error. Where a cgroup can be made, below its limit,
    not by a kill; elsewhere RLIMIT_DATA alone is seen to hold."""
    done = limited_runs(tmp_path, FITS, TOO_MUCH, group=group)
    assert done.stdout.splitlines()[-1:] == [f"0 {DoesNotFitError.exit_code}"], done.stderr
    assert "an allocation beyond the memory limit was refused; planned: activations" in done.stderr
    assert "at most 1.17 GiB (--memory-limit)" in done.stderr and re.search(
        r"runtime \d+ MiB", done.stderr
    )
    if group:
        assert group.killed() == 0
        assert int(group.peak.read_text()) <= LIMIT + (300 << 20)


@pytest.mark.nightly
@pytest.mark.slow
def test_without_the_limit_the_kernel_ends_the_process(
    tmp_path: Path, group: Cgroup | None
) -> None:
    """The group's limit is a real one."""
    if group is None:
        pytest.skip("no cgroup can be made here; the limit is seen to hold by RLIMIT_DATA alone")
    done = limited_runs(tmp_path, (*TOO_MUCH, "--memory-limit", "900GiB"), group=group)
    assert done.returncode == -9 and group.killed() >= 1
