/* Tests of the room "shards and loader": token files, their order in an epoch, and the ranks that
 * read them. */

/* ----- shards and loader ------------------------------------------------- */

/* Tokens first, first + 1, ...: the first token of a sequence identifies it. If `masked`, only those
 * count for which mask_counts is true. */
static int mask_counts(int token) { return token % 7 % 3 != 1; }
static void test_mask_shard(g2z_test *t, const char *path, g2z_shard_format format, int first,
                            int count, int masked) {
  int32_t *ids = (int32_t *)test_memory(t, (size_t)count * sizeof *ids);
  for (int i = 0; i < count; i++)
    ids[i] = first + i + (masked && !mask_counts(first + i) ? G2Z_UNCOUNTED : 0);
  CHECK_OK(t, test_shard_write(t, path, format, 0, ids, count));
}

static g2z_loader_config test_loader_config(const char *glob, int batch, int seq) {
  const g2z_loader_config config = {glob, batch, seq, 1, 0, 1, 65536, G2Z_ORDER_SHUFFLED, 42};
  return config;
}

/* Makes a loader and frees it; `data` gets the hash that identifies its data, unless it is NULL. */
static g2z_status test_loader_try(g2z_test *t, const g2z_loader_config *config, uint64_t *data) {
  g2z_loader *loader;
  g2z_status status = g2z_loader_create(&t->services, config, &loader);
  CHECK(t, (loader != NULL) == (status == G2Z_OK));
  if (data) *data = loader ? loader->data : 0;
  g2z_loader_free(loader);
  return status;
}

/* The same for the data that a pattern names. */
static uint64_t test_loader_hash(g2z_test *t, const char *glob) {
  const g2z_loader_config config = test_loader_config(glob, 1, 8);
  uint64_t data;
  CHECK_OK(t, test_loader_try(t, &config, &data));
  return data;
}

static void test_end_loader(void *loader) { g2z_loader_free((g2z_loader *)loader); }

/* The test owns the loader. */
static g2z_loader *test_loader(g2z_test *t, const g2z_loader_config *config) {
  g2z_loader *loader;
  REQUIRE_OK(t, g2z_loader_create(&t->services, config, &loader));
  test_own(t, test_end_loader, loader);
  return loader;
}

/* One step: checks each row and stores its first token. */
static void test_loader_step(g2z_test *t, g2z_loader *loader, const g2z_loader_config *config,
                             int32_t *firsts) {
  const int32_t *x, *y;
  CHECK_OK(t, g2z_loader_next(loader, &x, &y));
  if (!x) return;
  for (int row = 0; row < config->batch * config->accum; row++) {
    int wrong = 0;
    for (int i = 0; i < config->seq; i++) wrong += x[i] != x[0] + i || y[i] != x[0] + i + 1;
    CHECK(t, wrong == 0);
    firsts[row] = x[0];
    x += config->seq;
    y += config->seq;
  }
}

static void test_shuffle(g2z_test *t) {
  static const int64_t larger[] = {1023, 1024, 1025, 4095, 4097, 65535, 65536, 65537};
  static char seen[70000];
  for (int i = 0; i < 308; i++) { /* a permutation */
    const int64_t n = i < 300 ? i + 1 : larger[i - 300];
    int64_t distinct = 0;
    memset(seen, 0, (size_t)n);
    for (int64_t p = 0; p < n; p++) {
      int64_t at = g2z__shuffle(3, i, n, p);
      if (at >= 0 && at < n && !seen[at]) distinct += seen[at] = 1;
    }
    CHECK(t, distinct == n);
  }
  int64_t same_epoch = 0, same_seed = 0, near = 0, still = 0;
  for (int64_t p = 0; p < 10000; p++) {
    int64_t at = g2z__shuffle(1, 0, 10000, p);
    same_epoch += at == g2z__shuffle(1, (int64_t)1 << 32, 10000, p); /* all 64 bits count */
    same_seed += at == g2z__shuffle(2, 0, 10000, p);
    still += at == p;
    if (p) near += llabs(at - g2z__shuffle(1, 0, 10000, p - 1)) == 1;
    CHECK(t, at == g2z__shuffle(1, 0, 10000, p));
  }
  /* A random permutation of 10000 positions has about one fixed point, and about two that follow
   * their neighbour: 15 are practically impossible. */
  CHECK(t, same_epoch < 15 && same_seed < 15 && still < 15 && near < 15);

  /* The first three of 5 are each of 60 triples equally often: chi-square with 59 degrees of
   * freedom stays below 114 with probability 0.99998. */
  int triples[125], epochs = 24000, distinct = 0;
  memset(triples, 0, sizeof triples);
  for (int epoch = 0; epoch < epochs; epoch++) {
    int code = 0;
    for (int64_t p = 0; p < 3; p++) code = code * 5 + (int)g2z__shuffle(9, epoch, 5, p);
    triples[code]++;
  }
  double chi = 0, expected = epochs / 60.0;
  for (int i = 0; i < 125; i++)
    if (triples[i]) {
      distinct++;
      chi += (triples[i] - expected) * (triples[i] - expected) / expected;
    }
  CHECK(t, distinct == 60);
  CHECK_NEAR(t, chi, 59, 55);

  int64_t huge = INT64_MAX, at = g2z__shuffle(5, 7, huge, 12345);
  CHECK(t, at >= 0 && at < huge && at != g2z__shuffle(5, 7, huge, 12346));
}

static void test_shard_writer(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_shard_writer *writer;
  int32_t ids[10000];
  uint16_t want[512 + 10000];
  memset(want, 0, sizeof want);
  for (int i = 0; i < 10000; i++) ids[i] = want[512 + i] = (uint16_t)(i * 7);
  int32_t header[3] = {20240520, 1, 10000};
  memcpy(want, header, sizeof header);
  for (int format = 0; format < 2; format++) {
    const char *path = test_path(t, "shard.bin");
    CHECK_OK(t, g2z_shard_writer_create(services, path, (g2z_shard_format)format, 0, &writer));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids, 0));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids, 1));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids + 1, 9999));
    int32_t wrong[3] = {1, 65536, -1}; /* refused as a whole: nothing is added */
    CHECK_BAD(t, g2z_shard_writer_append(writer, wrong, 2), "id 65536 does not fit");
    CHECK_BAD(t, g2z_shard_writer_append(writer, wrong + 2, 1), "id -1 does not fit");
    CHECK_OK(t, g2z_shard_writer_commit(writer));
    g2z_shard_writer_free(writer);
    CHECK(t, test_files_equal(t, path, format == G2Z_SHARD_RAW ? want + 512 : want,
                              format == G2Z_SHARD_RAW ? 20000 : 21024));
  }
  CHECK_OK(t, g2z_shard_writer_create(services, test_path(t, "b"), G2Z_SHARD_LLMC, 0, &writer));
  CHECK_OK(t, g2z_shard_writer_append(writer, ids, 100));
  g2z_shard_writer_free(writer);
  CHECK(t, test_files_count(t, "") == 1);
  CHECK_IO(t, g2z_shard_writer_create(services, test_path(t, "no/b"), G2Z_SHARD_RAW, 0, &writer),
           "No such file");
  CHECK(t, writer == NULL);
  g2z_shard_writer_free(NULL);
}

/* Steps begin..end - 1 on one of `world` ranks: order[] gets the first token of each row of each
 * step, of which all ranks together read `config.batch`. */
static void test_loader_rows(g2z_test *t, g2z_loader_config config, int world, int rank,
                             int64_t begin, int64_t end, int32_t *order) {
  const int all = config.batch;
  int32_t firsts[16];
  config.accum = world == 2 ? 2 : 1;
  config.batch = all / world / config.accum;
  config.world = world;
  config.rank = rank;
  g2z_loader *loader = test_loader(t, &config);
  const g2z_loader_position position = {0, begin};
  if (begin) CHECK_OK(t, g2z_loader_seek(loader, position));
  for (int64_t step = begin; step < end; step++) {
    CHECK(t, loader->position.epoch == step / loader->steps_per_epoch);
    CHECK(t, loader->position.step == step % loader->steps_per_epoch);
    test_loader_step(t, loader, &config, firsts);
    for (int row = 0; row < all / world; row++)
      order[step * all + row * world + rank] = firsts[row];
  }
}

enum { LOADER_T = 8, LOADER_G = 12, LOADER_N = 184, LOADER_STEPS = LOADER_N / LOADER_G };

/* In file order each token in `targets` comes once, whatever batch and world are. */
static void test_loader_file(g2z_test *t, const char *glob, const char *targets) {
  static const int lengths[] = {1, LOADER_T, 2000};
  static char seen[70000];
  for (int world = 1; world <= 4; world++)
    for (int batch = 1; batch < 1000; batch *= 6) {
      memset(seen, 0, sizeof seen);
      int wrong = 0, seq = lengths[(world + batch) % 3], last = 0;
      for (int rank = 0; rank < world; rank++) {
        g2z_loader_config config = test_loader_config(glob, batch, seq);
        config.world = world;
        config.rank = rank;
        config.order = G2Z_ORDER_FILE;
        g2z_loader *loader = test_loader(t, &config);
        for (int64_t step = 0; step < loader->steps_per_epoch; step++) {
          const int32_t *x, *y;
          REQUIRE_OK(t, g2z_loader_next(loader, &x, &y));
          for (int i = 0; i < batch * seq; i++) {
            wrong += y[i] < 0 ? x[i] != 0 : y[i] != x[i] + 1 || (world == 1 && y[i] <= last);
            if (y[i] >= 0) seen[last = y[i]]++;
          }
        }
      }
      CHECK(t, wrong == 0 && memcmp(seen, targets, sizeof seen) == 0);
    }
}

/* Any number of ranks reads the same steps; an epoch reads no sequence twice; no row crosses from
 * one shard to the next; the sequences left out come last in the order. */
static void test_loader_ranks(g2z_test *t) {
  static const int tokens[] = {400, 8, 9, 1003, 77}; /* 49 + 0 + 1 + 125 + 9 sequences */
  static int32_t order[2][2][LOADER_STEPS * LOADER_G]; /* [world above 1][epoch] */
  static char expected[70000], targets[70000], seen[70000];
  memset(expected, 0, sizeof expected);
  memset(targets, 0, sizeof targets);
  for (int s = 0, begin = 100; s < 5; s++) {
    test_mask_shard(t, test_at(t, "s%d.bin", s), s % 2 ? G2Z_SHARD_RAW : G2Z_SHARD_LLMC, begin,
                    tokens[s], 0);
    for (int i = 0; i + LOADER_T < tokens[s]; i += LOADER_T) expected[begin + i] = 1;
    memset(targets + begin + 1, 1, (size_t)tokens[s] - 1);
    begin += tokens[s] + 1000; /* crossing rows would show a jump */
  }
  const char *glob_text = test_at(t, "s?.bin");
  test_loader_file(t, glob_text, targets);
  g2z_loader_config config = test_loader_config(glob_text, LOADER_G, LOADER_T);
  const g2z_loader *loader = test_loader(t, &config);
  CHECK(t, loader->sequences == LOADER_N && loader->tokens == 1497);
  CHECK(t, loader->steps_per_epoch == LOADER_STEPS);
  for (int world = 1; world <= 4; world++) {
    for (int rank = 0; rank < world; rank++)
      test_loader_rows(t, config, world, rank, 0, 2 * LOADER_STEPS, order[world > 1][0]);
    CHECK(t, world == 1 || memcmp(order[1], order[0], sizeof order[0]) == 0);
  }
  for (int epoch = 0; epoch < 2; epoch++) {
    const int32_t *now = order[0][epoch];
    int falls = 0;
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < LOADER_STEPS * LOADER_G; i++) {
      CHECK(t, expected[now[i]] && !seen[now[i]]);
      seen[now[i]] = 1;
      falls += i > 0 && now[i] < now[i - 1];
    }
    CHECK(t, falls > LOADER_STEPS * LOADER_G / 4);
  }
  CHECK(t, memcmp(order[0][0], order[0][1], sizeof order[0][0]) != 0);
}

static void test_loader_seek(g2z_test *t) {
  enum { T = 4, B = 3, STEPS = 60 };
  const char *path = test_at(t, "data[1].bin"); /* a name, not a pattern */
  test_mask_shard(t, path, G2Z_SHARD_RAW, 1000, 4 * 100, 0);
  g2z_loader_config config = test_loader_config(path, B, T);
  g2z_loader *loader = test_loader(t, &config);
  g2z_loader_position at[STEPS];
  int32_t first[STEPS][B], again[B];
  CHECK(t, loader->sequences == 99 && loader->steps_per_epoch == 33);
  for (int i = 0; i < STEPS; i++) {
    at[i] = loader->position;
    test_loader_step(t, loader, &config, first[i]);
  }
  uint32_t random = 1;
  for (int turn = 0; turn < 300; turn++) {
    int from = (int)(test_bpe_random(&random) % STEPS), run = (int)(test_bpe_random(&random) % 5);
    CHECK_OK(t, g2z_loader_seek(loader, at[from]));
    for (int i = from; i < STEPS && i < from + run; i++) {
      test_loader_step(t, loader, &config, again);
      CHECK(t, memcmp(again, first[i], sizeof again) == 0);
    }
  }
  g2z_loader_position wrong = {0, 33}, negative = {-1, 0};
  CHECK_BAD(t, g2z_loader_seek(loader, wrong),
            "no step 33 of epoch 0 in this data, with 33 in an epoch");
  CHECK_BAD(t, g2z_loader_seek(loader, negative), "epoch -1");

  for (int i = 0; i < 50; i++) { /* freed in any state of the thread */
    CHECK_OK(t, g2z_loader_create(&t->services, &config, &loader));
    if (i % 2) test_loader_step(t, loader, &config, again);
    g2z_loader_free(loader);
  }
  g2z_loader_free(NULL);
}

/* ----- mixtures ---------------------------------------------------------- */

enum { MIX_T = 4, MIX_G = 12, MIX_STEPS = 834, MIX_SETS = 4 };

static void test_loader_mixture(g2z_test *t) {
  static const struct {
    const char *name;
    int first, tokens;
  } files[] = {{"web_0.bin", 10000, 401}, {"web_1.bin", 12000, 203}, {"code_0.bin", 20000, 45},
               {"none.bin", 30000, 90}, {"rare.bin", 40000, 9}};
  static const double shares[MIX_SETS] = {0.7, 0.299, 0, 0.001};
  static const int sequences[MIX_SETS] = {150, 11, 22, 2};
  static int32_t order[MIX_STEPS * MIX_G], again[MIX_STEPS * MIX_G], list[MIX_STEPS * MIX_G];
  char glob[2500], other[2500];
  const char *directory = t->directory;
  for (size_t i = 0; i < sizeof files / sizeof *files; i++)
    test_mask_shard(t, test_path(t, files[i].name), i % 2 ? G2Z_SHARD_RAW : G2Z_SHARD_LLMC,
                    files[i].first, files[i].tokens, 0);
  snprintf(glob, sizeof glob, "%s/web_*.bin:0.7\n%s/code_?.bin:.299\n%s/none.bin:0\n"
           "%s/rare.bin:1e-3", directory, directory, directory, directory);
  g2z_loader_config config = test_loader_config(glob, MIX_G, MIX_T);
  test_loader_rows(t, config, 1, 0, 0, MIX_STEPS, order);

  /* Any number of ranks, and a stop in the middle, also one after which the world is another. */
  for (int world = 1; world <= 4; world++)
    for (int stop = 0; stop < 2; stop++) {
      memcpy(again, order, sizeof order);
      memset(again + stop * 417 * MIX_G, 0, sizeof order - sizeof *order * stop * 417 * MIX_G);
      for (int rank = 0; rank < world; rank++)
        test_loader_rows(t, config, world, rank, stop * 417, MIX_STEPS, again);
      CHECK(t, memcmp(again, order, sizeof order) == 0);
    }

  /* Shares, also of every beginning; the loader counts the same. */
  int64_t counts[G2Z_SETS], got[MIX_SETS] = {0}, alternates = 0;
  g2z_loader *loader = test_loader(t, &config);
  CHECK(t, loader->mixed && loader->sets == MIX_SETS && loader->tokens == 748);
  for (int k = 0; k < MIX_SETS; k++) {
    CHECK(t, loader->set[k].sequences == sequences[k]);
    CHECK_NEAR(t, loader->set[k].share, shares[k], 1e-12);
  }
  for (int64_t step = 0; step < MIX_STEPS; step++) {
    g2z_loader_position position = {0, step};
    CHECK_OK(t, g2z_loader_seek(loader, position));
    g2z_loader_count(loader, counts);
    for (int k = 0; k < MIX_SETS; k++) {
      CHECK(t, counts[k] == got[k]);
      CHECK_NEAR(t, (double)got[k], shares[k] * (double)(step * MIX_G), 20);
    }
    for (int64_t i = step * MIX_G; i < (step + 1) * MIX_G; i++) got[order[i] / 10000 - 1]++;
  }
  for (int k = 0; k < MIX_SETS; k++)
    CHECK_NEAR(t, (double)got[k] / (MIX_STEPS * MIX_G), shares[k], 0.001);
  CHECK(t, got[2] == 0);
  /* Neighbours are not of one set in a fixed rhythm: of 10 positions, the set that comes 7 times
   * would otherwise repeat every tenth. */
  for (int64_t i = 10; i < MIX_STEPS * MIX_G; i++)
    alternates += order[i] / 10000 == order[i - 10] / 10000;
  CHECK_NEAR(t, (double)alternates / (MIX_STEPS * MIX_G), 0.7 * 0.7 + 0.3 * 0.3, 0.03);

  /* Without the permutation of blocks, a set is read in whole passes, each in another order. */
  for (int k = 0; k < MIX_SETS; k++) {
    int n = 0, repeated = 0;
    for (int64_t at = 0; at < MIX_STEPS * MIX_G / 128 * 128; at++)
      for (int64_t p = at / 128 * 128; p < at / 128 * 128 + 128; p++)
        if (p / 128 * 128 + g2z__shuffle(config.seed, p / 128, 128, p % 128) == at &&
            order[p] / 10000 == k + 1)
          list[n++] = order[p];
    for (int begin = 0; begin + sequences[k] <= n; begin += sequences[k]) {
      for (int i = 0; i < sequences[k]; i++)
        for (int j = 0; j < i; j++) CHECK(t, list[begin + i] != list[begin + j]);
      repeated += begin > 0 && memcmp(list + begin, list + begin - sequences[k],
                                      sizeof *list * (size_t)sequences[k]) == 0;
    }
    CHECK(t, k == 2 ? n == 0 : n > 2 * sequences[k]);
    CHECK(t, k == 3 || repeated == 0);
  }

  /* A position as large as they get. */
  g2z_loader_position far = {0, loader->steps_per_epoch - 2};
  int32_t firsts[MIX_G];
  int64_t sum = 0;
  CHECK_OK(t, g2z_loader_seek(loader, far));
  test_loader_step(t, loader, &config, firsts);
  g2z_loader_count(loader, counts);
  for (int k = 0; k < MIX_SETS; k++) {
    sum += counts[k];
    CHECK_NEAR(t, (double)counts[k] / (double)(far.step * MIX_G), shares[k], 1e-9);
  }
  CHECK(t, sum == (far.step + 1) * MIX_G);

  /* Weights are a part of the data; a file whose name ends like a weight is a file. */
  static const struct {
    const char *weight, *second;
    int mixed;
    int64_t tokens;
  } globs[] = {{"0.6", "code_0.bin:0.3", 1, 649},    {"0.7", "code_0.bin:0.3", 1, 649},
               {"0.70", "*ode_0.bin:.3", 1, 649},    {"0.7", "rare.bin:0.5:0.3", 1, 664},
               {NULL, "rare.bin:0.5", 0, 60}};
  uint64_t data[5] = {0};
  test_mask_shard(t, test_path(t, "rare.bin:0.5"), G2Z_SHARD_RAW, 50000, 60, 0);
  config.glob = other;
  for (int i = 0; i < 5; i++) {
    *other = 0;
    if (globs[i].weight)
      snprintf(other, sizeof other, "%s/web_*.bin:%s\n", directory, globs[i].weight);
    const size_t used = strlen(other);
    snprintf(other + used, sizeof other - used, "%s/%s", directory, globs[i].second);
    loader = test_loader(t, &config);
    CHECK(t, loader->mixed == globs[i].mixed && loader->tokens == globs[i].tokens);
    data[i] = loader->data;
  }
  CHECK(t, data[0] != data[1] && data[1] == data[2] && data[1] != data[3]);
}

/* The loader refuses this config and states why. */
#define LOADER_REFUSES(t, config, status, sentence) \
  CHECK_STATUS(t, test_loader_try(t, config, NULL), status, &(t)->services, sentence)

static void test_mixture_refused(g2z_test *t) {
  static const struct {
    const char *glob; /* in the test's directory */
    g2z_status status;
    const char *sentence;
  } cases[] = {
      {"a.bin:0.5\nb.bin", G2Z_BAD_ARGUMENT, "the set \"b.bin\" has no weight, but with 2 sets "
       "each needs one: type --train 'b.bin:0.5', and the same for the others; or put all files "},
      {"a.bin\nb.bin", G2Z_BAD_ARGUMENT, "the set \"a.bin\" has no weight"},
      {"a.bin:1\n", G2Z_BAD_ARGUMENT, "the set \"\" has no weight"},
      {"a.bin:0\nb.bin:0", G2Z_BAD_ARGUMENT, "the weights are all 0, so no set has data: type "
       "--train 'a.bin:1'"},
      {"a.bin:-1\nb.bin:1", G2Z_BAD_ARGUMENT, "the weight in \"a.bin:-1\" must be a number from 0 "
       "to 1e9: type --train 'a.bin:0.5'"},
      {"a.bin:1e10\nb.bin:1", G2Z_BAD_ARGUMENT, "must be a number from 0 to 1e9"},
      {"a.bin:0,5\nb.bin:1", G2Z_BAD_ARGUMENT, "the weight in \"a.bin:0,5\" must be a number"},
      {"a.bin:50%\nb.bin:1", G2Z_BAD_ARGUMENT, "the weight in \"a.bin:50%\" must be a number"},
      {"a.bin:1-2", G2Z_BAD_ARGUMENT, "the weight in \"a.bin:1-2\" must be a number"},
      {"a.bin:nan", G2Z_IO, "no file has the name or pattern \"a.bin:nan\""},
      {"a.bin:1\nc*.bin:1", G2Z_IO, "no file has the name or pattern \"c*.bin\""},
      {"a.bin:1\nb.bin:0.5", G2Z_BAD_ARGUMENT, "the set \"b.bin\" of weight 0.5 has no shard of 5 "
       "tokens, which one sequence needs: use more data, or lower seq"},
      {"a:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1\na:1",
       G2Z_BAD_ARGUMENT, "at most 16 sets of shards can be mixed"}};
  char before[1024];
  test_mask_shard(t, test_path(t, "a.bin"), G2Z_SHARD_RAW, 0, 100, 0);
  test_mask_shard(t, test_path(t, "b.bin"), G2Z_SHARD_RAW, 0, 4, 0);
  CHECK(t, getcwd(before, sizeof before) && chdir(t->directory) == 0);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const g2z_loader_config config = test_loader_config(cases[i].glob, 1, 4);
    LOADER_REFUSES(t, &config, cases[i].status, cases[i].sentence);
  }
  g2z_loader_config config = test_loader_config("a.bin:1\nb.bin:0", 1, 4);
  CHECK_OK(t, test_loader_try(t, &config, NULL)); /* its short set is never read */
  config.order = G2Z_ORDER_FILE;
  LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT, "only training shards can have one: type --val "
                     "'a.bin'");
  CHECK_BAD(t, g2z_shards_apart(&t->services, "b.bin:1\na.bin:1", "?.bin"), "b.bin is both a "
            "training and a validation shard: \"b.bin\" and \"?.bin\" match it");
  CHECK_BAD(t, g2z_shards_apart(&t->services, "c.bin:1\na.bin:1", "a*"), "\"a.bin\" and ");
  CHECK_OK(t, g2z_shards_apart(&t->services, "b.bin:0.5\nb.bin:1", "a.bin"));
  /* Files are told apart by what they are, not by words in their names. */
  test_mask_shard(t, "x_train_0.bin", G2Z_SHARD_RAW, 0, 100, 0);
  test_mask_shard(t, "x_val_0.bin", G2Z_SHARD_RAW, 0, 100, 0);
  CHECK_OK(t, g2z_shards_apart(&t->services, "a.bin:1\nx_*.bin:0.25", "b.bin"));
  CHECK(t, link("x_val_0.bin", "other.bin") == 0);
  CHECK_BAD(t, g2z_shards_apart(&t->services, "a.bin:1\nx_*.bin:0.25", "other.bin"), "x_val_0.bin "
            "is both a training and a validation shard: \"x_*.bin\" and \"other.bin\" match it");
  CHECK_OK(t, g2z_shards_apart(&t->services, "a.bin:1\nx_*.bin:0.25", "none*.bin"));
  CHECK_NO_MEMORY(t, 4, 30, g2z_shards_apart(&t->services, "a.bin:1\nb*.bin:1", "x*.bin"), 1);
  config.order = G2Z_ORDER_SHUFFLED;
  CHECK_NO_MEMORY(t, 6, 30, test_loader_try(t, &config, NULL), 1);
  CHECK(t, chdir(before) == 0);
}

static void test_loader_refused(g2z_test *t) {
  enum { MAGIC = 20240520, TEXT = 0x61616161 };
  static const struct {
    int32_t head[3]; /* zeros follow, or text after text */
    size_t bytes;
    g2z_status status;
    const char *sentence;
  } files[] = {
      {{0, 0, 0}, 0, G2Z_FORMAT, "shard.bin is empty"},
      {{TEXT, TEXT, TEXT}, 199, G2Z_FORMAT, "tokens: make shards of it with ./prep"},
      {{0, TEXT, TEXT}, 199, G2Z_FORMAT,
       "shard.bin has no shard header, and an odd number of bytes, 199: a token takes 2. It was "
       "cut or holds no tokens. Copy it again, or make shards with ./prepare_data --vocab FILE "},
      {{0, TEXT, TEXT}, 24, G2Z_BAD_ARGUMENT,
       "12 tokens in 1 shard hold 1 sequence of 8+1, but a step of batch 2 x accum 1 x "
       "world 1 needs 2, so at least 17 tokens in shards of at least 9: use more data"},
      {{MAGIC, 1, 88}, 1022, G2Z_FORMAT, "ends after 1022 of the header's 1024 bytes"},
      {{MAGIC, 1, 88}, 1024, G2Z_FORMAT, "promises 88 tokens in 1200 bytes but has 1024"},
      {{MAGIC, 1, 88}, 1198, G2Z_FORMAT, "unfinished or was cut"},
      {{MAGIC, 1, -1}, 1200, G2Z_FORMAT, "promises -1 tokens"},
      {{MAGIC, 1, INT32_MAX}, 1200, G2Z_FORMAT, "promises 2147483647 tokens in 4294968318 bytes"},
      {{MAGIC, 2, 88}, 1200, G2Z_UNSUPPORTED, "only version 1"}};
  const int32_t good[300] = {MAGIC, 1, 88};
  const char *path = test_at(t, "shard.bin");
  g2z_loader_config config = test_loader_config(path, 2, 8);
  LOADER_REFUSES(t, &config, G2Z_IO, "no file has the name or pattern");
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    char bytes[1200];
    memset(bytes, files[i].head[2] == TEXT ? 'a' : 0, sizeof bytes);
    memcpy(bytes, files[i].head, sizeof files[i].head);
    test_write_file(t, path, bytes, files[i].bytes);
    LOADER_REFUSES(t, &config, files[i].status, files[i].sentence);
  }
  test_write_file(t, path, good, sizeof good);
  CHECK_OK(t, test_loader_try(t, &config, NULL));
  for (int n = 1199; n >= 0; n--) { /* truncated anywhere */
    CHECK(t, truncate(path, n) == 0);
    CHECK(t, test_loader_try(t, &config, NULL) != G2Z_OK);
  }
  config.glob = t->directory;
  LOADER_REFUSES(t, &config, G2Z_IO, "is a directory, not a token shard");
  config.glob = test_text("%0300d.bin", 0); /* like a directory without permission */
  LOADER_REFUSES(t, &config, G2Z_IO, "0.bin: File name too long");
  config.glob = "/dev/null";
  LOADER_REFUSES(t, &config, G2Z_IO, "no regular file");
  for (int null = 0; null < 2; null++) {
    config.glob = null ? NULL : "";
    LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT, "no token shards were named");
  }
  test_write_file(t, path, good, sizeof good);
  config.glob = path;
  config.world = config.rank = 3;
  LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT, "rank=3 must lie between 0 and 2");
  config.rank = 0;
  config.batch = config.accum = config.world = config.seq = 1 << 20;
  LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT,
                     "needs 1152921504606846976, so at least 1208925819614629174706176 tok");
  config.batch = 0;
  LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT, "batch=0");
}

static void test_loader_damage(g2z_test *t) {
  enum { T = 8, B = 2 };
  g2z_services *services = &t->services;
  const int32_t *x = NULL, *y = NULL;
  const char *path = test_at(t, "shard.bin");
  test_mask_shard(t, path, G2Z_SHARD_LLMC, 0, 1000, 0);
  g2z_loader_config config = test_loader_config(path, B, T);
  g2z_loader_position start = {0, 30}, behind = {0, 10};
  int32_t firsts[B];
  config.order = G2Z_ORDER_FILE;
  config.vocab = 500; /* token 500 is at index 500: sequences 0..61 read tokens 0..496 */
  g2z_loader *loader = test_loader(t, &config);
  for (int step = 0; step < 31; step++) test_loader_step(t, loader, &config, firsts);
  for (int again = 0; again < 2; again++) {
    services->error[0] = 0;
    CHECK_FORMAT(t, g2z_loader_next(loader, &x, &y),
                 "token 500 at index 500 is outside the vocabulary of 500");
    CHECK(t, x == NULL && y == NULL);
  }
  CHECK_OK(t, g2z_loader_seek(loader, start));
  test_loader_step(t, loader, &config, firsts);
  CHECK(t, firsts[0] == 480);
  CHECK_FORMAT(t, g2z_loader_next(loader, &x, &y), "token 500");
  config.vocab = 1000; /* the largest token is 999 */
  loader = test_loader(t, &config);
  for (int step = 0; step < 62; step++) test_loader_step(t, loader, &config, firsts);

  /* Truncated during reading: an error with the next step that is read. */
  CHECK(t, truncate(path, 1024 + 2 * 300) == 0);
  CHECK_OK(t, g2z_loader_seek(loader, behind));
  g2z_status status = G2Z_OK;
  int steps = 0;
  for (; status == G2Z_OK && steps < 100; steps++) status = g2z_loader_next(loader, &x, &y);
  CHECK(t, steps == 1);
  CHECK_STATUS(t, status, G2Z_FORMAT, services, "shard.bin promises 1000 tokens in 3024 bytes but "
               "has 1624 bytes: it is unfinished or was cut");
}

/* More shards than descriptors that stay open, under a tight limit of descriptors. */
static void test_loader_many_shards(g2z_test *t) {
  enum { T = 4, B = 5, SHARDS = 300 };
  static char seen[SHARDS * 100];
  struct rlimit before, now;
  const int32_t *x, *y;
  g2z_status status = G2Z_OK;
  for (int s = 0; s < SHARDS; s++)
    test_mask_shard(t, test_at(t, "s%03d", s), G2Z_SHARD_RAW, s * 100, 2 * T + 1, 0);
  const char *pattern = test_at(t, "s*");
  getrlimit(RLIMIT_NOFILE, &before);
  now = before;
  now.rlim_cur = 160;
  setrlimit(RLIMIT_NOFILE, &now);
  g2z_loader_config config = test_loader_config(pattern, B, T);
  memset(seen, 0, sizeof seen);
  g2z_loader *loader = test_loader(t, &config);
  for (int step = 0; step < 2 * SHARDS / B; step++) {
    int32_t firsts[B];
    test_loader_step(t, loader, &config, firsts);
    for (int row = 0; row < B; row++) {
      CHECK(t, firsts[row] % 100 % T == 0 && !seen[firsts[row]]);
      seen[firsts[row]] = 1;
    }
  }
  /* A shard that is another file when it is opened again. */
  test_write_file(t, test_path(t, "s000"), pattern, 40);
  test_write_file(t, test_path(t, "s128"), pattern, 40);
  for (int step = 0; status == G2Z_OK && step < 2 * SHARDS / B; step++)
    status = g2z_loader_next(loader, &x, &y);
  CHECK_FORMAT(t, status, "had 18 bytes when the run began and has 40");
  setrlimit(RLIMIT_NOFILE, &before);
}

/* Shards that are replaced during a run, by others of the same size: one that stays open, or the
 * first of more than stay open. A shard that is only touched or copied anew is the same. */
static void test_loader_replaced(g2z_test *t) {
  enum { T = 8, SHARDS = 130, TOKENS = 401 };
  static const struct { int shards; const char *change, *says; } cases[] = {
      {1, "cat other.bin > s000.bin", "s000.mask is the mask of another shard"},
      {1, "cat middle.bin > s000.bin", "s000.bin or its mask was replaced during the run"},
      {1, "cat bits.mask > s000.mask", "s000.bin or its mask was replaced during the run"},
      {1, "touch s000.bin s000.mask", NULL},
      {1, "mv other.bin s000.bin", NULL}, /* the open file is still the old one */
      {SHARDS, "mv other.bin s000.bin", "s000.mask is the mask of another shard"},
      {SHARDS, "mv other.bin s000.bin; mv other.mask s000.mask", "s000.bin or its mask was replaced"},
      {SHARDS, "mv bits.mask s000.mask", "s000.bin or its mask was replaced"},
      {SHARDS, "cp s000.bin n; mv n s000.bin; touch -d 2001-01-01 s000.mask", NULL}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int32_t *x, *y;
    g2z_status status = G2Z_OK;
    test_sh(t, "rm -f *.bin *.mask");
    for (int s = 0; s < cases[i].shards; s++)
      test_mask_shard(t, test_at(t, "s%03d.bin", s), G2Z_SHARD_LLMC, s * 100, TOKENS, 1);
    test_mask_shard(t, test_at(t, "other.bin"), G2Z_SHARD_LLMC, 7, TOKENS, 1);
    test_sh(t, "cp s000.mask bits.mask");
    test_files_poke(t, test_path(t, "bits.mask"), 24 + 25, 0xff);
    test_sh(t, "cp s000.bin middle.bin"); /* with the same ends, so that its mask fits */
    for (size_t at = 300; at < 500; at++) test_files_poke(t, test_path(t, "middle.bin"), 1024 + at, 0);
    g2z_loader_config config = test_loader_config(test_at(t, "s*.bin"), 1, T);
    config.order = G2Z_ORDER_FILE;
    g2z_loader *loader = test_loader(t, &config);
    usleep(20000); /* a file system may count time in steps of 10 ms */
    test_sh(t, "%s", cases[i].change);
    for (int64_t k = 0; k < 2 * loader->steps_per_epoch && status == G2Z_OK; k++)
      status = g2z_loader_next(loader, &x, &y);
    if (cases[i].says) CHECK_FORMAT(t, status, cases[i].says);
    else CHECK_OK(t, status);
    test_end(t, 0);
  }
}

static void test_loader_no_memory(g2z_test *t) {
  const int32_t ids[2] = {1, 2 + G2Z_UNCOUNTED};
  const char *path = test_at(t, "a.bin");
  CHECK_NO_MEMORY(t, 3, 20, test_shard_write(t, path, G2Z_SHARD_RAW, 0, ids, 2), 1);
  CHECK(t, test_files_count(t, "") == 2); /* with its mask */
  g2z_shard_writer *writer; /* the mask begins in a call that fails at first */
  CHECK_UNTIL_OK(t, 1, g2z_shard_writer_create(&t->services, path, G2Z_SHARD_RAW, 0, &writer));
  CHECK_OK(t, g2z_shard_writer_append(writer, ids, 1));
  CHECK_UNTIL_OK(t, 1, g2z_shard_writer_append(writer, ids, 2));
  CHECK_OK(t, g2z_shard_writer_commit(writer));
  g2z_shard_writer_free(writer);
  CHECK(t, test_files_equal(t, path, "\1\0\1\0\2\0", 6));
  test_mask_shard(t, path, G2Z_SHARD_LLMC, 0, 100, 0);
  test_mask_shard(t, test_path(t, "b.bin"), G2Z_SHARD_RAW, 500, 100, 0);
  g2z_loader_config config = test_loader_config(test_at(t, "*.bin"), 2, 8);
  CHECK_NO_MEMORY(t, 5, 30, test_loader_try(t, &config, NULL), 1);
}

/* The hash that identifies the data: lengths, ends, and samples of the middle. */
static void test_loader_data(g2z_test *t) {
  uint64_t data[4];
  for (int i = 0; i < 4; i++) { /* equal, equal, a zeroed middle, another last token */
    const char *raw = test_path(t, "1.bin");
    test_mask_shard(t, test_path(t, "0.bin"), G2Z_SHARD_LLMC, 0, 1000, 0);
    test_mask_shard(t, raw, G2Z_SHARD_RAW, 5000, 55000, 0);
    for (size_t at = 40000; i == 2 && at < 44000; at++) test_files_poke(t, raw, at, 0);
    if (i == 3) test_files_poke(t, raw, 2 * 55000 - 1, 0);
    data[i] = test_loader_hash(t, test_at(t, "*.bin"));
  }
  CHECK(t, data[1] == data[0] && data[2] != data[0] && data[3] != data[0] && data[3] != data[2]);
}

/* ----- masks ------------------------------------------------------------- */

/* A mask, byte by byte. A shard without masked tokens has no mask file and removes an old one. */
static void test_mask_writer(g2z_test *t) {
  unsigned char want[24 + 3] = {'m', 'a', 's', 'k', 1, 0, 0, 0, 20};
  int32_t ids[20], wrong[2] = {1, 65536 + G2Z_UNCOUNTED};
  g2z_shard_writer *writer;
  uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a of the count and of both ends' 256 bytes */
  unsigned char hashed[8 + 512] = {20};
  for (int i = 0; i < 20; i++) {
    ids[i] = 300 + i + (i == 9 || i == 17 ? G2Z_UNCOUNTED : 0);
    for (int end = 0; end < 2; end++) {
      hashed[8 + 256 * end + 2 * i] = (unsigned char)(300 + i);
      hashed[8 + 256 * end + 2 * i + 1] = 1;
    }
  }
  for (size_t i = 0; i < sizeof hashed; i++) hash = (hash ^ hashed[i]) * 0x100000001b3u;
  memcpy(want + 16, &hash, sizeof hash);
  want[24] = 0xff;
  want[25] = 0xfd;
  want[26] = 0x0d;
  for (int format = 0; format < 2; format++) {
    const char *path = test_path(t, "a.bin"), *mask = test_path(t, "a.mask");
    CHECK_OK(t, g2z_shard_writer_create(&t->services, path, (g2z_shard_format)format, 0, &writer));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids, 3));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids + 3, 17));
    CHECK_BAD(t, g2z_shard_writer_append(writer, wrong, 2), "does not fit into a shard");
    CHECK_OK(t, g2z_shard_writer_finish(writer, 1));
    CHECK(t, test_files_count(t, "a.mask.partial") == 1 && test_files_count(t, "a.mask") == 1);
    CHECK_OK(t, g2z_shard_writer_commit(writer));
    g2z_shard_writer_free(writer);
    CHECK(t, test_files_equal(t, mask, want, sizeof want));
    test_mask_shard(t, path, (g2z_shard_format)format, 300, 20, 0);
    CHECK(t, access(mask, F_OK) != 0 && test_files_count(t, "") == 1);
  }
  const char *path = test_path(t, "a.bin");
  CHECK_OK(t, g2z_shard_writer_create(&t->services, path, G2Z_SHARD_RAW, 0, &writer));
  CHECK_OK(t, g2z_shard_writer_append(writer, ids, 20));
  g2z_shard_writer_free(writer);
  CHECK(t, test_files_count(t, "") == 1); /* without a commit there is no mask */
  CHECK(t, mkdir(test_path(t, "a.mask"), 0700) == 0);
  CHECK_OK(t, g2z_shard_writer_create(&t->services, path, G2Z_SHARD_RAW, 0, &writer));
  CHECK_IO(t, g2z_shard_writer_commit(writer), "remove the mask of an earlier shard");
  g2z_shard_writer_free(writer);
}

/* Two epochs on one of `world` ranks: each target is the next token or -1. Returns the count of
 * -1. */
static int test_mask_epochs(g2z_test *t, const char *glob, int seq, int world, int rank,
                            g2z_order order) {
  g2z_loader_config config = test_loader_config(glob, 2, seq);
  const int before = t->owned_count;
  int left_out = 0, wrong = 0;
  config.accum = 2;
  config.world = world;
  config.rank = rank;
  config.order = order;
  g2z_loader *loader = test_loader(t, &config);
  for (int64_t step = 0; step < 2 * loader->steps_per_epoch; step++) {
    const int32_t *x, *y;
    CHECK_OK(t, g2z_loader_next(loader, &x, &y));
    for (int i = 0; x && i < 4 * seq; i++) {
      if (order == G2Z_ORDER_FILE && x[i] == 0 && y[i] == -1) continue; /* padding */
      int next = x[i] + 1, counts = next / 1000 == 2 || mask_counts(next);
      wrong += y[i] != (counts ? next : -1) || x[i] != x[i / seq * seq] + i % seq;
      left_out += y[i] == -1;
    }
  }
  CHECK(t, wrong == 0);
  test_end(t, before); /* all loaders together would have too many open files */
  return left_out;
}

/* Each target of each rank, in both orders, is -1 if its bit is 0: shards of both formats, of sizes
 * around whole bytes, with and without a mask. */
static void test_loader_masks(g2z_test *t) {
  static const int tokens[] = {400, 300, 200, 77, 121};
  for (int s = 0; s < 5; s++)
    test_mask_shard(t, test_at(t, s == 3 ? "s%d" : "s%d.bin", s),
                    s % 2 ? G2Z_SHARD_RAW : G2Z_SHARD_LLMC, 1000 * s, tokens[s], s != 2);
  CHECK(t, test_files_count(t, "") == 9 && access(test_path(t, "s2.mask"), F_OK) != 0);
  const char *glob = test_at(t, "s*[3n]");
  for (int order = G2Z_ORDER_FILE; order <= G2Z_ORDER_SHUFFLED; order++)
    for (int seq = 7; seq < 18; seq++) {
      int all[2] = {0, 0};
      for (int world = 1; world <= 3; world += 2)
        for (int rank = 0; rank < world; rank++)
          all[world > 1] += test_mask_epochs(t, glob, seq, world, rank, (g2z_order)order);
      CHECK(t, all[0] > 2 * 1098 / 6 && all[1] > 2 * 1098 / 6);
    }
}

static void test_masks_refused(g2z_test *t) {
  static const struct {
    const char *of;          /* the shard whose mask becomes a.mask */
    int at, byte, more;      /* a byte changed in it; bytes appended */
    g2z_status status;
    const char *sentence;
  } cases[] = {
      {"a", 0, 0, 0, G2Z_FORMAT, "the name of the mask of "},
      {"a", 4, 2, 0, G2Z_UNSUPPORTED, "a.mask is version 2 of masks, but only version 1"},
      {"a", 8, 99, 0, G2Z_FORMAT, "a.mask is the mask of another shard (99 tokens, hash "},
      {"a", 23, 0x77, 0, G2Z_FORMAT, "a.mask is the mask of another shard (100 tokens, hash 77"},
      {"b", 26, 0, 0, G2Z_FORMAT, "a.mask is the mask of another shard (100 tokens, hash "},
      {"c", 26, 0, 0, G2Z_FORMAT, "a.mask has 36 bytes, but the mask of the 100 tokens of "},
      {"a", 26, 0, 1, G2Z_FORMAT, "a.bin has 37: it was cut or belongs to another shard"}};
  const char *path = test_at(t, "a.bin"), *mask = test_at(t, "a.mask"), *kept = test_at(t, "kept");
  g2z_loader_config config = test_loader_config(path, 2, 8);
  uint64_t data[3];
  test_mask_shard(t, path, G2Z_SHARD_LLMC, 0, 100, 1);
  test_mask_shard(t, test_path(t, "b.bin"), G2Z_SHARD_LLMC, 500, 100, 1);
  test_mask_shard(t, test_path(t, "c.bin"), G2Z_SHARD_LLMC, 0, 90, 1);
  data[0] = test_loader_hash(t, path);
  CHECK(t, rename(mask, kept) == 0);
  data[1] = test_loader_hash(t, path);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_sh(t, "cp %s a.mask", *cases[i].of == 'a' ? "kept" : test_text("%s.mask", cases[i].of));
    test_files_poke(t, mask, (size_t)cases[i].at, cases[i].byte);
    if (cases[i].more) test_files_poke(t, mask, 37, 0);
    LOADER_REFUSES(t, &config, cases[i].status, cases[i].sentence);
  }
  test_sh(t, "cp kept a.mask");
  test_files_poke(t, mask, 30, 0x55);
  data[2] = test_loader_hash(t, path);
  CHECK(t, data[0] != data[1] && data[1] != data[2] && data[0] != data[2]); /* the mask counts */
  for (int n = 36; n >= 0; n--) { /* truncated anywhere */
    CHECK(t, truncate(mask, n) == 0);
    LOADER_REFUSES(t, &config, G2Z_FORMAT, n > 3 ? "37: it was cut" : "but is not a mask");
  }
  CHECK(t, unlink(mask) == 0 && mkdir(mask, 0700) == 0);
  LOADER_REFUSES(t, &config, G2Z_IO, "cannot read the mask");
  config.glob = kept;
  LOADER_REFUSES(t, &config, G2Z_UNSUPPORTED, "is the mask of a token shard, not a token");
  /* No target counts: the first token is not a target, and training uses 16 of the other 19. */
  int32_t ids[20];
  for (int i = 0; i < 20; i++) ids[i] = i + (i == 0 || i > 16 ? 0 : G2Z_UNCOUNTED);
  config.glob = test_at(t, "none.bin");
  test_shard(t, "none.bin", G2Z_SHARD_RAW, ids, 20);
  LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT, "none.bin: no token counts");
  config.order = G2Z_ORDER_FILE;
  CHECK_OK(t, test_loader_try(t, &config, NULL));
  test_shard(t, "none.bin", G2Z_SHARD_RAW, ids, 17);
  LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT, "none.bin: no token counts");
  config.glob = test_at(t, "one.bin");
  test_shard(t, "one.bin", G2Z_SHARD_RAW, ids, 1);
  LOADER_REFUSES(t, &config, G2Z_BAD_ARGUMENT, "one.bin: no shard has two tokens");
}

static void test_masks_damage(g2z_test *t) {
  enum { T = 8, SHARDS = 130 };
  const int32_t *x, *y;
  g2z_status status = G2Z_OK;
  g2z_loader_position start = {0, 0};
  test_mask_shard(t, test_path(t, "a.bin"), G2Z_SHARD_RAW, 0, 1000, 1);
  g2z_loader_config config = test_loader_config(test_path(t, "a.bin"), 2, T);
  config.order = G2Z_ORDER_FILE;
  g2z_loader *loader = test_loader(t, &config);
  CHECK(t, truncate(test_path(t, "a.mask"), 24 + 50) == 0); /* bits of 400 tokens */
  int steps = 0;
  for (; status == G2Z_OK && steps < 100; steps++) status = g2z_loader_next(loader, &x, &y);
  CHECK_FORMAT(t, status, "a.mask has 74 bytes, but the mask of the 1000 tokens of ");
  CHECK(t, steps < 400 / (2 * T)); /* those that were read before */
  for (int s = 0; s < SHARDS; s++)
    test_mask_shard(t, test_at(t, "s%03d.bin", s), G2Z_SHARD_RAW, s * 100, 2 * T + 1, 1);
  config.glob = test_at(t, "s*.bin");
  loader = test_loader(t, &config);
  for (int step = 0; step < SHARDS; step++) CHECK_OK(t, g2z_loader_next(loader, &x, &y));
  CHECK(t, unlink(test_path(t, "s000.mask")) == 0);
  CHECK_OK(t, g2z_loader_seek(loader, start));
  status = G2Z_OK;
  for (int step = 0; status == G2Z_OK && step < 2 * SHARDS; step++)
    status = g2z_loader_next(loader, &x, &y);
  CHECK_FORMAT(t, status, "s000.bin was added or removed during the run");
}

/* ----- prompts and completions ------------------------------------------- */

/* A stream of byte-level tokens; prompt tokens carry G2Z_UNCOUNTED. */
typedef struct test_pairs {
  int32_t ids[6000];
  size_t count;
} test_pairs;
static void test_pairs_add(test_pairs *p, const char *text, int32_t flag) {
  p->count += test_prepare_ids(text, p->ids + p->count);
  for (size_t i = p->count - strlen(text); i < p->count; i++) p->ids[i] += flag;
}

/* Documents of random lengths, some without a prompt or completion: as JSON lines and as tokens. */
static void test_pairs_make(g2z_test *t, const char *path, int documents, const char *first,
                            const char *last, test_pairs *p) {
  uint32_t random = 5;
  FILE *file = fopen(path, "w");
  CHECK(t, file != NULL);
  for (int i = 0; file && i < documents; i++) {
    char text[2][32];
    for (int part = 0; part < 2; part++) {
      int length = (int)(test_bpe_random(&random) % 25);
      for (int k = 0; k < length; k++) text[part][k] = (char)('a' + test_bpe_random(&random) % 26);
      text[part][length] = 0;
    }
    int order = i % 2; /* of the fields in a line */
    fprintf(file, "{\"%s\": \"%s\", \"c\": null, \"%s\": \"%s\"}\n", order ? "b" : "a", text[order],
            order ? "a" : "b", text[!order]);
    test_pairs_add(p, first, 0);
    test_pairs_add(p, text[0], G2Z_UNCOUNTED);
    test_pairs_add(p, text[1], 0);
    test_pairs_add(p, last, 0);
  }
  if (file) fclose(file);
}

/* A loader of shards of `each` tokens returns the stream, on any rank, in any order. */
static void test_pairs_read(g2z_test *t, const char *glob, const test_pairs *p, size_t each,
                            int seq, int world, int rank) {
  g2z_loader_config config = test_loader_config(glob, 2, seq);
  size_t per_shard = (each - 1) / (size_t)seq, wrong = 0, left_out = 0;
  config.world = world;
  config.rank = rank;
  g2z_loader *loader = test_loader(t, &config);
  CHECK(t, loader->tokens == (int64_t)p->count && loader->steps_per_epoch > 2);
  for (int64_t step = 0; step < loader->steps_per_epoch; step++) {
    const int32_t *x, *y;
    REQUIRE_OK(t, g2z_loader_next(loader, &x, &y));
    for (int row = 0; row < 2; row++) {
      size_t index = (size_t)g2z__shuffle(42, 0, loader->sequences, step * loader->global +
                                                                   row * world + rank);
      const int32_t *from = p->ids + index / per_shard * each + index % per_shard * (size_t)seq;
      for (int i = 0; i < seq; i++) {
        int32_t next = from[i + 1];
        wrong += x[row * seq + i] != (from[i] & ~G2Z_UNCOUNTED) ||
                 y[row * seq + i] != (next & G2Z_UNCOUNTED ? -1 : next);
        left_out += y[row * seq + i] == -1;
      }
    }
  }
  CHECK(t, wrong == 0 && left_out > 10);
}

/* From JSON lines to targets: prompts, completions and <|endoftext|> have the right bits, also if a
 * shard ends inside a document. */
static void test_prepare_masks(g2z_test *t) {
  static const test_prepare_case bad[] = {
      {"", "--out $D --field a, $D/d.jsonl", 1, "--field a,: give one field name, or two"},
      {"", "--out $D --field ,b $D/d.jsonl", 1, "--field ,b: "},
      {"", "--out $D --field a,b,c $D/d.jsonl", 1, "--field a,b,c: "},
      {"", "--out $D --field a,z $D/d.jsonl", 1, "d.jsonl, line 1: no text in a field \"z\"; "},
      {"", "--out $D --field z,b $D/d.jsonl", 1, "d.jsonl, line 1: no text in a field \"z\""},
      {"", "--out $D --field a,c $D/d.jsonl", 1, "d.jsonl, line 1, column "},
      {"", "--encode --field a,b < $D/one.jsonl", 0, "=64 65 66\n"}};
  static test_pairs first, last;
  int all[2] = {0, 0};
  test_pairs_make(t, test_path(t, "d.jsonl"), 150, "#", "", &first);
  test_pairs_make(t, test_path(t, "d.jsonl"), 150, "", "#", &last);
  test_write_file(t, test_path(t, "one.jsonl"), "{\"b\":\"bc\",\"a\":\"a\"}", 18);
  for (size_t i = 0; i < first.count; i++) all[!(first.ids[i] & G2Z_UNCOUNTED)]++;
  PREPARES(t, "", "--threads 3 --field a,b --val-fraction 0 --shard-tokens 501 --out 1 d.jsonl");
  CHECK_HAS(t, test_prepare_said, test_text("150 documents, %zu tokens, %d of them targets, ",
                                            first.count, all[1]));
  PREPARES(t, "", "--format raw --field a,b --val-fraction 0 --out $D/2 $D/d.jsonl");
  for (int world = 1; world <= 3; world++)
    for (int rank = 0; rank < world; rank++) {
      test_pairs_read(t, test_at(t, "1/d_train_*.bin"), &first, 501, 20, world, rank);
      test_pairs_read(t, test_at(t, "2/train.bin"), &last, last.count, 13, world, rank);
    }
  CHECK(t, test_files_count(t, "1/d_train_") == 2 * ((int)first.count / 501 + 1));
  PREPARES(t, "", "--field a,b --out $D/2 $D/d.jsonl");
  CHECK(t, test_there(t, "2/d_train_000000.mask") && test_there(t, "2/d_val_000000.mask"));
  PREPARES(t, "", "--field b --out $D/2 --overwrite $D/d.jsonl"); /* all count */
  CHECK(t, !test_there(t, "2/d_train_000000.mask") && !test_there(t, "2/d_val_000000.mask"));
  test_prepare_cases(t, bad, sizeof bad / sizeof *bad);
}
