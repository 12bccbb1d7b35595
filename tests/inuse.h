/* Tests of the room model in use: scores and logits against golden values and the trainer's;
 * generation with a cache and without one. */

/* ----- a model against golden values, and against the trainer -------------- */

static void test_end_model(void *model) { g2z_model_free((g2z_model *)model); }

/* The test owns the model. */
static g2z_status inuse_open_on(g2z_test *t, g2z_device_kind device, const char *directory,
                                g2z_dtype dtype, g2z_model **out) {
  g2z_context *context;
  *out = NULL;
  g2z_status status = test_context(t, device, &context);
  if (status == G2Z_OK) status = test_model_open(context, directory, dtype, out);
  if (status == G2Z_OK) test_own(t, test_end_model, *out);
  return status;
}

static g2z_model *inuse_open(g2z_test *t, const char *directory, g2z_dtype dtype) {
  g2z_model *model;
  REQUIRE_OK(t, inuse_open_on(t, G2Z_DEVICE_CPU, directory, dtype, &model));
  return model;
}

/* A model with a trainer's weights. */
static g2z_model *inuse_of(g2z_test *t, g2z_trainer *trainer, g2z_dtype dtype) {
  CHECK_OK(t, g2z_trainer_save_weights(trainer, test_path(t, "weights")));
  return inuse_open(t, test_path(t, "weights"), dtype);
}

/* Scores and logits of golden/tiny equal Hugging Face's. An ignored target has no loss and changes
 * no other; nor do more sequences than run at a time change anything. */
static void test_model_scores(g2z_test *t) {
  enum { B = 3, T = 20, V = 131, MANY = 500 };
  g2z_model *model = inuse_open(t, "golden/tiny", G2Z_FP32);
  size_t count;
  int32_t *x = test_golden_tokens(t, "x", &count), *y = test_golden_tokens(t, "y", &count);
  float *loss = test_golden(t, "loss", &count), *want = test_golden(t, "logits", &count);
  float losses[B * T], again[B * T];
  double mean, less, sum = 0;
  CHECK_OK(t, g2z_model_score(model, x, y, B, T, losses, &mean));
  CHECK_NEAR(t, mean, loss[0], 1e-5);
  test_golden_logits_on(t, model, 1e-5);
  for (int i = 0; i < B * T; i++) { /* the loss follows from the logits */
    double total = 0;
    for (int v = 0; v < V; v++) total += exp((double)want[i * V + v]);
    CHECK_NEAR(t, losses[i], log(total) - (double)want[i * V + y[i]], 1e-5);
  }
  for (int i = 0; i < B * T; i += 2) y[i] = -1;
  CHECK_OK(t, g2z_model_score(model, x, y, B, T, again, &less));
  for (int i = 0; i < B * T; i++) {
    CHECK(t, again[i] == (i % 2 ? losses[i] : 0));
    sum += (double)again[i];
  }
  CHECK_NEAR(t, less, sum / (B * T / 2), 1e-12);
  for (int i = 0; i < B * T; i++) y[i] = -1;
  CHECK_OK(t, g2z_model_score(model, x, y, B, T, NULL, &less));
  CHECK(t, isnan(less));

  int32_t *many = (int32_t *)test_memory(t, 2 * MANY * T * sizeof *many);
  int32_t *targets = many + MANY * T;
  float *each = (float *)test_memory(t, MANY * T * sizeof *each);
  for (int i = 0; i < MANY * T; i++) many[i] = x[i % (B * T)], targets[i] = x[(i + 1) % (B * T)];
  CHECK_OK(t, g2z_model_score(model, many, targets, MANY, T, each, &mean));
  for (int i = B * T; i < MANY * T; i++) CHECK(t, each[i] == each[i % (B * T)]);
  x[7] = V;
  CHECK_BAD(t, g2z_model_score(model, x, y, B, T, losses, &mean), "token=131 at position 7");
  CHECK(t, isnan(mean));
  x[7] = 0;
  y[9] = -2;
  CHECK_BAD(t, g2z_model_score(model, x, y, B, T, losses, &mean), "target=-2 at position 9");
  CHECK_BAD(t, g2z_model_logits(model, x, 1, model->config.context + 1, each), "T=");
}

/* A model holds weights and one block's activations only. Many sequences also take a key-value
 * cache and the activations of one sequence, or of one token per sequence if that is more. Scores
 * in between change none of the tokens. */
static void test_model_cache(g2z_test *t) {
  enum { MANY = 64, T = 20 };
  static const int counts[] = {MANY, 7}, rooms[] = {T, 3};
  static int32_t ids[2][2][MANY * T];
  int32_t x[MANY * T];
  double mean[2];
  g2z_sampling sampling = g2z_sampling_default();
  g2z_model *model = inuse_open(t, "golden/tiny", G2Z_FP32);
  test_tokens(x, MANY * T, model->config.vocab, 3);
  CHECK_OK(t, g2z_model_score(model, x, x, 1, T, NULL, &mean[0]));
  const g2z_plan *plan = model->plan;
  size_t L = (size_t)plan->model.layers, C = (size_t)plan->model.channels, N = T;
  size_t block = N * (15 * C + 4 + (size_t)plan->model.heads) + N * 4 * C; /* and its input */
  size_t rest = N * (2 * C + 3) + N * (size_t)plan->vocab_padded + 2 * N; /* ends, logits, tokens */
  size_t want = 4 * (plan->param_elements + block + rest);
  CHECK_NEAR(t, (double)model->bytes, (double)want, 0.1 * (double)want);
  for (int again = 0; again < 2; again++) {
    for (int i = 0; i < 2; i++) {
      const int count = counts[i], room = rooms[i];
      size_t lengths[MANY];
      for (int k = 0; k < count; k++) {
        lengths[k] = 1 + (size_t)(k % 2);
        memcpy(ids[again][i] + k * room, x + k * T, lengths[k] * sizeof *x);
      }
      CHECK_OK(t, g2z_model_generate(model, count, ids[again][i], (size_t)room, lengths, &sampling,
                                     NULL, NULL));
      if (i || again) continue;
      size_t cache = L * (size_t)(count * room) * 3 * C;
      rest = MANY * (18 * C + 10 + 2 * (size_t)plan->vocab_padded);
      CHECK(t, model->bytes > 4 * (plan->param_elements + cache));
      CHECK(t, model->bytes < 4 * (plan->param_elements + cache + rest));
    }
    CHECK_OK(t, g2z_model_score(model, x, x, MANY, T, NULL, &mean[again]));
  }
  CHECK(t, mean[0] == mean[1] && memcmp(ids[0], ids[1], sizeof ids[0]) == 0);
}

/* ----- targets that are left out of a training ------------------------------- */

/* A step in which no target counts changes no weight, not even by decay. golden_masked has the
 * steps in which some count. */
static void test_masked(g2z_test *t) {
  enum { T = 16, V = 61, MOST = 40000 };
  static float before[MOST], after[MOST];
  g2z_train_config config = test_config_of(2, 2, 32, T, V);
  g2z_report report;
  int32_t x[4 * T], y[4 * T], none[4 * T];
  config.accum = 2;
  config.optimizer.warmup = 0;
  test_tokens(x, 4 * T, V, 7);
  test_tokens(y, 4 * T, V, 8);
  for (int i = 0; i < 4 * T; i++) none[i] = -1;
  memcpy(y + T, none, 3 * T * sizeof *y);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  const size_t count = trainer->plan->parameters;
  CHECK(t, count <= MOST);
  test_steps(t, trainer, x, y, 1, NULL, &report);
  CHECK(t, report.counted == T && report.applied == 1);
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, count, before));
  test_steps(t, trainer, x, none, 1, NULL, &report);
  CHECK(t, isnan(report.loss) && report.grad_norm == 0 && report.skipped && report.counted == 0);
  CHECK(t, report.applied == 1);
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, count, after));
  CHECK(t, memcmp(after, before, count * sizeof *after) == 0);
  none[3] = -2;
  CHECK_BAD(t, g2z_trainer_step_batch(trainer, x, none, &report), "target=-2 at position 3");
}

/* The logits after the last of n tokens, without a cache. */
static void inuse_last_logits(g2z_test *t, g2z_trainer *trainer, const int32_t *ids, int n,
                              float *out) {
  const size_t V = (size_t)trainer->plan->model.vocab;
  float *all = (float *)test_memory(t, (size_t)n * V * sizeof *all);
  CHECK_OK(t, g2z_model_logits(&trainer->model, ids, 1, n, all));
  memcpy(out, all + (size_t)(n - 1) * V, V * sizeof *out);
}

typedef struct inuse_heard {
  int count, last[3], stop_after;
} inuse_heard;
static int inuse_hear(void *user, int sequence, int32_t token) {
  inuse_heard *heard = (inuse_heard *)user;
  heard->count++;
  heard->last[sequence] = token;
  return heard->count == heard->stop_after;
}

/* The cache changes no token, and on a CPU no bit of the logits: greedy and sampled, alone and in a
 * batch, with prompts of different lengths. */
static void test_model_generates(g2z_test *t) {
  enum { CONTEXT = 64, MOST = 60, V = 61 };
  static const size_t begins[] = {1, 9, 30};
  g2z_train_config config = test_config_of(2, 2, 32, CONTEXT, V);
  int32_t x[2 * CONTEXT], y[2 * CONTEXT], plain[3][MOST], cached[3][MOST];
  config.optimizer.lr = 3e-3f;
  config.optimizer.warmup = 0;
  test_tokens(x, 2 * CONTEXT, V, 5);
  test_tokens(y, 2 * CONTEXT, V, 6);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  test_steps(t, trainer, x, y, 20, NULL, NULL); /* logits far apart */
  g2z_model *model = inuse_of(t, trainer, G2Z_FP32);
  g2z_sampling sampling = g2z_sampling_default();
  for (int drawn = 0; drawn < 2; drawn++) {
    size_t lengths[3];
    sampling.temperature = (float)drawn;
    sampling.top_k = drawn ? 20 : 0;
    for (int i = 0; i < 3; i++) {
      memcpy(plain[i], x + 11 * i, sizeof plain[i]);
      memcpy(cached[i], x + 11 * i, sizeof cached[i]);
      lengths[i] = begins[i];
      sampling.seed = 7 + (uint64_t)i;
      /* A trainer's model has no cache: each token comes from the whole text before it. */
      CHECK_OK(t, g2z_model_generate(&trainer->model, 1, plain[i], MOST, &lengths[i], &sampling,
                                     NULL, NULL));
      lengths[i] = begins[i];
    }
    sampling.seed = 7;
    inuse_heard heard = {0, {0, 0, 0}, 0};
    CHECK_OK(t, g2z_model_generate(model, 3, cached[0], MOST, lengths, &sampling, inuse_hear,
                                   &heard));
    CHECK(t, memcmp(plain, cached, sizeof plain) == 0);
    CHECK(t, heard.count == 3 * MOST - 40 && heard.last[2] == plain[2][MOST - 1]);
    for (int i = 0; i < 3; i++) CHECK(t, lengths[i] == MOST);
    memcpy(cached[1], x + 11, sizeof cached[1]); /* alone, until a stop token */
    lengths[0] = begins[1];
    sampling.seed = 8;
    sampling.stop = plain[1][20];
    size_t end = begins[1];
    while (plain[1][end] != sampling.stop) end++;
    CHECK_OK(t, g2z_model_generate(model, 1, cached[1], MOST, lengths, &sampling, NULL, NULL));
    sampling.stop = -1;
    CHECK(t, lengths[0] == end + 1 && memcmp(plain[1], cached[1], (end + 1) * 4) == 0);
    heard.count = 0;
    heard.stop_after = 3;
    lengths[0] = begins[1];
    CHECK_OK(t, g2z_model_generate(model, 1, cached[1], MOST, lengths, &sampling, inuse_hear,
                                   &heard));
    CHECK(t, lengths[0] == begins[1] + 3);
  }
  /* The same logits as from the whole text, token by token. */
  float *whole = (float *)test_memory(t, MOST * V * sizeof(float)), one[V];
  CHECK_OK(t, g2z_model_logits(model, plain[0], 1, MOST, whole));
  for (int n = 1; n <= MOST; n += 13) {
    inuse_last_logits(t, trainer, plain[0], n, one);
    CHECK(t, memcmp(one, whole + (n - 1) * V, sizeof one) == 0);
  }
  /* Weights that fit fp16 but whose sums overflow: no token is drawn. */
  const g2z_plan *plan = trainer->plan;
  float large[CONTEXT * 32];
  for (int i = 0; i < CONTEXT * 32; i++) large[i] = 40000;
  for (int unit = plan->wpe; unit <= plan->wte; unit++)
    CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, plan->unit[unit].canonical, V * 32,
                                  large));
  model = inuse_of(t, trainer, G2Z_FP16);
  size_t length = 3;
  CHECK_STATUS(t, g2z_model_generate(model, 1, cached[0], MOST, &length, &sampling, NULL, NULL),
               G2Z_DIVERGED, &t->services, "does not fit dtype fp16; take dtype bf16 or fp32");
  CHECK(t, length == 3);
}

/* Past the context, generation continues from its last half. */
static void test_model_context(g2z_test *t) {
  enum { CONTEXT = 16, MOST = 50, V = 61 };
  g2z_train_config config = test_config_of(1, 2, 32, CONTEXT, V);
  int32_t ids[2][MOST], want[MOST];
  size_t lengths[2] = {3, 40};
  g2z_device *right; /* without the process's mutant */
  g2z_trainer *trainer = test_trainer_of(t, &config);
  g2z_model *model = inuse_of(t, trainer, G2Z_FP32);
  g2z_sampling sampling = g2z_sampling_default();
  test_tokens(ids[0], 2 * MOST, V, 5);
  CHECK_OK(t, g2z_model_generate(model, 2, ids[0], MOST, lengths, &sampling, NULL, NULL));
  CHECK(t, lengths[0] == MOST && lengths[1] == MOST);
  CHECK_OK(t, g2z_model_generate(model, 2, ids[0], MOST, lengths, &sampling, NULL, NULL));
  CHECK(t, lengths[0] == MOST && lengths[1] == MOST); /* nothing to add */
  /* By hand: the window in which the sequence drew each token, alone and next to a longer one. */
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, G2Z_FP32, G2Z_FP32, &right));
  memcpy(want, ids[0], 3 * sizeof *want);
  int kept = 3;
  float logits[V];
  for (int at = 3; at < MOST; at++, kept++) {
    if (kept > CONTEXT) kept = CONTEXT / 2 + 1;
    inuse_last_logits(t, trainer, want + at - kept, kept, logits);
    want[at] = test_draws(t, right, logits, V, &sampling, at - 3);
  }
  CHECK(t, memcmp(ids[0], want, sizeof want) == 0);
  lengths[0] = 3; /* a trainer's model, without a cache */
  memcpy(ids[1], want, 3 * sizeof *want);
  CHECK_OK(t, g2z_model_generate(&trainer->model, 1, ids[1], MOST, lengths, &sampling, NULL, NULL));
  CHECK(t, memcmp(ids[1], want, sizeof want) == 0);
  /* A prompt as long as the context is read completely. A longer one is cut. */
  for (int given = CONTEXT - 1; given <= CONTEXT + 1; given++) {
    g2z_sampling likeliest = sampling;
    likeliest.temperature = 0;
    size_t length = (size_t)given;
    kept = given > CONTEXT ? CONTEXT / 2 + 1 : given;
    memcpy(ids[0], want, sizeof want);
    CHECK_OK(t, g2z_model_generate(model, 1, ids[0], MOST, &length, &likeliest, NULL, NULL));
    inuse_last_logits(t, trainer, want + given - kept, kept, logits);
    CHECK(t, ids[0][given] == test_draws(t, right, logits, V, &likeliest, 0));
  }
  CHECK_BAD(t, g2z_model_generate(model, 65536, NULL, MOST, NULL, &sampling, NULL, NULL),
            "count=65536 must lie between 1 and 65535"); /* CUDA's limit for a grid */
  lengths[0] = 0;
  CHECK_BAD(t, g2z_model_generate(model, 1, ids[0], MOST, lengths, &sampling, NULL, NULL),
            "begin with the end-of-text token");
  sampling.top_p = 0;
  lengths[0] = 3;
  CHECK_BAD(t, g2z_model_generate(model, 1, ids[0], MOST, lengths, &sampling, NULL, NULL),
            "top_p=0");
  g2z_device_free(right);
}

/* Opens a model, scores and generates. */
static g2z_status inuse_life(g2z_test *t) {
  const int before = t->owned_count;
  g2z_model *model = NULL;
  int32_t ids[30] = {1}, y[20] = {0};
  size_t length = 1;
  double mean;
  g2z_sampling sampling = g2z_sampling_default();
  g2z_status status = inuse_open_on(t, G2Z_DEVICE_CPU, "golden/tiny", G2Z_FP16, &model);
  if (status == G2Z_OK) status = g2z_model_score(model, ids, y, 1, 20, NULL, &mean);
  if (status == G2Z_OK)
    status = g2z_model_generate(model, 1, ids, 20, &length, &sampling, NULL, NULL);
  test_end(t, before);
  return status;
}

static void test_model_no_memory(g2z_test *t) { CHECK_NO_MEMORY(t, 11, 100, inuse_life(t), 1); }

/* ----- on a GPU -------------------------------------------------------------- */

/* The next token's embedding and attention against the CPU's. One call has several head sizes, and
 * pasts of one token, of a few and of more than a block takes at a time. */
static void test_next_one(test_pair *p, int B, int T, int NH, int HS) {
  enum { V = 300 };
  const int C = NH * HS, spots[4] = {0, T / 2, T - 2, T - 1};
  const size_t width = (size_t)C, row = 3 * width;
  test_twin *tokens = test_twin_tokens(p, (size_t)B, V, 1);
  test_twin *positions = test_twin_new(p, TEST_I32, (size_t)B);
  for (int b = 0; b < B; b++) ((int32_t *)positions->cpu)[b] = spots[b % 4];
  test_twin_send(p, positions);
  test_twin *wte = test_twin_normal(p, TEST_ACT, V * width, 2, 1, 0);
  test_twin *wpe = test_twin_normal(p, TEST_ACT, (size_t)T * width, 3, 1, 0);
  test_twin *past = test_twin_normal(p, TEST_ACT, (size_t)B * (size_t)T * row, 4, 1, 0);
  test_twin *rows = test_twin_normal(p, TEST_ACT, (size_t)B * row, 5, 1, 0);
  test_twin *out = test_twin_new(p, TEST_ACT, (size_t)B * width);
  const int32_t *at = (const int32_t *)positions->gpu;
  TEST_RUN(p->t, p->cpu, embed_next, .out = out->cpu, .tokens = (const int32_t *)tokens->cpu,
           .positions = (const int32_t *)positions->cpu, .wte = wte->cpu, .wpe = wpe->cpu, .B = B,
           .C = C);
  TEST_RUN(p->t, p->gpu, embed_next, .out = out->gpu, .tokens = (const int32_t *)tokens->gpu,
           .positions = at, .wte = wte->gpu, .wpe = wpe->gpu, .B = B, .C = C);
  test_twin_compare(p, out, "embed_next", 0, 0); /* one sum, rounded once */
  TEST_RUN(p->t, p->cpu, attention_next, .out = out->cpu, .past = past->cpu, .rows = rows->cpu,
           .positions = (const int32_t *)positions->cpu, .B = B, .T = T, .C = C, .NH = NH);
  TEST_RUN(p->t, p->gpu, attention_next, .out = out->gpu, .past = past->gpu, .rows = rows->gpu,
           .positions = at, .B = B, .T = T, .C = C, .NH = NH);
  test_twin_compare(p, past, "attention_next's past", 0, 0);
  /* A mean of values of up to 4, whose weights inherit the errors of the scores' sums. */
  test_twin_compare(p, out, "attention_next", 1.01, 4 * (HS + 64) * 0x1p-23);
  test_pair_clear(p);
}

/* Both backends draw the same tokens and count them alike: greedily, from all, from the top_k, from
 * the top_p, and from both. The rows include equal logits and a NaN. The backends round weights and
 * their sums differently, so a draw between two ids may differ: in one row of 64 at most. */
static void test_draw_one(test_pair *p, int B, int V, const g2z_sampling *sampling) {
  const int T = 9;
  test_twin *tokens = test_twin_new(p, TEST_I32, (size_t)B);
  test_twin *drawn = test_twin_new(p, TEST_I32, (size_t)B);
  test_twin *positions = test_twin_new(p, TEST_I32, B);
  test_twin *logits = test_twin_normal(p, TEST_F32, (size_t)B * (size_t)V, 7, 3, 0);
  float *row = (float *)logits->cpu;
  for (int b = 0; b < B; b++, row += V) {
    ((int32_t *)drawn->cpu)[b] = 31 * b;
    ((int32_t *)positions->cpu)[b] = b % T;
    row[V / 2] = row[V - 1] = 9;
    row[V / 3] = NAN;
    for (int i = 0; i < V && b == B - 1; i++) row[i] = NAN; /* no valid token: -1 */
  }
  test_twin_send(p, drawn);
  test_twin_send(p, positions);
  test_twin_send(p, logits);
  TEST_RUN(p->t, p->cpu, draw, .tokens = (int32_t *)tokens->cpu, .drawn = (int32_t *)drawn->cpu,
           .positions = (int32_t *)positions->cpu, .logits = (const float *)logits->cpu,
           .sampling = sampling, .B = B, .V = V, .T = T);
  TEST_RUN(p->t, p->gpu, draw, .tokens = (int32_t *)tokens->gpu, .drawn = (int32_t *)drawn->gpu,
           .positions = (int32_t *)positions->gpu, .logits = (const float *)logits->gpu,
           .sampling = sampling, .B = B, .V = V, .T = T);
  test_twin_compare(p, tokens, "draw's tokens", 0, V);
  int32_t got[200];
  int apart = 0;
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, got, tokens->gpu, tokens->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (int b = 0; b < B; b++) apart += got[b] != ((const int32_t *)tokens->cpu)[b];
  CHECK(p->t, apart <= B / 64);
  test_twin_compare(p, drawn, "draw's indices", 0, 0);
  test_twin_compare(p, positions, "draw's positions", 0, 0);
  test_pair_clear(p);
}

static void test_cuda_draw(g2z_test *t) {
  static const g2z_sampling ways[] = {{0, 0, 1, 5}, {1, 0, 1, 5},      {0.7f, 20, 1, 5},
                                      {1, 0, 0.8f, 5}, {2, 100, 0.5f, 5}, {0.1f, 1, 0.1f, 5}};
  for (int types = 0, done = 0; types < TEST_TYPES && !done; types++) { /* logits are always fp32 */
    test_pair p;
    done = test_pair_open(&p, t, types);
    for (size_t i = 0; done && i < sizeof ways / sizeof *ways; i++) {
      test_draw_one(&p, 64, 50257, &ways[i]);
      test_draw_one(&p, 3, 257, &ways[i]);
      test_draw_one(&p, 200, 5, &ways[i]);
    }
    test_pair_close(&p);
  }
}

static void test_cuda_next(g2z_test *t) {
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      test_next_one(&p, 4, 2, 1, 8);
      test_next_one(&p, 4, 700, 3, 24);
      test_next_one(&p, 4, 65, 2, 40);
      test_next_one(&p, 4, 1024, 12, 64);
      test_next_one(&p, 4, 129, 2, 128);
      test_next_one(&p, 65536, 2, 1, 8); /* a grid's y has at most 65,535 blocks */
    }
    test_pair_close(&p);
  }
}

/* Scores in each type lie within golden_bounds of Hugging Face's; in fp32 a continued text equals
 * the CPU's. */
static void test_cuda_model(g2z_test *t) {
  enum { B = 3, T = 20, MOST = 20 };
  g2z_sampling sampling = g2z_sampling_default();
  g2z_model *model;
  size_t count, lengths[3];
  int32_t *x = test_golden_tokens(t, "x", &count), *y = test_golden_tokens(t, "y", &count);
  float *loss = test_golden(t, "loss", &count), losses[B * T];
  int32_t ids[2][3][MOST];
  double mean;
  sampling.temperature = 0;
  const int before = t->owned_count;
  for (size_t i = 0; i < sizeof golden_gpu / sizeof *golden_gpu; i++) {
    const golden_bounds *bounds = &golden_gpu[i];
    if (!test_wants(bounds->dtype)) continue;
    CHECK_OK(t, inuse_open_on(t, G2Z_DEVICE_CUDA, "golden/tiny", bounds->dtype, &model));
    if (!model) break;
    CHECK_OK(t, g2z_model_score(model, x, y, B, T, losses, &mean));
    CHECK_NEAR(t, mean, loss[0], bounds->loss);
    int32_t target = y[5];
    y[5] = -1;
    CHECK_OK(t, g2z_model_score(model, x, y, B, T, losses, &mean));
    CHECK(t, losses[5] == 0 && losses[4] > 0);
    y[5] = target;
    test_end(t, before);
  }
  for (int gpu = 0; gpu < 2; gpu++) {
    CHECK_OK(t, inuse_open_on(t, gpu ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU, "golden/tiny", G2Z_FP32,
                              &model));
    for (int i = 0; i < 3; i++) {
      lengths[i] = (size_t)(1 + 5 * i);
      memcpy(ids[gpu][i], x + i * T, sizeof ids[gpu][i]);
    }
    if (model)
      CHECK_OK(t, g2z_model_generate(model, 3, ids[gpu][0], MOST, lengths, &sampling, NULL, NULL));
  }
  CHECK(t, memcmp(ids[0], ids[1], sizeof ids[0]) == 0);
}

/* Scores, logits and generation over shapes. The vocabularies lie around multiples of 4 and of 128:
 * rows of logits then start at addresses of all alignments, and cuBLASLt chooses by them. */
static const struct inuse_shape {
  int vocab, heads, channels;
} inuse_shapes[] = {{256, 2, 32},   {257, 2, 32},   {4095, 2, 64},  {4096, 25, 200},
                    {4097, 2, 64},  {50257, 2, 32}, {50304, 2, 32}};
enum { SHAPES_CONTEXT = 96, SHAPES_MOST = 5 }; /* the most sequences at a time */

/* The length of the prompt of sequence i, of `count`. */
static size_t inuse_prompt(int count, int i) {
  static const size_t ends[SHAPES_MOST] = {SHAPES_CONTEXT, 1, SHAPES_CONTEXT - 1, 2, 48};
  return ends[(i + count) % SHAPES_MOST];
}

/* Each generated token has, in the CPU's logits after the same text, nearly the largest logit. */
static void inuse_generated(g2z_test *t, g2z_model *gpu, g2z_model *cpu, const int32_t *text,
                            const size_t *prompts, int count, double bound) {
  enum { ROOM = SHAPES_CONTEXT + 1 };
  const size_t V = (size_t)cpu->config.vocab;
  int32_t ids[SHAPES_MOST * ROOM];
  size_t lengths[SHAPES_MOST];
  g2z_sampling likeliest = g2z_sampling_default();
  likeliest.temperature = 0;
  for (int i = 0; i < count; i++) {
    memcpy(ids + i * ROOM, text + i * SHAPES_CONTEXT, SHAPES_CONTEXT * sizeof *ids);
    lengths[i] = prompts[i];
  }
  CHECK_OK(t, g2z_model_generate(gpu, count, ids, ROOM, lengths, &likeliest, NULL, NULL));
  float *logits = (float *)test_memory(t, SHAPES_CONTEXT * V * sizeof *logits);
  for (int i = 0; i < count; i++) {
    CHECK(t, lengths[i] == ROOM);
    CHECK_OK(t, g2z_model_logits(cpu, ids + i * ROOM, 1, SHAPES_CONTEXT, logits));
    for (size_t at = prompts[i]; at < lengths[i]; at++) {
      const float *row = logits + (at - 1) * V;
      float largest = row[0];
      for (size_t v = 1; v < V; v++) largest = row[v] > largest ? row[v] : largest;
      CHECK(t, row[ids[i * ROOM + (int)at]] >= largest - 2 * (float)bound);
    }
  }
}

/* One shape in one type, against fp32 on the CPU. Logits may differ by `bound`. */
static void inuse_shape_on(g2z_test *t, g2z_model *gpu, g2z_model *cpu, double bound) {
  enum { T = SHAPES_CONTEXT, B = SHAPES_MOST };
  const size_t V = (size_t)cpu->config.vocab;
  int32_t text[B * T], targets[B * T];
  float losses[2][B * T];
  double mean[2];
  test_tokens(text, B * T, (int)V, 11);
  test_tokens(targets, B * T, (int)V, 12);
  float *got = (float *)test_memory(t, B * T * V * sizeof *got);
  float *want = (float *)test_memory(t, B * T * V * sizeof *want);
  for (int count = 1; count <= B; count += 2)
    for (int length = T; length > 0; length = length == 1 ? 0 : length / 2 - length % 2) {
      CHECK_OK(t, g2z_model_logits(gpu, text, count, length, got));
      CHECK_OK(t, g2z_model_logits(cpu, text, count, length, want));
      for (size_t i = 0; i < (size_t)(count * length) * V; i++)
        CHECK_NEAR(t, got[i], want[i], bound);
      CHECK_OK(t, g2z_model_score(gpu, text, targets, count, length, losses[0], &mean[0]));
      CHECK_OK(t, g2z_model_score(cpu, text, targets, count, length, losses[1], &mean[1]));
      for (int i = 0; i < count * length; i++)
        CHECK_NEAR(t, losses[0][i], losses[1][i], 2 * bound);
    }
  for (int count = 1; count <= B; count++) {
    size_t prompts[B];
    for (int i = 0; i < count; i++) prompts[i] = inuse_prompt(count, i);
    inuse_generated(t, gpu, cpu, text, prompts, count, bound);
  }
  for (size_t prompt = 1; V == 4096 && prompt <= T; prompt++)
    inuse_generated(t, gpu, cpu, text, &prompt, 1, bound);
}

static void test_cuda_shapes(g2z_test *t) {
  for (size_t s = 0; s < sizeof inuse_shapes / sizeof *inuse_shapes; s++) {
    const struct inuse_shape *shape = &inuse_shapes[s];
    const int before = t->owned_count;
    const g2z_train_config config = test_config_of(1, shape->heads, shape->channels,
                                                   SHAPES_CONTEXT, shape->vocab);
    g2z_model *cpu = inuse_of(t, test_trainer_of(t, &config), G2Z_FP32), *gpu;
    for (size_t i = 0; i < sizeof golden_gpu / sizeof *golden_gpu; i++) {
      const g2z_dtype dtype = golden_gpu[i].dtype;
      const int inside = t->owned_count;
      if (!test_wants(dtype)) continue;
      REQUIRE_OK(t, inuse_open_on(t, G2Z_DEVICE_CUDA, test_path(t, "weights"), dtype, &gpu));
      inuse_shape_on(t, gpu, cpu, golden_gpu[i].logits);
      test_end(t, inside);
    }
    test_end(t, before);
  }
}
