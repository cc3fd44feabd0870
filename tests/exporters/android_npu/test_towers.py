"""The language model of a checkpoint that also reads images, as an NPU's blocks in QNN's simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.api.open import open_artifact
from tests.cli.command import CommandLine
from tests.methods.reference import batch
from tests.models import checkpoints
from tests.program_tables import MODELS
from tests.programs import needs_qnn

pytest.importorskip("executorch.exir")
NAME = "gemma-3-4b-it"


@pytest.mark.nightly
def test_a_tower_s_gradients_in_the_simulator_are_float32_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_qnn()
    text = MODELS["wide gemma3_text"]
    sizes = {
        "hidden_size": text["hidden"],
        "num_hidden_layers": text["layers"],
        "num_attention_heads": text["heads"],
        "num_key_value_heads": text["kv_heads"],
        "intermediate_size": 2 * text["hidden"],
        **{key: text[key] for key in ("head_dim", "sliding_window", "query_pre_attn_scalar")},
    }
    kind, fields = checkpoints.CHECKPOINTS[NAME]
    monkeypatch.setitem(checkpoints.CHECKPOINTS, NAME, (kind, {**fields, "text_config": sizes}))
    folder = checkpoints.save_checkpoint(tmp_path / "model", NAME)
    settings = {
        "method.optimizer": "sgd",
        "method.rank": 4,
        "export.lengths_tokens": [24],
        "export.batch_size": 1,
        "export.eval_batch_size": 1,
        "export.check_steps": 1,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ("--target", "android-npu", "--method", "mesp", "-o", tmp_path / "artifact", "--json")
    done = CommandLine(capsys)("export", "-m", folder, *words, *options)
    assert done.code == 0, done.err
    check = done.json["check"]
    assert check["backend"] == "qnn-htp-simulator"
    assert check["min_gradient_cosine"] >= 0.999 and check["max_rel_loss_error"] <= 2e-3
    session = open_artifact(tmp_path / "artifact")
    session.step(*batch(1, 24, seed=0), 0, 1e-2)
    adapter = session.adapter()
    assert adapter is not None and not adapter.changes_nothing
    assert all("language_model.layers." in linear for linear in adapter.linears)
