"""A program with packed weights that predicts the next token (`answers.py` writes it): one method,
with its cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import sha256_file
from ondevice.artifact.manifest import ANSWERS_FILE
from ondevice.core.errors import ArtifactError, MissingPackageError
from ondevice.core.session import IGNORE
from ondevice.core.untrusted import read_object, well_formed
from ondevice.exporters.executorch.blocks_model import check_room
from ondevice.exporters.executorch.session import execute, load_runtime

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter

PROGRAM_FILE, FORMAT = "model.pte", 1
"""A file of the folder; `FORMAT` is the version of its description, `ANSWERS_FILE`."""


def load_operators() -> None:
    """Register the cache's operators, those of ExecuTorch's own language models, and the quantised
    kernels.

    Raises:
        MissingPackageError: ExecuTorch is not installed.
    """
    load_runtime()
    try:
        import executorch.extension.pybindings.portable_lib
        import torch

        if not hasattr(torch.ops.llama, "custom_sdpa"):
            from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
        import executorch.kernels.quantized  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "ExecuTorch's operators for language models are not installed",
            received=str(error),
            hint="pip install 'ondevice-train[executorch]'",
        ) from None


class PackedModel:
    """A `TokenModel` over the program.

    Args:
        folder: with `model.pte` and `answers.json`.

    Attributes:
        context_tokens: most tokens of a conversation.
        piece_tokens: most tokens of a call.
        read: tokens that were read so far; set it back to forget the tokens after it.

    Raises:
        ArtifactError: the folder holds no such program.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        try:
            self.described = read_object(self.folder / ANSWERS_FILE, ArtifactError)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{folder} holds no program that answers", received=str(error)
            ) from None
        if self.described.get("format") != FORMAT:
            raise ArtifactError(
                f"{folder}: {ANSWERS_FILE} is of another version", expected=f"format {FORMAT}"
            )
        with well_formed(self.folder / ANSWERS_FILE, ArtifactError, hint="copy it again"):
            self.context_tokens = self.described["context_tokens"]
            self.piece_tokens = self.described["chunk_tokens"]
        self.read = 0
        load_operators()
        try:
            # The program goes with its last method; both are kept.
            self._program = load_runtime().load_program(str(self.folder / PROGRAM_FILE))
            self._method: Any = self._program.load_method("forward")
        except RuntimeError as error:
            raise ArtifactError(
                f"{self.folder / PROGRAM_FILE}: the runtime cannot load it", received=str(error)
            ) from None
        self._adapter: Any = None
        self.use(None)

    def use(self, adapter: Adapter | None) -> None:
        """Change the adapter, and forget what was read.

        Raises:
            ArtifactError: it is of another rank, or changes layers for which the program takes
                none.
        """
        from ondevice.exporters.executorch.answer_model import LoraPlace, flatten

        with well_formed(self.folder / ANSWERS_FILE, ArtifactError, hint="copy it again"):
            rank = self.described["rank"]
            pairs = [LoraPlace(**entry) for entry in self.described["layout"]]
        if adapter is not None:
            known = {pair.linear: pair for pair in pairs}
            beyond = [name for name in adapter.linears if name not in known]
            if beyond or adapter.rank != rank:
                expected = "none: its own is merged"
                if known:
                    expected = f"rank {rank}, on {len(known)} linear layers"
                raise ArtifactError(
                    "the program does not take this adapter",
                    expected=expected,
                    received=f"rank {adapter.rank}" + (f", on {beyond[0]}" if beyond else ""),
                    hint="export the program with the adapter's settings, or merge it: --to executorch",
                )
            for name, pair in known.items():
                if name in adapter.linears:
                    a, b = adapter.pair(name)
                    if (a.shape[1], b.shape[0]) != (pair.inputs, pair.outputs):
                        raise ArtifactError(
                            f"the adapter is of another model: {name}", received=[a.shape, b.shape]
                        )
        self.read = 0
        self._adapter = None
        if pairs:
            import torch

            flat = np.zeros(self.described["adapter_size"], np.float32)
            if adapter is not None:
                flat = flatten(adapter, pairs, rank)
            self._adapter = torch.from_numpy(flat)

    def rewind(self, tokens: int) -> int:
        """Forget all but the first `tokens` tokens."""
        self.read = tokens
        return tokens

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Read the next tokens; return the logits of the one after them, float32 [vocab].

        Raises:
            ConfigError: no token, or the conversation is longer than the context.
        """
        import torch

        check_room(ids, self.read, self.context_tokens)
        adapter = () if self._adapter is None else (self._adapter,)
        logits = None
        for low in range(0, len(ids), self.piece_tokens):
            part = list(ids[low : low + self.piece_tokens])
            inputs = [torch.tensor([part]), torch.tensor([self.read]), *adapter]
            (logits,) = execute(self._method, inputs)
            self.read += len(part)
        assert logits is not None  # noqa: S101 - there is at least one token
        return logits[0].numpy()

    def close(self) -> None:
        """Release the program."""
        self._method = self._program = None


class PackedScores:
    """An `Evaluator` over the program: a prompt is read once for all candidates that follow it.

    Attributes:
        eval_batch_size: None, as rows are read one by one.
        lengths_tokens: the longest sequence.
    """

    eval_batch_size: int | None = None
    lengths_tokens: tuple[int, ...] | None

    def __init__(self, model: PackedModel) -> None:
        self.model = model
        self.lengths_tokens = (model.context_tokens,)
        self._read: list[int] = []

    @property
    def sha256(self) -> str:
        """The program's digest."""
        return sha256_file(self.model.folder / PROGRAM_FILE)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood over its labelled tokens, and their count."""
        losses = [self._loss(row.tolist(), wanted) for row, wanted in zip(ids, labels, strict=True)]
        return np.array(losses, np.float32), (labels[:, 1:] != IGNORE).sum(1)

    def _loss(self, ids: list[int], labels: np.ndarray) -> float:
        loss = 0.0
        for place in np.flatnonzero(labels[1:] != IGNORE) + 1:
            logits = self._logits(ids[:place]).astype(np.float64)
            highest = logits.max()
            loss += highest + np.log(np.exp(logits - highest).sum()) - logits[labels[place]]
        return float(loss)

    def _logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits after `ids`; what the program has read of them is not read again."""
        same = 0
        while same < min(len(ids) - 1, len(self._read)) and ids[same] == self._read[same]:
            same += 1
        same = self.model.rewind(same)
        self._read = list(ids)
        return self.model.feed(ids[same:])


def has_answers(folder: Path) -> bool:
    """Return True if a folder holds a program that answers."""
    return (Path(folder) / ANSWERS_FILE).is_file()
