/* g2z_report.h: shows what runs of gpt2_zero.h measured: pages with charts and tables, TensorBoard
 * events, profiles, and a comparison of several runs. MIT licence.
 *
 * QUICK START
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_report.h"                                    // this order
 *     static g2z_services services;                               // malloc, no log
 *     g2z_results *results = NULL;
 *     g2z_status status = g2z_report_run(&services, "runs/first");   // runs/first/report.html
 *     if (status == G2Z_OK) status = g2z_results_create(&services, &results);
 *     if (status == G2Z_OK) status = g2z_results_add(results, "runs");
 *     if (status == G2Z_OK) status = g2z_results_page(results, "runs.html");
 *     if (status != G2Z_OK) puts(services.error);
 *     g2z_results_free(results);
 *
 * It uses only the public functions of gpt2_zero.h and g2z_program.h. The library's build switches
 * apply (GPT2_ZERO_IMPLEMENTATION, G2Z_STATIC, G2Z_API, G2Z_ASSERT), and its error contract: a
 * status, and a sentence in services->error. Names that begin with g2zp_ or G2ZP_ are private.
 *
 * CONTENTS: report (pages, charts, TensorBoard, metrics.jsonl, the page of a run, profiles,
 *     statistics, several runs on one page). Experiments are in g2z_experiment.h.
 *
 * RUN DIRECTORY (g2z_run.h has the whole list)
 *     read      metrics.jsonl, training_metrics.json, launcher_metadata.json, RUN_FAILED.json,
 *               sample.txt, profiles/nsys_stats_*.txt, profiles/timers_*.txt
 *     written   report.html, events.out.tfevents.*, and in profiles/: timers_*.txt,
 *               profile_summary.json */

#ifndef G2Z_REPORT_INCLUDED
#define G2Z_REPORT_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_report.h: include gpt2_zero.h before it"
#endif

#include "g2z_program.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ===== report ============================================================
 * A page is one self-contained HTML file without scripts. It follows the reader's light or dark
 * mode, fits wide and narrow screens, and prints well. All text is escaped here.
 *
 *   g2z_page *page;  status = g2z_page_create(services, "report.html", "Scaling", &page);
 *   g2z_page_fact(page, "machine", "%d x %s", 8, "NVIDIA H200");      facts form a grid
 *   g2z_page_heading(page, "Throughput");
 *   g2z_page_table(page, 2, headers);                                 ends at anything else
 *   g2z_page_cell(page, "%d", 1);  g2z_page_cell(page, "%.0f", 231000.0);
 *   g2z_page_chart(page, &chart);                                     charts form a grid
 *   status = g2z_page_commit(page);                                   the first failure, or OK
 *   g2z_page_free(page); */

#define G2Z_CHART_SERIES 8           /* one colour each */
#define G2Z_CHART_POINTS 1000        /* longer series are reduced to this number */

typedef enum g2z_mark {
  G2Z_MARK_LINE,
  G2Z_MARK_POINTS,                   /* a line with a point at each of up to 64 values */
  G2Z_MARK_DASHED,                   /* an ideal to compare the other series with */
  G2Z_MARK_FAINT                     /* the raw values of a smoothed line */
} g2z_mark;

typedef enum g2z_axis {
  G2Z_AXIS_AUTO,                     /* LOG if all values are positive and span a factor of 1,000 */
  G2Z_AXIS_LINEAR,
  G2Z_AXIS_ZERO,                     /* linear, with 0 on the axis */
  G2Z_AXIS_LOG                       /* a value that is not positive is a gap */
} g2z_axis;

typedef struct g2z_series {
  const char *name;                  /* shown in the legend if there are two series or more */
  const double *x, *y;               /* [count]; NaN: a gap. Bar charts do not read x */
  const double *low, *high;          /* [count]: a whisker at each bar; or both NULL */
  size_t count;
  g2z_mark mark;
} g2z_series;

typedef struct g2z_chart {           /* start from all zero */
  const char *title, *about;         /* about: unit and meaning, in a few words; NULL: none */
  const char *x_name;                /* under the x axis; NULL: none, as in bar charts */
  const char *const *labels;         /* not NULL: a bar chart, one group of bars per label */
  const g2z_series *series;
  int series_count;                  /* 1 .. G2Z_CHART_SERIES */
  g2z_axis x_axis, y_axis;
} g2z_chart;

typedef struct g2z_page g2z_page;
/* The file gets its name `path` in g2z_page_commit, which also returns the first failure. */
G2Z_API g2z_status g2z_page_create(g2z_services *services, const char *path, const char *title,
                                   g2z_page **out);
G2Z_API void g2z_page_heading(g2z_page *page, const char *text);
G2Z_API void g2z_page_text(g2z_page *page, const char *format, ...) G2Z_PRINTF(2, 3);
G2Z_API void g2z_page_fact(g2z_page *page, const char *name, const char *format, ...)
    G2Z_PRINTF(3, 4);
/* Begins a table; its cells are put one by one, `columns` per row. The first column is text, the
 * others are numbers; an empty cell means unknown. */
G2Z_API void g2z_page_table(g2z_page *page, int columns, const char *const *headers);
G2Z_API void g2z_page_cell(g2z_page *page, const char *format, ...) G2Z_PRINTF(2, 3);
G2Z_API void g2z_page_chart(g2z_page *page, const g2z_chart *chart);
G2Z_API g2z_status g2z_page_commit(g2z_page *page);
G2Z_API void g2z_page_free(g2z_page *page); /* NULL is fine; removes if uncommitted */

/* One line of metrics.jsonl, written when the step's loss is known. */
#define G2Z_METRIC_LIST(X)                                                                        \
  /*  type     name             meaning; an unknown number is null in the file */                 \
  X(INTEGER, step,            "from 1")                                                           \
  X(INTEGER, tokens,          "trained on so far, over all ranks")                                \
  X(NUMBER,  loss,            "mean over the global batch, in nats per token")                    \
  X(NUMBER,  lr,              "learning rate of the step")                                        \
  X(NUMBER,  grad_norm,       "global norm before clipping; null: not finite")                    \
  X(NUMBER,  loss_scale,      "that the step ran with")                                           \
  X(INTEGER, skipped,         "1: gradients were not finite and the weights did not move")        \
  X(NUMBER,  step_ms,         "wall time of the step, data_ms included")                          \
  X(NUMBER,  tok_s,           "tokens of the step over step_ms")                                  \
  X(NUMBER,  mfu,             "model flops utilisation; null: the device's peak is not known")    \
  X(NUMBER,  exposed_comm_ms, "communication that hid under no computation")                      \
  X(NUMBER,  data_ms,         "waiting for tokens")                                               \
  X(NUMBER,  mem_gib,         "device memory that the plan holds")

#define G2Z_METRIC_INTEGER int64_t
#define G2Z_METRIC_NUMBER double
typedef struct g2z_metrics {
#define X(type, name, meaning) G2Z_METRIC_##type name;
  G2Z_METRIC_LIST(X)
#undef X
} g2z_metrics;

/* Optional members of a line: validation, saving and other work that takes time between steps. */
#define G2Z_NOTE_LIST(X) \
  X(val_loss) X(val_ms) X(save_ms) X(sample_ms) X(epoch) X(epoch_ms) \
  X(eval) X(eval_loss) X(eval_acc_norm) X(eval_ms)

/* A line of metrics.jsonl. Optional members that it lacks are NaN. metrics.step_ms is NaN in a line
 * that is not a step's. */
typedef struct g2z_metrics_line {
  g2z_metrics metrics;
#define X(name) double name;
  G2Z_NOTE_LIST(X)
#undef X
  char eval_file[256];          /* "": none, or longer than 255 bytes */
} g2z_metrics_line;
/* Reads line `number` of the file `path` at text[*at], and moves *at past it. A line without a
 * line feed is a failure with *torn = 1: the run is writing it, or the machine went down. */
G2Z_API g2z_status g2z_metrics_read(g2z_services *services, const char *path, const char *text,
                                    size_t bytes, size_t *at, int number, g2z_metrics_line *line,
                                    int *torn);

/* Writes run_dir/report.html: curves from metrics.jsonl, and facts from training_metrics.json or,
 * until the run has written that, from launcher_metadata.json. A file that is damaged or is not a
 * run's is a failure; then nothing is written. */
G2Z_API g2z_status g2z_report_run(g2z_services *services, const char *run_dir);

/* Writes run_dir/profiles/timers_HOST.txt: the times of spans, formatted like the NVTX ranges of
 * `nsys stats`. Then writes profile_summary.json, as below, from this file alone: other files in
 * profiles/ come from earlier runs. */
G2Z_API g2z_status g2z_profile_write_spans(g2z_services *services, const char *run_dir,
                                           const g2z_span_times times[G2Z_SPAN_COUNT]);
/* Writes run_dir/profiles/profile_summary.json: the five NVTX ranges and the five operating-system
 * calls that took most time. Reads profiles/nsys_stats_*.txt, or if there are none, timers_*.txt,
 * which list no calls. A file in another format is a failure; then nothing is written. */
G2Z_API g2z_status g2z_profile_run(g2z_services *services, const char *run_dir);

/* Scalars for TensorBoard, appended to a new file events.out.tfevents.TIME.HOST in `directory`. For
 * a resumed run, TensorBoard drops the values of earlier files from `first_step` on. */
typedef struct g2z_events g2z_events;
G2Z_API g2z_status g2z_events_create(g2z_services *services, const char *directory,
                                     int64_t first_step, g2z_events **out);
/* Leaves out values that are not finite. More than about 4000 bytes of tags are an error. */
G2Z_API g2z_status g2z_events_put(g2z_events *events, int64_t step, int count,
                                  const char *const *tags, const double *values);
G2Z_API void g2z_events_free(g2z_events *events); /* NULL is fine */

/* Sorts the values. NaN if there are none, or if one of them is NaN. */
G2Z_API double g2z_median(double *values, size_t count);
/* Sorts the values. The smallest that `percent` percent do not exceed (nearest rank), or NaN. */
G2Z_API double g2z_percentile(double *values, size_t count, int percent);
/* The sample's standard deviation; NaN for fewer than two values. */
G2Z_API double g2z_deviation(const double *values, size_t count);

/* The runs found in directories, for one page. */
typedef struct g2z_results {
  g2z_services *services;
  struct g2zp_told *runs;       /* training_metrics.json of each run */
  size_t run_count, run_capacity;
  /* Unless NULL, `take` reads each file NAME_report.json, and `show` puts its part of the page
   * before the runs. */
  g2z_status (*take)(void *user, const char *path);
  void (*show)(void *user, g2z_page *page);
  void *user;
  size_t taken;                 /* files passed to `take` */
} g2z_results;
G2Z_API g2z_status g2z_results_create(g2z_services *services, g2z_results **out);
G2Z_API void g2z_results_free(g2z_results *results); /* NULL is fine */
/* Adds the run and the experiments of the directory and of its subdirectories down to two levels.
 * A damaged file is a failure, and so is a directory that holds neither. */
G2Z_API g2z_status g2z_results_add(g2z_results *results, const char *directory);
G2Z_API g2z_status g2z_results_page(const g2z_results *results, const char *path);

/* The current time, as "2026-01-31T23:59:59Z". */
G2Z_API void g2z_utc_now(char text[32]);

/* "DIRECTORY/name" with a formatted name. It is "", which cannot be opened, if the directory is ""
 * or NULL. The room exceeds the system's longest path: a path that is cut off cannot be opened. */
typedef struct g2z_path {
  char text[4160];
} g2z_path;
G2Z_API g2z_path g2z_path_in(const char *directory, const char *format, ...) G2Z_PRINTF(2, 3);

/* Writes a JSON file: one object, whose members `put` writes. */
G2Z_API g2z_status g2z_json_write(g2z_services *services, const char *path, g2z_note put,
                                  void *user);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_REPORT_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_REPORT_IMPLEMENTED)
#define G2Z_REPORT_IMPLEMENTED

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* A caller's bug, not an input: overridable, and never has a side effect. */
#ifndef G2Z_ASSERT
#define G2Z_ASSERT(condition) assert(condition)
#endif

#define G2ZP_TRY(call)                             \
  do {                                             \
    g2z_status try_status_ = (call);               \
    if (try_status_ != G2Z_OK) return try_status_; \
  } while (0)

#ifdef __cplusplus
extern "C" {
#endif

/* ===== report ============================================================
 * In:  numbers, and text of any origin. Out: pages.
 * Law: all input is a number or escaped text; a number that cannot be drawn is a gap. */

G2Z_API void g2z_utc_now(char text[32]) {
  time_t now = time(NULL);
  struct tm utc;
  gmtime_r(&now, &utc);
  strftime(text, 32, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

G2Z_API g2z_path g2z_path_in(const char *directory, const char *format, ...) {
  g2z_path path;
  va_list arguments;
  path.text[0] = 0;
  if (!directory || !*directory) return path;
  int used = snprintf(path.text, sizeof path.text, "%.4096s/", directory);
  va_start(arguments, format);
  vsnprintf(path.text + used, sizeof path.text - (size_t)used, format, arguments);
  va_end(arguments);
  return path;
}

static g2z_status g2zp_check_directory(g2z_services *services, const char *directory) {
  return *directory ? G2Z_OK : g2z_fail_file(services, ENOENT, "open the directory", directory);
}

G2Z_API g2z_status g2z_json_write(g2z_services *services, const char *path, g2z_note put,
                                  void *user) {
  g2z_json_out out;
  memset(&out, 0, sizeof out);
  out.indent = 2;
  G2ZP_TRY(g2z_writer_create(services, path, &out.writer));
  g2z_json_begin(&out, NULL, '{');
  put(user, &out);
  g2z_json_end(&out, '}');
  g2z_writer_put(out.writer, "\n", 1);
  g2z_status status = g2z_writer_commit(out.writer);
  g2z_writer_free(out.writer);
  return status;
}

/* ----- pages ----- */

enum { /* the open element: an element of another kind closes it */
  G2ZP_PAGE_PLAIN,
  G2ZP_PAGE_FACTS,
  G2ZP_PAGE_TABLE,
  G2ZP_PAGE_CHARTS
};

struct g2z_page {
  g2z_services *services;
  g2z_writer *writer;
  int open;
  int columns, cell;                 /* of the open table; cell: cells put so far */
  int tables;                        /* begun so far */
  int no_memory;                     /* 1: memory ran out, and a text is missing */
};

/* Eight colours that differ in lightness and hue: colour-blind readers can distinguish them. */
static const char g2zp_page_style[] =
    ":root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--line:#e2e2de;--grid:#ececea;"
    "--text:#1c1d1f;--soft:#63666b;--s0:#1f66c1;--s1:#d9541e;--s2:#12876f;--s3:#8b4fc0;"
    "--s4:#b07d00;--s5:#c2347b;--s6:#4b8f1a;--s7:#5b6470}\n"
    "@media screen and (prefers-color-scheme:dark){:root{--page:#131416;--card:#1b1d20;"
    "--line:#303338;--grid:#292c30;--text:#e9e9e7;--soft:#a0a4aa;"
    "--s0:#6aa9f7;--s1:#f58a5c;--s2:#3fc3a3;--s3:#bd92ec;--s4:#e2b13c;--s5:#ee7fb2;--s6:#95cf5d;"
    "--s7:#aab3bf}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;max-width:1400px;padding:clamp(16px,3vw,40px);background:var(--page);"
    "color:var(--text);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}\n"
    "h1{font-size:1.6rem;line-height:1.2;margin:0 0 1rem}\n"
    "h2{font-size:1.15rem;margin:2rem 0 .6rem}\n"
    "p{max-width:70ch;margin:.5rem 0;white-space:pre-wrap}\n"
    "pre{font:.87rem/1.5 ui-monospace,monospace;margin:.5rem 0;white-space:pre-wrap}\n"
    "dl,.charts{display:grid;gap:12px;margin:1rem 0}\n"
    "dl{grid-template-columns:repeat(auto-fill,minmax(min(100%,15rem),1fr));gap:10px 24px}\n"
    "dt{color:var(--soft);font-size:.8rem}\n"
    "dd{margin:0}\n"
    ".long{grid-column:1/-1;order:1}\n"
    ".long dd{font:.87rem/1.5 ui-monospace,monospace}\n"
    ".long span{display:inline-block}\n"
    ".charts{grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr))}\n"
    "figure{margin:0;padding:14px 14px 8px;background:var(--card);border:1px solid var(--line);"
    "border-radius:8px;break-inside:avoid}\n"
    "figcaption b{font-weight:600}\n"
    "figcaption span,.legend{color:var(--soft);font-size:.85rem}\n"
    "figcaption span{margin-left:.6em}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:0 1em}\n"
    ".legend span::before{content:'';display:inline-block;width:1.3em;margin-right:.4em;"
    "border-top:3px solid var(--c);vertical-align:.22em}\n"
    ".legend .dash::before{border-top-style:dashed;border-top-width:2px}\n"
    "svg{display:block;width:100%;height:auto;margin-top:6px;overflow:visible}\n"
    "svg text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}\n"
    "svg .end{text-anchor:end}\n"
    "svg .mid{text-anchor:middle}\n"
    "svg .grid{stroke:var(--grid)}\n"
    "svg .axis{stroke:var(--line)}\n"
    "svg .series{fill:none;stroke:var(--c);stroke-width:1.7;stroke-linejoin:round;"
    "stroke-linecap:round}\n"
    "svg .many{stroke-width:1.1}\n"
    "svg .faint{opacity:.35}\n"
    "svg .here{fill:transparent}\n"
    "svg .here:hover{fill:var(--soft);opacity:.25}\n"
    "svg .dash{stroke-dasharray:5 5;stroke-width:1.4}\n"
    "svg .dot{fill:var(--c);stroke:var(--card);stroke-width:1.2}\n"
    "svg .bar{fill:var(--c)}\n"
    "svg .whisker{stroke:var(--text);stroke-width:1.2;fill:none;opacity:.65}\n"
    ".scroll{overflow-x:auto;margin:1rem 0}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;overflow-wrap:normal}\n"
    "th,td{padding:.32rem .9rem .32rem 0;border-bottom:1px solid var(--line);text-align:right;"
    "vertical-align:bottom}\n"
    "th{font-weight:600;color:var(--soft);font-size:.85rem}\n"
    "th:first-child,td:first-child{text-align:left}\n"
    "td:first-child{overflow-wrap:anywhere;min-width:12ch}\n"
    "@media screen and (max-width:640px){thead{display:none}" /* a row becomes a list */
    "table,tbody,tr{display:block}tr{padding:.4rem 0;border-bottom:1px solid var(--line)}"
    "td{display:flex;justify-content:space-between;gap:1em;border:0;padding:.1rem 0}"
    "td::before{color:var(--soft)}td:first-child{font-weight:600}}\n"
    "@media (max-width:480px){svg text{font-size:14px}dl{grid-template-columns:1fr 1fr}}\n"
    "@media print{:root{color-scheme:light;font-size:11px;--page:#fff;--card:#fff;--line:#bbb;"
    "--grid:#e4e4e4;--text:#000;--soft:#444}body{max-width:none;padding:0;font-size:11px}"
    ".charts{grid-template-columns:1fr 1fr}.scroll{overflow:visible}"
    "h2{break-after:avoid}tr{break-inside:avoid}}\n";

/* Escapes markup. Bytes that are not UTF-8 or that control a terminal become U+FFFD. */
static void g2zp_page_escape(g2z_writer *writer, const char *text) {
  const unsigned char *at = (const unsigned char *)text, *end = at + strlen(text);
  while (at < end) {
    const g2z_shown shown = g2z_utf8_show(at, end);
    const char *entity = *at == '&' ? "&amp;" : *at == '<' ? "&lt;" : *at == '>' ? "&gt;"
                         : *at == '"' ? "&quot;" : *at == '\'' ? "&#39;" : NULL;
    if (entity) g2z_writer_put(writer, entity, strlen(entity));
    else g2z_writer_put(writer, shown.text, shown.bytes);
    at += shown.used;
  }
}

/* Writes the escaped text between two pieces of markup. */
static void g2zp_element(g2z_writer *writer, const char *open, const char *text,
                         const char *close) {
  g2z_writer_put(writer, open, strlen(open));
  g2zp_page_escape(writer, text);
  g2z_writer_put(writer, close, strlen(close));
}

/* A coordinate as text, rounded to a tenth, with a point in every locale. Values are clamped: a
 * whisker that ends beyond every scale is drawn to far outside the picture. */
typedef struct g2zp_coordinate {
  char text[24];
} g2zp_coordinate;

static g2zp_coordinate g2zp_coordinate_of(double value) {
  const long tenths = lround(fmax(-1e5, fmin(value, 1e5)) * 10);
  g2zp_coordinate out;
  snprintf(out.text, sizeof out.text, "%s%ld.%ld", tenths < 0 ? "-" : "", labs(tenths) / 10,
           labs(tenths) % 10);
  return out;
}
#define G2ZP_AT(value) g2zp_coordinate_of(value).text

/* The formatted text, of any length; freed with g2z_release. NULL: memory ran out, and
 * g2z_page_commit will report it. */
static char *g2zp_page_format(g2z_page *page, const char *format, va_list arguments) {
  va_list again;
  void *memory = NULL;
  va_copy(again, arguments);
  int length = vsnprintf(NULL, 0, format, again);
  va_end(again);
  if (length < 0 || g2z_allocate(page->services, (size_t)length + 1, 1, &memory) != G2Z_OK)
    page->no_memory = 1;
  if (memory) vsnprintf((char *)memory, (size_t)length + 1, format, arguments);
  return (char *)memory;
}

/* Closes the open element and opens one of `kind`; keeps an open element of that kind. */
static void g2zp_page_open(g2z_page *page, int kind) {
  static const char *const begin[] = {"", "<dl>\n", "", "<div class=charts>\n"};
  static const char *const end[] = {"", "</dl>\n", "</tbody></table></div>\n", "</div>\n"};
  if (page->open == kind && kind != G2ZP_PAGE_TABLE) return;
  if (page->open == G2ZP_PAGE_TABLE && page->cell) g2z_writer_printf(page->writer, "</tr>\n");
  g2z_writer_printf(page->writer, "%s%s", end[page->open], begin[kind]);
  page->open = kind;
}

G2Z_API g2z_status g2z_page_create(g2z_services *services, const char *path, const char *title,
                                   g2z_page **out) {
  void *memory;
  *out = NULL;
  G2ZP_TRY(g2z_allocate(services, 1, sizeof(g2z_page), &memory));
  g2z_page *page = (g2z_page *)memory;
  page->services = services;
  g2z_status status = g2z_writer_create(services, path, &page->writer);
  if (status != G2Z_OK) {
    g2z_page_free(page);
    return status;
  }
  g2zp_element(page->writer,
               "<!DOCTYPE html>\n<html lang=en>\n<meta charset=utf-8>\n"
               "<meta name=viewport content=\"width=device-width,initial-scale=1\">\n"
               "<meta name=color-scheme content=\"light dark\">\n<title>", title,
               "</title>\n<style>\n");
  g2z_writer_put(page->writer, g2zp_page_style, sizeof g2zp_page_style - 1);
  g2zp_element(page->writer, "</style>\n<body>\n<h1>", title, "</h1>\n");
  *out = page;
  return G2Z_OK;
}

G2Z_API void g2z_page_heading(g2z_page *page, const char *text) {
  g2zp_page_open(page, G2ZP_PAGE_PLAIN);
  g2zp_element(page->writer, "<h2>", text, "</h2>\n");
}

G2Z_API void g2z_page_text(g2z_page *page, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char *text = g2zp_page_format(page, format, arguments);
  va_end(arguments);
  g2zp_page_open(page, G2ZP_PAGE_PLAIN);
  g2zp_element(page->writer, "<p>", text ? text : "", "</p>\n");
  g2z_release(page->services, text);
}

G2Z_API void g2z_page_fact(g2z_page *page, const char *name, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char *text = g2zp_page_format(page, format, arguments);
  va_end(arguments);
  int is_long = text && strlen(text) > 60;
  g2zp_page_open(page, G2ZP_PAGE_FACTS);
  g2zp_element(page->writer, is_long ? "<div class=long><dt>" : "<div><dt>", name, "</dt><dd>");
  for (char *at = text; is_long && *at;) { /* a line breaks between words, never inside "--steps" */
    char *end = at + strcspn(at, " "), space = *end;
    *end = 0;
    g2zp_element(page->writer, "<span>", at, space ? "</span> " : "</span>");
    at = end + (space != 0);
  }
  if (!is_long) g2zp_page_escape(page->writer, text ? text : "");
  g2z_writer_printf(page->writer, "</dd></div>\n");
  g2z_release(page->services, text);
}

G2Z_API void g2z_page_table(g2z_page *page, int columns, const char *const *headers) {
  G2Z_ASSERT(columns > 0);
  g2zp_page_open(page, G2ZP_PAGE_TABLE);
  page->columns = columns;
  page->cell = 0;
  page->tables++; /* on a narrow page each cell repeats its header, which is never user text */
  g2z_writer_printf(page->writer, "<style>@media screen and (max-width:640px){");
  for (int i = 1; i < columns; i++) {
    g2z_writer_printf(page->writer, "[id=t%d] td:nth-child(%d)", page->tables, i + 1);
    g2zp_element(page->writer, "::before{content:'", headers[i], "'}");
  }
  g2z_writer_printf(page->writer, "}</style>\n<div class=scroll><table id=t%d><thead><tr>",
                    page->tables);
  for (int i = 0; i < columns; i++) g2zp_element(page->writer, "<th>", headers[i], "");
  g2z_writer_printf(page->writer, "</tr></thead><tbody>\n");
}

G2Z_API void g2z_page_cell(g2z_page *page, const char *format, ...) {
  G2Z_ASSERT(page->open == G2ZP_PAGE_TABLE);
  va_list arguments;
  va_start(arguments, format);
  char *text = g2zp_page_format(page, format, arguments);
  va_end(arguments);
  g2zp_element(page->writer, page->cell ? "<td>" : "<tr><td>",
               !text ? "" : *text ? text : "\xe2\x80\x93", "");
  if (++page->cell == page->columns) {
    g2z_writer_printf(page->writer, "</tr>\n");
    page->cell = 0;
  }
  g2z_release(page->services, text);
}

G2Z_API g2z_status g2z_page_commit(g2z_page *page) {
  g2zp_page_open(page, G2ZP_PAGE_PLAIN);
  g2z_writer_printf(page->writer, "</body>\n</html>\n");
  if (page->no_memory)
    return g2z_fail(page->services, G2Z_NO_MEMORY, "no memory for a text of a page");
  return g2z_writer_commit(page->writer);
}

G2Z_API void g2z_page_free(g2z_page *page) {
  if (!page) return;
  g2z_writer_free(page->writer);
  g2z_release(page->services, page);
}

/* ----- scales ----- */

#define G2ZP_CHART_WIDTH 440.0 /* a unit is about 1 px on a wide page, 0.72 px on a telephone */
#define G2ZP_CHART_HEIGHT 260.0
#define G2ZP_CHART_DIGIT 8.6 /* width of a digit on a telephone, where text is larger */
#define G2ZP_TICKS 12
#define G2ZP_OWN_TICKS 8

typedef struct g2zp_scale {
  double low, high;                  /* range of the values */
  double from, to;                   /* range of coordinates */
  int log;
  double step;                       /* between ticks of a linear scale; 0: ticks at data values */
  double tick[G2ZP_TICKS];
  int ticks;
} g2zp_scale;

typedef struct g2zp_extent {         /* all values on an axis */
  double low, high, positive;        /* NaN: none; positive: the smallest above 0 */
  int whole;                         /* all are integers */
  double value[G2ZP_OWN_TICKS + 1];  /* the distinct values, in order */
  int values;                        /* number of these; G2ZP_OWN_TICKS + 1: or more */
} g2zp_extent;

static const g2zp_extent g2zp_nothing = {NAN, NAN, NAN, 1, {0}, 0};

/* Keeps values far from a double's limits, so that no scale overflows. NaN: a gap. */
static double g2zp_drawable(double value) {
  if (!isfinite(value) || fabs(value) > 1e30) return NAN;
  return fabs(value) < 1e-30 ? 0 : value;
}

static void g2zp_extent_add(g2zp_extent *e, double value) {
  value = g2zp_drawable(value);
  if (isnan(value)) return;
  if (!(e->low <= value)) e->low = value; /* also true while low is NaN */
  if (!(e->high >= value)) e->high = value;
  if (value > 0 && !(e->positive <= value)) e->positive = value;
  if (value != floor(value)) e->whole = 0;
  int i = 0;
  if (e->values > G2ZP_OWN_TICKS) return;
  while (i < e->values && e->value[i] < value) i++;
  if (i < e->values && e->value[i] == value) return;
  memmove(e->value + i + 1, e->value + i, (size_t)(e->values - i) * sizeof(double));
  e->value[i] = value;
  e->values++;
}

/* The nearest 1, 2 or 5 times a power of ten below `value`, or above it. */
static double g2zp_log_bound(double value, int above) {
  double power = pow(10, floor(log10(value) + 1e-9)), lead = value / power;
  if (above) return power * (lead <= 1.001 ? 1 : lead <= 2.001 ? 2 : lead <= 5.001 ? 5 : 10);
  return power * (lead >= 4.999 ? 5 : lead >= 1.999 ? 2 : 1);
}

/* `rounded`: the axis ends at ticks, as a y axis does; else at the first and the last value. */
static void g2zp_scale_make(g2zp_scale *s, const g2zp_extent *e, g2z_axis axis, int rounded) {
  memset(s, 0, sizeof *s);
  s->low = isnan(e->low) ? 0 : e->low;
  s->high = isnan(e->high) ? 1 : e->high;
  s->log = (axis == G2Z_AXIS_LOG && e->positive < e->high) ||
           (axis == G2Z_AXIS_AUTO && e->low > 0 && e->high / e->low > 1000);
  if (s->log) {
    s->low = rounded ? g2zp_log_bound(e->positive, 0) : e->positive;
    if (rounded) s->high = g2zp_log_bound(e->high, 1);
    if (s->low >= s->high) { /* both bounds are the same: use the values */
      s->low = e->positive;
      s->high = e->high;
      rounded = 0;
    }
  } else {
    if (axis == G2Z_AXIS_ZERO && s->low > 0) s->low = 0;
    if (axis == G2Z_AXIS_ZERO && s->high < 0) s->high = 0;
    double size = fmax(fabs(s->low), fabs(s->high));
    int one = s->high - s->low <= 1e-9 * size; /* a single value: centred, with its own tick */
    if (one) {
      s->low -= size > 0 ? size / 10 : 1;
      s->high += size > 0 ? size / 10 : 1;
      rounded = 0;
    }
    /* The step is 1, 2, 2.5 or 5 times a power of ten; about five steps make up the span. */
    double raw = (s->high - s->low) / 5, power = pow(10, floor(log10(raw))), lead = raw / power;
    int quarter = lead > 2 && lead <= 2.5 && !(e->whole && power < 10);
    s->step = power * (lead <= 1 ? 1 : lead <= 2 ? 2 : quarter ? 2.5 : lead <= 5 ? 5 : 10);
    if (e->whole && s->step < 1) s->step = 1;
    if (rounded) {
      s->low = floor(s->low / s->step + 1e-6) * s->step;
      s->high = ceil(s->high / s->step - 1e-6) * s->step;
    }
  }
  if (!rounded && e->values <= G2ZP_OWN_TICKS) { /* few values: a tick at each */
    s->step = 0;
    for (int i = 0; i < e->values; i++)
      if (e->value[i] > 0 || !s->log) s->tick[s->ticks++] = e->value[i];
  } else if (s->log) { /* few decades: 1, 2, 5; else powers of ten, or every n-th */
    int first = (int)floor(log10(s->low) + 1e-9), last = (int)floor(log10(s->high) + 1e-9);
    int every = (last - first) / 6 + 1, fine = log10(s->high / s->low) < 2.5;
    for (int power = first; power <= last; power += every)
      for (int lead = 1; lead <= 5; lead += lead == 2 ? 3 : 1) { /* 1, 2, 5 */
        double tick = lead * pow(10, power);
        int shown = (lead == 1 || fine) && tick >= s->low * 0.999 && tick <= s->high * 1.001;
        if (shown && s->ticks < G2ZP_TICKS) s->tick[s->ticks++] = tick;
      }
  } else
    for (double i = ceil(s->low / s->step - 1e-6);
         i * s->step <= s->high + 1e-6 * s->step && s->ticks < G2ZP_TICKS; i++)
      s->tick[s->ticks++] = i * s->step;
}

/* The coordinate of a value; NaN: it is not drawn. */
static double g2zp_scale_at(const g2zp_scale *s, double value) {
  value = g2zp_drawable(value);
  if (s->log && !(value > 0)) return NAN;
  double part = s->log ? log(value / s->low) / log(s->high / s->low)
                       : (value - s->low) / (s->high - s->low);
  return s->from + part * (s->to - s->from);
}

/* Shortens "2,500" to "2.5k". All ticks of a linear scale share one unit and the number of
 * decimals that the step needs. */
static void g2zp_tick_text(const g2zp_scale *s, double value, char out[32]) {
  double size = s->step > 0 ? fmax(fabs(s->low), fabs(s->high)) : fabs(value), unit = 1;
  char suffix[8] = "";
  if (size >= 1e15 || (size < 1e-2 && size > 0)) {
    int power = (int)floor(log10(size) + 1e-9);
    unit = pow(10, power);
    snprintf(suffix, sizeof suffix, "e%d", power);
  } else if (size >= 1e4) {
    unit = size >= 1e12 ? 1e12 : size >= 1e9 ? 1e9 : size >= 1e6 ? 1e6 : 1e3;
    snprintf(suffix, sizeof suffix, "%s",
             size >= 1e12 ? "T" : size >= 1e9 ? "G" : size >= 1e6 ? "M" : "k");
  }
  if (s->step > 0) {
    int decimals = 0;
    for (double rest = s->step / unit; decimals < 6 && fabs(rest - round(rest)) > 1e-6; rest *= 10)
      decimals++;
    snprintf(out, 24, "%.*f", decimals, value / unit);
  } else snprintf(out, 24, "%.4g", value / unit);
  g2z_plain_number(out);
  if (value == 0) snprintf(out, 32, "0");
  else strcat(out, suffix);
}

/* ----- charts ----- */

static void g2zp_svg_line(g2z_writer *writer, const char *kind, double x1, double y1,
                          double x2, double y2) {
  g2z_writer_printf(writer, "<path class=%s d=\"M%s %sL%s %s\"/>", kind, G2ZP_AT(x1), G2ZP_AT(y1),
                    G2ZP_AT(x2), G2ZP_AT(y2));
}

static void g2zp_svg_text(g2z_writer *writer, const char *kind, double x, double y,
                          const char *text) {
  g2z_writer_printf(writer, "<text class=%s x=\"%s\" y=\"%s\"", kind, G2ZP_AT(x), G2ZP_AT(y));
  g2zp_element(writer, ">", text, "</text>\n");
}

/* Writes title and legend, and opens the picture. */
static void g2zp_chart_head(g2z_page *page, const g2z_chart *chart, double height) {
  g2z_writer *writer = page->writer;
  g2zp_element(writer, "<figure><figcaption><b>", chart->title, "</b>");
  if (chart->about) g2zp_element(writer, "<span>", chart->about, "</span>");
  g2z_writer_printf(writer, "</figcaption>\n");
  if (chart->series_count > 1) {
    g2z_writer_printf(writer, "<div class=legend>");
    for (int i = 0; i < chart->series_count; i++) {
      const int dashed = chart->series[i].mark == G2Z_MARK_DASHED;
      g2z_writer_printf(writer, "<span%s style=\"--c:var(--s%d)\"", dashed ? " class=dash" : "", i);
      g2zp_element(writer, ">", chart->series[i].name, "</span>");
    }
    g2z_writer_printf(writer, "</div>\n");
  }
  g2z_writer_printf(writer, "<svg viewBox=\"0 0 %d %d\" role=img", (int)G2ZP_CHART_WIDTH,
                    (int)height);
  g2zp_element(writer, " aria-label=\"", chart->title, "\">\n");
}

/* Draws the grid and the numbers of its lines. */
static void g2zp_chart_axes(g2z_page *page, const g2z_chart *chart, const g2zp_scale *x,
                            const g2zp_scale *y) {
  char text[32];
  double free_from = 0; /* ticks at data values may be too close together */
  for (int i = 0; i < y->ticks; i++) {
    double at = g2zp_scale_at(y, y->tick[i]);
    g2zp_tick_text(y, y->tick[i], text);
    g2zp_svg_line(page->writer, "grid", x->from, at, x->to, at);
    g2zp_svg_text(page->writer, "end", x->from - 6, at + 4, text);
  }
  g2zp_svg_line(page->writer, "axis", x->from, y->from, x->to, y->from);
  for (int i = 0; i < x->ticks; i++) {
    double at = g2zp_scale_at(x, x->tick[i]);
    g2zp_tick_text(x, x->tick[i], text);
    double half = 4 * (double)strlen(text) + 2;
    if (at - half < free_from) continue;
    free_from = at + half;
    g2zp_svg_line(page->writer, "axis", at, y->from, at, y->from + 4);
    g2zp_svg_text(page->writer, "mid", at, y->from + 17, text);
  }
  if (chart->x_name)
    g2zp_svg_text(page->writer, "mid", (x->from + x->to) / 2, y->from + 33, chart->x_name);
}

/* A long series is cut into stretches; each is drawn as its minimum and maximum, in their order. A
 * single point between two gaps is a line of length 0, which its round ends turn into a dot. */
static void g2zp_chart_line(g2z_writer *writer, const g2z_series *series, int index,
                            const g2zp_scale *x, const g2zp_scale *y) {
  size_t stretch = series->count <= G2Z_CHART_POINTS
                       ? 1 : (series->count + G2Z_CHART_POINTS / 2 - 1) / (G2Z_CHART_POINTS / 2);
  int drawn = 0;                     /* points since the last gap */
  g2z_writer_printf(writer, "<path class=\"series%s%s\" style=\"--c:var(--s%d)\" d=\"",
                    series->mark == G2Z_MARK_DASHED  ? " dash"
                    : series->mark == G2Z_MARK_FAINT ? " faint" : "",
                    series->count > 200 ? " many" : "", index);
  for (size_t begin = 0; begin < series->count; begin += stretch) {
    size_t end = series->count - begin < stretch ? series->count : begin + stretch;
    size_t least = end, most = end;
    int gap = 0;
    for (size_t i = begin; i < end; i++)
      if (isnan(g2zp_scale_at(x, series->x[i]) + g2zp_scale_at(y, series->y[i]))) gap = 1;
      else {
        if (least == end || series->y[i] < series->y[least]) least = i;
        if (most == end || series->y[i] > series->y[most]) most = i;
      }
    const size_t point[2] = {least < most ? least : most, least < most ? most : least};
    for (int i = least == end ? 2 : least == most; i < 2; i++, drawn++)
      g2z_writer_printf(writer, "%s%s %s", drawn ? "L" : "M",
                        G2ZP_AT(g2zp_scale_at(x, series->x[point[i]])),
                        G2ZP_AT(g2zp_scale_at(y, series->y[point[i]])));
    if (drawn == 1 && (gap || end == series->count)) g2z_writer_printf(writer, "h0");
    if (gap) drawn = 0;
  }
  g2z_writer_printf(writer, "\"/>\n");
}

/* Whole numbers and numbers from 100 on get no decimals, all others five significant digits, as
 * losses need. */
static void g2zp_number_text(double value, char out[32]) {
  const int plain = fabs(value) < 1e15 && (fabs(value) >= 100 || value == rint(value));
  snprintf(out, 32, plain ? "%.0f" : "%.5g", value);
  g2z_plain_number(out);
}

static void g2zp_page_number(g2z_page *page, const char *name, double value) {
  char text[32];
  g2zp_number_text(value, text);
  g2z_page_fact(page, name, "%s", text);
}

/* Columns over the picture: each shows the values of all series there under the pointer. */
static void g2zp_chart_values(g2z_writer *writer, const g2z_chart *chart, const g2zp_scale *x,
                              const g2zp_scale *y) {
  enum { COLUMNS = 120 };
  size_t at[G2Z_CHART_SERIES][COLUMNS];
  const double wide = (x->to - x->from) / COLUMNS;
  char text[32];
  memset(at, 0, sizeof at); /* 1 + the index of the column's last point; 0: none */
  for (int s = 0; s < chart->series_count; s++)
    for (size_t i = 0; i < chart->series[s].count; i++) {
      double column = (g2zp_scale_at(x, chart->series[s].x[i]) - x->from) / wide;
      if (isnan(g2zp_scale_at(y, chart->series[s].y[i])) || !(column >= 0 && column <= COLUMNS))
        continue;
      at[s][column < COLUMNS ? (int)column : COLUMNS - 1] = i + 1;
    }
  for (int c = 0; c < COLUMNS; c++) {
    int values = 0;
    for (int s = 0; s < chart->series_count; s++) {
      const g2z_series *series = &chart->series[s];
      if (!at[s][c]) continue;
      if (!values++) {
        g2zp_number_text(series->x[at[s][c] - 1], text);
        g2z_writer_printf(writer, "<rect class=here x=\"%s\" y=\"%s\" width=\"%s\" height=\"%s\">",
                          G2ZP_AT(x->from + c * wide), G2ZP_AT(y->to), G2ZP_AT(wide),
                          G2ZP_AT(y->from - y->to));
        g2zp_element(writer, "<title>", chart->x_name ? chart->x_name : "", " ");
        g2z_writer_printf(writer, "%s", text);
      }
      g2zp_number_text(series->y[at[s][c] - 1], text);
      g2zp_element(writer, "\n", series->name, ": ");
      g2z_writer_printf(writer, "%s", text);
    }
    if (values) g2z_writer_printf(writer, "</title></rect>\n");
  }
}

static void g2zp_chart_lines(g2z_page *page, const g2z_chart *chart) {
  g2zp_extent wide = g2zp_nothing, tall = g2zp_nothing;
  g2zp_scale x, y;
  char text[32];
  size_t widest = 0;
  for (int i = 0; i < chart->series_count; i++) {
    const g2z_series *series = &chart->series[i];
    for (size_t at = 0; at < series->count; at++) {
      g2zp_extent_add(&wide, series->x[at]);
      g2zp_extent_add(&tall, series->y[at]);
    }
  }
  g2zp_scale_make(&x, &wide, chart->x_axis == G2Z_AXIS_AUTO ? G2Z_AXIS_LINEAR : chart->x_axis, 0);
  g2zp_scale_make(&y, &tall, chart->y_axis, 1);
  for (int i = 0; i < y.ticks; i++) {
    g2zp_tick_text(&y, y.tick[i], text);
    if (strlen(text) > widest) widest = strlen(text);
  }
  x.from = 12 + G2ZP_CHART_DIGIT * (double)widest;
  x.to = G2ZP_CHART_WIDTH - 14;
  y.from = G2ZP_CHART_HEIGHT - (chart->x_name ? 40 : 24);
  y.to = 10;
  g2zp_chart_head(page, chart, G2ZP_CHART_HEIGHT);
  g2zp_chart_axes(page, chart, &x, &y);
  if (isnan(wide.low + tall.low))
    g2zp_svg_text(page->writer, "mid", (x.from + x.to) / 2, (y.from + y.to) / 2, "no values");
  for (int i = 0; i < chart->series_count; i++) {
    const g2z_series *series = &chart->series[i];
    g2zp_chart_line(page->writer, series, i, &x, &y);
    for (size_t at = 0; at < series->count; at++) {
      double across = g2zp_scale_at(&x, series->x[at]), up = g2zp_scale_at(&y, series->y[at]);
      if (isnan(across + up) || series->mark != G2Z_MARK_POINTS || series->count > 64) continue;
      g2z_writer_printf(page->writer, "<circle class=dot style=\"--c:var(--s%d)\" r=3.5 cx=\"%s\" "
                        "cy=\"%s\"/>\n", i, G2ZP_AT(across), G2ZP_AT(up));
    }
  }
  g2zp_chart_values(page->writer, chart, &x, &y);
}

/* Bars are horizontal, so that labels have room; one group per label. */
static void g2zp_chart_bars(g2z_page *page, const g2z_chart *chart) {
  g2zp_extent extent = g2zp_nothing;
  g2zp_scale x, y;
  char text[32];
  size_t groups = 0, widest = 0;
  for (int i = 0; i < chart->series_count; i++) {
    const g2z_series *series = &chart->series[i];
    if (series->count > groups) groups = series->count;
    for (size_t at = 0; at < series->count; at++) {
      g2zp_extent_add(&extent, series->y[at]);
      if (series->high) g2zp_extent_add(&extent, series->high[at]);
    }
  }
  for (size_t at = 0; at < groups; at++)
    if (strlen(chart->labels[at]) > widest) widest = strlen(chart->labels[at]);
  g2zp_scale_make(&x, &extent, G2Z_AXIS_ZERO, 1);
  x.from = fmin(12 + G2ZP_CHART_DIGIT * (double)widest, 0.45 * G2ZP_CHART_WIDTH);
  x.to = G2ZP_CHART_WIDTH - 12 - G2ZP_CHART_DIGIT * 7; /* room for the longest bar's value */
  double group = 14.0 * chart->series_count + 10;
  memset(&y, 0, sizeof y);
  y.to = 4;
  y.from = y.to + group * (double)groups;
  g2zp_chart_head(page, chart, y.from + 24);
  for (int i = 0; i < x.ticks; i++) {
    double at = g2zp_scale_at(&x, x.tick[i]);
    g2zp_svg_line(page->writer, "grid", at, y.to, at, y.from);
  }
  g2zp_chart_axes(page, chart, &x, &y);
  g2zp_scale own = x;
  own.step = 0; /* each value gets its own unit and decimals */
  for (size_t at = 0; at < groups; at++) {
    double top = y.to + group * (double)at + 5;
    g2zp_svg_text(page->writer, "end", x.from - 6, top + (group - 10) / 2 + 3, chart->labels[at]);
    for (int i = 0; i < chart->series_count; i++, top += 14) {
      const g2z_series *series = &chart->series[i];
      double end = at < series->count ? g2zp_scale_at(&x, series->y[at]) : NAN, text_at = end;
      if (isnan(end)) continue;
      if (end < x.from) end = x.from;
      g2z_writer_printf(page->writer, "<rect class=bar style=\"--c:var(--s%d)\" height=12 x=\"%s\" "
                        "y=\"%s\" width=\"%s\"/>", i, G2ZP_AT(x.from), G2ZP_AT(top),
                        G2ZP_AT(end - x.from));
      double low = series->low ? g2zp_scale_at(&x, series->low[at]) : NAN;
      double high = series->low ? g2zp_scale_at(&x, series->high[at]) : NAN;
      if (!isnan(low + high)) { /* a whisker with end caps */
        g2zp_svg_line(page->writer, "whisker", low, top + 6, high, top + 6);
        g2zp_svg_line(page->writer, "whisker", low, top + 2.5, low, top + 9.5);
        g2zp_svg_line(page->writer, "whisker", high, top + 2.5, high, top + 9.5);
      }
      if (high > text_at) text_at = high;
      g2zp_tick_text(&own, series->y[at], text);
      g2zp_svg_text(page->writer, "value", text_at + 6, top + 10, text);
    }
  }
}

G2Z_API void g2z_page_chart(g2z_page *page, const g2z_chart *chart) {
  G2Z_ASSERT(chart->series_count > 0 && chart->series_count <= G2Z_CHART_SERIES);
  g2zp_page_open(page, G2ZP_PAGE_CHARTS);
  if (chart->labels) g2zp_chart_bars(page, chart);
  else g2zp_chart_lines(page, chart);
  g2z_writer_printf(page->writer, "</svg></figure>\n");
}

/* ----- TensorBoard's events ----- */

/* A record of tensorflow/core/lib/io/record_writer.h: u64 length, its masked CRC-32C, a protobuf
 * Event, its masked CRC-32C. */
#define G2ZP_EVENT_BYTES 4096

struct g2z_events {
  g2z_services *services;
  g2z_writer *writer;
  unsigned char data[G2ZP_EVENT_BYTES];
  size_t used;
};

static void g2zp_event_bytes(g2z_events *e, const void *bytes, size_t count) {
  G2Z_ASSERT(e->used + count <= sizeof e->data);
  memcpy(e->data + e->used, bytes, count);
  e->used += count;
}

static void g2zp_event_varint(g2z_events *e, uint64_t value) {
  unsigned char bytes[10];
  size_t count = 0;
  for (; value >= 128; value >>= 7) bytes[count++] = (unsigned char)(value | 128);
  bytes[count++] = (unsigned char)value;
  g2zp_event_bytes(e, bytes, count);
}

/* Field number and wire type of protobuf: 0 varint, 1 eight bytes, 2 a length and bytes, 5 four. */
static void g2zp_event_key(g2z_events *e, int field, int type) {
  g2zp_event_varint(e, (uint64_t)(field << 3 | type));
}

static void g2zp_event_text(g2z_events *e, int field, const char *text) {
  g2zp_event_key(e, field, 2);
  g2zp_event_varint(e, strlen(text));
  g2zp_event_bytes(e, text, strlen(text));
}

/* Event.wall_time and Event.step. */
static void g2zp_event_begin(g2z_events *e, int64_t step) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
  e->used = 0;
  g2zp_event_key(e, 1, 1);
  g2zp_event_bytes(e, &seconds, sizeof seconds);
  g2zp_event_key(e, 2, 0);
  g2zp_event_varint(e, (uint64_t)step);
}

static uint32_t g2zp_event_mask(const void *bytes, size_t count) {
  const uint32_t sum = g2z_crc32c(0, bytes, count);
  return (sum >> 15 | sum << 17) + 0xa282ead8u;
}

static g2z_status g2zp_event_end(g2z_events *e) {
  uint64_t length = e->used;
  uint32_t sum = g2zp_event_mask(&length, sizeof length);
  g2z_writer_put(e->writer, &length, sizeof length);
  g2z_writer_put(e->writer, &sum, sizeof sum);
  sum = g2zp_event_mask(e->data, e->used);
  g2z_writer_put(e->writer, e->data, e->used);
  g2z_writer_put(e->writer, &sum, sizeof sum);
  return g2z_writer_flush(e->writer);
}

/* The version that TensorBoard expects, and the first step that this file replaces.
 * The first file needs a START, too: TensorBoard takes the first START for the run's beginning, and
 * drops earlier values only at the following ones. */
static g2z_status g2zp_events_head(g2z_events *e, int64_t first_step) {
  g2zp_event_begin(e, 0);
  g2zp_event_text(e, 3, "brain.Event:2");
  G2ZP_TRY(g2zp_event_end(e));
  g2zp_event_begin(e, first_step);
  g2zp_event_key(e, 7, 2); /* SessionLog { status: START } */
  g2zp_event_varint(e, 2);
  g2zp_event_key(e, 1, 0);
  g2zp_event_varint(e, 1);
  return g2zp_event_end(e);
}

G2Z_API g2z_status g2z_events_create(g2z_services *services, const char *directory,
                                     int64_t first_step, g2z_events **out) {
  void *memory;
  g2z_path path;
  char host[128] = "";
  *out = NULL;
  G2ZP_TRY(g2zp_check_directory(services, directory));
  gethostname(host, sizeof host - 1);
  /* Two starts in one second must not share a file: the second takes the next second's name. */
  long long seconds = (long long)time(NULL);
  for (int there = 1; there; seconds++) {
    path = g2z_path_in(directory, "events.out.tfevents.%010lld.%s", seconds, host);
    G2ZP_TRY(g2z_is_there(services, path.text, &there));
  }
  G2ZP_TRY(g2z_allocate(services, 1, sizeof(g2z_events), &memory));
  g2z_events *e = (g2z_events *)memory;
  e->services = services;
  g2z_status status = g2z_writer_create(services, path.text, &e->writer);
  if (status == G2Z_OK) status = g2zp_events_head(e, first_step);
  if (status == G2Z_OK) status = g2z_writer_commit(e->writer);
  if (status != G2Z_OK) g2z_events_free(e);
  else *out = e;
  return status;
}

/* The size of a field of `bytes` (below 16384) with its key and length. */
static size_t g2zp_event_sized(size_t bytes) { return bytes + (bytes < 128 ? 2 : 3); }
/* The size of a Value: its tag, and a float with its key. */
static size_t g2zp_event_value(const char *tag) { return g2zp_event_sized(strlen(tag)) + 5; }

G2Z_API g2z_status g2z_events_put(g2z_events *e, int64_t step, int count, const char *const *tags,
                                  const double *values) {
  g2zp_event_begin(e, step);
  size_t bytes = 0; /* of the values below: protobuf puts a length before its data */
  for (int i = 0; i < count; i++)
    if (isfinite((float)values[i])) bytes += g2zp_event_sized(g2zp_event_value(tags[i]));
  if (bytes == 0) return G2Z_OK;
  if (bytes > sizeof e->data - 64)
    return g2z_fail(e->services, G2Z_BAD_ARGUMENT, "%zu bytes of tags and values do not fit into "
                    "an event of TensorBoard: give shorter tags", bytes);
  g2zp_event_key(e, 5, 2); /* Summary { repeated Value { tag, simple_value } } */
  g2zp_event_varint(e, bytes);
  for (int i = 0; i < count; i++) {
    float value = (float)values[i];
    if (!isfinite(value)) continue;
    g2zp_event_key(e, 1, 2);
    g2zp_event_varint(e, g2zp_event_value(tags[i]));
    g2zp_event_text(e, 1, tags[i]);
    g2zp_event_key(e, 2, 5);
    g2zp_event_bytes(e, &value, sizeof value);
  }
  return g2zp_event_end(e);
}

G2Z_API void g2z_events_free(g2z_events *e) {
  if (!e) return;
  g2z_writer_free(e->writer);
  g2z_release(e->services, e);
}

/* ----- JSON files that describe a run ----- */

typedef struct g2zp_told {
  g2z_services *services;
  char *path, *text;                 /* text NULL: the file does not exist */
  size_t bytes;
} g2zp_told;

static void g2zp_told_free(g2zp_told *told) {
  g2z_release(told->services, told->path);
  g2z_release(told->services, told->text);
  told->path = told->text = NULL;
}

/* Reads DIRECTORY/name, a valid JSON object. A missing file is no failure: it has no members. */
static g2z_status g2zp_told_read(g2z_services *services, const char *directory,
                                 const char *name, g2zp_told *told) {
  g2z_json json;
  int there;
  memset(told, 0, sizeof *told);
  told->services = services;
  G2ZP_TRY(g2z_join_path(services, directory, name, &told->path));
  G2ZP_TRY(g2z_is_there(services, told->path, &there));
  if (!there) return G2Z_OK;
  G2ZP_TRY(g2z_read_file(services, told->path, (size_t)1 << 26, &told->text, &told->bytes));
  g2z_json_open(&json, services, told->path, told->text, told->bytes);
  if (g2z_json_peek(&json) != '{') return g2z_json_fail(&json, "%s must hold an object", name);
  g2z_json_skip(&json);
  return g2z_json_close(&json);
}

/* 1: *json is at the value that `at` names, such as "summary.best_val_loss", "epochs.0.steps" or
 * "epochs.last", the last element. */
static int g2zp_told_at(const g2zp_told *told, const char *at, g2z_json *json) {
  g2z_json_text key;
  if (!told->text) return 0;
  g2z_json_open(json, told->services, told->path, told->text, told->bytes);
  while (*at) {
    char part[64], open = g2z_json_peek(json);
    size_t length = strcspn(at, ".");
    int found = 0, index = 0;
    snprintf(part, sizeof part, "%.*s", (int)length, at);
    if ((open != '{' && open != '[') || !g2z_json_enter(json, open)) return 0;
    int last = open == '[' && strcmp(part, "last") == 0;
    g2z_json element = *json;
    for (; !found && g2z_json_next(json, open == '{' ? '}' : ']', &key); index++) {
      element = *json;
      found = open == '{' ? g2z_json_is(&key, part) : !last && index == atoi(part);
      if (!found) g2z_json_skip(json);
    }
    if (last && index > 0) *json = element;
    else if (!found) return 0;
    at += length + (at[length] == '.');
  }
  return 1;
}

/* The number at `at`; NaN: there is none. */
static double g2zp_told_number(const g2zp_told *told, const char *at) {
  g2z_json json;
  if (!g2zp_told_at(told, at, &json) || !strchr("-0123456789", g2z_json_peek(&json))) return NAN;
  return g2z_json_number(&json);
}

/* 1: *json is inside the list at `at`, before its first element. */
static int g2zp_told_list(const g2zp_told *told, const char *at, g2z_json *json) {
  return g2zp_told_at(told, at, json) && g2z_json_peek(json) == '[' && g2z_json_enter(json, '[');
}

/* 1: *element is the list's next element, cut out so that reading its members does not scan earlier
 * elements again. `told` owns its text: do not free it. */
static int g2zp_told_next(const g2zp_told *told, g2z_json *json, g2zp_told *element) {
  if (!g2z_json_next(json, ']', NULL)) return 0;
  g2z_json_peek(json); /* to its first byte */
  size_t begin = (size_t)(json->at - json->begin);
  g2z_json_skip(json);
  *element = *told;
  element->text = told->text + begin;
  element->bytes = (size_t)(json->at - json->begin) - begin;
  return 1;
}

/* *out: the text at `at`, freed with g2z_release; NULL: there is none. */
static g2z_status g2zp_told_text(const g2zp_told *told, const char *at, char **out) {
  g2z_json json;
  void *memory;
  *out = NULL;
  if (!g2zp_told_at(told, at, &json) || g2z_json_peek(&json) != '"') return G2Z_OK;
  g2z_json_text text = g2z_json_string(&json);
  G2ZP_TRY(g2z_allocate(told->services, text.bytes + 1, 1, &memory));
  g2z_json_unescape(&text, (unsigned char *)memory);
  *out = (char *)memory;
  return G2Z_OK;
}

/* Reads a run's training_metrics.json, if it exists. */
static g2z_status g2zp_told_run(g2z_services *services, const char *run_dir, g2zp_told *told) {
  char *version = NULL;
  g2z_status status = g2zp_told_read(services, run_dir, "training_metrics.json", told);
  if (status == G2Z_OK) status = g2zp_told_text(told, "schema_version", &version);
  if (status == G2Z_OK && told->text && (!version || strcmp(version, "2.0") != 0))
    status = g2z_fail(services, G2Z_FORMAT,
                      "%.400s is of schema_version %.20s, and 2.0 is what can be read: is it a "
                      "run's?", told->path, version ? version : "none");
  g2z_release(services, version);
  return status;
}

/* ----- metrics.jsonl ----- */

static double g2zp_json_number_or_null(g2z_json *json) {
  if (g2z_json_peek(json) != 'n') return g2z_json_number(json);
  g2z_json_skip(json);
  return NAN;
}

static g2z_status g2zp_metrics_parse(g2z_services *services, const char *text, size_t bytes,
                                     g2z_metrics_line *line) {
  g2z_json json;
  g2z_json_text key;
  memset(line, 0, sizeof *line);
  line->metrics.step = -1;
  line->metrics.step_ms = NAN;
#define X(name) line->name = NAN;
  G2Z_NOTE_LIST(X)
#undef X
  g2z_json_open(&json, services, "metrics.jsonl", text, bytes);
  if (g2z_json_enter(&json, '{'))
    while (g2z_json_next(&json, '}', &key)) {
#define G2ZP_GET_INTEGER g2z_json_integer
#define G2ZP_GET_NUMBER g2zp_json_number_or_null
#define X(type, name, meaning) \
      if (g2z_json_is(&key, #name)) line->metrics.name = G2ZP_GET_##type(&json); else
      G2Z_METRIC_LIST(X)
#undef X
#define X(name) if (g2z_json_is(&key, #name)) line->name = g2zp_json_number_or_null(&json); else
      G2Z_NOTE_LIST(X)
#undef X
      if (g2z_json_is(&key, "eval_file")) {
        g2z_json_text file = g2z_json_string(&json);
        if (file.bytes < sizeof line->eval_file)
          g2z_json_unescape(&file, (unsigned char *)line->eval_file);
      } else g2z_json_skip(&json);
    }
  return g2z_json_close(&json);
}

G2Z_API g2z_status g2z_metrics_read(g2z_services *services, const char *path, const char *text,
                                    size_t bytes, size_t *at, int number, g2z_metrics_line *line,
                                    int *torn) {
  const char *from = text + *at, *end = (const char *)memchr(from, '\n', bytes - *at);
  char sentence[G2Z_ERROR_BYTES], word[300];
  *torn = !end;
  if (!end) return g2z_fail(services, G2Z_FORMAT, "%.600s, line %d is torn", path, number);
  *at = (size_t)(end - text) + 1;
  g2z_status status = g2zp_metrics_parse(services, from, (size_t)(end - from), line);
  if (status == G2Z_OK && line->metrics.step < 0)
    status = g2z_fail(services, G2Z_FORMAT, "it has no step");
  if (status == G2Z_OK) return G2Z_OK;
  memcpy(sentence, services->error, sizeof sentence);
  return g2z_fail(services, status, "%.200s, line %d: %.250s: it is damaged, or no run's; mend it, "
                  "or delete it: sed -i %dd %s", path, number, sentence, number,
                  g2z_shell_word(path, word, sizeof word));
}

/* ----- the report of a run ----- */

enum { /* columns: the metrics of each step, and values computed from them */
#define X(type, name, meaning) G2ZP_COLUMN_##name,
  G2Z_METRIC_LIST(X)
#undef X
  G2ZP_COLUMN_skips,                 /* skipped steps so far */
  G2ZP_COLUMN_time_s,                /* time of all steps so far */
  G2ZP_COLUMN_smooth,                /* exponential mean of the loss; NaN: fewer than 100 steps */
  G2ZP_COLUMN_val_step, G2ZP_COLUMN_val_tokens, G2ZP_COLUMN_val_loss,
  G2ZP_COLUMN_eval_step,             /* then loss and accuracy of each file */
  G2ZP_COLUMN_eval_loss, G2ZP_COLUMN_eval_acc = G2ZP_COLUMN_eval_loss + 3,
  G2ZP_COLUMNS = G2ZP_COLUMN_eval_acc + 3
};

typedef struct g2zp_curves {
  g2z_services *services;
  double *column[G2ZP_COLUMNS];      /* [steps], [validations] or [evaluations]; one allocation */
  char eval_name[6][96];             /* names of the columns from eval_loss on */
  size_t steps, validations, evaluations;
  int64_t skips;
  double time_s;
  double spent_s[6];                 /* in the order of g2zp_spent_names */
} g2zp_curves;

static const char *const g2zp_spent_names[] = {"training", "waiting for tokens", "validation",
                                               "checkpoints", "samples", "evaluation"};

/* Charts in the order of the page. A chart whose values are all equal becomes a fact in the page's
 * head instead. */
static const struct {
  const char *title, *about;
  g2z_axis axis;
  int series[3];                     /* 0 (the step): none */
  const char *names[3];              /* NULL: g2zp_curves.eval_name has them */
} g2zp_report_charts[] = {
    {"Loss", "nats per token", G2Z_AXIS_AUTO,
     {G2ZP_COLUMN_loss, G2ZP_COLUMN_smooth, G2ZP_COLUMN_val_loss},
     {"training", "smoothed", "validation"}},
    {"Loss of --eval", "nats per token", G2Z_AXIS_AUTO,
     {G2ZP_COLUMN_eval_loss, G2ZP_COLUMN_eval_loss + 1, G2ZP_COLUMN_eval_loss + 2}, {NULL}},
    {"Accuracy of --eval", "normalised", G2Z_AXIS_AUTO,
     {G2ZP_COLUMN_eval_acc, G2ZP_COLUMN_eval_acc + 1, G2ZP_COLUMN_eval_acc + 2}, {NULL}},
    {"Learning rate", NULL, G2Z_AXIS_ZERO, {G2ZP_COLUMN_lr}, {"learning rate"}},
    {"Gradient norm", "before clipping", G2Z_AXIS_AUTO, {G2ZP_COLUMN_grad_norm},
     {"gradient norm"}},
    {"Loss scale", NULL, G2Z_AXIS_AUTO, {G2ZP_COLUMN_loss_scale}, {"loss scale"}},
    {"Skipped steps", "so far", G2Z_AXIS_ZERO, {G2ZP_COLUMN_skips}, {"skipped steps"}},
    {"Throughput", "tokens per second, all ranks", G2Z_AXIS_ZERO, {G2ZP_COLUMN_tok_s},
     {"tokens per second"}},
    {"Utilisation", "share of the device's peak", G2Z_AXIS_ZERO, {G2ZP_COLUMN_mfu},
     {"model flops utilisation"}},
    {"Waiting", "ms per step", G2Z_AXIS_ZERO, {G2ZP_COLUMN_exposed_comm_ms, G2ZP_COLUMN_data_ms},
     {"exposed communication, ms", "tokens, ms"}},
    {"Memory", "GiB per device, as planned", G2Z_AXIS_ZERO, {G2ZP_COLUMN_mem_gib},
     {"planned memory per device, GiB"}}};

/* Adds a line of metrics.jsonl to the columns and sums. */
static void g2zp_curves_take(g2zp_curves *c, const g2z_metrics_line *line) {
  const g2z_metrics *m = &line->metrics;
  const double ms[] = {m->step_ms - m->data_ms, m->data_ms, line->val_ms, line->save_ms,
                       line->sample_ms, line->eval_ms};
  int is_step = !isnan(m->step_ms);
  for (int i = is_step ? 0 : 2; i < 6; i++)
    if (isfinite(ms[i])) c->spent_s[i] += ms[i] * 1e-3;
  if (!isnan(line->val_loss)) {
    c->column[G2ZP_COLUMN_val_step][c->validations] = (double)m->step;
    c->column[G2ZP_COLUMN_val_tokens][c->validations] = (double)m->tokens;
    c->column[G2ZP_COLUMN_val_loss][c->validations++] = line->val_loss;
  }
  if (line->eval == 0) {
    c->column[G2ZP_COLUMN_eval_step][c->evaluations++] = (double)m->step;
    for (int i = G2ZP_COLUMN_eval_loss; i < G2ZP_COLUMNS; i++)
      c->column[i][c->evaluations - 1] = NAN;
  }
  if (line->eval >= 0 && line->eval < 3 && c->evaluations) {
    const int file = (int)line->eval;
    c->column[G2ZP_COLUMN_eval_loss + file][c->evaluations - 1] = line->eval_loss;
    c->column[G2ZP_COLUMN_eval_acc + file][c->evaluations - 1] = line->eval_acc_norm;
    snprintf(c->eval_name[file], sizeof c->eval_name[file], "loss, %.80s", line->eval_file);
    snprintf(c->eval_name[3 + file], sizeof c->eval_name[file], "accuracy, %.80s",
             line->eval_file);
  }
  if (!is_step) return;
#define X(type, name, meaning) c->column[G2ZP_COLUMN_##name][c->steps] = (double)m->name;
  G2Z_METRIC_LIST(X)
#undef X
  c->skips += m->skipped != 0;
  c->time_s += m->step_ms * 1e-3;
  c->column[G2ZP_COLUMN_time_s][c->steps] = c->time_s;
  c->column[G2ZP_COLUMN_skips][c->steps++] = (double)c->skips;
}

/* Reads all of metrics.jsonl. */
static g2z_status g2zp_curves_read(g2z_services *services, const char *run_dir,
                                   g2zp_curves *c) {
  const g2z_path path = g2z_path_in(run_dir, "metrics.jsonl");
  char *text;
  size_t bytes = 0, lines = 0;
  void *memory = NULL;
  memset(c, 0, sizeof *c);
  c->services = services;
  g2z_status status = g2z_read_file(services, path.text, (size_t)1 << 40, &text, &bytes);
  for (size_t i = 0; i < bytes; i++) lines += text[i] == '\n';
  if (status == G2Z_OK)
    status = g2z_allocate(services, lines, G2ZP_COLUMNS * sizeof(double), &memory);
  for (size_t i = 0; i < G2ZP_COLUMNS && memory; i++) c->column[i] = (double *)memory + i * lines;
  for (size_t at = 0, number = 1; at < bytes && status == G2Z_OK; number++) {
    g2z_metrics_line line;
    int torn;
    status = g2z_metrics_read(services, path.text, text, bytes, &at, (int)number, &line, &torn);
    if (status == G2Z_OK) g2zp_curves_take(c, &line);
    if (!torn) continue;
    status = G2Z_OK; /* the run is still writing this line */
    break;
  }
  /* An exponential mean over about the last fiftieth of the steps. `weight` makes it begin with the
   * first loss. A skipped step may have no finite loss. */
  const double keep = c->steps < 100 ? NAN : 1 - 50.0 / (double)c->steps;
  double sum = 0, weight = 0;
  for (size_t i = 0; i < c->steps && status == G2Z_OK; i++) {
    const double loss = c->column[G2ZP_COLUMN_loss][i];
    if (isfinite(loss)) {
      sum = keep * sum + (1 - keep) * loss;
      weight = keep * weight + (1 - keep);
    }
    c->column[G2ZP_COLUMN_smooth][i] = sum / weight;
  }
  g2z_release(services, text);
  return status;
}

/* Puts charts of the values that vary; or, with `head`, facts for the values that were the same in
 * all steps. Leaves out a series without any known value. */
static void g2zp_report_curves(g2z_page *page, const g2zp_curves *c, int head) {
  static const int steps[] = {G2ZP_COLUMN_step, G2ZP_COLUMN_val_step, G2ZP_COLUMN_eval_step};
  const size_t counts[] = {c->steps, c->validations, c->evaluations};
  for (size_t n = 0; n < sizeof g2zp_report_charts / sizeof *g2zp_report_charts; n++) {
    g2z_series series[3];
    double constant[3];
    int count = 0, varies = 0;
    memset(series, 0, sizeof series);
    for (int i = 0; i < 3; i++) {
      const int column = g2zp_report_charts[n].series[i];
      const int of = column >= G2ZP_COLUMN_eval_loss ? 2 : column == G2ZP_COLUMN_val_loss;
      if (!column) continue;
      g2z_series *s = &series[count];
      s->name = of == 2 ? c->eval_name[column - G2ZP_COLUMN_eval_loss]
                        : g2zp_report_charts[n].names[i];
      s->x = c->column[steps[of]];
      s->y = c->column[column];
      s->count = counts[of];
      s->mark = s->count <= 64 ? G2Z_MARK_POINTS
                : column == G2ZP_COLUMN_loss && c->steps >= 100 ? G2Z_MARK_FAINT : G2Z_MARK_LINE;
      int same = 1; /* all known values are equal */
      constant[count] = NAN;
      for (size_t k = 0; k < s->count; k++) {
        if (isnan(constant[count])) constant[count] = s->y[k];
        if (!isnan(s->y[k]) && s->y[k] != constant[count]) same = 0;
      }
      if (!same) varies = 1;
      if (!same || !isnan(constant[count])) count++;
    }
    const g2z_chart chart = {g2zp_report_charts[n].title, g2zp_report_charts[n].about, "step", NULL,
                             series, count, G2Z_AXIS_AUTO, g2zp_report_charts[n].axis};
    for (int k = 0; k < count && head && !varies; k++)
      g2zp_page_number(page, series[k].name, constant[k]);
    if (!head && varies) g2z_page_chart(page, &chart);
  }
}

/* Facts for the page's head: from training_metrics.json once the run has ended, before that from
 * launcher_metadata.json. */
typedef struct g2zp_fact {
  const char *name, *metrics, *launcher; /* NULL: not in that file */
} g2zp_fact;
static const g2zp_fact g2zp_report_facts[] = {
    {"model", "training_config.model_name", NULL},
    {"size", "training_config.model_size", NULL},
    {"parameters", "training_config.parameters", NULL},
    {"GPU", "hardware.gpu_name", NULL},
    {"ranks", "hardware.world_size", "world_size"},
    {"host", "host.hostname", NULL},
    {"host of rank 0", NULL, "rank0_host"},
    {"launcher", NULL, "launcher"},
    {"system", "host.os", NULL},
    {"CUDA", "env.cuda_version", NULL},
    {"NCCL", "env.nccl_version", NULL},
    {"precision", "training_config.precision", NULL},
    {"ZeRO stage", "training_config.zero_stage", NULL},
    {"data", "training_config.dataset_name", NULL},
    {"tokens per sequence", "training_config.seq_len", NULL},
    {"sequences per rank and micro-step", "training_config.micro_batch_size_per_gpu", NULL},
    {"micro-steps", "training_config.grad_accum_steps", NULL},
    {"sequences per step", "training_config.global_batch_size", NULL},
    {"peak learning rate", "training_config.lr", NULL},
    {"wall time, s", "summary.total_wall_time_sec", NULL},
    {"mean tokens per second", "summary.mean_tokens_per_sec_global", NULL},
    {"best validation loss", "summary.best_val_loss", NULL},
    {"started", "timestamp_utc", "timestamp_utc"},
    {"commit", "git_commit", "git_commit"},
    {"command", "command_line", "command_line"}};

typedef struct g2zp_run_files {      /* files of a run directory that describe the run */
  g2zp_told metrics, launcher, failure;
} g2zp_run_files;

/* Puts how the run ended into the page's head. */
static g2z_status g2zp_report_result(g2z_page *page, const g2zp_run_files *files,
                                     const g2zp_curves *curves) {
  char *reason = NULL, *detail = NULL, now[32];
  g2z_status status = G2Z_OK;
  g2z_json json;
  g2zp_told epoch;
  double steps = 0, more = 0; /* in training_metrics.json; the run may have continued */
  g2z_utc_now(now);
  if (g2zp_told_list(&files->metrics, "epochs", &json))
    while (more >= 0 && g2zp_told_next(&files->metrics, &json, &epoch)) {
      more = g2zp_told_number(&epoch, "steps");
      if (more >= 0) steps += more;
    }
  if (files->failure.text) status = g2zp_told_text(&files->failure, "sentence", &detail);
  else if ((size_t)steps == curves->steps) {
    status = g2zp_told_text(&files->metrics, "shutdown.reason", &reason);
    if (status == G2Z_OK) status = g2zp_told_text(&files->metrics, "shutdown.signal", &detail);
  }
  if (files->failure.text) g2z_page_fact(page, "result", "failed: %s", detail ? detail : "?");
  else if (reason)
    g2z_page_fact(page, "result", "%s%s%s", reason, detail ? ": " : "", detail ? detail : "");
  else g2z_page_fact(page, "result", "it had not ended at %s", now);
  g2z_release(files->metrics.services, reason);
  g2z_release(files->metrics.services, detail);
  return status;
}

/* Puts the text that the model generated last, if there is one. */
static g2z_status g2zp_report_sample(g2z_page *page, g2z_services *services, const char *run_dir) {
  const g2z_path path = g2z_path_in(run_dir, "sample.txt");
  char *text;
  size_t bytes;
  int there;
  G2ZP_TRY(g2z_is_there(services, path.text, &there));
  if (!there) return G2Z_OK;
  G2ZP_TRY(g2z_read_file(services, path.text, 1 << 26, &text, &bytes));
  g2z_page_heading(page, "Sample");
  g2zp_element(page->writer, "<pre>\n", text, "</pre>\n");
  g2z_release(services, text);
  return G2Z_OK;
}

typedef struct g2zp_column {         /* a table's column, read from JSON */
  const char *header, *at, *format;  /* format: for a number */
  double factor;
} g2zp_column;

#define G2ZP_CELL 160

/* The text or number at column->at; "": neither, or a number of 1e18 or more. */
static void g2zp_told_cell(g2z_page *page, const g2zp_told *told, const g2zp_column *column,
                           char cell[G2ZP_CELL]) {
  char *text = NULL;
  double value = g2zp_told_number(told, column->at) * column->factor;
  cell[0] = 0;
  if (fabs(value) < 1e18) {
    snprintf(cell, G2ZP_CELL, column->format, value);
    g2z_plain_number(cell);
  } else if (g2zp_told_text(told, column->at, &text) != G2Z_OK) page->no_memory = 1;
  if (text) snprintf(cell, G2ZP_CELL, "%s", text);
  g2z_release(told->services, text);
}

/* One row per epoch, from training_metrics.json. */
static void g2zp_report_epochs(g2z_page *page, const g2zp_told *metrics) {
  enum { COLUMNS = 9 };
  static const g2zp_column columns[COLUMNS] = {
      {"epoch", "epoch_idx", "%.0f", 1},
      {"steps", "steps", "%.0f", 1},
      {"tokens", "tokens_processed_global", "%.0f", 1},
      {"tokens/s", "tokens_per_sec_global", "%.0f", 1},
      {"training loss", "train_loss_avg_global", "%.4f", 1},
      {"validation loss", "val_loss_avg_global", "%.4f", 1},
      {"step p50, ms", "step_time_p50_sec", "%.2f", 1e3},
      {"step p95, ms", "step_time_p95_sec", "%.2f", 1e3},
      {"wall time, s", "epoch_wall_time_sec", "%.1f", 1}};
  const char *headers[COLUMNS];
  char cell[G2ZP_CELL];
  g2z_json json;
  g2zp_told epoch;
  for (int i = 0; i < COLUMNS; i++) headers[i] = columns[i].header;
  if (!g2zp_told_list(metrics, "epochs", &json)) return;
  for (int row = 0; g2zp_told_next(metrics, &json, &epoch); row++) {
    if (isnan(g2zp_told_number(&epoch, "steps"))) return;
    if (row == 0) {
      g2z_page_heading(page, "Epochs");
      g2z_page_table(page, COLUMNS, headers);
    }
    for (int i = 0; i < COLUMNS; i++) {
      g2zp_told_cell(page, &epoch, &columns[i], cell);
      g2z_page_cell(page, "%s", cell);
    }
  }
}

static g2z_status g2zp_report_write(g2z_services *services, const char *run_dir,
                                    const g2zp_run_files *files, const g2zp_curves *curves) {
  const char *slash = strrchr(run_dir, '/'), *name = slash && slash[1] ? slash + 1 : run_dir;
  char title[300];
  g2z_page *page;
  snprintf(title, sizeof title, "Run %.280s", name);
  G2ZP_TRY(g2z_page_create(services, g2z_path_in(run_dir, "report.html").text, title, &page));
  g2z_status status = g2zp_report_result(page, files, curves);

  /* The head: facts from the files, the run's progress, values that were the same in all steps. */
  const int ended = files->metrics.text != NULL;
  const g2zp_told *told = ended ? &files->metrics : &files->launcher;
  for (size_t i = 0; i < sizeof g2zp_report_facts / sizeof *g2zp_report_facts; i++) {
    const g2zp_fact *fact = &g2zp_report_facts[i];
    const char *at = ended ? fact->metrics : fact->launcher;
    char *text;
    if (!at || status != G2Z_OK) continue;
    status = g2zp_told_text(told, at, &text);
    double value = g2zp_told_number(told, at);
    if (text) g2z_page_fact(page, fact->name, "%s", text);
    else if (!isnan(value)) g2zp_page_number(page, fact->name, value);
    g2z_release(services, text);
  }
  if (curves->steps)
    g2zp_page_number(page, "loss of the last step",
                     curves->column[G2ZP_COLUMN_loss][curves->steps - 1]);
  if (curves->validations) {
    const double loss = curves->column[G2ZP_COLUMN_val_loss][curves->validations - 1];
    g2zp_page_number(page, "last validation loss", loss);
    g2zp_page_number(page, "perplexity", exp(loss));
  }
  g2zp_report_curves(page, curves, 1);

  g2z_page_heading(page, "Curves");
  g2zp_report_curves(page, curves, 0);
  const g2z_series spent = {"seconds", NULL, curves->spent_s, NULL, NULL,
                            sizeof curves->spent_s / sizeof *curves->spent_s, G2Z_MARK_LINE};
  const g2z_chart chart = {"Where the time went", "s", NULL, g2zp_spent_names, &spent, 1,
                           G2Z_AXIS_AUTO, G2Z_AXIS_AUTO};
  g2z_page_chart(page, &chart);
  g2zp_report_epochs(page, &files->metrics);
  if (status == G2Z_OK) status = g2zp_report_sample(page, services, run_dir);
  if (status == G2Z_OK) status = g2z_page_commit(page);
  g2z_page_free(page);
  return status;
}

G2Z_API g2z_status g2z_report_run(g2z_services *services, const char *run_dir) {
  g2zp_run_files files;
  g2zp_curves curves;
  memset(&files, 0, sizeof files);
  G2ZP_TRY(g2zp_check_directory(services, run_dir));
  g2z_status status = g2zp_curves_read(services, run_dir, &curves);
  if (status == G2Z_OK)
    status = g2zp_told_run(services, run_dir, &files.metrics);
  if (status == G2Z_OK)
    status = g2zp_told_read(services, run_dir, "launcher_metadata.json", &files.launcher);
  if (status == G2Z_OK)
    status = g2zp_told_read(services, run_dir, "RUN_FAILED.json", &files.failure);
  if (status == G2Z_OK) status = g2zp_report_write(services, run_dir, &files, &curves);
  g2z_release(services, curves.column[0]);
  g2zp_told_free(&files.metrics);
  g2zp_told_free(&files.launcher);
  g2zp_told_free(&files.failure);
  return status;
}

/* ----- profiles ----- */

#define G2ZP_PROFILE_TOP 5

typedef struct g2zp_ranked {         /* a row of a table; `line` points into the file's text */
  double percent;
  char total[48];                    /* "1234567 ns" */
  char *line;
  size_t name_at;                    /* where the name begins in the line */
} g2zp_ranked;

typedef struct g2zp_profile {
  g2z_services *services;
  g2zp_ranked top[2][G2ZP_PROFILE_TOP]; /* NVTX ranges, calls of the operating system */
  int count[2];
  const char *path;                  /* of the file being read */
  int number, kind;                  /* of its line; kind of table, -1: one that is ignored */
  int sections;                      /* tables that are not ignored */
  char unit[8];                      /* of the total time; "": the header is still to come */
  size_t column[3];                  /* starts of share, total and name; column[2] 0: not known */
} g2zp_profile;

static const char *const g2zp_profile_titles[] = {"NVTX Range Summary (", "OS Runtime Summary ("};
static const char *const g2zp_profile_kinds[] = {"nvtx", "osrt"};

static g2z_status g2zp_stats_fail(const g2zp_profile *p, const char *why) {
  return g2z_fail(p->services, G2Z_FORMAT,
                  "%.400s, line %d: %s: it is damaged, or not what `nsys stats` printed", p->path,
                  p->number, why);
}

/* Reads the first number in [from, to) of a line, without the commas between its digits. */
static int g2zp_stats_number(const g2zp_profile *p, const char *line, size_t from, size_t to,
                             char text[40], double *value) {
  g2z_json json;
  size_t used = 0;
  while (from < to && line[from] == ' ') from++;
  for (; from < to && line[from] != ' ' && used < 39; from++)
    if (line[from] != ',') text[used++] = line[from];
  text[used] = 0;
  g2z_json_open(&json, p->services, p->path, text, used);
  *value = g2z_json_number(&json);
  return g2z_json_close(&json) == G2Z_OK && *value >= 0;
}

/* Reads a line of `nsys stats` output. A table has a title, a header with "Total Time (ns)", dashes
 * that show where columns begin, and rows such as
 * " 53.9  2,765,967  14,244 ...  PushPop  :train/forward", whose last column is the name. */
static g2z_status g2zp_stats_line(g2zp_profile *p, char *line) {
  static const char total[] = "Total Time (";
  const size_t bytes = strlen(line);
  if (strstr(line, "** ") || strstr(line, "Processing [")) {
    if (p->kind >= 0 && !p->column[2]) return g2zp_stats_fail(p, "the table before has no head");
    p->kind = -1;
    for (int i = 0; i < 2; i++)
      if (strstr(line, g2zp_profile_titles[i])) p->kind = i;
    p->sections += p->kind >= 0;
    p->column[2] = 0;
    p->unit[0] = 0;
    return G2Z_OK;
  }
  const int blank = line[strspn(line, " ")] == 0;
  if (blank && p->column[2]) p->kind = -1; /* after the last row */
  if (blank || p->kind < 0) return G2Z_OK;
  if (!p->unit[0]) {
    const char *unit = strstr(line, total);
    if (unit) unit += sizeof total - 1;
    const size_t length = unit ? strspn(unit, "abcdefghijklmnopqrstuvwxyz") : 0;
    if (!length || length >= sizeof p->unit || unit[length] != ')')
      return g2zp_stats_fail(p, "a table without a \"Total Time (ns)\"");
    memcpy(p->unit, unit, length);
    p->unit[length] = 0;
    return G2Z_OK;
  }
  if (!p->column[2]) {
    int columns = 0;
    for (size_t i = 0; i < bytes; i++)
      if (line[i] == '-' && (i == 0 || line[i - 1] != '-'))
        p->column[columns < 2 ? columns++ : 2] = i;
    return p->column[2] ? G2Z_OK : g2zp_stats_fail(p, "a table of fewer than three columns");
  }
  char text[40];
  double value;
  g2zp_ranked row;
  if (bytes <= p->column[2] ||
      !g2zp_stats_number(p, line, 0, p->column[1], text, &row.percent) || row.percent > 100 ||
      !g2zp_stats_number(p, line, p->column[1], p->column[2], text, &value))
    return g2zp_stats_fail(p, "no row of a share, a time and a name");
  if (!line[p->column[2] + strspn(line + p->column[2], " ")])
    return g2zp_stats_fail(p, "a row without a name");
  snprintf(row.total, sizeof row.total, "%s %s", text, p->unit);
  row.line = line;
  row.name_at = p->column[2];
  g2zp_ranked *top = p->top[p->kind];
  int at = p->count[p->kind], *count = &p->count[p->kind];
  while (at > 0 && top[at - 1].percent < row.percent) at--; /* after rows with the same share */
  if (at == G2ZP_PROFILE_TOP) return G2Z_OK;
  if (*count < G2ZP_PROFILE_TOP) ++*count;
  memmove(&top[at + 1], &top[at], (size_t)(*count - 1 - at) * sizeof row);
  top[at] = row;
  return G2Z_OK;
}

/* Reads a file that `nsys stats` printed. Splits `text` in place; it must outlive the profile. */
static g2z_status g2zp_stats_read(g2zp_profile *p, const char *path, char *text) {
  p->path = path;
  p->kind = -1;
  p->number = p->sections = 0;
  p->column[2] = 0;
  for (char *next; text; text = next) {
    next = strchr(text, '\n');
    if (next) *next++ = 0;
    text[strcspn(text, "\r")] = 0;
    if (!next && !*text) break; /* after the last line feed */
    p->number++;
    G2ZP_TRY(g2zp_stats_line(p, text));
  }
  if (p->kind >= 0 && !p->column[2]) return g2zp_stats_fail(p, "the last table has no rows");
  if (p->sections) return G2Z_OK;
  return g2zp_stats_fail(p, "neither an NVTX Range Summary nor an OS Runtime Summary");
}

/* Facts about the run: from training_metrics.json, else from launcher_metadata.json. */
static const g2zp_fact g2zp_profile_facts[] = {
    {"slurm_job_id", "scheduler.job_id", "slurm.SLURM_JOB_ID"},
    {"hosts", NULL, NULL}, /* from the names of the inputs */
    {"world_size", "hardware.world_size", "world_size"},
    {"gpu", "hardware.gpu_name", NULL},
    {"cuda", "env.cuda_version", NULL},
    {"seq_length", "training_config.seq_len", NULL},
    {"micro_batch_size_per_gpu", "training_config.micro_batch_size_per_gpu", NULL},
    {"grad_accum_steps", "training_config.grad_accum_steps", NULL},
    {"tokens_per_sec", "summary.mean_tokens_per_sec_global", NULL},
    {"total_wall_time_sec", "summary.total_wall_time_sec", NULL}};

typedef struct g2zp_names {          /* files in profiles/ */
  struct dirent **entries;
  int count;
} g2zp_names;

static int g2zp_name_order(const struct dirent **a, const struct dirent **b) {
  return strcmp((*a)->d_name, (*b)->d_name);
}

static int g2zp_named(const char *name, const char *begin, const char *end) {
  size_t length = strlen(name), first = strlen(begin), last = strlen(end);
  return length >= first + last && strncmp(name, begin, first) == 0 &&
         strcmp(name + length - last, end) == 0;
}

/* Puts the list of file names that begin with `begin` and end with `end`; with `hosts`, only the
 * parts between. Returns their number. With out NULL it only counts. */
static int g2zp_put_names(const g2zp_names *names, g2z_json_out *out, const char *key,
                          const char *begin, const char *end, int hosts) {
  char text[300];
  int count = 0;
  if (out) g2z_json_begin(out, key, '[');
  for (int i = 0; i < names->count; i++) {
    const char *name = names->entries[i]->d_name + (hosts ? strlen(begin) : 0);
    if (!g2zp_named(names->entries[i]->d_name, begin, end)) continue;
    snprintf(text, sizeof text, "%.*s", (int)(strlen(name) - (hosts ? strlen(end) : 0)), name);
    if (out) g2z_json_put_string(out, NULL, text);
    count++;
  }
  if (out) g2z_json_end(out, ']');
  return count;
}

static g2z_status g2zp_profile_put(g2zp_profile *p, g2z_json_out *out, const char *run_dir,
                                   const g2zp_names *names, const char *inputs, int reports,
                                   const g2zp_told told[2]) {
  char now[32], *text, *absolute = realpath(run_dir, NULL);
  g2z_utc_now(now);
  g2z_json_begin(out, NULL, '{');
  g2z_json_put_string(out, "generated_at_utc", now);
  g2z_json_put_string(out, "run_dir", absolute ? absolute : run_dir);
  free(absolute);
  for (size_t i = 0; i < sizeof g2zp_profile_facts / sizeof *g2zp_profile_facts; i++) {
    const g2zp_fact *fact = &g2zp_profile_facts[i];
    g2z_json json;
    if (!fact->metrics) {
      g2zp_put_names(names, out, fact->name, inputs, ".txt", 1);
      continue;
    }
    const int launcher = fact->launcher && !g2zp_told_at(&told[0], fact->metrics, &json);
    const char *at = launcher ? fact->launcher : fact->metrics;
    G2ZP_TRY(g2zp_told_text(&told[launcher], at, &text));
    if (text) g2z_json_put_string(out, fact->name, text);
    else g2z_json_put_number(out, fact->name, g2zp_told_number(&told[launcher], at));
    g2z_release(p->services, text);
  }
  if (reports > 1) g2zp_put_names(names, out, "nsys_report", "nsys_", ".nsys-rep", 0);
  for (int i = 0; i < names->count && reports == 1; i++)
    if (g2zp_named(names->entries[i]->d_name, "nsys_", ".nsys-rep"))
      g2z_json_put_string(out, "nsys_report", names->entries[i]->d_name);
  if (!reports) g2z_json_put_string(out, "nsys_report", NULL);
  g2zp_put_names(names, out, "inputs", inputs, ".txt", 0);
  for (int kind = 0; kind < 2; kind++) {
    char key[16];
    snprintf(key, sizeof key, "%s_top5", g2zp_profile_kinds[kind]);
    g2z_json_begin(out, key, '[');
    for (int i = 0; i < p->count[kind]; i++) {
      const g2zp_ranked *row = &p->top[kind][i];
      char *end = row->line + strlen(row->line), kept;
      while (end[-1] == ' ') end--;
      kept = *end;
      g2z_json_begin(out, NULL, '{');
      g2z_json_put_string(out, "kind", g2zp_profile_kinds[kind]);
      *end = 0; /* cuts trailing spaces for a moment */
      g2z_json_put_string(out, "name", row->line + row->name_at);
      *end = kept;
      g2z_json_put_number(out, "time_percent", row->percent);
      g2z_json_put_string(out, "total_time", row->total);
      g2z_json_put_string(out, "raw", row->line);
      g2z_json_end(out, '}');
    }
    g2z_json_end(out, ']');
  }
  g2z_json_end(out, '}');
  g2z_writer_put(out->writer, "\n", 1);
  return g2z_writer_commit(out->writer);
}

/* only: the one file to read; NULL: all nsys_stats_*.txt, or if there are none, timers_*.txt. */
static g2z_status g2zp_profile_summarize(g2z_services *services, const char *run_dir,
                                         const char *only) {
  const g2z_path directory = g2z_path_in(run_dir, "profiles");
  const char *inputs = "nsys_stats_";
  struct dirent **entries = NULL;
  g2zp_names names = {NULL, 0};
  g2zp_told told[2];
  g2zp_profile p;
  g2z_json_out out;
  char **texts = NULL;
  void *memory = NULL;
  memset(&out, 0, sizeof out);
  memset(&p, 0, sizeof p);
  memset(told, 0, sizeof told);
  out.indent = 2;
  p.services = told[0].services = told[1].services = services;
  G2ZP_TRY(g2zp_check_directory(services, run_dir));
  const int found = scandir(directory.text, &entries, NULL, g2zp_name_order);
  names.entries = entries;
  names.count = found > 0 ? found : 0; /* a missing directory has none */
  for (int i = 0; i < found && only; i++)
    if (strcmp(entries[i]->d_name, only) == 0) names.entries = entries + i;
  if (only && names.count) names.count = 1;
  if (!g2zp_put_names(&names, NULL, NULL, inputs, ".txt", 0)) inputs = "timers_";
  g2z_status status = g2z_allocate(services, (size_t)names.count, sizeof *texts, &memory);
  texts = (char **)memory;
  if (status == G2Z_OK && !g2zp_put_names(&names, NULL, NULL, inputs, ".txt", 0))
    status = g2z_fail(services, G2Z_IO, "%s has no nsys_stats_*.txt and no timers_*.txt: profile "
                      "with slurm/profile.sh or with train --profile first", directory.text);
  for (int i = 0; i < names.count && status == G2Z_OK; i++) {
    const g2z_path path = g2z_path_in(directory.text, "%s", names.entries[i]->d_name);
    size_t bytes;
    if (!g2zp_named(names.entries[i]->d_name, inputs, ".txt")) continue;
    status = g2z_read_file(services, path.text, (size_t)1 << 28, &texts[i], &bytes);
    if (status == G2Z_OK) status = g2zp_stats_read(&p, path.text, texts[i]);
  }
  if (status == G2Z_OK)
    status = g2zp_told_read(services, run_dir, "training_metrics.json", &told[0]);
  if (status == G2Z_OK)
    status = g2zp_told_read(services, run_dir, "launcher_metadata.json", &told[1]);
  if (status == G2Z_OK)
    status = g2z_writer_create(services, g2z_path_in(directory.text, "profile_summary.json").text,
                               &out.writer);
  const int reports = only ? 0 : g2zp_put_names(&names, NULL, NULL, "nsys_", ".nsys-rep", 0);
  if (status == G2Z_OK)
    status = g2zp_profile_put(&p, &out, run_dir, &names, inputs, reports, told);
  g2z_writer_free(out.writer);
  for (int i = 0; i < names.count && texts; i++) g2z_release(services, texts[i]);
  for (int i = 0; i < found; i++) free(entries[i]); /* from scandir's malloc */
  free(entries);
  g2z_release(services, texts);
  g2zp_told_free(&told[0]);
  g2zp_told_free(&told[1]);
  return status;
}

/* Writes the format of `nsys stats`: g2zp_stats_read reads both. */
G2Z_API g2z_status g2z_profile_write_spans(g2z_services *services, const char *run_dir,
                                           const g2z_span_times times[G2Z_SPAN_COUNT]) {
  const g2z_path directory = g2z_path_in(run_dir, "profiles");
  char host[128] = "", name[160], percent[32];
  g2z_writer *writer;
  g2z_span_times left[G2Z_SPAN_COUNT];
  double total_s = 0;
  gethostname(host, sizeof host - 1);
  snprintf(name, sizeof name, "timers_%s.txt", host);
  G2ZP_TRY(g2z_make_directory(services, directory.text));
  G2ZP_TRY(g2z_writer_create(services, g2z_path_in(directory.text, "%s", name).text, &writer));
  g2z_writer_printf(writer, " ** NVTX Range Summary (train --profile):\n\n"
                            " Time (%%)   Total Time (ns)  Instances         Avg (ns)         "
                            "Min (ns)         Max (ns)  Range\n"
                            " --------  ----------------  ---------  ---------------  "
                            "---------------  ---------------  -------------------\n");
  for (int i = 0; i < G2Z_SPAN_COUNT; i++) total_s += times[i].total_s;
  memcpy(left, times, sizeof left);
  for (;;) { /* longest first */
    int most = -1;
    for (int i = 0; i < G2Z_SPAN_COUNT; i++)
      if (left[i].count && (most < 0 || left[i].total_s > left[most].total_s)) most = i;
    if (most < 0) break;
    const g2z_span_times *s = &times[most];
    left[most].count = 0;
    snprintf(percent, sizeof percent, "%.1f", total_s > 0 ? 100 * s->total_s / total_s : 0);
    g2z_plain_number(percent);
    g2z_writer_printf(writer, " %8s  %16.0f  %9" PRId64 "  %15.0f  %15.0f  %15.0f  :%s\n", percent,
                      s->total_s * 1e9, s->count, s->total_s * 1e9 / (double)s->count,
                      s->min_s * 1e9, s->max_s * 1e9, g2z_span_text((g2z_span)most));
  }
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status == G2Z_OK ? g2zp_profile_summarize(services, run_dir, name) : status;
}

G2Z_API g2z_status g2z_profile_run(g2z_services *services, const char *run_dir) {
  return g2zp_profile_summarize(services, run_dir, NULL);
}

/* ===== statistics, and runs found in directories ========================= */

static int g2zp_double_order(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return left < right ? -1 : left > right;
}

G2Z_API double g2z_median(double *values, size_t count) {
  if (count == 0) return NAN; /* qsort must not get NULL */
  for (size_t i = 0; i < count; i++)
    if (isnan(values[i])) return NAN;
  qsort(values, count, sizeof *values, g2zp_double_order);
  return 0.5 * (values[(count - 1) / 2] + values[count / 2]);
}

G2Z_API double g2z_percentile(double *values, size_t count, int percent) {
  if (count == 0) return NAN;
  qsort(values, count, sizeof *values, g2zp_double_order);
  return values[(count * (size_t)percent + 99) / 100 - 1];
}

G2Z_API double g2z_deviation(const double *values, size_t count) {
  double mean = 0, squares = 0;
  for (size_t i = 0; i < count; i++) mean += values[i] / (double)count;
  for (size_t i = 0; i < count; i++) squares += (values[i] - mean) * (values[i] - mean);
  return count > 1 ? sqrt(squares / (double)(count - 1)) : NAN;
}

G2Z_API g2z_status g2z_results_create(g2z_services *services, g2z_results **out) {
  void *memory;
  *out = NULL;
  G2ZP_TRY(g2z_allocate(services, 1, sizeof(g2z_results), &memory));
  *out = (g2z_results *)memory;
  (*out)->services = services;
  return G2Z_OK;
}

G2Z_API void g2z_results_free(g2z_results *results) {
  if (!results) return;
  for (size_t i = 0; i < results->run_count; i++) g2zp_told_free(&results->runs[i]);
  g2z_release(results->services, results->runs);
  g2z_release(results->services, results);
}

static g2z_status g2zp_results_add_run(g2z_results *results, const char *run_dir) {
  void *list = results->runs;
  g2z_status status = g2z_grow(results->services, &list, &results->run_capacity,
                               results->run_count, results->run_count + 1, sizeof *results->runs);
  results->runs = (g2zp_told *)list;
  G2ZP_TRY(status);
  g2zp_told *run = &results->runs[results->run_count];
  status = g2zp_told_run(results->services, run_dir, run);
  results->run_count++; /* after a failure, too: freed with the others */
  if (status != G2Z_OK || (g2zp_told_number(run, "hardware.world_size") >= 1 &&
                           !isnan(g2zp_told_number(run, "summary.total_wall_time_sec"))))
    return status;
  return g2z_fail(results->services, G2Z_FORMAT,
                  "%.400s lacks hardware.world_size or summary.total_wall_time_sec: it is no whole "
                  "artifact of a run", run->path);
}

/* Of two runs the shorter name first: run_x_9 before run_x_10. Other names in strcmp's order. */
static int g2zp_results_order(const struct dirent **a, const struct dirent **b) {
  const char *left = (*a)->d_name, *right = (*b)->d_name;
  size_t i = strlen(left), k = strlen(right);
  if (strncmp(left, "run_", 4) == 0 && strncmp(right, "run_", 4) == 0 && i != k)
    return i < k ? -1 : 1;
  return strcmp(left, right);
}

static int g2zp_results_shown(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static g2z_status g2zp_results_scan(g2z_results *results, const char *directory, int levels);

static g2z_status g2zp_results_entry(g2z_results *results, const char *directory,
                                     const char *name, int levels) {
  const g2z_path path = g2z_path_in(directory, "%s", name);
  const char *suffix = strstr(name, "_report.json");
  struct stat info;
  if (strcmp(name, "training_metrics.json") == 0) return g2zp_results_add_run(results, directory);
  if (suffix && strcmp(suffix, "_report.json") == 0 && results->take) {
    results->taken++;
    return results->take(results->user, path.text);
  }
  if (levels == 0 || stat(path.text, &info) != 0 || !S_ISDIR(info.st_mode)) return G2Z_OK;
  return g2zp_results_scan(results, path.text, levels - 1);
}

static g2z_status g2zp_results_scan(g2z_results *results, const char *directory, int levels) {
  struct dirent **entries;
  g2z_status status = G2Z_OK;
  int count = scandir(directory, &entries, g2zp_results_shown, g2zp_results_order);
  if (count < 0) return g2z_fail_file(results->services, errno, "read the directory", directory);
  for (int i = 0; i < count; i++) {
    if (status == G2Z_OK)
      status = g2zp_results_entry(results, directory, entries[i]->d_name, levels);
    free(entries[i]); /* from scandir's malloc */
  }
  free(entries);
  return status;
}

G2Z_API g2z_status g2z_results_add(g2z_results *results, const char *directory) {
  const size_t before = results->taken + results->run_count;
  G2ZP_TRY(g2zp_results_scan(results, directory, 2));
  if (results->taken + results->run_count > before) return G2Z_OK;
  return g2z_fail(results->services, G2Z_FORMAT,
                  "%.600s holds no NAME_report.json and no training_metrics.json, nor do the "
                  "directories in it", directory);
}

static void g2zp_results_runs(const g2z_results *results, g2z_page *page) {
  static const g2zp_column columns[] = {
      {"best validation loss", "summary.best_val_loss", "%.4f", 1},
      {"tokens/s", "summary.mean_tokens_per_sec_global", "%.0f", 1},
      {"wall s", "summary.total_wall_time_sec", "%.2f", 1},
      {"model", "training_config.model_size", NULL, 1},
      {"peak lr", "training_config.lr", "%g", 1},
      {"ranks", "hardware.world_size", "%.0f", 1},
      {"strategy", "training_config.strategy", NULL, 1},
      {"stage", "training_config.zero_stage", "%.0f", 1},
      {"precision", "training_config.precision", NULL, 1},
      {"batch", "training_config.micro_batch_size_per_gpu", "%.0f", 1},
      {"micro-steps", "training_config.grad_accum_steps", "%.0f", 1},
      {"tokens per sequence", "training_config.seq_len", "%.0f", 1},
      {"p50 ms", "epochs.last.step_time_p50_sec", "%.2f", 1e3},
      {"p95 ms", "epochs.last.step_time_p95_sec", "%.2f", 1e3}};
  enum { COLUMNS = sizeof columns / sizeof *columns };
  const char *headers[1 + COLUMNS] = {"run"};
  char cell[G2ZP_CELL], first[G2ZP_CELL];
  int shown[COLUMNS], count = 0;
  g2z_page_heading(page, "Runs");
  g2z_page_text(page, "From each training_metrics.json. Tokens/s counts the first steps too, which "
                      "experiments leave out. Step times are of the last epoch.");
  for (int c = 0; c < COLUMNS; c++) { /* a value that all runs share goes above the table */
    int differs = results->run_count == 1;
    g2zp_told_cell(page, &results->runs[0], &columns[c], first);
    for (size_t i = 1; i < results->run_count && !differs; i++) {
      g2zp_told_cell(page, &results->runs[i], &columns[c], cell);
      differs = strcmp(cell, first) != 0;
    }
    if (differs) {
      shown[count++] = c;
      headers[count] = columns[c].header;
    } else if (first[0]) g2z_page_fact(page, columns[c].header, "%s", first);
  }
  g2z_page_table(page, 1 + count, headers);
  for (size_t i = 0; i < results->run_count; i++) {
    const g2zp_told *run = &results->runs[i];
    g2z_page_cell(page, "%.*s", (int)(strrchr(run->path, '/') - run->path), run->path);
    for (int c = 0; c < count; c++) {
      g2zp_told_cell(page, run, &columns[shown[c]], cell);
      g2z_page_cell(page, "%s", cell);
    }
  }
}

/* Draws the losses of the first runs in one chart; a run without metrics.jsonl has no curve. */
static g2z_status g2zp_results_curves(const g2z_results *results, g2z_page *page) {
  static const struct {
    const char *title, *about, *name;
    int column;
  } axes[] = {{"Loss over steps", "nats per token, smoothed", "step", G2ZP_COLUMN_step},
              {"Loss over tokens", "nats per token, smoothed", "tokens", G2ZP_COLUMN_tokens},
              {"Loss over time", "nats per token, smoothed", "seconds of training",
               G2ZP_COLUMN_time_s},
              {"Validation loss", "nats per token", "tokens", G2ZP_COLUMN_val_tokens}};
  g2zp_curves curves[G2Z_CHART_SERIES];
  g2z_series series[G2Z_CHART_SERIES];
  char names[G2Z_CHART_SERIES][64];
  int count = 0;
  memset(series, 0, sizeof series);
  g2z_status status = G2Z_OK;
  for (size_t i = 0; i < results->run_count && count < G2Z_CHART_SERIES && status == G2Z_OK; i++) {
    const char *path = results->runs[i].path;
    char directory[PATH_MAX];
    snprintf(directory, sizeof directory, "%.*s", (int)(strrchr(path, '/') - path), path);
    const size_t length = strlen(directory);
    snprintf(names[count], sizeof *names, "%s", directory + (length > 60 ? length - 60 : 0));
    series[count].name = names[count];
    status = g2zp_curves_read(results->services, directory, &curves[count]);
    if (status == G2Z_IO) status = G2Z_OK; /* no metrics.jsonl: the run still has its row */
    else count++;
  }
  if (count && status == G2Z_OK) g2z_page_heading(page, "Curves");
  for (size_t a = 0; a < sizeof axes / sizeof *axes && count && status == G2Z_OK; a++) {
    const int validation = axes[a].column == G2ZP_COLUMN_val_tokens;
    const g2z_chart chart = {axes[a].title, axes[a].about, axes[a].name, NULL, series, count,
                             G2Z_AXIS_AUTO, G2Z_AXIS_AUTO};
    size_t points = 0;
    for (int i = 0; i < count; i++) {
      const g2zp_curves *c = &curves[i];
      series[i].x = c->column[axes[a].column];
      series[i].y = c->column[validation ? G2ZP_COLUMN_val_loss
                              : c->steps < 100 ? G2ZP_COLUMN_loss : G2ZP_COLUMN_smooth];
      series[i].count = validation ? c->validations : c->steps;
      series[i].mark = validation ? G2Z_MARK_POINTS : G2Z_MARK_LINE;
      points += series[i].count;
    }
    if (points) g2z_page_chart(page, &chart);
  }
  for (int i = 0; i < count; i++) g2z_release(results->services, curves[i].column[0]);
  return status;
}

G2Z_API g2z_status g2z_results_page(const g2z_results *results, const char *path) {
  char now[32];
  g2z_page *page;
  const char *title = !results->run_count ? "Experiments"
                      : results->taken ? "Experiments and runs"
                      : results->run_count == 1 ? "A run" : "Runs compared";
  G2ZP_TRY(g2z_page_create(results->services, path, title, &page));
  g2z_utc_now(now);
  if (results->taken) g2z_page_fact(page, "experiments", "%zu", results->taken);
  if (results->run_count) g2z_page_fact(page, "runs", "%zu", results->run_count);
  g2z_page_fact(page, "made", "%s", now);
  if (results->show) results->show(results->user, page);
  if (results->run_count) g2zp_results_runs(results, page);
  g2z_status status = g2zp_results_curves(results, page);
  if (status == G2Z_OK) status = g2z_page_commit(page);
  g2z_page_free(page);
  return status;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_REPORT_IMPLEMENTED */
