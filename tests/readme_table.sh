# shellcheck shell=bash disable=SC2154,SC2016
# The changes that tests/readme.sh makes in README's commands, and why. That script describes the
# kinds of rows. $gpus is the number of GPUs, $make_test is 1 with --make-test. WHEN is 1 or 0.

absent() { command -v "$1" > /dev/null && echo 0 || echo 1; }
no_vocab=$([[ ${VOCAB_URL-} ]]; echo $?) no_data=$([[ ${DATA_URL-} ]]; echo $?)
no_gpt2=$([[ ${GPT2_URL-} ]]; echo $?)
gpu=$((gpus > 0)) cpu=$((gpus == 0))
slow='a CPU takes hours for 124M parameters'
ranks=$((gpus > 0 ? gpus : 2))
launch=$( ((gpus > 0)) && echo "--gpus $gpus" || echo '--ranks 2')
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d .)
other_gpu=$([[ $cpu == 1 || $arch == 90 ]] && echo 0 || echo 1)
no_nvcc=$([[ $gpu == 1 ]] && absent nvcc || echo 1)
no_split=$(nvcc --help 2> /dev/null | grep -q split-compile; echo $?)
no_nccl=$gpu
if echo '#include <nccl.h>' | nvcc -E -x cu - > /dev/null 2>&1; then no_nccl=0; fi

# ----- Install and start
skip 1 'apt-get update'            'it changes the system'
swap 1 '<this repository>' "$work/origin" 'a copy of this tree'
swap "$(absent git)" 'git clone' 'cp -r' 'git is not here'
leaves 'make run'                  data/sources runs/sources/report.html runs/sources/weights
before "$no_vocab" 'make data'     'cp data/sources/sources.bpe data/vocab.bpe' \
       'stands in for the vocabulary, as VOCAB_URL is not given'
before "$no_data" 'make data'      'cat docs/*.md > data/tinyshakespeare.txt' \
       'stands in for Shakespeare, as DATA_URL is not given'
leaves 'make data'                 'data/tinyshakespeare_train_*.bin' \
                                   'data/tinyshakespeare_val_*.bin'
skip $((!make_test)) 'make test'   'it takes minutes and is run by itself; --make-test runs it here'
skip "$no_nvcc" 'nvcc'             'there is no GPU, or no nvcc in PATH'
swap $((!no_split)) 'nvcc -'        'nvcc -split-compile=0 -' 'it compiles kernels in parallel'
swap "$other_gpu" 'compute_90a,code=sm_90a' "compute_$arch,code=sm_$arch" 'this GPU'
swap "$other_gpu" '-arch=sm_90a'   "-arch=sm_$arch" 'this GPU'
swap "$no_nccl" ' -lnccl'          '' 'NCCL is not here'
skip 1 'docker build'              "it needs Docker's daemon and downloads an image"

# ----- Your own text
# The text has more tokens than 200 steps take, since with --keep-best the end of an epoch also
# saves a checkpoint.
before 1 'my.txt' 'cat docs/*.md gpt2_zero.h extras/*.h tests/*.h > my.txt
for i in {1..300}; do echo "{\"text\": \"Line $i of JSON lines.\"}"; done > more.jsonl' 'the text'
leaves 'my.txt'                    'data/mine_train_*.bin' 'data/mine_val_*.bin'
swap "$cpu" '--model gpt2 --batch 4 --seq 256 --steps 200' \
     '--layers 2 --channels 64 --batch 2 --seq 32 --steps 200' "$slow"
leaves '--run-dir run --prompt'    run/weights/model.safetensors run/report.html run/metrics.jsonl \
                                   run/training_metrics.json run/RUN_COMPLETE.txt \
                                   'run/events.out.tfevents.*'

# ----- Several GPUs and Slurm
skip "$cpu" './train --gpus 8'     'there is no GPU'
swap "$gpu" '--gpus 8'             "--gpus $gpus" 'the GPUs of this machine'
skip "$(absent mpirun)" 'mpirun -np 8' 'mpirun is not here'
swap 1 'mpirun -np 8'              "mpirun -np $ranks" 'the GPUs, or two ranks on a CPU'
skip 1 'srun -K0'                  'it needs Slurm'
skip "$(absent torchrun)" 'torchrun' 'torchrun is not here'
swap 1 '--nproc-per-node 8'        "--nproc-per-node $ranks" 'the GPUs, or two ranks on a CPU'
skip 1 'node1:8,node2:8'           'it needs two hosts'
skip 1 'sbatch slurm'              'it needs Slurm'
skip 1 'sbatch --nodes'            'it needs Slurm'
swap "$gpu" '--device cpu ...'     '--device cpu ... --layers 2 --channels 64 --seq 32' \
     "$slow"

# ----- Checkpoints, resuming, results
swap 1 ' --keep-best$'             ' --keep-best --max-train-steps 100$' \
     'the next line has something to continue'
leaves '--run-dir long'            long/step-000100/model.safetensors long/report.html \
                                   long/best/model.safetensors
leaves '--resume latest'           long/step-000150 long/step-000200 long/weights
leaves '--run-dir other'           other/weights

# ----- Fine-tuning, writing, perplexity
before "$no_gpt2" 'make gpt2'      'cp -r run/weights gpt2' \
       'stands in for GPT-2, as GPT2_URL is not given'
leaves '--run-dir tuned'           tuned/weights
before 1 'DATA.jsonl' 'for i in {1..300}; do
  echo "{\"prompt\": \"Question: $i + 2\", \"completion\": \" $((i + 2))\"}"
done > DATA.jsonl'                 'the questions'
leaves 'tuned2'                    tuned2/weights
before 1 'FILE.txt' 'head -n 100 README.md > FILE.txt' 'the text'

# ----- In your own program
swap 1 'optimizer.steps = 1000'    'optimizer.steps = 20' 'it shows the same'
swap 1 'i < 1000'                  'i < 20' 'it shows the same'
swap 1 '  config.train_glob ='     '#ifndef __CUDACC__
  config.model.layers = 2, config.model.channels = 64, config.model.heads = 1, config.seq = 64;
#endif
  config.train_glob =' "$slow"
leaves './a.out'                   step-001000/model.safetensors
before 1 'nvcc -O1 -arch'         'rm -r step-001000' 'the program that cc compiled saved it'

# ----- What the prose names
also 1 '`make help`'               'make help'
also 1 '75 stopped by a signal and saved' './train ... --steps 99999 --run-dir stopped &
until grep -q step stopped/metrics.jsonl; do sleep 1; done
kill $!; wait $!; [ $? = 75 ] && ls -d stopped/step-*'
also 1 '--dry-run --device cuda'   './train ... --dry-run --device cuda --gpus 4'
also 1 '`--zero`'                  "./train $launch ... --steps 20 --zero 3"
also 1 'stage and type, can load'  "./train $launch ... --zero 2 --dtype bf16 \\
  --resume long/step-000100"
also 1 '`--recompute block`'       './train ... --steps 20 --recompute block --dropout 0.1'
also 1 '`--optimizer muon`'        './train ... --steps 20 --optimizer muon'
also "$gpu" '`--fp8 all`'          './train ... --steps 20 --batch 8 --seq 512 --fp8 all'
also 1 '`--eval-every` steps'      './train ... --steps 20 --eval FILE.txt --eval-every 10'
also 1 '`--train-bpe 8000`'    'gzip -k my.txt
./prepare_data --train-bpe 500 --out data --name packed my.txt.gz'
also 1 '`--train GLOB:WEIGHT`'     './train --layers 2 --channels 64 --seq 32 --steps 20 \
  --train "data/mine_train_*.bin:2" --train "data/mine_val_*.bin:1" --vocab data/vocab.bpe'
also 1 './bench report'            './bench report run long other --out page && ls page/report.html'
also "$gpu" 'docs/speed.md'        './bench --batch 8'
also "$gpu" 'docs/speed.md'        './bench ops --batch 8'
also "$gpu" '`make help`'          'make profile'
also "$gpu" '`make help`'          'make bench'
