"""`LspAdamW` against torch's AdamW, and training with it: tiny language models and a RoBERTa classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402

from benchmarks.lsp.adamw import LspAdamW  # noqa: E402
from ondevice.core.errors import ModelError  # noqa: E402
from ondevice.methods.lsp.config import ProjectorConfig  # noqa: E402
from ondevice.methods.lsp.linear import is_linear  # noqa: E402
from ondevice.methods.lsp.matrix import Group, Plane  # noqa: E402
from ondevice.methods.lsp.projector import Projector  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from tests.methods.lsp.dense import near, normal, sides  # noqa: E402

KEEP = 1e9
"""A threshold that no bias reaches."""


def config(subspace: int = 24, nonzeros: int = 4, **settings: Any) -> ProjectorConfig:
    return ProjectorConfig(subspace=subspace, nonzeros=nonzeros, **{"learned": True, **settings})


def language_model(family: str = "llama", **sizes: Any) -> Any:
    model = tiny_model(family, layers=1, **sizes).family.model
    model.requires_grad_(True)
    return model.eval()  # without dropout


def tokens(seed: int = 0, rows: int = 4, length: int = 9) -> Tensor:
    return torch.randint(0, 255, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def train(model: Any, optimizer: Any, steps: int, rate: float) -> list[float]:
    """Losses on one batch."""
    losses = []
    for _ in range(steps):
        actual = loss(model, tokens())
        actual.backward()
        optimizer.step(rate)
        losses.append(float(actual.detach()))
    return losses


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Autograd's, of a model without an optimizer."""
    loss(model, ids).backward()
    by_name = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return by_name


def entries(model: Any, optimizer: LspAdamW) -> list[tuple[str, Any, Any, Any, Any]]:
    """Name, parameter, matrix and moments."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[id(p)], p, matrix, m, v) for p, matrix, m, v in optimizer.entries]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_full_subspace_matches_pytorch_adamw(family: str) -> None:
    plain, model = language_model(family), language_model(family)
    optimizer = LspAdamW(model, config(512), beta1=0.8, beta2=0.95, eps=1e-7, weight_decay=0.1)
    reference = torch.optim.AdamW(
        plain.parameters(), betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1, fused=True
    )
    assert optimizer.attached == [] and all(matrix is None for _, matrix, _, _ in optimizer.entries)
    for step in range(6):
        rate = 1e-2 / (1 + step)
        reference.param_groups[0]["lr"] = rate
        for one in (plain, model):
            loss(one, tokens(step)).backward()
        reference.step()
        reference.zero_grad()
        optimizer.step(rate)
        assert all(p.grad is None for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name


def signed_permutation(size: int, seed: int) -> Projector:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:, None]
    return Projector(size, size, torch.device("cpu"), order, normal(size, 1, seed=seed).sign())


@pytest.mark.parametrize("bias", [True, False])
def test_signed_permutations_match_pytorch_adamw(bias: bool) -> None:
    """AdamW knows no order and no sign of its coordinates."""
    size = 17
    plain, model = nn.Linear(size, size, bias=bias), nn.Linear(size, size, bias=bias)
    model.load_state_dict(plain.state_dict())
    optimizer = LspAdamW(model, config(size - 1, threshold=KEEP), weight_decay=0.1)
    weight, matrix, _, _ = optimizer.entries[0]
    assert weight is model.weight and matrix is not None and optimizer.attached == [model]
    matrix.put(signed_permutation(size, 1), signed_permutation(size, 2))
    matrix.group = Group(Plane(), "cpu")  # another, for these are larger than drawn ones
    matrix.starts = matrix.group.add(matrix)
    matrix.gradient = torch.zeros(size, size)
    optimizer.entries[0] = (weight, matrix, torch.zeros(size, size), torch.zeros(size, size))
    reference = torch.optim.AdamW(plain.parameters(), weight_decay=0.1)
    for step in range(8):
        rate = 1e-2 / (1 + step)
        reference.param_groups[0]["lr"] = rate
        for one in (plain, model):
            (
                one(normal(5, size, seed=step)).tanh() * normal(5, size, seed=100 + step)
            ).sum().backward()
        reference.step()
        reference.zero_grad()
        optimizer.step(rate)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", {}), ("llama", {"tied": False}), ("gpt2", {}), ("qwen2", {"intermediate": 77})],
)
def test_first_moments_are_the_projected_gradients_of_autograd(
    family: str, sizes: dict[str, Any]
) -> None:
    """Of every parameter: attached layers, tables that are looked up in, tied ones, and what is not projected. A change
    lies in the subspace."""
    model = language_model(family, **sizes)
    wanted, before = (
        gradients(model, tokens()),
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )
    optimizer = LspAdamW(model, config(threshold=KEEP), weight_decay=0.5)
    loss(model, tokens()).backward()
    optimizer.step(0.1)
    assert {module for module in model.modules() if is_linear(module)} - set(
        optimizer.attached
    ) <= {model.lm_head}
    assert (model.lm_head in optimizer.attached) == (sizes.get("tied") is False)
    kinds = set()
    for name, p, matrix, m, v in entries(model, optimizer):
        gradient = wanted[name].double()
        kinds.add(matrix is None)
        if matrix is not None:
            p_table, q_table = sides(matrix.left, matrix.right)
            gradient = p_table.T @ gradient @ q_table
            change = p.detach().double() - 0.95 * before[name].double()
            assert float(change.norm()) > 0.01 * float(before[name].norm())
            inside = (
                p_table
                @ torch.linalg.pinv(p_table)
                @ change
                @ (q_table @ torch.linalg.pinv(q_table)).T
            )
            near(inside, change, 1e-5)
        near(m, 0.1 * gradient, 1e-5)
        near(v, 0.001 * gradient.square(), 1e-5)
    assert kinds == {True, False}


@pytest.mark.parametrize("kind", ["llama", "tied gpt2", "drawn only"])
def test_the_loss_falls(kind: str) -> None:
    family, sizes = ("gpt2", {}) if "gpt2" in kind else ("llama", {"tied": False})
    model = language_model(family, **sizes)
    settings = {"learned": False, "check_every": 10} if kind == "drawn only" else {"check_every": 7}
    optimizer = LspAdamW(model, config(**settings), seed=1)
    losses = train(model, optimizer, 30, 5e-3)
    assert losses[-1] < 0.6 * losses[0]
    projected = {name for name, _, matrix, _, _ in entries(model, optimizer) if matrix is not None}
    assert set(optimizer.bias_checks) == projected and projected
    assert all(look.before >= 0 for look in optimizer.bias_checks.values())


def test_refreshes_come_at_intervals_and_carry_the_moments() -> None:
    model = language_model()
    optimizer = LspAdamW(model, config(check_every=3, threshold=0.0), seed=1)
    turns = []
    for _ in range(7):
        old = {
            name: (sides(matrix.left, matrix.right), m.clone(), v.clone())
            for name, _, matrix, m, v in entries(model, optimizer)
            if matrix
        }
        count, gradient = optimizer.count, {}
        loss(model, tokens(count)).backward()
        for name, _, matrix, m, v in entries(model, optimizer):
            if matrix is None or matrix.watch is not None or count % 3:
                continue
            p, q = sides(matrix.left, matrix.right)
            (old_p, old_q), first, second = old[name]
            a, b, look = p.T @ old_p, old_q.T @ q, optimizer.bias_checks[name]
            assert look.energy > 0 and abs(look.energy - 1) > 1e-3
            near(m, look.momentum * a @ first.double() @ b, 1e-4)
            near(v, look.energy * a.square() @ second.double() @ b.square(), 1e-4)
            gradient[name] = True
        assert bool(gradient) == (count % 3 == 0)
        optimizer.step(1e-3)
        turns.append({matrix.turn for _, matrix, _, _ in optimizer.entries if matrix is not None})
    assert turns == [{1}, {1}, {1}, {2}, {2}, {2}, {3}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_leaves_projectors_and_moments(
    value: float,
) -> None:
    model = language_model(tied=False)
    optimizer = LspAdamW(model, config(check_every=1, threshold=0.0), seed=1)
    train(model, optimizer, 2, 1e-3)
    projected = [
        (matrix, m, v) for _, _, matrix, m, v in entries(model, optimizer) if matrix is not None
    ]
    old = [
        (matrix.left, matrix.right, matrix.turn, m.clone(), v.clone()) for matrix, m, v in projected
    ]
    (loss(model, tokens()) * value).backward()
    attached = {id(module.weight) for module in optimizer.attached}
    seen = 0
    for name, p, matrix, m, v in entries(model, optimizer):
        if matrix is None or id(p) not in attached:
            continue
        left, right, turn, first, second = old[[one for one, _, _ in projected].index(matrix)]
        look = optimizer.bias_checks[name]
        assert look.before != look.before and look.after is None and look.carry is None
        assert matrix.left is left and matrix.right is right and matrix.turn == turn == 2
        assert torch.equal(m, first) and torch.equal(v, second)
        seen += 1
    assert seen == len(attached) > 0


def test_two_backward_passes_are_one_of_the_sum() -> None:
    """All matrices keep their projectors; a look would see the first backward pass alone."""
    models = [language_model(), language_model()]
    optimizers = [LspAdamW(model, config(threshold=KEEP), seed=1) for model in models]
    for step in range(3):
        first, second = tokens(2 * step), tokens(2 * step + 1)
        loss(models[0], first).backward()
        loss(models[0], second).backward()
        (loss(models[1], first) + loss(models[1], second)).backward()
        pairs = list(zip(optimizers[0].entries, optimizers[1].entries, strict=True))
        for (p, one, _, _), (q, other, _, _) in pairs:
            actual, wanted = (
                (p.grad, q.grad) if one is None or other is None else (one.gradient, other.gradient)
            )
            if actual is not None and wanted is not None:
                near(actual, wanted, 1e-4)
        for optimizer in optimizers:
            optimizer.step(1e-3)
        for (p, _, m, _), (q, _, other_m, _) in pairs:
            near(m, other_m, 1e-4)
            near(p.detach(), q.detach(), 1e-3)


def test_frozen_parameters_stay() -> None:
    model = language_model(tied=False)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name or "mlp" in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = LspAdamW(model, config(), weight_decay=0.1)
    train(model, optimizer, 2, 1e-2)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "q_proj" in name or "mlp" in name}
    assert len(changed) == len(optimizer.attached) == 4
    optimizer.close()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == changed


def roberta() -> Any:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    roberta = RobertaConfig(
        vocab_size=99, max_position_embeddings=24, type_vocab_size=1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=1, **sizes,
    )  # fmt: skip
    roberta.num_labels = 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RobertaForSequenceClassification(roberta).train()


def test_a_roberta_classifier_trains() -> None:
    model = roberta()
    random = torch.Generator().manual_seed(0)
    ids, labels = (
        torch.randint(2, 99, (12, 10), generator=random),
        torch.randint(0, 3, (12,), generator=random),
    )
    mask = torch.ones_like(ids)
    ids[3, 6:], mask[3, 6:] = 1, 0
    optimizer = LspAdamW(model, config(16, check_every=10), weight_decay=0.01)
    layers = {module for module in model.modules() if isinstance(module, nn.Linear)}
    assert len(layers) == 2 * 6 + 2 and set(optimizer.attached) == layers
    losses = []
    for _ in range(30):
        actual = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        actual.backward()
        assert all(module.weight.grad is None for module in layers)
        optimizer.step(3e-3)
        losses.append(float(actual.detach()))
    assert losses[-1] < 0.5 * losses[0]
    tables = {
        "roberta.embeddings.word_embeddings.weight",
        "roberta.embeddings.position_embeddings.weight",
    }
    assert tables <= set(optimizer.bias_checks) and len(optimizer.bias_checks) >= len(layers) + 2


def test_layers_that_lend_their_weights_train_too() -> None:
    """The output projection of `nn.MultiheadAttention` never runs its own forward pass."""
    model = nn.MultiheadAttention(20, 2)
    optimizer = LspAdamW(model, config(8), seed=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = normal(5, 3, 20)
    (model(x, x, x)[0] * normal(5, 3, 20, seed=1)).sum().backward()
    optimizer.step(1e-2)
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name


def test_close_restores_the_modules() -> None:
    model = language_model(tied=False)
    before = {module: (module.forward, set(vars(module))) for module in model.modules()}
    wanted = gradients(model, tokens())
    optimizer = LspAdamW(model, config())
    assert any(module.forward != before[module][0] for module in model.modules())
    optimizer.close()
    assert all((module.forward, set(vars(module))) == before[module] for module in model.modules())
    actual = gradients(model, tokens())
    assert actual.keys() == wanted.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(actual[name], wanted[name]) for name in actual)


def test_a_model_with_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ModelError):
        LspAdamW(language_model().requires_grad_(False), config())


@pytest.mark.parametrize(
    "build", [language_model, lambda: language_model("gpt2").bfloat16()], ids=["llama", "bfloat16"]
)
def test_the_same_seed_gives_the_same_bits(build: Callable[[], Any]) -> None:
    collected = []
    for seed in (3, 3, 4):
        model = build()
        losses = train(
            model, LspAdamW(model, config(check_every=2), seed=seed, weight_decay=0.1), 5, 1e-2
        )
        collected.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert (
        collected[0][0] == collected[1][0]
        and collected[0][0][:1] == collected[2][0][:1]
        and collected[0][0] != collected[2][0]
    )
    assert all(torch.equal(p, q) for p, q in zip(collected[0][1], collected[1][1], strict=True))
