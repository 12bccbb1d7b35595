#!/usr/bin/env bash
# Counts, in the C and CUDA files, what makes code hard to read, and compares it with limits.
#     tests/shape.sh [--list KIND] [FILE...]    without FILE: all of them
# The columns of its table:
#   code      lines that are neither blank nor the first line of a preprocessor directive
#   ternary   ternaries per 1,000 lines of code; those in macros count
#   two       lines with two statements, or more: two semicolons outside parentheses
#   comma     statements with two assignments and a comma between them: a = 1, b = 2;
#   params    functions, prototypes and function pointers with more than 8 parameters
#   long      functions of more than 100 lines, from the first of the signature to the last brace
# Comments, strings and characters do not count; macros only count for `code` and `ternary`. A
# declaration may initialise several variables, and so may the head of a `for`.
#   --list KIND   print the places that count for one of the last five columns, with file and line
#   --help        print this
# Exit code 1: a figure is above its limit. 2: wrong usage.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

# The most that a file may have: its row, or, without one, the row `each`. The row `all` limits the
# sums. A row that is not needed is removed. A file with at most three ternaries always passes.
limits() {
  cat << 'END'
#                          ternary  two  comma  params  long
each                            30    0      0       -     0
all                              -    -      -      16     -
tests/base.h                    30    7      0       -     0
tests/checkpoint.h              65    1      0       -     0
tests/cuda.h                    60    2      2       -     0
tests/fuzz.h                    40    1      0       -     0
tests/harness.h                 45    0      0       -     0
tests/inputs.h                  30    1      0       -     0
tests/inuse.h                   30    0      1       -     0
tests/layout.h                  75    1      1       -     0
tests/loader.h                  30    1      0       -     1
tests/model.h                   45    0      0       -     0
tests/muon.h                    70    0      0       -     0
tests/mutants.h                 30    0      1       -     0
tests/ops.h                     50    3      2       -     0
tests/ranks.h                   45    3      0       -     0
tests/run.h                     45    0      0       -     0
tests/text.h                    35    0      0       -     0
tests/trainer.h                 40    2      0       -     0
tests/weights.h                 30    2      0       -     0
END
}

usage() { echo "shape.sh: $*: see tests/shape.sh --help" >&2; exit 2; }
kind=
case ${1-} in
  --help) sed -n '2,/^set/s/^# \{0,1\}//p' tests/shape.sh; exit ;;
  --list)
    [[ ${2-} =~ ^(ternary|two|comma|params|long)$ ]] || usage '--list needs the name of a column'
    kind=$2
    shift 2 ;;
  -*) usage "unknown argument $1" ;;
esac
if (($# == 0)); then
  shopt -s nullglob
  set -- *.{h,cuh,c,cu} {extras,tests,examples,peers}/*.{h,c,cu}
fi
for file; do [[ -f $file ]] || usage "there is no file $file"; done

limits | awk -v only="$kind" '
# Returns the code of a line: without comments, with empty strings and characters.
function strip(text,  code, mark, end) {
  while (text != "") {
    if (in_comment) {
      end = index(text, "*/")
      if (!end) return code
      in_comment = 0
      text = substr(text, end + 2)
    }
    if (!match(text, /"|\047|\/\*|\/\//)) return code text
    mark = substr(text, RSTART, RLENGTH)
    code = code substr(text, 1, RSTART - 1)
    text = substr(text, RSTART + RLENGTH)
    if (mark == "//") return code
    in_comment = mark == "/*"
    if (in_comment) continue
    code = code mark mark
    match(text, mark == "\"" ? "^([^\"\\\\]|\\\\.)*\"" : "^([^\047\\\\]|\\\\.)*\047")
    if (RLENGTH > 0) text = substr(text, RLENGTH + 1)
  }
  return code
}

# Counts a place, and prints it if --list asks for its kind.
function place(kind, line) {
  count[kind]++
  if (only == kind) printf "%s:%d: %s\n", file, line, source[line]
}

# Reads a line of statements, prototypes, and heads of functions and blocks. `text` holds the one
# that has not ended yet, without what is in its parentheses and brackets.
function read_code(line,  mark, semicolons) {
  while (match(line, /[][(){};,]/)) {
    mark = substr(line, RSTART, 1)
    read_text(substr(line, 1, RSTART - 1))
    line = substr(line, RSTART + 1)
    if (mark ~ /[[(]/) {
      read_text(mark)
      if (!depth++) {
        commas = 0
        opened = FNR
      }
    } else if (mark ~ /[])]/) {
      depth--
      read_text(mark)
      if (!depth && commas > most_commas) {
        most_commas = commas
        widest = opened
      }
    } else if (mark == ",") {
      read_text(mark)
      if (depth == 1) commas++
    } else if (!depth) {
      if (mark == ";" && ++semicolons == 2) place("two", FNR)
      end_text(mark)
    }
  }
  read_text(line " ")
}

function read_text(part) {
  if (depth) return
  if (text ~ /^ *$/) first = FNR
  text = text part
}

function end_text(mark,  outside) {
  outside = source[first] ~ /^[A-Za-z_]/
  if (mark != "}" && most_commas >= 8 && (outside || text ~ /\(\)\(\)/)) place("params", widest)
  if (mark == "{" && outside && text ~ /\(\)/ && text !~ /= *$/) head = first
  while (sub(/^ *((if|for|while|switch) \(\)|else|do|case [^:]*:|default:)/, "", text));
  if (mark == ";" && text ~ chain) place("comma", first)
  begin_text()
}

function begin_text() {
  text = ""
  most_commas = 0
}

function begin_file(  i) {
  file = FILENAME
  in_comment = in_directive = depth = head = code = 0
  for (i in kinds) count[kinds[i]] = 0
  begin_text()
}

function end_file(  i) {
  for (i in kinds) sum[kinds[i]] += count[kinds[i]]
  all_code += code
  row(file, code, count, (file in limit) ? limit[file] : limit["each"])
}

# Prints a row of the table, with the limits that it exceeds.
function row(name, code, found, limits,  most, i, value, over) {
  split(limits, most, " ")
  if (!only) printf "%-26s %6d", name, code
  for (i = 1; i <= 5; i++) {
    value = found[kinds[i]]
    if (i == 1 && code) value = sprintf("%.1f", 1000 * value / code)
    if (!only) printf "%7s", value
    if (most[i] == "-" || value + 0 <= most[i] || i == 1 && found["ternary"] <= 3) continue
    over = over (over ? ", " : "   over the limit: ") kinds[i] " " most[i]
  }
  if (!only) print over
  if (over) failed = 1
}

BEGIN {
  split("ternary two comma params long", kinds, " ")
  variable = "[*(]*[A-Za-z_][]A-Za-z0-9_.>[()+-]* [-+*/%&|^<>]*= "
  chain = "^ *" variable ".*, *" variable
  if (!only) print "file                         code ternary  two  comma params  long"
}
NR == FNR {
  name = $1
  sub(/^[^ ]* */, "")
  limit[name] = $0
  next
}
FNR == 1 {
  if (file) end_file()
  begin_file()
}
{
  source[FNR] = $0
  line = strip($0)
  directive_begins = line ~ /^ *#/
  if (line ~ /[^ ]/ && !directive_begins) code++
  for (rest = line; sub(/\?/, "", rest);) place("ternary", FNR)
  if (directive_begins) in_directive = 1
  if (!in_directive) {
    read_code(line)
    if (head && $0 ~ /^}/) {
      if (FNR - head >= 100) place("long", head)
      head = 0
    }
  }
  if (line !~ /\\$/) in_directive = 0
}
END {
  end_file()
  row("all", all_code, sum, limit["all"])
  exit failed && !only
}' - "$@"
