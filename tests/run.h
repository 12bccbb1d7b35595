/* Tests of the rooms "run" and "flags" and of ./train: artifacts, resumed runs, signals, ranks that
 * die. */

/* ----- runs, their artifacts, flags, the command line -------------------- */

/* Kinds: " string, 0 number (or null where nothing can be known), n null, t bool, { [. */
static const char *const test_schema[] = {
    "\" schema_version", "\" run_id", "\" timestamp_utc", "n git_commit", "\" command_line",
    "n env.python_version", "n env.torch_version", "n env.transformers_version",
    "n env.deepspeed_version", "n env.cuda_version", "n env.nccl_version", "\" host.hostname",
    "\" host.os", "n hardware.gpu_name", "0 hardware.gpu_count_visible", "0 hardware.world_size",
    "n hardware.cuda_version", "\" training_config.model_name", "\" training_config.model_size",
    "0 training_config.seq_len", "0 training_config.epochs",
    "0 training_config.micro_batch_size_per_gpu", "0 training_config.grad_accum_steps",
    "0 training_config.global_batch_size", "0 training_config.lr", "\" training_config.optimizer",
    "\" training_config.precision", "t training_config.deepspeed_enabled",
    "0 training_config.zero_stage", "\" training_config.dataset_name",
    "0 training_config.dataset_subset_sizes.train", "0 training_config.dataset_subset_sizes.val",
    "n deepspeed_config.path", "n deepspeed_config.sha256", "n deepspeed_config.selected",
    "\" schema_notes", "0 epochs.1.epoch_idx", "0 epochs.1.epoch_wall_time_sec",
    "0 epochs.1.steps", "0 epochs.1.micro_steps", "0 epochs.1.optimizer_steps",
    "0 epochs.1.tokens_processed_global", "0 epochs.1.tokens_per_sec_global",
    "0 epochs.1.train_loss_avg_global", "0 epochs.1.val_loss_avg_global",
    "n epochs.1.max_cuda_mem_allocated_bytes_rank0", "n epochs.1.max_cuda_mem_reserved_bytes_rank0",
    "n epochs.1.max_cuda_mem_allocated_bytes_global",
    "n epochs.1.max_cuda_mem_reserved_bytes_global", "0 epochs.1.step_time_mean_sec",
    "0 epochs.1.step_time_p50_sec", "0 epochs.1.step_time_p95_sec",
    "0 epochs.1.dataload_time_mean_sec", "0 summary.total_wall_time_sec",
    "0 summary.best_val_loss", "0 summary.mean_tokens_per_sec_global", "{ shutdown",
    "\" completion.run_complete_file", "\" completion.printed_marker",
    "\" completion.timestamp_utc"};

static const char *const test_slurm_schema[] = {
    "{ hardware.cluster",     "\" scheduler.type", "\" scheduler.job_id", "\" scheduler.nodelist",
    "0 scheduler.nnodes",     "0 scheduler.procid", "0 scheduler.localid",
    "\" scheduler.partition"};

static void test_run_artifacts(g2z_test *t) {
  test_run_setup s;
  test_run_seen seen;
  size_t bytes = 0, metrics_bytes = 0;
  test_run_prepare(t, &s, "run");
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, seen.steps == 8 && seen.validations == 2 && seen.samples == 1 && seen.done);
  CHECK(t, seen.last_loss < seen.first_loss - 1.0);
  CHECK(t, strncmp(seen.sample, "1 2 3", 5) == 0 && strlen(seen.sample) > 5);

  char *text = test_run_read(t, s.run_dir, "training_metrics.json", &bytes);
  if (text) {
    test_run_schema(t, text, bytes, test_schema, sizeof test_schema / sizeof *test_schema);
    CHECK(t, strstr(text, "\"n_layer=1, n_head=2, n_embd=32\"") != NULL);
    CHECK(t, strstr(text, "\"dataset_name\": \"digits\"") != NULL);
    CHECK(t, strstr(text, "\"lr\": 0.01,") != NULL);
    CHECK(t, strstr(text, "\"optimizer_steps\": 4,") && strstr(text, "\"micro_steps\": 8,"));
    CHECK(t, test_json_kind(t, text, bytes, "epochs.2") == 0); /* two of them */
    CHECK(t, test_json_kind(t, text, bytes, "scheduler") == 0);
  }
  g2z_release(&t->services, text);

  /* One line, and it is what the last event said. */
  char saved[300] = "", stamp[40] = "";
  int world = 0, used = 0;
  double rate = 0, wall = 0;
  text = test_run_read(t, s.run_dir, "RUN_COMPLETE.txt", &bytes);
  if (text) {
    CHECK(t, sscanf(text, "[Rank 0] RUN_COMPLETE checkpoint_path=%299s world_size=%d "
                          "tokens_per_sec=%lf total_wall_time_sec=%lf timestamp_utc=%39s%n",
                    saved, &world, &rate, &wall, stamp, &used) == 5);
    CHECK(t, (size_t)used + 1 == bytes && text[used] == '\n');
    CHECK(t, strcmp(saved, s.weights) == 0 && world == 1 && rate > 0 && wall > 0);
    CHECK(t, strlen(stamp) == 20 && stamp[19] == 'Z');
    CHECK(t, strncmp(text, seen.line, strlen(seen.line)) == 0);
  }
  g2z_release(&t->services, text);

  /* Each line of metrics.jsonl is one JSON text: 8 of steps, 2 of validations, 2 of epochs. */
  int steps = 0, validations = 0, epochs = 0;
  text = test_run_read(t, s.run_dir, "metrics.jsonl", &metrics_bytes);
  for (char *line = text, *next; line && *line; line = next) {
    next = strchr(line, '\n');
    CHECK(t, next != NULL);
    next = next ? next + 1 : line + strlen(line);
    size_t length = (size_t)(next - line);
    if (test_json_kind(t, line, length, "val_loss")) validations++;
    else if (test_json_kind(t, line, length, "epoch_ms")) epochs++;
    else if (!test_json_kind(t, line, length, "sample_ms")) {
      steps++;
#define X(type, name, meaning) CHECK(t, test_json_kind(t, line, length, #name) != 0);
      G2Z_METRIC_LIST(X)
#undef X
    }
  }
  CHECK(t, steps == 8 && validations == 2 && epochs == 2);
  g2z_release(&t->services, text);
  text = test_run_read(t, s.run_dir, "train.log", &bytes);
  CHECK(t, text && strstr(text, "step 8/8 | loss") && strstr(text, "RUN_COMPLETE"));
  g2z_release(&t->services, text);

  static const char *const weights[] = {"model.safetensors", "config.json", "merges.txt",
                                        "vocab.json"};
  for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
    text = test_run_read(t, s.weights, weights[i], &bytes);
    g2z_release(&t->services, text);
  }
}

/* The line of text without what a clock puts into it. */
static void test_run_untimed(char *text) {
  for (char *line = text; line && *line;) {
    static const char *const times[] = {"\"step_ms\"", "\"val_ms\"", "\"sample_ms\"",
                                        "\"epoch_ms\"", "\"save_ms\""};
    char *end = strchr(line, '\n'), *cut = NULL;
    if (!end) break;
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
      char *found = strstr(line, times[i]);
      if (found && (!cut || found < cut)) cut = found;
    }
    if (cut && cut < end) memset(cut, ' ', (size_t)(end - cut));
    line = end + 1;
  }
}

static void test_run_determinism(g2z_test *t) {
  static const char *const files[] = {"metrics.jsonl", "weights/model.safetensors",
                                      "weights/config.json", "weights/merges.txt"};
  test_run_setup a, b;
  test_run_seen seen[2];
  test_run_prepare(t, &a, "a");
  test_run_prepare(t, &b, "b");
  a.config.train.dropout = b.config.train.dropout = 0.1f;
  CHECK_OK(t, test_run_all(t, &a.config, &seen[0]));
  CHECK_OK(t, test_run_all(t, &b.config, &seen[1]));
  CHECK(t, strcmp(seen[0].sample, seen[1].sample) == 0);
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    size_t bytes_a = 0, bytes_b = 0;
    char *left = test_run_read(t, a.run_dir, files[i], &bytes_a);
    char *right = test_run_read(t, b.run_dir, files[i], &bytes_b);
    if (left && right) {
      if (i == 0) {
        test_run_untimed(left);
        test_run_untimed(right);
        CHECK(t, strstr(left, "\"loss\"") != NULL);
        CHECK(t, strlen(left) > 500); /* lengths differ by the digits of times: compare the words */
        char *end_a, *end_b, *at_a = strtok_r(left, " \n", &end_a);
        char *at_b = strtok_r(right, " \n", &end_b);
        while (at_a && at_b && strcmp(at_a, at_b) == 0) {
          at_a = strtok_r(NULL, " \n", &end_a);
          at_b = strtok_r(NULL, " \n", &end_b);
        }
        CHECK(t, !at_a && !at_b);
      } else {
        CHECK(t, bytes_a == bytes_b && memcmp(left, right, bytes_a) == 0);
      }
    }
    g2z_release(&t->services, left);
    g2z_release(&t->services, right);
  }
}

static void test_run_length(g2z_test *t) {
  test_run_setup s;
  test_run_seen seen;
  test_run_prepare(t, &s, "run");
  s.config.save_weights = NULL;
  s.config.run_dir = NULL;
  s.config.epochs = 0;
  s.config.train.optimizer.steps = 100;
  s.config.max_train_steps = 6; /* in the second epoch, long before the schedule's end */
  s.config.val_every = 3;
  s.config.max_val_steps = 1;
  s.config.sample_every = 2;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, seen.steps == 6);
  CHECK(t, seen.validations == 3); /* 3, 4 (end of the epoch), 6 (and end of the run) */
  CHECK(t, seen.samples == 3);
  CHECK(t, strstr(seen.line, "checkpoint_path=none") != NULL);

  /* Without shards to train on: validation and a sample of the fresh model. */
  s.config.train.train_glob = NULL;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, seen.steps == 0 && seen.validations == 1 && seen.samples == 1);
  CHECK_NEAR(t, seen.val_loss, log(257.0), 0.1);
}

/* Weights that a run saved continue where it ended. */
static void test_run_init_from(g2z_test *t) {
  test_run_setup s;
  test_run_seen first, second;
  test_run_prepare(t, &s, "run");
  CHECK_OK(t, test_run_all(t, &s.config, &first));
  s.config.train.init_from = s.weights;
  s.config.train.train_glob = NULL;
  s.config.save_weights = s.config.run_dir = NULL;
  CHECK_OK(t, test_run_all(t, &s.config, &second));
  CHECK_NEAR(t, second.val_loss, first.val_loss, 1e-9);
  CHECK(t, strcmp(first.sample, second.sample) == 0);
  s.config.train.model.heads /= 2; /* no shape shows it */
  CHECK_STATUS(t, test_run_all(t, &s.config, &second), G2Z_BAD_ARGUMENT, &t->services, "n_head");
}

/* internals */
/* <|endoftext|> of a config.json, and as many rows of wte as its vocab_size says; -1: neither. */
static int64_t test_run_eot(g2z_test *t, const char *directory, int vocab) {
  static const char *const keys[] = {"vocab_size", "bos_token_id", "eos_token_id"};
  int64_t found[3] = {-1, -1, -2};
  size_t bytes;
  char path[700], *text = test_run_read(t, directory, "config.json", &bytes);
  for (int i = 0; i < 3; i++) {
    char key[64];
    snprintf(key, sizeof key, "\"%s\": ", keys[i]);
    const char *at = text ? strstr(text, key) : NULL;
    if (at) found[i] = strtoll(at + strlen(key), NULL, 10);
  }
  g2z_release(&t->services, text);
  g2z__safetensors *file = NULL;
  snprintf(path, sizeof path, "%s/model.safetensors", directory);
  CHECK_OK(t, g2z__safetensors_open(&t->services, path, &file));
  int index = file ? g2z__safetensors_find(file, "transformer.wte.weight") : -1;
  CHECK(t, index >= 0 && file->tensors[index].shape[0] == (uint64_t)vocab);
  g2z__safetensors_free(file);
  return found[0] == vocab && found[1] == found[2] ? found[2] : -1;
}

/* Readers of what is saved are told the token that ends a text, whether the tokenizer says it, the
 * weights that training began with, or nothing but the vocabulary; and whether that is padded. */
static void test_run_padded_vocab(g2z_test *t) {
  static const struct { int vocab, with_tokenizer; int64_t eot; } cases[] = {
      {257, 0, 256}, {259, 1, 258}, {384, 1, 258}, {384, 0, 383}, {50257, 0, 50256},
      {50304, 0, 50256}};
  static const char merges[] = "#version: 0.2\n1 2\n3 4\n"; /* 259 tokens */
  test_run_setup s;
  test_run_seen seen;
  char saved[700];
  test_write_file(t, test_path(t, "merges.txt"), merges, strlen(merges));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char name[32], vocab[512];
    snprintf(name, sizeof name, "run%zu", i);
    snprintf(vocab, sizeof vocab, "%s", test_path(t, "merges.txt"));
    test_run_prepare(t, &s, name);
    s.config.prompt = NULL;
    s.config.vocab = cases[i].with_tokenizer ? vocab : NULL;
    s.config.train.model.channels = 16;
    s.config.train.model.vocab = cases[i].vocab;
    s.config.epochs = 0;
    s.config.train.optimizer.steps = s.config.save_every = 1;
    CHECK_OK(t, test_run_all(t, &s.config, &seen));
    snprintf(saved, sizeof saved, "%.500s/step-000001", s.run_dir);
    CHECK(t, test_run_eot(t, saved, cases[i].vocab) == cases[i].eot);
    CHECK(t, test_run_eot(t, s.weights, cases[i].vocab) == cases[i].eot);
    if (i != 2) continue;
    /* Of weights whose tokenizer is not there, their config.json is believed. */
    s.config.train.init_from = saved;
    CHECK_OK(t, g2z_weights_config(&t->services, saved, &s.config.train.model));
    s.config.vocab = s.config.run_dir = NULL;
    s.config.save_every = 0;
    CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
                 "weights holds a merges.txt, and this run has no tokenizer to put in its place");
    CHECK(t, unlink(test_path(t, "run2/weights/merges.txt")) == 0);
    CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
                 "weights holds a vocab.json");
    CHECK(t, unlink(test_path(t, "run2/weights/vocab.json")) == 0);
    CHECK_OK(t, test_run_all(t, &s.config, &seen));
    CHECK(t, test_run_eot(t, s.weights, cases[i].vocab) == cases[i].eot);
  }
}

static void test_run_slurm(g2z_test *t) {
  static const char *const variables[][2] = {
      {"SLURM_JOB_ID", "4711"},        {"SLURM_JOB_NODELIST", "node[1-2]"},
      {"SLURM_JOB_NUM_NODES", "2"},    {"SLURM_PROCID", "0"},
      {"SLURM_LOCALID", "0"},          {"SLURM_JOB_PARTITION", "gpu"},
      {"SLURM_CLUSTER_NAME", "alpha"}};
  const size_t count = sizeof variables / sizeof *variables;
  test_run_setup s;
  test_run_seen seen;
  size_t bytes = 0;
  if (getenv("SLURM_JOB_ID")) SKIP(t, "this is a Slurm job: its variables stay as they are");
  test_run_prepare(t, &s, "run");
  s.config.save_weights = NULL;
  for (size_t i = 0; i < count; i++) setenv(variables[i][0], variables[i][1], 1);
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  for (size_t i = 0; i < count; i++) unsetenv(variables[i][0]);
  char *text = test_run_read(t, s.run_dir, "training_metrics.json", &bytes);
  if (text)
    test_run_schema(t, text, bytes, test_slurm_schema,
                    sizeof test_slurm_schema / sizeof *test_slurm_schema);
  g2z_release(&t->services, text);
}

static void test_run_refusals(g2z_test *t) {
  test_run_setup s, wrong;
  test_run_seen seen;
  char path[600];
  test_run_prepare(t, &s, "run");
#define REFUSED(status, part) \
  CHECK_STATUS(t, test_run_all(t, &wrong.config, &seen), status, &t->services, part); \
  CHECK(t, access(s.run_dir, F_OK) != 0); /* nothing was left */                      \
  wrong = s
  wrong = s;
  wrong.config.train.train_glob = wrong.config.val_glob = wrong.config.prompt = NULL;
  REFUSED(G2Z_BAD_ARGUMENT, "nothing to do");
  wrong.config.train.train_glob = "/nowhere/at/all_*.bin";
  REFUSED(G2Z_IO, "/nowhere/at/all");
  wrong.config.val_glob = "/nowhere/at/all_*.bin";
  REFUSED(G2Z_IO, "/nowhere/at/all");
  wrong.config.vocab = "/nowhere/vocab.bpe";
  REFUSED(G2Z_IO, "/nowhere/vocab.bpe");
  wrong.config.train.model.vocab = 300;
  REFUSED(G2Z_BAD_ARGUMENT, "samples need the tokenizer");
  wrong.config.train.model.vocab = 230; /* the shards hold 220 and less; byte-level has 257 */
  wrong.config.prompt = NULL;
  CHECK_OK(t, (wrong.config.run_dir = wrong.config.save_weights = NULL,
               test_run_all(t, &wrong.config, &seen)));
  CHECK(t, seen.samples == 0);
  wrong = s;
  wrong.config.train.model.vocab = 100;
  wrong.config.prompt = NULL;
  REFUSED(G2Z_FORMAT, "220");
  wrong.config.train.model.heads = 3;
  REFUSED(G2Z_BAD_ARGUMENT, "heads=3");
  wrong.config.val_every = -1;
  REFUSED(G2Z_BAD_ARGUMENT, "val_every=-1");
  wrong.config.epochs = -1;
  REFUSED(G2Z_BAD_ARGUMENT, "epochs=-1");
  wrong.config.sampling.top_p = 0;
  REFUSED(G2Z_BAD_ARGUMENT, "top_p=0");
  wrong.config.train.batch = 64; /* more sequences than there are */
  REFUSED(G2Z_BAD_ARGUMENT, "batch 64");

  /* A file where a directory should be: unwritable for root too. */
  test_write_file(t, test_path(t, "file"), "x", 1);
  snprintf(path, sizeof path, "%s/run", test_path(t, "file"));
  wrong.config.run_dir = path;
  wrong.config.save_weights = NULL;
  REFUSED(G2Z_IO, "file");
  wrong.config.save_weights = path;
  REFUSED(G2Z_IO, "file");

  /* The directory of a run is not overwritten. */
  s.config.save_weights = NULL;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
               "holds a run already");
#undef REFUSED
}

/* A disk that fills while the run goes on: RLIMIT_FSIZE fails writes in the same place. */
static void test_run_full_disk(g2z_test *t) {
  test_run_setup s;
  test_run_seen seen;
  struct rlimit before, small;
  test_run_prepare(t, &s, "run");
  s.config.save_weights = NULL;
  CHECK(t, getrlimit(RLIMIT_FSIZE, &before) == 0);
  small = before;
  small.rlim_cur = 1000;
  void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
  if (setrlimit(RLIMIT_FSIZE, &small) != 0) SKIP(t, "the limit of file sizes cannot be set here");
  g2z_status status = test_run_all(t, &s.config, &seen);
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  CHECK_STATUS(t, status, G2Z_IO, &t->services, s.run_dir); /* whichever file is full first */
  snprintf(s.weights, sizeof s.weights, "%.400s/RUN_COMPLETE.txt", s.run_dir);
  CHECK(t, access(s.weights, F_OK) != 0);
}

static int test_times(const char *text, const char *part) {
  int times = 0;
  for (; text && (text = strstr(text, part)) != NULL; text++) times++;
  return times;
}

/* Both streams of a run tell step `last` once and none behind it; 0: they have none. */
static void test_run_last_line(g2z_test *t, const test_run_setup *s, int last) {
  static const char *const files[] = {"metrics.jsonl", "train.log"};
  for (int i = 0; i < 2; i++) {
    size_t bytes;
    char line[2][32], *text = test_run_read(t, s->run_dir, files[i], &bytes);
    for (int more = 0; more < 2; more++)
      snprintf(line[more], sizeof line[more], i ? "  step %d/" : "\"step\": %d,", last + more);
    CHECK(t, text && test_times(text, line[0]) == (last > 0) && test_times(text, line[1]) == 0);
    g2z_release(&t->services, text);
  }
}

/* The steps before the one whose tokens are damaged are told, whichever it is. */
static void test_run_damaged(g2z_test *t) {
  int least = INT_MAX, most = 0;
  for (int sequence = 0; sequence < 32; sequence += 5) {
    char name[32];
    test_run_setup s;
    test_run_seen seen;
    snprintf(name, sizeof name, "run%d", sequence);
    test_run_prepare(t, &s, name);
    test_run_shard(t, "digits_train_000000.bin", 4 * 2 * 4 * 16 + 1);
    FILE *shard = fopen(s.train, "r+b");
    uint16_t token = 257; /* the first that the model does not have */
    CHECK(t, shard && fseek(shard, 1024 + 2 * (16 * sequence + 3), SEEK_SET) == 0);
    CHECK(t, shard && fwrite(&token, sizeof token, 1, shard) == 1 && fclose(shard) == 0);
    g2z_loader_config config;
    memset(&config, 0, sizeof config);
    config.glob = s.train;
    config.batch = s.config.train.batch;
    config.seq = s.config.train.seq;
    config.accum = s.config.train.accum;
    config.world = 1;
    config.vocab = 257;
    config.order = G2Z_ORDER_SHUFFLED;
    config.seed = s.config.train.seed;
    g2z_loader *loader = NULL;
    const int32_t *x, *y;
    int good = 0;
    CHECK_OK(t, g2z_loader_create(&t->services, &config, &loader));
    while (loader && good < 4 && g2z_loader_next(loader, &x, &y) == G2Z_OK) good++;
    g2z_loader_free(loader);
    CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_FORMAT, &t->services, "token 257 at");
    CHECK(t, good < 4 && seen.steps == good && seen.last_step == good && !seen.done);
    test_run_last_line(t, &s, good);
    least = good < least ? good : least;
    most = good > most ? good : most;
  }
  CHECK(t, least == 0 && most == 3);
}

/* The last of the steps that were skipped is told as well, and what follows says the same again. */
static void test_run_diverges_as(g2z_test *t, int save_every, int fixed, const char *name) {
  test_run_setup s;
  g2z_context *context = NULL;
  g2z_run *run = NULL;
  g2z_run_event event;
  g2z_context_config cc = g2z_context_config_default(&t->services);
  float nan = copysignf(NAN, -1); /* as x86 makes it */
  int steps = 0, told = 0;
  test_run_prepare(t, &s, name);
  s.config.save_every = save_every;
  s.config.val_every = save_every ? 0 : 10;
  s.config.epochs = 20;
  if (fixed) s.config.train.dtype = G2Z_FP16;
  s.config.train.optimizer.loss_scale_dynamic = !fixed;
  cc.device = G2Z_DEVICE_CPU;
  CHECK_OK(t, g2z_context_create(&cc, &context));
  CHECK_OK(t, g2z_run_create(context, &s.config, &run));
  if (run) CHECK_OK(t, g2z_trainer_write(g2z_run_trainer(run), G2Z_BUFFER_MASTER, 0, 1, &nan));
  g2z_status status = G2Z_OK;
  while (run && steps < 80 && (status = g2z_run_next(run, &event)) == G2Z_OK) {
    steps += event.kind == G2Z_RUN_STEP && event.metrics.skipped;
    told += strstr(event.line, "loss nan") != NULL && strstr(event.line, "-nan") == NULL;
  }
  for (int again = 0; run && again < 2; again++) {
    CHECK_STATUS(t, status, G2Z_DIVERGED, &t->services, "50 steps in a row up to step 50 had");
    CHECK(t, !strstr(t->services.error, "scale 65536: lower that, which is fixed") == !fixed);
    status = g2z_run_next(run, &event);
  }
  CHECK(t, steps == 50 && told > 50); /* validations as well */
  test_run_last_line(t, &s, 50);
  g2z_run_free(run);
  g2z_context_free(context);
}

static void test_run_diverges(g2z_test *t) {
  test_run_diverges_as(t, 0, 0, "run");
  test_run_diverges_as(t, 0, 1, "fixed"); /* a scale that cannot shrink: no other lr would help */
  /* Told by the flush before what is due, which is not done. */
  test_run_diverges_as(t, 50, 0, "saves");
}

/* A run goes on, and ends well, where its page cannot be written. */
static void test_run_no_page(g2z_test *t) {
  test_run_setup s;
  test_run_seen seen;
  char page[700];
  size_t bytes;
  test_run_prepare(t, &s, "run");
  snprintf(page, sizeof page, "%.500s/report.html", s.run_dir);
  CHECK(t, mkdir(s.run_dir, 0777) == 0 && mkdir(page, 0777) == 0);
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, seen.done && rmdir(page) == 0 && test_files_count(t, "run/*.partial") == 0);
  g2z_release(&t->services, test_run_read(t, s.run_dir, "RUN_COMPLETE.txt", &bytes));
}

static void test_run_allocations(g2z_test *t) {
  test_run_setup s;
  test_run_seen seen;
  g2z_status status = G2Z_NO_MEMORY;
  test_run_prepare(t, &s, "run");
  s.config.run_dir = s.config.save_weights = NULL;
  s.config.max_train_steps = 2;
  int failed = 0;
  for (long at = 1; at < 5000 && status == G2Z_NO_MEMORY; at++) {
    t->fail_at = at;
    status = test_run_all(t, &s.config, &seen);
    failed += status == G2Z_NO_MEMORY;
  }
  t->fail_at = 0;
  CHECK(t, failed > 20);
  CHECK(t, status == G2Z_OK && seen.done);
}

/* ----- flags ----- */

static int test_flag_lines, test_flag_defaults;
static void test_flag_line(void *user, const char *text) {
  (void)user;
  test_flag_lines++;
  test_flag_defaults += strchr(text, '[') != NULL;
}

static void test_flags(g2z_test *t) {
  int number = 7, choice = 1, on = 0, unset = 0, rest = -1;
  int64_t big = 0;
  uint64_t seed = 3;
  float real = 0.5f;
  const char *text = NULL;
  const g2z_flag flags[] = {
      {"", G2Z_FLAG_GROUP, NULL, 0, 0, "", "Numbers:"},
      {"number", G2Z_FLAG_INT, &number, 1, 100, "N", "an int"},
      {"unset", G2Z_FLAG_INT, &unset, 1, 100, "N", "an int without a default"},
      {"big-number", G2Z_FLAG_INT64, &big, 0, 9.3e18, "N", "an int64"},
      {"seed", G2Z_FLAG_UINT64, &seed, 0, 0, "N", "a uint64"},
      {"real", G2Z_FLAG_FLOAT, &real, 0, 1, "X", "a float"},
      {"choice", G2Z_FLAG_CHOICE, &choice, 0, 0, "|cpu|cuda", "a choice"},
      {"text", G2Z_FLAG_TEXT, &text, 0, 0, "TEXT", "a text"},
      {"on", G2Z_FLAG_SWITCH, &on, 0, 0, "", "a switch"}};
  const int count = (int)(sizeof flags / sizeof *flags);
  g2z_flags_print(flags, count, test_flag_line, NULL);
  CHECK(t, test_flag_lines == 9 && test_flag_defaults == 5); /* number, big, seed, real, choice */
  test_flag_lines = test_flag_defaults = 0;

  char words[10][48] = {"program", "--number=12", "one", "--big-number", "9223372036854775807",
                        "--seed=18446744073709551615", "--real=2.5e-1", "--choice=cpu",
                        "--text=--on", "--on"};
  char *argv[13];
  for (int i = 0; i < 10; i++) argv[i] = words[i];
  char dash[] = "-", number_word[] = "--number", ten[] = "10";
  argv[10] = dash;
  argv[11] = number_word;
  argv[12] = ten;
  CHECK_OK(t, g2z_flags_parse(&t->services, flags, count, 13, argv, &rest));
  CHECK(t, number == 10 && big == INT64_MAX && seed == UINT64_MAX && choice == 0 && on == 1);
  CHECK_NEAR(t, (double)real, 0.25, 0);
  CHECK(t, text && strcmp(text, "--on") == 0);
  CHECK(t, rest == 2 && strcmp(argv[1], "one") == 0 && strcmp(argv[2], "-") == 0);

  static const char *const wrong[][2] = {
      {"--nmuber=1", "did you mean --number?"}, {"--big=1", "did you mean --big-number?"},
      {"--entirely-else", "--help lists them"}, {"--number", "--number needs a value: --number N"},
      {"--number=", "not a whole number"},      {"--number=12x", "12x: not a whole number"},
      {"--number= 12", "not a whole number"},   {"--number=0", "must be from 1 to 100"},
      {"--number=-5", "must be from 1 to 100"}, {"--number=1e1", "not a whole number"},
      {"--number=99999999999999999999", "must be from 1 to 100"},
      {"--big-number=9223372036854775808", "must be from 0 to 9223372036854775807"},
      {"--seed=-1", "must be from 0 to 18446744073709551615"},
      {"--seed=18446744073709551616", "must be from 0 to"},
      {"--real=nan", "must be from 0 to 1"},    {"--real=1e999", "must be from 0 to 1"},
      {"--real=0.5.5", "not a number"},         {"--choice=gpu", "must be one of cpu|cuda"},
      {"--choice=", "must be one of"},          {"--on=1", "takes no value"},
      {"-n", "two dashes"},                     {"stray", "takes flags only"}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    char word[64];
    snprintf(word, sizeof word, "%s", wrong[i][0]);
    argv[1] = word;
    CHECK_STATUS(t, g2z_flags_parse(&t->services, flags, count, 2, argv, NULL), G2Z_BAD_ARGUMENT,
                 &t->services, wrong[i][1]);
  }
  CHECK(t, number == 10); /* what is refused changes nothing */
  char next_flag[] = "--on"; /* a flag is no value, unless it is written with = */
  argv[1] = number_word;
  argv[2] = next_flag;
  CHECK_STATUS(t, g2z_flags_parse(&t->services, flags, count, 3, argv, NULL), G2Z_BAD_ARGUMENT,
               &t->services, "--number needs a value");

  char *line = NULL, quoted[] = "it's 5", empty[] = "";
  argv[1] = quoted;
  argv[2] = empty;
  CHECK_OK(t, g2z_flags_line(&t->services, 3, argv, &line));
  CHECK(t, line && strcmp(line, "program 'it'\\''s 5' ''") == 0);
  g2z_release(&t->services, line);
}

/* A table becomes arguments, and these become the same values again, to the last bit. */
static void test_flags_arguments(g2z_test *t) {
  static const float reals[] = {0.5f, 6e-4f, 0.1f, 16777216.0f, 1.0f / 3, 1e-30f, 3.4e38f};
  static const char *const texts[] = {"", "--on", "it's a b", NULL}, *const first[] = {"p", ""};
  struct {
    int number, unset, choice, on, off;
    int64_t big;
    uint64_t seed;
    float real, least, most;
    const char *text;
  } v, back;
  const g2z_flag flags[] = {
      {"", G2Z_FLAG_GROUP, NULL, 0, 0, "", "Numbers:"},
      {"number", G2Z_FLAG_INT, &v.number, -2147483648.0, 2147483647, "N", ""},
      {"unset", G2Z_FLAG_INT, &v.unset, 1, 100, "N", ""},
      {"big", G2Z_FLAG_INT64, &v.big, -9.3e18, 9.3e18, "N", ""},
      {"seed", G2Z_FLAG_UINT64, &v.seed, 0, 0, "N", ""},
      {"real", G2Z_FLAG_FLOAT, &v.real, 0, 3.5e38, "X", ""},
      {"least", G2Z_FLAG_FLOAT, &v.least, 0.7, 1, "X", ""}, /* as a float it is less, */
      {"most", G2Z_FLAG_FLOAT, &v.most, 0, 0.99, "X", ""},  /* and this one is more */
      {"choice", G2Z_FLAG_CHOICE, &v.choice, 0, 0, "|cpu|cuda", ""},
      {"text", G2Z_FLAG_TEXT, &v.text, 0, 0, "TEXT", ""},
      {"off", G2Z_FLAG_SWITCH, &v.off, 0, 0, "", ""},
      {"on", G2Z_FLAG_SWITCH, &v.on, 0, 0, "", ""}};
  const int count = (int)(sizeof flags / sizeof *flags);
  for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
    char **argv = NULL;
    memset(&v, 0, sizeof v);
    v.number = i % 2 ? INT_MIN : INT_MAX;
    v.choice = (int)i % 3 - 1; /* -1: none */
    v.on = 1;
    v.big = i % 2 ? INT64_MAX : INT64_C(-9007199254740993); /* not a double */
    v.seed = UINT64_MAX - i;
    v.real = reals[i];
    v.least = 0.7f;
    v.most = 0.99f;
    v.text = texts[i % 4];
    back = v;
    CHECK_OK(t, g2z_flags_arguments(&t->services, flags, count, first, 2, &argv));
    if (!argv) continue;
    int words = 0;
    while (argv[words]) words++;
    CHECK(t, words == 2 + 7 + (v.choice >= 0) + (v.text != NULL));
    CHECK(t, strcmp(argv[0], "p") == 0 && !*argv[1] && strcmp(argv[words - 1], "--on") == 0);
    memset(&v, 0, sizeof v);
    v.choice = -1;
    CHECK_OK(t, g2z_flags_parse(&t->services, flags, count, words - 1, argv + 1, NULL));
    CHECK(t, v.number == back.number && v.choice == back.choice && v.on && !v.off && !v.unset);
    CHECK(t, v.big == back.big && v.seed == back.seed && v.real == back.real);
    CHECK(t, v.least == back.least && v.most == back.most);
    CHECK(t, !v.text == !back.text && (!v.text || strcmp(v.text, back.text) == 0));
    g2z_release(&t->services, argv);
  }
  char **argv;
  v.text = NULL; /* it lay in the arguments */
  t->fail_at = 1;
  CHECK(t, g2z_flags_arguments(&t->services, flags, count, first, 2, &argv) == G2Z_NO_MEMORY);
  t->fail_at = 0;
  CHECK(t, argv == NULL);
}

/* ----- the command line of ./train ----- */

static void test_train_help(g2z_test *t) {
  static const char *const flags[] = {
      "train", "val", "vocab", "model", "layers", "channels", "heads", "context", "batch", "seq",
      "accum", "global-batch", "steps", "epochs", "lr", "schedule", "warmup", "min-lr",
      "weight-decay", "beta1", "beta2", "eps", "clip", "dtype", "loss-scale", "loss-scale-window",
      "dropout", "seed", "device", "zero", "val-every", "val-steps", "sample-every", "prompt",
      "init-from", "save-weights", "run-dir", "dry-run", "max-train-steps", "max-val-steps",
      "profile-mode", "help"};
  char output[16384], flag[64];
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  CHECK(t, test_train(t, "--help", output, sizeof output) == 0);
  for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
    snprintf(flag, sizeof flag, "\n  --%s ", flags[i]);
    t->checks++;
    if (!strstr(output, flag)) test_fail(t, __FILE__, __LINE__, "--help lacks --%s", flags[i]);
  }
  CHECK(t, strstr(output, "\nfine-tune ") && strstr(output, "\nresume ") && strstr(output, "\nwrite "));
  CHECK(t, test_train(t, "-h", output, sizeof output) == 0 && strstr(output, "\nwrite "));
  CHECK(t, test_train(t, "--version", output, sizeof output) == 0);
  CHECK(t, strcmp(output, "train " G2Z_VERSION "\n") == 0);
}

/* Flags from a file, among those of the command line, of which the last counts. */
static void test_train_flags(g2z_test *t) {
  static const char file[] = "# a small model\n\n--layers 1\n  --channels=64  \n--heads 4\r\n"
                             "--context 32\n--vocab-size 257\n--run-id # is a sign \n--device cpu";
  static const char *const wrong[][2] = {
      {"--layers", "flags: --layers needs a value"},   {"--layers x", "flags: --layers x: not a"},
      {"layers 1", "flags: a line is a flag, --name"}, {"--dry-run 1", "flags: --dry-run takes no"},
      {"--flags x", "flags: --flags takes one file"}};
  char output[16384], arguments[900];
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_write_file(t, test_path(t, "flags"), file, sizeof file - 1);
  snprintf(arguments, sizeof arguments, "--layers 3 --flags %s --channels 128 --dry-run",
           test_path(t, "flags"));
  CHECK(t, test_train(t, arguments, output, sizeof output) == 0);
  CHECK(t, strstr(output, "1 layers, 4 heads, 128 channels") != NULL);
  for (int i = 0; i < 5; i++) {
    test_write_file(t, test_path(t, "flags"), wrong[i][0], strlen(wrong[i][0]));
    CHECK(t, test_train(t, arguments, output, sizeof output) == 1);
    t->checks++;
    if (!strstr(output, wrong[i][1]))
      test_fail(t, __FILE__, __LINE__, "\"%s\" lacks \"%s\"", output, wrong[i][1]);
  }
}

static void test_train_refusals(g2z_test *t) {
  /* Each ends with exit code 1 and one line that begins with "train: " and holds the words. */
  static const char *const cases[][2] = {
      {"--bathc 4", "did you mean --batch?"},
      {"--batch four", "--batch four: not a whole number"},
      {"--batch ''", "--batch \"\": not a whole number"},
      {"--dtype=", "--dtype \"\": must be one of fp32"},
      {"'' --batch 4", "\"\": this program takes flags only"},
      {"--batch -4", "--batch -4: must be from 1"},
      {"--batch 99999999999999999999", "must be from 1 to"},
      {"--lr 1e", "--lr 1e: not a number"},
      {"--lr nan", "--lr nan: must be from"},
      {"--lr", "--lr needs a value"},
      {"--max_iters 10", "no flag --max_iters; here it is --steps N: "},
      {"--learning-rate 1", "no flag --learning-rate; here it is --lr X: "},
      {"--batch-size=8", "no flag --batch-size; here it is --batch N: "},
      {"--micro_batch_size_per_gpu 8", "here it is --batch N: "},
      {"--fp16", "no flag --fp16; here it is --dtype fp32|tf32|fp16|bf16: "},
      {"-x 10", "-x: flags are written with two dashes, and llm.c's is here --steps; --help"},
      {"--prompt x", "--prompt needs a model that has learnt: name its weights, --init-from"},
      {"--train $SHARD --init-from gpt2", "git clone https://huggingface.co/gpt2; for random weights"},
      {"--train $SHARD --init-from $SHARD", "shard.bin is a file, and a directory is wanted: --init-"},
      {"--train $SHARD --vocab /tmp", "--vocab /tmp is a directory, and a file is wanted: --vocab /tmp"},
      {"--train $SHARD --flags /nowhere/flags", "/nowhere/flags"},
      {"--steps 0", "--steps 0: must be from 1"},
      {"--dtype fp8", "must be one of fp32|tf32|fp16|bf16"},
      {"--schedule step", "must be one of cosine|"},
      {"--model gpt3", "gpt2-medium"},
      {"--model gpt2 x", "takes flags only"},
      {"--train a_0.bin a_1.bin", "a_1.bin: this program takes flags only, each with one value at most:"},
      {"--train $SHARD --layers 2 --channels 60 --heads 7", "channels=60 must divide by heads=7"},
      {"--train $SHARD --channels 36 --heads 3", "must be a multiple of 8"},
      {"--train $SHARD --context 64 --seq 65", "seq=65"},
      {"--train $SHARD --batch 4 --global-batch 6", "--global-batch 6 must divide by --batch 4"},
      {"--dry-run --ranks 4096 --batch 1048576 --global-batch 4096",
       "--global-batch 4096 must divide by --batch 1048576 x 4096 ranks"},
      {"--train $SHARD --batch 4 --accum 2 --global-batch 8", "give one of them"},
      {"--train $SHARD --steps 5 --epochs 1", "give one of them"},
      {"--train $SHARD --lr 1e-3 --min-lr 1e-2", "min_lr"},
      {"--train $SHARD --dtype tf32 --device cpu --context 64 --batch 4", "tf32"},
      {"--train $SHARD --zero 4", "--zero 4: must be from 0 to 3"},
      {"--train $SHARD --strategy dp --zero 1", "strategy=dp keeps one optimizer, on rank 0, and"},
      {"--train /nowhere/*.bin --layers 1 --channels 64", "/nowhere/"},
      {"--train $SHARD --vocab /nowhere/vocab.bpe", "/nowhere/vocab.bpe"},
      {"--train $SHARD --layers 1 --channels 64 --context 16 --device cpu --tuning /nowhere/t.txt",
       "/nowhere/t.txt"},
      {"--train $SHARD --layers 1 --channels 64 --context 16 --device cpu --tuning $SHARD",
       "shard.bin: no tuning table of this build: it begins with \""},
      {"--train $SHARD --init-from /nowhere", "/nowhere"},
      {"--train $SHARD --init-from ''", "cannot open the directory \"\": No such file"},
      {"--train $SHARD --run-dir $(printf %01100d 0)",
       "--run-dir has 1100 bytes, and at most 1023"},
      {"--train $SHARD --run-id $(printf %0200d 0)", "--run-id has 200 bytes, and at most 127"},
      {"--layers 1 --channels 64", "nothing to do"}};
  char output[16384], arguments[900];
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_run_shard(t, "shard.bin", 2000);
  setenv("SHARD", test_path(t, "shard.bin"), 1);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    snprintf(arguments, sizeof arguments, "--run-dir %s %s", test_path(t, "run"), cases[i][0]);
    int code = test_train(t, arguments, output, sizeof output);
    t->checks++;
    const char *said = strncmp(output, "[rank 0] ", 9) == 0 ? output + 9 : output;
    if (code != 1 || strncmp(said, "train: ", 7) != 0 || !strstr(output, cases[i][1]))
      test_fail(t, __FILE__, __LINE__, "train %s: exit code %d, \"%s\", which lacks \"%s\"",
                cases[i][0], code, output, cases[i][1]);
  }
  static const char *const useless[][2] = {
      {"prompt x", "--sample-tokens 0 has no use"},
      {"prompt ''", "--sample-tokens 0 has no use"},
      {"sample-every 1", "--sample-tokens 0 has no use"},
      {"temperature 0", "--sample-tokens 0 has no use"},
      {"top-k 1", "--sample-tokens 0 has no use"},
      {"top-p 0.5", "--sample-tokens 0 has no use"},
      {"sample-seed 7", "--sample-tokens 0 has no use"},
      {"val-every 1", "there is nothing to validate on"},
      {"val-steps 1", "there is nothing to validate on"},
      {"max-val-steps 1", "there is nothing to validate on"}};
  for (size_t i = 0; i < sizeof useless / sizeof *useless; i++) {
    char sentence[80];
    snprintf(arguments, sizeof arguments, "--run-dir none --device cpu --layers 1 --channels 8 "
             "--heads 1 --context 8 --vocab-size 257 --max-train-steps 1 --train $SHARD --%s "
             "--sample-tokens 0", useless[i][0]);
    CHECK(t, test_train(t, arguments, output, sizeof output) == 1);
    snprintf(sentence, sizeof sentence, "train: --%.*s: %s", (int)strcspn(useless[i][0], " "),
             useless[i][0], useless[i][1]);
    CHECK(t, strstr(output, sentence) != NULL);
  }
  /* A directory that is named after the clock holds no checkpoint of an earlier start. */
  CHECK(t, test_train(t, "--train $SHARD --resume latest --layers 1 --channels 64", output,
                      sizeof output) == 1);
  CHECK(t, strstr(output, "--resume latest looks into --run-dir"));
  unsetenv("SHARD");
  CHECK(t, access(test_path(t, "run"), F_OK) != 0);
}

static void test_train_device(g2z_test *t) {
  char output[16384], arguments[900];
  size_t free_bytes, total_bytes;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  if (g2z_device_memory(&t->services, G2Z_DEVICE_CUDA, &free_bytes, &total_bytes) == G2Z_OK)
    SKIP(t, "there is a GPU, so --device cuda is no error");
  test_run_shard(t, "x.bin", 2000);
  snprintf(arguments, sizeof arguments, "--device cuda --train %s --vocab-size 257 --context 16 --batch 1 --run-dir none",
           test_path(t, "x.bin"));
  CHECK(t, test_train(t, arguments, output, sizeof output) == 1);
  CHECK(t, strncmp(output, "train: ", 7) == 0);
  CHECK(t, strstr(output, "CUDA") || strstr(output, "cuda") || strstr(output, "GPU"));
  /* A plan is arithmetic: it needs neither the GPU nor the other ranks. */
  CHECK(t, test_train(t, "--gpus 8 --model gpt2-xl --dry-run", output, sizeof output) == 0);
  CHECK(t, strstr(output, "rank 0 of 8") && strstr(output, "fp16"));
  CHECK(t, test_train(t, "--device cuda --gpus 8 --model gpt2-xl --dry-run", output,
                      sizeof output) == 0);
  CHECK(t, strstr(output, "rank 0 of 8") && strstr(output, "no such device"));
  CHECK(t, test_train(t, "--device cuda --gpus 4 --strategy dp --recompute block --dry-run", output,
                      sizeof output) == 0);
  CHECK(t, strstr(output, "the optimizer on rank 0 alone, rank 0 of 4"));
  CHECK(t, strstr(output, "1.391 GiB  master weights") && strstr(output, "0.399 GiB  activations"));
}

static void test_train_run(g2z_test *t) {
  char output[16384], arguments[1800];
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  CHECK(t, test_train(t, "--dry-run --device cpu --layers 2 --channels 64 --seq 32 --batch 2",
                      output, sizeof output) == 0);
  CHECK(t, strstr(output, "2 layers") && strstr(output, "largest"));
  CHECK(t, access("runs/run_dry", F_OK) != 0);

  test_run_shard(t, "x_train_0.bin", 2000);
  test_run_shard(t, "x_val_0.bin", 200);
  snprintf(arguments, sizeof arguments,
           "--train '%s' --val=%s --vocab-size 257 --device cpu --layers 1 --channels 32 --heads 4 "
           "--context 16 --batch 2 --global-batch 4 --steps 12 --max-train-steps 10 --lr 1e-2 "
           "--val-every 5 --prompt '4 5' --sample-tokens 8 --dropout 0.1 --dtype bf16 --seed 7 "
           "--run-dir %s --save-weights %s",
           test_path(t, "x_train_*.bin"), test_path(t, "x_val_0.bin"), test_path(t, "run"),
           test_path(t, "weights"));
  CHECK(t, test_train(t, arguments, output, sizeof output) == 0);
  CHECK(t, strstr(output, "step 10/10 | loss") && strstr(output, "val loss"));
  CHECK(t, strstr(output, "unigram entropy") && strstr(output, "[Rank 0] RUN_COMPLETE"));
  CHECK(t, strstr(output, "\ndone: loss ") && strstr(output, ", best validation loss "));
  CHECK(t, strstr(output, ", 10 steps, 640 tokens, ") && strstr(output, "/run/report.html\n"));
  CHECK(t, strstr(output, "/weights --prompt \"") && strstr(output, "train on: the same command"));
  CHECK(t, access(test_path(t, "run/RUN_COMPLETE.txt"), R_OK) == 0);

  /* config.json says what training had; Python finds the tokenizer and how to sample. */
  test_sh(t, "grep -q '\"attn_pdrop\": 0.1,' %s/config.json && grep -q GPT2Tokenizer "
          "%s/tokenizer_config.json", test_path(t, "weights"), test_path(t, "weights"));
  test_sh(t, "grep -q '\"eos_token_id\": 256' %s/generation_config.json && grep -q "
          "'\"temperature\": 0.8' %s/generation_config.json", test_path(t, "weights"),
          test_path(t, "weights"));

  /* The tokenizer lies beside the weights, so nothing else has to be said to let them write. */
  snprintf(arguments, sizeof arguments,
           "--init-from %s --prompt '1 2' --temperature 0 --sample-tokens 4 --run-dir none "
           "--device cpu", test_path(t, "weights"));
  CHECK(t, test_train(t, arguments, output, sizeof output) == 0);
  CHECK(t, strncmp(output, "1 2", 3) == 0 && test_times(output, "\n") == 1);
  CHECK(t, access("runs", F_OK) != 0 || test_times(output, "run_") == 0);
  setenv("NCCL_LOGS", "1", 1);
  snprintf(arguments, sizeof arguments, "--init-from %s --val '%s' --run-dir none --device cpu",
           test_path(t, "weights"), test_path(t, "x_val_0.bin"));
  CHECK(t, test_train(t, arguments, output, sizeof output) == 1);
  unsetenv("NCCL_LOGS");
  CHECK(t, strstr(output, "NCCL_LOGS=1 writes into the run directory") != NULL);
  /* The weights know the model: flags may repeat that, and not say otherwise. */
  static const char *const said[][2] = {
      {"--context 8", "--context says context=8, but the weights in "},
      {"--channels 32 --vocab-size 300", "have vocab=257: leave it out, or name other weights"},
      {"--model gpt2", "--model says layers=12, but the weights in "},
      {"--model gpt2 --layers 1", "--model says channels=768, but the weights in "},
      {"--model gpt2 --layers 1 --channels 32 --heads 4 --context 16", "1"},
      {"--channels 32 --vocab-size 257", "1"}};
  for (int i = 0; i < 6; i++) {
    snprintf(arguments, sizeof arguments, "--init-from %s --prompt 1 --sample-tokens 1 --run-dir "
             "none --device cpu %s", test_path(t, "weights"), said[i][0]);
    CHECK(t, test_train(t, arguments, output, sizeof output) == (i < 4));
    CHECK(t, strstr(output, said[i][1]) != NULL);
  }
}

/* A training without --save-weights leaves its weights in the run directory; "none" leaves none. */
static void test_train_weights(g2z_test *t) {
  char output[16384], arguments[1800];
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_run_shard(t, "x_train_0.bin", 2000);
  for (int none = 0; none < 2; none++) {
    snprintf(arguments, sizeof arguments,
             "--train '%s' --vocab-size 257 --device cpu --layers 1 --channels 32 --heads 4 "
             "--context 16 --steps 3 --save-every 1 --keep 2 --sample-tokens 0 --run-dir %s%s",
             test_path(t, "x_train_*.bin"), test_path(t, none ? "two" : "one"),
             none ? " --save-weights none" : "");
    CHECK(t, test_train(t, arguments, output, sizeof output) == 0);
  }
  CHECK(t, access(test_path(t, "one/weights/model.safetensors"), R_OK) == 0);
  CHECK(t, access(test_path(t, "one/weights/config.json"), R_OK) == 0);
  CHECK(t, access(test_path(t, "one/step-000003/tokenizer_config.json"), R_OK) == 0);
  CHECK(t, access(test_path(t, "one/step-000002/merges.txt"), R_OK) == 0);
  CHECK(t, test_files_count(t, "one/step-") == 2); /* what is pruned goes with its tokenizer */
  test_sh(t, "grep -q '\"attn_pdrop\": 0,' %s/one/weights/config.json%s", t->directory, "");
  CHECK(t, access(test_path(t, "two/weights"), F_OK) != 0 && access("none", F_OK) != 0);
}

/* Waiting threads sleep without a variable of the user's, and as a variable says. */
static void test_train_waits(g2z_test *t) {
#ifdef _OPENMP
  static const char *const before[] = {NULL, "active"};
  char output[16384], arguments[1800];
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  const char *set = getenv("OMP_WAIT_POLICY");
  char *saved = set ? strdup(set) : NULL;
  test_run_shard(t, "x_train_0.bin", 2000);
  for (int i = 0; i < 2; i++) {
    const char *path = test_path(t, i ? "two/launcher_metadata.json" : "one/launcher_metadata.json");
    char *text;
    size_t bytes;
    if (before[i]) setenv("OMP_WAIT_POLICY", before[i], 1);
    else unsetenv("OMP_WAIT_POLICY");
    snprintf(arguments, sizeof arguments,
             "--train '%s' --vocab-size 257 --device cpu --layers 1 --channels 32 --heads 4 "
             "--context 16 --steps 2 --sample-tokens 0 --run-dir %s",
             test_path(t, "x_train_*.bin"), test_path(t, i ? "two" : "one"));
    CHECK(t, test_train(t, arguments, output, sizeof output) == 0);
    REQUIRE_OK(t, g2z_read_file(&t->services, path, 1 << 20, &text, &bytes));
    CHECK(t, strstr(text, i ? "\"OMP_WAIT_POLICY\": \"active\""
                            : "\"OMP_WAIT_POLICY\": \"passive\"") != NULL);
    g2z_release(&t->services, text);
  }
  if (saved) setenv("OMP_WAIT_POLICY", saved, 1);
  else unsetenv("OMP_WAIT_POLICY");
  free(saved);
#else
  SKIP(t, "this build has no OpenMP");
#endif
}

/* ./train on a terminal of so many columns; what it printed there. */
static int test_train_terminal(g2z_test *t, int columns, const char *arguments, char *output,
                               size_t room) {
  struct winsize size;
  size_t used = 0;
  ssize_t got;
  char command[2048];
  int status = -1, master = posix_openpt(O_RDWR | O_NOCTTY);
  CHECK(t, master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
  int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
  memset(&size, 0, sizeof size);
  size.ws_row = 24;
  size.ws_col = (unsigned short)columns;
  CHECK(t, terminal >= 0 && ioctl(terminal, TIOCSWINSZ, &size) == 0);
  const char *program = getenv("G2Z_TRAIN");
  snprintf(command, sizeof command, "exec %s %s", program ? program : "./train", arguments);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    dup2(terminal, STDOUT_FILENO);
    dup2(terminal, STDERR_FILENO);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
  }
  close(terminal);
  while ((got = read(master, output + used, room - 1 - used)) > 0) used += (size_t)got;
  output[used] = 0;
  close(master);
  CHECK(t, waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* On a terminal steps share one line, which never wraps; validations are lines of their own. */
static void test_train_console(g2z_test *t) {
  static const int widths[] = {80, 40};
  static char output[1 << 20];
  char arguments[1800];
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_run_shard(t, "x_train_0.bin", 2000);
  test_run_shard(t, "x_val_0.bin", 2000);
  for (int i = 0; i < 2; i++) {
    int longest = 0, steps = 0, lines = 0, vals = 0, column = 0;
    snprintf(arguments, sizeof arguments,
             "--train '%s' --val '%s' --vocab-size 257 --device cpu --layers 2 --channels 64 "
             "--heads 4 --context 32 --batch 4 --steps 300 --val-every 150 --val-steps 1 "
             "--sample-tokens 0 --run-dir none",
             test_path(t, "x_train_*.bin"), test_path(t, "x_val_*.bin"));
    CHECK(t, test_train_terminal(t, widths[i], arguments, output, sizeof output) == 0);
    for (const char *c = output; *c; c++) {
      if (strncmp(c, "step ", 5) == 0 && column == 0) {
        const int line = (int)strcspn(c, "\r\n"), own = strncmp(c + line, "\r\n", 2) == 0;
        steps++;
        lines += own;
        vals += own && strstr(c, "val loss") && strstr(c, "val loss") < c + line;
        if (!own && line > longest) longest = line;
      }
      column = *c == '\r' || *c == '\n' ? 0 : column + 1;
    }
    CHECK(t, longest > 20 && longest < widths[i]);
    CHECK(t, steps > lines && steps < 300); /* some were replaced, and not each was drawn */
    CHECK(t, vals >= 2 && lines == vals + 1);
    CHECK(t, strstr(output, "\nstep 300/300 | loss ") || strstr(output, "\rstep 300/300 | loss "));
  }
}

/* What make would do in a directory whose name has a space. */
static void test_make_space(g2z_test *t) {
  char line[1500], output[8192];
  if (access("Makefile", R_OK) != 0) SKIP(t, "there is no Makefile: run it in the repository");
  if (test_shell("make --version", output, sizeof output) != 0) SKIP(t, "there is no make");
  snprintf(line, sizeof line,
           "mkdir '%s/a b' && cp Makefile '%s/a b' && cd '%s/a b' && touch gpt2_zero.h train.cu "
           "bench.cu prepare_data.c && env -u MAKEFLAGS make -n NVCC= all 2>&1",
           t->directory, t->directory, t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 0);
  CHECK(t, strstr(output, " bench.cu -o bench ") && strstr(output, " train.cu -o train "));
}

/* examples/minimal.cu beside the header and nothing else: it trains, goes on from its checkpoint,
 * and does so on two ranks; what it is not given is told. */
static void test_example_minimal(g2z_test *t) {
  char line[1500], output[8192];
  if (access("examples/minimal.cu", R_OK) != 0) SKIP(t, "there are no examples here");
  if (test_shell("cc --version", output, sizeof output) != 0) SKIP(t, "there is no cc");
  test_run_shard(t, "digits.bin", 2000);
  snprintf(line, sizeof line, "cp examples/minimal.cu gpt2_zero.h '%s' && cd '%s' && cc -O1 "
           "-Wall -Wextra -Werror -x c minimal.cu -o minimal -lm -lpthread 2>&1", t->directory,
           t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 0);
  snprintf(line, sizeof line, "cd '%s' && ./minimal digits.bin 6 2 16 1 32 2>&1", t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 0);
  CHECK(t, strstr(output, "step 1: loss 10.") && strstr(output, "step 6: loss "));
  snprintf(line, sizeof line, "cd '%s' && RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_PORT=29431 "
           "./minimal digits.bin 9 2 16 1 32 2>&1 & cd '%s' && RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 "
           "MASTER_PORT=29431 ./minimal digits.bin 9 2 16 1 32 2>&1 && wait $!", t->directory,
           t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 0);
  CHECK(t, !strstr(output, "step 5: ") && strstr(output, "step 7: ") && strstr(output, "step 9: "));
  snprintf(line, sizeof line, "cd '%s' && ls -d minimal-step-000006 minimal-step-000009",
           t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 0);
  snprintf(line, sizeof line, "cd '%s' && ./minimal digits.bin 6 x 2>&1", t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 1 && strstr(output, "use: ./minimal SHARDS"));
  snprintf(line, sizeof line, "cd '%s' && ./minimal none.bin 2>&1", t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 1 && strstr(output, "matches \"none.bin\""));
}

/* examples/finetune.sh on weights that ./train wrote: the tuned model completes a prompt as its
 * examples do, and ends there; what is not there is told, and nothing is written over. */
static void test_example_finetune(g2z_test *t) {
  static const struct { const char *arguments, *says; } bad[] = {
      {"$D/w $D/d.jsonl $D/out", "use: examples/finetune.sh WEIGHTS DATA.jsonl OUT PROMPT"},
      {"$D/w $D/d.jsonl $D/out '7>'", "out is there: name a new directory"},
      {"$D $D/d.jsonl $D/new '7>'", " has no config.json"},
      {"$D/w $D/none.jsonl $D/new '7>'", "there is no file "},
      {"$D/bare $D/d.jsonl $D/new '7>'", "bare has neither merges.txt nor tokenizer.json"},
      {"$D/w $D/text.jsonl $D/new '7>'", "text.jsonl, line 1: no text in a field \"prompt\""},
      {"$D/w $D/d.jsonl $D/new2 '7>' --colour x", "there is no flag --colour"}};
  char line[2000], output[16384];
  if (access("examples/finetune.sh", R_OK) != 0) SKIP(t, "there are no examples here");
  PREPARE_OR_SKIP(t);
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  FILE *file = fopen(test_path(t, "d.jsonl"), "w");
  REQUIRE_OK(t, file ? G2Z_OK : G2Z_IO);
  for (int i = 0; i < 400; i++) /* of two lengths, so that sequences begin at every token */
    fprintf(file, i % 3 ? "{\"prompt\": \"%d>\", \"completion\": \"%c%c.\"}\n"
                        : "{\"prompt\": \"%d>\", \"completion\": \"%c.\"}\n",
            i % 9, 'a' + i % 9, 'k' + i % 9);
  CHECK(t, fclose(file) == 0 && mkdir(test_path(t, "bare"), 0700) == 0);
  test_write_file(t, test_path(t, "bare/config.json"), "{}", 2);
  test_write_file(t, test_path(t, "text.jsonl"), "{\"text\": \"a\"}", 13);
  test_write_file(t, test_path(t, "bytes.bpe"), "#version: 0.2\n", 14);
  CHECK(t, test_prepare(t, "", "--vocab $D/bytes.bpe --field completion --out $D/base $D/d.jsonl")
               == 0);
  snprintf(line, sizeof line,
           "--train '%s/base/d_train_*.bin' --vocab '%s/bytes.bpe' --layers 1 --channels 32 "
           "--heads 2 --context 16 --max-train-steps 2 --run-dir none --sample-tokens 0 "
           "--save-weights '%s/w'",
           t->directory, t->directory, t->directory);
  CHECK(t, test_train(t, line, output, sizeof output) == 0);
  snprintf(line, sizeof line, "D='%s'; examples/finetune.sh $D/w $D/d.jsonl $D/out '7>' --lr 1e-2 "
           "--epochs 20 2>&1", t->directory);
  int code = test_shell(line, output, sizeof output);
  t->checks++;
  if (code != 0 || !strstr(output, "\n7>hr.\n") ||
      !strstr(output, "best validation loss 0.0"))
    test_fail(t, __FILE__, __LINE__, "finetune.sh: exit code %d: %s", code, output);
  CHECK(t, strstr(output, "360 documents, 2040 tokens, 1320 of them count") != NULL);
  CHECK(t, access(test_path(t, "out/weights/model.safetensors"), R_OK) == 0);
  CHECK(t, access(test_path(t, "out/run/RUN_COMPLETE.txt"), R_OK) == 0);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    snprintf(line, sizeof line, "D='%s'; examples/finetune.sh %s 2>&1", t->directory,
             bad[i].arguments);
    code = test_shell(line, output, sizeof output);
    t->checks++;
    if (code != 1 || !strstr(output, bad[i].says))
      test_fail(t, __FILE__, __LINE__, "%s: exit code %d: %s", bad[i].arguments, code, output);
  }
}

/* The files of both runs say the same, but for what a clock puts into them. */
static void test_runs_equal(g2z_test *t, const char *one, const char *two) {
  static const char *const keys[] = {"\"epoch_idx\"", "\"steps\"", "\"micro_steps\"",
                                     "\"optimizer_steps\"", "\"tokens_processed_global\"",
                                     "\"train_loss_avg_global\"", "\"val_loss_avg_global\"",
                                     "\"best_val_loss\"", "\"reason\""};
  size_t bytes;
  char *left = test_run_read(t, one, "metrics.jsonl", &bytes), *end_left = NULL;
  char *right = test_run_read(t, two, "metrics.jsonl", &bytes), *end_right = NULL;
  for (int i = 0; i < 2; i++) {
    char *text = i ? right : left;
    for (char *at = text; at && (at = strstr(at, "\"save_ms\"")) != NULL; at++) {
      char *line = at; /* a kill right behind the rename costs this line, and nothing else */
      while (line > text && line[-1] != '\n') line--;
      memset(line, ' ', strcspn(line, "\n"));
    }
    if (text) test_run_untimed(text);
  }
  char *word = left ? strtok_r(left, " \n", &end_left) : NULL;
  char *other = right ? strtok_r(right, " \n", &end_right) : NULL;
  int words = 0;
  for (; word && other && strcmp(word, other) == 0; words++) {
    word = strtok_r(NULL, " \n", &end_left);
    other = strtok_r(NULL, " \n", &end_right);
  }
  t->checks++;
  if (word || other || words < 40)
    test_fail(t, __FILE__, __LINE__, "metrics.jsonl of %s and %s differ at word %d: %s, %s", one, two,
              words, word ? word : "", other ? other : "");
  g2z_release(&t->services, left);
  g2z_release(&t->services, right);
  left = test_run_read(t, one, "training_metrics.json", &bytes);
  right = test_run_read(t, two, "training_metrics.json", &bytes);
  for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
    const char *a = left ? strstr(left, keys[k]) : NULL, *b = right ? strstr(right, keys[k]) : NULL;
    CHECK(t, a && b);
    for (; a && b; a = strstr(a + 1, keys[k]), b = strstr(b + 1, keys[k])) {
      size_t length = strcspn(a, "\n");
      t->checks++;
      if (strncmp(a, b, length + 1) != 0)
        test_fail(t, __FILE__, __LINE__, "%s: %.*s, %s: %.*s", one, (int)length, a, two,
                  (int)strcspn(b, "\n"), b);
    }
    CHECK(t, !a && !b);
  }
  g2z_release(&t->services, left);
  g2z_release(&t->services, right);
}

/* 8 steps in 2 epochs, validations, a sample, checkpoints behind steps 3, 4, 6 and 8. */
static void test_run_saves(g2z_test *t, test_run_setup *s, const char *run_dir) {
  test_run_prepare(t, s, run_dir);
  s->config.train.dropout = 0.1f;
  s->config.train.dtype = G2Z_FP16;
  s->config.train.optimizer.loss_scale_window = 3;
  s->config.save_every = 3;
  s->config.save_epochs = 1;
  s->config.sample_every = 2;
}

static char test_run_warning[1024]; /* the last one */
static void test_run_warned(void *user, g2z_log_level level, const char *sentence) {
  (void)user;
  if (level == G2Z_LOG_WARNING)
    snprintf(test_run_warning, sizeof test_run_warning, "%s", sentence);
}

static void test_run_resume(g2z_test *t) {
  test_run_setup a, b;
  test_run_seen seen;
  char path[700];
  size_t bytes;
  test_run_saves(t, &a, "a");
  CHECK_OK(t, test_run_all(t, &a.config, &seen));
  CHECK(t, seen.steps == 8 && seen.saved == 4 && test_files_count(t, "a/step-") == 4);
  /* A crash behind step 7: the checkpoint of step 6 is the last. */
  test_run_saves(t, &b, "b");
  test_sh(t, "cp -r '%s' '%s'", a.run_dir, b.run_dir);
  test_sh(t, "cd '%s' && rm -r step-000008 RUN_COMPLETE.txt training_metrics.json weights && "
             "mkdir step-000009.partial && printf '{\"step\": 9, \"los' >> metrics.jsonl%s",
             b.run_dir, "");
  b.config.resume = "latest";
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 2 && seen.last_step == 8 && seen.saved == 1);
  test_runs_equal(t, a.run_dir, b.run_dir);
  test_sh(t, "cd '%s' && for f in weights step-000008; do diff -r -x note.json $f '%s'/$f || "
             "exit 1; done", a.run_dir, b.run_dir);
  CHECK(t, test_files_count(t, "b/*.partial") == 0);
  CHECK(t, access(test_path(t, "b/RUN_COMPLETE.txt"), F_OK) == 0);
  char *log = test_run_read(t, b.run_dir, "train.log", &bytes);
  CHECK(t, test_times(log, "step 7/8 | loss") == 1 && test_times(log, "step 8/8 | loss") == 1);
  CHECK(t, test_times(log, "step 3/8 | loss") == 1 && test_times(log, "sample after") == 4);
  CHECK(t, log && strstr(log, "resumed behind step 6, from "));
  g2z_release(&t->services, log);

  /* From the middle of an epoch; by path; what comes later is gone. */
  test_sh(t, "cd '%s' && rm -r step-000004 step-000006 step-000008%s", b.run_dir, "");
  snprintf(path, sizeof path, "%s/step-000003/", b.run_dir);
  b.config.resume = path;
  b.config.keep = 2;
  /* What somebody put beside a checkpoint's files stays when they go, and that is told. */
  test_sh(t, "cd '%s' && touch step-000003/optimizer-00001-of-00001.txt && mkdir step-000003/eval"
             "%s", b.run_dir, "");
  t->services.log = test_run_warned;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  t->services.log = NULL;
  CHECK(t, strstr(test_run_warning, "b/step-000003.partial stays: ") != NULL);
  test_sh(t, "cd '%s' && rmdir step-000003.partial/eval && rm step-000003.partial/*.txt && "
             "rmdir step-000003.partial%s", b.run_dir, "");
  CHECK(t, seen.steps == 5 && seen.saved == 3);
  test_runs_equal(t, a.run_dir, b.run_dir);
  CHECK(t, test_files_count(t, "b/step-") == 2 && test_files_count(t, "b/step-000006") == 1);
  test_sh(t, "diff -r -x note.json '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);

  /* A run that ended has nothing to do; a longer one goes on. */
  b.config.resume = "latest";
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 0 && seen.done && access(test_path(t, "b/RUN_COMPLETE.txt"), F_OK) == 0);
  log = test_run_read(t, b.run_dir, "train.log", &bytes);
  CHECK(t, test_times(log, "no step is left: the run has 8 steps, and the checkpoint is of step 8; "
                           "to train on, give more than --epochs 2") == 1);
  g2z_release(&t->services, log);
  test_runs_equal(t, a.run_dir, b.run_dir);
  b.config.epochs = 3;
  /* Of a checkpoint elsewhere the link gives way, and nothing in it. */
  test_sh(t, "cd '%s' && mv step-000006 ../moved && ln -s ../moved step-000006%s", b.run_dir, "");
  t->services.log = test_run_warned;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  t->services.log = NULL;
  CHECK(t, seen.steps == 4 && seen.last_step == 12);
  CHECK(t, strstr(test_run_warning, "b/step-000006.partial stays: Not a directory") != NULL);
  test_sh(t, "diff -r -x note.json '%s'/step-000006 '%s'/../moved", a.run_dir, b.run_dir);

  /* A checkpoint of another directory begins a run of its own. */
  test_run_saves(t, &b, "c");
  snprintf(path, sizeof path, "%s/step-000006", a.run_dir);
  b.config.resume = path;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 2 && seen.last_step == 8);
  test_sh(t, "diff -r -x note.json '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);
  CHECK(t, test_files_count(t, "c/step-") == 1);

  /* Its weights are Hugging Face's form, and a start as any other. */
  double val_loss = seen.val_loss;
  snprintf(path, sizeof path, "%s/step-000008", a.run_dir);
  test_run_prepare(t, &b, "unused");
  b.config.train.dtype = G2Z_FP16;
  b.config.train.init_from = path;
  b.config.train.train_glob = NULL;
  b.config.run_dir = b.config.save_weights = NULL;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK_NEAR(t, seen.val_loss, val_loss, 1e-9);

  /* Such a run, taken up once more, counts its own tokens and the data's epochs. */
  test_run_saves(t, &b, "e");
  snprintf(path, sizeof path, "%s/step-000004", a.run_dir);
  b.config.resume = path;
  b.config.max_train_steps = 6;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  b.config.max_train_steps = 0;
  b.config.resume = "latest";
  for (int epochs = 2; epochs <= 3; epochs++) {
    b.config.epochs = epochs;
    CHECK_OK(t, test_run_all(t, &b.config, &seen));
    CHECK(t, seen.steps == (epochs == 2 ? 2 : 4));
    log = test_run_read(t, b.run_dir, "training_metrics.json", &bytes);
    CHECK(t, test_times(log, "\"epoch_idx\"") == epochs - 1);
    CHECK(t, test_times(log, "\"tokens_processed_global\": 512,") == epochs - 1);
    CHECK(t, test_times(log, "\"epoch_idx\": 1,") == 1);
    CHECK(t, test_times(log, "\"epoch_idx\": 2,") == epochs - 2);
    g2z_release(&t->services, log);
  }

  /* Killed before it saved, it begins with that checkpoint again, which is not its own. */
  test_run_saves(t, &b, "f");
  snprintf(path, sizeof path, "%s/step-000004", a.run_dir);
  b.config.resume = path;
  b.config.save_every = b.config.save_epochs = 0;
  for (int last = 5; last >= 4; last--) {
    b.config.max_train_steps = last;
    b.config.save_weights = NULL;
    CHECK_OK(t, test_run_all(t, &b.config, &seen));
    CHECK(t, seen.steps == last - 4);
    log = test_run_read(t, b.run_dir, "RUN_COMPLETE.txt", &bytes);
    CHECK(t, test_times(log, "checkpoint_path=none") == 1);
    g2z_release(&t->services, log);
    b.config.resume = "latest";
  }
  test_sh(t, "mv '%s'/step-000004 '%s'/away", a.run_dir, a.run_dir);
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_IO, &t->services,
               "a/step-000004, which is not there any more, and has no checkpoint of its own");
  test_sh(t, "mv '%s'/away '%s'/step-000004", a.run_dir, a.run_dir);
  b.config.max_train_steps = 0;
  b.config.save_epochs = 1;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 4 && test_files_count(t, "f/step-") == 1);
  test_sh(t, "diff -r -x note.json '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);

  /* Of 32 sequences 24 were read; 8 are less than a step of 12, so that the epoch ends at once. */
  for (int i = 0; i < 3; i++) {
    test_run_saves(t, &b, i ? "h" : "g");
    if (i == 1) test_sh(t, "cp -r '%s' '%s'", a.run_dir, b.run_dir);
    if (i == 1) test_sh(t, "rm -r '%s'/step-*[4-8]%s", b.run_dir, "");
    if (i == 2) test_sh(t, "rm -r '%s'/step-000005%s", b.run_dir, "");
    snprintf(path, sizeof path, "%s/step-000003", a.run_dir);
    b.config.resume = i ? "latest" : path;
    b.config.train.accum = 3;
    CHECK_OK(t, test_run_all(t, &b.config, &seen));
    CHECK(t, seen.steps == 2 && seen.validations == 2 && seen.saved == (i ? 1 : 2));
    CHECK(t, test_files_count(t, i ? "h/step-" : "g/step-") == 2);
    for (int file = 0; file < 2; file++) {
      log = test_run_read(t, b.run_dir, file ? "training_metrics.json" : "metrics.jsonl", &bytes);
      CHECK(t, test_times(log, file ? "\"epoch_idx\": 0," : "\"epoch\": 0,") == 1);
      CHECK(t, test_times(log, file ? "\"epoch_idx\": 1," : "\"epoch\": 1,") == 1);
      CHECK(t, test_times(log, "\"steps\": 3,") == (i && file));
      g2z_release(&t->services, log);
    }
  }

  /* No checkpoint yet: from the beginning, over what a crash has left. */
  test_run_saves(t, &b, "d");
  b.config.resume = "latest";
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 8);
  test_runs_equal(t, a.run_dir, b.run_dir);
  test_sh(t, "rm -r '%s'/step-*%s", b.run_dir, "");
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 8);
  test_runs_equal(t, a.run_dir, b.run_dir);
  log = test_run_read(t, b.run_dir, "train.log", &bytes);
  CHECK(t, test_times(log, "no checkpoint in ") == 1 && test_times(log, "step 1/8 | loss") == 1);
  g2z_release(&t->services, log);
}

/* A copy of the run in `from`, and a shell command in it. */
static void test_run_copy(g2z_test *t, const char *from, const char *to, const char *command) {
  char format[700];
  snprintf(format, sizeof format, "rm -rf '%%2$s' && cp -r '%%1$s' '%%2$s' && cd '%%2$s' && %.500s",
           command);
  test_sh(t, format, from, to);
}

/* Lines of metrics.jsonl that a crash or a hand has damaged: none vanishes without a word. */
static void test_run_resume_torn(g2z_test *t) {
  test_run_setup a, b;
  test_run_seen seen;
  size_t bytes;
  char part[600];
  test_run_saves(t, &a, "a");
  CHECK_OK(t, test_run_all(t, &a.config, &seen));
  test_run_saves(t, &b, "b");
  b.config.resume = "latest";
  t->services.log = test_run_warned;
  /* Torn behind what the checkpoint counts on: nothing is missing. */
  test_run_copy(t, a.run_dir, b.run_dir, "printf '{\"step\": 8, \"val' >> metrics.jsonl");
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  test_runs_equal(t, a.run_dir, b.run_dir);
  /* Damage before that stays as it is; the page, which cannot read it, says so, and no sum suffers. */
  test_run_copy(t, a.run_dir, b.run_dir, "sed -i '2s/:/;/' metrics.jsonl");
  test_run_warning[0] = 0;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, strstr(test_run_warning, "no report.html: ") && strstr(test_run_warning, "line 2: "));
  test_sh(t, "cd '%s' && sed -i '2s/;/:/' metrics.jsonl%s", b.run_dir, "");
  test_runs_equal(t, a.run_dir, b.run_dir);
  /* Where the length says nothing, steps do; then a damaged line is named, and nothing touched. */
  static const char *const damages[] = {"sed -i '2s/:/;;/' metrics.jsonl",
                                        "sed -i '2s/.*/{\"loss\": 1}/' metrics.jsonl",
                                        "sed -i '2s/.*//' metrics.jsonl"};
  for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
    test_run_copy(t, a.run_dir, b.run_dir, damages[i]);
    test_sh(t, "cp '%s/metrics.jsonl' '%s/damaged'", b.run_dir, t->directory);
    snprintf(part, sizeof part, "mend it, or delete it: sed -i 2d %.200s/metrics.jsonl", b.run_dir);
    CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_FORMAT, &t->services, part);
    CHECK(t, strstr(t->services.error, "b/metrics.jsonl, line 2: ") != NULL);
    test_sh(t, "cmp '%s/metrics.jsonl' '%s/damaged'", b.run_dir, t->directory);
  }
  /* The remedy, as the sentence says it, for a line that no curve is made of. */
  char *text = test_run_read(t, a.run_dir, "metrics.jsonl", &bytes);
  int line = 1;
  const char *saved = text ? strstr(text, "\"save_ms\"") : NULL;
  for (const char *c = text; saved && c < saved; c++) line += *c == '\n';
  g2z_release(&t->services, text);
  snprintf(part, sizeof part, "sed -i '%ds/{/[[/' metrics.jsonl", line);
  test_run_copy(t, a.run_dir, b.run_dir, part);
  snprintf(part, sizeof part, "line %d: ", line);
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_FORMAT, &t->services, part);
  const char *remedy = strstr(t->services.error, "sed -i");
  snprintf(part, sizeof part, "%s", remedy ? remedy : "false");
  test_sh(t, "%s && true '%s'", part, "");
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  test_runs_equal(t, a.run_dir, b.run_dir);
  /* A log that is gone is missed. */
  test_run_copy(t, a.run_dir, b.run_dir, "rm metrics.jsonl");
  test_run_warning[0] = 0;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, strstr(test_run_warning, "metrics.jsonl is not as it was when step 8 was ") != NULL);
  t->services.log = NULL;
}

/* "latest" is the last checkpoint that is whole. */
static void test_run_resume_latest(g2z_test *t) {
  static const struct { const char *damage, *why; } cases[] = {
      {"printf x | dd of=step-000008/model.safetensors bs=1 seek=2000 conv=notrunc 2> /dev/null",
       "the file is damaged"},
      {"truncate -s -1 step-000008/optimizer-00000-of-00001.safetensors", "it was cut or replaced"},
      {"rm step-000008/tuning.txt", "has no tuning.txt, which belongs to it"},
      {"rm step-000008/trainer_state.json", "has weights but no trainer_state.json"},
      {"truncate -s 700 step-000008/trainer_state.json", "step-000008"},
      {"rm -r step-000008 && mkdir step-000008", "has no trainer_state.json"},
      {"rm -r step-000008 && touch step-000008", "has no trainer_state.json"},
      {"rm step-000008/tuning.txt && mkfifo step-000008/tuning.txt", "tuning.txt is a FIFO: copy the checkpoint again"}};
  test_run_setup a, b;
  test_run_seen seen;
  test_run_saves(t, &a, "a");
  CHECK_OK(t, test_run_all(t, &a.config, &seen));
  test_run_saves(t, &b, "b");
  b.config.resume = "latest";
  alarm(120);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_run_copy(t, a.run_dir, b.run_dir, cases[i].damage);
    t->services.log = test_run_warned;
    CHECK_OK(t, test_run_all(t, &b.config, &seen));
    t->services.log = NULL;
    CHECK(t, strstr(test_run_warning, "b/step-000008 is passed over: ") != NULL);
    CHECK(t, strstr(test_run_warning, cases[i].why) != NULL);
    CHECK(t, seen.steps == 2 && seen.last_step == 8 && seen.saved == 1);
    CHECK(t, access(test_path(t, "b/step-000008.damaged"), F_OK) == 0);
    test_runs_equal(t, a.run_dir, b.run_dir);
    test_sh(t, "diff -r -x note.json '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);
  }
  alarm(0);
  /* Several in turn; that which is named is not replaced by another. */
  test_run_copy(t, a.run_dir, b.run_dir, "rm step-00000[468]/model.safetensors");
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 5 && test_files_count(t, "b/*.damaged") == 3);
  char path[700];
  test_run_copy(t, a.run_dir, b.run_dir, "rm step-000008/model.safetensors");
  snprintf(path, sizeof path, "%s/step-000008", b.run_dir);
  b.config.resume = path;
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_FORMAT, &t->services,
               "has no model.safetensors");
  b.config.resume = "latest";
  /* None is whole: all are named, none is touched. */
  test_run_copy(t, a.run_dir, b.run_dir, "rm step-*/model.safetensors");
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_FORMAT, &t->services,
               "b is whole (step 8, step 6, step 4, step 3). ");
  CHECK(t, test_files_count(t, "b/*.damaged") == 0 && test_files_count(t, "b/step-") == 4);
  /* What is no damage ends the start: another version, another model. */
  test_run_copy(t, a.run_dir, b.run_dir,
                "sed -i 's/\"version\": 1/\"version\": 2/' step-000008/trainer_state.json");
  test_saved_sign(t, path, "config.json");
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_UNSUPPORTED, &t->services,
               "step-000008/trainer_state.json has version=2");
  test_run_copy(t, a.run_dir, b.run_dir, "true");
  b.config.train.model.heads = 1;
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
               "step-000008 was saved by a model with heads=2");
  CHECK(t, test_files_count(t, "b/*.damaged") == 0);
}

static void test_run_resume_refusals(g2z_test *t) {
  test_run_setup s;
  test_run_seen seen;
  char path[700];
  test_run_saves(t, &s, "run");
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
#define REFUSED(status, part) \
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), status, &t->services, part)
  REFUSED(G2Z_BAD_ARGUMENT, "holds a run already");
  snprintf(path, sizeof path, "%s/step-000004", s.run_dir);
  s.config.resume = path;
  REFUSED(G2Z_BAD_ARGUMENT, "holds checkpoints behind step 4, the last of step 8: resume from that");
  s.config.resume = s.run_dir;
  REFUSED(G2Z_FORMAT, "no trainer_state.json");
  s.config.resume = "latest";
  s.config.train.model.layers = 2;
  REFUSED(G2Z_BAD_ARGUMENT, "step-000008 was saved by a model with layers=1");
  s.config.train.model.layers = 1;
  s.config.resume = "";
  REFUSED(G2Z_BAD_ARGUMENT, "resume is empty: name a checkpoint");
  s.config.resume = "latest";
  s.config.run_dir = NULL;
  REFUSED(G2Z_BAD_ARGUMENT, "save_every needs a run_dir, where checkpoints stand");
  s.config.save_every = 0;
  REFUSED(G2Z_BAD_ARGUMENT, "save_epochs needs a run_dir");
  s.config.save_epochs = 0;
  REFUSED(G2Z_BAD_ARGUMENT, "resume latest needs a run_dir");
  s.config.run_dir = s.run_dir;
  s.config.resume = "latest";
  s.config.train.train_glob = NULL;
  REFUSED(G2Z_BAD_ARGUMENT, "a training is resumed with the token shards");
  s.config.train.train_glob = s.train;
  s.config.save_weights = path; /* and the checkpoint there stays one: it is resumed below */
  REFUSED(G2Z_BAD_ARGUMENT, "step-000004 is a checkpoint, whose weights belong to its other files");
  s.config.save_weights = NULL;
  uid_t self = geteuid(); /* checkpoints that cannot be listed are not none */
  CHECK(t, chmod(s.run_dir, 0333) == 0 && chmod(t->directory, 0755) == 0);
  if (self != 0 || seteuid(65534) == 0) {
    REFUSED(G2Z_IO, "cannot read the directory");
    CHECK(t, seteuid(self) == 0);
  }
  CHECK(t, chmod(s.run_dir, 0755) == 0 && chmod(t->directory, 0700) == 0);
  struct rlimit before = test_files_limit(100); /* less than the lines that are kept */
  REFUSED(G2Z_IO, "raise the limit of file sizes");
  test_files_unlimit(&before);
  CHECK(t, test_files_count(t, "run/*.partial") == 0);
#undef REFUSED
  /* None of it has touched the run. */
  size_t bytes;
  char *text = test_run_read(t, s.run_dir, "metrics.jsonl", &bytes);
  CHECK(t, test_times(text, "\"loss\"") == 8);
  g2z_release(&t->services, text);
  CHECK(t, access(test_path(t, "run/RUN_COMPLETE.txt"), F_OK) == 0);

  g2z_status status = G2Z_NO_MEMORY;
  int failed = 0;
  s.config.run_dir = NULL;
  s.config.resume = path;
  s.config.max_train_steps = 5;
  for (long at = 1; at < 5000 && status == G2Z_NO_MEMORY; at++) {
    t->fail_at = at;
    status = test_run_all(t, &s.config, &seen);
    failed += status == G2Z_NO_MEMORY;
  }
  t->fail_at = 0;
  CHECK(t, failed > 40 && status == G2Z_OK && seen.last_step == 5);
}

/* What a run said when it ended does not describe it while it goes on, and what another program
 * left under that name is no surprise in the middle of a training. */
static void test_run_goes_on(g2z_test *t) {
  static const char foreign[] = "{\"schema_version\": \"1.0\"}";
  test_run_setup s;
  test_run_seen seen;
  g2z_context *context = NULL;
  g2z_run *run = NULL;
  g2z_context_config cc = g2z_context_config_default(&t->services);
  cc.device = G2Z_DEVICE_CPU;
  test_run_saves(t, &s, "run");
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, access(test_path(t, "run/training_metrics.json"), F_OK) == 0);
  s.config.resume = "latest";
  s.config.epochs = 3;
  CHECK_OK(t, g2z_context_create(&cc, &context));
  CHECK_OK(t, g2z_run_create(context, &s.config, &run));
  CHECK(t, access(test_path(t, "run/training_metrics.json"), F_OK) != 0);
  CHECK(t, access(test_path(t, "run/RUN_COMPLETE.txt"), F_OK) != 0);
  g2z_run_free(run);
  g2z_context_free(context);
  /* One that ended inside an epoch, and is started once more, says the same of that epoch. */
  s.config.max_train_steps = 10;
  for (int i = 0; i < 2; i++) {
    size_t bytes;
    CHECK_OK(t, test_run_all(t, &s.config, &seen));
    CHECK(t, seen.steps == (i ? 0 : 2));
    char *text = test_run_read(t, s.run_dir, "training_metrics.json", &bytes);
    CHECK(t, test_times(text, "\"steps\": 4,") == 2 && test_times(text, "\"steps\": 2,") == 1);
    CHECK(t, test_times(text, "\"epoch_wall_time_sec\": 0,") == 0);
    CHECK(t, test_times(text, "\"step_time_p50_sec\": null") == 0);
    g2z_release(&t->services, text);
  }
  test_run_prepare(t, &s, "other");
  CHECK_OK(t, g2z_make_directory(&t->services, s.run_dir));
  test_write_file(t, test_path(t, "other/training_metrics.json"), foreign, sizeof foreign - 1);
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
               "holds a run already (training_metrics.json)");
  CHECK(t, access(test_path(t, "other/metrics.jsonl"), F_OK) != 0);
  /* Nor are another run's checkpoints, which its own would meet, and "latest" would take up. */
  test_sh(t, "rm '%s'/*.json && mkdir '%s'/step-000007", s.run_dir, s.run_dir);
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
               "holds a run already (step-000007)");
  CHECK(t, access(test_path(t, "other/metrics.jsonl"), F_OK) != 0);
  /* A long path is told whole. */
  char end[600];
  size_t bytes;
  snprintf(s.run_dir, sizeof s.run_dir, "%.100s/%0180d/%0180d", t->directory, 1, 2);
  s.config.save_weights = NULL;
  s.config.save_epochs = 1;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  snprintf(end, sizeof end, "checkpoint_path=%s/step-000008 world_size=1", s.run_dir);
  char *text = test_run_read(t, s.run_dir, "RUN_COMPLETE.txt", &bytes);
  CHECK(t, text && strstr(text, end));
  g2z_release(&t->services, text);
}

/* Stopped behind each of the first steps, and resumed. */
static void test_run_stop(g2z_test *t) {
  test_run_setup a, b;
  test_run_seen seen;
  test_run_saves(t, &a, "a");
  CHECK_OK(t, test_run_all(t, &a.config, &seen));
  for (int at = 1; at <= 4; at += 3) {
    char name[16];
    size_t bytes;
    snprintf(name, sizeof name, "b%d", at);
    test_run_saves(t, &b, name);
    test_run_stop_at = at;
    g2z_status status = test_run_all(t, &b.config, &seen);
    test_run_stop_at = 0;
    int64_t last = seen.last_step;
    CHECK_STATUS(t, status, G2Z_STOPPED, &t->services, "by SIGTERM: resume goes on with the checkp");
    CHECK(t, last > at && last <= at + 3); /* its loss is known one step late */
    char *text = test_run_read(t, b.run_dir, "training_metrics.json", &bytes);
    CHECK(t, text && strstr(text, "\"reason\": \"signal\"") && strstr(text, "\"SIGTERM\""));
    CHECK(t, text && strstr(text, "\"run_complete_file\": null"));
    g2z_release(&t->services, text);
    char *path = test_run_read(t, b.run_dir, "metrics.jsonl", &bytes);
    CHECK(t, test_times(path, "\"loss\"") == (int)last);
    g2z_release(&t->services, path);
    snprintf(name, sizeof name, "step-%06d", (int)last);
    test_sh(t, "cd '%s' && [ -d %s ] && [ ! -e RUN_COMPLETE.txt ]", b.run_dir, name);
    b.config.resume = "latest";
    CHECK_OK(t, test_run_all(t, &b.config, &seen));
    CHECK(t, seen.steps == 8 - (int)last);
    test_sh(t, "diff -r -x note.json '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);
    test_sh(t, "diff -r -x note.json '%s'/weights '%s'/weights", a.run_dir, b.run_dir);
  }
}

/* ----- ./train, with real signals and real ranks ----- */

static void test_nap(double seconds) {
  struct timespec pause;
  pause.tv_sec = (time_t)seconds;
  pause.tv_nsec = (long)((seconds - (double)pause.tv_sec) * 1e9);
  nanosleep(&pause, NULL);
}

/* Starts ./train as rank `rank` of ranks->world, through the shell, which runs `before` first. */
static void test_train_start(g2z_test *t, test_ranks *ranks, int rank, const char *before,
                             const char *arguments) {
  const char *program = getenv("G2Z_TRAIN");
  char command[3000], here[512], shell[] = "sh", flag[] = "-c", text[6][64];
  char *argv[] = {shell, flag, command, NULL};
  if (!getcwd(here, sizeof here)) here[0] = 0;
  snprintf(command, sizeof command, "%.900s exec '%.400s/%.200s' %.1400s", before, here,
           program ? program : "train", arguments);
  snprintf(text[0], 64, "RANK=%d", rank);
  snprintf(text[1], 64, "WORLD_SIZE=%d", ranks->world);
  snprintf(text[2], 64, "MASTER_ADDR=127.0.0.1");
  snprintf(text[3], 64, "MASTER_PORT=%d", ranks->port);
  snprintf(text[4], 64, "OMP_NUM_THREADS=1");
  snprintf(text[5], 64, "G2Z_RUN_ID=test_%d_%d", (int)getpid(), ranks->port);
  const char *extra[] = {text[0], text[1], text[2], text[3], text[4], text[5]};
  char **environment = test_ranks_environment(extra, 6);
  ranks->pid[rank] = test_ranks_exec(t, "/bin/sh", argv, environment,
                                     test_ranks_file(t, ranks, rank));
  free(environment);
}

static void test_train_ranks(g2z_test *t, test_ranks *ranks, int world, const char *arguments,
                             double seconds) {
  test_ranks_open(ranks, world);
  for (int rank = 0; rank < world; rank++) test_train_start(t, ranks, rank, "", arguments);
  test_ranks_wait(t, ranks, seconds);
}

/* What all of these runs have in common. */
static void test_train_arguments(g2z_test *t, char *out, size_t room, const char *run_dir) {
  if (access(test_path(t, "digits_train.bin"), R_OK) != 0) {
    test_run_shard(t, "digits_train.bin", 2001);
    test_run_shard(t, "digits_val.bin", 500);
  }
  snprintf(out, room, "--train '%s' --val '%s' --vocab-size 257 --device cpu --layers 2 --heads 2 "
           "--channels 32 --context 16 --lr 1e-2 --dropout 0.1 --sample-tokens 0 --run-dir '%s' ",
           test_path(t, "digits_train.bin"), test_path(t, "digits_val.bin"),
           test_path(t, run_dir));
}

/* Waits until a file below the test's directory has that text, for 20 seconds at most. */
static void test_wait_for(g2z_test *t, const char *name, const char *part) {
  char *text = NULL;
  size_t bytes;
  int found = 0;
  for (double end = g2z_seconds() + 20; !found && g2z_seconds() < end; test_nap(0.005)) {
    if (g2z_read_file(&t->services, test_path(t, name), 1 << 26, &text, &bytes) != G2Z_OK) continue;
    found = strstr(text, part) != NULL;
    g2z_release(&t->services, text);
  }
  CHECK(t, found);
}

static void test_train_signals(g2z_test *t) {
  static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
  static const char *const names[] = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"};
  char arguments[2000], base[1600], name[64], sentence[64], output[4096];
  test_ranks ranks;
  size_t bytes;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  void (*before)(int) = signal(SIGHUP, SIG_DFL); /* under nohup it stays ignored */
  for (int i = 0; i < 4; i++) { /* of one rank, of two; the signal reaches one */
    int world = i == 1 ? 2 : 1;
    snprintf(name, sizeof name, "run%d", i);
    test_train_arguments(t, base, sizeof base, name);
    snprintf(arguments, sizeof arguments, "%s --steps 1000000 --batch 2 --val-every 100000", base);
    test_ranks_open(&ranks, world);
    for (int rank = 0; rank < world; rank++) test_train_start(t, &ranks, rank, "", arguments);
    snprintf(name, sizeof name, "run%d/metrics.jsonl", i);
    test_wait_for(t, name, "\"step\": 5,");
    if (i == 0) { /* the directory is taken */
      snprintf(arguments, sizeof arguments, "%s --steps 5 --resume latest", base);
      CHECK(t, test_train(t, arguments, output, sizeof output) == 1);
      CHECK(t, strstr(output, "another program is at work in") != NULL);
    }
    CHECK(t, kill(ranks.pid[world - 1], numbers[i]) == 0);
    test_ranks_wait(t, &ranks, 20);
    snprintf(sentence, sizeof sentence, "by %s: resume goes on", names[i]);
    for (int rank = 0; rank < world; rank++) /* rank 0 says it for all */
      CHECK_RANK(t, &ranks, rank, 75, rank == 0 ? sentence : NULL);
    test_ranks_free(t, &ranks);
    snprintf(name, sizeof name, "run%d/step-", i);
    CHECK(t, test_files_count(t, name) == 1);
    snprintf(name, sizeof name, "run%d", i);
    char *text = test_run_read(t, test_path(t, name), "training_metrics.json", &bytes);
    snprintf(sentence, sizeof sentence, "\"signal\": \"%s\"", names[i]);
    CHECK(t, text && strstr(text, sentence));
    g2z_release(&t->services, text);
  }
  signal(SIGHUP, before);
  /* Behind step 2 it validates for ever: the first signal must wait, the second does not. */
  test_train_arguments(t, base, sizeof base, "slow");
  test_run_shard(t, "digits_val.bin", 2048);
  test_sh(t, "cd '%s' && head -c 4096 /dev/zero > raw.bin && for i in 1 2 3 4 5 6 7 8 9 "
             "10; do cat raw.bin raw.bin > raw2.bin; mv raw2.bin raw.bin; done%s",
             t->directory, "");
  snprintf(arguments, sizeof arguments, "%s --val '%s' --steps 100 --batch 1 --val-every 2 "
           "--val-steps 100000000", base, test_path(t, "raw.bin"));
  test_ranks_open(&ranks, 1);
  test_train_start(t, &ranks, 0, "", arguments);
  test_wait_for(t, "slow/metrics.jsonl", "\"step\": 2,");
  CHECK(t, kill(ranks.pid[0], SIGTERM) == 0);
  test_nap(0.7);
  CHECK(t, kill(ranks.pid[0], 0) == 0);
  CHECK(t, kill(ranks.pid[0], SIGTERM) == 0);
  test_ranks_wait(t, &ranks, 10);
  CHECK_RANK(t, &ranks, 0, 128 + SIGTERM, NULL);
  test_ranks_free(t, &ranks);
}

/* A run whose metrics, log or whole directory somebody removes under it fails, on one rank and on
 * two; and leaves no RUN_COMPLETE.txt. */
static void test_train_removed(g2z_test *t) {
  static const struct { int world; const char *flags, *command, *says; } cases[] = {
      {1, "", "rm run0/metrics.jsonl", "run0/metrics.jsonl was removed or replaced while"},
      {1, "", "mv run1/train.log run1/log && cp run1/log run1/train.log", "run1/train.log was removed"},
      {1, "--save-every 1 --keep 2", "rm -rf run2 2> /dev/null; rm -rf run2 2> /dev/null; true", "run2"},
      {2, "", "rm -r run3", "run3/metrics.jsonl was removed or replaced while"}};
  char arguments[2000], base[1600], name[64];
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  for (int i = 0; i < 4; i++) {
    snprintf(name, sizeof name, "run%d", i);
    test_train_arguments(t, base, sizeof base, name);
    snprintf(arguments, sizeof arguments, "%s --steps 20000 --batch 1 %s", base, cases[i].flags);
    test_ranks_open(&ranks, cases[i].world);
    for (int r = 0; r < cases[i].world; r++) test_train_start(t, &ranks, r, "", arguments);
    snprintf(name, sizeof name, "run%d/metrics.jsonl", i);
    test_wait_for(t, name, "\"step\": 5,");
    test_sh(t, "cd '%s' && %s", t->directory, cases[i].command);
    test_ranks_wait(t, &ranks, 20);
    for (int r = 0; r < cases[i].world; r++) CHECK_RANK(t, &ranks, r, 1, cases[i].says);
    test_ranks_free(t, &ranks);
    snprintf(name, sizeof name, "run%d/RUN_COMPLETE.txt", i);
    CHECK(t, access(test_path(t, name), F_OK) != 0);
  }
}

/* Nobody reads what it prints, or it has nowhere to print: files are as ever. */
static void test_train_unread(g2z_test *t) {
  static const char *const ways[][2] = {{"", "| head -n 1"}, {"--save-every 20", "<&- >&- 2>&-"},
                                        {"--ranks 2", "<&- >&- 2>&-"}};
  const char *program = getenv("G2Z_TRAIN");
  char base[1600], command[2000], name[64];
  size_t bytes;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  for (int i = 0; i < 3; i++) {
    snprintf(name, sizeof name, "run%d", i);
    test_train_arguments(t, base, sizeof base, name);
    snprintf(command, sizeof command, "(%s %s %s --steps 100 --batch 2 --max-val-steps 1 %s) > '%s'",
             program ? program : "./train", base, ways[i][0], ways[i][1], test_path(t, "out"));
    fflush(stdout);
    CHECK(t, system(command) == 0);
    g2z_release(&t->services, test_run_read(t, test_path(t, name), "RUN_COMPLETE.txt", &bytes));
    char *text = test_run_read(t, test_path(t, name), "metrics.jsonl", &bytes);
    int steps = 0;
    for (char *line = text, *end; line && (end = strchr(line, '\n')) != NULL; line = end + 1) {
      steps += strncmp(line, "{\"step\": ", 9) == 0 && strstr(line, "\"loss\"") != NULL &&
               strstr(line, "\"loss\"") < end;
      CHECK(t, *line == '{' && end[-1] == '}');
    }
    CHECK(t, steps == 100);
    g2z_release(&t->services, text);
  }
}

/* kill -9 while it saves every step, until it has come to the end. What is resumed each time was
 * whole, and the end is that of a run that nobody killed. */
static void test_train_killed(g2z_test *t) {
  char arguments[2000], base[1600];
  test_ranks ranks;
  uint32_t random = 11;
  int kills = 0;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_train_arguments(t, base, sizeof base, "whole");
  snprintf(arguments, sizeof arguments, "%s --steps 60 --batch 2 --save-every 1 --keep 2", base);
  test_train_ranks(t, &ranks, 1, arguments, 30);
  CHECK_RANK(t, &ranks, 0, 0, "RUN_COMPLETE");
  test_ranks_free(t, &ranks);
  test_train_arguments(t, base, sizeof base, "killed");
  snprintf(arguments, sizeof arguments, "%s --steps 60 --batch 2 --save-every 1 --keep 2 "
           "--resume latest", base);
  for (int turn = 0; turn < 11; turn++) { /* 10 kills at least 5 steps apart */
    char step[32];
    test_ranks_open(&ranks, 1);
    test_train_start(t, &ranks, 0, "", arguments);
    snprintf(step, sizeof step, "\"step\": %d,", 5 * turn + 3);
    if (turn < 10) test_wait_for(t, "killed/metrics.jsonl", step);
    test_nap(0.0001 * (test_bpe_random(&random) % 200));
    if (turn < 10) kill(ranks.pid[0], SIGKILL);
    test_ranks_wait(t, &ranks, 30);
    int code = ranks.code[0];
    kills += code == 128 + SIGKILL;
    t->checks++;
    if (code != 0 && code != 128 + SIGKILL)
      test_fail(t, __FILE__, __LINE__, "turn %d ended with %d: %s", turn, code, ranks.output[0]);
    test_ranks_free(t, &ranks);
    if (code == 0) break;
  }
  CHECK(t, kills >= 3);
  test_sh(t, "diff -r -x note.json '%s' '%s'", test_path(t, "whole/step-000060"),
             test_path(t, "killed/step-000060"));
  test_runs_equal(t, test_path(t, "whole"), test_path(t, "killed"));
}

/* Losses by step from a run's metrics.jsonl. */
static void test_train_losses(g2z_test *t, const char *run_dir, double *losses, int count) {
  size_t bytes;
  char *text = test_run_read(t, test_path(t, run_dir), "metrics.jsonl", &bytes);
  for (char *at = text; at && (at = strstr(at, "{\"step\": ")) != NULL; at++) {
    int step;
    double loss;
    if (sscanf(at, "{\"step\": %d, \"tokens\": %*d, \"loss\": %lf", &step, &loss) == 2 && step <= count)
      losses[step] = loss;
  }
  g2z_release(&t->services, text);
}

/* Both runs come to the same validation loss, and see and write the same text. */
static void test_train_views(g2z_test *t, const char *one, const char *two) {
  static const char *const parts[] = {"unigram entropy of the validation tokens: ",
                                      "sample after step 12:\n"};
  double losses[2] = {0, 0};
  size_t bytes;
  char *logs[2];
  for (int i = 0; i < 2; i++) {
    const char *run_dir = test_path(t, i ? two : one), *at;
    char *text = test_run_read(t, run_dir, "metrics.jsonl", &bytes);
    logs[i] = test_run_read(t, run_dir, "train.log", &bytes);
    at = text ? strstr(text, "\"val_loss\": ") : NULL;
    if (at) losses[i] = strtod(at + 12, NULL);
    g2z_release(&t->services, text);
  }
  CHECK(t, losses[0] > 0.1);
  CHECK_NEAR(t, losses[0], losses[1], 1e-5);
  for (int i = 0; i < 2; i++) {
    const char *a = logs[0] ? strstr(logs[0], parts[i]) : NULL;
    const char *b = logs[1] ? strstr(logs[1], parts[i]) : NULL;
    size_t length = a ? strlen(parts[i]) + strcspn(a + strlen(parts[i]), "\n") : 0;
    CHECK(t, a && b && length > strlen(parts[i]) && strncmp(a, b, length) == 0);
  }
  for (int i = 0; i < 2; i++) g2z_release(&t->services, logs[i]);
}

static void test_train_ranks_resume(g2z_test *t) {
  static const char *const stages[] = {"--zero 0", "--zero 1", "--zero 2", "--zero 3",
                                       "--strategy dp"};
  const int count = sizeof stages / sizeof *stages;
  char arguments[2000], base[1600], name[32];
  double losses[13] = {0}, resumed[13];
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  for (int stage = 0; stage < count; stage++) {
    snprintf(name, sizeof name, "four%d", stage);
    test_train_arguments(t, base, sizeof base, name);
    snprintf(arguments, sizeof arguments, "%s --layers 3 --steps 12 --batch 3 --save-every 6 "
             "%s --bucket-mb 0.02 --sample-tokens 9 --prompt 1 --temperature 0", base,
             stages[stage]);
    test_train_ranks(t, &ranks, 4, arguments, 60);
    for (int r = 0; r < 4; r++) CHECK_RANK(t, &ranks, r, 0, NULL);
    test_ranks_free(t, &ranks);
    test_train_losses(t, name, losses, 12);
    CHECK(t, losses[12] > 0 && losses[12] < losses[1] - 0.5);
    /* 12 sequences a step on 4 ranks (again), on 3, on 1; other stages. */
    for (int turn = 0; turn < 4; turn++) {
      static const struct { int world, batch, accum; } shapes[] = {
          {4, 3, 1}, {3, 4, 1}, {3, 4, 1}, {1, 12, 1}};
      char from[64];
      int world = shapes[turn].world, other = turn ? (count + turn - 2 - stage) % count : stage;
      snprintf(name, sizeof name, "again%d%d", stage, turn);
      snprintf(from, sizeof from, "four%d/step-000006", stage);
      test_train_arguments(t, base, sizeof base, name);
      snprintf(arguments, sizeof arguments, "%s --layers 3 --steps 12 --batch %d --accum %d "
               "--save-every 6 %s --bucket-mb %s --sample-tokens 9 --prompt 1 --temperature 0 "
               "--resume '%s'", base, shapes[turn].batch,
               shapes[turn].accum, stages[other], turn ? "0.03" : "0.02", test_path(t, from));
      test_train_ranks(t, &ranks, world, arguments, 60);
      for (int r = 0; r < world; r++)
        CHECK_RANK(t, &ranks, r, 0, r ? NULL : "/weights world_size=");
      test_ranks_free(t, &ranks);
      memset(resumed, 0, sizeof resumed);
      test_train_losses(t, name, resumed, 12);
      for (int step = 7; step <= 12; step++)
        CHECK_NEAR(t, resumed[step], losses[step], turn ? 1e-5 : 0);
      snprintf(from, sizeof from, "four%d", stage);
      test_train_views(t, from, name);
      snprintf(from, sizeof from, "four%d/step-000012", stage);
      char *again = (char *)malloc(600);
      snprintf(again, 600, "%s/step-000012", test_path(t, name));
      if (turn == 0) test_sh(t, "diff -r -x note.json '%s' '%s'", test_path(t, from), again);
      free(again);
    }
  }

  /* One rank's file in place of another's, and one that is missing. */
  char shard[512];
  g2z_train_config config = test_saved_config(t, shard);
  test_trainer tt;
  config.model.layers = 3;
  config.model.heads = 2;
  config.model.channels = 32;
  snprintf(base, sizeof base, "%s", test_path(t, "four1/step-000012"));
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_trainer_load(tt.trainer, base));
  test_sh(t, "cd '%s' && cp optimizer-00001-of-00004%s optimizer-00002-of-00004.safetensors", base,
          ".safetensors");
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, base), G2Z_FORMAT, &t->services,
               "/optimizer-00002-of-00004.safetensors has ");
  test_sh(t, "rm '%s/optimizer-00001-of-00004%s'", base, ".safetensors");
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, base), G2Z_FORMAT, &t->services,
               "has no optimizer-00001-of-00004.safetensors, which belongs to it");
  test_trainer_close(&tt);
}

/* One of three ranks cannot write, or writes somewhere else: all say so, and nothing is left. */
static void test_train_ranks_trouble(g2z_test *t) {
  static const struct { int rank; const char *before, *says; } cases[] = {
      {1, "trap '' XFSZ; ulimit -f 16;",
       "rank 1: cannot write run/step-000002.partial/model.safetensors.partial: File too large"},
      {0, "trap '' XFSZ; ulimit -f 16;", "File too large; raise the limit"},
      {2, "mkdir -p other; cd other;",
       "rank 2 does not see run/step-000002.partial/model.safetensors.partial, which rank 0 made: "
       "choose a directory on a file system that all ranks share"}};
  char arguments[2000], base[1600], before[600];
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_train_arguments(t, base, sizeof base, "unused");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    snprintf(arguments, sizeof arguments, "%s --run-dir run --steps 12 --batch 1 --save-every 2",
             base);
    test_ranks_open(&ranks, 3);
    for (int r = 0; r < 3; r++) {
      snprintf(before, sizeof before, "cd '%s'; %s", t->directory,
               r == cases[i].rank ? cases[i].before : "");
      test_train_start(t, &ranks, r, before, arguments);
    }
    test_ranks_wait(t, &ranks, 30);
    for (int r = 0; r < 3; r++) CHECK_RANK(t, &ranks, r, 1, cases[i].says);
    test_ranks_free(t, &ranks);
    CHECK(t, test_files_count(t, "run/step-") == 0);
    test_sh(t, "rm -r '%s/run'%s", t->directory, "");
  }
}

/* Ranks on CPUs share their host's memory: what has room once has none twice. */
static void test_train_ranks_memory(g2z_test *t) {
  char arguments[2000], base[1600], output[16384];
  size_t need[2], free_bytes, total_bytes;
  g2z_train_config config = g2z_train_config_default();
  const g2z_plan *plan;
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  CHECK_OK(t, g2z_device_memory(&t->services, G2Z_DEVICE_CPU, &free_bytes, &total_bytes));
  config.model.heads = 32;
  config.model.channels = 2048;
  config.seq = config.model.context = 16;
  config.batch = 1;
  config.dtype = G2Z_FP32;
  config.zero_stage = 0;
  for (int i = 0; i < 2; i++) {
    config.model.layers = 1 + i;
    plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
    need[i] = plan->bytes_total;
  }
  if (need[0] > free_bytes / 2) SKIP(t, "too little memory is free");
  test_train_arguments(t, base, sizeof base, "run");
  snprintf(arguments, sizeof arguments, "%s --layers %d --heads 32 --channels 2048 --batch 1 "
           "--zero 0 --steps 2", base, (int)((free_bytes * 3 / 4 - need[0]) / (need[1] - need[0])));
  snprintf(base, sizeof base, "%.1500s --dry-run", arguments);
  CHECK(t, test_train(t, base, output, sizeof output) == 0 && strstr(output, "rank: it fits"));
  snprintf(base, sizeof base, "%.1500s --dry-run --ranks 2", arguments);
  CHECK(t, test_train(t, base, output, sizeof output) == 0 && strstr(output, "IT DOES NOT FIT"));
  test_train_ranks(t, &ranks, 2, arguments, 30);
  for (int r = 0; r < 2; r++)
    CHECK_RANK(t, &ranks, r, 1, "GiB that are free for each of the 2 ranks on this host even at");
  test_ranks_free(t, &ranks);
}

/* What would have ranks wait for each other at different places is said before the first step. */
/* Both ranks take the checkpoint that rank 0 finds whole. */
static void test_train_ranks_latest(g2z_test *t) {
  char arguments[2000], base[1600];
  double losses[9] = {0}, resumed[9] = {0};
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_train_arguments(t, base, sizeof base, "run");
  snprintf(arguments, sizeof arguments, "%s --steps 8 --batch 1 --save-every 2 --resume latest",
           base);
  for (int turn = 0; turn < 2; turn++) {
    test_train_ranks(t, &ranks, 2, arguments, 60);
    for (int r = 0; r < 2; r++)
      CHECK_RANK(t, &ranks, r, 0, !turn || r ? NULL : "run/step-000008 is passed over: ");
    test_ranks_free(t, &ranks);
    test_train_losses(t, "run", turn ? resumed : losses, 8);
    if (turn == 0)
      test_sh(t, "cd '%s' && rm step-000008/model.safetensors && "
                 "truncate -s 99 step-000006/optimizer-00001-of-00002.safetensors%s",
              test_path(t, "run"), "");
  }
  CHECK(t, memcmp(losses, resumed, sizeof losses) == 0);
  CHECK(t, test_files_count(t, "run/*.damaged") == 2);
}

/* A rank that has lost the job, and whose console takes nothing more, ends with the code for that. */
static void test_train_ranks_stuck(g2z_test *t) {
  char arguments[2000], base[1600], before[300], stuck[512];
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_train_arguments(t, base, sizeof base, "stuck");
  snprintf(arguments, sizeof arguments, "%s --steps 100000 --batch 1", base);
  snprintf(stuck, sizeof stuck, "%s", test_path(t, "console"));
  CHECK(t, mkfifo(stuck, 0600) == 0);
  int console = open(stuck, O_RDWR | O_NONBLOCK);
  while (write(console, stuck, sizeof stuck) > 0) continue; /* it is full */
  snprintf(before, sizeof before, "exec 2> '%.250s';", stuck);
  test_ranks_open(&ranks, 2);
  test_train_start(t, &ranks, 0, before, arguments);
  test_train_start(t, &ranks, 1, "", arguments);
  test_wait_for(t, "stuck/metrics.jsonl", "\"step\": 3,");
  kill(ranks.pid[1], SIGKILL);
  test_ranks_wait(t, &ranks, 40);
  CHECK_RANK(t, &ranks, 0, G2Z_EXIT_LOST, NULL);
  test_ranks_free(t, &ranks);
  close(console);
}

static void test_train_ranks_differ(g2z_test *t) {
  static const struct { const char *flags, *says; } cases[] = {
      {"--val-every 4", "the config of rank 1 differs from rank 0's: \"val_every=4\" there, "
                        "\"val_every=5\" on rank 0"},
      {"--save-every 3", "\"save_every=3\" there, \"save_every=0\" on rank 0"},
      {"--prompt 1", "the prompt of rank 1 differs from rank 0's: \"1\" there, \"\" on rank 0"},
      {"--max-train-steps 7", "\"max_train_steps=7\" there, \"max_train_steps=0\" on rank 0"},
      {"--profile", "\"profile=1\" there, \"profile=0\" on rank 0"},
      {"--lr 0.010000001", "\"lr=0.010000001\" there, \"lr=0.01\" on rank 0"}};
  char arguments[2000], base[1600];
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_train_arguments(t, base, sizeof base, "differ");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_ranks_open(&ranks, 2);
    for (int r = 0; r < 2; r++) {
      snprintf(arguments, sizeof arguments, "%s --steps 12 --batch 1 --val-every 5 "
               "--sample-tokens 1 %s", base, r ? cases[i].flags : "");
      test_train_start(t, &ranks, r, "", arguments);
    }
    test_ranks_wait(t, &ranks, 30);
    for (int r = 0; r < 2; r++) CHECK_RANK(t, &ranks, r, 1, cases[i].says);
    test_ranks_free(t, &ranks);
  }
  CHECK(t, access(test_path(t, "differ"), F_OK) != 0); /* nothing was left behind */
}

/* A rank whose copy of a shard is damaged between the ends. */
static void test_train_ranks_data(g2z_test *t) {
  static const char *const flags[] = {"--train", "--val"};
  static const char *const says[] = {"the training data of rank 1 differs from rank 0's: \"hash ",
                                     "the validation data of rank 1 differs from rank 0's: \"ha"};
  char arguments[2400], base[1600];
  test_ranks ranks;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_train_arguments(t, base, sizeof base, "damaged");
  test_run_shard(t, "damaged.bin", 2001);
  test_run_shard(t, "whole.bin", 2001);
  for (size_t at = 1024 + 1800; at < 1024 + 2200; at++)
    test_files_poke(t, test_path(t, "damaged.bin"), at, 0);
  for (int i = 0; i < 2; i++) {
    test_ranks_open(&ranks, 2);
    for (int r = 0; r < 2; r++) {
      snprintf(arguments, sizeof arguments, "%s --steps 4 --batch 1 %s '%s'", base, flags[i],
               test_path(t, r ? "damaged.bin" : "whole.bin"));
      test_train_start(t, &ranks, r, "", arguments);
    }
    test_ranks_wait(t, &ranks, 30);
    for (int r = 0; r < 2; r++) CHECK_RANK(t, &ranks, r, 1, says[i]);
    test_ranks_free(t, &ranks);
  }
}

/* kill -9 of one of three ranks that nobody supervises: the others leave and name it, and the job
 * that is started again goes on, to the same end. */
static void test_train_ranks_killed(g2z_test *t) {
  char arguments[2000], base[1600], said[64];
  test_ranks ranks;
  uint32_t random = 5;
  int kills = 0;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  test_train_arguments(t, base, sizeof base, "whole");
  snprintf(arguments, sizeof arguments, "%s --steps 80 --batch 1 --save-every 80", base);
  test_train_ranks(t, &ranks, 3, arguments, 60);
  for (int r = 0; r < 3; r++) CHECK_RANK(t, &ranks, r, 0, NULL);
  test_ranks_free(t, &ranks);
  test_train_arguments(t, base, sizeof base, "killed");
  snprintf(arguments, sizeof arguments, "%s --steps 80 --batch 1 --save-every 1 --keep 3 "
           "--resume latest", base);
  for (int turn = 0, code = -1; turn < 5 && code != 0; turn++) {
    int victim = turn % 3;
    char step[32];
    test_ranks_open(&ranks, 3);
    for (int r = 0; r < 3; r++) test_train_start(t, &ranks, r, "", arguments);
    snprintf(step, sizeof step, "\"step\": %d,", 18 * turn + 4);
    if (turn < 4) test_wait_for(t, "killed/metrics.jsonl", step);
    test_nap(0.0001 * (test_bpe_random(&random) % 200));
    double begin = g2z_seconds();
    if (turn < 4) kill(ranks.pid[victim], SIGKILL);
    test_ranks_wait(t, &ranks, 60);
    code = ranks.code[(victim + 1) % 3];
    if (turn < 4 && ranks.code[victim] == 128 + SIGKILL && code == G2Z_EXIT_LOST) {
      kills++;
      snprintf(said, sizeof said, "rank %d on ", victim);
      for (int r = 0; r < 3; r++) {
        if (r == victim) continue;
        CHECK_RANK(t, &ranks, r, G2Z_EXIT_LOST, said);
        CHECK(t, ranks.ended[r] - begin < 10);
      }
    } else {
      for (int r = 0; r < 3; r++)
        if (ranks.code[r] != 128 + SIGKILL) CHECK_RANK(t, &ranks, r, 0, NULL);
    }
    test_ranks_free(t, &ranks);
  }
  CHECK(t, kills >= 2);
  CHECK(t, access(test_path(t, "killed/RUN_FAILED.json"), F_OK) != 0);
  test_sh(t, "diff -r -x note.json '%s' '%s'", test_path(t, "whole/step-000080"),
          test_path(t, "killed/step-000080"));
  test_runs_equal(t, test_path(t, "whole"), test_path(t, "killed"));
}

/* What programs that read training_metrics.json count on, however short the run: that each of these
 * is there, and that the numbers which they format are numbers. */
static void test_run_short(g2z_test *t) {
  static const char *const schema[] = {
      "\" schema_version", "\" run_id", "\" timestamp_utc", "n git_commit", "\" command_line",
      "{ env", "{ hardware", "0 hardware.world_size", "{ training_config", "{ deepspeed_config",
      "[ epochs", "0 epochs.0.optimizer_steps", "0 epochs.0.tokens_processed_global", "{ summary",
      "0 summary.mean_tokens_per_sec_global", "0 summary.total_wall_time_sec"};
  static const char *const names[] = {"run_one_step", "run_stopped", "run_validation"};
  for (int i = 0; i < 3; i++) {
    test_run_setup s;
    test_run_seen seen;
    size_t bytes = 0;
    test_run_prepare(t, &s, names[i]);
    s.config.save_weights = NULL;
    if (i == 0) s.config.max_train_steps = 1;
    if (i == 2) s.config.train.train_glob = NULL;
    test_run_stop_at = i == 1; /* behind the first step */
    g2z_status status = test_run_all(t, &s.config, &seen);
    test_run_stop_at = 0;
    CHECK(t, status == (i == 1 ? G2Z_STOPPED : G2Z_OK));
    char *text = test_run_read(t, s.run_dir, "training_metrics.json", &bytes);
    if (text) test_run_schema(t, text, bytes, schema, sizeof schema / sizeof *schema);
    g2z_release(&t->services, text);
    text = test_run_read(t, s.run_dir, "train.log", &bytes); /* beside it, and not empty */
    CHECK(t, bytes > 0);
    g2z_release(&t->services, text);
    text = test_run_read(t, s.run_dir, "report.html", &bytes);
    CHECK(t, text && strstr(text, i == 1 ? "<dd>signal: SIGTERM</dd>" : "<dd>completed</dd>"));
    g2z_release(&t->services, text);
  }
}
