"""The trained network as a Hugging Face folder: weights by transformers' names, adapters next to
them, and the modelling file that runs them without this package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import write_tensors
from ondevice.models.save import FILE_NAME, as_numpy, save_tokenizer

if TYPE_CHECKING:
    from ondevice.methods.revffn.reversible import Reversible
    from ondevice.models import LoadedModel

MODELING = Path(__file__).with_name("modeling_revffn.py")


def save_reversible(folder: Path, loaded: LoadedModel, network: Reversible) -> None:
    """Write weights, adapters, configuration, modelling file and tokenizer into `folder`, which is
    made."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {**dict(loaded.model.named_parameters()), **network.adapters}
    write_tensors(
        folder / FILE_NAME,
        {name: as_numpy(value.detach().cpu().contiguous()) for name, value in named.items()},
        bfloat16=True,
    )
    (folder / "config.json").write_text(json.dumps(config_of(loaded, network), indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(_generation(loaded), indent=1) + "\n")
    shutil.copyfile(MODELING, folder / MODELING.name)
    save_tokenizer(loaded, folder)


def config_of(loaded: LoadedModel, network: Reversible) -> dict[str, Any]:
    """Return `config.json`: the ordinary model's under `base`, the steps, and the settings that it
    was trained with."""
    base = loaded.model.config.to_dict()
    streams = network.config.streams
    traits = loaded.dims.traits
    return {
        "model_type": "revffn",
        "architectures": ["RevffnForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.RevffnConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.RevffnForCausalLM",
        },
        "base": base,
        "steps": [
            {
                "block": step.block,
                "part": step.part,
                "past": step.mix.past,
                "scale": step.mix.branch,
                "crossed": step.crossed,
            }
            for step in network.steps
        ],
        "settings": network.config.model_dump(mode="json"),
        "fraction_bits": network.fraction_bits,
        "norms": dict(traits.norms),
        "mlp": traits.path("mlp"),
        "windows": list(traits.windows),
        "residual_scale": traits.residual_scale,
        "embedding_scale": traits.embedding_scale,
        "logit_scale": traits.logit_scale,
        "half_width": bool(network.adapters),
        "late": network.coupling.late,
        "stream_dtype": "bfloat16" if streams == "bfloat16" else "float32",
        "dtype": str(network.dtype).removeprefix("torch."),
        "vocab_size": loaded.dims.vocab,
        "hidden_size": loaded.dims.hidden,
        "num_hidden_layers": loaded.dims.layers,
        "num_attention_heads": loaded.dims.heads,
        "tie_word_embeddings": loaded.dims.tied,
        # The modelling file runs whole sequences: reversible steps have no place for keys and
        # values of before.
        "use_cache": False,
        **{name: base.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _generation(loaded: LoadedModel) -> dict[str, Any]:
    config = getattr(loaded.model, "generation_config", None)
    values = {}
    if config is not None:
        values = config.to_diff_dict()
    return {
        **{name: value for name, value in values.items() if name.endswith("_token_id")},
        "use_cache": False,
    }
