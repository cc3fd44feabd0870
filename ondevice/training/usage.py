"""The README of an adapter's or a model's folder: three ways to use it, each with the exact prompt."""

from __future__ import annotations

import json
from typing import Literal

from ondevice.core.process import own_version
from ondevice.data.tasks.trained import TrainedTask

README_NAME = "README.md"
_CHAT = "chat template"
_MOST_TOKENS = 256
"""Tokens of an answer in the examples, if the training's own answers were longer."""

Kind = Literal["adapter", "model", "gguf", "mlx", "other"]


def readme(task: TrainedTask, kind: Kind = "adapter") -> str:
    """Return the README of a folder that holds what was trained.

    Args:
        kind: "adapter" in PEFT's layout, a "model" that transformers loads, a "gguf" file, an
            "mlx" adapter or model, or an "other" form, whose own reader is not shown.
    """
    parts = [_introduction(task, kind), _prompt(task)]
    # MLX's folders have other names of tensors, and the forms of other programs no folder at all.
    if kind in ("adapter", "model"):
        parts.append(_ours())
    if task.prompt and kind in ("adapter", "model"):
        parts.append(_transformers(task, kind))
    if task.prompt:
        parts.append(_llama_cpp(task, kind))
    return "\n".join(parts)


def _introduction(task: TrainedTask, kind: Kind) -> str:
    what = "An adapter of" if kind == "adapter" else "Trained from"
    base = task.base_model.source or "an unnamed model"
    if task.base_model.revision:
        base += f" (revision {task.base_model.revision})"
    text = f"# How to use it\n\n{what} `{base}`, written by ondevice {own_version()}. "
    text += f"Rows: {task.format.replace('_', ' ')}"
    if task.task:
        text += f", task {task.task}"
    figures = [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in (task.evaluation or {}).items()
        if isinstance(value, float)
    ]
    if figures:
        text += f". Evaluation: {', '.join(figures)}"
    return text + ". `ondevice_task.json` has the details; ondevice follows it.\n"


def _prompt(task: TrainedTask) -> str:
    if not task.prompt:
        return "## Prompt\n\nThe prompt depends on the row; `ondevice predict` writes it.\n"
    lines = [
        "## Prompt",
        "",
        "Replace the words in braces, and change nothing else, not even a space or a line break:",
        "",
        *("    " + line for line in task.prompt.split("\n")),
        "",
        f"As a JSON string: `{json.dumps(task.prompt, ensure_ascii=False)}`",
        "",
    ]
    if labels := _labels(task):
        lines.append(
            f"Answers: {', '.join(json.dumps(one, ensure_ascii=False) for one in labels)}."
        )
    elif task.ends:
        lines.append(f"An answer ends with {', '.join(f'`{end}`' for end in task.ends)}.")
    else:
        lines.append(f"Answers have at most {_most_tokens(task)} tokens; no token ends them.")
    return "\n".join(lines) + "\n"


def _labels(task: TrainedTask) -> list[str]:
    """Return the candidates' texts, if every row has the same."""
    rendered = task.found_task()
    if rendered is not None:
        return [choice.text for choice in rendered.choices]
    if task.format == "classification":
        return [f" {text}" for text in task.labels.values()]
    return []


def _most_tokens(task: TrainedTask) -> int:
    if _labels(task) or task.has_candidates:
        return max(1, task.longest_answer_tokens)
    return max(_MOST_TOKENS, task.longest_answer_tokens)


def _ours() -> str:
    column = "the columns of the prompt; labels are not needed"
    return (
        f"## With ondevice\n\nFrom the folder that holds this one's files. `rows.csv` has {column}:\n\n"
        "```sh\nondevice predict . rows.csv --out answers.csv\n```\n"
    )


def _transformers(task: TrainedTask, kind: Kind) -> str:
    loaded = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    loaded += ['folder = "."', "model = AutoModelForCausalLM.from_pretrained(folder).eval()"]
    tokenizer = "tokenizer = AutoTokenizer.from_pretrained(folder)"
    title = "transformers"
    if kind == "adapter":
        title = "transformers + peft"
        loaded = ["from peft import AutoPeftModelForCausalLM, PeftConfig"]
        loaded += ["from transformers import AutoTokenizer", "", 'folder = "."']
        loaded += ["model = AutoPeftModelForCausalLM.from_pretrained(folder).eval()"]
        base = "PeftConfig.from_pretrained(folder).base_model_name_or_path"
        tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({base})"
    special = task.framing != _CHAT
    lines = [
        "import torch",
        *loaded,
        tokenizer,
        f"prompt = {task.prompt!r}",
        f'ids = tokenizer(prompt, add_special_tokens={special}, return_tensors="pt").input_ids',
        "",
    ]
    if labels := _labels(task):
        lines += [
            f"labels = {labels!r}",
            "",
            "",
            "def loss(label):",
            '    whole = tokenizer(prompt + label, return_tensors="pt").input_ids',
            "    start = ids.shape[1]",
            "    with torch.no_grad():",
            "        logits = model(whole).logits[0, start - 1 : -1].float()",
            "    return torch.nn.functional.cross_entropy(logits, whole[0, start:]).item()",
            "",
            "",
            "print(min(labels, key=loss))",
        ]
    else:
        ends = f", eos_token_id=tokenizer.convert_tokens_to_ids({list(task.ends)!r})"
        lines += [
            "with torch.no_grad():",
            f"    answer = model.generate(ids, do_sample=False, max_new_tokens={_most_tokens(task)}"
            f"{ends * bool(task.ends)})",
            "print(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))",
        ]
    code = "\n".join(lines)
    return f"## With {title}\n\n```python\n{code}\n```\n"


def _llama_cpp(task: TrainedTask, kind: Kind) -> str:
    write = {
        "adapter": "ondevice convert . --to gguf --out model.gguf",
        "model": "python convert_hf_to_gguf.py . --outfile model.gguf  # of llama.cpp",
        "gguf": "",
    }.get(kind, "# model.gguf: ondevice convert ADAPTER --to gguf --out model.gguf")
    text = task.prompt
    request = {"prompt": text, "n_predict": _most_tokens(task), "temperature": 0}
    body = json.dumps(request, ensure_ascii=False).replace("'", "'\\''")
    lines = [write] * bool(write)
    lines += ["llama-server -m model.gguf --port 8080 &"]
    lines += [f"curl http://localhost:8080/completion -d '{body}'"]
    note = ""
    if task.framing == _CHAT:
        note = "Its chat endpoint, `/v1/chat/completions`, uses the file's chat template.\n"
    if _labels(task) and not task.ends:
        note += "\nText follows a short answer: the answer is the one above that the text begins with.\n"
    return "## With llama.cpp\n\n```sh\n" + "\n".join(lines) + f"\n```\n{note}"
