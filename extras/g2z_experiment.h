/* g2z_experiment.h: experiments with gpt2_zero.h. An experiment makes one measurement for several
 * configurations, each in separate processes, and reports it as a file, a table and a page. The
 * program is bench.cu. MIT licence.
 *
 * g2z_experiment.h prints nothing: progress goes to services->log. Names that begin with g2zx_ or
 * G2ZX_ are private.
 *
 * CONTENTS: figures and summaries; the work of bench; experiments
 *
 * An experiment writes run directories run_NAME_N, numbered in the order of their runs, and
 * NAME_report.json; `bench report` adds report.html (docs/formats.md). */

#ifndef G2Z_EXPERIMENT_INCLUDED
#define G2Z_EXPERIMENT_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_experiment.h: include gpt2_zero.h before it"
#endif

#include "g2z_command.h"
#include "g2z_program.h"
#include "g2z_report.h"
#include "g2z_run.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ===== figures and summaries =============================================
 * A point is one configuration, or one message size of one collective, with its figures. A summary
 * is a list of points. It is written as NAME_report.json, as a Markdown table, and on a page. */

/* Figures of a point. An unknown figure is NaN here and null in files. A file leaves out a figure
 * that is unknown for all points. */
#define G2Z_FIGURE_LIST(X)                                                                        \
  /* name               digits heading        meaning */                                          \
  X(world_size,           0, "ranks",        "")                                                  \
  X(micro_batch,          0, "batch",        "sequences per micro-step and rank")                 \
  X(accum_steps,          0, "micro-steps",  "per step")                                          \
  X(global_batch,         0, "global batch", "sequences per step")                                \
  X(seq_len,              0, "T",            "tokens per sequence")                               \
  X(zero_stage,           0, "stage",        "")                                                  \
  X(bucket_mib,           2, "MiB",          "of gradients per collective, as requested")         \
  X(buckets,              0, "buckets",      "")                                                  \
  X(plan_gib,             3, "plan GiB",     "of one rank")                                       \
  X(steps,                0, "steps",        "measured steps, without warm-up")                   \
  X(tokens_per_sec,       0, "tokens/s",     "of all ranks: a step's tokens over step_p50_ms")    \
  X(tokens_per_sec_sd,    0, "+-",           "standard deviation over the repeats")               \
  X(step_min_ms,          2, "min ms",       "")                                                  \
  X(step_p50_ms,          2, "p50 ms",       "")                                                  \
  X(step_p95_ms,          2, "p95 ms",       "")                                                  \
  X(step_max_ms,          2, "max ms",       "")                                                  \
  X(step_mean_ms,         2, "mean ms",      "")                                                  \
  X(step_sd_ms,           2, "sd ms",        "")                                                  \
  X(train_time_sec,       2, "training s",   "sum over the measured steps")                       \
  X(total_wall_time_sec,  2, "wall s",       "from the start of the processes to their end")      \
  X(exposed_comm_ms,      3, "exposed ms",   "shortest wait of a rank in a step; median")         \
  X(waited_ms,            3, "waiting ms",   "longest wait of a rank in a step; median")          \
  X(exposed_comm_sec,     3, "exposed s",    "sum over the measured steps")                       \
  X(exposed_comm_share,   3, "share",        "of train_time_sec")                                 \
  X(collectives_per_step, 0, "collectives",  "that moved a bucket")                               \
  X(cpu_percent,          1, "CPU %",        "of the host's cores, in the measured steps")        \
  X(gpu_percent,          1, "GPU %",        "time with a kernel, by nvidia-smi")                 \
  X(peak_memory_gib,      3, "peak GiB",     "GPU: increase over the start; CPU: resident")       \
  X(speedup_vs_1gpu,      3, "speed-up",     "tokens/s over the tokens/s of one rank")            \
  X(scaling_efficiency,   3, "efficiency",   "speed-up over ranks")                               \
  X(message_mib,          0, "MiB",          "of a collective's whole buffer")                    \
  X(time_us,              1, "us",           "per collective, on the slowest rank")               \
  X(bus_gb_per_sec,       2, "bus GB/s",     "traffic per link, as nccl-tests counts it")         \
  X(limit_gb_per_sec,     2, "limit GB/s",   "a plain copy: g2zx_copy_rate")                      \
  X(of_limit,             3, "of limit",     "bus over limit")                                    \
  X(began_sec,            3, "began",        "g2z_seconds() when measuring began")                \
  X(ended_sec,            3, "ended",        "g2z_seconds() when measuring ended")

typedef struct g2z_figures {
#define X(name, digits, heading, meaning) double name;
  G2Z_FIGURE_LIST(X)
#undef X
} g2z_figures;
/* Access to figures by number: 0 .. G2Z_FIGURE_COUNT - 1. */
#define G2Z_FIGURE_COUNT ((int)(sizeof(g2z_figures) / sizeof(double)))
#define G2Z_FIGURE(name) ((int)(offsetof(g2z_figures, name) / sizeof(double)))
G2Z_API double *g2z_figure(g2z_figures *figures, int number);

typedef enum g2z_outcome {
  G2Z_OUTCOME_OK,
  G2Z_OUTCOME_SKIPPED,          /* this machine cannot run it, or bench was stopped before */
  G2Z_OUTCOME_FAILED,
  G2Z_OUTCOME_COUNT
} g2z_outcome;

#define G2Z_REPEATS 32
typedef struct g2z_point {
  char name[96];
  char series[64];              /* the line of a chart that has the point: `name` without the x
                                 * value; "": the only line */
  char reason[400];             /* why the point was skipped or failed */
  g2z_outcome outcome;
  int repeats, runs[G2Z_REPEATS]; /* numbers N of its run directories run_EXPERIMENT_N */
  g2z_figures figures;          /* medians over the repeats */
} g2z_point;
/* A point without a name; all its figures are unknown. */
G2Z_API g2z_point g2z_point_default(void);

typedef struct g2z_summary {
  g2z_services *services;
  char experiment[32], generated_utc[32], command_line[1024], commit[64], hardware[256], work[256];
  g2z_point *points;
  size_t count, capacity;
} g2z_summary;

/* experiment: "scaling", "buckets", "matrix", "strategies" or "comm"; or "point", for the figures
 * that the ranks of one point measured. */
G2Z_API g2z_status g2z_summary_create(g2z_services *services, const char *experiment,
                                      g2z_summary **out);
G2Z_API void g2z_summary_free(g2z_summary *summary); /* NULL is fine */
/* Adds a point. *out is valid until the next call. */
G2Z_API g2z_status g2z_summary_add(g2z_summary *summary, g2z_point **out);
G2Z_API g2z_status g2z_summary_write(const g2z_summary *summary, const char *path);
/* Reads a file of g2z_summary_write; refuses any other file. */
G2Z_API g2z_status g2z_summary_read(g2z_services *services, const char *path, g2z_summary **out);
/* Prints a Markdown table with the experiment's columns, then machine, work, command and commit,
 * then the points that were skipped or failed. */
G2Z_API void g2z_summary_print(const g2z_summary *summary,
                               void (*line)(void *user, const char *text), void *user);
/* Puts the same on a page, and adds charts of throughput, speed-up, times, communication and
 * memory. */
G2Z_API void g2z_summary_page(const g2z_summary *summary, g2z_page *page);

/* ===== the work of bench =================================================
 * The sub-commands of bench, their flags, and the stopwatch for steps. */

/* Without a sub-command, bench runs the first one. The two without a description are not for users:
 * the ranks of an experiment run them. */
#define G2Z_BENCH_LIST(X)                                                          \
  /* name       what it does */                                                    \
  X(step,       "times training steps, then each op of a step")                    \
  X(ops,        "compares each op of a step with this machine's limits")           \
  X(scaling,    "the same work on 1, 2, 4, ... ranks: speed-up and efficiency")    \
  X(buckets,    "sizes of gradient buckets: how much communication stays exposed") \
  X(matrix,     "ZeRO stages by precision: throughput, memory, utilisation")       \
  X(strategies, "dp and the ZeRO stages on 1, 2, ... ranks")                       \
  X(comm,       "compares each collective with a plain copy")                      \
  X(report,     "DIR...: writes report.html, a page about experiments and runs")   \
  X(profile,    "DIR...: lists what took most time in profiled runs")              \
  X(point,      NULL)                                                              \
  X(exchange,   NULL)

typedef enum g2z_bench_command {
#define X(name, about) G2Z_BENCH_##name,
  G2Z_BENCH_LIST(X)
#undef X
  G2Z_BENCH_COUNT
} g2z_bench_command;

typedef struct g2z_bench_work { /* an experiment's settings; g2zx_rows has the defaults */
  const char *ranks, *stages, *dtypes, *sizes; /* the axes: lists such as "1,2,4" */
  int batch, accum, global_batch, seq, steps, warmup, repeats, val_steps, graph;
} g2z_bench_work;

typedef struct g2z_bench {      /* the command line of bench */
  g2z_train_config train;
  int command, argc;
  char **argv;                  /* report and profile: directories in argv[1..argc-1] */
  const char *command_line, *commit; /* shown in the report; NULL: unknown */
  const char *model, *peer, *out, *run_dir;
  g2z_bench_work work;          /* use batch, accum and graph of `train` instead */
  g2z_model_config shape;       /* replaces values of `model`; 0: see --help */
  int device, dtype, without_ops; /* device and dtype: -1 if not given */
  int help;                     /* 1: only print g2z_bench_help */
  g2z_device_kind help_for;     /* g2z_bench_help shows the defaults for this device */
  int64_t tokens;
} g2z_bench;

/* Reads argv, and completes `context` and out->train from it. */
G2Z_API g2z_status g2z_bench_read(g2z_services *services, int argc, char **argv,
                                  g2z_context_config *context, g2z_bench *out);
G2Z_API void g2z_bench_help(const g2z_bench *o, void (*line)(void *user, const char *text),
                            void *user);

/* Random tokens: the probability of token t is proportional to 1 / (t + 1) (Zipf's law). As in real
 * text, a few tokens are frequent, which slows the embedding's backward. Free *out with
 * g2z_release. */
G2Z_API g2z_status g2z_zipf_tokens(g2z_services *services, uint64_t seed, int vocab, size_t count,
                                   int32_t **out);

typedef struct g2z_stopwatch {  /* times of the measured steps */
  double *step_s;
  double *exposed_s, *waited_s; /* wait for communication: minimum and maximum over the ranks */
  int count;
  double collectives;           /* number of collectives in step 2; NaN: there was no step 2 */
  double began, ended, cpu_s;   /* of this rank; g2z_stopwatch_ranks sums cpu_s over the ranks */
} g2z_stopwatch;
/* Allocates room for `steps`; free out->step_s with g2z_release. */
G2Z_API g2z_status g2z_stopwatch_open(g2z_services *services, int steps, g2z_stopwatch *out);
/* For each step i, exposed_s[i] becomes its minimum over the ranks and waited_s[i] its maximum;
 * cpu_s becomes the sum. The minimum is the time of the communication itself: a rank with a longer
 * wait also waits for a slower rank. */
G2Z_API g2z_status g2z_stopwatch_ranks(g2z_context *context, g2z_stopwatch *watch);

/* ===== experiments =======================================================
 * An experiment is a row of a table: the defaults of its axes, the sub-command that its ranks run,
 * and the columns of its report. One runner starts the ranks of each point, in rounds. */

/* Runs any sub-command except step, ops and profile. */
G2Z_API g2z_status g2z_bench_run(g2z_services *services, const g2z_bench *o,
                                 const g2z_context_config *config);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_EXPERIMENT_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_EXPERIMENT_IMPLEMENTED)
#define G2Z_EXPERIMENT_IMPLEMENTED

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ===== the table of experiments ========================================== */

#define G2ZX_COLUMNS 16

typedef struct g2zx_row {
  int command;                  /* the sub-command, which names the experiment */
  const char *title;
  int measures;                 /* the sub-command of its ranks: point (training) or exchange */
  g2z_bench_work work[2];       /* defaults: [0] CPU, just enough to run every part; [1] CUDA */
  int columns[1 + G2ZX_COLUMNS]; /* figures in its report; -1 ends the list */
} g2zx_row;

#define X G2Z_FIGURE
static const g2zx_row g2zx_rows[] = {
    /* The axes: ranks, stages, types, sizes of buckets or messages. Then batch, accum, global
     * batch, seq, steps, warm-up, repeats, validation batches, graph. */
    {G2Z_BENCH_scaling, "Scaling: the same work on more ranks", G2Z_BENCH_point,
     {{"1,2", "1", "fp32", "0", 4, 1, 8, 64, 6, 2, 2, 0, 2},
      {"1,2,4,8", "1", "fp16", "0", 4, 1, 16, 512, 300, 20, 3, 0, 2}},
     {X(world_size), X(micro_batch), X(accum_steps), X(tokens_per_sec), X(tokens_per_sec_sd),
      X(step_p50_ms), X(train_time_sec), X(total_wall_time_sec), X(exposed_comm_ms), X(waited_ms),
      X(speedup_vs_1gpu), X(scaling_efficiency), -1}},
    {G2Z_BENCH_buckets, "Sizes of gradient buckets", G2Z_BENCH_point,
     {{"2", "1", "fp32", "0.25,1,4", 4, 1, 0, 64, 6, 2, 2, 0, 0},
      {"all", "1", "fp16", "1,5,25,100,400", 4, 1, 0, 512, 300, 20, 3, 0, 2}},
     {X(world_size), X(buckets), X(collectives_per_step), X(step_p50_ms), X(step_p95_ms),
      X(exposed_comm_ms), X(waited_ms), X(tokens_per_sec), X(tokens_per_sec_sd), -1}},
    {G2Z_BENCH_matrix, "ZeRO stages by precision", G2Z_BENCH_point,
     {{"2", "0,1,2,3", "fp16,bf16,fp32", "0", 4, 1, 0, 32, 4, 2, 2, 0, 2},
      {"all", "0,1,2,3", "fp16,bf16,fp32", "0", 32, 1, 0, 128, 200, 20, 5, 0, 2}},
     {X(world_size), X(tokens_per_sec), X(tokens_per_sec_sd), X(step_p50_ms), X(step_p95_ms),
      X(peak_memory_gib), X(plan_gib), X(gpu_percent), -1}},
    {G2Z_BENCH_strategies, "Strategies", G2Z_BENCH_point,
     {{"1,2", "dp,0,2,3", "fp32", "0", 2, 2, 0, 32, 4, 2, 2, 2, 0},
      {"1,2,4", "dp,0,2,3", "fp16", "0", 2, 2, 0, 512, 300, 20, 3, 50, 2}},
     {X(world_size), X(tokens_per_sec), X(tokens_per_sec_sd), X(total_wall_time_sec),
      X(exposed_comm_sec), X(exposed_comm_share), X(gpu_percent), X(cpu_percent),
      X(peak_memory_gib), X(speedup_vs_1gpu), X(scaling_efficiency), -1}},
    {G2Z_BENCH_comm, "Collectives", G2Z_BENCH_exchange,
     {{"2", "", "", "1,4,16", 1, 1, 0, 1, 1, 0, 2, 0, 2},
      {"all", "", "", "1,4,16,64,256", 1, 1, 0, 1, 1, 0, 3, 0, 2}},
     {X(message_mib), X(time_us), X(bus_gb_per_sec), X(limit_gb_per_sec), X(of_limit), -1}},
    {G2Z_BENCH_point, "A point", -1,
     {{"", "", "", "", 1, 1, 0, 1, 1, 0, 1, 0, 2}, {"", "", "", "", 1, 1, 0, 1, 1, 0, 1, 0, 2}},
     {X(tokens_per_sec), X(step_p50_ms), -1}}};

/* The charts of a page, in order. */
enum { G2ZX_NONE = -1, G2ZX_SPREAD = -2, G2ZX_SAME = -3 };
#define G2ZX_IN(name) (1u << G2Z_BENCH_##name)
#define G2ZX_READERS (G2ZX_IN(report) | G2ZX_IN(profile)) /* take directories as arguments */
#define G2ZX_TRAINED (G2ZX_IN(scaling) | G2ZX_IN(buckets) | G2ZX_IN(matrix) | G2ZX_IN(strategies))
typedef struct g2zx_chart {
  unsigned in;                  /* the experiments that have this chart */
  const char *title, *about;
  int y;
  int more;                     /* bars: a second figure. Lines: an ideal; SAME: y = x */
  int low, high;                /* bars: whiskers from low to high. high SPREAD: y +- low */
  int x;                        /* lines: the figure on the x axis. NONE: the chart has bars */
  const char *x_name;
  g2z_axis axis;                /* kind of the x axis */
} g2zx_chart;
#define NONE G2ZX_NONE
#define LINES(y, ideal, x, x_name, axis) X(y), ideal, NONE, NONE, X(x), x_name, G2Z_AXIS_##axis
#define BARS(y, more, low, high) X(y), more, low, high, NONE, NULL, G2Z_AXIS_AUTO
static const g2zx_chart g2zx_charts[] = {
    {G2ZX_IN(comm), "Bandwidth", "GB/s on the link of each rank",
     LINES(bus_gb_per_sec, X(limit_gb_per_sec), message_mib, "MiB", LOG)},
    {G2ZX_IN(comm), "Time", "us per collective", LINES(time_us, NONE, message_mib, "MiB", LOG)},
    {G2ZX_TRAINED, "Throughput",
     "tokens per second, all ranks; whiskers: standard deviation over the repeats",
     BARS(tokens_per_sec, NONE, X(tokens_per_sec_sd), G2ZX_SPREAD)},
    {G2ZX_TRAINED, "Speed-up", "tokens/s relative to one rank",
     LINES(speedup_vs_1gpu, G2ZX_SAME, world_size, "ranks", LINEAR)},
    {G2ZX_IN(buckets), "Exposed communication", "ms per step in which every rank waits",
     LINES(exposed_comm_ms, NONE, bucket_mib, "MiB per collective", LOG)},
    {G2ZX_TRAINED & ~G2ZX_IN(buckets), "Exposed communication",
     "ms per step in which every rank waits", BARS(exposed_comm_ms, NONE, NONE, NONE)},
    {G2ZX_TRAINED, "Step time", "ms: median; whiskers from the minimum to the 95th percentile",
     BARS(step_p50_ms, NONE, X(step_min_ms), X(step_p95_ms))},
    {G2ZX_TRAINED, "Memory", "GiB per rank", BARS(peak_memory_gib, X(plan_gib), NONE, NONE)},
    {G2ZX_TRAINED, "GPU utilisation", "% of the measured time",
     BARS(gpu_percent, NONE, NONE, NONE)}};
#undef NONE
#undef LINES
#undef BARS
#undef X

static const struct { const char *name, *about; } g2zx_commands[] = {
#define X(name, about) {#name, about},
    G2Z_BENCH_LIST(X)
#undef X
};

/* The number of the sub-command `name`; G2Z_BENCH_COUNT: there is none. */
static int g2zx_command_named(const char *name) {
  int command = 0;
  while (command < G2Z_BENCH_COUNT && strcmp(name, g2zx_commands[command].name) != 0) command++;
  return command;
}

/* The row of an experiment, or of a point; NULL: there is none. */
static const g2zx_row *g2zx_row_of(int command) {
  for (size_t i = 0; i < G2Z_COUNT(g2zx_rows); i++)
    if (g2zx_rows[i].command == command) return &g2zx_rows[i];
  return NULL;
}

static const g2zx_row *g2zx_row_named(const char *name) {
  return g2zx_row_of(g2zx_command_named(name));
}

/* ===== figures and summaries =============================================
 * In:  figures, or files of any origin. Out: files, tables, pages.
 * Law: a file is read and checked as a whole before any value of it is used. */

#define G2ZX_FORMAT "gpt2_zero experiment 1"
#define G2ZX_SUMMARY_POINTS 4096 /* a file with more is damaged */

static const struct {
  const char *name, *heading;
  int digits;
} g2zx_figures[] = {
#define X(name, digits, heading, meaning) {#name, heading, digits},
    G2Z_FIGURE_LIST(X)
#undef X
};

static const char *const g2zx_outcomes[] = {"ok", "skipped", "failed"};

G2Z_API double *g2z_figure(g2z_figures *figures, int number) {
  G2Z_ASSERT(number >= 0 && number < G2Z_FIGURE_COUNT);
  return (double *)(void *)figures + number; /* all members of the struct are doubles */
}

static double g2zx_figure_of(const g2z_point *point, int number) {
  g2z_figures figures = point->figures;
  return *g2z_figure(&figures, number);
}

G2Z_API g2z_point g2z_point_default(void) {
  g2z_point point;
  memset(&point, 0, sizeof point);
  for (int i = 0; i < G2Z_FIGURE_COUNT; i++) *g2z_figure(&point.figures, i) = NAN;
  return point;
}

G2Z_API g2z_status g2z_summary_create(g2z_services *services, const char *experiment,
                                      g2z_summary **out) {
  g2z_summary *summary;
  *out = NULL;
  if (!g2zx_row_named(experiment))
    G2Z_REFUSE(services, "no experiment is called \"%.64s\"", experiment);
  G2Z_TRY(G2Z_NEW(services, 1, &summary));
  summary->services = services;
  snprintf(summary->experiment, sizeof summary->experiment, "%s", experiment);
  snprintf(summary->generated_utc, sizeof summary->generated_utc, "%s", g2z_utc_now().text);
  *out = summary;
  return G2Z_OK;
}

G2Z_API void g2z_summary_free(g2z_summary *summary) {
  if (!summary) return;
  g2z_release(summary->services, summary->points);
  g2z_release(summary->services, summary);
}

G2Z_API g2z_status g2z_summary_add(g2z_summary *summary, g2z_point **out) {
  *out = NULL;
  if (summary->count >= G2ZX_SUMMARY_POINTS)
    G2Z_REFUSE(summary->services, "an experiment has at most %d points", G2ZX_SUMMARY_POINTS);
  G2Z_TRY(G2Z_GROW(summary->services, &summary->points, &summary->capacity, summary->count,
                   summary->count + 1));
  *out = &summary->points[summary->count++];
  **out = g2z_point_default();
  return G2Z_OK;
}

/* 1: at least one point has the figure. */
static int g2zx_knows(const g2z_summary *summary, int number) {
  for (size_t i = 0; i < summary->count; i++)
    if (!isnan(g2zx_figure_of(&summary->points[i], number))) return 1;
  return 0;
}

/* The texts of a summary, with their names in files. */
#define G2ZX_SUMMARY_TEXTS(X)          \
  X(experiment, "experiment")          \
  X(generated_utc, "generated_at_utc") \
  X(command_line, "command_line")      \
  X(commit, "git_commit")              \
  X(hardware, "hardware")              \
  X(work, "work")

static void g2zx_put_summary(void *user, g2z_json_out *out) {
  const g2z_summary *summary = (const g2z_summary *)user;
  char name[64];
  g2z_json_put_string(out, "format", G2ZX_FORMAT);
#define X(member, name) g2z_json_put_string(out, name, summary->member);
  G2ZX_SUMMARY_TEXTS(X)
#undef X
  g2z_json_begin(out, "points", '[');
  for (const g2z_point *p = summary->points; p < summary->points + summary->count; p++) {
    g2z_json_begin(out, NULL, '{');
    g2z_json_put_string(out, "name", p->name);
    g2z_json_put_string(out, "series", p->series);
    g2z_json_put_string(out, "outcome", g2zx_outcomes[p->outcome]);
    g2z_json_put_string(out, "reason", p->reason[0] ? p->reason : NULL);
    g2z_json_begin(out, "runs", '[');
    for (int r = 0; r < p->repeats; r++) {
      snprintf(name, sizeof name, "run_%s_%d", summary->experiment, p->runs[r]);
      g2z_json_put_string(out, NULL, name);
    }
    g2z_json_end(out, ']');
    for (int i = 0; i < G2Z_FIGURE_COUNT; i++)
      if (g2zx_knows(summary, i))
        g2z_json_put_number(out, g2zx_figures[i].name, g2zx_figure_of(p, i));
    g2z_json_end(out, '}');
  }
  g2z_json_end(out, ']');
}

G2Z_API g2z_status g2z_summary_write(const g2z_summary *summary, const char *path) {
  return g2z_json_write(summary->services, path, g2zx_put_summary, (void *)summary);
}

/* Reads the summary from a file's object. */
static g2z_status g2zx_get_summary(const g2z_object *from, g2z_summary *summary) {
  g2z_services *services = summary->services;
  g2z_json points, runs, json;
  g2z_object object, run;
  g2z_point *point;
  char word[64];
  g2z_object_copy(from, "format", word, sizeof word);
  if (strcmp(word, G2ZX_FORMAT) != 0)
    return g2z_fail(services, G2Z_FORMAT, "%.400s has the format \"%s\", but only \"%s\" can be "
                    "read: name what bench wrote", from->path, word, G2ZX_FORMAT);
#define X(member, name) g2z_object_copy(from, name, summary->member, sizeof summary->member);
  G2ZX_SUMMARY_TEXTS(X)
#undef X
  if (!g2zx_row_named(summary->experiment))
    return g2z_fail(services, G2Z_FORMAT, "%.400s: no experiment is called \"%s\"", from->path,
                    summary->experiment);
  for (int more = g2z_object_list(from, "points", &points);
       more && g2z_object_next(from, &points, &object);) {
    int outcome = 0;
    G2Z_TRY(g2z_summary_add(summary, &point));
    g2z_object_copy(&object, "name", point->name, sizeof point->name);
    g2z_object_copy(&object, "series", point->series, sizeof point->series);
    g2z_object_copy(&object, "reason", point->reason, sizeof point->reason);
    g2z_object_copy(&object, "outcome", word, sizeof word);
    while (outcome < G2Z_OUTCOME_COUNT && strcmp(word, g2zx_outcomes[outcome]) != 0) outcome++;
    if (outcome == G2Z_OUTCOME_COUNT || !point->name[0])
      return g2z_fail(services, G2Z_FORMAT, "%.400s: the point \"%s\" needs a name and an outcome: "
                      "ok, skipped or failed, not \"%s\"", from->path, point->name, word);
    point->outcome = (g2z_outcome)outcome;
    for (int i = 0; i < G2Z_FIGURE_COUNT; i++) {
      const double value = g2z_object_number(&object, g2zx_figures[i].name);
      *g2z_figure(&point->figures, i) = value;
      if (isnan(value) && g2z_object_at(&object, g2zx_figures[i].name, &json) &&
          g2z_json_peek(&json) != 'n')
        return g2z_fail(services, G2Z_FORMAT, "%.400s: \"%s\" of the point \"%s\" is not a number",
                        from->path, g2zx_figures[i].name, point->name);
    }
    for (int has = g2z_object_list(&object, "runs", &runs);
         has && g2z_object_next(&object, &runs, &run);) {
      g2z_object_copy(&run, "", word, sizeof word);
      const char *number = strrchr(word, '_');
      if (strncmp(word, "run_", 4) != 0 || !number || point->repeats == G2Z_REPEATS)
        return g2z_fail(services, G2Z_FORMAT, "%.400s: the runs of the point \"%s\" are at most %d "
                        "names run_EXPERIMENT_N, and \"%s\" is not one of them", from->path,
                        point->name, G2Z_REPEATS, word);
      point->runs[point->repeats++] = atoi(number + 1);
    }
  }
  if (summary->count) return G2Z_OK;
  return g2z_fail(services, G2Z_FORMAT, "%.400s has no points", from->path);
}

G2Z_API g2z_status g2z_summary_read(g2z_services *services, const char *path, g2z_summary **out) {
  g2z_object file;
  *out = NULL;
  g2z_status status = g2z_object_read(services, path, &file);
  if (status == G2Z_OK && !file.text) status = g2z_fail_file(services, ENOENT, "read", path);
  if (status == G2Z_OK) status = g2z_summary_create(services, "point", out);
  if (status == G2Z_OK) status = g2zx_get_summary(&file, *out);
  if (status != G2Z_OK) {
    g2z_summary_free(*out);
    *out = NULL;
  }
  g2z_object_free(&file);
  return status;
}

/* ----- the table and the page ----- */

/* The figures of the experiment's table that at least one point has; returns their number. */
static int g2zx_columns(const g2z_summary *summary, int columns[G2ZX_COLUMNS]) {
  int count = 0;
  for (const int *c = g2zx_row_named(summary->experiment)->columns; *c >= 0; c++)
    if (g2zx_knows(summary, *c)) columns[count++] = *c;
  return count;
}

/* Writes a figure to `text` and returns `text`, which is "" if the figure is not known. */
static const char *g2zx_cell(const g2z_point *point, int number, char text[64]) {
  const double value = g2zx_figure_of(point, number);
  text[0] = 0;
  if (!isnan(value)) snprintf(text, 64, "%.*f", g2zx_figures[number].digits, value);
  return text;
}

G2Z_API void g2z_summary_print(const g2z_summary *summary,
                               void (*line)(void *user, const char *text), void *user) {
  char text[2048], cell[64];
  int columns[G2ZX_COLUMNS];
  const int count = g2zx_columns(summary, columns);
  const g2z_point *end = summary->points + summary->count;
  int used = snprintf(text, sizeof text, "| %s |", summary->experiment);
  for (int c = 0; c < count; c++)
    used += snprintf(text + used, sizeof text - (size_t)used, " %s |",
                     g2zx_figures[columns[c]].heading);
  line(user, text);
  for (int c = 0; c <= count; c++) memcpy(text + 4 * c, "|---", 4);
  memcpy(text + 4 * (count + 1), "|", 2);
  line(user, text);
  for (const g2z_point *point = summary->points; point < end; point++) {
    if (point->outcome != G2Z_OUTCOME_OK) continue;
    used = snprintf(text, sizeof text, "| %s |", point->name);
    for (int c = 0; c < count; c++)
      used += snprintf(text + used, sizeof text - (size_t)used, " %s |",
                       *g2zx_cell(point, columns[c], cell) ? cell : "-");
    line(user, text);
  }
  snprintf(text, sizeof text, "%s; %s; `%s`; commit %.12s", summary->hardware, summary->work,
           summary->command_line, summary->commit);
  line(user, "");
  line(user, text);
  for (const g2z_point *point = summary->points; point < end; point++) {
    if (point->outcome == G2Z_OUTCOME_OK) continue;
    snprintf(text, sizeof text, "%s: %s: %s", g2zx_outcomes[point->outcome], point->name,
             point->reason);
    line(user, text);
  }
}

#define G2ZX_BARS 64                 /* most points in a chart: a page has no room for more */

/* Puts one group of bars per point: the figure with its whiskers, and a second figure. */
static void g2zx_put_bars(g2z_page *page, const g2z_summary *summary, const g2zx_chart *c,
                          const g2z_point *const *points, size_t count) {
  const char *labels[G2ZX_BARS];
  double value[G2ZX_BARS], low[G2ZX_BARS], high[G2ZX_BARS], more[G2ZX_BARS];
  g2z_series series[2];
  int used = 1;
  memset(series, 0, sizeof series);
  for (size_t i = 0; i < count; i++) {
    labels[i] = points[i]->name;
    value[i] = g2zx_figure_of(points[i], c->y);
    if (c->more != G2ZX_NONE) more[i] = g2zx_figure_of(points[i], c->more);
    if (c->low == G2ZX_NONE) continue;
    low[i] = g2zx_figure_of(points[i], c->low);
    if (c->high == G2ZX_SPREAD) {
      const double spread = low[i];
      low[i] = value[i] - spread;
      high[i] = value[i] + spread;
    } else {
      high[i] = g2zx_figure_of(points[i], c->high);
    }
  }
  series[0].name = g2zx_figures[c->y].heading;
  series[0].y = value;
  series[0].count = count;
  if (c->low != G2ZX_NONE) {
    series[0].low = low;
    series[0].high = high;
  }
  if (c->more != G2ZX_NONE && g2zx_knows(summary, c->more)) {
    series[1].name = g2zx_figures[c->more].heading;
    series[1].y = more;
    series[1].count = count;
    used = 2;
  }
  const g2z_chart chart = {c->title, c->about, c->x_name, labels, series, used, c->axis,
                           G2Z_AXIS_AUTO};
  g2z_page_chart(page, &chart);
}

/* Puts one line per series of points, over the figure c->x. A further line is the ideal: y = x, or
 * a figure of the first series. */
static void g2zx_put_lines(g2z_page *page, const g2zx_chart *c, const g2z_point *const *points,
                           size_t count) {
  const int last = G2Z_CHART_SERIES - (c->more != G2ZX_NONE);
  double x[G2Z_CHART_SERIES][G2ZX_BARS], y[G2Z_CHART_SERIES][G2ZX_BARS], ideal[G2ZX_BARS];
  g2z_series series[G2Z_CHART_SERIES];
  int used = 0;
  for (size_t i = 0; i < count; i++) {
    const double at = g2zx_figure_of(points[i], c->x), value = g2zx_figure_of(points[i], c->y);
    const char *name = g2zx_figures[c->y].heading;
    int k = 0;
    if (isnan(at) || isnan(value)) continue;
    if (points[i]->series[0]) name = points[i]->series;
    while (k < used && strcmp(series[k].name, name) != 0) k++;
    if (k == last) continue;
    if (k == used) {
      const g2z_series added = {name, x[k], y[k], NULL, NULL, 0, G2Z_MARK_POINTS};
      series[used++] = added;
    }
    const size_t place = series[k].count++;
    x[k][place] = at;
    y[k][place] = value;
    if (k > 0) continue;
    ideal[place] = at;
    if (c->more >= 0) ideal[place] = g2zx_figure_of(points[i], c->more);
  }
  if (!used || series[0].count < 2) return; /* one point is no line */
  if (c->more != G2ZX_NONE) {
    const g2z_series added = {c->more == G2ZX_SAME ? "ideal" : "limit", x[0], ideal, NULL, NULL,
                              series[0].count, G2Z_MARK_DASHED};
    series[used++] = added;
  }
  const g2z_chart chart = {c->title, c->about, c->x_name, NULL, series, used, c->axis,
                           G2Z_AXIS_ZERO};
  g2z_page_chart(page, &chart);
}

G2Z_API void g2z_summary_page(const g2z_summary *summary, g2z_page *page) {
  const g2zx_row *row = g2zx_row_named(summary->experiment);
  const g2z_point *points[G2ZX_BARS], *end = summary->points + summary->count;
  const char *headers[1 + G2ZX_COLUMNS] = {summary->experiment};
  int columns[G2ZX_COLUMNS];
  char cell[64];
  size_t count = 0;
  g2z_page_heading(page, row->title);
  g2z_page_fact(page, "machine", "%s", summary->hardware);
  g2z_page_fact(page, "work", "%s", summary->work);
  g2z_page_fact(page, "commit", "%s", summary->commit);
  g2z_page_fact(page, "when", "%s", summary->generated_utc);
  g2z_page_fact(page, "command", "%s", summary->command_line);
  const int known = g2zx_columns(summary, columns);
  for (int c = 0; c < known; c++) headers[1 + c] = g2zx_figures[columns[c]].heading;
  g2z_page_table(page, 1 + known, headers);
  for (const g2z_point *point = summary->points; point < end; point++) {
    if (point->outcome != G2Z_OUTCOME_OK) continue;
    g2z_page_cell(page, "%s", point->name);
    for (int c = 0; c < known; c++) g2z_page_cell(page, "%s", g2zx_cell(point, columns[c], cell));
    if (count < G2ZX_BARS) points[count++] = point;
  }
  for (const g2z_point *point = summary->points; point < end; point++)
    if (point->outcome != G2Z_OUTCOME_OK)
      g2z_page_text(page, "%s: %s: %s", g2zx_outcomes[point->outcome], point->name, point->reason);
  for (const g2zx_chart *c = g2zx_charts; c < g2zx_charts + G2Z_COUNT(g2zx_charts) && count; c++) {
    if (!(c->in >> row->command & 1) || !g2zx_knows(summary, c->y)) continue;
    if (c->x == G2ZX_NONE) g2zx_put_bars(page, summary, c, points, count);
    else g2zx_put_lines(page, c, points, count);
  }
}

/* ===== the work of bench =================================================
 * In:  a command line. Out: a config, and a stopwatch for steps.
 * Law: one table lists the flags of all sub-commands. A flag with two meanings has two rows. */

#define G2ZX_STEPS_MAX 100000000
#define G2ZX_SIZE_LEAST 0.001 /* MiB */
#define G2ZX_FLAGS 48         /* more than any sub-command has */

/* The flags of o->command; their values go into *o. Each row begins with the sub-commands that take
 * the flag. A flag with two rows takes a single value in some sub-commands and a list in others. */
static int g2zx_flags_of(g2z_bench *o, g2z_flag flags[G2ZX_FLAGS]) {
  const unsigned any = (1u << G2Z_BENCH_COUNT) - 1, lists = G2ZX_TRAINED;
  const unsigned comm = G2ZX_IN(comm) | G2ZX_IN(exchange), sweeps = lists | G2ZX_IN(comm);
  const unsigned point = lists | G2ZX_IN(point), steps = point | G2ZX_IN(step);
  const unsigned train = steps | G2ZX_IN(ops), one = train & ~lists;
  const unsigned ranks = G2ZX_IN(point) | G2ZX_IN(exchange);
  g2z_train_config *t = &o->train;
#define FLAG(in, name, kind, at, least, most, value, help) \
  {in, {name, G2Z_FLAG_##kind, &(at), least, most, value, help}}
#define TEXT(in, name, member, value, help) FLAG(in, name, TEXT, o->member, 0, 0, value, help)
#define COUNT(in, name, member, least, most, help) \
  FLAG(in, name, INT, o->work.member, least, most, "N", help)
#define SETTING(in, name, setting, at, help) {in, g2z_setting_flag(name, #setting, &(at), help)}
#define SHAPE(name, setting, help) SETTING(train, name, setting, o->shape.setting, help)
#define TRAIN(in, name, setting, help) SETTING(in, name, setting, t->setting, help)
  const struct {
    unsigned in;
    g2z_flag flag;
  } all[] = {
      TEXT(sweeps, "gpus", work.ranks, "LIST",
           "numbers of ranks, one GPU or a part of the CPU each; all: every GPU or core"),
      TEXT(lists, "zero", work.stages, "LIST", "ZeRO stages; dp: rank 0 alone has the optimizer"),
      TEXT(lists, "dtype", work.dtypes, "LIST", "fp32, tf32, fp16, bf16"),
      TEXT(lists, "sizes", work.sizes, "LIST", "bucket sizes in MiB; 0: the default"),
      TEXT(comm, "sizes", work.sizes, "LIST", "sizes of the whole buffer in MiB"),
      TEXT(train, "model", model, "NAME",
           "gpt2, gpt2-medium, gpt2-large or gpt2-xl [gpt2 on cuda, a small model on cpu]"),
      SHAPE("layers", layers, "number of layers; overrides --model"),
      SHAPE("channels", channels, "width of the residual stream"),
      SHAPE("heads", heads, "number of heads; must divide channels [channels / 64]"),
      SHAPE("context", context, "longest sequence, in tokens; limits --seq"),
      SHAPE("vocab-size", vocab, "size of the vocabulary"),
      COUNT(lists, "global-batch", global_batch, 1, 2147483647, "sequences per step for every "
            "number of ranks; --batch is then a limit, and --accum is computed"),
      TRAIN(train, "batch", batch, "sequences per micro-step and rank"),
      SETTING(one, "seq", seq, o->work.seq, "tokens per sequence [context]"),
      SETTING(lists, "seq", seq, o->work.seq, "tokens per sequence"),
      TRAIN(train, "accum", accum, "micro-steps per step"),
      TRAIN(train, "dropout", dropout,
            "dropout probability of embedding, attention, projections"),
      TEXT(steps, "train", train.train_glob, "GLOB", "token shards [random tokens by Zipf's law]"),
      COUNT(steps, "steps", steps, 1, G2ZX_STEPS_MAX, "steps to time"),
      FLAG(lists, "tokens", INT64, o->tokens, 1, 1e15, "N",
           "tokens to train on, over all ranks; replaces --steps"),
      COUNT(point, "warmup", warmup, 0, 1000000, "untimed steps at the start"),
      COUNT(point, "val-steps", val_steps, 1, 1000000, "batches of the validation at the end"),
      COUNT(sweeps, "repeats", repeats, 1, G2Z_REPEATS,
            "number of runs per point; a round runs every point once"),
      FLAG(train | comm, "device", CHOICE, o->device, 0, 0, G2Z_DEVICE_LIST(G2Z_LIST_WORD),
           "[cuda if there is one]"),
      SETTING(one | comm, "dtype", dtype, o->dtype, "[fp16 on cuda, fp32 on cpu]"),
      TRAIN(steps, "graph", graph, "run the step as CUDA graphs"),
      TRAIN(one, "zero", zero_stage, "ZeRO stage; matters on several ranks"),
      TRAIN(one, "strategy", strategy, "dp: rank 0 alone has the optimizer; needs --zero 0"),
      SETTING(train, "optimizer", optimizer, t->optimizer.kind, "muon: for the blocks' matrices"),
      SETTING(train, "moments", moments, t->optimizer.moments_bf16, "type of AdamW's m and v"),
      TRAIN(train, "fp8", fp8,
            "8-bit products (Ada or newer): logits; forward: also linear ops; all: also gradients. "
            "In train not below 2048 tokens per micro-step, in bench at any size"),
      TRAIN(train, "recompute", recompute,
            "block: run forward again in backward, which saves memory"),
      TRAIN(train, "grad-dtype", grad_fp32, "type of gradients"),
      TRAIN(train, "transport", transport, "how data moves between GPUs"),
      TRAIN(one, "bucket-mb", bucket_mb, "bucket size in MiB; 0: the default"),
      TEXT(G2ZX_IN(step), "peer", peer, "COMMAND",
           "also run COMMAND on the same work, such as 'python3 peers/torch_gpt2.py'"),
      FLAG(G2ZX_IN(step), "ops", CHOICE, o->without_ops, 0, 0, "|on|off",
           "also time each op of a step; on one rank only"),
      TRAIN(train, "seed", seed, "seed of weights, tokens and dropout"),
      TEXT(sweeps | G2ZX_IN(report), "out", out, "DIR", "directory of the results "
           "[experiments: runs/bench_NAME_TIME; report: the first DIR]"),
      TEXT(ranks, "run-dir", run_dir, "DIR", "directory of the results"),
      FLAG(any, "help", SWITCH, o->help, 0, 0, "", "print this help")};
#undef FLAG
#undef TEXT
#undef COUNT
#undef SETTING
#undef SHAPE
#undef TRAIN
  int count = 0;
  for (size_t i = 0; i < G2Z_COUNT(all); i++)
    if (all[i].in >> o->command & 1) flags[count++] = all[i].flag;
  return count;
}

static void g2zx_default(g2z_bench *o, int command, g2z_device_kind kind) {
  const g2zx_row *row = g2zx_row_of(command);
  memset(o, 0, sizeof *o);
  o->train = g2z_train_config_default(kind);
  o->command = command;
  o->device = o->dtype = -1;
  o->work.steps = 10;
  if (!row || row->measures < 0) return;
  o->work = row->work[kind == G2Z_DEVICE_CUDA];
  o->train.batch = o->work.batch;
  o->train.accum = o->work.accum;
  o->train.graph = o->work.graph;
}

G2Z_API void g2z_bench_help(const g2z_bench *o, void (*line)(void *user, const char *text),
                            void *user) {
  g2z_flag flags[G2ZX_FLAGS];
  g2z_bench shown;
  char text[128];
  const char *about = g2zx_commands[o->command].about;
  g2zx_default(&shown, o->command, o->help_for);
  if (!about) about = "runs one rank of an experiment; bench itself starts it";
  if (o->command == G2Z_BENCH_step) {
    snprintf(text, sizeof text, "bench: %s", about);
    line(user, text);
    line(user, "\nSub-commands, each with its own --help:");
    for (int c = 1; c < G2Z_BENCH_COUNT; c++) {
      if (!g2zx_commands[c].about) continue;
      snprintf(text, sizeof text, "  %-12s %s", g2zx_commands[c].name, g2zx_commands[c].about);
      line(user, text);
    }
  } else {
    snprintf(text, sizeof text, "bench %s: %s", g2zx_commands[o->command].name, about);
    line(user, text);
  }
  line(user, "");
  g2z_flags_print(flags, g2zx_flags_of(&shown, flags), line, user);
}

/* argv[1] may name a sub-command. Flags are read twice, since the defaults depend on --device. In
 * the first pass --steps defaults to 0: it is not 0 only if it was given. For report and profile,
 * flags are read once, because reading moves the directories to the front of argv. */
G2Z_API g2z_status g2z_bench_read(g2z_services *services, int argc, char **argv,
                                  g2z_context_config *context, g2z_bench *o) {
  int command = G2Z_BENCH_step, first = 1, rest = 0, *directories = NULL;
  g2z_flag flags[G2ZX_FLAGS];
  char word[300];
  if (argc > 1 && argv[1][0] != '-') {
    command = g2zx_command_named(argv[1]);
    if (command == G2Z_BENCH_COUNT)
      G2Z_REFUSE(services, "%.80s is not a sub-command of bench. To list them: %s --help", argv[1],
                 g2z_shell_word(argv[0], word, sizeof word));
    first = 2;
  }
  for (int i = 2; first == 1 && i < argc; i++) { /* look for a sub-command after the flags */
    char *late = argv[i], *line;
    if (g2zx_command_named(late) == G2Z_BENCH_COUNT) continue;
    if (argv[i - 1][0] == '-' && !strchr(argv[i - 1], '=')) continue;
    memmove(argv + 2, argv + 1, (size_t)(i - 1) * sizeof *argv);
    argv[1] = late;
    G2Z_TRY(g2z_flags_line(services, argc, argv, &line));
    g2z_fail(services, G2Z_BAD_ARGUMENT, "the sub-command comes first: %s", line);
    g2z_release(services, line);
    return G2Z_BAD_ARGUMENT;
  }
  const int reader = (G2ZX_READERS >> command & 1) != 0;
  g2z_device_kind kind = g2z_device_count(G2Z_DEVICE_CUDA) ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU;
  if (reader) directories = &rest;
  for (int pass = reader; pass < 2; pass++) {
    g2zx_default(o, command, kind);
    if (pass == 0) o->work.steps = 0;
    G2Z_TRY(g2z_flags_parse(services, flags, g2zx_flags_of(o, flags), argc, argv, first,
                            directories));
    if (o->device >= 0) kind = (g2z_device_kind)o->device;
    if (pass == 0 && o->tokens && o->work.steps)
      G2Z_REFUSE(services, "--tokens and --steps both set the length: remove one of them");
  }
  o->argc = rest + 1;
  o->argv = argv + first - 1; /* o->argv[1] is the first directory */
  o->help_for = kind;
  if (o->help) return G2Z_OK;

  g2z_model_config *model = &o->train.model;
  const char *named = o->model ? o->model : "gpt2";
  G2Z_TRY(g2z_place_find(services, &context->ranks.place));
  context->ranks.place.unstarted = 0; /* srun is not needed: bench may time one process */
  if (o->device >= 0) context->device = (g2z_device_kind)o->device;
  else if (context->device == G2Z_DEVICE_CPU && g2z_device_find_gpu(services) == G2Z_DEVICE)
    g2z_log(services, G2Z_LOG_WARNING, "running on the CPU: %s", services->error);
  G2Z_TRY(g2z_model_config_named(services, named, model));
  if (!o->model && context->device == G2Z_DEVICE_CPU) {
    model->layers = 4;
    model->channels = 128;
    model->heads = 2;
    model->context = 128;
    if (o->work.seq > 128) model->context = o->work.seq;
    model->vocab = 2048;
  }
  g2z_shape_override(model, &o->shape);
  o->train.seq = o->work.seq;
  if (!o->work.seq) o->train.seq = model->context;
  o->train.dtype = g2z_dtype_default(context->device);
  if (o->dtype >= 0) o->train.dtype = (g2z_dtype)o->dtype;
  o->train.optimizer.warmup = 0;
  return G2Z_OK;
}

G2Z_API g2z_status g2z_zipf_tokens(g2z_services *services, uint64_t seed, int vocab, size_t count,
                                   int32_t **out) {
  double sum = 0, *below;
  *out = NULL;
  g2z_status status = G2Z_NEW(services, (size_t)vocab, &below);
  if (status == G2Z_OK) status = G2Z_NEW(services, count, out);
  for (int r = 0; r < vocab && status == G2Z_OK; r++) {
    sum += 1.0 / (r + 1);
    below[r] = sum;
  }
  for (size_t i = 0; i < count && status == G2Z_OK; i++) {
    uint32_t counter[4] = {(uint32_t)(i / 4), (uint32_t)((uint64_t)i >> 34), 0, 0}, bits[4];
    g2z_philox(seed, G2Z_RANDOM_SYNTHETIC, counter, bits);
    double draw = (double)g2z_uniform(bits[i % 4]) * sum;
    int low = 0, high = vocab - 1;
    while (low < high) {
      int middle = (low + high) / 2;
      if (below[middle] > draw) high = middle;
      else low = middle + 1;
    }
    (*out)[i] = low;
  }
  g2z_release(services, below);
  return status;
}

G2Z_API g2z_status g2z_stopwatch_open(g2z_services *services, int steps, g2z_stopwatch *w) {
  memset(w, 0, sizeof *w);
  w->collectives = NAN;
  G2Z_TRY(G2Z_NEW(services, 3 * (size_t)steps + 1, &w->step_s));
  w->waited_s = w->step_s + steps;
  w->exposed_s = w->waited_s + steps; /* [steps + 1]: g2z_stopwatch_ranks sends cpu_s at its end */
  return G2Z_OK;
}

G2Z_API g2z_status g2z_stopwatch_ranks(g2z_context *context, g2z_stopwatch *w) {
  const int count = w->count;
  const size_t size = ((size_t)count + 1) * sizeof(double);
  double *all;
  g2z_status status = g2z_allocate(context->services, (size_t)context->world, size, &all);
  w->exposed_s[count] = w->cpu_s;
  w->cpu_s = 0;
  status = g2z_ranks_agree(context->ranks, status);
  if (status == G2Z_OK) status = g2z_ranks_all_gather(context->ranks, w->exposed_s, size, all);
  memcpy(w->waited_s, w->exposed_s, (size_t)count * sizeof(double));
  for (int r = 0; r < context->world && status == G2Z_OK; r++) {
    const double *its = all + r * (count + 1);
    for (int i = 0; i < count; i++) {
      w->exposed_s[i] = fmin(w->exposed_s[i], its[i]);
      w->waited_s[i] = fmax(w->waited_s[i], its[i]);
    }
    w->cpu_s += its[count];
  }
  g2z_release(context->services, all);
  return status;
}

/* ===== experiments =======================================================
 * In:  the lists of the axes. Out: run directories, NAME_report.json.
 * Law: each point runs in separate processes; if one fails, the others still run. */

#define G2ZX_POINT_FILE "bench_point.json" /* rank 0 writes it into the run directory */

static g2z_status g2zx_new_summary(g2z_services *services, const g2z_bench *o,
                                   const char *experiment, g2z_summary **out) {
  G2Z_TRY(g2z_summary_create(services, experiment, out));
  snprintf((*out)->command_line, sizeof (*out)->command_line, "%s", o->command_line);
  snprintf((*out)->commit, sizeof (*out)->commit, "%s", o->commit ? o->commit : "unknown");
  return G2Z_OK;
}

/* Describes the machine: "CPU, 2 cores", or "2 x NVIDIA H200, CUDA 13.0, NCCL 2.28.9". */
static void g2zx_describe(const g2z_device *device, char out[256]) {
  const g2z_device_info *info = &device->info;
  if (device->kind == G2Z_DEVICE_CUDA)
    snprintf(out, 256, "%d x %.100s, CUDA %.20s%s%.20s", info->count, info->name, info->runtime,
             info->collectives[0] ? ", NCCL " : "", info->collectives);
  else snprintf(out, 256, "CPU, %ld cores", sysconf(_SC_NPROCESSORS_ONLN));
}

/* Rank 0 writes the points that the ranks have measured so far. */
static g2z_status g2zx_write_point(g2z_context *context, const g2z_bench *o, g2z_summary *s) {
  if (context->rank != 0) return G2Z_OK;
  return g2z_summary_write(s, g2z_path_in(o->run_dir, G2ZX_POINT_FILE).text);
}

/* Writes a file that names the machine and has no points yet. So the report names the machine even
 * if the experiment is stopped or its runs fail. */
static g2z_status g2zx_name_machine(g2z_context *context, const g2z_bench *o,
                                    const g2z_device *device, g2z_summary *s) {
  g2zx_describe(device, s->hardware);
  return g2z_ranks_agree(context->ranks, g2zx_write_point(context, o, s));
}

/* ----- a point's ranks: bench point ----- */

/* User and system time of all threads of this process. */
static double g2zx_cpu_s(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* Runs a training, and measures its last steps: o->work.steps of them. */
static g2z_status g2zx_train_point(g2z_context *context, const g2z_bench *o, g2z_stopwatch *w,
                                   g2z_summary *s) {
  g2z_run_config config = g2z_run_config_default(context->device);
  g2z_run *run;
  g2z_run_event event;
  const int last = o->work.warmup + o->work.steps;
  config.train = o->train;
  config.train.optimizer.steps = last;
  config.run_dir = o->run_dir;
  config.sample_tokens = 0;
  config.tensorboard = 0;
  config.command_line = o->command_line;
  config.git_commit = o->commit;
  config.model_name = o->model;
  if (o->work.val_steps) config.val_glob = o->train.train_glob;
  config.val_steps = o->work.val_steps;
  G2Z_TRY(g2z_run_create(context, &config, &run));
  g2z_status status = g2zx_name_machine(context, o, g2z_run_trainer(run)->device, s);
  w->began = g2z_seconds();
  w->cpu_s = g2zx_cpu_s();
  event.kind = G2Z_RUN_STEP;
  while (status == G2Z_OK && event.kind != G2Z_RUN_DONE) {
    status = g2z_run_next(run, &event);
    const g2z_metrics *m = &event.metrics;
    if (status != G2Z_OK || event.kind != G2Z_RUN_STEP) continue;
    /* Count the collectives of step 2. Step 1 also sends the initial parameters, and later steps
     * may be replays. */
    if (m->step == 1 && last > 1)
      w->collectives = g2z_ranks_collectives(context->ranks, 2);
    if (m->step <= o->work.warmup) {
      w->began = g2z_seconds();
      w->cpu_s = g2zx_cpu_s();
    } else if (w->count < o->work.steps) {
      w->step_s[w->count] = m->step_ms * 1e-3;
      w->exposed_s[w->count++] = m->exposed_comm_ms * 1e-3;
      if (w->count < o->work.steps) continue;
      w->ended = g2z_seconds();
      w->cpu_s = g2zx_cpu_s() - w->cpu_s;
    }
  }
  g2z_run_free(run);
  return status;
}

/* Adds a point with the figures of the measured steps. */
static g2z_status g2zx_add_point(const g2z_bench *o, g2z_stopwatch *w, int world, g2z_summary *s) {
  const size_t count = (size_t)w->count;
  const double host_s = (w->ended - w->began) * (double)sysconf(_SC_NPROCESSORS_ONLN);
  const double tokens = (double)o->train.batch * o->train.accum * o->train.seq * world;
  g2z_point *p;
  G2Z_TRY(g2z_summary_add(s, &p));
  snprintf(p->name, sizeof p->name, "point");
  g2z_figures *f = &p->figures;
  f->steps = w->count;
  f->train_time_sec = 0;
  for (size_t i = 0; i < count; i++) f->train_time_sec += w->step_s[i];
  f->step_mean_ms = 1e3 * f->train_time_sec / w->count;
  f->step_sd_ms = 1e3 * g2z_deviation(w->step_s, count);
  f->step_p50_ms = 1e3 * g2z_median(w->step_s, count); /* sorts step_s */
  f->step_min_ms = 1e3 * w->step_s[0];
  f->step_p95_ms = 1e3 * g2z_percentile(w->step_s, count, 95);
  f->step_max_ms = 1e3 * w->step_s[count - 1];
  f->tokens_per_sec = 1e3 * tokens / f->step_p50_ms;
  f->cpu_percent = 100 * w->cpu_s / host_s;
  f->began_sec = w->began;
  f->ended_sec = w->ended;
  f->exposed_comm_sec = f->exposed_comm_ms = f->waited_ms = f->collectives_per_step = 0;
  if (world > 1) { /* a single rank never waits */
    for (size_t i = 0; i < count; i++) f->exposed_comm_sec += w->exposed_s[i];
    f->exposed_comm_ms = 1e3 * g2z_median(w->exposed_s, count);
    f->waited_ms = 1e3 * g2z_median(w->waited_s, count);
    f->collectives_per_step = w->collectives;
  }
  f->exposed_comm_share = f->exposed_comm_sec / f->train_time_sec;
  return G2Z_OK;
}

static g2z_status g2zx_point(g2z_context *context, const g2z_bench *o, g2z_summary *s) {
  g2z_stopwatch w;
  g2z_status status = g2z_stopwatch_open(context->services, o->work.steps, &w);
  if (status == G2Z_OK) status = g2zx_train_point(context, o, &w, s);
  if (status == G2Z_OK) status = g2z_stopwatch_ranks(context, &w);
  if (status == G2Z_OK) status = g2zx_add_point(o, &w, context->world, s);
  g2z_release(context->services, w.step_s);
  return status;
}

/* ----- lists in flags ----- */

#define G2ZX_LIST_MAX 16

typedef struct g2zx_axis {      /* the entries of a flag's list */
  double at[G2ZX_LIST_MAX];
  int count;
} g2zx_axis;

/* Reads a list. Without `words` it has numbers from `least` to `most`, such as "1,2,4". With
 * `words`, such as "|fp32|tf32|fp16", it has some of these, and out->at gets their indices. Refuses
 * a repeated entry: two points would have the same name. */
static g2z_status g2zx_read_list(g2z_services *services, const char *flag, const char *text,
                                 const char *words, double least, double most, g2zx_axis *out) {
  const char *at = text;
  for (out->count = 0;; at++) {
    const size_t length = strcspn(at, ",");
    double entry = -1;
    int good = 0;
    if (words) {
      entry = g2z_word_find(words, at, length);
      good = entry >= 0;
    } else if (length && !isspace((unsigned char)*at)) { /* strtod would accept spaces before it */
      char *end;
      entry = strtod(at, &end);
      good = end == at + length && entry >= least && entry <= most;
    }
    good = good && out->count < G2ZX_LIST_MAX;
    if (words && !good)
      G2Z_REFUSE(services, "--%s %.80s: give up to %d of %s, separated by commas without spaces",
                 flag, text, G2ZX_LIST_MAX, words + 1);
    if (!good)
      G2Z_REFUSE(services, "--%s %.80s: give up to %d numbers from %g to %g, separated by commas "
                 "without spaces: --%s %g,%g", flag, text, G2ZX_LIST_MAX, least, most, flag, least,
                 least + 1);
    for (int i = 0; i < out->count; i++)
      if (out->at[i] == entry)
        G2Z_REFUSE(services, "--%s %.80s: %.*s is given twice; remove one", flag, text, (int)length,
                   at);
    out->at[out->count++] = entry;
    at += length;
    if (!*at) return G2Z_OK;
  }
}

/* ----- the ranks of comm: bench exchange ----- */

/* A collective, and its traffic on each rank's link in the unit of nccl-tests: `whole` times the
 * whole buffer, plus `others` times the slices of the other ranks. */
typedef struct g2zx_collective {
  const char *name;
  double whole, others;
  g2z_call_kind kind;
  g2z_owner owner;
} g2zx_collective;
static const g2zx_collective g2zx_collectives[] = {
    {"reduce_scatter", 0, 1, G2Z_CALL_REDUCE, G2Z_OWNER_SLICES},
    {"all_reduce", 0, 2, G2Z_CALL_REDUCE, G2Z_OWNER_ALL},
    {"all_gather", 0, 1, G2Z_CALL_GATHER, G2Z_OWNER_SLICES},
    {"reduce", 1, 0, G2Z_CALL_REDUCE, G2Z_OWNER_ROOT},
    {"broadcast", 1, 0, G2Z_CALL_GATHER, G2Z_OWNER_ROOT}};

typedef struct g2zx_message {   /* the data that collectives exchange */
  g2z_comm *comm;
  char *buffer;                 /* [n] elements of `size` bytes, on the device */
  size_t n, size;
  double mib;                   /* requested size of the buffer; n is rounded up from it */
  double copy_rate;             /* bytes per second of a plain copy of this size */
  double *all;                  /* [world]: time of each rank */
} g2zx_message;

/* Times a collective with a message, and adds its point. The time of a round is the time of the
 * slowest rank; the time per call is the median of five rounds. The number of calls per round
 * doubles until a round takes 10 ms, up to 1024 calls. */
static g2z_status g2zx_time_exchange(const g2zx_message *m, const g2zx_collective *c,
                                     g2z_summary *s) {
  g2z_comm *comm = m->comm;
  const double R = comm->world;
  const int slices = c->owner == G2Z_OWNER_SLICES, gathers = slices && c->kind == G2Z_CALL_GATHER;
  char *own = m->buffer, *to, *from;
  if (slices) own += (size_t)comm->rank * (m->n / (size_t)comm->world * m->size);
  to = own;
  from = m->buffer;
  if (gathers) {
    to = m->buffer;
    from = own;
  }
  g2z_call call = g2z_call_of(c->kind, to, from, m->n);
  const g2z_call after = g2z_call_of(G2Z_CALL_AFTER, NULL, NULL, 0);
  const g2z_call mark = g2z_call_of(G2Z_CALL_MARK, NULL, NULL, 0);
  const g2z_call wait = g2z_call_of(G2Z_CALL_WAIT, NULL, NULL, 0);
  g2z_call ready = after;
  double rounds[5];
  int calls = 1;
  g2z_point *p;
  call.owner = c->owner;
  call.write = G2Z_OVERWRITE;
  ready.all = 1;
  for (int round = -1; round < 5;) { /* round -1 opens the connections: its time is not used */
    G2Z_TRY(g2z_ranks_agree(comm->ranks, G2Z_OK));
    double begin = g2z_seconds(), most = 0;
    G2Z_TRY(g2z_comm_submit(comm, &after));
    for (int i = 0; i < calls; i++) {
      if (gathers) G2Z_TRY(g2z_comm_submit(comm, &ready)); /* every rank's buffer is free */
      G2Z_TRY(g2z_comm_submit(comm, &call));
      if (gathers) G2Z_TRY(g2z_comm_submit(comm, &mark)); /* all ranks have written */
    }
    G2Z_TRY(g2z_comm_submit(comm, &mark));
    G2Z_TRY(g2z_comm_submit(comm, &wait));
    G2Z_TRY(comm->device->ops->synchronize(comm->device));
    double mine = g2z_seconds() - begin;
    G2Z_TRY(g2z_ranks_all_gather(comm->ranks, &mine, sizeof mine, m->all));
    for (int r = 0; r < comm->world; r++) most = fmax(most, m->all[r]);
    if (round >= 0) rounds[round] = most / calls;
    if (round == 0 && most < 0.01 && calls < 1024) calls *= 2; /* all ranks see the same `most` */
    else round++;
  }
  const double seconds = g2z_median(rounds, 5), bytes = (double)(m->n * m->size);
  const double bus = (c->whole + c->others * (R - 1) / R) * bytes / seconds;
  G2Z_TRY(g2z_summary_add(s, &p));
  snprintf(p->series, sizeof p->series, "%s, %s, %d ranks", c->name,
           comm->gather == G2Z_TRANSPORT_COPY ? "copy engines" : comm->ops->name, comm->world);
  snprintf(p->name, sizeof p->name, "%s, %g MiB", p->series, m->mib);
  p->figures.world_size = R;
  p->figures.message_mib = bytes / 1048576.0;
  p->figures.time_us = seconds * 1e6;
  p->figures.bus_gb_per_sec = bus * 1e-9;
  p->figures.limit_gb_per_sec = m->copy_rate * 1e-9;
  p->figures.of_limit = bus / m->copy_rate;
  return G2Z_OK;
}

#define G2ZX_COPIES 5 /* the first is not timed: it maps memory and opens the path between GPUs */

/* Times several copies; the fastest counts. A CPU copies within its memory; a GPU copies to another
 * GPU with a copy engine. *seconds stays NaN if there is no other GPU, or if that GPU is in
 * exclusive use or full. */
static g2z_status g2zx_time_copy(const g2z_device *device, size_t bytes, double *seconds) {
  char *from = NULL, *to = NULL;
  double begin;
#if defined(__CUDACC__)
  if (device->kind == G2Z_DEVICE_CUDA) {
    int here = 0, count = 0;
    cudaError_t error = cudaGetDevice(&here);
    if (error == cudaSuccess) error = cudaGetDeviceCount(&count);
    const int there = count > 1 ? (here + 1) % count : here;
    if (there != here) {
      /* Without peer access the driver copies through the host, and this measures that path. */
      cudaDeviceEnablePeerAccess(there, 0);
      cudaMalloc((void **)&from, bytes);
      cudaSetDevice(there);
      cudaMalloc((void **)&to, bytes);
      error = cudaSetDevice(here);
      (void)cudaGetLastError(); /* the calls above may fail: forget their error */
    }
    for (int i = 0; i < G2ZX_COPIES && from && to && error == cudaSuccess; i++) {
      begin = g2z_seconds();
      error = cudaMemcpyPeer(to, there, from, here, bytes);
      if (error == cudaSuccess) error = cudaDeviceSynchronize();
      if (i > 0) *seconds = fmin(*seconds, g2z_seconds() - begin);
    }
    cudaFree(to);
    cudaFree(from);
    if (error == cudaSuccess) return G2Z_OK;
    return g2z_fail(device->services, G2Z_DEVICE, "a copy of %zu bytes between two GPUs failed: %s",
                    bytes, cudaGetErrorString(error));
  }
#endif
  g2z_status status = G2Z_NEW(device->services, bytes, &from);
  if (status == G2Z_OK) status = G2Z_NEW(device->services, bytes, &to);
  for (int i = 0; i < G2ZX_COPIES && status == G2Z_OK; i++) {
    memset(from, i, bytes); /* new bytes each time: the compiler must not remove a copy */
    begin = g2z_seconds();
    memcpy(to, from, bytes);
    const double spent = g2z_seconds() - begin;
    if (i > 0 && to[bytes - 1] == i) *seconds = fmin(*seconds, spent);
  }
  g2z_release(device->services, to);
  g2z_release(device->services, from);
  return status;
}

/* Bytes per second of a plain copy by rank 0: the limit for collectives. NaN: not known. */
static g2z_status g2zx_copy_rate(g2z_comm *comm, size_t bytes, double *bytes_per_s) {
  double seconds = NAN;
  g2z_status status = G2Z_OK;
  if (comm->rank == 0) status = g2zx_time_copy(comm->device, bytes, &seconds);
  G2Z_TRY(g2z_ranks_agree(comm->ranks, status));
  G2Z_TRY(g2z_ranks_broadcast(comm->ranks, &seconds, sizeof seconds));
  *bytes_per_s = (double)bytes / seconds;
  return G2Z_OK;
}

/* Times all collectives of all sizes over one transport, if this machine has that transport. For
 * the copy engines, leaves out the collectives that they do not support. */
static g2z_status g2zx_exchange_over(g2z_context *context, const g2zx_axis *sizes,
                                     g2z_device *device, g2z_transport transport, g2z_summary *s) {
  const int half = device->dtype == G2Z_FP16 || device->dtype == G2Z_BF16;
  const size_t size = device->kind == G2Z_DEVICE_CUDA && half ? 2 : 4; /* a CPU has only fp32 */
  const size_t unit = 8 * (size_t)context->world;
  double most = 0, *all = NULL;
  g2z_comm *comm;
  g2z_comm_config config;
  void *buffer;
  for (int i = 0; i < sizes->count; i++) most = fmax(most, sizes->at[i]);
  const size_t bytes = (size_t)(most * 1048576.0) + 64 * (size_t)context->world;
  memset(&config, 0, sizeof config);
  config.places = 1;
  config.most = bytes / 2;
  config.wire = device->dtype;
  config.gather = config.reduce = transport;
  G2Z_TRY(g2z_comm_create(context->ranks, device, &config, &comm));
  g2z_status status = comm->ops->allocate(comm, bytes, &buffer);
  if (status == G2Z_OK) status = G2Z_NEW(device->services, (size_t)comm->world, &all);
  status = g2z_ranks_agree(comm->ranks, status);
  for (int i = 0; i < sizes->count && status == G2Z_OK && comm->gather == transport; i++) {
    g2zx_message m = {comm, (char *)buffer, 0, size, sizes->at[i], NAN, all};
    m.n = ((size_t)(m.mib * 1048576.0) / size + unit - 1) / unit * unit;
    status = g2zx_copy_rate(comm, m.n * size, &m.copy_rate);
    for (size_t k = 0; k < G2Z_COUNT(g2zx_collectives) && status == G2Z_OK; k++) {
      const g2zx_collective *c = &g2zx_collectives[k];
      const int reduces = comm->reduce == G2Z_TRANSPORT_COPY || c->kind == G2Z_CALL_GATHER;
      if (transport == G2Z_TRANSPORT_COPY && (c->owner != G2Z_OWNER_SLICES || !reduces)) continue;
      status = g2zx_time_exchange(&m, c, s);
    }
  }
  g2z_release(device->services, all);
  if (buffer) comm->ops->release(comm, buffer);
  g2z_comm_free(comm);
  return status;
}

static g2z_status g2zx_exchange(g2z_context *context, const g2z_bench *o, g2z_summary *s) {
  g2z_services *services = context->services;
  g2z_device *device = NULL;
  g2zx_axis sizes;
  g2z_status status = g2zx_read_list(services, "sizes", o->work.sizes, NULL, G2ZX_SIZE_LEAST,
                                     65536, &sizes);
  if (status == G2Z_OK)
    status = g2z_device_create(services, context->device, o->train.dtype, o->train.dtype, &device);
  status = g2z_ranks_agree(context->ranks, status);
  if (status == G2Z_OK) status = g2zx_name_machine(context, o, device, s);
  for (int i = G2Z_TRANSPORT_NCCL; i <= G2Z_TRANSPORT_COPY && status == G2Z_OK; i++)
    status = g2zx_exchange_over(context, &sizes, device, (g2z_transport)i, s);
  g2z_device_free(device);
  return status;
}

/* Runs a rank of an experiment: bench point, or bench exchange. */
static g2z_status g2zx_rank(g2z_services *services, const g2z_bench *o,
                            const g2z_context_config *config) {
  const int trains = o->command == G2Z_BENCH_point;
  g2z_context *context;
  g2z_summary *s;
  if (trains && (!o->run_dir || !o->train.train_glob))
    G2Z_REFUSE(services, "bench point needs --run-dir and --train. Experiments start it: type "
               "bench");
  if (!o->run_dir)
    G2Z_REFUSE(services, "bench exchange needs --run-dir. Experiments start it: type bench comm");
  G2Z_TRY(g2z_context_create(config, &context));
  g2z_status status = g2zx_new_summary(services, o, trains ? "point" : "comm", &s);
  if (status == G2Z_OK && trains) status = g2zx_point(context, o, s);
  else if (status == G2Z_OK) status = g2zx_exchange(context, o, s);
  if (status == G2Z_OK) status = g2zx_write_point(context, o, s);
  g2z_context_free(context);
  g2z_summary_free(s);
  return status;
}

/* ----- the runner: its jobs ----- */

#define G2ZX_JOBS 512
#define G2ZX_OUT_BYTES 990      /* g2z_run.h allows run directories of 1023 bytes */

typedef struct g2zx_job {       /* one combination of the axes' values */
  g2z_point point;              /* name, figures of the plan, outcome */
  g2z_train_config train;       /* what its ranks train */
  int world, steps;
  g2z_summary *measured[G2Z_REPEATS]; /* figures of each repeat; NULL: not run, or it failed */
} g2zx_job;

typedef struct g2zx_experiment {
  const g2z_bench *o;
  const g2zx_row *row;
  int trains;                   /* 0: the row measures collectives */
  g2z_services *services;
  g2z_device_kind device;
  g2zx_axis ranks, stages, dtypes, sizes;
  g2z_summary *s;
  g2zx_job *jobs;
  int count;
  const char *out;              /* the directory of the results */
  char made[64];                /* the name of this directory if --out is not given */
  int lock;                     /* lock of this directory; -1: not locked */
  g2z_path tokens;              /* file of random tokens; "": not written */
  int runs, all_runs;           /* number of finished runs, and of all runs */
  double began;
} g2zx_experiment;

/* Fails unless this machine and this build can run the job: the plan checks everything that needs
 * no device. Sets the figures of the plan and the number of steps. */
static g2z_status g2zx_check_job(const g2zx_experiment *e, int stage, g2zx_job *j) {
  g2z_services *services = e->services;
  const int gpus = g2z_device_count(G2Z_DEVICE_CUDA), global = e->o->work.global_batch;
  g2z_train_config *train = &j->train;
  g2z_figures *f = &j->point.figures;
  g2z_plan *plan;
  if (!e->trains && j->world == 1)
    return g2z_fail(services, G2Z_UNSUPPORTED, "one rank has nothing to exchange: --gpus 2 or "
                    "more");
  if (e->device == G2Z_DEVICE_CUDA && j->world > gpus)
    return g2z_fail(services, G2Z_UNSUPPORTED, "GPUs needed: %d; this process finds %d",
                    j->world, gpus);
  if (e->device == G2Z_DEVICE_CPU) { /* fails for a dtype that a CPU does not have */
    g2z_device *device;
    G2Z_TRY(g2z_device_create(services, e->device, train->dtype, train->dtype, &device));
    g2z_device_free(device);
  }
  if (!e->trains) return G2Z_OK;
  if (global && global % j->world)
    return g2z_fail(services, G2Z_UNSUPPORTED, "a global batch of %d cannot be divided among "
                    "%d ranks", global, j->world);
  if (global) { /* the largest micro-step up to --batch that divides a rank's share */
    const int each = global / j->world;
    if (train->batch > each) train->batch = each;
    while (each % train->batch) train->batch--;
    train->accum = each / train->batch;
  }
  train->strategy = G2Z_STRATEGY_ZERO;
  train->zero_stage = stage;
  if (stage < 0) {
    train->strategy = G2Z_STRATEGY_DP;
    train->zero_stage = 0;
  }
  G2Z_TRY(g2z_plan_create(services, train, e->device, 0, j->world, j->world, &plan));
  f->micro_batch = plan->batch;
  f->accum_steps = plan->accum;
  f->global_batch = (double)plan->batch * plan->accum * j->world;
  f->seq_len = plan->seq;
  if (stage >= 0) f->zero_stage = plan->zero_stage;
  f->buckets = plan->buckets;
  f->plan_gib = (double)plan->bytes_total / 1073741824.0;
  g2z_plan_free(plan);
  if (train->train_glob) { /* fails unless the shards exist and hold one step of this point */
    const g2z_loader_config shards = {
        train->train_glob, train->batch, train->seq, train->accum, 0, j->world,
        train->model.vocab, G2Z_ORDER_SHUFFLED, train->seed};
    g2z_loader *loader;
    G2Z_TRY(g2z_loader_create(services, &shards, &loader));
    g2z_loader_free(loader);
  }
  double steps = j->steps;
  if (e->o->tokens) steps = ceil((double)e->o->tokens / (f->global_batch * f->seq_len));
  if (steps > G2ZX_STEPS_MAX)
    G2Z_REFUSE(services, "--tokens %.0f makes %.0f steps, and at most %d can be timed: lower it",
               (double)e->o->tokens, steps, G2ZX_STEPS_MAX);
  j->steps = (int)steps;
  return G2Z_OK;
}

static void g2zx_give_up(g2z_point *p, g2z_outcome outcome, const char *reason) {
  p->outcome = outcome;
  snprintf(p->reason, sizeof p->reason, "%.390s", reason);
}

/* Appends a part to a name, after a comma. */
static void g2zx_add_name(char *name, size_t room, const char *part) {
  const size_t used = strlen(name);
  snprintf(name + used, room - used, "%s%s", used ? ", " : "", part);
}

/* Adds the job of one combination of the axes' values. The job's name lists the values that differ
 * between jobs. */
static g2z_status g2zx_add_job(g2zx_experiment *e, double world, double stage, double dtype,
                               double size) {
  static const char *const stages[] = {"dp", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"};
  enum { STAGE, DTYPE, SIZE, RANKS, PARTS };
  const char *parts[PARTS] = {"", "", "", ""};
  char ranks[32], mib[32];
  if (e->count == G2ZX_JOBS)
    G2Z_REFUSE(e->services, "the lists make more than %d points: shorten one", G2ZX_JOBS);
  g2zx_job *j = &e->jobs[e->count++];
  g2z_point *p = &j->point;
  *p = g2z_point_default();
  j->train = e->o->train;
  j->steps = e->o->work.steps;
  j->world = (int)world;
  if (e->trains) {
    j->train.dtype = (g2z_dtype)(int)dtype;
    j->train.bucket_mb = (float)size;
    p->figures.world_size = world;
    if (size > 0) p->figures.bucket_mib = size;
  }
  snprintf(mib, sizeof mib, "%g MiB", size);
  snprintf(ranks, sizeof ranks, "%d %s%s", j->world,
           e->device == G2Z_DEVICE_CUDA ? "GPU" : "rank", G2Z_PLURAL(j->world));
  if (e->stages.count > 1) parts[STAGE] = stages[(int)stage];
  if (e->dtypes.count > 1) parts[DTYPE] = g2z_dtype_text(j->train.dtype);
  if (e->sizes.count > 1) parts[SIZE] = mib;
  if (e->ranks.count > 1) parts[RANKS] = ranks;
  const int on_x = e->row->command == G2Z_BENCH_buckets ? SIZE : RANKS; /* x axis of the charts */
  for (int k = 0; k < PARTS; k++) {
    if (*parts[k]) g2zx_add_name(p->name, sizeof p->name, parts[k]);
    if (*parts[k] && k != on_x) g2zx_add_name(p->series, sizeof p->series, parts[k]);
  }
  if (!*p->name) g2zx_add_name(p->name, sizeof p->name, ranks);
  if (g2zx_check_job(e, (int)stage - 1, j) != G2Z_OK)
    g2zx_give_up(p, G2Z_OUTCOME_SKIPPED, e->services->error);
  return G2Z_OK;
}

/* ----- the runner: a job's ranks ----- */

static volatile sig_atomic_t g2zx_stop;
static void g2zx_on_signal(int number) { g2zx_stop = number; }

static g2z_status g2zx_check_stop(const g2zx_experiment *e) {
  if (!g2zx_stop) return G2Z_OK;
  return g2z_fail(e->services, G2Z_STOPPED, "stopped by signal %d", (int)g2zx_stop);
}

#define G2ZX_WATCHED 64

typedef struct g2zx_observer {  /* watches a job's ranks while they run */
  FILE *smi;                    /* pipe of nvidia-smi; NULL: no GPUs to watch */
  FILE *output;                 /* the output of nvidia-smi, piece by piece as it is read, with a
                                 * line "@ g2z_seconds()" before each piece that begins a line */
  int in_line;                  /* 1: the last piece ended in the middle of a line */
} g2zx_observer;

/* Starts nvidia-smi, which prints one line per GPU five times a second until its pipe closes. If it
 * is not installed, utilisation and memory of the GPUs stay unknown. */
static void g2zx_open_smi(g2zx_observer *seen, int world) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  char only[512] = "", command[800];
  for (int gpu = 0; gpu < world && gpu < G2ZX_WATCHED; gpu++) {
    const size_t used = strlen(only);
    const char *comma = gpu ? "," : "";
    if (!visible) {
      snprintf(only + used, sizeof only - used, "%s%d", comma, gpu);
      continue;
    }
    const int length = (int)strcspn(visible, ",");
    snprintf(only + used, sizeof only - used, "%s%.*s", comma, length, visible);
    if (visible[length]) visible += length + 1;
  }
  snprintf(command, sizeof command, "exec nvidia-smi -i '%s' --loop-ms=200 --format=csv,noheader,"
           "nounits --query-gpu=index,utilization.gpu,memory.used 2> /dev/null", only);
  seen->output = tmpfile();
  seen->smi = popen(command, "r");
  if (!seen->smi) return;
  struct pollfd first = {fileno(seen->smi), POLLIN, 0};
  poll(&first, 1, 10000); /* the first line has the memory in use before the ranks start */
  fcntl(first.fd, F_SETFL, O_NONBLOCK);
}

static void g2zx_observe(void *user) {
  g2zx_observer *seen = (g2zx_observer *)user;
  char piece[4096];
  ssize_t got;
  if (g2zx_stop) raise(g2zx_stop); /* a signal that arrived before the ranks were started */
  while (seen->smi && seen->output && (got = read(fileno(seen->smi), piece, sizeof piece)) > 0) {
    if (!seen->in_line) fprintf(seen->output, "@ %f\n", g2z_seconds());
    fwrite(piece, 1, (size_t)got, seen->output);
    seen->in_line = piece[got - 1] != '\n';
  }
}

/* Sets gpu_percent and peak_memory_gib. GPUs: utilisation during the measured steps; peak memory
 * minus the memory in use before the job. CPU: peak resident memory of the largest rank. */
static void g2zx_fill_watched(const g2zx_observer *seen, const g2z_job_end *end, g2z_figures *f) {
  double at = 0, mib, busy = 0, most = NAN, before[G2ZX_WATCHED];
  char line[128], percent[32];
  int gpu, inside = 0;
  for (int i = 0; i < G2ZX_WATCHED; i++) before[i] = NAN;
  if (seen->output) rewind(seen->output);
  while (seen->output && fgets(line, sizeof line, seen->output)) {
    if (sscanf(line, "@ %lf", &at) == 1) continue;
    if (sscanf(line, "%d, %31[^,], %lf", &gpu, percent, &mib) != 3) continue;
    if (gpu < 0 || gpu >= G2ZX_WATCHED) continue;
    if (isnan(before[gpu])) before[gpu] = mib;
    most = fmax(most, (mib - before[gpu]) * 1048576.0);
    if (at < f->began_sec || at > f->ended_sec) continue;
    double part = NAN;
    sscanf(percent, "%lf", &part); /* stays NaN for "[N/A]", which a MIG instance has */
    busy += part;
    inside++;
  }
  if (inside) f->gpu_percent = busy / inside;
  if (!seen->smi) most = (double)end->rank_bytes;
  f->peak_memory_gib = most / 1073741824.0;
}

/* Takes the machine's name from the file that a job's ranks wrote. The file may be missing, or have
 * no points yet. */
static void g2zx_get_machine(g2zx_experiment *e, const char *path) {
  char hardware[sizeof e->s->hardware] = "";
  g2z_object file;
  if (g2z_object_read(e->services, path, &file) == G2Z_OK)
    g2z_object_copy(&file, "hardware", hardware, sizeof hardware);
  g2z_object_free(&file);
  if (*hardware) memcpy(e->s->hardware, hardware, sizeof hardware);
}

/* Starts the ranks of a job, waits for them and logs a line. If a rank fails, the outcome of the
 * point is `failed`, but the call succeeds. G2Z_STOPPED: a signal ended the ranks; the run does not
 * count. */
static g2z_status g2zx_run_job(g2zx_experiment *e, g2zx_job *j, int repeat) {
  const int number = e->runs + 1;
  const g2z_path run_dir = g2z_path_in(e->out, "run_%s_%d", e->s->experiment, number);
  const g2z_path console = g2z_path_in(run_dir.text, "console.txt");
  const g2z_path written = g2z_path_in(run_dir.text, G2ZX_POINT_FILE);
  const char *first[] = {"bench", g2zx_commands[e->row->measures].name};
  char result[500], left[32] = "";
  g2z_flag flags[G2ZX_FLAGS];
  g2z_bench o = *e->o;
  g2z_summary *measured = NULL;
  g2z_job job;
  g2z_job_end end;
  g2zx_observer seen;
  memset(&job, 0, sizeof job);
  memset(&seen, 0, sizeof seen);
  G2Z_TRY(g2zx_check_stop(e));
  o.command = e->row->measures; /* all flags of this sub-command are passed to the ranks */
  o.train = j->train;
  o.shape = j->train.model;
  o.work.seq = j->train.seq;
  o.work.steps = j->steps;
  o.device = (int)e->device;
  o.dtype = (int)j->train.dtype;
  o.run_dir = run_dir.text;
  G2Z_TRY(g2z_make_directory(e->services, run_dir.text));
  G2Z_TRY(g2z_flags_arguments(e->services, flags, g2zx_flags_of(&o, flags), first, 2, &job.argv));
  job.ranks = j->world;
  job.output = console.text;
  job.watch = g2zx_observe;
  job.user = &seen;
  if (e->device == G2Z_DEVICE_CUDA) g2zx_open_smi(&seen, j->world);
  double begin = g2z_seconds();
  g2z_status status = g2z_ranks_run(e->services, &job, &end);
  double wall_s = g2z_seconds() - begin;
  if (status == G2Z_OK) g2zx_get_machine(e, written.text);
  if (status == G2Z_OK && end.signal && end.exit_code != 0) {
    g2zx_stop = end.signal;
    status = g2zx_check_stop(e);
  }
  if (status == G2Z_OK && end.exit_code != 0) { /* the reason is the last sentence of bench */
    char *text = NULL;
    const char *last = "bench: it printed no reason";
    size_t bytes;
    if (g2z_read_file(e->services, console.text, (size_t)16 << 20, &text, &bytes) == G2Z_OK)
      for (char *at = text; (at = strstr(at, "bench: ")) != NULL; at += 7) last = at;
    last += strlen("bench: ");
    int length = (int)strcspn(last, "\n");
    if (length > 300) length = 300;
    snprintf(result, sizeof result, "exit code %d: %.*s", end.exit_code, length, last);
    g2zx_give_up(&j->point, G2Z_OUTCOME_FAILED, result);
    g2z_release(e->services, text);
  } else if (status == G2Z_OK &&
             g2z_summary_read(e->services, written.text, &measured) != G2Z_OK)
    g2zx_give_up(&j->point, G2Z_OUTCOME_FAILED, e->services->error);
  for (size_t i = 0; measured && i < measured->count; i++) {
    g2zx_fill_watched(&seen, &end, &measured->points[i].figures);
    measured->points[i].figures.total_wall_time_sec = wall_s;
  }
  if (seen.smi) pclose(seen.smi);
  if (seen.output) fclose(seen.output);
  g2z_release(e->services, job.argv);
  if (status != G2Z_OK) return status;

  j->measured[repeat] = measured;
  j->point.runs[j->point.repeats++] = e->runs = number;
  if (!measured) {
    snprintf(result, sizeof result, "failed, %s", j->point.reason);
    e->all_runs -= e->o->work.repeats - repeat - 1; /* it is not repeated */
  } else {
    const g2z_figures *f = &measured->points[0].figures;
    if (e->trains)
      snprintf(result, sizeof result, "%.0f tokens/s, %.2f ms per step, %.1f s", f->tokens_per_sec,
               f->step_p50_ms, wall_s);
    else snprintf(result, sizeof result, "%zu measurements, %.1f s", measured->count, wall_s);
  }
  double left_s = (g2z_seconds() - e->began) / e->runs * (e->all_runs - e->runs);
  if (e->runs < e->all_runs)
    snprintf(left, sizeof left, ", %d:%02d left", (int)left_s / 60, (int)left_s % 60);
  g2z_log(e->services, G2Z_LOG_INFO, "[%d/%d] %s, repeat %d: %s%s", number, e->all_runs,
          j->point.name, repeat + 1, result, left);
  return G2Z_OK;
}

/* ----- the runner: its results ----- */

/* Adds the point of a job, with medians over its repeats. A job of comm has several points: each
 * one that its ranks measured. */
static g2z_status g2zx_settle_job(g2zx_experiment *e, g2zx_job *j) {
  double values[G2Z_REPEATS];
  const size_t repeats = (size_t)j->point.repeats;
  const int good = j->point.outcome == G2Z_OUTCOME_OK && repeats > 0;
  size_t count = 1;
  g2z_point *p;
  if (j->point.outcome == G2Z_OUTCOME_OK && !repeats)
    g2zx_give_up(&j->point, G2Z_OUTCOME_SKIPPED, "bench was stopped before its first run ended");
  if (good) count = j->measured[0]->count;
  for (size_t k = 0; k < count; k++) {
    G2Z_TRY(g2z_summary_add(e->s, &p));
    *p = j->point;
    for (size_t r = 0; r < repeats && good; r++)
      if (j->measured[r]->count != j->measured[0]->count)
        return g2z_fail(e->services, G2Z_FORMAT, "the repeats of %.80s measured different things",
                        j->point.name);
    if (good && !e->trains) {
      memcpy(p->name, j->measured[0]->points[k].name, sizeof p->name);
      memcpy(p->series, j->measured[0]->points[k].series, sizeof p->series);
    }
    for (int i = 0; i < G2Z_FIGURE_COUNT && good; i++) {
      for (size_t r = 0; r < repeats; r++)
        values[r] = g2zx_figure_of(&j->measured[r]->points[k], i);
      if (i == G2Z_FIGURE(tokens_per_sec))
        p->figures.tokens_per_sec_sd = g2z_deviation(values, repeats);
      double median = g2z_median(values, repeats);
      if (!isnan(median)) *g2z_figure(&p->figures, i) = median;
    }
    p->figures.began_sec = p->figures.ended_sec = NAN; /* times of one run have no median */
  }
  return G2Z_OK;
}

/* Writes random tokens (g2z_zipf_tokens) for the longest run: at most 32 Mi, but at least one step.
 * Longer runs read them several times. One block of 1 Mi tokens is drawn and written repeatedly. */
static g2z_status g2zx_write_tokens(g2zx_experiment *e) {
  const size_t block = (size_t)1 << 20, limit = (size_t)1 << 25;
  size_t wanted = 0;
  g2z_shard_writer *writer;
  int32_t *tokens;
  for (const g2zx_job *j = e->jobs; j < e->jobs + e->count; j++) {
    const size_t step = (size_t)j->train.batch * (size_t)j->train.accum * (size_t)j->train.seq *
                        (size_t)j->world;
    size_t most = step * (size_t)(j->steps + e->o->work.warmup);
    if (most > limit) most = limit;
    if (most < step) most = step;
    if (j->point.outcome == G2Z_OUTCOME_OK && most > wanted) wanted = most;
  }
  e->tokens = g2z_path_in(e->out, "tokens.bin");
  wanted++; /* the target of the last token */
  const size_t drawn = wanted < block ? wanted : block;
  G2Z_TRY(g2z_zipf_tokens(e->services, e->o->train.seed, e->o->train.model.vocab, drawn, &tokens));
  g2z_status status = g2z_shard_writer_create(e->services, e->tokens.text, G2Z_SHARD_LLMC, 0,
                                              &writer);
  for (size_t left = wanted, count; left > 0 && status == G2Z_OK; left -= count) {
    count = left < block ? left : block;
    status = g2z_shard_writer_append(writer, tokens, count);
  }
  if (status == G2Z_OK) status = g2z_shard_writer_commit(writer);
  g2z_shard_writer_free(writer);
  g2z_release(e->services, tokens);
  for (int i = 0; i < e->count; i++) e->jobs[i].train.train_glob = e->tokens.text;
  return status;
}

static void g2zx_log_line(void *user, const char *text) {
  g2z_services *services = (g2z_services *)user;
  if (services->log) services->log(services->user, G2Z_LOG_INFO, text);
}

/* Writes and prints the report. After a stop it contains only the runs that are complete. */
static g2z_status g2zx_finish(g2zx_experiment *e) {
  const g2z_path path = g2z_path_in(e->out, "%s_report.json", e->s->experiment);
  const int stopped = e->runs < e->all_runs;
  char reason[80], word[600];
  int failed = 0;
  for (int i = 0; i < e->count; i++) {
    G2Z_TRY(g2zx_settle_job(e, &e->jobs[i]));
    failed += e->jobs[i].point.outcome == G2Z_OUTCOME_FAILED;
  }
  /* Compare each point with the point that has one rank and is otherwise the same. Job i has the
   * point i. */
  for (int i = 0; i < e->count && e->trains; i++)
    for (int k = 0; k < e->count; k++) {
      const g2z_train_config *mine = &e->jobs[i].train, *its = &e->jobs[k].train;
      g2z_figures *f = &e->s->points[i].figures;
      if (e->jobs[k].world != 1 || mine->bucket_mb != its->bucket_mb) continue;
      if (mine->zero_stage != its->zero_stage || mine->dtype != its->dtype) continue;
      if (mine->strategy != its->strategy) continue;
      f->speedup_vs_1gpu = f->tokens_per_sec / e->s->points[k].figures.tokens_per_sec;
      f->scaling_efficiency = f->speedup_vs_1gpu / e->jobs[i].world;
    }
  snprintf(reason, sizeof reason, "stopped by signal %d after %d of %d runs", (int)g2zx_stop,
           e->runs, e->all_runs);
  if (stopped) g2zx_add_name(e->s->work, sizeof e->s->work, reason);
  const g2z_status status = g2z_summary_write(e->s, path.text);
  g2zx_log_line(e->services, "");
  g2z_summary_print(e->s, g2zx_log_line, e->services); /* also if the file failed */
  G2Z_TRY(status);
  g2zx_log_line(e->services, path.text);
  if (stopped)
    return g2z_fail(e->services, G2Z_STOPPED, "stopped by signal %d: the report holds %d of %d "
                    "runs", (int)g2zx_stop, e->runs, e->all_runs);
  if (!failed) return G2Z_OK;
  return g2z_fail(e->services, G2Z_DEVICE, "points that failed: %d of %d; the list above has the "
                  "reasons. To see what their ranks printed: cat %s/run_*/console.txt", failed,
                  e->count, g2z_shell_word(e->out, word, sizeof word));
}

/* Checks everything that can be checked in advance; writes nothing. */
static g2z_status g2zx_open(g2zx_experiment *e, const g2z_context_config *config) {
  g2z_services *services = e->services;
  const g2z_bench *o = e->o;
  const g2z_bench_work *work = &o->work;
  const double least = e->trains ? 0 : G2ZX_SIZE_LEAST;
  const char *ranks = work->ranks, *name = g2zx_commands[o->command].name;
  const g2z_place *place = &config->ranks.place;
  time_t now = time(NULL);
  struct tm utc;
  char all[16];
  int there, possible = 0;
  if (place->world > 1)
    G2Z_REFUSE(services, "this process is rank %d of %d, but bench %s starts its ranks itself: "
               "run it once, without mpirun, srun or torchrun", place->rank, place->world, name);

  /* The lists of the axes. */
  if (strcmp(ranks, "all") == 0) {
    int count = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (e->device == G2Z_DEVICE_CUDA) count = g2z_device_count(G2Z_DEVICE_CUDA);
    if (!count)
      return g2z_fail(services, G2Z_UNSUPPORTED, "--gpus all: this build finds no GPU to use. To "
                      "run on the CPU: --device cpu");
    snprintf(all, sizeof all, "%d", count);
    ranks = all;
  }
  G2Z_TRY(g2zx_read_list(services, "gpus", ranks, NULL, 1, 4096, &e->ranks));
  for (int i = 0; i < e->ranks.count; i++)
    if (e->ranks.at[i] != floor(e->ranks.at[i]))
      G2Z_REFUSE(services, "--gpus %.80s: %g is not a whole number of ranks", work->ranks,
                 e->ranks.at[i]);
  G2Z_TRY(g2zx_read_list(services, "sizes", work->sizes, NULL, least, 65536, &e->sizes));
  /* A --bucket-mb that is out of range is not passed to the ranks: they would use the default. */
  for (int i = 0; i < e->sizes.count; i++)
    if (e->sizes.at[i] > 0 && e->sizes.at[i] < G2ZX_SIZE_LEAST)
      G2Z_REFUSE(services, "--sizes %.80s: %g MiB is less than the minimum, %g", work->sizes,
                 e->sizes.at[i], G2ZX_SIZE_LEAST);
  if (e->trains) {
    G2Z_TRY(g2zx_read_list(services, "zero", work->stages, "|dp|0|1|2|3", 0, 0, &e->stages));
    G2Z_TRY(g2zx_read_list(services, "dtype", work->dtypes, G2Z_DTYPE_LIST(G2Z_LIST_WORD), 0, 0,
                           &e->dtypes));
  } else { /* comm: one job has all sizes, since its ranks get the whole list */
    e->stages.count = e->dtypes.count = e->sizes.count = 1;
  }

  /* The directory and the jobs. */
  const int used = snprintf(e->made, sizeof e->made, "runs/bench_%s_", name);
  strftime(e->made + used, sizeof e->made - (size_t)used, "%Y%m%d_%H%M%S", gmtime_r(&now, &utc));
  e->out = o->out ? o->out : e->made;
  if (strlen(e->out) > G2ZX_OUT_BYTES)
    G2Z_REFUSE(services, "--out has %zu bytes, and at most %d are allowed: give a shorter path",
               strlen(e->out), G2ZX_OUT_BYTES);
  const g2z_path path = g2z_path_in(e->out, "%s_report.json", name);
  G2Z_TRY(g2z_is_there(services, path.text, &there));
  if (there)
    G2Z_REFUSE(services, "%.600s exists already: choose another --out, or remove it", path.text);
  G2Z_TRY(g2zx_new_summary(services, o, name, &e->s));
  snprintf(e->s->hardware, sizeof e->s->hardware, "unknown"); /* until a run reports it */
  G2Z_TRY(G2Z_NEW(services, G2ZX_JOBS, &e->jobs));
  for (int i = 0; i < e->stages.count; i++)
    for (int k = 0; k < e->dtypes.count; k++)
      for (int m = 0; m < e->sizes.count; m++)
        for (int r = 0; r < e->ranks.count; r++)
          G2Z_TRY(g2zx_add_job(e, e->ranks.at[r], e->stages.at[i], e->dtypes.at[k],
                               e->sizes.at[m]));
  for (int i = 0; i < e->count; i++) possible += e->jobs[i].point.outcome == G2Z_OUTCOME_OK;
  if (possible) return G2Z_OK;
  return g2z_fail(services, G2Z_UNSUPPORTED, "no point can be measured here: %s",
                  e->jobs[0].point.reason);
}

/* Makes the directory e->out and runs each job o->work.repeats times. A round runs each job once,
 * so that a change of the machine's speed affects all jobs. Refuses a directory that another
 * program uses, or that has runs of an interrupted experiment. */
static g2z_status g2zx_run_rounds(g2zx_experiment *e) {
  const g2z_bench *o = e->o;
  const g2z_train_config *t = &o->train;
  const g2z_path path = g2z_path_in(e->out, "run_%s_1", e->s->experiment);
  const char *unit = "steps";
  int64_t length = o->work.steps;
  char dtypes[64] = "", word[300];
  int there;
  for (int i = 0; i < e->count; i++) {
    const char *dtype = g2z_dtype_text(e->jobs[i].train.dtype);
    if (e->jobs[i].point.outcome != G2Z_OUTCOME_OK) continue;
    if (!strstr(dtypes, dtype)) g2zx_add_name(dtypes, sizeof dtypes, dtype);
    e->all_runs += o->work.repeats;
  }
  if (o->tokens) {
    unit = "tokens";
    length = o->tokens;
  }
  if (e->trains)
    snprintf(e->s->work, sizeof e->s->work, "layers %d, channels %d, vocabulary %d, T=%d, %s, "
             "%s %" PRId64 ", warm-up %d, repeats %d", t->model.layers, t->model.channels,
             t->model.vocab, t->seq, dtypes, unit, length, o->work.warmup, o->work.repeats);
  else snprintf(e->s->work, sizeof e->s->work, "%s, repeats %d of 5 rounds each, median; limit: %s",
                g2z_dtype_text(t->dtype), o->work.repeats,
                e->device == G2Z_DEVICE_CUDA ? "a copy to another GPU" : "memcpy");
  G2Z_TRY(g2z_make_directory(e->services, e->out));
  G2Z_TRY(g2z_lock_directory(e->services, e->out, &e->lock));
  G2Z_TRY(g2z_is_there(e->services, path.text, &there));
  if (there)
    G2Z_REFUSE(e->services, "%.600s is left from an experiment that did not end: choose another "
               "--out, or type rm -r %s/run_%s_*", path.text,
               g2z_shell_word(e->out, word, sizeof word), e->s->experiment);
  if (!t->train_glob && e->trains) G2Z_TRY(g2zx_write_tokens(e));
  g2z_log(e->services, G2Z_LOG_INFO, "runs: %d, in %s", e->all_runs, e->out);
  e->began = g2z_seconds();
  for (int repeat = 0; repeat < o->work.repeats; repeat++)
    for (int i = 0; i < e->count; i++)
      if (e->jobs[i].point.outcome == G2Z_OUTCOME_OK)
        G2Z_TRY(g2zx_run_job(e, &e->jobs[i], repeat));
  return G2Z_OK;
}

static g2z_status g2zx_run(g2z_services *services, const g2z_bench *o,
                           const g2z_context_config *config) {
  /* The signals that g2z_ranks_run passes on to ranks also stop an experiment between two runs. An
   * ignored signal stays ignored, such as SIGHUP under nohup. */
  static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};
  struct sigaction action, before;
  g2zx_experiment e;
  memset(&action, 0, sizeof action);
  action.sa_handler = g2zx_on_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < G2Z_COUNT(numbers); i++)
    if (sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
      sigaction(numbers[i], &action, NULL);
  memset(&e, 0, sizeof e);
  e.lock = -1;
  e.o = o;
  e.row = g2zx_row_of(o->command);
  e.trains = e.row->measures == G2Z_BENCH_point;
  e.services = services;
  e.device = config->device;
  g2z_status status = g2zx_open(&e, config);
  if (status == G2Z_OK) status = g2zx_run_rounds(&e);
  if (status == G2Z_OK || (status == G2Z_STOPPED && e.all_runs)) status = g2zx_finish(&e);
  if (e.tokens.text[0]) g2z_unlink(e.tokens.text);
  if (e.lock >= 0) close(e.lock);
  for (int i = 0; i < e.count; i++)
    for (int r = 0; r < G2Z_REPEATS; r++) g2z_summary_free(e.jobs[i].measured[r]);
  g2z_release(services, e.jobs);
  g2z_summary_free(e.s);
  return status;
}

/* ----- bench report ----- */

static g2z_status g2zx_show(g2z_services *services, const char *path, g2z_page *page) {
  g2z_summary *summary;
  G2Z_TRY(g2z_summary_read(services, path, &summary));
  g2z_summary_page(summary, page);
  g2z_summary_free(summary);
  return G2Z_OK;
}

static g2z_status g2zx_report(g2z_services *services, const g2z_bench *o) {
  g2z_results *results;
  int there = 0;
  if (o->argc < 2)
    G2Z_REFUSE(services, "name the directories of experiments or runs: bench report DIR...");
  const char *out = o->out ? o->out : o->argv[1];
  const g2z_path path = g2z_path_in(out, "report.html");
  G2Z_TRY(g2z_results_create(services, &results));
  results->show = g2zx_show;
  g2z_status status = g2z_is_there(services, g2z_path_in(out, "training_metrics.json").text,
                                   &there);
  for (int i = 1; i < o->argc && status == G2Z_OK; i++)
    status = g2z_results_add(results, o->argv[i]);
  if (status == G2Z_OK && there)
    status = g2z_fail(services, G2Z_BAD_ARGUMENT, "%.600s is a run with its own report.html: "
                      "choose another place, --out DIR", out);
  if (status == G2Z_OK && o->out) status = g2z_make_directory(services, o->out);
  /* An existing file is replaced only if it begins as a page of this kit does. */
  char *old = NULL;
  size_t bytes = 0;
  if (status == G2Z_OK) status = g2z_is_there(services, path.text, &there);
  if (status == G2Z_OK && there)
    status = g2z_read_file(services, path.text, (size_t)1 << 30, &old, &bytes);
  if (status == G2Z_OK && there && strncmp(old, G2Z_PAGE_BEGIN, strlen(G2Z_PAGE_BEGIN)) != 0)
    status = g2z_fail(services, G2Z_BAD_ARGUMENT, "%.600s was not written by bench report: choose "
                      "another place, --out DIR, or remove it", path.text);
  g2z_release(services, old);
  if (status == G2Z_OK) status = g2z_results_page(results, path.text);
  if (status == G2Z_OK)
    g2z_log(services, G2Z_LOG_INFO, "%s: %zu experiment%s, %zu run%s", path.text,
            results->report_count, G2Z_PLURAL(results->report_count), results->run_count,
            G2Z_PLURAL(results->run_count));
  g2z_results_free(results);
  return status;
}

G2Z_API g2z_status g2z_bench_run(g2z_services *services, const g2z_bench *o,
                                 const g2z_context_config *config) {
  if (o->command == G2Z_BENCH_point || o->command == G2Z_BENCH_exchange)
    return g2zx_rank(services, o, config);
  if (o->command == G2Z_BENCH_report) return g2zx_report(services, o);
  return g2zx_run(services, o, config);
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_EXPERIMENT_IMPLEMENTED */
