"""Models and artifacts that a job can name: folders of the store, and what needs no folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice.server.store import ID, MissingError, Store


def list_models(store: Store) -> list[dict[str, Any]]:
    """Every model that is at hand: id, kind, size, and the sizes that its configuration states."""
    from ondevice.models import families, find_cached
    from ondevice.models.package import KNOWN

    found = []
    for folder in sorted((store.root / "models").iterdir()):
        if ID.fullmatch(folder.name) and (source := _source(folder)):
            files = [path for path in folder.rglob("*") if path.is_file()]
            about = _config(Path(source)) if Path(source).is_dir() else {"model_type": "gguf"}
            found.append(
                {"id": folder.name, "kind": "folder", "bytes": sum(path.stat().st_size for path in files), **about}
            )
    for name in KNOWN:
        if (folder := find_cached(f"package:{name}")) is not None:
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            found.append({"id": f"package:{name}", "kind": "package", "bytes": size, **_config(folder)})
    return found + [
        {"id": f"tiny:{name}", "kind": "random", "bytes": 0, "model_type": name} for name in sorted(families())
    ]


def locate_model(store: Store, name: str) -> str:
    """The source string of a model's id.

    Raises:
        MissingError: no folder of the store, no package that is known, no `tiny:` family and no hub id.
    """
    from ondevice.models import families
    from ondevice.models.hub import HUB_ID
    from ondevice.models.package import KNOWN

    if ID.fullmatch(name) and (source := _source(store.path("models", name))):
        return source
    kind, _, rest = name.partition(":")
    if (kind == "tiny" and rest in families()) or (kind == "package" and rest in KNOWN):
        return name
    if "/" in name and HUB_ID.fullmatch(name) and ".." not in name:
        return name
    raise MissingError(
        f"there is no model {name!r}",
        expected="an id of GET /v1/models, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct",
        received=name,
        hint="upload it as a zip, or put its folder into the store's models folder",
    )


def list_artifacts(store: Store) -> list[dict[str, Any]]:
    """Every artifact of the store: id, target, runtime, method and model. Files are hashed when a job opens one."""
    from ondevice.artifact.manifest import read_manifest
    from ondevice.errors import ArtifactError

    found = []
    for folder in sorted((store.root / "artifacts").iterdir()):
        if not ID.fullmatch(folder.name) or not (folder / "manifest.json").is_file():
            continue
        try:
            manifest = read_manifest(folder, check_files=False)
        except ArtifactError:
            continue
        found.append(
            {
                "id": folder.name,
                "target": manifest.target,
                "runtime": manifest.runtime,
                "method": str(manifest.method.get("name", "")),
                "model": manifest.model.source,
                "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            }
        )
    return found


def _source(folder: Path) -> str | None:
    """What `load_model` takes for a folder of the store: itself, or the only .gguf file in it."""
    if (folder / "config.json").is_file():
        return str(folder)
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return str(files[0]) if len(files) == 1 else None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    return {key: config[key] for key in names if isinstance(config, dict) and isinstance(config.get(key), int | str)}
