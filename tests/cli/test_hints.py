"""Advice leads on: each command that a hint names is accepted, and names flags, keys and verbs that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ondevice.api.runfile import RunConfig
from ondevice.core.registry import methods
from ondevice.models.tiny import save_tiny
from tests.cli.refused import make

ROWS = "--data rows.jsonl --steps 1 --out new"
EXPORT = "--out program"
REFUSED = {
    "MLX with a method for torch": f"train qwen3 {ROWS} --method lora --backend mlx",
    "MLX with unknown blocks": f"train stablelm {ROWS} --backend mlx",
    "MLX with a model without files": f"train tiny:qwen3 {ROWS} --method lora --backend mlx",
    "known blocks": f"train mamba {ROWS} --method revffn",
    "gated blocks": f"train tiny:gpt2 {ROWS} --method mesp",
    "reversible blocks": f"train tiny:gpt2 {ROWS} --method revffn",
    "experts": f"train tiny:qwen3_moe {ROWS} --method prge --target-modules experts.down_proj",
    "packing": f"train tiny:llama {ROWS} --method revffn --packing",
    "a head": f"train roberta {ROWS} --classes 2 --method mesp",
    "a score": f"train tiny:llama {ROWS} --set train.objective=accuracy",
    "float16": f"train tiny:llama {ROWS} --method full --dtype float16",
    "patience": f"train tiny:llama {ROWS} --patience 2",
    "rank": f"train tiny:llama {ROWS} --adapter run --rank 4",
    "another base": f"train tiny:gpt2 {ROWS} --adapter run",
    "columns of other names": "train tiny:llama --data foreign.csv --steps 1 --out new",
    "a flag of another tool": f"train tiny:llama {ROWS} --lora-r 4",
    "a value of another tool": f"train tiny:llama {ROWS} --dtype bf16",
    "a method's name": f"train tiny:llama {ROWS} --method qlora",
    "a key": f"train tiny:llama {ROWS} --set train.learning_rate=1e-4",
    "a run in the folder": "train tiny:llama --data rows.jsonl --steps 4 --out run",
    "a method without programs": f"export tiny:llama {EXPORT} --method full",
    "another target's method": f"export tiny:llama {EXPORT} --target apple-mlx --method prge",
    "mesp of layer norms": f"export tiny:gpt2 {EXPORT} --method mesp",
    "lora of layer norms": f"export tiny:gpt2 {EXPORT} --method lora",
    "a program of experts": f"export tiny:qwen3_moe {EXPORT} --method prge",
    "a program of unknown blocks": f"export stablelm {EXPORT} --method mesp",
    "a type of llama.cpp for a program": f"export tiny:llama {EXPORT} --quantize q4_k_m",
    "ExecuTorch of experts": "convert experts --to executorch --out converted",
    "packed MLX of experts": "convert experts --to mlx-model --out converted",
    "GGUF of unknown blocks": "convert hybrid --to gguf --out converted",
    "ExecuTorch of unknown blocks": "convert hybrid --to executorch --out converted",
    "a form's name": "convert run --to ggfu --out converted",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    import ondevice

    place = make(tmp_path_factory.mktemp("hints"))
    rows = str(place / "rows.jsonl")
    save_tiny(place / "qwen3", "qwen3")
    ondevice.train("tiny:llama", rows, steps=2, out=str(place / "run"))
    ondevice.train("tiny:qwen3_moe", rows, steps=2, out=str(place / "experts"))
    ondevice.train(str(place / "stablelm"), rows, steps=2, out=str(place / "hybrid"))
    return place


def followed(words: list[str], hint: str) -> Iterator[list[str]]:
    """Each command that the hint recommends, from the refused one."""
    for name in re.findall(r"methods that do: ([\w, -]+)", hint):
        for method in name.split(", "):
            without = [word for word in words if word != "--target-modules"]
            yield with_flags(
                words if without == words else words[:-2], ["--method", method.strip()]
            )
    if "can be exported" in hint:
        for part in hint.partition(" can be")[0].split(" or "):
            yield with_flags(words, part.split())
    elif "`ondevice train`" in hint:
        model = next(word for word in words[1:] if not word.startswith("-"))
        yield ["train", model, *ROWS.split()]
    elif tos := re.findall(r"--to ([\w-]+)", hint):
        for form in tos:
            yield [word for word in with_flags(words, ["--to", form])]
    elif meant := re.search(r"did you mean '?([\w.-]+)'?", hint):
        yield replaced(words, meant[1])
    elif columns := re.search(r"(--column text=\S+ --column label=\S+)", hint):
        yield [*words, *columns[1].split()]
    elif "`--resume`" in hint:
        yield from ([*words, flag] for flag in ("--resume", "--overwrite"))
    elif left_out := re.search(r"leave (--[\w-]+) out", hint):
        yield [word for word in words if word != left_out[1]]
    elif flags := re.findall(r"--[\w-]+ [\w.:=-]+", hint):
        yield with_flags(words, " ".join(flags).split())


def with_flags(words: list[str], flags: list[str]) -> list[str]:
    """The command with these flags in place of its own of the same names."""
    result = list(words)
    for name, value in zip(flags[::2], flags[1::2]):
        key = value.partition("=")[0]
        for index in range(len(result) - 1, 0, -1):
            own = result[index] == name and (name != "--set" or result[index + 1].startswith(key))
            own = own or (name == "--set" and result[index] == f"--{key.rpartition('.')[2]}")
            if own or (name == "--model" and index == 1):
                del result[index : index + 1 + own]
        result += [name, value]
    return result


def replaced(words: list[str], meant: str) -> list[str]:
    """The command with the word that is nearest to `meant` in its place: a flag, a value or a key."""
    if meant.startswith("--"):
        return [meant if word == "--lora-r" else word for word in words]
    wrong = ("bf16", "qlora", "q4_k_m", "ggfu")
    return [meant if word in wrong else word for word in words]


@pytest.mark.parametrize("case", REFUSED)
def test_the_commands_that_a_hint_names_are_accepted(case, ondevice, folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    words = REFUSED[case].split()
    refused = ondevice(*words, "--json", "--dry-run")
    assert refused.code not in (0, 1), refused.err
    hint = refused.json["try"] or f"{refused.json['expected']} takes it"
    key = re.search(r"write '([\w.]+)'", refused.json["message"])
    commands = list(followed(words, hint))
    if key:
        commands = [with_flags(words[:-2], ["--set", f"{key[1]}=1e-4"])]
    assert commands, refused.err
    for command in commands:
        done = ondevice(*command, "--json", "--dry-run")
        assert done.code == 0, f"{hint}\n{command}\n{done.err}"


def strings(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(strings, node.values))
    if isinstance(node, ast.BinOp):
        return strings(node.left) + strings(node.right)
    if isinstance(node, ast.IfExp):
        return f"{strings(node.body)} {strings(node.orelse)}"
    return "…"


def hints(root: Path) -> Iterator[tuple[str, str]]:
    """Every hint of the package with its place."""
    for folder in ("ondevice", "exporters", "runtime_ops"):
        for path in sorted((root / folder).rglob("*.py")):
            if path.is_symlink() or "exporters" in path.parts[len(root.parts) + 1 :]:
                continue
            source = path.read_text("utf-8")
            if "hint=" not in source and "fix=" not in source:
                continue  # parsing all files takes 4 CPU seconds
            for node in ast.walk(ast.parse(source)):
                for keyword in getattr(node, "keywords", ()):
                    if keyword.arg in ("hint", "fix"):
                        place = f"{path.relative_to(root)}:{keyword.value.lineno}"
                        yield place, strings(keyword.value)


def test_hints_name_flags_verbs_and_keys_that_exist(root: Path) -> None:
    import typer.main

    from ondevice.cli.app import app

    verbs: set[str] = set()
    flags = {"--upgrade", "--no-deps", "--install"}  # of pip and xcode-select

    def walk(command, name: str) -> None:
        verbs.add(name)
        for parameter in command.params:
            flags.update(parameter.opts)
        for child, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {child}".strip())

    walk(typer.main.get_command(app), "")
    sections = {
        name: set(getattr(field.annotation, "model_fields", {}))
        for name, field in RunConfig.model_fields.items()
    }
    sections["method"] = {key for spec in methods() for key in spec.config.model_fields}
    found = list(hints(root))
    wrong = []
    for place, text in found:
        wrong += [
            f"{place}: {flag}"
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
            if flag not in flags
        ]
        for words in re.findall(r"`ondevice ([a-z]+)", text):
            wrong += [] if words in verbs else [f"{place}: ondevice {words}"]
        for section, key in re.findall(
            r"\b(model|data|method|train|export)\.(?!md\b)([a-z_]+)\b", text
        ):
            wrong += [] if key in sections[section] else [f"{place}: {section}.{key}"]
    assert len(found) > 400 and wrong == []
