"""Rows with images for a program of blocks: the base checkpoint's tower reads each picture once on
the host, and its output takes the place of the tokens' embeddings.

The program is the text's own. So it takes models whose language model treats a picture's tokens as
those of text: one position each, seen by later ones only.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.data.pictures import FIRST_ID, picture_of
from ondevice.models.families.vision import first_id, look
from ondevice.models.load import load_model

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.manifest import ModelInfo
    from ondevice.data.pictures import Pictures


class HostTower:
    """The embeddings of the pictures of a run.

    Args:
        pictures: of the run.
        model: the checkpoint that was exported; it is in memory only while pictures are read.
    """

    def __init__(self, pictures: Pictures, model: ModelInfo) -> None:
        self.pictures = pictures
        self.model = model
        self.seen: dict[int, Tensor] = {}

    def read(self) -> None:
        """Read all pictures of the run that were not read before.

        Raises:
            ArtifactError: the checkpoint is not the one that was exported.
            ConfigError: the model reads a picture's tokens in another way than text.
            DataError: a picture's file has changed.
        """
        new = [number for number in self.pictures.numbers if number not in self.seen]
        if not new:
            return
        loaded = load_model(self.model.source, revision=self.model.revision)
        if loaded.source.sha256 != self.model.sha256:
            raise ArtifactError(
                f"{self.model.source} is not the model that was exported",
                expected=self.model.sha256,
                received=loaded.source.sha256,
                hint="rows with images need it; rows of text do not",
            )
        self._check(loaded.model)
        for number in new:
            pooled = look(loaded.model, self.pictures, number).outputs["pooler_output"]
            parts = pooled if isinstance(pooled, list) else [pooled]
            rows = [part.float().reshape(-1, part.shape[-1]).numpy() for part in parts]
            self.seen[number] = parts[0].new_tensor(np.concatenate(rows), dtype=parts[0].dtype)

    def _check(self, model: Any) -> None:
        """Refuse a model whose picture tokens see each other, have positions of their own, or enter
        several layers."""
        kind = model.config.model_type
        if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
            return
        raise ConfigError(
            f"a block program takes no images of {kind} models: their tokens see each other, or "
            "have positions in the picture",
            expected="a model that reads them as text, such as SmolVLM2, Mistral 3 or LFM2-VL",
            received=f"rows with images, model_type {kind!r}",
            hint="ondevice train trains them in PyTorch; rows of text run here",
        )

    def place(self, ids: np.ndarray, x: Tensor) -> Tensor:
        """Return the first block's input [N, D] with pictures' rows in their places."""
        x = x.clone()
        flat = ids.reshape(-1)
        (places,) = np.nonzero(flat >= FIRST_ID)
        for at in places.tolist():
            token = int(flat[at])
            number = picture_of(token)
            if number not in self.seen:
                self.read()
            x[at] = self.seen[number][token - first_id(token)]
        return x
