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
 * Names that begin with g2zp_ or G2ZP_ are private.
 *
 * CONTENTS: report (pages, charts, TensorBoard, JSON, runs, profiles); statistics and comparisons
 *
 * In a run directory it reads metrics.jsonl, training_metrics.json, launcher_metadata.json,
 * RUN_FAILED.json, train.log, sample.txt, and in profiles/ nsys_stats_*.txt and timers_*.txt. It
 * writes report.html, events.out.tfevents.*, and in profiles/ timers_*.txt and
 * profile_summary.json. */

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
 *   g2z_page_lead(page, "%s is better", "muon");                      the answer, in larger type
 *   g2z_page_figure(page, "loss", "perplexity 39.3", "%.4f", 3.6718); large figures in a row
 *   g2z_page_fact(page, "machine", "%d x %s", 8, "NVIDIA H200");      facts form a grid
 *   g2z_page_heading(page, "Throughput");
 *   g2z_page_table(page, 2, headers);                                 cells follow
 *   g2z_page_cell(page, "%d", 1);  g2z_page_cell(page, "%.0f", 231000.0);
 *   g2z_page_chart(page, &chart);                                     charts form a grid
 *   status = g2z_page_commit(page);                                   first failure of all calls
 *   g2z_page_free(page); */

#define G2Z_CHART_SERIES 9           /* most series of a chart: each has its own colour */
#define G2Z_CHART_POINTS 1000        /* longer series are reduced to this number */

typedef enum g2z_mark {
  G2Z_MARK_LINE,
  G2Z_MARK_POINTS,                   /* a line; up to 64 values also get a point each */
  G2Z_MARK_DASHED,                   /* an ideal to compare the other series with */
  G2Z_MARK_FAINT,                    /* the raw values of a smoothed line */
  G2Z_MARK_CROSS                     /* a cross at the upper edge per x: the value is not finite */
} g2z_mark;

typedef enum g2z_axis {
  G2Z_AXIS_AUTO,                     /* LOG if all values are positive and span a factor of 1,000 */
  G2Z_AXIS_LINEAR,
  G2Z_AXIS_ZERO,                     /* linear, with 0 on the axis */
  G2Z_AXIS_LOG                       /* a value that is not positive is a gap */
} g2z_axis;

typedef struct g2z_series {
  const char *name;                  /* shown in the legend if there are two series or more. NULL:
                                      * an empty place; colours go by place */
  const double *x, *y;               /* [count]; NaN: a gap. x ascends. Bar charts do not read x */
  const double *low, *high;          /* [count]: ends of each bar's whisker; or both NULL */
  size_t count;
  g2z_mark mark;
} g2z_series;

typedef struct g2z_chart {           /* set all members to zero first */
  const char *title, *about;         /* about: unit and meaning, in a few words; NULL: none */
  const char *x_name;                /* name under the x axis; NULL: none, as in bar charts */
  const char *const *labels;         /* not NULL: a bar chart, one group of bars per label */
  const g2z_series *series;
  int series_count;                  /* 1 .. G2Z_CHART_SERIES */
  g2z_axis x_axis, y_axis;
} g2z_chart;

#define G2Z_PAGE_BEGIN "<!DOCTYPE html>\n<html lang=en>\n<meta name=generator content=gpt2_zero>\n"
typedef struct g2z_page g2z_page;
/* Begins a page. The file appears at `path` only in g2z_page_commit. That call also returns the
 * first failure of the calls before it. */
G2Z_API g2z_status g2z_page_create(g2z_services *services, const char *path, const char *title,
                                   g2z_page **out);
G2Z_API void g2z_page_heading(g2z_page *page, const char *text);
/* Begins a part that stays folded until a reader opens it. The next heading or fold ends it. */
G2Z_API void g2z_page_fold(g2z_page *page, const char *text);
G2Z_API void g2z_page_lead(g2z_page *page, const char *format, ...) G2Z_PRINTF(2, 3);
G2Z_API void g2z_page_text(g2z_page *page, const char *format, ...) G2Z_PRINTF(2, 3);
G2Z_API void g2z_page_fact(g2z_page *page, const char *name, const char *format, ...)
    G2Z_PRINTF(3, 4);
/* `note` stands below the figure in small type; "": nothing does. */
G2Z_API void g2z_page_figure(g2z_page *page, const char *name, const char *note,
                             const char *format, ...) G2Z_PRINTF(4, 5);
/* Begins a table. g2z_page_cell then adds cells row by row, `columns` per row. The first column is
 * text, the others are numbers; an empty cell is an unknown number. */
G2Z_API void g2z_page_table(g2z_page *page, int columns, const char *const *headers);
G2Z_API void g2z_page_cell(g2z_page *page, const char *format, ...) G2Z_PRINTF(2, 3);
G2Z_API void g2z_page_chart(g2z_page *page, const g2z_chart *chart);
G2Z_API g2z_status g2z_page_commit(g2z_page *page);
G2Z_API void g2z_page_free(g2z_page *page); /* NULL is fine. Without a commit no file is left */
/* Writes one chart as an SVG file, for light or dark pages. */
G2Z_API g2z_status g2z_chart_write(g2z_services *services, const char *path, int dark,
                                   const g2z_chart *chart);

/* One line of metrics.jsonl, written when the step's loss is known. A number that is not finite is
 * null in the file. An OPTIONAL number may be unknown: then it is NaN here. */
#define G2Z_METRIC_LIST(X)                                                                         \
  /*  type      name             meaning */                                                        \
  X(INTEGER,  step,            "from 1")                                                           \
  X(INTEGER,  tokens,          "trained on so far, over all ranks")                                \
  X(NUMBER,   loss,            "mean over the global batch, in nats per token")                    \
  X(NUMBER,   lr,              "learning rate of the step")                                        \
  X(NUMBER,   grad_norm,       "global norm before clipping")                                      \
  X(NUMBER,   loss_scale,      "loss scale of the step")                                           \
  X(INTEGER,  skipped,         "0: no; 1: gradients were not finite; 2: their norm was a spike")   \
  X(NUMBER,   step_ms,         "wall time of the step, data_ms included")                          \
  X(NUMBER,   tok_s,           "tokens of the step over step_ms")                                  \
  X(OPTIONAL, mfu,             "model flops utilisation; needs the device's peak")                 \
  X(OPTIONAL, exposed_comm_ms, "communication while no computation ran")                           \
  X(NUMBER,   data_ms,         "waiting for tokens")                                               \
  X(NUMBER,   mem_gib,         "planned device memory")

#define G2Z_METRIC_INTEGER int64_t
#define G2Z_METRIC_NUMBER double
#define G2Z_METRIC_OPTIONAL double
typedef struct g2z_metrics {
#define X(type, name, meaning) G2Z_METRIC_##type name;
  G2Z_METRIC_LIST(X)
#undef X
} g2z_metrics;

/* Writes run_dir/report.html. The curves come from metrics.jsonl; the list of settings that a
 * resume changed comes from train.log; the facts come from training_metrics.json, or before the
 * run has written it, from launcher_metadata.json. If one of these files is damaged or not from a
 * run, the call fails and writes nothing. */
G2Z_API g2z_status g2z_report_run(g2z_services *services, const char *run_dir);

/* Writes run_dir/profiles/timers_HOST.txt: the times of spans, formatted like the NVTX ranges of
 * `nsys stats`. Then writes profile_summary.json as g2z_profile_run does, but from this file alone:
 * other files in profiles/ come from earlier runs. */
G2Z_API g2z_status g2z_profile_write_spans(g2z_services *services, const char *run_dir,
                                           const g2z_span_times times[G2Z_SPAN_COUNT]);
/* Writes run_dir/profiles/profile_summary.json: the five NVTX ranges and the five operating-system
 * calls that took most time. Reads profiles/nsys_stats_*.txt. If there are none, reads
 * timers_*.txt, which list no calls. If a file has another format, the call fails and writes
 * nothing. */
G2Z_API g2z_status g2z_profile_run(g2z_services *services, const char *run_dir);

/* Writes the numbers of metrics.jsonl for TensorBoard, to a new file events.out.tfevents.TIME.HOST
 * in run_dir. The file replaces the values of earlier event files from `first_step` on: TensorBoard
 * drops them. It begins with the numbers that metrics.jsonl already has. */
typedef struct g2z_events g2z_events;
G2Z_API g2z_status g2z_events_create(g2z_services *services, const char *run_dir,
                                     int64_t first_step, g2z_events **out);
/* Writes the numbers of one more line of metrics.jsonl. A loss or norm that is not finite is
 * written, too: TensorBoard marks it. */
G2Z_API g2z_status g2z_events_put(g2z_events *events, const char *line);
G2Z_API void g2z_events_free(g2z_events *events); /* NULL is fine */

/* Sorts the values. NaN if there are none, or if one of them is NaN. */
G2Z_API double g2z_median(double *values, size_t count);
/* Sorts the values. Returns the smallest value such that at least `percent` percent of the values
 * are not larger (nearest rank). NaN as in g2z_median. */
G2Z_API double g2z_percentile(double *values, size_t count, int percent);
/* The sample's standard deviation; NaN for fewer than two values. */
G2Z_API double g2z_deviation(const double *values, size_t count);

/* A JSON object that was read from a file. Members are found by path: "summary.best_val_loss",
 * "epochs.0.steps", or "epochs.last" for the last element of an array. */
typedef struct g2z_object {
  g2z_services *services;
  char *path, *text;            /* text NULL: the file does not exist; the object has no members */
  size_t bytes;
} g2z_object;
/* Reads a file and checks that it is one valid object. Free *out with g2z_object_free, also after a
 * failure. */
G2Z_API g2z_status g2z_object_read(g2z_services *services, const char *path, g2z_object *out);
G2Z_API void g2z_object_free(g2z_object *object);
/* Moves *json to the value of the member `at`. 0: there is no such member. */
G2Z_API int g2z_object_at(const g2z_object *object, const char *at, g2z_json *json);
/* The number at `at`; NaN: there is none. */
G2Z_API double g2z_object_number(const g2z_object *object, const char *at);
/* Copies the text at `at`, cut off after 8 KiB or where `out` is full. "": there is none. */
G2Z_API void g2z_object_copy(const g2z_object *object, const char *at, char *out, size_t room);
/* Moves *json into the array at `at`, before its first element. 0: there is no array. */
G2Z_API int g2z_object_list(const g2z_object *object, const char *at, g2z_json *json);
/* *element becomes the next element of the array; 0: there is none. It is an object of its own, so
 * that reading its members does not scan earlier elements again. `object` owns its text: do not
 * free *element. */
G2Z_API int g2z_object_next(const g2z_object *object, g2z_json *json, g2z_object *element);

typedef struct g2zp_run g2zp_run; /* private */
/* The runs and experiments that were found in directories, for one page. */
typedef struct g2z_results {
  g2z_services *services;
  g2zp_run *runs;
  size_t run_count, run_capacity;
  g2z_path *reports;            /* files NAME_report.json, unless `show` is NULL */
  size_t report_count, report_capacity;
  /* Reads one of `reports` and puts its part of the page, before the runs. NULL: g2z_results_add
   * ignores these files. */
  g2z_status (*show)(g2z_services *services, const char *path, g2z_page *page);
} g2z_results;
G2Z_API g2z_status g2z_results_create(g2z_services *services, g2z_results **out);
G2Z_API void g2z_results_free(g2z_results *results); /* NULL is fine */
/* Adds the run and the experiments of the directory and of its subdirectories, two levels deep.
 * The call fails if a file is damaged, or if there is no run and no experiment. */
G2Z_API g2z_status g2z_results_add(g2z_results *results, const char *directory);
/* Writes the page. It begins with the better run, by how much it is better, and in how much of the
 * steps, tokens and seconds; or with the reason why the runs cannot be compared. */
G2Z_API g2z_status g2z_results_page(g2z_results *results, const char *path);

/* The current time, as "2026-01-31T23:59:59Z". */
typedef struct g2z_short {
  char text[32];
} g2z_short;
G2Z_API g2z_short g2z_utc_now(void);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_REPORT_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_REPORT_IMPLEMENTED)
#define G2Z_REPORT_IMPLEMENTED

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
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

#ifdef __cplusplus
extern "C" {
#endif

/* ===== report ============================================================
 * In:  numbers, and text of any origin. Out: pages.
 * Law: all input is a number or escaped text; a number that cannot be drawn is a gap. */

G2Z_API g2z_short g2z_utc_now(void) {
  time_t now = time(NULL);
  struct tm utc;
  g2z_short out;
  strftime(out.text, sizeof out.text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
  return out;
}

static g2z_status g2zp_check_directory(g2z_services *services, const char *directory) {
  if (!*directory) return g2z_fail_file(services, ENOENT, "open the directory", directory);
  return G2Z_OK;
}

/* ----- pages ----- */

/* Kinds of the open element. It is closed when an element of another kind begins. */
enum {
  G2ZP_PAGE_PLAIN,
  G2ZP_PAGE_FIGURES,
  G2ZP_PAGE_FACTS,
  G2ZP_PAGE_TABLE,
  G2ZP_PAGE_CHARTS
};

struct g2z_page {
  g2z_services *services;
  g2z_writer *writer;
  int open;
  int folded;                        /* 1: a fold is open */
  int columns, cell;                 /* the open table: columns; cells in its last row so far */
};

/* The colours differ in lightness and hue, so that colour-blind readers can distinguish them. */
#define G2ZP_LIGHT \
  "{--page:#fbfbfa;--card:#fff;--line:#e2e2de;--grid:#ececea;--text:#1c1d1f;--soft:#63666b;"     \
  "--s0:#1f66c1;--s1:#d9541e;--s2:#12876f;--s3:#8b4fc0;--s4:#b07d00;--s5:#c2347b;--s6:#4b8f1a;" \
  "--s7:#5b6470;--s8:#1c1d1f}"
#define G2ZP_DARK \
  "{--page:#131416;--card:#1b1d20;--line:#303338;--grid:#292c30;--text:#e9e9e7;--soft:#a0a4aa;"  \
  "--s0:#6aa9f7;--s1:#f58a5c;--s2:#3fc3a3;--s3:#bd92ec;--s4:#e2b13c;--s5:#ee7fb2;--s6:#95cf5d;" \
  "--s7:#aab3bf;--s8:#e9e9e7}"
#define G2ZP_CHART_STYLE \
  "svg text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}\n"                \
  "svg .end{text-anchor:end}svg .mid{text-anchor:middle}\n"                                      \
  "svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--line)}\n"                                 \
  "svg .series{fill:none;stroke:var(--c);stroke-width:1.7;stroke-linejoin:round;"                \
  "stroke-linecap:round}\n"                                                                      \
  "svg .many{stroke-width:1.1}svg .faint{opacity:.35}\n"                                         \
  "svg .dash{stroke-dasharray:5 5;stroke-width:1.4}\n"                                           \
  "svg .bar{fill:var(--c)}svg .dot{fill:var(--c);stroke:var(--card);stroke-width:1.2}\n"         \
  "svg .whisker{stroke:var(--text);stroke-width:1.2;fill:none;opacity:.65}\n"
static const char g2zp_page_style[] =
    ":root{color-scheme:light dark}:root" G2ZP_LIGHT "\n"
    "@media screen and (prefers-color-scheme:dark){:root" G2ZP_DARK "}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;max-width:1400px;padding:clamp(16px,3vw,40px);background:var(--page);"
    "color:var(--text);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}\n"
    "h1{font-size:1.6rem;line-height:1.2;margin:0 0 1rem}\n"
    "h2{font-size:1.15rem;margin:2rem 0 .6rem}\n"
    "p{max-width:70ch;margin:.5rem 0}\n"
    ".lead{font-size:1.15rem}\n"
    "pre{font:.87rem/1.5 ui-monospace,monospace;margin:.5rem 0}\n"
    "dl,.charts{display:grid;gap:12px;margin:1rem 0}\n"
    "dl{grid-template-columns:repeat(auto-fill,minmax(min(100%,15rem),1fr));gap:10px 24px}\n"
    "dt,small{color:var(--soft);font-size:.8rem}dd{margin:0}\n"
    "dl.figures{grid-template-columns:repeat(auto-fit,minmax(min(45%,11rem),1fr))}\n"
    ".figures dd{font-size:1.6rem;line-height:1.25}.figures small{display:block}\n"
    "summary{cursor:pointer;margin:1.5rem 0 .6rem;font-weight:600}\n"
    ".long{grid-column:1/-1;order:1}.long dd{font:.87rem/1.5 ui-monospace,monospace}\n"
    ".charts{grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr))}\n"
    "figure{margin:0;padding:14px 14px 8px;background:var(--card);border:1px solid var(--line);"
    "border-radius:8px;break-inside:avoid}\n"
    "figcaption b{font-weight:600}figcaption span{margin-left:.6em}\n"
    "figcaption span,.legend{color:var(--soft);font-size:.85rem}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:0 1em}\n"
    ".legend span::before{content:'';display:inline-block;width:1.3em;margin-right:.4em;"
    "border-top:3px solid var(--c);vertical-align:.22em}\n"
    ".legend .dash::before{border-top-style:dashed;border-top-width:2px}\n"
    "svg{display:block;width:100%;height:auto;margin-top:6px;overflow:visible}\n"
    G2ZP_CHART_STYLE
    ".at rect{fill:transparent}.at path,.at text{visibility:hidden}.at path{stroke:var(--soft)}\n"
    ".at:hover path,.at:hover text{visibility:visible}\n"
    ".scroll{overflow-x:auto;margin:1rem 0}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;overflow-wrap:normal}\n"
    "th,td{padding:.32rem .9rem .32rem 0;border-bottom:1px solid var(--line);text-align:right;"
    "vertical-align:bottom}\n"
    "th{font-weight:600;color:var(--soft);font-size:.85rem}\n"
    "th:first-child,td:first-child{text-align:left}\n"
    "th:first-child,td:first-child{position:sticky;left:0;background:var(--page)}\n"
    "td:first-child{overflow-wrap:anywhere;min-width:12ch}\n"
    "h1,p,pre,dd,td,.legend span{white-space:pre-wrap}svg text{white-space:pre}\n"
    "@media (max-width:480px){svg text{font-size:14px}dl{grid-template-columns:1fr 1fr}"
    "th,td{padding-right:.6rem}}\n"
    "@media print{:root{color-scheme:light;font-size:11px;--page:#fff;--card:#fff;--line:#bbb;"
    "--grid:#e4e4e4;--text:#000;--soft:#444}body{max-width:none;padding:0;font-size:11px}"
    ".charts{grid-template-columns:1fr 1fr}.scroll{overflow:visible}.at{display:none}"
    "h2{break-after:avoid}tr{break-inside:avoid}}\n";

/* Writes `open`, the text with its markup escaped, and `close`. Invalid UTF-8 and characters that
 * control a terminal become U+FFFD. */
static void g2zp_element(g2z_writer *writer, const char *open, const char *text,
                         const char *close) {
  static const char marks[] = "&<>\"'";
  static const char *const entities[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  const unsigned char *at = (const unsigned char *)text, *end = at + strlen(text);
  g2z_writer_put(writer, open, strlen(open));
  while (at < end) {
    const g2z_shown shown = g2z_utf8_show(at, end);
    const char *mark = strchr(marks, *at);
    if (mark) g2z_writer_printf(writer, "%s", entities[mark - marks]);
    else g2z_writer_put(writer, shown.text, shown.bytes);
    at += shown.used;
  }
  g2z_writer_put(writer, close, strlen(close));
}

/* A coordinate as text, rounded to a tenth, with a decimal point in every locale. Values are
 * clamped to 1e5, which is far outside the picture: the end of a whisker may exceed the scale. */
typedef struct g2zp_coordinate {
  char text[24];
} g2zp_coordinate;

static g2zp_coordinate g2zp_coordinate_of(double value) {
  g2zp_coordinate out;
  snprintf(out.text, sizeof out.text, "%.1f", fmax(-1e5, fmin(value, 1e5)));
  g2z_plain_number(out.text);
  return out;
}
#define G2ZP_AT(value) g2zp_coordinate_of(value).text

#define G2ZP_TEXT 8192 /* longer texts are cut off */

/* Declares `text`, and prints into it the last parameters of the enclosing function, `format` and
 * those after it. */
#define G2ZP_FORMAT(format, text)                     \
  char text[G2ZP_TEXT];                               \
  va_list arguments_;                                 \
  va_start(arguments_, format);                       \
  vsnprintf(text, sizeof text, format, arguments_);   \
  va_end(arguments_)

/* Closes the open element and opens one of `kind`. An open element of this kind stays open, unless
 * it is a table. */
static void g2zp_page_open(g2z_page *page, int kind) {
  static const char *const begin[] = {"", "<dl class=figures>\n", "<dl>\n", "",
                                      "<div class=charts>\n"};
  static const char *const end[] = {"", "</dl>\n", "</dl>\n", "</tbody></table></div>\n",
                                    "</div>\n"};
  if (page->open == kind && kind != G2ZP_PAGE_TABLE) return;
  if (page->open == G2ZP_PAGE_TABLE && page->cell) g2z_writer_printf(page->writer, "</tr>\n");
  g2z_writer_printf(page->writer, "%s%s", end[page->open], begin[kind]);
  page->open = kind;
}

G2Z_API g2z_status g2z_page_create(g2z_services *services, const char *path, const char *title,
                                   g2z_page **out) {
  g2z_page *page;
  *out = NULL;
  G2Z_TRY(G2Z_NEW(services, 1, &page));
  page->services = services;
  g2z_status status = g2z_writer_create(services, path, &page->writer);
  if (status != G2Z_OK) {
    g2z_page_free(page);
    return status;
  }
  g2zp_element(page->writer,
               G2Z_PAGE_BEGIN "<meta charset=utf-8>\n"
               "<meta name=viewport content=\"width=device-width,initial-scale=1\">\n"
               "<meta name=color-scheme content=\"light dark\">\n<title>", title,
               "</title>\n<style>\n");
  g2z_writer_put(page->writer, g2zp_page_style, sizeof g2zp_page_style - 1);
  g2zp_element(page->writer, "</style>\n<body>\n<h1>", title, "</h1>\n");
  *out = page;
  return G2Z_OK;
}

/* Closes the open element and the open fold. */
static void g2zp_page_close(g2z_page *page) {
  g2zp_page_open(page, G2ZP_PAGE_PLAIN);
  if (page->folded) g2z_writer_printf(page->writer, "</details>\n");
  page->folded = 0;
}

G2Z_API void g2z_page_heading(g2z_page *page, const char *text) {
  g2zp_page_close(page);
  g2zp_element(page->writer, "<h2>", text, "</h2>\n");
}

G2Z_API void g2z_page_fold(g2z_page *page, const char *text) {
  g2zp_page_close(page);
  g2zp_element(page->writer, "<details><summary>", text, "</summary>\n");
  page->folded = 1;
}

G2Z_API void g2z_page_lead(g2z_page *page, const char *format, ...) {
  G2ZP_FORMAT(format, text);
  g2zp_page_open(page, G2ZP_PAGE_PLAIN);
  g2zp_element(page->writer, "<p class=lead>", text, "</p>\n");
}

G2Z_API void g2z_page_text(g2z_page *page, const char *format, ...) {
  G2ZP_FORMAT(format, text);
  g2zp_page_open(page, G2ZP_PAGE_PLAIN);
  g2zp_element(page->writer, "<p>", text, "</p>\n");
}

G2Z_API void g2z_page_figure(g2z_page *page, const char *name, const char *note,
                             const char *format, ...) {
  G2ZP_FORMAT(format, text);
  g2zp_page_open(page, G2ZP_PAGE_FIGURES);
  g2zp_element(page->writer, "<div><dt>", name, "</dt><dd>");
  g2zp_element(page->writer, "", text, "");
  g2zp_element(page->writer, *note ? "<small>" : "", note, *note ? "</small>" : "");
  g2z_writer_printf(page->writer, "</dd></div>\n");
}

G2Z_API void g2z_page_fact(g2z_page *page, const char *name, const char *format, ...) {
  G2ZP_FORMAT(format, text);
  g2zp_page_open(page, G2ZP_PAGE_FACTS);
  g2zp_element(page->writer, strlen(text) > 60 ? "<div class=long><dt>" : "<div><dt>", name,
               "</dt><dd>");
  g2zp_element(page->writer, "", text, "</dd></div>\n");
}

G2Z_API void g2z_page_table(g2z_page *page, int columns, const char *const *headers) {
  G2Z_ASSERT(columns > 0);
  g2zp_page_open(page, G2ZP_PAGE_TABLE);
  page->columns = columns;
  page->cell = 0;
  g2z_writer_printf(page->writer, "<div class=scroll><table><thead><tr>");
  for (int i = 0; i < columns; i++) g2zp_element(page->writer, "<th>", headers[i], "");
  g2z_writer_printf(page->writer, "</tr></thead><tbody>\n");
}

G2Z_API void g2z_page_cell(g2z_page *page, const char *format, ...) {
  G2Z_ASSERT(page->open == G2ZP_PAGE_TABLE);
  G2ZP_FORMAT(format, text);
  if (page->cell == 0) g2z_writer_printf(page->writer, "<tr>");
  g2zp_element(page->writer, "<td>", *text ? text : "\xe2\x80\x93", "");
  page->cell++;
  if (page->cell < page->columns) return;
  g2z_writer_printf(page->writer, "</tr>\n");
  page->cell = 0;
}

G2Z_API g2z_status g2z_page_commit(g2z_page *page) {
  g2zp_page_close(page);
  g2z_writer_printf(page->writer, "</body>\n</html>\n");
  return g2z_writer_commit(page->writer);
}

G2Z_API void g2z_page_free(g2z_page *page) {
  if (!page) return;
  g2z_writer_free(page->writer);
  g2z_release(page->services, page);
}

/* ----- scales ----- */

#define G2ZP_CHART_WIDTH 440.0 /* in units: about 1 px on a wide page, 0.72 px on a telephone */
#define G2ZP_CHART_HEIGHT 260.0
#define G2ZP_CHART_DIGIT 8.6 /* width of a digit on a telephone, where the text is larger */
#define G2ZP_TICKS 12

typedef struct g2zp_scale {
  double low, high;                  /* range of the values */
  double from, to;                   /* range of the coordinates */
  int log;
  double step;                       /* difference of two ticks; 0: the scale is logarithmic */
  double tick[G2ZP_TICKS];
  int ticks;
} g2zp_scale;

typedef struct g2zp_extent {         /* the range of all values on an axis */
  double low, high, positive;        /* `positive`: the smallest value above 0; NaN: none */
  int whole;                         /* 1: all values are integers */
} g2zp_extent;

static const g2zp_extent g2zp_nothing = {NAN, NAN, NAN, 1};

/* Keeps values far from a double's limits, so that no scale overflows. NaN: a gap. */
static double g2zp_drawable(double value) {
  if (!isfinite(value) || fabs(value) > 1e30) return NAN;
  if (fabs(value) < 1e-30) return 0;
  return value;
}

static void g2zp_extent_add(g2zp_extent *e, double value) {
  value = g2zp_drawable(value);
  if (isnan(value)) return;
  if (!(e->low <= value)) e->low = value; /* also true while low is NaN */
  if (!(e->high >= value)) e->high = value;
  if (value > 0 && !(e->positive <= value)) e->positive = value;
  if (value != floor(value)) e->whole = 0;
}

/* The nearest bound at or below `value`, or with `above` at or above it. A bound is 1, 2 or 5 times
 * a power of ten. */
static double g2zp_log_bound(double value, int above) {
  const double power = pow(10, floor(log10(value) + 1e-9)), lead = value / power;
  if (above) {
    if (lead <= 1.001) return power;
    if (lead <= 2.001) return 2 * power;
    if (lead <= 5.001) return 5 * power;
    return 10 * power;
  }
  if (lead >= 4.999) return 5 * power;
  if (lead >= 1.999) return 2 * power;
  return power;
}

/* Makes the scale of an axis. `rounded` 1: it begins and ends at ticks, as a y axis does; 0: it
 * ends at the lowest and the highest value. */
static void g2zp_scale_make(g2zp_scale *s, const g2zp_extent *e, g2z_axis axis, int rounded) {
  memset(s, 0, sizeof *s);
  s->low = e->low;
  s->high = e->high;
  if (isnan(e->low)) { /* there is no value */
    s->low = 0;
    s->high = 1;
  }
  s->log = (axis == G2Z_AXIS_LOG && 1.1 * e->positive < e->high) ||
           (axis == G2Z_AXIS_AUTO && e->low > 0 && e->high / e->low > 1000);
  if (s->log) {
    s->low = e->positive;
    if (rounded) {
      s->low = g2zp_log_bound(e->positive, 0);
      s->high = g2zp_log_bound(e->high, 1);
    }
  } else {
    if (axis == G2Z_AXIS_ZERO && s->low > 0) s->low = 0;
    if (axis == G2Z_AXIS_ZERO && s->high < 0) s->high = 0;
    const double size = fmax(fabs(s->low), fabs(s->high));
    if (s->high - s->low <= 1e-9 * size) { /* all values are equal: put them in the middle */
      const double margin = size > 0 ? size / 10 : 1;
      s->low -= margin;
      s->high += margin;
    }
    /* The step is 1, 2, 2.5 or 5 times a power of ten, so that about five steps cover the range.
     * Integers get no step of 2.5: its ticks would be between them. */
    const double raw = (s->high - s->low) / 5, power = pow(10, floor(log10(raw)));
    const double lead = raw / power;
    if (lead <= 1) s->step = power;
    else if (lead <= 2) s->step = 2 * power;
    else if (lead <= 2.5 && !(e->whole && power < 10)) s->step = 2.5 * power;
    else if (lead <= 5) s->step = 5 * power;
    else s->step = 10 * power;
    if (e->whole && s->step < 1) s->step = 1;
    if (rounded) {
      s->low = floor(s->low / s->step + 1e-6) * s->step;
      s->high = ceil(s->high / s->step - 1e-6) * s->step;
    }
  }
  if (s->log) { /* a short range has ticks at 1, 2, 5, 10, ...; a long one at every n-th of 10^k */
    static const int leads[] = {1, 2, 5};
    int first = (int)floor(log10(s->low) + 1e-9), last = (int)floor(log10(s->high) + 1e-9);
    int every = (last - first) / 6 + 1, fine = log10(s->high / s->low) < 2.5;
    for (int power = first; power <= last; power += every)
      for (size_t i = 0; i < G2Z_COUNT(leads); i++) {
        double tick = leads[i] * pow(10, power);
        int shown = (i == 0 || fine) && tick >= s->low * 0.999 && tick <= s->high * 1.001;
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
  double part = (value - s->low) / (s->high - s->low);
  if (s->log) part = log(value / s->low) / log(s->high / s->low);
  return s->from + part * (s->to - s->from);
}

/* A tick's value as short text: 2500 becomes "2.5k". All ticks of a linear scale share one unit,
 * and have as many decimals as the step needs. */
static const char *g2zp_tick_text(const g2zp_scale *s, double value, char out[32]) {
  double size = fabs(value), unit = 1;
  char suffix[8] = "";
  if (s->step > 0) size = fmax(fabs(s->low), fabs(s->high));
  if (size >= 1e15 || (size < 1e-2 && size > 0)) {
    const int power = (int)floor(log10(size) + 1e-9);
    unit = pow(10, power);
    snprintf(suffix, sizeof suffix, "e%d", power);
  } else if (size >= 1e4) {
    int k = 0;
    for (unit = 1e3; k < 3 && size >= 1e3 * unit; k++) unit *= 1e3;
    suffix[0] = "kMGT"[k];
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
  return out;
}

/* ----- charts ----- */

static void g2zp_svg_line(g2z_writer *writer, const char *kind, double x1, double y1,
                          double x2, double y2) {
  g2z_writer_printf(writer, "<path class=\"%s\" d=\"M%s %sL%s %s\"/>", kind, G2ZP_AT(x1),
                    G2ZP_AT(y1), G2ZP_AT(x2), G2ZP_AT(y2));
}

static void g2zp_svg_text(g2z_writer *writer, const char *kind, double x, double y,
                          const char *text) {
  g2z_writer_printf(writer, "<text class=\"%s\" x=\"%s\" y=\"%s\"", kind, G2ZP_AT(x), G2ZP_AT(y));
  g2zp_element(writer, ">", text, "</text>\n");
}

#define G2ZP_CELL 160

/* A number as text; "" if it is not finite or too large for its format. Format NULL: no decimals if
 * the number is whole or at least 100, else five digits, as losses need. */
static const char *g2zp_number_text(char out[G2ZP_CELL], const char *format, double value) {
  const int whole = fabs(value) < 1e15 && (fabs(value) >= 100 || value == rint(value));
  out[0] = 0;
  if (format) {
    if (fabs(value) < 1e18) snprintf(out, G2ZP_CELL, format, value);
  } else if (isfinite(value)) {
    snprintf(out, G2ZP_CELL, whole ? "%.0f" : "%.5g", value);
  }
  g2z_plain_number(out);
  return out;
}

/* A loss, or a difference of two. After a divergence it may be too large for four decimals. */
static const char *g2zp_loss_text(char out[G2ZP_CELL], double loss) {
  return g2zp_number_text(out, fabs(loss) < 1e6 ? "%.4f" : "%.4g", loss);
}

static void g2zp_page_number(g2z_page *page, const char *name, double value) {
  char text[G2ZP_CELL];
  g2z_page_fact(page, name, "%s", g2zp_number_text(text, NULL, value));
}

/* Draws a cross at the upper edge for each x; of many, at most G2Z_CHART_POINTS. */
static void g2zp_chart_crosses(g2z_writer *writer, const g2z_series *series, const g2zp_scale *x,
                               const g2zp_scale *y, int colour) {
  const size_t every = series->count / G2Z_CHART_POINTS + 1;
  g2z_writer_printf(writer, "<path class=\"series\" style=\"--c:var(--s%d)\" d=\"", colour);
  for (size_t i = 0; i < series->count; i += every) {
    const double at = g2zp_scale_at(x, series->x[i]);
    if (!isnan(at))
      g2z_writer_printf(writer, "M%s %sl6 6m-6 0l6-6", G2ZP_AT(at - 3), G2ZP_AT(y->to - 3));
  }
  g2z_writer_printf(writer, "\"/>\n");
}

/* Covers a line chart with strips. Under the pointer a strip shows a place on the x axis, and the
 * last value of each series up to there. */
static void g2zp_chart_strips(g2z_writer *writer, const g2z_chart *chart, const g2zp_scale *x,
                              const g2zp_scale *y) {
  enum { STRIPS = 100 };
  size_t passed[G2Z_CHART_SERIES] = {0}; /* number of values up to the end of the strip */
  double begin = x->from, shown = NAN, place = NAN;
  char cell[G2ZP_CELL];
  for (int strip = 1; strip <= STRIPS; strip++) {
    const double end = x->from + (x->to - x->from) * strip / STRIPS;
    for (int s = 0; s < chart->series_count; s++) {
      const g2z_series *series = &chart->series[s];
      for (; passed[s] < series->count; passed[s]++) {
        if (g2zp_scale_at(x, series->x[passed[s]]) > end + 0.05) break;
        if (!(place >= series->x[passed[s]])) place = series->x[passed[s]];
      }
    }
    const double at = g2zp_scale_at(x, place);
    if (place == shown || isnan(at)) continue; /* no new value: the next strip begins here */
    g2z_writer_printf(writer, "<g class=\"at\"><rect x=\"%s\" y=\"0\" width=\"%s\" "
                      "height=\"%s\"/>", G2ZP_AT(begin), G2ZP_AT(end - begin), G2ZP_AT(y->from));
    g2zp_svg_line(writer, "line", at, y->to, at, y->from);
    g2z_writer_printf(writer, "<text class=\"mid\" x=\"%s\" y=\"8\">%s:",
                      G2ZP_AT((x->from + x->to) / 2), g2zp_number_text(cell, NULL, place));
    for (int s = 0; s < chart->series_count; s++) {
      const g2z_series *series = &chart->series[s];
      if (!passed[s] || series->mark == G2Z_MARK_CROSS) continue;
      if (*g2zp_number_text(cell, NULL, series->y[passed[s] - 1]))
        g2z_writer_printf(writer, "<tspan style=\"fill:var(--s%d)\"> %s</tspan>", s, cell);
    }
    g2z_writer_printf(writer, "</text></g>\n");
    begin = end;
    shown = place;
  }
}

/* Draws the series as lines and points. A long series is cut into stretches of equal length; of
 * each stretch only the minimum and the maximum are drawn, in the order in which they occur. A
 * single point between two gaps is drawn as a line of length 0: its round ends make a dot. */
static void g2zp_chart_lines(g2z_writer *writer, const g2z_chart *chart, const g2zp_scale *x,
                             const g2zp_scale *y) {
  for (int s = 0; s < chart->series_count; s++) {
    const g2z_series *series = &chart->series[s];
    const size_t count = series->count, half = G2Z_CHART_POINTS / 2;
    size_t stretch = 1;
    if (series->mark == G2Z_MARK_CROSS) {
      g2zp_chart_crosses(writer, series, x, y, s);
      continue;
    }
    const char *style = "";
    int drawn = 0;                   /* points drawn since the last gap */
    if (count > G2Z_CHART_POINTS) stretch = (count + half - 1) / half;
    if (series->mark == G2Z_MARK_DASHED) style = " dash";
    if (series->mark == G2Z_MARK_FAINT) style = " faint";
    g2z_writer_printf(writer, "<path class=\"series%s%s\" style=\"--c:var(--s%d)\" d=\"", style,
                      count > 200 ? " many" : "", s);
    for (size_t begin = 0; begin < count; begin += stretch) {
      const size_t end = count - begin < stretch ? count : begin + stretch;
      size_t least = end, most = end;
      int gap = 0;
      for (size_t i = begin; i < end; i++) {
        const double value = series->y[i];
        if (isnan(g2zp_scale_at(x, series->x[i]) + g2zp_scale_at(y, value))) {
          gap = 1;
          continue;
        }
        if (least == end || value < series->y[least]) least = i;
        if (most == end || value > series->y[most]) most = i;
      }
      size_t point[2] = {least, most};
      int points = 2;
      if (most < least) {
        point[0] = most;
        point[1] = least;
      }
      if (least == most) points = 1;
      if (least == end) points = 0;  /* the stretch has no value */
      for (int i = 0; i < points; i++, drawn++)
        g2z_writer_printf(writer, "%s%s %s", drawn ? "L" : "M",
                          G2ZP_AT(g2zp_scale_at(x, series->x[point[i]])),
                          G2ZP_AT(g2zp_scale_at(y, series->y[point[i]])));
      if (drawn == 1 && (gap || end == count)) g2z_writer_printf(writer, "h0");
      if (gap) drawn = 0;
    }
    g2z_writer_printf(writer, "\"/>\n");
    for (size_t i = 0; i < count && count <= 64 && series->mark == G2Z_MARK_POINTS; i++) {
      const double across = g2zp_scale_at(x, series->x[i]), up = g2zp_scale_at(y, series->y[i]);
      if (!isnan(across + up))
        g2z_writer_printf(writer, "<circle class=\"dot\" style=\"--c:var(--s%d)\" r=\"3.5\" "
                          "cx=\"%s\" cy=\"%s\"/>\n", s, G2ZP_AT(across), G2ZP_AT(up));
    }
  }
}

/* Draws one group of horizontal bars per label, each with its whisker and its value as text. */
static void g2zp_chart_bars(g2z_writer *writer, const g2z_chart *chart, const g2zp_scale *x,
                            const g2zp_scale *y, double group, size_t groups) {
  g2zp_scale own = *x;
  char text[32];
  own.step = 0; /* each value gets its own unit and decimals */
  for (size_t at = 0; at < groups; at++) {
    double top = y->to + group * (double)at + 5;
    g2zp_svg_text(writer, "end", x->from - 6, top + (group - 10) / 2 + 3, chart->labels[at]);
    for (int i = 0; i < chart->series_count; i++, top += 14) {
      const g2z_series *series = &chart->series[i];
      if (at >= series->count) continue;
      double end = g2zp_scale_at(x, series->y[at]), text_at = end, low = NAN, high = NAN;
      if (isnan(end)) continue;
      if (end < x->from) end = x->from;
      g2z_writer_printf(writer, "<rect class=\"bar\" style=\"--c:var(--s%d)\" height=\"12\" "
                        "x=\"%s\" y=\"%s\" width=\"%s\"/>", i, G2ZP_AT(x->from), G2ZP_AT(top),
                        G2ZP_AT(end - x->from));
      if (series->low) {
        low = g2zp_scale_at(x, series->low[at]);
        high = g2zp_scale_at(x, series->high[at]);
      }
      if (!isnan(low + high)) { /* a whisker with end caps */
        g2zp_svg_line(writer, "whisker", low, top + 6, high, top + 6);
        g2zp_svg_line(writer, "whisker", low, top + 2.5, low, top + 9.5);
        g2zp_svg_line(writer, "whisker", high, top + 2.5, high, top + 9.5);
      }
      if (high > text_at) text_at = high;
      g2zp_svg_text(writer, "value", text_at + 6, top + 10,
                    g2zp_tick_text(&own, series->y[at], text));
    }
  }
}

/* The places of a chart's parts. */
typedef struct g2zp_layout {
  g2zp_scale x, y;
  double group, height;              /* of one group of bars; of the whole picture */
  size_t groups;
  int empty;                         /* 1: no value can be drawn */
} g2zp_layout;

/* Bars are horizontal, so that their labels have room: their values lie on the x axis. */
static void g2zp_chart_layout(const g2z_chart *chart, g2zp_layout *l) {
  const int bars = chart->labels != NULL;
  g2zp_extent wide = g2zp_nothing, tall = g2zp_nothing;
  g2z_axis x_axis = chart->x_axis;
  char text[32];
  double widest = 0; /* number of characters in the longest text left of the y axis */
  G2Z_ASSERT(chart->series_count > 0 && chart->series_count <= G2Z_CHART_SERIES);
  memset(l, 0, sizeof *l);
  l->group = 14.0 * chart->series_count + 10;
  for (int i = 0; i < chart->series_count; i++) {
    const g2z_series *series = &chart->series[i];
    if (series->count > l->groups) l->groups = series->count;
    for (size_t at = 0; at < series->count; at++) {
      if (!bars) {
        g2zp_extent_add(&wide, series->x[at]);
        if (series->mark != G2Z_MARK_CROSS) g2zp_extent_add(&tall, series->y[at]);
        continue;
      }
      g2zp_extent_add(&wide, series->y[at]);
      if (series->high) g2zp_extent_add(&wide, series->high[at]);
    }
  }
  l->empty = !bars && isnan(wide.low + tall.low);
  if (x_axis == G2Z_AXIS_AUTO) x_axis = G2Z_AXIS_LINEAR;
  if (bars) x_axis = G2Z_AXIS_ZERO;
  g2zp_scale_make(&l->x, &wide, x_axis, bars);
  g2zp_scale_make(&l->y, &tall, chart->y_axis, 1);
  if (bars) l->y.ticks = 0;
  for (int i = 0; i < l->y.ticks; i++)
    widest = fmax(widest, (double)strlen(g2zp_tick_text(&l->y, l->y.tick[i], text)));
  for (size_t at = 0; at < l->groups && bars; at++)
    widest = fmax(widest, (double)strlen(chart->labels[at]));
  l->x.from = fmin(12 + G2ZP_CHART_DIGIT * widest, 0.45 * G2ZP_CHART_WIDTH);
  if (bars) {
    l->x.to = G2ZP_CHART_WIDTH - (12 + G2ZP_CHART_DIGIT * 7); /* leaves room for a bar's value */
    l->y.to = 4;
    l->y.from = l->y.to + l->group * (double)l->groups;
    l->height = l->y.from + 24;
  } else {
    l->x.to = G2ZP_CHART_WIDTH - 14;
    l->y.to = 14;                    /* above are the values under the pointer */
    l->y.from = G2ZP_CHART_HEIGHT - (chart->x_name ? 40 : 24);
    l->height = G2ZP_CHART_HEIGHT;
  }
}

/* Draws the grid, the numbers of its lines, and the series. */
static void g2zp_chart_draw(g2z_writer *writer, const g2z_chart *chart, const g2zp_layout *l) {
  const g2zp_scale *x = &l->x, *y = &l->y;
  const int bars = chart->labels != NULL;
  const double middle = (x->from + x->to) / 2;
  char text[32];
  for (int i = 0; i < y->ticks; i++) {
    const double at = g2zp_scale_at(y, y->tick[i]);
    g2zp_svg_line(writer, "grid", x->from, at, x->to, at);
    g2zp_svg_text(writer, "end", x->from - 6, at + 4, g2zp_tick_text(y, y->tick[i], text));
  }
  g2zp_svg_line(writer, "axis", x->from, y->from, x->to, y->from);
  for (int i = 0; i < x->ticks; i++) {
    const double at = g2zp_scale_at(x, x->tick[i]);
    if (bars) g2zp_svg_line(writer, "grid", at, y->to, at, y->from);
    g2zp_svg_line(writer, "axis", at, y->from, at, y->from + 4);
    g2zp_svg_text(writer, "mid", at, y->from + 17, g2zp_tick_text(x, x->tick[i], text));
  }
  if (chart->x_name) g2zp_svg_text(writer, "mid", middle, y->from + 33, chart->x_name);
  if (l->empty) g2zp_svg_text(writer, "mid", middle, (y->from + y->to) / 2, "no values");
  if (bars) g2zp_chart_bars(writer, chart, x, y, l->group, l->groups);
  else g2zp_chart_lines(writer, chart, x, y);
}

G2Z_API void g2z_page_chart(g2z_page *page, const g2z_chart *chart) {
  g2z_writer *writer = page->writer;
  g2zp_layout layout;
  g2zp_chart_layout(chart, &layout);
  g2zp_page_open(page, G2ZP_PAGE_CHARTS);
  g2zp_element(writer, "<figure><figcaption><b>", chart->title, "</b>");
  if (chart->about) g2zp_element(writer, "<span>", chart->about, "</span>");
  g2z_writer_printf(writer, "</figcaption>\n");
  if (chart->series_count > 1) {
    g2z_writer_printf(writer, "<div class=legend>");
    for (int i = 0; i < chart->series_count; i++) {
      if (!chart->series[i].name) continue;
      g2z_writer_printf(writer, "<span%s style=\"--c:var(--s%d)\"",
                        chart->series[i].mark == G2Z_MARK_DASHED ? " class=dash" : "", i);
      g2zp_element(writer, ">", chart->series[i].name, "</span>");
    }
    g2z_writer_printf(writer, "</div>\n");
  }
  g2z_writer_printf(writer, "<svg viewBox=\"0 0 %d %d\" role=img", (int)G2ZP_CHART_WIDTH,
                    (int)layout.height);
  g2zp_element(writer, " aria-label=\"", chart->title, "\">\n");
  g2zp_chart_draw(writer, chart, &layout);
  if (!chart->labels && !layout.empty) g2zp_chart_strips(writer, chart, &layout.x, &layout.y);
  g2z_writer_printf(writer, "</svg></figure>\n");
}

/* The title, a line about it, and a line per series stand above the chart. */
G2Z_API g2z_status g2z_chart_write(g2z_services *services, const char *path, int dark,
                                   const g2z_chart *chart) {
  const double width = G2ZP_CHART_WIDTH + 24, line = 17;
  double down = chart->about ? 44 : 26;
  int names = 0;
  g2z_writer *writer;
  g2zp_layout layout;
  g2zp_chart_layout(chart, &layout);
  G2Z_TRY(g2z_writer_create(services, path, &writer));
  for (int i = 0; i < chart->series_count; i++) names += chart->series[i].name != NULL;
  const double height = down + line * names + layout.height + 8;
  g2z_writer_printf(writer, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
                    "width=\"%d\" height=\"%d\" role=\"img\" "
                    "font-family=\"system-ui,sans-serif\"", (int)width, (int)height, (int)width,
                    (int)height);
  g2zp_element(writer, "><title>", chart->title, "</title>\n<style>\nsvg");
  g2z_writer_printf(writer, "%s\n" G2ZP_CHART_STYLE "svg .title{font-size:15px;font-weight:600;"
                    "fill:var(--text)}svg .key{stroke:var(--c);stroke-width:3}\n</style>\n"
                    "<rect width=\"100%%\" height=\"100%%\" rx=\"8\" fill=\"var(--card)\"/>\n",
                    dark ? G2ZP_DARK : G2ZP_LIGHT);
  g2zp_svg_text(writer, "title", 14, 24, chart->title);
  if (chart->about) g2zp_svg_text(writer, "about", 14, 41, chart->about);
  for (int i = 0; i < chart->series_count; i++) {
    if (!chart->series[i].name) continue;
    g2z_writer_printf(writer, "<path class=\"key%s\" style=\"--c:var(--s%d)\" d=\"M14 %sh18\"/>",
                      chart->series[i].mark == G2Z_MARK_DASHED ? " dash" : "", i,
                      G2ZP_AT(down + line / 2));
    g2zp_svg_text(writer, "name", 40, down + line / 2 + 4, chart->series[i].name);
    down += line;
  }
  g2z_writer_printf(writer, "<g transform=\"translate(6 %s)\">\n", G2ZP_AT(down + 4));
  g2zp_chart_draw(writer, chart, &layout);
  g2z_writer_printf(writer, "</g></svg>\n");
  const g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

/* ----- JSON objects ----- */

G2Z_API void g2z_object_free(g2z_object *object) {
  g2z_release(object->services, object->path);
  g2z_release(object->services, object->text);
  object->path = object->text = NULL;
}

G2Z_API g2z_status g2z_object_read(g2z_services *services, const char *path, g2z_object *out) {
  g2z_json json;
  int there;
  memset(out, 0, sizeof *out);
  out->services = services;
  G2Z_TRY(g2z_allocate(services, strlen(path) + 1, 1, &out->path));
  strcpy(out->path, path);
  G2Z_TRY(g2z_is_there(services, path, &there));
  if (!there) return G2Z_OK;
  G2Z_TRY(g2z_read_file(services, path, (size_t)1 << 26, &out->text, &out->bytes));
  g2z_json_open(&json, services, path, out->text, out->bytes);
  if (g2z_json_peek(&json) != '{') return g2z_json_fail(&json, "the file must hold an object");
  g2z_json_skip(&json);
  return g2z_json_close(&json);
}

G2Z_API int g2z_object_at(const g2z_object *object, const char *at, g2z_json *json) {
  g2z_json_text key;
  if (!object->text) return 0;
  g2z_json_open(json, object->services, object->path, object->text, object->bytes);
  while (*at) {
    char part[64], open = g2z_json_peek(json), close = open == '{' ? '}' : ']';
    size_t length = strcspn(at, ".");
    int found = 0, index = 0;
    snprintf(part, sizeof part, "%.*s", (int)length, at);
    if ((open != '{' && open != '[') || !g2z_json_enter(json, open)) return 0;
    int last = open == '[' && strcmp(part, "last") == 0;
    g2z_json element = *json;
    for (; !found && g2z_json_next(json, close, &key); index++) {
      element = *json;
      if (open == '{') found = g2z_json_is(&key, part);
      else found = !last && index == atoi(part);
      if (!found) g2z_json_skip(json);
    }
    if (last && index > 0) *json = element;
    else if (!found) return 0;
    at += length + (at[length] == '.');
  }
  return 1;
}

G2Z_API double g2z_object_number(const g2z_object *object, const char *at) {
  g2z_json json;
  if (!g2z_object_at(object, at, &json) || !strchr("-0123456789", g2z_json_peek(&json))) return NAN;
  return g2z_json_number(&json);
}

G2Z_API int g2z_object_list(const g2z_object *object, const char *at, g2z_json *json) {
  return g2z_object_at(object, at, json) && g2z_json_peek(json) == '[' && g2z_json_enter(json, '[');
}

G2Z_API int g2z_object_next(const g2z_object *object, g2z_json *json, g2z_object *element) {
  if (!g2z_json_next(json, ']', NULL)) return 0;
  g2z_json_peek(json); /* moves to the element's first byte */
  size_t begin = (size_t)(json->at - json->begin);
  g2z_json_skip(json);
  *element = *object;
  element->text = object->text + begin;
  element->bytes = (size_t)(json->at - json->begin) - begin;
  return 1;
}

G2Z_API void g2z_object_copy(const g2z_object *object, const char *at, char *out, size_t room) {
  g2z_json json;
  char whole[G2ZP_TEXT];
  size_t cut = 0; /* number of bytes to copy; no escape is cut in two */
  out[0] = 0;
  if (!g2z_object_at(object, at, &json) || g2z_json_peek(&json) != '"') return;
  g2z_json_text text = g2z_json_string(&json);
  while (cut < text.bytes && cut < sizeof whole - 6) {
    if (text.at[cut] != '\\') cut++;
    else if (text.at[cut + 1] != 'u') cut += 2;
    else cut += 6;
  }
  text.bytes = cut;
  whole[g2z_json_unescape(&text, (unsigned char *)whole)] = 0;
  snprintf(out, room, "%.*s", (int)room - 1, whole);
}

/* Reads a run's training_metrics.json, if it exists. */
static g2z_status g2zp_read_run(g2z_services *services, const char *run_dir, g2z_object *out) {
  char version[16];
  G2Z_TRY(g2z_object_read(services, g2z_path_in(run_dir, "training_metrics.json").text, out));
  g2z_object_copy(out, "schema_version", version, sizeof version);
  if (!out->text || strcmp(version, "2.0") == 0) return G2Z_OK;
  if (!*version) snprintf(version, sizeof version, "none");
  return g2z_fail(services, G2Z_FORMAT, "%.400s has schema_version %s, but only 2.0 can be read: "
                  "name a directory that train --run-dir wrote", out->path, version);
}

/* ----- metrics.jsonl ----- */

/* Optional members of a line: validation, saving and other work that takes time between steps. */
#define G2ZP_NOTE_LIST(X) \
  X(val_loss) X(val_ms) X(save_ms) X(sample_ms) X(eval) X(eval_loss) X(eval_acc_norm) X(eval_ms)

#define G2ZP_NAME (6 * NAME_MAX + 1) /* in JSON a byte may become an escape of six bytes */

/* A line of metrics.jsonl. A member that the line lacks is NaN. metrics.step_ms is NaN unless the
 * line is about a step. */
typedef struct g2zp_line {
  g2z_metrics metrics;
#define X(name) double name;
  G2ZP_NOTE_LIST(X)
#undef X
  int target;                   /* 1: this validation is the first to reach --target-loss */
  char val_set[64];             /* names the tokens of a validation; "": not known */
  char eval_file[G2ZP_NAME];    /* "": there is none, or its name is too long */
} g2zp_line;

static double g2zp_json_number_or_null(g2z_json *json) {
  if (g2z_json_peek(json) != 'n') return g2z_json_number(json);
  g2z_json_skip(json);
  return NAN;
}

/* Copies a string. If it is too long for `out`, `out` stays as it is. */
static void g2zp_json_copy(g2z_json *json, char *out, size_t room) {
  const g2z_json_text text = g2z_json_string(json);
  if (text.bytes >= room) return;
  out[g2z_json_unescape(&text, (unsigned char *)out)] = 0;
}

/* Reads line `number` of the file `path`, at text[0..bytes-1]. */
static g2z_status g2zp_line_read(g2z_services *services, const char *path, const char *text,
                                 size_t bytes, size_t number, g2zp_line *line) {
  char sentence[G2Z_ERROR_BYTES], word[300];
  g2z_json json;
  g2z_json_text key;
  memset(line, 0, sizeof *line);
  line->metrics.step = -1;
  line->metrics.step_ms = NAN;
#define X(name) line->name = NAN;
  G2ZP_NOTE_LIST(X)
#undef X
  g2z_json_open(&json, services, "metrics.jsonl", text, bytes);
  if (g2z_json_enter(&json, '{'))
    while (g2z_json_next(&json, '}', &key)) {
#define G2ZP_GET_INTEGER g2z_json_integer
#define G2ZP_GET_NUMBER g2zp_json_number_or_null
#define G2ZP_GET_OPTIONAL g2zp_json_number_or_null
#define X(type, name, meaning) \
      if (g2z_json_is(&key, #name)) line->metrics.name = G2ZP_GET_##type(&json); else
      G2Z_METRIC_LIST(X)
#undef X
#define X(name) if (g2z_json_is(&key, #name)) line->name = g2zp_json_number_or_null(&json); else
      G2ZP_NOTE_LIST(X)
#undef X
      if (g2z_json_is(&key, "eval_file"))
        g2zp_json_copy(&json, line->eval_file, sizeof line->eval_file);
      else if (g2z_json_is(&key, "val_set"))
        g2zp_json_copy(&json, line->val_set, sizeof line->val_set);
      else {
        if (g2z_json_is(&key, "target")) line->target = g2z_json_peek(&json) == 't';
        g2z_json_skip(&json);
      }
    }
  g2z_status status = g2z_json_close(&json);
  if (status == G2Z_OK && line->metrics.step < 0)
    status = g2z_fail(services, G2Z_FORMAT, "it has no \"step\"");
  if (status == G2Z_OK) return G2Z_OK;
  memcpy(sentence, services->error, sizeof sentence);
  return g2z_fail(services, status, "%.200s, line %zu is damaged or not from a run: %.250s. To "
                  "delete the line: sed -i %zud %s", path, number, sentence, number,
                  g2z_shell_word(path, word, sizeof word));
}

/* ----- TensorBoard's events ----- */

#define G2ZP_EVENT_BYTES 4096 /* longest payload of an event */

struct g2z_events {
  g2z_services *services;
  g2z_writer *writer;
};

/* Appends a protobuf field at `to`; returns the field's end. type 0: `count` itself, as a varint;
 * 1: eight bytes; 5: four bytes; 2: the length `count`, then `count` bytes. */
static unsigned char *g2zp_event_field(unsigned char *to, int field, int type, const void *bytes,
                                       uint64_t count) {
  *to++ = (unsigned char)(field << 3 | type);
  if (type == 0 || type == 2) {
    uint64_t value = count;
    for (; value >= 128; value >>= 7) *to++ = (unsigned char)(value | 128);
    *to++ = (unsigned char)value;
  }
  if (type == 0) return to;
  memcpy(to, bytes, (size_t)count);
  return to + count;
}

/* Writes a record in the format of tensorflow/core/lib/io/record_writer.h: the length of the event
 * as u64, the masked CRC-32C of these eight bytes, the event as protobuf Event { wall_time, step,
 * `field` }, and the masked CRC-32C of the event. */
static g2z_status g2zp_event_write(g2z_events *e, int64_t step, int field, const void *bytes,
                                   size_t count) {
  unsigned char data[G2ZP_EVENT_BYTES + 64], *end = data;
  struct timespec now;
  G2Z_ASSERT(count <= G2ZP_EVENT_BYTES);
  clock_gettime(CLOCK_REALTIME, &now);
  const double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
  end = g2zp_event_field(end, 1, 1, &seconds, sizeof seconds);
  end = g2zp_event_field(end, 2, 0, NULL, (uint64_t)step);
  end = g2zp_event_field(end, field, 2, bytes, count);
  const uint64_t length = (uint64_t)(end - data);
  const struct {
    const void *bytes;
    size_t size;
  } parts[] = {{&length, sizeof length}, {data, (size_t)length}};
  for (size_t i = 0; i < G2Z_COUNT(parts); i++) {
    uint32_t sum = g2z_crc32c(0, parts[i].bytes, parts[i].size);
    sum = (sum >> 15 | sum << 17) + 0xa282ead8u;
    g2z_writer_put(e->writer, parts[i].bytes, parts[i].size);
    g2z_writer_put(e->writer, &sum, sizeof sum);
  }
  return g2z_writer_flush(e->writer);
}

typedef struct g2zp_scalar {
  const char *name;                  /* TensorBoard's tag */
  double value;
} g2zp_scalar;

static g2z_status g2zp_event_scalars(g2z_events *e, int64_t step, const g2zp_scalar *scalars,
                                     int count) {
  unsigned char sum[G2ZP_EVENT_BYTES], *end = sum; /* Summary { repeated Value } */
  for (const g2zp_scalar *scalar = scalars; scalar < scalars + count; scalar++) {
    unsigned char one[G2ZP_NAME + 64], *to = one; /* Value { tag, simple_value } */
    const float value = (float)scalar->value;
    to = g2zp_event_field(to, 1, 2, scalar->name, strlen(scalar->name));
    to = g2zp_event_field(to, 2, 5, &value, sizeof value);
    G2Z_ASSERT(to - one + 8 <= sum + sizeof sum - end);
    end = g2zp_event_field(end, 1, 2, one, (uint64_t)(to - one));
  }
  return g2zp_event_write(e, step, 5, sum, (size_t)(end - sum));
}

static g2z_status g2zp_event_line(g2z_events *e, const g2zp_line *line) {
  enum { INTEGER, NUMBER, OPTIONAL };
#define X(type, name, meaning) {{"train/" #name, (double)line->metrics.name}, type},
  const struct {
    g2zp_scalar scalar;
    int type;
  } metrics[] = {G2Z_METRIC_LIST(X)};
#undef X
  const int64_t step = line->metrics.step;
  g2zp_scalar known[G2Z_COUNT(metrics)];
  char tag[G2ZP_NAME + 8];
  int count = 0;
  if (!isnan(line->metrics.step_ms)) { /* the first metric is the step itself */
    for (size_t i = 1; i < G2Z_COUNT(metrics); i++)
      if (metrics[i].type != OPTIONAL || !isnan(metrics[i].scalar.value))
        known[count++] = metrics[i].scalar;
    return g2zp_event_scalars(e, step, known, count);
  }
  const g2zp_scalar validation = {"val/loss", line->val_loss}, evaluation = {tag, line->eval_loss};
  if (!isnan(line->val_ms)) return g2zp_event_scalars(e, step, &validation, 1);
  if (isnan(line->eval)) return G2Z_OK;
  snprintf(tag, sizeof tag, "eval/%s", line->eval_file);
  return g2zp_event_scalars(e, step, &evaluation, 1);
}

/* Writes the events of the lines that metrics.jsonl has from `first_step` on. A damaged line is
 * passed over here: g2z_report_run refuses it with its number. */
static g2z_status g2zp_events_again(g2z_events *e, const char *path, int64_t first_step) {
  char *text;
  size_t bytes;
  int there;
  g2z_status status = G2Z_OK;
  G2Z_TRY(g2z_is_there(e->services, path, &there));
  if (!there) return G2Z_OK;
  G2Z_TRY(g2z_read_file(e->services, path, (size_t)1 << 40, &text, &bytes));
  for (char *at = text, *end; (end = strchr(at, '\n')) != NULL && status == G2Z_OK; at = end + 1) {
    g2zp_line line;
    if (g2zp_line_read(e->services, path, at, (size_t)(end - at), 0, &line) == G2Z_OK &&
        line.metrics.step >= first_step)
      status = g2zp_event_line(e, &line);
  }
  g2z_release(e->services, text);
  return status;
}

G2Z_API g2z_status g2z_events_create(g2z_services *services, const char *run_dir,
                                     int64_t first_step, g2z_events **out) {
  g2z_events *e;
  char host[128] = "";
  *out = NULL;
  G2Z_TRY(g2zp_check_directory(services, run_dir));
  gethostname(host, sizeof host - 1);
  /* TensorBoard reads files by name: this one must be the last, even if the clock was set back. */
  long long seconds = (long long)time(NULL), other;
  DIR *listing = opendir(run_dir);
  for (struct dirent *entry; listing && (entry = readdir(listing)) != NULL;)
    if (sscanf(entry->d_name, "events.out.tfevents.%10lld.", &other) == 1 && other >= seconds)
      seconds = other + 1;
  if (listing) closedir(listing);
  const g2z_path path = g2z_path_in(run_dir, "events.out.tfevents.%010lld.%s", seconds, host);
  G2Z_TRY(G2Z_NEW(services, 1, &e));
  e->services = services;
  g2z_status status = g2z_writer_create(services, path.text, &e->writer);
  /* Write the version that TensorBoard expects, then SessionLog { status: START } at the first step
   * that this file replaces. TensorBoard takes the first START of all files for the run's
   * beginning; only later ones make it drop values. So the first file needs a START, too. */
  if (status == G2Z_OK) status = g2zp_event_write(e, 0, 3, "brain.Event:2", 13);
  if (status == G2Z_OK) status = g2zp_event_write(e, first_step, 7, "\x08\x01", 2);
  if (status == G2Z_OK) status = g2z_writer_commit(e->writer);
  if (status == G2Z_OK)
    status = g2zp_events_again(e, g2z_path_in(run_dir, "metrics.jsonl").text, first_step);
  if (status != G2Z_OK) g2z_events_free(e);
  else *out = e;
  return status;
}

G2Z_API g2z_status g2z_events_put(g2z_events *e, const char *text) {
  g2zp_line line;
  G2Z_TRY(g2zp_line_read(e->services, "metrics.jsonl", text, strlen(text), 0, &line));
  return g2zp_event_line(e, &line);
}

G2Z_API void g2z_events_free(g2z_events *e) {
  if (!e) return;
  g2z_writer_free(e->writer);
  g2z_release(e->services, e);
}

/* ----- the report of a run ----- */

/* The columns of a run's curves, as X(group, name). Each column has one value per member of its
 * group: per step, per validation, and so on. */
#define G2ZP_METRIC_COLUMN(type, name, meaning) X(STEPS, name)
#define G2ZP_COLUMN_LIST                                                                   \
  G2Z_METRIC_LIST(G2ZP_METRIC_COLUMN)                                                      \
  X(STEPS, skips)             /* number of skipped steps so far */                         \
  X(STEPS, time_s)            /* time of all steps so far */                               \
  X(STEPS, smooth)            /* exponential mean of the loss; NaN in under 100 steps */   \
  X(VALIDATIONS, val_step)                                                                 \
  X(VALIDATIONS, val_tokens)                                                               \
  X(VALIDATIONS, val_time_s)                                                               \
  X(VALIDATIONS, val_loss)                                                                 \
  X(VALIDATIONS, val_measure) /* runs are compared by it; NaN before validation `first` */ \
  X(TARGETS, target_step)     /* step of the validation that reached --target-loss */      \
  X(TARGETS, target_loss)                                                                  \
  X(LOST, lost_step)          /* step of a loss that is not finite, or of its validation */ \
  X(LOST, lost_loss)          /* 0: a chart marks the step alone */                        \
  X(EVALUATIONS, eval_step)                                                                \
  X(EVALUATIONS, eval_loss_0) /* loss on the first file of --eval */                       \
  X(EVALUATIONS, eval_loss_1)                                                              \
  X(EVALUATIONS, eval_loss_2)                                                              \
  X(EVALUATIONS, eval_acc_0)  /* accuracy on the first file of --eval */                   \
  X(EVALUATIONS, eval_acc_1)                                                               \
  X(EVALUATIONS, eval_acc_2)

enum {
#define X(group, name) G2ZP_COLUMN_##name,
  G2ZP_COLUMN_LIST
#undef X
  G2ZP_COLUMNS
};
enum { G2ZP_STEPS, G2ZP_VALIDATIONS, G2ZP_TARGETS, G2ZP_LOST, G2ZP_EVALUATIONS, G2ZP_GROUPS };
static const int g2zp_group_of[G2ZP_COLUMNS] = {
#define X(group, name) G2ZP_##group,
    G2ZP_COLUMN_LIST
#undef X
};
/* The column with the steps of each group: the x axis of the group's other columns. */
static const int g2zp_step_column[G2ZP_GROUPS] = {G2ZP_COLUMN_step, G2ZP_COLUMN_val_step,
                                                  G2ZP_COLUMN_target_step, G2ZP_COLUMN_lost_step,
                                                  G2ZP_COLUMN_eval_step};
/* The columns of the first three files of --eval: a page shows only these. */
static const struct { int loss, accuracy; } g2zp_eval_files[] = {
    {G2ZP_COLUMN_eval_loss_0, G2ZP_COLUMN_eval_acc_0},
    {G2ZP_COLUMN_eval_loss_1, G2ZP_COLUMN_eval_acc_1},
    {G2ZP_COLUMN_eval_loss_2, G2ZP_COLUMN_eval_acc_2}};

typedef struct g2zp_curves {
  double *column[G2ZP_COLUMNS];      /* [count of its group]; column[0] is the allocation of all */
  size_t count[G2ZP_GROUPS];
  char val_set[64];                  /* names the tokens of the last validation */
  size_t first;                      /* this and all later validations have the tokens val_set */
  size_t best;                       /* the validation with the lowest loss, from `first` on */
  size_t reached;                    /* the first validation that reached the level at which runs
                                      * are compared. If none did, or if another run trained the
                                      * first steps, it is at least count[G2ZP_VALIDATIONS] */
  double per_nat;                    /* val_measure divided by val_loss */
  char eval_name[G2ZP_COLUMNS][96];  /* names of the columns of --eval; other names are "" */
  double spent_s[6];                 /* in the order of g2zp_spent_names */
} g2zp_curves;

static const char *const g2zp_spent_names[] = {"training", "waiting for tokens", "validation",
                                               "checkpoints", "samples", "evaluation"};

/* The curve of column y over the steps. */
static g2z_series g2zp_curve(const g2zp_curves *curves, const char *name, int y) {
  const int group = g2zp_group_of[y];
  const g2z_series series = {name, curves->column[g2zp_step_column[group]], curves->column[y], NULL,
                             NULL, curves->count[group], G2Z_MARK_LINE};
  return series;
}

#define X(name) G2ZP_COLUMN_##name
/* Puts the charts of a run's page. A chart whose values never vary is not drawn: its values become
 * facts in the head of the page. `head` 1: puts only these facts; 0: puts only charts. */
static void g2zp_page_curves(g2z_page *page, const g2zp_curves *curves, int head) {
  enum { AUTO = G2Z_AXIS_AUTO, ZERO = G2Z_AXIS_ZERO };
  static const struct {
    const char *title, *about;
    int axis, y[5];                  /* y: columns; 0: none */
    const char *names[5];            /* names of the columns; NULL: see g2zp_curves.eval_name */
  } charts[] = {
      {"Loss", "nats per token", AUTO,
       {X(loss), X(smooth), X(val_loss), X(target_loss), X(lost_loss)},
       {"training", "smoothed", "validation", "target", "not finite"}},
      {"Loss of --eval", "nats per token", AUTO,
       {X(eval_loss_0), X(eval_loss_1), X(eval_loss_2)}, {NULL}},
      {"Accuracy of --eval", "normalised", AUTO,
       {X(eval_acc_0), X(eval_acc_1), X(eval_acc_2)}, {NULL}},
      {"Learning rate", NULL, ZERO, {X(lr)}, {"learning rate"}},
      {"Gradient norm", "before clipping", AUTO, {X(grad_norm)}, {"gradient norm"}},
      {"Loss scale", NULL, AUTO, {X(loss_scale)}, {"loss scale"}},
      {"Skipped steps", "so far", ZERO, {X(skips)}, {"skipped steps"}},
      {"Throughput", "tokens per second, all ranks", ZERO, {X(tok_s)}, {"tokens per second"}},
      {"Utilisation", "share of the device's peak", ZERO, {X(mfu)}, {"model flops utilisation"}},
      {"Waiting", "ms per step", ZERO, {X(exposed_comm_ms), X(data_ms)},
       {"exposed communication, ms", "tokens, ms"}},
      {"Memory", "GiB per device, as planned", ZERO, {X(mem_gib)},
       {"planned memory per device, GiB"}}};
  for (size_t n = 0; n < G2Z_COUNT(charts); n++) {
    g2z_series series[5];
    double constant[5];
    int count = 0, varies = 0;
    for (int i = 0; i < 5 && charts[n].y[i]; i++) {
      const int y = charts[n].y[i];
      int same = 1;                  /* all known values are equal */
      g2z_series *s = &series[count];
      *s = g2zp_curve(curves, charts[n].names[i], y);
      if (!s->name) s->name = curves->eval_name[y];
      if (s->count <= 64) s->mark = G2Z_MARK_POINTS;
      else if (y == X(loss) && s->count >= 100) s->mark = G2Z_MARK_FAINT;
      constant[count] = NAN;
      for (size_t k = 0; k < s->count; k++) {
        if (isnan(constant[count])) constant[count] = s->y[k];
        if (!isnan(s->y[k]) && s->y[k] != constant[count]) same = 0;
      }
      if (y == X(lost_loss)) s->mark = G2Z_MARK_CROSS;
      if (!same || (y == X(lost_loss) && s->count)) varies = 1;
      if (!isnan(constant[count])) count++; /* leaves out a column without a known value */
    }
    const g2z_chart chart = {charts[n].title, charts[n].about, "step", NULL, series, count,
                             G2Z_AXIS_AUTO, (g2z_axis)charts[n].axis};
    for (int k = 0; k < count && head && !varies; k++)
      g2zp_page_number(page, series[k].name, constant[k]);
    if (!head && varies) g2z_page_chart(page, &chart);
  }
}
#undef X

/* Reads all of metrics.jsonl. */
static g2z_status g2zp_curves_read(g2z_services *services, const char *run_dir,
                                   g2zp_curves *c) {
#define AT(name) c->column[G2ZP_COLUMN_##name][c->count[g2zp_group_of[G2ZP_COLUMN_##name]]]
  const g2z_path path = g2z_path_in(run_dir, "metrics.jsonl");
  char *text;
  double *values = NULL, time_s = 0, skips = 0, sum = 0, weight = 0;
  size_t bytes = 0, lines = 0;
  memset(c, 0, sizeof *c);
  g2z_status status = g2z_read_file(services, path.text, (size_t)1 << 40, &text, &bytes);
  for (size_t i = 0; i < bytes; i++) lines += text[i] == '\n';
  if (status == G2Z_OK)
    status = g2z_allocate(services, lines, G2ZP_COLUMNS * sizeof(double), &values);
  for (size_t i = 0; i < G2ZP_COLUMNS && values; i++) c->column[i] = values + i * lines;
  const char *at = text;             /* an incomplete last line is not read: a run is writing it */
  for (size_t number = 1; number <= lines && status == G2Z_OK; number++) {
    const char *end = (const char *)memchr(at, '\n', bytes - (size_t)(at - text));
    g2zp_line line;
    const g2z_metrics *m = &line.metrics;
    status = g2zp_line_read(services, path.text, at, (size_t)(end - at), number, &line);
    at = end + 1;
    if (status != G2Z_OK) break;

    /* Add the line to columns and sums. */
    const double ms[] = {m->step_ms - m->data_ms, m->data_ms, line.val_ms, line.save_ms,
                         line.sample_ms, line.eval_ms};
    const int is_step = !isnan(m->step_ms);
    int part = 2;                    /* the first two are only in lines about a step */
    if (is_step) part = 0;
    for (; part < (int)G2Z_COUNT(ms); part++)
      if (isfinite(ms[part])) c->spent_s[part] += ms[part] * 1e-3;
    const int masked = m->grad_norm == 0; /* the step has no target that counts, and so no loss */
    if ((is_step && isnan(m->loss) && !masked) ||
        (!isnan(line.val_ms) && isnan(line.val_loss))) {
      AT(lost_step) = (double)m->step;
      AT(lost_loss) = 0;
      c->count[G2ZP_LOST]++;
    }
    if (!isnan(line.val_loss)) {
      if (line.target && !c->count[G2ZP_TARGETS]) {
        AT(target_step) = (double)m->step;
        AT(target_loss) = line.val_loss;
        c->count[G2ZP_TARGETS] = 1;
      }
      AT(val_step) = (double)m->step;
      AT(val_tokens) = (double)m->tokens;
      AT(val_time_s) = time_s;
      AT(val_loss) = line.val_loss;
      if (strcmp(c->val_set, line.val_set) != 0) c->first = c->best = c->count[G2ZP_VALIDATIONS];
      memcpy(c->val_set, line.val_set, sizeof c->val_set);
      if (!(c->column[G2ZP_COLUMN_val_loss][c->best] <= line.val_loss))
        c->best = c->count[G2ZP_VALIDATIONS];
      c->count[G2ZP_VALIDATIONS]++;
    }
    if (line.eval == 0) { /* an evaluation begins with the first file; other files follow */
      for (int i = 0; i < G2ZP_COLUMNS; i++)
        if (g2zp_group_of[i] == G2ZP_EVALUATIONS) c->column[i][c->count[G2ZP_EVALUATIONS]] = NAN;
      AT(eval_step) = (double)m->step;
      c->count[G2ZP_EVALUATIONS]++;
    }
    if (line.eval >= 0 && line.eval < G2Z_COUNT(g2zp_eval_files) && c->count[G2ZP_EVALUATIONS]) {
      const size_t last = c->count[G2ZP_EVALUATIONS] - 1;
      const int loss = g2zp_eval_files[(int)line.eval].loss;
      const int accuracy = g2zp_eval_files[(int)line.eval].accuracy;
      c->column[loss][last] = line.eval_loss;
      c->column[accuracy][last] = line.eval_acc_norm;
      snprintf(c->eval_name[loss], sizeof *c->eval_name, "loss, %.80s", line.eval_file);
      snprintf(c->eval_name[accuracy], sizeof *c->eval_name, "accuracy, %.80s", line.eval_file);
    }
    if (!is_step) continue;
    if (!c->count[G2ZP_STEPS] && m->step > 1) { /* another run trained the first steps */
      time_s = NAN;
      c->reached = SIZE_MAX;
    }
    skips += m->skipped != 0;
    time_s += m->step_ms * 1e-3;
#define X(type, name, meaning) AT(name) = (double)m->name;
    G2Z_METRIC_LIST(X)
#undef X
    AT(time_s) = time_s;
    AT(skips) = skips;
    c->count[G2ZP_STEPS]++;
  }
  /* An exponential mean: its window is about a fiftieth of all steps. Dividing by `weight` makes it
   * begin with the first loss. A skipped step may have no finite loss. */
  const size_t steps = c->count[G2ZP_STEPS];
  const double keep = steps < 100 ? NAN : 1 - 50.0 / (double)steps;
  for (size_t i = 0; i < steps && status == G2Z_OK; i++) {
    const double loss = c->column[G2ZP_COLUMN_loss][i];
    if (isfinite(loss)) {
      sum = keep * sum + (1 - keep) * loss;
      weight = keep * weight + (1 - keep);
    }
    c->column[G2ZP_COLUMN_smooth][i] = sum / weight;
  }
  g2z_release(services, text);
  return status;
#undef AT
}

enum {                               /* bits: uses of a run's fact, besides the head of its page */
  G2ZP_COMPARED = 1,                 /* a setting: a column of the table that compares runs */
  G2ZP_OF_LOSS = 2,                  /* a loss depends on the fact */
  G2ZP_OF_TEXT = 4,                  /* bits per byte depend on the fact: it describes the text */
  G2ZP_MEASURED = 8                  /* a result: a column after the settings */
};
typedef struct g2zp_fact {           /* a fact or a table's column, read from JSON */
  const char *name, *at, *launcher;  /* launcher: place in launcher_metadata.json; NULL: none */
  const char *format;                /* of the number times `factor`; see g2zp_number_text */
  double factor;
  int uses;                          /* bits above; 0 in a column of a table */
} g2zp_fact;

/* The facts in the head of a run's page. They come from training_metrics.json if the run has
 * written it, else from launcher_metadata.json. */
static const g2zp_fact g2zp_run_facts[] = {
    {"tokens/s", "summary.mean_tokens_per_sec_global", NULL, NULL, 1, G2ZP_MEASURED},
    {"wall s", "summary.total_wall_time_sec", NULL, NULL, 1, G2ZP_MEASURED},
    {"p50 ms", "epochs.last.step_time_p50_sec", NULL, "%.2f", 1e3, G2ZP_MEASURED},
    {"p95 ms", "epochs.last.step_time_p95_sec", NULL, "%.2f", 1e3, G2ZP_MEASURED},
    {"model", "training_config.model_name", NULL, NULL, 1, G2ZP_COMPARED},
    {"size", "training_config.model_size", NULL, NULL, 1, G2ZP_COMPARED},
    {"parameters", "training_config.parameters", NULL, NULL, 1, G2ZP_COMPARED},
    {"GPU", "hardware.gpu_name", NULL, NULL, 1, G2ZP_COMPARED},
    {"ranks", "hardware.world_size", "world_size", NULL, 1, G2ZP_COMPARED},
    {"strategy", "training_config.strategy", NULL, NULL, 1, G2ZP_COMPARED},
    {"ZeRO stage", "training_config.zero_stage", NULL, NULL, 1, G2ZP_COMPARED},
    {"precision", "training_config.precision", NULL, NULL, 1, G2ZP_COMPARED},
    {"fp8", "training_config.fp8", NULL, NULL, 1, G2ZP_COMPARED},
    {"recompute", "training_config.recompute", NULL, NULL, 1, G2ZP_COMPARED},
    {"data", "training_config.dataset_name", NULL, NULL, 1, G2ZP_COMPARED},
    {"sequences per rank and micro-step", "training_config.micro_batch_size_per_gpu", NULL, NULL,
     1, G2ZP_COMPARED},
    {"micro-steps", "training_config.grad_accum_steps", NULL, NULL, 1, G2ZP_COMPARED},
    {"sequences per step", "training_config.global_batch_size", NULL, NULL, 1, G2ZP_COMPARED},
    {"optimizer", "training_config.optimizer", NULL, NULL, 1, G2ZP_COMPARED},
    {"moments", "training_config.moments", NULL, NULL, 1, G2ZP_COMPARED},
    {"peak learning rate", "training_config.lr", NULL, NULL, 1, G2ZP_COMPARED},
    {"AdamW's peak learning rate", "training_config.adam_lr", NULL, NULL, 1, G2ZP_COMPARED},
    {"tokens per sequence", "training_config.seq_len", NULL, NULL, 1, G2ZP_COMPARED | G2ZP_OF_LOSS},
    {"vocabulary", "training_config.vocab_hash", NULL, NULL, 1, G2ZP_OF_LOSS},
    {"validation tokens", "validation.tokens", NULL, NULL, 1, G2ZP_OF_LOSS},
    {"validation shards", "validation.shards_hash", NULL, NULL, 1, G2ZP_OF_LOSS},
    {"bytes of validation text", "validation.bytes", NULL, NULL, 1, G2ZP_OF_TEXT},
    {"validation text", "validation.text_hash", NULL, NULL, 1, G2ZP_OF_TEXT},
    {"best validation loss", "summary.best_val_loss", NULL, NULL, 1, 0},
    {"best bits per byte", "summary.best_val_bits_per_byte", NULL, NULL, 1, 0},
    {"target loss", "summary.target_loss", NULL, NULL, 1, 0},
    {"step of the target loss", "summary.target_step", NULL, NULL, 1, 0},
    {"tokens to the target loss", "summary.target_tokens", NULL, NULL, 1, 0},
    {"wall s to the target loss", "summary.target_seconds", NULL, NULL, 1, 0},
    {"stopped early at step", "summary.early_stop_step", NULL, NULL, 1, 0},
    {"host", "host.hostname", "rank0_host", NULL, 1, 0},
    {"launcher", NULL, "launcher", NULL, 1, 0},
    {"system", "host.os", NULL, NULL, 1, 0},
    {"CUDA", "env.cuda_version", NULL, NULL, 1, 0},
    {"NCCL", "env.nccl_version", NULL, NULL, 1, 0},
    {"started", "timestamp_utc", "timestamp_utc", NULL, 1, 0},
    {"commit", "git_commit", "git_commit", NULL, 1, G2ZP_COMPARED},
    {"command", "command_line", "command_line", NULL, 1, 0}};

static const g2zp_fact g2zp_epoch_columns[] = {
    {"epoch", "epoch_idx", NULL, NULL, 1, 0},
    {"steps", "steps", NULL, NULL, 1, 0},
    {"tokens", "tokens_processed_global", NULL, NULL, 1, 0},
    {"tokens/s", "tokens_per_sec_global", NULL, NULL, 1, 0},
    {"training loss", "train_loss_avg_global", NULL, "%.4f", 1, 0},
    {"validation loss", "val_loss_avg_global", NULL, "%.4f", 1, 0},
    {"step p50, ms", "step_time_p50_sec", NULL, "%.2f", 1e3, 0},
    {"step p95, ms", "step_time_p95_sec", NULL, "%.2f", 1e3, 0},
    {"wall time, s", "epoch_wall_time_sec", NULL, "%.1f", 1, 0}};

static const g2zp_fact g2zp_mixture_columns[] = {
    {"training shards", "shards", NULL, NULL, 1, 0},
    {"weight, %", "weight", NULL, "%.3f", 100, 0},
    {"sequences, %", "share", NULL, "%.3f", 100, 0},
    {"tokens", "tokens", NULL, NULL, 1, 0},
    {"passes", "passes", NULL, "%.3f", 1, 0}};

/* The text or the number at fact->at; "": there is neither. */
static const char *g2zp_object_cell(char cell[G2ZP_CELL], const g2z_object *object,
                                    const g2zp_fact *fact) {
  g2z_object_copy(object, fact->at, cell, G2ZP_CELL);
  if (*cell) return cell;
  return g2zp_number_text(cell, fact->format, g2z_object_number(object, fact->at) * fact->factor);
}

/* Puts a heading and a table with one row per object of the list at `at`. Without objects puts
 * nothing. */
static void g2zp_page_list(g2z_page *page, const char *heading, const g2z_object *object,
                           const char *at, const g2zp_fact *columns, int count) {
  const char *headers[G2Z_COUNT(g2zp_epoch_columns)];
  char cell[G2ZP_CELL];
  g2z_object row;
  g2z_json json;
  if (!g2z_object_list(object, at, &json)) return;
  for (int rows = 0; g2z_object_next(object, &json, &row); rows++) {
    for (int c = 0; c < count; c++) headers[c] = columns[c].name;
    if (!rows) g2z_page_heading(page, heading);
    if (!rows) g2z_page_table(page, count, headers);
    for (int c = 0; c < count; c++)
      g2z_page_cell(page, "%s", g2zp_object_cell(cell, &row, &columns[c]));
  }
}

#define G2ZP_END_LIST(X)                                                              \
  X(COMPLETED, "completed")                                                           \
  X(STOPPED,   "stopped")    /* by a signal or a request, with a checkpoint */        \
  X(NOT_ENDED, "not ended")  /* it runs, or was killed */                             \
  X(DIVERGED,  "diverged")                                                            \
  X(FAILED,    "failed")
typedef enum g2zp_end {              /* how a run ended */
#define X(name, text) G2ZP_##name,
  G2ZP_END_LIST(X)
#undef X
} g2zp_end;
#define X(name, text) text,
static const char *const g2zp_ends[] = {G2ZP_END_LIST(X)};
#undef X

/* A run, and the contents of its files. */
struct g2zp_run {
  g2z_path directory;
  const char *name;                  /* the part of the directory that distinguishes the run */
  g2zp_curves curves;
  g2z_object metrics, launcher, failure;
  char *sample;                      /* the text that the model generated last; NULL: none */
  char *log;                         /* train.log; NULL: none */
  char command[G2ZP_TEXT];           /* the last start's; "": not known */
  g2zp_end end;
  char why[2048];                    /* more about the end; may be "" */
};

static void g2zp_run_free(g2z_services *services, g2zp_run *run) {
  g2z_release(services, run->curves.column[0]);
  g2z_release(services, run->sample);
  g2z_release(services, run->log);
  g2z_object_free(&run->metrics);
  g2z_object_free(&run->launcher);
  g2z_object_free(&run->failure);
}

/* Reads a file of the run. If it does not exist, *out stays NULL. */
static g2z_status g2zp_run_text(g2z_services *services, const char *run_dir, const char *name,
                                char **out) {
  const g2z_path path = g2z_path_in(run_dir, "%s", name);
  size_t bytes;
  int there;
  G2Z_TRY(g2z_is_there(services, path.text, &there));
  if (!there) return G2Z_OK;
  return g2z_read_file(services, path.text, (size_t)1 << 40, out, &bytes);
}

/* Finds how the run ended, and why. If it failed or diverged, the last line of train.log begins
 * with the time, two blanks, and a word for this. */
static void g2zp_run_end(g2zp_run *run) {
  static const struct {
    const char *word;
    g2zp_end end;
  } words[] = {{"  failed: ", G2ZP_FAILED}, {"  diverged: ", G2ZP_DIVERGED}};
  char text[64];
  const char *last = "", *line = run->log; /* last: complete; a run may be writing another line */
  for (const char *end; line && (end = strchr(line, '\n')) != NULL; line = end + 1) last = line;
  last += strcspn(last, " \n");
  for (size_t i = 0; i < G2Z_COUNT(words); i++) {
    const size_t length = strlen(words[i].word);
    if (strncmp(last, words[i].word, length) != 0) continue;
    run->end = words[i].end;
    snprintf(run->why, sizeof run->why, "%.*s", (int)strcspn(last + length, "\n"), last + length);
  }
  if (run->failure.text) {
    run->end = G2ZP_FAILED;
    g2z_object_copy(&run->failure, "sentence", run->why, sizeof run->why);
    if (!*run->why) snprintf(run->why, sizeof run->why, "no reason recorded");
  }
  if (run->end != G2ZP_COMPLETED) return;
  if (!run->metrics.text) {
    run->end = G2ZP_NOT_ENDED;
    snprintf(run->why, sizeof run->why, "no end recorded as of %s", g2z_utc_now().text);
    return;
  }
  g2z_object_copy(&run->metrics, "shutdown.reason", text, sizeof text);
  if (!*text || strcmp(text, "completed") == 0) return;
  if (strcmp(text, "diverged") == 0) {
    run->end = G2ZP_DIVERGED;
    snprintf(run->why, sizeof run->why, "the last losses are worse than guessing");
    return;
  }
  run->end = G2ZP_STOPPED;
  g2z_object_copy(&run->metrics, "shutdown.signal", text, sizeof text);
  if (*text) snprintf(run->why, sizeof run->why, "by %s", text);
  else snprintf(run->why, sizeof run->why, "on request");
}

/* Reads all files except metrics.jsonl and the sample. Free *run with g2zp_run_free, also after a
 * failure. */
static g2z_status g2zp_run_read(g2z_services *services, const char *directory, g2zp_run *run) {
  memset(run, 0, sizeof *run);
  run->metrics.services = run->launcher.services = run->failure.services = services;
  run->directory = g2z_path_in(directory, "metrics.jsonl");
  for (char *slash; (slash = strrchr(run->directory.text, '/')) != NULL;) {
    *slash = 0;                      /* cuts off the file, and slashes at the directory's end */
    if (slash == run->directory.text || slash[-1] != '/') break;
  }
  run->name = run->directory.text;
  G2Z_TRY(g2zp_read_run(services, directory, &run->metrics));
  G2Z_TRY(g2z_object_read(services, g2z_path_in(directory, "launcher_metadata.json").text,
                          &run->launcher));
  G2Z_TRY(g2z_object_read(services, g2z_path_in(directory, "RUN_FAILED.json").text,
                          &run->failure));
  G2Z_TRY(g2zp_run_text(services, directory, "train.log", &run->log));
  g2z_object_copy(&run->launcher, "command_line", run->command, sizeof run->command);
  if (!*run->command)
    g2z_object_copy(&run->metrics, "command_line", run->command, sizeof run->command);
  g2zp_run_end(run);
  return G2Z_OK;
}

/* Puts a table of the settings that a resume changed. train.log has one line per setting, "TIME
 * [warning: ]NAME changed since the checkpoint: OLD -> NEW[; MORE]". After these lines comes "TIME
 * resumed after step N, from ...". Each line is copied before sscanf reads it: sscanf first looks
 * for the end of its text, and the log has a line per step. */
static void g2zp_page_resumes(g2z_page *page, const char *log) {
  static const char *const headers[] = {"setting", "resumed after step", "before", "since then"};
  static const char warning[] = "warning: ", resumed[] = "  resumed after step ";
  int rows = 0;
  for (const char *begin = log, *end; (end = strstr(begin, resumed)) != NULL; begin = end + 1) {
    const int64_t step = strtoll(end + strlen(resumed), NULL, 10);
    size_t length;
    for (const char *line = begin; line < end; line += length + 1) {
      char copy[512], name[96], old[64], now[64];
      length = strcspn(line, "\n");
      snprintf(copy, sizeof copy, "%.*s", (int)(length < sizeof copy ? length : 0), line);
      const char *text = copy + strcspn(copy, " ");
      if (strncmp(text, "  ", 2) != 0) continue;
      text += 2;
      if (strncmp(text, warning, strlen(warning)) == 0) text += strlen(warning);
      if (sscanf(text, "%95[^:]: %63s -> %63[^;]", name, old, now) != 3) continue;
      char *verb = strstr(name, " changed since the checkpoint");
      if (!verb) continue;
      *verb = 0;
      if (rows == 0) {
        g2z_page_heading(page, "Settings that a resume changed");
        g2z_page_text(page, "The settings above are from the run's last start.");
        g2z_page_table(page, (int)G2Z_COUNT(headers), headers);
      }
      g2z_page_cell(page, "%s", name);
      g2z_page_cell(page, "%" PRId64, step);
      g2z_page_cell(page, "%s", old);
      g2z_page_cell(page, "%s", now);
      rows++;
    }
  }
}

/* Puts the commands for what to do next, as the last start printed them at its end. */
static void g2zp_page_next(g2z_page *page, const g2zp_run *run) {
  static const char *const begins[] = {
      "warning: the run diverged: ", "To go back to before the divergence, ", "To start again ",
      "To generate text: ", "To continue training: ", "To train these weights further: ",
      "stopped after step "};
  char line[G2ZP_TEXT];
  const char *log = run->log ? run->log : "", *found;
  while ((found = strstr(log, "  resumed after step ")) != NULL) log = found + 1;
  if (run->end == G2ZP_NOT_ENDED || run->end == G2ZP_FAILED) {
    if (*run->command)
      g2z_page_text(page, "If the run has stopped, continue from its last checkpoint: %s%s",
                    run->command, strstr(run->command, " --resume") ? "" : " --resume latest");
    return;
  }
  for (size_t i = 0; i < G2Z_COUNT(begins); i++) {
    snprintf(line, sizeof line, "  %s", begins[i]);
    found = strstr(log, line);
    if (found) g2z_page_text(page, "%.*s", (int)strcspn(found + 2, "\n"), found + 2);
  }
}

/* A time of seconds, such as 1:02:03, 4:05 or 12.3 s. */
static const char *g2zp_time_text(char out[G2ZP_CELL], double seconds) {
  const long long whole = (long long)rint(fmin(fmax(seconds, 0), 1e15));
  out[0] = 0;
  if (isnan(seconds)) return out;
  if (seconds < 60) {
    g2zp_number_text(out, "%.1f", seconds);
    strcat(out, " s");
  } else if (whole < 3600) snprintf(out, G2ZP_CELL, "%lld:%02lld", whole / 60, whole % 60);
  else
    snprintf(out, G2ZP_CELL, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
  return out;
}

/* Puts what a reader looks for first: the best validation loss, the rate, the time, the result. */
static void g2zp_page_figures(g2z_page *page, const g2zp_run *run) {
  const g2zp_curves *c = &run->curves;
  const char *const rate_at = "summary.mean_tokens_per_sec_global";
  double rate = g2z_object_number(&run->metrics, rate_at);
  double time_s = g2z_object_number(&run->metrics, "summary.total_wall_time_sec");
  char cell[G2ZP_CELL], more[G2ZP_CELL], note[G2ZP_CELL], perplexity[64] = "";
  const size_t steps = c->count[G2ZP_STEPS];
  if (c->count[G2ZP_VALIDATIONS]) {
    const double loss = c->column[G2ZP_COLUMN_val_loss][c->best];
    if (exp(loss) < 1e6) snprintf(perplexity, sizeof perplexity, "perplexity %.40s, ",
                                  g2zp_number_text(cell, "%.2f", exp(loss)));
    snprintf(note, sizeof note, "%sstep %.40s", perplexity,
             g2zp_number_text(more, "%.0f", c->column[G2ZP_COLUMN_val_step][c->best]));
    g2z_page_figure(page, "best validation loss", note, "%s",
                    g2zp_loss_text(cell, loss));
  } else if (steps) {
    g2z_page_figure(page, "loss of the last step", "no validation", "%s",
                    g2zp_loss_text(cell, c->column[G2ZP_COLUMN_loss][steps - 1]));
  }
  if (!run->metrics.text && steps) { /* no end: from the steps so far */
    rate = c->column[G2ZP_COLUMN_tok_s][steps - 1];
    time_s = c->column[G2ZP_COLUMN_time_s][steps - 1];
  }
  if (!isnan(rate)) g2z_page_figure(page, "tokens/s", "", "%s", g2zp_number_text(cell, NULL, rate));
  if (steps) {
    snprintf(note, sizeof note, "%.40s steps",
             g2zp_number_text(more, "%.0f", c->column[G2ZP_COLUMN_step][steps - 1]));
    g2z_page_figure(page, "time", note, "%s", g2zp_time_text(cell, time_s));
  }
  g2z_page_figure(page, "result", run->why, "%s", g2zp_ends[run->end]);
  if (c->count[G2ZP_LOST])
    g2z_page_lead(page, "The loss was not a finite number %zu time%s, first at step %.0f.",
                  c->count[G2ZP_LOST], G2Z_PLURAL(c->count[G2ZP_LOST]),
                  c->column[G2ZP_COLUMN_lost_step][0]);
}

/* Puts facts from the files, progress, and values that never vary. */
static void g2zp_page_settings(g2z_page *page, const g2zp_run *run) {
  const g2zp_curves *curves = &run->curves;
  const size_t steps = curves->count[G2ZP_STEPS], validations = curves->count[G2ZP_VALIDATIONS];
  char text[G2ZP_TEXT];
  for (const g2zp_fact *fact = g2zp_run_facts;
       fact < g2zp_run_facts + G2Z_COUNT(g2zp_run_facts); fact++) {
    const g2z_object *object = &run->metrics;
    const char *at = fact->at;
    if (!run->metrics.text) { /* the run has not ended */
      object = &run->launcher;
      at = fact->launcher;
    }
    if (!at) continue;
    const double value = g2z_object_number(object, at) * fact->factor;
    g2z_object_copy(object, at, text, sizeof text);
    if (*text) g2z_page_fact(page, fact->name, "%s", text);
    else if (!isnan(value)) g2zp_page_number(page, fact->name, value);
  }
  if (steps)
    g2zp_page_number(page, "loss of the last step", curves->column[G2ZP_COLUMN_loss][steps - 1]);
  if (validations) {
    const double loss = curves->column[G2ZP_COLUMN_val_loss][validations - 1];
    if (curves->first > 0)
      g2zp_page_number(page, "first step of these validation tokens",
                       curves->column[G2ZP_COLUMN_val_step][curves->first]);
    g2zp_page_number(page, "step of the best validation loss",
                     curves->column[G2ZP_COLUMN_val_step][curves->best]);
    g2zp_page_number(page, "last validation loss", loss);
    g2zp_page_number(page, "last perplexity", exp(loss));
  }
  g2zp_page_curves(page, curves, 1);
}

static void g2zp_run_page(g2z_page *page, const g2zp_run *run) {
  const g2zp_curves *curves = &run->curves;
  g2zp_page_figures(page, run);
  g2zp_page_next(page, run);
  g2z_page_fold(page, "All settings and figures");
  g2zp_page_settings(page, run);
  if (run->log) g2zp_page_resumes(page, run->log);

  g2z_page_heading(page, "Curves");
  g2zp_page_curves(page, curves, 0);
  const g2z_series spent = {"seconds", NULL, curves->spent_s, NULL, NULL,
                            G2Z_COUNT(curves->spent_s), G2Z_MARK_LINE};
  const g2z_chart chart = {"Where the time went", "s", NULL, g2zp_spent_names, &spent, 1,
                           G2Z_AXIS_AUTO, G2Z_AXIS_AUTO};
  g2z_page_chart(page, &chart);
  g2zp_page_list(page, "Epochs", &run->metrics, "epochs", g2zp_epoch_columns,
                 G2Z_COUNT(g2zp_epoch_columns));
  g2zp_page_list(page, "Mixture", &run->metrics, "training_config.dataset_mixture",
                 g2zp_mixture_columns, G2Z_COUNT(g2zp_mixture_columns));
  if (run->sample) {
    g2z_page_heading(page, "Sample");
    g2zp_element(page->writer, "<pre>\n", run->sample, "</pre>\n");
  }
}

G2Z_API g2z_status g2z_report_run(g2z_services *services, const char *run_dir) {
  const char *name = run_dir, *slash = strrchr(run_dir, '/');
  char title[300];
  g2zp_run run;
  g2z_page *page = NULL;
  if (slash && slash[1]) name = slash + 1;
  snprintf(title, sizeof title, "Run %.280s", name);
  G2Z_TRY(g2zp_check_directory(services, run_dir));
  g2z_status status = g2zp_run_read(services, run_dir, &run);
  if (status == G2Z_OK) status = g2zp_curves_read(services, run_dir, &run.curves);
  if (status == G2Z_OK) status = g2zp_run_text(services, run_dir, "sample.txt", &run.sample);
  if (status == G2Z_OK)
    status = g2z_page_create(services, g2z_path_in(run_dir, "report.html").text, title, &page);
  if (page) g2zp_run_page(page, &run);
  if (page) status = g2z_page_commit(page);
  g2z_page_free(page);
  g2zp_run_free(services, &run);
  return status;
}

/* ----- profiles ----- */

#define G2ZP_PROFILE_TOP 5

typedef struct g2zp_ranked {         /* a row of a table of `nsys stats` */
  double percent;
  size_t name_at;                    /* position of the name in the line */
  char total[48];                    /* "1234567 ns" */
  char line[1536];
} g2zp_ranked;

typedef struct g2zp_profile {
  g2z_services *services;
  g2zp_ranked top[2][G2ZP_PROFILE_TOP]; /* [0] NVTX ranges, [1] calls of the operating system */
  int count[2];
  g2z_object run[2];                 /* training_metrics.json, launcher_metadata.json */
  struct dirent **entries;           /* files in profiles/ */
  int entry_count;
  const char *run_dir;
  const char *only;                  /* read only this file; NULL: all files */
  const char *inputs;                /* pattern of the files to read */
} g2zp_profile;

/* Reads a number. Removes the commas between its digits. */
static int g2zp_stats_number(g2z_services *services, char text[40], double *value) {
  g2z_json json;
  char *to = text;
  for (const char *from = text; *from; from++)
    if (*from != ',') *to++ = *from;
  *to = 0;
  g2z_json_open(&json, services, "", text, (size_t)(to - text));
  *value = g2z_json_number(&json);
  return g2z_json_close(&json) == G2Z_OK && *value >= 0;
}

/* Reads the text of a file that `nsys stats` printed; changes `text`. A table has a title, a header
 * with "Total Time (ns)", dashes under the columns, and rows such as
 * " 53.9  2,765,967  14,244 ...  PushPop  :train/forward". The last column is the name. */
static g2z_status g2zp_stats_read(g2zp_profile *p, const char *path, char *text) {
  static const char *const titles[] = {"NVTX Range Summary (", "OS Runtime Summary ("};
  int number = 0, kind = -1, tables = 0; /* kind: index of `top`; -1: the table is skipped */
  size_t name_at = 0;                    /* position of the last column; 0: not known */
  char unit[8] = "", share[40], total[40], word[300];
  const char *why = NULL;
  for (char *line = text, *next; line && !why; line = next) {
    next = strchr(line, '\n');
    if (next) *next++ = 0;
    for (size_t end = strlen(line); end && strchr(" \r", line[end - 1]);) line[--end] = 0;
    if (next || *line) number++;
    if (strstr(line, "** ") || strstr(line, "Processing [") || (!*line && name_at)) {
      if (kind >= 0 && !name_at) why = "the table before it has no rows";
      kind = -1;
      if (strstr(line, titles[0])) kind = 0;
      else if (strstr(line, titles[1])) kind = 1;
      if (kind >= 0) tables++;
      name_at = 0;
      unit[0] = 0;
    } else if (!*line || kind < 0) {
      continue;
    } else if (!unit[0]) { /* the header */
      const char *at = strstr(line, "Total Time (");
      int used = 0;
      if (!at || sscanf(at, "Total Time (%7[a-z])%n", unit, &used) != 1 || !used)
        why = "the table's header has no \"Total Time (ns)\"";
    } else if (!name_at) { /* the dashes */
      int columns = 0;
      for (size_t i = 0; line[i]; i++)
        if (line[i] == '-' && (i == 0 || line[i - 1] != '-') && ++columns) name_at = i;
      if (columns < 3) why = "the table has fewer than three columns";
    } else { /* a row */
      g2zp_ranked row = {0, name_at, "", ""}, *top = p->top[kind];
      int at = p->count[kind], *count = &p->count[kind];
      double value;
      snprintf(row.line, sizeof row.line, "%s", line);
      if (strlen(row.line) <= name_at || sscanf(line, "%39s %39s", share, total) != 2 ||
          !g2zp_stats_number(p->services, share, &row.percent) || row.percent > 100 ||
          !g2zp_stats_number(p->services, total, &value)) {
        why = "the row is not a share, a time and a name";
        break;
      }
      snprintf(row.total, sizeof row.total, "%s %s", total, unit);
      while (at > 0 && top[at - 1].percent < row.percent) at--; /* equal shares: in file order */
      if (at == G2ZP_PROFILE_TOP) continue;
      if (*count < G2ZP_PROFILE_TOP) ++*count;
      memmove(&top[at + 1], &top[at], (size_t)(*count - 1 - at) * sizeof row);
      top[at] = row;
    }
  }
  if (!why && kind >= 0 && !name_at) why = "the last table has no rows";
  if (!why && !tables) why = "it has no NVTX Range Summary and no OS Runtime Summary";
  if (!why) return G2Z_OK;
  return g2z_fail(p->services, G2Z_FORMAT, "%.400s, line %d: %s. Make the file again with `nsys "
                  "stats`, or remove it: rm %s", path, number, why,
                  g2z_shell_word(path, word, sizeof word));
}

/* Facts about the run: places in training_metrics.json and in launcher_metadata.json. The second is
 * read if the first file lacks the fact. */
static const struct {
  const char *name, *metrics, *launcher;
} g2zp_profile_facts[] = {
    {"slurm_job_id", "scheduler.job_id", "slurm.SLURM_JOB_ID"},
    {"hosts", NULL, NULL}, /* found in the names of the profile's files */
    {"world_size", "hardware.world_size", "world_size"},
    {"gpu", "hardware.gpu_name", NULL},
    {"cuda", "env.cuda_version", NULL},
    {"seq_length", "training_config.seq_len", NULL},
    {"micro_batch_size_per_gpu", "training_config.micro_batch_size_per_gpu", NULL},
    {"grad_accum_steps", "training_config.grad_accum_steps", NULL},
    {"tokens_per_sec", "summary.mean_tokens_per_sec_global", NULL},
    {"total_wall_time_sec", "summary.total_wall_time_sec", NULL}};

/* The next file of profiles/ after file number *at, with a name that matches `pattern`; NULL:
 * none. */
static const char *g2zp_next_file(const g2zp_profile *p, int *at, const char *pattern) {
  while (++*at < p->entry_count) {
    const char *name = p->entries[*at]->d_name;
    if ((!p->only || strcmp(name, p->only) == 0) && fnmatch(pattern, name, 0) == 0) return name;
  }
  return NULL;
}

/* Puts the names of the files that match `pattern`. `hosts` 1: of each name, puts only the part
 * that matches the star: the host. */
static void g2zp_put_files(const g2zp_profile *p, g2z_json_out *out, const char *key,
                           const char *pattern, int hosts) {
  char text[300];
  const char *name;
  size_t first = 0, last = 0;        /* number of bytes before and after the part to put */
  if (hosts) {
    first = strcspn(pattern, "*");
    last = strlen(pattern) - 1 - first;
  }
  g2z_json_begin(out, key, '[');
  for (int at = -1; (name = g2zp_next_file(p, &at, pattern)) != NULL;) {
    snprintf(text, sizeof text, "%.*s", (int)(strlen(name) - first - last), name + first);
    g2z_json_put_string(out, NULL, text);
  }
  g2z_json_end(out, ']');
}

/* Reads the files of profiles/ and the two JSON files of the run. The caller frees everything. */
static g2z_status g2zp_profile_read(g2zp_profile *p) {
  const g2z_path directory = g2z_path_in(p->run_dir, "profiles");
  const char *name;
  char *text;
  size_t bytes;
  int at = -1, read = 0;
  G2Z_TRY(g2zp_check_directory(p->services, p->run_dir));
  p->entry_count = scandir(directory.text, &p->entries, NULL, alphasort);
  if (p->entry_count < 0) p->entry_count = 0; /* the directory does not exist */
  p->inputs = "nsys_stats_*.txt";
  if (!g2zp_next_file(p, &at, p->inputs)) p->inputs = "timers_*.txt";
  for (at = -1; (name = g2zp_next_file(p, &at, p->inputs)) != NULL; read++) {
    const g2z_path path = g2z_path_in(directory.text, "%s", name);
    G2Z_TRY(g2z_read_file(p->services, path.text, (size_t)1 << 28, &text, &bytes));
    const g2z_status status = g2zp_stats_read(p, path.text, text);
    g2z_release(p->services, text);
    G2Z_TRY(status);
  }
  if (!read)
    return g2z_fail(p->services, G2Z_IO, "%s has no nsys_stats_*.txt and no timers_*.txt. To make "
                    "one, add --profile to train, or put slurm/profile.sh RUN_DIR before it",
                    directory.text);
  G2Z_TRY(g2z_object_read(p->services, g2z_path_in(p->run_dir, "training_metrics.json").text,
                          &p->run[0]));
  return g2z_object_read(p->services, g2z_path_in(p->run_dir, "launcher_metadata.json").text,
                         &p->run[1]);
}

/* Writes profile_summary.json. */
static void g2zp_put_profile(void *user, g2z_json_out *out) {
  static const char *const kinds[] = {"nvtx", "osrt"}, nsys[] = "nsys_*.nsys-rep";
  const g2zp_profile *p = (const g2zp_profile *)user;
  char text[256], *absolute = realpath(p->run_dir, NULL);
  int at = -1;
  g2z_json_put_string(out, "generated_at_utc", g2z_utc_now().text);
  g2z_json_put_string(out, "run_dir", absolute ? absolute : p->run_dir);
  free(absolute);
  for (size_t i = 0; i < G2Z_COUNT(g2zp_profile_facts); i++) {
    const char *fact = g2zp_profile_facts[i].name, *path = g2zp_profile_facts[i].metrics;
    const g2z_object *run = &p->run[0];
    g2z_json json;
    if (!path) {
      g2zp_put_files(p, out, fact, p->inputs, 1);
      continue;
    }
    if (g2zp_profile_facts[i].launcher && !g2z_object_at(run, path, &json)) {
      path = g2zp_profile_facts[i].launcher;
      run = &p->run[1];
    }
    g2z_object_copy(run, path, text, sizeof text);
    if (*text) g2z_json_put_string(out, fact, text);
    else g2z_json_put_number(out, fact, g2z_object_number(run, path));
  }
  const char *report = g2zp_next_file(p, &at, nsys);
  if (!g2zp_next_file(p, &at, nsys)) g2z_json_put_string(out, "nsys_report", report);
  else g2zp_put_files(p, out, "nsys_report", nsys, 0);
  g2zp_put_files(p, out, "inputs", p->inputs, 0);
  for (int kind = 0; kind < 2; kind++) {
    snprintf(text, sizeof text, "%s_top5", kinds[kind]);
    g2z_json_begin(out, text, '[');
    for (const g2zp_ranked *row = p->top[kind]; row < p->top[kind] + p->count[kind]; row++) {
      g2z_json_begin(out, NULL, '{');
      g2z_json_put_string(out, "kind", kinds[kind]);
      g2z_json_put_string(out, "name", row->line + row->name_at);
      g2z_json_put_number(out, "time_percent", row->percent);
      g2z_json_put_string(out, "total_time", row->total);
      g2z_json_put_string(out, "raw", row->line);
      g2z_json_end(out, '}');
    }
    g2z_json_end(out, ']');
  }
}

/* Writes profile_summary.json. `only`: the file to read; NULL: all nsys_stats_*.txt, or if there
 * are none, all timers_*.txt. */
static g2z_status g2zp_profile_summarize(g2z_services *services, const char *run_dir,
                                         const char *only) {
  const g2z_path path = g2z_path_in(run_dir, "profiles/profile_summary.json");
  g2zp_profile p;
  memset(&p, 0, sizeof p);
  p.run_dir = run_dir;
  p.only = only;
  p.services = p.run[0].services = p.run[1].services = services;
  g2z_status status = g2zp_profile_read(&p);
  if (status == G2Z_OK) status = g2z_json_write(services, path.text, g2zp_put_profile, &p);
  for (int i = 0; i < p.entry_count; i++) free(p.entries[i]); /* from scandir's malloc */
  free(p.entries);
  for (int i = 0; i < 2; i++) g2z_object_free(&p.run[i]);
  return status;
}

/* Writes the format of `nsys stats`, so that g2zp_stats_read reads both kinds of file. */
G2Z_API g2z_status g2z_profile_write_spans(g2z_services *services, const char *run_dir,
                                           const g2z_span_times times[G2Z_SPAN_COUNT]) {
  static const char *const texts[] = {G2Z_SPAN_LIST(G2Z_LIST_TEXT)};
  const g2z_path directory = g2z_path_in(run_dir, "profiles");
  char host[128] = "", name[160], percent[G2ZP_CELL];
  g2z_writer *writer;
  g2z_span_times left[G2Z_SPAN_COUNT];
  double total_s = 0;
  gethostname(host, sizeof host - 1);
  snprintf(name, sizeof name, "timers_%s.txt", host);
  G2Z_TRY(g2z_make_directory(services, directory.text));
  G2Z_TRY(g2z_writer_create(services, g2z_path_in(directory.text, "%s", name).text, &writer));
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
    g2zp_number_text(percent, "%.1f", total_s > 0 ? 100 * s->total_s / total_s : 0);
    g2z_writer_printf(writer, " %8s  %16.0f  %9" PRId64 "  %15.0f  %15.0f  %15.0f  :%s\n", percent,
                      s->total_s * 1e9, s->count, s->total_s * 1e9 / (double)s->count,
                      s->min_s * 1e9, s->max_s * 1e9, texts[most]);
  }
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  G2Z_TRY(status);
  return g2zp_profile_summarize(services, run_dir, name);
}

G2Z_API g2z_status g2z_profile_run(g2z_services *services, const char *run_dir) {
  return g2zp_profile_summarize(services, run_dir, NULL);
}

/* ===== statistics, and runs found in directories ========================= */

static int g2zp_double_order(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

/* Sorts the values. 0: there are none, or one is NaN and so cannot be sorted. */
static int g2zp_sort(double *values, size_t count) {
  if (count == 0) return 0; /* qsort must not get NULL */
  for (size_t i = 0; i < count; i++)
    if (isnan(values[i])) return 0;
  qsort(values, count, sizeof *values, g2zp_double_order);
  return 1;
}

G2Z_API double g2z_median(double *values, size_t count) {
  if (!g2zp_sort(values, count)) return NAN;
  return 0.5 * (values[(count - 1) / 2] + values[count / 2]);
}

G2Z_API double g2z_percentile(double *values, size_t count, int percent) {
  if (!g2zp_sort(values, count)) return NAN;
  return values[(count * (size_t)percent + 99) / 100 - 1];
}

G2Z_API double g2z_deviation(const double *values, size_t count) {
  double mean = 0, squares = 0;
  if (count < 2) return NAN;
  for (size_t i = 0; i < count; i++) mean += values[i] / (double)count;
  for (size_t i = 0; i < count; i++) squares += (values[i] - mean) * (values[i] - mean);
  return sqrt(squares / (double)(count - 1));
}

G2Z_API g2z_status g2z_results_create(g2z_services *services, g2z_results **out) {
  G2Z_TRY(G2Z_NEW(services, 1, out));
  (*out)->services = services;
  return G2Z_OK;
}

G2Z_API void g2z_results_free(g2z_results *results) {
  if (!results) return;
  for (size_t i = 0; i < results->run_count; i++)
    g2zp_run_free(results->services, &results->runs[i]);
  g2z_release(results->services, results->runs);
  g2z_release(results->services, results->reports);
  g2z_release(results->services, results);
}

/* Orders names of runs by length first, so that run_x_9 precedes run_x_10. Other names are in the
 * order of strcmp. */
static int g2zp_results_order(const struct dirent **a, const struct dirent **b) {
  const char *left = (*a)->d_name, *right = (*b)->d_name;
  size_t i = strlen(left), k = strlen(right);
  if (strncmp(left, "run_", 4) == 0 && strncmp(right, "run_", 4) == 0 && i != k)
    return i < k ? -1 : 1;
  return strcmp(left, right);
}

/* Adds the runs and experiments in the file or directory `name`. Descends `levels` levels. */
static g2z_status g2zp_results_entry(g2z_results *results, const char *directory,
                                     const char *name, int levels) {
  const g2z_path path = g2z_path_in(directory, "%s", name);
  g2z_services *services = results->services;
  struct dirent **entries;
  struct stat info;
  int ended = 0;
  if (strcmp(name, "metrics.jsonl") == 0)
    G2Z_TRY(g2z_is_there(services, g2z_path_in(directory, "training_metrics.json").text, &ended));
  if (strcmp(name, "training_metrics.json") == 0 ||
      (strcmp(name, "metrics.jsonl") == 0 && !ended)) {
    G2Z_TRY(G2Z_GROW(services, &results->runs, &results->run_capacity, results->run_count,
                     results->run_count + 1));
    g2zp_run *run = &results->runs[results->run_count++]; /* freed after a failure, too */
    return g2zp_run_read(services, directory, run);
  }
  if (results->show && fnmatch("*_report.json", name, 0) == 0) {
    G2Z_TRY(G2Z_GROW(services, &results->reports, &results->report_capacity,
                     results->report_count, results->report_count + 1));
    results->reports[results->report_count++] = path;
    return G2Z_OK;
  }
  if (levels == 0 || (*name && (stat(path.text, &info) != 0 || !S_ISDIR(info.st_mode))))
    return G2Z_OK;
  const char *inside = *name ? path.text : directory;
  const int count = scandir(inside, &entries, NULL, g2zp_results_order);
  if (count < 0) return g2z_fail_file(services, errno, "read the directory", inside);
  g2z_status status = G2Z_OK;
  for (int i = 0; i < count; i++) {
    if (status == G2Z_OK && entries[i]->d_name[0] != '.')
      status = g2zp_results_entry(results, inside, entries[i]->d_name, levels - 1);
    free(entries[i]); /* from scandir's malloc */
  }
  free(entries);
  return status;
}

G2Z_API g2z_status g2z_results_add(g2z_results *results, const char *directory) {
  const size_t before = results->report_count + results->run_count;
  G2Z_TRY(g2zp_results_entry(results, directory, "", 3));
  if (results->report_count + results->run_count > before) return G2Z_OK;
  return g2z_fail(results->services, G2Z_FORMAT, "%.600s and the directories in it hold no "
                  "NAME_report.json and no metrics.jsonl: name a directory that bench or train "
                  "--run-dir wrote", directory);
}

/* 1: the fact has the same text in all runs that have ended, in `text`. */
static int g2zp_alike(const g2zp_run *runs, size_t count, const g2zp_fact *fact,
                      char text[G2ZP_CELL]) {
  char cell[G2ZP_CELL];
  int ended = 0;
  text[0] = 0;
  for (const g2zp_run *run = runs; run < runs + count; run++) {
    if (!run->metrics.text) continue;
    g2zp_object_cell(cell, &run->metrics, fact);
    if (ended++ && strcmp(cell, text) != 0) return 0;
    snprintf(text, G2ZP_CELL, "%s", cell);
  }
  return 1;
}

/* Puts a table of the facts that have one of these `uses` and differ, with one row per run.
 * Measured facts come last. */
static void g2zp_page_differing(g2z_page *page, const g2zp_run *runs, size_t count, int uses) {
  const char *headers[1 + G2Z_COUNT(g2zp_run_facts)] = {"run"};
  const g2zp_fact *shown[G2Z_COUNT(g2zp_run_facts)];
  char cell[G2ZP_CELL];
  int used = 0;
  for (size_t i = 0; i < 2 * G2Z_COUNT(g2zp_run_facts); i++) { /* twice: settings, then results */
    const g2zp_fact *fact = &g2zp_run_facts[i % G2Z_COUNT(g2zp_run_facts)];
    const int measured = fact->uses & G2ZP_MEASURED, last = i >= G2Z_COUNT(g2zp_run_facts);
    if (!(fact->uses & uses) || (measured != 0) != last) continue;
    if (g2zp_alike(runs, count, fact, cell)) continue;
    shown[used++] = fact;
    headers[used] = fact->name;
  }
  if (!used) return;
  g2z_page_table(page, 1 + used, headers);
  for (size_t r = 0; r < count; r++) {
    g2z_page_cell(page, "%s", runs[r].name);
    for (int c = 0; c < used; c++)
      g2z_page_cell(page, "%s", g2zp_object_cell(cell, &runs[r].metrics, shown[c]));
  }
}

/* Flags that change no loss: they are no settings to compare. */
static const char *const g2zp_own_flags[] = {" --run-dir", " --save-weights", " --resume latest"};

/* The next word of a command that begins with --; NULL: there is none. A word may be quoted. */
static const char *g2zp_flag_word(const char *at) {
  const char *plain = strstr(at, " --"), *quoted = strstr(at, " '--");
  if (!plain || (quoted && quoted < plain)) return quoted;
  return plain;
}

/* Copies the next flag of a command from `at` on, as " --flag value", even if it was typed as
 * --flag=value. Returns its end; NULL: there is no further flag. */
static const char *g2zp_next_flag(const char *at, char flag[G2ZP_TEXT]) {
  const char *begin = g2zp_flag_word(at), *quote = "";
  if (!begin) return NULL;
  const char *end = g2zp_flag_word(begin + 1), *name = begin + 1;
  if (!end) end = begin + strlen(begin);
  if (*name == '\'') {
    quote = "'";
    name++;
  }
  const int length = (int)strcspn(name, "= ");
  if (name[length] == '=')
    snprintf(flag, G2ZP_TEXT, " %.*s %s%.*s", length, name, quote, (int)(end - name) - length - 1,
             name + length + 1);
  else
    snprintf(flag, G2ZP_TEXT, "%.*s", (int)(end - begin), begin);
  return end;
}

/* 1: the first `bytes` bytes of a flag of the command are those of `flag`. */
static int g2zp_has_flag(const char *command, const char *flag, size_t bytes) {
  char own[G2ZP_TEXT];
  for (const char *at = command; (at = g2zp_next_flag(at, own)) != NULL;)
    if (strncmp(own, flag, bytes) == 0) return 1;
  return 0;
}

static int g2zp_own_flag(const char *flag) {
  for (size_t i = 0; i < G2Z_COUNT(g2zp_own_flags); i++)
    if (strncmp(flag, g2zp_own_flags[i], strlen(g2zp_own_flags[i])) == 0) return 1;
  return 0;
}

/* Puts the flags of each run, except its own ones and those that all runs with a known command
 * share. */
static void g2zp_page_flags(g2z_page *page, const g2zp_run *runs, size_t count) {
  char flag[G2ZP_TEXT], flags[2048];
  for (const g2zp_run *run = runs; run < runs + count; run++) {
    flags[0] = 0;
    for (const char *at = run->command; (at = g2zp_next_flag(at, flag)) != NULL;) {
      int shared = 1;
      for (const g2zp_run *other = runs; other < runs + count; other++)
        if (*other->command && !g2zp_has_flag(other->command, flag, sizeof flag)) shared = 0;
      if (!shared && !g2zp_own_flag(flag)) strncat(flags, flag, sizeof flags - 1 - strlen(flags));
    }
    if (flags[0]) g2z_page_fact(page, run->name, "%s", flags + 1);
  }
}

/* The lowest validation loss; NaN: there was no validation. */
static double g2zp_best(const g2zp_run *run) {
  const g2zp_curves *c = &run->curves;
  if (!c->count[G2ZP_VALIDATIONS])
    return g2z_object_number(&run->metrics, "summary.best_val_loss");
  return c->column[G2ZP_COLUMN_val_loss][c->best];
}

/* A figure of the validation that reached the level; NaN: none did. */
static double g2zp_reached(const g2zp_run *run, int column) {
  const g2zp_curves *c = &run->curves;
  if (c->reached >= c->count[G2ZP_VALIDATIONS]) return NAN;
  return c->column[column][c->reached];
}

/* A figure of the last validation above the level; 0: the first validation reached it. The run
 * reached the level after this validation, perhaps long before the next one. */
static double g2zp_not_reached(const g2zp_run *run, int column) {
  const g2zp_curves *c = &run->curves;
  if (c->reached <= c->first) return 0;
  return c->column[column][c->reached - 1];
}

/* The figure that compares runs. Losses are comparable only over the same tokens, in sequences of
 * the same length. Bits per byte are comparable over the same text, with any vocabulary. Other runs
 * have no common measure. */
typedef enum g2zp_measure { G2ZP_LOSS, G2ZP_BITS, G2ZP_NO_MEASURE } g2zp_measure;

typedef struct g2zp_comparison {
  g2zp_run *runs;
  size_t count, ranked;              /* all runs; runs with a result: see g2zp_unranked */
  g2zp_measure measure;
  double target;                     /* --target-loss; NaN: none, or two runs differ */
  size_t on_target;                  /* number of runs that reached it */
  double level;                      /* steps, tokens and seconds are counted up to this value of
                                      * the measure; NaN: nothing to compare */
  int by_target;                     /* 1: the level is the target */
  int cut;                           /* 1: charts leave out losses above G2ZP_WORST */
  const g2zp_run *best;              /* the lowest value of a ranked run; NULL: no common measure */
  const g2zp_run *next;              /* the best of the ranked runs that differ from `best` in more
                                      * than the seed; NULL: none */
  const g2zp_run *base;              /* relative figures compare with it; NULL: there are none */
} g2zp_comparison;

static const struct {
  const char *name, *format;
  int column;
} g2zp_spent[3] = {{"steps", "%.0f", G2ZP_COLUMN_val_step},
                   {"tokens", "%.0f", G2ZP_COLUMN_val_tokens},
                   {"seconds", "%.2f", G2ZP_COLUMN_val_time_s}};

/* A higher loss is worse than guessing in any vocabulary: 1.1 ln 65,536 + 0.1, as in g2z_run.h. */
#define G2ZP_WORST 12.3

/* Why the run has no result to compare, as a clause; NULL: it has one. */
static const char *g2zp_unranked(const g2zp_run *run) {
  const char *const val_at = "training_config.dataset_subset_sizes.val";
  if (run->end == G2ZP_FAILED) return "it failed";
  if (run->end == G2ZP_DIVERGED) return "it diverged";
  if (g2zp_best(run) <= G2ZP_WORST) return NULL;
  if (!isnan(g2zp_best(run))) return "its losses are worse than guessing";
  if (run->curves.spent_s[2] > 0) return "its validation loss is not a finite number";
  if (g2z_object_number(&run->metrics, val_at) > 0 || g2zp_has_flag(run->command, " --val ", 7))
    return "it has not validated yet. A lower --val-every makes it validate sooner";
  return "it has no validation loss. To get one, add --val to train";
}

/* By what two runs differ. */
typedef enum g2zp_difference { G2ZP_SETTINGS, G2ZP_SEED, G2ZP_NOTHING } g2zp_difference;

static g2zp_difference g2zp_differ(const g2zp_run *a, const g2zp_run *b) {
  const g2zp_run *const runs[] = {a, b};
  g2zp_difference difference = G2ZP_NOTHING;
  char flag[G2ZP_TEXT], cells[2][G2ZP_CELL];
  if (!*a->command || !*b->command) return G2ZP_SETTINGS;
  for (int i = 0; i < 2; i++)
    for (const char *at = runs[i]->command; (at = g2zp_next_flag(at, flag)) != NULL;) {
      if (g2zp_own_flag(flag) || g2zp_has_flag(runs[1 - i]->command, flag, sizeof flag)) continue;
      if (strncmp(flag, " --seed ", 8) != 0) return G2ZP_SETTINGS;
      difference = G2ZP_SEED;
    }
  for (const g2zp_fact *fact = g2zp_run_facts;
       fact < g2zp_run_facts + G2Z_COUNT(g2zp_run_facts); fact++) {
    if (fact->uses & G2ZP_MEASURED || !fact->uses || !a->metrics.text || !b->metrics.text) continue;
    for (int i = 0; i < 2; i++) g2zp_object_cell(cells[i], &runs[i]->metrics, fact);
    if (strcmp(cells[0], cells[1]) != 0) return G2ZP_SETTINGS;
  }
  return difference;
}

/* The fact of a run. A run that has not ended knows its validation tokens from metrics.jsonl. */
static const char *g2zp_run_cell(char text[G2ZP_CELL], const g2zp_run *run, const g2zp_fact *fact) {
  if (!run->metrics.text && strcmp(fact->at, "validation.set") == 0) {
    snprintf(text, G2ZP_CELL, "%s", run->curves.val_set);
    return text;
  }
  return g2zp_object_cell(text, &run->metrics, fact);
}

/* 0: two ranked runs differ in this fact. *known 1: each ranked run has the fact. */
static int g2zp_same(const g2zp_comparison *m, const g2zp_fact *fact, int *known) {
  char first[G2ZP_CELL] = "", text[G2ZP_CELL];
  *known = 1;
  for (const g2zp_run *run = m->runs; run < m->runs + m->count; run++) {
    if (g2zp_unranked(run)) continue;
    const char *cell = g2zp_run_cell(text, run, fact);
    if (*first && *cell && strcmp(first, cell) != 0) return 0;
    if (*cell) snprintf(first, sizeof first, "%s", cell);
    else *known = 0;
  }
  return 1;
}

/* Names the validation tokens. */
static const g2zp_fact g2zp_set = {"", "validation.set", NULL, NULL, 1, 0};

/* Replaces losses above G2ZP_WORST by gaps: they would flatten the curves of runs with a result. */
static void g2zp_compare_cut(g2zp_comparison *m) {
  static const int columns[] = {G2ZP_COLUMN_val_measure, G2ZP_COLUMN_loss, G2ZP_COLUMN_smooth};
  for (size_t r = 0; r < m->count && m->ranked; r++)
    for (size_t k = 0; k < G2Z_COUNT(columns); k++) {
      const g2zp_curves *c = &m->runs[r].curves;
      const double most = k ? G2ZP_WORST : G2ZP_WORST * c->per_nat;
      for (size_t i = 0; i < c->count[g2zp_group_of[columns[k]]]; i++)
        if (c->column[columns[k]][i] > most) {
          c->column[columns[k]][i] = NAN;
          m->cut = 1;
        }
    }
}

/* Finds the common measure of the runs, and fills val_measure. */
static void g2zp_compare_measure(g2zp_comparison *m) {
  static const g2zp_fact text = {"", "validation.text_hash", NULL, NULL, 1, 0};
  int known;
  m->measure = G2ZP_NO_MEASURE;
  if (m->ranked < 2 || (g2zp_same(m, &g2zp_set, &known) && known)) m->measure = G2ZP_LOSS;
  else if (g2zp_same(m, &text, &known) && known) m->measure = G2ZP_BITS;
  for (size_t r = 0; r < m->count; r++) {
    g2zp_curves *c = &m->runs[r].curves;
    c->per_nat = 1;
    if (m->measure == G2ZP_BITS)
      c->per_nat = g2z_object_number(&m->runs[r].metrics, "validation.tokens") /
                   (g2z_object_number(&m->runs[r].metrics, "validation.bytes") * log(2.0));
    for (size_t i = 0; i < c->count[G2ZP_VALIDATIONS]; i++) {
      double value = NAN;
      if (i >= c->first) value = c->column[G2ZP_COLUMN_val_loss][i] * c->per_nat;
      c->column[G2ZP_COLUMN_val_measure][i] = value;
    }
  }
}

/* The best value of the measure. */
static double g2zp_value(const g2zp_run *run) { return g2zp_best(run) * run->curves.per_nat; }

/* Finds each run's first validation at the level. */
static void g2zp_compare_reached(g2zp_comparison *m) {
  for (size_t r = 0; r < m->count; r++) {
    g2zp_curves *c = &m->runs[r].curves;
    if (c->reached < c->first) c->reached = c->first;
    while (c->reached < c->count[G2ZP_VALIDATIONS] &&
           !(c->column[G2ZP_COLUMN_val_measure][c->reached] <= m->level)) c->reached++;
  }
}

/* Compares the ranked runs. The level is --target-loss if losses are the measure, all targets are
 * equal, and at least two ranked runs reached it. Else it is the highest of the best values of
 * complete runs, which all of them reached; if fewer than two runs are complete, of all of them. */
static void g2zp_compare(g2zp_comparison *m) {
  const g2zp_run *run, *const end = m->runs + m->count;
  size_t complete = 0, reached = 0;  /* ranked runs that completed; that reached the target */
  int targets = 1;                   /* 0: two targets differ */
  m->target = m->level = NAN;
  for (run = m->runs; run < end; run++) {
    const double own = g2z_object_number(&run->metrics, "summary.target_loss");
    if (own < m->target || own > m->target) targets = 0;
    if (!isnan(own)) m->target = own;
    if (g2zp_unranked(run)) continue;
    m->ranked++;
    complete += run->end == G2ZP_COMPLETED;
  }
  g2zp_compare_measure(m);
  g2zp_compare_cut(m);
  if (!targets || m->measure != G2ZP_LOSS) m->target = NAN;
  if (m->measure == G2ZP_NO_MEASURE) return;
  for (run = m->runs; run < end; run++) {
    m->on_target += g2zp_best(run) <= m->target;
    if (g2zp_unranked(run)) continue;
    reached += g2zp_best(run) <= m->target;
    if (!m->best || g2zp_value(run) < g2zp_value(m->best)) m->best = run;
    if (m->ranked > 1 && (complete < 2 || run->end == G2ZP_COMPLETED))
      m->level = fmax(m->level, g2zp_value(run)); /* ignores NaN */
  }
  m->by_target = reached > 1;
  if (m->by_target) m->level = m->target;
  g2zp_compare_reached(m);
  for (run = m->runs; run < end; run++) {
    if (run == m->best || g2zp_unranked(run)) continue;
    if (g2zp_differ(run, m->best) == G2ZP_SETTINGS &&
        (!m->next || g2zp_value(run) < g2zp_value(m->next))) m->next = run;
    if (isnan(g2zp_reached(run, G2ZP_COLUMN_val_step))) continue;
    if (!m->base || g2zp_value(run) > g2zp_value(m->base)) m->base = run;
  }
}

/* Puts why losses are not compared, and a table of the facts that matter. */
static void g2zp_page_why(g2z_page *page, const g2zp_comparison *m) {
  const char *comma = "since the runs differ in: ";
  char why[300] = "";
  int known;
  for (const g2zp_fact *fact = g2zp_run_facts;
       fact < g2zp_run_facts + G2Z_COUNT(g2zp_run_facts); fact++) {
    if (!(fact->uses & G2ZP_OF_LOSS) || g2zp_same(m, fact, &known)) continue;
    snprintf(why + strlen(why), sizeof why - strlen(why), "%s%s", comma, fact->name);
    comma = ", ";
  }
  if (!*why && !g2zp_same(m, &g2zp_set, &known)) /* a run that has not ended differs */
    snprintf(why, sizeof why, "%svalidation tokens", comma);
  if (!*why)
    snprintf(why, sizeof why, "since it is not known which tokens they were measured over");
  if (m->measure == G2ZP_BITS)
    g2z_page_text(page, "Losses are not compared, %s. Bits per byte are compared: all runs "
                  "validated on the same text. A run counts tokens of its own vocabulary.",
                  why);
  else
    g2z_page_lead(page, "Losses are not compared, %s. Nor are bits per byte, since the text is not "
                  "the same or not known. To compare the weights, score one text with each: "
                  "./train --init-from RUN_DIR/weights --eval TEXT", why);
  g2zp_page_differing(page, m->runs, m->count, G2ZP_OF_LOSS | G2ZP_OF_TEXT);
}

/* The name of the best value of each measure, and its unit. */
static const char *const g2zp_bests[] = {"best validation loss", "best result", ""};
static const char *const g2zp_units[] = {"", " bits per byte", ""};

/* Puts how far the ranked runs lie apart that have the same settings: a reader needs it to judge
 * other differences. */
static void g2zp_page_seeds(g2z_page *page, const g2zp_comparison *m) {
  const g2zp_run *low = NULL, *high = NULL; /* the two that lie farthest apart */
  const char *alike = "have the same settings";
  char names[500], text[3][G2ZP_CELL], sentence[1200];
  for (const g2zp_run *a = m->runs; a < m->runs + m->count; a++)
    for (const g2zp_run *b = m->runs; b < m->runs + m->count; b++) {
      if (a == b || g2zp_unranked(a) || g2zp_unranked(b) || g2zp_value(a) > g2zp_value(b)) continue;
      if (low && g2zp_value(b) - g2zp_value(a) <= g2zp_value(high) - g2zp_value(low)) continue;
      if (g2zp_differ(a, b) == G2ZP_SETTINGS) continue;
      low = a;
      high = b;
    }
  if (!low) return;
  if (g2zp_differ(low, high) == G2ZP_SEED) alike = "differ by the seed alone";
  snprintf(names, sizeof names, "%.200s and %.200s", low->name, high->name);
  if (!m->next && m->ranked > 2) snprintf(names, sizeof names, "The %zu runs", m->ranked);
  snprintf(sentence, sizeof sentence, "%s %s: their best results lie %s apart, from %s to %s%s. A "
           "difference of this size between other runs can be chance.", names, alike,
           g2zp_loss_text(text[0], g2zp_value(high) - g2zp_value(low)),
           g2zp_loss_text(text[1], g2zp_value(low)), g2zp_loss_text(text[2], g2zp_value(high)),
           g2zp_units[m->measure]);
  if (m->next) g2z_page_text(page, "%s", sentence);
  else g2z_page_lead(page, "%s", sentence);
}

/* Puts which run is better and by how much, then in how much of the steps, tokens and seconds it
 * reached the level. */
static void g2zp_page_better(g2z_page *page, const g2zp_comparison *m) {
  static const char *const costs[] = { /* bit i: surely more of g2zp_spent[i] than the base run */
      "", "steps", "tokens", "steps and tokens", "seconds", "steps and seconds",
      "tokens and seconds", "steps, tokens and seconds"};
  const char *const best = m->best->name, *const next = m->next->name;
  const char *const what = g2zp_bests[m->measure];
  const double by = g2zp_value(m->next) - g2zp_value(m->best);
  char own[2 * G2ZP_CELL], lower[G2ZP_CELL], cell[G2ZP_CELL], shares[400] = "";
  unsigned dearer = 0;               /* bits as in `costs` */
  for (int i = 0; i < 3 && m->base; i++) {
    const double share = g2zp_reached(m->best, g2zp_spent[i].column) /
                         g2zp_reached(m->base, g2zp_spent[i].column);
    const char *joint = "", *of = "of";
    if (!isfinite(share)) continue;
    if (m->measure == G2ZP_BITS && g2zp_spent[i].column == G2ZP_COLUMN_val_tokens)
      continue;                      /* tokens of two vocabularies */
    if (*shares) joint = i == 2 ? " and " : ", ";
    if (share > 1.005) of = "times";
    if (g2zp_not_reached(m->best, g2zp_spent[i].column) >=
        g2zp_reached(m->base, g2zp_spent[i].column)) dearer |= 1u << i;
    snprintf(shares + strlen(shares), 100, "%s%.40s %s the %s", joint,
             g2zp_number_text(cell, "%.2f", share), of, g2zp_spent[i].name);
  }
  snprintf(own, sizeof own, "%s%s", g2zp_loss_text(cell, g2zp_value(m->best)),
           g2zp_units[m->measure]);
  g2zp_loss_text(lower, by);
  g2zp_loss_text(cell, m->level);
  if (by < 5e-5)
    g2z_page_lead(page, "%s and %s are equally good: the %s of both is %s.", best, next, what, own);
  else if (dearer)
    g2z_page_lead(page, "%s gets the %s, %s, %s lower than %s, but takes more %s to get as low as "
                  "%s.", best, what, own, lower, next, costs[dearer], m->base->name);
  else if (m->ranked > 2)
    g2z_page_lead(page, "%s is the best of %zu runs: its %s is %s, %s lower than %s.", best,
                  m->ranked, what, own, lower, next);
  else
    g2z_page_lead(page, "%s is better than %s: its %s is %s, %s lower.", best, next, what, own,
                  lower);
  if (!*shares)
    g2z_page_text(page, "Steps, tokens and seconds are not compared, as a run's metrics.jsonl is "
                  "missing or cut, or the run began from another run's checkpoint.");
  else if (m->by_target)
    g2z_page_text(page, "%s reaches the target loss, %s, in %s of %s.", best, cell, shares,
                  m->base->name);
  else
    g2z_page_text(page, "%s reaches %s's best, %s, in %s.", best, m->base->name, cell, shares);
}

/* Puts the answer of the page: which run is better, then what limits this answer. */
static void g2zp_page_verdict(g2z_page *page, const g2zp_comparison *m) {
  char cell[G2ZP_CELL];
  const g2zp_run *run, *end = m->runs + m->count;
  if (m->next) g2zp_page_better(page, m);
  if (m->ranked > 1 && m->best) g2zp_page_seeds(page, m);
  if (m->ranked == 1)
    g2z_page_lead(page, "Only %s has a result: its best validation loss is %s.", m->best->name,
                  g2zp_loss_text(cell, g2zp_best(m->best)));
  if (!m->ranked) g2z_page_lead(page, "No run has a result.");
  if (m->measure != G2ZP_LOSS) g2zp_page_why(page, m);
  g2zp_loss_text(cell, m->target);
  if (*cell && !m->on_target) g2z_page_text(page, "No run reached the target loss, %s.", cell);
  for (run = m->runs; run < end && m->on_target == 1; run++)
    if (g2zp_best(run) <= m->target)
      g2z_page_text(page, "Only %s reached the target loss, %s.", run->name, cell);
  for (run = m->runs; run < end; run++) {
    const size_t steps = run->curves.count[G2ZP_STEPS];
    const char *unranked = g2zp_unranked(run);
    char about[G2ZP_TEXT + 100] = "";
    double last = 0;
    if (steps) last = run->curves.column[G2ZP_COLUMN_step][steps - 1];
    g2zp_number_text(cell, "%.0f", last);
    if (run->end >= G2ZP_DIVERGED)
      snprintf(about, sizeof about, " after %s steps: %s", cell, run->why);
    if (unranked && m->ranked < 2)
      g2z_page_lead(page, "%s is not compared, since %s%s.", run->name, unranked, about);
    else if (unranked)
      g2z_page_text(page, "%s is not compared, since %s%s.", run->name, unranked, about);
    if (run->end == G2ZP_STOPPED || run->end == G2ZP_NOT_ENDED)
      g2z_page_text(page, "%s is not complete: %s, %s. It has %s steps.", run->name,
                    g2zp_ends[run->end], run->why, cell);
  }
}

/* Puts a table of each run's best result, and of the steps, tokens and seconds until it reached the
 * level. A narrow screen shows the first columns, so the relative figures come first. */
static void g2zp_page_validations(g2z_page *page, const g2zp_comparison *m) {
  static const char *const bits_at = "summary.best_val_bits_per_byte";
  const char *headers[13] = {"run"};
  char names[3][2][G2ZP_CELL + 16], cell[G2ZP_CELL];
  int columns = 1, bits = 0, validated = 0, incomplete = 0;
  const g2zp_run *run, *end = m->runs + m->count;
  for (run = m->runs; run < end; run++) {
    bits |= !isnan(g2z_object_number(&run->metrics, bits_at));
    validated |= !isnan(g2zp_best(run));
    incomplete |= run->end != G2ZP_COMPLETED;
  }
  if (!validated) return;
  g2z_page_heading(page, "Validation");
  for (int i = 0; i < 3 && m->base; i++) {
    snprintf(names[i][0], sizeof names[i][0], "relative %s", g2zp_spent[i].name);
    headers[columns++] = names[i][0];
  }
  headers[columns++] = "best loss";
  if (bits) headers[columns++] = "best bits per byte";
  for (int i = 0; i < 3 && m->base; i++) {
    snprintf(names[i][1], sizeof names[i][1], "%s to %s", g2zp_spent[i].name,
             g2zp_loss_text(cell, m->level));
    headers[columns++] = names[i][1];
  }
  headers[columns++] = "best step";
  headers[columns++] = "last loss";
  if (incomplete) headers[columns++] = "result";
  g2z_page_table(page, columns, headers);
  for (run = m->runs; run < end; run++) {
    const g2zp_curves *c = &run->curves;
    const size_t all = c->count[G2ZP_VALIDATIONS];
    double last_loss = NAN, best_step = NAN;
    if (all) {
      last_loss = c->column[G2ZP_COLUMN_val_loss][all - 1];
      best_step = c->column[G2ZP_COLUMN_val_step][c->best];
    }
    g2z_page_cell(page, "%s", run->name);
    for (int i = 0; i < 3 && m->base; i++) {
      const double share = g2zp_reached(run, g2zp_spent[i].column) /
                           g2zp_reached(m->base, g2zp_spent[i].column);
      g2z_page_cell(page, "%s", g2zp_number_text(cell, "%.2f", share));
    }
    g2z_page_cell(page, "%s", g2zp_loss_text(cell, g2zp_best(run)));
    const double best_bits = g2z_object_number(&run->metrics, bits_at);
    if (bits) g2z_page_cell(page, "%s", g2zp_loss_text(cell, best_bits));
    for (int i = 0; i < 3 && m->base; i++)
      g2z_page_cell(page, "%s", g2zp_number_text(cell, g2zp_spent[i].format,
                                                 g2zp_reached(run, g2zp_spent[i].column)));
    g2z_page_cell(page, "%s", g2zp_number_text(cell, "%.0f", best_step));
    g2z_page_cell(page, "%s", g2zp_loss_text(cell, last_loss));
    if (incomplete) g2z_page_cell(page, "%s", g2zp_ends[run->end]);
  }
  if (!m->base) return;
  g2z_page_text(page, "Steps, tokens and seconds of training are counted up to the first "
                "validation with %s of at most %s, %s. Relative figures compare with %s. A run "
                "that began from another run's checkpoint has none.",
                m->measure == G2ZP_BITS ? "bits per byte" : "a loss",
                g2zp_loss_text(cell, m->level),
                m->by_target ? "the target" : "the highest of the best values of complete runs",
                m->base->name);
}

/* Puts charts with one curve per run, for as many runs as a chart can show. Unless the level is
 * NaN, a dashed line marks it. */
static void g2zp_page_compared(g2z_page *page, const g2zp_comparison *m) {
#define X(name) G2ZP_COLUMN_##name
  static const struct {
    const char *over, *x_name;
    int x, y;
  } charts[] = {{"steps", "step", X(val_step), X(val_measure)},
                {"tokens", "tokens", X(val_tokens), X(val_measure)},
                {"time", "seconds of training", X(val_time_s), X(val_measure)},
                {"steps", "step", X(step), X(smooth)},
                {"tokens", "tokens", X(tokens), X(smooth)},
                {"time", "seconds of training", X(time_s), X(smooth)}};
  const char *const name = m->measure == G2ZP_BITS ? "bits per byte" : "loss";
  const double levels[2] = {m->level, m->level};
  char cell[G2ZP_CELL], level_name[G2ZP_CELL + 16], title[64];
  int headed = 0;
  snprintf(level_name, sizeof level_name, "%s %s", name, g2zp_loss_text(cell, m->level));
  for (size_t n = 0; n < G2Z_COUNT(charts); n++) {
    g2z_series series[G2Z_CHART_SERIES];
    const int validation = charts[n].y == X(val_measure);
    const char *about = "nats per token of the run's own data";
    double ends[2] = {INFINITY, -INFINITY};
    int used = 0, smoothed = 0;
    for (size_t r = 0; r < m->count && used < G2Z_CHART_SERIES - 1; r++) {
      const g2zp_curves *c = &m->runs[r].curves;
      const char *run = m->runs[r].name;
      int column = charts[n].y;
      g2z_series *s = &series[used];
      if (!c->column[0]) continue; /* no metrics.jsonl */
      if (strlen(run) > 60) run += strlen(run) - 60;
      if (column == X(smooth) && c->count[G2ZP_STEPS] < 100) column = X(loss); /* not smoothed */
      smoothed += column == X(smooth);
      *s = g2zp_curve(c, run, column);
      s->x = c->column[charts[n].x];
      if (validation) s->mark = G2Z_MARK_POINTS;
      used++;
      if (!s->count) continue;
      ends[0] = fmin(ends[0], s->x[0]);
      ends[1] = fmax(ends[1], s->x[s->count - 1]);
    }
    if (validation && !isnan(m->level)) {
      const g2z_series line = {level_name, ends, levels, NULL, NULL, 2, G2Z_MARK_DASHED};
      series[used++] = line;
    }
    snprintf(title, sizeof title, "Loss over %s", charts[n].over);
    if (smoothed)
      about = "nats per token of the run's own data, smoothed in runs of 100 steps or more";
    if (smoothed == used) about = "nats per token of the run's own data, smoothed";
    if (validation) {
      snprintf(title, sizeof title, "Validation %s over %s", name, charts[n].over);
      about = "nats per token";
      if (m->measure == G2ZP_BITS) about = "of the same text";
      if (m->measure == G2ZP_NO_MEASURE) about = "nats per token; not comparable";
    }
    const g2z_chart chart = {title, about, charts[n].x_name, NULL, series, used, G2Z_AXIS_AUTO,
                             G2Z_AXIS_AUTO};
    if (!(ends[0] <= ends[1])) continue; /* no values */
    if (!headed) g2z_page_heading(page, "Curves");
    if (!headed && m->count > G2Z_CHART_SERIES - 1)
      g2z_page_text(page, "The charts show the first %d runs.", G2Z_CHART_SERIES - 1);
    if (!headed && m->cut)
      g2z_page_text(page, "The charts leave out losses above %g, which are worse than guessing.",
                    G2ZP_WORST);
    headed = 1;
    g2z_page_chart(page, &chart);
  }
#undef X
}

/* Puts what differs between the runs, and folded, what they share. */
static void g2zp_page_settings_of(g2z_page *page, const g2zp_comparison *m) {
  const char *of = "";
  char cell[G2ZP_CELL], title[100];
  int alike = 0;
  if (m->count > 1) {
    of = " that are equal";
    for (size_t r = 0; r < m->count; r++)
      if (!m->runs[r].metrics.text) of = ", equal in all runs with a training_metrics.json";
    g2z_page_heading(page, "What differs");
    g2zp_page_differing(page, m->runs, m->count, G2ZP_COMPARED | G2ZP_MEASURED);
    g2zp_page_flags(page, m->runs, m->count);
  }
  for (int put = 0; put < 2; put++) {
    if (put) {
      snprintf(title, sizeof title, "%d settings and figures%s", alike, of);
      g2z_page_fold(page, title);
      g2z_page_fact(page, "created", "%s", g2z_utc_now().text);
    }
    for (const g2zp_fact *fact = g2zp_run_facts;
         fact < g2zp_run_facts + G2Z_COUNT(g2zp_run_facts); fact++) {
      if (!(fact->uses & (G2ZP_COMPARED | G2ZP_MEASURED))) continue;
      if (!g2zp_alike(m->runs, m->count, fact, cell) || !*cell) continue;
      alike++;
      if (put) g2z_page_fact(page, fact->name, "%s", cell);
    }
  }
  g2z_page_text(page, "Read from each training_metrics.json, which a run writes when it is "
                      "complete or stopped. Tokens/s includes the first steps, which experiments "
                      "leave out as warm-up. Step times are from the last epoch. A run's settings "
                      "and flags are from its last start.");
}

/* Names the runs by what follows the directories that all of them share. */
static void g2zp_name_runs(g2zp_run *runs, size_t count) {
  size_t shared = SIZE_MAX;          /* number of bytes, up to a slash */
  for (size_t r = 0; r < count; r++) {
    size_t alike = 0, slash = 0;
    for (const char *a = runs[0].directory.text, *b = runs[r].directory.text;
         a[alike] && a[alike] == b[alike]; alike++)
      if (a[alike] == '/') slash = alike + 1;
    if (slash < shared) shared = slash;
  }
  for (size_t r = 0; r < count; r++) runs[r].name = runs[r].directory.text + shared;
}

G2Z_API g2z_status g2z_results_page(g2z_results *results, const char *path) {
  const char *title = "Runs compared";
  g2zp_comparison m;
  g2z_page *page = NULL;
  memset(&m, 0, sizeof m);
  m.runs = results->runs;
  m.count = results->run_count;
  if (m.count == 1) title = "A run";
  if (results->report_count) title = "Experiments and runs";
  if (!m.count) title = "Experiments";
  g2z_status status = g2z_page_create(results->services, path, title, &page);
  for (size_t i = 0; i < results->report_count && status == G2Z_OK; i++)
    status = results->show(results->services, results->reports[i].text, page);
  g2zp_name_runs(m.runs, m.count);
  for (size_t r = 0; r < m.count && status == G2Z_OK; r++) {
    g2zp_curves *curves = &m.runs[r].curves;
    if (curves->column[0]) continue; /* an earlier page has read them */
    status = g2zp_curves_read(results->services, m.runs[r].directory.text, curves);
    if (status == G2Z_IO) status = G2Z_OK; /* no metrics.jsonl: a row in the table, no curves */
  }
  if (m.count && status == G2Z_OK) {
    if (results->report_count) g2z_page_heading(page, "Runs");
    g2zp_compare(&m);
    if (m.count > 1) g2zp_page_verdict(page, &m);
    g2zp_page_validations(page, &m);
    g2zp_page_compared(page, &m);
    g2zp_page_settings_of(page, &m);
  }
  if (status == G2Z_OK) status = g2z_page_commit(page);
  g2z_page_free(page);
  return status;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_REPORT_IMPLEMENTED */
