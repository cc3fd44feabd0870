"""A folder that `export` wrote, opened again for evaluation in the numbers that it was trained in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.errors import ModelError
from ondevice.models.load import load_tokenizer, quiet_transformers, wrap
from ondevice.models.registry import family_for
from ondevice.models.save import FILE_NAME
from ondevice.models.source import SourceInfo

if TYPE_CHECKING:
    from ondevice.methods.revffn.torch import RevffnSession

MODEL_TYPE = "revffn"


def is_reversible(source: str | Path) -> bool:
    """Whether `source` is a folder of a network that RevFFN trained."""
    try:
        return json.loads((Path(source) / "config.json").read_text()).get("model_type") == MODEL_TYPE
    except (OSError, ValueError, AttributeError):
        return False


def open_reversible(folder: Path, device: str = "cpu") -> RevffnSession:
    """The network with its weights, tokenizer and adapters; `loaded` holds the ordinary model around them.

    Raises:
        ModelError: the folder is not whole.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from ondevice.methods.revffn.config import RevffnConfig
    from ondevice.methods.revffn.torch import RevffnSession

    config = {"late": 0.0, "fraction_bits": None} | json.loads((folder / "config.json").read_text())
    base: dict[str, Any] = dict(config["base"])
    family = family_for(base.get("model_type"), str(folder / "config.json"))
    try:
        tensors = load_file(folder / FILE_NAME)
    except Exception as error:  # safetensors raises its own kinds
        raise ModelError(f"{folder}: the weights cannot be read", received=str(error), hint="copy it again") from error
    with quiet_transformers():
        plain = AutoConfig.for_model(base.pop("model_type"), **base)
        dtype = getattr(torch, config["dtype"])
        model = AutoModelForCausalLM.from_config(plain, attn_implementation="sdpa", dtype=dtype)
    named = dict(model.named_parameters())
    model.to(torch.device(device))
    loaded = wrap(model, load_tokenizer(str(folder), config=plain), family, SourceInfo(str(folder), folder))
    settings = config["settings"]
    scaled = settings if config["fraction_bits"] is None else settings | {"fraction_bits": config["fraction_bits"]}
    session = RevffnSession(loaded, RevffnConfig.parse(scaled, "config.json"), 0)
    session.network.config = RevffnConfig.parse(settings, "config.json")  # a scale not set by hand may become coarser
    if config["late"] != session.network.coupling.late:
        raise ModelError(
            f"{folder}: written by another version, whose network reads its end differently",
            expected=f"late: {session.network.coupling.late:g}",
            received=config["late"],
            hint="load it with transformers and trust_remote_code=True, by the file beside it",
        )
    wanted = named | session.adapters
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ModelError(f"{folder}: the weights lack a tensor", received=missing[0], hint="copy the model again")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])
    return session


def continue_reversible(session: RevffnSession, ids: Sequence[int], max_new_tokens: int) -> str:
    """Greedy text behind token ids, in the numbers of the training; it computes the whole sequence for each token."""
    import torch

    loaded = session.loaded
    stops = loaded.model.generation_config.eos_token_id
    stops = loaded.tokenizer.eos_token_id if stops is None else stops
    written: list[int] = []
    while len(written) < max_new_tokens:
        written.append(session.passes.next_token(torch.tensor([[*ids, *written]], device=session.device)))
        if written[-1] in (stops if isinstance(stops, list) else [stops]):
            break
    return str(loaded.tokenizer.decode(written, skip_special_tokens=True))
