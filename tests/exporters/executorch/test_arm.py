"""The same files on 64-bit ARM, in an emulator, give the numbers of this machine: `pytest -m arm`.

It needs Debian's arm64 userland, which ONDEVICE_ARM_ROOT names; benchmarks/mesp/arm_userland.py
makes one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("executorch.exir")

from benchmarks.mesp.arm import FORMS, difference, export, give, run_here, run_there, spec_of
from benchmarks.mesp.arm_userland import Userland

pytestmark = [pytest.mark.arm, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 3
APART = 1e-5
"""Relative, of norms; measured: 1e-6."""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """How far each form's numbers are apart: every artifact is exported once, and all run in one
    emulated process."""
    folder = tmp_path_factory.mktemp("arm")
    artifacts = {form: export("llama", form, folder) for form in FORMS}
    (folder / "jobs").mkdir()
    give(artifacts, folder / "jobs", STEPS)
    here = run_here(folder / "jobs")
    there = run_there(
        folder / "jobs", Userland(Path(os.environ["ONDEVICE_ARM_ROOT"])), "neoverse-n1"
    )
    return {
        form: difference(form, here, there, spec_of(artifact))
        for form, artifact in artifacts.items()
    }


@pytest.mark.parametrize("form", [form for form in FORMS if form != "8da8w"])
def test_losses_and_gradients_are_those_of_this_machine(
    form: str, apart: dict[str, dict[str, float]]
) -> None:
    """AdamW divides by the gradient's own size, so an element near zero may go elsewhere: here,
    too."""
    found = apart[form]
    for what in ("loss", "gradient", "worst_gradient"):
        assert found[what] < APART, what
    assert found["adapter"] < max(APART, 2 * found["own_adapter"])


def test_products_of_integers_differ_by_what_last_bits_do_here(
    apart: dict[str, dict[str, float]],
) -> None:
    """A last bit turns an activation between two integers, and everything behind it differs: so it
    does here."""
    found = apart["8da8w"]
    assert found["nearest_gradient"] < APART or found["gradient"] < 2 * found["own_gradient"]
    assert found["gradient"] < 5e-2 and found["loss"] < 5e-3
