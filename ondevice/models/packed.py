"""A model's folder with packed linear layers: bitsandbytes' names and transformers' configuration,
read layer by layer.

The folder is what transformers calls a quantised checkpoint. Here it is read without a second copy
in memory: tensor by tensor, to the device where it will be used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ArtifactError
from ondevice.core.untrusted import read_object
from ondevice.models.families.base import BLOCKS, in_checkpoint
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.load import DTYPES, LoadedModel, wrap
from ondevice.models.registry import family_for
from ondevice.models.save import FILE_NAME

if TYPE_CHECKING:
    import torch

    from ondevice.models import Family, SourceInfo

QUANTIZATION = {
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
    },
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}
"""`quantization_config` of `config.json`."""

BLOCKS_KEY = "ondevice_blocks"
"""Of `config.json` of a checkpoint's language model: `Family.blocks`."""


def save_packed(loaded: LoadedModel, kind: str, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` of a model that `ondevice.nn.packed.pack_model`
    has packed.

    Args:
        kind: `nf4`, `int8`, or `none` for a model in full precision.
        folder: is made.
    """
    from safetensors.torch import save_file

    from ondevice.nn.packed import PackedLinear

    family = loaded.family
    model = loaded.model
    tensors: dict[str, torch.Tensor] = {}
    packed = {}
    for layer in range(loaded.dims.layers):
        for target in family.targets(layer):
            linear = family.linear(layer, target)
            if isinstance(linear, PackedLinear):
                packed[family.own_name(family.linear_name(layer, target))] = linear
    for name, linear in packed.items():
        for key, value in linear.matrix.tensors().items():
            tensors[_file_name(name, key)] = value.contiguous()
    for name, value in _stored(model):
        if name.removesuffix(".weight") not in packed and not (
            loaded.dims.tied and name == "lm_head.weight"
        ):
            tensors[name] = value.detach().contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / FILE_NAME, metadata={"format": "pt"})
    (folder / FILE_NAME).chmod(0o644)  # safetensors lets only the owner read
    config = {
        **model.config.to_dict(),
        "dtype": str(family.head_weight.dtype).removeprefix("torch."),
    }
    if family.blocks != BLOCKS:
        config[BLOCKS_KEY] = family.blocks
    if packed:
        config["quantization_config"] = dict(QUANTIZATION[kind])
        if kind == "nf4":
            config["quantization_config"]["bnb_4bit_compute_dtype"] = config["dtype"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_packed(
    folder: Path, device: torch.device | str, tokenizer: Any, info: SourceInfo
) -> LoadedModel:
    """Load the model that `save_packed` wrote, on `device`.

    Raises:
        ArtifactError: a tensor is missing or of another shape, or the configuration is not one of
            this project's.
        MissingPackageError: bitsandbytes is not installed (NF4).
    """
    import torch
    from safetensors import SafetensorError, safe_open

    config = read_object(folder / "config.json", ArtifactError, hint="copy it again")
    family = family_for(config.get("model_type"), str(folder / "config.json"))
    family = in_checkpoint(family, str(config.pop(BLOCKS_KEY, BLOCKS)))
    dtype = config.get("dtype")
    if dtype not in DTYPES:
        raise ArtifactError(
            f"{folder}/config.json: unknown dtype", expected=", ".join(DTYPES), received=dtype
        )
    kind = _kind(config.pop("quantization_config", None), folder)
    empty = empty_model(family, config, getattr(torch, dtype), torch.device(device))
    # Experts' matrices, the bias of their choice, a delta rule's decay: of no layer of their own.
    whole = {name for name, _ in _stored(empty.model) if not name.endswith((".weight", ".bias"))}
    buffers = whole - dict(empty.model.named_parameters()).keys()
    try:
        with safe_open(str(folder / FILE_NAME), "pt", device=str(device)) as file:
            groups: dict[str, list[str]] = {}
            for name in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                if name in whole:
                    value = file.get_tensor(name)
                    kept = value if name in buffers else value.to(getattr(torch, dtype))
                    _put_whole(empty, name, kept)
                    continue
                groups.setdefault(_owner(name), []).append(name)
            # Module by module: no second copy of the weights is ever in memory.
            for owner, names in groups.items():
                tensors = {name: file.get_tensor(name) for name in names}
                _put(empty, owner, tensors, kind, getattr(torch, dtype))
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{folder / FILE_NAME} cannot be read", received=str(error), hint="copy it again"
        ) from None
    if absent := [name for name, value in _stored(empty.model) if value.is_meta]:
        raise ArtifactError(
            f"{folder}: the weights lack a tensor",
            received=f"{absent[0]} and {len(absent) - 1} more",
        )
    return wrap(empty.model, tokenizer, family, info)


def empty_model(
    family: type[Family], config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Family:
    """Build a model without weights: parameters on the meta device, buffers from the
    configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        key: value
        for key, value in config.items()
        if key not in ("model_type", "dtype", "torch_dtype")
    }
    with quiet_transformers():
        wanted = AutoConfig.for_model(config["model_type"], **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                wanted, dtype=dtype, attn_implementation="sdpa"
            )
    body: Any = model.model
    rotary = type(getattr(body, family.rotary))
    # Its frequencies are in no file.
    setattr(body, family.rotary, rotary(config=model.config).to(device))
    return family(model)


def _put(
    model: Family, owner: str, stored: dict[str, torch.Tensor], kind: str, dtype: torch.dtype
) -> None:
    """Put the stored tensors into module `owner`; a tied head follows the embedding."""
    import torch

    from ondevice.nn.packed import KINDS, PackedLinear

    parent, _, leaf = owner.rpartition(".")
    try:
        holder: Any = model.model.get_submodule(parent)
        place: Any = getattr(holder, leaf)
    except AttributeError:
        raise ArtifactError("a tensor belongs to no part of the model", received=owner) from None
    bias = stored.pop(f"{owner}.bias", None)
    shape = tuple(place.weight.shape)
    # A packed matrix is several tensors (codes and scales), a dense one a single weight.
    if len(stored) > 1:
        tensors = {_matrix_name(owner, name): value for name, value in stored.items()}
        try:
            matrix = KINDS[kind].from_tensors(tensors, dtype)
        except (KeyError, StopIteration, ValueError) as error:
            raise ArtifactError(
                f"the packed weights of {owner} are not whole", received=str(error)
            ) from None
        linear: Any = PackedLinear(matrix, bias)
        setattr(holder, leaf, linear)
        received = matrix.shape
    else:
        (weight,) = stored.values()
        place.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
        if bias is not None:
            place.bias = torch.nn.Parameter(bias, requires_grad=False)
        received = tuple(weight.shape)
        if owner == "model.embed_tokens" and model.dims.tied:
            model.model.lm_head.weight = place.weight
    if received != shape:
        raise ArtifactError(
            f"{owner} has another shape", expected=list(shape), received=list(received)
        )


def _stored(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters, and the buffers that are in files (`RoutingTraits.bias`)."""
    files = model.state_dict().keys()
    buffers = [(name, value) for name, value in model.named_buffers() if name in files]
    return [*model.named_parameters(), *buffers]


def _put_whole(model: Family, name: str, stored: torch.Tensor) -> None:
    """Put a tensor that has no module of its own in its place."""
    from torch.nn import Buffer, Parameter

    owner, _, leaf = name.rpartition(".")
    try:
        holder = model.model.get_submodule(owner)
        place = getattr(holder, leaf)
        shape = tuple(place.shape)
    except AttributeError:
        raise ArtifactError("a tensor belongs to no part of the model", received=name) from None
    if tuple(stored.shape) != shape:
        raise ArtifactError(
            f"{name} has another shape", expected=list(shape), received=list(stored.shape)
        )
    is_parameter = isinstance(place, Parameter)
    setattr(
        holder, leaf, Parameter(stored, requires_grad=False) if is_parameter else Buffer(stored)
    )


def _kind(quantization: Any, folder: Path) -> str:
    if quantization is None:
        return "none"
    for kind, settings in QUANTIZATION.items():
        if all(quantization.get(key) == value for key, value in settings.items()):
            return kind
    raise ArtifactError(
        f"{folder}/config.json: weights are packed in a way that is not known",
        expected=" or ".join(QUANTIZATION),
        received=quantization,
    )


def _file_name(owner: str, key: str) -> str:
    """Return bitsandbytes' name of a matrix's tensor in a state dictionary."""
    if key in ("weight", "SCB"):
        return f"{owner}.{key}"
    return f"{owner}.weight.{key}"


def _matrix_name(owner: str, name: str) -> str:
    if name.endswith((".weight", ".SCB")):
        return name.removeprefix(f"{owner}.")
    return name.removeprefix(f"{owner}.weight.")


def _owner(name: str) -> str:
    """Return the name of the module that a tensor belongs to."""
    if ".weight." in name:
        return name.split(".weight.")[0]
    return name.rpartition(".")[0]
