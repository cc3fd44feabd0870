"""Write a merged model in the files of its base, and prove it by reading every tensor back.

A checkpoint may hold more than the language model that was loaded: a vision tower, layers that
predict several tokens, vectors in another precision. Only the tensors that the adapter changes are
replaced; every other one keeps its name, its file and its bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ModelError, VerificationError
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.save import FILE_NAME, GENERATION_NAME, save_tokenizer
from ondevice.models.sources.resolve import INDEX_NAME, read_config, stored_files

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.models.load import LoadedModel

_MORE_FILES = ("*processor_config.json", "chat_template.json", "LICENSE*", "NOTICE*")
"""What a reader of images or sound needs, and the licence."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


def save_merged(
    loaded: LoadedModel, changed: set[str], dtype: str, folder: Path, *, convert: bool
) -> int:
    """Write a merged model with its configuration and tokenizer into `folder`, and read it back.

    Args:
        changed: names in the model's state of the tensors that differ from the base's files.
        dtype: of the changed tensors; of all if `convert`, else every other keeps its own.

    Returns: the tensors that were compared.

    Raises:
        ModelError: a changed tensor has no place in the base's files.
        VerificationError: a tensor that was read back is not what was to be written.
    """
    source = loaded.source.path
    if source is None:  # a random model has no files
        return _save_all(loaded, dtype, folder)
    files = stored_files(source)
    values = _by_stored_name(loaded, changed, folder)
    missing = values.keys() - {name for path in files for name in _names(path)}
    if missing:
        raise ModelError(
            f"{source}: the weights have no tensor of a name that the adapter changes",
            expected=min(missing),
            received=f"{len(missing)} names that are not there",
            hint="use the adapter as it is, without fusing it",
        )
    kept = dtype if convert else None
    for path in files:
        _write(folder / path.name, dict(_expected(path, values, kept)))
    if len(files) > 1:
        _write_index(folder, [folder / path.name for path in files])
    _write_config(loaded, source, dtype, folder)
    save_tokenizer(loaded, folder)
    return sum(_check(folder / path.name, _expected(path, values, kept)) for path in files)


def _save_all(loaded: LoadedModel, dtype: str, folder: Path) -> int:
    """Write a model that has no files, as transformers does."""
    import torch

    with quiet_transformers():
        loaded.model.to(getattr(torch, dtype)).save_pretrained(folder)
    save_tokenizer(loaded, folder)
    state = loaded.model.state_dict()
    names = _names(folder / FILE_NAME)
    if absent := state.keys() - names - set(loaded.model.all_tied_weights_keys):
        raise _lost(folder, min(absent), "no tensor of that name")
    return _check(folder / FILE_NAME, ((name, state[name]) for name in names))


def _by_stored_name(loaded: LoadedModel, changed: set[str], folder: Path) -> dict[str, Tensor]:
    """Return the changed tensors by the names that they have in files, where experts are apart."""
    state = loaded.model.state_dict()
    place = folder / "changed"
    with quiet_transformers():
        loaded.model.save_pretrained(
            place, state_dict={name: state[name] for name in sorted(changed)}
        )
    values: dict[str, Tensor] = {}
    for path in stored_files(place):
        with _opened(path) as file:
            values |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    shutil.rmtree(place)
    return values


def _expected(
    path: Path, values: dict[str, Tensor], dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file as they are to be: changed ones rounded once, others as read."""
    import torch

    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            stored = file.get_tensor(name)
            value = stored
            if name in values:
                value = values[name]
            wanted = stored.dtype
            if dtype is not None and stored.is_floating_point():
                wanted = getattr(torch, dtype)
            yield name, value.to(wanted).contiguous()


def _check(path: Path, expected: Iterator[tuple[str, Tensor]]) -> int:
    """Compare every tensor of a written file to the bit; return how many there are."""
    import torch

    left = _names(path)
    count = len(left)
    with _opened(path) as file:
        for name, value in expected:
            if name not in left:
                raise _lost(path, name, "no tensor of that name")
            left.discard(name)
            found = file.get_tensor(name)
            if found.dtype != value.dtype or found.shape != value.shape:
                raise _lost(path, name, f"{found.dtype} {tuple(found.shape)}")
            if not torch.equal(_bits(found), _bits(value)):
                raise _lost(path, name, "other bits")
    if left:
        raise _lost(path, min(left), "a tensor that the model does not have")
    return count


def _bits(value: Tensor) -> Tensor:
    import torch

    return value.contiguous().view(-1).view(torch.uint8)


def _lost(path: Path, name: str, received: str) -> VerificationError:
    return VerificationError(
        f"read back, tensor '{name}' is not base plus adapter; nothing was written",
        expected="the bits that were to be written",
        received=f"{received} in {path.name}",
        hint="please report this with the model and the adapter",
    )


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, str(path), metadata={"format": "pt"})


def _write_index(folder: Path, paths: list[Path]) -> None:
    places = {name: path.name for path in paths for name in sorted(_names(path))}
    index = {"metadata": {"total_size": sum(map(_bytes, paths))}, "weight_map": places}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes(path: Path) -> int:
    with _opened(path) as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


def _write_config(loaded: LoadedModel, source: Path, dtype: str, folder: Path) -> None:
    """Write the base's own configuration, with the dtype and the head as the files have them."""
    config = _with_dtype(read_config(source), dtype)
    config.setdefault("architectures", [type(loaded.model).__name__])
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = source / GENERATION_NAME
    if generation.is_file():
        shutil.copyfile(generation, folder / GENERATION_NAME)
    elif (own := getattr(loaded.model, "generation_config", None)) is not None:
        own.save_pretrained(folder)
    for pattern in _MORE_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration whose parts all name `dtype`, under the keys that they have."""
    result = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            value = _with_dtype(value, dtype)
        elif key in _DTYPE_KEYS and isinstance(value, str):
            value = dtype
        result[key] = value
    return result


def _names(path: Path) -> set[str]:
    with _opened(path) as file:
        return set(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file whose header `load_model` has checked."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        yield file
