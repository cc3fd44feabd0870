"""The preview shows what is trained on, how long rows are, and every row that was left out."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ondevice.data import preview
from ondevice.data.preview import Preview
from tests.data.public_templates import tokenizer_for

Write = Callable[..., Path]
ROWS = [
    {"sentence": "the film was great ", "label": 1},
    {"sentence": "the book was terrible " * 12, "label": 0},
    {"sentence": "[red]東京[/red] \u001b[31m was great", "label": 1},
    {"sentence": "x", "label": 5},
]


def drawn(view: Preview, width: int = 200, color: bool = False) -> str:
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
    )
    console.print(view.render())
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def view(write: Write, tokenizer: Any) -> Preview:
    return preview(write(ROWS), tokenizer, task="sst2", max_length_tokens=40)


def test_a_preview_counts_rows_tokens_and_labels(view: Preview) -> None:
    assert (view.format, view.task, view.rows, view.sequences, view.truncated) == (
        "classification",
        "sst2",
        4,
        3,
        1,
    )
    assert view.labels == {"great": 2, "terrible": 1} and view.trained_tokens == 3
    lengths = view.lengths_tokens
    assert lengths["p50"] <= lengths["p90"] <= lengths["p99"] == lengths["max"] > 40
    suggested = view.suggested_max_length_tokens
    assert (
        suggested is not None
        and suggested % 8 == 0
        and lengths["max"] <= suggested < lengths["max"] + 8
    )
    assert [(problem.line, problem.field) for problem in view.problems] == [(4, "label")]


def test_json_round_trip(view: Preview) -> None:
    shown = json.loads(json.dumps(view.to_dict()))
    assert shown["examples"][0] == [
        {"text": "the film was great It was", "trained": False},
        {"text": " great", "trained": True},
    ]
    assert shown["problems"][0] | {"file": ""} == view.problems[0].to_dict() | {"file": ""}
    assert shown["too_long"] == 0


def test_context_is_dimmed_and_the_answer_is_not(view: Preview) -> None:
    text = drawn(view, color=True)
    assert "\x1b[2mthe film was great It was\x1b[0m\x1b[32m great\x1b[0m" in text


def test_rows_cannot_drive_the_terminal(view: Preview) -> None:
    text = drawn(view)
    assert "[red]東京[/red] \ufffd[31m was great It was" in text and "\x1b" not in text


def test_every_problem_is_listed(view: Preview) -> None:
    text = drawn(view, width=250)
    assert (
        view.problems[0].file in text and "0 or negative (terrible), 1 or positive (great)" in text
    )
    assert "1 of 3 prompts cut at the front to 40 tokens" in text


def test_file_without_a_usable_row_is_shown_not_raised(write: Write, tokenizer: Any) -> None:
    view = preview(write(b"{oops\n{}"[:6]), tokenizer)
    assert (view.sequences, view.rows, view.lengths_tokens) == (0, 1, {"max": 0})
    assert "is not JSON" in drawn(view)


def test_answers_that_do_not_fit_count_towards_the_suggestion(write: Write, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "completion": " great"}, {"prompt": "a", "completion": " great" * 40}]
    view = preview(write(rows), tokenizer, max_length_tokens=16)
    assert (view.too_long, view.sequences) == (1, 1)
    assert view.suggested_max_length_tokens == 48 and "max_length_tokens=48 holds 99%" in drawn(
        view
    )
    assert "rows left out because they do not fit: 1" in drawn(view)


def test_the_length_is_the_rows_own(write: Write, tokenizer: Any) -> None:
    view = preview(
        write(
            [{"prompt": "a", "completion": " great"}, {"prompt": "a", "completion": " great" * 40}]
        ),
        tokenizer,
    )
    assert (view.max_length_tokens, view.too_long, view.truncated) == (48, 0, 0)
    assert "max length 48 tokens: the longest row has 42" in drawn(view)


def test_both_answers_of_a_preference_are_shown(write: Write, tokenizer: Any) -> None:
    view = preview(write([{"prompt": "2 + 2?", "chosen": "four", "rejected": "five"}]), tokenizer)
    assert view.example_names == ("chosen", "rejected")
    said = [[segment.text for segment in example if segment.trained] for example in view.examples]
    assert [text.strip() for (text,) in said] == ["four<|end|>", "five<|end|>"]
    assert "example 2: rejected: dim is context" in drawn(view)
    thumbs = preview(write([{"prompt": "2 + 2?", "completion": "five", "label": False}]), tokenizer)
    assert thumbs.example_names == ("thumbs down",) and thumbs.labels == {"down": 1}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(prompt=st.text(max_size=20), answer=st.text(min_size=1, max_size=20).filter(str.strip))
def test_segments_spell_the_row(prompt: str, answer: str, write: Write, tokenizer: Any) -> None:
    rows = json.dumps({"prompt": prompt, "completion": answer})
    view = preview(write(rows), tokenizer, max_length_tokens=500, rows=1)
    if view.examples:
        assert "".join(segment.text for segment in view.examples[0]) == prompt + answer + "<|end|>"
        assert view.examples[0][-1].trained


def test_tool_calls_and_reasoning_are_shown_as_they_are_trained_with_what_is_not_read(
    write: Write,
) -> None:
    qwen = tokenizer_for("qwen3")
    call = {
        "id": "abc123def",
        "type": "function",
        "function": {"name": "weather", "arguments": {"town": "Ulm"}},
    }
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Ask."},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains.", "mood": "dry"},
    ]
    view = preview(write([{"messages": messages, "id": 7}] * 2), qwen, rows=1)
    shown = qwen.apply_chat_template(messages, tokenize=False).rstrip("\n")
    whole = ["".join(segment.text for segment in example) for example in view.examples]
    trained = [
        "".join(segment.text for segment in example if segment.trained) for example in view.examples
    ]
    assert (
        whole[-1] == shown
        and '<think>\nAsk.\n</think>\n\n<tool_call>\n{"name": "weather"' in trained[0]
    )
    assert view.unread == {"messages[].tool_calls[].id": 2, "messages[].mood": 2, "id": 2}
    assert {*view.example_unread[0]} == {*view.unread} and len(view.examples) == len(
        view.example_unread
    )
    text = drawn(view)
    assert (
        text.count("not read") == 1 + len(view.examples)
        and "messages[].mood" in text
        and "trained as <|im_end|>: 4" in text
    )


def test_a_preview_shows_long_answers_in_full_and_shortens_long_prompts(
    write: Write, tokenizer: Any
) -> None:
    text = drawn(preview(write([{"prompt": "foo " * 900, "completion": " bar" * 900}]), tokenizer))
    assert text.count("bar") == 900 and text.count("foo") < 400
