"""Ask llama.cpp itself, from the package `xllamacpp`, how it reads a file.

It runs in a process of its own, whose program this module is, too: a file that llama.cpp cannot
take may end that process, not this one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib import error, request

from ondevice.core.process import python_command

LONGEST_S = 600
_CONTEXT_TOKENS = 64


def is_installed() -> bool:
    """Return True if `xllamacpp` is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


def ask(path: Path, texts: list[str], conversations: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Return what llama.cpp makes of a file.

    Returns:
        `ids` of each text, `prompts` of each conversation (None if it refuses one), `error` if it
        does not take the file.
    """
    asked = {"model": str(path), "texts": texts, "conversations": conversations}
    try:
        done = subprocess.run(
            python_command("-m", "ondevice.exits.llama_cpp"),
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LONGEST_S} s"}
    answer = done.stdout.rpartition("\n{")[2].strip()
    if done.returncode or not answer:
        lines = (done.stderr.strip() or "it ended without a message").splitlines()
        return {"error": lines[-1][:300]}
    return json.loads("{" + answer)


def main() -> None:
    """Read the question from standard input, and write the answer as its last line."""
    xllamacpp: Any = importlib.import_module("xllamacpp")

    asked = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx, params.n_parallel, params.warmup = _CONTEXT_TOKENS, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)

    def post(path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        url = f"{server.listening_address}/{path}"
        posted = request.Request(url, json.dumps(body).encode(), headers)
        with request.urlopen(posted, timeout=60) as reply:
            return json.load(reply)

    def prompt(turns: list[dict[str, str]]) -> str | None:
        try:
            return post("apply-template", {"messages": turns})["prompt"]
        except error.HTTPError:
            return None

    def ids(text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        return post("tokenize", body)["tokens"]

    answer = {
        "ids": [ids(text) for text in asked["texts"]],
        "prompts": [prompt(turns) for turns in asked["conversations"]],
    }
    print("\n" + json.dumps(answer), flush=True)
    # A server that is told to stop before its loop begins, as on a busy machine, runs on, and its
    # destructor waits for it.
    os._exit(0)


if __name__ == "__main__":
    main()
