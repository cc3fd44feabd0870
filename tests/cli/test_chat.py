"""`chat` in this process: one answer, a conversation, an adapter."""

from __future__ import annotations

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


def test_a_conversation_remembers_and_ends_with_ctrl_d(ondevice, keyboard, monkeypatch) -> None:
    from ondevice.models import generate

    asked = []
    monkeypatch.setattr(
        generate, "generate", lambda loaded, prompt, **options: asked.append(list(prompt)) or "[b]so[/b]"
    )
    keyboard("hello", "", "and now?")
    done = ondevice("chat", "tiny:llama")
    assert done.code == 0 and done.out.splitlines() == ["[b]so[/b]", "[b]so[/b]"] and "Ctrl-D" in done.err
    assert [[turn["role"] for turn in prompt] for prompt in asked] == [["user"], ["user", "assistant", "user"]]


def test_an_adapter_takes_part(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    train = ("train", *tiny("lora", "--lr", "0.05"), "--data", data, "--steps", 12, "--out", out, "--json")
    assert ondevice(*train).code == 0
    ask = ("chat", "tiny:llama", "--prompt", "a0", "--max-new-tokens", 6, "--json")
    plain, adapted = ondevice(*ask), ondevice(*ask, "--adapter", out / "adapter")
    assert plain.code == adapted.code == 0 and plain.json["answer"] != adapted.json["answer"]
    assert ondevice(*ask).json == plain.json  # greedy: the same answer again
    assert ondevice(*ask, "--adapter", tmp_path / "nothing").code == 5
    assert ondevice("chat", "tiny:llama", "--prompt", "x", "--temperature", "-1").code == 2
