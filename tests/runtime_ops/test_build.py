"""Compiling at first use: the cache, what its key depends on, and refusals."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ondevice.core.errors import MissingPackageError, StorageError
from ondevice.runtime_ops import build


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """The real compiler behind a script that notes its calls, and two small sources for it."""
    try:
        real = build.find_compiler()
    except MissingPackageError:
        pytest.skip("no C++ compiler")
    log, script, sources = tmp_path / "calls", tmp_path / "cxx", tmp_path / "csrc"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> {log}\nexec {real} "$@"\n')
    script.chmod(0o755)
    sources.mkdir()
    (sources / "c_api.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int seven() { return 7; }\n'
    )
    (sources / "generator.cpp").write_text("int unused;\n")
    (sources / "layer_adam.cpp").write_text("int another;\n")
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", sources)
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_compiles_once_and_leaves_nothing_else(compiler, tmp_path):
    path = build.build_library()
    calls = compiler()
    names = [call.split("-c ")[1].split()[0].rsplit("/")[-1] for call in calls[:3]]
    assert names == ["c_api.cpp", "generator.cpp", "layer_adam.cpp"]
    assert ["-ffp-contract=off" in call for call in calls[:3]] == [False, True, True]
    assert ctypes.CDLL(str(path)).seven() == 7
    assert build.build_library() == path and len(compiler()) == len(calls)
    assert os.listdir(tmp_path / "cache") == [path.name]


def test_processes_that_ask_at_once_compile_once(compiler):
    with ThreadPoolExecutor(3) as pool:
        paths = {path.result() for path in [pool.submit(build.build_library) for _ in range(3)]}
    assert len(paths) == 1 and len(compiler()) == 4  # three sources, and the library
    assert os.listdir(build.cache_root()) == [paths.pop().name]


def test_the_key_follows_flags_sources_and_processor(compiler, monkeypatch):
    paths = {build.build_library()}
    assert all("-march=native" in call for call in compiler()[:3])
    monkeypatch.setattr(build, "OPTIMISE", (*build.OPTIMISE, "-g0"))
    paths.add(build.build_library())
    monkeypatch.setattr(build, "_processor", lambda: "another")
    paths.add(build.build_library())
    (build.SOURCES / "header.h").write_text("// the key covers headers too\n")
    paths.add(build.build_library())
    assert len(paths) == 4


def test_no_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingPackageError) as error:
        build.find_compiler()
    assert "no-such-compiler" in str(error.value) and error.value.hint


def test_a_failing_compiler_shows_its_words(compiler):
    (build.SOURCES / "c_api.cpp").write_text('#error "what is a vector"\n')
    with pytest.raises(MissingPackageError) as error:
        build.build_library()
    assert "what is a vector" in str(error.value)


def test_a_cache_that_cannot_be_written_is_a_storage_error(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(StorageError) as error:
        build.build_library()
    assert "ONDEVICE_CACHE" in str(error.value.hint)
