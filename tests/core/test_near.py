"""A misspelt name finds the one that was meant."""

import pytest

from ondevice.core.near import nearest

FLAGS = ("--rank", "--dry-run", "--epochs", "--learning-rate", "--max-length", "--micro-batch-size", "--model",
         "--steps", "--batch-size", "--report-to", "--patience", "--warmup-steps")  # fmt: skip


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--lora-rank", "--rank"),
        ("--num-train-epochs", "--epochs"),
        ("--epoch", "--epochs"),
        ("--max_seq_length", "--max-length"),
        ("--gradient-accumulation-steps", "--micro-batch-size"),
        ("--early-stopping", "--patience"),
        ("--warmup", "--warmup-steps"),
        ("--learning_rate", "--learning-rate"),
        ("--modle", "--model"),
        ("--zzz", None),
    ],
)
def test_a_flag_finds_its_neighbour_by_words_before_letters(given, meant) -> None:
    assert nearest(given, FLAGS) == meant


def test_epochs_is_not_eps() -> None:
    assert (
        nearest("epochs", ("eps", "rank")) is None
        and nearest("epoch", ("eps", "epochs")) == "epochs"
    )
