"""A configuration that says `tie_word_embeddings`, next to weights with their own output head.

transformers compares the two matrices, and does not tie them if they differ. Everything that
follows the configuration only, such as MLX or a converter, would leave the head out. So the
configuration is read as the weights have it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ondevice.core.errors import ModelError
from ondevice.core.untrusted import Refused, read_header

HEAD = "lm_head.weight"
HEADS = (HEAD, "embed_out.weight", "output.weight")
"""Names of a head; those after the first are of families that `any_dims` reads."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
CHUNK_BYTES = 1 << 24


def as_the_weights_are(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a folder's configuration, with `tie_word_embeddings: false` if the weights have
    another head."""
    files = tuple(
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.glob("*.safetensors")) if path.is_file()
    )  # fmt: skip
    if config.get("tie_word_embeddings") is False or not _has_own_head(files):
        return config
    config = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return config


def check_head(folder: Path) -> None:
    """Raise ModelError if no weights file has an output head, for a configuration that ties none to
    the embedding."""
    if not any(_entries(path).keys() & set(HEADS) for path in sorted(folder.glob("*.safetensors"))):
        hint = "copy the model again, or say tie_word_embeddings: true in config.json if the embedding is its head"
        raise ModelError(
            f"{folder}: missing tensor in the weights",
            expected=HEAD,
            received="none of it",
            hint=hint,
        )


@functools.lru_cache(maxsize=32)
def _has_own_head(files: tuple[tuple[str, int, int], ...]) -> bool:
    """Return True if the files have an output head whose bytes are not the embedding's."""
    places: dict[str, tuple[Path, int, int]] = {}
    for name, _, _ in files:
        for tensor, place in _entries(Path(name)).items():
            if (
                tensor == HEAD
                or tensor.endswith(tuple(f".{end}" for end in EMBEDDINGS))
                or tensor in EMBEDDINGS
            ):
                places.setdefault(HEAD if tensor == HEAD else "embedding", (Path(name), *place))
    return len(places) == 2 and not _same_bytes(*places.values())


def _entries(path: Path) -> dict[str, tuple[int, int]]:
    """Return begin and end of each tensor in bytes; nothing for a file of another kind."""
    try:
        return {name: (place.start, place.end) for name, place in read_header(path).tensors.items()}
    except (OSError, Refused):
        return {}  # `check_weights` reports the fault


def _same_bytes(one: tuple[Path, int, int], other: tuple[Path, int, int]) -> bool:
    length = one[2] - one[1]
    if length != other[2] - other[1]:
        return False
    with one[0].open("rb") as first, other[0].open("rb") as second:
        first.seek(one[1])
        second.seek(other[1])
        for begin in range(0, length, CHUNK_BYTES):
            count = min(CHUNK_BYTES, length - begin)
            if first.read(count) != second.read(count):
                return False
    return True
