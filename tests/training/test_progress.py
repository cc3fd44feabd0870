"""The lines that the terminal shows of a run."""

from __future__ import annotations

import io

from ondevice.training import events
from ondevice.training.progress import ProgressSink, RowProgress
from tests.training.bigram import train


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_without_a_terminal_about_twenty_lines(tmp_path) -> None:
    stream = io.StringIO()
    with ProgressSink(stream=stream) as sink:
        train(tmp_path, 60, sinks=[sink])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 22 and "\x1b" not in stream.getvalue()
    assert (
        lines[0].startswith("step 1/60  loss 2.4") and "tokens/s" in lines[0] and "iB" in lines[0]
    )
    assert lines[-2].startswith("step 60/60") and lines[-2].endswith("0:00 left")
    assert lines[-1].startswith("60 steps, loss 2.4")
    stream = io.StringIO()
    with ProgressSink(stream=stream, every=30) as sink:
        train(tmp_path, 90, resume=True, sinks=[sink])
    lines = stream.getvalue().splitlines()
    assert (
        lines[0] == "resumed at step 60 of 90"
        and lines[1].startswith("step 90/90")
        and len(lines) == 3
    )


def test_a_command_that_prints_its_own_summary_has_no_second_one(tmp_path) -> None:
    stream = io.StringIO()
    with ProgressSink(stream=stream, summary=False) as sink:
        train(tmp_path, 3, sinks=[sink])
    assert stream.getvalue().splitlines()[-1].startswith("step 3/3")


def test_on_a_terminal_one_bar(tmp_path) -> None:
    stream = Terminal()
    with ProgressSink(stream=stream) as sink:
        train(tmp_path, 30, sinks=[sink])
        sink(events.Warning(message="[bold]not markup[/bold]"))
    shown = stream.getvalue()
    assert "30/30" in shown and "loss" in shown and "[bold]not markup[/bold]" in shown
    assert shown.count("step 1/30") == 0


def test_silent_and_a_terminal_that_is_gone(tmp_path, capfd) -> None:
    with ProgressSink(silent=True) as sink:
        train(tmp_path / "a", 3, sinks=[sink])
    with ProgressSink(stream=Gone()) as sink:
        assert train(tmp_path / "b", 3, sinks=[sink]).steps == 3
    assert capfd.readouterr() == ("", "")


def test_evaluations_and_stops_are_lines() -> None:
    stream = io.StringIO()
    sink = ProgressSink(stream=stream)
    sink(events.Evaluate(step=5, loss=0.5, accuracy=0.75, majority_share=0.5, rows=8, best=True))
    sink(events.Interrupt(step=5, signal="SIGINT"))
    assert stream.getvalue().splitlines() == [
        "step 5: evaluation loss 0.5000, accuracy 0.7500, (majority class 0.5000) (best so far)",
        "stopped by SIGINT; 5 steps are saved, `--resume` goes on",
    ]


def test_rows_with_the_time_that_is_left() -> None:
    def shown(stream: io.StringIO, **options) -> str:
        with RowProgress(stream=stream, **options) as progress:
            for done in range(101):
                progress(done, 100)
        return "" if isinstance(stream, Gone) else stream.getvalue()

    lines = shown(io.StringIO()).splitlines()
    assert (
        len(lines) == 21
        and lines[0].startswith("row 1/100  ")
        and lines[-1] == "row 100/100  0:00 left"
    )
    terminal = shown(Terminal())
    assert terminal.count("\r") == 100 and terminal.count("\n") == 1 and "row 57/100" in terminal
    assert shown(io.StringIO(), silent=True) == "" == shown(Gone())
