"""What MeSP decides before a weight is loaded: it refuses blocks that its passes do not know and settings of another
backend, and for `method.recompute: auto` keeps as much of the forward pass as the memory holds."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import MoeDims
from ondevice.core.errors import ConfigError, ModelError, Need
from ondevice.core.traits import BlockTraits, check_traits
from ondevice.methods.mesp.memory import (
    MEMORY,
    KeptLayers,
    gpu_chunk_tokens,
    layer_bytes,
    weights,
)
from ondevice.methods.precision import refuse_base
from ondevice.methods.step_model import item_bytes, room_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from ondevice.core.capabilities import Asked
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig, Recompute

PLAIN = {"weight_placement": "resident", "activations": "device", "bits": None,
         "base": None, "mlp_chunk_tokens": None}  # fmt: skip
"""Settings of the hand-written backward pass."""
EXPERTS = "experts"
"""Listed with the traits: an MLP that is a mixture of experts."""
BESIDE = "beside"
"""Experts next to an MLP."""
_TRAITS = tuple(field.name for field in fields(BlockTraits))
IN_TORCH = IN_MLX = (*_TRAITS, EXPERTS, BESIDE)
"""Traits that the stages in PyTorch and in MLX know."""
IN_BLOCKS = (*_TRAITS, EXPERTS, BESIDE)
"""Traits that block programs know."""


def check_family(
    dims: ModelDims,
    known: Collection[str] = (),
    what: str = "this form of mesp",
    length_tokens: int | None = None,
) -> None:
    """Refuse what a hand-written backward pass does not know.

    Args:
        known: traits that this form of it does.

    Raises:
        ModelError: the block has no gated MLP between RMS norms, has experts, or a trait that is
            not known.
    """
    if dims.whole:
        raise dims.unknown(what)
    if dims.experts and EXPERTS not in known:
        raise ModelError(
            f"a block of {dims.family} is a mixture of experts, which {what} does not do",
            expected="one MLP for every token: a graph that is made before the tokens would compute all "
            f"{dims.experts} experts for each of them",
            received=dims.family,
            hint="--target jetson --quantize none takes it, and `ondevice train` does",
        )
    if isinstance(dims, MoeDims) and dims.beside and BESIDE not in known:
        raise ModelError(
            f"a block of {dims.family} has experts next to its MLP, which {what} does not do",
            expected="field 'enable_moe_block' false",
            received=True,
            hint="`ondevice train` takes it, in PyTorch",
        )
    if not dims.gated:
        raise ModelError(
            f"mesp has no backward pass for {dims.family}",
            expected="RMS norms, rotary embedding, a gated MLP, as Llama has",
            received=dims.family,
            needs=Need.ANY_DECODER,
        )
    if dims.traits != BlockTraits():
        check_traits(dims, what, known, length_tokens)


def check_plain(dims: ModelDims, config: MespConfig) -> None:
    """Refuse settings that only the hand-written backward pass has, for blocks that are not known."""
    for name, value in PLAIN.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"method.{name} needs a known block; {dims.family}'s are not",
                expected=f"method.{name}: {value or 'null'}",
                received=getattr(config, name),
            )


def check_resident(device: str, bits: int | None) -> None:
    """Refuse bitsandbytes' 4 bits without a GPU."""
    if bits == 4 and not device.startswith("cuda"):
        raise ConfigError(
            "method.bits: 4 needs a GPU in torch",
            expected="method.bits: 8, --backend mlx, or model.device: cuda",
            received=device,
            hint="--set method.weight_placement=streamed --set method.bits=null needs less memory still",
        )


def check_base(config: MespConfig) -> None:
    """Refuse rounded base weights that are packed otherwise, or stay in their files."""
    if config.weight_placement == "streamed" or config.bits:
        raise ConfigError(
            f"method.base: {config.base} rounds resident weights of the model's own precision",
            expected="method.weight_placement: resident, method.bits: null",
            received=f"method.weight_placement: {config.weight_placement}, method.bits: {config.bits or 'null'}",
        )


def check_streamed(dims: ModelDims, bits: int | None, model: str) -> None:
    """Refuse weights that torch cannot stream from the files of `model`."""
    if bits:
        raise ConfigError(
            "torch streams weights as the files have them",
            expected="method.bits: null with method.weight_placement: streamed",
            received=f"method.bits: {bits}",
            hint="--backend mlx streams 4-bit weights",
        )
    if dims.experts:
        raise ModelError(
            f"{model}: a mixture of experts is not streamed",
            expected="method.weight_placement: resident",
            received="method.weight_placement: streamed",
            hint="the router chooses experts too late to read them; "
            "model.dtype: bfloat16 halves the weights",
        )


def check_mlx_settings(config: MespConfig) -> None:
    """Refuse settings that are for torch.

    Raises:
        ConfigError: names the setting.
    """
    only = {"activations": "device", "kernels": "auto", "mlp_chunk_tokens": None, "answers": (),
            "base": None}  # fmt: skip
    for name, expected in only.items():
        received = getattr(config, name)
        hint = "leave it out"
        if received == expected:
            continue
        if name == "mlp_chunk_tokens":
            hint = "method.mlp_tiles makes the MLP's part smaller"
        raise ConfigError(
            f"method.{name}: {received} is for torch", expected=f"{expected} with MLX", hint=hint
        )


def check_mlx_experts(dims: ModelDims, config: MespConfig) -> None:
    """Refuse a mixture of experts that MLX cannot run.

    Raises:
        ConfigError: an adapter on experts.
    """
    if not isinstance(dims, MoeDims):
        return
    if any(linear.experts > 1 for linear in dims.adapted(config)):
        raise ConfigError(
            "mesp in MLX has no adapters on the matrices of experts",
            expected=f"method.target_modules among {', '.join(dims.linear_shapes)}",
            received=", ".join(config.target_modules),
            hint="--backend torch does",
        )


def refuse(asked: Asked[MespConfig]) -> None:
    """See `capabilities.Refuses`."""
    dims = asked.dims
    config = asked.config
    if asked.backend == "mlx":
        check_mlx_settings(config)
        if dims.whole:
            raise dims.unknown("mesp in MLX")
        check_family(dims, IN_MLX, "mesp in MLX")
        check_mlx_experts(dims, config)
    elif dims.whole:
        check_plain(dims, config)
    else:
        check_family(dims, IN_TORCH, "mesp")
        if config.base:
            check_base(config)
            refuse_base(asked)
        if config.weight_placement == "streamed":
            check_streamed(dims, config.bits, asked.model)
        else:
            check_resident(asked.device, config.bits)


def resolve(request: Any, rates: Any, host_bytes: int | None) -> tuple[MespConfig, str]:
    """Decide `recompute: auto` from the device's memory; see `DecidesFromMemory`."""
    config, dims = request.method, request.dims
    if config.recompute != "auto":
        return config, ""
    computed = config.model_copy(update={"recompute": "all"})
    if request.device.torch_device == "cpu" or dims.whole or dims.experts:
        return computed, ""
    room = room_bytes(request, needed_bytes(request, computed))
    rows = min(request.batch_size, config.micro_batch_size or request.batch_size)
    each = layer_bytes(dims, rows * request.length_tokens, item_bytes(request.dtype))
    counts = []
    for size in each:
        counts.append(max(0, min(dims.layers, room // max(size, 1))))
        room -= counts[-1] * size
    taken = KeptLayers(*counts)
    return config.model_copy(update={"recompute": setting(taken, dims)}), said(taken, dims)


def setting(layers: KeptLayers, dims: ModelDims) -> Recompute:
    """Return the shortest setting that keeps so many layers."""
    if not any(layers):
        return "all"
    if min(layers) == dims.layers:
        return "none"
    return layers.attention, layers.mlp, layers.projections


def needed_bytes(request: Any, config: MespConfig) -> int:
    """Return what a step needs that computes everything again, its weights included, bytes."""
    dims, item = request.dims, item_bytes(request.dtype)
    tokens = request.batch_size * request.length_tokens
    needed = weights(dims, config, item)
    needed += sum(
        MEMORY.step(dims, config, request.batch_size, request.length_tokens, item).values()
    )
    chunk = gpu_chunk_tokens(tokens)
    needed += 3 * chunk * dims.intermediate * item  # wider than a CPU's chunk
    if config.bits and 2 * chunk < tokens:  # the MLP's matrices are dense for all chunks
        needed += 3 * dims.hidden * dims.intermediate * item
    return needed


def said(layers: KeptLayers, dims: ModelDims) -> str:
    """Say what was decided."""
    if not any(layers):
        return "method.recompute: all; the GPU's memory has no room to keep more than block inputs"
    if min(layers) == dims.layers:
        return "method.recompute: none; the GPU's memory has room for all of the forward pass"
    parts = ("attention's output", "gate and up", "projections")
    kept = [f"{part} of {number}" for part, number in zip(parts, layers, strict=True) if number]
    of = f"method.recompute keeps {', '.join(kept)} of {dims.layers} layers"
    return f"{of}: what the GPU's memory has room for"
