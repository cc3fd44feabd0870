"""Text from a loaded model, through transformers' own generate; adapters that are applied take part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError, ModelError
from ondevice.data.tasks.chat_template import apply_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ondevice.models.load import LoadedModel

Messages = list[dict[str, str]]


def generate(
    loaded: LoadedModel,
    prompt: str | Messages,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    *,
    seed: int = 0,
) -> str:
    """Continue a text, or answer a chat; the new text only, without special tokens.

    Args:
        prompt: plain text, or `[{"role": "user", "content": "..."}, ...]` for the model's chat template.
        max_new_tokens: stop after so many tokens if the model does not stop by itself.
        temperature: 0 takes the most likely token each time; above, sampling with `seed`.

    Raises:
        ModelError: messages for a model without a chat template.
        ConfigError: an empty prompt, or a number out of range.
    """
    return continue_ids(loaded, prompt_ids(loaded, prompt), max_new_tokens, temperature, seed=seed)


def continue_ids(
    loaded: LoadedModel,
    ids: Sequence[int],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    *,
    seed: int = 0,
) -> str:
    """Continue a prompt of token ids; arguments as for `generate`."""
    import torch
    from transformers import GenerationConfig

    if max_new_tokens < 1 or temperature < 0:
        received = f"max_new_tokens {max_new_tokens}, temperature {temperature}"
        raise ConfigError(
            "generation", expected="max_new_tokens >= 1 and temperature >= 0", received=received
        )
    stops = loaded.model.generation_config.eos_token_id
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else None,
        eos_token_id=loaded.tokenizer.eos_token_id if stops is None else stops,
        pad_token_id=loaded.tokenizer.pad_token_id,
    )
    inputs = torch.tensor([list(ids)], device=loaded.family.head_weight.device)
    # A fork, so that sampling with a seed does not change the random numbers of whoever calls.
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = loaded.model
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        )
    return str(loaded.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


def prompt_ids(loaded: LoadedModel, prompt: str | Messages) -> Sequence[int]:
    """Tokenize a plain prompt, or a chat up to where the answer begins."""
    return tokenize(loaded.tokenizer, prompt, loaded.source.source)


def tokenize(tokenizer: Any, prompt: str | Messages, where: str) -> Sequence[int]:
    """Tokenize as `prompt_ids` does; `where` names the model in errors."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif not tokenizer.chat_template:
        hint = "give the prompt as plain text"
        raise ModelError(f"{where} has no chat template", received="messages", hint=hint)
    else:
        text = apply_template(tokenizer, prompt, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ConfigError("the prompt is empty", expected="at least one token")
    return ids
