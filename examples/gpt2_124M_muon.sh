#!/bin/sh
# Trains like gpt2_124M.sh, but with Muon for the blocks' matrices and 8-bit products (--fp8 all):
#
#   examples/gpt2_124M_muon.sh [--smoke] [--gpus N] OUT [FLAGS OF TRAIN...]
#
# gpt2_124M.sh --help describes OUT and the flags. It takes 6,200 steps of 524,288 tokens, in place
# of 18,865, at the Muon rates of modded-nanogpt's track 3, scaled to this program; the model there
# is another one. The training was not run: its loss and hours are not known. Validations measure
# the same tokens as llm.c's, whose loss is 3.27 to 3.29. On a CPU, and on a GPU without 8-bit
# products (compute capability below 8.9), it prints that it leaves --fp8 away. Only --smoke was
# run, on a CPU: after 60 steps its validation loss is 1.8, and 3.4 with AdamW.
G2Z_RECIPE=$0 exec "$(dirname "$0")/gpt2_124M.sh" "$@"
