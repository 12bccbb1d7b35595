/* g2z_bench.h: times the calls of a device of gpt2_zero.h: single calls in rounds, the ops of a
 * training step, and the two calls whose rates limit this machine. MIT licence.
 *
 * It prints nothing. bench.cu has the list of ops to watch, and prints the rows.
 *
 *     g2z_rounds rounds;
 *     memset(&rounds, 0, sizeof rounds);
 *     do status = op->zero(device, memory, bytes);
 *     while (g2z_rounds_another(&rounds, device, op, &status));      // rounds.s[2]: the median
 *
 * CONTENTS: rounds of calls; the ops of a step; limits of this machine */

#ifndef G2Z_BENCH_INCLUDED
#define G2Z_BENCH_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_bench.h: include gpt2_zero.h before it"
#endif

#include "g2z_report.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ===== rounds of calls ===================================================
 * Seconds per call. One call is not timed; five timed rounds of 10 ms or more each follow. */

typedef struct g2z_rounds {     /* set all members to zero first */
  double s[5], begin;           /* s: seconds per call in each round, sorted at the end */
  int round, calls, left;       /* rounds done; calls per round; calls left in this one */
} g2z_rounds;

/* Follows each call of one of `op` on `d`. Returns 1 if the call should be repeated, 0 after five
 * rounds or if *status is a failure. */
G2Z_API int g2z_rounds_another(g2z_rounds *r, g2z_device *d, const g2z_ops *op,
                               g2z_status *status);

/* ===== the ops of a step =================================================
 * A table of ops that times the calls of another one. */

typedef struct g2z_watch_row {  /* an op, with operands of one size */
  char name[32];
  const char *unit;             /* of `amount`: "GFLOP" or "GB" */
  char formula[96];             /* of `amount`, as text */
  double calls, amount;         /* calls in a step; minimum work of one call */
  int again;                    /* 1: a second call would leave the same values */
  g2z_rounds timed;
  double seconds, limit_s;      /* time of one call: measured, and at the machine's limit */
} g2z_watch_row;

/* This table replaces the ops of a trainer's device, so it sees every op call of a step with its
 * arguments. The first step counts calls. The second times all rows whose call may be repeated.
 * Each other row gets its own step, because a repeated call that adds to its output spoils the rest
 * of the step. The weights stay right until AdamW is repeated, and AdamW is the last row. */
typedef struct g2z_watch {
  g2z_ops ops;                  /* the first member: device->ops points here */
  const g2z_ops *right;         /* the device's own ops */
  int counts;                   /* 1: this step counts calls and times none */
  const g2z_watch_row *only;    /* the one row to time; NULL: all rows with `again` */
  double a, g, m;               /* bytes per element: activations, gradients, moments */
  g2z_watch_row rows[32];
  int count;
} g2z_watch;

/* The table that device->ops points to. */
G2Z_API g2z_watch *g2z_watch_of(g2z_device *d);
/* The rounds of a call's row, which is added if it is new. NULL: the call is not timed in this
 * step, or there is no room for its row. The row's name is `name` and then `suffix`; its formula
 * leaves out "op->". `unit` must outlive the table. */
G2Z_API g2z_rounds *g2z_watch_rounds(g2z_watch *w, const char *name, const char *suffix,
                                     const char *unit, const char *formula, double amount,
                                     int again);

/* ===== limits of this machine ============================================ */

typedef struct g2z_limits {     /* rates of a large product and a copy: best of five rounds */
  int side;                     /* rows of the product's square matrices */
  double product, copy;         /* flops per second, bytes per second */
} g2z_limits;

/* Measures the limits for the device and the dtype of a plan. Uses a separate device object: call
 * it before a trainer takes the memory. */
G2Z_API g2z_status g2z_limits_measure(g2z_services *services, const g2z_plan *plan,
                                      g2z_limits *limit);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_BENCH_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_BENCH_IMPLEMENTED)
#define G2Z_BENCH_IMPLEMENTED

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ===== rounds of calls =================================================== */

G2Z_API int g2z_rounds_another(g2z_rounds *r, g2z_device *d, const g2z_ops *op,
                               g2z_status *status) {
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

/* ===== the ops of a step ================================================= */

G2Z_API g2z_watch *g2z_watch_of(g2z_device *d) { return (g2z_watch *)d->ops; }

G2Z_API g2z_rounds *g2z_watch_rounds(g2z_watch *w, const char *name, const char *suffix,
                                     const char *unit, const char *formula, double amount,
                                     int again) {
  g2z_watch_row *row = w->rows;
  char whole[32];
  snprintf(whole, sizeof whole, "%.15s%.15s", name, suffix);
  while (row < w->rows + w->count && (strcmp(row->name, whole) != 0 || row->amount != amount))
    row++;
  if (row == w->rows + sizeof w->rows / sizeof *w->rows) return NULL;
  if (row == w->rows + w->count) {
    w->count++;
    memcpy(row->name, whole, sizeof whole);
    row->unit = unit;
    for (char *to = row->formula; *formula && to + 1 < row->formula + sizeof row->formula; to++) {
      if (strncmp(formula, "op->", 4) == 0) formula += 4;
      *to = *formula++;
    }
    row->amount = amount;
    row->again = again;
  }
  if (w->counts) row->calls++;
  if (w->counts || row->timed.round > 0) return NULL;
  if (w->only && row != w->only) return NULL;
  if (!w->only && !row->again) return NULL;
  return &row->timed;
}

/* ===== limits of this machine ============================================ */

/* The data is noise: zeros would overstate a GPU's rate, since its clock follows the load. */
G2Z_API g2z_status g2z_limits_measure(g2z_services *services, const g2z_plan *plan,
                                      g2z_limits *limit) {
  enum { COPY = 1 << 24 };      /* elements that fit no cache */
  const int side = plan->device == G2Z_DEVICE_CUDA ? 4096 : 1024;
  g2z_device *d;
  const size_t matrix = (size_t)side * (size_t)side * sizeof(float);
  const size_t copies = COPY * sizeof(float);
  g2z_rounds product, copy;
  void *block = NULL;
  float *host;
  memset(&product, 0, sizeof product);
  memset(&copy, 0, sizeof copy);
  G2Z_TRY(g2z_allocate(services, copies, 1, &host));
  for (size_t i = 0; i < COPY; i += 4) {
    uint32_t counter[4] = {(uint32_t)(i / 4), 0, 1, 0}, bits[4];
    g2z_philox(1, G2Z_RANDOM_SYNTHETIC, counter, bits);
    for (int k = 0; k < 4; k++) host[i + (size_t)k] = 0.2f * (g2z_uniform(bits[k]) - 0.5f);
  }
  g2z_status status = g2z_device_create(services, plan->device, plan->dtype, plan->dtype, &d);
  const g2z_ops *op = NULL;
  if (status == G2Z_OK) {
    op = d->ops;
    status = op->allocate(d, 2 * copies + 2 * matrix, &block);
  }
  float *noise = (float *)block;
  char *out = (char *)block + copies, *left = out + copies, *right = left + matrix;
  if (status == G2Z_OK) status = op->upload(d, noise, host, copies);
  if (status == G2Z_OK) status = op->cast_act(d, left, noise, matrix / sizeof(float));
  if (status == G2Z_OK) status = op->cast_act(d, right, noise, matrix / sizeof(float));
  g2z_linear_fwd square;        /* out = left right + left's first row */
  memset(&square, 0, sizeof square);
  square.y = out;
  square.x = square.bias = left;
  square.w = right;
  square.N = square.K = square.O = side;
  do {
    if (status == G2Z_OK) status = op->linear_fwd(d, &square);
  } while (g2z_rounds_another(&product, d, op, &status));
  do {
    if (status == G2Z_OK) status = op->cast_act(d, out, noise, COPY);
  } while (g2z_rounds_another(&copy, d, op, &status));
  if (block) op->release(d, block);
  g2z_device_free(d);
  g2z_release(services, host);
  limit->side = side;
  limit->product = 2.0 * side * (double)side * side / product.s[0];
  limit->copy = (double)COPY * (4 + plan->dtype_bytes) / copy.s[0];
  return status;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_BENCH_IMPLEMENTED */
