"""RoBERTa with a classification head: transformers' numbers, and training through the same run file as a decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from ondevice import train  # noqa: E402
from ondevice.api.chat import open_chat  # noqa: E402
from ondevice.api.evaluate import evaluate  # noqa: E402
from ondevice.core.errors import ConfigError, DataError, ModelError, Need  # noqa: E402
from ondevice.models import load_model, read_dims  # noqa: E402
from ondevice.models.families.classifier import Classifier  # noqa: E402
from ondevice.models.tiny import tiny_tokenizer  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 257,
}  # fmt: skip
WORDS = {"good": "yes", "bad": "no", "so-so": "perhaps"}
STEPS, ROWS = 6, 24


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that guesses hidden words, as the hub has RoBERTa; its table of positions begins behind token 256."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = RobertaConfig(**{**SIZES, "max_position_embeddings": 322})
    RobertaForMaskedLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"text": f"it was {word} {'indeed ' * (i % 3)}{i}", "label": label}
            for i in range(8) for word, label in WORDS.items()]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(source: Path, data: Path, out: Path, method: str, **settings: Any) -> Any:
    values = {
        "model.source": str(source), "model.classes": 3, "data.path": str(data), "data.eval_path": str(data),
        "train.out": str(out), "train.steps": STEPS, "train.batch_size": ROWS, "train.schedule": "constant",
        "train.eval_rows": 6, "method.name": method, "method.learning_rate": 1e-3,
        **{f"method.{name}": value for name, value in settings.items()},
    }  # fmt: skip
    return train(values)


ENGINE = {"compute": "float32", "optimizer": "torch", "threads": 1, "timeout_s": 30}
PROJECTED = {"subspace": 24, "nonzeros": 4, "check_every": 3, "threshold": 0.0}


def test_a_bert_without_a_head_gets_one_and_computes_what_transformers_computes(
    data: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = BertConfig(**{**SIZES, "max_position_embeddings": 322, "type_vocab_size": 2})
    BertModel(config).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    whole = run(tmp_path / "bert", data, tmp_path / "full", "full", weight_decay=0.0)
    other = run(tmp_path / "bert", data, tmp_path / "slide", "slideformer", **ENGINE)
    assert other.result.final_loss == pytest.approx(whole.result.final_loss, rel=1e-3)
    loaded = load_model(str(tmp_path / "full" / "model"))
    assert isinstance(loaded.family, Classifier)
    assert loaded.dims.parameters == sum(p.numel() for p in loaded.model.parameters())
    ids = torch.tensor([[1, 7, 30, 9, 256, 256], [5, 5, 80, 2, 77, 31]])
    with torch.no_grad():
        own = loaded.family.logits(loaded.family.hidden(ids)[:, 0])
        model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "full" / "model")
        theirs = model.eval()(input_ids=ids, attention_mask=(ids != 256).long()).logits
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)


def test_methods_that_train_all_parameters_agree(encoder: Path, data: Path, tmp_path: Path) -> None:
    """Full fine-tuning, SlideFormer, and LSP without projectors are the same AdamW; all take rows of other lengths."""
    whole = run(encoder, data, tmp_path / "full", "full", weight_decay=0.0)
    for name, settings in {
        "slideformer": {"micro_batch_size": 16},
        "lsp": {"project": False},
    }.items():
        other = run(encoder, data, tmp_path / name, name, **ENGINE, **settings)
        assert other.result.final_loss == pytest.approx(whole.result.final_loss, rel=1e-3), name
        assert other.result.evaluation.loss == pytest.approx(
            whole.result.evaluation.loss, rel=1e-3
        ), name
    assert whole.result.final_loss < whole.result.first_loss
    # What is written is transformers' own classifier, with the numbers of the evaluation.
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "slideformer" / "model")
    assert model.config.num_labels == 3
    again = evaluate(tmp_path / "slideformer" / "model", data, most_rows=6)
    assert again.loss == pytest.approx(other.result.evaluation.loss, rel=1e-2)
    assert (again.rows, again.tokens) == (6, 6)


def test_lsp_and_mezo_train_a_head(encoder: Path, data: Path, tmp_path: Path) -> None:
    projected = run(encoder, data, tmp_path / "lsp", "lsp", **ENGINE, **PROJECTED)
    assert projected.result.final_loss < projected.result.first_loss
    assert run(encoder, data, tmp_path / "mezo", "mezo").result.steps == STEPS


def test_it_computes_what_transformers_does(encoder: Path) -> None:
    """With rows of other lengths in a batch, and any number of classes."""
    loaded = load_model(str(encoder), classes=3)
    model, family = loaded.model, cast("Classifier", loaded.family)
    assert family.dims.classes == 3
    assert family.dims.parameters == model.num_parameters()
    ids = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))
    ids[0, 11:], ids[2, 5:] = 256, 256
    classes = torch.tensor([2, 0, 1])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=(ids != 256).long()).logits
        actual = family.logits(family.hidden(ids)[:, 0])
        nll = family.class_nll(family.hidden(ids)[:, 0], classes)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        nll, torch.nn.functional.cross_entropy(expected, classes, reduction="none")
    )
    other = load_model(str(encoder), classes=3)  # a new head is the same every time
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


def test_what_does_not_fit_is_refused(encoder: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(str(encoder))
    assert "--classes" in caught.value.expected
    with pytest.raises(ModelError) as caught:
        load_model("tiny:llama", classes=2)
    assert "encoder" in caught.value.expected
    assert read_dims(str(encoder)).classes
    with pytest.raises(ModelError) as caught:
        run(encoder, data, tmp_path / "lora", "lora")
    assert caught.value.needs is Need.CLASSIFIES
    with pytest.raises(DataError) as caught:
        train({"model.source": str(encoder), "model.classes": 2, "data.path": str(data), "method.name": "full",
               "train.out": str(tmp_path / "two")})  # fmt: skip
    assert "3 labels" in str(caught.value)
    load_model(str(encoder), classes=2).model.save_pretrained(tmp_path / "head")
    tiny_tokenizer().save_pretrained(tmp_path / "head")
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path / "head"), classes=3)
    assert caught.value.received == 3
    with pytest.raises(ModelError) as caught:
        open_chat(str(tmp_path / "head"))
    assert "ondevice eval" in caught.value.hint
    with pytest.raises(ConfigError):
        train({"model.source": str(encoder), "model.classes": 3, "data.path": str(data), "method.name": "full",
               "data.packing": True, "train.out": str(tmp_path / "packed")})  # fmt: skip
