#!/bin/bash
# Runs the tests against deliberate faults (tests/mutants.h) and prints the tests that caught each.
#   tests/mutants.sh cpu|cuda [NAME...]    all mutants, or these
# A test counts only if it passes without a mutant. A mutant that no test catches is a failure. A
# mutant with types in brackets exists only in these; if G2Z_TEST_DTYPES has none of them, the
# mutant is not run. On the CPU as many jobs run at a time as it has processors, on a GPU four.
set -u
cd "$(dirname "$0")/.." || exit 1
device=${1:-cpu}
shift
case $device in cpu) column=2 jobs=$(nproc) ;; cuda) column=3 jobs=4 ;;
  *) echo "usage: tests/mutants.sh cpu|cuda [NAME...]" >&2; exit 1 ;;
esac
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work G2Z_MUTANT_DEVICE=$device OMP_WAIT_POLICY=passive
export G2Z_TEST_DTYPES=${G2Z_TEST_DTYPES-fp16}   # on a GPU one type is enough to catch a fault

# job "MUTANT TEST" writes how the test ends into a file: "passed", "caught" or "no answer".
job() {
  local mutant=${1% *} name=${1#* } code=0 out
  [[ $mutant == none ]] || export G2Z_MUTANT=$mutant
  out=$(timeout 120 ./test_gpt2 "$name" 2>&1) || code=$?
  case $code in
    0) if [[ $(tail -n 1 <<< "$out") == "1 passed"* ]]; then out=passed; else out=skipped; fi ;;
    124) out="no answer" ;;
    *) out=caught ;;
  esac
  echo "$out" > "$TMPDIR/$mutant.$name"
}
export -f job

./test_gpt2 --mutants > "$work/list" || exit 1
if (($#)); then
  grep -E "^($(IFS='|'; echo "$*")):" "$work/list" > "$work/some"
  mv "$work/some" "$work/list"
fi
absent=0
while IFS=: read -r name cpu cuda about; do
  types=${cuda%)*}
  if [[ $device == cuda && $cuda == '('* && $G2Z_TEST_DTYPES ]] &&
     ! grep -qF "$(tr '( ' '[\n*]' <<< "$types" | grep .)" <<< "$G2Z_TEST_DTYPES"; then
    printf '%-20s not applicable: exists in %s) alone\n' "$name" "$types" && ((++absent))
  else echo "$name:$cpu:${cuda##*) }:$about" >> "$work/some"; fi
done < "$work/list"
touch "$work/some" && mv "$work/some" "$work/list"
awk -F: -v c=$column '{ n = split($c, t, " "); for (i = 1; i <= n; i++) {
  if (!seen[t[i]]++) print "none " t[i] > FIRST; print $1 " " t[i] } }' FIRST="$work/first" \
  "$work/list" > "$work/jobs"
begin=$SECONDS
xargs -P "$jobs" -d '\n' -I {} bash -c 'job "{}"' < "$work/first"
bad=$(grep -L '^passed$' "$work"/none.* 2> /dev/null)
for file in $bad; do echo "without a mutant ${file##*.}: $(< "$file")"; done
xargs -P "$jobs" -d '\n' -I {} bash -c 'job "{}"' < "$work/jobs"

caught=0 alive=0
while IFS=: read -r name cpu cuda about; do
  tests=$cpu seen='' blind=''
  [[ $device == cuda ]] && tests=$cuda
  for test in $tests; do
    how=$(< "$work/$name.$test")
    if [[ $how == caught && $(< "$work/none.$test") == passed ]]; then seen+=" $test"
    else blind+=" $test ($how)"; fi
  done
  if [[ $seen ]]; then ((caught++)); else ((alive++)); fi
  printf '%-20s %-62s %s\n' "$name" "${seen:-ALIVE: $about}" \
    "${blind:+not by$blind}"
done < "$work/list"
echo "$device: $((caught + alive)) mutants, $caught caught, $alive alive," \
  "$absent not applicable, in $((SECONDS - begin)) s"
[[ $alive == 0 && -z $bad ]]
