"""From a source string to a folder with a configuration, safetensors and a tokenizer.

`package:NAME[==VERSION]` | `tiny:FAMILY` | a `.gguf` file | a folder | a hub id, tried in this
order.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import sha256_file
from ondevice.core.errors import ModelError
from ondevice.core.process import expanded
from ondevice.core.untrusted import Refused, inside, read_header, read_json, read_object
from ondevice.models.sources import cache, hub
from ondevice.models.sources.gguf import convert_gguf
from ondevice.models.sources.package import find_package, resolve_package

if TYPE_CHECKING:
    from ondevice.core.manifest import ModelInfo

PACKAGE_PREFIX = "package:"
TINY_PREFIX = "tiny:"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HEAD = "lm_head.weight"
HEADS = (HEAD, "embed_out.weight", "output.weight")
"""Names of a head; those after the first are of families that `any_dims` reads."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class SourceInfo:
    """Origin of a model.

    Attributes:
        source: the string the user gave.
        path: its folder; None for a random `tiny:` model.
        revision: hub revision, if given.
    """

    source: str
    path: Path | None
    revision: str | None = None
    known_sha256: str | None = field(default=None, repr=False)

    @cached_property
    def sha256(self) -> str:
        """The model's identity: SHA-256 over names and SHA-256 of `config.json` and every
        safetensors file.

        A converted model has it recorded; other files are read, once, when it is asked for.
        """
        if self.known_sha256 is not None:
            return self.known_sha256
        if self.path is None:
            raise ModelError(f"{self.source} has no files to hash")
        return weights_sha256({path.name: sha256_file(path) for path in weight_files(self.path)})


def is_in_memory(model: SourceInfo | ModelInfo) -> bool:
    """Return whether a model came from Python: its digest is of tensors, and not of files."""
    return getattr(model, "path", model) is None and not model.source.startswith(TINY_PREFIX)


def weights_sha256(digests: dict[str, str]) -> str:
    """Hash `config.json` and the safetensors files among `digests` (name to SHA-256) into one
    digest."""
    names = sorted(
        name for name in digests if name == "config.json" or name.endswith(".safetensors")
    )
    return hashlib.sha256(
        "".join(f"{name} {digests[name]}\n" for name in names).encode()
    ).hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """List `config.json` and the safetensors files of a folder, sorted."""
    return sorted([folder / "config.json", *folder.glob("*.safetensors")])


def stored_files(folder: Path) -> list[Path]:
    """List the safetensors files that transformers reads of a folder: one, or those of the index.

    Raises:
        ModelError: as `indexed_files`.
    """
    if (folder / FILE_NAME).is_file():
        return [folder / FILE_NAME]
    return indexed_files(folder)


def indexed_files(folder: Path) -> list[Path]:
    """List the files that an index names.

    Raises:
        ModelError: the index cannot be read.
    """
    index = folder / INDEX_NAME
    try:
        shards = sorted(set(read_json(index)["weight_map"].values()))
        return [inside(folder, shard) for shard in shards]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"{index} cannot be read", expected="a weight_map", received=str(error)
        ) from None


def resolve(source: str, revision: str | None = None, *, verify: bool = False) -> SourceInfo:
    """Fetch and convert if needed, and check that the folder can be loaded.

    Args:
        verify: hash every file of a converted model; otherwise their sizes are checked.

    Raises:
        ModelError: the model cannot be found or read; it says what to do.
        MissingPackageError, StorageError: see `cache` and `package`.
    """
    folder = _converted(source)
    if folder is not None:
        # Its record has the digests, so that gigabytes are not hashed again.
        record = cache.read_record(folder, full=verify)
        digests = {name: entry["sha256"] for name, entry in record.files.items()}
        return SourceInfo(source, folder, revision, weights_sha256(digests))
    folder = local_folder(source)
    if folder is not None:
        check_folder(folder)
        return SourceInfo(source, folder, revision)
    folder = hub.fetch_snapshot(source, revision)
    try:
        check_folder(folder)
    except ModelError as error:
        raise hub.incomplete(error, source, revision) from None
    return SourceInfo(source, folder, revision)


def find_cached(source: str) -> Path | None:
    """Return the folder of `source` if it is converted or local; None for hub ids."""
    if source.startswith(PACKAGE_PREFIX):
        return find_package(source.removeprefix(PACKAGE_PREFIX))
    if source.endswith(".gguf"):
        path = expanded(source)
        if path.is_file():
            return cache.find(_gguf_key(path))
        return None
    return local_folder(source)


def config_of(source: str, revision: str | None = None) -> tuple[dict[str, Any], str]:
    """Return `config.json` of `source` and its path; a hub model's weights are not fetched."""
    folder = _converted(source) or local_folder(source) or hub.fetch_config(source, revision)
    return read_config(folder), str(folder / "config.json")


def local_folder(source: str) -> Path | None:
    """Return `source` as a folder, or None if it may be a hub id.

    Raises:
        ModelError: it is a path to a missing folder, or to a file of another kind.
    """
    path = expanded(source)
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(
            f"{source} is a file",
            expected="a folder, or a .gguf file",
            received=path.suffix or "no suffix",
        )
    if source.startswith(("/", "./", "../", "~")) or not hub.HUB_ID.fullmatch(source):
        raise ModelError(
            f"{source} does not exist", expected="a folder, a .gguf file, package:NAME or a hub id"
        )
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a folder; `tie_word_embeddings` is as the weights that are there have
    it.

    Raises:
        ModelError: missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        return _as_the_weights_are(
            read_object(path, ModelError, hint="copy the model again"), folder
        )
    except FileNotFoundError:
        hint = "give the folder that `save_pretrained` wrote"
        if (folder / "adapter_config.json").is_file():
            hint = "this is an adapter: give its base model as the model"
        raise ModelError(
            f"{folder} is not a model", expected="config.json", received="no such file", hint=hint
        ) from None


def check_folder(folder: Path) -> None:
    """Check that configuration, all safetensors shards and a tokenizer are there.

    Raises:
        ModelError: names the file that is missing; pickled weights are refused.
    """
    read_config(folder)
    if (folder / INDEX_NAME).is_file():
        for place in indexed_files(folder):
            if not place.is_file():
                raise ModelError(
                    f"{folder} has only part of the weights",
                    expected=place.name,
                    hint="copy it again",
                )
    elif not (folder / FILE_NAME).is_file():
        pickled = [
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
        ]
        hint = "copy the whole folder"
        if pickled:
            hint = "pickled weights are refused because reading them can run any code; "
            hint += "if you trust them, convert them with save_pretrained"
        raise ModelError(
            f"{folder} has no safetensors weights",
            expected=FILE_NAME,
            received=", ".join(pickled[:3]) or "no weights",
            hint=hint,
        )
    check_tokenizer(folder)


def check_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check the safetensors' headers: the files are whole, and each tensor of `shapes` that is
    there has that shape.

    It takes milliseconds; a fault found after minutes of loading, or none found, would cost more.

    Raises:
        ModelError: names the file and the tensor.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            stored = {name: place.shape for name, place in read_header(path).tensors.items()}
        except (ValueError, OSError) as error:
            raise ModelError(
                f"{path} is damaged", received=str(error), hint="copy the model again"
            ) from None
        for name, shape in stored.items():
            if name in shapes and shape != shapes[name]:
                message = f"{path}: tensor '{name}' does not fit config.json"
                raise ModelError(
                    message, expected=shapes[name], received=shape, hint="copy the model again"
                )


def check_tokenizer(folder: Path) -> None:
    """Raise ModelError unless a tokenizer's files are there."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer",
            expected=" or ".join(TOKENIZER_FILES),
            received="none of them",
            hint="copy the tokenizer's files of the base model into the folder",
        )


def _converted(source: str) -> Path | None:
    """Return the cache folder of a package or GGUF source, built if needed; else None."""
    if source.startswith(PACKAGE_PREFIX):
        return resolve_package(source.removeprefix(PACKAGE_PREFIX))
    if not source.endswith(".gguf"):
        return None
    path = expanded(source)
    if not path.is_file():
        raise ModelError(f"{source} does not exist", expected="a .gguf file")
    return cache.convert_once(_gguf_key(path), str(path), lambda folder: convert_gguf(path, folder))


def _gguf_key(path: Path) -> str:
    """Build the cache key from place, size and time of the last change: a file that is replaced is
    converted again."""
    stat = path.stat()
    place = path.resolve()
    identity = hashlib.sha256(f"{place}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()
    return f"gguf/{path.stem}-{identity[:16]}"


def _as_the_weights_are(config: dict[str, Any], folder: Path) -> dict[str, Any]:
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
            for kind, ends in (("head", (HEAD,)), ("embedding", EMBEDDINGS)):
                if tensor in ends or tensor.endswith(tuple(f".{end}" for end in ends)):
                    places.setdefault(kind, (Path(name), *place))
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
