/* train: GPT-2 from token shards, from the first step to RUN_COMPLETE.txt. It is also the example
 * of how to embed gpt2_zero.h: flags, a context, and a loop over g2z_run_next. Builds as C11, as
 * C++17 and with nvcc: cc -O3 -x c train.cu -lm -lpthread -o train */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_run.h"

#include <signal.h>
#include <stdio.h>
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

typedef struct options {
  g2z_run_config run;
  const char *model, *run_dir;
  g2z_model_config shape; /* what overrides the model's; 0: see --help, as do the next */
  int seq, accum;
  int global_batch, device, dtype, zero;
  int64_t steps;
  float loss_scale, bucket_mb;
  int ranks, gpus;
  float join_timeout, silence_timeout, hang_timeout;
  const char *run_id;
  int dry_run, nccl_logs, profile_mode, help;
  char run_dir_text[1024], vocab_text[4128];
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
  FLAG("model", TEXT, model, 0, 0, "NAME", "gpt2, gpt2-medium, gpt2-large or gpt2-xl [gpt2]")     \
  FLAG("layers", INT, shape.layers, 1, 1024, "N", "overrides the model's, as do the next four")   \
  FLAG("channels", INT, shape.channels, 8, 65536, "N", "width of the residual stream")            \
  FLAG("heads", INT, shape.heads, 1, 65536, "N", "divides channels [channels / 64]")              \
  FLAG("context", INT, shape.context, 1, 1048576, "N", "positions: the longest sequence [1024]")  \
  FLAG("vocab-size", INT, shape.vocab, 2, 16777216, "N",                                          \
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
  FLAG("graph", CHOICE, run.train.graph, 0, 0, "|off|on|auto", "the step as CUDA graphs")        \
  FLAG("tune", CHOICE, run.train.tune, 0, 0, "|off|on",                                           \
       "time each product's algorithms once; off keeps the LM head's logits, too")                \
  FLAG("tuning", TEXT, run.train.tuning, 0, 0, "FILE", "repeat the choices of a run's tuning.txt")   \
  FLAG("zero", INT, zero, 0, 3, "STAGE",                                                          \
       "ZeRO shards: 0 nothing, 1 the optimizer, 2 gradients too, 3 parameters too [1]")          \
  FLAG("strategy", CHOICE, run.train.strategy, 0, 0, G2Z_STRATEGY_LIST(WORD),                     \
       "dp: rank 0 alone has the optimizer and updates for all")                                  \
  FLAG("grad-dtype", CHOICE, run.train.grad_fp32, 0, 0, "|same|fp32",                             \
       "of gradients, also between ranks; micro-steps add up in fp32")                            \
  FLAG("gather", CHOICE, run.train.gather, 0, 0, G2Z_GATHER_LIST(WORD),                           \
       "how GPUs exchange parameters: see the header")                                            \
  FLAG("reduce", CHOICE, run.train.reduce, 0, 0, G2Z_REDUCE_LIST(WORD),                           \
       "how GPUs add gradients up, also there")                                                   \
  FLAG("bucket-mb", FLOAT, bucket_mb, 0.001, 65536, "X",                                          \
       "MiB of gradients per collective [64, and 1.9 x ranks]")                                   \
  FLAG("recompute", CHOICE, run.train.recompute, 0, 0, G2Z_RECOMPUTE_LIST(WORD),                  \
       "block: forward runs again in backward, which saves memory")                  \
  FLAG("seed", UINT64, run.train.seed, 0, 0, "N", "of weights, order of the data, dropout")       \
  GROUP("Ranks")                                                                                  \
  FLAG("ranks", INT, ranks, 1, 4096, "N", "start N ranks on this host; not under a launcher")      \
  FLAG("gpus", INT, gpus, 1, 4096, "N", "the same, and there must be N GPUs")                      \
  FLAG("run-id", TEXT, run_id, 0, 0, "TEXT",                                                      \
       "tells this job from others on the same port [the launcher's job id]")                     \
  FLAG("join-timeout", FLOAT, join_timeout, 0.1, 86400, "S", "seconds until all ranks are there") \
  FLAG("silence-timeout", FLOAT, silence_timeout, 0.1, 86400, "S",                                \
       "without a sign of life, after which a rank counts as dead")                               \
  FLAG("hang-timeout", FLOAT, hang_timeout, 0, 1e6, "S",                                          \
       "without progress, after which a rank counts as hung; 0: never")                           \
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
  FLAG("tensorboard", CHOICE, run.tensorboard, 0, 0, "|off|on",                                   \
       "event files of the metrics in the run directory")                                         \
  FLAG("nccl-logs", SWITCH, nccl_logs, 0, 0, "",                                                  \
       "NCCL's log and topology into the run directory; NCCL_LOGS=1 does it too")                 \
  FLAG("dry-run", SWITCH, dry_run, 0, 0, "", "print the memory plan and the largest batch, stop") \
  FLAG("profile", SWITCH, run.profile, 0, 0, "",                                                  \
       "time the parts of a step, into RUN_DIR/profiles; without graphs")                         \
  FLAG("profile-mode", SWITCH, profile_mode, 0, 0, "", "a console line every 10 s at most")       \
  FLAG("help", SWITCH, help, 0, 0, "", "print this")

static options default_options(void) {
  const g2z_ranks_config ranks = g2z_ranks_config_default();
  options o;
  memset(&o, 0, sizeof o);
  o.run = g2z_run_config_default();
  o.device = o.dtype = o.zero = -1;
  o.join_timeout = (float)ranks.join_s;
  o.silence_timeout = (float)ranks.silence_s;
  o.hang_timeout = (float)ranks.hang_s;
  return o;
}

static void print_line(void *user, const char *text) {
  (void)user;
  puts(text);
}

/* What rank 0 says is for people; of the others only what is wrong. user: const g2z_place *. */
static void print_log(void *user, g2z_log_level level, const char *sentence) {
  const g2z_place *place = (const g2z_place *)user;
  const char *warning = level == G2Z_LOG_WARNING ? "warning: " : "";
  if (place->rank == 0) printf("%s%s\n", warning, sentence);
  else if (*warning) printf("[rank %d] %s%s\n", place->rank, warning, sentence);
  fflush(stdout);
}

/* "[rank 3] train: sentence". */
static void print_error(const g2z_place *place, const char *sentence) {
  if (place->world > 1) fprintf(stderr, "[rank %d] train: %s\n", place->rank, sentence);
  else fprintf(stderr, "train: %s\n", sentence);
}

/* ----- faults: another rank died or hangs -------------------------------- */

typedef struct faults {
  const g2z_place *place;
  const char *run_dir; /* NULL: none */
  g2z_ranks *ranks;    /* NULL until all have met and run_dir is rank 0's */
} faults;

static void write_failure(g2z_services *services, const faults *f, const g2z_fault *fault,
                          const char *flight) {
  char path[1200], now[32];
  g2z_writer *writer;
  g2z_json_out out;
  snprintf(path, sizeof path, "%s/RUN_FAILED.json", f->run_dir);
  if (g2z_writer_create(services, path, &writer) != G2Z_OK) return; /* another writes it */
  memset(&out, 0, sizeof out);
  out.writer = writer;
  out.indent = 2;
  g2z_utc_now(now);
  g2z_json_begin(&out, NULL, '{');
  g2z_json_put_string(&out, "timestamp_utc", now);
  g2z_json_put_string(&out, "sentence", fault->sentence);
  g2z_json_put_integer(&out, "rank", fault->rank);
  g2z_json_put_string(&out, "host", fault->host);
  g2z_json_put_string(&out, "phase", fault->phase);
  g2z_json_put_integer(&out, "step", fault->step);
  g2z_json_put_integer(&out, "reported_by_rank", f->place->rank);
  g2z_json_put_integer(&out, "world_size", f->place->world);
  g2z_json_put_string(&out, "flight_recorder", flight);
  g2z_json_end(&out, '}');
  g2z_writer_put(writer, "\n", 1);
  g2z_writer_commit(writer);
  g2z_writer_free(writer);
}

static void on_alarm(int number) {
  (void)number;
  _exit(G2Z_EXIT_LOST);
}

/* A file system or a console that hangs must not keep a rank whose job is lost. The signal is
 * blocked in the library's threads, so that it must be let through here. */
static void end_soon(unsigned seconds) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_alarm;
  sigaction(SIGALRM, &action, NULL);
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
  alarm(seconds);
}

/* Runs in a thread of the library, while others may wait for ever inside a collective: so it says
 * what it knows and leaves. Each rank writes its own flight recorder, and RUN_FAILED.json unless
 * another is writing it: nobody knows who else has died. */
static void on_fault(void *user, const g2z_fault *fault) {
  faults *f = (faults *)user;
  g2z_ranks *ranks = __atomic_load_n(&f->ranks, __ATOMIC_ACQUIRE);
  const int rank = f->place->rank;
  g2z_services services; /* its own: the other one belongs to the main thread */
  char path[1200], name[64];
  memset(&services, 0, sizeof services);
  end_soon(8);
  print_error(f->place, fault->sentence);
  if (ranks && f->run_dir && g2z_make_directory(&services, f->run_dir) == G2Z_OK) {
    snprintf(name, sizeof name, "flight_rank_%d.jsonl", rank);
    snprintf(path, sizeof path, "%s/%s", f->run_dir, name);
    int written = g2z_ranks_write_flight(ranks, &services, path) == G2Z_OK;
    write_failure(&services, f, fault, written ? name : NULL);
  }
  _exit(G2Z_EXIT_LOST);
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

/* The weights' own shape. Flags may say the same; heads that they do not say are any. */
static g2z_status settle_weights(g2z_services *services, options *o) {
  g2z_model_config *model = &o->run.train.model, wanted = o->shape;
  const char *weights = o->run.train.init_from;
  TRY(g2z_weights_config(services, weights, model));
  if (o->model) {
    TRY(g2z_model_config_named(services, o->model, &wanted));
    g2z_model_config_override(&wanted, &o->shape);
    wanted.context = o->shape.context; /* a name tells no length and no vocabulary */
    wanted.vocab = o->shape.vocab;
  }
#define X(name, flag)                                                                             \
  if (wanted.name && wanted.name != model->name) {                                                \
    snprintf(services->error, sizeof services->error,                                             \
             "%s says " #name "=%d, but the weights in %.400s have " #name "=%d: leave it out, "  \
             "or name other weights", o->shape.name ? flag : "--model", wanted.name, weights,     \
             model->name);                                                                        \
    return G2Z_BAD_ARGUMENT;                                                                      \
  }
  X(layers, "--layers")
  X(channels, "--channels")
  X(heads, "--heads")
  X(context, "--context")
  X(vocab, "--vocab-size")
#undef X
  snprintf(o->vocab_text, sizeof o->vocab_text, "%.4096s/merges.txt", weights);
  if (!o->run.vocab && access(o->vocab_text, R_OK) == 0) o->run.vocab = o->vocab_text;
  return G2Z_OK;
}

/* The model: the weights' own, or a preset and what the flags override. */
static g2z_status settle_model(g2z_services *services, options *o) {
  g2z_model_config *model = &o->run.train.model;
  const char *preset = o->model ? o->model : "gpt2";
  int custom = o->shape.layers || o->shape.heads || o->shape.channels || o->shape.context;
  o->run.model_name = custom || o->run.train.init_from ? "custom" : preset;
  if (o->run.train.init_from) return settle_weights(services, o);
  TRY(g2z_model_config_named(services, preset, model));
  if (o->run.vocab) {
    g2z_tokenizer *tokenizer;
    TRY(g2z_tokenizer_create(services, o->run.vocab, &tokenizer));
    model->vocab = g2z_tokenizer_vocab(tokenizer);
    g2z_tokenizer_free(tokenizer);
  }
  g2z_model_config_override(model, &o->shape);
  return G2Z_OK;
}

static g2z_status fail(g2z_services *services, const char *sentence) {
  snprintf(services->error, sizeof services->error, "%s", sentence);
  return G2Z_BAD_ARGUMENT;
}

/* Texts are copied into fields that ranks exchange: one that is cut off would be another. */
static g2z_status check_length(g2z_services *services, const char *flag, const char *text,
                               size_t room) {
  if (!text || strlen(text) < room) return G2Z_OK;
  snprintf(services->error, sizeof services->error,
           "%s has %zu bytes, and at most %zu have room: give a shorter one", flag, strlen(text),
           room - 1);
  return G2Z_BAD_ARGUMENT;
}

/* Refuses what says how or when to do something that is not done. */
static g2z_status check_uses(g2z_services *services, const options *o) {
  const options defaults = default_options();
  const int samples = o->run.sample_tokens > 0, validates = o->run.val_glob != NULL;
#define X(used, flag, name, sentence)                                                             \
  if (!used && memcmp(&o->run.name, &defaults.run.name, sizeof o->run.name) != 0)                 \
    return fail(services, flag ": " sentence);
#define SAMPLE(flag, name) \
  X(samples, flag, name, "--sample-tokens 0 has no use for it; leave one of them away")
#define VAL(flag, name) \
  X(validates, flag, name, "there is nothing to validate on; give --val, or leave it away")
  SAMPLE("--prompt", prompt)
  SAMPLE("--sample-every", sample_every)
  SAMPLE("--temperature", sampling.temperature)
  SAMPLE("--top-k", sampling.top_k)
  SAMPLE("--top-p", sampling.top_p)
  SAMPLE("--sample-seed", sampling.seed)
  VAL("--val-every", val_every)
  VAL("--val-steps", val_steps)
  VAL("--max-val-steps", max_val_steps)
#undef VAL
#undef SAMPLE
#undef X
  return G2Z_OK;
}

/* What flags leave open, and what they say together. */
static g2z_status settle(g2z_services *services, options *o, g2z_context_config *context) {
  g2z_train_config *train = &o->run.train;
  g2z_ranks_config *ranks = &context->ranks;
  TRY(g2z_place_find(services, &ranks->place));
  TRY(check_length(services, "--run-dir", o->run_dir, sizeof o->run_dir_text));
  TRY(check_length(services, "--run-id", o->run_id, sizeof ranks->place.job));
  TRY(check_uses(services, o));
  if (o->dry_run && (o->ranks || o->gpus))
    ranks->place.world = ranks->place.local_world = o->gpus ? o->gpus : o->ranks;
  if (o->run_id) snprintf(ranks->place.job, sizeof ranks->place.job, "%s", o->run_id);
  ranks->join_s = o->join_timeout;
  ranks->silence_s = o->silence_timeout;
  ranks->hang_s = o->hang_timeout;
  TRY(settle_model(services, o));
  if (o->device >= 0) context->device = (g2z_device_kind)o->device;
  train->dtype = o->dtype >= 0 ? (g2z_dtype)o->dtype
                 : context->device == G2Z_DEVICE_CUDA ? G2Z_FP16 : G2Z_FP32;
  train->seq = o->seq ? o->seq : train->model.context;
  train->accum = o->accum ? o->accum : 1;
  if (o->global_batch) {
    int64_t together = (int64_t)train->batch * context->ranks.place.world;
    if (o->accum)
      return fail(services, "--accum and --global-batch say the same: give one of them");
    if (o->global_batch % together) {
      snprintf(services->error, sizeof services->error,
               "--global-batch %d must divide by --batch %d x %d ranks", o->global_batch,
               train->batch, context->ranks.place.world);
      return G2Z_BAD_ARGUMENT;
    }
    train->accum = (int)(o->global_batch / together);
  }
  if (o->steps && o->run.epochs)
    return fail(services, "--steps and --epochs both set the length: give one of them, and "
                          "--max-train-steps to stop earlier");
  if (o->run.resume && strcmp(o->run.resume, "latest") == 0 && !o->run_dir)
    return fail(services, "--resume latest looks into --run-dir, and without that each start "
                          "makes a new one: name the directory of the run");
  if (o->steps) train->optimizer.steps = o->steps;
  else if (!o->run.epochs) o->run.epochs = 1;
  train->bucket_mb = (double)o->bucket_mb;
  if (o->zero >= 0) train->zero_stage = o->zero;
  else if (train->strategy == G2Z_STRATEGY_DP) train->zero_stage = 0;
  if (o->loss_scale > 0) {
    train->optimizer.loss_scale = o->loss_scale;
    train->optimizer.loss_scale_dynamic = 0;
  }
  time_t now = time(NULL);
  struct tm utc;
  strftime(o->run_dir_text, sizeof o->run_dir_text, "runs/run_%Y%m%d_%H%M%S",
           gmtime_r(&now, &utc));
  if (o->run_dir) snprintf(o->run_dir_text, sizeof o->run_dir_text, "%s", o->run_dir);
  o->run.run_dir = strcmp(o->run_dir_text, "none") == 0 ? NULL : o->run_dir_text;
  o->run.git_commit = G2Z_GIT_COMMIT;
  return G2Z_OK;
}

/* The plan against the memory that is free now. */
static g2z_status dry_run(g2z_services *services, const options *o,
                          const g2z_context_config *context) {
  g2z_train_config config = o->run.train;
  g2z_plan *plan;
  size_t overhead_bytes, free_bytes, total_bytes;
  if (context->ranks.place.rank != 0) return G2Z_OK; /* no other's is larger */
  config.optimizer.warmup = 0; /* nothing in the plan depends on the schedule */
  config.optimizer.min_lr = 0;
  TRY(g2z_plan_create(services, &config, context->device, context->ranks.place.rank,
                      context->ranks.place.world, &plan));
  if (g2z_device_overhead(services, context->device, &overhead_bytes) != G2Z_OK ||
      g2z_device_memory(services, context->device, &free_bytes, &total_bytes) != G2Z_OK) {
    puts("this machine has no such device: what it takes beside the plan is not known here");
    overhead_bytes = free_bytes = 0;
  }
  if (context->device == G2Z_DEVICE_CPU && context->ranks.place.local_world > 1)
    free_bytes /= (size_t)context->ranks.place.local_world; /* ranks share the host's */
  if (overhead_bytes > 0) overhead_bytes += g2z_plan_nccl_bytes(plan);
  g2z_plan_print(plan, overhead_bytes, free_bytes, print_line, NULL);
  g2z_plan_free(plan);
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
 * Ctrl-C may come twice, from the terminal and from the launcher: within half a second it is
 * one. */
static void on_signal(int number) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (asked_at.tv_sec) {
    double since = (double)(now.tv_sec - asked_at.tv_sec) +
                   1e-9 * (double)(now.tv_nsec - asked_at.tv_nsec);
    if (since < 0.5) return;
    _exit(128 + number);
  }
  g2z_run *run = __atomic_load_n(&running, __ATOMIC_RELAXED);
  if (!run) _exit(128 + number);
  asked_at = now;
  g2z_run_request_stop(run, number);
}

/* SIGHUP comes when a terminal closes; under nohup it is ignored and stays so. */
static void catch_signals(g2z_run *run) {
  static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
  struct sigaction action, before;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  __atomic_store_n(&running, run, __ATOMIC_RELAXED);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    int known = sigaction(numbers[i], NULL, &before) == 0;
    if (numbers[i] == SIGHUP && known && before.sa_handler == SIG_IGN) continue;
    sigaction(numbers[i], &action, NULL);
  }
}

/* ----- artifacts of the launch -------------------------------------------- */

/* An object of the variables whose names begin with one of the prefixes. SLURM_JWT and G2Z_SECRET
 * stay out: who knows them may act as this user, or as a rank. */
static void put_variables(g2z_json_out *out, const char *key, const char *const *prefixes,
                          int count) {
  extern char **environ;
  char name[128];
  g2z_json_begin(out, key, '{');
  for (char **variable = environ; *variable; variable++) {
    const char *equals = strchr(*variable, '=');
    size_t length = equals ? (size_t)(equals - *variable) : sizeof name;
    int wanted = 0;
    for (int i = 0; i < count; i++)
      wanted |= strncmp(*variable, prefixes[i], strlen(prefixes[i])) == 0;
    if (strncmp(*variable, "SLURM_JWT=", 10) == 0 || strncmp(*variable, "G2Z_SECRET=", 11) == 0)
      wanted = 0;
    if (!wanted || length >= sizeof name) continue;
    snprintf(name, sizeof name, "%.*s", (int)length, *variable);
    g2z_json_put_string(out, name, equals + 1);
  }
  g2z_json_end(out, '}');
}

/* launcher_metadata.json: who started this, where, with which variables. Of the environment only
 * what steers a run: the rest may hold secrets. */
static g2z_status write_launch(g2z_services *services, const options *o, const g2z_place *place) {
  static const char *const slurm[] = {"SLURM_"}, *const nccl[] = {"NCCL_"};
  static const char *const steering[] = {
      "CUDA_", "OMP_", "OMPI_COMM_WORLD_", "PMI_", "RANK=", "WORLD_SIZE=", "LOCAL_RANK=",
      "LOCAL_WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=", "G2Z_", "RUN_DIR=", "NSYS=",
      "DIST_DEBUG=", "GRAD_ACCUM_STEPS=", "MICRO_BATCH_SIZE_PER_GPU=", "GPT2_EXTRA_ARGS="};
  char path[1200], now[32], host[256] = "";
  g2z_writer *writer;
  g2z_json_out out;
  if (place->rank != 0 || !o->run.run_dir) return G2Z_OK;
  snprintf(path, sizeof path, "%s/RUN_FAILED.json", o->run.run_dir);
  unlink(path); /* of a start that this one goes on from */
  snprintf(path, sizeof path, "%s/launcher_metadata.json", o->run.run_dir);
  TRY(g2z_writer_create(services, path, &writer));
  memset(&out, 0, sizeof out);
  out.writer = writer;
  out.indent = 2;
  g2z_utc_now(now);
  gethostname(host, sizeof host - 1);
  g2z_json_begin(&out, NULL, '{');
  g2z_json_put_string(&out, "timestamp_utc", now);
  g2z_json_put_string(&out, "launcher", place->launcher);
  g2z_json_put_string(&out, "checkpoint_path",
                      o->run.save_weights ? o->run.save_weights : o->run.run_dir);
  g2z_json_put_string(&out, "rank0_host", host);
  g2z_json_put_integer(&out, "world_size", place->world);
  g2z_json_put_string(&out, "git_commit", o->run.git_commit);
  g2z_json_put_string(&out, "command_line", o->run.command_line);
  put_variables(&out, "slurm", slurm, 1);
  put_variables(&out, "env", steering, (int)(sizeof steering / sizeof *steering));
  put_variables(&out, "nccl_env", nccl, 1);
  g2z_json_end(&out, '}');
  g2z_writer_put(writer, "\n", 1);
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

/* What a command prints, as a file; a line that says so where the command is not. */
static g2z_status write_output_of(g2z_services *services, const char *directory, const char *name,
                                  const char *command) {
  char path[1200], block[4096];
  g2z_writer *writer;
  size_t got;
  snprintf(path, sizeof path, "%s/%s", directory, name);
  TRY(g2z_writer_create(services, path, &writer));
  snprintf(block, sizeof block, "%s 2>&1", command);
  FILE *pipe = popen(block, "r");
  while (pipe && (got = fread(block, 1, sizeof block, pipe)) > 0)
    g2z_writer_put(writer, block, got);
  if (!pipe || pclose(pipe) != 0)
    g2z_writer_printf(writer, "`%s` failed, or is not here\n", command);
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

/* --nccl-logs, before NCCL starts, which reads these variables once. What the user has set
 * stays. */
static g2z_status log_nccl(g2z_services *services, const options *o, const g2z_place *place) {
  const char *variable = getenv("NCCL_LOGS"), *directory = o->run.run_dir;
  char path[1200];
  if (!o->nccl_logs && !(variable && strcmp(variable, "1") == 0)) return G2Z_OK;
  if (!directory)
    return fail(services, o->nccl_logs
                              ? "--nccl-logs writes into the run directory: give one"
                              : "NCCL_LOGS=1 writes into the run directory: give one, or unset it");
  TRY(g2z_make_directory(services, directory));
  setenv("NCCL_DEBUG", "INFO", 0);
  snprintf(path, sizeof path, "%s/nccl_rank_%%h_%%p.log", directory); /* NCCL's: host, process */
  setenv("NCCL_DEBUG_FILE", path, 0);
  if (place->rank != 0) return G2Z_OK;
  snprintf(path, sizeof path, "%s/nccl_topo.xml", directory);
  setenv("NCCL_TOPO_DUMP_FILE", path, 0);
  TRY(write_output_of(services, directory, "topo.txt", "nvidia-smi topo -m"));
  return write_output_of(services, directory, "ibstat.txt", "ibstat");
}

/* Meets the other ranks. The run directory is rank 0's: its name may hold the time. */
static g2z_status meet(options *o, g2z_context_config *config, faults *f, g2z_context **context) {
  f->place = &config->ranks.place;
  f->run_dir = o->run.run_dir;
  config->ranks.on_fault = on_fault;
  config->ranks.user = f;
  TRY(g2z_context_create(config, context));
  g2z_ranks *ranks = g2z_context_ranks(*context);
  TRY(g2z_ranks_broadcast(ranks, o->run_dir_text, sizeof o->run_dir_text));
  __atomic_store_n(&f->ranks, ranks, __ATOMIC_RELEASE);
  return g2z_ranks_agree(ranks, log_nccl(config->services, o, &config->ranks.place));
}

static g2z_status train(options *o, g2z_context_config *context_config) {
  g2z_context *context = NULL;
  g2z_run *run = NULL;
  g2z_run_event event;
  double next_line = 0;
  faults f = {NULL, NULL, NULL};
  g2z_status status = meet(o, context_config, &f, &context);
  if (status == G2Z_OK) status = g2z_run_create(context, &o->run, &run);
  if (status == G2Z_OK)
    status = write_launch(context_config->services, o, &context_config->ranks.place);
  if (status == G2Z_OK) catch_signals(run);
  for (int done = 0; status == G2Z_OK && !done;) {
    status = g2z_run_next(run, &event);
    if (status != G2Z_OK) break;
    if (is_due(o, &event, &next_line))
      print_log(&context_config->ranks.place, G2Z_LOG_INFO, event.line);
    done = event.kind == G2Z_RUN_DONE;
  }
  catch_signals(NULL);
  g2z_run_free(run);
  g2z_context_free(context);
  return status;
}

/* --ranks and --gpus: this process starts the ranks, or is one of them. */
static g2z_status spawn(g2z_services *services, const options *o, char **argv, int *is_parent,
                        int *code) {
  const int ranks = o->gpus ? o->gpus : o->ranks, gpus = g2z_device_count(G2Z_DEVICE_CUDA);
  *is_parent = *code = 0;
  if (!ranks) return G2Z_OK;
  if (o->gpus && o->ranks && o->gpus != o->ranks)
    return fail(services, "--ranks and --gpus say the same: give one of them");
  if (o->gpus > gpus) {
    snprintf(services->error, sizeof services->error,
             "--gpus %d, but this process sees %d: give fewer, or look at nvidia-smi and "
             "CUDA_VISIBLE_DEVICES", o->gpus, gpus);
    return G2Z_BAD_ARGUMENT;
  }
  return g2z_ranks_spawn(services, ranks, argv, is_parent, code);
}

static int exit_code(g2z_status status) {
  return status == G2Z_OK        ? 0
         : status == G2Z_LOST    ? G2Z_EXIT_LOST
         : status == G2Z_STOPPED ? G2Z_EXIT_STOPPED
                                 : 1;
}

int main(int argc, char **argv) {
  g2z_services services;
  g2z_context_config context;
  int is_parent = 0, code = 0;
  g2z_open_standard_files();
  signal(SIGPIPE, SIG_IGN); /* who reads the console may leave: train.log has every line */
  signal(SIGXFSZ, SIG_IGN); /* a file beyond `ulimit -f` becomes an error of the write */
  memset(&services, 0, sizeof services);
  memset(&context, 0, sizeof context);
  services.log = print_log;
  services.user = &context.ranks.place;
  options o = default_options();
  char *command_line = NULL;
  g2z_status status = g2z_flags_line(&services, argc, argv, &command_line);
  if (status == G2Z_OK) status = read_flags(&services, argc, argv, &o);
  if (status == G2Z_OK && !o.help && !o.dry_run)
    status = spawn(&services, &o, argv, &is_parent, &code);
  if (status == G2Z_OK && !o.help && !is_parent) {
    o.run.command_line = command_line;
    context = g2z_context_config_default(&services);
    status = settle(&services, &o, &context);
    if (status == G2Z_OK)
      status = o.dry_run ? dry_run(&services, &o, &context) : train(&o, &context);
  }
  int said = status == G2Z_STOPPED && context.ranks.place.rank != 0; /* by rank 0, for all */
  if (status != G2Z_OK && !said) print_error(&context.ranks.place, services.error);
  g2z_release(&services, command_line);
  return code ? code : exit_code(status);
}
