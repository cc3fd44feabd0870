"""An artifact's table of contents: what the program takes, gives and keeps; `ondevice.artifact.manifest` reads it."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from pydantic import Field, model_validator

from ondevice.core.config import StrictConfig

SCHEMA_VERSION = 2
LAYER_INPUT = "layer_input_"
"""How the names of functions begin that make a layer's input, of blocks of every kind."""
JOIN = "block_join_"
"""How the names of functions begin that join a block's MLP and the experts next to it."""
EXPERT = "expert_"
"""How the names of functions begin that compute one expert of a layer, of blocks of every kind."""


InputRole = Literal[
    "ids", "labels", "state", "counter", "seed", "learning_rate", "constant", "projected_gradients", "length",
    "frozen", "hidden", "gradient", "targets", "token_scale", "tile_first", "tile_skip", "tile_sums",
    "loss_scale", "position", "keys", "values", "layer_input", "shared_keys", "shared_values",
    "keys_gradient", "values_gradient", "routing", "normed_gradient", "routing_gradient",
    "conv_state", "delta_state", "dense", "experts_sum",
]  # fmt: skip
OutputRole = Literal[
    "losses", "projected_gradients", "state", "nll_sum", "tokens", "logits", "sum", "hidden", "gradient", "tile_sums",
    "keys", "values", "layer_input", "shared_keys", "shared_values", "keys_gradient", "values_gradient",
    "normed", "routing", "routing_gradient", "conv_state", "delta_state", "dense",
]  # fmt: skip


class TensorPort(StrictConfig):
    """One input or output of a program method."""

    name: str
    """Of a `state`, `counter` or `constant` port, the name of the state tensor, counter or constant."""
    role: InputRole | OutputRole | None = None
    """By which a runtime session binds inputs and takes outputs. A stage's ports have none."""
    dtype: str
    """Its name in NumPy."""
    shape: tuple[int, ...]
    """Of every dimension."""
    unit: str = ""
    """Empty if there is none."""


def port(
    name: str, role: Any, shape: tuple[int, ...], dtype: str = "float32", unit: str = ""
) -> TensorPort:
    """Return a port of a training program; `role` is one of `InputRole` or `OutputRole`."""
    return TensorPort(name=name, role=role, dtype=dtype, shape=shape, unit=unit)


def token_ports(rows: int, length_tokens: int) -> tuple[TensorPort, TensorPort]:
    """Return ids and labels, int64 [rows, length_tokens]."""
    shape = (rows, length_tokens)
    return port("ids", "ids", shape, "int64", "token id"), port(
        "labels", "labels", shape, "int64", "token id"
    )


def row_ports(rows: int) -> tuple[TensorPort, TensorPort]:
    """Return summed negative log likelihood and labelled tokens, float32 [rows]."""
    return port("nll_sum", "nll_sum", (rows,), unit="nats"), port("tokens", "tokens", (rows,))


class ProgramMethod(StrictConfig):
    """One method of the program."""

    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    planned_bytes: int
    """Memory the runtime plans for intermediate tensors, without what delegates take."""
    ops: tuple[str, ...]
    """Kernels the runtime must have; one that is missing shows on a device as error 0x14."""
    delegates: int
    instructions: int
    program: str | None = None
    """Of `blocks`: the file that holds the method with a layer's weights inside, the layer's number for `{layer}`.
    None: the artifact's program."""


class Share(StrictConfig):
    """The share of a program method that one backend runs."""

    backend: str
    """`QnnBackend` (NPU), `XnnpackBackend` (CPU), or `portable`: the runtime's own kernels."""
    calls: int
    """Delegate calls, or kernel calls of the portable part."""
    operators: int
    """Operators of the exported graph that it runs."""
    bytes: int
    """Constants and compiled code that it holds; what several methods share is counted in each."""


class StateTensor(StrictConfig):
    """A tensor that a training step changes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Literal["adapter", "optimizer"]
    first: str | None = None
    """A safetensors file of the artifact that holds a tensor of this name: the value a run starts from. None: zeros."""
    kept: Literal["host", "program"] = "host"
    """`host`: it goes in and comes out. `program`: a buffer that `get_<name>` and `set_<name>` read and write."""


class Counter(StrictConfig):
    """An int64 [1] input that the host counts up from 0."""

    name: str
    counts: Literal["run_steps", "updates"]
    """`run_steps`: the run's step number, which keys the noise. `updates`: the optimizer's own updates, a part of the
    state."""


class Constant(StrictConfig):
    """A float32 [1] input with one value in training and one in evaluation."""

    name: str
    train: float
    evaluate: float


class AdapterEntry(StrictConfig):
    """One LoRA B matrix in the flat adapter vector: float32 [rank, outputs], row-major, at `offset` elements."""

    a_offset: int | None = None
    """Where its A is, float32 [rank, inputs]; None if A is frozen and lies in the file `frozen`."""

    linear: str
    layer: int
    target: str
    offset: int
    rank: int
    inputs: int
    outputs: int


def kind_of(method: str) -> int:
    """Return the kind of block that a method's name ends with; 0 if with none."""
    end = method.rpartition("_")[2]
    return int(end) if end.isdecimal() else 0


class ProgramSpec(StrictConfig):
    """The program's methods and its state: all that a session needs to run it without knowing the training method."""

    shape: Literal["step", "stages", "blocks"] = "step"
    """`step`: one method is a whole training step. `stages`: methods are parts of one, which the file `program` puts
    in order. `blocks`: methods are functions of a block's shape, which the host calls once a layer with that layer's
    weights (role `frozen`, from the mapped file `weights`) and its range of each state tensor; see
    `develop/block-programs.md`."""
    methods: dict[str, ProgramMethod]
    """`train_step` and `evaluate` are for the longest of `lengths_tokens`; `<name>_<tokens>` for the others."""
    state: tuple[StateTensor, ...] = ()
    counters: tuple[Counter, ...] = ()
    constants: tuple[Constant, ...] = ()
    batch_copies: int = Field(default=1, ge=1)
    """How often `train_step` takes a training batch, copy after copy; an evaluation hands in other rows instead."""
    evaluates_with: Literal["evaluate", "train_step"] = "evaluate"
    """The method whose `nll_sum` and `tokens` are an evaluation's; `train_step` runs with the constants' values of
    evaluation and learning rate 0."""
    layers: int = Field(default=0, ge=0)
    """Of `blocks`: how often the block's methods are called. `{layer}` in a frozen port's name stands for the number,
    and each state tensor is as many equal ranges."""
    kinds: tuple[int, ...] = ()
    """Of `blocks`: the kind of each layer's block, if they differ (a window of attention, a rotary embedding, a
    convolution). A method of a block of kind k, from 1 on, has `_k` behind its name; only layers of its kind have its
    frozen ports."""
    weights: str | None = None
    """Of `blocks`: the safetensors file of the frozen weights, each aligned to 64 bytes."""
    loss_scale: float | None = Field(default=None, gt=0)
    """Of `blocks`: the first value of what `token_scale` is multiplied by, and what inputs of role `loss_scale` are.
    A step in which a number is not finite leaves the state as it was and halves it; it is a part of the state."""
    vocab: int = Field(default=0, ge=0)
    """Of `blocks`: rows of the head, which its methods take tile by tile."""
    frozen: str | None = None
    """A safetensors file with `<linear>.lora_A.weight` float32 [rank, inputs] for every entry without `a_offset`."""
    layout: tuple[AdapterEntry, ...] = ()
    """Ranges of the state tensor of role `adapter`, and the tensors of PEFT's adapter that they are."""
    adapter_size: int = 0
    """Elements of the adapter, padding included."""
    rank: int = 0
    alpha: float = 0.0

    @model_validator(mode="after")
    def _names(self) -> ProgramSpec:
        known = {
            "state": {tensor.name for tensor in self.state},
            "counter": {counter.name for counter in self.counters},
            "constant": {constant.name for constant in self.constants},
        }
        for name, method in self.methods.items():
            for port in (*method.inputs, *method.outputs):
                if port.name not in known.get(str(port.role), {port.name}):
                    raise ValueError(f"{name}: port '{port.name}' has no {port.role} of that name")
        if self.shape == "blocks" and not (self.layers and self.vocab and self.weights):
            raise ValueError("shape blocks: layers, vocab and weights are needed")
        if self.kinds and len(self.kinds) != self.layers:
            raise ValueError(f"kinds: {len(self.kinds)} of {self.layers} layers")
        if self.layers and any(tensor.shape[0] % self.layers for tensor in self.state):
            raise ValueError(f"state tensors cannot be cut into {self.layers} equal ranges")
        if self.frozen is None and any(entry.a_offset is None for entry in self.layout):
            raise ValueError("frozen: entries of the layout without a_offset need a file")
        trained = [prod(tensor.shape) for tensor in self.state if tensor.role == "adapter"]
        if trained and sum(trained) != self.adapter_size:
            raise ValueError(
                f"adapter_size is {self.adapter_size}, and the adapter's tensors have {sum(trained)}"
            )
        return self

    def layers_of(self, method: str) -> list[int]:
        """List the layers whose block has a method of that name."""
        if method.startswith(EXPERT):
            return self.expert_layers
        if method.startswith(LAYER_INPUT):
            return list(range(self.layers))
        kind = kind_of(method)
        return [i for i in range(self.layers) if not self.kinds or self.kinds[i] == kind]

    @property
    def is_tower(self) -> bool:
        """True for blocks of the language model of a checkpoint that has other towers: adapters have
        the names of the whole."""
        names = [entry.linear for entry in self.layout]
        return self.shape == "blocks" and not any(
            name.startswith("model.layers.") for name in names
        )

    @property
    def experts(self) -> int:
        """Experts of a layer, if blocks route their tokens to some of them; else 0."""
        ports = (port for method in self.methods.values() for port in method.inputs)
        routing = (port.shape[1] for port in ports if port.role == "routing_gradient")
        return next(routing, 0)

    @property
    def expert_layers(self) -> list[int]:
        """Layers whose blocks route their tokens to experts."""
        layers: set[int] = set()
        for name, method in self.methods.items():
            if any(port.role == "routing_gradient" for port in method.inputs):
                layers.update(self.layers_of(name))
        return sorted(layers)

    @property
    def context_tokens(self) -> int:
        """Most tokens of a conversation with the functions of a block; 0 if they keep none."""
        reads = (one for name, one in self.methods.items() if name.startswith("block_prefill"))
        ports = (port for one in reads for port in one.inputs if port.role == "values")
        return next((port.shape[1] for port in ports), 0)

    @property
    def adapter(self) -> StateTensor | None:
        """The state tensor that is the adapter, if one holds all of it (shapes `step` and `blocks`)."""
        return next((tensor for tensor in self.state if tensor.role == "adapter"), None)


class ModelInfo(StrictConfig):
    """The model that was exported."""

    source: str
    revision: str | None = None
    sha256: str
    dims: dict[str, Any]


class GeneratorInfo(StrictConfig):
    """The noise: scheme, lowering and default seed."""

    scheme: str = "splitmix64-counter"
    distribution: str
    lowering: str
    seed: int


class Manifest(StrictConfig):
    """`manifest.json` of an artifact."""

    schema_version: int = SCHEMA_VERSION
    ondevice_version: str
    runtime: str
    """The runtime the program needs, with its version."""
    target: str
    method: dict[str, Any]
    """The training method's whole configuration."""
    model: ModelInfo
    program: str = "program.pte"
    program_spec: ProgramSpec
    quantize: str
    loss: str
    lengths_tokens: tuple[int, ...]
    batch_size: int
    eval_batch_size: int
    generator: GeneratorInfo
    custom_ops: tuple[str, ...] = ()
    """Ops of this project that the runtime must link; empty for a stock runtime."""
    soc: str | None = None
    """The Qualcomm chip that the NPU's part was compiled for; None for a program without one."""
    partition: dict[str, tuple[Share, ...]] = Field(default_factory=dict)
    """Which backend runs how much, by method."""
    tokenizer_sha256: str
    chat_template_sha256: str | None = None
    task: str | None = None
    caveats: tuple[str, ...] = ()
    """Things that could not be tried where the program was exported."""
    check: dict[str, Any] = Field(default_factory=dict)
    """Errors that the export measured against eager PyTorch before the artifact was written."""
    files: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of every file but this one."""

    @property
    def written_tokens(self) -> int:
        """Most tokens of a prompt and an answer that the program writes and then trains on; 0 if
        it writes none."""
        return min(self.program_spec.context_tokens, max(self.lengths_tokens))
