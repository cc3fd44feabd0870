"""The loop on a small real program: learning, resuming with the same bits, stopping, failing."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ondevice.core.errors import CheckpointError, StorageError, TrainingError
from ondevice.training import events
from ondevice.training.checkpoint import STATE_FILE
from ondevice.training.evaluate import EvalResult
from ondevice.training.loop import StopRequest
from tests.training.bigram import BigramSession, Cycles, head, logged, scalars, train


def test_it_learns_and_reports_what_the_log_says(tmp_path) -> None:
    seen: list[events.Event] = []
    result = train(tmp_path, 400, learning_rate=0.8, sinks=[seen.append])
    steps = logged(tmp_path, events.Step)
    losses = [event.loss for event in steps]
    assert result.first_loss == losses[0] == pytest.approx(np.log(12), abs=0.05)
    assert (
        result.final_loss == pytest.approx(np.mean(losses[-40:]))
        and result.final_loss < 0.75 * result.first_loss
    )
    assert result.steps == 400 and not result.interrupted
    assert result.step_time_s == np.median([event.step_time_s for event in steps])
    assert result.tokens_per_s == pytest.approx(
        400 * 64 / sum(event.step_time_s for event in steps)
    )
    assert result.peak_memory_bytes == steps[-1].peak_memory_bytes > 10 << 20
    assert steps[-1].eta_s == 0 and steps[0].eta_s > steps[-2].eta_s > 0
    assert seen == logged(tmp_path)
    assert [type(event).kind for event in seen if not isinstance(event, events.Step)] == [
        "start", "checkpoint", "checkpoint", "checkpoint", "checkpoint", "finish",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-00000300", "checkpoint-00000400", "events.jsonl", "run.lock",
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [(30, 60), (7, 8, 41, 60), (25, 25, 60)])
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, whole, parts) -> None:
    out, session = whole
    for number, steps in enumerate(parts):
        again = BigramSession()
        result = train(tmp_path, steps, again, checkpoint_every=25, resume=number > 0)
    assert again.logits.tobytes() == session.logits.tobytes()
    assert scalars(tmp_path) == scalars(out)
    state = f"checkpoint-00000060/{STATE_FILE}"
    assert (tmp_path / state).read_bytes() == (out / state).read_bytes()
    losses = [event.loss for event in logged(out, events.Step)]
    assert (result.first_loss, result.final_loss) == (
        losses[0],
        pytest.approx(np.mean(losses[-6:])),
    )


def test_another_thread_can_stop_it(tmp_path) -> None:
    stop = StopRequest()
    results = []

    def at_five(event: events.Event) -> None:
        if isinstance(event, events.Step) and event.step == 4:
            stop.request("page")

    options = {
        "eval_every": 5,
        "evaluate_fn": lambda _: pytest.fail("evaluated when asked to stop"),
    }
    worker = threading.Thread(
        target=lambda: results.append(train(tmp_path, 60, sinks=[at_five], stop=stop, **options))
    )
    worker.start()
    worker.join(120)
    assert results[0].interrupted and results[0].signal == "page" and results[0].steps == 5


def test_signals_are_as_before_after_a_run(tmp_path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(tmp_path, 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_folder_with_a_run_is_not_taken_by_accident(tmp_path) -> None:
    train(tmp_path, 5)
    with pytest.raises(CheckpointError):
        train(tmp_path, 5)
    train(tmp_path, 3, BigramSession(seed=8), overwrite=True)
    assert [event.step for event in logged(tmp_path, events.Step)] == [0, 1, 2]
    assert len(logged(tmp_path, events.Start)) == 1
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, 5, resume=True)
    assert caught.value.received == "seed = 8"
    changed = head(8, method={"name": "prge", "queries": 16})
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, 5, BigramSession(seed=8), start=changed, resume=True)
    assert "method.queries = 16" in caught.value.expected
    assert len(logged(tmp_path, events.Step)) == 3


class Spoilt(Cycles):
    """Finite data; the session's logits are set to nan before step 12."""

    def __init__(self, session: BigramSession, at_step: int) -> None:
        super().__init__()
        self.session, self.at_step = session, at_step

    def at(self, step: int):
        if step == self.at_step:
            self.session.logits[:] = np.nan
        return super().at(step)


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_checkpoint(tmp_path) -> None:
    session = BigramSession()
    with (
        np.errstate(all="ignore"),
        pytest.raises(TrainingError) as caught,
    ):
        train(tmp_path, 60, session, batches=Spoilt(session, 12), checkpoint_every=10)
    assert caught.value.received.startswith("nan") and "lower learning rate" in caught.value.hint
    assert "step 12" in caught.value.message and "00000010" in caught.value.message
    last = logged(tmp_path)[-1]
    assert (
        isinstance(last, events.Error)
        and last.error["error"] == "TrainingError"
        and last.step == 12
    )
    assert len(logged(tmp_path, events.Step)) == 12
    again = BigramSession()
    assert train(tmp_path, 20, again, resume=True).steps == 20 and np.isfinite(again.logits).all()


def test_too_high_a_learning_rate_diverges_into_an_error(tmp_path) -> None:
    with (
        np.errstate(all="ignore"),
        pytest.raises(TrainingError) as caught,
    ):
        train(tmp_path, 60, learning_rate=1e38)
    assert caught.value.received.startswith(("nan", "inf"))


def test_a_damaged_checkpoint_is_a_warning_and_the_one_before_is_used(tmp_path, whole) -> None:
    train(tmp_path, 50, checkpoint_every=20)
    path = tmp_path / "checkpoint-00000050" / STATE_FILE
    path.write_bytes(path.read_bytes()[:-5])
    session = BigramSession()
    train(tmp_path, 60, session, resume=True, checkpoint_every=20)
    (warning,) = logged(tmp_path, events.Warning)
    assert "checkpoint-00000050" in warning.message and warning.step == 40
    assert logged(tmp_path, events.Resume)[0].checkpoint == "checkpoint-00000040"
    assert session.logits.tobytes() == whole[1].logits.tobytes() and scalars(tmp_path) == scalars(
        whole[0]
    )


def test_a_lost_log_is_a_warning(tmp_path) -> None:
    train(tmp_path, 10)
    (tmp_path / "events.jsonl").unlink()
    train(tmp_path, 12, resume=True)
    assert "cannot be replayed" in logged(tmp_path, events.Warning)[0].message
    assert [event.step for event in logged(tmp_path, events.Step)] == [10, 11]


def test_a_full_disk_ends_the_run_with_the_checkpoint_before(tmp_path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event: events.Event) -> None:
        if isinstance(event, events.Checkpoint) and event.step == 4:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (16_000, before[1])
            )  # the state has 36,864 bytes

    session = BigramSession(vocabulary=96)
    try:
        with pytest.raises(StorageError) as caught:
            train(tmp_path, 20, session, checkpoint_every=4, sinks=[fill])
        assert "checkpoint-00000008" in caught.value.message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(logged(tmp_path)[-1], events.Error)
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-00000004"]
    resumed, straight = BigramSession(vocabulary=96), BigramSession(vocabulary=96)
    train(tmp_path, 20, resumed, resume=True)
    train(tmp_path / "straight", 20, straight)
    assert resumed.logits.tobytes() == straight.logits.tobytes()


def evaluation(session: BigramSession, scripted: dict[int, float], out: Path) -> Callable:
    """Evaluates for real, but takes the accuracy from a table by logged steps, to steer which is best."""

    def evaluate(should_stop: Callable[[], bool]) -> EvalResult | None:
        if should_stop():
            return None
        batch = Cycles(seed=99).at(0)
        nll, count = session.evaluate(batch.ids, batch.labels)
        loss = float(nll.sum() / count.sum())
        done = len(logged(out, events.Step))
        return EvalResult(loss, scripted[done], None, None, 0.5, 4, int(count.sum()), 0.0)

    return evaluate


def test_evaluations_and_the_best_checkpoint(tmp_path) -> None:
    session = BigramSession()
    scripted = {4: 0.5, 8: 0.9, 12: 0.6, 16: 0.7, 20: 0.8, 24: 0.95}
    options = {
        "evaluate_fn": evaluation(session, scripted, tmp_path),
        "eval_every": 4,
        "checkpoint_every": 10,
    }
    result = train(tmp_path, 20, session, **options)
    actual = logged(tmp_path, events.Evaluate)
    assert [(event.step, event.accuracy, event.best) for event in actual] == [
        (4, 0.5, True), (8, 0.9, True), (12, 0.6, False), (16, 0.7, False), (20, 0.8, False),
    ]  # fmt: skip
    assert actual[-1].loss < actual[0].loss < np.log(12)
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-00000008", "checkpoint-00000010", "checkpoint-00000020"]
    assert result.best_checkpoint == tmp_path / names[0] and result.best_score is not None
    assert (
        result.best_score[0] == 0.9
        and result.evaluation is not None
        and result.evaluation.accuracy == 0.8
    )
    result = train(tmp_path, 24, session, resume=True, **options)
    assert result.best_checkpoint == tmp_path / "checkpoint-00000024"


def test_stopping_in_an_evaluation_saves_and_the_resume_evaluates(tmp_path) -> None:
    session = BigramSession()

    def interrupted(should_stop: Callable[[], bool]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert should_stop()

    result = train(tmp_path, 20, session, evaluate_fn=interrupted, eval_every=5)
    assert result.interrupted and result.steps == 5 and result.checkpoint is not None
    assert logged(tmp_path, events.Evaluate) == []
    again = BigramSession()
    scripted = {5: 0.1, 10: 0.2}
    train(
        tmp_path,
        10,
        again,
        resume=True,
        evaluate_fn=evaluation(again, scripted, tmp_path),
        eval_every=5,
    )
    assert [event.step for event in logged(tmp_path, events.Evaluate)] == [5, 10]


def test_a_resume_with_fewer_steps_than_are_done_is_refused_and_changes_nothing(tmp_path) -> None:
    train(tmp_path, 20)
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(CheckpointError) as error:
        train(tmp_path, 5, resume=True)
    assert "--steps 20 or more" in str(error.value)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_a_finished_run_that_is_resumed_only_says_so_again(tmp_path) -> None:
    first = train(tmp_path, 6)
    again = train(tmp_path, 6, resume=True)
    assert (again.steps, again.final_loss) == (first.steps, first.final_loss)
    assert len(logged(tmp_path, events.Step)) == 6
