#!/bin/sh
# Trains GPT-2 124M as llm.c does: 10 billion tokens of FineWeb, 18,865 steps of 524,288 tokens.
#
#   examples/gpt2_124M.sh [--smoke] [--gpus N] OUT [FLAGS OF TRAIN...]
#
# --smoke  runs all of it with a small model and a text that it makes: on a CPU in seconds
# --gpus   1, 2, 4 or 8 GPUs of this host [1]
# OUT      a directory for downloads (OUT/data, 21 GB), checkpoints and results (OUT/run)
#
# The same command continues after a stop: whole downloads stay, and the training resumes from its
# newest checkpoint. llm.c publishes a validation loss of 3.27 to 3.29, and 29.9 % for HellaSwag
# with likelihood per token; acc_norm of hellaswag_val.jsonl counts per character (docs/formats.md).
# At the rates of docs/speed.md its 9.9 billion tokens take 4.0 hours on one H200, 2.1 on two and 34
# minutes on eight. Only --smoke was run: the downloads, the loss and the score of the training on
# GPUs were not tested.
set -euC # C: a redirection creates its file; it does not follow a link that lies there
recipe=${G2Z_RECIPE:-$0} # gpt2_124M_muon.sh sets G2Z_RECIPE to its own name
fail() { echo "$(basename "$recipe"): $*" >&2; exit 1; }
use() { fail "use: $recipe [--smoke] [--gpus 1|2|4|8] OUT [FLAGS OF TRAIN...]"; }
smoke='' gpus=1
optimizer=adamw steps=18865 rates='--lr 6e-4 --warmup 700' # llm.c's
if [ "$(basename "$recipe")" = gpt2_124M_muon.sh ]; then
  optimizer=muon steps=6200
  rates='--lr 4.5e-3 --adam-lr 3e-3 --momentum 0.95 --warmup 100 --schedule linear'
  rates="$rates --positions sines"
fi
while [ $# -gt 0 ]; do
  case $1 in
    --smoke) smoke=1 ;;
    --gpus) [ $# -gt 1 ] || use; gpus=$2; shift ;;
    -h | --help) sed -n '2,${/^#/!q;s/^# \{0,1\}//p;}' "$recipe"; exit ;;
    *) break ;;
  esac
  shift
done
case ${1:--} in -*) use ;; esac
case $gpus in 1 | 2 | 4 | 8) ;; *) use ;; esac
out=$1
shift
here=$(dirname "$0")/..
prepare=${G2Z_PREPARE_DATA:-$here/prepare_data}
train=${G2Z_TRAIN:-$here/train}
for program in "$prepare" "$train"; do
  [ -x "$program" ] || fail "$program is not built: type make"
done
command -v curl > /dev/null || fail "curl is needed: apt-get install curl"
data=$out/data run=$out/run
mkdir -p "$data"

fineweb=https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main
hellaswag=https://raw.githubusercontent.com/rowanz/hellaswag/master/data
vocab=$here/data/vocab.bpe shards=103 questions=10042
if [ "$smoke" ]; then # a small model, and a place to download from
  made=$out/made
  fineweb=file://$(cd "$out" && pwd)/made
  hellaswag=$fineweb vocab=$made/bytes.bpe shards=2 questions=3 steps=60
  if [ ! -e "$made/hellaswag_val.jsonl" ]; then
    rm -rf "$made"
    mkdir -p "$made"
    echo '#version: 0.2' > "$vocab"
    awk 'BEGIN { for (i = 0; i < 3000; i++)
                   print i % 97 " and " i % 7 " is " i % 97 + i % 7 ".\n" }' > "$made/text.txt"
    "$prepare" --vocab "$vocab" --split-docs blank --val-tokens 5000 --shard-tokens 30000 \
      --out "$made" --name fineweb "$made/text.txt"
    mv "$made/fineweb_train_000001.bin" "$made/fineweb_train_000002.bin"
    mv "$made/fineweb_train_000000.bin" "$made/fineweb_train_000001.bin"
    for i in 1 2 3; do
      echo "{\"ctx\": \"$i and 2 is\", \"endings\": [\"$((i + 2)).\", \"no.\"], \"label\": 0}"
    done > "$made/questions"
    mv "$made/questions" "$made/hellaswag_val.jsonl"
  fi
  # shellcheck disable=SC2086 # $rates is a list
  set -- --layers 2 --channels 64 --context 64 --batch 4 --global-batch 8 --steps $steps \
    $rates --warmup 7 --val-every 20 --eval-every 30 --save-every 20 --device cpu \
    --ranks "$gpus" "$@"
else
  [ -f "$vocab" ] || make -C "$here" vocab
  # shellcheck disable=SC2086 # a validation takes the first 10,485,760 tokens, as llm.c's
  set -- --batch 32 --global-batch 512 --steps $steps $rates --val-every 250 \
    --val-steps $((320 / gpus)) --eval-every 5000 --save-every 500 --gpus "$gpus" "$@"
fi
if [ -e "$run/RUN_COMPLETE.txt" ] && [ -d "$run/$(printf 'step-%06d' $steps)" ]; then
  echo "$run is complete. To train again, remove it or name another directory"
  exit 0
fi

# fetch URL NAME CHECK: downloads to $data/NAME, which exists only if CHECK accepts the file.
fetch() {
  [ ! -e "$data/$2" ] || return 0
  echo "fetching $2"
  rm -f "$data/$2.partial"
  curl -fsSL "$1/$2" > "$data/$2.partial" || fail "cannot download $1/$2: check the network"
  $3 "$data/$2.partial" || fail "$1/$2 is damaged or another file: start again to download it anew"
  mv "$data/$2.partial" "$data/$2"
}
# A shard's header: 20240520, version 1, number of tokens of two bytes each.
is_shard() {
  od -An -tu4 -N12 "$1" | {
    read -r magic version tokens
    [ "$magic $version" = "20240520 1" ] && [ "$(wc -c < "$1")" -eq $((1024 + 2 * tokens)) ]
  }
}
is_questions() { [ "$(grep -c '"endings"' "$1")" -eq $questions ]; }
fetch "$fineweb" fineweb_val_000000.bin is_shard
fetch "$hellaswag" hellaswag_val.jsonl is_questions
i=1
while [ $i -le $shards ]; do
  fetch "$fineweb" "$(printf 'fineweb_train_%06d.bin' $i)" is_shard
  i=$((i + 1))
done

[ "$optimizer" = adamw ] || set -- --optimizer "$optimizer" "$@"
if [ "$optimizer" = muon ]; then
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null \
    | head -n 1) || :
  [ ! "$smoke" ] || capability=
  case $capability in
    8.9 | 9.* | 1[0-9].*) set -- --fp8 all "$@" ;;
    *) echo "without --fp8 all: this run is not on a GPU of compute capability 8.9 or newer" ;;
  esac
fi
for checkpoint in "$run"/step-*[0-9]; do
  [ ! -d "$checkpoint" ] || resume=latest
done
"$train" --train "$data/fineweb_train_*.bin" --val "$data/fineweb_val_*.bin" --vocab "$vocab" \
  --eval "$data/hellaswag_val.jsonl" --min-lr 0 --weight-decay 0.1 --clip 1 \
  --keep 2 --run-dir "$run" ${resume:+--resume "$resume"} "$@"
