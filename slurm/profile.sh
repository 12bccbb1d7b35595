#!/usr/bin/env bash
# Runs a program that leaves a run directory, and profiles it:
#     slurm/profile.sh RUN_DIR ./train --run-dir RUN_DIR --train 'data/mine_train_*.bin' ...
# If nsys is installed, the first task of each host runs under it, and RUN_DIR/profiles gets
#     nsys_JOB_HOST.nsys-rep, .sqlite   for Nsight Systems
#     nsys_stats_HOST.txt               tables that `./bench profile RUN_DIR` reads
# Without nsys the program gets --profile: train then times its own parts.
# nsys shows a CUDA graph as one piece: to see its parts, give train --graph off.
set -uo pipefail -o noclobber # a redirection creates its file; it does not follow a link there

use() { sed -n '2,9s/^# \{0,1\}//p' "$0"; }
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  use
  exit 0
fi
if [[ $# -lt 2 ]]; then
  use >&2
  exit 1
fi
run_dir=$1
shift
if ! command -v nsys > /dev/null; then
  echo "profile.sh: nsys is not installed; the program measures itself with --profile" >&2
  exec "$@" --profile
fi
if [[ ${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-${LOCAL_RANK:-0}}} != 0 ]]; then exec "$@"; fi

host=$(uname -n)
report=$run_dir/profiles/nsys_${SLURM_JOB_ID:-0}_$host
stats=$run_dir/profiles/nsys_stats_$host.txt
mkdir -p "$run_dir/profiles" || exit 1
# Slurm sends USR1 to all processes of a step before its time is up. The program handles it and
# saves. This shell and nsys ignore it, so that they live until the program has saved.
trap '' USR1
nsys profile --trace cuda,nvtx,osrt --sample none --force-overwrite true --output "$report" "$@"
code=$?
# The stats file gets its name only when it is complete. nsys stats also writes the .sqlite file.
rm -f "$stats.partial"
tables=nvtx_sum,osrt_sum,cuda_gpu_kern_sum,cuda_gpu_mem_time_sum
if nsys stats --force-export=true --report $tables "$report.nsys-rep" > "$stats.partial"; then
  mv "$stats.partial" "$stats"
else
  rm -f "$stats.partial"
  echo "profile.sh: nsys stats failed. To see why: nsys stats $report.nsys-rep" >&2
fi
exit "$code"
