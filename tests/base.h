/* Tests of the rooms that everything uses: files, JSON, config, learning rates, random numbers. */

/* The call fails with this status, and its sentence contains `part`. */
#define CHECK_IO(t, call, part) CHECK_STATUS(t, call, G2Z_IO, &(t)->services, part)
#define CHECK_FORMAT(t, call, part) CHECK_STATUS(t, call, G2Z_FORMAT, &(t)->services, part)
#define CHECK_BAD(t, call, part) CHECK_STATUS(t, call, G2Z_BAD_ARGUMENT, &(t)->services, part)

/* ----- files ------------------------------------------------------------- */

/* The file holds these bytes, and the test's directory holds this many entries. */
static void test_files_hold(g2z_test *t, const char *path, const void *bytes, size_t count,
                            int entries) {
  CHECK(t, test_files_equal(t, path, bytes, count));
  CHECK(t, test_files_count(t, "") == entries);
}

static void test_files_writer(g2z_test *t) {
  /* Writes of sizes around the buffer's, and texts, compared with the same bytes in memory. */
  enum { BYTES = 400000 };
  static const size_t sizes[] = {1, 0, 7, 65535, 65536, 65537, 3000, 130000};
  char *want = (char *)test_memory(t, BYTES + 1);
  const char *path = test_at(t, "file.bin");
  uint32_t random = 1;
  g2z_writer *writer;
  for (int i = 0; i < BYTES; i++) want[i] = (char)('a' + test_bpe_random(&random) % 26);
  CHECK_OK(t, g2z_writer_create(&t->services, path, &writer));
  for (size_t turn = 0, at = 0, n; at < BYTES; turn++, at += n) {
    n = sizes[turn % 8] < BYTES - at ? sizes[turn % 8] : BYTES - at;
    if (turn % 3) CHECK_OK(t, g2z_writer_put(writer, want + at, n));
    else CHECK_OK(t, g2z_writer_printf(writer, "%.*s", (int)n, want + at));
  }
  CHECK(t, access(path, F_OK) != 0);             /* the name appears only with the commit */
  CHECK(t, test_files_count(t, "file.bin.partial") == 1);
  CHECK_OK(t, g2z_writer_commit(writer));
  g2z_writer_free(writer);
  test_files_hold(t, path, want, BYTES, 1);

  /* Freed without a commit, the writer leaves the old file. */
  CHECK_OK(t, g2z_writer_create(&t->services, path, &writer));
  CHECK_OK(t, g2z_writer_put(writer, "new", 3));
  g2z_writer_free(writer);
  test_files_hold(t, path, want, BYTES, 1);

  /* A write after a commit appends; the next commit puts it on the disk. */
  CHECK_OK(t, g2z_writer_create(&t->services, path, &writer));
  CHECK_OK(t, g2z_writer_put(writer, "one", 3));
  CHECK_OK(t, g2z_writer_commit(writer));
  test_files_hold(t, path, "one", 3, 1);
  CHECK_OK(t, g2z_writer_put(writer, "two", 3));
  CHECK_OK(t, g2z_writer_flush(writer));
  test_files_hold(t, path, "onetwo", 6, 1);
  CHECK_OK(t, g2z_writer_put(writer, "!", 1));
  CHECK_OK(t, g2z_writer_commit(writer));
  g2z_writer_free(writer);
  test_files_hold(t, path, "onetwo!", 7, 1);
  g2z_writer_free(NULL);
}

/* A call on a path, in which "$" is the test's directory, fails and leaves its output empty. */
static void test_files_refuse(g2z_test *t, char call, const char *name, const char *sentence) {
  g2z_services *s = &t->services;
  g2z_writer *writer = NULL;
  g2z_events *events = NULL;
  g2z_model_config model;
  char path[512], *text = NULL;
  size_t bytes = 0;
  snprintf(path, sizeof path, "%s%s", *name == '$' ? t->directory : "", name + (*name == '$'));
  g2z_status status = call == 'w'   ? g2z_writer_create(s, path, &writer)
                      : call == 'r' ? g2z_read_file(s, path, 10, &text, &bytes)
                      : call == 'd' ? g2z_make_directory(s, path)
                      : call == 'c' ? g2z_weights_config(s, path, &model)
                      : call == 'R' ? g2z_report_run(s, path)
                      : call == 'P' ? g2z_profile_run(s, path)
                                    : g2z_events_create(s, path, 1, &events);
  CHECK_IO(t, status, sentence);
  CHECK(t, !writer && !events && !text && !bytes);
}

static void test_files_refused(g2z_test *t) {
  static const char unnamed[] = "cannot open the directory \"\": No such file";
  static const struct { char call; const char *path, *sentence; } cases[] = {
      {'w', "$/none/x", "none/x: No such file or directory; check the name"},
      {'w', "$/n\033[2J\n/\xc2\x9b" "2J\xc3\x9b", "n?[2J?/??2J\xc3\x9b: No such"},
      {'w', "", "No such file"},
      {'w', "$", "it is a directory; name a file"},
      {'w', "/dev/null", "not a regular file"},
      {'r', "$/none", "No such file"},
      {'r', "$", "Is a directory; name a file"},
      {'d', "$/a/file/x", "a file stands where a directory is needed"},
      {'d', "", "\"\""},
      {'c', "", unnamed}, {'R', "", unnamed}, {'P', "", unnamed}, {'E', "", unnamed}};
  g2z_services *services = &t->services;
  char *text;
  const char *file = test_at(t, "a/file");
  size_t bytes;
  for (int again = 0; again < 2; again++) /* the second time it exists */
    CHECK_OK(t, g2z_make_directory(services, test_path(t, "a/b//c/")));
  CHECK_OK(t, g2z_make_directory(services, "/"));
  CHECK(t, test_files_count(t, "a/b/c") == 1);
  test_write_file(t, file, "12345", 5);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    test_files_refuse(t, cases[i].call, cases[i].path, cases[i].sentence);

  CHECK_OK(t, g2z_read_file(services, file, 5, &text, &bytes));
  CHECK(t, bytes == 5 && strcmp(text, "12345") == 0);
  g2z_release(services, text);
  CHECK_FORMAT(t, g2z_read_file(services, file, 4, &text, &bytes), "more than 4 bytes");
  test_write_file(t, file, "", 0);
  CHECK_OK(t, g2z_read_file(services, file, 0, &text, &bytes));
  CHECK(t, bytes == 0 && text[0] == 0);
  g2z_release(services, text);

  test_warnings_begin(t); /* a log cannot clear the screen either */
  g2z_log(services, G2Z_LOG_WARNING, "%s", "n\033[2J\xc2\x9b" "2J\xc2\xa0");
  CHECK(t, strcmp(test_warnings_end(t), "n?[2J??2J\xc2\xa0\n") == 0);
}

/* A FIFO in place of a file must not make the call wait, and a link must not lead to a file that
 * the user did not name. */
static void test_files_special(g2z_test *t) {
  const char *path = test_at(t, "file"), *partial = test_at(t, "file.partial");
  test_write_file(t, test_path(t, "target"), "target", 6);
  alarm((unsigned)(20 * test_busy())); /* kills the tests if a call waits */
  CHECK(t, mkfifo(path, 0600) == 0 && symlink("file", test_path(t, "link")) == 0);
  test_files_refuse(t, 'r', path, "file: it is a FIFO; name a file");
  test_files_refuse(t, 'r', "$/link", "link: it is a FIFO");
  test_files_refuse(t, 'r', "/dev/zero", "not a regular file");
  test_files_refuse(t, 'w', path, "it is a FIFO");
  CHECK(t, unlink(path) == 0 && mkfifo(partial, 0600) == 0);
  int reader = open(partial, O_RDONLY | O_NONBLOCK);
  test_files_refuse(t, 'w', path, "file.partial: it is a FIFO; remove it");
  close(reader);
  test_files_refuse(t, 'w', path, "file.partial: No such device or address; it is a FIFO");
  alarm(0);
  CHECK(t, unlink(partial) == 0 && symlink("target", partial) == 0);
  test_files_refuse(t, 'w', path, "file.partial: Too many levels of symbolic links; it is a "
                                  "symbolic link: remove it");
  CHECK(t, unlink(partial) == 0 && symlink("target", path) == 0);
  test_files_refuse(t, 'w', path, "file: it is a symbolic link; name a file");
  CHECK(t, test_files_equal(t, path, "target", 6)); /* reading through a link is allowed */
  test_files_hold(t, test_path(t, "target"), "target", 6, 3); /* and file, link: no new entry */
  /* A dangling link takes a name, and an error is not reported as a free name. */
  static const struct { const char *name; int there; const char *error; } names[] = {
      {"target", 1, NULL}, {"lost", 1, NULL}, {".", 1, NULL}, {"none", 0, NULL},
      {"none/x", 0, NULL}, {"target/x", 0, NULL}, {"", 1, NULL},
      {"loop/x", 0, "whether there is"}};
  test_sh(t, "ln -s none lost; ln -s loop loop");
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    int there = -1;
    g2z_status status = g2z_is_there(&t->services, test_at(t, "%s", names[i].name), &there);
    CHECK_STATUS(t, status, names[i].error ? G2Z_IO : G2Z_OK, &t->services, names[i].error);
    CHECK(t, there == names[i].there);
  }
}

/* A pipe has no size: the reader grows its block until the end. */
static void test_files_pipe(g2z_test *t) {
  int ends[2];
  char path[64], block[60000];
  memset(block, 'x', sizeof block);
  CHECK(t, pipe(ends) == 0 && write(ends[1], block, sizeof block) == sizeof block);
  close(ends[1]);
  snprintf(path, sizeof path, "/dev/fd/%d", ends[0]);
  CHECK(t, test_files_equal(t, path, block, sizeof block));
  close(ends[0]);
}

/* A file has one writer at a time, and a locked directory one owner. A killed program leaves
 * nothing that blocks the next one. */
static void test_files_locked(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_writer *first, *second;
  int locks[2];
  const char *path = test_at(t, "file");
  test_write_file(t, test_path(t, "file.partial"), "left by a killed program", 24);
  CHECK_OK(t, g2z_writer_create(services, path, &first));
  CHECK_OK(t, g2z_writer_put(first, "first", 5));
  test_files_refuse(t, 'w', path, "another program writes");
  CHECK_OK(t, g2z_writer_commit(first));
  CHECK_OK(t, g2z_writer_create(services, path, &second)); /* it exists and is not locked */
  g2z_writer_free(first);
  CHECK(t, test_files_equal(t, path, "first", 5));
  CHECK_OK(t, g2z_writer_put(second, "second", 6));
  CHECK_OK(t, g2z_writer_commit(second));
  g2z_writer_free(second);
  test_files_hold(t, path, "second", 6, 1);

  CHECK_OK(t, g2z_lock_directory(services, t->directory, &locks[0]));
  CHECK_BAD(t, g2z_lock_directory(services, t->directory, &locks[1]), "another program uses ");
  CHECK(t, locks[1] == -1);
  close(locks[0]);
  CHECK_OK(t, g2z_lock_directory(services, t->directory, &locks[1]));
  close(locks[1]);
  CHECK_IO(t, g2z_lock_directory(services, path, &locks[1]), path);
}

static void test_files_full_disk(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_writer *writer;
  const char *path = test_at(t, "file");
  char block[10000];
  memset(block, 'x', sizeof block);
  test_write_file(t, path, "old", 3);
  struct rlimit before = test_files_limit(100000);
  CHECK_OK(t, g2z_writer_create(services, path, &writer));
  g2z_status status = G2Z_OK;
  for (int i = 0; i < 20; i++) {
    g2z_status now = g2z_writer_put(writer, block, sizeof block);
    CHECK(t, status == G2Z_OK || now == status); /* once failed, always failed */
    status = now;
  }
  CHECK(t, status == G2Z_IO);
  services->error[0] = 0;
  CHECK_IO(t, g2z_writer_printf(writer, "%d", 1), "File too large; raise");
  services->error[0] = 0;
  CHECK_IO(t, g2z_writer_commit(writer), path);
  g2z_writer_free(writer);

  /* An error that appears only when the buffer is flushed fails the commit. */
  test_files_limit(50);
  CHECK_OK(t, g2z_writer_create(services, path, &writer));
  CHECK_OK(t, g2z_writer_put(writer, block, 100));
  for (int again = 0; again < 2; again++)
    CHECK_IO(t, g2z_writer_commit(writer), "File too large");
  g2z_writer_free(writer);
  test_files_unlimit(&before);
  test_files_hold(t, path, "old", 3, 1);
}

/* Root may write anywhere, so the test becomes user nobody for a while. */
static void test_files_unwritable(g2z_test *t) {
  const uid_t self = geteuid();
  CHECK(t, chmod(t->directory, 0555) == 0);
  if (self == 0 && seteuid(65534) != 0) SKIP(t, "root cannot become another user here");
  test_files_refuse(t, 'w', "$/file", "Permission denied; change its permissions or choose "
                                      "another directory");
  test_files_refuse(t, 'd', "$/a/b", "cannot create the directory");
  CHECK(t, seteuid(self) == 0 && chmod(t->directory, 0700) == 0);
  CHECK(t, test_files_count(t, "") == 0);
}

static g2z_status test_files_make(g2z_test *t) {
  char *text = NULL;
  size_t bytes;
  g2z_writer *writer = NULL;
  g2z_status status = g2z_make_directory(&t->services, test_path(t, "d/e"));
  if (status == G2Z_OK)
    status = g2z_read_file(&t->services, test_path(t, "file"), 10, &text, &bytes);
  if (status == G2Z_OK) status = g2z_writer_create(&t->services, test_path(t, "new"), &writer);
  if (status == G2Z_OK) status = g2z_writer_printf(writer, "%*d", 70000, 1);
  if (status == G2Z_OK) status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  g2z_release(&t->services, text);
  return status;
}

static void test_files_no_memory(g2z_test *t) {
  test_write_file(t, test_path(t, "file"), "text", 4);
  CHECK_NO_MEMORY(t, 2, 20, test_files_make(t), test_files_count(t, "new.partial") == 0);
}

/* ----- JSON -------------------------------------------------------------- */

/* Walks a text that has no NUL after it, so that the sanitizer sees a read beyond its end. */
static g2z_status test_json_walk(g2z_test *t, const char *text, size_t bytes) {
  char *exact = (char *)malloc(bytes ? bytes : 1);
  if (bytes) memcpy(exact, text, bytes);
  g2z_json json;
  g2z_json_open(&json, &t->services, "text", exact, bytes);
  g2z_json_skip(&json);
  g2z_status status = g2z_json_close(&json);
  free(exact);
  return status;
}

static void test_json_grammar(g2z_test *t) {
  static const char *const good[] = {
      "0", "-0", "12", "-1.5e+10", "1E5", "0.25", "true", "false", "null", "\"\"", "[]", "{}",
      " [ ] ", "[1,2]", "{\"a\":1}", "{\"a\":{\"b\":[1,{\"c\":null}]},\"d\":\"e\"}", "\t\r\n 1 \n",
      "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\uD83D\\uDE00\"", "\"\\ud800\"", "\"\x7f\xc3\xa9\"",
      "\xef\xbb\xbf{}", "{\"a\":1,\"a\":2}", "{\"\":0}",
      "NaN", "[Infinity,-Infinity]"}; /* Python's; in values that are skipped */
  static const char *const bad[] = {
      "", " ", "01", "-", "+1", ".5", "1.", "1.e5", "1e", "1e+", "0x10", "--1", "nan", "-NaN",
      "+Infinity", "NaN1", "Inf", "tru", "True", "nul", "falsee", "1 2", "[1,]", "[,1]", "[1 2]",
      "[", "]", "[1}", "{\"a\":1]",
      "{", "{a:1}", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{,}", "{\"a\" 1}", "{1:2}", "'a'", "\"",
      "\"\\\"", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"a\nb\"", "\"\x1f\"", "[1]]", "{}{}",
      "\"a\"b", "// c\n1", "\\",
      "\xef\xbb", "\xff", "[\"a\",\n\"b\"\n\"c\"]", "-a", "1e5.5", "{\"a\":1 \"b\":2}"};
  static const struct { const char *text; size_t bytes; } nuls[] = {
      {"[1\0]", 4}, {"\"\0\"", 3}, {"\"\\\0\"", 4}, {"\0", 1}};
  static const char text[] =
      "{\"k\\u00e9\":[true,false,null,-12.5e-3,\"x\\n\\ud83d\\ude00\"],\"o\":{}}";
  enum { BYTES = sizeof text - 1, ENDLESS = 1000000 };
  for (size_t i = 0; i < sizeof good / sizeof *good; i++)
    CHECK_OK(t, test_json_walk(t, good[i], strlen(good[i])));
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    if (test_json_walk(t, bad[i], strlen(bad[i])) != G2Z_FORMAT)
      test_fail(t, __FILE__, __LINE__, "accepted %s", bad[i]);
  for (int i = 0; i < 4; i++)
    CHECK(t, test_json_walk(t, nuls[i].text, nuls[i].bytes) == G2Z_FORMAT);

  /* Every prefix of a text is an error, and no changed byte crashes the reader. */
  for (size_t n = 0; n < BYTES; n++) {
    CHECK(t, test_json_walk(t, text, n) == G2Z_FORMAT);
    for (int c = 0; c < 256; c++) {
      char changed[BYTES];
      memcpy(changed, text, BYTES);
      changed[n] = (char)c;
      g2z_status status = test_json_walk(t, changed, BYTES);
      CHECK(t, status == G2Z_OK || status == G2Z_FORMAT);
    }
  }
  char *endless = (char *)test_memory(t, ENDLESS); /* a recursive reader would overflow its stack */
  for (int i = 0; i < ENDLESS; i++) endless[i] = i % 2 ? '[' : '{';
  CHECK(t, test_json_walk(t, endless, ENDLESS) == G2Z_FORMAT);
  memset(endless, '[', ENDLESS);
  CHECK(t, test_json_walk(t, endless, ENDLESS) == G2Z_FORMAT);
  memset(endless + G2Z_JSON_DEPTH, ']', G2Z_JSON_DEPTH + 1);
  CHECK_OK(t, test_json_walk(t, endless, 2 * G2Z_JSON_DEPTH));
  endless[G2Z_JSON_DEPTH] = '[';
  CHECK_FORMAT(t, test_json_walk(t, endless, 2 * G2Z_JSON_DEPTH + 2),
               "nested deeper than 64 levels");
}

static void test_json_sentences(g2z_test *t) {
  static const struct { const char *text, *sentence; } cases[] = {
      {"[1,\n  2,\n  x]", "text, line 3, column 3: expected a value, found 'x'"},
      {"{\"a\" 1}", "text, column 6: expected ':', found '1'"},
      {"[1 2]", "expected ',' or ']', found '2'"},
      {"{\"a\":1", "found the text's end: correct it, or copy it again"},
      {"[\"abc", "this string has no closing quote: add it, or copy it again"},
      {"[\"a\tc\"]", "column 4: a control character in a string"},
      {"[\"a\\qc\"]", "no such escape"},
      {"[\"\\u12x4\"]", "\\u needs four hexadecimal digits"},
      {"[01]", "not a number as JSON writes it"},
      {"[\xff]", "found byte 0xff"},
      {"1 1", "expected the end, found '1'"}};
  static const char text[] = "{\"n\": 1.5, \"m\": 2}";
  g2z_services *services = &t->services;
  g2z_json json;
  g2z_json_text key;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    CHECK_FORMAT(t, test_json_walk(t, cases[i].text, strlen(cases[i].text)), cases[i].sentence);

  /* The first error stays, and later calls are harmless. */
  g2z_json_open(&json, services, "config.json", text, sizeof text - 1);
  CHECK(t, g2z_json_enter(&json, '{') == 1);
  CHECK(t, g2z_json_next(&json, '}', &key) == 1 && g2z_json_is(&key, "n"));
  CHECK(t, g2z_json_integer(&json) == 0);
  CHECK(t, g2z_json_next(&json, '}', &key) == 0 && g2z_json_enter(&json, '[') == 0);
  CHECK(t, g2z_json_peek(&json) == 0 && g2z_json_number(&json) == 0);
  key = g2z_json_string(&json);
  CHECK(t, key.at && key.bytes == 0 && !g2z_json_is(&key, "n"));
  g2z_json_skip(&json);
  CHECK_FORMAT(t, g2z_json_fail(&json, "later"), "1.5 is not an integer");
  CHECK_FORMAT(t, g2z_json_close(&json), "config.json, column 7: 1.5 is not an integer");
  g2z_json_open(&json, services, "config.json", text, sizeof text - 1);
  CHECK(t, g2z_json_enter(&json, '[') == 0);
  CHECK_FORMAT(t, g2z_json_close(&json), "expected an array, found '{'");
  g2z_json_open(&json, services, "a", "[[[", 3);
  CHECK_FORMAT(t, g2z_json_fail(&json, "n_inner=%d", 7), "a, column 1: n_inner=7");
}

/* Checks a text that holds one number; `real` NULL: an integer. */
static g2z_status test_json_read(g2z_test *t, const char *text, int64_t *integer, double *real) {
  g2z_json json;
  g2z_json_open(&json, &t->services, "number", text, strlen(text));
  if (real) *real = g2z_json_number(&json);
  else *integer = g2z_json_integer(&json);
  return g2z_json_close(&json);
}

/* The number is read as exactly this double. */
static void test_json_double(g2z_test *t, const char *text, double want) {
  double got = 0;
  CHECK_OK(t, test_json_read(t, text, NULL, &got));
  if (memcmp(&want, &got, sizeof want) != 0)
    test_fail(t, __FILE__, __LINE__, "%s became %.17g, not %.17g", text, got, want);
}

static void test_json_numbers(g2z_test *t) {
  static const struct { const char *text; int64_t value; } integers[] = {
      {"9223372036854775807", INT64_MAX}, {"-9223372036854775808", INT64_MIN}, {"-0", 0},
      {"1024", 1024}};
  static const struct { const char *text, *sentence; } wrong[] = {
      {"9223372036854775808", "9223372036854775808 does not fit into 64 bits"},
      {"-9223372036854775809", "does not fit"}, {"1.0", "not an integer"},
      {"1e3", "not an integer"}, {"\"1\"", "expected an integer"},
      {"99999999999999999999999999999999999999999999999999", "does not fit"}};
  /* The result is strtod's: ties, subnormals, the ends of the range, and superfluous digits. */
  static const char *const doubles[] = {
      "0", "-0.0", "0.1", "1e23", "8.5e-5", "123456789012345678", "9007199254740993", "5e-324",
      "2.4703282292062327208e-324", "2.4703282292062328e-324", "2.2250738585072011e-308",
      "2.2250738585072014e-308", "1.7976931348623157e308", "4.35e-1", "0.000000000000000001e18",
      "1e-400", "1e-99999999999999999999", "0e99999999999999999999", "100000000000000000000000e-23",
      "1.00000000000000011102230246251565404236316680908203125",
      "1.00000000000000011102230246251565404236316680908203124",
      "1.000000000000000111022302462515654042363166809082031250000000000000000000000000000000001"};
  char text[5001];
  double real;
  int64_t value;
  for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
    CHECK_OK(t, test_json_read(t, integers[i].text, &value, NULL));
    CHECK(t, value == integers[i].value);
  }
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    CHECK_FORMAT(t, test_json_read(t, wrong[i].text, &value, NULL), wrong[i].sentence);
    CHECK(t, value == 0);
  }
  for (size_t i = 0; i < sizeof doubles / sizeof *doubles; i++)
    test_json_double(t, doubles[i], strtod(doubles[i], NULL));
  for (int digit = 0; digit < 2; digit++) { /* 1 + 2^-53 is a tie; a distant digit breaks it */
    snprintf(text, sizeof text, "1.00000000000000011102230246251565404236316680908203125%01999d%d",
             0, digit);
    test_json_double(t, text, digit ? 1.0000000000000002 : 1.0);
  }
  /* The tie with most digits: 2^-1074 * (2^52 + 0.5) has 751. */
  snprintf(text, sizeof text, "%.1090f", ldexp(4503599627370497.0, -1074));
  test_json_double(t, text, ldexp(4503599627370497.0, -1074));
  uint32_t random = 7;
  for (int i = 0; i < 20000; i++) {
    uint64_t bits = 0;
    double want;
    for (int k = 0; k < 3; k++) bits = bits << 24 | test_bpe_random(&random);
    memcpy(&want, &bits, sizeof want);
    snprintf(text, sizeof text, "%.17g", want);
    if (isfinite(want)) test_json_double(t, text, want);
  }
  CHECK_FORMAT(t, test_json_read(t, "1e309", NULL, &real), "1e309 is too large for a double");
  CHECK_FORMAT(t, test_json_read(t, "-1e99999999999999999999", NULL, &real), "is too large");
  memset(text, '1', 5000);
  text[5000] = 0;
  CHECK_FORMAT(t, test_json_read(t, text, NULL, &real),
               "column 1: 1111111111111111111111111111111111111111 ... has more than 4000");
}

static void test_json_strings(g2z_test *t) {
  /* lone: position of half a surrogate pair, which becomes U+FFFD; -1: none */
  static const struct { const char *json, *want; size_t bytes; int lone; } cases[] = {
      {"\"\"", "", 0, -1},
      {"\"plain\"", "plain", 5, -1},
      {"\"a\\\"\\\\\\/\\b\\f\\n\\r\\tz\"", "a\"\\/\b\f\n\r\tz", 10, -1},
      {"\"\\u0041\\u00e9\\u20AC\"", "A\xc3\xa9\xe2\x82\xac", 6, -1},
      {"\"\\ud83d\\ude00\"", "\xf0\x9f\x98\x80", 4, -1},
      {"\"\\udbff\\udfff\"", "\xf4\x8f\xbf\xbf", 4, -1},
      {"\"\\ud83d\"", "\xef\xbf\xbd", 3, 0},
      {"\"\\ude00\\ud83d\"", "\xef\xbf\xbd\xef\xbf\xbd", 6, 0},
      {"\"\\udc00\\ude00\"", "\xef\xbf\xbd\xef\xbf\xbd", 6, 0},
      {"\"\\ud83dx\"", "\xef\xbf\xbdx", 4, 0},
      {"\"\\ud83d\\n\"", "\xef\xbf\xbd\n", 4, 0},
      {"\"\\ud83d\\u0041\"", "\xef\xbf\xbd" "A", 4, 0},
      {"\"\\ud83d\\ud83d\\ude00\"", "\xef\xbf\xbd\xf0\x9f\x98\x80", 7, 0},
      {"\"\\n\\ud83d\\ude00\\uFFFDx\\uDC00\"",
       "\n\xf0\x9f\x98\x80\xef\xbf\xbdx\xef\xbf\xbd", 12, 21},
      {"\"a\\u0000b\"", "a\0b", 3, -1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_json json;
    unsigned char out[64];
    g2z_json_open(&json, &t->services, "string", cases[i].json, strlen(cases[i].json));
    g2z_json_text text = g2z_json_string(&json);
    CHECK_OK(t, g2z_json_close(&json));
    const char *lone = (const char *)text.lone;
    size_t bytes = g2z_json_unescape(&text, out);
    CHECK(t, lone == (cases[i].lone < 0 ? NULL : (const char *)text.at + cases[i].lone));
    CHECK(t, bytes <= text.bytes && bytes == cases[i].bytes);
    CHECK(t, memcmp(out, cases[i].want, bytes) == 0);
    CHECK(t, g2z_json_is(&text, cases[i].want) == (strlen(cases[i].want) == cases[i].bytes));
    CHECK(t, !g2z_json_is(&text, "something else"));
  }
  g2z_json_text key;
  key.at = (const unsigned char *)"n_\\u006cayer";
  key.bytes = 12;
  CHECK(t, g2z_json_is(&key, "n_layer") && !g2z_json_is(&key, "n_laye") &&
           !g2z_json_is(&key, "n_layers"));
}

static void test_json_writer(g2z_test *t) {
  static const char line[] =
      "{\"text\": \"q\\\" b\\\\ n\\n t\\t \\u0001 \xc3\xa9 \xef\xbf\xbd\xef\xbf\xbd "
      "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd.\", \"none\": null, \"least\": "
      "-9223372036854775808, \"list\": [0.1, -1e-30, 50257, null, null, {}], \"empty\": [], "
      "\"yes\": true, \"no\": false, \"key \\\"\\n\": null}";
  static const double numbers[] = {0.1, -1e-30, 50257, NAN, -INFINITY};
  for (int indent = 0; indent <= 2; indent += 2) {
    g2z_writer *writer;
    char *text = NULL;
    size_t bytes = 0;
    CHECK_OK(t, g2z_writer_create(&t->services, test_path(t, "a.json"), &writer));
    g2z_json_out out = {writer, indent, 0, 0};
    g2z_json_begin(&out, NULL, '{');
    g2z_json_put_string(&out, "text", "q\" b\\ n\n t\t \x01 \xc3\xa9 \xff\xc3 \xed\xa0\x80.");
    g2z_json_put_string(&out, "none", NULL);
    g2z_json_put_integer(&out, "least", INT64_MIN);
    g2z_json_begin(&out, "list", '[');
    for (int i = 0; i < 5; i++) g2z_json_put_number(&out, NULL, numbers[i]);
    g2z_json_begin(&out, NULL, '{');
    g2z_json_end(&out, '}');
    g2z_json_end(&out, ']');
    g2z_json_begin(&out, "empty", '[');
    g2z_json_end(&out, ']');
    g2z_json_put_bool(&out, "yes", 2);
    g2z_json_put_bool(&out, "no", 0);
    g2z_json_put_string(&out, "key \"\n", NULL);
    g2z_json_end(&out, '}');
    CHECK_OK(t, g2z_writer_commit(writer));
    g2z_writer_free(writer);
    CHECK_OK(t, g2z_read_file(&t->services, test_path(t, "a.json"), 10000, &text, &bytes));
    CHECK_OK(t, test_json_walk(t, text, bytes));
    if (indent == 0) CHECK(t, strcmp(text, line) == 0);
    else
      CHECK(t, strstr(text, "{\n  \"text\": \"q") == text &&
                   strstr(text, "  \"list\": [\n    0.1,\n    -1e-30,\n    50257,\n    null,\n"
                                "    null,\n    {}\n  ],\n  \"empty\": [],\n  \"yes\": true,") &&
                   strcmp(text + bytes - 8, ": null\n}") == 0);
    g2z_release(&t->services, text);
  }
}

static void test_utf8_show(g2z_test *t) {
  static const char none[] = "\xef\xbf\xbd";
  static const struct { const char *text; size_t used; const char *shown; } cases[] = {
      {"a\xff", 1, "a"},          {"\n", 1, "\n"},          {"\t", 1, "\t"},
      {"\x1b[2J", 1, none},       {"\r", 1, none},          {"\x7f", 1, none},
      {"\xc2\x80x", 2, none},     {"\xc2\x9fx", 2, none},   {"\xc2\xa0x", 2, "\xc2\xa0"},
      {"\xc3\xa9x", 2, "\xc3\xa9"}, {"\xef\xbf\xbd", 3, none}, {"\xe2\x82", 1, none},
      {"\x82", 1, none},          {"\xc0\xaf", 1, none},    {"\xed\xa0\x80", 1, none},
      {"\xf0\x9f\x98\x80", 4, "\xf0\x9f\x98\x80"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const unsigned char *at = (const unsigned char *)cases[i].text;
    const g2z_shown shown = g2z_utf8_show(at, at + strlen(cases[i].text));
    CHECK(t, shown.used == cases[i].used && shown.bytes == strlen(cases[i].shown) &&
                 memcmp(shown.text, cases[i].shown, shown.bytes) == 0);
  }
}

/* ----- config ------------------------------------------------------------ */

static void test_config_checks(g2z_test *t) {
  static const g2z_model_config wanted[][2] = { /* in the order of its members: L, NH, C, ... */
      {{0, 0, 0, 0, 0, 0, 0}, {48, 25, 1600, 1024, 50257, 50256, 0}},
      {{2, 0, 320, 0, 0, 0, 0}, {2, 5, 320, 1024, 50257, 50256, 0}},
      {{0, 0, 32, 0, 99, 0, 0}, {2, 1, 32, 1024, 99, 50256, 0}},
      {{0, 2, 0, 8, 0, 0, 0}, {2, 2, 32, 8, 99, 50256, 0}},
      {{0, 8, 640, 0, 0, 0, 0}, {2, 8, 640, 8, 99, 50256, 0}}};
  g2z_services *s = &t->services;
  g2z_model_config model;
  g2z_train_config config;
  CHECK_OK(t, g2z_model_config_named(s, "gpt2-xl", &model));
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) { /* on top of the last one */
    g2z_shape_override(&model, &wanted[i][0]);
    CHECK(t, memcmp(&model, &wanted[i][1], sizeof model) == 0);
  }
  CHECK_BAD(t, g2z_model_config_named(s, "gpt3", &model), "gpt2-medium");
  for (int channels = 8; channels < 300; channels++) /* the remedy works */
    for (int heads = 1; heads < 4; heads++) {
      config = test_config_of(2, heads, channels, 8, 99);
      if (channels % heads || test_config_check(s, &config) == G2Z_OK) continue;
      const char *advised = strstr(s->error, "with channels="), *last = strrchr(s->error, '=');
      if (advised) config.model.channels = atoi(advised + strlen("with channels="));
      if (last) config.model.heads = atoi(last + 1);
      CHECK_OK(t, test_config_check(s, &config));
    }
  memset(&config, 0, sizeof config);
  CHECK_BAD(t, test_config_check(s, &config), "never initialised");
  config = g2z_train_config_default(G2Z_DEVICE_CPU);
  CHECK_OK(t, test_config_check(s, &config));
  CHECK(t, config.dtype == G2Z_FP32); /* as ./train does */
  CHECK(t, g2z_train_config_default(G2Z_DEVICE_CUDA).dtype == G2Z_FP16);
  CHECK(t, g2z_run_config_default(G2Z_DEVICE_CUDA).train.dtype == G2Z_FP16);
#define REFUSED(member, value, part)    \
  config = g2z_train_config_default(G2Z_DEVICE_CPU);  \
  config.member = value;                \
  CHECK_BAD(t, test_config_check(s, &config), part)
  REFUSED(model.heads, 7, "channels=768 must divide by heads=7");
  REFUSED(model.heads, 64, "head size of 12");
  REFUSED(model.heads, 4, "up to 128");
  REFUSED(model.layers, 0, "layers=0");
  REFUSED(seq, 2048, "context=1024");
  REFUSED(batch, 0, "batch=0");
  REFUSED(batch, 1 << 20, "2^28 tokens");
  REFUSED(accum, -1, "accum=-1");
  REFUSED(optimizer.lr, NAN, "lr=");
  REFUSED(optimizer.lr, -1.0f, "lr=-1");
  REFUSED(optimizer.min_lr, 1.0f, "min_lr=1");
  REFUSED(optimizer.adam_lr, -1.0f, "adam_lr=-1");
  REFUSED(optimizer.beta2, 1.0f, "beta2=1");
  REFUSED(optimizer.eps, 0.0f, "eps=0");
  REFUSED(optimizer.clip, INFINITY, "clip=inf");
  REFUSED(optimizer.kind, G2Z_OPTIMIZER_COUNT, "optimizer=2");
  REFUSED(optimizer.momentum, 1.0f, "momentum=1");
  REFUSED(optimizer.skip_spikes, -1.0f, "skip_spikes=-1");
  REFUSED(optimizer.schedule, G2Z_SCHEDULE_COUNT, "schedule=5");
  REFUSED(optimizer.steps, 0, "steps=0");
  REFUSED(optimizer.loss_scale, 0.5f, "loss_scale=0.5");
  REFUSED(dropout, 1.0f, "dropout=1");
  REFUSED(fp8, G2Z_FP8_COUNT, "fp8=4");
  REFUSED(fp8, G2Z_FP8_LOGITS, "fp8=logits rounds numbers of 16 bits to 8, and dtype=fp32 has 32");
  REFUSED(zero_stage, 4, "zero_stage=4");
  REFUSED(strategy, G2Z_STRATEGY_COUNT, "strategy=2");
  REFUSED(strategy, G2Z_STRATEGY_DP, "strategy=dp keeps one optimizer, on rank 0");
  REFUSED(recompute, G2Z_RECOMPUTE_COUNT, "recompute=2");
  REFUSED(graph, 3, "graph=3");
#undef REFUSED
}

static void test_config_pairs(g2z_test *t) {
  g2z_services *s = &t->services;
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
  config.optimizer.kind = G2Z_OPTIMIZER_MUON;
  config.optimizer.lr = config.optimizer.min_lr = 0;
  CHECK_BAD(t, test_config_check(s, &config),
            "adam_lr=0.0024 follows lr's schedule, and lr=0 has none: take lr=0.004, or adam_lr=0");
  config.optimizer.adam_lr = 0;
  CHECK_OK(t, test_config_check(s, &config));
  config = g2z_train_config_default(G2Z_DEVICE_CPU);
  config.fp8 = G2Z_FP8_ALL;
  CHECK_BAD(t, test_config_check(s, &config), "take dtype=fp16, or fp8=none");
  config.dtype = G2Z_BF16;
  CHECK_BAD(t, test_config_check(s, &config), "only dtype=fp16 scales");
  config.dtype = G2Z_FP16;
  config.seq = 1000;
  CHECK_BAD(t, test_config_check(s, &config), "of 128, and channels of 16; they are 8000 and 768");
  config.seq = 1024;
  config.model.channels = 792;
  config.model.heads = 11;
  CHECK_BAD(t, test_config_check(s, &config), "channels of 16; they are 8192 and 792");
  config.model.channels = 768;
  config.model.heads = 12;
  config.optimizer.moments_bf16 = 1;
  CHECK_OK(t, test_config_check(s, &config));
  config.optimizer.kind = G2Z_OPTIMIZER_MUON;
  CHECK_BAD(t, test_config_check(s, &config), "moments=bf16 is for AdamW: take optimizer=adamw");
  config = g2z_train_config_default(G2Z_DEVICE_CPU);
  config.model.heads = 16;
  config.model.channels = 1024;
  config.model.context = config.seq = 32769;
  CHECK_OK(t, test_config_check(s, &config));
  config.dropout = 0.1f;
  CHECK_BAD(t, test_config_check(s, &config), "heads=16 x seq=32769 x seq is 17180917776");
  config.seq = 32768; /* 2^34 scores: the last four have the largest 32-bit index */
  CHECK_OK(t, test_config_check(s, &config));
  static const struct { /* settings and a GPU */
    const char *gpu;
    int fp8, bf16;
    g2z_fp8 wanted;
    g2z_optimizer optimizer;
    int channels;
    const char *says;
  } suits[] = {
      {"Tesla T4", 0, 0, G2Z_FP8_NONE, G2Z_OPTIMIZER_ADAMW, 1024, NULL},
      {"Tesla T4", 0, 0, G2Z_FP8_FORWARD, G2Z_OPTIMIZER_ADAMW, 1024, "fp8=forward needs a GPU of "
       "compute capability 8.9 or newer (Ada, Hopper, Blackwell)"},
      {"Tesla T4", 0, 0, G2Z_FP8_NONE, G2Z_OPTIMIZER_MUON, 1024,
       "newer; here is Tesla T4: take optimizer=adamw"},
      {"RTX 4090", 16, 1, G2Z_FP8_LOGITS, G2Z_OPTIMIZER_ADAMW, 1024, NULL},
      {"RTX 4090", 16, 1, G2Z_FP8_LOGITS, G2Z_OPTIMIZER_ADAMW, 1000,
       "fp8=logits needs channels to be a multiple of 16 on RTX 4090; they are 1000"},
      {"H200", 1, 1, G2Z_FP8_LOGITS, G2Z_OPTIMIZER_ADAMW, 1000, NULL}};
  for (size_t i = 0; i < sizeof suits / sizeof *suits; i++) {
    g2z_device device;
    memset(&device, 0, sizeof device);
    device.kind = G2Z_DEVICE_CUDA;
    device.info.fp8 = suits[i].fp8;
    device.info.bf16 = suits[i].bf16;
    snprintf(device.info.name, sizeof device.info.name, "%s", suits[i].gpu);
    config.fp8 = suits[i].wanted;
    config.optimizer.kind = suits[i].optimizer;
    config.model.channels = suits[i].channels;
    CHECK_STATUS(t, g2z__device_suits(s, &config, &device),
                 suits[i].says ? G2Z_UNSUPPORTED : G2Z_OK, s, suits[i].says);
  }
  config.model.channels = 1024;
  config.fp8 = G2Z_FP8_NONE;
  config.optimizer.kind = G2Z_OPTIMIZER_MUON;
  g2z_plan *plan;
  config.graph = 1;
  CHECK_STATUS(t, g2z_plan_create(s, &config, G2Z_DEVICE_CPU, 0, 1, 1, &plan), G2Z_UNSUPPORTED, s,
               "graph=1 needs a GPU");
}

/* Warm-up from 0.1 to 1 in 10 steps; then constant, or a decay to 0.1 at step 110. */
static void test_schedules(g2z_test *t) {
  static const struct { int schedule, step; double lr; } between[] = {
      {G2Z_SCHEDULE_COSINE, 60, 0.55},
      {G2Z_SCHEDULE_COSINE, 35, 0.1 + 0.9 * 0.5 * (1 + 0.70710678118654752)},
      {G2Z_SCHEDULE_LINEAR, 35, 0.1 + 0.9 * 0.75},
      {G2Z_SCHEDULE_WSD, 90, 1.0},
      {G2Z_SCHEDULE_WSD, 100, 0.55},
      {G2Z_SCHEDULE_POWER, 60, 0.1 + 0.9 * 0.61557220667245815},   /* 0.5^0.7 */
      {G2Z_SCHEDULE_POWER, 100, 0.1 + 0.9 * 0.19952623149688797}}; /* 0.1^0.7 */
  g2z_optimizer_config c = g2z_train_config_default(G2Z_DEVICE_CPU).optimizer;
  c.lr = 1.0f;
  c.min_lr = 0.1f;
  c.warmup = 10;
  c.steps = 110;
  for (int s = 0; s < G2Z_SCHEDULE_COUNT; s++) {
    double end = s == G2Z_SCHEDULE_CONSTANT ? 1.0 : 0.1;
    c.schedule = (g2z_schedule)s;
    CHECK_NEAR(t, g2z_schedule_lr(&c, 0), 0.1, 1e-7); /* the first step of warm-up moves */
    CHECK_NEAR(t, g2z_schedule_lr(&c, 9), 1.0, 1e-7);
    CHECK_NEAR(t, g2z_schedule_lr(&c, 10), 1.0, 1e-7);
    CHECK_NEAR(t, g2z_schedule_lr(&c, 110), end, 1e-7);
    CHECK_NEAR(t, g2z_schedule_lr(&c, 5000), end, 1e-7);
  }
  for (size_t i = 0; i < sizeof between / sizeof *between; i++) {
    c.schedule = (g2z_schedule)between[i].schedule;
    CHECK_NEAR(t, g2z_schedule_lr(&c, between[i].step), between[i].lr, 1e-6);
  }
  c.warmup = 0;
  CHECK_NEAR(t, g2z_schedule_lr(&c, 0), 1.0, 1e-7);
}

/* Vectors of the Random123 distribution (kat_vectors, philox4x32 10). */
static void test_philox(g2z_test *t) {
  static const uint32_t want[2][4] = {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u},
                                      {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}};
  const uint32_t mixed = (uint32_t)G2Z_RANDOM_INIT * 0x85ebca6bu; /* the stream's part of a key */
  for (int i = 0; i < 2; i++) { /* key and counter all zeros, then all ones */
    uint32_t ones = i ? 0xffffffffu : 0, counter[4] = {ones, ones, ones, ones}, out[4];
    g2z_philox(((uint64_t)(ones ^ mixed) << 32) | ones, G2Z_RANDOM_INIT, counter, out);
    CHECK(t, memcmp(out, want[i], sizeof out) == 0);
  }
  CHECK(t, g2z_uniform(0) == 0.0f && g2z_uniform(0xffffffffu) < 1.0f);
}
