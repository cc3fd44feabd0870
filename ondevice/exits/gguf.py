"""`gguf`: base plus adapter as one file for llama.cpp, LM Studio, Jan and others: weights,
tokenizer, chat template.

Matrices have the requested type; vectors and a mixture's routers stay in float32. With `q4_0` the
embedding and the output head are `q8_0`: they are read once per token, and 4 bits hurt them most.
`q4_k_m`, `q5_k_m` and `q6_k` mix types as llama-quantize does, and need its own code: `xllamacpp`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import storage_errors
from ondevice.core.errors import ModelError, VerificationError
from ondevice.core.untrusted import read_object
from ondevice.data.encode import end_ids
from ondevice.data.tasks.chat_template import CLOCK
from ondevice.data.tasks.trained import to_text
from ondevice.exits import llama_cpp
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import Rounding, check_merged, merge
from ondevice.exits.gguf_text import Reading, reading_of, refusal, text_sent
from ondevice.exits.task import date_notes
from ondevice.gguf.config import check_writable, rope_divisors, write_config
from ondevice.gguf.names import (
    architecture_of,
    from_gguf,
    gguf_parts,
    part_shapes,
    parts_of,
    to_gguf,
)
from ondevice.gguf.quants import (
    BLOCK,
    K_BLOCK,
    MIXTURES,
    check_writer,
    file_type,
    rounded,
    types_of,
)
from ondevice.gguf.read import read_fields, stored_weight
from ondevice.gguf.task import GGUF_KEY
from ondevice.gguf.write import write_gguf
from ondevice.gguf.write_tokenizer import ENDS, split_ends, write_tokenizer
from ondevice.models import load_tokenizer
from ondevice.models.sources.cache import RECORD_NAME
from ondevice.models.text_model import text_dims

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from ondevice.data.tasks.trained import TrainedTask
    from ondevice.models import LoadedModel

DTYPES = ("float16", "float32", "q8_0", "q4_0", *MIXTURES)
ROUNDINGS = {
    "float32": Rounding(0.0),
    "float16": Rounding(2.0**-11, BLOCK, 2.0**-25),
    "q8_0": Rounding(0.5 / 127 + 2.0**-11, BLOCK, 2.0**-18),
    "q4_0": Rounding(1 / 8 + 2.0**-11, BLOCK, 2.0**-22),
    "q5_0": Rounding(1 / 16 + 2.0**-11, BLOCK, 2.0**-21),
    "q5_1": Rounding(1 / 31 + 2.0**-9, BLOCK, 2.0**-19),
    "q4_k": Rounding(8 / 15 + 3 / 126 + 2.0**-9, K_BLOCK, 2.0**-14),
    "q5_k": Rounding(8 / 31 + 3 / 126 + 2.0**-9, K_BLOCK, 2.0**-13),
    "q6_k": Rounding(0.16, K_BLOCK, 2.0**-12),
}
"""What each type may round. `q4_0` has one step less on one side; scales are float16, whose least
step is 2**-25.

llama.cpp fits scale and minimum of a K-quant to the weighted squares of a block's errors. The sum
is at most that of the evenly spaced levels, half a step (a 15th of the largest number in `q4_k`)
each, and weights are at least the root of the block's mean square, at most twice that on average.
So one element of 32 may be off by sqrt(32 * 2) half steps. Six bits for scale and minimum add
3/126. In `q6_k` weights are the squares; one scale may move by 9%, and a clipped number by two
steps."""
OFFSET_ROUNDING = Rounding(2.0**-21)
"""Of a norm's weight, to which a constant is added, and from which it is taken again."""
FUNCTION_ROUNDING = Rounding(2.0**-21, floor=2.0**-21)
"""Of numbers that a file has a function of: of the exponential of one near 0, its last bit."""
UNASKED = (
    "llama.cpp itself did not read the file, because the package xllamacpp is not installed: its"
    " tokens were checked with a model of its rules"
)


def write(request: Request, path: Path) -> Checked:
    """Merge in float32, write every tensor in its type, read all of them back and compare."""
    assert request.model is not None  # noqa: S101 - `convert` refuses
    reading = check_texts(request)
    merged = merge(request)
    loaded = merged.loaded
    written = write_model(request, loaded, reading, path)
    kept = _kept(request, loaded, written.names, written.types)
    checked = check_merged(request, merged, read_tensors(path, loaded), written.limits, kept)
    return replace(checked, notes=(*checked.notes, *check_read(path, reading, loaded, request)))


@dataclass(frozen=True)
class Written:
    """A file's tensors.

    Attributes:
        names: in the file, by transformers' names.
        types: by the file's names.
        limits: what each may have been rounded, by transformers' names.
    """

    names: dict[str, tuple[str, ...]]
    types: dict[str, str]
    limits: dict[str, Rounding]


def write_model(request: Request, loaded: LoadedModel, reading: Reading, path: Path) -> Written:
    """Write a model with tokenizer and metadata; the list of its tensors is read back."""
    from gguf import GGUFWriter

    family = type(loaded.family)
    dims = loaded.dims
    state = loaded.model.state_dict()
    architecture = architecture_of(family, dims)
    names = gguf_parts(family, dims, architecture)
    writer = GGUFWriter(path, architecture)
    _describe(writer, loaded, request, reading.name)
    write_config(writer, family, dims, loaded.model.config.to_dict())
    write_tokenizer(
        writer,
        loaded.tokenizer,
        dims.vocab,
        _stops(loaded, request.task),
        loaded.source.source,
        reading.templates,
        reading.add_space,
    )
    divisors = rope_divisors(loaded.model, dims)
    shapes = {
        part: shape
        for name, parts in names.items()
        for part, shape in zip(parts, part_shapes(tuple(state[name].shape), len(parts)))
    }
    types = types_of(shapes, request.dtype)
    plan = {part: (shape, types[part]) for part, shape in shapes.items()}
    plan |= {name: (value.shape, "float32") for name, value in divisors.items()}

    def tensors() -> Iterator[tuple[str, np.ndarray, str]]:
        for name, parts in names.items():
            arrays = parts_of(family, name, state[name].numpy(), dims, len(parts))
            for part, array in zip(parts, arrays):
                yield part, array, plan[part][1]
        for name, value in divisors.items():
            yield name, value, "float32"

    with storage_errors(request.out):
        write_gguf(writer, tensors(), plan)
    limits = {
        name: max((ROUNDINGS[plan[part][1]] for part in parts), key=lambda one: one.share)
        for name, parts in names.items()
    }
    if dims.traits.norm_offset:
        limits |= {name: OFFSET_ROUNDING for name in names if state[name].ndim == 1}
    limits |= {name: FUNCTION_ROUNDING for name in names if family.gguf_function(name)}
    _check_stored(path, plan, divisors, request)
    return Written(names, types, limits)


def check_read(
    path: Path, reading: Reading, loaded: LoadedModel, request: Request
) -> tuple[str, ...]:
    """Let llama.cpp read a written file, and return what the user should know; see `check_file`."""
    said = _notes(loaded, request, reading)
    return (*reading.notes, *said, *check_file(path, reading, loaded.tokenizer, request))


def check(request: Request) -> None:
    """Refuse a model or a tokenizer that llama.cpp would not read as trained; see `check_texts`."""
    check_model(str(request.model), request.revision)
    check_writer(request.dtype)
    check_texts(request)


def check_model(model: str, revision: str | None) -> None:
    """Check that a merged GGUF file can describe a model; ModelError if not. No weight is read."""
    dims, family = text_dims(model, revision)
    check_writable(family, dims, model)


def check_texts(request: Request) -> Reading:
    """Choose how llama.cpp is to read texts, once, and prove it with our model of its rules.

    Raises:
        VerificationError: it would read other tokens than were trained.
    """
    if "reading" not in request.known:
        model = str(request.model)
        tokenizer = load_tokenizer(model, request.revision)
        rows = text_dims(model, request.revision)[0].vocab
        reading = reading_of(tokenizer, request.task, rows, request.out.stem, model)
        request.known["reading"] = reading
    return request.known["reading"]


def check_file(path: Path, reading: Reading, tokenizer: Any, request: Request) -> tuple[str, ...]:
    """Let llama.cpp read a written file: it takes it, and tokens and prompts are the training's.

    Returns: a note if llama.cpp is not installed.

    Raises:
        VerificationError: it does not take the file, or reads it otherwise.
    """
    if not llama_cpp.is_installed():
        return (UNASKED,)
    known = {trial for trial, _ in reading.differs}
    trials = [trial for trial in reading.trials if trial not in known]
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    turns = [list(trial.turns) for trial in trials if trial.turns]
    answer = llama_cpp.ask(path, [text_sent(one, tokenizer, begins) for one in trials], turns)
    if "error" in answer:
        raise VerificationError(
            f"llama.cpp does not take {request.out}; it was not written",
            expected="a file that it loads",
            received=answer["error"],
            hint="please report this with the model",
        )
    for trial, ids in zip(trials, answer["ids"]):
        if tuple(ids) != trial.ids:
            raise refusal((trial, ids), tokenizer, str(request.model), "llama.cpp")
    asked = [trial for trial in trials if trial.turns]
    bos = tokenizer.bos_token or ""
    for trial, prompt in zip(asked, answer["prompts"]):
        if prompt is None or prompt.removeprefix(bos) != trial.text.removeprefix(bos):
            raise VerificationError(
                f"{request.model}: llama.cpp's prompt is not the training's",
                expected=repr(trial.text[:200]),
                received=repr(prompt and prompt[:200]),
                hint="use --to safetensors or --to mlx-model, whose readers render the template",
            )
    return ()


def _notes(loaded: LoadedModel, request: Request, reading: Reading) -> list[str]:
    """Return what a reader of the file should know about its date and its ends."""
    tokenizer: Any = loaded.tokenizer
    task = request.task
    notes = date_notes(task, tokenizer.chat_template if task is None else task.chat_template)
    if notes and f"{CLOCK}(" in json.dumps(reading.templates):
        notes = ["llama.cpp's prompt has the date of the day; that of the training had another"]
    _, beyond = split_ends(tokenizer, _stops(loaded, request.task))
    if beyond:
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(beyond)))
        notes.append(
            f"llama.cpp takes {ENDS} end tokens, and does not stop at {len(beyond)} more of the"
            f" model's: {names}; give them as its reverse prompts"
        )
    return notes


def _stops(loaded: LoadedModel, task: TrainedTask | None) -> list[int]:
    """Return what ends an answer: what the training ended answers with, then the model's own."""
    own: Any = loaded.model.generation_config.eos_token_id
    known = [own] if isinstance(own, int) else list(own or ())
    trained = end_ids(loaded.tokenizer) if task is None else task.trained_ends(loaded.tokenizer)
    return [*trained, *known]


def _describe(writer: GGUFWriter, loaded: LoadedModel, request: Request, name: str) -> None:
    """Add the general keys: name, base model, licence, type of the weights."""
    from gguf import GGML_QUANT_VERSION, GGUFType

    writer.add_type(GGUFType.MODEL)
    writer.add_name(name)
    if request.task is not None:
        writer.add_string(GGUF_KEY, to_text(request.task))
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, loaded.source.source)
    folder = loaded.source.path
    if folder is not None and (folder / RECORD_NAME).is_file():  # a converted model's record
        origin = read_object(folder / RECORD_NAME, ModelError).get("origin", {})
        if licence := origin.get("licence") or origin.get("license"):
            writer.add_license(licence)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_file_type(file_type(request.dtype))


def read_tensors(path: Path, loaded: LoadedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Read the tensors of a model's file back: dequantised, with transformers' names and layout."""
    family = type(loaded.family)
    dims = loaded.dims
    names = gguf_parts(family, dims, architecture_of(family, dims))
    tensors = {tensor.name: tensor for tensor in read_fields(path).tensors}
    for name, parts in names.items():
        if all(part in tensors for part in parts):
            yield name, from_gguf(family, name, stored_weight(tensors, parts), dims)


def _check_stored(
    path: Path, plan: dict[str, Any], divisors: dict[str, np.ndarray], request: Request
) -> None:
    """Hold the file's tensors against the plan: no other ones, and the rotary divisors to the bit.

    Raises:
        VerificationError: names a tensor that is missing, not planned, or different.
    """
    stored = {tensor.name: tensor.data for tensor in read_fields(path).tensors}
    wrong = sorted(stored.keys() ^ plan.keys())
    wrong += [
        name
        for name, value in divisors.items()
        if name in stored and not np.array_equal(stored[name], value)
    ]
    if wrong:
        raise VerificationError(
            f"read back, tensor '{wrong[0]}' of {request.out} is not base plus adapter; nothing"
            " was written",
            expected=f"the {len(plan)} tensors of the model",
            received=f"{len(stored)} tensors, {len(wrong)} of them wrong",
            hint="please report this with the model and the adapter",
        )


def _kept(
    request: Request,
    loaded: LoadedModel,
    names: dict[str, tuple[str, ...]],
    types: dict[str, str],
) -> float:
    """Return the fraction of the adapter's change D of the weights that rounding left.

    It is the rounded merged weights minus the rounded base weights, projected on D: 1 without
    rounding. Single elements may keep their quantisation step; over a matrix the steps that are
    crossed add up to the change.
    """
    adapter = request.adapter
    state = loaded.model.state_dict()
    family = type(loaded.family)
    dims = loaded.dims
    projected = exact = 0.0
    for linear in adapter.linears:
        weight, (a, b) = f"{linear}.weight", adapter.pair(linear)
        dtype = types[names[weight][0]]
        if dtype == "float32":
            return 1.0
        columns = family.gguf_columns(weight, dims)
        if columns is not None:
            a = a[:, columns]
        change = to_gguf(
            family, weight, adapter.alpha / adapter.rank * (b @ a), dims, is_weight=False
        )
        merged = to_gguf(family, weight, state[weight].numpy(), dims)
        moved = rounded(merged, dtype) - rounded(merged - change, dtype)
        projected += float(np.vdot(moved, change))
        exact += float(np.vdot(change, change))
    return projected / exact


FORM = Form("gguf", "llama.cpp", write, marker=None, dtypes=DTYPES, merged=True, check=check)
