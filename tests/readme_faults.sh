#!/usr/bin/env bash
# Tests tests/readme.sh: runs it on a small README without a fault, and then with one fault at a
# time, which it must notice. Prints a line per fault. Exit code 1: a fault was not noticed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

cat > "$work/README" << 'END'
```
git clone <this repository> copy && cd copy                # a copy
export WORD=hello
echo "$WORD 12 | loss 1.25 | 3:20 | 44 s | 7 tok/s" > said && \
  cat said     # prints what was said
               #   hello 12 | loss 8.5 | 59 s | 9 s | 99 tok/s
./train --train 'a b' --run-dir one
./train ... --run-dir two
no-such-program
```
```c
int main(void) { return 1; }
```
```
grep -q 'return 0' main.c
```
It also names `pwd`.
END
cat > "$work/table" << 'END'
swap 1 '<this repository>' "$work/origin" 'a copy'
leaves 'git clone' Makefile 'README*'
before 1 './train --train' 'printf "#!/bin/sh\necho \"\$*\" > said\n" > train; chmod +x *' 'fake'
skip 1 'no-such-program' 'it is not here'
swap 1 'return 1' 'return 0' 'it shall succeed'
leaves 'echo "$WORD' said
also 1 '`pwd`' '[ "$(cat said)" = "--train a b --run-dir two" ]'
END

missed=0
check() { # the fault, the file and how sed makes it there, how many commands fail, what is printed
  local said
  cp "$work/README" "$work/README.md"
  cp "$work/table" "$work/table.sh"
  sed -i "$3" "$work/$2"
  said=$(tests/readme.sh --gpus 0 --limit 2 --readme "$work/README.md" --table "$work/table.sh")
  if [[ $? == $(($4 > 0)) && $said == *"$5"* && $said == *" $4 failed, "* ]]; then echo "ok    $1"
  else echo "FAIL  $1: readme.sh does not print: $5"; tail -n 30 <<< "$said"; missed=1; fi
}
# shellcheck disable=SC2016 # sed reads these
{
check 'no fault'                       README.md ''                             0 \
      '8 passed, 0 failed, 1 skipped'
check 'a command that fails'           README.md 's/cat said/& missing/'        1 \
      'exit code 1'
check 'a command that hangs'           README.md 's/^export.*/sleep 9/'         2 \
      'stopped: not done in 2 s'
check 'another form of the output'     README.md 's/| loss 8/| los 8/'          1 \
      'no line like: hello 12 | los'
check 'another count in the output'    README.md 's/#   hello 12/#   hello 13/' 1 \
      'no line like: hello 13'
check 'a block that nothing runs'      README.md 's/^```c/```python/'           3 \
      'neither commands nor C'
check 'a block without an end'         README.md '$s/.*/```/'                   2 \
      'README ends within a block'
check 'a program that is not here'     table.sh  '/^skip/d'                     1 \
      'exit code 127'
check 'a name that means nothing'      table.sh  '/^swap 1 .<this/d'            1 \
      'nothing stands for <this repository>'
check 'a file that is not left'        table.sh  '/^leaves .echo/s/$/2/'        1 \
      'there is no said2'
check 'an excuse without a line'       README.md '/^no-such/d'                  1 \
      "skip 'no-such-program'"
check 'a change without a line'        README.md '/^int main/d'                 2 \
      "swap 'return 1'"
check 'a check without its sentence'   README.md '/`pwd`/d'                     1 \
      "also '\`pwd\`'"
}
exit $missed
