/* Tests of the room "experiments" and of ./bench: statistics, summaries, jobs, each sub-command. */

/* ----- experiments -------------------------------------------------------- */

static void test_statistics(g2z_test *t) {
  double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2}, holes[] = {1, NAN, 2};
  const double same[] = {2, 4, 4, 4, 5, 5, 7, 9};
  CHECK_NEAR(t, g2z_median(odd, 3), 2, 0);
  CHECK_NEAR(t, g2z_median(even, 4), 2.5, 0);
  CHECK(t, isnan(g2z_median(holes, 3)) && isnan(g2z_median(NULL, 0)));
  CHECK_NEAR(t, g2z_percentile(odd, 3, 67), 3, 0);
  CHECK_NEAR(t, g2z_percentile(odd, 3, 66), 2, 0);
  CHECK(t, isnan(g2z_percentile(holes, 3, 95)) && isnan(g2z_percentile(NULL, 0, 50)));
  CHECK_NEAR(t, g2z_deviation(same, 8), sqrt(32.0 / 7), 1e-12);
  CHECK(t, isnan(g2z_deviation(odd, 1)));
}

static void test_end_summary(void *summary) { g2z_summary_free((g2z_summary *)summary); }

/* A summary with one point per outcome. The test owns it. */
static g2z_summary *test_summary(g2z_test *t) {
  g2z_summary *summary;
  g2z_point *point;
  REQUIRE_OK(t, g2z_summary_create(&t->services, "scaling", &summary));
  test_own(t, test_end_summary, summary);
  snprintf(summary->hardware, sizeof summary->hardware, "2 x <GPU> & \"co\"");
  snprintf(summary->work, sizeof summary->work, "work");
  snprintf(summary->command_line, sizeof summary->command_line, "./bench scaling");
  snprintf(summary->commit, sizeof summary->commit, "0123456789abcdef");
  for (int i = 0; i < 3; i++) {
    REQUIRE_OK(t, g2z_summary_add(summary, &point));
    snprintf(point->name, sizeof point->name, "%d ranks", 1 << i);
    point->figures.world_size = 1 << i;
    point->outcome = (g2z_outcome)(i == 2 ? G2Z_OUTCOME_SKIPPED : G2Z_OUTCOME_OK);
    if (i == 2) snprintf(point->reason, sizeof point->reason, "no such machine");
    if (i == 2) break;
    point->figures.tokens_per_sec = 1000 * (1.9 * i + (i == 0));
    point->figures.step_p50_ms = 1.25;
    point->figures.speedup_vs_1gpu = i ? 1.9 : 1;
    point->repeats = 2;
    point->runs[0] = 1 + i;
    point->runs[1] = 3 + i;
  }
  return summary;
}

static void test_summary_line(void *user, const char *text) {
  char *lines = (char *)user;
  size_t used = strlen(lines);
  snprintf(lines + used, 4096 - used, "%s\n", text);
}

/* The summary of a file. The test owns it. */
static g2z_summary *test_summary_read(g2z_test *t, const char *path) {
  g2z_summary *summary;
  REQUIRE_OK(t, g2z_summary_read(&t->services, path, &summary));
  test_own(t, test_end_summary, summary);
  return summary;
}

static void test_summaries(g2z_test *t) {
  g2z_summary *summary = test_summary(t);
  const char *path = test_at(t, "scaling_report.json");
  char lines[4096] = "";
  g2z_page *page;
  CHECK_OK(t, g2z_summary_write(summary, path));
  g2z_summary *again = test_summary_read(t, path);
  CHECK(t, again->count == 3 && strcmp(again->hardware, summary->hardware) == 0);
  for (size_t i = 0; i < 3; i++) {
    const g2z_point *a = &summary->points[i], *b = &again->points[i];
    CHECK(t, strcmp(a->name, b->name) == 0 && a->outcome == b->outcome);
    CHECK(t, a->repeats == b->repeats && a->runs[1] == b->runs[1]);
    CHECK(t, strcmp(a->reason, b->reason) == 0);
    for (int k = 0; k < G2Z_FIGURE_COUNT; k++) {
      double x = *g2z_figure(&summary->points[i].figures, k);
      double y = *g2z_figure(&again->points[i].figures, k);
      CHECK(t, isnan(x) ? isnan(y) : x == y);
    }
  }
  const char *text = test_read(t, "scaling_report.json");
  CHECK(t, strstr(text, "\"speedup_vs_1gpu\": 1.9\n") && !strstr(text, "gpu_percent"));
  g2z_summary_print(again, test_summary_line, lines);
  CHECK_HAS(t, lines, "| scaling | ranks | tokens/s | p50 ms | speed-up |\n|---|---|---|---|---|\n",
            "| 2 ranks | 2 | 1900 | 1.25 | 1.900 |\n", "`./bench scaling`; commit 0123456789ab\n",
            "skipped: 4 ranks: no such machine\n");
  CHECK(t, !strstr(lines, "| 4 ranks"));
  CHECK_OK(t, g2z_page_create(&t->services, test_path(t, "page.html"), "page", &page));
  g2z_summary_page(again, page);
  CHECK_OK(t, g2z_page_commit(page));
  g2z_page_free(page);
  CHECK_HAS(t, test_read(t, "page.html"), "2 x &lt;GPU&gt; &amp; ", ">Speed-up<", "ideal",
            "no such machine");
}

static void test_summaries_full(g2z_test *t) {
  static const char *const fills[] = {"\"", "\x1b", "\\\n", "\xc3\xbc"};
  g2z_summary *summary = test_summary(t);
  const char *path = test_at(t, "full_report.json");
  for (int i = 0; i < 4; i++) { /* umlauts: the array's end splits one, then what replaces it */
    const char *fill = fills[i];
    char *to[] = {summary->command_line, summary->points[2].reason};
    size_t room[] = {sizeof summary->command_line, sizeof summary->points[2].reason};
    for (int k = 0; k < 2; k++) {
      for (size_t at = 0; at + 1 < room[k]; at++) to[k][at] = fill[at % strlen(fill)];
      to[k][room[k] - 1] = 0;
    }
    CHECK_OK(t, g2z_summary_write(summary, path));
    const g2z_summary *again = test_summary_read(t, path);
    for (int k = 0; k < 2; k++)
      if (i == 3) to[k][room[k] - 2] = '\xef';
    CHECK(t, strcmp(again->command_line, summary->command_line) == 0);
    CHECK(t, strcmp(again->points[2].reason, summary->points[2].reason) == 0);
  }
}

static void test_summaries_damaged(g2z_test *t) {
  static const struct { const char *from, *to, *says; } changes[] = {
      {"gpt2_zero experiment 1", "gpt2_zero experiment 9", "only \"gpt2_zero experiment 1\""},
      {"\"scaling\"", "\"baking\"", "no experiment is called \"baking\""},
      {"\"outcome\": \"ok\"", "\"outcome\": \"no\"", "not \"no\""},
      {"\"name\": \"1 ranks\"", "\"nome\": \"1 ranks\"", "the point \"\" needs a name"},
      {"\"tokens_per_sec\": 1000", "\"tokens_per_sec\": true", ""},
      {"run_scaling_1", "../scaling_1", "run_EXPERIMENT_N"},
      {"\"points\": [", "\"dots\": [", "has no points"}};
  g2z_summary *summary = test_summary(t), *again;
  const char *path = test_at(t, "scaling_report.json");
  char changed[8192];
  CHECK_OK(t, g2z_summary_write(summary, path));
  const char *text = test_read(t, "scaling_report.json");
  for (size_t cut = 0; cut + 2 < strlen(text); cut += 3) { /* the end is "}" and a line feed */
    test_write_file(t, path, text, cut);
    CHECK(t, g2z_summary_read(&t->services, path, &again) != G2Z_OK && !again);
    CHECK(t, t->services.error[0] != 0);
  }
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    const char *at = strstr(text, changes[i].from);
    CHECK(t, at != NULL);
    if (!at) continue;
    snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, changes[i].to,
             at + strlen(changes[i].from));
    test_write_file(t, path, changed, strlen(changed));
    CHECK_FORMAT(t, g2z_summary_read(&t->services, path, &again), changes[i].says);
  }
}

static void test_count_watch(void *user) { ++*(int *)user; }

static void test_ranks_run(g2z_test *t) {
  char name[] = "test_gpt2", list[] = "--list", none[] = "no_such_test";
  char *argv[] = {name, list, NULL};
  const char *path = test_at(t, "out.txt");
  int looks = 0;
  g2z_job job;
  g2z_job_end end;
  memset(&job, 0, sizeof job);
  job.ranks = 2;
  job.argv = argv;
  job.output = path;
  job.watch = test_count_watch;
  job.user = &looks;
  CHECK_OK(t, g2z_ranks_run(&t->services, &job, &end));
  CHECK(t, end.exit_code == 0 && end.signal == 0 && looks > 0);
  CHECK(t, end.rank_bytes > 65536 && end.cpu_s >= 0 && end.cpu_s < 60);
  job.ranks = 1; /* also a separate process; its output is appended */
  CHECK_OK(t, g2z_ranks_run(&t->services, &job, &end));
  CHECK(t, test_times(test_read(t, "out.txt"), "\nranks_run ") == 3);
  argv[1] = none;
  job.ranks = 2;
  CHECK_OK(t, g2z_ranks_run(&t->services, &job, &end));
  CHECK(t, end.exit_code == 1);
  job.output = "/nowhere/out.txt";
  CHECK_IO(t, g2z_ranks_run(&t->services, &job, &end), "/nowhere/out.txt");
  job.ranks = 0;
  CHECK_BAD(t, g2z_ranks_run(&t->services, &job, &end), "0 ranks: give 1 to ");
}

/* Runs `bench ARGUMENTS` in a shell; $D is the test's directory. It must end with `code`. The
 * output stays valid until the next call. */
#define test_bench(t, code, ...) test_bench_line(t, code, test_text(__VA_ARGS__))
static const char *test_bench_line(g2z_test *t, int code, const char *arguments) {
  static char output[16384];
  int got = test_shell(test_text("D='%s'; OMP_WAIT_POLICY=passive %s %s 2>&1", t->directory,
                                 test_bench_program(), arguments), output, sizeof output);
  FAIL_IF(t, got != code, "bench %s ended with %d, expected %d: %s", arguments, got, code, output);
  return output;
}

/* The smallest experiment possible. */
static const char test_bench_small[] =
    "--device cpu --layers 1 --channels 16 --heads 2 --context 16 --vocab-size 64 --seq 8 "
    "--steps 3 --warmup 1";

static void test_bench_help(g2z_test *t) {
  static const struct { const char *command, *flags; } commands[] = {
      {"", "model batch accum steps device dtype zero strategy recompute bucket-mb peer ops help"},
      {"ops", "model batch seq accum dtype device help"},
      {"scaling", "gpus global-batch batch seq steps tokens warmup repeats zero dtype out help"},
      {"buckets", "gpus sizes graph repeats out help"},
      {"matrix", "gpus zero dtype batch seq repeats out help"},
      {"strategies", "gpus zero val-steps repeats out help"},
      {"comm", "gpus sizes repeats device dtype out help"}, {"report", "out help"}};
  for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
    const char *said = test_bench(t, 0, "%s --help", commands[i].command);
    for (const char *flag = commands[i].flags; *flag; flag += strspn(flag, " ")) {
      int length = (int)strcspn(flag, " ");
      CHECK_HAS(t, said, test_text("\n  --%.*s ", length, flag));
      flag += length;
    }
    CHECK(t, !strstr(said, "--run-dir")); /* only for ranks */
    CHECK(t, !strstr(said, "] ["));       /* one default per flag */
    if (i < 2) CHECK_HAS(t, said, test_text("below %d tokens", G2ZC_FP8_TOKENS));
    test_narrow(t, commands[i].command, said);
    for (size_t k = 1; k < sizeof commands / sizeof *commands && !i; k++)
      CHECK_HAS(t, said, test_text("\n  %s ", commands[k].command));
    CHECK(t, i || (!strstr(said, "\n  point") && !strstr(said, "\n  exchange")));
  }
  CHECK(t, !strstr(test_bench(t, 0, "point --help"), "(null)"));
}

static void test_bench_refusals(g2z_test *t) {
  /* Each ends with exit code 1 and a line that begins with "bench: " and contains the words. */
  static const char *const cases[][2] = {
      {"scale", "scale is not a sub-command of bench. To list them: ./bench --help"},
      {"scaling --bathc 4", "unexpected flag --bathc: "}, {"scaling x", "unexpected argument"},
      {"--batch 2 ops --out=\"a b\" -h", "first: ./bench ops --batch 2 '--out=a b' -h\n"},
      {"--gpus=1,2 scaling", "bench: the sub-command comes first: ./bench scaling --gpus=1,2\n"},
      {"--model ops --x", "unexpected flag --x"}, /* a value, not a sub-command */
      {"ops --steps 1", "unexpected flag --steps: ./bench ops --help lists all flags"},
      {"--device cpu --model gpt2 --layers 2 --peer true", "--peer runs an unchanged --model"},
      {"--device cpu --peer true", "--peer needs a --model; add --model gpt2"},
      {"scaling --gpus 0 --out $D/s", "--gpus 0: give up to 16 numbers from 1 to 4096"},
      {"scaling --gpus 1,,2 --out $D/s", "--gpus 1,,2: give "},
      {"scaling --gpus 1,2, --out $D/s", "--gpus 1,2,: give "},
      {"scaling --gpus ' 1' --out $D/s", "--gpus  1: give "},
      {"comm --sizes '1,\t2' --out $D/s", "commas without spaces"},
      {"matrix --dtype '' --out $D/s", "--dtype : give up to 16 of fp32|tf32|fp16|bf16"},
      {"scaling --gpus $(seq -s , 17) --out $D/s", "up to 16 numbers"},
      {"matrix --zero 4 --out $D/s", "--zero 4: give up to 16 of dp|0|1|2|3"},
      {"matrix --dtype fp16,fp8 --out $D/s", "--dtype fp16,fp8: give up to 16 of fp32|"},
      {"buckets --sizes 1,x --out $D/s", "--sizes 1,x: give up to 16 numbers from 0"},
      {"scaling --device cpu --channels 60 --heads 7 --out $D/s", "here: channels=60 must divide"},
      {"scaling --device cpu --gpus 1 --train $D/none --out $D/s", "here: no file has the name "},
      {"buckets --device cpu --train $D/x.bin --out $D/s", "x.bin has no shard header"},
      {"matrix --device cpu --train '' --out $D/s", "no token shards were named"},
      {"matrix --device cpu --dtype tf32 --out $D/s", "here: dtype tf32 needs tensor cores, which"},
      {"comm --device cpu --gpus 2 --dtype tf32 --out $D/s", "here: dtype tf32 needs tensor cores"},
      {"buckets --device cpu --graph on --out $D/s", "measured here: graph=1 needs a GPU"},
      {"scaling --device cpu --gpus 1 --tokens 100000000000000 --out $D/s",
       " makes 195312500000 steps, and at most 100000000 "},
      {"scaling --device cpu --gpus 1 --out /dev/null/x", "/dev/null"},
      {"scaling --device cpu --out $D/$(printf '%0200d/' 1 2 3 4 5)", "at most 990 are allowed"},
      {"comm --device cpu --gpus 2 --sizes 0 --out $D/s", "--sizes 0: give up to 16 numbers from"},
      {"scaling --device cpu --gpus 1,1.5 --out $D/s", "--gpus 1,1.5: 1.5 "},
      {"buckets --device cpu --sizes 1,5e-4 --out $D/s", "0.0005 MiB is less than the minimum, "},
      {"matrix --dtype fp16,fp16 --out $D/s", "--dtype fp16,fp16: fp16 is given twice"},
      {"comm --device cpu --gpus 1 --out $D/s", "nothing to exchange: --gpus 2 or more"},
      {"comm --sizes 1,4,1.0 --out $D/s", "--sizes 1,4,1.0: 1.0 is given twice"},
      {"scaling --device cpu --steps 6 --tokens 99 --out $D/s", "--tokens and --steps both set"},
      {"point", "bench point needs --run-dir and --train"},
      {"exchange", "bench exchange needs --run-dir"},
      {"report", "name the directories"}, {"report /nowhere", "/nowhere"},
      {"report $D", "no NAME_report.json and no metrics.jsonl"}};
  test_write_file(t, test_path(t, "x.bin"), "no shard\n", 9);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    CHECK_HAS(t, test_bench(t, 1, "%s", cases[i][0]), "bench: ", cases[i][1]);
    CHECK(t, test_files_count(t, "s") == 0); /* and no file is left */
  }
}

/* The ops are the ones that a step calls, with the step's counts: a recomputed block's forward ops
 * count once more. */
static void test_bench_ops(g2z_test *t) {
  static const struct {
    const char *op;
    int calls;
  } rows[] = {
      {"embed_fwd", 2}, {"layernorm_fwd", 22}, {"qkv_fwd", 10}, {"attention_fwd", 10},
      {"attproj_fwd", 10}, {"fc_gelu_fwd", 10}, {"fcproj_fwd", 6}, {"head_loss", 2},
      {"layernorm_bwd_last", 2}, {"layernorm_bwd", 12}, {"fcproj_bwd_data", 6},
      {"fc_bwd_weight", 6}, {"attention_bwd", 6}, {"embed_bwd", 2}, {"grad_sumsq", 1},
      {"adamw", 1}};
  const char *said = test_bench(t, 0, "ops --device cpu --layers 3 --channels 16 --heads 2 "
                                "--context 16 --vocab-size 64 --batch 2 --accum 2 --recompute "
                                "block");
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const char *row = strstr(said, test_text("\n%s ", rows[i].op));
    double calls = 0, call_us = 0;
    CHECK(t, row && sscanf(row, "%*s %lf %lf", &calls, &call_us) == 2 && call_us > 0);
    CHECK_NEAR(t, calls, rows[i].calls, 0);
  }
  CHECK_HAS(t, said, "\nlimits measured here: a 1024 x 1024 x 1024 product ", "\nsum ");
  CHECK(t, !strstr(said, "nan") && !strstr(said, "inf"));
  setenv("SLURM_NTASKS", "4", 1); /* as in the shell of salloc: one process needs no srun */
  test_bench(t, 0, "--device cpu --layers 1 --channels 16 --heads 2 --context 16 --vocab-size 64 "
             "--batch 1 --steps 1 --ops off");
  unsetenv("SLURM_NTASKS");
}

/* The summary that an experiment left. */
static g2z_summary *test_bench_summary(g2z_test *t, const char *name) {
  return test_summary_read(t, test_at(t, "%s/%s_report.json", name, name));
}

/* Checks every successful point: its figures are consistent, its run directories complete. */
static void test_bench_point(g2z_test *t, const g2z_summary *summary, const g2z_point *point) {
  const g2z_figures *f = &point->figures;
  g2z_object run;
  char path[700];
  CHECK(t, point->outcome == G2Z_OUTCOME_OK);
  CHECK(t, f->steps == 3 && f->step_min_ms > 0 && f->step_min_ms <= f->step_p50_ms);
  CHECK(t, f->step_p50_ms <= f->step_p95_ms && f->step_p95_ms <= f->step_max_ms);
  CHECK(t, f->global_batch == f->micro_batch * f->accum_steps * f->world_size);
  CHECK(t, f->total_wall_time_sec > f->train_time_sec && f->peak_memory_gib > 0);
  CHECK(t, f->exposed_comm_share >= 0 && f->exposed_comm_share <= 1 && f->cpu_percent > 0);
  CHECK(t, isnan(f->began_sec) && isnan(f->gpu_percent));
  if (point->repeats == 1)
    CHECK_NEAR(t, f->tokens_per_sec, 1e3 * f->global_batch * f->seq_len / f->step_p50_ms,
               1e-5 * f->tokens_per_sec);
  for (int r = 0; r < point->repeats; r++) {
    snprintf(path, sizeof path, "%.250s/%s/run_%s_%d", t->directory, summary->experiment,
             summary->experiment, point->runs[r]);
    CHECK_OK(t, g2zp_read_run(&t->services, path, &run));
    CHECK(t, g2z_object_number(&run, "hardware.world_size") == f->world_size);
    CHECK(t, g2z_object_number(&run, "training_config.micro_batch_size_per_gpu") == f->micro_batch);
    CHECK(t, g2z_object_number(&run, "epochs.0.steps") == f->steps + 1); /* including its warm-up */
    CHECK(t, g2z_object_number(&run, "summary.mean_tokens_per_sec_global") > 0);
    g2z_object_free(&run);
    strcat(path, "/train.log");
    CHECK(t, access(path, R_OK) == 0);
  }
}

/* Fixed work on 1, 2 and 3 ranks, of which 3 does not divide it; two rounds. */
static void test_bench_scaling(g2z_test *t) {
  char arguments[900];
  snprintf(arguments, sizeof arguments, "scaling %s --gpus 1,2,3 --global-batch 4 --batch 2 "
           "--repeats 2 --dropout 0.1 --recompute block --out '%s'", test_bench_small,
           test_path(t, "scaling"));
  CHECK_HAS(t, test_bench(t, 0, "%s", arguments), "\n[4/4] 2 ranks, repeat 2: ", " left\n",
            "skipped: 3 ranks: a global batch of 4 cannot be divided among 3 ranks\n",
            "\n| 2 ranks | 2 | 2 | 1 | ");
  g2z_summary *s = test_bench_summary(t, "scaling");
  CHECK(t, s->count == 3 && s->points[2].outcome == G2Z_OUTCOME_SKIPPED);
  for (int i = 0; i < 2; i++) {
    const g2z_point *p = &s->points[i];
    test_bench_point(t, s, p);
    CHECK(t, p->repeats == 2 && p->runs[0] == 1 + i && p->runs[1] == 3 + i); /* A B A B */
    double speedup = p->figures.tokens_per_sec / s->points[0].figures.tokens_per_sec;
    CHECK_NEAR(t, p->figures.speedup_vs_1gpu, speedup, 1e-6 * speedup);
    CHECK_NEAR(t, p->figures.scaling_efficiency, speedup / (1 + i), 1e-6 * speedup);
    CHECK(t, p->figures.accum_steps == 2 - i && p->figures.tokens_per_sec_sd >= 0);
  }
  CHECK(t, access(test_path(t, "scaling/tokens.bin"), F_OK) != 0); /* bench removes it */
  /* bench's arguments reach the ranks that it starts. */
  CHECK_HAS(t, test_read(t, "scaling/run_scaling_2/training_metrics.json"),
            "\"bench point --layers=1 --channels=16 --heads=2 ", " --dropout=0.1 ",
            " --recompute=block ");
  CHECK_HAS(t, test_read(t, "scaling/run_scaling_2/launcher_metadata.json"), "\"world_size\": 2,",
            "\"bench point ");
  CHECK_HAS(t, test_bench(t, 1, "%s", arguments), /* never overwrites a result */
            "scaling_report.json exists already: choose another --out");
  test_sh(t, "rm scaling/scaling_report.json"); /* as if it had been stopped */
  CHECK_HAS(t, test_bench(t, 1, "%s", arguments),
            "run_scaling_1 is left from an experiment that did not end", "type rm -r ");
  CHECK(t, !test_there(t, "scaling/scaling_report.json"));
}

static void test_bench_others(g2z_test *t) {
  static const struct {
    const char *name, *flags;
    size_t points;
  } cases[] = {
      {"buckets", "--sizes 0.005,4 --gpus 2", 2},
      {"matrix", "--gpus 1 --zero 0,2 --dtype fp16,fp32", 4},
      {"strategies", "--gpus 2 --zero dp,0", 2}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_bench(t, 0, "%s %s --batch 2 --repeats 1 %s --out $D/%s", cases[i].name, test_bench_small,
               cases[i].flags, cases[i].name);
    g2z_summary *s = test_bench_summary(t, cases[i].name);
    CHECK(t, s->count == cases[i].points);
    for (size_t k = 0; k < s->count; k++) test_bench_point(t, s, &s->points[k]);
    const g2z_figures *f = &s->points[0].figures;
    if (i == 0) { /* stage 1 reduces and gathers each bucket */
      CHECK(t, f->buckets > s->points[1].figures.buckets);
      CHECK(t, f->collectives_per_step == 2 * f->buckets && f->exposed_comm_ms > 0);
    }
    if (i == 1) CHECK(t, strcmp(s->points[0].name, "ZeRO 0, fp16") == 0);
    if (i == 2) CHECK(t, strcmp(s->points[0].name, "dp") == 0 && isnan(f->zero_stage));
  }
  /* The small CPU model gets as many positions as the flags request. */
  test_bench(t, 0, "scaling --device cpu --layers 1 --channels 16 --seq 130 --vocab-size 64 "
             "--gpus 1 --global-batch 1 --steps 1 --repeats 1 --out $D/long");
  /* Collectives are counted in the second step, and this run has only one. */
  const char *said = test_bench(t, 0, "buckets --device cpu --layers 1 --channels 16 --seq 8 "
                                "--vocab-size 64 --gpus 2 --sizes 1 --tokens 64 --warmup 0 "
                                "--repeats 1 --out $D/one");
  CHECK_HAS(t, said, "fp32, tokens 64, warm-up 0, repeats 1", "| buckets | ranks |");
  CHECK(t, !strstr(said, "| collectives |"));
  said = test_bench(t, 0, "matrix %s --gpus 1 --zero 0 --dtype bf16,fp16,fp32 --fp8 logits "
                    "--repeats 1 --out $D/fp8", test_bench_small);
  CHECK_HAS(t, said, "T=8, bf16, fp16, steps 3, warm-up 1, repeats 1; ");
  CHECK(t, test_times(said, "skipped: fp32: ") == 1); /* its type is not in the line above */
}

static void test_bench_failing(g2z_test *t) {
  uint16_t tokens[1000];
  for (int i = 0; i < 1000; i++) tokens[i] = (uint16_t)(i % 60);
  tokens[100] = 64; /* outside the vocabulary */
  test_write_file(t, test_path(t, "bad.bin"), tokens, sizeof tokens);
  CHECK_HAS(t, test_bench(t, 1, "scaling %s --gpus 1,2 --global-batch 2 --repeats 2 --train "
                          "$D/bad.bin --steps 200 --out $D/scaling", test_bench_small),
            "] 1 rank, repeat 1: failed, exit code 1: ", "bench: points that failed: 2 of 2; ");
  g2z_summary *s = test_bench_summary(t, "scaling");
  CHECK(t, s->count == 2 && s->points[1].outcome == G2Z_OUTCOME_FAILED);
  CHECK(t, strstr(s->points[1].reason, "token 64"));
  CHECK(t, s->points[1].repeats == 1); /* no retry */
  CHECK_HAS(t, s->hardware, "CPU, ");
  /* A report that cannot be written is printed. */
  CHECK_HAS(t, test_bench(t, 1, "scaling %s --gpus 1 --global-batch 1 --repeats 1 --steps 3000 "
                          "--out $D/full 2>&1 & until [ -d $D/full/run_scaling_1 ]; do :; done; "
                          "mkdir $D/full/scaling_report.json; wait $!", test_bench_small),
            "\n| 1 rank | 1 | 1 | 1 | ", "bench: cannot ");
}

/* A signal while ranks run, before and after a run has ended, and one while tokens are written: the
 * report lists the finished points and names the machine. */
static void test_bench_stopped(g2z_test *t) {
  static const struct {
    const char *name, *flags, *when, *machine;
    int runs;
  } cases[] = {
      {"scaling", "--steps 3000 --gpus 1,2 --global-batch 2 --batch 1 --repeats 9",
       "-e $D/run_scaling_2/train.log", "CPU, ", 1},
      {"strategies", "--steps 3000000 --gpus 1 --zero 0", "-s $D/run_strategies_1/metrics.jsonl",
       "CPU, ", 0},
      {"matrix", "--gpus 1 --zero 1 --dtype fp32 --batch 8192 --tokens 33554432",
       "-e $D/tokens.bin.partial", "unknown", 0}};
  char output[16384];
  test_write_file(t, test_path(t, "x.bin"), "no shard\n", 9);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *line = test_text(
        "D='%s'; export OMP_WAIT_POLICY=passive; "
        "%s %s --device cpu --layers 1 --channels 16 --heads 2 --vocab-size 64 --seq 8 "
        "--warmup 0 %s --out $D 2>&1 & p=$!; "
        "until [ %s ] || ! kill -0 $p 2> /dev/null; do :; done; "
        "%s %s --device cpu --out $D 2>&1; kill -TERM $p; wait $p",
        test_path(t, cases[i].name), test_bench_program(), cases[i].name, cases[i].flags,
        cases[i].when, test_bench_program(), cases[i].name);
    CHECK(t, test_shell(line, output, sizeof output) == 1);
    CHECK_HAS(t, output, "bench: another program uses ", /* the same --out */
              test_text("bench: stopped by signal 15: the report holds %d of ", cases[i].runs));
    CHECK(t, test_files_count(t, test_text("%s/tokens.bin", cases[i].name)) == 0);
    g2z_summary *s = test_bench_summary(t, cases[i].name);
    CHECK_HAS(t, s->work, test_text(", stopped by signal 15 after %d of ", cases[i].runs));
    CHECK_HAS(t, s->hardware, cases[i].machine); /* no rank ran: it is not known */
    for (int k = 0; k < (int)s->count; k++) { /* the first points are measured */
      const g2z_point *p = &s->points[k];
      int measured = k < cases[i].runs;
      CHECK(t, p->repeats == measured);
      CHECK(t, p->outcome == (measured ? G2Z_OUTCOME_OK : G2Z_OUTCOME_SKIPPED));
      CHECK(t, measured ? p->figures.tokens_per_sec > 0 : strstr(p->reason, "was stopped") != NULL);
    }
  }
}

static void test_bench_comm(g2z_test *t) {
  CHECK_HAS(t, test_bench(t, 0, "comm --device cpu --gpus 1,2 --sizes 0.01,0.1 --repeats 1 "
                          "--out $D/comm"),
            "skipped: 1 rank: one rank has nothing to exchange: ");
  g2z_summary *s = test_bench_summary(t, "comm");
  CHECK(t, s->count == 1 + 2 * 5); /* five collectives */
  for (size_t i = 1; i < s->count; i++) {
    const g2z_figures *f = &s->points[i].figures;
    const char *name = s->points[i].name;
    double passes = strncmp(name, "all_reduce", 10) == 0 || strncmp(name, "reduce,", 7) == 0 ||
                    strncmp(name, "broadcast", 9) == 0 ? 1 : 0.5; /* for two ranks */
    double bus = passes * f->message_mib * 1048576 / (f->time_us * 1e-6) * 1e-9;
    CHECK(t, s->points[i].repeats == 1 && f->time_us > 0 && f->limit_gb_per_sec > 0);
    CHECK_NEAR(t, f->bus_gb_per_sec, bus, 1e-6 * bus);
    CHECK_NEAR(t, f->of_limit, bus / f->limit_gb_per_sec, 1e-6 * f->of_limit);
  }
}

/* Lines of nvidia-smi as an experiment collects them: GPU 0 takes 100 MiB after the start. */
static void test_bench_watched(g2z_test *t) {
  static const char lines[] = "@ 1.0\n0, 10, 200\n1, 30, 300\n@ 2.0\n0, 90, 300\n1, [N/A], 310\n";
  g2zx_observer seen = {stdin, tmpfile(), 0}; /* no CPU: its peak is the largest rank's */
  g2z_job_end end = {0, 0, 0, 1048576};
  g2z_figures f = g2z_point_default().figures;
  g2zx_fill_watched(&seen, &end, &f);
  CHECK(t, isnan(f.peak_memory_gib) && isnan(f.gpu_percent)); /* nvidia-smi is not installed */
  fputs(lines, seen.output);
  f.began_sec = 0.5;
  f.ended_sec = 1.5;
  g2zx_fill_watched(&seen, &end, &f);
  CHECK(t, f.peak_memory_gib == 100.0 / 1024 && f.gpu_percent == 20);
  fclose(seen.output);
  /* The first line is there before the ranks start. */
  test_sh(t, "printf 'sleep 0.2\\necho 0, 0, 100\\n' > nvidia-smi; chmod +x nvidia-smi");
  char kept[4096];
  snprintf(kept, sizeof kept, "%s", getenv("PATH"));
  setenv("PATH", test_text("%s:%s", t->directory, kept), 1);
  memset(&seen, 0, sizeof seen);
  g2zx_open_smi(&seen, 1);
  g2zx_observe(&seen);
  setenv("PATH", kept, 1);
  CHECK(t, seen.smi && ftell(seen.output) > 0);
  pclose(seen.smi);
  fclose(seen.output);
}

static void test_bench_report(g2z_test *t) {
  static const char *const files[] = {"all/scaling/scaling_report.json",
                                      "all/scaling/run_scaling_1/training_metrics.json"};
  char output[4096];
  test_bench(t, 0, "scaling %s --gpus 1,2 --global-batch 2 --repeats 1 --out $D/all/scaling",
             test_bench_small);
  CHECK_HAS(t, test_bench(t, 0, "report $D/all"), "/all/report.html: 1 experiment, 2 runs\n");
  const char *page = test_read(t, "all/report.html");
  CHECK_HAS(t, page, ">Throughput<", ">Speed-up<", "run_scaling_2", "prefers-color-scheme");
  CHECK(t, !strstr(page, "http") && !strstr(page, "<script")); /* no network, no script */
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < 2; k++) {
      test_sh(t, "rm -f all/report.html; cp %s kept", files[i]);
      test_sh(t, k ? "echo '{\"schema_version\": \"1.0\", \"format\": \"mine\"}' > %s"
                   : "truncate -s -100 %s", files[i]);
      CHECK_HAS(t, test_bench(t, 1, "report $D/all"), "bench: ", strrchr(files[i], '/'));
      CHECK(t, !test_there(t, "all/report.html"));
      test_sh(t, "mv kept %s", files[i]);
    }
  test_bench(t, 0, "report $D/all");
  CHECK_HAS(t, test_bench(t, 1, "report $D/all/scaling/run_scaling_1"),
            "is a run with its own report.html: choose another place, --out DIR");
  /* It does not wait for the writer of a FIFO. A file of the user's stays. A killed run is reported
   * as one. */
  test_sh(t, "echo mine > report.html; mkdir killed; cp all/scaling/*_1/metrics.jsonl killed");
  CHECK_HAS(t, test_bench(t, 1, "report $D/all --out $D"), "/report.html was not written by bench");
  test_sh(t, "grep -x mine report.html > out; mkdir fifo; mkfifo fifo/report.html");
  CHECK(t, test_shell(test_text("D='%s'; timeout 5 %s report $D/all --out $D/fifo 2>&1",
                                t->directory, test_bench_program()), output, sizeof output) == 1);
  CHECK_HAS(t, output, "fifo/report.html: it is a FIFO; name a file");
  CHECK_HAS(t, test_bench(t, 0, "report $D/killed"), "0 experiments, 1 run\n");
  test_sh(t, "mkdir empty");
  CHECK_HAS(t, test_bench(t, 1, "report $D/empty"), "no NAME_report.json and no metrics.jsonl: ");
  CHECK_HAS(t, test_bench(t, 0, "report $D/all $D/killed"), "1 experiment, 3 runs\n");
  CHECK_HAS(t, test_read(t, "all/report.html"), "killed is not complete: not ended, no end ");
}
