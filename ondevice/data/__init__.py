"""Data files as batches: formats, prompts, label masks, batching. Loads neither torch nor transformers."""

from __future__ import annotations

from ondevice.core.session import IGNORE
from ondevice.data.batching import Batch, Batches, pad_examples, pad_id_of, split_rows
from ondevice.data.encode import encode
from ondevice.data.examples import Dataset, Example, Item
from ondevice.data.lengths import Length, length_of
from ondevice.data.preview import Preview, preview, preview_rows
from ondevice.data.reading import read_dataset, read_rows
from ondevice.data.rows import Row, RowProblem, Rows
from ondevice.data.tasks.scoring import exact_match, f1_score, first_line, pick_candidate
from ondevice.data.tasks.templates import TASKS, find_task

__all__ = [
    "read_rows", "Rows", "Row", "RowProblem",
    "encode", "Dataset", "Item", "Example", "IGNORE", "pad_id_of", "read_dataset",
    "Batches", "Batch", "pad_examples",
    "TASKS", "find_task", "pick_candidate", "first_line", "exact_match", "f1_score",
    "Preview", "preview", "preview_rows", "Length", "length_of", "split_rows",
]  # fmt: skip
