"""Exported programs and MLX on rewards of their own answers: gradients, whole runs, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import ondevice
from ondevice.api.export import export as export_artifact
from ondevice.api.export import run_config
from ondevice.api.open import open_artifact
from ondevice.api.runfile import RunConfig
from ondevice.api.train import check_artifact, run_artifact
from ondevice.artifact.files import sha256_file
from ondevice.cli.app import app
from ondevice.core.errors import ConfigError, DataError
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import IGNORE, Answering
from ondevice.data.batching import pad_examples
from ondevice.data.examples import Example
from ondevice.generation.sample import PlainSampler
from ondevice.models import load_model, open_model, save_tiny
from ondevice.nn.adapters import adapted
from ondevice.objectives import Answers, Grpo
from ondevice.training.events import read_log
from tests.exporters.test_preferences import rounded, with_random_b
from tests.methods.mesp.reference import errors, exact
from tests.programs import marks, model, needs_qnn, program

PROMPT = (65, 66, 67, 32, 100)
REWARDS = np.array([1.0, 0.25])
ROWS = [{"prompt": f"{number}:", "completion": f" {number}"} for number in range(12)]
FUNCTIONS = """
def vowels(prompt, answer, row):
    return sum(letter in "aeiou" for letter in answer) / 10 - len(answer) / 100
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)


def written(session: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Two answers that the session writes, as a batch."""
    assert isinstance(session, Answering)
    samplers = [PlainSampler(1.0, seed) for seed in range(2)]
    drawn = session.answer_prompt(PROMPT, samplers, 7)
    assert [len(tokens) for tokens in drawn] == [7, 7] and drawn[0] != drawn[1]
    drawn[1] = drawn[1][:4]
    texts = [Example((*PROMPT, *ids), (IGNORE,) * len(PROMPT) + tuple(ids)) for ids in drawn]
    batch = pad_examples(texts, length, 0)
    return batch.ids, batch.labels


def graded(old: np.ndarray, tokens: np.ndarray) -> Any:
    reference = old + np.array([0.4, -0.3])

    def weigh(nll: np.ndarray) -> tuple[float, np.ndarray]:
        answers = Answers(-nll.astype(np.float64), old, reference, tokens, REWARDS, 2)
        made = Grpo(beta=0.3).grade(answers)
        return made.loss, -made.coefficients

    return weigh


def whole_loss(old: np.ndarray, counts: np.ndarray) -> Any:
    """The objective's definition in torch, whose gradient autograd finds."""
    advantages = torch.tensor(REWARDS - REWARDS.mean()) / (REWARDS.std() + 1e-4)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        chosen = labels[:, 1:]
        logp = logits[:, :-1].double().log_softmax(-1)
        logp = (logp.gather(2, chosen.clamp(min=0)[..., None])[..., 0] * (chosen >= 0)).sum(1)
        tokens = torch.tensor(counts)
        ratio = ((logp - torch.tensor(old)) / tokens).exp()
        distance = (torch.tensor(old + np.array([0.4, -0.3])) - logp) / tokens
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return (-gain + 0.3 * (distance.exp() - distance - 1)).mean()

    return loss


def learned(
    session: Any, ids: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray], Any]:
    """Loss and gradient of a step, AdamW's first moment after one from zero, in float64; and the
    whole loss in torch."""
    tokens = (labels[:, 1:] >= 0).sum(1)
    found: list[np.ndarray] = []

    def weigh(nll: np.ndarray) -> tuple[float, np.ndarray]:
        found.append(-nll.astype(np.float64) - np.array([0.3, -0.2]))
        return graded(found[0], tokens)(nll)

    before = session.state()
    loss = session.weighted_step(ids, labels, weigh, 0, 0.0).loss
    session.load_state(before | {"adapter": session.state()["exp_avg"] / np.float32(0.1)})
    gradient = {key: value.astype(np.float64) for key, value in session.adapter().tensors.items()}
    return loss, gradient, whole_loss(found[0], tokens)


@pytest.mark.parametrize(
    ("name", "length"),
    [("blocks", 16), pytest.param("pairs, int8", 64, marks=marks("pairs, int8"))],
)
def test_a_program_learns_the_gradient_of_grpo_for_the_answers_that_it_wrote(
    name: str, length: int
) -> None:
    pytest.importorskip("executorch.exir")
    writer = open_artifact(program("blocks"))
    with_random_b(writer)
    ids, labels = written(writer, length)
    session: Any = open_artifact(program(name))
    tensors = with_random_b(session)
    loss, ours, formula = learned(session, ids, labels)
    theirs, expected = exact(rounded(name), tensors, session.config.scale, ids, labels, formula)
    assert loss == pytest.approx(theirs, rel=1e-4)
    assert max(errors(ours, expected).values()) < 1e-4
    assert min(np.abs(value).max() for value in expected.values()) > 0


def test_mlx_learns_the_gradient_of_grpo_for_the_answers_that_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    save_tiny(tmp_path / "model", "llama")
    # Plain descent at rate 1 moves the adapter by its gradient.
    settings = {"optimizer": "sgd", "weight_decay": 0.0, "max_grad_norm": None}
    config = method_config("mesp", settings)
    session: Any = open_session(open_model(str(tmp_path / "model")), config, 3, backend="mlx")
    tensors = with_random_b(session)
    ids, labels = written(session, 16)
    tokens = (labels[:, 1:] >= 0).sum(1)
    found: list[np.ndarray] = []

    def weigh(nll: np.ndarray) -> tuple[float, np.ndarray]:
        found.append(-nll.astype(np.float64) - np.array([0.3, -0.2]))
        return graded(found[0], tokens)(nll)

    session.weighted_step(ids, labels, weigh, 0, 1.0)
    after = session.adapter().tensors
    ours = {key: tensors[key].astype(np.float64) - after[key] for key in tensors}
    loaded = load_model(str(tmp_path / "model"))
    _, expected = exact(
        loaded, tensors, session.config.scale, ids, labels, whole_loss(found[0], tokens)
    )
    assert max(errors(ours, expected).values()) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_5_text"])
def test_mlx_writes_what_the_whole_model_writes(family: str, tmp_path: Path) -> None:
    """Answers in one batch, through kept keys and values, are those of whole texts read anew."""
    pytest.importorskip("mlx.core")
    save_tiny(tmp_path / "model", family)
    files = open_model(str(tmp_path / "model"))
    session: Any = open_session(files, method_config("mesp", {}), 3, backend="mlx")
    tensors = with_random_b(session)
    prompt = [1 + number * 7 % 200 for number in range(23)]
    samplers = [PlainSampler(1.0, seed, frozenset(range(20))) for seed in range(3)]
    drawn = session.answer_prompt(prompt, samplers, 24)
    assert len({tuple(tokens) for tokens in drawn}) == 3
    loaded = load_model(str(tmp_path / "model"))
    with adapted(loaded, session.adapter()), torch.no_grad():
        for seed, tokens in enumerate(drawn):
            sampler = PlainSampler(1.0, seed, frozenset(range(20)))
            logits = loaded.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 :]
            again = [sampler.next(row) for row in logits[: len(tokens)]]
            assert [token.id for token in again] == tokens
            assert again[-1].ends or len(tokens) == 24
            assert not any(token.ends for token in again[:-1])
    assert tensors


def events_of(out: Path) -> list[Any]:
    entries = read_log(out / "events.jsonl").entries
    return [entry.event for entry in entries if entry.event.kind == "step"]


def run(out: Path, steps: int, name: str = "blocks", **settings: Any) -> Any:
    """A run of a program on rewards."""
    resume = settings.pop("resume", False)
    rows = settings.pop("rows", ROWS)
    start = settings.pop("start", run_artifact)
    data = out.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values: dict[str, Any] = {
        "data.path": str(data),
        "train.out": str(out),
        "train.steps": steps,
        "train.checkpoint_every": 3,
        "train.objective": "grpo",
        "train.reward": "own_rewards:vowels",
        "train.group_size": 2,
        "train.answer_tokens": 8,
        "method.learning_rate": 0.02,
        **settings,
    }
    folder = program(name)
    return start(folder, run_config(folder, None, values), resume=resume)


def test_a_run_of_a_program_on_rewards_learns_and_resumes_with_the_same_bits(
    tmp_path: Path,
) -> None:
    pytest.importorskip("executorch.exir")
    adapter = "adapter/adapter_model.safetensors"
    (tmp_path / "a").mkdir()
    evaluated = {"data.validation_split": 0.25}
    trained = run(tmp_path / "a" / "whole", 6, **evaluated)
    assert trained.result.evaluation.metric == "reward" and trained.result.evaluation.rows == 3
    run(tmp_path / "a" / "cut", 3, **evaluated)
    run(tmp_path / "a" / "cut", 6, resume=True, **evaluated)
    files = [sha256_file(tmp_path / "a" / part / adapter) for part in ("whole", "cut")]
    assert files[0] == files[1]
    whole, cut = (events_of(tmp_path / "a" / part) for part in ("whole", "cut"))
    assert [one.preferences for one in whole] == [one.preferences for one in cut]
    assert whole[-1].preferences["kl"] > 0
    run(tmp_path / "a" / "two updates", 3, **evaluated, **{"train.updates": 2})
    assert files[0] != sha256_file(tmp_path / "a" / "two updates" / adapter)


WRONG = [
    ("pairs", {}, "no functions that write answers", "export.context_tokens=512"),
    ("blocks, int8", {}, "whole groups of answers", "--batch-size 2"),
    ("blocks", {"train.group_size": 4}, "whole groups of answers", "--group-size that divides 2"),
    ("functional", {}, "does not learn from rewards", "--method mesp"),
    ("blocks", {"train.answer_tokens": 23}, "longer than the model takes", "--answer-tokens"),
]


@pytest.mark.parametrize(("name", "settings", "words", "hint"), WRONG)
def test_what_a_program_cannot_do_is_refused_with_the_way_to_export_it(
    name: str, settings: dict[str, Any], words: str, hint: str, tmp_path: Path
) -> None:
    pytest.importorskip("executorch.exir")
    for start in (run_artifact, check_artifact):
        with pytest.raises((ConfigError, DataError)) as caught:
            run(tmp_path / "run", 1, name, start=start, **settings)
        assert words in caught.value.message
        assert hint in str(caught.value.hint)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_program_for_mlx_learns_from_rewards_what_train_learns(tmp_path: Path) -> None:
    """Its steps run the artifact's functions; answers are written by Python's stages."""
    pytest.importorskip("mlx.core")
    source = save_tiny(tmp_path / "model", "llama")
    export = {
        "model.source": str(source), "method.name": "mesp", "export.target": "apple-mlx",
        "export.batch_size": 4, "export.lengths_tokens": [64], "train.seed": 4,
        "train.objective": "grpo", "train.reward": "own_rewards:vowels", "train.group_size": 2,
    }  # fmt: skip
    artifact = tmp_path / "artifact"
    export_artifact(RunConfig.load(None, export), artifact)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    common = {
        "data.path": str(tmp_path / "rows.jsonl"), "train.objective": "grpo",
        "train.reward": "own_rewards:vowels", "train.group_size": 2, "train.answer_tokens": 8,
        "method.learning_rate": 0.02, "train.checkpoint_every": 1,
    }  # fmt: skip

    def again(out: str, steps: int, **options: Any) -> str:
        values = {**common, "train.steps": steps, "train.out": str(tmp_path / out)}
        check_artifact(artifact, run_config(artifact, None, values), **options)
        run_artifact(artifact, run_config(artifact, None, values), **options)
        return sha256_file(tmp_path / out / "adapter/adapter_model.safetensors")

    whole = again("whole", 2)
    again("cut", 1)
    assert again("cut", 2, resume=True) == whole
    settings = {"model.source": str(source), "method.name": "mesp", "train.backend": "mlx"}
    rows = {"train.batch_size": 2, "train.seed": 4, "data.max_length_tokens": 64}
    steps = {"train.steps": 2, "train.out": str(tmp_path / "theirs")}
    ondevice.train({**common, **settings, **rows, **steps})
    ours, theirs = events_of(tmp_path / "whole"), events_of(tmp_path / "theirs")
    assert len(ours) == 2 and ours[-1].preferences["kl"] > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
        assert one.preferences["reward"] == pytest.approx(other.preferences["reward"], abs=1e-9)


NOT_EXPORTED = [
    ({"method.name": "prge", "export.target": "jetson"}, "grpo", "does not learn from rewards",
     "--target android-cpu"),
    ({"export.target": "android-cpu"}, "grpo", "no functions that write", "context_tokens=512"),
    ({"export.target": "apple-mlx", "export.batch_size": 3}, "grpo", "whole groups of answers",
     "--batch-size 4"),
    ({"method.name": "prge", "export.target": "android-cpu"}, "dpo",
     "does not learn from preferences", "--method mesp"),
    ({"export.target": "apple-mlx", "export.batch_size": 3}, "simpo", "an odd number of rows",
     "--batch-size 2"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "objective", "words", "hint"), NOT_EXPORTED)
def test_an_export_refuses_what_its_program_would_refuse(
    settings: dict[str, Any], objective: str, words: str, hint: str, tmp_path: Path
) -> None:
    values = {"model.source": "tiny:llama", "method.name": "mesp", **settings}
    values["train.objective"] = objective
    if objective == "grpo":
        values |= {"train.reward": "own_rewards:vowels", "train.group_size": 2}
    arguments = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    for dry in ([], ["--dry-run"]):
        done = CliRunner().invoke(app, ["export", *arguments, *dry, "--out", "artifact"])
        assert isinstance(done.exception, ConfigError)
        assert words in done.exception.message
        assert hint in str(done.exception.hint)
    assert not Path("artifact").exists()


def test_a_run_in_mlx_on_rewards_resumes_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    save_tiny(tmp_path / "model", "llama")

    def train(out: str, steps: int, **options: Any) -> Any:
        return ondevice.train(
            str(tmp_path / "model"), ROWS, steps=steps, out=tmp_path / out, method="mesp",
            backend="mlx", objective="grpo", reward="own_rewards:vowels", group_size=3,
            batch_size=2, answer_tokens=8, learning_rate=2e-2, checkpoint_every=2, **options,
        )  # fmt: skip

    adapter = "adapter/adapter_model.safetensors"
    train("whole", 4)
    train("cut", 2)
    train("cut", 4, resume=True)
    files = [sha256_file(tmp_path / part / adapter) for part in ("whole", "cut")]
    assert files[0] == files[1]
    assert events_of(tmp_path / "whole")[-1].preferences["kl"] > 0


def test_a_program_s_sampled_answers_go_on_from_the_prompt_as_the_model_does() -> None:
    pytest.importorskip("executorch.exir")
    session: Any = open_artifact(program("blocks"))
    with_random_b(session)
    samplers = [PlainSampler(1.0, seed) for seed in range(3)]
    drawn = session.answer_prompt(PROMPT, samplers, 9)
    loaded = load_model(str(model("two layers")))
    with adapted(loaded, session.adapter()), torch.no_grad():
        for seed, tokens in enumerate(drawn):
            sampler = PlainSampler(1.0, seed)
            logits = loaded.model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 :]
            assert [sampler.next(row).id for row in logits[: len(tokens)]] == tokens


@pytest.mark.parametrize(
    ("method", "quantize"), [("mesp", "none"), ("lora", "none"), ("mesp", "int8")]
)
def test_an_artifact_for_jetson_learns_from_rewards_what_train_learns(
    method: str, quantize: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    source = save_tiny(tmp_path / "model", "llama")
    export = {
        "model.source": str(source), "model.dtype": "float32", "method.name": method,
        "export.target": "jetson", "export.batch_size": 4, "export.lengths_tokens": [64],
        "export.quantize": quantize, "train.seed": 4,
    }  # fmt: skip
    artifact = tmp_path / "artifact"
    export_artifact(RunConfig.load(None, export), artifact)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    common = {
        "data.path": str(data), "train.steps": 4, "train.objective": "grpo",
        "train.reward": "own_rewards:vowels", "train.group_size": 2, "train.answer_tokens": 8,
        "method.learning_rate": 0.02, "train.checkpoint_every": 2,
    }  # fmt: skip

    def again(out: str, steps: int, **options: Any) -> str:
        values = {**common, "train.steps": steps, "train.out": str(tmp_path / out)}
        run_artifact(artifact, run_config(artifact, None, values), **options)
        return sha256_file(tmp_path / out / "adapter/adapter_model.safetensors")

    whole = again("whole", 4)
    again("cut", 2)
    assert again("cut", 4, resume=True) == whole
    ours = events_of(tmp_path / "whole")
    assert ours[-1].preferences["kl"] > 0
    if quantize != "none":
        return
    ondevice.train(
        {
            **common,
            "model.source": str(source),
            "model.dtype": "float32",
            "method.name": method,
            "train.batch_size": 2,
            "train.seed": 4,
            "data.max_length_tokens": 64,
            "train.out": str(tmp_path / "theirs"),
        }
    )
    theirs = events_of(tmp_path / "theirs")
    for one, other in zip(ours, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
        assert one.preferences["reward"] == pytest.approx(other.preferences["reward"], abs=1e-9)


def test_blocks_in_the_simulator_of_the_npu_learn_from_rewards(tmp_path: Path) -> None:
    pytest.importorskip("executorch.exir")
    needs_qnn()
    session: Any = open_artifact(program("npu blocks"))
    tensors = with_random_b(session)
    ids, labels = written(session, 16)
    loss, ours, formula = learned(session, ids, labels)
    session.close()
    theirs, expected = exact(
        load_model(str(model("wide"))), tensors, session.config.scale, ids, labels, formula
    )
    # A ratio of likelihoods is off by float16's error of a token's, and an advantage is 1.
    assert loss == pytest.approx(theirs, abs=5e-3)
    for key, value in expected.items():
        cosine = (ours[key] * value).sum() / np.linalg.norm(ours[key]) / np.linalg.norm(value)
        assert cosine > 0.9995, key
    trained = run(tmp_path / "run", 2, "npu blocks", **{"train.checkpoint_every": 1})
    assert trained.result.steps == 2 and events_of(tmp_path / "run")[-1].preferences["kl"] > 0
