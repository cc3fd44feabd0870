"""A block program that answers with a key-value cache: eager tokens, an adapter as an input, a
conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api.chat import open_chat
from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import Adapter, save_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import ArtifactError, ConfigError, VerificationError
from ondevice.generation.generator import generate
from ondevice.generation.prompt import end_tokens
from ondevice.models import load_model
from ondevice.nn.adapters import adapted
from tests.cli.command import CommandLine
from tests.programs import program

pytest.importorskip("executorch.exir")
from ondevice.exporters.executorch import blocks_model as module
from ondevice.exporters.executorch.blocks import BlocksSession
from ondevice.exporters.executorch.blocks_model import BlocksModel, check_blocks_model
from tests.methods.reference import batch

PROMPT = list(b"A prompt of more tokens than are read at once: forty-one, or a few more.")


def random_adapter(session: Any) -> Adapter:
    """The session's adapter with random B."""
    adapter, rng = session.adapter(), np.random.default_rng(0)
    tensors = {
        name: (rng.normal(size=value.shape) / 4).astype(np.float32) if ".lora_B." in name else value
        for name, value in adapter.tensors.items()
    }
    return Adapter(tensors, adapter.rank, adapter.alpha, adapter.target_modules, adapter.base_model)


@pytest.fixture
def opened() -> Any:
    session = open_artifact(program("blocks"))
    session.load_adapter(random_adapter(session))
    yield session
    session.close()


def source_of(name: str) -> str:
    return read_manifest(program(name)).model.source


def test_two_hundred_greedy_tokens_are_eager_pytorchs(opened) -> None:
    loaded, writer, written = load_model(source_of("blocks")), BlocksModel(opened), []
    logits = writer.feed(PROMPT)
    for _ in range(200):
        written.append(int(logits.argmax()))
        logits = writer.feed(written[-1:])
    with adapted(loaded, opened.adapter()), torch.no_grad():
        expected = loaded.model(torch.tensor([PROMPT + written])).logits[0, len(PROMPT) - 1 :]
    assert expected[:-1].argmax(-1).tolist() == written and len(set(written)) > 3
    np.testing.assert_allclose(logits, expected[-1].numpy(), rtol=0, atol=1e-4)
    assert writer.read == len(PROMPT) + 200


def test_the_adapter_is_an_input(opened) -> None:
    """Hot swap: another vector, and the same program writes what another model would."""
    plain, own = load_model(source_of("blocks")), BlocksModel(opened).feed(PROMPT)
    opened.restart()  # B is zero: the base model
    with torch.no_grad():
        base = plain.model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    np.testing.assert_allclose(BlocksModel(opened).feed(PROMPT), base, rtol=0, atol=1e-4)
    assert np.abs(own - base).max() > 0.1


def test_any_cut_of_a_prompt_gives_the_same(opened) -> None:
    whole = BlocksModel(opened).feed(PROMPT)
    for cut in (1, 2, 32, 33, 40):
        writer = BlocksModel(opened)
        writer.feed(PROMPT[:cut])
        np.testing.assert_allclose(writer.feed(PROMPT[cut:]), whole, rtol=0, atol=1e-5)


def test_a_long_prompt_takes_the_widest_pass_and_a_short_one_does_not(opened, monkeypatch) -> None:
    sizes: list[int] = []
    whole = BlocksModel._pass

    def watched(self: BlocksModel, ids: Any, size: int) -> Any:
        sizes.append(size)
        return whole(self, ids, size)

    monkeypatch.setattr(module.BlocksModel, "_pass", watched)
    writer = BlocksModel(opened)
    for count, expected in ((65, [128]), (64, [32, 32]), (1, [1]), (33, [32, 1])):
        sizes.clear()
        writer.feed(PROMPT[:count])
        assert sizes == expected


@pytest.mark.parametrize("name", ["blocks", "blocks, int8", "blocks, q4"])
def test_answers_in_this_projects_ops_are_those_of_the_stock_functions(name: str) -> None:
    found = []
    for stock in (False, True):
        session = BlocksSession(program(name), read_manifest(program(name)), stock=stock)
        session.load_adapter(random_adapter(session))
        writer = BlocksModel(session)
        assert session.fused is not stock and (len(writer.sizes) == 2) is stock
        found.append([writer.feed(PROMPT[:38]), writer.feed([65])])
        session.close()
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["blocks", "blocks, q4"])
def test_a_token_goes_through_all_layers_with_inputs_that_stay(name: str, monkeypatch) -> None:
    session: Any = open_artifact(program(name))
    session.load_adapter(random_adapter(session))
    found = []
    for walks in (True, False):
        writer = BlocksModel(session)
        assert writer.walk is not None
        if not walks:
            writer.walk = None
        writer.feed(PROMPT[:5])
        found.append([writer.feed([token]) for token in PROMPT[5:9]])
    assert np.array_equal(*found)
    calls: list[str] = []
    call = session._call_block

    def counted(function: str, *arguments: Any, **named: Any) -> Any:
        calls.append(function)
        return call(function, *arguments, **named)

    monkeypatch.setattr(session, "_call_block", counted)
    BlocksModel(session).feed([1])
    assert calls == ["embed_decode", "logits"]


def test_the_next_token_sees_an_adapter_that_was_loaded_or_trained(opened) -> None:
    def told(writer: BlocksModel) -> Any:
        writer.rewind(len(PROMPT))
        return writer.feed([65])

    writer, before = BlocksModel(opened), opened.state()
    writer.feed(PROMPT)
    first = told(writer)
    opened.step(*batch(2, 16, seed=0), 0, 1e-2)
    trained = told(writer)
    opened.load_state(before)
    assert np.array_equal(told(writer), first) and not np.array_equal(trained, first)


def test_one_artifact_trains_answers_and_trains_on(opened) -> None:
    rows = [batch(2, 16, seed=number) for number in range(3)]

    def trained(answers: bool) -> tuple[list[float], Any]:
        opened.restart()
        losses, told = [], None
        for number, row in enumerate(rows):
            losses.append(opened.step(*row, number, 1e-2).loss)
            if answers:
                told = BlocksModel(opened).feed(PROMPT)
        return losses, (opened.state()["adapter"].tobytes(), told)

    plain, (state, _) = trained(False)
    losses, (same, told) = trained(True)
    assert (losses, same) == (plain, state)
    with adapted(loaded := load_model(source_of("blocks")), opened.adapter()), torch.no_grad():
        expected = loaded.model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    np.testing.assert_allclose(told, expected, rtol=0, atol=1e-4)


def test_the_context_is_kept_to() -> None:
    session = open_artifact(program("blocks, q4"))
    writer = BlocksModel(session)
    writer.feed(list(range(39)))
    writer.feed([1])  # the last place
    for ids in ([1], []):
        with pytest.raises(ConfigError):
            writer.feed(ids)
    assert writer.read == writer.context_tokens == 40


@pytest.mark.parametrize(("name", "limit"), [("blocks, int8", 0.05), ("blocks, q4", 0.3)])
def test_rounded_weights_answer_nearly_as_the_model_does(name: str, limit: float) -> None:
    """Against the float32 model, not the rounded one: as a part of the largest logit."""
    ids, writer = PROMPT[:37], BlocksModel(open_artifact(program(name)))
    with torch.no_grad():
        expected = load_model(source_of(name)).model(torch.tensor([ids])).logits[0, -3:].numpy()
    found = np.stack([writer.feed(ids[:-2]), *(writer.feed([token]) for token in ids[-2:])])
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert limit / 50 < error < limit


@pytest.mark.parametrize("name", ["blocks", "blocks, int8", "blocks, q4"])
def test_every_export_was_checked(name: str) -> None:
    assert 0 < read_manifest(program(name)).check["max_rel_logit_error"] < 1e-5


def test_a_wrong_cache_is_found(opened, monkeypatch) -> None:
    loaded = load_model(source_of("blocks"))
    assert check_blocks_model(opened, loaded) < 1e-5
    whole = BlocksModel._pass

    def late(self: BlocksModel, ids: Any, size: int) -> Any:
        """Every position is one later than it is."""
        self.read += 1
        try:
            return whole(self, ids, size)
        finally:
            self.read -= 1

    monkeypatch.setattr(module.BlocksModel, "_pass", late)
    with pytest.raises(VerificationError):
        check_blocks_model(opened, loaded)


def test_chat_with_an_artifact(opened, tmp_path: Path, capsys, monkeypatch) -> None:
    adapter = random_adapter(opened)
    save_adapter(adapter, tmp_path / "adapter")
    loaded = load_model(source_of("blocks"))
    ask = ("chat", program("blocks"), "--prompt", "Hello there", "--max-new-tokens", 24, "--json")
    said = CommandLine(capsys)(*ask, "--adapter", tmp_path / "adapter").json["answer"]
    messages = [{"role": "user", "content": "Hello there"}]
    with adapted(loaded, adapter):
        assert said == generate(loaded, messages, max_new_tokens=24)
    assert (
        CommandLine(capsys)(*ask).json["answer"]
        == generate(loaded, messages, max_new_tokens=24)
        != said
    )
    # A second turn reads only what is new.
    chat, fed = open_chat(str(program("blocks"))), []
    plain = BlocksModel.feed
    monkeypatch.setattr(
        BlocksModel, "feed", lambda self, ids: fed.append(len(ids)) or plain(self, ids)
    )
    messages.append({"role": "assistant", "content": chat.generate(messages, max_new_tokens=4)})
    first, fed[:] = fed[0], []
    messages.append({"role": "user", "content": "And?"})
    assert chat.generate(messages, max_new_tokens=4) == generate(loaded, messages, max_new_tokens=4)
    assert fed[0] < first + 10


def test_what_is_drawn_is_the_models_and_an_adapter_is_swapped_in_and_out(
    opened, tmp_path: Path
) -> None:
    """Seed, temperature, top-p and stop texts: a program draws what PyTorch does, adapter after
    adapter."""
    adapter = random_adapter(opened)
    save_adapter(adapter, tmp_path / "adapter")
    chats = [open_chat(str(program("blocks"))), open_chat(source_of("blocks"))]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 2.0, "top_p": 0.8}
    told = []
    for chat in chats:
        said = {}
        for name, used in (("base", None), ("adapted", tmp_path / "adapter"), ("again", None)):
            chat.use(used)
            said[name] = [list(chat.stream("a", seed=seed, **options)) for seed in (1, 1, 2)]
            assert said[name][0] == said[name][1] != said[name][2] and len(said[name][0]) > 3
        assert said["base"] == said["again"] != said["adapted"]
        with pytest.raises(ArtifactError):
            chat.use(tmp_path)
        whole = "".join(said["again"][0])
        assert (
            chat.generate("a", seed=1, stop=[whole[2:4]], **options)
            == whole[: whole.index(whole[2:4])]
        )
        told.append(said)
    assert told[0] == told[1]


def test_what_ends_an_answer_is_found_in_the_template() -> None:
    assert end_tokens(load_model("tiny:llama").tokenizer) == {257, 259}


def test_programs_that_cannot_write_say_so() -> None:
    for name in ("functional", "blocks, sgd"):
        with pytest.raises(ArtifactError) as error:
            open_chat(str(program(name)))
        assert "context_tokens" in str(error.value)
