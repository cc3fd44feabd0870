"""The settings that the functions of a block program share, and the tensors that they take: ports,
weights, adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.core.manifest import TensorPort
from ondevice.core.session import MOMENTS
from ondevice.methods.mesp.check import IN_BLOCKS
from ondevice.methods.mesp.frozen import Q4, Float32, Int8, arrays, frozen_port
from ondevice.methods.mesp.integer import Integers, unit_scales
from ondevice.methods.mesp.lora import FlatLayout, initial_tensors, lora_parameters
from ondevice.methods.mesp.memory import head_tile_rows
from ondevice.methods.mesp.torch.model import factor
from ondevice.methods.mesp.torch.stages import Block, Linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.frozen import Form, TableForm
    from ondevice.models import LoadedModel

EMBEDDING = "model.embed_tokens.weight"
LINEAR_FORMS: dict[str, Form] = {"none": Float32(), "int8": Int8(), "q4": Q4(), "8da8w": Integers()}
"""Of the matrices in a block, by `export.quantize`."""
TABLE_FORMS: dict[str, TableForm] = {
    "none": Float32(),
    "int8": Int8(),
    "q4": Int8(),
    "8da8w": Int8(),
}
"""Of embedding and head."""


class BlockFunctions:
    """The settings of a block program, and the tensors it takes; `compare` reads it.

    Attributes:
        layout: of the flat vector; each layer is a range of `layer_size` elements.
        quantize: how matrices are kept, a key of `LINEAR_FORMS` and, for embedding and head,
            `TABLE_FORMS`.
        markers: of the tensors that a block's functions hold, by name with `{layer}`: noise, int8,
            in the place of each layer's.
        frozen: ports of a block's weights, in the order of the functions' arguments; `table`,
            `head` and `norm` those of the embedding, of a tile of the head and of the norm before
            it.
        tile_rows: rows of the head that a tile has.
    """

    def __init__(self, loaded: LoadedModel, config: MespConfig, quantize: str = "none") -> None:
        self.loaded = loaded
        self.config = config
        self.dims = loaded.dims
        self.quantize = quantize
        self.linear_form = LINEAR_FORMS[quantize]
        self.table_form = TABLE_FORMS[quantize]
        self.parameters_of_run = lora_parameters(
            loaded.dims, type(loaded.family), config, IN_BLOCKS, "a block program"
        )
        self.layout = FlatLayout.build(self.parameters_of_run)
        self.layer_size = self.layout.size // self.dims.layers
        self.entries = self.layout.of_layer(0)
        self.tile_rows = head_tile_rows(self.dims, config)
        self.frozen = tuple(self._block_ports())
        random = torch.Generator().manual_seed(0)
        self.markers = {
            name: torch.randint(-127, 128, shape, dtype=torch.int8, generator=random)
            for name, shape in self._constants().items()
        }
        self.head_name = EMBEDDING if self.dims.tied else "lm_head.weight"
        self.head = self.table_form.ports(self.head_name, (self.tile_rows, self.dims.hidden))
        self.norm = frozen_port("model.norm.weight", (self.dims.hidden,))
        self.table = self.table_form.ports(EMBEDDING, (self.dims.vocab, self.dims.hidden))

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimizer's vectors."""
        return MOMENTS if self.config.optimizer == "adamw" else ()

    def initial(self, seed: int) -> np.ndarray:
        """Draw the adapter that a run starts from, float32 [layout.size]."""
        return self.layout.to_flat(initial_tensors(self.parameters_of_run, seed))

    def weights(self) -> dict[str, np.ndarray]:
        """Return the frozen weights by the names of the ports, in the order in which a step reads
        them.

        The model's own matrices become the rounded ones, so that the program is compared with a
        model of the same weights.
        """
        matrices = {
            f"{linear_name(self.loaded, target)}.weight"
            for target in self.loaded.family.linear_targets
        }
        tensors = self._packed(EMBEDDING, self.table_form)
        for layer in range(self.dims.layers):
            for name in dict.fromkeys(_tensor_name(one.name) for one in self.frozen):
                form = self.linear_form if name in matrices else None
                tensors |= self._packed(name.format(layer=layer), form)
        tensors |= self._packed(self.norm.name, None)
        if not self.dims.tied:
            tensors |= self._packed(self.head_name, self.table_form)
        return tensors

    def _packed(self, name: str, form: Form | None) -> dict[str, np.ndarray]:
        """A parameter's tensors in the file; None: float32 as it is."""
        parameter = self.loaded.model.get_parameter(name)
        if form is None:
            # The factor of the logits is the last norm's: logits are linear in its weight, and so
            # are gradients.
            scale = self.dims.traits.logit_scale if name == self.norm.name else 1.0
            value = parameter.detach().float()
            if name in self.norm_names:
                value = factor(self.dims, value)
            return arrays({name: value * scale})
        packed = form.pack(name, parameter.detach().float())
        if self.quantize != "none":
            parameter.data = form.matrix(name, packed).dense()
        return arrays(packed)

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that a block's functions hold: the markers, and those that go with them for every
        layer alike."""
        rows = {len(marker) for marker in self.markers.values()}
        return self.markers | {
            name: value for count in sorted(rows) for name, value in unit_scales(count).items()
        }

    @property
    def norm_names(self) -> set[str]:
        """Full names of the norms' weights: what the file has of them is what they multiply by."""
        modules = [module for _, module in self.dims.traits.norms]
        layers = range(self.dims.layers)
        return {self.norm.name} | {
            f"model.layers.{i}.{module}.weight" for module in modules for i in layers
        }

    def kinds(self, longest_tokens: int) -> tuple[int, ...]:
        """Return the kind of each layer's block, from 0 in the order of the layers: they differ by
        window, by whether q and k are rotated, and by what table. A window that a row of
        `longest_tokens` fits in does not count.
        """
        traits = self.dims.traits
        family = self.loaded.family
        kinds = {}
        tables = family.positions(1, "cpu", torch.float32)
        for layer in range(self.dims.layers):
            window = traits.window(layer)
            table = id(family.layer_position(layer, tables)[0]) if traits.rotated(layer) else None
            kinds[layer] = (table, window if window < longest_tokens else 0)
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.values()))}
        return tuple(numbers[kind] for kind in kinds.values())

    def block(
        self, adapter: Tensor, frozen: tuple[Tensor, ...], constants: dict[str, Tensor]
    ) -> Block:
        """Take the block's tensors from a function's arguments and constants."""
        tensors = constants | dict(zip((one.name for one in self.frozen), frozen, strict=True))
        linears = {}
        entries = {entry.parameters.target: entry for entry in self.entries}
        for target in self.loaded.family.linear_targets:
            name = linear_name(self.loaded, target)
            pair = entries[target].pair(adapter) if target in entries else (None, None)
            matrix = self.linear_form.matrix(f"{name}.weight", tensors)
            linears[target] = Linear(matrix, tensors.get(f"{name}.bias"), *pair, self.config.scale)
        norms = {
            place: tensors[f"model.layers.{{layer}}.{module}.weight"]
            for place, module in self.dims.traits.norms
        }
        return Block(norms, linears)

    def updated(
        self,
        gradients: Mapping[str, tuple[Tensor, Tensor]],
        vectors: tuple[Tensor, ...],
        step: Tensor,
        rate: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return a layer's range of the adapter and of the moments after SGD or AdamW.

        Args:
            gradients: of A and B by target.
            vectors: the layer's ranges before the update, float32 [layer_size] each.
            step: int64 [1], the number of updates so far.
            rate: float32 [1], the learning rate.
        """
        config = self.config
        ranges = []
        at = 0
        for entry in self.entries:
            for start, gradient in zip((entry.a, entry.b), gradients[entry.parameters.target]):
                if start > at:
                    ranges.append(gradient.new_zeros(start - at))
                ranges.append(gradient.reshape(-1))
                at = start + gradient.numel()
        value, *moments = vectors
        if self.layer_size > at:
            ranges.append(value.new_zeros(self.layer_size - at))
        g = torch.cat(ranges)
        if config.weight_decay:
            value = value * (1.0 - rate * config.weight_decay)
        if config.optimizer == "sgd":
            return (value - rate * g,)
        number = step.to(torch.float32) + 1.0
        m = moments[0] * config.beta1 + g * (1.0 - config.beta1)
        v = moments[1] * config.beta2 + g * g * (1.0 - config.beta2)
        first, second = (1.0 - torch.pow(beta, number) for beta in (config.beta1, config.beta2))
        return value - rate / first * m / (torch.sqrt(v / second) + config.eps), m, v

    def _block_ports(self) -> list[TensorPort]:
        dims = self.dims
        family = self.loaded.family
        ports = [
            frozen_port(f"model.layers.{{layer}}.{module}.weight", (dims.norm_width(place),))
            for place, module in dims.traits.norms
        ]
        for target in family.linear_targets:
            name = linear_name(self.loaded, target)
            inputs, outputs = dims.linear_shape(target)
            ports += self.linear_form.ports(f"{name}.weight", (outputs, inputs))
            if dims.linear_bias(target):
                ports.append(frozen_port(f"{name}.bias", (outputs,)))
        return ports

    def _constants(self) -> dict[str, tuple[int, int]]:
        shapes: dict[str, tuple[int, int]] = {}
        for target in self.loaded.family.linear_targets:
            inputs, outputs = self.dims.linear_shape(target)
            shapes |= self.linear_form.constants(
                f"{linear_name(self.loaded, target)}.weight", (outputs, inputs)
            )
        return shapes


def linear_name(loaded: LoadedModel, target: str) -> str:
    """Return a linear layer's full name, `{layer}` for its number."""
    return f"model.layers.{{layer}}.{loaded.family.linear_parents[target]}.{target}"


def _tensor_name(port_name: str) -> str:
    """The parameter that a port is a part of: `x.weight` of `x.weight_scale`."""
    for suffix in ("_scale", "_min"):
        port_name = port_name.removesuffix(suffix)
    return port_name
