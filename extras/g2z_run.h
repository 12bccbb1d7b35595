/* g2z_run.h: a whole training around gpt2_zero.h, from a command line to a directory that holds all
 * that it leaves: metrics, checkpoints, samples, weights. MIT licence.
 *
 * QUICK START
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_run.h"                                       // this order
 *     static g2z_services services;                               // malloc, no log
 *     g2z_context *context = NULL;  g2z_run *run = NULL;  g2z_run_event event;
 *     g2z_context_config cc = g2z_context_config_default(&services);
 *     g2z_run_config config = g2z_run_config_default();           // GPT-2 124M
 *     config.train.train_glob = "data/text_train_*.bin";  config.run_dir = "runs/first";
 *     g2z_status status = g2z_context_create(&cc, &context);
 *     if (status == G2Z_OK) status = g2z_run_create(context, &config, &run);
 *     while (status == G2Z_OK && (status = g2z_run_next(run, &event)) == G2Z_OK) {
 *       puts(event.line);
 *       if (event.kind == G2Z_RUN_DONE) break;
 *     }
 *     if (status != G2Z_OK) puts(services.error);
 *     g2z_run_free(run);  g2z_context_free(context);
 * train.cu is the same with a command line, signals, and ranks that it starts itself.
 *
 * It uses gpt2_zero.h, g2z_program.h, g2z_text.h, g2z_eval.h and g2z_report.h through their public
 * functions alone, and takes the library's build switches (GPT2_ZERO_IMPLEMENTATION, G2Z_STATIC,
 * G2Z_API) and its contract for errors: a status, and a sentence in services->error. It
 * prints nothing. It ends a process in one place: g2z_run_catch_signals, at a second signal. Names
 * that begin with g2zr_ or G2ZR_ are private.
 *
 * CONTENTS: run; command line
 *
 * RUN DIRECTORY, written by g2z_run_*; docs/formats.md lists all members
 *     metrics.jsonl           a line per step, as it happens, and one per validation, scored file,
 *                             sample, save and epoch. If the run began with another run's
 *                             checkpoint, its first line has resumed_from
 *     step-NNNNNN             checkpoints
 *     train.log               what the console showed
 *     training_metrics.json   schema 2.0: the run, its machine, its config, its epochs
 *     sample.txt              the last sample
 *     report.html             a page: how the run ended, curves, epochs; also during the run
 *     events.out.tfevents.*   the same scalars for TensorBoard, a file for each start
 *     profiles/               with train --profile: timers_HOST.txt, profile_summary.json; of nsys
 *                             nsys_JOB_HOST.nsys-rep, .sqlite and nsys_stats_HOST.txt
 *     launcher_metadata.json  who started it, where, with which variables (train)
 *     RUN_FAILED.json         which rank died or hung, on which host, in which phase; and for each
 *     flight_rank_N.jsonl     rank that was left the last 1,024 collectives (train)
 *     nccl_*, topo.txt, ibstat.txt   with train --nccl-logs
 *     tuning.txt              on a GPU: the algorithms that were chosen, for --tuning
 *     RUN_COMPLETE.txt        written last: a run without it did not end. A stopped run has a
 *                             checkpoint and training_metrics.json, with the reason in "shutdown"
 *     A checkpoint, and the weights after the last step, come before validation, evaluation and
 *     sample of that step. The checkpoint's note.json holds the sums and epochs so far, the lengths
 *     of metrics.jsonl and train.log, and what was still due: a resumed run cuts the logs there and
 *     does that work first. If metrics.jsonl has changed since, it is cut after the checkpoint's
 *     step; a damaged line before that is an error, a torn last line is not. --resume latest
 *     renames a damaged checkpoint to step-NNNNNN.damaged and takes an earlier one. */

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

typedef struct g2z_run_config {
  g2z_train_config train;      /* train_glob NULL: no steps, only validation and a sample.
                                * optimizer.warmup < 0: a tenth of the steps, at most 1000;
                                * optimizer.min_lr < 0: a tenth of lr */
  const char *val_glob;        /* NULL: no validation */
  const char *vocab;           /* tokenizer file for samples; NULL: byte-level if vocab is 257 */
  const char *prompt;          /* NULL or "": the end-of-text token */
  const char *run_dir;         /* NULL: no artifacts. One that holds a run is refused, unless that
                                * run is resumed */
  const char *resume;          /* NULL: a new run. "latest": run_dir's run continues after its last
                                * whole checkpoint. Without one it begins again, unless it has ended
                                * or left weights. Else a checkpoint: of run_dir, whose run
                                * continues, or of another run, with which a new one begins */
  int64_t save_every;          /* steps; > 0: checkpoints run_dir/step-NNNNNN, at the end as well */
  int save_epochs;             /* 1: at the end of each epoch */
  int keep;                    /* how many of the last checkpoints stay; 0: all. Earlier ones stay
                                * while the loss has risen or steps are skipped; a checkpoint with
                                * foreign files in it stays as step-NNNNNN.partial */
  const char *save_weights;    /* directory for weights and tokenizer after the last step; NULL:
                                * none. One that holds a checkpoint, or a model that this run did
                                * not write, is refused */
  const char *model_name;      /* for the artifacts, as are the next three; NULL: "custom" */
  const char *dataset_name;    /* NULL: from the shards' names */
  const char *command_line, *git_commit; /* NULL: null */
  int64_t epochs;              /* > 0: optimizer.steps becomes epochs * steps per epoch */
  int64_t max_train_steps;     /* > 0: stop after that many; the schedule keeps its horizon */
  int64_t val_every;           /* steps; 0: at the end of each epoch and of the run only */
  int64_t val_steps;           /* batches of one validation; 0: all */
  int64_t max_val_steps;       /* > 0: a limit on that number */
  g2z_texts eval;              /* files to score: g2z_eval.h lists the kinds */
  int64_t eval_every;          /* steps; 0: at the end of the run only */
  int64_t sample_every;        /* steps; 0: at the end only, and only with a prompt or a vocab */
  int sample_tokens;           /* tokens of one sample; 0: no samples */
  g2z_sampling sampling;
  int tensorboard;             /* 1: event files of the same scalars in run_dir */
  int profile;                 /* 1: time of each part of a step, in run_dir/profiles. Without
                                * graphs: train.graph becomes 0, and 1 is refused */
} g2z_run_config;
/* Samples of 64 tokens at temperature 0.8; warmup and min_lr -1; tensorboard 1; else NULL, 0 or
 * g2z_*_default. */
G2Z_API g2z_run_config g2z_run_config_default(void);

typedef enum g2z_run_kind {
  G2Z_RUN_STEP,        /* the loss of a step became known */
  G2Z_RUN_VALIDATION,
  G2Z_RUN_EVALUATION,  /* of one file */
  G2Z_RUN_SAMPLE,
  G2Z_RUN_SAVED,       /* a checkpoint is on the disk */
  G2Z_RUN_DONE         /* all artifacts are written, RUN_COMPLETE.txt last */
} g2z_run_kind;

typedef struct g2z_run_event {
  g2z_run_kind kind;
  const char *line;             /* the event as text; valid until the next call, as is sample */
  g2z_metrics metrics;          /* of the last step whose loss is known */
  int64_t steps;                /* of the whole run */
  double tokens_per_second;     /* smoothed over the last steps */
  double eta_seconds;           /* with validation, samples and saving as seen so far */
  double val_loss;              /* of a VALIDATION */
  g2z_eval eval;                /* of an EVALUATION */
  const char *sample;           /* of a SAMPLE: prompt and continuation */
} g2z_run_event;

typedef struct g2z_run g2z_run;
/* Checks everything that can be checked before the first step; on failure no file is left. All
 * ranks make the same calls; rank 0 writes the files of the run. */
G2Z_API g2z_status g2z_run_create(g2z_context *context, const g2z_run_config *config,
                                  g2z_run **out);
/* Works until there is something to show. After G2Z_RUN_DONE it returns that again. G2Z_STOPPED: a
 * stop was requested, a checkpoint saved (with a run_dir) and training_metrics.json written. */
G2Z_API g2z_status g2z_run_next(g2z_run *run, g2z_run_event *event);
/* May be called from a signal handler; `signal` is its number, for the artifacts, 0: none. Ranks
 * agree on it in a step, or before the next batch or token of a validation, an evaluation or a
 * sample; a resumed run begins that anew. */
G2Z_API void g2z_run_request_stop(g2z_run *run, int signal);
G2Z_API void g2z_run_free(g2z_run *run); /* NULL is fine; files of an unfinished run stay */
G2Z_API g2z_trainer *g2z_run_trainer(g2z_run *run);
/* Six operations for each weight of a matrix and token, forward and backward, and attention's
 * causal half of T x T: Chowdhery et al. 2022, arXiv:2204.02311, appendix B. */
G2Z_API double g2z_flops_per_token(const g2z_plan *plan);
/* Keeps other programs out of the directory until `*lock`, a file descriptor, is closed.
 * G2Z_BAD_ARGUMENT: another program has it. Without effect if the file system cannot lock. */
G2Z_API g2z_status g2z_lock_directory(g2z_services *services, const char *path, int *lock);

/* ===== command line ======================================================
 * The flags of a program that trains, and its work before and after the loop, as in train.cu.
 *
 *   g2z_run_options o = g2z_run_options_default();
 *   status = g2z_run_options_parse(&services, argc, argv, &o);
 *   status = g2z_run_options_spawn(&services, &o, argv, &is_parent, &code);   with --ranks, --gpus
 *   context_config = g2z_context_config_default(&services);
 *   status = g2z_run_options_settle(&services, &o, &context_config);
 *   status = g2z_run_launch(&o, &context_config, &context, &run);            then the loop above
 *
 * One of these belongs to a process; run and context keep pointers into it. */

typedef struct g2z_run_options {
  g2z_run_config run;
  const char *model, *run_dir;
  g2z_model_config shape;      /* overrides the model's; 0 here and below: see --help */
  int seq, accum, global_batch, device, dtype, zero;
  int64_t steps;
  float loss_scale;
  int ranks, gpus;
  float join_timeout, silence_timeout, hang_timeout;
  const char *run_id;
  int nccl_logs, profile_mode;
  int dry_run, help, version;  /* for the program to do */
  char *flags_text;            /* of --flags: what texts point to */
  char *eval_names[G2Z_TEXTS]; /* of --eval: what its patterns match */
  char run_dir_text[1024], weights_text[1040], vocab_text[4128];
  g2z_ranks *met;              /* NULL until all ranks have met and run_dir is rank 0's */
} g2z_run_options;

G2Z_API g2z_run_options g2z_run_options_default(void);
/* A flag with the type and the bounds of the library's setting. */
G2Z_API g2z_flag g2z_setting_flag(const char *name, const char *setting, void *destination,
                                  const char *help);
G2Z_API g2z_status g2z_run_options_parse(g2z_services *services, int argc, char **argv,
                                         g2z_run_options *options);
G2Z_API void g2z_run_options_free(g2z_services *services, g2z_run_options *options);
/* The table of flags for --help. */
G2Z_API void g2z_run_options_print(void (*line)(void *user, const char *text), void *user);
/* Prints a plan as a table, one call of `line` per line. It compares the plan with `free_bytes` of
 * memory (0: unknown) and gives the largest B that fits. */
G2Z_API void g2z_plan_print(const g2z_plan *plan, size_t free_bytes,
                            void (*line)(void *user, const char *text), void *user);
/* --ranks and --gpus: this process starts the ranks and waits for them, or is one of them. Results
 * as of g2z_ranks_spawn; without these flags it is no parent. */
G2Z_API g2z_status g2z_run_options_spawn(g2z_services *services, const g2z_run_options *options,
                                         char **argv, int *is_parent, int *code);
/* What flags leave open, and what they say together: completes options->run and *context. */
G2Z_API g2z_status g2z_run_options_settle(g2z_services *services, g2z_run_options *options,
                                          g2z_context_config *context);

/* Meets the other ranks, opens the run and writes launcher_metadata.json; with --nccl-logs NCCL
 * logs into the run directory. That is rank 0's on all ranks: its name may hold the time. */
G2Z_API g2z_status g2z_run_launch(g2z_run_options *options, const g2z_context_config *config,
                                  g2z_context **context, g2z_run **run);
/* launcher_metadata.json, for a run that begins without g2z_run_launch; rank 0 writes it. */
G2Z_API g2z_status g2z_run_write_launch(g2z_services *services, const g2z_run_config *run,
                                        const g2z_place *place);
/* For an on_fault: writes this rank's flight recorder, and RUN_FAILED.json unless another rank is
 * writing it. Before all ranks have met there is no directory for them. */
G2Z_API void g2z_run_write_fault(const g2z_run_options *options, const g2z_fault *fault);
/* SIGTERM, SIGINT, SIGUSR1 and SIGHUP: the first lets the run save and end, a second one ends the
 * program at once. A terminal's Ctrl-C may come twice, from the terminal and from the launcher:
 * within half a second it is one. NULL: from now on the first ends the program. */
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
#include <glob.h>
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
 * Law: metrics.jsonl and train.log grow line by line and hold whatever happened; every other file
 *      appears complete or not at all, and RUN_COMPLETE.txt comes after all of them. */

#define G2ZR_NAME(name) #name,
#define G2ZR_DOUBLE(name) double name;

/* Sums over the whole run, however often it was resumed. */
#define G2ZR_TOTAL_LIST(X)                                                                        \
  X(wall_s)        /* of the starts before this one */                                            \
  X(pause_s)       /* validation, samples and saving */                                           \
  X(train_s)       /* steps, */                                                                   \
  X(train_tokens)  /* and their tokens */                                                         \
  X(best_val_loss) /* NaN: none */                                                                \
  X(smooth_s)      /* step time, exponentially weighted, */                                       \
  X(smooth_weight) /* and the sum of the weights */                                               \
  X(open_s)        /* saved: wall time of the epoch that is not over */                           \
  X(metrics_bytes) /* saved: lengths of the two logs, */                                          \
  X(log_bytes)                                                                                    \
  X(smooth_loss)   /* of steps that were applied, weighted like smooth_s, */                      \
  X(loss_weight)                                                                                  \
  X(best_loss)     /* and its least value at a checkpoint; NaN: none */                           \
  X(due)           /* what was yet to follow the step, */                                         \
  X(evaluated)     /* and how many files of --eval were scored by then */
typedef struct g2zr_totals {
  G2ZR_TOTAL_LIST(G2ZR_DOUBLE)
} g2zr_totals;
static const char *const g2zr_total_names[] = {G2ZR_TOTAL_LIST(G2ZR_NAME)};

#define G2ZR_EPOCH_LIST(X)                                                                        \
  X(index)                                                                                        \
  X(steps)                                                                                        \
  X(skipped)                                                                                      \
  X(tokens)                                                                                       \
  X(wall_s)        /* with validation, samples and saving; 0: it is not over */                   \
  X(train_s)       /* of its steps: all of it, */                                                 \
  X(data_s)        /* and waiting for tokens */                                                   \
  X(loss_sum)      /* over targets of steps that were not skipped, */                             \
  X(loss_targets)  /* and how many these are */                                                   \
  X(val_loss)      /* the last one; NaN: none */                                                  \
  X(p50_s)         /* step time */                                                                \
  X(p95_s)
typedef struct g2zr_epoch {
  G2ZR_EPOCH_LIST(G2ZR_DOUBLE)
  double started;                    /* g2z_seconds() */
} g2zr_epoch;
static const char *const g2zr_epoch_names[] = {G2ZR_EPOCH_LIST(G2ZR_NAME)};

/* A file of rank 0 that is read while it grows line by line. */
typedef struct g2zr_stream {
  int file;                          /* -1: there is none */
  int64_t bytes;
  g2z_path path;
} g2zr_stream;

typedef struct g2zr_failure {        /* an error that is reported later */
  g2z_status status;
  char sentence[G2Z_ERROR_BYTES];
} g2zr_failure;

enum { /* Work due before the next step, in this order. The model is saved first: the rest may fail,
        * or take so long that the run is killed. */
  G2ZR_DUE_SAVE = 1,
  G2ZR_DUE_WEIGHTS = 2,
  G2ZR_DUE_STOP = 4,
  G2ZR_DUE_VALIDATION = 8,
  G2ZR_DUE_EVALUATION = 16,
  G2ZR_DUE_SAMPLE = 32,
  G2ZR_DUE_EPOCH_END = 64,
  G2ZR_DUE_FINISH = 128
};

struct g2z_run {
  g2z_services *services;
  g2z_context *context;
  g2z_run_config config;
  g2z_trainer *trainer;
  g2z_loader *val, *train;           /* the latter until the steps are counted */
  g2z_tokenizer *tokenizer;
  g2z_tokens sample;                 /* begins with the prompt */
  size_t prompt;                     /* tokens of the prompt */
  char *sample_text;
  g2z_eval_set *eval[G2Z_TEXTS];
  int evaluated;                     /* files that were scored after this step */
  g2zr_stream metrics, log;
  g2z_events *events;                /* NULL: none */
  double next_report;                /* g2z_seconds(): when report.html may be written again */
  char line[4608], dataset[128], id[128], started_utc[32]; /* a line may hold the longest path */
  double started, ended;             /* g2z_seconds(); 0: not yet */
  int64_t steps, steps_per_epoch, epochs, tokens_per_step, train_sequences;
  int64_t step;                      /* steps enqueued */
  struct {                           /* by rank 0, for all: names may come from its clock */
    int continues;                   /* 1: run_dir's own run continues, */
    int own;                         /* 1: after a checkpoint of its own */
    char run_dir[1024];
    char resume[1024];
  } found;
  const char *resume;                /* the checkpoint that the run resumes from; NULL: none */
  g2z_checkpoint from;               /* its contents */
  double resume_s;                   /* time to load it */
  int64_t resumed, saved;            /* its step; step of the last checkpoint, -1: none */
  int lock;                          /* rank 0: keeps other runs out of run_dir; -1: not yet */
  int64_t before;                    /* rank 0: "latest" is the last before this step; later ones
                                      * are damaged */
  char passed_over[256];             /* their steps; "": none */
  char newest[300];                  /* the fault of the first */
  int broken;                        /* 1: a step failed */
  int64_t unsound;                   /* step of the first checkpoint since the loss went up or steps
                                      * were skipped; 0: all is well */
  int64_t applied;                   /* steps of this start */
  char weights[PATH_MAX];            /* rank 0: save_weights as a full path; */
  char weights_before[PATH_MAX];     /* the same when the checkpoint was saved; "": none */
  int64_t stop_signal;               /* the signal that asked to stop; 0: none */
  double share_told_s;               /* g2z_seconds() of --eval's last progress line */
  int64_t epoch_step;                /* steps of this epoch's data: counted here, as the loader of a
                                      * rank that failed stands still, and all ranks must agree */
  int epoch_ends;                    /* 1: the last step was the last of its epoch's data */
  g2zr_failure ending;               /* ends the run once its last step was reported */
  g2zr_failure held;                 /* rank 0: of a file; the other ranks do not know of it yet */
  int due;
  double step_s_of[2];               /* of the last two steps, by parity: losses come one late */
  g2z_metrics known;                 /* of the last step whose loss is known */
  double peak_flops;                 /* of all ranks; NaN: unknown */
  g2zr_totals sum;
  double val_entropy;                /* NaN: none */
  int64_t val_steps, val_tokens;     /* of one validation: batches, and tokens that count */
  double *step_s;                    /* of this epoch's steps */
  g2zr_epoch *epoch;                 /* all of them; the last one is running */
  size_t step_s_capacity, epoch_count, epoch_capacity;
  int finished;
  char early[4096];                  /* lines for train.log from before it was open */
};

G2Z_API g2z_run_config g2z_run_config_default(void) {
  g2z_run_config config;
  memset(&config, 0, sizeof config);
  config.train = g2z_train_config_default();
  config.train.optimizer.min_lr = -1;
  config.train.optimizer.warmup = -1;
  config.sampling = g2z_sampling_default();
  config.sampling.temperature = 0.8f;
  config.sample_tokens = 64;
  config.tensorboard = 1;
  return config;
}

/* ----- files ----- */

/* Keeps the first failure, whose sentence is in services->error. */
static void g2zr_note_failure(g2z_run *run, g2zr_failure *failure, g2z_status status) {
  if (failure->status != G2Z_OK) return;
  failure->status = status;
  memcpy(failure->sentence, run->services->error, sizeof failure->sentence);
}

static g2z_status g2zr_tell_failure(g2z_run *run, const g2zr_failure *failure) {
  if (failure->status != G2Z_OK)
    memcpy(run->services->error, failure->sentence, sizeof failure->sentence);
  return failure->status;
}

/* Rank 0 could not write a file. A run of one rank fails at once. Other ranks must know before they
 * wait for rank 0: the failure is held until the verdict of the next step. */
static g2z_status g2zr_hold(g2z_run *run, g2z_status status) {
  if (status == G2Z_OK || !run->trainer || run->context->world == 1) return status;
  g2zr_note_failure(run, &run->held, status);
  g2z_trainer_fail(run->trainer, status);
  return G2Z_OK;
}

/* All ranks get the same status, which includes what was held. */
static g2z_status g2zr_agree(g2z_run *run, g2z_status status) {
  if (status == G2Z_OK) status = g2zr_tell_failure(run, &run->held);
  return g2z_ranks_agree(run->context->ranks, status);
}

static g2z_path g2zr_in(const g2z_run *run, const char *name) {
  return g2z_path_in(run->config.run_dir, "%s", name);
}

static g2z_status g2zr_has(g2z_services *services, const char *directory, const char *name,
                           int *there) {
  return g2z_is_there(services, g2z_path_in(directory, "%s", name).text, there);
}

/* Texts are copied into fields that ranks exchange: a text that is cut off would be another. */
static g2z_status g2zr_check_length(g2z_services *services, const char *what, const char *text,
                                    size_t room) {
  if (!text || strlen(text) < room) return G2Z_OK;
  G2Z_REFUSE(services, "%s has %zu bytes, and at most %zu have room: give a shorter one", what,
             strlen(text), room - 1);
}

/* Fails if a log was removed or replaced during the run, which would end without its metrics. */
static g2z_status g2zr_stream_check(g2z_run *run, const g2zr_stream *stream) {
  struct stat mine, named;
  if (stream->file < 0) return G2Z_OK;
  if (fstat(stream->file, &mine) == 0 && stat(stream->path.text, &named) == 0 &&
      mine.st_dev == named.st_dev && mine.st_ino == named.st_ino)
    return G2Z_OK;
  return g2z_fail(run->services, G2Z_IO, "%s was removed or replaced while this run writes it: the "
                  "run ends; resume it from its last checkpoint, or begin anew", stream->path.text);
}

G2Z_PRINTF(3, 4)
static g2z_status g2zr_append(g2z_run *run, g2zr_stream *stream, const char *format, ...) {
  va_list arguments;
  void *text;
  if (stream->file < 0) return G2Z_OK;
  va_start(arguments, format);
  const int length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  g2z_status status = g2z_allocate(run->services, (size_t)length + 1, 1, &text);
  if (status == G2Z_OK) {
    va_start(arguments, format);
    vsnprintf((char *)text, (size_t)length + 1, format, arguments);
    va_end(arguments);
    status = g2z_write_bytes(stream->file, text, (size_t)length)
                 ? g2zr_stream_check(run, stream)
                 : g2z_fail_file(run->services, errno, "write", stream->path.text);
    g2z_release(run->services, text);
  }
  if (status == G2Z_OK) stream->bytes += length;
  return g2zr_hold(run, status);
}

/* Opens a log that keeps its first bytes. */
static g2z_status g2zr_stream_open(g2z_run *run, g2zr_stream *stream, const char *name,
                                   int64_t keep) {
  struct stat info;
  stream->path = g2zr_in(run, name);
  stream->bytes = keep;
  const int flags = O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  G2Z_RETRY(stream->file, open(stream->path.text, flags, 0666));
  if (stream->file < 0) return g2z_fail_file(run->services, errno, "create", stream->path.text);
  if (fstat(stream->file, &info) != 0 || !S_ISREG(info.st_mode))
    return g2z_fail(run->services, G2Z_IO, "cannot write %s: it is no regular file; remove it",
                    stream->path.text);
  int done;
  G2Z_RETRY(done, ftruncate(stream->file, (off_t)keep));
  if (done == 0) return G2Z_OK;
  return g2z_fail_file(run->services, errno, "cut off the end of", stream->path.text);
}

static g2z_status g2zr_log(g2z_run *run, const char *line) {
  char now[32];
  g2z_utc_now(now);
  return g2zr_append(run, &run->log, "%s  %s\n", now, line);
}

/* Makes run->line, which an event shows: paths in it cannot steer a terminal. */
G2Z_PRINTF(2, 3)
static void g2zr_line(g2z_run *run, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(run->line, sizeof run->line, format, arguments);
  va_end(arguments);
  g2z_tame(run->line);
}

/* Rank 0: whatever a run logs goes into train.log too. Before that file is open, as while a
 * checkpoint is loaded, lines wait in run->early. A line that cannot be written ends the run. */
static void g2zr_hear(void *user, g2z_log_level level, const char *sentence) {
  g2z_run *run = (g2z_run *)user;
  const char *warning = level == G2Z_LOG_WARNING ? "warning: " : "";
  const size_t used = strlen(run->early), room = sizeof run->early - used;
  char line[G2Z_ERROR_BYTES + 16];
  snprintf(line, sizeof line, "%s%s", warning, sentence);
  if (run->log.file < 0) snprintf(run->early + used, room, "%s\n", line);
  else g2zr_note_failure(run, &run->held, g2zr_log(run, line));
}

/* A line for the console and for train.log; rank 0 alone. */
#define G2ZR_SAY(run, ...) g2z_log((run)->services, G2Z_LOG_INFO, __VA_ARGS__)

/* ----- metrics and artifacts ----- */

/* Rank 0: writes a text and a line feed as a file. */
static g2z_status g2zr_write_text(g2z_run *run, const char *name, const char *text) {
  g2z_writer *writer;
  G2Z_TRY(g2z_writer_create(run->services, g2zr_in(run, name).text, &writer));
  g2z_writer_printf(writer, "%s\n", text);
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

/* Rank 0: scalars for TensorBoard, in a file that begins with the first of them. */
static g2z_status g2zr_put_events(g2z_run *run, int64_t step, int count,
                                  const char *const *tags, const double *values) {
  g2z_status status = G2Z_OK;
  if (run->metrics.file < 0 || !run->config.tensorboard) return G2Z_OK;
  if (!run->events)
    status = g2z_events_create(run->services, run->config.run_dir, run->resumed + 1, &run->events);
  if (status == G2Z_OK) status = g2z_events_put(run->events, step, count, tags, values);
  return g2zr_hold(run, status);
}

/* A member of a JSON object, `, "key": "text"`; `to` has room for 6 bytes per byte of both and 16.
 * A file's name may hold any bytes, but JSON must be UTF-8: other bytes become U+FFFD. */
static void g2zr_member(const char *key, const char *text, char *to) {
  const unsigned char *at = (const unsigned char *)text, *end = at + strlen(text);
  to += sprintf(to, ", \"%s\": \"", key);
  while (at < end) {
    const int bytes = (int)g2z_utf8_length(at, end);
    if (!bytes) to += sprintf(to, "\xef\xbf\xbd");
    else if (*at < ' ' || *at == '"' || *at == '\\') to += sprintf(to, "\\u%04x", (unsigned)*at);
    else to += sprintf(to, "%.*s", bytes, (const char *)at);
    at += bytes ? bytes : 1;
  }
  strcpy(to, "\"");
}

/* A line of metrics.jsonl: step, tokens, the named values, then `last`, more members as text. */
static g2z_status g2zr_put_line(g2z_run *run, int count, const char *const *names,
                                const double *values, const char *last) {
  char line[1024], number[40];
  int used = snprintf(line, sizeof line, "{\"step\": %" PRId64 ", \"tokens\": %" PRId64,
                      run->known.step, run->known.tokens);
  for (int i = 0; i < count; i++) {
    int whole = fabs(values[i]) < 1e15 && values[i] == rint(values[i]);
    snprintf(number, sizeof number, whole ? "%.0f" : "%.9g", values[i]);
    g2z_plain_number(number);
    used += snprintf(line + used, sizeof line - (size_t)used, ", \"%s\": %s", names[i],
                     isfinite(values[i]) ? number : "null");
  }
  return g2zr_append(run, &run->metrics, "%s%s}\n", line, last);
}

/* A line about work between steps: its result (name NULL: it has none) and its time. */
static g2z_status g2zr_write_note(g2z_run *run, const char *name, double value,
                                  const char *ms_name, double seconds) {
  const char *const names[] = {name, ms_name};
  const double values[] = {value, seconds * 1e3};
  return g2zr_put_line(run, name ? 2 : 1, names + !name, values + !name, "");
}

/* Rank 0: report.html. A run continues without it: all that it shows is in other files. Unless it
 * `must` be written it takes a hundredth of the time at most. */
static void g2zr_report(g2z_run *run, int must) {
  const double begin = g2z_seconds();
  if (run->metrics.file < 0 || (!must && begin < run->next_report)) return;
  if (g2z_report_run(run->services, run->config.run_dir) != G2Z_OK)
    g2z_log(run->services, G2Z_LOG_WARNING, "no report.html: %s", run->services->error);
  const double end = g2z_seconds();
  run->next_report = end + 99 * (end - begin);
}

#define G2ZR_TEXT(key, text) g2z_json_put_string(out, key, text)
#define G2ZR_WHOLE(key, number) g2z_json_put_integer(out, key, (int64_t)(number))
#define G2ZR_REAL(key, number) g2z_json_put_number(out, key, number)
#define G2ZR_NONE(key) g2z_json_put_string(out, key, NULL)
#define G2ZR_OPEN(key) g2z_json_begin(out, key, '{')
#define G2ZR_CLOSE() g2z_json_end(out, '}')

/* A variable that holds a number; null: it is not set. */
static void g2zr_put_variable(g2z_json_out *out, const char *key, const char *variable) {
  const char *text = getenv(variable);
  char *end = NULL;
  long long value = text ? strtoll(text, &end, 10) : 0;
  if (text && end != text && !*end) G2ZR_WHOLE(key, value);
  else G2ZR_NONE(key);
}

/* The shortest decimal: 0.0003 for the float 0.000300000014. */
static double g2zr_decimal(float value) {
  char text[32];
  snprintf(text, sizeof text, "%.6g", (double)value);
  return strtod(text, NULL);
}

/* A number of bytes as an integer, never as 4.5e+09; NaN: null. */
static void g2zr_put_bytes(g2z_json_out *out, const char *key, double bytes) {
  if (isnan(bytes)) G2ZR_NONE(key);
  else G2ZR_WHOLE(key, bytes);
}

/* An entry of "epochs". */
static void g2zr_put_epoch(const g2z_run *run, g2z_json_out *out, const g2zr_epoch *epoch) {
  const g2z_plan *plan = run->trainer->plan;
  const double steps = epoch->steps, applied = steps - epoch->skipped;
  double planned = NAN, reserved = NAN, all = NAN;
  size_t free_bytes = 0, total_bytes = 0;
  if (plan->device == G2Z_DEVICE_CUDA) { /* the plan is all that is allocated, ... */
    g2z_device_memory(run->services, plan->device, &free_bytes, &total_bytes);
    planned = (double)plan->bytes_total;
    reserved = (double)(total_bytes - free_bytes); /* ... and this is gone, to whomever */
    g2z_plan *other; /* of each other rank; no memory for it: null */
    if (plan->world == 1) all = planned;
    else if (g2z_plan_create(run->services, &run->trainer->config, plan->device, 1, plan->world,
                             &other) == G2Z_OK) {
      all = planned + (double)other->bytes_total * (plan->world - 1);
      g2z_plan_free(other);
    }
  }
  G2ZR_OPEN(NULL);
  G2ZR_WHOLE("epoch_idx", epoch->index);
  G2ZR_REAL("epoch_wall_time_sec", epoch->wall_s);
  G2ZR_WHOLE("steps", steps);
  G2ZR_WHOLE("micro_steps", steps * run->config.train.accum);
  G2ZR_WHOLE("optimizer_steps", applied);
  G2ZR_WHOLE("tokens_processed_global", epoch->tokens);
  /* An epoch without steps has 0 / 0 here, which the writer turns into null. */
  G2ZR_REAL("tokens_per_sec_global", epoch->tokens / epoch->train_s);
  G2ZR_REAL("train_loss_avg_global", epoch->loss_sum / epoch->loss_targets);
  G2ZR_REAL("val_loss_avg_global", epoch->val_loss);
  g2zr_put_bytes(out, "max_cuda_mem_allocated_bytes_rank0", planned);
  g2zr_put_bytes(out, "max_cuda_mem_reserved_bytes_rank0", reserved);
  g2zr_put_bytes(out, "max_cuda_mem_allocated_bytes_global", all);
  G2ZR_NONE("max_cuda_mem_reserved_bytes_global");
  G2ZR_REAL("step_time_mean_sec", epoch->train_s / steps);
  G2ZR_REAL("step_time_p50_sec", epoch->p50_s);
  G2ZR_REAL("step_time_p95_sec", epoch->p95_s);
  G2ZR_REAL("dataload_time_mean_sec", epoch->data_s / steps);
  G2ZR_CLOSE();
}

/* The signals that let a run save and end. */
static const struct {
  int number;
  const char *name;
} g2zr_signals[] = {
    {SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGUSR1, "SIGUSR1"}, {SIGHUP, "SIGHUP"}};

/* The name of a signal in `text`; NULL for 0, which is none. */
static const char *g2zr_signal_text(int64_t signal, char text[32]) {
  snprintf(text, 32, "signal %d", (int)signal);
  for (size_t i = 0; i < G2Z_COUNT(g2zr_signals); i++)
    if (signal == g2zr_signals[i].number) snprintf(text, 32, "%s", g2zr_signals[i].name);
  return signal ? text : NULL;
}

static void g2zr_put_ending(const g2z_run *run, g2z_json_out *out) {
  char name[32], now[32];
  const int stopped = (run->due & G2ZR_DUE_STOP) != 0;
  g2z_utc_now(now);
  G2ZR_OPEN("shutdown");
  G2ZR_TEXT("reason", !stopped ? "completed" : run->stop_signal ? "signal" : "stop requested");
  G2ZR_TEXT("signal", stopped ? g2zr_signal_text(run->stop_signal, name) : NULL);
  G2ZR_CLOSE();
  G2ZR_OPEN("completion");
  G2ZR_TEXT("run_complete_file", stopped ? NULL : "RUN_COMPLETE.txt");
  G2ZR_TEXT("printed_marker", stopped ? NULL : "RUN_COMPLETE");
  G2ZR_TEXT("timestamp_utc", now);
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

/* 0 in a run without steps: readers cannot format null. */
static double g2zr_tokens_per_s(const g2z_run *run) {
  return run->sum.train_s > 0 ? run->sum.train_tokens / run->sum.train_s : 0.0;
}

/* Wall time of the whole run, with the time before it was resumed. */
static double g2zr_wall_s(const g2z_run *run) {
  return run->sum.wall_s + ((run->ended > 0 ? run->ended : g2z_seconds()) - run->started);
}

/* training_metrics.json, schema 2.0 (manual: RUN DIRECTORY). */
static void g2zr_put_artifact(void *user, g2z_json_out *out) {
  const g2z_run *run = (const g2z_run *)user;
  const g2z_run_config *config = &run->config;
  const g2z_plan *plan = run->trainer->plan;
  const g2z_device_info *info = &run->trainer->device->info;
  const char *cuda = info->runtime[0] ? info->runtime : NULL;
  struct utsname name;
  char os[2 * sizeof name.release], size[96];
  memset(&name, 0, sizeof name);
  uname(&name);
  snprintf(os, sizeof os, "%s %s", name.sysname, name.release);
  snprintf(size, sizeof size, "n_layer=%d, n_head=%d, n_embd=%d", plan->model.layers,
           plan->model.heads, plan->model.channels);
  G2ZR_TEXT("schema_version", "2.0");
  G2ZR_TEXT("run_id", run->id);
  G2ZR_TEXT("timestamp_utc", run->started_utc);
  G2ZR_TEXT("git_commit", config->git_commit);
  G2ZR_TEXT("command_line", config->command_line);
  G2ZR_OPEN("env");
  G2ZR_NONE("python_version");
  G2ZR_NONE("torch_version");
  G2ZR_NONE("transformers_version");
  G2ZR_NONE("deepspeed_version");
  G2ZR_TEXT("cuda_version", cuda);
  G2ZR_TEXT("nccl_version", info->collectives[0] ? info->collectives : NULL);
  G2ZR_CLOSE();
  G2ZR_OPEN("host");
  G2ZR_TEXT("hostname", name.nodename);
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
  G2ZR_OPEN("training_config");
  G2ZR_TEXT("model_name", config->model_name ? config->model_name : "custom");
  G2ZR_TEXT("model_size", size);
  G2ZR_WHOLE("parameters", plan->parameters);
  G2ZR_WHOLE("seq_len", plan->seq);
  G2ZR_WHOLE("epochs", run->epochs);
  G2ZR_WHOLE("micro_batch_size_per_gpu", plan->batch);
  G2ZR_WHOLE("grad_accum_steps", plan->accum);
  G2ZR_WHOLE("global_batch_size", (int64_t)plan->batch * plan->accum * plan->world);
  G2ZR_REAL("lr", g2zr_decimal(config->train.optimizer.lr));
  G2ZR_TEXT("optimizer", g2z_optimizer_text(config->train.optimizer.kind));
  G2ZR_TEXT("precision", g2z_dtype_text(plan->dtype));
  G2ZR_TEXT("fp8", g2z_fp8_text(plan->fp8));
  g2z_json_put_bool(out, "deepspeed_enabled", 0);
  G2ZR_WHOLE("zero_stage", plan->zero_stage);
  G2ZR_TEXT("strategy", g2z_strategy_text(plan->strategy));
  G2ZR_TEXT("recompute", g2z_recompute_text(plan->recompute));
  G2ZR_TEXT("dataset_name", run->dataset);
  G2ZR_OPEN("dataset_subset_sizes");
  G2ZR_WHOLE("train", run->train_sequences);
  G2ZR_WHOLE("val", run->val ? run->val->sequences : 0);
  G2ZR_CLOSE();
  G2ZR_CLOSE();
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
  G2ZR_OPEN("summary");
  G2ZR_REAL("total_wall_time_sec", g2zr_wall_s(run));
  G2ZR_REAL("best_val_loss", run->sum.best_val_loss);
  G2ZR_REAL("mean_tokens_per_sec_global", g2zr_tokens_per_s(run));
  G2ZR_CLOSE();
  g2zr_put_ending(run, out);
}

/* Rank 0: the tuning table, training_metrics.json, report.html and the profile. */
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
  g2z_json_put_bool(out, "clean_up_tokenization_spaces", 0); /* " ," stays " ,": some versions' 1 */
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

static const char *const g2zr_tokenizer_files[] = {"merges.txt", "vocab.json",
                                                   "tokenizer_config.json",
                                                   "generation_config.json"};

/* Rank 0: the tokenizer in a directory of weights, where transformers and --init-from look for it.
 * user: g2z_run *. */
static g2z_status g2zr_save_tokenizer(void *user, const char *directory) {
  g2z_run *run = (g2z_run *)user;
  g2z_services *services = run->services;
  if (!run->tokenizer || run->context->rank != 0) return G2Z_OK;
  for (int i = 0; i < 4; i++) {
    const g2z_path path = g2z_path_in(directory, "%s", g2zr_tokenizer_files[i]);
    G2Z_TRY(i == 0   ? g2z_tokenizer_write_merges(services, run->tokenizer, path.text)
            : i == 1 ? g2z_tokenizer_write_vocab(services, run->tokenizer, path.text)
                     : g2z_json_write(services, path.text,
                                      i == 2 ? g2zr_put_tokenizer : g2zr_put_generation, run));
  }
  return G2Z_OK;
}

/* Removes a checkpoint with its tokenizer; 1 on success. The target of a link stays. */
static int g2zr_remove_checkpoint(const char *path) {
  struct stat info;
  int own = lstat(path, &info) == 0 && S_ISDIR(info.st_mode);
  for (int i = 0; i < 4 && own; i++) { /* whole, or as a killed run left them */
    unlink(g2z_path_in(path, "%s", g2zr_tokenizer_files[i]).text);
    unlink(g2z_path_in(path, "%s.partial", g2zr_tokenizer_files[i]).text);
  }
  return g2z_checkpoint_remove(path);
}

/* Writes the logs to the disk, under the names that they were opened with. */
static g2z_status g2zr_sync(g2z_run *run) {
  const g2zr_stream *const streams[] = {&run->metrics, &run->log};
  for (int i = 0; i < 2 && streams[i]->file >= 0; i++) {
    G2Z_TRY(g2zr_stream_check(run, streams[i]));
    int done;
    G2Z_RETRY(done, fsync(streams[i]->file));
    if (done != 0) return g2z_fail_file(run->services, errno, "sync", streams[i]->path.text);
  }
  return G2Z_OK;
}

#define G2ZR_CHECKPOINT "step-%06" PRId64 /* the name of a checkpoint, from its step */

static g2z_path g2zr_checkpoint(const g2z_run *run, int64_t step, const char *suffix) {
  return g2z_path_in(run->config.run_dir, G2ZR_CHECKPOINT "%s", step, suffix);
}

static const char *g2zr_plural(int64_t count) { return count == 1 ? "" : "s"; }

/* "59 s", "12:34", "1:02:03". */
static void g2zr_duration_text(double seconds, char out[32]) {
  int64_t s = (int64_t)(seconds + 0.5);
  if (s < 60) snprintf(out, 32, "%" PRId64 " s", s);
  else if (s < 3600) snprintf(out, 32, "%" PRId64 ":%02d", s / 60, (int)(s % 60));
  else snprintf(out, 32, "%" PRId64 ":%02d:%02d", s / 3600, (int)(s / 60 % 60), (int)(s % 60));
}

/* The flag that sets the run's length, and its value: the larger of done and asked for. */
static const char *g2zr_length(const g2z_run *run, int64_t *value) {
  const g2z_run_config *c = &run->config;
  const int64_t per_epoch = run->steps_per_epoch;
  const int cut = run->steps < c->train.optimizer.steps, by_epoch = !cut && c->epochs > 0;
  const int64_t done = by_epoch ? (run->step + per_epoch - 1) / per_epoch : run->step;
  *value = cut ? c->max_train_steps : by_epoch ? c->epochs : run->steps;
  if (*value < done) *value = done;
  return cut ? "--max-train-steps" : by_epoch ? "--epochs" : "--steps";
}

/* This run's command with another run_dir or `more` flags, ready to paste: the last of two equal
 * flags counts. Without the command itself under a launcher, or if it is too long. */
static const char *g2zr_command(const g2z_run *run, const char *run_dir, const char *more,
                                char text[1400]) {
  const char *command = run->config.command_line;
  const char *launcher = g2z_ranks_place(run->context->ranks)->launcher;
  static const char resume[] = " --resume latest";
  char word[256];
  if (strcmp(launcher, "alone") != 0 && strcmp(launcher, "ranks") != 0) command = NULL;
  if (command && strlen(command) > 400) command = NULL;
  if (command && strstr(command, resume) && strncmp(more, resume, strlen(resume)) == 0)
    more += strlen(resume);
  const int add = run_dir != run->config.run_dir || !command || !strstr(command, " --run-dir");
  snprintf(text, 1400, "%s%s%s%s", command ? command : "the same command with",
           add ? " --run-dir " : "", add ? g2z_shell_word(run_dir, word, sizeof word) : "", more);
  return text;
}

/* The same for a new run that begins with these weights, not with a checkpoint that the command
 * names, and writes to another directory. */
static const char *g2zr_further(const g2z_run *run, const char *weights, char text[1400]) {
  const g2z_run_config *c = &run->config;
  const char *resume = c->resume && strcmp(c->resume, "latest") != 0 ? " --resume latest" : "";
  const int own = c->save_weights && strcmp(c->save_weights, g2zr_in(run, "weights").text) != 0;
  char word[300], to[300] = "", more[700], run_dir[1100];
  snprintf(run_dir, sizeof run_dir, "%s-2", c->run_dir);
  if (own) g2z_shell_word(g2z_path_in(run_dir, "weights").text, to, sizeof to);
  snprintf(more, sizeof more, "%s --init-from %s%s%s", resume,
           g2z_shell_word(weights, word, sizeof word), own ? " --save-weights " : "", to);
  return g2zr_command(run, run_dir, more, text);
}

/* The end of a run: prints the result of a training and the commands that may follow it, then
 * writes training_metrics.json and RUN_COMPLETE.txt. The latter names the weights, or the last
 * checkpoint if none were asked for. */
static g2z_status g2zr_finish(g2z_run *run) {
  const char *saved = run->config.save_weights, *run_dir = run->config.run_dir;
  const g2z_path checkpoint = g2zr_checkpoint(run, run->saved, "");
  char now[32], loss[48] = "", best[64] = "", more[64], text[1400], word[300];
  const int says = run->steps > 0 && run->context->rank == 0;
  int64_t length;
  const char *flag = g2zr_length(run, &length);
  if (says) {
    g2zr_duration_text(g2zr_wall_s(run), now);
    if (run->known.step > run->resumed) snprintf(loss, sizeof loss, "loss %.4f, ", run->known.loss);
    if (!isnan(run->sum.best_val_loss))
      snprintf(best, sizeof best, "best validation loss %.4f, ", run->sum.best_val_loss);
    G2ZR_SAY(run, "done: %s%s%" PRId64 " step%s, %" PRId64 " tokens, %s", loss, best,
             run->known.step, g2zr_plural(run->known.step), run->known.tokens, now);
    if (run_dir) G2ZR_SAY(run, "curves: %s/report.html", run_dir);
  }
  if (says && saved) {
    const char *command = run->config.command_line ? run->config.command_line : "./train";
    size_t program = 0; /* bytes of its first word, which may be quoted */
    for (int quoted = 0; command[program] && (quoted || command[program] != ' '); program++) {
      if (command[program] == '\'') quoted = !quoted;
      else if (command[program] == '\\' && !quoted) program++;
    }
    g2z_shell_word(saved, word, sizeof word);
    G2ZR_SAY(run, "weights: %s", saved);
    G2ZR_SAY(run, "To generate text: %.*s --init-from %s --prompt 'The'%s", (int)program, command,
             word, run->tokenizer ? "" : " --vocab FILE");
  }
  snprintf(more, sizeof more, " --resume latest %s %" PRId64, flag, 2 * length);
  if (says && run->saved >= 0)
    G2ZR_SAY(run, "To continue training: %s", g2zr_command(run, run_dir, more, text));
  else if (says && saved && run_dir)
    G2ZR_SAY(run, "To train these weights further: %s", g2zr_further(run, saved, text));
  run->ended = g2z_seconds();
  g2z_utc_now(now);
  g2zr_line(run, "[Rank 0] RUN_COMPLETE checkpoint_path=%.4096s world_size=%d tokens_per_sec=%.2f "
            "total_wall_time_sec=%.3f timestamp_utc=%s", saved ? saved : run->saved >= 0 ?
            checkpoint.text : "none", run->context->world, g2zr_tokens_per_s(run), g2zr_wall_s(run),
            now);
  if (run->log.file < 0) return G2Z_OK;
  G2Z_TRY(g2zr_log(run, run->line));
  G2Z_TRY(g2zr_write_artifacts(run));
  G2Z_TRY(g2zr_sync(run));
  G2Z_TRY(g2zr_tell_failure(run, &run->held)); /* such as of the line above, with several ranks */
  g2z_status status = g2zr_write_text(run, "RUN_COMPLETE.txt", run->line);
  if (status != G2Z_OK) unlink(g2zr_in(run, "RUN_COMPLETE.txt").text); /* its name may be there */
  return status;
}

/* ----- checkpoints of a run ----- */

/* The latest checkpoint of run_dir with that suffix before step `before`; -1: none. A directory
 * that cannot be read is an error: otherwise a run would begin anew over its own files. */
static g2z_status g2zr_latest(const g2z_run *run, const char *suffix, int64_t before,
                              int64_t *latest) {
  *latest = -1;
  int file;
  G2Z_RETRY(file, open(run->config.run_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  DIR *directory = file < 0 ? NULL : fdopendir(file);
  if (!directory && errno == ENOENT) return G2Z_OK;
  while (directory) {
    errno = 0; /* readdir returns NULL at the end as well */
    struct dirent *entry = readdir(directory);
    if (!entry) break;
    const char *name = entry->d_name;
    int64_t step = strncmp(name, "step-", 5) == 0 ? (int64_t)strtoll(name + 5, NULL, 10) : -1;
    char same[64];
    snprintf(same, sizeof same, G2ZR_CHECKPOINT "%s", step, suffix);
    if (strcmp(same, name) == 0 && step < before && step > *latest) *latest = step;
  }
  int error = errno;
  if (directory) closedir(directory);
  if (!error) return G2Z_OK;
  *latest = -1;
  return g2z_fail_file(run->services, error, "read the directory", run->config.run_dir);
}

static void g2zr_stays(g2z_run *run, const char *path) {
  g2z_log(run->services, G2Z_LOG_WARNING, "%s stays: %s; see what it holds, and remove it by hand",
          path, strerror(errno));
}

/* ----- a checkpoint's note about the run ----- */

/* Texts of 17 digits: sums continue from the same double. */
static void g2zr_put_doubles(g2z_json_out *out, const char *key, const char *const *names,
                             const double *values, size_t count) {
  g2z_json_begin(out, key, '{');
  for (size_t i = 0; i < count; i++) {
    char text[40];
    snprintf(text, sizeof text, "%.17g", values[i]);
    g2z_plain_number(text);
    g2z_json_put_string(out, names[i], isfinite(values[i]) ? text : NULL);
  }
  g2z_json_end(out, '}');
}

static void g2zr_get_doubles(g2z_json *json, const char *const *names, double *values,
                             size_t count) {
  g2z_json_text key;
  if (!g2z_json_enter(json, '{')) return;
  while (g2z_json_next(json, '}', &key)) {
    size_t i = 0;
    while (i < count && !g2z_json_is(&key, names[i])) i++;
    if (i == count || g2z_json_peek(json) == 'n') {
      if (i < count) values[i] = NAN;
      g2z_json_skip(json);
      continue;
    }
    const g2z_json_text text = g2z_json_string(json);
    g2z_json number;
    if (json->status != G2Z_OK) return;
    g2z_json_open(&number, json->services, json->label, text.at, text.bytes);
    values[i] = g2z_json_number(&number);
    json->status = g2z_json_close(&number);
  }
}

/* note.json of a checkpoint. The last epoch stays open: the work that is due ends it, or a longer
 * run continues with its data. */
static void g2zr_put_note(void *user, g2z_json_out *out) {
  const g2z_run *run = (const g2z_run *)user;
  const g2zr_epoch *last = &run->epoch[run->epoch_count - 1];
  g2zr_totals sum = run->sum;
  sum.wall_s = g2zr_wall_s(run);
  sum.open_s = g2z_seconds() - last->started;
  sum.metrics_bytes = (double)run->metrics.bytes;
  sum.log_bytes = (double)run->log.bytes;
  sum.due = run->due & (G2ZR_DUE_VALIDATION | G2ZR_DUE_EVALUATION | G2ZR_DUE_SAMPLE |
                        (run->epoch_ends ? G2ZR_DUE_EPOCH_END : 0));
  sum.evaluated = run->evaluated;
  g2zr_put_doubles(out, "totals", g2zr_total_names, (const double *)&sum,
                   G2Z_COUNT(g2zr_total_names));
  g2z_json_put_string(out, "weights", run->weights);
  g2z_json_begin(out, "epochs", '[');
  for (size_t i = 0; i < run->epoch_count; i++) {
    g2zr_epoch epoch = run->epoch[i];
    if (&run->epoch[i] == last) epoch.wall_s = 0;
    g2zr_put_doubles(out, NULL, g2zr_epoch_names, (const double *)&epoch,
                     G2Z_COUNT(g2zr_epoch_names));
  }
  g2z_json_end(out, ']');
  out->indent = 0; /* on one line */
  g2z_json_begin(out, "step_s", '[');
  for (size_t i = 0; i < (size_t)last->steps; i++) g2z_json_put_number(out, NULL, run->step_s[i]);
  g2z_json_end(out, ']');
  out->indent = 2;
}

static g2z_status g2zr_grow_steps(g2z_run *run, size_t used) {
  void *list = run->step_s;
  g2z_status status = g2z_grow(run->services, &list, &run->step_s_capacity, used, used + 1,
                               sizeof(double));
  run->step_s = (double *)list;
  return status;
}

static g2z_status g2zr_begin_epoch(g2z_run *run, double index) {
  void *list = run->epoch;
  g2z_status status = g2z_grow(run->services, &list, &run->epoch_capacity, run->epoch_count,
                               run->epoch_count + 1, sizeof(g2zr_epoch));
  run->epoch = (g2zr_epoch *)list;
  G2Z_TRY(status);
  g2zr_epoch *epoch = &run->epoch[run->epoch_count++];
  memset(epoch, 0, sizeof *epoch);
  epoch->index = index;
  epoch->started = g2z_seconds();
  epoch->val_loss = epoch->p50_s = epoch->p95_s = NAN;
  return G2Z_OK;
}

/* The run's sums and epochs as they were at the checkpoint, from its note. */
static g2z_status g2zr_restore(g2z_run *run) {
  g2z_json note, *json = &note;
  g2z_json_text key;
  size_t steps = 0;
  run->epoch_count = 0;
  g2z_json_open(json, run->services, "note.json", run->from.note, strlen(run->from.note));
  g2z_json_enter(json, '{');
  while (g2z_json_next(json, '}', &key)) {
    if (g2z_json_is(&key, "totals"))
      g2zr_get_doubles(json, g2zr_total_names, (double *)&run->sum, G2Z_COUNT(g2zr_total_names));
    else if (g2z_json_is(&key, "weights")) {
      const g2z_json_text text = g2z_json_string(json);
      if (json->status == G2Z_OK && text.bytes < sizeof run->weights_before)
        run->weights_before[g2z_json_unescape(&text, (unsigned char *)run->weights_before)] = 0;
    } else if (g2z_json_is(&key, "epochs") && g2z_json_enter(json, '['))
      while (g2z_json_next(json, ']', NULL)) {
        if (g2zr_begin_epoch(run, 0) != G2Z_OK) json->status = G2Z_NO_MEMORY;
        else
          g2zr_get_doubles(json, g2zr_epoch_names, (double *)&run->epoch[run->epoch_count - 1],
                           G2Z_COUNT(g2zr_epoch_names));
      }
    else if (g2z_json_is(&key, "step_s") && g2z_json_enter(json, '['))
      while (g2z_json_next(json, ']', NULL)) {
        if (g2zr_grow_steps(run, steps) != G2Z_OK) json->status = G2Z_NO_MEMORY;
        else run->step_s[steps++] = g2z_json_number(json);
      }
    else g2z_json_skip(json);
  }
  if (json->status == G2Z_OK &&
      (!run->epoch_count || run->epoch[run->epoch_count - 1].steps != (double)steps))
    g2z_json_fail(json, "its last epoch lacks some of its steps");
  G2Z_TRY(g2z_json_close(json));
  run->epoch[run->epoch_count - 1].started = g2z_seconds() - run->sum.open_s;
  return G2Z_OK;
}

/* Writes a checkpoint of this step. A failed one leaves nothing. */
static g2z_status g2zr_save_state(g2z_run *run, const char *path) {
  g2z_status status = g2z_trainer_save_with(run->trainer, path, g2zr_put_note, g2zr_save_tokenizer,
                                            run);
  if (status == G2Z_OK) run->saved = run->step;
  else if (run->context->rank == 0)
    g2zr_remove_checkpoint(g2zr_checkpoint(run, run->step, ".partial").text);
  return status;
}

/* Saves, then removes the checkpoints before this one except the last `keep` - 1. */
static g2z_status g2zr_save(g2z_run *run, g2z_run_event *event) {
  const g2z_path saved = g2zr_checkpoint(run, run->step, "");
  double begin = g2z_seconds();
  /* Is the model as good as it was? The last step was applied, and the loss is at most a tenth (and
   * 0.1 nats) above its least value at an earlier checkpoint. */
  const double loss = run->sum.smooth_loss / run->sum.loss_weight, best = run->sum.best_loss;
  const int skipped = run->known.skipped == 1 && /* a spike is no sign that the model got worse */
                      !(run->known.grad_norm == 0 && isnan(run->known.loss));
  const int sound = !skipped && !(loss > 1.1 * best + 0.1);
  char was[32];
  snprintf(was, sizeof was, ", %.4f", best);
  if (!(best <= loss) && !isnan(loss)) run->sum.best_loss = loss;
  if (!sound && !run->unsound && run->context->rank == 0 && run->config.keep > 0)
    g2z_log(run->services, G2Z_LOG_WARNING, "%s: checkpoints before step %" PRId64 " stay until "
            "the loss is what it was%s", skipped ? "steps are skipped" : "the loss went up",
            run->step, isnan(best) ? "" : was);
  if (sound) run->unsound = 0;
  else if (!run->unsound) run->unsound = run->step;
  G2Z_TRY(g2zr_agree(run, g2zr_sync(run))); /* the note has the lengths of the logs */
  G2Z_TRY(g2zr_save_state(run, saved.text));
  double seconds = g2z_seconds() - begin;
  event->kind = G2Z_RUN_SAVED;
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | checkpoint %.4096s | %.2f s", run->step,
            run->steps, saved.text, seconds);
  run->sum.pause_s += seconds;
  if (run->metrics.file < 0) return G2Z_OK;
  G2Z_TRY(g2zr_write_note(run, NULL, 0, "save_ms", seconds));
  G2Z_TRY(g2zr_log(run, run->line));
  g2zr_report(run, 0);
  /* While the run is unsound, checkpoints from before that stay. The others are renamed to
   * unfinished ones first, so that nobody takes a half of one for a checkpoint. */
  int64_t old = run->config.keep > 0 ? run->step : -1;
  for (int i = 1; old >= 0; i++) {
    if (g2zr_latest(run, "", old, &old) != G2Z_OK) /* nothing is lost by what stays */
      g2z_log(run->services, G2Z_LOG_WARNING, "old checkpoints stay: %s", run->services->error);
    if (old < run->unsound || old < 0) break;
    if (i < run->config.keep) continue;
    const g2z_path path = g2zr_checkpoint(run, old, ""),
                   partial = g2zr_checkpoint(run, old, ".partial");
    g2zr_remove_checkpoint(partial.text);
    if (rename(path.text, partial.text) != 0) g2zr_stays(run, path.text);
    else if (!g2zr_remove_checkpoint(partial.text)) g2zr_stays(run, partial.text);
  }
  return G2Z_OK;
}

/* ----- opening ----- */

static g2z_loader_config g2zr_shards(const g2z_run *run, const char *glob, int accum,
                                     g2z_order order) {
  const g2z_train_config *train = &run->config.train;
  g2z_loader_config shards;
  memset(&shards, 0, sizeof shards);
  shards.glob = glob;
  shards.batch = train->batch;
  shards.seq = train->seq;
  shards.accum = accum;
  shards.rank = run->context->rank;
  shards.world = run->context->world;
  shards.vocab = train->model.vocab;
  shards.order = order;
  shards.seed = train->seed;
  return shards;
}

/* Computes the number of steps. It depends on the checkpoint's place in the data, and is the
 * schedule's horizon: the trainer needs it from the start. */
static g2z_status g2zr_count_steps(g2z_run *run) {
  g2z_run_config *config = &run->config;
  g2z_optimizer_config *optimizer = &config->train.optimizer;
  const g2z_checkpoint *from = &run->from;
  if (run->resume)
    G2Z_TRY(g2z_checkpoint_read(run->services, run->resume, run->train, &run->from));
  run->resumed = from->step;
  run->steps_per_epoch = 1;
  if (run->train) {
    run->steps_per_epoch = run->train->steps_per_epoch;
    run->train_sequences = run->train->sequences;
    run->epoch_ends = from->next.epoch > from->epoch; /* less than a step is left of it */
    if (config->epochs > 0) { /* with another global batch, what is left counts */
      optimizer->steps = from->step + (config->epochs - from->next.epoch) * run->steps_per_epoch -
                         from->next.step;
      if (optimizer->steps < from->step) optimizer->steps = from->step;
    }
    run->steps = optimizer->steps;
    if (config->max_train_steps > 0 && run->steps > config->max_train_steps)
      run->steps = config->max_train_steps;
  }
  g2z_loader_free(run->train);
  run->train = NULL;
  run->epochs = (run->steps + run->steps_per_epoch - 1) / run->steps_per_epoch;
  if (optimizer->warmup < 0) {
    optimizer->warmup = optimizer->steps / 10;
    if (optimizer->warmup > 1000) optimizer->warmup = 1000;
  }
  return G2Z_OK;
}

/* Ranks validate, save and sample together: a rank with other settings would wait for the others
 * until the watchdog ends the job. A setting is from 0 to `most`; -1: any value. */
#define G2ZR_STEPS_MOST INT64_C(1000000000000)
#define G2ZR_SETTING_LIST(X)                                                                      \
  X(epochs, epochs, 1 << 20)                                                                      \
  X(max_train_steps, max_train_steps, G2ZR_STEPS_MOST)                                            \
  X(val, val_glob != NULL, -1)                                                                    \
  X(max_val_steps, max_val_steps, G2ZR_STEPS_MOST)                                                \
  X(val_every, val_every, G2ZR_STEPS_MOST)                                                        \
  X(val_steps, val_steps, G2ZR_STEPS_MOST)                                                        \
  X(eval, eval.count, -1)                                                                         \
  X(eval_every, eval_every, G2ZR_STEPS_MOST)                                                      \
  X(sample_every, sample_every, G2ZR_STEPS_MOST)                                                  \
  X(run_dir, run_dir != NULL, -1)                                                                 \
  X(save_every, save_every, G2ZR_STEPS_MOST)                                                      \
  X(save_epochs, save_epochs, -1)                                                                 \
  X(save_weights, save_weights != NULL, -1)                                                       \
  X(vocab, vocab != NULL, -1)                                                                     \
  X(sample_tokens, sample_tokens, 1 << 20)                                                        \
  X(top_k, sampling.top_k, -1)                                                                    \
  X(sample_seed, sampling.seed, -1)                                                               \
  X(profile, profile, -1)

static g2z_status g2zr_check(g2z_run *run) {
  g2z_run_config *config = &run->config;
  g2z_optimizer_config *optimizer = &config->train.optimizer;
#define X(name, value, most) \
  if (most >= 0) G2Z_TRY(g2z_check_range(run->services, #name, (int64_t)(config->value), 0, most));
  G2ZR_SETTING_LIST(X)
#undef X
  G2Z_TRY(g2z_check_range(run->services, "keep", config->keep, 0, INT32_MAX));
  G2Z_TRY(g2z_sampling_check(run->services, &config->sampling));
  if (optimizer->min_lr < 0) optimizer->min_lr = 0.1f * optimizer->lr;
  if (!config->train.train_glob && !config->val_glob)
    G2Z_REFUSE(run->services, "there is nothing to do: name token shards to train on, or to "
               "validate on");
  g2z_train_config probe = config->train; /* warmup is settled once the steps are known */
  if (probe.optimizer.warmup < 0) probe.optimizer.warmup = 0;
  if (config->epochs > 0) probe.optimizer.steps = 1;
  g2z_plan *plan;
  G2Z_TRY(g2z_plan_create(run->services, &probe, run->context->device,
                          run->context->rank, run->context->world, &plan));
  g2z_plan_free(plan);
  const char *needs = config->save_every > 0 ? "save_every"
                      : config->save_epochs  ? "save_epochs"
                      : config->resume && strcmp(config->resume, "latest") == 0 ? "resume latest"
                                                                                : NULL;
  if (needs && !config->run_dir)
    G2Z_REFUSE(run->services, "%s needs a run_dir, where checkpoints stand", needs);
  if (config->profile && (!config->run_dir || config->train.graph == 1))
    G2Z_REFUSE(run->services, "profile needs %s", config->run_dir ? "graph off: nothing can be "
               "timed inside a graph" : "a run_dir, where profiles stand");
  if (config->profile) config->train.graph = 0;
  G2Z_TRY(g2zr_check_length(run->services, "run_dir", config->run_dir, sizeof run->found.run_dir));
  G2Z_TRY(g2zr_check_length(run->services, "save_weights", config->save_weights, 4001));
  if (config->resume && !*config->resume) /* a script's variable that is not set */
    G2Z_REFUSE(run->services, "resume is empty: name a checkpoint, or say \"latest\"");
  if (config->resume && !config->train.train_glob)
    G2Z_REFUSE(run->services, "a training is resumed with the token shards that it trains on: name "
               "them");
  return G2Z_OK;
}

/* Samples need a tokenizer whose ids the model has. Without a file the byte-level vocabulary stands
 * in, but only for a model of its size: another model's ids would decode to noise. */
static g2z_status g2zr_open_tokenizer(g2z_run *run) {
  g2z_run_config *config = &run->config;
  int vocab = config->train.model.vocab;
  int wanted = config->prompt || config->sample_every > 0 || config->vocab;
  if (!config->vocab && vocab != 257) {
    if (!wanted || config->sample_tokens == 0) {
      config->sample_tokens = 0;
      return G2Z_OK;
    }
    G2Z_REFUSE(run->services, "samples need the tokenizer file (vocab.bpe, merges.txt) that the "
               "shards were made with: the model has %d tokens, and only 257 could be bytes",
               vocab);
  }
  G2Z_TRY(g2z_tokenizer_create(run->services, config->vocab, &run->tokenizer));
  if (g2z_tokenizer_vocab(run->tokenizer) > vocab)
    G2Z_REFUSE(run->services, "%.300s has %d tokens, but the model only %d: give the model that "
               "vocabulary, or the tokenizer file that it was trained with", config->vocab,
               g2z_tokenizer_vocab(run->tokenizer), vocab);
  config->train.model.eot = g2z_tokenizer_eot(run->tokenizer);
  if (!wanted) config->sample_tokens = 0;
  /* The prompt, and room for what follows it. */
  const char *prompt = config->prompt && *config->prompt ? config->prompt : "<|endoftext|>";
  g2z_encoder *encoder;
  G2Z_TRY(g2z_encoder_create(run->services, run->tokenizer, &encoder));
  g2z_status status = g2z_encode(encoder, prompt, strlen(prompt), G2Z_ENCODE_ALLOW_SPECIAL,
                                 &run->sample);
  run->prompt = run->sample.count;
  if (status == G2Z_OK)
    status = g2z_tokens_reserve(run->services, &run->sample,
                                run->prompt + (size_t)config->sample_tokens);
  g2z_encoder_free(encoder);
  return status;
}

/* values[count] of each rank, one after the other; freed with g2z_release. */
static g2z_status g2zr_gather(g2z_run *run, const int64_t *values, size_t count, int64_t **all) {
  const size_t world = (size_t)run->context->world;
  void *memory;
  *all = NULL;
  G2Z_TRY(g2zr_agree(run, g2z_allocate(run->services, count * world, sizeof **all, &memory)));
  *all = (int64_t *)memory;
  return g2z_ranks_all_gather(run->context->ranks, values, count * sizeof *values, memory);
}

/* Entropy of the validation tokens' frequencies: the loss of a model that knows only these. */
static g2z_status g2zr_val_entropy(g2z_run *run) {
  const size_t vocab = (size_t)run->config.train.model.vocab;
  const int64_t tokens = (int64_t)run->config.train.batch * run->config.train.seq;
  int64_t *all = NULL, total = 0;
  void *memory;
  G2Z_TRY(g2z_allocate(run->services, vocab, sizeof(int64_t), &memory));
  int64_t *counts = (int64_t *)memory;
  g2z_status status = G2Z_OK;
  for (int64_t step = 0; step < run->val_steps && status == G2Z_OK; step++) {
    const int32_t *x, *y;
    status = g2z_loader_next(run->val, &x, &y);
    for (int64_t i = 0; status == G2Z_OK && i < tokens; i++)
      if (y[i] >= 0) counts[y[i]]++; /* -1 does not count */
  }
  status = g2zr_agree(run, status);
  if (status == G2Z_OK) status = g2zr_gather(run, counts, vocab, &all);
  for (size_t i = 0; i < vocab && all; i++) {
    counts[i] = 0;
    for (int rank = 0; rank < run->context->world; rank++)
      counts[i] += all[(size_t)rank * vocab + i];
    total += counts[i];
  }
  double sum = 0;
  for (size_t i = 0; i < vocab; i++)
    if (counts[i]) sum += (double)counts[i] * log((double)total / (double)counts[i]);
  run->val_entropy = sum / (double)total;
  run->val_tokens = total;
  if (status == G2Z_OK && total == 0) /* the loader checked that one in all shards does */
    status = g2z_fail(run->services, G2Z_BAD_ARGUMENT, "no token of the first %" PRId64 " "
                      "validation batches counts: raise --val-steps or --max-val-steps",
                      run->val_steps);
  g2z_release(run->services, all);
  g2z_release(run->services, memory);
  return status;
}

/* Rank 0: prints what the run will do. */
static void g2zr_introduce(g2z_run *run) {
  const g2z_plan *plan = run->trainer->plan;
  const g2z_train_config *train = &run->config.train;
  const g2z_model_config *model = &plan->model;
  const char *from = train->init_from;
  G2ZR_SAY(run, "model: %d layer%s, %d head%s, %d channels, %.2f M parameters", model->layers,
           g2zr_plural(model->layers), model->heads, g2zr_plural(model->heads), model->channels,
           (double)plan->parameters * 1e-6);
  G2ZR_SAY(run, "text: vocabulary %d, context %d", model->vocab, model->context);
  if (from) G2ZR_SAY(run, "weights: from %s", from);
  G2ZR_SAY(run, "device: %s, %s, %.2f GiB in the plan", g2z_device_text(plan->device),
           g2z_dtype_text(plan->dtype), (double)plan->bytes_total / 1073741824.0);
  if (run->steps > 0) {
    G2ZR_SAY(run, "training: %" PRId64 " step%s, %.2f epochs of %" PRId64 " step%s", run->steps,
             g2zr_plural(run->steps), (double)run->steps / (double)run->steps_per_epoch,
             run->steps_per_epoch, g2zr_plural(run->steps_per_epoch));
    G2ZR_SAY(run, "step: batch %d x sequence %d x micro-steps %d x ranks %d = %" PRId64 " tokens",
             plan->batch, plan->seq, plan->accum, plan->world, run->tokens_per_step);
    G2ZR_SAY(run, "schedule: %s, lr %g to %g, %" PRId64 " step%s of warm-up",
             g2z_schedule_text(train->optimizer.schedule), (double)train->optimizer.lr,
             (double)train->optimizer.min_lr, train->optimizer.warmup,
             g2zr_plural(train->optimizer.warmup));
    if (train->optimizer.warmup > run->steps)
      g2z_log(run->services, G2Z_LOG_WARNING, "the warm-up of %" PRId64 " steps is longer than the "
              "run of %" PRId64 ": the learning rate never reaches %g", train->optimizer.warmup,
              run->steps, (double)train->optimizer.lr);
  }
  if (run->val)
    G2ZR_SAY(run, "validation: %" PRId64 " batch%s, %" PRId64 " tokens, unigram entropy %.4f nats",
             run->val_steps, run->val_steps == 1 ? "" : "es", run->val_tokens, run->val_entropy);
  if (run->config.run_dir) G2ZR_SAY(run, "run directory: %s", run->config.run_dir);
  if (run->resume) {
    int64_t length;
    const char *flag = g2zr_length(run, &length);
    G2ZR_SAY(run, "resumed after step %" PRId64 ", from %s, in %.2f s%s", run->resumed, run->resume,
             run->resume_s, run->found.own && !run->from.note ? "; it has no sums of the steps "
             "before it: times and mean losses begin here" : "");
    if (run->steps <= run->resumed)
      G2ZR_SAY(run, "no step is left: the run has %" PRId64 " step%s, and the checkpoint is of "
               "step %" PRId64 "; to continue, give more than %s %" PRId64, run->steps,
               g2zr_plural(run->steps), run->resumed, flag, length);
  } else if (run->config.resume)
    G2ZR_SAY(run, "no checkpoint in %s: starts from the beginning", run->config.run_dir);
}

/* Completes the figures of the last epoch. If it ended before a resume it keeps its time. */
static void g2zr_settle_epoch(g2z_run *run) {
  g2zr_epoch *epoch = &run->epoch[run->epoch_count - 1];
  epoch->p50_s = g2z_percentile(run->step_s, (size_t)epoch->steps, 50);
  epoch->p95_s = g2z_percentile(run->step_s, (size_t)epoch->steps, 95);
  if (epoch->wall_s == 0) epoch->wall_s = g2z_seconds() - epoch->started;
}

/* ----- resuming ----- */

/* How much of metrics.jsonl stays if no length is known: all lines up to the checkpoint's step,
 * except lines of work that is due again. A torn last line goes. A damaged line before it is an
 * error: its step is unknown. */
static g2z_status g2zr_keep_steps(g2z_run *run, const char *path, const char *text, size_t bytes,
                                  int64_t *kept) {
  const int due = (int)run->sum.due;
  size_t next = 0;
  *kept = 0;
  for (int number = 1, torn = 0; next < bytes; number++) {
    g2z_metrics_line line;
    g2z_status status = g2z_metrics_read(run->services, path, text, bytes, &next, number, &line,
                                         &torn);
    if (torn) g2z_log(run->services, G2Z_LOG_WARNING, "%s, and is cut off", run->services->error);
    if (torn) break;
    G2Z_TRY(status);
    const int again = (due & G2ZR_DUE_VALIDATION && !isnan(line.val_ms)) ||
                      (due & G2ZR_DUE_EVALUATION && line.eval >= run->sum.evaluated) ||
                      (due & G2ZR_DUE_SAMPLE && !isnan(line.sample_ms)) ||
                      (due & G2ZR_DUE_EPOCH_END && !isnan(line.epoch_ms));
    if (line.metrics.step > run->resumed || (line.metrics.step == run->resumed && again)) break;
    *kept = (int64_t)next;
  }
  return G2Z_OK;
}

/* How much of a log stays: its length when the checkpoint was saved. A file that has changed since
 * is cut after the checkpoint's step, or stays whole if it has no steps. */
static g2z_status g2zr_keep(g2z_run *run, const char *name, double bytes, int steps,
                            int64_t *kept) {
  const g2z_path path = g2zr_in(run, name);
  char *text = NULL;
  size_t length = 0;
  int there = 0;
  *kept = 0;
  if (!run->found.own) return G2Z_OK;
  g2z_status status = g2zr_has(run->services, run->config.run_dir, name, &there);
  if (there)
    status = g2z_read_file(run->services, path.text, (size_t)1 << 40, &text, &length);
  /* Unchanged: a line ends there. If lines have `steps`, its step is not after the checkpoint's. */
  const size_t end = bytes >= 1 && bytes <= (double)length ? (size_t)bytes : 0;
  size_t line = end ? end - 1 : 0;
  int64_t step = end && text[end - 1] == '\n' ? -1 : INT64_MAX;
  while (line > 0 && text[line - 1] != '\n') line--;
  if (steps && step < 0) sscanf(text + line, "{\"step\": %" SCNd64, &step);
  if (run->from.note && step <= run->resumed) *kept = (int64_t)bytes;
  else {
    if (run->from.note)
      g2z_log(run->services, G2Z_LOG_WARNING, "%s is not as it was when step %" PRId64 " was saved",
              path.text, run->resumed);
    *kept = (int64_t)length;
    if (status == G2Z_OK && steps)
      status = g2zr_keep_steps(run, path.text, text, length, kept);
  }
  g2z_release(run->services, text);
  return status;
}

/* Rank 0: the checkpoint that run_dir's run began with, by its resumed_from; "": none. */
static g2z_status g2zr_find_origin(g2z_run *run, char origin[PATH_MAX]) {
  const g2z_path path = g2zr_in(run, "metrics.jsonl");
  char *text = NULL;
  size_t bytes = 0;
  g2z_json json;
  g2z_json_text key, value;
  memset(&value, 0, sizeof value);
  origin[0] = 0;
  int there;
  G2Z_TRY(g2z_is_there(run->services, path.text, &there));
  if (!there) return G2Z_OK;
  G2Z_TRY(g2z_read_file(run->services, path.text, (size_t)1 << 40, &text, &bytes));
  g2z_json_open(&json, run->services, path.text, text, strcspn(text, "\n"));
  if (g2z_json_enter(&json, '{'))
    while (g2z_json_next(&json, '}', &key)) {
      if (g2z_json_is(&key, "resumed_from")) value = g2z_json_string(&json);
      else g2z_json_skip(&json);
    }
  if (g2z_json_close(&json) == G2Z_OK && value.at && value.bytes < PATH_MAX) /* it was synced */
    origin[g2z_json_unescape(&value, (unsigned char *)origin)] = 0;
  g2z_release(run->services, text);
  if (origin[0]) G2Z_TRY(g2z_is_there(run->services, origin, &there));
  if (!origin[0] || there) return G2Z_OK;
  return g2z_fail(run->services, G2Z_IO, "the run in %.200s began with %.300s, which is not there "
                  "any more, and has no checkpoint of its own: put that back, or choose another "
                  "run directory", run->config.run_dir, origin);
}

/* Closes everything that g2zr_load opened. */
static void g2zr_close(g2z_run *run) {
  g2z_trainer_free(run->trainer);
  g2z_loader_free(run->val);
  g2z_loader_free(run->train);
  for (int i = 0; i < G2Z_TEXTS; i++) g2z_eval_free(run->eval[i]);
  memset(run->eval, 0, sizeof run->eval);
  g2z_tokenizer_free(run->tokenizer);
  g2z_tokens_free(&run->sample);
  g2z_release(run->services, run->from.note);
  run->trainer = NULL;
  run->val = run->train = NULL;
  run->tokenizer = NULL;
  run->from.note = NULL;
}

/* Rank 0: finds the checkpoint to resume from, and whether run_dir's own run continues. */
static g2z_status g2zr_choose(g2z_run *run) {
  const char *resume = run->config.resume, *run_dir = run->config.run_dir;
  struct stat here, there;
  g2z_path path;
  if (!resume) return G2Z_OK;
  snprintf(path.text, sizeof path.text, "%s", resume);
  if (strcmp(resume, "latest") == 0) {
    G2Z_TRY(g2zr_latest(run, "", run->before, &run->before));
    run->found.continues = 1; /* even if nothing was saved: then it begins again */
    run->found.own = run->before >= 0;
    if (run->found.own) path = g2zr_checkpoint(run, run->before, "");
    else if (!run->passed_over[0]) G2Z_TRY(g2zr_find_origin(run, path.text));
    else
      return g2z_fail(run->services, G2Z_FORMAT, "no checkpoint in %.200s is whole (%s). %s. Copy "
                      "one there again, or remove them to begin anew", run_dir, run->passed_over,
                      run->newest);
  } else {
    run->found.continues = run_dir && stat(g2z_path_in(resume, "..").text, &there) == 0 &&
                           stat(run_dir, &here) == 0 && here.st_dev == there.st_dev &&
                           here.st_ino == there.st_ino;
    run->found.own = run->found.continues;
  }
  G2Z_TRY(g2zr_check_length(run->services, "the checkpoint's path", path.text,
                            sizeof run->found.resume));
  memcpy(run->found.resume, path.text, strlen(path.text) + 1);
  return G2Z_OK;
}

/* Rank 0: refuses a run_dir whose files this run would replace without continuing from them: a run
 * that ended without a checkpoint, another run, checkpoints after the one that is resumed. */
static g2z_status g2zr_check_directory(g2z_run *run) {
  static const char *const ends[] = {"weights/model.safetensors", "RUN_COMPLETE.txt"};
  const char *run_dir = run->config.run_dir;
  char name[32], text[1400];
  int64_t latest;
  int there, is_run;
  if (!run_dir) return G2Z_OK;
  G2Z_TRY(g2zr_latest(run, "", INT64_MAX, &latest));
  G2Z_TRY(g2zr_has(run->services, run_dir, "metrics.jsonl", &is_run)); /* a run makes it first */
  is_run |= latest >= 0;
  for (size_t i = 0; latest < 0 && i < G2Z_COUNT(ends); i++) {
    G2Z_TRY(g2zr_has(run->services, run_dir, ends[i], &there));
    if (there)
      G2Z_REFUSE(run->services, "%.200s holds a run already, which has ended and saved no "
                 "checkpoint (%s): choose another --run-dir, or remove it%s%s", run_dir, ends[i], i
                 ? "" : ". To train its weights further: ", i ? "" :
                 g2zr_further(run, g2z_path_in(run_dir, "weights").text, text));
  }
  snprintf(name, sizeof name, G2ZR_CHECKPOINT, latest);
  const char *const traces[] = {"RUN_COMPLETE.txt", "training_metrics.json", "metrics.jsonl",
                                "train.log", "sample.txt", "report.html", name};
  for (size_t i = 0; !(run->found.continues && is_run) && i < G2Z_COUNT(traces); i++) {
    G2Z_TRY(g2zr_has(run->services, run_dir, traces[i], &there));
    if (there && !is_run)
      G2Z_REFUSE(run->services, "%.200s is no run directory and holds a %s, which a run would "
                 "replace: choose another --run-dir", run_dir, traces[i]);
    if (there)
      G2Z_REFUSE(run->services, "%.200s holds a run already (%s): a new run needs another "
                 "--run-dir. To continue it: %s", run_dir, traces[i],
                 g2zr_command(run, run_dir, " --resume latest", text));
  }
  if (!run->found.continues || latest <= run->resumed || run->passed_over[0]) return G2Z_OK;
  G2Z_REFUSE(run->services, "%.200s holds checkpoints after step %" PRId64 ", the last of step %"
             PRId64 ": remove those, choose another --run-dir, or continue from that: %s", run_dir,
             run->resumed, latest, g2zr_command(run, run_dir, " --resume latest", text));
}

G2Z_API g2z_status g2z_lock_directory(g2z_services *services, const char *path, int *lock) {
  G2Z_RETRY(*lock, open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (*lock < 0) return g2z_fail_file(services, errno, "read the directory", path);
  if (flock(*lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return G2Z_OK;
  close(*lock);
  *lock = -1;
  G2Z_REFUSE(services, "another program is at work in %s: wait until it ends, or choose another "
             "directory", path);
}

/* Rank 0, as soon as there is a run directory: two runs in one would remove each other's files. */
static g2z_status g2zr_lock(g2z_run *run) {
  const char *directory = run->config.run_dir;
  int there;
  if (!directory || run->lock >= 0) return G2Z_OK;
  G2Z_TRY(g2z_is_there(run->services, directory, &there));
  if (!there) return G2Z_OK;
  return g2z_lock_directory(run->services, directory, &run->lock);
}

/* Rank 0. If the run continues, what it wrote after the checkpoint is cut off. */
static g2z_status g2zr_open_files(g2z_run *run) {
  static const char *const names[] = {
      "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
      "merges.txt", "vocab.json", "tokenizer.json", "tokenizer_config.json"};
  const char *weights = run->config.save_weights, *run_dir = run->config.run_dir;
  int64_t metrics, log;
  int there;
  if (run->context->rank != 0) return G2Z_OK;
  /* The one rule for save_weights: a model that lies there is replaced only by the run that wrote
   * it. A run knows its own by its directory, or by the name in its checkpoint. */
  if (weights) {
    const size_t length = run_dir ? strlen(run_dir) : 0;
    G2Z_TRY(g2zr_has(run->services, weights, "trainer_state.json", &there));
    if (there)
      G2Z_REFUSE(run->services, "%.400s is a checkpoint, whose weights belong to its other files: "
                 "save these in another directory", weights);
    G2Z_TRY(g2z_make_directory(run->services, weights)); /* not after hours of training */
    if (!realpath(weights, run->weights))
      return g2z_fail_file(run->services, errno, "find the path of", weights);
    int own = run->found.continues && strncmp(weights, run_dir, length) == 0 &&
              weights[length] == '/';
    own |= run->found.own && strcmp(run->weights, run->weights_before) == 0;
    for (size_t i = 0; i < G2Z_COUNT(names) && !own; i++) {
      G2Z_TRY(g2zr_has(run->services, weights, names[i], &there));
      if (there)
        G2Z_REFUSE(run->services, "%.300s holds a model already (%s), which this run did not "
                   "write: name another directory with --save-weights, or remove that model",
                   weights, names[i]);
    }
    g2z_writer *writer; /* can it be written there? */
    G2Z_TRY(g2z_writer_create(run->services, g2z_path_in(weights, "model.safetensors").text,
                              &writer));
    g2z_writer_free(writer);
  }
  if (!run_dir) return G2Z_OK;
  G2Z_TRY(g2z_make_directory(run->services, run_dir));
  G2Z_TRY(g2zr_lock(run));
  G2Z_TRY(g2zr_keep(run, "metrics.jsonl", run->sum.metrics_bytes, 1, &metrics));
  G2Z_TRY(g2zr_keep(run, "train.log", run->sum.log_bytes, 0, &log));
  G2Z_TRY(g2zr_stream_open(run, &run->metrics, "metrics.jsonl", metrics));
  G2Z_TRY(g2zr_stream_open(run, &run->log, "train.log", log));
  char *rest, *line = strtok_r(run->early, "\n", &rest);
  for (; line; line = strtok_r(NULL, "\n", &rest)) G2Z_TRY(g2zr_log(run, line));
  if (!run->resume || run->found.own) return G2Z_OK;
  /* The run begins with another run's checkpoint. Its first line of metrics.jsonl names that one:
   * --resume latest takes it until this run has a checkpoint of its own. */
  char path[PATH_MAX];
  void *member;
  if (!realpath(run->resume, path))
    return g2z_fail_file(run->services, errno, "find the path of", run->resume);
  G2Z_TRY(g2z_allocate(run->services, strlen(path) + 16, 6, &member));
  g2zr_member("resumed_from", path, (char *)member);
  g2z_status status = g2zr_put_line(run, 0, NULL, NULL, (char *)member);
  g2z_release(run->services, member);
  return status == G2Z_OK ? g2zr_sync(run) : status;
}

/* A rank that does not see rank 0's files could not save with it, and fails before the training. */
static g2z_status g2zr_check_shared(const g2z_run *run) {
  const char *const made[] = {run->config.run_dir, run->config.save_weights};
  int there;
  for (int i = 0; i < 2; i++) {
    if (!made[i] || run->context->rank == 0) continue;
    const g2z_path path = g2z_path_in(made[i], "%s", i ? "" : "metrics.jsonl");
    G2Z_TRY(g2z_is_there(run->services, path.text, &there));
    if (!there)
      return g2z_fail(run->services, G2Z_IO, "rank %d does not see %s, which rank 0 made: choose a "
                      "directory on a file system that all ranks share", run->context->rank,
                      path.text);
  }
  return G2Z_OK;
}

/* Rank 0, if the run continues: removes the traces of its last end. */
static g2z_status g2zr_forget_end(g2z_run *run) {
  G2Z_TRY(g2zr_tell_failure(run, &run->held));
  if (run->context->rank != 0 || !run->found.continues) return G2Z_OK;
  /* A save or a removal that was killed leaves a directory "step-N.partial". */
  int64_t step = INT64_MAX;
  while (g2zr_latest(run, ".partial", step, &step) == G2Z_OK && step >= 0) {
    const g2z_path path = g2zr_checkpoint(run, step, ".partial");
    if (!g2zr_remove_checkpoint(path.text)) g2zr_stays(run, path.text);
  }
  /* Checkpoints that were passed over get names that are not searched. */
  for (step = INT64_MAX; run->passed_over[0];) {
    G2Z_TRY(g2zr_latest(run, "", step, &step));
    if (step <= run->resumed) break;
    const g2z_path path = g2zr_checkpoint(run, step, ""),
                   aside = g2zr_checkpoint(run, step, ".damaged");
    if (rename(path.text, aside.text) != 0)
      return g2z_fail_file(run->services, errno, "set aside a damaged checkpoint as", aside.text);
  }
  unlink(g2zr_in(run, "RUN_COMPLETE.txt").text);
  unlink(g2zr_in(run, "training_metrics.json").text);
  return G2Z_OK;
}

#define G2ZR_BYTES UINT64_C(0xcbf29ce484222325) /* g2z_tokenizer_hash of the 256 bytes, */
#define G2ZR_GPT2 UINT64_C(0x4aaeec9c912d3e56)  /* and of GPT-2's merges */

/* The part of opening that each rank does alone. */
static g2z_status g2zr_open_alone(g2z_run *run) {
  g2z_run_config *config = &run->config;
  const g2z_train_config *train = &config->train;
  const char *shards = train->train_glob ? train->train_glob : config->val_glob;
  run->tokens_per_step = (int64_t)train->batch * train->seq * train->accum * run->context->world;
  if (train->train_glob) {
    g2z_loader_config loader = g2zr_shards(run, train->train_glob, train->accum,
                                           G2Z_ORDER_SHUFFLED);
    G2Z_TRY(g2z_loader_create(run->services, &loader, &run->train));
  }
  G2Z_TRY(g2zr_open_tokenizer(run));
  if (config->val_glob) {
    g2z_loader_config loader = g2zr_shards(run, config->val_glob, 1, G2Z_ORDER_FILE);
    G2Z_TRY(g2z_loader_create(run->services, &loader, &run->val));
    run->val_steps = run->val->steps_per_epoch;
    if (config->val_steps > 0 && run->val_steps > config->val_steps)
      run->val_steps = config->val_steps;
    if (config->max_val_steps > 0 && run->val_steps > config->max_val_steps)
      run->val_steps = config->max_val_steps;
  }
  /* Ids mean other texts in another vocabulary: shards and tokenizer must share one. Shards that
   * name no vocabulary, such as other programs', pass. Without --vocab, a model with GPT-2's number
   * of tokens takes GPT-2's shards alone. */
  const g2z_loader *loaders[] = {run->train, run->val};
  g2z_model_config *model = &config->train.model;
  const char *known = config->vocab ? config->vocab : "the vocabulary of 256 bytes";
  char word[400];
  uint64_t hash = run->tokenizer ? g2z_tokenizer_hash(run->tokenizer) : 0;
  if (!hash && model->vocab_hash) {
    hash = model->vocab_hash;
    known = train->init_from ? train->init_from : "the model";
  }
  for (int i = 0; i < 2; i++) {
    if (!loaders[i] || !loaders[i]->vocab_hash || loaders[i]->vocab_hash == hash) continue;
    if (hash)
      G2Z_REFUSE(run->services, "%.300s was made with another vocabulary than %.300s: %smake the "
                 "shards again with ./prepare_data --vocab %s", loaders[i]->vocab_shard, known,
                 train->init_from ? "" : "give --vocab the file that they were made with, or ",
                 train->init_from && run->tokenizer && config->vocab ?
                 g2z_shell_word(config->vocab, word, sizeof word) : "FILE");
    hash = loaders[i]->vocab_hash;
    known = loaders[i]->vocab_shard;
    if (run->tokenizer || (hash != G2ZR_BYTES && (model->vocab != 50257 || hash == G2ZR_GPT2)))
      continue;
    G2Z_REFUSE(run->services, "%.300s holds tokens of %s, but the model's vocabulary has %d: give "
               "--vocab the file that the shards were made with%s", known, hash == G2ZR_BYTES ? "a "
               "vocabulary of 257, single bytes" : "a vocabulary other than GPT-2's", model->vocab,
               hash == G2ZR_BYTES ? ", or --vocab-size 257" : "");
  }
  model->vocab_hash = hash;
  /* Files to score: a row is never longer than what the trainer has activations for. */
  g2z_model_config rows = *model;
  const int64_t room = (int64_t)train->batch * train->seq;
  if (room < rows.context) rows.context = (int)room;
  for (int i = 0; i < config->eval.count; i++)
    G2Z_TRY(g2z_eval_open(run->services, &rows, run->tokenizer, config->eval.text[i],
                          &run->eval[i]));
  /* The dataset's name: "openwebtext" from "data/openwebtext_train_*.bin". */
  const char *slash = shards ? strrchr(shards, '/') : NULL;
  const char *name = slash ? slash + 1 : shards ? shards : "", *split = strstr(name, "_train");
  size_t length = strcspn(name, "*?[.");
  if (!split) split = strstr(name, "_val");
  if (split && (size_t)(split - name) < length) length = (size_t)(split - name);
  while (length > 0 && strchr("_-", name[length - 1])) length--;
  if (config->dataset_name) name = config->dataset_name;
  else if (!length) name = "custom";
  if (config->dataset_name || !length) length = strlen(name);
  snprintf(run->dataset, sizeof run->dataset, "%.*s", (int)length, name);
  return G2Z_OK;
}

/* Opens everything that depends on the checkpoint. *damaged: the checkpoint is not whole. */
static g2z_status g2zr_load(g2z_run *run, int *damaged) {
  g2z_ranks *ranks = run->context->ranks;
  const int first = run->context->rank == 0;
  const char *run_dir = run->config.run_dir;
  *damaged = 0;
  /* Rank 0 decides on the run directory and the checkpoint for all ranks. */
  g2z_status status = G2Z_OK;
  memset(&run->found, 0, sizeof run->found);
  snprintf(run->found.run_dir, sizeof run->found.run_dir, "%s", run_dir ? run_dir : "");
  if (first && status == G2Z_OK) status = g2zr_lock(run);
  if (first && status == G2Z_OK) status = g2zr_choose(run);
  G2Z_TRY(g2z_ranks_agree(ranks, status));
  G2Z_TRY(g2z_ranks_broadcast(ranks, &run->found, sizeof run->found));
  if (run_dir) run->config.run_dir = run->found.run_dir;
  run->resume = run->found.resume[0] ? run->found.resume : NULL;
  if (run->resume) run->config.train.init_from = NULL; /* the weights come from the checkpoint */
  G2Z_TRY(g2zr_agree(run, g2zr_open_alone(run)));
  status = g2zr_agree(run, g2zr_count_steps(run));
  *damaged = status == G2Z_FORMAT;
  G2Z_TRY(status);
  G2Z_TRY(g2zr_agree(run, first ? g2zr_check_directory(run) : G2Z_OK));
  if (run->val) {
    char text[32];
    snprintf(text, sizeof text, "hash %016" PRIx64, run->val->data);
    G2Z_TRY(g2z_ranks_same(ranks, "validation data", text));
    G2Z_TRY(g2zr_val_entropy(run));
  }
  G2Z_TRY(g2z_trainer_create(run->context, &run->config.train, &run->trainer));
  if (!run->resume) return G2Z_OK;
  double begin = g2z_seconds();
  status = g2z_trainer_load(run->trainer, run->resume);
  *damaged = status == G2Z_FORMAT;
  run->resume_s = g2z_seconds() - begin;
  return status;
}

/* FLOP/s of dense products in `dtype` with fp32 sums, by NVIDIA's data sheets: fp32 outside of
 * tensor cores. The name is CUDA's whole name of the GPU: variants of one chip differ in clock and
 * multiprocessors (SXM, PCIe, NVL), and a part of a GPU (MIG, vGPU) is slower. NaN: not known. */
static double g2zr_peak_flops(const char *name, g2z_dtype dtype) {
  static const struct {
    const char *name;
    double half, tf32, single; /* TFLOP/s */
  } known[] = {
      {"NVIDIA GB200",              2500, 1250, 80},
      {"NVIDIA B200",               2250, 1125, 75},
      {"NVIDIA GH200 480GB",        989.4, 494.7, 66.9},
      {"NVIDIA GH200 120GB",        989.4, 494.7, 66.9},
      {"NVIDIA GH200 144G HBM3e",   989.4, 494.7, 66.9},
      {"NVIDIA H200",               989.4, 494.7, 66.9},
      {"NVIDIA H200 NVL",           835.5, 417.7, 60},
      {"NVIDIA H100 80GB HBM3",     989.4, 494.7, 66.9},
      {"NVIDIA H100 NVL",           835.5, 417.7, 60},
      {"NVIDIA H100 PCIe",          756.5, 378, 51.2},
      {"NVIDIA A100-SXM4-40GB",     312, 156, 19.5},
      {"NVIDIA A100-SXM4-80GB",     312, 156, 19.5},
      {"NVIDIA A100-PCIE-40GB",     312, 156, 19.5},
      {"NVIDIA A100 80GB PCIe",     312, 156, 19.5},
      {"NVIDIA A10G",               70, 35, 31.2},
      {"NVIDIA L40S",               362, 183, 91.6},
      {"NVIDIA L4",                 121, 60, 30.3},
      {"Tesla T4",                  65, NAN, 8.1},
  };
  for (size_t i = 0; i < G2Z_COUNT(known); i++)
    if (strcmp(name, known[i].name) == 0)
      return 1e12 * (dtype == G2Z_FP32   ? known[i].single
                     : dtype == G2Z_TF32 ? known[i].tf32
                                         : known[i].half);
  return NAN;
}

/* Files come last: a failure before them leaves none. */
static g2z_status g2zr_open(g2z_run *run) {
  struct utsname name;
  memset(&name, 0, sizeof name);
  uname(&name);
  g2z_utc_now(run->started_utc);
  snprintf(run->id, sizeof run->id, "%s_%.64s_%ld", run->started_utc, name.nodename,
           (long)getpid());
  run->started = g2z_seconds();
  G2Z_TRY(g2zr_agree(run, g2zr_check(run)));
  const g2z_run_config config = run->config; /* the user's */
  char text[1024];
  int used = snprintf(text, sizeof text, "temperature=%.9g\ntop_p=%.9g\n",
                      (double)config.sampling.temperature, (double)config.sampling.top_p);
#define X(name, value, most)                                                         \
  used += snprintf(text + used, sizeof text - (size_t)used, #name "=%" PRId64 "\n", \
                   (int64_t)(run->config.value));
  G2ZR_SETTING_LIST(X)
#undef X
  G2Z_TRY(g2z_ranks_same(run->context->ranks, "config", text));
  G2Z_TRY(g2z_ranks_same(run->context->ranks, "prompt", config.prompt ? config.prompt : ""));
  /* "latest" passes over a damaged checkpoint: the run opens again with an earlier one. It does not
   * pass over a checkpoint that cannot be read or has another version: that may be whole. */
  g2z_status status;
  int damaged;
  while ((status = g2zr_load(run, &damaged)) != G2Z_OK) {
    const size_t passed = strlen(run->passed_over);
    if (!damaged || !run->found.own || strcmp(config.resume, "latest") != 0) return status;
    if (run->context->rank == 0)
      g2z_log(run->services, G2Z_LOG_WARNING, "%.200s is passed over: %.500s", run->resume,
              run->services->error);
    snprintf(run->passed_over + passed, sizeof run->passed_over - passed, "%sstep %" PRId64,
             passed ? ", " : "", run->before);
    if (!passed) snprintf(run->newest, sizeof run->newest, "%.299s", run->services->error);
    g2zr_close(run);
    run->config = config;
  }
  if (config.profile) G2Z_TRY(g2zr_agree(run, g2z_device_time_spans(run->trainer->device)));
  run->peak_flops = run->context->world *
                    g2zr_peak_flops(run->trainer->device->info.name, config.train.dtype);
  run->sum.best_val_loss = run->sum.best_loss = NAN;
  const int own = run->found.own;
  status = own && run->from.note ? g2zr_restore(run) : g2zr_begin_epoch(run, 0);
  G2Z_TRY(g2zr_agree(run, status));
  /* The trainer is at the checkpoint's step. Due is the work that the saving run left there, and
   * the work that this run adds. */
  const int every = G2ZR_DUE_VALIDATION | G2ZR_DUE_EVALUATION | G2ZR_DUE_SAMPLE;
  const int end = G2ZR_DUE_EPOCH_END | G2ZR_DUE_FINISH;
  run->saved = own ? run->resumed : -1;
  run->step = run->resumed;
  run->due = own ? (int)run->sum.due : run->steps == 0 ? every | end : 0;
  run->epoch_ends |= own && (run->due & G2ZR_DUE_EPOCH_END) != 0;
  if (own && run->sum.evaluated < config.eval.count) run->evaluated = (int)run->sum.evaluated;
  if (run->resume && run->epoch_ends)
    run->due |= G2ZR_DUE_VALIDATION | G2ZR_DUE_EPOCH_END |
                (config.save_epochs && !own ? G2ZR_DUE_SAVE : 0);
  if (run->resume && run->steps <= run->resumed)
    run->due |= end | (config.save_weights ? G2ZR_DUE_WEIGHTS : 0);
  if (!run->val) run->due &= ~G2ZR_DUE_VALIDATION;
  if (!config.eval.count) run->due &= ~G2ZR_DUE_EVALUATION;
  if (!run->config.sample_tokens) run->due &= ~G2ZR_DUE_SAMPLE;
  g2z_loader *loader = run->trainer->loader;
  if (loader) run->epoch_step = loader->position.step;
  if (run->resume) {
    run->epoch[run->epoch_count - 1].index = (double)(loader->position.epoch - run->epoch_ends);
    run->known.step = run->resumed;
    run->known.tokens = g2z_trainer_tokens(run->trainer);
  }
  G2Z_TRY(g2zr_agree(run, g2zr_open_files(run)));
  G2Z_TRY(g2zr_agree(run, g2zr_check_shared(run)));
  if (run->context->rank == 0) g2zr_introduce(run);
  return g2zr_agree(run, g2zr_forget_end(run));
}

G2Z_API g2z_status g2z_run_create(g2z_context *context, const g2z_run_config *config,
                                  g2z_run **out) {
  *out = NULL;
  void *memory;
  g2z_services *services = context->services;
  G2Z_TRY(g2z_allocate(services, 1, sizeof(g2z_run), &memory));
  g2z_run *run = (g2z_run *)memory;
  run->services = services;
  run->context = context;
  run->config = *config;
  run->lock = run->metrics.file = run->log.file = -1;
  run->before = INT64_MAX;
  run->val_entropy = NAN;
  if (context->rank == 0) {
    services->also = g2zr_hear;
    services->listener = run;
  }
  g2z_status status = g2zr_open(run);
  if (status != G2Z_OK) { /* empty streams would pass for a run */
    if (run->metrics.file >= 0 && !run->found.continues) unlink(run->metrics.path.text);
    if (run->log.file >= 0 && !run->found.continues) unlink(run->log.path.text);
    g2z_run_free(run);
  } else *out = run;
  return status;
}

G2Z_API void g2z_run_free(g2z_run *run) {
  if (!run) return;
  if (run->services->listener == run) run->services->also = NULL;
  if (run->trainer) rmdir(run->weights); /* if it is empty, as rank 0 made it at the start */
  g2zr_close(run);
  if (run->metrics.file >= 0) close(run->metrics.file);
  if (run->log.file >= 0) close(run->log.file);
  g2z_events_free(run->events);
  if (run->lock >= 0) close(run->lock);
  g2z_release(run->services, run->sample_text);
  g2z_release(run->services, run->step_s);
  g2z_release(run->services, run->epoch);
  g2z_release(run->services, run);
}

G2Z_API g2z_trainer *g2z_run_trainer(g2z_run *run) { return run->trainer; }

G2Z_API void g2z_run_request_stop(g2z_run *run, int signal) {
  __atomic_store_n(&run->stop_signal, (int64_t)signal, __ATOMIC_RELAXED);
  g2z_trainer_request_stop(run->trainer);
}

/* ----- the crank ----- */

/* The status of a step or of a flush. If the report has a finished step, that is reported first
 * and a failure waits for the next call. */
static g2z_status g2zr_after(g2z_run *run, g2z_status status, const g2z_report *report) {
  run->broken |= status != G2Z_OK && status != G2Z_STOPPED;
  if (status == G2Z_OK || report->loss_step <= run->known.step) return status;
  g2zr_note_failure(run, &run->ending, status);
  return G2Z_OK;
}

static int g2zr_is_every(int64_t steps, int64_t step) { return steps > 0 && step % steps == 0; }

/* Enqueues a step; notes its time and what is due after it. */
static g2z_status g2zr_train(g2z_run *run, g2z_report *report) {
  const g2z_run_config *config = &run->config;
  double begin = g2z_seconds();
  G2Z_TRY(g2z_trainer_step(run->trainer, report));
  int64_t step = ++run->step;
  run->step_s_of[step % 2] = g2z_seconds() - begin;
  run->epoch_step = (run->epoch_step + 1) % run->steps_per_epoch;
  run->epoch_ends = run->epoch_step == 0;
  const int last = step == run->steps, epoch_end = last || run->epoch_ends;
  if (run->val && (epoch_end || g2zr_is_every(config->val_every, step)))
    run->due |= G2ZR_DUE_VALIDATION;
  if (config->eval.count > 0 && (last || g2zr_is_every(config->eval_every, step)))
    run->due |= G2ZR_DUE_EVALUATION;
  if (config->sample_tokens > 0 && (last || g2zr_is_every(config->sample_every, step)))
    run->due |= G2ZR_DUE_SAMPLE;
  if (epoch_end) run->due |= G2ZR_DUE_EPOCH_END;
  if ((config->save_every > 0 && last) || g2zr_is_every(config->save_every, step) ||
      (config->save_epochs && epoch_end))
    run->due |= G2ZR_DUE_SAVE;
  if (last) run->due |= G2ZR_DUE_FINISH | (config->save_weights ? G2ZR_DUE_WEIGHTS : 0);
  return G2Z_OK;
}

G2Z_API double g2z_flops_per_token(const g2z_plan *plan) {
  double C = plan->model.channels, L = plan->model.layers;
  return 6 * (12 * L * C * C + plan->model.vocab * C) + 6 * L * plan->seq * C;
}

/* A step's loss is known: its metrics, the sums of its epoch and of the run, its event. */
static g2z_status g2zr_learn(g2z_run *run, const g2z_report *report, g2z_run_event *event) {
  g2zr_epoch *epoch = &run->epoch[run->epoch_count - 1];
  g2zr_totals *sum = &run->sum;
  g2z_metrics *m = &run->known;
  const double step_s = run->step_s_of[report->loss_step % 2];
  const double tokens = (double)run->tokens_per_step, targets = (double)report->counted;
  m->step = report->loss_step;
  m->tokens += run->tokens_per_step;
  m->loss = (double)report->loss;
  m->lr = (double)report->lr;
  m->grad_norm = (double)report->grad_norm;
  m->loss_scale = (double)report->loss_scale;
  m->skipped = report->skipped;
  m->step_ms = step_s * 1e3;
  m->tok_s = tokens / step_s;
  m->mfu = g2z_flops_per_token(run->trainer->plan) * m->tok_s / run->peak_flops;
  m->exposed_comm_ms = report->exposed_comm_ms;
  m->data_ms = report->data_ms;
  m->mem_gib = (double)run->trainer->plan->bytes_total / 1073741824.0;
  G2Z_TRY(g2zr_grow_steps(run, (size_t)epoch->steps));
  run->step_s[(size_t)epoch->steps++] = step_s;
  epoch->skipped += m->skipped != 0;
  epoch->tokens += tokens;
  epoch->train_s += step_s;
  epoch->data_s += m->data_ms * 1e-3;
  if (!m->skipped) {
    epoch->loss_sum += m->loss * targets;
    epoch->loss_targets += targets;
    run->applied++;
    sum->smooth_loss = 0.95 * sum->smooth_loss + 0.05 * m->loss;
    sum->loss_weight = 0.95 * sum->loss_weight + 0.05;
  }
  sum->train_s += step_s;
  sum->train_tokens += tokens;
  sum->smooth_s = 0.95 * sum->smooth_s + 0.05 * step_s;
  sum->smooth_weight = 0.95 * sum->smooth_weight + 0.05;
  const int64_t steps = run->steps - run->resumed;
  if (m->step == run->steps && !run->applied) /* reported after this step is */
    g2zr_note_failure(run, &run->ending, m->grad_norm == 0 && isnan(m->loss)
        ? g2z_fail(run->services, G2Z_BAD_ARGUMENT, "no step of %" PRId64 " was applied, since "
                   "masks leave out all tokens of the last: the model is what it was. Train for "
                   "more steps, or raise --batch", steps)
        : g2z_fail(run->services, G2Z_DIVERGED, "no step of %" PRId64 " was applied, since none "
                   "had gradients that are finite: the model is what it was. Lower --lr (%g) or "
                   "--loss-scale (%g)", steps, (double)run->config.train.optimizer.lr,
                   m->loss_scale));
#define X(type, name, meaning) #name,
  static const char *const names[] = {G2Z_METRIC_LIST(X)};
#undef X
#define X(type, name, meaning) "train/" #name,
  static const char *const tags[] = {G2Z_METRIC_LIST(X)};
#undef X
#define X(type, name, meaning) (double)m->name,
  const double values[] = {G2Z_METRIC_LIST(X)};
#undef X
  const int count = (int)G2Z_COUNT(tags); /* the first two are step and tokens */
  G2Z_TRY(g2zr_put_line(run, count - 2, names + 2, values + 2, ""));
  G2Z_TRY(g2zr_put_events(run, m->step, count - 1, tags + 1, values + 1));
  const double smooth_s = sum->smooth_s / sum->smooth_weight;
  event->kind = G2Z_RUN_STEP;
  event->tokens_per_second = tokens / smooth_s;
  event->eta_seconds = (double)(run->steps - m->step) * (smooth_s + sum->pause_s / (double)m->step);
  const char *skipped = m->skipped == 2                       ? "a spike: skipped"
                        : m->grad_norm == 0 && isnan(m->loss) ? "no token counts: skipped"
                                                              : "skipped";
  char eta[32], scale[64] = "";
  g2zr_duration_text(event->eta_seconds, eta);
  if (run->config.train.dtype == G2Z_FP16)
    snprintf(scale, sizeof scale, " | scale %.0f%s%s", m->loss_scale, m->skipped ? ", " : "",
             m->skipped ? skipped : "");
  else if (m->skipped) snprintf(scale, sizeof scale, " | %s", skipped);
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | loss %.4f | eta %s | %.0f tok/s | lr %.2e | norm "
            "%.3f%s", m->step, run->steps, m->loss, eta, event->tokens_per_second, m->lr,
            m->grad_norm, scale);
  return g2zr_log(run, run->line);
}

static g2z_status g2zr_validate(g2z_run *run, g2z_run_event *event) {
  g2z_loader_position first = {0, 0};
  double loss, begin = g2z_seconds();
  G2Z_TRY(g2z_loader_seek(run->val, first));
  G2Z_TRY(g2z_trainer_validate(run->trainer, run->val, run->val_steps, &loss));
  if (run->steps == 0 && !isfinite(loss)) /* a training skips such steps, and ends by that */
    return g2z_fail(run->services, G2Z_DIVERGED, "the validation loss is not a finite number: what "
                    "the model computes does not fit its type; take --dtype fp32");
  double seconds = g2z_seconds() - begin;
  run->sum.pause_s += seconds;
  run->epoch[run->epoch_count - 1].val_loss = loss;
  if (!(run->sum.best_val_loss <= loss)) run->sum.best_val_loss = loss; /* against NaN */
  event->kind = G2Z_RUN_VALIDATION;
  event->val_loss = loss;
  const double perplexity = exp(loss), better = run->val_entropy - loss;
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | val loss %.4f | perplexity %.*f | %.2f nats %s "
            "unigrams", run->step, run->steps, loss, perplexity < 1000 ? 2 : 0, perplexity,
            fabs(better), better >= 0 ? "under" : "over");
  G2Z_TRY(g2zr_write_note(run, "val_loss", loss, "val_ms", seconds));
  static const char *const tag = "val/loss";
  G2Z_TRY(g2zr_put_events(run, run->step, 1, &tag, &loss));
  G2Z_TRY(g2zr_log(run, run->line));
  g2zr_report(run, 0);
  return G2Z_OK;
}

/* A text as g2z_utf8_show shows it. `to` has room for 3 bytes per byte and a NUL. */
static void g2zr_printable(const char *text, size_t bytes, char *to) {
  const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
  while (at < end) {
    const g2z_shown shown = g2z_utf8_show(at, end);
    memcpy(to, shown.text, shown.bytes);
    to += shown.bytes;
    at += shown.used;
  }
  *to = 0;
}

/* Logs the progress of --eval every ten seconds. user: g2z_run *. */
static void g2zr_eval_share(void *user, double share) {
  g2z_run *run = (g2z_run *)user;
  const double now = g2z_seconds();
  if (share == 0) run->share_told_s = now;
  if (run->context->rank != 0 || now - run->share_told_s < 10) return;
  run->share_told_s = now;
  g2z_log(run->services, G2Z_LOG_INFO, "%.200s: %.0f %%", run->config.eval.text[run->evaluated], 100
          * share);
}

/* The next file of --eval. */
static g2z_status g2zr_evaluate(g2z_run *run, g2z_run_event *event) {
  static const char *const names[] = {"eval", "eval_loss", "eval_acc_norm", "eval_ms"};
  const int file = run->evaluated, files = run->config.eval.count;
  const char *path = run->config.eval.text[file], *slash = strrchr(path, '/');
  const char *name = slash ? slash + 1 : path; /* at most NAME_MAX bytes: it was opened */
  int alike = 0; /* files of this name: then curves need the path */
  for (int i = 0; i < files; i++) {
    const char *other = run->config.eval.text[i], *begin = strrchr(other, '/');
    alike += strcmp(begin ? begin + 1 : other, name) == 0;
  }
  if (alike > 1) name = strlen(path) > NAME_MAX ? path + strlen(path) - NAME_MAX : path;
  char text[200], tag[3 * NAME_MAX + 8] = "eval/";
  char member[6 * NAME_MAX + 96];
  double begin = g2z_seconds();
  g2z_eval *eval = &event->eval;
  G2Z_TRY(g2z_eval_run(run->eval[file], &run->trainer->model, g2zr_eval_share, run, eval));
  double seconds = g2z_seconds() - begin;
  run->sum.pause_s += seconds;
  run->evaluated = (file + 1) % files;
  event->kind = G2Z_RUN_EVALUATION;
  g2z_eval_text(eval, text);
  g2zr_line(run, "step %" PRId64 "/%" PRId64 " | %s | %s | %.2f s", run->step, run->steps, path,
            text, seconds);
  const double acc = eval->questions ? eval->acc_norm : NAN;
  const double values[] = {(double)file, eval->loss, acc, seconds * 1e3};
  g2zr_member("eval_file", name, member);
  G2Z_TRY(g2zr_put_line(run, 4, names, values, member));
  g2zr_printable(name, strlen(name), tag + strlen(tag)); /* protobuf's strings are UTF-8 */
  const char *tags = tag;
  G2Z_TRY(g2zr_put_events(run, run->step, 1, &tags, &eval->loss));
  return g2zr_log(run, run->line);
}

static g2z_status g2zr_write_sample(g2z_run *run, g2z_run_event *event) {
  double begin = g2z_seconds();
  g2z_tokens *sample = &run->sample;
  sample->count = run->prompt;
  G2Z_TRY(g2z_model_generate(&run->trainer->model, 1, sample->ids,
                             run->prompt + (size_t)run->config.sample_tokens, &sample->count,
                             &run->config.sampling, g2z_tokenizer_eot(run->tokenizer), NULL, NULL));
  /* A model has more ids than its tokenizer if its vocabulary was rounded up. */
  size_t kept = run->prompt;
  for (size_t i = kept; i < sample->count; i++)
    if (sample->ids[i] < g2z_tokenizer_vocab(run->tokenizer)) sample->ids[kept++] = sample->ids[i];
  sample->count = kept;
  /* The text, after a heading that train.log and sample.txt have. */
  char *text;
  size_t bytes;
  void *memory;
  G2Z_TRY(g2z_decode(run->services, run->tokenizer, sample->ids, kept, &text, &bytes));
  g2z_release(run->services, run->sample_text);
  g2z_status status = g2z_allocate(run->services, 3 * bytes + 64, 1, &memory);
  run->sample_text = (char *)memory;
  if (status == G2Z_OK) {
    int head = snprintf(run->sample_text, 64, "sample after step %" PRId64 ":\n", run->step);
    g2zr_printable(text, bytes, run->sample_text + head);
    event->kind = G2Z_RUN_SAMPLE;
    event->sample = run->sample_text + head;
  }
  g2z_release(run->services, text);
  G2Z_TRY(status);
  double seconds = g2z_seconds() - begin;
  run->sum.pause_s += seconds;
  G2Z_TRY(g2zr_write_note(run, NULL, 0, "sample_ms", seconds));
  if (run->log.file >= 0)
    G2Z_TRY(g2zr_hold(run, g2zr_write_text(run, "sample.txt", run->sample_text)));
  return g2zr_log(run, run->sample_text);
}

/* The state is saved: reports how the run ended. The signal may have reached any rank, so all ranks
 * exchange it. */
static g2z_status g2zr_stop(g2z_run *run) {
  char name[32], text[1400];
  int64_t mine = __atomic_load_n(&run->stop_signal, __ATOMIC_RELAXED), *all;
  g2z_status status = g2zr_gather(run, &mine, 1, &all);
  for (int rank = run->context->world - 1; rank >= 0 && all; rank--)
    if (all[rank]) run->stop_signal = all[rank];
  g2z_release(run->services, all);
  G2Z_TRY(status);
  g2zr_settle_epoch(run);
  if (run->epoch[run->epoch_count - 1].steps == 0 && run->epoch_count > 1) run->epoch_count--;
  status = run->log.file >= 0 ? g2zr_write_artifacts(run) : G2Z_OK;
  G2Z_TRY(g2zr_agree(run, status));
  const char *signal = g2zr_signal_text(run->stop_signal, name);
  const int saved = run->saved == run->step;
  g2zr_line(run, "stopped after step %" PRId64 " of %" PRId64 "%s%s, %s%s", run->step, run->steps,
            signal ? " by " : "", signal ? signal : "", saved ? "saved. To continue: " : "not "
            "saved: there is no --run-dir", saved ?
            g2zr_command(run, run->config.run_dir, " --resume latest", text) : "");
  return G2Z_OK;
}

/* A stop was agreed on: a checkpoint comes first, and holds what else is due. */
static void g2zr_will_stop(g2z_run *run) {
  run->due |= G2ZR_DUE_STOP;
  if (run->config.run_dir && run->saved != run->step) run->due |= G2ZR_DUE_SAVE;
}

/* Does the first work that is due; *shown: the event is filled. The end of the run stays due: the
 * next call returns the same. */
static g2z_status g2zr_due(g2z_run *run, g2z_run_event *event, int *shown) {
  const int now = run->due & -run->due; /* the lowest bit */
  *shown = now != G2ZR_DUE_EPOCH_END && now != G2ZR_DUE_WEIGHTS;
  event->line = run->line;
  switch (now) {
    case G2ZR_DUE_VALIDATION: G2Z_TRY(g2zr_validate(run, event)); break;
    case G2ZR_DUE_EVALUATION:
      G2Z_TRY(g2zr_evaluate(run, event));
      if (run->evaluated) return G2Z_OK; /* another file comes next */
      break;
    case G2ZR_DUE_SAMPLE:
      G2Z_TRY(g2zr_write_sample(run, event));
      event->line = run->sample_text;
      break;
    case G2ZR_DUE_EPOCH_END: { /* the next one begins unless the run ends too */
      const g2zr_epoch *epoch = &run->epoch[run->epoch_count - 1];
      g2zr_settle_epoch(run);
      if (run->epoch_ends) /* an epoch that --max-train-steps cuts may continue in a longer run */
        G2Z_TRY(g2zr_write_note(run, "epoch", epoch->index, "epoch_ms", epoch->wall_s));
      if (run->step < run->steps) G2Z_TRY(g2zr_begin_epoch(run, epoch->index + 1));
      break;
    }
    case G2ZR_DUE_SAVE: G2Z_TRY(g2zr_save(run, event)); break;
    case G2ZR_DUE_WEIGHTS: {
      /* The tokenizer comes first: weights that open have all of theirs. The directory was made at
       * the start; another run that was to write there may have removed it since. */
      const char *directory = run->config.save_weights;
      g2z_status status = G2Z_OK;
      if (run->context->rank == 0) status = g2z_make_directory(run->services, directory);
      if (status == G2Z_OK) status = g2zr_save_tokenizer(run, directory);
      G2Z_TRY(g2zr_agree(run, status));
      G2Z_TRY(g2z_trainer_save_weights(run->trainer, directory));
      break;
    }
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
  run->due &= ~now;
  return G2Z_OK;
}

static g2z_status g2zr_advance(g2z_run *run, g2z_run_event *event) {
  for (int shown = 0; !shown;) {
    g2z_report report;
    memset(&report, 0, sizeof report);
    G2Z_TRY(g2zr_tell_failure(run, &run->ending));
    if (!run->due) {
      g2z_status status = g2zr_train(run, &report);
      status = g2zr_after(run, status, &report);
      if (status == G2Z_STOPPED) {
        g2zr_will_stop(run);
        continue;
      }
      G2Z_TRY(status);
      if (report.loss_step <= run->known.step) continue; /* what is due waits for its loss */
    } else if (run->known.step < run->step) {
      g2z_status status = g2z_trainer_flush(run->trainer, &report);
      G2Z_TRY(g2zr_after(run, status, &report));
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

G2Z_API g2z_status g2z_run_next(g2z_run *run, g2z_run_event *event) {
  memset(event, 0, sizeof *event);
  g2z_status status = g2zr_advance(run, event);
  if (status == G2Z_OK) return G2Z_OK;
  char sentence[G2Z_ERROR_BYTES]; /* into train.log too; a failure to write must not replace it */
  memcpy(sentence, run->services->error, sizeof sentence);
  /* A file failed, and no step: a run of one rank saves before it ends. With several ranks, others
   * may not know of the failure yet. */
  const g2z_path path = g2zr_checkpoint(run, run->step, "");
  int there = 0, saves = status == G2Z_IO || status == G2Z_FORMAT;
  saves &= run->config.run_dir && run->context->world == 1 && !run->broken &&
           run->step > run->resumed && run->step != run->saved && !(run->due & G2ZR_DUE_SAVE);
  if (saves && g2z_is_there(run->services, run->config.run_dir, &there) == G2Z_OK && there &&
      g2zr_save_state(run, path.text) == G2Z_OK)
    g2z_log(run->services, G2Z_LOG_WARNING, "the run fails, and has saved %s", path.text);
  g2zr_log(run, sentence);
  if (run->metrics.file >= 0 && status != G2Z_STOPPED)
    g2z_report_run(run->services, run->config.run_dir);
  memcpy(run->services->error, sentence, sizeof sentence);
  return status;
}

/* ===== command line ======================================================
 * In:  argv. Out: a config, ranks that have met, and files about the launch and its end.
 * Law: every flag stands in one table. What flags say is checked before a file is written. */

#define G2ZR_WORD(name, text) "|" text

/* Every flag, once: parser, --help and docs/flags.md come from this list. g2z_run_options_default
 * has the defaults; --help shows a default in the range, otherwise its text explains it. */
#define G2ZR_FLAG_LIST                                                                            \
  GROUP("Data")                                                                                   \
  /* name, [kind or setting, destination, [least, most,] value,] help */                          \
  PLAIN("train", GLOB, run.train.train_glob, "GLOB",                                              \
       "token shards to train on; without it: validate, score, write")                            \
  PLAIN("val", GLOB, run.val_glob, "GLOB", "token shards to validate on")                         \
  PLAIN("vocab", TEXT, run.vocab, "FILE",                                                         \
       "tokenizer of the shards: vocab.bpe, merges.txt, tokenizer.json, ...")                     \
  GROUP("Model")                                                                                  \
  PLAIN("model", TEXT, model, "NAME", "gpt2, gpt2-medium, gpt2-large or gpt2-xl [gpt2]")          \
  SHAPE("layers", layers, "number of layers; overrides --model")                                  \
  SHAPE("channels", channels, "width of the residual stream")                                     \
  SHAPE("heads", heads, "divides channels [channels / 64]")                                       \
  SHAPE("context", context, "positions: the longest sequence [1024]")                             \
  SHAPE("vocab-size", vocab, "size of the vocabulary [that of --vocab, or 50257]")                \
  TRAIN("dropout", dropout, "probability, on embedding, attention, projections")                  \
  PLAIN("init-from", TEXT, run.train.init_from, "DIR",                                            \
       "start from a model.safetensors and config.json, as Hugging Face's")                       \
  GROUP("Batch and length")                                                                       \
  TRAIN("batch", batch, "sequences per micro-step and rank")                                      \
  SETTING("seq", seq, seq, "tokens per sequence [context]")                                       \
  SETTING("accum", accum, accum, "micro-steps per step [1]")                                      \
  FLAG("global-batch", INT, global_batch, 1, 2147483647, "N",                                     \
       "sequences per step, a multiple of batch x ranks: sets --accum")                      \
  SETTING("steps", steps, steps, "length of the training and of its schedule")                    \
  FLAG("epochs", INT64, run.epochs, 1, 1e6, "N", "training length in passes over the shards [1]") \
  STEPS("max-train-steps", run.max_train_steps, "stop after that many steps of the schedule")     \
  GROUP("Optimizer")                                                                              \
  SETTING("optimizer", optimizer, run.train.optimizer.kind,                                       \
          "muon: for the blocks' weights; needs fewer steps, with the same lr")                   \
  OPTIMIZER("lr", lr, "peak learning rate")                                                       \
  OPTIMIZER("schedule", schedule, "shape of the learning rate over the steps")                    \
  OPTIMIZER("warmup", warmup, "steps of linear warm-up [a tenth of the steps, at most 1000]")     \
  OPTIMIZER("min-lr", min_lr, "learning rate at the end [a tenth of --lr]")                       \
  OPTIMIZER("weight-decay", weight_decay, "of matrices only")                                     \
  OPTIMIZER("beta1", beta1, "decay of the mean")                                                  \
  OPTIMIZER("beta2", beta2, "decay of the variance")                                              \
  OPTIMIZER("eps", eps, "in AdamW's denominator")                                                 \
  OPTIMIZER("momentum", momentum, "of Muon")                                                      \
  OPTIMIZER("clip", clip, "global gradient norm; 0: off")                                         \
  OPTIMIZER("skip-spikes", skip_spikes,                                                           \
            "skip steps whose gradient norm is so many deviations above its mean; 0: off")        \
  GROUP("Numbers and device")                                                                     \
  PLAIN("device", CHOICE, device, G2Z_DEVICE_LIST(G2ZR_WORD), "[cuda if there is one]")           \
  SETTING("dtype", dtype, dtype, "[fp16 on cuda, fp32 on cpu]")                                   \
  TRAIN("fp8", fp8,                                                                               \
       "Hopper, from 2048 tokens per micro-step: 8-bit products make logits; forward: linear ops "\
       "too; all: data gradients too")                                                            \
  SETTING("loss-scale", loss_scale, loss_scale, "a fixed one for fp16 [dynamic]")                 \
  OPTIMIZER("loss-scale-window", loss_scale_window, "good steps until a dynamic scale doubles")   \
  TRAIN("graph", graph, "the step as CUDA graphs")                                                \
  TRAIN("tune", tune,                                                                             \
       "time each product's algorithms once; off: the library's; own: our kernel where it fits")  \
  PLAIN("tuning", TEXT, run.train.tuning, "FILE", "repeat the choices of a run's tuning.txt")     \
  SETTING("zero", zero_stage, zero,                                                               \
       "ZeRO shards: 0 nothing, 1 the optimizer, 2 gradients too, 3 parameters too [1]")          \
  TRAIN("strategy", strategy, "dp: rank 0 alone has the optimizer and updates for all")           \
  TRAIN("grad-dtype", grad_fp32, "of gradients, also between ranks; micro-steps add up in fp32")  \
  TRAIN("transport", transport, "carries gradients and parameters between GPUs: see the header")  \
  TRAIN("bucket-mb", bucket_mb, "MiB of gradients per collective; 0: 64, at least 1.9 x ranks")   \
  TRAIN("recompute", recompute, "block: forward runs again in backward, which saves memory")      \
  TRAIN("seed", seed, "for weights, order of the data, dropout")                                  \
  GROUP("Ranks")                                                                                  \
  FLAG("ranks", INT, ranks, 1, 4096, "N", "start N ranks on this host; not under a launcher")     \
  FLAG("gpus", INT, gpus, 1, 4096, "N", "the same, and there must be N GPUs")                     \
  PLAIN("run-id", TEXT, run_id, "TEXT", "tells jobs on a port apart [the launcher's job id]")     \
  FLAG("join-timeout", FLOAT, join_timeout, 0.1, 86400, "S", "seconds until all ranks are there") \
  FLAG("silence-timeout", FLOAT, silence_timeout, 0.1, 86400, "S",                                \
       "seconds of silence before a rank counts as dead")                                         \
  FLAG("hang-timeout", FLOAT, hang_timeout, 0, 1e6, "S",                                          \
       "seconds without progress before a rank counts as hung; 0: never")                         \
  GROUP("Validation and samples")                                                                 \
  STEPS("val-every", run.val_every, "steps [the end of each epoch]")                              \
  STEPS("val-steps", run.val_steps, "batches of one validation [all]")                            \
  STEPS("max-val-steps", run.max_val_steps, "a limit on that number")                             \
  PLAIN("eval", TEXTS, run.eval, "FILE...",                                                       \
       "score a text, .jsonl, shards, or llm.c's HellaSwag file; at the end of a training")       \
  STEPS("eval-every", run.eval_every, "steps [the end of the run]")                               \
  STEPS("sample-every", run.sample_every, "steps [the end of the run]")                           \
  FLAG("sample-tokens", INT, run.sample_tokens, 0, 1048576, "N", "length of a sample; 0: none")   \
  PLAIN("prompt", TEXT, run.prompt, "TEXT",                                                       \
       "what a sample continues; its last half context if it is longer [end of text]")            \
  FLAG("temperature", FLOAT, run.sampling.temperature, 0, 1e6, "X", "0: the likeliest token")     \
  FLAG("top-k", INT, run.sampling.top_k, 0, 16777216, "N", "draw among that many; 0: all")        \
  FLAG("top-p", FLOAT, run.sampling.top_p, 1e-6, 1, "X", "draw among the likeliest of that mass") \
  PLAIN("sample-seed", UINT64, run.sampling.seed, "N", "seed of the draws")                       \
  GROUP("Checkpoints")                                                                            \
  STEPS("save-every", run.save_every, "steps per checkpoint RUN_DIR/step-NNNNNN, and at the end") \
  SWITCH("save-epochs", run.save_epochs, "save at the end of each epoch")                         \
  FLAG("keep", INT, run.keep, 0, 2147483647, "N", "checkpoints that stay; 0: all")                \
  PLAIN("resume", TEXT, run.resume, "latest|DIR",                                                 \
       "continue from a checkpoint: DIR, or the newest in --run-dir")                             \
  GROUP("Results")                                                                                \
  PLAIN("run-dir", TEXT, run_dir, "DIR", "metrics and log [runs/run_DATE_TIME]; none: none")      \
  PLAIN("save-weights", TEXT, run.save_weights, "DIR",                                            \
       "where model, config and tokenizer go at the end [RUN_DIR/weights]; none: nowhere")        \
  PLAIN("tensorboard", CHOICE, run.tensorboard, "|off|on", "event files in the run directory")    \
  SWITCH("nccl-logs", nccl_logs, "NCCL's logs and topology in the run directory; or NCCL_LOGS=1") \
  SWITCH("dry-run", dry_run,                                                                      \
       "print the memory plan and the largest batch, stop; exit code 1: it does not fit")         \
  SWITCH("profile", run.profile, "time the parts of a step, into RUN_DIR/profiles; no graphs")    \
  SWITCH("profile-mode", profile_mode, "a console line every 5 s, on a terminal too")             \
  PLAIN("flags", FILE, flags_text, "FILE", "more flags, one --name VALUE a line; # comments")     \
  SWITCH("version", version, "print the version")                                                 \
  SWITCH("help", help, "print this")

G2Z_API g2z_run_options g2z_run_options_default(void) {
  const g2z_ranks_config ranks = g2z_ranks_config_default();
  g2z_run_options o;
  memset(&o, 0, sizeof o);
  o.run = g2z_run_config_default();
  o.device = o.dtype = o.zero = -1;
  o.join_timeout = (float)ranks.join_s;
  o.silence_timeout = (float)ranks.silence_s;
  o.hang_timeout = (float)ranks.hang_s;
  return o;
}

G2Z_API g2z_flag g2z_setting_flag(const char *name, const char *setting, void *destination,
                                  const char *help) {
  static const g2z_flag_kind kinds[] = {G2Z_FLAG_INT, G2Z_FLAG_INT64, G2Z_FLAG_UINT64,
                                        G2Z_FLAG_FLOAT, G2Z_FLAG_CHOICE}; /* g2z_setting_kind's */
  const g2z_setting *s = g2z_setting_find(setting);
  g2z_flag flag = {name, kinds[s->kind], destination, s->least, s->most, s->words, help};
  if (!flag.value) flag.value = s->kind == G2Z_SETTING_FLOAT ? "X" : "N";
  return flag;
}

/* Parses argv into the options, or prints their table if there is a `line`. */
static g2z_status g2zr_options_table(g2z_services *services, g2z_run_options *o, int argc,
                                     char **argv, void (*line)(void *user, const char *text),
                                     void *user) {
#define FLAG(name, kind, destination, minimum, maximum, value, help) \
  {name, G2Z_FLAG_##kind, &o->destination, minimum, maximum, value, help},
#define PLAIN(name, kind, destination, value, help) FLAG(name, kind, destination, 0, 0, value, help)
#define SWITCH(name, destination, help) PLAIN(name, SWITCH, destination, "", help)
#define STEPS(name, destination, help) \
  FLAG(name, INT64, destination, 1, (double)G2ZR_STEPS_MOST, "N", help)
#define SETTING(name, setting, destination, help) \
  g2z_setting_flag(name, #setting, &o->destination, help),
#define SHAPE(name, setting, help) SETTING(name, setting, shape.setting, help)
#define TRAIN(name, setting, help) SETTING(name, setting, run.train.setting, help)
#define OPTIMIZER(name, setting, help) SETTING(name, setting, run.train.optimizer.setting, help)
#define GROUP(title) {"", G2Z_FLAG_GROUP, NULL, 0, 0, "", title ":"},
  const g2z_flag flags[] = {G2ZR_FLAG_LIST};
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
  if (!line) return g2z_flags_parse(services, flags, count, argc, argv, NULL);
  g2z_flags_print(flags, count, line, user);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_run_options_parse(g2z_services *services, int argc, char **argv,
                                         g2z_run_options *o) {
  G2Z_TRY(g2zr_options_table(services, o, argc, argv, NULL, NULL));
  /* --eval takes names, which a shell makes of a pattern, and quoted patterns like --train. */
  const g2z_texts given = o->run.eval;
  g2z_texts *texts = &o->run.eval;
  g2z_status status = G2Z_OK;
  texts->count = 0;
  for (int i = 0; i < given.count && status == G2Z_OK; i++) {
    glob_t found;
    struct stat info;
    memset(&found, 0, sizeof found);
    const int plain = !strpbrk(given.text[i], "*?[") || stat(given.text[i], &info) == 0;
    const int matches = !plain && glob(given.text[i], 0, NULL, &found) == 0;
    const int count = plain ? 1 : matches ? (int)found.gl_pathc : 0;
    if (!count)
      status = g2z_fail(services, G2Z_IO, "--eval: no file is called or matches \"%.300s\"",
                        given.text[i]);
    if (texts->count + count > G2Z_TEXTS)
      status = g2z_fail(services, G2Z_BAD_ARGUMENT, "--eval takes %d files, and \"%.300s\" makes "
                        "%d: narrow it", G2Z_TEXTS, given.text[i], texts->count + count);
    for (int k = 0; k < count && status == G2Z_OK; k++) {
      const char *name = plain ? given.text[i] : found.gl_pathv[k];
      void *copy = NULL;
      status = g2z_allocate(services, strlen(name) + 1, 1, &copy);
      if (copy) memcpy(copy, name, strlen(name) + 1);
      texts->text[texts->count] = o->eval_names[texts->count] = (char *)copy;
      texts->count++;
    }
    globfree(&found);
  }
  return status;
}

G2Z_API void g2z_run_options_free(g2z_services *services, g2z_run_options *o) {
  g2z_release(services, o->flags_text);
  for (int i = 0; i < G2Z_TEXTS; i++) g2z_release(services, o->eval_names[i]);
}

G2Z_API void g2z_run_options_print(void (*line)(void *user, const char *text), void *user) {
  g2z_run_options defaults = g2z_run_options_default();
  g2zr_options_table(NULL, &defaults, 0, NULL, line, user);
}

/* ----- a plan as a table ----- */

static double g2zr_gib(size_t bytes) { return (double)bytes / 1073741824.0; }

G2Z_PRINTF(3, 4)
static void g2zr_plan_line(void (*line)(void *user, const char *text), void *user,
                           const char *format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  line(user, text);
}

G2Z_API void g2z_plan_print(const g2z_plan *plan, size_t free_bytes,
                            void (*line)(void *user, const char *text), void *user) {
  const g2z_model_config *m = &plan->model;
  const size_t needs = plan->bytes_total + plan->nccl_bytes;
  g2zr_plan_line(line, user,
                 "model       %d layer%s, %d head%s, %d channels, context %d, vocab %d (padded "
                 "to %d): %.2f M parameters", m->layers, m->layers == 1 ? "" : "s", m->heads,
                 m->heads == 1 ? "" : "s", m->channels, m->context, m->vocab, plan->vocab_padded,
                 (double)plan->parameters * 1e-6);
  g2zr_plan_line(line, user, "step        B=%d x T=%d x accum=%d x world=%d = %" PRId64 " tokens",
                 plan->batch, plan->seq, plan->accum, plan->world,
                 (int64_t)plan->batch * plan->seq * plan->accum * plan->world);
  g2zr_plan_line(line, user, "types       %s parameters, %s gradients%s%s, on %s",
                 g2z_dtype_text(plan->dtype), g2z_dtype_text(plan->grad_dtype),
                 plan->fp8 ? ", fp8=" : "", plan->fp8 ? g2z_fp8_text(plan->fp8) : "",
                 g2z_device_text(plan->device));
  char strategy[64];
  snprintf(strategy, sizeof strategy, "ZeRO        stage %d", plan->zero_stage);
  if (plan->strategy == G2Z_STRATEGY_DP)
    snprintf(strategy, sizeof strategy, "dp          the optimizer on rank 0 alone");
  g2zr_plan_line(line, user, "%s, rank %d of %d, %d buckets of up to %.2f MiB", strategy,
                 plan->rank, plan->world, plan->buckets,
                 (double)(plan->bucket_elements * (size_t)plan->grad_bytes) / 1048576.0);
  if (plan->unit[1].gathered) {
    size_t room = plan->unit[1].room, size = (size_t)plan->dtype_bytes;
    size_t slices = plan->param_elements - plan->slices_at;
    g2zr_plan_line(line, user,
                   "parameters  %.3f GiB of the blocks, %.3f for two of them whole, which take "
                   "turns, %.3f for what stays", g2zr_gib(slices * size), g2zr_gib(2 * room * size),
                   g2zr_gib((plan->param_elements - slices - 2 * room) * size));
  }
  if (plan->recompute == G2Z_RECOMPUTE_BLOCK)
    g2zr_plan_line(line, user, "recompute   %s: each block runs forward again before its backward",
                   g2z_recompute_text(plan->recompute));
#define X(name, text) text,
  static const char *const texts[] = {G2Z_MEMORY_LIST(X)};
#undef X
  for (int i = 0; i < G2Z_MEMORY_COUNT; i++)
    g2zr_plan_line(line, user, "memory      %9.3f GiB  %s", g2zr_gib(plan->bytes[i]), texts[i]);
  if (plan->nccl_bytes)
    g2zr_plan_line(line, user, "memory      %9.3f GiB  NCCL, as usual", g2zr_gib(plan->nccl_bytes));
  g2zr_plan_line(line, user, "memory      %9.3f GiB  total %s", g2zr_gib(needs),
                 plan->strategy == G2Z_STRATEGY_DP ? "on this rank" : "per rank");
  if (!free_bytes) return;
  g2zr_plan_line(line, user, "free        %9.3f GiB  per rank: %s", g2zr_gib(free_bytes),
                 needs <= free_bytes ? "it fits" : "IT DOES NOT FIT");
  g2zr_plan_line(line, user, "largest B   %9d      micro-batch that fits",
                 g2z_plan_largest_batch(plan, free_bytes));
}

G2Z_API g2z_status g2z_run_options_spawn(g2z_services *services, const g2z_run_options *o,
                                         char **argv, int *is_parent, int *code) {
  const int ranks = o->gpus ? o->gpus : o->ranks, gpus = g2z_device_count(G2Z_DEVICE_CUDA);
  *is_parent = *code = 0;
  if (!ranks) return G2Z_OK;
  if (o->gpus && o->ranks && o->gpus != o->ranks)
    G2Z_REFUSE(services, "--ranks and --gpus say the same: give one of them");
  if (o->gpus > gpus) {
    char why[512] = "give fewer, or see nvidia-smi -L and CUDA_VISIBLE_DEVICES";
    if (g2z_device_find_gpu(services) != G2Z_OK)
      snprintf(why, sizeof why, "%.400s; ranks without GPUs: --ranks %d", services->error, o->gpus);
    G2Z_REFUSE(services, "--gpus %d, but this process sees %d: %s", o->gpus, gpus, why);
  }
  /* Settings that would fail on every rank fail once, here. */
  g2z_run_options checked = *o;
  g2z_context_config context = g2z_context_config_default(services);
  if (o->device < 0) checked.device = (int)context.device; /* rank 0 explains a missing GPU, */
  checked.run.train.fp8 = G2Z_FP8_NONE;                    /* and the use of --fp8 */
  G2Z_TRY(g2z_run_options_settle(services, &checked, &context));
  return g2z_ranks_spawn(services, ranks, argv, is_parent, code);
}

/* Refuses what is often named in place of a directory with weights: a file, a name, a run
 * directory, the weights of a run that has not ended. */
static g2z_status g2zr_check_weights(g2z_services *services, const char *path) {
  struct stat info;
  const char *slash = strrchr(path, '/'), *dot = strrchr(path, '.');
  char parent[1024], word[600];
  int has = 0, runs = 0;
  if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode)) {
    if (S_ISREG(info.st_mode) && (!dot || (strcmp(dot, ".safetensors") && strcmp(dot, ".json"))))
      G2Z_REFUSE(services, "--init-from %.300s is a file, and a directory with model.safetensors "
                 "and config.json is wanted: llm.c's dev/eval/export_hf.py -i FILE -o DIR makes "
                 "one of llm.c's weights, save_pretrained of PyTorch's; make gpt2 gets OpenAI's",
                 path);
    snprintf(parent, 400, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    G2Z_REFUSE(services, "--init-from %.300s is a file, and a directory is wanted: --init-from %s",
               path, g2z_shell_word(parent, word, 400));
  }
  G2Z_TRY(g2zr_has(services, path, "config.json", &has));
  if (has) return G2Z_OK;
  size_t length = (size_t)snprintf(parent, sizeof parent, "%.1000s", path);
  while (length > 1 && parent[length - 1] == '/') parent[--length] = 0;
  if (length > 8 && strcmp(parent + length - 8, "/weights") == 0) parent[length - 8] = 0;
  G2Z_TRY(g2zr_has(services, parent, "metrics.jsonl", &runs));
  if (runs) G2Z_TRY(g2zr_has(services, parent, "weights/config.json", &has));
  g2z_shell_word(parent, word, sizeof word);
  if (has)
    G2Z_REFUSE(services, "--init-from %.300s is a run directory: its weights are in --init-from "
               "%s/weights", path, word);
  if (runs)
    G2Z_REFUSE(services, "--init-from %.200s: the run in %.200s has no weights yet, they come at "
               "its end. To continue it: its command with --resume latest; its checkpoints hold "
               "weights too: --init-from %s/step-NNNNNN", path, parent, word);
  if (*path && !slash && stat(path, &info) != 0)
    G2Z_REFUSE(services, "--init-from %.200s: there is no such directory here. For OpenAI's "
               "weights: make gpt2; for random weights of that size: --model gpt2", path);
  return G2Z_OK;
}

/* Reads a tokenizer file for its hash and its number of tokens. */
static g2z_status g2zr_read_vocab(g2z_services *services, const char *path, uint64_t *hash,
                                  int *tokens) {
  g2z_tokenizer *tokenizer;
  G2Z_TRY(g2z_tokenizer_create(services, path, &tokenizer));
  *hash = g2z_tokenizer_hash(tokenizer);
  *tokens = g2z_tokenizer_vocab(tokenizer);
  g2z_tokenizer_free(tokenizer);
  return G2Z_OK;
}

/* Refuses a text in place of shards, with the command that makes shards of it. The loader checks
 * everything else. */
static g2z_status g2zr_check_shards(g2z_services *services, const g2z_run_options *o,
                                    const char *flag, const char *path) {
  char head[4096], words[2][400];
  struct stat info;
  if (!path || stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return G2Z_OK;
  FILE *file = fopen(path, "rb");
  const size_t bytes = file ? fread(head, 1, sizeof head, file) : 0, length = strlen(path);
  if (file) fclose(file);
  const int named = length > 4 && strcmp(path + length - 4, ".bin") == 0;
  const int text = bytes > 0 && g2z_text_check(services, path, 0, head, bytes, NULL) == G2Z_OK;
  if (named || (!text && !g2z_text_named(path).packer)) return G2Z_OK;
  const char *vocab = o->run.vocab ? o->run.vocab : "data/vocab.bpe";
  G2Z_REFUSE(services, "%s %.200s: that is text, not tokens. This makes shards of it, "
             "data/NAME_train_*.bin%s: ./prepare_data --vocab %s --out data --name NAME %s", flag,
             path, o->run.vocab ? "" : ", with GPT-2's vocabulary of `make vocab`",
             g2z_shell_word(vocab, words[0], sizeof words[0]),
             g2z_shell_word(path, words[1], sizeof words[1]));
}

/* The model of the weights. Flags may repeat its shape, and must not contradict it. */
static g2z_status g2zr_settle_weights(g2z_services *services, g2z_run_options *o) {
  g2z_model_config *model = &o->run.train.model, wanted = o->shape;
  const char *weights = o->run.train.init_from;
  G2Z_TRY(g2zr_check_weights(services, weights));
  G2Z_TRY(g2z_weights_config(services, weights, model));
  if (o->model) {
    G2Z_TRY(g2z_model_config_named(services, o->model, &wanted));
    g2z_model_config_override(&wanted, &o->shape);
    wanted.context = o->shape.context; /* a name sets no length and no vocabulary */
    wanted.vocab = o->shape.vocab;
  }
#define X(name, flag)                                                                             \
  if (wanted.name && wanted.name != model->name)                                                  \
    G2Z_REFUSE(services,                                                   \
                    "%s says " #name "=%d, but the weights in %.400s have " #name "=%d: leave "   \
                    "it out, or name other weights", o->shape.name ? flag : "--model",            \
                    wanted.name, weights, model->name);
  X(layers, "--layers")
  X(channels, "--channels")
  X(heads, "--heads")
  X(context, "--context")
  X(vocab, "--vocab-size")
#undef X
  int there, tokens;
  snprintf(o->vocab_text, sizeof o->vocab_text, "%.4096s/merges.txt", weights);
  G2Z_TRY(g2z_is_there(services, o->vocab_text, &there));
  uint64_t given = 0;
  const int own = there && !o->run.vocab;
  if (own) o->run.vocab = o->vocab_text;
  if (there && !model->vocab_hash) /* another program's config.json does not name it */
    G2Z_TRY(g2zr_read_vocab(services, o->vocab_text, &model->vocab_hash, &tokens));
  if (o->run.vocab) G2Z_TRY(g2zr_read_vocab(services, o->run.vocab, &given, &tokens));
  if (!given || !model->vocab_hash || given == model->vocab_hash) return G2Z_OK;
  if (own)
    G2Z_REFUSE(services, "%.300s is not the vocabulary of the weights in its directory, which "
               "another run wrote: name theirs, --vocab FILE", o->vocab_text);
  G2Z_REFUSE(services, "--vocab %.300s is not the vocabulary of the weights in %.300s: name "
             "theirs%s", o->run.vocab, weights, there ? ", or leave --vocab away" : "");
}

/* The model: the weights' own, or a preset and what the flags override. */
static g2z_status g2zr_settle_model(g2z_services *services, g2z_run_options *o) {
  static const char *const files[] = {"tokenizer.json", "vocab.bpe", "merges.txt"};
  g2z_model_config *model = &o->run.train.model;
  const char *preset = o->model ? o->model : "gpt2", *vocab = o->run.vocab, *name = "FILE";
  int custom = o->shape.layers || o->shape.heads || o->shape.channels || o->shape.context;
  o->run.model_name = custom || o->run.train.init_from ? "custom" : preset;
  struct stat info;
  if (vocab && stat(vocab, &info) == 0 && S_ISDIR(info.st_mode)) {
    char word[400];
    for (size_t i = 0; i < G2Z_COUNT(files); i++) {
      int has;
      G2Z_TRY(g2zr_has(services, vocab, files[i], &has));
      if (has) name = files[i];
    }
    G2Z_REFUSE(services, "--vocab %.300s is a directory, and a file is wanted: --vocab %s/%s",
               vocab, g2z_shell_word(vocab, word, sizeof word), name);
  }
  if (o->run.train.init_from) return g2zr_settle_weights(services, o);
  uint64_t hash;
  G2Z_TRY(g2z_model_config_named(services, preset, model));
  if (vocab) G2Z_TRY(g2zr_read_vocab(services, vocab, &hash, &model->vocab));
  g2z_model_config_override(model, &o->shape);
  return G2Z_OK;
}

/* Refuses flags for work that this run does not do. */
static g2z_status g2zr_check_uses(g2z_services *services, const g2z_run_options *o) {
  const g2z_run_options defaults = g2z_run_options_default();
  const int samples = o->run.sample_tokens > 0, validates = o->run.val_glob != NULL;
#define X(used, flag, name, sentence)                                                             \
  if (!used && memcmp(&o->run.name, &defaults.run.name, sizeof o->run.name) != 0)                 \
    G2Z_REFUSE(services, flag ": " sentence);
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
  X((o->run.eval.count && o->run.train.train_glob), "--eval-every", eval_every,
    "it scores the files of --eval while --train trains; give both, or leave it away")
#undef VAL
#undef SAMPLE
#undef X
  return G2Z_OK;
}

/* Tokens of a micro-step from which --fp8 was not slower than 16 bits (docs/speed.md). */
#define G2ZR_FP8_TOKENS 2048

G2Z_API g2z_status g2z_run_options_settle(g2z_services *services, g2z_run_options *o,
                                          g2z_context_config *context) {
  g2z_train_config *train = &o->run.train;
  g2z_ranks_config *ranks = &context->ranks;
  G2Z_TRY(g2z_place_find(services, &ranks->place));
  G2Z_TRY(g2zr_check_length(services, "--run-dir", o->run_dir, sizeof o->run_dir_text));
  G2Z_TRY(g2zr_check_length(services, "--run-id", o->run_id, sizeof ranks->place.job));
  G2Z_TRY(g2zr_check_uses(services, o));
  if (strcmp(ranks->place.launcher, "alone") == 0 && (o->ranks || o->gpus)) /* not started yet */
    ranks->place.world = ranks->place.local_world = o->gpus ? o->gpus : o->ranks;
  if (o->run_id) snprintf(ranks->place.job, sizeof ranks->place.job, "%s", o->run_id);
  ranks->join_s = o->join_timeout;
  ranks->silence_s = o->silence_timeout;
  ranks->hang_s = o->hang_timeout;
  G2Z_TRY(g2zr_settle_model(services, o));
  if (o->dry_run && o->gpus) context->device = G2Z_DEVICE_CUDA; /* a plan needs none of them */
  if (o->device >= 0) context->device = (g2z_device_kind)o->device;
  else if (context->device == G2Z_DEVICE_CPU && ranks->place.rank == 0 &&
           g2z_device_find_gpu(services) == G2Z_DEVICE)
    g2z_log(services, G2Z_LOG_WARNING, "no GPU is used: %s", services->error);
  train->dtype = o->dtype >= 0 ? (g2z_dtype)o->dtype
                 : context->device == G2Z_DEVICE_CUDA ? G2Z_FP16 : G2Z_FP32;
  train->seq = o->seq ? o->seq : train->model.context;
  const int64_t together = (int64_t)train->batch * ranks->place.world;
  if (o->global_batch && o->accum)
    G2Z_REFUSE(services, "--accum and --global-batch say the same: give one of them");
  if (o->global_batch % together)
    G2Z_REFUSE(services, "--global-batch %d must be a multiple of batch x ranks = %" PRId64,
               o->global_batch, together);
  train->accum = o->global_batch ? (int)(o->global_batch / together) : o->accum ? o->accum : 1;
  if (train->fp8 && context->device == G2Z_DEVICE_CUDA &&
      (int64_t)train->batch * train->seq < G2ZR_FP8_TOKENS) {
    if (ranks->place.rank == 0)
      g2z_log(services, G2Z_LOG_INFO, "--fp8 %s: 16 bits are faster for a micro-step of %d x %d "
              "tokens, and are used; 8 bits pay from %d tokens on", g2z_fp8_text(train->fp8),
              train->batch, train->seq, G2ZR_FP8_TOKENS);
    train->fp8 = G2Z_FP8_NONE;
  }
  if (o->steps && o->run.epochs)
    G2Z_REFUSE(services, "--steps and --epochs both set the length: give one of them, and "
               "--max-train-steps to stop earlier");
  if (o->run.resume && strcmp(o->run.resume, "latest") == 0 && !o->run_dir)
    G2Z_REFUSE(services, "--resume latest looks into --run-dir, and without that each start makes "
               "a new one: name the directory of the run");
  G2Z_TRY(g2zr_check_shards(services, o, "--train", train->train_glob));
  G2Z_TRY(g2zr_check_shards(services, o, "--val", o->run.val_glob));
  if (train->train_glob && !o->dry_run)
    G2Z_TRY(g2z_shards_apart(services, train->train_glob, o->run.val_glob));
  if (!train->train_glob && !o->run.val_glob && !train->init_from && !o->dry_run) {
    if (o->run.prompt || o->run.eval.count)
      G2Z_REFUSE(services, "%s needs trained weights: name them, --init-from RUN_DIR/weights, or "
                 "shards to train on, --train GLOB", o->run.prompt ? "--prompt" : "--eval");
    G2Z_REFUSE(services, "there is nothing to do: name token shards to train on, --train GLOB, or "
               "weights, --init-from DIR, and a prompt or files to score");
  }
  if (o->steps) train->optimizer.steps = o->steps;
  else if (!o->run.epochs) o->run.epochs = 1;
  if (o->zero >= 0) train->zero_stage = o->zero;
  else if (train->strategy == G2Z_STRATEGY_DP) train->zero_stage = 0;
  if (o->loss_scale > 0) {
    train->optimizer.loss_scale = o->loss_scale;
    train->optimizer.loss_scale_dynamic = 0;
  }
  /* The run directory's name: from a flag, or from the time. */
  const time_t now = time(NULL);
  struct tm utc;
  struct stat info;
  gmtime_r(&now, &utc);
  const size_t end = strftime(o->run_dir_text, sizeof o->run_dir_text, "runs/run_%Y%m%d_%H%M%S",
                              &utc);
  for (int i = 2; stat(o->run_dir_text, &info) == 0; i++) /* one that began in the same second */
    snprintf(o->run_dir_text + end, 16, "-%d", i);
  if (o->run_dir) snprintf(o->run_dir_text, sizeof o->run_dir_text, "%s", o->run_dir);
  o->run.run_dir = strcmp(o->run_dir_text, "none") == 0 ? NULL : o->run_dir_text;
  return G2Z_OK;
}

/* ----- files of a launch ----- */

/* An object of the variables whose names begin with one of the words of `prefixes`. SLURM_JWT and
 * G2Z_SECRET stay out: with them anybody could act as this user, or as a rank. */
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

typedef struct g2zr_launch {
  const g2z_run_config *run;
  const g2z_place *place;
  const g2z_fault *fault;            /* RUN_FAILED.json: what happened, and the name of */
  const char *flight;                /* this rank's flight recorder; NULL: there is none */
} g2zr_launch;

/* launcher_metadata.json: who started this, where, with which variables. Only variables that steer
 * a run: others may hold secrets. */
static void g2zr_put_launch(void *user, g2z_json_out *out) {
  const g2zr_launch *launch = (const g2zr_launch *)user;
  const g2z_run_config *run = launch->run;
  char now[32], host[256] = "";
  g2z_utc_now(now);
  gethostname(host, sizeof host - 1);
  G2ZR_TEXT("timestamp_utc", now);
  G2ZR_TEXT("launcher", launch->place->launcher);
  G2ZR_TEXT("checkpoint_path", run->save_weights ? run->save_weights : run->run_dir);
  G2ZR_TEXT("rank0_host", host);
  G2ZR_WHOLE("world_size", launch->place->world);
  G2ZR_TEXT("git_commit", run->git_commit);
  G2ZR_TEXT("command_line", run->command_line);
  g2zr_put_variables(out, "slurm", "SLURM_");
  g2zr_put_variables(out, "env", "CUDA_ OMP_ OMPI_COMM_WORLD_ PMI_ RANK= WORLD_SIZE= LOCAL_RANK= "
                     "LOCAL_WORLD_SIZE= MASTER_ADDR= MASTER_PORT= G2Z_ RUN_DIR= NSYS= DIST_DEBUG= "
                     "GRAD_ACCUM_STEPS= MICRO_BATCH_SIZE_PER_GPU= GPT2_EXTRA_ARGS=");
  g2zr_put_variables(out, "nccl_env", "NCCL_");
}

G2Z_API g2z_status g2z_run_write_launch(g2z_services *services, const g2z_run_config *run,
                                        const g2z_place *place) {
  g2zr_launch launch = {run, place, NULL, NULL};
  if (place->rank != 0 || !run->run_dir) return G2Z_OK;
  unlink(g2z_path_in(run->run_dir, "RUN_FAILED.json").text); /* of an earlier start */
  /* Ranks that were killed while they reported a fault leave half of a report. */
  DIR *directory = opendir(run->run_dir);
  for (struct dirent *entry; directory && (entry = readdir(directory)) != NULL;) {
    const char *name = entry->d_name, *end = strstr(name, ".partial");
    if (end && !end[8] && (strncmp(name, "flight_rank_", 12) == 0 ||
                           strncmp(name, "RUN_FAILED.json", 15) == 0))
      unlink(g2z_path_in(run->run_dir, "%s", name).text);
  }
  if (directory) closedir(directory);
  return g2z_json_write(services, g2z_path_in(run->run_dir, "launcher_metadata.json").text,
                         g2zr_put_launch, &launch);
}

/* Writes the output of a command into a file, or a line that it failed. */
static g2z_status g2zr_write_output_of(g2z_services *services, const char *directory,
                                       const char *name, const char *command) {
  char block[4096];
  g2z_writer *writer;
  size_t got;
  G2Z_TRY(g2z_writer_create(services, g2z_path_in(directory, "%s", name).text, &writer));
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

/* --nccl-logs: NCCL reads these variables once, at its start. The user's own values stay. */
static g2z_status g2zr_log_nccl(g2z_services *services, const g2z_run_options *o,
                                const g2z_place *place) {
  const char *variable = getenv("NCCL_LOGS"), *directory = o->run.run_dir;
  char path[1200];
  if (!o->nccl_logs && !(variable && strcmp(variable, "1") == 0)) return G2Z_OK;
  if (!directory)
    G2Z_REFUSE(services, "%s", o->nccl_logs ? "--nccl-logs writes into the run directory: give one"
               : "NCCL_LOGS=1 writes into the run directory: give one, or unset it");
  G2Z_TRY(g2z_make_directory(services, directory));
  setenv("NCCL_DEBUG", "INFO", 0);
  snprintf(path, sizeof path, "%s/nccl_rank_%%h_%%p.log", directory); /* NCCL's: host, process */
  setenv("NCCL_DEBUG_FILE", path, 0);
  if (place->rank != 0) return G2Z_OK;
  snprintf(path, sizeof path, "%s/nccl_topo.xml", directory);
  setenv("NCCL_TOPO_DUMP_FILE", path, 0);
  G2Z_TRY(g2zr_write_output_of(services, directory, "topo.txt", "nvidia-smi topo -m"));
  return g2zr_write_output_of(services, directory, "ibstat.txt", "ibstat");
}

G2Z_API g2z_status g2z_run_launch(g2z_run_options *o, const g2z_context_config *config,
                                  g2z_context **context, g2z_run **run) {
  const g2z_place *place = &config->ranks.place;
  *run = NULL;
  G2Z_TRY(g2z_context_create(config, context));
  g2z_ranks *ranks = (*context)->ranks;
  g2z_status status = g2z_ranks_broadcast(ranks, o->run_dir_text, sizeof o->run_dir_text);
  if (status == G2Z_OK) {
    /* Without --save-weights none a training leaves its weights: a forgotten flag must not cost
     * hours. */
    const char *said = o->run.save_weights;
    snprintf(o->weights_text, sizeof o->weights_text, "%s/weights", o->run_dir_text);
    if (said && strcmp(said, "none") == 0) o->run.save_weights = NULL;
    else if (!said && o->run.run_dir && o->run.train.train_glob)
      o->run.save_weights = o->weights_text;
    __atomic_store_n(&o->met, ranks, __ATOMIC_RELEASE);
    status = g2z_ranks_agree(ranks, g2zr_log_nccl(config->services, o, place));
  }
  if (status == G2Z_OK) status = g2z_run_create(*context, &o->run, run);
  if (status == G2Z_OK) status = g2z_run_write_launch(config->services, &o->run, place);
  if (status == G2Z_OK) return G2Z_OK;
  g2z_run_free(*run);
  g2z_context_free(*context);
  *run = NULL;
  *context = NULL;
  return status;
}

static void g2zr_put_failure(void *user, g2z_json_out *out) {
  const g2zr_launch *launch = (const g2zr_launch *)user;
  const g2z_fault *fault = launch->fault;
  char now[32];
  g2z_utc_now(now);
  G2ZR_TEXT("timestamp_utc", now);
  G2ZR_TEXT("sentence", fault->sentence);
  G2ZR_WHOLE("rank", fault->rank);
  G2ZR_TEXT("host", fault->host);
  G2ZR_TEXT("phase", fault->phase);
  G2ZR_WHOLE("step", fault->step);
  G2ZR_WHOLE("reported_by_rank", launch->place->rank);
  G2ZR_WHOLE("world_size", launch->place->world);
  G2ZR_TEXT("flight_recorder", launch->flight);
}

/* If another rank is writing RUN_FAILED.json, it writes the same. */
G2Z_API void g2z_run_write_fault(const g2z_run_options *o, const g2z_fault *fault) {
  g2z_ranks *ranks = __atomic_load_n(&o->met, __ATOMIC_ACQUIRE);
  g2z_services services; /* its own: the program's belong to the main thread */
  char name[64];
  memset(&services, 0, sizeof services);
  if (!ranks || !o->run.run_dir || g2z_make_directory(&services, o->run.run_dir) != G2Z_OK) return;
  g2zr_launch launch = {&o->run, g2z_ranks_place(ranks), fault, NULL};
  snprintf(name, sizeof name, "flight_rank_%d.jsonl", launch.place->rank);
  const g2z_path flight = g2z_path_in(o->run.run_dir, "%s", name),
                 failure = g2z_path_in(o->run.run_dir, "RUN_FAILED.json");
  if (g2z_ranks_write_flight(ranks, &services, flight.text) == G2Z_OK) launch.flight = name;
  g2z_json_write(&services, failure.text, g2zr_put_failure, &launch);
}

/* ----- signals ----- */

static g2z_run *g2zr_running;         /* NULL: there is nothing to save yet */
static double g2zr_asked_at;          /* g2z_seconds() of the first signal; 0: none came */

static void g2zr_on_signal(int number) {
  const double now = g2z_seconds();
  g2z_run *run = __atomic_load_n(&g2zr_running, __ATOMIC_RELAXED);
  if (g2zr_asked_at > 0 && now - g2zr_asked_at < 0.5) return;
  if (g2zr_asked_at > 0 || !run) _exit(128 + number);
  g2zr_asked_at = now;
  g2z_run_request_stop(run, number);
}

/* SIGHUP comes when a terminal closes; under nohup it is ignored and stays so. */
G2Z_API void g2z_run_catch_signals(g2z_run *run) {
  struct sigaction action, before;
  memset(&action, 0, sizeof action);
  action.sa_handler = g2zr_on_signal;
  action.sa_flags = SA_RESTART;
  __atomic_store_n(&g2zr_running, run, __ATOMIC_RELAXED);
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
