"""MMLU, GSM8K and MT-Bench on a model or an artifact, from local files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ondevice.api.opened import Opened, open_source
from ondevice.core.errors import ConfigError, ModelError
from ondevice.data.tasks.benchmarks import (
    BENCHMARKS,
    find_benchmark,
    find_file,
    read_questions,
    read_shots,
)
from ondevice.generation.prompt import Messages, prompt_ids
from ondevice.training.benchmark import (
    ANSWERS,
    Answer,
    BenchmarkResult,
    choose,
    converse,
    run_benchmark,
    solve,
)

MAX_LENGTH_TOKENS = 2048
"""Longest prompt and answer together, if the model does not take less."""
NEW_TOKENS = {"gsm8k": 400, "mt_bench": 1024}


def benchmark(
    source: str | Path,
    task: str,
    data: Path,
    *,
    adapter: Path | None = None,
    rows: int | None = None,
    shots: int = 0,
    max_length_tokens: int | None = None,
    max_new_tokens: int | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    on_row: Callable[[int, int], None] = lambda done, rows: None,
) -> BenchmarkResult:
    """Ask a model the questions of a benchmark, greedily, and save its answers.

    Args:
        source: a model as in `load_model`, a folder of a network that RevFFN trained, or an artifact (`mmlu` only).
        task: `mmlu` (the likeliest letter), `gsm8k` (the final number of a generated answer) or `mt_bench` (answers
            for another model to judge; they get no score here).
        data: a file, or a folder with `test` or `valid`, and for `shots` with `fewshot`, `dev` or `train`.
        adapter: to apply before.
        rows: only the first so many.
        shots: worked examples before each question, of its subject if the files name subjects.
        max_length_tokens: of prompt and answer together; 2048, or what the model takes if that is less.
        max_new_tokens: of an answer; 400 for `gsm8k`, 1024 for `mt_bench`.
        out: folder for `answers.jsonl` and `figures.json`; `runs/eval-TASK`.
        overwrite: replace the answers that are there.
        revision, dtype, device: of the model.
        on_row: called with (done, all) before the first row and after each.

    Raises:
        ConfigError: no such task, examples for `mt_bench`, answers are there already, or an artifact that would have
            to generate.
        DataError: a file is missing, or a row is bad.
        ModelError: `mt_bench` with a model without a chat template.
    """
    name = find_benchmark(task)
    if name is None:
        raise ConfigError(
            f"unknown benchmark '{task}'", expected=", ".join(BENCHMARKS), received=task
        )
    # Everything that can be refused is, before a model is loaded, which can take minutes.
    data = Path(data)
    answers = Path(out or Path("runs") / f"eval-{name}") / ANSWERS
    if answers.exists() and not overwrite:
        raise ConfigError(f"{answers} is there already", hint="another --out, or --overwrite")
    questions = read_questions(find_file(data), name)[:rows]
    examples = read_shots(data, name, shots)
    opened = open_source(source, adapter, dtype, device, revision)
    limit = _limit(opened, max_length_tokens)
    if name == "mmlu":
        records = choose(opened.session, opened.tokenizer, questions, examples, limit)
    else:
        answer = _answer(opened, limit, max_new_tokens or NEW_TOKENS[name])
        chat = bool(opened.tokenizer.chat_template)
        if name == "mt_bench" and not chat:
            hint = "mt_bench needs a model that was trained to chat; mmlu and gsm8k take any"
            raise ModelError(f"{source} has no chat template", hint=hint)
        records = solve(answer, questions, examples, chat) if name == "gsm8k" else converse(
            answer, questions, Path(source).name)  # fmt: skip
    on_row(0, len(questions))
    return run_benchmark(
        records, BenchmarkResult(name, shots, answers), lambda done: on_row(done, len(questions))
    )


def _limit(opened: Opened, requested: int | None) -> int:
    """Tokens of prompt and answer together: the requested number, within the limit of the program or the model."""
    buckets = opened.session.lengths_tokens
    if opened.loaded is None and buckets:
        return min(requested or max(buckets), max(buckets))
    config = None
    if opened.loaded:
        config = opened.loaded.model.config
    return min(
        requested or MAX_LENGTH_TOKENS,
        getattr(config, "max_position_embeddings", None) or MAX_LENGTH_TOKENS,
    )


def _answer(opened: Opened, limit: int, max_new_tokens: int) -> Answer:
    loaded = opened.loaded
    write = opened.write
    if loaded is None or write is None:
        hint = "evaluate the model that it was exported from, with --adapter; or --task mmlu"
        raise ConfigError("an exported program scores answers and generates none", hint=hint)

    def answer(prompt: str | Messages) -> str | None:
        ids = prompt_ids(loaded.tokenizer, prompt, loaded.source.source)
        if len(ids) < limit:
            return write(ids, max_new_tokens=min(max_new_tokens, limit - len(ids)))
        return None

    return answer
