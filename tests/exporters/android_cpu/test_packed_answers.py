"""A program that answers with packed weights: eager tokens, adapters in and out, and no other
model's adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api.chat import open_chat
from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
from ondevice.artifact.manifest import ANSWERS, read_manifest
from ondevice.core.errors import ArtifactError, ConfigError, VerificationError
from ondevice.generation.generator import generate
from ondevice.models import load_model
from ondevice.nn.adapters import adapted
from tests.programs import model, program

pytest.importorskip("executorch.exir")
from ondevice.exporters.executorch import answers
from ondevice.exporters.executorch.packed import PackedModel

PROMPT = list(b"A prompt of more tokens than are read at once; forty-one, or some more. " * 2)
NAME = "blocks of granite"


def random_adapter(like: Adapter) -> Adapter:
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.normal(size=value.shape) / 4).astype(np.float32) if ".lora_B." in name else value
        for name, value in like.tensors.items()
    }
    return replace(like, tensors=tensors)


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    from ondevice.api.open import open_artifact

    session: Any = open_artifact(program(NAME))
    try:
        return random_adapter(session.adapter())
    finally:
        session.close()


def test_two_hundred_greedy_tokens_are_eager_pytorchs(adapter) -> None:
    loaded = load_model(read_manifest(program(NAME)).model.source)
    writer, written = PackedModel(program(NAME) / ANSWERS), []
    writer.use(adapter)
    logits = writer.feed(PROMPT)
    assert len(PROMPT) > writer.piece_tokens
    for _ in range(200):
        written.append(int(logits.argmax()))
        logits = writer.feed(written[-1:])
    with adapted(loaded, adapter), torch.no_grad():
        expected = loaded.model(torch.tensor([PROMPT + written])).logits[0, len(PROMPT) - 1 :]
    assert expected[:-1].argmax(-1).tolist() == written and len(set(written)) > 3
    np.testing.assert_allclose(logits, expected[-1].numpy(), rtol=0, atol=1e-4)


def test_chat_swaps_adapters_and_reads_only_what_is_new(adapter, tmp_path: Path) -> None:
    save_adapter(adapter, tmp_path / "adapter")
    loaded, chat = (
        load_model(read_manifest(program(NAME)).model.source),
        open_chat(str(program(NAME))),
    )
    messages = [{"role": "user", "content": "Hello there"}]
    said = [chat.generate(messages, max_new_tokens=16)]
    for used in (tmp_path / "adapter", None):
        chat.use(used)
        said.append(chat.generate(messages, max_new_tokens=16))
    with adapted(loaded, load_adapter(tmp_path / "adapter")):
        assert said[1] == generate(loaded, messages, max_new_tokens=16)
    assert said[0] == said[2] == generate(loaded, messages, max_new_tokens=16) != said[1]
    chat.use(None)
    messages += [{"role": "assistant", "content": said[0]}, {"role": "user", "content": "And?"}]
    assert chat.generate(messages, max_new_tokens=8) == generate(loaded, messages, max_new_tokens=8)


def test_what_does_not_fit_is_refused(adapter, tmp_path: Path) -> None:
    writer = PackedModel(program(NAME) / ANSWERS)
    with pytest.raises(ArtifactError) as error:
        writer.use(replace(adapter, rank=adapter.rank + 1))
    assert error.value.received == f"rank {adapter.rank + 1}"
    other = {name.replace("layers.0", "layers.9"): value for name, value in adapter.tensors.items()}
    with pytest.raises(ArtifactError) as error:
        writer.use(replace(adapter, tensors=other))
    assert "layers.9" in error.value.received
    for ids in ([], [1] * (writer.context_tokens + 1)):
        with pytest.raises(ConfigError):
            writer.feed(ids)
    with pytest.raises(ArtifactError):
        PackedModel(tmp_path)


def test_verify_repeats_the_check(monkeypatch) -> None:
    from ondevice.api.verify import verify

    values = verify(program(NAME), steps=1)
    assert values["ok"] and 0 < values["answers_max_rel_logit_error"] < 1e-5
    monkeypatch.setattr(answers, "LOGIT_ERROR", {"none": 0.0})
    assert not verify(program(NAME), steps=1)["ok"]


def test_a_wrong_program_is_found(adapter, monkeypatch) -> None:
    """Every position is one later than it is."""
    loaded = load_model(read_manifest(program(NAME)).model.source)
    folder, plain = program(NAME) / ANSWERS, PackedModel.feed
    described = PackedModel(folder).described
    model = answers.AnswerModel(loaded, described["context_tokens"], adapter.linears, adapter.rank)
    assert (
        answers.check_answers(folder, model, described, loaded, adapter)["max_rel_logit_error"]
        < 1e-5
    )

    def late(self: PackedModel, ids: Any) -> Any:
        self.read = self.read or 1
        return plain(self, ids)

    monkeypatch.setattr(PackedModel, "feed", late)
    with pytest.raises(VerificationError):
        answers.check_answers(folder, model, described, loaded, adapter)


def forgetful(writer: PackedModel, ids: Any) -> Any:
    """Tokens behind the prompt are read as if there were none before."""
    writer.read = 0
    return FEED(writer, ids)


FEED = PackedModel.feed
WRONG: dict[str, tuple[str, Any]] = {
    "cache": ("feed", forgetful),
    "no adapter": ("use", lambda writer, adapter: USE(writer, None)),
    "half the adapter": (
        "use",
        lambda writer, adapter: USE(writer, adapter and replace(adapter, alpha=adapter.alpha / 2)),
    ),
}
USE = PackedModel.use


@pytest.mark.parametrize("form", [pytest.param("8da8w", marks=pytest.mark.nightly), "8da4w"])
def test_rounded_weights_answer_as_their_own_eager_does_and_a_wrong_program_does_not(
    form: str, tmp_path: Path, monkeypatch
) -> None:
    loaded = load_model(str(model("one layer")))
    linears = [loaded.family.linear_name(0, target) for target in ("q_proj", "v_proj", "down_proj")]
    lowered, described = answers.write_answers(tmp_path, loaded, form, 140, linears, 4)
    check = (tmp_path, lowered, described, loaded, answers.trial_adapter(described))
    values = answers.check_answers(*check)
    assert values["rel_logit_error"] < 0.03 and 1e-3 < values["max_rel_logit_error_float32"] < 0.5
    for name, wrong in WRONG.values():
        with monkeypatch.context() as patch:
            patch.setattr(PackedModel, name, wrong)
            with pytest.raises(VerificationError):
                answers.check_answers(*check)
    lowered.blocks[
        0
    ].turn.neg_()  # the other way round: the program is right, and what it is held against turns back
    with pytest.raises(VerificationError):
        answers.check_answers(*check)
