"""Folders of small models and files whose commands are refused, for the tests of hints and of dry runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from ondevice.models.tiny import tiny_tokenizer
from tests.cli.command import classes, write_rows
from tests.models.decoders import tiny_config

ENCODER: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 322, "type_vocab_size": 1, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 257,
}  # fmt: skip


def decoder(folder: Path, kind: str) -> Path:
    """A model of random weights whose blocks are not known here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = tiny_config(kind, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def encoder(folder: Path, kind: str) -> Path:
    """BERT, of which there is no classifier here, or RoBERTa."""
    from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

    model = RobertaForMaskedLM(RobertaConfig(**ENCODER))
    if kind == "bert":
        model = BertForMaskedLM(BertConfig(**ENCODER))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make(folder: Path) -> Path:
    """Write the models and files that refused commands name."""
    for kind in ("stablelm", "mamba"):
        decoder(folder / kind, kind)
    for kind in ("bert", "roberta"):
        encoder(folder / kind, kind)
    classes(folder / "rows.jsonl")
    write_rows(
        folder / "chat.jsonl", [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(8)]
    )
    with (folder / "foreign.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["Nr", "Betreff", "Nachricht", "Abteilung"])
        for n in range(12):
            text = f"Eine lange Frage zu meiner Rechnung Nummer {n}"
            table.writerow([n, f"Frage {n}", text, ["Rechnung", "Technik"][n % 2]])
    (folder / "empty.jsonl").write_text("")
    (folder / "odd.jsonl").write_text(json.dumps({"foo": 1}) + "\n")
    (folder / "a file").write_text("text")
    return folder
