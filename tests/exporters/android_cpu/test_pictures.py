"""Rows with images train through a program of blocks: the host's tower reads them, and gradients
are those of the whole checkpoint in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ondevice.api.export import export
from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import DataError
from ondevice.core.registry import method_config, open_session, target
from ondevice.core.session import IGNORE
from ondevice.data import Batches
from ondevice.data.pictures import FIRST_ID
from ondevice.data.reading import read_dataset
from ondevice.models import load_model
from tests.cli.command import CommandLine, write_rows
from tests.eager_program import computing_in_pytorch
from tests.methods.reference import batch
from tests.models.checkpoints import add_processor, save_checkpoint
from tests.programs import config

pytest.importorskip("executorch.exir")
TAKEN, REFUSED = "SmolVLM2-2.2B-Instruct", "Qwen3.5-0.8B"
ALSO_TAKEN = ("Mistral-Small-3.2-24B-Instruct", "LFM2.5-VL-1.6B")
LENGTH = 128
TARGETS = ["q_proj", "v_proj", "down_proj"]
TARGETS_OF = {"LFM2.5-VL-1.6B": ["q_proj", "in_proj", "w2"]}


def chat(question: str, answer: str, *images: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(images)} if images else {"messages": turns}


ROWS = [
    chat("What?", "a square", "a.png"),
    chat("Nothing?", "no"),
    chat("Which?", "the second", "b.png", "a.png"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, (width, height) in {"a": (32, 32), "b": (40, 24)}.items():
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with computing_in_pytorch(checked=True):
        yield CommandLine(capsys)


def exported(command: CommandLine, place: Path, name: str) -> Path:
    folder = add_processor(save_checkpoint(place / name, name), name)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = LENGTH
    (folder / "config.json").write_text(json.dumps(config))
    settings = [
        f"export.lengths_tokens=[{LENGTH}]",
        "export.batch_size=3",
        "export.eval_batch_size=3",
        "method.rank=2",
        "method.optimizer=sgd",
        f"method.target_modules={json.dumps(TARGETS_OF.get(name, TARGETS))}",
    ]
    options = [part for one in settings for part in ("--set", one)]
    done = command(
        "export",
        "-m",
        folder,
        "--target",
        "android-cpu",
        "--method",
        "mesp",
        *options,
        "-o",
        place / "art",
    )
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("name", [TAKEN, *ALSO_TAKEN])
def test_gradients_of_rows_with_images_are_those_of_the_checkpoint(
    name: str, place: Path, command: CommandLine
) -> None:
    if name in ALSO_TAKEN:
        pytest.importorskip("torchvision")
    loaded: Any = load_model(str(exported(command, place, name)))
    dataset = read_dataset(
        place / "rows.jsonl", loaded.tokenizer, task=None, max_length_tokens=LENGTH
    )
    batch = Batches(dataset, 3, (LENGTH,), 0, 0).at(0)
    assert int((batch.ids >= FIRST_ID).sum()) == 12
    manifest = read_manifest(place / "art")
    program: Any = target("android-cpu").open(place / "art", manifest)
    program.take_pictures(loaded.tokenizer.pictures)
    adapter = program.adapter()
    rng = np.random.default_rng(1)
    for value in adapter.tensors.values():
        value[:] = 0.2 * rng.standard_normal(value.shape)
    program.load_adapter(adapter)
    nll = program.evaluate(batch.ids, batch.labels)[0]
    loss = program.step(batch.ids, batch.labels, 0, 1.0).loss
    after = program.adapter().tensors
    targets = TARGETS_OF.get(name, TARGETS)
    plain = {"rank": 2, "target_modules": targets, "weight_decay": 0.0}
    for method in ("lora", "mesp"):
        eager: Any = open_session(loaded, method_config(method, plain), 0)
        eager.load_adapter(adapter)
        assert nll == pytest.approx(eager.evaluate(batch.ids, batch.labels)[0], rel=1e-5)
        assert loss == pytest.approx(eager.step(batch.ids, batch.labels, 0, 0.0).loss, rel=1e-5)
        state = eager.state()
        for name, before in adapter.tensors.items():
            wanted = state[f"exp_avg/{name}"] / 0.1
            found = before - after[name]
            assert np.abs(wanted).max() > 1e-4, name
            assert np.abs(found - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max()), name
        eager.release_model()
    swapped = np.where(batch.ids >= FIRST_ID, 0, batch.ids)
    labels = np.where(batch.ids >= FIRST_ID, IGNORE, batch.labels)
    assert not np.allclose(program.evaluate(swapped, labels)[0], nll, rtol=1e-4)


def test_tokens_of_pictures_without_a_tower_are_refused_by_name(tmp_path: Path) -> None:
    """Nothing stands in their place: token 0 would be trained on in silence."""
    with computing_in_pytorch():
        folder = export(config("blocks of lfm2, q4"), tmp_path / "art").path
        session: Any = open_artifact(folder)
        ids, labels = batch(1, 16, seed=0)
        ids[0, 3] = FIRST_ID + 5
        before = session.state()["adapter"].tobytes()
        calls = (lambda: session.step(ids, labels, 0, 1e-2), lambda: session.evaluate(ids, labels))
        for run in calls:
            with pytest.raises(DataError) as caught:
                run()
            assert "tokens of pictures" in caught.value.message
            assert "take_pictures" in str(caught.value.hint)
        assert session.state()["adapter"].tobytes() == before


def test_a_run_of_an_artifact_trains_on_images(place: Path, command: CommandLine) -> None:
    exported(command, place, TAKEN)
    flags = ("-d", place / "rows.jsonl", "-n", 2, "--lr", 0.01, "-q")
    planned = command("run", place / "art", *flags, "--dry-run")
    assert planned.code == 0, planned.err
    done = command("run", place / "art", *flags, "-o", place / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["unused_rows"] == 0, done.json
    trained = load_adapter(place / "run" / "adapter")
    assert not trained.changes_nothing and "model.text_model.layers.0" in trained.linears[0]


def test_a_model_whose_picture_tokens_are_not_texts_is_refused_by_name(
    place: Path, command: CommandLine
) -> None:
    exported(command, place, REFUSED)
    done = command("run", place / "art", "-d", place / "rows.jsonl", "-n", 1, "-o", place / "run")
    assert done.code == 2
    assert "takes no images of qwen3_5 models" in done.err and "SmolVLM2" in done.err
