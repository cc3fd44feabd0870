"""How much of the numerics could be wrong without a test noticing: mutants made by cosmic-ray, one at a time.

    pip install cosmic-ray
    python -m tests.mutation.run --each 14 --record      14 mutants of every module; writes tests/mutation/RESULTS.md

Each mutant changes one operator, number, comparison or condition of a module of the numerics, in a copy of the
checkout, and the module's own tests run over it. Mutants are drawn with a seed, so a run can be repeated. What changes
nothing but annotations or messages is not counted. The frameworks are loaded once, and each mutant is a fork.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/mutation/RESULTS.md"
MODULES: dict[str, tuple[str, ...]] = {
    "ondevice/nn/cross_entropy.py": ("tests/nn/test_cross_entropy.py",),
    "ondevice/nn/graph_loss.py": ("tests/nn/test_cross_entropy.py", "tests/methods/prge/test_torch.py"),
    "ondevice/nn/lora.py": ("tests/nn/test_lora.py",),
    "ondevice/methods/prge/torch.py": ("tests/methods/prge/test_torch.py",),
    "ondevice/methods/mezo/torch.py": ("tests/methods/mezo",),
    "ondevice/methods/mesp/torch/stages.py": ("tests/methods/mesp/torch/test_gradients.py",),
    "ondevice/methods/mesp/torch/attention.py": ("tests/methods/mesp/torch/test_gradients.py",),
    "ondevice/methods/revffn/couplings.py": ("tests/methods/revffn/test_reversible.py",),
    "ondevice/methods/revffn/streams.py": (
        "tests/methods/revffn/test_streams.py",
        "tests/methods/revffn/test_scale.py",
    ),
    "ondevice/methods/lsp/projector.py": ("tests/methods/lsp/test_projector.py", "tests/methods/lsp/test_matrix.py"),
    "ondevice/training/schedule.py": ("tests/training/test_schedule.py",),
    "ondevice/data/batching.py": ("tests/data/test_batching.py",),
    "runtime_ops/generator.py": ("tests/runtime_ops/test_generator.py",),
}
"""Modules of the numerics, and the tests that guard each."""
LIMIT_S = 240


@dataclass
class Mutant:
    """One change of one line, and what became of it: killed, survived or timeout (which counts as killed)."""

    module: str
    line: int
    before: str
    after: str
    source: str
    outcome: str = ""


def mutants_of(module: str, count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants of a module whose code differs from the original."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    original = (ROOT / module).read_text()
    meaning, found = _meaning(original), {}
    for name in (name for name in operator_names() if "Variable" not in name):  # those take the names of variables
        for occurrence in range(200):
            changed = mutate_code(original, get_operator(name)(), occurrence)
            if changed is None:
                break
            try:
                differs = changed not in found and _meaning(changed) != meaning
            except SyntaxError:  # the unpacking of an argument is no product
                continue
            if differs:
                found[changed] = name
    drawn = random.Random(f"{seed} {module}").sample(sorted(found), min(count, len(found)))
    return [_mutant(module, original, source) for source in drawn]


def _mutant(module: str, original: str, source: str) -> Mutant:
    pairs = zip(original.splitlines(), source.splitlines())
    line, (before, after) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return Mutant(module, line, before.strip(), after.strip(), source)


def _meaning(source: str) -> str:
    """The code without annotations, docstrings and the messages of errors: changes of these alone are no mutants."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant("")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
            for argument in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs):
                argument.annotation = None
        elif isinstance(node, ast.Raise):
            node.exc = ast.Constant("")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def run_tests(copy: Path, tests: tuple[str, ...]) -> str:
    """Run tests over the copy in a fork of this process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        sys.path[:0] = [str(copy)]
        os.environ["PYTHONPATH"] = str(copy)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests])))
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=14, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="modules whose path has one of these in it, with commas")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CI": "true"}
    import hypothesis
    import numpy
    import pytest
    import torch
    import transformers.models.llama.modeling_llama

    print("with", *(module.__name__ for module in (hypothesis, numpy, pytest, torch, transformers)))
    every: list[Mutant] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for name in files:
            place = copy / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place, follow_symlinks=False)
        for module, tests in MODULES.items():
            if options.only and not any(words in module for words in options.only.split(",")):
                continue
            if run_tests(copy, tests) != "survived":
                raise SystemExit(f"{', '.join(tests)}: fail without any mutant")
            for mutant in mutants_of(module, options.each, options.seed):
                (copy / module).write_text(mutant.source)
                mutant.outcome = run_tests(copy, tests)
                shutil.copy2(ROOT / module, copy / module)
                print(f"{mutant.outcome:9}{module}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
                every.append(mutant)
    killed = sum(mutant.outcome != "survived" for mutant in every)
    print(f"{killed} of {len(every)} killed, {killed / max(1, len(every)):.1%}")
    if options.record:
        RESULTS.write_text(report(every, options.each, options.seed))


def report(every: list[Mutant], each: int, seed: int) -> str:
    """The table of modules, and every survivor."""
    killed = sum(mutant.outcome != "survived" for mutant in every)
    lines = [
        "# Mutants of the numerics", "",
        f"`python -m tests.mutation.run --each {each} --seed {seed} --record`: {killed} of {len(every)} killed "
        f"({killed / len(every):.1%}).", "",
        "| Module | Mutants | Killed | Tests |", "| --- | ---: | ---: | --- |",
    ]  # fmt: skip
    for module, tests in MODULES.items():
        own = [mutant for mutant in every if mutant.module == module]
        if own:
            dead = sum(mutant.outcome != "survived" for mutant in own)
            lines.append(f"| `{module}` | {len(own)} | {dead} | {', '.join(f'`{name}`' for name in tests)} |")
    lines += ["", "## Survivors", "", "| Line | From | To |", "| --- | --- | --- |"]
    for mutant in every:
        if mutant.outcome == "survived":
            cells = (f"`{text.replace('|', chr(92) + '|')}`" for text in (mutant.before, mutant.after))
            lines.append(f"| `{mutant.module}:{mutant.line}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
