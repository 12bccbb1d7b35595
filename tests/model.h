/* Tests of the room model: golden values from another implementation, gradients against finite
 * differences, and whole models on a GPU against the CPU. */

/* ----- golden values ------------------------------------------------------ */

/* The fp32 tensor `name` of a file in golden/. The test owns it. */
static float *test_golden_of(g2z_test *t, const char *path, const char *name, size_t *count) {
  char *text = NULL;
  size_t bytes = 0, begin = 0, end = 0, header = 0;
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 26, &text, &bytes));
  if (text) memcpy(&header, text, 8);
  const char *entry = text ? strstr(text + 8, test_text("\"%s\":{\"dtype\":\"F32\"", name)) : NULL;
  const char *offsets = entry ? strstr(entry, "\"data_offsets\":[") : NULL;
  CHECK(t, offsets && sscanf(offsets, "\"data_offsets\":[%zu,%zu]", &begin, &end) == 2);
  float *values = (float *)test_memory(t, end - begin);
  if (offsets) memcpy(values, text + 8 + header + begin, end - begin);
  *count = (end - begin) / sizeof(float);
  g2z_release(&t->services, text);
  return values;
}
static float *test_golden(g2z_test *t, const char *name, size_t *count) {
  return test_golden_of(t, "golden/values.safetensors", name, count);
}

static int32_t *test_golden_tokens(g2z_test *t, const char *name, size_t *count) {
  float *values = test_golden(t, name, count);
  int32_t *tokens = (int32_t *)test_memory(t, *count * sizeof *tokens);
  for (size_t i = 0; i < *count; i++) tokens[i] = (int32_t)values[i];
  return tokens;
}

/* The allowed difference between a type's results and fp32's. Values are rounded when they are
 * stored, about thirty times between a token and its loss. Each rounding errs at random by at most
 * half a unit in the last place: sqrt(30) / 2 units in all, and three times that for the largest of
 * many values. AdamW divides by a gradient's size, so a rounded gradient changes ten steps' losses
 * by the same amount again. tf32 rounds only the inputs of products, to as many bits as fp16
 * has. */
typedef struct golden_bounds {
  g2z_device_kind device;
  g2z_dtype dtype;
  double logits, loss, gradient, steps; /* gradient: of a tensor's norm */
} golden_bounds;

static const golden_bounds golden_cpu = {G2Z_DEVICE_CPU, G2Z_FP32, 1e-5, 1e-5, 1e-4, 1e-4};
static const golden_bounds golden_gpu[] = {{G2Z_DEVICE_CUDA, G2Z_FP32, 1e-5, 1e-5, 1e-4, 1e-4},
                                           {G2Z_DEVICE_CUDA, G2Z_TF32, 8e-3, 2e-3, 8e-3, 5e-3},
                                           {G2Z_DEVICE_CUDA, G2Z_FP16, 8e-3, 2e-3, 8e-3, 5e-3},
                                           {G2Z_DEVICE_CUDA, G2Z_BF16, 6e-2, 2e-2, 6e-2, 4e-2}};

/* The tiny model of golden/, at its batch of 3 x 20 tokens. */
static g2z_status test_golden_open(g2z_test *t, const golden_bounds *bounds, int tune,
                                   g2z_train_config *config, test_trainer *out) {
  *config = g2z_train_config_default(G2Z_DEVICE_CPU);
  memset(out, 0, sizeof *out);
  config->init_from = "golden/tiny";
  config->batch = 3;
  config->seq = 20;
  config->dtype = bounds->dtype;
  config->tune = tune;
  config->optimizer.schedule = G2Z_SCHEDULE_CONSTANT;
  config->optimizer.warmup = 0;
  config->optimizer.lr = 1e-3f;
  config->optimizer.min_lr = 0;
  config->optimizer.loss_scale = 1024;
  g2z_status status = g2z_weights_config(&t->services, config->init_from, &config->model);
  return status == G2Z_OK ? test_trainer_on(t, bounds->device, config, out) : status;
}

static void test_golden_logits_on(g2z_test *t, g2z_model *model, double bound) {
  size_t count, logits_count;
  int32_t *x = test_golden_tokens(t, "x", &count);
  float *want = test_golden(t, "logits", &logits_count);
  float *got = (float *)test_memory(t, logits_count * sizeof *got);
  double worst = 0;
  CHECK(t, count == 60 && logits_count == 60u * 131u);
  CHECK_OK(t, g2z_model_logits(model, x, 3, 20, got));
  for (size_t i = 0; i < logits_count; i++)
    worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
  CHECK(t, worst > 0);
  CHECK_NEAR(t, worst, 0, bound);
}

/* Calls `each` for all tensors of a plan, with their canonical offset. */
typedef void (*test_tensor)(g2z_test *t, void *user, const char *name, g2z_param param,
                            size_t canonical, size_t elements);
static void test_tensors(g2z_test *t, const g2z_plan *plan, test_tensor each, void *user) {
  for (int unit = 0; unit < plan->units; unit++)
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      g2z_param_info info = g2z__param_describe(&plan->model, (g2z_param)p);
      char name[96], block[16] = "";
      if (info.unit != plan->unit[unit].kind) continue;
      if (info.unit == G2Z_UNIT_BLOCK)
        snprintf(block, sizeof block, "h.%d.", plan->model.layers - unit);
      snprintf(name, sizeof name, "%s%s", block, info.hf_name);
      each(t, user, name, (g2z_param)p, plan->unit[unit].canonical + plan->offset[p],
           info.elements);
    }
}

/* The L2 error of a gradient relative to its norm. Adding a constant to every key of a head shifts
 * all scores of a query alike, so the key bias has a zero gradient except for rounding. Its error
 * is compared with the norm of the bias's other two thirds. */
static void test_gradient_near(g2z_test *t, const char *name, const float *got, const float *want,
                               size_t count, double bound) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < count; i++) {
    error += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
    norm += (double)want[i] * (double)want[i];
  }
  FAIL_IF(t, !(norm > 0) || !(sqrt(error) <= bound * sqrt(norm)),
          "gradient of %s: error %.3g of norm %.3g, within %.3g", name, sqrt(error), sqrt(norm),
          bound * sqrt(norm));
}

typedef struct golden_gradients {
  g2z_trainer *trainer;
  double bound, scale;           /* scale: factor of the gradients */
} golden_gradients;

static void test_golden_gradient(g2z_test *t, void *user, const char *name, g2z_param param,
                                 size_t canonical, size_t elements) {
  const golden_gradients *g = (const golden_gradients *)user;
  char full[128];
  size_t count;
  (void)param;
  snprintf(full, sizeof full, "grad.transformer.%s", name);
  float *want = test_golden(t, full, &count);
  float *got = (float *)test_memory(t, elements * sizeof *got);
  CHECK(t, want && count == elements);
  CHECK_OK(t, g2z_trainer_read(g->trainer, G2Z_BUFFER_GRADS, canonical, elements, got));
  for (size_t i = 0; i < elements; i++) got[i] = (float)((double)got[i] / g->scale);
  if (want && count == elements) test_gradient_near(t, name, got, want, elements, g->bound);
}

static void test_golden_gradients_on(g2z_test *t, const golden_bounds *bounds, int tune) {
  g2z_train_config config;
  test_trainer tt;
  g2z_report report;
  size_t count;
  REQUIRE_OK(t, test_golden_open(t, bounds, tune, &config, &tt));
  int32_t *x = test_golden_tokens(t, "x", &count), *y = test_golden_tokens(t, "y", &count);
  float *loss = test_golden(t, "loss", &count);
  test_golden_logits_on(t, &tt.trainer->model, bounds->logits);
  test_steps(t, tt.trainer, x, y, 1, NULL, &report);
  CHECK_NEAR(t, report.loss, loss[0], bounds->loss);
  golden_gradients g = {tt.trainer, bounds->gradient, (double)report.loss_scale};
  test_tensors(t, tt.trainer->plan, test_golden_gradient, &g);
  test_trainer_close(t, &tt);
}

static void test_golden_adamw_on(g2z_test *t, const golden_bounds *bounds, int tune) {
  g2z_train_config config;
  test_trainer tt;
  g2z_report report;
  size_t count, steps;
  REQUIRE_OK(t, test_golden_open(t, bounds, tune, &config, &tt));
  int32_t *x = test_golden_tokens(t, "step_x", &count);
  int32_t *y = test_golden_tokens(t, "step_y", &count);
  float *want = test_golden(t, "step_loss", &steps);
  CHECK(t, steps == 10 && count == 600);
  for (size_t s = 0; s < steps; s++) {
    CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, x + s * 60, y + s * 60, &report));
    CHECK(t, report.step == (int64_t)s + 1 && report.loss_step == (int64_t)s); /* one step late */
    if (s > 0) CHECK_NEAR(t, report.loss, want[s - 1], bounds->steps);
  }
  CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
  CHECK(t, report.loss_step == 10 && report.applied == 10);
  CHECK_NEAR(t, report.loss, want[9], bounds->steps);
  test_trainer_close(t, &tt);
}

static void test_golden_gradients(g2z_test *t) { test_golden_gradients_on(t, &golden_cpu, 0); }
static void test_golden_adamw(g2z_test *t) { test_golden_adamw_on(t, &golden_cpu, 0); }

/* In each type, with the library's default choice of products, with the timed choice, and with our
 * own. */
static void test_cuda_golden(g2z_test *t) {
  for (size_t i = 0; i < sizeof golden_gpu / sizeof *golden_gpu; i++)
    for (int tune = G2Z_TUNE_OFF; tune <= G2Z_TUNE_OWN; tune++) {
      if (!test_wants(golden_gpu[i].dtype)) continue;
      test_golden_gradients_on(t, &golden_gpu[i], tune);
      test_golden_adamw_on(t, &golden_gpu[i], tune);
    }
}

/* ----- finite differences, causality -------------------------------------- */

typedef struct test_slopes {
  const g2z_train_config *config;
  float *weights;
  int tensors;                   /* tensors checked so far */
  uint32_t state;                /* of test_bpe_random */
} test_slopes;

/* Along a random direction d of norm 1: (loss(w + h d) - loss(w - h d)) / 2h against grad . d. The
 * loss has a rounding error of about 1e-7: if h d has norm 2e-2, that is 1e-5 of slope. */
static void test_slope(g2z_test *t, void *user, const char *name, g2z_param param, size_t at,
                       size_t elements) {
  test_slopes *s = (test_slopes *)user;
  double *d = (double *)test_memory(t, elements * sizeof *d);
  double losses[3], norm = 0, slope = 0, h = 2e-2;
  float *moved = (float *)test_memory(t, elements * sizeof *moved);
  int32_t x[24], y[24];
  (void)name, (void)param;
  test_tokens(x, 24, 61, 1);
  test_tokens(y, 24, 61, 2);
  for (size_t i = 0; i < elements; i++) {
    d[i] = test_bpe_random(&s->state) / 0x1p23 - 1;
    norm += d[i] * d[i];
  }
  for (int side = -1; side <= 1; side++) {
    g2z_report report;
    g2z_trainer *trainer = test_trainer_of(t, s->config);
    for (size_t i = 0; i < elements; i++)
      moved[i] = (float)((double)s->weights[at + i] + side * h * d[i] / sqrt(norm));
    CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, 0, trainer->plan->parameters,
                                  s->weights));
    CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, at, elements, moved));
    test_steps(t, trainer, x, y, 1, NULL, &report);
    losses[side + 1] = (double)report.loss;
    if (side == 0) CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_GRADS, at, elements, moved));
    for (size_t i = 0; i < elements && side == 0; i++)
      slope += (double)moved[i] * d[i] / sqrt(norm);
  }
  CHECK_NEAR(t, slope, (losses[2] - losses[0]) / (2 * h), 3e-5 + 0.01 * fabs(slope));
  s->tensors++;
}

static void test_finite_differences(g2z_test *t) {
  g2z_train_config config = test_config_of(2, 2, 32, 12, 61);
  config.optimizer.lr = config.optimizer.min_lr = 0; /* steps change no weight */
  config.dropout = 0.2f; /* depends on the step: each trainer's first step draws one mask */
  const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
  float *weights = (float *)test_memory(t, plan->parameters * sizeof *weights);
  test_slopes slopes = {&config, weights, 0, 7};
  for (size_t i = 0; i < plan->parameters; i++) /* a deviation of 0.15 */
    weights[i] = (float)(0.26 * (test_bpe_random(&slopes.state) / 0x1p23 - 1));
  test_tensors(t, plan, test_slope, &slopes);
  CHECK(t, slopes.tensors == 2 * 12 + 4);
}

static void test_causality(g2z_test *t) {
  g2z_train_config config = test_config_of(2, 2, 32, 40, 61);
  int32_t x[40];
  float whole[40 * 61], part[40 * 61];
  test_tokens(x, 40, 61, 3);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  CHECK_OK(t, g2z_model_logits(&trainer->model, x, 1, 40, whole));
  for (int count = 1; count < 40; count += 6) {
    CHECK_OK(t, g2z_model_logits(&trainer->model, x, 1, count, part));
    for (int i = 0; i < count * 61; i++) CHECK_NEAR(t, part[i], whole[i], 2e-6);
  }
  x[39] = (x[39] + 1) % 61;
  CHECK_OK(t, g2z_model_logits(&trainer->model, x, 1, 40, part));
  CHECK(t, memcmp(part, whole, 39 * 61 * sizeof(float)) == 0);
  CHECK(t, memcmp(part + 39 * 61, whole + 39 * 61, 61 * sizeof(float)) != 0);
  x[5] = 61;
  CHECK_BAD(t, g2z_model_logits(&trainer->model, x, 1, 40, part), "token=61");
  int32_t batch[80];
  g2z_report report;
  test_tokens(batch, 80, 61, 3);
  batch[79] = -1;
  CHECK_BAD(t, g2z_trainer_step_batch(trainer, batch, batch, &report), "token=-1 at position 79");
  CHECK_BAD(t, g2z_model_logits(&trainer->model, x, 1, 41, part), "T=41");
}

/* ----- whole models on a GPU ---------------------------------------------- */

enum { CONFIGS = 64, CONFIGS_STEPS = 3, CONFIGS_TOKENS = 1024 };

/* A pseudo-random element of a list that ends with -1. */
static int test_pick(uint64_t *state, const int *list) {
  int count = 0;
  while (list[count] >= 0) count++;
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return list[(*state >> 33) % (uint64_t)count];
}

/* Config number i of an endless list: shapes that are multiples of tiles and shapes that are
 * not. */
static g2z_train_config test_configs_at(int i) {
  static const int layers[] = {1, 1, 2, 3, -1}, heads[] = {1, 1, 2, 3, 4, 5, 6, -1};
  static const int sizes[] = {8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 104, 120, 128, -1};
  static const int seqs[] = {1,   2,   7,   15,  16,  17,  31,  33,  63,  64,   65,
                             100, 127, 128, 129, 200, 255, 257, 400, 512, 1023, -1};
  static const int batches[] = {1, 2, 3, 4, 5, 8, 13, -1}, accums[] = {1, 1, 2, 3, -1};
  static const int vocabs[] = {257, 258, 300, 1000, 4097, 12345, 50257, 65536, -1};
  static const int halves[] = {0, 0, 1, -1};
  static const g2z_dtype dtypes[] = {G2Z_FP32, G2Z_TF32, G2Z_FP16, G2Z_BF16};
  uint64_t state = (uint64_t)i;
  int L = test_pick(&state, layers), NH = test_pick(&state, heads);
  int HS = test_pick(&state, sizes), T = test_pick(&state, seqs), V = test_pick(&state, vocabs);
  g2z_train_config config = test_config_of(L, NH, NH * HS, T, V);
  config.batch = test_pick(&state, batches);
  config.accum = test_pick(&state, accums);
  while (config.batch > 1 && config.accum * config.batch * config.seq > CONFIGS_TOKENS)
    config.batch /= 2;
  while (config.accum * config.seq > CONFIGS_TOKENS) config.accum--;
  config.dtype = dtypes[i % 4];
  config.dropout = test_pick(&state, halves) ? 0.1f : 0;
  config.graph = test_pick(&state, halves);
  config.recompute = test_pick(&state, halves) ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
  config.optimizer.lr = 1e-3f;
  config.optimizer.warmup = 0;
  return config;
}

/* The results of a config's steps: losses, norms, and the first step's gradients. */
typedef struct test_learnt {
  float loss[CONFIGS_STEPS], norm[CONFIGS_STEPS];
  float *grads;                  /* canonical, [parameters] */
} test_learnt;

static g2z_status test_configs_run(g2z_test *t, g2z_device_kind device, g2z_train_config config,
                                   test_learnt *out) {
  int32_t x[CONFIGS_TOKENS], y[CONFIGS_TOKENS];
  test_trainer tt;
  g2z_report report;
  if (device == G2Z_DEVICE_CPU) { /* a CPU has no graphs; the reference is fp32 */
    config.graph = 0;
    config.dtype = G2Z_FP32;
  }
  test_tokens(x, CONFIGS_TOKENS, config.model.vocab, 5);
  test_tokens(y, CONFIGS_TOKENS, config.model.vocab, 6);
  g2z_status status = test_trainer_on(t, device, &config, &tt);
  for (int step = 0; step < CONFIGS_STEPS && status == G2Z_OK; step++) {
    status = g2z_trainer_step_batch(tt.trainer, x, y, &report);
    if (status == G2Z_OK) status = g2z_trainer_flush(tt.trainer, &report);
    if (status != G2Z_OK) break;
    out->loss[step] = report.loss;
    out->norm[step] = report.grad_norm;
    const size_t count = tt.trainer->plan->parameters;
    if (step == 0) out->grads = (float *)malloc(count * sizeof(float));
    if (step == 0) status = g2z_trainer_read(tt.trainer, G2Z_BUFFER_GRADS, 0, count, out->grads);
    for (size_t i = 0; step == 0 && i < count; i++) out->grads[i] /= report.loss_scale;
  }
  test_trainer_close(t, &tt);
  return status;
}

typedef struct test_both {
  const float *got, *want;
  double bound;
} test_both;
static void test_both_near(g2z_test *t, void *user, const char *name, g2z_param param,
                           size_t canonical, size_t elements) {
  const test_both *both = (const test_both *)user;
  (void)param;
  test_gradient_near(t, name, both->got + canonical, both->want + canonical, elements, both->bound);
}

/* Random configs against the CPU in fp32: each tensor's gradient, and the losses and norms of three
 * steps. The bounds follow golden_bounds' comment: a relative error of 3 sqrt(30) / 2 units in the
 * last place for a tensor of one micro-step. fp32 sums have another order, with up to 65,536 terms.
 * G2Z_TEST_CONFIGS sets the number of configs. */
static void test_cuda_gradients(g2z_test *t) {
  static const double bounds[] = {2e-5, 8e-3, 8e-3, 6e-2}; /* by i % 4, like the types */
  const char *wanted = getenv("G2Z_TEST_CONFIGS");
  for (int i = 0; i < (wanted ? atoi(wanted) : CONFIGS); i++) {
    g2z_train_config config = test_configs_at(i);
    test_learnt gpu = {{0}, {0}, NULL}, cpu = {{0}, {0}, NULL};
    int failures = t->failures;
    if (!test_wants(config.dtype)) continue;
    config.tune = i / 4 % 3;
    config.optimizer.loss_scale = 1024;
    CHECK_OK(t, test_configs_run(t, G2Z_DEVICE_CUDA, config, &gpu));
    CHECK_OK(t, test_configs_run(t, G2Z_DEVICE_CPU, config, &cpu));
    for (int step = 0; step < CONFIGS_STEPS; step++) {
      CHECK_NEAR(t, gpu.loss[step], cpu.loss[step], bounds[i % 4] * fabs(cpu.loss[step]));
      CHECK_NEAR(t, gpu.norm[step], cpu.norm[step], bounds[i % 4] * fabs(cpu.norm[step]));
    }
    if (gpu.grads && cpu.grads) {
      test_both both = {gpu.grads, cpu.grads, bounds[i % 4]};
      config.graph = 0; /* a plan for a CPU has none */
      test_tensors(t, test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1), test_both_near, &both);
    }
    if (t->failures > failures) printf("    that was config %d\n", i);
    free(gpu.grads);
    free(cpu.grads);
  }
}

/* ----- stopping and resuming on GPUs --------------------------------------- */

enum { RESUME_STEPS = 12, RESUME_TOKENS = 4 * 128 };
/* The first cases with graphs and with Muon, and the number of cases. */
enum { RESUME_GRAPHS = 10, RESUME_ADAMW = 20, RESUME_CASES = 30 };

/* Stages 0 to 3 and dp, in fp16 and bf16, with and without graphs, over each transport: first with
 * AdamW, then with Muon. */
static g2z_train_config resume_config(int index) {
  g2z_train_config config = test_config_of(3, 4, 256, 128, 1003);
  int column = index % 5;
  config.batch = 4;
  config.zero_stage = column < 4 ? column : 0;
  config.strategy = column < 4 ? G2Z_STRATEGY_ZERO : G2Z_STRATEGY_DP;
  config.dtype = index / 5 % 2 ? G2Z_BF16 : G2Z_FP16;
  config.graph = index < RESUME_ADAMW ? index >= RESUME_GRAPHS : index % 2;
  config.optimizer.kind = index < RESUME_ADAMW ? G2Z_OPTIMIZER_ADAMW : G2Z_OPTIMIZER_MUON;
  config.optimizer.moments_bf16 = index < RESUME_ADAMW && index % 3 == 0;
  config.transport = (g2z_transport)(index % G2Z_TRANSPORT_COUNT);
  config.accum = 1 + index % 2;
  config.bucket_mb = 1;
  config.dropout = 0.1f;
  config.optimizer.warmup = 2;
  return config;
}

/* Runs steps first..last - 1; stores the loss and norm of each. */
static void resume_steps(g2z_test *t, g2z_trainer *trainer, int first, int last, float (*out)[2]) {
  int32_t x[2 * RESUME_TOKENS], y[2 * RESUME_TOKENS];
  g2z_report report;
  for (int step = first; step < last; step++) {
    uint64_t seed = 10 * (uint64_t)step + (uint64_t)trainer->plan->rank;
    test_tokens(x, 2 * RESUME_TOKENS, 1003, seed);
    test_tokens(y, 2 * RESUME_TOKENS, 1003, seed + 1000);
    REQUIRE_OK(t, g2z_trainer_step_batch(trainer, x, y, &report));
    REQUIRE_OK(t, g2z_trainer_flush(trainer, &report));
    out[step][0] = report.loss;
    out[step][1] = report.grad_norm;
  }
}

/* resume DEVICE DIRECTORY FIRST COUNT: for each of these cases a training that saves in the middle,
 * one that resumes there, and one from the start; the last two use the first one's tuning table. */
static void rank_resume(g2z_test *t, char **argv) {
  enum { MIDDLE = RESUME_STEPS / 2 };
  const int gpu = atoi(argv[0]), first = atoi(argv[2]), count = atoi(argv[3]);
  g2z_context *context = rank_context(t, gpu);
  const int before = t->owned_count;
  for (int i = first; i < first + count; i++) {
    float seen[3][RESUME_STEPS][2], *weights[3];
    g2z_train_config config = resume_config(i);
    if (!gpu) config.graph = 0; /* a CPU has none */
    memset(seen, 0, sizeof seen);
    for (int turn = 0; turn < 3; turn++) {
      const char *saved = test_text("%s/case%d", argv[1], i);
      const char *tuning = test_text("%s/tuning%d.txt", argv[1], i);
      const int from = turn == 1 ? MIDDLE : 0;
      config.tuning = turn ? tuning : NULL;
      g2z_trainer *trainer = rank_trainer(t, context, &config);
      const size_t bytes = trainer->plan->parameters * sizeof(float);
      weights[turn] = (float *)test_memory(t, bytes);
      if (turn == 1) REQUIRE_OK(t, g2z_trainer_load(trainer, saved));
      if (turn == 0) resume_steps(t, trainer, 0, MIDDLE, seen[0]);
      if (turn == 0) REQUIRE_OK(t, g2z_trainer_save(trainer, saved));
      resume_steps(t, trainer, turn ? from : MIDDLE, RESUME_STEPS, seen[turn]);
      if (turn == 0 && context->rank == 0)
        CHECK_OK(t, g2z_trainer_write_tuning(trainer, tuning));
      REQUIRE_OK(t, g2z_ranks_agree(context->ranks, G2Z_OK));
      CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, trainer->plan->parameters,
                                   weights[turn]));
      if (turn == 0) continue;
      const size_t rest = (size_t)(RESUME_STEPS - from) * sizeof seen[0][0];
      FAIL_IF(t, memcmp(seen[turn][from], seen[0][from], rest) != 0 ||
              memcmp(weights[turn], weights[0], bytes) != 0 || !(seen[turn][from][0] > 0),
              "case %d differs when it is %s", i, turn == 1 ? "resumed" : "repeated");
    }
    test_end(t, before);
  }
}

static void test_resume_on_gpus(g2z_test *t, int first, int count) {
  const int world = g2z_device_count(G2Z_DEVICE_CUDA) > 1 ? 2 : 1;
  test_ranks_job(t, world, 0, NULL, "resume 1 %s %d %d", t->directory, first, count);
}
static void test_cuda_resume(g2z_test *t) { test_resume_on_gpus(t, 0, RESUME_GRAPHS); }
static void test_cuda_resume_graphs(g2z_test *t) {
  test_resume_on_gpus(t, RESUME_GRAPHS, RESUME_ADAMW - RESUME_GRAPHS);
}
static void test_cuda_resume_muon(g2z_test *t) {
  test_resume_on_gpus(t, RESUME_ADAMW, RESUME_CASES - RESUME_ADAMW);
}
