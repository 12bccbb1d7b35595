/* g2z_bench.h: times the calls of a device of gpt2_zero.h: single calls in rounds, the ops of a
 * training step, and the two calls whose rates limit this machine. MIT licence.
 *
 * g2z_bench.h prints nothing: bench.cu prints the rows.
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
 * Measures the seconds per call. The first call is not timed; then come five rounds of at least
 * 10 ms. */

typedef struct g2z_rounds {     /* set all members to zero first */
  double s[5], begin;           /* s: seconds per call in each round, sorted at the end */
  int round, calls, left;       /* rounds done; calls per round; calls left in this round */
} g2z_rounds;

/* Must follow each call that is timed; `op` and `d` are its ops and its device. Returns 1 if the
 * call should be repeated, 0 after five rounds or if *status is a failure. */
G2Z_API int g2z_rounds_another(g2z_rounds *r, g2z_device *d, const g2z_ops *op,
                               g2z_status *status);

/* ===== the ops of a step =================================================
 * Measures each op that a training step calls. */

typedef struct g2z_watch_row {  /* an op, with operands of one size */
  char name[32];
  const char *unit;             /* unit of `amount`: "GFLOP" or "GB" */
  char formula[96];             /* formula of `amount`, as text */
  double calls, amount;         /* number of calls in a step; minimum work of one call */
  int again;                    /* 1: a second call would leave the same values */
  g2z_rounds timed;
  double seconds, limit_s;      /* time of one call: measured, and at the machine's limit */
} g2z_watch_row;

typedef struct g2z_watch {
  g2z_watch_row rows[32];       /* in the order in which a step first calls them */
  int count;
  /* The rest is private. */
  g2z_ops ops;
  const g2z_ops *right;         /* the device's own ops */
  int counts;                   /* 1: this step counts calls and times none */
  const g2z_watch_row *only;    /* the row that this step times; NULL: all rows with again 1 */
  double a, g, m;               /* bytes per element of activations, gradients and moments */
} g2z_watch;

/* Counts and times the ops of a step over `tokens` [accum B T + 1]. The trainer must not use
 * graphs. Runs about as many steps as there are rows, and spoils the trainer's weights. */
G2Z_API g2z_status g2z_watch_step(g2z_trainer *t, const int32_t *tokens, g2z_watch *w);

/* ===== limits of this machine ============================================ */

typedef struct g2z_limits {     /* rates of a large product and a copy, in the best of 5 rounds */
  int side;                     /* rows of the product's square matrices */
  double product, copy;         /* flops per second, bytes per second */
} g2z_limits;

/* Measures the limits for the device and the dtype of a plan. Needs memory of the device: call it
 * before a trainer takes that memory. */
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
  if (r->round == 5) g2z_median(r->s, 5); /* sorts r->s */
  if (r->round == 5) return 0;
  r->left = r->calls - 1;
  r->begin = g2z_seconds();
  return 1;
}

/* ===== the ops of a step ================================================= */

/* A table of timed ops replaces the ops of a trainer's device, so it receives each op call of a
 * step. The first step counts calls. The second step times all rows whose call may be repeated.
 * Each other row is timed in a step of its own, because a repeated call that adds to its output
 * spoils the rest of the step. The weights stay right until AdamW is repeated, and AdamW is the
 * last row. */
static g2z_watch *g2zb_watching; /* the watch of the step that runs; there is only one */

/* Finds or adds the row of a call; its name is `name` followed by `suffix`. Returns the rounds of
 * the row. NULL: the call is not timed in this step, or there is no room for its row. */
static g2z_rounds *g2zb_rounds_of(g2z_watch *w, const char *name, const char *suffix,
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
      if (strncmp(formula, "g2zb_", 5) == 0) formula += 5;
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

/* The name of a product with weights [K,O]: a block has four products of different shapes. */
static const char *g2zb_product_of(int K, int O) {
  if (O == 3 * K) return "qkv";
  if (O == 4 * K) return "fc";
  if (K == 4 * O) return "fcproj";
  return "attproj";
}

static double g2zb_elements_of(const g2z_range *ranges, int count) {
  double elements = 0;
  for (int i = 0; i < count; i++) elements += (double)ranges[i].elements;
  return elements;
}

static double g2zb_elements_of_update(const g2z_update *update, size_t begin, size_t end) {
  double elements = 0;
  for (size_t i = begin; i < end; i++) elements += (double)update->host_ranges[i].elements;
  return elements;
}

/* The operations of Muon's orthogonalization. Each iteration has three products, with results of
 * m x m, m x m and m x n. */
static double g2zb_flops_of_matrices(const g2z_matrices *shapes, int count) {
  double flops = 0;
  for (int i = 0; i < count; i++) {
    const double rows = shapes[i].rows, columns = (double)shapes[i].columns / shapes[i].matrices;
    const double m = fmin(rows, columns), n = fmax(rows, columns);
    flops += G2Z_ORTHOGONALIZE_STEPS * shapes[i].weights * shapes[i].matrices * m * m *
             (4 * n + 2 * m);
  }
  return flops;
}

/* Each op that a step calls: the two parts of its row's name, the unit, the minimum work of one
 * call, and 1 if a call may be repeated. Formulas are printed as they stand here, without op-> and
 * g2zb_. In them a, g and m are the bytes per element of activations, gradients and moments. RUN:
 * an op with a struct of operands. CALL: an op with parameters and arguments as in g2z_ops. */
#define G2ZB_OPS(RUN, CALL)                                                                      \
  RUN(embed_fwd, "embed", "_fwd", GB, 2 * a * op->B * op->T * op->C, 1)                          \
  RUN(layernorm_fwd, "layernorm", "_fwd", GB, 2 * a * op->N * op->C, 1)                          \
  RUN(linear_fwd, g2zb_product_of(op->K, op->O), op->slope ? "_gelu_fwd" : "_fwd", GFLOP,        \
      2.0 * op->N * op->K * op->O, op->y != op->residual)                                        \
  RUN(attention_fwd, "attention", "_fwd", GFLOP, 2.0 * op->B * op->T * op->T * op->C, 1)         \
  RUN(head_loss, "head", "_loss", GFLOP, 6.0 * op->N * op->C * op->Vp,                           \
      op->mode == G2Z_OVERWRITE)                                                                 \
  RUN(layernorm_bwd, "layernorm", op->res_mode == G2Z_OVERWRITE ? "_bwd_last" : "_bwd", GB,      \
      (op->res_mode == G2Z_OVERWRITE ? 3 : 4) * a * op->N * op->C,                               \
      op->res_mode == G2Z_OVERWRITE)                                                             \
  RUN(linear_bwd_data, g2zb_product_of(op->K, op->O), "_bwd_data", GFLOP,                        \
      2.0 * op->N * op->K * op->O, op->mode == G2Z_OVERWRITE)                                    \
  RUN(linear_bwd_weight, g2zb_product_of(op->K, op->O), "_bwd_weight", GFLOP,                    \
      2.0 * op->N * op->K * op->O, op->mode == G2Z_OVERWRITE)                                    \
  RUN(attention_bwd, "attention", "_bwd", GFLOP, 5.0 * op->B * op->T * op->T * op->C,            \
      op->mode == G2Z_OVERWRITE)                                                                 \
  RUN(embed_bwd, "embed", op->dwte ? "_bwd" : "_bwd_wpe", GB,                                    \
      (op->dwte ? a + 8 : a) * op->B * op->T * op->C, !op->dwte)                                 \
  CALL(embed_order, (g2z_device *d, int32_t *order, const int32_t *tokens, int N),               \
       (d, order, tokens, N), "embed", "_order", GB, 12.0 * N, 1)                                \
  RUN(embed_add, "embed", "_add", GB, (a + 2 * g) * op->N * op->C, 0)                            \
  CALL(cast_grad, (g2z_device *d, void *to, const float *from, size_t n), (d, to, from, n),      \
       "cast", "_grad", GB, (4 + g) * (double)n, 1)                                              \
  CALL(zero, (g2z_device *d, void *memory, size_t bytes), (d, memory, bytes), "zero", "", GB,    \
       (double)bytes, 1)                                                                         \
  CALL(grad_sumsq,                                                                               \
       (g2z_device *d, double *sum, const void *grads, const g2z_range *ranges, int count),      \
       (d, sum, grads, ranges, count),                                                           \
       "grad", "_sumsq", GB, g * g2zb_elements_of(ranges, count), 0)                             \
  CALL(adamw, (g2z_device *d, const g2z_update *update, size_t begin, size_t end),               \
       (d, update, begin, end),                                                                  \
       "adamw", "", GB, (8 + 4 * m + g + a) * g2zb_elements_of_update(update, begin, end), 0)    \
  CALL(momentum,                                                                                 \
       (g2z_device *d, void *u, const g2z_update *update, size_t begin, size_t end),             \
       (d, u, update, begin, end),                                                               \
       "momentum", "", GB, (10 + g) * g2zb_elements_of_update(update, begin, end), 0)            \
  CALL(orthogonalize,                                                                            \
       (g2z_device *d, void *area, const g2z_matrices *shapes, int count, void *work,            \
        size_t work_bytes),                                                                      \
       (d, area, shapes, count, work, work_bytes),                                               \
       "orthogonalize", "", GFLOP, g2zb_flops_of_matrices(shapes, count), 0)                     \
  CALL(muon,                                                                                     \
       (g2z_device *d, const void *o, const g2z_update *update, size_t begin, size_t end),       \
       (d, o, update, begin, end),                                                               \
       "muon", "", GB, (10 + a) * g2zb_elements_of_update(update, begin, end), 0)

#define G2ZB_RUN(entry, name, suffix, unit, amount, again)                              \
  G2ZB_CALL(entry, (g2z_device *d, const g2z_##entry *op), (d, op), name, suffix, unit, \
            amount, again)
#define G2ZB_CALL(entry, parameters, arguments, name, suffix, unit, amount, again)       \
  static g2z_status g2zb_timed_##entry parameters {                                      \
    g2z_watch *seen = g2zb_watching;                                                     \
    const double a = seen->a, g = seen->g, m = seen->m;                                  \
    (void)a, (void)g, (void)m;                                                           \
    g2z_rounds *now = g2zb_rounds_of(seen, name, suffix, #unit, #amount, amount, again); \
    g2z_status status = seen->right->entry arguments;                                    \
    while (now && g2z_rounds_another(now, d, seen->right, &status))                      \
      status = seen->right->entry arguments;                                             \
    return status;                                                                       \
  }
G2ZB_OPS(G2ZB_RUN, G2ZB_CALL)
#undef G2ZB_RUN
#undef G2ZB_CALL

/* First runs steps until no gradient overflows: in a skipped step AdamW would do nothing. Then one
 * step counts calls, and the later steps time rows. */
G2Z_API g2z_status g2z_watch_step(g2z_trainer *t, const int32_t *tokens, g2z_watch *w) {
  g2z_report report;
  memset(w, 0, sizeof *w);
  w->a = t->plan->dtype_bytes;
  w->g = t->plan->grad_bytes;
  w->m = t->plan->moment_bytes;
  report.skipped = 1;
  for (int i = 0; i < 50 && report.skipped; i++) {
    G2Z_TRY(g2z_trainer_step_batch(t, tokens, tokens + 1, &report));
    G2Z_TRY(g2z_trainer_flush(t, &report));
  }
  w->right = t->device->ops;
  w->ops = *w->right;
#define G2ZB_WATCH(entry, ...) w->ops.entry = g2zb_timed_##entry;
  G2ZB_OPS(G2ZB_WATCH, G2ZB_WATCH)
#undef G2ZB_WATCH
#undef G2ZB_OPS
  g2zb_watching = w;
  t->device->ops = &w->ops;
  g2z_status status = G2Z_OK;
  for (int i = -2; i < w->count && status == G2Z_OK; i++) {
    w->counts = i == -2;
    if (i >= 0) w->only = &w->rows[i];
    if (i >= 0 && w->rows[i].again) continue;
    status = g2z_trainer_step_batch(t, tokens, tokens + 1, &report);
  }
  if (status == G2Z_OK) status = g2z_trainer_flush(t, &report);
  t->device->ops = w->right;
  return status;
}

/* ===== limits of this machine ============================================ */

/* The data is noise. With zeros a GPU would need less power and keep a higher clock: its rate would
 * be overstated. */
G2Z_API g2z_status g2z_limits_measure(g2z_services *services, const g2z_plan *plan,
                                      g2z_limits *limit) {
  enum { COPY = 1 << 24 };      /* number of elements: too many for a cache */
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
  g2z_linear_fwd square;        /* out = left * right; the first row of `left` is the bias */
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
