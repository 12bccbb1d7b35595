/* Tests of the room "report": pages, TensorBoard events, spans and profiles. */

/* ----- tests of pages: reports, events, profiles -------------------------- */

/* A page with every kind of content: `count` points of a noisy curve, a spike, a gap. */
static g2z_status test_page_write(g2z_test *t, const char *path, size_t count) {
  static const char *const headers[] = {"GPUs", "tok/s"}, *const labels[] = {"<zero> 0", "zero 1"};
  static double x[20000], y[20000], bars[2] = {3, NAN}, high[2] = {4, 5};
  g2z_series series[4];
  g2z_chart chart;
  g2z_page *page;
  memset(series, 0, sizeof series);
  memset(&chart, 0, sizeof chart);
  for (size_t i = 0; i < count; i++) {
    x[i] = (double)i;
    y[i] = 3 + 0.1 * sin((double)i);
    if (i > count - 4 && i < count - 1) y[i] = NAN;
    if (i == count / 2) y[i] = 77;
  }
  G2Z_TRY(g2z_page_create(&t->services, path, "a < b & \"c\" \x1b\xff", &page));
  g2z_page_fact(page, "machine", "%d x %s", 8, "<script>");
  g2z_page_text(page, "%s", "it's");
  g2z_page_table(page, 2, headers);
  g2z_page_cell(page, "%d", 1);
  g2z_page_cell(page, "%s", "");
  series[0].name = "measured";
  series[0].x = x;
  series[0].y = y;
  series[0].count = count;
  series[1] = series[0];
  series[1].mark = G2Z_MARK_POINTS;
  series[1].count = 3;
  series[3] = series[0];             /* the third place is empty */
  series[3].name = "fourth";
  series[3].count = 3;
  chart.title = "Loss";
  chart.series = series;
  chart.series_count = 4;
  g2z_page_chart(page, &chart);
  series[0].y = bars;
  series[0].low = series[0].high = high;
  series[0].count = 2;
  chart.labels = labels;
  chart.series_count = 1;
  g2z_page_chart(page, &chart);
  g2z_status status = g2z_page_commit(page);
  g2z_page_free(page);
  return status;
}

static void test_pages(g2z_test *t) {
  const char *path = test_at(t, "page.html");
  CHECK_OK(t, test_page_write(t, path, 20000));
  const char *text = test_read(t, "page.html");
  CHECK_HAS(t, text, "<h1>a &lt; b &amp; &quot;c&quot; \xef\xbf\xbd\xef\xbf\xbd</h1>",
            "<dd>8 x &lt;script&gt;</dd>", "<p>it&#39;s</p>", "<tr><td>1<td>\xe2\x80\x93</tr>",
            "&lt;zero&gt; 0</text>", "<span style=\"--c:var(--s3)\">fourth</span>");
  CHECK(t, !strstr(text, "<span style=\"--c:var(--s2)"));
  static const char *const pairs[][2] = {{"<dl>", "</dl>"}, {"<table", "</table>"},
                                         {"<svg", "</svg>"}, {"<figure>", "</figure>"},
                                         {"<div", "</div>"}, {"<span", "</span>"},
                                         {"<text", "</text>"}, {"<title>", "</title>"}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    CHECK(t, test_times(text, pairs[i][0]) > 0 &&
                 test_times(text, pairs[i][0]) == test_times(text, pairs[i][1]));
  CHECK(t, !strstr(text, "<script") && !strstr(text, "http") && !strstr(text, "nan"));
  CHECK_HAS(t, text, "p,pre,dd,td,.legend span{white-space:pre-wrap}"); /* texts keep all spaces */
  CHECK(t, test_times(text, "class=\"bar\"") == 1); /* the other one is unknown */
  CHECK(t, test_times(text, "class=\"dot\"") == 3);
  /* At most 1,000 of 20,000 points are drawn, including the spike; the gap separates the last
   * point. */
  const char *line = strstr(text, "class=\"series"), *end = line ? strchr(line, '>') : NULL;
  int points = 0, gaps = 0;
  double least = 1e9, most = 0;
  for (const char *at = line ? strstr(line, " d=\"") + 4 : NULL; at && at < end; at++)
    if (*at == 'M' || *at == 'L') {
      double across = atof(at + 1), up = atof(strchr(at, ' ') + 1);
      CHECK(t, across >= 0 && across <= 440 && up >= 0 && up <= 260);
      points++;
      gaps += *at == 'M';
      least = fmin(least, up);
      most = fmax(most, up);
    }
  CHECK(t, points > 900 && points <= G2Z_CHART_POINTS && gaps == 1 && most - least > 150);
  CHECK_OK(t, test_page_write(t, path, 900));
  line = strstr(test_read(t, "page.html"), "class=\"series");
  end = line ? strchr(line, '>') : NULL;
  CHECK(t, end && strncmp(end - 4, "h0\"/", 4) == 0); /* "h0": a single last point */
  unlink(path);
  CHECK_NO_MEMORY(t, 2, 100, test_page_write(t, path, 10),
                  test_files_count(t, "page.html.partial") == 0);
  CHECK_IO(t, test_page_write(t, "/nowhere/page.html", 10), "/nowhere");
}

/* The page of one chart of one series. */
static const char *test_page_of(g2z_test *t, const g2z_series *series, const char *const *labels,
                                g2z_axis axis) {
  g2z_chart chart;
  g2z_page *page;
  memset(&chart, 0, sizeof chart);
  chart.title = "a chart";
  chart.labels = labels;
  chart.series = series;
  chart.series_count = 1;
  chart.y_axis = axis;
  CHECK_OK(t, g2z_page_create(&t->services, test_path(t, "page.html"), "page", &page));
  g2z_page_chart(page, &chart);
  CHECK_OK(t, g2z_page_commit(page));
  g2z_page_free(page);
  return test_read(t, "page.html");
}

/* Numbers without a possible scale are not drawn, ticks are round, and a whisker that exceeds the
 * scale of its bars is cut. */
static void test_page_scales(g2z_test *t) {
  static const struct {
    double low, high;
    g2z_axis axis;
    const char *first, *last;
  } cases[] = {{2.3, 10.7, G2Z_AXIS_AUTO, "2", "12"},
               {0, 2.9e-4, G2Z_AXIS_AUTO, "0", "3e-4"},
               {1, 1999, G2Z_AXIS_AUTO, "1", "1000"},
               {231e3, 1848e3, G2Z_AXIS_ZERO, "0", "2.0M"},
               {-3, 4, G2Z_AXIS_AUTO, "-4", "4"},
               {65536, 65536, G2Z_AXIS_AUTO, "55k", "75k"},
               {1e-310, 5e-320, G2Z_AXIS_AUTO, "-1", "1"},
               {-1e300, INFINITY, G2Z_AXIS_LOG, "0", "1"},
               {3, 20, G2Z_AXIS_LOG, "2", "20"},
               {4.9995, 5.0005, G2Z_AXIS_LOG, "4.9994", "5.0006"},
               {-1, 1, G2Z_AXIS_LOG, "-1", "1"}};
  static const double x[] = {0, 1, 2}, one[] = {1}, low[] = {-1e30};
  static const char *const labels[] = {"one"};
  static const char tick[] = "<text class=\"end\" ";
  g2z_series series;
  memset(&series, 0, sizeof series);
  series.name = "values";
  series.x = x;
  series.count = 3;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const double y[] = {cases[i].low, cases[i].high, NAN};
    char text[32] = "";
    int ticks = 0;
    series.y = y;
    const char *at = test_page_of(t, &series, NULL, cases[i].axis);
    for (; (at = strstr(at, tick)) != NULL; at++, ticks++) {
      const double up = test_number(t, at, " y=\"");
      CHECK(t, up > 10 && up < 270);
      CHECK(t, sscanf(strchr(at, '>'), ">%31[^<]", text) == 1);
      CHECK(t, ticks || strcmp(text, cases[i].first) == 0);
    }
    FAIL_IF(t, ticks < 1 || ticks > 8 || strcmp(text, cases[i].last) != 0,
            "%g to %g: %d ticks up to %s", cases[i].low, cases[i].high, ticks, text);
  }
  series.y = series.high = one;
  series.low = low;
  series.count = 1;
  const char *bars = test_page_of(t, &series, labels, G2Z_AXIS_AUTO);
  CHECK(t, fabs(test_number(t, bars, "class=\"whisker\" d=\"M")) < 1e6);
}

/* The files of test_run_all, as a page and as events; then each of these files damaged in turn. */
static void test_run_report(g2z_test *t) {
  static const struct {
    const char *name, *text, *want;
  } foreign[] = {
      {"metrics.jsonl", "{\"step\": 1, \"loss\": }\n", "metrics.jsonl, line 1 "},
      {"metrics.jsonl", "{\"step\": 1}\n{\"loss\": 3}\n", "line 2 "},
      {"metrics.jsonl", "\x7f""ELF\n", "sed -i 1d "},
      {"training_metrics.json", "[]", "an object"},
      {"training_metrics.json", "{\"schema_version\": \"1.0\"}", "schema_version 1.0"},
      {"training_metrics.json", "{\"run_id\": 3}", "schema_version none"},
      {"training_metrics.json", "{\"schema_version\": \"2.0\"", "column 25: expected"},
      {"launcher_metadata.json", "{", "launcher_metadata.json"},
      {"RUN_FAILED.json", "{\"a\" 1}", "RUN_FAILED.json"}};
  test_run_setup s = test_run_prepare(t, "run");
  s.config.train.dtype = G2Z_FP16;
  s.config.command_line = "./train <&> \"x\"";
  test_run_well(t, &s);
  const char *text = test_read(t, "run/report.html");
  CHECK_HAS(t, text, "<title>Run run</title>", "<dd>completed</dd>",
            "<dd>./train &lt;&amp;&gt; &quot;x&quot;</dd>", "<dt>precision</dt><dd>fp16</dd>",
            "<b>Loss</b>", "<b>Learning rate</b>", "<b>Gradient norm</b>", "<b>Throughput</b>",
            "<dt>loss scale</dt><dd>65536</dd>", "<dt>skipped steps</dt><dd>0</dd>",
            "<dt>planned memory per device, GiB</dt>", ">validation</span>", "Where the time went",
            "<th>training loss", "<dt>parameters</dt><dd>", "<dt>loss of the last step</dt><dd>",
            "<dt>last perplexity</dt><dd>", "<h2>Sample</h2>\n<pre>\nsample after step ");
  CHECK(t, test_times(text, "<tr><td>") == 2); /* two epochs */
  CHECK(t, !strstr(text, "that a resume changed"));
  test_sh(t, "rm run/report.html && cp -r run kept");
  for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
    test_write_file(t, test_at(t, "run/%s", foreign[i].name), foreign[i].text,
                    strlen(foreign[i].text));
    CHECK_FORMAT(t, g2z_report_run(&t->services, s.run_dir), foreign[i].want);
    CHECK(t, test_files_count(t, "run/report.html") + test_files_count(t, "run/*.partial") == 0);
    test_sh(t, "rm -r run && cp -r kept run");
  }
  CHECK_IO(t, g2z_report_run(&t->services, t->directory), "metrics.jsonl");
  /* A run that has not ended: its lines so far, and an incomplete one. */
  test_sh(t, "printf '{\"step\": 9, \"lo' >> run/metrics.jsonl && rm run/training_metrics.json");
  CHECK_OK(t, g2z_report_run(&t->services, s.run_dir));
  CHECK_HAS(t, test_read(t, "run/report.html"),
            "<dt>result</dt><dd>not ended<small>no end recorded as of 2", "<b>Loss</b>");
  test_sh(t, "rm run/report.html");
  CHECK_NO_MEMORY(t, 8, 500, g2z_report_run(&t->services, s.run_dir),
                  test_files_count(t, "run/*.partial") == 0);
  /* The facts are of the last start. A table has the settings that each resume changed. */
  test_run_seen seen;
  s = test_run_prepare(t, "resumed");
  s.config.save_weights = NULL;
  s.config.save_every = 1;
  s.config.resume = "latest";
  s.config.train.batch = 1;
  for (int start = 0; start < 4; start++) { /* two resumes of three change something */
    s.config.max_train_steps = 1 + start;
    if (start == 1) s.config.train.batch = 2;
    if (start == 3) s.config.train.optimizer.clip = 0.5f;
    CHECK_OK(t, test_run_all(t, &s.config, &seen));
  }
  text = test_read(t, "resumed/report.html");
  CHECK_HAS(t, text, "<h2>Settings that a resume changed</h2>",
            "<tbody>\n<tr><td>batch<td>1<td>1<td>2</tr>\n",
            "<tr><td>sequences per step<td>1<td>2<td>4</tr>\n"
            "<tr><td>clip<td>3<td>1<td>0.5</tr>\n</tbody>");
}

/* A new file of a run, whose directory it makes. */
static FILE *test_report_file(g2z_test *t, const char *run, const char *name) {
  CHECK_OK(t, g2z_make_directory(&t->services, test_path(t, run)));
  FILE *file = fopen(test_at(t, "%s/%s", run, name), "wb");
  REQUIRE_OK(t, file ? G2Z_OK : G2Z_IO);
  return file;
}

/* The page of these runs, all.html. */
static g2z_status test_results(g2z_test *t, const char *const *runs, int count) {
  g2z_results *results;
  g2z_status status = g2z_results_create(&t->services, &results);
  for (int r = 0; r < count && status == G2Z_OK; r++)
    status = g2z_results_add(results, test_path(t, runs[r]));
  if (status == G2Z_OK) status = g2z_results_page(results, test_path(t, "all.html"));
  g2z_results_free(results);
  return status;
}

/* Long runs show a smoothed loss over the raw one; two runs share a chart of their losses. */
static void test_report_curves(g2z_test *t) {
  static const char *const names[] = {"one", "two"};
  for (int r = 0; r < 2; r++) {
    FILE *file = test_report_file(t, names[r], "metrics.jsonl");
    for (int i = 1; i <= 200; i++) { /* alternately 3 and 5: smoothed about 4 */
      fprintf(file, "{\"step\": %d, \"tokens\": %d, \"loss\": %d, \"skipped\": 0, "
              "\"step_ms\": 12.5, \"data_ms\": 0}\n", i, 64 * i, i % 2 ? 3 : 5);
      if (i % 50 == 0)
        fprintf(file, "{\"step\": %d, \"tokens\": %d, \"val_loss\": %d.5, \"val_ms\": 1}\n", i,
                64 * i, 9 - i / 50);
    }
    CHECK(t, fclose(file) == 0);
    file = test_report_file(t, names[r], "training_metrics.json");
    fprintf(file, "{\"schema_version\": \"2.0\", \"hardware\": {\"world_size\": 1}, "
            "\"validation\": {\"set\": \"v\"}, "
            "\"training_config\": {\"moments\": \"%s\"}, \"summary\": {\"total_wall_time_sec\": "
            "%d.14159, \"mean_tokens_per_sec_global\": 12842.8}, \"epochs\": []}",
            r ? "bf16" : "fp32", 3 + r);
    CHECK(t, fclose(file) == 0);
  }
  CHECK_OK(t, g2z_report_run(&t->services, test_path(t, "one")));
  const char *text = test_read(t, "one/report.html");
  CHECK_HAS(t, text, "<path class=\"series faint\"", ">smoothed</span>",
            "<dd>3.1416</dd>", "<dd>12843</dd>");
  const char *curve = strstr(text, "--c:var(--s1)\" d=");
  double up[2] = {0, 99};
  for (; curve && *curve != '>'; curve++)
    if (*curve == 'L') {
      up[0] = up[1];
      up[1] = atof(strchr(curve, ' '));
    }
  CHECK(t, fabs(up[1] - up[0]) < 15); /* those of the losses differ by 70 */
  CHECK_OK(t, test_results(t, names, 2));
  text = test_read(t, "all.html");
  CHECK_HAS(t, text, "<b>Loss over steps</b>", "<b>Loss over tokens</b>", "<b>Loss over time</b>",
            ">seconds of training<", "<b>Validation loss over time</b>", "<h1>Runs compared</h1>");
  CHECK(t, test_times(text, "<path class=\"series") == 6 * 2 + 3 &&
               test_times(text, "<path class=\"series dash\"") == 3);
  CHECK(t, test_times(text, ">two</span>") == 6 && !strstr(text, "<dt>experiments<"));
  /* Differing values are in the table, common ones above it. */
  CHECK_HAS(t, text, "<table><thead><tr><th>run<th>moments<th>wall s</tr></thead>",
            "<dt>tokens/s</dt><dd>12843</dd>", "settings and flags are from its last start.</p>",
            "<span>nats per token of the run&#39;s own data, smoothed</span>");
  test_sh(t, "head -n 9 two/metrics.jsonl > short && mv short two/metrics.jsonl");
  CHECK_OK(t, test_results(t, names, 2));
  CHECK_HAS(t, test_read(t, "all.html"), "own data, smoothed in runs of 100 steps or more</span>");
}

/* A text of more than 8 KiB is cut after a whole escape. */
static void test_report_cut(g2z_test *t) {
  static char large[10000], out[9000];
  for (size_t k = 0; k < 6; k++) {
    const size_t bytes = 12 + k + 1500 * strlen("\\u00e9");
    snprintf(large, sizeof large, "{\"text\": \"%.*s", (int)k + 2, "./train");
    while (strlen(large) < bytes - 2) strcat(large, "\\u00e9");
    strcat(large, "\"}");
    const g2z_object object = {&t->services, (char *)"a text", large, strlen(large)};
    g2z_object_copy(&object, "text", out, sizeof out);
    const size_t got = strlen(out);
    CHECK(t, got > 2700 && (got - k) % 2 == 0 && strcmp(out + got - 4, "\xc3\xa9\xc3\xa9") == 0);
  }
}

/* Three short runs of test_report_compared, "a", "b" and "c". */
static const struct {
  const char *flags, *typed;           /* as shown without shared ones; in the command */
  int tokens, step_ms;                 /* of each step */
  double val_loss[4];                  /* after each step; 0: no validation */
} test_compared[3] = {
    {"--lr 3e-3", "--train 'x*' --lr 3e-3", 100, 500, {0, 4, 0, 3.5}},
    {"--lr 3e-35 --optimizer muon", "--lr 3e-35 --train 'x*' --optimizer muon", 100, 800,
     {3.75, 3.25, 3, 3.125}},
    {"--lr 3e-3 --seed 2", "'--train=x*' --lr=3e-3 --seed=2", 200, 250,
     {0, 3.4375, 0, 3.4375}}};

static void test_compared_metrics(g2z_test *t) {
  static const char *const names[] = {"a", "b", "c"};
  for (int r = 0; r < 3; r++) {
    FILE *file = test_report_file(t, names[r], "metrics.jsonl");
    for (int i = 1; i <= 4; i++) {
      const double loss = test_compared[r].val_loss[i - 1];
      fprintf(file, "{\"step\": %d, \"tokens\": %d, \"loss\": 5, \"step_ms\": %d}\n", i,
              i * test_compared[r].tokens, test_compared[r].step_ms);
      if (loss > 0)
        fprintf(file, "{\"step\": %d, \"tokens\": %d, \"val_loss\": %g, \"val_ms\": 9000%s}\n",
                i, i * test_compared[r].tokens, loss, loss == 3.25 ? ", \"target\": true" : "");
    }
    CHECK(t, fclose(file) == 0);
  }
}

/* The sentences and cells of test_report_compared were computed by hand: steps, tokens and seconds
 * until each run reached the same loss. Cells: these three relative to one run; best loss; the
 * three in absolute numbers; the step of the best loss; last loss. */
#define NONE "<td>\xe2\x80\x93"
#define TEXT(set, tokens, text) "{\"set\": \"" set "\", \"tokens\": " #tokens ", \"bytes\": 100, " \
                                "\"text_hash\": \"" text "\"}"
#define ALIKE TEXT("v", 100, "e")
#define COMMON                                                                                     \
  "<p class=lead>b is the best of 3 runs: its best validation loss is 3.0000, 0.4375 lower than "  \
  "c.</p>\n<p>b reaches a&#39;s best, 3.5000, in 0.50 of the steps, 0.50 of the tokens and 0.80 "  \
  "of the seconds.</p>\n<p>c and a differ by the seed alone: their best results lie 0.0625 "       \
  "apart, from 3.4375 to 3.5000. A difference of this size between other runs can be chance.</p>"
#define ROWS "<td>1.00<td>1.00<td>1.00<td>3.5000<td>4<td>400<td>2.00<td>4<td>3.5000", \
             "<td>0.50<td>0.50<td>0.80<td>3.0000<td>2<td>200<td>1.60<td>3<td>3.1250"
static const char *const test_common[3] = {
    ROWS, "<td>0.50<td>1.00<td>0.25<td>3.4375<td>2<td>400<td>0.50<td>2<td>3.4375"};
static const char *const test_branch[3] = { /* metrics.jsonl of the last run begins at step 2 */
    ROWS, NONE NONE NONE "<td>3.4375" NONE NONE NONE "<td>2<td>3.4375"};
#define TARGET NONE NONE NONE "<td>3.5000" NONE NONE NONE "<td>4<td>3.5000", \
               "<td>1.00<td>0.50<td>3.20<td>3.0000<td>2<td>200<td>1.60<td>3<td>3.1250", \
               "<td>1.00<td>1.00<td>1.00<td>3.4375<td>2<td>400<td>0.50<td>2<td>3.4375"
static const char *const test_target[3] = {TARGET};
/* b validates first at step 2: it may have reached the target before c did. */
static const char *const test_rare[3] = {TARGET};
static const char *const test_apart[3] = { /* no common measure */
    "<td>3.5000<td>4<td>3.5000", "<td>3.0000<td>3<td>3.1250", "<td>3.4375<td>2<td>3.4375"};
/* Twice the tokens in the text of b: its loss of 3.00 is 8.6562 bits per byte. */
static const char *const test_by_bits[3] = {
    "<td>0.67<td>0.67<td>0.42<td>3.5000<td>2<td>200<td>1.00<td>4<td>3.5000",
    "<td>1.00<td>1.00<td>1.00<td>3.0000<td>3<td>300<td>2.40<td>3<td>3.1250",
    "<td>0.67<td>1.33<td>0.21<td>3.4375<td>2<td>400<td>0.50<td>2<td>3.4375"};
static const char *const test_no_curves[3] = {
    "<td>2.0000" NONE NONE, "<td>2.0000" NONE NONE, "<td>2.0000" NONE NONE};
static const struct {
  const char *targets[3];              /* target_loss of each run */
  const char *first, *about;           /* sentences: the page's first, and another */
  const char *const *cells, *line, *other; /* other: validation of b */
} test_compared_cases[] = {
    {{"null", "null", "null"}, COMMON, "at most 3.5000, the highest of the best values of complete "
     "runs. Relative figures compare with a.", test_common, ">loss 3.5000</span>", ALIKE},
    {{"null", "null", "null"}, COMMON, "<th>run<th>relative steps<th>relative tokens<th>"
     "relative seconds<th>best loss<th>steps to 3.5000<th>tokens to 3.5000<th>seconds to 3.5000<th>"
     "best step<th>last loss</tr>",
     test_common, "nats per token of the run&#39;s own data</span>", ALIKE},
    {{"null", "3.4375", "3.4375"}, "<p class=lead>b gets the best validation loss, 3.0000, "
     "0.4375 lower than c, but takes more seconds to get as low as c.</p>\n<p>b reaches the target "
     "loss, 3.4375, in 1.00 of the steps, 0.50 of the tokens and 3.20 times the seconds of c.</p>",
     "at most 3.4375, the target. Relative figures compare with c.", test_target,
     ">loss 3.4375</span>", ALIKE},
    {{"null", "3.4375", "3.4375"}, "<p class=lead>b is the best of 3 runs: its best validation "
     "loss is 3.0000, 0.4375 lower than c.</p>\n<p>b reaches the target loss, 3.4375, in 1.00 of "
     "the steps, 0.50 of the tokens and 3.20 times the seconds of c.</p>",
     "at most 3.4375, the target. Relative figures compare with c.", test_rare,
     ">loss 3.4375</span>", ALIKE},
    {{"3.25", "3.5", "null"}, COMMON, "", test_common, ">loss 3.5000</span>", ALIKE},
    {{"1", "1", "1"}, COMMON, "<p>No run reached the target loss, 1.0000.</p>", test_common,
     ">loss 3.5000</span>", ALIKE},
    {{"3.25", "3.25", "3.25"}, COMMON, "<p>Only b reached the target loss, 3.2500.</p>",
     test_common, ">loss 3.5000</span>", ALIKE},
    {{"3", "3", "3"}, "<p class=lead>c is the best of 3 runs: its best result is 4.9593 bits per "
     "byte, 3.6969 lower than b.</p>\n<p>c reaches b&#39;s best, 8.6562, in 0.67 of the steps and "
     "0.21 of the seconds.</p>\n<p>c and a differ by the seed alone: their best results lie 0.0902 "
     "apart, from 4.9593 to 5.0494 bits per byte. ",
     "at most 8.6562, the highest ", test_by_bits, ">bits per byte 8.6562</span>",
     TEXT("w", 200, "e")},
    {{"3", "3", "3"}, "<p class=lead>Losses are not compared, since the runs differ in: validation "
     "tokens. Nor are bits per byte, ", "", test_apart, "", TEXT("w", 200, "f")},
    {{"null", "null", "null"}, "<p class=lead>Losses are not compared, since it is not known which "
     "tokens ", "", test_apart, "", "null"},
    {{"null", "null", "null"}, COMMON, "began from another run&#39;s checkpoint has none",
     test_branch, ">loss 3.5000</span>", ALIKE},
    {{"null", "null", "null"}, "<p class=lead>a and b are equally good: the best validation "
     "loss of both is 2.0000.</p>\n<p>Steps, tokens and seconds are not compared, ", "",
     test_no_curves, "", ALIKE}};

static void test_report_compared(g2z_test *t) {
  static const char *const names[] = {"a", "b", "c"}, *const alike[] = {"a", "c"};
  test_compared_metrics(t);
  for (size_t i = 0; i < G2Z_COUNT(test_compared_cases); i++) {
    const int curves = test_compared_cases[i].cells != test_no_curves, first = i == 0;
    if (test_compared_cases[i].cells == test_rare) test_sh(t, "sed -i /:.3.75/d b/metrics.jsonl");
    if (test_compared_cases[i].cells == test_branch) test_sh(t, "sed -i 1d c/metrics.jsonl");
    if (!curves) test_sh(t, "rm */metrics.jsonl");
    for (int r = 0; r < 3; r++) {
      FILE *file = test_report_file(t, names[r], "training_metrics.json");
      fprintf(file, "{\"schema_version\": \"2.0\", \"hardware\": {\"world_size\": 1}, "
              "\"%s\": \"./train --seed 1 --eval %0600d --run-dir %s %s\", \"summary\": "
              "{\"total_wall_time_sec\": 3, \"best_val_loss\": 2, \"target_loss\": %s, "
              "\"target_step\": 2, \"early_stop_step\": 4}, \"validation\": %s}",
              curves || r < 2 ? "command_line" : "no_command", 1, names[r], test_compared[r].typed,
              test_compared_cases[i].targets[r], r == 1 ? test_compared_cases[i].other : ALIKE);
      CHECK(t, fclose(file) == 0);
    }
    if (first)
      CHECK_NO_MEMORY(t, 5, 500, test_results(t, names, 3), test_files_count(t, "*.partial") == 0);
    CHECK_OK(t, test_results(t, names, 3));
    const char *page = test_read(t, "all.html");
    const char *begin = strstr(page, "<h1>Runs compared</h1>\n");
    const size_t length = strlen(test_compared_cases[i].first);
    FAIL_IF(t, !begin || strncmp(begin + 23, test_compared_cases[i].first, length) != 0,
            "case %zu begins with %.400s", i, begin);
    for (int r = 0; r < 3; r++)
      CHECK_HAS(t, page, test_text("<tr><td>%s%s</tr>", names[r], test_compared_cases[i].cells[r]),
                test_compared_cases[i].about, test_compared_cases[i].line, curves || r < 2 ?
                test_text("<dt>%s</dt><dd>%s</dd>", names[r], test_compared[r].flags) : "");
    CHECK(t, test_times(page, "class=\"series dash") == 3 * (*test_compared_cases[i].line != 0));
    CHECK(t, !strstr(page, "nan"));
    CHECK(t, !strstr(page, "--seed 1") && !strstr(page, "--eval 0") && !strstr(page, "--run-dir") &&
                 !strstr(page, "--train"));
    CHECK(t, test_times(page, "<b>") == 6 * curves && test_times(page, "<h2>Curves") == curves);
    if (!first) continue;
    /* The page of one run marks the validation that reached its target. */
    CHECK_OK(t, g2z_report_run(&t->services, test_path(t, "b")));
    page = test_read(t, "b/report.html");
    CHECK_HAS(t, page, ">target</span>", "<dt>step of the target loss</dt><dd>2</dd>",
              "<dt>step of the best validation loss</dt><dd>3</dd>",
              "<dt>stopped early at step</dt><dd>4</dd>");
    test_report_cut(t);
    /* More runs than a chart has colours. */
    const char *many[G2Z_CHART_SERIES];
    for (int r = 0; r < G2Z_CHART_SERIES; r++) many[r] = names[1];
    CHECK_OK(t, test_results(t, many, G2Z_CHART_SERIES));
    page = test_read(t, "all.html");
    CHECK_HAS(t, page, "<p>The charts show the first 8 runs.</p>",
              "<p class=lead>The 9 runs have the same settings: their best results lie 0.0000 "
              "apart, from 3.0000 to 3.0000. ");
    CHECK_OK(t, test_results(t, alike, 2));
    CHECK_HAS(t, test_read(t, "all.html"), "<h1>Runs compared</h1>\n<p class=lead>c and a differ "
              "by the seed alone: their best results lie 0.0625 apart, from 3.4375 to 3.5000. ");
    CHECK(t, !strstr(test_read(t, "all.html"), "better") &&
                 !strstr(test_read(t, "all.html"), "smoothed"));
    CHECK(t, test_times(page, ">b</span>") == 6 * 8 && test_times(page, ">loss 3.0000<") == 3);
  }
#undef NONE
#undef COMMON
#undef TEXT
#undef ALIKE
#undef ROWS
#undef TARGET
}

/* Runs that are not complete are shown as such, and do not set the level at which complete ones are
 * compared. All have one validation per step; "good" and "fair" are complete. */
static void test_report_ends(g2z_test *t) {
#define END(reason) "{\"schema_version\": \"2.0\", \"validation\": {\"set\": \"v\"}, " \
                    "\"shutdown\": {\"reason\": \"" reason "}}"
  static const char *const summary = "training_metrics.json";
  const struct {
    const char *name;
    double val_loss[3];
    const char *file, *end;            /* a file of the run's end; NULL: there is none */
    const char *sentence;
  } runs[] = {
      {"good", {5, 4, 3}, summary, END("completed\""), ""},
      {"fair", {5, 4.5, 4}, summary, END("completed\""), ""},
      {"wild", {60, 70, 80}, summary, END("diverged\""),
       "<p>wild is not compared, since it diverged after 3 steps: the last losses are worse than "
       "guessing.</p>"},
      {"told", {5, 4.75, 4.5}, summary, END("signal\", \"signal\": \"SIGTERM\""),
       "<p>told is not complete: stopped, by SIGTERM. It has 3 steps.</p>"},
      {"lost", {5, 4.75, 4.25}, "RUN_FAILED.json", "{\"sentence\": \"rank 1 was killed\"}",
       "<p>lost is not compared, since it failed after 3 steps: rank 1 was killed.</p>"},
      {"torn", {5, 4.75, 4.25}, "train.log", "T  step 3/9\nT  failed: the disk is full\n",
       "<p>torn is not compared, since it failed after 3 steps: the disk is full.</p>"},
      {"live", {5, 4.25, 3.5}, NULL, NULL,
       "<p>live is not complete: not ended, no end recorded as "},
      {"nans", {4e9, 5e9, 6e9}, "train.log", "T  step 3/9\nT  diverged: 50 steps in a row\n",
       "<p>nans is not compared, since it diverged after 3 steps: 50 steps in a row.</p>"},
      {"high", {50, 60, 70}, summary, END("signal\", \"signal\": \"SIGINT\""),
       "<p>high is not compared, since its losses are worse than guessing.</p>\n<p>high is not "
       "complete: stopped, by SIGINT. It has 3 steps.</p>"},
      {"null", {NAN, NAN, NAN}, summary, END("stop requested\""),
       "<p>null is not compared, since its validation loss is not a finite number.</p>\n<p>null is "
       "not complete: stopped, on request. It has 3 steps.</p>"},
      {"soon", {0, 0, 0}, "launcher_metadata.json", "{\"command_line\": \"./train --val=v\"}",
       "<p>soon is not compared, since it has not validated yet. A lower --val-every makes it "
       "validate sooner.</p>\n<p>soon is not complete: not ended, "},
      {"late", {0, 0, 0}, summary, "{\"schema_version\": \"2.0\", \"training_config\": "
       "{\"dataset_subset_sizes\": {\"val\": 9}}, \"shutdown\": {\"reason\": \"signal\"}}",
       "<p>late is not compared, since it has not validated yet. A "},
      {"bare", {0, 0, 0}, summary, END("completed\""), "<p>bare is not compared, since it has no "
       "validation loss. To get one, add --val to train.</p>"}};
#undef END
  static const char *const two[][2] = {{"wild", "live"}, {"nans", "soon"}, {"live", "told"}};
  const char *names[G2Z_COUNT(runs)];
  for (size_t r = 0; r < G2Z_COUNT(runs); r++) {
    FILE *file = test_report_file(t, runs[r].name, "metrics.jsonl");
    names[r] = runs[r].name;
    for (int i = 1; i <= 3; i++) {
      const double loss = runs[r].val_loss[i - 1];
      fprintf(file, "{\"step\": %d, \"tokens\": %d, \"loss\": %s, \"grad_norm\": 1, \"step_ms\": "
              "1000}\n", i, 8 * i, r == 6 && i == 2 ? "null" : "5");
      if (loss != 0)
        fprintf(file, "{\"step\": %d, \"tokens\": %d, \"val_loss\": %s, \"val_ms\": 1, "
                "\"val_set\": \"v\"}\n", i, 8 * i, isnan(loss) ? "null" : test_text("%g", loss));
    }
    CHECK(t, fclose(file) == 0);
    if (!runs[r].file) continue;
    file = test_report_file(t, runs[r].name, runs[r].file);
    fputs(runs[r].end, file);
    CHECK(t, fclose(file) == 0);
  }
  CHECK_OK(t, test_results(t, names, (int)G2Z_COUNT(names)));
  const char *page = test_read(t, "all.html");
  CHECK_HAS(t, page, "<h1>Runs compared</h1>\n<p class=lead>good is the best of 4 runs: its best "
            "validation loss is 3.0000, 0.5000 lower than live.</p>\n<p>good reaches fair&#39;s "
            "best, 4.0000, in 0.67 of the steps, 0.67 of the tokens and 0.67 of the seconds.</p>",
            "<td>3<td>3.0000<td>completed</tr>", "<td>diverged</tr>", "<td>not ended</tr>",
            "<td>failed</tr>", "<td>stopped</tr>",
            "<tr><td>nans<td>\xe2\x80\x93<td>\xe2\x80\x93<td>\xe2\x80\x93<td>4e+09<td>",
            "<p>The charts leave out losses above 12.3, which are worse than guessing.</p>");
  CHECK(t, !strstr(page, ">100</text>")); /* no axis reaches wild's losses */
  for (size_t r = 0; r < G2Z_COUNT(runs); r++) CHECK_HAS(t, page, runs[r].sentence);
  CHECK_OK(t, test_results(t, two[0], 2));
  CHECK_HAS(t, test_read(t, "all.html"), "<p class=lead>Only live has a result: its best "
            "validation loss is 3.5000.</p>\n<p class=lead>wild is not compared, since it ",
            " settings and figures, equal in all runs with a training_metrics.json</summary>");
  CHECK_OK(t, test_results(t, two[1], 2));
  CHECK_HAS(t, test_read(t, "all.html"), "<p class=lead>No run has a result.</p>\n<p class=lead>"
            "nans is not compared, ", "<p class=lead>soon is not compared, ");
  test_sh(t, "sed -i 's/: \"v\"/: \"w\"/' told/training_metrics.json");
  CHECK_OK(t, test_results(t, two[2], 2));
  CHECK_HAS(t, test_read(t, "all.html"), "<p class=lead>Losses are not compared, since the runs "
            "differ in: validation tokens. Nor are bits per byte, ");
  CHECK_OK(t, test_results(t, two[2], 1));
  /* A loss that is not a number is visible, and four figures stand first. */
  CHECK_OK(t, g2z_report_run(&t->services, test_path(t, "live")));
  CHECK_HAS(t, test_read(t, "live/report.html"),
            "<h1>Run live</h1>\n<dl class=figures>\n<div><dt>best validation loss</dt>"
            "<dd>3.5000<small>perplexity 33.12, step 3</small></dd></div>\n"
            "<div><dt>tokens/s</dt><dd>0</dd></div>\n"
            "<div><dt>time</dt><dd>3.0 s<small>3 steps</small></dd></div>\n"
            "<div><dt>result</dt><dd>not ended<small>no end recorded as of ",
            "<p class=lead>The loss was not a finite number 1 time, first at step 2.</p>",
            ">not finite</span>", "l6 6m-6 0l6-6\"/>",
            "y=\"8\">3:<tspan style=\"fill:var(--s0)\"> 5</tspan>" /* under the pointer */
            "<tspan style=\"fill:var(--s1)\"> 3.5</tspan></text></g>\n</svg>");
  CHECK_OK(t, g2z_report_run(&t->services, test_path(t, "lost")));
  CHECK_HAS(t, test_read(t, "lost/report.html"), "<dd>failed<small>rank 1 was killed</small></dd>");
  CHECK(t, !strstr(test_read(t, "lost/report.html"), "not finite"));
}

/* When the validation tokens change, the best validation is the best one over the last tokens. */
static void test_report_sets(g2z_test *t) {
  static const struct {
    int step;
    double loss;
    const char *set;
  } lines[] = {{1, 2, "a"}, {2, 5, "b"}, {3, 4.5, "b"}, {4, 4.75, "b"}};
  static const char *const names[] = {"run", "run"};
  FILE *file = test_report_file(t, "run", "metrics.jsonl");
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
    fprintf(file, "{\"step\": %d, \"tokens\": 9, \"loss\": 5, \"step_ms\": 1}\n{\"step\": %d, "
            "\"val_loss\": %g, \"val_ms\": 1, \"val_set\": \"%s\"}\n", lines[i].step, lines[i].step,
            lines[i].loss, lines[i].set);
  CHECK(t, fclose(file) == 0);
  file = test_report_file(t, "run", "training_metrics.json");
  fprintf(file, "{\"schema_version\": \"2.0\", \"validation\": {\"set\": \"b\"}}");
  CHECK(t, fclose(file) == 0);
  CHECK_OK(t, g2z_report_run(&t->services, test_path(t, "run")));
  CHECK_HAS(t, test_read(t, "run/report.html"),
            "<dt>first step of these validation tokens</dt><dd>2</dd>",
            "<dt>step of the best validation loss</dt><dd>3</dd>");
  CHECK_OK(t, test_results(t, names, 2));
  CHECK_HAS(t, test_read(t, "all.html"), "at most 4.5000, the highest of the best values",
            "<td>1.00<td>\xe2\x80\x93<td>1.00<td>4.5000<td>3<td>");
}

/* Runs on one text with two vocabularies, the second on two ranks: bits per byte are what --eval
 * prints for the text, and what the page compares. With fewer validation tokens nothing is. */
static void test_report_bits(g2z_test *t) {
  static const struct { const char *name, *flags; } runs[] = {
      {"bytes", "--train t_train_*.bin --val v_train_*.bin --vocab-size 257"},
      {"bpe", "--train m_train_*.bin --val w_train_*.bin --vocab m.bpe --ranks 2"},
      {"few", "--train t_train_*.bin --val v_train_*.bin --vocab-size 257 --val-steps 1"}};
  static const char *const both[] = {"bytes", "bpe"}, *const others[] = {"bytes", "few"};
  double best[3] = {0, 0, 0};
  FILE *file = test_report_file(t, ".", "t.txt");
  for (uint32_t i = 0, state = 1; i < 900; i++, state = state * 1664525 + 1013904223)
    fprintf(file, "%s%s", state >> 31 ? "tanned " : "riddle",
            state >> 30 & 1 ? "most " : "kel\xc3\xa9 ");
  CHECK(t, fclose(file) == 0);
  TRAIN_OR_SKIP(t);
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  test_sh(t, "tail -c 1000 t.txt > v.txt; printf '#version: 0.2\n' > b.bpe");
  PREPARES(t, "", "--bytes --out . --name t --val-fraction 0 t.txt");
  PREPARES(t, "", "--bytes --out . --name v --val-fraction 0 v.txt");
  PREPARES(t, "", "--train-bpe 270 --out . --name m --val-fraction 0 t.txt");
  PREPARES(t, "", "--vocab m.bpe --out . --name w --val-fraction 0 v.txt");
  char train[1024], *absolute = realpath(test_train_program(), NULL), output[4096];
  snprintf(train, sizeof train, "cd '%s' && OMP_NUM_THREADS=1 %s --device cpu", t->directory,
           absolute);
  free(absolute);
  for (int r = 0; r < 3; r++) {
    CHECK(t, test_shell(test_text("%s --layers 1 --channels 16 --heads 2 --context 16 --batch 2 "
                                  "--sample-tokens 0 --steps 12 --val-every 4 --lr 1e-2 %s "
                                  "--run-dir %s 2>&1", train, runs[r].flags, runs[r].name),
                        output, sizeof output) == 0);
    const char *line = test_read(t, "%s/metrics.jsonl", runs[r].name), *last = line;
    while ((line = strstr(line, "\"val_bits_per_byte\"")) != NULL) last = line++;
    CHECK(t, test_shell(test_text("%s --init-from %s/weights%s --eval v.txt --run-dir none 2>&1",
                                  train, runs[r].name, r == 1 ? "" : " --vocab b.bpe"),
                        output, sizeof output) == 0);
    const char *bits = strstr(output, " bits per byte");
    if (r < 2 && bits)
      CHECK_NEAR(t, test_number(t, last, "\"val_bits_per_byte\": "), strtod(bits - 6, NULL), 2e-4);
    CHECK(t, bits != NULL);
    best[r] = test_number(t, test_read(t, "%s/training_metrics.json", runs[r].name),
                          "\"best_val_bits_per_byte\": ");
  }
  CHECK_OK(t, test_results(t, both, 2));
  const char *page = test_read(t, "all.html");
  CHECK_HAS(t, page, "since the runs differ in: vocabulary, validation tokens, validation shards. ",
            "all runs validated on the same text",
            "<th>relative seconds<th>best loss<th>best bits per byte<th>steps to ",
            test_text("<p class=lead>%s ", both[best[1] < best[0]]),
            test_text("bits per byte of at most %.4f, ", fmax(best[0], best[1])));
  CHECK_OK(t, test_results(t, others, 2));
  page = test_read(t, "all.html");
  CHECK_HAS(t, page, "since the runs differ in: validation tokens. Nor are bits per byte",
            "<td>32<td>32<td>");
  CHECK(t, !strstr(page, "<th>relative") && !strstr(page, "at most"));
}

/* A run of 2,000 epochs. If each of the page's 18,000 figures reads all of them, it takes 10 s on
 * one core; if each is read once, 0.02 s. The bound lies between, far from both. */
static void test_run_report_epochs(g2z_test *t) {
  enum { EPOCHS = 2000 };
  static const char *const names[] = {
      "tokens_processed_global", "tokens_per_sec_global", "train_loss_avg_global",
      "val_loss_avg_global", "step_time_p95_sec", "epoch_wall_time_sec"};
  static const char *const run[] = {"run"};
  FILE *file = test_report_file(t, *run, "metrics.jsonl");
  for (int i = 1; i <= 3 * EPOCHS; i++)
    fprintf(file, "{\"step\": %d, \"loss\": 2.5, \"step_ms\": 7}\n", i);
  CHECK(t, fclose(file) == 0);
  file = test_report_file(t, *run, "training_metrics.json");
  fprintf(file, "{\"schema_version\": \"2.0\", \"run_id\": \"x\", "
          "\"hardware\": {\"world_size\": 1}, \"summary\": {\"total_wall_time_sec\": 9}, "
          "\"shutdown\": {\"reason\": \"completed\"}, \"epochs\":");
  for (int i = 0; i < EPOCHS; i++) {
    fprintf(file, "%c{\"epoch_idx\": %d, \"steps\": 3, \"step_time_p50_sec\": %d", i ? ',' : '[', i,
            7 + i);
    for (int k = 0; k < 6; k++) fprintf(file, ", \"%s\": %d", names[k], 1000000 + i);
    fprintf(file, "}");
  }
  fprintf(file, "]}\n");
  CHECK(t, fclose(file) == 0);
  double begin = g2z_seconds();
  CHECK_OK(t, g2z_report_run(&t->services, test_path(t, *run)));
  CHECK_OK(t, test_results(t, run, 1));
  CHECK_SOON(t, begin, 2);
  CHECK_HAS(t, test_read(t, "all.html"), "<dd>2006000.00</dd>"); /* p50 of the last epoch, in ms */
  const char *text = test_read(t, "run/report.html");
  CHECK(t, test_times(text, "<tr><td>") == EPOCHS);
  CHECK_HAS(t, text, "<tr><td>1999<td>3<td>1001999<td>",
            "<dd>completed</dd>"); /* the steps add up to the lines */
}

static uint64_t test_event_varint(const unsigned char **at) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    value |= (uint64_t)(**at & 127) << shift;
    if (!(*(*at)++ & 128)) return value;
  }
}

typedef struct test_events {
  int events, values, starts;          /* starts: SessionLog events */
  int64_t start;                       /* step of the last of them */
  int64_t first, last;                 /* steps of events with values */
  double loss[64], val_loss;           /* train/loss by step */
  char tags[8192];                     /* of --eval, one per line */
  char points[32768];                  /* "STEP TAG VALUE", one per line */
} test_events;

/* Fields of one message. Nested messages are read in the same way: field numbers distinguish
 * them. */
static void test_event_fields(g2z_test *t, const unsigned char *at, const unsigned char *end,
                              int depth, test_events *seen, int64_t *step, char tag[1024]) {
  while (at < end) {
    uint64_t key = test_event_varint(&at);
    int field = (int)(key >> 3), type = (int)(key & 7);
    if (type == 0) {
      uint64_t value = test_event_varint(&at);
      if (depth == 0 && field == 2) *step = (int64_t)value;
      if (depth == 1 && field == 1 && value == 1) {
        seen->starts++;
        seen->start = *step;
      }
    } else if (type == 1) at += 8;
    else if (type == 5) {
      float value;
      memcpy(&value, at, sizeof value);
      at += 4;
      CHECK(t, depth == 2 && field == 2 && *step >= 0 && *step < 64);
      const size_t used = strlen(seen->points);
      snprintf(seen->points + used, sizeof seen->points - used, "%d %s %.7g\n", (int)*step, tag,
               (double)value);
      if (strcmp(tag, "train/loss") == 0) seen->loss[*step] = (double)value;
      if (strcmp(tag, "val/loss") == 0) seen->val_loss = (double)value;
      if (!seen->values++) seen->first = *step;
      seen->last = *step;
    } else {
      size_t length = (size_t)test_event_varint(&at);
      CHECK(t, type == 2 && length <= (size_t)(end - at));
      if (depth == 0 && field == 3) CHECK(t, length == 13 && !memcmp(at, "brain.Event:2", 13));
      else if (depth < 2) test_event_fields(t, at, at + length, depth + 1, seen, step, tag);
      else snprintf(tag, 1024, "%.*s", (int)length, (const char *)at);
      if (depth == 2 && strncmp(tag, "eval/", 5) == 0) strcat(strcat(seen->tags, tag), "\n");
      at += length;
    }
  }
  CHECK(t, at == end);
}

/* TensorFlow's masked CRC-32C. */
static uint32_t test_event_sum(const void *bytes, size_t count) {
  const uint32_t sum = test_crc_bits((const unsigned char *)bytes, count);
  return (sum >> 15 | sum << 17) + 0xa282ead8u;
}

/* The index-th event file of a run, frame by frame. */
static void test_events_read(g2z_test *t, const char *run_dir, size_t index, test_events *seen) {
  char tag[1024] = "";
  size_t bytes = 0, at = 0;
  glob_t found;
  memset(seen, 0, sizeof *seen);
  memset(&found, 0, sizeof found);
  const int none = glob(test_text("%s/events.out.tfevents.*", run_dir), 0, NULL, &found) != 0;
  REQUIRE_OK(t, none || found.gl_pathc <= index ? G2Z_IO : G2Z_OK);
  const char *text = test_file(t, found.gl_pathv[index], &bytes);
  globfree(&found);
  while (at + 16 <= bytes) {
    uint64_t length;
    uint32_t sums[2];
    int64_t step = 0;
    memcpy(&length, text + at, 8);
    memcpy(&sums[0], text + at + 8, 4);
    CHECK(t, length <= bytes - at - 16);
    if (length > bytes - at - 16) break;
    memcpy(&sums[1], text + at + 12 + length, 4);
    CHECK(t, sums[0] == test_event_sum(text + at, 8));
    CHECK(t, sums[1] == test_event_sum(text + at + 12, (size_t)length));
    const unsigned char *data = (const unsigned char *)text + at + 12;
    test_event_fields(t, data, data + length, 0, seen, &step, tag);
    seen->events++;
    at += 16 + (size_t)length;
  }
  CHECK(t, at == bytes && bytes > 0);
}

/* The number of points of a tag at a step that TensorBoard shows for two files: START of the second
 * drops points of the first. */
static int test_event_points(const test_events *one, const test_events *two, int step,
                             const char *tag) {
  const char *point = test_text("\n%d %s ", step, tag);
  return (step < two->start ? test_times(test_text("\n%s", one->points), point) : 0) +
         test_times(test_text("\n%s", two->points), point);
}

static void test_run_events(g2z_test *t) {
  test_events one, two;
  test_run_setup s = test_run_prepare(t, "run");
  test_write_file(t, test_path(t, "e.txt"), "a text of few bytes", 19);
  s.config.eval.count = 1;
  s.config.eval.text[0] = test_at(t, "e.txt");
  s.config.save_weights = NULL;
  s.config.save_every = 3;
  s.config.max_train_steps = 3;
  s.config.resume = "latest";
  test_run_seen seen = test_run_well(t, &s);
  test_events_read(t, s.run_dir, 0, &one);
  CHECK(t, one.first == 1 && one.last == 3 && one.starts == 1 && one.events == 2 + 3 + 2);
  CHECK_NEAR(t, one.loss[3], seen.last_loss, 1e-7);
  CHECK_NEAR(t, one.val_loss, seen.val_loss, 1e-6);
  test_sh(t, "mv run/events.* run/events.out.tfevents.9000000000.x"); /* a clock that is set back */
  s.config.max_train_steps = 0;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  test_events_read(t, s.run_dir, 1, &two);
  CHECK(t, two.first == 3 && two.last == 8 && two.starts == 1); /* step 3 is validated again */
  CHECK_NEAR(t, two.loss[8], seen.last_loss, 1e-7);
  CHECK(t, test_files_count(t, "run/events.out.tfevents.") == 2);
  /* TensorBoard shows as many points as metrics.jsonl has lines. */
  static const char *const curves[][2] = {
      {"train/loss", "loss"}, {"val/loss", "val_loss"}, {"eval/e.txt", "eval_loss"}};
  const char *lines = test_read(t, "run/metrics.jsonl");
  for (int step = 1; step <= 8; step++)
    for (size_t i = 0; i < sizeof curves / sizeof *curves; i++) {
      int want = 0;
      const char *begin = test_text("{\"step\": %d,", step);
      for (const char *at = lines; (at = strstr(at, begin)) != NULL; at++)
        want += (size_t)(strstr(at, test_text("\"%s\": ", curves[i][1])) - at) < strcspn(at, "\n");
      const int got = test_event_points(&one, &two, step, curves[i][0]);
      FAIL_IF(t, got != want, "step %d has %d points of %s, expected %d", step, got, curves[i][0],
              want);
    }
  s = test_run_prepare(t, "without");
  s.config.tensorboard = 0;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, test_files_count(t, "without/events") == 0);
}

/* What is not finite is marked; what is not known has no point. A damaged line of metrics.jsonl has
 * no points either. */
static void test_event_values(g2z_test *t) {
  static const struct { const char *line, *points; } cases[] = {
      {"{\"step\": 4, \"tokens\": 9, \"loss\": 2.5, \"val_loss\": 7", ""},
      {"{\"step\": 4, \"tokens\": 9, \"val_loss\": 3, \"val_ms\": 1}", "4 val/loss 3\n"},
      {"{\"step\": 5, \"tokens\": 10, \"loss\": null, \"lr\": 0.5, \"grad_norm\": null, "
       "\"loss_scale\": 1, \"skipped\": 1, \"step_ms\": 4, \"tok_s\": 8, \"mfu\": null, "
       "\"exposed_comm_ms\": null, \"data_ms\": 0, \"mem_gib\": 2}",
       "5 train/tokens 10\n5 train/loss nan\n5 train/lr 0.5\n5 train/grad_norm nan\n"
       "5 train/loss_scale 1\n5 train/skipped 1\n5 train/step_ms 4\n5 train/tok_s 8\n"
       "5 train/data_ms 0\n5 train/mem_gib 2\n"},
      {"{\"step\": 5, \"val_loss\": null, \"val_ms\": 1}", "5 val/loss nan\n"},
      {"{\"step\": 5, \"eval\": 0, \"eval_loss\": null, \"eval_file\": \"a\"}", "5 eval/a nan\n"},
      {"{\"step\": 5, \"save_ms\": 3}", ""}};
  char want[2048] = "";
  test_events seen;
  g2z_events *events;
  FILE *file = test_report_file(t, "run", "metrics.jsonl");
  fprintf(file, "{\"step\": 3, \"val_loss\": 9, \"val_ms\": 1}\n%s\n%s\n", cases[0].line,
          cases[1].line);
  CHECK(t, fclose(file) == 0);
  CHECK_OK(t, g2z_events_create(&t->services, test_path(t, "run"), 4, &events));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    strcat(want, cases[i].points);
    if (i > 1) CHECK_OK(t, g2z_events_put(events, cases[i].line));
  }
  CHECK_FORMAT(t, g2z_events_put(events, cases[0].line), "metrics.jsonl");
  g2z_events_free(events);
  test_events_read(t, test_path(t, "run"), 0, &seen);
  CHECK(t, seen.start == 4);
  for (char *minus; (minus = strstr(seen.points, "-nan")) != NULL;) /* C may print a NaN's sign */
    memmove(minus, minus + 1, strlen(minus));
  FAIL_IF(t, strcmp(seen.points, want) != 0, "%s, expected %s", seen.points, want);
}

/* Names of any length and any bytes of files that are scored: the run ends well, and the file holds
 * each whole tag. */
static void test_run_event_tags(g2z_test *t) {
  enum { NAMES = 7 };
  static const char marks[] = "a\tb\nc\"d\\e<b>f";
  static const int lengths[NAMES] = {58, 59, 121, 122, 240, 240, sizeof marks - 1};
  char name[256], want[NAMES][800], quoted[2400] = "";
  test_events seen;
  TRAIN_OR_SKIP(t);
  for (int i = 0; i < NAMES; i++) {
    memset(name, 'n', sizeof name);
    if (i == 4) memset(name, 0xff, sizeof name); /* no UTF-8 */
    if (i == 5) memset(name, 1, sizeof name);
    if (i == 6) memcpy(name, marks, sizeof marks);
    name[lengths[i]] = 0;
    snprintf(want[i], sizeof want[i], "eval/%s", name);
    for (int k = 0; i > 3 && i < 6 && k < lengths[i]; k++)
      memcpy(want[i] + 5 + 3 * k, "\xef\xbf\xbd", 4);
    test_write_file(t, test_path(t, name), "a text of few bytes", 19);
    snprintf(quoted + strlen(quoted), sizeof quoted - strlen(quoted), " '%s'", test_path(t, name));
  }
  test_trains(t, 0, "%s --batch 1 --steps 1 --sample-tokens 0 --run-dir %s --eval%s", test_tiny(t),
              test_at(t, "names"), quoted);
  test_events_read(t, test_at(t, "names"), 0, &seen);
  for (int i = 0; i < NAMES; i++) /* names 4 and 5 are alike */
    CHECK(t, test_times(seen.tags, test_text("%s\n", want[i])) == (i == 4 || i == 5 ? 2 : 1));
  CHECK_HAS(t, test_read(t, "names/metrics.jsonl"), "\"a\\tb\\nc\\\"d\\\\e<b>f\"}\n");
  CHECK_HAS(t, test_read(t, "names/report.html"), "<dd>completed</dd>", "e&lt;b&gt;f");
}

/* Nested spans, more of them than a GPU has events for at a time. */
static void test_spans_on(g2z_test *t, g2z_device_kind kind) {
  enum { TURNS = 1500 };
  const size_t bytes = (size_t)1 << 20;
  g2z_device *device = NULL;
  g2z_span_times times[G2Z_SPAN_COUNT];
  void *memory = NULL;
  CHECK_OK(t, g2z_device_create(&t->services, kind, G2Z_FP32, G2Z_FP32, &device));
  if (!device) return;
  CHECK_OK(t, device->ops->allocate(device, bytes, &memory));
  for (int timed = 0; timed < 2; timed++) {
    for (int i = 0; i < TURNS; i++) {
      device->ops->span_begin(device, G2Z_SPAN_BACKWARD);
      CHECK_OK(t, device->ops->zero(device, memory, bytes));
      device->ops->span_begin(device, G2Z_SPAN_NORM);
      CHECK_OK(t, device->ops->zero(device, memory, bytes));
      device->ops->span_end(device, G2Z_SPAN_NORM);
      device->ops->span_end(device, G2Z_SPAN_BACKWARD);
    }
    CHECK_OK(t, g2z_device_span_times(device, times));
    CHECK(t, times[G2Z_SPAN_BACKWARD].count == (timed ? TURNS : 0));
    if (!timed) CHECK_OK(t, g2z_device_time_spans(device));
  }
  const g2z_span_times *outer = &times[G2Z_SPAN_BACKWARD], *inner = &times[G2Z_SPAN_NORM];
  CHECK(t, inner->count == TURNS && inner->total_s > 0 && inner->total_s < outer->total_s);
  CHECK(t, outer->min_s > 0 && outer->max_s >= outer->total_s / TURNS);
  CHECK(t, outer->min_s <= outer->total_s / TURNS && outer->total_s < 60);
  CHECK(t, times[G2Z_SPAN_FORWARD].count == 0);
  device->ops->release(device, memory);
  g2z_device_free(device);
}

static void test_spans(g2z_test *t) { test_spans_on(t, G2Z_DEVICE_CPU); }

static void test_cuda_spans(g2z_test *t) { test_spans_on(t, G2Z_DEVICE_CUDA); }

static const char test_stats_text[] =
    "Processing [a.sqlite] with [reports/nvtx_sum.py]...\n\n"
    " ** NVTX Range Summary (nvtx_sum):\n\n"
    " Time (%)   Total Time (ns)    Instances     Avg (ns)    Style            Range          \n"
    " --------  ------------------  ---------  --------------  -------  ----------------------\n"
    "     53.9  27,65,96,75,62,725     14,244  19,41,84,748.9  PushPop  :train/backward       \n"
    "     40.8      20933596900890     14,244  14,69,64,314.1  PushPop  NCCL:ncclAllGather  two\n"
    "      3.1         1,000,000.5          1       1,000,000  PushPop  :zero/all_gather\n\n"
    "Processing [a.sqlite] with [reports/osrt_sum.py]...\n\n"
    " ** OS Runtime Summary (osrt_sum):\r\n\r\n"
    " Time (%)  Total Time (ms)  Num Calls  Name\r\n"
    " --------  ---------------  ---------  ----\r\n"
    "     21.9         914.5806   3,46,812  poll\r\n"
    "      100               12          2  read\r\n\r\n"
    " ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):\n\n"
    " Time (%)  whatever\n ---\n x\n";

static void test_profile(g2z_test *t) {
  static const char *const damaged[][2] = {
      {"", "no NVTX Range Summary and no OS Runtime Summary"},
      {"<html>\n", "no NVTX"},
      {" ** NVTX Range Summary (nvtx_sum):\n\n", "has no rows"},
      {" ** NVTX Range Summary (x):\n Time\n", "no \"Total Time (ns)\""},
      {" ** NVTX Range Summary (x):\n a Total Time (ns\n", "no \"Total Time (ns)\""},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n --- ---\n", "fewer than three columns"},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n -- -- --\n x 3  b\n", "line 4: the"},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n -- -- --\n 101 3b\n", "line 4: the"},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n -- -- --\n 1  3\n", "line 4: the"},
      {" ** NVTX Range Summary (x):\n ** OS Runtime Summary (x):\n", "line 2: the table "}};
  const char *stats = test_at(t, "profiles/nsys_stats_node-1.txt");
  CHECK_IO(t, g2z_profile_run(&t->services, t->directory), "no nsys_stats_*.txt");
  CHECK_OK(t, g2z_make_directory(&t->services, test_path(t, "profiles")));
  for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
    test_write_file(t, stats, damaged[i][0], strlen(damaged[i][0]));
    CHECK_FORMAT(t, g2z_profile_run(&t->services, t->directory), damaged[i][1]);
    CHECK(t, test_files_count(t, "profiles/profile_summary") == 0);
  }
  test_write_file(t, stats, test_stats_text, sizeof test_stats_text - 1);
  test_write_file(t, test_path(t, "training_metrics.json"), "{", 1);
  CHECK_FORMAT(t, g2z_profile_run(&t->services, t->directory), "training_metrics.json");
  static const char metrics[] =
      "{\"schema_version\": \"2.0\", \"hardware\": {\"gpu_name\": \"H200\", \"world_size\": 8}, "
      "\"scheduler\": {\"job_id\": \"4711\"}}";
  test_write_file(t, test_path(t, "training_metrics.json"), metrics, sizeof metrics - 1);
  test_write_file(t, test_path(t, "profiles/nsys_4711_node-1.nsys-rep"), "x", 1);
  CHECK_OK(t, g2z_profile_run(&t->services, t->directory));
  const char *text = test_read(t, "profiles/profile_summary.json");
  static const char *const want[] = { /* in this order */
      "\"slurm_job_id\": \"4711\"", "\"hosts\": [", "\"node-1\"", "\"gpu\": \"H200\"",
      "\"nsys_report\": \"nsys_4711_node-1.nsys-rep\"", "\"nsys_stats_node-1.txt\"",
      "\"nvtx_top5\": [", "\"nvtx\"", "\":train/backward\"", "\"2765967562725 ns\"",
      "\"NCCL:ncclAllGather  two\"", "\"1000000.5 ns\"",
      "\"      3.1         1,000,000.5          1       1,000,000  PushPop  :zero/all_gather\"",
      "\"osrt_top5\": [", "\"read\"", "\"osrt\"", "\"914.5806 ms\""};
  const char *at = text;
  for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
    const char *found = at ? strstr(at, want[i]) : NULL;
    FAIL_IF(t, !found, "no %s at its place in %s", want[i], text);
    at = found;
  }
  static const char *const schema[] = {
      "\" generated_at_utc", "\" run_dir", "\" slurm_job_id", "[ hosts", "0 world_size", "\" gpu",
      "n cuda", "n seq_length", "n micro_batch_size_per_gpu", "n grad_accum_steps",
      "n tokens_per_sec", "n total_wall_time_sec", "\" nsys_report", "[ inputs",
      "0 nvtx_top5.0.time_percent", "0 osrt_top5.0.time_percent"};
  test_run_schema(t, text, strlen(text), schema, sizeof schema / sizeof *schema);
  CHECK(t, !test_json_kind(t, text, strlen(text), "nvtx_top5.3") &&
               !test_json_kind(t, text, strlen(text), "osrt_top5.2"));
  test_sh(t, "rm profiles/profile_summary.json");
  CHECK_NO_MEMORY(t, 5, 500, g2z_profile_run(&t->services, t->directory),
                  test_files_count(t, "profiles/*.partial") == 0);
}

/* train --profile, and its summary made again from the remaining files. */
static void test_run_profile(g2z_test *t) {
#define EARLIER "nsys_stats_a.txt timers_.txt nsys_7_a.nsys-rep"
  test_run_seen seen;
  test_run_setup s = test_run_prepare(t, "run");
  s.config.profile = 1;
  s.config.train.graph = 1;
  CHECK_BAD(t, test_run_all(t, &s.config, &seen), "profile needs --graph off");
  s.config.train.graph = 2;
  s.config.run_dir = NULL;
  CHECK_BAD(t, test_run_all(t, &s.config, &seen), "profile needs a run_dir");
  s.config.run_dir = s.run_dir;
  /* Files that an earlier run left do not count; damaged ones do no harm. */
  test_sh(t, "mkdir -p run/profiles && cd run/profiles && echo x | tee " EARLIER " > ../../out");
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, test_files_count(t, "run/RUN_COMPLETE.txt") == 1);
  const char *text = test_read(t, "run/profiles/profile_summary.json");
  static const char *const schema[] = {
      "0 world_size", "n nsys_report", "\" hosts.0", "\" inputs.0", "0 seq_length",
      "0 tokens_per_sec", "0 total_wall_time_sec", "\" nvtx_top5.4.name", "[ osrt_top5"};
  test_run_schema(t, text, strlen(text), schema, sizeof schema / sizeof *schema);
  CHECK_HAS(t, text, "\":train/forward\"", "\":train/backward\"", "\":train/optimizer_step\"",
            "\"timers_");
  CHECK(t, !test_json_kind(t, text, strlen(text), "osrt_top5.0"));
  test_sh(t, "awk '{ count[$NF] = $3 } END { exit count[\":train/optimizer_step\"] != "
             "count[\":optimizer/decide\"] }' run/profiles/timers_*.txt"); /* once per step each */
  CHECK(t, !test_json_kind(t, text, strlen(text), "inputs.1"));
  test_sh(t, "rm run/profiles/profile_summary.json");
  CHECK_FORMAT(t, g2z_profile_run(&t->services, s.run_dir), "nsys_stats_a.txt, line 1");
  test_sh(t, "cd run/profiles && rm " EARLIER);
#undef EARLIER
  CHECK_OK(t, g2z_profile_run(&t->services, s.run_dir));
  CHECK(t, test_there(t, "run/profiles/profile_summary.json"));
  /* bench profile ends with a command that shows the summary. */
  if (access(test_bench_program(), X_OK) != 0) return;
  test_sh(t, "mv run 'a b'");
  CHECK(t, system(test_text("'%s' profile '%s' | sed 's/.*time: //' | sh | grep -q nvtx_top5",
                            test_bench_program(), test_at(t, "a b"))) == 0);
}

static void test_profile_script(g2z_test *t) {
  static const char nsys[] =
      "#!/bin/sh\ncase $1 in\n"
      "profile) while [ \"$1\" != --output ]; do shift; done; echo x > \"$2.nsys-rep\"; shift 2; "
      "\"$@\";;\n"
      "stats) [ -e \"$5\" ] && echo ' ** NVTX Range Summary (x):';;\nesac\n";
#define RUN "env -u SLURM_LOCALID SLURM_JOB_ID=7 PATH=\"$D/bin:$PATH\" bash slurm/profile.sh "
  static const test_line lines[] = {
      {"mkdir -p $D/run/profiles && echo mine > $D/mine && "
       "ln -s $D/mine $D/run/profiles/nsys_stats_$(uname -n).txt.partial", 0, {""}},
      {RUN "$D/run sh -c 'echo ran; exit 75'", 75, {"ran"}},
      {"cat $D/mine", 0, {"mine\n"}},
      {"cd $D/run/profiles && ls nsys_7_*.nsys-rep nsys_stats_*.txt", 0, {""}},
      /* Slurm signals all processes; the program saves, and the measurements so far are kept. */
      {"rm -r $D/run; " RUN "$D/run sh -c 'kill -USR1 $PPID $(cut -d\" \" -f4 /proc/$PPID/stat); "
       "sleep 0.2; exit 75'", 75, {""}},
      {"ls $D/run/profiles/nsys_stats_*.txt && rm -r $D/run", 0, {""}},
      {"export SLURM_LOCALID=1; SLURM_JOB_ID=7 PATH=$D/bin:$PATH bash slurm/profile.sh $D/run echo "
       "ran", 0, {"ran\n"}},
      {"ls $D/run", 2, {""}}, /* only the host's first task profiles */
      {RUN "$D/run", 1, {"slurm/profile.sh RUN_DIR"}},
      {"PATH=/usr/bin:/bin command -v nsys && echo \"ran --profile\" || PATH=/usr/bin:/bin bash "
       "slurm/profile.sh $D/run echo ran", 0, {"ran --profile\n"}}};
#undef RUN
  FILE_OR_SKIP(t, "slurm/profile.sh", "bash --version");
  CHECK_OK(t, g2z_make_directory(&t->services, test_path(t, "bin")));
  test_write_file(t, test_path(t, "bin/nsys"), nsys, sizeof nsys - 1);
  CHECK(t, chmod(test_path(t, "bin/nsys"), 0755) == 0);
  TEST_LINES(t, lines);
}
