"""The programs that read what was trained, each asked in the way that its users ask it."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib import request

import numpy as np

from ondevice.data.readers.files import read_records
from ondevice.data.rows import Row
from ondevice.data.tasks.trained import TrainedTask, read_trained_task
from ondevice.server.client import Client

LIKELIEST = 500
"""Tokens whose probabilities llama.cpp is first asked for, of all tens of thousands."""
Scorer = Callable[[str, Sequence[str]], list[float]]
"""A prompt and its candidate answers to the mean log likelihood of each answer's tokens."""


def ondevice(*words: object) -> dict[str, Any]:
    """Run the command with `--json`; return the object of its last line."""
    command = [sys.executable, "-m", "ondevice", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


class Trained:
    """A run in `folder`, and what it tells of itself.

    Attributes:
        name: of the folder below the benchmark's.
    """

    def __init__(self, folder: Path, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.folder = folder / name
        self.args = args
        self.run = self.folder / "run"
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def record(self) -> TrainedTask:
        """What was trained."""
        record = read_trained_task(self.run / "adapter")
        assert record is not None
        return record

    def prompt_rows(self, path: Path) -> list[Row]:
        """Return a file's rows with the prompts of the training."""
        return self.record.prompt_rows(read_records(path), "rows").items

    def by_daemon(self, rows: list[Any]) -> list[str]:
        """Return what POST /v1/predict gives for rows, with the uploaded adapter."""
        with daemon(self.folder / "store") as client:
            adapter = client.upload("adapter", self.run / "adapter")["id"]
            answer = client.predict(adapter, rows)
        return [str(row["prediction"]) for row in answer["data"]]


def predictions_of(path: Path) -> list[str]:
    """Return the predictions in a file of `ondevice predict`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["prediction"]) for line in lines]


@contextmanager
def daemon(store: Path) -> Iterator[Client]:
    """Serve over a store, and yield a client."""
    command = [sys.executable, "-m", "ondevice", "serve", "--store", str(store), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        yield Client(started["address"], timeout_s=3600)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def scored(ids: Sequence[int], start: int, log_probabilities: np.ndarray) -> float:
    """Return the mean of an answer's tokens, which begin at `start`, as do the rows."""
    answer = ids[start:]
    return float(np.mean([log_probabilities[at, number] for at, number in enumerate(answer)]))


def transformers_scorer(folder: Path) -> Scorer:
    """Score with a folder that `ondevice fuse` wrote, by transformers only."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def score(prompt: str, answers: Sequence[str]) -> list[float]:
        start = len(tokenizer(prompt)["input_ids"])
        result = []
        with torch.inference_mode():
            for answer in answers:
                ids = tokenizer(prompt + answer)["input_ids"]
                if not result:
                    read = model(torch.tensor([ids[: start - 1]]), use_cache=True).past_key_values
                rest = torch.tensor([ids[start - 1 :]])
                logits = model(rest, past_key_values=copy.deepcopy(read)).logits[0].double()
                result.append(scored(ids, start, torch.log_softmax(logits, -1).numpy()))
        return result

    return score


def transformers_replies(folder: Path, most_tokens: int) -> Callable[[str], str]:
    """Write on greedily with a folder, by transformers only."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def reply(prompt: str) -> str:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            written = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most_tokens,
                stop_strings=["\n"], tokenizer=tokenizer,
            )  # fmt: skip
        return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)

    return reply


class LlamaCpp:
    """A GGUF file in llama.cpp (`xllamacpp`) with its own settings, on the CPU; `adapter` is one of
    `gguf-lora`."""

    def __init__(self, path: Path, context_tokens: int = 512, adapter: Path | None = None) -> None:
        xllamacpp: Any = importlib.import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context_tokens
        params.n_parallel = 1
        params.warmup = False
        params.n_gpu_layers = 0
        if adapter is not None:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)
        self._letter = self.tokens("a")[-1]

    def tokens(self, text: str) -> list[int]:
        """Return a text's ids, as llama.cpp cuts it."""
        return self._post(
            "tokenize", {"content": text, "add_special": True, "parse_special": True}
        )["tokens"]

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """Return the choice of a completion at temperature 0."""
        body = {"prompt": prompt, "temperature": 0, "cache_prompt": True, **options}
        answer: Any = self.server.handle_completions(body)
        if not isinstance(answer, dict):
            answer = json.loads(answer)
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer["choices"][0]

    def chat(self, messages: list[dict[str, str]], **options: Any) -> str:
        """Return the reply to a conversation, framed by the file's own template."""
        body = {"messages": messages, "temperature": 0, **options}
        return self._post("v1/chat/completions", body)["choices"][0]["message"]["content"]

    def next_log_probabilities(self, ids: list[int], count: int) -> dict[int, float]:
        """Return the natural logarithms of the probabilities of the `count` likeliest tokens.

        The token that is drawn is made to be one letter, as an end comes without numbers; they are
        those before that bias.
        """
        bias = [[self._letter, 1000.0]]
        choice = self.complete(ids, n_predict=1, n_probs=count, logit_bias=bias)
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in top}

    def scorer(self, vocab: int) -> Scorer:
        """Score with the file; answers that begin with the same tokens share their questions."""

        def score(prompt: str, answers: Sequence[str]) -> list[float]:
            start = len(self.tokens(prompt))
            known: dict[tuple[int, ...], dict[int, float]] = {}
            result = []
            for answer in answers:
                ids = self.tokens(prompt + answer)
                values = []
                for place in range(start, len(ids)):
                    before = tuple(ids[:place])
                    for count in (LIKELIEST, vocab):
                        if ids[place] not in known.get(before, {}):
                            known[before] = self.next_log_probabilities(list(before), count)
                    values.append(known[before][ids[place]])
                result.append(float(np.mean(values)))
            return result

        return score

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        url = f"{self.server.listening_address}/{path}"
        with request.urlopen(request.Request(url, json.dumps(body).encode(), headers)) as reply:
            return json.load(reply)
