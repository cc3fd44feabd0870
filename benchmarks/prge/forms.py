"""The forms of a P-RGE step in eager PyTorch on this CPU, timed in one process and weighed in
processes of their own.

python -m benchmarks.prge.forms --memory JSON      JSON is a list of `Form` as dictionaries
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, interleaved, settled
from benchmarks.prge.programs import SEED, SMOLLM, recall, remember


@dataclass(frozen=True, eq=True)
class Form:
    """A form that runs: a step with the given settings, or with `inference` one forward of the
    plain model.

    Attributes:
        values: settings of P-RGE (queries, batch_signs, ...); `algorithm1` keeps 2q copies of B as
            the paper does.
        rows: rows of data a step, or rows of the plain forward.
    """

    length: int
    rows: int
    values: dict[str, Any] = field(default_factory=dict)
    inference: bool = False
    model: str = SMOLLM

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Forms:
    """Callables of many forms over shared weights, so that they can be timed in turns in one
    process."""

    def __init__(self, model: str) -> None:
        from ondevice.models import load_model
        from ondevice.runtime_ops import torch_ops

        torch_ops.register()
        self.model, self._plain, self._programs = model, load_model(model), {}
        self.dims = self._plain.dims
        self.vocabulary, self.weight_bytes = self.dims.vocab, 4 * self.dims.parameters

    def program(self, values: dict[str, Any]) -> Any:
        """The eager program; forms that perturb the same layers share one model."""
        import torch

        from ondevice.core.registry import method_config
        from ondevice.methods.prge.layout import AdapterLayout
        from ondevice.methods.prge.step import PrgeProgram
        from ondevice.models import load_model

        config: Any = method_config(
            "prge", {key: value for key, value in values.items() if key != "algorithm1"}
        )
        noise = (
            torch.ops.ondevice.normal
            if config.noise == "gaussian"
            else torch.ops.ondevice.rademacher
        )
        if config.top_layers not in self._programs:
            loaded = load_model(self.model)
            layout = AdapterLayout.build(loaded.dims, config, SEED)
            self._programs[config.top_layers] = PrgeProgram(loaded.family, layout, config, noise)
        program = copy.copy(self._programs[config.top_layers])
        program.config, program.noise = config, noise
        return program

    def callable(self, form: Form) -> Callable[[], Any]:
        """A function that runs the form once; steps carry their state from call to call."""
        import torch

        random = np.random.default_rng(0)
        ids = torch.from_numpy(random.integers(0, self.vocabulary, (form.rows, form.length)))
        if form.inference:
            from ondevice.methods.model_loss import row_nll

            return torch.inference_mode()(lambda: row_nll(self._plain.family, ids, ids, 8))
        from tests.methods.prge.algorithm1 import CopiesState

        program = self.program(form.values)
        adapter = torch.zeros(program.layout.size)
        state: dict[str, Any] = {"adapter": adapter, "step": 0}
        if form.values.get("algorithm1"):
            state["adapter"] = CopiesState(adapter, program.config.queries)
        seed, rate = torch.tensor([SEED]), torch.tensor([1e-6])

        def step() -> None:
            scalars = seed, torch.tensor([state["step"]]), rate
            if form.values.get("algorithm1"):
                state["adapter"].step(program, ids, ids, *scalars)
            else:
                state["adapter"] = program.train_step(ids, ids, state["adapter"], *scalars)[2]
            state["step"] += 1

        return torch.inference_mode()(step)

    def seconds(self, forms: Iterable[Form], repeats: int) -> dict[Form, list[float]]:
        """Seconds of each form, in turns; forms that are compared belong in one call."""
        callables: Any = {form: self.callable(form) for form in dict.fromkeys(forms)}
        return interleaved(callables, repeats)  # type: ignore[return-value]


def weigh(form: Form) -> dict[str, Any]:
    """Growth of anonymous memory over the loaded and warm model while the form runs three times
    (bytes).

    The kernel's high-water mark of resident memory less the file pages, which the warm-up has
    mapped already, is the peak of anonymous memory, without a sampling thread that might miss it.
    """
    from ondevice.training.metrics import PeakMemory, anonymous_bytes, resident_bytes

    forms = Forms(form.model)
    forms.callable(Form(8, 1, form.values, form.inference, form.model))()
    run = forms.callable(form)
    baseline = settled(anonymous_bytes)
    peak = PeakMemory()
    for _ in range(3):
        run()
    files = resident_bytes() - anonymous_bytes()
    return {
        "growth_bytes": peak.resident_bytes() - files - baseline,
        "baseline_anonymous_bytes": baseline,
    }


def memory_child(forms: list[Form]) -> None:
    """Print `weigh` of each form, one line each; each runs in a process forked before any thread
    exists."""
    import torch

    from ondevice import methods, models  # noqa: F401  imported once for all
    from ondevice.models import tiny_model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tiny_model()
    for form in forms:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            try:
                torch.set_num_threads(threads)
                print(json.dumps(weigh(form)), flush=True)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(process, 0)[1]:
            sys.exit(f"{form} failed")


def growths(forms: list[Form], folder: Path) -> dict[Form, int]:
    """Peak growth (bytes) of every form; those measured before in this folder are not measured
    again."""
    known = recall(folder)
    missing = [form for form in forms if f"forms {form.key}" not in known]
    if missing:
        words = json.dumps([asdict(form) for form in missing])
        command = [sys.executable, "-m", "benchmarks.prge.forms", "--memory", words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
            for form, line in zip(missing, running.stdout or ()):
                known = remember(folder, f"forms {form.key}", json.loads(line))
        if running.returncode:
            sys.exit(f"memory of forms: exit code {running.returncode}")
    return {form: known[f"forms {form.key}"]["growth_bytes"] for form in forms}


if __name__ == "__main__" and sys.argv[1:2] == ["--memory"]:
    memory_child([Form(**values) for values in json.loads(sys.argv[2])])
