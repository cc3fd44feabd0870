"""Frozen weights: in memory (the model's own tensors, or its matrices in NF4), or in their files.

Streamed from files, two blocks, or two tiles of the head, are in memory: a thread reads the next
while the device computes with this one. Reads go through the page cache into buffers that are used
again and again, so that the memory a step takes does not depend on what the system keeps cached.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ondevice.core.errors import ConfigError, ModelError
from ondevice.core.untrusted import read_header
from ondevice.models.families.moe import MoeFamily
from ondevice.nn.cross_entropy import wide
from ondevice.nn.packed import Nf4Matrix, PackedLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.torch.kernels import Matrix, Position
    from ondevice.methods.mesp.torch.stages import OtherMlp
    from ondevice.models import Family, LoadedModel, ModelFiles

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ALIGNMENT = 64
"""Elements: where a tensor begins in a slot."""
STAGING_BYTES = 4 << 20
Request = tuple[str, int, int]
"""`block` and its number, or `tile` and its first and last rows."""


@dataclass(frozen=True)
class Frozen:
    """One block's weights: the factors of its norms by place, and matrix and bias of each linear
    layer; `mlp` is an MLP that has other ones."""

    norms: dict[str, Tensor]
    linears: dict[str, tuple[Matrix, Tensor | None]]
    mlp: OtherMlp | None = None


class Weights(Protocol):
    """All frozen weights of a model, wherever they are."""

    dims: ModelDims
    dtype: torch.dtype
    device: torch.device
    norm: Tensor
    """Factor of the norm before the head, [D]."""
    vocab: int

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return int64 [B, T] -> [B * T, D], new memory."""
        ...

    def positions(self, length_tokens: int) -> Positions:
        """Return a function of a block's number to its cos and sin, [1, T, 1, head_dim / 2]
        each."""
        ...

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        """Return block `i`, until the context ends; `then` is the block that will be asked for
        next."""
        ...

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return rows of the output head."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Dense:
    """A matrix as it is."""

    weight: Tensor

    def dense(self) -> Tensor:
        return self.weight


class Resident:
    """A loaded model's own tensors. With `bits` its matrices are quantised and its own are let go.

    Raises:
        ConfigError: 4 bits without a GPU.
        MissingPackageError: bitsandbytes is not installed.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device, bits: int | None = None) -> None:
        family: Family = loaded.family
        if bits and device.type != "cuda":
            raise ConfigError(
                "method.bits: 4 needs a GPU in torch",
                expected="--backend mlx, or model.device: cuda",
                received=str(device),
                hint="weight_placement: streamed needs less memory still",
            )
        self.dims = loaded.dims
        self.device = device
        self.vocab = loaded.dims.vocab
        self.blocks = [
            self._frozen_layer(family, i, device, bits) for i in range(loaded.dims.layers)
        ]
        if family.head_weight.device != device:
            model: Any = loaded.model
            model.to(device)
        self.family = family
        self.table = family.embedding.weight
        self.dtype = self.table.dtype
        self.norm = factor(self.dims, family.model.model.norm.weight.detach())

    def _frozen_layer(
        self, family: Family, i: int, device: torch.device, bits: int | None
    ) -> Frozen:
        layer: Any = family.layer(i)
        if not bits:
            layer.to(device)
        linears: dict[str, tuple[Matrix, Tensor | None]] = {}
        for target in family.linear_targets:
            linear: Any = family.linear(i, target)
            bias = None if linear.bias is None else linear.bias.detach().to(device)
            if isinstance(linear, PackedLinear):
                matrix: Matrix = linear
            elif bits:
                matrix = Nf4Matrix.pack(linear.weight.detach().to(device), double=False)
                linear.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            else:
                matrix = Dense(linear.weight.detach())
            linears[target] = (matrix, bias)
        weights = {
            place: layer.get_submodule(name).weight for place, name in self.dims.traits.norms
        }
        norms = {place: factor(self.dims, w.detach().to(device)) for place, w in weights.items()}
        mlp = None
        if isinstance(family, MoeFamily):
            layer.mlp.to(device)
            mlp = partial(family.mlp_of, i)
        return Frozen(norms, linears, mlp)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return scaled(self.dims, self.table.detach()[ids_BT.reshape(-1)])

    def positions(self, length_tokens: int) -> Positions:
        return by_layer(self.family, length_tokens, self.device, self.dtype)

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        return nullcontext(self.blocks[i])

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        return self.family.head_weight.detach()[low:high]

    def close(self) -> None:
        """Leave the model to its owner."""


Positions = Callable[[int], "Position"]


def by_layer(
    family: Family, length_tokens: int, device: torch.device, dtype: torch.dtype
) -> Positions:
    """Return a function of a block's number to its cos and sin."""
    tables = family.positions(length_tokens, device, dtype)
    made: dict[int, Position] = {}

    def of(i: int) -> Position:
        pair = family.layer_position(i, tables)
        if id(pair[0]) not in made:
            made[id(pair[0])] = halves(pair)
        return made[id(pair[0])]

    return of


def factor(dims: ModelDims, weight: Tensor) -> Tensor:
    """Return what a norm multiplies by: its weight, or 1 + w, in float32 at least."""
    return 1.0 + wide(weight) if dims.traits.norm_offset else weight


def scaled(dims: ModelDims, rows: Tensor) -> Tensor:
    """Return rows of the embedding, in new memory, times the model's factor."""
    scale = dims.traits.embedding_scale
    return rows if scale == 1.0 else rows.mul_(rows.new_tensor(scale))


def halves(position: tuple[Tensor, Tensor]) -> Position:
    """Return transformers' cos and sin [1, T, head_dim] repeat their first half."""
    cos, sin = (tensor[:, :, None, : tensor.shape[-1] // 2].contiguous() for tensor in position)
    return cos, sin


@dataclass(frozen=True)
class Place:
    """Position of a tensor's bytes."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Files:
    """The tensors of a folder of safetensors files, by name.

    Raises:
        ModelError: a file is shorter than its header says, or a tensor's dtype is not that of a
            weight.
    """

    def __init__(self, folder: Path) -> None:
        self.places: dict[str, Place] = {}
        self.open: dict[Path, int] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._read_header(path)

    def _read_header(self, path: Path) -> None:
        try:
            tensors = read_header(path).tensors
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path} is damaged", received=str(error), hint="copy the model again"
            ) from None
        for name, stored in tensors.items():
            if stored.dtype not in DTYPES:
                raise ModelError(
                    f"{path}: tensor '{name}'", expected=", ".join(DTYPES), received=stored.dtype
                )
            self.places[name] = Place(path, stored.start, stored.shape, DTYPES[stored.dtype])
        self.open[path] = os.open(path, os.O_RDONLY)

    def read(self, name: str, target: Tensor, first: int = 0) -> None:
        """Read rows `first` and on of a tensor into `target`, of the file's dtype and on the CPU.

        Raises:
            ModelError: the file has become shorter.
        """
        place = self.places[name]
        row = math.prod(place.shape[1:]) * place.dtype.itemsize
        memory = target.view(-1).view(torch.uint8).numpy().data
        at = place.start + first * row
        done = 0
        while done < len(memory):
            count = os.preadv(self.open[place.path], [memory[done:]], at + done)
            if count == 0:
                raise ModelError(
                    f"{place.path} became shorter while it was read",
                    expected=f"tensor '{name}' whole",
                    hint="the run's last checkpoint is unharmed: copy the model again and resume",
                )
            done += count

    def close(self) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        self.open = {}


class Slot:
    """Memory of a block or a tile: a flat run in the compute dtype, filled from the start for each.

    Tensors of another dtype, and all of them for a GPU, go through `STAGING_BYTES` of host memory.
    """

    def __init__(self, files: Files, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.files = files
        self.used = 0
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self.staging: Tensor | None = None

    def fetch(self, name: str, first: int = 0, rows: int | None = None) -> Tensor:
        """Return a tensor, or `rows` of it."""
        place = self.files.places[name]
        shape = place.shape if rows is None else (rows, *place.shape[1:])
        target = self.memory[self.used : self.used + math.prod(shape)].view(shape)
        self.used += -(-target.numel() // ALIGNMENT) * ALIGNMENT
        if place.dtype == target.dtype and target.device.type == "cpu":
            self.files.read(name, target, first)
            return target
        if self.staging is None:
            self.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=target.is_cuda)
        step = max(1, STAGING_BYTES // (math.prod(shape[1:]) * place.dtype.itemsize))
        for low in range(0, shape[0], step):
            rows_there = target[low : low + step]
            host = (
                self.staging[: rows_there.numel() * place.dtype.itemsize]
                .view(place.dtype)
                .view(rows_there.shape)
            )
            self.files.read(name, host, first + low)
            rows_there.copy_(host)
        return target


class Streamed:
    """A model's weights in its files; see `Weights`.

    Args:
        tiles: of the head.

    Raises:
        ConfigError: 4 bits are asked for.
        ModelError: the files lack a tensor or are truncated.
    """

    def __init__(
        self, files: ModelFiles, device: torch.device, tiles: int, bits: int | None = None
    ) -> None:
        if bits:
            raise ConfigError(
                "torch streams weights as the files have them",
                expected="method.bits: null with method.weight_placement: streamed",
                received="method.bits: 4",
                hint="--backend mlx streams 4-bit weights",
            )
        if files.dims.experts:
            raise ModelError(
                f"{files.folder}: a mixture of experts is not streamed",
                expected="method.weight_placement: resident",
                received="method.weight_placement: streamed",
                hint="the router chooses experts too late to read them; "
                "model.dtype: bfloat16 halves the weights",
            )
        self.dims = files.dims
        self.device = device
        self.vocab = files.dims.vocab
        self.dtype: torch.dtype = getattr(torch, files.dtype)
        self.family = _skeleton(files)
        self.files = Files(files.folder)
        for name in files.family.weight_shapes(files.dims):
            if name not in self.files.places:
                raise ModelError(
                    f"{files.folder}: the weights lack a tensor",
                    expected=name,
                    hint="copy it again",
                )
        self.head = "model.embed_tokens.weight" if files.dims.tied else "lm_head.weight"
        pieces = 2 * len(files.family.linear_targets) + len(files.dims.traits.norms)
        block = files.dims.block_parameters + pieces * ALIGNMENT
        size = max(block, -(-files.dims.vocab // tiles) * files.dims.hidden)
        self.slots = [Slot(self.files, size, self.dtype, device) for _ in range(2)]
        self.norm = factor(self.dims, self.slots[0].fetch("model.norm.weight").clone())
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.coming: dict[Request, Future[Any]] = {}
        self.turn = 0

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Reads the rows of the batch's tokens, and no others."""
        unique, where = ids_BT.cpu().unique(return_inverse=True)
        place = self.files.places["model.embed_tokens.weight"]
        rows = torch.empty(len(unique), self.dims.hidden, dtype=place.dtype)
        for at, token in enumerate(unique.tolist()):
            self.files.read("model.embed_tokens.weight", rows[at], token)
        return scaled(self.dims, rows[where.reshape(-1)].to(self.device, self.dtype))

    def positions(self, length_tokens: int) -> Positions:
        return by_layer(self.family, length_tokens, self.device, self.dtype)

    @contextmanager
    def block(self, i: int, then: int | None) -> Iterator[Frozen]:
        yield self._claim(("block", i, 0), None if then is None else ("block", then, 0))

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return a tile that is valid until the next block or tile is asked for."""
        return self._claim(("tile", low, high), None if then is None else ("tile", *then))

    def _claim(self, request: Request, then: Request | None) -> Any:
        if request not in self.coming:
            self._ask(request)
        weights = self.coming.pop(request).result()
        if then is not None:
            self._ask(then)
        return weights

    def _ask(self, request: Request) -> None:
        """Let the thread read into the slot whose content is no longer needed."""
        for future in self.coming.values():  # asked for, and then not taken
            future.exception()
        self.coming.clear()
        if self.device.type == "cuda":  # what computes with that slot must have ended
            torch.cuda.current_stream(self.device).synchronize()
        self.turn = 1 - self.turn
        self.coming[request] = self.thread.submit(self._read, request, self.slots[self.turn])

    def _read(self, request: Request, slot: Slot) -> Any:
        kind, first, last = request
        slot.used = 0
        with torch.no_grad(), torch.cuda.stream(self.stream):
            if kind == "tile":
                weights: Any = slot.fetch(self.head, first, last - first)
            else:
                weights = self._block(first, slot)
            if self.stream is not None:
                self.stream.synchronize()
        return weights

    def _block(self, i: int, slot: Slot) -> Frozen:
        def fetch(name: str) -> Tensor:
            return slot.fetch(f"model.layers.{i}.{name}")

        linears: dict[str, tuple[Matrix, Tensor | None]] = {}
        for target in self.family.linear_targets:
            name = f"{self.family.linear_parents[target]}.{target}"
            bias = fetch(f"{name}.bias") if self.dims.linear_bias(target) else None
            linears[target] = (Dense(fetch(f"{name}.weight")), bias)
        norms = {
            place: factor(self.dims, fetch(f"{name}.weight"))
            for place, name in self.dims.traits.norms
        }
        return Frozen(norms, linears)

    def close(self) -> None:
        """End the thread and close the files."""
        self.thread.shutdown(wait=True, cancel_futures=True)
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
