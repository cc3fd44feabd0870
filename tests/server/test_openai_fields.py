"""Fields of OpenAI's requests: each is obeyed or refused by name, and every refusal has OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from tokenizers import Tokenizer

openai = pytest.importorskip("openai", reason="a development package")

from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.models import load_model, save_tiny  # noqa: E402
from ondevice.server.engine.complete import LEAST  # noqa: E402
from ondevice.server.openai_answers import Built, tokens_of  # noqa: E402
from ondevice.server.openai_requests import _REFUSED, ChatRequest, TextRequest  # noqa: E402
from tests.server.asked import Asked  # noqa: E402
from tests.server.running import DaemonProcess, wait_for  # noqa: E402
from tests.trained_tokenizers import sentencepiece  # noqa: E402

MODEL = "tiny:llama"


@pytest.fixture(scope="module")
def client(served) -> Any:
    return openai.OpenAI(
        base_url=f"{served.daemon.address}/v1", api_key="unused", max_retries=0, timeout=60
    )


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model(MODEL)


def say(client: Any, **options: Any) -> Any:
    """Complete a text greedily."""
    extra = {key: options.pop(key) for key in [*options] if key in EXTRA}
    asked = {"model": MODEL, "prompt": "The sky", "temperature": 0, "max_tokens": 8, **options}
    return client.completions.create(**asked, extra_body=extra)


EXTRA = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "nobody_knows")


def scores(loaded: Any, ids: list[int]) -> torch.Tensor:
    """The logarithms of all probabilities after each token."""
    with torch.no_grad():
        return torch.log_softmax(loaded.model(torch.tensor([ids])).logits[0].float(), -1)


def test_a_prompt_is_scored_without_any_new_token(client, loaded) -> None:
    ids = list(b"The sky")
    for prompt in ("The sky", ids):
        answer = say(client, prompt=prompt, echo=True, max_tokens=0, logprobs=2)
        choice, found = answer.choices[0], answer.choices[0].logprobs
        assert choice.text == "The sky" and choice.finish_reason == "length"
        assert found.tokens == list("The sky") and found.text_offset == list(range(7))
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        logs = scores(loaded, ids)
        expected = [float(logs[place, ids[place + 1]]) for place in range(6)]
        assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
        best = [sorted(row.topk(2).values.tolist()) for row in logs[:6]]
        for own, top, two in zip(expected, found.top_logprobs[1:], best, strict=True):
            assert sorted(top.values())[-2:] == pytest.approx(two, abs=1e-5)
            assert min(top.values()) == pytest.approx(min(own, two[0]), abs=1e-5)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 0)


def test_several_prompts_are_answered_in_their_order(client) -> None:
    prompts = ["The sky", "A", "Once upon"]
    alone = [say(client, prompt=prompt).choices[0].text for prompt in prompts]
    for together in (prompts, [list(prompt.encode()) for prompt in prompts]):
        answer = say(client, prompt=together)
        assert [choice.text for choice in answer.choices] == alone
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        echoed = say(client, prompt=together, echo=True)
        assert [choice.text for choice in echoed.choices] == [
            prompt + text for prompt, text in zip(prompts, alone, strict=True)
        ]


def test_several_texts_of_a_prompt_have_seeds_of_their_own(client) -> None:
    options = {"temperature": 1.5, "seed": 7}
    answer = say(client, n=3, **options)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3 and answer.usage.prompt_tokens == 7
    assert texts == [say(client, temperature=1.5, seed=7 + n).choices[0].text for n in range(3)]
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], n=2, max_tokens=3, **options
    )
    assert [choice.index for choice in chat.choices] == [0, 1]


def test_a_stream_has_the_pieces_of_every_choice(client) -> None:
    asked = {
        "prompt": ["The sky", "A"],
        "n": 2,
        "seed": 1,
        "temperature": 1.0,
        "echo": True,
        "logprobs": 1,
    }
    whole = say(client, **asked)
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    offsets: dict[int, list[int]] = {}
    chunks = [*say(client, **asked, stream=True, stream_options={"include_usage": True})]
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.text and ends[choice.index] == choice.finish_reason
        assert offsets[choice.index] == choice.logprobs.text_offset


def test_fields_that_change_how_tokens_are_drawn_are_obeyed(client, loaded) -> None:
    greedy = say(client).choices[0].text
    for seed in (1, 2):
        hot = {"temperature": 2, "seed": seed}
        assert say(client, **hot).choices[0].text != greedy
        assert say(client, **hot, top_k=1).choices[0].text == greedy
        assert say(client, **hot, min_p=1.0).choices[0].text == greedy
    assert say(client, logit_bias={"65": 100}).choices[0].text == "A" * 8
    close = {"logit_bias": {"65": 20.0, "66": 19.0}, "max_tokens": 16}
    plain = say(client, **close).choices[0].text
    for options in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2}):
        assert say(client, **close, **options).choices[0].text != plain
    logs = scores(loaded, list(b"The sky"))[-1]
    token = int(logs.argsort(descending=True)[1])
    first = say(client, logit_bias={str(token): 50}, max_tokens=1, logprobs=0).choices[0].logprobs
    assert first.token_logprobs[0] == pytest.approx(float(logs[token]), abs=1e-5)


def test_tokens_end_a_text_or_do_not(client) -> None:
    text = say(client, logit_bias={"65": 100}, stop_token_ids=[65]).choices[0]
    assert (text.text, text.finish_reason) == ("", "stop")
    end = {str(number): 100 for number in (257, 259)}
    ended = say(client, logit_bias=end)
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens == 1
    going = say(client, logit_bias=end, ignore_eos=True)
    assert going.choices[0].finish_reason == "length" and going.usage.completion_tokens == 8
    assert (
        say(
            client, logit_bias=end, ignore_eos=True, stop_token_ids=[257, 259]
        ).usage.completion_tokens
        == 1
    )


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_fields_that_are_not_obeyed_are_refused_by_name(client, name: str) -> None:
    if name == "echo":  # a field of the other kind of request
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "a"}]}
    else:
        path, body = "completions", {"prompt": "a"}
    body |= {"model": MODEL, "max_tokens": 1}
    refused = post(client, path, body | {name: ["asked for"]})
    assert refused.status_code == 422
    assert refused.json()["error"]["param"] == name
    for value in (None, *_REFUSED[name]):
        assert post(client, path, body | {name: value}).status_code == 200


def post(client: Any, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{client.base_url}{path}", json=body, timeout=60)


def test_an_unknown_field_is_refused_and_harmless_ones_are_not(client) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        say(client, nobody_knows=3)
    assert caught.value.param == "nobody_knows"
    assert "--allow-unknown-fields" in caught.value.body["message"]
    assert say(client, user="somebody").choices[0].text


def test_the_switch_allows_unknown_fields_and_no_unsupported_ones(tmp_path, warm) -> None:
    flags = ("--allow-unknown-fields",)
    with DaemonProcess(tmp_path / "store", *flags, python=warm.python) as daemon:
        base = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        url = f"{daemon.address}/v1/completions"
        assert httpx.post(url, json=base | {"nobody_knows": 1}, timeout=60).status_code == 200
        assert httpx.post(url, json=base | {"guided_json": {}}, timeout=60).status_code == 422


REFUSALS = [
    ("GET", "/v1/nothing-here", None, 404, None),
    ("POST", "/v1/chat/completion", {}, 404, None),
    ("GET", "/v1/chat/completions", None, 405, None),
    ("POST", "/v1/completions", {"prompt": "a"}, 422, "model"),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "top_k": -2}, 422, "top_k"),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": []}, 422, "prompt"),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": [999999]}, 422, "prompt"),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "stop_token_ids": [-1]}, 422, "stop_token_ids"),
    ("POST", "/v1/completions", {"model": "nobody", "prompt": "a"}, 404, None),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "a" * (2 << 20)}, 413, None),
    ("GET", "/v1/models/nobody", None, 404, None),
    ("DELETE", "/v1/models/nobody", None, 404, None),
    ("POST", "/v1/embeddings", {}, 404, None),
    ("GET", "/v1/files/nobody", None, 404, None),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "path", "body", "status", "param"), REFUSALS)
def test_every_refusal_has_the_form_of_openai(served, verb, path, body, status, param) -> None:
    answer = httpx.request(verb, f"{served.daemon.address}{path}", json=body, timeout=60)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys() and error["message"]
    assert error["type"] == "invalid_request_error" and error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_one_wrong_prompt_refuses_the_request_and_leaves_nothing_running(
    served, client, stream
) -> None:
    """The other prompts would take minutes."""
    asked = {"prompt": [[65], [999_999], *[[65]] * 120], "max_tokens": 500, "ignore_eos": True}
    with pytest.raises(openai.APIError) as caught:
        for _ in say(client, **asked, stream=stream):
            pass
    assert "prompt" in str(caught.value)
    wait_for(lambda: not any(figures(served)), "the model is free", 20.0)


def figures(served: Any) -> tuple[int, int]:
    """Requests to the model that wait and run."""
    found = served.client.ask("GET", "/v1/metrics")["answers"]
    return found["waiting"], found["running"]


def test_a_full_queue_is_refused_in_the_form_of_openai(served) -> None:
    """More texts than one client may have waiting."""
    body = {
        "model": MODEL,
        "prompt": ["a"] * 128,
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{served.daemon.address}/v1/completions"
    opened = []
    try:
        with httpx.Client(timeout=60) as client:
            for _ in range(8):
                opened.append(
                    client.send(client.build_request("POST", url, json=body), stream=True)
                )
                if opened[-1].status_code != 200:
                    break
            last = opened[-1]
            last.read()
            assert last.status_code == 409 and int(last.headers["Retry-After"]) >= 1
            error = last.json()["error"]
            assert error["type"] == "invalid_request_error" and "param" in error
    finally:
        for response in opened:
            response.close()


def test_a_model_is_found_by_its_id(client, served) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.models.retrieve(served.job["id"]).model_extra["kind"] == "adapter"


def metaspace_model(folder: Path) -> Path:
    """Save a tiny model with a tokenizer of Llama's kind."""
    texts = ["the capital of france is paris and rome in italy é"] * 9
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = sentencepiece(texts, 400, ["<unk>", "<s>", "</s>", *names], "<unk>")
    values = json.loads(backend.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    Tokenizer.from_str(json.dumps(values)).save(str(folder / "own.json"))
    save_tiny(folder / "model", "llama", 5, vocab=400)
    (folder / "own.json").replace(folder / "model" / "tokenizer.json")
    kept = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder / "model"


def test_spaces_of_sentencepiece_stay_in_text_tokens_and_offsets(tmp_path) -> None:
    folder = str(metaspace_model(tmp_path))
    own = load_model(folder)
    words = [
        name for name in own.tokenizer.get_vocab() if name.startswith("\u2581") and len(name) > 3
    ]
    first, second = sorted(words)[:2]
    ids = own.tokenizer.convert_tokens_to_ids([first, second])
    bias = {str(ids[0]): 100.0, str(ids[1]): 60.0}
    said = [word.replace("\u2581", " ") for word in (first, second)]
    prompt = "the capital of france is"
    parts = Asked().parts(
        model=folder,
        prompt=prompt,
        max_new_tokens=2,
        top=2,
        echo=True,
        logit_bias=bias,
        repetition_penalty=3.0,
    )
    body = TextRequest(model="a", prompt=prompt, logprobs=2, echo=True)
    assert len(body.asked()) == 1
    end = {"finish": "length", "completion_tokens": 2}
    text = "".join(part.get("text", "") for part in parts)
    tokens = [token for part in parts[1:] for token in tokens_of(part)]
    choice = Built(False, "a", 1, True).choice(0, parts[0], text, tokens, end)
    found = choice["logprobs"]
    assert choice["text"] == prompt + "".join(said) and said[0].startswith(" ")
    assert found["tokens"][-2:] == said
    assert found["text_offset"][-2:] == [len(prompt), len(prompt) + len(said[0])]
    for token, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
        assert choice["text"][offset:].startswith(token)
    tokens = [token for part in parts for token in part.get("prompt", part.get("tokens", ()))]
    assert (
        bytes(byte for token in tokens for byte in token["bytes"]).decode() == f" {choice['text']}"
    )


def test_two_likely_tokens_with_one_text_are_both_reported() -> None:
    """A byte's own token and a letter's have the same text, and parts of characters have none."""
    shared = {"token": "a", "bytes": [97]}
    token = {"id": 5, **shared, "logprob": -0.5, "offset": 0, "top_logprobs": [
        {"id": 5, **shared, "logprob": -0.5}, {"id": 9, **shared, "logprob": -1.5},
        {"id": 7, "token": r"bytes:\xe9", "bytes": [233], "logprob": -2.5}]}  # fmt: skip
    end = {"finish": "stop", "completion_tokens": 1}
    choice = Built(False, "m", 1, True).choice(0, {}, "a", [token], end)
    assert choice["logprobs"]["top_logprobs"] == [
        {"a": -0.5, "token_id:9": -1.5, r"bytes:\xe9": -2.5}
    ]
    chat = Built(True, "m", 1, True).choice(0, {}, "a", [token], end)
    assert [top["bytes"] for top in chat["logprobs"]["content"][0]["top_logprobs"]] == [
        [97],
        [97],
        [233],
    ]


def test_bytes_of_a_part_of_a_character_are_its_own(client) -> None:
    answer = say(client, logit_bias={"233": 100}, max_tokens=1, logprobs=1).choices[0]
    assert answer.logprobs.tokens == [r"bytes:\xe9"] and answer.text == "\ufffd"
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=1, logprobs=True,
        top_logprobs=1, logit_bias={"233": 100}, temperature=0,
    )  # fmt: skip
    assert chat.choices[0].logprobs.content[0].bytes == [233]
    assert LEAST < chat.choices[0].logprobs.content[0].logprob < 0


@pytest.mark.parametrize(("change", "name"), [
    ({"messages": [{"role": "user", "content": "a", "weight": 0}]}, "messages.0.weight"),
    ({"messages": [{"role": "user", "content": "a", "name": "Ann"}]}, "messages.0.name"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
     "messages.0.content.cache_control"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
])  # fmt: skip
def test_fields_of_messages_and_options_are_obeyed_or_refused_too(
    change: dict[str, Any], name: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]} | change
    request = ChatRequest.model_validate(body)
    with pytest.raises(ConfigError) as caught:
        request.asked()
    assert caught.value.message == f"'{name}' is not a known field"
    assert request.asked(allows_unknown=True)


def test_an_answer_can_be_sent_back_with_all_of_its_empty_fields() -> None:
    """As clients do with the message of a response."""
    empty = {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    answer = {"role": "assistant", "content": "b", **empty}
    turns = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "c"}]
    (asked,) = ChatRequest.model_validate({"model": MODEL, "messages": turns}).asked()
    assert [turn["content"] for turn in asked["prompt"]] == ["a", "b", "c"]
