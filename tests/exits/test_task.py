"""What was trained travels: the record, the end tokens, the framing and a README, in every form."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask, to_text
from ondevice.exits import convert
from ondevice.exits.ollama import modelfile
from ondevice.gguf.metadata import Metadata
from ondevice.gguf.read import open_gguf
from ondevice.gguf.task import GGUF_KEY, read_task
from ondevice.models import load_model, load_tokenizer, save_tiny
from ondevice.models.tiny import CHAT_TEMPLATE
from ondevice.training.usage import README_NAME
from tests.exits.conftest import Case, random_adapter
from tests.exits.llama_cpp import LlamaCpp

CLASSES = TrainedTask(
    format="classification",
    labels={"a": "a", "b": "b"},
    prompt="{text}\nLabel:",
    longest_answer_tokens=2,
)
CHAT = TrainedTask(
    format="chat",
    framing="chat template",
    chat_template=CHAT_TEMPLATE,
    prompt="<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n",
    ends=("<|im_end|>",),
)
FOLDERS = ("mlx", "mlx-model", "mlx-pair", "ollama", "peft", "safetensors", "vllm")


def with_task(case: Case, folder: Path, task: TrainedTask) -> Path:
    """Write the case's adapter with a record."""
    save_adapter(load_adapter(case.adapter), folder, {TASK_NAME: to_text(task)})
    return folder


def same(found: TrainedTask | None, task: TrainedTask) -> bool:
    return found is not None and found.model_copy(update={"ondevice": ""}) == task


@pytest.mark.parametrize("form", FOLDERS)
def test_every_folder_carries_the_record_and_a_readme(
    form: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    adapter = with_task(cases["llama"], tmp_path / "adapter", CLASSES)
    convert(adapter, form, tmp_path / "out", model=str(cases["llama"].model))
    assert same(read_task(tmp_path / "out"), CLASSES)
    text = (tmp_path / "out" / README_NAME).read_text()
    assert json.dumps(CLASSES.prompt) in text
    assert ("AutoPeftModel" in text) == (form in ("peft", "vllm"))
    if form == "ollama":
        assert same(read_task(tmp_path / "out" / "model.gguf"), CLASSES)


@pytest.mark.parametrize("form", ["gguf", "gguf-lora"])
def test_a_gguf_file_carries_the_record(form: str, cases: dict[str, Case], tmp_path: Path) -> None:
    adapter = with_task(cases["llama"], tmp_path / "adapter", CHAT)
    convert(adapter, form, tmp_path / "out.gguf", model=str(cases["llama"].model))
    assert same(read_task(tmp_path / "out.gguf"), CHAT)


def test_a_gguf_file_without_a_record_has_none_and_a_damaged_one_is_refused(
    cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["llama"]
    convert(case.adapter, "gguf-lora", tmp_path / "out.gguf", model=str(case.model))
    assert read_task(tmp_path / "out.gguf") is None
    monkeypatch.setattr(Metadata, "optional", lambda self, key: "[1" if key == GGUF_KEY else "a")
    with pytest.raises(ArtifactError) as caught:
        read_task(tmp_path / "out.gguf")
    assert re.search(GGUF_KEY, str(caught.value))


def test_the_end_that_was_trained_stops_every_reader(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    """The tokenizer's own end is another token: a base model with a chat template."""
    case = cases["llama"]
    tokenizer: Any = load_tokenizer(str(case.model))
    end = tokenizer.convert_tokens_to_ids("<|im_start|>")
    task = CHAT.model_copy(update={"ends": ("<|im_start|>",)})
    adapter = with_task(case, tmp_path / "adapter", task)
    model = str(case.model)
    convert(adapter, "safetensors", tmp_path / "fused", model=model)
    written = json.loads((tmp_path / "fused" / "generation_config.json").read_text())
    assert written["eos_token_id"][:2] == [end, tokenizer.eos_token_id]
    convert(adapter, "ollama", tmp_path / "ollama", model=model)
    assert 'PARAMETER stop "<|im_start|>"\n' in (tmp_path / "ollama" / "Modelfile").read_text()
    path = tmp_path / "ollama" / "model.gguf"
    data = Metadata(open_gguf(path), path)
    assert data.general("tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert data.general("tokenizer.ggml.eot_token_id") == end
    llama = LlamaCpp(path)
    answer = llama.complete("a", n_predict=8, logit_bias=[[end, 1000.0]])
    assert answer["finish_reason"] == "stop" and answer["text"] == ""


class Fake:
    """A tokenizer that has a template, marks and one token."""

    def __init__(self, template: str, bos: str = "<s>", adds: bool = True) -> None:
        self.chat_template, self.bos_token, self.bos_token_id = template, bos, 1
        self.eos_token, self.adds = "</s>", adds
        self.all_special_tokens = [bos, "</s>", "<|im_end|>", "<|im_start|>"]
        self.special_tokens_map = {"bos_token": bos}

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] * self.adds + [5]}

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def get_chat_template(self, name: str | None, tools: Any) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: Any, tokenize: bool, **named: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = named.pop("tools", None)
        return render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self.chat_template,
            bos_token=self.bos_token,
            **named,
        )[0][0]


@pytest.mark.parametrize("adds", [True, False])
def test_the_first_mark_stands_once_before_an_ollama_prompt(adds: bool) -> None:
    text, _ = modelfile(Fake("{{ bos_token }}" + CHAT_TEMPLATE, adds=adds), None)
    assert ("<s>" in text) == (not adds)
    assert text.count("<|im_start|>user") == 1


DATED = "{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE


def test_an_ollama_prompt_has_the_date_of_the_training_or_none() -> None:
    task = CHAT.model_copy(update={"chat_template": DATED, "date": datetime(2021, 3, 4)})
    text, notes = modelfile(Fake(DATED), task)
    assert "04 Mar 2021" in text and any("2021-03-04" in note for note in notes)
    text, notes = modelfile(Fake(DATED), None)
    assert "TEMPLATE" not in text and any("date" in note for note in notes)


def test_an_ollama_template_without_the_models_tools_says_so() -> None:
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    assert any("tools" in note for note in modelfile(Fake(tools), None)[1])
    assert not modelfile(Fake(CHAT_TEMPLATE), None)[1]


def test_ollama_gets_the_plain_prompt_of_what_was_trained_without_a_chat_template() -> None:
    text, _ = modelfile(Fake(CHAT_TEMPLATE), CLASSES)
    assert 'TEMPLATE """{{ .Prompt }}"""' in text and "im_start" not in text
    assert "PARAMETER num_predict 2\n" in text


def test_ollama_takes_no_labels_that_differ_in_tokens(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    """It ends an answer by a count of tokens: "spam" became "spam spam" next to "can wait"."""
    labels = {"a": "yes", "b": "not now"}
    task = CLASSES.model_copy(update={"labels": labels})
    adapter = with_task(cases["llama"], tmp_path / "adapter", task)
    options = {"model": str(cases["llama"].model), "dry_run": True}
    with pytest.raises(ConfigError) as caught:
        convert(adapter, "ollama", tmp_path / "out", **options)
    assert caught.value.received == "tokens of 'not now': 8, 'yes': 4"
    assert convert(adapter, "gguf", tmp_path / "out.gguf", **options).bytes == 0
    same = CLASSES.model_copy(update={"labels": {"a": "yes", "b": "new"}})
    adapter = with_task(cases["llama"], tmp_path / "same", same)
    assert convert(adapter, "ollama", tmp_path / "out", **options).bytes == 0


def test_every_end_token_has_a_key_a_name_that_llama_cpp_knows_or_is_said(tmp_path: Path) -> None:
    """Of five ends two have keys, two llama.cpp knows by name, and one has to be named."""
    model = save_tiny(tmp_path / "model", "llama", vocab=288)
    tokenizer: Any = load_tokenizer(str(model))
    marks = ["<|eot_id|>", "<one>", "<two>", "<three>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(model)
    ids = tokenizer.convert_tokens_to_ids(marks)
    config = {"eos_token_id": [tokenizer.eos_token_id, *ids]}
    (model / "generation_config.json").write_text(json.dumps(config))
    save_adapter(random_adapter(load_model(str(model))), tmp_path / "adapter")
    path = tmp_path / "out.gguf"
    report = convert(tmp_path / "adapter", "gguf", path, model=str(model))
    (note,) = [note for note in report.notes if "end tokens" in note]
    assert "'<three>'" in note and "<two>" not in note and "eot_id" not in note
    llama = LlamaCpp(path)
    for mark, number in zip(marks, ids, strict=True):
        answer = llama.complete("a", n_predict=4, logit_bias=[[number, 1000.0]])
        assert (answer["finish_reason"] == "stop") == (mark != "<three>"), mark
    again = load_model(str(path)).model.generation_config.eos_token_id
    assert again == [tokenizer.eos_token_id, ids[1], ids[2]]


def test_named_templates_are_kept_or_named_with_their_count(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases["llama"]
    model = tmp_path / "model"
    shutil.copytree(case.model, model)
    named = {"rag": CHAT_TEMPLATE + "rag", "tool_use": CHAT_TEMPLATE + "{{ tools | tojson }}"}
    (model / "additional_chat_templates").mkdir()
    for name, text in named.items():
        (model / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    wanted = load_tokenizer(str(model)).chat_template
    assert wanted == {"default": CHAT_TEMPLATE, **named}
    for form, place in (("safetensors", ""), ("mlx-model", ""), ("ollama", "model.gguf")):
        out = tmp_path / form
        report = convert(case.adapter, form, out, model=str(model))
        assert load_tokenizer(str(out / place)).chat_template == wanted, form
        said = [note for note in report.notes if "2 others by name" in note]
        assert len(said) == (form == "ollama") and ("rag, tool_use" in "".join(said)) == bool(said)
        if form == "ollama":
            assert any("tools" in note for note in report.notes)


def test_a_gguf_file_keeps_the_date_of_the_training_and_says_so(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    task = CHAT.model_copy(update={"chat_template": DATED, "date": datetime(2021, 3, 4)})
    adapter = with_task(cases["llama"], tmp_path / "adapter", task)
    report = convert(adapter, "gguf", tmp_path / "out.gguf", model=str(cases["llama"].model))
    assert sum("2021-03-04" in note for note in report.notes) == 1
    assert "04 Mar 2021" in LlamaCpp(tmp_path / "out.gguf").chat([{"role": "user", "content": "a"}])
