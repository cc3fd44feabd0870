"""Checkpoints by time: a run of slow steps that is killed goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.training import events
from tests.training.bigram import BigramSession, logged, train


class Killed(BaseException):
    """Stands for SIGKILL: nothing is saved."""


class SlowSession(BigramSession):
    """Advances a fake clock by so many seconds a step, and may be killed in one."""

    def __init__(self, seconds: float, killed_in: int | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.killed_in = killed_in
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def step(self, ids, labels, step, learning_rate):
        if step == self.killed_in:
            raise Killed
        self.now += self.seconds
        return super().step(ids, labels, step, learning_rate)


def slow(out: Path, steps: int, seconds: float, killed_in: int | None = None, **options) -> None:
    session = SlowSession(seconds, killed_in)
    train(out, steps, session, clock=session.clock, **options)


def checkpoints(out: Path) -> list[int]:
    return [event.step for event in logged(out, events.Checkpoint)]


def test_the_first_checkpoint_comes_after_a_minute_and_others_every_five(tmp_path: Path) -> None:
    slow(tmp_path, 60, 20.0)
    assert checkpoints(tmp_path) == [3, 18, 33, 48, 60]


def test_each_slow_step_is_saved(tmp_path: Path) -> None:
    slow(tmp_path, 4, 400.0)
    assert checkpoints(tmp_path) == [1, 2, 3, 4]


def test_quick_steps_are_saved_by_their_number_only(tmp_path: Path) -> None:
    slow(tmp_path, 20, 0.1, checkpoint_every=8)
    assert checkpoints(tmp_path) == [8, 16, 20]


def test_a_checkpoint_by_steps_begins_the_minutes_anew(tmp_path: Path) -> None:
    slow(tmp_path, 40, 20.0, checkpoint_every=10)
    assert checkpoints(tmp_path) == [3, 10, 20, 30, 40]


def test_none_by_time_if_it_is_turned_off(tmp_path: Path) -> None:
    slow(tmp_path, 10, 400.0, checkpoint_minutes=0)
    assert checkpoints(tmp_path) == [10]


def test_a_run_killed_in_its_seventh_step_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        slow(tmp_path / "killed", 12, 30.0, killed_in=7)
    assert checkpoints(tmp_path / "killed") == [2]
    again = SlowSession(30.0)
    train(tmp_path / "killed", 12, again, clock=again.clock, resume=True)
    resumes = logged(tmp_path / "killed", events.Resume)
    assert [event.step for event in resumes] == [2]
    whole = BigramSession()
    train(tmp_path / "whole", 12, whole)
    assert again.logits.tobytes() == whole.logits.tobytes()


def test_saving_takes_a_twentieth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that takes a minute comes every twenty minutes."""
    from ondevice.training import loop

    saved = loop.Run._saved

    def slowly(self, saving) -> None:
        saving.end_s = saving.began_s + 60
        saved(self, saving)

    monkeypatch.setattr(loop.Run, "_saved", slowly)
    slow(tmp_path, 30, 100.0)
    assert checkpoints(tmp_path) == [1, 13, 25, 30]
