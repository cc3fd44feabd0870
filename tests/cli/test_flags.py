"""One name for one thing in every verb."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ondevice.cli.app import Verbs
from ondevice.cli.flags import all_options
from ondevice.core.registry import methods


def verbs() -> Iterator[tuple[str, Any]]:
    """Every verb, those in groups too, with its command."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
        if inner := getattr(command, "commands", None):
            for name, one in inner.items():
                yield from walk(one, f"{path} {name}")
        else:
            yield path, command

    for name, command in Verbs().items():
        yield from walk(command, name)


def words(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "argument"]


def flags(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "option"]


def test_a_flag_has_the_same_short_name_and_kind_in_every_verb() -> None:
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for verb, command in verbs():
        for flag in flags(command):
            short = tuple(name for name in flag.opts if not name.startswith("--"))
            for name in (name for name in flag.opts if name.startswith("--")):
                seen.setdefault(name, set()).add((short, flag.is_flag))
            assert flag.help, f"{verb} {flag.opts[0]}"
    # `models --remove NAME` says what goes; `serve fleet NAME --remove` has said it already.
    assert {name for name, kinds in seen.items() if len(kinds) > 1} <= {"--remove"}


def test_the_model_may_stand_first_wherever_no_other_thing_does() -> None:
    named = {
        verb: command
        for verb, command in verbs()
        if any("--model" in flag.opts for flag in flags(command))
    }
    assert len(named) > 15
    assert {verb for verb, command in named.items() if not words(command)} == set()
    first = {verb for verb, command in named.items() if words(command)[0].metavar == "[MODEL]"}
    assert first >= {
        "train",
        "eval",
        "export",
        "chat",
        "plan",
        "fuse",
        "fleet simulate",
        "fleet begin",
        "jobs create",
    }
    other = {"verify", "predict", "convert", "data", "config show", "fleet replay", "fleet carry answer", "serve fleet",
             "jobs adapters convert"}  # fmt: skip
    assert named.keys() - first == other


def test_what_every_verb_has() -> None:
    for verb, command in verbs():
        names = {name for flag in flags(command) for name in flag.opts}
        assert "--json" in names or verb == "fleet device", (
            verb
        )  # which prints what Flower says, until it is stopped
        assert "--learning-rate" not in names or "--lr" in names, verb
        assert "--length" not in names or "--max-length" in names, verb
        if "--method" in names and verb != "config show":
            assert {"--rank", "--learning-rate", "--seed", "--set", "--config"} <= names, verb


def test_fuse_convert_data_and_show_take_words_or_flags(ondevice, tmp_path) -> None:
    for words_ in (["fuse", "tiny:llama", "--adapter", "/no/a"], ["fuse", "--model", "tiny:llama", "/no/a"],
                   ["fuse", "tiny:llama", "/no/a"], ["convert", "--adapter", "/no/a"]):  # fmt: skip
        done = ondevice(*words_, "--out", tmp_path / "out")
        assert done.code in (3, 5) and "/no/a" in done.err, done.err
    for words_, said in (
        (["fuse", "tiny:llama", "--out", tmp_path / "out"], "nothing trained in tiny:llama"),
        (["fuse", "--adapter", "a", "--out", tmp_path / "out"], "nothing trained in a"),
        (["fuse", "--model", "m", "--out", tmp_path / "out"], "no adapter is given"),
        (
            ["fuse", "m", "b", "--adapter", "a", "--out", tmp_path / "out"],
            "the adapter is given twice",
        ),
        (["convert", "--out", tmp_path / "out"], "no adapter is given"),
        (["data"], "no data is given"),
        (["data", "a", "--data", "b"], "the data is given twice"),
        (["data", "--data", "/no/rows.jsonl"], "no such data file: /no/rows.jsonl"),
        (["config", "show", "/no/run.yaml"], "/no/run.yaml"),
        (["config", "show", "--config", "/no/run.yaml"], "/no/run.yaml"),
        (["jobs", "create", "a", "--model", "b"], "the model is given twice"),
        (["fleet", "begin", "a", "--model", "b"], "the model is given twice"),
    ):
        done = ondevice(*words_)
        assert done.code in (2, 3, 5) and said in done.err, done.err


def test_the_flags_of_every_day_come_first_and_those_of_one_method_last(ondevice) -> None:
    text = ondevice("train", "--help").out
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    assert flags[:5] == ["--data", "--steps", "--method", "--model", "--out"]
    some = [option.names[0] for option in all_options().values() if not option.of_all]
    assert "--rank" in some and "--learning-rate" not in some
    assert set(flags[-len(some) - 2 : -2]) == set(some) and flags[-2:] == ["--set", "--help"]


def test_the_help_of_train_shows_the_defaults_of_the_settings(ondevice) -> None:
    text = " ".join(ondevice("train", "--help").out.split())
    for shown in ("Optimizer steps (default: 100)", "order of the rows (default: 0)",
                  "(default: runs/default)", "LoRA rank (default: 16 for lora, lora-fa, prge; 8 for mesp)",
                  "; all for mesp)"):  # fmt: skip
        assert shown in text, shown
    defaults = {spec.name: spec.config().learning_rate for spec in methods()}
    shown = text.partition("Learning rate (default: ")[2].partition(")")[0]
    for part in shown.split("; "):
        value, _, owners = part.partition(" for ")
        for name in owners.split(", "):
            assert defaults.pop(name) == float(value)
    assert not defaults
