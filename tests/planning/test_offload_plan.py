"""The plan of a method that offloads: one time, and both memories."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ondevice.core.errors import ConfigError
from ondevice.core.registry import method_config
from ondevice.models.families.qwen2 import FAMILY
from ondevice.planning.estimate import plan

DIMS = FAMILY.dims_from_config(
    {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    }
)  # fmt: skip


def planned(**settings: Any) -> Any:
    config = method_config("slideformer", settings)
    return plan(DIMS, config, batch_size=4, length_tokens=1024, device="h100")


@pytest.mark.parametrize("settings", [{}, {"moments": "int8"}, {"window": 4}], ids=str)
def test_a_plan_has_one_time(settings: dict[str, Any]) -> None:
    """What `auto` says of a step is what the plan and its JSON say."""
    made = planned(**settings)
    [sentence] = [note for note in made.notes if note.startswith("auto: ")]
    said = re.search(r"about ([\d.]+) s a step, bound by (\w+)", sentence)
    assert said is not None
    assert float(said[1]) == pytest.approx(made.step_s, rel=6e-3)
    assert f"bound by {said[2]}" in made.step_basis
    assert made.to_dict()["step_s_estimate"] == made.step_s


def test_host_memory_that_is_too_small_is_no_fit_on_a_preset() -> None:
    whole = planned()
    assert whole.fits and whole.host_usable_bytes is None
    short = planned(host_memory_bytes="24GiB")
    assert short.host_usable_bytes == 24 * 2**30
    assert not short.fits
    roomy = planned(host_memory_bytes="400GiB")
    assert roomy.fits and roomy.host_usable_bytes == 400 * 2**30


def test_auto_decides_within_the_host_memory() -> None:
    """Fewer gradients wait in less memory, and more layers stay on the GPU."""
    sizes = [planned(host_memory_bytes=f"{gib}GiB").host_total_bytes for gib in (72, 400)]
    assert sizes[0] <= 72 * 2**30 and sizes[0] <= sizes[1]


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError):
        method_config("slideformer", {"host_memory_bytes": "much"})
