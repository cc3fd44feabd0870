"""How much of the numerics could be wrong without a test noticing: mutants made by cosmic-ray, one at a time.

    pip install cosmic-ray
    python -m tests.mutation.run                     all modules; outcomes are kept in build/mutation.json
    python -m tests.mutation.run --only lsp,prge     some modules; --survivors: only mutants that are not known to die
    python -m tests.mutation.run --record            runs nothing; writes what is kept into tests/mutation/RESULTS.md

Each mutant changes one operator, number, comparison or condition of a module of the numerics, in a copy of the
checkout, and the module's own tests run over it. Mutants are drawn with a seed, so a run can be repeated. What changes
nothing but annotations or messages is not counted. The frameworks are loaded once, and each mutant is a fork.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.equivalents import EQUIVALENT

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/mutation/RESULTS.md"
KEPT = ROOT / "build/mutation.json"
GRADIENTS = tuple(  # without the longest, whose models and settings are drawn
    f"tests/methods/mesp/torch/test_gradients.py::test_{name}"
    for name in (
        "attention_s_tiles_do_not_depend_on_each_other",
        "attention_with_a_mask_is_attention_without",
        "a_chunk_of_queries_has_so_many_scores",
        "gradients_of_smollm2_s_shape",
        "training_one_projection_learns_nothing_else",
        "a_half_precision_model_has_float32_pairs_and_gradients_near_float32_s",
        "heads_that_flash_attention_cannot_take_are_computed_in_chunks",
    )
)
PASSES = (
    "tests/methods/mesp/torch/test_fused_passes.py::test_fused_passes_give_the_exact_gradients",
    "tests/methods/mesp/torch/test_fused_passes.py"
    "::test_passes_with_a_graph_s_kernels_give_the_exact_gradients",
    "tests/methods/mesp/torch/test_families.py::test_gradients_match_autograd_through_transformers",
)
"""As on a GPU, with all low-rank products of an input as one; and keys that blocks share."""
TRAITS = ("tests/methods/mesp/torch/test_traits.py",)
GOLDEN = "tests/golden/test_gradients.py::test_"
GOLDEN_TORCH = (f"{GOLDEN}torch_meets_the_golden_gradients",)
GOLDEN_MLX = (f"{GOLDEN}mlx_meets_the_golden_gradients",)
MLX = (
    *GOLDEN_MLX,
    "tests/methods/mesp/mlx/test_gradients.py"
    "::test_families_with_traits_of_their_own_have_exact_gradients",
    "tests/training/test_candidates.py::test_mesp_branches_in_mlx",
)
"""And traits that no golden case has: delta rules, embeddings of layers, shared keys, branches."""
GOLDEN_BLOCKS = (f"{GOLDEN}block_programs_meet_the_golden_gradients",)
GOLDEN_FUNCTIONS = (f"{GOLDEN}functions_of_blocks_meet_the_golden_gradients",)
CHECKED_FUNCTIONS = ("tests/exporters/android_cpu/test_functions_of_blocks.py",)
HEAD_AND_UPDATE = (
    "tests/methods/mesp/test_head_tiles.py",
    "tests/methods/mesp/test_block_update.py",
)
OBJECTIVES = ("tests/objectives/test_objectives.py", "tests/objectives/test_trl.py")
REVFFN = "tests/methods/revffn"
LAYER_ADAM = ("tests/runtime_ops/test_layer_adam.py", "tests/runtime_ops/test_adam_undo.py")
MODULES: dict[str, tuple[str, ...]] = {
    "runtime_ops/generator.py": ("tests/runtime_ops/test_generator.py",),
    "runtime_ops/layer_adam.py": LAYER_ADAM,
    "runtime_ops/adam_state.py": LAYER_ADAM,
    "runtime_ops/adam_undo.py": LAYER_ADAM,
    "runtime_ops/quantized.py": (
        "tests/runtime_ops/test_quantized.py",
        "tests/runtime_ops/test_torch_ops.py",
    ),
    "exporters/executorch/blocks.py": GOLDEN_BLOCKS,
    "ondevice/data/batching.py": ("tests/data/test_batching.py",),
    "ondevice/data/encode.py": ("tests/data/test_encode.py", "tests/data/tasks/test_chat.py"),
    "ondevice/nn/cross_entropy.py": ("tests/nn/test_cross_entropy.py",),
    "ondevice/nn/graph_loss.py": (
        "tests/nn/test_cross_entropy.py",
        "tests/methods/prge/test_torch.py",
    ),
    "ondevice/nn/lora.py": ("tests/nn/test_lora.py",),
    "ondevice/nn/calibrated.py": ("tests/nn/test_calibrated.py",),
    "ondevice/nn/experts.py": ("tests/nn/test_experts.py",),
    "ondevice/nn/fused.py": ("tests/nn/test_fused.py",),
    "ondevice/nn/int8_kernel.py": ("tests/nn/test_int8_kernel.py",),
    "ondevice/nn/packed.py": ("tests/nn/test_packed.py", "tests/models/test_packed.py"),
    "ondevice/nn/rounding.py": ("tests/nn/test_rounding.py",),
    "ondevice/nn/short_conv.py": (
        "tests/methods/test_packing.py::test_a_packed_step_is_the_step_of_the_rows",
        *GOLDEN_TORCH,
    ),
    "ondevice/objectives/base.py": OBJECTIVES,
    "ondevice/objectives/dpo.py": OBJECTIVES,
    "ondevice/objectives/grpo.py": ("tests/objectives/test_grpo.py",),
    "ondevice/objectives/kto.py": OBJECTIVES,
    "ondevice/methods/prge/step.py": (
        "tests/methods/test_token_zero.py::test_the_token_of_id_0_is_counted_and_its_loss_is_added",
        "tests/methods/prge/test_torch.py",
        "tests/methods/prge/test_subspace.py",
    ),
    "ondevice/methods/prge/subspace.py": ("tests/methods/prge/test_subspace.py",),
    "ondevice/methods/prge/subspace_program.py": ("tests/methods/prge/test_subspace.py",),
    "ondevice/methods/mezo/torch.py": ("tests/methods/mezo",),
    **{
        f"ondevice/methods/mesp/torch/{name}.py": TRAITS + GOLDEN_TORCH + PASSES + GRADIENTS
        for name in ("block", "convolution")
    },
    "ondevice/methods/mesp/torch/mlp.py": (
        *TRAITS,
        *GOLDEN_TORCH,
        *PASSES,
        *GRADIENTS,
        "tests/methods/mesp/torch/test_experts.py::test_gradients_match_autograd_through_transformers",
    ),
    "ondevice/methods/mesp/torch/attention.py": (
        *TRAITS,
        *GOLDEN_TORCH,
        *PASSES,
        *GRADIENTS,
        "tests/training/test_candidates.py::test_every_method_computes_a_prompt_once_with_what_it_trained",
    ),
    **{
        path: TRAITS
        for path in ("ondevice/methods/mesp/torch/delta.py", "ondevice/nn/delta_rule.py")
    },
    "ondevice/methods/mesp/torch/kernels.py": GRADIENTS + GOLDEN_TORCH,
    "ondevice/methods/mesp/blocks.py": HEAD_AND_UPDATE + CHECKED_FUNCTIONS + GOLDEN_FUNCTIONS,
    "ondevice/methods/mesp/block_functions.py": (
        *HEAD_AND_UPDATE,
        *CHECKED_FUNCTIONS,
        *GOLDEN_FUNCTIONS,
        "tests/exporters/android_cpu/test_chosen_levels.py::test_another_model_s_matrices_are_refused",
    ),
    "ondevice/methods/mesp/mlx/stages.py": (
        *MLX,
        "tests/methods/mesp/mlx/test_session.py::test_the_optimizer_updates_as_the_one_of_torch_does",
    ),
    "ondevice/methods/mesp/mlx/recurrent.py": MLX,
    "ondevice/methods/mesp/mlx/settings.py": (
        "tests/methods/mesp/mlx/test_settings.py",
        *GOLDEN_MLX,
    ),
    "ondevice/methods/mesp/mlx/model.py": (
        *MLX,
        *(
            f"tests/methods/mesp/mlx/test_session.py::test_{name}"
            for name in (
                "the_last_chunk_of_a_loss_need_not_be_full",
                "the_next_block_of_either_pass_is_read_ahead",
            )
        ),
    ),
    "ondevice/methods/mesp/mlx/program.py": tuple(
        f"tests/exporters/apple_mlx/test_target.py::test_{name}"
        for name in (
            "exported_functions_compute_what_the_python_stages_compute",
            "streamed_weights_match_resident_weights_bit_for_bit_also_after_a_resume",
            "the_manifest_lists_all_inputs_and_outputs_and_every_array_is_freed",
            "verify_accepts_the_exported_model_and_refuses_another",
        )
    ),
    "ondevice/methods/revffn/couplings.py": tuple(
        f"{REVFFN}/test_{name}.py" for name in ("inversion", "scale", "reversible")
    ),
    "ondevice/methods/revffn/streams.py": (f"{REVFFN}/test_streams.py", f"{REVFFN}/test_scale.py"),
    "ondevice/methods/revffn/updates.py": (f"{REVFFN}/test_updates.py",),
    "ondevice/methods/lsp/projector.py": (
        "tests/methods/lsp/test_projector.py",
        "tests/methods/lsp/test_matrix.py",
    ),
    "ondevice/methods/lsp/matrix.py": (
        "tests/methods/lsp/test_matrix.py",
        "tests/methods/lsp/test_plane.py",
    ),
    "ondevice/offload/muon.py": ("tests/offload/test_muon.py",),
    "ondevice/offload/gradients.py": ("tests/methods/slideformer/test_clip.py",),
    "ondevice/training/schedule.py": ("tests/training/test_schedule.py",),
}
"""Modules of the numerics, and the tests that guard each."""
ROW = r"^\| `([\w/]+\.py)` \| (\d+) \| (\d+) \| (\w+) \|"
SURVIVOR = r"^(\| `([\w/]+\.py):\d+` \|.*)$"
PROJECT = ("ondevice", "exporters", "runtime_ops", "benchmarks", "tests", "conftest")


@dataclass
class Mutant:
    """One change of one line, and its outcome: killed, survived or timeout (which counts as killed).

    `code` is of the module that it changes; see `code_of`.
    """

    module: str
    line: int
    before: str
    after: str
    digest: str
    outcome: str = ""
    code: str = ""


@dataclass
class Row:
    """A module's line of the table, and its survivors as lines of theirs."""

    mutants: int
    killed: int
    code: str
    survivors: list[str]


def code_of(source: str) -> str:
    """Return eight digits that tell one text of a module from another."""
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def mutants_of(module: str, count: int, seed: int) -> list[tuple[Mutant, str]]:
    """Draw `count` mutants of a module whose code differs from the original, each with its source."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    original = (ROOT / module).read_text()
    original_dump, sources = _semantic_dump(original), set[str]()
    for name in (
        name for name in operator_names() if "Variable" not in name
    ):  # those take the names of variables
        for occurrence in range(200):
            source = mutate_code(original, get_operator(name)(), occurrence)
            if source is None:
                break
            try:
                if _semantic_dump(source) != original_dump:
                    sources.add(source)
            except SyntaxError:  # the unpacking of an argument is no product
                continue
    drawn = random.Random(f"{seed} {module}").sample(sorted(sources), min(count, len(sources)))
    return [(_mutant(module, original, source), source) for source in drawn]


def _mutant(module: str, original: str, source: str) -> Mutant:
    pairs = zip(original.splitlines(), source.splitlines())
    line, (before, after) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return Mutant(
        module,
        line,
        before.strip(),
        after.strip(),
        hashlib.sha256(source.encode()).hexdigest()[:16],
        code=code_of(original),
    )


def _semantic_dump(source: str) -> str:
    """The syntax tree without annotations, docstrings and messages of errors: changes of these alone are no mutants."""
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


class Checkout:
    """A copy of the checkout, in which one module at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        for name in files:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place, follow_symlinks=False)

    def write(self, module: str, source: str) -> None:
        """Write a module, and remove its bytecode, which Python would believe if the size and second are the same."""
        path = self.folder / module
        path.write_text(source)
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()

    def run_tests(self, tests: tuple[str, ...], limit_s: float) -> str:
        """Run tests over the copy in a fork of this process; survived, killed or timeout."""
        child = os.fork()
        if child == 0:
            self._run_pytest(tests)
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "timeout"

    def _run_pytest(self, tests: tuple[str, ...]) -> None:
        os.setsid()
        os.chdir(self.folder)
        sys.path[:0] = [str(self.folder)]
        os.environ["PYTHONPATH"] = str(self.folder)
        os.environ["ONDEVICE_TESTS_ALL"] = "1"  # no test that would notice is left out
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        import hypothesis
        import pytest

        # One failing example is enough: no time goes into a smaller one.
        settings, phases = (
            hypothesis.settings,
            (hypothesis.Phase.explicit, hypothesis.Phase.generate),
        )
        settings.register_profile("mutation", settings.get_profile("ci"), phases=phases)
        settings.load_profile("mutation")
        marks = "not slow and not gpu and not model"
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]))
        names = [name for name in sys.modules if name.partition(".")[0] not in PROJECT]
        (self.folder / "modules.json").write_text(json.dumps(names))
        os._exit(status)

    def load_frameworks(self) -> None:
        """Import what the last tests imported beside the project, so that each fork has it already."""
        for name in json.loads((self.folder / "modules.json").read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def run_module(
    copy: Checkout, module: str, drawn: list[tuple[Mutant, str]], known: dict[str, str]
) -> list[Mutant]:
    """Run a module's tests over its mutants; one whose digest is `known` has that outcome."""
    original, tests, limit_s = (ROOT / module).read_text(), MODULES[module], 600.0
    if any(mutant.digest not in known for mutant, _ in drawn):
        for _ in range(2):  # the first also finds what to load
            began = time.monotonic()
            if copy.run_tests(tests, limit_s) != "survived":
                raise SystemExit(f"{', '.join(tests)}: fail without any mutant")
            limit_s = max(20.0, 4 * (time.monotonic() - began))
            copy.load_frameworks()
    for mutant, source in drawn:
        mutant.outcome = known.get(mutant.digest, "")
        if not mutant.outcome:
            copy.write(module, source)
            mutant.outcome = copy.run_tests(tests, limit_s)
            print(
                f"{mutant.outcome:9}{module}:{mutant.line}: {mutant.before}  ->  {mutant.after}",
                flush=True,
            )
    copy.write(module, original)
    return [mutant for mutant, _ in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--each", type=int, default=14, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="modules whose path has one of these in it, with commas")
    parser.add_argument(
        "--survivors", action="store_true", help="run only mutants that are not known to die"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write RESULTS.md of the kept outcomes, and run nothing",
    )
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CI": "true", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    kept = {
        name: [Mutant(**m) for m in rows] for name, rows in _read_kept().items() if name in MODULES
    }
    if options.record:
        now = {module: code_of((ROOT / module).read_text()) for module in MODULES}
        if stale := [name for name, rows in kept.items() if {m.code for m in rows} != {now[name]}]:
            raise SystemExit(
                f"changed since they were run: {', '.join(stale)}; run them again with --only"
            )
        rows = recorded() | {name: _row(mutants) for name, mutants in kept.items()}
        RESULTS.write_text(report(rows, now, options.each, options.seed))
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Checkout(Path(folder) / "checkout")
        for module in MODULES:
            if options.only and not any(words in module for words in options.only.split(",")):
                continue
            dead = {m.digest: m.outcome for m in kept.get(module, ()) if m.outcome != "survived"}
            drawn = mutants_of(module, options.each, options.seed)
            kept[module] = run_module(copy, module, drawn, dead if options.survivors else {})
            row = _row(kept[module])
            print(f"{module}: {_summary(row.killed, row.mutants)}", flush=True)
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(
                json.dumps(
                    {name: [asdict(m) for m in rows] for name, rows in kept.items()}, indent=1
                )
            )


def _read_kept() -> dict[str, list[dict]]:
    return json.loads(KEPT.read_text()) if KEPT.is_file() else {}


def _summary(killed: int, mutants: int) -> str:
    return f"{killed} of {mutants} killed ({killed / max(1, mutants):.1%})"


def _row(mutants: list[Mutant]) -> Row:
    left = [mutant for mutant in mutants if mutant.outcome == "survived"]
    return Row(
        len(mutants),
        len(mutants) - len(left),
        mutants[0].code,
        [_survivor(mutant) for mutant in left],
    )


def _survivor(mutant: Mutant) -> str:
    cells = (f"`{text.replace('|', chr(92) + '|')}`" for text in (mutant.before, mutant.after))
    reason = EQUIVALENT.get((mutant.module, mutant.before, mutant.after), "")
    return f"| `{mutant.module}:{mutant.line}` | {' | '.join(cells)} | {reason} |"


def recorded() -> dict[str, Row]:
    """Read the rows that `RESULTS.md` has: a run of some modules leaves the others as they are."""
    text = RESULTS.read_text()
    rows = {
        module: Row(int(mutants), int(killed), code, [])
        for module, mutants, killed, code in re.findall(ROW, text, re.MULTILINE)
    }
    for line, module in re.findall(SURVIVOR, text, re.MULTILINE):
        rows[module].survivors.append(line)
    return {module: row for module, row in rows.items() if module in MODULES}


def report(rows: dict[str, Row], now: dict[str, str], each: int, seed: int) -> str:
    """Return the table of modules, and every survivor with the reason why it lives.

    Args:
        now: the code of each module today.
    """
    total = _summary(
        sum(row.killed for row in rows.values()), sum(row.mutants for row in rows.values())
    )
    lines = [
        "# Mutants of the numerics",
        "",
        f"`python -m tests.mutation.run --each {each} --seed {seed}`: {total}.",
    ]
    rows = {module: rows[module] for module in MODULES if module in rows}
    for words, names in (
        (
            "Changed since they were run",
            [name for name, row in rows.items() if row.code != now[name]],
        ),
        ("On the list and not run yet", [name for name in MODULES if name not in rows]),
    ):
        if names:
            lines += ["", f"{words}: {', '.join(f'`{name}`' for name in names)}."]
    lines += [
        "",
        "| Module | Mutants | Killed | Code | Tests |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for module, row in rows.items():
        files = dict.fromkeys(f"`{name.partition('::')[0]}`" for name in MODULES[module])
        cells = (f"`{module}`", row.mutants, row.killed, row.code, ", ".join(files))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "## Survivors",
        "",
        "| Line | From | To | Why no test on a CPU can tell |",
        "| --- | --- | --- | --- |",
    ]
    lines += [line for row in rows.values() for line in row.survivors]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
