"""Block programs of families whose blocks keep more than keys and values, or share them: greedy
tokens of transformers, states that go on, and hosts that do not know them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from ondevice.api.export import export
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config, target
from ondevice.exporters.base import ExportJob
from ondevice.generation.sample import PlainSampler
from ondevice.methods.mesp import npu
from ondevice.models import load_model, save_tiny
from ondevice.models.tiny import tiny_dims
from ondevice.nn.adapters import adapted
from tests.eager_program import computing_in_pytorch
from tests.exporters.android_cpu.test_writing import PROMPT, random_adapter
from tests.methods.reference import batch
from tests.program_tables import SMALL
from tests.programs import config

pytest.importorskip("executorch.exir")
from ondevice.exporters.executorch.blocks import BlocksSession
from ondevice.exporters.executorch.blocks_model import BlocksModel
from ondevice.exporters.executorch.cache import Cache, kept_bytes

ROOT = Path(__file__).parents[3]
CONTEXT = 150
"""More than the 128 tokens of the widest pass."""
DENSE_GEMMA4 = {
    "layers": 4,
    "head_dim": 24,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
"""As its larger models: values are keys in layers that see all, and no layer has inputs."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {**SMALL, "layers": 3, "conv_L_cache": 4}),
    "lfm2_moe": ("lfm2_moe", {**SMALL, "layers": 4, "moe_intermediate_size": 32}),
    "gemma4_text": ("gemma4_text", {**SMALL, "layers": 5}),
    "gemma4_text without inputs of layers": ("gemma4_text", SMALL | DENSE_GEMMA4),
    "gemma4_text with experts": (
        "gemma4_text",
        {**SMALL, "layers": 5, "enable_moe_block": True, "moe_intermediate_size": 32},
    ),
    "qwen3_5_text": ("qwen3_5_text", {**SMALL, "layers": 3}),
    "gemma3_text": ("gemma3_text", {**SMALL, "layers": 3, "sliding_window": 12}),
    "granite": ("granite", {**SMALL, "layers": 2}),
    "phi3": ("phi3", {**SMALL, "layers": 2}),
    "smollm3": ("smollm3", {**SMALL, "layers": 3}),
}


PARAMS = [
    pytest.param(name, marks=[pytest.mark.nightly] if name in ("phi3", "smollm3") else [])
    for name in MODELS
]


@pytest.fixture(scope="module", params=PARAMS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Path]:
    """An artifact of each model, whose functions compute before they are lowered."""
    family, sizes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("artifact")
    with computing_in_pytorch():
        values = {
            "model.source": str(save_tiny(folder / "model", family, **sizes)),
            "export.batch_size": 1,
            "export.eval_batch_size": 1,
            "export.context_tokens": CONTEXT,
        }
        yield export(config("blocks of lfm2", **values), folder / "program").path


def opened(artifact: Path, stock: bool = False) -> BlocksSession:
    session = BlocksSession(artifact, read_manifest(artifact), stock=stock)
    session.load_adapter(random_adapter(session))
    return session


def by_transformers(loaded: Any, prompt: list[int], tokens: int) -> list[int]:
    """Greedy tokens of `generate`, whatever they are."""
    how = GenerationConfig(do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    loaded.model.generation_config.eos_token_id = None
    row = torch.tensor([prompt])
    with torch.no_grad():
        found = loaded.model.generate(
            row, attention_mask=torch.ones_like(row), generation_config=how
        )
    return found[0, len(prompt) :].tolist()


def written(writer: BlocksModel, prompt: list[int], tokens: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of a program, and the logits behind the last."""
    writer.rewind(0)
    logits = writer.feed(prompt)
    found: list[int] = []
    while len(found) < tokens:
        found.append(int(logits.argmax()))
        logits = writer.feed(found[-1:])
    return found, logits


def test_greedy_tokens_are_those_of_transformers_generate(artifact: Path) -> None:
    """Prompts of odd lengths, read in chunks that are filled up, and more tokens than a window."""
    loaded = load_model(read_manifest(artifact).model.source)
    for stock in (False, True):
        session = opened(artifact, stock)
        writer = BlocksModel(session)
        assert not (stock and session.fused)
        different = set()
        for length in (1, 33, 129):
            prompt = (PROMPT * 2)[:length]
            found, logits = written(writer, prompt, 16)
            with adapted(loaded, session.adapter()), torch.no_grad():
                assert found == by_transformers(loaded, prompt, 16)
                row = torch.tensor([[*prompt, *found]])
                expected = loaded.model(row).logits[0, -1].numpy()
            error = np.abs(logits - expected).max()
            assert error <= 1e-5 * max(1.0, np.abs(expected).max())
            different |= set(found)
        assert len(different) > 3


def test_any_cut_of_a_prompt_leaves_the_same_states(artifact: Path) -> None:
    writer = BlocksModel(opened(artifact))
    whole = writer.feed(PROMPT)
    for cuts in ((1,), (2, 3), (31, 33), (40,), (64, 65)):
        writer.rewind(0)
        for low, high in zip((0, *cuts), cuts):
            writer.feed(PROMPT[low:high])
        found = writer.feed(PROMPT[cuts[-1] :])
        assert np.abs(found - whole).max() <= 1e-5 * max(1.0, np.abs(whole).max())


def test_going_back_gives_the_bits_of_reading_anew(artifact: Path) -> None:
    """To the end of the prompt without reading it again; and to its middle, which is read again."""
    writer = BlocksModel(opened(artifact))
    first = written(writer, PROMPT, 5)
    again = writer.rewind(len(PROMPT))
    assert again == len(PROMPT)
    logits = writer.feed(first[0][:1])
    fresh = BlocksModel(opened(artifact))
    fresh.feed(PROMPT)
    assert np.array_equal(logits, fresh.feed(first[0][:1]))
    middle = writer.rewind(40)
    assert middle == (0 if writer.cache.states else 40)
    assert writer.read == middle
    found = writer.feed([*PROMPT[middle:40], 65])
    fresh.rewind(0)
    whole = fresh.feed([*PROMPT[:40], 65])
    assert np.abs(found - whole).max() <= 1e-5 * max(1.0, np.abs(whole).max())


def test_one_artifact_trains_answers_and_trains_on(artifact: Path) -> None:
    rows = [batch(1, 16, seed=number) for number in range(3)]
    found = []
    for answers in (False, True):
        session = opened(artifact)
        losses = []
        for number, row in enumerate(rows):
            losses.append(session.step(*row, number, 1e-2).loss)
            if answers:
                told, _ = written(BlocksModel(session), PROMPT[:37], 6)
                loaded = load_model(read_manifest(artifact).model.source)
                with adapted(loaded, session.adapter()):
                    assert told == by_transformers(loaded, PROMPT[:37], 6)
        found.append((losses, session.state()["adapter"].tobytes()))
    assert found[0] == found[1]


def test_answers_of_a_group_are_those_that_one_writes(artifact: Path) -> None:
    """As a step of GRPO asks for them: the prompt is read once."""
    session = opened(artifact)
    samplers = [PlainSampler(2.0, seed) for seed in (3, 4, 3)]
    answers = session.answer_prompt(PROMPT[:35], samplers, 7)
    assert answers[0] == answers[2] != answers[1]
    one = session.answer_prompt(PROMPT[:35], [PlainSampler(2.0, 4)], 7)
    assert one == [answers[1]]


def test_what_a_conversation_takes_is_counted_once_for_layers_that_share(artifact: Path) -> None:
    spec = read_manifest(artifact).program_spec
    kept = {id(one): one for layer in Cache(spec).layers for one in layer.values()}
    assert kept_bytes(spec) == 4 * sum(one.numel() for one in kept.values()) > 0
    own = [layer for layer in Cache(spec).layers if layer]
    assert len(own) == spec.layers
    assert spec.context_tokens == CONTEXT


def test_hosts_that_do_not_know_what_blocks_keep_refuse_the_artifact(artifact: Path) -> None:
    """By the role of a port, or by kinds of blocks; `runtime_ops/host` and the app look at these
    before a step."""
    spec = read_manifest(artifact).program_spec
    roles = {
        str(port.role)
        for name, method in spec.methods.items()
        if "block_prefill" in name or "block_decode" in name
        for port in method.inputs
    }
    core = ROOT / "android_app/core/src/main/kotlin/org/ondevice/core"
    kotlin = set(re.findall(r'\("([a-z_]+)"\)', (core / "Manifest.kt").read_text()))
    native = (ROOT / "runtime_ops/host/manifest.cpp").read_text()
    native = native[native.index("kRoles = {") :]
    known = set(re.findall(r'"([a-z_]+)"', native[: native.index("};")]))
    keeps = any(method.inputs and "conv_state" in roles for method in spec.methods.values())
    assert ("conv_state" in roles - kotlin and "conv_state" in roles - known) == keeps
    mixers = set(read_manifest(artifact).model.dims["traits"]["mixers"])
    assert keeps == bool(mixers - {"attention"})
    assert "spec.blocks!!.kinds.isNotEmpty()" in (core / "BlocksCheck.kt").read_text()


def job(folder: Path, **export: Any) -> ExportJob:
    settings = ExportConfig(target="android-cpu", lengths_tokens=(16,), **export)
    return ExportJob(ModelConfig(source=str(folder)), method_config("mesp"), settings)


def test_forms_that_cannot_answer_are_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "lfm2", layers=2)
    assert not target("android-cpu").check(job(folder, context_tokens=40))
    (problem,) = target("android-cpu").check(job(folder, context_tokens=40, quantize="8da8w"))
    assert "none, int8 or q4" in problem
    folder = save_tiny(tmp_path / "n", "lfm2", layers=2, layer_types=["conv", "conv"])
    (problem,) = target("android-cpu").check(job(folder, context_tokens=40))
    assert "needs a layer with attention" in problem


def test_blocks_that_differ_from_llamas_do_not_answer_on_the_npu() -> None:
    """Its functions keep keys and values of one form."""
    settings = ExportConfig(target="android-npu", lengths_tokens=(16,), context_tokens=40)
    found = npu.problems(method_config("mesp"), settings, tiny_dims("qwen3")[0])
    assert any("on the NPU is for blocks like Llama's" in one for one in found), found
    assert not npu.problems(method_config("mesp"), settings, tiny_dims("llama")[0])
