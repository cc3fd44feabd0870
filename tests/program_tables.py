"""The programs that tests export (tests/programs.py): models, settings, and which only the nightly job
lowers."""

from __future__ import annotations

from typing import Any

from ondevice.api.runfile import NULL

SEED = 4
SMALL = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1}
TWO_HEADS = {"hidden": 64, "heads": 2, "kv_heads": 1}
"""As wide as QNN's compiler needs it."""
MODELS: dict[str, dict[str, Any]] = {
    "tied llama": {"family": "llama", **SMALL, "vocab": 4001},
    "qwen2 with bias": {"family": "qwen2", **SMALL, "tied": False},
    "one layer": {"family": "llama", **SMALL},
    "two layers": {"family": "llama", **SMALL, "layers": 2},
    "wide qwen2": {
        "family": "qwen2",
        "layers": 1,
        "hidden": 96,
        "heads": 3,
        "kv_heads": 1,
        "tied": False,
    },
    "gemma3_text": {"family": "gemma3_text", **SMALL, "layers": 3},
    "two layers of gemma3_text": {"family": "gemma3_text", **SMALL, "layers": 2},
    "gemma4_text": {
        "family": "gemma4_text",
        **SMALL,
        "layers": 4,
        "head_dim": 32,
        "global_head_dim": 48,
    },
    "gemma4_text with experts": {
        "family": "gemma4_text",
        **SMALL,
        "layers": 2,
        "head_dim": 32,
        "global_head_dim": 48,
        "enable_moe_block": True,
        "moe_intermediate_size": 32,
    },
    # Each token takes each expert. If it took two of six, activations in 8 bits would now and then
    # give it another one, which changes A and B by as much as a gradient left out.
    "all experts of gemma4_text": {
        "family": "gemma4_text",
        **SMALL,
        "global_head_dim": 48,
        "enable_moe_block": True,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "top_k_experts": 4,
    },
    "granite": {"family": "granite", **SMALL, "layers": 2},
    "granitemoe": {"family": "granitemoe", **SMALL, "intermediate": 128},
    "lfm2": {"family": "lfm2", **SMALL, "layers": 3},
    "lfm2_moe": {"family": "lfm2_moe", **SMALL, "layers": 2, "moe_intermediate_size": 32},
    "three layers of lfm2_moe": {
        "family": "lfm2_moe",
        **SMALL,
        "layers": 3,
        "moe_intermediate_size": 32,
    },
    "qwen2_moe": {"family": "qwen2_moe", **SMALL, "moe_intermediate_size": 32},
    "qwen3_moe": {"family": "qwen3_moe", **SMALL, "layers": 2},
    "wide qwen3_moe": {
        "family": "qwen3_moe",
        **SMALL,
        "head_dim": 32,
        "moe_intermediate_size": 32,
    },
    "qwen3_5_text": {"family": "qwen3_5_text", **SMALL, "layers": 3},
    "two layers of qwen3_5_text": {"family": "qwen3_5_text", **SMALL, "layers": 2},
    "smollm3": {"family": "smollm3", **SMALL, "layers": 3},
    "two layers of smollm3": {"family": "smollm3", "layers": 2, **TWO_HEADS},
    "two layers of phi3": {"family": "phi3", "layers": 2, **TWO_HEADS},
    "wide gemma3_text": {
        "family": "gemma3_text",
        "layers": 2,
        **TWO_HEADS,
        "head_dim": 64,
        "sliding_window": 16,
        # Norms of 1 + w make scores about 32 before they are divided by its root.
        "query_pre_attn_scalar": 1024,
    },
    "wide qwen3": {"family": "qwen3", "layers": 2, **TWO_HEADS, "head_dim": 64},
    "wide": {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2},
}
METHOD = {
    "method.name": "prge",
    "method.queries": 2,
    "method.rank": 4,
    "method.loss_tiles": 2,
    "method.learning_rate": 0.05,
}
ONE_ROW = {"export.batch_size": 1, "export.eval_batch_size": 1}
"""Of block programs, if no test asks for another number of rows: each has functions of its own."""
CONTEXT = {"export.context_tokens": 72}
"""More than a window of attention, and than a chunk of a delta rule."""
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "functional": ("tied llama", {"export.batch_size": 2, "export.next_token": True}),
    "stateful": (
        "qwen2 with bias",
        {
            "export.form": "stateful",
            "export.generator": "op",
            "export.lengths_tokens": [24, 16],
            "method.noise": "rademacher",
            "export.loss": "plain",
        },
    ),
    "q4": ("one layer", {"export.quantize": "q4", "export.batch_size": 3}),
    "q4 untied, tiled, labelled": (
        "qwen2 with bias",
        {
            "export.quantize": "q4",
            "export.loss": "tiled",
            "export.generator": "aten",
            "export.batch_size": 2,
            "method.labelled_tokens": 2,
            "method.optimizer": "adam",
        },
    ),
    "fused loss, one-sided": (
        "two layers",
        {
            "export.loss": "op",
            "method.estimator": "one_sided",
            "method.queries": 3,
            "method.top_layers": 1,
            "method.noise": "rademacher",
            "method.target_modules": ["down_proj", "o_proj"],
        },
    ),
    "subspace, answers": (
        "one layer",
        {
            "export.batch_size": 2,
            "method.answers": [70, 9],
            "method.factors": "@subspace",
            "method.refresh_every": 2,
            "method.calibration_rows": 4,
        },
    ),
    "subspace, stateful": (
        "one layer",
        {
            "export.quantize": "q4",
            "export.form": "stateful",
            "method.answers": [70, 9, 33],
            "method.factors": "@subspace",
            "method.refresh_every": NULL,
        },
    ),
    "gemma3_text": ("two layers of gemma3_text", {"export.batch_size": 2}),
    "lfm2": ("lfm2", {"export.batch_size": 2}),
    "8da4w": ("one layer", {"export.quantize": "8da4w", "method.loss_tiles": 1}),
}
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": (
        "two layers",
        {
            "export.batch_size": 2,
            "export.eval_batch_size": 3,
            "export.lengths_tokens": [24, 16],
            "export.next_token": True,
            "export.context_tokens": 288,
        },
    ),
    "blocks, sgd": (
        "qwen2 with bias",
        {
            "method.optimizer": "sgd",
            "method.weight_decay": 0.1,
            "method.target_modules": ["q_proj", "down_proj"],
            "method.loss_tiles": 3,
            "export.kernels": "stock",
            **ONE_ROW,
        },
    ),
    "blocks, int8": (
        "two layers",
        {
            "export.quantize": "int8",
            "export.next_token": True,
            "export.context_tokens": 40,
            **ONE_ROW,
        },
    ),
    "pairs": (
        "two layers",
        {"export.batch_size": 2, "export.lengths_tokens": [64], "export.kernels": "stock"},
    ),
    "pairs, int8": (
        "two layers",
        {"export.batch_size": 2, "export.lengths_tokens": [64], "export.quantize": "int8"},
    ),
    "blocks, 8da8w": (
        "two layers",
        {"export.quantize": "8da8w", "export.batch_size": 2, "method.optimizer": "sgd"},
    ),
    "blocks, 8da4w": (
        "qwen2 with bias",
        {
            "export.quantize": "8da4w",
            "export.batch_size": 2,
            "export.context_tokens": 40,
            "method.optimizer": "sgd",
        },
    ),
    "blocks, q4": (
        "qwen2 with bias",
        {"export.quantize": "q4", "method.loss_tiles": 3, "export.context_tokens": 40, **ONE_ROW},
    ),
    "blocks, q4dq": (
        "qwen2 with bias",
        {"export.quantize": "q4dq", "method.loss_tiles": 3, "export.context_tokens": 40, **ONE_ROW},
    ),
    "blocks of gemma3_text": (
        "gemma3_text",
        {"export.check_steps": 1, "method.optimizer": "sgd", **ONE_ROW},
    ),
    "blocks of gemma4_text": (
        "gemma4_text",
        {"export.check_steps": 1, "method.optimizer": "sgd", **ONE_ROW},
    ),
    "blocks of gemma4_text, int8": (
        "gemma4_text",
        {"export.quantize": "int8", "method.optimizer": "sgd", "export.check_steps": 1, **ONE_ROW},
    ),
    "blocks of gemma4_text, int8, answers": (
        "gemma4_text",
        {
            "export.quantize": "int8",
            "method.optimizer": "sgd",
            "export.check_steps": 1,
            **CONTEXT,
            **ONE_ROW,
        },
    ),
    "blocks of gemma4_text, q4": (
        "gemma4_text",
        {"export.quantize": "q4", "method.optimizer": "sgd", "export.check_steps": 1, **ONE_ROW},
    ),
    "blocks of gemma4_text, 8da8w": (
        "gemma4_text",
        {"export.quantize": "8da8w", "method.optimizer": "sgd", "export.check_steps": 1, **ONE_ROW},
    ),
    "blocks of granite": (
        "granite",
        {
            "export.check_steps": 1,
            "export.batch_size": 2,
            "export.context_tokens": 400,
            "export.answers": "packed",
            "export.kernels": "stock",
        },
    ),
    "blocks of granite, in ops": ("granite", {"export.check_steps": 1, **ONE_ROW}),
    "blocks of granitemoe, int8": (
        "granitemoe",
        {"export.quantize": "int8", "method.optimizer": "sgd", "export.check_steps": 1, **ONE_ROW},
    ),
    "blocks of lfm2_moe": ("lfm2_moe", {"export.check_steps": 1, **CONTEXT, **ONE_ROW}),
    "blocks of lfm2_moe, q4": (
        "three layers of lfm2_moe",
        {"export.quantize": "q4", "method.optimizer": "sgd", "export.check_steps": 1, **ONE_ROW},
    ),
    "blocks of gemma4_text with experts": (
        "gemma4_text with experts",
        {"export.check_steps": 1, **CONTEXT, **ONE_ROW},
    ),
    "blocks of granitemoe": ("granitemoe", {"export.check_steps": 1, **ONE_ROW}),
    "blocks of lfm2": ("lfm2", {"export.batch_size": 2, "export.next_token": True, **CONTEXT}),
    "blocks of lfm2, q4": (
        "lfm2",
        {
            "export.quantize": "q4",
            "method.optimizer": "sgd",
            "export.kernels": "stock",
            **ONE_ROW,
        },
    ),
    "blocks of lfm2, 8da8w": (
        "lfm2",
        {
            "export.quantize": "8da8w",
            "method.optimizer": "sgd",
            "export.kernels": "stock",
            **ONE_ROW,
        },
    ),
    "blocks of qwen2_moe": (
        "qwen2_moe",
        {"export.context_tokens": 40, "export.check_steps": 1, **ONE_ROW},
    ),
    "blocks of qwen2_moe, q4": (
        "qwen2_moe",
        {"export.quantize": "q4", "method.optimizer": "sgd", "export.check_steps": 1, **ONE_ROW},
    ),
    "blocks of qwen3_moe": (
        "qwen3_moe",
        {"export.next_token": True, "export.check_steps": 1, **ONE_ROW},
    ),
    **{
        f"blocks of {family}, 8da8w": (
            source,
            {
                "export.quantize": "8da8w",
                "method.optimizer": "sgd",
                "export.check_steps": 1,
                **ONE_ROW,
            },
        )
        for family, source in (
            ("gemma4_text with experts", "all experts of gemma4_text"),
            ("granitemoe", "granitemoe"),
            ("lfm2_moe", "three layers of lfm2_moe"),
            ("qwen2_moe", "qwen2_moe"),
            ("qwen3_moe", "wide qwen3_moe"),
        )
    },
    "blocks of qwen3_5_text": (
        "qwen3_5_text",
        {"export.batch_size": 2, "export.lengths_tokens": [72]},
    ),
    "blocks of qwen3_5_text, int8": (
        "qwen3_5_text",
        {
            "export.quantize": "int8",
            "method.optimizer": "sgd",
            "export.kernels": "stock",
            **ONE_ROW,
        },
    ),
    "blocks of qwen3_5_text, q4": (
        "two layers of qwen3_5_text",
        {"export.quantize": "q4", "method.optimizer": "sgd", "export.kernels": "stock", **ONE_ROW},
    ),
    "blocks of qwen3_5_text, q4, answers": (
        "two layers of qwen3_5_text",
        {
            "export.quantize": "q4",
            "method.optimizer": "sgd",
            "export.kernels": "stock",
            **CONTEXT,
            **ONE_ROW,
        },
    ),
    "blocks of qwen3_5_text, 8da8w": (
        "two layers of qwen3_5_text",
        {
            "export.quantize": "8da8w",
            "method.optimizer": "sgd",
            "export.kernels": "stock",
            **ONE_ROW,
        },
    ),
    "blocks of smollm3": (
        "smollm3",
        {"export.check_steps": 1, "export.kernels": "stock", **ONE_ROW},
    ),
}
"""The same as functions of one block; the last of three tiles of 97 rows each begins inside the one
before. Most have their functions in this project's ops, too: so have each form of weights and each
kind of block, but not each form of each kind. Granite's answers by a program of its
own."""
NPU: dict[str, tuple[str, dict[str, Any]]] = {
    "npu": ("wide", {"export.batch_size": 2}),
    "npu unrolled": (
        "wide qwen2",
        {
            "export.rows": "unrolled",
            "export.lengths_tokens": [13],
            "export.batch_size": 2,
            "export.soc": ["SM8550"],
            "method.estimator": "one_sided",
            "method.noise": "rademacher",
            "method.target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"],
        },
    ),
    "npu qwen3": ("wide qwen3", {"export.batch_size": 2}),
    "npu gemma3_text": ("wide gemma3_text", {"export.batch_size": 2}),
    "npu phi3": ("two layers of phi3", {"export.batch_size": 2}),
    "npu smollm3": ("two layers of smollm3", {"export.batch_size": 2}),
    "npu subspace": ("wide", {"method.factors": "@subspace", "method.answers": [70, 9]}),
    "npu w8": ("wide", {"export.quantize": "w8", "method.top_layers": 1}),
}
"""Programs for a Qualcomm NPU; they need the `qnn` extra, so tests ask `needs_qnn` first."""
NPU_BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "npu blocks": (
        "wide",
        {"export.batch_size": 2, "export.check_steps": 1, "export.context_tokens": 40},
    ),
    "npu blocks, sgd": (
        "wide qwen2",
        {
            "method.optimizer": "sgd",
            "method.target_modules": ["q_proj", "down_proj"],
            "method.loss_tiles": 3,
            "export.next_token": True,
            "export.soc": ["SM8550"],
            **ONE_ROW,
        },
    ),
    "npu blocks of gemma3_text": (
        "wide gemma3_text",
        {"method.optimizer": "sgd", "export.lengths_tokens": [24], **ONE_ROW},
    ),
    "npu blocks of phi3": ("two layers of phi3", {"method.optimizer": "sgd", **ONE_ROW}),
    "npu blocks of qwen3": ("wide qwen3", {"method.optimizer": "sgd", **ONE_ROW}),
    "npu blocks of smollm3": ("two layers of smollm3", {"method.optimizer": "sgd", **ONE_ROW}),
}
"""The same for MeSP, functions of one block."""
ALL = PROGRAMS | NPU | NPU_BLOCKS | BLOCKS
NIGHTLY = {
    "blocks, q4dq",
    "q4 untied, tiled, labelled",
    "8da4w",
    "gemma3_text",
    "lfm2",
    "pairs, int8",
    "blocks of gemma3_text",
    "blocks of gemma4_text",
    "blocks of gemma4_text, q4",
    "blocks of gemma4_text, int8, answers",
    "blocks of gemma4_text, 8da8w",
    "blocks of gemma4_text with experts",
    "blocks of gemma4_text with experts, 8da8w",
    "blocks of granitemoe",
    "blocks of granitemoe, 8da8w",
    "blocks of granitemoe, int8",
    "blocks of granite, in ops",
    "blocks of lfm2",
    "blocks of lfm2, q4",
    "blocks of lfm2, 8da8w",
    "blocks of lfm2_moe, q4",
    "blocks of lfm2_moe, 8da8w",
    "blocks of qwen2_moe",
    "blocks of qwen2_moe, q4",
    "blocks of qwen3_moe, 8da8w",
    "blocks of qwen3_5_text",
    "blocks of qwen3_5_text, int8",
    "blocks of qwen3_5_text, q4, answers",
    "blocks of qwen3_5_text, 8da8w",
    "blocks of smollm3",
    "npu unrolled",
    "npu gemma3_text",
    "npu qwen3",
    "npu phi3",
    "npu blocks of smollm3",
    "npu subspace",
    "npu w8",
}
"""Programs that the nightly job lowers and a run of every change does not, since each joins what
others have one by one: a form of weights of a further kind of block, or several settings. Of the
families Granite, Gemma 4 (windows), LFM2's mixture (convolutions, experts) and Qwen 3.5 (a delta
rule) are lowered on every change, Granite without this project's ops;
exporters/android_cpu/test_functions_of_blocks.py holds its functions in them, and those of nearly
every other program, against PyTorch before they are lowered. Each family of the NPU is lowered on
every change for one of its two methods."""
