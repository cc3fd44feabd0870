"""Makes everything that the JVM tests need: a real exported program, its run in Python, tokenised texts, encoded rows.

    python android_app/core/src/test/python/fixtures.py android_app/core/target/fixtures

It takes a few minutes, most of them for lowering the programs. An artifact that the same exporter made with the same
arguments is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[4]
sys.path.insert(0, str(HERE))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # read when the frameworks are imported

import data_files  # noqa: E402
import fleet_rounds  # noqa: E402
import golden_case  # noqa: E402
import judged  # noqa: E402
import small_tokenizers  # noqa: E402
import texts  # noqa: E402
import trained_tasks  # noqa: E402

ARTIFACT = "artifact with a space"
BLOCKS = "blocks"
WRITER = "writer"
PACKED = "packed answers"
FLEET = "fleet artifact"
TICKETS = "tickets artifact"
FORMS = ("int8", "q4", "q4dq", "8da8w", "8da4w")
"""Of a block program's rounded weights."""
SHORT_RUN = "--steps 4 --set train.checkpoint_every=2"


def main() -> None:
    """Write the folder that the first argument names."""
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_data(out)
    with ProcessPoolExecutor(2) as pool:  # lowering is work for one core
        programs, *others = (pool.submit(part, out) for part in (exported, npu, fleet, forms))
        programs.result()  # its tokenizer is one of those that follow
        for done in (pool.submit(write_tokens, out), *others):
            done.result()
    print(f"fixtures: {out}")


def exported(out: Path) -> None:
    """The programs that most tests run, their answers, and their adapters as mlx-lm keeps them."""
    take_stock_functions()
    export(out)
    for artifact, run, answers in ((ARTIFACT, "run", "answers.json"), (BLOCKS, "blocks run", "blocks answers.json")):
        write_answers(out, artifact, run, answers)
        write_mlx_lm(out, run)
    make_run(out, WRITER, "judged run", judged.RUN, judged.write_rows(out))
    scores = trained_tasks.scores(out / TICKETS, out / "blocks run" / "adapter")
    write(out / "scores.json", json.dumps(scores, ensure_ascii=False))


def write_tokens(out: Path) -> None:
    """Tokenizers, what they make of texts and of rows, and numbers."""
    small_tokenizers.write(out / "tokenizers", ROOT)
    write_texts(out)
    write_encoded(out)
    write_trained_tasks(out)
    write_numbers(out)


def take_stock_functions() -> None:
    """Python's host leaves out the functions in this project's ops, as the app's runtime has none of them."""
    from ondevice.exporters.executorch import session

    session._links_ops = lambda: False


def cli(*arguments: str) -> None:
    """`ondevice`, in this process: it has imported the frameworks already."""
    from ondevice.cli.app import run

    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            run([*arguments, "--quiet"])
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"ondevice {' '.join(arguments)}\n{told.getvalue()}")


def write_data(out: Path) -> None:
    """Reviews for SST-2: some fit the short bucket, some are cut to the long one."""
    short = [
        {"sentence": f"{word}.", "label": str(index % 2)}
        for index, word in enumerate(["bad", "fun", "dull", "great", "poor", "nice"])
    ]
    for name, source, count in (("train", "reviews_train", 17), ("valid", "reviews_valid", 9)):
        lines = (ROOT / "examples" / "data" / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        rows = [json.dumps(row) for row in short] + lines
        write(out / f"{name}.jsonl", "\n".join(rows) + "\n")


def export(out: Path) -> None:
    """A tiny Llama with two length buckets, trained with estimated gradients and, block by block, with exact ones, and
    what `ondevice run` makes of both; the latter of no task writes."""
    more = "--task sst2 --length 32 --length 64 --batch-size 2 --set export.eval_batch_size=3"
    more += " --set method.loss_tiles=2 --set export.generator=aten --set export.next_token=true"
    make_artifact(out / ARTIFACT, "android-cpu", f"--method prge --queries 4 {more}")
    make_artifact(out / BLOCKS, "android-cpu", f"--method mesp {more}")
    # The app has the stock functions only; `BLOCKS`, int8 and 8da4w also have those that it passes over.
    stock = "--set export.kernels=stock --set method.loss_tiles=2"
    writer = f"--method mesp --length 64 --batch-size 1 {stock} --set export.next_token=true"
    writer += " --set export.context_tokens=60"
    make_artifact(out / WRITER, "android-cpu", writer)
    packed = writer.replace("tokens=60", "tokens=200") + " --set export.answers=packed"
    make_artifact(out / PACKED, "android-cpu", packed)
    tickets = f"--method mesp --length 64 --batch-size 1 {stock}"
    make_artifact(out / TICKETS, "android-cpu", tickets, trained_tasks.write_rows(out))
    for artifact, run in ((ARTIFACT, "run"), (BLOCKS, "blocks run")):
        make_run(out, artifact, run, "--steps 12 --set train.checkpoint_every=5 --set train.eval_every=6")


def write_answers(out: Path, artifact: str, run: str, name: str) -> None:
    """What the program itself writes behind a prompt, token by token, before and after the run."""
    import numpy as np
    from transformers import AutoTokenizer

    from ondevice.api.open import open_artifact
    from ondevice.artifact.adapter import load_adapter

    session = open_artifact(out / artifact)
    tokenizer = AutoTokenizer.from_pretrained(str(out / artifact / "tokenizer"))
    prompt, tokens, columns, texts = "A warm film. It was", 32, max(session.lengths_tokens), []
    for folder in (None, out / run / "adapter"):
        if folder is not None:
            session.load_adapter(load_adapter(folder))
        ids, answer = tokenizer(prompt)["input_ids"], []
        for _ in range(tokens):
            row = np.full((1, columns), tokenizer.pad_token_id, dtype=np.int64)
            row[0, : len(ids)] = ids
            following = int(session.next_token(row, len(ids)).argmax())
            if following == tokenizer.eos_token_id:
                break
            answer.append(following)
            ids = [*ids, following]
        texts.append(tokenizer.decode(answer, clean_up_tokenization_spaces=False))
    write(out / name, json.dumps({"prompt": prompt, "tokens": tokens, "before": texts[0], "after": texts[1]}))


def write_mlx_lm(out: Path, run: str) -> None:
    """A run's adapter as mlx-lm keeps one."""
    from ondevice.artifact.adapter import load_adapter
    from ondevice.artifact.mlx_lm_files import save_mlx_lm_adapter

    save_mlx_lm_adapter(load_adapter(out / run / "adapter"), out / f"{run} mlx")


def fleet(out: Path) -> None:
    """A program of a fleet's method, the same step for other targets, and the rounds of a fleet of all of them."""
    take_stock_functions()
    from ondevice.exporters.android_npu import qnn

    more = "--method prge --task sst2 --queries 4 --set method.noise=rademacher --set method.subspace=random"
    more += " --length 64 --batch-size 2"
    make_artifact(out / FLEET, "android-cpu", f"{more} --set export.generator=aten")
    programs = [out / "fleet nf4"]
    make_artifact(programs[0], "jetson", f"{more} --quantize nf4")
    if qnn.problem() is None:
        programs.append(out / "fleet npu")
        make_artifact(programs[1], "android-npu", f"{more} --soc SM8650")
    (out / "fleet").mkdir(exist_ok=True)
    fleet_rounds.write(out / "fleet", out / FLEET, programs)


def forms(out: Path) -> None:
    """Block programs over rounded weights, what `ondevice run` makes of each, and the one of a golden case."""
    take_stock_functions()
    golden_case.write(out, make_artifact)
    for form in FORMS:
        more = f"--method mesp --quantize {form} --task sst2 --length 32 --batch-size 2 --set method.loss_tiles=2"
        more += " --set export.kernels=stock" if form in ("q4", "q4dq", "8da8w") else ""
        make_artifact(out / f"blocks {form}", "android-cpu", more)
        make_run(out, f"blocks {form}", f"blocks {form} run", SHORT_RUN)
    gemma(out)


def gemma(out: Path) -> None:
    """Blocks that read embeddings of the tokens for their layer, and the last three of them another's keys and values."""
    from ondevice.models import save_tiny

    folder = save_tiny(out / "gemma model", "gemma4_text", layers=5, hidden=32, heads=2, kv_heads=1)
    more = "--method mesp --task sst2 --length 32 --batch-size 2 --set method.loss_tiles=2 --set export.kernels=stock"
    make_artifact(out / "blocks gemma", "android-cpu", more, ["--model", str(folder)])
    make_run(out, "blocks gemma", "blocks gemma run", SHORT_RUN)


def npu(out: Path) -> None:
    """NPU programs and what the simulator makes of them; without the `qnn` extra, the reason why there are none."""
    take_stock_functions()
    from ondevice.exporters.android_npu import qnn

    reason = qnn.problem()
    if reason is not None:
        write(out / "npu.txt", reason)
        return
    more = "--task sst2 --soc SM8650 --queries 2 --length 64 --batch-size 1"
    make_artifact(out / "npu", "android-npu", f"--method prge {more}")
    make_run(out, "npu", "npu run", "--steps 4")
    more = "--method mesp --task sst2 --soc SM8650 --length 32 --batch-size 2 --set method.loss_tiles=2"
    make_artifact(out / "blocks npu", "android-npu", more)
    make_run(out, "blocks npu", "blocks npu run", SHORT_RUN)


def make_artifact(folder: Path, target: str, more: str, rows: list[str] | None = None) -> None:
    """Export unless the same exporter has done so with the same arguments; all at once, for tests may be running."""
    words = f"--model tiny:llama --form functional --set export.check_steps=1 {more}"
    arguments = ["export", "--target", target, "--out", str(folder), "--set", "train.seed=7", *words.split(), *(rows or [])]
    stamp, made_by = folder.with_name(folder.name + ".sha256"), hashlib.sha256(json.dumps(arguments).encode())
    for name in ("exporters", *(f"ondevice/{room}" for room in ("methods", "core", "models", "nn", "artifact"))):
        for path in sorted((ROOT / name).rglob("*.py")):
            made_by.update(path.read_bytes())
    if stamp.is_file() and stamp.read_text() == made_by.hexdigest() and (folder / "manifest.json").is_file():
        return
    cli(*arguments, "--overwrite")
    stamp.write_text(made_by.hexdigest())


def make_run(
    out: Path, artifact: str, name: str, more: str, rows: tuple[str, str] = ("train.jsonl", "valid.jsonl")
) -> None:
    """What `ondevice run` makes of an artifact and rows (the reviews), under `name` when it is whole."""
    new, old = out / f".{name}.new", out / f".{name}.old"
    data = ["--data", str(out / rows[0]), "--eval-data", str(out / rows[1])]
    cli("run", str(out / artifact), *data, "--lr", "0.01", "--out", str(new), *more.split(), "--overwrite")
    shutil.rmtree(old, ignore_errors=True)
    if (out / name).exists():
        (out / name).rename(old)
    new.rename(out / name)
    shutil.rmtree(old, ignore_errors=True)


def write(path: Path, content: str) -> None:
    """Replace a file all at once."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(content, encoding="utf-8")
    new.replace(path)


def folder_of(out: Path, name: str) -> Path:
    return out / ARTIFACT / "tokenizer" if name == "tiny" else out / "tokenizers" / name


def write_texts(out: Path) -> None:
    """A line for each text: the text, its ids without and with special tokens, and what the ids decode to."""
    from tokenizers import Tokenizer

    (out / "texts").mkdir(exist_ok=True)
    counts = {"smollm2": 10_000, "qwen2": 10_000, "llama3": 3_000, "digits": 3_000, "prefix": 2_000, "tiny": 1_000}
    for seed, (name, count) in enumerate(counts.items()):
        tokenizer = Tokenizer.from_file(str(folder_of(out, name) / "tokenizer.json"))
        specials = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        made = texts.strings(count, specials, seed, normalized=name in ("qwen2", "digits"))
        lines = []
        for text in made:
            plain = tokenizer.encode(text, add_special_tokens=False)
            row = {
                "text": text,
                "ids": plain.ids,
                "with_special": tokenizer.encode(text).ids,
                "decoded": tokenizer.decode(plain.ids, skip_special_tokens=False),
                "without_special": tokenizer.decode(plain.ids),
            }
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        write(out / "texts" / f"{name}.jsonl", "".join(lines))


def write_encoded(out: Path) -> None:
    """What `read_rows` and `encode` make of every data file, for several tokenizers and lengths."""
    from transformers import AutoTokenizer

    folder = out / "encoded"
    folder.mkdir(exist_ok=True)
    for name, content in data_files.files().items():
        (folder / f"{name}.jsonl").write_bytes(content)
    shutil.copyfile(out / "train.jsonl", folder / "reviews.jsonl")
    for name in ("tiny", "smollm2", "qwen2", "llama3", "digits"):
        tokenizer = AutoTokenizer.from_pretrained(str(folder_of(out, name)))
        for path in sorted(folder.glob("*.jsonl")):
            task = "sst2" if path.stem == "reviews" else None
            expected = [
                encoded(path, tokenizer, task, length, prompt)
                for length, prompt in ((64, False), (512, False), (48, True))
            ]
            write(folder / f"{path.stem}.{name}.json", json.dumps(expected, ensure_ascii=False))


def encoded(path: Path, tokenizer: Any, task: str | None, length: int, train_on_prompt: bool) -> dict[str, Any]:
    from ondevice.core.errors import OndeviceError
    from ondevice.data import encode, read_rows
    from ondevice.data.preview import segments

    head = {"length": length, "train_on_prompt": train_on_prompt, "task": task}
    try:
        rows = read_rows(path, task=task, allow_empty=True)
        dataset = encode(rows, tokenizer, max_length_tokens=length, train_on_prompt=train_on_prompt, allow_empty=True)
    except OndeviceError as error:
        return head | {"error": type(error).__name__}
    items = [
        {
            "ids": item.example.ids,
            "labels": item.example.labels,
            "candidates": [[c.ids, c.labels] for c in item.candidates],
            "gold": item.gold,
            "line": item.line,
            "prompt_tokens": item.prompt_tokens,
            "dropped_tokens": item.dropped_tokens,
            "segments": [[part.text, part.trained] for part in segments(item.example, tokenizer)],
        }
        for item in dataset.items
    ]
    problems = [[problem.line, problem.field] for problem in dataset.problems]
    return head | {
        "format": rows.format,
        "template": dataset.template,
        "items": items,
        "problems": problems,
        "too_long": len(dataset.too_long_tokens),
    }


def write_trained_tasks(out: Path) -> None:
    """What tables, templates and records of trained tasks are, in Python."""
    from transformers import AutoTokenizer

    names = ("tiny", "smollm2")
    tokenizers = {name: AutoTokenizer.from_pretrained(str(folder_of(out, name))) for name in names}
    write(out / "tables.json", json.dumps(trained_tasks.tables(), ensure_ascii=False))
    write(out / "templates.json", json.dumps(trained_tasks.templates(), ensure_ascii=False))
    write(out / "records.json", json.dumps(trained_tasks.records(tokenizers), ensure_ascii=False))


def write_numbers(out: Path) -> None:
    """Orders of rows, learning rates and the pairwise mean, from the Python side's own code; rows kept back, by numpy."""
    import numpy as np

    from ondevice.data import Batches, Dataset, Example, Item
    from ondevice.training.schedule import WarmupDecay

    orders = []
    for rows, batch, seed in ((1, 1, 0), (5, 2, 0), (23, 3, 7), (100, 8, 2**40 + 3), (64, 64, 2**63 - 1)):
        items = [Item(Example((1, 2), (1, 2))) for _ in range(rows)]
        batches = Batches(Dataset(items), batch, (8,), seed, 0)
        orders.append({"rows": rows, "batch": batch, "seed": seed, "at": [batches.rows_at(step) for step in range(40)]})
    rates = []
    cases: list[tuple[Any, int, int, float]] = [
        ("constant", 10, 0, 0.0),
        ("constant", 10, 4, 0.0),
        ("linear", 17, 3, 0.1),
        ("cosine", 33, 5, 0.0),
        ("cosine", 1, 0, 0.5),
    ]
    for kind, steps, warmup, final in cases:
        schedule = WarmupDecay(kind, 3e-3, steps, warmup, final)
        rates.append(
            {
                "kind": kind,
                "steps": steps,
                "warmup": warmup,
                "final": final,
                "rates": [schedule(step) for step in range(steps)],
            }
        )
    rng = np.random.default_rng(0)
    means = []
    for count in (1, 2, 7, 8, 9, 16, 31, 128, 129, 300, 512):
        values = rng.standard_normal(count).astype(np.float32)
        means.append({"values": values.tolist(), "mean": float(values.mean())})
    drawn = []
    for rows, seed in ((19, 0), (20, 7), (100, 7), (100, 8), (1000, 2**40 + 3)):
        count = 0 if rows < 20 else min(32, rows // 10)
        words = np.random.PCG64(np.random.SeedSequence((seed, 0, 1))).random_raw(rows)
        drawn.append({"rows": rows, "seed": seed, "kept": sorted(np.argsort(words, kind="stable")[:count].tolist())})
    numbers = {"orders": orders, "rates": rates, "means": means, "held_out": drawn}
    write(out / "numbers.json", json.dumps(numbers))
    write(out / "kto.json", json.dumps(judged.grades()))


if __name__ == "__main__":
    main()
