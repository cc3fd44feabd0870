"""A whole zeroth-order training program in numpy: a bigram language model under the project's generator.

Small enough for hundreds of steps a second, and real: the loss is the negative log likelihood of the next
token, the step is P-RGE's estimator, the update regenerates the noise. Run as a program it trains in a folder
until it is done, interrupted or killed; behind one step it waits until its standard input ends.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

import numpy as np

from ondevice.artifact.adapter import Adapter
from ondevice.core.config import TrainConfig
from ondevice.core.errors import CheckpointError, OndeviceError
from ondevice.core.session import Session, StepResult
from ondevice.data import Batch
from ondevice.runtime_ops import generator
from ondevice.training import events
from ondevice.training.events import read_log
from ondevice.training.loop import Run, StopRequest
from ondevice.training.options import Options
from ondevice.training.schedule import WarmupDecay

STOPPING = "stopping"
VOCABULARY = 12
QUERIES = 4
SCALE = np.float32(1e-2)


class Cycles:
    """Sequences in which token t is followed by 5 t + 3, with a tenth of the tokens at random."""

    def __init__(self, seed: int = 0, rows: int = 4, length: int = 16) -> None:
        self.seed, self.rows, self.length = seed, rows, length

    def at(self, step: int) -> Batch:
        random = np.random.default_rng((self.seed, step))
        ids = np.empty((self.rows, self.length), np.int64)
        ids[:, 0] = random.integers(0, VOCABULARY, self.rows)
        for t in range(1, self.length):
            ids[:, t] = (5 * ids[:, t - 1] + 3) % VOCABULARY
        wrong = random.random(ids.shape) < 0.1
        ids[wrong] = random.integers(0, VOCABULARY, wrong.sum())
        return Batch(ids, ids.copy())


class BigramSession(Session):
    """`Session` of a table of logits float32 [vocabulary, vocabulary]; row a scores what follows token a."""

    backend = "numpy"
    batch_size: int | None = None

    def __init__(
        self,
        seed: int = 7,
        vocabulary: int = VOCABULARY,
        eval_batch_size: int | None = None,
        lengths_tokens: tuple[int, ...] | None = None,
    ) -> None:
        self.seed, self.vocabulary = seed, vocabulary
        self.eval_batch_size, self.lengths_tokens = eval_batch_size, lengths_tokens
        self.logits = np.zeros((vocabulary, vocabulary), np.float32)
        self.shapes: list[tuple[int, ...]] = []

    def _nll(
        self, logits: np.ndarray, ids: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        scores = logits[ids[:, :-1]]
        high = scores.max(-1, keepdims=True)
        log_sum = np.log(np.exp(scores - high).sum(-1)) + high[..., 0]
        mask = labels[:, 1:] != -100
        chosen = np.take_along_axis(scores, np.where(mask, labels[:, 1:], 0)[..., None], -1)[..., 0]
        return ((log_sum - chosen) * mask).sum(-1, dtype=np.float32), mask.sum(-1)

    def _loss(self, logits: np.ndarray, ids: np.ndarray, labels: np.ndarray) -> np.float32:
        nll, count = self._nll(logits, ids, labels)
        return np.float32(nll.sum() / np.float32(count.sum()))

    def _noise(self, step: int) -> np.ndarray:
        return generator.normal(self.seed, step, 0, QUERIES, 0, self.logits.size).reshape(
            QUERIES, *self.logits.shape
        )

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        z = self._noise(step) * SCALE
        plus = np.array([self._loss(self.logits + d, ids, labels) for d in z])
        minus = np.array([self._loss(self.logits - d, ids, labels) for d in z])
        gradients = tuple(float(g) for g in (plus - minus) / (2 * SCALE))
        self.apply_update(gradients, step, learning_rate)
        losses = (*map(float, plus), *map(float, minus))
        return StepResult(float(np.mean(losses)), losses, gradients)

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        g = np.array(projected_gradients, np.float32) * np.float32(learning_rate / QUERIES)
        self.logits = self.logits - (g[:, None, None] * self._noise(step)).sum(0)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.shapes.append(ids.shape)
        return self._nll(self.logits, ids, labels)

    def state(self) -> dict[str, np.ndarray]:
        return {"logits": self.logits.copy()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        logits = state.get("logits")
        if logits is None or logits.shape != self.logits.shape or logits.dtype != np.float32:
            raise CheckpointError("the state is not this session's")
        self.logits = logits.copy()

    def adapter(self) -> Adapter:
        tensors = {
            "table.lora_A.weight": np.eye(self.vocabulary, dtype=np.float32),
            "table.lora_B.weight": self.logits,
        }
        return Adapter(tensors, self.vocabulary, float(self.vocabulary), ("table",), "bigram")

    def load_adapter(self, adapter: Adapter) -> None:
        self.logits = adapter.tensors["table.lora_B.weight"].copy()

    def close(self) -> None:
        pass


def head(seed: int = 7, **identity: object) -> events.Start:
    return events.Start(
        config={"train": {"seed": seed}},
        identity={"method": {"name": "prge", "queries": QUERIES}, "data": {"rows": 4}, **identity},
        seed=seed,
        backend="",
        generator_backend="numpy",
        model_source="bigram",
        model_sha256="b" * 64,
    )


def train(out: Path, steps: int, session: BigramSession | None = None, **options: object):
    session = session or BigramSession()
    schedule = options.pop(
        "learning_rate", WarmupDecay("cosine", 0.5, 60, warmup_steps=5, final_fraction=0.1)
    )
    rate_at = schedule if callable(schedule) else lambda step: schedule
    start, batches = options.pop("start", head(session.seed)), options.pop("batches", Cycles())

    def taken(*names: str) -> dict:
        return {name: options.pop(name) for name in names if name in options}

    loop = taken(
        "checkpoint_every", "checkpoint_minutes", "eval_every", "patience", "accept_changes"
    )
    settings = TrainConfig(steps=steps, out=out, **loop)
    given = Options(**taken("resume", "overwrite", "sinks", "callbacks"))
    return Run(session, settings, start, rate_at, given, **options).train(batches)


def logged(out: Path, kind: type[events.Event] = events.Event) -> list:
    return [
        entry.event
        for entry in read_log(out / "events.jsonl").entries
        if isinstance(entry.event, kind)
    ]


def scalars(out: Path) -> list[tuple]:
    return [
        (e.step, e.loss, e.losses, e.projected_gradients, e.learning_rate)
        for e in logged(out, events.Step)
    ]


def main(out: str, steps: str, last: str, *flags: str) -> int:
    stop, told = StopRequest(), False

    def held(event: events.Event) -> None:
        nonlocal told
        if not isinstance(event, events.Step):
            return
        print(event.step, flush=True)
        while event.step == int(last) and not (
            select.select([sys.stdin], [], [], 0.02)[0] and not sys.stdin.read(1)
        ):
            if stop and not told:
                told = True
                print(STOPPING, flush=True)

    try:
        options = {"resume": "resume" in flags, "checkpoint_every": 10, "stop": stop}
        result = train(Path(out), int(steps), sinks=[held], **options)
    except OndeviceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 130 if result.interrupted else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
