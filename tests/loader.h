/* Tests of the room "shards and loader": token files, their order in an epoch, and who reads
 * what. */

/* ----- shards and loader ------------------------------------------------- */

/* A shard whose token i is first + i: a sequence is known by its first token. */
static void test_loader_shard(g2z_test *t, const char *path, g2z_shard_format format, int first,
                              int count) {
  g2z_shard_writer *writer = NULL;
  CHECK_OK(t, g2z_shard_writer_create(&t->services, path, format, &writer));
  if (!writer) return;
  for (int i = 0; i < count; i++) {
    int32_t id = first + i;
    CHECK_OK(t, g2z_shard_writer_append(writer, &id, 1));
  }
  CHECK_OK(t, g2z_shard_writer_commit(writer));
  g2z_shard_writer_free(writer);
}

static g2z_loader_config test_loader_config(const char *glob, int batch, int seq) {
  g2z_loader_config config;
  memset(&config, 0, sizeof config);
  config.glob = glob;
  config.batch = batch;
  config.seq = seq;
  config.accum = 1;
  config.world = 1;
  config.vocab = 65536;
  config.order = G2Z_ORDER_SHUFFLED;
  config.seed = 42;
  return config;
}

/* One step: the first token of each row, after the row itself was found sound. */
static void test_loader_step(g2z_test *t, g2z_loader *loader, const g2z_loader_config *config,
                             int32_t *firsts) {
  const int32_t *x, *y;
  CHECK_OK(t, g2z_loader_next(loader, &x, &y));
  if (!x) return;
  for (int row = 0; row < config->batch * config->accum; row++) {
    int wrong = 0;
    for (int i = 0; i < config->seq; i++) {
      int32_t first = x[row * config->seq];
      wrong += x[row * config->seq + i] != first + i || y[row * config->seq + i] != first + i + 1;
    }
    CHECK(t, wrong == 0);
    firsts[row] = x[row * config->seq];
  }
}

static void test_shuffle(g2z_test *t) {
  char *seen = (char *)malloc(70000);
  int64_t sizes[330];
  int count = 0;
  for (int i = 1; i <= 300; i++) sizes[count++] = i;
  static const int64_t larger[] = {1023, 1024, 1025, 4095, 4097, 65535, 65536, 65537};
  for (int i = 0; i < 8; i++) sizes[count++] = larger[i];
  for (int i = 0; i < count; i++) { /* a permutation */
    const int64_t n = sizes[i];
    memset(seen, 0, (size_t)n);
    int64_t distinct = 0;
    for (int64_t p = 0; p < n; p++) {
      int64_t at = g2z_shuffle(3, i, n, p);
      if (at >= 0 && at < n && !seen[at]) distinct++, seen[at] = 1;
    }
    CHECK(t, distinct == n);
  }
  free(seen);
  int64_t same_epoch = 0, same_seed = 0, near = 0, still = 0;
  for (int64_t p = 0; p < 10000; p++) {
    int64_t at = g2z_shuffle(1, 0, 10000, p);
    same_epoch += at == g2z_shuffle(1, (int64_t)1 << 32, 10000, p); /* the high word counts */
    same_seed += at == g2z_shuffle(2, 0, 10000, p);
    still += at == p;
    if (p) near += llabs(at - g2z_shuffle(1, 0, 10000, p - 1)) == 1;
    CHECK(t, at == g2z_shuffle(1, 0, 10000, p));
  }
  /* Of a random permutation about one position of 10000 is a fixed point, and about two follow
   * their neighbour: 15 are out of the question. */
  CHECK(t, same_epoch < 15 && same_seed < 15 && still < 15 && near < 15);

  /* The first three of 5 are each of 60 triples equally often: chi-square with 59 degrees of
   * freedom stays below 114 with a probability of 0.99998. */
  int triples[125], epochs = 24000, distinct = 0;
  memset(triples, 0, sizeof triples);
  for (int epoch = 0; epoch < epochs; epoch++) {
    int code = 0;
    for (int64_t p = 0; p < 3; p++) code = code * 5 + (int)g2z_shuffle(9, epoch, 5, p);
    triples[code]++;
  }
  double chi = 0, expected = epochs / 60.0;
  for (int i = 0; i < 125; i++)
    if (triples[i]) distinct++, chi += (triples[i] - expected) * (triples[i] - expected) / expected;
  CHECK(t, distinct == 60);
  CHECK_NEAR(t, chi, 59, 55);

  int64_t huge = INT64_MAX, at = g2z_shuffle(5, 7, huge, 12345);
  CHECK(t, at >= 0 && at < huge && at != g2z_shuffle(5, 7, huge, 12346));
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
    CHECK_OK(t, g2z_shard_writer_create(services, path, (g2z_shard_format)format, &writer));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids, 0));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids, 1));
    CHECK_OK(t, g2z_shard_writer_append(writer, ids + 1, 9999));
    int32_t wrong[3] = {1, 65536, -1}; /* refused as a whole: nothing is appended */
    CHECK_STATUS(t, g2z_shard_writer_append(writer, wrong, 2), G2Z_BAD_ARGUMENT, services,
                 "id 65536 does not fit");
    CHECK_STATUS(t, g2z_shard_writer_append(writer, wrong + 2, 1), G2Z_BAD_ARGUMENT, services,
                 "id -1 does not fit");
    CHECK_OK(t, g2z_shard_writer_commit(writer));
    g2z_shard_writer_free(writer);
    CHECK(t, test_files_equal(t, path, format == G2Z_SHARD_RAW ? want + 512 : want,
                              format == G2Z_SHARD_RAW ? 20000 : 21024));
  }
  CHECK_OK(t, g2z_shard_writer_create(services, test_path(t, "b"), G2Z_SHARD_LLMC, &writer));
  CHECK_OK(t, g2z_shard_writer_append(writer, ids, 100));
  g2z_shard_writer_free(writer);
  CHECK(t, test_files_count(t, "") == 1);
  CHECK_STATUS(t, g2z_shard_writer_create(services, test_path(t, "no/b"), G2Z_SHARD_RAW, &writer),
               G2Z_IO, services, "No such file");
  CHECK(t, writer == NULL);
  g2z_shard_writer_free(NULL);
}

/* Any number of ranks reads the same steps; an epoch reads no sequence twice; no row crosses from
 * one shard to the next; what is left out is the end of the order. */
static void test_loader_ranks(g2z_test *t) {
  enum { T = 8, G = 12, SHARDS = 5 };
  static const int tokens[SHARDS] = {400, 8, 9, 1003, 77}; /* 49 + 0 + 1 + 125 + 9 sequences */
  int begin[SHARDS + 1] = {100, 0, 0, 0, 0, 0};
  char expected[70000], glob_text[512];
  int N = 0;
  memset(expected, 0, sizeof expected);
  for (int s = 0; s < SHARDS; s++) {
    char name[32];
    snprintf(name, sizeof name, "s%d.bin", s);
    test_loader_shard(t, test_path(t, name), s % 2 ? G2Z_SHARD_RAW : G2Z_SHARD_LLMC, begin[s],
                      tokens[s]);
    for (int i = 0; (i + 1) * T < tokens[s]; i++, N++) expected[begin[s] + i * T] = 1;
    begin[s + 1] = begin[s] + tokens[s] + 1000; /* a crossing would be seen as a jump */
  }
  snprintf(glob_text, sizeof glob_text, "%s", test_path(t, "s?.bin"));
  const int steps = 184 / G;
  CHECK(t, N == 184);
  static int32_t order[2][2][2][184 / G * G]; /* [world 1 or other][file, shuffled][epoch] */
  for (int world = 1; world <= 4; world++)
    for (int shuffled = 0; shuffled < 2; shuffled++)
      for (int rank = 0; rank < world; rank++) {
        g2z_loader_config config = test_loader_config(glob_text, G / world, T);
        if (world == 2) config.batch = 3, config.accum = 2;
        config.world = world;
        config.rank = rank;
        config.order = shuffled ? G2Z_ORDER_SHUFFLED : G2Z_ORDER_FILE;
        g2z_loader *loader;
        CHECK_OK(t, g2z_loader_create(&t->services, &config, &loader));
        if (!loader) return;
        CHECK(t, loader->sequences == N && loader->tokens == 1497);
        CHECK(t, loader->steps_per_epoch == steps);
        for (int step = 0; step < 2 * steps; step++) {
          g2z_loader_position at = loader->position;
          CHECK(t, at.epoch == step / steps && at.step == step % steps);
          int32_t firsts[G];
          test_loader_step(t, loader, &config, firsts);
          for (int row = 0; row < G / world; row++)
            order[world > 1][shuffled][step / steps][step % steps * G + row * world + rank] =
                firsts[row];
        }
        g2z_loader_free(loader);
        if (world > 1 && rank == world - 1)
          CHECK(t, memcmp(order[1][shuffled], order[0][shuffled], sizeof order[0][0]) == 0);
      }
  for (int shuffled = 0; shuffled < 2; shuffled++)
    for (int epoch = 0; epoch < 2; epoch++) {
      const int32_t *now = order[0][shuffled][epoch];
      char seen[70000];
      int falls = 0;
      memset(seen, 0, sizeof seen);
      for (int i = 0; i < steps * G; i++) {
        CHECK(t, expected[now[i]] && !seen[now[i]]);
        seen[now[i]] = 1;
        falls += i > 0 && now[i] < now[i - 1];
      }
      CHECK(t, shuffled ? falls > steps * G / 4 : falls == 0);
    }
  CHECK(t, memcmp(order[0][0][0], order[0][0][1], sizeof order[0][0][0]) == 0);
  CHECK(t, memcmp(order[0][1][0], order[0][1][1], sizeof order[0][0][0]) != 0);
}

/* After a seek, in any state of the prefetch, the loader goes on as the unbroken run did. */
static void test_loader_seek(g2z_test *t) {
  enum { T = 4, B = 3, STEPS = 60 };
  char path[512];
  snprintf(path, sizeof path, "%s", test_path(t, "data[1].bin")); /* a name, not a pattern */
  test_loader_shard(t, path, G2Z_SHARD_RAW, 1000, 4 * 100);
  g2z_loader_config config = test_loader_config(path, B, T);
  g2z_loader *loader;
  g2z_loader_position at[STEPS];
  int32_t first[STEPS][B], again[B];
  CHECK_OK(t, g2z_loader_create(&t->services, &config, &loader));
  if (!loader) return;
  const int64_t steps = loader->steps_per_epoch;
  CHECK(t, loader->sequences == 99 && steps == 33);
  for (int i = 0; i < STEPS; i++) {
    at[i] = loader->position;
    test_loader_step(t, loader, &config, first[i]);
  }
  uint32_t random = 1;
  for (int turn = 0; turn < 300; turn++) {
    random = random * 1664525u + 1013904223u;
    int from = (int)(random >> 16) % STEPS, run = (int)(random >> 8) % 5;
    CHECK_OK(t, g2z_loader_seek(loader, at[from]));
    for (int i = from; i < STEPS && i < from + run; i++) {
      test_loader_step(t, loader, &config, again);
      CHECK(t, memcmp(again, first[i], sizeof again) == 0);
    }
  }
  g2z_loader_position wrong = {0, steps}, negative = {-1, 0};
  CHECK_STATUS(t, g2z_loader_seek(loader, wrong), G2Z_BAD_ARGUMENT, &t->services,
               "no step 33 of epoch 0 in this data, whose epochs have 33 steps");
  CHECK_STATUS(t, g2z_loader_seek(loader, negative), G2Z_BAD_ARGUMENT, &t->services, "epoch -1");
  g2z_loader_free(loader);

  /* A loader of its own, with pauses that change what the thread has ready. */
  CHECK_OK(t, g2z_loader_create(&t->services, &config, &loader));
  for (int i = 0; loader && i < STEPS; i++) {
    struct timespec pause = {0, i % 7 == 0 ? 2000000 : 0};
    nanosleep(&pause, NULL);
    test_loader_step(t, loader, &config, again);
    CHECK(t, memcmp(again, first[i], sizeof again) == 0);
  }
  g2z_loader_free(loader);
  for (int i = 0; i < 50; i++) { /* freed while the thread is anywhere */
    CHECK_OK(t, g2z_loader_create(&t->services, &config, &loader));
    if (i % 2) test_loader_step(t, loader, &config, again);
    g2z_loader_free(loader);
  }
  g2z_loader_free(NULL);
}

static void test_loader_refused(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_loader *loader;
  const char *path = strdup(test_path(t, "shard.bin"));
  g2z_loader_config config = test_loader_config(path, 2, 8);
#define REFUSE(status, part) \
  CHECK_STATUS(t, g2z_loader_create(services, &config, &loader), status, services, part); \
  CHECK(t, loader == NULL)
#define REFUSE_FILE(bytes, count, status, part) \
  test_write_file(t, path, bytes, count);       \
  REFUSE(status, part)
  REFUSE(G2Z_IO, "no file is called or matches");
  REFUSE_FILE("", 0, G2Z_FORMAT, "shard.bin is empty");
  char text[200];
  memset(text, 'a', sizeof text);
  REFUSE_FILE(text, 199, G2Z_FORMAT, "holds text, not tokens: turn it into a shard");
  text[0] = 1;
  REFUSE_FILE(text, 199, G2Z_FORMAT, "an odd size of 199 bytes");
  REFUSE_FILE(text, 24, G2Z_BAD_ARGUMENT,
              "12 tokens in 1 shard hold 1 sequences of 8+1, but a step of batch 2 x accum 1 x "
              "world 1 needs 2, so at least 17 tokens in shards of at least 9: take more data");
  int32_t header[300] = {20240520, 1, 88};
  REFUSE_FILE(header, 1022, G2Z_FORMAT, "ends after 1022 of the header's 1024 bytes");
  REFUSE_FILE(header, 1024, G2Z_FORMAT, "promises 88 tokens in 1200 bytes but has 1024");
  REFUSE_FILE(header, 1198, G2Z_FORMAT, "unfinished or was cut");
  header[2] = -1;
  REFUSE_FILE(header, 1200, G2Z_FORMAT, "promises -1 tokens");
  header[2] = INT32_MAX;
  REFUSE_FILE(header, 1200, G2Z_FORMAT, "promises 2147483647 tokens in 4294968318 bytes");
  header[1] = 2;
  REFUSE_FILE(header, 1200, G2Z_UNSUPPORTED, "only version 1");
  header[1] = 1;
  header[2] = 88;
  test_write_file(t, path, header, 1200);
  for (int n = 1199; n >= 0; n--) { /* cut anywhere */
    CHECK(t, truncate(path, n) == 0);
    CHECK(t, g2z_loader_create(services, &config, &loader) != G2Z_OK && loader == NULL);
  }
  test_write_file(t, path, header, 1200);
  CHECK_OK(t, g2z_loader_create(services, &config, &loader));
  g2z_loader_free(loader);

  config.glob = t->directory;
  REFUSE(G2Z_IO, "is a directory, not a token shard");
  config.glob = "/dev/null";
  REFUSE(G2Z_IO, "no regular file");
  config.glob = "";
  REFUSE(G2Z_BAD_ARGUMENT, "no token shards were named");
  config.glob = NULL;
  REFUSE(G2Z_BAD_ARGUMENT, "no token shards were named");
  config.glob = path;
  config.world = 3;
  config.rank = 3;
  REFUSE(G2Z_BAD_ARGUMENT, "rank=3 must lie between 0 and 2");
  config.rank = 0;
  config.batch = config.accum = config.world = config.seq = 1 << 20;
  REFUSE(G2Z_BAD_ARGUMENT, "needs 1152921504606846976, so at least 1208925819614629174706176 tok");
  config.batch = 0;
  REFUSE(G2Z_BAD_ARGUMENT, "batch=0");
#undef REFUSE
#undef REFUSE_FILE
  free((void *)path);
}

/* A token beyond the vocabulary, and a shard that shrinks, are told by the step that needs them. */
static void test_loader_damage(g2z_test *t) {
  enum { T = 8, B = 2 };
  g2z_services *services = &t->services;
  const int32_t *x = NULL, *y = NULL;
  char path[512];
  snprintf(path, sizeof path, "%s", test_path(t, "shard.bin"));
  test_loader_shard(t, path, G2Z_SHARD_LLMC, 0, 1000);
  g2z_loader_config config = test_loader_config(path, B, T);
  g2z_loader *loader;
  int32_t firsts[B];
  config.order = G2Z_ORDER_FILE;
  config.vocab = 500; /* token 500 stands at index 500: sequences 0..61 read tokens 0..496 */
  CHECK_OK(t, g2z_loader_create(services, &config, &loader));
  if (!loader) return;
  for (int step = 0; step < 31; step++) test_loader_step(t, loader, &config, firsts);
  for (int again = 0; again < 3; again++) {
    services->error[0] = 0;
    CHECK_STATUS(t, g2z_loader_next(loader, &x, &y), G2Z_FORMAT, services,
                 "token 500 at index 500 is outside the vocabulary of 500");
    CHECK(t, x == NULL && y == NULL);
  }
  g2z_loader_position start = {0, 30};
  CHECK_OK(t, g2z_loader_seek(loader, start));
  test_loader_step(t, loader, &config, firsts);
  CHECK(t, firsts[0] == 480);
  CHECK_STATUS(t, g2z_loader_next(loader, &x, &y), G2Z_FORMAT, services, "token 500");
  g2z_loader_free(loader);
  config.vocab = 1000; /* the largest token is 999 */
  CHECK_OK(t, g2z_loader_create(services, &config, &loader));
  for (int step = 0; step < 62; step++) test_loader_step(t, loader, &config, firsts);

  /* Cut while it is read: what was read ahead still comes, then the sentence. */
  CHECK(t, truncate(path, 1024 + 2 * 300) == 0);
  g2z_loader_position behind = {0, 10};
  CHECK_OK(t, g2z_loader_seek(loader, behind));
  g2z_status status = G2Z_OK;
  int steps = 0;
  for (; status == G2Z_OK && steps < 100; steps++) status = g2z_loader_next(loader, &x, &y);
  CHECK(t, steps == 300 / (B * T) - 10 + 1);
  CHECK_STATUS(t, status, G2Z_FORMAT, services, "had 1000 tokens when the run began and now ends");
  g2z_loader_free(loader);
}

/* More shards than descriptors are kept open, under a tight limit of descriptors. */
static void test_loader_many_shards(g2z_test *t) {
  enum { T = 4, B = 5, SHARDS = 300 };
  char pattern[512], name[32];
  struct rlimit before, now;
  for (int s = 0; s < SHARDS; s++) {
    uint16_t tokens[2 * T + 1];
    for (int i = 0; i < 2 * T + 1; i++) tokens[i] = (uint16_t)(s * 100 + i);
    snprintf(name, sizeof name, "s%03d", s);
    test_write_file(t, test_path(t, name), tokens, sizeof tokens);
  }
  snprintf(pattern, sizeof pattern, "%s", test_path(t, "s*"));
  getrlimit(RLIMIT_NOFILE, &before);
  now = before;
  now.rlim_cur = 160;
  setrlimit(RLIMIT_NOFILE, &now);
  g2z_loader_config config = test_loader_config(pattern, B, T);
  g2z_loader *loader;
  CHECK_OK(t, g2z_loader_create(&t->services, &config, &loader));
  char *seen = (char *)calloc(1, SHARDS * 100);
  for (int step = 0; loader && step < 2 * SHARDS / B; step++) {
    int32_t firsts[B];
    test_loader_step(t, loader, &config, firsts);
    for (int row = 0; row < B; row++) {
      CHECK(t, firsts[row] % 100 % T == 0 && !seen[firsts[row]]);
      seen[firsts[row]] = 1;
    }
  }
  free(seen);
  /* A shard that is opened again and is another file by now. */
  const int32_t *x, *y;
  g2z_status status = G2Z_OK;
  test_write_file(t, test_path(t, "s000"), pattern, 40);
  test_write_file(t, test_path(t, "s128"), pattern, 40);
  for (int step = 0; loader && status == G2Z_OK && step < 2 * SHARDS / B; step++)
    status = g2z_loader_next(loader, &x, &y);
  CHECK_STATUS(t, status, G2Z_FORMAT, &t->services, "had 18 bytes when the run began and has 40");
  g2z_loader_free(loader);
  setrlimit(RLIMIT_NOFILE, &before);
}

static void test_loader_no_memory(g2z_test *t) {
  test_loader_shard(t, test_path(t, "a.bin"), G2Z_SHARD_LLMC, 0, 100);
  test_loader_shard(t, test_path(t, "b.bin"), G2Z_SHARD_RAW, 500, 100);
  char pattern[512];
  snprintf(pattern, sizeof pattern, "%s", test_path(t, "*.bin"));
  g2z_loader_config config = test_loader_config(pattern, 2, 8);
  for (int n = 1, done = 0; !done && n < 30; n++) {
    g2z_loader *loader = NULL;
    g2z_shard_writer *writer = NULL;
    t->fail_at = n;
    g2z_status status = g2z_loader_create(&t->services, &config, &loader);
    if (status == G2Z_OK)
      status = g2z_shard_writer_create(&t->services, test_path(t, "c"), G2Z_SHARD_RAW, &writer);
    t->fail_at = 0;
    done = status == G2Z_OK;
    CHECK(t, done ? n > 7 : status == G2Z_NO_MEMORY);
    g2z_loader_free(loader);
    g2z_shard_writer_free(writer);
    CHECK(t, t->allocations == 0);
  }
}

/* What tells data from other data: lengths, ends, and samples of the middle. A checkpoint keeps the
 * hash without the samples, and must find in it what older checkpoints hold. */
static void test_loader_data(g2z_test *t) {
  char pattern[512];
  snprintf(pattern, sizeof pattern, "%s", test_path(t, "*.bin"));
  g2z_loader_config config = test_loader_config(pattern, 1, 8);
  uint64_t data[4], saved[4];
  for (int i = 0; i < 4; i++) { /* whole, whole again, a zeroed middle, another last token */
    const char *raw = test_path(t, "1.bin");
    g2z_loader *loader;
    test_loader_shard(t, test_path(t, "0.bin"), G2Z_SHARD_LLMC, 0, 1000);
    test_loader_shard(t, raw, G2Z_SHARD_RAW, 5000, 55000);
    for (size_t at = 40000; i == 2 && at < 44000; at++) test_files_poke(t, raw, at, 0);
    if (i == 3) test_files_poke(t, raw, 2 * 55000 - 1, 0);
    REQUIRE_OK(t, g2z_loader_create(&t->services, &config, &loader));
    data[i] = loader->data;
    saved[i] = loader->saved_data;
    g2z_loader_free(loader);
  }
  CHECK(t, data[1] == data[0] && data[2] != data[0] && data[3] != data[0] && data[3] != data[2]);
  CHECK(t, saved[1] == saved[0] && saved[2] == saved[0] && saved[3] != saved[0]);
  CHECK(t, saved[0] == 0x91bf036fc90b5e7eu);
}
