"""Runs an artifact's program for another process: requests on standard input, answers on standard output.

The JVM tests of the Android app train with it: the program is the real one, run by the ExecuTorch runtime of
this Python. All numbers are little-endian.

    request   u32 length of the method's name, the name; u32 layer; u32 number of tensors, the tensors
    tensor    u8 dtype (0 int64, 1 float32); u32 dimensions; u32 each; the elements
              or u8 2, u32 dimensions; u32 each; u32 length of a weight's name, the name; u32 its first row
    answer    u8 0 and then u32 number of tensors, the tensors; or u8 1 and then u32 length, a message

The process ends when its standard input does.

    python tests/android/program_server.py ARTIFACT [PROGRAM]

PROGRAM is a file of the artifact that answers with packed weights, to be run in place of the training program.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from ondevice.artifact.weights import MappedWeights

DTYPES = (np.dtype("<i8"), np.dtype("<f4"))
KINDS = ("train_step", "evaluate")
FROZEN = 2
"""The kind of a tensor that is rows of the weights file."""


class EndOfInput(Exception):
    """The other side has gone."""


def read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EndOfInput
    return data


def read_u32(stream: BinaryIO) -> int:
    return struct.unpack("<I", read_exactly(stream, 4))[0]


def read_tensor(stream: BinaryIO, weights: MappedWeights | None = None) -> np.ndarray:
    """An array of the request, or rows of the artifact's own weights, which are not sent."""
    kind = read_exactly(stream, 1)[0]
    shape = [read_u32(stream) for _ in range(read_u32(stream))]
    if kind == FROZEN:
        name, first = read_exactly(stream, read_u32(stream)).decode(), read_u32(stream)
        assert weights is not None
        rows = weights.whole(name)[first : first + shape[0]]
        assert list(rows.shape) == shape, (name, rows.shape, shape)
        return rows
    dtype = DTYPES[kind]
    data = read_exactly(stream, int(np.prod(shape)) * dtype.itemsize)
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def tensor_bytes(value: np.ndarray) -> bytes:
    kind = 0 if value.dtype.kind == "i" else 1
    head = struct.pack("<BI", kind, value.ndim) + b"".join(
        struct.pack("<I", size) for size in value.shape
    )
    return head + np.ascontiguousarray(value, dtype=DTYPES[kind]).tobytes()


class Methods:
    """Loads a method when it is first needed, and drops `evaluate` before `train_step` and the other way round.

    The functions of a block program, which has `weights`, all stay: they hold no weights of their own, or those of a
    tiny model's layer.

    Args:
        of_layers: files of the methods that every layer has its own of, with `{layer}` for its number.
    """

    def __init__(
        self,
        program: Path,
        soc: str | None,
        weights: Path | None = None,
        of_layers: dict[str, str] | None = None,
    ) -> None:
        from ondevice.exporters.android_npu import qnn
        from ondevice.exporters.executorch.session import load_runtime

        if soc is not None:
            qnn.load()  # an NPU program runs in the simulator

        runtime = load_runtime()
        import executorch.extension.pybindings.portable_lib as portable_lib
        import executorch.kernels.quantized  # noqa: F401  registers the kernels that make packed weights dense

        # The programs are tiny: a second thread only waits, and for long where other work has the processor.
        portable_lib._unsafe_reset_threadpool(1)
        self.runtime, self.folder, self.of_layers = runtime, program.parent, of_layers or {}
        self.program = runtime.load_program(str(program))
        self.loaded: dict[str, object] = {}
        self.programs: dict[str, Any] = {}
        """Of layers: a method reads its program, which has to outlive it."""
        self.weights: MappedWeights | None = None
        if weights is not None:
            from ondevice.artifact.weights import MappedWeights

            self.weights = MappedWeights(weights)

    def run(self, name: str, inputs: list[np.ndarray], layer: int = 0) -> list[np.ndarray]:
        import torch

        key = name
        if name in self.of_layers:
            key = f"{name} {layer}"
            if key not in self.loaded:
                path = self.folder / self.of_layers[name].format(layer=layer)
                program = self.programs[key] = self.runtime.load_program(str(path))
                self.loaded[key] = program.load_method(name)
        elif name not in self.loaded:
            for known in [
                known
                for known in self.loaded
                if self.weights is None and not known.startswith(_kind(name))
            ]:
                del self.loaded[known]
            self.loaded[name] = self.program.load_method(name)
        outputs = self.loaded[key].execute([torch.from_numpy(value) for value in inputs])  # type: ignore[attr-defined]
        return [value.numpy() for value in outputs]


def _kind(name: str) -> str:
    return next((kind for kind in KINDS if name.startswith(kind)), name)


def serve(methods: Methods, source: BinaryIO, target: BinaryIO) -> None:
    """Answer requests until the input ends."""
    while True:
        try:
            name, layer = read_exactly(source, read_u32(source)).decode(), read_u32(source)
            inputs = [read_tensor(source, methods.weights) for _ in range(read_u32(source))]
        except EndOfInput:
            return
        try:
            outputs = methods.run(name, inputs, layer)
            answer = struct.pack("<BI", 0, len(outputs)) + b"".join(map(tensor_bytes, outputs))
        except (
            Exception
        ) as error:  # the runtime raises what it likes; the other side has to hear of it
            message = f"{type(error).__name__}: {error}".encode()
            answer = struct.pack("<BI", 1, len(message)) + message
        target.write(answer)
        target.flush()


def main() -> None:
    """Serve the artifact in `sys.argv[1]`; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import json

    folder = Path(sys.argv[1])
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if sys.argv[2:]:
        from ondevice.exporters.executorch.packed import load_operators

        load_operators()
        methods = Methods(folder / sys.argv[2], None)
    else:
        spec = manifest["program_spec"]
        weights = spec.get("weights")
        of_layers = {
            name: method["program"]
            for name, method in spec["methods"].items()
            if method.get("program")
        }
        program = folder / manifest["program"]
        methods = Methods(
            program, manifest.get("soc"), folder / weights if weights else None, of_layers
        )
    serve(methods, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
