"""The known name that a misspelt one meant: by what other tools call it, by its words, then by its letters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

ELSEWHERE = {
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "iters": "steps",
    "iterations": "steps",
    "per_device_train_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "gradient_accumulation_steps": "micro_batch_size",
    "grad_accumulation_steps": "micro_batch_size",
    "accumulation_steps": "micro_batch_size",
    "gradient_clipping": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "early_stopping": "patience",
    "early_stopping_patience": "patience",
    "load_best_model_at_end": "restore_best",
    "lr_scheduler_type": "schedule",
    "lr_schedule": "schedule",
    "lr_scheduler": "schedule",
    "scheduler": "schedule",
    "num_warmup_steps": "warmup_steps",
    "warmup": "warmup_steps",
    "warmup_ratio": "warmup_steps",
    "bf16": "dtype",
    "fp16": "dtype",
    "torch_dtype": "dtype",
    "lr": "learning_rate",
    "batch": "batch_size",
    "load_in_4bit": "bits",
    "quantize": "dtype",
    "outtype": "dtype",
    "quantization": "quantize",
    "lora_r": "rank",
    "r": "rank",
    "lora_layers": "target_modules",
    "targets": "target_modules",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "seq_length": "max_length",
    "cutoff_len": "max_length",
    "output_dir": "out",
    "output": "out",
    "adapter_path": "out",
    "save_steps": "checkpoint_every",
    "save_every": "checkpoint_every",
    "eval_steps": "eval_every",
    "steps_per_eval": "eval_every",
    "val_data": "eval_data",
    "validation_data": "eval_data",
    "validation_file": "eval_data",
    "val_file": "eval_data",
    "eval_file": "eval_data",
    "val_split": "validation_split",
    "test_size": "validation_split",
    "dataset": "data",
    "train_file": "data",
    "model_name_or_path": "model",
    "base_model": "model",
    "resume_from_checkpoint": "resume",
    "log_to": "report_to",
    "logger": "report_to",
    "use_wandb": "report_to",
}
"""Names that other trainers have for our settings, in words joined by underscores."""


VALUES_ELSEWHERE = {
    "fp32": "float32",
    "full_precision": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "gpu": "cuda",
    "nvidia": "cuda",
    "pytorch": "torch",
    "metal": "mlx",
    "mps": "mlx",
    "qlora": "lora",
    "peft": "lora",
    "full_finetuning": "full",
    "sft": "full",
    "linear_decay": "linear",
    "constant_with_warmup": "constant",
    "adamw": "adam",
    "wandb_offline": "wandb",
    "4bit": "q4",
    "int4": "q4",
    "8bit": "int8",
}
"""Values that other trainers have for ours, in words joined by underscores."""
LONGEST_NAME = 200
"""Characters of a value that may be a misspelt name; comparing a longer one takes seconds."""


def nearest_value(value: object, known: Iterable[str]) -> str | None:
    """Return the value of `known` that a wrong one most likely meant; None if none is near."""
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        return None
    choices = {_plain(name): name for name in known}
    given = _plain(value)
    meant = VALUES_ELSEWHERE.get(given, given)
    if meant in choices:
        return choices[meant]
    near = difflib.get_close_matches(given, choices, n=1, cutoff=0.7)
    # llama.cpp has many types of so many bits: `q4_k_m` means our `q4_0`, or `q4`.
    bits = given.partition("_")[0]
    near += [plain for plain in choices if plain.partition("_")[0] == bits]
    return choices[near[0]] if near else None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the name of `known` that `word` most likely meant; None if none is near.

    Words are compared before letters: `--lora-rank` means `--rank`, whatever else is spelt alike.
    """
    names = {name: _plain(name) for name in known}
    given = _plain(word)
    meant = ELSEWHERE.get(given)
    for name, plain in names.items():
        if plain in (given, meant) or plain.startswith(f"{meant}_tokens"):
            return name
    words = set(given.split("_"))
    within = [name for name, plain in names.items() if plain and set(plain.split("_")) <= words]
    if within:
        return max(within, key=lambda name: (len(names[name]), name))
    near = difflib.get_close_matches(given, sorted(set(names.values())), n=1, cutoff=0.7)
    return next((name for name, plain in names.items() if near and plain == near[0]), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(".")[2].lower()).strip("_")
