/* Tests of the rooms "run" and "flags" and of ./train: artifacts, resumes, signals, dying ranks. */

/* ----- runs, their artifacts, flags, the command line -------------------- */

/* Kinds: " string, 0 number, n null, t bool, { [. The first rows hold for every run. */
enum { TEST_SCHEMA_ALWAYS = 41 };
static const char *const test_schema[] = {
    "\" schema_version", "\" run_id", "\" timestamp_utc", "n git_commit", "\" command_line",
    "n env.python_version", "n env.torch_version", "n env.transformers_version",
    "n env.deepspeed_version", "n env.cuda_version", "n env.nccl_version", "\" host.hostname",
    "\" host.os", "n hardware.gpu_name", "0 hardware.gpu_count_visible",
    "0 hardware.world_size", "n hardware.cuda_version", "\" training_config.model_name",
    "\" training_config.model_size", "0 training_config.seq_len", "0 training_config.epochs",
    "0 training_config.micro_batch_size_per_gpu", "0 training_config.grad_accum_steps",
    "0 training_config.global_batch_size", "0 training_config.lr",
    "\" training_config.optimizer", "\" training_config.precision",
    "t training_config.deepspeed_enabled", "0 training_config.zero_stage",
    "\" training_config.dataset_name", "0 training_config.dataset_subset_sizes.train",
    "0 training_config.dataset_subset_sizes.val", "n deepspeed_config.path",
    "n deepspeed_config.sha256", "n deepspeed_config.selected", "\" schema_notes",
    "0 summary.total_wall_time_sec", "0 summary.mean_tokens_per_sec_global", "[ epochs",
    "0 epochs.0.optimizer_steps", "0 epochs.0.tokens_processed_global",
    /* and the rest, for one that ends after two epochs */
    "0 epochs.1.epoch_idx", "0 epochs.1.epoch_wall_time_sec", "0 epochs.1.steps",
    "0 epochs.1.micro_steps", "0 epochs.1.optimizer_steps",
    "0 epochs.1.tokens_processed_global", "0 epochs.1.tokens_per_sec_global",
    "0 epochs.1.train_loss_avg_global", "0 epochs.1.val_loss_avg_global",
    "n epochs.1.max_cuda_mem_allocated_bytes_rank0",
    "n epochs.1.max_cuda_mem_reserved_bytes_rank0",
    "n epochs.1.max_cuda_mem_allocated_bytes_global",
    "n epochs.1.max_cuda_mem_reserved_bytes_global", "0 epochs.1.step_time_mean_sec",
    "0 epochs.1.step_time_p50_sec", "0 epochs.1.step_time_p95_sec",
    "0 epochs.1.dataload_time_mean_sec", "0 summary.best_val_loss", "{ shutdown",
    "\" completion.run_complete_file", "\" completion.printed_marker",
    "\" completion.timestamp_utc"};

static void test_run_artifacts(g2z_test *t) {
  test_run_setup s = test_run_prepare(t, "run");
  s.config.train.optimizer.moments_bf16 = 1;
  test_run_seen seen = test_run_well(t, &s);
  CHECK(t, seen.steps == 8 && seen.validations == 2 && seen.samples == 1 && seen.done);
  CHECK(t, seen.last_loss < seen.first_loss - 1.0);
  CHECK(t, strncmp(seen.sample, "1 2 3", 5) == 0 && strlen(seen.sample) > 5);
  const char *text = test_read(t, "run/training_metrics.json");
  test_run_schema(t, text, strlen(text), test_schema, sizeof test_schema / sizeof *test_schema);
  CHECK_HAS(t, text, "\"n_layer=1, n_head=2, n_embd=32\"", "\"dataset_name\": \"digits\"",
            "\"lr\": 0.01,", "\"moments\": \"bf16\",", "\"optimizer_steps\": 4,",
            "\"micro_steps\": 8,");
  CHECK(t, test_json_kind(t, text, strlen(text), "epochs.2") == 0); /* two elements */
  CHECK(t, test_json_kind(t, text, strlen(text), "scheduler") == 0);

  /* One line, equal to the last event's. */
  text = test_read(t, "run/RUN_COMPLETE.txt");
  CHECK(t, strncmp(text, seen.line, strlen(seen.line)) == 0 && test_times(text, "\n") == 1);
  test_sh(t, "grep -Eqx '.Rank 0. RUN_COMPLETE checkpoint_path=%s world_size=1 "
             "tokens_per_sec=[0-9.]*[1-9][0-9.]* total_wall_time_sec=[0-9.]*[1-9][0-9.]* "
             "timestamp_utc=.{19}Z' run/RUN_COMPLETE.txt", s.weights);

  /* Each line of metrics.jsonl is a JSON text: 8 steps, 2 validations, 2 epochs. */
  int steps = 0, validations = 0, epochs = 0;
  for (const char *line = test_read(t, "run/metrics.jsonl"); *line;) {
    size_t length = strcspn(line, "\n") + 1;
    if (test_json_kind(t, line, length, "val_loss")) validations++;
    else if (test_json_kind(t, line, length, "epoch_ms")) epochs++;
    else if (!test_json_kind(t, line, length, "sample_ms")) {
      steps++;
#define X(type, name, meaning) CHECK(t, test_json_kind(t, line, length, #name) != 0);
      G2Z_METRIC_LIST(X)
#undef X
    }
    line += length;
  }
  CHECK(t, steps == 8 && validations == 2 && epochs == 2);
  CHECK_HAS(t, test_read(t, "run/train.log"), "step 8/8 | loss", "RUN_COMPLETE");
  test_sh(t, "cd run/weights && ls model.safetensors config.json merges.txt vocab.json > ../out");
}

static void test_run_length(g2z_test *t) {
  test_run_setup s = test_run_prepare(t, "run");
  s.config.save_weights = NULL;
  s.config.run_dir = NULL;
  s.config.epochs = 0;
  s.config.train.optimizer.steps = 100;
  s.config.max_train_steps = 6; /* in the second epoch, long before the schedule's end */
  s.config.val_every = 3;
  s.config.max_val_steps = 1;
  s.config.sample_every = 2;
  test_run_seen seen = test_run_well(t, &s);
  CHECK(t, seen.steps == 6 && seen.samples == 3);
  CHECK(t, seen.validations == 3); /* 3, 4 (end of the epoch), 6 (end of the run) */
  CHECK_HAS(t, seen.line, "checkpoint_path=none");

  /* Without a target, no validation reaches it: a model that knows its text has the loss 0. */
  int32_t ids[2 * 4 * 16 + 1];
  for (int i = 0; i < 129; i++) ids[i] = 'a';
  test_shard(t, "same.bin", G2Z_SHARD_LLMC, ids, 129);
  s = test_run_prepare(t, "zero");
  s.config.train.train_glob = s.config.val_glob = test_kept(t, test_path(t, "same.bin"));
  s.config.train.accum = 1;
  s.config.train.optimizer.lr = 0.3f;
  s.config.train.optimizer.steps = s.config.val_every = 100;
  s.config.epochs = s.config.sample_tokens = 0;
  seen = test_run_well(t, &s);
  CHECK(t, seen.val_loss == 0 && !strstr(test_read(t, "zero/metrics.jsonl"), "target"));
  CHECK_HAS(t, test_read(t, "zero/training_metrics.json"), "\"target_step\": null");

  /* The first token of each shard is no target. */
  s = test_run_prepare(t, "two");
  test_run_shard(t, "two_val_0.bin", 20);
  test_run_shard(t, "two_val_1.bin", 23);
  s.config.val_glob = test_kept(t, test_path(t, "two_val_*.bin"));
  test_run_well(t, &s);
  CHECK_HAS(t, test_read(t, "two/train.log"), "validation: 1 batch, 41 tokens\n");
  CHECK_HAS(t, test_read(t, "two/training_metrics.json"), "\"tokens\": 41,");
}

/* A step in which no token counts has no loss and no weight in the epoch's mean. The learning rate
 * is almost 0, so this mean equals the validation loss of the same tokens. */
static void test_run_targets(g2z_test *t) {
  int32_t ids[32 * 16 + 1];
  test_run_setup s = test_run_prepare(t, "run");
  for (int i = 0; i < 513; i++) { /* 3 of 32 sequences have targets that count: 1, 5 and 16 */
    int counts = i == 3 || (i > 90 && i < 96) || (i > 160 && i < 177);
    ids[i] = i * 7 % 257 + (counts ? 0 : G2Z_UNCOUNTED);
  }
  test_shard(t, "some.bin", G2Z_SHARD_LLMC, ids, 513);
  s.config.train.train_glob = test_at(t, "some.bin");
  s.config.val_glob = test_at(t, "same.bin");
  test_shard(t, "same.bin", G2Z_SHARD_LLMC, ids, 513);
  s.config.train.accum = s.config.train.batch = 1;
  s.config.train.optimizer.lr = 1e-20f;
  s.config.train.optimizer.weight_decay = 0;
  s.config.train.seed = 3;
  s.config.epochs = 1;
  test_run_seen seen = test_run_well(t, &s);
  CHECK(t, seen.steps == 32);
  CHECK(t, test_times(test_read(t, "run/metrics.jsonl"), "\"loss\": null") == 29);
  CHECK_HAS(t, test_read(t, "run/train.log"), "done: best validation loss ");
  const char *text = test_read(t, "run/training_metrics.json");
  CHECK_NEAR(t, test_number(t, text, "train_loss_avg_global\": "),
             test_number(t, text, "val_loss_avg_global\": "), 1e-5);
  CHECK_HAS(t, text, "\"optimizer_steps\": 3,");
  s.config.run_dir = s.config.save_weights = NULL; /* the first step gets no such sequence */
  s.config.max_train_steps = 1;
  CHECK_BAD(t, test_run_all(t, &s.config, &seen), "no step of 1 was applied, since masks");
  s.config.max_train_steps = 0;
  /* The first five batches, the only ones validated, have no such target; then all batches have a
   * token that the model lacks. Both are found before a step and a directory. */
  s.config.run_dir = test_at(t, "late");
  s.config.max_val_steps = 5;
  ids[3] |= G2Z_UNCOUNTED;
  for (int k = 0; k < 2; k++) {
    test_shard(t, "same.bin", G2Z_SHARD_LLMC, ids, 513);
    g2z_status status = test_run_all(t, &s.config, &seen);
    CHECK(t, status == (k ? G2Z_FORMAT : G2Z_BAD_ARGUMENT) && !test_there(t, "late"));
    CHECK_HAS(t, t->services.error, k ? "300" : "no token of the first 5 validation batches "
              "counts: raise --val-steps or --max-val-steps");
    s.config.max_val_steps = 0;
    ids[200] = 300;
  }
  s.config.run_dir = s.config.train.train_glob = NULL;
  /* Weights that overflow fp16 have no loss. */
  const g2z_train_config large = test_weights_model();
  s.config.train.model = large.model;
  s.config.train.init_from = test_at(t, "large");
  s.config.val_glob = s.val;
  s.config.sample_tokens = 0;
  s.config.train.seq = 5;
  CHECK_OK(t, test_weights_save(t, &large, s.config.train.init_from, -1, 0));
  for (int type = G2Z_FP32; type <= G2Z_FP16; type += G2Z_FP16 - G2Z_FP32) {
    s.config.train.dtype = (g2z_dtype)type;
    g2z_status status = test_run_all(t, &s.config, &seen);
    CHECK(t, status == (type == G2Z_FP16 ? G2Z_DIVERGED : G2Z_OK));
  }
}

/* The <|endoftext|> of config.json, if wte has the vocab_size rows that it states; otherwise -1. */
static int test_run_eot(g2z_test *t, const char *directory, int vocab) {
  const char *text = test_read(t, "%s/config.json", directory);
  const int size = (int)test_number(t, text, "\"vocab_size\": ");
  const int bos = (int)test_number(t, text, "\"bos_token_id\": ");
  const int eos = (int)test_number(t, text, "\"eos_token_id\": ");
  const char *tensors = test_read(t, "%s/model.safetensors", directory) + 8; /* the header */
  const char *wte = strstr(tensors, "\"transformer.wte.weight\"");
  CHECK(t, wte && (int)test_number(t, wte, "\"shape\": [") == vocab);
  return size == vocab && bos == eos ? eos : -1;
}

/* Saved files state the token that ends a text. It comes from the tokenizer, from the weights that
 * training began with, or from the vocabulary size, padded or not. */
static void test_run_padded_vocab(g2z_test *t) {
  static const struct {
    int vocab, with_tokenizer, eot;
  } cases[] = {
      {257, 0, 256}, {259, 1, 258}, {384, 1, 258}, {384, 0, 383}, {50257, 0, 50256},
      {50304, 0, 50256}};
  static const char merges[] = "#version: 0.2\n1 2\n3 4\n"; /* 259 tokens */
  test_run_setup s;
  const char *vocab = test_kept(t, test_at(t, "merges.txt"));
  test_write_file(t, vocab, merges, strlen(merges));
  for (int i = 0; i < 6; i++) {
    s = test_run_prepare(t, test_text("run%d", i));
    s.config.prompt = NULL;
    s.config.vocab = cases[i].with_tokenizer ? vocab : NULL;
    s.config.train.model.channels = 16;
    s.config.train.model.vocab = cases[i].vocab;
    s.config.epochs = 0;
    s.config.train.optimizer.steps = s.config.save_every = 1;
    test_run_seen seen = test_run_well(t, &s);
    CHECK(t, test_run_eot(t, test_text("run%d/step-000001", i), cases[i].vocab) == cases[i].eot);
    CHECK(t, test_run_eot(t, test_text("run%d/weights", i), cases[i].vocab) == cases[i].eot);
    if (i != 2) continue;
    /* Without a tokenizer next to the weights, their config.json decides. */
    const char *saved = test_kept(t, test_text("%s/step-000001", s.run_dir));
    s.config.train.init_from = saved;
    CHECK_OK(t, g2z_weights_config(&t->services, saved, &s.config.train.model));
    s.config.vocab = s.config.run_dir = NULL;
    s.config.save_every = 0;
    s.config.train.model.heads = 1; /* no tensor's shape depends on it */
    CHECK_BAD(t, test_run_all(t, &s.config, &seen), "n_head");
    s.config.train.model.heads = 2;
    static const char *const files[] = {
        "config.json", "generation_config.json", "model.safetensors", "merges.txt", "vocab.json",
        "tokenizer_config.json"};
    test_sh(t, "cp -r run2/weights kept");
    for (int file = 0; file < 6; file++) { /* another model stays, even a part of one */
      CHECK_BAD(t, test_run_all(t, &s.config, &seen),
                test_text("run2/weights holds a model (%s) that this run did not ", files[file]));
      test_sh(t, "F=%s; diff -r run2/weights kept && rm run2/weights/$F kept/$F", files[file]);
    }
    CHECK_OK(t, test_run_all(t, &s.config, &seen));
    CHECK(t, test_run_eot(t, "run2/weights", cases[i].vocab) == cases[i].eot);
  }
}

/* Errors that no flag can cause; train_refusals has the others. */
static void test_run_refusals(g2z_test *t) {
  static const char *const sentences[] = {"val_every=-1", "epochs=-1", "top_p=0",
                                          "samples need the tokenizer",
                                          "there is nothing to do", "220"};
  test_run_setup s;
  test_run_seen seen;
  for (int i = 0; i < 6; i++) {
    s = test_run_prepare(t, "run");
    if (i == 0) s.config.val_every = -1;
    if (i == 1) s.config.epochs = -1;
    if (i == 2) s.config.sampling.top_p = 0;
    if (i == 3) s.config.train.model.vocab = 300;
    if (i == 4) s.config.train.train_glob = s.config.val_glob = NULL;
    if (i == 5) s.config.train.model.vocab = 100; /* the shards hold tokens up to 220 */
    if (i > 3) s.config.prompt = NULL;
    if (i == 5) s.config.run_dir = s.config.save_weights = NULL; /* a step finds it */
    CHECK_STATUS(t, test_run_all(t, &s.config, &seen), i < 5 ? G2Z_BAD_ARGUMENT : G2Z_FORMAT,
                 &t->services, sentences[i]);
    CHECK(t, !test_there(t, "run"));
  }
  s.config.train.model.vocab = 230; /* a run without samples needs no tokenizer */
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, seen.done && seen.samples == 0);

  /* A launch that fails leaves the context to its caller, who prints why before he frees it: there,
   * ranks wait for each other. */
  g2z_run_options options = g2z_run_options_default();
  g2z_context_config place = g2z_context_config_default(&t->services);
  g2z_context *context;
  g2z_run *run;
  place.device = G2Z_DEVICE_CPU;
  options.run = s.config;
  options.run.val_every = -1;
  CHECK_BAD(t, g2z_run_launch(&options, &place, &context, &run), "val_every=-1");
  CHECK(t, context && !run);
  g2z_context_free(context);
}

/* The disk fills during a run: the error names the run's directory, and the run does not claim to
 * be complete. A run ends well if only its page cannot be written. */
static void test_run_full_disk(g2z_test *t) {
  test_run_seen seen;
  test_run_setup s = test_run_prepare(t, "run");
  s.config.save_weights = NULL;
  struct rlimit before = test_files_limit(1000);
  g2z_status status = test_run_all(t, &s.config, &seen);
  test_files_unlimit(&before);
  CHECK_STATUS(t, status, G2Z_IO, &t->services, s.run_dir); /* any file may be the first */
  CHECK(t, !test_there(t, "run/RUN_COMPLETE.txt"));
  s = test_run_prepare(t, "unseen");
  test_sh(t, "mkdir -p unseen/report.html.partial");
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, seen.done && test_files_count(t, "unseen/*.partial") == 1);
  test_sh(t, "rmdir unseen/report.html.partial && test ! -e unseen/report.html");
  CHECK(t, test_there(t, "unseen/RUN_COMPLETE.txt"));
}

/* Both logs of a run report step `last` once and no later step; 0: they report none. */
static void test_run_last_line(g2z_test *t, const char *run, int last) {
  for (int log = 0; log < 2; log++) {
    const char *text = test_read(t, "%s/%s", run, log ? "train.log" : "metrics.jsonl");
    for (int more = 0; more < 2; more++)
      CHECK(t, test_times(text, test_text(log ? "  step %d/" : "\"step\": %d,", last + more)) ==
                   (last > 0 && !more));
  }
}

/* All steps before the one with damaged tokens are reported, whichever step it is. */
static void test_run_damaged(g2z_test *t) {
  int least = INT_MAX, most = 0;
  for (int sequence = 0; sequence < 32; sequence += 5) {
    const char *run = test_text("run%d", sequence);
    const int32_t *x, *y;
    test_run_seen seen;
    test_run_setup s = test_run_prepare(t, run);
    test_run_shard(t, "digits_train_000000.bin", 4 * 2 * 4 * 16 + 1);
    for (int byte = 0; byte < 2; byte++) /* token 257, the first one outside the model */
      test_files_poke(t, s.train, (size_t)(1024 + 2 * (16 * sequence + 3) + byte), 1);
    const g2z_train_config *train = &s.config.train;
    g2z_loader_config config = {s.train, train->batch, train->seq, train->accum, 0, 1, 257,
                                G2Z_ORDER_SHUFFLED, train->seed};
    g2z_loader *loader = test_loader(t, &config);
    int good = 0;
    while (good < 4 && g2z_loader_next(loader, &x, &y) == G2Z_OK) good++;
    CHECK_FORMAT(t, test_run_all(t, &s.config, &seen), "token 257 at");
    CHECK(t, good < 4 && seen.steps == good && seen.last_step == good && !seen.done);
    test_run_last_line(t, test_text("run%d", sequence), good);
    least = good < least ? good : least;
    most = good > most ? good : most;
  }
  CHECK(t, least == 0 && most == 3);
}

static void test_run_diverges(g2z_test *t) {
  /* With a fixed scale the remedy is not a lower lr, because the scale cannot shrink. If a save is
   * due, the flush before it reports the error, and nothing is saved. */
  static const struct {
    int save_every, fixed;
  } cases[] = {{0, 0}, {0, 1}, {50, 0}};
  test_run_seen seen;
  test_run_setup s;
  for (int i = 0; i < 3; i++) {
    const int fixed = cases[i].fixed;
    s = test_run_prepare(t, test_text("run%d", i));
    s.config.save_every = cases[i].save_every;
    s.config.val_every = s.config.save_every ? 0 : 10;
    s.config.epochs = 20;
    if (fixed) s.config.train.dtype = G2Z_FP16;
    s.config.train.optimizer.loss_scale_dynamic = !fixed;
    test_run_spoil_at = 1;
    CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_DIVERGED, &t->services,
                 "50 steps in a row up to step 50 had");
    CHECK(t, !strstr(t->services.error, "scale 65536: lower --loss-scale, which is fixed, or "
                     "remove it; give --grad-dtype fp32; start from other weights") == !fixed);
    CHECK(t, seen.skipped == 50 && seen.nans > 50); /* validations, too */
    test_run_last_line(t, test_text("run%d", i), 50);
  }
  /* A run whose last loss is NaN is not complete, although a step was applied. */
  s = test_run_prepare(t, "late");
  s.config.train.optimizer.steps = s.config.save_every = 6;
  s.config.epochs = 0;
  for (int again = 0; again < 3; again++) { /* nor is it after starts that have no step left */
    if (again == 0) test_run_spoil_at = 3;
    else s.config.resume = "latest";
    CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_DIVERGED, &t->services,
                 "the loss of step 6, the last, is nan. Start again with a lower --lr (0.01), or");
    CHECK(t, seen.steps == (again ? 0 : 6));
    CHECK(t, test_there(t, "late/step-000006") && !test_there(t, "late/RUN_COMPLETE.txt"));
    CHECK_HAS(t, test_read(t, "late/report.html"), "<dd>diverged<small>the run diverged: the loss "
              "of ", "/late-2 --lr 0.005", again ? ", without --resume</p>\n" : "</p>\n<details>");
  }
  /* A sample that such a model cannot write is not the cause that the run names. */
  s = test_run_prepare(t, "sample");
  s.config.sample_every = 4;
  s.config.train.optimizer.kind = G2Z_OPTIMIZER_MUON;
  test_run_spoil_at = 3;
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_DIVERGED, &t->services, "the loss of step "
               "4, the last, is nan. Start again with a lower --lr (0.01) and --adam-lr (0.006)");
  /* Where no step was applied, the learning rate is no remedy. */
  for (int dynamic = 0; dynamic < 2; dynamic++) {
    s = test_run_prepare(t, "never");
    s.config.train.dtype = G2Z_FP16;
    s.config.train.optimizer.loss_scale = 16777216;
    s.config.train.optimizer.loss_scale_dynamic = dynamic;
    s.config.save_every = 2;
    for (int last = 3; last >= 2; last--) { /* a second start has no step left */
      s.config.max_train_steps = last;
      s.config.resume = last == 2 ? "latest" : NULL;
      CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_DIVERGED, &t->services,
                   dynamic ? "has not changed. Give more --steps: each lowers the scale"
                           : "loss scale 1.67772e+07: the model has not changed. Lower --loss-"
                             "scale, or");
      CHECK_HAS(t, t->services.error, test_text("no step of %d was applied", last));
    }
    test_sh(t, "rm -r never");
  }
  /* One skipped step after a resume, as a dynamic loss scale skips them, does not mean so. */
  s = test_run_prepare(t, "rest");
  s.config.save_every = 4;
  for (int last = 4; last <= 5; last++) {
    s.config.max_train_steps = last;
    CHECK(t, test_run_well(t, &s).steps == (last == 4 ? 4 : 1));
    s.config.resume = "latest";
    s.config.train.dtype = G2Z_FP16;
    s.config.train.optimizer.loss_scale = 16777216;
  }
  CHECK_HAS(t, test_read(t, "rest/train.log"), "| scale 16777216, skipped");
}

/* The mean of the last 20 losses decides whether a run diverged: first the losses of 39 skipped
 * steps, then good ones after a bad start. A resume without a step left has the same result. */
static void test_run_mean(g2z_test *t) {
  static const struct {
    float lr;
    int steps, skipped;
    const char *reason;
  } ends[] = {
      {1e6f, 40, 39, "diverged"}, {1, 60, 0, "completed"}};
  for (int i = 0; i < 2; i++) {
    test_run_setup s = test_run_prepare(t, ends[i].reason);
    s.config.train.optimizer.lr = ends[i].lr;
    s.config.train.optimizer.clip = 0;
    s.config.train.optimizer.warmup = s.config.epochs = s.config.sample_tokens = 0;
    s.config.train.optimizer.steps = s.config.save_every = ends[i].steps;
    s.config.val_glob = NULL;
    for (int again = 0; again < 2; again++) {
      const test_run_seen seen = test_run_well(t, &s);
      CHECK(t, seen.skipped == (again ? 0 : ends[i].skipped));
      CHECK_HAS(t, test_read(t, "%s/training_metrics.json", ends[i].reason),
                test_text("\"reason\": \"%s\"", ends[i].reason));
      const char *log = test_read(t, "%s/train.log", ends[i].reason);
      CHECK(t, (strstr(log, "warning: the run diver") == NULL) == i);
      CHECK(t, (strstr(log, "  To ") == strstr(log, "  To start again with half ")) == !i);
      s.config.resume = "latest";
    }
  }
}

/* Checkpoints from before the loss rose, or before steps were skipped, are kept. A run without an
 * applied step is not complete. */
static void test_run_keeps_good(g2z_test *t) {
  static const struct {
    float lr;
    int spoils, latest;
  } cases[] = {
      {1e-2f, 0, 0}, {1e3f, 0, 1}, {1e-2f, 1, 1}, {1e-2f, 1, 0}};
  for (int i = 0; i < 4; i++) {
    const char *name = cases[i].latest ? "run" : test_text("run%s", i ? "3" : "");
    const int good = !cases[i].spoils;
    test_run_seen seen;
    if (cases[i].latest) test_sh(t, "rm -rf run && cp -r kept run");
    test_run_setup s = test_run_prepare(t, name);
    s.config.val_glob = NULL;
    s.config.sample_tokens = 0;
    s.config.save_every = 1;
    s.config.keep = 2;
    s.config.epochs = 0;
    s.config.train.optimizer.steps = i ? 8 : 4;
    s.config.train.optimizer.lr = cases[i].lr;
    s.config.train.optimizer.warmup = 0;
    if (cases[i].latest) s.config.resume = "latest";
    test_run_spoil_at = cases[i].spoils;
    CHECK_STATUS(t, test_run_all(t, &s.config, &seen), good ? G2Z_OK : G2Z_DIVERGED, &t->services,
                 good ? NULL : i == 2 ? "the loss of step 8, the last, is nan"
                                      : "no step of 8 was applied");
    if (!good) CHECK_HAS(t, t->services.error, i == 2 ? "lower --lr (0.01), or from an earlier "
                         "checkpoint" : "give --dtype fp32");
    CHECK(t, test_there(t, test_text("%s/RUN_COMPLETE.txt", name)) == good);
    if (i < 3) CHECK(t, test_there(t, "run/step-000004"));
    CHECK(t, test_files_count(t, test_text("%s/step-", name)) == (i == 1 || i == 2 ? 4 : 2));
    if (i == 0) test_sh(t, "cp -r run kept");
    if (i < 2) /* a finite loss is a result, with a warning if it is worse than guessing */
      test_sh(t, "%s grep -q 'warning: the run diverged: the loss of the last steps, .* than gue.* "
              "--lr (1000)$' run/train.log && grep -q '\"reason\": \"%s\"' "
              "run/training_metrics.json", i ? "" : "!", i ? "diverged" : "completed");
    if (i == 1 || i == 2) { /* the page names the checkpoint from before the loss rose */
      const char *page = test_read(t, "run/report.html");
      CHECK_HAS(t, page, "<dt>result</dt><dd>diverged<", "<p>To go back to before the divergence, "
                "with half of the rate: the same command with --run-dir ", "run-2 --resume ",
                i == 1 ? "run/step-000004 --lr 500<" : "run/step-000003 --lr 0.005<");
      CHECK(t, !strstr(page, "To generate text: ") && !strstr(page, "To continue training: ") &&
                   !strstr(page, "To train these weights further: "));
    }
  }
}

/* Each allocation of a run fails once, in a new run or in one resumed from `resume`. */
static void test_run_memory(g2z_test *t, test_run_setup *s, test_run_seen *seen) {
  s->config.run_dir = s->config.save_weights = NULL;
  CHECK_NO_MEMORY(t, 21, 5000, test_run_all(t, &s->config, seen), 1);
  CHECK(t, seen->done);
}

static void test_run_allocations(g2z_test *t) {
  test_run_seen seen;
  test_run_setup s = test_run_prepare(t, "run");
  s.config.max_train_steps = 2;
  test_run_memory(t, &s, &seen);
}

/* ----- flags ----- */

static void test_flag_line(void *lines, const char *text) {
  ((int *)lines)[strchr(text, '[') != NULL]++; /* without and with a default */
}

static void test_flags(g2z_test *t) {
  int number = 7, choice = 1, on = 0, bare = 0, unset = 0, rest = -1;
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
      {"on", G2Z_FLAG_SWITCH, &on, 0, 0, "", "a switch"},
      {"bare", G2Z_FLAG_SWITCH, &bare, 0, 0, "", ""}};
  const int count = (int)(sizeof flags / sizeof *flags);
  int lines[2] = {0, 0};
  g2z_flags_print(flags, count, test_flag_line, lines);
  CHECK(t, lines[0] == 5 && lines[1] == 5); /* number, big, seed, real, choice */

  char words[][32] = {"program", "--number=12", "one", "--big-number", "9223372036854775807",
                      "--seed=18446744073709551615", "--real=2.5e-1", "--choice=cpu",
                      "--text=--on", "--on", "-", "--number", "10"};
  char *argv[13];
  for (int i = 0; i < 13; i++) argv[i] = words[i];
  CHECK_OK(t, g2z_flags_parse(&t->services, flags, count, 13, argv, 1, &rest));
  CHECK(t, number == 10 && big == INT64_MAX && seed == UINT64_MAX && choice == 0 && on == 1);
  CHECK_NEAR(t, (double)real, 0.25, 0);
  CHECK(t, text && strcmp(text, "--on") == 0);
  CHECK(t, rest == 2 && strcmp(argv[1], "one") == 0 && strcmp(argv[2], "-") == 0);

  static const char *const wrong[][2] = {
      {"--nmuber=1", "unexpected flag --nmuber: program --help lists all flags"},
      {"--big_number=1", "unexpected flag --big_number: type --big-number N"},
      {"-number", "unexpected flag -number: type --number N"},
      {"--n_layer=1", "unexpected flag --n_layer: program --help lists all flags"},
      {"--number", "--number needs a value: --number N"},
      {"--number=", "--number \"\": not a whole number\n"},
      {"--number=4k", "--number 4k: not a whole number\n"}, /* perhaps 4000 */
      {"--number=12x", "12x: not a whole number; write --number 12"},
      {"--number= 12", "write --number 12"},    {"--number=0", "must be from 1 to 100"},
      {"--number=-5", "must be from 1 to 100"}, {"--number=2.6", "write --number 3"},
      {"--number=99999999999999999999", "must be from 1 to 100"},
      {"--big-number=9223372036854775808", "must be from 0 to 9223372036854775807"},
      {"--seed=-1", "must be from 0 to 18446744073709551615"},
      {"--seed=18446744073709551616", "must be from 0 to"},
      {"--real=nan", "must be from 0 to 1"},    {"--real=1e999", "must be from 0 to 1"},
      {"--number=1e1", "write --number 10"},
      {"--number=1e30", "write --number 100"},  {"--seed=1e1", "write --seed 10"},
      {"--real=0.5.5", "write --real 0.5\n"}, {"--real=6e-4x", "not a number; write --real 6e-4\n"},
      {"--real= 1", "write --real 1\n"},      {"--real=9x", "--real 9x: not a number\n"},
      {"--real=x", "--real x: not a number\n"},
      {"--choice=gpu", "must be one of cpu|cuda"},
      {"--choice=", "must be one of"},          {"--on=1", "takes no value"},
      {"-n", "unexpected flag -n: program"},
      {"stray", "unexpected argument \"stray\": put"}};
  for (size_t i = 0; i < 2 * sizeof wrong / sizeof *wrong; i++) { /* the last word; before --on */
    char word[64];
    snprintf(word, sizeof word, "%s", wrong[i / 2][0]);
    argv[1] = word;
    argv[2] = words[i % 2 ? 9 : 10];
    CHECK_BAD(t, g2z_flags_parse(&t->services, flags, count, 2 + (int)i % 2, argv, 1, NULL), NULL);
    CHECK_HAS(t, test_text("%s\n", t->services.error), wrong[i / 2][1]);
  }
  CHECK(t, number == 10); /* a refused value changes nothing */

  /* The shell restores the same words from the printed line, whatever they contain. */
  char *line = NULL, output[256];
  char awkward[][24] = {"printf", "<%s>", "it's 5", "", "plain-1=/x:,.@%",
                        "$(id) `id` \"$PATH\"", "a\nb\tc", "\x1b[31m\\ it's", "\xff\xc2\x9b",
                        "*.bin ~ !x", "g\xc3\xbcn"};
  for (int i = 0; i < 11; i++) argv[i] = awkward[i];
  CHECK_OK(t, g2z_flags_line(&t->services, 11, argv, &line));
  CHECK(t, line && strncmp(line, "printf '<%s>' 'it'\\''s 5' '' plain-1=/x:,.@% ", 45) == 0);
  for (const char *c = line; line && *c; c++) CHECK(t, (unsigned char)*c >= ' ' && *c != 0x7f);
  CHECK(t, !strstr(line, "\xff") && !strstr(line, "\xc2\x9b") && strstr(line, "g\xc3\xbcn"));
  if (test_shell("bash --version", output, sizeof output) == 0) {
    setenv("LINE", line, 1);
    CHECK(t, test_shell("bash -c \"$LINE\"", output, sizeof output) == 0);
    unsetenv("LINE");
    CHECK(t, strcmp(output, "<it's 5><><plain-1=/x:,.@%><$(id) `id` \"$PATH\"><a\nb\tc>"
                            "<\x1b[31m\\ it's><\xff\xc2\x9b><*.bin ~ !x><g\xc3\xbcn>") == 0);
  }
  for (size_t room = 4; room < 12; room++) /* the whole word or nothing */
    CHECK(t, strcmp(g2z_shell_word("it's 5", output, room), "...") == 0);
  g2z_release(&t->services, line);
}

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
      {"least", G2Z_FLAG_FLOAT, &v.least, 0.7, 1, "X", ""}, /* 0.7 is smaller as a float, */
      {"most", G2Z_FLAG_FLOAT, &v.most, 0, 0.99, "X", ""},  /* and 0.99 is larger */
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
    v.big = i % 2 ? INT64_MAX : INT64_C(-9007199254740993); /* no double has this value */
    v.seed = UINT64_MAX - i;
    v.real = reals[i];
    v.least = 0.7f;
    v.most = 0.99f;
    v.text = texts[i % 4];
    memcpy(&back, &v, sizeof v);
    CHECK_OK(t, g2z_flags_arguments(&t->services, flags, count, first, 2, &argv));
    if (!argv) continue;
    int words = 0;
    while (argv[words]) words++;
    CHECK(t, words == 2 + 7 + (v.choice >= 0) + (v.text != NULL));
    CHECK(t, strcmp(argv[0], "p") == 0 && !*argv[1] && strcmp(argv[words - 1], "--on") == 0);
    memset(&v, 0, sizeof v);
    v.choice = -1;
    CHECK_OK(t, g2z_flags_parse(&t->services, flags, count, words - 1, argv + 1, 1, NULL));
    CHECK(t, !v.text == !back.text && (!v.text || strcmp(v.text, back.text) == 0));
    v.text = back.text;
    CHECK(t, memcmp(&v, &back, sizeof v) == 0);
    g2z_release(&t->services, argv);
  }
  char **argv;
  v.text = NULL; /* it points into released arguments */
  t->fail_at = 1;
  CHECK(t, g2z_flags_arguments(&t->services, flags, count, first, 2, &argv) == G2Z_NO_MEMORY);
  t->fail_at = 0;
  CHECK(t, argv == NULL);
}

/* ----- the command line of ./train ----- */

static void test_train_help(g2z_test *t) {
  test_help(t, "train", test_train_program());
  CHECK_HAS(t, test_trains(t, 0, "--help"), "\nfine-tune ", "\nresume ", "\ngenerate ");
  CHECK_HAS(t, test_trains(t, 0, "-h"), "\ngenerate ");
  CHECK(t, strcmp(test_trains(t, 0, "--version"), "train " G2Z_VERSION "\n") == 0);
}

/* The flags that a hint about another program's flag names all exist, and each of the other
 * program's flags stands in the table once. */
static void test_flags_foreign(g2z_test *t) {
  const size_t rows = sizeof g2zg_foreign / sizeof *g2zg_foreign;
  char argument[64], program[] = "./train", *argv[] = {program, argument, NULL};
  for (size_t i = 0; i < rows; i++)
    for (const char *word = g2zg_foreign[i].theirs; *word; word += strspn(word, " ")) {
      g2z_run_options o = g2z_run_options_default();
      const int bytes = (int)strcspn(word, " ");
      snprintf(argument, sizeof argument, "%s%.*s", *word == '-' ? "" : "--", bytes, word);
      CHECK_BAD(t, g2z_run_options_parse(&t->services, 2, argv, &o), g2zg_foreign[i].ours);
      word += bytes;
    }
}

/* Each ends with exit code 1 and a message that begins with "train: " and has the words once. */
#define USELESS(flag, value, why) \
  {"--train $SHARD $TINY --sample-tokens 0 --" flag " " value, "--" flag " has no effect " why}
static const char *const test_train_bad[][2] = {
    {"--bathc 4", "unexpected flag --bathc: "},
    {"'' --batch 4", "unexpected argument \"\": put patterns"},
    {"--prompt x", "--prompt needs trained weights: give --init-from"},
    {"--config f", "unexpected flag --config: there are only flags; to keep them in a file: $(cat"},
    {"--train $SHARD --init-from gpt-2", "gpt-2: there is no such directory. A run writes RUN_DIR/w"},
    {"--train $SHARD --vocab /tmp", "/tmp: Is a directory; name a file"},
    {"--steps 0", "--steps 0: must be from 1"},
    {"--train a_0.bin a_1.bin", "unexpected argument \"a_1.bin\": put patterns and text"},
    {"--train a.bin:0.7 b.bin:0.3", "unexpected argument \"b.bin:0.3\": repeat the flag, as in --t"},
    {"--train $SHARD --channels 36 --heads 3", "must be a multiple of 8"},
    {"--train $SHARD --batch 4 --global-batch 6",
     "--global-batch 6 must be a multiple of batch x ranks = 4"},
    {"--dry-run --ranks 4096 --batch 1048576 --global-batch 4096",
     "--global-batch 4096 must be a multiple of batch x ranks = 4294967296"},
    {"--train $SHARD --batch 4 --accum 2 --global-batch 8", "give one of them"},
    {"--train $SHARD --steps 5 --epochs 1", "give one of them"},
    {"--train $SHARD --dtype tf32 --device cpu --context 64 --batch 4", "tf32"},
    {"--train $SHARD --zero 4", "--zero 4: must be from 0 to 3"},
    {"--train $SHARD --vocab /nowhere/vocab.bpe", "/nowhere/vocab.bpe"},
    {"--train $SHARD --layers 1 --channels 64 --context 16 --device cpu --tuning /nowhere/t.txt",
     "/nowhere/t.txt"},
    {"--train $SHARD --layers 1 --channels 64 --context 16 --device cpu --tuning $SHARD",
     "shard.bin: no tuning table of this build: it begins with \""},
    {"--train $SHARD --init-from ''", "cannot open the directory \"\": No such file"},
    {"--train $SHARD --run-dir $(printf %01100d 0)",
     "--run-dir has 1100 bytes, but at most 1023"},
    {"--train $SHARD --run-id $(printf %0200d 0)", "--run-id has 200 bytes, but at most 127"},
    {"--train $SHARD $TINY --val '/nowhere/at/all_*.bin'", "/nowhere/at/all"},
    {"--train $SHARD $TINY --batch 640 --sample-tokens 0", "batch 640"},
    {"--train $SHARD $TINY --run-dir $SHARD/run", "shard.bin"},
    {"--train $SHARD $TINY --save-weights $SHARD/weights", "shard.bin"},
    {"--train $SHARD $TINY --save-weights $SHARD/weights --nccl-logs", "shard.bin"},
    USELESS("prompt", "x", "with --sample-tokens 0"),
    USELESS("prompt", "''", "with --sample-tokens 0"),
    USELESS("sample-every", "1", "with --sample-tokens 0"),
    USELESS("temperature", "0", "with --sample-tokens 0"),
    USELESS("top-k", "1", "with --sample-tokens 0"),
    USELESS("top-p", "0.5", "with --sample-tokens 0"),
    USELESS("sample-seed", "7", "with --sample-tokens 0"),
    {"--train $SHARD --init-from /nowhere/w --positions sines",
     "--positions has no effect with --init-from"},
    USELESS("momentum", "0.95", "without --optimizer muon; give it, or remove --momentum"),
    USELESS("adam-lr", "1e-3", "without --optimizer muon; give it, or remove --adam-lr"),
    USELESS("val-every", "1", "without --val; give --val GLOB"),
    USELESS("val-steps", "1", "without --val; give --val GLOB"),
    USELESS("max-val-steps", "1", "without --val; give --val GLOB"),
    USELESS("patience", "3", "without --train and --val; give both"),
    USELESS("keep-best", "", "without --train and --val; give both"),
    USELESS("target-loss", "3.28", "without --train and --val; give both"),
    {"--train $SHARD --val $SHARD --patience 0", "--patience 0: must be from 1"},
    /* ranks on one console: one of them meets the error first, or none could begin */
    {"--train $SHARD $TINY --batch 1 --ranks 3 --init-from /nowhere/w",
     "--init-from /nowhere/w: there is no such directory"},
    {"--train $SHARD:1 --train b.bin:2 --train $SHARD:1 $TINY",
     "shard.bin:1 is given twice, but would count once: remove one of them, or give the files once"},
    {"--train /nowhere/a:b.bin --train /nowhere/a:b.bin $TINY", "pattern \"/nowhere/a:b.bin\""},
    {"--train $SHARD $TINY --batch 1 --ranks 3 --global-batch 7", "--global-batch 7 must"},
    /* the library's settings have the names of their flags */
    {"--train $SHARD $TINY --moments bf16 --optimizer muon",
     "train: --moments bf16 is for AdamW: take --optimizer adamw, or --moments fp32\n"},
    {"--train $SHARD $TINY --min-lr 1 --dry-run", "train: --min-lr 1 must be at most --lr 0.0006\n"},
    {"--train $SHARD $TINY --optimizer muon --lr 0 --adam-lr 1 --dry-run",
     "train: --adam-lr 1 follows lr's schedule, and --lr 0 has none: take --lr 0.004, or --adam-lr 0\n"},
    {"--train $SHARD $TINY --graph on", "train: --graph on needs a GPU: leave it off on a CPU\n"},
    {"--train $SHARD $TINY --strategy dp --zero 2", "take --zero 0, or --strategy zero\n"},
    {"--train $SHARD $TINY --channels 12 --heads 5", "--channels 12 must divide by --heads 5: chan"},
    {"--train $SHARD $TINY --batch 1 --ranks 3 --val /nowhere/v.bin", "\"/nowhere/v.bin\""},
    {"--train $SHARD $TINY --batch 1 --ranks 3 --batch 100000", "hold "},
    {"--train $SHARD $TINY --batch 1 --ranks 3 --save-weights /proc/none",
     "cannot create the directory /proc/none"},
    {"--train $SHARD $TINY --batch 1 --ranks 3 --dtype fp16 --loss-scale 16777216 --run-dir none",
     "no step of 1 was applied"},
};
#undef USELESS

static void test_train_refusals(g2z_test *t) {
  test_run_shard(t, "shard.bin", 2000);
  setenv("SHARD", test_at(t, "shard.bin"), 1);
  setenv("TINY", "--device cpu --layers 1 --channels 8 --heads 1 --context 8 --vocab-size 257 "
                 "--max-train-steps 1", 1);
  for (size_t i = 0; i < sizeof test_train_bad / sizeof *test_train_bad; i++) {
    const char *said = test_trains(t, 1, "--run-dir %s %s", test_at(t, "run"),
                                   test_train_bad[i][0]);
    const char *first = strstr(test_train_bad[i][0], "--ranks 3") ? strstr(said, "train: ") : said;
    FAIL_IF(t, !first || strncmp(first, "train: ", 7) != 0 ||
            test_times(said, test_train_bad[i][1]) != 1, "%s: %s", test_train_bad[i][0], said);
  }
  /* A directory named by the clock holds no checkpoint from an earlier start. */
  CHECK_HAS(t, test_trains(t, 1, "--train $SHARD --resume latest --layers 1 --channels 64"),
            "--resume latest needs the directory of the run: give --run-dir");
  /* Weights take no name of a run's own files, which docs/formats.md lists. */
  char names[2048], *rest;
  CHECK(t, test_shell("awk -F'|' '/^## /{on=/Run/} /^[*]/{on=0} on && /`/{print $2}' "
                      "docs/formats.md | tr -d '/`,' | grep . && echo best.partial best/x",
                      names, sizeof names) == 0);
  for (char *name = strtok_r(names, " \n", &rest); name; name = strtok_r(NULL, " \n", &rest))
    CHECK_HAS(t, test_trains(t, 1, "--train $SHARD $TINY --run-dir %s --save-weights '%s/%s'",
                             test_at(t, "run"), test_at(t, "run"), name),
              test_text(" the name %.*s for itself: ", (int)strcspn(name, "/"), name),
              "such as ", "/run/weights\n");
  unsetenv("SHARD");
  unsetenv("TINY");
  CHECK(t, !test_there(t, "run"));
}

/* Without a GPU --device cuda is refused. A plan is arithmetic: it needs no GPU, no other ranks. */
static void test_train_device(g2z_test *t) {
  size_t free_bytes, total_bytes;
  if (g2z_device_memory(&t->services, G2Z_DEVICE_CUDA, &free_bytes, &total_bytes) == G2Z_OK)
    SKIP(t, "there is a GPU, so --device cuda is no error");
  test_run_shard(t, "x.bin", 2000);
  const char *said = test_trains(t, 1, "--device cuda --train %s --vocab-size 257 --context 16 "
                                 "--batch 1 --run-dir none", test_at(t, "x.bin"));
  CHECK_HAS(t, said, "train: ");
  CHECK(t, strstr(said, "CUDA") || strstr(said, "cuda") || strstr(said, "GPU"));
  CHECK_HAS(t, test_trains(t, 0, "--gpus 8 --model gpt2-xl --dry-run"), "rank 0 of 8", "fp16");
  CHECK_HAS(t, test_trains(t, 0, "--device cuda --gpus 8 --model gpt2-xl --dry-run"),
            "rank 0 of 8", "whether this plan fits");
  CHECK_HAS(t, test_trains(t, 0, "--device cuda --gpus 4 --strategy dp --recompute block "
                           "--dry-run"),
            "the optimizer on rank 0 alone, rank 0 of 4", "1.391 GiB  master weights",
            "0.399 GiB  activations");
}

/* Flags of a model that trains in seconds; creates its shard of 2,000 tokens. */
static const char *test_tiny(g2z_test *t) {
  if (!test_there(t, "x_train_0.bin")) test_run_shard(t, "x_train_0.bin", 2000);
  return test_text("--train '%s' --vocab-size 257 --device cpu --layers 1 --channels 32 --heads 4 "
                   "--context 16", test_at(t, "x_train_*.bin"));
}

/* From a shard to weights and to a text that they generate. Flags may repeat the weights' model
 * settings, but not contradict them. */
static void test_train_run(g2z_test *t) {
  static const struct {
    const char *flags;
    int code;
    const char *says;
  } cases[] = {
      {"--context 8", 1, "--context means context=8, but the weights in "},
      {"--channels 32 --vocab-size 300", 1, "have vocab=257: remove --vocab-size, or"},
      {"--model gpt2", 1, "--model means layers=12, but the weights in "},
      {"--model gpt2 --layers 1 --channels 32 --heads 4 --context 16", 0, "1"},
      {"--layers 1 --channels 32 --heads 4 --context 16", 0, "1"},
      {"--channels 32 --vocab-size 257", 0, "1"},
      {"--fp8 all", 0, "--fp8 all is not used: 8 bits are for training only\n1"},
      {"--fp8 all --dtype fp16 --batch 1 --val %s/x_val_0.bin", 0, "| val loss "}};
  CHECK_HAS(t, test_trains(t, 0, "--dry-run --device cpu --layers 2 --channels 64 --seq 32 "
                           "--batch 2"), "2 layers", "largest");
  CHECK(t, access("runs/run_dry", F_OK) != 0);
  test_run_shard(t, "x_val_0.bin", 200);
  CHECK_HAS(t, test_trains(t, 0, "%s --val=%s --batch 2 --global-batch 4 --steps 12 "
                           "--max-train-steps 10 --lr 1e-2 --val-every 5 --prompt '4 5' "
                           "--sample-tokens 8 --dropout 0.1 --dtype bf16 --seed 7 --run-dir %s "
                           "--save-weights %s", test_tiny(t), test_at(t, "x_val_0.bin"),
                           test_at(t, "run"), test_at(t, "weights")),
            "step 10/10 | loss", "step 10/10 | val loss ", "[Rank 0] RUN_COMPLETE",
            "\ndone: loss ", ", best validation loss ", ", 10 steps, 640 tokens, ",
            "/run/report.html\n", "/weights --prompt 'The'\n", "\nTo train these weights ");
  CHECK(t, test_there(t, "run/RUN_COMPLETE.txt"));

  /* On a terminal the marker for programs is not shown; train.log has it. */
  char said[8192];
  if (test_terminals() && test_shell("script --version", said, sizeof said) == 0) {
    const char *command = test_text("%s %s --steps 2 --sample-tokens 0 --run-dir %s",
                                    test_train_program(), test_tiny(t), test_at(t, "shown"));
    test_shell(test_text("script -qec \"%s\" /dev/null", command), said, sizeof said);
    CHECK_HAS(t, said, "done: loss ");
    CHECK(t, !strstr(said, "RUN_COMPLETE"));
    CHECK_HAS(t, test_read(t, "shown/train.log"), "[Rank 0] RUN_COMPLETE checkpoint_path=");
  }

  /* config.json describes the training; Python finds the tokenizer and the sampling settings. */
  CHECK_HAS(t, test_read(t, "weights/config.json"), "\"attn_pdrop\": 0.1,");
  CHECK_HAS(t, test_read(t, "weights/tokenizer_config.json"), "GPT2Tokenizer",
            "\"clean_up_tokenization_spaces\": false");
  CHECK_HAS(t, test_read(t, "weights/generation_config.json"), "\"eos_token_id\": 256",
            "\"temperature\": 0.8");

  /* The tokenizer lies next to the weights, so generation needs no other flag. */
  const char *output = test_trains(t, 0, "--init-from %s --prompt '1 2' --temperature 0 "
                                   "--sample-tokens 4 --run-dir none --device cpu",
                                   test_at(t, "weights"));
  CHECK(t, strncmp(output, "1 2", 3) == 0 && test_times(output, "\n") == 1);
  CHECK(t, access("runs", F_OK) != 0 || test_times(output, "run_") == 0);
  setenv("NCCL_LOGS", "1", 1);
  output = test_trains(t, 1, "--init-from %s --val '%s' --run-dir none --device cpu",
                       test_at(t, "weights"), test_at(t, "x_val_0.bin"));
  unsetenv("NCCL_LOGS");
  CHECK_HAS(t, output, "NCCL_LOGS=1 writes into the run directory");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    CHECK_HAS(t, test_trains(t, cases[i].code, "--init-from %s --prompt 1 --sample-tokens 1 "
                             "--run-dir none --device cpu %s", test_at(t, "weights"),
                             test_text(cases[i].flags, t->directory)), cases[i].says);
}

/* A run whose 8 bits clamp numbers says so once, and a run in 16 bits has nothing to say. A rate of
 * 15 takes the weights beyond 13.5 in the first step. */
static void test_train_clamped(g2z_test *t) {
  static const char *const flags[] = {"", "--fp8 forward", "--fp8 logits",
                                      "--fp8 forward --ranks 2",
                                      "--fp8 forward --optimizer muon --adam-lr 14"};
  for (int i = 0; i < 5; i++) {
    const char *said = test_trains(t, 0, "%s --dtype bf16 --batch 2 --steps 5 --lr 15 --warmup 0 "
                                   "--run-dir none %s", test_tiny(t), flags[i]);
    CHECK(t, test_times(said, "warning: step 2: 8 bits clamp ") == (i > 0));
    CHECK(t, test_times(said, ": 8 bits clamp ") == (i > 0));
    if (i > 0)
      CHECK_HAS(t, said, "--fp8 none, or with a lower --lr (15)",
                i == 4 ? " and --adam-lr (14) or a higher --weight-decay (0.1)\n" : " or a higher ");
  }
}

/* Sets with weights: a run that stops in the middle ends like one that does not; any number of ranks
 * reads the same sequences; other weights and epochs are refused. */
static void test_train_mixture(g2z_test *t) {
  static const struct {
    const char *flags, *says;
  } refused[] = {
      {":.5 --steps 32 --resume latest", "was saved with other training shards, weights, sequence "
       "length or seed (187 sequences of 16 tokens, seed 1337), and a mixture continues only with "
       "the same: resume with the --train flags, --seq and --seed of that run, or start a new run from "
       "its weights: --init-from /"},
      {":.3 --steps 32 --seed 5 --resume latest", "seed 1337), and a mixture continues only with "},
      {NULL, "(187 sequences of 16 tokens, seed 1337), and a mixture continues only with the same: "},
      {":.3 --epochs 2", "training shards with weights are mixed without an end, so there are "
       "no epochs: give --steps N\n"},
      {":.3", "so there are no epochs: give --steps N\n"},
      {":.3 --steps 3 --save-epochs", "so there are no epochs: give --steps N and --save-every N, "
       "and remove --save-epochs\n"},
      {" --steps 3", "b.bin\" has no weight, but with 2 sets each needs one: type --train '"}};
  char page[600] = "";
  test_run_shard(t, "a.bin", 2001);
  test_run_shard(t, "b.bin", 1001);
  const char *flags = test_kept(t, test_text(
      "--vocab-size 257 --device cpu --layers 1 --heads 2 --channels 32 --context 16 "
      "--sample-tokens 0 --save-every 99 --train '%s:.7' --train '%s'", test_at(t, "a.bin"),
      test_at(t, "b.bin")));
  for (int world = 1; world <= 4; world += 3) {
    const char *whole = test_kept(t, test_text("%s:.3 --ranks %d --batch %d --steps 32", flags,
                                               world, 4 / world));
    CHECK_HAS(t, test_trains(t, 0, "%s --run-dir %s", whole, test_at(t, "whole%d", world)),
              "\ntraining: 32 steps of a mixture\nmixture: 70.00 % of the sequences from ",
              "\nmixture: 30.00 % of the sequences from ");
    test_trains(t, 0, "%s --run-dir %s --max-train-steps 13", whole, test_at(t, "parts%d", world));
    test_trains(t, 0, "%s --run-dir %s --resume latest", whole, test_at(t, "parts%d", world));
    test_sh(t, "cmp whole%d/weights/model.safetensors parts%d/weights/model.safetensors", world,
            world);
    for (int parts = 0; parts < 2; parts++) {
      const char *text = test_read(t, "%s%d/training_metrics.json", parts ? "parts" : "whole",
                                   world);
      text = strstr(text, "\"dataset_mixture\": [");
      CHECK(t, text != NULL && strchr(text, ']'));
      if (!text) continue;
      if (!page[0]) snprintf(page, sizeof page, "%.*s", (int)strcspn(text, "]"), text);
      CHECK(t, strncmp(page, text, strlen(page)) == 0);
    }
  }
  /* floor(0.7 * 128) = 89 of 128 sequences; 89 * 16 tokens; 89 of 125 sequences. */
  CHECK_HAS(t, page, "a.bin\"", "b.bin\"", "\"weight\": 0.7,", "\"weight\": 0.3,",
            "\"share\": 0.6953125,", "\"tokens\": 1424,", "\"passes\": 0.712\n");
  CHECK_HAS(t, test_read(t, "whole1/report.html"), "<h2>Mixture</h2>",
            "a.bin<td>70.000<td>69.531<td>1424<td>0.712</tr>");
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    const char *whole = refused[i].flags ? test_text("%s%s", flags, refused[i].flags) :
        test_text("%.*s --train '%s' --steps 32 --resume latest", /* the shards without weights */
                  (int)(strstr(flags, " --train") - flags), flags, test_at(t, "[ab].bin"));
    CHECK_HAS(t, test_trains(t, 1, "%s --batch 4 --run-dir %s", whole,
                             test_at(t, i > 2 ? "new" : "whole1")), refused[i].says);
  }
  CHECK(t, !test_there(t, "new"));
}

/* Runs ./train after `before` on a terminal with so many columns; returns its output. */
static int test_train_terminal(g2z_test *t, int columns, const char *before, const char *arguments,
                               char *output, size_t room) {
  struct winsize size = {24, (unsigned short)columns, 0, 0};
  size_t used = 0;
  ssize_t got;
  int status = -1, master = posix_openpt(O_RDWR | O_NOCTTY);
  CHECK(t, master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
  int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
  CHECK(t, terminal >= 0 && ioctl(terminal, TIOCSWINSZ, &size) == 0);
  const char *command = test_text("%s exec %s %s", before, test_train_program(), arguments);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    setsid();
    ioctl(terminal, TIOCSCTTY, 0); /* puts the child in the terminal's foreground */
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

/* On a terminal, steps share one line, which never wraps; validations get separate lines, and so
 * does the step before each. Validations and the files of --eval show their progress. If a
 * launcher or another process has the terminal, each displayed step is a line. */
static void test_train_console(g2z_test *t) {
  static const int widths[] = {80, 40};
  static char output[1 << 20];
  if (!test_terminals()) SKIP(t, "there is no /dev/pts: mount devpts");
  test_run_shard(t, "x_val_0.bin", 2000);
  for (int i = 0; i < 2; i++) {
    int longest = 0, steps = 0, lines = 0, vals = 0, column = 0;
    const char *arguments = test_text("%s --val '%s' --layers 2 --channels 64 --context 32 "
                                      "--batch 4 --steps 100 --val-every 50 --val-steps 1 "
                                      "--sample-tokens 0 --run-dir none", test_tiny(t),
                                      test_at(t, "x_val_*.bin"));
    CHECK(t, test_train_terminal(t, widths[i], "", arguments, output, sizeof output) == 0);
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
    CHECK(t, steps > lines && steps < 100); /* drawn over each other, and not every step */
    CHECK(t, vals >= 2 && lines == 2 * vals); /* the last step before each validation stays */
    CHECK(t, strstr(output, "\nstep 100/100 | loss ") || strstr(output, "\rstep 100/100 | loss "));
  }
  static const char *const scored[][2] = {
      {"--val '%s/x_val_*.bin' --init-from '%s/weights'", "validation: 0 %"},
      {"--eval '%s/x_val_0.bin' --init-from '%s/weights'", "x_val_0.bin: 0 %"},
      {"--eval '%s/q.jsonl' --init-from '%s/weights'", "q.jsonl: 0 %"},
      {"--train '%s/x_val_*.bin' --steps 1 --eval '%s/q.jsonl'", "q.jsonl: 0 %"}};
  static const char question[] =
      "{\"ctx\": \"1 2\", \"endings\": [\" 3\", \" 4\"], \"label\": 0}\n";
  test_write_file(t, test_at(t, "q.jsonl"), question, sizeof question - 1);
  test_trains(t, 0, "%s --steps 1 --run-dir none --save-weights %s", test_tiny(t),
              test_at(t, "weights"));
  for (int i = 0; i < 4; i++) {
    const char *arguments = test_text(
        "%s --device cpu --batch 1 --seq 8 --vocab-size 257 --sample-tokens 0 --run-dir none %s",
        test_text(scored[i][0], t->directory, t->directory),
        i == 3 ? "--layers 1 --channels 32 --context 16" : "");
    CHECK(t, test_train_terminal(t, 80, "", arguments, output, sizeof output) == 0);
    CHECK_HAS(t, output, scored[i][1]);
  }
  static const char *const others[][2] = {{"RANK=0 WORLD_SIZE=1 MASTER_PORT=29500", ""},
                                          {"OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0", ""},
                                          {"", "--ranks 2 --batch 1"}};
  for (int i = 0; i < 3; i++) {
    const char *arguments = test_text("%s --steps 60 --batch 2 --sample-tokens 0 --run-dir none %s",
                                      test_tiny(t), others[i][1]);
    CHECK(t, test_train_terminal(t, 80, others[i][0], arguments, output, sizeof output) == 0);
    CHECK_HAS(t, output, "step 1/60 | ", "step 60/60 | ");
    for (const char *c = output; (c = strchr(c, '\r')) != NULL; c++) CHECK(t, c[1] == '\n');
  }
}

/* train.log has the console's lines, in the same order. Steps are progress: the console shows some
 * of them, and always the one before a validation. Waiting threads sleep by default; the user's
 * variable overrides this. With OMP_PROC_BIND the first thread keeps all cores. */
static void test_train_log(g2z_test *t) {
  static const char *const cases[] = {
      "--val-every 3 --save-every 2 --keep 1 --warmup 9 --eval q.txt --prompt 1",
      ("--val-every 3 --keep-best --patience 1 --lr 0 --target-loss 9 --ranks 2 --batch 2 "
       "--save-weights none"),
      "--val-every 2 --resume run0/step-000008 --init-from run0/weights --steps 12"};
  static const char *const variables[] = {"env -u OMP_WAIT_POLICY",
                                          "env -u OMP_WAIT_POLICY OMP_PROC_BIND=true",
                                          "OMP_WAIT_POLICY=active"};
  test_write_file(t, test_at(t, "q.txt"), "a text", 6);
  test_run_shard(t, "x_val_0.bin", 300);
  const char *program = test_train_program(), *tiny = test_tiny(t);
  char here[512] = "";
  CHECK(t, *program == '/' || getcwd(here, sizeof here));
  for (int i = 0; i < 3; i++) {
    test_sh(t, "%s %s/%s %s --val x_val_0.bin --vocab-size 257 --steps 8 --run-dir run%d %s "
            "> console", variables[i], here,
            program, tiny, i, cases[i]);
#ifdef _OPENMP
    test_sh(t, "grep '\"OMP_WAIT_POLICY\": \"%s\"' run%d/launcher_metadata.json > out",
            i == 2 ? "active" : "passive", i);
    if (i == 1)
      test_sh(t, "grep '\"OMP_PROC_BIND\": \"false\"' run1/launcher_metadata.json > out");
#endif
    test_sh(t, "S='^step [0-9/]* | loss '; grep -v \"$S\" console > shown; "
               "sed 's/^[0-9-]*T[0-9:]*Z  //' run%d/train.log | grep -v \"$S\" | diff - shown", i);
    test_sh(t, "awk '/ val loss / && last != $2 { exit 1 } / \\| loss / { last = $2 }' console && "
               "grep -q ' val loss ' console");
  }
#if defined(__linux__)
  test_sh(t, "%s %s/%s %s --vocab-size 257 --steps 999999 --run-dir bound > console & p=$!; "
             "until grep -q '^step 1/' console || ! kill -0 $p; do sleep 0.05; done; "
             "grep Cpus_allowed: /proc/$p/status > cores; kill -9 $p; "
             "grep Cpus_allowed: /proc/self/status | diff - cores", variables[1], here, program,
          tiny);
#endif
  test_sh(t, "ls run0/step-000008/tokenizer_config.json run0/weights/merges.txt > out && "
             "[ ! -e run1/weights ] && [ ! -e none ]");
  CHECK(t, test_files_count(t, "run0/step-") == 1);
}

/* A line for a shell ($D: the test's directory), its exit code, and words that it prints. */
typedef struct test_line {
  const char *command;
  int code;
  const char *says[3];
} test_line;
#define TEST_LINES(t, lines) test_lines(t, lines, sizeof lines / sizeof *lines)
static void test_lines(g2z_test *t, const test_line *lines, size_t count) {
  static char said[16384];
  for (size_t i = 0; i < count; i++) {
    const char *command = test_text("D='%s'; { %s; } 2>&1", t->directory, lines[i].command);
    const int code = test_shell(command, said, sizeof said);
    FAIL_IF(t, code != lines[i].code, "%s ended with %d: %s", lines[i].command, code, said);
    CHECK_HAS(t, said, lines[i].says[0], lines[i].says[1], lines[i].says[2]);
  }
}

/* Skips a test without this file, or if this command fails. */
#define FILE_OR_SKIP(t, file, command)                                           \
  if (access(file, R_OK) != 0) SKIP(t, "no " file ": run it in the repository"); \
  if (system("(" command ") > /dev/null 2>&1") != 0) SKIP(t, "failed: " command)

/* In a directory whose name contains a space: a program is rebuilt if and only if its command has
 * changed: other flags, or an nvcc that appears after a build for the CPU. make -n predicts it. */
static void test_make_command(g2z_test *t) {
#define BUILDS(times, arguments)                                                           \
  {"cd \"$D/a b\" && for dry in -n ''; do env -u MAKEFLAGS make $dry " arguments " train " \
   "2> /dev/null | grep -c 'train.cu -o train'; done; true", 0, {times "\n" times "\n"}}
  static const test_line lines[] = {
      {"cp Makefile \"$D/a b\" && cd \"$D/a b\" && env -u MAKEFLAGS make -n NVCC= all", 0,
       {" bench.cu -o bench ", " train.cu -o train "}},
      BUILDS("1", "NVCC="),
      BUILDS("0", "NVCC="),
      BUILDS("1", "NVCC= CFLAGS=-O0"),
      BUILDS("0", "NVCC= CFLAGS=-O0"),
      BUILDS("1", "NVCC=./nvcc ARCH=90a"),
      BUILDS("0", "NVCC=./nvcc ARCH=90a"),
      BUILDS("1", "NVCC=./nvcc ARCH=80"),
      /* a setting of the user's own must not replace a variable of the Makefile */
      {"cd \"$D/a b\" && env -u MAKEFLAGS make CUDA=0 train", 2,
       {"CUDA: no setting of this Makefile", "To build without CUDA: make NVCC=."}},
      {"cd \"$D/a b\" && env -u MAKEFLAGS make NVCC= OPENMP=0 train", 2, {"OPENMP: no setting"}}};
#undef BUILDS
  FILE_OR_SKIP(t, "Makefile", "make --version");
  test_sh(t, "mkdir 'a b' && cd 'a b' && touch gpt2_zero.h bench.cu prepare_data.c && "
             "printf '#!/bin/sh\\nwhile [ $# -gt 1 ]; do\\n[ \"$1\" != -o ] || touch \"$2\"\\n"
             "shift\\ndone\\n' > nvcc && "
             "chmod +x nvcc && echo 'int main(void) { return 0; }' > train.cu");
  TEST_LINES(t, lines);
}

static void test_make_fetch(g2z_test *t) {
#define FETCH "cd \"$D\" && env -u MAKEFLAGS make gpt2 GPT2_URL=file://$PWD/"
  static const test_line lines[] = {
      {"cp Makefile \"$D\"; cd \"$D\" && mkdir bad && for f in config.json vocab.json merges.txt "
       "model.safetensors; do echo $f > bad/$f; done", 0, {""}},
      {FETCH "none", 2, {"cannot fetch file:"}},
      {"cd \"$D\" && env -u MAKEFLAGS make vocab VOCAB_URL=file:///none", 2,
       {"cannot fetch file:", "Without a network: make run, or your own text: ./prepare_data --tra"}},
      {FETCH "bad", 2, {"but 0daed7749b4f02b8f76240d5444551d7b0"}},
      {"ls -A \"$D/gpt2\" | grep .", 1, {""}},
      /* whatever lies under the name of an unfinished download is removed, not written to */
      {"cd \"$D/gpt2\" && echo mine > ../mine && ln -s ../mine config.json.partial && "
       "ln -s ../none vocab.json.partial && mkfifo merges.txt.partial", 0, {""}},
      {FETCH "bad $(cd bad && sha256sum *.* | "
       "sed 's/^\\([0-9a-f]*\\) *\\(.*\\)/GPT2_SUM_\\2=\\1/')", 0, {"bad/model.safetensors"}},
      {"cd \"$D\" && diff -r bad gpt2 && [ ! -L gpt2/config.json ] && [ ! -e none ] && cat mine", 0,
       {"mine\n"}}};
#undef FETCH
  FILE_OR_SKIP(t, "Makefile", "make --version && curl --version");
  TEST_LINES(t, lines);
}

/* The scripts of `make check` see a fault in a small file, and none in the file without it. */
static void test_make_check(g2z_test *t) {
  static const char rooms[] =
      "#if 1\nstatic int late(int x);\n"
      "/* ===== >>i00 the page */\nstatic int page(int x) { return late(x); }\n"
      "/* ===== >>i02 files */\nstatic int early(int x) { return x; }\n"
      "/* ===== >>i13 model */\nstatic int late(int x) { return early(x) + page(x); }\n"
      "/* ===== >>i14 trainer */\nstatic int last(int x) { return late(x); }\n#endif\n";
  static const char shape[] =
      "#define TWICE(x) do { x; x; } while (x ? 1 : 0)\n"
      "/* Is it so? a; b; */\n"
      "static int clean(int a, int (*f)(A, B, C, D, E, F, G, H, I)) {\n"
      "  const char *text = \"a ? b : c; \\\" d\"; // x; y;\n"
      "  int i = 0, j = '\\'';\n"
      "  for (i = 0, j = 1; i < a; i++) text++;\n"
      "  return j;\n"
      "}\n";
#define SHAPE(text) "{ cat $D/shape.h; printf '" text "'; } > $D/b.h && tests/shape.sh "
#define LINES(n) "{ echo 'int b() {'; yes '' | head -" n "; echo '}'; } > $D/b.h && tests/shape.sh "
  static const test_line lines[] = {
      {"tests/rooms.sh $D/rooms.h", 0, {"ok    rooms: each calls"}},
      {"sed 's/return x/return late(x)/' $D/rooms.h > $D/a.h; tests/rooms.sh $D/a.h", 1,
       {"FAIL  room i02 calls a room below it", "a.h:2:"}}, /* late() is declared in line 2 */
      {"sed 's/+ page/+ last/' $D/rooms.h > $D/a.h; tests/rooms.sh $D/a.h", 1,
       {"FAIL  room i13 calls a room below it", "a.h:8:"}},
      {SHAPE("") "$D/b.h", 0, {"      6  166.7      0      0      0      0\n"}},
      {SHAPE("int b = 1 ? 2 ? 3 : 4 : 5 ? 6 : 7;") "$D/b.h", 1, {"over the limit: ternary 30\n"}},
      {SHAPE("int b(int x) { x++; return x; }") "$D/b.h", 1,
       {"      7  142.9      1      0      0      0   over the limit: two 0\n"}},
      {SHAPE("int b(int x) { x++; return x; }") "--list two $D/b.h", 0, {"b.h:9: int b("}},
      {SHAPE("int b() {\\n  if (x) x = 1, y = 2;\\n}\\n") "--list comma $D/b.h", 0, {"b.h:10: "}},
      {SHAPE("int b() {\\n  x = 1,\\n  y += 2;\\n}\\n") "$D/b.h", 1, {"the limit: comma 0\n"}},
      {SHAPE("int\\nb(int, int, int, int, int, int, int, int, int);") "--list params $D/b.h", 0,
       {"b.h:10: b("}},
      {SHAPE("struct b {\\n  int (*b)(A, B, C, D, E, F, G, H, I);\\n};\\n") "$D/b.h", 0,
       {"      0      0      1      0\n"}},
      {LINES("98") "$D/b.h", 0, {"      0      0      0      0\n"}},
      {LINES("99") "--list long $D/b.h", 0, {"b.h:1: int b() {"}}};
#undef LINES
#undef SHAPE
  FILE_OR_SKIP(t, "tests/rooms.sh", "bash --version && cc --version");
  test_write_file(t, test_path(t, "rooms.h"), rooms, sizeof rooms - 1);
  test_write_file(t, test_path(t, "shape.h"), shape, sizeof shape - 1);
  TEST_LINES(t, lines);
}

/* examples/minimal.cu with only the header: it trains, resumes from its checkpoint, also on two
 * ranks, and reports missing arguments. README's program checks at the start what it needs at the
 * end. */
static void test_example_minimal(g2z_test *t) {
#define COMPILE "cc -Wall -Wextra -Werror "
  static const test_line lines[] = {
      {"cp examples/minimal.cu gpt2_zero.h README.md \"$D\"", 0, {""}},
      {"cd $D; " COMPILE "-O1 -x c minimal.cu -o minimal -lm -lpthread", 0, {""}},
      {"cd $D; ./minimal digits.bin 6 2 16 1 32", 0, {"step 1: loss 10.", "step 6: loss "}},
      {"cd $D; export WORLD_SIZE=2 MASTER_PORT=29431; for r in 0 1; do RANK=$r LOCAL_RANK=$r "
       "./minimal digits.bin 9 2 16 1 32 > out$r 2>&1 & done; wait $!; a=$?; wait; cat out?; "
       "! grep 'step 5: ' out? && exit $a", 0, {"step 7: ", "step 9: "}},
      {"cd $D; ls -d minimal-step-000006 minimal-step-000009", 0, {""}},
      {"cd $D; rm -r minimal-step-*; ./minimal digits.bin 5 2 16 1 32 | "
       "grep -c '^step [1-5]: loss '", 0, {"5\n"}}, /* each step once */
      {"cd $D; ./minimal digits.bin 6 x", 1, {"use: ./minimal SHARDS"}},
      {"cd $D; ./minimal none.bin", 1, {"\"none.bin\"", "quote a pattern"}},
      {"cd $D; sed -n '/^```c$/,/^```$/{/^```/!p}' README.md > main.c && " COMPILE "main.c -o main "
       "-lm -lpthread", 0, {""}},
      {"cd $D; mkdir step-001000 && ./main", 1, {"step-001000 exists: remove it"}}};
#undef COMPILE
  FILE_OR_SKIP(t, "examples/minimal.cu", "cc --version");
  test_run_shard(t, "digits.bin", 2000);
  TEST_LINES(t, lines);
}

/* The recipes of GPT-2 124M with --smoke download once, refuse damage, stop, resume and end. */
static void test_example_gpt2(g2z_test *t) {
  static const test_line lines[] = {
      {"mkdir -p $D/a/data && echo mine > $D/mine && "
       "ln -s $D/mine $D/a/data/hellaswag_val.jsonl.partial", 0, {""}},
      {"examples/gpt2_124M.sh --smoke $D/a --max-train-steps 25", 0,
       {"fetching fineweb_train_000002.bin", "step 25/25 | ", "3 questions: acc "}},
      {"cat $D/mine", 0, {"mine\n"}},
      {"examples/gpt2_124M.sh --smoke $D/a > $D/said && cat $D/said && ! grep fetching $D/said", 0,
       {"resumed after step 25", "step 60/60 | ", "done: loss "}},
      {"examples/gpt2_124M.sh --smoke $D/a", 0, {"a/run is complete"}},
      {"examples/gpt2_124M_muon.sh --smoke --gpus 2 $D/b --max-train-steps 10", 0,
       {"without --fp8 all", "optimizer: Muon", "step 10/10 | "}},
      {"examples/gpt2_124M_muon.sh --smoke $D/m > $D/said && cat $D/said && "
       "for d in a m; do sed -n 's/.*\"best_val_loss\": //p' $D/$d/run/training_metrics.json; done | "
       "tr '\n' ' ' | awk '{ exit !($2 + 1 < $1 + 0) }'", 0,
       {"schedule: linear, lr 0.0045 to 0 for Muon, lr 0.003 for AdamW", "step 60/60 | "}},
      {"rm $D/b/data/*val*; echo x >> $D/b/made/fineweb_val_000000.bin; "
       "examples/gpt2_124M_muon.sh --smoke $D/b", 1,
       {"fineweb_val_000000.bin is damaged or another file"}},
      {"rm $D/b/made/fineweb_val_000000.bin; examples/gpt2_124M.sh --smoke $D/b", 1,
       {"cannot download file://"}},
      {"examples/gpt2_124M.sh --gpus 3 $D/c", 1, {"use: examples/gpt2_124M.sh"}},
      {"examples/gpt2_124M_muon.sh --smoke", 1,
       {"gpt2_124M_muon.sh: use: examples/gpt2_124M_muon.sh [--smoke]"}},
      {"for s in gpt2_124M gpt2_124M_muon; do examples/$s.sh --help || exit; done | "
       "grep -c '/gpt2_124M\\(_muon\\)*.sh .*OUT .FLAGS'; slurm/profile.sh -h", 0,
       {"2\n", "  slurm/profile.sh RUN_DIR ./train "}},
      {"examples/gpt2_124M_muon.sh --help", 0, {"with Muon for the blocks'", "3.4 with AdamW.\n"}},
      /* Of four kinds of GPUs, three have 8-bit products. The programs print their flags. */
      {"mkdir -p $D/x/bin $D/x/data $D/x/out/data && cp -r examples $D/x && cd $D/x && "
       "touch data/vocab.bpe && (cd out/data && touch hellaswag_val.jsonl fineweb_val_000000.bin && "
       "for i in $(seq 103); do touch $(printf fineweb_train_%06d.bin $i); done) && "
       "printf '#!/bin/sh\\necho $GPU\\n' > bin/nvidia-smi && "
       "printf '#!/bin/sh\\necho \"$@\"\\n' > train && cp train prepare_data && "
       "chmod +x bin/* train prepare_data", 0, {""}},
      {"cd $D/x && for GPU in 8.6 8.9 9.0 12.0; do export GPU; PATH=$D/x/bin:$PATH "
       "G2Z_TRAIN= G2Z_PREPARE_DATA= examples/gpt2_124M_muon.sh out; done | "
       "grep -c -e '--fp8 all --optimizer muon --batch 32'", 0, {"3\n"}},
      {"ls $D/a/run/weights/model.safetensors $D/a/run/RUN_COMPLETE.txt", 0, {""}},
      {"ls -d $D/c", 2, {""}}};
  FILE_OR_SKIP(t, "examples/gpt2_124M.sh", "command -v curl");
  PREPARE_OR_SKIP(t);
  TRAIN_OR_SKIP(t);
  TEST_LINES(t, lines);
}

/* examples/finetune.sh on weights that ./train wrote: the tuned model completes a prompt like its
 * examples and stops there. Missing files are reported, and nothing is overwritten. */
static void test_example_finetune(g2z_test *t) {
#define TUNE "examples/finetune.sh "
  static const test_line lines[] = {
      {TUNE "$D/w $D/d.jsonl $D/out '7>' --lr 1e-2 --epochs 20 --batch 4", 0,
       {"\n7>hr.\n", "done: loss 0.0", "400 documents, 2266 tokens, 1466 of them targets"}},
      {TUNE "$D/w $D/d.jsonl $D/out", 1, {"use: " TUNE "WEIGHTS DATA.jsonl OUT PROMPT"}},
      {TUNE "$D/w $D/d.jsonl $D/out '7>'", 1, {"out is there: name a new directory"}},
      {TUNE "$D $D/d.jsonl $D/new '7>'", 1, {" has no config.json"}},
      {TUNE "$D/w $D/none.jsonl $D/new '7>'", 1, {"there is no file "}},
      {TUNE "$D/bare $D/d.jsonl $D/new '7>'", 1, {"bare has neither merges.txt nor "}},
      {TUNE "$D/w $D/text.jsonl $D/new '7>'", 1, {"line 1: no text in a field \"prompt\""}},
      {TUNE "$D/w $D/d.jsonl $D/new2 '7>' --colour x", 1, {"unexpected flag --colour"}},
      {TUNE "$D/w $D/d.jsonl $D/new3 '7>' --steps 5", 0,
       {"step 5/5 | ", "\n7>", "new3/weights DATA.jsonl "}},
      {TUNE "$D/w $D/d.jsonl $D/new4 '7>' --steps=6", 0, {"step 6/6 | ", "\n7>"}},
      {TUNE "$D/w $D/d.jsonl $D/new5 '7>' --max-train-steps 7", 0, {"step 7/7 | ", "\n7>"}},
      {TUNE "$D/w $D/d.jsonl $D/new6 '7>' --steps 5 --epochs 1", 1, {"both set the length"}},
      {TUNE "$D/long $D/d.jsonl $D/all '7>' --steps 1", 0, {"batch 1 x sequence 128 x"}},
      /* fewer tokens than the context: sequences are shorter, as many as a step needs */
      {"head -n 10 $D/d.jsonl > $D/ten.jsonl; " TUNE "$D/long $D/ten.jsonl $D/few '7>' --epochs 2", 0,
       {"training: 2 steps, 2.00 epochs of 1 step", "batch 1 x sequence 55 x", "\n7>"}},
      {TUNE "$D/long $D/ten.jsonl $D/few4 '7>' --batch 4", 0, {"batch 4 x sequence 13 x", "step 3/3 | "}},
      {TUNE "$D/long $D/ten.jsonl $D/few5 '7>' --batch=2 --seq 5", 0, {"batch 2 x sequence 5 x"}},
      {TUNE "--help", 0, {"\n  " TUNE "WEIGHTS DATA.jsonl OUT PROMPT [", "the training begins"}},
      {"ls $D/out/weights/model.safetensors $D/out/run/RUN_COMPLETE.txt", 0, {""}},
      {"ls -d $D/out/*val* $D/new $D/new2 $D/new6 2> /dev/null | grep .", 1, {""}}};
#undef TUNE
  FILE_OR_SKIP(t, "examples/finetune.sh", "true");
  PREPARE_OR_SKIP(t);
  TRAIN_OR_SKIP(t);
  FILE *file = fopen(test_at(t, "d.jsonl"), "w");
  REQUIRE_OK(t, file ? G2Z_OK : G2Z_IO);
  for (int i = 0; i < 400; i++) /* two lengths: sequences begin at every token */
    fprintf(file, i % 3 ? "{\"prompt\": \"%d>\", \"completion\": \"%c%c.\"}\n"
                        : "{\"prompt\": \"%d>\", \"completion\": \"%c.\"}\n",
            i % 9, 'a' + i % 9, 'k' + i % 9);
  CHECK(t, fclose(file) == 0);
  test_sh(t, "mkdir bare && echo '{}' > bare/config.json && echo '#version: 0.2' > bytes.bpe && "
             "printf '{\"text\": \"a\"}' > text.jsonl");
  PREPARES(t, "", "--vocab $D/bytes.bpe --field completion --out $D/base $D/d.jsonl");
  test_trains(t, 0, "--train '%s' --vocab '%s' --layers 1 --channels 32 --heads 2 --context 16 "
              "--max-train-steps 2 --run-dir none --sample-tokens 0 --save-weights '%s'",
              test_at(t, "base/d_train_*.bin"), test_at(t, "bytes.bpe"), test_at(t, "w"));
  test_trains(t, 0, "--train '%s' --vocab '%s' --layers 1 --channels 32 --heads 2 --context 128 "
              "--seq 16 --max-train-steps 2 --run-dir none --sample-tokens 0 --save-weights '%s'",
              test_at(t, "base/d_train_*.bin"), test_at(t, "bytes.bpe"), test_at(t, "long"));
  TEST_LINES(t, lines);
}

/* The files of both runs are equal, except for values from a clock. A line of save_ms may be lost:
 * a kill right after the rename. */
static void test_runs_equal(g2z_test *t, const char *one, const char *two) {
  test_sh(t, "for run in %s %s; do "
             "sed '/\"save_ms\"/d; s/\"[a-z]*_ms\".*//' $run/metrics.jsonl > $run.lines && "
             "grep -E '\"(epoch_idx|steps|micro_steps|optimizer_steps|tokens_processed_global|"
             "train_loss_avg_global|val_loss_avg_global|best_val_loss|reason)\"' "
             "$run/training_metrics.json >> $run.lines || exit; done; "
             "[ $(wc -w < %s.lines) -gt 40 ] && diff %s.lines %s.lines", one, two, one, one, two);
}

/* Two checkpoints, or weights, have the same contents. */
#define SAME(t, one, two) test_sh(t, "diff -r -x note.json -x CHECKSUMS %s %s", one, two)

/* 8 steps in 2 epochs, validations, a sample, checkpoints after steps 3, 4, 6 and 8. */
static test_run_setup test_run_saves(g2z_test *t, const char *run_dir) {
  test_run_setup s = test_run_prepare(t, run_dir);
  s.config.train.dropout = 0.1f;
  s.config.train.dtype = G2Z_FP16;
  s.config.train.optimizer.loss_scale = 4096; /* it grows, and no step is skipped */
  s.config.train.optimizer.loss_scale_window = 3;
  s.config.save_every = 3;
  s.config.save_epochs = 1;
  s.config.sample_every = 2;
  return s;
}

/* The same; and a warning must contain `says`. */
static test_run_seen test_run_warns(g2z_test *t, const test_run_setup *s, const char *says) {
  test_warnings_begin(t);
  test_run_seen seen = test_run_well(t, s);
  CHECK_HAS(t, test_warnings_end(t), says);
  return seen;
}

static void test_run_resume(g2z_test *t) {
  test_run_setup a = test_run_saves(t, "a"), b;
  test_run_seen seen = test_run_well(t, &a);
  CHECK(t, seen.steps == 8 && seen.saved == 4 && test_files_count(t, "a/step-") == 4);
  /* A crash after step 7: the last checkpoint is step 6. */
  b = test_run_saves(t, "b");
  test_sh(t, "cp -r a b && cd b && rm -r step-000008 RUN_COMPLETE.txt training_metrics.json "
             "weights && mkdir step-000009.partial && touch step-000009.partial/vocab.json "
             "step-000009.partial/merges.txt.partial && "
             "printf '{\"step\": 9, \"los' >> metrics.jsonl");
  b.config.resume = "latest";
  seen = test_run_well(t, &b);
  CHECK(t, seen.steps == 2 && seen.last_step == 8 && seen.saved == 1);
  test_runs_equal(t, "a", "b");
  SAME(t, "a/weights", "b/weights");
  SAME(t, "a/step-000008", "b/step-000008");
  CHECK(t, test_files_count(t, "b/*.partial") == 0 && test_there(t, "b/RUN_COMPLETE.txt"));
  const char *log = test_read(t, "b/train.log");
  CHECK(t, test_times(log, "step 7/8 | loss") == 1 && test_times(log, "step 8/8 | loss") == 1);
  CHECK(t, test_times(log, "step 3/8 | loss") == 1 && test_times(log, "sample after") == 4);
  CHECK_HAS(t, log, "resumed after step 6, from ");

  /* Resumed from a path, in the middle of an epoch: later checkpoints are removed. Files that a
   * user put into such a checkpoint stay, and a warning names them. */
  b.config.resume = test_at(t, "b/step-000003/");
  b.config.keep = 2;
  test_sh(t, "cd b && rm -r step-000004 step-000006 step-000008 && "
             "touch step-000003/optimizer.txt && mkdir step-000003/eval");
  seen = test_run_warns(t, &b, "cannot remove ");
  test_sh(t, "cd b && rmdir step-000003.partial/eval && rm step-000003.partial/*.txt && "
             "rmdir step-000003.partial");
  CHECK(t, seen.steps == 5 && seen.saved == 3);
  test_runs_equal(t, "a", "b");
  CHECK(t, test_files_count(t, "b/step-") == 2 && test_files_count(t, "b/step-000006") == 1);
  SAME(t, "a/step-000008", "b/step-000008");

  /* A finished run has nothing to do, except to remove a checkpoint that a kill kept from being
   * removed; a longer run continues. */
  test_sh(t, "cp -r a/step-000004 b");
  b.config.resume = "latest";
  seen = test_run_well(t, &b);
  CHECK(t, test_files_count(t, "b/step-") == 2 && !test_there(t, "b/step-000004"));
  CHECK(t, seen.steps == 0 && seen.done && test_there(t, "b/RUN_COMPLETE.txt"));
  CHECK(t, test_times(test_read(t, "b/train.log"),
                      "no step is left: the run has 8 steps, and the checkpoint is of step 8; "
                      "to continue, give more than --epochs 2") == 1);
  test_runs_equal(t, "a", "b");
  b.config.epochs = 3;
  /* If a checkpoint is a link to elsewhere, only the link is removed. */
  test_sh(t, "mv b/step-000006 moved && ln -s ../moved b/step-000006");
  seen = test_run_warns(t, &b, "b/step-000006.partial: Not a directory");
  CHECK(t, seen.steps == 4 && seen.last_step == 12);
  SAME(t, "a/step-000006", "moved");

  /* No checkpoint yet: starts over and replaces the crash's leftovers. */
  b = test_run_saves(t, "d");
  b.config.resume = "latest";
  for (int again = 0; again < 2; again++) {
    seen = test_run_well(t, &b);
    CHECK(t, seen.steps == 8);
    test_runs_equal(t, "a", "d");
    SAME(t, "a/weights", "d/weights");
    if (again) break;
    /* Trained weights in the directory stay, whether their run ended or was killed after saving. */
    static const char *const left[] = {"weights/model.safetensors", "RUN_COMPLETE.txt"};
    test_sh(t, "rm -r d/step-* && cp -r d kept");
    for (int i = 0; i < 4; i++) {
      b.config.resume = i % 2 ? "latest" : NULL;
      CHECK_BAD(t, test_run_all(t, &b.config, &seen),
                test_text("d holds a run that ended without a checkpoint (%s)", left[i / 2]));
      test_sh(t, "diff -r d kept");
      if (i % 2) test_sh(t, "rm d/%s kept/%s", left[i / 2], left[i / 2]);
    }
  }
  log = test_read(t, "d/train.log");
  CHECK(t, test_times(log, "no checkpoint in ") == 1 && test_times(log, "step 1/8 | loss") == 1);
}

/* A run that resumes another directory's checkpoint is a separate run: it counts its own tokens and
 * epochs, also after it is resumed. A further run begins with its weights. */
static void test_run_branches(g2z_test *t) {
  test_run_setup a = test_run_saves(t, "a"), b;
  test_run_well(t, &a);
  b = test_run_saves(t, "c");
  b.config.resume = test_at(t, "a/step-000006");
  test_run_seen seen = test_run_well(t, &b);
  CHECK(t, seen.steps == 2 && seen.last_step == 8 && test_files_count(t, "c/step-") == 1);
  SAME(t, "a/step-000008", "c/step-000008");

  /* Resumed once more. */
  b = test_run_saves(t, "e");
  const char *path = test_kept(t, test_text("%s/step-000004", a.run_dir));
  b.config.resume = path;
  b.config.max_train_steps = 6;
  test_run_well(t, &b);
  b.config.max_train_steps = 0;
  b.config.resume = "latest";
  for (int epochs = 2; epochs <= 3; epochs++) {
    b.config.epochs = epochs;
    CHECK(t, test_run_well(t, &b).steps == (epochs == 2 ? 2 : 4));
    const char *text = test_read(t, "e/training_metrics.json");
    CHECK(t, test_times(text, "\"epoch_idx\"") == epochs - 1);
    CHECK(t, test_times(text, "\"tokens_processed_global\": 512,") == epochs - 1);
    CHECK(t, test_times(text, "\"epoch_idx\": 1,") == 1);
    CHECK(t, test_times(text, "\"epoch_idx\": 2,") == epochs - 2);
  }

  /* Killed before its first save, it begins again with the other run's checkpoint. */
  b = test_run_saves(t, "f");
  b.config.resume = path;
  b.config.save_every = b.config.save_epochs = 0;
  b.config.save_weights = NULL;
  for (int last = 5; last >= 4; last--) {
    b.config.max_train_steps = last;
    CHECK(t, test_run_well(t, &b).steps == last - 4);
    CHECK_HAS(t, test_read(t, "f/RUN_COMPLETE.txt"), "checkpoint_path=none");
    test_sh(t, "rm f/RUN_COMPLETE.txt");
    b.config.resume = "latest";
  }
  test_sh(t, "mv a/step-000004 a/away");
  CHECK_IO(t, test_run_all(t, &b.config, &seen),
           "a/step-000004, from which it started, is gone: put it back");
  test_sh(t, "mv a/away a/step-000004");
  b.config.max_train_steps = 0;
  b.config.save_epochs = 1;
  CHECK(t, test_run_well(t, &b).steps == 4 && test_files_count(t, "f/step-") == 1);
  SAME(t, "a/step-000008", "f/step-000008");

  /* It is killed, or fails, while it opens its files. Before the origin is written, the directory
   * is no run, and the same command begins it. After a kill, --resume latest continues it. */
  static const struct {
    const char *file;
    int killed, is_run;
  } ends[] = {
      {"/resumed_from.txt.partial", 1, 0}, {"/train.log", 1, 1},
      {"/resumed_from.txt.partial", 0, 0}, {"/launcher_metadata.json.partial", 0, 0}};
  const char *copy = test_kept(t, test_text("cd '%s' && cp -r g killed", t->directory));
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    b = test_run_saves(t, "g");
    b.config.resume = path;
    test_fault.name = ends[i].file;
    test_fault.call = TEST_WRITE;
    test_fault.at = 1;
    test_fault.seen = 0;
    test_fault.error = EIO;
    test_fault.line = ends[i].killed ? copy : NULL;
    const g2z_status status = test_run_all(t, &b.config, &seen);
    test_fault.name = test_fault.line = NULL;
    FAIL_IF(t, test_fault.seen == 0 || status != (ends[i].killed ? G2Z_OK : G2Z_IO),
            "end %d: %s", (int)i, t->services.error);
    if (ends[i].killed) test_sh(t, "rm -r g && mv killed g");
    if (ends[i].is_run) {
      CHECK_BAD(t, test_run_all(t, &b.config, &seen), "g holds a run already");
      b.config.resume = "latest";
    }
    CHECK(t, test_run_well(t, &b).steps == 4 && test_files_count(t, "g/*.partial") == 0);
    SAME(t, "a/step-000008", "g/step-000008");
    test_sh(t, "rm -r g");
  }
}

/* A run's checkpoint and weights are its model: opened by a run without steps, by the program and by
 * the library, they have its last validation loss and write its last sample. */
static void test_run_weights(g2z_test *t) {
  TRAIN_OR_SKIP(t);
  test_run_setup a = test_run_saves(t, "a"), b;
  const test_run_seen seen = test_run_well(t, &a);
  for (int i = 0; i < 2; i++) {
    const int32_t *x, *y;
    double loss, sum = 0;
    g2z_loader *loader;
    b = test_run_prepare(t, "unused");
    b.config.train.dtype = G2Z_FP16;
    b.config.train.init_from = test_path(t, i ? "a/weights" : "a/step-000008");
    b.config.train.train_glob = NULL;
    b.config.run_dir = b.config.save_weights = NULL;
    const test_run_seen again = test_run_well(t, &b);
    CHECK_NEAR(t, again.val_loss, seen.val_loss, 1e-9);
    CHECK(t, strcmp(again.sample, seen.sample) == 0 && strlen(seen.sample) > 12);
    const g2z_loader_config lc = {a.val, 4, 16, 1, 0, 1, 257, G2Z_ORDER_FILE, 0};
    REQUIRE_OK(t, g2z_loader_create(&t->services, &lc, &loader));
    g2z_model *model = inuse_open(t, b.config.train.init_from, G2Z_FP16);
    for (int64_t step = 0; step < loader->steps_per_epoch; step++) {
      CHECK_OK(t, g2z_loader_next(loader, &x, &y));
      CHECK_OK(t, g2z_model_score(model, x, y, 4, 16, NULL, &loss));
      sum += loss;
    }
    CHECK_NEAR(t, sum / (double)loader->steps_per_epoch, seen.val_loss, 1e-6);
    g2z_loader_free(loader);
    CHECK_HAS(t, test_trains(t, 0, "--init-from %s --device cpu --dtype fp16 --eval %s --prompt "
                             "'1 2 3' --sample-tokens 12", b.config.train.init_from, a.val),
              test_text("loss %.4f | ", seen.val_loss), seen.sample);
  }
}

/* 24 of 32 sequences have been read; a step of 12 needs more than the other 8: the epoch ends. */
static void test_run_short_epoch(g2z_test *t) {
  static const char *const before[] = {"true", "cp -r a h && rm -r h/step-*[4-8]",
                                       "rm -r h/step-000005"};
  test_run_setup a = test_run_saves(t, "a"), b;
  test_run_well(t, &a);
  for (int i = 0; i < 3; i++) {
    const char *run = i ? "h" : "g";
    b = test_run_saves(t, run);
    test_sh(t, "%s", before[i]);
    b.config.resume = i ? "latest" : test_at(t, "a/step-000003");
    b.config.train.accum = 3;
    test_run_seen seen = test_run_well(t, &b);
    CHECK(t, seen.steps == 2 && seen.validations == 2 && seen.saved == (i ? 1 : 2));
    CHECK(t, test_files_count(t, i ? "h/step-" : "g/step-") == 2);
    for (int file = 0; file < 2; file++) {
      const char *text = test_read(t, "%s/%s", run, file ? "training_metrics.json"
                                                         : "metrics.jsonl");
      for (int epoch = 0; epoch < 2; epoch++)
        CHECK(t, test_times(text, test_text(file ? "\"epoch_idx\": %d," : "\"epoch\": %d,",
                                            epoch)) == 1);
      CHECK(t, test_times(text, "\"steps\": 3,") == (i && file));
    }
  }
}

static void test_run_resume_torn(g2z_test *t) {
  test_run_seen seen;
  test_run_setup a = test_run_saves(t, "a"), b;
  test_run_well(t, &a);
  b = test_run_saves(t, "b");
  b.config.resume = "latest";
  /* A torn line after the length that the checkpoint records: nothing is missing. */
  test_sh(t, "cp -r a b && printf '{\"step\": 8, \"val' >> b/metrics.jsonl");
  test_run_well(t, &b);
  test_runs_equal(t, "a", "b");
  /* Damage before that length stays. The page cannot be written, and a warning reports it; no sum
   * is wrong. */
  test_sh(t, "rm -r b; cp -r a b && sed -i '2s/:/;/' b/metrics.jsonl");
  test_run_warns(t, &b, "report.html is missing: ");
  CHECK_HAS(t, test_warnings, "line 2 is damaged");
  test_sh(t, "sed -i '2s/;/:/' b/metrics.jsonl");
  test_runs_equal(t, "a", "b");
  /* A log that has changed before that length is refused; the remedy in the message works. */
  static const char *const changes[] = {"sed -i '2s/:/;;/' metrics.jsonl",
                                        "truncate -s 300 metrics.jsonl", "truncate -s 9 train.log",
                                        "sed -i '1s/^/x/' train.log"};
  for (int i = 0; i < 4; i++) {
    test_sh(t, "rm -r b; cp -r a b && cd b && %s && cp -r ../b ../changed", changes[i]);
    CHECK_FORMAT(t, test_run_all(t, &b.config, &seen), i < 2 ? "b/metrics.jsonl has changed since "
                 "step 8 was saved: put it back, or begin another run from the checkpoint with "
                 "--run-dir NEW --resume " : "b/train.log has changed since step 8");
    CHECK_HAS(t, t->services.error, "b/step-000008");
    test_sh(t, "diff -r b changed && rm -r changed");
  }
  const char *from = strstr(t->services.error, "--resume ");
  b = test_run_saves(t, "c");
  b.config.resume = test_kept(t, from ? from + strlen("--resume ") : "");
  b.config.epochs = 3;
  CHECK(t, test_run_well(t, &b).steps == 4);
  /* A missing log is reported. */
  b = test_run_saves(t, "b");
  b.config.resume = "latest";
  test_sh(t, "rm -r b; cp -r a b && rm b/metrics.jsonl");
  test_run_warns(t, &b, "metrics.jsonl is gone or empty: it begins again after step 8");
}

static void test_run_resume_latest(g2z_test *t) {
  static const struct {
    const char *damage, *why;
  } cases[] = { /* checkpoint_damage has the rest */
      {"printf x | dd of=step-000008/model.safetensors bs=1 seek=2000 conv=notrunc 2> /dev/null",
       "the file is damaged"},
      {"rm step-000008/tuning.txt", "has no tuning.txt, which belongs to it"},
      {"rm step-000008/trainer_state.json", "has weights but no trainer_state.json"},
      {"rm -r step-000008 && touch step-000008", "has no trainer_state.json"},
      {"rm step-000008/tuning.txt && mkfifo step-000008/tuning.txt",
       "tuning.txt is a FIFO: copy the checkpoint again"}};
  test_run_seen seen;
  test_run_setup a = test_run_saves(t, "a"), b;
  test_run_well(t, &a);
  b = test_run_saves(t, "b");
  b.config.resume = "latest";
  alarm((unsigned)(120 * test_busy()));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_sh(t, "rm -rf b; cp -r a b && cd b && %s", cases[i].damage);
    seen = test_run_warns(t, &b, "b/step-000008 is skipped: ");
    CHECK_HAS(t, test_warnings, cases[i].why);
    CHECK(t, seen.steps == 2 && seen.last_step == 8 && seen.saved == 1);
    CHECK(t, test_there(t, "b/step-000008.damaged"));
    test_runs_equal(t, "a", "b");
    SAME(t, "a/step-000008", "b/step-000008");
    test_sh(t, "for run in a b; do sed -n '/^  \"validation\"/,/}/p' $run/training_metrics.json > "
               "$run.validation; done; grep -q text_hash a.validation && cmp a.validation "
               "b.validation"); /* a run that opens twice measures the validation's text once */
  }
  alarm(0);
  /* Several damaged ones are skipped in order; a checkpoint given by name is never replaced. */
  test_sh(t, "rm -r b; cp -r a b && rm b/step-00000[468]/model.safetensors");
  CHECK(t, test_run_well(t, &b).steps == 5 && test_files_count(t, "b/*.damaged") == 3);
  test_sh(t, "rm -r b; cp -r a b && rm b/step-000008/model.safetensors");
  const char *path = test_kept(t, test_text("%s/step-000008", b.run_dir));
  b.config.resume = path;
  CHECK_FORMAT(t, test_run_all(t, &b.config, &seen), "has no model.safetensors");
  b.config.resume = "latest";
  /* If none is intact, all are named and none is renamed. */
  test_sh(t, "rm -r b; cp -r a b && rm b/step-*/model.safetensors");
  CHECK_FORMAT(t, test_run_all(t, &b.config, &seen), "none of the checkpoints in ");
  CHECK(t, test_files_count(t, "b/*.damaged") == 0 && test_files_count(t, "b/step-") == 4);
  /* A checkpoint of another version or model is not damaged: it is an error, not skipped. */
  test_sh(t, "rm -r b; cp -r a b && sed -i 's/\"version\": 4/\"version\": 1/' "
             "b/step-000008/trainer_state.json");
  test_saved_sign(t, path, "trainer_state.json");
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_UNSUPPORTED, &t->services,
               "step-000008/trainer_state.json has version=1");
  test_sh(t, "rm -r b; cp -r a b");
  b.config.train.model.heads = 1;
  CHECK_BAD(t, test_run_all(t, &b.config, &seen), "step-000008 was saved by a model with heads=2");
  CHECK(t, test_files_count(t, "b/*.damaged") == 0);
  /* A file that cannot be examined is not treated as absent: the run stays unchanged. */
  static const char *const unseen[] = {"step-000008/trainer_state.json", "step-000008/note.json",
                                       "step-000008/model.safetensors", "metrics.jsonl"};
  b.config.train.model.heads = 2;
  for (size_t i = 0; i < sizeof unseen / sizeof *unseen; i++) {
    test_sh(t, "rm -rf b; cp -r a b && cd b && ln -sf loop %s && ln -sf loop loop && "
               "ln -sf loop step-000008/loop && cp -r ../b ../kept", unseen[i]);
    CHECK_IO(t, test_run_all(t, &b.config, &seen), "Too many levels of symbolic links");
    test_sh(t, "diff -r --no-dereference b kept && rm -r kept");
  }
}

static void test_run_resume_refusals(g2z_test *t) {
  test_run_seen seen;
  test_run_setup s = test_run_saves(t, "run");
  test_run_well(t, &s);
#define REFUSED(status, part) \
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), status, &t->services, part)
  REFUSED(G2Z_BAD_ARGUMENT, "holds a run already");
  const char *path = test_kept(t, test_text("%s/step-000004", s.run_dir));
  s.config.resume = path;
  REFUSED(G2Z_BAD_ARGUMENT, "holds checkpoints after step 4, up to step 8: remove them");
  s.config.resume = s.run_dir;
  REFUSED(G2Z_FORMAT, "no trainer_state.json");
  s.config.resume = "latest";
  s.config.train.model.layers = 2;
  REFUSED(G2Z_BAD_ARGUMENT, "step-000008 was saved by a model with layers=1");
  s.config.train.model.layers = 1;
  s.config.resume = "";
  REFUSED(G2Z_BAD_ARGUMENT, "resume is empty: give --resume latest");
  s.config.resume = "latest";
  s.config.run_dir = NULL;
  REFUSED(G2Z_BAD_ARGUMENT, "save_every needs a run_dir for the checkpoints");
  s.config.save_every = 0;
  REFUSED(G2Z_BAD_ARGUMENT, "save_epochs needs a run_dir");
  s.config.save_epochs = 0;
  s.config.keep_best = 1;
  REFUSED(G2Z_BAD_ARGUMENT, "keep_best needs a run_dir for the checkpoints: give --run-dir DIR");
  s.config.keep_best = 0;
  REFUSED(G2Z_BAD_ARGUMENT, "resume latest needs a run_dir");
  s.config.run_dir = s.run_dir;
  s.config.train.train_glob = NULL;
  REFUSED(G2Z_BAD_ARGUMENT, "resume needs the token shards of the run: give --train");
  s.config.train.train_glob = s.train;
  s.config.save_weights = path; /* must stay a checkpoint: it is resumed below */
  REFUSED(G2Z_BAD_ARGUMENT, "step-000004 is a checkpoint, whose weights belong to its other files");
  s.config.save_weights = NULL;
  uid_t self = geteuid(); /* not readable does not mean empty */
  CHECK(t, chmod(s.run_dir, 0333) == 0 && chmod(t->directory, 0755) == 0);
  if (self != 0 || seteuid(65534) == 0) {
    REFUSED(G2Z_IO, "cannot read the directory");
    CHECK(t, seteuid(self) == 0);
  }
  CHECK(t, chmod(s.run_dir, 0755) == 0 && chmod(t->directory, 0700) == 0);
  struct rlimit before = test_files_limit(100); /* the lines to keep have more bytes */
  REFUSED(G2Z_IO, "raise the limit of file sizes");
  test_files_unlimit(&before);
#undef REFUSED
  CHECK(t, test_files_count(t, "run/*.partial") == 0 && test_there(t, "run/RUN_COMPLETE.txt"));
  CHECK(t, test_times(test_read(t, "run/metrics.jsonl"), "\"loss\"") == 8);
  s.config.resume = path;
  s.config.max_train_steps = 5;
  test_run_memory(t, &s, &seen);
  CHECK(t, seen.last_step == 5);
}

/* A resumed run removes the files that its earlier end wrote. If another program wrote a file of
 * that name, the run refuses it at the start, not in the middle of training. */
static void test_run_goes_on(g2z_test *t) {
  test_run_seen seen;
  g2z_run *run;
  test_run_setup s = test_run_saves(t, "run");
  test_run_well(t, &s);
  CHECK(t, test_there(t, "run/training_metrics.json"));
  s.config.resume = "latest";
  s.config.epochs = 3;
  const int before = t->owned_count;
  REQUIRE_OK(t, test_run_open(t, &s.config, &run));
  CHECK(t, !test_there(t, "run/training_metrics.json") && !test_there(t, "run/RUN_COMPLETE.txt"));
  test_end(t, before);
  /* A run that ended inside an epoch and is started again reports that epoch unchanged. */
  s.config.max_train_steps = 10;
  for (int i = 0; i < 2; i++) {
    CHECK(t, test_run_well(t, &s).steps == (i ? 0 : 2));
    const char *text = test_read(t, "run/training_metrics.json");
    CHECK(t, test_times(text, "\"steps\": 4,") == 2 && test_times(text, "\"steps\": 2,") == 1);
    CHECK(t, test_times(text, "\"epoch_wall_time_sec\": 0,") == 0);
    CHECK(t, test_times(text, "\"step_time_p50_sec\": null") == 0);
  }
  /* A run in which the mark of its end would stay does not start. */
  test_sh(t, "rm run/RUN_COMPLETE.txt && mkdir run/RUN_COMPLETE.txt");
  s.config.max_train_steps = 12;
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_IO, &t->services,
               "run/RUN_COMPLETE.txt: Is a directory");
  CHECK(t, seen.steps == 0);
  s = test_run_prepare(t, "other");
  test_sh(t, "mkdir other && echo '{\"schema_version\": \"1.0\"}' > other/training_metrics.json");
  CHECK_BAD(t, test_run_all(t, &s.config, &seen), "holds a training_metrics.json, which a run");
  /* Another run's checkpoints are refused, too: "latest" would resume them. */
  test_sh(t, "rm other/*.json && mkdir other/step-000007");
  CHECK_BAD(t, test_run_all(t, &s.config, &seen), "holds a run already (step-000007)");
  CHECK(t, !test_there(t, "other/metrics.jsonl"));
  /* Files of other programs do not make a directory a run. */
  test_sh(t, "rmdir other/step-000007 && echo mine | tee other/train.log > other/sample.txt");
  for (int i = 0; i < 4; i++) {
    const char *file = i < 2 ? "train.log" : "sample.txt";
    s.config.resume = i % 2 ? "latest" : NULL;
    CHECK_BAD(t, test_run_all(t, &s.config, &seen),
              test_text("other is not a run directory and holds a %s", file));
    CHECK(t, strcmp(test_read(t, "other/%s", file), "mine\n") == 0);
    if (i % 2) test_sh(t, "rm other/%s", file);
  }
  s.config.resume = NULL;
  /* A long path is printed in full. */
  s.config.run_dir = s.run_dir = test_kept(t, test_at(t, "%0180d/%0180d", 1, 2));
  s.config.save_weights = NULL;
  s.config.save_epochs = 1;
  test_run_well(t, &s);
  CHECK_HAS(t, test_read(t, "%0180d/%0180d/RUN_COMPLETE.txt", 1, 2),
            test_text("checkpoint_path=%s/step-000008 world_size=1", s.run_dir));
}

/* A run that is stopped after one of the first steps saves, reports that and, resumed, ends like
 * any other. So does a run whose system calls a signal interrupts, or which transfer fewer bytes
 * than requested. */
static void test_run_stop(g2z_test *t) {
  static const struct {
    int stop, interrupted;
    const char *name;
  } cases[] = {
      {1, 0, "b"}, {4, 0, "c"}, {0, 1, "d"}, {3, 1, "e"}};
  test_run_seen seen;
  test_run_setup a = test_run_saves(t, "a"), b;
  test_run_well(t, &a);
  for (int i = 0; i < 4; i++) {
    const char *name = cases[i].name;
    const int at = cases[i].stop;
    b = test_run_saves(t, name);
    test_run_stop_at = at;
    test_interrupts = cases[i].interrupted;
    g2z_status status = test_run_all(t, &b.config, &seen);
    const int last = (int)seen.last_step;
    CHECK_STATUS(t, status, at ? G2Z_STOPPED : G2Z_OK, &t->services,
                 at ? "by SIGTERM, saved. To continue: " : NULL);
    CHECK(t, last == 8 || (last >= at && last <= at + 3)); /* the loss arrives one step later */
    if (at) {
      CHECK_HAS(t, test_read(t, "%s/training_metrics.json", name), "\"reason\": \"signal\"",
                "\"SIGTERM\"", "\"run_complete_file\": null");
      CHECK(t, test_times(test_read(t, "%s/metrics.jsonl", name), "\"loss\"") == last);
      test_sh(t, "[ -d %s/step-%06d ] && [ ! -e %s/RUN_COMPLETE.txt ]", name, last, name);
      b.config.resume = "latest";
      CHECK(t, test_run_well(t, &b).steps == 8 - last);
    } else test_runs_equal(t, "a", name);
    test_interrupts = 0;
    SAME(t, "a/step-000008", test_text("%s/step-000008", name));
    SAME(t, "a/weights", test_text("%s/weights", name));
  }

  /* A signal that comes when the run is done does not change its exit code. */
  for (int done = 0; done < 2; done++) {
    g2z_run_event event;
    g2z_run *run;
    int ended = -1;
    b = test_run_saves(t, done ? "done" : "failed");
    CHECK_OK(t, test_run_open(t, &b.config, &run));
    do CHECK_OK(t, g2z_run_next(run, &event));
    while (done && event.kind != G2Z_RUN_DONE);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
      g2z_run_catch_signals(run);
      g2z_run_catch_signals(NULL);
      raise(SIGTERM);
      _exit(0);
    }
    CHECK(t, waitpid(child, &ended, 0) == child && WIFEXITED(ended));
    CHECK(t, WEXITSTATUS(ended) == (done ? 0 : 128 + SIGTERM));
  }
}

/* Two runs end alike: all lines of metrics.jsonl, the summary, and the last checkpoint's note,
 * except for times, lengths of logs, and what save_ms reports. */
static void test_runs_alike(g2z_test *t, const char *one, const char *two) {
  test_sh(t, "for run in %s %s; do { grep -v save_ms $run/metrics.jsonl; grep -Ev '\"(run_id|"
             "[a-z_]*(timestamp|wall_time|_per_sec|_time_)[a-z0-9_]*)\"' $run/training_metrics.json; "
             "cat $(ls -d $run/step-*/note.json | tail -n 1) | "
             "grep -Ev '_bytes|_late|\"(weights|run_id|timestamp_utc)\"'; } | "
             "sed -E 's/\"[a-z0-9_]*(_ms|_s|_seconds|seconds)\": [^,}]*//g' > $run.all || exit; "
             "done; [ $(wc -l < %s.all) -gt 99 ] && diff %s.all %s.all && "
             "[ -e %s/RUN_COMPLETE.txt ]", one, two, one, one, two, two);
}

/* A run that does everything in 12 steps. The validation after step 10 finds no lower loss, so that
 * a patience of 2 would end the run if this validation counted twice. */
static test_run_setup test_run_busy(g2z_test *t, const char *run_dir) {
  test_run_setup s = test_run_prepare(t, run_dir);
  const char *text = test_kept(t, test_at(t, "text.txt"));
  if (access(text, R_OK) != 0) {
    test_write_file(t, text, "1 2 3 4 5 6", 11);
    test_run_shard(t, "few.bin", 4 * 2 * 16 + 1);
  }
  s.config.train.train_glob = s.config.val_glob = test_kept(t, test_path(t, "few.bin"));
  s.config.train.model.channels = 16;
  s.config.train.model.heads = s.config.train.accum = 1;
  s.config.train.batch = 2;
  s.config.train.optimizer.steps = 12;
  s.config.train.optimizer.lr = 0.6f;
  s.config.train.optimizer.schedule = G2Z_SCHEDULE_CONSTANT;
  s.config.epochs = s.config.tensorboard = 0;
  s.config.val_every = s.config.patience = 2;
  s.config.keep_best = 1;
  s.config.save_every = 5;
  s.config.target_loss = 4;
  s.config.sample_every = s.config.eval_every = s.config.sample_tokens = 3;
  s.config.eval.count = 1;
  s.config.eval.text[0] = text;
  return s;
}

/* One write to a log fails, whichever it is, or one of every three calls of stat(). The run saves
 * what it has done and fails; resumed, it ends like a run that nothing disturbed. */
static void test_run_faults(g2z_test *t) {
  static const char *const logs[] = {"/metrics.jsonl", "/train.log"};
  static const int errors[] = {EIO, ENOSPC, ESTALE, ENOMEM};
  test_run_seen seen;
  test_run_setup s = test_run_busy(t, "whole");
  test_run_well(t, &s);
  for (int log = 0; log < 4; log++)
    for (int at = 1, failed = 1; failed; at += log < 2 ? 1 : 3) {
      const int before = t->owned_count;
      s = test_run_busy(t, "run");
      test_fault.name = logs[log % 2];
      test_fault.call = log < 2 ? TEST_WRITE : TEST_STAT;
      test_fault.at = at;
      test_fault.seen = 0;
      test_fault.error = errors[at % 4];
      const g2z_status status = test_run_all(t, &s.config, &seen);
      test_fault.name = NULL;
      failed = status != G2Z_OK;
      FAIL_IF(t, failed != (test_fault.seen >= at), "log %d, call %d of %d: %s", log, at,
              test_fault.seen, t->services.error);
      if (failed) {
        CHECK(t, status == G2Z_IO && strstr(t->services.error, strerror(errors[at % 4])));
        s.config.resume = "latest";
        test_run_well(t, &s);
        test_runs_alike(t, "whole", "run");
      } else CHECK(t, at > 20 || (log >= 2 && at == 1)); /* some libraries hide stat */
      test_sh(t, "rm -rf run");
      test_end(t, before);
    }
}

/* A note whose checksum is right, but which lacks a number or has an impossible one. */
static void test_run_note(g2z_test *t) {
  static const struct {
    const char *from, *to, *says;
  } cases[] = {
      {"\"metrics_bytes\": \"[0-9]*", "\"metrics_bytes\": \"1e300", "no totals.metrics_bytes, or"},
      {"\"log_bytes\": \"", "\"log_bytes\": \"-", "no totals.log_bytes, or a wrong one: begin "
       "another run from the checkpoint with --run-dir NEW --resume "},
      {"\"log_bytes\": \"[0-9]*\"", "\"log_bytes\": null", "no totals.log_bytes, or"},
      {"\"due\": \"", "\"due\": \"99999", "no totals.due, or"},
      {"\"evaluated\": \"0", "\"evaluated\": \"0.5", "no totals.evaluated, or"},
      {"\"step\": \"", "\"step\": \"-", "no step, or"},
      {"\"low\"", "\"law\"", "no low, or"},
      {"\"stale\"", "\"stall\"", "no totals.stale, or"},
      {"\"log_late\"", "\"log_last\"", "no log_late, or"},
      {"\"wall_s\": \"", "\"wall_s\": \"-", "no totals.wall_s, or"},
      {"\"skipped\": \"0", "\"skipped\": \"1e19", "no skipped, or"}};
  test_run_setup s = test_run_saves(t, "run");
  test_run_seen seen;
  test_run_well(t, &s);
  test_sh(t, "cp run/step-000008/note.json run/step-000008/CHECKSUMS .");
  s.config.resume = "latest";
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_sh(t, "cp note.json CHECKSUMS run/step-000008 && cd run/step-000008 && "
               "sed -i '0,/%s/s//%s/' note.json && ! cmp -s note.json ../../note.json && "
               "sed -i \"s/ [0-9]* 0 note.json/ $(wc -c < note.json) 0 note.json/\" CHECKSUMS",
            cases[i].from, cases[i].to);
    test_saved_sign(t, test_at(t, "run/step-000008"), "note.json");
    CHECK_FORMAT(t, test_run_all(t, &s.config, &seen), cases[i].says);
  }
}

/* What a run knows of its validations stays over resumes while the validation tokens are the same:
 * with other tokens the lowest loss and the target are those of the other tokens. */
static void test_run_targets_resumed(g2z_test *t) {
  test_run_setup s = test_run_busy(t, "run");
  test_run_well(t, &s);
  CHECK_HAS(t, test_read(t, "run/training_metrics.json"), "\"target_step\": 8,");
  static const char *const left[] = { /* by a kill */
      "run/events.out.tfevents.0000000001.host.partial", "run/shared-1234.partial",
      "run/weights/shared-1234.partial"};
  for (int i = 0; i < 3; i++) test_write_file(t, test_path(t, left[i]), "", 0);
  test_sh(t, "touch run/weights/shared-notes.partial"); /* the user's */
  test_sh(t, "grep run_id run/training_metrics.json > id");
  s.config.resume = "latest";
  for (int turn = 0; turn < 2; turn++) { /* another target, which an earlier validation reached */
    s.config.target_loss = turn ? 4 : 5;
    test_run_well(t, &s);
    CHECK_HAS(t, test_read(t, "run/training_metrics.json"),
              turn ? "\"target_step\": 8," : "\"target_step\": 6,");
  }
  for (int turn = 0; turn < 3; turn++) { /* no --val; other tokens; no --val again */
    test_run_setup next = s;
    next.config.train.optimizer.steps = 14 + 2 * turn;
    if (turn == 1) next.config.max_val_steps = next.config.val_every = 1;
    else {
      next.config.val_glob = NULL;
      next.config.target_loss = 0;
      next.config.keep_best = 0;
      next.config.patience = next.config.val_every = 0;
    }
    test_run_well(t, &next);
    const char *text = test_read(t, "run/training_metrics.json");
    const double target = test_number(t, text, "\"target_step\": ");
    const double best = test_number(t, text, "\"best_val_step\": ");
    FAIL_IF(t, (turn ? target <= 14 : target != 8) || (best > 14) != (turn > 0),
            "start %d: target reached at step %g, best at %g", turn, target, best);
    CHECK_HAS(t, text, "\"target_loss\": 4,");
    CHECK_HAS(t, test_read(t, "run/train.log"), test_text("reached at step %.0f, after", target));
    for (int i = 0; i < 3; i++) CHECK(t, !test_there(t, left[i]));
    CHECK(t, test_there(t, "run/weights/shared-notes.partial"));
    test_sh(t, "grep -F \"$(cat id)\" run/training_metrics.json > found");
  }
  s.config.train.optimizer.steps = 18; /* no step is left, but the tokens are others */
  test_run_well(t, &s);
  CHECK_HAS(t, test_read(t, "run/training_metrics.json"), "\"best_val_step\": 18,");
}

/* A file system without symbolic links: one warning, and the best checkpoint stays. */
static void test_run_linkless(g2z_test *t) {
  test_run_setup s = test_run_busy(t, "run");
  s.config.keep = s.config.patience = 1;
  test_fault.name = "/best.partial";
  test_fault.call = TEST_SYMLINK;
  test_fault.at = test_fault.seen = 0;
  test_fault.error = EPERM;
  test_run_warns(t, &s, "cannot make the link ");
  test_fault.name = NULL;
  if (test_fault.seen == 0) SKIP(t, "this library hides symlink()");
  CHECK(t, test_fault.seen > 1 && test_times(test_warnings, "cannot make the link ") == 1);
  const int best = (int)test_number(t, test_read(t, "run/training_metrics.json"),
                                    "\"best_val_step\": ");
  const int stay = test_files_count(t, "run/step-");
  FAIL_IF(t, best < 2 || best > 11 || stay > 3, "best %d, %d stay", best, stay);
  CHECK_HAS(t, test_read(t, "run/train.log"), test_text("best weights: %s/step-%06d, of step %d, "
            "validation loss ", s.run_dir, best, best));
  s.config.resume = "latest"; /* now with links */
  test_run_well(t, &s);
  test_sh(t, "[ $(readlink run/best) = step-%06d ] && ls run/best/model.safetensors", best);
  /* A link that cannot be moved names another step, although --keep-best is given. */
  test_sh(t, "cd run && ln -sfn $(ls -d step-* | tail -n 1) best && "
             "[ $(readlink best) != step-%06d ] && rm train.log", best);
  test_fault.name = "/best.partial";
  test_run_warns(t, &s, "cannot make the link ");
  test_fault.name = NULL;
  CHECK_HAS(t, test_read(t, "run/train.log"), test_text("is of step %d. The link could not be "
            "moved\n", best));
}

/* ----- ./train, with real signals and real ranks ----- */

/* Starts ./train as rank `rank` of ranks->world in a shell, which runs `before` first. */
static void test_train_start(g2z_test *t, test_ranks *ranks, int rank, const char *before,
                             const char *arguments) {
  const char *program = test_train_program();
  char here[512] = "", command[4096], shell[] = "sh", flag[] = "-c";
  char *argv[] = {shell, flag, command, NULL};
  CHECK(t, *program == '/' || getcwd(here, sizeof here));
  snprintf(command, sizeof command, "%.900s exec '%.400s/%.200s' %.1400s", before, here, program,
           arguments);
  test_ranks_launch(t, ranks, rank, NULL, "/bin/sh", argv);
}

/* Starts all ranks of a job of ./train, without waiting. */
#define test_train_open(t, world, ...) test_train_ranks(t, world, test_text(__VA_ARGS__))
static test_ranks test_train_ranks(g2z_test *t, int world, const char *arguments) {
  test_ranks ranks = test_ranks_open(world);
  for (int rank = 0; rank < world; rank++) test_train_start(t, &ranks, rank, "", arguments);
  return ranks;
}

/* All ranks must end with this code. Rank 0 must print `says`; other ranks must not repeat a
 * failure that all ranks have in common. */
static void test_train_end(g2z_test *t, test_ranks *ranks, double seconds, int code,
                           const char *says) {
  test_ranks_wait(t, ranks, seconds);
  for (int r = 0; r < ranks->world; r++) {
    CHECK_RANK(t, ranks, r, code, r == 0 ? says : NULL);
    if (r && code == 1 && says && ranks->output[r]) CHECK(t, !strstr(ranks->output[r], says));
  }
}

/* Runs a job of ./train, all ranks of which must end with this code. */
#define test_train_job(t, world, code, says, ...) \
  test_train_job_line(t, world, code, says, test_text(__VA_ARGS__))
static void test_train_job_line(g2z_test *t, int world, int code, const char *says,
                                const char *arguments) {
  test_ranks ranks = test_train_ranks(t, world, arguments);
  test_train_end(t, &ranks, 60, code, says);
}

/* The flags that all these runs share. */
static const char *test_digits(g2z_test *t, const char *run_dir) {
  if (!test_there(t, "digits_train.bin")) {
    test_run_shard(t, "digits_train.bin", 2001);
    test_run_shard(t, "digits_val.bin", 500);
  }
  return test_text("--train '%s' --val '%s' --vocab-size 257 --device cpu --layers 2 --heads 2 "
                   "--channels 32 --context 16 --lr 1e-2 --dropout 0.1 --sample-tokens 0 "
                   "--run-dir '%s'", test_at(t, "digits_train.bin"), test_at(t, "digits_val.bin"),
                   test_at(t, "%s", run_dir));
}

/* Waits until a run's metrics.jsonl reports this step. */
static void test_wait_for(g2z_test *t, const char *run, int step) {
  test_sh(t, "for i in $(seq 3000); do grep -q '\"step\": %d,' %s/metrics.jsonl && exit; "
             "sleep 0.02; done 2> /dev/null; false", step, run);
}

/* A signal reaches one rank: all save and end with 75. A second signal ends the program at once. */
static void test_train_signals(g2z_test *t) {
  static const struct {
    int number, world;
    const char *name;
  } cases[] = {
      {SIGTERM, 1, "SIGTERM"}, {SIGINT, 2, "SIGINT"}, {SIGUSR1, 1, "SIGUSR1"},
      {SIGHUP, 1, "SIGHUP"}};
  test_ranks ranks;
  void (*before)(int) = signal(SIGHUP, SIG_DFL); /* nohup ignores it */
  for (int i = 0; i < 4; i++) {
    int world = cases[i].world;
    const char *name = cases[i].name;
    ranks = test_train_open(t, world, "%s --steps 1000000 --batch 2 --val-every 100000",
                            test_digits(t, name));
    test_wait_for(t, name, 5);
    for (int k = 0; i == 0 && k < 2; k++) /* a second run finds it locked, and where it will save */
      CHECK_HAS(t, test_trains(t, 1, k ? "%s --save-weights '%s' --steps 5" :
                               "%s --steps 5 --resume latest", test_digits(t, k ? "second" : name),
                               test_at(t, "%s/weights", name)),
                "another program uses ");
    CHECK(t, kill(ranks.pid[world - 1], cases[i].number) == 0);
    test_train_end(t, &ranks, 20, 75, test_text("by %s, saved. To continue: the same ", name));
    CHECK(t, test_files_count(t, test_text("%s/step-", name)) == 1);
    CHECK_HAS(t, test_read(t, "%s/training_metrics.json", name),
              test_text("\"signal\": \"%s\"", name));
  }
  signal(SIGHUP, before);
  /* If the job waits for a hanging rank, the first signal waits, too; the second does not. */
  ranks = test_train_open(t, 2, "%s --steps 1000000 --batch 1", test_digits(t, "hangs"));
  test_wait_for(t, "hangs", 5);
  CHECK(t, kill(ranks.pid[1], SIGSTOP) == 0 && kill(ranks.pid[0], SIGTERM) == 0);
  rank_sleep(0.7);
  CHECK(t, kill(ranks.pid[0], 0) == 0 && kill(ranks.pid[0], SIGTERM) == 0);
  rank_sleep(0.1);
  CHECK(t, kill(ranks.pid[1], SIGCONT) == 0);
  test_ranks_wait(t, &ranks, 60);
  CHECK_RANK(t, &ranks, 0, 128 + SIGTERM, NULL);
  CHECK_RANK(t, &ranks, 1, G2Z_EXIT_LOST, NULL);
}

/* A signal stops a validation, an evaluation or a sample on all ranks, between two batches or
 * tokens. The checkpoint records what is still due, and the resumed run does that first. A kill
 * during that work, after the last step, loses nothing. */
static void test_train_stops_soon(g2z_test *t) {
  static const struct {
    const char *slow, *soon, *says;
    int world;
  } cases[] = {
      {"--val %s/raw.bin --val-every 2", "--val %s/raw.bin --max-val-steps 5", "val loss", 1},
      {"--val %s/raw.bin --val-every 2 --zero 3", "--val %s/raw.bin --max-val-steps 5", "val loss",
       2},
      {"--eval %s/long.txt --eval-every 2", "--eval %s/short.txt", "short.txt | loss", 2},
      {"--eval %s/first.txt %s/long.txt --eval-every 2", "--eval %s/first.txt %s/short.txt",
       "short.txt | loss", 1},
      {"--prompt x --temperature 0 --sample-every 2 --sample-tokens 1000000",
       "--prompt x --sample-tokens 5", "sample after", 2}};
  test_ranks ranks;
  test_sh(t, "head -c 200000 /dev/zero > raw.bin; printf '%%400s' x > short.txt; "
             "cp short.txt first.txt; printf '%%200000s' x > long.txt");
  test_digits(t, "");
  for (int i = 0; i < 5; i++) {
    const char *run = test_kept(t, test_text("run%d", i)), *in = t->directory;
    const char *slow = test_kept(t, test_text(cases[i].slow, in, in));
    const char *soon = test_kept(t, test_text(cases[i].soon, in, in));
    const char *all = test_kept(t, test_text(
        "--train '%s/digits_train.bin' --vocab-size 257 --device cpu --layers 4 --heads 2 "
        "--channels 128 --context 16 --steps 4 --batch 1 --run-dir '%s/%s'", in, in, run));
    ranks = test_train_open(t, cases[i].world, "%s %s", all, slow);
    test_wait_for(t, run, 2);
    for (double end = g2z_seconds() + 20; i == 3 && g2z_seconds() < end; rank_sleep(0.01))
      if (strstr(test_read(t, "%s/metrics.jsonl", run), "eval_ms")) break;
    rank_sleep(0.2);
    CHECK(t, kill(ranks.pid[cases[i].world - 1], SIGTERM) == 0);
    test_ranks_end(t, &ranks, 60, 75, NULL);
    CHECK(t, test_there(t, test_text("%s/step-000002", run)));
    const char *told = test_read(t, "%s/metrics.jsonl", run);
    CHECK(t, !strstr(told, "\"val_ms\"") && !strstr(told, "sample_ms"));
    CHECK(t, test_times(told, "eval_ms") == (i == 3));
    test_train_job(t, cases[i].world, 0, NULL, "%s %s --resume latest", all, soon);
    const char *log = test_read(t, "%s/train.log", run), *at = strstr(log, cases[i].says);
    CHECK(t, at && at < strstr(log, "step 3/4"));
    CHECK(t, test_times(log, cases[i].says) == 2);
    if (i) continue;
    test_sh(t, "rm -r %s", run);
    ranks = test_train_open(t, 1, "%s %s --max-train-steps 2 --save-every 9", all, slow);
    test_wait_for(t, run, 2);
    const char *weights = test_kept(t, test_text("%s/weights/model.safetensors", run));
    for (double end = g2z_seconds() + 20; g2z_seconds() < end; rank_sleep(0.01))
      if (test_there(t, weights)) break;
    CHECK(t, kill(ranks.pid[0], SIGKILL) == 0);
    test_ranks_end(t, &ranks, 20, 128 + SIGKILL, NULL);
    test_sh(t, "cmp %s/step-000002/model.safetensors %s/weights/model.safetensors", run, run);
    test_train_job(t, 1, 0, "val loss", "%s %s --max-train-steps 2 --resume latest", all, soon);
  }
}

/* --keep-best, --patience and --target-loss, from what metrics.jsonl reports: the checkpoints that
 * stay, the weights of the best, the step that ends the run, the mark of the target. A run that is
 * continued ends like one that was not interrupted. */
static void test_train_best(g2z_test *t) {
  static const struct {
    const char *flags;
    int world, save, keep, patience, cut; /* cut: the first of two starts ends there */
    double target;
  } cases[] = {{"--keep-best --patience 3 --target-loss 3.9", 1, 0, 1, 3, 12, 3.9},
               {"--keep-best --patience 4 --zero 3 --lr 1e-1", 2, 0, 1, 4, 20, 0}, /* not steady */
               {"--keep-best --save-every 3 --keep 2 --target-loss 3.9", 2, 3, 2, 99, 20, 3.9},
               {"--keep-best --save-every 8 --keep 3 --target-loss 0.1", 1, 8, 3, 99, 24, 0.1}};
  int32_t ids[500];
  for (int i = 0; i < 500; i++) ids[i] = 15 + (i * 7 + i / 50) % 10; /* unlike the training's */
  test_digits(t, "");
  test_shard(t, "digits_val.bin", G2Z_SHARD_LLMC, ids, 500);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int parts = 1; parts <= 2; parts++) {
      const char *run = test_kept(t, test_text("best%zu_%d", i, parts));
      const char *flags = test_kept(t, test_text("%s --val-every 4 --steps 40 --batch %d %s",
                                                 test_digits(t, run), 4 / cases[i].world,
                                                 cases[i].flags));
      if (parts == 2)
        test_train_job(t, cases[i].world, 0, "RUN_COMPLETE", "%s --max-train-steps %d", flags,
                       cases[i].cut);
      test_train_job(t, cases[i].world, 0, "RUN_COMPLETE", "%s %s", flags,
                     parts == 2 ? "--resume latest" : "");
      /* What must have happened, by the losses. */
      int saved[41] = {0}, best = 0, stale = 0, last = 0, end = 0, reached = 0, kept = 0, step;
      double least = INFINITY, loss;
      const char *line = test_read(t, "%s/metrics.jsonl", run);
      for (; *line; line += strcspn(line, "\n") + 1) {
        const size_t bytes = strcspn(line, "\n");
        if (sscanf(line, "{\"step\": %d, \"tokens\": %*d, \"val_loss\": %lf", &step, &loss) != 2)
          continue;
        CHECK(t, !end && step > last);
        const int marked = test_times(test_text("%.*s", (int)bytes, line), "\"target\": true") == 1;
        CHECK(t, marked == (!reached && loss <= cases[i].target));
        if (marked) reached = step;
        stale = loss < least ? 0 : stale + 1;
        if (loss < least) {
          least = loss;
          best = step;
          saved[step] = 1;
        }
        last = step;
        if (stale == cases[i].patience) end = step;
      }
      CHECK(t, best > 0 && best < last && last == (end ? end : 40));
      if (i != 1) CHECK(t, !end == (cases[i].patience == 99));
      CHECK(t, (reached > 0) == (cases[i].target > 1));
      /* The checkpoints that stay: the last ones, and the best. */
      saved[last] = 1;
      for (step = cases[i].save; step && step < last; step += cases[i].save) saved[step] = 1;
      for (step = last; step > 0; step--) {
        const int stays = saved[step] && (kept < cases[i].keep || step == best);
        kept += saved[step];
        FAIL_IF(t, test_there(t, test_text("%s/step-%06d", run, step)) != stays,
                "%s: step %d %s, best %d, last %d", run, step, stays ? "is gone" : "stays", best,
                last);
      }
      test_sh(t, "[ $(readlink %s/best) = step-%06d ] && ls %s/best/config.json "
                 "%s/best/vocab.json > out", run, best, run, run);
      test_sh(t, "cmp %s/weights/model.safetensors %s/step-%06d/model.safetensors", run, run, last);
      const char *summary = test_read(t, "%s/training_metrics.json", run);
      CHECK_HAS(t, summary, test_text("\"best_val_step\": %d,", best),
                end ? test_text("\"early_stop_step\": %d,", end) : "\"early_stop_step\": null,",
                reached ? test_text("\"target_step\": %d,", reached) : "\"target_step\": null,");
      const char *log = test_read(t, "%s/train.log", run);
      CHECK(t, test_times(log, "ended early by --patience ") == (end > 0));
      CHECK_HAS(t, log, test_text("--init-from %s/best --prompt 'The'\n", test_path(t, run)));
      CHECK_HAS(t, log, test_text("/best, of step %d, val", best), cases[i].target == 0 ? "done: " :
                reached ? test_text("reached at step %d, after %d tokens, ", reached, 64 * reached)
                        : "target loss 0.1: not reached\n");
      if (!end) continue;
      /* Started again, it ends at once; with more patience it continues. */
      test_train_job(t, cases[i].world, 0, "ended early by ", "%s --resume latest", flags);
      CHECK(t, test_times(test_read(t, "%s/metrics.jsonl", run), "\"loss\"") == end);
      test_train_job(t, cases[i].world, 0, "done: ", "%s --resume latest --patience 99", flags);
      CHECK(t, test_times(test_read(t, "%s/metrics.jsonl", run), "\"loss\"") == 40);
    }
}

/* Pastes the flags that follow `words` in a text into a shell, after `command`. */
static int test_train_paste(g2z_test *t, const char *command, const char *text, const char *words,
                            char output[16384]) {
  const char *at = strstr(text, words);
  CHECK(t, at != NULL);
  if (!at) return -1;
  at += strlen(words);
  return test_shell(test_text("%s %.*s 2>&1", command, (int)strcspn(at, "\n"), at), output, 16384);
}

/* What --keep-best and the lowest loss must not do: fail after hours, link to other weights than
 * the best, name weights that nobody kept, compare losses of different tokens in silence. */
static void test_train_best_honest(g2z_test *t) {
#define OLD_BEST "--keep-best --lr 0 --save-every 8" /* step 4 is the best, step 8 the last */
#define LINKS(run, step) "[ $(readlink " run "/best) = step-00000" step " ]"
  static const struct {
    const char *before, *first, *second; /* flags of two starts; first "": only one */
    int world, code;
    const char *says, *not_says, *after;
  } cases[] = {
      {"mkdir h0 && echo mine > h0/best", "", "--keep-best", 1, 1, "remove or rename it", "step 1",
       "grep mine h0/best && ! ls h0/metrics.jsonl"},
      {"true", "", "--keep-best --save-weights %s/h1/best", 1, 1, "such as ", "step 1",
       "! ls h1"},
      {"true", "", "--save-every 4 --save-weights %s/h2/step-000004", 1, 1, "such as ", "step 1",
       "! ls h2"},
      {"true", "--save-every 8 --lr 0", "--keep-best --lr 0", 1, 0,
       "best weights: not kept; the lowest loss is of step 4", "h3/best", "! ls h3/best"},
      {"true", "--keep-best", "--val-steps 1 --keep-best --keep 9 --lr 0", 1, 0,
       "warning: the validation tokens changed since the checkpoint", "not kept",
       LINKS("h4", "8") " && grep '_tokens\": \"32\"' h4/step-000012/note.json"},
      {"true", "--keep-best", "--keep-best", 2, 0, "h5/best, of step ", "tokens changed",
       "grep ', 499 tokens' h5/train.log && grep '_tokens\": \"499\"' h5/best/note.json"},
      {"true", "", "--keep-best --val-every 8", 1, 0,
       "warning: the only validation is after the last step", "not kept", LINKS("h6", "8")},
      {"true", "", "--keep-best --val-every 2", 1, 0, "h7/best, of step 8", "not kept",
       "! ls h7 | grep step-000006"},
      /* Step 8 is damaged: the run continues from step 4, whose note decides what is best. */
      {"true", "--keep-best --keep 9",
       "--keep-best --keep 9 --lr 0 $(cd %s; mv h8/step-000008 b8; cp -r b8 h8/step-000008; "
       ": > h8/step-000008/model.safetensors)", 1, 0,
       "h8/best is removed: it was a link to step-000008, which is not there",
       "tokens changed", LINKS("h8", "4") " && ls h8/step-000008.damaged"},
      /* It finds better ones. */
      {"true", "--keep-best --keep 9 --lr 1e-5",
       "--keep-best --keep 9 $(: > %s/h9/step-000008/model.safetensors)", 1, 0, "h9/best, of step 12",
       "tokens changed", "cmp h9/step-000012/model.safetensors h9/best/model.safetensors"},
      {"true", "", "--lr 3", 1, 0, "e+", "not kept",
       "! grep 'perplexity [0-9]\\{9\\}' h10/train.log"},
      /* Names that only a run directory keeps for itself. */
      {"true", "", "--save-weights %s/best", 1, 0, "/best --prompt ", "such as ",
       "ls best/model.safetensors"},
      {"true", "", "--save-weights %s/h7/step-000099", 1, 1, "such as ", "step 1",
       "! ls h7/step-000099"},
      /* A kill before the link was made; no name that ends in .partial is followed. No link any
       * more; a rank that cannot save; no checkpoint any more; a link of somebody else's. */
      {"true", OLD_BEST, "--keep-best --lr 0 $(cd %s/h13; rm best; mkdir ../mine13; "
       "ln -s ../mine13 best.partial)", 1, 0, "h13/best, of step 4, validation loss ", "not kept",
       LINKS("h13", "4") " && rmdir mine13 && ! ls -d h13/*.partial"},
      {"true", OLD_BEST, "--keep-best --lr 0 $(rm %s/h14/best)", 1, 0,
       "h14/best, of step 4, validation loss ", "is removed", LINKS("h14", "4")},
      {"mkdir h15 && touch h15/step-000004.partial", "", "--keep-best", 2, 1, "rank 0: cannot",
       "rank 0: rank 0", "! ls h15/best/model.safetensors"},
      {"true", OLD_BEST, "--keep-best --lr 0 $(rm -r %s/h16/step-000004)", 1, 0,
       "best weights: not kept; the lowest loss is of step 4", "h16/best, of",
       "! readlink h16/best"},
      {"true", OLD_BEST, "--keep-best $(cd %s/h17; rm best; mkdir ../mine17; ln -s ../mine17 best)",
       1, 1, "h17/best is no link to a checkpoint of this run, but --keep-best ", "step 9",
       "rmdir mine17 && [ $(readlink h17/best) = ../mine17 ]"},
      /* Without --keep-best, pruning spares the checkpoint that best names. A link to nothing. */
      {"true", OLD_BEST, "--save-every 2 --keep 1 $(ln -s step-000004 %s/h18/best.partial)", 1, 0,
       "h18/best names step 4, but the lowest validation loss, ", "best weights",
       LINKS("h18", "4") " && ls h18/best/optimizer.state && ! ls -d h18/step-000008 && "
       "! readlink h18/best.partial"},
      {"true", OLD_BEST, "--keep-best --lr 0 $(cd %s/h19; rm best; ln -s none best)", 1, 0,
       "h19/best is removed: it was a link to none, which is not ", "not kept", LINKS("h19", "4")},
      {"ln -s . h", "", "--save-weights %s/h/h20/./new/../best/", 1, 1, "keeps the name best for ",
       "step 1", "! ls h20"},
      /* A token's loss depends on --seq. */
      {"true", "--keep-best", "--seq 8 --keep-best --lr 0", 1, 0, "since the checkpoint, or --seq "
       "did", "not kept", LINKS("h21", "8")}};
#undef LINKS
#undef OLD_BEST
  for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
    const int first = cases[i].first[0] != 0, world = cases[i].world;
    test_sh(t, "%s", cases[i].before);
    const char *flags = test_kept(t, test_text("%s --val-every 4 --steps 8",
                                               test_digits(t, test_text("h%d", i))));
    if (first) test_train_job(t, 1, 0, "", "%s %s --batch 2", flags, cases[i].first);
    const char *output = test_trains(t, cases[i].code, "%s %s --batch %d --ranks %d %s", flags,
                                     test_text(cases[i].second, t->directory), 2 / world, world,
                                     first ? "--resume latest --steps 12" : "");
    CHECK_HAS(t, output, cases[i].says);
    FAIL_IF(t, strstr(output, cases[i].not_says) != NULL, "%s: %s", flags, output);
    test_sh(t, "{ %s; } > out 2>&1", cases[i].after);
  }
  CHECK_HAS(t, test_trains(t, 1, "--init-from %s/h18", t->directory),
            "For the checkpoint that its link best names: --init-from ");
  /* A run that ended at an epoch's end continues: a validation there does not run twice. */
  for (int patience = 1; patience <= 3; patience += 2)
    test_train_job(t, 1, 0, "ended early by ", "%s --epochs 6 --batch 8 --lr 0 --keep-best "
                   "--resume latest --patience %d", test_digits(t, "ends"), patience);
  test_sh(t, "[ $(grep val_loss ends/metrics.jsonl | cut -d, -f1 | sort -u | wc -l) = 4 ]");
}

/* The flags that a run prints continue it when pasted, whatever its directory is called. Their
 * files exist: a stopped run has no weights, and reports this. */
static void test_train_hints(g2z_test *t) {
  static char said[16384], output[16384], command[4096];
  static const char *const once[] = {" --run-dir ", " --steps ", " --resume "}; /* no flag twice */
  setenv("RUN", test_at(t, "it's a $(run)"), 1);
#define TRAIN(code, flags)                                                                       \
  snprintf(command, sizeof command, "%s %s --run-dir \"$RUN\" --sample-tokens 0 %s",             \
           test_train_program(), test_tiny(t), flags);                                           \
  CHECK(t, test_shell(test_text("{ %s; } 2>&1", command), said, sizeof said) == code)
#define PASTE(words, code)                                                                       \
  CHECK(t, test_train_paste(t, command, said, words "the same command with ", output) == code)
  TRAIN(0, "--steps 4");
  CHECK(t, test_train_paste(t, "", said, "To generate text: ", output) == 0);
  CHECK(t, output[0] && !strstr(output, "train: "));
  PASTE("To train these weights further: ", 0);
  CHECK_HAS(t, output, "$(run)/weights\n", "$(run)-2/report.html", "step 4/4 | loss ");
  TRAIN(1, "--init-from \"$RUN\"");
  CHECK_HAS(t, said, "$(run) has no config.json. For its weights: --init-from '",
            "$(run)/weights'\n");
  test_sh(t, "rm -r \"$RUN\"");

  /* With checkpoints; then again when no step is left: it prints no step and no flag twice. */
  TRAIN(0, "--steps 4 --save-every 2");
  PASTE("To continue training: ", 0);
  CHECK_HAS(t, output, "resumed ", "step 8/8 | loss ");
  TRAIN(0, "--steps 6 --resume \"$RUN/step-000002\" --run-dir \"$RUN b\" "
           "--save-weights \"$RUN w\"");
  CHECK_HAS(t, said, "$(run) b-2' --init-from ", "$(run) b-2/weights', without --resume\n");
  TRAIN(0, "--steps 6 --resume \"$RUN/step-000002\" --run-dir \"$RUN c\" --positions sines");
  CHECK_HAS(t, said, "warning: positions changed since the checkpoint: normal -> sines, without "
            "effect: the checkpoint's weights have positions\n",
            "$(run) c/weights', without --resume and --positions\n");
  TRAIN(0, "--steps 4 --run-dir \"$RUN d\" --positions sines");
  CHECK_HAS(t, said, "$(run) d/weights', without --positions\n");
  for (int steps = 8; steps >= 5; steps -= 3) {
    TRAIN(0, test_text("--resume latest --steps %d --init-from \"$RUN/weights\"", steps));
    CHECK_HAS(t, said, "no step is left: ", "give more than --steps 8");
    CHECK_HAS(t, said, "\ndone: loss ", ", 8 steps, 1024 tokens, ");
    CHECK_HAS(t, said, "weights is not used: the weights come from the checkpoint\n");
    CHECK_HAS(t, said, " --resume latest --steps 16\n");
    const char *hint = strstr(said, "To continue training: ");
    for (size_t i = 0; i < 3; i++) CHECK(t, hint && test_times(hint, once[i]) == 1);
    if (steps == 5) /* on the console and in the log */
      CHECK_HAS(t, said, "warning: steps changed since the checkpoint: 8 -> 5\n");
    CHECK(t, !strstr(test_read(t, "it's a $(run)/train.log"), "Z  warning: steps changed since the "
                     "checkpoint: 8 -> 5\n") == (steps != 5));
  }
  PASTE("To continue training: ", 0);
  CHECK_HAS(t, output, "step 16/16 | loss ");
  TRAIN(0, "--steps 17 --resume latest --save-weights none"); /* saves: the run has checkpoints */
  CHECK_HAS(t, said, "resumed after step 16", "checkpoint_path=", "/step-000017 world_size=1 ");
  CHECK(t, !strstr(said, "nothing keeps"));
  test_sh(t, "rm -r \"$RUN\"");
  for (int i = 0; i < 2; i++) { /* a run that keeps nothing says so before its first step */
    TRAIN(0, i ? "--steps 2 --run-dir none" : "--steps 2 --save-weights none");
    char *warned = strstr(said, i ? "warning: nothing keeps the trained model: to keep it, add "
                          "--save-weights DIR\n" : " add --save-weights DIR or --save-every 1000\n");
    CHECK(t, warned && strstr(warned, "\nstep 2/2"));
  }
  test_sh(t, "rm -r \"$RUN\"");

  TRAIN(0, "--steps 2 --warmup 5 --lr 0.01");
  CHECK_HAS(t, said, "warning: the warm-up of 5 steps is longer than the run of 2: the learning "
                     "rate never reaches --lr 0.01; lower --warmup",
            "\nschedule: cosine, lr 0.01 to 0.001, 5 steps of warm-up\n");
  test_sh(t, "rm -r \"$RUN\"");
  TRAIN(0, "--steps 60 --max-train-steps 4 --lr 0.01 --schedule constant");
  CHECK_HAS(t, said, "\nschedule: constant, lr 0.01, 6 steps of warm-up\n",
            "warning: --max-train-steps 4 ends the run within the warm-up of 6 steps, before the "
            "learning rate reaches --lr 0.01; for a whole training of this length: --steps 4\n");
  test_sh(t, "rm -r \"$RUN\"");

  /* Stopped by Ctrl-C. */
  TRAIN(75, "--steps 100000000 & P=$!; until grep -q '\"step\": 5,' \"$RUN/metrics.jsonl\"; do "
            "sleep 0.1; done 2> /dev/null; kill -INT $P; wait $P; exit $?");
  CHECK_HAS(t, said, " by SIGINT, saved. To continue: ");
  CHECK(t, test_shell("test -e \"$RUN/weights\"", output, sizeof output) != 0);
  CHECK_HAS(t, test_trains(t, 1, "--init-from \"$RUN\" --prompt 1"),
            "$(run) has no config.json. For its newest checkpoint: --init-from '", "$(run)/step-");
  CHECK_HAS(t, test_trains(t, 1, "--init-from \"$RUN/weights\" --prompt 1"),
            "/weights: there is no such directory. A run writes RUN_DIR/weights at its end");
  CHECK_HAS(t, test_trains(t, 1, "--init-from docs --prompt 1"),
            "docs has no config.json: name a directory with config.json and model.safetensors, such");
  command[strcspn(command, "&")] = 0;
  char *end = strstr(said, "To continue: ");
  if (end) memcpy(strchr(end, '\n'), " --max-train-steps 1\n", 22); /* it would have taken days */
  PASTE("To continue: ", 0);
  CHECK_HAS(t, output, "resumed ", "no step is left");
#undef PASTE
#undef TRAIN
  unsetenv("RUN");
}

/* A run that diverged prints what to do in place of how to use its weights. */
static void test_train_diverged(g2z_test *t) {
  static char said[16384], output[16384], command[4096];
  static const char *const flags[] = {
      "--steps 4 --lr 0.003 --schedule constant",
      "--steps 30 --lr 3000 --min-lr 2000 --clip 0 --resume latest --optimizer muon"};
  TRAIN_OR_SKIP(t);
  for (int i = 0; i < 2; i++) {
    snprintf(command, sizeof command, "%s %s --run-dir %s --sample-tokens 0 --warmup 0 "
             "--save-every 4 %s", test_train_program(), test_tiny(t), test_at(t, "run"), flags[i]);
    CHECK(t, test_shell(test_text("{ %s; } 2>&1", command), said, sizeof said) == 0);
    if (i == 0)
      CHECK_HAS(t, test_read(t, "run/metrics.jsonl"), ", \"lr\": 0.003, \"grad_norm\"");
  }
  CHECK(t, !strstr(said, "To generate text: ") && !strstr(said, "To continue training: "));
  CHECK(t, test_train_paste(t, command, said, "To go back to before the divergence, with half of "
                            "the rate: the same command with ", output) == 0);
  CHECK_HAS(t, output, "resumed after step 4, from ", "lr 1500 to 1000 ", "lr 900 for AdamW");
  for (int again = 0; again < 2; again++) /* without a checkpoint: its weights are of no use */
    CHECK(t, test_shell(test_text("%s %s --run-dir %s --steps 20 --lr 3000 --clip 0 2>&1",
                                  test_train_program(), test_tiny(t), test_at(t, "none")),
                        said, sizeof said) == again);
  CHECK_HAS(t, said, "/none holds a run that ended without a checkpoint (weights/model.safetensors"
            "): choose another --run-dir, or remove it\n");
  CHECK(t, g2zr_decimal(0.1234567f) == 0.1234567 && g2zr_decimal(1.00000005e-4f) == 1.00000005e-4);
}

/* No name can control the terminal, now or when a log is read later, or break lines of
 * metrics.jsonl. A run's messages fit 80 columns, except for paths and commands. */
static void test_train_tame(g2z_test *t) {
  static const char *const own[] = {"model: ", "text: ", "device: ", "training: ", "step: ",
                                    "schedule: ", "validation: ", "step 4/4 | val loss"};
  static char said[65536];
  test_write_file(t, test_at(t, "e\x1b]0;x\x07\xff.txt"), "a text to score", 15);
  test_run_shard(t, "x_val_0.bin", 300);
  CHECK(t, test_shell(test_text(
      "TRAIN='%s'; RUN='%s'; FILE='%s'; "
      "{ for more in '' '--steps 6 --resume latest'; do $TRAIN %s --val '%s' --heads 1 --steps 4 "
      "--eval \"$FILE\" --save-every 2 --run-dir \"$RUN\" $more || exit; done; "
      "$TRAIN --init-from \"$RUN/weights\" --eval \"$FILE\" && cat \"$RUN/train.log\" "
      "\"$RUN/RUN_COMPLETE.txt\"; ! $TRAIN --init-from \"$RUN\" --prompt x && "
      "! $TRAIN --train \"$FILE\" --run-dir \"$RUN\" --steps 2; } 2>&1", test_train_program(),
      test_at(t, "r\x1b[31m\xc2\x9b"), test_at(t, "e\x1b]0;x\x07\xff.txt"), test_tiny(t),
      test_at(t, "x_val_0.bin")), said, sizeof said) == 0);
  CHECK_HAS(t, said, "r?[31m?" "?/report.html", "e?]0;x?\xff.txt | loss ", " has no config.json",
            "model: 1 layer, 1 head, ");
  for (const char *c = said; *c; c++)
    CHECK(t, ((unsigned char)*c >= ' ' || *c == '\n') && strncmp(c, "\xc2\x9b", 2) != 0);
  const char *json = test_read(t, "r\x1b[31m\xc2\x9b/metrics.jsonl"); /* JSON must be UTF-8 */
  CHECK_HAS(t, json, "\"eval_file\": \"e\xef\xbf\xbd]0;x\xef\xbf\xbd\xef\xbf\xbd.txt\"");
  test_sh(t, "iconv -f utf-8 -t utf-8 r*/metrics.jsonl > /dev/null");
  for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
    const char *line = strstr(said, own[i]);
    CHECK(t, line && strcspn(line, "\n") <= 80);
  }
}

static void test_train_removed(g2z_test *t) {
  static const struct {
    int world;
    const char *flags, *command, *says;
  } cases[] = {
      {1, "", "rm run0/metrics.jsonl", "run0/metrics.jsonl was removed or replaced while"},
      {1, "", "mv run1/train.log run1/log && cp run1/log run1/train.log", "run1/train.log was rem"},
      {1, "--save-every 1 --keep 2", "rm -rf run2 2> /dev/null; rm -rf run2 2> /dev/null; true",
       "run2"},
      {2, "", "rm -r run3", " was removed or replaced while"},
      {1, "--val-every 200", "cp digits_val.bin kept && truncate -s 1024 digits_val.bin",
       "digits_val.bin promises 500 tokens in 2024 bytes but has 1024 bytes: it is unfinished or "},
      {1, "--max-train-steps 200", "mkdir run5/training_metrics.json", "Is a directory; name a file"},
      {1, "--max-train-steps 200", "rmdir run6/weights", NULL}}; /* does no harm */
  test_ranks ranks;
  for (int i = 0; i < 7; i++) {
    const char *run = test_text("run%d", i);
    ranks = test_train_open(t, cases[i].world, "%s --steps 20000 --batch 1 %s", test_digits(t, run),
                            cases[i].flags);
    test_wait_for(t, run, 5);
    test_sh(t, "%s", cases[i].command);
    test_train_end(t, &ranks, 20, i == 6 ? 0 : 1, cases[i].says);
    CHECK(t, test_there(t, test_text("run%d/RUN_COMPLETE.txt", i)) == (i == 6));
    CHECK(t, test_there(t, test_text("run%d/weights", i)) == (i == 6 || i == 5)); /* never empty */
    if (i == 6) break;
    if (i == 2 || i == 3) continue; /* no directory to save into, or another rank waits */
    test_sh(t, "mv kept digits_val.bin 2> n; rm -rf run5/training_metrics.json; cd %s; ! grep -cs "
            "'\"loss\"' metrics.jsonl > n || ls | sed -n 's/^step-0*//p' | diff n -", run);
    test_train_job(t, 1, 0, "no step is left",
                   "%s --steps 20000 --batch 1 --resume latest --max-train-steps 1",
                   test_digits(t, run));
  }
}

static void test_train_unread(g2z_test *t) {
  static const char *const ways[][2] = {{"", "| head -n 1"}, {"--save-every 20", "<&- >&- 2>&-"},
                                        {"--ranks 2", "<&- >&- 2>&-"}};
  char output[4096];
  for (int i = 0; i < 3; i++) {
    const char *run = test_text("run%d", i);
    CHECK(t, test_shell(test_text("%s %s %s --steps 100 --batch 2 --max-val-steps 1 %s",
                                  test_train_program(), test_digits(t, run), ways[i][0],
                                  ways[i][1]), output, sizeof output) == 0);
    CHECK(t, test_there(t, test_text("run%d/RUN_COMPLETE.txt", i)));
    test_sh(t, "[ $(grep -c '^{\"step\": .*\"loss\"' run%d/metrics.jsonl) = 100 ] && "
               "! grep -v '^{.*}$' run%d/metrics.jsonl", i, i);
  }
}

/* kill -9 of one rank at a random moment while it saves every step: the others exit and name it.
 * The restarted job continues and ends like a run without a kill. */
static void test_train_kills(g2z_test *t, int world, int turns, int apart) {
  const int last = world == 1 ? 60 : 80;
  test_ranks ranks;
  uint32_t random = 11;
  int kills = 0;
  test_train_job(t, world, 0, NULL, "%s --steps %d --batch 1 --save-every %d",
                 test_digits(t, "whole"), last, last);
  for (int turn = 0, done = 0; turn <= turns && !done; turn++) {
    int victim = turn % world;
    ranks = test_train_open(t, world, "%s --steps %d --batch 1 --save-every 1 --keep %d "
                            "--resume latest", test_digits(t, "killed"), last, world == 1 ? 2 : 3);
    if (turn < turns) test_wait_for(t, "killed", apart * turn + 3);
    usleep(100 * (test_bpe_random(&random) % 200));
    double begin = g2z_seconds();
    if (turn < turns) kill(ranks.pid[victim], SIGKILL);
    test_ranks_wait(t, &ranks, 60);
    int killed = turn < turns && ranks.code[victim] == 128 + SIGKILL;
    done = world == 1 ? !killed : ranks.code[(victim + 1) % world] == 0;
    kills += killed && !(world > 1 && done);
    for (int r = 0; r < world; r++) {
      if (ranks.code[r] == 128 + SIGKILL && r == victim) continue;
      CHECK_RANK(t, &ranks, r, done ? 0 : G2Z_EXIT_LOST,
                 done ? NULL : test_text("rank %d on ", victim));
    }
    if (!done) CHECK_SOON(t, begin, 10);
  }
  CHECK(t, kills >= 2 + (world == 1) && !test_there(t, "killed/RUN_FAILED.json"));
  SAME(t, test_text("whole/step-%06d", last), test_text("killed/step-%06d", last));
  test_runs_equal(t, "whole", "killed");
}

static void test_train_killed(g2z_test *t) { test_train_kills(t, 1, 6, 8); }
static void test_train_ranks_killed(g2z_test *t) { test_train_kills(t, 3, 4, 18); }

/* Each stage saves on 4 ranks. Runs resume in the same stage on 4 ranks, and in another one on 3 or
 * on 1. A step always has 12 sequences. A checkpoint is refused if one rank's file is another
 * rank's, or is missing. */
static void test_train_ranks_resume(g2z_test *t) {
  static const char *const stages[] = {"--zero 0", "--zero 1", "--zero 2", "--zero 3",
                                       "--strategy dp"};
  static const char *const keys[] = {"\"loss\": ", "\"val_loss\": "};
  for (int stage = 0; stage < 5; stage++) {
    const char *runs[3], *from = "";
    for (int turn = 0; turn < 3; turn++) { /* starts; resumes alike; resumes otherwise */
      const int world = turn < 2 ? 4 : stage % 2 ? 1 : 3;
      runs[turn] = test_kept(t, test_text("run%d%d", stage, turn));
      test_train_job(t, world, 0, world == 1 ? "/weights world_size=" : NULL,
                     "%s --layers 3 --steps 12 --batch %d --save-every 6 %s --bucket-mb "
                     "%s --sample-tokens 9 --prompt 1 --temperature 0 %s",
                     test_digits(t, runs[turn]), 12 / world,
                     stages[turn < 2 ? stage : (stage + 2) % 5], turn < 2 ? "0.02" : "0.03", from);
      from = test_kept(t, test_text("--resume '%s/%s/step-000006'", t->directory, runs[0]));
    }
    SAME(t, test_text("%s/step-000012", runs[0]), test_text("%s/step-000012", runs[1]));
    const char *start = test_read(t, "%s/metrics.jsonl", runs[0]);
    const char *other = test_read(t, "%s/metrics.jsonl", runs[2]);
    CHECK(t, test_number(t, strstr(start, "{\"step\": 12,"), keys[0]) <
                 test_number(t, start, keys[0]) - 0.5);
    for (int step = 7; step <= 12; step++) {
      const char *line = strstr(start, test_text("{\"step\": %d,", step));
      const char *same = strstr(other, test_text("{\"step\": %d,", step));
      CHECK_NEAR(t, test_number(t, same, keys[0]), test_number(t, line, keys[0]), 1e-5);
    }
    CHECK_NEAR(t, test_number(t, other, keys[1]), test_number(t, start, keys[1]), 1e-5);
    test_sh(t, "for run in %s %s; do grep -o 'validation: .*, .*' $run/train.log | cut -d, -f2 > "
               "$run/text; sed -n '/sample after step 12:/{n;p;}' $run/train.log >> $run/text; done; "
               "[ $(wc -l < %s/text) -gt 1 ] && cmp %s/text %s/text", runs[0], runs[2], runs[0],
            runs[0], runs[2]); /* they have seen and write the same text */
  }
  static const struct {
    const char *damage, *says;
  } damaged[] = {
      {"cp model.safetensors optimizer.state", "/optimizer.state has "},
      {"rm optimizer.state", "has no optimizer.state, which belongs to it"}};
  for (int i = 0; i < 2; i++) {
    test_sh(t, "cd run10/step-000012 && %s", damaged[i].damage);
    CHECK_HAS(t, test_trains(t, 1, "%s --layers 3 --steps 13 --batch 12 --resume '%s'",
                             test_digits(t, "none"), test_at(t, "run10/step-000012")),
              damaged[i].says);
  }
}

/* Ranks on CPUs share their host's memory: a model that fits once need not fit twice. */
static void test_train_ranks_memory(g2z_test *t) {
  size_t need[2], free_bytes, total_bytes;
  g2z_train_config config = test_config_of(1, 32, 2048, 16, 257);
  CHECK_OK(t, g2z_device_memory(&t->services, G2Z_DEVICE_CPU, &free_bytes, &total_bytes));
  config.batch = 1;
  config.dtype = G2Z_FP32;
  config.zero_stage = 0;
  for (int i = 0; i < 2; i++) {
    config.model.layers = 1 + i;
    need[i] = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1)->bytes_total;
  }
  if (need[0] > free_bytes / 2) SKIP(t, "too little memory is free");
  const char *flags = test_kept(t, test_text(
      "%s --layers %d --heads 32 --channels 2048 --batch 1 --zero 0 --steps 2",
      test_digits(t, "run"), (int)((free_bytes * 3 / 4 - need[0]) / (need[1] - need[0]))));
  CHECK_HAS(t, test_trains(t, 0, "%s --dry-run", flags), "rank: it fits");
  static const char says[] = "are free for each of the 2 ranks on this host: --batch 1 with --zero ";
  CHECK_HAS(t, test_trains(t, 1, "%s --dry-run --ranks 2", flags), "IT DOES NOT FIT", says);
  test_train_job(t, 2, 1, says, "%s", flags);
  /* The remedies are right: with the stage that they name last, the model fits. */
  int stage = 0;
  sscanf(strstr(test_trains(t, 1, "%s --dry-run --ranks 2 --zero 0", flags), says) + strlen(says),
         "%d", &stage);
  CHECK_HAS(t, test_trains(t, 0, "%s --dry-run --ranks 2 --zero %d", flags, stage), "it fits");
}

static void test_train_ranks_latest(g2z_test *t) {
  for (int turn = 0; turn < 2; turn++) {
    test_train_job(t, 2, 0, turn ? "run/step-000008 is skipped: " : NULL,
                   "%s --steps 8 --batch 1 --save-every 2 --resume latest", test_digits(t, "run"));
    if (turn == 0)
      test_sh(t, "cp -r run whole && cd run && rm step-000008/model.safetensors && "
                 "truncate -s 99 step-000006/optimizer.state");
  }
  test_runs_equal(t, "whole", "run");
  SAME(t, "whole/step-000008", "run/step-000008");
  CHECK(t, test_files_count(t, "run/*.damaged") == 2);
}

/* A rank that loses the job while its console is blocked still ends with the right code. */
static void test_train_ranks_stuck(g2z_test *t) {
  const char *stuck = test_at(t, "console");
  CHECK(t, mkfifo(stuck, 0600) == 0);
  int console = open(stuck, O_RDWR | O_NONBLOCK);
  while (write(console, stuck, 512) > 0) continue; /* until it is full */
  const char *arguments = test_text("%s --steps 100000 --batch 1", test_digits(t, "stuck"));
  test_ranks ranks = test_ranks_open(2);
  test_train_start(t, &ranks, 0, test_text("exec 2> '%s';", stuck), arguments);
  test_train_start(t, &ranks, 1, "", arguments);
  test_wait_for(t, "stuck", 3);
  kill(ranks.pid[1], SIGKILL);
  test_ranks_wait(t, &ranks, 40);
  CHECK_RANK(t, &ranks, 0, G2Z_EXIT_LOST, NULL);
  close(console);
}

/* One rank cannot write, or writes elsewhere: all report it and leave no checkpoint. Settings that
 * would make ranks wait for each other at different places, and different data (a copy of a shard
 * is damaged between its ends), are reported before the first step. */
static void test_train_ranks_differ(g2z_test *t) {
  static const struct {
    int odd;
    const char *before, *flags, *odd_flags, *says;
  } cases[] = {
      {1, "trap '' XFSZ; ulimit -f 16;", "--save-every 2", "--save-every 2",
       "rank 1: cannot write run/step-000002.partial/model.safetensors.partial: File too large"},
      {0, "trap '' XFSZ; ulimit -f 16;", "--save-every 2", "--save-every 2",
       "File too large; raise the limit"},
      {2, "mkdir -p other; cd other;", "--save-every 2", "--save-every 2",
       "rank 2: this rank does not see run/shared-"},
      {2, "mkdir -p other/run/weights; touch other/run/metrics.jsonl; cd other;", "", "",
       ", which rank 0 made: choose a --run-dir on a file system that all ranks share"},
      {1, "", "", "--val-every 4",
       "rank 1: the config differs from rank 0's: \"val_every=4\" there, \"val_every=5\" on rank 0"},
      {1, "", "", "--save-every 3", "\"save_every=3\" there, \"save_every=0\" on rank 0"},
      {1, "", "", "--keep-best", "\"keep_best=1\" there, \"keep_best=0\" on rank 0"},
      {1, "", "", "--patience 3", "\"patience=3\" there, \"patience=0\" on rank 0"},
      {1, "", "", "--target-loss 3", "\"target_loss=3\" there, \"target_loss=0\" on rank 0"},
      {1, "", "", "--prompt 1", "the prompt differs from rank 0's: \"1\" there, \"\" on rank"},
      {1, "", "", "--max-train-steps 7",
       "\"max_train_steps=7\" there, \"max_train_steps=0\" on rank 0"},
      {1, "", "", "--profile", "\"profile=1\" there, \"profile=0\" on rank 0"},
      {1, "", "", "--lr 0.010000001", "\"lr=0.010000001\" there, \"lr=0.01\" on rank 0"},
      {1, "", "--train whole.bin --val other.bin", "--train damaged.bin --val other.bin",
       "the training data differs from rank 0's: \"hash "},
      {1, "", "--train whole.bin --val other.bin", "--train whole.bin --val damaged.bin",
       "the validation data differs from rank 0's: \"ha"}};
  test_ranks ranks;
  test_run_shard(t, "whole.bin", 2001);
  test_run_shard(t, "other.bin", 2001);
  test_run_shard(t, "damaged.bin", 2001);
  for (size_t at = 1024 + 1800; at < 1024 + 2200; at++)
    test_files_poke(t, test_at(t, "damaged.bin"), at, 0);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *flags = test_digits(t, "unused");
    if (strncmp(cases[i].flags, "--train", 7) == 0) flags = strstr(flags, "--vocab-size");
    ranks = test_ranks_open(i < 4 ? 3 : 2);
    for (int r = 0; r < ranks.world; r++) {
      const int odd = r == cases[i].odd;
      test_train_start(t, &ranks, r,
                       test_text("cd '%s'; %s", t->directory, odd ? cases[i].before : ""),
                       test_text("%s --run-dir run --steps 12 --batch 1 --val-every 5 "
                                 "--sample-tokens 1 %s", flags,
                                 odd ? cases[i].odd_flags : cases[i].flags));
    }
    test_train_end(t, &ranks, 30, 1, cases[i].says);
    CHECK(t, test_files_count(t, "run/step-") == 0);
    if (i < 4) test_sh(t, "rm -r run");
    CHECK(t, !test_there(t, "run")); /* nothing is left by ranks that differ */
  }
  /* Ranks whose model cannot write a sample fail together, and print it once. */
  test_train_job(t, 2, 1, "the run diverged: the loss of step 2, the last, is nan",
                 "%s --run-dir none --dtype fp16 --optimizer muon --lr 1e3 --warmup 0 --clip 0 "
                 "--batch 2 --steps 8 --sample-every 2 --sample-tokens 4",
                 test_digits(t, "unused"));
}

/* Other programs read these fields of training_metrics.json: all exist, however short the run, and
 * the fields that these programs format as numbers are numbers. A Slurm job adds its variables. */
static void test_run_short(g2z_test *t) {
  static const char *const job[] = {
      "{ hardware.cluster", "\" scheduler.type", "\" scheduler.job_id", "\" scheduler.nodelist",
      "0 scheduler.nnodes", "0 scheduler.procid", "0 scheduler.localid", "\" scheduler.partition"};
  static const char *const slurm[][2] = {
      {"SLURM_JOB_ID", "4711"}, {"SLURM_JOB_NODELIST", "node[1-2]"}, {"SLURM_JOB_NUM_NODES", "2"},
      {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_PARTITION", "gpu"},
      {"SLURM_CLUSTER_NAME", "alpha"}};
  const int inside = getenv("SLURM_JOB_ID") != NULL; /* keep a real job's variables */
  for (int i = 0; i < 3; i++) { /* one step; a stop after step 1; only validation */
    test_run_seen seen;
    test_run_setup s = test_run_prepare(t, test_text("run%d", i));
    s.config.save_weights = NULL;
    if (i == 0) s.config.max_train_steps = 1;
    if (i == 2) s.config.train.train_glob = NULL;
    test_run_stop_at = i == 1;
    for (int k = 0; k < 7 && i == 0 && !inside; k++) setenv(slurm[k][0], slurm[k][1], 1);
    g2z_status status = test_run_all(t, &s.config, &seen);
    for (int k = 0; k < 7 && i == 0 && !inside; k++) unsetenv(slurm[k][0]);
    CHECK(t, status == (i == 1 ? G2Z_STOPPED : G2Z_OK));
    CHECK(t, i < 2 || (seen.steps == 0 && seen.validations == 1 && seen.samples == 1));
    if (i == 2) CHECK_NEAR(t, seen.val_loss, log(257.0), 0.1); /* of a fresh model */
    const char *text = test_read(t, "run%d/training_metrics.json", i);
    test_run_schema(t, text, strlen(text), test_schema, TEST_SCHEMA_ALWAYS);
    if (i == 0 && !inside) test_run_schema(t, text, strlen(text), job, sizeof job / sizeof *job);
    CHECK(t, *test_read(t, "run%d/train.log", i));
    CHECK_HAS(t, test_read(t, "run%d/report.html", i),
              i == 1 ? "<dd>stopped<small>by SIGTERM</small></dd>" : "<dd>completed</dd>");
  }
}
