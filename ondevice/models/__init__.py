"""Load models; importing this package loads neither torch nor transformers."""

from ondevice.models.families.base import Family
from ondevice.models.load import (
    LoadedModel,
    check_files,
    load_model,
    load_tokenizer,
    read_dims,
    tiny_model,
)
from ondevice.models.open import ModelFiles, open_model
from ondevice.models.registry import families_with, family_classes
from ondevice.models.save import save_tokenizer
from ondevice.models.sources.resolve import SourceInfo, find_cached
from ondevice.models.tiny import save_tiny

__all__ = [
    "Family",
    "LoadedModel",
    "ModelFiles",
    "SourceInfo",
    "check_files",
    "family_classes",
    "families_with",
    "find_cached",
    "load_model",
    "load_tokenizer",
    "open_model",
    "read_dims",
    "save_tiny",
    "save_tokenizer",
    "tiny_model",
]
