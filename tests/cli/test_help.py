"""Help costs what it shows: a verb's help imports that verb, and the list of verbs imports none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ondevice.cli.app import VERBS, Verbs

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "mlx",
    "pyarrow",
    "fastapi",
    "tokenizers",
    "huggingface_hub",
}


def imported(*words: str) -> set[str]:
    """All modules that a fresh interpreter holds after the command has printed its help."""
    program = (
        "import sys, io, contextlib\nfrom ondevice.cli.app import run\n"
        f"with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit): run({[*words]})\n"
        "assert 'Usage:' in said.getvalue()\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_the_list_of_verbs_imports_no_verb_and_no_settings() -> None:
    modules = imported("--help")
    assert {name.partition(".")[0] for name in modules}.isdisjoint(HEAVY | {"pydantic"})
    own = {name for name in modules if name.startswith("ondevice.")}
    assert not any(name.startswith("ondevice.methods.") for name in own)
    assert len(own) <= 14, sorted(own)


def test_the_help_of_train_imports_the_methods_settings_and_nothing_that_computes() -> None:
    modules = imported("train", "--help")
    assert {name.partition(".")[0] for name in modules}.isdisjoint(HEAVY)
    assert "ondevice.methods.mesp.config" in modules and "ondevice.methods.mesp.lora" not in modules
    own = {name for name in modules if name.startswith("ondevice.")}
    assert (
        len(own) <= 66
        and not {"ondevice.cli.fleet", "ondevice.cli.jobs", "ondevice.cli.export"} & own
    ), sorted(own)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_is_where_the_list_says(name: str) -> None:
    assert Verbs()[name].name == name and len(VERBS[name][1]) < 70
