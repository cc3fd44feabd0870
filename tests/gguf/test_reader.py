"""The quick reader of GGUF files has what the package's own has."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from ondevice.gguf.reader import QuickReader

ARRAYS = {
    "tokens": ["a", "", "漢字 🙂", "x" * 300],
    "scores": [0.5, -1.25],
    "types": [1, -2, 3],
    "flags": [True, False],
    "one": ["b"],
}


def written(path: Path, endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE) -> Path:
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    for name, values in ARRAYS.items():
        writer.add_array(name, values)
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_string("text", "Ä")
    writer.add_tensor("weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("endianess", list(gguf.GGUFEndian))
def test_fields_and_tensors_are_those_of_the_package(
    endianess: gguf.GGUFEndian, tmp_path: Path
) -> None:
    path = written(tmp_path / "file.gguf", endianess)
    theirs, ours = gguf.GGUFReader(path), QuickReader(path)
    assert ours.fields.keys() == theirs.fields.keys() >= {*ARRAYS, "text"}
    for name, field in theirs.fields.items():
        own = ours.fields[name]
        assert (own.offset, own.data, own.types) == (field.offset, field.data, field.types), name
        for part, expected in zip(own.parts, field.parts, strict=True):
            np.testing.assert_array_equal(part, expected)
            assert part.dtype == expected.dtype
    for name, values in ARRAYS.items():
        assert ours.fields[name].contents() == values
    (own,), (expected,) = ours.tensors, theirs.tensors
    assert (own.name, own.tensor_type, own.data_offset) == ("weight", *expected[1:2], expected[5])
    np.testing.assert_array_equal(own.data, expected.data)


def test_a_file_that_ends_within_an_array_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "file.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index("漢字".encode()) - 4])
    with pytest.raises((ValueError, IndexError)):
        QuickReader(path)
