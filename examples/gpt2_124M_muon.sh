#!/bin/sh
# Trains like gpt2_124M.sh, but with Muon for the blocks' matrices and 8-bit products (--fp8 all):
#
#   examples/gpt2_124M_muon.sh [--smoke] [--gpus N] OUT [FLAGS OF TRAIN...]
#
# On a CPU, and on a GPU without 8-bit products, it prints that it leaves --fp8 away. Only --smoke
# was run, on a CPU: the loss after 18,865 steps and the hours are not known.
G2Z_RECIPE=muon exec "$(dirname "$0")/gpt2_124M.sh" "$@"
