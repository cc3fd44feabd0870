"""Pictures of rows as a preview shows them: small, with their size and tokens."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from ondevice.core.config import Documented
from ondevice.data.pictures import FIRST_ID, opened, picture_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

SIDE = 96
"""Most pixels of a thumbnail's side."""
CELLS = 24
"""Most characters of its side in a terminal; a character is two pixels, one above the other."""


class Thumbnail(Documented):
    """A picture of an example."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Its file's name; empty if the row has its bytes."""

    width: int
    height: int
    tokens: int
    """Of the example."""

    png: str
    """The picture in at most 96 x 96 pixels: base64 of a PNG file."""

    def sentence(self) -> str:
        """Return name, size and tokens in words."""
        return (
            f"{self.name or 'bytes of the row'}, {self.width} x {self.height}, {self.tokens} tokens"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show the picture in a terminal's colours, and its sentence everywhere."""
        from rich.text import Text

        if console.color_system is not None:
            yield self._cells()
        yield Text(f"image: {self.sentence()}", style="dim")

    def _cells(self) -> Any:
        """Return the picture as half blocks: the upper pixel colours the block, the lower one what
        is behind it."""
        from PIL import Image
        from rich.text import Text

        image = Image.open(io.BytesIO(base64.b64decode(self.png))).convert("RGB")
        image.thumbnail((CELLS, CELLS))
        pixels: Any = image.load()
        shown = Text()
        for y in range(0, image.height, 2):
            for x in range(image.width):
                above = "#{:02x}{:02x}{:02x}".format(*pixels[x, y])
                below = "#{:02x}{:02x}{:02x}".format(*pixels[x, min(y + 1, image.height - 1)])
                shown.append("▀", style=f"{above} on {below}")
            shown.append("\n" * (y + 2 < image.height))
        return shown


def thumbnails(ids: Sequence[int], tokenizer: Any) -> tuple[Thumbnail, ...]:
    """Return the pictures of an example's ids, in their order, each once.

    Raises:
        DataError: a picture has changed since its row was read.
    """
    numbers = [picture_of(token) for token in ids if token >= FIRST_ID]
    found = []
    for number in dict.fromkeys(numbers):
        content, data = tokenizer.pictures.content(number)
        image = opened(data)
        width, height = image.size
        image.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        image.save(file, "PNG")
        found.append(
            Thumbnail(
                name=content.name if isinstance(content, Path) else "",
                width=width,
                height=height,
                tokens=numbers.count(number),
                png=base64.b64encode(file.getvalue()).decode(),
            )
        )
    return tuple(found)
