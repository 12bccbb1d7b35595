/* Tests of the rooms trainer and generation: steps, accumulation, loss scale, sampling; and ZeRO,
 * in which several ranks compute the results of one. */

/* ----- trainer ----------------------------------------------------------- */

static const g2z_dtype test_dtypes[] = {G2Z_FP32, G2Z_FP16, G2Z_BF16};

static void test_overfit(g2z_test *t) {
  for (int d = 0; d < 3; d++) {
    g2z_train_config config = test_config_of(2, 2, 32, 16, 61);
    config.dtype = test_dtypes[d];
    config.optimizer.lr = 3e-3f;
    config.optimizer.warmup = 10;
    config.optimizer.steps = 120;
    test_batch b = test_some_batch();
    float losses[120];
    g2z_report last;
    g2z_trainer *trainer = test_trainer_of(t, &config);
    test_steps(t, trainer, b.x, b.y, 120, losses, &last);
    CHECK_NEAR(t, losses[0], log(61.0), 0.1);
    CHECK(t, losses[119] < 0.15f);
    CHECK(t, last.applied + last.skipped_total == 120 && last.skipped_total <= 2);
  }
}

/* The result of twelve steps with everything on: dropout, accumulation, clipping, fp16. */
enum { TRACE_STEPS = 12, TRACE_MOST = 120000 };
typedef struct test_trace {
  float losses[TRACE_STEPS], weights[TRACE_MOST], grads[TRACE_MOST];
} test_trace;

/* Reads weights and gradients and zeroes the rest, which may hold a larger model's numbers. */
static void test_trace_end(g2z_test *t, g2z_trainer *trainer, test_trace *out) {
  size_t count = trainer->plan->parameters;
  CHECK(t, count <= TRACE_MOST);
  memset(out->weights, 0, sizeof out->weights);
  memset(out->grads, 0, sizeof out->grads);
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, count, out->weights));
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_GRADS, 0, count, out->grads));
}

/* One rank: stages, threads and buckets change nothing. The final gradients are not compared, since
 * stages keep them in different places. */
static void test_determinism(g2z_test *t) {
  enum { FIRST = 1, LIKE = 2 }; /* FIRST: becomes the reference; LIKE: is compared */
  static const struct {
    double bucket_mb;
    int stage, accum, threads, what;
    double bound;
  } cases[] = {
      {0, 1, 3, 0, FIRST, 0}, {0, 1, 3, 0, LIKE, 0}, {0, 0, 3, 0, LIKE, 0}, {0, 1, 3, 1, LIKE, 0},
      /* Buckets change the order of the norm's sum, in double: the clip factor may change by an
       * ulp, and twelve AdamW steps of 6e-4 cannot amplify that beyond 1e-5. */
      {0.01, 1, 3, 0, LIKE, 1e-5},
      /* Stage 2 adds micro-steps outside of the ops. With one micro-step it changes nothing either,
       * except that its buckets end with each unit. In stage 3 the rank owns all parameters. */
      {0.01, 1, 1, 0, FIRST, 0}, {0.01, 2, 1, 0, LIKE | FIRST, 1e-5}, {0.01, 3, 1, 0, LIKE, 0},
      /* With Muon. */
      {0, 1, 3, 0, FIRST, 0}, {0, 0, 3, 1, LIKE, 0}, {0.01, 2, 3, 0, LIKE, 1e-5}};
  static test_trace first, trace;
  for (int i = 0; i < 11; i++) {
    g2z_train_config config = test_config_of(2, 2, 32, 16, 61);
    test_batch b = test_some_batch();
    config.dtype = G2Z_FP16;
    config.dropout = 0.1f;
    config.optimizer.kind = i < 8 ? G2Z_OPTIMIZER_ADAMW : G2Z_OPTIMIZER_MUON;
    config.accum = cases[i].accum;
    config.bucket_mb = cases[i].bucket_mb;
    config.zero_stage = cases[i].stage;
#ifdef _OPENMP
    int threads = omp_get_max_threads();
    if (cases[i].threads) omp_set_num_threads(threads == 1 ? 3 : 1);
#endif
    g2z_trainer *trainer = test_trainer_of(t, &config);
    test_steps(t, trainer, b.x, b.y, TRACE_STEPS, trace.losses, NULL);
    test_trace_end(t, trainer, &trace);
#ifdef _OPENMP
    omp_set_num_threads(threads);
#endif
    CHECK(t, trace.weights[0] != 0);
    for (int k = 0; k < TRACE_MOST && cases[i].what & LIKE; k++)
      if (fabs((double)trace.weights[k] - (double)first.weights[k]) > cases[i].bound)
        CHECK_NEAR(t, trace.weights[k], first.weights[k], cases[i].bound);
    if (i == 1) CHECK(t, memcmp(first.losses, trace.losses, sizeof trace.losses) == 0);
    if (cases[i].what & FIRST) first = trace;
  }
}

/* Twelve steps and their results. */
static void test_recompute_run(g2z_test *t, g2z_device_kind device, const g2z_train_config *config,
                               test_trace *out) {
  int32_t tokens[3 * 128 + 1];
  float logits[16 * 61];
  test_trainer tt;
  memset(out, 0, sizeof *out);
  test_tokens(tokens, 3 * 128 + 1, 61, 3);
  REQUIRE_OK(t, test_trainer_on(t, device, config, &tt));
  test_steps(t, tt.trainer, tokens, tokens + 1, TRACE_STEPS - 1, out->losses, NULL);
  /* Overwrites activations. */
  CHECK_OK(t, g2z_model_logits(&tt.trainer->model, tokens, 1, 16, logits));
  test_steps(t, tt.trainer, tokens, tokens + 1, 1, out->losses + TRACE_STEPS - 1, NULL);
  test_trace_end(t, tt.trainer, out);
  test_trainer_close(t, &tt);
}

/* Every loss, gradient and weight is bit-equal, in each type and stage. bench_ops counts the ops
 * that run again. */
static void test_recompute_on(g2z_test *t, g2z_device_kind device, int graph, int fp8) {
  static test_trace kept, again;
  for (int i = 0; i < 6; i++) {
    g2z_train_config config = test_config_of(3, 2, 32, fp8 ? 64 : 16, 61);
    config.dtype = test_dtypes[i % 3];
    if (device == G2Z_DEVICE_CUDA && !test_wants(config.dtype)) continue;
    if (fp8 && config.dtype == G2Z_FP16) config.fp8 = G2Z_FP8_ALL;
    if (fp8 && config.dtype == G2Z_BF16) config.fp8 = G2Z_FP8_FORWARD;
    config.dropout = i == 5 ? 0 : 0.1f;
    config.accum = i < 3 ? 3 : 1;
    config.zero_stage = (i + 1) % 3;
    config.bucket_mb = 0.02;
    config.graph = graph;
    config.tune = i % 2 ? G2Z_TUNE_OWN : G2Z_TUNE_OFF; /* trainers must not time products */
    test_recompute_run(t, device, &config, &kept);
    config.recompute = G2Z_RECOMPUTE_BLOCK;
    test_recompute_run(t, device, &config, &again);
    CHECK(t, memcmp(&kept, &again, sizeof kept) == 0);
    CHECK(t, kept.losses[TRACE_STEPS - 1] > 0 && kept.grads[0] != 0);
  }
}

/* info.fp8: 0 if the GPU has no 8-bit products, else what channels must be a multiple of. */
static int test_fp8_here(g2z_test *t) {
  g2z_device *gpu = NULL;
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, G2Z_FP16, G2Z_FP16, &gpu));
  int multiple = 0;
  if (gpu) multiple = gpu->info.fp8;
  g2z_device_free(gpu);
  return multiple;
}

static void test_recompute(g2z_test *t) {
  test_recompute_on(t, G2Z_DEVICE_CPU, 0, 0);
  test_recompute_on(t, G2Z_DEVICE_CPU, 0, 1);
}
static void test_cuda_recompute(g2z_test *t) {
  for (int fp8 = 0; fp8 <= (test_fp8_here(t) > 0); fp8++)
    for (int graph = 0; graph < 2; graph++) test_recompute_on(t, G2Z_DEVICE_CUDA, graph, fp8);
}

/* |a - b| / |b| for the gradients of two traces. */
static double test_grads_apart(const test_trace *a, const test_trace *b) {
  double apart = 0, size = 0;
  for (int i = 0; i < TRACE_MOST; i++) {
    apart += pow((double)a->grads[i] - (double)b->grads[i], 2);
    size += pow((double)b->grads[i], 2);
  }
  return sqrt(apart / size);
}

/* Twelve steps in each mode. The last mode runs once more without its copies of weights, which must
 * not change a bit. A score does not use 8 bits. A step does, and its loss differs slightly: a
 * fresh model's logits are small, and e4m3 is off by a sixteenth of a number at most. Gradients in
 * 8 bits change results from the second step on. One head of 40 channels leaves gaps between 8-bit
 * rows, but fp8=all needs multiples of 16 channels; Hopper's attention takes 64. With fp8=all a
 * GPU's LM head scales its exponentials otherwise, which may change the loss's last bits. */
static void test_fp8_on(g2z_test *t, g2z_device_kind device, int graph, int channels) {
  enum { RUNS = G2Z_FP8_COUNT + 1 };
  static test_trace traces[RUNS];
  for (int d = 1; d < 3; d++) {
    const int seq = channels < 64 ? 16 : 64;
    int32_t tokens[129];
    double scores[RUNS];
    float losses[128];
    g2z_train_config config = test_config_of(2, 1, channels, seq, 61);
    test_tokens(tokens, 129, 61, 3);
    config.dtype = test_dtypes[d];
    config.graph = graph;
    config.tune = G2Z_TUNE_OFF;
    if (device == G2Z_DEVICE_CUDA && !test_wants(config.dtype)) continue;
    const int ways = config.dtype == G2Z_FP16 && seq == 64 ? G2Z_FP8_COUNT : G2Z_FP8_ALL;
    for (int run = 0; run <= ways; run++) {
      test_trainer tt;
      config.fp8 = (g2z_fp8)(run < ways ? run : ways - 1);
      REQUIRE_OK(t, test_trainer_on(t, device, &config, &tt));
      if (run == ways) tt.trainer->device->narrow_count = 0; /* products round weights themselves */
      CHECK_OK(t, g2z_model_score(&tt.trainer->model, tokens, tokens + 1, 2, seq, losses,
                                  scores + run));
      test_steps(t, tt.trainer, tokens, tokens + 1, TRACE_STEPS, traces[run].losses, NULL);
      test_trace_end(t, tt.trainer, traces + run);
      test_trainer_close(t, &tt);
    }
    for (int run = 1; run <= ways; run++) CHECK(t, scores[run] == scores[0]);
    CHECK(t, memcmp(traces + ways - 1, traces + ways, sizeof *traces) == 0);
    /* Roundings alone give 0.066. A layer whose operand of qkv's gradient is 0 gives 0.095. */
    for (int run = 1; run < ways; run++) CHECK(t, test_grads_apart(traces + run, traces) < 0.08);
    for (int run = 1; run < ways; run++)
      for (int step = 0; step < TRACE_STEPS; step++) {
        int same = run == G2Z_FP8_ALL && step == 0;
        if (!same || device == G2Z_DEVICE_CPU)
          CHECK(t, (traces[run].losses[step] == traces[run - 1].losses[step]) == same);
        CHECK_NEAR(t, traces[run].losses[step], traces[0].losses[step], 0.01);
      }
  }
}

typedef struct test_large { /* a number that is too large for 8 bits */
  int unit;
  g2z_param param;
  int index;
  float value;
} test_large;

/* In each mode: a step that clamps nothing, then three before which numbers of block 0 become too
 * large for 8 bits: a bias does this to an input of each of its four products, for every token. A
 * weight of qkv and one of wte are too large, too. A weight counts once per step, although each
 * micro-step may round it; in the last step the products do. Nothing counts that backward computes
 * again. */
static void test_clamped_on(g2z_test *t, g2z_device_kind device, int graph, int channels,
                            int seq) {
  enum { L = 2, ACCUM = 2, BATCH = 2 };
  const int C = channels;
  const test_large large[] = {{L, G2Z_LN1B, 0, 200},    {L, G2Z_QKVB, 2 * C + 3, 150},
                              {L, G2Z_LN2B, 2, -130},   {L, G2Z_FCB, 7, 150},
                              {L, G2Z_QKVW, 3 * C + 5, -15},
                              {L + 2, G2Z_WTE, 60 * C + 1, 20}};
  int32_t tokens[257];
  test_tokens(tokens, 257, 61, 3);
  for (int run = 0; run < 2 * G2Z_FP8_COUNT; run++) {
    const int way = run / 2;
    g2z_train_config config = test_config_of(L, 1, C, seq, 61);
    test_trainer tt;
    g2z_report report;
    config.fp8 = (g2z_fp8)way;
    config.dtype = test_dtypes[1 + run % 2];
    config.batch = BATCH;
    config.accum = ACCUM;
    config.recompute = G2Z_RECOMPUTE_BLOCK;
    config.graph = graph;
    config.tune = G2Z_TUNE_OFF;
    if (way == G2Z_FP8_ALL && (config.dtype != G2Z_FP16 || seq < 64)) continue;
    if (device == G2Z_DEVICE_CUDA && !test_wants(config.dtype)) continue;
    REQUIRE_OK(t, test_trainer_on(t, device, &config, &tt));
    g2z_device *dev = tt.trainer->device;
    g2z_dtype stored = config.dtype;
    if (device == G2Z_DEVICE_CPU) stored = G2Z_FP32;
    for (int step = 0; step < 4; step++) {
      const size_t bytes = tt.trainer->plan->dtype_bytes;
      int inputs = 0, weights = 0;
      for (size_t i = 0; step > 0 && i < sizeof large / sizeof *large; i++) {
        const test_large *x = &large[i];
        char number[4], *at = (char *)g2z__parameter(&tt.trainer->model, x->unit, x->param);
        test_encode(stored, x->value, number);
        CHECK_OK(t, dev->ops->upload(dev, at + (size_t)x->index * bytes, number, bytes));
        CHECK_OK(t, dev->ops->synchronize(dev));
      }
      if (step > 0 && way >= G2Z_FP8_LOGITS) weights = 1;
      if (step > 0 && way >= G2Z_FP8_FORWARD) {
        inputs = 4 * ACCUM * BATCH * seq;
        weights = 2;
      }
      if (step == 3) dev->narrow_count = 0; /* products round weights themselves */
      test_steps(t, tt.trainer, tokens, tokens + 1, 1, NULL, &report);
      CHECK(t, report.clamped_inputs == inputs);
      CHECK(t, report.clamped_weights == weights);
    }
    test_trainer_close(t, &tt);
  }
}

static void test_fp8(g2z_test *t) {
  test_fp8_on(t, G2Z_DEVICE_CPU, 0, 64);
  test_fp8_on(t, G2Z_DEVICE_CPU, 0, 40);
  test_clamped_on(t, G2Z_DEVICE_CPU, 0, 64, 64);
  test_clamped_on(t, G2Z_DEVICE_CPU, 0, 40, 16);
}
static void test_cuda_fp8(g2z_test *t) {
  const int multiple = test_fp8_here(t);
  if (multiple != 1) { /* a GPU that refuses 40 channels, or any number */
    test_trainer tt;
    g2z_train_config config = test_config_of(2, 1, 40, 16, 61);
    config.dtype = G2Z_FP16;
    config.fp8 = G2Z_FP8_LOGITS;
    const char *says = multiple ? "channels to be a multiple of 16" : "compute capability 8.9";
    CHECK_STATUS(t, test_trainer_on(t, G2Z_DEVICE_CUDA, &config, &tt), G2Z_UNSUPPORTED,
                 &t->services, says);
    test_trainer_close(t, &tt);
  }
  for (int graph = 0; graph < 2 && multiple; graph++) {
    for (int channels = 40; channels <= 64; channels += 24)
      if (channels % multiple == 0) test_fp8_on(t, G2Z_DEVICE_CUDA, graph, channels);
    test_clamped_on(t, G2Z_DEVICE_CUDA, graph, 64, 64);
    if (40 % multiple == 0) test_clamped_on(t, G2Z_DEVICE_CUDA, graph, 40, 16);
  }
}

enum { EARLY_STEPS = 15, EARLY_TOKENS = 2 * 4 * 128, EARLY_MOST = 3000000 };

/* A tool that follows every access finds in few steps what timing would show only in many:
 * G2Z_TEST_EARLY_STEPS sets the number. */
static int test_early_steps(void) {
  const char *wanted = getenv("G2Z_TEST_EARLY_STEPS");
  int steps = wanted ? atoi(wanted) : EARLY_STEPS;
  return steps < 2 ? 2 : steps > EARLY_STEPS ? EARLY_STEPS : steps;
}

/* Runs steps; with `early` a kernel may start before the previous kernel ends. */
static void test_early_run(g2z_test *t, const g2z_train_config *config, int early, float *losses,
                           float *weights) {
  int32_t x[EARLY_TOKENS], y[EARLY_TOKENS];
  test_trainer tt;
  test_tokens(x, EARLY_TOKENS, 1003, 5);
  test_tokens(y, EARLY_TOKENS, 1003, 6);
  REQUIRE_OK(t, test_trainer_on(t, G2Z_DEVICE_CUDA, config, &tt));
#ifdef __CUDACC__
  if (!early) g2z__cuda_of(tt.trainer->device)->early_launch = 0;
#else
  (void)early; /* without CUDA the test is skipped */
#endif
  test_steps(t, tt.trainer, x, y, test_early_steps(), losses, NULL);
  size_t count = tt.trainer->plan->parameters;
  CHECK(t, count <= EARLY_MOST);
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 0, count, weights));
  test_trainer_close(t, &tt);
}

/* A kernel that starts early and reads too early would change bits sooner or later. */
static void test_cuda_early(g2z_test *t) {
  static const g2z_dtype dtypes[] = {G2Z_FP16, G2Z_BF16, G2Z_FP32};
  float *weights[2], losses[2][EARLY_STEPS] = {{0}, {0}};
  int last = test_early_steps() - 1;
  for (int i = 0; i < 2; i++) weights[i] = (float *)test_memory(t, EARLY_MOST * sizeof(float));
  for (int i = 0; i < 6; i++) {
    if (!test_wants(dtypes[i % 3])) continue;
    g2z_train_config config = test_config_of(3, 4, 256, 128, 1003);
    config.batch = 4;
    config.accum = 2;
    config.dtype = dtypes[i % 3];
    while (test_attention_leaves_out(config.dtype, 4 * 4 * config.seq)) config.seq /= 2;
    config.dropout = i % 2 ? 0.1f : 0;
    config.optimizer.warmup = 0;
    config.tune = i % 2 ? G2Z_TUNE_OFF : G2Z_TUNE_OWN; /* trainers must not time products */
    config.graph = i / 3;
    test_early_run(t, &config, 0, losses[0], weights[0]);
    for (int again = 0; again < 4; again++) {
      config.graph = again % 2;
      test_early_run(t, &config, 1, losses[1], weights[1]);
      CHECK(t, memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
      CHECK(t, memcmp(weights[0], weights[1], EARLY_MOST * sizeof(float)) == 0);
    }
    CHECK(t, losses[0][last] > 0 && losses[0][last] < losses[0][0]);
  }
}

static void test_accumulation(g2z_test *t) {
  float losses[2][10];
  test_batch b = test_some_batch();
  for (int i = 0; i < 2; i++) {
    g2z_train_config config = test_config_of(2, 2, 32, 16, 61);
    config.batch = i ? 6 : 2;
    config.accum = i ? 1 : 3;
    config.optimizer.lr = 3e-3f;
    config.optimizer.warmup = 0;
    g2z_trainer *trainer = test_trainer_of(t, &config);
    test_steps(t, trainer, b.x, b.y, 10, losses[i], NULL);
  }
  for (int s = 0; s < 10; s++) CHECK_NEAR(t, losses[1][s], losses[0][s], 2e-5);
  CHECK(t, losses[0][9] < losses[0][0] - 0.5f);
}

/* A skipped step changes only the scale: weights, m, v, AdamW's count and the schedule stay. */
static void test_loss_scale(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 16, 8, 61);
  config.dtype = G2Z_FP16;
  config.optimizer.loss_scale = 1024;
  config.optimizer.loss_scale_window = 50;
  config.optimizer.loss_scale_hysteresis = 1;
  config.optimizer.lr = 1e-3f;
  test_batch b = test_some_batch();
  g2z_report last;
  g2z_trainer *trainer = test_trainer_of(t, &config);
  test_steps(t, trainer, b.x, b.y, 50, NULL, &last);
  CHECK(t, last.loss_scale == 1024 && last.applied == 50 && last.skipped_total == 0);
  test_steps(t, trainer, b.x, b.y, 1, NULL, &last);
  CHECK(t, last.loss_scale == 2048); /* 50 good steps doubled it */

  float good[16], huge[16], state[2][3][16];
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, 16, good));
  /* These weights of the last LayerNorm make logits and their gradients overflow fp16. */
  for (int i = 0; i < 16; i++) huge[i] = 60000.0f;
  CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, 0, 16, huge));
  for (int after = 0; after < 2; after++) {
    if (after) test_steps(t, trainer, b.x, b.y, 3, NULL, &last);
    for (int buffer = 0; buffer < 3; buffer++) /* weights, m, v */
      CHECK_OK(t, g2z_trainer_read(trainer, (g2z_buffer)buffer, 64, 16, state[after][buffer]));
  }
  CHECK(t, last.skipped == 1 && last.skipped_total == 3 && last.applied == 51);
  CHECK(t, last.loss_scale == 512 && !isfinite(last.grad_norm)); /* 2048, 1024, 512 */
  CHECK(t, memcmp(state[0], state[1], sizeof state[0]) == 0);

  CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, 0, 16, good));
  test_steps(t, trainer, b.x, b.y, 1, NULL, &last);
  CHECK(t, last.skipped == 0 && last.applied == 52 && last.loss_scale == 256);
}

static void test_canonical_access(g2z_test *t) {
  static const double buckets[] = {0, 0.003, 0.02};
  for (int b = 0; b < 3; b++)
    for (int stage = 0; stage <= 3; stage++) {
      g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
      config.bucket_mb = buckets[b];
      config.zero_stage = stage;
      config.optimizer.moments_bf16 = stage % 2;
      float values[300], want[300], back[300];
      g2z_trainer *trainer = test_trainer_of(t, &config);
      size_t parameters = trainer->plan->parameters;
      for (int i = 0; i < 300; i++) {
        values[i] = (float)i + 0.5f;
        want[i] = stage % 2 ? g2z__round_bf16(values[i]) : values[i];
      }
      for (size_t at = 0; at + 300 <= parameters; at += 257) {
        CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_V, at, 300, values));
        CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_V, at, 300, back));
        CHECK(t, memcmp(want, back, sizeof back) == 0);
      }
      CHECK_BAD(t, g2z_trainer_read(trainer, G2Z_BUFFER_V, parameters, 1, back), "outside");
      CHECK_BAD(t, g2z_trainer_write(trainer, G2Z_BUFFER_GRADS, 0, 1, values), "not written");
    }
}

/* Each tensor has GPT-2's standard deviation. */
static void test_initialised(g2z_test *t, void *user, const char *name, g2z_param param,
                             size_t canonical, size_t elements) {
  const g2z_plan *plan = (const g2z_plan *)t->plans[1];
  g2z_init init = g2z__param_describe(&plan->model, param).init;
  const float *v = (const float *)user + canonical;
  double sum = 0, square = 0, n = (double)elements;
  (void)name;
  for (size_t i = 0; i < elements; i++) {
    sum += (double)v[i];
    square += (double)v[i] * (double)v[i];
  }
  double spread = 0;
  if (init == G2Z_INIT_NORMAL || init == G2Z_INIT_POSITIONS) spread = 0.02;
  if (init == G2Z_INIT_RESIDUAL) spread = 0.01;
  CHECK_NEAR(t, sum / n, init == G2Z_INIT_ONES, 5 * spread / sqrt(n));
  if (spread > 0) CHECK_NEAR(t, sqrt(square / n), spread, 5 * spread / sqrt(2 * n));
}

static void test_initialisation(g2z_test *t) {
  g2z_train_config config = test_config_of(2, 4, 64, 32, 500);
  const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  float *w = (float *)test_memory(t, plan->parameters * sizeof *w);
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, plan->parameters, w));
  test_tensors(t, plan, test_initialised, w);
  /* Sines: the product of two positions depends on their distance alone. */
  config.positions = G2Z_POSITIONS_SINES;
  trainer = test_trainer_of(t, &config);
  float *sines = (float *)test_memory(t, plan->parameters * sizeof *sines);
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, plan->parameters, sines));
  const size_t begin = plan->unit[plan->wte - 1].canonical, end = plan->unit[plan->wte].canonical;
  CHECK(t, end - begin == 32 * 64 && memcmp(sines, w, begin * sizeof *w) == 0);
  CHECK(t, memcmp(sines + end, w + end, (plan->parameters - end) * sizeof *w) == 0);
  for (int p = 0; p < 32; p++)
    for (int q = 0; q <= p; q++) {
      double product = 0, want = 0;
      for (int c = 0; c < 64; c++)
        product += (double)sines[begin + (size_t)(64 * p + c)] *
                   (double)sines[begin + (size_t)(64 * q + c)];
      for (int i = 0; i < 32; i++) want += 0.01 * cos((p - q) * pow(1e4, -i / 32.0));
      CHECK_NEAR(t, product, want, 1e-7);
    }
}

static void test_validation(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
  g2z_loader_config lc = {test_at(t, "v.bin"), 2, 8, 1, 0, 1, 61, G2Z_ORDER_FILE, 0};
  int32_t ids[8 * 8 + 1];
  double loss, sum = 0;
  config.optimizer.lr = config.optimizer.min_lr = 0;
  test_tokens(ids, 65, 61, 9);
  test_shard(t, "v.bin", G2Z_SHARD_RAW, ids, 65);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  g2z_loader *loader = test_loader(t, &lc);
  CHECK(t, loader->steps_per_epoch == 4);
  CHECK_OK(t, g2z_trainer_validate(trainer, loader, 4, NULL, NULL, &loss));
  for (int s = 0; s < 4; s++) {
    g2z_report report;
    test_steps(t, trainer, ids + 16 * s, ids + 16 * s + 1, 1, NULL, &report);
    sum += (double)report.loss;
  }
  CHECK_NEAR(t, loss, sum / 4, 1e-6);
  /* Each token counts, whatever the batch: 60 targets are seven and a half sequences of 8. */
  test_shard(t, "v.bin", G2Z_SHARD_RAW, ids, 61);
  for (int batch = 1; batch <= 9; batch += 1 + batch / 2) {
    config.batch = lc.batch = batch;
    g2z_trainer *other = test_trainer_of(t, &config);
    loader = test_loader(t, &lc);
    double mean, whole = 0;
    CHECK_OK(t, g2z_trainer_validate(other, loader, loader->steps_per_epoch, NULL, NULL, &loss));
    for (int at = 0; at < 60; at += 8) {
      int n = at < 56 ? 8 : 4;
      CHECK_OK(t, g2z_model_score(&other->model, ids + at, ids + at + 1, 1, n, NULL, &mean));
      whole += mean * n;
    }
    CHECK_NEAR(t, loss, whole / 60, 1e-6);
  }
  lc.batch = 2;
  /* A loader with another vocabulary: its tokens are not rows of this model's wte. */
  lc.vocab = 65536;
  lc.glob = test_at(t, "wide.bin");
  ids[40] = 60000;
  test_shard(t, "wide.bin", G2Z_SHARD_RAW, ids, 65);
  CHECK_BAD(t, g2z_trainer_validate(trainer, test_loader(t, &lc), 4, NULL, NULL, &loss),
            "token=60000 at position 8 must lie between 0 and 60");
  CHECK(t, isnan(loss));
}

/* The forward products that a trainer has run, and how often it made 8-bit copies of a layer. A
 * product after `known` that is not in the list counts as missing. */
static struct {
  const g2z_ops *ops;
  int calls[16][4], count, known, missing, narrowed;
  int fails;                     /* 1: the next product has no memory */
} rehearsal;
static g2z_status rehearsal_linear(g2z_device *device, const g2z_linear_fwd *op) {
  const int form = (op->narrow_x ? 1 : 0) + (op->slope ? 2 : 0) + (op->residual ? 4 : 0);
  const int call[4] = {form, op->N, op->K, op->O};
  int i = 0;
  if (rehearsal.fails) return g2z_fail(device->services, G2Z_NO_MEMORY, "no memory to rehearse");
  while (i < rehearsal.count && memcmp(rehearsal.calls[i], call, sizeof call) != 0) i++;
  rehearsal.missing += i == rehearsal.count && rehearsal.known;
  if (i == rehearsal.count && i < 16) memcpy(rehearsal.calls[rehearsal.count++], call, sizeof call);
  return rehearsal.ops->linear_fwd(device, op);
}
static g2z_status rehearsal_narrow(g2z_device *device, int first) {
  (void)device, (void)first;
  rehearsal.narrowed++;
  return G2Z_OK;
}

/* On a GPU, all products of a step and of validation are timed before the first of them, because
 * ranks that time a product for themselves may choose differently. With fp8, validation's products
 * are not a step's: they have 16 bits. The CPU times nothing, so its calls are compared; on a GPU,
 * the tuning table. */
static void test_rehearsal_on(g2z_test *t, g2z_device_kind device, g2z_fp8 fp8) {
  g2z_train_config config = test_config_of(2, 1, 64, 64, 61);
  const g2z_loader_config lc = {test_at(t, "v.bin"), 2, 64, 1, 0, 1, 61, G2Z_ORDER_FILE, 0};
  g2z_report report;
  int32_t ids[257];
  char *table, *again;
  double loss;
  test_trainer tt;
  config.dtype = G2Z_FP16;
  config.fp8 = fp8;
  config.accum = 2;
  test_tokens(ids, 257, 61, 9);
  test_shard(t, "v.bin", G2Z_SHARD_RAW, ids, 257);
  REQUIRE_OK(t, test_trainer_on(t, device, &config, &tt));
  g2z_loader *loader = test_loader(t, &lc);
  g2z_device *dev = tt.trainer->device;
  g2z_ops ops = *dev->ops;
  memset(&rehearsal, 0, sizeof rehearsal);
  rehearsal.ops = dev->ops;
  ops.linear_fwd = rehearsal_linear;
  if (device == G2Z_DEVICE_CPU) { /* as on a GPU */
    ops.narrow_weights = rehearsal_narrow;
    dev->ops = &ops;
    dev->narrow_count = 8;
    tt.trainer->plan->device = G2Z_DEVICE_CUDA;
    rehearsal.fails = 1;
    CHECK_STATUS(t, g2z__trainer_share_tuning(tt.trainer), G2Z_NO_MEMORY, &t->services, "rehearse");
    rehearsal.fails = rehearsal.narrowed = 0;
  }
  CHECK_OK(t, g2z__trainer_share_tuning(tt.trainer)); /* also after a failure */
  tt.trainer->plan->device = device;
  CHECK(t, rehearsal.narrowed == (device == G2Z_DEVICE_CPU ? 2 : 0)); /* once per layer */
  rehearsal.known = 1;
  CHECK_OK(t, dev->ops->tuning(dev, &table));
  CHECK_OK(t, g2z_trainer_validate(tt.trainer, loader, 2, NULL, NULL, &loss));
  CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, ids, ids + 1, &report));
  CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
  CHECK_OK(t, dev->ops->tuning(dev, &again));
  CHECK(t, rehearsal.missing == 0 && strcmp(table, again) == 0);
  CHECK(t, device == G2Z_DEVICE_CPU || strlen(table) > 600); /* has lines of products */
  g2z_release(&t->services, table);
  g2z_release(&t->services, again);
  dev->ops = rehearsal.ops;
  test_trainer_close(t, &tt);
}
static void test_rehearsal(g2z_test *t) { test_rehearsal_on(t, G2Z_DEVICE_CPU, G2Z_FP8_ALL); }
static void test_cuda_rehearsal(g2z_test *t) {
  test_rehearsal_on(t, G2Z_DEVICE_CUDA, G2Z_FP8_NONE);
  if (test_fp8_here(t)) test_rehearsal_on(t, G2Z_DEVICE_CUDA, G2Z_FP8_ALL);
}

/* The losses of four steps of a trainer. */
static void graphs_run(g2z_test *t, g2z_trainer *trainer, float losses[4]) {
  const test_batch b = test_some_batch();
  test_steps(t, trainer, b.x, b.y, 4, losses, NULL);
}

/* With graph=auto a step that cannot be recorded runs without graphs, after one warning; with
 * graph=on the call fails. A CPU records nothing. */
static void test_graphs_refused(g2z_test *t) {
  const test_batch b = test_some_batch();
  const g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
  float want[4], got[4];
  g2z_report report;
  graphs_run(t, test_trainer_of(t, &config), want);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  trainer->plan->graphed = 1;
  test_warnings_begin(t);
  graphs_run(t, trainer, got);
  const char *said = test_warnings_end(t);
  CHECK(t, test_times(said, "steps run without CUDA graphs") == 1);
  CHECK(t, memcmp(got, want, sizeof got) == 0);
  trainer = test_trainer_of(t, &config);
  trainer->plan->graphed = trainer->config.graph = 1;
  CHECK_OK(t, g2z_trainer_step_batch(trainer, b.x, b.y, &report)); /* the first is not recorded */
  CHECK_STATUS(t, g2z_trainer_step_batch(trainer, b.x, b.y, &report), G2Z_UNSUPPORTED,
               &t->services, "no graphs");
}

/* Ranks must count alike, whether they record a step or cannot: at its begin, or at its end. A CPU
 * has no graphs. It pretends to record, and what it computes does not matter. */
static int graphs_fail_at; /* 0: nowhere; 1: where a recording begins; 2: where it ends */
static g2z_status graphs_fake_begin(g2z_device *device) {
  if (graphs_fail_at != 1) return G2Z_OK;
  return g2z_fail(device->services, G2Z_NO_MEMORY, "no memory for a graph");
}
static g2z_status graphs_fake_end(g2z_device *device, g2z_graph **out) {
  static int fake;
  *out = graphs_fail_at == 2 ? NULL : (g2z_graph *)(void *)&fake;
  if (graphs_fail_at != 2) return G2Z_OK;
  return g2z_fail(device->services, G2Z_NO_MEMORY, "no memory for a graph");
}
static g2z_status graphs_fake_run(g2z_device *device, const g2z_graph *graph) {
  (void)device, (void)graph;
  return G2Z_OK;
}
static void graphs_fake_free(g2z_device *device, g2z_graph *graph) { (void)device, (void)graph; }
static void test_graphs_counted(g2z_test *t) {
  const g2z_train_config config = test_config_of(2, 2, 16, 8, 61);
  int64_t counted[3];
  for (graphs_fail_at = 0; graphs_fail_at < 3; graphs_fail_at++) {
    float losses[4];
    g2z_trainer *trainer = test_trainer_of(t, &config);
    const g2z_ops *right = trainer->device->ops;
    g2z_ops ops = *right;
    ops.graph_begin = graphs_fake_begin;
    ops.graph_end = graphs_fake_end;
    ops.graph_run = graphs_fake_run;
    ops.graph_free = graphs_fake_free;
    trainer->device->ops = &ops;
    trainer->plan->graphed = 1;
    graphs_run(t, trainer, losses);
    CHECK(t, trainer->plan->graphed == (graphs_fail_at == 0));
    counted[graphs_fail_at] = trainer->context->ranks->sequence;
    g2z__record_free(trainer->comm, &trainer->record);
    trainer->device->ops = right;
  }
  CHECK(t, counted[0] > 4 && counted[1] == counted[0] && counted[2] == counted[0]);
}

/* On a GPU, a recording whose last call fails leaves the trainer as it was. */
static const g2z_ops *graphs_right;
static g2z_status graphs_end(g2z_device *device, g2z_graph **out) {
  G2Z_TRY(graphs_right->graph_end(device, out));
  graphs_right->graph_free(device, *out);
  *out = NULL;
  return g2z_fail(device->services, G2Z_NO_MEMORY, "no memory for a graph");
}
static void test_cuda_graphs_refused(g2z_test *t) {
  float losses[2][4];
  for (int refused = 0; refused < 2; refused++) {
    g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
    test_trainer tt;
    config.dtype = G2Z_FP16;
    config.tune = G2Z_TUNE_OFF;
    REQUIRE_OK(t, test_trainer_on(t, G2Z_DEVICE_CUDA, &config, &tt));
    g2z_device *dev = tt.trainer->device;
    g2z_ops ops = *dev->ops;
    graphs_right = dev->ops;
    ops.graph_end = graphs_end;
    if (refused) dev->ops = &ops;
    graphs_run(t, tt.trainer, losses[refused]);
    dev->ops = graphs_right;
    CHECK(t, tt.trainer->plan->graphed == !refused);
    test_trainer_close(t, &tt);
  }
  CHECK(t, memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
}

/* A trainer on a GPU that times products; its shard's loader has the tokens 0 .. 256. */
static void tuned_open(g2z_test *t, test_trainer *tt) {
  g2z_train_config config = test_config_of(2, 1, 64, 64, 61);
  config.dtype = G2Z_FP16;
  config.accum = 2;
  REQUIRE_OK(t, test_trainer_on(t, G2Z_DEVICE_CUDA, &config, tt));
}

static char *tuned_table(g2z_test *t, const test_trainer *tt) {
  char *text = NULL;
  CHECK_OK(t, tt->trainer->device->ops->tuning(tt->trainer->device, &text));
  return text;
}

/* A score before the first step does not keep a shape from being timed. A checkpoint's algorithms
 * replace those of a trainer that has stepped: both continue with the same bits. */
static void test_cuda_algorithms(g2z_test *t) {
  test_trainer first, other;
  int32_t ids[257];
  float losses[2][8], scores[128];
  double mean;
  test_tokens(ids, 257, 61, 9);
  tuned_open(t, &first);
  test_steps(t, first.trainer, ids, ids + 1, 3, losses[0], NULL);
  REQUIRE_OK(t, g2z_trainer_save(first.trainer, test_path(t, "saved")));
  char *table = tuned_table(t, &first);
  tuned_open(t, &other);
  CHECK_OK(t, g2z_model_score(&other.trainer->model, ids, ids + 1, 2, 64, scores, &mean));
  test_steps(t, other.trainer, ids, ids + 1, 3, losses[1], NULL);
  char *scored = tuned_table(t, &other);
  CHECK(t, test_times(table, "\n") > 5 && test_times(scored, "\n") == test_times(table, "\n"));
  g2z_release(&t->services, scored);
  REQUIRE_OK(t, g2z_trainer_load(other.trainer, test_path(t, "saved")));
  test_steps(t, first.trainer, ids, ids + 1, 8, losses[0], NULL);
  test_steps(t, other.trainer, ids, ids + 1, 8, losses[1], NULL);
  CHECK(t, memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
  scored = tuned_table(t, &other);
  for (char *line = strchr(table, '\n') + 1, *end; *line; line = end + 1) {
    end = strchr(line, '\n');
    *end = 0;
    FAIL_IF(t, !strstr(scored, line), "the loaded table lacks %s", line);
  }
  g2z_release(&t->services, scored);
  g2z_release(&t->services, table);
  test_trainer_close(t, &other);
  test_trainer_close(t, &first);
}

/* Trainers on two GPUs, stepped in turns by one thread, and then by another. */
typedef struct gpus_two {
  g2z_test *t;
  test_trainer on[2];
  float losses[2][4];
} gpus_two;
static void *gpus_step(void *user) {
  gpus_two *two = (gpus_two *)user;
  const test_batch b = test_some_batch();
  g2z_report report;
  for (int step = 0; step < 4; step++)
    for (int i = 0; i < 2; i++) {
      g2z_trainer *trainer = two->on[i].trainer;
      CHECK_OK(two->t, g2z_trainer_step_batch(trainer, b.x, b.y, &report));
      CHECK_OK(two->t, g2z_trainer_flush(trainer, &report));
      two->losses[i][step] = report.loss;
    }
  return NULL;
}
static void test_cuda_gpus(g2z_test *t) {
  if (g2z_device_count(G2Z_DEVICE_CUDA) < 2) SKIP(t, "needs two GPUs");
#ifdef __CUDACC__
  gpus_two two;
  memset(&two, 0, sizeof two);
  two.t = t;
  for (int i = 0; i < 2; i++) {
    g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
    config.dtype = G2Z_FP16;
    config.tune = G2Z_TUNE_OFF;
    CHECK(t, cudaSetDevice(i) == cudaSuccess);
    REQUIRE_OK(t, test_trainer_on(t, G2Z_DEVICE_CUDA, &config, &two.on[i]));
    CHECK(t, two.on[i].context->gpu == i);
    CHECK(t, g2z__cuda_of(two.on[i].trainer->device)->ordinal == i);
  }
  for (int other = 0; other < 2; other++) {
    pthread_t thread;
    if (!other) gpus_step(&two);
    else {
      CHECK(t, pthread_create(&thread, NULL, gpus_step, &two) == 0);
      CHECK(t, pthread_join(thread, NULL) == 0);
    }
    CHECK(t, memcmp(two.losses[0], two.losses[1], sizeof two.losses[0]) == 0);
  }
  test_trainer_close(t, &two.on[1]);
  test_trainer_close(t, &two.on[0]);
  CHECK(t, cudaSetDevice(0) == cudaSuccess);
#else
  (void)gpus_step; /* without CUDA the test is skipped */
#endif
}

static void test_context_refusals(g2z_test *t) {
  g2z_train_config config = test_config_of(500, 1, 16, 256, 61);
  test_trainer tt;
  config.batch = 1 << 20;
  CHECK_STATUS(t, test_trainer_open(t, &config, &tt), G2Z_NO_MEMORY, &t->services,
               "with recompute=block fits");
}

/* ----- calls that run out of memory -------------------------------------- */

/* What a call needs, in every case here: a trainer on the CPU, with 8-bit products, because they
 * allocate in the middle of a step; its loader and its checkpoint; and a model with its weights. */
typedef struct memory_scene {
  g2z_trainer *trainer;
  g2z_loader *loader;
  g2z_model *model;
  const char *saved;
} memory_scene;
enum { MEMORY_T = 32, MEMORY_WORDS = 61, MEMORY_MOST = 8 * MEMORY_T };

static void memory_open(g2z_test *t, memory_scene *scene, const char *weights) {
  g2z_train_config config = test_config_of(1, 1, 16, MEMORY_T, MEMORY_WORDS);
  const g2z_loader_config shards = {
      test_at(t, "memory.bin"), 4, MEMORY_T, 1, 0, 1, MEMORY_WORDS, G2Z_ORDER_FILE, 0};
  config.batch = shards.batch;
  config.dtype = G2Z_FP16;
  config.fp8 = G2Z_FP8_ALL;
  config.optimizer.warmup = 0;
  config.optimizer.moments_bf16 = 1;
  scene->trainer = test_trainer_of(t, &config);
  scene->loader = test_loader(t, &shards);
  scene->model = inuse_open(t, weights, G2Z_FP32);
}

/* A call of one of three sizes, 0 to 2. *out: a number that the call computes. */
typedef g2z_status (*memory_call)(memory_scene *scene, int size, double *out);

static g2z_status memory_score(memory_scene *scene, int size, double *out) {
  int32_t x[MEMORY_MOST];
  const int B = 1 + 2 * size, T = MEMORY_T / (3 - size);
  test_tokens(x, MEMORY_MOST, MEMORY_WORDS, 3);
  return g2z_model_score(scene->model, x, x + 1, B, T, NULL, out);
}
static g2z_status memory_score_trainer(memory_scene *scene, int size, double *out) {
  memory_scene trained = *scene;
  trained.model = &scene->trainer->model;
  return memory_score(&trained, size, out);
}
static g2z_status memory_logits(memory_scene *scene, int size, double *out) {
  static float logits[MEMORY_MOST * MEMORY_WORDS];
  int32_t x[MEMORY_MOST];
  const int B = 1 + 2 * size, T = MEMORY_T / (3 - size);
  test_tokens(x, MEMORY_MOST, MEMORY_WORDS, 3);
  g2z_status status = g2z_model_logits(scene->model, x, B, T, logits);
  *out = (double)logits[B * T * MEMORY_WORDS - 1];
  return status;
}
static g2z_status memory_generate(memory_scene *scene, int size, double *out) {
  int32_t ids[5][MEMORY_T] = {{0}};
  size_t lengths[5] = {1, 2, 3, 4, 5};
  const g2z_sampling sampling = g2z_sampling_default();
  const int count = 1 + 2 * size;
  g2z_status status = g2z_model_generate(scene->model, count, ids[0], MEMORY_T, lengths, &sampling,
                                         NULL, NULL);
  *out = 0;
  for (int i = 0; i < count; i++)
    for (int k = 0; k < MEMORY_T; k++) *out = fmod(*out * 67 + ids[i][k], 1e9 + 7);
  return status;
}
static g2z_status memory_step(memory_scene *scene, int size, double *out) {
  int32_t x[4 * MEMORY_T + 1];
  g2z_report report;
  (void)size;
  test_tokens(x, 4 * MEMORY_T + 1, MEMORY_WORDS, 3);
  g2z_status status = g2z_trainer_step_batch(scene->trainer, x, x + 1, &report);
  if (status == G2Z_OK) status = g2z_trainer_flush(scene->trainer, &report);
  if (status == G2Z_OK) *out = (double)report.loss + 1e3 * (double)report.grad_norm;
  return status;
}
static g2z_status memory_validate(memory_scene *scene, int size, double *out) {
  const g2z_loader_position first = {0, 0};
  g2z_status status = g2z_loader_seek(scene->loader, first);
  if (status != G2Z_OK) return status;
  return g2z_trainer_validate(scene->trainer, scene->loader, 1 + size, NULL, NULL, out);
}
static g2z_status memory_load(memory_scene *scene, int size, double *out) {
  g2z_status status = g2z_trainer_load(scene->trainer, scene->saved);
  return status == G2Z_OK ? memory_step(scene, size, out) : status;
}

/* A call whose n-th allocation fails leaves an object with which the same call, a smaller one or a
 * larger one computes what it does on a new object, to the bit. */
static void test_memory_again(g2z_test *t) {
  static const struct { const char *name; memory_call call; int least; } cases[] = {
      {"score", memory_score, 5},       {"score of a trainer", memory_score_trainer, 1},
      {"logits", memory_logits, 4},     {"generate", memory_generate, 5},
      {"validate", memory_validate, 1}, {"step", memory_step, 8},
      {"load", memory_load, 8}};
  int32_t ids[12 * MEMORY_T + 1];
  memory_scene scene;
  test_tokens(ids, 12 * MEMORY_T + 1, MEMORY_WORDS, 9);
  test_shard(t, "memory.bin", G2Z_SHARD_RAW, ids, 12 * MEMORY_T + 1);
  scene.saved = test_kept(t, test_path(t, "saved"));
  const char *weights = test_kept(t, test_path(t, "memory"));
  g2z_train_config config = test_config_of(1, 1, 16, MEMORY_T, MEMORY_WORDS);
  CHECK_OK(t, g2z_trainer_save_weights(test_trainer_of(t, &config), weights));
  const int before = t->owned_count;
  memory_open(t, &scene, weights);
  double lost;
  CHECK_OK(t, memory_step(&scene, 0, &lost));
  REQUIRE_OK(t, g2z_trainer_save(scene.trainer, scene.saved));
  test_end(t, before);
  for (size_t i = 0; i < G2Z_COUNT(cases); i++)
    for (int next = 0; next < 3; next++) {
      double want[2] = {0, 0}, failed = 0, got[2] = {0, 0};
      memory_open(t, &scene, weights);
      CHECK_OK(t, cases[i].call(&scene, next, &want[0]));
      CHECK_OK(t, cases[i].call(&scene, 1, &want[1]));
      test_end(t, before);
      g2z_status status = G2Z_NO_MEMORY;
      int at = 0;
      while (status == G2Z_NO_MEMORY && at < 1000) {
        memory_open(t, &scene, weights);
        t->fail_at = ++at;
        status = cases[i].call(&scene, 1, &failed);
        t->fail_at = 0;
        if (status == G2Z_NO_MEMORY) {
          CHECK_OK(t, cases[i].call(&scene, next, &got[0]));
          CHECK_OK(t, cases[i].call(&scene, 1, &got[1]));
          FAIL_IF(t, memcmp(got, want, sizeof got) != 0, "%s after allocation %d failed: %g, %g, "
                  "not %g, %g", cases[i].name, at, got[0], got[1], want[0], want[1]);
        }
        test_end(t, before);
      }
      FAIL_IF(t, status != G2Z_OK || at <= cases[i].least, "%s has status %d after %d allocations",
              cases[i].name, (int)status, at - 1);
    }
}

/* Bytes that are allocated now, and the most of them. The size stands before each block. */
static size_t memory_live, memory_most;
static void *memory_counted(void *user, size_t bytes) {
  (void)user;
  max_align_t *block = (max_align_t *)malloc(sizeof *block + bytes);
  if (!block) return NULL;
  memcpy(block, &bytes, sizeof bytes);
  const size_t live = __atomic_add_fetch(&memory_live, bytes, __ATOMIC_RELAXED);
  if (live > memory_most) memory_most = live;
  return block + 1;
}
static void memory_uncounted(void *user, void *memory) {
  (void)user;
  max_align_t *block = (max_align_t *)memory - 1;
  size_t bytes;
  memcpy(&bytes, block, sizeof bytes);
  __atomic_sub_fetch(&memory_live, bytes, __ATOMIC_RELAXED);
  free(block);
}

/* A CPU's step allocates nothing except its ops' scratch, and the plan has the size of that: up to
 * its multiple of 256 bytes and the struct that points to it. In 8 bits it is an upper bound,
 * because the largest product does not run beside the largest block of scores. A second step, and
 * the score of a longer sequence, stay within it. */
static void test_memory_planned(g2z_test *t) {
  static const struct {
    int threads, seq;
    g2z_fp8 fp8;
  } cases[] = {
      {1, 64, G2Z_FP8_NONE},    {3, 64, G2Z_FP8_NONE},    {1, 200, G2Z_FP8_NONE},
      {1, 64, G2Z_FP8_LOGITS}, {3, 64, G2Z_FP8_FORWARD}, {1, 64, G2Z_FP8_ALL}};
  int32_t tokens[801];
  float losses[800];
  double mean;
  test_tokens(tokens, 801, 61, 3);
  for (size_t i = 0; i < G2Z_COUNT(cases); i++) {
    const g2z_services services = t->services;
    t->services.allocate = memory_counted;
    t->services.release = memory_uncounted;
#ifdef _OPENMP
    const int threads = omp_get_max_threads();
    omp_set_num_threads(cases[i].threads);
#endif
    g2z_train_config config = test_config_of(1, 2, 32, 400, 61);
    config.seq = cases[i].seq;
    config.fp8 = cases[i].fp8;
    if (config.fp8) config.dtype = G2Z_FP16;
    test_trainer tt;
    g2z_report report;
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    const size_t planned = tt.trainer->plan->bytes[G2Z_MEMORY_SCRATCH], before = memory_live;
    memory_most = before;
    CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, tokens, tokens + 1, &report));
    const size_t taken = memory_most - before;
    FAIL_IF(t, taken > planned || (!config.fp8 && planned - taken > 512),
            "%d threads, seq=%d, fp8 %d: %zu bytes are planned, %zu were taken", cases[i].threads,
            cases[i].seq, (int)config.fp8, planned, taken);
    CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, tokens, tokens + 1, &report));
    CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
    const int longest = cases[i].seq * 2; /* both sequences of the batch as one */
    CHECK_OK(t, g2z_model_score(&tt.trainer->model, tokens, tokens + 1, 1, longest,
                                losses, &mean));
    CHECK(t, memory_most - before <= planned);
    test_trainer_close(t, &tt);
#ifdef _OPENMP
    omp_set_num_threads(threads);
#endif
    t->services = services;
  }
}

/* ----- generation -------------------------------------------------------- */

static void test_sampling(g2z_test *t) {
  const float logits[5] = {1.0f, 3.0f, 2.0f, 0.0f, 3.0f};
  ops_env e = ops_open(t, G2Z_FP32, G2Z_FP32);
  g2z_sampling s = g2z_sampling_default();
#define DRAW(logits, V, index) test_draws(t, e.device, logits, V, &s, index)
  s.temperature = 0;
  CHECK(t, DRAW(logits, 5, 0) == 1); /* of equal logits the smaller id */
  s.temperature = 1;
  int count[5] = {0, 0, 0, 0, 0};
  double sum = 0;
  for (int i = 0; i < 5; i++) sum += exp((double)logits[i]);
  for (int i = 0; i < 20000; i++) count[DRAW(logits, 5, i)]++;
  for (int i = 0; i < 5; i++) { /* five standard deviations of a binomial */
    double p = exp((double)logits[i]) / sum;
    CHECK_NEAR(t, count[i] / 20000.0, p, 5 * sqrt(p * (1 - p) / 20000));
  }
  s.top_k = 3;
  for (int i = 0; i < 2000; i++) {
    int id = DRAW(logits, 5, i);
    CHECK(t, id == 1 || id == 2 || id == 4);
  }
  s.top_k = 0;
  s.top_p = 0.5f; /* ids 1 and 4 have 0.42 each */
  memset(count, 0, sizeof count);
  for (int i = 0; i < 2000; i++) count[DRAW(logits, 5, i)]++;
  CHECK(t, count[1] + count[4] == 2000 && count[1] > 800 && count[4] > 800);
  s.top_p = 1e-9f;
  CHECK(t, DRAW(logits, 5, 9) == 1);
  const float one_broken[3] = {NAN, 1.0f, 2.0f}, broken[3] = {NAN, NAN, NAN};
  for (int warm = 0; warm < 2; warm++) {
    s.temperature = (float)warm;
    CHECK(t, DRAW(one_broken, 3, 9) == 2);
    CHECK(t, DRAW(broken, 3, 9) == -1);
  }
#undef DRAW
  ops_close(&e);
}

static void test_tokens_services(g2z_test *t) {
  static g2z_test other;
  g2z_encoder *encoder = test_encoder(t, test_tokenizer(t, NULL));
  g2z_tokens tokens;
  char text[300];
  memset(&other, 0, sizeof other);
  memset(&tokens, 0, sizeof tokens);
  memset(text, '!', sizeof text);
  other.services.allocate = test_allocate;
  other.services.release = test_release;
  other.services.user = &other;
  CHECK_OK(t, g2z_tokens_reserve(&other.services, &tokens, 1));
  other.fail_at = 1; /* the call's services get the error */
  CHECK_STATUS(t, g2z_encode(encoder, text, sizeof text, G2Z_ENCODE_DEFAULT, &tokens),
               G2Z_NO_MEMORY, &t->services, "bytes");
  other.fail_at = 0;
  CHECK_OK(t, g2z_encode(encoder, text, sizeof text, G2Z_ENCODE_DEFAULT, &tokens));
  CHECK(t, tokens.services == &other.services && other.allocations == 1 && tokens.count == 300);
  long live = t->allocations;
  g2z_tokens_free(&tokens);
  g2z_tokens_free(NULL);
  CHECK(t, other.allocations == 0 && t->allocations == live);
}

/* ----- rank programs: ZeRO ----- */

/* This rank's part of a step's `sequences`: sequence j goes to rank j % world. Each target is a
 * function of its token, so that twenty steps learn something. */
static void zero_tokens(int step, int rank, int world, int sequences, int vocab, int32_t *x,
                        int32_t *y) {
  int apart = vocab / 61; /* uses 61 words from all ranks' slices */
  int32_t all[ZERO_SEQUENCES * ZERO_SEQ];
  test_tokens(all, (size_t)sequences * ZERO_SEQ, 61, (uint64_t)step + 5);
  for (int j = rank, at = 0; j < sequences; j += world)
    for (int i = 0; i < ZERO_SEQ; i++, at++) {
      int word = all[j * ZERO_SEQ + i];
      x[at] = word * apart;
      y[at] = (word * 7 + 3) % 61 * apart;
    }
}

/* Stores the losses of ZERO_STEPS steps. */
static void zero_train(g2z_test *t, g2z_trainer *trainer, float *losses) {
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  const g2z_plan *plan = trainer->plan;
  g2z_report report;
  for (int step = 0; step <= ZERO_STEPS; step++) {
    zero_tokens(step, plan->rank, plan->world, plan->batch * plan->accum * plan->world,
                plan->model.vocab, x, y);
    if (step < ZERO_STEPS) REQUIRE_OK(t, g2z_trainer_step_batch(trainer, x, y, &report));
    else REQUIRE_OK(t, g2z_trainer_flush(trainer, &report));
    if (report.loss_step > 0) losses[report.loss_step - 1] = report.loss;
  }
}

/* How to run a case. ZERO_LIKE + world: one rank takes micro-batches of the size that `world` ranks
 * have. ZERO_ROUNDED + world: the same, and each gradient moves as far as the roundings of `world`
 * ranks can move it. */
enum { ZERO_PLAIN, ZERO_RECOMPUTE, ZERO_LIKE, ZERO_ROUNDED = ZERO_LIKE + TEST_RANKS };
enum { ZERO_MUON = 1 << 10 };   /* added to one of these: with Muon */

/* Before a step computes the norm of its gradients, which are fp32 on one rank, each moves up or
 * down at random by zero_move times the sum of its size and the range's mean size. Reason: ranks'
 * parts of opposite sign are larger than their sum and round by more. */
static g2z_ops zero_moving;
static const g2z_ops *zero_still;
static double zero_move;
static uint32_t zero_coin;
static g2z_status zero_sumsq(g2z_device *device, double *sum, const void *grads,
                             const g2z_range *ranges, int count) {
  static float part[1 << 17];
  for (int r = 0; r < count; r++) {
    size_t n = ranges[r].elements;
    float *at = (float *)grads + ranges[r].begin;
    double mean = 0;
    if (n > sizeof part / sizeof *part) return G2Z_BAD_ARGUMENT;
    g2z_status status = zero_still->download(device, part, at, n * sizeof *part);
    if (status == G2Z_OK) status = zero_still->synchronize(device);
    if (status != G2Z_OK) return status;
    for (size_t i = 0; i < n; i++) mean += fabs((double)part[i]) / (double)n;
    for (size_t i = 0; i < n; i++) {
      double move = zero_move * (fabs((double)part[i]) + mean);
      zero_coin = zero_coin * 1664525u + 1013904223u;
      part[i] += (float)(zero_coin >> 31 ? move : -move);
    }
    status = zero_still->upload(device, at, part, n * sizeof *part);
    if (status == G2Z_OK) status = zero_still->synchronize(device);
    if (status != G2Z_OK) return status;
  }
  return zero_still->grad_sumsq(device, sum, grads, ranges, count);
}

/* `roundings` of a number, each by at most half a unit in the last place: 2^-11 of it in fp16, 2^-8
 * in bf16. */
static void zero_round(g2z_trainer *trainer, int roundings, g2z_dtype dtype) {
  zero_still = trainer->device->ops;
  zero_moving = *zero_still;
  zero_moving.grad_sumsq = zero_sumsq;
  zero_move = roundings * (dtype == G2Z_FP16 ? 0x1p-11 : 0x1p-8);
  zero_coin = 1;
  trainer->device->ops = &zero_moving;
}

/* "zero DEVICE DTYPE CASES HOW FILE": rank 0 writes the losses of all cases to FILE. */
static void rank_zero(g2z_test *t, char **argv) {
  const int gpu = atoi(argv[0]), dtype = atoi(argv[1]), cases = atoi(argv[2]);
  const int kind = atoi(argv[3]), how = kind % ZERO_MUON;
  const int rounded = how > ZERO_ROUNDED ? how - ZERO_ROUNDED : 0;
  const int like = rounded ? rounded : how > ZERO_LIKE ? how - ZERO_LIKE : 1;
  float losses[ZERO_CASES][ZERO_STEPS];
  g2z_context *context = rank_context(t, gpu);
  const int before = t->owned_count;
  for (int i = 0; i < cases; i++) {
    g2z_train_config config = zero_config(i, gpu, context->world, (g2z_dtype)dtype);
    if (context->world == 1) { /* the reference does not use ZeRO */
      config.zero_stage = 0;
      config.strategy = G2Z_STRATEGY_ZERO;
    }
    config.recompute = how == ZERO_RECOMPUTE ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    config.optimizer.kind = kind == how ? G2Z_OPTIMIZER_ADAMW : G2Z_OPTIMIZER_MUON;
    /* In a sum over ranks round: each part after each micro-step, the sums, and what it is compared
     * with. */
    const int roundings = (config.accum + 1) * rounded;
    config.batch /= like;
    config.accum *= like;
    config.grad_fp32 = like > 1;
    if (rounded) config.graph = 0; /* the host moves gradients amid a step */
    g2z_trainer *trainer = rank_trainer(t, context, &config);
    const int apart = getenv("NCCL_P2P_DISABLE") || getenv("NCCL_P2P_LEVEL") ||
                      getenv("NCCL_HOSTID"); /* no copies between these GPUs */
    CHECK(t, !apart || (trainer->comm->reduce != G2Z_TRANSPORT_COPY &&
                        trainer->comm->gather != G2Z_TRANSPORT_COPY));
    if (rounded) zero_round(trainer, roundings, config.dtype);
    zero_train(t, trainer, losses[i]);
    if (rounded) trainer->device->ops = zero_still;
    test_end(t, before);
  }
  if (context->rank == 0)
    CHECK_OK(t, rank_leaves(argv[4], losses, (size_t)cases * sizeof losses[0]));
}

/* "graphs STAGE DIRECTORY": rank 1 cannot record a step, and the other ranks record theirs. All stay
 * in step: a checkpoint is saved, and the losses equal those of ranks that all record. */
static void rank_graphs(g2z_test *t, char **argv) {
  float losses[2][ZERO_STEPS];
  g2z_context *context = rank_context(t, 1);
  g2z_train_config config = zero_config(atoi(argv[0]), 1, context->world, G2Z_FP32);
  config.graph = 2;
  config.tune = G2Z_TUNE_OFF;
  for (int refused = 0; refused < 2; refused++) {
    const int before = t->owned_count, mine = refused && context->rank == 1;
    g2z_trainer *trainer = rank_trainer(t, context, &config);
    g2z_ops ops = *trainer->device->ops;
    graphs_right = trainer->device->ops;
    ops.graph_end = graphs_end;
    if (mine) trainer->device->ops = &ops;
    zero_train(t, trainer, losses[refused]);
    CHECK(t, trainer->plan->graphed == !mine);
    CHECK_OK(t, g2z_trainer_save(trainer, test_text("%s.%d", argv[1], refused)));
    trainer->device->ops = graphs_right;
    test_end(t, before);
  }
  CHECK(t, memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
}

/* Counts gathers. Whenever a block is computed, checks the block buffers: one holds this block, and
 * the other gets the next block of the pass. */
static g2z_trainer *turns_trainer;
static g2z_ops turns_ops;
static const g2z_ops *turns_right;
static g2z_collectives turns_calls;
static const g2z_collectives *turns_played;
static int turns_seen, turns_wrong, turns_gathers;
static void turns_look(int next) {
  const g2z_trainer *t = turns_trainer;
  int unit = t->needed, L = t->plan->model.layers;
  if (unit < 1 || unit > L) return; /* unit 0: the final LayerNorm */
  turns_seen++;
  turns_wrong += t->buffered[unit % 2] != unit || !t->buffered_joined[unit % 2];
  next += unit;
  turns_wrong += next >= 1 && next <= L && t->buffered[next % 2] != next;
}
static g2z_status turns_fwd(g2z_device *device, const g2z_layernorm_fwd *op) {
  turns_look(-1);
  return turns_right->layernorm_fwd(device, op);
}
static g2z_status turns_bwd(g2z_device *device, const g2z_linear_bwd_weight *op) {
  turns_look(1);
  return turns_right->linear_bwd_weight(device, op);
}
static g2z_status turns_gather(g2z_comm *comm, const g2z_call *call) {
  turns_gathers += call->kind == G2Z_CALL_GATHER;
  return turns_played->play(comm, call);
}

/* "turns CASE": three steps of stage 3 with one bucket per unit. */
static void rank_turns(g2z_test *t, char **argv) {
  enum { STEPS = 3 };
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  g2z_report report;
  g2z_context *context = rank_context(t, 0);
  const int world = context->world;
  const g2z_train_config config = zero_config(atoi(argv[0]), 0, world, G2Z_FP32);
  g2z_trainer *trainer = turns_trainer = rank_trainer(t, context, &config);
  turns_played = trainer->comm->ops;
  turns_calls = *turns_played;
  turns_calls.play = turns_gather;
  trainer->comm->ops = &turns_calls;
  turns_right = trainer->device->ops;
  turns_ops = *turns_right;
  turns_ops.layernorm_fwd = turns_fwd;
  turns_ops.linear_bwd_weight = turns_bwd;
  trainer->device->ops = &turns_ops;
  for (int step = 0; step < STEPS; step++) {
    zero_tokens(step, context->rank, world, config.batch * config.accum * world,
                config.model.vocab, x, y);
    REQUIRE_OK(t, g2z_trainer_step_batch(trainer, x, y, &report));
  }
  /* Per pass of each micro-step, all of the L blocks are gathered except the two that are already
   * in the buffers. An update sends these two, wte, wpe and the final LayerNorm; so does the
   * start. */
  const int L = config.model.layers;
  CHECK(t, turns_gathers == 5 + STEPS * (2 * (L - 2) * config.accum + 5));
  CHECK(t, turns_seen == STEPS * config.accum * L * (2 + 4)); /* LayerNorms, and products */
  CHECK(t, turns_wrong == 0);
  /* Writes to the first block, which is in a buffer. The logits must use the new values at once:
   * they must equal the logits after the block has been gathered again. */
  const float zeros[512] = {0};
  const int32_t token = 7;
  float logits[2][ZERO_WORDS] = {{0}};
  CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, trainer->plan->unit[L].canonical + 32,
                                512, zeros));
  for (int i = 0; i < 2; i++)
    CHECK_OK(t, g2z_model_logits(&trainer->model, &token, 1, 1, logits[i]));
  CHECK(t, memcmp(logits[0], logits[1], sizeof logits[0]) == 0);
}

/* Validates on a shard. Rank 1's loader gets a vocabulary that lacks some of its tokens. */
static g2z_status rank_validate(g2z_trainer *trainer, const char *shard) {
  const g2z_plan *plan = trainer->plan;
  g2z_services *services = trainer->context->services;
  const g2z_loader_config config = {
      shard, plan->batch, plan->seq, 1, plan->rank, plan->world, plan->rank == 1 ? 30 : 61,
      G2Z_ORDER_FILE, 0};
  g2z_loader *loader;
  double loss = 0;
  g2z_status status = g2z_loader_create(services, &config, &loader);
  if (status == G2Z_OK) status = g2z_trainer_validate(trainer, loader, 3, NULL, NULL, &loss);
  g2z_loader_free(loader);
  return status;
}

/* On rank 0, before the save fails: watches the directory. */
static g2z_status trouble_files(void *user, const char *directory) {
  inotify_add_watch(*(int *)user, directory, IN_CLOSE_WRITE | IN_DELETE);
  return G2Z_IO;
}

/* Returns 1 if a failed save removes a file that a rank has open. NFS would keep the directory. */
static int trouble_open(g2z_context *context, g2z_trainer *trainer, const char *directory) {
  union { struct inotify_event event; char bytes[8192]; } all;
  int watch = inotify_init1(IN_NONBLOCK), deleted = 0, late = 0;
  const g2z_status saved = g2z_trainer_save_with(trainer, directory, NULL, trouble_files, &watch);
  g2z_ranks_agree(context->ranks, G2Z_OK); /* by now all ranks have closed */
  const ssize_t bytes = read(watch, all.bytes, sizeof all.bytes);
  for (ssize_t at = 0; at < bytes;) {
    const struct inotify_event *event = (const struct inotify_event *)(all.bytes + at);
    deleted |= (event->mask & IN_DELETE) != 0;
    late |= deleted && event->mask & IN_CLOSE_WRITE;
    at += (ssize_t)(sizeof *event + event->len);
  }
  close(watch);
  return late || saved != G2Z_IO || (context->rank == 0 && !deleted);
}

static g2z_status trouble_play(g2z_comm *comm, const g2z_call *call) {
  (void)call;
  return g2z_fail(comm->services, G2Z_IO, "this rank does not send");
}

/* "trouble KIND DEVICE CASE SHARD": three saves fail; then rank 1 has an invalid token in
 * step 4, or requests a stop in step 3, or cannot validate on SHARD before step 4; steps continue
 * after the last of these. KIND "tuning": before step 4 rank 1 fails to share the tuning, and waits.
 * All ranks print the outcome and its step. On a GPU the step is a graph.
 * Before step 4 all ranks compute logits, which gathers parameters that the graph would otherwise
 * gather. */
static void rank_trouble(g2z_test *t, char **argv) {
  static g2z_collectives fail;
  const int stop = strcmp(argv[0], "stop") == 0, token = strcmp(argv[0], "token") == 0;
  const int tuning = strcmp(argv[0], "tuning") == 0, gpu = atoi(argv[1]);
  g2z_context *context = rank_context(t, gpu);
  g2z_train_config config = zero_config(atoi(argv[2]), gpu, context->world, G2Z_FP32);
  config.graph = gpu;
  g2z_trainer *trainer = rank_trainer(t, context, &config);
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ] = {0}, y[ZERO_SEQUENCES * ZERO_SEQ];
  g2z_report report;
  char saved[512], said[G2Z_ERROR_BYTES];
  snprintf(saved, sizeof saved, "%s.%s.%s", argv[3], argv[0], argv[2]);
  for (int i = 0; i < 3; i++) CHECK(t, !trouble_open(context, trainer, saved));
  g2z_status status = g2z_trainer_save(trainer, saved);
  int step = 0;
  for (; step < 10 && status == G2Z_OK; step++) {
    int mine = context->rank == 1;
    float logits[61];
    if (step == 4 && g2z_model_logits(&trainer->model, x, 1, 1, logits) != G2Z_OK) break;
    if (step == 4 && !stop && !token && !tuning && rank_validate(trainer, argv[3]) == G2Z_OK) break;
    zero_tokens(step, context->rank, context->world,
                config.batch * config.accum * context->world, config.model.vocab, x, y);
    if (mine && token && step == 4) x[17] = 61;
    if (mine && stop && step == 3) g2z_trainer_request_stop(trainer);
    if (step == 4 && tuning) { /* as on a GPU */
      trainer->plan->device = G2Z_DEVICE_CUDA;
      trainer->config.tune = G2Z_TUNE_ON;
      trainer->tuned = 0;
      trainer->stale = 1;
      fail = *trainer->comm->ops;
      fail.play = trouble_play;
      if (mine) trainer->comm->ops = &fail;
    }
    status = g2z_trainer_step_batch(trainer, x, y, &report);
    for (int i = 0; step == 4 && tuning && mine && !context->ranks->lost; i++) {
      REQUIRE_OK(t, i < 400 ? G2Z_OK : G2Z_LOST); /* the others still wait */
      rank_sleep(0.1);
    }
    trainer->plan->device = gpu ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU;
  }
  snprintf(said, sizeof said, "%s", t->services.error);
  x[17] = 0;
  g2z_status again = g2z_trainer_load(trainer, saved);
  for (int i = 0; i < 3 && again == G2Z_OK; i++)
    again = g2z_trainer_step_batch(trainer, x, y, &report);
  printf("step %d status %d, from what was saved %d: %s\n", step, (int)status, (int)again, said);
}

/* "masked SHARD STAGE ACCUM FILE": a step of golden/tiny on the three sequences of a shard with a
 * mask. Stage 4 is strategy dp. Prints the losses of the step and of a validation before it. Writes
 * the gradients that AdamW used, m / (1 - beta1) after the first step, to FILE.RANK; gradients of
 * other ranks are NaN there. */
static void rank_masked(g2z_test *t, char **argv) {
  g2z_context *context = rank_context(t, 0);
  const int stage = atoi(argv[1]), accum = atoi(argv[2]), batch = 3 / (context->world * accum);
  const g2z_loader_config shards = {argv[0], batch, 20, 1, context->rank, context->world, 131,
                                    G2Z_ORDER_FILE, 0};
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
  g2z_report report;
  double val = 0;
  config.init_from = "golden/tiny";
  config.train_glob = argv[0];
  config.strategy = stage == ZERO_DP ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
  config.zero_stage = stage % ZERO_DP;
  config.accum = accum;
  config.batch = batch;
  config.seq = shards.seq;
  config.optimizer.clip = 0;
  REQUIRE_OK(t, g2z_weights_config(&t->services, config.init_from, &config.model));
  g2z_trainer *trainer = rank_trainer(t, context, &config);
  REQUIRE_OK(t, g2z_trainer_validate(trainer, test_loader(t, &shards), accum, NULL, NULL, &val));
  REQUIRE_OK(t, g2z_trainer_step(trainer, &report));
  REQUIRE_OK(t, g2z_trainer_flush(trainer, &report));
  const size_t count = trainer->plan->parameters;
  float *m = (float *)test_memory(t, count * sizeof *m);
  for (size_t i = 0; i < count; i++) m[i] = NAN;
  REQUIRE_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_M, 0, count, m));
  for (size_t i = 0; i < count; i++) m[i] /= 1 - config.optimizer.beta1;
  CHECK_OK(t, rank_leaves(test_text("%s.%d", argv[3], context->rank), m, count * sizeof *m));
  printf("step %.9g validation %.9g\n", (double)report.loss, val);
}

/* A tuning table as GPUs of two kinds have it. */
static int kinds_mine, kinds_rehearsals;
static g2z_status kinds_tuning(g2z_device *device, char **text) {
  kinds_rehearsals++; /* a rehearsal ends with this call */
  G2Z_TRY(G2Z_NEW(device->services, 64, text));
  snprintf(*text, 64, "%skind %d\n", G2Z__TUNING_HEAD, kinds_mine);
  return G2Z_OK;
}
static g2z_status kinds_read(g2z_device *device, const char *text) {
  if (strstr(text, test_text("kind %d", kinds_mine))) return G2Z_OK;
  return g2z_fail(device->services, G2Z_FORMAT, "made on another GPU");
}

/* "kinds KIND": the ranks except 0 have GPUs of this kind; rank 0's has kind 0. The ranks whose
 * kind differs time for themselves, rank 0 warns, and all train. */
static void rank_kinds(g2z_test *t, char **argv) {
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  g2z_report report;
  g2z_context *context = rank_context(t, 0);
  const g2z_train_config config = zero_config(0, 0, context->world, G2Z_FP32);
  g2z_trainer *trainer = rank_trainer(t, context, &config);
  const g2z_ops *right = trainer->device->ops;
  g2z_ops ops = *right;
  kinds_mine = context->rank ? atoi(argv[0]) : 0;
  ops.tuning = kinds_tuning;
  ops.tuning_read = kinds_read;
  trainer->device->ops = &ops;
  trainer->plan->device = G2Z_DEVICE_CUDA;
  trainer->config.tune = G2Z_TUNE_ON;
  test_warnings_begin(t);
  CHECK_OK(t, g2z__trainer_share_tuning(trainer));
  const int warned = test_times(test_warnings_end(t), "the ranks have different GPUs");
  CHECK(t, warned == (context->rank == 0 && atoi(argv[0]) != 0));
  CHECK(t, kinds_rehearsals == (context->rank == 0 || kinds_mine != 0));
  trainer->plan->device = G2Z_DEVICE_CPU;
  trainer->device->ops = right;
  zero_tokens(0, context->rank, context->world, config.batch * config.accum * context->world,
              config.model.vocab, x, y);
  CHECK_OK(t, g2z_trainer_step_batch(trainer, x, y, &report));
}

/* Calls that all ranks make together, for "short". */
static g2z_status short_generate(g2z_trainer *trainer, const char *directory) {
  int32_t ids[8] = {1};
  size_t length = 1;
  const g2z_sampling sampling = g2z_sampling_default();
  (void)directory;
  return g2z_model_generate(&trainer->model, 1, ids, 8, &length, &sampling, NULL, NULL);
}
static const struct {
  const char *name;
  g2z_status (*call)(g2z_trainer *trainer, const char *directory);
} short_calls[] = {{"generate", short_generate}, {"weights", g2z_trainer_save_weights}};

/* "short CALL NUMBER DIRECTORY": on rank 1 this allocation of the call and all later ones fail.
 * All ranks fail, soon, while rank 1 stays; or the call has fewer allocations. Ranks agree on the
 * result of "create", "save" and "load", so these are repeated until they need no more memory. */
static void rank_short(g2z_test *t, char **argv) {
  t->services.allocate = test_allocate;
  t->services.release = test_release;
  t->services.user = t;
  g2z_context *context = rank_context(t, 0);
  const int mine = context->rank == 1;
  g2z_train_config config = zero_config(1, 0, context->world, G2Z_FP32);
  g2z_trainer *trainer = NULL;
  g2z_status status = G2Z_NO_MEMORY;
  const int create = strcmp(argv[0], "create") == 0, load = strcmp(argv[0], "load") == 0;
  const int save = strcmp(argv[0], "save") == 0;
  const char *saved = test_kept(t, test_text("%s/%s", argv[2], argv[0]));
  if (save || load) trainer = rank_trainer(t, context, &config);
  if (load) CHECK_OK(t, g2z_trainer_save(trainer, saved));
  for (int at = 1; status == G2Z_NO_MEMORY && (create || save || load); at++) {
    t->fail_at = mine ? at : 0;
    status = create ? g2z_trainer_create(context, &config, &trainer)
             : save ? g2z_trainer_save(trainer, saved) : g2z_trainer_load(trainer, saved);
    t->fail_at = 0;
    CHECK(t, status == G2Z_NO_MEMORY || (status == G2Z_OK && at > 1));
    if (create) g2z_trainer_free(trainer);
  }
  for (size_t i = 0; i < G2Z_COUNT(short_calls); i++) {
    if (strcmp(short_calls[i].name, argv[0]) != 0) continue;
    trainer = rank_trainer(t, context, &config);
    const double begin = g2z_seconds();
    t->fail_at = mine ? atoi(argv[1]) : 0;
    status = short_calls[i].call(trainer, test_text("%s/%d", argv[2], context->rank));
    t->fail_at = 0;
    CHECK(t, g2z_seconds() - begin < rank_seconds(40));
    CHECK(t, status == G2Z_OK || status == G2Z_NO_MEMORY || (!mine && status == G2Z_LOST));
    const char *ended = test_text("%s/%s.%s.ended", argv[2], argv[0], argv[1]);
    if (!mine) CHECK_OK(t, rank_leaves(ended, "", 0));
    while (mine && access(ended, F_OK) != 0 && g2z_seconds() - begin < rank_seconds(60))
      rank_sleep(0.05);
  }
  printf("%s: status %d\n", argv[0], (int)status);
}

/* ----- tests of ZeRO: several ranks compute the results of one ----- */

/* Runs rank_zero on `world` ranks. */
static int zero_run(g2z_test *t, int device, g2z_dtype dtype, int world, int cases, int how,
                    float losses[ZERO_CASES][ZERO_STEPS]) {
  int failures = t->failures;
  test_ranks_job(t, world, 0, NULL, "zero %d %d %d %d %s", device, (int)dtype, cases, how,
                 test_path(t, "losses"));
  return t->failures == failures &&
         test_takes(t, test_path(t, "losses"), losses, (size_t)cases * sizeof losses[0]);
}

/* The largest difference from one rank's loss in any step of any case, in nats. */
static double zero_worst(float got[ZERO_CASES][ZERO_STEPS], float want[ZERO_CASES][ZERO_STEPS],
                         int cases) {
  double worst = 0;
  for (int i = 0; i < cases; i++)
    for (int step = 0; step < ZERO_STEPS; step++) {
      double difference = fabs((double)got[i][step] - (double)want[i][step]);
      if (!(difference <= worst)) worst = difference;
    }
  return worst;
}

/* The allowed difference between the losses of `world` ranks and of one, in nats.
 * fp32: gradients differ in the order of their sums, by some 2^-24. AdamW carries that into 12
 *   steps of at most lr = 4e-3, and a logit adds up 32 products: 1e-6. Ten times that is allowed,
 *   since activations round too.
 * 16 bits: each step rounds gradients, and parameters and activations that differ at all may round
 *   to different neighbours, so no formula follows a difference through 12 steps. A run measures it
 *   instead: one rank, whose gradients all move as far as roundings can move them in every step.
 *   Real roundings have either sign and are mostly smaller, so runs that differ only by them stay
 *   closer together. */
static double zero_bound(g2z_test *t, int device, g2z_dtype dtype, int world, int cases, int muon,
                         float one[ZERO_CASES][ZERO_STEPS]) {
  static float rounded[ZERO_CASES][ZERO_STEPS];
  if (dtype == G2Z_FP32) return 1e-5;
  if (!zero_run(t, device, dtype, 1, cases, muon + ZERO_ROUNDED + world, rounded)) return NAN;
  return zero_worst(rounded, one, cases);
}

/* Worlds from `least` to `most` against one rank, which must learn. In 16 bits that rank adds up in
 * fp32 and takes micro-batches of the same size, since a product's roundings depend on its
 * shape. */
static void test_zero_dtype(g2z_test *t, int device, g2z_dtype dtype, int least, int most,
                            int muon) {
  static float one[ZERO_CASES][ZERO_STEPS], many[ZERO_CASES][ZERO_STEPS];
  for (int world = least; world <= most; world++) {
    int how = dtype == G2Z_FP32 ? ZERO_PLAIN : ZERO_LIKE + world;
    if (how || world == least) {
      if (!zero_run(t, device, dtype, 1, ZERO_CASES, muon + how, one)) return;
      for (int i = 0; i < ZERO_CASES; i++) CHECK(t, one[i][ZERO_STEPS - 1] < one[i][0] - 0.5f);
    }
    if (!zero_run(t, device, dtype, world, ZERO_CASES, muon + ZERO_PLAIN, many)) return;
    double worst = zero_worst(many, one, ZERO_CASES);
    double bound = zero_bound(t, device, dtype, world, ZERO_CASES, muon, one);
    CHECK_NEAR(t, worst, 0, bound);
    /* On CPUs rank 0 adds up the same numbers with strategy dp as in stage 0. */
    for (int i = ZERO_DP; i < ZERO_CASES && !device; i += ZERO_COLUMNS)
      CHECK(t, memcmp(many[i], many[i - ZERO_DP], sizeof many[i]) == 0);
  }
}

/* The gradients of a single rank's third step. *apart becomes 1 if the embedding's part of wte's
 * gradient was sent separately. The learning rate is too small to change a parameter, so rounding
 * does not grow. */
static g2z_status zero_alone_grads(g2z_test *t, const g2z_train_config *config, int *apart,
                                   float *grads, size_t limit, size_t *count) {
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  test_trainer tt;
  g2z_report report;
  g2z_status status = test_trainer_open(t, config, &tt);
  for (int step = 0; step < 3 && status == G2Z_OK; step++) {
    zero_tokens(step, 0, 1, config->batch * config->accum, config->model.vocab, x, y);
    status = g2z_trainer_step_batch(tt.trainer, x, y, &report);
  }
  if (status == G2Z_OK) {
    const g2z_plan *plan = tt.trainer->plan;
    *apart = plan->wte_rows && plan->dwte_dtype == config->dtype;
    *count = plan->parameters < limit ? plan->parameters : limit;
    status = g2z_trainer_read(tt.trainer, G2Z_BUFFER_GRADS, 0, *count, grads);
  }
  return status;
}

/* A single rank rounds the head's part of wte's gradient directly. The result has the same bits in
 * every stage and lies within two roundings of the fp32 gradient. */
static void test_zero_alone(g2z_test *t) {
  static const g2z_dtype dtypes[] = {G2Z_FP16, G2Z_BF16};
  static float wide[1 << 17], first[1 << 17], grads[1 << 17];
  for (int i = 0; i < 2; i++) {
    double unit = dtypes[i] == G2Z_FP16 ? 0x1p-11 : 0x1p-8, apart2 = 0, size2 = 0;
    for (int column = -1; column < ZERO_COLUMNS; column++) {
      int apart = 0;
      size_t n = 0;
      /* Stage 0, large vocabulary. */
      g2z_train_config config = zero_config(ZERO_COLUMNS, 0, 1, dtypes[i]);
      config.batch = 15; /* 240 tokens are one chunk */
      config.optimizer.lr = config.optimizer.min_lr = 1e-9f;
      config.grad_fp32 = column < 0;
      config.zero_stage = column > 0 && column < ZERO_DP ? column : 0;
      config.strategy = column == ZERO_DP ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
      CHECK_OK(t, zero_alone_grads(t, &config, &apart, column < 0 ? wide : grads, 1 << 17, &n));
      CHECK(t, apart == (column >= 0) && n > 0 && n < 1 << 17);
      if (column == 0) memcpy(first, grads, sizeof first);
      if (column > 0) CHECK(t, memcmp(grads, first, n * sizeof *grads) == 0);
      for (size_t k = 0; k < n && column == 0; k++) {
        double difference = (double)first[k] - (double)wide[k];
        apart2 += difference * difference;
        size2 += (double)wide[k] * (double)wide[k];
      }
    }
    CHECK(t, size2 > 0 && sqrt(apart2) <= 2 * unit * sqrt(size2));
  }
}

/* muon_ranks is the same with Muon. */
static void test_zero_equal(g2z_test *t) { test_zero_dtype(t, 0, G2Z_FP32, 2, 4, 0); }

static void test_zero_halves(g2z_test *t) {
  test_zero_dtype(t, 0, G2Z_FP16, 3, 3, 0);
  test_zero_dtype(t, 0, G2Z_BF16, 2, 2, 0);
}

static void test_zero_kinds(g2z_test *t) {
  for (int kind = 0; kind < 2; kind++) test_ranks_job(t, 3, 0, NULL, "kinds %d", kind);
}

static void test_zero_short(g2z_test *t) {
  static const char *const agreed[] = {"create", "save", "load"};
  for (int i = 0; i < 3; i++)
    test_ranks_job(t, 2, 0, ": status 0", "short %s 0 %s", agreed[i], t->directory);
  for (size_t i = 0; i < G2Z_COUNT(short_calls); i++)
    test_ranks_job(t, 2, 0, NULL, "short %s 1 %s", short_calls[i].name, t->directory);
}

static void test_zero_turns(g2z_test *t) {
  for (int accum = 0; accum < 2; accum++)
    test_ranks_job(t, 2, 0, NULL, "turns %d", 3 + 3 * ZERO_COLUMNS * accum);
}

/* Recomputed activations change no bit on two ranks either, in any column and with any bucket: with
 * tune off, products choose their algorithms by shape only. */
static void test_zero_recompute_on(g2z_test *t, int device, g2z_dtype dtype) {
  static float kept[ZERO_CASES][ZERO_STEPS], again[ZERO_CASES][ZERO_STEPS];
  const int cases = 3 * ZERO_COLUMNS; /* the cases with one micro-step */
  if (!zero_run(t, device, dtype, 2, cases, ZERO_PLAIN, kept) ||
      !zero_run(t, device, dtype, 2, cases, ZERO_RECOMPUTE, again))
    return;
  CHECK_NEAR(t, zero_worst(again, kept, cases), 0, 0);
}

static void test_zero_recompute(g2z_test *t) { test_zero_recompute_on(t, 0, G2Z_FP16); }

static void masked_gradient(g2z_test *t, void *user, const char *name, g2z_param param,
                            size_t canonical, size_t elements) {
  float *gradients = (float *)user; /* of all parameters */
  size_t count;
  (void)param;
  float *want = test_golden_of(t, "golden/masked.safetensors",
                               test_text("grad.transformer.%s", name), &count);
  CHECK(t, want && count == elements);
  if (want) test_gradient_near(t, name, gradients + canonical, want, elements, 1e-5);
}

/* Runs rank_masked on `world` ranks; their parts together equal PyTorch's gradients. */
static void masked_run(g2z_test *t, const char *shard, int world, int stage, int accum,
                       double loss) {
  static float all[1 << 17], part[1 << 17];
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
  CHECK_OK(t, g2z_weights_config(&t->services, "golden/tiny", &config.model));
  config.batch = 3;
  config.seq = 20;
  const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
  CHECK(t, plan->parameters < sizeof all / sizeof *all);
  test_ranks ranks = test_ranks_open(world);
  test_ranks_start(t, &ranks, 0, world - 1, NULL,
                   test_text("masked %s %d %d %s", shard, stage, accum, test_path(t, "grads")));
  test_ranks_wait(t, &ranks, 120);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) all[i] = NAN;
  for (int r = 0; r < world; r++) {
    double step = 0, val = 0;
    CHECK_RANK(t, &ranks, r, 0, "step ");
    const char *said = ranks.output[r] ? strstr(ranks.output[r], "step ") : NULL;
    CHECK(t, said && sscanf(said, "step %lf validation %lf", &step, &val) == 2);
    CHECK_NEAR(t, step, loss, 1e-5);
    CHECK_NEAR(t, val, loss, 1e-5);
    test_takes(t, test_at(t, "grads.%d", r), part, plan->parameters * sizeof *part);
    for (size_t i = 0; i < plan->parameters; i++)
      if (!isnan(part[i])) all[i] = part[i];
  }
  test_tensors(t, plan, masked_gradient, all);
}

/* Fine-tuning on a shard with a mask: losses and gradients equal PyTorch's with ignore_index. Ranks
 * and micro-steps differ in how many targets count; one has none. */
static void test_golden_masked(g2z_test *t) {
  char shard[512];
  size_t count;
  const char *golden = "golden/masked.safetensors";
  float *tokens = test_golden_of(t, golden, "tokens", &count), *loss;
  float *counts = test_golden_of(t, golden, "counts", &count);
  int32_t ids[61];
  REQUIRE_OK(t, tokens && counts && count == 61 ? G2Z_OK : G2Z_FORMAT);
  for (int i = 0; i < 61; i++) ids[i] = (int32_t)tokens[i] + (counts[i] > 0 ? 0 : G2Z_UNCOUNTED);
  snprintf(shard, sizeof shard, "%s", test_path(t, "tuning.bin"));
  test_shard(t, "tuning.bin", G2Z_SHARD_LLMC, ids, 61);
  loss = test_golden_of(t, golden, "loss", &count);
  for (int stage = 0; stage <= ZERO_DP; stage++) {
    if (stage < 2) masked_run(t, shard, 1, 0, stage ? 3 : 1, (double)loss[0]);
    masked_run(t, shard, 3, stage, 1, (double)loss[0]);
  }
}

/* One rank's trouble is returned by all ranks, from the same step, with the same sentence. */
static void test_zero_trouble_on(g2z_test *t, int device, int world) {
  static const struct { const char *kind, *says; } cases[] = {
      {"token", "step 6 status 1, from what was saved 0: rank 1: token=61 at position 17"},
      {"stop", "step 6 status 8, from what was saved 0: a stop was requested: step 5 was the "},
      {"validation", "step 10 status 0, from what was saved 0: rank 1: "}};
  int32_t ids[1600];
  test_tokens(ids, 1600, 61, 3);
  test_shard(t, "val.bin", G2Z_SHARD_LLMC, ids, 1600);
  for (int i = 0; i < 9; i++) /* in stages 2 and 3, and with strategy dp */
    test_ranks_job(t, world, 0, cases[i / 3].says, "trouble %s %d %d %s", cases[i / 3].kind, device,
                   2 + i % 3, test_path(t, "val.bin"));
}

static void test_zero_trouble(g2z_test *t) {
  /* A rank that fails alone leaves the others hanging for 10 s at most. The rest runs meanwhile. */
  test_ranks waiting = test_ranks_open(3);
  test_ranks_start(t, &waiting, 0, 2, NULL,
                   test_text("trouble tuning 0 2 %s", test_path(t, "val.bin")));
  test_zero_trouble_on(t, 0, 3);
  test_ranks_end(t, &waiting, 120, 0, ", from what was saved 9: ");
}

/* ----- ZeRO on GPUs ----- */

/* The ranks of a test on several GPUs: 8, 4 or 2, as many as there are GPUs; 0: the test is skipped
 * since there are fewer than two. */
static int zero_gpus(g2z_test *t) {
  int count = 0;
#if defined(__CUDACC__)
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
#endif
  if (count < 2) snprintf(t->skip, sizeof t->skip, "needs two GPUs, %d are here", count);
  return count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 0;
}

static void test_cuda_zero(g2z_test *t) {
  const int world = zero_gpus(t);
  if (world) test_zero_dtype(t, 1, G2Z_FP32, world, world, 0);
}

static void test_cuda_zero_halves(g2z_test *t) {
  const int world = zero_gpus(t);
  if (world) test_zero_dtype(t, 1, G2Z_FP16, world, world, 0);
}

static void test_cuda_zero_muon(g2z_test *t) { /* u is bf16 also with fp32 */
  const int world = zero_gpus(t);
  if (world) test_zero_dtype(t, 1, G2Z_FP16, world, world, ZERO_MUON);
}

static void test_cuda_zero_recompute(g2z_test *t) {
  if (zero_gpus(t)) test_zero_recompute_on(t, 1, G2Z_FP16);
}

static void test_cuda_zero_trouble(g2z_test *t) {
  const int world = zero_gpus(t);
  if (world) test_zero_trouble_on(t, 1, world);
}

static void test_cuda_graphs_apart(g2z_test *t) {
  if (!zero_gpus(t)) return;
  for (int stage = 0; stage < 4; stage++)
    test_ranks_job(t, 2, 0, NULL, "graphs %d %s", stage, test_at(t, "stage%d", stage));
}

/* One micro-step in each stage and with dp, without copies between GPUs. */
static void zero_without_copies(g2z_test *t, int world) {
  static float one[ZERO_CASES][ZERO_STEPS], apart[ZERO_CASES][ZERO_STEPS];
  if (zero_run(t, 1, G2Z_FP32, 1, ZERO_COLUMNS, ZERO_PLAIN, one) &&
      zero_run(t, 1, G2Z_FP32, world, ZERO_COLUMNS, ZERO_PLAIN, apart))
    CHECK_NEAR(t, zero_worst(apart, one, ZERO_COLUMNS), 0, 1e-5);
}

/* If GPUs cannot access each other, the user sets a variable for NCCL; the kit's own copies obey
 * it. Only NCCL measures distances, so each level that limits them keeps the kit from copies. */
static void test_cuda_zero_apart(g2z_test *t) {
  static const char *const limits[][2] = {{"NCCL_P2P_DISABLE", "1"}, {"NCCL_P2P_LEVEL", "PXB"}};
  const int world = zero_gpus(t);
  for (int i = 0; i < 2 && world; i++) {
    setenv(limits[i][0], limits[i][1], 1);
    zero_without_copies(t, world);
    unsetenv(limits[i][0]);
  }
}

/* Ranks as if on hosts of their own: neither copies nor a host's shared memory connect the GPUs. */
static void test_cuda_hosts(g2z_test *t) {
  static float one[ZERO_CASES][ZERO_STEPS], many[ZERO_CASES][ZERO_STEPS];
  const int world = zero_gpus(t), muon = ZERO_MUON + ZERO_PLAIN;
  if (!world) return;
  test_hosts = 1;
  zero_without_copies(t, world);
  if (zero_run(t, 1, G2Z_FP16, 1, ZERO_COLUMNS, muon, one) &&
      zero_run(t, 1, G2Z_FP16, world, ZERO_COLUMNS, muon, many))
    CHECK_NEAR(t, zero_worst(many, one, ZERO_COLUMNS), 0,
               zero_bound(t, 1, G2Z_FP16, world, ZERO_COLUMNS, ZERO_MUON, one));
  test_ranks_job(t, 2, 0, NULL, "resume 1 %s %d 5", t->directory, RESUME_ADAMW);
  test_hosts = 0;
}
