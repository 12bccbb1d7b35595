# gpt2_zero: `make help` lists the targets. Variables that are set with ?= can be overridden.

# Other settings on the command line are refused: a misspelt name would change nothing, and some
# names would replace variables below.
SETTINGS := CC CFLAGS NVCC ARCH COMMIT SHELL BENCH SANITIZE_TOOLS SANITIZE_TESTS \
            VOCAB_URL DATA_URL GPT2_URL GPT2_SUM_%
GIVEN := $(foreach name,$(.VARIABLES),\
           $(if $(filter command,$(firstword $(origin $(name)))),$(name)))
WRONG := $(filter-out $(SETTINGS),$(GIVEN))
$(if $(WRONG),$(error $(WRONG): no setting of this Makefile; type make help. \
  To build without CUDA: make NVCC=))

# The downloads and their sha256.
VOCAB_URL ?= https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe
VOCAB_SUM := 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
DATA_URL  ?= https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
DATA_SUM  := 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
GPT2_URL  ?= https://huggingface.co/openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e
GPT2_SUM_config.json       := 0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4
GPT2_SUM_model.safetensors := 248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707
GPT2_SUM_vocab.json        := 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
GPT2_SUM_merges.txt        := $(VOCAB_SUM)

# If nvcc and a GPU are here, nvcc builds the programs for that GPU; otherwise the C compiler builds
# them for the CPU. Hopper needs 90a, which adds wgmma.
NVCC   ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
FOUND  := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
                  grep -x '[0-9]*\.[0-9]' | head -n 1 | tr -d .)
ARCH   ?= $(patsubst 90,90a,$(FOUND))
CFLAGS ?= -O3 -march=native
OPENMP := $(shell echo 'int omp_get_max_threads(void);' \
                       'int main(void) { return !omp_get_max_threads(); }' \
                  | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
COMMIT := $(shell git describe --always --dirty --abbrev=40 2>/dev/null)
DEFINE := $(if $(COMMIT),-DG2Z_GIT_COMMIT='"$(COMMIT)"')
HOST    = $(CC) -std=c11 $(CFLAGS) $(OPENMP)
# These two are evaluated only when used, because nvcc starts slowly. SPLIT makes nvcc compile
# kernels in parallel, if it can.
NCCL    = $(if $(shell echo '\#include <nccl.h>' | $(NVCC) -E -x cu - > /dev/null 2>&1 && echo 1), \
               -lnccl)
SPLIT   = $(if $(shell $(NVCC) --help | grep split-compile),-split-compile=0)
# -O1 is for host code: nvcc always optimises kernels, and the header has CPU ops compiled with -O3.
ifneq ($(and $(NVCC),$(ARCH)),)
BUILD   = $(NVCC) -std=c++17 -O1 $(SPLIT) -gencode arch=compute_$(ARCH),code=sm_$(ARCH) \
          -Xcompiler -march=native,-fopenmp
CUDA    = -lcublasLt $(NCCL)
LIBRARY = -x cu -DG2Z_KERNELS=
TESTED  = build/library.o -DG2Z_STATIC -DG2Z_KERNELS=extern
else
BUILD   = $(HOST)
LIBRARY = -x c
AS_C    = -x c
endif
LIBS    = -lm -lpthread

# $(HERE)/bench is the program; the target `bench` runs it.
HERE := $(subst $() ,\ ,$(CURDIR))
NAME  = $(lastword $(subst /, ,$@))

EXTRAS := $(wildcard extras/*.h)
TESTS  := $(wildcard tests/*.h)

all: train prepare_data $(HERE)/bench ## the programs (the default)

# The programs share the library. The tests call its private functions, so they have their own
# copy, and share only its kernels.
train: train.cu
$(HERE)/bench: bench.cu
train $(HERE)/bench: gpt2_zero.h $(EXTRAS) build/library.o
	$(BUILD) build/library.o $(AS_C) $(DEFINE) -DG2Z_IMPLEMENTED $(NAME).cu -o $(NAME) \
	  $(LIBS) $(CUDA)
test_gpt2: test_gpt2.cu $(TESTS) gpt2_zero.h $(EXTRAS) $(wildcard gpt2_zero_kernels.cuh) \
           build/device.command $(filter %.o,$(TESTED))
	$(BUILD) $(TESTED) $(AS_C) $@.cu -o $@ $(LIBS) $(CUDA)
build/library.o: gpt2_zero.h $(wildcard gpt2_zero_kernels.cuh) build/device.command
	$(BUILD) $(LIBRARY) -DGPT2_ZERO_IMPLEMENTATION -c gpt2_zero.h -o $@
prepare_data: prepare_data.c gpt2_zero.h $(EXTRAS) build/host.command
	$(HOST) $< -o $@ $(LIBS)

# A program is built again when its command changes, as with ARCH=90a after a build for the CPU.
# These files hold the commands. They are written only if a command has changed; the + writes them
# under make -n, too, so that it prints what make would do.
stamp = mkdir -p $(@D) && echo '$(subst ','\'',$1)' | cmp -s - $@ || echo '$(subst ','\'',$1)' > $@
build/host.command: FORCE
	+@$(call stamp,$(HOST) $(LIBS))
build/device.command: FORCE
	+@$(call stamp,$(BUILD) $(LIBS) $(CUDA))
FORCE:

EXAMPLES := build/examples/score build/examples/generate
examples: $(EXAMPLES) ## score.c and generate.c for this CPU, into build/examples
build/examples/%: examples/%.c gpt2_zero.h $(EXTRAS) build/host.command
	@mkdir -p $(@D)
	$(HOST) -I. -Iextras $< -o $@ $(LIBS)

# ----- run --------------------------------------------------------------------------------------

# The text of this training. README.md is not part of it, because it prints the training's figures.
SOURCES := gpt2_zero.h $(EXTRAS) train.cu bench.cu prepare_data.c test_gpt2.cu $(TESTS) Makefile
SHARDS  := ./prepare_data --train-bpe 4096 --out data/sources --name sources --val-fraction 0.1 \
                          $(SOURCES)
RUN     := --layers 4 --channels 128 --context 128 --batch 4 --steps 800 --lr 4e-3 --val-every 200

# Waiting OpenMP threads sleep: if another program uses a core, spinning threads cost half of the
# speed. train and bench set this themselves.
test sanitize-cuda: export OMP_WAIT_POLICY ?= passive

run: train prepare_data ## train a GPT-2 on these sources, save it, generate text (1 minute, no download)
	rm -rf data/sources runs/sources
	$(SHARDS)
	./train --train 'data/sources/sources_train_*.bin' --val 'data/sources/sources_val_*.bin' \
	  --vocab data/sources/sources.bpe $(RUN) \
	  --prompt '  for (int i' --sample-tokens 200 --temperature 0.6 \
	  --run-dir runs/sources --save-weights runs/sources/weights
	@echo
	@echo 'the text and its vocabulary   data/sources'
	@echo 'loss, log and metrics         runs/sources'
	@echo 'the model                     runs/sources/weights'
	@echo 'to generate more text         ./train --init-from runs/sources/weights' \
	  '--prompt "if (" --temperature 0.5'

# For any other run: slurm/profile.sh RUN_DIR ./train --run-dir RUN_DIR ..., then
# ./bench profile RUN_DIR
profile: train prepare_data $(HERE)/bench ## time the parts of a step: by nsys if it is installed, else by train
	rm -rf data/sources runs/profile
	$(SHARDS)
	slurm/profile.sh runs/profile ./train --train 'data/sources/sources_train_*.bin' \
	  --val 'data/sources/sources_val_*.bin' --vocab data/sources/sources.bpe $(RUN) \
	  --sample-tokens 0 --steps 50 --max-val-steps 10 --graph off --run-dir runs/profile
	./bench profile runs/profile

# ----- test -------------------------------------------------------------------------------------

# Four programs are built at a time unless -j is given.
test: ## run every test that this machine can run; the last line counts them
	+@$(MAKE) --no-print-directory $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j4) \
	  test_gpt2 prepare_data train '$(CURDIR)/bench' $(EXAMPLES)
	./test_gpt2

# With a GPU the experiment is scaling; without one all run, at a small size. To choose:
# make bench BENCH='matrix comm'
BENCH ?= $(if $(FOUND),scaling,scaling buckets matrix strategies comm)
bench: $(HERE)/bench ## time steps, ops and scaling on all GPUs; without a GPU, small experiments on the CPU
	rm -rf runs/bench
	./bench
	@failed=0; for experiment in $(BENCH); do \
	  echo; ./bench $$experiment --out runs/bench/$$experiment || failed=1; done; \
	./bench report runs/bench && exit $$failed

readme: ## run the commands of README in an empty clone: tests/readme.sh --help
	tests/readme_faults.sh
	tests/readme.sh

mutants: test_gpt2 ## break one line of code at a time: a test must fail; on a GPU if there is one
	tests/mutants.sh $(if $(and $(NVCC),$(ARCH)),cuda,cpu)

traces: ## compare training with an earlier commit, bit for bit: tests/traces.sh --help
	tests/traces.sh

# The same tests under AddressSanitizer and UBSan; they start the programs that are named here.
SANITIZE := -std=c11 -O1 -g -march=native -fsanitize=address,undefined -fno-sanitize-recover=all
sanitize: $(addprefix build/sanitized/,test_gpt2 train prepare_data bench) ## the tests under AddressSanitizer and UBSan
	G2Z_TRAIN=build/sanitized/train G2Z_PREPARE_DATA=build/sanitized/prepare_data \
	  G2Z_BENCH=build/sanitized/bench build/sanitized/test_gpt2
build/sanitized/test_gpt2: $(TESTS)
build/sanitized/%: %.cu gpt2_zero.h $(EXTRAS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) -x c $< -o $@ $(LIBS)
build/sanitized/%: %.c gpt2_zero.h $(EXTRAS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) $< -o $@ $(LIBS)

# Each test of the CUDA ops runs under each tool of compute-sanitizer; -j runs them in parallel.
# Tests that need two GPUs are left out. So are tests that train with ops that other tests cover:
# racecheck needs 100 GiB of memory for two of them. racecheck aborts in cuBLASLt's kernels, so
# plain kernels replace these.
SANITIZE_TOOLS ?= memcheck initcheck racecheck
SANITIZE_TESTS ?= $(filter-out cuda_zero% cuda_hosts cuda_lost% cuda_gpus cuda_graphs_apart \
                    cuda_early cuda_recompute cuda_golden cuda_gradients, \
                    $(shell sed -n 's/^    {"\(cuda_[a-z_]*\)".*/\1/p' test_gpt2.cu))
SANITIZED := $(foreach tool,$(SANITIZE_TOOLS),$(addprefix $(tool)-,$(SANITIZE_TESTS)))
sanitize-cuda: $(SANITIZED) ## the tests of the CUDA ops under compute-sanitizer
$(SANITIZED): test_gpt2 build/plain/.built
	@mkdir -p build/sanitized
	@LD_LIBRARY_PATH=build/plain:$$LD_LIBRARY_PATH compute-sanitizer \
	  --tool $(firstword $(subst -, ,$@)) --error-exitcode 1 \
	  $(if $(filter memcheck-%,$@),--report-api-errors no) \
	  ./test_gpt2 $(lastword $(subst -, ,$@)) > build/sanitized/$@.txt 2>&1 \
	  && grep -q '^1 passed' build/sanitized/$@.txt \
	  || { cat build/sanitized/$@.txt; echo "FAIL  $@"; exit 1; }
	@echo "ok    $@"
# racecheck follows every access to shared memory, and fp32 attention has millions of them.
racecheck-cuda_attention_wide racecheck-cuda_attention_repeats racecheck-cuda_early: \
  export G2Z_TEST_FP32_QUERIES ?= 400
racecheck-cuda_early: export G2Z_TEST_EARLY_STEPS ?= 3
# The library of plain kernels gets the name of the cuBLASLt that test_gpt2 loads.
build/plain/.built: peers/plain_cublaslt.cu test_gpt2
	@rm -rf $(@D) && mkdir -p $(@D)
	name=$$(ldd test_gpt2 | grep -o 'libcublasLt[^ ]*' | head -n 1) && \
	  $(NVCC) -O3 $(if $(ARCH),-arch=sm_$(ARCH)) -shared -Xcompiler -fPIC \
	    -Xlinker -soname=$$name,--default-symver $< -o $(@D)/$$name
	@touch $@

check: check-compilers check-contents check-flags check-pictures sanitize ## all compilers without a warning; contents, flags, sanitizers

WARN := -Wall -Wextra -Wpedantic -Werror
WAYS := "gcc -std=c11 -x c" "clang -std=c11 -x c" \
        "g++ -std=c++17 -x c++" "clang++ -std=c++17 -x c++"
HEADS := $(addprefix build/check/,alone.c extras.c one.c two.c static.c static2.c)
BEHIND := "gcc -x c" "gcc -std=gnu17 -x c" "clang -x c" \
          "g++ -std=c++17 -x c++" "clang++ -std=c++17 -x c++"

# build/fuzz/fuzz_json and the others run until they are stopped. They write failing inputs to the
# current directory.
FUZZERS = $(shell sed -n 's/^static int \(fuzz_[a-z]*\).const uint8_t.*/\1/p' tests/fuzz.h)
fuzz: $(addprefix build/fuzz/,$(FUZZERS)) ## libFuzzer programs of every file format, with clang
	@ls build/fuzz
build/fuzz/%: test_gpt2.cu tests/fuzz.h gpt2_zero.h $(EXTRAS)
	@mkdir -p $(@D)
	clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -DG2Z_FUZZ=$* -x c $< -o $@ $(LIBS)

# $(call each,WAYS,COMMANDS) runs the commands with the compiler $$1, its mode $$2, and $$3 $$4,
# which stand before a file.
each = @for way in $1; do \
  set -- $$way; [ $$\# != 3 ] || set -- $$1 '' $$2 $$3; \
  if ! command -v $$1 > /dev/null; then echo "skip  $$1 is not here"; continue; fi; \
  $2; done
compile = $$1 $$2 $(WARN) -O1 -I. -c $$3 $$4 $$file -o build/check/$$(basename $$file).o || exit 1
run = $$1 $(addprefix build/check/,$(addsuffix .o,$1)) $(LIBS) -o build/check/linked \
  && build/check/linked || exit 1
# $(call refused,FLAGS FILE,WORDS): the first error must be a sentence of the header.
refused = $$1 $1 -fsyntax-only -I. 2>&1 | grep -m1 error | grep -q -e '$2' \
  || { echo "$$1 $1: the error does not say $2"; exit 1; }

# alone.c has the header without extras. extras.c has the extras with only the header's
# declarations. one.c has the implementations; it is linked with two.c, which has none. static.c and
# static2.c each have their own implementations.
check-header: WARN += -Wframe-larger-than=36864 # main, its calls and libc must fit a small stack
check-header: ## compile the header alone, after system headers and room by room; see it refuse wrong flags
	@mkdir -p build/check
	@impl='#define GPT2_ZERO_IMPLEMENTATION' include='#include "gpt2_zero.h"'; \
	static='#define G2Z_STATIC'; \
	main='int main(void) { return g2z_dtype_text(G2Z_FP16) == 0; }'; cd build/check; \
	extras=$$(printf '#include "extras/%s"\n' $(notdir $(EXTRAS))); \
	all=$$(printf '%s\n' "$$include" "$$extras"); \
	printf '%s\n' "$$impl" "$$include" > alone.c; \
	printf '%s\n' '#define _GNU_SOURCE 1' "$$include" "$$impl" "$$extras" > extras.c; \
	printf '%s\n' "$$impl" "$$all" "$$all" > one.c; \
	printf '%s\n' "$$all" "$$all" "$$main" > two.c; \
	printf '%s\n' "$$static" "$$impl" "$$all" "$$all" "$$main" > static.c; \
	printf '%s\n' "$$static" "$$impl" "$$all" > static2.c
	$(call each,$(WAYS),for file in $(HEADS); do $(compile); done; $(call run,one.c two.c); \
	  $(call run,static.c static2.c); \
	  echo "ok    $$1 $$2: the header alone and twice and in two files and static")
	$(call each,$(BEHIND),for file in tests/behind.c; do $(compile); done; $(call run,behind.c); \
	  echo "ok    $$1 $$2: behind system headers")
	$(call each,"gcc" "clang",$(call refused,-std=c11 tests/behind.c,-std=gnu11); \
	  $(call refused,-ffast-math build/check/one.c,-fno-fast-math); \
	  $(call refused,-ffinite-math-only build/check/one.c,-fno-fast-math); \
	  echo "ok    $$1: refuses -std=c11 behind system headers and -ffast-math")
	@tests/rooms.sh

check-compilers: check-header ## the header and the programs without a warning in every way
	$(call each,$(WAYS),\
	  for file in train.cu bench.cu test_gpt2.cu prepare_data.c; do $(compile); done; \
	  echo "ok    $$1 $$2: the programs")
	@$(CC) -std=c11 $(WARN) -Wno-unused-function -DG2Z_FUZZ=fuzz_json -fsyntax-only -x c test_gpt2.cu \
	  && echo 'ok    the targets of make fuzz'

# The quick part of check-cuda: two programs, for Hopper, which has the most kernels. test_gpt2 is
# compiled without those that it shares with train.
NVCC_CHECK = $(NVCC) -std=c++17 -O1 $(SPLIT) -Werror all-warnings -Xcompiler -Wall,-Wextra -x cu -c
check-nvcc: $(addprefix build/check/nvcc_,$(if $(NVCC),train test_gpt2,none)) ## no warning from nvcc for sm_90a
build/check/nvcc_none:
	@echo 'skip  nvcc is not here'
build/check/nvcc_test_gpt2: $(TESTS)
build/check/nvcc_test_gpt2: NVCC_CHECK += -DG2Z_KERNELS=extern
build/check/nvcc_%: %.cu gpt2_zero.h gpt2_zero_kernels.cuh $(EXTRAS)
	@mkdir -p $(@D)
	@$(NVCC_CHECK) -gencode arch=compute_90a,code=sm_90a $< -o $@
	@! nm $@ | grep 'U .*g2z__cuda_fill' | grep -v 'Lm[0-9]*E' # its name has the structs' size
	@echo 'ok    nvcc: $<, sm_90a'

# For seven architectures: 14 minutes on two cores. A kernel that uses local memory for more than a
# few spilled words keeps an array there. At the end a C program is linked with an implementation
# that nvcc compiled.
check-cuda: ## no warning from nvcc, for each architecture; Hopper's kernels keep to their registers
	@mkdir -p build/check
	@for arch in 75 80 86 89 90a 100 120; do log=build/check/ptxas_$$arch.txt; \
	  $(NVCC_CHECK) -gencode arch=compute_$$arch,code=sm_$$arch -Xptxas -v \
	    train.cu -o build/check/nvcc.o > $$log 2>&1 \
	    || { grep -v '^ptxas info\|^ *[0-9]* bytes stack' $$log; exit 1; }; \
	  echo "ok    nvcc: sm_$$arch"; \
	done
	@awk '/Function properties for/ { kernel = $$NF } \
	      /bytes stack frame/ && kernel ~ /hopper/ { kernels++ } \
	      /bytes stack frame/ && kernel ~ /hopper/ && $$1 > 16 { bad++; print kernel ":" $$0 } \
	      /wgmma.* are serialized/ { bad++; print } \
	      END { if (!kernels || bad) exit 1; \
	            print "ok    " kernels " kernels for Hopper in registers" }' \
	  build/check/ptxas_90a.txt
	@$(NVCC) -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra -c peers/plain_cublaslt.cu \
	  -o build/check/nvcc.o
	@printf '%s\n' '#include "gpt2_zero.h"' \
	  'int main(void) { return g2z_dtype_text(G2Z_FP16) == 0; }' > build/check/main.c
	@printf '%s\n' '#define GPT2_ZERO_IMPLEMENTATION' '#include "gpt2_zero.h"' > build/check/library.cu
	@$(NVCC) -std=c++17 -O3 -I. -c build/check/library.cu -o build/check/library.o
	@$(CC) -std=c11 -I. -c build/check/main.c -o build/check/main.o
	@$(NVCC) build/check/main.o build/check/library.o -o build/check/linked -lcublasLt $(NCCL)
	@./build/check/linked && echo 'ok    a C program linked with what nvcc compiled'

# Most lines that a file may have: 5 % more than when this table was made, and at least 40 lines
# more. That is room for growth that nobody meant. Tests have no limit. A change that needs more
# lines raises its file's figure and gives the reason. Lines are not shortened or joined to stay
# below.
BUDGETS := gpt2_zero.h=13200 gpt2_zero_kernels.cuh=9480 train.cu=290 bench.cu=340 \
           prepare_data.c=1700 extras/g2z_bench.h=400 extras/g2z_experiment.h=2100 \
           extras/g2z_report.h=3090 extras/g2z_run.h=3300 extras/g2z_command.h=1140 \
           extras/g2z_text.h=2400 extras/g2z_program.h=1050 extras/g2z_eval.h=850 README.md=170
# The top level holds only these, dotfiles, and the folders in README's table.
ROOT := gpt2_zero.h gpt2_zero_kernels.cuh train.cu bench.cu prepare_data.c test_gpt2.cu Makefile \
        README.md LICENSE CHANGELOG.md

# The last two commands check that each tag in the header's contents heads one room and each room is
# in the contents, and that extras/ use public functions only.
check-contents: ## files in the repository, lines and shape against limits, the header's contents
	@git rev-parse > /dev/null 2>&1 \
	  || { echo 'skip  the list of files: this is no git checkout'; exit 0; }; \
	known=$$(printf '%s\n' $(ROOT); grep -o '^|.*' README.md | grep -o '`[a-z]*/`' | tr -d '`/'); \
	others=$$(git ls-files | sed 's,/.*,,' | sort -u | grep -v '^\.' | grep -vxF "$$known"); \
	[ -z "$$others" ] \
	  || { echo "the top level has" $$others", which README's table does not name"; exit 1; }; \
	binary=$$(git ls-files -z | xargs -0 grep -sIL '' | grep -v '^golden/'); \
	[ -z "$$binary" ] || { echo "binary or empty, and outside golden/:" $$binary; exit 1; }; \
	echo 'ok    top level, and no binary outside golden/'
	@bad=0; for pair in $(BUDGETS); do file=$${pair%=*} most=$${pair#*=}; \
	  lines=$$(wc -l < $$file) || { bad=1; continue; }; \
	  over=; [ $$lines -le $$most ] || { bad=1; over=', too many'; }; \
	  printf 'lines %-24s %6d of %5d%s\n' $$file $$lines $$most "$$over"; \
	done; [ $$bad = 0 ]
	@tests/shape.sh
	@awk '{ line = $$0; \
	        while (match(line, />>[di][0-9][0-9]/)) { \
	          tag = substr(line, RSTART, RLENGTH); \
	          line = substr(line, RSTART + RLENGTH); \
	          if ($$0 ~ /===== >>/) rooms[tag]++; else listed[tag]++; \
	          all[tag] } } \
	      END { for (tag in all) if (rooms[tag] != 1 || listed[tag] != 1) { \
	              print "gpt2_zero.h: " tag " heads " rooms[tag] + 0 " rooms, is listed " \
	                    listed[tag] + 0 " times"; \
	              bad = 1 } \
	            if (!bad) print "ok    table of contents"; \
	            exit bad }' gpt2_zero.h
	@! grep -n 'g2z__\|G2Z__' $(EXTRAS) && ! grep -n 'include.*extras' gpt2_zero.h \
	  && echo 'ok    extras: public functions of the library alone'

# docs/flags.md has what --help prints without a GPU. Words replace this machine's number of cores.
check-flags: build/flags.md
	@diff docs/flags.md $< \
	  || { echo 'docs/flags.md is not what --help prints: make docs/flags.md'; exit 1; }
	@echo 'ok    docs/flags.md: the flags of the programs'
docs/flags.md: build/flags.md
	cp $< $@
build/flags.md: train prepare_data $(HERE)/bench
	@mkdir -p $(@D)
	@rm -f $@.partial; set -C; \
	{ printf '# Flags\n\nWritten by `make docs/flags.md`. '; \
	printf 'Brackets hold the value without the flag.\n'; \
	printf 'Each sub-command of `./bench` prints its own, as in `./bench scaling --help`.\n'; \
	for program in train bench prepare_data; do \
	  text=$$(CUDA_VISIBLE_DEVICES= ./$$program --help) || exit 1; \
	  printf '\n## ./%s\n\n```\n%s\n```\n' $$program "$$text" \
	    | sed 's/\(--threads N .*\)\[[0-9]*\]/\1[the number of cores]/'; \
	done; } > $@.partial && mv $@.partial $@

# README's pictures, from the figures in docs/pictures/*.txt.
PICTURES := $(wildcard docs/pictures/*.txt)
pictures: build/draw ## draw README's pictures again, after a change of docs/pictures/*.txt
	build/draw $(PICTURES)
build/draw: docs/pictures/draw.c gpt2_zero.h $(EXTRAS)
	@mkdir -p $(@D)
	$(CC) -std=c11 -O1 -I. $< -o $@ $(LIBS)
check-pictures: build/draw
	@rm -rf build/pictures && mkdir -p build/pictures && cp $(PICTURES) build/pictures
	@build/draw build/pictures/*.txt
	@for file in build/pictures/*.svg; do cmp $$file docs/pictures/$$(basename $$file) \
	  || { echo 'the pictures are not those of docs/pictures/*.txt: make pictures'; exit 1; }; done
	@echo "ok    docs/pictures: README's pictures"

# ----- data -------------------------------------------------------------------------------------

# $(call fetch,URL,SHA256) makes $@. The file gets this name only if its sha256 is right. After
# set -C the shell only creates files: it does not write through a link that lies at $@.partial.
define fetch
@mkdir -p $(@D)
@echo 'fetching $1'
@rm -f $@.partial; set -C; \
if command -v curl > /dev/null; then \
  curl -fSL $$([ -t 2 ] && echo -\# || echo -s) '$1' > $@.partial; \
elif command -v wget > /dev/null; then wget -q '$1' -O - > $@.partial; else \
  echo 'neither curl nor wget is here: apt-get install curl, or save $1 as $@ yourself'; exit 1; \
fi || { \
  rm -f $@.partial; \
  echo 'cannot fetch $1: check the network, or give another address (make help)'; \
  $(if $(WITHOUT),echo '$(WITHOUT)';) exit 1; }
@sum=$$( (sha256sum $@.partial || shasum -a 256 $@.partial) 2> /dev/null | cut -d ' ' -f 1); \
if [ "$$sum" != $2 ]; then \
  rm -f $@.partial; \
  echo "$1 has sha256 $$sum, but $2 was expected: another file, or a damaged one"; exit 1; fi
@mv $@.partial $@
endef

data/vocab.bpe data/tinyshakespeare.txt: WITHOUT := Without a network: make run, or your own text: \
  ./prepare_data --train-bpe 8000 --out data --name mine FILE.txt
vocab: data/vocab.bpe ## download GPT-2's merge list
data/vocab.bpe:
	$(call fetch,$(VOCAB_URL),$(VOCAB_SUM))

data: data/tinyshakespeare_train_000000.bin ## download a small public text and make shards of it
data/tinyshakespeare.txt:
	$(call fetch,$(DATA_URL),$(DATA_SUM))
data/tinyshakespeare_train_000000.bin: data/tinyshakespeare.txt data/vocab.bpe prepare_data
	./prepare_data --vocab data/vocab.bpe --out data --name tinyshakespeare --val-fraction 0.1 \
	  --overwrite $<
	@echo '# trains for 1 to 5 minutes on two CPU cores:'
	@echo "./train --train 'data/tinyshakespeare_train_*.bin' \\"
	@echo "        --val 'data/tinyshakespeare_val_*.bin' \\"
	@echo '        --vocab data/vocab.bpe --layers 4 --channels 128 --context 128'

GPT2_FILES := config.json vocab.json merges.txt model.safetensors
gpt2: $(addprefix gpt2/,$(GPT2_FILES)) ## download OpenAI's GPT-2 with 124M parameters (548 MB) into gpt2/
gpt2/%:
	$(call fetch,$(GPT2_URL)/$*,$(GPT2_SUM_$*))

# ----- the rest ---------------------------------------------------------------------------------

clean: ## remove what was built, and what make run, profile and bench left; not downloads and other runs
	rm -rf train bench prepare_data test_gpt2 build data/sources runs/sources runs/profile runs/bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'CC, CFLAGS: the compiler   NVCC, ARCH: for GPUs, make train ARCH=80'
	@echo 'VOCAB_URL, DATA_URL, GPT2_URL: the addresses of downloads'
	@echo 'make NVCC= builds for the CPU'

.PHONY: all FORCE run profile test bench readme mutants traces sanitize fuzz check check-header \
        check-nvcc check-cuda sanitize-cuda $(SANITIZED) check-compilers check-contents \
        check-flags check-pictures pictures vocab data gpt2 clean help
