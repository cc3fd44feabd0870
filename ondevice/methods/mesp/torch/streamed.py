"""Frozen weights in their files: a thread reads the next block, or tile of the head, while the
device computes with this one; two of them are in memory.

Reads go through the system's page cache into memory of this process, so that what a step takes does
not depend on what the system keeps cached, and a disk that disappears is an error with a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.core.untrusted import read_header
from ondevice.methods.mesp.check import check_streamed
from ondevice.methods.mesp.torch.weights import (
    Dense,
    Frozen,
    Matrix,
    OfLayer,
    Positions,
    by_layer,
    factor,
    mixer_tensor,
    of_layer,
    plain_norms,
    scaled,
)
from ondevice.nn.layer_inputs import LayerInputs
from ondevice.offload.device import buffer

if TYPE_CHECKING:
    from ondevice.core.untrusted import TensorPlace
    from ondevice.models import ModelFiles

READERS = 8
"""Threads that read one block, at most."""
PIECE_BYTES = 8 << 20
ALIGNED = 256
"""Addresses of tensors are multiples of this."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
EMBEDDING = "model.embed_tokens.weight"


class Place(NamedTuple):
    """Where numbers lie: from byte `start` of a file on."""

    name: str
    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Staging:
    """Pinned host memory between files and a GPU, twice: one is filled while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self.copied: list[Any] = [None, None]
        self.turn = 0

    def take(self, size_bytes: int) -> Tensor:
        """Return host memory, uint8 [size_bytes], that no copy reads any more."""
        self.turn = 1 - self.turn
        if (copied := self.copied[self.turn]) is not None:
            copied.synchronize()
        if self.memory[self.turn].nbytes < size_bytes:
            self.memory[self.turn] = buffer(size_bytes, pin=True)
        return self.memory[self.turn][:size_bytes]

    def copy(self, memory: Tensor) -> Tensor:
        """Return a copy of what was taken on the GPU, in the order of its current stream."""
        value = memory.to(self.device, non_blocking=True)
        self.copied[self.turn] = torch.cuda.current_stream(self.device).record_event()
        return value


class Files:
    """The tensors of a folder of safetensors files, by name.

    Raises:
        ModelError: a file is shorter than its header says, or a tensor's dtype is not that of a
            weight.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, tuple[Path, TensorPlace]] = {}
        self.open: dict[Path, int] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                tensors = read_header(path).tensors
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"{path} is damaged", received=str(error), hint="copy the model again"
                ) from None
            for name, stored in tensors.items():
                if stored.dtype not in DTYPES:
                    raise ModelError(
                        f"{path}: tensor '{name}'",
                        expected=", ".join(DTYPES),
                        received=stored.dtype,
                    )
                self.tensors[name] = (path, stored)
            self.open[path] = os.open(path, os.O_RDONLY)

    def place(
        self, name: str, first: int = 0, rows: int | None = None, columns: slice | None = None
    ) -> Place:
        """Return where a tensor lies, or `rows` of it, or `columns` of one row."""
        path, stored = self.tensors[name]
        shape = stored.shape
        if rows is not None:
            shape = (rows, *shape[1:])
        width = prod(shape[1:])
        before = first * width
        if columns is not None:
            shape = (1, columns.stop - columns.start)
            before += columns.start
        dtype = DTYPES[stored.dtype]
        return Place(name, path, stored.start + before * dtype.itemsize, shape, dtype)

    def fill(self, memory: memoryview, place: Place, at: int = 0) -> None:
        """Read into `memory` from byte `at` of a place on.

        Raises:
            ModelError: the file has become shorter.
        """
        done = 0
        while done < len(memory):
            count = os.preadv(self.open[place.path], [memory[done:]], place.start + at + done)
            if count == 0:
                raise ModelError(
                    f"{place.path} became shorter while it was read",
                    expected=f"all of tensor '{place.name}'",
                    hint="the run's last checkpoint is unharmed: copy the model again and resume",
                )
            done += count

    def read(self, place: Place) -> Tensor:
        """Read numbers on the CPU in the file's dtype; see `fill`."""
        value = torch.empty(place.shape, dtype=place.dtype)
        self.fill(value.view(-1).view(torch.uint8).numpy().data, place)
        return value

    def close(self) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        self.open = {}


class Streamed:
    """A model's weights in its files; see `Weights`.

    Raises:
        ConfigError: 4 bits are requested.
        ModelError: a mixture of experts, or the files lack a tensor or are truncated.
    """

    def __init__(self, files: ModelFiles, device: torch.device, bits: int | None = None) -> None:
        check_streamed(files.dims, bits, str(files.folder))
        self.dims = files.dims
        self.device = device
        self.vocab = files.dims.vocab
        self.dtype: torch.dtype = getattr(torch, files.dtype)
        self.family = _skeleton(files)
        self.files = Files(files.folder)
        for name in files.family.weight_shapes(files.dims):
            if name not in self.files.tensors:
                raise ModelError(
                    f"{files.folder}: missing tensor in the weights files",
                    expected=name,
                    hint="copy it again",
                )
        self.head = EMBEDDING if files.dims.tied else "lm_head.weight"
        self.norm = factor(self.dims, self._fetch(f"{files.family.last_norm}.weight"))
        self.inputs = self._layer_inputs()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        readers = min(READERS, os.cpu_count() or 1)
        self.readers = ThreadPoolExecutor(readers, thread_name_prefix="weights-of")
        self.staging = Staging(device) if device.type == "cuda" else None
        self.coming: dict[tuple[int, ...], Future[Any]] = {}
        """Reads under way: (number,) of a block, (first, last row) of a tile."""

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Read the rows of the batch's tokens, and no others."""
        unique, index = ids_BT.cpu().unique(return_inverse=True)
        rows = torch.cat(
            [self.files.read(self.files.place(EMBEDDING, token, 1)) for token in unique.tolist()]
        )
        return scaled(self.dims, rows[index.reshape(-1)].to(self.device, self.dtype))

    def positions(self, length_tokens: int) -> Positions:
        return by_layer(self.family, length_tokens, self.device, self.dtype)

    def layer_inputs(self, ids_BT: Tensor, x_ND: Tensor) -> OfLayer:
        return of_layer(self.inputs, ids_BT, x_ND)

    def _layer_inputs(self) -> LayerInputs | None:
        """Return the tensors of layers' inputs; of the table only numbers of the batch's tokens are
        read."""
        if not self.dims.traits.layer_input:
            return None
        table, projection, norm = self.family.input_tensors

        def rows(ids_N: Tensor, own: slice) -> Tensor:
            unique, index = ids_N.cpu().unique(return_inverse=True)
            places = [self.files.place(table, token, 1, own) for token in unique.tolist()]
            found = [self.files.read(place) for place in places]
            return torch.cat(found)[index].to(self.device, self.dtype)

        return LayerInputs(rows, self._fetch(projection), self._fetch(norm), self.dims.norm_eps)

    @contextmanager
    def block(self, i: int, then: int | None) -> Iterator[Frozen]:
        yield self._take(self._block, (i,), None if then is None else (then,))

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        return self._take(self._tile, (low, high), then)

    def _take(
        self,
        read: Callable[..., Any],
        request: tuple[int, ...],
        then: tuple[int, ...] | None,
    ) -> Any:
        """Return the result of `read(*request)`; the thread then reads for the next request."""
        coming = self.coming.pop(request, None) or self.thread.submit(read, *request)
        for unused in self.coming.values():
            unused.exception()
        self.coming.clear()
        weights = coming.result()
        if then is not None:
            self.coming[then] = self.thread.submit(read, *then)
        return weights

    def _fetch(self, name: str) -> Tensor:
        return self.files.read(self.files.place(name)).to(self.device, self.dtype)

    def _fetch_all(self, places: list[Place]) -> list[Tensor]:
        """Read tensors side by side, in pieces; they are parts of one memory on the device."""
        starts = [0]
        for place in places:
            starts.append(starts[-1] + -(-place.bytes // ALIGNED) * ALIGNED)
        if self.staging is None:
            memory = torch.empty(starts[-1], dtype=torch.uint8)
        else:
            memory = self.staging.take(starts[-1])
        into = memory.numpy().data
        pieces = [
            (into[start + at : start + min(at + PIECE_BYTES, place.bytes)], place, at)
            for place, start in zip(places, starts)
            for at in range(0, place.bytes, PIECE_BYTES)
        ]
        for _ in self.readers.map(lambda piece: self.files.fill(*piece), pieces):
            pass
        if self.staging is not None:
            memory = self.staging.copy(memory)
        return [
            memory[start : start + place.bytes].view(place.dtype).view(place.shape).to(self.dtype)
            for place, start in zip(places, starts)
        ]

    def _tile(self, low: int, high: int) -> Tensor:
        return self._fetch_all([self.files.place(self.head, low, high - low)])[0]

    def _block(self, i: int) -> Frozen:
        traits = self.dims.traits
        parts = self.dims.block_linears(i)
        names = {part: self.family.weight_path(i, one.target) for part, one in parts.items()}
        biased = [part for part, one in parts.items() if self.dims.linear_bias(one.target)]
        wanted = {("weight", part): f"{name}.weight" for part, name in names.items()}
        wanted |= {("bias", part): f"{names[part]}.bias" for part in biased}
        own = f"model.layers.{i}"
        wanted |= {("norm", place): f"{own}.{name}.weight" for place, name in traits.norms_of(i)}
        of_mixer = self.dims.mixer_tensors(i)
        wanted |= {("mixer", part): f"{own}.{name}" for part, (name, _) in of_mixer.items()}
        read = self._fetch_all([self.files.place(name) for name in wanted.values()])
        found = dict(zip(wanted, read, strict=True))
        linears: dict[str, tuple[Matrix, Tensor | None]] = {
            part: (Dense(found["weight", part]), found.get(("bias", part))) for part in parts
        }
        norms = {place: factor(self.dims, found["norm", place]) for place, _ in traits.norms_of(i)}
        norms |= plain_norms(self.dims, i, self.norm)
        mixer = {part: mixer_tensor(found["mixer", part]) for part in of_mixer}
        return Frozen(norms, linears, mixer=mixer)

    def close(self) -> None:
        """End the threads and close the files."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.readers.shutdown(wait=True, cancel_futures=True)
        self.files.close()


def _skeleton(files: ModelFiles) -> Any:
    """The family over a model without memory; only its rotary embedding has numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(files.folder), local_files_only=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    return files.family(model)
