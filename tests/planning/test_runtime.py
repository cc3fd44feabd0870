"""The runtime of a plan is measured by a process without a model, and kept for the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ondevice.core.capabilities import Offloads
from ondevice.core.registry import method, method_config, method_names
from ondevice.models import read_dims
from ondevice.planning import runtime
from ondevice.planning.runtime import FILE, Runtime, product_rate, runtime_of

PROGRAM = """
import json, sys
import ondevice
from ondevice.training.metrics import status_bytes
rows = [{"text": f"row number {i}", "label": "ab"[i % 2]} for i in range(12)]
plan = ondevice.plan("tiny:llama", rows, method=sys.argv[1])
run = ondevice.train("tiny:llama", rows, method=sys.argv[1], steps=3, out="run")
print(json.dumps([plan.total_bytes, plan.parts["runtime"], status_bytes("VmHWM")]))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a process that has measured nothing."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "_measured", {})
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", object())
    return tmp_path / FILE


def test_a_process_with_a_model_takes_what_an_earlier_one_measured(cache: Path) -> None:
    assert runtime_of("mesp") is None
    runtime._record("mesp", Runtime(700, 0.2))
    runtime._record("mesp", Runtime(800, 0.1))
    runtime._record("lora", Runtime(900, 0.3))
    assert runtime_of("mesp") == Runtime(700, 0.1) and runtime_of("lora") == Runtime(900, 0.3)
    assert runtime_of("prge") is None
    assert all("torch " in key for key in json.loads(cache.read_text()))


@pytest.mark.parametrize("text", ["", "[1]", '{"mesp": [1]}', '{"mesp": ["a", 2]}', "\0"])
def test_a_damaged_record_is_as_none(cache: Path, text: str) -> None:
    cache.write_text(text)
    assert runtime_of("mesp") is None
    runtime._record("mesp", Runtime(700, 0.2))
    assert runtime_of("mesp") == Runtime(700, 0.2)


def test_other_packages_have_another_record(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime._record("mesp", Runtime(700, 0.2))
    monkeypatch.setattr(runtime, "version", lambda name: "0")
    assert runtime_of("mesp") is None


def test_every_method_has_one_that_is_measured_for_it() -> None:
    assert {runtime._stand_in(method) for method in method_names()} <= set(method_names())
    assert runtime._stand_in("slideformer") == "full"


def test_a_product_is_measured() -> None:
    assert product_rate(64, 64, 128) > 1e6


def test_two_blocks_of_a_models_sizes_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(runtime, "_blocks", {})
    monkeypatch.setattr(runtime, "_seconds", lambda step: (step(), 0.5)[1])
    dims = replace(read_dims("tiny:qwen3"), layers=7)
    # Two blocks take half a second for 24 tokens a row and for 16: 0.6 s at the mean rate for 24.
    assert runtime.blocks_s(dims, method_config("mesp"), 2, 24) == pytest.approx(0.6 * 7 / 2)
    assert runtime.blocks_s(dims, method_config("slideformer"), 2, 24) is None
    wide = replace(dims, intermediate=1 << 20)
    assert runtime.blocks_s(wide, method_config("mesp"), 2, 24) is None


def test_the_steps_of_every_method_that_does_not_offload_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(runtime, "_blocks", {})
    dims = read_dims("tiny:qwen3")
    measured = {
        name: runtime.blocks_s(dims, method(name).for_training(method_config(name)), 2, 24)
        for name in method_names()
        if "torch" in method(name).sessions
    }
    offload = {name for name in measured if method(name).capability(Offloads)}
    assert offload == {name for name, seconds in measured.items() if seconds is None}


@pytest.mark.parametrize("sizes", [(2_000_000, 16), (1, 100_000), (3, 200)])
def test_a_plan_never_takes_the_tokens_of_its_run(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(runtime, "_blocks", {})
    steps = []
    monkeypatch.setattr(runtime, "_measure_blocks", lambda *asked: steps.append(asked[2:]) or 1.0)
    seconds = runtime.blocks_s(read_dims("tiny:qwen3"), method_config("mesp"), *sizes)
    ((rows, length_tokens),) = steps
    assert 0 < rows * length_tokens <= runtime.MOST_TOKENS
    assert seconds == pytest.approx(sizes[0] * sizes[1] / (rows * length_tokens))


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the kernel's high-water mark"
)
@pytest.mark.parametrize("method", ["mesp", pytest.param("lora", marks=pytest.mark.nightly)])
def test_the_plan_of_a_process_is_what_it_takes(tmp_path: Path, method: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, method],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"ONDEVICE_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    planned, part, peak = json.loads(done.stdout.splitlines()[-1])
    assert planned == pytest.approx(peak, rel=0.1)
    recorded = json.loads((tmp_path / "cache" / FILE).read_text())
    assert [size for size, _ in recorded.values()] == [part]
