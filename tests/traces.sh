#!/usr/bin/env bash
# Trains with two versions of this tree on the same tokens and compares them step by step.
#     tests/traces.sh [--base COMMIT | --base-dir DIR] [--only PATTERN] [--tolerance X]
#                     [--leave-out FIELDS] [--speed]
# The base is a commit, the candidate is the working tree. Both are built in build/traces, which
# keeps a build until its sources change; `rm -r build/traces` starts afresh.
#
# These must be equal: loss, gradient norm and loss scale of every step, validation losses, and the
# numbers of the final weights, byte by byte. metrics.jsonl prints floats with nine significant
# digits, which distinguish any two floats: equal digits are equal bits. File formats may differ
# between the versions: each version resumes from its own checkpoint and tuning file.
#
#   --base COMMIT       the version to compare with [71b7ea1]
#   --base-dir DIR      the base's sources, unpacked: for a machine without this repository
#   --only PATTERN      only configs whose name matches this regular expression
#   --tolerance X       accept configs of several ranks whose losses differ by up to X, relative
#   --changed PATTERN   --tolerance also holds for configs of one rank that match: for sums in
#                       another order, and for *-tuned, if the versions chose other algorithms
#   --leave-out FIELDS  do not compare these fields of metrics.jsonl, with commas between them, as
#                       in --leave-out val_loss: for fields that a version changes on purpose
#   --speed             time larger models on GPUs instead: the versions alternate; medians of steps
#   --list              print the configs
#   --help              print this
#
# Prints one line per config: OK, with the weights' sha256; within: --tolerance accepts it; DIFFERS;
# FAILED; skipped: too few GPUs, or the base has no such flag. The exit code is 0 if a config is OK
# or within, and none differs or fails.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

work=build/traces runs=build/traces/runs
data="--train $work/data/text_train_*.bin --vocab $work/data/text.bpe --tensorboard off"
data="$data --sample-tokens 0"
tiny="$data --val $work/data/text_val_*.bin --val-every 10 --max-val-steps 2"
tiny="$tiny --layers 3 --steps 20 --lr 2e-3 --min-lr 2e-4"
turns=3 warm_up=10   # --speed: turns per version; ignored first steps of a turn
limit_s=300          # for one training

# load LIST COMMON reads names and flags; if a flag comes twice, the later one counts.
declare -A flags list
load() {
  local name rest
  while read -r name rest; do list[$1]+=" $name" flags[$name]="$2 $rest"; done
}

# A name begins with the device and the number of ranks. @NAME is the same program's run directory
# of that config. The vocabulary of 1000 is not a multiple of 128, so it gets padding.
load compare "$tiny --channels 64 --heads 4 --context 64 --batch 2" << 'END'
cpu1-plain          --batch 4
cpu1-accum          --accum 3 --dropout 0.1 --recompute block --schedule linear
cpu1-bf16           --dtype bf16 --accum 2 --grad-dtype fp32 --seq 48
cpu1-fp16           --dtype fp16 --schedule wsd
cpu1-sample         --sample-tokens 8 --sample-every 5 --temperature 0.5 --clip 0
cpu2-overflow       --dtype fp16 --loss-scale-window 1 --zero 2
cpu2-zero0          --zero 0 --accum 2 --bucket-mb 0.05
cpu3-zero1          --zero 1 --accum 2 --bucket-mb 0.05 --dropout 0.1
cpu4-zero2          --zero 2 --accum 2 --bucket-mb 0.05 --dropout 0.1
cpu2-zero3          --zero 3 --accum 2 --bucket-mb 0.05 --recompute block
cpu3-dp             --strategy dp --accum 2 --bucket-mb 0.05
cpu2-zero2-bf16     --zero 2 --dtype bf16 --grad-dtype fp32 --bucket-mb 0.1
cpu4-zero3-fp16     --zero 3 --dtype fp16 --dropout 0.1 --bucket-mb 0.02
cpu2-saves          --zero 2 --batch 3 --save-every 10
cpu2-resume         --zero 2 --batch 3 --resume @cpu2-saves/step-000010
cpu3-resume         --zero 3 --dtype bf16 --resume @cpu2-saves/step-000010
cpu1-init-from      --init-from @cpu2-saves/weights
cpu1-fp8-logits     --dtype fp16 --fp8 logits --accum 2 --grad-dtype fp32
cpu1-fp8-forward    --dtype fp16 --fp8 forward --dropout 0.1
cpu1-fp8-all        --dtype fp16 --fp8 all --recompute block
cpu2-fp8-all        --dtype fp16 --fp8 all --zero 2 --accum 2 --grad-dtype fp32 --bucket-mb 0.05
cpu1-muon           --optimizer muon --dropout 0.1 --accum 2 --save-every 10
cpu2-muon-resume    --optimizer muon --zero 3 --bucket-mb 0.02 --resume @cpu1-muon/step-000010
cpu3-muon-zero1     --optimizer muon --zero 1 --dtype fp16 --bucket-mb 0.05
cpu2-muon-dp        --optimizer muon --strategy dp --skip-spikes 1
END
gpu="$tiny --channels 128 --heads 2 --context 128 --batch 4 --dtype fp16"
load compare "$gpu --tune off" << 'END'
gpu1-saves          --graph on --save-every 10
gpu1-fp32           --dtype fp32 --graph off --accum 2 --dropout 0.1 --recompute block
gpu1-bf16           --dtype bf16 --graph on --accum 2 --grad-dtype fp32
gpu1-tf32           --dtype tf32 --graph on
gpu1-chunks         --graph on --vocab-size 50257 --context 1024 --batch 16
gpu1-tuned          --graph on --tune on --tuning @gpu1-table/tuning.txt
gpu2-zero0-nccl     --zero 0 --transport nccl --graph on --bucket-mb 0.2
gpu2-zero1-nccl     --zero 1 --transport nccl --graph on --dtype bf16
gpu2-zero1-copy     --zero 1 --transport copy --graph off --accum 2 --grad-dtype fp32 --bucket-mb 0.2
gpu2-zero2-nccl     --zero 2 --transport nccl --graph off --accum 2 --grad-dtype fp32 --bucket-mb 0.2
gpu2-zero2-copy     --zero 2 --transport copy --graph on --dropout 0.1
gpu2-zero3-nccl     --zero 3 --transport nccl --graph on --recompute block --dtype tf32
gpu2-zero3-copy     --zero 3 --transport copy --graph on --accum 2 --grad-dtype fp32
gpu4-zero1-copy     --zero 1 --transport copy --graph on --accum 2 --grad-dtype fp32 --bucket-mb 0.2
gpu4-zero3-nccl     --zero 3 --transport nccl --graph on --recompute block
gpu8-zero1-copy     --zero 1 --transport copy --graph on --accum 2 --grad-dtype fp32 --bucket-mb 0.2
gpu8-zero2-nccl     --zero 2 --transport nccl --graph on --dropout 0.1
gpu2-dp             --strategy dp --transport nccl --graph off --bucket-mb 0.2
gpu2-wte            --zero 1 --graph on --vocab-size 50257 --channels 256 --heads 4
gpu2-resume         --zero 3 --graph on --batch 2 --resume @gpu1-saves/step-000010
gpu2-tuned          --zero 1 --graph on --tune on --tuning @gpu2-table/tuning.txt
gpu1-fp8-logits     --fp8 logits --batch 16 --graph on
gpu1-fp8-forward    --fp8 forward --batch 16 --graph on --accum 2 --grad-dtype fp32
gpu1-fp8-all        --fp8 all --batch 16 --graph off --dropout 0.1
gpu1-fp8-recompute  --fp8 all --batch 16 --graph on --recompute block
gpu2-fp8-all        --fp8 all --batch 16 --zero 2 --transport nccl --graph on --bucket-mb 0.2
gpu1-muon           --optimizer muon --graph on --accum 2
gpu2-muon-nccl      --optimizer muon --zero 2 --transport nccl --graph on --bucket-mb 0.2
gpu2-muon-copy      --optimizer muon --zero 1 --transport copy --graph off --dtype bf16
END
# These choose algorithms by timing. They are not compared: each version runs them to make its own
# tuning table.
load tables "$gpu" << 'END'
gpu1-table          --graph on
gpu2-table          --graph on --zero 1
END
load speed "$data --model gpt2 --vocab-size 50257 --dtype fp16" << 'END'
gpu1-32x1024        --batch 32 --steps 40
gpu1-64x1024        --batch 64 --steps 30
gpu1-4x512-accum4   --batch 4 --seq 512 --accum 4 --steps 90
gpu1-2x512          --batch 2 --seq 512 --steps 310
gpu2-32x1024        --batch 32 --steps 40
gpu2-8x512          --batch 8 --seq 512 --steps 160
END

die() { echo "traces.sh: $*" >&2; exit 1; }
runs_here() { [[ $1 == cpu* || ${1:3:1} -le $gpus ]]; }

# The programs' sources as a tar file that depends only on their contents.
sources() {
  (cd "$1" && shopt -s nullglob && tar -c --mtime=@0 --owner=0 --group=0 --mode=u=rw,go=r \
    --exclude='test_*' --exclude='bench*' Makefile ./*.[ch] ./*.cu ./*.cuh extras/*.[ch])
}

# build SIDE builds the tar file on standard input.
build() {
  local tree=$work/$1
  mkdir -p "$work" && cat > "$tree.tar.new" || return 1
  cmp -s "$tree.tar.new" "$tree.tar" && return
  rm -rf "$tree" "$tree.tar"
  mkdir -p "$tree" && tar -xf "$tree.tar.new" -C "$tree" || return 1
  echo "building $tree" >&2
  make -C "$tree" COMMIT= train prepare_data > "$tree.log" 2>&1 && mv "$tree.tar.new" "$tree.tar"
}

build_both() {
  local commit=${option[base]} dir=${option[base-dir]} words=1000
  [[ -z $dir || -f $dir/Makefile ]] || die "$dir holds no sources: it has no Makefile"
  if [[ -n $dir ]]; then
    sources "$dir" | build base &
  elif git rev-parse -q --verify "$commit^{commit}" > /dev/null 2>&1; then
    git archive "$commit" | build base &
  else
    die "commit $commit is not here: unpack its sources and give --base-dir DIR"
  fi
  sources . | build candidate || die "the candidate does not build: see $work/candidate.log"
  wait "$!" || die "the base does not build: see $work/base.log"
  rm -rf "$work/data" "$runs"
  [[ $mode == speed ]] && words=10000
  "$work/base/prepare_data" --train-bpe "$words" --out "$work/data" --name text --val-fraction 0.1 \
    "$work"/base/{gpt2_zero.h,gpt2_zero_kernels.cuh,train.cu,prepare_data.c} \
    > "$work/data.log" 2>&1 || die "the base makes no shards: see $work/data.log"
}

# train SIDE NAME leaves the run directory runs/SIDE/NAME, and next to it its output NAME.txt.
train() {
  local program=$work/$1/train run=$runs/$1/$2 device=${2:0:3} ranks=${2:3:1} words needed
  local text="${flags[$2]} --device ${device/gpu/cuda} --run-dir $run"
  ((ranks > 1)) && text+=" --ranks $ranks"
  [[ $mode == compare ]] && text+=" --save-weights $run/weights"
  if [[ $text =~ @([a-z0-9-]+) ]]; then
    needed=${BASH_REMATCH[1]}
    [[ -d $runs/$1/$needed ]] || train "$1" "$needed" \
      || { mkdir -p "${run%/*}" && cp "$runs/$1/$needed.txt" "$run.txt"; return 1; }
    text=${text//@/$runs/$1/}
  fi
  read -ra words <<< "$text"
  rm -rf "$run" && mkdir -p "$run"
  timeout "$limit_s" "$program" "${words[@]}" > "$run.txt" 2>&1 < /dev/null
}

# field(KEY) is a value in a line of metrics.jsonl, as printed there.
# shellcheck disable=SC2016
field='function field(key,  text) {
  if (!match($0, "\"" key "\": *[^,}]*")) return "-"
  text = substr($0, RSTART, RLENGTH); sub(/^[^:]*: */, "", text); return text }'

# The sha256 of a safetensors file's numbers. Its header may have different notes.
weights_sum() {
  local header
  header=$(od -An -t u8 -N 8 "$1") && tail -c +$((header + 9)) "$1" | sha256sum | cut -c 1-64
}

# judge NAME prints a verdict and its reason.
judge() {
  local tolerance=-1 side sums='' reason
  for side in base candidate; do
    train "$side" "$1" && continue
    reason="$runs/$side/$1.txt: $(tail -n 1 "$runs/$side/$1.txt")"
    if [[ $side == base && $reason == *' flag --'* ]] && train candidate "$1"; then
      echo "skipped the base lacks a flag, $reason"
    else
      echo "FAILED the $side, $reason"
    fi
    return
  done
  if [[ $1 != ?pu1-* || $1 =~ ${option[changed]} ]]; then tolerance=${option[tolerance]}; fi
  for side in base candidate; do
    sums+="$(weights_sum "$runs/$side/$1/weights/model.safetensors") "
  done
  awk -v tolerance="$tolerance" -v sums="$sums" -v out=",${option[leave-out]}," "$field"'
    function kept(key) { return index(out, "," key ",") ? "-" : field(key) }
    function off(a, b) {   # relative; infinite between null and a number
      if (a == b) return 0
      if (a !~ /[0-9]/ || b !~ /[0-9]/ || a + 0 == 0) return 9e99
      return (a > b ? a - b : b - a) / (a < 0 ? -a : a) }
    !/"(val_)?loss"/ { next }
    { line = field("step") " " kept("loss") " " kept("val_loss")
      line = line " " kept("grad_norm") " " kept("loss_scale") }
    FILENAME == ARGV[1] { base[++count] = line; next }
    line != base[++lines] {
      split(base[lines], was); split(line, is)
      if (!first) first = is[1]
      for (i = 1; i <= 3; i++) if (off(was[i], is[i]) > worst) worst = off(was[i], is[i]) }
    END {
      split(sums, sum); shown = worst < 9e99 ? worst + 0 : "infinity"
      if (!count || length(sum[1]) != 64) print "FAILED the base leaves no losses or no weights"
      else if (lines != count) print "DIFFERS", lines + 0, "losses; the base has", count
      else if (!first && sum[1] == sum[2]) print "OK", count, "losses, weights", substr(sums, 1, 8)
      else print (worst <= tolerance ? "within" : "DIFFERS"), "losses by", shown ",", \
        (first ? "first at step " first : "only the weights") }' \
    "$runs"/{base,candidate}/"$1"/metrics.jsonl
}

compare() {
  local name verdict reason i=0 selected=() line
  local -A count=([OK]=0 [within]=0 [DIFFERS]=0 [FAILED]=0 [skipped]=0)
  for name in ${list[compare]}; do [[ $name =~ ${option[only]} ]] && selected+=("$name"); done
  for name in "${selected[@]}"; do
    echo "[$((++i))/${#selected[@]}] $name" >&2
    if runs_here "$name"; then line=$(judge "$name"); else line="skipped $gpus GPUs here"; fi
    read -r verdict reason <<< "${line:-FAILED no verdict}"
    count[$verdict]=$((count[$verdict] + 1))
    printf '%-20s %-8s %s\n' "$name" "$verdict" "$reason"
  done
  echo "${count[OK]} equal, ${count[within]} within the tolerance, ${count[DIFFERS]} differ," \
    "${count[FAILED]} failed, ${count[skipped]} skipped"
  ((count[OK] + count[within] > 0 && count[DIFFERS] + count[FAILED] == 0))
}

speed() {
  local name side turn
  printf '%-20s %10s %13s %7s\n' config 'base ms' 'candidate ms' ratio
  for name in ${list[speed]}; do
    [[ $name =~ ${option[only]} ]] || continue
    runs_here "$name" || { printf '%-20s skipped: %s GPUs here\n' "$name" "$gpus" && continue; }
    for ((turn = 1; turn <= turns; turn++)); do
      for side in base candidate; do
        echo "[$turn/$turns] $name, $side" >&2
        train "$side" "$name" || die "the $side fails: see $runs/$side/$name.txt"
        awk "$field"' /"step_ms"/ && field("step") > '"$warm_up"' { print field("step_ms") }' \
          "$runs/$side/$name/metrics.jsonl" >> "$runs/$side/$name.ms"
      done
    done
    paste <(sort -g "$runs/base/$name.ms") <(sort -g "$runs/candidate/$name.ms") \
      | awk -v name="$name" '{ base[NR] = $1; ms[NR] = $2 }
          END { m = int((NR + 1) / 2)
                printf "%-20s %10.3f %13.3f %7.4f\n", name, base[m], ms[m], ms[m] / base[m] }'
  done
}

declare -A option=([base]=71b7ea1 [base-dir]='' [only]=. [tolerance]=-1 [changed]='^$')
option[leave-out]=
mode=compare
while [[ $# -gt 0 ]]; do
  case $1 in
    --base | --base-dir | --only | --tolerance | --changed | --leave-out)
      [[ $# -gt 1 ]] || die "$1 needs a value: see --help"
      option[${1#--}]=$2
      shift ;;
    --speed) mode=speed ;;
    --list) sed -n '/^load [a-z]* "/,/^END/p' "$0" | grep -v ^END; exit ;;
    --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
    *) die "$1 is no flag: see --help" ;;
  esac
  shift
done
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
# Waiting threads sleep, since other work may need their core.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-passive}

build_both
$mode
