"""Callbacks, early stopping, and other settings on a resume, on a small real program."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ondevice.core.errors import ConfigError
from ondevice.training import events
from ondevice.training.evaluate import EvalResult
from ondevice.training.options import Callback
from tests.training.bigram import BigramSession, head, logged, scalars, train


class Seen(Callback):
    """Writes down what it is called with; stops the run, or fails, after a step."""

    def __init__(self, stop_at: int = -1, fail_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.stop_at, self.fail_at = stop_at, fail_at

    def on_step(self, event: events.Step) -> None:
        self.calls.append(("step", event.step))
        if event.step == self.stop_at:
            self.stop("enough")
        if event.step == self.fail_at:
            raise ValueError("my own mistake")

    def on_evaluate(self, event: events.Evaluate) -> None:
        self.calls.append(("evaluate", event.step))

    def on_checkpoint(self, event: events.Checkpoint) -> None:
        self.calls.append(("checkpoint", event.step))


def losses(*values: float):
    """An evaluation that gives these losses one after the other."""
    left, others = (
        list(values),
        {"accuracy": None, "f1": None, "exact_match": None, "majority_share": None},
    )
    return lambda _stop: EvalResult(loss=left.pop(0), rows=1, tokens=1, seconds_s=0.0, **others)


def test_a_callback_sees_steps_evaluations_and_checkpoints_in_order(tmp_path) -> None:
    seen = Seen()
    train(
        tmp_path,
        4,
        callbacks=[seen],
        eval_every=2,
        evaluate_fn=losses(2.0, 1.0),
        checkpoint_every=4,
    )
    steps = [("step", n) for n in range(4)]
    assert seen.calls == [
        *steps[:2],
        ("evaluate", 2),
        ("checkpoint", 2),
        *steps[2:],
        ("evaluate", 4),
        ("checkpoint", 4),
    ]


def test_a_callback_can_stop_the_run_and_a_resume_gives_the_same_bits(tmp_path, whole) -> None:
    result = train(tmp_path, 60, callbacks=[Seen(stop_at=6)], checkpoint_every=25)
    assert result.interrupted and result.signal == "enough" and result.steps == 7
    assert result.checkpoint == tmp_path / "checkpoint-00000007"
    session = BigramSession()
    train(tmp_path, 60, session, resume=True, checkpoint_every=25)
    assert session.logits.tobytes() == whole[1].logits.tobytes() and scalars(tmp_path) == scalars(
        whole[0]
    )


def test_a_callback_that_raises_ends_the_run_with_its_checkpoint(tmp_path) -> None:
    seen, after = Seen(fail_at=3), Seen()
    result = train(tmp_path, 60, callbacks=[seen, after])
    assert (
        isinstance(result.raised, ValueError) and result.steps == 4 and result.checkpoint.is_dir()
    )
    last = logged(tmp_path)[-1]
    assert (
        isinstance(last, events.Interrupt)
        and "Seen.on_step: ValueError: my own mistake" in last.signal
    )
    assert after.calls == [("step", 0), ("step", 1), ("step", 2)]
    with pytest.raises(ConfigError) as wrong:
        train(tmp_path, 60, resume=True, callbacks=[SimpleNamespace(on_step=print)])
    assert wrong.value.received == "SimpleNamespace"


def test_a_run_stops_early_once_its_patience_is_over(tmp_path) -> None:
    worse = losses(3.0, 2.0, 2.5, 2.4, 1.0)
    options = {"eval_every": 5, "patience": 2, "checkpoint_every": 100}
    result = train(tmp_path, 60, evaluate_fn=worse, **options)
    assert result.stopped_early and not result.interrupted and result.steps == 20
    assert (
        result.best_checkpoint.name == "checkpoint-00000010"
        and result.checkpoint.name == "checkpoint-00000020"
    )
    assert result.best_evaluation.loss == 2.0 and result.evaluation.loss == 2.4
    finish = logged(tmp_path, events.Finish)[-1]
    assert finish.reason.startswith("stopped early: 2 evaluations") and finish.steps == 20
    # Resumed it is over at once; with more patience it goes on.
    assert train(tmp_path, 60, evaluate_fn=worse, resume=True, **options).steps == 20
    assert (
        train(tmp_path, 25, evaluate_fn=worse, resume=True, **options | {"patience": 3}).steps == 25
    )


def test_a_resume_may_have_another_rate_and_the_log_says_so(tmp_path) -> None:
    def start(rate: float, **loop: object) -> events.Start:
        method = {"name": "prge", "learning_rate": rate}
        return events.Start(
            **{
                **vars(head()),
                "config": {"method": method, "train": loop},
                "identity": {"method": method},
            }
        )

    train(tmp_path, 5, start=start(0.1, steps=5), learning_rate=0.1)
    train(tmp_path, 9, start=start(0.3, steps=9), learning_rate=0.3, resume=True)
    train(tmp_path, 9, start=start(0.3, steps=9), learning_rate=0.3, resume=True)
    first, second = logged(tmp_path, events.Resume)
    assert (
        first.changed == {"method.learning_rate": [0.1, 0.3], "train.steps": [5, 9]}
        and second.changed == {}
    )
    rates = [event.learning_rate for event in logged(tmp_path, events.Step)]
    assert rates == [0.1] * 5 + [0.3] * 4
