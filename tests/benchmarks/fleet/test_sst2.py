"""The SST-2 benchmark's batched fleets do what a fleet's members do, and FedAvg is the mean of its
devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.fleet import sst2  # noqa: E402
from benchmarks.fleet.devices import FirstOrder, Mixed, Setting, ZerothOrder  # noqa: E402
from benchmarks.prge.racing_model import RacingModel  # noqa: E402
from ondevice import read_dataset  # noqa: E402
from ondevice.core.session import IGNORE  # noqa: E402
from ondevice.data.batching import Batches  # noqa: E402
from ondevice.data.examples import Example  # noqa: E402
from ondevice.data.tasks.record import label_tokens_of_rows  # noqa: E402
from ondevice.fleet.charter import Charter  # noqa: E402
from ondevice.fleet.member import Member  # noqa: E402
from ondevice.fleet.rounds import Rounds  # noqa: E402
from ondevice.fleet.split import split  # noqa: E402
from ondevice.methods.prge.config import PrgeConfig  # noqa: E402
from ondevice.models import tiny_model  # noqa: E402

SEED, RATE = 3, 0.05


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = [{"sentence": "x" * (3 + 5 * i % 23) + f" film {i}", "label": i % 2} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_dataset(path, tiny_model().tokenizer, task="sst2", max_length_tokens=72)
    items = [
        replace(
            item, example=one_token(item.example), candidates=tuple(map(one_token, item.candidates))
        )
        for item in read.items
    ]
    return replace(read, items=items)


def one_token(example: Example) -> Example:
    """Label the first letter of an answer alone (after a space, which all share): what the batched
    loss is over."""
    letter = next(place for place, label in enumerate(example.labels) if label != IGNORE) + 1
    return Example(example.ids[: letter + 1], (IGNORE,) * letter + (example.labels[letter],))


@pytest.mark.parametrize("share", [None, 1 / 3])
def test_batched_devices_reply_like_members_over_a_session(rows: Any, share: float | None) -> None:
    from ondevice.core.registry import spec_of

    setting = Setting("iid", 2, 2, rounds=2, local_steps=2, queries=2, rank=2)
    if share:
        setting = replace(setting, dirichlet=0.5, share_rows=True)
    batched = ZerothOrder(
        RacingModel(tiny_model()), rows, [(setting, RATE, SEED), (setting, RATE, SEED + 1)]
    )
    before = batched.evaluate(batched.table)[1]
    for _ in range(2):
        batched.round()
    assert (batched.evaluate(batched.table)[1] != before).all()
    charter: Charter = batched.servers[0].charter
    config = PrgeConfig(rank=2, alpha=2, queries=2, noise="rademacher", subspace="random")
    config = config.with_answers(lambda: label_tokens_of_rows(rows))
    session = spec_of(config).open_session(tiny_model(), config, SEED, "cpu", "torch")
    parts = split(rows, 2, setting.dirichlet, SEED)
    assert len({len(part) for part in parts}) == (2 if share else 1)
    agreed = charter.fleet.model_copy(update={"batch_share": share})
    members = [
        Member(
            charter, session, Batches(part, agreed.batch_rows(len(part), 2), None, SEED, 0), device
        )
        for device, part in enumerate(parts)
    ]
    server = Rounds(charter)
    for number in range(2):
        current = server.begin([0, 1])
        for member in members:
            server.receive(member.answer(current.tasks[member.device]))
        outcome = server.close(number)
        for member in members:
            member.follow([outcome])
    moved = np.abs(server.state.flat()).max()
    assert moved > 1e-3
    np.testing.assert_allclose(
        batched.servers[0].state.flat(), server.state.flat(), atol=2e-3 * moved
    )
    assert batched.bytes[0] == 2 * (33 + 38 + 2 * 4 + 29 + 11 + 2 * 4)


def test_fedavg_of_one_step_is_a_step_on_all_rows(rows: Any) -> None:
    model = RacingModel(tiny_model())
    two, one = (
        FirstOrder(
            model,
            rows,
            [(Setting("fedavg", devices, 4 // devices, 1, 1, 2, rank=2, first_order=True), 0.5, 0)],
        )
        for devices in (2, 1)
    )
    one.jobs = two.jobs.reshape(1, 1, 4)
    two.b = one.b = torch.full_like(one.b, 0.1)  # with B of zeros A has no gradient
    start = one.a
    one.round()
    two.round()
    assert (one.a - start).abs().max() > 1e-6
    for ours, expected in zip(two.adapters, one.adapters, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_a_mixed_round_averages_gradient_steps_and_updates_from_numbers(rows: Any) -> None:
    model = RacingModel(tiny_model())
    shape = Setting("mixed", 2, 1, 1, 2, 2, rank=2, first_order=True, weak=1, weak_rate=RATE)
    mixed, strong, weak = (
        kind(model, rows, [(setting, rate, SEED)])
        for kind, setting, rate in (
            (Mixed, shape, 0.5),
            (Mixed, replace(shape, weak_rate=0.0), 0.5),
            (ZerothOrder, replace(shape, devices=1, weak=0), RATE),
        )
    )
    weak.jobs = mixed.jobs[:, 1:]
    for group in (mixed, strong, weak):
        group.round()
    assert strong.b.abs().max() > 1e-3
    assert weak.state.abs().max() > 1e-3
    torch.testing.assert_close(mixed.b, (strong.b + weak.state) / 2, rtol=0, atol=1e-5)
    assert strong.bytes[0] < mixed.bytes[0] < 2 * strong.bytes[0]


def test_epsilons_match_the_accountant() -> None:
    pytest.importorskip("dp_accounting")
    from ondevice.fleet.privacy import epsilon

    for (multiplier, answers), value in sst2.EPSILONS.items():
        assert value == pytest.approx(epsilon(multiplier, answers), rel=1e-4)


def test_the_script_chooses_a_rate_and_continues_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"sentence": f"film {i}", "label": i % 2} for i in range(16)]
    (tmp_path / "sst2").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "sst2" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    arguments = ["sst2", "--model", "tiny:llama", "--data", tmp_path, "--settings", "central,iid,private-20,mixed",
                 "--seeds", 1, "--rounds", 1, "--local-steps", 1, "--queries", 1, "--rates", "1e-2,1e-1",
                 "--fo-rates", 0.1,
                 "--choose-rows", 4, "--eval-rows", 8, "--log", tmp_path / "log.jsonl", "--json"]  # fmt: skip
    monkeypatch.setattr("sys.argv", [str(word) for word in arguments])
    for said in (True, False):
        sst2.main()
        text = capsys.readouterr().out
        assert ("seed 0: accuracy" in text) is said
    done = {row["setting"]: row for row in json.loads(text.splitlines()[-1])["rows"]}
    assert done.keys() == {"central", "iid", "private-20", "mixed"}
    assert done["iid"]["bytes"] == done["central"]["bytes"]
    assert done["iid"]["against_central"] is not None
