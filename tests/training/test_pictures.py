"""Rows with images: peft's gradients, a tower that reads each picture once, and pictures that may not be read."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from rich.console import Console

import ondevice
from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import DataError, MissingPackageError, ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import IGNORE, Adapter
from ondevice.data import Batches, pictures
from ondevice.data.examples import Dataset, rows_sha256
from ondevice.data.pictures import FIRST_ID, as_marks
from ondevice.data.reading import read_dataset
from ondevice.data.thumbnails import Thumbnail
from ondevice.models import LoadedModel, load_model, load_tokenizer
from ondevice.models.processor import load_processor
from ondevice.models.tiny import tiny_tokenizer
from tests.cli.command import CommandLine, write_rows
from tests.models.checkpoints import add_processor, save_checkpoint

SHAPES = ("SmolVLM2-2.2B-Instruct", "Qwen3.5-0.8B")
WITH_TORCHVISION = ("Mistral-Small-3.2-24B-Instruct", "LFM2.5-VL-1.6B")
"""Their processors need that package."""
SIZES = {"a": (32, 32), "b": (40, 24), "c": (20, 48)}


def chat(question: Any, answer: str, *images: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(images)} if images else {"messages": turns}


TWO = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
ROWS = [
    chat("What is this?", "a square", "pics/a.png"),
    chat("Nothing?", "no"),
    chat(TWO, "the second one", "pics/b.png", "pics/c.png"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "pics").mkdir()
    rng = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pics" / f"{name}.png")
    write_rows(folder / "rows.jsonl", ROWS)
    for name in SHAPES:
        add_processor(save_checkpoint(folder / name, name), name)
    return folder


def made(place: Path, name: str) -> Path:
    """Return the checkpoint of that name; its test is skipped if it needs a package that is not
    there."""
    if name in WITH_TORCHVISION:
        pytest.importorskip("torchvision")
        if not (place / name).exists():
            add_processor(save_checkpoint(place / name, name), name)
    return place / name


def encoded(place: Path, tokenizer: Any, name: str = "rows.jsonl", **options: Any) -> Dataset:
    return read_dataset(place / name, tokenizer, task=None, max_length_tokens=256, **options)


def random_adapter(loaded: LoadedModel, config: Any) -> Adapter:
    """Return pairs of which neither side is zero."""
    made = open_session(loaded, config, 0)
    adapter = made.adapter()
    assert adapter is not None
    rng = np.random.default_rng(1)
    for name, value in adapter.tensors.items():
        adapter.tensors[name] = 0.2 * rng.standard_normal(value.shape).astype(np.float32)
    made.release_model()
    return adapter


def peft_gradients(
    folder: Path, adapter: Path, dataset: Dataset, place: Path
) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients of peft over transformers' model, pixels and processor, in float64."""
    loaded = load_model(str(folder))
    config = json.loads((folder / "config.json").read_text())
    processor = load_processor(folder, config["model_type"], loaded.tokenizer)
    model: Any = peft.PeftModel.from_pretrained(
        loaded.model.double(), str(adapter), is_trainable=True
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, item in zip(ROWS, dataset.items, strict=True):
        parts = [
            {**turn, "content": pictures.in_parts(turn["content"])}
            if isinstance(turn["content"], str)
            else turn
            for turn in row["messages"]
        ]
        if "images" in row and isinstance(row["messages"][0]["content"], str):
            parts[0]["content"].insert(0, {"type": "image"})
        text = loaded.tokenizer.apply_chat_template(parts, tokenize=False)
        images = [Image.open(place / name) for name in row.get("images", ())]
        inputs = dict(
            processor(
                text=[text], images=images or None, return_tensors="pt", add_special_tokens=False
            )
        )
        length = len(item.example)
        ids = inputs["input_ids"][:, :length]
        assert ids[0].tolist() == as_marks(item.example.ids, loaded.tokenizer)
        inputs |= {"input_ids": ids, "attention_mask": inputs["attention_mask"][:, :length]}
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"][:, :length]
        inputs = {
            key: value.double() if key == "pixel_values" else value for key, value in inputs.items()
        }
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        labels = torch.tensor(item.example.labels)[1:]
        total = total + torch.nn.functional.cross_entropy(
            logits, labels, reduction="sum", ignore_index=IGNORE
        )
        count += int((labels != IGNORE).sum())
    (total / count).backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): value.grad.numpy()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    return float(total.detach() / count), gradients


@pytest.mark.parametrize("name", SHAPES + WITH_TORCHVISION)
def test_gradients_of_rows_with_images_are_those_of_peft(
    name: str, place: Path, tmp_path: Path
) -> None:
    targets = ["q_proj", "v_proj", "w2" if name.startswith("LFM2") else "down_proj"]
    loaded = load_model(str(made(place, name)))
    dataset = encoded(place, loaded.tokenizer)
    batch = Batches(dataset, 3, None, 0, 256).at(0)
    plain = {"rank": 2, "target_modules": targets, "weight_decay": 0.0}
    adapter = random_adapter(loaded, method_config("lora", plain))
    save_adapter(adapter, tmp_path / "adapter")
    loss, expected = peft_gradients(place / name, tmp_path / "adapter", dataset, place)
    assert len(expected) == len(adapter.tensors)
    for method in ("lora", "mesp"):
        session = open_session(load_with(loaded), method_config(method, plain), 0)
        session.load_adapter(adapter)
        assert session.step(batch.ids, batch.labels, 0, 0.0).loss == pytest.approx(loss, rel=1e-6)
        state = session.state()
        for key, wanted in expected.items():
            found = state[f"exp_avg/{key}"] / 0.1
            assert np.abs(found - wanted).max() <= 1e-6 * max(1.0, np.abs(wanted).max()), key
        session.release_model()


def load_with(loaded: LoadedModel) -> LoadedModel:
    """Return the same model without what it has seen."""
    loaded.family._seen.clear()  # type: ignore[attr-defined]
    return loaded


def test_the_tower_of_vision_reads_each_picture_once_and_other_pictures_give_other_losses(
    place: Path,
) -> None:
    loaded = load_model(str(place / SHAPES[0]))
    batch = Batches(encoded(place, loaded.tokenizer), 3, None, 0, 256).at(0)
    calls: list[int] = []
    tower: Any = loaded.model.base_model.get_encoder("image")
    tower.register_forward_hook(lambda *_: calls.append(1))
    session = open_session(loaded, method_config("lora", {"rank": 2}), 0)
    first = session.evaluate(batch.ids, batch.labels)[0]
    for step in range(3):
        session.step(batch.ids, batch.labels, step, 1e-2)
    assert len(calls) == 3
    row = next(number for number, ids in enumerate(batch.ids) if (ids >= FIRST_ID).sum() == 4)
    swapped = batch.ids.copy()
    other = next(ids for ids in batch.ids if (ids >= FIRST_ID).sum() == 8)
    swapped[row][swapped[row] >= FIRST_ID] = other[other >= FIRST_ID][:4]
    session.release_model()
    again = open_session(loaded, method_config("lora", {"rank": 2}), 0)
    assert again.evaluate(batch.ids, batch.labels)[0] == pytest.approx(first)
    assert again.evaluate(swapped, batch.labels)[0][row] != pytest.approx(first[row], rel=1e-4)


@pytest.mark.parametrize("name", [SHAPES[1], *WITH_TORCHVISION])
def test_a_run_with_images_is_planned_trains_and_is_evaluated(
    name: str, place: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "method": "lora", "batch_size": 2, "learning_rate": 0.01, "backend": "torch",
    }  # fmt: skip
    source, data = str(made(place, name)), str(place / "rows.jsonl")
    whole = ondevice.train(source, data, steps=4, out=tmp_path / "whole", **settings)
    plan = ondevice.plan(source, data, method="lora", batch_size=2).to_dict()
    longest = max(len(item.example) for item in encoded(place, load_tokenizer(source)).items)
    assert plan["length_tokens"] == -(-longest // 8) * 8
    assert np.isfinite(whole.result.final_loss)
    report = ondevice.evaluate(str(tmp_path / "whole"), data)
    assert np.isfinite(report.loss)


def test_rows_differ_by_the_content_of_their_pictures(place: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(place / SHAPES[0]))
    data = base64.b64encode((place / "pics" / "a.png").read_bytes()).decode()
    write_rows(tmp_path / "bytes.jsonl", [chat("What is this?", "a square", {"bytes": data})])
    write_rows(
        tmp_path / "other.jsonl",
        [chat("What is this?", "a square", {"bytes": data, "path": "nowhere.png"})],
    )
    by_path = encoded(place, tokenizer).items[:1]
    by_bytes, named = (encoded(tmp_path, tokenizer, f"{name}.jsonl").items for name in ("bytes", "other"))  # fmt: skip
    assert rows_sha256(by_path) == rows_sha256(by_bytes) == rows_sha256(named)
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    write_rows(tmp_path / "red.jsonl", [chat("What is this?", "a square", "red.png")])
    assert rows_sha256(encoded(tmp_path, tokenizer, "red.jsonl").items) != rows_sha256(by_path)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("../secret.png", "outside the folder"),
        ("/etc/passwd", "outside the folder"),
        ("link.png", "outside the folder"),
        ("none.png", "No such file"),
        ("text.png", "cannot identify"),
        ("https://example.org/a.png", "addresses are not fetched"),
        ("wide.png", "pixels"),
        ({"bytes": "#"}, "base64"),
        (7, "path or bytes"),
    ],
)
def test_a_picture_that_may_not_be_read_is_named_by_its_row(
    image: Any, words: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "secret.png")
    Image.new("RGB", (64, 64)).save(data / "wide.png")
    Image.new("RGB", (8, 8)).save(data / "good.png")
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    (data / "text.png").write_text("no picture")
    monkeypatch.setattr(pictures, "MOST_PIXELS", 1024)
    write_rows(data / "rows.jsonl", [chat("This?", "yes", "good.png"), chat("This?", "yes", image)])
    dataset = encoded(data, load_tokenizer(str(place / SHAPES[0])))
    (problem,) = dataset.problems
    assert (problem.line, problem.field) == (2, "images.0")
    assert words in problem.reason


@pytest.mark.parametrize("name", [SHAPES[1], *WITH_TORCHVISION])
def test_a_picture_that_a_processor_refuses_is_named_by_its_row(
    name: str, place: Path, tmp_path: Path
) -> None:
    """A line of pixels; Idefics 3's reads it."""
    Image.new("RGB", (900, 1)).save(tmp_path / "thin.png")
    Image.new("RGB", (32, 32)).save(tmp_path / "good.png")
    write_rows(
        tmp_path / "rows.jsonl", [chat("?", "yes", f"{one}.png") for one in ("good", "thin")]
    )
    dataset = encoded(tmp_path, load_tokenizer(str(made(place, name))))
    assert len(dataset) == 1
    (problem,) = dataset.problems
    assert (problem.line, problem.field) == (2, "images.0")
    assert "cannot read it, 900 x 1: " in problem.reason


def test_places_and_pictures_that_do_not_agree_are_named(place: Path, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    rows = [chat("This?", "red", "a.png"), chat(TWO, "yes", "a.png"), chat(TWO, "yes")]
    write_rows(tmp_path / "rows.jsonl", rows)
    dataset = encoded(tmp_path, load_tokenizer(str(place / SHAPES[0])))
    reasons = [(one.line, one.reason) for one in dataset.problems]
    assert "places for 2, and the row has 1" in dict(reasons)[2]
    assert "places for 2, and the row has 0" in dict(reasons)[3]


def test_a_text_model_leaves_out_rows_with_images_and_says_why(place: Path) -> None:
    tokenizer = load_tokenizer("tiny:llama")
    dataset = encoded(place, tokenizer)
    assert len(dataset) == 1
    assert {one.line for one in dataset.problems} == {1, 3}
    assert all("reads only text" in one.reason for one in dataset.problems)


def test_a_preview_shows_pictures_small_with_their_size(place: Path, capsys) -> None:
    command, folder = CommandLine(capsys), place / SHAPES[0]
    shown = command("data", place / "rows.jsonl", "--model", folder, "--json").json
    images = shown["example_images"]
    assert [[one["name"] for one in each] for each in images] == [["a.png"], [], ["b.png", "c.png"]]
    dataset = encoded(place, load_tokenizer(str(folder)))
    for each, item in zip(images, dataset.items, strict=True):
        marks = [token for token in item.example.ids if token >= FIRST_ID]
        assert sum(one["tokens"] for one in each) == len(marks)
        for one in each:
            assert (one["width"], one["height"]) == SIZES[one["name"][0]]
            small = Image.open(io.BytesIO(base64.b64decode(one["png"])))
            whole = Image.open(place / "pics" / one["name"])
            assert small.tobytes() == whole.tobytes()  # they are smaller than 96 pixels
    said = command("data", place / "rows.jsonl", "--model", folder).out
    assert "image: b.png, 40 x 24, " in said and "▀" not in said, "colours are for terminals"


def test_a_terminal_shows_a_picture_in_its_colours(tmp_path: Path) -> None:
    image = Image.new("RGB", (200, 100), (250, 0, 0))
    image.paste((0, 0, 250), (0, 50, 200, 100))
    image.thumbnail((96, 96))
    image.save(tmp_path / "a.png")
    png = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    console = Console(color_system="truecolor", force_terminal=True, file=io.StringIO())
    console.print(Thumbnail(name="", width=200, height=100, tokens=9, png=png))
    said = console.file.getvalue()
    assert said.count("▀") == 24 * 6 and "image: bytes of the row, 200 x 100, 9 tokens" in said
    rows = said.splitlines()
    assert "38;2;250;0;0" in rows[0] and "48;2;0;0;250" in rows[5]


def test_methods_that_train_the_tower_refuse_images_also_without_running(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = CommandLine(capsys)
    options = ("--method", "full", "-n", 1, "--backend", "torch", "-q", "-o", tmp_path / "run")
    for more in ((), ("--dry-run",)):
        done = command("train", place / SHAPES[0], "-d", place / "rows.jsonl", *options, *more)
        assert done.code == 2
        assert "full would train the tower that reads the images" in done.err
        assert "lora, lora-fa, mesp, prge" in done.err


def test_a_missing_token_processor_or_package_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = SHAPES[0]
    folder = save_checkpoint(tmp_path / "model", name)  # whose tokenizer has no marks
    with pytest.raises(ModelError) as caught:
        encoded(place, load_tokenizer(str(folder)))
    assert "processor_config.json" in caught.value.expected
    qwen = add_processor(save_checkpoint(tmp_path / "qwen", SHAPES[1]), SHAPES[1])
    template = load_tokenizer(str(qwen)).chat_template
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(qwen)
    with pytest.raises(ModelError) as caught:
        encoded(place, load_tokenizer(str(qwen)))
    assert "lacks the token" in str(caught.value) and "'<|image_pad|>'" in caught.value.expected
    add_processor(folder, name)
    values = json.loads((folder / "processor_config.json").read_text())
    values["processor_class"] = "SmolVLMProcessor"
    (folder / "processor_config.json").write_text(json.dumps(values))
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    with pytest.raises(MissingPackageError) as missing:
        encoded(place, load_tokenizer(str(folder)))
    assert "num2words" in missing.value.received


@pytest.mark.parametrize("name", WITH_TORCHVISION)
def test_a_processor_that_needs_torchvision_says_so(name: str, tmp_path: Path) -> None:
    """In a process without it: transformers asks once which packages there are."""
    pytest.importorskip("torchvision")
    add_processor(save_checkpoint(tmp_path / "model", name), name)
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    write_rows(tmp_path / "rows.jsonl", [chat("This?", "red", "a.png"), chat("Text?", "yes")])
    program = (
        "import sys; sys.modules['torchvision'] = None\nfrom ondevice.cli.app import run; run()"
    )
    words = ("train", "model", "-d", "rows.jsonl", "--method", "lora", "-n", "1", "-o", "run")
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == MissingPackageError.exit_code, done.stderr
    assert "torchvision" in done.stderr.lower() and "OfImages" not in done.stderr
    assert "rows without images train without" in done.stderr


def test_a_picture_that_changes_while_a_run_has_it_is_refused(place: Path, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    write_rows(tmp_path / "rows.jsonl", [chat("This?", "red", "a.png")])
    loaded = load_model(str(place / SHAPES[0]))
    batch = Batches(encoded(tmp_path, loaded.tokenizer), 1, None, 0, 256).at(0)
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "a.png")
    session = open_session(loaded, method_config("lora", {"rank": 2}), 0)
    with pytest.raises(DataError) as caught:
        session.evaluate(batch.ids, batch.labels)
    assert "has changed" in str(caught.value)
