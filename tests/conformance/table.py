"""The pairs of method and backend that this project claims, each with the model and limits it is
tested with.

`test_table.py` runs every row; `markdown()` is the table of docs/results/conformance.md, which `make docs`
writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

ARTIFACTS = ("jetson", "cuda-server")
"""Targets whose artifacts run in PyTorch; these rows run them on the CPU."""


@dataclass(frozen=True, eq=False)
class Row:
    """One pair, and how near it must be to the reference.

    Attributes:
        method: name of the method.
        backend: `torch-cpu`, `torch-cuda`, `mlx-cpu`, or a target of `ondevice export`.
        claim: what README says of it.
        settings: of the method, over small defaults.
        family: of the tiny model; `sizes` of it.
        quantize: how an artifact for CUDA keeps its weights; the reference has the same rounded
            weights.
        program: the exported program (`tests/programs.py`) that is run; "" for eager PyTorch.
        loss_error: largest relative error of a loss.
        gradient_error: largest error of a projected gradient, as a part of the step's largest.
        adapter_error: largest absolute error of what was trained, after `STEPS` steps from the
            row's own scalars.
        claimed: the row has passed on such a device; README lists it only then.
    """

    method: str
    backend: str
    claim: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    program: str = ""
    quantize: str = "none"
    loss_error: float = 3e-6
    gradient_error: float = 3e-3
    adapter_error: float = 2e-6
    claimed: bool = True

    @property
    def name(self) -> str:
        """For test ids."""
        what = self.program or (self.quantize if self.backend in ARTIFACTS else "") or self.family
        return "-".join(
            (
                self.method,
                self.backend,
                what,
                *(["subspace"] if "subspace" in self.settings else []),
                *([self.family] if self.backend in ARTIFACTS else []),
            )
        )


STEPS = 6
LEARNING_RATE = {"prge": 0.05, "mezo": 1e-3, "lora": 1e-2, "lora-fa": 1e-2, "full": 1e-3}
LEARNING_RATE |= {"slideformer": 1e-3, "lsp": 1e-3, "mesp": 1e-2, "revffn": 1e-3}
GEMMA4: dict[str, Any] = {"family": "gemma4_text", "sizes": {"layers": 4}}
"""The last two layers attend to keys and values of the first two."""
MIXED: dict[str, Any] = {
    "family": "gemma4_text",
    "sizes": {"layers": 2, "enable_moe_block": True},
}
"""Experts stand next to each MLP; see `qwen3_moe` below for the number of layers."""
BIAS: dict[str, Any] = {"family": "qwen2", "sizes": {"tied": False, "layers": 1}}
SUBSPACE = {"subspace": "gradient", "optimizer": "adam", "calibration_rows": 5}
"""The default of prge if PyTorch trains, as `for_training` decides it; fewer rows."""
STREAMED = {"weight_placement": "streamed"}

MEZO = partial(Row, "mezo", "torch-cpu", gradient_error=2e-2, adapter_error=2e-5)
LORA = partial(Row, "lora", "torch-cpu", adapter_error=2e-4)
LORA_FA = partial(Row, "lora-fa", "torch-cpu", adapter_error=2e-4)
FULL = partial(Row, "full", "torch-cpu", adapter_error=1e-3)
MASTERS = "float32 and bfloat16 with float32 masters"
SLIDEFORMER = partial(Row, "slideformer", "torch-cpu", MASTERS, adapter_error=1e-3)
WHOLE = "float32 and bfloat16; AdamW itself if the subspace is as large as the matrices"
LSP = partial(Row, "lsp", "torch-cpu", WHOLE, adapter_error=1e-3)
MESP = partial(Row, "mesp", "torch-cpu", adapter_error=2e-4)
REVERSIBLE = "float32 and bfloat16; gradients with the bits of stored activations"
REVFFN = partial(Row, "revffn", "torch-cpu", REVERSIBLE, loss_error=1e-5, adapter_error=1e-3)
EAGER = (
    Row("prge", "torch-cpu"),
    Row("prge", "torch-cpu", settings=SUBSPACE, adapter_error=1e-5),
    Row("prge", "torch-cpu", settings={"noise": "rademacher", "top_layers": 1}, **BIAS),
    Row("prge", "torch-cpu", family="lfm2"),
    Row("prge", "torch-cpu", family="qwen3_5_text"),
    Row("prge", "torch-cpu", **GEMMA4),
    MEZO(),
    MEZO(**BIAS),
    LORA(),
    LORA(**BIAS),
    LORA_FA(),
    LORA_FA(**BIAS),
    FULL(),
    FULL(**BIAS),
    FULL(family="gpt2"),
    FULL(family="mistral"),
    SLIDEFORMER(),
    SLIDEFORMER(**BIAS),
    SLIDEFORMER(settings={"micro_batch_size": 1}, family="gpt2"),
    SLIDEFORMER(family="lfm2"),
    SLIDEFORMER(family="lfm2_moe"),
    SLIDEFORMER(family="qwen3_5_text"),
    SLIDEFORMER(**GEMMA4),
    LSP(),
    LSP(family="granitemoe"),
    LSP(family="lfm2"),
    LSP(family="qwen3_5_text"),
    LSP(**GEMMA4),
    LSP(settings={"schedule": "zero"}, **BIAS),
    MESP(),
    MESP(settings={"mlp_chunk_tokens": 7, "micro_batch_size": 1}, **BIAS),
    MESP(family="mistral"),
    MESP(**GEMMA4),
    MESP(**MIXED),
    *(
        MESP(family=family)
        for family in (
            "granite",
            "granitemoe",
            "lfm2",
            "lfm2_moe",
            "olmo2",
            "phi3",
            "qwen2_moe",
            "qwen3",
            "qwen3_5_text",
            "qwen3_moe",
            "smollm3",
        )
    ),
    LORA(family="lfm2_moe"),
    LORA(family="qwen3_moe"),
    MESP(family="gemma3_text", sizes={"layers": 3}, loss_error=1e-5),
    REVFFN(),
    REVFFN(settings={"coupling": "exact"}, **BIAS),
    REVFFN(settings={"micro_batch_size": 1}, family="qwen2_moe"),
    REVFFN(
        settings={"coupling": "paper", "streams": "float32", "not_converged": "store"},
        family="mistral",
    ),
)
GPU = partial(Row, backend="torch-cuda", loss_error=1e-5, gradient_error=2e-2)
CUDA = tuple(
    GPU(method, adapter_error=error)
    for method, error in (
        ("prge", 1e-5),
        ("mezo", 5e-5),
        ("lora", 1e-3),
        ("lora-fa", 1e-3),
        ("full", 2e-3),
        ("slideformer", 2e-3),
        ("lsp", 2e-3),
        ("mesp", 1e-3),
        ("revffn", 2e-3),
    )
)
# Not claimed before it has passed on a GPU; the pair is, by the row of the paper's settings.
CUDA += (GPU("prge", claim="", settings=SUBSPACE, adapter_error=1e-4, claimed=False),)
FORMS = "float32 and 4-bit weights, functional and stateful"
PRGE_PROGRAM = partial(Row, "prge", "android-cpu", FORMS)
BLOCKS = partial(Row, "mesp", "android-cpu", adapter_error=2e-4)
EXACT = partial(BLOCKS, "float32 weights, exact gradients; functions of one block")
ROUNDED = "{} weights (`{}`), exact gradients over them; functions of one block"
INT8 = partial(BLOCKS, ROUNDED.format("8-bit", "int8"))
Q4 = partial(BLOCKS, ROUNDED.format("4-bit", "q4"))
NEAR = "{} (`{}`), gradients near those over the weights; functions of one block"
INTEGERS = partial(
    Row,
    "mesp",
    "android-cpu",
    NEAR.format("8-bit weights and activations", "8da8w"),
    loss_error=5e-3,
)
FOUR_BITS = NEAR.format("4-bit weights and 8-bit activations", "8da4w")
PRGE_NPU = partial(
    Row, "prge", "android-npu", "float16 blocks, the rest float32; in QNN's simulator",
    loss_error=2e-3, gradient_error=1e-1,
)  # fmt: skip
MESP_NPU = partial(
    Row, "mesp", "android-npu",
    "exact gradients: float16 blocks, the rest float32; in QNN's simulator",
    loss_error=2e-3, adapter_error=1e-4,
)  # fmt: skip
"""float16's errors, whatever the family: `test_limits_of_mesp_on_the_npu_are_float16_s`."""
PROGRAMS = (
    PRGE_PROGRAM(program="functional"),
    PRGE_PROGRAM(program="stateful"),
    PRGE_PROGRAM(program="q4"),
    PRGE_PROGRAM(program="gemma3_text"),
    PRGE_PROGRAM(program="lfm2"),
    PRGE_PROGRAM(program="subspace, answers", adapter_error=1e-5),
    EXACT(program="blocks"),
    EXACT(program="blocks, sgd", adapter_error=1e-5),
    # XNNPACK adds in another order on a CPU without AVX-512, and AdamW divides by what is small:
    # 7e-8 at first, 1.4e-5 after five steps.
    EXACT(program="blocks of gemma3_text", loss_error=2e-5, adapter_error=3e-5),
    EXACT(program="blocks of gemma4_text"),
    EXACT(program="blocks of gemma4_text with experts"),
    EXACT(program="blocks of granite"),
    EXACT(program="blocks of granite, in ops"),
    EXACT(program="blocks of granitemoe"),
    EXACT(program="blocks of lfm2"),
    EXACT(program="blocks of lfm2_moe"),
    EXACT(program="blocks of qwen2_moe"),
    EXACT(program="blocks of qwen3_moe"),
    EXACT(program="blocks of qwen3_5_text"),
    EXACT(program="blocks of smollm3"),
    INT8(program="blocks, int8"),
    Q4(program="blocks, q4"),
    BLOCKS(ROUNDED.format("4-bit", "q4dq"), program="blocks, q4dq"),
    Q4(program="blocks of lfm2, q4"),
    INT8(program="blocks of granitemoe, int8"),
    Q4(program="blocks of lfm2_moe, q4"),
    # A convolution multiplies three products of integers.
    INTEGERS(program="blocks of lfm2, 8da8w", adapter_error=4e-3),
    INT8(program="blocks of gemma4_text, int8"),
    INT8(program="blocks of gemma4_text, int8, answers"),
    Q4(program="blocks of gemma4_text, q4"),
    INTEGERS(program="blocks of gemma4_text, 8da8w", adapter_error=4e-3),
    INT8(program="blocks of qwen3_5_text, int8"),
    Q4(program="blocks of qwen3_5_text, q4"),
    Q4(program="blocks of qwen3_5_text, q4, answers"),
    # A delta rule multiplies what four products of integers gave.
    INTEGERS(program="blocks of qwen3_5_text, 8da8w", loss_error=3e-2, adapter_error=3e-2),
    INTEGERS(program="blocks of gemma4_text with experts, 8da8w", adapter_error=1e-3),
    INTEGERS(program="blocks of granitemoe, 8da8w", adapter_error=1e-3),
    # So does this one, and a token between two experts may take the other.
    INTEGERS(program="blocks of lfm2_moe, 8da8w", adapter_error=1e-2),
    INTEGERS(program="blocks of qwen2_moe, 8da8w", adapter_error=1e-3),
    INTEGERS(program="blocks of qwen3_moe, 8da8w", adapter_error=1e-3),
    INTEGERS(program="blocks, 8da8w", adapter_error=1e-3),
    BLOCKS(FOUR_BITS, program="blocks, 8da4w", loss_error=5e-3, adapter_error=1e-3),
    PRGE_NPU(program="npu"),
    *(PRGE_NPU(program=f"npu {family}") for family in ("gemma3_text", "phi3", "qwen3", "smollm3")),
    # Over two answers a loss is a difference of two logits alone.
    PRGE_NPU(program="npu subspace", loss_error=5e-3, adapter_error=1e-5),
    MESP_NPU(program="npu blocks, sgd"),
    *(MESP_NPU(program=f"npu blocks of {family}") for family in ("phi3", "qwen3", "smollm3")),
    MESP_NPU(program="npu blocks of gemma3_text", adapter_error=4e-4),
)
MESP_IN_MLX = partial(
    Row, "mesp", "mlx-cpu", "float32; 4-bit and streamed weights", adapter_error=2e-4
)
MLX_PROGRAM = partial(
    Row, "mesp", "apple-mlx", "float32 on the CPU; not run on Metal", adapter_error=2e-4
)
MLX = (
    MESP_IN_MLX(),
    MESP_IN_MLX(settings=STREAMED, **BIAS),
    MESP_IN_MLX(family="gemma3_text", sizes={"layers": 3}, loss_error=1e-5),
    MESP_IN_MLX(family="granitemoe"),
    MESP_IN_MLX(settings=STREAMED, family="lfm2"),
    MESP_IN_MLX(family="lfm2_moe", sizes={"layers": 3}),
    MESP_IN_MLX(family="phi3"),
    MESP_IN_MLX(family="qwen3"),
    MESP_IN_MLX(**GEMMA4),
    MESP_IN_MLX(**MIXED),
    MESP_IN_MLX(settings=STREAMED, family="qwen3_5_text"),
    # With more layers two experts come within 1e-7 of each other, and either may be a token's.
    MESP_IN_MLX(family="qwen3_moe", sizes={"layers": 1}),
    MLX_PROGRAM(),
    MLX_PROGRAM(family="granitemoe"),
    MLX_PROGRAM(family="lfm2", sizes={"layers": 3}),
    MLX_PROGRAM(family="lfm2_moe", sizes={"layers": 3}),
    # Differences of products in a delta rule; PyTorch's float32 is as far.
    MLX_PROGRAM(family="qwen3_5_text", sizes={"layers": 3}, loss_error=2e-5),
    MLX_PROGRAM(**GEMMA4),
    MLX_PROGRAM(settings={"mlp_tiles": 3}, **BIAS),
    MLX_PROGRAM(family="qwen3_moe", sizes={"layers": 1}),
)
PACKED = {
    "jetson": "NF4 and INT8 weights; on the CPU here",
    "cuda-server": "NF4 and float32 weights; on the CPU here",
}
CUDA_ARTIFACTS = tuple(
    Row(
        method,
        target,
        PACKED[target],
        settings,
        quantize=quantize,
        adapter_error=2e-4 if method != "prge" else 1e-5 if settings is SUBSPACE else 2e-6,
        **more,
    )
    for target, quantize in (
        ("jetson", "nf4"),
        ("jetson", "int8"),
        ("cuda-server", "nf4"),
        ("cuda-server", "none"),
    )
    for method, settings, more in (
        ("prge", {"queries": 2, "noise": "rademacher"} if quantize == "int8" else {}, {}),
        *([("prge", SUBSPACE, {})] if quantize == "nf4" else []),
        ("mesp", {}, BIAS if quantize == "int8" else {}),
        ("lora", {}, {}),
        ("lora-fa", {}, {}),
    )
)
MIXTURES = (Row("mesp", "jetson", PACKED["jetson"], family="qwen2_moe", adapter_error=2e-4),)
CONVOLUTIONS = tuple(
    Row("mesp", target, PACKED[target], family="lfm2", quantize=quantize, adapter_error=2e-4)
    for target, quantize in (("jetson", "nf4"), ("cuda-server", "none"))
)
TABLE: tuple[Row, ...] = (*EAGER, *MLX, *CUDA, *PROGRAMS, *CUDA_ARTIFACTS, *MIXTURES, *CONVOLUTIONS)

WHERE = {
    "torch-cpu": "PyTorch on the CPU",
    "torch-cuda": "PyTorch on an NVIDIA GPU",
    "mlx-cpu": "MLX on the CPU",
    "apple-mlx": "MLX functions (`apple-mlx`), from Python and C++",
    "android-cpu": "ExecuTorch program (`android-cpu`)",
    "jetson": "artifact for a Jetson (`jetson`), in PyTorch",
    "cuda-server": "artifact for an NVIDIA GPU (`cuda-server`), in PyTorch",
    "android-npu": "ExecuTorch program for a Qualcomm NPU (`android-npu`)",
}


def claims() -> list[tuple[str, str, str]]:
    """Each method and backend with each of the forms that are claimed of it, once."""
    return list(dict.fromkeys((row.method, row.backend, row.claim) for row in TABLE if row.claimed))


def family_of(row: Row) -> str:
    """Return the family of the model that a row runs."""
    from tests.program_tables import ALL, MODELS

    return MODELS[ALL[row.program][0]]["family"] if row.program else row.family


def answers(row: Row) -> bool:
    """Return True if the row's program answers over the weights that are trained on, and its products
    are not of rounded activations."""
    from tests.program_tables import BLOCKS

    settings = BLOCKS.get(row.program, ("", {}))[1]
    if settings.get("export.answers") == "packed" or settings.get("export.quantize") == "8da4w":
        return False
    return "export.context_tokens" in settings


def answers_claim() -> str:
    """Return the claims about programs that answer, and their families."""
    families = sorted({family_of(row) for row in TABLE if answers(row)})
    return "answers with PyTorch's greedy tokens: " + ", ".join(f"`{one}`" for one in families)


def families_markdown() -> str:
    """The page on models: each family, and what runs it in a row of this table."""
    of_family: dict[str, dict[str, set[str]]] = {}
    for row in TABLE:
        if row.claimed:
            of_family.setdefault(family_of(row), {}).setdefault(row.method, set()).add(row.backend)
    methods = list(dict.fromkeys(row.method for row in TABLE))
    lines = [
        "| Family | " + " | ".join(f"`{method}`" for method in methods) + " |",
        "| --- " * (len(methods) + 1) + "|",
    ]
    for family in sorted(of_family):
        cells = (
            ", ".join(b for b in WHERE if b in of_family[family].get(method, ()))
            for method in methods
        )
        lines.append(f"| `{family}` | " + " | ".join(cell or "–" for cell in cells) + " |")
    return "\n".join(lines)


def markdown() -> str:
    """Return the table of docs/results/conformance.md."""
    lines = ["| Method | Runs on | As |", "| --- | --- | --- |"]
    lines += [f"| {method} | {WHERE[backend]} | {claim} |" for method, backend, claim in claims()]
    lines.append(f"| mesp | {WHERE['android-cpu']} | {answers_claim()} |")
    return "\n".join(lines)
