"""A chat template that writes the date writes one date on all devices of a fleet, whatever their clocks say."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers.utils.chat_template_utils as chat_template_utils

from ondevice.core.errors import FleetError
from ondevice.fleet import dates, device
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.charter import Charter
from ondevice.fleet.device import DeviceSettings
from ondevice.models.tiny import save_tiny
from tests.cli.command import CommandLine, write_rows
from tests.fleet.fleets import charter

DAY = timedelta(days=1)
MARKS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
)
DATED = "{{ strftime_now('%Y-%m-%d') }}\n" + MARKS


def model(folder: Path, template: str) -> Path:
    save_tiny(folder)
    (folder / "chat_template.jinja").write_text(template)
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values.pop("chat_template", None)
    config.write_text(json.dumps(values))
    return folder


def data(path: Path) -> Path:
    turns = [
        [{"role": "user", "content": f"Count {i}"}, {"role": "assistant", "content": "One."}]
        for i in range(8)
    ]
    return write_rows(path, [{"messages": one} for one in turns])


def set_clocks(monkeypatch: pytest.MonkeyPatch, later: timedelta) -> None:
    """Set the clock of this module's readers: transformers' templates, and a fleet's beginning."""
    now = datetime.now() + later

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr(dates, "datetime", Clock)


@pytest.mark.parametrize("method", ["prge", "lora-fa"])
def test_devices_render_the_date_of_the_charter(
    ondevice: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    base = model(tmp_path / "model", DATED)
    begin = ("fleet", "begin", "--model", base, "--method", method, "--set", "method.rank=2")
    done = ondevice(*begin, "--out", tmp_path / "fleet", "--json").json
    again = ondevice(*begin, "--out", tmp_path / "fleet", "--json").json
    assert again["fleet"] == done["fleet"], "the date is read, not taken again"
    kind = Charter if "size" in done["charter"] else AdapterCharter
    agreed = kind.from_bytes(json.dumps(done["charter"]).encode())
    assert agreed.date is not None

    def ids(later: timedelta) -> list[list[int]]:
        set_clocks(monkeypatch, later)
        settings = DeviceSettings(
            str(tmp_path / "d"), str(data(tmp_path / "rows.jsonl")), model=str(base)
        )
        session, batches = device._open(agreed, settings)
        found = [batches.at(step).ids.tolist() for step in range(2)]
        session.close()
        return found

    assert ids(0 * DAY) == ids(400 * DAY)


def test_a_simulated_fleet_goes_on_with_its_date(
    ondevice: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model(tmp_path / "model", DATED)

    def simulate(out: str, rounds: int, *more: object) -> dict[str, Any]:
        return ondevice("fleet", "simulate", "--model", base, "--data", data(tmp_path / "rows.jsonl"),
                        "--set", "method.rank=2", "--batch-size", 1, "--devices", 2, "--rounds", rounds,
                        "--out", tmp_path / out, "--json", *more).json  # fmt: skip

    straight = simulate("straight", 2, "--set", "fleet.date=2024-02-29T12:00:00")
    simulate("stopped", 1, "--set", "fleet.date=2024-02-29T12:00:00")
    set_clocks(monkeypatch, 3 * DAY)
    resumed = simulate("stopped", 2, "--resume")
    assert resumed["final_hash"] == straight["final_hash"]
    assert simulate("another", 2)["final_hash"] != straight["final_hash"]


def test_a_template_without_a_date_leaves_none_in_the_charter(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    done = ondevice("fleet", "begin", "--model", model(tmp_path / "model", MARKS), "--set", "method.rank=2",
                    "--out", tmp_path / "fleet", "--json").json  # fmt: skip
    assert "date" not in done["charter"]["data"]


@pytest.mark.parametrize("date", ["tomorrow", 7, "2024-02-29", "2024-02-29T12:00:00+01:00", ["x"]])
def test_a_charter_with_another_date_is_refused(date: Any) -> None:
    values = charter().values()
    values["data"]["date"] = date
    with pytest.raises(FleetError) as refusal:
        Charter.from_bytes(json.dumps(values).encode())
    assert "not a valid charter" in str(refusal.value)
