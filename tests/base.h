/* Tests of the rooms that everything uses: files, JSON, config, learning rates, random numbers.
 * Tests that use private names of the header: files_writer, files_full_disk; "internals" stands
 * above what writes such names. */

/* ----- files ------------------------------------------------------------- */

/* internals */
static void test_files_writer(g2z_test *t) {
  /* Puts around the size of a buffer, text, and a patch, against the same in memory. */
  enum { BYTES = 400000 };
  char *want = (char *)malloc(BYTES + 1), *path = strdup(test_path(t, "file.bin"));
  uint32_t random = 1;
  for (int i = 0; i < BYTES; i++) {
    random = random * 1664525u + 1013904223u;
    want[i] = (char)('a' + (random >> 24) % 26);
  }
  want[BYTES] = 0;
  g2z_writer *writer;
  CHECK_OK(t, g2z_writer_create(&t->services, path, &writer));
  size_t at = 0;
  for (size_t turn = 0; at < BYTES; turn++) {
    static const size_t sizes[] = {1, 0, 7, 65535, 65536, 65537, 3000, 130000};
    size_t n = sizes[turn % 8] < BYTES - at ? sizes[turn % 8] : BYTES - at;
    if (turn % 3) CHECK_OK(t, g2z_writer_put(writer, want + at, n));
    else CHECK_OK(t, g2z_writer_printf(writer, "%.*s", (int)n, want + at));
    at += n;
  }
  memcpy(want + 65530, "PATCHED ACROSS", 14);
  memcpy(want + BYTES - 3, "END", 3);
  CHECK_OK(t, g2z__writer_patch(writer, 65530, "PATCHED ACROSS", 14));
  CHECK_OK(t, g2z__writer_patch(writer, BYTES - 3, "END", 3));
  CHECK(t, access(path, F_OK) != 0);             /* no name before the commit */
  CHECK(t, test_files_count(t, "file.bin.partial") == 1);
  CHECK_OK(t, g2z_writer_commit(writer));
  g2z_writer_free(writer);
  CHECK(t, test_files_equal(t, path, want, BYTES));
  CHECK(t, test_files_count(t, "") == 1);

  /* Freed without a commit, the file of before stays. */
  CHECK_OK(t, g2z_writer_create(&t->services, path, &writer));
  CHECK_OK(t, g2z_writer_put(writer, "new", 3));
  g2z_writer_free(writer);
  CHECK(t, test_files_equal(t, path, want, BYTES));
  CHECK(t, test_files_count(t, "") == 1);

  /* What is put behind a commit follows, and the next commit has it on the disk. */
  CHECK_OK(t, g2z_writer_create(&t->services, path, &writer));
  CHECK_OK(t, g2z_writer_put(writer, "one", 3));
  CHECK_OK(t, g2z_writer_commit(writer));
  CHECK(t, test_files_equal(t, path, "one", 3) && test_files_count(t, "") == 1);
  CHECK_OK(t, g2z_writer_put(writer, "two", 3));
  CHECK_OK(t, g2z_writer_flush(writer));
  CHECK(t, test_files_equal(t, path, "onetwo", 6));
  CHECK_OK(t, g2z_writer_put(writer, "!", 1));
  CHECK_OK(t, g2z_writer_commit(writer));
  CHECK(t, test_files_equal(t, path, "onetwo!", 7));
  g2z_writer_free(writer);
  CHECK(t, test_files_equal(t, path, "onetwo!", 7) && test_files_count(t, "") == 1);
  g2z_writer_free(NULL);
  free(want);
  free(path);
}

static void test_files_log(void *user, g2z_log_level level, const char *sentence) {
  (void)level;
  strcpy((char *)user, sentence);
}

static void test_files_refused(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_writer *writer;
  char *text;
  size_t bytes;
  const char *deep = test_path(t, "a/b//c/");
  CHECK_STATUS(t, g2z_writer_create(services, test_path(t, "none/x"), &writer), G2Z_IO, services,
               "none/x: No such file or directory; check the name");
  CHECK(t, writer == NULL);
  CHECK_STATUS(t, g2z_writer_create(services, test_path(t, "n\033[2J\n/\xc2\x9b" "2J\xc3\x9b"),
                                    &writer),
               G2Z_IO, services, "n?[2J?/??2J\xc3\x9b: No such"); /* does not clear the screen */
  char logged[64] = "";
  services->log = test_files_log;
  services->user = logged;
  g2z_log(services, G2Z_LOG_INFO, "%s", "n\033[2J\xc2\x9b" "2J\xc2\xa0");
  CHECK(t, strcmp(logged, "n?[2J??2J\xc2\xa0") == 0);
  services->log = NULL;
  services->user = t;
  CHECK_STATUS(t, g2z_writer_create(services, "", &writer), G2Z_IO, services, "No such file");
  CHECK_STATUS(t, g2z_writer_create(services, t->directory, &writer), G2Z_IO, services,
               "it is a directory");
  CHECK_STATUS(t, g2z_writer_create(services, "/dev/null", &writer), G2Z_IO, services,
               "not a regular file");
  CHECK_STATUS(t, g2z_read_file(services, test_path(t, "none"), 10, &text, &bytes), G2Z_IO,
               services, "No such file");
  CHECK(t, text == NULL && bytes == 0);
  CHECK_STATUS(t, g2z_read_file(services, t->directory, 10000, &text, &bytes), G2Z_IO, services,
               "it is a directory: name a file");

  g2z_model_config model; /* a directory without a name is not the root */
  g2z_events *events;
  const char *unnamed = "cannot open the directory \"\": No such file";
  CHECK_STATUS(t, g2z_weights_config(services, "", &model), G2Z_IO, services, unnamed);
  CHECK_STATUS(t, g2z_report_run(services, ""), G2Z_IO, services, unnamed);
  CHECK_STATUS(t, g2z_profile_run(services, ""), G2Z_IO, services, unnamed);
  CHECK_STATUS(t, g2z_events_create(services, "", 1, &events), G2Z_IO, services, unnamed);
  CHECK(t, events == NULL);

  CHECK_OK(t, g2z_make_directory(services, deep));
  CHECK_OK(t, g2z_make_directory(services, deep)); /* exists */
  CHECK_OK(t, g2z_make_directory(services, "/"));
  CHECK(t, test_files_count(t, "a/b/c") == 1);
  test_write_file(t, test_path(t, "a/file"), "12345", 5);
  CHECK_STATUS(t, g2z_make_directory(services, test_path(t, "a/file/x")), G2Z_IO, services,
               "a file stands where a directory is needed");
  CHECK_STATUS(t, g2z_make_directory(services, ""), G2Z_IO, services, "\"\"");

  CHECK_OK(t, g2z_read_file(services, test_path(t, "a/file"), 5, &text, &bytes));
  CHECK(t, bytes == 5 && strcmp(text, "12345") == 0);
  g2z_release(services, text);
  CHECK_STATUS(t, g2z_read_file(services, test_path(t, "a/file"), 4, &text, &bytes), G2Z_FORMAT,
               services, "more than 4 bytes");
  test_write_file(t, test_path(t, "empty"), "", 0);
  CHECK_OK(t, g2z_read_file(services, test_path(t, "empty"), 0, &text, &bytes));
  CHECK(t, bytes == 0 && text[0] == 0);
  g2z_release(services, text);
}

/* A FIFO in place of a file must not be waited for, and a link must not lead to a file that nobody
 * named. */
static void test_files_special(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_writer *writer;
  char *text, path[512], partial[512];
  size_t bytes;
  snprintf(path, sizeof path, "%s", test_path(t, "file"));
  snprintf(partial, sizeof partial, "%s", test_path(t, "file.partial"));
  test_write_file(t, test_path(t, "target"), "target", 6);
  alarm(20); /* ends the tests where one waits */
  CHECK(t, mkfifo(path, 0600) == 0 && symlink("file", test_path(t, "link")) == 0);
  CHECK_STATUS(t, g2z_read_file(services, path, 10, &text, &bytes), G2Z_IO, services,
               "file: it is a FIFO; name a file");
  CHECK_STATUS(t, g2z_read_file(services, test_path(t, "link"), 10, &text, &bytes), G2Z_IO,
               services, "link: it is a FIFO");
  CHECK_STATUS(t, g2z_read_file(services, "/dev/zero", 10, &text, &bytes), G2Z_IO, services,
               "not a regular file");
  CHECK_STATUS(t, g2z_writer_create(services, path, &writer), G2Z_IO, services, "it is a FIFO");
  CHECK(t, unlink(path) == 0 && mkfifo(partial, 0600) == 0);
  int reader = open(partial, O_RDONLY | O_NONBLOCK);
  CHECK_STATUS(t, g2z_writer_create(services, path, &writer), G2Z_IO, services,
               "file.partial: it is a FIFO; remove it");
  close(reader);
  CHECK_STATUS(t, g2z_writer_create(services, path, &writer), G2Z_IO, services,
               "file.partial: No such device or address; it is a FIFO");
  alarm(0);
  CHECK(t, unlink(partial) == 0 && symlink("target", partial) == 0);
  CHECK_STATUS(t, g2z_writer_create(services, path, &writer), G2Z_IO, services,
               "file.partial: Too many levels of symbolic links; it is a symbolic link: remove it");
  CHECK(t, writer == NULL && unlink(partial) == 0 && symlink("target", path) == 0);
  CHECK_STATUS(t, g2z_writer_create(services, path, &writer), G2Z_IO, services,
               "file: it is a symbolic link; name a file");
  CHECK_OK(t, g2z_read_file(services, path, 10, &text, &bytes)); /* to read through one is fine */
  CHECK(t, bytes == 6);
  g2z_release(services, text);
  CHECK(t, test_files_equal(t, test_path(t, "target"), "target", 6));
  CHECK(t, test_files_count(t, "") == 3); /* nothing was made: target, file, link */
}

/* A pipe has no size: the reader grows its block until the end. */
static void test_files_pipe(g2z_test *t) {
  int ends[2];
  CHECK(t, pipe(ends) == 0);
  char path[64], block[1000];
  memset(block, 'x', sizeof block);
  for (int i = 0; i < 60; i++) CHECK(t, write(ends[1], block, sizeof block) == 1000);
  close(ends[1]);
  snprintf(path, sizeof path, "/dev/fd/%d", ends[0]);
  char *text = NULL;
  size_t bytes = 0;
  CHECK_OK(t, g2z_read_file(&t->services, path, 100000, &text, &bytes));
  CHECK(t, bytes == 60000 && text && text[0] == 'x' && text[59999] == 'x' && text[60000] == 0);
  g2z_release(&t->services, text);
  close(ends[0]);
}

/* A file is written by one at a time, and so is a directory that is locked; what a killed program
 * left is in nobody's way. */
static void test_files_locked(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_writer *first, *second;
  int locks[2];
  char path[512];
  snprintf(path, sizeof path, "%s", test_path(t, "file"));
  test_write_file(t, test_path(t, "file.partial"), "left by a killed program", 24);
  CHECK_OK(t, g2z_writer_create(services, path, &first));
  CHECK_OK(t, g2z_writer_put(first, "first", 5));
  CHECK_STATUS(t, g2z_writer_create(services, path, &second), G2Z_IO, services,
               "another program writes");
  CHECK_OK(t, g2z_writer_commit(first));
  CHECK_OK(t, g2z_writer_create(services, path, &second)); /* the file is there, and free */
  g2z_writer_free(first);
  CHECK(t, test_files_equal(t, path, "first", 5));
  CHECK_OK(t, g2z_writer_put(second, "second", 6));
  CHECK_OK(t, g2z_writer_commit(second));
  g2z_writer_free(second);
  CHECK(t, test_files_equal(t, path, "second", 6));
  CHECK(t, access(test_path(t, "file.partial"), F_OK) != 0);

  CHECK_OK(t, g2z_lock_directory(services, t->directory, &locks[0]));
  CHECK_STATUS(t, g2z_lock_directory(services, t->directory, &locks[1]), G2Z_BAD_ARGUMENT,
               services, "another program is at work in");
  CHECK(t, locks[1] == -1);
  close(locks[0]);
  CHECK_OK(t, g2z_lock_directory(services, t->directory, &locks[1]));
  close(locks[1]);
  CHECK_STATUS(t, g2z_lock_directory(services, path, &locks[1]), G2Z_IO, services, path);
}

/* internals */
static void test_files_full_disk(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_writer *writer;
  char path[512], block[10000];
  snprintf(path, sizeof path, "%s", test_path(t, "file"));
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
  CHECK_STATUS(t, g2z_writer_printf(writer, "%d", 1), G2Z_IO, services, "File too large; raise");
  CHECK_STATUS(t, g2z__writer_patch(writer, 0, "x", 1), G2Z_IO, services, "cannot write");
  services->error[0] = 0;
  CHECK_STATUS(t, g2z_writer_commit(writer), G2Z_IO, services, path);
  g2z_writer_free(writer);

  /* What fails only when the buffer is flushed fails in the commit. */
  test_files_limit(50);
  CHECK_OK(t, g2z_writer_create(services, path, &writer));
  CHECK_OK(t, g2z_writer_put(writer, block, 100));
  CHECK_STATUS(t, g2z_writer_commit(writer), G2Z_IO, services, "File too large");
  CHECK_STATUS(t, g2z_writer_commit(writer), G2Z_IO, services, "File too large");
  g2z_writer_free(writer);
  test_files_unlimit(&before);
  CHECK(t, test_files_equal(t, path, "old", 3));
  CHECK(t, test_files_count(t, "") == 1);
}

/* Root may write anywhere, so it looks at its directory as nobody for a while. */
static void test_files_unwritable(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_writer *writer;
  const uid_t self = geteuid();
  CHECK(t, chmod(t->directory, 0555) == 0);
  if (self == 0 && seteuid(65534) != 0) SKIP(t, "root cannot become another user here");
  CHECK_STATUS(t, g2z_writer_create(services, test_path(t, "file"), &writer), G2Z_IO, services,
               "Permission denied; change its permissions or choose another directory");
  CHECK_STATUS(t, g2z_make_directory(services, test_path(t, "a/b")), G2Z_IO, services,
               "cannot create the directory");
  CHECK(t, seteuid(self) == 0);
  CHECK(t, chmod(t->directory, 0700) == 0);
  CHECK(t, test_files_count(t, "") == 0);
}

static void test_files_no_memory(g2z_test *t) {
  test_write_file(t, test_path(t, "file"), "text", 4);
  for (int n = 1, done = 0; !done; n++) {
    char *text = NULL;
    size_t bytes;
    g2z_writer *writer = NULL;
    t->fail_at = n;
    g2z_status status = g2z_make_directory(&t->services, test_path(t, "d/e"));
    if (status == G2Z_OK)
      status = g2z_read_file(&t->services, test_path(t, "file"), 10, &text, &bytes);
    if (status == G2Z_OK) status = g2z_writer_create(&t->services, test_path(t, "new"), &writer);
    if (status == G2Z_OK) status = g2z_writer_printf(writer, "%*d", 70000, 1);
    if (status == G2Z_OK) status = g2z_writer_commit(writer);
    t->fail_at = 0;
    done = status == G2Z_OK;
    CHECK(t, done || status == G2Z_NO_MEMORY);
    g2z_writer_free(writer);
    g2z_release(&t->services, text);
    CHECK(t, t->allocations == 0);
    CHECK(t, done ? n > 2 : n < 20);
    if (n >= 20) break;
  }
  CHECK(t, test_files_count(t, "new.partial") == 0);
}

/* ----- JSON -------------------------------------------------------------- */

/* Walks a text without a NUL behind it, so that the sanitizer sees a read beyond its end. */
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
      "\xef\xbb\xbf{}", "{\"a\":1,\"a\":2}", "{\"\":0}"};
  static const char *const bad[] = {
      "", " ", "01", "-", "+1", ".5", "1.", "1.e5", "1e", "1e+", "0x10", "--1", "NaN", "Infinity",
      "tru", "True", "nul", "falsee", "1 2", "[1,]", "[,1]", "[1 2]", "[", "]", "[1}", "{\"a\":1]",
      "{", "{a:1}", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{,}", "{\"a\" 1}", "{1:2}", "'a'", "\"",
      "\"\\\"", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"a\nb\"", "\"\x1f\"", "[1]]", "{}{}",
      "\"a\"b", "// c\n1", "\\",
      "\xef\xbb", "\xff", "[\"a\",\n\"b\"\n\"c\"]", "-a", "1e5.5", "{\"a\":1 \"b\":2}"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++)
    if (test_json_walk(t, good[i], strlen(good[i])) != G2Z_OK)
      test_fail(t, __FILE__, __LINE__, "refused %s: %s", good[i], t->services.error);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    if (test_json_walk(t, bad[i], strlen(bad[i])) != G2Z_FORMAT)
      test_fail(t, __FILE__, __LINE__, "accepted %s", bad[i]);
  CHECK(t, test_json_walk(t, "[1\0]", 4) == G2Z_FORMAT);
  CHECK(t, test_json_walk(t, "\"\0\"", 3) == G2Z_FORMAT);
  CHECK(t, test_json_walk(t, "\"\\\0\"", 4) == G2Z_FORMAT);
  CHECK(t, test_json_walk(t, "\0", 1) == G2Z_FORMAT);

  /* Every beginning of a text is an error, every change of a byte is survived. */
  const char *text = "{\"k\\u00e9\":[true,false,null,-12.5e-3,\"x\\n\\ud83d\\ude00\"],\"o\":{}}";
  const size_t bytes = strlen(text);
  for (size_t n = 0; n < bytes; n++) CHECK(t, test_json_walk(t, text, n) == G2Z_FORMAT);
  CHECK(t, test_json_walk(t, text, bytes) == G2Z_OK);
  for (size_t n = 0; n < bytes; n++) {
    char changed[128];
    memcpy(changed, text, bytes);
    for (int c = 0; c < 256; c++) {
      changed[n] = (char)c;
      g2z_status status = test_json_walk(t, changed, bytes);
      CHECK(t, status == G2Z_OK || status == G2Z_FORMAT);
    }
  }

  char deep[4 * G2Z_JSON_DEPTH + 8];
  for (int over = 0; over < 2; over++) {
    int levels = G2Z_JSON_DEPTH + over;
    memset(deep, '[', (size_t)levels);
    memset(deep + levels, ']', (size_t)levels);
    CHECK_STATUS(t, test_json_walk(t, deep, 2 * (size_t)levels), over ? G2Z_FORMAT : G2Z_OK,
                 &t->services, over ? "nested deeper than 64 levels" : NULL);
  }
  char *endless = (char *)malloc(1000000); /* a recursive reader would overflow its stack */
  for (int i = 0; i < 1000000; i++) endless[i] = i % 2 ? '[' : '{';
  CHECK(t, test_json_walk(t, endless, 1000000) == G2Z_FORMAT);
  memset(endless, '[', 1000000);
  CHECK(t, test_json_walk(t, endless, 1000000) == G2Z_FORMAT);
  free(endless);
}

static void test_json_sentences(g2z_test *t) {
  g2z_json failed;
  g2z_json_open(&failed, &t->services, "none", "5", 1);
  g2z_json_text none = g2z_json_string(&failed);
  CHECK(t, none.at && none.bytes == 0 && !g2z_json_is(&none, "5"));
  g2z_services *services = &t->services;
  static const struct { const char *text, *sentence; } cases[] = {
      {"[1,\n  2,\n  x]", "text, line 3, column 3: expected a value, found 'x'"},
      {"{\"a\" 1}", "text, line 1, column 6: expected ':', found '1'"},
      {"[1 2]", "expected ',' or ']', found '2'"},
      {"{\"a\":1", "expected ',' or '}', found the text's end"},
      {"[\"abc", "this string has no closing quote"},
      {"[\"a\tc\"]", "column 4: a control character in a string"},
      {"[\"a\\qc\"]", "no such escape"},
      {"[\"\\u12x4\"]", "\\u needs four hexadecimal digits"},
      {"[01]", "not a number as JSON writes it"},
      {"[\xff]", "found byte 0xff"},
      {"1 1", "expected the end, found '1'"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    CHECK_STATUS(t, test_json_walk(t, cases[i].text, strlen(cases[i].text)), G2Z_FORMAT, services,
                 cases[i].sentence);

  /* The first error stays, and every call after it is harmless. */
  g2z_json json;
  g2z_json_text key;
  const char *text = "{\"n\": 1.5, \"m\": 2}";
  g2z_json_open(&json, services, "config.json", text, strlen(text));
  CHECK(t, g2z_json_enter(&json, '{') == 1);
  CHECK(t, g2z_json_next(&json, '}', &key) == 1 && g2z_json_is(&key, "n"));
  CHECK(t, g2z_json_integer(&json) == 0);
  CHECK(t, g2z_json_next(&json, '}', &key) == 0 && g2z_json_enter(&json, '[') == 0);
  CHECK(t, g2z_json_peek(&json) == 0 && g2z_json_number(&json) == 0 && g2z_json_bool(&json) == 0);
  CHECK(t, g2z_json_string(&json).bytes == 0);
  g2z_json_skip(&json);
  CHECK_STATUS(t, g2z_json_fail(&json, "later"), G2Z_FORMAT, services, "1.5 is not an integer");
  CHECK_STATUS(t, g2z_json_close(&json), G2Z_FORMAT, services,
               "config.json, line 1, column 7: 1.5 is not an integer");
  g2z_json_open(&json, services, "config.json", text, strlen(text));
  CHECK(t, g2z_json_enter(&json, '[') == 0);
  CHECK_STATUS(t, g2z_json_close(&json), G2Z_FORMAT, services, "expected an array, found '{'");
  g2z_json_open(&json, services, "a", "[[[", 3);
  CHECK_STATUS(t, g2z_json_fail(&json, "n_inner=%d", 7), G2Z_FORMAT, services,
               "a, line 1, column 1: n_inner=7");
}

static int64_t test_json_int(g2z_test *t, const char *text, g2z_status *status) {
  g2z_json json;
  g2z_json_open(&json, &t->services, "int", text, strlen(text));
  int64_t value = g2z_json_integer(&json);
  *status = g2z_json_close(&json);
  return value;
}

static double test_json_double(g2z_test *t, const char *text, g2z_status *status) {
  g2z_json json;
  g2z_json_open(&json, &t->services, "double", text, strlen(text));
  double value = g2z_json_number(&json);
  *status = g2z_json_close(&json);
  return value;
}

static void test_json_numbers(g2z_test *t) {
  g2z_status status;
  CHECK(t, test_json_int(t, "9223372036854775807", &status) == INT64_MAX && status == G2Z_OK);
  CHECK(t, test_json_int(t, "-9223372036854775808", &status) == INT64_MIN && status == G2Z_OK);
  CHECK(t, test_json_int(t, "-0", &status) == 0 && status == G2Z_OK);
  CHECK(t, test_json_int(t, "1024", &status) == 1024 && status == G2Z_OK);
  static const char *const wrong[] = {
      "9223372036854775808", "-9223372036854775809", "1.0", "1e3", "\"1\"",
      "99999999999999999999999999999999999999999999999999"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    CHECK(t, test_json_int(t, wrong[i], &status) == 0 && status == G2Z_FORMAT);
  CHECK_STATUS(t, (test_json_int(t, wrong[0], &status), status), G2Z_FORMAT, &t->services,
               "9223372036854775808 does not fit into 64 bits");

  /* As strtod reads them: ties, subnormals, the ends of the range, and needless length. */
  static const char *const doubles[] = {
      "0", "-0.0", "0.1", "1e23", "8.5e-5", "123456789012345678", "9007199254740993", "5e-324",
      "2.4703282292062327208e-324", "2.4703282292062328e-324", "2.2250738585072011e-308",
      "2.2250738585072014e-308", "1.7976931348623157e308", "4.35e-1", "0.000000000000000001e18",
      "1e-400", "1e-99999999999999999999", "0e99999999999999999999", "100000000000000000000000e-23",
      "1.00000000000000011102230246251565404236316680908203125",
      "1.00000000000000011102230246251565404236316680908203124",
      "1.000000000000000111022302462515654042363166809082031250000000000000000000000000000000001"};
  for (size_t i = 0; i < sizeof doubles / sizeof *doubles; i++) {
    double want = strtod(doubles[i], NULL), got = test_json_double(t, doubles[i], &status);
    if (status != G2Z_OK || memcmp(&want, &got, sizeof want) != 0)
      test_fail(t, __FILE__, __LINE__, "%s became %.17g, not %.17g", doubles[i], got, want);
  }
  /* 1 + 2^-53 is a tie; a digit far behind it decides. */
  char longer[2100];
  for (int digit = 0; digit < 2; digit++) {
    snprintf(longer, sizeof longer,
             "1.00000000000000011102230246251565404236316680908203125%01999d%d", 0, digit);
    double got = test_json_double(t, longer, &status);
    CHECK(t, status == G2Z_OK && got == (digit ? 1.0000000000000002 : 1.0));
  }
  /* The tie with most digits: 2^-1074 * (2^52 + 0.5) has 751. */
  char tie[1200];
  snprintf(tie, sizeof tie, "%.1090f", ldexp(4503599627370497.0, -1074));
  CHECK(t, test_json_double(t, tie, &status) == ldexp(4503599627370497.0, -1074));
  uint32_t random = 7;
  for (int i = 0; i < 20000; i++) {
    uint64_t bits = 0;
    for (int k = 0; k < 3; k++) {
      random = random * 1664525u + 1013904223u;
      bits = bits << 24 | random >> 8;
    }
    double want, got;
    memcpy(&want, &bits, sizeof want);
    if (!isfinite(want)) continue;
    char text[40];
    snprintf(text, sizeof text, "%.17g", want);
    got = test_json_double(t, text, &status);
    CHECK(t, status == G2Z_OK && got == want);
  }
  CHECK_STATUS(t, (test_json_double(t, "1e309", &status), status), G2Z_FORMAT, &t->services,
               "1e309 is too large for a double");
  CHECK(t, (test_json_double(t, "-1e99999999999999999999", &status), status) == G2Z_FORMAT);
  char endless[5001];
  memset(endless, '1', 5000);
  endless[5000] = 0;
  CHECK_STATUS(t, (test_json_double(t, endless, &status), status), G2Z_FORMAT, &t->services,
               "line 1, column 1: 1111111111111111111111111111111111111111 ... has more than 4000");
}

static void test_json_strings(g2z_test *t) {
  static const struct { const char *json, *want; size_t bytes; int lone; } cases[] = {
      {"\"\"", "", 0, -1},
      {"\"plain\"", "plain", 5, -1},
      {"\"a\\\"\\\\\\/\\b\\f\\n\\r\\tz\"", "a\"\\/\b\f\n\r\tz", 10, -1},
      {"\"\\u0041\\u00e9\\u20AC\"", "A\xc3\xa9\xe2\x82\xac", 6, -1},
      {"\"\\ud83d\\ude00\"", "\xf0\x9f\x98\x80", 4, -1},
      {"\"\\udbff\\udfff\"", "\xf4\x8f\xbf\xbf", 4, -1},
      {"\"\\ud83d\"", "\xef\xbf\xbd", 3, 0},
      {"\"\\ude00\\ud83d\"", "\xef\xbf\xbd\xef\xbf\xbd", 6, 0},
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
  for (int indent = 0; indent <= 2; indent += 2) {
    g2z_writer *writer;
    CHECK_OK(t, g2z_writer_create(&t->services, test_path(t, "a.json"), &writer));
    g2z_json_out out = {writer, indent, 0, 0};
    g2z_json_begin(&out, NULL, '{');
    g2z_json_put_string(&out, "text", "q\" b\\ n\n t\t \x01 \xc3\xa9 \xff\xc3 \xed\xa0\x80.");
    g2z_json_put_string(&out, "none", NULL);
    g2z_json_put_integer(&out, "least", INT64_MIN);
    g2z_json_begin(&out, "list", '[');
    g2z_json_put_number(&out, NULL, 0.1);
    g2z_json_put_number(&out, NULL, -1e-30);
    g2z_json_put_number(&out, NULL, 50257);
    g2z_json_put_number(&out, NULL, NAN);
    g2z_json_put_number(&out, NULL, -INFINITY);
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
    char *text = NULL;
    size_t bytes = 0;
    CHECK_OK(t, g2z_read_file(&t->services, test_path(t, "a.json"), 10000, &text, &bytes));
    CHECK(t, test_json_walk(t, text, bytes) == G2Z_OK);
    const char *line =
        "{\"text\": \"q\\\" b\\\\ n\\n t\\t \\u0001 \xc3\xa9 \xef\xbf\xbd\xef\xbf\xbd "
        "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd.\", \"none\": null, \"least\": "
        "-9223372036854775808, \"list\": [0.1, -1e-30, 50257, null, null, {}], \"empty\": [], "
        "\"yes\": true, \"no\": false, \"key \\\"\\n\": null}";
    if (indent == 0) CHECK(t, strcmp(text, line) == 0);
    else
      CHECK(t, strstr(text, "{\n  \"text\": \"q") == text &&
                   strstr(text, "  \"list\": [\n    0.1,\n    -1e-30,\n    50257,\n    null,\n"
                                "    null,\n    {}\n  ],\n  \"empty\": [],\n  \"yes\": true,") &&
                   strcmp(text + bytes - 8, ": null\n}") == 0);
    g2z_release(&t->services, text);
  }
}
/* ----- config ------------------------------------------------------------ */

static void test_config_checks(g2z_test *t) {
  g2z_services *s = &t->services;
  g2z_model_config model;
  CHECK_OK(t, g2z_model_config_named(s, "gpt2-xl", &model));
  CHECK(t, model.layers == 48 && model.heads == 25 && model.channels == 1600);
  CHECK_STATUS(t, g2z_model_config_named(s, "gpt3", &model), G2Z_BAD_ARGUMENT, s, "gpt2-medium");
  static const g2z_model_config wanted[][2] = { /* in the order of its members: L, NH, C, ... */
      {{0, 0, 0, 0, 0, 0}, {48, 25, 1600, 1024, 50257, 50256}},
      {{2, 0, 320, 0, 0, 0}, {2, 5, 320, 1024, 50257, 50256}},
      {{0, 0, 32, 0, 99, 0}, {2, 1, 32, 1024, 99, 50256}},
      {{0, 2, 0, 8, 0, 0}, {2, 2, 32, 8, 99, 50256}},
      {{0, 8, 640, 0, 0, 0}, {2, 8, 640, 8, 99, 50256}}};
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) { /* each on top of the one before */
    g2z_model_config_override(&model, &wanted[i][0]);
    CHECK(t, memcmp(&model, &wanted[i][1], sizeof model) == 0);
  }
  model = g2z_model_config_default();
  CHECK_OK(t, g2z__model_config_check(s, &model));
  model.heads = 7;
  CHECK_STATUS(t, g2z__model_config_check(s, &model), G2Z_BAD_ARGUMENT, s,
               "channels=768 must divide by heads=7");
  model.heads = 64; /* head size 12 */
  CHECK_STATUS(t, g2z__model_config_check(s, &model), G2Z_BAD_ARGUMENT, s, "head size of 12");
  model.heads = 4; /* head size 192 */
  CHECK_STATUS(t, g2z__model_config_check(s, &model), G2Z_BAD_ARGUMENT, s, "up to 128");
  for (model.channels = 8; model.channels < 300; model.channels++) /* a remedy is one */
    for (model.heads = 1; model.heads < 4; model.heads++) {
      if (model.channels % model.heads || g2z__model_config_check(s, &model) == G2Z_OK) continue;
      g2z_model_config advised = model;
      const char *channels = strstr(s->error, "with channels="), *heads = strrchr(s->error, '=');
      if (channels) advised.channels = atoi(channels + strlen("with channels="));
      if (heads) advised.heads = atoi(heads + 1);
      CHECK_OK(t, g2z__model_config_check(s, &advised));
    }
  model = g2z_model_config_default();
  model.layers = 0;
  CHECK_STATUS(t, g2z__model_config_check(s, &model), G2Z_BAD_ARGUMENT, s, "layers=0");

  g2z_train_config config;
  memset(&config, 0, sizeof config);
  CHECK_STATUS(t, g2z__train_config_check(s, &config), G2Z_BAD_ARGUMENT, s, "never initialised");
  config = g2z_train_config_default();
  CHECK_OK(t, g2z__train_config_check(s, &config));
  config.seq = 2048;
  CHECK_STATUS(t, g2z__train_config_check(s, &config), G2Z_BAD_ARGUMENT, s, "context=1024");
#define REFUSED(member, value, part)                                                          \
  config = g2z_train_config_default();                                                        \
  config.member = value;                                                                      \
  CHECK_STATUS(t, g2z__train_config_check(s, &config), G2Z_BAD_ARGUMENT, s, part)
  REFUSED(batch, 0, "batch=0");
  REFUSED(batch, 1 << 20, "2^28 tokens");
  REFUSED(accum, -1, "accum=-1");
  REFUSED(optimizer.lr, NAN, "lr=");
  REFUSED(optimizer.lr, -1.0f, "lr=-1");
  REFUSED(optimizer.min_lr, 1.0f, "min_lr=1");
  REFUSED(optimizer.beta2, 1.0f, "beta2=1");
  REFUSED(optimizer.eps, 0.0f, "eps=0");
  REFUSED(optimizer.clip, INFINITY, "clip=inf");
  REFUSED(optimizer.schedule, G2Z_SCHEDULE_COUNT, "schedule=4");
  REFUSED(optimizer.steps, 0, "steps=0");
  REFUSED(optimizer.loss_scale, 0.5f, "loss_scale=0.5");
  REFUSED(dropout, 1.0f, "dropout=1");
  REFUSED(zero_stage, 4, "zero_stage=4");
  REFUSED(strategy, G2Z_STRATEGY_COUNT, "strategy=2");
  REFUSED(strategy, G2Z_STRATEGY_DP, "strategy=dp keeps one optimizer, on rank 0");
  REFUSED(recompute, G2Z_RECOMPUTE_COUNT, "recompute=2");
  REFUSED(graph, 3, "graph=3");
#undef REFUSED
  config = g2z_train_config_default();
  config.model.heads = 16;
  config.model.channels = 1024;
  config.model.context = config.seq = 32769;
  CHECK_OK(t, g2z__train_config_check(s, &config));
  config.dropout = 0.1f;
  CHECK_STATUS(t, g2z__train_config_check(s, &config), G2Z_BAD_ARGUMENT, s,
               "heads=16 x seq=32769 x seq is 17180917776");
  config.seq = 32768; /* 2^34 scores: the last four have the last number of 32 bits */
  CHECK_OK(t, g2z__train_config_check(s, &config));
}

static void test_schedules(g2z_test *t) {
  g2z_optimizer_config c = g2z_train_config_default().optimizer;
  c.lr = 1.0f;
  c.min_lr = 0.1f;
  c.warmup = 10;
  c.steps = 110;
  for (int s = 0; s < G2Z_SCHEDULE_COUNT; s++) {
    c.schedule = (g2z_schedule)s;
    CHECK_NEAR(t, g2z_schedule_lr(&c, 0), 0.1, 1e-7); /* the first step of warm-up moves */
    CHECK_NEAR(t, g2z_schedule_lr(&c, 9), 1.0, 1e-7);
    CHECK_NEAR(t, g2z_schedule_lr(&c, 10), 1.0, 1e-7);
    CHECK_NEAR(t, g2z_schedule_lr(&c, 110), s == G2Z_SCHEDULE_CONSTANT ? 1.0 : 0.1, 1e-7);
    CHECK_NEAR(t, g2z_schedule_lr(&c, 5000), s == G2Z_SCHEDULE_CONSTANT ? 1.0 : 0.1, 1e-7);
  }
  c.schedule = G2Z_SCHEDULE_COSINE;
  CHECK_NEAR(t, g2z_schedule_lr(&c, 60), 0.55, 1e-6);
  CHECK_NEAR(t, g2z_schedule_lr(&c, 35), 0.1 + 0.9 * 0.5 * (1 + sqrt(0.5)), 1e-6);
  c.schedule = G2Z_SCHEDULE_LINEAR;
  CHECK_NEAR(t, g2z_schedule_lr(&c, 35), 0.1 + 0.9 * 0.75, 1e-6);
  c.schedule = G2Z_SCHEDULE_WSD;
  CHECK_NEAR(t, g2z_schedule_lr(&c, 90), 1.0, 1e-6);
  CHECK_NEAR(t, g2z_schedule_lr(&c, 100), 0.55, 1e-6);
  c.warmup = 0;
  CHECK_NEAR(t, g2z_schedule_lr(&c, 0), 1.0, 1e-7);
}

/* Vectors of the Random123 distribution (kat_vectors, philox4x32 10). */
static void test_philox(g2z_test *t) {
  uint32_t counter[4] = {0, 0, 0, 0}, out[4];
  uint32_t mixed = (uint32_t)G2Z_RANDOM_INIT * 0x85ebca6bu; /* undo the stream: key 0 */
  g2z_philox((uint64_t)mixed << 32, G2Z_RANDOM_INIT, counter, out);
  CHECK(t, out[0] == 0x6627e8d5u && out[1] == 0xe169c58du);
  CHECK(t, out[2] == 0xbc57ac4cu && out[3] == 0x9b00dbd8u);
  for (int i = 0; i < 4; i++) counter[i] = 0xffffffffu;
  g2z_philox(((uint64_t)(0xffffffffu ^ mixed) << 32) | 0xffffffffu, G2Z_RANDOM_INIT, counter, out);
  CHECK(t, out[0] == 0x408f276du && out[1] == 0x41c83b0eu);
  CHECK(t, out[2] == 0xa20bc7c6u && out[3] == 0x6d5451fdu);
  CHECK(t, g2z_uniform(0) == 0.0f && g2z_uniform(0xffffffffu) < 1.0f);
}
