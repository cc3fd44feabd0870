"""The daemon as a model server, asked by OpenAI's own client; answers are those of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

openai = pytest.importorskip("openai", reason="a development package")

from ondevice.artifact.adapter import load_adapter  # noqa: E402
from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.generation.generator import generator_of  # noqa: E402
from ondevice.generation.prompt import prompt_ids  # noqa: E402
from ondevice.models import load_model  # noqa: E402
from ondevice.nn.adapters import apply_adapter  # noqa: E402

MODEL = "tiny:llama"
TURNS: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
]
PLAIN = [
    {**turn, "content": turn["content"] if isinstance(turn["content"], str) else "Why?"}
    for turn in TURNS
]


@pytest.fixture(scope="module")
def client(served) -> Any:
    return openai.OpenAI(
        base_url=f"{served.daemon.address}/v1", api_key="unused", max_retries=0, timeout=60
    )


def greedy(loaded, prompt: str | list[dict[str, str]], count: int) -> list[int]:
    """Token ids by a full pass for each token, without a cache."""
    ids = list(prompt_ids(loaded.tokenizer, prompt, ""))
    start = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(
                int(loaded.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            )
        if ids[-1] in (257, 259):
            return ids[start:-1]
    return ids[start:]


def text_of(ids: list[int]) -> str:
    return bytes(number for number in ids if number < 256).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model(MODEL)


def test_models_are_listed(client, served) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed[MODEL].object == "model" and listed[MODEL].owned_by == "ondevice"
    assert listed[served.job["id"]].model_extra["kind"] == "adapter"
    assert served.job["id"] not in [model["id"] for model in served.client.models()]


def test_several_turns_are_answered_as_the_model_does(client, loaded) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=TURNS, temperature=0, max_tokens=12
    )
    choice, ids = answer.choices[0], greedy(loaded, PLAIN, 12)
    assert choice.message.content == text_of(ids) and choice.message.role == "assistant"
    assert choice.finish_reason == ("length" if len(ids) == 12 else "stop")
    assert answer.usage.prompt_tokens == len(prompt_ids(loaded.tokenizer, PLAIN, ""))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_in_pieces(client) -> None:
    whole = client.completions.create(model=MODEL, prompt="The sky", temperature=0, max_tokens=24)
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="The sky", temperature=0, max_tokens=24, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    asked = {"model": MODEL, "messages": TURNS, "temperature": 0, "max_completion_tokens": 8}
    pieces = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices == []
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1])
    plain = client.chat.completions.create(**asked)
    assert said == plain.choices[0].message.content and pieces[-1].usage == plain.usage


def test_an_adapter_is_a_model_and_is_swapped_in_and_out(client, served, loaded) -> None:
    """In texts; a chat with this adapter has one of its labels (tests/server/test_predict.py)."""
    adapted = load_model(MODEL)
    folder = served.daemon.store / "adapters" / served.job["id"]
    apply_adapter(adapted, load_adapter(folder))
    prompt = prompt_ids(loaded.tokenizer, PLAIN, "")
    asked = {"prompt": list(prompt), "temperature": 0, "max_tokens": 6, "logprobs": 1}
    base = (MODEL, loaded)
    said = []
    for name, own in (base, (served.job["id"], adapted), base):
        answer = client.completions.create(model=name, **asked)
        expected = [
            token.log_probability
            for token in generator_of(own).tokens(list(prompt), max_new_tokens=6)
        ]
        found = answer.choices[0].logprobs.token_logprobs
        assert found == pytest.approx(expected[: len(found)], abs=1e-5) and answer.model == name
        said.append(found)
    assert said[0] == pytest.approx(said[2]) != pytest.approx(said[1], abs=1e-5)


def test_probabilities_are_those_of_the_logits(client, loaded) -> None:
    ids = list(b"The sky")
    with torch.no_grad():
        logs = torch.log_softmax(loaded.model(torch.tensor([ids])).logits[0, -1].float(), -1)
    best = torch.topk(logs, 3)
    chat = client.completions.create(
        model=MODEL, prompt=ids, temperature=0, max_tokens=4, logprobs=3
    ).choices[0]
    assert chat.logprobs.token_logprobs[0] == pytest.approx(float(best.values[0]), abs=1e-5)
    assert sorted(chat.logprobs.top_logprobs[0].values()) == pytest.approx(
        sorted(best.values.tolist()), abs=1e-5
    )
    asked = {"model": MODEL, "messages": TURNS, "temperature": 0, "max_tokens": 3}
    entries = (
        client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        .choices[0]
        .logprobs.content
    )
    assert all(
        len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob
        for entry in entries
    )


def test_a_seed_draws_the_same_again(client) -> None:
    def say(**options) -> str:
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 16, "temperature": 1.5}
        return client.completions.create(**asked, **options).choices[0].text

    assert say(seed=5) == say(seed=5) != say(seed=6)
    assert say(seed=5, top_p=1e-6) == say(seed=6, top_p=1e-6)  # only the likeliest token is left


def test_stop_words_end_an_answer_and_are_not_in_it(client, loaded) -> None:
    whole = text_of(greedy(loaded, "The sky", 24))
    word = next(whole[i : i + 2] for i in range(4, 20) if "\ufffd" not in whole[i : i + 2])
    asked = {"model": MODEL, "prompt": "The sky", "temperature": 0, "max_tokens": 24}
    for stop in (word, ["never there", word]):
        choice = client.completions.create(**asked, stop=stop).choices[0]
        assert choice.text == whole[: whole.index(word)] and choice.finish_reason == "stop"
    streamed = client.completions.create(**asked, stop=word, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[: whole.index(word)]


@pytest.mark.parametrize(("options", "status", "words"), [
    ({"model": "no-such-model"}, 404, "no such model"),
    ({"n": 129}, 422, "expected 128 or less"),
    ({"n": 65, "prompt": ["a", "b"]}, 422, "at most 128 texts"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 422, "at most four"),
    ({"temperature": 3}, 422, "temperature"),
    ({"max_tokens": 100_000}, 422, "longer than the model takes; expected: at most 512 tokens"),
    ({"logit_bias": {"5": 101}}, 422, "'logit_bias'; expected: numbers from -100 to 100"),
    ({"logit_bias": {"100000": 1}}, 422, "'logit_bias'; expected: token ids from 0 to"),
    ({"suffix": "b"}, 422, "'suffix' is not supported"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(client, options, status, words) -> None:
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 2, **options}
    for stream in (False, True):  # also before a stream begins
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**asked, stream=stream)
        assert caught.value.status_code == status and words in caught.value.body["message"]


def test_the_openapi_document_has_the_bodies(served) -> None:
    paths = served.client.ask("GET", "/v1/openapi.json")["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= paths.keys()


def test_a_reader_that_goes_leaves_the_model_loaded(client) -> None:
    """The answer ends at its next token, and the helper answers the next question at once."""
    asked = {"model": MODEL, "prompt": "a", "temperature": 0, "max_tokens": 500}
    with client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    assert (
        client.completions.create(
            model=MODEL, prompt="a", temperature=0, max_tokens=1
        ).usage.completion_tokens
        == 1
    )


def test_top_p_keeps_what_reaches_it() -> None:
    from ondevice.generation.sample import Sampling, _draw

    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    drawn = torch.Generator().manual_seed(0)
    assert {_draw(logits, Sampling(top_p=0.6), drawn) for _ in range(200)} == {0, 1}
    assert {_draw(logits, Sampling(top_p=0.5), drawn) for _ in range(50)} == {0}
    counts = (
        torch.bincount(
            torch.tensor([_draw(logits, Sampling(), drawn) for _ in range(2000)]), minlength=3
        )
        / 2000
    )
    torch.testing.assert_close(counts, torch.tensor([0.5, 0.3, 0.2]), atol=0.05, rtol=0)
    with pytest.raises(ConfigError):
        next(generator_of(load_model(MODEL)).tokens([], max_new_tokens=1))
