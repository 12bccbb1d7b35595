#!/usr/bin/env bash
# Tests README: runs the commands of its fenced blocks in order, in an empty clone of this tree.
#     tests/readme.sh [--gpus N] [--limit S] [--make-test] [--keep] [--readme FILE --table FILE]
#
# A block without a language holds commands. A block in C is a program: it is written to main.c. A
# comment that begins with # and three spaces is output: the command above it must print such a
# line. Decimals, durations, tokens per second and the number of skipped steps (in fp16) may differ.
# `...` stands for the flags of the last training, without its --run-dir.
#
# tests/readme_table.sh has a row for each command that is not run, or not as it stands; the row's
# reason is printed. Every other command runs as it stands, and must exit with code 0 in time. A row
# that matches nothing in README fails, too.
#
#   --gpus N        use N GPUs; 0: run as on a machine without any [all that nvidia-smi finds]
#   --limit S       seconds for one command [600]
#   --make-test     run README's `make test`, which is skipped otherwise; give it time with --limit
#   --keep          keep the temporary directory of the clone, and print its name
#   --readme FILE   read the commands here [README.md]
#   --table FILE    read the rows here [tests/readme_table.sh]
#   --help          print this
#
# make fetches what VOCAB_URL, DATA_URL and GPT2_URL name in the environment, such as
# VOCAB_URL=file:/home/me/vocab.bpe. Without them, stand-ins are made from this tree's own text.
#
# Prints one line per command: ok, skip or FAIL, its seconds, the command; below that line, what the
# table changed. The last line counts the commands. Exit code 1: some failed. 2: wrong usage.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
root=$PWD

usage() { echo "readme.sh: $*: see tests/readme.sh --help" >&2; exit 2; }
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU') limit=600 make_test=0 keep=0
readme=$root/README.md table=$root/tests/readme_table.sh
while (($#)); do
  case $1 in
    --help) sed -n '2,/^set/ { /^#/ s/^# \?//p; }' tests/readme.sh; exit 0 ;;
    --make-test) make_test=1 ;;
    --keep) keep=1 ;;
    --gpus | --limit)
      [[ ${2-} =~ ^[0-9]+$ ]] || usage "$1 needs a number"
      printf -v "${1#--}" %d "$2"
      shift ;;
    --readme | --table)
      [[ -f ${2-} ]] || usage "$1 needs a file"
      printf -v "${1#--}" %s "$(realpath "$2")"
      shift ;;
    *) usage "unknown argument $1" ;;
  esac
  shift
done

# A make in the clone is not part of the make that started this script. Open MPI refuses root and
# more ranks than cores without these variables.
unset MAKEFLAGS MFLAGS MAKELEVEL
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
((gpus > 0)) || export NVCC='' CUDA_VISIBLE_DEVICES=''

work=$(mktemp -d) || exit 2
child=
finish() {
  [[ -z $child ]] || kill "$child" 2> /dev/null
  if ((keep)); then echo "kept: $work"; else rm -rf "$work"; fi
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The repository that README's first lines clone: this tree as it is, without what git ignores.
mkdir "$work/origin" "$work/home"
for entry in *; do
  grep -qxE "/$entry/?" .gitignore || cp -r "$entry" .gitignore "$work/origin/" || exit 2
done
if command -v git > /dev/null; then
  cd "$work/origin" && git init -q && git add -A || exit 2
  git -c user.name=readme -c user.email=readme@localhost -c commit.gpgsign=false \
    commit -qm "this tree" || exit 2
fi
set -f # from here on patterns are for the commands

# ----- the table ----------------------------------------------------------------------------------
# Rows apply to a command that contains PATTERN, a plain text; $ at its end is the command's end. A
# row whose WHEN is not 1 is off. The rows apply in their order.
#   skip WHEN PATTERN REASON             the command is not run
#   swap WHEN PATTERN TEXT REASON        TEXT replaces PATTERN
#   before WHEN PATTERN COMMAND REASON   COMMAND runs first
#   leaves PATTERN FILE...               these must exist afterwards
#   also WHEN PATTERN COMMAND            README's prose has PATTERN: COMMAND runs after all others
kind=() on=() pattern=() text=() reason=()
row() { kind+=("$1") on+=("$2") pattern+=("$3") text+=("$4") reason+=("$5"); }
skip() { row skip "$1" "$2" '' "$3"; }
swap() { row swap "$1" "$2" "$3" "$4"; }
before() { row before "$1" "$2" "$3" "$4"; }
leaves() { row leaves 1 "$1" "${*:2}" ''; }
also() { row also "$1" "$2" "$3" ''; }
# shellcheck source=tests/readme_table.sh
source "$table"

# ----- the commands -------------------------------------------------------------------------------

passed=0 failed=0 skipped=0
report() { # ok|skip|FAIL, the seconds it took, the command
  case $1 in ok) ((passed++)) ;; skip) ((skipped++)) ;; *) ((failed++)) ;; esac
  printf '%-4s %4d s  %s\n' "$1" "$2" "${3%%$'\n'*}"
}
note() { printf '             %s\n' "$*"; }

# Runs $1 where the last command ended, with the variables that it exported.
echo "$work/home" > "$work/where"
: > "$work/exports"
execute() {
  cd "$(< "$work/where")" || return 1
  # shellcheck disable=SC2016 # the inner shell expands these
  timeout -k 10 "$limit" bash -c 'source "$1/exports"; eval "$2"
    code=$?; pwd > "$1/where"; export -p > "$1/exports"; exit $code' readme "$work" "$1" \
    > "$work/output" 2>&1 < /dev/null &
  child=$!
  wait $child
  local code=$?
  child=
  return $code
}

# A regular expression for lines like $1, in which measured numbers differ.
form() {
  # shellcheck disable=SC2016 # $ is one of the characters that get a backslash
  sed -E 's/[0-9]+\.[0-9]+(e[-+][0-9]+)?/~N/g
          s/[0-9]+:[0-9]+|\b[0-9]+ s\b/~T/g; s,[0-9]+ tok/s,~R tok/s,g
          s/[][\.|*^$(){}?+]/\\&/g
          s/~N/-?[0-9][0-9.e+-]*/g; s/~T/([0-9:]+|[0-9]+ s)/g; s/~R/[0-9]+/g
          s/ steps,/ steps( \\([0-9]+ skipped\\))?,/
          s/.*/^&( |$)/' <<< "$1"
}

arguments=   # of README's last training
perform() { # $1: a command, $2: the lines that README shows below it
  local command=$1\$ first='' notes=() wrong='' files='' begin=$SECONDS code file line i
  : > "$work/output"
  for i in "${!kind[@]}"; do
    [[ $1\$ == *"${pattern[i]}"* && ${on[i]} == 1 ]] || continue
    case ${kind[i]} in
      skip) report skip 0 "$1"; note "${reason[i]}"; return ;;
      swap) command=${command//"${pattern[i]}"/"${text[i]}"}
            notes+=("${pattern[i]} -> ${text[i]%%$'\n'*}: ${reason[i]}") ;;
      before) first+=${text[i]}$'\n' notes+=("first ${text[i]%%$'\n'*}: ${reason[i]}") ;;
      leaves) files+=" ${text[i]}" ;;
    esac
  done
  command=${command%\$}
  if [[ $command == './train --train '* ]]; then
    arguments=$(sed -E 's/^[^ ]* //; s/ --run-dir [^ ]*//' <<< "$command")
  elif [[ $command == *./train*' ...'* ]]; then
    command=${command//' ...'/" ${arguments:-<the flags of a training above>}"}
  fi
  if [[ $command != *$'\n'* && $command =~ \<[a-z][a-z\ ]*\> ]]; then
    wrong="nothing stands for ${BASH_REMATCH[0]}"
  elif [[ $first ]] && ! execute "set -e; $first"; then
    wrong="the command before it failed"
  else
    execute "$command"
    code=$?
    case $code in
      0) ;;
      124 | 137) wrong="stopped: not done in $limit s" ;;
      *) wrong="exit code $code" ;;
    esac
  fi
  while [[ -z $wrong ]] && IFS= read -r line; do
    [[ -z $line ]] || grep -qE "$(form "$line")" "$work/output" || wrong="no line like: $line"
  done <<< "$2"
  for file in $files; do
    [[ $wrong ]] || compgen -G "$(< "$work/where")/$file" > /dev/null || wrong="there is no $file"
  done
  report "$([[ $wrong ]] && echo FAIL || echo ok)" $((SECONDS - begin)) "$1"
  [[ ${#notes[@]} == 0 ]] || for line in "${notes[@]}"; do note "$line"; done
  [[ $wrong ]] || return
  note "FAIL: $wrong"
  tail -n 12 "$work/output" | cut -c 1-200 | sed 's/^/           | /'
}

# Reads README: a command in commands[i], its output in shown[i].
commands=() shown=() block='' joined=''
fence='^```(.*)$'
while IFS= read -r line; do
  if [[ $line =~ $fence ]]; then
    language=${BASH_REMATCH[1]}
    case $block-$language in
      -) block=commands ;;
      -c) block=c joined='' ;;
      commands- | other-) block='' ;;
      c-) shown+=('') commands+=("cat > main.c << 'END_OF_MAIN'"$'\n'"${joined}END_OF_MAIN")
          block='' joined='' ;;
      *) block=other
         report FAIL 0 "$line"
         note "this block is neither commands nor C" ;;
    esac
  elif [[ $block == c ]]; then joined+=$line$'\n'
  elif [[ $block == commands ]]; then
    if [[ $line =~ ^\ *#\ \ \ (.*) && ${#commands[@]} -gt 0 ]]; then
      shown[-1]+=${BASH_REMATCH[1]}$'\n'
      continue
    fi
    joined+=$(sed -E 's/(^| +)# .*//; s/^ +/ /; s/ +(\\?)$/\1/' <<< "$line")
    case $joined in
      *\\) joined=${joined%\\} ;;
      ?*) commands+=("$joined") shown+=('') joined='' ;;
    esac
  fi
done < "$readme"
[[ -z $block ]] || { report FAIL 0 '```'; note "README ends within a block"; }

for i in "${!kind[@]}"; do
  within=$(printf '%s$\n' "${commands[@]}")
  [[ ${kind[i]} == also ]] && within=$(< "$readme")
  [[ $within == *"${pattern[i]}"* ]] && continue
  report FAIL 0 "${kind[i]} '${pattern[i]}'"
  note "README has no such line: change or remove this row of ${table##*/}"
done
for i in "${!commands[@]}"; do perform "${commands[i]}" "${shown[i]}"; done
for i in "${!kind[@]}"; do
  [[ ${kind[i]} != also || ${on[i]} != 1 ]] || perform "${text[i]}" ''
done
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
