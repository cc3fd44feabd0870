"""The engine on a GPU against AdamW in memory on the same GPU: bf16 computation, float32 masters, ten steps.

Also a script, for a machine that is at hand for minutes: `python -m tests.methods.slideformer.test_gpu cuda`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

STEPS, RATE = 10, 1e-3
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 128}  # fmt: skip
SMALL = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
"""On the CPU, where bfloat16 may be slow."""
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "tied": (True, {}),
    "micro-batches, disk": (False, {"micro_batch_size": 2, "disk_fraction": 0.5}),
    "tied, micro-batches, exact clipping, disk": (
        True,
        {"micro_batch_size": 2, "max_grad_norm": 0.5, "clip": "global", "disk_fraction": 0.5},
    ),
    "vocabulary in tiles, smallest window": (
        False,
        {"loss_tiles": 3, "window": 2, "gradient_buffers": 2},
    ),
    "torch's update": (False, {"optimizer": "torch"}),
}


def make_family(tied: bool, sizes: dict[str, Any]) -> Any:
    """The same random bf16 model at every call."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from ondevice.models.families.qwen2 import FAMILY

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(**sizes, tie_word_embeddings=tied, attn_implementation="sdpa")
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.requires_grad_(False)
    return FAMILY(model.eval())


def in_memory(
    tied: bool, sizes: dict[str, Any], config: Any, data: list[np.ndarray], device: str
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, first and last masters of plain autograd and torch.optim.AdamW."""
    import torch
    from torch.nn.functional import cross_entropy

    family = make_family(tied, sizes)
    family.model.to(device)
    parameters = dict(family.model.named_parameters())
    masters = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    first = {name: master.cpu().clone() for name, master in masters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=RATE, weight_decay=config.weight_decay)
    losses = []
    for ids in data:
        for name, parameter in parameters.items():
            parameter.data, parameter.grad = masters[name].to(torch.bfloat16), None
            parameter.requires_grad_(True)
        size, total = config.micro_batch_size or len(ids), 0.0
        for low in range(0, len(ids), size):
            where = torch.from_numpy(ids[low : low + size]).to(device)
            h = family.embed(where)
            position = family.positions(ids.shape[1], device, h.dtype)
            for i in range(family.dims.layers):
                h = family.block(i, h, position)
            logits = (family.final_norm(h) @ family.head_weight.t()).float()
            loss = cross_entropy(
                logits[:, :-1].flatten(0, 1), where[:, 1:].flatten(), reduction="sum"
            )
            loss = loss / ids[:, 1:].size
            loss.backward()
            total += float(loss.detach())
        for name, master in masters.items():
            master.grad = parameters[name].grad.float()
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), config.max_grad_norm)
        optimizer.step()
        losses.append(total)
    return losses, first, {name: master.cpu() for name, master in masters.items()}


def compare(device: str, tied: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Largest difference of a loss; of all movement of parameters the share that differs; segments by step."""
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.offload.engine import OffloadEngine

    random = np.random.default_rng(0)
    sizes, length = (SMALL, 16) if device == "cpu" else (SIZES, 64)
    data = [random.integers(0, sizes["vocab_size"], (4, length)) for _ in range(STEPS)]
    config = SlideformerConfig(weight_decay=0.01, timeout_s=60.0, kernels="torch", **options)
    expected, first, masters = in_memory(tied, sizes, config, data, device)
    engine = OffloadEngine(make_family(tied, sizes), config, device)
    segments, losses = [], []
    try:
        for step, ids in enumerate(data):
            losses.append(engine.step(ids, ids, step, RATE))
            segments.append(engine.device.segments())
        engine.flush()
        actual = engine.store.masters()
    finally:
        engine.close()
    moved = sum(float((masters[name] - first[name]).square().sum()) for name in first)
    apart = sum(float((masters[name] - actual[name]).square().sum()) for name in first)
    return {
        "losses": losses,
        "loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "parameter_difference": (apart / moved) ** 0.5,
        "segments": segments,
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_ten_steps_match_the_reference_without_allocations(device: str, case: str) -> None:
    _hold(compare(device, *CASES[case]))


def _hold(seen: dict[str, Any]) -> None:
    assert seen["loss_difference"] < 0.02, seen
    assert seen["parameter_difference"] < 0.2, seen
    assert len(set(seen["segments"])) == 1, seen


def main() -> int:
    """Every case; the exit status is the number that failed."""
    failed = 0
    for case, (tied, options) in CASES.items():
        try:
            seen = compare(sys.argv[1], tied, options)
            difference, moved = seen["loss_difference"], seen["parameter_difference"]
            print(
                f"{case}: losses differ by {difference:.2e}, movement by {moved:.3f}, segments {seen['segments']}"
            )
            _hold(seen)
        except Exception as error:
            failed += 1
            print(f"{case}: FAILED: {type(error).__name__}: {str(error)[:400]}", flush=True)
    print("engine smoke:", "all passed" if not failed else f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
