"""A variant of benchmarks/slideformer/step.py in memory: its steps, their times, and the memory
that it takes."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.offload import model as om
from benchmarks.offload import peers
from benchmarks.offload.roundpipe import RoundPipe
from benchmarks.offload.zero import Zero
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.lsp.engine import LspEngine
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.offload import device as offload_device
from ondevice.offload.engine import OffloadEngine


class Pinned:
    """Time and size of the host memory that the engine has locked."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes = 0
        self.plain = offload_device.buffer
        offload_device.buffer = self.buffer

    def buffer(self, size_bytes: int, pin: bool) -> torch.Tensor:
        started = time.perf_counter()
        built = self.plain(size_bytes, pin)
        self.seconds += time.perf_counter() - started
        self.bytes += size_bytes
        return built


PINNED = Pinned()


class Sliding:
    """Ours."""

    def __init__(
        self, shape: str, block: torch.Tensor, device: str, name: str, options: dict[str, Any]
    ) -> None:
        settings = {
            "kernels": "torch",
            "timeout_s": 120.0,
            **options,
            "moments": om.sliding_moments(name),
        }
        self.engine = OffloadEngine(
            om.make_family(shape, block), SlideformerConfig(**settings), device
        )
        self.number = 0

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        self.number += 1
        return self.engine.step(ids, labels, self.number - 1, peers.RATE)

    def flush(self) -> None:
        self.engine.flush()

    def close(self) -> None:
        self.engine.close()


class Lsp(Sliding):
    """LSP-Offload, or with names that begin with `zero` its engine without projectors: whole
    gradients."""

    def __init__(
        self, shape: str, block: torch.Tensor, device: str, name: str, options: dict[str, Any]
    ) -> None:
        settings = {"kernels": "torch", "timeout_s": 120.0, **options}
        if name.startswith("zero"):
            settings |= {
                "project": False,
                "schedule": "layerwise" if name == "zero-layerwise" else "zero",
            }
        self.engine: Any = LspEngine(om.make_family(shape, block), LspConfig(**settings), device)
        self.number = 0


def other(name: str, shape: str, block: torch.Tensor, device: str, liger: bool) -> Any:
    """A program that is not ours, or ours without offload."""
    if name.startswith("resident"):
        return peers.Resident(om.make_family(shape, block, liger=liger), device, name, liger)
    if name == "fsdp2":
        return peers.Fsdp2(shape, block, device, liger)
    if name.startswith("torchao"):
        return peers.TorchAo(shape, block, device, name, liger)
    if name.startswith("roundpipe"):
        return RoundPipe(shape, block, late=name == "roundpipe-late")
    if name.startswith("deepspeed"):
        return Zero(shape, block, device, liger, stage=int(name[-1]))
    if name in ("superoffload", "zenflow"):
        return Zero(shape, block, device, liger, form=name)
    raise ValueError(f"unknown variant {name}")


class Live:
    """A variant in memory, and what it takes of it: what others hold is not counted."""

    def __init__(
        self, name: str, args: Any, shape: str, block: torch.Tensor, options: dict[str, Any]
    ) -> None:
        self.name, self.device, self.turn = name, args.device, 0
        self.gpu_held = self.host_held = self.host_peak = 0
        self.first_loss: float | None = None
        self.pin_s, self.pin_bytes, self.failed = 0.0, 0, False
        started = time.perf_counter()
        self._watch(True)
        try:
            self.variant = self._build(args.device, shape, block, options)
            self._watch(False)
        finally:
            self.rss.stop()
        self.build_s = time.perf_counter() - started

    def _build(self, device: str, shape: str, block: torch.Tensor, options: dict[str, Any]) -> Any:
        liger = options.get("kernels") == "liger"
        if self.name.startswith(("lsp", "zero")):
            return Lsp(shape, block, device, self.name, options)
        if self.name.startswith("slideformer"):
            return Sliding(shape, block, device, self.name, options)
        return other(self.name, shape, block, device, liger)

    def run(self, batches: om.Batches, rows: int, warmup: int, count: int) -> dict[str, Any]:
        """`count` steps in a row after `warmup` others: seconds each, and what was seen
        meanwhile."""
        try:
            self._watch(True)
            return self._run(batches, rows, warmup, count)
        except Exception:
            self.failed = True
            raise
        finally:
            self.rss.stop()

    def _run(self, batches: om.Batches, rows: int, warmup: int, count: int) -> dict[str, Any]:
        engine = self.variant.engine if isinstance(self.variant, Sliding) else None
        times, segments, loss, mark = [], [], float("nan"), time.perf_counter()
        for number in range(warmup + count):
            ids = batches.get(rows, self.turn)
            self.turn += 1
            loss = self.variant.step(ids, ids)
            now = time.perf_counter()
            if number >= warmup:
                times.append(now - mark)
            mark = now
            self.first_loss = loss if self.first_loss is None else self.first_loss
            segments.append(engine.device.segments() if engine else 0)
        self.variant.flush()
        by_name = {
            "step_s": times,
            "loss": loss,
            "segments_constant": len(set(segments)) == 1 if engine else None,
        }
        return by_name | {"gpu_peak_bytes": self._watch(False)}

    def _watch(self, begin: bool) -> int | None:
        """Take notes before and after work. Gives the GPU's peak, and adds to what is held."""
        cuda = torch.device(self.device).type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        gpu, host = torch.cuda.memory_allocated() if cuda else 0, psutil.Process().memory_info().rss
        if begin:
            self.before, self.pinned = (
                (gpu - self.gpu_held, host - self.host_held),
                (PINNED.seconds, PINNED.bytes),
            )
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            self.rss = Peak()
            return None
        self.pin_s += PINNED.seconds - self.pinned[0]
        self.pin_bytes += PINNED.bytes - self.pinned[1]
        self.gpu_held, self.host_held = gpu - self.before[0], host - self.before[1]
        self.host_peak = max(self.host_peak, self.rss.stop() - self.before[1])
        return torch.cuda.max_memory_allocated() - self.before[0] if cuda else None


class Running:
    """The state of a benchmark that builds variants one after another: its rows, its clock, the
    engine's options."""

    def __init__(self, args: Any) -> None:
        self.args, self.rows, self.began = (
            args,
            list[dict[str, Any]](),
            psutil.Process().create_time(),
        )
        self.options = {
            key: _value(value) for key, _, value in (text.partition("=") for text in args.option)
        }

    def say(self, *words: Any) -> None:
        print(f"[{time.time() - self.began:6.1f} s]", *words, flush=True)

    def late(self) -> bool:
        return time.time() - self.began > self.args.budget_s

    def close(self, one: Live) -> None:
        """End a variant and give its memory back."""
        try:
            one.variant.close()
        except Exception as error:
            self.say(f"{one.name}: closing: {reason(error)}")
        one.variant = None
        om.release(self.args.device)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Peak:
    """The largest resident set of the process, looked at ten times a second."""

    def __init__(self) -> None:
        self.value, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while True:
            self.value = max(self.value, psutil.Process().memory_info().rss)
            if self.ended.wait(0.1):
                return

    def stop(self) -> int:
        self.ended.set()
        self.thread.join()
        return max(self.value, psutil.Process().memory_info().rss)


def merge(actual: dict[str, dict[str, Any]], name: str, new: dict[str, Any]) -> None:
    """Put a further run of a variant to those before it."""
    old = actual.get(name)
    if old is not None:
        new["step_s"] = old["step_s"] + new["step_s"]
        if new["gpu_peak_bytes"] is not None:
            new["gpu_peak_bytes"] = max(old["gpu_peak_bytes"], new["gpu_peak_bytes"])
        if new["segments_constant"] is not None:
            new["segments_constant"] = new["segments_constant"] and old["segments_constant"]
    actual[name] = new


def short(value: Any) -> Any:
    """Four digits of numbers, for the log."""
    if isinstance(value, list):
        return [short(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def reason(error: BaseException) -> str:
    """An error and its cause in one line; of PyTorch's error for want of memory the first sentence."""
    name = type(error).__name__
    words = [f"{name}: {str(error).split('. ')[0] if name == 'OutOfMemoryError' else error}"]
    if error.__cause__ is not None:
        words.append(f"from {type(error.__cause__).__name__}: {error.__cause__}")
    return " ".join(" ".join(words).split())[:600]
