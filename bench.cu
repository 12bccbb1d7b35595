/* bench: how fast a training step is on this machine, and where its time goes. First whole steps,
 * then each op of a step alone, against two limits measured in the same run: the rate of a large
 * matrix product and of a copy. */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                          \
  do {                                     \
    g2z_status status_ = (call);           \
    if (status_ != G2Z_OK) return status_; \
  } while (0)

/* ----- options ---------------------------------------------------------- */

typedef struct options {
  g2z_train_config train;
  const char *model, *peer;
  int layers, heads, channels, context, vocab_size, seq; /* 0: see --help */
  int device, dtype, steps, without_ops, help;
  float bucket_mb;
} options;

#define WORD(name, text) "|" text
#define WORD_OF_3(name, text, bytes) "|" text
#define FLAG_LIST(FLAG)                                                                           \
  /*   name  kind  destination  minimum  maximum  value  help */                                  \
  FLAG("model", TEXT, model, 0, 0, "NAME",                                                        \
       "gpt2, gpt2-medium, gpt2-large, gpt2-xl [gpt2 on cuda; on cpu a small one]")               \
  FLAG("layers", INT, layers, 1, 1024, "N", "overrides the model's, as do the next four")         \
  FLAG("channels", INT, channels, 8, 65536, "N", "width of the residual stream")                  \
  FLAG("heads", INT, heads, 1, 65536, "N", "divides channels [channels / 64]")                    \
  FLAG("context", INT, context, 1, 1048576, "N", "positions: the longest sequence")               \
  FLAG("vocab-size", INT, vocab_size, 2, 65536, "N", "tokens that the model knows")               \
  FLAG("batch", INT, train.batch, 1, 1048576, "N", "sequences per micro-step")                    \
  FLAG("seq", INT, seq, 1, 1048576, "N", "tokens per sequence [context]")                         \
  FLAG("accum", INT, train.accum, 1, 1048576, "N", "micro-steps per step")                        \
  FLAG("dropout", FLOAT, train.dropout, 0, 0.99, "P", "on embedding, attention, projections")     \
  FLAG("train", TEXT, train.train_glob, 0, 0, "GLOB", "token shards [tokens by Zipf's law]")      \
  FLAG("steps", INT, steps, 1, 1000000, "N", "steps that are timed")                              \
  FLAG("device", CHOICE, device, 0, 0, G2Z_DEVICE_LIST(WORD), "[cuda if there is one]")           \
  FLAG("dtype", CHOICE, dtype, 0, 0, G2Z_DTYPE_LIST(WORD_OF_3), "[fp16 on cuda, fp32 on cpu]")    \
  FLAG("graph", CHOICE, train.graph, 0, 0, "|off|on|auto", "the step as one CUDA graph")          \
  FLAG("zero", INT, train.zero_stage, 0, 3, "STAGE", "ZeRO, on several ranks")                    \
  FLAG("grad-dtype", CHOICE, train.grad_fp32, 0, 0, "|same|fp32", "of gradients")                 \
  FLAG("gather", CHOICE, train.gather, 0, 0, G2Z_GATHER_LIST(WORD), "of parameters")              \
  FLAG("bucket-mb", FLOAT, bucket_mb, 0.001, 65536, "X", "MiB of gradients per collective")       \
  FLAG("peer", TEXT, peer, 0, 0, "COMMAND",                                                       \
       "run this on the same work too: 'python3 peers/torch_gpt2.py'")                            \
  FLAG("ops", CHOICE, without_ops, 0, 0, "|on|off", "time each op of a step, on one rank")        \
  FLAG("seed", UINT64, train.seed, 0, 0, "N", "of weights, tokens and dropout")                   \
  FLAG("help", SWITCH, help, 0, 0, "", "print this")

static void print_line(void *user, const char *text) {
  (void)user;
  puts(text);
}

static g2z_status read_flags(g2z_services *services, int argc, char **argv, options *o) {
#define FLAG(name, kind, destination, minimum, maximum, value, help) \
  {name, G2Z_FLAG_##kind, &o->destination, minimum, maximum, value, help},
  const g2z_flag flags[] = {FLAG_LIST(FLAG)};
#undef FLAG
  const int count = (int)(sizeof flags / sizeof *flags);
  memset(o, 0, sizeof *o);
  o->train = g2z_train_config_default();
  o->device = o->dtype = -1;
  o->steps = 10;
  options defaults = *o;
  g2z_status status = g2z_flags_parse(services, flags, count, argc, argv, NULL);
  if (status != G2Z_OK || !o->help) return status;
  *o = defaults;
  puts("bench: times whole training steps, then each op of a step against the machine's limits\n");
  g2z_flags_print(flags, count, print_line, NULL);
  o->help = 1;
  return G2Z_OK;
}

static g2z_status settle(g2z_services *services, options *o, g2z_context_config *context) {
  g2z_model_config *model = &o->train.model;
  TRY(g2z_place_find(services, &context->ranks.place));
  o->train.bucket_mb = (double)o->bucket_mb;
  if (o->device >= 0) context->device = (g2z_device_kind)o->device;
  int small = !o->model && context->device == G2Z_DEVICE_CPU;
  TRY(g2z_model_config_named(services, o->model ? o->model : "gpt2", model));
  if (small) {
    model->layers = 4;
    model->channels = 128;
    model->heads = 2;
    model->context = 128;
    model->vocab = 2048;
  }
  if (o->layers) model->layers = o->layers;
  if (o->channels) {
    model->channels = o->channels;
    model->heads = o->channels < 64 ? 1 : o->channels / 64;
  }
  if (o->heads) model->heads = o->heads;
  if (o->context) model->context = o->context;
  if (o->vocab_size) model->vocab = o->vocab_size;
  o->train.seq = o->seq ? o->seq : model->context;
  o->train.dtype = o->dtype >= 0 ? (g2z_dtype)o->dtype
                   : context->device == G2Z_DEVICE_CUDA ? G2Z_FP16 : G2Z_FP32;
  o->train.optimizer.warmup = 0;
  return G2Z_OK;
}

static void *host_memory(size_t bytes) {
  void *memory = malloc(bytes);
  if (memory) return memory;
  fprintf(stderr, "bench: no memory for %zu bytes: take a smaller --batch or --seq\n", bytes);
  exit(1);
}

/* ----- whole steps ------------------------------------------------------ */

static int order_of_doubles(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return left < right ? -1 : left > right;
}

/* Sorts the times and returns the median. */
static double median(double *times, int count) {
  qsort(times, (size_t)count, sizeof *times, order_of_doubles);
  return 0.5 * (times[(count - 1) / 2] + times[count / 2]);
}

/* Real text repeats a few tokens often, which is what makes the embedding's backward slow: rank r
 * is drawn with a probability proportional to 1 / r. */
static void zipf_tokens(uint64_t seed, int vocab, int32_t *tokens, size_t count) {
  double *below = (double *)host_memory((size_t)vocab * sizeof *below), sum = 0;
  for (int r = 0; r < vocab; r++) below[r] = sum += 1.0 / (r + 1);
  for (size_t i = 0; i < count; i++) {
    uint32_t counter[4] = {(uint32_t)(i / 4), (uint32_t)((uint64_t)i >> 34), 0, 0}, bits[4];
    g2z_philox(seed, G2Z_RANDOM_SYNTHETIC, counter, bits);
    double draw = (double)g2z_uniform(bits[i % 4]) * sum;
    int low = 0, high = vocab - 1;
    while (low < high) {
      int middle = (low + high) / 2;
      if (below[middle] > draw) high = middle;
      else low = middle + 1;
    }
    tokens[i] = low;
  }
  free(below);
}

typedef struct steps_result {
  double least_s, median_s, most_s;
  double exposed_ms; /* the device waited for other ranks, median */
} steps_result;

static g2z_status time_steps(g2z_context *context, const options *o, steps_result *result) {
  const int warm = 2; /* pages are touched, caches filled, algorithms chosen */
  size_t count = (size_t)o->train.accum * (size_t)o->train.batch * (size_t)o->train.seq;
  int32_t *tokens = (int32_t *)host_memory((count + 1) * sizeof *tokens);
  double *times = (double *)host_memory((size_t)o->steps * sizeof *times);
  double *exposed = (double *)host_memory((size_t)o->steps * sizeof *exposed);
  g2z_trainer *trainer = NULL;
  g2z_report report;
  zipf_tokens(o->train.seed, o->train.model.vocab, tokens, count + 1);
  g2z_status status = g2z_trainer_create(context, &o->train, &trainer);
  for (int step = -warm; step < o->steps && status == G2Z_OK; step++) {
    double begin = g2z_seconds();
    status = o->train.train_glob
                 ? g2z_trainer_step(trainer, &report)
                 : g2z_trainer_step_batch(trainer, tokens, tokens + 1, &report);
    if (step >= 0) times[step] = g2z_seconds() - begin;
    if (step >= 0) exposed[step] = report.exposed_comm_ms;
  }
  if (status == G2Z_OK) status = g2z_trainer_flush(trainer, &report);
  if (status == G2Z_OK) {
    result->median_s = median(times, o->steps);
    result->least_s = times[0];
    result->most_s = times[o->steps - 1];
    result->exposed_ms = median(exposed, o->steps);
  }
  g2z_trainer_free(trainer);
  free(exposed);
  free(times);
  free(tokens);
  return status;
}

/* ----- ops -------------------------------------------------------------- */

typedef struct bench {
  g2z_device *device;
  const g2z_plan *plan;
  g2z_optimizer_config optimizer;
  int B, T, C, L, NH, V, Vp, N, chunk, accum;
  g2z_dropout dropout;
  /* act: a1 [N,C], b1 [N,C], c1 [N,C], a3 [N,3C], b3 [N,3C], a4 [N,4C], b4 [N,4C]; weights w
   * [C,4C], wte [Vp,C], bias [4C], logits [chunk,Vp]; copies from and to, f32 and act. */
  void *a1, *b1, *c1, *a3, *b3, *a4, *b4, *w, *wte, *bias, *logits, *params;
  void *gw, *gb, *gwpe, *grads;                /* grad */
  float *mean, *rstd, *lse, *losses, *dwte, *master, *m, *v, *noise;
  double *sum;
  int32_t *tokens;
  g2z_step_state *state;
  g2z_update_range *ranges, *host_ranges;
  size_t range_count;
  int side;                                    /* of the large product: square[i] [side,side] act */
  void *square[3];
  void *held[48];                              /* all of the above, for close_bench */
  int held_count;
} bench;

/* Each op of a step: how often a step runs it, what one call does at least, and the call. The
 * formulas are printed as they stand here; g is an element of gradients and a one of activations
 * in bytes, A the micro-steps, P the parameters. */
#define OP_LIST(OP)                                                                               \
  OP(embed_fwd, A, GB, N * C * 2 * a,                                                             \
     op->embed_fwd(d, b->a1, b->tokens, b->wte, b->w, &b->dropout, b->B, b->T, b->C))             \
  OP(layernorm_fwd, A * (2 * L + 1), GB, N * C * 2 * a,                                           \
     op->layernorm_fwd(d, b->b1, b->mean, b->rstd, b->a1, b->w, b->bias, b->N, b->C))             \
  OP(qkv_fwd, A * L, GFLOP, 2 * N * C * 3 * C,                                                    \
     op->linear_fwd(d, b->a3, NULL, b->a1, b->w, b->bias, NULL, NULL, b->N, b->C, 3 * b->C))      \
  OP(attention_fwd, A * L, GFLOP, 2 * N * T * C,                                                  \
     op->attention_fwd(d, b->b1, b->lse, b->a3, &b->dropout, b->B, b->T, b->C, b->NH))            \
  OP(attproj_fwd, A * L, GFLOP, 2 * N * C * C,                                                    \
     op->linear_fwd(d, b->b1, NULL, b->a1, b->w, b->bias, b->c1, &b->dropout, b->N, b->C, b->C))  \
  OP(fc_gelu_fwd, A * L, GFLOP, 2 * N * C * 4 * C,                                                \
     op->linear_fwd(d, b->a4, b->b4, b->a1, b->w, b->bias, NULL, NULL, b->N, b->C, 4 * b->C))     \
  OP(fcproj_fwd, A * L, GFLOP, 2 * N * 4 * C * C,                                                 \
     op->linear_fwd(d, b->b1, NULL, b->a4, b->w, b->bias, b->c1, &b->dropout, b->N, 4 * b->C,     \
                    b->C))                                                                        \
  OP(head_loss, A, GFLOP, 6 * N * C * Vp,                                                         \
     op->head_loss(d, b->losses, b->sum, b->b1, b->dwte, b->logits, b->a1, b->wte, b->tokens,     \
                   1.0f / (float)b->N, b->state, G2Z_OVERWRITE, b->N, b->C, b->V, b->Vp,          \
                   b->chunk))                                                                     \
  OP(layernorm_bwd, A * (2 * L + 1), GB, N * C * 4 * a,                                           \
     op->layernorm_bwd(d, b->b1, b->c1, b->gw, b->gb, b->gwpe, b->a1, b->a3, b->w, b->mean,       \
                       b->rstd, G2Z_OVERWRITE, G2Z_OVERWRITE, &b->dropout, b->N, b->C))           \
  OP(fcproj_bwd_data, A * L, GFLOP, 2 * N * C * 4 * C,                                            \
     op->linear_bwd_data(d, b->a4, b->gb, b->a1, b->w, b->b4, G2Z_OVERWRITE, b->N, 4 * b->C,      \
                         b->C))                                                                   \
  OP(fcproj_bwd_weight, A * L, GFLOP, 2 * N * 4 * C * C,                                          \
     op->linear_bwd_weight(d, b->gw, b->a4, b->a1, G2Z_OVERWRITE, b->N, 4 * b->C, b->C))          \
  OP(fc_bwd_data, A * L, GFLOP, 2 * N * 4 * C * C,                                                \
     op->linear_bwd_data(d, b->b1, NULL, b->a4, b->w, NULL, G2Z_OVERWRITE, b->N, b->C, 4 * b->C)) \
  OP(fc_bwd_weight, A * L, GFLOP, 2 * N * C * 4 * C,                                              \
     op->linear_bwd_weight(d, b->gw, b->a1, b->a4, G2Z_OVERWRITE, b->N, b->C, 4 * b->C))          \
  OP(attproj_bwd_data, A * L, GFLOP, 2 * N * C * C,                                               \
     op->linear_bwd_data(d, b->b1, NULL, b->a1, b->w, NULL, G2Z_OVERWRITE, b->N, b->C, b->C))     \
  OP(attproj_bwd_weight, A * L, GFLOP, 2 * N * C * C,                                             \
     op->linear_bwd_weight(d, b->gw, b->a1, b->c1, G2Z_OVERWRITE, b->N, b->C, b->C))              \
  OP(attention_bwd, A * L, GFLOP, 5 * N * T * C,                                                  \
     op->attention_bwd(d, b->b3, b->gb, b->a1, b->c1, b->lse, b->a3, G2Z_OVERWRITE, &b->dropout,  \
                       b->B, b->T, b->C, b->NH))                                                  \
  OP(qkv_bwd_data, A * L, GFLOP, 2 * N * 3 * C * C,                                               \
     op->linear_bwd_data(d, b->b1, NULL, b->a3, b->w, NULL, G2Z_OVERWRITE, b->N, b->C, 3 * b->C)) \
  OP(qkv_bwd_weight, A * L, GFLOP, 2 * N * C * 3 * C,                                             \
     op->linear_bwd_weight(d, b->gw, b->a1, b->a3, G2Z_OVERWRITE, b->N, b->C, 3 * b->C))          \
  OP(embed_bwd, A, GB, N * C * (a + 8),                                                           \
     op->embed_bwd(d, b->dwte, b->gwpe, b->a1, b->tokens, G2Z_OVERWRITE, &b->dropout, b->B, b->T, \
                   b->C))                                                                         \
  OP(grad_sumsq, 1, GB, P * g,                                                                    \
     op->grad_sumsq(d, b->sum, b->grads, b->plan->shard_elements))                                \
  OP(adamw, 1, GB, P * (24 + g + a),                                                              \
     op->adamw(d, b->params, b->master, b->m, b->v, b->grads, b->ranges, b->host_ranges,          \
               b->range_count, &b->optimizer, b->state))

#define OP(name, calls, unit, amount, call)          \
  static g2z_status run_##name(bench *b) {           \
    g2z_device *d = b->device;                       \
    const g2z_ops *op = d->ops;                      \
    return call;                                     \
  }
OP_LIST(OP)
/* The two limits. A product that is as large as it needs to be, and a copy that fits no cache. */
#define COPY_ELEMENTS ((size_t)1 << 24)
OP(product, 1, GFLOP, 0,
   op->linear_fwd(d, b->square[0], NULL, b->square[1], b->square[2], b->bias, NULL, NULL, b->side,
                  b->side, b->side))
OP(copy, 1, GB, 0, op->cast_act(d, b->square[0], b->noise, COPY_ELEMENTS))
#undef OP

typedef struct op_row {
  const char *name, *unit, *formula;
  double calls, amount;
  g2z_status (*run)(bench *b);
  double seconds, limit_s;      /* of one call: as timed, and at the machine's limit */
} op_row;

#define OP(name, calls, unit, amount, call) +1
enum { OP_COUNT = 0 OP_LIST(OP) };
#undef OP

static void fill_rows(const bench *b, op_row *row) {
  double N = b->N, C = b->C, T = b->T, L = b->L, Vp = b->Vp, A = b->accum;
  double P = (double)b->plan->parameters, a = b->plan->dtype_bytes, g = b->plan->grad_bytes;
#define OP(name_, calls_, unit_, amount_, call) \
  row->name = #name_;                           \
  row->unit = #unit_;                           \
  row->formula = #amount_;                      \
  row->calls = calls_;                          \
  row->amount = amount_;                        \
  row++->run = run_##name_;
  OP_LIST(OP)
#undef OP
}

static g2z_status device_zeros(bench *b, size_t elements, size_t size, void *out) {
  void *memory;
  TRY(b->device->ops->allocate(b->device, elements * size, &memory));
  memcpy(out, &memory, sizeof memory); /* whatever type the pointer has */
  b->held[b->held_count++] = memory;
  return G2Z_OK;
}

static void close_bench(bench *b) {
  for (int i = 0; i < b->held_count; i++) b->device->ops->release(b->device, b->held[i]);
  g2z_device_free(b->device);
  free(b->host_ranges);
}

/* `elements` of act with noise in them: zeros would flatter a GPU, whose clock follows the load. */
static g2z_status device_noise(bench *b, size_t elements, void *out) {
  void *memory;
  size_t size = (size_t)b->plan->dtype_bytes;
  TRY(device_zeros(b, elements, size, &memory));
  for (size_t done = 0; done < elements; done += COPY_ELEMENTS) {
    size_t count = elements - done < COPY_ELEMENTS ? elements - done : COPY_ELEMENTS;
    TRY(b->device->ops->cast_act(b->device, (char *)memory + done * size, b->noise, count));
  }
  memcpy(out, &memory, sizeof memory);
  return G2Z_OK;
}

static g2z_status fill_noise(bench *b) {
  float *host = (float *)host_memory(COPY_ELEMENTS * sizeof *host);
  for (size_t i = 0; i < COPY_ELEMENTS; i += 4) {
    uint32_t counter[4] = {(uint32_t)(i / 4), 0, 1, 0}, bits[4];
    g2z_philox(1, G2Z_RANDOM_SYNTHETIC, counter, bits);
    for (int k = 0; k < 4; k++) host[i + (size_t)k] = 0.2f * (g2z_uniform(bits[k]) - 0.5f);
  }
  TRY(device_zeros(b, COPY_ELEMENTS, sizeof(float), &b->noise));
  TRY(b->device->ops->upload(b->device, b->noise, host, COPY_ELEMENTS * sizeof *host));
  TRY(b->device->ops->synchronize(b->device));
  free(host);
  return G2Z_OK;
}

static g2z_status allocate_bench(bench *b) {
  size_t N = (size_t)b->N, C = (size_t)b->C, Vp = (size_t)b->Vp, P = b->plan->elements;
  size_t grad = (size_t)b->plan->grad_bytes, f32 = sizeof(float), side = (size_t)b->side;
  size_t square = side * side > COPY_ELEMENTS ? side * side : COPY_ELEMENTS; /* the copy's end */
  size_t rows = C > (size_t)b->T ? C : (size_t)b->T;
  TRY(fill_noise(b));
  for (int i = 0; i < 3; i++) TRY(device_noise(b, i ? side * side : square, &b->square[i]));
  TRY(device_noise(b, N * C, &b->a1));
  TRY(device_noise(b, N * C, &b->b1));
  TRY(device_noise(b, N * C, &b->c1));
  TRY(device_noise(b, N * 3 * C, &b->a3));
  TRY(device_noise(b, N * 3 * C, &b->b3));
  TRY(device_noise(b, N * 4 * C, &b->a4));
  TRY(device_noise(b, N * 4 * C, &b->b4));
  TRY(device_noise(b, rows * 4 * C, &b->w));
  TRY(device_noise(b, Vp * C, &b->wte));
  TRY(device_noise(b, 4 * C > side ? 4 * C : side, &b->bias));
  TRY(device_noise(b, P, &b->params));
  TRY(device_zeros(b, (size_t)b->chunk * Vp, f32, &b->logits)); /* of act, which is no larger */
  TRY(device_zeros(b, 4 * C * C, grad, &b->gw));
  TRY(device_zeros(b, 4 * C, grad, &b->gb));
  TRY(device_zeros(b, rows * C, grad, &b->gwpe));
  TRY(device_zeros(b, P, grad, &b->grads));
  TRY(device_zeros(b, N, f32, &b->mean));
  TRY(device_zeros(b, N, f32, &b->rstd));
  TRY(device_zeros(b, N * (size_t)b->NH, f32, &b->lse));
  TRY(device_zeros(b, N, f32, &b->losses));
  TRY(device_zeros(b, Vp * C, f32, &b->dwte));
  TRY(device_zeros(b, P, f32, &b->master));
  TRY(device_zeros(b, P, f32, &b->m));
  TRY(device_zeros(b, P, f32, &b->v));
  TRY(device_zeros(b, 1, sizeof(double), &b->sum));
  TRY(device_zeros(b, N, sizeof(int32_t), &b->tokens));
  return device_zeros(b, 1, sizeof(g2z_step_state), &b->state);
}

static g2z_status open_bench(bench *b, g2z_services *services, const options *o,
                             const g2z_plan *plan) {
  memset(b, 0, sizeof *b);
  b->plan = plan;
  b->optimizer = o->train.optimizer;
  b->B = plan->batch;
  b->T = plan->seq;
  b->C = plan->model.channels;
  b->L = plan->model.layers;
  b->NH = plan->model.heads;
  b->V = plan->model.vocab;
  b->Vp = plan->vocab_padded;
  b->N = b->B * b->T;
  b->chunk = plan->head_chunk;
  b->accum = plan->accum;
  b->side = plan->device == G2Z_DEVICE_CUDA ? 4096 : 1024;
  TRY(g2z_device_create(services, plan->device, plan->dtype, plan->grad_dtype, &b->device));
  TRY(allocate_bench(b));
  b->range_count = g2z_plan_update_ranges(plan, NULL, 0);
  b->host_ranges = (g2z_update_range *)host_memory(b->range_count * sizeof *b->host_ranges);
  size_t N = (size_t)b->N;
  int32_t *tokens = (int32_t *)host_memory(N * sizeof *tokens);
  g2z_plan_update_ranges(plan, b->host_ranges, b->range_count);
  TRY(device_zeros(b, b->range_count, sizeof *b->ranges, &b->ranges));
  TRY(b->device->ops->upload(b->device, b->ranges, b->host_ranges,
                             b->range_count * sizeof *b->ranges));
  zipf_tokens(o->train.seed, b->V, tokens, N);
  TRY(b->device->ops->upload(b->device, b->tokens, tokens, N * sizeof *tokens));
  g2z_step_state first;
  memset(&first, 0, sizeof first);
  first.applied = 1;
  first.loss_scale = first.grad_multiplier = 1;
  TRY(b->device->ops->upload(b->device, b->state, &first, sizeof first));
  TRY(b->device->ops->synchronize(b->device));
  free(tokens);
  b->dropout.probability = o->train.dropout;
  b->dropout.stride = 1;
  b->dropout.seq = b->T;
  b->dropout.seed = o->train.seed;
  b->dropout.state = b->state;
  return G2Z_OK;
}

/* Seconds per call in five rounds of at least 10 ms each, sorted. */
static g2z_status time_op(bench *b, g2z_status (*run)(bench *b), double rounds[5]) {
  const g2z_ops *op = b->device->ops;
  int calls = 1;
  TRY(run(b));
  TRY(op->synchronize(b->device));
  for (int round = 0; round < 5;) {
    double begin = g2z_seconds();
    for (int i = 0; i < calls; i++) TRY(run(b));
    TRY(op->synchronize(b->device));
    double spent = g2z_seconds() - begin;
    rounds[round] = spent / calls;
    if (spent < 0.01 && round == 0) calls *= 2;
    else round++;
  }
  qsort(rounds, 5, sizeof *rounds, order_of_doubles);
  return G2Z_OK;
}

/* What an op's calls in a step take beyond the limit. */
static double gap_s(const op_row *row) { return row->calls * (row->seconds - row->limit_s); }

static int order_of_gaps(const void *a, const void *b) {
  double left = gap_s((const op_row *)a), right = gap_s((const op_row *)b);
  return left > right ? -1 : left < right;
}

/* Each op against its limit, the largest gap first: in ns per token of the step. */
static g2z_status time_ops(bench *b, double step_s, double *product_rate) {
  op_row rows[OP_COUNT];
  double product_s[5], copy_s[5], op_s[5], sum_s = 0;
  double product = 2.0 * b->side * (double)b->side * b->side;
  double copied = (double)COPY_ELEMENTS * (4 + b->plan->dtype_bytes);
  TRY(time_op(b, run_product, product_s));
  TRY(time_op(b, run_copy, copy_s));
  *product_rate = product / product_s[0]; /* a limit is the best that was seen */
  double copy_rate = copied / copy_s[0];
  printf("\nlimits measured here: product of %d x %d x %d %.1f GFLOP/s, copy %.2f GB/s\n\n",
         b->side, b->side, b->side, *product_rate * 1e-9, copy_rate * 1e-9);
  printf("%-19s %6s %10s %9s %6s %17s %6s %8s  %s\n", "op", "calls", "us/call", "ms/step", "share",
         "rate", "limit", "gap ns/t", "counted as");
  fill_rows(b, rows);
  for (int i = 0; i < OP_COUNT; i++) {
    TRY(time_op(b, rows[i].run, op_s));
    rows[i].seconds = op_s[2];
    rows[i].limit_s = rows[i].amount / (rows[i].unit[1] == 'F' ? *product_rate : copy_rate);
    sum_s += rows[i].calls * rows[i].seconds;
  }
  qsort(rows, OP_COUNT, sizeof *rows, order_of_gaps);
  for (int i = 0; i < OP_COUNT; i++) {
    const op_row *row = &rows[i];
    printf("%-19s %6.0f %10.1f %9.2f %5.1f%% %9.2f %7s/s %5.1f%% %8.1f  %s\n", row->name, row->calls,
           row->seconds * 1e6, row->calls * row->seconds * 1e3,
           100 * row->calls * row->seconds / step_s, row->amount / row->seconds * 1e-9, row->unit,
           100 * row->limit_s / row->seconds,
           gap_s(row) * 1e9 / ((double)b->N * b->accum), row->formula);
  }
  printf("%-19s %6s %10s %9.2f %5.1f%%  of the median step; ops that run alone may find "
         "their data in caches, then beyond 100 %% of the copy\n", "sum", "", "", sum_s * 1e3,
         100 * sum_s / step_s);
  return G2Z_OK;
}

/* ----- a peer ----------------------------------------------------------- */

/* Runs COMMAND with the flags of this work behind it; the last line that it prints is JSON with its
 * name as "peer" and its "tokens_per_second". */
static g2z_status run_peer(g2z_services *services, const options *o, double tokens_per_second) {
  char command[1024], line[4096], last[4096] = "", name[128] = "the peer";
  snprintf(command, sizeof command, "%.700s --model %s --dtype %s --batch %d --seq %d --accum %d "
           "--steps %d", o->peer, o->model ? o->model : "gpt2", g2z_dtype_text(o->train.dtype),
           o->train.batch, o->train.seq, o->train.accum, o->steps);
  printf("\npeer        %s\n", command);
  fflush(stdout);
  FILE *pipe = popen(command, "r");
  while (pipe && fgets(line, sizeof line, pipe))
    if (line[0] == '{') memcpy(last, line, sizeof last);
  int code = pipe ? pclose(pipe) : -1;
  g2z_json json;
  g2z_json_text key;
  double theirs = 0;
  g2z_json_open(&json, services, "the peer's last line", last, strlen(last));
  if (code == 0 && g2z_json_enter(&json, '{'))
    while (g2z_json_next(&json, '}', &key)) {
      if (g2z_json_is(&key, "tokens_per_second")) theirs = g2z_json_number(&json);
      else if (g2z_json_is(&key, "peer")) {
        g2z_json_text text = g2z_json_string(&json);
        snprintf(name, sizeof name, "%.*s", (int)(text.bytes < 100 ? text.bytes : 100),
                 (const char *)text.at);
      } else g2z_json_skip(&json);
    }
  if (code == 0) TRY(g2z_json_close(&json));
  if (code != 0 || !(theirs > 0)) {
    snprintf(services->error, sizeof services->error,
             "`%.400s` %s: run it alone to see why", command,
             code ? "failed" : "printed no tokens_per_second");
    return G2Z_IO;
  }
  printf("peer        %.0f tokens/s, %s; this: %.3f times as many\n", theirs, name,
         tokens_per_second / theirs);
  return G2Z_OK;
}

static g2z_status run_bench(g2z_services *services, const options *o,
                            const g2z_context_config *context_config) {
  g2z_context *context;
  g2z_plan plan;
  steps_result steps = {0, 0, 0, 0};
  bench b;
  double product_rate = 0;
  const g2z_place *place = &context_config->ranks.place;
  TRY(g2z_plan_make(services, &o->train, context_config->device, place->rank, place->world, &plan));
  g2z_plan_print(&plan, 0, 0, print_line, NULL);
  TRY(g2z_context_create(context_config, &context));
  g2z_status status = time_steps(context, o, &steps);
  g2z_context_free(context);
  TRY(status);
  double tokens = (double)plan.batch * plan.seq * plan.accum * plan.world;
  printf("\nstep        %.2f ms median, %.2f least, %.2f most, of %d\n", steps.median_s * 1e3,
         steps.least_s * 1e3, steps.most_s * 1e3, o->steps);
  printf("throughput  %.0f tokens/s\n", tokens / steps.median_s);
  fflush(stdout);
  if (plan.world > 1) { /* the ops are those of one rank */
    if (isnan(steps.exposed_ms)) puts("exposed     not measured inside a graph: --graph off");
    else
      printf("exposed     %.3f ms of communication, %.1f %% of the step\n", steps.exposed_ms,
             0.1 * steps.exposed_ms / steps.median_s);
    return G2Z_OK;
  }
  if (o->peer) TRY(run_peer(services, o, tokens / steps.median_s));
  if (o->without_ops) return G2Z_OK;
  status = open_bench(&b, services, o, &plan);
  if (status == G2Z_OK) status = time_ops(&b, steps.median_s, &product_rate);
  close_bench(&b);
  TRY(status);
  /* Matrices three times forward, attention's causal half of T x T likewise. */
  double C = plan.model.channels, L = plan.model.layers;
  double flops = 6 * (12 * L * C * C + plan.model.vocab * C) + 6 * L * plan.seq * C;
  printf("MFU         %.1f %% of the measured product: %.2f MFLOP per token, 6 (12 L C C + V C) + "
         "6 L T C\n", 100 * flops * tokens / steps.median_s / product_rate, flops * 1e-6);
  return G2Z_OK;
}

static void print_log(void *user, g2z_log_level level, const char *sentence) {
  (void)user;
  printf("%s%s\n", level == G2Z_LOG_WARNING ? "warning: " : "", sentence);
}

int main(int argc, char **argv) {
  g2z_services services;
  memset(&services, 0, sizeof services);
  services.log = print_log;
  options o;
  g2z_context_config context = g2z_context_config_default(&services);
  g2z_status status = read_flags(&services, argc, argv, &o);
  if (status == G2Z_OK && !o.help) {
    status = settle(&services, &o, &context);
    if (status == G2Z_OK && context.ranks.place.rank != 0 && !freopen("/dev/null", "w", stdout))
      fprintf(stderr, "bench: rank %d cannot be silenced\n", context.ranks.place.rank);
    if (status == G2Z_OK) status = run_bench(&services, &o, &context);
  }
  if (status != G2Z_OK) fprintf(stderr, "bench: %s\n", services.error);
  return status == G2Z_OK ? 0 : 1;
}
