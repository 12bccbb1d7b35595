/* Tests of the room "checkpoints": save, resume, reshape, damage and refusal. */

/* ----- checkpoints --------------------------------------------------------------------------- */

/* Bit by bit, as RFC 3720 defines it. */
static uint32_t test_crc_bits(const unsigned char *bytes, size_t count) {
  uint32_t sum = ~0u;
  for (size_t bit = 0; bit < 8 * count; bit++) {
    if (bit % 8 == 0) sum ^= bytes[bit / 8];
    sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78u : 0);
  }
  return ~sum;
}

static void test_crc32c(g2z_test *t) {
  unsigned char bytes[300];
  CHECK(t, g2z_crc32c(0, "123456789", 9) == 0xe3069283u);
  memset(bytes, 0, 32); /* RFC 3720, B.4 */
  CHECK(t, g2z_crc32c(0, bytes, 32) == 0x8a9136aau);
  memset(bytes, 0xff, 32);
  CHECK(t, g2z_crc32c(0, bytes, 32) == 0x62a8ab43u);
  uint32_t random = 7;
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)test_bpe_random(&random);
  for (size_t first = 0; first < 40; first++) /* whole, and in two parts */
    for (size_t end = first; end < sizeof bytes; end += 7) {
      size_t cut = first + (end - first) / 3;
      uint32_t whole = g2z_crc32c(0, bytes + first, end - first);
      uint32_t part = g2z_crc32c(0, bytes + first, cut - first);
      CHECK(t, g2z_crc32c(part, bytes + cut, end - cut) == whole);
      CHECK(t, test_crc_bits(bytes + first, end - first) == whole);
    }
}

/* Steps until `steps` are done; losses by step, from 1. */
static void test_saved_steps(g2z_test *t, g2z_trainer *trainer, int64_t steps, float *losses,
                             g2z_report *last) {
  g2z_report report;
  CHECK_OK(t, g2z_trainer_flush(trainer, &report));
  while (report.step < steps) {
    CHECK_OK(t, g2z_trainer_step(trainer, &report));
    if (report.step == 0) return; /* the step failed */
    losses[report.loss_step] = report.loss;
  }
  CHECK_OK(t, g2z_trainer_flush(trainer, &report));
  losses[report.loss_step] = report.loss;
  if (last) *last = report;
}

/* A program's own file in a checkpoint. user: a test that fills the disk, or NULL. */
static g2z_status test_saved_files(void *user, const char *directory) {
  static g2z_services services;
  g2z_test *t = (g2z_test *)user;
  char path[600];
  snprintf(path, sizeof path, "%.500s/own", directory);
  g2z_writer *writer;
  g2z_status status = g2z_writer_create(&services, path, &writer);
  if (status == G2Z_OK) status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return t ? g2z_fail(&t->services, G2Z_IO, "the disk is full") : status;
}

/* Replaces the first `from` in DIRECTORY/name by `to`, which has the same length. */
static void test_saved_replace(g2z_test *t, const char *directory, const char *name,
                               const char *from, const char *to) {
  const char *path = test_text("%s/%s", directory, name);
  size_t bytes;
  char *text = test_file(t, path, &bytes);
  void *at = memmem(text, bytes, from, strlen(from));
  CHECK(t, at != NULL && strlen(from) == strlen(to));
  if (at) memcpy(at, to, strlen(to));
  test_write_file(t, path, text, bytes);
}

static void test_checkpoint_resume(g2z_test *t) {
  enum { SAVE = 9, STEPS = 24 };
  for (int i = 0; i < 6; i++) {
    float losses[STEPS + 1] = {0}, resumed[STEPS + 1] = {0};
    g2z_train_config config = test_saved_config(t);
    g2z_trainer *trainer;
    g2z_report middle, last;
    memset(&middle, 0, sizeof middle);
    memset(&last, 0, sizeof last);
    config.dtype = i % 3 == 0 ? G2Z_FP32 : i % 3 == 1 ? G2Z_FP16 : G2Z_BF16;
    config.dropout = i < 3 ? 0.1f : 0;
    config.accum = 1 + i % 2;
    config.model.layers = 1 + i % 2;
    config.zero_stage = i % 4;
    config.bucket_mb = i < 4 ? 0.004 : 0;
    config.optimizer.kind = i % 2 ? G2Z_OPTIMIZER_MUON : G2Z_OPTIMIZER_ADAMW;
    config.optimizer.moments_bf16 = i == 2;
    config.optimizer.loss_scale = 16777216;  /* overflows, halves, */
    config.optimizer.loss_scale_window = 4;  /* and doubles until it overflows again */
    const char *at = test_at(t, "at%d", i), *end = test_at(t, "end%d", i);
    const char *again = test_at(t, "again%d", i);
    trainer = test_trainer_of(t, &config);
    test_saved_steps(t, trainer, SAVE, losses, &middle);
    CHECK_OK(t, g2z_trainer_save(trainer, at));
    test_saved_steps(t, trainer, STEPS, losses, &last);
    CHECK_OK(t, g2z_trainer_save(trainer, end));
    if (config.dtype == G2Z_FP16) {
      CHECK(t, middle.skipped_total > 0 && last.skipped_total > middle.skipped_total);
      CHECK(t, last.applied > middle.applied + 4);
    }
    config.seed = 1337;
    config.recompute = i % 2 ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE; /* not part of the state */
    trainer = test_trainer_of(t, &config);
    if (i % 2) { /* no trace of the old values or of the stop */
      g2z_status status = G2Z_OK;
      test_saved_steps(t, trainer, 2, resumed, NULL);
      g2z_trainer_request_stop(trainer);
      for (int n = 0; n < 4 && status == G2Z_OK; n++)
        status = g2z_trainer_step(trainer, &middle);
      CHECK_STATUS(t, status, G2Z_STOPPED, &t->services, "a stop was requested: step 4 was the");
    }
    CHECK_OK(t, g2z_trainer_load(trainer, at));
    test_saved_steps(t, trainer, STEPS, resumed, NULL);
    CHECK_OK(t, g2z_trainer_save(trainer, again));
    CHECK(t, losses[STEPS] > 0);
    CHECK(t, memcmp(losses + SAVE, resumed + SAVE, (STEPS - SAVE + 1) * sizeof(float)) == 0);
    test_sh(t, "diff -r %s %s", end, again);
  }
}

/* Another stage, bucket size, type or global batch loads the same state. A fixed loss scale is not
 * saved as a dynamic one, and good steps with it do not count. */
static void test_checkpoint_reshaped_with(g2z_test *t, g2z_optimizer kind) {
  static float was[3 * 20000], is[3 * 20000];
  float losses[32];
  g2z_train_config config = test_saved_config(t);
  const char *at = test_kept(t, test_at(t, "at%d", (int)kind));
  const int fixed = kind == G2Z_OPTIMIZER_ADAMW;
  g2z_trainer *trainer;
  g2z_report report;
  config.optimizer.kind = kind;
  config.bucket_mb = 0.003;
  config.dtype = G2Z_FP16;
  config.optimizer.loss_scale = fixed ? 64 : 4096;
  config.optimizer.loss_scale_dynamic = !fixed;
  config.optimizer.loss_scale_window = fixed ? 2 : 2000;
  config.batch = 3; /* 41 steps of 3 in an epoch of 125 */
  trainer = test_trainer_of(t, &config);
  test_saved_steps(t, trainer, 7, losses, NULL);
  size_t P = trainer->plan->parameters;
  CHECK(t, P <= 20000);
  if (P > 20000) P = 20000;
  for (int b = 0; b < 3; b++)
    CHECK_OK(t, g2z_trainer_read(trainer, (g2z_buffer)b, 0, P, was + (size_t)b * P));
  CHECK_OK(t, g2z_trainer_save(trainer, at));
  config.optimizer.loss_scale = 4096;
  config.optimizer.loss_scale_dynamic = 1;
  for (int i = 0; i < 5; i++) {
    static const struct { int batch, accum; int64_t step; } shapes[] = {
        {3, 1, 7}, {1, 1, 21}, {5, 1, 4}, {4, 2, 2}, {10, 2, 1}}; /* 21 sequences have been read */
    config.zero_stage = i % 4;
    config.strategy = i == 4 ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
    config.bucket_mb = 0.001 * (1 << i);
    config.dtype = i % 2 ? G2Z_FP32 : G2Z_FP16;
    config.batch = shapes[i].batch;
    config.accum = shapes[i].accum;
    trainer = test_trainer_of(t, &config);
    CHECK_OK(t, g2z_trainer_load(trainer, at));
    for (int b = 0; b < 3; b++)
      CHECK_OK(t, g2z_trainer_read(trainer, (g2z_buffer)b, 0, P, is + (size_t)b * P));
    CHECK(t, memcmp(was, is, 3 * P * sizeof(float)) == 0);
    g2z_loader_position position = trainer->loader->position;
    CHECK(t, position.epoch == 0 && position.step == shapes[i].step);
    for (int step = 0; step < 2; step++) CHECK_OK(t, g2z_trainer_step(trainer, &report));
    CHECK_OK(t, g2z_trainer_flush(trainer, &report));
    CHECK(t, report.step == 9 && report.applied == 9);
    CHECK(t, report.loss_scale == (i % 2 ? 1.0f : 4096.0f) && report.loss < losses[7] + 0.5f);
  }
}

static void test_checkpoint_reshaped(g2z_test *t) {
  test_checkpoint_reshaped_with(t, G2Z_OPTIMIZER_ADAMW);
  test_checkpoint_reshaped_with(t, G2Z_OPTIMIZER_MUON);
}

/* A trainer with this config resumes from the checkpoint at this step of its epoch; -1: it has no
 * data. */
static void test_saved_position(g2z_test *t, const g2z_train_config *config, const char *at,
                                int64_t step) {
  g2z_trainer *trainer = test_trainer_of(t, config);
  CHECK_OK(t, g2z_trainer_load(trainer, at));
  CHECK(t, step < 0 ? !trainer->loader : trainer->loader->position.step == step);
}

/* Other data restarts the epoch. The same data continues after the sequences that were read,
 * whatever its name, and also if the checkpoint does not identify its data. */
static void test_checkpoint_data(g2z_test *t) {
  const size_t ends[] = {0, 1024, 1024 + 2 * 2000}; /* the first token, the last */
  float losses[32];
  g2z_train_config config = test_saved_config(t);
  const char *at = test_at(t, "at");
  config.batch = 20;
  g2z_trainer *trainer = test_trainer_of(t, &config);
  test_saved_steps(t, trainer, 1, losses, NULL);
  CHECK_OK(t, g2z_trainer_save(trainer, at));
  config.train_glob = NULL; /* the caller supplies the data */
  test_saved_position(t, &config, at, -1);
  const char *shard = config.train_glob = test_kept(t, test_path(t, "other.bin"));
  test_run_shard(t, "other.bin", 1000);
  test_saved_position(t, &config, at, 0);
  for (int i = 0; i < 3; i++) {
    test_run_shard(t, "other.bin", 2001);
    if (i) test_files_poke(t, shard, ends[i], '7');
    test_saved_position(t, &config, at, i ? 0 : 1);
  }
  test_saved_replace(t, at, "trainer_state.json", "\"data\": ", "\"date\": ");
  test_saved_sign(t, at, "trainer_state.json");
  test_saved_position(t, &config, at, 1);
}

static void test_checkpoint_damage(g2z_test *t) {
  static const char *const names[] = {"trainer_state.json", "config.json", "model.safetensors",
                                      "optimizer.state", "CHECKSUMS"};
  float losses[16] = {0}, after[16] = {0};
  g2z_train_config config = test_config_of(1, 1, 8, 8, 61);
  g2z_trainer *trainer;
  test_batch b = test_some_batch();
  const char *at = test_kept(t, test_path(t, "at"));
  trainer = test_trainer_of(t, &config);
  test_steps(t, trainer, b.x, b.y, 3, losses, NULL);
  CHECK_OK(t, g2z_trainer_save(trainer, at));
  test_steps(t, trainer, b.x, b.y, 1, losses, NULL);
  int flips = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    size_t bytes;
    char path[700];
    snprintf(path, sizeof path, "%s/%s", at, names[i]);
    char *text = test_file(t, path, &bytes);
    for (size_t byte = 0; byte < bytes; byte += byte < 3000 ? 1 : 3, flips++) {
      char flipped = (char)(text[byte] ^ (1 << byte % 8));
      test_files_poke(t, path, byte, flipped);
      g2z_status status = g2z_trainer_load(trainer, at);
      FAIL_IF(t, status != G2Z_FORMAT || !strstr(t->services.error, at),
              "bit %d of byte %zu of %s: %s", (int)(byte % 8), byte, names[i], t->services.error);
      test_files_poke(t, path, byte, text[byte]);
    }
    for (size_t keep = 0; keep < bytes; keep += 1 + (bytes - keep) / 9) {
      CHECK(t, truncate(path, (off_t)keep) == 0);
      CHECK(t, g2z_trainer_load(trainer, at) == G2Z_FORMAT);
    }
    CHECK_FORMAT(t, g2z_trainer_load(trainer, at), names[i]);
    test_write_file(t, path, text, bytes);
    test_sh(t, "mv %s away", path);
    CHECK_FORMAT(t, g2z_trainer_load(trainer, at),
                 i ? "which belongs to it" : "no trainer_state.json");
    test_sh(t, "mv away %s", path);
  }
  CHECK(t, flips > 9000);
  test_steps(t, trainer, b.x, b.y, 2, losses, NULL);
  trainer = test_trainer_of(t, &config); /* the failures left no trace */
  CHECK_OK(t, g2z_trainer_load(trainer, at));
  test_steps(t, trainer, b.x, b.y, 1, after, NULL);
  test_steps(t, trainer, b.x, b.y, 2, after, NULL);
  CHECK(t, losses[0] > 0 && memcmp(losses, after, 2 * sizeof(float)) == 0);
}

static void test_checkpoint_refused(g2z_test *t) {
#define STATE "trainer_state.json"
#define OPTIMIZER "optimizer.state"
  /* `from` becomes `to` in a file, and the checksums in `sign` are updated. NULL: it loads. */
  static const struct { const char *name, *from, *to, *sign, *says; } changes[] = {
      {STATE, "\"version\": 4", "\"version\": 7", NULL, "has version=7 of the format"},
      {STATE, "\"format\": \"gpt2_zero checkpoint\",\n  \"version\": 4",
       "\"version\": 4,\n  \"format\": \"gpt2_zero checkpoint\"", STATE, NULL},
      {STATE, "\"normed\": ", "\"normed\":-", STATE, "it is damaged"},
      {STATE, "gpt2_zero ch", "gpt3_zero ch", NULL,
       "like the state of a checkpoint: it is damaged, or another kind of file; copy the "},
      {OPTIMIZER, "\260", "\250", OPTIMIZER, "does not hold 7680 elements per buffer: the "
       "file is from another checkpoint; copy all "},
      {STATE, "\"zero_stage\": 1", "\"zero_stage\": 9", STATE, "it is damaged"},
      {STATE, "\"dtype\": \"fp32", "\"dtype\": \"fp3x", STATE, "dtype cannot be \"fp3x\""}};
#undef OPTIMIZER
#undef STATE
  float losses[16];
  g2z_train_config config = test_saved_config(t);
  g2z_trainer *trainer;
  const char *at = test_kept(t, test_path(t, "at"));
  trainer = test_trainer_of(t, &config);
  test_saved_steps(t, trainer, 2, losses, NULL);
  CHECK_OK(t, g2z_trainer_save(trainer, at));
  CHECK_BAD(t, g2z_trainer_save(trainer, at), "at exists already: remove it");
  CHECK(t, test_files_count(t, "at") == 1);
  CHECK_IO(t, g2z_trainer_load(trainer, test_path(t, "none")), "cannot open the checkpoint");
  CHECK_FORMAT(t, g2z_trainer_load(trainer, t->directory),
               "no trainer_state.json, so it is no checkpoint: name a step-NNNNNN");
  CHECK_OK(t, g2z_trainer_save_weights(trainer, test_path(t, "weights")));
  CHECK_FORMAT(t, g2z_trainer_load(trainer, test_path(t, "weights")),
               "has weights but no trainer_state.json");
  CHECK(t, rename(at, test_path(t, "at.partial")) == 0);
  CHECK_FORMAT(t, g2z_trainer_load(trainer, test_path(t, "at.partial")),
               "was being written when the run ended");
  CHECK(t, rename(test_path(t, "at.partial"), at) == 0);
  /* The program's own files are written before the checkpoint gets its name; if one fails, it gets
   * none. */
  for (int fails = 1; fails >= 0; fails--) {
    g2z_status status = g2z_trainer_save_with(trainer, test_path(t, "with"), NULL,
                                              test_saved_files, fails ? t : NULL);
    CHECK_STATUS(t, status, fails ? G2Z_IO : G2Z_OK, &t->services, fails ? "full" : NULL);
    CHECK(t, test_there(t, "with") == !fails && test_there(t, "with.partial") == fails);
    CHECK(t, test_there(t, fails ? "with.partial/own" : "with/own"));
  }

  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    const char *name = changes[i].name, *sign = changes[i].sign;
    test_saved_replace(t, at, name, changes[i].from, changes[i].to);
    if (sign) test_saved_sign(t, at, sign);
    const g2z_status status = g2z_trainer_load(trainer, at);
    CHECK_STATUS(t, status, changes[i].says ? G2Z_FORMAT : G2Z_OK, &t->services, changes[i].says);
    test_saved_replace(t, at, name, changes[i].to, changes[i].from);
    if (sign) test_saved_sign(t, at, sign);
    CHECK_OK(t, g2z_trainer_load(trainer, at));
  }

  config.model.vocab = 300; /* a model of another shape */
  trainer = test_trainer_of(t, &config);
  CHECK_BAD(t, g2z_trainer_load(trainer, at), "vocab=257");
}

static void test_checkpoint_trouble(g2z_test *t) {
  float losses[16] = {0};
  g2z_train_config config = test_saved_config(t);
  const char *at = test_kept(t, test_path(t, "at"));
  g2z_trainer *trainer = test_trainer_of(t, &config);
  test_saved_steps(t, trainer, 2, losses, NULL);
  static const rlim_t limits[] = {100, 1000, 3000, 20000, 40000};
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) { /* fills the disk in each file */
    struct rlimit before = test_files_limit(limits[i]);
    g2z_status status = g2z_trainer_save(trainer, at);
    test_files_unlimit(&before);
    CHECK_IO(t, status, "raise the limit of file sizes");
    CHECK(t, test_files_count(t, "at") == 0);
  }
  uid_t self = geteuid();
  CHECK(t, chmod(t->directory, 0555) == 0);
  if (self != 0 || seteuid(65534) == 0) {
    CHECK_IO(t, g2z_trainer_save(trainer, at), "cannot create the directory");
    CHECK(t, seteuid(self) == 0);
  }
  CHECK(t, chmod(t->directory, 0700) == 0);
  CHECK_NO_MEMORY(t, 11, 1000, g2z_trainer_save(trainer, at), !test_files_count(t, "at"));
  CHECK_NO_MEMORY(t, 5, 1000, g2z_trainer_load(trainer, at), 1);
  /* A link in place of the next checkpoint points to this one. */
  CHECK(t, symlink("at", test_path(t, "next.partial")) == 0);
  CHECK_IO(t, g2z_trainer_save(trainer, test_path(t, "next")), "partial is a symbolic link");
  CHECK_OK(t, g2z_trainer_load(trainer, at));
  CHECK(t, unlink(test_path(t, "next.partial")) == 0);
  test_saved_steps(t, trainer, 4, losses, NULL);
  CHECK(t, losses[4] > 0 && losses[4] < losses[1] + 1);
  at = test_at(t, "slashes//"); /* as shell completion writes it */
  CHECK_OK(t, g2z_trainer_save(trainer, at));
  CHECK_OK(t, g2z_trainer_load(trainer, at));
  CHECK(t, test_files_count(t, "slashes") == 1 && test_files_count(t, "slashes/.partial") == 0);
}

static void test_checkpoint_locale(g2z_test *t) {
  char file[56];
  g2z_train_config config = test_saved_config(t), want = g2z_train_config_default(G2Z_DEVICE_CPU), is;
  const char *at = test_at(t, "at");
  /* glibc's format: a magic number, six offsets, and what localedef writes there for de_DE. */
  static const uint32_t words[14] = {0x20031114, 6, 32, 34, 36, 40, 44, 48, 0, 0, ',', '.', 0, 0};
  memcpy(file, words, sizeof file);
  memcpy(file + 32, ",\0.\0\3\3", 6);
  memcpy(file + 48, "UTF-8", 6);
  test_sh(t, "mkdir comma");
  test_write_file(t, test_path(t, "comma/LC_NUMERIC"), file, 54);
  setenv("LOCPATH", t->directory, 1);
  if (!setlocale(LC_NUMERIC, "comma")) SKIP(t, "only glibc reads such a locale");
  CHECK(t, strtod("1,5", NULL) == 1.5);
  is = g2z_train_config_default(G2Z_DEVICE_CPU);
  CHECK(t, is.optimizer.lr == want.optimizer.lr && is.optimizer.beta1 == want.optimizer.beta1);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  CHECK_OK(t, g2z_trainer_save(trainer, at));
  CHECK_OK(t, g2z_trainer_load(trainer, at));
  setlocale(LC_NUMERIC, "C");
  CHECK_OK(t, g2z_trainer_load(trainer, at));
  CHECK_HAS(t, test_read(t, "at/trainer_state.json"), "\"beta1\": 0.9,");
  unsetenv("LOCPATH");
}
