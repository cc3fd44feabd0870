"""Ollama makes the same prompts as the model's chat template."""

from __future__ import annotations

import pytest

from ondevice.exits.ollama import Template, template_of
from ondevice.models.tiny import CHAT_TEMPLATE
from tests.exits.llama_cpp import MESSAGES


class Fake:
    """A tokenizer that has a template and nothing else."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages, tokenize: bool, add_generation_prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template([messages], chat_template=self.chat_template,
                                         add_generation_prompt=add_generation_prompt)  # fmt: skip
        return texts[0]


DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<s>Be kind</s>{% endif %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("text", [CHAT_TEMPLATE, DEFAULT_SYSTEM])
def test_a_template_of_texts_around_messages_is_found(text: str) -> None:
    tokenizer = Fake(text)
    found = template_of(tokenizer)
    assert isinstance(found, Template)
    for messages in (
        MESSAGES,
        [{"role": "system", "content": "Be brief"}, *MESSAGES],
        MESSAGES[:1],
    ):
        assert found.render(messages) == tokenizer.apply_chat_template(messages, False, True)
    assert all(
        part in found.go()
        for part in ("{{ range .Messages }}", 'eq .Role "user"', "{{ .Content }}")
    )
    assert ("ne (index .Messages 0).Role" in found.go()) == (text == DEFAULT_SYSTEM)


@pytest.mark.parametrize("text", [
    CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"),
    CHAT_TEMPLATE.replace("{% for", "{{ raise_exception('no') }}{% for"),
    CHAT_TEMPLATE.replace("<|im_end|>", "<|im_end|>{{ loop.index }}"),
])  # fmt: skip
def test_any_other_template_is_left_to_ollama(text: str) -> None:
    assert template_of(Fake(text)) is None
