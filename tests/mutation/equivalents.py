"""Mutants that no test on a CPU can tell from the original, and why."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "ondevice/nn/int8_kernel.py",
        "column = tl.program_id(1) * block + tl.arange(0, block)",
        "column = tl.program_id(1) * block ^ tl.arange(0, block)",
    ): "a block is a power of two, so no bit is in both",
    (
        "ondevice/methods/lsp/matrix.py",
        "if gradient.dtype == left.dtype:",
        "if gradient.dtype is left.dtype:",
    ): "PyTorch has one object of a type",
    (
        "ondevice/methods/lsp/matrix.py",
        "return checks_bias(self.config, step) or (self.follows and self.turn == 0)",
        "return checks_bias(self.config, step) or (self.follows and self.turn <= 0)",
    ): "turns are counted from 0",
    (
        "ondevice/methods/lsp/projector.py",
        "basis = basis * torch.where(upper.diagonal() < 0, -1.0, 1.0)",
        "basis = basis / torch.where(upper.diagonal() < 0, -1.0, 1.0)",
    ): "times and divided by 1 or -1 is the same",
    (
        "ondevice/methods/lsp/matrix.py",
        "if self.plane.shown.get(dtype) is self:",
        "if self.plane.shown.get(dtype) == self:",
    ): "a group equals itself only",
    (
        "runtime_ops/layer_adam.py",
        'if width < 1 or count % width or (kind == "int8" and width % TILE):',
        'if width < 1 or count % width or (kind >= "int8" and width % TILE):',
    ): "both other kinds, bfloat16 and float32, sort before int8",
    (
        "runtime_ops/layer_adam.py",
        'if kind == "int8":',
        'if kind >= "int8":',
    ): "both other kinds, bfloat16 and float32, sort before int8",
    (
        "runtime_ops/layer_adam.py",
        "action=_RECORD * (undo is not None),",
        "action=_RECORD & (undo is not None),",
    ): "the action is 1, or 0, by both",
    (
        "runtime_ops/layer_adam.py",
        "if count == 0 or (rows is not None and rows.numel() == 0):",
        "if count <= 0 or (rows is not None and rows.numel() == 0):",
    ): "a count is never below 0",
    (
        "runtime_ops/adam_state.py",
        'if moments.kind != "int8":',
        'if moments.kind < "int8":',
    ): "both other kinds, bfloat16 and float32, sort before int8",
    (
        "ondevice/data/batching.py",
        "pieces.append(rows[places[steps]].reshape(-1))",
        "pieces.append(rows[places[steps]].reshape(~1))",
    ): "NumPy takes any negative size as the one to be found",
    (
        "ondevice/data/batching.py",
        "for other in [other for other in self._orders if abs(other - epoch) > 1]:",
        "for other in [other for other in self._orders if abs(other - epoch) > 0]:",
    ): "a cache of orders, which are a function of the epoch: one is computed again",
    (
        "ondevice/data/encode.py",
        'ids = list(tokenizer(text, verbose=False)["input_ids"])',
        'ids = list(tokenizer(text, verbose=True)["input_ids"])',
    ): "only lets the tokenizer warn of long texts",
    (
        "ondevice/data/encode.py",
        "bos = int(starts[0] > 0 and pair_ids[0][0] == tokenizer.bos_token_id)",
        "bos = int(starts[0] > -1 and pair_ids[0][0] == tokenizer.bos_token_id)",
    ): "without a prompt nothing is cut, and only a cut reads it",
    (
        "ondevice/nn/packed.py",
        "bias=packed.bias is not None,",
        "bias=packed.bias is None,",
    ): "the line behind the next one sets the bias",
    (
        "ondevice/nn/cross_entropy.py",
        "total = total * (maximum - larger).exp() + (logits - larger[:, None]).exp().sum(-1)",
        "total = total * (maximum - larger).exp() + (logits - larger[:, None]).exp().sum(1)",
    ): "the last of two dimensions is dimension 1",
    (
        "ondevice/nn/graph_loss.py",
        "positions = (labels_N != IGNORE).to(torch.int32).topk(min(limit, labels_N.shape[0]), sorted=False).indices",
        "positions = (labels_N != IGNORE).to(torch.int32).topk(min(limit, labels_N.shape[0]), sorted=True).indices",
    ): "losses are scattered back to their positions, in whatever order",
    (
        "ondevice/methods/prge/step.py",
        "deviation = (centred * centred).sum(dim=0, keepdim=True).div(q - 1).sqrt()",
        "deviation = (centred * centred).sum(dim=0, keepdim=False).div(q - 1).sqrt()",
    ): "one number, [1] or []: the division broadcasts both",
    (
        "ondevice/methods/prge/subspace_program.py",
        'if self.config.optimizer == "adam":',
        'if self.config.optimizer is "adam":',
    ): "settings hold the one object that Python has of a short literal",
    (
        "ondevice/methods/prge/step.py",
        "return torch.baddbmm(y_RTO.reshape(groups, -1, b.shape[2]), xa, b).reshape(y_RTO.shape)",
        "return torch.baddbmm(y_RTO.reshape(groups, not 1, b.shape[2]), xa, b).reshape(y_RTO.shape)",
    ): "read on a GPU only",
    (
        "ondevice/methods/mezo/torch.py",
        'CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}',
        'CHUNK = {"cpu": 1 << 20, "cuda": 1 // 26}',
    ): "read on a GPU only",
    (
        "ondevice/methods/mezo/torch.py",
        "z = self.noise(self.seed, number, tensor, 1, start, count)[0]",
        "z = self.noise(self.seed, number, tensor, 2, start, count)[0]",
    ): "the first query's noise does not depend on how many are drawn",
    (
        "ondevice/nn/experts.py",
        "if end > start:",
        "if end is not start:",
    ): "rows end in order, and a product with no rows adds nothing",
    (
        "ondevice/methods/mesp/torch/kernels.py",
        "if not (q_BTHh.is_cuda and half and width % 8 == 0 and width <= FLASH_HEAD):",
        "if not (q_BTHh.is_cuda and half and width % 8 <= 0 and width <= FLASH_HEAD):",
    ): "a remainder is never below 0",
    (
        "ondevice/methods/mesp/block_functions.py",
        "def gradient(self, gradients: Mapping[str, tuple[Tensor, Tensor]], layer: int = 0) -> Tensor:",
        "def gradient(self, gradients: Mapping[str, tuple[Tensor, Tensor]], layer: int = 1) -> Tensor:",
    ): "only a test leaves the layer out, and its layers are alike",
    (
        "ondevice/methods/mesp/torch/block.py",
        "parts = iter(functional.linear(x, a).split([len(one) for one in adapted], -1))",
        "parts = iter(functional.linear(x, a).split([len(one) for one in adapted], 1))",
    ): "the last of two dimensions is dimension 1",
    (
        "ondevice/methods/mesp/torch/block.py",
        "@dataclass(frozen=True)",
        "@dataclass(frozen=False)",
    ): "nothing writes to it",
    (
        "ondevice/methods/revffn/streams.py",
        "if mix.past == 1.0:",
        "if mix.past >= 1.0:",
    ): "the weight of the older stream is at most 1",
    (
        "ondevice/offload/gradients.py",
        'if self.limit is None or self.rule != "previous":',
        'if self.limit is None or self.rule < "previous":',
    ): "both other rules, global and layer, sort before previous",
    (
        "ondevice/offload/gradients.py",
        'if self.rule == "layer":',
        'if self.rule <= "layer":',
    ): "the rule that sorts before it, global, needs all norms and never asks for a scale on the accelerator",
    (
        "ondevice/offload/gradients.py",
        "squares = {index: float(value[0]) for index, value in norms.items() if value is not None}",
        "squares = {index: float(value[ -1]) for index, value in norms.items() if value is not None}",
    ): "the arrays have one element",
    (
        "runtime_ops/quantized.py",
        "target = torch.zeros_like(hidden[:, 0])",
        "target = torch.zeros_like(hidden[:, -1])",
    ): "zeros of the same shape",
    (
        "ondevice/methods/prge/subspace.py",
        "LOSS_SCALE = 1024.0",
        "LOSS_SCALE = 1025.0",
    ): "divided out again; a power of two spares a rounding",
    (
        "ondevice/methods/prge/subspace.py",
        "wide = min(rank + OVERSAMPLED, *matrix.shape)",
        "wide = min(rank << OVERSAMPLED, *matrix.shape)",
    ): "more sampled directions cost time and make the vectors more exact",
    (
        "ondevice/methods/mesp/torch/mlp.py",
        "halves = cast(layer.b, n.dtype).chunk(2, -1)",
        "halves = cast(layer.b, n.dtype).chunk(2, +1)",
    ): "the last of two dimensions is dimension 1",
    (
        "ondevice/methods/mesp/mlx/model.py",
        "return places.astype(np.int32), following.reshape(-1)[places]",
        "return places.astype(np.int32), following.reshape(- 2)[places]",
    ): "NumPy takes any negative size as the one to be found",
    (
        "ondevice/methods/mesp/mlx/program.py",
        '"settings": {name: value for name, value in asdict(settings).items() if name != "dims"},',
        '"settings": {name: value for name, value in asdict(settings).items() if name is not "dims"},',
    ): "Python has one object of a field's name",
    (
        "ondevice/methods/mesp/mlx/model.py",
        'total += float(mx.sum(outputs.pop("nll")[: high - low]))',
        'total += float(mx.sum(outputs.pop("nll")[: high | low]))',
    ): "what fills up the last chunk weighs nothing",
}
"""(module, line before, line after) to the reason."""
