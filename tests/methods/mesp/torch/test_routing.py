"""A mixture cut at its experts: router and shared expert by hand, each expert by its own function,
gathered and added up by the host, against autograd in float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from ondevice.core.registry import method_config
from ondevice.exporters.executorch.experts import Experts
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.mesp.experts import ExpertBackward, ExpertForward, expert_rows
from ondevice.methods.mesp.torch.block import Block
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.models import tiny_model
from tests.methods.reference import in_double

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "normalised": ("qwen3_moe", {}),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "a shared expert": ("qwen2_moe", {}),
    "normalised, and a shared expert": ("qwen2_moe", {"norm_topk_prob": True}),
    "one expert a token": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "factors of scores and branches": ("granitemoe", {}),
    "sigmoids with a bias": ("lfm2_moe", {"num_dense_layers": 0, "routed_scaling_factor": 1.7}),
    "sigmoids as they are": (
        "lfm2_moe",
        {"num_dense_layers": 0, "norm_topk_prob": False, "use_expert_bias": False},
    ),
    "every expert": ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 3}),
}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "next to an MLP": ("gemma4_text", {"enable_moe_block": True, "num_experts": 5}),
    "three of five": (
        "gemma4_text",
        {"enable_moe_block": True, "top_k_experts": 3, "num_experts": 5},
    ),
}
TOKENS = 23


class _Mixture:
    """Layer 0 of a tiny model in float64, cut at its experts."""

    def __init__(self, form: str) -> None:
        family, sizes = (FORMS | BESIDE)[form]
        self.loaded = tiny_model(family, 3, **sizes)
        self.loaded.model.double()
        self.functions = BlockFunctions(self.loaded, method_config("mesp", {"rank": 2}))
        count = self.loaded.dims.experts
        self.blocks = Blocks(Stages(self.loaded.dims, GraphKernels(torch.zeros(0))), None)
        names = {f"expert_forward_{rows}": None for rows in (1, 4, 8)}
        spec: Any = SimpleNamespace(methods=names, experts=count, expert_layers=[0, 1])
        self.experts = Experts(spec, self.call, 10)
        self.called: list[tuple[str, int]] = []
        self.norm = dict(self.loaded.dims.traits.norms)["before_mlp"]

    def tensors(self) -> dict[str, Tensor]:
        parameters = self.loaded.model.state_dict()
        names = (one.name for one in self.functions.frozen())
        return {name: parameters[name.format(layer=0)].detach() for name in names}

    def call(self, name: str, given: dict[str, Tensor], layer: int, expert: int) -> Any:
        self.called.append((name, expert))
        mlp = self.module("mlp", layer)
        weights = mlp.experts.gate_up_proj[expert].detach(), mlp.experts.down_proj[expert].detach()
        assert given["hidden"].shape[0] == int(name.rpartition("_")[2])
        if "forward" in name:
            x = ExpertForward(self.functions)(given["hidden"], given["routing"], *weights)
            return {"hidden": x}
        parts = (given["hidden"], given["gradient"], given["routing"])
        gx, gw = ExpertBackward(self.functions)(*parts, *weights)
        return {"gradient": gx, "routing_gradient": gw}

    def module(self, part: str, layer: int = 0) -> Any:
        return self.loaded.family.layer(layer).get_submodule(self.loaded.dims.traits.path(part))

    def block(self) -> Any:
        tensors = self.tensors()
        norm = tensors[f"model.layers.{{layer}}.{self.norm}.weight"]
        return Block({"before_mlp": norm}, {}, routed=self.functions._routed(tensors))

    def plain(self, m: Tensor) -> Tensor:
        """The middle and its mixture, every expert on every token; transformers' own modules
        compute norm and router in float32."""
        mlp = self.module("mlp")
        dims: Any = self.loaded.dims
        config: Any = self.loaded.model.config
        scale = torch.rsqrt(m.square().mean(-1, keepdim=True) + dims.norm_eps)
        n = m * scale * self.loaded.family.layer(0).get_submodule(self.norm).weight
        logits = linear(n, self.module("mlp.gate").weight)
        if dims.family == "lfm2_moe":
            p = logits.sigmoid()
            experts = (p + getattr(mlp, "expert_bias", 0.0)).topk(dims.active_experts, -1)[1]
            chosen = p.gather(1, experts) * config.routed_scaling_factor
            if config.norm_topk_prob:
                chosen = chosen / (p.gather(1, experts).sum(-1, keepdim=True) + 1e-6)
        elif dims.family == "granitemoe":
            chosen, experts = logits.topk(dims.active_experts, -1)
            chosen = chosen.softmax(-1) * config.residual_multiplier
        else:
            chosen, experts = logits.softmax(-1).topk(dims.active_experts, -1)
            if config.norm_topk_prob:
                chosen = chosen / chosen.sum(-1, keepdim=True)
        y = m
        for expert in range(dims.experts):
            gate, up = linear(n, mlp.experts.gate_up_proj[expert]).chunk(2, -1)
            out = linear(silu(gate) * up, mlp.experts.down_proj[expert])
            y = y + out * (chosen * (experts == expert)).sum(-1, keepdim=True)
        if not dims.shared_intermediate:
            return y
        one = mlp.shared_expert
        inner = silu(linear(n, one.gate_proj.weight)) * linear(n, one.up_proj.weight)
        share = linear(n, mlp.shared_expert_gate.weight).sigmoid()
        return y + share * linear(inner, one.down_proj.weight)


@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_cut_at_its_experts_has_the_gradients_of_autograd(form: str) -> None:
    mixture = _Mixture(form)
    random = torch.Generator().manual_seed(1)
    m, g = (torch.randn(TOKENS, 64, dtype=torch.float64, generator=random) for _ in range(2))
    leaf = m.clone().requires_grad_(True)
    wanted = mixture.plain(leaf)
    (gradient,) = torch.autograd.grad(wanted, leaf, g)

    block = mixture.block()
    y = mixture.blocks._mlp(block, m)
    normed, routing = block.routed.taken()
    outputs = {"hidden": y.clone(), "normed": normed, "routing": routing}
    y = mixture.experts.forward(0, outputs)
    torch.testing.assert_close(y, wanted.detach(), rtol=1e-12, atol=1e-12)
    block.routed.gradients = mixture.experts.backward(0, outputs, g)
    gm = mixture.blocks._mlp_backward(block, m, g.clone(), lambda *_: None)
    torch.testing.assert_close(gm, gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", BESIDE)
def test_experts_cut_from_the_mlp_next_to_them_have_the_gradients_of_autograd(form: str) -> None:
    """Of all that follows attention; a router's softmax goes through float32 in transformers."""
    mixture = _Mixture(form)
    in_double(mixture.loaded.model)
    random = torch.Generator().manual_seed(1)
    m, g = (torch.randn(TOKENS, 64, dtype=torch.float64, generator=random) for _ in range(2))
    p = torch.randn(TOKENS, 32, dtype=torch.float64, generator=random)
    family: Any = mixture.loaded.family
    layer = family.layer(0)
    leaf = m.clone().requires_grad_(True)
    dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(leaf)))
    y = leaf + layer.post_feedforward_layernorm(dense + family.experts_of(0, leaf))
    gated = gelu(layer.per_layer_input_gate(y), approximate="tanh") * p
    y = y + layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
    wanted = y * layer.layer_scalar
    (gradient,) = torch.autograd.grad(wanted, leaf, g)

    functions = mixture.functions
    adapter = torch.zeros(functions.layer_size, dtype=torch.float64)
    frozen = tuple(mixture.tensors().values())
    block = replace(functions.block(adapter, frozen, {}), layer_input=p)
    stages = mixture.blocks.stages
    assert stages.behind(block, mixture.blocks._mlp(block, m), p) is m
    routed: Any = block.routed
    normed, routing, dense = routed.taken()
    outputs = {"normed": normed, "routing": routing}
    routed.total = mixture.experts.total(0, outputs)
    parts = (m, dense, routed.total)
    received = stages.joined_elsewhere(block, *parts, p)
    torch.testing.assert_close(received, wanted.detach(), rtol=1e-6, atol=1e-6)
    gsum = stages.joined_elsewhere_backward(block, parts, p, g.clone())
    routed.gradients = mixture.experts.backward(0, outputs, gsum)
    gm = mixture.blocks._mlp_backward(block, m, g.clone(), lambda *_: None)
    torch.testing.assert_close(gm, gradient, rtol=1e-6, atol=1e-6)


def test_only_chosen_experts_are_called_and_padding_chooses_none() -> None:
    mixture = _Mixture("normalised")
    block = mixture.block()
    m = torch.randn(TOKENS, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = mixture.blocks._mlp(block, m)
    normed, routing = block.routed.taken()
    mixture.experts.begin()
    outputs = {"hidden": y.clone(), "normed": normed, "routing": routing}
    received = mixture.experts.forward(0, outputs, 1)
    wanted = set(routing[0].nonzero()[:, 0].tolist())
    assert {expert for _, expert in mixture.called} == wanted
    assert len(wanted) == 2
    torch.testing.assert_close(received[1:], y[1:], rtol=0, atol=0)
    assert mixture.experts.figures(5) == {"read": 2, "all": 12, "bytes": 20, "bytes_per_token": 4}


def test_rows_go_into_the_smallest_function_and_many_rows_into_several() -> None:
    mixture = _Mixture("every expert")
    block = mixture.block()
    m = torch.randn(TOKENS, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    hidden = mixture.blocks._mlp(block, m).clone()
    normed, routing = block.routed.taken()
    for rows, sizes in {23: [8, 8, 8], 9: [8, 1], 3: [4], 1: [1]}.items():
        mixture.called.clear()
        outputs = {"hidden": hidden.clone(), "normed": normed, "routing": routing}
        mixture.experts.forward(0, outputs, rows)
        names = [f"expert_forward_{size}" for size in sizes]
        assert [name for name, expert in mixture.called if expert == 1] == names


@pytest.mark.parametrize(
    ("most", "rows"), [(1, (1,)), (16, (1, 4, 16)), (100, (1, 4, 16, 64, 100))]
)
def test_functions_of_an_expert_take_no_more_rows_than_a_pass_has(
    most: int, rows: tuple[int, ...]
) -> None:
    assert expert_rows(most) == rows
    assert expert_rows(1000) == (1, 4, 16, 64, 256)
