"""TrainStream, a peer of benchmarks/slideformer/large.py: `pip install --no-deps --target FOLDER
trainstream`, FOLDER on PYTHONPATH. It compiles its CUDA code when it is first imported."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload.model import make_family
from benchmarks.offload.peers import RATE, head_loss, synchronize, tensors_of


class TrainStream:
    """float32 parameters, gradients and moments in host memory, bf16 computation under autocast;
    its planner decides which layers stay on the GPU, within the process's limit."""

    def __init__(self, shape: str, block: Tensor, device: str, liger: bool) -> None:
        if torch.device(device).type != "cuda":
            raise RuntimeError("not run: TrainStream needs a GPU")
        import trainstream as installed  # pyright: ignore[reportMissingImports]

        trainstream: Any = installed
        model: Any = make_family(shape, block, torch.float32, "cpu", liger).model
        model.requires_grad_(True)
        model.config.use_cache = False
        keep = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keep)
        model.train()
        self.device, self.liger, self.version = device, liger, version("trainstream")
        adamw = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        self.model, self.optimizer = trainstream.wrap(
            model, adamw, device=device, blocks=list(model.model.layers)
        )
        self.report: Any = trainstream.memory_report

    @property
    def choice(self) -> str:
        """What its planner has chosen."""
        paged = self.report(self.model).get("params", {}).get("paged_blocks", [])
        return f"{len(paged)} layers paged, {self.optimizer.moment_dtype} moments"

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        where, targets = tensors_of(ids, labels, self.device)
        head = self.model.lm_head
        head.forward = lambda normed: normed  # its hooks are on the whole model, which is called
        try:
            with torch.autocast("cuda", torch.bfloat16):
                normed = self.model(input_ids=where, use_cache=False).logits
        finally:
            del head.forward
        loss = head_loss(normed, head.weight, targets, self.liger)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def flush(self) -> None:
        synchronize(self.device)

    def close(self) -> None:
        self.flush()
