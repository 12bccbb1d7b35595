/* g2z_run.h: a whole training with gpt2_zero.h, from a config to a directory with metrics,
 * checkpoints, samples and weights. MIT licence.
 *
 * QUICK START
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_run.h"                                       // this order
 *     static g2z_services services;                               // malloc, no log
 *     g2z_context *context = NULL;  g2z_run *run = NULL;  g2z_run_event event;
 *     g2z_context_config cc = g2z_context_config_default(&services);
 *     g2z_run_config config = g2z_run_config_default(cc.device);  // GPT-2 124M
 *     config.train.train_glob = "data/text_train_*.bin";  config.run_dir = "runs/first";
 *     g2z_status status = g2z_context_create(&cc, &context);
 *     if (status == G2Z_OK) status = g2z_run_create(context, &config, &run);
 *     while (status == G2Z_OK && (status = g2z_run_next(run, &event)) == G2Z_OK) {
 *       puts(event.line);
 *       if (event.kind == G2Z_RUN_DONE) break;
 *     }
 *     if (status != G2Z_OK) puts(services.error);
 *     g2z_run_free(run);  g2z_context_free(context);
 * g2z_command.h adds a command line, and ranks that the program starts itself.
 *
 * g2z_run.h prints nothing, and ends the process only at a second signal (g2z_run_catch_signals).
 * Names that begin with g2zr_ or G2ZR_ are private.
 *
 * CONTENTS: files; metrics and artifacts; checkpoints of a run; a checkpoint's note about the run;
 * opening; the loop; the end of a run; the order of the work; signals
 *
 * RUN DIRECTORY; docs/formats.md describes every file
 *     After a step, its checkpoint and weights are written first, then validation, evaluation and
 *     sample run. The checkpoint's note.json records the run's totals, its epochs, the lengths of
 *     metrics.jsonl and train.log, and the work that is still due. A resumed run cuts both files
 *     to these lengths and does that work first. If a checkpoint is damaged, --resume latest
 *     renames it to step-NNNNNN.damaged and takes an earlier one. RUN_COMPLETE.txt is written
 *     last: a run without it has not ended. A stopped run has a checkpoint, and
 *     training_metrics.json with the reason in "shutdown". */

#ifndef G2Z_RUN_INCLUDED
#define G2Z_RUN_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_run.h: include gpt2_zero.h before it"
#endif

#include "g2z_eval.h"
#include "g2z_program.h"
#include "g2z_report.h"
#include "g2z_text.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ===== run ===============================================================
 * A whole training from a config into a run directory: steps, validation, samples, metrics and
 * artifacts (manual: RUN DIRECTORY). Call g2z_run_next until the run is done, and show the events
 * that it returns (manual: QUICK START). Strings in the config are borrowed and must outlive it. */

#define G2Z_RUN_STEPS_MOST INT64_C(1000000000000) /* the largest number of steps in a config */

typedef struct g2z_run_config {
  g2z_train_config train;      /* train_glob NULL: no steps, only validation and a sample.
                                * optimizer.warmup < 0: a tenth of the steps, at most 1000;
                                * optimizer.lr < 0: 6e-4, or with Muon 4e-3;
                                * optimizer.min_lr < 0: a tenth of lr;
                                * optimizer.adam_lr < 0: 0.6 lr. 0 without Muon */
  const char *val_glob;        /* NULL: no validation */
  const char *vocab;           /* tokenizer file for samples; NULL: byte-level if vocab is 257 */
  const char *prompt;          /* start of a sample; NULL or "": <|endoftext|> */
  const char *run_dir;         /* NULL: no artifacts. A directory that holds a run is refused,
                                * unless that run is resumed */
  const char *resume;          /* NULL: a new run. "latest": the run in run_dir continues after its
                                * last undamaged checkpoint. A run without a checkpoint starts from
                                * the beginning, but is refused if it has ended or left weights. A
                                * checkpoint in run_dir: that run continues, and saves at its end.
                                * Any other checkpoint: a new run starts from it */
  int64_t save_every;          /* steps; > 0: checkpoints run_dir/step-NNNNNN, also at the end */
  int save_epochs;             /* 1: at the end of each epoch */
  int keep_best;               /* 1: the checkpoint of the lowest validation loss is kept, too, and
                                * run_dir/best is a link to it. Without save_every, save_epochs and
                                * keep, only this checkpoint and the last one are kept */
  int keep;                    /* keep only the last `keep` checkpoints; 0: all. While the loss is
                                * higher than before or steps are skipped, earlier checkpoints stay,
                                * too. A checkpoint with added files stays as
                                * step-NNNNNN.partial */
  const char *save_weights;    /* directory for weights and tokenizer after the last step; NULL:
                                * none. A directory with a checkpoint, or with a model that this
                                * run did not write, is refused */
  const char *model_name;      /* for the artifacts; NULL: "custom" */
  const char *dataset_name;    /* for the artifacts; NULL: from the shards' names */
  const char *command_line, *git_commit; /* for the artifacts; NULL becomes null */
  int64_t epochs;              /* > 0: optimizer.steps becomes epochs * steps per epoch */
  int64_t max_train_steps;     /* > 0: stop after this step; the schedule keeps its length */
  int64_t val_every;           /* steps; 0: only at the end of each epoch and of the run */
  int64_t val_steps;           /* batches of one validation; 0: all */
  int64_t max_val_steps;       /* > 0: most batches of one validation, whatever val_steps is */
  int64_t patience;            /* > 0: the run ends after this number of validations in a row
                                * without a new lowest loss */
  float target_loss;           /* > 0: the first validation with at most this loss is marked */
  g2z_texts eval;              /* files to score: g2z_eval.h lists the kinds */
  int64_t eval_every;          /* steps; 0: only at the end of the run */
  int64_t sample_every;        /* steps; 0: only at the end, if there is a prompt or a vocab */
  int sample_tokens;           /* tokens of one sample; 0: no samples */
  g2z_sampling sampling;
  int tensorboard;             /* 1: event files for TensorBoard in run_dir */
  int profile;                 /* 1: times each part of a step and writes the times to
                                * run_dir/profiles. A graph cannot be timed: train.graph 2 becomes
                                * 0, and 1 is refused */
  void (*progress)(void *user, const char *name, double share); /* or NULL. Rank 0 calls it during
                                * validation and scoring; share: the finished part, first 0 */
  void *progress_user;
  const char *early;           /* lines printed before g2z_run_create; train.log begins with them */
} g2z_run_config;
/* Samples of 64 tokens at temperature 0.8; warmup and the learning rates -1; tensorboard 1.
 * Everything else is NULL, 0 or from g2z_*_default. */
G2Z_API g2z_run_config g2z_run_config_default(g2z_device_kind device);
/* Replaces learning rates below 0 by these defaults, as g2z_run_create does in its copy. */
G2Z_API void g2z_run_fill_rates(g2z_optimizer_config *optimizer);

typedef enum g2z_run_kind {
  G2Z_RUN_STEP,        /* the loss of a step became known */
  G2Z_RUN_VALIDATION,
  G2Z_RUN_EVALUATION,  /* one file of --eval was scored */
  G2Z_RUN_SAMPLE,
  G2Z_RUN_SAVED,       /* a checkpoint is on the disk */
  G2Z_RUN_DONE         /* all artifacts are written, RUN_COMPLETE.txt last */
} g2z_run_kind;

typedef struct g2z_run_event {
  g2z_run_kind kind;
  const char *line;             /* the event as text; `line` and `sample` are valid until the next
                                 * call */
  g2z_metrics metrics;          /* of the last step whose loss is known */
  int64_t steps;                /* number of steps of the whole run */
  double tokens_per_second;     /* smoothed over the last steps */
  double eta_seconds;           /* estimate; includes validation, samples and saving */
  double val_loss;              /* of a VALIDATION */
  const char *sample;           /* of a SAMPLE: prompt and continuation */
} g2z_run_event;

typedef struct g2z_run g2z_run;
/* Checks everything that can be checked before the first step. A call that fails leaves no file.
 * All ranks make the same calls; rank 0 writes the files of the run. */
G2Z_API g2z_status g2z_run_create(g2z_context *context, const g2z_run_config *config,
                                  g2z_run **out);
/* Works until there is an event to show. After G2Z_RUN_DONE it returns G2Z_RUN_DONE again.
 * G2Z_STOPPED: a stop was requested; with a run_dir, a checkpoint and training_metrics.json are
 * written. */
G2Z_API g2z_status g2z_run_next(g2z_run *run, g2z_run_event *event);
/* Asks the run to stop; a signal handler may call it. `signal` is the signal's number, for the
 * artifacts; 0: none. Ranks agree to stop in a step, or before the next batch or token of a
 * validation, an evaluation or a sample. A resumed run begins the interrupted work again. */
G2Z_API void g2z_run_request_stop(g2z_run *run, int signal);
G2Z_API void g2z_run_free(g2z_run *run); /* NULL is fine; files of an unfinished run stay */
G2Z_API g2z_trainer *g2z_run_trainer(g2z_run *run);
/* 1: the run still has steps to do, and will save neither checkpoints nor weights. */
G2Z_API int g2z_run_loses_model(const g2z_run *run);
/* Operations of forward and backward per token: six for each weight of a matrix, plus attention
 * over the causal half of T x T. Chowdhery et al. 2022, arXiv:2204.02311, appendix B. */
G2Z_API double g2z_flops_per_token(const g2z_plan *plan);
/* Refuses a text that is too long for a field of `room` bytes that ranks exchange. NULL is fine. */
G2Z_API g2z_status g2z_check_length(g2z_services *services, const char *what, const char *text,
                                    size_t room);
/* Locks a directory until the file descriptor `*lock` is closed. G2Z_BAD_ARGUMENT: another program
 * has locked it. If the file system has no locks, the call succeeds. */
G2Z_API g2z_status g2z_lock_directory(g2z_services *services, const char *path, int *lock);
/* Catches SIGTERM, SIGINT, SIGUSR1 and SIGHUP. After the first signal the run saves and ends; a
 * second one ends the program at once. Ctrl-C may arrive twice, from the terminal and from the
 * launcher: two signals within half a second count as one. run NULL: from now on the first signal
 * ends the program. But if the last run is complete, the first signal is ignored, so that the exit
 * code stays 0. */
G2Z_API void g2z_run_catch_signals(g2z_run *run);
#ifdef __cplusplus
}
#endif
#endif /* G2Z_RUN_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_RUN_IMPLEMENTED)
#define G2Z_RUN_IMPLEMENTED

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ===== run ===============================================================
 * In:  a config. Out: events for the console, and a run directory.
 * Law: metrics.jsonl and train.log grow line by line, as things happen. Every other file appears
 *      complete or not at all, and RUN_COMPLETE.txt last. */

typedef enum g2zr_kind { /* the kinds of numbers in a checkpoint's note */
  G2ZR_WHOLE,  /* int64_t, 0 to 2^53 */
  G2ZR_AMOUNT, /* double, 0 to 2^53 */
  G2ZR_TIME,   /* double, 0 to 2^53; NaN: no value */
  G2ZR_REAL    /* double, any number; NaN: no value */
} g2zr_kind;
#define G2ZR_TYPE_WHOLE int64_t
#define G2ZR_TYPE_AMOUNT double
#define G2ZR_TYPE_TIME double
#define G2ZR_TYPE_REAL double
#define G2ZR_MEMBER(name, kind) G2ZR_TYPE_##kind name;

typedef struct g2zr_field {          /* a member of g2zr_totals, g2zr_low or g2zr_epoch */
  const char *name;
  g2zr_kind kind;
  size_t offset;
} g2zr_field;

/* Sums over the whole run, however often it was resumed. */
#define G2ZR_TOTAL_LIST(X)                                                                        \
  X(wall_s, AMOUNT)       /* wall time of earlier starts */                                       \
  X(pause_s, AMOUNT)      /* time of validation, samples and saving */                            \
  X(train_s, AMOUNT)      /* time of the steps */                                                 \
  X(train_tokens, WHOLE)  /* number of tokens in the steps */                                     \
  X(steps, WHOLE)         /* number of steps */                                                   \
  X(applied, WHOLE)       /* number of steps that changed the weights */                          \
  X(spikes, WHOLE)        /* number of steps that --skip-spikes skipped */                        \
  X(smooth_s, AMOUNT)     /* exponentially weighted sum of the step times */                      \
  X(smooth_weight, AMOUNT) /* sum of the weights in smooth_s */                                   \
  X(open_s, AMOUNT)       /* in a note: wall time of the epoch that has not ended */              \
  X(metrics_bytes, WHOLE) /* in a note: length of metrics.jsonl */                                \
  X(log_bytes, WHOLE)     /* in a note: length of train.log */                                    \
  X(losses, WHOLE)        /* number of losses in `recent` */                                      \
  X(best_loss, REAL)      /* lowest mean of `recent` at a checkpoint; NaN: none */                \
  X(unsound, WHOLE)       /* step of the first checkpoint after the loss rose or steps were       \
                           * skipped; 0: the model is sound (g2zr_weigh) */                       \
  X(rose, WHOLE)          /* step since which all losses are far above best_loss; 0: the last is  \
                           * not */                                                               \
  X(due, WHOLE)           /* in a note: work left to do after the step */                         \
  X(evaluated, WHOLE)     /* in a note: number of --eval files that were scored after the step */ \
  X(val_data, WHOLE)      /* g2zr_val_data of the tokens that `low` was measured over */          \
  X(val_tokens, WHOLE)    /* number of targets in them; 0: there was no validation */             \
  X(stale, WHOLE)         /* number of validations since the last one in `low` */                 \
  X(target_loss, REAL)    /* 0: none */
typedef struct g2zr_totals {
  G2ZR_TOTAL_LIST(G2ZR_MEMBER)
} g2zr_totals;
#define X(name, kind) {#name, G2ZR_##kind, offsetof(g2zr_totals, name)},
static const g2zr_field g2zr_total_fields[] = {G2ZR_TOTAL_LIST(X)};
#undef X
#define G2ZR_RECENT 20 /* the mean of the last 20 losses shows whether the model got worse */

/* A validation whose loss was lower than every earlier validation loss over the same tokens. */
#define G2ZR_LOW_LIST(X) X(step, WHOLE) X(tokens, WHOLE) X(wall_s, AMOUNT) X(loss, REAL)
typedef struct g2zr_low {
  G2ZR_LOW_LIST(G2ZR_MEMBER)
} g2zr_low;
#define X(name, kind) {#name, G2ZR_##kind, offsetof(g2zr_low, name)},
static const g2zr_field g2zr_low_fields[] = {G2ZR_LOW_LIST(X)};
#undef X

#define G2ZR_EPOCH_LIST(X)                                                                        \
  X(index, WHOLE)                                                                                 \
  X(steps, WHOLE)                                                                                 \
  X(skipped, WHOLE)                                                                               \
  X(tokens, WHOLE)                                                                                \
  X(wall_s, AMOUNT)       /* with validation, samples and saving; 0: it has not ended */          \
  X(train_s, AMOUNT)      /* time of its steps */                                                 \
  X(data_s, AMOUNT)       /* part of train_s in which steps waited for tokens */                  \
  X(loss_sum, REAL)       /* sum of the losses of all targets in applied steps */                 \
  X(loss_targets, WHOLE)  /* number of these targets */                                           \
  X(val_loss, REAL)       /* the last validation loss; NaN: none */                               \
  X(p50_s, TIME)          /* percentiles of the step time */                                      \
  X(p95_s, TIME)
typedef struct g2zr_epoch {
  G2ZR_EPOCH_LIST(G2ZR_MEMBER)
  double started;                    /* g2z_seconds() */
} g2zr_epoch;
#define X(name, kind) {#name, G2ZR_##kind, offsetof(g2zr_epoch, name)},
static const g2zr_field g2zr_epoch_fields[] = {G2ZR_EPOCH_LIST(X)};
#undef X

/* A log that rank 0 writes line by line; other programs may read it meanwhile. Lines that could not
 * be written wait in `late`. A checkpoint's note contains them, and the resumed run writes them. */
typedef struct g2zr_stream {
  int file;                          /* -1: not open */
  int64_t bytes;                     /* length of the lines in the file */
  int torn;                          /* 1: a write failed and may have left a part of a line */
  char *late;
  size_t late_bytes, late_capacity;
  g2z_path path;
} g2zr_stream;

typedef struct g2zr_failure {        /* a failure that is reported later */
  g2z_status status;
  int alike;                         /* as in g2z_services */
  char sentence[G2Z_ERROR_BYTES];
} g2zr_failure;

enum { /* Work due before the next step, in this order. The model is saved first: the other work may
        * fail, or take so long that the run is killed. */
  G2ZR_DUE_SAVE = 1,
  G2ZR_DUE_WEIGHTS = 2,
  G2ZR_DUE_BEST = 4,                 /* the link to the checkpoint of the lowest validation loss */
  G2ZR_DUE_STOP = 8,
  G2ZR_DUE_VALIDATION = 16,          /* a new lowest loss makes SAVE and BEST due */
  G2ZR_DUE_EVALUATION = 32,
  G2ZR_DUE_SAMPLE = 64,
  G2ZR_DUE_EPOCH_END = 128,
  G2ZR_DUE_FINISH = 256
};

struct g2z_run {
  g2z_services *services;
  g2z_context *context;
  g2z_run_config config;
  g2z_trainer *trainer;
  g2z_loader *val, *train;           /* train: only until the steps are counted */
  g2z_tokenizer *tokenizer;
  char *sample;                      /* text of the last sample, with its heading */
  size_t sample_bytes, sample_capacity;
  g2z_eval_set *eval[G2Z_TEXTS];
  int evaluated;                     /* files that were scored after this step */
  g2zr_stream metrics, log;
  g2z_events *events;                /* NULL: none */
  double next_report;                /* g2z_seconds(): when report.html may be written again */
  struct utsname host;
  g2z_short started_utc;             /* time of the run's first start; `id` is made at that time */
  char line[4608], dataset[128], id[128]; /* a line may hold the longest path */
  double started, ended;             /* g2z_seconds(); 0: not yet */
  int64_t steps, steps_per_epoch;
  int64_t step;                      /* steps enqueued */
  struct {                           /* rank 0 finds this for all ranks */
    int continues;                   /* 1: the run that run_dir holds continues */
    int own;                         /* 1: it continues after a checkpoint of its own */
    char resume[1024];
  } found;
  const char *resume;                /* the checkpoint that the run resumes from; NULL: none */
  g2z_checkpoint from;               /* contents of that checkpoint */
  double resume_s;                   /* time to load that checkpoint */
  int64_t resumed, saved;            /* step of `from`; step of the last checkpoint, -1: none */
  int lock, weights_lock;            /* rank 0: locks that keep other runs out of run_dir and
                                      * save_weights; -1: not locked */
  int64_t before;                    /* rank 0: "latest" is the last checkpoint before this step;
                                      * later ones are damaged */
  int damaged;                       /* number of those damaged checkpoints */
  int begins;                        /* 1: this start makes run_dir a run. If the start fails, it
                                      * removes the files that it made */
  int broken;                        /* 1: a step failed */
  int64_t applied;                   /* number of steps that changed the weights; includes the steps
                                      * of an earlier run whose checkpoint this run started from */
  char weights[PATH_MAX];            /* rank 0: save_weights as a full path */
  char weights_before[PATH_MAX];     /* `weights` as the checkpoint names it; "": none */
  int64_t stop_signal;               /* the signal that asked to stop; 0: none */
  int impatient;                     /* 1: config.patience ends the run */
  int64_t epoch_step;                /* number of steps of this epoch so far. The run counts them,
                                      * since all ranks must agree: a failed rank's loader stops */
  int epoch_ends;                    /* 1: the last step used the last data of its epoch */
  g2zr_failure ending;               /* ends the run after its last step was reported */
  g2zr_failure held;                 /* rank 0: a file failed; the other ranks do not know yet */
  int due;
  double step_s_of[2];               /* times of the last two steps: losses come one step late */
  g2z_metrics known;                 /* of the last step whose loss is known */
  g2zr_totals sum;
  int unlinked;                      /* 1: rank 0 has warned that it could not make the link best */
  int clamped;                       /* 1: rank 0 has warned of numbers that 8 bits clamped */
  double recent[G2ZR_RECENT];        /* losses of the last steps, the newest first, with skipped
                                      * steps, but without steps whose tokens are all masked */
  int64_t val_steps, val_tokens;     /* in one validation: batches per rank, targets of all ranks */
  struct {                           /* rank 0, with a run_dir: the text of these targets */
    int64_t bytes;                   /* its length; 0: not known */
    uint32_t text;                   /* its CRC-32C */
    char set[64];                    /* runs with the same set have the same targets and --seq */
  } measure;
  double *step_s;                    /* step times of this epoch, since the start or the resume */
  size_t timed;                      /* number of these times */
  g2zr_low *low;                     /* in the order of their steps: the last one is the best */
  size_t low_count, low_capacity;
  g2zr_epoch *epoch;                 /* all epochs; the last one is running */
  size_t step_s_capacity, epoch_count, epoch_capacity;
  int finished;
  char early[4096];                  /* lines for train.log that were logged before it was open */
};

G2Z_API g2z_run_config g2z_run_config_default(g2z_device_kind device) {
  g2z_run_config config;
  memset(&config, 0, sizeof config);
  config.train = g2z_train_config_default(device);
  config.train.optimizer.lr = -1;
  config.train.optimizer.min_lr = -1;
  config.train.optimizer.adam_lr = -1;
  config.train.optimizer.warmup = -1;
  config.sampling = g2z_sampling_default();
  config.sampling.temperature = 0.8f;
  config.sample_tokens = 64;
  config.tensorboard = 1;
  return config;
}

/* The validation with the lowest loss, of step -1 if there is none. */
static g2zr_low g2zr_best(const g2z_run *run) {
  const g2zr_low none = {-1, -1, NAN, NAN};
  return run->low_count ? run->low[run->low_count - 1] : none;
}

/* The first validation that reached the target loss, of step -1 if none did. */
static g2zr_low g2zr_target(const g2z_run *run) {
  const g2zr_low none = {-1, -1, NAN, NAN};
  for (size_t i = 0; i < run->low_count; i++)
    if (run->low[i].loss <= run->sum.target_loss && run->sum.target_loss > 0) return run->low[i];
  return none;
}

/* ----- files ----- */

/* Keeps the first failure, whose sentence is in services->error. */
static void g2zr_note_failure(g2z_run *run, g2zr_failure *failure, g2z_status status) {
  if (failure->status != G2Z_OK) return;
  failure->status = status;
  failure->alike = run->services->alike;
  memcpy(failure->sentence, run->services->error, sizeof failure->sentence);
}

static g2z_status g2zr_tell_failure(g2z_run *run, const g2zr_failure *failure) {
  if (failure->status == G2Z_OK) return G2Z_OK;
  memcpy(run->services->error, failure->sentence, sizeof failure->sentence);
  run->services->alike = failure->alike;
  return failure->status;
}

/* Rank 0 could not write a file. The run fails only after the work that the file reports, so that a
 * checkpoint contains all of that work. Several ranks fail together, when they agree on the status
 * of the next step: otherwise the others would wait for rank 0. */
static void g2zr_hold(g2z_run *run, g2z_status status) {
  if (status == G2Z_OK) return;
  g2zr_note_failure(run, &run->held, status);
  if (run->trainer && run->context->world > 1) g2z_trainer_fail(run->trainer, status);
}

/* All ranks get the same status. It includes a failure that rank 0 held back (g2zr_hold). */
static g2z_status g2zr_agree(g2z_run *run, g2z_status status) {
  if (status == G2Z_OK) status = g2zr_tell_failure(run, &run->held);
  return g2z_ranks_agree(run->context->ranks, status);
}

/* (*all)[r] becomes `mine` of rank r. The caller releases *all. */
static g2z_status g2zr_gather(g2z_run *run, int64_t mine, int64_t **all) {
  G2Z_TRY(g2zr_agree(run, G2Z_NEW(run->services, (size_t)run->context->world, all)));
  return g2z_ranks_all_gather(run->context->ranks, &mine, sizeof mine, *all);
}

/* *value becomes the same on all ranks: the first `mine` that is not 0, in the order of ranks. If
 * all are 0, *value stays. */
static g2z_status g2zr_first(g2z_run *run, int64_t mine, int64_t *value) {
  int64_t *all = NULL;
  g2z_status status = g2zr_gather(run, mine, &all);
  for (int rank = run->context->world - 1; rank >= 0 && status == G2Z_OK; rank--)
    if (all[rank]) *value = all[rank];
  g2z_release(run->services, all);
  return status;
}

static g2z_status g2zr_sum(g2z_run *run, int64_t mine, int64_t *sum) {
  int64_t *all = NULL;
  g2z_status status = g2zr_gather(run, mine, &all);
  *sum = 0;
  for (int rank = 0; rank < run->context->world && status == G2Z_OK; rank++) *sum += all[rank];
  g2z_release(run->services, all);
  return status;
}

static g2z_path g2zr_in(const g2z_run *run, const char *name) {
  return g2z_path_in(run->config.run_dir, "%s", name);
}

static g2z_status g2zr_has(g2z_services *services, const char *directory, const char *name,
                           int *there) {
  return g2z_is_there(services, g2z_path_in(directory, "%s", name).text, there);
}

G2Z_API g2z_status g2z_check_length(g2z_services *services, const char *what, const char *text,
                                    size_t room) {
  if (!text || strlen(text) < room) return G2Z_OK;
  G2Z_REFUSE(services, "%s has %zu bytes, but at most %zu are allowed: give a shorter one", what,
             strlen(text), room - 1);
}

/* Fails if a log was removed or replaced: its later lines would be lost. */
static g2z_status g2zr_stream_check(g2z_run *run, const g2zr_stream *stream) {
  struct stat mine, named;
  if (fstat(stream->file, &mine) != 0)
    return g2z_fail_file(run->services, errno, "examine", stream->path.text);
  const int there = stat(stream->path.text, &named) == 0;
  if (!there && errno != ENOENT && errno != ENOTDIR)
    return g2z_fail_file(run->services, errno, "examine", stream->path.text);
  if (there && mine.st_dev == named.st_dev && mine.st_ino == named.st_ino) return G2Z_OK;
  return g2z_fail(run->services, G2Z_IO, "%s was removed or replaced while this run wrote it. "
                  "Continue from the last checkpoint with --resume latest, or start again",
                  stream->path.text);
}

/* Cuts a log to stream->bytes, where a line ends. */
static g2z_status g2zr_stream_cut(g2z_run *run, g2zr_stream *stream) {
  int done;
  G2Z_RETRY(done, ftruncate(stream->file, (off_t)stream->bytes));
  if (done != 0) return g2z_fail_file(run->services, errno, "cut off the end of",
                                      stream->path.text);
  stream->torn = 0;
  return G2Z_OK;
}

/* Writes the lines that wait in stream->late. */
static g2z_status g2zr_stream_write(g2z_run *run, g2zr_stream *stream) {
  if (stream->late_bytes == 0) return G2Z_OK;
  G2Z_TRY(g2zr_stream_check(run, stream));
  if (stream->torn) G2Z_TRY(g2zr_stream_cut(run, stream));
  if (!g2z_write_bytes(stream->file, stream->late, stream->late_bytes)) {
    stream->torn = 1;
    return g2z_fail_file(run->services, errno, "write", stream->path.text);
  }
  stream->bytes += (int64_t)stream->late_bytes;
  stream->late_bytes = 0;
  return G2Z_OK;
}

/* Appends a line. If the line cannot be written, it waits in stream->late, and the run ends. */
G2Z_PRINTF(3, 4)
static void g2zr_append(g2z_run *run, g2zr_stream *stream, const char *format, ...) {
  va_list arguments;
  if (stream->file < 0) return;
  va_start(arguments, format);
  const size_t length = (size_t)vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  g2z_status status = G2Z_GROW(run->services, &stream->late, &stream->late_capacity,
                               stream->late_bytes, stream->late_bytes + length + 1);
  if (status == G2Z_OK) {
    va_start(arguments, format);
    vsnprintf(stream->late + stream->late_bytes, length + 1, format, arguments);
    va_end(arguments);
    stream->late_bytes += length;
    status = g2zr_stream_write(run, stream);
  }
  g2zr_hold(run, status);
}

/* Opens a log and sets stream->bytes, the length to cut it to. A run that continues takes this
 * length from its checkpoint. A line must end there: otherwise the file has changed, and the call
 * fails. Without note.json all lines stay. A missing log begins again. */
static g2z_status g2zr_stream_open(g2z_run *run, g2zr_stream *stream, const char *name,
                                   int64_t length) {
  const int own = run->found.own, flags = O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK;
  struct stat info;
  char last = '\n';
  ssize_t got = 1;
  stream->path = g2zr_in(run, name);
  G2Z_RETRY(stream->file, open(stream->path.text, flags | O_CLOEXEC, 0666));
  if (stream->file < 0) return g2z_fail_file(run->services, errno, "open", stream->path.text);
  if (fstat(stream->file, &info) != 0 || !S_ISREG(info.st_mode))
    return g2z_fail(run->services, G2Z_IO, "cannot write %s: it is not a regular file; remove it",
                    stream->path.text);
  stream->bytes = own ? (int64_t)info.st_size : 0;
  if (!run->from.note || !own || length < 1) return G2Z_OK;
  if (stream->bytes == 0) {
    g2z_log(run->services, G2Z_LOG_WARNING, "%s is gone or empty: it begins again after step %"
            PRId64, stream->path.text, run->resumed);
    return G2Z_OK;
  }
  stream->bytes = length;
  G2Z_RETRY(got, pread(stream->file, &last, 1, (off_t)stream->bytes - 1));
  if (got == 1 && last == '\n') return G2Z_OK;
  return g2z_fail(run->services, G2Z_FORMAT, "%s has changed since step %" PRId64 " was saved: put "
                  "it back, or begin another run from the checkpoint with --run-dir NEW --resume "
                  "%s", stream->path.text, run->resumed, run->resume);
}

static void g2zr_log(g2z_run *run, const char *line) {
  g2zr_append(run, &run->log, "%s  %s\n", g2z_utc_now().text, line);
}

/* Writes run->line, which an event shows. Control characters in paths are replaced. */
G2Z_PRINTF(2, 3)
static void g2zr_line(g2z_run *run, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(run->line, sizeof run->line, format, arguments);
  va_end(arguments);
  g2z_tame(run->line);
}

/* Rank 0: copies each logged sentence into train.log. Before that file is open, for example while a
 * checkpoint is loaded, lines wait in run->early. A line that cannot be written ends the run. */
static void g2zr_hear(void *user, g2z_log_level level, const char *sentence) {
  g2z_run *run = (g2z_run *)user;
  const char *warning = level == G2Z_LOG_WARNING ? "warning: " : "";
  const size_t used = strlen(run->early), room = sizeof run->early - used;
  char line[G2Z_ERROR_BYTES + 16];
  snprintf(line, sizeof line, "%s%s", warning, sentence);
  if (run->log.file < 0) snprintf(run->early + used, room, "%s\n", line);
  else g2zr_log(run, line);
}

/* A line for the console and for train.log; rank 0 alone. */
#define G2ZR_SAY(run, ...) g2z_log((run)->services, G2Z_LOG_INFO, __VA_ARGS__)

/* ----- metrics and artifacts ----- */

#define G2ZR_ORIGIN "resumed_from.txt" /* path of the checkpoint from which a new run started */

/* Rank 0: writes a text and a line feed as a file. */
static g2z_status g2zr_write_text(g2z_run *run, const char *name, const char *text) {
  g2z_writer *writer;
  G2Z_TRY(g2z_writer_create(run->services, g2zr_in(run, name).text, &writer));
  g2z_writer_printf(writer, "%s\n", text);
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

typedef struct g2zr_number {
  const char *name;
  double value;                      /* NaN and infinity become null in the file */
} g2zr_number;

/* Rank 0: writes a line of metrics.jsonl, and its numbers for TensorBoard. The line has step,
 * tokens, `numbers`, then the text `last`: "", or a comma and more members. */
static void g2zr_put_line(g2z_run *run, const g2zr_number *numbers, int count, const char *last) {
  char line[2048], text[40];
  g2z_status status = G2Z_OK;
  if (run->metrics.file < 0) return;
  int used = snprintf(line, sizeof line, "{\"step\": %" PRId64 ", \"tokens\": %" PRId64,
                      run->known.step, run->known.tokens);
  for (const g2zr_number *number = numbers; number < numbers + count; number++) {
    const double value = number->value;
    const int whole = fabs(value) < 1e15 && value == rint(value);
    snprintf(text, sizeof text, whole ? "%.0f" : "%.9g", value);
    g2z_plain_number(text);
    used += snprintf(line + used, sizeof line - (size_t)used, ", \"%s\": %s", number->name,
                     isfinite(value) ? text : "null");
  }
  snprintf(line + used, sizeof line - (size_t)used, "%s}", last);
  if (run->config.tensorboard && !run->events) /* reads the file: the new line must not be in it */
    status = g2z_events_create(run->services, run->config.run_dir, run->resumed, &run->events);
  g2zr_append(run, &run->metrics, "%s\n", line);
  if (run->events && status == G2Z_OK) status = g2z_events_put(run->events, line);
  g2zr_hold(run, status);
}

/* Rank 0: writes report.html. If that fails, the run continues: other files have the same content.
 * `must` 0: skips the write if reports would take more than a hundredth of the run's time. */
static void g2zr_report(g2z_run *run, int must) {
  const double begin = g2z_seconds();
  if (run->metrics.file < 0 || (!must && begin < run->next_report)) return;
  if (g2z_report_run(run->services, run->config.run_dir) != G2Z_OK)
    g2z_log(run->services, G2Z_LOG_WARNING, "report.html is missing: %s", run->services->error);
  run->next_report = begin + 100 * (g2z_seconds() - begin);
}

#define G2ZR_TEXT(key, text) g2z_json_put_string(out, key, text)
static const char *const g2zr_devices[] = {G2Z_DEVICE_LIST(G2Z_LIST_TEXT)};
static const char *const g2zr_schedules[] = {G2Z_SCHEDULE_LIST(G2Z_LIST_TEXT)};
static const char *const g2zr_strategies[] = {G2Z_STRATEGY_LIST(G2Z_LIST_TEXT)};
static const char *const g2zr_recompute[] = {G2Z_RECOMPUTE_LIST(G2Z_LIST_TEXT)};
static const char *const g2zr_fp8[] = {G2Z_FP8_LIST(G2Z_LIST_TEXT)};
static const char *const g2zr_optimizers[] = {G2Z_OPTIMIZER_LIST(G2Z_LIST_TEXT)};
#define G2ZR_WHOLE(key, number) g2z_json_put_integer(out, key, (int64_t)(number))
#define G2ZR_REAL(key, number) g2z_json_put_number(out, key, number)
#define G2ZR_NONE(key) g2z_json_put_string(out, key, NULL)
#define G2ZR_COUNT(key, number) /* a negative number becomes null */ \
  ((number) < 0 ? G2ZR_NONE(key) : G2ZR_WHOLE(key, number))
#define G2ZR_OPEN(key) g2z_json_begin(out, key, '{')
#define G2ZR_CLOSE() g2z_json_end(out, '}')

/* An environment variable as a number; null: it is not set, or is no number. */
static void g2zr_put_variable(g2z_json_out *out, const char *key, const char *variable) {
  const char *text = getenv(variable);
  char *end = NULL;
  long long value = 0;
  if (text) value = strtoll(text, &end, 10);
  if (text && end != text && !*end) G2ZR_WHOLE(key, value);
  else G2ZR_NONE(key);
}

/* The shortest decimal number that reads as this float: 0.003 for 0.00300000003. */
static double g2zr_decimal(float value) {
  double number = (double)value;
  char text[32];
  for (int digits = 1; digits <= 9; digits++) {
    snprintf(text, sizeof text, "%.*g", digits, (double)value);
    number = strtod(text, NULL);
    if ((float)number == value) break;
  }
  return number;
}

/* An entry of "epochs". */
static void g2zr_put_epoch(const g2z_run *run, g2z_json_out *out, const g2zr_epoch *epoch) {
  const g2z_plan *plan = run->trainer->plan;
  const int64_t steps = epoch->steps;
  /* Bytes on rank 0's GPU: in the plan, and in use by all programs; then the plans of all ranks. */
  int64_t planned = -1, used = -1, all = -1;
  size_t free_bytes = 0, total_bytes = 0;
  if (plan->device == G2Z_DEVICE_CUDA) {
    g2z_device_memory(run->services, plan->device, &free_bytes, &total_bytes);
    planned = (int64_t)plan->bytes_total;
    used = (int64_t)(total_bytes - free_bytes);
    g2z_plan *other; /* rank 1's plan: all ranks except 0 need the same number of bytes */
    if (plan->world == 1) all = planned;
    else if (g2z_plan_create(run->services, &run->trainer->config, plan->device, 1, plan->world,
                             plan->local_world, &other) == G2Z_OK) {
      all = planned + (int64_t)other->bytes_total * (plan->world - 1);
      g2z_plan_free(other);
    }
  }
  G2ZR_OPEN(NULL);
  G2ZR_WHOLE("epoch_idx", epoch->index);
  G2ZR_REAL("epoch_wall_time_sec", epoch->wall_s);
  G2ZR_WHOLE("steps", steps);
  G2ZR_WHOLE("micro_steps", steps * run->config.train.accum);
  G2ZR_WHOLE("optimizer_steps", steps - epoch->skipped);
  G2ZR_WHOLE("tokens_processed_global", epoch->tokens);
  /* An epoch without steps has 0 / 0 here, which the writer turns into null. */
  G2ZR_REAL("tokens_per_sec_global", (double)epoch->tokens / epoch->train_s);
  G2ZR_REAL("train_loss_avg_global", epoch->loss_sum / (double)epoch->loss_targets);
  G2ZR_REAL("val_loss_avg_global", epoch->val_loss);
  G2ZR_COUNT("max_cuda_mem_allocated_bytes_rank0", planned);
  G2ZR_COUNT("max_cuda_mem_reserved_bytes_rank0", used);
  G2ZR_COUNT("max_cuda_mem_allocated_bytes_global", all);
  G2ZR_NONE("max_cuda_mem_reserved_bytes_global");
  G2ZR_REAL("step_time_mean_sec", epoch->train_s / (double)steps);
  G2ZR_REAL("step_time_p50_sec", epoch->p50_s);
  G2ZR_REAL("step_time_p95_sec", epoch->p95_s);
  G2ZR_REAL("dataload_time_mean_sec", epoch->data_s / (double)steps);
  G2ZR_CLOSE();
}

/* The signals that let a run save and end. */
static const struct {
  int number;
  const char *name;
} g2zr_signals[] = {
    {SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGUSR1, "SIGUSR1"}, {SIGHUP, "SIGHUP"}};

/* The name of a signal, in `text`; NULL for 0. */
static const char *g2zr_signal_text(int64_t signal, char text[32]) {
  if (!signal) return NULL;
  snprintf(text, 32, "signal %d", (int)signal);
  for (size_t i = 0; i < G2Z_COUNT(g2zr_signals); i++)
    if (signal == g2zr_signals[i].number) snprintf(text, 32, "%s", g2zr_signals[i].name);
  return text;
}

/* The mean of the recent losses. NaN: there is none, or one of them is NaN. */
static double g2zr_recent_loss(const g2z_run *run) {
  double sum = 0;
  for (int i = 0; i < (int)run->sum.losses; i++) sum += run->recent[i];
  if (isnan(sum)) return NAN;
  return sum / (double)run->sum.losses;
}

/* 1: the loss is not clearly above the loss of guessing, which takes all tokens as equally likely.
 * The margin is the one of g2zr_near_best. */
static int g2zr_plausible(const g2z_run *run, double loss) {
  return loss <= 1.1 * log(run->config.train.model.vocab) + 0.1;
}

/* 1: the loss is not clearly above the lowest mean at a checkpoint. */
static int g2zr_near_best(const g2z_run *run, double loss) {
  return isnan(run->sum.best_loss) || loss <= 1.1 * run->sum.best_loss + 0.1;
}

/* 1: the mean of the recent losses is worse than guessing. */
static int g2zr_diverged(const g2z_run *run) {
  return run->sum.losses > 0 && !g2zr_plausible(run, g2zr_recent_loss(run));
}

static void g2zr_put_ending(const g2z_run *run, g2z_json_out *out) {
  const char *reason = "completed", *signal = NULL;
  const char *file = "RUN_COMPLETE.txt", *marker = "RUN_COMPLETE";
  char name[32];
  if (g2zr_diverged(run)) reason = "diverged";
  if (run->due & G2ZR_DUE_STOP) {
    signal = g2zr_signal_text(run->stop_signal, name);
    reason = signal ? "signal" : "stop requested";
    file = NULL;
    marker = NULL;
  }
  G2ZR_OPEN("shutdown");
  G2ZR_TEXT("reason", reason);
  G2ZR_TEXT("signal", signal);
  G2ZR_CLOSE();
  G2ZR_OPEN("completion");
  G2ZR_TEXT("run_complete_file", file);
  G2ZR_TEXT("printed_marker", marker);
  G2ZR_TEXT("timestamp_utc", g2z_utc_now().text);
  G2ZR_CLOSE();
  if (!getenv("SLURM_JOB_ID")) return;
  G2ZR_OPEN("scheduler");
  G2ZR_TEXT("type", "slurm");
  G2ZR_TEXT("job_id", getenv("SLURM_JOB_ID"));
  G2ZR_TEXT("nodelist", getenv("SLURM_JOB_NODELIST"));
  g2zr_put_variable(out, "nnodes", "SLURM_JOB_NUM_NODES");
  g2zr_put_variable(out, "procid", "SLURM_PROCID");
  g2zr_put_variable(out, "localid", "SLURM_LOCALID");
  G2ZR_TEXT("partition", getenv("SLURM_JOB_PARTITION"));
  G2ZR_CLOSE();
}

/* 0 in a run without steps: programs that read the artifacts cannot format null. */
static double g2zr_tokens_per_s(const g2z_run *run) {
  if (!(run->sum.train_s > 0)) return 0;
  return (double)run->sum.train_tokens / run->sum.train_s;
}

/* Wall time of the whole run, including earlier starts. */
static double g2zr_wall_s(const g2z_run *run) {
  return run->sum.wall_s + ((run->ended > 0 ? run->ended : g2z_seconds()) - run->started);
}

/* A hash of the validation shards and of --seq: a token's loss depends on both. It has 53 bits, the
 * most that a whole number of a note can have. */
static int64_t g2zr_val_data(const g2z_run *run) {
  const uint64_t hash = (run->val->data ^ (uint64_t)run->config.train.seq) * 0x9e3779b97f4a7c15u;
  return (int64_t)(hash >> 11);
}

/* 1 if validations use the same tokens as the validation that found best_val_loss. */
static int g2zr_same_tokens(const g2z_run *run) {
  return run->val && run->sum.val_data == g2zr_val_data(run) &&
         run->sum.val_tokens == run->val_tokens;
}

/* Converts a loss from nats per target to bits per byte of the targets' text. NaN: the number of
 * bytes is not known. */
static double g2zr_bits_per_byte(const g2z_run *run, double loss) {
  const double bytes = run->measure.bytes > 0 ? (double)run->measure.bytes : NAN;
  return loss * (double)run->val_tokens / (bytes * log(2.0));
}

/* A hash in hexadecimal digits; null: not known. */
static void g2zr_put_hash(g2z_json_out *out, const char *key, uint64_t hash, int digits) {
  char text[20];
  snprintf(text, sizeof text, "%0*" PRIx64, digits, hash);
  G2ZR_TEXT(key, hash ? text : NULL);
}

/* "validation": the tokens that best_val_loss was measured over; null: there is no such loss. */
static void g2zr_put_validation(const g2z_run *run, g2z_json_out *out) {
  const int known = run->measure.bytes > 0;
  if (!g2zr_same_tokens(run)) {
    G2ZR_NONE("validation");
    return;
  }
  G2ZR_OPEN("validation");
  G2ZR_TEXT("set", run->measure.set);
  g2zr_put_hash(out, "shards_hash", run->val->data, 16);
  G2ZR_WHOLE("tokens", run->val_tokens);
  g2zr_put_hash(out, "text_hash", known ? run->measure.text : 0, 8);
  G2ZR_COUNT("bytes", known ? run->measure.bytes : -1);
  G2ZR_CLOSE();
}

/* "dataset_mixture": how much was read of each set. */
static void g2zr_put_mixture(const g2z_run *run, g2z_json_out *out) {
  const g2z_loader *loader = run->trainer->loader;
  const double read = (double)(loader->position.step * loader->global);
  int64_t counts[G2Z_SETS];
  g2z_loader_count(loader, counts);
  g2z_json_begin(out, "dataset_mixture", '[');
  for (int k = 0; k < loader->sets; k++) {
    const g2z_loader_set *set = &loader->set[k];
    G2ZR_OPEN(NULL);
    G2ZR_TEXT("shards", set->glob);
    G2ZR_REAL("weight", set->share);
    G2ZR_REAL("share", (double)counts[k] / read);
    G2ZR_WHOLE("tokens", counts[k] * run->trainer->plan->seq);
    G2ZR_REAL("passes", (double)counts[k] / (double)set->sequences);
    G2ZR_CLOSE();
  }
  g2z_json_end(out, ']');
}

/* An object with the variables whose names begin with a word of `prefixes`, except SLURM_JWT and
 * G2Z_SECRET: with those, anybody could act as this user or as a rank. */
static void g2zr_put_variables(g2z_json_out *out, const char *key, const char *prefixes) {
  extern char **environ;
  char name[128];
  g2z_json_begin(out, key, '{');
  for (char **variable = environ; *variable; variable++) {
    const char *equals = strchr(*variable, '=');
    size_t length = equals ? (size_t)(equals - *variable) : sizeof name;
    int wanted = 0;
    for (const char *at = prefixes; *at; at += strspn(at, " ")) {
      const size_t bytes = strcspn(at, " ");
      wanted |= strncmp(*variable, at, bytes) == 0;
      at += bytes;
    }
    if (strncmp(*variable, "SLURM_JWT=", 10) == 0 || strncmp(*variable, "G2Z_SECRET=", 11) == 0)
      wanted = 0;
    if (!wanted || length >= sizeof name) continue;
    snprintf(name, sizeof name, "%.*s", (int)length, *variable);
    g2z_json_put_string(out, name, equals + 1);
  }
  g2z_json_end(out, '}');
}

/* launcher_metadata.json: launcher, host and variables. Only variables that affect a run are
 * written: others may hold secrets. */
static void g2zr_put_launch(void *user, g2z_json_out *out) {
  const g2z_run *run = (const g2z_run *)user;
  const g2z_run_config *config = &run->config;
  G2ZR_TEXT("timestamp_utc", g2z_utc_now().text);
  G2ZR_TEXT("launcher", g2z_ranks_place(run->context->ranks)->launcher);
  G2ZR_TEXT("checkpoint_path", config->save_weights ? config->save_weights : config->run_dir);
  G2ZR_TEXT("rank0_host", run->host.nodename);
  G2ZR_WHOLE("world_size", run->context->world);
  G2ZR_TEXT("git_commit", config->git_commit);
  G2ZR_TEXT("command_line", config->command_line);
  g2zr_put_variables(out, "slurm", "SLURM_");
  g2zr_put_variables(out, "env", "CUDA_ OMP_ OMPI_COMM_WORLD_ PMI_ RANK= WORLD_SIZE= LOCAL_RANK= "
                     "LOCAL_WORLD_SIZE= MASTER_ADDR= MASTER_PORT= G2Z_ RUN_DIR= NSYS= DIST_DEBUG= "
                     "GRAD_ACCUM_STEPS= MICRO_BATCH_SIZE_PER_GPU= GPT2_EXTRA_ARGS=");
  g2zr_put_variables(out, "nccl_env", "NCCL_");
}

static void g2zr_put_training(const g2z_run *run, g2z_json_out *out) {
  const g2z_run_config *config = &run->config;
  const g2z_optimizer_config *optimizer = &config->train.optimizer;
  const g2z_plan *plan = run->trainer->plan;
  const g2z_loader *loader = run->trainer->loader;
  const int muon = optimizer->kind == G2Z_OPTIMIZER_MUON;
  char size[96];
  snprintf(size, sizeof size, "n_layer=%d, n_head=%d, n_embd=%d", plan->model.layers,
           plan->model.heads, plan->model.channels);
  G2ZR_OPEN("training_config");
  G2ZR_TEXT("model_name", config->model_name ? config->model_name : "custom");
  G2ZR_TEXT("model_size", size);
  G2ZR_WHOLE("parameters", plan->parameters);
  G2ZR_WHOLE("seq_len", plan->seq);
  g2zr_put_hash(out, "vocab_hash", config->train.model.vocab_hash, 16);
  G2ZR_WHOLE("epochs", (run->steps + run->steps_per_epoch - 1) / run->steps_per_epoch);
  G2ZR_WHOLE("micro_batch_size_per_gpu", plan->batch);
  G2ZR_WHOLE("grad_accum_steps", plan->accum);
  G2ZR_WHOLE("global_batch_size", (int64_t)plan->batch * plan->accum * plan->world);
  G2ZR_REAL("lr", g2zr_decimal(optimizer->lr));
  G2ZR_REAL("adam_lr", muon ? g2zr_decimal(optimizer->adam_lr) : NAN);
  G2ZR_TEXT("optimizer", g2zr_optimizers[optimizer->kind]);
  G2ZR_TEXT("moments", optimizer->moments_bf16 ? "bf16" : "fp32");
  G2ZR_TEXT("precision", g2z_dtype_text(plan->dtype));
  G2ZR_TEXT("fp8", g2zr_fp8[plan->fp8]);
  g2z_json_put_bool(out, "deepspeed_enabled", 0);
  G2ZR_WHOLE("zero_stage", plan->zero_stage);
  G2ZR_TEXT("strategy", g2zr_strategies[plan->strategy]);
  G2ZR_TEXT("recompute", g2zr_recompute[plan->recompute]);
  G2ZR_TEXT("dataset_name", run->dataset);
  G2ZR_OPEN("dataset_subset_sizes");
  G2ZR_WHOLE("train", loader ? loader->sequences : 0);
  G2ZR_WHOLE("val", run->val ? run->val->sequences : 0);
  G2ZR_CLOSE();
  if (loader && loader->mixed) g2zr_put_mixture(run, out);
  G2ZR_CLOSE();
}

static void g2zr_put_summary(const g2z_run *run, g2z_json_out *out) {
  const double target = g2zr_decimal((float)run->sum.target_loss);
  const g2zr_low best = g2zr_best(run), reached = g2zr_target(run);
  G2ZR_OPEN("summary");
  G2ZR_REAL("total_wall_time_sec", g2zr_wall_s(run));
  G2ZR_REAL("best_val_loss", best.loss);
  G2ZR_REAL("best_val_bits_per_byte",
            g2zr_same_tokens(run) ? g2zr_bits_per_byte(run, best.loss) : NAN);
  G2ZR_COUNT("best_val_step", best.step);
  G2ZR_COUNT("early_stop_step", run->impatient ? run->step : -1);
  G2ZR_REAL("target_loss", target > 0 ? target : NAN);
  G2ZR_COUNT("target_step", reached.step);
  G2ZR_COUNT("target_tokens", reached.tokens);
  G2ZR_REAL("target_seconds", reached.wall_s);
  G2ZR_REAL("mean_tokens_per_sec_global", g2zr_tokens_per_s(run));
  G2ZR_CLOSE();
}

/* training_metrics.json, schema 2.0 (manual: RUN DIRECTORY). */
static void g2zr_put_artifact(void *user, g2z_json_out *out) {
  const g2z_run *run = (const g2z_run *)user;
  const g2z_run_config *config = &run->config;
  const g2z_device_info *info = &run->trainer->device->info;
  const char *cuda = info->runtime[0] ? info->runtime : NULL;
  static const char *const absent[] = {"python_version", "torch_version", "transformers_version",
                                       "deepspeed_version"};
  char os[2 * sizeof run->host.release];
  snprintf(os, sizeof os, "%s %s", run->host.sysname, run->host.release);
  G2ZR_TEXT("schema_version", "2.0");
  G2ZR_TEXT("run_id", run->id);
  G2ZR_TEXT("timestamp_utc", run->started_utc.text);
  G2ZR_TEXT("git_commit", config->git_commit);
  G2ZR_TEXT("command_line", config->command_line);
  G2ZR_OPEN("env");
  for (size_t i = 0; i < G2Z_COUNT(absent); i++) G2ZR_NONE(absent[i]);
  G2ZR_TEXT("cuda_version", cuda);
  G2ZR_TEXT("nccl_version", info->collectives[0] ? info->collectives : NULL);
  G2ZR_CLOSE();
  G2ZR_OPEN("host");
  G2ZR_TEXT("hostname", run->host.nodename);
  G2ZR_TEXT("os", os);
  G2ZR_CLOSE();
  G2ZR_OPEN("hardware");
  G2ZR_TEXT("gpu_name", info->name[0] ? info->name : NULL);
  G2ZR_WHOLE("gpu_count_visible", info->count);
  G2ZR_WHOLE("world_size", run->context->world);
  G2ZR_TEXT("cuda_version", cuda);
  if (getenv("SLURM_JOB_ID")) {
    G2ZR_OPEN("cluster");
    G2ZR_TEXT("name", getenv("SLURM_CLUSTER_NAME"));
    G2ZR_TEXT("nodelist", getenv("SLURM_JOB_NODELIST"));
    g2zr_put_variable(out, "nnodes", "SLURM_JOB_NUM_NODES");
    G2ZR_CLOSE();
  }
  G2ZR_CLOSE();
  g2zr_put_training(run, out);
  G2ZR_OPEN("deepspeed_config");
  G2ZR_NONE("path");
  G2ZR_NONE("sha256");
  G2ZR_NONE("selected");
  G2ZR_CLOSE();
  G2ZR_TEXT("schema_notes",
            "Written by gpt2_zero. dataset_subset_sizes counts sequences of seq_len tokens. "
            "tokens_per_sec_global is tokens over the time of training steps; wall times include "
            "validation, samples and checkpoints. null: not measured on this device.");
  g2z_json_begin(out, "epochs", '[');
  for (size_t i = 0; i < run->epoch_count; i++) g2zr_put_epoch(run, out, &run->epoch[i]);
  g2z_json_end(out, ']');
  g2zr_put_validation(run, out);
  g2zr_put_summary(run, out);
  g2zr_put_ending(run, out);
}

/* Rank 0: writes the tuning table, training_metrics.json, report.html and the profile. */
static g2z_status g2zr_write_artifacts(g2z_run *run) {
  g2z_span_times times[G2Z_SPAN_COUNT];
  if (run->context->device == G2Z_DEVICE_CUDA)
    G2Z_TRY(g2z_trainer_write_tuning(run->trainer, g2zr_in(run, "tuning.txt").text));
  G2Z_TRY(g2z_json_write(run->services, g2zr_in(run, "training_metrics.json").text,
                         g2zr_put_artifact, run));
  g2zr_report(run, 1);
  if (!run->config.profile) return G2Z_OK;
  G2Z_TRY(g2z_device_span_times(run->trainer->device, times));
  return g2z_profile_write_spans(run->services, run->config.run_dir, times);
}

static void g2zr_put_tokenizer(void *user, g2z_json_out *out) {
  const g2z_run *run = (const g2z_run *)user;
  static const char *const roles[] = {"bos_token", "eos_token", "unk_token"};
  G2ZR_TEXT("tokenizer_class", "GPT2Tokenizer");
  g2z_json_put_bool(out, "add_prefix_space", 0);
  g2z_json_put_bool(out, "clean_up_tokenization_spaces", 0); /* some versions: 1 */
  G2ZR_WHOLE("model_max_length", run->config.train.model.context);
  for (int i = 0; i < 3 && g2z_tokenizer_eot(run->tokenizer) >= 0; i++)
    G2ZR_TEXT(roles[i], "<|endoftext|>");
}

/* generation_config.json: how this run's samples were drawn. */
static void g2zr_put_generation(void *user, g2z_json_out *out) {
  const g2z_run *run = (const g2z_run *)user;
  const g2z_sampling *sampling = &run->config.sampling;
  const int eot = g2z_tokenizer_eot(run->tokenizer);
  if (eot >= 0) G2ZR_WHOLE("bos_token_id", eot);
  if (eot >= 0) G2ZR_WHOLE("eos_token_id", eot);
  g2z_json_put_bool(out, "do_sample", sampling->temperature > 0);
  if (!(sampling->temperature > 0)) return;
  G2ZR_REAL("temperature", g2zr_decimal(sampling->temperature));
  G2ZR_WHOLE("top_k", sampling->top_k);
  G2ZR_REAL("top_p", g2zr_decimal(sampling->top_p));
}

/* Rank 0: the tokenizer in a directory of weights, where transformers and --init-from look for it.
 * user: g2z_run *. */
static g2z_status g2zr_save_tokenizer(void *user, const char *directory) {
  g2z_run *run = (g2z_run *)user;
  g2z_services *services = run->services;
  if (!run->tokenizer || run->context->rank != 0) return G2Z_OK;
  G2Z_TRY(g2z_tokenizer_write_merges(services, run->tokenizer,
                                     g2z_path_in(directory, "merges.txt").text));
  G2Z_TRY(g2z_tokenizer_write_vocab(services, run->tokenizer,
                                    g2z_path_in(directory, "vocab.json").text));
  G2Z_TRY(g2z_json_write(services, g2z_path_in(directory, "tokenizer_config.json").text,
                         g2zr_put_tokenizer, run));
  return g2z_json_write(services, g2z_path_in(directory, "generation_config.json").text,
                        g2zr_put_generation, run);
}

/* Syncs the logs to the disk. Fails if one was removed or replaced. */
static g2z_status g2zr_sync(g2z_run *run) {
  const g2zr_stream *const logs[] = {&run->metrics, &run->log};
  for (size_t i = 0; i < G2Z_COUNT(logs) && logs[i]->file >= 0; i++) {
    G2Z_TRY(g2zr_stream_check(run, logs[i]));
    int done;
    G2Z_RETRY(done, fsync(logs[i]->file));
    if (done != 0) return g2z_fail_file(run->services, errno, "sync", logs[i]->path.text);
  }
  return G2Z_OK;
}

#define G2ZR_CHECKPOINT "step-%06" PRId64 /* the name of a checkpoint, from its step */

static g2z_path g2zr_checkpoint(const g2z_run *run, int64_t step, const char *suffix) {
  return g2z_path_in(run->config.run_dir, G2ZR_CHECKPOINT "%s", step, suffix);
}

/* "59 s", "12:34", "1:02:03". */
static g2z_short g2zr_duration(double seconds) {
  int64_t s = (int64_t)(seconds + 0.5);
  int left = (int)(s % 60), minutes = (int)(s / 60 % 60);
  g2z_short out;
  if (s < 60) snprintf(out.text, sizeof out.text, "%d s", left);
  else if (s < 3600) snprintf(out.text, sizeof out.text, "%d:%02d", minutes, left);
  else snprintf(out.text, sizeof out.text, "%" PRId64 ":%02d:%02d", s / 3600, minutes, left);
  return out;
}

/* The flag that sets the run's length. *value: the flag's value, or the length so far if larger. */
static const char *g2zr_length(const g2z_run *run, int64_t *value) {
  const g2z_run_config *c = &run->config;
  const char *flag = "--steps";
  int64_t done = run->step;
  *value = run->steps;
  if (run->steps < c->train.optimizer.steps) {
    flag = "--max-train-steps";
    *value = c->max_train_steps;
  } else if (c->epochs > 0) {
    flag = "--epochs";
    *value = c->epochs;
    done = (run->step + run->steps_per_epoch - 1) / run->steps_per_epoch;
  }
  if (*value < done) *value = done;
  return flag;
}

/* How to start this program again. `other` 1: as a new run, in its own directory. `flag` is one
 * flag or several, the last without its `value`. --init-from refuses --positions. */
#define G2ZR_COMMAND_BYTES 1400
static const char *g2zr_command(const g2z_run *run, int other, const char *flag, const char *value,
                                char text[G2ZR_COMMAND_BYTES]) {
  const g2z_run_config *c = &run->config;
  const int aside = other && c->save_weights &&
                    strcmp(c->save_weights, g2zr_in(run, "weights").text) != 0;
  char to[1100], words[2][420];
  snprintf(to, sizeof to, "%s%s", c->run_dir, other ? "-2" : "");
  int used = snprintf(text, G2ZR_COMMAND_BYTES, "the same command with --run-dir %s %s %s",
                      g2z_shell_word(to, words[0], sizeof words[0]), flag,
                      g2z_shell_word(value, words[1], sizeof words[1]));
  if (aside)
    used += snprintf(text + used, G2ZR_COMMAND_BYTES - (size_t)used, " --save-weights %s",
                     g2z_shell_word(g2z_path_in(to, "weights").text, words[0], sizeof words[0]));
  const int resumes = other && c->resume && !strstr(flag, "--resume");
  const int sines = strstr(flag, "--init-from") && c->train.positions != G2Z_POSITIONS_NORMAL;
  const char *without = "";
  if (resumes && sines) without = ", without --resume and --positions";
  else if (resumes) without = ", without --resume";
  else if (sines) without = ", without --positions";
  snprintf(text + used, G2ZR_COMMAND_BYTES - (size_t)used, "%s", without);
  return text;
}

/* ----- checkpoints of a run ----- */

/* The step in the name of a checkpoint with this suffix; -1: `name` is not such a name. */
static int64_t g2zr_step_named(const char *name, const char *suffix) {
  char same[64];
  if (strncmp(name, "step-", 5) != 0) return -1;
  const int64_t step = (int64_t)strtoll(name + 5, NULL, 10);
  snprintf(same, sizeof same, G2ZR_CHECKPOINT "%s", step, suffix);
  if (strcmp(same, name) != 0) return -1;
  return step;
}

/* The step of the latest checkpoint in run_dir with this suffix, before step `before`; -1: none. A
 * directory that cannot be read is an error: otherwise a run would start again and replace its own
 * files. */
static g2z_status g2zr_latest(const g2z_run *run, const char *suffix, int64_t before,
                              int64_t *latest) {
  *latest = -1;
  DIR *directory = NULL;
  int file;
  G2Z_RETRY(file, open(run->config.run_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file >= 0) directory = fdopendir(file);
  if (!directory && errno == ENOENT) return G2Z_OK;
  while (directory) {
    errno = 0; /* readdir returns NULL at the end as well */
    struct dirent *entry = readdir(directory);
    if (!entry) break;
    const int64_t step = g2zr_step_named(entry->d_name, suffix);
    if (step < before && step > *latest) *latest = step;
  }
  int error = errno;
  if (directory) closedir(directory);
  if (!error) return G2Z_OK;
  *latest = -1;
  return g2z_fail_file(run->services, error, "read the directory", run->config.run_dir);
}

/* Reads the link best. *step: step of the checkpoint that the link names; -1: there is no such
 * link. *other 1: something else has the name best. */
static g2z_status g2zr_linked(const g2z_run *run, int64_t *step, int *other) {
  const g2z_path best = g2zr_in(run, "best");
  char text[64] = "";
  *step = -1;
  *other = 0;
  const ssize_t bytes = readlink(best.text, text, sizeof text - 1);
  if (bytes < 0 && errno == ENOENT) return G2Z_OK;
  if (bytes < 0 && errno != EINVAL) /* EINVAL: no link */
    return g2z_fail_file(run->services, errno, "read the link", best.text);
  *step = g2zr_step_named(text, "");
  *other = *step < 0;
  return G2Z_OK;
}

static void g2zr_stays(g2z_run *run, const char *path) {
  g2z_log(run->services, G2Z_LOG_WARNING, "cannot remove %s: %s; look into it and remove it by "
          "hand", path, strerror(errno));
}

/* Rank 0: removes the checkpoints of earlier steps. These stay: the last `keep` - 1, the checkpoint
 * of the lowest validation loss, the checkpoint that the link best names, and every checkpoint from
 * before the model became unsound. A checkpoint is first renamed to .partial, so that a half
 * removed directory is not taken for a checkpoint. */
static void g2zr_prune(g2z_run *run) {
  int64_t linked, old = run->step;
  int other;
  if (run->config.keep <= 0 || run->metrics.file < 0) return;
  for (int i = 1;; i++) {
    g2z_status status = g2zr_linked(run, &linked, &other);
    if (status == G2Z_OK) status = g2zr_latest(run, "", old, &old);
    if (status != G2Z_OK) { /* a warning is enough: the run can continue */
      g2z_log(run->services, G2Z_LOG_WARNING, "cannot remove old checkpoints: %s",
              run->services->error);
      break;
    }
    if (old < run->sum.unsound || old < 0) break;
    if (i < run->config.keep || old == linked ||
        (run->config.keep_best && old == g2zr_best(run).step))
      continue;
    const g2z_path path = g2zr_checkpoint(run, old, ""),
                   partial = g2zr_checkpoint(run, old, ".partial");
    g2z_checkpoint_remove(partial.text);
    if (g2z_rename(path.text, partial.text) != 0) g2zr_stays(run, path.text);
    else if (!g2z_checkpoint_remove(partial.text)) g2zr_stays(run, partial.text);
  }
}

/* ----- a checkpoint's note about the run ----- */

/* Writes a double with 17 digits, so that a resumed run reads exactly the same value. */
static void g2zr_put_double(g2z_json_out *out, const char *name, double value) {
  char text[40];
  snprintf(text, sizeof text, "%.17g", value);
  g2z_plain_number(text);
  g2z_json_put_string(out, name, isfinite(value) ? text : NULL);
}

static void g2zr_put_fields(g2z_json_out *out, const char *key, const g2zr_field *fields,
                            size_t count, const void *object) {
  g2z_json_begin(out, key, '{');
  for (const g2zr_field *field = fields; field < fields + count; field++) {
    const void *member = (const char *)object + field->offset;
    char text[24];
    if (field->kind == G2ZR_WHOLE) {
      snprintf(text, sizeof text, "%" PRId64, *(const int64_t *)member);
      g2z_json_put_string(out, field->name, text);
    } else {
      g2zr_put_double(out, field->name, *(const double *)member);
    }
  }
  g2z_json_end(out, '}');
}

/* The failure for a note that lacks the member `at`, or gives it an impossible value. */
static g2z_status g2zr_bad_note(const g2z_object *note, const char *at) {
  return g2z_fail(note->services, G2Z_FORMAT, "%.1000s has no %s, or a wrong one: begin another "
                  "run from the checkpoint with --run-dir NEW --resume %.*s", note->path, at,
                  (int)(strrchr(note->path, '/') - note->path), note->path);
}

/* Puts *json at the value of the member `at`. Every note has this member. */
static g2z_status g2zr_get(const g2z_object *from, const char *at, g2z_json *json) {
  if (!g2z_object_at(from, at, json)) return g2zr_bad_note(from, at);
  return G2Z_OK;
}

/* Reads a number and checks its range; null becomes NaN. An unchecked number could overflow where
 * it is converted to an integer. */
static g2z_status g2zr_get_number(const g2z_object *from, const char *at, g2zr_kind kind,
                                  double *value) {
  const double most = 9007199254740992; /* 2^53 */
  g2z_json json, number;
  G2Z_TRY(g2zr_get(from, at, &json));
  *value = NAN;
  if (g2z_json_peek(&json) != 'n') {
    const g2z_json_text text = g2z_json_string(&json);
    G2Z_TRY(json.status);
    g2z_json_open(&number, from->services, from->path, text.at, text.bytes);
    *value = g2z_json_number(&number);
    G2Z_TRY(g2z_json_close(&number));
  }
  if (kind == G2ZR_REAL || (kind == G2ZR_TIME && isnan(*value))) return G2Z_OK;
  if (!(*value >= 0 && *value <= most)) return g2zr_bad_note(from, at);
  if (kind == G2ZR_WHOLE && *value != rint(*value)) return g2zr_bad_note(from, at);
  return G2Z_OK;
}

static g2z_status g2zr_get_fields(const g2z_object *from, const char *at, const g2zr_field *fields,
                                  size_t count, void *object) {
  char path[64];
  for (const g2zr_field *field = fields; field < fields + count; field++) {
    void *member = (char *)object + field->offset;
    double value;
    snprintf(path, sizeof path, "%s%s", at, field->name);
    G2Z_TRY(g2zr_get_number(from, path, field->kind, &value));
    if (field->kind == G2ZR_WHOLE) *(int64_t *)member = (int64_t)value;
    else *(double *)member = value;
  }
  return G2Z_OK;
}

/* Reads the lines that the saving run could not write to this log. */
static g2z_status g2zr_get_late(const g2z_object *note, const char *at, g2zr_stream *stream) {
  g2z_json json;
  G2Z_TRY(g2zr_get(note, at, &json));
  const g2z_json_text text = g2z_json_string(&json);
  G2Z_TRY(json.status);
  G2Z_TRY(G2Z_GROW(note->services, &stream->late, &stream->late_capacity, 0, text.bytes + 1));
  stream->late_bytes = g2z_json_unescape(&text, (unsigned char *)stream->late);
  stream->late[stream->late_bytes] = 0;
  return G2Z_OK;
}

/* If the run was resumed in this epoch, the percentiles cover only the steps since then. */
static void g2zr_percentiles(const g2z_run *run, g2zr_epoch *epoch) {
  if (!run->timed) return;
  epoch->p50_s = g2z_percentile(run->step_s, run->timed, 50);
  epoch->p95_s = g2z_percentile(run->step_s, run->timed, 95);
}

/* Writes note.json of a checkpoint. The note records the last epoch as not ended: either the work
 * that is due ends it, or a longer run continues it. */
static void g2zr_put_note(void *user, g2z_json_out *out) {
  const g2z_run *run = (const g2z_run *)user;
  g2zr_epoch *last = &run->epoch[run->epoch_count - 1];
  g2zr_totals sum = run->sum;
  g2zr_percentiles(run, last);
  sum.wall_s = g2zr_wall_s(run);
  sum.open_s = g2z_seconds() - last->started;
  sum.metrics_bytes = run->metrics.bytes;
  sum.log_bytes = run->log.bytes;
  sum.due = run->due & (G2ZR_DUE_VALIDATION | G2ZR_DUE_EVALUATION | G2ZR_DUE_SAMPLE);
  if (run->epoch_ends) sum.due |= run->due & G2ZR_DUE_EPOCH_END;
  sum.evaluated = run->evaluated;
  g2zr_put_fields(out, "totals", g2zr_total_fields, G2Z_COUNT(g2zr_total_fields), &sum);
  g2z_json_begin(out, "recent", '[');
  for (int i = 0; i < G2ZR_RECENT; i++) g2zr_put_double(out, NULL, run->recent[i]);
  g2z_json_end(out, ']');
  g2z_json_put_string(out, "run_id", run->id);
  g2z_json_put_string(out, "timestamp_utc", run->started_utc.text);
  g2z_json_put_string(out, "weights", run->weights);
  g2z_json_put_string(out, "metrics_late", run->metrics.late_bytes ? run->metrics.late : "");
  g2z_json_put_string(out, "log_late", run->log.late_bytes ? run->log.late : "");
  g2z_json_begin(out, "low", '[');
  for (size_t i = 0; i < run->low_count; i++)
    g2zr_put_fields(out, NULL, g2zr_low_fields, G2Z_COUNT(g2zr_low_fields), &run->low[i]);
  g2z_json_end(out, ']');
  g2z_json_begin(out, "epochs", '[');
  for (size_t i = 0; i < run->epoch_count; i++) {
    g2zr_epoch epoch = run->epoch[i];
    if (&run->epoch[i] == last) epoch.wall_s = 0;
    g2zr_put_fields(out, NULL, g2zr_epoch_fields, G2Z_COUNT(g2zr_epoch_fields), &epoch);
  }
  g2z_json_end(out, ']');
}

static g2z_status g2zr_begin_epoch(g2z_run *run, int64_t index) {
  G2Z_TRY(G2Z_GROW(run->services, &run->epoch, &run->epoch_capacity, run->epoch_count,
                   run->epoch_count + 1));
  g2zr_epoch *epoch = &run->epoch[run->epoch_count++];
  memset(epoch, 0, sizeof *epoch);
  epoch->index = index;
  epoch->started = g2z_seconds();
  epoch->val_loss = NAN;
  epoch->p50_s = NAN;
  epoch->p95_s = NAN;
  run->timed = 0;
  return G2Z_OK;
}

/* Reads the run's sums and epochs from the checkpoint's note. */
static g2z_status g2zr_restore(g2z_run *run) {
  g2z_path path = g2z_path_in(run->resume, "note.json");
  const g2z_object note = {run->services, path.text, run->from.note, strlen(run->from.note)};
  g2z_object each;
  g2z_json json;
  g2z_json_open(&json, run->services, path.text, note.text, note.bytes);
  g2z_json_skip(&json);
  G2Z_TRY(g2z_json_close(&json));
  G2Z_TRY(g2zr_get_fields(&note, "totals.", g2zr_total_fields, G2Z_COUNT(g2zr_total_fields),
                          &run->sum));
  for (int i = 0; i < G2ZR_RECENT; i++) {
    char at[32];
    snprintf(at, sizeof at, "recent.%d", i);
    G2Z_TRY(g2zr_get_number(&note, at, G2ZR_REAL, &run->recent[i]));
  }
  if (run->sum.losses > G2ZR_RECENT) return g2zr_bad_note(&note, "totals.losses");
  if (run->sum.due >= 2 * G2ZR_DUE_FINISH) return g2zr_bad_note(&note, "totals.due");
  g2z_object_copy(&note, "run_id", run->id, sizeof run->id);
  g2z_object_copy(&note, "timestamp_utc", run->started_utc.text, sizeof run->started_utc.text);
  if (!*run->id) return g2zr_bad_note(&note, "run_id");
  if (!*run->started_utc.text) return g2zr_bad_note(&note, "timestamp_utc");
  g2z_object_copy(&note, "weights", run->weights_before, sizeof run->weights_before);
  G2Z_TRY(g2zr_get_late(&note, "metrics_late", &run->metrics));
  G2Z_TRY(g2zr_get_late(&note, "log_late", &run->log));
  if (!g2z_object_list(&note, "low", &json)) return g2zr_bad_note(&note, "low");
  for (run->low_count = 0; g2z_object_next(&note, &json, &each); run->low_count++) {
    G2Z_TRY(G2Z_GROW(run->services, &run->low, &run->low_capacity, run->low_count,
                     run->low_count + 1));
    G2Z_TRY(g2zr_get_fields(&each, "", g2zr_low_fields, G2Z_COUNT(g2zr_low_fields),
                            &run->low[run->low_count]));
  }
  run->epoch_count = 0;
  for (int has = g2z_object_list(&note, "epochs", &json);
       has && g2z_object_next(&note, &json, &each);) {
    G2Z_TRY(g2zr_begin_epoch(run, 0));
    G2Z_TRY(g2zr_get_fields(&each, "", g2zr_epoch_fields, G2Z_COUNT(g2zr_epoch_fields),
                            &run->epoch[run->epoch_count - 1]));
  }
  if (!run->epoch_count) return g2zr_bad_note(&note, "epochs");
  run->epoch[run->epoch_count - 1].started = g2z_seconds() - run->sum.open_s;
  return G2Z_OK;
}

/* ----- opening: settings, data, checkpoint ----- */

/* Settings that must be equal on all ranks. Ranks validate, save and sample together: a rank with
 * other settings would wait until the watcher ends the job. X(name, value, most): the range is 0 to
 * `most`; most -1: any value. */
#define G2ZR_SETTING_LIST(X)                                                                      \
  X(epochs, epochs, 1 << 20)                                                                      \
  X(max_train_steps, max_train_steps, G2Z_RUN_STEPS_MOST)                                         \
  X(val, val_glob != NULL, -1)                                                                    \
  X(max_val_steps, max_val_steps, G2Z_RUN_STEPS_MOST)                                             \
  X(val_every, val_every, G2Z_RUN_STEPS_MOST)                                                     \
  X(val_steps, val_steps, G2Z_RUN_STEPS_MOST)                                                     \
  X(patience, patience, G2Z_RUN_STEPS_MOST)                                                       \
  X(keep_best, keep_best, -1)                                                                     \
  X(eval, eval.count, -1)                                                                         \
  X(eval_every, eval_every, G2Z_RUN_STEPS_MOST)                                                   \
  X(sample_every, sample_every, G2Z_RUN_STEPS_MOST)                                               \
  X(run_dir, run_dir != NULL, -1)                                                                 \
  X(save_every, save_every, G2Z_RUN_STEPS_MOST)                                                   \
  X(save_epochs, save_epochs, -1)                                                                 \
  X(save_weights, save_weights != NULL, -1)                                                       \
  X(vocab, vocab != NULL, -1)                                                                     \
  X(sample_tokens, sample_tokens, 1 << 20)                                                        \
  X(top_k, sampling.top_k, -1)                                                                    \
  X(sample_seed, sampling.seed, -1)                                                               \
  X(profile, profile, -1)

/* Computes in decimal: the default equals the same number when the user types it. */
G2Z_API void g2z_run_fill_rates(g2z_optimizer_config *optimizer) {
  const int muon = optimizer->kind == G2Z_OPTIMIZER_MUON;
  if (optimizer->lr < 0 && muon) optimizer->lr = 4e-3f;
  if (optimizer->lr < 0) optimizer->lr = 6e-4f;
  if (optimizer->min_lr < 0) optimizer->min_lr = (float)(0.1 * g2zr_decimal(optimizer->lr));
  if (!muon) optimizer->adam_lr = 0;
  if (optimizer->adam_lr < 0) optimizer->adam_lr = (float)(0.6 * g2zr_decimal(optimizer->lr));
}

static g2z_status g2zr_check(g2z_run *run) {
  g2z_run_config *config = &run->config;
#define X(name, value, most) \
  if (most >= 0) G2Z_TRY(g2z_check_range(run->services, #name, (int64_t)(config->value), 0, most));
  G2ZR_SETTING_LIST(X)
#undef X
  G2Z_TRY(g2z_check_range(run->services, "keep", config->keep, 0, INT32_MAX));
  G2Z_TRY(g2z_sampling_check(run->services, &config->sampling));
  g2z_run_fill_rates(&config->train.optimizer);
  if (!config->train.train_glob && !config->val_glob)
    G2Z_REFUSE(run->services, "there is nothing to do: give --train GLOB or --val GLOB");
  if (config->profile && !config->run_dir)
    G2Z_REFUSE(run->services, "profile needs a run_dir for its files: give --run-dir DIR");
  if (config->profile && config->train.graph == 1)
    G2Z_REFUSE(run->services, "profile needs --graph off: it cannot time the parts of a graph");
  if (config->profile) config->train.graph = 0;
  g2z_train_config probe = config->train; /* any warmup and steps give the same plan */
  if (probe.optimizer.warmup < 0) probe.optimizer.warmup = 0;
  if (config->epochs > 0) probe.optimizer.steps = 1;
  g2z_plan *plan;
  G2Z_TRY(g2z_plan_create(run->services, &probe, run->context->device,
                          run->context->rank, run->context->world,
                          g2z_ranks_place(run->context->ranks)->local_world, &plan));
  g2z_plan_free(plan);
  const char *needs = NULL;
  if (config->resume && strcmp(config->resume, "latest") == 0) needs = "resume latest";
  if (config->keep_best) needs = "keep_best";
  if (config->save_epochs) needs = "save_epochs";
  if (config->save_every > 0) needs = "save_every";
  if (needs && !config->run_dir)
    G2Z_REFUSE(run->services, "%s needs a run_dir for the checkpoints: give --run-dir DIR", needs);
  if (config->keep_best && !config->save_every && !config->save_epochs && !config->keep)
    config->keep = 1;
  G2Z_TRY(g2z_check_length(run->services, "run_dir", config->run_dir, 1024));
  G2Z_TRY(g2z_check_length(run->services, "save_weights", config->save_weights, 4001));
  if (config->resume && !*config->resume) /* as from --resume "$UNSET" in a script */
    G2Z_REFUSE(run->services, "resume is empty: give --resume latest, or a checkpoint's path");
  if (config->resume && !config->train.train_glob)
    G2Z_REFUSE(run->services, "resume needs the token shards of the run: give --train GLOB");
  return G2Z_OK;
}

G2Z_API g2z_status g2z_lock_directory(g2z_services *services, const char *path, int *lock) {
  G2Z_RETRY(*lock, open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (*lock < 0) return g2z_fail_file(services, errno, "read the directory", path);
  if (flock(*lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return G2Z_OK;
  close(*lock);
  *lock = -1;
  G2Z_REFUSE(services, "another program uses %s: wait until it ends, or choose another directory",
             path);
}

/* Finds the checkpoint of another run that the run in run_dir started from; "": there is none. */
static g2z_status g2zr_find_origin(const g2z_run *run, g2z_path *path) {
  const char *run_dir = run->config.run_dir;
  char *origin;
  size_t bytes;
  int there;
  path->text[0] = 0;
  G2Z_TRY(g2zr_has(run->services, run_dir, G2ZR_ORIGIN, &there));
  if (!there) return G2Z_OK;
  G2Z_TRY(g2z_read_file(run->services, g2zr_in(run, G2ZR_ORIGIN).text, sizeof path->text - 1,
                        &origin, &bytes));
  snprintf(path->text, sizeof path->text, "%.*s", (int)strcspn(origin, "\n"), origin);
  g2z_release(run->services, origin);
  G2Z_TRY(g2z_is_there(run->services, path->text, &there));
  if (there) return G2Z_OK;
  return g2z_fail(run->services, G2Z_IO, "the run in %.200s has no checkpoint of its own, and "
                  "%.300s, from which it started, is gone: put it back or choose another --run-dir",
                  run_dir, path->text);
}

/* Rank 0: finds the checkpoint to resume from, and decides whether the run in run_dir continues. If
 * run_dir exists, locks it first: two runs in it would remove each other's files. */
static g2z_status g2zr_choose(g2z_run *run) {
  const char *resume = run->config.resume, *run_dir = run->config.run_dir;
  struct stat here, above;
  int there = 0;
  g2z_path path;
  if (run_dir) G2Z_TRY(g2z_is_there(run->services, run_dir, &there));
  if (there && run->lock < 0) G2Z_TRY(g2z_lock_directory(run->services, run_dir, &run->lock));
  if (!resume) return G2Z_OK;
  snprintf(path.text, sizeof path.text, "%s", resume);
  if (strcmp(resume, "latest") == 0) {
    G2Z_TRY(g2zr_latest(run, "", run->before, &run->before));
    run->found.continues = 1; /* even without a checkpoint: then it starts from the beginning */
    run->found.own = run->before >= 0;
    if (run->found.own) path = g2zr_checkpoint(run, run->before, "");
    else if (run->damaged)
      return g2z_fail(run->services, G2Z_FORMAT, "none of the checkpoints in %.200s (%d) is whole. "
                      "Copy one there again, or remove them to start again", run_dir,
                      run->damaged);
    else G2Z_TRY(g2zr_find_origin(run, &path));
  } else {
    run->found.continues = run_dir && stat(g2z_path_in(resume, "..").text, &above) == 0 &&
                           stat(run_dir, &here) == 0 && here.st_dev == above.st_dev &&
                           here.st_ino == above.st_ino;
    run->found.own = run->found.continues;
  }
  G2Z_TRY(g2z_check_length(run->services, "the checkpoint's path", path.text,
                            sizeof run->found.resume));
  memcpy(run->found.resume, path.text, strlen(path.text) + 1);
  return G2Z_OK;
}

/* Samples need a tokenizer with the model's ids. Without a file, 257 tokens mean the 256 bytes. */
static g2z_status g2zr_open_tokenizer(g2z_run *run) {
  g2z_run_config *config = &run->config;
  int vocab = config->train.model.vocab;
  int wanted = config->prompt || config->sample_every > 0 || config->vocab;
  if (!config->vocab && vocab != 257) {
    if (!wanted || config->sample_tokens == 0) {
      config->sample_tokens = 0;
      return G2Z_OK;
    }
    G2Z_REFUSE(run->services, "samples need the tokenizer of the shards, since the model has %d "
               "tokens, not 257: give --vocab FILE (vocab.bpe, merges.txt)", vocab);
  }
  G2Z_TRY(g2z_tokenizer_create(run->services, config->vocab, &run->tokenizer));
  if (g2z_tokenizer_vocab(run->tokenizer) > vocab)
    G2Z_REFUSE(run->services, "--vocab %.300s has %d tokens, but the model only %d: give the "
               "tokenizer that the model was trained with, or --vocab-size %d for a new model",
               config->vocab, g2z_tokenizer_vocab(run->tokenizer), vocab,
               g2z_tokenizer_vocab(run->tokenizer));
  config->train.model.eot = g2z_tokenizer_eot(run->tokenizer);
  if (!wanted) config->sample_tokens = 0;
  return G2Z_OK;
}

#define G2ZR_BYTES UINT64_C(0xcbf29ce484222325) /* g2z_tokenizer_hash of the 256 bytes */
#define G2ZR_GPT2 UINT64_C(0x4aaeec9c912d3e56)  /* g2z_tokenizer_hash of GPT-2's merges */

static g2z_status g2zr_open_val(g2z_run *run, g2z_loader_config loader) {
  const g2z_run_config *config = &run->config;
  loader.glob = config->val_glob;
  loader.accum = 1;
  loader.order = G2Z_ORDER_FILE;
  G2Z_TRY(g2z_loader_create(run->services, &loader, &run->val));
  run->val_steps = run->val->steps_per_epoch;
  if (config->val_steps > 0 && run->val_steps > config->val_steps)
    run->val_steps = config->val_steps;
  if (config->max_val_steps > 0 && run->val_steps > config->max_val_steps)
    run->val_steps = config->max_val_steps;
  return G2Z_OK;
}

/* Shards, tokenizer and model must share a vocabulary. Shards of other programs do not name their
 * vocabulary: they are accepted. Without --vocab, a model with GPT-2's number of tokens accepts
 * only shards of GPT-2's vocabulary. */
static g2z_status g2zr_check_vocab(g2z_run *run) {
  const g2z_run_config *config = &run->config;
  const g2z_loader *loaders[] = {run->train, run->val};
  g2z_model_config *model = &run->config.train.model;
  const char *known = "the vocabulary of 256 bytes"; /* the vocabulary that has `hash` */
  uint64_t hash = 0;
  if (config->vocab) known = config->vocab;
  if (run->tokenizer) hash = g2z_tokenizer_hash(run->tokenizer);
  if (!hash && model->vocab_hash) {
    hash = model->vocab_hash;
    known = config->train.init_from ? config->train.init_from : "the model";
  }
  for (size_t i = 0; i < G2Z_COUNT(loaders); i++) {
    if (!loaders[i] || !loaders[i]->vocab_hash || loaders[i]->vocab_hash == hash) continue;
    if (hash)
      G2Z_REFUSE(run->services, "%.300s was made with another vocabulary than %.300s: give the "
                 "shards' own with --vocab FILE, or make the shards again with ./prepare_data "
                 "--vocab FILE", loaders[i]->vocab_shard, known);
    hash = loaders[i]->vocab_hash;
    known = loaders[i]->vocab_shard;
    if (run->tokenizer) continue;
    if (hash == G2ZR_BYTES)
      G2Z_REFUSE(run->services, "%.300s was made with a vocabulary of 257, single bytes, but the "
                 "model's vocabulary has %d tokens: give --vocab-size 257", known, model->vocab);
    if (model->vocab == 50257 && hash != G2ZR_GPT2)
      G2Z_REFUSE(run->services, "%.300s was made with another vocabulary than GPT-2's, but the "
                 "model's vocabulary has %d tokens: give the shards' own with --vocab FILE", known,
                 model->vocab);
  }
  model->vocab_hash = hash;
  return G2Z_OK;
}

/* Reads the files to score. A row must fit into the trainer's activations: batch * seq tokens. */
static g2z_status g2zr_open_eval(g2z_run *run) {
  const g2z_train_config *train = &run->config.train;
  const g2z_texts *files = &run->config.eval;
  g2z_model_config rows = train->model;
  const int64_t room = (int64_t)train->batch * train->seq;
  if (room < rows.context) rows.context = (int)room;
  for (int i = 0; i < files->count; i++)
    G2Z_TRY(g2z_eval_open(run->services, &rows, run->tokenizer, files->text[i], &run->eval[i]));
  return G2Z_OK;
}

/* The dataset's name: as configured, or from the shards: "data/openwebtext_train_*.bin" gives
 * "openwebtext". */
static void g2zr_name_dataset(g2z_run *run) {
  static const char *const ends[] = {"_train", "_val", "*", "?", "[", "."};
  const g2z_run_config *config = &run->config;
  const char *name = config->val_glob;
  if (config->train.train_glob) name = config->train.train_glob;
  if (strrchr(name, '/')) name = strrchr(name, '/') + 1;
  snprintf(run->dataset, sizeof run->dataset, "%s", name);
  for (size_t i = 0; i < G2Z_COUNT(ends); i++) {
    char *end = strstr(run->dataset, ends[i]);
    if (end) *end = 0;
  }
  for (size_t i = strlen(run->dataset); i > 0 && strchr("_-", run->dataset[i - 1]); i--)
    run->dataset[i - 1] = 0;
  if (!*run->dataset) snprintf(run->dataset, sizeof run->dataset, "custom");
  if (run->train && run->train->mixed) snprintf(run->dataset, sizeof run->dataset, "mixture");
  if (config->dataset_name)
    snprintf(run->dataset, sizeof run->dataset, "%s", config->dataset_name);
}

/* Opens the files that a rank reads on its own, without calls to other ranks. */
static g2z_status g2zr_open_alone(g2z_run *run) {
  const g2z_train_config *train = &run->config.train;
  const g2z_loader_config loader = {
      train->train_glob, train->batch, train->seq, train->accum, run->context->rank,
      run->context->world, train->model.vocab, G2Z_ORDER_SHUFFLED, train->seed};
  if (train->train_glob) G2Z_TRY(g2z_loader_create(run->services, &loader, &run->train));
  G2Z_TRY(g2zr_open_tokenizer(run));
  if (run->config.val_glob) G2Z_TRY(g2zr_open_val(run, loader));
  G2Z_TRY(g2zr_check_vocab(run));
  G2Z_TRY(g2zr_open_eval(run));
  g2zr_name_dataset(run);
  return G2Z_OK;
}

/* Computes the number of steps, from the checkpoint's place in the data. The trainer needs it from
 * the start, as the length of the schedule. */
static g2z_status g2zr_count_steps(g2z_run *run) {
  g2z_run_config *config = &run->config;
  g2z_optimizer_config *optimizer = &config->train.optimizer;
  const g2z_checkpoint *from = &run->from;
  if (run->resume)
    G2Z_TRY(g2z_checkpoint_read(run->services, run->resume, run->train, &run->from));
  run->resumed = from->step;
  run->steps_per_epoch = 1;
  if (run->train) {
    const char *remedy = "--steps N";
    if (config->save_epochs) remedy = "--steps N and --save-every N, and remove --save-epochs";
    if (run->train->mixed && (config->epochs || config->save_epochs))
      G2Z_REFUSE(run->services, "training shards with weights are mixed without an end, so there "
                 "are no epochs: give %s", remedy);
    run->steps_per_epoch = run->train->steps_per_epoch;
    run->epoch_ends = from->next.epoch > from->epoch; /* 1: the epoch has less than a step left */
    if (config->epochs > 0) { /* steps for the data left: the global batch may have changed */
      optimizer->steps = from->step;
      if (config->epochs > from->next.epoch)
        optimizer->steps += (config->epochs - from->next.epoch) * run->steps_per_epoch -
                            from->next.step;
    }
    run->steps = optimizer->steps;
    if (config->max_train_steps > 0 && run->steps > config->max_train_steps)
      run->steps = config->max_train_steps;
  }
  g2z_loader_free(run->train);
  run->train = NULL;
  if (optimizer->warmup < 0) {
    optimizer->warmup = optimizer->steps / 10;
    if (optimizer->warmup > 1000) optimizer->warmup = 1000;
  }
  return G2Z_OK;
}

/* Refuses the directory of a run that ended without a checkpoint: such a run cannot continue. If it
 * diverged, its weights are of no use either. */
static g2z_status g2zr_check_ended(g2z_run *run) {
  const char *run_dir = run->config.run_dir;
  static const char weights[] = "weights/model.safetensors", complete[] = "RUN_COMPLETE.txt";
  char text[G2ZR_COMMAND_BYTES], reason[16] = "";
  g2z_object metrics;
  int there;
  G2Z_TRY(g2zr_has(run->services, run_dir, weights, &there));
  if (there) {
    const char *further = ". To train its weights further: ", *command = text;
    g2zr_command(run, 1, "--init-from", g2zr_in(run, "weights").text, text);
    if (g2z_object_read(run->services, g2zr_in(run, "training_metrics.json").text, &metrics) ==
        G2Z_OK) /* a damaged file gives no reason; the directory is refused in any case */
      g2z_object_copy(&metrics, "shutdown.reason", reason, sizeof reason);
    g2z_object_free(&metrics);
    if (strcmp(reason, "diverged") == 0) further = command = "";
    G2Z_REFUSE(run->services, "%.200s holds a run that ended without a checkpoint (%s): choose "
               "another --run-dir, or remove it%s%s", run_dir, weights, further, command);
  }
  G2Z_TRY(g2zr_has(run->services, run_dir, complete, &there));
  if (there)
    G2Z_REFUSE(run->services, "%.200s holds a run that ended without a checkpoint (%s): choose "
               "another --run-dir, or remove it", run_dir, complete);
  return G2Z_OK;
}

/* Rank 0: refuses a run_dir whose files would be lost: a run that ended without a checkpoint,
 * another run, or checkpoints after the resumed one. */
static g2z_status g2zr_check_directory(g2z_run *run) {
  const char *run_dir = run->config.run_dir;
  char name[32], text[G2ZR_COMMAND_BYTES];
  int64_t latest;
  int there, is_run;
  if (!run_dir) return G2Z_OK;
  G2Z_TRY(g2zr_latest(run, "", INT64_MAX, &latest));
  G2Z_TRY(g2zr_has(run->services, run_dir, G2ZR_ORIGIN, &there)); /* one of these two files */
  G2Z_TRY(g2zr_has(run->services, run_dir, "metrics.jsonl", &is_run)); /* is a run's first */
  is_run |= there || latest >= 0;
  snprintf(name, sizeof name, G2ZR_CHECKPOINT, latest);
  if (latest < 0) G2Z_TRY(g2zr_check_ended(run));
  const char *const traces[] = {"RUN_COMPLETE.txt", "training_metrics.json", "metrics.jsonl",
                                "train.log", "sample.txt", "report.html", name, G2ZR_ORIGIN};
  const int continues = run->found.continues && is_run;
  for (size_t i = 0; i < G2Z_COUNT(traces) && !continues; i++) {
    G2Z_TRY(g2zr_has(run->services, run_dir, traces[i], &there));
    if (there && !is_run)
      G2Z_REFUSE(run->services, "%.200s is not a run directory and holds a %s, which a run would "
                 "replace: choose another --run-dir", run_dir, traces[i]);
    if (there)
      G2Z_REFUSE(run->services, "%.200s holds a run already (%s): a new run needs another "
                 "--run-dir. To continue it: %s", run_dir, traces[i],
                 g2zr_command(run, 0, "--resume", "latest", text));
  }
  if (!run->found.continues || latest <= run->resumed || run->damaged) return G2Z_OK;
  G2Z_REFUSE(run->services, "%.200s holds checkpoints after step %" PRId64 ", up to step %" PRId64
             ": remove them, choose another --run-dir, or continue from the last: %s", run_dir,
             run->resumed, latest, g2zr_command(run, 0, "--resume", "latest", text));
}

/* Counts the targets of a validation, and refuses a validation without targets. The loader refuses
 * a token that the model lacks. Both happen before the training, which may take hours. */
static g2z_status g2zr_check_val(g2z_run *run) {
  const int64_t tokens = run->val->rows * run->config.train.seq, steps = run->val_steps;
  int64_t counted = 0;
  g2z_status status = G2Z_OK;
  for (int64_t step = 0; step < steps && status == G2Z_OK; step++) {
    const int32_t *x, *y;
    status = g2z_loader_next(run->val, &x, &y);
    for (int64_t i = 0; i < tokens && status == G2Z_OK; i++) counted += y[i] >= 0;
  }
  G2Z_TRY(g2zr_agree(run, status));
  G2Z_TRY(g2zr_sum(run, counted, &run->val_tokens));
  if (run->val_tokens) return G2Z_OK;
  const char *remedy = "give --val shards whose tokens are not all masked";
  if (steps < run->val->steps_per_epoch) remedy = "raise --val-steps or --max-val-steps";
  return g2zr_agree(run, g2z_fail(run->services, G2Z_BAD_ARGUMENT, "no token of the first %" PRId64
                                  " validation batch%s counts: %s", steps, steps == 1 ? "" : "es",
                                  remedy));
}

/* Adds a token to the checksum and the length of the validation's text. An end-of-text token adds
 * nothing to the length. */
static void g2zr_measure_token(g2z_run *run, int32_t id, int is_target) {
  size_t bytes = 0;
  if (id < 0) return; /* a mask excludes it */
  const unsigned char *text = g2z_tokenizer_token(run->tokenizer, id, &bytes);
  run->measure.text = g2z_crc32c(run->measure.text, text, bytes);
  if (is_target && id != g2z_tokenizer_eot(run->tokenizer)) run->measure.bytes += (int64_t)bytes;
}

/* Rank 0: measures the text that all ranks together read in a validation. Its checksum must be the
 * same in every vocabulary. So it begins with the first input, which is the end-of-text token or
 * the text's first token. */
static g2z_status g2zr_measure(g2z_run *run) {
  g2z_loader_config config = run->val->config;
  const int32_t *x, *y;
  g2z_loader *loader;
  int64_t steps = run->val_steps * config.world;
  memset(&run->measure, 0, sizeof run->measure); /* after a damaged checkpoint it has old values */
  snprintf(run->measure.set, sizeof run->measure.set, "%016" PRIx64 "-%" PRId64 "-%d",
           run->val->data, run->val_tokens, config.seq);
  if (!run->tokenizer) return G2Z_OK;
  config.glob = run->config.val_glob;
  config.rank = 0;
  config.world = 1;
  G2Z_TRY(g2z_loader_create(run->services, &config, &loader));
  g2z_status status = G2Z_OK;
  if (steps > loader->steps_per_epoch) steps = loader->steps_per_epoch;
  for (int64_t step = 0; step < steps; step++) {
    status = g2z_loader_next(loader, &x, &y);
    if (status != G2Z_OK) break;
    if (step == 0) g2zr_measure_token(run, x[0], 0);
    for (int64_t i = 0; i < loader->rows * config.seq; i++) g2zr_measure_token(run, y[i], 1);
  }
  g2z_loader_free(loader);
  return status;
}

/* Closes everything that g2zr_load opened. */
static void g2zr_close(g2z_run *run) {
  g2z_trainer_free(run->trainer);
  g2z_loader_free(run->val);
  g2z_loader_free(run->train);
  for (int i = 0; i < G2Z_TEXTS; i++) g2z_eval_free(run->eval[i]);
  memset(run->eval, 0, sizeof run->eval);
  g2z_tokenizer_free(run->tokenizer);
  g2z_release(run->services, run->from.note);
  run->trainer = NULL;
  run->val = run->train = NULL;
  run->tokenizer = NULL;
  run->from.note = NULL;
}

/* Opens everything that depends on the checkpoint. *damaged 1: the checkpoint is damaged. noinline:
 * inlined into g2zr_open, its paths would use stack during all later calls, and a stack may have
 * only 128 KB. */
static __attribute__((noinline)) g2z_status g2zr_load(g2z_run *run, int *damaged) {
  g2z_ranks *ranks = run->context->ranks;
  const int first = run->context->rank == 0;
  *damaged = 0;
  /* Rank 0 decides on the run directory and the checkpoint for all ranks. */
  g2z_status status = G2Z_OK;
  memset(&run->found, 0, sizeof run->found);
  if (first) status = g2zr_choose(run);
  G2Z_TRY(g2z_ranks_agree(ranks, status));
  G2Z_TRY(g2z_ranks_broadcast(ranks, &run->found, sizeof run->found));
  run->resume = run->found.resume[0] ? run->found.resume : NULL;
  if (run->resume && run->config.train.init_from && first)
    G2ZR_SAY(run, "--init-from %s is not used: the weights come from the checkpoint",
             run->config.train.init_from);
  if (run->resume) run->config.train.init_from = NULL;
  G2Z_TRY(g2zr_agree(run, g2zr_open_alone(run)));
  status = g2zr_agree(run, g2zr_count_steps(run));
  *damaged = status == G2Z_FORMAT;
  G2Z_TRY(status);
  if (first) status = g2zr_check_directory(run);
  G2Z_TRY(g2zr_agree(run, status));
  if (run->val) {
    char text[32];
    snprintf(text, sizeof text, "hash %016" PRIx64, run->val->data);
    G2Z_TRY(g2z_ranks_same(ranks, "validation data", text));
    G2Z_TRY(g2zr_check_val(run));
    if (first && run->config.run_dir) status = g2zr_measure(run);
    G2Z_TRY(g2zr_agree(run, status));
  }
  G2Z_TRY(g2z_trainer_create(run->context, &run->config.train, &run->trainer));
  if (!run->resume) return G2Z_OK;
  double begin = g2z_seconds();
  status = g2z_trainer_load(run->trainer, run->resume);
  *damaged = status == G2Z_FORMAT;
  run->resume_s = g2z_seconds() - begin;
  return status;
}

/* ----- opening: files ----- */

/* Finds the absolute path, with links resolved, of a directory that may not exist yet. */
static g2z_status g2zr_full_path(g2z_services *services, const char *directory,
                                 char path[PATH_MAX]) {
  char found[PATH_MAX];
  if (!realpath(*directory == '/' ? "/" : ".", path))
    return g2z_fail_file(services, errno, "find the path of", directory);
  for (const char *name = directory; *(name += strspn(name, "/")); name += strcspn(name, "/")) {
    const size_t bytes = strcspn(name, "/"), length = path[1] ? strlen(path) : 0;
    if (length + bytes + 2 > PATH_MAX)
      return g2z_fail_file(services, ENAMETOOLONG, "find the path of", directory);
    snprintf(path + length, PATH_MAX - length, "/%.*s", (int)bytes, name);
    if (realpath(path, found)) memcpy(path, found, strlen(found) + 1);
    else if (strcmp(path + length, "/.") == 0) path[length] = 0; /* after a missing name */
    else if (strcmp(path + length, "/..") == 0) {
      path[length] = 0;
      *strrchr(path, '/') = 0;
    }
  }
  return G2Z_OK;
}

/* A model in save_weights is replaced only by the run that wrote it. A run recognises its own model
 * by its directory, or by the name in its checkpoint. */
static g2z_status g2zr_check_model(g2z_run *run, const char *full_path) {
  static const char *const names[] = {
      "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
      "pytorch_model.bin", "merges.txt", "vocab.json", "tokenizer.json", "tokenizer_config.json"};
  const char *weights = run->config.save_weights, *run_dir = run->config.run_dir;
  const size_t length = run_dir ? strlen(run_dir) : 0;
  int there;
  if (run->found.own && strcmp(full_path, run->weights_before) == 0) return G2Z_OK;
  if (run->found.continues && strncmp(weights, run_dir, length) == 0 && weights[length] == '/')
    return G2Z_OK;
  for (size_t i = 0; i < G2Z_COUNT(names); i++) {
    G2Z_TRY(g2zr_has(run->services, weights, names[i], &there));
    if (there)
      G2Z_REFUSE(run->services, "%.300s holds a model (%s) that this run did not write: name "
                 "another directory with --save-weights, or remove that model", weights, names[i]);
  }
  return G2Z_OK;
}

/* Refuses a save_weights if the weights would replace files of another kind there. `home`: run_dir
 * as a full path, or "". */
static g2z_status g2zr_check_weights(g2z_run *run, const char *home) {
  /* A run directory keeps some names, and all paths below them, for itself: docs/formats.md. */
  static const char *const kept[] = {
      "metrics.jsonl", "training_metrics.json", "train.log", "report.html", "best", "best.*",
      "sample.txt", "events.out.tfevents.*", "step-*", G2ZR_ORIGIN, "launcher_metadata.json",
      "tuning.txt", "profiles", "nccl_*", "topo.txt", "ibstat.txt", "RUN_FAILED.json",
      "flight_rank_*", "RUN_COMPLETE.txt"};
  const char *weights = run->config.save_weights;
  char path[PATH_MAX];
  int there;
  if (!weights) return G2Z_OK;
  G2Z_TRY(g2zr_has(run->services, weights, "trainer_state.json", &there));
  if (there)
    G2Z_REFUSE(run->services, "--save-weights %.400s is a checkpoint, whose weights belong to its "
               "other files: name another directory", weights);
  G2Z_TRY(g2zr_full_path(run->services, weights, path));
  G2Z_TRY(g2zr_check_model(run, path));
  for (char *name; strcmp(path, home) != 0 && (name = strrchr(path, '/')) != NULL;) {
    *name++ = 0; /* `path` is the directory above `name` */
    G2Z_TRY(g2zr_has(run->services, path, "metrics.jsonl", &there));
    const int is_run = there || (*home && strcmp(path, home) == 0);
    for (size_t i = 0; i < G2Z_COUNT(kept) && is_run; i++)
      if (fnmatch(kept[i], name, 0) == 0)
        G2Z_REFUSE(run->services, "--save-weights %.300s: a run directory keeps the name %.99s "
                   "for itself: name another directory, such as %.200s/weights", weights, name,
                   *home ? run->config.run_dir : ".");
  }
  return G2Z_OK;
}

/* Makes save_weights and locks it against other runs. Checks now, before hours of training, that
 * weights can be written there. */
static g2z_status g2zr_claim_weights(g2z_run *run, const char *home) {
  const char *weights = run->config.save_weights;
  g2z_writer *writer;
  if (!weights) return G2Z_OK;
  G2Z_TRY(g2z_make_directory(run->services, weights));
  G2Z_TRY(g2z_writer_create(run->services, g2z_path_in(weights, "model.safetensors").text,
                            &writer));
  g2z_writer_free(writer);
  if (!realpath(weights, run->weights))
    return g2z_fail_file(run->services, errno, "find the path of", weights);
  if (strcmp(home, run->weights) == 0) return G2Z_OK; /* run_dir gets its own lock */
  return g2z_lock_directory(run->services, weights, &run->weights_lock);
}

/* Opens the logs, cuts them to their lengths at the checkpoint, and writes the lines that wait. */
static g2z_status g2zr_open_logs(g2z_run *run) {
  g2zr_stream *const logs[] = {&run->metrics, &run->log};
  G2Z_TRY(g2zr_stream_open(run, &run->metrics, "metrics.jsonl", run->sum.metrics_bytes));
  G2Z_TRY(g2zr_stream_open(run, &run->log, "train.log", run->sum.log_bytes));
  for (size_t i = 0; i < G2Z_COUNT(logs); i++) { /* change neither unless both could be opened */
    G2Z_TRY(g2zr_stream_cut(run, logs[i]));
    G2Z_TRY(g2zr_stream_write(run, logs[i]));
  }
  char *rest, *line = strtok_r(run->early, "\n", &rest);
  for (; line; line = strtok_r(NULL, "\n", &rest)) g2zr_log(run, line);
  return G2Z_OK;
}

/* Rank 0: makes the directories, names the origin and opens the logs. Refuses bad names before it
 * writes anything. */
static g2z_status g2zr_open_files(g2z_run *run) {
  const char *run_dir = run->config.run_dir;
  char home[PATH_MAX] = "", path[PATH_MAX];
  int64_t linked;
  int other = 0;
  if (run->context->rank != 0) return G2Z_OK;
  if (run_dir) G2Z_TRY(g2zr_full_path(run->services, run_dir, home));
  G2Z_TRY(g2zr_check_weights(run, home));
  if (run->config.keep_best) G2Z_TRY(g2zr_linked(run, &linked, &other));
  if (other && access(g2zr_in(run, "best").text, F_OK) == 0) /* not a link to a missing file */
    G2Z_REFUSE(run->services, "%.400s/best is no link to a checkpoint of this run, but --keep-best "
               "makes one of this name: remove or rename it", run_dir);
  G2Z_TRY(g2zr_claim_weights(run, home));
  if (!run_dir) return G2Z_OK;
  G2Z_TRY(g2z_make_directory(run->services, run_dir));
  if (run->lock < 0) G2Z_TRY(g2z_lock_directory(run->services, run_dir, &run->lock));
  run->begins = !run->found.continues;
  if (run->resume && !run->found.own) {
    /* The run starts from another run's checkpoint. --resume latest uses that checkpoint until the
     * run has its own. The logs come later: with them alone, a killed run would start over. */
    if (!realpath(run->resume, path))
      return g2z_fail_file(run->services, errno, "find the path of", run->resume);
    G2Z_TRY(g2zr_write_text(run, G2ZR_ORIGIN, path));
  }
  return g2zr_open_logs(run);
}

/* Removes the files of a directory that have one of these names. */
static void g2zr_sweep(const char *path, const char *const *names, size_t count) {
  DIR *directory = opendir(path);
  for (struct dirent *entry; directory && (entry = readdir(directory)) != NULL;)
    for (size_t i = 0; i < count; i++)
      if (fnmatch(names[i], entry->d_name, 0) == 0)
        g2z_unlink(g2z_path_in(path, "%s", entry->d_name).text);
  if (directory) closedir(directory);
}

/* Fails before the training if a rank does not see rank 0's files: that rank could not save. The
 * test file gets a new name: another host may have files of the usual names, or cache them. A start
 * that was killed here has left its file; the next start removes it. */
static g2z_status g2zr_check_shared(g2z_run *run) {
  const struct {
    const char *flag, *path;
  } made[] = {{"run-dir", run->config.run_dir}, {"save-weights", run->config.save_weights}};
  static const char *const names = "shared-[0-9]*.partial";
  int64_t name = (int64_t)getpid() << 32 | (int64_t)time(NULL);
  int there, mine = run->context->rank == 0;
  G2Z_TRY(g2z_ranks_broadcast(run->context->ranks, &name, sizeof name));
  for (size_t i = 0; i < G2Z_COUNT(made); i++) {
    if (made[i].path && mine) g2zr_sweep(made[i].path, &names, 1);
    if (!made[i].path || run->context->world == 1) continue;
    const g2z_path path = g2z_path_in(made[i].path, "shared-%" PRId64 ".partial", name);
    g2z_status status = G2Z_OK;
    if (mine) {
      const int file = open(path.text, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
      if (file < 0) status = g2z_fail_file(run->services, errno, "create", path.text);
      else close(file);
    }
    G2Z_TRY(g2zr_agree(run, status));
    if (!mine) status = g2z_is_there(run->services, path.text, &there);
    if (!mine && status == G2Z_OK && !there)
      status = g2z_fail(run->services, G2Z_IO, "this rank does not see %s, which rank 0 made: "
                        "choose a --%s on a file system that all ranks share", path.text,
                        made[i].flag);
    status = g2zr_agree(run, status);
    if (mine) g2z_unlink(path.text);
    G2Z_TRY(status);
  }
  return G2Z_OK;
}

/* The part of the introduction that only a run with steps has. */
static void g2zr_introduce_steps(g2z_run *run) {
  const g2z_plan *plan = run->trainer->plan;
  const g2z_run_config *c = &run->config;
  const g2z_loader *loader = run->trainer->loader;
  if (loader->mixed)
    G2ZR_SAY(run, "training: %" PRId64 " step%s of a mixture", run->steps,
             G2Z_PLURAL(run->steps));
  else
    G2ZR_SAY(run, "training: %" PRId64 " step%s, %.2f epochs of %" PRId64 " step%s", run->steps,
             G2Z_PLURAL(run->steps), (double)run->steps / (double)run->steps_per_epoch,
             run->steps_per_epoch, G2Z_PLURAL(run->steps_per_epoch));
  for (int k = 0; k < loader->sets && loader->mixed; k++)
    G2ZR_SAY(run, "mixture: %.2f %% of the sequences from %s, which has %" PRId64 " tokens",
             100 * loader->set[k].share, loader->set[k].glob, loader->set[k].tokens);
  G2ZR_SAY(run, "step: batch %d x sequence %d x micro-steps %d x ranks %d = %" PRId64 " tokens",
           plan->batch, plan->seq, plan->accum, plan->world, loader->global * plan->seq);
  const g2z_optimizer_config *optimizer = &c->train.optimizer;
  char last[32] = "", rest[48] = "";
  if (optimizer->schedule != G2Z_SCHEDULE_CONSTANT)
    snprintf(last, sizeof last, " to %g", (double)optimizer->min_lr);
  if (optimizer->kind == G2Z_OPTIMIZER_MUON)
    snprintf(rest, sizeof rest, " for Muon, lr %g for AdamW", (double)optimizer->adam_lr);
  G2ZR_SAY(run, "schedule: %s, lr %g%s%s, %" PRId64 " step%s of warm-up",
           g2zr_schedules[optimizer->schedule], (double)optimizer->lr, last, rest,
           optimizer->warmup, G2Z_PLURAL(optimizer->warmup));
  if (optimizer->skip_spikes > 0)
    G2ZR_SAY(run, "spikes: skips steps whose gradient norm is %g deviations above its mean",
             (double)optimizer->skip_spikes);
  const int64_t every = c->val_every > 0 ? c->val_every : run->steps_per_epoch;
  if ((c->keep_best || c->patience > 0) && run->resumed < run->steps && every >= run->steps &&
      run->steps_per_epoch >= run->steps)
    g2z_log(run->services, G2Z_LOG_WARNING, "the only validation is after the last step, so "
            "--keep-best and --patience have nothing to compare: add --val-every %" PRId64,
            1 + run->steps / 10);
  if (optimizer->warmup > optimizer->steps)
    g2z_log(run->services, G2Z_LOG_WARNING, "the warm-up of %" PRId64 " steps is longer than the "
            "run of %" PRId64 ": the learning rate never reaches --lr %g; lower --warmup",
            optimizer->warmup, optimizer->steps, (double)optimizer->lr);
  else if (optimizer->warmup > run->steps) /* a warning: the run can be resumed */
    g2z_log(run->services, G2Z_LOG_WARNING, "--max-train-steps %" PRId64 " ends the run within "
            "the warm-up of %" PRId64 " steps, before the learning rate reaches --lr %g; for a "
            "whole training of this length: --steps %" PRId64, run->steps, optimizer->warmup,
            (double)optimizer->lr, run->steps);
}

/* Rank 0: prints what the run will do. */
static void g2zr_introduce(g2z_run *run) {
  const g2z_plan *plan = run->trainer->plan;
  const g2z_train_config *train = &run->config.train;
  const g2z_model_config *model = &plan->model;
  const char *from = train->init_from;
  G2ZR_SAY(run, "model: %d layer%s, %d head%s, %d channels, %.2f M parameters", model->layers,
           G2Z_PLURAL(model->layers), model->heads, G2Z_PLURAL(model->heads), model->channels,
           (double)plan->parameters * 1e-6);
  G2ZR_SAY(run, "text: vocabulary %d, context %d", model->vocab, model->context);
  if (from) G2ZR_SAY(run, "weights: from %s", from);
  G2ZR_SAY(run, "device: %s, %s, %.2f GiB in the plan", g2zr_devices[plan->device],
           g2z_dtype_text(plan->dtype), (double)plan->bytes_total / 1073741824.0);
  if (run->steps > 0) g2zr_introduce_steps(run);
  if (run->val)
    G2ZR_SAY(run, "validation: %" PRId64 " batch%s, %" PRId64 " token%s", run->val_steps,
             run->val_steps == 1 ? "" : "es", run->val_tokens, G2Z_PLURAL(run->val_tokens));
  const g2zr_low best = g2zr_best(run);
  if (run->val && run->low_count > 0 && !g2zr_same_tokens(run))
    g2z_log(run->services, G2Z_LOG_WARNING, "the validation tokens changed since the checkpoint, "
            "or --seq did: the lowest loss so far, %.4f of step %" PRId64 ", belongs to the old "
            "ones. A new comparison begins", best.loss, best.step);
  if (run->config.run_dir) G2ZR_SAY(run, "run directory: %s", run->config.run_dir);
  if (run->resume) {
    int64_t length;
    const char *flag = g2zr_length(run, &length);
    G2ZR_SAY(run, "resumed after step %" PRId64 ", from %s, in %.2f s%s", run->resumed, run->resume,
             run->resume_s, run->found.own && !run->from.note ? "; it has no note.json: times and "
             "mean losses begin here" : "");
    if (run->steps <= run->resumed)
      G2ZR_SAY(run, "no step is left: the run has %" PRId64 " step%s, and the checkpoint is of "
               "step %" PRId64 "; to continue, give more than %s %" PRId64, run->steps,
               G2Z_PLURAL(run->steps), run->resumed, flag, length);
  } else if (run->config.resume)
    G2ZR_SAY(run, "no checkpoint in %s: starts from the beginning", run->config.run_dir);
}

/* Rank 0, if the run continues: removes the files that say that it ended, unfinished checkpoints,
 * and old ones. Sets damaged checkpoints aside. */
static g2z_status g2zr_forget_end(g2z_run *run) {
  static const char *const ends[] = {"RUN_COMPLETE.txt", "training_metrics.json"};
  G2Z_TRY(g2zr_tell_failure(run, &run->held));
  if (run->context->rank != 0 || !run->found.continues) return G2Z_OK;
  /* If a process is killed while it saves or removes a checkpoint, "step-N.partial" is left. */
  for (int64_t step = INT64_MAX;
       g2zr_latest(run, ".partial", step, &step) == G2Z_OK && step >= 0;) {
    const g2z_path path = g2zr_checkpoint(run, step, ".partial");
    if (!g2z_checkpoint_remove(path.text)) g2zr_stays(run, path.text);
  }
  /* Damaged checkpoints get names that a resume does not look for. */
  for (int64_t step = INT64_MAX; run->damaged;) {
    G2Z_TRY(g2zr_latest(run, "", step, &step));
    if (step <= run->resumed) break;
    const g2z_path path = g2zr_checkpoint(run, step, ""),
                   aside = g2zr_checkpoint(run, step, ".damaged");
    if (g2z_rename(path.text, aside.text) != 0)
      return g2z_fail_file(run->services, errno, "set aside a damaged checkpoint as", aside.text);
  }
  for (size_t i = 0; i < G2Z_COUNT(ends); i++) {
    const g2z_path path = g2zr_in(run, ends[i]);
    if (g2z_unlink(path.text) != 0 && errno != ENOENT)
      return g2z_fail_file(run->services, errno, "remove", path.text);
  }
  g2zr_prune(run); /* a kill may have come between a save and its pruning */
  return G2Z_OK;
}

/* Rank 0: removes the link best if its target does not exist: the checkpoint was set aside as
 * damaged, or removed. */
static g2z_status g2zr_check_best(g2z_run *run) {
  const g2z_path best = g2zr_in(run, "best");
  char was[256] = "";
  int64_t linked;
  int other;
  G2Z_TRY(g2zr_linked(run, &linked, &other));
  if (linked < 0 && !(other && run->config.keep_best)) return G2Z_OK;
  if (access(best.text, F_OK) == 0 || errno != ENOENT) return G2Z_OK;
  if (readlink(best.text, was, sizeof was - 1) < 0 || g2z_unlink(best.text) != 0)
    return g2z_fail_file(run->services, errno, "remove the link", best.text);
  g2z_log(run->services, G2Z_LOG_WARNING, "%s is removed: it was a link to %s, which is not there",
          best.text, g2z_tame(was));
  return G2Z_OK;
}

/* Rank 0: removes the files that faults of earlier starts left, and writes
 * launcher_metadata.json. */
static g2z_status g2zr_write_launch(g2z_run *run) {
  static const char *const left[] = { /* files that a killed process leaves */
      "flight_rank_*.partial", "events.out.tfevents.*.partial", "RUN_FAILED.json*.partial",
      "best.partial", G2ZR_ORIGIN ".partial"};
  const char *run_dir = run->config.run_dir;
  if (run->context->rank != 0 || !run_dir) return G2Z_OK;
  G2Z_TRY(g2zr_check_best(run));
  g2z_unlink(g2zr_in(run, "RUN_FAILED.json").text);
  g2zr_sweep(run_dir, left, G2Z_COUNT(left));
  return g2z_json_write(run->services, g2zr_in(run, "launcher_metadata.json").text,
                        g2zr_put_launch, run);
}

/* Takes the metrics of the last step whose loss is known, which may be the checkpoint's step. */
static void g2zr_know(g2z_run *run, const g2z_report *report) {
  g2z_metrics *m = &run->known;
  m->step = report->loss_step;
  m->loss = (double)report->loss;
  m->lr = g2zr_decimal(report->lr);
  m->grad_norm = (double)report->grad_norm;
  m->loss_scale = (double)report->loss_scale;
  m->skipped = report->skipped;
  run->applied = report->applied;
}

/* The learning rates of this run: "--lr (0.004) and --adam-lr (0.0024)". */
static const char *g2zr_rates(const g2z_run *run, char text[80]) {
  const g2z_optimizer_config *optimizer = &run->config.train.optimizer;
  const int bytes = snprintf(text, 80, "--lr (%g)", (double)optimizer->lr);
  if (optimizer->kind == G2Z_OPTIMIZER_MUON)
    snprintf(text + bytes, 80 - (size_t)bytes, " and --adam-lr (%g)", (double)optimizer->adam_lr);
  return text;
}

/* Fails if no step was applied, or if the last loss is NaN. Judges the whole run, so a further
 * start without steps gets the same result. */
static g2z_status g2zr_judge(g2z_run *run) {
  const g2z_metrics *m = &run->known;
  const g2z_optimizer_config *optimizer = &run->config.train.optimizer;
  const int masked = m->grad_norm == 0 && isnan(m->loss);
  const char *remedy = "Lower --lr or --loss-scale, or resume an earlier checkpoint";
  char rates[80];
  if (run->sum.applied == 0 && run->sum.steps > 0 && masked)
    return g2z_fail(run->services, G2Z_BAD_ARGUMENT, "no step of %" PRId64 " was applied, since "
                    "masks exclude all tokens of the last one: the model has not changed. Train "
                    "for more --steps, or raise --batch", run->sum.steps);
  if (run->applied == 0) { /* until a step is applied, the learning rate has no effect */
    if (!(m->loss_scale > 1)) remedy = "Start from other weights, or give --dtype fp32";
    else if (optimizer->loss_scale_dynamic) remedy = "Give more --steps: each lowers the scale";
    else remedy = "Lower --loss-scale, or remove it";
  }
  if (run->sum.applied == 0 && run->sum.steps > 0)
    return g2z_fail(run->services, G2Z_DIVERGED, "no step of %" PRId64 " was applied, since no "
                    "gradients were finite at loss scale %g: the model has not changed. %s",
                    run->sum.steps, m->loss_scale, remedy);
  if (m->step > 0 && isnan(m->loss) && !masked)
    return g2z_fail(run->services, G2Z_DIVERGED, "the run diverged: the loss of step %" PRId64 ", "
                    "the last, is nan. Start again with a lower %s%s", m->step,
                    g2zr_rates(run, rates),
                    run->saved < 0 ? "" : ", or from an earlier checkpoint");
  return G2Z_OK;
}

/* ----- opening: the work that is due ----- */

/* The kinds of work that this run's settings ask for. A run that has a checkpoint saves at its
 * end, too. */
static int g2zr_possible(const g2z_run *run) {
  const g2z_run_config *c = &run->config;
  int work = G2ZR_DUE_STOP | G2ZR_DUE_EPOCH_END | G2ZR_DUE_FINISH;
  if (c->save_every || c->save_epochs || c->keep_best || run->saved >= 0) work |= G2ZR_DUE_SAVE;
  if (c->save_weights) work |= G2ZR_DUE_WEIGHTS;
  if (c->keep_best) work |= G2ZR_DUE_BEST;
  if (run->val) work |= G2ZR_DUE_VALIDATION;
  if (c->eval.count) work |= G2ZR_DUE_EVALUATION;
  if (c->sample_tokens) work |= G2ZR_DUE_SAMPLE;
  return work;
}

/* The trainer is at the checkpoint's step. Collects the work that is due there: what the saving run
 * left, and what this run's settings ask for. */
static void g2zr_begin_due(g2z_run *run) {
  const g2z_run_config *config = &run->config;
  const int own = run->found.own;
  const int end = G2ZR_DUE_EPOCH_END | G2ZR_DUE_FINISH;
  run->saved = own ? run->resumed : -1;
  run->step = run->resumed;
  if (own) {
    run->due = (int)run->sum.due | G2ZR_DUE_BEST; /* a killed run may not have made the link */
    run->epoch_ends |= (run->due & G2ZR_DUE_EPOCH_END) != 0;
    if (run->from.note && run->epoch[run->epoch_count - 1].steps == 0)
      run->epoch_ends = 0; /* the saving run had already begun the next epoch */
    if (run->sum.evaluated < config->eval.count) run->evaluated = (int)run->sum.evaluated;
  } else if (run->steps == 0) {
    run->due = G2ZR_DUE_VALIDATION | G2ZR_DUE_EVALUATION | G2ZR_DUE_SAMPLE | end;
  }
  if (run->resume && run->epoch_ends) { /* the saving run may have validated here already */
    const int knew = own && (run->due & G2ZR_DUE_EPOCH_END) && g2zr_same_tokens(run);
    if (!knew) run->due |= G2ZR_DUE_VALIDATION;
    if (!own && config->save_epochs) run->due |= G2ZR_DUE_SAVE;
    run->due |= G2ZR_DUE_EPOCH_END;
  }
  run->impatient = config->patience > 0 && run->sum.stale >= config->patience &&
                   g2zr_same_tokens(run);
  if (run->resume && (run->steps <= run->resumed || run->impatient)) {
    run->due |= end | G2ZR_DUE_WEIGHTS;
    if (!g2zr_same_tokens(run)) run->due |= G2ZR_DUE_VALIDATION; /* its tokens have changed */
  }
  run->due &= g2zr_possible(run);
}

/* Copies the place in the data, and the metrics of the last step, from the trainer. */
static g2z_status g2zr_begin_position(g2z_run *run) {
  const g2z_loader *loader = run->trainer->loader;
  g2z_report last;
  if (loader) run->epoch_step = loader->position.step;
  if (!run->resume) return G2Z_OK;
  run->epoch[run->epoch_count - 1].index = loader->position.epoch - run->epoch_ends;
  G2Z_TRY(g2z_trainer_flush(run->trainer, &last));
  g2zr_know(run, &last);
  run->known.tokens = run->from.tokens;
  return G2Z_OK;
}

/* Refuses settings that are not equal on all ranks. */
static g2z_status g2zr_compare_settings(g2z_run *run) {
  const g2z_run_config *config = &run->config;
  char text[1024];
  int used = snprintf(text, sizeof text, "temperature=%.9g\ntop_p=%.9g\ntarget_loss=%.9g\n",
                      (double)config->sampling.temperature, (double)config->sampling.top_p,
                      (double)config->target_loss);
#define X(name, value, most)                                                         \
  used += snprintf(text + used, sizeof text - (size_t)used, #name "=%" PRId64 "\n", \
                   (int64_t)(config->value));
  G2ZR_SETTING_LIST(X)
#undef X
  G2Z_TRY(g2z_ranks_same(run->context->ranks, "config", text));
  return g2z_ranks_same(run->context->ranks, "prompt", config->prompt ? config->prompt : "");
}

/* Opens the files last, so that an earlier failure leaves none. */
static g2z_status g2zr_open(g2z_run *run) {
  uname(&run->host);
  run->started_utc = g2z_utc_now();
  snprintf(run->id, sizeof run->id, "%s_%.64s_%ld", run->started_utc.text, run->host.nodename,
           (long)getpid());
  run->started = g2z_seconds();
  G2Z_TRY(g2zr_agree(run, g2zr_check(run)));
  G2Z_TRY(g2zr_compare_settings(run));
  const g2z_run_config config = run->config; /* a copy: g2zr_load changes run->config */
  /* With "latest", a damaged checkpoint is skipped, and the run opens again with an earlier one. A
   * checkpoint that cannot be read, or has another version, may be undamaged: that is an error. */
  g2z_status status;
  int damaged;
  while ((status = g2zr_load(run, &damaged)) != G2Z_OK) {
    if (!damaged || !run->found.own || strcmp(config.resume, "latest") != 0) return status;
    if (run->context->rank == 0)
      g2z_log(run->services, G2Z_LOG_WARNING, "%.200s is skipped: %.500s", run->resume,
              run->services->error);
    run->damaged++;
    g2zr_close(run);
    run->config = config;
  }
  if (config.profile) G2Z_TRY(g2zr_agree(run, g2z_device_time_spans(run->trainer->device)));
  g2zr_totals *sum = &run->sum;
  sum->best_loss = NAN;
  if (run->found.own && run->from.note) status = g2zr_restore(run);
  else status = g2zr_begin_epoch(run, 0);
  G2Z_TRY(g2zr_agree(run, status));
  /* Without --target-loss the run keeps the target of its earlier start. */
  if (config.target_loss > 0) sum->target_loss = (double)config.target_loss;
  g2zr_begin_due(run);
  G2Z_TRY(g2zr_begin_position(run));
  G2Z_TRY(g2zr_agree(run, g2zr_open_files(run)));
  G2Z_TRY(g2zr_check_shared(run));
  if (run->context->rank == 0) g2zr_introduce(run);
  status = g2zr_forget_end(run);
  if (status == G2Z_OK) status = g2zr_write_launch(run);
  return g2zr_agree(run, status);
}

G2Z_API g2z_status g2z_run_create(g2z_context *context, const g2z_run_config *config,
                                  g2z_run **out) {
  g2z_services *services = context->services;
  G2Z_TRY(G2Z_NEW(services, 1, out));
  g2z_run *run = *out;
  run->services = services;
  run->context = context;
  run->config = *config;
  run->lock = run->weights_lock = run->metrics.file = run->log.file = -1;
  run->before = INT64_MAX;
  if (config->early) snprintf(run->early, sizeof run->early, "%s", config->early);
  if (context->rank == 0) {
    services->also = g2zr_hear;
    services->listener = run;
  }
  g2z_status status = g2zr_open(run);
  if (status != G2Z_OK) { /* a directory with these files alone would look like a run */
    static const char *const first[] = {"metrics.jsonl", "train.log", G2ZR_ORIGIN};
    for (size_t i = 0; i < G2Z_COUNT(first) && run->begins; i++)
      g2z_unlink(g2zr_in(run, first[i]).text);
    g2z_run_free(run);
    *out = NULL;
  }
  return status;
}

static g2z_run *g2zr_running;         /* the run that signals stop; NULL: none */
static int g2zr_done;                 /* 1: the last run in g2zr_running is complete */
static double g2zr_asked_at;          /* g2z_seconds() of the first signal; 0: none yet */

/* From now on signals do not reach this run. */
static void g2zr_let_go(const g2z_run *run) {
  g2zr_done = run->finished && !(run->due & G2ZR_DUE_STOP);
  __atomic_store_n(&g2zr_running, NULL, __ATOMIC_RELAXED);
}

G2Z_API void g2z_run_free(g2z_run *run) {
  if (!run) return;
  if (run == g2zr_running) g2zr_let_go(run);
  if (run->services->listener == run) run->services->also = NULL;
  if (run->trainer) rmdir(run->weights); /* fails unless the directory is still empty */
  g2zr_close(run);
  g2zr_stream *const logs[] = {&run->metrics, &run->log};
  for (size_t i = 0; i < G2Z_COUNT(logs); i++) {
    if (logs[i]->file >= 0) close(logs[i]->file);
    g2z_release(run->services, logs[i]->late);
  }
  g2z_events_free(run->events);
  if (run->lock >= 0) close(run->lock);
  if (run->weights_lock >= 0) close(run->weights_lock);
  g2z_release(run->services, run->sample);
  g2z_release(run->services, run->step_s);
  g2z_release(run->services, run->epoch);
  g2z_release(run->services, run->low);
  g2z_release(run->services, run);
}

G2Z_API g2z_trainer *g2z_run_trainer(g2z_run *run) { return run->trainer; }

G2Z_API int g2z_run_loses_model(const g2z_run *run) {
  return run->resumed < run->steps && !(g2zr_possible(run) & (G2ZR_DUE_SAVE | G2ZR_DUE_WEIGHTS));
}

G2Z_API void g2z_run_request_stop(g2z_run *run, int signal) {
  __atomic_store_n(&run->stop_signal, (int64_t)signal, __ATOMIC_RELAXED);
  g2z_trainer_request_stop(run->trainer);
}

/* ----- the loop: steps ----- */

/* The status of a step or a flush. If a loss became known, the failure waits in run->ending until
 * that step has been reported. */
static g2z_status g2zr_after(g2z_run *run, g2z_status status, const g2z_report *report) {
  run->broken |= status != G2Z_OK && status != G2Z_STOPPED;
  if (status == G2Z_OK || report->loss_step <= run->known.step) return status;
  g2zr_note_failure(run, &run->ending, status);
  return G2Z_OK;
}

static int g2zr_is_every(int64_t steps, int64_t step) { return steps > 0 && step % steps == 0; }

/* The work that is due after the last step, except its validation. */
static int g2zr_last_work(const g2z_run *run) {
  int work = G2ZR_DUE_WEIGHTS | G2ZR_DUE_EVALUATION | G2ZR_DUE_SAMPLE | G2ZR_DUE_EPOCH_END |
             G2ZR_DUE_FINISH;
  if (run->saved != run->step) work |= G2ZR_DUE_SAVE;
  return work & g2zr_possible(run);
}

/* Enqueues a step; records its time and the work that is due after it. */
static g2z_status g2zr_train(g2z_run *run, g2z_report *report) {
  const g2z_run_config *config = &run->config;
  double begin = g2z_seconds();
  G2Z_TRY(g2z_trainer_step(run->trainer, report));
  int64_t step = ++run->step;
  run->step_s_of[step % 2] = g2z_seconds() - begin;
  run->epoch_step = (run->epoch_step + 1) % run->steps_per_epoch;
  run->epoch_ends = run->epoch_step == 0;
  const int last = step == run->steps, epoch_end = last || run->epoch_ends;
  if (epoch_end || g2zr_is_every(config->val_every, step)) run->due |= G2ZR_DUE_VALIDATION;
  if (g2zr_is_every(config->eval_every, step)) run->due |= G2ZR_DUE_EVALUATION;
  if (g2zr_is_every(config->sample_every, step)) run->due |= G2ZR_DUE_SAMPLE;
  if (epoch_end) run->due |= G2ZR_DUE_EPOCH_END;
  if (g2zr_is_every(config->save_every, step) || (config->save_epochs && epoch_end))
    run->due |= G2ZR_DUE_SAVE;
  run->due &= g2zr_possible(run);
  if (last) run->due |= g2zr_last_work(run);
  return G2Z_OK;
}

G2Z_API double g2z_flops_per_token(const g2z_plan *plan) {
  double C = plan->model.channels, L = plan->model.layers;
  return 6 * (12 * L * C * C + plan->model.vocab * C) + 6 * L * plan->seq * C;
}

/* FLOP/s of dense products in `dtype` with fp32 sums, from NVIDIA's data sheets (fp32: without
 * tensor cores). `name` is CUDA's full name of the GPU. It must match as a whole: variants of one
 * chip (SXM, PCIe, NVL) differ in clock and multiprocessors, and a part of a GPU (MIG, vGPU) is
 * slower. NaN: unknown. */
static double g2zr_peak_flops(const char *name, g2z_dtype dtype) {
  static const struct {
    const char *names;
    double half, tf32, single; /* TFLOP/s */
  } known[] = {
      {"|NVIDIA GB200", 2500, 1250, 80},
      {"|NVIDIA B200", 2250, 1125, 75},
      {"|NVIDIA GH200 480GB|NVIDIA GH200 120GB|NVIDIA GH200 144G HBM3e|NVIDIA H200"
       "|NVIDIA H100 80GB HBM3", 989.4, 494.7, 66.9},
      {"|NVIDIA H200 NVL|NVIDIA H100 NVL", 835.5, 417.7, 60},
      {"|NVIDIA H100 PCIe", 756.5, 378, 51.2},
      {"|NVIDIA A100-SXM4-40GB|NVIDIA A100-SXM4-80GB|NVIDIA A100-PCIE-40GB|NVIDIA A100 80GB PCIe",
       312, 156, 19.5},
      {"|NVIDIA A10G", 70, 35, 31.2},
      {"|NVIDIA L40S", 362, 183, 91.6},
      {"|NVIDIA L4", 121, 60, 30.3},
      {"|Tesla T4", 65, NAN, 8.1},
  };
  for (size_t i = 0; i < G2Z_COUNT(known); i++) {
    if (g2z_word_find(known[i].names, name, strlen(name)) < 0) continue;
    if (dtype == G2Z_FP32) return 1e12 * known[i].single;
    if (dtype == G2Z_TF32) return 1e12 * known[i].tf32;
    return 1e12 * known[i].half;
  }
  return NAN;
}

/* Fills the event of a step. */
static void g2zr_show_step(g2z_run *run, const g2z_report *report, g2z_run_event *event) {
  const g2z_metrics *m = &run->known;
  const double tokens = (double)(run->trainer->loader->global * run->trainer->plan->seq);
  const double smooth_s = run->sum.smooth_s / run->sum.smooth_weight;
  const double pause_s = run->sum.pause_s / (double)m->step; /* per step */
  event->kind = G2Z_RUN_STEP;
  event->tokens_per_second = tokens / smooth_s;
  event->eta_seconds = (double)(run->steps - m->step) * (smooth_s + pause_s);
  char scale[64] = "", skipped[64] = "";
  const char *separator = " | ";
  if (run->config.train.dtype == G2Z_FP16) {
    snprintf(scale, sizeof scale, " | scale %.0f", m->loss_scale);
    separator = ", ";
  }
  if (m->skipped == 2)
    snprintf(skipped, sizeof skipped, "%sspike %" PRId64 ", skipped", separator, report->spikes);
  else if (m->skipped && report->counted == 0)
    snprintf(skipped, sizeof skipped, "%sno token counts: skipped", separator);
  else if (m->skipped) snprintf(skipped, sizeof skipped, "%sskipped", separator);
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | loss %.4f | eta %s | %.0f tok/s | lr %.2e | norm "
            "%.3f%s%s", m->step, run->steps, m->loss, g2zr_duration(event->eta_seconds).text,
            event->tokens_per_second, m->lr, m->grad_norm, scale, skipped);
  g2zr_log(run, run->line);
}

/* Rank 0 warns once if numbers in an applied step were clamped to the range of 8 bits. */
static void g2zr_warn_clamped(g2z_run *run, const g2z_report *report) {
  char rates[80];
  const int clamps = report->clamped_inputs + report->clamped_weights > 0;
  if (!clamps || run->known.skipped || run->clamped || run->context->rank != 0) return;
  run->clamped = 1;
  g2z_log(run->services, G2Z_LOG_WARNING, "step %" PRId64 ": 8 bits clamp %" PRId64 " activation%s "
          "of 108 or more to 112, and %" PRId64 " weight%s of 13.5 or more to 14. The model may "
          "learn worse; this warning comes once. Start again with --fp8 none, or with a lower %s "
          "or a higher --weight-decay (%g)", run->known.step, report->clamped_inputs,
          G2Z_PLURAL(report->clamped_inputs), report->clamped_weights,
          G2Z_PLURAL(report->clamped_weights), g2zr_rates(run, rates),
          (double)run->config.train.optimizer.weight_decay);
}

/* A step's loss is known: updates the metrics and sums, and fills the event. */
static g2z_status g2zr_learn(g2z_run *run, const g2z_report *report, g2z_run_event *event) {
  g2zr_epoch *epoch = &run->epoch[run->epoch_count - 1];
  g2zr_totals *sum = &run->sum;
  g2z_metrics *m = &run->known;
  const g2z_plan *plan = run->trainer->plan;
  const double step_s = run->step_s_of[report->loss_step % 2];
  const int64_t tokens = run->trainer->loader->global * plan->seq;
  g2zr_know(run, report);
  m->tokens += tokens;
  m->step_ms = step_s * 1e3;
  m->tok_s = (double)tokens / step_s;
  m->mfu = g2z_flops_per_token(plan) * m->tok_s /
           (plan->world * g2zr_peak_flops(run->trainer->device->info.name, plan->dtype));
  m->exposed_comm_ms = report->exposed_comm_ms;
  m->data_ms = report->data_ms;
  m->mem_gib = (double)plan->bytes_total / 1073741824.0;
  epoch->steps++;
  G2Z_TRY(G2Z_GROW(run->services, &run->step_s, &run->step_s_capacity, run->timed, run->timed + 1));
  run->step_s[run->timed++] = step_s;
  epoch->skipped += m->skipped != 0;
  epoch->tokens += tokens;
  epoch->train_s += step_s;
  epoch->data_s += m->data_ms * 1e-3;
  if (!m->skipped) {
    epoch->loss_sum += m->loss * (double)report->counted;
    epoch->loss_targets += report->counted;
    sum->applied++;
  }
  if (report->counted > 0) { /* else masks exclude all tokens of the step */
    memmove(run->recent + 1, run->recent, sizeof run->recent - sizeof *run->recent);
    run->recent[0] = m->loss;
    if (g2zr_near_best(run, m->loss)) sum->rose = 0;
    else if (sum->rose == 0) sum->rose = m->step;
    if (sum->losses < G2ZR_RECENT) sum->losses++;
  }
  sum->steps++;
  sum->spikes += m->skipped == 2;
  sum->train_s += step_s;
  sum->train_tokens += tokens;
  sum->smooth_s = 0.95 * sum->smooth_s + 0.05 * step_s;
  sum->smooth_weight = 0.95 * sum->smooth_weight + 0.05;
  if (m->step == run->steps && sum->applied == 0) { /* ends the run after this step is reported */
    const g2z_status verdict = g2zr_judge(run);
    run->services->alike = 1; /* all ranks know the same steps */
    g2zr_note_failure(run, &run->ending, verdict);
  }
#define X(type, name, meaning) {#name, (double)m->name},
  const g2zr_number metrics[] = {G2Z_METRIC_LIST(X)}; /* the first two are step and tokens */
#undef X
  g2zr_put_line(run, metrics + 2, (int)G2Z_COUNT(metrics) - 2, "");
  g2zr_show_step(run, report, event);
  g2zr_warn_clamped(run, report);
  return G2Z_OK;
}

/* ----- the loop: work between steps ----- */

/* Writes a checkpoint of this step. If that fails, nothing is left. */
static g2z_status g2zr_save_state(g2z_run *run, const char *path) {
  G2Z_TRY(g2z_trainer_save_with(run->trainer, path, g2zr_put_note, g2zr_save_tokenizer, run));
  run->saved = run->step;
  return G2Z_OK;
}

/* Called before a checkpoint: decides whether the model is sound. It is sound if the last step was
 * applied, and if the mean of the recent losses is at most 10 % plus 0.1 nats above the lowest such
 * mean at an earlier checkpoint. */
static void g2zr_weigh(g2z_run *run) {
  const double loss = g2zr_recent_loss(run), best = run->sum.best_loss;
  const int skipped = run->known.skipped == 1 && /* a spike does not mean a worse model */
                      !(run->known.grad_norm == 0 && isnan(run->known.loss));
  const int sound = !skipped && g2zr_near_best(run, loss);
  char was[40];
  snprintf(was, sizeof was, "is back at %.4f", best);
  if (!(best <= loss) && !isnan(loss)) run->sum.best_loss = loss;
  if (!sound && run->sum.unsound == 0 && run->context->rank == 0 && run->config.keep > 0)
    g2z_log(run->services, G2Z_LOG_WARNING, "%s: --keep leaves the checkpoints before step %" PRId64
            " until the loss %s", skipped ? "steps are skipped" : "the loss rose", run->step,
            isnan(best) ? "falls" : was);
  if (sound) run->sum.unsound = 0;
  else if (run->sum.unsound == 0) run->sum.unsound = run->step;
}

/* Saves, then removes older checkpoints. */
static g2z_status g2zr_save(g2z_run *run, g2z_run_event *event) {
  const g2z_path saved = g2zr_checkpoint(run, run->step, "");
  double begin = g2z_seconds();
  g2zr_weigh(run);
  G2Z_TRY(g2zr_agree(run, g2zr_sync(run))); /* the note contains the lengths of the logs */
  G2Z_TRY(g2zr_save_state(run, saved.text));
  double seconds = g2z_seconds() - begin;
  event->kind = G2Z_RUN_SAVED;
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | checkpoint %.4096s | %.2f s", run->step,
            run->steps, saved.text, seconds);
  const g2zr_number spent = {"save_ms", seconds * 1e3};
  g2zr_put_line(run, &spent, 1, "");
  g2zr_log(run, run->line);
  g2zr_report(run, 0);
  g2zr_prune(run);
  return G2Z_OK;
}

/* Writes the tokenizer first, so that weights never stand without it. Makes the directory again:
 * another run may have removed it since the start. */
static g2z_status g2zr_save_weights(g2z_run *run, const char *directory) {
  g2z_status status = G2Z_OK;
  if (run->context->rank == 0) status = g2z_make_directory(run->services, directory);
  if (status == G2Z_OK) status = g2zr_save_tokenizer(run, directory);
  G2Z_TRY(g2zr_agree(run, status));
  return g2z_trainer_save_weights(run->trainer, directory);
}

/* Rank 0: makes best a link to the checkpoint of the lowest validation loss, if that checkpoint
 * exists. The link is relative, so that a run directory can be moved. Then removes the previous
 * best checkpoint. A file system without links gets no link, but keeps the checkpoint. noinline:
 * inlined into g2z_run_next, its paths would use stack during all other calls. */
static __attribute__((noinline)) void g2zr_link_best(g2z_run *run) {
  const g2z_path best = g2zr_in(run, "best"), partial = g2zr_in(run, "best.partial");
  int64_t linked;
  int there = 0, other;
  if (run->metrics.file < 0 || run->low_count == 0) return;
  const int64_t step = g2zr_best(run).step;
  g2z_status status = g2zr_linked(run, &linked, &other);
  if (status == G2Z_OK && linked == step) return;
  if (status == G2Z_OK)
    status = g2z_is_there(run->services, g2zr_checkpoint(run, step, "").text, &there);
  if (status == G2Z_OK && !there) return;
  if (other) status = g2z_fail(run->services, G2Z_IO, "%.1000s is no link to a checkpoint",
                               best.text);
  char name[64];
  snprintf(name, sizeof name, G2ZR_CHECKPOINT, step);
  g2z_unlink(partial.text); /* removes what a killed run left; a link of the user is not followed */
  if (status == G2Z_OK &&
      (symlink(name, partial.text) != 0 || g2z_rename(partial.text, best.text) != 0))
    status = g2z_fail_file(run->services, errno, "make the link", best.text);
  if (status != G2Z_OK && !run->unlinked)
    g2z_log(run->services, G2Z_LOG_WARNING, "%s. The best weights are in %s", run->services->error,
            g2zr_checkpoint(run, step, "").text);
  run->unlinked |= status != G2Z_OK;
  g2zr_prune(run);
}

/* Sets the percentiles and the wall time of the last epoch. A wall time from before a resume
 * stays. */
static void g2zr_settle_epoch(g2z_run *run) {
  g2zr_epoch *epoch = &run->epoch[run->epoch_count - 1];
  g2zr_percentiles(run, epoch);
  if (epoch->wall_s == 0) epoch->wall_s = g2z_seconds() - epoch->started;
}

/* Reports the stop, after the state was saved. Any rank may have received the signal. */
static g2z_status g2zr_stop(g2z_run *run) {
  char name[32], by[40] = "", text[G2ZR_COMMAND_BYTES];
  G2Z_TRY(g2zr_first(run, __atomic_load_n(&run->stop_signal, __ATOMIC_RELAXED),
                     &run->stop_signal));
  g2zr_settle_epoch(run);
  if (run->epoch[run->epoch_count - 1].steps == 0 && run->epoch_count > 1) run->epoch_count--;
  g2z_status status = G2Z_OK;
  if (run->log.file >= 0) status = g2zr_write_artifacts(run);
  G2Z_TRY(g2zr_agree(run, status));
  const char *signal = g2zr_signal_text(run->stop_signal, name);
  if (signal) snprintf(by, sizeof by, " by %s", signal);
  if (run->saved == run->step)
    g2zr_line(run, "stopped after step %" PRId64 " of %" PRId64 "%s, saved. To continue: %s",
              run->step, run->steps, by, g2zr_command(run, 0, "--resume", "latest", text));
  else
    g2zr_line(run, "stopped after step %" PRId64 " of %" PRId64 "%s, not saved, since there is no "
              "--run-dir", run->step, run->steps, by);
  return G2Z_OK;
}

/* Called when ranks have agreed to stop. Saves before other due work: the checkpoint records it. */
static void g2zr_will_stop(g2z_run *run) {
  run->due |= G2ZR_DUE_STOP;
  if (run->config.run_dir && run->saved != run->step) run->due |= G2ZR_DUE_SAVE;
}

/* Reports the progress of a validation, or of the scoring of a file. user: g2z_run *. */
static void g2zr_share(void *user, double share) {
  const g2z_run *run = (const g2z_run *)user;
  const g2z_run_config *config = &run->config;
  const char *name = "validation";
  if (run->context->rank != 0 || !config->progress) return;
  if (!(run->due & G2ZR_DUE_VALIDATION)) name = config->eval.text[run->evaluated];
  config->progress(config->progress_user, name, share);
}

static g2z_status g2zr_validate(g2z_run *run, g2z_run_event *event) {
  const g2z_run_config *config = &run->config;
  g2zr_totals *sum = &run->sum;
  g2z_loader_position first = {0, 0};
  double loss, begin = g2z_seconds();
  /* Memory may run out on one rank alone: the ranks agree before any of them changes a total. */
  G2Z_TRY(g2zr_agree(run, G2Z_GROW(run->services, &run->low, &run->low_capacity, run->low_count,
                                   run->low_count + 1)));
  G2Z_TRY(g2z_loader_seek(run->val, first));
  G2Z_TRY(g2z_trainer_validate(run->trainer, run->val, run->val_steps, g2zr_share, run, &loss));
  if (run->steps == 0 && !isfinite(loss)) /* with steps, the training loss shows it */
    return g2z_fail(run->services, G2Z_DIVERGED, "the validation loss is %s: numbers in the model "
                    "are too large for %s. Give --dtype fp32", isnan(loss) ? "nan" : "infinite",
                    g2z_dtype_text(run->config.train.dtype));
  double seconds = g2z_seconds() - begin;
  run->epoch[run->epoch_count - 1].val_loss = loss;
  if (!g2zr_same_tokens(run)) {
    run->low_count = 0;
    sum->stale = 0;
    sum->val_data = g2zr_val_data(run);
    sum->val_tokens = run->val_tokens;
  }
  const int better = isfinite(loss) && !(g2zr_best(run).loss <= loss); /* the first best is NaN */
  const int missed = g2zr_target(run).step < 0;
  sum->stale++;
  if (better) {
    const g2zr_low low = {run->step, run->known.tokens, g2zr_wall_s(run), loss};
    run->low[run->low_count++] = low;
    sum->stale = 0;
  }
  if (better && config->keep_best && run->steps > 0) {
    run->due |= G2ZR_DUE_BEST;
    if (run->saved != run->step) run->due |= G2ZR_DUE_SAVE;
  }
  const g2zr_low target = g2zr_target(run);
  const int reached = missed && target.step >= 0;
  event->kind = G2Z_RUN_VALIDATION;
  event->val_loss = loss;
  const double perplexity = exp(loss);
  char note[64] = "", shown[32];
  if (perplexity < 1000) snprintf(shown, sizeof shown, "%.2f", perplexity);
  else if (perplexity < 1e6) snprintf(shown, sizeof shown, "%.0f", perplexity);
  else snprintf(shown, sizeof shown, "%.3g", perplexity);
  if (reached) snprintf(note, sizeof note, " | reaches the target of %g", sum->target_loss);
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | val loss %.4f | perplexity %s%s", run->step,
            run->steps, loss, shown, note);
  const g2zr_number values[] = {{"val_loss", loss},
                                {"val_ms", seconds * 1e3},
                                {"val_bits_per_byte", g2zr_bits_per_byte(run, loss)},
                                {"target_seconds", target.wall_s}};
  int count = 3;
  char last[128];
  const int used = snprintf(last, sizeof last, ", \"val_set\": \"%s\"", run->measure.set);
  if (reached) {
    count++;
    snprintf(last + used, sizeof last - (size_t)used, ", \"target\": true");
  }
  g2zr_put_line(run, values, count, last);
  g2zr_log(run, run->line);
  if (config->patience > 0 && sum->stale >= config->patience &&
      !(run->due & G2ZR_DUE_FINISH)) {
    run->impatient = 1;
    run->due |= g2zr_last_work(run);
  }
  g2zr_report(run, 0);
  return G2Z_OK;
}

/* The last part of a path. */
static const char *g2zr_file_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

/* Scores the next file of --eval. */
static g2z_status g2zr_evaluate(g2z_run *run, g2z_run_event *event) {
  const int file = run->evaluated, files = run->config.eval.count;
  const char *path = run->config.eval.text[file];
  const char *name = g2zr_file_name(path); /* at most NAME_MAX bytes, since it was opened */
  int alike = 0; /* number of files with this name; if above 1, the path names the curve */
  for (int i = 0; i < files; i++)
    alike += strcmp(g2zr_file_name(run->config.eval.text[i]), name) == 0;
  if (alike > 1) {
    name = path;
    if (strlen(path) > NAME_MAX) name += strlen(path) - NAME_MAX;
  }
  char text[200], word[G2Z_JSON_WORD(NAME_MAX)], member[sizeof word + 32];
  double begin = g2z_seconds();
  g2z_eval eval;
  G2Z_TRY(g2z_eval_run(run->eval[file], &run->trainer->model, g2zr_share, run, &eval));
  double seconds = g2z_seconds() - begin;
  run->evaluated = (file + 1) % files;
  event->kind = G2Z_RUN_EVALUATION;
  g2z_eval_text(&eval, text);
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | %s | %s | %.2f s", run->step, run->steps, path,
            text, seconds);
  const g2zr_number values[] = {{"eval", (double)file},
                                {"eval_loss", eval.loss},
                                {"eval_acc_norm", eval.questions ? eval.acc_norm : NAN},
                                {"eval_ms", seconds * 1e3}};
  snprintf(member, sizeof member, ", \"eval_file\": %s", g2z_json_word(name, word));
  g2zr_put_line(run, values, 4, member);
  g2zr_log(run, run->line);
  return G2Z_OK;
}

/* Appends text to the sample; 0 bytes mean the end-of-text token. If memory runs out, generation
 * continues: otherwise other ranks would wait for this one. user: g2z_run *. */
static int g2zr_put_sample(void *user, const char *text, size_t bytes) {
  g2z_run *run = (g2z_run *)user;
  if (!bytes) return g2zr_put_sample(run, "<|endoftext|>", strlen("<|endoftext|>"));
  g2z_status status = G2Z_GROW(run->services, &run->sample, &run->sample_capacity,
                               run->sample_bytes, run->sample_bytes + bytes + 1);
  if (status != G2Z_OK) {
    g2zr_note_failure(run, &run->ending, status);
    return 0;
  }
  memcpy(run->sample + run->sample_bytes, text, bytes);
  run->sample_bytes += bytes;
  run->sample[run->sample_bytes] = 0;
  return 0;
}

static g2z_status g2zr_write_sample(g2z_run *run, g2z_run_event *event) {
  const g2z_run_config *config = &run->config;
  const char *prompt = config->prompt && *config->prompt ? config->prompt : "<|endoftext|>";
  const double begin = g2z_seconds();
  char heading[64];
  int length = snprintf(heading, sizeof heading, "sample after step %" PRId64 ":\n", run->step);
  run->sample_bytes = 0;
  g2zr_put_sample(run, heading, (size_t)length);
  g2z_status status = g2z_write_text(&run->trainer->model, run->tokenizer, prompt,
                                     config->sample_tokens, &config->sampling, g2zr_put_sample,
                                     run);
  if (status != G2Z_OK && status != G2Z_DIVERGED) return status; /* the others may still generate */
  if (status == G2Z_OK) status = g2zr_tell_failure(run, &run->ending);
  if (status == G2Z_OK && run->log.file >= 0)
    status = g2zr_write_text(run, "sample.txt", run->sample);
  if (status == G2Z_DIVERGED && run->sum.applied > 0) { /* if the loss is NaN, that is the cause */
    const g2z_status verdict = g2zr_judge(run);
    if (verdict != G2Z_OK) status = verdict;
  }
  G2Z_TRY(g2zr_agree(run, status));
  event->kind = G2Z_RUN_SAMPLE;
  event->sample = run->sample + length;
  const g2zr_number spent = {"sample_ms", (g2z_seconds() - begin) * 1e3};
  g2zr_put_line(run, &spent, 1, "");
  g2zr_log(run, run->sample);
  return G2Z_OK;
}

/* ----- the end of a run ----- */

static void g2zr_say_result(g2z_run *run) {
  const g2z_metrics *m = &run->known;
  const double best_loss = g2zr_best(run).loss;
  const int64_t skips = run->sum.steps - run->sum.applied;
  char loss[48] = "", best[64] = "", skipped[64] = "", rates[80];
  if (m->step > 0 && !isnan(m->loss)) snprintf(loss, sizeof loss, "loss %.4f, ", m->loss);
  if (!isnan(best_loss)) snprintf(best, sizeof best, "best validation loss %.4f, ", best_loss);
  if (run->config.train.optimizer.skip_spikes > 0)
    snprintf(skipped, sizeof skipped, " (%" PRId64 " skipped, %" PRId64 " as spikes)", skips,
             run->sum.spikes);
  else if (skips > 0) snprintf(skipped, sizeof skipped, " (%" PRId64 " skipped)", skips);
  G2ZR_SAY(run, "done: %s%s%" PRId64 " step%s%s, %" PRId64 " tokens, %s", loss, best, m->step,
           G2Z_PLURAL(m->step), skipped, m->tokens, g2zr_duration(g2zr_wall_s(run)).text);
  if (g2zr_diverged(run))
    g2z_log(run->services, G2Z_LOG_WARNING, "the run diverged: the loss of the last steps, %.4g, "
            "is worse than guessing, which has %.4g: it needs a lower %s", g2zr_recent_loss(run),
            log(run->config.train.model.vocab), g2zr_rates(run, rates));
}

static void g2zr_say_patience(g2z_run *run) {
  const g2zr_low low = g2zr_best(run);
  if (low.step < 0)
    G2ZR_SAY(run, "ended early by --patience %" PRId64 ": each validation loss was nan",
             run->config.patience);
  else
    G2ZR_SAY(run, "ended early by --patience %" PRId64 ": no validation loss below %.4f since step "
             "%" PRId64, run->config.patience, low.loss, low.step);
}

static void g2zr_say_target(g2z_run *run) {
  const double target = g2zr_decimal((float)run->sum.target_loss);
  const g2zr_low reached = g2zr_target(run);
  if (reached.step >= 0)
    G2ZR_SAY(run, "target loss %g: reached at step %" PRId64 ", after %" PRId64 " tokens, %s",
             target, reached.step, reached.tokens, g2zr_duration(reached.wall_s).text);
  else if (target > 0) G2ZR_SAY(run, "target loss %g: not reached", target);
}

/* Prints where the weights of the lowest validation loss are. Returns their path if they are better
 * than the last step's, or "". */
static g2z_path g2zr_say_best(g2z_run *run) {
  const g2zr_low low = g2zr_best(run);
  g2z_path better = {""};
  int64_t linked;
  int other;
  if (!run->config.run_dir || low.step < 0) return better;
  if (g2zr_linked(run, &linked, &other) != G2Z_OK) linked = -1;
  if (run->config.keep_best) {
    g2z_path named = g2zr_checkpoint(run, low.step, "");
    if (linked == low.step) named = g2zr_in(run, "best");
    if (access(named.text, F_OK) == 0) {
      G2ZR_SAY(run, "best weights: %s, of step %" PRId64 ", validation loss %.4f", named.text,
               low.step, low.loss);
      if (low.step < run->step) better = named;
    } else {
      G2ZR_SAY(run, "best weights: not kept; the lowest loss is of step %" PRId64, low.step);
    }
  }
  const char *why = "follows it only with --keep-best";
  if (run->config.keep_best) why = "could not be moved";
  if (linked >= 0 && linked != low.step)
    G2ZR_SAY(run, "%s names step %" PRId64 ", but the lowest validation loss, %.4f, is of step %"
             PRId64 ". The link %s", g2zr_in(run, "best").text, linked, low.loss, low.step, why);
  return better;
}

/* Prints the command that generates text. */
static void g2zr_say_use(g2z_run *run, const char *weights) {
  const char *command = run->config.command_line ? run->config.command_line : "./train";
  const char *flags = strstr(command, " --");
  const size_t program = flags ? (size_t)(flags - command) : strlen(command);
  char word[300];
  G2ZR_SAY(run, "To generate text: %.*s --init-from %s --prompt 'The'%s", (int)program, command,
           g2z_shell_word(weights, word, sizeof word), run->tokenizer ? "" : " --vocab FILE");
}

/* Prints the command that trains further: with twice the length or patience, or from the
 * weights. */
static void g2zr_say_further(g2z_run *run) {
  const char *weights = run->config.save_weights;
  char more[64], twice[24], text[G2ZR_COMMAND_BYTES];
  int64_t length;
  const char *flag = g2zr_length(run, &length);
  if (run->impatient) {
    flag = "--patience";
    length = run->config.patience;
  }
  snprintf(more, sizeof more, "--resume latest %s", flag);
  snprintf(twice, sizeof twice, "%" PRId64, 2 * length);
  if (run->saved == run->step)
    G2ZR_SAY(run, "To continue training: %s", g2zr_command(run, 0, more, twice, text));
  else if (weights && run->config.run_dir)
    G2ZR_SAY(run, "To train these weights further: %s",
             g2zr_command(run, 1, "--init-from", weights, text));
}

/* Prints what to do after a divergence: the same with half of the rate, from the best checkpoint,
 * else from the newest one before the loss rose, else from where the run began. If no step was ever
 * applied, the rate is not the cause: the failure's sentence has the remedy. */
static void g2zr_say_diverged(g2z_run *run) {
  const g2z_run_config *config = &run->config;
  const g2z_optimizer_config *optimizer = &config->train.optimizer;
  char word[420], flags[600], rate[40], text[G2ZR_COMMAND_BYTES];
  const g2zr_low low = g2zr_best(run);
  g2z_path sound = {""};
  int64_t step = -1, before = run->sum.unsound;
  if (run->context->rank != 0 || !config->run_dir || run->applied == 0) return;
  /* The high loss of step `rose` is that of the weights after the step before. */
  if (run->sum.rose > 0 && (before == 0 || before > run->sum.rose - 1)) before = run->sum.rose - 1;
  if (config->keep_best && low.step >= 0 && g2zr_plausible(run, low.loss))
    g2zr_latest(run, "", low.step + 1, &step);
  else if (before > 0 && g2zr_plausible(run, run->sum.best_loss))
    g2zr_latest(run, "", before, &step);
  if (step >= 0) sound = g2zr_checkpoint(run, step, "");
  else if (run->resume && !run->found.own) /* another run's */
    snprintf(sound.text, sizeof sound.text, "%s", run->resume);
  flags[0] = 0;
  if (sound.text[0])
    snprintf(flags, sizeof flags, "--resume %s ", g2z_shell_word(sound.text, word, sizeof word));
  if (optimizer->kind == G2Z_OPTIMIZER_MUON)
    snprintf(flags + strlen(flags), 60, "--adam-lr %.9g ", g2zr_decimal(optimizer->adam_lr / 2));
  if (optimizer->min_lr > optimizer->lr / 2) /* it would be refused above the peak */
    snprintf(flags + strlen(flags), 60, "--min-lr %.9g ", g2zr_decimal(optimizer->min_lr / 2));
  strcat(flags, "--lr");
  snprintf(rate, sizeof rate, "%.9g", g2zr_decimal(optimizer->lr / 2));
  G2ZR_SAY(run, "%s with half of the rate: %s",
           sound.text[0] ? "To go back to before the divergence," : "To start again",
           g2zr_command(run, 1, flags, rate, text));
}

/* Writes training_metrics.json, then RUN_COMPLETE.txt. That file names the weights, or else the
 * last step's checkpoint. */
static g2z_status g2zr_complete(g2z_run *run) {
  const g2z_path checkpoint = g2zr_checkpoint(run, run->saved, "");
  const char *model = "none";
  if (run->saved == run->step) model = checkpoint.text;
  if (run->config.save_weights) model = run->config.save_weights;
  run->ended = g2z_seconds();
  g2zr_line(run, "[Rank 0] RUN_COMPLETE checkpoint_path=%.4096s world_size=%d tokens_per_sec=%.2f "
            "total_wall_time_sec=%.3f timestamp_utc=%s", model, run->context->world,
            g2zr_tokens_per_s(run), g2zr_wall_s(run), g2z_utc_now().text);
  if (run->log.file < 0) return G2Z_OK;
  g2zr_log(run, run->line);
  G2Z_TRY(g2zr_write_artifacts(run));
  G2Z_TRY(g2zr_sync(run));
  G2Z_TRY(g2zr_tell_failure(run, &run->held)); /* includes a failure of g2zr_log above */
  g2z_status status = g2zr_write_text(run, "RUN_COMPLETE.txt", run->line);
  if (status != G2Z_OK) g2z_unlink(g2zr_in(run, "RUN_COMPLETE.txt").text); /* from an earlier end */
  return status;
}

/* The last work of a run. The checkpoint and the weights are already saved. */
static g2z_status g2zr_finish(g2z_run *run) {
  const char *weights = run->config.save_weights;
  G2Z_TRY(g2zr_judge(run));
  if (run->steps > 0 && run->context->rank == 0) {
    g2zr_say_result(run);
    if (run->impatient) g2zr_say_patience(run);
    g2zr_say_target(run);
    if (run->config.run_dir) G2ZR_SAY(run, "curves: %s/report.html", run->config.run_dir);
    const g2z_path better = g2zr_say_best(run);
    if (weights) G2ZR_SAY(run, "weights: %s", weights);
    if (g2zr_diverged(run)) {
      g2zr_say_diverged(run);
    } else {
      if (better.text[0]) g2zr_say_use(run, better.text);
      else if (weights) g2zr_say_use(run, weights);
      g2zr_say_further(run);
    }
  }
  return g2zr_complete(run);
}

/* ----- the order of the work ----- */

/* Does the first work that is due. *shown 1: the event is filled. STOP and FINISH stay due, so that
 * the next call returns the same end again. */
static g2z_status g2zr_due(g2z_run *run, g2z_run_event *event, int *shown) {
  const int now = run->due & -run->due; /* the lowest bit is the first work */
  const double begin = g2z_seconds();
  *shown = !(now & (G2ZR_DUE_EPOCH_END | G2ZR_DUE_WEIGHTS | G2ZR_DUE_BEST));
  event->line = run->line;
  switch (now) {
    case G2ZR_DUE_VALIDATION:
      G2Z_TRY(g2zr_validate(run, event));
      break;
    case G2ZR_DUE_EVALUATION:
      G2Z_TRY(g2zr_evaluate(run, event));
      break;
    case G2ZR_DUE_SAMPLE:
      G2Z_TRY(g2zr_write_sample(run, event));
      event->line = run->sample;
      break;
    case G2ZR_DUE_EPOCH_END: { /* the next epoch begins unless the run ends */
      const g2zr_epoch *epoch = &run->epoch[run->epoch_count - 1];
      g2zr_settle_epoch(run);
      const g2zr_number ended[] = {{"epoch", (double)epoch->index},
                                   {"epoch_ms", epoch->wall_s * 1e3}};
      if (run->epoch_ends) /* if --max-train-steps cuts an epoch, a longer run may continue it */
        g2zr_put_line(run, ended, 2, "");
      if (!(run->due & G2ZR_DUE_FINISH)) G2Z_TRY(g2zr_begin_epoch(run, epoch->index + 1));
      break;
    }
    case G2ZR_DUE_SAVE:
      G2Z_TRY(g2zr_save(run, event));
      break;
    case G2ZR_DUE_WEIGHTS:
      G2Z_TRY(g2zr_save_weights(run, run->config.save_weights));
      break;
    case G2ZR_DUE_BEST:
      g2zr_link_best(run);
      break;
    case G2ZR_DUE_STOP:
      if (!run->finished) G2Z_TRY(g2zr_stop(run));
      run->finished = 1;
      return g2z_fail(run->services, G2Z_STOPPED, "%s", run->line);
    case G2ZR_DUE_FINISH:
      if (!run->finished) G2Z_TRY(g2zr_agree(run, g2zr_finish(run)));
      run->finished = 1;
      event->kind = G2Z_RUN_DONE;
      return G2Z_OK;
  }
  if (*shown) run->sum.pause_s += g2z_seconds() - begin;
  if (now != G2ZR_DUE_EVALUATION || !run->evaluated) run->due &= ~now; /* more files may follow */
  return G2Z_OK;
}

static g2z_status g2zr_advance(g2z_run *run, g2z_run_event *event) {
  for (int shown = 0; !shown;) {
    g2z_report report;
    memset(&report, 0, sizeof report);
    G2Z_TRY(g2zr_tell_failure(run, &run->ending));
    if (run->context->world == 1) G2Z_TRY(g2zr_tell_failure(run, &run->held));
    if (!run->due) {
      const g2z_status status = g2zr_after(run, g2zr_train(run, &report), &report);
      if (status == G2Z_STOPPED) {
        g2zr_will_stop(run);
        continue;
      }
      G2Z_TRY(status);
      if (report.loss_step <= run->known.step) continue; /* due work waits for this step's loss */
    } else if (run->known.step < run->step) {
      G2Z_TRY(g2zr_after(run, g2z_trainer_flush(run->trainer, &report), &report));
    }
    if (report.loss_step > run->known.step) {
      event->line = run->line;
      G2Z_TRY(g2zr_learn(run, &report, event));
      shown = 1;
    } else if (run->due) {
      g2z_status status = g2zr_due(run, event, &shown);
      if (status != G2Z_STOPPED || run->due & G2ZR_DUE_STOP) G2Z_TRY(status);
      else {
        g2zr_will_stop(run);
        shown = 0;
      }
    }
  }
  event->metrics = run->known;
  event->steps = run->steps;
  return G2Z_OK;
}

/* If a file failed, but no step, a run of one rank saves before it ends. Several ranks do not: the
 * others may not know of the failure yet. */
static void g2zr_rescue(g2z_run *run, g2z_run_event *event) {
  const g2z_path path = g2zr_checkpoint(run, run->step, "");
  const char *run_dir = run->config.run_dir;
  g2z_report report;
  int there;
  if (!run_dir || run->context->world > 1 || run->broken) return;
  if (run->step == run->resumed || run->step == run->saved) return; /* no new step to save */
  if (g2z_is_there(run->services, run_dir, &there) != G2Z_OK || !there) return;
  if (g2z_trainer_flush(run->trainer, &report) != G2Z_OK) return;
  if (run->known.step < run->step && g2zr_learn(run, &report, event) != G2Z_OK) return;
  g2zr_sync(run); /* if this fails, too, lines are lost only in a power failure */
  if (run->due & G2ZR_DUE_SAVE) g2zr_weigh(run);
  if (g2zr_save_state(run, path.text) == G2Z_OK)
    g2z_log(run->services, G2Z_LOG_WARNING, "the run fails; it has saved %s", path.text);
}

G2Z_API g2z_status g2z_run_next(g2z_run *run, g2z_run_event *event) {
  char last[G2Z_ERROR_BYTES + 16];
  const char *word = "failed: ";     /* the page reads it */
  memset(event, 0, sizeof *event);
  g2z_status status = g2zr_advance(run, event);
  if (status == G2Z_OK) return G2Z_OK;
  g2zr_failure failure = {G2Z_OK, 0, ""}; /* a copy: the next calls may overwrite the sentence */
  g2zr_note_failure(run, &failure, status);
  if (status == G2Z_IO || status == G2Z_FORMAT) g2zr_rescue(run, event);
  if (status == G2Z_STOPPED) word = "";
  if (status == G2Z_DIVERGED) {
    word = "diverged: ";
    g2zr_say_diverged(run);
  }
  snprintf(last, sizeof last, "%s%s", word, failure.sentence);
  g2zr_log(run, last);
  if (run->metrics.file >= 0 && status != G2Z_STOPPED)
    g2z_report_run(run->services, run->config.run_dir);
  return g2zr_tell_failure(run, &failure);
}

/* ----- signals ----- */

static void g2zr_on_signal(int number) {
  const double now = g2z_seconds();
  g2z_run *run = __atomic_load_n(&g2zr_running, __ATOMIC_RELAXED);
  if (g2zr_asked_at > 0 && now - g2zr_asked_at < 0.5) return;
  if (g2zr_asked_at > 0 || !(run || g2zr_done)) _exit(128 + number);
  g2zr_asked_at = now;
  if (run) g2z_run_request_stop(run, number);
}

/* SIGHUP arrives when a terminal closes. A program under nohup ignores it, and continues to. */
G2Z_API void g2z_run_catch_signals(g2z_run *run) {
  struct sigaction action, before;
  if (!run && g2zr_running) g2zr_let_go(g2zr_running);
  if (run) { /* signals to an earlier run do not count */
    g2zr_done = 0;
    g2zr_asked_at = 0;
    __atomic_store_n(&g2zr_running, run, __ATOMIC_RELAXED);
  }
  memset(&action, 0, sizeof action);
  action.sa_handler = g2zr_on_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < G2Z_COUNT(g2zr_signals); i++) {
    const int number = g2zr_signals[i].number, known = sigaction(number, NULL, &before) == 0;
    if (number == SIGHUP && known && before.sa_handler == SIG_IGN) continue;
    sigaction(number, &action, NULL);
  }
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_RUN_IMPLEMENTED */
