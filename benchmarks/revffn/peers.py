"""The ways to fine-tune that RevFFN's benchmarks compare, one step of each; and models of a shape
to do it on.

The ordinary ways compute each block again in the backward pass (torch's checkpoint) and take the
same tiled loss and the same expert kernels as ours. LoRA, DoRA and (IA)3 are peft's, LOMO is SGD in
hooks that run as soon as a parameter's gradient is known, GaLore updates in the same place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.galore import GaloreAdamW, Projected
from ondevice.core.registry import method_config
from ondevice.methods.revffn.torch import RevffnSession
from ondevice.methods.revffn.updates import Updates
from ondevice.models.registry import family_for
from ondevice.nn.cross_entropy import shift, token_nll

RATE = 1e-5
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = ("lora", "dora", "ia3")
ORDINARY = ("sft", "sft-fused", "lomo", "galore", *PEFT)

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
SHAPES: dict[str, tuple[str, int, tuple[int, ...], tuple[int, ...]]] = {
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", 24, (2048, 5632, 16, 16, 151936), (60, 4, 1408, 5632)),
    "narrow": ("llama", 12, (256, 512, 4, 2, 2048), ()),
    "tiny-moe": ("qwen2_moe", 3, (64, 128, 4, 2, 512), (6, 2, 32, 128)),
}
"""model_type; layers; hidden, intermediate, heads, key and value heads, vocabulary; of a mixture of
experts: experts, active ones, width of one, width of the shared one. Heads are not tied."""


class Way(Protocol):
    """One way to fine-tune a model that is there."""

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, rate: float) -> float:
        """One optimizer step; gives the loss before it."""
        ...

    def close(self) -> None:
        """Leave the model as it was, but for its weights."""
        ...


class Reversible:
    """RevFFN with any of its settings."""

    def __init__(self, loaded: Any, seed: int = 0, **settings: Any) -> None:
        self.session = RevffnSession(
            loaded, method_config("revffn", {"skip_stage1": True, **settings}), seed
        )

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, rate: float) -> float:
        return self.session.step(ids, labels, step, rate).loss

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.session.evaluate(ids, labels)

    def close(self) -> None:
        self.session.loaded.model.requires_grad_(False)

    def resume(self) -> None:
        """Open it again after `close`."""
        self.session.active = None


class Ordinary:
    """The ordinary network with a checkpoint a block.

    Args:
        kind: of ORDINARY. `sft` keeps all gradients until its update, `sft-fused` updates in hooks.
        optimizer: of `sft` and `sft-fused`, by RevFFN's own updates.
        rank: of the adapters and of GaLore.
        refresh: steps between GaLore's decompositions; 0: its subspaces are drawn once and stay,
            for measurements of only memory and time.
        recompute: False keeps activations.
        loss_tiles: of the cross-entropy.
    """

    def __init__(
        self, loaded: Any, kind: str, optimizer: str = "adafactor", rank: int = 16, refresh: int = 200, seed: int = 0,
        recompute: bool = True, loss_tiles: int = 8,
    ) -> None:  # fmt: skip
        self.loss_tiles = loss_tiles
        self.loaded, self.family, self.kind, self.recompute = loaded, loaded.family, kind, recompute
        self.peft: Any = None
        self.hooks: list[Any] = []
        self.steps, self.rate = 0, 0.0
        if kind in PEFT:
            self._adapters(rank, seed)
            return
        model = loaded.model
        self.named = {
            name: p.requires_grad_()
            for name, p in model.named_parameters()
            if ".mlp.gate." not in name
        }
        if kind == "galore":
            inside = [p for name, p in self.named.items() if p.ndim > 1 and ".layers." in name]
            chosen = {id(p) for p in inside}
            self.galore = GaloreAdamW(inside, [], rank, refresh or 1 << 30)
            self.entries = {id(entry.weight): entry for entry in self.galore.entries}
            if not refresh:
                self.galore.count = 1  # the step that would decompose is behind it
                for entry in self.galore.entries:
                    entry.basis = _drawn(entry, rank)
            rest = {name: p for name, p in self.named.items() if id(p) not in chosen}
            config = method_config("revffn", {"optimizer": "adafactor"})
            self.updates = Updates(config, rest, seed)
        else:
            config = method_config("revffn", {"optimizer": "sgd" if kind == "lomo" else optimizer})
            self.updates = Updates(config, self.named, seed)
        if kind != "sft":
            self.hooks = [
                p.register_post_accumulate_grad_hook(self._hook(name))
                for name, p in self.named.items()
            ]

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, rate: float) -> float:
        self.steps, self.rate = step, rate
        loss = self.loss(ids, labels)
        loss.backward()
        if self.kind == "sft":
            for name, parameter in self.named.items():
                self._update(name, parameter)
        elif self.peft is not None:
            self.adamw.param_groups[0]["lr"] = rate
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
        elif self.kind == "galore":
            self.galore.count += 1
        return float(loss.detach())

    def loss(self, ids: np.ndarray, labels: np.ndarray) -> Tensor:
        """Mean loss of int64 [B, T], nats a labelled token."""
        nll, count = self._nll(ids, labels)
        return nll.sum() / count.sum()

    @torch.no_grad()
    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `Session.evaluate`."""
        nll, count = self._nll(ids, labels)
        return nll.float().cpu().numpy(), count.cpu().numpy().astype(np.int64)

    def _nll(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        family, device = self.family, self.family.head_weight.device
        ids_BT, labels_BT = (torch.from_numpy(array).to(device) for array in (ids, labels))
        h = family.embed(ids_BT)
        position = family.positions(ids.shape[1], h.device, h.dtype)
        if not h.requires_grad and self.recompute and torch.is_grad_enabled():
            h.requires_grad_()  # or a checkpoint has nothing to do
        for i in range(family.dims.layers):
            if self.recompute and torch.is_grad_enabled():
                h = checkpoint(family.block, i, h, position, use_reentrant=False)
            else:
                h = family.block(i, h, position)
        states, targets = shift(family.final_norm(h), labels_BT)
        nll = (
            token_nll(states, family.head_weight, targets, self.loss_tiles)
            .view(ids.shape[0], -1)
            .sum(1)
        )
        return nll, (labels_BT[:, 1:] >= 0).sum(1)

    def _hook(self, name: str) -> Any:
        return lambda parameter: self._update(name, parameter)

    @torch.no_grad()
    def _update(self, name: str, parameter: nn.Parameter) -> None:
        if self.kind == "galore" and id(parameter) in self.entries:
            self.galore.step_one(self.entries[id(parameter)], self.rate)
            return
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.updates.apply(name, gradient, self.steps + 1, self.rate)

    def _adapters(self, rank: int, seed: int) -> None:
        import peft

        names = {
            name.rpartition(".")[2]
            for name, m in self.loaded.model.named_modules()
            if isinstance(m, nn.Linear)
        }
        linears = [name for name in LINEARS if name in names]
        if self.kind == "ia3":
            settings: Any = peft.IA3Config(
                target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
            )
        else:
            settings = peft.LoraConfig(
                r=rank,
                lora_alpha=rank,
                target_modules=linears,
                lora_dropout=0.0,
                use_dora=self.kind == "dora",
            )
        torch.manual_seed(seed)
        self.peft = peft.get_peft_model(self.loaded.model, settings)
        trained = [p for p in self.peft.parameters() if p.requires_grad]
        self.adamw = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)

    def resume(self) -> None:
        """Open `sft` again after `close`."""
        for parameter in self.named.values():
            parameter.requires_grad_()

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if self.peft is not None:
            self.peft.unload()
        self.loaded.model.requires_grad_(False)


def _drawn(entry: Projected, rank: int) -> Tensor:
    """An orthonormal basis of the right size that knows nothing of gradients: float32 [..., r,
    min(m, n)]."""
    *outer, rows, columns = entry.weight.shape
    side = min(rows, columns)
    numbers = torch.randn(side, min(rank, side), device=entry.weight.device)
    basis = torch.linalg.qr(numbers).Q.T.contiguous()
    return basis.expand(*outer, *basis.shape).contiguous()


def open_way(loaded: Any, name: str, **settings: Any) -> Way:
    """A way by name: `revffn` with settings of the method, or one of ORDINARY."""
    return (
        Reversible(loaded, **settings) if name == "revffn" else Ordinary(loaded, name, **settings)
    )


def make(
    shape: str, layers: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Any:
    """A model as methods take it (`LoadedModel` without tokenizer): normal weights of deviation
    0.02, norms 1."""
    import transformers

    model_type, depth, sizes, experts = SHAPES[shape]
    family = family_for(model_type, shape)
    fields: dict[str, Any] = dict(zip(FIELDS, sizes, strict=True))
    fields |= dict(zip(EXPERTS, experts, strict=True)) if experts else {}
    fields |= {
        "num_hidden_layers": layers or depth,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    config = transformers.AutoConfig.for_model(
        model_type, **family.tiny_config(**fields), attn_implementation="sdpa"
    )
    name = {"llama": "LlamaForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM"}[model_type]
    with torch.device("meta"):
        model: Any = getattr(transformers, name)(config)
    torch.manual_seed(0)
    for path, parameter in list(model.named_parameters()):
        parent, _, leaf = path.rpartition(".")
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        plain = leaf == "bias" or "norm" in parent.rpartition(".")[2]
        value = value.fill_(float(leaf != "bias")) if plain else value.normal_(0, 0.02)
        model.get_submodule(parent)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.eval()
    built = family(model)
    return SimpleNamespace(model=model, family=built, dims=built.dims, source=None, tokenizer=None)
