"""Tiny folders in the shapes of twenty instruct checkpoints that people tune in 2026.

A checkpoint is named for the model on the hub whose class and traits it has; its sizes are a few
thousand parameters, and its weights are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ondevice.models.families.configuration import quiet_transformers, tower_types
from ondevice.models.tiny import tiny_tokenizer
from tests.models.decoders import SIZES

VOCAB = 272
"""The byte tokenizer's 260, and rows for the tokens of images and sound."""
IMAGE_TOKEN = 260
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2, "embed_dim": 32,
    "head_dim": 16, "global_head_dim": 16, "out_hidden_size": 16, "image_size": 32,
    "patch_size": 8, "num_patches": 16, "spatial_merge_size": 2, "temporal_patch_size": 1,
    "num_position_embeddings": 16, "window_size": 16, "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0], "position_embedding_size": 64, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "mlp_ratio": 2,
    "pooling_kernel_size": 1, "default_output_length": 16,
}  # fmt: skip
"""Sizes of every tower of vision; a configuration takes those that it has."""
ROPE_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    },
}  # fmt: skip
GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"]}
LFM2 = {"layer_types": ["conv", "full_attention"]}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-4-E2B-it": ("gemma4", {
        "text_config": {**GEMMA4, "num_hidden_layers": 4, "layer_types": GEMMA4["layer_types"] * 2,
                        "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    }),
    "gemma-4-26B-A4B-it": ("gemma4", {
        "text_config": {**GEMMA4, "enable_moe_block": True, "attention_k_eq_v": True,
                        "hidden_size_per_layer_input": 0, "num_experts": 4, "top_k_experts": 2},
    }),
    "Qwen3.5-0.8B": ("qwen3_5", {
        "text_config": {**HYBRID, "tie_word_embeddings": True}, "tie_word_embeddings": True,
    }),
    "Qwen3.5-9B": ("qwen3_5", {"text_config": HYBRID}),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", {"text_config": HYBRID}),
    "LFM2.5-1.2B-Instruct": ("lfm2", LFM2),
    "LFM2.5-VL-1.6B": ("lfm2_vl", {"text_config": LFM2, "projector_hidden_size": 32}),
    "gemma-3-4b-it": ("gemma3", {"mm_tokens_per_image": 4}),
    "functiongemma-270m-it": ("gemma3_text", {}),
    "Qwen3-4B-Instruct-2507": ("qwen3", {}),
    "Qwen3-30B-A3B-Instruct-2507": ("qwen3_moe", {}),
    "Qwen3-VL-4B-Instruct": ("qwen3_vl", {"text_config": {"rope_parameters": ROPE_SECTIONS}}),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", {"text_config": {"rope_parameters": ROPE_SECTIONS}}),
    "Qwen2-VL-2B-Instruct": ("qwen2_vl", {
        "text_config": {"rope_parameters": ROPE_SECTIONS}, "vision_config": {"hidden_size": 16},
    }),
    "Mistral-Small-3.2-24B-Instruct": ("mistral3", {
        "text_config": {"sliding_window": None}, "tie_word_embeddings": False,
    }),
    "SmolVLM2-2.2B-Instruct": ("smolvlm", {}),
    "SmolLM3-3B": ("smollm3", {}),
    "Llama-4-Scout-17B-16E-Instruct": ("llama4", {
        "vision_config": {"intermediate_size": 128, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4}},
        "text_config": {"no_rope_layers": [1, 0], "moe_layers": [0, 1], "attention_chunk_size": 8,
                        "layer_types": ["chunked_attention", "full_attention"],
                        "intermediate_size_mlp": 32},
    }),
    "gpt-oss-20b": ("gpt_oss", {}),
    "granite-4.0-h-micro": ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
}  # fmt: skip
"""Type and fields of its own, by the name of the checkpoint."""

TOWERS = tuple(name for name in CHECKPOINTS if CHECKPOINTS[name][0] in tower_types())
"""Those that also read images."""


def checkpoint_config(name: str) -> Any:
    """Return transformers' tiny configuration in the shape of that checkpoint."""
    model_type, fields = CHECKPOINTS[name]
    return CONFIG_MAPPING[model_type](**_sized(CONFIG_MAPPING[model_type], fields, SIZES))


def _sized(kind: Any, fields: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `kind` at tiny sizes, its parts' too."""
    known = kind().to_dict()
    values: dict[str, Any] = {key: value for key, value in sizes.items() if key in known}
    if "vocab_size" in values:
        values |= {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    values = {key: value for key, value in values.items() if key in known} | fields
    for key, part in kind.sub_configs.items():
        own = fields.get(key, {})
        if key == "text_config":
            values[key] = _sized(_kind(known, key, part), own, SIZES)
        elif key == "vision_config":
            values[key] = _sized(_kind(known, key, part), own, VISION)
    for key in ("image_token_id", "image_token_index"):
        if key in known:
            values[key] = IMAGE_TOKEN
    tokens = [key for key in known if "_token_" in key and key.split("_")[0] in _MARKS]
    return values | {key: IMAGE_TOKEN + 1 + i for i, key in enumerate(tokens)}


_MARKS = ("video", "audio", "vision", "boi", "eoi", "boa", "eoa")


def _kind(known: dict[str, Any], key: str, part: Any) -> Any:
    """Return the class of a part: the one that the default has, if any type will do."""
    model_type = (known.get(key) or {}).get("model_type")
    if model_type == "gemma4_vision" or (model_type is None and "gemma4" in known["model_type"]):
        return CONFIG_MAPPING["gemma4_vision"]
    return part if hasattr(part, "model_type") and part.model_type else CONFIG_MAPPING[model_type]


def save_checkpoint(folder: Path, name: str) -> Path:
    """Write a random model in that shape as `save_pretrained` does, with a tokenizer."""
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(0)
        config = checkpoint_config(name)
        kind: Any = AutoModelForCausalLM
        if name in TOWERS:
            kind = AutoModelForMultimodalLM
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases that are not zero, norms that are not one
                parameter.add_(0.05 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def save_unknown(folder: Path) -> Path:
    """Write a Gemma 4 whose language model has a trait that its family lacks."""
    save_checkpoint(folder, "gemma-4-E2B-it")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = "all"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QWEN_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}"
    "<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SMOL_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")
MISTRAL_TEMPLATE = (
    "{%- for message in messages -%}{%- if message.role == 'user' -%}[INST]"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}[IMG]"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}[/INST]"
    "{%- elif message.content is string -%}{{ message.content }}{{ eos_token }}"
    "{%- else -%}{{ message.content[0].text }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
)
MISTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
LFM_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
LFM_TOKENS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
PROCESSORS: dict[str, tuple[tuple[str, ...], str, dict[str, Any], str, dict[str, Any]]] = {
    # SmolVLM's own processor wants a package for videos; Idefics 3's writes the same text.
    "SmolVLM2-2.2B-Instruct": (
        SMOL_TOKENS, SMOL_TEMPLATE,
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}},
    ),
    "Qwen3.5-0.8B": (
        QWEN_TOKENS, QWEN_TEMPLATE, {"processor_class": "Qwen3VLProcessor"},
        "Qwen2VLImageProcessorPil",
        {"patch_size": 8, "temporal_patch_size": 1, "merge_size": 2,
         "size": {"shortest_edge": 256, "longest_edge": 1024}},
    ),
    "Mistral-Small-3.2-24B-Instruct": (
        MISTRAL_TOKENS, MISTRAL_TEMPLATE,
        {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2},
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}},
    ),
    "LFM2.5-VL-1.6B": (
        LFM_TOKENS, LFM_TEMPLATE, {"processor_class": "Lfm2VlProcessor"},
        "Lfm2VlImageProcessor",
        {"downsample_factor": 2, "encoder_patch_size": 8, "tile_size": 32, "min_tiles": 2,
         "max_tiles": 2, "min_image_tokens": 1, "max_image_tokens": 4, "max_num_patches": 16},
    ),
}  # fmt: skip
"""Tokens, template, and how images are read, by the checkpoint."""


def add_processor(folder: Path, name: str) -> Path:
    """Write the processor of images of one of `PROCESSORS`, and a tokenizer with its tokens."""
    tokens, template, values, kind, sizes = PROCESSORS[name]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*tokens]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    getattr(transformers, kind)(**sizes).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(values))
    return folder
