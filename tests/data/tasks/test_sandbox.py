"""A hostile chat template ends in an error, not in a full memory; an honest one renders as it always did."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the torch extra is not installed")
from transformers.utils import chat_template_utils

from ondevice.core.errors import ModelError
from ondevice.data import Row, Rows, encode
from ondevice.data.tasks import sandbox
from ondevice.data.tasks.chat_template import apply_template
from ondevice.generation.prompt import prompt_ids

MOST_MIB = 96
TURNS = [{"role": "user", "content": "a %d {b} ~"}, {"role": "assistant", "content": "c\n  d"}]
MEGABYTE = "{% set s = 'a' * 1000000 %}"
DOUBLED = (
    "{% set n = namespace(x=['a']) %}{% for i in range(30) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
TWICE = DOUBLED + DOUBLED.replace("set n", "set m").replace("n.x", "m.x")
KEY = "{% set n = namespace(x=1) %}{% for i in range(20) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
CHAIN = "{% set n = namespace(x=1) %}{% for i in range(2000) %}{% set n.x = (n.x,) %}{% endfor %}"
VALUES = "{% set n = namespace(x=1) %}{% for i in range(20) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}"
BOMBS = {
    "a text times a number": "{{ 'A' * 1500000000 }}",
    "a number times a text": "{{ 1500000000 * 'A' }}",
    "a list times a number": "{% set x = [1] * 1000000000 %}",
    "a power": "{{ (10 ** 4000) ** 4000 }}",
    "%": "{{ '%1500000000d' % 1 }}",
    "%*": "{{ '%*d' % (1500000000, 1) }}",
    "the filter center": "{{ 'a'|center(1500000000) }}",
    "the filter format": "{{ '%1500000000d'|format(1) }}",
    "the filter replace": MEGABYTE + "{{ s|replace('a', s) }}",
    "the filter join": MEGABYTE + "{{ ([s] * 100000)|join }}",
    "a separator": MEGABYTE + "{{ range(100000)|join(s) }}",
    "the filter indent": "{% set s = 'a\n' * 1000000 %}{{ s|indent(1000) }}",
    "the filter wordwrap": MEGABYTE + "{{ s|wordwrap(1, wrapstring=s) }}",
    "the filter tojson": "{{ [1, 2]|tojson(indent=1500000000) }}",
    "the filter batch": "{{ [1]|batch(1500000000, 'x')|list }}",
    "the filter slice": "{{ [1]|slice(1500000000)|list }}",
    "the filter round": "{{ 2.5|round(1500000000, 'floor') }}",
    "a filter by its name": "{{ ['a']|map('center', 1500000000)|list }}",
    "ljust": "{{ 'a'.ljust(1500000000) }}",
    "zfill": "{{ 'a'.zfill(1500000000) }}",
    "expandtabs": "{% set s = '\t' * 1000000 %}{{ s.expandtabs(1000) }}",
    "format": "{{ '{:1500000000}'.format(1) }}",
    "a format in a format": "{{ '{:{}}'.format(1, 1500000000) }}",
    "join": MEGABYTE + "{{ s.join(range(100000)|list) }}",
    "replace": MEGABYTE + "{{ s.replace('a', s) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "doubling by ~": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "many variables": "".join(f"{{% set a{i} = 'A' * 8000000 %}}" for i in range(100)),
    "shared lists": DOUBLED + "{{ n.x }}",
    "shared lists as JSON": DOUBLED + "{{ n.x|tojson }}",
    "shared lists by ==": TWICE + "{{ n.x == m.x }}",
    "shared lists by not in": TWICE + "{{ n.x not in [m.x] }}",
    "shared lists by a test": TWICE + "{{ [n.x]|select('eq', m.x)|list }}",
    "shared lists by a method": TWICE + "{{ [m.x].count(n.x) }}",
    "shared lists as text": DOUBLED + "{% set s = n.x|string %}",
    "shared tuples as a key": KEY + "{% set d = {n.x: 1} %}",
    "shared tuples as a computed key": KEY + "{% set d = {(n.x, 2): 1} %}",
    "shared tuples in brackets": KEY + "{{ {'a': 1}[n.x] }}",
    "shared tuples by get": KEY + "{{ {'a': 1}.get(n.x) }}",
    "shared tuples by dict": KEY + "{% set d = dict([(n.x, 1)]) %}",
    "shared tuples by minus": KEY + "{{ ({'a': 1}.keys() - [n.x])|length }}",
    "shared tuples by isdisjoint": KEY + "{{ {'a': 1}.keys().isdisjoint([n.x]) }}",
    "shared tuples by unique": KEY + "{{ [n.x]|unique|list|length }}",
    "shared tuples by is filter": KEY + "{{ n.x is filter }}",
    "shared tuples by a view": KEY + "{{ {1: n.x}.items() == {1: 2}.items() }}",
    "shared tuples that changed": KEY + "{% for i in [1, 2] %}{{ loop.changed(n.x) }}{% endfor %}",
    "shared dictionaries of a view": VALUES + "{{ n.x.items() == n.x.items() }}",
    "a chain of tuples as a key": CHAIN + "{% set d = {n.x: 1} %}",
    "a chain of tuples in brackets": CHAIN + "{{ {'a': 1}[n.x] }}",
}
LOOPS = {
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops over one list": "{% set s = range(100000) %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "output in loops": "{% for a in range(100000) %}{% for b in range(100000) %}aaaaaaaa{% endfor %}{% endfor %}",
}
HONEST = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{ '%s has %5.2f' % ('x', 1.5) ~ 'a' * 3 + 'b' }}{{ '-'.join(['a', 'b']) }}{{ ['a', 'b']|join('-') }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|tojson(indent=2) }}{{ 'a\nb'|indent(4) }}",
    "{{ messages[0].content.replace('a', 'xyz') }}{{ '{} {:>4}'.format('a', 3) }}{{ 7 // 2 * 2 ** 3 % 5 }}",
    "{% macro f(x) %}[{{ x|upper }}]{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set o = namespace(n=0) %}{% for m in messages %}{% set o.n = o.n + m.content|length %}{% endfor %}{{ o.n }}",
    "{{ 1 < 2 <= 2 }}{{ 2 < 1 < 3 }}{{ 'a' in 'abc' }}{{ 'a' not in ['b'] }}{{ nothing == none }}"
    "{{ 3 is eq(3) }}{{ [1, 2]|select('gt', 1)|list }}{{ messages[0] == messages[-1] }}",
    "{{ {(1, 'a'): 2}[(1, 'a')] }}{{ {'a': 1}.get('a') }}{{ {'a': 1}.items() == {'a': 1}.items() }}{{ 5 - 3 }}"
    "{{ messages[0:1] }}{{ messages[:-1] }}{{ 'trim' is filter }}{{ dict(a=1)['a'] }}{{ range(9)[2:8:3]|list }}"
    "{{ ({'a': 1, 'b': 2}.keys() - ['b'])|list }}{{ range(1000) | length }}",
    "{{ 'abc'|center(20) }}|{{ 'a b c'|wordwrap(3) }}|{{ [1, 2]|batch(2, 0)|list }}|{{ 'x'.ljust(9) }}{{ 'ab'[::-1] }}",
)


def render(template: str, **named: Any) -> str:
    rendered, _ = chat_template_utils.render_jinja_template(
        [TURNS], chat_template=template, eos_token="</s>", **named
    )
    return rendered[0]


@pytest.fixture
def limited() -> None:
    sandbox.install()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(limited, monkeypatch, name: str) -> None:
    if name.startswith("shared"):  # with all of it, walking takes some seconds
        monkeypatch.setattr(sandbox, "MOST", sandbox.MOST // 10)
    tracemalloc.start()
    try:
        with pytest.raises(sandbox.TemplateLimitError):
            render(BOMBS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_MIB << 20, f"{peak >> 20} MiB"


@pytest.mark.parametrize("name", BOMBS)
def test_looking_for_a_templates_variables_takes_no_memory(name: str) -> None:
    """Jinja computes constants when it looks for them: a product of a text and a number too."""
    tracemalloc.start()
    try:
        assert sandbox.variables_of(BOMBS[name] + "{{ own }}") == {"own"}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_MIB << 20, f"{peak >> 20} MiB"


@pytest.mark.parametrize("name", LOOPS)
def test_loops_without_end_are_refused(limited, monkeypatch, name: str) -> None:
    monkeypatch.setattr(sandbox, "MOST_S", 0.3)
    with pytest.raises(sandbox.TemplateLimitError):
        render(LOOPS[name])


@pytest.mark.parametrize("template", HONEST)
def test_an_honest_template_renders_as_without_limits(monkeypatch, template: str) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    monkeypatch.setattr(
        chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment
    )
    chat_template_utils._compile_jinja_template.cache_clear()
    expected = render(template, add_generation_prompt=True)
    sandbox.install()
    assert render(template, add_generation_prompt=True) == expected


def test_a_long_conversation_renders(limited) -> None:
    content = "word " * 200_000
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "ok"}]
    rendered, _ = chat_template_utils.render_jinja_template(
        [turns], chat_template=HONEST[0], eos_token="</s>"
    )
    assert len(rendered[0]) > len(content) and content.strip() in rendered[0]


def test_rows_and_questions_render_under_the_limits(tokenizer: Any) -> None:
    import copy

    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = BOMBS["a text times a number"]
    with pytest.raises(ModelError):
        prompt_ids(hostile, TURNS[:1], "a model")
    with pytest.raises(ModelError):
        encode(
            Rows("f", "chat", [Row(1, messages=(("user", "a"), ("assistant", "b")))]),
            hostile,
            max_length_tokens=99,
        )


def test_every_template_is_rendered_by_the_one_function(root: Any) -> None:
    callers = [
        path.name
        for folder in ("ondevice", "exporters")
        for path in (root / folder).rglob("*.py")
        if ".apply_chat_template(" in path.read_text()
    ]
    assert callers == ["chat_template.py"]
    fake = SimpleNamespace(apply_chat_template=lambda turns, **named: repr((turns, named)))
    assert apply_template(fake, [1], tools=[]) == repr(([1], {"tokenize": False, "tools": []}))
