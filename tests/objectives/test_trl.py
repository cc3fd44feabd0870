"""Losses and every adapter gradient against TRL's own trainers, on the same rows."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.artifact.adapter import save_adapter
from ondevice.data import encode, read_rows
from ondevice.data.batching import collate
from ondevice.data.examples import Dataset, Example
from ondevice.models import load_model, save_tiny
from ondevice.objectives import Scores, objective
from ondevice.training.preferences import texts_of
from tests.methods.mesp.reference import errors, exact, learned, session
from tests.methods.reference import in_double

for package in ("trl", "datasets"):  # found, not imported: every worker collects this file
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
MAX_LENGTH = 120
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.2},
    "kto": {"beta": 0.25, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 2.5, "label_smoothing": 0.05, "margin": 0.7},
}


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


CHATS = [
    {"prompt": turns("Hi", "Yes?", "One"), "chosen": answer("ok"), "rejected": answer("no, not")},
    {"prompt": turns("A film?"), "chosen": answer("It was fun."), "rejected": answer("x")},
    {"prompt": turns("a", "b", "c", "d", "e"), "chosen": answer("f"), "rejected": answer("ghi")},
    # Too long: older turns are left out.
    {"prompt": turns("u" * 40, "v" * 30, "w" * 20), "chosen": answer("z"), "rejected": answer("y" * 9)},
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("trl") / "model", "llama")


def encoded(rows: list[dict[str, Any]], tokenizer: Any, folder: Path) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return encode(read_rows(path), tokenizer, max_length_tokens=MAX_LENGTH)


def rated() -> list[dict[str, Any]]:
    sides = ("chosen", "rejected")
    return [
        {"prompt": row["prompt"], "completion": row[sides[i % 2]], "label": i % 2 == 0}
        for i, row in enumerate(CHATS)
    ]


def parts(text: Example) -> tuple[list[int], list[int]]:
    """The ids of a text's prompt, and of its answer."""
    first = next(i for i, label in enumerate(text.labels) if label >= 0)
    return list(text.ids[:first]), list(text.ids[first:])


def trainer(name: str, model: Any, tokenizer: Any, folder: Path) -> Any:
    """TRL's trainer of an objective, over a model with an adapter."""
    import datasets
    import trl
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    s = SETTINGS[name]
    common = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
        "per_device_train_batch_size": len(CHATS),
    }
    shared = {"model": model, "processing_class": tokenizer}
    rows = datasets.Dataset.from_list(rated() if name == "kto" else CHATS)
    if name == "kto":
        weights = {key: s[key] for key in ("desirable_weight", "undesirable_weight")}
        args = trl.KTOConfig(**common, beta=s["beta"], **weights)
        return trl.KTOTrainer(**shared, args=args, train_dataset=rows)
    if name == "orpo":
        return ORPOTrainer(**shared, args=ORPOConfig(**common, beta=s["beta"]), train_dataset=rows)
    if name == "simpo":
        args = CPOConfig(
            **common,
            beta=s["beta"],
            loss_type="simpo",
            cpo_alpha=0.0,
            simpo_gamma=s["margin"],
            label_smoothing=s["label_smoothing"],
        )
        return CPOTrainer(**shared, args=args, train_dataset=rows)
    loss = {"dpo": "sigmoid", "ipo": "ipo"}[name]
    args = trl.DPOConfig(**common, beta=s["beta"], loss_type=loss)
    return trl.DPOTrainer(**shared, args=args, train_dataset=rows)


def concatenated(texts: list[tuple[Example, Example]], pad: int) -> dict[str, torch.Tensor]:
    """A batch of TRL's older trainers."""
    batch = {}
    for side, name in enumerate(("chosen", "rejected")):
        made = collate([pair[side] for pair in texts], None, pad)
        lengths = np.array([len(pair[side]) for pair in texts])
        mask = (np.arange(made.ids.shape[1])[None] < lengths[:, None]).astype(np.int64)
        batch[f"{name}_input_ids"] = torch.from_numpy(made.ids)
        batch[f"{name}_labels"] = torch.from_numpy(made.labels)
        batch[f"{name}_attention_mask"] = torch.from_numpy(mask)
    return batch


def peer_loss(
    name: str, peer: Any, texts: list[tuple[Example, Example]], liked: Any, reference: np.ndarray
) -> torch.Tensor:
    """TRL's loss of rows, by its own functions."""
    if name in ("orpo", "simpo"):
        batch = concatenated(texts, peer.processing_class.pad_token_id)
        if name == "simpo":
            return peer.get_batch_loss_metrics(peer.model, batch)[0]
        # The first part is over the answers here, over prompts too in TRL: the paper's is added.
        _, _, logits, _, over_prompts = peer.concatenated_forward(peer.model, batch)
        loss, _ = peer.get_batch_loss_metrics(peer.model, batch)
        labels = batch["chosen_labels"][:, 1:]
        flat = logits[:, : labels.shape[1]].flatten(0, 1)
        ours = torch.nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=-100)
        return loss - over_prompts + ours
    peer.precompute_ref_logps = True
    examples = []
    for number, (one, other) in enumerate(texts):
        prompt, first = parts(one)
        row: dict[str, Any] = {"prompt_ids": prompt}
        if name == "kto":
            row |= {"completion_ids": first, "label": bool(liked[number])}
            row |= {"ref_logps": reference[number, 0], "ref_KL_logps": reference[number, 1]}
            row["KL_completion_ids"] = list(other.ids[len(prompt) :])
            assert list(other.ids[: len(prompt)]) == prompt
        else:
            row |= {"chosen_ids": first, "rejected_ids": parts(other)[1]}
            row |= {"ref_chosen_logps": reference[number, 0]}
            row |= {"ref_rejected_logps": reference[number, 1]}
        examples.append(row)
    peer.data_collator.max_length = None
    return peer._compute_loss(peer.model, peer.data_collator(examples), False)


class PlainHead:
    """The log likelihoods of TRL's head in plain PyTorch: its own kernel needs Triton and a GPU."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, targets: Any, *_: Any) -> tuple[Any, ...]:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        logp = logits.log_softmax(-1)
        figures = [torch.zeros_like(logp[:, 0].detach()) for _ in range(3)]
        return logp.gather(1, targets[:, None])[:, 0], *figures, logits.argmax(-1) == targets


class Compared:
    """A row set, an objective and TRL's trainer over the same model and adapter."""

    def __init__(self, name: str, source: Path, folder: Path, double: bool) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        loaded = load_model(str(source))
        dataset = encoded(rated() if name == "kto" else CHATS, loaded.tokenizer, folder)
        assert len(dataset.items) == len(CHATS)
        self.texts = texts_of(dataset)
        random = np.random.default_rng(1).normal(-60, 4, (len(self.texts), 2))
        self.reference = random.astype(np.float32).astype(np.float64)
        self.liked = None
        if name == "kto":
            self.liked = np.array([bool(item.liked) for item in dataset.items])
        self.tokens = np.array([[text.trained_tokens for text in pair] for pair in self.texts])
        self.objective = objective(name, **SETTINGS[name])
        flat = [text for pair in self.texts for text in pair]
        self.batch = collate(flat, None, loaded.tokenizer.pad_token_id)
        self.session = session(loaded)
        save_adapter(self.session.adapter(), folder / "adapter")
        base: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model = PeftModel.from_pretrained(
            in_double(base) if double else base, folder / "adapter", is_trainable=True
        )
        model = model.double() if double else model
        peer = trainer(name, model, loaded.tokenizer, folder)
        theirs = peer_loss(name, peer, self.texts, self.liked, self.reference)
        theirs.backward()
        self.loss = theirs.item()
        self.gradients = {
            key.removeprefix("base_model.model.").replace(".default", ""): one.grad.double().numpy()
            for key, one in peer.model.named_parameters()
            if one.grad is not None and ".default." in key
        }

    def weigh(self, nll: np.ndarray) -> tuple[float, np.ndarray]:
        scores = Scores(-nll.reshape(-1, 2), self.reference, self.tokens, self.liked)
        graded = self.objective.grade(scores)
        return graded.loss, -graded.coefficients.reshape(-1)


@pytest.fixture(autouse=True)
def plain_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", PlainHead)


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_adapter_gradients_are_trl_s(name: str, source: Path, tmp_path: Path) -> None:
    peer = Compared(name, source, tmp_path, double=False)
    loss, gradients = learned(peer.session, peer.batch.ids, peer.batch.labels, peer.weigh)
    assert loss == pytest.approx(peer.loss, rel=1e-5)
    assert gradients.keys() == peer.gradients.keys()
    assert max(errors(gradients, peer.gradients).values()) < 1e-5


@pytest.mark.parametrize(
    "name", sorted(SETTINGS.keys() - {"orpo"})
)  # whose odds TRL has in float32
def test_coefficients_in_float64_are_trl_s(name: str, source: Path, tmp_path: Path) -> None:
    peer = Compared(name, source, tmp_path, double=True)
    losses = []

    def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen = labels[:, 1:]
        logp = logits[:, :-1].log_softmax(-1).gather(2, chosen.clamp(min=0)[..., None])[..., 0]
        nll = -(logp * (chosen >= 0)).sum(1)
        loss, weights = peer.weigh(nll.detach().numpy())
        losses.append(loss)
        return (nll * torch.from_numpy(weights)).sum()

    tensors = peer.session.adapter().tensors
    scale = peer.session.config.scale
    rows = peer.batch.ids, peer.batch.labels
    _, gradients = exact(load_model(str(source)), tensors, scale, *rows, weighted)
    assert losses[0] == pytest.approx(peer.loss, rel=1e-9)
    assert max(errors(gradients, peer.gradients).values()) < 1e-9
