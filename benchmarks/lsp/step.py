"""Steps of LSP-Offload, of the same engine with whole gradients, and without offload, over a real
and a slow bus.

    python -m benchmarks.lsp.step --shapes GPT2-774M --batches 1,4,16 --buses 0,15 --out FILE

A value is the wall time from one step's end to the next one's. `native` is AdamW on the GPU:
bfloat16 weights, float32 masters and moments. `zero` is ZeRO-Offload's schedule (Algorithm 1),
`zero-layerwise` Algorithm 3 with whole gradients. Variants that fit next to each other take turns.
Weights and tokens are random; every token is labelled.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import add_arguments, finish, median, parse_args, write_result
from benchmarks.offload import model as om
from benchmarks.offload.live import Live, Lsp, Running, merge, reason, short
from ondevice.methods.lsp.config import LspConfig

NEEDS = ("cuda",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = "resident_adamw"
COLUMNS = [
    {"key": "shape", "title": "Shape"},
    {"key": "bus", "title": "Bus (GB/s)"},
    {"key": "batch", "title": "Batch"},
    {"key": "variant", "title": "Variant"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "of_native", "title": "Of native", "digits": 3},
    {"key": "times_zero", "title": "Times Zero", "digits": 2},
    {"key": "bus_bytes", "title": "Bus, both ways (MB)", "scale": 1e-6, "digits": 1},
    {"key": "of_zero_bytes", "title": "Of Zero's bytes", "digits": 4},
    {"key": "projector_bytes", "title": "Projectors (MB)", "scale": 1e-6, "digits": 1},
    {"key": "refresh_share", "title": "Refresh, of the time", "digits": 4},
    {"key": "gpu_peak_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "host_bytes", "title": "Host (GB)", "scale": 1e-9, "digits": 2},
    {"key": "error", "title": "Not run"},
]
NOTES = [
    "Bus 0 is the machine's own; another number is simulated: no direction moves more.",
    "`lsp s512 d8`: subspace 512, 8 nonzeros a row. Refresh: seconds that a step with a look at all matrices and new "
    "projectors for all takes more than others, over 1,000 steps. GPU peak is of what the variant itself holds.",
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="GPT2-774M", help=", ".join(om.SHAPES))
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--buses", default="0,15", help="GB/s in each direction; 0: as it is")
    parser.add_argument(
        "--projectors", default="512:8", help="subspace:nonzeros, separated by commas"
    )
    parser.add_argument("--variants", default="native,zero,zero-layerwise,lsp")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of LspConfig"
    )
    add_arguments(parser, "--rounds")
    parser.add_argument(
        "--host-gib", type=float, default=120.0, help="host memory that variants may take together"
    )
    parser.add_argument(
        "--gpu-gib", type=float, help="GPU memory that variants may take together; None: 0.9 of it"
    )
    parser.add_argument(
        "--budget-s", type=float, default=1e9, help="begin nothing new so long after the start"
    )


class Bench(Running):
    """All rows of a run; the file is written after each."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        LspConfig(**self.options)
        self.first: dict[str, float] = {}
        self.looked: dict[str, float] = {}
        self.refresh_s: dict[str, float] = {}

    def names(self) -> list[str]:
        """Variants; `lsp` once for each pair of projectors, after all others."""
        pairs = [pair.split(":") for pair in self.args.projectors.split(",")]
        names = self.args.variants.split(",")
        return [n for n in names if n != "lsp"] + [
            f"lsp s{s} d{d}" for s, d in pairs if "lsp" in names
        ]

    def shape(self, shape: str, bus: float) -> None:
        """Groups of variants that fit next to each other; the first of them is in every group."""
        block, waiting, batches = (
            om.random_block(shape, self.args.device),
            self.names(),
            self._batches(),
        )
        self.data = om.Batches(om.shape_dims(shape)[0].vocab, self.args.length)
        live: dict[str, Live] = {}
        try:
            while waiting:
                gpu, host = self._room()
                for name in [n for n in live if n != "native"]:
                    self.close(live.pop(name))
                while waiting:
                    need_gpu, need_host = self._need(waiting[0], shape, live)
                    gpu, host = gpu - need_gpu, host - need_host
                    if (gpu < 0 or host < 0) and any(n != "native" for n in live):
                        break
                    self._build(live, waiting.pop(0), shape, bus, block)
                for rows in batches:
                    self._measure(live, shape, bus, rows)
        finally:
            for name in list(live):
                self.close(live.pop(name))

    def _batches(self) -> list[int]:
        return [int(word) for word in self.args.batches.split(",")]

    def _room(self) -> tuple[float, float]:
        if self.args.device == "cpu":
            return 1e12, 1e12
        whole = torch.cuda.get_device_properties(0).total_memory
        return (
            self.args.gpu_gib * 2**30 if self.args.gpu_gib else 0.9 * whole,
            self.args.host_gib * 2**30,
        )

    def _need(self, name: str, shape: str, live: dict[str, Live]) -> tuple[float, float]:
        """Bytes on the GPU and on the host, roughly."""
        count = om.shape_dims(shape)[0].parameters
        beside = 14.5 * count if "native" in live else 0
        return beside + {"native": 14.5, "zero": 2.8, "zero-layerwise": 2.8}.get(
            name, 3.0
        ) * count, 14.5 * count * (name.startswith("zero"))

    def _build(
        self, live: dict[str, Live], name: str, shape: str, bus: float, block: torch.Tensor
    ) -> None:
        kind, options = NATIVE if name == "native" else name, dict(self.options)
        if name.startswith("lsp"):
            size, nonzeros = (word[1:] for word in name.split()[1:])
            options |= {"subspace": int(size), "nonzeros": int(nonzeros)}
        if bus and name != "native":
            options["bus_limit_gb_per_s"] = bus
        try:
            if self.late():
                raise TimeoutError("not run: out of time")
            live[name] = Live(kind, self.args, shape, block, options)
            self.say(f"{shape} {name}: built in {live[name].build_s:.1f} s")
            self.first[name] = live[name].run(self.data, self._batches()[0], 0, 1)["step_s"][0]
            if name.startswith("lsp"):
                self.looked[name] = self._look(live[name])
        except Exception as error:
            live.pop(name, None)
            for rows in self._batches():
                self._add(
                    {
                        "shape": shape,
                        "bus": bus,
                        "batch": rows,
                        "variant": name,
                        "error": reason(error),
                    }
                )
            om.release(self.args.device)

    def _look(self, one: Live) -> float:
        """Seconds of a step with a look at all matrices, and new projectors for all, after the
        first such step."""
        one.variant.number = one.variant.engine.config.check_every
        return one.run(self.data, self._batches()[0], 0, 1)["step_s"][0]

    def _measure(self, live: dict[str, Live], shape: str, bus: float, rows: int) -> None:
        outcomes: dict[str, dict[str, Any]] = {}
        errors: dict[str, str] = {}
        for number in range(self.args.rounds):
            share = self.args.repeats // self.args.rounds + (
                number < self.args.repeats % self.args.rounds
            )
            for name in reversed(list(live)) if number % 2 else list(live):
                if name in errors or self.late():
                    continue
                try:
                    merge(outcomes, name, live[name].run(self.data, rows, 2, share))
                except Exception as error:
                    errors[name] = reason(error)
        for name, one in live.items():
            row = {"shape": shape, "bus": bus, "batch": rows, "variant": name}
            if name == "native" and any(row.items() <= other.items() for other in self.rows):
                continue
            row |= self._row(one, row, outcomes) if name in outcomes else {}
            if name in errors or name not in outcomes:
                row["error"] = errors.get(name, "not run: out of time")
            self._add(row)

    def _row(
        self, one: Live, at: dict[str, Any], actual: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        name, shape, rows = at["variant"], at["shape"], at["batch"]
        seen, tokens = actual[name], rows * self.args.length
        step_s, count = median(seen["step_s"]), om.shape_dims(shape)[0].parameters
        native, zero = actual.get("native"), actual.get("zero")
        if zero is None:  # it ran in an earlier group: its own machine, its own minutes
            wanted = {**at, "variant": "zero"}.items()
            zero = next((other for other in reversed(self.rows) if wanted <= other.items()), None)
        row: dict[str, Any] = {
            **seen, "parameters": count, "tokens_per_s": tokens / step_s, "length": self.args.length,
            "tflops": 8.0 * count * tokens / step_s / 1e12, "host_rss_peak_bytes": one.host_peak,
            "of_native": median(native["step_s"]) / step_s if native else None,
            "times_zero": median(zero["step_s"]) / step_s if zero and "step_s" in zero else None,
        }  # fmt: skip
        if not isinstance(one.variant, Lsp):
            return row
        engine = one.variant.engine
        if engine.overlap is not None:
            row |= engine.overlap.to_dict()
            row["bus_bytes"] = row["h2d_bytes"] + row["d2h_bytes"]
        row |= {"host_bytes": engine.host_bytes}
        row["of_zero_bytes"] = row.get("bus_bytes", 0) / (4 * count)
        if name.startswith("lsp"):
            pairs = [
                side
                for part in engine.parts
                for _, m, _ in part.matrices
                for side in (m.left, m.right)
            ]
            looks = engine.bias_checks.values()
            row |= {
                "projector_bytes": sum(side.bytes for side in pairs), "first_step_s": self.first[name],
                "bias_before": median([look.before for look in looks]) if looks else None,
                "bias_after": median([look.after for look in looks if look.after is not None] or [0.0]),
            }  # fmt: skip
            if rows == self._batches()[0]:
                self.refresh_s[name] = max(0.0, self.looked[name] - step_s)
            refresh_s = self.refresh_s.get(name)  # None if the first batch did not run
            if refresh_s is not None:
                row |= {
                    "refresh_s": refresh_s,
                    "refresh_share": refresh_s / (1000 * step_s + refresh_s),
                }
        return row

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.args.out:
            write_result("lsp/step", self.rows, self.args.out, COLUMNS)
        shown = ("step_s", "tokens_per_s", "of_native", "times_zero", "bus_bytes", "of_zero_bytes", "refresh_s",
                 "refresh_share", "bias_after", "gpu_peak_bytes", "host_bytes", "bound", "idle_s",
                 "segments_constant", "error")  # fmt: skip
        self.say(
            row["shape"],
            row["bus"],
            row["batch"],
            row["variant"],
            {k: short(row[k]) for k in shown if row.get(k)},
        )


def main() -> None:
    args = parse_args(__doc__, arguments)
    bench = Bench(args)
    for shape in args.shapes.split(","):
        for bus in (float(word) for word in args.buses.split(",")):
            try:
                bench.shape(shape, bus)
            except Exception as error:
                bench._add(
                    {
                        "shape": shape,
                        "bus": bus,
                        "batch": None,
                        "variant": None,
                        "error": reason(error),
                    }
                )
            om.release(args.device)
    finish(
        "lsp/step", bench.rows, args, COLUMNS, title="LSP-Offload: steps per variant", notes=NOTES
    )


if __name__ == "__main__":
    main()
