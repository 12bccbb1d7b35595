#!/usr/bin/env bash
# Checks that a room of gpt2_zero.h calls only itself and the rooms above it: compiles the header
# cut after each room of implementations. The cut must define every function that it calls.
#     tests/rooms.sh [HEADER]
# The page, room i00, calls rooms up to i13, so the cuts before i13 leave it out. One call may lead
# down: room i08 opens g2z__cpu_ops, the table at the end of room i09.
# Prints the compiler's errors. Exit code 1: a room calls a room below it.
set -uo pipefail
[[ ${1-} != --help ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; }
header=${1:-gpt2_zero.h}
read -ra compiler <<< "${CC:-cc}"
rooms=$(sed -n 's/.*===== >>\(i[0-9]*\) .*/\1/p' "$header")
[[ $rooms ]] || { echo "rooms.sh: $header has no room of implementations"; exit 1; }

# cut LAST prints the header up to room LAST, with the line numbers of the whole.
cut() {
  awk -v last="$1" -v name="$header" '
    BEGIN { print "# 1 \"" name "\"" }
    /===== >>i/ {
      if (room == last) {
        if (last == "i08") print "static const g2z_ops *g2z__cpu_ops(void) { return NULL; }"
        print "#endif"
        exit
      }
      room = substr($3, 3)
    }
    room == "i00" && last < "i13" { $0 = "" }
    { print }' "$header"
}

# Compilers warn about a static function that is used but not defined. G2Z_STATIC makes the public
# functions static, too.
for room in ${rooms/i00/}; do
  cut "$room" | "${compiler[@]}" -std=c11 -Werror -DG2Z_STATIC -DGPT2_ZERO_IMPLEMENTATION \
    -fsyntax-only -x c - || { echo "FAIL  room $room calls a room below it"; exit 1; }
done
echo 'ok    rooms: each calls only itself and the rooms above it'
