"""The settings that the functions of a block program share, and the tensors that they take: ports,
weights, adapter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.core.dims import MoeDims
from ondevice.core.errors import ArtifactError
from ondevice.core.manifest import TensorPort
from ondevice.core.session import MOMENTS
from ondevice.core.traits import EXPERTS, GATED_MLP
from ondevice.methods.mesp.check import IN_BLOCKS
from ondevice.methods.mesp.frozen import Q4, Float32, Int8, Q4Double, arrays, frozen_port
from ondevice.methods.mesp.integer import Integers, unit_scales
from ondevice.methods.mesp.lora import FlatEntry, FlatLayout, initial_tensors, lora_parameters
from ondevice.methods.mesp.memory import head_tile_rows
from ondevice.methods.mesp.torch.block import Block, Linear, Routed
from ondevice.methods.mesp.torch.weights import factor, mixer_tensor, plain_norms
from ondevice.nn.calibrated import round_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.frozen import Form, TableForm
    from ondevice.models import LoadedModel

IN_BLOCK = "model.layers.{layer}"
EMBEDDING = "model.embed_tokens.weight"
LINEAR_FORMS: dict[str, Form] = {
    "none": Float32(),
    "int8": Int8(),
    "q4": Q4(),
    "8da8w": Integers(),
    "q4dq": Q4Double(),
    "8da4w": Q4(),
}
"""Of the matrices in a block, by `export.quantize`. `8da4w` is `q4`'s file: only the functions in
this project's ops multiply integers, and read both orientations from the one copy."""
INTEGERS = ("8da8w", "8da4w")
"""Forms whose products are of integers in this project's ops."""
TABLE_FORMS: dict[str, TableForm] = {
    "none": Float32(),
    "int8": Int8(),
    "q4": Int8(),
    "8da8w": Int8(),
    "q4dq": Int8(),
    "8da4w": Int8(),
}
"""Of embedding and head."""
MOST_CHANGE = 0.5
"""Of a matrix by rounding to 4 bits, relative: chosen levels of Gaussian weights have 0.1 to 0.2."""


class BlockFunctions:
    """The settings of a block program, and the tensors it takes; `compare` reads it.

    Attributes:
        layout: of the flat vector; each layer is a range of `layer_size` elements.
        quantize: how matrices are kept, a key of `LINEAR_FORMS` and, for embedding and head,
            `TABLE_FORMS`.
        integers: the functions are this project's ops and their products of integers, with what
            the weights file has.
        table: ports of the embedding; `head` and `norm` those of a tile of the head and of the
            norm before it.
        expert: ports of the matrices of one expert, `{expert}` for its number, and their names
            `expert_names`; () without experts.
        holds_matrices: a block's functions hold its matrices, as constants; see `markers`.
        layer_input: ports of what makes a layer's input: the tokens' embeddings for that layer, the
            projection of their embedding, and the factor of its norm; () if layers have none.
        tile_rows: rows of the head that a tile has.
    """

    def __init__(
        self, loaded: LoadedModel, config: MespConfig, quantize: str = "none", fused: bool = False
    ) -> None:
        self.loaded = loaded
        self.config = config
        self.dims = loaded.dims
        self.quantize = quantize
        self.integers = fused and quantize in INTEGERS
        self.linear_form = LINEAR_FORMS[quantize]
        self.holds_matrices = quantize == "8da8w" and not fused
        if quantize == "8da8w" and fused:
            self.linear_form = Int8()
        # Of what projects the embedding to a layer's input, which no function of one layer holds.
        self.projection_form = Int8() if self.holds_matrices else self.linear_form
        # A function of one expert serves all of them, so it holds none.
        self.expert_form = self.projection_form
        self.table_form = TABLE_FORMS[quantize]
        self.parameters_of_run = lora_parameters(
            loaded.dims, type(loaded.family), config, IN_BLOCKS, "a block program"
        )
        self.layout = FlatLayout.build(self.parameters_of_run, self.dims.layers)
        self.layer_size = self.layout.size // self.dims.layers
        self.tile_rows = head_tile_rows(self.dims, config)
        self.head_name = EMBEDDING if self.dims.tied else "lm_head.weight"
        self.head = self.table_form.ports(self.head_name, (self.tile_rows, self.dims.hidden))
        self.norm = frozen_port(f"{loaded.family.last_norm}.weight", (self.dims.hidden,))
        self.table = self.table_form.ports(EMBEDDING, (self.dims.vocab, self.dims.hidden))
        self.layer_input = self._layer_input_ports()
        self.mlp = f"{IN_BLOCK}.{loaded.dims.traits.path('mlp')}".rstrip(".")
        self.expert_names = tuple(
            f"{self.mlp}.{target.replace('.', '.{expert}.')}" for target in EXPERTS
        )
        self.expert = self._expert_ports()

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
            f"{linear_name(self.loaded, target)}.weight" for target in self.dims.linear_shapes
        }
        matrices |= self._shared_shapes.keys()
        if isinstance(self.dims, MoeDims) and self.dims.dense_layers:
            matrices |= {self._dense_name(part) for part in GATED_MLP}
        tensors = self._packed(EMBEDDING, self.table_form)
        for layer in range(self.dims.layers):
            for name in dict.fromkeys(_tensor_name(one.name) for one in self.frozen(layer)):
                form = self.linear_form if name in matrices else None
                tensors |= self._packed(name.format(layer=layer), form)
            if self.routes(layer):
                tensors |= self._experts(layer)
        if self.layer_input:
            tensors |= self._layer_inputs()
        tensors |= self._packed(self.norm.name, None)
        if not self.dims.tied:
            tensors |= self._packed(self.head_name, self.table_form)
        return tensors

    def _layer_input_ports(self) -> tuple[TensorPort, ...]:
        width = self.dims.traits.layer_input
        if not width:
            return ()
        table, projection, norm = self.loaded.family.input_tensors
        return (
            *self.table_form.ports(f"{table}.{{layer}}", (self.dims.vocab, width)),
            *self.projection_form.ports(f"{projection}.{{layer}}", (width, self.dims.hidden)),
            frozen_port(norm, (width,)),
        )

    def _expert_ports(self) -> tuple[TensorPort, ...]:
        if not isinstance(self.dims, MoeDims):
            return ()
        width = self.dims.expert_intermediate
        shapes = ((2 * width, self.dims.hidden), (self.dims.hidden, width))
        both = zip(self.expert_names, shapes, strict=True)
        return tuple(one for name, shape in both for one in self.expert_form.ports(name, shape))

    def _experts(self, layer: int) -> dict[str, np.ndarray]:
        """A layer's experts one after the other, so that what one of them is read for is together
        in the file."""
        names = (f"{self.mlp.format(layer=layer)}.{target}" for target in EXPERTS)
        wholes = [self.loaded.model.get_parameter(name).detach() for name in names]
        tensors: dict[str, np.ndarray] = {}
        for expert in range(self.dims.experts):
            for form_name, whole in zip(self.expert_names, wholes, strict=True):
                name = form_name.format(layer=layer, expert=expert)
                packed = self.expert_form.pack(name, whole[expert].float())
                if self.quantize != "none":
                    whole[expert].copy_(self.expert_form.matrix(name, packed).dense())
                tensors |= arrays(packed)
        return tensors

    @property
    def _shared_shapes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the matrices of the expert for all tokens, by name."""
        if not isinstance(self.dims, MoeDims) or not self.dims.shared_intermediate:
            return {}
        width = self.dims.shared_intermediate
        hidden = self.dims.hidden
        shapes = dict.fromkeys(GATED_MLP, (width, hidden)) | {"down_proj": (hidden, width)}
        return {f"{self.mlp}.shared_expert.{part}.weight": shape for part, shape in shapes.items()}

    def routes(self, layer: int) -> bool:
        """Return True if that layer's tokens choose experts."""
        return isinstance(self.dims, MoeDims) and layer not in self.dims.dense_layers

    @property
    def beside(self) -> bool:
        """True if experts stand next to each block's MLP."""
        return isinstance(self.dims, MoeDims) and self.dims.beside

    def _dense_name(self, part: str) -> str:
        family: Any = self.loaded.family
        return f"{IN_BLOCK}.{family.dense_path(part)}.weight"

    def _dense_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the MLP of a block without experts among others, by part."""
        if not isinstance(self.dims, MoeDims):
            return {}
        shapes = self.dims.dense_shapes(layer).items()
        return {part: (outputs, inputs) for part, (inputs, outputs) in shapes}

    @property
    def _router(self) -> str:
        return f"{IN_BLOCK}.{self.dims.traits.path('mlp.gate')}.weight"

    def _mixture_ports(self, layer: int) -> list[TensorPort]:
        """What a block of a mixture takes: the router with its bias, and the expert for all with
        its gate; or the MLP of a block without experts."""
        if not isinstance(self.dims, MoeDims):
            return []
        ports = []
        for part, shape in self._dense_shapes(layer).items():
            ports += self.linear_form.ports(self._dense_name(part), shape)
        if ports:
            return ports
        ports = [frozen_port(self._router, (self.dims.experts, self.dims.hidden))]
        if self.dims.routing.bias:
            ports.append(frozen_port(f"{self.mlp}.expert_bias", (self.dims.experts,)))
        if self._shared_shapes:
            gate = f"{self.mlp}.shared_expert_gate.weight"
            ports.append(frozen_port(gate, (1, self.dims.hidden)))
        for name, shape in self._shared_shapes.items():
            ports += self.linear_form.ports(name, shape)
        return ports

    def _routed(self, tensors: Mapping[str, Tensor], layer: int = 0) -> Routed | None:
        if not isinstance(self.dims, MoeDims) or not self.routes(layer):
            return None
        shared = {
            name.split(".")[-2]: self.linear_form.matrix(name, tensors)
            for name in self._shared_shapes
        }
        traits = self.dims.routing
        traits = replace(traits, scale=traits.scale * self.dims.traits.residual_scale)
        gate = tensors.get(f"{self.mlp}.shared_expert_gate.weight")
        bias = tensors.get(f"{self.mlp}.expert_bias")
        router = tensors[self._router]
        return Routed(router, self.dims.active_experts, traits, shared, gate, bias)

    def _layer_inputs(self) -> dict[str, np.ndarray]:
        """Each layer's part of the tokens' embeddings, [vocab, W], and of what projects theirs, so
        that a host hands in a range of the file."""
        width = self.dims.traits.layer_input
        table, projection, norm = self.loaded.family.input_tensors
        tensors = self._packed(norm, None)
        parts = ((table, self.table_form, 1), (projection, self.projection_form, 0))
        for layer in range(self.dims.layers):
            for name, form, axis in parts:
                whole = self.loaded.model.get_parameter(name)
                own = whole.detach().narrow(axis, layer * width, width)
                packed = form.pack(f"{name}.{layer}", own.float().contiguous())
                if self.quantize != "none":
                    own.copy_(form.matrix(f"{name}.{layer}", packed).dense())
                tensors |= arrays(packed)
        return tensors

    def _packed(self, name: str, form: Form | None) -> dict[str, np.ndarray]:
        """A parameter's tensors in the file; None: float32 as it is."""
        parameter = self.loaded.model.get_parameter_or_buffer(name)
        if form is None:
            # The factor of the logits is the last norm's: logits are linear in its weight, and so
            # are gradients.
            scale = self.dims.traits.logit_scale if name == self.norm.name else 1.0
            value = parameter.detach().float()
            if name in self.norm_names:
                value = factor(self.dims, value)
            return arrays({name: mixer_tensor(value) * scale})
        if name in self.loaded.grids:
            grid = self.loaded.grids[name]
            form = Q4(grid) if grid.tops is None else Q4Double(grid)
        packed = form.pack(name, parameter.detach().float())
        if self.quantize != "none":
            parameter.data = form.matrix(name, packed).dense()
        return arrays(packed)

    def markers(self, layer: int) -> dict[str, Tensor]:
        """Return noise, int8, in the place of each matrix that the functions of that layer's kind
        hold, by name with `{layer}`; {} if they hold none."""
        random = torch.Generator().manual_seed(0)
        shapes: dict[str, tuple[int, int]] = {}
        for one in self.dims.block_linears(layer).values():
            name = f"{linear_name(self.loaded, one.target)}.weight"
            shapes |= self.linear_form.constants(name, (one.outputs, one.inputs))
        for part, shape in self._dense_shapes(layer).items():
            shapes |= self.linear_form.constants(self._dense_name(part), shape)
        if self.routes(layer):
            for name, shape in self._shared_shapes.items():
                shapes |= self.linear_form.constants(name, shape)
        return {
            name: torch.randint(-127, 128, shape, dtype=torch.int8, generator=random)
            for name, shape in shapes.items()
        }

    def constants(self, layer: int) -> dict[str, Tensor]:
        """Return what the functions of that layer's kind hold: the markers, and scales that go with
        them for every layer alike."""
        markers = self.markers(layer)
        rows = {len(marker) for marker in markers.values()}
        return markers | {
            name: value for count in sorted(rows) for name, value in unit_scales(count).items()
        }

    @property
    def norm_names(self) -> set[str]:
        """Full names of the norms' weights: what the file has of them is what they multiply by."""
        traits = self.dims.traits
        return {self.norm.name} | {
            f"model.layers.{i}.{module}.weight"
            for i in range(self.dims.layers)
            for _, module in traits.norms_of(i)
        }

    def kinds(self, longest_tokens: int) -> tuple[int, ...]:
        """Return the kind of each layer's block, from 0 in the order of the layers: they differ by
        what mixes tokens, by window, by whether q and k are rotated, and by what table; by sizes,
        by whose keys and values they read, and by whether tokens choose experts. A window that a
        row of `longest_tokens` fits in does not count.
        """
        traits = self.dims.traits
        family = self.loaded.family
        kinds = {}
        tables = family.positions(1, "cpu", torch.float32)
        for layer in range(self.dims.layers):
            routes = self.routes(layer)
            if not traits.attends(layer):
                kinds[layer] = (traits.mixer(layer), routes)
                continue
            window = traits.window(layer)
            table = id(family.layer_position(layer, tables)[0]) if traits.rotated(layer) else None
            sizes = (self.dims.head_width(layer), self.dims.key_heads(layer))
            keys = None
            if traits.lends_keys(layer) or not traits.has_keys(layer):
                keys = (traits.key_layer(layer), traits.has_keys(layer))
            own = (*sizes, self.dims.mlp_width(layer), traits.has_values(layer), keys, routes)
            kinds[layer] = (table, window if window < longest_tokens else 0, *own)
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.values()))}
        return tuple(numbers[kind] for kind in kinds.values())

    def entries(self, layer: int = 0) -> tuple[FlatEntry, ...]:
        """Return where a layer's A and B lie in its range."""
        start = layer * self.layer_size
        return tuple(entry.moved(-start) for entry in self.layout.of_layer(layer))

    def in_rows(self, adapter: Tensor, layer: int = 0) -> Tensor:
        """Return a layer's range [layer_size] in rows [n, width] of which every A and B has whole
        ones. The runtime copies a slice row by row: of a vector, number by number."""
        width = self.layer_size
        for entry in self.entries(layer):
            one = entry.parameters
            sizes = one.rank * one.inputs, one.rank * one.outputs
            width = math.gcd(width, entry.a, entry.b, *sizes)
        return adapter.view(-1, width)

    def block(
        self,
        adapter: Tensor,
        frozen: tuple[Tensor, ...],
        constants: dict[str, Tensor],
        layer: int = 0,
    ) -> Block:
        """Take the block's tensors from a function's arguments and constants; `layer` is one of its
        kind."""
        names = (one.name for one in self.frozen(layer))
        tensors = constants | dict(zip(names, frozen, strict=True))
        linears = {}
        traits = self.dims.traits
        entries = {entry.parameters.target: entry for entry in self.entries(layer)}
        for part, one in self.dims.block_linears(layer).items():
            name = linear_name(self.loaded, one.target)
            pair = entries[one.target].pair(adapter) if one.target in entries else (None, None)
            matrix = self.linear_form.matrix(f"{name}.weight", tensors)
            linears[part] = Linear(matrix, tensors.get(f"{name}.bias"), *pair, self.config.scale)
        for part in self._dense_shapes(layer):
            linears[part] = Linear(self.linear_form.matrix(self._dense_name(part), tensors))
        norms = {
            place: tensors[f"{IN_BLOCK}.{module}.weight"]
            for place, module in traits.norms_of(layer)
        }
        norms |= plain_norms(self.dims, layer, adapter)
        mixer = {
            part: tensors[f"{IN_BLOCK}.{name}"]
            for part, (name, _) in self.dims.mixer_tensors(layer).items()
        }
        return Block(norms, linears, layer, mixer=mixer, routed=self._routed(tensors, layer))

    def gradient(self, gradients: Mapping[str, tuple[Tensor, Tensor]], layer: int = 0) -> Tensor:
        """Lay the gradients of A and B by part of the block into a layer's range, float32 [layer_size]."""
        ranges = []
        at = 0
        for entry in self.entries(layer):
            part = self.dims.traits.part(entry.parameters.target)
            for start, gradient in zip((entry.a, entry.b), gradients[part]):
                if start > at:
                    ranges.append(gradient.new_zeros(start - at))
                ranges.append(gradient.reshape(-1))
                at = start + gradient.numel()
        if self.layer_size > at:
            ranges.append(ranges[-1].new_zeros(self.layer_size - at))
        return torch.cat(ranges)

    def updated(
        self, g: Tensor, vectors: tuple[Tensor, ...], step: Tensor, rate: Tensor
    ) -> tuple[Tensor, ...]:
        """Return a layer's range of the adapter and of the moments after SGD or AdamW.

        Args:
            g: the gradient, float32 [layer_size].
            vectors: the layer's ranges before the update, float32 [layer_size] each.
            step: int64 [1], the number of updates so far.
            rate: float32 [1], the learning rate.
        """
        config = self.config
        value, *moments = vectors
        if config.weight_decay:
            value = value * (1.0 - rate * config.weight_decay)
        if config.optimizer == "sgd":
            return (value - rate * g,)
        number = step.to(torch.float32) + 1.0
        m = moments[0] * config.beta1 + g * (1.0 - config.beta1)
        v = moments[1] * config.beta2 + g * g * (1.0 - config.beta2)
        first, second = (1.0 - torch.pow(beta, number) for beta in (config.beta1, config.beta2))
        return value - rate / first * m / (torch.sqrt(v / second) + config.eps), m, v

    def frozen(self, layer: int = 0) -> tuple[TensorPort, ...]:
        """Return the ports of a layer's weights, in the order of the functions' arguments."""
        dims = self.dims
        traits = dims.traits
        ports = [
            frozen_port(f"{IN_BLOCK}.{module}.weight", (dims.norm_width(place, layer),))
            for place, module in traits.norms_of(layer)
        ]
        for name, (channels, *rest) in dims.mixer_tensors(layer).values():
            ports.append(frozen_port(f"{IN_BLOCK}.{name}", (channels, *rest[1:])))
        for one in dims.block_linears(layer).values():
            name = linear_name(self.loaded, one.target)
            ports += self.linear_form.ports(f"{name}.weight", (one.outputs, one.inputs))
            if dims.linear_bias(one.target):
                ports.append(frozen_port(f"{name}.bias", (one.outputs,)))
        return (*ports, *self._mixture_ports(layer))


def choose(loaded: LoadedModel, rows: Sequence[Sequence[int]], quantize: str) -> None:
    """Move the model's matrices to the 4-bit grids of a form that keep the layers' outputs on rows
    of token ids."""
    scale_bits = 8 if quantize == "q4dq" else 16
    loaded.grids.update(round_model(loaded.family, rows, scale_bits))


def restore(loaded: LoadedModel, tensors: Mapping[str, np.ndarray]) -> None:
    """Put the 4-bit matrices of a weights file into the model that they were rounded from.

    Raises:
        ArtifactError: a matrix is that of another model.
    """
    for layer in range(loaded.dims.layers):
        for target in loaded.family.targets(layer):
            name = f"{loaded.family.weight_path(layer, target)}.weight"
            parts = (name, f"{name}_scale", f"{name}_min", f"{name}_top")
            given = {one: torch.from_numpy(tensors[one]) for one in parts if one in tensors}
            grid, dense = Q4.unpack(name, given)
            weight = loaded.model.get_parameter(name)
            change = float((dense - weight).norm() / weight.norm())
            if not change <= MOST_CHANGE:
                raise ArtifactError(
                    f"the 4-bit matrix {name} is not that of the model",
                    expected=f"a relative difference of at most {MOST_CHANGE:g}",
                    received=f"{change:.3g}",
                    hint="copy the artifact again, or export it again",
                )
            weight.data = dense
            loaded.grids[name] = grid


def linear_name(loaded: LoadedModel, target: str) -> str:
    """Return a linear layer's full name, `{layer}` for its number."""
    return loaded.family.weight_path("{layer}", target)


def _tensor_name(port_name: str) -> str:
    """The parameter that a port is a part of: `x.weight` of `x.weight_scale`."""
    for suffix in ("_scale", "_min", "_top"):
        if port_name.endswith(f".weight{suffix}"):
            return port_name.removesuffix(suffix)
    return port_name
