"""`ondevice models`: types, caches with sizes, and removal; training a folder of any decoder from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.models import save_tiny
from ondevice.models.sources.cache import convert_once
from tests.models.test_any_decoder import save

MODEL = 4


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converted package, and a hub's snapshot as huggingface_hub lays it out."""
    import huggingface_hub

    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def build(folder: Path) -> dict[str, str]:
        for path in save_tiny(tmp_path / "made").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return {}

    convert_once("package/some-model-1.0", "package:some-model==1.0", build)
    repository, commit = (
        tmp_path / "hub" / "models--some--tiny",
        "0123456789abcdef0123456789abcdef01234567",
    )
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(save_tiny(tmp_path / "other", "qwen3").iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return tmp_path


def test_models_are_listed_with_their_sizes_and_removed(ondevice, caches: Path) -> None:
    listed = ondevice("models", "--json").json
    assert {"llama", "qwen3", "gemma3_text"} <= {
        family["model_type"] for family in listed["families"]
    }
    assert {"gpt_neox", "mamba", "stablelm"} <= set(listed["other_types"])
    every = ["full", "lora", "lora-fa", "lsp", "mesp", "mezo", "prge", "slideformer"]
    assert listed["methods_for_other_types"] == every
    package, hub = sorted(listed["models"], key=lambda model: model["kind"], reverse=True)
    assert (package["source"], package["kind"], package["model_type"]) == (
        "package:some-model==1.0",
        "package",
        "llama",
    )
    assert (hub["source"], hub["kind"], hub["model_type"], hub["whole"]) == (
        "some/tiny",
        "hub",
        "qwen3",
        True,
    )
    sizes = sum(path.stat().st_size for path in (caches / "made").iterdir())
    assert package["bytes"] > sizes and listed["total_bytes"] == package["bytes"] + hub["bytes"]
    text = ondevice("models").out
    assert "package:some-model==1.0" in text and "some/tiny" in text and "more types" in text

    assert ondevice("models", "--remove", "some/tiny", "--dry-run", "--json").json["dry_run"]
    assert len(ondevice("models", "--json").json["models"]) == 2
    assert (
        ondevice("models", "--remove", "package:some-model", "--json").json["removed"]["source"]
        == package["source"]
    )
    assert "deleted some/tiny" in ondevice("models", "--remove", "some/tiny").out
    assert ondevice("models", "--json").json["models"] == []
    gone = ondevice("models", "--remove", "some/tiny", "--json")
    assert gone.code == MODEL and "no cache has the model some/tiny" in gone.json["message"]


@pytest.mark.parametrize("model_type", ["gpt_neox", "mamba"])
def test_a_folder_of_any_decoder_trains(model_type: str, ondevice, tmp_path: Path) -> None:
    folder, rows, out = (
        save(tmp_path / "a modèl", model_type),
        tmp_path / "rows.jsonl",
        tmp_path / "run",
    )
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n} ", "completion": "yes"}) + "\n" for n in range(6))
    )
    run = ("train", "--method", "lora", "--model", folder, "--data", rows, "--out", out, "--json")
    done = ondevice(*run, "--steps", 3)
    assert done.code == 0 and done.json["steps"] == 3 and Path(done.json["adapter"]).is_dir()
    planned = ondevice("plan", "--method", "mesp", "--model", folder, "--json")
    assert planned.code == 0 and any(
        "as this model names its layers" in note for note in planned.json["notes"]
    )


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3_text", "smollm3", "phi3", "granite", "olmo2", "mistral", "lfm2"]
)
def test_a_plan_for_mesp_of_each_family(family: str, ondevice) -> None:
    planned = ondevice("plan", "--method", "mesp", "--model", f"tiny:{family}", "--json")
    assert (
        planned.code == 0
        and planned.json["fits"]
        and planned.json["parts_bytes"]["activations"] > 0
    )
