"""`chat` in this process: one answer, a conversation, an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import classes, tiny


@pytest.fixture
def keyboard(monkeypatch):
    """Type each text, line by line, until Ctrl-D."""

    def typed(*lines: str) -> None:
        waiting = list(lines)

        def read(prompt: str = "") -> str:
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("builtins.input", read)

    return typed


def test_a_conversation_remembers_and_ends_with_ctrl_d(
    ondevice, keyboard, monkeypatch, tmp_path
) -> None:
    from ondevice.generation.generator import Generator

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "adapter_config.json").write_text("{}")
    asked, used = [], []
    monkeypatch.setattr(
        Generator,
        "stream",
        lambda self, prompt, **options: asked.append(list(prompt)) or iter(["[b]", "so", "[/b]"]),
    )
    monkeypatch.setattr(Generator, "use", lambda self, adapter: used.append(adapter))
    keyboard("hello", "", "and now?", "/what", "/adapter a b", "again", "/adapter", "/new")
    done = ondevice("chat", "tiny:llama", "--system", "Be brief.")
    assert (
        done.code == 0
        and done.out.splitlines() == ["[b]so[/b]"] * 3
        and done.err.count("Ctrl-D") == 2
    )
    roles = [[turn["role"][0] for turn in prompt] for prompt in asked]
    assert roles == [list("su"), list("suau"), list("su")] and used == [Path("a b"), None]


def test_a_stopped_answer_is_a_turn_and_an_error_ends_nothing(
    ondevice, keyboard, monkeypatch, tmp_path
) -> None:
    from ondevice.core.errors import ConfigError
    from ondevice.generation.generator import Generator

    asked = []

    def stream(self, prompt, **options):
        asked.append([turn["content"] for turn in prompt])
        if len(asked) == 2:
            raise ConfigError("too long")
        yield "half"
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", stream)
    keyboard("one", "two", f"/adapter {tmp_path}", "three")
    done = ondevice("chat", "tiny:llama")
    assert done.code == 0 and done.err.count("error:") == 2
    assert asked == [["one"], ["one", "half", "two"], ["one", "half", "three"]]


def test_what_is_drawn_is_the_daemons(ondevice) -> None:
    """The same seed, temperature, top-p and stop text give what the API's model server says."""
    from ondevice.server.engine import model
    from tests.server.asked import Asked

    asked = {"max_new_tokens": 24, "temperature": 1.2, "top_p": 0.9, "seed": 7}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a0"}]
    try:
        whole = Asked().text(model="tiny:llama", prompt=messages, **asked)
    finally:
        model._forget()
    flags = [
        word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    ask = ("chat", "tiny:llama", "-p", "a0", "--system", "Be brief.", *flags)
    assert ondevice(*ask, "--json").json["answer"] == whole == ondevice(*ask).out.removesuffix("\n")
    word = whole[3:5]
    stopped = ondevice(*ask, "--stop", "never there", "--stop", word, "--json").json
    assert (stopped["answer"], stopped["finish"]) == (whole[: whole.index(word)], "stop")
    for wrong in (("--top-p", 0), ("--stop", "")):
        assert ondevice("chat", "tiny:llama", "-p", "a", *wrong).code == 2


def test_an_adapter_takes_part(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    train = (
        "train",
        *tiny("lora", "--lr", "0.05"),
        "--data",
        data,
        "--steps",
        12,
        "--out",
        out,
        "--json",
    )
    assert ondevice(*train).code == 0
    ask = ("chat", "tiny:llama", "--prompt", "a0", "--max-new-tokens", 6, "--json")
    plain, adapted = ondevice(*ask), ondevice(*ask, "--adapter", out / "adapter")
    assert plain.code == adapted.code == 0 and plain.json["answer"] != adapted.json["answer"]
    assert ondevice(*ask).json == plain.json  # greedy: the same answer again
    assert ondevice(*ask, "--adapter", tmp_path / "nothing").code == 5
    assert ondevice("chat", "tiny:llama", "--prompt", "x", "--temperature", "-1").code == 2
