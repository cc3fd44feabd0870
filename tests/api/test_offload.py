"""`ondevice.offload` in loops of one's own, and in trainers of transformers and TRL, against their own runs."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ondevice
from ondevice.api.offload import offload
from ondevice.core.errors import ConfigError, TrainingError
from ondevice.models.load import tiny_model
from tests.offload.test_whole import decoder
from tests.warm import PRELOADED, Warm

RATE, STEPS = 1e-3, 6
FAST: dict[str, Any] = {"lr": RATE, "eps": 1e-6, "device": "cpu", "threads": 1}


def batches(count: int = STEPS, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(0, 250, (rows, 11))
        mask = torch.ones_like(ids)
        labels = ids.clone()
        ids[1, 8:], mask[1, 8:], labels[1, 8:] = 256, 0, -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def in_memory(model: Any, clip: float | None = None) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a loop as people write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-6, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, STEPS)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, dict(model.named_parameters())


def ours(model: Any, **settings: Any) -> tuple[list[float], Any]:
    engine = offload(model, **FAST | settings)
    schedule = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 1.0, 0.5, STEPS)
    losses = []
    for batch in batches():
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        schedule.step()
        losses.append(float(loss))
    return losses, engine


@pytest.mark.parametrize("kind", ["llama", "tied", "gemma2", "gpt2", "gpt_oss"])
def test_a_loop_has_the_losses_of_the_model_in_memory(kind: str) -> None:
    if kind in ("llama", "tied"):
        model = tiny_model("llama", layers=3, tied=kind == "tied").model.float()
    else:
        model = decoder(kind)
    model.requires_grad_(True)
    expected, weights = in_memory(copy.deepcopy(model))
    losses, engine = ours(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    engine.close()
    after, _ = in_memory(model)  # the module has its values and its own passes back
    again = {name: value for name, value in weights.items()}
    assert dict(model.named_parameters()).keys() == again.keys()
    assert after[0] < expected[0]


def test_the_name_of_the_package_is_the_function() -> None:
    model = tiny_model("llama").model.float()
    engine = ondevice.offload(model, optimizer="adamw", **FAST)
    engine.close()


def test_clipping_is_that_of_all_gradients() -> None:
    model = tiny_model("qwen2", layers=2, tied=False).model.float().requires_grad_(True)
    expected, _ = in_memory(copy.deepcopy(model), clip=0.05)
    losses, engine = ours(model, max_grad_norm=0.05)
    engine.close()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("resident", [False, True])
def test_groups_decay_and_freeze_as_torch_s(moments: str, resident: bool) -> None:
    """No decay on norms and biases, a frozen block, a frozen embedding."""
    model = tiny_model("qwen2", layers=3, tied=False).model.float().requires_grad_(True)
    model.model.layers[1].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    reference = copy.deepcopy(model)
    learns = [p for p in reference.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learns if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in learns if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=1e-6)
    expected = []
    for batch in batches():
        loss = reference(**batch).loss
        loss.backward()
        if not resident:
            torch.nn.utils.clip_grad_norm_(learns, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))
    settings: dict[str, Any] = {"max_grad_norm": 0.5}
    if resident:  # which cannot wait for a global norm
        settings = {"resident_layers": 2, "resident_tables": True}
    engine = offload(
        model, **FAST, decayed="matrices", weight_decay=0.5, moments=moments, **settings
    )
    losses = []
    for batch in batches():
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    weights = engine.state_dict()
    engine.close()
    close = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}[moments]
    np.testing.assert_allclose(losses, expected, rtol=close)
    for name, value in reference.named_parameters():
        if not value.requires_grad:
            assert torch.equal(weights[name], value), name
        elif moments == "float32":
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_nothing_follows_a_backward_pass_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers are updated as if the step were not clipped, and its norm will never be known."""
    model = tiny_model("llama", layers=4).model.float().requires_grad_(True)
    engine = offload(model, **FAST, max_grad_norm=1e6, presumed_layers=4)
    (batch,) = batches(1)
    send = engine.engine.window.send_layer

    def interrupted(i: int, slot: Any) -> None:
        if i == 1:
            raise KeyboardInterrupt
        send(i, slot)

    monkeypatch.setattr(engine.engine.window, "send_layer", interrupted)
    loss = engine(batch)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    del loss
    engine.engine.transfers.submit("a pause", lambda: None, 1 << 30).wait()
    for call in (
        engine.state_dict,
        engine.optimizer.state_dict,
        lambda: engine(batch),
        engine.close,
    ):
        with pytest.raises(TrainingError) as error:
            call()
        assert error.value.message == "the last backward pass was interrupted"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gradients_of_several_batches_add_up(tied: bool, clip: float | None, decay: float) -> None:
    model = tiny_model("llama", layers=3, tied=tied).model.float().requires_grad_(True)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=RATE, eps=1e-6, weight_decay=decay)
    presumed = 3 * tied  # as if a step were not clipped, until the norm is known
    engine = offload(
        model, **FAST, max_grad_norm=clip, weight_decay=decay, presumed_layers=presumed
    )
    for number, batch in enumerate(batches(9, rows=2)):
        last = number % 3 == 2
        expected = reference(**batch).loss / 3
        expected.backward()
        if last:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        loss = engine(batch) / 3
        engine.backward(loss, update=last)
        if last:
            engine.step()
        assert float(loss) == pytest.approx(float(expected), rel=1e-5), number
    weights = engine.state_dict()
    engine.close()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_dropout_draws_the_numbers_of_the_forward_pass_again() -> None:
    model = decoder("gpt2").train()
    assert model.config.resid_pdrop > 0
    torch.manual_seed(7)
    batch = batches(1)[0]
    reference = copy.deepcopy(model)
    torch.manual_seed(7)
    loss = reference(**batch).loss
    loss.backward()
    engine = offload(model, **FAST | {"optimizer": "adamw"})
    torch.manual_seed(7)
    ours = engine(batch)
    engine.backward(ours)
    engine.step()
    engine.flush()
    assert float(ours) == pytest.approx(float(loss), rel=1e-6)
    states = engine.engine.store.states
    for unit in engine.engine.units.layers:
        for piece in unit.pieces:
            span = slice(piece.offset, piece.offset + piece.numel)
            moment = states[unit.index].moments.m[span].view(piece.shape) / 0.1
            expected = dict(reference.named_parameters())[piece.name].grad
            torch.testing.assert_close(moment, expected, rtol=1e-3, atol=1e-6)
    engine.close()


def test_a_loss_of_ones_own_and_an_evaluation_between() -> None:
    model = tiny_model("llama", tied=False).model.float()
    engine = offload(model, **FAST)
    batch = batches(1)[0]
    with torch.no_grad():
        before = engine(batch)
    outputs = model(input_ids=batch["input_ids"])
    probability = outputs.logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])
    (-probability.mean()).backward()
    engine.optimizer.step()
    with torch.no_grad():
        assert float(engine(batch)) < float(before)
    engine.close()


def test_passes_out_of_order_are_refused() -> None:
    engine = offload(tiny_model("llama").model.float(), **FAST)
    batch = batches(1)[0]
    with pytest.raises(TrainingError):
        engine.step()
    dropped = engine(batch)
    del dropped  # its graph is gone, so another may follow
    loss = engine(batch)
    with pytest.raises(TrainingError) as caught:
        engine(batch)
    assert "waits for its backward pass" in caught.value.message
    engine.backward(loss)
    with pytest.raises(TrainingError):
        engine(batch)
    engine.step()
    with pytest.raises(ConfigError):
        engine(inputs_embeds=torch.zeros(1, 2, 3))
    engine.close()
    engine = offload(tiny_model("llama").model.float(), **FAST, resident_layers=1)
    with pytest.raises(ConfigError):
        engine.backward(engine(batch), update=False)
    engine.close()


def test_a_state_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model = tiny_model("llama", tied=False).model.float()
    fresh = copy.deepcopy(model)
    engine = offload(model, **FAST)
    data = batches(4)

    def steps(one: Any, some: list[Any]) -> list[float]:
        losses = []
        for batch in some:
            loss = one(batch)
            one.backward(loss)
            one.step()
            losses.append(float(loss))
        return losses

    steps(engine, data[:2])
    torch.save(engine.optimizer.state_dict(), tmp_path / "optimizer.pt")
    expected = steps(engine, data[2:])
    engine.save_pretrained(tmp_path / "model")
    engine.close()
    again = offload(fresh, **FAST)
    again.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert steps(again, data[2:]) == expected
    weights = again.state_dict()
    again.close()
    from transformers import AutoModelForCausalLM

    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())


SCRIPT = """
import json, sys
import datasets, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import {kind}Config, {kind}Trainer

folder, out = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
rows = datasets.Dataset.from_list([{row} for i in range(24)])
args = {kind}Config(
    output_dir=out, per_device_train_batch_size=2, max_steps=3, learning_rate=1e-3, logging_steps=1,
    report_to=[], use_cpu=True, bf16=False, save_steps=3, max_grad_norm=0.5, weight_decay=0.5,
    gradient_accumulation_steps=2, {settings}
)
trainer = {kind}Trainer(
    model=model, args=args, train_dataset=rows, {more}
    processing_class=AutoTokenizer.from_pretrained(folder),
)
trainer.train()
print(json.dumps([entry for entry in trainer.state.log_history if "loss" in entry]))
"""
STOCK: dict[str, dict[str, str]] = {
    "SFT": {
        "row": """{"text": f"row {i} of words {i * i}"}""",
        "settings": "max_length=12,",
    },
    "DPO": {
        "row": """{"prompt": f"row {i}", "chosen": f" is {i * i}", "rejected": f" was {i + 7}"}""",
        "settings": "max_length=24, precompute_ref_log_probs={alike},",
    },
    "GRPO": {
        "row": """{"prompt": f"row {i}"}""",
        "settings": "num_generations=4, max_completion_length=6, beta=0.1, num_iterations=2,",
        "more": "reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],",
    },
}
"""TRL's scripts by its trainer: the rows, and what that trainer needs. The rows are few and short:
nine tenths of a script's time are its loss in Triton's interpreter, a program a token. DPO's
reference is a model of its own, or this one before it trains; GRPO's answers are drawn by the model
while it slides."""
TRACKED = {"SFT": "loss", "DPO": "rewards/margins", "GRPO": "kl"}


@pytest.fixture(scope="module")
def trl() -> Iterator[Warm]:
    """Processes that begin with TRL's trainers imported, which takes ten seconds of a processor."""
    pytest.importorskip("trl")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
        # A process with Arrow's thread cannot fork.
        patch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")
        trainers = [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "grpo")]
        processes = Warm(Path(folder), (*PRELOADED, "datasets", *trainers))
        yield processes
        processes.close()


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("SFT", True),
        pytest.param("DPO", True, marks=pytest.mark.nightly),
        ("DPO", False),
        ("GRPO", False),
    ],
)
def test_a_stock_trl_script_has_its_own_losses(
    kind: str, tied: bool, tmp_path: Path, trl: Warm
) -> None:
    """The script is TRL's; two lines differ, and its fused kernels run in Triton's interpreter. The
    tied DPO model is its own reference."""
    from transformers import AutoModelForCausalLM

    tiny = tiny_model("llama", layers=3, tied=tied)
    tiny.model.float().save_pretrained(tmp_path / "model")
    tiny.tokenizer.save_pretrained(tmp_path / "model")
    stock = SCRIPT
    for name, text in ({"kind": kind, "more": ""} | STOCK[kind] | {"alike": str(tied)}).items():
        stock = stock.replace(f"{{{name}}}", text)
    changed = stock.replace("import json, sys", "import json, sys\nfrom ondevice import offloaded")
    changed = changed.replace(f"trainer = {kind}Trainer(", f"trainer = offloaded({kind}Trainer)(")
    assert len(set(changed.splitlines()) - set(stock.splitlines())) == 2
    logs = {}
    for name, text in (("stock", stock), ("ours", changed)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        done = subprocess.run(
            [trl.python, tmp_path / f"{name}.py", tmp_path / "model", tmp_path / name],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        logs[name] = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(logs["ours"]) == 3
    for key in ("loss", "grad_norm", TRACKED[kind]):
        losses, expected = ([entry[key] for entry in logs[name]] for name in ("ours", "stock"))
        assert any(expected), key
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    saved = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "checkpoint-3")
        for name in ("stock", "ours")
    ]
    for a, b in zip(*(model.parameters() for model in saved), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_loop_on_a_gpu_has_the_losses_of_the_model_in_memory(clip: float | None) -> None:
    model = tiny_model("llama", layers=4, tied=False).model.float().requires_grad_(True)
    reference = copy.deepcopy(model).to("cuda")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=RATE, eps=1e-6, weight_decay=0.0)
    engine = offload(model, **FAST | {"device": "cuda"}, max_grad_norm=clip)
    for batch in batches():
        there = {name: value.to("cuda") for name, value in batch.items()}
        expected = reference(**there).loss
        expected.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        loss = engine(there)
        engine.backward(loss)
        engine.step()
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    engine.close()
