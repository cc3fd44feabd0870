"""What a run takes that names no method and no precision."""

from __future__ import annotations

import pytest

from ondevice.api.runfile import RunConfig
from ondevice.core.capabilities import HalfOnGpu, OwnPrecision
from ondevice.core.registry import metal, methods, spec_of
from ondevice.models.choice import choose_method
from ondevice.training import choices
from ondevice.training.choices import Precision, has_bfloat16_units, place, precision_of
from ondevice.training.identity import with_decisions


@pytest.mark.parametrize(
    ("source", "target", "exact", "trains"),
    [
        ("tiny:llama", None, True, "adapter"),
        ("tiny:qwen2", "android-npu", True, "adapter"),
        ("tiny:gpt2", None, False, "adapter"),
        ("tiny:qwen2_moe", None, True, "adapter"),
        (
            "tiny:phi3",
            None,
            True,
            "adapter",
        ),  # its fused layers have other names than the default's
        ("no/such-model-anywhere", None, True, "adapter"),
    ],
)
def test_the_method_is_the_first_that_takes_the_model(source, target, exact, trains) -> None:
    name, sentence = choose_method(source, None, target)
    spec = next(spec for spec in methods() if spec.name == name)
    assert (spec.preference == 1, spec.trains) == (exact, trains)
    assert sentence.startswith(f"method {name}: {spec.summary}")


def test_a_run_says_the_method_only_where_it_was_chosen() -> None:
    chosen = RunConfig.load(None, {"model.source": "tiny:llama", "method.rank": 3})
    assert chosen.chosen and chosen.method.rank == 3 and spec_of(chosen.method).preference == 1
    assert chosen.model_copy(update={"train": chosen.train}).chosen == chosen.chosen
    assert not RunConfig.load(None, {"model.source": "tiny:llama", "method": "lora"}).chosen
    assert RunConfig.load(None, {"model.source": "tiny:gpt2"}).method != chosen.method


def chosen_precision(config: RunConfig) -> Precision:
    placement = place(config.method, config.train, config.model.device)
    return precision_of(config.model, config.method, placement)


def test_a_cpu_without_bfloat16_units_computes_in_float32(monkeypatch) -> None:
    monkeypatch.setattr(choices, "has_bfloat16_units", lambda: False)
    for name in (spec.name for spec in methods() if spec.capability(OwnPrecision)):
        settings = {"model.source": "tiny:llama", "model.device": "cpu", "method.name": name}
        config = RunConfig.load(None, settings)
        taken = chosen_precision(config)
        assert (
            taken.method.compute == "float32" and taken.notes[0] == "precision: float32 on the CPU"
        )
        assert "method.compute=bfloat16" in taken.notes[1]
        asked = RunConfig.load(None, settings | {"method.compute": "bfloat16"})
        assert chosen_precision(asked).method.compute == "bfloat16"
        monkeypatch.setattr(choices, "has_bfloat16_units", lambda: True)
        assert chosen_precision(config).method.compute == "bfloat16"
        monkeypatch.setattr(choices, "has_bfloat16_units", lambda: False)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, False),
        ({"neon": True}, False),
    ],
)
def test_the_precision_follows_the_flags_of_the_processor(monkeypatch, flags, expected) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: flags, raising=False)
    assert has_bfloat16_units() is expected


def test_mlx_without_metal_says_what_it_is_for() -> None:
    pytest.importorskip("mlx.core")
    config = RunConfig.load(
        None, {"model.source": "tiny:llama", "method.name": "mesp", "train.backend": "mlx"}
    )
    said = chosen_precision(config).notes
    assert metal() or "MLX is meant for a Mac" in said[-1]


def test_a_gpu_gives_bfloat16_to_methods_that_ask_for_it(monkeypatch) -> None:
    halved = [spec.name for spec in methods() if spec.capability(HalfOnGpu)]
    assert "revffn" in halved
    for name in halved:
        settings = {"model.source": "tiny:llama", "method.name": name}
        open_config = RunConfig.load(None, settings)
        for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
            monkeypatch.setattr(choices, "resolve_device", lambda _, device=device: device)
            taken = chosen_precision(open_config)
            assert taken.model.dtype == dtype and dtype in taken.notes[0]
        monkeypatch.setattr(choices, "resolve_device", lambda _: "cuda")
        named = RunConfig.load(None, settings | {"model.dtype": "float32"})
        assert chosen_precision(named).model.dtype == "float32"
        resumed = with_decisions(open_config, {"model.dtype": "float32"})
        assert chosen_precision(resumed).model.dtype == "float32"
    other = RunConfig.load(None, {"model.source": "tiny:llama", "method.name": "full"})
    assert chosen_precision(other).model.dtype == "float32"
