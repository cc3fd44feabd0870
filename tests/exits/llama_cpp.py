"""llama.cpp, as the package `xllamacpp` has it: the program that reads GGUF files, asked for its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
from ondevice.exits import convert, gguf_lora
from ondevice.exits.base import Checked, Request
from tests.exits.conftest import IDS, Case, zero_adapter

MESSAGES = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Why?"}]  # fmt: skip


class LlamaCpp:
    """A model in llama.cpp, with float32 keys and values and without flash attention: what rounds is the file."""

    def __init__(self, model: Path, adapter: Path | None = None, context: int = 256) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.warmup = context, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_ram_mib = 0
        if adapter is not None:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
        self.server = xllamacpp.Server(params)
        # A server that is told to stop before its loop begins, as on a busy machine, runs on, and
        # its destructor waits for it: so the loop has answered once.
        self.complete([0], n_predict=1)

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """Return the choice of a completion: `text`, `finish_reason`, `logprobs`."""
        request = {"prompt": prompt, "temperature": 0, "cache_prompt": False, **options}
        answer = self.server.handle_completions(request)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        assert "error" not in answer, answer
        return answer["choices"][0]

    def log_probabilities(self, ids: list[int], vocab: int) -> np.ndarray:
        """Return the natural logarithms of the next token's probabilities, float64 [vocab].

        The token that is drawn is made to be a letter, because half a character or an end comes without numbers; the
        numbers are those before that bias.
        """
        answer = self.complete(ids, n_predict=1, n_probs=vocab, logit_bias=[[97, 1000.0]])
        result = np.full(vocab, np.nan)
        for entry in answer["logprobs"]["content"][0]["top_logprobs"]:
            result[entry["id"]] = entry["logprob"]
        assert not np.isnan(result).any()
        return result

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Return the `count` most likely tokens, one after the other, with its own cache of keys and values."""
        body = {
            "prompt": ids,
            "temperature": 0,
            "n_predict": count,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        return self.http("completion", {**body, "return_tokens": True})["tokens"]

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text, as llama.cpp cuts it."""
        return self.http("tokenize", {"content": text, "add_special": True, "parse_special": True})[
            "tokens"
        ]

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Return the prompt that llama.cpp makes of a conversation by the file's template."""
        return self.http("apply-template", {"messages": messages})["prompt"]

    def http(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the server for what the package has no call for."""
        from urllib import request

        headers = {"Content-Type": "application/json"}
        asked = request.Request(
            f"{self.server.listening_address}/{path}", json.dumps(body).encode(), headers
        )
        with request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)


def base_gguf(case: Case) -> Path:
    """Write the base model as GGUF by the same code, with an adapter too small to matter: made once a family."""
    path = case.model.parent / "base.gguf"
    if not path.exists():
        adapter = load_adapter(case.adapter)
        small = {
            name: value * (1e-4 if ".lora_B." in name else 1)
            for name, value in adapter.tensors.items()
        }
        folder = case.model.parent / "small"
        save_adapter(Adapter(small, 3, 7.0, adapter.target_modules, adapter.base_model), folder)
        convert(folder, "gguf", path, model=str(case.model), dtype="float32")
    return path


def check_zeros_change_nothing(case: Case, folder: Path) -> None:
    """Write an adapter of zeros as GGUF, past the check that refuses it: llama.cpp computes what it does without."""
    zeros = load_adapter(zero_adapter(folder / "zero", case.adapter))
    request = Request(zeros, folder / "zero", str(case.model), None, "", folder / "zero.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf_lora, "check_adapter", lambda request, written: Checked(None, None, None)
        )
        gguf_lora.write(request, folder / "zero.gguf")
    plain = LlamaCpp(base_gguf(case)).log_probabilities(IDS, case.base.size)
    with_zeros = LlamaCpp(base_gguf(case), folder / "zero.gguf").log_probabilities(
        IDS, case.base.size
    )
    np.testing.assert_allclose(with_zeros, plain, rtol=0, atol=1e-6)
