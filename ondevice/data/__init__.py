"""Data files as batches: formats, prompts, label masks, batching. Loads neither torch nor transformers."""

from __future__ import annotations

from ondevice.data.batching import Batch, Batches, pad_examples
from ondevice.data.encode import IGNORE, Dataset, Example, Item, encode, pad_id_of, read_dataset
from ondevice.data.formats import read_rows
from ondevice.data.preview import Preview, preview
from ondevice.data.rows import Row, RowProblem, Rows
from ondevice.data.scoring import exact_match, f1_score, first_line, pick_candidate
from ondevice.data.templates import TASKS, find_task

__all__ = [
    "read_rows", "Rows", "Row", "RowProblem",
    "encode", "Dataset", "Item", "Example", "IGNORE", "pad_id_of", "read_dataset",
    "Batches", "Batch", "pad_examples",
    "TASKS", "find_task", "pick_candidate", "first_line", "exact_match", "f1_score",
    "Preview", "preview",
]  # fmt: skip
