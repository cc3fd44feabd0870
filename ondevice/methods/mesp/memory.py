"""Bytes of a MeSP step by part, from dimensions only: the resident part, and the largest stage of a
backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ondevice.core.dims import MoeDims
from ondevice.core.method import MemoryModel
from ondevice.core.traits import CONVOLUTION, DELTA, DELTA_CHUNK_TOKENS
from ondevice.methods.mesp.config import GROUP_SIZE
from ondevice.methods.step_model import INPUTS_ON_THE_WAY, backward_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from ondevice.core.dims import ModelDims
    from ondevice.core.traits import Linear
    from ondevice.methods.mesp.config import MespConfig, Recompute

MOMENTS = {"adamw": 2, "sgd": 0}
"""Numbers that an optimizer keeps for each trained one."""
WINDOW = 2
"""Streamed blocks, or tiles of the head, in memory: the one that computes, and the one that is
being read."""
MLP_CHUNK_TOKENS = 128
"""Tokens of the MLP at once if the settings do not say."""
MLP_CHUNK_TOKENS_GPU = (1024, 4096)
"""On a GPU: a quarter of all, within these bounds."""
CHUNK_SCORES = 1 << 17
"""Attention scores of a chunk of queries, of all rows and heads, on a CPU: half a megabyte stays in
its cache."""
HEAD_ROWS = 32
"""Labelled positions of a block program's head tile at once: enough that reading the tile does not
cost more than the product."""
HEAD_TILE_BYTES = 8 << 20
"""A tile of a block program's head at most, made dense in float32."""
CHUNK_QUERIES = 16
"""Queries of a chunk, at least."""


def memory(
    dims: ModelDims,
    config: MespConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part: adapter and optimizer, block inputs, one block's backward pass,
    and what the loss needs beyond that, as neither is there while the other runs.

    Args:
        dims: the model.
        config: the method.
        batch_size: rows of data; `config.micro_batch_size` of them are computed at once.
        length_tokens: tokens a row.
        activation_bytes: bytes of one activation.
    """
    rows = min(batch_size, config.micro_batch_size or batch_size)
    tokens = rows * length_tokens
    trained = trained_numbers(dims, config) * 4
    inputs = tokens * dims.hidden * activation_bytes
    kept = dims.layers
    if config.activations == "host":
        kept = INPUTS_ON_THE_WAY
    if dims.whole:  # its block is differentiated by itself
        block = backward_bytes(dims, rows, length_tokens, activation_bytes) // dims.layers
        sums = [
            one.experts * one.inputs * one.outputs
            for one in dims.adapted(config)
            if one.experts > 1
        ]
        block += (
            3 * sum(sums) // dims.layers * activation_bytes
        )  # W + B A of all experts, the sum, its g
    else:
        block = stage_bytes(dims, config, rows, length_tokens, activation_bytes)
    head = head_bytes(dims, config, tokens, activation_bytes)
    return {
        "adapter": trained * (2 if rows < batch_size or config.max_grad_norm is not None else 1),
        "optimizer": MOMENTS[config.optimizer] * trained,
        "block inputs": kept * inputs + shared_bytes(dims, tokens, activation_bytes),
        "kept of the forward pass": kept_bytes(dims, config.recompute, tokens, activation_bytes),
        "activations": block,
        "logits": max(0, head - block),  # the head is through before a block is computed again
    }


def shared_bytes(dims: ModelDims, tokens: int, activation_bytes: int) -> int:
    """Return the bytes of keys and values that later blocks read, and of their gradients."""
    widths = [
        dims.key_heads(i) * dims.head_width(i)
        for i in range(dims.layers)
        if dims.traits.lends_keys(i)
    ]
    return 4 * tokens * sum(widths) * activation_bytes


def gpu_chunk_tokens(tokens: int) -> int:
    """Return the tokens of the MLP at once on a GPU, in chunks of about one size."""
    least, most = MLP_CHUNK_TOKENS_GPU
    chunks = -(-tokens // min(most, max(least, tokens // 4)))
    return -(-tokens // (8 * chunks)) * 8


def host_memory(
    dims: ModelDims,
    config: MespConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return bytes of pinned host memory by part: the input of every block but the last, if
    `config.activations` is `host`."""
    if config.activations != "host":
        return {}
    rows = min(batch_size, config.micro_batch_size or batch_size)
    size = rows * length_tokens * dims.hidden * activation_bytes
    return {"inputs on the host": (dims.layers - 1) * size}


def weights(dims: ModelDims, config: MespConfig, weight_bytes: int, runtime: str = "torch") -> int:
    """Return bytes of the frozen weights that are in memory.

    Args:
        dims: the model.
        config: the method.
        weight_bytes: of one weight in full precision.
        runtime: `torch` packs only the blocks' matrices, `mlx` embedding and head too.
    """
    if dims.whole:
        return dims.parameters * weight_bytes
    matrices = dims.matrices_of_block
    item = float(weight_bytes)
    in_mlx = runtime == "mlx"
    resident = config.weight_placement == "resident"
    if dims.traits.hands_on and resident and not config.bits:  # blocks differ
        return dims.parameters * weight_bytes
    if isinstance(dims, MoeDims):
        if not config.bits and config.weight_placement == "resident":  # blocks may differ
            return dims.parameters * weight_bytes
        if in_mlx:  # which packs experts too
            width = dims.experts * dims.expert_intermediate + dims.shared_intermediate
            matrices += 3 * dims.hidden * width
    if config.bits:
        # 64 weights share a float32 in NF4, and in MLX a scale and a bias in the model's precision;
        # 8 bits in torch have two scales a row, one of them float32.
        if in_mlx:
            item = config.bits / 8 + 2 * weight_bytes / GROUP_SIZE
        elif config.bits == 4:
            item = 0.5 + 4 / GROUP_SIZE
        else:
            item = 1 + (4 + weight_bytes) / dims.hidden
    block = int(matrices * item) + (dims.block_parameters - matrices) * weight_bytes
    row = dims.hidden * (item if in_mlx else weight_bytes)
    if resident:
        rows = dims.vocab * row * (1 if dims.tied else 2)
        rows += dims.layer_inputs * (item if in_mlx else weight_bytes)
        return int(dims.layers * block + rows) + dims.hidden * weight_bytes
    tile = int(-(-dims.vocab // config.loss_tiles) * row)
    return WINDOW * max(block, tile) + dims.hidden * weight_bytes


class KeptLayers(NamedTuple):
    """Numbers of layers, the last ones, that keep something.

    Attributes:
        attention: attention's output and its log-sum-exp.
        mlp: gate and up.
        projections: queries, keys, values and the block's middle.
    """

    attention: int = 0
    mlp: int = 0
    projections: int = 0


def kept_layers(recompute: Recompute, dims: ModelDims) -> KeptLayers:
    """Return the layers of a setting; `auto` that no one has decided keeps nothing."""
    if isinstance(recompute, tuple):
        return KeptLayers(*(min(layers, dims.layers) for layers in recompute))
    if recompute == "none":
        return KeptLayers(dims.layers, dims.layers, dims.layers)
    return KeptLayers()


def layer_bytes(dims: ModelDims, tokens: int, activation_bytes: int) -> KeptLayers:
    """Return what each part of one layer takes, bytes; in the order of the operations that a byte
    saves."""
    queries = dims.heads * dims.head_dim
    projected = queries + 2 * dims.kv_heads * dims.head_dim + dims.hidden
    if DELTA in dims.traits.mixers:
        projected = max(projected, _delta_numbers(dims, 1, tokens)[0] // tokens + dims.hidden)
    return KeptLayers(
        tokens * (queries * activation_bytes + dims.heads * 4),
        tokens * 2 * dims.intermediate * activation_bytes,
        tokens * projected * activation_bytes,
    )


def kept_bytes(dims: ModelDims, recompute: Recompute, tokens: int, activation_bytes: int) -> int:
    """Return what all layers keep, bytes."""
    layers = kept_layers(recompute, dims)
    each = layer_bytes(dims, tokens, activation_bytes)
    return sum(number * size for number, size in zip(layers, each, strict=True))


def trained_numbers(dims: ModelDims, config: MespConfig) -> int:
    """Return numbers in every A and B."""
    return config.rank * sum(
        linear.experts * (linear.inputs + linear.outputs) for linear in dims.adapted(config)
    )


def stage_bytes(
    dims: ModelDims, config: MespConfig, rows: int, length_tokens: int, activation_bytes: int
) -> int:
    """Return the most that the stages of one block's backward pass hold at once, without the
    block's input.

    While the MLP's stages run, the gradient, the block's middle and what attention needs for its
    own (queries, keys, values, its output) wait; of gate, up and their product there is a chunk of
    tokens. Attention's stages hold the gradients of queries, keys and values too, those of keys and
    values in float32, and two chunks of scores. A norm behind a branch needs the branch's end
    again, and both its gradient and the sum's; gradients of fused projections are put together.
    """
    tokens = rows * length_tokens
    chunk = min(tokens, config.mlp_chunk_tokens or MLP_CHUNK_TOKENS)
    queries = dims.heads * dims.head_dim
    keys = dims.kv_heads * dims.head_dim
    traits = dims.traits
    inner = dims.intermediate * (5 if dims.traits.fused else 3)
    ends = 2 * dims.hidden * ("after_mlp" in dict(traits.norms))
    if traits.layer_input or traits.output_scale:  # gate and up wait for what is behind the MLP
        inner += 2 * traits.layer_input
        ends += 2 * dims.hidden
    pairs = [linear for linear in dims.adapted(config) if linear.experts > 1 and not dims.whole]
    if isinstance(dims, MoeDims):
        inner = experts_numbers(dims, {linear.target for linear in pairs})
        if dims.beside:  # gate, up, the MLP's result and their norms wait while experts run
            inner += 2 * dims.linear_shape("gate_proj")[1] + 2 * dims.hidden
        if dims.dense_layers:  # gate, up and the activated gate, and two of their gradients
            inner = max(inner, 5 * dims.dense_intermediate)
    waits = tokens * (2 * dims.hidden + 2 * queries + 2 * keys)
    if CONVOLUTION in traits.mixers:  # b, c, x and o
        waits = max(waits, tokens * 6 * dims.hidden)
    corrected = 0
    if DELTA in traits.mixers:
        of_delta, most = _delta_numbers(dims, rows, length_tokens)
        waits = max(waits, of_delta + 2 * tokens * dims.hidden)
        corrected = 4 * (most + 2 * tokens * dims.hidden)
    mlp = waits + chunk * (inner + 2 * dims.hidden + ends)
    attention = tokens * (dims.hidden + 3 * queries + 4 * keys)
    queries_at_once = min(
        length_tokens, max(CHUNK_QUERIES, CHUNK_SCORES // (rows * dims.heads * length_tokens))
    )
    scores = 2 * rows * dims.heads * queries_at_once * length_tokens * 4 + 2 * tokens * keys * 4
    project = tokens * (5 * dims.hidden + (queries + 2 * keys) * (2 if traits.fused else 1))
    attended = max(attention * activation_bytes + scores, project * activation_bytes)
    during, after = _pairs_bytes(dims, config, pairs, tokens / chunk)
    return max(
        mlp * activation_bytes + during, waits * activation_bytes + after, attended, corrected
    )


def _delta_numbers(dims: ModelDims, rows: int, length_tokens: int) -> tuple[int, int]:
    """Count numbers of a gated delta rule: what waits for its backward pass, and the most then.

    The projections into it, its output and the states at the starts of chunks wait. The backward
    pass has a chunk's matrices, or, at the end, the convolution's gradient in several copies.
    """
    _, heads, key_width, width = dims.traits.delta
    tokens = rows * length_tokens
    channels = dims.traits.delta_channels
    values = heads * width
    chunk = min(DELTA_CHUNK_TOKENS, length_tokens)
    state = key_width * width
    states = rows * heads * state * -(-length_tokens // chunk)
    vectors = 11 * chunk * (key_width + width)
    matrices = rows * heads * (vectors + 10 * chunk * chunk + 4 * state)
    loop = tokens * (2 * channels + 4 * values) + matrices
    end = tokens * (13 * channels // 2 + 3 * values)
    return tokens * (channels + 2 * values) + states, states + max(loop, end)


def _pairs_bytes(
    dims: ModelDims, config: MespConfig, pairs: list[Linear], chunks: float
) -> tuple[int, int]:
    """Count bytes of the pairs of a layer's experts while a chunk of tokens is differentiated, and
    at its end.

    B is there in the order of the experts too. Then half of the gradients are, at the end all of
    them, those of B in PEFT's order as well; and the sums of the chunks before, which a whole chunk
    meets from the second one on.
    """
    each = 4 * config.rank / dims.layers
    b = int(each * sum(one.experts * one.outputs for one in pairs))
    both = b + int(each * sum(one.experts * one.inputs for one in pairs))
    return b + both // 2 + both * (chunks >= 2), 2 * b + both * (1 + (chunks > 1))


def experts_numbers(dims: MoeDims, adapted: Collection[str] = ()) -> int:
    """Return numbers of a token that autograd keeps in a mixture of experts, and the gradients that
    meet them.

    Each expert of a token has gate, up and the activated gate (frozen matrices keep no input), its
    result, and the gradient of that before and after the rows are sorted; an expert for all has its
    gradient in place of these. A pair of a matrix saves that matrix's input.
    """
    each = 3 * dims.hidden + 3 * dims.expert_intermediate
    into = {"experts.gate_up_proj": dims.hidden, "experts.down_proj": dims.expert_intermediate}
    each += sum(into[target] for target in adapted)
    shared = 4 * dims.shared_intermediate + 2 * dims.hidden * bool(dims.shared_intermediate)
    return dims.active_experts * each + shared + 3 * dims.experts


def head_bytes(dims: ModelDims, config: MespConfig, tokens: int, activation_bytes: int) -> int:
    """Return the cross-entropy of `tokens` labelled tokens: the hidden states as they are, normed,
    and their gradient in float32, and a tile's logits and their exponentials in float32."""
    tile = -(-dims.vocab // config.loss_tiles)
    chunk = min(tokens, config.loss_chunk_tokens or tokens)
    return 2 * chunk * tile * 4 + tokens * dims.hidden * (4 * activation_bytes + 4)


def head_tile_rows(dims: ModelDims, config: MespConfig) -> int:
    """Return the rows of the head that a block program takes at once: a tile of `loss_tiles`, or a
    smaller one of `HEAD_TILE_BYTES` as float32, so that large vocabularies and widths cost no more
    memory."""
    return min(-(-dims.vocab // config.loss_tiles), max(1, HEAD_TILE_BYTES // (4 * dims.hidden)))


def blocks_memory(
    dims: ModelDims, config: MespConfig, batch_size: int, length_tokens: int, quantize: str = "none"
) -> dict[str, int]:
    """Count bytes of a block program's run by part; weights are in a mapped file, and everything
    else is float32.

    The host keeps adapter, moments and block inputs. Each function has an arena of its own: of one
    block's stages and its layer's new vectors, of a tile of the head, and of the dense copy of one
    packed matrix or tile. Where products are of integers, a layer's are packed while it computes;
    in float32 one matrix at a time is.
    """
    vector = trained_numbers(dims, config) * 4
    tokens = batch_size * length_tokens
    vectors = 1 + MOMENTS[config.optimizer]
    tile = head_tile_rows(dims, config)
    matrices = [inputs * outputs for inputs, outputs in dims.linear_shapes.values()]
    if isinstance(dims, MoeDims) and dims.dense_layers:
        matrices.append(dims.hidden * dims.dense_intermediate)
    dense = 4 * max(matrices) * (quantize in ("int8", "q4", "q4dq", "8da4w"))
    head = 4 * HEAD_ROWS * (2 * tile + 3 * dims.hidden)
    if quantize != "none":
        head += 4 * tile * dims.hidden
    forward, backward = block_stages(dims, tokens, length_tokens)
    if quantize == "8da8w":  # products come out apart from what they are scaled by and added to
        forward = forward + 8 * tokens * dims.intermediate
        backward = backward + 24 * tokens * dims.intermediate
    new = (2 * vectors + 2) * (vector // dims.layers)
    held = dims.matrices_of_block
    if isinstance(dims, MoeDims):  # experts are inputs, as 8-bit weights
        inner = dims.dense_intermediate if dims.dense_layers else 0
        held += 3 * dims.hidden * max(inner, dims.shared_intermediate)
    packed = {"8da8w": 2 * held, "none": 4 * max(*matrices, tile * dims.hidden)}
    return {
        "adapter": vector,
        "optimizer": (vectors - 1) * vector,
        "block inputs": dims.layers * tokens * dims.hidden * 4 + shared_bytes(dims, tokens, 4),
        "activations": forward + max(backward, new) + tokens * dims.hidden * 4 + 2 * dense,
        "head tiles": 2 * head,
        "packed weights": packed.get(quantize, 0),
    }


def block_stages(dims: ModelDims, tokens: int, length_tokens: int) -> tuple[int, int]:
    """Return bytes of the arenas of one block's forward and backward function, without the
    adapter's vectors and dense weights."""
    width = dims.hidden
    inner = dims.intermediate
    if isinstance(dims, MoeDims) and dims.dense_layers:
        inner = max(inner, dims.dense_intermediate)
    mask = length_tokens * length_tokens
    queries = dims.heads * dims.head_dim
    keys = dims.kv_heads * dims.head_dim
    forward = max(tokens * (2 * width + 3 * inner), tokens * (width + 3 * queries + 3 * keys))
    mixed = 3 * queries + 2 * keys
    if CONVOLUTION in dims.traits.mixers:  # b, c and x, their gradients, and the input
        mixed = max(mixed, 8 * width)
        forward = max(forward, tokens * 9 * width)
    backward = tokens * (5 * width + mixed + 5 * inner)
    if DELTA in dims.traits.mixers:
        _, most = _delta_numbers(dims, max(1, tokens // length_tokens), length_tokens)
        forward = max(forward, most // 2)
        backward = max(backward, most + 3 * tokens * width)
    return 4 * (forward + mask), 4 * (backward + mask)


MEMORY = MemoryModel(
    memory,
    host=host_memory,
    weights=weights,
    blocks=blocks_memory,
    host_note="block inputs wait in pinned host memory",
    host_hint="method.micro_batch_size: 1, method.activations: device",
)
