"""Pictures for a language model: a tower of vision reads each once, and its output is kept.

The tower is frozen, so a picture's tokens are the same in every step. transformers takes them in
place of pixels (`mm_encoder_outputs`), and puts them where the row has the picture's ids.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ModelError
from ondevice.data.pictures import FIRST_ID, MOST_TOKENS, picture_of

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.data.pictures import Pictures

_TAKEN = "mm_encoder_outputs"


@dataclass(frozen=True)
class SeenPicture:
    """The tensors that are kept of a picture, on the host.

    Attributes:
        outputs: tensors of the tower, by their names in transformers' output; a list has one for
            each layer that they enter.
        inputs: what the language model asks of a picture's shape, such as `image_grid_thw`.
    """

    outputs: dict[str, Any]
    inputs: dict[str, Tensor]


def with_pictures(
    model: Any, pictures: Pictures, ids_BT: Tensor, seen: dict[int, SeenPicture]
) -> dict[str, Any]:
    """Return transformers' inputs of rows that may have pictures.

    Args:
        ids_BT: int64 [B, T], with pictures' own ids.
        seen: pictures that the tower has read; others are added.

    Raises:
        DataError: an id is of no picture of this run.
        ModelError: the model's class does not take what was kept.
    """
    import torch

    is_picture = ids_BT >= FIRST_ID
    if not bool(is_picture.any()):
        return {"input_ids": ids_BT}
    # A picture's first token has the lowest digits 0; the order is that of rows, then of places.
    tokens = ids_BT[is_picture].tolist()
    numbers = [picture_of(token) for token in tokens if token == first_id(token)]
    for number in numbers:
        if number not in seen:
            seen[number] = look(model, pictures, number)
    parts = [seen[number] for number in numbers]
    mark = pictures.processor.image_token_id
    inputs = {
        name: torch.cat([part.inputs[name] for part in parts]).to(ids_BT.device)
        for name in parts[0].inputs
    }
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = is_picture.int()
    outputs = _joined(model, [part.outputs for part in parts], ids_BT.device)
    return {
        "input_ids": ids_BT.masked_fill(is_picture, mark),
        _TAKEN: {"image": outputs},
        **inputs,
    }


def first_id(token: int) -> int:
    """Return the id of the first token of a token's picture."""
    return FIRST_ID + picture_of(token) * MOST_TOKENS


def look(model: Any, pictures: Pictures, number: int) -> SeenPicture:
    """Run the tower of vision on one picture."""
    import torch

    base = model.base_model
    if _TAKEN not in inspect.signature(base.forward).parameters:
        raise ModelError(
            f"images of {model.config.model_type} models are not trained on here",
            expected=f"a class of transformers whose model takes {_TAKEN}",
            received=type(model).__name__,
            hint="leave the column images out: rows of text train",
        )
    arrays = pictures.inputs(number)
    device = next(model.parameters()).device
    tensors = {
        name: torch.as_tensor(value).to(device)
        for name, value in arrays.items()
        if name not in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    takes = inspect.signature(base.get_image_features).parameters
    given = {name: value for name, value in tensors.items() if name in takes}
    with torch.no_grad():
        result = base.get_image_features(**given, return_dict=True)
    outputs = {
        name: _on_host(result[name])
        for name in ("pooler_output", "deepstack_features")
        if result.get(name) is not None
    }
    shapes = inspect.signature(base.forward).parameters
    inputs = {
        name: value.cpu()
        for name, value in tensors.items()
        if name in shapes and not name.startswith("pixel")
    }
    return SeenPicture(outputs, inputs)


def _on_host(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_on_host(one) for one in value]
    return value.cpu()


def _joined(model: Any, parts: list[dict[str, Any]], device: Any) -> Any:
    """Return the towers' outputs of several pictures as one, as transformers returns it."""
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    def move(value: Any) -> Any:
        return value.to(device)

    result = BaseModelOutputWithPooling()
    pooled = [part["pooler_output"] for part in parts]
    if isinstance(pooled[0], list):
        result["pooler_output"] = [move(one) for value in pooled for one in value]
    else:
        result["pooler_output"] = torch.cat([move(value) for value in pooled])
    if "deepstack_features" in parts[0]:
        layers = zip(*(part["deepstack_features"] for part in parts), strict=True)
        result["deepstack_features"] = [torch.cat([move(one) for one in each]) for each in layers]
    return result
