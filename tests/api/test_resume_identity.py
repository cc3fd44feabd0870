"""A run that goes on after something changed: the same bits, a refusal that names it, or a word in the log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers.utils.chat_template_utils as chat_template_utils
from safetensors.torch import load_file, save_file

import ondevice
from ondevice.core.errors import CheckpointError, DataError, OndeviceError
from ondevice.models.tiny import save_tiny
from ondevice.training import identity
from ondevice.training import rows as training_rows
from ondevice.training.events import FILE_NAME, Resume, Start, Warning, read_log
from tests.cli.command import write_rows

TEMPLATE = (
    "{%- if strftime_now is defined -%}Today is {{ strftime_now('%d %b %Y %H') }}.\n{%- endif -%}"
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if tools -%}{{ tools }}{%- endif -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
ROWS = [
    ("Hi", "A."),
    ("Count", "One two."),
    ("Why?", "Because."),
    ("Name", "Ulm"),
    ("List", "Apples, pears."),
]


def turns(rows: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]}
        for asked, told in rows
    ]


@dataclass
class Case:
    """A run that was stopped: its model, rows and folder, the settings that it goes on with, and pytest's patches."""

    folder: Path
    patch: pytest.MonkeyPatch
    settings: dict[str, Any] = field(default_factory=dict)
    rows: Any = None
    adapter: Path | None = None

    def go_on(self, steps: int = 4, **more: Any) -> Any:
        base = {
            "model.source": str(self.folder / "model"), "model.device": "cpu", "method.name": "lora",
            "data.path": str(self.folder / "rows.jsonl"), "data.eval_path": str(self.folder / "eval.jsonl"),
            "train.out": str(self.folder / "run"), "train.steps": steps, "train.batch_size": 2,
            "data.max_length_tokens": 96,
        }  # fmt: skip
        settings = {
            key: value for key, value in (base | self.settings | more).items() if value is not None
        }
        return ondevice.train(settings, rows=self.rows, adapter=self.adapter, resume=True)

    @property
    def log(self) -> list[Any]:
        return [entry.event for entry in read_log(self.folder / "run" / FILE_NAME).entries]

    @property
    def losses(self) -> list[float]:
        return [event.loss for event in self.log if event.kind == "step"]

    @property
    def told(self) -> str:
        changed = [str(event.changed) for event in self.log if isinstance(event, Resume)]
        return "\n".join(
            [*changed, *(event.message for event in self.log if isinstance(event, Warning))]
        )


def begin(folder: Path, **settings: Any) -> Case:
    """Train the first two steps of a run in a new folder."""
    save_tiny(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    config = folder / "model" / "tokenizer_config.json"
    values = json.loads(config.read_text())
    config.write_text(
        json.dumps({key: value for key, value in values.items() if key != "chat_template"})
    )
    write_rows(folder / "rows.jsonl", turns(ROWS))
    write_rows(folder / "eval.jsonl", turns(ROWS[:2]))
    case = Case(folder, pytest.MonkeyPatch(), settings)
    case.go_on(steps=2)
    return case


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory.mktemp("begun")).folder


@pytest.fixture
def case(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    shutil.copytree(begun, tmp_path / "case")
    return Case(tmp_path / "case", monkeypatch)


def edit_text(name: str, old: str, new: str) -> Callable[[Case], None]:
    def edit(case: Case) -> None:
        text = (case.folder / name).read_text()
        assert old in text
        (case.folder / name).write_text(text.replace(old, new, 1))

    return edit


def set_to(**settings: Any) -> Callable[[Case], None]:
    return lambda case: case.settings.update(
        {key.replace("__", "."): value for key, value in settings.items()}
    )


def edit_tokenizer(change: Callable[[dict[str, Any]], None]) -> Callable[[Case], None]:
    def edit(case: Case) -> None:
        path = case.folder / "model" / "tokenizer.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return edit


def swap_tokens(values: dict[str, Any]) -> None:
    words = values["model"]["vocab"]
    words["a"], words["e"] = words["e"], words["a"]


def edit_weights(case: Case) -> None:
    path = case.folder / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
    save_file(tensors, path, metadata={"format": "pt"})


def reorder(case: Case) -> None:
    write_rows(case.folder / "rows.jsonl", turns(ROWS[::-1]))


def encode_otherwise(case: Case) -> None:
    """As another version of a library or of this package may encode the same file."""
    read = training_rows.encode

    def other(*arguments: Any, **options: Any) -> Any:
        dataset = read(*arguments, **options)
        first = dataset.items[0]
        labels = (*first.example.labels[:-1], -100)
        dataset.items[0] = replace(first, example=replace(first.example, labels=labels))
        return dataset

    case.patch.setattr(training_rows, "encode", other)


def other_library(case: Case) -> None:
    version = identity.version
    case.patch.setattr(
        identity, "version", lambda name: "0.0.1" if name == "tokenizers" else version(name)
    )


def other_threads(case: Case) -> None:
    case.patch.setattr(torch, "get_num_threads", lambda: 77)


def other_instructions(case: Case) -> None:
    case.patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")


def other_precision(case: Case) -> None:
    case.patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")


def from_python(case: Case) -> None:
    case.settings["data.path"] = None
    case.rows = turns(ROWS)


def start_adapter(case: Case) -> None:
    case.adapter = case.folder / "run" / "adapter"


REFUSED: dict[str, tuple[Callable[[Case], None], str]] = {
    "template": (edit_text("model/chat_template.jinja", "Today is", "The date is"), "the chat template"),
    "a part of the template that no row uses": (
        edit_text("model/chat_template.jinja", "{{ tools }}", "{{ tools | tojson }}"), "the chat template"),
    "two tokens swapped": (edit_tokenizer(swap_tokens), "the tokenizer"),
    "normaliser": (
        edit_tokenizer(lambda values: values.update(normalizer={"type": "Lowercase"})), "the tokenizer"),
    "end token": (edit_text("model/tokenizer_config.json", '"<eos>"', '"<|im_end|>"'), "the tokenizer"),
    "a row's text": (edit_text("rows.jsonl", "One two.", "One three."), "the data"),
    "order of rows": (reorder, "the data"),
    "a row more": (lambda case: write_rows(case.folder / "rows.jsonl", turns([*ROWS, ROWS[0]])), "the data"),
    "rows from Python": (from_python, "the data"),
    "rows to evaluate": (edit_text("eval.jsonl", "One two.", "Nine."), "the rows to evaluate"),
    "rows encoded otherwise": (encode_otherwise, "the rows as token ids"),
    "weights": (edit_weights, "model"),
    "model's configuration": (edit_text("model/config.json", '"rms_norm_eps": 1e-0', '"rms_norm_eps": 2e-0'), "model"),
    "precision of the weights": (set_to(model__dtype="bfloat16"), "dtype"),
    "labels of the prompt": (set_to(data__train_on_prompt=True), "data.train_on_prompt"),
    "length": (set_to(data__max_length_tokens=80), "data.max_length_tokens"),
    "packing": (set_to(data__packing=True), "data.packing"),
    "order of steps": (set_to(data__group_by_length=True), "data.group_by_length"),
    "batch size": (set_to(train__batch_size=1), "data.batch_size"),
    "seed": (set_to(train__seed=5), "seed"),
    "rank": (set_to(method__rank=3), "method.rank"),
    "weight decay": (set_to(method__weight_decay=0.1), "method.weight_decay"),
    "method": (set_to(method__name="lora-fa"), "method.name"),
    "first adapter": (start_adapter, "adapter"),
}  # fmt: skip
SAID: dict[str, tuple[Callable[[Case], None], str]] = {
    "version of a library": (other_library, "tokenizers 0"),
    "threads": (other_threads, "threads"),
    "instructions of the processor": (other_instructions, "instructions"),
    "precision of matrix products": (other_precision, "matmul_precision"),
    "rows to evaluate left out": (set_to(data__eval_path=None), "left out"),
    "learning rate": (set_to(method__learning_rate=1e-5), "method.learning_rate"),
    "schedule": (set_to(train__schedule="linear"), "train.schedule"),
}
ACCEPTED = [name for name, (_, part) in REFUSED.items() if part.startswith("the ")]


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_is_refused_by_name_and_nothing_is_lost(name: str, case: Case) -> None:
    change, part = REFUSED[name]
    change(case)
    before = (case.folder / "run" / FILE_NAME).read_bytes()
    with pytest.raises(OndeviceError) as caught:
        case.go_on()
    assert part in caught.value.message
    assert part.startswith("the ") or f"{part} = " in str(caught.value.expected)
    assert (case.folder / "run" / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("name", SAID)
def test_a_change_that_a_run_survives_is_said_in_its_log(name: str, case: Case) -> None:
    change, part = SAID[name]
    change(case)
    case.go_on()
    assert len(case.losses) == 4 and part.partition(" ")[0] in case.told


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_flag_takes_a_change_once_and_the_log_says_so(name: str, case: Case) -> None:
    change, part = REFUSED[name]
    change(case)
    case.go_on(steps=3, **{"train.accept_changes": True})
    assert part in case.told and "accept_changes" in case.told
    # It is known now: without the flag the run goes on, and another change is refused again.
    case.go_on(steps=4)
    assert len(case.losses) == 4
    edit_text("model/chat_template.jinja", "if tools", "if tools and true")(case)
    with pytest.raises(CheckpointError) as caught:
        case.go_on(steps=5)
    assert "encoded.template" in caught.value.expected


def at(case: Case, when: datetime) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return when

    case.patch.setattr(chat_template_utils, "datetime", Clock)
    case.patch.setattr("time.time", when.timestamp)


def test_a_run_that_goes_on_another_day_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Case(tmp_path / "stopped", monkeypatch)
    at(first, datetime(2026, 3, 1, 23, 59))
    begin(tmp_path / "stopped").go_on(steps=2)
    begin(tmp_path / "straight").go_on(steps=4)
    rendered = [event.decided["data.date"] for event in first.log if isinstance(event, Start)]
    assert rendered == ["2026-03-01T23:59:00"]
    at(first, datetime(2026, 3, 2, 11, 30))
    first.go_on(steps=4)
    assert first.losses == Case(tmp_path / "straight", monkeypatch).losses
    begin(tmp_path / "later").go_on(steps=4)
    assert first.losses != Case(tmp_path / "later", monkeypatch).losses  # the date is in the rows


def forget(case: Case, *fields: str) -> None:
    """Make the log and its checkpoints those of a version that recorded none of this."""
    path = case.folder / "run" / FILE_NAME
    head, _, rest = path.read_bytes().partition(b"\n")
    values = json.loads(head)
    values["identity"].pop("encoded")
    values.pop("environment")
    values["decided"].pop("data.date")
    path.write_bytes(json.dumps(values).encode() + b"\n" + rest)
    for meta in (case.folder / "run").glob("checkpoint-*/meta.json"):
        stored = json.loads(meta.read_text())
        stored["identity"].pop("encoded")
        meta.write_text(json.dumps(stored))


def test_an_older_log_is_gone_on_with_at_its_own_date_and_says_once_what_is_not_known(
    case: Case,
) -> None:
    forget(case)
    head = next(event for event in case.log if isinstance(event, Start))
    seen: list[datetime | None] = []
    dated = training_rows.dated
    case.patch.setattr(
        training_rows, "dated", lambda tokenizer, when: dated(tokenizer, seen.append(when) or when)
    )
    case.go_on(steps=3)
    assert seen == [datetime.fromtimestamp(int(head.time_s))]
    assert case.told.count("is not known") == 1
    case.go_on(steps=4)
    assert case.told.count("is not known") == 1
    edit_text("model/chat_template.jinja", "if tools", "if tools and true")(case)
    with pytest.raises(CheckpointError) as caught:
        case.go_on(steps=5)
    assert "encoded.template" in caught.value.expected


def test_a_checkpoint_without_its_log_is_compared_itself(case: Case) -> None:
    (case.folder / "run" / FILE_NAME).unlink()
    edit_text("model/chat_template.jinja", "Today is", "The date is")(case)
    with pytest.raises(CheckpointError) as caught:
        case.go_on()
    assert "encoded.template" in caught.value.expected


def test_a_task_template_that_changed_is_refused(tmp_path: Path) -> None:
    rows = [{"asked": asked, "told": told} for asked, told in ROWS]
    folder = tmp_path / "case"
    save_tiny(folder / "model")
    write_rows(folder / "rows.jsonl", rows)
    (folder / "task.yaml").write_text("prompt: 'Q: {asked} A:'\nlabel: told\n")
    case = Case(
        folder,
        pytest.MonkeyPatch(),
        {"data.task": str(folder / "task.yaml"), "data.eval_path": None},
    )
    case.go_on(steps=2)
    edit_text("task.yaml", "Q: ", "Ask: ")(case)
    with pytest.raises(CheckpointError) as caught:
        case.go_on()
    assert "data.task_sha256" in caught.value.expected
    case.go_on(**{"train.accept_changes": True})
    assert "the task's template changed" in case.told


@pytest.mark.parametrize(
    "edit", [("Because.", "Because!"), ("Apples, pears.", "Apples! pears.")], ids=["1st", "2nd"]
)
def test_a_streamed_window_that_changed_unseen_by_the_files_digest_is_refused(
    edit: tuple[str, str], tmp_path: Path
) -> None:
    """Of a file of many gigabytes only pieces are hashed; each window has a digest of its own."""
    options = {"data.streaming": True, "data.shuffle_records": 3, "data.eval_path": None}
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr("ondevice.training.identity.sha256_spread", lambda path: "0" * 64)
        case = begin(tmp_path / "case", **options)
        case.go_on(steps=2)
        edit_text("rows.jsonl", *edit)(case)
        with pytest.raises(DataError) as caught:
            case.go_on(steps=8)
        assert caught.value.expected == "the same token ids and labels"


def test_mutations_are_more_than_twenty() -> None:
    assert len(REFUSED) + len(SAID) >= 20
