"""Conversations in every form of tokenizer: llama.cpp makes the training's ids of them, or the exit refuses."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import VerificationError
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask, to_text
from ondevice.exits import convert, llama_cpp
from ondevice.exits.gguf_text import turns_of
from ondevice.models import load_model, load_tokenizer, save_tiny
from ondevice.models.tiny import CHAT_TEMPLATE
from tests.exits.conftest import random_adapter
from tests.gguf.test_tokenizers import byte_level, sentencepiece
from tests.sampling import part_of

PHI = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CLOSE = PHI.replace("message['role'] + '\n' + ", "")
"""A content follows its mark at once."""
COUNT = part_of(200)
"""Conversations of each form."""
NAMED = {"default": CHAT_TEMPLATE, "tool_use": "{{ tools | tojson }}" + CHAT_TEMPLATE}


@dataclass(frozen=True)
class Form:
    """A tokenizer, its chat template, and the words with which it is refused, if it is."""

    make: Callable[[], Tokenizer]
    template: Any = CHAT_TEMPLATE
    refused: str = ""


def marked(tokenizer: Tokenizer, marks: tuple[str, ...], **flags: bool) -> Tokenizer:
    """Give these special tokens the flags, and every other flag is off."""
    rules = json.loads(tokenizer.to_str())
    for token in rules["added_tokens"]:
        if token["content"] in marks:
            token |= flags
    return Tokenizer.from_str(json.dumps(rules))


def phis(tokenizer: Tokenizer) -> Tokenizer:
    """Every mark removes the spaces after it, but for three; llama.cpp demands all four of Phi-3's."""
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|endoftext|>"])
    return marked(tokenizer, (*MARKS, "</s>"), rstrip=True)


def metaspace(scheme: str) -> Tokenizer:
    """transformers 5's Llama: no normalizer, spaces become letters where words are cut."""
    tokenizer = sentencepiece()
    rules = json.loads(tokenizer.to_str())
    rules["normalizer"] = None
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    rules["pre_tokenizer"] = step
    return Tokenizer.from_str(json.dumps(rules))


def composed() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def around(tokenizer: Tokenizer, first: bool, last: bool) -> Tokenizer:
    """Let the tokenizer put its own marks around a text."""
    tokenizer.add_special_tokens(["<bos>"])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<bos>", "<eos>")]
    single = "<bos> " * first + "$A" + " <eos>" * last
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


MARKS = ("<eos>", "<|im_start|>", "<|im_end|>")
WITH_BOS = "{{ bos_token }}" + CHAT_TEMPLATE
FORMS = {
    "rstrip as Phi-3": Form(lambda: phis(byte_level()), PHI),
    "rstrip without Phi-3's other marks": Form(
        lambda: marked(byte_level(), MARKS, rstrip=True), PHI, "`rstrip`"
    ),
    "rstrip of one mark": Form(
        lambda: marked(byte_level(), MARKS[2:], rstrip=True), PHI, "`rstrip`"
    ),
    "rstrip, sentencepiece": Form(lambda: phis(sentencepiece()), PHI),
    "lstrip": Form(lambda: marked(byte_level(), MARKS, lstrip=True), PHI, "`lstrip`"),
    "Metaspace first": Form(lambda: metaspace("first")),
    "Metaspace first, contents after marks": Form(lambda: metaspace("first"), CLOSE),
    "Metaspace always": Form(lambda: metaspace("always")),
    "Metaspace never": Form(lambda: metaspace("never")),
    "NFC": Form(composed),
    "named templates": Form(lambda: byte_level(), NAMED),
    "BOS": Form(lambda: around(byte_level(), True, False), WITH_BOS),
    "BOS and EOS": Form(lambda: around(byte_level(), True, True), WITH_BOS),
    "EOS": Form(lambda: around(byte_level(), False, True)),
}


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Return conversations of one to five turns, with words, spaces and lines at both ends."""
    rng = random.Random(0)
    words = [
        "Hi",
        "it's",
        "12345",
        "Äpfel",
        "e\u0301",
        "漢字",
        "🙂",
        "def f(x):",
        "a  b",
        "\t",
        "ab\nc",
    ]
    ends = ["", "", " ", "  ", "\n", "\n\n", " \n"]

    def content() -> str:
        inner = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        return rng.choice(ends) + inner + rng.choice(ends)

    return [turns_of([content() for _ in range(rng.randint(1, 5))]) for _ in range(count)]


def write_model(folder: Path, form: Form) -> Path:
    tokenizer = form.make()
    save_tiny(folder, vocab=tokenizer.get_vocab_size() + 3)
    names = {"bos_token": "<bos>"} if tokenizer.token_to_id("<bos>") else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", **names
    )
    fast.chat_template = form.template
    fast.save_pretrained(folder)
    return folder


def trained_ids(tokenizer: Any, text: str) -> list[int]:
    begins = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = tokenizer(text, add_special_tokens=not begins)["input_ids"]
    return ids[:-1] if ids[-1] == tokenizer.eos_token_id and not text.endswith("<eos>") else ids


@pytest.mark.parametrize("name", FORMS)
def test_llama_cpp_reads_conversations_as_the_training_or_the_exit_refuses(
    name: str, tmp_path: Path
) -> None:
    form = FORMS[name]
    model = write_model(tmp_path / "model", form)
    tokenizer = AutoTokenizer.from_pretrained(model)
    task = TrainedTask(format="chat", framing="chat template", chat_template=form.template)
    adapter = random_adapter(load_model(str(model)))
    save_adapter(adapter, tmp_path / "adapter", {TASK_NAME: to_text(task)})
    path = tmp_path / "my-phi3.gguf"  # a name at which llama.cpp changes what marks do
    if form.refused:
        with pytest.raises(VerificationError) as caught:
            convert(tmp_path / "adapter", "gguf", path, model=str(model), dtype="float32")
        assert re.search(form.refused, str(caught.value))
        assert not path.exists()
        return
    report = convert(tmp_path / "adapter", "gguf", path, model=str(model), dtype="float32")
    asked = conversations(COUNT)
    if name == "NFC":
        assert any("NFC" in note for note in report.notes)
        asked = json.loads(unicodedata.normalize("NFC", json.dumps(asked, ensure_ascii=False)))
    texts = [
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        for turns in asked
    ]
    expected = [trained_ids(tokenizer, text) for text in texts]
    adds = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    bos = (tokenizer.bos_token or "") if adds else ""
    answer = llama_cpp.ask(path, [text.removeprefix(bos) for text in texts], asked)
    assert [one.removeprefix(bos) for one in answer["prompts"]] == [
        one.removeprefix(bos) for one in texts
    ]
    wrong = [pair for pair in zip(texts, answer["ids"], expected) if pair[1] != pair[2]]
    assert not wrong, f"{len(wrong)} of {len(texts)}: {wrong[0]}"
    assert len(texts) == COUNT


def test_named_templates_are_in_the_file_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    model = write_model(tmp_path / "model", FORMS["named templates"])
    save_adapter(random_adapter(load_model(str(model))), tmp_path / "adapter")
    for form, out in (("gguf", "a.gguf"), ("safetensors", "fused")):
        convert(tmp_path / "adapter", form, tmp_path / out, model=str(model))
        back: Any = load_tokenizer(str(tmp_path / out))
        assert back.chat_template == NAMED, form


def test_an_end_or_a_prompt_that_llama_cpp_reads_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp itself has the last word, also where our model of its rules agrees."""
    model = write_model(tmp_path / "model", FORMS["named templates"])
    save_adapter(random_adapter(load_model(str(model))), tmp_path / "adapter")
    ask = llama_cpp.ask

    def other(change: str, value: Any) -> Callable[..., dict[str, Any]]:
        def asked(path: Path, texts: list[str], turns: list[Any]) -> dict[str, Any]:
            answer = ask(path, texts, turns)
            return answer | {change: [*answer[change][:-1], value]}

        return asked

    for change, value in (("ids", [1, 2]), ("prompts", "another"), ("prompts", None)):
        monkeypatch.setattr(llama_cpp, "ask", other(change, value))
        with pytest.raises(VerificationError) as caught:
            convert(tmp_path / "adapter", "gguf", tmp_path / "a.gguf", model=str(model))
        assert re.search(r"llama\.cpp", str(caught.value))
        assert not (tmp_path / "a.gguf").exists()
    monkeypatch.setattr(llama_cpp, "ask", lambda *asked: {"error": "no such architecture"})
    with pytest.raises(VerificationError) as caught:
        convert(tmp_path / "adapter", "gguf", tmp_path / "a.gguf", model=str(model))
    assert re.search("does not take", str(caught.value))
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    report = convert(tmp_path / "adapter", "gguf", tmp_path / "a.gguf", model=str(model))
    assert any("xllamacpp is not installed" in note for note in report.notes)
