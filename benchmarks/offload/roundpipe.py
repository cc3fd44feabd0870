"""RoundPipe, a peer of benchmarks/slideformer/step.py: updates in step, or one step late. LGPL, and
never part of the package: `pip install --no-deps --target FOLDER roundpipe beartype`, FOLDER on
PYTHONPATH. It knows Llama's layers, and takes all GPUs that its process sees."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload.model import make_family
from benchmarks.offload.peers import RATE

MICRO_BATCHES = 2
"""On one GPU; its own default is one more than there are GPUs."""


def _shim() -> None:
    """RoundPipe 0.1.1 calls transformers' mask with names of arguments that transformers 5 no
    longer has."""
    import transformers.masking_utils as masks

    real: Any = masks.create_causal_mask
    if getattr(real, "of_ondevice", False):
        return

    def causal(
        config: Any, input_embeds: Any = None, cache_position: Any = None, **others: Any
    ) -> Any:
        return real(
            config=config,
            **({} if input_embeds is None else {"inputs_embeds": input_embeds}),
            **others,
        )

    causal.of_ondevice = True  # pyright: ignore[reportFunctionMemberAccess]
    masks.create_causal_mask = causal


class RoundPipe:
    """float32 masters and moments in host memory, layers in turns on the GPU; with `late` a step
    computes with weights that lack the last update."""

    def __init__(
        self, shape: str, block: Tensor, late: bool, micro_batches: int = MICRO_BATCHES
    ) -> None:
        _shim()
        import roundpipe as installed  # pyright: ignore[reportMissingImports]

        roundpipe: Any = installed

        model: Any = make_family(shape, block).model
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(True)
        model.config.use_cache = False
        config = roundpipe.RoundPipeRunConfig(num_microbatch=micro_batches)
        self.late, self.micro_batches, self.version = late, micro_batches, version("roundpipe")
        self.model: Any = roundpipe.wrap_model_to_roundpipe(
            model, optim_dtype=torch.float32, model_run_config=config
        )
        self.optimizer: Any = roundpipe.optim.Adam(self.model.optim_parameters(), lr=RATE)

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        where = torch.from_numpy(ids)
        loss: Any = self.model.forward_backward(
            input_kwargs={"input_ids": where, "labels": where}, label=None,
            loss_fn=lambda out, _: out.loss / self.micro_batches,
        )  # fmt: skip
        value = float(loss[0] if isinstance(loss, list | tuple) else loss)
        self.model.step(self._update, is_async=self.late)
        return value

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flush(self) -> None:
        torch.cuda.synchronize()

    close = flush
