"""Two processes give what one gives, through checks of the projectors, and go on from each other's checkpoints.

With ONDEVICE_RANKS_DEVICE=cuda and two GPUs the same comparisons go through NCCL.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.methods.lsp.torch import LspSession  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload.units import SINGLE  # noqa: E402
from tests.methods.lsp.ranked import RUNS, checkpoints, compute, data, go_on, learned_pairs, opened  # noqa: E402
from tests.methods.slideformer.rank_processes import DEVICE, environment, needs_gloo  # noqa: E402
from tests.offload import pairs  # noqa: E402
from tests.ports import free_port  # noqa: E402
from tests.warm import Warm  # noqa: E402

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def single(folder: Path) -> list[float]:
    """Losses of one process after its checkpoint, which two ranks load, too."""
    one = opened(LspSession)
    for step, batch in enumerate(data(5)):
        one.step(*batch, step, 1e-3)
    checkpoints(folder / "one").save(5, one.state(), beside=one.save_beside)
    losses = go_on(one, folder / "single")
    one.close()
    return losses


@pytest.fixture(scope="module")
def ranks(folder: Path, single: list[float], warm: Warm) -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [str(warm.python), "-m", "tests.methods.lsp.ranked", str(folder), DEVICE],
            env=environment(
                RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_match_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    """Only the order of additions differs: over the rows of a batch, then over the ranks."""
    exact, (first, second) = (
        RUNS[name][0].get("compute") == "float32",
        (rank[name] for rank in ranks),
    )
    expected = compute(name, device=DEVICE)
    assert first["losses"] == second["losses"] and torch.equal(first["nll"], second["nll"])
    assert (
        first["checks"] == second["checks"] and first["checks"].keys() == expected["checks"].keys()
    )
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5 if exact else 1e-2)
    torch.testing.assert_close(
        first["nll"], expected["nll"], rtol=1e-5 if exact else 2e-2, atol=1e-5
    )
    assert [rank[name]["bytes"] / expected["bytes"] for rank in ranks] == pytest.approx(
        [0.5, 0.5], abs=0.1
    )
    start = {
        key: value.detach()
        for key, value in tiny_model(RUNS[name][1], **RUNS[name][2]).model.named_parameters()
    }
    ours = {**first["weights"], **second["weights"]}
    written: dict[str, int] = {}
    for (key, _), value in ours.items():
        written[key] = written.get(key, 0) + len(value)
    assert written == {key: len(value) for (key, _), value in expected["weights"].items()}
    for (key, at), value in ours.items():
        whole = expected["weights"][key, 0]
        theirs = whole[at : at + len(value)]
        difference = (value.float() - theirs.float()).abs()
        moved = (whole.float() - start[key].reshape(-1)).abs()
        if exact:
            assert difference.max() <= 1e-2 * moved.max(), key
        else:  # flipped roundings show; the gradient of the keys' bias is nothing else
            assert key.endswith("k_proj.bias") or difference.mean() <= 0.5 * moved.mean(), key


def test_ranks_learn_from_preference_pairs_what_one_process_learns(
    ranks: list[dict[str, Any]],
) -> None:
    alone = learned_pairs(SINGLE, DEVICE)
    for found in ranks:
        pairs.compare(found["pairs"], alone)


def test_ranks_go_on_from_their_own_checkpoint_and_from_one_process_s(
    ranks: list[dict[str, Any]], single: list[float], folder: Path
) -> None:
    losses = ranks[0]["session"]
    assert losses["resumed"] == losses["straight"]
    assert losses["from one"] == pytest.approx(single, rel=1e-2)
    models = [
        (folder / name / "model.safetensors").read_bytes() for name in ("straight", "resumed")
    ]
    assert models[0] == models[1]
    assert len(list((folder / "two" / "checkpoint-00000005").glob("state*.safetensors"))) == 2
    loaded = checkpoints(folder / "two").newest(lambda _: None)
    assert loaded is not None
    alone = opened(LspSession, seed=4)
    alone.load_state(loaded.state)
    assert go_on(alone, folder / "alone") == pytest.approx(losses["straight"], rel=1e-2)
    alone.close()
