#!/usr/bin/env bash
# Starts train on the tasks of a Slurm allocation, one rank per GPU. The .sbatch files next to this
# script request nodes and then run it. Submit them from any directory; paths in variables are
# relative to that directory:
#     RUN_DIR=runs/first \
#       GPT2_EXTRA_ARGS='--train data/mine_train_*.bin --vocab data/vocab.bpe --model gpt2' \
#       sbatch slurm/train_4gpu.sbatch
# Flags of sbatch come before the file's name and override it. Two nodes with eight GPUs each:
#       sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 slurm/train_2x4gpu.sbatch
#
# Every knob is an environment variable:
#     RUN_DIR                    run directory                       [runs/slurm_JOBID]
#     MICRO_BATCH_SIZE_PER_GPU   --batch of train                    [train's default]
#     GRAD_ACCUM_STEPS           --accum of train                    [train's default]
#     GPT2_EXTRA_ARGS            further flags of train; split at spaces, never expanded
#     NSYS=1                     profile the first rank of each host: see slurm/profile.sh
#     NCCL_LOGS=1                NCCL's log and topology, in the run directory
#     DIST_DEBUG=1               verbose NCCL, lines labelled with their task, the environment first
# Exit codes are train's: 0 done, 70 a rank was lost, 75 stopped and saved. To continue after 70 or
# 75, submit it again with the same RUN_DIR and with --resume latest among GPT2_EXTRA_ARGS.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "${SLURM_SUBMIT_DIR:-$PWD}"
run_dir=${RUN_DIR:-runs/slurm_${SLURM_JOB_ID:-none}}
mkdir -p "$run_dir"

# Rank 0 is the first task of the first node; the other ranks connect to it there.
if [[ ${SLURM_JOB_NUM_NODES:-1} -gt 1 && -z ${MASTER_ADDR:-} ]]; then
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export MASTER_ADDR=${nodes[0]}
fi
# Only a process that knows the secret is accepted as a rank of this job.
G2Z_SECRET=${G2Z_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export G2Z_SECRET

# The ranks end each other when one fails. Without -K0 srun would end the step at the first exit
# code that is not 0, even at a 75, while other ranks still exit. --wait limits that time, in
# seconds.
launch=(srun -K0 --wait=60)
program=("$root/train" --run-dir "$run_dir")
if [[ -n ${MICRO_BATCH_SIZE_PER_GPU:-} ]]; then program+=(--batch "$MICRO_BATCH_SIZE_PER_GPU"); fi
if [[ -n ${GRAD_ACCUM_STEPS:-} ]]; then program+=(--accum "$GRAD_ACCUM_STEPS"); fi
if [[ ${NCCL_LOGS:-0} == 1 ]]; then program+=(--nccl-logs); fi
if [[ ${NSYS:-0} == 1 ]]; then program+=(--graph off); fi # nsys cannot see parts of a graph
if [[ -n ${GPT2_EXTRA_ARGS:-} ]]; then
  read -r -a extra <<< "${GPT2_EXTRA_ARGS//$'\n'/ }" # globs go to train as they are
  program+=("${extra[@]}")
fi
if [[ ${NSYS:-0} == 1 ]]; then
  launch=(srun -K0 --wait=0) # each host's first task writes its report after the others exit
  program=(bash "$root/slurm/profile.sh" "$run_dir" "${program[@]}")
fi
if [[ ${DIST_DEBUG:-0} == 1 ]]; then
  export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_SUBSYS=${NCCL_DEBUG_SUBSYS:-INIT,ENV,NET,GRAPH}
  launch+=(--label)
  env | grep -E '^(SLURM|NCCL|CUDA|OMP)_' | sort
fi

printf '%q ' "${launch[@]}" "${program[@]}" && echo
exec "${launch[@]}" "${program[@]}"
