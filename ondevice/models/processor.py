"""transformers' processor of a checkpoint that reads images, without its parts for video and sound."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from ondevice.core.errors import MissingPackageError, ModelError
from ondevice.core.untrusted import read_object
from ondevice.models.families.configuration import quiet_transformers

CONFIGS = ("processor_config.json", "preprocessor_config.json")
_LACKS = "Missing optional dependencies"
"""Words of a ValueError that transformers raises where no class for images can be imported."""


def has_processor(folder: Path) -> bool:
    """Return True if a folder says how its images are read."""
    return any((folder / name).is_file() for name in CONFIGS)


def load_processor(folder: Path, model_type: str, tokenizer: Any) -> Any:
    """Load a folder's processor of images and text.

    Its class may want packages that only video needs: parts for video and sound are left out.

    Raises:
        ModelError: the folder has no processor, or it cannot be read.
        MissingPackageError: the processor needs a package that is not installed.
    """
    import transformers
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    )

    if not has_processor(folder):
        raise ModelError(
            f"{folder} does not say how images are read",
            expected=" or ".join(CONFIGS),
            received="neither",
            hint="copy the processor's files of the base model; rows without images train without",
        )
    values: dict[str, Any] = {}
    for name in reversed(CONFIGS):
        if (folder / name).is_file():
            values |= read_object(folder / name, ModelError)
    name = str(values.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type))
    try:
        kind = _of_images(getattr(transformers, name))
        takes = list(inspect.signature(kind.__init__).parameters)[1:]
        fields = {key: values[key] for key in takes if key in values}
        parts = {key: None for key in takes if key.endswith(("_processor", "feature_extractor"))}
        with quiet_transformers():
            images = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
            parts |= {"image_processor": images, "tokenizer": tokenizer}
            return kind(**{**fields, **parts})
    except Exception as error:  # whatever transformers raises about files it cannot read
        if isinstance(error, ImportError) or _LACKS in str(error):
            raise MissingPackageError(
                f"{folder}: transformers needs another package to read images ({name})",
                received=str(error).strip().splitlines()[0],
                hint="install it; rows without images train without",
            ) from None
        raise ModelError(
            f"{folder}: the processor of images cannot be read",
            received=f"{type(error).__name__}: {error}",
            hint="copy the processor's files again",
        ) from None


def _of_images(kind: Any) -> Any:
    """Return a class whose parts for video and sound may be missing."""

    class OfImages(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    OfImages.__name__ = kind.__name__  # which errors say
    OfImages.__init__.__signature__ = inspect.signature(kind.__init__)  # type: ignore[attr-defined]
    return OfImages
