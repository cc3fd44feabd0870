"""Chat with what was trained: what the user types is framed as the training framed its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.chat import open_chat, use_adapter
from ondevice.api.predict import Predictor, open_predictor
from ondevice.api.predictions import PredictedRow
from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.exporters.executorch.packed import has_answers
from ondevice.generation.torch_model import TorchModel
from ondevice.training.trained import TrainedSource, adapter_folder, find_trained, task_of_adapter

if TYPE_CHECKING:
    from ondevice.data.tasks.trained import TrainedTask
    from ondevice.generation.generator import Generator
    from ondevice.generation.prompt import Messages

NEW_TOKENS = 128
"""Most tokens of a reply if nothing was trained."""


class TrainedChat:
    """Replies to messages; with a recorded task as it was trained, otherwise as the model does.

    Args:
        source: a model, an artifact, a run or an adapter.
        adapter: of the model, or the run that trained it.
        revision, dtype: as for `open_chat`.

    Attributes:
        task: what was trained; None without a record.
        generator: None if the model only picks labels.
        picked: the last reply, if it was a label.
    """

    def __init__(
        self, source: str, adapter: Path | None = None, *, revision: str | None = None,
        dtype: str = "float32",
    ) -> None:  # fmt: skip
        trained = TrainedSource("model", source, None, source, revision)
        if Path(source).is_dir():
            trained = find_trained(source)
        self._trained = trained
        self._options = {"revision": revision, "dtype": dtype}
        folder = trained.adapter if adapter is None else adapter_folder(adapter)
        self.generator: Generator | None = None
        self.picked: PredictedRow | None = None
        self._predictor: Predictor | None = None
        self._open(trained.task if adapter is None else task_of_adapter(folder), folder)

    def _open(self, task: TrainedTask | None, folder: Path | None) -> None:
        program = Path(self._trained.model)
        is_program = has_answers(program) or (program / MANIFEST_NAME).is_file()
        if task is not None and task.has_candidates and is_program:
            source = self._trained.model
            self._follow(task, open_predictor(source, adapter=folder, **self._options))
            return
        self.generator = open_chat(self._trained.model, folder, **self._options)
        self._plain = self.generator.tokenizer, self.generator.end_tokens
        self._follow(task)

    def _follow(self, task: TrainedTask | None, predictor: Predictor | None = None) -> None:
        """Frame prompts, and end replies, as `task` does; None as the model does."""
        self.task = task
        self._predictor = predictor
        generator = self.generator
        if generator is None:
            return
        generator.tokenizer, generator.end_tokens = self._plain
        if task is None:
            return
        generator.tokenizer = task.with_template(generator.tokenizer)
        generator.end_tokens = task.end_ids(generator.tokenizer) or generator.end_tokens
        if isinstance(generator.model, TorchModel):
            self._predictor = Predictor.of(generator.model.loaded, task)
        else:
            self._predictor = Predictor.of_program(generator, task)

    def use(self, adapter: Path | None) -> None:
        """Go on with another adapter, or that of a run, or without one.

        Raises:
            ArtifactError: it does not fit; the previous one stays.
        """
        if self.generator is None:
            folder = None if adapter is None else adapter_folder(adapter)
            task = self._trained.task if folder is None else task_of_adapter(folder)
            self._open(task, folder)
            return
        task = use_adapter(self.generator, adapter)
        if adapter is None and self._trained.adapter is None:
            task = self._trained.task
        self._follow(task)

    @property
    def has_template(self) -> bool:
        """True if replies continue a conversation, with a chat template."""
        if self.generator is None:
            return False
        if self.task is not None and self.task.framing != "chat template":
            return False
        return self.generator.has_template

    @property
    def new_tokens(self) -> int:
        """Most tokens of a reply by default."""
        return self._predictor.max_new_tokens if self._predictor else NEW_TOKENS

    def stream(self, messages: Messages, **sampling: Any) -> Iterator[str]:
        """Yield the reply to the last message; options as for `Generator.stream`.

        Without a chat template only the last message is a prompt.
        """
        text = messages[-1]["content"]
        self.picked = None
        if self.task is not None and self.task.has_candidates:
            assert self._predictor is not None  # noqa: S101  a task has one
            self.picked = self._predictor.one(self._predictor.asked_text(text))
            yield f"{self.picked.prediction} ({self.picked.probability:.4f})"
            return
        generator = self.generator
        assert generator is not None  # noqa: S101  only labels do without
        prompt: Any = text
        if self.has_template:
            prompt = messages
        elif self._predictor is not None:
            prompt = self._predictor.asked_text(text).prompt
            if self.task is not None:
                sampling["stop"] = [*sampling.get("stop", ()), *self.task.stops]
        yield from generator.stream(prompt, **sampling)
