"""A chat template's clock can be set: at the present it renders as transformers does, at another date that date."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers.utils.chat_template_utils as chat_template_utils

from ondevice.data.encode import dated
from ondevice.models.tiny import tiny_tokenizer

LLAMA = """
  {%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}

[{{ date_string }}]{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"""
TEMPLATES = {
    "as Llama 3.2's": LLAMA,
    "every directive": "{{ strftime_now('%a %A %b %B %c %d %-d %H %I %j %-m %m %M %p %S %y %Y %%d') }}",
    "composed": "{{ strftime_now('%' ~ 'd' ~ ' %-m %Y %' ~ '%d') }}",
    "in a macro": "\n\n{%- macro day() -%}{{ strftime_now('%Y-%m-%d') }}{%- endmacro -%}{{ day() }}",
    "begins with a line break": '\n\n  x{{ strftime_now("%B") }}\n',
    "percent in other texts": "{{ '50% of \\u00e9' }}{{ strftime_now('%d') }}{{ '100%' }}",
}
WHEN = datetime(2001, 2, 3, 4, 5, 6)


def rendered(tokenizer: Any) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_set_clock_renders_what_transformers_renders_at_that_time(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return WHEN

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    ours = rendered(dated(tokenizer, WHEN))
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    assert ours == rendered(tokenizer)
    assert tokenizer.chat_template == template


def test_named_templates_have_the_same_clock() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {
        "default": "{{ strftime_now('%Y') }}",
        "tool_use": "{{ strftime_now('%d') }}",
    }
    assert rendered(dated(tokenizer, WHEN)) == "2001"


def test_a_template_without_a_date_stays_unchanged() -> None:
    tokenizer = tiny_tokenizer()
    assert dated(tokenizer, WHEN) is tokenizer and dated(tokenizer, None) is tokenizer


def test_a_set_clock_costs_little() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = LLAMA
    fixed = dated(tokenizer, WHEN)
    seconds = {}
    for name, one in {"own": tokenizer, "fixed": fixed}.items():
        rendered(one)
        began = time.process_time()
        for _ in range(200):
            rendered(one)
        seconds[name] = time.process_time() - began
    assert seconds["fixed"] < 5 * seconds["own"]
