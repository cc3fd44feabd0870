"""A run's README says how to use what was trained, and the code in it does."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.data.encode import encode
from ondevice.data.readers.source import Record, Source
from ondevice.data.tasks.trained import TrainedTask, read_trained_task
from ondevice.models import save_tiny
from ondevice.training.usage import README_NAME, readme

ROWS = {
    "labels": [{"text": "my card", "label": "billing"}, {"text": "no sound", "label": "it's loud"}],
    "completions": [
        {"prompt": "one", "completion": " two"},
        {"prompt": "two", "completion": " six"},
    ],
    "conversations": [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
        {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "why"}]},
    ],
}
WORDS = {
    "labels": ("my card", "no sound"),
    "completions": ("two", "six"),
    "conversations": ("hi", "yes", "why"),
}
"""Of the rows; labels are told."""
PROMPTS = {
    "labels": "{text}\nLabel:",
    "completions": "{prompt}",
    "conversations": "<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("a folder")
    model = save_tiny(folder / "model")
    found = {}
    for kind, rows in ROWS.items():
        config = {
            "model.source": str(model),
            "method.name": "mesp",
            "train.steps": 2,
            "train.out": str(folder / kind),
        }
        ondevice.train(config, rows=rows)
        found[kind] = folder / kind / "adapter"
    return found


@pytest.mark.parametrize("kind", ROWS)
def test_the_readme_has_the_prompt_of_the_training_and_no_row_of_it(
    kind: str, trained: dict[str, Path]
) -> None:
    task = read_trained_task(trained[kind])
    assert task is not None
    assert task.prompt == PROMPTS[kind]
    text = (trained[kind] / README_NAME).read_text()
    assert f"`{json.dumps(task.prompt)}`" in text
    assert all(not re.search(rf"\b{word}\b", text) for word in WORDS[kind])
    for title in ("## With ondevice", "## With transformers + peft", "## With llama.cpp"):
        assert title in text


@pytest.mark.parametrize("kind", ROWS)
def test_the_python_code_of_the_readme_asks_as_the_training_did(
    kind: str, trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained[kind])
    task = read_trained_task(trained[kind])
    assert task is not None
    code = re.search(r"```python\n(.*?)```", Path(README_NAME).read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code[1], names)
    asked = task.prompt_rows(Source("json", iter([Record(1, _example(kind))]), []), "the example")
    item = encode(asked, names["tokenizer"], max_length_tokens=512).items[-1]
    assert tuple(names["ids"][0].tolist()) == item.example.ids[: item.prompt_tokens]
    if kind == "labels":
        losses = [names["loss"](label) for label in names["labels"]]
        assert shown.getvalue().strip("\n") == names["labels"][losses.index(min(losses))]


def _example(kind: str) -> dict[str, Any]:
    name = {"labels": "text", "completions": "prompt"}.get(kind)
    if name:
        return {name: f"{{{name}}}"}
    return {"messages": [{"role": "user", "content": "{message}"}]}


def test_the_shell_line_of_the_readme_sends_the_prompt_with_its_quotes() -> None:
    task = TrainedTask(format="completion", prompt='it\'s {a}\n"so" $HOME `x`')
    line = re.search(r"curl \S+ (-d .*)\n", readme(task))
    assert line is not None
    sent = subprocess.run(
        ["sh", "-c", f'set -- {line[1]}; printf %s "$2"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(sent)["prompt"] == task.prompt


def test_the_readme_says_that_text_follows_a_short_label(trained: dict[str, Path]) -> None:
    said = "the answer is the one above that the text begins with"
    found = {kind: said in (folder / README_NAME).read_text() for kind, folder in trained.items()}
    assert found == {"labels": True, "completions": False, "conversations": False}


def test_labels_that_an_adapter_was_not_trained_on_are_named(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    model = str(trained["labels"].parent.parent / "model")
    rows = [{"text": "hi", "label": "billing"}, {"text": "no", "label": "neu"}]
    noted = []
    for rows_of, out in ((rows, "new"), (ROWS["labels"], "known")):
        ondevice.train(
            model,
            rows_of,
            method="mesp",
            steps=1,
            out=str(tmp_path / out),
            adapter=trained["labels"],
        )
        noted.append((tmp_path / out / "events.jsonl").read_text())
    assert "labels that the adapter was not trained on: neu" in noted[0]
    assert "was not trained on" not in noted[1]
