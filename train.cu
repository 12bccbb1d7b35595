/* train: GPT-2 from token shards, from the first step to RUN_COMPLETE.txt. It is also the example
 * of how to embed gpt2_zero.h: flags, a context, and a loop over g2z_run_next. Builds as C11, as
 * C++17 and with nvcc: cc -O3 -x c train.cu -lm -lpthread -o train */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef G2Z_GIT_COMMIT
#define G2Z_GIT_COMMIT NULL /* the Makefile knows it */
#endif

#define EXIT_STOPPED 75 /* EX_TEMPFAIL: a launcher that sees it may start the same command again */

#define TRY(call)                          \
  do {                                     \
    g2z_status status_ = (call);           \
    if (status_ != G2Z_OK) return status_; \
  } while (0)

typedef struct options {
  g2z_run_config run;
  const char *model, *run_dir;
  int layers, heads, channels, context, vocab_size, seq, accum; /* 0: see --help */
  int global_batch, device, dtype;
  int64_t steps;
  float loss_scale, bucket_mb;
  int dry_run, profile_mode, help;
  char run_dir_text[64], vocab_text[1024];
} options;

#define WORD(name, text) "|" text
#define WORD_OF_3(name, text, bytes) "|" text
#define MANY 1e12 /* steps */

/* Every flag, once: the parser, --help and the README's table are made from this list. A default
 * is what default_options() leaves; one outside of its range is not shown, the text explains it. */
#define FLAG_LIST(FLAG, GROUP)                                                                    \
  GROUP("Data")                                                                                   \
  /*   name  kind  destination  minimum  maximum  value  help */                                  \
  FLAG("train", TEXT, run.train.train_glob, 0, 0, "GLOB",                                         \
       "token shards to train on; without it: validate, write")                                   \
  FLAG("val", TEXT, run.val_glob, 0, 0, "GLOB", "token shards to validate on")                    \
  FLAG("vocab", TEXT, run.vocab, 0, 0, "FILE",                                                    \
       "tokenizer of the shards: vocab.bpe, merges.txt, tokenizer.json, ...")                     \
  GROUP("Model")                                                                                  \
  FLAG("model", TEXT, model, 0, 0, "NAME", "gpt2, gpt2-medium, gpt2-large or gpt2-xl")            \
  FLAG("layers", INT, layers, 1, 1024, "N", "overrides the model's, as do the next four")         \
  FLAG("channels", INT, channels, 8, 65536, "N", "width of the residual stream")                  \
  FLAG("heads", INT, heads, 1, 65536, "N", "divides channels [channels / 64]")                    \
  FLAG("context", INT, context, 1, 1048576, "N", "positions: the longest sequence [1024]")        \
  FLAG("vocab-size", INT, vocab_size, 2, 16777216, "N",                                           \
       "tokens that the model knows [those of --vocab; without one 50257]")                       \
  FLAG("dropout", FLOAT, run.train.dropout, 0, 0.99, "P", "on embedding, attention, projections") \
  FLAG("init-from", TEXT, run.train.init_from, 0, 0, "DIR",                                       \
       "start from a model.safetensors and config.json of Hugging Face's form")                   \
  GROUP("Batch and length")                                                                       \
  FLAG("batch", INT, run.train.batch, 1, 1048576, "N", "sequences per micro-step and rank")       \
  FLAG("seq", INT, seq, 1, 1048576, "N", "tokens per sequence [context]")                         \
  FLAG("accum", INT, accum, 1, 1048576, "N", "micro-steps per step [1]")                          \
  FLAG("global-batch", INT, global_batch, 1, 2147483647, "N",                                     \
       "sequences per step: sets --accum, and must divide by batch x ranks")                      \
  FLAG("steps", INT64, steps, 1, MANY, "N", "length of the run and of its schedule")              \
  FLAG("epochs", INT64, run.epochs, 1, 1e6, "N", "the same in passes over the shards [1]")        \
  FLAG("max-train-steps", INT64, run.max_train_steps, 1, MANY, "N",                               \
       "stop after that many steps of the schedule")                                              \
  GROUP("Optimizer")                                                                              \
  FLAG("lr", FLOAT, run.train.optimizer.lr, 0, 1e6, "X", "peak learning rate of AdamW")           \
  FLAG("schedule", CHOICE, run.train.optimizer.schedule, 0, 0, G2Z_SCHEDULE_LIST(WORD),    \
       "of the learning rate")                                                                    \
  FLAG("warmup", INT64, run.train.optimizer.warmup, 0, MANY, "N",                                 \
       "steps of linear warm-up [a tenth of the steps, at most 1000]")                            \
  FLAG("min-lr", FLOAT, run.train.optimizer.min_lr, 0, 1e6, "X",                                  \
       "learning rate at the end [a tenth of --lr]")                                              \
  FLAG("weight-decay", FLOAT, run.train.optimizer.weight_decay, 0, 1e6, "X", "on matrices only")  \
  FLAG("beta1", FLOAT, run.train.optimizer.beta1, 0, 0.999999, "X", "decay of the mean")          \
  FLAG("beta2", FLOAT, run.train.optimizer.beta2, 0, 0.999999, "X", "decay of the variance")      \
  FLAG("eps", FLOAT, run.train.optimizer.eps, 1e-30, 1, "X", "in AdamW's denominator")            \
  FLAG("clip", FLOAT, run.train.optimizer.clip, 0, 1e30, "X", "global gradient norm; 0: off")     \
  GROUP("Numbers and device")                                                                     \
  FLAG("device", CHOICE, device, 0, 0, G2Z_DEVICE_LIST(WORD), "[cuda if there is one]")    \
  FLAG("dtype", CHOICE, dtype, 0, 0, G2Z_DTYPE_LIST(WORD_OF_3), "[fp16 on cuda, fp32 on cpu]")   \
  FLAG("loss-scale", FLOAT, loss_scale, 1, 16777216, "X", "a fixed one for fp16 [dynamic]")       \
  FLAG("loss-scale-window", INT, run.train.optimizer.loss_scale_window, 1, 1073741824, "N",       \
       "good steps before a dynamic loss scale doubles")                                          \
  FLAG("graph", CHOICE, run.train.graph, 0, 0, "|off|on", "the step as one CUDA graph")             \
  FLAG("tune", CHOICE, run.train.tune, 0, 0, "|off|on", "time each product's algorithms once")     \
  FLAG("tuning", TEXT, run.train.tuning, 0, 0, "FILE", "repeat the choices of a run's tuning.txt")   \
  FLAG("zero", INT, run.train.zero_stage, 0, 3, "STAGE",                                          \
       "ZeRO: 1 shards the optimizer, 2 the gradients too, 0 nothing")                            \
  FLAG("grad-dtype", CHOICE, run.train.grad_fp32, 0, 0, "|same|fp32",                             \
       "of gradients with one micro-step; with more they are fp32")                               \
  FLAG("bucket-mb", FLOAT, bucket_mb, 0.001, 65536, "X",                                          \
       "MiB of gradients per collective [16, and 1.9 x ranks]")                                   \
  FLAG("seed", UINT64, run.train.seed, 0, 0, "N", "of weights, order of the data, dropout")       \
  GROUP("Validation and samples")                                                                 \
  FLAG("val-every", INT64, run.val_every, 1, MANY, "N", "steps [the end of each epoch]")          \
  FLAG("val-steps", INT64, run.val_steps, 1, MANY, "N", "batches of one validation [all]")        \
  FLAG("max-val-steps", INT64, run.max_val_steps, 1, MANY, "N", "a limit on that number")         \
  FLAG("sample-every", INT64, run.sample_every, 1, MANY, "N", "steps [the end of the run]")       \
  FLAG("sample-tokens", INT, run.sample_tokens, 0, 1048576, "N", "length of a sample; 0: none")   \
  FLAG("prompt", TEXT, run.prompt, 0, 0, "TEXT", "what a sample continues [end of text]")         \
  FLAG("temperature", FLOAT, run.sampling.temperature, 0, 1e6, "X", "0: the likeliest token")     \
  FLAG("top-k", INT, run.sampling.top_k, 0, 16777216, "N", "draw among that many; 0: all")        \
  FLAG("top-p", FLOAT, run.sampling.top_p, 1e-6, 1, "X", "draw among the likeliest of that mass") \
  FLAG("sample-seed", UINT64, run.sampling.seed, 0, 0, "N", "of the draws")                       \
  GROUP("Checkpoints")                                                                            \
  FLAG("save-every", INT64, run.save_every, 1, MANY, "N",                                         \
       "steps from one checkpoint RUN_DIR/step-NNNNNN to the next, and at the end")               \
  FLAG("save-epochs", SWITCH, run.save_epochs, 0, 0, "", "save at the end of each epoch")         \
  FLAG("keep", INT, run.keep, 0, 2147483647, "N", "checkpoints that stay; 0: all")                \
  FLAG("resume", TEXT, run.resume, 0, 0, "latest|DIR",                                            \
       "go on behind a checkpoint; with the last of --run-dir, or from the start")                \
  GROUP("Results")                                                                                \
  FLAG("run-dir", TEXT, run_dir, 0, 0, "DIR", "metrics and log [runs/run_DATE_TIME]; none: none") \
  FLAG("save-weights", TEXT, run.save_weights, 0, 0, "DIR",                                       \
       "model.safetensors and config.json at the end, with the tokenizer")                        \
  FLAG("dry-run", SWITCH, dry_run, 0, 0, "", "print the memory plan and the largest batch, stop") \
  FLAG("profile-mode", SWITCH, profile_mode, 0, 0, "", "a console line every 10 s at most")       \
  FLAG("help", SWITCH, help, 0, 0, "", "print this")

static options default_options(void) {
  options o;
  memset(&o, 0, sizeof o);
  o.run = g2z_run_config_default();
  o.model = "gpt2";
  o.device = o.dtype = -1;
  return o;
}

static void print_line(void *user, const char *text) {
  (void)user;
  puts(text);
}

static void print_log(void *user, g2z_log_level level, const char *sentence) {
  (void)user;
  printf("%s%s\n", level == G2Z_LOG_WARNING ? "warning: " : "", sentence);
  fflush(stdout);
}

/* Fills the options from argv, or prints them for --help. */
static g2z_status read_flags(g2z_services *services, int argc, char **argv, options *o) {
#define FLAG(name, kind, destination, minimum, maximum, value, help) \
  {name, G2Z_FLAG_##kind, &o->destination, minimum, maximum, value, help},
#define GROUP(title) {"", G2Z_FLAG_GROUP, NULL, 0, 0, "", title ":"},
  const g2z_flag flags[] = {FLAG_LIST(FLAG, GROUP)};
#undef FLAG
#undef GROUP
  const int count = (int)(sizeof flags / sizeof *flags);
  options defaults = *o;
  g2z_status status = g2z_flags_parse(services, flags, count, argc, argv, NULL);
  if (status != G2Z_OK || !o->help) return status;
  *o = defaults;
  puts("train: trains a GPT-2 on token shards that prepare_data made, and lets it write\n"
       "  ./train --train 'data/NAME_train_*.bin' --val 'data/NAME_val_*.bin' --vocab FILE\n");
  g2z_flags_print(flags, count, print_line, NULL);
  o->help = 1;
  return G2Z_OK;
}

/* The model: a preset or the weights' own shape, then what the flags override. */
static g2z_status settle_model(g2z_services *services, options *o) {
  g2z_model_config *model = &o->run.train.model;
  const char *weights = o->run.train.init_from;
  int custom = o->layers || o->heads || o->channels || o->context;
  o->run.model_name = custom || weights ? "custom" : o->model;
  if (weights) {
    TRY(g2z_weights_config(services, weights, model));
    snprintf(o->vocab_text, sizeof o->vocab_text, "%.1000s/merges.txt", weights);
    if (!o->run.vocab && access(o->vocab_text, R_OK) == 0) o->run.vocab = o->vocab_text;
  } else {
    TRY(g2z_model_config_named(services, o->model, model));
    if (o->run.vocab) {
      g2z_tokenizer *tokenizer;
      TRY(g2z_tokenizer_create(services, o->run.vocab, &tokenizer));
      model->vocab = g2z_tokenizer_vocab(tokenizer);
      g2z_tokenizer_free(tokenizer);
    }
  }
  if (o->layers) model->layers = o->layers;
  if (o->channels) {
    model->channels = o->channels;
    model->heads = o->channels < 64 ? 1 : o->channels / 64;
  }
  if (o->heads) model->heads = o->heads;
  if (o->context) model->context = o->context;
  if (o->vocab_size) model->vocab = o->vocab_size;
  return G2Z_OK;
}

static g2z_status fail(g2z_services *services, const char *sentence) {
  snprintf(services->error, sizeof services->error, "%s", sentence);
  return G2Z_BAD_ARGUMENT;
}

/* What flags leave open, and what they say together. */
static g2z_status settle(g2z_services *services, options *o, g2z_context_config *context) {
  g2z_train_config *train = &o->run.train;
  TRY(g2z_place_find(services, &context->ranks.place));
  TRY(settle_model(services, o));
  if (o->device >= 0) context->device = (g2z_device_kind)o->device;
  train->dtype = o->dtype >= 0 ? (g2z_dtype)o->dtype
                 : context->device == G2Z_DEVICE_CUDA ? G2Z_FP16 : G2Z_FP32;
  train->seq = o->seq ? o->seq : train->model.context;
  train->accum = o->accum ? o->accum : 1;
  if (o->global_batch) {
    int together = train->batch * context->ranks.place.world;
    if (o->accum)
      return fail(services, "--accum and --global-batch say the same: give one of them");
    if (o->global_batch % together) {
      snprintf(services->error, sizeof services->error,
               "--global-batch %d must divide by --batch %d x %d ranks", o->global_batch,
               train->batch, context->ranks.place.world);
      return G2Z_BAD_ARGUMENT;
    }
    train->accum = o->global_batch / together;
  }
  if (o->steps && o->run.epochs)
    return fail(services, "--steps and --epochs both set the length: give one of them, and "
                          "--max-train-steps to stop earlier");
  if (o->steps) train->optimizer.steps = o->steps;
  else if (!o->run.epochs) o->run.epochs = 1;
  train->bucket_mb = (double)o->bucket_mb;
  if (o->loss_scale > 0) {
    train->optimizer.loss_scale = o->loss_scale;
    train->optimizer.loss_scale_dynamic = 0;
  }
  time_t now = time(NULL);
  struct tm utc;
  strftime(o->run_dir_text, sizeof o->run_dir_text, "runs/run_%Y%m%d_%H%M%S",
           gmtime_r(&now, &utc));
  o->run.run_dir = o->run_dir ? o->run_dir : o->run_dir_text;
  if (strcmp(o->run.run_dir, "none") == 0) o->run.run_dir = NULL;
  o->run.git_commit = G2Z_GIT_COMMIT;
  return G2Z_OK;
}

/* The plan against the memory that is free now. */
static g2z_status dry_run(g2z_services *services, const options *o,
                          const g2z_context_config *context) {
  g2z_train_config config = o->run.train;
  g2z_plan plan;
  size_t overhead_bytes, free_bytes, total_bytes;
  config.optimizer.warmup = 0; /* nothing in the plan depends on the schedule */
  config.optimizer.min_lr = 0;
  TRY(g2z_plan_make(services, &config, context->device, context->ranks.place.rank,
                    context->ranks.place.world, &plan));
  TRY(g2z_device_overhead(services, context->device, &overhead_bytes));
  TRY(g2z_device_memory(services, context->device, &free_bytes, &total_bytes));
  g2z_plan_print(&plan, overhead_bytes, free_bytes, print_line, NULL);
  return G2Z_OK;
}

/* A line per step for someone who watches; for a file, one every 10 seconds. */
static int is_due(const options *o, const g2z_run_event *event, double *next) {
  int step = event->kind == G2Z_RUN_STEP;
  double now = g2z_seconds();
  if (!step || event->metrics.step == event->steps) return 1;
  if (isatty(STDOUT_FILENO) && !o->profile_mode) return 1;
  if (now < *next) return 0;
  *next = now + 10;
  return 1;
}

/* ----- signals ----------------------------------------------------------- */

static g2z_run *running;         /* NULL: there is nothing to save yet */
static struct timespec asked_at; /* when the first signal came */

/* The first signal lets the run save and end; a second one ends the program at once. A terminal's
 * Ctrl-C may come twice, from the terminal and from the launcher: within half a second it is one. */
static void on_signal(int number) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (asked_at.tv_sec) {
    double since = (double)(now.tv_sec - asked_at.tv_sec) + 1e-9 * (double)(now.tv_nsec - asked_at.tv_nsec);
    if (since < 0.5) return;
    _exit(128 + number);
  }
  g2z_run *run = __atomic_load_n(&running, __ATOMIC_RELAXED);
  if (!run) _exit(128 + number);
  asked_at = now;
  g2z_run_request_stop(run, number);
}

static void catch_signals(g2z_run *run) {
  static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1};
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  __atomic_store_n(&running, run, __ATOMIC_RELAXED);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    sigaction(numbers[i], &action, NULL);
}

static g2z_status train(const options *o, const g2z_context_config *context_config) {
  g2z_context *context;
  g2z_run *run = NULL;
  g2z_run_event event;
  double next_line = 0;
  g2z_status status = g2z_context_create(context_config, &context);
  if (status == G2Z_OK) status = g2z_run_create(context, &o->run, &run);
  if (status == G2Z_OK) catch_signals(run);
  for (int done = 0; status == G2Z_OK && !done;) {
    status = g2z_run_next(run, &event);
    if (status != G2Z_OK) break;
    if (is_due(o, &event, &next_line)) print_log(NULL, G2Z_LOG_INFO, event.line);
    done = event.kind == G2Z_RUN_DONE;
  }
  catch_signals(NULL);
  g2z_run_free(run);
  g2z_context_free(context);
  return status;
}

int main(int argc, char **argv) {
  g2z_services services;
  memset(&services, 0, sizeof services);
  services.log = print_log;
  options o = default_options();
  g2z_context_config context = g2z_context_config_default(&services);
  char *command_line = NULL;
  g2z_status status = g2z_flags_line(&services, argc, argv, &command_line);
  if (status == G2Z_OK) status = read_flags(&services, argc, argv, &o);
  if (status == G2Z_OK && !o.help) {
    o.run.command_line = command_line;
    status = settle(&services, &o, &context);
    if (status == G2Z_OK)
      status = o.dry_run ? dry_run(&services, &o, &context) : train(&o, &context);
  }
  if (status != G2Z_OK) fprintf(stderr, "train: %s\n", services.error);
  g2z_release(&services, command_line);
  return status == G2Z_OK ? 0 : status == G2Z_STOPPED ? EXIT_STOPPED : 1;
}
