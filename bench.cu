/* bench: what is fast on this machine, what is not, and why. Alone it times whole training steps,
 * then each op of a step against two limits measured in the same run: the rate of a large matrix
 * product and of a copy. Its sub-commands are experiments over several configurations: each runs in
 * processes of its own and leaves a run directory; `bench report` makes a page of them. */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_report.h"
#include "extras/g2z_run.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef G2Z_GIT_COMMIT
#define G2Z_GIT_COMMIT NULL /* the Makefile knows it */
#endif

#define TRY(call)                          \
  do {                                     \
    g2z_status status_ = (call);           \
    if (status_ != G2Z_OK) return status_; \
  } while (0)

/* ----- sub-commands ----------------------------------------------------- */

typedef struct options options;
typedef g2z_status command_run(g2z_services *services, options *o, g2z_context_config *config);
static command_run run_step, run_ops, run_experiment, run_report, run_profile, run_point,
    run_exchange;

/* The first is what bench does without a sub-command. Those without a description are not for
 * people: the ranks that an experiment starts run them. */
#define COMMAND_LIST(X)                                                                           \
  /* name       run             what it does */                                                   \
  X(step,       run_step,       "one configuration: training steps, then each op of a step")      \
  X(ops,        run_ops,        "each op of a step against this machine's limits")                \
  X(scaling,    run_experiment, "the same work on 1, 2, 4, ... ranks: speed-up and efficiency")   \
  X(buckets,    run_experiment, "sizes of gradient buckets: what communication hides, what not")  \
  X(matrix,     run_experiment, "ZeRO stages by precision: throughput, memory, utilisation")      \
  X(strategies, run_experiment, "one optimizer (dp) and ZeRO stages, on 1, 2, 4 ranks")           \
  X(comm,       run_experiment, "each collective against a plain copy")                           \
  X(report,     run_report,     "DIR...: experiments and runs as a page, report.html")            \
  X(profile,    run_profile,    "DIR...: what took most in runs that were profiled")              \
  X(point,      run_point,      NULL)                                                             \
  X(exchange,   run_exchange,   NULL)

enum {
#define X(name, run, about) COMMAND_##name,
  COMMAND_LIST(X)
#undef X
  COMMAND_COUNT
};
static const struct {
  const char *name, *about;
  command_run *run;
} commands[] = {
#define X(name, run, about) {#name, about, run},
    COMMAND_LIST(X)
#undef X
};

/* ----- options ---------------------------------------------------------- */

struct options {
  g2z_train_config train;
  int command, argc;
  char **argv;                            /* of READERS: the directories are argv[1..argc-1] */
  char *command_line;
  const char *model, *peer, *out, *run_dir;
  const char *rank_list, *stage_list, *dtype_list, *size_list;
  g2z_model_config shape;                 /* what overrides the model's; 0: see --help */
  int seq;                                /* 0: the model's context */
  int device, dtype, steps, without_ops, help;
  int warmup, repeats, global_batch, val_steps;
  int64_t tokens;
  float bucket_mb;
};

#define IN(name) (1u << COMMAND_##name)
#define EXPERIMENTS (IN(scaling) | IN(buckets) | IN(matrix) | IN(strategies))
#define STEPPING (IN(step) | EXPERIMENTS | IN(point))
#define TRAINING (STEPPING | IN(ops)) /* whose ops are those of a step */
#define SWEEPS (EXPERIMENTS | IN(comm))
#define READERS (IN(report) | IN(profile)) /* their arguments are directories */
#define ANY ((1u << COMMAND_COUNT) - 1)
#define STEPS_MAX 100000000
#define SIZE_LEAST 0.001 /* MiB */

#define WORD(name, text) "|" text
#define WORD_OF_3(name, text, bytes) "|" text
/* Every flag of every sub-command, once. A name that stands twice takes one value in some and a
 * list in others. */
#define FLAG_LIST(FLAG)                                                                           \
  /*   in  name  kind  destination  minimum  maximum  value  help */                              \
  FLAG(SWEEPS, "gpus", TEXT, rank_list, 0, 0, "LIST",                                             \
       "numbers of ranks, each with a GPU or a share of the CPU, or all")                         \
  FLAG(EXPERIMENTS, "zero", TEXT, stage_list, 0, 0, "LIST",                                       \
       "ZeRO stages; dp: one rank has the optimizer")                                             \
  FLAG(EXPERIMENTS, "dtype", TEXT, dtype_list, 0, 0, "LIST", "fp32, tf32, fp16, bf16")            \
  FLAG(EXPERIMENTS, "sizes", TEXT, size_list, 0, 0, "LIST",                                       \
       "MiB of gradients per collective; 0: the default")                                         \
  FLAG(IN(comm) | IN(exchange), "sizes", TEXT, size_list, 0, 0, "LIST", "MiB of a whole buffer")  \
  FLAG(TRAINING, "model", TEXT, model, 0, 0, "NAME",                                              \
       "gpt2, gpt2-medium, gpt2-large, gpt2-xl [gpt2 on cuda; on cpu a small one]")               \
  FLAG(TRAINING, "layers", INT, shape.layers, 1, 1024, "N",                                       \
       "overrides the model's, as do the next four")                                              \
  FLAG(TRAINING, "channels", INT, shape.channels, 8, 65536, "N", "width of the residual stream")  \
  FLAG(TRAINING, "heads", INT, shape.heads, 1, 65536, "N", "divides channels [channels / 64]")    \
  FLAG(TRAINING, "context", INT, shape.context, 1, 1048576, "N",                                  \
       "positions: the longest sequence")                                                         \
  FLAG(TRAINING, "vocab-size", INT, shape.vocab, 2, 65536, "N", "tokens that the model knows")    \
  FLAG(EXPERIMENTS, "global-batch", INT, global_batch, 1, 2147483647, "N",                        \
       "sequences per step on any number of ranks: --batch limits a micro-step, --accum follows") \
  FLAG(TRAINING, "batch", INT, train.batch, 1, 1048576, "N", "sequences per micro-step and rank") \
  FLAG(TRAINING & ~EXPERIMENTS, "seq", INT, seq, 1, 1048576, "N",                                 \
       "tokens per sequence [context]")                                                           \
  FLAG(EXPERIMENTS, "seq", INT, seq, 1, 1048576, "N", "tokens per sequence")                      \
  FLAG(TRAINING, "accum", INT, train.accum, 1, 1048576, "N", "micro-steps per step")              \
  FLAG(TRAINING, "dropout", FLOAT, train.dropout, 0, 0.99, "P",                                   \
       "on embedding, attention, projections")                                                    \
  FLAG(STEPPING, "train", TEXT, train.train_glob, 0, 0, "GLOB",                                   \
       "token shards [tokens by Zipf's law]")                                                     \
  FLAG(STEPPING, "steps", INT, steps, 1, STEPS_MAX, "N", "steps that are timed")                  \
  FLAG(EXPERIMENTS, "tokens", INT64, tokens, 1, 1e15, "N", "instead of --steps, over all ranks")  \
  FLAG(EXPERIMENTS | IN(point), "warmup", INT, warmup, 0, 1000000, "N", "steps before those")     \
  FLAG(EXPERIMENTS | IN(point), "val-steps", INT, val_steps, 1, 1000000, "N",                     \
       "batches of a validation at the end")                                                      \
  FLAG(SWEEPS, "repeats", INT, repeats, 1, G2Z_REPEATS, "N",                                      \
       "runs of each point, one round after the other")                                           \
  FLAG(TRAINING | IN(comm) | IN(exchange), "device", CHOICE, device, 0, 0,                        \
       G2Z_DEVICE_LIST(WORD), "[cuda if there is one]")                                           \
  FLAG(ANY & ~EXPERIMENTS & ~READERS, "dtype", CHOICE, dtype, 0, 0,                            \
       G2Z_DTYPE_LIST(WORD_OF_3), "[fp16 on cuda, fp32 on cpu]")                                  \
  FLAG(STEPPING, "graph", CHOICE, train.graph, 0, 0, "|off|on|auto", "the step as CUDA graphs") \
  FLAG(TRAINING & ~EXPERIMENTS, "zero", INT, train.zero_stage, 0, 3, "STAGE",                     \
       "ZeRO, on several ranks")                                                                  \
  FLAG(TRAINING & ~EXPERIMENTS, "strategy", CHOICE, train.strategy, 0, 0,                         \
       G2Z_STRATEGY_LIST(WORD), "dp: one rank has the optimizer; with --zero 0")                  \
  FLAG(TRAINING, "fp8", CHOICE, train.fp8, 0, 0, G2Z_FP8_LIST(WORD),                              \
       "Hopper: 8-bit products make logits; forward: linear ops too; all: data gradients too")    \
  FLAG(TRAINING, "recompute", CHOICE, train.recompute, 0, 0, G2Z_RECOMPUTE_LIST(WORD),            \
       "block: keep the input of each block alone")                                               \
  FLAG(TRAINING, "grad-dtype", CHOICE, train.grad_fp32, 0, 0, "|same|fp32", "of gradients")       \
  FLAG(TRAINING, "transport", CHOICE, train.transport, 0, 0, G2Z_TRANSPORT_LIST(WORD),            \
       "between GPUs")                                                                            \
  FLAG(TRAINING & ~EXPERIMENTS, "bucket-mb", FLOAT, bucket_mb, SIZE_LEAST, 65536, "X",            \
       "MiB of gradients per collective")                                                         \
  FLAG(IN(step), "peer", TEXT, peer, 0, 0, "COMMAND",                                             \
       "run this on the same work too: 'python3 peers/torch_gpt2.py'")                            \
  FLAG(IN(step), "ops", CHOICE, without_ops, 0, 0, "|on|off",                                     \
       "time each op of a step, on one rank")                                                     \
  FLAG(TRAINING, "seed", UINT64, train.seed, 0, 0, "N", "of weights, tokens and dropout")         \
  FLAG(SWEEPS | IN(report), "out", TEXT, out, 0, 0, "DIR",                                        \
       "where the results go [experiments: runs/bench_NAME_TIME; report: the first DIR]")         \
  FLAG(IN(point) | IN(exchange), "run-dir", TEXT, run_dir, 0, 0, "DIR", "where it leaves them")   \
  FLAG(ANY, "help", SWITCH, help, 0, 0, "", "print this")

/* The defaults of a sub-command. On a CPU they are the least that shows the whole path. */
#define WORK_LIST(X)                                                                              \
  /* command, device  ranks  stages  dtypes  sizes  batch accum global seq steps warmup repeats   \
   *                  val graph */                                                                \
  X(scaling,    CUDA, "1,2,4,8", "1",       "fp16", "0", 4, 1, 16, 512, 300, 20, 3, 0, 2)         \
  X(scaling,    CPU,  "1,2",     "1",       "fp32", "0", 4, 1, 8, 64, 6, 2, 2, 0, 2)              \
  X(buckets,    CUDA, "all", "1", "fp16", "1,5,25,100,400", 4, 1, 0, 512, 300, 20, 3, 0, 2)       \
  X(buckets,    CPU,  "2",   "1", "fp32", "0.25,1,4",       4, 1, 0, 64, 6, 2, 2, 0, 0)           \
  X(matrix,     CUDA, "all", "0,1,2,3", "fp16,bf16,fp32", "0", 32, 1, 0, 128, 200, 20, 5, 0, 2)   \
  X(matrix,     CPU,  "2",   "0,1,2,3", "fp16,bf16,fp32", "0", 4, 1, 0, 32, 4, 2, 2, 0, 2)        \
  X(strategies, CUDA, "1,2,4", "dp,0,2,3", "fp16", "0", 2, 2, 0, 512, 300, 20, 3, 50, 2)          \
  X(strategies, CPU,  "1,2",   "dp,0,2,3", "fp32", "0", 2, 2, 0, 32, 4, 2, 2, 2, 0)               \
  X(comm,       CUDA, "all", "", "", "1,4,16,64,256", 1, 1, 0, 1, 1, 0, 3, 0, 2)                  \
  X(comm,       CPU,  "2",   "", "", "1,4,16", 1, 1, 0, 1, 1, 0, 2, 0, 2)

static options default_options(int command, g2z_device_kind kind) {
  options o;
  memset(&o, 0, sizeof o);
  o.train = g2z_train_config_default();
  o.command = command;
  o.device = o.dtype = -1;
  o.steps = 10;
#define X(name, device, ranks, stages, dtypes, sizes, batch_, accum_, global, seq_, steps_, \
          warmup_, repeats_, val, graph_)                                                   \
  if (command == COMMAND_##name && kind == G2Z_DEVICE_##device) {                           \
    o.rank_list = ranks;                                                                    \
    o.stage_list = stages;                                                                  \
    o.dtype_list = dtypes;                                                                  \
    o.size_list = sizes;                                                                    \
    o.train.batch = batch_;                                                                 \
    o.train.accum = accum_;                                                                 \
    o.train.graph = graph_;                                                                 \
    o.global_batch = global;                                                                \
    o.seq = seq_;                                                                           \
    o.steps = steps_;                                                                       \
    o.warmup = warmup_;                                                                     \
    o.repeats = repeats_;                                                                   \
    o.val_steps = val;                                                                      \
  }
  WORK_LIST(X)
#undef X
  return o;
}

static void print_line(void *user, const char *text) {
  (void)user;
  puts(text);
}

#define FLAG(in, name, kind, destination, minimum, maximum, value, help) +1
enum { FLAG_COUNT = 0 FLAG_LIST(FLAG) };
#undef FLAG

/* The flags of o->command, with destinations in o. */
static int flags_of(options *o, g2z_flag flags[FLAG_COUNT]) {
#define FLAG(in, name, kind, destination, minimum, maximum, value, help) \
  {in, {name, G2Z_FLAG_##kind, &o->destination, minimum, maximum, value, help}},
  const struct {
    unsigned in;
    g2z_flag flag;
  } all[] = {FLAG_LIST(FLAG)};
#undef FLAG
  int count = 0;
  for (int i = 0; i < FLAG_COUNT; i++)
    if (all[i].in & (1u << o->command)) flags[count++] = all[i].flag;
  return count;
}

static void print_help(options *o) {
  g2z_flag flags[FLAG_COUNT];
  const char *about = commands[o->command].about;
  const int whole = o->command == COMMAND_step;
  printf("bench%s%s: %s\n", whole ? "" : " ", whole ? "" : commands[o->command].name,
         about ? about : "what an experiment starts its ranks with");
  if (whole) puts("\nSub-commands, each with a --help of its own:");
  for (int c = 1; c < COMMAND_COUNT && whole; c++)
    if (commands[c].about) printf("  %-12s %s\n", commands[c].name, commands[c].about);
  puts("");
  g2z_flags_print(flags, flags_of(o, flags), print_line, NULL);
}

/* argv[1] may name a sub-command. Flags are read twice: --device decides what the others start
 * from. The first time --steps starts from 0, so that it shows whether it is given. Directories are
 * moved to the front of argv: flags beside them are read once. */
static g2z_status read_flags(g2z_services *services, int argc, char **argv, options *o) {
  int command = COMMAND_step, rest = 0;
  g2z_flag flags[FLAG_COUNT];
  if (argc > 1 && argv[1][0] != '-') {
    for (command = 0; command < COMMAND_COUNT; command++)
      if (strcmp(argv[1], commands[command].name) == 0) break;
    if (command == COMMAND_COUNT)
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "%.80s is no sub-command: bench --help lists "
                      "them", argv[1]);
    argc--;
    argv++;
  }
  const int reader = (READERS >> command & 1) != 0;
  g2z_device_kind kind = g2z_device_count(G2Z_DEVICE_CUDA) ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU;
  for (int pass = reader; pass < 2; pass++) {
    *o = default_options(command, kind);
    if (pass == 0) o->steps = 0;
    TRY(g2z_flags_parse(services, flags, flags_of(o, flags), argc, argv, reader ? &rest : NULL));
    if (o->device >= 0) kind = (g2z_device_kind)o->device;
    if (pass == 0 && o->tokens && o->steps)
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "--tokens and --steps both set the length: give "
                      "one of them");
  }
  o->argc = rest + 1;
  o->argv = argv;
  if (!o->help) return G2Z_OK;
  *o = default_options(command, kind);
  print_help(o);
  o->help = 1;
  return G2Z_OK;
}

static g2z_status settle(g2z_services *services, options *o, g2z_context_config *context) {
  g2z_model_config *model = &o->train.model;
  TRY(g2z_place_find(services, &context->ranks.place));
  o->train.bucket_mb = o->bucket_mb;
  if (o->device >= 0) context->device = (g2z_device_kind)o->device;
  int small = !o->model && context->device == G2Z_DEVICE_CPU;
  TRY(g2z_model_config_named(services, o->model ? o->model : "gpt2", model));
  if (small) {
    model->layers = 4;
    model->channels = 128;
    model->heads = 2;
    model->context = o->seq > 128 ? o->seq : 128;
    model->vocab = 2048;
  }
  g2z_model_config_override(model, &o->shape);
  o->train.seq = o->seq ? o->seq : model->context;
  o->train.dtype = o->dtype >= 0 ? (g2z_dtype)o->dtype
                   : context->device == G2Z_DEVICE_CUDA ? G2Z_FP16 : G2Z_FP32;
  o->train.optimizer.warmup = 0;
  return G2Z_OK;
}

static void *host_memory(size_t bytes) {
  void *memory = malloc(bytes);
  if (memory) return memory;
  fprintf(stderr, "bench: no memory for %zu bytes: take a smaller --batch or --seq\n", bytes);
  exit(1);
}

/* ----- lists in flags ----------------------------------------------------- */

#define LIST_MAX 16

typedef struct axis {           /* what the list of a flag says */
  double at[LIST_MAX];
  int count;
} axis;

/* The index of a word among those of "|fp32|tf32|..."; -1: it is none. */
static int find_word(const char *words, const char *word, size_t length) {
  int index = 0;
  for (const char *at = words; at; at = strchr(at + 1, '|'), index++)
    if (strcspn(at + 1, "|") == length && memcmp(at + 1, word, length) == 0) return index;
  return -1;
}

/* A number from least to most in text[0..length), as it stands: strtod would skip spaces. */
static int read_entry(const char *text, size_t length, double least, double most, double *out) {
  char *end;
  if (!length || isspace((unsigned char)*text)) return 0;
  *out = strtod(text, &end);
  return end == text + length && *out >= least && *out <= most;
}

/* "1,2,4": numbers from least to most; or "fp16,bf16": the indices of words among `words`. None
 * stands there twice: it would be measured twice under one name. */
static g2z_status read_list(g2z_services *services, const char *flag, const char *text,
                            const char *words, double least, double most, axis *out) {
  const char *at = text;
  for (out->count = 0;; at++) {
    size_t length = strcspn(at, ",");
    double entry = words ? find_word(words, at, length) : 0;
    if (words && (entry < 0 || out->count == LIST_MAX))
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "--%s %.80s: up to %d of %s are wanted, with "
                      "commas alone between them", flag, text, LIST_MAX, words + 1);
    if (out->count == LIST_MAX)
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "--%s %.80s: more than %d numbers", flag, text,
                      LIST_MAX);
    if (!words && !read_entry(at, length, least, most, &entry))
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "--%s %.80s: numbers from %g to %g are wanted, "
                      "with commas alone between them, as in %g,%g", flag, text, least, most, least,
                      least + 1);
    for (int i = 0; i < out->count; i++)
      if (out->at[i] == entry)
        return g2z_fail(services, G2Z_BAD_ARGUMENT, "--%s %.80s: %.*s is there already: give each "
                        "once", flag, text, (int)length, at);
    out->at[out->count++] = entry;
    at += length;
    if (!*at) return G2Z_OK;
  }
}

/* Bytes of an element of a device's dtype: a CPU stores all in fp32. */
static size_t element_bytes(const g2z_device *device) {
  int half = device->dtype == G2Z_FP16 || device->dtype == G2Z_BF16;
  return device->kind == G2Z_DEVICE_CUDA && half ? 2 : 4;
}

/* ----- whole steps ------------------------------------------------------ */

/* Real text repeats a few tokens often, which is what makes the embedding's backward slow: rank r
 * is drawn with a probability proportional to 1 / r. */
static void zipf_tokens(uint64_t seed, int vocab, int32_t *tokens, size_t count) {
  double *below = (double *)host_memory((size_t)vocab * sizeof *below), sum = 0;
  for (int r = 0; r < vocab; r++) below[r] = sum += 1.0 / (r + 1);
  for (size_t i = 0; i < count; i++) {
    uint32_t counter[4] = {(uint32_t)(i / 4), (uint32_t)((uint64_t)i >> 34), 0, 0}, bits[4];
    g2z_philox(seed, G2Z_RANDOM_SYNTHETIC, counter, bits);
    double draw = (double)g2z_uniform(bits[i % 4]) * sum;
    int low = 0, high = vocab - 1;
    while (low < high) {
      int middle = (low + high) / 2;
      if (below[middle] > draw) high = middle;
      else low = middle + 1;
    }
    tokens[i] = low;
  }
  free(below);
}

typedef struct stopwatch {      /* of the steps that count */
  double *step_s;
  double *exposed_s, *waited_s; /* communication; with slower ranks, where most */
  int count;
  double collectives;           /* in the second step; NaN: there was none */
  double began, ended, cpu_s;   /* of this rank */
  char hardware[256];
} stopwatch;

static void open_watch(stopwatch *w, int steps) {
  memset(w, 0, sizeof *w);
  w->collectives = NAN;
  w->step_s = (double *)host_memory(3 * (size_t)steps * sizeof(double));
  w->exposed_s = w->step_s + steps;
  w->waited_s = w->exposed_s + steps;
}

/* values[i] of step i becomes the least over all ranks, most[i] the most. Every rank waits for
 * communication; what a rank waits beyond the least, it waits for a slower rank. */
static g2z_status over_ranks(g2z_context *context, double *values, double *most, int count) {
  const size_t size = (size_t)count * sizeof *values;
  double *all = (double *)host_memory((size_t)context->world * size);
  g2z_status status = g2z_ranks_all_gather(context->ranks, values, size, all);
  memcpy(most, values, size);
  for (int i = 0; i < context->world * count && status == G2Z_OK; i++) {
    values[i % count] = fmin(values[i % count], all[i]);
    most[i % count] = fmax(most[i % count], all[i]);
  }
  free(all);
  return status;
}

static g2z_status time_steps(g2z_context *context, const options *o, stopwatch *w) {
  const int warm = 2; /* pages are touched, caches filled, algorithms chosen */
  size_t count = (size_t)o->train.accum * (size_t)o->train.batch * (size_t)o->train.seq;
  int32_t *tokens = (int32_t *)host_memory((count + 1) * sizeof *tokens);
  g2z_trainer *trainer = NULL;
  g2z_report report;
  zipf_tokens(o->train.seed, o->train.model.vocab, tokens, count + 1);
  g2z_status status = g2z_trainer_create(context, &o->train, &trainer);
  for (int step = -warm; step < o->steps && status == G2Z_OK; step++) {
    double begin = g2z_seconds();
    status = o->train.train_glob
                 ? g2z_trainer_step(trainer, &report)
                 : g2z_trainer_step_batch(trainer, tokens, tokens + 1, &report);
    if (step < 0) continue;
    w->step_s[w->count] = g2z_seconds() - begin;
    w->exposed_s[w->count++] = report.exposed_comm_ms * 1e-3;
  }
  if (status == G2Z_OK) status = g2z_trainer_flush(trainer, &report);
  if (status == G2Z_OK) status = over_ranks(context, w->exposed_s, w->waited_s, w->count);
  g2z_trainer_free(trainer);
  free(tokens);
  return status;
}

/* ----- ops -------------------------------------------------------------- */

/* Seconds per call: one call that does not count, then five rounds of at least 10 ms each. */
typedef struct rounds {
  double s[5], begin;           /* of each round; sorted when another_call ends */
  int round, calls, left;       /* rounds that ended; calls of each; calls left of this one */
} rounds;

/* 1: call once more. 0: five rounds have ended, or *status is a failure. */
static int another_call(rounds *r, g2z_device *d, const g2z_ops *op, g2z_status *status) {
  if (*status != G2Z_OK) return 0;
  if (r->left > 0) {
    r->left--;
    return 1;
  }
  *status = op->synchronize(d);
  double now = g2z_seconds(), spent = now - r->begin;
  if (*status != G2Z_OK) return 0;
  if (r->calls == 0) r->calls = 1;
  else {
    r->s[r->round] = spent / r->calls;
    if (spent < 0.01 && r->round == 0) r->calls *= 2;
    else r->round++;
  }
  if (r->round == 5) g2z_median(r->s, 5); /* sorts */
  if (r->round == 5) return 0;
  r->left = r->calls - 1;
  r->begin = g2z_seconds();
  return 1;
}

typedef struct op_row {
  char name[32];
  const char *unit, *formula;   /* of the amount: "GFLOP" or "GB" */
  double calls, amount;         /* calls in a step; what one call does at least */
  int again;                    /* 1: a repeated call leaves the same values */
  rounds timed;
  double seconds, limit_s;      /* of one call: as timed, and at the machine's limit */
} op_row;

/* A trainer's device with this table in place of its own sees each op that a step calls, with the
 * arguments of the step. A step that counts comes first. Then one step times all rows that may
 * repeat their call, and a step for each other row: a call that adds to its output spoils what
 * comes after it in the step, though not the weights before AdamW, which is the last row. */
typedef struct watch {
  g2z_ops ops;                  /* the first member: device->ops points here */
  const g2z_ops *right;         /* the device's own */
  int counts;                   /* 1: this step counts calls and times none */
  const op_row *only;           /* the row that this step times; NULL: all that may repeat */
  double a, g;                  /* bytes of an element of activations and of gradients */
  op_row rows[32];
  int count;
} watch;

static watch *watch_of(g2z_device *d) { return (watch *)d->ops; }

/* The row of a call; NULL: the call is not timed now. */
static rounds *rounds_of(watch *w, const char *name, const char *suffix, const char *unit,
                         const char *formula, double amount, int again) {
  op_row *row = w->rows;
  char whole[32];
  snprintf(whole, sizeof whole, "%.15s%.15s", name, suffix);
  while (row < w->rows + w->count && (strcmp(row->name, whole) != 0 || row->amount != amount))
    row++;
  if (row == w->rows + sizeof w->rows / sizeof *w->rows) return NULL;
  if (row == w->rows + w->count) {
    w->count++;
    memcpy(row->name, whole, sizeof whole);
    row->unit = unit;
    row->formula = formula;
    row->amount = amount;
    row->again = again;
  }
  if (w->counts) row->calls++;
  const int now = !w->counts && row->timed.round == 0 && (w->only ? row == w->only : row->again);
  return now ? &row->timed : NULL;
}

/* Which of a block's four products has weights [K,O]. */
static const char *product_of(int K, int O) {
  return O == 3 * K ? "qkv" : O == 4 * K ? "fc" : K == 4 * O ? "fcproj" : "attproj";
}

static double elements_of(const g2z_range *ranges, int count) {
  double elements = 0;
  for (int i = 0; i < count; i++) elements += (double)ranges[i].elements;
  return elements;
}

static double elements_of_update(const g2z_update *update, size_t begin, size_t end) {
  double elements = 0;
  for (size_t i = begin; i < end; i++) elements += (double)update->host_ranges[i].elements;
  return elements;
}

/* Each op that a step calls: parameters and arguments as in g2z_ops, the two parts of its row's
 * name, the unit, what one call does at least, and whether it may be repeated. The formulas are
 * printed as they stand here; a and g are the bytes of an element of activations and of
 * gradients. */
#define OP_LIST(OP)                                                                               \
  OP(embed_fwd,                                                                                   \
     (g2z_device *d, void *out, const int32_t *tokens, const void *wte, const void *wpe,          \
      const g2z_dropout *dropout, int B, int T, int C),                                           \
     (d, out, tokens, wte, wpe, dropout, B, T, C),                                                \
     "embed", "_fwd", GB, 2 * a * B * T * C, 1)                                                   \
  OP(layernorm_fwd,                                                                               \
     (g2z_device *d, void *y, void *narrow, float *mean, float *rstd, const void *x,              \
      const void *w, const void *b, int N, int C),                                                \
     (d, y, narrow, mean, rstd, x, w, b, N, C),                                                   \
     "layernorm", "_fwd", GB, 2 * a * N * C, 1)                                                   \
  OP(linear_fwd,                                                                                  \
     (g2z_device *d, void *y, void *narrow_y, void *slope, const void *x, const void *narrow_x,   \
      const void *w, const void *bias, const void *residual, const g2z_dropout *dropout, int N,   \
      int K, int O),                                                                              \
     (d, y, narrow_y, slope, x, narrow_x, w, bias, residual, dropout, N, K, O),                   \
     product_of(K, O), slope ? "_gelu_fwd" : "_fwd", GFLOP, 2.0 * N * K * O, y != residual)       \
  OP(attention_fwd,                                                                               \
     (g2z_device *d, void *out, void *narrow, float *lse, const void *qkv,                        \
      const g2z_dropout *dropout, int B, int T, int C, int NH),                                   \
     (d, out, narrow, lse, qkv, dropout, B, T, C, NH),                                            \
     "attention", "_fwd", GFLOP, 2.0 * B * T * T * C, 1)                                          \
  OP(head_loss,                                                                                   \
     (g2z_device *d, float *losses, double *loss_sum, void *dh, void *dwte, g2z_dtype dwte_dtype, \
      void *logits, const void *h, const void *wte, const int32_t *targets, float dloss,          \
      const g2z_step_state *state, g2z_write mode, int N, int C, int V, int Vp, int chunk),       \
     (d, losses, loss_sum, dh, dwte, dwte_dtype, logits, h, wte, targets, dloss, state, mode, N,  \
      C, V, Vp, chunk),                                                                           \
     "head", "_loss", GFLOP, 6.0 * N * C * Vp, mode == G2Z_OVERWRITE)                             \
  OP(layernorm_bwd,                                                                               \
     (g2z_device *d, void *dres, void *dropped, void *dw, void *db, void *dbias, const void *dy,  \
      const void *x, const void *w, const float *mean, const float *rstd, g2z_write res_mode,     \
      g2z_write mode, const g2z_dropout *dropout, int N, int C),                                  \
     (d, dres, dropped, dw, db, dbias, dy, x, w, mean, rstd, res_mode, mode, dropout, N, C),      \
     "layernorm", res_mode == G2Z_OVERWRITE ? "_bwd_last" : "_bwd", GB,                           \
     (res_mode == G2Z_OVERWRITE ? 3 : 4) * a * N * C, res_mode == G2Z_OVERWRITE)                  \
  OP(linear_bwd_data,                                                                             \
     (g2z_device *d, void *dx, void *dbias, const void *dy, const void *w, const void *slope,     \
      void *narrow, g2z_write mode, int N, int K, int O),                                         \
     (d, dx, dbias, dy, w, slope, narrow, mode, N, K, O),                                         \
     product_of(K, O), "_bwd_data", GFLOP, 2.0 * N * K * O, mode == G2Z_OVERWRITE)                \
  OP(linear_bwd_weight,                                                                           \
     (g2z_device *d, void *dw, const void *x, const void *dy, g2z_write mode, int N, int K,       \
      int O),                                                                                     \
     (d, dw, x, dy, mode, N, K, O),                                                               \
     product_of(K, O), "_bwd_weight", GFLOP, 2.0 * N * K * O, mode == G2Z_OVERWRITE)              \
  OP(attention_bwd,                                                                               \
     (g2z_device *d, void *dqkv, void *narrow, void *dbias, const void *dout, const void *out,    \
      const float *lse, const void *qkv, g2z_write mode, const g2z_dropout *dropout, int B,       \
      int T, int C, int NH),                                                                      \
     (d, dqkv, narrow, dbias, dout, out, lse, qkv, mode, dropout, B, T, C, NH),                   \
     "attention", "_bwd", GFLOP, 5.0 * B * T * T * C, mode == G2Z_OVERWRITE)                      \
  OP(embed_bwd,                                                                                   \
     (g2z_device *d, float *dwte, void *dwpe, const void *dout, const int32_t *tokens,            \
      g2z_write mode, const g2z_dropout *dropout, int B, int T, int C),                           \
     (d, dwte, dwpe, dout, tokens, mode, dropout, B, T, C),                                       \
     "embed", dwte ? "_bwd" : "_bwd_wpe", GB, (dwte ? a + 8 : a) * B * T * C, !dwte)              \
  OP(embed_order, (g2z_device *d, int32_t *order, const int32_t *tokens, int N),                  \
     (d, order, tokens, N), "embed", "_order", GB, 12.0 * N, 1)                                   \
  OP(embed_add,                                                                                   \
     (g2z_device *d, void *grads, const g2z_row_part *parts, int count, const void *rows,         \
      const int32_t *order, int N, int C),                                                        \
     (d, grads, parts, count, rows, order, N, C), "embed", "_add", GB, (a + 2 * g) * N * C, 0)    \
  OP(cast_grad, (g2z_device *d, void *to, const float *from, size_t n), (d, to, from, n),         \
     "cast", "_grad", GB, (4 + g) * (double)n, 1)                                                 \
  OP(zero, (g2z_device *d, void *memory, size_t bytes), (d, memory, bytes), "zero", "", GB,       \
     (double)bytes, 1)                                                                            \
  OP(grad_sumsq,                                                                                  \
     (g2z_device *d, double *sum, const void *grads, const g2z_range *ranges, int count),         \
     (d, sum, grads, ranges, count),                                                              \
     "grad", "_sumsq", GB, g * elements_of(ranges, count), 0)                                     \
  OP(adamw, (g2z_device *d, const g2z_update *update, size_t begin, size_t end),                  \
     (d, update, begin, end),                                                                     \
     "adamw", "", GB, (24 + g + a) * elements_of_update(update, begin, end), 0)

#define OP(entry, parameters, arguments, name, suffix, unit, amount, again)                   \
  static g2z_status timed_##entry parameters {                                                \
    watch *seen = watch_of(d);                                                                \
    const double a = seen->a, g = seen->g;                                                    \
    (void)a;                                                                                  \
    (void)g;                                                                                  \
    rounds *now = rounds_of(seen, name, suffix, #unit, #amount, amount, again);               \
    g2z_status status = seen->right->entry arguments;                                         \
    while (now && another_call(now, d, seen->right, &status))                                 \
      status = seen->right->entry arguments;                                                  \
    return status;                                                                            \
  }
OP_LIST(OP)
#undef OP

static int order_of_gaps(const void *a, const void *b) {
  const op_row *x = (const op_row *)a, *y = (const op_row *)b;
  double left = x->calls * (x->seconds - x->limit_s), right = y->calls * (y->seconds - y->limit_s);
  return left > right ? -1 : left < right;
}

/* Steps of the trainer: one that counts, then those that time rows. The first of them run until no
 * gradient overflows: AdamW does nothing in a step that is skipped. */
static g2z_status watch_steps(g2z_trainer *t, watch *w, const int32_t *tokens) {
  g2z_report report;
  report.skipped = 1;
  for (int i = 0; i < 50 && report.skipped; i++) {
    TRY(g2z_trainer_step_batch(t, tokens, tokens + 1, &report));
    TRY(g2z_trainer_flush(t, &report));
  }
  w->right = t->device->ops;
  w->ops = *w->right;
#define OP(entry, parameters, arguments, name, suffix, unit, amount, again) \
  w->ops.entry = timed_##entry;
  OP_LIST(OP)
#undef OP
  t->device->ops = &w->ops;
  g2z_status status = G2Z_OK;
  for (int i = -2; i < w->count && status == G2Z_OK; i++) {
    w->counts = i == -2;
    w->only = i < 0 ? NULL : &w->rows[i];
    if (i >= 0 && w->rows[i].again) continue;
    status = g2z_trainer_step_batch(t, tokens, tokens + 1, &report);
  }
  if (status == G2Z_OK) status = g2z_trainer_flush(t, &report);
  t->device->ops = w->right;
  return status;
}

/* What a large product and a copy reach: the best of five rounds each. Noise, since zeros would
 * flatter a GPU, whose clock follows the load. */
static g2z_status measure_limits(g2z_device *d, int side, double *product_rate,
                                 double *copy_rate) {
  enum { COPY = 1 << 24 };      /* elements that fit no cache */
  const g2z_ops *op = d->ops;
  const size_t matrix = (size_t)side * (size_t)side * sizeof(float);
  const size_t copies = COPY * sizeof(float);
  rounds product, copy;
  void *block = NULL;
  memset(&product, 0, sizeof product);
  memset(&copy, 0, sizeof copy);
  float *host = (float *)host_memory(copies);
  for (size_t i = 0; i < COPY; i += 4) {
    uint32_t counter[4] = {(uint32_t)(i / 4), 0, 1, 0}, bits[4];
    g2z_philox(1, G2Z_RANDOM_SYNTHETIC, counter, bits);
    for (int k = 0; k < 4; k++) host[i + (size_t)k] = 0.2f * (g2z_uniform(bits[k]) - 0.5f);
  }
  g2z_status status = op->allocate(d, 2 * copies + 2 * matrix, &block);
  float *noise = (float *)block;
  char *out = (char *)block + copies, *left = out + copies, *right = left + matrix;
  if (status == G2Z_OK) status = op->upload(d, noise, host, copies);
  if (status == G2Z_OK) status = op->cast_act(d, left, noise, matrix / sizeof(float));
  if (status == G2Z_OK) status = op->cast_act(d, right, noise, matrix / sizeof(float));
  do {
    if (status == G2Z_OK)
      status = op->linear_fwd(d, out, NULL, NULL, left, NULL, right, left, NULL, NULL, side, side,
                              side);
  } while (another_call(&product, d, op, &status));
  do {
    if (status == G2Z_OK) status = op->cast_act(d, out, noise, COPY);
  } while (another_call(&copy, d, op, &status));
  if (block) op->release(d, block);
  free(host);
  *product_rate = 2.0 * side * (double)side * side / product.s[0];
  *copy_rate = (double)COPY * (double)(4 + element_bytes(d)) / copy.s[0];
  return status;
}

/* Each op of a step against its limit, the largest gap first: in ns per token of the step. step_s
 * NaN: shares are of the ops' sum. */
static g2z_status time_ops(g2z_trainer *t, const options *o, double step_s) {
  const g2z_plan *plan = t->plan;
  const int side = plan->device == G2Z_DEVICE_CUDA ? 4096 : 1024;
  const double tokens = (double)plan->batch * plan->seq * plan->accum;
  double product_rate, copy_rate, sum_s = 0;
  const int stepped = !isnan(step_s);
  watch w;
  TRY(measure_limits(t->device, side, &product_rate, &copy_rate));
  printf("\nlimits measured here: product of %d x %d x %d %.1f GFLOP/s, copy %.2f GB/s\n\n", side,
         side, side, product_rate * 1e-9, copy_rate * 1e-9);
  fflush(stdout);
  memset(&w, 0, sizeof w);
  w.a = plan->dtype_bytes;
  w.g = plan->grad_bytes;
  int32_t *ids = (int32_t *)host_memory(((size_t)tokens + 1) * sizeof *ids);
  zipf_tokens(o->train.seed, plan->model.vocab, ids, (size_t)tokens + 1);
  g2z_status status = watch_steps(t, &w, ids);
  free(ids);
  TRY(status);
  for (op_row *row = w.rows; row < w.rows + w.count; row++) {
    row->seconds = row->timed.s[2];
    row->limit_s = row->amount / (row->unit[1] == 'F' ? product_rate : copy_rate);
    sum_s += row->calls * row->seconds;
  }
  qsort(w.rows, (size_t)w.count, sizeof *w.rows, order_of_gaps);
  printf("%-19s %6s %10s %9s %6s %17s %6s %8s  %s\n", "op", "calls", "us/call", "ms/step", "share",
         "rate", "limit", "gap ns/t", "counted as");
  if (!stepped) step_s = sum_s;
  for (const op_row *row = w.rows; row < w.rows + w.count; row++)
    printf("%-19s %6.0f %10.1f %9.2f %5.1f%% %9.2f %7s/s %5.1f%% %8.1f  %s\n", row->name,
           row->calls, row->seconds * 1e6, row->calls * row->seconds * 1e3,
           100 * row->calls * row->seconds / step_s, row->amount / row->seconds * 1e-9, row->unit,
           100 * row->limit_s / row->seconds,
           row->calls * (row->seconds - row->limit_s) * 1e9 / tokens, row->formula);
  printf("%-19s %6s %10s %9.2f %5.1f%%  of %s; ops that run alone may find "
         "their data in caches, then beyond 100 %% of the copy\n", "sum", "", "", sum_s * 1e3,
         100 * sum_s / step_s, stepped ? "the median step" : "their sum");

  /* Exponentials are a limit of their own for attention, beside the products: another unit of the
   * GPU makes them. Causal attention has T / 2 keys for each query and head; backward makes the
   * same ones again, beside 5 products instead of 2. The larger of the two limits is the op's. */
  const double rate = t->device->info.exponentials_per_s;
  const double s = (double)plan->batch * plan->seq * plan->seq * plan->model.heads / 2 / rate;
  for (const op_row *row = w.rows; row < w.rows + w.count && s > 0; row++)
    if (strncmp(row->name, "attention", 9) == 0)
      printf("%-19s exponentials alone %.1f us/call, %.1f %% of its time; products alone %.1f: "
             "counted as B * T * T * NH / 2 at %.3g/s, 16 per clock and multiprocessor\n",
             row->name, s * 1e6, 100 * s / row->seconds, row->limit_s * 1e6, rate);

  if (!stepped) return G2Z_OK;
  const double flops = g2z_flops_per_token(plan);
  printf("MFU         %.1f %% of the measured product: %.2f MFLOP per token, 6 (12 L C C + V C) + "
         "6 L T C\n", 100 * flops * tokens / step_s / product_rate, flops * 1e-6);
  return G2Z_OK;
}

/* Opens a trainer whose ops are timed: outside of graphs, where each is called. */
static g2z_status run_plan_ops(const options *o, const g2z_context_config *config,
                               double step_s) {
  g2z_train_config train = o->train;
  g2z_context *context;
  g2z_trainer *trainer = NULL;
  train.graph = 0;
  train.train_glob = NULL;
  TRY(g2z_context_create(config, &context));
  g2z_status status = g2z_trainer_create(context, &train, &trainer);
  if (status == G2Z_OK) status = time_ops(trainer, o, step_s);
  g2z_trainer_free(trainer);
  g2z_context_free(context);
  return status;
}

/* ----- a peer ----------------------------------------------------------- */

/* Runs COMMAND with the flags of this work behind it; the last line that it prints is JSON with its
 * name as "peer" and its "tokens_per_second". */
static g2z_status run_peer(g2z_services *services, const options *o, double tokens_per_second) {
  char command[1024], line[4096], last[4096] = "", name[128] = "the peer";
  snprintf(command, sizeof command, "%.700s --model %s --dtype %s --batch %d --seq %d --accum %d "
           "--steps %d", o->peer, o->model ? o->model : "gpt2", g2z_dtype_text(o->train.dtype),
           o->train.batch, o->train.seq, o->train.accum, o->steps);
  printf("\npeer        %s\n", command);
  fflush(stdout);
  FILE *pipe = popen(command, "r");
  while (pipe && fgets(line, sizeof line, pipe))
    if (line[0] == '{') memcpy(last, line, sizeof last);
  int code = pipe ? pclose(pipe) : -1;
  g2z_json json;
  g2z_json_text key;
  double theirs = 0;
  g2z_json_open(&json, services, "the peer's last line", last, strlen(last));
  if (code == 0 && g2z_json_enter(&json, '{'))
    while (g2z_json_next(&json, '}', &key)) {
      if (g2z_json_is(&key, "tokens_per_second")) theirs = g2z_json_number(&json);
      else if (g2z_json_is(&key, "peer")) {
        g2z_json_text text = g2z_json_string(&json);
        snprintf(name, sizeof name, "%.*s", (int)(text.bytes < 100 ? text.bytes : 100),
                 (const char *)text.at);
      } else g2z_json_skip(&json);
    }
  if (code == 0) TRY(g2z_json_close(&json));
  if (code != 0 || !(theirs > 0))
    return g2z_fail(services, G2Z_IO, "`%.400s` %s: run it alone to see why", command,
                    code ? "failed" : "printed no tokens_per_second");
  printf("peer        %.0f tokens/s, %s; this: %.3f times as many\n", theirs, name,
         tokens_per_second / theirs);
  return G2Z_OK;
}

/* Refuses work that run_peer's flags do not describe: a peer would do other work. */
static g2z_status check_peer(g2z_services *services, const options *o,
                             const g2z_context_config *config) {
  const g2z_model_config *shape = &o->shape;
  if (!o->peer) return G2Z_OK;
  if (shape->layers || shape->channels || shape->heads || shape->vocab || o->train.dropout > 0)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "--peer runs a --model as it is: leave --layers, "
                    "--channels, --heads, --vocab-size and --dropout away");
  if (!o->model && config->device == G2Z_DEVICE_CPU)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "--peer runs a --model: name one, --model gpt2");
  if (config->ranks.place.world > 1)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "--peer runs on one rank: of %d start it by itself",
                    config->ranks.place.world);
  return G2Z_OK;
}

static g2z_status report_steps(g2z_services *services, const options *o,
                               const g2z_context_config *config, const g2z_plan *plan,
                               stopwatch *w) {
  const size_t count = (size_t)w->count;
  double tokens = (double)plan->batch * plan->seq * plan->accum * plan->world;
  double median_s = g2z_median(w->step_s, count); /* sorts */
  printf("\nstep        %.2f ms median, %.2f least, %.2f most, of %d\n", median_s * 1e3,
         w->step_s[0] * 1e3, w->step_s[count - 1] * 1e3, w->count);
  printf("throughput  %.0f tokens/s\n", tokens / median_s);
  fflush(stdout);
  if (plan->world > 1) { /* the ops are those of one rank */
    double exposed_s = g2z_median(w->exposed_s, count);
    printf("exposed     %.3f ms of communication, %.1f %% of the step; with slower ranks, at most "
           "%.3f ms\n", exposed_s * 1e3, 100 * exposed_s / median_s,
           g2z_median(w->waited_s, count) * 1e3);
    return G2Z_OK;
  }
  if (o->peer) TRY(run_peer(services, o, tokens / median_s));
  return o->without_ops ? G2Z_OK : run_plan_ops(o, config, median_s);
}

static g2z_status run_step(g2z_services *services, options *o, g2z_context_config *config) {
  g2z_context *context;
  g2z_plan *plan;
  stopwatch w;
  const g2z_place *place = &config->ranks.place;
  TRY(check_peer(services, o, config));
  TRY(g2z_plan_create(services, &o->train, config->device, place->rank, place->world, &plan));
  g2z_plan_print(plan, 0, print_line, NULL);
  open_watch(&w, o->steps);
  g2z_status status = g2z_context_create(config, &context);
  if (status == G2Z_OK) {
    status = time_steps(context, o, &w);
    g2z_context_free(context);
  }
  if (status == G2Z_OK) status = report_steps(services, o, config, plan, &w);
  free(w.step_s);
  g2z_plan_free(plan);
  return status;
}

static g2z_status run_ops(g2z_services *services, options *o, g2z_context_config *config) {
  g2z_plan *plan;
  if (config->ranks.place.world > 1)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "bench ops times one rank, and others beside it "
                    "would slow it down: start it alone, not as one of %d",
                    config->ranks.place.world);
  TRY(g2z_plan_create(services, &o->train, config->device, 0, 1, &plan));
  g2z_plan_print(plan, 0, print_line, NULL);
  g2z_plan_free(plan);
  return run_plan_ops(o, config, NAN);
}

/* ----- summaries --------------------------------------------------------- */

static g2z_status new_summary(g2z_services *services, const options *o, const char *experiment,
                              g2z_summary **out) {
  const char *commit = G2Z_GIT_COMMIT;
  TRY(g2z_summary_create(services, experiment, out));
  snprintf((*out)->command_line, sizeof (*out)->command_line, "%s", o->command_line);
  snprintf((*out)->commit, sizeof (*out)->commit, "%s", commit ? commit : "unknown");
  return G2Z_OK;
}

/* "Intel(R) Xeon(R) ..., 2 cores", or "2 x NVIDIA H200, CUDA 13.0, NCCL 2.28.9". */
static void describe_hardware(g2z_services *services, const g2z_device *device, char out[256]) {
  char *text, name[128] = "CPU";
  size_t bytes;
  const g2z_device_info *info = &device->info;
  if (device->kind == G2Z_DEVICE_CUDA) {
    snprintf(out, 256, "%d x %.100s, CUDA %.20s%s%.20s", info->count, info->name, info->runtime,
             info->collectives[0] ? ", NCCL " : "", info->collectives);
    return;
  }
  if (g2z_read_file(services, "/proc/cpuinfo", 1 << 22, &text, &bytes) == G2Z_OK) {
    const char *at = strstr(text, "model name");
    if (at && (at = strchr(at, ':')) != NULL)
      snprintf(name, sizeof name, "%.*s", (int)strcspn(at + 2, "\n"), at + 2);
    g2z_release(services, text);
  }
  snprintf(out, 256, "%.120s, %ld cores", name, sysconf(_SC_NPROCESSORS_ONLN));
}

/* ----- a point's ranks: bench point -------------------------------------- */

#define POINT_FILE "bench_point.json" /* what rank 0 measured, in the run directory */

/* Of all threads of this process, user and system. */
static double used_cpu_s(void) { return (double)clock() / CLOCKS_PER_SEC; }

static void watch_step(stopwatch *w, const options *o, g2z_context *context,
                       const g2z_metrics *m) {
  const int last = o->warmup + o->steps;
  if (m->step == 1 && last > 1) /* the second is enqueued: no first parameters, and not played */
    w->collectives = g2z_ranks_collectives(context->ranks, 2);
  if (m->step <= o->warmup) {
    w->began = g2z_seconds();
    w->cpu_s = used_cpu_s();
    return;
  }
  if (w->count == o->steps) return;
  w->step_s[w->count] = m->step_ms * 1e-3;
  w->exposed_s[w->count++] = m->exposed_comm_ms * 1e-3;
  if (w->count < o->steps) return;
  w->ended = g2z_seconds();
  w->cpu_s = used_cpu_s() - w->cpu_s;
}

static double sum_of(const double *values, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += values[i];
  return sum;
}

static void fill_measured(g2z_figures *f, const options *o, stopwatch *w, int world, double cpu_s) {
  double step_s = sum_of(w->step_s, w->count), exposed_s = sum_of(w->exposed_s, w->count);
  double tokens = (double)o->train.batch * o->train.accum * o->train.seq * world;
  const size_t count = (size_t)w->count;
  f->steps = w->count;
  f->step_mean_ms = 1e3 * step_s / w->count;
  f->step_sd_ms = 1e3 * g2z_deviation(w->step_s, count);
  f->step_p50_ms = 1e3 * g2z_median(w->step_s, count); /* sorts */
  f->step_min_ms = 1e3 * w->step_s[0];
  f->step_p95_ms = 1e3 * g2z_percentile(w->step_s, count, 95);
  f->step_max_ms = 1e3 * w->step_s[w->count - 1];
  f->tokens_per_sec = 1e3 * tokens / f->step_p50_ms;
  f->train_time_sec = step_s;
  f->cpu_percent =
      100 * cpu_s / ((w->ended - w->began) * (double)sysconf(_SC_NPROCESSORS_ONLN));
  f->began_sec = w->began;
  f->ended_sec = w->ended;
  f->exposed_comm_sec = f->exposed_comm_share = f->exposed_comm_ms = 0;
  f->waited_ms = f->collectives_per_step = 0;
  if (world == 1) return; /* there is nobody to wait for */
  f->exposed_comm_sec = exposed_s;
  f->exposed_comm_share = exposed_s / step_s;
  f->exposed_comm_ms = 1e3 * g2z_median(w->exposed_s, count);
  f->waited_ms = 1e3 * g2z_median(w->waited_s, count);
  f->collectives_per_step = w->collectives;
}

/* The CPU time of all ranks together goes to rank 0, which writes what it knows. */
static g2z_status write_measured(g2z_context *context, const options *o, stopwatch *w) {
  g2z_services *services = context->services;
  int world = context->world;
  double *cpu_s = (double *)host_memory((size_t)world * sizeof *cpu_s);
  g2z_status status = g2z_ranks_all_gather(context->ranks, &w->cpu_s, sizeof w->cpu_s, cpu_s);
  if (status == G2Z_OK) status = over_ranks(context, w->exposed_s, w->waited_s, w->count);
  double all_cpu_s = sum_of(cpu_s, world);
  free(cpu_s);
  if (status != G2Z_OK || context->rank != 0) return status;
  g2z_summary *s;
  g2z_point *p;
  TRY(new_summary(services, o, "point", &s));
  status = g2z_summary_add(s, &p);
  if (status == G2Z_OK) {
    snprintf(p->name, sizeof p->name, "point");
    snprintf(s->hardware, sizeof s->hardware, "%s", w->hardware);
    fill_measured(&p->figures, o, w, world, all_cpu_s);
    status = g2z_summary_write(s, g2z_path_in(o->run_dir, POINT_FILE).text);
  }
  g2z_summary_free(s);
  return status;
}

static g2z_status train_point(g2z_context *context, const options *o, stopwatch *w) {
  g2z_run_config config = g2z_run_config_default();
  g2z_run *run;
  g2z_run_event event;
  config.train = o->train;
  config.train.optimizer.steps = o->warmup + o->steps;
  config.run_dir = o->run_dir;
  config.sample_tokens = 0;
  config.tensorboard = 0;
  config.command_line = o->command_line;
  config.git_commit = G2Z_GIT_COMMIT;
  config.model_name = o->model;
  if (o->val_steps) {
    config.val_glob = o->train.train_glob;
    config.val_steps = o->val_steps;
  }
  TRY(g2z_run_create(context, &config, &run));
  g2z_status status = g2z_run_write_launch(context->services, &config,
                                           g2z_ranks_place(context->ranks));
  describe_hardware(context->services, g2z_run_trainer(run)->device, w->hardware);
  w->began = g2z_seconds();
  w->cpu_s = used_cpu_s();
  event.kind = G2Z_RUN_STEP;
  while (status == G2Z_OK && event.kind != G2Z_RUN_DONE) {
    status = g2z_run_next(run, &event);
    if (status == G2Z_OK && event.kind == G2Z_RUN_STEP) watch_step(w, o, context, &event.metrics);
  }
  g2z_run_free(run);
  return status;
}

/* Others may wait inside a collective for ever. */
static void on_fault(void *user, const g2z_fault *fault) {
  (void)user;
  fprintf(stderr, "bench: %s\n", fault->sentence);
  _exit(G2Z_EXIT_LOST);
}

static g2z_status run_point(g2z_services *services, options *o, g2z_context_config *config) {
  g2z_context *context;
  stopwatch w;
  if (!o->run_dir || !o->train.train_glob)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "bench point needs --run-dir and --train: "
                    "experiments start it with both");
  TRY(g2z_context_create(config, &context));
  open_watch(&w, o->steps);
  g2z_status status = train_point(context, o, &w);
  if (status == G2Z_OK) status = write_measured(context, o, &w);
  g2z_context_free(context);
  free(w.step_s);
  return status;
}

/* ----- a comm's ranks: bench exchange ------------------------------------- */

/* A collective, and what passes each rank's link (as nccl-tests count it): the whole buffer `whole`
 * times, and the slices of the other ranks `others` times. */
typedef struct collective {
  const char *name;
  double whole, others;
  g2z_call_kind kind;
  g2z_owner owner;
} collective;
static const collective collectives[] = {
    {"reduce_scatter", 0, 1, G2Z_CALL_REDUCE, G2Z_OWNER_SLICES},
    {"all_reduce", 0, 2, G2Z_CALL_REDUCE, G2Z_OWNER_ALL},
    {"all_gather", 0, 1, G2Z_CALL_GATHER, G2Z_OWNER_SLICES},
    {"reduce", 1, 0, G2Z_CALL_REDUCE, G2Z_OWNER_ROOT},
    {"broadcast", 1, 0, G2Z_CALL_GATHER, G2Z_OWNER_ROOT}};

/* An all-gather begins when all ranks may write to the buffer, and ends when all have. */
static g2z_status exchange_once(g2z_comm *comm, const collective *c, char *buffer, size_t n) {
  int slices = c->owner == G2Z_OWNER_SLICES, gathers = slices && c->kind == G2Z_CALL_GATHER;
  char *mine = slices ? buffer + (size_t)comm->rank * (n / (size_t)comm->world) *
                                     element_bytes(comm->device)
                      : buffer;
  g2z_call call = g2z_call_of(c->kind, gathers ? buffer : mine, gathers ? mine : buffer, n);
  call.owner = c->owner;
  call.write = G2Z_OVERWRITE;
  if (gathers) TRY(g2z_comm_after(comm, 1));
  TRY(g2z_comm_submit(comm, &call));
  return gathers ? g2z_comm_mark(comm, 0) : G2Z_OK;
}

/* Seconds per call, the slowest rank's: the median of five rounds of at least 10 ms each. */
static g2z_status time_exchange(g2z_comm *comm, const collective *c, char *buffer, size_t n,
                                double *all, double *seconds) {
  double rounds[5];
  int calls = 1;
  for (int round = -1; round < 5;) { /* the first opens connections, and does not count */
    TRY(g2z_ranks_agree(comm->ranks, G2Z_OK));
    double begin = g2z_seconds(), most = 0;
    TRY(g2z_comm_after(comm, 0));
    for (int i = 0; i < calls; i++) TRY(exchange_once(comm, c, buffer, n));
    TRY(g2z_comm_mark(comm, 0));
    TRY(g2z_comm_wait(comm, 0));
    TRY(comm->device->ops->synchronize(comm->device));
    double mine = g2z_seconds() - begin;
    TRY(g2z_ranks_all_gather(comm->ranks, &mine, sizeof mine, all));
    for (int r = 0; r < comm->world; r++) most = all[r] > most ? all[r] : most;
    if (round >= 0) rounds[round] = most / calls;
    if (round == 0 && most < 0.01 && calls < 1024) calls *= 2; /* all ranks see the same `most` */
    else round++;
  }
  *seconds = g2z_median(rounds, 5);
  return G2Z_OK;
}

/* All collectives at one size; of the copy engines only those that they carry. */
static g2z_status exchange_size(g2z_comm *comm, char *buffer, double mib, double *all,
                                g2z_summary *s) {
  const double R = comm->world;
  const size_t unit = 8 * (size_t)comm->world, size = element_bytes(comm->device);
  const size_t n = ((size_t)(mib * 1048576.0) / size + unit - 1) / unit * unit;
  double copy_rate, seconds = 0;
  TRY(g2z_comm_copy_rate(comm, n * size, &copy_rate));
  for (size_t i = 0; i < sizeof collectives / sizeof *collectives; i++) {
    const collective *c = &collectives[i];
    int gathers = c->kind == G2Z_CALL_GATHER, reduces = comm->reduce == G2Z_TRANSPORT_COPY;
    if (comm->gather == G2Z_TRANSPORT_COPY &&
        (c->owner != G2Z_OWNER_SLICES || (!gathers && !reduces)))
      continue;
    TRY(time_exchange(comm, c, buffer, n, all, &seconds));
    double bus = (c->whole + c->others * (R - 1) / R) * (double)(n * size) / seconds;
    g2z_point *p;
    TRY(g2z_summary_add(s, &p));
    snprintf(p->series, sizeof p->series, "%s, %s, %d ranks", c->name,
             comm->gather == G2Z_TRANSPORT_COPY ? "copy engines" : comm->ops->name, comm->world);
    snprintf(p->name, sizeof p->name, "%s, %g MiB", p->series, mib);
    p->figures.world_size = R;
    p->figures.message_mib = (double)(n * size) / 1048576.0;
    p->figures.time_us = seconds * 1e6;
    p->figures.bus_gb_per_sec = bus * 1e-9;
    p->figures.limit_gb_per_sec = copy_rate * 1e-9;
    p->figures.of_limit = bus / copy_rate;
  }
  return G2Z_OK;
}

/* The sizes, over one transport; none when it cannot be had here. */
static g2z_status exchange_transport(g2z_context *context, const options *o, g2z_device *device,
                                     g2z_transport transport, g2z_summary *s) {
  double most = 0;
  axis sizes;
  g2z_comm *comm;
  g2z_comm_config config;
  void *buffer;
  TRY(read_list(device->services, "sizes", o->size_list, NULL, SIZE_LEAST, 65536, &sizes));
  for (int i = 0; i < sizes.count; i++) most = sizes.at[i] > most ? sizes.at[i] : most;
  size_t bytes = (size_t)(most * 1048576.0) + 64 * (size_t)context->world;
  memset(&config, 0, sizeof config);
  config.places = 1;
  config.most = bytes / 2;
  config.wire = device->dtype;
  config.gather = config.reduce = transport;
  TRY(g2z_comm_create(context->ranks, device, &config, &comm));
  g2z_status status = comm->ops->allocate(comm, bytes, &buffer);
  status = g2z_ranks_agree(comm->ranks, status);
  double *all = (double *)host_memory((size_t)comm->world * sizeof *all);
  for (int i = 0; i < sizes.count && status == G2Z_OK && comm->gather == transport; i++)
    status = exchange_size(comm, (char *)buffer, sizes.at[i], all, s);
  free(all);
  if (buffer) comm->ops->release(comm, buffer);
  g2z_comm_free(comm);
  return status;
}

static g2z_status run_exchange(g2z_services *services, options *o, g2z_context_config *config) {
  g2z_context *context;
  g2z_device *device = NULL;
  if (!o->run_dir)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "bench exchange needs --run-dir: bench comm starts "
                    "it with one");
  TRY(g2z_context_create(config, &context));
  g2z_summary *s = NULL;
  g2z_status status = new_summary(services, o, "comm", &s);
  if (status == G2Z_OK)
    status = g2z_device_create(services, config->device, o->train.dtype, o->train.dtype, &device);
  status = g2z_ranks_agree(context->ranks, status);
  for (int i = G2Z_TRANSPORT_NCCL; i <= G2Z_TRANSPORT_COPY && status == G2Z_OK; i++)
    status = exchange_transport(context, o, device, (g2z_transport)i, s);
  if (status == G2Z_OK && context->rank == 0) {
    describe_hardware(services, device, s->hardware);
    status = g2z_summary_write(s, g2z_path_in(o->run_dir, POINT_FILE).text);
  }
  g2z_device_free(device);
  g2z_context_free(context);
  g2z_summary_free(s);
  return status;
}

/* ----- experiments: their points ------------------------------------------ */

#define POINTS_MAX 512

typedef struct work {           /* what a point's ranks shall do */
  g2z_train_config train;
  int world, steps;
} work;

typedef struct axes {
  axis ranks, stages, dtypes, sizes;
} axes;

typedef struct experiment {
  options *o;
  g2z_services *services;
  g2z_device_kind device;
  axes lists;
  g2z_summary *s;
  work *works;                  /* one for each point; of comm only the number of ranks counts */
  g2z_figures *samples;         /* [POINTS_MAX][G2Z_REPEATS] */
  char out[1024];
  g2z_path tokens;              /* "": none were written */
  int lock;                     /* `out` is this experiment's; -1: not yet */
  int runs, all_runs;           /* done and to be done */
  double began;
} experiment;

/* What a list's limits do not say. A size under SIZE_LEAST is outside of the range of --bucket-mb:
 * ranks would be started without it, and take the default. */
static g2z_status check_axes(g2z_services *services, const options *o, const axes *a) {
  for (int i = 0; i < a->ranks.count; i++)
    if (a->ranks.at[i] != floor(a->ranks.at[i]))
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "--gpus %.80s: %g is no number of ranks",
                      o->rank_list, a->ranks.at[i]);
  for (int i = 0; i < a->sizes.count; i++)
    if (a->sizes.at[i] > 0 && a->sizes.at[i] < SIZE_LEAST)
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "--sizes %.80s: %g MiB is less than the least, "
                      "%g", o->size_list, a->sizes.at[i], SIZE_LEAST);
  return G2Z_OK;
}

/* The lists are read before anything is written or started. */
static g2z_status read_axes(experiment *e) {
  g2z_services *services = e->services;
  axes *a = &e->lists;
  const options *o = e->o;
  char all[16];
  int gpus = g2z_device_count(G2Z_DEVICE_CUDA), cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
  snprintf(all, sizeof all, "%d", e->device == G2Z_DEVICE_CUDA ? gpus : cpus);
  int every = strcmp(o->rank_list, "all") == 0;
  if (every && e->device == G2Z_DEVICE_CUDA && !gpus)
    return g2z_fail(services, G2Z_UNSUPPORTED, "--gpus all: this process sees no GPU that this "
                    "build can use; --device cpu takes ranks without");
  const int comm = o->command == COMMAND_comm;
  TRY(read_list(services, "gpus", every ? all : o->rank_list, NULL, 1, 4096, &a->ranks));
  TRY(read_list(services, "sizes", o->size_list, NULL, comm ? SIZE_LEAST : 0, 65536, &a->sizes));
  TRY(check_axes(services, o, a));
  if (comm) return G2Z_OK;
  TRY(read_list(services, "zero", o->stage_list, "|dp|0|1|2|3", 0, 0, &a->stages));
  return read_list(services, "dtype", o->dtype_list, G2Z_DTYPE_LIST(WORD_OF_3), 0, 0, &a->dtypes);
}

/* The sequences of a step divided among the ranks: as many per micro-step as --batch allows. */
static g2z_status divide_batch(g2z_services *services, const options *o, work *w) {
  if (!o->global_batch) return G2Z_OK;
  if (o->global_batch % w->world)
    return g2z_fail(services, G2Z_UNSUPPORTED, "%d sequences cannot be divided among %d ranks",
                    o->global_batch, w->world);
  int share = o->global_batch / w->world, batch = o->train.batch < share ? o->train.batch : share;
  while (share % batch) batch--;
  w->train.batch = batch;
  w->train.accum = share / batch;
  return G2Z_OK;
}

/* Whether --train's shards are there, and hold a step of this point. */
static g2z_status check_shards(g2z_services *services, const work *w) {
  g2z_loader_config shards;
  g2z_loader *loader;
  memset(&shards, 0, sizeof shards);
  shards.glob = w->train.train_glob;
  shards.batch = w->train.batch;
  shards.seq = w->train.seq;
  shards.accum = w->train.accum;
  shards.world = w->world;
  shards.vocab = w->train.model.vocab;
  shards.order = G2Z_ORDER_SHUFFLED;
  if (!shards.glob) return G2Z_OK;
  TRY(g2z_loader_create(services, &shards, &loader));
  g2z_loader_free(loader);
  return G2Z_OK;
}

/* What a point's plan says of it, and how many steps it takes. */
static g2z_status describe_point(experiment *e, int stage, work *w, const g2z_plan *plan,
                                 g2z_point *p) {
  double per_step = (double)plan->batch * plan->accum * plan->seq * w->world;
  double steps = e->o->tokens ? ceil((double)e->o->tokens / per_step) : w->steps;
  if (steps > STEPS_MAX)
    return g2z_fail(e->services, G2Z_BAD_ARGUMENT, "--tokens %.0f are %.0f steps: at most %d can "
                    "be timed", (double)e->o->tokens, steps, STEPS_MAX);
  w->steps = (int)steps;
  p->figures.micro_batch = plan->batch;
  p->figures.accum_steps = plan->accum;
  p->figures.global_batch = (double)plan->batch * plan->accum * w->world;
  p->figures.seq_len = plan->seq;
  if (stage >= 0) p->figures.zero_stage = plan->zero_stage;
  p->figures.buckets = plan->buckets;
  p->figures.plan_gib = (double)plan->bytes_total / 1073741824.0;
  return G2Z_OK;
}

static g2z_status check_gpus(const experiment *e, int world) {
  int gpus = g2z_device_count(G2Z_DEVICE_CUDA);
  if (e->device != G2Z_DEVICE_CUDA || world <= gpus) return G2Z_OK;
  return g2z_fail(e->services, G2Z_UNSUPPORTED, "%d GPUs, but this process sees %d", world, gpus);
}

/* Whether this machine and this build can do it: the plan knows all that needs no device. */
static g2z_status check_work(experiment *e, int stage, work *w, g2z_point *p) {
  g2z_plan *plan;
  w->train.strategy = stage < 0 ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
  w->train.zero_stage = stage < 0 ? 0 : stage;
  TRY(check_gpus(e, w->world));
  TRY(divide_batch(e->services, e->o, w));
  TRY(g2z_plan_create(e->services, &w->train, e->device, 0, w->world, &plan));
  g2z_status status = check_shards(e->services, w);
  if (status == G2Z_OK) status = describe_point(e, stage, w, plan, p);
  g2z_plan_free(plan);
  return status;
}

static void give_up(g2z_point *p, g2z_outcome outcome, const char *reason) {
  p->outcome = outcome;
  snprintf(p->reason, sizeof p->reason, "%.390s", reason);
}

/* Appends a part to a name, behind a comma. */
static void add_name(char *name, size_t room, const char *format, ...) G2Z_PRINTF(3, 4);
static void add_name(char *name, size_t room, const char *format, ...) {
  va_list arguments;
  size_t used = strlen(name);
  if (used) used += (size_t)snprintf(name + used, room - used, ", ");
  va_start(arguments, format);
  if (used < room) vsnprintf(name + used, room - used, format, arguments);
  va_end(arguments);
}

/* One point of the product of the axes; what makes it differ from the others is its name. */
static g2z_status add_point(experiment *e, double world, double stage, double dtype, double size) {
  static const char *const stages[] = {"dp", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"};
  const axes *a = &e->lists;
  g2z_summary *s = e->s;
  g2z_point *p;
  if (s->count == POINTS_MAX)
    return g2z_fail(e->services, G2Z_BAD_ARGUMENT, "more than %d points: shorten a list",
                    POINTS_MAX);
  work *w = &e->works[s->count];
  TRY(g2z_summary_add(s, &p));
  w->train = e->o->train;
  w->steps = e->o->steps;
  w->world = (int)world;
  w->train.dtype = (g2z_dtype)(int)dtype;
  w->train.bucket_mb = (float)size;
  p->figures.world_size = world;
  p->figures.bucket_mib = size > 0 ? size : NAN;
  const int by_size = e->o->command == COMMAND_buckets; /* what the x axis of its charts is */
  for (int whole = 0; whole < 2; whole++) {             /* the series, then the name */
    char *to = whole ? p->name : p->series;
    size_t room = whole ? sizeof p->name : sizeof p->series;
    if (a->stages.count > 1) add_name(to, room, "%s", stages[(int)stage]);
    if (a->dtypes.count > 1) add_name(to, room, "%s", g2z_dtype_text(w->train.dtype));
    if (a->sizes.count > 1 && (whole || !by_size))
      add_name(to, room, "%g MiB", size);
    if (whole ? a->ranks.count > 1 || !*to : by_size && a->ranks.count > 1)
      add_name(to, room, "%d %s%s", w->world, e->device == G2Z_DEVICE_CUDA ? "GPU" : "rank",
               world > 1 ? "s" : "");
  }
  if (check_work(e, (int)stage - 1, w, p) == G2Z_OK) return G2Z_OK;
  give_up(p, G2Z_OUTCOME_SKIPPED, e->services->error);
  return G2Z_OK;
}

static g2z_status add_points(experiment *e) {
  const axes *a = &e->lists;
  for (int i = 0; i < a->stages.count; i++)
    for (int k = 0; k < a->dtypes.count; k++)
      for (int m = 0; m < a->sizes.count; m++)
        for (int r = 0; r < a->ranks.count; r++)
          TRY(add_point(e, a->ranks.at[r], a->stages.at[i], a->dtypes.at[k], a->sizes.at[m]));
  return G2Z_OK;
}

/* ----- experiments: running a point --------------------------------------- */

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

/* The signals that g2z_ranks_run hands on to ranks stop an experiment between two runs as well.
 * Under nohup SIGHUP is ignored and stays so. */
static void catch_signals(void) {
  static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};
  struct sigaction action, before;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    if (sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
      sigaction(numbers[i], &action, NULL);
}

static g2z_status check_stop(const experiment *e) {
  if (!stop_signal) return G2Z_OK;
  return g2z_fail(e->services, G2Z_STOPPED, "stopped by signal %d", (int)stop_signal);
}

#define WATCHED_GPUS 64

typedef struct observer {       /* of a point's ranks, while they run */
  FILE *smi;                    /* NULL: there are no GPUs to look at */
  FILE *said;                   /* what it printed; before each piece a line "@ g2z_seconds()" */
  int in_line;                  /* 1: the last piece ends within a line */
} observer;

/* nvidia-smi prints a line for each GPU of a point, five times a second, until its pipe closes. It
 * may not be there: then nothing is known. */
static void open_smi(observer *seen, int world) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  char only[512] = "", command[800];
  for (int gpu = 0; gpu < world && gpu < WATCHED_GPUS; gpu++) {
    int length = visible ? (int)strcspn(visible, ",") : 0;
    size_t used = strlen(only);
    const char *comma = gpu ? "," : "";
    if (visible) snprintf(only + used, sizeof only - used, "%s%.*s", comma, length, visible);
    else snprintf(only + used, sizeof only - used, "%s%d", comma, gpu);
    if (visible && visible[length]) visible += length + 1;
  }
  snprintf(command, sizeof command, "exec nvidia-smi -i '%s' --loop-ms=200 --format=csv,noheader,"
           "nounits --query-gpu=index,utilization.gpu,memory.used 2> /dev/null", only);
  seen->said = tmpfile();
  seen->smi = popen(command, "r");
  if (seen->smi) fcntl(fileno(seen->smi), F_SETFL, O_NONBLOCK);
}

static void observe(void *user) {
  observer *seen = (observer *)user;
  char piece[4096];
  ssize_t got;
  if (stop_signal) raise(stop_signal); /* it came before the ranks: it is handed on now */
  while (seen->smi && seen->said && (got = read(fileno(seen->smi), piece, sizeof piece)) > 0) {
    if (!seen->in_line) fprintf(seen->said, "@ %f\n", g2z_seconds());
    fwrite(piece, 1, (size_t)got, seen->said);
    seen->in_line = piece[got - 1] != '\n';
  }
}

/* GPUs: how busy between the first and the last step that counts, and the most memory that was in
 * use beyond what was in use before. CPU: the largest resident rank. */
static void fill_watched(const observer *seen, const g2z_job_end *end, double wall_s,
                         g2z_figures *f) {
  double at = 0, mib, busy = 0, most = 0, before[WATCHED_GPUS];
  char line[128], percent[32];
  int gpu, inside = 0;
  for (int i = 0; i < WATCHED_GPUS; i++) before[i] = NAN;
  if (seen->said) rewind(seen->said);
  while (seen->said && fgets(line, sizeof line, seen->said)) {
    if (sscanf(line, "@ %lf", &at) == 1) continue;
    if (sscanf(line, "%d, %31[^,], %lf", &gpu, percent, &mib) != 3 || gpu < 0 ||
        gpu >= WATCHED_GPUS)
      continue;
    if (isnan(before[gpu])) before[gpu] = mib;
    most = fmax(most, (mib - before[gpu]) * 1048576.0);
    if (at < f->began_sec || at > f->ended_sec) continue;
    double part = NAN;
    sscanf(percent, "%lf", &part); /* "[N/A]" of a part of a GPU */
    busy += part;
    inside++;
  }
  if (inside) f->gpu_percent = busy / inside;
  if (!seen->smi) most = (double)end->rank_bytes;
  f->peak_memory_gib = most / 1073741824.0;
  f->total_wall_time_sec = wall_s;
}

/* What ranks are started with: every flag of their sub-command; none is left to defaults. */
static g2z_status rank_arguments(const experiment *e, int command, options *o, char ***argv) {
  const char *first[] = {"bench", commands[command].name};
  g2z_flag flags[FLAG_COUNT];
  o->command = command;
  o->device = (int)e->device;
  o->dtype = (int)o->train.dtype;
  return g2z_flags_arguments(e->services, flags, flags_of(o, flags), first, 2, argv);
}

/* The last line of what the ranks printed that says what is wrong, else the last one. */
static void read_reason(g2z_services *services, const char *path, int code, char out[400]) {
  char *text = NULL, *best = NULL, *rest = NULL;
  size_t bytes;
  if (g2z_read_file(services, path, (size_t)16 << 20, &text, &bytes) == G2Z_OK)
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
      if (!best || strncmp(best, "bench: ", 7) != 0 || strncmp(line, "bench: ", 7) == 0)
        best = line;
  snprintf(out, 400, "exit code %d: %.300s", code,
           !best ? "it printed nothing" : strncmp(best, "bench: ", 7) == 0 ? best + 7 : best);
  g2z_release(services, text);
}

/* Starts `world` ranks of this program and waits for them; *told: what they and their observer saw,
 * NULL when they failed, which is the point's outcome. The status is that of bench itself:
 * G2Z_STOPPED when a signal ended them, and the run does not count. */
static g2z_status run_ranks(experiment *e, int world, char **argv, const char *run_dir,
                            g2z_point *p, g2z_summary **told) {
  g2z_job job;
  g2z_job_end end;
  observer seen;
  const g2z_path console = g2z_path_in(run_dir, "console.txt");
  *told = NULL;
  memset(&job, 0, sizeof job);
  memset(&seen, 0, sizeof seen);
  TRY(g2z_make_directory(e->services, run_dir));
  job.ranks = world;
  job.argv = argv;
  job.output = console.text;
  job.watch = observe;
  job.user = &seen;
  if (e->device == G2Z_DEVICE_CUDA) open_smi(&seen, world);
  double begin = g2z_seconds();
  g2z_status status = g2z_ranks_run(e->services, &job, &end);
  double wall_s = g2z_seconds() - begin;
  if (status == G2Z_OK && end.signal && end.exit_code != 0) {
    stop_signal = end.signal;
    status = check_stop(e);
    puts("stopped");
  }
  if (status == G2Z_OK && end.exit_code != 0) {
    p->outcome = G2Z_OUTCOME_FAILED;
    read_reason(e->services, console.text, end.exit_code, p->reason);
  } else if (status == G2Z_OK &&
             g2z_summary_read(e->services, g2z_path_in(run_dir, POINT_FILE).text, told) != G2Z_OK)
    give_up(p, G2Z_OUTCOME_FAILED, e->services->error);
  for (size_t i = 0; *told && i < (*told)->count; i++)
    fill_watched(&seen, &end, wall_s, &(*told)->points[i].figures);
  if (*told) memcpy(e->s->hardware, (*told)->hardware, sizeof e->s->hardware);
  if (seen.smi) pclose(seen.smi);
  if (seen.said) fclose(seen.said);
  return status;
}

static void print_eta(const experiment *e) {
  double left = (g2z_seconds() - e->began) / e->runs * (e->all_runs - e->runs);
  if (e->runs < e->all_runs) printf(", %d:%02d left", (int)left / 60, (int)left % 60);
  puts("");
  fflush(stdout);
}

/* Run number e->runs + 1: `command` on `world` ranks, for a repeat of the point `p`, which says how
 * it went; *told as of run_ranks. */
static g2z_status run_job(experiment *e, int command, options *o, int world, int repeat,
                          g2z_point *p, g2z_summary **told) {
  char **argv;
  const int run = e->runs + 1;
  const g2z_path run_dir = g2z_path_in(e->out, "run_%s_%d", e->s->experiment, run);
  *told = NULL;
  TRY(check_stop(e));
  printf("[%d/%d] %s, repeat %d: ", run, e->all_runs, p->name, repeat + 1);
  fflush(stdout);
  o->run_dir = run_dir.text;
  TRY(rank_arguments(e, command, o, &argv));
  g2z_status status = run_ranks(e, world, argv, run_dir.text, p, told);
  g2z_release(e->services, argv);
  TRY(status);
  p->runs[p->repeats++] = e->runs = run;
  if (*told) return G2Z_OK;
  printf("failed, %s", p->reason);
  e->all_runs -= e->o->repeats - repeat - 1; /* it will not be tried again */
  return G2Z_OK;
}

static g2z_status run_one(experiment *e, int index, int repeat) {
  g2z_figures *f = &e->samples[index * G2Z_REPEATS + repeat];
  const work *w = &e->works[index];
  g2z_summary *told;
  options o = *e->o;
  o.train = w->train;
  o.shape = w->train.model;
  o.seq = w->train.seq;
  o.bucket_mb = w->train.bucket_mb;
  o.steps = w->steps;
  TRY(run_job(e, COMMAND_point, &o, w->world, repeat, &e->s->points[index], &told));
  if (told) {
    *f = told->points[0].figures;
    printf("%.0f tokens/s, %.2f ms per step, %.1f s", f->tokens_per_sec, f->step_p50_ms,
           f->total_wall_time_sec);
  }
  print_eta(e);
  g2z_summary_free(told);
  return G2Z_OK;
}

/* A round runs each point once, so that what changes on the machine meanwhile meets all of them. */
static g2z_status run_rounds(experiment *e) {
  for (int i = 0; i < (int)e->s->count; i++) {
    const g2z_point *p = &e->s->points[i];
    if (p->outcome == G2Z_OUTCOME_OK) e->all_runs += e->o->repeats;
    else printf("skipped: %s: %s\n", p->name, p->reason);
  }
  e->began = g2z_seconds();
  for (int repeat = 0; repeat < e->o->repeats; repeat++)
    for (int i = 0; i < (int)e->s->count; i++)
      if (e->s->points[i].outcome == G2Z_OUTCOME_OK) TRY(run_one(e, i, repeat));
  return G2Z_OK;
}

/* ----- experiments: what comes of them ------------------------------------ */

/* Of what was measured the median, where each repeat knows it. */
static void settle_repeats(const experiment *e, int index) {
  g2z_point *p = &e->s->points[index];
  g2z_figures *samples = &e->samples[index * G2Z_REPEATS];
  double values[G2Z_REPEATS];
  const size_t count = (size_t)p->repeats;
  for (int i = 0; i < G2Z_FIGURE_COUNT; i++) {
    for (size_t r = 0; r < count; r++) values[r] = *g2z_figure(&samples[r], i);
    if (i == G2Z_FIGURE(tokens_per_sec))
      p->figures.tokens_per_sec_sd = g2z_deviation(values, count);
    double median = g2z_median(values, count);
    if (!isnan(median)) *g2z_figure(&p->figures, i) = median;
  }
  p->figures.began_sec = p->figures.ended_sec = NAN; /* of one run, and of no use to others */
}

/* Of a point whose turn did not come before bench was stopped nothing is known. */
static void settle_points(const experiment *e) {
  for (int i = 0; i < (int)e->s->count; i++) {
    g2z_point *p = &e->s->points[i];
    if (p->outcome != G2Z_OUTCOME_OK) continue;
    if (p->repeats) settle_repeats(e, i);
    else give_up(p, G2Z_OUTCOME_SKIPPED, "bench was stopped before a run of it had ended");
  }
}

/* Against the point that differs in nothing but that it has one rank. */
static void compare_with_one(experiment *e) {
  for (int i = 0; i < (int)e->s->count; i++) {
    g2z_point *p = &e->s->points[i];
    for (int k = 0; k < (int)e->s->count; k++) {
      const g2z_point *one = &e->s->points[k];
      const g2z_train_config *mine = &e->works[i].train, *its = &e->works[k].train;
      if (e->works[k].world != 1 || mine->zero_stage != its->zero_stage ||
          mine->strategy != its->strategy || mine->dtype != its->dtype ||
          mine->bucket_mb != its->bucket_mb)
        continue;
      double speedup = p->figures.tokens_per_sec / one->figures.tokens_per_sec;
      p->figures.speedup_vs_1gpu = speedup;
      p->figures.scaling_efficiency = speedup / e->works[i].world;
    }
  }
}

/* Of an experiment that was stopped it tells what had ended until then. */
static g2z_status finish_experiment(experiment *e) {
  const g2z_path path = g2z_path_in(e->out, "%s_report.json", e->s->experiment);
  int failed = 0, stopped = e->runs < e->all_runs;
  if (stopped)
    add_name(e->s->work, sizeof e->s->work, "stopped by signal %d after %d of %d runs",
             (int)stop_signal, e->runs, e->all_runs);
  TRY(g2z_summary_write(e->s, path.text));
  puts("");
  g2z_summary_print(e->s, print_line, NULL);
  printf("%s\n", path.text);
  for (int i = 0; i < (int)e->s->count; i++)
    failed += e->s->points[i].outcome == G2Z_OUTCOME_FAILED;
  if (stopped)
    return g2z_fail(e->services, G2Z_STOPPED, "stopped by signal %d: the report tells of %d of %d "
                    "runs", (int)stop_signal, e->runs, e->all_runs);
  if (!failed) return G2Z_OK;
  return g2z_fail(e->services, G2Z_DEVICE, "%d of %d points failed: they are listed above, and "
                  "what their ranks said is in console.txt of their run directories", failed,
                  (int)e->s->count);
}

/* Tokens for the longest of the points, by Zipf's law. At most 32 Mi: a longer run reads them
 * again. A block of 1 Mi is drawn once and repeated. */
static g2z_status write_tokens(experiment *e) {
  const size_t block = (size_t)1 << 20, limit = (size_t)1 << 25;
  size_t wanted = 0;
  for (int i = 0; i < (int)e->s->count; i++) {
    const work *w = &e->works[i];
    size_t step = (size_t)w->train.batch * (size_t)w->train.accum * (size_t)w->train.seq *
                  (size_t)w->world;
    size_t most = step > limit ? step : limit, run = step * (size_t)(w->steps + e->o->warmup);
    if (e->s->points[i].outcome != G2Z_OUTCOME_OK) continue;
    if (run > most) run = most;
    if (run > wanted) wanted = run;
  }
  g2z_shard_writer *writer;
  e->tokens = g2z_path_in(e->out, "tokens.bin");
  int32_t *tokens = (int32_t *)host_memory(block * sizeof *tokens);
  zipf_tokens(e->o->train.seed, e->o->train.model.vocab, tokens,
              wanted < block ? wanted + 1 : block);
  g2z_status status = g2z_shard_writer_create(e->services, e->tokens.text, G2Z_SHARD_LLMC, &writer);
  for (size_t done = 0; done <= wanted && status == G2Z_OK; done += block)
    status = g2z_shard_writer_append(writer, tokens,
                                     wanted + 1 - done < block ? wanted + 1 - done : block);
  if (status == G2Z_OK) status = g2z_shard_writer_commit(writer);
  g2z_shard_writer_free(writer);
  free(tokens);
  for (int i = 0; i < (int)e->s->count; i++) e->works[i].train.train_glob = e->tokens.text;
  return status;
}

/* Checks all that can be checked before the points are known, and writes nothing. */
static g2z_status open_experiment(experiment *e, g2z_services *services, options *o,
                                  const g2z_context_config *config) {
  const char *name = commands[o->command].name;
  memset(e, 0, sizeof *e);
  e->o = o;
  e->services = services;
  e->device = config->device;
  e->lock = -1;
  if (config->ranks.place.world > 1)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "this process is rank %d of %d: bench %s starts "
                    "its ranks itself, so start it alone", config->ranks.place.rank,
                    config->ranks.place.world, name);
  TRY(read_axes(e));
  time_t now = time(NULL);
  struct tm utc;
  char stamp[32];
  strftime(stamp, sizeof stamp, "%Y%m%d_%H%M%S", gmtime_r(&now, &utc));
  if (o->out) snprintf(e->out, sizeof e->out, "%s", o->out);
  else snprintf(e->out, sizeof e->out, "runs/bench_%s_%s", name, stamp);
  const g2z_path path = g2z_path_in(e->out, "%s_report.json", name);
  int there;
  TRY(g2z_is_there(services, path.text, &there));
  if (there)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "%.600s is there already: choose another --out, or "
                    "remove it", path.text);
  TRY(new_summary(services, o, name, &e->s));
  snprintf(e->s->hardware, sizeof e->s->hardware, "unknown"); /* until ranks tell */
  e->works = (work *)host_memory(POINTS_MAX * sizeof *e->works);
  memset(e->works, 0, POINTS_MAX * sizeof *e->works);
  e->samples = (g2z_figures *)host_memory(POINTS_MAX * G2Z_REPEATS * sizeof *e->samples);
  return G2Z_OK;
}

/* Makes `out`. Another experiment there would remove the tokens of this one; one that was
 * interrupted has left runs, whose names are taken. */
static g2z_status take_out(experiment *e) {
  const g2z_path path = g2z_path_in(e->out, "run_%s_1", e->s->experiment);
  int there;
  TRY(g2z_make_directory(e->services, e->out));
  TRY(g2z_lock_directory(e->services, e->out, &e->lock));
  TRY(g2z_is_there(e->services, path.text, &there));
  if (!there) return G2Z_OK;
  return g2z_fail(e->services, G2Z_BAD_ARGUMENT, "%.600s is there already, of an experiment that "
                  "did not end: choose another --out, or remove %.60s's runs", path.text,
                  e->s->experiment);
}

static void close_experiment(experiment *e) {
  if (e->tokens.text[0]) unlink(e->tokens.text);
  if (e->lock >= 0) close(e->lock);
  free(e->samples);
  free(e->works);
  g2z_summary_free(e->s);
}

static g2z_status run_points(experiment *e) {
  const g2z_train_config *t = &e->o->train;
  char length[32]; /* by --tokens each point has steps of its own */
  int possible = 0;
  TRY(add_points(e));
  for (int i = 0; i < (int)e->s->count; i++) possible += e->s->points[i].outcome == G2Z_OUTCOME_OK;
  if (!possible)
    return g2z_fail(e->services, G2Z_UNSUPPORTED, "no point can be measured here: %s",
                    e->s->points[0].reason);
  if (e->o->tokens) snprintf(length, sizeof length, "%" PRId64 " tokens", e->o->tokens);
  else snprintf(length, sizeof length, "%d steps", e->o->steps);
  snprintf(e->s->work, sizeof e->s->work, "%d layers, %d channels, vocabulary %d, T=%d, %.60s, "
           "%s after %d steps of warm-up, %d repeats", t->model.layers, t->model.channels,
           t->model.vocab, t->seq, e->o->dtype_list, length, e->o->warmup, e->o->repeats);
  TRY(take_out(e));
  if (!t->train_glob) TRY(write_tokens(e));
  g2z_status status = run_rounds(e);
  if (status != G2Z_OK && status != G2Z_STOPPED) return status;
  settle_points(e);
  compare_with_one(e);
  return finish_experiment(e);
}

/* ----- comm --------------------------------------------------------------- */

static g2z_status add_copy(g2z_summary *s, const g2z_point *from) {
  g2z_point *p;
  TRY(g2z_summary_add(s, &p));
  *p = *from;
  return G2Z_OK;
}

/* One more sample of each collective between `world` ranks; the first makes their points, from
 * `first` on. A point of its own says that the ranks failed. */
static g2z_status run_exchanges(experiment *e, int world, size_t first, int repeat) {
  options o = *e->o;
  g2z_point job = g2z_point_default();
  g2z_summary *told, *s = e->s;
  snprintf(job.name, sizeof job.name, "%d ranks", world);
  TRY(run_job(e, COMMAND_exchange, &o, world, repeat, &job, &told));
  g2z_status status = told ? G2Z_OK : add_copy(s, &job);
  for (size_t i = first; told && i - first < told->count && i < POINTS_MAX; i++) {
    const g2z_point *measured = &told->points[i - first];
    if (i == s->count) status = add_copy(s, measured);
    if (status != G2Z_OK) break;
    g2z_point *p = &s->points[i];
    e->samples[i * G2Z_REPEATS + (size_t)p->repeats] = measured->figures;
    p->runs[p->repeats++] = e->runs;
  }
  if (told)
    printf("%zu collectives, %.1f s", told->count, told->points[0].figures.total_wall_time_sec);
  if (status == G2Z_OK) print_eta(e);
  g2z_summary_free(told);
  return status;
}

/* Whether `world` ranks can exchange anything here. */
static g2z_status check_world(const experiment *e, int world) {
  if (world > 1) return check_gpus(e, world);
  return g2z_fail(e->services, G2Z_UNSUPPORTED, "alone there is nothing to exchange: --gpus takes "
                  "2 or more");
}

/* All repeats of `world` ranks; a point of its own says why there are none. */
static g2z_status run_world(experiment *e, int world) {
  size_t first = e->s->count;
  g2z_point skipped = g2z_point_default();
  g2z_status status = check_world(e, world);
  for (int r = 0; r < e->o->repeats && status == G2Z_OK; r++) {
    status = run_exchanges(e, world, first, r);
    if (status == G2Z_OK && e->s->points[e->s->count - 1].outcome == G2Z_OUTCOME_FAILED) break;
  }
  if (status != G2Z_UNSUPPORTED && status != G2Z_STOPPED) return status;
  if (e->s->count > first) return G2Z_OK;
  snprintf(skipped.name, sizeof skipped.name, "%d rank%s", world, world > 1 ? "s" : "");
  give_up(&skipped, G2Z_OUTCOME_SKIPPED, e->services->error);
  printf("skipped: %s: %s\n", skipped.name, skipped.reason);
  return add_copy(e->s, &skipped);
}

static g2z_status run_worlds(experiment *e) {
  const axes *a = &e->lists;
  g2z_status status = G2Z_OK;
  for (int i = 0; i < a->ranks.count; i++) {
    g2z_status possible = check_world(e, (int)a->ranks.at[i]);
    if (possible == G2Z_OK) e->all_runs += e->o->repeats;
    else status = possible;
  }
  if (!e->all_runs) return status;
  snprintf(e->s->work, sizeof e->s->work, "%s, median of %d runs of 5 rounds each; limit: %s",
           g2z_dtype_text(e->o->train.dtype), e->o->repeats,
           e->device == G2Z_DEVICE_CUDA ? "a copy into another GPU" : "memcpy");
  TRY(take_out(e));
  e->began = g2z_seconds();
  for (int i = 0; i < a->ranks.count; i++) TRY(run_world(e, (int)a->ranks.at[i]));
  settle_points(e);
  return finish_experiment(e);
}

/* ----- an experiment ------------------------------------------------------- */

static g2z_status run_experiment(g2z_services *services, options *o, g2z_context_config *config) {
  experiment e;
  catch_signals();
  g2z_status status = open_experiment(&e, services, o, config);
  if (status == G2Z_OK) status = o->command == COMMAND_comm ? run_worlds(&e) : run_points(&e);
  close_experiment(&e);
  return status;
}

/* ----- report ------------------------------------------------------------- */

static g2z_status run_report(g2z_services *services, options *o, g2z_context_config *config) {
  g2z_results *found;
  const char *out = o->out ? o->out : o->argv[1];
  (void)config;
  if (o->argc < 2)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "bench report DIR...: name the directories that "
                    "experiments or runs left");
  const g2z_path path = g2z_path_in(out, "report.html");
  TRY(g2z_results_create(services, &found));
  int is_run = 0;
  g2z_status status = g2z_is_there(services, g2z_path_in(out, "training_metrics.json").text,
                                   &is_run);
  for (int i = 1; i < o->argc && status == G2Z_OK; i++)
    status = g2z_results_add(found, o->argv[i]);
  if (status == G2Z_OK && is_run)
    status = g2z_fail(services, G2Z_BAD_ARGUMENT, "%.600s is a run, with a report.html of its own: "
                      "say where this one goes, --out DIR", out);
  if (status == G2Z_OK && o->out) status = g2z_make_directory(services, o->out);
  if (status == G2Z_OK) status = g2z_results_page(found, path.text);
  if (status == G2Z_OK)
    printf("%s: %zu experiments, %zu runs\n", path.text, found->summary_count, found->run_count);
  g2z_results_free(found);
  return status;
}

/* profiles/profile_summary.json of each run directory, from the tables beside it. */
static g2z_status run_profile(g2z_services *services, options *o, g2z_context_config *config) {
  (void)config;
  if (o->argc < 2)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "name the run directories: bench profile "
                    "RUN_DIR...");
  for (int i = 1; i < o->argc; i++) {
    TRY(g2z_profile_run(services, o->argv[i]));
    printf("%s/profiles/profile_summary.json\n", o->argv[i]);
  }
  return G2Z_OK;
}

/* ----- the program -------------------------------------------------------- */

static void print_log(void *user, g2z_log_level level, const char *sentence) {
  (void)user;
  printf("%s%s\n", level == G2Z_LOG_WARNING ? "warning: " : "", sentence);
}

int main(int argc, char **argv) {
  g2z_services services;
  memset(&services, 0, sizeof services);
  g2z_status status = g2z_begin_program(&services, argv);
  services.log = print_log;
  options o;
  char *command_line = NULL;
  g2z_context_config context = g2z_context_config_default(&services);
  context.ranks.on_fault = on_fault;
  if (status == G2Z_OK) status = g2z_flags_line(&services, argc, argv, &command_line);
  if (status == G2Z_OK) status = read_flags(&services, argc, argv, &o);
  if (status == G2Z_OK && !o.help) {
    o.command_line = command_line;
    status = settle(&services, &o, &context);
    if (status == G2Z_OK && context.ranks.place.rank != 0 && !freopen("/dev/null", "w", stdout))
      fprintf(stderr, "bench: rank %d cannot be silenced\n", context.ranks.place.rank);
    if (status == G2Z_OK) status = commands[o.command].run(&services, &o, &context);
  }
  if (status != G2Z_OK) fprintf(stderr, "bench: %s\n", services.error);
  g2z_release(&services, command_line);
  return status == G2Z_OK ? 0 : 1;
}
