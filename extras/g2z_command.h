/* g2z_command.h: the command line of a training program: its flags, and what it does before, around
 * and instead of the loop over g2z_run_next. train.cu uses all of it. MIT licence.
 *
 * QUICK START
 *     g2z_run_options o = g2z_run_options_default();
 *     status = g2z_run_options_parse(&services, argc, argv, &o);
 *     status = g2z_run_options_spawn(&services, &o, argv, &is_parent, &code);  // --ranks, --gpus
 *     context_config = g2z_context_config_default(&services);
 *     status = g2z_run_options_settle(&services, &o, &context_config);
 *     status = g2z_run_launch(&o, &context_config, &context, &run);     // then g2z_run.h's loop
 *
 * It prints through callbacks, and ends the process only in g2z_run_end_within. Names that begin
 * with g2zc_ or G2ZC_ are private.
 *
 * CONTENTS: options; a plan as a table; launch and faults; a model in use */

#ifndef G2Z_COMMAND_INCLUDED
#define G2Z_COMMAND_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_command.h: include gpt2_zero.h before it"
#endif

#include "g2z_eval.h"
#include "g2z_program.h"
#include "g2z_run.h"
#include "g2z_text.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ===== options ===========================================================
 * The values of the flags, and the run's config that they set. A process has one g2z_run_options:
 * run and context keep pointers into it. */

typedef struct g2z_run_options {
  g2z_run_config run;          /* set by flags directly, or by g2z_run_options_settle */
  const char *model, *run_dir;
  g2z_model_config shape;      /* replaces values of `model`. 0 here and below: see --help */
  int seq, accum, global_batch, device, dtype, zero;
  int64_t steps;
  float loss_scale;
  int ranks, gpus;
  float join_timeout, silence_timeout, hang_timeout;
  const char *run_id;
  int nccl_logs, profile_mode;
  int dry_run, help, version;  /* requests to the program */
  g2z_texts train;             /* the values of --train */
  char *train_text;            /* these values as one text, one per line */
  char run_dir_text[1024], weights_text[1040], vocab_text[4128];
  g2z_ranks *met;              /* NULL until all ranks have met and know rank 0's run_dir */
} g2z_run_options;

G2Z_API g2z_run_options g2z_run_options_default(void);
/* Reads argv. G2Z_BAD_ARGUMENT: an unknown flag, or a value out of its range. */
G2Z_API g2z_status g2z_run_options_parse(g2z_services *services, int argc, char **argv,
                                         g2z_run_options *options);
G2Z_API void g2z_run_options_free(g2z_services *services, g2z_run_options *options);
/* The table of flags for --help: one call of `line` per line. */
G2Z_API void g2z_run_options_print(void (*line)(void *user, const char *text), void *user);
/* Copies a sentence of the library to `out`, with flags in place of settings: "heads=7" becomes
 * "--heads 7". A sentence that already names a flag is copied unchanged. Returns `out`. */
G2Z_API const char *g2z_run_options_words(const char *sentence, char *out, size_t room);
/* With --ranks or --gpus: calls g2z_ranks_spawn and returns its results. This process then either
 * has started the ranks and waited for them, or is one of them. Otherwise *is_parent becomes 0. */
G2Z_API g2z_status g2z_run_options_spawn(g2z_services *services, const g2z_run_options *options,
                                         char **argv, int *is_parent, int *code);
/* Refuses flags that contradict each other, and completes options->run and *context. */
G2Z_API g2z_status g2z_run_options_settle(g2z_services *services, g2z_run_options *options,
                                          g2z_context_config *context);
/* Members of `wanted` that are not 0 replace the members of `config`. If `wanted` has channels but
 * no heads, config->heads becomes one per 64 channels. */
G2Z_API void g2z_shape_override(g2z_model_config *config, const g2z_model_config *wanted);
/* A flag with the type and the bounds of a setting of the library. */
G2Z_API g2z_flag g2z_setting_flag(const char *name, const char *setting, void *destination,
                                  const char *help);

/* ===== a plan as a table ================================================= */

/* Prints a plan: one call of `line` per line. Then compares it with `free_bytes` of memory, and
 * prints the largest B that fits. free_bytes 0: unknown, no comparison. */
G2Z_API void g2z_plan_print(const g2z_plan *plan, size_t free_bytes,
                            void (*line)(void *user, const char *text), void *user);
/* --dry-run: rank 0 prints its plan, the largest of all ranks, and compares it with the device's
 * free memory. G2Z_NO_MEMORY: the plan does not fit. */
G2Z_API g2z_status g2z_run_dry(g2z_services *services, const g2z_run_options *options,
                               const g2z_context_config *context,
                               void (*line)(void *user, const char *text), void *user);

/* ===== launch and faults ================================================= */

/* Meets the other ranks and opens the run. With --nccl-logs, NCCL logs into the run directory. All
 * ranks use rank 0's directory: its name may contain the time. The caller frees *run, then
 * *context, also after a failure; both may be NULL. It prints the failure's sentence before that:
 * ranks wait for each other in g2z_context_free, and a rank that failed alone may be killed
 * there. */
G2Z_API g2z_status g2z_run_launch(g2z_run_options *options, const g2z_context_config *config,
                                  g2z_context **context, g2z_run **run);
/* For an on_fault: writes this rank's flight recorder, and RUN_FAILED.json unless another rank is
 * writing it. Writes no file before all ranks have met: there is no directory yet. `hint` becomes
 * a sentence with the command that continues the run, or "" without a run directory. */
#define G2Z_RUN_HINT_BYTES 1400
G2Z_API void g2z_run_write_fault(const g2z_run_options *options, const g2z_fault *fault,
                                 char hint[G2Z_RUN_HINT_BYTES]);
/* For an on_fault: ends the process after this time with exit code G2Z_EXIT_LOST, even if its
 * threads are blocked by a console or a file system. */
G2Z_API void g2z_run_end_within(unsigned seconds);

/* ===== a model in use ==================================================== */

/* Uses trained weights, without training and without a run directory. Scores the files of --eval,
 * then continues the text of --prompt. With --prompt -, or on a terminal without both flags,
 * continues each line of standard input. `put` receives the output, as in g2z_write_text;
 * options->run.progress receives the progress of each file. */
G2Z_API g2z_status g2z_run_use(const g2z_run_options *options, const g2z_context_config *config,
                               int (*put)(void *user, const char *text, size_t bytes), void *user);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_COMMAND_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_COMMAND_IMPLEMENTED)
#define G2Z_COMMAND_IMPLEMENTED

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ===== options ===========================================================
 * In:  argv. Out: the config of a run, and its place in a job.
 * Law: every flag is in one table. All flags are checked before a file is written. */

static const char *const g2zc_devices[] = {G2Z_DEVICE_LIST(G2Z_LIST_TEXT)};
static const char *const g2zc_fp8[] = {G2Z_FP8_LIST(G2Z_LIST_TEXT)};

/* The flags: the parser, --help and docs/flags.md are made from this list. g2z_run_options_default
 * sets the defaults. --help shows a default if it is in the flag's range. A default outside, such
 * as -1 for "computed later", is explained in brackets in the help text. */
#define G2ZC_FLAG_LIST                                                                            \
  GROUP("Data")                                                                                   \
  /* name, [kind or setting, destination, [least, most,] value,] help */                          \
  PLAIN("train", GLOBS, train, "GLOB[:WEIGHT]",                                                   \
       "token shards; repeat it to mix by WEIGHT; without it: validate, score, generate")         \
  PLAIN("val", GLOB, run.val_glob, "GLOB", "token shards to validate on")                         \
  PLAIN("vocab", TEXT, run.vocab, "FILE",                                                         \
       "tokenizer of the shards: vocab.bpe, merges.txt, tokenizer.json, ...")                     \
  GROUP("Model")                                                                                  \
  PLAIN("model", TEXT, model, "NAME", "gpt2, gpt2-medium, gpt2-large or gpt2-xl [gpt2]")          \
  SHAPE("layers", layers, "number of layers; overrides --model")                                  \
  SHAPE("channels", channels, "width of the residual stream")                                     \
  SHAPE("heads", heads, "attention heads; divides channels [channels / 64]")                      \
  SHAPE("context", context, "longest sequence, in tokens [1024]")                                 \
  SHAPE("vocab-size", vocab, "size of the vocabulary [the size of --vocab, or 50257]")            \
  TRAIN("dropout", dropout, "dropout probability of embedding, attention, projections")           \
  PLAIN("init-from", TEXT, run.train.init_from, "DIR",                                            \
       "start from DIR/model.safetensors and config.json, as Hugging Face writes")                \
  TRAIN("positions", positions, "first position embeddings; sines: learns sooner")                \
  GROUP("Batch and length")                                                                       \
  TRAIN("batch", batch, "sequences per micro-step and rank")                                      \
  SETTING("seq", seq, seq, "tokens per sequence [context]")                                       \
  SETTING("accum", accum, accum, "micro-steps per step [1]")                                      \
  FLAG("global-batch", INT, global_batch, 1, 2147483647, "N",                                     \
       "sequences per step, a multiple of batch x ranks; sets --accum")                           \
  SETTING("steps", steps, steps, "length of the training and of its schedule")                    \
  FLAG("epochs", INT64, run.epochs, 1, 1e6, "N", "training length in passes over the shards [1]") \
  STEPS("max-train-steps", run.max_train_steps, "stop after this many steps of the schedule")     \
  GROUP("Optimizer")                                                                              \
  SETTING("optimizer", optimizer, run.train.optimizer.kind,                                       \
       "muon: for the blocks' matrices; AdamW for the rest")                                      \
  OPTIMIZER("lr", lr, "peak learning rate [0.0006; muon 0.004]")                                  \
  OPTIMIZER("adam-lr", adam_lr, "with muon: peak learning rate of AdamW's weights [0.6 x --lr]")  \
  OPTIMIZER("schedule", schedule,                                                                 \
            "how the rate falls to --min-lr after the warm-up; constant: not at all; wsd: in "    \
            "the last fifth; power: later than with linear")                                      \
  OPTIMIZER("warmup", warmup, "steps of linear warm-up [a tenth of the steps, at most 1000]")     \
  OPTIMIZER("min-lr", min_lr, "learning rate at the end [a tenth of --lr]")                       \
  OPTIMIZER("weight-decay", weight_decay, "weight decay of matrices")                             \
  OPTIMIZER("beta1", beta1, "AdamW's decay of the mean of gradients")                             \
  OPTIMIZER("beta2", beta2, "AdamW's decay of the variance of gradients")                         \
  OPTIMIZER("eps", eps, "small number added to AdamW's denominator")                              \
  SETTING("moments", moments, run.train.optimizer.moments_bf16,                                   \
          "type of AdamW's m and v; bf16: half their memory on a GPU")                            \
  OPTIMIZER("momentum", momentum, "Muon's decay of the mean of gradients")                        \
  OPTIMIZER("clip", clip, "scale gradients down to this global norm; 0: off")                     \
  OPTIMIZER("skip-spikes", skip_spikes,                                                           \
       "skip steps whose gradient norm is X deviations above its mean; 0: off")                   \
  GROUP("Numbers and device")                                                                     \
  PLAIN("device", CHOICE, device, G2Z_DEVICE_LIST(G2Z_LIST_WORD), "[cuda if there is one]")       \
  SETTING("dtype", dtype, dtype, "[fp16 on cuda, fp32 on cpu]")                                   \
  TRAIN("fp8", fp8,                                                                               \
       "8-bit products (Ada or newer): logits; forward: also linear ops; all: also gradients, "    \
       "in fp16")                                                                                  \
  SETTING("loss-scale", loss_scale, loss_scale, "fixed loss scale for fp16 [dynamic]")            \
  OPTIMIZER("loss-scale-window", loss_scale_window, "good steps before a dynamic scale doubles")  \
  TRAIN("graph", graph, "record the step as CUDA graphs")                                         \
  TRAIN("tune", tune,                                                                             \
       "time products' algorithms once; off: cuBLASLt's choice; own: our kernel if it fits")      \
  PLAIN("tuning", TEXT, run.train.tuning, "FILE", "use the algorithms in a run's tuning.txt")     \
  SETTING("zero", zero_stage, zero,                                                               \
       "ZeRO: ranks divide 0 nothing, 1 optimizer, 2 also gradients, 3 also parameters [1]")      \
  TRAIN("strategy", strategy, "dp: rank 0 alone has the optimizer, and updates for all ranks")    \
  TRAIN("grad-dtype", grad_fp32, "type of gradients; fp32 for more than 2 micro-steps")           \
  TRAIN("transport", transport, "how data moves between GPUs; described in gpt2_zero.h")          \
  TRAIN("bucket-mb", bucket_mb, "MiB of gradients per collective; 0: the larger of 64 and 1.9 x " \
       "ranks")                                                                                   \
  TRAIN("recompute", recompute, "block: forward runs again in backward, to save memory")          \
  TRAIN("seed", seed, "seed of initial weights, data order, dropout")                             \
  GROUP("Ranks")                                                                                  \
  FLAG("ranks", INT, ranks, 1, 4096, "N", "start N ranks on this host, without a launcher")       \
  FLAG("gpus", INT, gpus, 1, 4096, "N", "start N ranks on N GPUs of this host")                   \
  PLAIN("run-id", TEXT, run_id, "TEXT", "job's name, if jobs share a port [the launcher's]")      \
  FLAG("join-timeout", FLOAT, join_timeout, 0.1, 86400, "S", "seconds to wait for all ranks")     \
  FLAG("silence-timeout", FLOAT, silence_timeout, 0.1, 86400, "S",                                \
       "seconds of silence before a rank counts as dead")                                         \
  FLAG("hang-timeout", FLOAT, hang_timeout, 0, 1e6, "S",                                          \
       "seconds without progress before a rank counts as hung; 0: never")                         \
  GROUP("Validation and samples")                                                                 \
  STEPS("val-every", run.val_every,                                                               \
        "steps between validations, which also follow each epoch and the last step [an epoch]")   \
  STEPS("val-steps", run.val_steps, "batches of one validation [all]")                            \
  STEPS("max-val-steps", run.max_val_steps, "upper limit of --val-steps")                         \
  STEPS("patience", run.patience, "end after N validations in a row without a new lowest loss")   \
  FLAG("target-loss", FLOAT, run.target_loss, 1e-6, 1e6, "X",                                     \
       "mark the first validation with a loss of at most X")                                      \
  PLAIN("eval", TEXTS, run.eval, "FILE...",                                                       \
       "files to score: text, .jsonl, shards, benchmark questions; with --train: at the end")     \
  STEPS("eval-every", run.eval_every, "steps between scorings of --eval [the end of the run]")    \
  STEPS("sample-every", run.sample_every, "steps between samples [the end of the run]")           \
  FLAG("sample-tokens", INT, run.sample_tokens, 0, 1048576, "N", "length of a sample; 0: none")   \
  PLAIN("prompt", TEXT, run.prompt, "TEXT",                                                       \
       "text to continue; only its end counts if it exceeds the context [end of text]; "          \
       "-: each line of standard input")                                                          \
  FLAG("temperature", FLOAT, run.sampling.temperature, 0, 1e6, "X", "0: the likeliest token")     \
  FLAG("top-k", INT, run.sampling.top_k, 0, 16777216, "N",                                        \
       "draw from the N likeliest tokens; 0: all")                                                \
  FLAG("top-p", FLOAT, run.sampling.top_p, 1e-6, 1, "X",                                          \
       "draw from the likeliest tokens whose probabilities sum to X")                             \
  PLAIN("sample-seed", UINT64, run.sampling.seed, "N", "seed of the draws")                       \
  GROUP("Checkpoints")                                                                            \
  STEPS("save-every", run.save_every, "steps between checkpoints; also at the end")               \
  SWITCH("save-epochs", run.save_epochs, "save at the end of each epoch")                         \
  FLAG("keep", INT, run.keep, 0, 2147483647, "N", "number of checkpoints to keep; 0: all")        \
  SWITCH("keep-best", run.keep_best,                                                              \
         "also keep the checkpoint of the lowest validation loss, and link RUN_DIR/best to it; "  \
         "with --save-every and without --keep, all checkpoints stay")                            \
  PLAIN("resume", TEXT, run.resume, "latest|DIR",                                                 \
       "continue from a checkpoint: DIR, or the newest in --run-dir")                             \
  GROUP("Results")                                                                                \
  PLAIN("run-dir", TEXT, run_dir, "DIR", "the run's files [runs/run_DATE_TIME]; none: no files")  \
  PLAIN("save-weights", TEXT, run.save_weights, "DIR",                                            \
       "directory for the trained model [RUN_DIR/weights]; none: no files")                       \
  PLAIN("tensorboard", CHOICE, run.tensorboard, "|off|on", "event files in the run directory")    \
  SWITCH("nccl-logs", nccl_logs,                                                                  \
       "write NCCL's logs and topology into RUN_DIR; NCCL_LOGS=1 does the same")                  \
  SWITCH("dry-run", dry_run,                                                                      \
       "print memory plan and largest batch, then end; exit code 1: it does not fit")             \
  SWITCH("profile", run.profile,                                                                  \
       "time the parts of a step, into RUN_DIR/profiles; without CUDA graphs")                    \
  SWITCH("profile-mode", profile_mode, "print a line every 5 s, on a terminal too")               \
  SWITCH("version", version, "print the version")                                                 \
  SWITCH("help", help, "print this")

G2Z_API g2z_run_options g2z_run_options_default(void) {
  const g2z_ranks_config ranks = g2z_ranks_config_default();
  g2z_run_options o;
  memset(&o, 0, sizeof o);
  o.run = g2z_run_config_default(G2Z_DEVICE_CPU); /* _settle sets the dtype for the device */
  o.device = o.dtype = o.zero = -1;
  o.join_timeout = (float)ranks.join_s;
  o.silence_timeout = (float)ranks.silence_s;
  o.hang_timeout = (float)ranks.hang_s;
  return o;
}

G2Z_API void g2z_shape_override(g2z_model_config *config, const g2z_model_config *wanted) {
  const int channels = wanted->channels;
  if (wanted->layers) config->layers = wanted->layers;
  if (channels) config->channels = channels;
  if (channels) config->heads = channels / 64;
  if (channels && channels < 64) config->heads = 1;
  if (wanted->heads) config->heads = wanted->heads;
  if (wanted->context) config->context = wanted->context;
  if (wanted->vocab) config->vocab = wanted->vocab;
}

G2Z_API g2z_flag g2z_setting_flag(const char *name, const char *setting, void *destination,
                                  const char *help) {
  static const g2z_flag_kind kinds[] = {G2Z_FLAG_INT, G2Z_FLAG_INT64, G2Z_FLAG_UINT64,
                                        G2Z_FLAG_FLOAT, G2Z_FLAG_CHOICE}; /* by g2z_setting_kind */
  const g2z_setting *s = g2z_setting_find(setting);
  g2z_flag flag = {name, kinds[s->kind], destination, s->least, s->most, s->words, help};
  if (!flag.value) flag.value = s->kind == G2Z_SETTING_FLOAT ? "X" : "N";
  return flag;
}

/* Parses argv into the options. Unless `line` is NULL, prints the table of flags instead. */
static g2z_status g2zc_options_table(g2z_services *services, g2z_run_options *o, int argc,
                                     char **argv, void (*line)(void *user, const char *text),
                                     void *user) {
#define FLAG(name, kind, destination, minimum, maximum, value, help) \
  {name, G2Z_FLAG_##kind, &o->destination, minimum, maximum, value, help},
#define PLAIN(name, kind, destination, value, help) FLAG(name, kind, destination, 0, 0, value, help)
#define SWITCH(name, destination, help) PLAIN(name, SWITCH, destination, "", help)
#define STEPS(name, destination, help) \
  FLAG(name, INT64, destination, 1, (double)G2Z_RUN_STEPS_MOST, "N", help)
#define SETTING(name, setting, destination, help) \
  g2z_setting_flag(name, #setting, &o->destination, help),
#define SHAPE(name, setting, help) SETTING(name, setting, shape.setting, help)
#define TRAIN(name, setting, help) SETTING(name, setting, run.train.setting, help)
#define OPTIMIZER(name, setting, help) SETTING(name, setting, run.train.optimizer.setting, help)
#define GROUP(title) {"", G2Z_FLAG_GROUP, NULL, 0, 0, "", title ":"},
  const g2z_flag flags[] = {G2ZC_FLAG_LIST};
#undef FLAG
#undef PLAIN
#undef SWITCH
#undef STEPS
#undef SETTING
#undef SHAPE
#undef TRAIN
#undef OPTIMIZER
#undef GROUP
  const int count = (int)(sizeof flags / sizeof *flags);
  if (!line) return g2z_flags_parse(services, flags, count, argc, argv, 1, NULL);
  g2z_flags_print(flags, count, line, user);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_run_options_parse(g2z_services *services, int argc, char **argv,
                                         g2z_run_options *o) {
  G2Z_TRY(g2zc_options_table(services, o, argc, argv, NULL, NULL));
  size_t bytes = 0;
  for (int i = 0; i < o->train.count; i++) bytes += strlen(o->train.text[i]) + 1;
  if (bytes) G2Z_TRY(G2Z_NEW(services, bytes, &o->train_text));
  for (int i = 0; i < o->train.count; i++)
    strcat(strcat(o->train_text, i ? "\n" : ""), o->train.text[i]);
  if (bytes) o->run.train.train_glob = o->train_text;
  return G2Z_OK;
}

/* The flag of each setting of the library, from the same list. */
#define FLAG(name, kind, destination, minimum, maximum, value, help)
#define PLAIN(name, kind, destination, value, help)
#define SWITCH(name, destination, help)
#define STEPS(name, destination, help)
#define SETTING(name, setting, destination, help) {name, #setting},
#define SHAPE(name, setting, help) {name, #setting},
#define TRAIN(name, setting, help) {name, #setting},
#define OPTIMIZER(name, setting, help) {name, #setting},
#define GROUP(title)
static const struct {
  const char *flag, *setting;
} g2zc_settings[] = {G2ZC_FLAG_LIST};
#undef FLAG
#undef PLAIN
#undef SWITCH
#undef STEPS
#undef SETTING
#undef SHAPE
#undef TRAIN
#undef OPTIMIZER
#undef GROUP

/* The index of the setting that has this name, or whose flag has it; -1: there is none. */
static int g2zc_setting_at(const char *name, size_t length) {
  for (size_t i = 0; i < G2Z_COUNT(g2zc_settings); i++) {
    const char *const names[] = {g2zc_settings[i].setting, g2zc_settings[i].flag};
    for (int k = 0; k < 2; k++)
      if (strlen(names[k]) == length && memcmp(names[k], name, length) == 0) return (int)i;
  }
  return -1;
}

G2Z_API const char *g2z_run_options_words(const char *sentence, char *out, size_t room) {
  size_t used = 0;
  snprintf(out, room, "%s", sentence);
  if (strncmp(sentence, "--", 2) == 0 || strstr(sentence, " --")) return out;
  for (const char *at = sentence; *at && used < room;) { /* word by word */
    const size_t word = strcspn(at, " ") + (at[strcspn(at, " ")] == ' ');
    const size_t length = strspn(at, "abcdefghijklmnopqrstuvwxyz0123456789_");
    const char *value = at + length + 1, *choice = NULL;
    int entry = -1;
    if (at[length] == '=') entry = g2zc_setting_at(at, length);
    if (entry >= 0) {
      const g2z_setting *setting = g2z_setting_find(g2zc_settings[entry].setting);
      const size_t digits = strspn(value, "0123456789");
      size_t bytes = digits;
      if (setting->words && digits) choice = g2z_word(setting->words, atoi(value), &bytes);
      used += (size_t)snprintf(out + used, room - used, "--%s %.*s%.*s",
                               g2zc_settings[entry].flag, (int)bytes, choice ? choice : value,
                               (int)(word - length - 1 - digits), value + digits);
    } else used += (size_t)snprintf(out + used, room - used, "%.*s", (int)word, at);
    at += word;
  }
  return out;
}

G2Z_API void g2z_run_options_free(g2z_services *services, g2z_run_options *o) {
  g2z_release(services, o->train_text);
}

G2Z_API void g2z_run_options_print(void (*line)(void *user, const char *text), void *user) {
  g2z_run_options defaults = g2z_run_options_default();
  g2zc_options_table(NULL, &defaults, 0, NULL, line, user);
}

/* The number of ranks that this program starts itself; 0: none. */
static int g2zc_started(const g2z_run_options *o) { return o->gpus ? o->gpus : o->ranks; }

G2Z_API g2z_status g2z_run_options_spawn(g2z_services *services, const g2z_run_options *o,
                                         char **argv, int *is_parent, int *code) {
  const int ranks = g2zc_started(o), gpus = g2z_device_count(G2Z_DEVICE_CUDA);
  *is_parent = *code = 0;
  if (!ranks) return G2Z_OK;
  if (o->gpus && o->ranks && o->gpus != o->ranks)
    G2Z_REFUSE(services, "--ranks and --gpus both set the number of ranks: give one of them");
  if (o->gpus > gpus) {
    char why[512] = "lower it, or see nvidia-smi -L and CUDA_VISIBLE_DEVICES";
    if (g2z_device_find_gpu(services) != G2Z_OK)
      snprintf(why, sizeof why, "%.400s; ranks without GPUs: --ranks %d", services->error, o->gpus);
    G2Z_REFUSE(services, "--gpus %d, but this process sees %d: %s", o->gpus, gpus, why);
  }
  /* Check here, so that a bad setting fails once and not on every rank. */
  g2z_run_options checked = *o;
  g2z_context_config context = g2z_context_config_default(services);
  if (o->device < 0) checked.device = (int)context.device; /* rank 0 reports a missing GPU */
  checked.run.train.fp8 = G2Z_FP8_NONE;                    /* rank 0 reports a GPU without fp8 */
  G2Z_TRY(g2z_run_options_settle(services, &checked, &context));
  return g2z_ranks_spawn(services, ranks, argv, is_parent, code);
}

/* Reads the hash and the number of tokens of a tokenizer file. */
static g2z_status g2zc_read_vocab(g2z_services *services, const char *path, uint64_t *hash,
                                  int *tokens) {
  g2z_tokenizer *tokenizer;
  G2Z_TRY(g2z_tokenizer_create(services, path, &tokenizer));
  *hash = g2z_tokenizer_hash(tokenizer);
  *tokens = g2z_tokenizer_vocab(tokenizer);
  g2z_tokenizer_free(tokenizer);
  return G2Z_OK;
}

/* The names of shards end in .bin: refuses files with other names. The error has the command that
 * renames the file, or makes shards of it. */
static g2z_status g2zc_check_shards(g2z_services *services, const g2z_run_options *o,
                                    const char *flag, const char *given) {
  const char *vocab = o->run.vocab, *how = "";
  char words[2][400], pattern[4096], path[400] = "";
  int shards = 0;
  struct stat info;
  glob_t found;
  snprintf(pattern, sizeof pattern, "%s", given ? given : "");
  const char *weight = g2z_glob_weight(pattern);
  if (weight) pattern[weight - pattern - 1] = 0;
  /* With GLOB_NOCHECK, a pattern that matches no file is returned as the only name. */
  if (!given || glob(pattern, GLOB_NOSORT | GLOB_NOCHECK, NULL, &found) != 0) return G2Z_OK;
  for (size_t i = 0; i < found.gl_pathc; i++) {
    const char *one = found.gl_pathv[i], *end = strrchr(one, '.');
    const int named = end && strcmp(end, ".bin") == 0;
    shards |= named;
    if (!path[0] && !named && stat(one, &info) == 0 && S_ISREG(info.st_mode))
      snprintf(path, sizeof path, "%s", one);
  }
  globfree(&found);
  if (!path[0]) return G2Z_OK;
  snprintf(words[0], sizeof words[0], "%.*s*.bin", (int)strcspn(pattern, "*?["), pattern);
  if (shards)
    G2Z_REFUSE(services, "%s %.200s also matches %.200s, which is no .bin file: narrow the pattern "
               "to %s", flag, given, path, g2z_shell_word(words[0], words[1], sizeof words[1]));
  FILE *file = fopen(path, "rb");
  int32_t head = 0;
  if (file && fread(&head, sizeof head, 1, file) != 1) head = 0;
  if (file) fclose(file);
  if (!vocab) {
    vocab = "data/vocab.bpe";
    how = ", with GPT-2's vocabulary (make vocab)";
  }
  g2z_shell_word(path, words[1], sizeof words[1]);
  if (head == 20240520) /* llm.c's shards and prepare_data's begin so */
    G2Z_REFUSE(services, "%s %.200s: the name of token shards ends in .bin. Rename it: mv %s "
               "%s.bin", flag, path, words[1], words[1]);
  G2Z_REFUSE(services, "%s %.200s: the name of token shards ends in .bin. To make shards of text, "
             "data/NAME_train_*.bin%s: ./prepare_data --vocab %s --out data --name NAME %s", flag,
             path, how, g2z_shell_word(vocab, words[0], sizeof words[0]), words[1]);
}

/* Refuses an --init-from directory without config.json. For a run directory, the error names the
 * weights in it. */
static g2z_status g2zc_check_weights(g2z_services *services, const char *weights) {
  static const struct { const char *name, *what; } known[] = {
      {"best", "the checkpoint that its link best names"},
      {"weights", "its weights"},
      {"step-[0-9]*[0-9]", "its newest checkpoint"}};
  char word[400];
  struct stat info;
  glob_t found;
  int there;
  G2Z_TRY(g2z_is_there(services, g2z_path_in(weights, "config.json").text, &there));
  if (there || !*weights) return G2Z_OK;
  if (stat(weights, &info) != 0 && (errno == ENOENT || errno == ENOTDIR))
    G2Z_REFUSE(services, "--init-from %.300s: there is no such directory. A run writes "
               "RUN_DIR/weights at its end; make gpt2 downloads OpenAI's weights into gpt2",
               weights);
  for (size_t i = 0; i < G2Z_COUNT(known); i++) {
    const g2z_path pattern = g2z_path_in(weights, "%s/config.json", known[i].name);
    if (glob(pattern.text, 0, NULL, &found) != 0) continue;
    char *last = found.gl_pathv[found.gl_pathc - 1]; /* sorted by name: the newest checkpoint */
    *strrchr(last, '/') = 0;
    g2z_fail(services, G2Z_BAD_ARGUMENT, "--init-from %.300s has no config.json. For %s: "
             "--init-from %s", weights, known[i].what, g2z_shell_word(last, word, sizeof word));
    globfree(&found);
    return G2Z_BAD_ARGUMENT;
  }
  G2Z_REFUSE(services, "--init-from %.300s has no config.json: name a directory with config.json "
             "and model.safetensors, such as a run's RUN_DIR/weights, written at its end, a "
             "checkpoint, or gpt2, which make gpt2 downloads", weights);
}

/* Sets the model's shape: from the weights, or from a preset that the flags override. */
static g2z_status g2zc_settle_model(g2z_services *services, g2z_run_options *o) {
  g2z_model_config *model = &o->run.train.model, wanted = o->shape;
  const char *preset = o->model ? o->model : "gpt2", *weights = o->run.train.init_from;
  const int custom = wanted.layers || wanted.heads || wanted.channels || wanted.context;
  uint64_t given = 0;
  int there, tokens;
  o->run.model_name = custom || weights ? "custom" : preset;
  if (!weights) {
    G2Z_TRY(g2z_model_config_named(services, preset, model));
    if (o->run.vocab) G2Z_TRY(g2zc_read_vocab(services, o->run.vocab, &given, &model->vocab));
    g2z_shape_override(model, &wanted);
    return G2Z_OK;
  }
  /* Take the shape from the weights. Flags may repeat it, but must not contradict it. */
  G2Z_TRY(g2zc_check_weights(services, weights));
  G2Z_TRY(g2z_weights_config(services, weights, model));
  if (o->model) {
    g2z_model_config named;
    G2Z_TRY(g2z_model_config_named(services, preset, &named));
    g2z_shape_override(&named, &wanted);
    named.vocab = wanted.vocab;
    wanted = named;
  }
#define X(name, flag)                                                                             \
  if (wanted.name && wanted.name != model->name) {                                                \
    const char *by = o->shape.name ? flag : "--model";                                            \
    G2Z_REFUSE(services, "%s means " #name "=%d, but the weights in %.400s have " #name "=%d: "   \
               "remove %s, or name other weights with --init-from", by, wanted.name, weights,     \
               model->name, by);                                                                  \
  }
  X(layers, "--layers")
  X(channels, "--channels")
  X(heads, "--heads")
  X(context, "--context")
  X(vocab, "--vocab-size")
#undef X
  snprintf(o->vocab_text, sizeof o->vocab_text, "%.4096s/merges.txt", weights);
  G2Z_TRY(g2z_is_there(services, o->vocab_text, &there));
  const int own = there && !o->run.vocab;
  if (own) o->run.vocab = o->vocab_text;
  if (there && !model->vocab_hash) /* config.json of other programs has no hash */
    G2Z_TRY(g2zc_read_vocab(services, o->vocab_text, &model->vocab_hash, &tokens));
  if (o->run.vocab) G2Z_TRY(g2zc_read_vocab(services, o->run.vocab, &given, &tokens));
  if (!given || !model->vocab_hash || given == model->vocab_hash) return G2Z_OK;
  if (own)
    G2Z_REFUSE(services, "%.300s is not the vocabulary of the weights in its directory: another "
               "run wrote it. Give the weights' own: --vocab FILE", o->vocab_text);
  G2Z_REFUSE(services, "--vocab %.300s is not the vocabulary of the weights in %.300s: give their "
             "own%s", o->run.vocab, weights, there ? ", or remove --vocab" : "");
}

/* Refuses flags that would have no effect. */
static g2z_status g2zc_check_uses(g2z_services *services, const g2z_run_options *o) {
  const g2z_run_options defaults = g2z_run_options_default();
  const g2z_run_config *run = &o->run;
  const int samples = run->sample_tokens > 0, validates = run->val_glob != NULL;
  const int trains = run->train.train_glob != NULL;
  const int muon = run->train.optimizer.kind == G2Z_OPTIMIZER_MUON;
  static const char no_samples[] = "with --sample-tokens 0; remove one of them";
  static const char no_val[] = "without --val; give --val GLOB, or remove it";
  static const char not_both[] = "without --train and --val; give both, or remove it";
#define USE(used, flag, name, why) \
  {used, memcmp(&run->name, &defaults.run.name, sizeof run->name) != 0, flag, why}
  const struct {
    int used, given;
    const char *flag, *why;
  } uses[] = {
      USE(samples, "prompt", prompt, no_samples),
      USE(samples, "sample-every", sample_every, no_samples),
      USE(samples, "temperature", sampling.temperature, no_samples),
      USE(samples, "top-k", sampling.top_k, no_samples),
      USE(samples, "top-p", sampling.top_p, no_samples),
      USE(samples, "sample-seed", sampling.seed, no_samples),
      USE(validates, "val-every", val_every, no_val),
      USE(validates, "val-steps", val_steps, no_val),
      USE(validates, "max-val-steps", max_val_steps, no_val),
      USE(validates && trains, "patience", patience, not_both),
      USE(validates && trains, "keep-best", keep_best, not_both),
      USE(validates && trains, "target-loss", target_loss, not_both),
      USE(run->eval.count && trains, "eval-every", eval_every,
          "without --eval and --train; give both, or remove it"),
      USE(!run->train.init_from, "positions", train.positions,
          "with --init-from, whose weights have positions; remove one of them"),
      USE(muon, "momentum", train.optimizer.momentum,
          "without --optimizer muon; give it, or remove --momentum"),
      USE(muon, "adam-lr", train.optimizer.adam_lr,
          "without --optimizer muon; give it, or remove --adam-lr")};
#undef USE
  for (size_t i = 0; i < G2Z_COUNT(uses); i++)
    if (uses[i].given && !uses[i].used)
      G2Z_REFUSE(services, "--%s has no effect %s", uses[i].flag, uses[i].why);
  return G2Z_OK;
}

static void g2zc_settle_ranks(const g2z_run_options *o, g2z_ranks_config *ranks) {
  g2z_place *place = &ranks->place;
  const int started = g2zc_started(o);
  const int alone = strcmp(place->launcher, "alone") == 0;
  if (started && alone) { /* g2z_ranks_spawn will start the ranks later */
    place->world = started;
    place->local_world = started;
  }
  if (started || !o->run.train.train_glob) place->unstarted = 0; /* srun is not needed */
  if (o->run_id) snprintf(place->job, sizeof place->job, "%s", o->run_id);
  ranks->join_s = o->join_timeout;
  ranks->silence_s = o->silence_timeout;
  ranks->hang_s = o->hang_timeout;
}

static void g2zc_settle_device(g2z_services *services, g2z_run_options *o,
                               g2z_context_config *context) {
  g2z_train_config *train = &o->run.train;
  if (o->dry_run && o->gpus) context->device = G2Z_DEVICE_CUDA; /* a plan needs no GPU */
  if (o->device >= 0) context->device = (g2z_device_kind)o->device;
  else if (context->device == G2Z_DEVICE_CPU && context->ranks.place.rank == 0 &&
           g2z_device_find_gpu(services) == G2Z_DEVICE)
    g2z_log(services, G2Z_LOG_WARNING, "this runs on the CPU: %s", services->error);
  train->dtype = g2z_dtype_default(context->device);
  if (o->dtype >= 0) train->dtype = (g2z_dtype)o->dtype;
}

static g2z_status g2zc_settle_batch(g2z_services *services, g2z_run_options *o, int world) {
  g2z_train_config *train = &o->run.train;
  const int64_t together = (int64_t)train->batch * world;
  train->seq = o->seq ? o->seq : train->model.context;
  if (o->global_batch && o->accum)
    G2Z_REFUSE(services, "--accum and --global-batch both set the micro-steps: give one of them");
  if (o->global_batch % together)
    G2Z_REFUSE(services, "--global-batch %d must be a multiple of batch x ranks = %" PRId64,
               o->global_batch, together);
  train->accum = 1;
  if (o->accum) train->accum = o->accum;
  if (o->global_batch) train->accum = (int)(o->global_batch / together);
  return G2Z_OK;
}

/* The smallest number of tokens per micro-step at which --fp8 is used: with fewer, 16 bits are
 * faster (docs/speed.md). bench uses fp8 at any size, because it measures this limit. */
#define G2ZC_FP8_TOKENS 2048

/* Ignores --fp8, with a message, if 8 bits would not be used or would be slower. */
static void g2zc_settle_fp8(g2z_services *services, g2z_run_options *o,
                            const g2z_context_config *context) {
  g2z_train_config *train = &o->run.train;
  const int unused = !train->train_glob && !o->dry_run;
  const int slower = context->device == G2Z_DEVICE_CUDA &&
                     (int64_t)train->batch * train->seq < G2ZC_FP8_TOKENS;
  const int first = context->ranks.place.rank == 0;
  if (!train->fp8 || !(unused || slower)) return;
  if (first && unused)
    g2z_log(services, G2Z_LOG_INFO, "--fp8 %s is not used: 8 bits are for training only",
            g2zc_fp8[train->fp8]);
  else if (first)
    g2z_log(services, G2Z_LOG_INFO, "--fp8 %s is not used: for a micro-step of %d x %d tokens 16 "
            "bits are faster; 8 bits are faster from %d tokens on", g2zc_fp8[train->fp8],
            train->batch, train->seq, G2ZC_FP8_TOKENS);
  train->fp8 = G2Z_FP8_NONE;
}

/* Refuses flags that contradict each other, or that need another flag which is missing. */
static g2z_status g2zc_check_conflicts(g2z_services *services, const g2z_run_options *o) {
  const g2z_run_config *run = &o->run;
  if (run->prompt && strcmp(run->prompt, "-") == 0 && (run->train.train_glob || run->val_glob))
    G2Z_REFUSE(services, "--prompt - reads standard input, which only generation does: give a "
               "training's samples a text, or remove --train and --val");
  if (o->steps && run->epochs)
    G2Z_REFUSE(services, "--steps and --epochs both set the length: give one of them, and "
               "--max-train-steps to stop earlier");
  if (run->resume && strcmp(run->resume, "latest") == 0 && !o->run_dir)
    G2Z_REFUSE(services, "--resume latest needs the directory of the run: give --run-dir RUN_DIR");
  return G2Z_OK;
}

/* Refuses files that are no shards, and a command line that leaves nothing to do. */
static g2z_status g2zc_check_data(g2z_services *services, const g2z_run_options *o) {
  const g2z_run_config *run = &o->run;
  const char *train_glob = run->train.train_glob;
  for (int i = 0; i < o->train.count; i++)
    G2Z_TRY(g2zc_check_shards(services, o, "--train", o->train.text[i]));
  G2Z_TRY(g2zc_check_shards(services, o, "--val", run->val_glob));
  if (o->dry_run) return G2Z_OK;
  if (train_glob && run->val_glob)
    return g2z_shards_apart(services, train_glob, run->val_glob);
  if (train_glob || run->val_glob || run->train.init_from) return G2Z_OK;
  if (run->prompt || run->eval.count)
    G2Z_REFUSE(services, "%s needs trained weights: give --init-from RUN_DIR/weights, or train "
               "first with --train GLOB", run->prompt ? "--prompt" : "--eval");
  G2Z_REFUSE(services, "there is nothing to do. To train: --train GLOB. To use weights: "
             "--init-from DIR with --prompt TEXT or --eval FILE");
}

/* Sets the length of the training, ZeRO's stage and the loss scale. */
static void g2zc_settle_training(g2z_run_options *o) {
  g2z_train_config *train = &o->run.train;
  if (o->steps) train->optimizer.steps = o->steps;
  else if (!o->run.epochs) o->run.epochs = 1;
  if (o->zero >= 0) train->zero_stage = o->zero;
  else if (train->strategy == G2Z_STRATEGY_DP) train->zero_stage = 0;
  if (o->loss_scale > 0) {
    train->optimizer.loss_scale = o->loss_scale;
    train->optimizer.loss_scale_dynamic = 0;
  }
}

/* Sets the name of the run directory, from --run-dir or from the time. */
static g2z_status g2zc_settle_run_dir(g2z_services *services, g2z_run_options *o) {
  const time_t now = time(NULL);
  struct tm utc;
  struct stat info;
  gmtime_r(&now, &utc);
  const size_t end = strftime(o->run_dir_text, sizeof o->run_dir_text, "runs/run_%Y%m%d_%H%M%S",
                              &utc);
  for (int i = 2; stat(o->run_dir_text, &info) == 0; i++) /* another run began in this second */
    snprintf(o->run_dir_text + end, 16, "-%d", i);
  if (o->run_dir) snprintf(o->run_dir_text, sizeof o->run_dir_text, "%s", o->run_dir);
  o->run.run_dir = o->run_dir_text;
  if (strcmp(o->run_dir_text, "none") == 0) o->run.run_dir = NULL;
  const char *logs = getenv("NCCL_LOGS");
  o->nccl_logs |= logs && strcmp(logs, "1") == 0;
  if (o->nccl_logs && !o->run.run_dir && (o->run.train.train_glob || o->run.val_glob))
    G2Z_REFUSE(services, "--nccl-logs or NCCL_LOGS=1 writes into the run directory: give one, or "
               "remove it");
  return G2Z_OK;
}

G2Z_API g2z_status g2z_run_options_settle(g2z_services *services, g2z_run_options *o,
                                          g2z_context_config *context) {
  g2z_place *place = &context->ranks.place;
  G2Z_TRY(g2z_place_find(services, place));
  G2Z_TRY(g2z_check_length(services, "--run-dir", o->run_dir, sizeof o->run_dir_text));
  G2Z_TRY(g2z_check_length(services, "--run-id", o->run_id, sizeof place->job));
  G2Z_TRY(g2zc_check_uses(services, o));
  g2zc_settle_ranks(o, &context->ranks);
  G2Z_TRY(g2zc_settle_model(services, o));
  g2zc_settle_device(services, o, context);
  G2Z_TRY(g2zc_settle_batch(services, o, place->world));
  g2zc_settle_fp8(services, o, context);
  G2Z_TRY(g2zc_check_conflicts(services, o));
  G2Z_TRY(g2zc_check_data(services, o));
  g2zc_settle_training(o);
  return g2zc_settle_run_dir(services, o);
}

/* ===== a plan as a table =================================================
 * In:  a plan. Out: lines of text. */

static double g2zc_gib(size_t bytes) { return (double)bytes / 1073741824.0; }

G2Z_API void g2z_plan_print(const g2z_plan *plan, size_t free_bytes,
                            void (*line)(void *user, const char *text), void *user) {
  const g2z_model_config *m = &plan->model;
  const size_t needs = plan->bytes_total + plan->nccl_bytes;
  const char *kind = "ZeRO", *optimizer, *per = "per rank";
  char text[256], stage[16], fp8[32] = "";
#define PUT(...) (snprintf(text, sizeof text, __VA_ARGS__), line(user, text))
  static const char *const parts[] = {G2Z_MEMORY_LIST(G2Z_LIST_TEXT)};
  snprintf(stage, sizeof stage, "stage %d", plan->zero_stage);
  optimizer = stage;
  if (plan->strategy == G2Z_STRATEGY_DP) {
    kind = "dp";
    optimizer = "the optimizer on rank 0 alone";
    per = "on this rank";
  }
  if (plan->fp8) snprintf(fp8, sizeof fp8, ", fp8=%s", g2zc_fp8[plan->fp8]);
  PUT("model       %d layer%s, %d head%s, %d channels, context %d, vocab %d (padded to %d): "
      "%.2f M parameters", m->layers, G2Z_PLURAL(m->layers), m->heads, G2Z_PLURAL(m->heads),
      m->channels, m->context, m->vocab, plan->vocab_padded, (double)plan->parameters * 1e-6);
  PUT("step        B=%d x T=%d x accum=%d x world=%d = %" PRId64 " tokens", plan->batch, plan->seq,
      plan->accum, plan->world, (int64_t)plan->batch * plan->seq * plan->accum * plan->world);
  PUT("types       %s parameters, %s gradients%s%s, on %s", g2z_dtype_text(plan->dtype),
      g2z_dtype_text(plan->grad_dtype), plan->moment_bytes == 2 ? ", bf16 moments" : "", fp8,
      g2zc_devices[plan->device]);
  PUT("%-11s %s, rank %d of %d, %d buckets of up to %.2f MiB", kind, optimizer, plan->rank,
      plan->world, plan->buckets,
      (double)(plan->bucket_elements * (size_t)plan->grad_bytes) / 1048576.0);
  for (int i = 0; i < G2Z_MEMORY_COUNT; i++)
    PUT("memory      %9.3f GiB  %s", g2zc_gib(plan->bytes[i]), parts[i]);
  if (plan->nccl_bytes) PUT("memory      %9.3f GiB  NCCL, typical", g2zc_gib(plan->nccl_bytes));
  PUT("memory      %9.3f GiB  total %s", g2zc_gib(needs), per);
  if (!free_bytes) return;
  PUT("free        %9.3f GiB  per rank: %s", g2zc_gib(free_bytes),
      needs <= free_bytes ? "it fits" : "IT DOES NOT FIT");
  PUT("largest B   %9d      micro-batch that fits", g2z_plan_largest_batch(plan, free_bytes));
#undef PUT
}

G2Z_API g2z_status g2z_run_dry(g2z_services *services, const g2z_run_options *o,
                               const g2z_context_config *context,
                               void (*line)(void *user, const char *text), void *user) {
  const g2z_place *place = &context->ranks.place;
  g2z_train_config config = o->run.train;
  g2z_plan *plan;
  size_t free_bytes, total_bytes;
  int sharing = 1; /* number of ranks that share the memory */
  if (place->rank != 0) return G2Z_OK;
  config.optimizer.warmup = 0; /* the plan does not depend on it, and -1 would be refused */
  g2z_run_fill_rates(&config.optimizer);
  G2Z_TRY(g2z_plan_create(services, &config, context->device, place->rank, place->world,
                          place->local_world, &plan));
  if (g2z_device_memory(services, context->device, &free_bytes, &total_bytes) != G2Z_OK) {
    char text[128];
    snprintf(text, sizeof text, "the memory of --device %s is not known here, so nobody can say "
             "whether this plan fits", g2zc_devices[context->device]);
    line(user, text);
    free_bytes = 0;
  }
  if (context->device == G2Z_DEVICE_CPU && place->local_world > 1) sharing = place->local_world;
  free_bytes /= (size_t)sharing;
  g2z_plan_print(plan, free_bytes, line, user);
  g2z_status status = G2Z_OK;
  if (free_bytes) status = g2z_plan_fits(services, &config, plan, free_bytes, sharing);
  g2z_plan_free(plan);
  return status;
}

/* ===== launch and faults =================================================
 * In:  settled options. Out: ranks that have met, an open run, and files about the launch and a
 *      fault. */

/* Makes NCCL log into the run directory, unless the user has set these variables. NCCL reads them
 * once, at its start, and needs a directory that exists. It replaces %h by the host and %p by the
 * process. */
static g2z_status g2zc_log_nccl(g2z_services *services, const char *run_dir, int rank) {
  g2z_status status = g2z_make_directory(services, run_dir);
  setenv("NCCL_DEBUG", "INFO", 0);
  setenv("NCCL_DEBUG_FILE", g2z_path_in(run_dir, "nccl_rank_%%h_%%p.log").text, 0);
  if (rank == 0) setenv("NCCL_TOPO_DUMP_FILE", g2z_path_in(run_dir, "nccl_topo.xml").text, 0);
  return status;
}

/* Writes how the host's GPUs are connected. If a tool is not installed, its file contains the error
 * message of the shell. */
static void g2zc_write_topology(const char *run_dir) {
  char word[1200], text[1400];
  snprintf(text, sizeof text, "cd %s && { nvidia-smi topo -m > topo.txt 2>&1; ibstat > ibstat.txt "
           "2>&1; }", g2z_shell_word(run_dir, word, sizeof word));
  FILE *pipe = popen(text, "r");
  if (pipe) pclose(pipe);
}

/* The part of a launch after all ranks have met. */
static g2z_status g2zc_open_run(g2z_run_options *o, const g2z_context_config *config,
                                g2z_context *context, g2z_run **run) {
  const char *run_dir = o->run.run_dir, *given = o->run.save_weights;
  const int rank = config->ranks.place.rank;
  g2z_ranks *ranks = context->ranks;
  G2Z_TRY(g2z_ranks_broadcast(ranks, o->run_dir_text, sizeof o->run_dir_text));
  /* A training writes its weights unless --save-weights none forbids it: a forgotten flag must not
   * cost hours of training. */
  snprintf(o->weights_text, sizeof o->weights_text, "%s/weights", o->run_dir_text);
  if (given && strcmp(given, "none") == 0) o->run.save_weights = NULL;
  else if (!given && run_dir && o->run.train.train_glob) o->run.save_weights = o->weights_text;
  __atomic_store_n(&o->met, ranks, __ATOMIC_RELEASE);
  g2z_status status = G2Z_OK;
  if (o->nccl_logs) status = g2zc_log_nccl(config->services, run_dir, rank);
  G2Z_TRY(g2z_ranks_agree(ranks, status));
  G2Z_TRY(g2z_run_create(context, &o->run, run));
  if (rank == 0 && g2z_run_loses_model(*run))
    g2z_log(config->services, G2Z_LOG_WARNING, "nothing keeps the trained model: to keep it, add "
            "--save-weights DIR%s", run_dir ? " or --save-every 1000" : "");
  if (rank == 0 && o->nccl_logs) g2zc_write_topology(run_dir);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_run_launch(g2z_run_options *o, const g2z_context_config *config,
                                  g2z_context **context, g2z_run **run) {
  *run = NULL;
  G2Z_TRY(g2z_context_create(config, context));
  g2z_status status = g2zc_open_run(o, config, *context, run);
  if (status != G2Z_OK && o->nccl_logs)
    rmdir(o->run.run_dir); /* g2zc_log_nccl may have made it; fails unless it is empty */
  return status;
}

typedef struct g2zc_report_of_fault {
  const g2z_place *place;
  const g2z_fault *fault;
  const char *flight;                /* this rank's flight recorder; NULL: there is none */
} g2zc_report_of_fault;

/* Writes RUN_FAILED.json. */
static void g2zc_put_failure(void *user, g2z_json_out *out) {
  const g2zc_report_of_fault *of = (const g2zc_report_of_fault *)user;
  const g2z_fault *fault = of->fault;
  g2z_json_put_string(out, "timestamp_utc", g2z_utc_now().text);
  g2z_json_put_string(out, "sentence", fault->sentence);
  g2z_json_put_integer(out, "rank", fault->rank);
  g2z_json_put_string(out, "host", fault->host);
  g2z_json_put_string(out, "phase", fault->phase);
  g2z_json_put_integer(out, "step", fault->step);
  g2z_json_put_integer(out, "reported_by_rank", of->place->rank);
  g2z_json_put_integer(out, "world_size", of->place->world);
  g2z_json_put_string(out, "flight_recorder", of->flight);
}

/* Sets `hint` to a sentence with the command that continues the run after its last checkpoint, or
 * starts it again. */
static void g2zc_hint(const g2z_run_config *run, char hint[G2Z_RUN_HINT_BYTES]) {
  char word[1200];
  int saved = 0;
  hint[0] = 0;
  if (!run->run_dir) return;
  DIR *directory = opendir(run->run_dir);
  if (!directory) return;
  for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
    saved |= strncmp(entry->d_name, "step-", 5) == 0 && !strchr(entry->d_name, '.');
  closedir(directory);
  const int saves = run->save_every > 0 || run->save_epochs || run->keep_best;
  snprintf(hint, G2Z_RUN_HINT_BYTES, "%s: the same command with --run-dir %s --resume latest%s",
           saved ? "To continue" : "No checkpoint was saved. To start again",
           g2z_shell_word(run->run_dir, word, sizeof word),
           saved || saves ? "" : " --save-every 1000");
}

/* Several ranks may write RUN_FAILED.json at once: any of these files will do. */
G2Z_API void g2z_run_write_fault(const g2z_run_options *o, const g2z_fault *fault,
                                 char hint[G2Z_RUN_HINT_BYTES]) {
  g2z_ranks *ranks = __atomic_load_n(&o->met, __ATOMIC_ACQUIRE);
  g2z_services services; /* its own: the main thread uses the program's services */
  char name[64];
  memset(&services, 0, sizeof services);
  g2zc_hint(&o->run, hint);
  if (!ranks || !o->run.run_dir || g2z_make_directory(&services, o->run.run_dir) != G2Z_OK) return;
  g2zc_report_of_fault of = {g2z_ranks_place(ranks), fault, NULL};
  snprintf(name, sizeof name, "flight_rank_%d.jsonl", of.place->rank);
  const g2z_path flight = g2z_path_in(o->run.run_dir, "%s", name),
                 failure = g2z_path_in(o->run.run_dir, "RUN_FAILED.json");
  if (g2z_ranks_write_flight(ranks, &services, flight.text) == G2Z_OK) of.flight = name;
  g2z_json_write(&services, failure.text, g2zc_put_failure, &of);
}

static void g2zc_on_alarm(int number) {
  (void)number;
  _exit(G2Z_EXIT_LOST);
}

/* The library's threads block all signals, so the calling thread unblocks SIGALRM. */
G2Z_API void g2z_run_end_within(unsigned seconds) {
  sigset_t alarms;
  signal(SIGALRM, g2zc_on_alarm);
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
  alarm(seconds);
}

/* ===== a model in use ====================================================
 * In:  options with --init-from, and a place in a job of one rank. Out: text.
 * Law: no file is written. */

typedef struct g2zc_use {
  const g2z_run_config *run;
  g2z_services *services;
  g2z_model *model;
  g2z_tokenizer *tokenizer;          /* NULL: none */
  const char *scored;                /* the name of the file that is scored */
  int (*put)(void *user, const char *text, size_t bytes);
  void *user;
} g2zc_use;

static void g2zc_put_line(const g2zc_use *use, const char *line) {
  use->put(use->user, line, strlen(line));
  use->put(use->user, "\n", 1);
}

static g2z_status g2zc_write(const g2zc_use *use, const char *prompt) {
  const g2z_run_config *run = use->run;
  g2z_status status = g2z_write_text(use->model, use->tokenizer, prompt, run->sample_tokens,
                                     &run->sampling, use->put, use->user);
  g2zc_put_line(use, "");
  return status;
}

/* Continues each line of standard input as a prompt. On a terminal, asks for each line. */
static g2z_status g2zc_converse(const g2zc_use *use) {
  const int asks = isatty(STDIN_FILENO);
  g2z_status status = G2Z_OK;
  char *line = NULL;
  size_t room = 0;
  if (asks) g2zc_put_line(use, "Type a prompt, then Enter. Ctrl-D ends.");
  for (int number = 1; status == G2Z_OK; number++) {
    if (asks) use->put(use->user, "> ", 2);
    const ssize_t bytes = getline(&line, &room, stdin);
    if (bytes < 0) break;
    if (strlen(line) != (size_t)bytes)
      status = g2z_fail(use->services, G2Z_FORMAT, "line %d of the prompts has a zero byte: give "
                        "text", number);
    line[strcspn(line, "\r\n")] = 0;
    if (*line && status == G2Z_OK) status = g2zc_write(use, line);
  }
  if (ferror(stdin)) status = g2z_fail_file(use->services, errno, "read", "standard input");
  if (asks) g2zc_put_line(use, "");
  free(line);
  return status;
}

static void g2zc_share(void *user, double share) {
  const g2zc_use *use = (const g2zc_use *)user;
  if (use->run->progress) use->run->progress(use->run->progress_user, use->scored, share);
}

/* Scores the files of --eval. */
static g2z_status g2zc_evaluate(g2zc_use *use) {
  const g2z_texts *files = &use->run->eval;
  for (int i = 0; i < files->count; i++) {
    g2z_eval_set *set;
    g2z_eval result;
    char text[200], name[1024], line[sizeof text + sizeof name + 32];
    const double begin = g2z_seconds();
    snprintf(name, sizeof name, "%s", files->text[i]);
    use->scored = g2z_tame(name);
    G2Z_TRY(g2z_eval_open(use->services, &use->model->config, use->tokenizer, files->text[i],
                          &set));
    g2z_status status = g2z_eval_run(set, use->model, g2zc_share, use, &result);
    g2z_eval_free(set);
    G2Z_TRY(status);
    g2z_eval_text(&result, text);
    snprintf(line, sizeof line, "%s | %s | %.2f s", name, text, g2z_seconds() - begin);
    g2zc_put_line(use, line);
  }
  return G2Z_OK;
}

static g2z_status g2zc_use_model(g2zc_use *use) {
  const g2z_run_config *run = use->run;
  const int lines = run->prompt && strcmp(run->prompt, "-") == 0;
  const int converses = lines || (!run->prompt && !run->eval.count);
  if (converses && !lines && !isatty(STDIN_FILENO))
    G2Z_REFUSE(use->services, "give something to do with these weights: --prompt TEXT, --prompt - "
               "for each line of standard input, --eval FILE, or --train GLOB");
  if (run->vocab || use->model->config.vocab == 257)
    G2Z_TRY(g2z_tokenizer_create(use->services, run->vocab, &use->tokenizer));
  G2Z_TRY(g2zc_evaluate(use));
  if (!converses && !run->prompt) return G2Z_OK;
  if (!use->tokenizer)
    G2Z_REFUSE(use->services, "%s has no tokenizer: give the one that the model was trained with, "
               "--vocab FILE", run->train.init_from);
  if (converses) return g2zc_converse(use);
  return g2zc_write(use, run->prompt);
}

G2Z_API g2z_status g2z_run_use(const g2z_run_options *o, const g2z_context_config *config,
                               int (*put)(void *user, const char *text, size_t bytes), void *user) {
  const g2z_train_config *train = &o->run.train;
  const int world = config->ranks.place.world;
  g2zc_use use = {&o->run, config->services, NULL, NULL, NULL, put, user};
  g2z_context *context = NULL;
  if (world > 1)
    G2Z_REFUSE(config->services, "there are %d processes, but one generates and scores: start one, "
               "without --ranks, --gpus and launcher, or with srun -n 1", world);
  g2z_status status = g2z_context_create(config, &context);
  if (status == G2Z_OK)
    status = g2z_model_open(context, train->init_from, train->dtype, &use.model);
  if (status == G2Z_OK) status = g2zc_use_model(&use);
  g2z_tokenizer_free(use.tokenizer);
  g2z_model_free(use.model);
  g2z_context_free(context);
  return status;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_COMMAND_IMPLEMENTED */
