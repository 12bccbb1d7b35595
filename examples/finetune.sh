#!/bin/sh
# Fine-tunes a GPT-2 on prompts and completions, and lets it complete one more prompt.
#
#   examples/finetune.sh WEIGHTS DATA.jsonl OUT PROMPT [FLAGS OF TRAIN...]
#
# WEIGHTS  a directory as Hugging Face publishes: model.safetensors, config.json, and merges.txt or
#          tokenizer.json
# DATA     one example per line: {"prompt": "2 + 2 =", "completion": " 4"}
# OUT      a new directory for shards, logs (OUT/run) and the tuned weights (OUT/weights)
# PROMPT   as in DATA, to its last character: "3 + 4 ="
#
# Only the tokens of completions and the end of text count in the loss. Nothing is inserted between
# prompt and completion. GPT-2's tokens begin with their space: put it into the completion.
# A sequence is as long as the model's context. If all examples together have fewer tokens, they are
# one sequence, and an epoch is one step. Training takes three epochs unless --steps or --epochs is
# given: 40 questions need --epochs 30 or more. --max-train-steps stops it earlier. No example is
# held back for validation. A failure before the training begins leaves no OUT.
set -eu
fail() { echo "finetune.sh: $*" >&2; exit 1; }
case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "$0"; exit ;; esac
[ $# -ge 4 ] || fail "use: examples/finetune.sh WEIGHTS DATA.jsonl OUT PROMPT [FLAGS OF TRAIN...]"
weights=$1 data=$2 out=$3 prompt=$4
shift 4
here=$(dirname "$0")/..
prepare=${G2Z_PREPARE_DATA:-$here/prepare_data}
train=${G2Z_TRAIN:-$here/train}
{ [ -x "$prepare" ] && [ -x "$train" ]; } || fail "prepare_data or train is not built: type make"
[ -f "$weights/config.json" ] \
  || fail "$weights has no config.json: name a directory with weights, or type make gpt2"
[ -f "$data" ] || fail "there is no file $data"
[ ! -e "$out" ] || fail "$out is there: name a new directory, or remove it"
length=--epochs=3 batch=1 before=
for flag; do
  case $flag in
    --steps | --steps=*) length= ;; # train refuses both together
    --batch=*) batch=${flag#*=} ;;
  esac
  [ "$before" != --batch ] || batch=$flag
  before=$flag
done
case $batch in '' | *[!0-9]* | 0*) batch=1 ;; esac # train refuses it
vocab=$weights/merges.txt
[ -f "$vocab" ] || vocab=$weights/tokenizer.json
[ -f "$vocab" ] || fail "$weights has neither merges.txt nor tokenizer.json: copy the model's there"

finish() { # after a failure; if a run has begun, resuming it needs the shards
  code=$?
  [ $code != 0 ] || exit 0
  rmdir "$out/run" 2> /dev/null || [ ! -e "$out/run" ] || exit $code
  rm -f "$out"/data_train_*.bin "$out"/data_train_*.mask
  rmdir "$out" 2> /dev/null || :
  exit $code
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$prepare" --vocab "$vocab" --field prompt,completion --out "$out" \
  --name data --val-fraction 0 "$data"
# A step needs one token more than its sequences have: the target of the last token.
tokens=$(od -An -tu4 -j8 -N4 "$out/data_train_000000.bin")
context=$(sed -n 's/.*"n_positions": *\([0-9]*\).*/\1/p' "$weights/config.json")
seq=$(((tokens - 1) / batch))
[ "$seq" -lt "${context:-1024}" ] || seq=${context:-1024}
"$train" --init-from "$weights" --vocab "$vocab" --train "$out/data_train_*.bin" \
  --batch 1 --seq "$seq" ${length:+"$length"} --lr 3e-5 --run-dir "$out/run" \
  --save-weights "$out/weights" --sample-tokens 0 "$@"
echo "These commands are for ./train. To tune further: $0 $out/weights DATA.jsonl $out-2 PROMPT"
"$train" --init-from "$out/weights" --prompt "$prompt" --temperature 0 --run-dir none
