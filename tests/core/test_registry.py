"""Methods are found in their folders and in other packages, and nowhere else is one named."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.core.capabilities import Replays
from ondevice.core.errors import ConfigError, MissingPackageError
from ondevice.core.method import MethodSpec
from ondevice.core.registry import method, method_config, method_names, methods, open_session
from tests.core.foreign import METHOD, install
from tests.core.names import named_in, named_in_script, offences
from tests.warm import Warm

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_is_a_method_with_a_complete_spec() -> None:
    folders = {
        path.name
        for path in (ROOT / "ondevice" / "methods").iterdir()
        if (path / "__init__.py").is_file()
    }
    assert {name.replace("-", "_") for name in method_names()} == folders
    for spec in methods():
        assert isinstance(spec, MethodSpec) and spec.summary and spec.config().name == spec.name
        assert callable(spec.memory().step) and callable(spec.cost())
        assert spec.sessions, spec.name
        for opener in (*spec.sessions.values(), *spec.programs.values()):
            assert opener() is not None, spec.name
        assert bool(spec.capability(Replays)) == (spec.order == "zeroth"), spec.name
        if spec.memory().host is not None:
            assert spec.memory().host_note and spec.memory().host_hint, spec.name


def test_an_unknown_method_and_a_key_of_another_method_are_refused() -> None:
    with pytest.raises(ConfigError) as told:
        method("prgee")
    assert told.value.expected == ", ".join(method_names())
    with pytest.raises(ConfigError) as told:
        method_config("lora", {"queries": 2})
    assert "'queries'" in told.value.message and "mezo, prge" in told.value.message


def test_a_missing_framework_is_reported_however_the_session_is_opened(monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "mlx" else find(name, *more),
    )
    spec = next(spec for spec in methods() if "mlx" in spec.sessions)
    for opened in (spec.open_session, open_session):
        with pytest.raises(MissingPackageError):
            opened(None, spec.config(), 0, backend="mlx")


def test_no_line_outside_its_folder_names_a_method() -> None:
    actual = offences(ROOT)
    assert not actual, "\n".join(actual)


@pytest.mark.parametrize(
    "line",
    [
        'if config.name == "prge":\n    pass',
        'if manifest.method.get("name") != "mesp":\n    pass',
        'KNOWN = ("lsp", "slideformer")',
        'TABLE = {"mezo": 1}',
        "from ondevice.methods.prge.config import PrgeConfig",
        "def f():\n    import ondevice.methods.lora.torch",
        'if kind in ("full", "lora"):\n    pass',
        'if name == "mezo":\n    pass',
        'raise ConfigError("try --method revffn or slideformer")',
    ],
)
def test_the_count_sees_a_name(line: str) -> None:
    assert named_in(line)
    assert not named_in('"""Docstrings say prge and mezo."""\nhint = "a full model, with its LoRA"')


def test_the_count_sees_a_name_in_the_page() -> None:
    assert named_in_script('const usual = method ?? "prge";') == [(1, "names prge")]
    assert named_in_script('`${job.method ?? "prge"}, ${job.state}`')
    assert named_in_script("h('p', {}, 'try lora, or mesp')")
    assert not named_in_script('const usual = job.method ?? "artifact"; // prge')


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("elsewhere"), "norm-sgd", "norm_sgd", METHOD)


def run(elsewhere: Path, *arguments: str, cwd: Path, python: str | Path = sys.executable) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{elsewhere}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    done = subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMANDS = """
import contextlib, io, json, sys
sys.argv[0] = "ondevice"
from ondevice.cli.app import run
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            run(words)
        except SystemExit as ended:
            assert not ended.code, words
    print(json.dumps(said.getvalue()))
"""


def ondevice(warm: Warm, elsewhere: Path, cwd: Path, *commands: list[str]) -> list[str]:
    """Return what each command prints; they run one after the other in one new process."""
    said = run(elsewhere, "-c", COMMANDS, json.dumps(commands), cwd=cwd, python=warm.python)
    return [json.loads(line) for line in said.splitlines()]


def test_a_method_of_another_package_does_what_ours_do(
    elsewhere: Path, tmp_path: Path, warm: Warm
) -> None:
    """It plans, trains, resumes with the same bits, evaluates, and has its flag in --help and its page in the docs;
    no file of the project is touched."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "number {i} is {i * i}"}}\n' for i in range(8)))
    common = ["--model", "tiny:llama", "--method", "norm-sgd", "--momentum", "0.5", "--json"]

    def train(out: str, *more: str) -> list[str]:
        return ["train", *common, "--data", str(rows), "--max-length", "16", "--out", out, *more]

    planned, whole, _ = ondevice(
        warm,
        elsewhere,
        tmp_path,
        ["plan", *common],
        train("whole", "--steps", "4"),
        train("parts", "--steps", "2"),
    )
    assert json.loads(planned.splitlines()[-1])["method"]["momentum"] == 0.5
    whole = json.loads(whole.splitlines()[-1])
    assert whole["final_loss"] < whole["first_loss"]
    _, evaluated, shown = ondevice(
        warm,
        elsewhere,
        tmp_path,
        train("parts", "--steps", "4", "--resume"),
        ["eval", "whole/model", "--data", str(rows), "--json"],
        ["train", "--help"],
    )
    models = [
        (tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("whole", "parts")
    ]
    assert models[0] == models[1]
    assert json.loads(evaluated.splitlines()[-1])["loss"] > 0
    assert "norm-sgd" in shown and "--momentum" in shown
    page = "import sys; sys.path.insert(0, 'docs'); import generate; print(generate.settings())"
    assert "## method: norm-sgd" in run(elsewhere, "-c", page, cwd=ROOT)


def test_a_broken_method_elsewhere_breaks_nothing_else(tmp_path: Path) -> None:
    folder = install(
        tmp_path / "elsewhere", "torn", "torn_method", "raise RuntimeError('no such library')"
    )
    code = (
        "from ondevice.core.registry import method, method_names, methods\n"
        "from ondevice.core.errors import ConfigError, MissingPackageError\n"
        "assert 'torn' in method_names() and 'torn' not in [spec.name for spec in methods()]\n"
        "try:\n    method('torn')\nexcept ConfigError as error:\n    print(error.message, '|', error.hint)\n"
    )
    told = run(folder, "-c", code, cwd=tmp_path)
    assert "RuntimeError: no such library" in told and "torn_method" in told


def test_core_imports_no_other_room_not_even_for_types() -> None:
    wrong = []
    for path in sorted((ROOT / "ondevice" / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ondevice."):
                if not f"{node.module}.".startswith("ondevice.core."):
                    wrong.append(f"{path.name}: {node.module}")
    assert not wrong
