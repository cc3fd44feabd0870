"""DeepSpeed's ZeRO with offload, a peer of benchmarks/slideformer: on the ranks that are there, or
alone.

DeepSpeed is an sdist that compiles its AdamW at run time: `DS_BUILD_OPS=0 pip install
--no-build-isolation --no-deps --target FOLDER deepspeed-*.tar.gz`, FOLDER on PYTHONPATH,
`DS_SKIP_CUDA_CHECK=1`, and a CUDA compiler.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.offload.model import make_family
from benchmarks.offload.peers import RATE, head_loss, synchronize, tensors_of

ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}
"""What `torchrun` would say to one process."""


class _Head(nn.Module):
    """The head with its loss: ZeRO-3 gathers only a module's own parameters."""

    def __init__(self, weight: nn.Parameter, liger: bool) -> None:
        super().__init__()
        self.weight, self.liger = weight, liger

    def forward(self, normed: Tensor, targets: Tensor) -> Tensor:
        return head_loss(normed, self.weight, targets, self.liger)


class _Whole(nn.Module):
    def __init__(self, model: Any, liger: bool) -> None:
        super().__init__()
        self.body, self.head = model.model, _Head(model.lm_head.weight, liger)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state, targets)


class Zero:
    """bf16 computation, float32 masters and moments in host memory (stage 2), weights, too (stage
        3); DeepSpeed's CPU AdamW after the backward pass. Bucket sizes are those that transformers sets
        for `auto`. `form`: `superoffload`, which updates buckets before the norm is known, or `zenflow`,
    which updates most of the gradients a few steps late."""

    def __init__(
        self, shape: str, block: Tensor, device: str, liger: bool, stage: int = 3, form: str = ""
    ) -> None:
        try:
            import deepspeed  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise RuntimeError(
                "not installed: DeepSpeed is an sdist that compiles at run time"
            ) from None
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)

        model: Any = make_family(shape, block, torch.bfloat16, "cpu", liger).model
        hidden, cuda = model.config.hidden_size, torch.device(device).type == "cuda"
        for parameter in model.parameters():  # views of one block are not for a partition
            parameter.data = parameter.data.clone()
        model.requires_grad_(True)
        keep = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keep)
        model.train()
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
        place = {"device": "cpu", "pin_memory": cuda}
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
            "zero_optimization": {
                "stage": stage, "offload_optimizer": place, **({"offload_param": place} if stage == 3 else {}),
                "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": hidden * hidden,
                "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
                "stage3_param_persistence_threshold": 10 * hidden, "sub_group_size": 1_000_000_000,
            },
        }  # fmt: skip
        zero: dict[str, Any] = settings["zero_optimization"]
        if form == "superoffload":
            zero["offload_optimizer"] = {**place, "super_offload": True, "cpuadam_cores_perc": 0.8}
        if form == "zenflow":
            zero["zenflow"] = {"topk_ratio": 0.05, "select_strategy": "step", "select_interval": 16,
                               "update_interval": 4, "overlap_step": True}  # fmt: skip
        self.device, self.version = device, deepspeed.__version__
        self.engine: Any = deepspeed.initialize(model=_Whole(model, liger), config=settings)[0]

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        loss = self.engine(*tensors_of(ids, labels, self.device))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def flush(self) -> None:
        synchronize(self.device)

    def close(self) -> None:
        self.flush()
        self.engine.destroy()
