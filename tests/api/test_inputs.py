"""`train`, `plan` and their settings from Python: models, sources, rows, and plain names."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

import ondevice
from ondevice.api.names import dotted
from ondevice.core.errors import ConfigError, DataError
from ondevice.core.process import own_version
from ondevice.training.events import Start, Step, read_log

ROWS = [{"text": f"{'ab'[i % 2]}{i}", "label": ["no", "yes"][i % 2]} for i in range(12)]
FAST = {"method": "lora", "rank": 2, "batch_size": 2}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def losses(out: Path) -> list[float]:
    steps = (entry.event for entry in read_log(out / "events.jsonl").entries)
    return [event.loss for event in steps if isinstance(event, Step)]


def test_a_source_and_rows_train_like_the_run_file_that_they_stand_for() -> None:
    short = ondevice.train("tiny:llama", ROWS, steps=3, **FAST)
    settings = {
        "model.source": "tiny:llama",
        "method.name": "lora",
        "method.rank": 2,
        "train.steps": 3,
        "train.batch_size": 2,
        "train.out": "long",
    }
    ondevice.train(settings, rows=ROWS)
    assert len(losses(short.out)) == 3 and losses(short.out) == losses(Path("long"))


def test_a_path_of_rows_and_epochs_train_like_rows_in_memory() -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    from_file = ondevice.train("tiny:llama", "rows.jsonl", epochs=0.5, **FAST)
    from_memory = ondevice.train("tiny:llama", ROWS, steps=3, **FAST)
    assert from_file.result.steps == 3 and losses(from_file.out) == losses(from_memory.out)
    with pytest.raises(DataError) as caught:
        ondevice.train("tiny:llama", "none.csv", **FAST)
    assert re.search(r"there is no .*none\.csv|none\.csv", str(caught.value))


def test_a_run_without_out_gets_a_new_folder_that_the_result_names() -> None:
    results = [ondevice.train("tiny:llama", ROWS, steps=1, **FAST) for _ in range(2)]
    assert [str(result.out) for result in results] == ["runs/llama-1", "runs/llama-2"]
    assert all(result.adapter == result.out / "adapter" for result in results)
    assert "'runs/llama-2/adapter'" in repr(results[1])
    with pytest.raises(ConfigError) as caught:
        ondevice.train("tiny:llama", ROWS, steps=2, resume=True, **FAST)
    assert re.search("which run goes on is not named", str(caught.value))


def test_settings_change_a_run_that_is_made_already() -> None:
    config = ondevice.RunConfig.load(None, {"model.source": "tiny:llama", "method.name": "lora"})
    result = ondevice.train(config, ROWS, steps=2, rank=3, out="mine")
    start = read_log(Path("mine/events.jsonl")).start
    assert start is not None and start.config["method"]["rank"] == 3
    assert result.result.steps == 2 and config.train.steps == 100


def test_the_history_has_every_step_also_those_before_a_resume() -> None:
    first = ondevice.train("tiny:llama", ROWS, steps=2, eval_rows=ROWS[:4], out="run", **FAST)
    assert first.history.steps == [1, 2] and first.history.losses == losses(first.out)
    whole = ondevice.train(
        "tiny:llama", ROWS, steps=4, eval_rows=ROWS[:4], out="run", resume=True, **FAST
    )
    assert whole.history.steps == [1, 2, 3, 4] and whole.history.losses == losses(whole.out)
    assert [one["step"] for one in whole.history.evaluations] == [2, 4]
    assert whole.history.evaluations[-1]["accuracy"] == whole.result.evaluation.accuracy
    assert len(whole.history.learning_rates) == 4 and len(repr(whole)) < 200


def test_a_plot_is_a_picture_and_says_which_package_it_needs(monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    result = ondevice.train("tiny:llama", ROWS, steps=1, **FAST)
    figure = result.plot("pictures.png")
    assert Path("pictures.png").read_bytes()[:4] == b"\x89PNG"
    assert figure._repr_png_()[:4] == b"\x89PNG" and len(figure.axes) == 1
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ondevice.OndeviceError) as caught:
        result.plot()
    assert caught.value.hint == "pip install matplotlib"


def test_a_plan_takes_what_train_takes(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path))  # other processes measure, too
    loaded = ondevice.load_model("tiny:llama")
    plans = [ondevice.plan(model, ROWS, **FAST) for model in (loaded, "tiny:llama")]
    assert plans[0].request.length_tokens == plans[1].request.length_tokens == 16
    assert plans[0].total_bytes == plans[1].total_bytes and plans[0].request.method.rank == 2
    sizes = ondevice.plan(
        "tiny:llama",
        ondevice.method_config("lora", {"rank": 2}),
        batch_size=2,
        length_tokens=16,
    )
    assert sizes.parts == plans[1].parts
    assert not Path("runs").exists()


def test_a_plan_has_the_length_of_the_run_if_one_row_is_very_long(monkeypatch) -> None:
    """One row of twice the others' length is cut if memory does not suffice, in both."""
    rows = [*ROWS * 10, {"text": "a" * 18, "label": "yes"}]
    enough = ondevice.plan("tiny:llama", rows, **FAST)
    assert enough.request.length_tokens > 24
    limit = {"train.memory_limit_bytes": enough.total_bytes - (1 << 10)}
    assert ondevice.plan("tiny:llama", rows, **FAST, **limit).request.length_tokens < 24
    seen: list[int] = []
    monkeypatch.setattr("ondevice.api.resolve.memory_limit", lambda *_: nullcontext())
    sinks = [lambda event: _length(event, seen)]
    ondevice.train("tiny:llama", rows, steps=1, sinks=sinks, force=True, **FAST, **limit)
    assert seen == [ondevice.plan("tiny:llama", rows, **FAST, **limit).request.length_tokens]
    held_out = [{"text": "another long row " * 8, "label": "yes"}]
    longer = ondevice.plan("tiny:llama", ROWS, eval_rows=held_out, **FAST)
    assert longer.request.length_tokens > 100


def _length(event: object, seen: list[int]) -> None:
    if isinstance(event, Start):
        seen.append(event.config["data"]["max_length_tokens"])


def test_a_table_of_pandas_is_rows() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS)
    taken = ondevice.train("tiny:llama", table, steps=2, **FAST)
    assert losses(taken.out) == losses(ondevice.train("tiny:llama", ROWS, steps=2, **FAST).out)


class Table:
    """What a DataFrame has: its iterator gives the columns' names."""

    def __iter__(self):
        return iter(("text", "label"))

    def itertuples(self):
        raise NotImplementedError

    def to_dict(self, orient: str):
        assert orient == "records"
        return [*ROWS, {"text": "c", "label": float("nan")}]


def test_a_table_s_holes_are_rows_left_out_and_its_columns_are_not_rows() -> None:
    result = ondevice.train("tiny:llama", Table(), steps=1, **FAST)
    assert result.data["train"]["sequences"] == 12
    assert sum(result.data["train"]["left_out"].values()) == 1


def test_the_version_is_the_installed_one() -> None:
    assert ondevice.__version__ == own_version() and "__version__" in dir(ondevice)


NAMES = {
    "steps": "train.steps",
    "learning_rate": "method.learning_rate",
    "rank": "method.rank",
    "batch_size": "train.batch_size",
    "out": "train.out",
    "max_length": "data.max_length_tokens",
    "data": "data.path",
    "model": "model.source",
    "method": "method.name",
    "schedule": "train.schedule",
    "quantize": "export.quantize",
    "queries": "method.queries",
    "train.eval_rows": "train.eval_rows",
}


@pytest.mark.parametrize(("name", "key"), NAMES.items())
def test_a_plain_name_is_the_one_key_that_has_it(name: str, key: str) -> None:
    assert dotted({name: "x"}) == {key: "x"} if name != "method" else {key: "lora"}


def test_a_section_takes_a_dictionary_and_a_method_its_settings() -> None:
    method = ondevice.method_config("lora", {"rank": 3})
    assert dotted({"method": method, "train": {"steps": 2}, "seed": None}) == {
        "method.name": "lora",
        "method.rank": 3,
        "train.steps": 2,
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stepz": 3}, "unknown setting 'stepz', did you mean steps (train.steps)?"),
        ({"lr": 3}, "did you mean learning_rate (method.learning_rate)?"),
        ({"num_train_epochs": 3}, "did you mean epochs (train.epochs)?"),
        ({"queries": 2, "method": "lora"}, "method='mezo' or 'prge'"),
        ({"schedule": "cosine", "method": "lsp"}, "may be train.schedule or method.schedule"),
        ({"rank": 2, "method.rank": 3}, "'method.rank' is given twice"),
        ({"method": 3}, "method is of the wrong type"),
        ({"train.learning_rate": 1.0}, "write 'method.learning_rate'"),
        ({"train.learning_rate": 1.0}, "settings: unknown key"),
        ({"train": {"rank": 3}}, "write 'method.rank'"),
        ({"batch": 3}, "did you mean batch_size (train.batch_size)?"),
        ({"train_dataset": ROWS}, "did you mean rows?"),
        ({"eval_dataset": ROWS}, "did you mean eval_rows?"),
        ({"steps": 3, "epochs": 1}, "steps and epochs are both given"),
        ({"method": "mespp"}, "did you mean 'mesp'?"),
        ({"method": "QLoRA"}, "did you mean 'lora'?"),
        ({"dtype": "fp16"}, "did you mean 'float16'?"),
        ({"device": "gpu"}, "did you mean 'cuda'?"),
        ({"schedule": "cosin", "method": "lora"}, "did you mean 'cosine'?"),
        ({"backend": "pytorch"}, "did you mean 'torch'?"),
        ({"task": "sst3"}, "did you mean 'sst2'?"),
        ({"method": "lora", "target_modules": ["qproj"]}, "did you mean 'q_proj'?"),
    ],
)
def test_a_wrong_name_says_the_right_one(settings, words) -> None:
    with pytest.raises(ondevice.OndeviceError) as caught:
        ondevice.train("tiny:llama", ROWS, **settings)
    assert words in str(caught.value) and not Path("runs").exists()


def test_a_number_of_rows_to_evaluate_is_not_taken_for_rows() -> None:
    with pytest.raises(DataError) as caught:
        ondevice.train("tiny:llama", ROWS, eval_rows=3)
    assert "train.eval_rows" in str(caught.value)
