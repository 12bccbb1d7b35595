#!/usr/bin/env bash
# Measures the kit on all GPUs of a host, up to eight, in two parts of at most ten minutes each:
#     peers/eight.sh speed [OUT]    scaling, transports, buckets, ZeRO stages, Muon, the peers
#     peers/eight.sh checks [OUT]   cuda_zero, ten kills of a rank, traces against dd58b4a
# OUT [runs/eight] gets one text file per measurement, and bench's artifacts; the lines that matter
# are also printed. Build first: make, make test_gpt2. A part ends after LIMIT seconds [570] and
# prints which measurements it left out. Worlds are 1, 2, 4, ... up to the number of GPUs.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
part=${1:-} out=${2:-runs/eight} begin=$SECONDS worlds=1
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
[[ $part == speed || $part == checks ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 1; }
if ((gpus < 2)); then
  echo "peers/eight.sh: this host has $gpus GPUs; it needs 2 or more" >&2
  exit 1
fi
for ((world = 2; world <= gpus && world <= 8; world *= 2)); do worlds+=,$world most=$world; done
export OMP_WAIT_POLICY=passive
mkdir -p "$out"
nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c
git log -1 --format='commit %h' 2> /dev/null

# run NAME PATTERN COMMAND...: writes the command's output to OUT/NAME.txt and prints the lines with
# PATTERN.
run() {
  local name=$1 pattern=$2 left=$((${LIMIT:-570} - SECONDS + begin)) code=0
  shift 2
  ((left > 20)) || { echo "== $name: not run, no time left"; return; }
  timeout -k 5 "$left" "$@" > "$out/$name.txt" 2>&1 || code=$?
  echo "== $name: exit code $code, $((SECONDS - begin)) s since the start: $*"
  grep -E "$pattern" "$out/$name.txt" || tail -n 3 "$out/$name.txt"
}
bench() {
  local name=$1
  shift
  run "$name" '^ *[0-9]+ (GPU|rank)|^\|' ./bench "$@" --out "$out/$name"
}

speed() {
  local fixed=(--global-batch 16 --batch 4 --seq 512 --dtype fp16 --steps 200)
  local large=(--zero 1 --batch 32 --seq 1024 --accum 1 --dtype fp16 --steps 20 --repeats 1)
  bench fixed scaling --gpus $worlds "${fixed[@]}"
  for fp8 in none all; do
    bench large_fp8_$fp8 strategies --gpus $worlds "${large[@]}" --fp8 $fp8
  done
  bench large_muon strategies --gpus $worlds "${large[@]}" --optimizer muon
  bench small strategies --gpus $worlds --zero 1 --batch 2 --accum 2 --seq 512 --dtype fp16 \
    --steps 100
  for way in nccl copy; do
    bench fixed_$way scaling --gpus "$most" "${fixed[@]}" --repeats 1 --transport $way
    bench large_$way strategies --gpus "$most" "${large[@]}" --transport $way
  done
  bench buckets buckets --gpus "$most" --sizes 1,5,25,50,100,200,400 --batch 2 --accum 2 --seq 512 \
    --dtype fp16 --steps 40
  bench stages strategies --gpus "$most" --zero dp,0,1,2,3 --batch 8 --seq 1024 --accum 1 \
    --dtype fp16 --steps 20 --repeats 1
  local torch=(torchrun --nproc-per-node "$most" peers/torch_gpt2.py --steps 20 --warmup 5)
  for stage in '' '--deepspeed 1'; do
    run "torch_large${stage:+_deepspeed}" step_ms "${torch[@]}" --batch 32 ${stage:+--deepspeed 1}
    run "torch_small${stage:+_deepspeed}" step_ms "${torch[@]}" --batch 2 --seq 512 --accum 2 \
      ${stage:+--deepspeed 1}
  done
}

# Kills one rank at a random moment, ten times. Each time the others must end within 20 seconds with
# code 70, and the next start must resume. The eleventh start gets a signal: it must save and end
# with code 75.
kills() {
  local world=$1 here=$out/kills_$1 bad=0 turn rank at pids code
  rm -rf "$here" && mkdir -p "$here"
  python3 -c '
import array, sys
n, text = 1 << 20, b"The quick brown fox jumps over the lazy dog. "
array.array("i", [20240520, 1, n] + [0] * 253).tofile(sys.stdout.buffer)
array.array("H", list(text * (n // 45 + 1))[:n]).tofile(sys.stdout.buffer)
' > "$here/text_train_000000.bin"
  for ((turn = 0; turn <= 10; turn++)); do
    local port=$((20000 + RANDOM % 9000))
    pids=()
    for ((rank = 0; rank < world; rank++)); do
      RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$world MASTER_ADDR=127.0.0.1 \
        MASTER_PORT=$port ./train --train "$here/text_train_*.bin" --layers 4 --channels 256 \
        --heads 4 --batch 4 --seq 128 --context 128 --steps 1000000 --schedule constant \
        --save-every 20 --keep 2 --resume latest --run-dir "$here/run" \
        >> "$here/rank_$rank.log" 2>&1 &
      pids+=($!)
    done
    sleep $((8 + RANDOM % 4))
    if ((turn < 10)); then kill -9 "${pids[RANDOM % world]}"; else kill "${pids[0]}"; fi
    at=$SECONDS
    for rank in "${!pids[@]}"; do
      wait "${pids[rank]}"
      code=$?
      if ((turn < 10 ? code != 70 && code != 137 : code != 75)); then
        bad=1
        echo "turn $turn: rank $rank ended with $code"
      fi
    done
    ((SECONDS - at <= 20)) || { bad=1; echo "turn $turn: $((SECONDS - at)) s until all ended"; }
  done
  ((bad)) && echo "kills on $world GPUs: FAILED" || echo "kills on $world GPUs: passed"
}

checks() {
  export -f kills
  export out
  for ((world = most > 2 ? 4 : 2; world <= most; world *= 2)); do
    CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((world - 1)))
    export CUDA_VISIBLE_DEVICES
    run "kills_$world" '^(kills|turn)' bash -c "kills $world"
    run "traces_$world" 'OK|DIFFERS|FAILED|within|skipped' tests/traces.sh --only "^gpu$world" \
      --tolerance 3e-5 --leave-out val_loss
    run "cuda_zero_$world" '^(FAIL|[0-9]+ passed)' ./test_gpt2 cuda_zero
  done
}

$part
