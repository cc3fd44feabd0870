"""A new user's first hour: the wheel in an empty environment, away from the checkout, in a folder with a space and
Unicode in its path.

The environment is a venv into which pip installs the wheel. What `ondevice-train[torch,serve]`
depends on, by the metadata of the packages, is linked from this environment instead of fetched
(PyTorch alone would take minutes): a dependency that the wheel does not declare is missing, as it
is for a user.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ondevice.server.client import Client
from tests.bare import build_wheel, link
from tests.cli.command import CommandLine, Done

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TEAMS = ("facturación", "Störung")
MODEL = "tiny:llama"
MOST_CPU_S = 60
"""CPU time of the walk's commands at most; it was 51 s as a process each, of which 36 imported
PyTorch."""
TOGETHER = """
import contextlib, io, json, sys
from ondevice.cli.app import run
said = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(words[1], {}) if words[0] == "python" else run(words)
    except SystemExit as ended:
        assert not ended.code, (words, ended.code, out.getvalue())
    said.append(out.getvalue())
print(json.dumps(said))
"""
COLUMNS = ("--column", "text=Nachricht", "--column", "label=Équipe")
CHAT = [{"role": "user", "content": "Wo ist sie?"}, {"role": "assistant", "content": "Im Anhang."}]
PYTHON = """
import ondevice
rows = [{"text": "Rechnung", "label": "eins"}, {"text": "Leitung", "label": "zwei"}]
run = ondevice.train("tiny:llama", rows, steps=2, out="de python")
answers = ondevice.predict(run, ["Wo bleibt sie?"])
assert answers.texts[0] in ("eins", "zwei"), answers
assert run.history and len(repr(run)) < 200, repr(run)
assert ondevice.plan("tiny:llama", rows).total_bytes > 0
assert ondevice.evaluate(run, rows).rows == 2
try:
    ondevice.train("tiny:llama", rows, **{"train.learning_rate": 1e-3})
except ondevice.OndeviceError as error:
    print(ondevice.__version__, error)
"""


class NewUser:
    """Types commands in a folder, with an environment in which nothing but the wheel is installed."""

    def __init__(self, program: Path, folder: Path, home: Path) -> None:
        self.program = program
        self.folder = folder
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTHON", "ONDEVICE", "PIP_"))
        }
        self.environment = kept | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip

    def __call__(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [str(self.program), *map(str, words)]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=300, check=False,
        )  # fmt: skip

    def does(self, *words: object) -> str:
        """Run a command that succeeds; return its standard output."""
        done = self(*words)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def does_together(self, *commands: tuple[object, ...]) -> list[str]:
        """Run commands that succeed one after another in one process of that environment."""
        lines = json.dumps([[str(word) for word in words] for words in commands])
        python = str(self.program.parent / "python")
        done = subprocess.run(
            [python, "-c", TOGETHER, lines], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    def listing(self) -> dict[str, int]:
        return {
            path.relative_to(self.folder).as_posix(): path.stat().st_mtime_ns
            for path in sorted(self.folder.rglob("*"))
        }


def table(path: Path, rows: list[tuple[str, ...]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=";").writerows(rows)
    return path


@pytest.fixture(scope="module")
def user(root: Path, tmp_path_factory: pytest.TempPathFactory) -> NewUser:
    place = tmp_path_factory.mktemp("new user")
    venv = place / "el entorno"
    words = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(words, check=True)
    (place / "build").mkdir()
    wheel = build_wheel(root, place / "build")
    words = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "--quiet", "--no-deps",
             "--no-index", "--no-cache-dir", str(wheel)]  # fmt: skip
    subprocess.run(words, check=True)
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    (site,) = venv.glob("lib/python*/site-packages")
    extras = project["optional-dependencies"]
    link(site, [*project["dependencies"], *extras["torch"], *extras["serve"]])
    folder = place / "mes données ✓"
    folder.mkdir()
    return NewUser(venv / "bin/ondevice", folder, place)


@pytest.fixture(scope="module")
def trained(user: NewUser) -> NewUser:
    """The user has trained on a table with semicolons."""
    rows = [
        (f"{n}. Frage zur {'Rechnung' if n % 2 else 'Leitung'}", TEAMS[n % 2]) for n in range(12)
    ]
    table(user.folder / "les tickets.csv", [("Nachricht", "Équipe"), *rows])
    user.does(
        "train", MODEL, "--data", "les tickets.csv", *COLUMNS, "--steps", 2, "--out", "un essai"
    )
    return user


def test_nothing_of_the_checkout_is_used(user: NewUser, root: Path) -> None:
    python = user.program.parent / "python"
    code = (
        "import ondevice, ondevice.exporters, sys; print(ondevice.__file__, *sys.path, sep='\\n')"
    )
    done = subprocess.run(
        [str(python), "-c", code], cwd=user.folder, env=user.environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert "el entorno" in done.stdout.splitlines()[0]
    assert str(root) not in done.stdout


def test_the_walk_from_the_demo_to_other_programs(user: NewUser, trained: NewUser) -> None:
    began = time.perf_counter()
    spent = os.times()
    folder = user.folder
    table(
        folder / "nouveaux.csv",
        [("Nr", "Nachricht"), ("1", "Die Leitung ist tot"), ("2", "Rechnung?")],
    )
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(4)), encoding="utf-8"
    )
    shown, _, figures, said, *_, checked, tried, again, python = user.does_together(
        ("demo", "--model", MODEL, "--steps", 2, "--out", "la démo"),
        ("predict", "un essai", "nouveaux.csv", "--out", "réponses.csv"),
        ("eval", "un essai", "--data", "les tickets.csv", "--json"),
        ("chat", "un essai", "--prompt", "Wo bleibt meine Rechnung?"),
        ("convert", "un essai", "--to", "gguf", "--out", "modèle.gguf"),
        ("convert", "un essai", "--to", "mlx", "--out", "pour mlx"),
        ("fuse", MODEL, "un essai", "--out", "fusionné"),
        ("train", MODEL, "--data", "chats.jsonl", "--steps", 2, "--out", "une conversation"),
        ("convert", "une conversation", "--to", "ollama", "--out", "pour ollama"),
        ("doctor", "--json"),
        ("train", MODEL, "--data", "les tickets.csv", *COLUMNS, "--dry-run", "--out", "rien"),
        ("predict", "fusionné", "nouveaux.csv", "--out", "encore.jsonl"),
        ("python", PYTHON),
    )
    assert "accuracy on 40 messages" in shown and "yours next: ondevice predict" in shown
    with (folder / "réponses.csv").open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file, delimiter=";"))
    assert [row["Nr"] for row in answers] == ["1", "2"]
    assert {row["prediction"] for row in answers} <= set(TEAMS)
    rated = json.loads(figures)
    assert 0 <= rated["accuracy"] <= 1 and rated["rows"] == 12
    assert any(team in said for team in TEAMS)
    assert (folder / "modèle.gguf").read_bytes().startswith(b"GGUF")
    assert (folder / "pour mlx" / "adapters.safetensors").is_file()
    assert (folder / "fusionné" / "model.safetensors").is_file()
    assert "FROM" in (folder / "pour ollama" / "Modelfile").read_text("utf-8")
    assert json.loads(checked) and tried and not (folder / "rien").exists()
    for made in ("un essai/adapter", "fusionné", "pour mlx"):
        assert TEAMS[0] in (folder / made / "README.md").read_text("utf-8")
        assert json.loads((folder / made / "ondevice_task.json").read_text("utf-8"))
    assert "method.learning_rate" in python
    assert again and len((folder / "encore.jsonl").read_text("utf-8").splitlines()) == 2
    the_daemon_answers(user)
    used = os.times()
    cpu = used.children_user + used.children_system - spent.children_user - spent.children_system
    print(f"the walk: {time.perf_counter() - began:.0f} s, {cpu:.0f} CPU s")
    assert cpu < MOST_CPU_S


def the_daemon_answers(user: NewUser) -> None:
    """Serve the adapter: its labels and its chat are the command's."""
    folder = user.folder
    words = [str(user.program), "serve", "--store", "le magasin", "--port", "0", "--json"]
    process = subprocess.Popen(
        words, cwd=folder, env=user.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        client = Client(json.loads(process.stdout.readline())["address"], timeout_s=300)
        adapter = client.upload("adapter", folder / "un essai" / "adapter")["id"]
        rows = [{"Nachricht": "Die Leitung ist tot"}, {"Nachricht": "Rechnung?"}]
        answers = [row["prediction"] for row in client.predict(adapter, rows)["data"]]
        with (folder / "réponses.csv").open(encoding="utf-8", newline="") as file:
            assert answers == [row["prediction"] for row in csv.DictReader(file, delimiter=";")]
        asked = [{"role": "user", "content": "Wo bleibt meine Rechnung?"}]
        body = {"model": adapter, "messages": asked, "temperature": 0}
        reply = client.ask("POST", "/v1/chat/completions", body)
        assert reply["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_bad_input_says_what_to_do_and_writes_nothing(
    trained: NewUser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first from the wheel, as a process; the others here, where PyTorch is imported once."""
    folder = trained.folder
    table(folder / "autre.csv", [("Prix", "Taille"), ("3", "4"), ("5", "6")])
    table(
        folder / "inconnu.csv",
        [("Nachricht", "Équipe"), ("Hallo", "quelque chose"), ("Da", TEAMS[0])],
    )
    (folder / "vide.csv").write_text("")
    monkeypatch.chdir(folder)
    here = CommandLine(capsys)

    def is_refused(code: int, advice: str, *words: object, by: Any = here) -> None:
        before = trained.listing()
        done = by(*words)
        assert done.code == code, f"{words}\n{done.out}{done.err[-4000:]}"
        assert done.err.startswith("error: ") and "Traceback" not in done.err
        assert advice in done.err, done.err
        assert trained.listing() == before, words

    def by_the_wheel(*words: object) -> Done:
        done = trained(*words)
        return Done(done.returncode, done.stdout, done.stderr)

    for name in ("autre.csv", "vide.csv"):
        advice = "empty" if name == "vide.csv" else "--column text=NAME"
        by = here if name == "vide.csv" else by_the_wheel
        is_refused(3, advice, "predict", "un essai", name, "--out", "rien.csv", by=by)
        is_refused(3, "--column" if name == "autre.csv" else "empty", "train", MODEL, "--data", name,
                   "--steps", 2, "--out", "rien")  # fmt: skip
    is_refused(3, TEAMS[0], "eval", "un essai", "--data", "inconnu.csv")
    another = ("--model", "tiny:qwen2")
    advice = f"--model {MODEL}"
    rows = ("--data", "les tickets.csv", "--column", "text=Nachricht", "--column", "label=Équipe")
    adapter = ("--adapter", "un essai")
    is_refused(5, advice, "train", *another, *adapter, *rows, "--steps", 2, "--out", "rien")
    is_refused(5, advice, "chat", *another, *adapter, "--prompt", "Hallo")
    predict = ("predict", "un essai", "les tickets.csv", "--out", "rien.csv")
    is_refused(5, advice, *predict, *another)
    predict = ("predict", "nirgends", "les tickets.csv", "--out", "rien.csv")
    is_refused(5, "no such folder", *predict)
