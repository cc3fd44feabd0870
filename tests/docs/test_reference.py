"""The reference pages say what the code says, and the pictures can be drawn again."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGES = (
    *(f"docs/reference/{name}.md" for name in ("api", "cli", "config", "errors", "fleet")),
    "docs/methods/index.md",
    "docs/results/models.md",
    "docs/results/conformance.md",
    "develop/artifact.md",
    "develop/events.md",
    "develop/fleet-protocol.md",
)


@pytest.fixture(scope="module")
def generate(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", root / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_page_is_what_the_code_says(page: str, generate: ModuleType, root: Path) -> None:
    text = (root / page).read_text()
    assert generate.MARKED.search(text), "the page has no generated part"
    assert text == generate.update(text), "try: make docs"


def test_every_part_is_on_a_page(generate: ModuleType, root: Path) -> None:
    text = "".join((root / page).read_text() for page in PAGES)
    assert {match[2] for match in generate.MARKED.finditer(text)} == set(generate.PARTS)


def test_the_device_table_of_the_readme_names_existing_methods(root: Path) -> None:
    """Every command of the table names a method that has a part in the target and the backend next
    to it."""
    from ondevice.core.registry import method, methods, target

    text = (root / "README.md").read_text()
    table = text[text.index("| You have | Method | Command |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 5
    for row in table:
        flags = dict(re.findall(r"--(method|target|backend) ([\w-]+)", row))
        named = re.findall(r"`([\w-]+)`", row.split("|")[2])
        assert named and flags.get("method", named[0]) == named[0], row
        for spec in map(method, named):
            assert flags.get("backend", "torch") in spec.sessions, row
            assert "target" not in flags or target(flags["target"]).kind in spec.programs, row
            for verb in set(re.findall(r"ondevice (\w+)", row)) - {"train", "serve"}:
                assert verb == "export" and spec.programs, row
    linked = set(re.findall(r"docs/methods/(\w+\.md)", text)) - {"index.md"}
    assert len(linked) == 5 and linked <= {spec.page for spec in methods()}


def test_a_page_that_differs_is_seen(generate: ModuleType) -> None:
    page = "before\n<!-- generated: errors -->\nOLD TEXT\n<!-- /generated -->\nafter\n"
    new = generate.update(page)
    assert "`ConfigError`" in new and "OLD TEXT" not in new
    assert new.startswith("before\n") and new.endswith("after\n")
    assert generate.update(new) == new


def test_every_flag_and_key_is_listed(generate: ModuleType) -> None:
    commands, settings = generate.commands(), generate.settings()
    assert all(
        f"## ondevice {verb}\n" in commands for verb in ("train", "run", "export", "config show")
    )
    assert "`--perturbation-scale` FLOAT" in commands
    interface = generate.interface()
    assert "### RunConfig.load\n" in interface and "### Callback.on_step\n" in interface
    assert "    on_row: Callable[[int, int], None] = lambda done, rows: None,\n" in interface
    assert re.search(r"- `perturbation_scale` \(number\): .* Default: `0.01`\.\n", settings)


def test_pages_tell_the_truth_about_exports_and_the_first_command(root: Path) -> None:
    from ondevice.core.registry import methods

    for spec in methods():
        page = (root / "docs/methods" / spec.page).read_text()
        assert not (
            spec.programs and re.search(r"\b(It|They|This method) (does|do) not export", page)
        ), spec.name
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    assert not [path for path in pages if re.search(r"git clone REPOSITORY", path.read_text())]


def test_a_run_becomes_a_picture(root: Path, tmp_path: Path) -> None:
    from ondevice.training.events import Evaluate, Start, Step

    steps = [
        Step(step=i, loss=5.0 - i / 10, losses=(5.0,), projected_gradients=(1.0,), learning_rate=1e-3, tokens=8,
             step_time_s=0.1, tokens_per_s=80.0, peak_memory_bytes=1)
        for i in range(12)
    ]  # fmt: skip
    log = [
        Start(config={}, identity={}, seed=0, backend="torch-cpu"),
        *steps,
        Evaluate(step=12, loss=4.0, accuracy=0.5),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(event.to_line() for event in log))
    command = [
        sys.executable,
        "docs/images/make.py",
        str(tmp_path / "events.jsonl"),
        str(tmp_path / "run.png"),
    ]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


COMMAND = re.compile(
    r"^(?:    |\$ |)(?:sudo )?(?:\S*/bin/)?ondevice ((?:.*\\\n)*.*)$|`ondevice ([^`\n]+)`",
    re.MULTILINE,
)


def commands_of(text: str) -> list[list[str]]:
    """The words of each `ondevice ...` in a page's code; what stands behind a pipe, a `#` or a `;`
    is none of them."""
    found = []
    for match in COMMAND.finditer(text):
        line = (match[1] or match[2]).replace("\\\n", " ")
        lexer = shlex.shlex(re.sub(r"[\[\]]", "", line), posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # prose with an apostrophe
            continue
        end = next(
            (place for place, word in enumerate(words) if set(word) <= set("|&;<>()")), len(words)
        )
        found.append(words[:end])
    return found


def test_every_command_of_the_pages_has_its_verb_and_its_flags(root: Path) -> None:
    from ondevice.cli.app import Verbs

    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")]
    wrong, seen = [], 0
    verbs = Verbs()  # one for all, for each builds its commands anew
    for page in pages:
        for words in commands_of(page.read_text(encoding="utf-8")):
            if words[0] not in verbs:
                continue  # a sentence that goes on
            command, rest = verbs[words[0]], words[1:]
            while rest and rest[0] in getattr(command, "commands", {}):
                command, rest = command.commands[rest[0]], rest[1:]
            flags = {name for one in command.params for name in one.opts} | {"--help"}
            named = {
                word.partition("=")[0].rstrip(".,:") for word in rest if re.match(r"--?[a-z]", word)
            }
            seen += len(named)
            wrong += [
                f"{page.relative_to(root)}: ondevice {' '.join(words)}: {flag}"
                for flag in sorted(named - flags)
            ]
    assert wrong == [] and seen > 150


def test_the_modules_that_the_architecture_page_names_exist(root: Path) -> None:
    text = (root / "develop/architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", text)
    for folder, rows in re.findall(r"\| Modules? of `([a-z/]+/)`.*\n.*\n((?:\|.*\n)+)", text):
        for row in rows.splitlines():
            named += [folder + module for module in re.findall(r"`(\w+)/?`", row.split("|")[1])]
    assert len(named) > 50
    rooms = (root, root / "ondevice")
    missing = [
        name
        for name in named
        if not any((room / name).exists() or (room / f"{name}.py").exists() for room in rooms)
    ]
    assert missing == []
