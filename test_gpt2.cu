/* gpt2_zero tests: one table at the end of this file. `./test_gpt2 --list` shows it, `./test_gpt2
 * NAME...` runs some of it. The last line of a run is "N passed, N failed, N skipped". */

#ifndef G2Z_TEST_NO_IMPLEMENTATION
#define GPT2_ZERO_IMPLEMENTATION
#endif
#include "gpt2_zero.h"
#include "extras/g2z_report.h"
#include "extras/g2z_run.h"
#include "extras/g2z_text.h"

#include <arpa/inet.h>
#include <ftw.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* ----- harness ---------------------------------------------------------- */

typedef struct g2z_test {
  const char *name;
  g2z_services services;
  char directory[256];   /* an empty directory of this test, removed when it ends */
  char skip[160];        /* why it was skipped; empty: it ran */
  int checks, failures;
  long allocations;      /* blocks that are live now */
  long fail_at;          /* > 0: the allocation that many calls from now fails, and all after it */
  g2z_plan *plans[2];    /* the last two of test_plan */
} g2z_test;

static void *test_allocate(void *user, size_t bytes) {
  g2z_test *t = (g2z_test *)user;
  if (t->fail_at > 0 && --t->fail_at == 0) {
    t->fail_at = 1; /* stays exhausted: retries must not hide a failure */
    return NULL;
  }
  void *memory = malloc(bytes);
  if (memory) __atomic_add_fetch(&t->allocations, 1, __ATOMIC_RELAXED);
  return memory;
}

static void test_release(void *user, void *memory) {
  g2z_test *t = (g2z_test *)user;
  __atomic_sub_fetch(&t->allocations, 1, __ATOMIC_RELAXED);
  free(memory);
}

G2Z_PRINTF(4, 5)
static void test_fail(g2z_test *t, const char *file, int line, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (t->failures < 10) {
    printf("    %s:%d: ", file, line);
    vprintf(format, arguments);
    printf("\n");
  }
  va_end(arguments);
  t->failures++;
}

#define CHECK(t, condition)                                                       \
  do {                                                                            \
    (t)->checks++;                                                                \
    if (!(condition)) test_fail(t, __FILE__, __LINE__, "not true: %s", #condition); \
  } while (0)

#define CHECK_NEAR(t, got, want, tolerance)                                                    \
  do {                                                                                         \
    double got_ = (got), want_ = (want), tolerance_ = (tolerance);                             \
    (t)->checks++;                                                                             \
    if (!(fabs(got_ - want_) <= tolerance_)) /* NaN fails */                                   \
      test_fail(t, __FILE__, __LINE__, "%s is %.9g, expected %.9g within %.3g", #got, got_, want_, \
                tolerance_);                                                                   \
  } while (0)

/* The call returns `want`, and its sentence contains `part` (NULL: any). */
#define CHECK_STATUS(t, call, want, owner, part) \
  test_status(t, __FILE__, __LINE__, #call, call, want, owner, part)
static void test_status(g2z_test *t, const char *file, int line, const char *text, g2z_status got,
                        g2z_status want, const g2z_services *services, const char *part) {
  t->checks++;
  if (got != want)
    test_fail(t, file, line, "%s returned \"%s\" (%s), expected \"%s\"", text,
              g2z_status_text(got), got ? services->error : "", g2z_status_text(want));
  else if (part && !strstr(services->error, part))
    test_fail(t, file, line, "%s said \"%s\", which lacks \"%s\"", text, services->error, part);
}
#define CHECK_OK(t, call) test_status(t, __FILE__, __LINE__, #call, call, G2Z_OK, &(t)->services, NULL)

#define SKIP(t, reason)                                     \
  do {                                                      \
    snprintf((t)->skip, sizeof(t)->skip, "%s", reason);     \
    return;                                                 \
  } while (0)

/* "DIRECTORY/name" in a buffer that the next three calls leave alone. */
static const char *test_path(const g2z_test *t, const char *name) {
  static char paths[4][512];
  static int turn;
  char *path = paths[turn++ % 4];
  snprintf(path, 512, "%.250s/%.250s", t->directory, name);
  return path;
}

static void test_write_file(g2z_test *t, const char *path, const void *bytes, size_t count) {
  FILE *file = fopen(path, "wb");
  CHECK(t, file != NULL);
  if (!file) return;
  CHECK(t, fwrite(bytes, 1, count, file) == count);
  CHECK(t, fclose(file) == 0);
}


/* ----- files ------------------------------------------------------------- */

/* How many entries the test's directory, or a directory in it, holds. */
static int test_files_count(const g2z_test *t, const char *below) {
  char pattern[600];
  snprintf(pattern, sizeof pattern, "%.250s/%.250s*", t->directory, below);
  glob_t found;
  memset(&found, 0, sizeof found);
  int count = glob(pattern, 0, NULL, &found) == 0 ? (int)found.gl_pathc : 0;
  globfree(&found);
  return count;
}

static int test_files_equal(g2z_test *t, const char *path, const void *bytes, size_t count) {
  char *text;
  size_t size;
  if (g2z_read_file(&t->services, path, SIZE_MAX / 2, &text, &size) != G2Z_OK) return 0;
  int equal = size == count && memcmp(text, bytes, count) == 0;
  g2z_release(&t->services, text);
  return equal;
}

/* Changes one byte of a file in place. */
static void test_files_poke(g2z_test *t, const char *path, size_t offset, int byte) {
  char value = (char)byte;
  int file = open(path, O_WRONLY);
  CHECK(t, file >= 0 && pwrite(file, &value, 1, (off_t)offset) == 1);
  close(file);
}

static void test_files_writer(g2z_test *t) {
  /* Puts around the buffer's size, text across its end, and a patch, against the same in memory. */
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
  CHECK_OK(t, g2z_writer_patch(writer, 65530, "PATCHED ACROSS", 14));
  CHECK_OK(t, g2z_writer_patch(writer, BYTES - 3, "END", 3));
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
  g2z__log(services, G2Z_LOG_INFO, "%s", "n\033[2J\xc2\x9b" "2J\xc2\xa0");
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
  g2z_run_facts facts;
  g2z_events *events;
  const char *unnamed = "cannot open the directory \"\": No such file";
  CHECK_STATUS(t, g2z_weights_config(services, "", &model), G2Z_IO, services, unnamed);
  CHECK_STATUS(t, g2z_report_run(services, ""), G2Z_IO, services, unnamed);
  CHECK_STATUS(t, g2z_profile_run(services, ""), G2Z_IO, services, unnamed);
  CHECK_STATUS(t, g2z_run_facts_read(services, "", &facts), G2Z_IO, services, unnamed);
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

/* A pipe has no size: the reader grows its block until the end. */
/* What stands where a file is read or written, and is none: a FIFO, to which nobody writes, would be
 * waited for, and a link leads to a file that nobody named. */
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
  CHECK_STATUS(t, g2z_writer_create(services, path, &writer), G2Z_IO, services, "file.partial: No such device or address; it is a FIFO");
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

/* Limits the size of files for as long as a full disk is played. */
static struct rlimit test_files_limit(rlim_t bytes) {
  struct rlimit before, now;
  getrlimit(RLIMIT_FSIZE, &before);
  now = before;
  now.rlim_cur = bytes;
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &now);
  return before;
}

static void test_files_unlimit(const struct rlimit *before) {
  setrlimit(RLIMIT_FSIZE, before);
  signal(SIGXFSZ, SIG_DFL);
}

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
  CHECK_STATUS(t, g2z_writer_patch(writer, 0, "x", 1), G2Z_IO, services, "cannot write");
  services->error[0] = 0;
  CHECK_STATUS(t, g2z_writer_commit(writer), G2Z_IO, services, path);
  g2z_writer_free(writer);

  /* What fails only when the buffer is flushed fails in the commit. */
  test_files_limit(5000);
  CHECK_OK(t, g2z_writer_create(services, path, &writer));
  CHECK_OK(t, g2z_writer_put(writer, block, sizeof block));
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
    CHECK(t, done ? n > 5 : n < 20);
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
    const char *lone = (const char *)g2z_json_lone_surrogate(&text);
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
    g2z_json_put_null(&out, "key \"\n");
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
  CHECK_OK(t, g2z_model_config_check(s, &model));
  model.heads = 7;
  CHECK_STATUS(t, g2z_model_config_check(s, &model), G2Z_BAD_ARGUMENT, s,
               "channels=768 must divide by heads=7");
  model.heads = 64; /* head size 12 */
  CHECK_STATUS(t, g2z_model_config_check(s, &model), G2Z_BAD_ARGUMENT, s, "head size of 12");
  model.heads = 4; /* head size 192 */
  CHECK_STATUS(t, g2z_model_config_check(s, &model), G2Z_BAD_ARGUMENT, s, "up to 128");
  for (model.channels = 8; model.channels < 300; model.channels++) /* a remedy is one */
    for (model.heads = 1; model.heads < 4; model.heads++) {
      if (model.channels % model.heads || g2z_model_config_check(s, &model) == G2Z_OK) continue;
      g2z_model_config advised = model;
      const char *channels = strstr(s->error, "with channels="), *heads = strrchr(s->error, '=');
      if (channels) advised.channels = atoi(channels + strlen("with channels="));
      if (heads) advised.heads = atoi(heads + 1);
      CHECK_OK(t, g2z_model_config_check(s, &advised));
    }
  model = g2z_model_config_default();
  model.layers = 0;
  CHECK_STATUS(t, g2z_model_config_check(s, &model), G2Z_BAD_ARGUMENT, s, "layers=0");

  g2z_train_config config;
  memset(&config, 0, sizeof config);
  CHECK_STATUS(t, g2z_train_config_check(s, &config), G2Z_BAD_ARGUMENT, s, "never initialised");
  config = g2z_train_config_default();
  CHECK_OK(t, g2z_train_config_check(s, &config));
  config.seq = 2048;
  CHECK_STATUS(t, g2z_train_config_check(s, &config), G2Z_BAD_ARGUMENT, s, "context=1024");
#define REFUSED(member, value, part)                                                          \
  config = g2z_train_config_default();                                                        \
  config.member = value;                                                                      \
  CHECK_STATUS(t, g2z_train_config_check(s, &config), G2Z_BAD_ARGUMENT, s, part)
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
  CHECK_OK(t, g2z_train_config_check(s, &config));
  config.dropout = 0.1f;
  CHECK_STATUS(t, g2z_train_config_check(s, &config), G2Z_BAD_ARGUMENT, s,
               "heads=16 x seq=32769 x seq is 17180917776");
  config.seq = 32768; /* 2^34 scores: the last four have the last number of 32 bits */
  CHECK_OK(t, g2z_train_config_check(s, &config));
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

/* ----- plan -------------------------------------------------------------- */

static g2z_train_config test_config_of(int layers, int heads, int channels, int context, int vocab) {
  g2z_train_config config = g2z_train_config_default();
  config.model.layers = layers;
  config.model.heads = heads;
  config.model.channels = channels;
  config.model.context = context;
  config.model.vocab = vocab;
  config.seq = context;
  config.batch = 2;
  return config;
}

/* The plan of a config, which is there until the next but one is made. */
static const g2z_plan *test_plan(g2z_test *t, const g2z_train_config *config,
                                 g2z_device_kind device, int rank, int world) {
  g2z_plan_free(t->plans[0]);
  t->plans[0] = t->plans[1];
  CHECK_OK(t, g2z_plan_create(&t->services, config, device, rank, world, &t->plans[1]));
  return t->plans[1];
}

static void test_plan_of_published_models(g2z_test *t) {
  static const struct { const char *name; size_t parameters; } known[] = {
      {"gpt2", 124439808}, {"gpt2-medium", 354823168}, {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200}};
  for (int i = 0; i < 4; i++) {
    g2z_train_config config = g2z_train_config_default();
    const g2z_plan *plan;
    CHECK_OK(t, g2z_model_config_named(&t->services, known[i].name, &config.model));
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
    CHECK(t, plan->parameters == known[i].parameters);
    CHECK(t, plan->vocab_padded == 50304);
  }
}

/* Tensors tile the canonical space in order; in memory units follow each other and each starts as
 * the plan promises; two units that take turns never lie where wte's gradient lies. */
static void test_plan_units(g2z_test *t, const g2z_plan *plan) {
  size_t at = 0, memory = 0, grain = 8 * (size_t)plan->world;
  for (int unit = 0; unit < plan->units; unit++) {
    size_t begin = at;
    CHECK(t, plan->unit[unit].canonical == at && plan->unit[unit].begin == memory);
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      g2z_param_info info = g2z_param_describe(&plan->model, (g2z_param)p);
      if (info.unit != plan->unit[unit].kind) continue;
      CHECK(t, plan->offset[p] == at - begin);
      at += info.elements;
    }
    int wte = unit == plan->wte;
    size_t room = wte ? (size_t)plan->vocab_padded * (size_t)plan->model.channels : at - begin;
    memory += room;
    if (plan->zero_stage >= 2 || unit == plan->wpe)
      memory = (memory + grain - 1) / grain * grain;
    size_t grad = plan->unit[unit].grad_at, last = plan->unit[plan->units - 1].grad_at;
    CHECK(t, grad + room <= plan->grad_elements && (wte || grad + room <= last));
    CHECK(t, plan->zero_stage < 2 || unit < 2 || wte || grad == plan->unit[unit - 2].grad_at);
  }
  CHECK(t, at == plan->parameters && plan->elements >= memory &&
               plan->elements < memory + grain);
  int units_end = 0;
  for (int k = 0; k < plan->buckets; k++) { /* each lies inside one unit, from stage 2 on; wte's do
                                             * in any stage */
    g2z_bucket bucket = plan->bucket[k];
    size_t end = bucket.begin + bucket.elements;
    while (units_end < plan->units - 1 && plan->unit[units_end + 1].begin <= bucket.begin)
      units_end++;
    size_t unit_end = units_end == plan->units - 1 ? plan->elements
                                                   : plan->unit[units_end + 1].begin;
    if (plan->zero_stage < 2 && units_end < plan->units - 1)
      unit_end = plan->unit[plan->units - 1].begin;
    CHECK(t, bucket.elements <= plan->bucket_elements && end <= unit_end);
    CHECK(t, plan->zero_stage < 2 ||
                 plan->bucket[k].grad_at - plan->unit[units_end].grad_at ==
                     bucket.begin - plan->unit[units_end].begin);
  }
}

/* The parameters' buffer is tiled by the units' places and by this rank's slices of the units that
 * take turns; a bucket is gathered to where its unit is read. */
static void test_plan_params(g2z_test *t, const g2z_plan *plan) {
  int turns = plan->zero_stage == 3 && plan->world > 1, L = plan->model.layers, unit = 0;
  unsigned char *held = (unsigned char *)calloc(plan->param_elements, 1);
  size_t wrong = 0;
  for (int u = 0; u < plan->units; u++) {
    size_t begin = plan->unit[u].begin, place = plan->unit[u].param_at;
    size_t end = u == plan->units - 1 ? plan->elements : plan->unit[u + 1].begin;
    int turning = turns && u >= 1 && u <= L;
    CHECK(t, turning || turns || place == begin);
    CHECK(t, !turning || u < 3 || place == plan->unit[u - 2].param_at);
    CHECK(t, place + (end - begin) <= plan->param_elements);
    for (size_t i = 0; i < end - begin && (!turning || u < 3); i++) held[place + i]++;
  }
  for (size_t i = 0; turns && L == 1 && i < plan->unit[2].begin - plan->unit[1].begin; i++)
    held[plan->unit[1].begin + i]++; /* of two places one block takes the second */
  for (int k = 0; k < plan->buckets; k++) {
    g2z_bucket bucket = plan->bucket[k];
    while (unit < plan->units - 1 && plan->unit[unit + 1].begin <= bucket.begin) unit++;
    size_t to = plan->bucket[k].param_at, from = plan->bucket[k].own_param_at;
    CHECK(t, from % 8 == 0 && to % 8 == 0);
    CHECK(t, to - plan->unit[unit].param_at == bucket.begin - plan->unit[unit].begin);
    if (turns && unit >= 1 && unit <= L)
      for (size_t i = 0; i < bucket.own_elements; i++) held[from + i]++;
    else CHECK(t, from - to == bucket.own_begin - bucket.begin);
  }
  for (size_t i = 0; i < plan->param_elements; i++) wrong += held[i] != 1;
  CHECK(t, wrong == 0);
  free(held);
}

/* Slices of all ranks tile the memory; shards have no holes; updates cover each parameter once,
 * with its own decay, and no padding. */
static void test_plan_tiles(g2z_test *t) {
  static const int worlds[] = {1, 2, 3, 4, 9, 13};
  static const double buckets[] = {0, 0.001, 0.01, 1, 0.00005};
  g2z_train_config config = test_config_of(3, 2, 48, 24, 131);
  for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
    for (size_t b = 0; b < sizeof buckets / sizeof *buckets; b++)
      for (int column = 0; column <= 4; column++) { /* the last is strategy dp */
        int stage = column % 4, dp = column == 4;
        config.zero_stage = stage;
        config.strategy = dp ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
        config.bucket_mb = buckets[b];
        config.model.layers = 1 + (stage + (int)b) % 4;
        if (b == 4) config.model.channels = 8, config.model.heads = 1; /* as small as can be */
        else config.model.channels = 48, config.model.heads = 2;
        const g2z_plan *plan;
        plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, worlds[w]);
        test_plan_units(t, plan);
        unsigned char *seen = (unsigned char *)calloc(plan->elements, 1);
        unsigned char *named = (unsigned char *)calloc(plan->parameters, 1);
        size_t updated = 0;
        for (int rank = 0; rank < (column == 0 ? 1 : worlds[w]); rank++) {
          plan = test_plan(t, &config, G2Z_DEVICE_CPU, rank, worlds[w]);
          test_plan_params(t, plan);
          size_t shard = 0;
          for (int k = 0; k < plan->buckets; k++) {
            g2z_range slice = {plan->bucket[k].own_begin, plan->bucket[k].own_elements};
            CHECK(t, slice.begin % 8 == 0 && slice.elements % 8 == 0);
            CHECK(t, plan->bucket[k].shard_at == shard);
            CHECK(t, slice.elements > 0 || (dp && rank > 0));
            shard += slice.elements;
            for (size_t i = 0; i < slice.elements; i++) seen[slice.begin + i]++;
          }
          CHECK(t, shard == plan->shard_elements);
          CHECK(t, (plan->bytes[G2Z_MEMORY_OPTIMIZER] > 0) == (shard > 0));
          const g2z_update_range *ranges = plan->update;
          CHECK(t, (plan->updates == 0 || shard > 0) &&
                       plan->updates <= g2z__plan_updates_limit(plan));
          for (size_t i = 0, k = 0; i < plan->updates; i++) {
            while ((int)k + 1 < plan->buckets &&
                   plan->bucket[k + 1].shard_at <= ranges[i].shard)
              k++;
            g2z_range slice = {plan->bucket[k].own_begin, plan->bucket[k].own_elements};
            size_t inside = ranges[i].shard - plan->bucket[k].shard_at;
            size_t memory = slice.begin + inside;
            CHECK(t, column == 0 || worlds[w] == 1 || /* what is sent by buckets is cut by them */
                         inside + ranges[i].elements <= slice.elements);
            for (size_t e = 0; e < ranges[i].elements; e++) {
              seen[memory + e] |= 0x80;
              named[ranges[i].canonical + e]++;
            }
            CHECK(t, ranges[i].grad == (stage < 2 ? memory : ranges[i].shard));
            CHECK(t, ranges[i].param == plan->bucket[k].own_param_at + inside);
            updated += ranges[i].elements;
            CHECK(t, ranges[i].shard + ranges[i].elements <= plan->shard_elements);
            CHECK(t, i == 0 || (inside == 0 && column > 0 && worlds[w] > 1) ||
                         ranges[i].decay != ranges[i - 1].decay ||
                         ranges[i].param != ranges[i - 1].param + ranges[i - 1].elements ||
                         ranges[i].shard != ranges[i - 1].shard + ranges[i - 1].elements ||
                         ranges[i].canonical != ranges[i - 1].canonical + ranges[i - 1].elements);
          }
        }
        CHECK(t, updated == plan->parameters);
        size_t wrong = 0, unseen = 0;
        for (size_t i = 0; i < plan->elements; i++) {
          wrong += (seen[i] & 0x7f) != 1;
          unseen += seen[i] == 0x01;
        }
        for (size_t i = 0; i < plan->parameters; i++) wrong += named[i] != 1;
        CHECK(t, wrong == 0 && unseen == plan->elements - plan->parameters);
        free(seen);
        free(named);
      }
}

/* What completes last is cut small: of GPT-2 124M in fp16 64 MiB, 32, 16 and 8 before wte. Where
 * that goes whole at the end, it goes in pieces of at most 16 MiB, but in fp32 in buckets of the
 * full size, as where its embedding's part goes as rows: of up to 33,536 tokens. */
static void test_plan_last_buckets(g2z_test *t) {
  g2z_train_config config = g2z_train_config_default();
  config.dtype = G2Z_FP16;
  config.seq = 16;
  for (int i = 0; i < 4; i++) {
    const g2z_plan *plan;
    int accum = 1 + i % 2, rows = i / 2;
    size_t most = accum == 1 && !rows ? 16 << 20 : 64 << 20, size = 8 << 20;
    config.accum = accum;
    config.batch = rows ? 524 : 525; /* a rank's 8,384 tokens, or 8,400 */
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 4);
    CHECK(t, plan->wte_rows == rows);
    size_t wte = plan->unit[plan->wte].begin, bytes = (size_t)plan->grad_bytes;
    int bucket = plan->buckets - 1;
    for (; plan->bucket[bucket].begin > wte; bucket--)
      CHECK(t, plan->bucket[bucket].elements * bytes == most);
    CHECK(t, plan->bucket[bucket].begin == wte);
    CHECK(t, plan->bucket[bucket].elements * bytes < most); /* what is odd */
    for (; --bucket > 0; size = size < 64 << 20 ? 2 * size : size)
      CHECK(t, plan->bucket[bucket].elements * bytes == size);
    CHECK(t, bucket == 0 && plan->bucket[0].elements * bytes < size);
  }
}

/* The head takes all tokens at once where logits are small beside activations, whatever the batch;
 * else 8,192. A larger batch never needs less memory. */
static void test_plan_head(g2z_test *t) {
  for (int i = 0; i < 4; i++) { /* 124M with and without recomputation; medium; many words */
    size_t before = 0;
    for (int batch = 1; batch <= 80; batch++) {
      g2z_train_config config = g2z_train_config_default();
      config.dtype = G2Z_FP16;
      config.batch = batch;
      if (i == 1) config.recompute = G2Z_RECOMPUTE_BLOCK;
      if (i == 2) config.model.layers = 24, config.model.channels = 1024, config.model.heads = 16;
      if (i == 3) config.model.vocab = 131072;
      int most = i % 2 ? 8192 : 65536;
      const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
      CHECK(t, plan->head_chunk == (batch * 1024 < most ? batch * 1024 : most));
      CHECK(t, plan->bytes_total > before);
      before = plan->bytes_total;
      plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
      CHECK(t, plan->head_chunk == 256);
    }
  }
}

/* The LM head's part of wte's gradient is rounded at once where it is all in one chunk of one
 * micro-step, and then needs no memory of its own. */
static void test_plan_wte_gradient(g2z_test *t) {
  static const struct {
    int world, accum, batch, alone;
  } cases[] = {{1, 1, 2, 1}, {1, 1, 32, 1}, {1, 1, 33, 0}, {1, 2, 2, 0}, {2, 1, 2, 1}, {2, 2, 2, 0},
               {12, 1, 4, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_train_config config = g2z_train_config_default();
    config.dtype = G2Z_FP16;
    config.accum = cases[i].accum;
    config.batch = cases[i].batch;
    const g2z_plan *plan;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, cases[i].world);
    size_t words = (size_t)plan->vocab_padded * (size_t)plan->model.channels;
    size_t logits = (size_t)plan->head_chunk * (size_t)plan->vocab_padded * 2;
    int apart = plan->dwte_dtype != plan->grad_dtype;
    CHECK(t, (plan->dwte_dtype == G2Z_FP16) == cases[i].alone);
    CHECK(t, plan->bytes[G2Z_MEMORY_HEAD] == logits + (apart ? words * 4 : 0));
  }
}

/* A GPU records steps of any size as graphs, unless it is told not to; a CPU has none. */
static void test_plan_graphs(g2z_test *t) {
  for (int batch = 1; batch <= 32; batch *= 32)
    for (int graph = 0; graph <= 2; graph++) {
      g2z_train_config config = g2z_train_config_default();
      config.batch = batch;
      config.graph = graph;
      const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
      CHECK(t, plan->graphed == (graph > 0));
      if (graph == 1) continue; /* refused by the trainer */
      plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
      CHECK(t, plan->graphed == 0);
    }
}

/* What a rank holds of large models on 8 GPUs, from the formulas of the manual: a difference is the
 * units' padding. */
static void test_plan_bytes(g2z_test *t) {
  static const int shapes[2][3] = {{48, 25, 1600}, {32, 32, 4096}};
  for (int i = 0; i < 2; i++)
    for (int stage = 0; stage <= 3; stage++) {
      g2z_train_config config = g2z_train_config_default();
      const g2z_plan *plan;
      config.model.layers = shapes[i][0];
      config.model.heads = shapes[i][1];
      config.model.channels = shapes[i][2];
      config.dtype = i ? G2Z_BF16 : G2Z_FP16;
      config.zero_stage = stage;
      plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 5, 8);
      double C = shapes[i][2], L = shapes[i][0], Vp = 50304, block = 12 * C * C + 13 * C, N = 8;
      double stays = 2 * C + 1024 * C + Vp * C, P = L * block + stays, padding = 64 * (L + 3);
      double params = stage < 3 ? P : L * block / N + 2 * block + stays;
      double grads = stage < 2 ? P : P / N + 2 * block + Vp * C, optimizer = stage ? P / N : P;
      double inbox = stage ? 2 * (double)plan->bucket_elements * (N - 1) / N : 0;
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_PARAMS], 2 * params, 2 * padding + 256);
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_GRADS], 2 * (grads + inbox), 2 * padding + 512);
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_OPTIMIZER], 12 * optimizer, 12 * padding + 768);
      size_t symmetric = g2z_plan_nccl_bytes(plan); /* of 8 x 8 x 1024 tokens, that is many */
      CHECK(t, plan->gather == (stage ? G2Z_GATHER_SYMMETRIC : G2Z_GATHER_PLAIN));
      config.batch = 2;
      plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 5, 8);
      CHECK(t, plan->gather == (stage ? G2Z_GATHER_COPY : G2Z_GATHER_PLAIN));
      CHECK(t, (g2z_plan_nccl_bytes(plan) < symmetric) == (stage > 0));
    }
}

static void test_plan_update_decay(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 8, 8, 10);
  const g2z_plan *plan;
  plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
  size_t decayed = 0;
  for (size_t i = 0; i < plan->updates; i++)
    if (plan->update[i].decay) decayed += plan->update[i].elements;
  CHECK(t, decayed == 12 * 8 * 8 + 8 * 8 + 10 * 8); /* four matrices, wpe, wte */
}

static void test_plan_largest_batch(g2z_test *t) {
  int largest[4];
  for (int i = 0; i < 4; i++) { /* alone, and on four GPUs, where NCCL takes something too */
    g2z_train_config config = g2z_train_config_default();
    const g2z_plan *plan;
    int world = i < 2 ? 1 : 4;
    config.recompute = i % 2 ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, world);
    size_t budget = (size_t)40 << 30;
    CHECK(t, (g2z_plan_nccl_bytes(plan) > 0) == (world > 1));
    config.batch = largest[i] = g2z_plan_largest_batch(plan, budget);
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, world);
    CHECK(t, plan->bytes_total + g2z_plan_nccl_bytes(plan) <= budget);
    config.batch = largest[i] + 1;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, world);
    CHECK(t, plan->bytes_total + g2z_plan_nccl_bytes(plan) > budget);
    CHECK(t, g2z_plan_largest_batch(plan, 1 << 20) == 0);
  }
  CHECK(t, largest[1] > 2 * largest[0] && largest[3] > 2 * largest[2]);
  for (int gather = 0; gather < G2Z_GATHER_COUNT; gather++)
    for (int batch = 1; batch <= 32; batch *= 2) { /* what a batch needs is enough for it and no */
      g2z_train_config config = g2z_train_config_default(); /* more, whatever batch asks */
      const g2z_plan *plan, *other;
      config.dtype = G2Z_FP16;
      config.gather = (g2z_gather)gather;
      config.batch = batch;
      plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 8);
      size_t needs = plan->bytes_total + g2z_plan_nccl_bytes(plan);
      for (config.batch = 1; config.batch <= 64; config.batch *= 8) {
        other = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 8);
        CHECK(t, g2z_plan_largest_batch(other, needs) == batch);
        CHECK(t, g2z_plan_largest_batch(other, needs - 1) == batch - 1);
      }
    }
  g2z_train_config tiny = test_config_of(1, 1, 8, 1, 2); /* what fits must be allowed too */
  const g2z_plan *plan;
  plan = test_plan(t, &tiny, G2Z_DEVICE_CUDA, 0, 1);
  tiny.batch = g2z_plan_largest_batch(plan, SIZE_MAX);
  CHECK_OK(t, g2z_train_config_check(&t->services, &tiny));
}

/* The bytes per token that the manual states, of fp16; these sizes need no padding. */
static void test_plan_recompute(g2z_test *t) {
  g2z_train_config config = g2z_train_config_default();
  config.dtype = G2Z_FP16;
  for (int i = 0; i < 2; i++) {
    const g2z_plan *plan;
    config.recompute = i ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
    size_t N = (size_t)plan->batch * (size_t)plan->seq, C = 768, L = 12, NH = 12;
    size_t token = i ? 2 * L * C + 44 * C + 4 * NH + 28 : L * (32 * C + 4 * NH + 16) + 14 * C + 12;
    CHECK(t, plan->bytes[G2Z_MEMORY_ACTIVATIONS] == N * token);
    /* No two buffers that live at the same time share a byte. */
    unsigned char *owner = (unsigned char *)calloc(plan->bytes[G2Z_MEMORY_ACTIVATIONS] / 256, 1);
    size_t twice = 0;
    for (int layer = 0; layer < (int)L; layer++)
      for (int which = 0; which < G2Z__ACT_COUNT; which++) {
        int stream = which == G2Z__ACT_RES3, once = which == G2Z__ACT_EMBED || which >= G2Z__ACT_LNF;
        if (layer > 0 && (once || (i && !stream))) continue;
        size_t begin = g2z__activation_offset(plan, (g2z__activation)which, layer);
        unsigned char *block = &owner[begin / 256];
        twice += begin % 256 != 0 || *block;
        *block = 1;
      }
    CHECK(t, twice == 0);
    free(owner);
  }
}


/* ----- tokenizer --------------------------------------------------------- */

static const char test_bpe_text[] =
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season "
    "of Light, it was the season of Darkness.\n\nWe'd say it's 1859; they'll say we've 1000 or "
    "10000 chances, don't they? aaaaaaa aaaa aa! Café, cafés and naïve 東京, 東京都.    Four  "
    "spaces:\t\tand tabs.\r\n";

/* What Hugging Face's BpeTrainer (tokenizers 0.23.3) learns from test_bpe_text: 120 merges of
 * 144. */
static const char test_bpe_merges[] =
    "#version: 0.2\n"
    "Ġ t\nĠ w\na a\na s\nh e\nĠt he\ni t\nĠ o\nĠ it\nĠw as\nĠo f\ne s\n0 0\nĠ s\na n\nc h\n"
    "o n\nĠ 1\nĠ aa\na f\na g\na y\nc es\ne p\ne as\ni m\ni s\nn es\no ch\nv e\n± ä\nº ¬\n"
    "Ã ©\næ Ŀ\nĠ b\nĠ Ġ\nĠ ag\nĠ ep\nĠ æĿ\nĠt im\nĠthe y\nĠs ay\nĠs eas\nan d\nĠ1 00\n"
    "Ġaa aa\naf Ã©\nnes s\n±ä º¬\nĠag e\nĠep och\nĠæĿ ±äº¬\nĠtim es\nĠseas on\n' d\n' l\n"
    "' s\n' t\n' ve\n5 9\n8 59\nC afÃ©\nD a\nF o\nI t\nL i\nW e\na b\na Ã\na ces\nc r\n"
    "c afÃ©\nd o\nd u\nd on\ne f\ne l\ne du\nf o\ng h\nh ness\ni n\ni ef\nk ness\nl it\n"
    "l is\nn aÃ\no r\no lis\np aces\nr kness\ns t\nu r\n¯ ve\né ĥ\nč Ċ\nĠ ch\nĠ and\n"
    "Ġ CafÃ©\nĠ Da\nĠ Fo\nĠ Li\nĠ cafÃ©\nĠ don\nĠ fo\nĠ in\nĠ naÃ\nĠt ab\nĠw e\nĠw is\n"
    "Ġw or\naa a\nĠo r\nes t\nĠs paces\nan ces\nĠ1 859\nĠb el\nĠb est\nĠĠ Ġ\n";

/* A vocabulary learnt from a text; the test owns it. */
static g2z_tokenizer *test_bpe_learn(g2z_test *t, const char *text, size_t bytes, int vocab) {
  g2z_bpe_trainer *trainer = NULL;
  g2z_tokenizer *tokenizer = NULL;
  CHECK_OK(t, g2z_bpe_trainer_create(&t->services, &trainer));
  if (trainer) {
    CHECK_OK(t, g2z_bpe_trainer_feed(trainer, text, bytes));
    CHECK_OK(t, g2z_bpe_trainer_finish(trainer, vocab, &tokenizer));
  }
  g2z_bpe_trainer_free(trainer);
  return tokenizer;
}

/* The ids of a text with an encoder of its own; the test frees them. */
static g2z_tokens test_bpe_encode(g2z_test *t, const g2z_tokenizer *tokenizer, const char *text,
                                  size_t bytes, int flags) {
  g2z_encoder *encoder = NULL;
  g2z_tokens tokens;
  memset(&tokens, 0, sizeof tokens);
  CHECK_OK(t, g2z_encoder_create(&t->services, tokenizer, &encoder));
  if (encoder) CHECK_OK(t, g2z_encode(encoder, text, bytes, flags, &tokens));
  g2z_encoder_free(encoder);
  return tokens;
}

static int test_bpe_equal(const g2z_tokens *a, const g2z_tokens *b) {
  return a->count == b->count &&
         (a->count == 0 || memcmp(a->ids, b->ids, a->count * sizeof *a->ids) == 0);
}

static void test_bpe_round_trip(g2z_test *t, const g2z_tokenizer *tokenizer, const char *text,
                                size_t bytes, const char *expected, size_t expected_bytes) {
  g2z_tokens tokens = test_bpe_encode(t, tokenizer, text, bytes, G2Z_ENCODE_DEFAULT);
  char *back = NULL;
  size_t back_bytes = 0;
  CHECK_OK(t, g2z_decode(&t->services, tokenizer, tokens.ids, tokens.count, &back, &back_bytes));
  t->checks++;
  if (!back || back_bytes != expected_bytes || memcmp(back, expected, expected_bytes) != 0)
    test_fail(t, __FILE__, __LINE__, "\"%s\" comes back as \"%s\"", text, back ? back : "");
  g2z_release(&t->services, back);
  g2z_tokens_free(&tokens);
}

static uint32_t test_bpe_random(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* Text that is hard to cut: words, contractions, digits, white space of all widths, and bytes that
 * are no UTF-8. */
static size_t test_bpe_random_text(uint32_t *state, char *out, size_t limit) {
  static const char *const atoms[] = {
      " ", " ", "  ", "\n", "\r\n", "\t", "\xC2\xA0", "\xC2\x85", "\xE3\x80\x80", "\xE2\x80\xA8",
      "the", "best", "Caf\xC3\xA9", "it's", "'ll", "'", "we've", "1859", "000", "!?", "...",
      "\xE6\x9D\xB1\xE4\xBA\xAC", "\xF0\x9F\x98\x80", "\xE2\x80\x8B", "\xFF", "\xE2\x80", "\xC2",
      "\xF0\x9F", "aaaa", "a"};
  size_t bytes = 0;
  for (uint32_t n = test_bpe_random(state) % 12; n; n--) {
    const char *atom = atoms[test_bpe_random(state) % (sizeof atoms / sizeof *atoms)];
    size_t length = strlen(atom);
    if (bytes + length > limit) break;
    memcpy(out + bytes, atom, length);
    bytes += length;
  }
  return bytes;
}

/* Learning goes on until no pair is left, so that each piece is one token: the tokens of the text
 * that was learnt from are the pieces of the pattern. */
static void test_tokenizer_pieces(g2z_test *t) {
  static const char *const cases[][2] = { /* text, pieces with | between */
      {"Hello world", "Hello| world"},
      {" Hello  world ", " Hello| | world| "},
      {"a\r\nb", "a|\r|\n|b"},
      {"a\n\nb", "a|\n|\n|b"},
      {"a\n\n", "a|\n\n"},
      {"a   b", "a|  | b"},
      {"a \t b", "a| \t| b"},
      {"a \tb", "a| |\t|b"},
      {"it's don't've we'll I'd I'm you're", "it|'s| don|'t|'ve| we|'ll| I|'d| I|'m| you|'re"},
      {"it'S 'sabc ''s 's", "it|'|S| '|sabc| ''|s| '|s"},
      {"'sabc'lla'l'vx're'r", "'s|abc|'ll|a|'|l|'|vx|'re|'|r"},
      {"abc123def 4,567.89", "abc|123|def| 4|,|567|.|89"},
      {"x=(y+1)*2;", "x|=(|y|+|1|)*|2|;"},
      {"Caf\xC3\xA9 na\xC3\xAFve", "Caf\xC3\xA9| na\xC3\xAFve"},
      /* NEL, no-break, line separator and ideographic space are white space; they are no U+0020 */
      {"a\xC2\x85" "b", "a|\xC2\x85|b"},
      {"a\xC2\xA0" "b", "a|\xC2\xA0|b"},
      {"a\xE2\x80\xA8" "b", "a|\xE2\x80\xA8|b"},
      {"a \xE3\x80\x80" "b", "a| |\xE3\x80\x80|b"},
      {"a\xE3\x80\x80 b", "a|\xE3\x80\x80| b"},
      /* zero width space, byte order mark, Mongolian vowel separator and U+001C are not */
      {"a\xE2\x80\x8B" "b", "a|\xE2\x80\x8B|b"},
      {"a\xEF\xBB\xBF!", "a|\xEF\xBB\xBF!"},
      {"a\xE1\xA0\x8E\x1C", "a|\xE1\xA0\x8E\x1C"},
      /* letters and numbers of other planes, and of Unicode 16 alone: U+105C0, U+10D4A, U+1CCF0 */
      {"\xE6\x9D\xB1\xE4\xBA\xAC" "12\xD9\xA3\xC2\xBD\xE2\x85\xA7!",
       "\xE6\x9D\xB1\xE4\xBA\xAC|12\xD9\xA3\xC2\xBD\xE2\x85\xA7|!"},
      {"\xF0\x90\x97\x80\xF0\x90\xB5\x8A" "a\xF0\x9C\xB3\xB0" "5",
       "\xF0\x90\x97\x80\xF0\x90\xB5\x8A" "a|\xF0\x9C\xB3\xB0" "5"},
      {"\xF0\xA0\x80\x80\xF0\xB2\x8E\xAF\xF0\xB2\x8E\xB0",
       "\xF0\xA0\x80\x80\xF0\xB2\x8E\xAF|\xF0\xB2\x8E\xB0"},
      {"hi\xF0\x9F\x98\x80!! ok", "hi|\xF0\x9F\x98\x80!!| ok"},
      {"e\xCC\x81", "e|\xCC\x81"}, /* a combining accent is neither letter nor number */
      {"x<|endoftext|>", "x|<||endoftext||>"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *text = cases[i][0];
    g2z_tokenizer *tokenizer = test_bpe_learn(t, text, strlen(text), 2000);
    if (!tokenizer) return;
    g2z_tokens tokens = test_bpe_encode(t, tokenizer, text, strlen(text), G2Z_ENCODE_DEFAULT);
    char pieces[256];
    size_t length = 0;
    for (size_t k = 0; k < tokens.count; k++) {
      size_t bytes;
      const unsigned char *token = g2z_tokenizer_token(tokenizer, tokens.ids[k], &bytes);
      if (k) pieces[length++] = '|';
      memcpy(pieces + length, token, bytes);
      length += bytes;
    }
    pieces[length] = 0;
    t->checks++;
    if (strcmp(pieces, cases[i][1]) != 0)
      test_fail(t, __FILE__, __LINE__, "\"%s\" falls into %s", text, pieces);
    g2z_tokens_free(&tokens);
    g2z_tokenizer_free(tokenizer);
  }
}

static void test_tokenizer_bytes(g2z_test *t) {
  static const char *const invalid[][2] = { /* as Python's decode(errors="replace") */
      {"a\xFFz", "a\xEF\xBF\xBDz"},
      {"\xC2", "\xEF\xBF\xBD"},
      {"\xC0\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD"},
      {"\xE2\x80z", "\xEF\xBF\xBDz"},
      {"\xF0\x9F\x98", "\xEF\xBF\xBD"},
      {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
      {"\xF4\x90\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
      {"\xE0\x80\xE0\xA0\xE0\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xE0\xA0\x80"},
      {"\xF0\x90\x80\xC3\xA9", "\xEF\xBF\xBD\xC3\xA9"},
  };
  g2z_tokenizer *tokenizer = NULL;
  CHECK_OK(t, g2z_tokenizer_create(&t->services, NULL, &tokenizer));
  if (!tokenizer) return;
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 257 && g2z_tokenizer_eot(tokenizer) == 256);
  size_t bytes;
  int id = 0; /* GPT-2's order: what prints in Latin-1, and then the rest */
  for (int rest = 0; rest < 2; rest++)
    for (int byte = 0; byte < 256; byte++) {
      int prints = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
      if (prints == rest) continue;
      const unsigned char *single = g2z_tokenizer_token(tokenizer, id++, &bytes);
      CHECK(t, bytes == 1 && *single == byte);
    }
  const unsigned char *token = g2z_tokenizer_token(tokenizer, 256, &bytes);
  CHECK(t, bytes == 13 && memcmp(token, "<|endoftext|>", 13) == 0);
  CHECK(t, g2z_tokenizer_token(tokenizer, 257, &bytes) == NULL && bytes == 0);
  CHECK(t, g2z_tokenizer_token(tokenizer, -1, &bytes) == NULL && bytes == 0);
  for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++)
    test_bpe_round_trip(t, tokenizer, invalid[i][0], strlen(invalid[i][0]), invalid[i][1],
                        strlen(invalid[i][1]));
  test_bpe_round_trip(t, tokenizer, "a\0b", 3, "a\0b", 3);
  test_bpe_round_trip(t, tokenizer, "", 0, "", 0);

  g2z_encoder *encoder = NULL;
  g2z_tokens tokens;
  memset(&tokens, 0, sizeof tokens);
  CHECK_OK(t, g2z_encoder_create(&t->services, tokenizer, &encoder));
  CHECK_OK(t, g2z_encode(encoder, "ab", 2, G2Z_ENCODE_STRICT, &tokens));
  CHECK_STATUS(t, g2z_encode(encoder, "abc\xE2\x80", 5, G2Z_ENCODE_STRICT, &tokens), G2Z_FORMAT,
               &t->services, "byte 0xe2 at offset 3");
  CHECK(t, tokens.count == 2); /* a failed call appends nothing */
  const char special[] = "x<|endoftext|><|endoftext|>y";
  CHECK_OK(t, g2z_encode(encoder, special, strlen(special), G2Z_ENCODE_ALLOW_SPECIAL, &tokens));
  CHECK(t, tokens.count == 6 && tokens.ids[3] == 256 && tokens.ids[4] == 256);
  tokens.count = 0;
  CHECK_OK(t, g2z_encode(encoder, special, strlen(special), G2Z_ENCODE_DEFAULT, &tokens));
  CHECK(t, tokens.count == strlen(special));
  const int32_t beyond[] = {0, 257};
  char *text;
  CHECK_STATUS(t, g2z_decode(&t->services, tokenizer, beyond, 2, &text, &bytes),
               G2Z_BAD_ARGUMENT, &t->services, "id 257 at position 1");
  g2z_tokens_free(&tokens);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
}

/* Two trainers that share a text, added, are one that had it all. */
static void test_bpe_trainers_add(g2z_test *t) {
  g2z_bpe_trainer *halves[2] = {NULL, NULL};
  g2z_tokenizer *tokenizer = NULL;
  char *merges = NULL;
  size_t bytes, half = g2z_encode_cut(test_bpe_text, 300);
  for (int i = 0; i < 2; i++) CHECK_OK(t, g2z_bpe_trainer_create(&t->services, &halves[i]));
  if (halves[0] && halves[1]) {
    CHECK_OK(t, g2z_bpe_trainer_feed(halves[0], test_bpe_text + half,
                                     strlen(test_bpe_text) - half));
    CHECK_OK(t, g2z_bpe_trainer_feed(halves[1], test_bpe_text, half));
    CHECK_OK(t, g2z_bpe_trainer_add(halves[0], halves[1]));
    CHECK_OK(t, g2z_bpe_trainer_finish(halves[0], 257 + 120, &tokenizer));
  }
  if (tokenizer) {
    const char *path = test_path(t, "added.txt");
    CHECK_OK(t, g2z_tokenizer_write_merges(&t->services, tokenizer, path));
    CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 20, &merges, &bytes));
    CHECK(t, merges && strcmp(merges, test_bpe_merges) == 0);
  }
  g2z_release(&t->services, merges);
  g2z_tokenizer_free(tokenizer);
  for (int i = 0; i < 2; i++) g2z_bpe_trainer_free(halves[i]);
}

/* A text that is fed a little at a time teaches the same as the whole. With merges until no pair is
 * left, the vocabulary shows each different piece. */
static void test_bpe_trainer_part(g2z_test *t) {
  static char text[3000];
  uint32_t state = 37;
  for (int i = 0; i < 100; i++) {
    size_t bytes = 0, at = 0, seen = 0, used = 0, step = 1 + test_bpe_random(&state) % 200;
    while (bytes < 2000) bytes += test_bpe_random_text(&state, text + bytes, 64);
    g2z_tokenizer *whole = test_bpe_learn(t, text, bytes, 65536), *parts = NULL;
    g2z_bpe_trainer *trainer = NULL;
    CHECK_OK(t, g2z_bpe_trainer_create(&t->services, &trainer));
    for (; seen < bytes && trainer; at += used) {
      seen = seen + step < bytes ? seen + step : bytes;
      CHECK_OK(t, g2z_bpe_trainer_feed_part(trainer, text + at, seen - at, &used));
      CHECK(t, used <= seen - at);
    }
    CHECK(t, at > bytes - 100 && at <= bytes); /* no piece of this text has 100 bytes */
    if (trainer) CHECK_OK(t, g2z_bpe_trainer_feed(trainer, text + at, bytes - at));
    if (trainer) CHECK_OK(t, g2z_bpe_trainer_finish(trainer, 65536, &parts));
    int equal = whole && parts && g2z_tokenizer_vocab(whole) == g2z_tokenizer_vocab(parts);
    for (int id = 256; equal && id < g2z_tokenizer_vocab(whole); id++) {
      size_t a, b;
      const unsigned char *x = g2z_tokenizer_token(whole, id, &a);
      const unsigned char *y = g2z_tokenizer_token(parts, id, &b);
      equal = a == b && memcmp(x, y, a) == 0;
    }
    CHECK(t, equal);
    g2z_bpe_trainer_free(trainer);
    g2z_tokenizer_free(parts);
    g2z_tokenizer_free(whole);
  }
}

static void test_bpe_training(g2z_test *t) {
  const char *path = test_path(t, "merges.txt");
  g2z_tokenizer *tokenizer = test_bpe_learn(t, test_bpe_text, strlen(test_bpe_text), 257 + 120);
  if (!tokenizer) return;
  char *merges = NULL;
  size_t bytes;
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 257 + 120);
  CHECK_OK(t, g2z_tokenizer_write_merges(&t->services, tokenizer, path));
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 20, &merges, &bytes));
  CHECK(t, merges && strcmp(merges, test_bpe_merges) == 0);
  g2z_release(&t->services, merges);
  test_bpe_round_trip(t, tokenizer, test_bpe_text, strlen(test_bpe_text), test_bpe_text,
                      strlen(test_bpe_text));
  g2z_tokenizer_free(tokenizer);

  /* Two documents, fed one after the other or as one: the pieces are the same here. */
  g2z_bpe_trainer *trainer = NULL;
  tokenizer = NULL;
  size_t half = g2z_encode_cut(test_bpe_text, 300);
  CHECK_OK(t, g2z_bpe_trainer_create(&t->services, &trainer));
  CHECK_STATUS(t, g2z_bpe_trainer_finish(trainer, 256, &tokenizer), G2Z_BAD_ARGUMENT, &t->services,
               "a vocabulary of 256");
  CHECK_OK(t, g2z_bpe_trainer_feed(trainer, test_bpe_text, half));
  CHECK_OK(t, g2z_bpe_trainer_feed(trainer, test_bpe_text + half, strlen(test_bpe_text) - half));
  CHECK_OK(t, g2z_bpe_trainer_finish(trainer, 100000, &tokenizer));
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 257 + 144); /* no pair is left, as there */
  g2z_tokenizer_free(tokenizer);
  g2z_bpe_trainer_free(trainer);
}

/* tokenizer.json around the files that the library writes; arrays: merges as pairs of strings. */
static size_t test_bpe_as_json(const char *vocab, const char *merges, int arrays, char *out) {
  size_t length = (size_t)sprintf(
      out, "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":376,\"content\":\"<|endoftext|>\","
           "\"special\":true}],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","
           "\"add_prefix_space\":false,\"use_regex\":true},\"model\":{\"type\":\"BPE\","
           "\"vocab\":%s,\"merges\":[", vocab);
  const char *line = strchr(merges, '\n') + 1;
  for (int first = 1; *line; first = 0) {
    out[length++] = first ? ' ' : ',';
    if (arrays) out[length++] = '[';
    out[length++] = '"';
    for (; *line != '\n'; line++) {
      if (*line == ' ' && arrays) length += (size_t)sprintf(out + length, "\",\"");
      else out[length++] = *line;
    }
    line++;
    out[length++] = '"';
    if (arrays) out[length++] = ']';
  }
  return length + (size_t)sprintf(out + length, "]}}");
}

static void test_tokenizer_formats(g2z_test *t) {
  static char text[65536];
  g2z_tokenizer *original = NULL;
  size_t bytes, vocab_bytes;
  char *vocab = NULL;
  const char *path = test_path(t, "vocab.json");
  CHECK_OK(t, g2z_tokenizer_parse(&t->services, "merges.txt", test_bpe_merges,
                                  strlen(test_bpe_merges), &original));
  if (!original) return;
  CHECK_OK(t, g2z_tokenizer_write_vocab(&t->services, original, path));
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 20, &vocab, &vocab_bytes));
  g2z_tokens expected = test_bpe_encode(t, original, test_bpe_text, strlen(test_bpe_text), 0);
  CHECK(t, expected.count > 100 && expected.count < 250);
  for (int format = 0; format < 5 && vocab; format++) {
    if (format == 0) bytes = (size_t)sprintf(text, "%s", strchr(test_bpe_merges, '\n') + 1);
    else if (format == 1) bytes = (size_t)sprintf(text, "\xEF\xBB\xBF%s", test_bpe_merges);
    else if (format < 4) bytes = test_bpe_as_json(vocab, test_bpe_merges, format == 3, text);
    else { /* lines that end with CR LF */
      bytes = 0;
      for (const char *c = test_bpe_merges; *c; c++) {
        if (*c == '\n') text[bytes++] = '\r';
        text[bytes++] = *c;
      }
    }
    g2z_tokenizer *tokenizer = NULL;
    CHECK_OK(t, g2z_tokenizer_parse(&t->services, "a file", text, bytes, &tokenizer));
    if (!tokenizer) continue;
    CHECK(t, g2z_tokenizer_vocab(tokenizer) == g2z_tokenizer_vocab(original));
    g2z_tokens tokens = test_bpe_encode(t, tokenizer, test_bpe_text, strlen(test_bpe_text), 0);
    t->checks++;
    if (!test_bpe_equal(&tokens, &expected))
      test_fail(t, __FILE__, __LINE__, "format %d gives other ids", format);
    g2z_tokens_free(&tokens);
    g2z_tokenizer_free(tokenizer);
  }
  g2z_release(&t->services, vocab);
  g2z_tokens_free(&expected);
  g2z_tokenizer_free(original);
}

static void test_tokenizer_refusals(g2z_test *t) {
  static char text[65536];
  g2z_tokenizer *tokenizer = NULL;
  static const char *const cases[][2] = {
      {"", "vocab is empty"},
      {"#version: 0.2\na b\nab\n", "vocab, line 3: \"ab\" is not two tokens"},
      {"a b\n\nb c\n", "vocab, line 2: \"\" is not two tokens"},
      {"a b c\n", "line 1: \"a b c\" is not two tokens"},
      {"a b\nab cd\n", "line 2: \"cd\" is neither a byte nor"},
      {"a b\nb c\nab c\na bc\n", "line 4: makes the token that has id 258 already"},
      {"a \x01\n", "line 1: \"\\x01\" is neither a byte nor"},
      {"a \xFF\n", "line 1: \"\\xff\" is neither a byte nor"},
      {"{\"model\":{\"merges\":[\"a b\",]}}", "vocab, line 1, column 2"},
      {"{\"model\":{\"merges\":[[\"a\",\"b\",\"c\"]]}}", "merge 0: joins 3 tokens"},
      {"{\"model\":{\"merges\":[[\"a\"]]}}", "merge 0: joins 1 tokens"},
      {"{\"model\":{\"merges\":[\"a b\"],\"vocab\":{\"!\":1}}}", "token 0: \"!\" has id 1"},
      {"{\"model\":{\"merges\":[\"a b\"],\"vocab\":{\"!\":0}}}",
       "model.vocab has 1 tokens, but bytes and merges make 257"},
      {"{\"model\":{\"vocab\":{}}}", "JSON without model.merges"},
      {"{\"!\":0,\"model\":5}", "JSON without model.merges"},
      {"{\"normalizer\":{},\"model\":{\"merges\":[]}}", "a normalizer is not supported"},
      {"{\"pre_tokenizer\":{\"type\":\"Whitespace\"},\"model\":{\"merges\":[]}}", "ByteLevel"},
      {"{\"pre_tokenizer\":null,\"model\":{\"merges\":[]}}", "ByteLevel"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    CHECK_STATUS(t, g2z_tokenizer_parse(&t->services, "vocab", cases[i][0], strlen(cases[i][0]),
                                        &tokenizer), G2Z_FORMAT, &t->services, cases[i][1]);
    CHECK(t, tokenizer == NULL);
  }
  /* Doubling makes tokens of 2, 4, ... bytes: the 11th would have 2048. */
  size_t length = 0;
  for (size_t half = 1; half <= 1024; half *= 2) {
    memset(text + length, 'a', 2 * half + 2);
    text[length + half] = ' ';
    text[length + 2 * half + 1] = '\n';
    length += 2 * half + 2;
  }
  CHECK_STATUS(t, g2z_tokenizer_parse(&t->services, "vocab", text, length, &tokenizer), G2Z_FORMAT,
               &t->services, "line 11: a token of 2048 bytes");
  CHECK_STATUS(t, g2z_tokenizer_create(&t->services, test_path(t, "none"), &tokenizer), G2Z_IO,
               &t->services, "none");
  /* What is known, but not read, is told what to use instead. */
  static const char *const others[][2] = {{"IQ== 0\nIg== 1\n", "tiktoken's format"},
                                          {"\xC8\xD7\x34\x01\x02", "llm.c's format"}};
  for (int i = 0; i < 2; i++) {
    CHECK_STATUS(t, g2z_tokenizer_parse(&t->services, "vocab", others[i][0], strlen(others[i][0]),
                                        &tokenizer), G2Z_UNSUPPORTED, &t->services, others[i][1]);
    CHECK(t, strstr(t->services.error, "vocab.bpe, merges.txt or tokenizer.json") != NULL);
  }
}

/* A text may be cut where g2z_encode_cut says, whatever is in it; and the place is the last. */
static void test_tokenizer_cut(g2z_test *t) {
  uint32_t state = 1;
  g2z_tokenizer *tokenizer = test_bpe_learn(t, test_bpe_text, strlen(test_bpe_text), 377);
  g2z_encoder *encoder = NULL;
  g2z_tokens whole, parts;
  int wrong = 0, cuts = 0;
  memset(&whole, 0, sizeof whole);
  memset(&parts, 0, sizeof parts);
  if (tokenizer) CHECK_OK(t, g2z_encoder_create(&t->services, tokenizer, &encoder));
  for (int i = 0; i < 20000 && encoder; i++) {
    char text[64];
    size_t bytes = test_bpe_random_text(&state, text, sizeof text);
    size_t cut = g2z_encode_cut(text, bytes);
    cuts += cut > 0;
    whole.count = parts.count = 0;
    wrong += g2z_encode(encoder, text, bytes, 0, &whole) != G2Z_OK ||
             g2z_encode(encoder, text, cut, 0, &parts) != G2Z_OK ||
             g2z_encode(encoder, text + cut, bytes - cut, 0, &parts) != G2Z_OK;
    wrong += !test_bpe_equal(&whole, &parts);
  }
  CHECK(t, wrong == 0 && cuts > 10000);
  CHECK(t, g2z_encode_cut("", 0) == 0 && g2z_encode_cut(" ", 1) == 0);
  CHECK(t, g2z_encode_cut("ab  c \n d", 9) == 5 && g2z_encode_cut("ab  c \n d", 5) == 2);
  CHECK(t, g2z_encode_cut("ab\xE3\x80\x80", 5) == 2); /* the character at the cut is whole */
  CHECK(t, g2z_encode_cut("ab\xE3\x80", 4) == 0);
  CHECK(t, g2z_encode_cut("a\xC2\xA0 b", 5) == 1);
  g2z_tokens_free(&whole);
  g2z_tokens_free(&parts);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
}

/* The definition, without any cleverness: join the neighbours that make the smallest id. */
static size_t test_bpe_plainly(const g2z_tokenizer *tokenizer, const char *piece, size_t bytes,
                               int32_t *ids) {
  size_t starts[1025], count = bytes;
  for (size_t i = 0; i <= bytes; i++) starts[i] = i;
  for (;;) {
    int best = INT_MAX;
    size_t at = 0, length;
    for (size_t i = 0; i + 1 < count; i++)
      for (int id = 256; id < best && id < g2z_tokenizer_eot(tokenizer); id++) {
        const unsigned char *token = g2z_tokenizer_token(tokenizer, id, &length);
        if (length != starts[i + 2] - starts[i] || memcmp(token, piece + starts[i], length) != 0)
          continue;
        best = id;
        at = i;
      }
    if (best == INT_MAX) break;
    memmove(starts + at + 1, starts + at + 2, (count - at - 1) * sizeof *starts);
    count--;
  }
  for (size_t i = 0; i < count; i++)
    for (int id = 0; id < g2z_tokenizer_eot(tokenizer); id++) {
      size_t length;
      const unsigned char *token = g2z_tokenizer_token(tokenizer, id, &length);
      if (length == starts[i + 1] - starts[i] && memcmp(token, piece + starts[i], length) == 0)
        ids[i] = id;
    }
  return count;
}

static void test_tokenizer_long_pieces(g2z_test *t) {
  static const size_t sizes[] = {1, 15, 16, 127, 128, 129, 130, 300, 1000};
  static const char *const alphabets[] = {"a", "ab", "aab", "etaoin"};
  static char piece[1024], learnt[20000];
  static int32_t ids[1024];
  uint32_t state = 7;
  for (size_t i = 0; i < sizeof learnt; i++)
    learnt[i] = i % 97 == 96 ? ' ' : "etaoinaabb"[test_bpe_random(&state) % 10];
  memset(learnt, 'a', 64);
  g2z_tokenizer *tokenizer = test_bpe_learn(t, learnt, sizeof learnt, 257 + 60);
  if (!tokenizer) return;
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
    for (size_t a = 0; a < sizeof alphabets / sizeof *alphabets; a++) {
      for (size_t i = 0; i < sizes[k]; i++)
        piece[i] = alphabets[a][test_bpe_random(&state) % strlen(alphabets[a])];
      g2z_tokens tokens = test_bpe_encode(t, tokenizer, piece, sizes[k], 0);
      size_t count = test_bpe_plainly(tokenizer, piece, sizes[k], ids);
      t->checks++;
      if (count != tokens.count || memcmp(ids, tokens.ids, count * sizeof *ids) != 0)
        test_fail(t, __FILE__, __LINE__, "%zu letters of \"%s\": %zu tokens, expected %zu",
                  sizes[k], alphabets[a], tokens.count, count);
      g2z_tokens_free(&tokens);
    }
  g2z_tokenizer_free(tokenizer);

  /* What is quadratic, or recursive, does not come back from this. */
  size_t bytes = 1000001;
  char *spaces = (char *)malloc(bytes);
  CHECK(t, spaces != NULL);
  if (!spaces) return;
  memset(spaces, ' ', bytes);
  spaces[bytes - 1] = 'A';
  tokenizer = test_bpe_learn(t, spaces, bytes, 300);
  if (tokenizer) {
    CHECK(t, g2z_tokenizer_vocab(tokenizer) < 300); /* 1024 bytes is the longest token */
    test_bpe_round_trip(t, tokenizer, spaces, bytes, spaces, bytes);
  }
  g2z_tokenizer_free(tokenizer);
  free(spaces);
}

/* GPT-2's pattern once more, character by character: the end of the piece that starts at p. */
static const unsigned char *test_piece_end(const unsigned char *classes, const unsigned char *p,
                                           const unsigned char *end) {
  const unsigned char *at = p, *next, *last = p;
  size_t contraction = *p == '\'' ? g2zt_contraction(p, end) : 0;
  if (contraction) return p + contraction;
  if (*p == ' ' && p + 1 < end) at = p + 1; /* one space joins the run behind it */
  int kind = g2zt_class(classes, at, &next);
  if (kind != G2ZT_WHITE) {
    do at = next;
    while (at < end && g2zt_class(classes, at, &next) == kind);
    return at;
  }
  for (at = p; at < end && g2zt_class(classes, at, &next) == G2ZT_WHITE; at = next) last = at;
  return at == end || last == p ? at : last; /* the last of a run splits off before a word */
}

/* Whether the scan gives the pieces that the pattern gives, one by one. */
static int test_pieces_equal(const unsigned char *classes, const unsigned char *text,
                             size_t bytes) {
  const unsigned char *end = text + bytes;
  for (const unsigned char *p = text; p < end; p = test_piece_end(classes, p, end))
    if (g2zt_piece_end(classes, p, end) != test_piece_end(classes, p, end)) return 0;
  return 1;
}

/* Whether it is found where a text of which one byte was changed stops to be valid. */
static int test_valid_equal(unsigned char *text, size_t bytes, uint32_t *state) {
  size_t at = bytes ? test_bpe_random(state) % bytes : 0, valid = 0;
  unsigned char kept = text[at];
  text[at] ^= (unsigned char)(1u << test_bpe_random(state) % 8);
  while (valid < bytes) {
    int step = g2zt_utf8_step(text + valid, text + bytes);
    if (step < 0) break;
    valid += (size_t)step;
  }
  int equal = g2zt_utf8_valid(text, bytes) == valid;
  text[at] = kept;
  return equal && g2zt_utf8_valid(text, bytes) == bytes;
}

/* Pieces of hard texts of many lengths, and of each class of Unicode beside each other. */
static void test_tokenizer_scan(g2z_test *t) {
  static unsigned char raw[12000], text[3 * sizeof raw];
  g2z_tokenizer *tokenizer = NULL;
  uint32_t state = 17;
  CHECK_OK(t, g2z_tokenizer_create(&t->services, NULL, &tokenizer));
  if (!tokenizer) return;
  for (int i = 0; i < 3000; i++) {
    size_t want = test_bpe_random(&state) % (i % 50 ? 300 : sizeof raw - 64), bytes = 0;
    while (bytes < want) {
      if (test_bpe_random(&state) % 8 == 0) raw[bytes++] = (unsigned char)test_bpe_random(&state);
      else bytes += test_bpe_random_text(&state, (char *)raw + bytes, sizeof raw - bytes);
    }
    size_t used, valid = g2zt_utf8_repair(raw, bytes, text, SIZE_MAX, &used);
    t->checks++;
    if (!test_pieces_equal(tokenizer->classes, text, valid))
      test_fail(t, __FILE__, __LINE__, "other pieces in text %d", i);
    t->checks++;
    if (!test_valid_equal(text, valid, &state))
      test_fail(t, __FILE__, __LINE__, "text %d is valid up to another byte", i);
  }
  /* Each character of a class of its own, and others, between two of each class. */
  for (uint32_t c = 0x20; c < G2ZT_CLASSIFIED; c += c < 0x3200 ? 1 : 1 + c / 512) {
    if (c >= 0xD800 && c < 0xE000) continue;
    unsigned char utf8[4];
    size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4, bytes = c % 64;
    memset(text, 'a', bytes);
    for (size_t k = length; k-- > 1;)
      utf8[k] = (unsigned char)(0x80 | (c >> 6 * (length - 1 - k) & 63));
    static const unsigned char firsts[] = {0, 0, 0xC0, 0xE0, 0xF0};
    utf8[0] = (unsigned char)(length == 1 ? c : firsts[length] | c >> 6 * (length - 1));
    for (const char *around = "a1 \n!'s"; *around; around++) {
      text[bytes++] = (unsigned char)*around;
      memcpy(text + bytes, utf8, length);
      bytes += length;
    }
    t->checks++;
    if (!test_pieces_equal(tokenizer->classes, text, bytes))
      test_fail(t, __FILE__, __LINE__, "other pieces around U+%04X", c);
  }
  g2z_tokenizer_free(tokenizer);
}

/* Ids of a text that is handed over a little at a time. */
static void test_bpe_stream(g2z_test *t, g2z_encoder *encoder, const char *text, size_t bytes,
                            size_t step, int flags, g2z_tokens *out) {
  size_t at = 0, seen = 0, used;
  out->count = 0;
  while (seen < bytes) {
    seen = seen + step < bytes ? seen + step : bytes;
    if (g2z_encode_part(encoder, text + at, seen - at, flags, out, &used) != G2Z_OK) break;
    if (used > seen - at) break;
    at += used;
  }
  CHECK(t, seen == bytes);
  CHECK_OK(t, g2z_encode(encoder, text + at, bytes - at, flags, out));
}

static void test_tokenizer_part(g2z_test *t) {
  static char text[3000];
  g2z_tokenizer *tokenizer = test_bpe_learn(t, test_bpe_text, strlen(test_bpe_text), 377);
  g2z_encoder *encoder = NULL;
  g2z_tokens whole, parts;
  uint32_t state = 23;
  int wrong = 0;
  memset(&whole, 0, sizeof whole);
  memset(&parts, 0, sizeof parts);
  if (tokenizer) CHECK_OK(t, g2z_encoder_create(&t->services, tokenizer, &encoder));
  for (int i = 0; i < 300 && encoder; i++) {
    size_t bytes = 0, step = 1 + test_bpe_random(&state) % 200;
    int flags = i % 2 ? G2Z_ENCODE_ALLOW_SPECIAL : G2Z_ENCODE_DEFAULT;
    while (bytes < 2000) {
      bytes += test_bpe_random_text(&state, text + bytes, 64);
      if (test_bpe_random(&state) % 16) continue;
      bytes += (size_t)sprintf(text + bytes, "<|endoftext|>");
    }
    whole.count = 0;
    CHECK_OK(t, g2z_encode(encoder, text, bytes, flags, &whole));
    test_bpe_stream(t, encoder, text, bytes, step, flags, &parts);
    wrong += !test_bpe_equal(&whole, &parts);
  }
  CHECK(t, wrong == 0);
  /* Pieces that do not fit into a part, merged as one and in parts: letters, apostrophes that begin
   * contractions only where a piece starts, and bytes that are not UTF-8. */
  static const char *const alphabets[] = {"etaoins", "a", "''!", "\xFF\xE6\x9D", "t<es "};
  size_t bytes = 2 * G2ZT_PART + 54321;
  char *piece = (char *)malloc(bytes);
  int32_t *ids = (int32_t *)malloc(bytes * sizeof *ids);
  CHECK(t, piece && ids);
  for (size_t a = 0; a < 5 && encoder && piece && ids; a++) {
    size_t letters = strlen(alphabets[a]), made, used;
    for (size_t i = 0; i < bytes; i++) piece[i] = alphabets[a][test_bpe_random(&state) % letters];
    memcpy(piece + bytes - 8, "'s'll've", 8);
    whole.count = 0;
    CHECK_OK(t, g2z_encode(encoder, piece, bytes, 0, &whole));
    if (a < 2) { /* the letters are one piece: merged at once */
      CHECK_OK(t, g2zt_merge_part(&encoder->merger, (unsigned char *)piece, bytes - 8, 0, ids,
                                  &made, &used));
      CHECK(t, made + 3 <= whole.count && memcmp(ids, whole.ids, made * sizeof *ids) == 0);
    }
    test_bpe_stream(t, encoder, piece, bytes, 700000, 0, &parts);
    CHECK(t, test_bpe_equal(&whole, &parts));
  }
  free(piece);
  free(ids);
  g2z_tokens_free(&whole);
  g2z_tokens_free(&parts);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
}

typedef struct test_bpe_thread {
  const g2z_tokenizer *tokenizer;
  const char *text;
  size_t bytes;
  g2z_services services;
  g2z_tokens tokens;
  g2z_status status;
} test_bpe_thread;

static void *test_bpe_encode_thread(void *user) {
  test_bpe_thread *self = (test_bpe_thread *)user;
  g2z_encoder *encoder;
  self->status = g2z_encoder_create(&self->services, self->tokenizer, &encoder);
  for (int i = 0; i < 20 && self->status == G2Z_OK; i++) {
    self->tokens.count = 0;
    self->status = g2z_encode(encoder, self->text, self->bytes, 0, &self->tokens);
  }
  g2z_encoder_free(encoder);
  return NULL;
}

static void test_tokenizer_threads(g2z_test *t) {
  static char text[40000];
  uint32_t state = 3;
  size_t bytes = 0;
  while (bytes + 64 < sizeof text) bytes += test_bpe_random_text(&state, text + bytes, 64);
  g2z_tokenizer *tokenizer = test_bpe_learn(t, test_bpe_text, strlen(test_bpe_text), 377);
  if (!tokenizer) return;
  g2z_tokens expected = test_bpe_encode(t, tokenizer, text, bytes, 0);
  test_bpe_thread threads[4];
  pthread_t handles[4];
  memset(threads, 0, sizeof threads);
  for (int i = 0; i < 4; i++) {
    threads[i].tokenizer = tokenizer;
    threads[i].text = text;
    threads[i].bytes = bytes;
    CHECK(t, pthread_create(&handles[i], NULL, test_bpe_encode_thread, &threads[i]) == 0);
  }
  for (int i = 0; i < 4; i++) {
    pthread_join(handles[i], NULL);
    CHECK(t, threads[i].status == G2Z_OK && test_bpe_equal(&threads[i].tokens, &expected));
    g2z_tokens_free(&threads[i].tokens);
  }
  g2z_tokens_free(&expected);
  g2z_tokenizer_free(tokenizer);
}

/* Everything once: the status of the first call that failed. */
static g2z_status test_bpe_everything(g2z_test *t, const void *vocab, size_t bytes) {
  static char piece[400];
  g2z_tokenizer *tokenizer = NULL, *learnt = NULL;
  g2z_encoder *encoder = NULL;
  g2z_bpe_trainer *trainer = NULL;
  g2z_tokens tokens;
  char *text = NULL;
  memset(&tokens, 0, sizeof tokens);
  memset(piece, 'a', sizeof piece);
  g2z_status status = g2z_tokenizer_parse(&t->services, "vocab", vocab, bytes, &tokenizer);
  if (status == G2Z_OK) status = g2z_encoder_create(&t->services, tokenizer, &encoder);
  if (status == G2Z_OK) status = g2z_encode(encoder, "\xFFtest", 5, 0, &tokens);
  if (status == G2Z_OK) status = g2z_encode(encoder, piece, sizeof piece, 0, &tokens);
  if (status == G2Z_OK)
    status = g2z_decode(&t->services, tokenizer, tokens.ids, tokens.count, &text, &bytes);
  if (status == G2Z_OK) status = g2z_bpe_trainer_create(&t->services, &trainer);
  if (status == G2Z_OK) status = g2z_bpe_trainer_feed(trainer, test_bpe_text, strlen(test_bpe_text));
  if (status == G2Z_OK) status = g2z_bpe_trainer_finish(trainer, 300, &learnt);
  g2z_bpe_trainer_free(trainer);
  g2z_release(&t->services, text);
  g2z_tokens_free(&tokens);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(learnt);
  g2z_tokenizer_free(tokenizer);
  return status;
}

static void test_tokenizer_allocations(g2z_test *t) {
  static char texts[2][65536];
  size_t bytes[2];
  g2z_tokenizer *tokenizer = test_bpe_learn(t, test_bpe_text, strlen(test_bpe_text), 377);
  const char *path = test_path(t, "vocab.json");
  char *vocab = NULL;
  if (!tokenizer) return;
  CHECK_OK(t, g2z_tokenizer_write_vocab(&t->services, tokenizer, path));
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 20, &vocab, &bytes[0]));
  bytes[0] = test_bpe_as_json(vocab, test_bpe_merges, 1, texts[0]);
  bytes[1] = (size_t)sprintf(texts[1], "%s", test_bpe_merges);
  g2z_release(&t->services, vocab);
  g2z_tokenizer_free(tokenizer);
  for (int format = 0; format < 2; format++) {
    long nth = 1, live = t->allocations;
    for (; nth < 1000; nth++) {
      t->fail_at = nth;
      g2z_status status = test_bpe_everything(t, texts[format], bytes[format]);
      t->fail_at = 0;
      if (status == G2Z_OK) break;
      t->checks++;
      if (status != G2Z_NO_MEMORY || t->allocations != live)
        test_fail(t, __FILE__, __LINE__, "allocation %ld: %s, %ld blocks leaked", nth,
                  g2z_status_text(status), t->allocations - live);
      t->allocations = live;
    }
    CHECK(t, nth > 20 && nth < 1000);
  }
}

static void test_tokenizer_gpt2(g2z_test *t) {
  static const struct {
    const char *text;
    size_t count;
    int32_t ids[16];
  } cases[] = { /* from tiktoken */
      {"Hello world!", 3, {15496, 995, 0}},
      {"a\r\nb", 4, {64, 201, 198, 65}},
      {"a\n\nb", 4, {64, 198, 198, 65}},
      {"a\n\n", 2, {64, 628}},
      {"'sabc", 2, {338, 39305}},
      {"''s", 2, {7061, 82}},
      {" 's", 2, {705, 82}},
      {"it'S", 3, {270, 6, 50}},
      {"don't've", 3, {9099, 470, 1053}},
      {"<|endoftext|>", 7, {27, 91, 437, 1659, 5239, 91, 29}},
      {"This    is  a sentence ", 9, {1212, 220, 220, 220, 318, 220, 257, 6827, 220}},
      {"we'll 12345 67,890.12", 10, {732, 1183, 17031, 2231, 8275, 11, 23, 3829, 13, 1065}},
      {"x = [i**2 for i in range(9)]\n\tx",
       16, {87, 796, 685, 72, 1174, 17, 329, 1312, 287, 2837, 7, 24, 15437, 198, 197, 87}},
      {"Caf\xC3\xA9 na\xC3\xAFve", 4, {34, 1878, 2634, 41492}},
      {"\xE3\x81\x93\xE3\x82\x93\xE3\x81\xAB\xE3\x81\xA1\xE3\x81\xAF",
       6, {46036, 22174, 28618, 2515, 94, 31676}},
      {"\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82",
       7, {140, 253, 21169, 18849, 38857, 16843, 20375}},
      {"\xF0\x9F\x91\x8B\xF0\x9F\x8C\x8E", 5, {41840, 233, 8582, 234, 236}},
      {"a\xC2\xA0" "b\xE3\x80\x80" "c", 6, {64, 1849, 65, 5099, 222, 66}},
      {"a\xE2\x80\x8B" "b\xEF\xBB\xBF" "c", 7, {64, 9525, 65, 171, 119, 123, 66}},
      {"\xC2\x85x", 3, {126, 227, 87}},
      {"---------------- ", 2, {1783, 220}},
      {"1\xD9\xA3\xC2\xBD\xE2\x85\xA7", 7, {16, 149, 96, 23141, 158, 227, 100}},
  };
  const char *path = "data/vocab.bpe";
  g2z_tokenizer *tokenizer = NULL;
  if (access(path, R_OK) != 0) SKIP(t, "data/vocab.bpe is not here: make vocab");
  CHECK_OK(t, g2z_tokenizer_create(&t->services, path, &tokenizer));
  if (!tokenizer) return;
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 50257 && g2z_tokenizer_eot(tokenizer) == 50256);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_tokens tokens = test_bpe_encode(t, tokenizer, cases[i].text, strlen(cases[i].text), 0);
    t->checks++;
    if (tokens.count != cases[i].count ||
        memcmp(tokens.ids, cases[i].ids, tokens.count * sizeof *tokens.ids) != 0)
      test_fail(t, __FILE__, __LINE__, "\"%s\" has other ids than GPT-2's", cases[i].text);
    g2z_tokens_free(&tokens);
  }
  g2z_tokens tokens = test_bpe_encode(t, tokenizer, "\0", 1, 0);
  CHECK(t, tokens.count == 1 && tokens.ids[0] == 188);
  g2z_tokens_free(&tokens);
  char spaces[4096];
  memset(spaces, ' ', sizeof spaces);
  test_bpe_round_trip(t, tokenizer, spaces, sizeof spaces, spaces, sizeof spaces);
  g2z_tokenizer_free(tokenizer);
}

/* ----- the command line of ./prepare_data -------------------------------- */

static const char *test_prepare_program(void) {
  const char *program = getenv("G2Z_PREPARE_DATA"); /* another build, such as a sanitized one */
  return program ? program : "./prepare_data";
}

/* Runs `BEFORE prepare_data ARGUMENTS` in a shell, where $D is the test's directory. Returns the
 * exit code, -1 when it did not exit. */
G2Z_PRINTF(4, 5)
static int test_prepare(g2z_test *t, char *output, const char *before, const char *format, ...) {
  enum { ROOM = 16384 };
  char command[4096];
  size_t used = 0, got;
  va_list arguments;
  int length = snprintf(command, sizeof command, "D='%s'; { %s %s ", t->directory, before,
                        test_prepare_program());
  va_start(arguments, format);
  length += vsnprintf(command + length, sizeof command - (size_t)length, format, arguments);
  va_end(arguments);
  snprintf(command + length, sizeof command - (size_t)length, "; } 2>&1");
  output[0] = 0;
  fflush(stdout);
  FILE *pipe = popen(command, "r");
  CHECK(t, pipe != NULL);
  if (!pipe) return -1;
  while (used < ROOM - 1 && (got = fread(output + used, 1, ROOM - 1 - used, pipe)) > 0) used += got;
  output[used] = 0;
  int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* A shard of the directory holds these tokens; with header: in llm.c's format. */
static void test_prepare_shard(g2z_test *t, const char *name, int header, const int *expected,
                               size_t count) {
  char *file = NULL;
  size_t bytes = 0, skip = header ? 1024 : 0;
  CHECK_OK(t, g2z_read_file(&t->services, test_path(t, name), 1 << 24, &file, &bytes));
  int equal = file && bytes == skip + 2 * count;
  if (equal && header) {
    int32_t head[256];
    memcpy(head, file, sizeof head);
    equal = head[0] == 20240520 && head[1] == 1 && head[2] == (int32_t)count && head[255] == 0;
  }
  for (size_t i = 0; i < count && equal; i++) {
    uint16_t token;
    memcpy(&token, file + skip + 2 * i, 2);
    equal = token == expected[i];
  }
  t->checks++;
  if (!equal) test_fail(t, __FILE__, __LINE__, "%s: other tokens (%zu bytes)", name, bytes);
  g2z_release(&t->services, file);
}

/* Byte-level ids of a text in which # stands for <|endoftext|>; returns how many there are. */
static size_t test_prepare_ids(const char *text, int *ids) {
  size_t count = 0;
  for (const char *c = text; *c; c++) {
    int byte = (unsigned char)*c;
    ids[count++] = byte == '#' ? 256 : byte == '\n' ? 198 : byte == ' ' ? 220 : byte - 33;
  }
  return count;
}

static void test_prepare_conventions(g2z_test *t) {
  static const struct {
    const char *arguments, *file;
    int header;
    const char *tokens; /* as test_prepare_ids reads them; NULL: there is no such file */
  } cases[] = {
      {"--val-fraction 0 $D/a.txt", "a_train_000000.bin", 1, "#one\n\n\ntwo 2\n\nthree"},
      {"--val-fraction 0 $D/a.txt", "a_val_000000.bin", 1, NULL},
      {"--format raw --val-fraction 0.25 $D/a.txt", "train.bin", 0, "one\n\n\ntwo 2\n\n#"},
      {"--format raw --val-fraction 0.25 $D/a.txt", "val.bin", 0, "three#"},
      {"--format raw --eot none --val-fraction 0.25 --name b $D/a.txt", "val_b.bin", 0, "three"},
      {"--split-docs blank --val-docs 1 --name b $D/a.txt", "b_train_000000.bin", 1,
       "#\ntwo 2\n\n#three"},
      {"--split-docs blank --val-docs 1 $D/a.txt", "a_val_000000.bin", 1, "#one\n\n"},
      {"--split-docs blank --train-docs 2 $D/a.txt", "a_train_000000.bin", 1, "#\ntwo 2\n\n#three"},
      {"--val-tokens 5 $D/a.txt", "a_val_000000.bin", 1, "#one\n"},
      {"--val-tokens 5 --eot last $D/a.txt", "a_train_000000.bin", 1, "\ntwo 2\n\nthree#"},
      {"--split-docs blank --val-tokens 5 --train-docs 1 $D/a.txt", "a_train_000000.bin", 1, "\n"},
      {"--split-docs blank --val-tokens 6 --train-docs 1 $D/a.txt", "a_train_000000.bin", 1,
       "#\ntwo 2\n\n"},
      {"--split-docs blank --val-tokens 7 --train-docs 1 $D/a.txt", "a_train_000000.bin", 1,
       "\ntwo 2\n\n"},
      {"--split-docs blank --val-tokens 7 --train-docs 1 $D/a.txt", "a_val_000000.bin", 1,
       "#one\n\n#"},
      {"--split-docs blank --val-tokens 6 --train-docs 1 $D/a.txt $D/bad.jsonl",
       "a_train_000000.bin", 1, "#\ntwo 2\n\n"}, /* nor is what is behind looked at */
      {"--val-tokens 2 --train-docs 1 $D/bad.jsonl", "bad_train_000000.bin", 1, "#b"},
      {"--val-fraction 0 --shard-tokens 8 $D/a.txt", "a_train_000000.bin", 1, "#one\n\n\nt"},
      {"--val-fraction 0 --shard-tokens 8 $D/a.txt", "a_train_000001.bin", 1, "wo 2\n\nth"},
      {"--val-fraction 0 --shard-tokens 8 $D/a.txt", "a_train_000002.bin", 1, "ree"},
      {"--split-docs eot --val-docs 0 $D/e.txt", "e_train_000000.bin", 1, "#a\n#b <|c"},
      {"--allow-special --val-docs 0 $D/e.txt", "e_train_000000.bin", 1, "##a\n##\n#b <|c#\n"},
      {"--universal-newlines --val-fraction 0 $D/crlf.txt", "crlf_train_000000.bin", 1,
       "#a\nb\nc\n"},
      {"--val-docs 0 $D/d.jsonl", "d_train_000000.bin", 1, "#A\"\n#second#"},
      {"--val-docs 0 --field id $D/d.jsonl", "d_train_000000.bin", 1, "#x1#x2#x3"},
      {"--format raw $D/d.jsonl", "val.bin", 0, "A\"\n#"}, /* the first of every twenty */
      {"--field id --val-docs 2 - < $D/d.jsonl", "stdin_train_000000.bin", 1, "#x3"},
      {"$D/a.txt $D/d.jsonl --val-tokens 7", "a_train_000000.bin", 1,
       "two 2\n\nthree#A\"\n#second#"},
  };
  static const char a[] = "one\n\n\ntwo 2\n\nthree";
  static const char e[] = "<|endoftext|>a\n<|endoftext|><|endoftext|>\n<|endoftext|>b <|c"
                          "<|endoftext|>\n";
  static const char d[] =
      "{\"id\":\"x1\",\"content\":5,\"meta\":{\"text\":[1,{}]},\"text\":\"\\u0041\\\"\\n\"}\n"
      "   \n"
      "{\"content\":\"first\",\"id\":\"x2\",\"content\":\"second\"}\n"
      "{\"text\":\"no\",\"text\":\"\",\"id\":\"x3\",\"content\":\"no\"}";
  char output[16384];
  int ids[64];
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  test_write_file(t, test_path(t, "a.txt"), a, sizeof a - 1);
  test_write_file(t, test_path(t, "e.txt"), e, sizeof e - 1);
  test_write_file(t, test_path(t, "d.jsonl"), d, sizeof d - 1);
  test_write_file(t, test_path(t, "crlf.txt"), "a\r\nb\rc\r\n", 8);
  test_write_file(t, test_path(t, "bad.jsonl"), "{\"text\":\"a\"}\n{\"text\":\"b\"}\n{", 27);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int code = test_prepare(t, output, "rm -f $D/*.bin;", "--out $D --threads %d %s",
                            1 + (int)i % 3, cases[i].arguments);
    t->checks++;
    if (code != 0 || !strstr(output, " tokens"))
      test_fail(t, __FILE__, __LINE__, "%s: exit code %d: %s", cases[i].arguments, code, output);
    else if (!cases[i].tokens) CHECK(t, access(test_path(t, cases[i].file), F_OK) != 0);
    else test_prepare_shard(t, cases[i].file, cases[i].header, ids,
                            test_prepare_ids(cases[i].tokens, ids));
  }
}

/* Several jobs: the shards hold what one call of the library gives, for any number of threads. */
static void test_prepare_threads(g2z_test *t) {
  static char text[3000000];
  char output[16384], name[64];
  uint32_t state = 11;
  size_t bytes = 0;
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  while (bytes + 64 < sizeof text) bytes += test_bpe_random_text(&state, text + bytes, 64);
  test_write_file(t, test_path(t, "long.txt"), text, bytes);
  CHECK(t, test_prepare(t, output, "", "--train-bpe 400 --val-tokens 1000 --out $D/1 --threads 1 "
                                       "$D/long.txt") == 0);
  CHECK(t, strstr(output, "vocabulary  400 tokens") != NULL);
  g2z_tokenizer *tokenizer = NULL;
  CHECK_OK(t, g2z_tokenizer_create(&t->services, test_path(t, "1/long.bpe"), &tokenizer));
  if (!tokenizer) return;
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 400);
  g2z_tokens expected = test_bpe_encode(t, tokenizer, text, bytes, 0);
  int *ids = (int *)malloc((expected.count + 1) * sizeof *ids);
  CHECK(t, ids != NULL);
  ids[0] = 399;
  for (size_t i = 0; i < expected.count; i++) ids[i + 1] = expected.ids[i];
  test_prepare_shard(t, "1/long_val_000000.bin", 1, ids, 1000);
  test_prepare_shard(t, "1/long_train_000000.bin", 1, ids + 1000, expected.count - 999);
  for (int threads = 2; threads < 8; threads += 5) {
    CHECK(t, test_prepare(t, output, "cat $D/long.txt |",
                          "--vocab $D/1/long.bpe --val-tokens 1000 --out $D/%d --threads %d -",
                          threads, threads) == 0);
    snprintf(name, sizeof name, "%d/stdin_train_000000.bin", threads);
    test_prepare_shard(t, name, 1, ids + 1000, expected.count - 999);
  }
  free(ids);
  g2z_tokens_free(&expected);
  g2z_tokenizer_free(tokenizer);
  /* jobs behind the last document are in flight when it is written, in a text without an end */
  int two[8];
  for (int threads = 1; threads < 8; threads += 3) {
    CHECK(t, test_prepare(t, output, "yes 'no<|endoftext|>' |",
                          "--split-docs eot --val-tokens 1000003 --train-docs 2 --out $D/y "
                          "--threads %d -", threads) == 0);
    test_prepare_shard(t, "y/stdin_train_000000.bin", 1, two, test_prepare_ids("#\nno#\nno", two));
  }
}

static void test_prepare_refusals(g2z_test *t) {
  static const char *const cases[][2] = {
      {"", "no input"},
      {"--colour x", "there is no flag --colour"},
      {"--threads 0 $D/a.txt", "--threads 0: must be from 1"},
      {"--shard-tokens 99999999999999999999 $D/a.txt", "must be from 1 to 2147483647"},
      {"--val-fraction 1 $D/a.txt", "--val-fraction 1: must be from 0 to 0.999"},
      {"--eot middle $D/a.txt", "must be one of first|last|none"},
      {"--bytes --vocab v $D/a.txt", "give one of them"},
      {"--val-docs 1 --val-tokens 1 $D/a.txt", "exclude each other"},
      {"--format raw --shard-tokens 9 $D/a.txt", "--shard-tokens 9"},
      {"--name x/y $D/a.txt", "--name x/y"},
      {"--field text $D/a.txt", "--field text: "},
      {"--encode $D/a.txt", "--encode reads standard input"},
      {"--encode", "--out: --encode has no use for it"},
      {"--bench $D/a.txt --strict", "--strict: --bench has no use for it"},
      {"--bench $D/none.txt", "none.txt: No such file"},
      {"--bench $D/a.txt --encode", "give one of them"},
      {"--train-bpe 300 -", "reads its text twice"},
      {"--train-bpe 300 /dev/stdin < /dev/null", "twice, which /dev/stdin does not allow"},
      {"$D/none.txt", "none.txt: No such file"},
      {"$D/a.txt $D/empty.txt", "empty.txt is empty"},
      {"- < /dev/null", "standard input is empty"},
      {"$D/blank.jsonl", "blank.jsonl holds no document"},
      {"--val-fraction 0.1 - < $D/a.txt", "--val-fraction 0.1"},
      {"$D", "is a directory"},
      {"$D/none.txt.gz", "none.txt.gz: No such file"},
      {"--val-docs 0 $D/a.txt $D/not.gz", "not.gz: gzip -dc ended with exit code 1"},
      {"--strict --val-docs 0 $D/a.txt $D/latin1.txt", "latin1.txt, from byte 0 on: invalid UTF-8: "
                                                       "byte 0xe9 at offset 3"},
      {"--val-docs 0 $D/bad.jsonl", "bad.jsonl, line 3, column 12: "},
      {"--val-docs 0 $D/lacks.jsonl", "lacks.jsonl, line 2: no text in a field \"text\""},
      {"--val-docs 0 --field body $D/lacks.jsonl", "lacks.jsonl, line 1: no text in a field "
                                                   "\"body\""},
      {"--train-bpe 300 --val-docs 0 $D/lacks.jsonl", "lacks.jsonl, line 2: no text"},
      {"--strict --val-docs 0 $D/lone.jsonl", "lone.jsonl, line 2, column 22: \\uDC00 is half of a "
                                              "surrogate pair"},
      {"--val-docs 9 $D/a.txt", "no token is left for training"},
      {"--vocab $D/none.bpe $D/a.txt", "none.bpe"},
      {"--vocab '' $D/a.txt", "cannot open \"\": No such file"},
      {"--vocab $D/a.txt $D/a.txt", "a.txt, line 1: "},
      {"--out $D/a.txt/x $D/a.txt", "a.txt"},
  };
  static const char *const files[][2] = {
      {"a.txt", "some text\n"},
      {"empty.txt", ""},
      {"blank.jsonl", "\n \n"},
      {"latin1.txt", "caf\xE9\n"},
      {"not.gz", "no gzip"},
      {"bad.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"}\n{\"text\":\"c\"]\n"},
      {"lacks.jsonl", "{\"text\":\"a\"}\n{\"txt\":\"b\"}\n"},
      {"lone.jsonl", "{\"text\":\"\\uFFFD\",\"a\":\"\\uD800\"}\n"
                     "{\"text\":\"\\ud83d\\uDE00\\uDC00\"}\n"},
  };
  char output[16384];
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  for (size_t i = 0; i < sizeof files / sizeof *files; i++)
    test_write_file(t, test_path(t, files[i][0]), files[i][1], strlen(files[i][1]));
  test_write_file(t, test_path(t, "in.txt"), "no more than that\n", 18);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int code = test_prepare(t, output, "", "--out $D/out %s", cases[i][0]);
    t->checks++;
    if (code != 1 || strncmp(output, "prepare_data: ", 14) != 0 || !strstr(output, cases[i][1]))
      test_fail(t, __FILE__, __LINE__, "%s: exit code %d: %s", cases[i][0], code, output);
  }
  /* ended from outside, and with a disk that is full */
  CHECK(t, test_prepare(t, output, "{ cat $D/a.txt; sleep 1; } |",
                        "--out $D/out - & sleep 0.3; kill -TERM $!; wait $!") == 1);
  CHECK(t, strstr(output, "stopped by signal 15") != NULL);
  CHECK(t, mkfifo(test_path(t, "fifo"), 0600) == 0); /* to which nobody writes */
  CHECK(t, test_prepare(t, output, "", "--out $D/out $D/fifo & sleep 0.3; kill -TERM $!; "
                        "sleep 1; kill -KILL $! 2> /dev/null; wait $!") == 1);
  CHECK(t, strstr(output, "stopped by signal 15") != NULL);
  CHECK(t, test_prepare(t, output, "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do "
                                   "cat $D/a.txt $D/a.txt >> $D/b.txt; cat $D/b.txt >> $D/a.txt; "
                                   "done; ulimit -f 64;", "--out $D/out $D/a.txt") == 1);
  CHECK(t, strstr(output, "File too large") != NULL);
  CHECK(t, test_prepare(t, output, "echo hello |", "--encode > /dev/full") == 1);
  CHECK(t, strstr(output, "cannot write standard output") != NULL);
  /* an output that is the input, under another path, or another program's */
  CHECK(t, test_prepare(t, output, "cp $D/in.txt $D/out/train.bin;",
                        "--format raw --out $D/out $D/./out/train.bin") == 1);
  CHECK(t, strstr(output, "out/train.bin would be written, and is an input") != NULL);
  CHECK(t, test_prepare(t, output, "cmp $D/in.txt $D/out/train.bin && mv $D/out/train.bin "
                        "$D/out/x.bpe && ", "--train-bpe 300 --out $D/out $D/out/x.bpe") == 1);
  CHECK(t, strstr(output, "out/x.bpe would be written, and is an input") != NULL);
  CHECK(t, test_prepare(t, output, "cmp $D/in.txt $D/out/x.bpe && rm $D/out/x.bpe &&", "--help") == 0);
  g2z_writer *other;
  CHECK_OK(t, g2z_writer_create(&t->services, test_path(t, "out/x_train_000000.bin"), &other));
  CHECK(t, test_prepare(t, output, "", "--name x --val-docs 0 --out $D/out $D/in.txt") == 1);
  CHECK(t, strstr(output, "another program writes") != NULL);
  g2z_writer_free(other);
  /* nothing was left: rmdir takes an empty directory only */
  CHECK(t, rmdir(test_path(t, "out")) == 0);
}

/* Text that comes through gzip or zstd, whole, cut short, and without the program. */
static void test_prepare_packed(g2z_test *t) {
  static const char *const packers[][2] = {{"gzip", "gz"}, {"zstd", "zst"}};
  static char text[400000];
  char output[16384], name[64], pack[512];
  uint32_t state = 29;
  size_t bytes = 0;
  int found = 0;
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  while (bytes + 64 < sizeof text) bytes += test_bpe_random_text(&state, text + bytes, 64);
  test_write_file(t, test_path(t, "p.txt"), text, bytes);
  test_write_file(t, test_path(t, "not.gz"), "no gzip", 7);
  test_write_file(t, test_path(t, "d.jsonl"), "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n", 27);
  CHECK(t, test_prepare(t, output, "", "--out $D/1 --val-fraction 0 $D/p.txt") == 0);
  for (int i = 0; i < 2; i++) {
    const char *program = packers[i][0], *ending = packers[i][1];
    snprintf(pack, sizeof pack,
             "command -v %s > /dev/null || exit 3; cd $D; rm -rf 2 3; for f in p.txt d.jsonl; do "
             "%s -c $f > $f.%s; done; head -c 9000 p.txt.%s > cut.%s; cd $OLDPWD;",
             program, program, ending, ending, ending);
    int code = test_prepare(t, output, pack, "--out $D/2 --val-docs 0 --threads 2 $D/p.txt.%s",
                            ending);
    if (code == 3) continue;
    found++;
    CHECK(t, code == 0);
    CHECK(t, test_prepare(t, output, "cmp $D/1/p_train_000000.bin $D/2/p_train_000000.bin || "
                          "exit 4;", "--help") == 0);
    CHECK(t, test_prepare(t, output, "", "--out $D/2 --val-docs 0 $D/d.jsonl.%s", ending) == 0);
    CHECK(t, strstr(output, "2 documents, 5 tokens") != NULL);
    CHECK(t, test_prepare(t, output, "", "--out $D/3 --val-docs 0 $D/cut.%s", ending) == 1);
    CHECK(t, strstr(output, "the file is damaged or cut short") != NULL);
    CHECK(t, rmdir(test_path(t, "3")) == 0);
    CHECK(t, test_prepare(t, output, "PATH=/nowhere", "--out $D/2 --val-docs 0 $D/p.txt.%s",
                          ending) == 1);
    snprintf(name, sizeof name, "cannot start %s", program);
    CHECK(t, strstr(output, name) != NULL);
  }
  /* a gzip that is killed half way */
  CHECK(t, test_prepare(t, output, "mkdir $D/bin; printf '#!/bin/sh\necho text; kill -9 $$\n' > "
                        "$D/bin/gzip; chmod +x $D/bin/gzip; PATH=$D/bin:$PATH",
                        "--out $D/3 --val-docs 0 $D/not.gz") == 1);
  CHECK(t, strstr(output, "gzip -dc was ended by signal 9") != NULL);
  /* enough of them are dealt out, as others are; of a few it is not known where the last half is */
  const char *many = "for i in 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 20; do "
                     "printf a$i | gzip -c > $D/m$i.gz; done;";
  if (system("command -v gzip > /dev/null") == 0) {
    CHECK(t, test_prepare(t, output, many, "--out $D/4 --val-fraction 0.5 $D/m*.gz") == 0);
    CHECK(t, strstr(output, "train       10 documents, 40 tokens") != NULL);
    CHECK(t, strstr(output, "val         10 documents, 40 tokens") != NULL);
    CHECK(t, test_prepare(t, output, many, "--out $D/4 --val-fraction 0.5 $D/m0*.gz") == 1);
    CHECK(t, strstr(output, "shows only at its end") != NULL);
  }
  if (!found) SKIP(t, "neither gzip nor zstd is here");
}

/* Eight million letters without a space, then white space and words: no place to cut. The base is
 * one call of the library; what is not cut is encoded while it is read, whatever the threads. */
static void test_prepare_open(g2z_test *t) {
  char output[16384], name[64];
  uint32_t state = 31;
  size_t bytes = 9000000, at = 0;
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  char *text = (char *)malloc(bytes);
  CHECK(t, text != NULL);
  if (!text) return;
  while (at < bytes) text[at++] = "etaoinshr'd1"[test_bpe_random(&state) % 12];
  memset(text + bytes - 1000000, '\n', 999000);
  memcpy(text + bytes - 1000, "<|endoftext|> it's\n\nover", 24);
  test_write_file(t, test_path(t, "open.txt"), text, bytes);
  test_write_file(t, test_path(t, "merges.txt"), test_bpe_merges, strlen(test_bpe_merges));
  g2z_tokenizer *tokenizer = NULL;
  CHECK_OK(t, g2z_tokenizer_create(&t->services, test_path(t, "merges.txt"), &tokenizer));
  for (int special = 0; special < 2 && tokenizer; special++) {
    g2z_tokens expected = test_bpe_encode(t, tokenizer, text, bytes,
                                          special ? G2Z_ENCODE_ALLOW_SPECIAL : G2Z_ENCODE_DEFAULT);
    int *ids = (int *)malloc((expected.count + 1) * sizeof *ids);
    CHECK(t, ids != NULL);
    for (size_t i = 0; i < expected.count && ids; i++) ids[i] = expected.ids[i];
    for (int threads = 1; threads < 8 && ids; threads = threads < 3 ? threads + 1 : threads + 4) {
      CHECK(t, test_prepare(t, output, "cat $D/open.txt |",
                            "--vocab $D/merges.txt --val-fraction 0 --format raw --eot none %s "
                            "--out $D/%d --threads %d -", special ? "--allow-special" : "", threads,
                            threads) == 0);
      snprintf(name, sizeof name, "%d/train.bin", threads);
      test_prepare_shard(t, name, 0, ids, expected.count);
    }
    free(ids);
    g2z_tokens_free(&expected);
  }
  g2z_tokenizer *learnt = test_bpe_learn(t, text, bytes, 300);
  if (learnt)
    CHECK_OK(t, g2z_tokenizer_write_merges(&t->services, learnt, test_path(t, "learnt.txt")));
  g2z_tokenizer_free(learnt);
  for (int threads = 1; threads < 4; threads += 2)
    CHECK(t, test_prepare(t, output, "", "--train-bpe 300 --val-docs 0 --threads %d --out $D/l "
                                         "$D/open.txt && cmp $D/l/open.bpe $D/learnt.txt",
                          threads) == 0);
  CHECK(t, test_prepare(t, output, "", "--split-docs eot --val-docs 1 --threads 2 --out $D/e "
                                       "$D/open.txt") == 0);
  CHECK(t, strstr(output, "train       1 document,") != NULL); /* and the one of validation */
  g2z_tokenizer_free(tokenizer);
  free(text);
}

/* 120 MB without a place to cut take little memory, also to learn from. Where the program does not
 * even start under the limit, as under AddressSanitizer, which takes terabytes of addresses, there
 * is none. */
static void test_prepare_memory(g2z_test *t) {
  static const char text[] = "yes 'a1,b' | tr -d '\\n' | head -c 120000000 > $D/m.txt; %s";
  static const char learn[] = "--train-bpe 300 --val-docs 0 --threads 1 --out $D/m $D/m.txt";
  static const char limit[] = "ulimit -v 120000;";
  char output[16384], before[256];
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  int limited = test_prepare(t, output, limit, "--help") == 0;
  snprintf(before, sizeof before, text, limited ? limit : "");
  CHECK(t, test_prepare(t, output, before, "%s", learn) == 0);
  CHECK(t, strstr(output, "1 document, 90000002 tokens") != NULL);
}

/* Documents of a letter, and two markers behind each, without white space. The first has so many
 * letters that the job, which is left open between 4 and 5 MiB, ends among the others, and some
 * more move them: wherever it ends in the 27 bytes from one to the next, there is none too many. */
static void test_prepare_markers(g2z_test *t) {
  static const char period[] = "a<|endoftext|><|endoftext|>";
  enum { PERIOD = sizeof period - 1, FIRST = 4190000, DOCUMENTS = 40000 };
  enum { LETTERS = FIRST + PERIOD, BYTES = PERIOD * DOCUMENTS };
  char output[16384];
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  char *text = (char *)malloc(LETTERS + BYTES);
  int *ids = (int *)malloc(sizeof *ids * (LETTERS + 2 * DOCUMENTS));
  CHECK(t, text && ids);
  for (int i = 0; i < LETTERS && text && ids; i++) ids[i] = (text[i] = 'a') - 33;
  for (int i = 0; i < BYTES && text; i++) text[LETTERS + i] = period[i % PERIOD];
  for (int i = 0; i < 2 * DOCUMENTS && ids; i++) ids[LETTERS + i] = i % 2 ? 256 : 'a' - 33;
  for (size_t more = 0; more < PERIOD && text && ids; more++) {
    const size_t begin = PERIOD - more;
    test_write_file(t, test_path(t, "m.txt"), text + begin, LETTERS + BYTES - begin);
    CHECK(t, test_prepare(t, output, "", "--split-docs eot --eot last --val-docs 0 --threads %zu "
                                         "--out $D $D/m.txt", 1 + more % 3) == 0);
    test_prepare_shard(t, "m_train_000000.bin", 1, ids + begin, LETTERS + 2 * DOCUMENTS - begin);
  }
  free(text);
  free(ids);
}

static void test_prepare_filters(g2z_test *t) {
  static const char *const flags[] = {
      "vocab", "train-bpe", "bytes", "field", "split-docs", "universal-newlines", "allow-special",
      "strict", "format", "eot", "out", "name", "shard-tokens", "val-fraction", "val-docs",
      "val-tokens", "train-docs", "encode", "decode", "bench", "threads", "help"};
  char output[16384], flag[64];
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make");
  test_write_file(t, test_path(t, "merges.txt"), test_bpe_merges, strlen(test_bpe_merges));
  test_write_file(t, test_path(t, "a.txt"), test_bpe_text, strlen(test_bpe_text));
  CHECK(t, test_prepare(t, output, "printf 'Hi \\n' |", "--encode") == 0);
  CHECK(t, strcmp(output, "39 72 220 198\n") == 0);
  CHECK(t, test_prepare(t, output, "printf 'a\n\nb\n\nc' |", "--encode --split-docs blank "
                        "--train-docs 1 --eot last --threads 2 --strict") == 0);
  CHECK(t, strcmp(output, "64 198 198 256\n") == 0);
  static const char *const useless[] = {
      "train-bpe 300", "format raw", "name x", "shard-tokens 9", "val-fraction 0.1", "val-docs 1",
      "val-tokens 1", "field text", "split-docs eot", "universal-newlines", "allow-special",
      "strict", "eot last", "train-docs 1", "threads 251"};
  for (size_t i = 0; i < sizeof useless / sizeof *useless; i++) /* text: --encode too */
    for (int decode = i > 6; decode < 2; decode++) {
      const char *mode = decode ? "decode" : "encode";
      CHECK(t, test_prepare(t, output, "echo 1 |", "--%s --%s", mode, useless[i]) == 1);
      snprintf(flag, sizeof flag, "--%.*s: --%s has no use for it", (int)strcspn(useless[i], " "),
               useless[i], mode);
      CHECK(t, strstr(output, flag) != NULL);
    }
  CHECK(t, test_prepare(t, output, "printf '39 72\\n\\t220 0' |", "--decode") == 0);
  CHECK(t, strcmp(output, "Hi !") == 0);
  CHECK(t, test_prepare(t, output, "", "--vocab $D/merges.txt --encode < $D/a.txt > $D/ids; "
                                       "%s --vocab $D/merges.txt --decode < $D/ids",
                        test_prepare_program()) == 0);
  CHECK(t, strcmp(output, test_bpe_text) == 0);
  CHECK(t, test_prepare(t, output, "{ yes 1 | head -5000; echo 257; } |", "--decode") == 1);
  CHECK(t, strstr(output, "byte 10002: an id beyond 256") != NULL); /* behind many that are fine */
  CHECK(t, test_prepare(t, output, "echo 1 99999999999 |", "--decode") == 1);
  CHECK(t, strstr(output, "byte 4: an id beyond 256") != NULL);
  CHECK(t, test_prepare(t, output, "echo 1 -2 |", "--decode") == 1);
  CHECK(t, strstr(output, "byte 2: 0x2d is no digit") != NULL);
  /* ended from outside, as soon as it catches signal 15: many ids, and a bench */
#define TEST_TERM "i=0; until [ $i = 200 ] || grep -qs 'SigCgt:.*[4-7c-f]...$' /proc/$!/status; " \
                  "do i=$((i + 1)); sleep 0.05; done; kill -TERM $!; wait $!"
  CHECK(t, test_prepare(t, output, "yes 1 | head -c 2000000000 |",
                        "--decode > /dev/null & " TEST_TERM) == 1);
  CHECK(t, strstr(output, "stopped by signal 15") != NULL);
  CHECK(t, test_prepare(t, output, "yes 'some text' | head -c 40000000 > $D/b.txt;",
                        "--bench $D/b.txt --out $D & " TEST_TERM) == 1);
#undef TEST_TERM
  CHECK(t, strstr(output, "stopped by signal 15") != NULL);
  CHECK(t, test_prepare(t, output, "", "--bench $D/a.txt --out $D") == 0);
  CHECK(t, strstr(output, "text to ids") && strstr(output, "MB/s"));
  CHECK(t, test_prepare(t, output, "", "--help") == 0);
  for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
    snprintf(flag, sizeof flag, "\n  --%s ", flags[i]);
    t->checks++;
    if (!strstr(output, flag)) test_fail(t, __FILE__, __LINE__, "--help lacks --%s", flags[i]);
  }
}

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
        CHECK(t, g2z_loader_sequences(loader) == N && g2z_loader_tokens(loader) == 1497);
        CHECK(t, g2z_loader_steps_per_epoch(loader) == steps);
        for (int step = 0; step < 2 * steps; step++) {
          g2z_loader_position at = g2z_loader_tell(loader);
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
  const int64_t steps = g2z_loader_steps_per_epoch(loader);
  CHECK(t, g2z_loader_sequences(loader) == 99 && steps == 33);
  for (int i = 0; i < STEPS; i++) {
    at[i] = g2z_loader_tell(loader);
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
  header[1] = 7;
  REFUSE_FILE(header, 1200, G2Z_UNSUPPORTED, "uint32 tokens of Llama 3");
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
    CHECK(t, done ? n > 9 : status == G2Z_NO_MEMORY);
    g2z_loader_free(loader);
    g2z_shard_writer_free(writer);
    CHECK(t, t->allocations == 0);
  }
}

/* ----- >>10 ops: the CPU's table against naive references in double --------
 * Every buffer stands between guard values. Sizes leave tails in every block. A bound is a number
 * of fp32 roundings of the sum of the terms' magnitudes, and for 16-bit types one unit in the last
 * place of the result on top: where the reference is close to a tie, either neighbour is right. */

#define OPS_GUARD 16
#define OPS_BLOCKS 64

typedef struct ops_env {
  g2z_test *t;
  g2z_device *device;
  const g2z_ops *ops;
  float *blocks[OPS_BLOCKS];
  size_t counts[OPS_BLOCKS];
  int used;
  uint32_t seed;
} ops_env;

static void ops_open(ops_env *e, g2z_test *t, g2z_dtype dtype, g2z_dtype grad_dtype) {
  memset(e, 0, sizeof *e);
  e->t = t;
  e->seed = 1;
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, dtype, grad_dtype, &e->device));
  e->ops = e->device->ops;
}

/* An output: `count` floats that hold `value`, between guards. */
static float *ops_filled(ops_env *e, size_t count, float value) {
  if (count > (size_t)1 << 30 || e->used == OPS_BLOCKS) abort();
  float *block = (float *)malloc((count + 2 * OPS_GUARD) * sizeof *block);
  if (!block) abort();
  for (size_t i = 0; i < count + 2 * OPS_GUARD; i++) block[i] = -98765.25f;
  for (size_t i = 0; i < count; i++) block[OPS_GUARD + i] = value;
  e->blocks[e->used] = block;
  e->counts[e->used++] = count;
  return block + OPS_GUARD;
}

/* An input: numbers of the device's type in [-scale, scale), which are multiples of scale / 2048,
 * so that each is exact in fp16 when scale is a power of two. */
static float *ops_random(ops_env *e, size_t count, float scale) {
  float *x = ops_filled(e, count, 0);
  for (size_t i = 0; i < count; i++) {
    e->seed = e->seed * 1664525u + 1013904223u;
    x[i] = g2z_round(e->device->dtype, scale * ((float)(e->seed >> 20) / 2048.0f - 1.0f));
  }
  return x;
}

static double *ops_doubles(ops_env *e, size_t count) {
  float *x = ops_filled(e, 2 * count + 2, 0);
  while ((uintptr_t)x % sizeof(double)) x++;
  return (double *)(void *)x;
}

/* Checks all guards and frees everything. */
static void ops_close(ops_env *e) {
  int intact = 1;
  for (int b = 0; b < e->used; b++) {
    for (size_t i = 0; i < OPS_GUARD; i++) {
      if (e->blocks[b][i] != -98765.25f) intact = 0;
      if (e->blocks[b][OPS_GUARD + e->counts[b] + i] != -98765.25f) intact = 0;
    }
    free(e->blocks[b]);
  }
  CHECK(e->t, intact);
  g2z_device_free(e->device);
}

/* The distance between neighbours of x in a type; 0 for fp32, where bounds say it all. */
static double ops_ulp(g2z_dtype dtype, double x) {
  if (dtype != G2Z_FP16 && dtype != G2Z_BF16) return 0;
  int exponent;
  frexp(x, &exponent); /* |x| in [2^(exponent-1), 2^exponent) */
  if (dtype == G2Z_BF16) return ldexp(1.0, exponent - 8);
  return ldexp(1.0, (exponent < -13 ? -13 : exponent) - 11);
}

/* got = want within `roundings` fp32 roundings of `size` (NULL: of |want|), and a ulp of the type;
 * and every value is one of the type. Reports the worst element only. */
static void ops_expect(ops_env *e, const char *what, const float *got, const double *want,
                       const double *size, size_t count, g2z_dtype dtype, double roundings) {
  double worst = 0;
  size_t at = 0;
  int of_type = 1;
  for (size_t i = 0; i < count; i++) {
    double bound = roundings * ldexp(size ? size[i] : fabs(want[i]), -24) +
                   ops_ulp(dtype, want[i]) + 1e-37;
    double ratio = fabs((double)got[i] - want[i]) / bound;
    if (!(ratio <= worst)) worst = ratio, at = i; /* NaN sticks */
    if (g2z_round(dtype, got[i]) != got[i]) of_type = 0;
    if (worst != worst) break;
  }
  e->t->checks++;
  if (!(worst <= 1))
    test_fail(e->t, __FILE__, __LINE__, "%s: element %zu of %zu is %.9g, expected %.9g: %.3g times "
              "the bound", what, at, count, (double)got[at], want[at], worst);
  if (!of_type) test_fail(e->t, __FILE__, __LINE__, "%s: not rounded to its type", what);
}

/* The bound of a blocked sum of n terms: its roundings walk at random, so about sqrt(n) of them
 * remain; four times that has never been seen. */
static double ops_walk(int n) { return 4 + 4 * sqrt((double)n); }

static const g2z_dtype ops_dtypes[3] = {G2Z_FP32, G2Z_FP16, G2Z_BF16};

/* c = a b in double, element (i,k) of a at a[i * ar + k * ac]; size: the same of magnitudes. */
static void ops_product(double *c, double *size, const float *a, int ar, int ac, const float *b,
                        int br, int bc, int M, int N, int K) {
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) {
      double sum = 0, sizes = 0;
      for (int k = 0; k < K; k++) {
        double term = (double)a[i * ar + k * ac] * (double)b[k * br + j * bc];
        sum += term;
        sizes += fabs(term);
      }
      c[i * N + j] = sum;
      size[i * N + j] = sizes;
    }
}

static void ops_column_sums(double *sum, double *size, const float *x, const float *before, int N,
                            int C) {
  for (int c = 0; c < C; c++) {
    sum[c] = before ? (double)before[c] : 0;
    size[c] = fabs(sum[c]);
    for (int n = 0; n < N; n++) {
      sum[c] += (double)x[n * C + c];
      size[c] += fabs((double)x[n * C + c]);
    }
  }
}

/* Dropout's factor by its definition in the header. */
static double ops_factor(const g2z_dropout *d, int b, uint64_t element) {
  if (!d || d->probability <= 0) return 1;
  uint32_t counter[4], bits[4];
  counter[0] = (uint32_t)(element / 4);
  counter[1] = d->first + (uint32_t)b * d->stride;
  counter[2] = d->site;
  counter[3] = (uint32_t)d->state->step;
  g2z_philox(d->seed, G2Z_RANDOM_DROPOUT, counter, bits);
  return g2z_uniform(bits[element % 4]) >= d->probability ? 1.0 / (1.0 - d->probability) : 0.0;
}

static g2z_dropout ops_dropout(const g2z_step_state *state, float probability, int seq) {
  g2z_dropout d;
  memset(&d, 0, sizeof d);
  d.probability = probability;
  d.site = 7;
  d.first = 3;
  d.stride = 5;
  d.seq = seq;
  d.seed = 0x123456789abcdefull;
  d.state = state;
  return d;
}

/* ----- rounding and devices --------------------------------------------- */

/* The value of 16 bits, computed without any rounding. */
static double ops_decode(g2z_dtype dtype, uint32_t bits) {
  int fraction = dtype == G2Z_FP16 ? 10 : 7, bias = dtype == G2Z_FP16 ? 15 : 127;
  int exponent = (int)((bits & 0x7fffu) >> fraction);
  double value = (double)(bits & ((1u << fraction) - 1u));
  if (exponent) value += (double)(1u << fraction);
  else exponent = 1;
  value = ldexp(value, exponent - bias - fraction);
  return bits & 0x8000u ? -value : value;
}

static void test_ops_round(g2z_test *t) {
  for (int which = 1; which < 3; which++) {
    g2z_dtype dtype = ops_dtypes[which];
    uint32_t largest = dtype == G2Z_FP16 ? 0x7bffu : 0x7f7fu;
    long wrong = 0;
    for (uint32_t bits = 0; bits <= largest; bits++)
      for (int sign = 0; sign < 2; sign++) {
        double low = ops_decode(dtype, bits | (sign ? 0x8000u : 0u));
        double high = ops_decode(dtype, (bits + 1) | (sign ? 0x8000u : 0u));
        double even = bits & 1 ? high : low;
        /* Past the largest value stands infinity, where the next one would be. */
        double top = bits == largest ? (sign ? -INFINITY : INFINITY) : high;
        if (bits == largest) even = top;
        float middle = (float)((low + high) / 2);
        wrong += g2z_round(dtype, (float)low) != (float)low;
        wrong += g2z_round(dtype, middle) != (float)even;
        wrong += g2z_round(dtype, nextafterf(middle, 0.0f)) != (float)low;
        wrong += g2z_round(dtype, nextafterf(middle, sign ? -INFINITY : INFINITY)) != (float)top;
      }
    CHECK(t, wrong == 0);
    CHECK(t, isnan(g2z_round(dtype, NAN)) && isnan(g2z_round(dtype, -NAN)));
    CHECK(t, g2z_round(dtype, INFINITY) == INFINITY && g2z_round(dtype, -INFINITY) == -INFINITY);
    CHECK(t, signbit(g2z_round(dtype, -0.0f)) && signbit(g2z_round(dtype, -1e-45f)));
  }
  CHECK(t, g2z_round(G2Z_FP16, 65504.0f) == 65504.0f && g2z_round(G2Z_FP16, 65519.99f) == 65504.0f);
  CHECK(t, g2z_round(G2Z_FP16, 65520.0f) == INFINITY && g2z_round(G2Z_FP16, -3e38f) == -INFINITY);
  CHECK(t, g2z_round(G2Z_FP16, 0.1f) == 0.0999755859375f);
  CHECK(t, g2z_round(G2Z_BF16, 0.1f) == 0.10009765625f && g2z_round(G2Z_BF16, 3.4e38f) == INFINITY);
  CHECK(t, g2z_round(G2Z_FP32, 0.1f) == 0.1f && g2z_round(G2Z_TF32, 0.1f) == 0.1f);
}

/* What control groups leave of a machine with 1000 bytes, 700 of them free. */
static void test_cgroup_memory(g2z_test *t) {
  static const struct { const char *files[12]; size_t free_bytes, total_bytes; } cases[] = {
      {{NULL}, 700, 1000},                                       /* no Linux, or no groups */
      {{"proc/self/cgroup", "0::/\n"}, 700, 1000},               /* the root group has no limit */
      {{"proc/self/cgroup", "0::/a/b\n",                         /* its own; pages of files */
        "sys/fs/cgroup/a/b/memory.max", "600\n", "sys/fs/cgroup/a/b/memory.current", "500\n",
        "sys/fs/cgroup/a/b/memory.stat", "anon 7\ninactive_file 50\nactive_file 60\n"}, 150, 600},
      {{"proc/self/cgroup", "0::/a/b\n",                         /* one above is tighter */
        "sys/fs/cgroup/a/b/memory.max", "max\n", "sys/fs/cgroup/a/b/memory.current", "500\n",
        "sys/fs/cgroup/a/memory.max", "900\n", "sys/fs/cgroup/a/memory.current", "650\n"}, 250,
       900},
      {{"proc/self/cgroup", "0::/a\n", "sys/fs/cgroup/a/memory.max", "900\n",
        "sys/fs/cgroup/memory.max", "800\n", "sys/fs/cgroup/memory.current", "10\n"}, 700, 800},
      {{"proc/self/cgroup", "0::/../../elsewhere\n",         /* a container's own is the mount */
        "sys/fs/cgroup/memory.max", "300\n", "sys/fs/cgroup/memory.current", "310\n"}, 0, 300},
      {{"proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/x\n1:cpu:/a\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes", "400\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes", "200\n", "sys/fs/cgroup/memory/memory.stat",
        "cache 9\ninactive_file 1\ntotal_inactive_file 30\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1\n"}, 230, 400},
      {{"proc/self/cgroup", "4:memory:/x\n",                     /* version 1 without a limit */
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n"}, 700, 1000},
      {{"proc/self/cgroup", "\n:\n::\n4:memory\n0::\n0::/a", "sys/fs/cgroup/a/memory.max", "many\n",
        "sys/fs/cgroup/memory.max", ""}, 700, 1000}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char root[512], name[32], path[700];
    snprintf(name, sizeof name, "machine%zu", i);
    snprintf(root, sizeof root, "%s", test_path(t, name));
    for (const char *const *file = cases[i].files; *file; file += 2) {
      snprintf(path, sizeof path, "%s/%s", root, file[0]);
      *strrchr(path, '/') = 0;
      CHECK_OK(t, g2z_make_directory(&t->services, path));
      path[strlen(path)] = '/';
      test_write_file(t, path, file[1], strlen(file[1]));
    }
    size_t free_bytes = 700, total_bytes = 1000;
    g2z__cgroup_memory(root, &free_bytes, &total_bytes);
    CHECK(t, free_bytes == cases[i].free_bytes && total_bytes == cases[i].total_bytes);
  }
  /* Where this process has a limit, what the device tells is held against it. */
  size_t free_bytes, total_bytes, limited_free = SIZE_MAX, limited_total = SIZE_MAX;
  CHECK_OK(t, g2z_device_memory(&t->services, G2Z_DEVICE_CPU, &free_bytes, &total_bytes));
  g2z__cgroup_memory("", &limited_free, &limited_total);
  CHECK(t, total_bytes <= limited_total && free_bytes <= limited_total && total_bytes > 0);
}

/* Peak rates go by the whole name: a variant, another chip and a part of a GPU have other rates. */
static void test_ops_peaks(g2z_test *t) {
  static const struct { const char *name; double half, single; } cases[] = { /* 0: not known */
      {"NVIDIA H100 80GB HBM3", 989.4, 66.9}, {"NVIDIA H100 PCIe", 756.5, 51.2},
      {"NVIDIA H100 NVL", 835.5, 60},         {"NVIDIA H200", 989.4, 66.9},
      {"NVIDIA H200 NVL", 835.5, 60},         {"NVIDIA GH200 480GB", 989.4, 66.9},
      {"NVIDIA B200", 2250, 75},              {"NVIDIA GB200", 2500, 80},
      {"NVIDIA A100 80GB PCIe", 312, 19.5},   {"NVIDIA L4", 121, 30.3},
      {"NVIDIA L40S", 362, 91.6},             {"Tesla T4", 65, 8.1},
      {"", 0, 0},                             {"H100", 0, 0},
      {"NVIDIA H100", 0, 0},                  {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0, 0},
      {"NVIDIA H200-141C", 0, 0},             {"NVIDIA A100X", 0, 0},
      {"NVIDIA RTX A1000", 0, 0},             {"NVIDIA L40", 0, 0},
      {"Quadro T400", 0, 0},                  {"NVIDIA GeForce RTX 4090", 0, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    double half = g2z__peak_flops(cases[i].name, G2Z_FP16) * 1e-12;
    double single = g2z__peak_flops(cases[i].name, G2Z_FP32) * 1e-12;
    t->checks++;
    if (cases[i].half > 0 ? fabs(half - cases[i].half) > 1e-9 || fabs(single - cases[i].single) > 1e-9
                          : !isnan(half) || !isnan(single))
      test_fail(t, __FILE__, __LINE__, "\"%s\": %g and %g TFLOP/s", cases[i].name, half, single);
  }
  CHECK(t, g2z__peak_flops("NVIDIA H200", G2Z_BF16) == g2z__peak_flops("NVIDIA H200", G2Z_FP16));
  CHECK(t, g2z__peak_flops("NVIDIA H200", G2Z_TF32) == 494.7e12);
  CHECK(t, isnan(g2z__peak_flops("Tesla T4", G2Z_TF32))); /* it has no tf32 */
}

static void test_ops_device(g2z_test *t) {
  g2z_services *s = &t->services;
  g2z_device *device;
  size_t free_bytes, total_bytes;
  CHECK_STATUS(t, g2z_device_create(s, G2Z_DEVICE_CPU, G2Z_TF32, G2Z_TF32, &device),
               G2Z_UNSUPPORTED, s, "--dtype fp32");
  CHECK(t, device == NULL);
  CHECK_STATUS(t, g2z_device_create(s, G2Z_DEVICE_CPU, G2Z_FP16, G2Z_BF16, &device),
               G2Z_BAD_ARGUMENT, s, "gradients");
  CHECK_STATUS(t, g2z_device_create(s, G2Z_DEVICE_CPU, (g2z_dtype)9, G2Z_FP32, &device),
               G2Z_BAD_ARGUMENT, s, "type 9");
  t->fail_at = 1;
  CHECK_STATUS(t, g2z_device_create(s, G2Z_DEVICE_CPU, G2Z_FP32, G2Z_FP32, &device), G2Z_NO_MEMORY,
               s, NULL);
  CHECK(t, device == NULL);
  t->fail_at = 0;
  g2z_device_free(NULL);
  CHECK_OK(t, g2z_device_memory(s, G2Z_DEVICE_CPU, &free_bytes, &total_bytes));
  CHECK(t, free_bytes >= 1 << 20 && free_bytes <= total_bytes);
  CHECK_OK(t, g2z_device_create(s, G2Z_DEVICE_CPU, G2Z_BF16, G2Z_FP32, &device));
  CHECK_OK(t, g2z_device_tuning_read(device, "")); /* its own, and a GPU's */
  CHECK_OK(t, g2z_device_tuning_read(device, "gpt2_zero tuning 3, cuBLASLt 1, 2 SMs, x\n1 2\n"));
  CHECK_STATUS(t, g2z_device_tuning_read(device, "gpt2_zero tuning 1, cuBLASLt 1, 2 SMs, x\n"),
               G2Z_FORMAT, s, "begins with \"gpt2_zero tuning 1, cuBLASLt 1, 2 SMs, x\"");
  CHECK_STATUS(t, g2z_device_tuning_read(device, "\n"), G2Z_FORMAT, s, "a run's tuning.txt");
  CHECK(t, device->dtype == G2Z_BF16 && device->grad_dtype == G2Z_FP32 && device->services == s);
  CHECK(t, device->kind == G2Z_DEVICE_CPU && device->ops == g2z_cpu_ops());
  void *memory;
  CHECK_OK(t, device->ops->allocate(device, 1000, &memory));
  int zero = 1;
  for (int i = 0; i < 1000; i++) zero &= ((char *)memory)[i] == 0;
  CHECK(t, zero);
  char text[6] = "hello", back[6] = "";
  CHECK_OK(t, device->ops->upload(device, memory, text, 6));
  CHECK_OK(t, device->ops->mark(device, 7));
  CHECK_OK(t, device->ops->wait(device, 7));
  CHECK_OK(t, device->ops->download(device, back, memory, 6));
  CHECK_OK(t, device->ops->synchronize(device));
  CHECK(t, strcmp(back, "hello") == 0);
  CHECK_OK(t, device->ops->zero(device, memory, 3));
  CHECK(t, memcmp(memory, "\0\0\0lo", 6) == 0);
  device->ops->release(device, memory);
  t->fail_at = 1;
  CHECK_STATUS(t, device->ops->allocate(device, 1000, &memory), G2Z_NO_MEMORY, s, "1000 bytes");
  CHECK_STATUS(t, device->ops->allocate_host(device, 1000, &memory), G2Z_NO_MEMORY, s, NULL);
  CHECK(t, memory == NULL);
  t->fail_at = 0;
  g2z_device_free(device);
}

/* ----- linear ----------------------------------------------------------- */

/* 0.5 x (1 + tanh u), written so that it does not cancel: 1 + tanh u is 2 / (1 + e^(-2u)). */
static double ops_gelu(double x) {
  return x / (1 + exp(-2 * sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

/* By its definition as a derivative: a central difference in double is exact to 1e-10. */
static double ops_gelu_slope(double x) {
  return (ops_gelu(x + 1e-5) - ops_gelu(x - 1e-5)) / 2e-5;
}

static void ops_linear_forward(ops_env *e, int N, int I, int O) {
  const g2z_ops *ops = e->ops;
  g2z_dtype dtype = e->device->dtype;
  size_t n = (size_t)N * (size_t)O;
  float *x = ops_random(e, (size_t)N * (size_t)I, 1);
  float *w = ops_random(e, (size_t)I * (size_t)O, 0.25f);
  float *bias = ops_random(e, (size_t)O, 1), *residual = ops_random(e, n, 4);
  float *y = ops_filled(e, n, 777), *slope = ops_filled(e, n, 777);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n), *more = ops_doubles(e, n);
  double *slopes = ops_doubles(e, n), *slope_size = ops_doubles(e, n);
  ops_product(want, size, x, I, 1, w, O, 1, N, O, I);
  for (size_t i = 0; i < n; i++) want[i] += (double)bias[i % (size_t)O];
  for (size_t i = 0; i < n; i++) size[i] += fabs((double)bias[i % (size_t)O]);
  CHECK_OK(e->t, ops->linear_fwd(e->device, y, NULL, x, w, bias, NULL, NULL, N, I, O));
  ops_expect(e, "linear_fwd", y, want, size, n, dtype, ops_walk(I));

  /* The exponent of the sigmoid is off by 3 roundings of 2u, and u is below 6 where it matters. In
   * fp32 GELU's input is what was just stored; else it is only known as far as its sum is, with
   * slopes below 1.13 and their own below 1. */
  int known = dtype == G2Z_FP32;
  for (size_t i = 0; i < n; i++) {
    double input = known ? (double)y[i] : want[i];
    more[i] = ops_gelu(input);
    slopes[i] = ops_gelu_slope(input);
    slope_size[i] = 1 + (known ? 0 : size[i]);
  }
  memset(y, 0, n * sizeof *y);
  CHECK_OK(e->t, ops->linear_fwd(e->device, y, slope, x, w, bias, NULL, NULL, N, I, O));
  ops_expect(e, "linear_fwd's gelu", y, more, known ? NULL : size, n, dtype,
             60 + (known ? 0 : 2 * ops_walk(I)));
  ops_expect(e, "linear_fwd's slope", slope, slopes, slope_size, n, dtype,
             60 + (known ? 0 : ops_walk(I)));

  g2z_step_state state;
  memset(&state, 0, sizeof state);
  state.step = 11;
  int seq = N > 3 ? N / 2 : 1; /* rows past the second sequence are a third one */
  g2z_dropout dropout = ops_dropout(&state, 0.3f, seq);
  for (int drop = 0; drop < 2; drop++) {
    for (size_t i = 0; i < n; i++) {
      int row = (int)(i / (size_t)O);
      double factor = drop ? ops_factor(&dropout, row / seq, i - (size_t)(row / seq * seq * O)) : 1;
      more[i] = want[i] * factor + (double)residual[i];
    }
    memcpy(y, residual, n * sizeof *y); /* in place: y is the residual */
    CHECK_OK(e->t, ops->linear_fwd(e->device, y, NULL, x, w, bias, y, drop ? &dropout : NULL, N, I,
                                   O));
    for (size_t i = 0; i < n && !drop; i++) size[i] += fabs((double)residual[i]);
    ops_expect(e, "linear_fwd into the residual", y, more, size, n, dtype, 2 * ops_walk(I));
  }
}

static void ops_linear_backward(ops_env *e, int N, int I, int O) {
  const g2z_ops *ops = e->ops;
  g2z_dtype dtype = e->device->dtype, grad = e->device->grad_dtype;
  size_t n = (size_t)N * (size_t)I, weights = (size_t)I * (size_t)O;
  float *x = ops_random(e, n, 1), *w = ops_random(e, weights, 0.25f), *slope = ops_random(e, n, 4);
  float *dy = ops_random(e, (size_t)N * (size_t)O, 1), *before = ops_random(e, weights, 8);
  float *dx = ops_filled(e, n, 777), *dw = ops_filled(e, weights, 777);
  float *dbias = ops_filled(e, (size_t)I, 777);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n);
  ops_product(want, size, dy, O, 1, w, 1, O, N, I, O);
  CHECK_OK(e->t, ops->linear_bwd_data(e->device, dx, NULL, dy, w, NULL, G2Z_OVERWRITE, N, I, O));
  ops_expect(e, "linear_bwd_data", dx, want, size, n, dtype, ops_walk(O));
  for (size_t i = 0; i < n; i++) want[i] *= (double)slope[i];
  for (size_t i = 0; i < n; i++) size[i] *= fabs((double)slope[i]);
  double *sums = ops_doubles(e, (size_t)I), *sizes = ops_doubles(e, (size_t)I);
  for (int mode = 0; mode < 2; mode++) {
    memset(dx, 0, n * sizeof *dx);
    memcpy(dbias, before, (size_t)I * sizeof *dbias);
    CHECK_OK(e->t, ops->linear_bwd_data(e->device, dx, dbias, dy, w, slope,
                                        mode ? G2Z_ACCUMULATE : G2Z_OVERWRITE, N, I, O));
    ops_expect(e, "linear_bwd_data with a slope", dx, want, size, n, dtype, ops_walk(O));
    ops_column_sums(sums, sizes, dx, mode ? before : NULL, N, I);
    ops_expect(e, "linear_bwd_data's dbias", dbias, sums, sizes, (size_t)I, grad, ops_walk(N));
  }
  double *want_w = ops_doubles(e, weights), *size_w = ops_doubles(e, weights);
  ops_product(want_w, size_w, x, 1, I, dy, O, 1, I, O, N);
  CHECK_OK(e->t, ops->linear_bwd_weight(e->device, dw, x, dy, G2Z_OVERWRITE, N, I, O));
  ops_expect(e, "linear_bwd_weight", dw, want_w, size_w, weights, grad, ops_walk(N));
  memcpy(dw, before, weights * sizeof *dw);
  for (size_t i = 0; i < weights; i++) want_w[i] += (double)before[i];
  for (size_t i = 0; i < weights; i++) size_w[i] += fabs((double)before[i]);
  CHECK_OK(e->t, ops->linear_bwd_weight(e->device, dw, x, dy, G2Z_ACCUMULATE, N, I, O));
  ops_expect(e, "linear_bwd_weight +=", dw, want_w, size_w, weights, grad, ops_walk(N));
}

static void test_ops_linear(g2z_test *t) {
  /* One of everything; smaller than a kernel; past every block: 288 rows, 192 deep, 128 across. */
  static const int sizes[4][3] = {{1, 1, 1}, {5, 24, 16}, {37, 401, 133}, {301, 40, 264}};
  for (int i = 0; i < 3; i++)
    for (int s = 0; s < 4; s++) {
      ops_env e;
      ops_open(&e, t, ops_dtypes[i], s == 1 ? G2Z_FP32 : ops_dtypes[i]);
      ops_linear_forward(&e, sizes[s][0], sizes[s][1], sizes[s][2]);
      ops_linear_backward(&e, sizes[s][0], sizes[s][1], sizes[s][2]);
      ops_close(&e);
    }
}

/* ----- LayerNorm -------------------------------------------------------- */

typedef struct ops_norm { /* a LayerNorm and what its forward pass is to leave */
  int N, C;
  float *x, *w, *mean, *rstd;
  double *means, *rstds;
} ops_norm;

static ops_norm ops_layernorm_forward(ops_env *e, int N, int C) {
  size_t n = (size_t)N * (size_t)C;
  ops_norm l;
  l.N = N, l.C = C;
  l.x = ops_random(e, n, 2), l.w = ops_random(e, (size_t)C, 1);
  l.mean = ops_filled(e, (size_t)N, 777), l.rstd = ops_filled(e, (size_t)N, 777);
  l.means = ops_doubles(e, (size_t)N), l.rstds = ops_doubles(e, (size_t)N);
  float *b = ops_random(e, (size_t)C, 1), *y = ops_filled(e, n, 777);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n);
  for (size_t i = 0; i < n; i++) /* a mean to be taken out */
    l.x[i] = g2z_round(e->device->dtype, l.x[i] + 3);
  for (int r = 0; r < N; r++) {
    double m = 0, variance = 0;
    for (int c = 0; c < C; c++) m += (double)l.x[r * C + c] / C;
    for (int c = 0; c < C; c++) variance += pow((double)l.x[r * C + c] - m, 2) / C;
    l.means[r] = m;
    l.rstds[r] = 1 / sqrt(variance + 1e-5);
    for (int c = 0; c < C; c++) {
      want[r * C + c] = ((double)l.x[r * C + c] - m) * l.rstds[r] * (double)l.w[c] + (double)b[c];
      size[r * C + c] = 5 * l.rstds[r] * fabs((double)l.w[c]) + fabs((double)b[c]);
    }
  }
  CHECK_OK(e->t, e->ops->layernorm_fwd(e->device, y, l.mean, l.rstd, l.x, l.w, b, N, C));
  ops_expect(e, "layernorm_fwd", y, want, size, n, e->device->dtype, 16);
  ops_expect(e, "layernorm_fwd's mean", l.mean, l.means, NULL, (size_t)N, G2Z_FP32, 16);
  ops_expect(e, "layernorm_fwd's rstd", l.rstd, l.rstds, NULL, (size_t)N, G2Z_FP32, 64);
  return l;
}

/* What dres, dw and db must be, from dy and, with +=, from what was there before. */
static void ops_layernorm_gradients(const ops_norm *l, const float *dy, const float *before,
                                    int add_dres, int add_params, double *dres, double *dres_size,
                                    double *dw, double *dw_size) {
  int C = l->C;
  for (int c = 0; c < C; c++) {
    dw[c] = add_params ? (double)before[c] : 0;
    dw_size[c] = fabs(dw[c]);
  }
  for (int r = 0; r < l->N; r++) {
    double g = 0, gx = 0, rstd = l->rstds[r];
    for (int c = 0; c < C; c++) {
      double term = (double)dy[r * C + c] * (double)l->w[c];
      g += term / C;
      gx += term * ((double)l->x[r * C + c] - l->means[r]) * rstd / C;
    }
    for (int c = 0; c < C; c++) {
      int i = r * C + c;
      double xhat = ((double)l->x[i] - l->means[r]) * rstd, old = add_dres ? (double)before[i] : 0;
      dres[i] = old + rstd * ((double)dy[i] * (double)l->w[c] - g - xhat * gx);
      dres_size[i] = fabs(old) + rstd * (2 + (1 + fabs(xhat)) * 5 * rstd);
      dw[c] += (double)dy[i] * xhat;
      dw_size[c] += fabs((double)dy[i]) * 5 * rstd;
    }
  }
}

static void ops_layernorm_backward(ops_env *e, const ops_norm *l, int drop) {
  const g2z_ops *ops = e->ops;
  g2z_dtype dtype = e->device->dtype, grad = e->device->grad_dtype;
  int N = l->N, C = l->C, seq = N > 3 ? N / 2 : 1;
  size_t n = (size_t)N * (size_t)C, row = (size_t)C;
  g2z_step_state state;
  memset(&state, 0, sizeof state);
  g2z_dropout dropout = ops_dropout(&state, 0.4f, seq), *d = drop ? &dropout : NULL;
  float *dy = ops_random(e, n, 1), *before = ops_random(e, n, 8), *dres = ops_filled(e, n, 777);
  float *dropped = ops_filled(e, n, 777), *plain = ops_filled(e, n, 777);
  float *dw = ops_filled(e, row, 777), *db = ops_filled(e, row, 777);
  float *dbias = ops_filled(e, row, 777);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n);
  double *sums = ops_doubles(e, row), *sizes = ops_doubles(e, row);
  for (int mode = 0; mode < 4; mode++) { /* = and += for dres and for the parameters */
    g2z_write res_mode = mode & 1 ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
    g2z_write param_mode = mode & 2 ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
    memcpy(dres, before, n * sizeof *dres);
    memcpy(dw, before, row * sizeof *dw);
    memcpy(db, before, row * sizeof *db);
    memcpy(dbias, before, row * sizeof *dbias);
    CHECK_OK(e->t, ops->layernorm_bwd(e->device, dres, dropped, dw, db, dbias, dy, l->x, l->w,
                                      l->mean, l->rstd, res_mode, param_mode, d, N, C));
    ops_layernorm_gradients(l, dy, before, mode & 1, mode & 2, want, size, sums, sizes);
    ops_expect(e, "layernorm_bwd's dres", dres, want, size, n, dtype, 24);
    ops_expect(e, "layernorm_bwd's dw", dw, sums, sizes, row, grad, ops_walk(N));
    ops_column_sums(sums, sizes, dy, mode & 2 ? before : NULL, N, C);
    ops_expect(e, "layernorm_bwd's db", db, sums, sizes, row, grad, ops_walk(N));
    ops_column_sums(sums, sizes, drop ? dropped : dres, mode & 2 ? before : NULL, N, C);
    ops_expect(e, "layernorm_bwd's dbias", dbias, sums, sizes, row, grad, ops_walk(N));
    for (size_t i = 0; i < n; i++) {
      size_t b = i / row / (size_t)seq;
      want[i] = drop ? (double)dres[i] * ops_factor(d, (int)b, i - b * (size_t)seq * row) : 777;
    }
    ops_expect(e, "layernorm_bwd's dropped", dropped, want, NULL, n, drop ? dtype : G2Z_FP32, 4);
  }
  /* The first LayerNorm has no projection before it: no dbias, and nobody asks what is dropped. */
  CHECK_OK(e->t, ops->layernorm_bwd(e->device, plain, NULL, dw, db, NULL, dy, l->x, l->w, l->mean,
                                    l->rstd, G2Z_OVERWRITE, G2Z_OVERWRITE, d, N, C));
  CHECK_OK(e->t, ops->layernorm_bwd(e->device, dres, dropped, dw, db, dbias, dy, l->x, l->w,
                                    l->mean, l->rstd, G2Z_OVERWRITE, G2Z_OVERWRITE, d, N, C));
  CHECK(e->t, memcmp(plain, dres, n * sizeof *dres) == 0);
}

static void test_ops_layernorm(g2z_test *t) {
  static const int sizes[4][2] = {{1, 8}, {7, 40}, {150, 37}, {13, 776}};
  for (int i = 0; i < 3; i++)
    for (int s = 0; s < 4; s++) {
      ops_env e;
      ops_open(&e, t, ops_dtypes[i], s == 1 ? G2Z_FP32 : ops_dtypes[i]);
      ops_norm norm = ops_layernorm_forward(&e, sizes[s][0], sizes[s][1]);
      ops_layernorm_backward(&e, &norm, s & 1);
      ops_close(&e);
    }
}

/* ----- attention -------------------------------------------------------- */

/* out, lse, and out's sums of magnitudes, from the definition. `shift` moves element `moved` of
 * qkv, for differences. */
static void ops_attention(double *out, double *size, double *lse, const float *qkv,
                          const g2z_dropout *dropout, int B, int T, int C, int NH, size_t moved,
                          double shift) {
  int HS = C / NH;
  double *p = (double *)malloc((size_t)T * sizeof *p);
  if (!p) abort();
#define OPS_AT(t_, part, c) \
  (((size_t)(b * T + (t_)) * 3 + (part)) * (size_t)C + (size_t)(h * HS + (c)))
#define OPS_QKV(t_, part, c) \
  ((double)qkv[OPS_AT(t_, part, c)] + (OPS_AT(t_, part, c) == moved ? shift : 0))
  for (int b = 0; b < B; b++)
    for (int h = 0; h < NH; h++)
      for (int q = 0; q < T; q++) {
        double max = -INFINITY, sum = 0;
        for (int k = 0; k <= q; k++) {
          p[k] = 0;
          for (int c = 0; c < HS; c++) p[k] += OPS_QKV(q, 0, c) * OPS_QKV(k, 1, c);
          p[k] /= sqrt((double)HS);
          if (p[k] > max) max = p[k];
        }
        for (int k = 0; k <= q; k++) sum += exp(p[k] - max);
        if (lse) lse[(b * NH + h) * T + q] = max + log(sum);
        for (int c = 0; c < HS; c++) {
          double o = 0, s = 0;
          for (int k = 0; k <= q; k++) {
            double term = exp(p[k] - max) / sum * OPS_QKV(k, 2, c) *
                          ops_factor(dropout, b, ((uint64_t)h * (uint64_t)T + (uint64_t)q) *
                                                 (uint64_t)T + (uint64_t)k);
            o += term;
            s += fabs(term);
          }
          out[(size_t)(b * T + q) * (size_t)C + (size_t)(h * HS + c)] = o;
          if (size) size[(size_t)(b * T + q) * (size_t)C + (size_t)(h * HS + c)] = s;
        }
      }
#undef OPS_QKV
#undef OPS_AT
  free(p);
}

/* The gradient by the chain rule, with the lse and out that the op is given. */
static void ops_attention_back(double *dqkv, double *size, const float *dout, const float *out,
                               const float *lse, const float *qkv, const g2z_dropout *dropout,
                               int B, int T, int C, int NH) {
  int HS = C / NH;
  double root = 1 / sqrt((double)HS);
  memset(dqkv, 0, (size_t)(B * T * 3 * C) * sizeof *dqkv);
  memset(size, 0, (size_t)(B * T * 3 * C) * sizeof *size);
  for (int b = 0; b < B; b++)
    for (int h = 0; h < NH; h++)
      for (int q = 0; q < T; q++)
        for (int k = 0; k <= q; k++) {
          size_t at_q = (size_t)(b * T + q) * 3 * (size_t)C + (size_t)(h * HS);
          size_t at_k = (size_t)(b * T + k) * 3 * (size_t)C + (size_t)(h * HS + C);
          size_t at_v = at_k + (size_t)C, at_o = (size_t)(b * T + q) * (size_t)C + (size_t)(h * HS);
          double s = 0, dp = 0, d = 0, all = 0;
          for (int c = 0; c < HS; c++) {
            s += (double)qkv[at_q + (size_t)c] * (double)qkv[at_k + (size_t)c] * root;
            dp += (double)dout[at_o + (size_t)c] * (double)qkv[at_v + (size_t)c];
            d += (double)dout[at_o + (size_t)c] * (double)out[at_o + (size_t)c];
            all += fabs((double)dout[at_o + (size_t)c]);
          }
          double p = exp(s - (double)lse[(b * NH + h) * T + q]);
          double f = ops_factor(dropout, b, ((uint64_t)h * (uint64_t)T + (uint64_t)q) *
                                            (uint64_t)T + (uint64_t)k);
          double ds = p * (dp * f - d) * root, ds_size = p * all * (f + 1) * root;
          for (int c = 0; c < HS; c++) {
            dqkv[at_q + (size_t)c] += ds * (double)qkv[at_k + (size_t)c];
            dqkv[at_k + (size_t)c] += ds * (double)qkv[at_q + (size_t)c];
            dqkv[at_v + (size_t)c] += p * f * (double)dout[at_o + (size_t)c];
            size[at_q + (size_t)c] += ds_size * fabs((double)qkv[at_k + (size_t)c]);
            size[at_k + (size_t)c] += ds_size * fabs((double)qkv[at_q + (size_t)c]);
            size[at_v + (size_t)c] += p * f * fabs((double)dout[at_o + (size_t)c]);
          }
        }
}

static void ops_attention_at(ops_env *e, int B, int T, int C, int NH, int drop, int differences) {
  g2z_dtype dtype = e->device->dtype, grad = e->device->grad_dtype;
  size_t n = (size_t)(B * T * C);
  float *qkv = ops_random(e, 3 * n, 2), *dout = ops_random(e, n, 1);
  float *out = ops_filled(e, n, 777), *lse = ops_filled(e, (size_t)(B * NH * T), 777);
  double *want = ops_doubles(e, 3 * n), *size = ops_doubles(e, 3 * n);
  double *lses = ops_doubles(e, (size_t)(B * NH * T));
  g2z_step_state state;
  memset(&state, 0, sizeof state);
  state.step = 5;
  g2z_dropout dropout = ops_dropout(&state, 0.25f, T);
  const g2z_dropout *d = drop ? &dropout : NULL;
  ops_attention(want, size, lses, qkv, d, B, T, C, NH, (size_t)-1, 0);
  CHECK_OK(e->t, e->ops->attention_fwd(e->device, out, lse, qkv, d, B, T, C, NH));
  /* A score is a sum of HS terms of up to 4 / sqrt(HS), and its error is one of the exponent: it
   * scales the result by as many roundings. */
  double roundings = 8 * sqrt((double)(C / NH)) + ops_walk(T);
  ops_expect(e, "attention_fwd", out, want, size, n, dtype, roundings);
  for (int i = 0; i < B * NH * T; i++) size[i] = 4 + fabs(lses[i]);
  ops_expect(e, "attention_fwd's lse", lse, lses, size, (size_t)(B * NH * T), G2Z_FP32, 16);

  float *dqkv = ops_filled(e, 3 * n, 777), *before = ops_random(e, (size_t)(3 * C), 8);
  float *dbias = ops_filled(e, (size_t)(3 * C), 777);
  double *sums = ops_doubles(e, (size_t)(3 * C)), *sizes = ops_doubles(e, (size_t)(3 * C));
  ops_attention_back(want, size, dout, out, lse, qkv, d, B, T, C, NH);
  for (int mode = 0; mode < 2; mode++) {
    memcpy(dbias, before, (size_t)(3 * C) * sizeof *dbias);
    CHECK_OK(e->t, e->ops->attention_bwd(e->device, dqkv, dbias, dout, out, lse, qkv,
                                         mode ? G2Z_ACCUMULATE : G2Z_OVERWRITE, d, B, T, C, NH));
    ops_expect(e, "attention_bwd", dqkv, want, size, 3 * n, dtype, 2 * roundings);
    ops_column_sums(sums, sizes, dqkv, mode ? before : NULL, B * T, 3 * C);
    ops_expect(e, "attention_bwd's dbias", dbias, sums, sizes, (size_t)(3 * C), grad,
               ops_walk(B * T));
  }
  for (size_t i = 0; i < 3 * n && differences; i++) {
    double loss[2];
    for (int side = 0; side < 2; side++) {
      ops_attention(want, NULL, NULL, qkv, d, B, T, C, NH, i, side ? 1e-5 : -1e-5);
      loss[side] = 0;
      for (size_t j = 0; j < n; j++) loss[side] += want[j] * (double)dout[j];
    }
    CHECK_NEAR(e->t, (double)dqkv[i], (loss[1] - loss[0]) / 2e-5, 1e-5);
  }
}

static void test_ops_attention(g2z_test *t) {
  /* Past the blocks of 64 queries and 48 keys; heads that fill no kernel, and the largest. */
  static const int sizes[5][4] = {{1, 1, 8, 1}, {2, 5, 48, 2}, {1, 67, 128, 2}, {2, 149, 24, 3},
                                  {1, 97, 128, 1}};
  for (int i = 0; i < 3; i++)
    for (int s = 0; s < 5; s++)
      for (int drop = 0; drop < 2; drop++) {
        ops_env e;
        ops_open(&e, t, ops_dtypes[i], s == 1 ? G2Z_FP32 : ops_dtypes[i]);
        ops_attention_at(&e, sizes[s][0], sizes[s][1], sizes[s][2], sizes[s][3], drop,
                         s < 2 && i == 0);
        ops_close(&e);
      }
}

/* Scores of up to 3,000: softmax must subtract the maximum before it exponentiates, and masked
 * keys, however large, must not be seen. */
static void test_ops_attention_range(g2z_test *t) {
  ops_env e;
  ops_open(&e, t, G2Z_FP32, G2Z_FP32);
  int T = 130, C = 16;
  size_t n = (size_t)(T * C);
  float *qkv = ops_random(&e, 3 * n, 32), *out = ops_filled(&e, n, 777);
  float *lse = ops_filled(&e, (size_t)T, 777), *again = ops_filled(&e, n, 777);
  double *want = ops_doubles(&e, n), *size = ops_doubles(&e, n), *lses = ops_doubles(&e, (size_t)T);
  CHECK_OK(t, e.ops->attention_fwd(e.device, out, lse, qkv, NULL, 1, T, C, 1));
  ops_attention(want, size, lses, qkv, NULL, 1, T, C, 1, (size_t)-1, 0);
  for (size_t i = 0; i < n; i++) size[i] = 32; /* the exponent's error counts: 4,000 roundings */
  ops_expect(&e, "attention_fwd of large scores", out, want, size, n, G2Z_FP32, 16 * 4096);
  for (int i = 0; i < T; i++) size[i] = 4096;
  ops_expect(&e, "its lse", lse, lses, size, (size_t)T, G2Z_FP32, 16);
  for (int i = 0; i < 3 * C; i++) qkv[3 * (T - 1) * C + i] = 1e18f; /* the last token's q, k, v */
  CHECK_OK(t, e.ops->attention_fwd(e.device, again, lse, qkv, NULL, 1, T, C, 1));
  CHECK(t, memcmp(out, again, (n - (size_t)C) * sizeof *out) == 0);
  ops_close(&e);
}

/* ----- embedding -------------------------------------------------------- */

static void ops_embedding(ops_env *e, int B, int T, int C, int V, int drop) {
  const g2z_ops *ops = e->ops;
  g2z_dtype dtype = e->device->dtype, grad = e->device->grad_dtype;
  size_t n = (size_t)(B * T * C), words = (size_t)(V * C), places = (size_t)((T + 2) * C);
  float *wte = ops_random(e, words, 1), *wpe = ops_random(e, places, 1);
  float *out = ops_filled(e, n, 777);
  float *dout = ops_random(e, n, 1), *before = ops_random(e, words + places, 4);
  float *dwte = ops_filled(e, words, 777), *dwpe = ops_filled(e, places, 777);
  int32_t *tokens = (int32_t *)malloc((size_t)(B * T) * sizeof *tokens);
  double *want = ops_doubles(e, n), *sums = ops_doubles(e, words + places);
  double *sizes = ops_doubles(e, words + places);
  g2z_step_state state;
  memset(&state, 0, sizeof state);
  state.step = 1;
  g2z_dropout dropout = ops_dropout(&state, 0.5f, T);
  for (int i = 0; i < B * T; i++) tokens[i] = (i * i + 3) % V; /* some several times, some never */
  for (size_t i = 0; i < n; i++) {
    int row = (int)(i / (size_t)C), c = (int)(i % (size_t)C);
    want[i] = (double)wte[tokens[row] * C + c] + (double)wpe[row % T * C + c];
    if (drop) want[i] *= ops_factor(&dropout, row / T, (uint64_t)(row % T * C + c));
  }
  CHECK_OK(e->t, ops->embed_fwd(e->device, out, tokens, wte, wpe, drop ? &dropout : NULL, B, T, C));
  ops_expect(e, "embed_fwd", out, want, NULL, n, dtype, 4);
  for (int mode = 0; mode < 2; mode++) {
    memcpy(dwte, before, words * sizeof *dwte);
    memcpy(dwpe, before + words, places * sizeof *dwpe);
    for (size_t i = 0; i < words + places; i++) { /* dwte always adds, dwpe by mode */
      sums[i] = i < words || mode ? (double)before[i] : 0;
      sizes[i] = fabs(sums[i]);
    }
    for (size_t i = 0; i < n; i++) {
      int row = (int)(i / (size_t)C), c = (int)(i % (size_t)C);
      double g = (double)dout[i];
      if (drop) g *= ops_factor(&dropout, row / T, (uint64_t)(row % T * C + c));
      sums[tokens[row] * C + c] += g;
      sizes[tokens[row] * C + c] += fabs(g);
      sums[(int)words + row % T * C + c] += g;
      sizes[(int)words + row % T * C + c] += fabs(g);
    }
    CHECK_OK(e->t, ops->embed_bwd(e->device, dwte, dwpe, dout, tokens,
                                  mode ? G2Z_ACCUMULATE : G2Z_OVERWRITE, drop ? &dropout : NULL, B,
                                  T, C));
    ops_expect(e, "embed_bwd's dwte", dwte, sums, sizes, words, G2Z_FP32, ops_walk(B * T));
    ops_expect(e, "embed_bwd's dwpe", dwpe, sums + words, sizes + words, (size_t)(T * C), grad,
               ops_walk(B));
    /* Rows past the sequence length belong to longer sequences. */
    CHECK(e->t, memcmp(dwpe + T * C, before + words + T * C, (size_t)(2 * C) * sizeof(float)) == 0);
  }
  free(tokens);
}

/* The rows of all tokens, added to a part of wte's gradient: to what lies in it alone. */
static void ops_embedding_add(ops_env *e, int N, int C, int V, size_t first, size_t count) {
  size_t n = (size_t)(N * C), words = (size_t)(V * C);
  float *rows = ops_random(e, n, 1), *grads = ops_random(e, words, 4);
  double *sums = ops_doubles(e, words), *sizes = ops_doubles(e, words);
  int32_t *tokens = (int32_t *)malloc((size_t)(3 * N) * sizeof *tokens), *order = tokens + N;
  for (int i = 0; i < N; i++) tokens[i] = (i * i + 3) % V;
  for (size_t i = 0; i < words; i++) {
    grads[i] = g2z_round(e->device->grad_dtype, grads[i]);
    sums[i] = (double)grads[i], sizes[i] = fabs(sums[i]);
  }
  for (size_t i = 0; i < n; i++) {
    size_t at = (size_t)(tokens[i / (size_t)C] * C) + i % (size_t)C;
    if (at < first || at >= first + count) continue;
    sums[at] += (double)rows[i];
    sizes[at] += fabs((double)rows[i]);
  }
  CHECK_OK(e->t, e->ops->embed_order(e->device, order, tokens, N));
  for (int i = 0; i < N; i++) {
    CHECK(e->t, order[i] == tokens[order[N + i]]);
    CHECK(e->t, i == 0 || order[i - 1] < order[i] ||
                    (order[i - 1] == order[i] && order[N + i - 1] < order[N + i]));
  }
  g2z_row_part part = {first, count, first};
  CHECK_OK(e->t, e->ops->embed_add(e->device, grads, &part, 1, rows, order, N, C));
  ops_expect(e, "embed_add", grads, sums, sizes, words, e->device->grad_dtype, ops_walk(N));
  free(tokens);
}

static void test_ops_embedding(g2z_test *t) {
  static const int sizes[3][4] = {{1, 1, 8, 3}, {3, 11, 40, 17}, {2, 70, 72, 5}};
  for (int i = 0; i < 3; i++)
    for (int s = 0; s < 3; s++) {
      ops_env e;
      ops_open(&e, t, ops_dtypes[i], s == 1 ? G2Z_FP32 : ops_dtypes[i]);
      ops_embedding(&e, sizes[s][0], sizes[s][1], sizes[s][2], sizes[s][3], s != 0);
      size_t words = (size_t)(sizes[s][2] * sizes[s][3]);
      int N = sizes[s][0] * sizes[s][1];
      ops_embedding_add(&e, N, sizes[s][2], sizes[s][3], 0, words);
      ops_embedding_add(&e, N, sizes[s][2], sizes[s][3], 8, words / 2 / 8 * 8); /* cuts two rows */
      ops_close(&e);
    }
}

/* ----- LM head ---------------------------------------------------------- */

/* Losses, and dlogits of the loss times 8, from logits that are rounded to the type. */
static void ops_classify(g2z_dtype dtype, double *loss, double *size, float *dlogits,
                         const float *logits, const int32_t *targets, int N, int V) {
  for (int i = 0; i < N; i++) {
    const float *row = logits + i * V;
    double max = -INFINITY, sum = 0, at = (double)g2z_round(dtype, row[targets[i]]);
    for (int v = 0; v < V; v++) max = fmax(max, (double)g2z_round(dtype, row[v]));
    for (int v = 0; v < V; v++) sum += exp((double)g2z_round(dtype, row[v]) - max);
    loss[i] = log(sum) + max - at;
    size[i] = 4 + fabs(max) + fabs(at);
    for (int v = 0; v < V; v++) {
      double p = exp((double)g2z_round(dtype, row[v]) - max) / sum;
      dlogits[i * V + v] = g2z_round(dtype, (float)(8 * (p - (v == targets[i]))));
    }
  }
}

static void ops_head(ops_env *e, int N, int C, int V, int chunk) {
  const g2z_ops *ops = e->ops;
  g2z_dtype dtype = e->device->dtype, grad = e->device->grad_dtype;
  int Vp = (V + 127) / 128 * 128;
  size_t n = (size_t)(N * C), words = (size_t)(Vp * C), all = (size_t)(N * V);
  float *h = ops_random(e, n, 2), *wte = ops_random(e, words, 0.5f);
  float *before = ops_random(e, words, 4);
  float *own = ops_filled(e, all, 777), *d = ops_filled(e, all, 0);
  float *logits = ops_filled(e, (size_t)(chunk * Vp), 777), *losses = ops_filled(e, (size_t)N, 777);
  float *dh = ops_filled(e, n, 777), *dwte = ops_filled(e, words, 777);
  double *want = ops_doubles(e, all), *size = ops_doubles(e, all), *want_h = ops_doubles(e, n);
  double *want_loss = ops_doubles(e, (size_t)N), *size_h = ops_doubles(e, n);
  double *want_w = ops_doubles(e, words), *size_w = ops_doubles(e, words);
  int32_t *targets = (int32_t *)malloc((size_t)N * sizeof *targets);
  for (int i = 0; i < N; i++) targets[i] = i == 0 ? V - 1 : (i * 31) % V;
  for (size_t i = (size_t)(V * C); i < words; i++) wte[i] = 1e30f; /* would ruin every softmax */
  g2z_step_state state;
  memset(&state, 0, sizeof state);
  state.loss_scale = 512;
  float dloss = 1.0f / 64;

  ops_product(want, size, h, C, 1, wte, 1, C, N, V, C);
  CHECK_OK(e->t, ops->head_logits(e->device, own, h, wte, N, C, V));
  ops_expect(e, "head_logits", own, want, size, all, G2Z_FP32, ops_walk(C));
  /* Where the reference is at a tie, logits differ by a ulp and the loss with them: the rest takes
   * the op's own logits, which were just checked. */
  ops_classify(dtype, want_loss, size, d, own, targets, N, V);
  double loss_sum = 2.5, in_order = 2.5;
  CHECK_OK(e->t, ops->head_loss(e->device, losses, &loss_sum, NULL, NULL, G2Z_FP32, logits, h, wte,
                                targets, dloss, &state, G2Z_OVERWRITE, N, C, V, Vp, chunk));
  ops_expect(e, "head_loss, evaluation", losses, want_loss, size, (size_t)N, G2Z_FP32, 16);
  for (int i = 0; i < N; i++) in_order += (double)losses[i];
  CHECK(e->t, loss_sum == in_order);

  ops_product(want_h, size_h, d, V, 1, wte, C, 1, N, C, V);
  ops_product(want_w, size_w, d, 1, V, h, C, 1, V, C, N);
  for (int i = V * C; i < Vp * C; i++) want_w[i] = size_w[i] = 0;
  for (int mode = 0; mode < 2; mode++) {
    memcpy(dwte, before, words * sizeof *dwte);
    memset(losses, 0, (size_t)N * sizeof *losses);
    for (size_t i = 0; i < words && mode; i++) {
      want_w[i] += (double)before[i];
      size_w[i] += fabs((double)before[i]);
    }
    CHECK_OK(e->t, ops->head_loss(e->device, losses, &loss_sum, dh, dwte, G2Z_FP32, logits, h, wte,
                                  targets, dloss, &state, mode ? G2Z_ACCUMULATE : G2Z_OVERWRITE, N,
                                  C, V, Vp, chunk));
    ops_expect(e, "head_loss", losses, want_loss, size, (size_t)N, G2Z_FP32, 16);
    for (int i = (N - 1) / chunk * chunk; i < N; i++) { /* the last chunk's are still there */
      for (int v = 0; v < V; v++) want[v] = (double)d[i * V + v];
      ops_expect(e, "head_loss's dlogits", logits + i % chunk * Vp, want, NULL, (size_t)V, dtype,
                 128);
    }
    /* An element of dlogits that rounds to the other neighbour is off by 2^-10 of itself in fp16
     * and by 2^-7 in bf16: 2^14 and 2^17 roundings. In fp32 its error is that of the exponent. */
    double each = dtype == G2Z_FP32 ? 128 : dtype == G2Z_FP16 ? 16384 : 131072;
    ops_expect(e, "head_loss's dh", dh, want_h, size_h, n, dtype, each + ops_walk(V));
    ops_expect(e, "head_loss's dwte", dwte, want_w, size_w, words, G2Z_FP32, each + ops_walk(N));
    for (size_t i = 0; i < words && !mode; i++) before[i] = g2z_round(grad, dwte[i]);
    if (mode || N > chunk) continue; /* in one chunk it may be rounded at once */
    CHECK_OK(e->t, ops->head_loss(e->device, losses, &loss_sum, dh, dwte, grad, logits, h, wte,
                                  targets, dloss, &state, G2Z_OVERWRITE, N, C, V, Vp, chunk));
    CHECK(e->t, memcmp(dwte, before, words * sizeof *dwte) == 0);
  }
  free(targets);
}

static void test_ops_head(g2z_test *t) {
  static const int sizes[4][4] = {
      {1, 8, 2, 1}, {37, 24, 301, 10}, {70, 40, 1100, 64}, {37, 24, 301, 37}};
  for (int i = 0; i < 3; i++)
    for (int s = 0; s < 4; s++) {
      ops_env e;
      ops_open(&e, t, ops_dtypes[i], ops_dtypes[i]);
      ops_head(&e, sizes[s][0], sizes[s][1], sizes[s][2], sizes[s][3]);
      ops_close(&e);
    }
}

/* ----- dropout ---------------------------------------------------------- */

static void test_ops_dropout(g2z_test *t) {
  ops_env e;
  ops_open(&e, t, G2Z_FP32, G2Z_FP32);
  int B = 4, T = 64, C = 256, N = B * T;
  size_t n = (size_t)(N * C);
  float *ones = ops_filled(&e, (size_t)C, 1), *none = ops_filled(&e, (size_t)(T * C), 0);
  float *mask = ops_filled(&e, n, 777), *other = ops_filled(&e, n, 777);
  int32_t *tokens = (int32_t *)calloc((size_t)N, sizeof *tokens);
  g2z_step_state state;
  memset(&state, 0, sizeof state);
  g2z_dropout d = ops_dropout(&state, 0.2f, T);
  CHECK_OK(t, e.ops->embed_fwd(e.device, mask, tokens, ones, none, &d, B, T, C));
  long kept = 0, wrong = 0, pairs = 0;
  for (size_t i = 0; i < n; i++) {
    kept += mask[i] != 0;
    wrong += mask[i] != 0 && mask[i] != 1.0f / (1.0f - 0.2f);
    pairs += i + 1 < n && mask[i] != 0 && mask[i + 1] != 0;
  }
  CHECK(t, wrong == 0);
  /* Binomial: standard deviations of 102 and about 150; five of them. */
  CHECK_NEAR(t, (double)kept, 0.8 * (double)n, 512);
  CHECK_NEAR(t, (double)pairs, 0.64 * (double)n, 750);

  /* The mask of a step, site or sequence is its own, and comes back with them. */
  for (int change = 0; change < 4; change++) {
    g2z_dropout changed = d;
    g2z_step_state later = state;
    changed.state = &later;
    if (change == 0) later.step = 1;
    if (change == 1) changed.site++;
    if (change == 2) changed.seed ^= 1ull << 40;
    if (change == 3) changed.first += changed.stride; /* each sequence becomes the next one */
    CHECK_OK(t, e.ops->embed_fwd(e.device, other, tokens, ones, none, &changed, B, T, C));
    long same = 0;
    for (size_t i = 0; i < n; i++) same += (other[i] != 0) == (mask[i] != 0);
    CHECK_NEAR(t, (double)same, 0.68 * (double)n, 750);
    if (change == 3)
      CHECK(t, memcmp(other, mask + T * C, (size_t)((B - 1) * T * C) * sizeof *mask) == 0);
  }

  /* Forward and backward drop the same: into the residual, and back out of it. */
  float *x = ops_filled(&e, (size_t)N, 1), *w = ops_filled(&e, (size_t)C, 1);
  float *zeros = ops_filled(&e, n, 0), *y = ops_filled(&e, n, 777), *dres = ops_filled(&e, n, 1);
  float *dropped = ops_filled(&e, n, 777), *sums = ops_filled(&e, (size_t)(3 * C), 0);
  float *mean = ops_filled(&e, (size_t)N, 0), *rstd = ops_filled(&e, (size_t)N, 1);
  CHECK_OK(t, e.ops->linear_fwd(e.device, y, NULL, x, w, zeros, zeros, &d, N, 1, C));
  CHECK(t, memcmp(y, mask, n * sizeof *y) == 0);
  CHECK_OK(t, e.ops->layernorm_bwd(e.device, dres, dropped, sums, sums + C, sums + 2 * C, zeros,
                                   zeros, w, mean, rstd, G2Z_ACCUMULATE, G2Z_OVERWRITE, &d, N, C));
  CHECK(t, memcmp(dropped, mask, n * sizeof *y) == 0);
  free(tokens);
  ops_close(&e);
}

/* ----- end of a step ---------------------------------------------------- */

static g2z_optimizer_config ops_optimizer(void) {
  g2z_optimizer_config c;
  memset(&c, 0, sizeof c);
  c.lr = 1e-2f;
  c.min_lr = 1e-3f;
  c.beta1 = 0.9f;
  c.beta2 = 0.95f;
  c.eps = 1e-8f;
  c.weight_decay = 0.1f;
  c.schedule = G2Z_SCHEDULE_LINEAR;
  c.warmup = 4;
  c.steps = 100;
  c.loss_scale_dynamic = 1;
  c.loss_scale = 65536;
  c.loss_scale_window = 50;
  c.loss_scale_hysteresis = 1;
  return c;
}

/* A step whose gradients have this sum of squares in all, and in which a rank may have failed. */
static void ops_decide_status(ops_env *e, g2z_step_state *state, const g2z_optimizer_config *config,
                              double sum, g2z_status status) {
  double rows[3][G2Z_VERDICT_COLUMNS];
  g2z_step_state reported[2];
  g2z_verdict verdict = {rows[0], 3, 3, {&reported[0], &reported[1]}};
  memset(rows, 0, sizeof rows);
  for (int rank = 0; rank < 3; rank++) {
    rows[rank][G2Z_VERDICT_LOSS] = 10;
    rows[rank][G2Z_VERDICT_SQUARES] = rank == 0 ? sum / 2 : sum / 4;
  }
  rows[1][G2Z_VERDICT_STATUS] = (double)status;
  CHECK_OK(e->t, e->ops->decide(e->device, state, &verdict, config, 10));
  for (int rank = 0; rank < 3; rank++)
    CHECK(e->t, rows[rank][G2Z_VERDICT_LOSS] == 0 && rows[rank][G2Z_VERDICT_SQUARES] == 0);
  CHECK(e->t, state->status == (int32_t)status && !state->stop && state->loss == 3.0f);
  CHECK(e->t, state->step == state->applied + state->skipped);
  CHECK(e->t, memcmp(&reported[state->step % 2], state, sizeof *state) == 0);
}

static void ops_decide(ops_env *e, g2z_step_state *state, const g2z_optimizer_config *config,
                       double sum) {
  ops_decide_status(e, state, config, sum, G2Z_OK);
}

static void ops_decide_scale(g2z_test *t) {
  ops_env e;
  ops_open(&e, t, G2Z_FP16, G2Z_FP16);
  g2z_optimizer_config config = ops_optimizer();
  g2z_step_state s;
  memset(&s, 0, sizeof s);
  s.loss_scale = 65536;
  s.hysteresis = 1;
  for (int i = 0; i < 49; i++) ops_decide(&e, &s, &config, 4.0 * 65536 * 65536);
  CHECK(t, s.loss_scale == 65536 && s.good_steps == 49 && s.applied == 49 && s.step == 49);
  CHECK_NEAR(t, s.grad_norm, 2.0, 1e-6);
  CHECK_NEAR(t, s.loss, 3.0, 0);
  CHECK(t, s.grad_multiplier == 1.0f / 65536 && s.skip == 0);
  ops_decide(&e, &s, &config, 1);
  CHECK(t, s.loss_scale == 131072 && s.good_steps == 0 && s.used_loss_scale == 65536);
  /* An overflow halves, skips, and leaves AdamW's count and the schedule where they are. */
  float lr = g2z_schedule_lr(&config, 50);
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 65536 && s.skip == 1 && s.skipped == 1 && s.applied == 50);
  CHECK(t, s.step == 51 && s.grad_multiplier == 0 && s.lr == lr && s.used_loss_scale == 131072);
  CHECK(t, isinf(s.grad_norm) && s.loss == 3 && s.skipped_at_minimum == 0);
  ops_decide(&e, &s, &config, NAN);
  CHECK(t, s.loss_scale == 32768 && s.skipped == 2 && isnan(s.grad_norm));
  ops_decide(&e, &s, &config, 1);
  CHECK(t, s.skip == 0 && s.applied == 51 && s.lr == lr && s.good_steps == 1);

  /* Hysteresis 2: the second overflow halves, and so does every one until a good window. */
  config.loss_scale_hysteresis = 2;
  config.loss_scale_window = 3;
  s.hysteresis = 2;
  s.loss_scale = 1024;
  s.good_steps = 0;
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 1024 && s.hysteresis == 1);
  ops_decide(&e, &s, &config, 1);
  ops_decide(&e, &s, &config, 1);
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 512 && s.good_steps == 0);
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 256);
  for (int i = 0; i < 3; i++) ops_decide(&e, &s, &config, 1);
  CHECK(t, s.loss_scale == 512 && s.hysteresis == 2);
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 512 && s.hysteresis == 1);

  /* At 1 it cannot shrink: those skips are counted, until a good step. At 2^24 it stops growing. */
  s.loss_scale = 2;
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 1 && s.skipped_at_minimum == 0);
  for (int i = 0; i < 5; i++) ops_decide(&e, &s, &config, NAN);
  CHECK(t, s.loss_scale == 1 && s.skipped_at_minimum == 5);
  ops_decide(&e, &s, &config, 1);
  CHECK(t, s.skipped_at_minimum == 0);
  s.loss_scale = 16777216;
  for (int i = 0; i < 6; i++) ops_decide(&e, &s, &config, 1);
  CHECK(t, s.loss_scale == 16777216);

  /* A fixed scale stays, and every skip counts. */
  config.loss_scale_dynamic = 0;
  s.loss_scale = 1024;
  for (int i = 0; i < 60; i++) ops_decide(&e, &s, &config, NAN);
  CHECK(t, s.loss_scale == 1024 && s.skipped_at_minimum == 60);
  for (int i = 0; i < 60; i++) ops_decide(&e, &s, &config, 1);
  CHECK(t, s.loss_scale == 1024 && s.skipped_at_minimum == 0);

  /* A step in which a rank failed is skipped, and says nothing about the scale. */
  config.loss_scale_dynamic = 1;
  g2z_step_state good = s;
  for (int i = 0; i < 2; i++) ops_decide_status(&e, &s, &config, i ? NAN : 1, G2Z_IO);
  CHECK(t, s.skip == 1 && s.skipped == good.skipped + 2 && s.applied == good.applied);
  CHECK(t, s.grad_multiplier == 0 && s.loss_scale == good.loss_scale);
  CHECK(t, s.good_steps == good.good_steps && s.hysteresis == good.hysteresis);
  CHECK(t, s.skipped_at_minimum == 0);
  ops_close(&e);
}

static void test_ops_decide(g2z_test *t) {
  ops_decide_scale(t);
  ops_env e;
  ops_open(&e, t, G2Z_BF16, G2Z_FP32);
  g2z_optimizer_config config = ops_optimizer(); /* asks for a dynamic scale, which only fp16 has */
  g2z_step_state s;
  memset(&s, 0, sizeof s);
  s.loss_scale = 1;
  for (int i = 0; i < 60; i++) ops_decide(&e, &s, &config, 9);
  CHECK(t, s.loss_scale == 1 && s.applied == 60 && s.grad_multiplier == 1 && s.grad_norm == 3);
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 1 && s.skipped_at_minimum == 1 && s.applied == 60);
  config.clip = 1;
  ops_decide(&e, &s, &config, 9);
  CHECK_NEAR(t, s.grad_multiplier, 1.0 / 3.000001, 1e-7);
  ops_decide(&e, &s, &config, 0.25);
  CHECK(t, s.grad_multiplier == 1 && s.grad_norm == 0.5f);
  ops_decide(&e, &s, &config, 0);
  CHECK(t, s.grad_multiplier == 1 && s.grad_norm == 0 && s.skip == 0);
  /* The learning rate is that of the applied step, from 0 on. */
  memset(&s, 0, sizeof s);
  s.loss_scale = 1;
  ops_decide(&e, &s, &config, 1);
  CHECK_NEAR(t, s.lr, 0.0025, 1e-9);
  ops_decide(&e, &s, &config, NAN);
  ops_decide(&e, &s, &config, 1);
  CHECK_NEAR(t, s.lr, 0.005, 1e-9);
  ops_close(&e);
}

static void test_ops_adamw(g2z_test *t) {
  for (int which = 0; which < 3; which++) {
    ops_env e;
    ops_open(&e, t, ops_dtypes[which], G2Z_FP32);
    size_t n = 9001; /* two runs and a tail */
    float *params = ops_filled(&e, n, 777), *master = ops_random(&e, n, 1);
    float *m = ops_filled(&e, n, 0), *v = ops_filled(&e, n, 0), *grads = ops_random(&e, n, 64);
    double *want = ops_doubles(&e, n), *want_m = ops_doubles(&e, n), *want_v = ops_doubles(&e, n);
    g2z_optimizer_config config = ops_optimizer();
    g2z_step_state s;
    memset(&s, 0, sizeof s);
    s.loss_scale = 64;
    /* Two ranges, one of them with decay, and one element between them that nobody owns: memory
     * and shard differ, as they do under ZeRO. */
    g2z_update_range ranges[2];
    memset(ranges, 0, sizeof ranges);
    ranges[0].elements = 5000;
    ranges[0].decay = 1;
    ranges[1].param = ranges[1].grad = 5001;
    ranges[1].shard = 5000;
    ranges[1].elements = 4000;
    for (size_t i = 0; i < n; i++) want[i] = (double)master[i];
    g2z_update update = {params, master, m, v, grads, ranges, ranges, &config, &s};
    for (int step = 1; step <= 3; step++) {
      ops_decide(&e, &s, &config, 4096);
      CHECK_OK(t, e.ops->adamw(e.device, &update, 1, 2)); /* in parts, in any order */
      CHECK_OK(t, e.ops->adamw(e.device, &update, 0, 1));
      CHECK_OK(t, e.ops->adamw(e.device, &update, 2, 2));
      for (size_t i = 0; i < 9000; i++) {
        double g = (double)grads[i < 5000 ? i : i + 1] / 64, b1 = config.beta1, b2 = config.beta2;
        want_m[i] = b1 * want_m[i] + (1 - b1) * g;
        want_v[i] = b2 * want_v[i] + (1 - b2) * g * g;
        if (i < 5000) want[i] *= 1 - (double)s.lr * (double)config.weight_decay;
        want[i] -= (double)s.lr * (want_m[i] / (1 - pow(b1, step))) /
                   (sqrt(want_v[i] / (1 - pow(b2, step))) + (double)config.eps);
      }
    }
    ops_expect(&e, "adamw's master", master, want, NULL, 9000, G2Z_FP32, 1e4);
    int near = 1, exact = 1;
    for (size_t i = 0; i < 9000; i++) { /* a weight is about 1, three updates about 0.02 */
      near &= fabs((double)master[i] - want[i]) < 4e-7;
      near &= fabs((double)m[i] - want_m[i]) < 1e-6 && fabs((double)v[i] - want_v[i]) < 1e-6;
      exact &= params[i < 5000 ? i : i + 1] == g2z_round(ops_dtypes[which], master[i]);
    }
    CHECK(t, near);
    CHECK(t, exact && params[5000] == 777 && m[9000] == 0 && v[9000] == 0);
    CHECK(t, (double)master[9000] == want[9000]);
    /* A skipped step moves nothing. */
    float *kept = ops_filled(&e, n, 0);
    memcpy(kept, master, n * sizeof *kept);
    ops_decide(&e, &s, &config, NAN);
    CHECK_OK(t, e.ops->adamw(e.device, &update, 0, 2));
    CHECK(t, memcmp(kept, master, n * sizeof *kept) == 0);
    ops_close(&e);
  }
}

static void test_ops_sums_and_casts(g2z_test *t) {
  ops_env e;
  ops_open(&e, t, G2Z_FP16, G2Z_FP32);
  static const size_t counts[5] = {0, 1, 63, 65, 100003};
  for (int i = 0; i < 5; i++) {
    size_t n = counts[i];
    float *x = ops_random(&e, n, 8), *act = ops_filled(&e, n, 777), *grad = ops_filled(&e, n, 777);
    double want = 0, sum = 777;
    g2z_range all = {0, n};
    for (size_t j = 0; j < n; j++) want += (double)x[j] * (double)x[j];
    CHECK_OK(t, e.ops->grad_sumsq(e.device, &sum, x, &all, 1));
    CHECK_NEAR(t, sum, 777 + want, 1e-12 * (777 + want));
    for (size_t j = 0; j < n; j++) x[j] *= 1.0001f;
    CHECK_OK(t, e.ops->cast_act(e.device, act, x, n));
    CHECK_OK(t, e.ops->cast_grad(e.device, grad, x, n));
    CHECK(t, memcmp(grad, x, n * sizeof *x) == 0);
    int exact = 1;
    for (size_t j = 0; j < n; j++) exact &= act[j] == g2z_round(G2Z_FP16, x[j]);
    CHECK(t, exact);
    if (!n) continue;
    /* Squares of 1e38 are finite in double; one infinity or NaN anywhere is seen. */
    x[n - 1] = 1e38f;
    CHECK_OK(t, e.ops->grad_sumsq(e.device, &sum, x, &all, 1));
    CHECK(t, isfinite(sum));
    x[n / 2] = INFINITY;
    CHECK_OK(t, e.ops->grad_sumsq(e.device, &sum, x, &all, 1));
    CHECK(t, !isfinite(sum));
    x[n / 2] = NAN;
    CHECK_OK(t, e.ops->grad_sumsq(e.device, &sum, x, &all, 1));
    CHECK(t, !isfinite(sum));
  }
  ops_close(&e);
}

/* ----- threads ---------------------------------------------------------- */

#if defined(_OPENMP)
#include <omp.h>

static float *ops_next(float **at, size_t count) {
  *at += count;
  return *at - count;
}

/* Every op that adds things up, one after the other; returns a block with all results. */
static float *ops_run_all(ops_env *e, size_t *count) {
  /* Small, but enough work for each op to take threads. */
  int B = 5, T = 100, C = 144, NH = 3, V = 333, Vp = 384, N = B * T, chunk = 64;
  size_t n = (size_t)(N * C), words = (size_t)(Vp * C);
  e->seed = 9;
  float *x = ops_random(e, 4 * n, 1), *w = ops_random(e, 4 * words, 0.25f);
  float *bias = ops_random(e, (size_t)(4 * C), 1);
  *count = 4 * n + 4 * n + n + 4 * words + 3 * n + 2 * words + 8 * n;
  float *all = ops_filled(e, *count, 0), *at = all;
  int32_t *tokens = (int32_t *)malloc((size_t)N * sizeof *tokens);
  for (int i = 0; i < N; i++) tokens[i] = i * 7 % V;
  g2z_step_state state;
  memset(&state, 0, sizeof state);
  state.loss_scale = 8;
  g2z_dropout d = ops_dropout(&state, 0.1f, T);
  float *logits = ops_filled(e, (size_t)(chunk * Vp), 0);
  double *sums = ops_doubles(e, 2);
  g2z_device *device = e->device;
  float *y = ops_next(&at, 4 * n), *slope = ops_next(&at, 4 * n), *dx = ops_next(&at, n);
  float *sums_x = ops_next(&at, (size_t)C), *dw = ops_next(&at, (size_t)(4 * C * C));
  CHECK_OK(e->t, e->ops->linear_fwd(device, y, slope, x, w, bias, NULL, &d, N, C, 4 * C));
  CHECK_OK(e->t, e->ops->linear_bwd_data(device, dx, sums_x, x, w, y, G2Z_OVERWRITE, N, C, 4 * C));
  CHECK_OK(e->t, e->ops->linear_bwd_weight(device, dw, x, y, G2Z_OVERWRITE, N, C, 4 * C));
  float *out = ops_next(&at, n), *lse = ops_next(&at, (size_t)(N * NH));
  float *dqkv = ops_next(&at, 3 * n), *sums_qkv = ops_next(&at, (size_t)(3 * C));
  CHECK_OK(e->t, e->ops->attention_fwd(device, out, lse, x, &d, B, T, C, NH));
  CHECK_OK(e->t, e->ops->attention_bwd(device, dqkv, sums_qkv, y, out, lse, x, G2Z_OVERWRITE, &d, B,
                                       T, C, NH));
  float *losses = ops_next(&at, (size_t)N), *dh = ops_next(&at, n), *dwte = ops_next(&at, words);
  CHECK_OK(e->t, e->ops->head_loss(device, losses, sums, dh, dwte, G2Z_FP32, logits, x, w, tokens,
                                   0.125f, &state, G2Z_OVERWRITE, N, C, V, Vp, chunk));
  float *dembed = ops_next(&at, words), *dwpe = ops_next(&at, (size_t)(T * C));
  CHECK_OK(e->t, e->ops->embed_bwd(device, dembed, dwpe, x, tokens, G2Z_OVERWRITE, &d, B, T, C));
  float *mean = ops_next(&at, (size_t)N), *rstd = ops_next(&at, (size_t)N);
  float *normed = ops_next(&at, n), *dres = ops_next(&at, n), *dropped = ops_next(&at, n);
  float *dln = ops_next(&at, (size_t)(3 * C));
  CHECK_OK(e->t, e->ops->layernorm_fwd(device, normed, mean, rstd, x, w, bias, N, C));
  CHECK_OK(e->t, e->ops->layernorm_bwd(device, dres, dropped, dln, dln + C, dln + 2 * C, y, x, w,
                                       mean, rstd, G2Z_OVERWRITE, G2Z_OVERWRITE, &d, N, C));
  g2z_range until_here = {0, (size_t)(at - all)};
  CHECK_OK(e->t, e->ops->grad_sumsq(device, sums + 1, all, &until_here, 1));
  memcpy(ops_next(&at, 4), sums, 2 * sizeof *sums);
  CHECK(e->t, (size_t)(at - all) <= *count);
  free(tokens);
  return all;
}

static void test_ops_threads(g2z_test *t) {
  int threads = omp_get_max_threads();
  ops_env e;
  ops_open(&e, t, G2Z_FP32, G2Z_FP32);
  float *first = NULL;
  static const int numbers[3] = {1, 2, 3};
  for (int i = 0; i < 3; i++) {
    size_t count;
    omp_set_num_threads(numbers[i]);
    float *all = ops_run_all(&e, &count);
    if (!first) first = all;
    CHECK(t, memcmp(first, all, count * sizeof *all) == 0);
  }
  omp_set_num_threads(threads);
  ops_close(&e);
}
#else
static void test_ops_threads(g2z_test *t) { SKIP(t, "built without OpenMP: there is one thread"); }
#endif

static void *ops_on_thread(void *t) {
  static void (*const runs[])(g2z_test *) = {
      test_ops_linear,    test_ops_layernorm, test_ops_attention, test_ops_attention_range,
      test_ops_embedding, test_ops_head,      test_ops_dropout,   test_ops_decide,
      test_ops_adamw,     test_ops_sums_and_casts};
  for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) runs[i]((g2z_test *)t);
  return NULL;
}

/* Stacks of 64 KiB, the caller's and, in a program of its own, those of OpenMP's threads. */
static void test_ops_stack(g2z_test *t) {
  pthread_attr_t small;
  pthread_t thread;
  size_t bytes = 64 * 1024;
  if (bytes < (size_t)PTHREAD_STACK_MIN) bytes = (size_t)PTHREAD_STACK_MIN;
  CHECK(t, pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, bytes) == 0);
  CHECK(t, pthread_create(&thread, &small, ops_on_thread, t) == 0);
  CHECK(t, pthread_join(thread, NULL) == 0);
  pthread_attr_destroy(&small);
#if defined(_OPENMP)
  char command[128];
  snprintf(command, sizeof command, "OMP_STACKSIZE=64k /proc/%d/exe ops_threads > /dev/null",
           (int)getpid());
  int status = system(command);
  CHECK(t, WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}
/* ----- CUDA ops against the CPU's ----------------------------------------
 * Each op runs on both devices with the same inputs, exact in their type, and the outputs must
 *   agree: |cuda - cpu| <= ulps * eps(type) * |cpu| + noise
 * ulps   roundings: two devices that round nearly equal values can land on neighbours (1), and an
 *        op that rounds in between (a product before its GELU or dropout) adds one for each.
 * noise  the order of additions: a sum of K random terms of size s passes through values of size
 *        s * sqrt(K), and each of its K roundings moves it by up to 2^-24 of that, at random: s *
 *        K * 2^-24 in all, taken four times for the worst of many sums; tensor cores keep a bit
 *        less, and tf32 takes inputs with 11 bits of precision.
 * On the GPU every output is poisoned with NaNs first and has guard bytes before and behind it. */

typedef enum test_kind { TEST_ACT, TEST_GRAD, TEST_F32, TEST_F64, TEST_I32 } test_kind;

enum { TEST_GUARD = 512, TEST_TWINS = 48 };

typedef struct test_twin {   /* one tensor on both devices */
  test_kind kind;
  size_t n, bytes;           /* on the GPU */
  size_t shift;              /* bytes that the tensor lies behind an aligned address */
  void *cpu, *block, *gpu;   /* the GPU's tensor lies inside a guarded block */
} test_twin;

typedef struct test_pair {   /* both devices, and the tensors of one test */
  g2z_test *t;
  g2z_device *cpu, *gpu;
  g2z_dtype dtype, grad_dtype;
  test_twin twins[TEST_TWINS];
  int count;
} test_pair;

static const struct {
  g2z_dtype dtype, grad_dtype;
} test_types[] = {{G2Z_FP32, G2Z_FP32}, {G2Z_TF32, G2Z_FP32}, {G2Z_FP16, G2Z_FP16},
                  {G2Z_FP16, G2Z_FP32}, {G2Z_BF16, G2Z_BF16}, {G2Z_BF16, G2Z_FP32}};
enum { TEST_TYPES = (int)(sizeof test_types / sizeof *test_types) };

/* Whether a test on a GPU looks at this type: G2Z_TEST_DTYPES, such as "fp16,bf16", picks some. */
static int test_wants(g2z_dtype dtype) {
  const char *wanted = getenv("G2Z_TEST_DTYPES");
  return !wanted || strstr(wanted, g2z_dtype_text(dtype));
}

/* 0: there is none, or nobody wants the type. */
static int test_pair_open(test_pair *p, g2z_test *t, int types) {
  memset(p, 0, sizeof *p);
  if (!test_wants(test_types[types].dtype)) return 0;
  p->t = t;
  p->dtype = test_types[types].dtype;
  p->grad_dtype = test_types[types].grad_dtype;
  g2z_dtype cpu_dtype = p->dtype == G2Z_TF32 ? G2Z_FP32 : p->dtype;
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, cpu_dtype, p->grad_dtype, &p->cpu));
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, p->dtype, p->grad_dtype, &p->gpu));
  return p->cpu && p->gpu;
}

/* Forgets the tensors, keeps the devices. */
static void test_pair_clear(test_pair *p) {
  for (int i = 0; i < p->count; i++) {
    free(p->twins[i].cpu);
    p->gpu->ops->release(p->gpu, p->twins[i].block);
  }
  p->count = 0;
}

static void test_pair_close(test_pair *p) {
  if (p->gpu) test_pair_clear(p);
  g2z_device_free(p->cpu);
  g2z_device_free(p->gpu);
}

static g2z_dtype test_twin_dtype(const test_pair *p, test_kind kind) {
  return kind == TEST_ACT ? p->dtype : kind == TEST_GRAD ? p->grad_dtype : G2Z_FP32;
}

static double test_eps(g2z_dtype dtype) {
  return dtype == G2Z_FP16 ? 0x1p-10 : dtype == G2Z_BF16 ? 0x1p-7 : 0x1p-23;
}

/* A float that is a value of the type, as the GPU stores it, and back. */
static void test_encode(g2z_dtype dtype, float x, void *to) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  uint16_t half = (uint16_t)(bits >> 16);
  if (dtype == G2Z_FP16) {
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    float magnitude = fabsf(x);
    if (isnan(x)) half = 0x7e00u;
    else if (magnitude > 65504.0f) half = 0x7c00u;
    else if (magnitude < 0x1p-14f) half = (uint16_t)(magnitude * 0x1p24f);
    else half = (uint16_t)(((bits & 0x7fffffffu) >> 13) - (112u << 10));
    half = (uint16_t)(half | sign);
  }
  if (dtype == G2Z_FP16 || dtype == G2Z_BF16) memcpy(to, &half, sizeof half);
  else memcpy(to, &x, sizeof x);
}

static float test_decode(g2z_dtype dtype, const void *from) {
  uint16_t half;
  uint32_t bits;
  float x;
  memcpy(&half, from, sizeof half);
  if (dtype == G2Z_FP16) {
    float sign = half & 0x8000u ? -1.0f : 1.0f;
    int exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf((float)(1024 + fraction), exponent - 25)
                            : ldexpf((float)fraction, -24));
  }
  if (dtype == G2Z_BF16) {
    bits = (uint32_t)half << 16;
    memcpy(&x, &bits, sizeof x);
  } else {
    memcpy(&x, from, sizeof x);
  }
  return x;
}

static size_t test_kind_size(const test_pair *p, test_kind kind) {
  g2z_dtype dtype = test_twin_dtype(p, kind);
  return kind == TEST_F64 ? 8 : dtype == G2Z_FP16 || dtype == G2Z_BF16 ? 2 : 4;
}

/* A tensor of n numbers, NaN (or -1) everywhere, `shift` elements behind an aligned address. */
static test_twin *test_twin_at(test_pair *p, test_kind kind, size_t n, size_t shift) {
  test_twin *twin = &p->twins[p->count];
  size_t size = test_kind_size(p, kind), cpu_bytes = n * (kind == TEST_F64 ? 8 : 4);
  memset(twin, 0, sizeof *twin);
  twin->kind = kind;
  twin->n = n;
  twin->bytes = n * size;
  twin->shift = shift * size;
  size_t block = twin->bytes + twin->shift + 2 * TEST_GUARD;
  twin->cpu = malloc(cpu_bytes + 1);
  CHECK(p->t, twin->cpu && p->count < TEST_TWINS - 1);
  CHECK_OK(p->t, p->gpu->ops->allocate(p->gpu, block, &twin->block));
  p->count++;
  if (!twin->cpu || !twin->block) return twin;
  twin->gpu = (char *)twin->block + TEST_GUARD + twin->shift;
  memset(twin->cpu, 0xff, cpu_bytes);
  void *bytes = malloc(block);
  memset(bytes, 0xff, block); /* NaN in every type; the guards too */
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, twin->block, bytes, block));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  free(bytes);
  return twin;
}
static test_twin *test_twin_new(test_pair *p, test_kind kind, size_t n) {
  return test_twin_at(p, kind, n, 0);
}

/* The CPU's values, copied to the GPU. Floats must be values of the type. */
static void test_twin_send(test_pair *p, test_twin *twin) {
  char *bytes = (char *)malloc(twin->bytes + 1);
  size_t size = test_kind_size(p, twin->kind);
  for (size_t i = 0; i < twin->n; i++) {
    if (twin->kind == TEST_I32 || twin->kind == TEST_F64)
      memcpy(bytes + i * size, (const char *)twin->cpu + i * size, size);
    else
      test_encode(test_twin_dtype(p, twin->kind), ((const float *)twin->cpu)[i], bytes + i * size);
  }
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, twin->gpu, bytes, twin->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  free(bytes);
}

/* Normal numbers times `scale`, plus `shift`, rounded to the type. */
static test_twin *test_twin_normal(test_pair *p, test_kind kind, size_t n, uint32_t seed,
                                   double scale, double shift) {
  test_twin *twin = test_twin_new(p, kind, n);
  for (size_t i = 0; i < n; i++) {
    uint32_t counter[4] = {(uint32_t)i, seed, 0, 0}, bits[4];
    g2z_philox(7, G2Z_RANDOM_SYNTHETIC, counter, bits);
    double radius = sqrt(-2.0 * log(1.0 - (double)g2z_uniform(bits[0])));
    double normal = radius * cos(6.283185307179586 * (double)g2z_uniform(bits[1]));
    ((float *)twin->cpu)[i] =
        g2z_round(test_twin_dtype(p, kind), (float)(normal * scale + shift));
  }
  test_twin_send(p, twin);
  return twin;
}

/* Tokens below `vocab`, small ones more often; vocab 1 makes one run of all of them. */
static test_twin *test_twin_tokens(test_pair *p, size_t n, int vocab, uint32_t seed) {
  test_twin *twin = test_twin_new(p, TEST_I32, n);
  for (size_t i = 0; i < n; i++) {
    uint32_t counter[4] = {(uint32_t)i, seed, 1, 0}, bits[4];
    g2z_philox(7, G2Z_RANDOM_SYNTHETIC, counter, bits);
    float u = g2z_uniform(bits[0]);
    ((int32_t *)twin->cpu)[i] = (int32_t)((float)vocab * u * u * u);
  }
  test_twin_send(p, twin);
  return twin;
}

/* The largest distance in units of the bound (1: just within), after checking the guards. */
static double test_twin_compare(test_pair *p, const test_twin *twin, const char *what, double ulps,
                                double noise) {
  size_t size = test_kind_size(p, twin->kind);
  size_t block = twin->bytes + twin->shift + 2 * TEST_GUARD;
  unsigned char *bytes = (unsigned char *)malloc(block);
  g2z_dtype dtype = test_twin_dtype(p, twin->kind);
  double worst = 0, got = 0, want = 0, eps = test_eps(dtype);
  size_t at = 0, broken = 0;
  if (p->gpu->ops->download(p->gpu, bytes, twin->block, block) != G2Z_OK ||
      p->gpu->ops->synchronize(p->gpu) != G2Z_OK)
    test_fail(p->t, __FILE__, __LINE__, "%s: %s", what, p->t->services.error);
  size_t begin = TEST_GUARD + twin->shift;
  for (size_t i = 0; i < block; i++)
    if ((i < begin || i >= begin + twin->bytes) && bytes[i] != 0xff) broken++;
  p->t->checks += 2;
  if (broken)
    test_fail(p->t, __FILE__, __LINE__, "%s (%s, gradients %s): %zu guard bytes were overwritten",
              what, g2z_dtype_text(p->dtype), g2z_dtype_text(p->grad_dtype), broken);
  for (size_t i = 0; i < twin->n; i++) {
    double x, y, step = 0;
    if (twin->kind == TEST_F64) {
      memcpy(&x, bytes + begin + i * size, sizeof x);
      y = ((const double *)twin->cpu)[i];
    } else {
      x = (double)test_decode(dtype, bytes + begin + i * size);
      y = (double)((const float *)twin->cpu)[i];
    }
    if (dtype == G2Z_FP16 && twin->kind != TEST_F64) step = 0x1p-24; /* subnormals */
    double bound = ulps * (eps * fabs(y) + step) + noise + 1e-37;
    double distance = x == y || (isnan(x) && isnan(y)) ? 0 : fabs(x - y) / bound;
    if (isnan(distance)) distance = INFINITY;
    if (distance > worst) worst = distance, at = i, got = x, want = y;
  }
  if (!(worst <= 1))
    test_fail(p->t, __FILE__, __LINE__,
              "%s (%s, gradients %s): element %zu of %zu is %.9g, expected %.9g: %.3g of the bound",
              what, g2z_dtype_text(p->dtype), g2z_dtype_text(p->grad_dtype), at, twin->n, got, want,
              worst);
  free(bytes);
  return worst;
}

/* What a sum or product of K terms, each about `term`, may lose by the order of its additions. */
static double test_sum_noise(int K, double term) { return 4 * (K + 8) * term * 0x1p-24; }
static double test_product_noise(const test_pair *p, int K, double term) {
  double sum = test_sum_noise(K, term);
  if (p->dtype == G2Z_TF32) return sum + 8 * sqrt((double)K) * term * 0x1p-11;
  return p->dtype == G2Z_FP32 ? sum : 2 * sum;
}

/* A step state on both devices. */
typedef struct test_state {
  g2z_step_state *cpu;
  g2z_step_state *gpu;
} test_state;

static test_state test_state_make(test_pair *p, float loss_scale, int64_t step) {
  test_twin *twin = test_twin_new(p, TEST_F64, sizeof(g2z_step_state) / 8);
  test_state state;
  state.cpu = (g2z_step_state *)twin->cpu;
  state.gpu = (g2z_step_state *)twin->gpu;
  memset(state.cpu, 0, sizeof *state.cpu);
  state.cpu->step = step;
  state.cpu->loss_scale = loss_scale;
  state.cpu->hysteresis = 2;
  CHECK(p->t, sizeof(g2z_step_state) % 8 == 0);
  test_twin_send(p, twin);
  return state;
}

static g2z_dropout test_dropout(const g2z_step_state *state, float probability, int seq) {
  g2z_dropout dropout;
  memset(&dropout, 0, sizeof dropout);
  dropout.probability = probability;
  dropout.site = 5;
  dropout.first = 3;
  dropout.stride = 7;
  dropout.seq = seq;
  dropout.seed = 0x123456789abcdefull;
  dropout.state = state;
  return dropout;
}

#define CUDA_OR_SKIP(t) \
  if (g2z_device_default() != G2Z_DEVICE_CUDA) SKIP(t, "no GPU that this build can use")

static char test_cuda_lines[2048];
static void test_cuda_log(void *user, g2z_log_level level, const char *sentence) {
  (void)user;
  (void)level;
  size_t used = strlen(test_cuda_lines);
  snprintf(test_cuda_lines + used, sizeof test_cuda_lines - used, "%s\n", sentence);
}

static void test_cuda_device(g2z_test *t) {
  CUDA_OR_SKIP(t);
  g2z_device *device;
  size_t free_bytes = 0, total_bytes = 0;
  test_cuda_lines[0] = 0;
  t->services.log = test_cuda_log;
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, G2Z_FP16, G2Z_FP16, &device));
  if (!device) return;
  CHECK(t, strstr(test_cuda_lines, "sm_") && strstr(test_cuda_lines, "cuBLASLt") &&
               strstr(test_cuda_lines, "fp16"));
  const g2z_ops *ops = device->ops;
  CHECK_OK(t, g2z_device_memory(&t->services, G2Z_DEVICE_CUDA, &free_bytes, &total_bytes));
  CHECK(t, free_bytes > 0 && free_bytes <= total_bytes);
  void *memory = NULL, *pinned = NULL;
  enum { BYTES = 100003 };
  CHECK_OK(t, ops->allocate(device, BYTES, &memory));
  CHECK_OK(t, ops->allocate_host(device, BYTES, &pinned));
  unsigned char *host = (unsigned char *)pinned, *back = (unsigned char *)malloc(BYTES);
  CHECK_OK(t, ops->download(device, back, memory, BYTES));
  CHECK_OK(t, ops->synchronize(device));
  int zeros = 1, equal = 1;
  for (int i = 0; i < BYTES; i++) zeros &= back[i] == 0 && host[i] == 0;
  CHECK(t, zeros);
  CHECK_OK(t, ops->wait(device, 3)); /* never marked: nothing to wait for */
  for (int i = 0; i < BYTES; i++) host[i] = (unsigned char)(i * 31);
  CHECK_OK(t, ops->upload(device, memory, host, BYTES));
  CHECK_OK(t, ops->zero(device, (char *)memory + 77, 1001));
  CHECK_OK(t, ops->mark(device, 3));
  CHECK_OK(t, ops->download(device, back, memory, BYTES));
  CHECK_OK(t, ops->wait(device, 3));
  CHECK_OK(t, ops->synchronize(device));
  for (int i = 0; i < BYTES; i++)
    equal &= back[i] == (i >= 77 && i < 77 + 1001 ? 0 : (unsigned char)(i * 31));
  CHECK(t, equal);
  void *huge;
  CHECK_STATUS(t, ops->allocate(device, (size_t)1 << 50, &huge), G2Z_NO_MEMORY, &t->services,
               "lower the batch");
  CHECK(t, huge == NULL);
  CHECK_OK(t, ops->synchronize(device)); /* the failure has left nothing behind */
  free(back);
  ops->release(device, memory);
  ops->release_host(device, pinned);
  g2z_device_free(device);
  CHECK_STATUS(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, G2Z_FP16, G2Z_BF16, &device),
               G2Z_BAD_ARGUMENT, &t->services, "same type or fp32");
}

static void test_cuda_embed_one(test_pair *p, int B, int T, int C, int V, float probability) {
  const g2z_ops *cpu = p->cpu->ops, *gpu = p->gpu->ops;
  size_t N = (size_t)B * (size_t)T, width = (size_t)C;
  test_twin *tokens = test_twin_tokens(p, N, V, (uint32_t)C);
  test_twin *wte = test_twin_normal(p, TEST_ACT, (size_t)V * width, 1, 0.5, 0);
  test_twin *wpe = test_twin_normal(p, TEST_ACT, (size_t)T * width, 2, 0.5, 0);
  test_twin *out = test_twin_new(p, TEST_ACT, N * width);
  test_state state = test_state_make(p, 1, 41);
  g2z_dropout drop = test_dropout(state.cpu, probability, T), drop_gpu = drop;
  drop_gpu.state = state.gpu;
  CHECK_OK(p->t, cpu->embed_fwd(p->cpu, out->cpu, (const int32_t *)tokens->cpu, wte->cpu, wpe->cpu,
                                &drop, B, T, C));
  CHECK_OK(p->t, gpu->embed_fwd(p->gpu, out->gpu, (const int32_t *)tokens->gpu, wte->gpu, wpe->gpu,
                                &drop_gpu, B, T, C));
  test_twin_compare(p, out, "embed_fwd", 0, 0); /* one addition, one product: equal to the bit */

  test_twin *dout = test_twin_normal(p, TEST_ACT, N * width, 3, 1, 0);
  test_twin *dwte = test_twin_normal(p, TEST_F32, (size_t)V * width, 4, 1, 0);
  test_twin *dwpe = test_twin_new(p, TEST_GRAD, (size_t)T * width);
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    CHECK_OK(p->t, cpu->embed_bwd(p->cpu, (float *)dwte->cpu, dwpe->cpu, dout->cpu,
                                  (const int32_t *)tokens->cpu, (g2z_write)mode, &drop, B, T, C));
    CHECK_OK(p->t, gpu->embed_bwd(p->gpu, (float *)dwte->gpu, dwpe->gpu, dout->gpu,
                                  (const int32_t *)tokens->gpu, (g2z_write)mode, &drop_gpu, B, T,
                                  C));
    test_twin_compare(p, dwte, "embed_bwd dwte", 2, test_sum_noise((int)N, 2));
    test_twin_compare(p, dwpe, "embed_bwd dwpe", 2, test_sum_noise(B, 2));
  }
  /* Three parts, which cut rows, with gaps between them; and the first of them alone. */
  enum { GAP = 16 };
  size_t words = (size_t)V * width, third = words / 3 / 8 * 8;
  g2z_row_part parts[3] = {{0, third, 0}, {third, third, third + GAP},
                           {2 * third, words - 2 * third, 2 * (third + GAP)}};
  test_twin *order = test_twin_tokens(p, 2 * N, V, 1);
  CHECK_OK(p->t, cpu->embed_order(p->cpu, (int32_t *)order->cpu, (const int32_t *)tokens->cpu,
                                  (int)N));
  CHECK_OK(p->t, gpu->embed_order(p->gpu, (int32_t *)order->gpu, (const int32_t *)tokens->gpu,
                                  (int)N));
  for (int count = 3; count > 0; count -= 2) {
    test_twin *grads = test_twin_normal(p, TEST_GRAD, words + 2 * GAP, 5, 1, 0);
    CHECK_OK(p->t, cpu->embed_add(p->cpu, grads->cpu, parts, count, dout->cpu,
                                  (const int32_t *)order->cpu, (int)N, C));
    CHECK_OK(p->t, gpu->embed_add(p->gpu, grads->gpu, parts, count, dout->gpu,
                                  (const int32_t *)order->gpu, (int)N, C));
    test_twin_compare(p, grads, "embed_add", 2, test_sum_noise((int)N, 2));
  }
  test_pair_clear(p);
}

static void test_cuda_embed(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      test_cuda_embed_one(&p, 1, 1, 8, 5, 0);
      test_cuda_embed_one(&p, 3, 37, 40, 11, 0.25f);
      test_cuda_embed_one(&p, 2, 129, 264, 300, 0);
      test_cuda_embed_one(&p, 5, 67, 776, 1, 0.5f); /* one token: its run crosses every chunk */
      test_cuda_embed_one(&p, 2, 4100, 264, 300, 0); /* so many are sorted by CUB, fewer by rank */
      test_cuda_embed_one(&p, 2, 129, 8, 150000, 0); /* tokens wider than 16 bits, by rank */
    }
    test_pair_close(&p);
  }
}

static void test_cuda_layernorm_one(test_pair *p, int N, int C, float probability) {
  const g2z_ops *cpu = p->cpu->ops, *gpu = p->gpu->ops;
  size_t width = (size_t)C, all = (size_t)N * width;
  test_twin *x = test_twin_normal(p, TEST_ACT, all, 1, 2, 0.5);
  test_twin *w = test_twin_normal(p, TEST_ACT, width, 2, 0.2, 1);
  test_twin *b = test_twin_normal(p, TEST_ACT, width, 3, 0.2, 0);
  test_twin *y = test_twin_new(p, TEST_ACT, all);
  test_twin *mean = test_twin_new(p, TEST_F32, (size_t)N);
  test_twin *rstd = test_twin_new(p, TEST_F32, (size_t)N);
  CHECK_OK(p->t, cpu->layernorm_fwd(p->cpu, y->cpu, (float *)mean->cpu, (float *)rstd->cpu, x->cpu,
                                    w->cpu, b->cpu, N, C));
  CHECK_OK(p->t, gpu->layernorm_fwd(p->gpu, y->gpu, (float *)mean->gpu, (float *)rstd->gpu, x->gpu,
                                    w->gpu, b->gpu, N, C));
  test_twin_compare(p, mean, "layernorm_fwd mean", 2, 2 * 0x1p-22);
  test_twin_compare(p, rstd, "layernorm_fwd rstd", 16, 0);
  test_twin_compare(p, y, "layernorm_fwd y", 1.01, 32 * 0x1p-23);

  test_twin *dy = test_twin_normal(p, TEST_ACT, all, 4, 1, 0);
  test_twin *dres = test_twin_normal(p, TEST_ACT, all, 5, 1, 0);
  test_twin *dropped = test_twin_new(p, TEST_ACT, all);
  test_twin *dw = test_twin_new(p, TEST_GRAD, width), *db = test_twin_new(p, TEST_GRAD, width);
  test_twin *dbias = test_twin_new(p, TEST_GRAD, width);
  test_state state = test_state_make(p, 1, 3);
  g2z_dropout drop = test_dropout(state.cpu, probability, N > 2 ? N / 2 : 1), drop_gpu = drop;
  drop_gpu.state = state.gpu;
  for (int round = 0; round < 4; round++) {
    g2z_write res_mode = round % 2 ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
    g2z_write mode = round / 2 ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
    void *no_bias = NULL;
    int with_bias = round != 1;
    CHECK_OK(p->t, cpu->layernorm_bwd(p->cpu, dres->cpu, dropped->cpu, dw->cpu, db->cpu,
                                      with_bias ? dbias->cpu : no_bias, dy->cpu, x->cpu, w->cpu,
                                      (const float *)mean->cpu, (const float *)rstd->cpu, res_mode,
                                      mode, &drop, N, C));
    CHECK_OK(p->t, gpu->layernorm_bwd(p->gpu, dres->gpu, dropped->gpu, dw->gpu, db->gpu,
                                      with_bias ? dbias->gpu : no_bias, dy->gpu, x->gpu, w->gpu,
                                      (const float *)mean->gpu, (const float *)rstd->gpu, res_mode,
                                      mode, &drop_gpu, N, C));
    double ulps = 1.01 + round; /* roundings of dres pile up over the rounds */
    double stored = ulps * test_eps(p->dtype) * 4; /* what one row may be off */
    test_twin_compare(p, dres, "layernorm_bwd dres", ulps, 64 * 0x1p-23);
    if (probability > 0)
      test_twin_compare(p, dropped, "layernorm_bwd dropped", ulps + 1, 64 * 0x1p-23);
    test_twin_compare(p, dw, "layernorm_bwd dw", 2, test_sum_noise(N, 16));
    test_twin_compare(p, db, "layernorm_bwd db", 2, test_sum_noise(N, 4));
    if (with_bias) /* sums of values that may be neighbours: a few of them round differently */
      test_twin_compare(p, dbias, "layernorm_bwd dbias", 2,
                        sqrt((double)N) * stored + test_sum_noise(N, 4));
  }
  test_pair_clear(p);
}

static void test_cuda_layernorm(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      test_cuda_layernorm_one(&p, 1, 8, 0);
      test_cuda_layernorm_one(&p, 7, 24, 0.5f);
      test_cuda_layernorm_one(&p, 37, 264, 0);
      test_cuda_layernorm_one(&p, 33, 520, 0.1f);
      test_cuda_layernorm_one(&p, 3001, 768, 0);
      test_cuda_layernorm_one(&p, 130, 1024, 0.1f);
      test_cuda_layernorm_one(&p, 517, 1600, 0);
      test_cuda_layernorm_one(&p, 19, 4096, 0.1f);
      if (p.dtype == G2Z_FP16) test_cuda_layernorm_one(&p, 19, 4104, 0.1f);
      CHECK_STATUS(t, p.gpu->ops->layernorm_fwd(p.gpu, NULL, NULL, NULL, NULL, NULL, NULL, 1, 8200),
                   G2Z_UNSUPPORTED, &t->services, "fewer channels");
    }
    test_pair_close(&p);
  }
}

static void test_cuda_linear_one(test_pair *p, int N, int I, int O) {
  const g2z_ops *cpu = p->cpu->ops, *gpu = p->gpu->ops;
  size_t in = (size_t)N * (size_t)I, out = (size_t)N * (size_t)O, cells = (size_t)I * (size_t)O;
  test_twin *x = test_twin_normal(p, TEST_ACT, in, 1, 1, 0);
  test_twin *w = test_twin_normal(p, TEST_ACT, cells, 2, 1 / sqrt((double)I), 0);
  test_twin *bias = test_twin_normal(p, TEST_ACT, (size_t)O, 3, 0.5, 0);
  test_twin *residual = test_twin_normal(p, TEST_ACT, out, 4, 1, 0);
  test_twin *stream = test_twin_normal(p, TEST_ACT, out, 4, 1, 0);
  test_twin *y = test_twin_new(p, TEST_ACT, out), *slope = test_twin_new(p, TEST_ACT, out);
  test_state state = test_state_make(p, 1, 9);
  g2z_dropout drop = test_dropout(state.cpu, 0.3f, N), drop_gpu = drop;
  drop_gpu.state = state.gpu;
  double noise = test_product_noise(p, I, 1 / sqrt((double)I)), eps = test_eps(p->dtype);
  enum { PLAIN, GELU, RESIDUAL, IN_PLACE, DROPOUT, DROPOUT_IN_PLACE, FORMS };
  static const char *const names[] = {"linear_fwd",          "linear_fwd gelu",
                                      "linear_fwd residual", "linear_fwd residual in place",
                                      "linear_fwd dropout",  "linear_fwd dropout in place"};
  for (int form = PLAIN; form < FORMS; form++) {
    int in_place = form == IN_PLACE || form == DROPOUT_IN_PLACE, drops = form >= DROPOUT;
    test_twin *to = in_place ? stream : y;
    test_twin *add = form < RESIDUAL ? NULL : in_place ? stream : residual;
    CHECK_OK(p->t, cpu->linear_fwd(p->cpu, to->cpu, form == GELU ? slope->cpu : NULL, x->cpu,
                                   w->cpu, bias->cpu, add ? add->cpu : NULL, drops ? &drop : NULL, N, I,
                                   O));
    CHECK_OK(p->t, gpu->linear_fwd(p->gpu, to->gpu, form == GELU ? slope->gpu : NULL, x->gpu,
                                   w->gpu, bias->gpu, add ? add->gpu : NULL, drops ? &drop_gpu : NULL, N, I,
                                   O));
    /* What is rounded before the last step, of size up to 6: the input of GELU where the product is
     * cuBLASLt's (slope up to 1.13, which itself changes by at most 0.8 times the input's change),
     * the product before its dropout, and, by cuBLASLt 13.1, the product that is added in place. */
    double extra = form == GELU || form == IN_PLACE ? 3 * eps : drops ? 5 * eps : 0;
    test_twin_compare(p, to, names[form], 1.01, 2 * noise + extra);
    if (form == GELU) test_twin_compare(p, slope, "linear_fwd slope", 1.01, noise + 2 * eps);
    if (in_place && form == IN_PLACE) { /* both go on from the same numbers */
      memcpy(stream->cpu, residual->cpu, out * sizeof(float));
      test_twin_send(p, stream);
    }
  }
  test_twin *dy = test_twin_normal(p, TEST_ACT, out, 5, 1, 0);
  test_twin *dx = test_twin_new(p, TEST_ACT, in);
  test_twin *into = test_twin_normal(p, TEST_ACT, in, 6, 1, 0);
  test_twin *dbias = test_twin_new(p, TEST_GRAD, (size_t)I);
  test_twin *dw = test_twin_new(p, TEST_GRAD, cells);
  double term = 1 / sqrt((double)I), back = test_product_noise(p, O, term);
  double largest = 6 * sqrt((double)O) * term; /* of dx */
  CHECK_OK(p->t, cpu->linear_bwd_data(p->cpu, dx->cpu, NULL, dy->cpu, w->cpu, NULL, G2Z_OVERWRITE,
                                      N, I, O));
  CHECK_OK(p->t, gpu->linear_bwd_data(p->gpu, dx->gpu, NULL, dy->gpu, w->gpu, NULL, G2Z_OVERWRITE,
                                      N, I, O));
  test_twin_compare(p, dx, "linear_bwd_data", 1.01, back);
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    CHECK_OK(p->t, cpu->linear_bwd_data(p->cpu, dx->cpu, dbias->cpu, dy->cpu, w->cpu, into->cpu,
                                        (g2z_write)mode, N, I, O));
    CHECK_OK(p->t, gpu->linear_bwd_data(p->gpu, dx->gpu, dbias->gpu, dy->gpu, w->gpu, into->gpu,
                                        (g2z_write)mode, N, I, O));
    test_twin_compare(p, dx, "linear_bwd_data slope", 2.5, 6 * back);
    test_twin_compare(p, dbias, "linear_bwd_data dbias", 2,
                      (1 + mode) * 4 * sqrt((double)N) * (eps + 0x1p-22) * largest +
                          sqrt((double)N) * 2 * back);
    CHECK_OK(p->t, cpu->linear_bwd_weight(p->cpu, dw->cpu, x->cpu, dy->cpu, (g2z_write)mode, N, I,
                                          O));
    CHECK_OK(p->t, gpu->linear_bwd_weight(p->gpu, dw->gpu, x->gpu, dy->gpu, (g2z_write)mode, N, I,
                                          O));
    test_twin_compare(p, dw, "linear_bwd_weight", 1.01 + 2 * mode,
                      (1 + mode) * test_product_noise(p, N, 2));
  }
  test_pair_clear(p);
}

static void test_cuda_linear(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      test_cuda_linear_one(&p, 1, 8, 24);
      test_cuda_linear_one(&p, 37, 40, 120);
      test_cuda_linear_one(&p, 131, 256, 768);
      test_cuda_linear_one(&p, 515, 1032, 136);
    }
    test_pair_close(&p);
  }
}

/* Our own products, which the clock may choose or not: less than a tile, more tiles than a GPU has
 * multiprocessors both forward and backward, and no multiple of a tile in any direction. */
static void test_cuda_products(g2z_test *t) {
  CUDA_OR_SKIP(t);
#ifdef __CUDACC__
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      const g2z__cuda *cuda = g2z__cuda_of(p.gpu);
      int ours = 0, here = cuda->hopper && (p.dtype == G2Z_FP16 || p.dtype == G2Z_BF16);
      g2z_device_tune(p.gpu, G2Z_TUNE_OWN);
      test_cuda_linear_one(&p, 1, 8, 24);
      test_cuda_linear_one(&p, 37, 40, 120);
      test_cuda_linear_one(&p, 515, 1032, 136);
      if (here) {
        test_cuda_linear_one(&p, 4200, 72, 1544);
        test_cuda_linear_one(&p, 4200, 1544, 72);
      }
      for (int i = 0; i < cuda->product_count; i++)
        ours += cuda->products[i].way == G2Z__WAY_HOPPER;
      /* plain or with what is added, GELU, data gradient, with GELU's: of each shape */
      CHECK(t, ours == (here ? 5 * 4 : 0));
    }
    test_pair_close(&p);
  }
#endif
}

/* A tuning table goes to a file and comes back; what does not fit is refused. */
static void test_cuda_tuning(g2z_test *t) {
  CUDA_OR_SKIP(t);
  test_pair p;
  if (!test_pair_open(&p, t, 2)) return;
  test_cuda_linear_one(&p, 131, 256, 768);
  char *text, *again;
  CHECK_OK(t, g2z_device_tuning(p.gpu, &text));
  size_t bytes = strlen(text);
  CHECK(t, bytes > 200);
  test_pair_close(&p);

  if (!test_pair_open(&p, t, 2)) return;
  CHECK_OK(t, g2z_device_tuning_read(p.gpu, text));
  test_cuda_linear_one(&p, 131, 256, 768); /* with the choices that were read */
  CHECK_OK(t, g2z_device_tuning(p.gpu, &again));
  CHECK(t, strcmp(text, again) == 0);
  test_pair_close(&p);

  if (!test_pair_open(&p, t, 2)) return;
  again[20] ^= 1;
  CHECK_STATUS(t, g2z_device_tuning_read(p.gpu, again), G2Z_FORMAT, &t->services, "another GPU");
  again[20] ^= 1;
  again[bytes - 1] = 0;
  CHECK_STATUS(t, g2z_device_tuning_read(p.gpu, again), G2Z_FORMAT, &t->services, "no product");
  again[bytes - 1] = '\n';
  char *way = strstr(again, " cublaslt ") ? strstr(again, " cublaslt ") : strstr(again, " hopper");
  CHECK(t, way != NULL);
  if (way) way[2] ^= 1;
  CHECK_STATUS(t, g2z_device_tuning_read(p.gpu, again), G2Z_FORMAT, &t->services, "no product");
  g2z_device_tune(p.gpu, G2Z_TUNE_OFF);
  test_cuda_linear_one(&p, 131, 256, 768); /* the heuristic's choices */
  g2z_release(&t->services, text);
  g2z_release(&t->services, again);
  test_pair_close(&p);
}

/* got = want but for `bound` of want's norm, over the rows that are no target's, or over all. */
static void test_head_norm(test_pair *p, const test_twin *dwte, const test_twin *targets, int C,
                           double bound) {
  float *got = (float *)malloc(dwte->bytes);
  const float *want = (const float *)dwte->cpu;
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, got, dwte->gpu, dwte->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (int all = 0; all < 2; all++) {
    double off = 0, size = 0;
    for (size_t row = 0; row < dwte->n / (size_t)C; row++) {
      int is_target = 0;
      for (size_t i = 0; i < targets->n; i++)
        is_target |= ((const int32_t *)targets->cpu)[i] == (int32_t)row;
      for (size_t i = row * (size_t)C; i < (row + 1) * (size_t)C && (all || !is_target); i++) {
        off += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
        size += (double)want[i] * (double)want[i];
      }
    }
    p->t->checks++;
    if (!(sqrt(off) <= bound * sqrt(size)))
      test_fail(p->t, __FILE__, __LINE__, "head_loss dwte of %s (%s): off by %.3g of %.3g, bound %.3g",
                all ? "all words" : "words that are no target", g2z_dtype_text(p->dtype), sqrt(off),
                sqrt(size), bound);
  }
  free(got);
}

/* Logits are of size `spread`. `exact`, an fp32 CPU: logits are not rounded in training, so that
 * its loss and gradients are what to expect; NULL: they are, as p->cpu rounds them. */
static void test_cuda_head_one(test_pair *p, g2z_device *exact, int N, int C, int V, int chunk,
                               double spread, float scale) {
  const g2z_ops *cpu = p->cpu->ops, *gpu = p->gpu->ops;
  g2z_device *trains = exact ? exact : p->cpu;
  int Vp = (V + 127) / 128 * 128;
  size_t width = (size_t)C, all = (size_t)N * width, words = (size_t)Vp * width;
  float dloss = 1.0f / (float)N;
  test_twin *h = test_twin_normal(p, TEST_ACT, all, 1, 1, 0);
  test_twin *wte = test_twin_normal(p, TEST_ACT, words, 2, spread / sqrt((double)C), 0);
  memset((float *)wte->cpu + (size_t)V * width, 0, (size_t)(Vp - V) * width * sizeof(float));
  test_twin_send(p, wte);
  test_twin *targets = test_twin_tokens(p, (size_t)N, V, 3);
  ((int32_t *)targets->cpu)[N - 1] = V - 1;
  test_twin_send(p, targets);
  test_twin *logits = test_twin_new(p, TEST_ACT, (size_t)chunk * (size_t)Vp);
  test_twin *losses = test_twin_new(p, TEST_F32, (size_t)N), *sum = test_twin_new(p, TEST_F64, 1);
  test_twin *dh = test_twin_new(p, TEST_ACT, all), *dwte = test_twin_new(p, TEST_F32, words);
  test_state state = test_state_make(p, scale, 1);
  double eps = test_eps(p->dtype);
  /* A logit of size up to 6 spreads that rounds differently moves a loss by eps * 6 spreads, and a
   * probability as much of itself. */
  double noise = test_product_noise(p, C, spread / sqrt((double)C));
  double rounded = 3 * spread * eps + noise, logit = exact ? noise : rounded;
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    *(double *)sum->cpu = 0.5;
    test_twin_send(p, sum);
    CHECK_OK(p->t, cpu->head_loss(trains, (float *)losses->cpu, (double *)sum->cpu, dh->cpu,
                                  dwte->cpu, G2Z_FP32, logits->cpu, h->cpu, wte->cpu,
                                  (const int32_t *)targets->cpu, dloss, state.cpu, (g2z_write)mode,
                                  N, C, V, Vp, chunk));
    CHECK_OK(p->t, gpu->head_loss(p->gpu, (float *)losses->gpu, (double *)sum->gpu, dh->gpu,
                                  dwte->gpu, G2Z_FP32, logits->gpu, h->gpu, wte->gpu,
                                  (const int32_t *)targets->gpu, dloss, state.gpu, (g2z_write)mode,
                                  N, C, V, Vp, chunk));
    double g = (double)dloss * (double)scale;
    double word = spread / sqrt((double)C) > 1 ? spread / sqrt((double)C) : 1; /* numbers of wte */
    test_twin_compare(p, losses, "head_loss losses", 8, 2 * logit + 1e-6);
    test_twin_compare(p, sum, "head_loss sum", 0, N * (2 * logit + 1e-6));
    test_twin_compare(p, dh, "head_loss dh", 2, g * word * (2 * logit + 4 * eps + 1e-6));
    test_twin_compare(p, dwte, "head_loss dwte", 8,
                      (1 + mode) * g * sqrt((double)N) * 4 * (2 * logit + 4 * eps + 1e-6));
    if (exact) test_head_norm(p, dwte, targets, C, 2 * (2 * logit + 4 * eps));
  }
  if (N <= chunk) { /* rounded at once */
    test_twin *narrow = test_twin_new(p, TEST_GRAD, words);
    g2z_dtype grad = p->cpu->grad_dtype;
    CHECK_OK(p->t, cpu->head_loss(trains, (float *)losses->cpu, (double *)sum->cpu, dh->cpu,
                                  narrow->cpu, grad, logits->cpu, h->cpu, wte->cpu,
                                  (const int32_t *)targets->cpu, dloss, state.cpu, G2Z_OVERWRITE,
                                  N, C, V, Vp, chunk));
    CHECK_OK(p->t, gpu->head_loss(p->gpu, (float *)losses->gpu, (double *)sum->gpu, dh->gpu,
                                  narrow->gpu, grad, logits->gpu, h->gpu, wte->gpu,
                                  (const int32_t *)targets->gpu, dloss, state.gpu, G2Z_OVERWRITE,
                                  N, C, V, Vp, chunk));
    test_twin_compare(p, narrow, "head_loss dwte, rounded", 8,
                      (double)dloss * (double)scale * sqrt((double)N) * 4 *
                          (2 * logit + 4 * eps + 1e-6));
  }
  *(double *)sum->cpu = 0.5;
  test_twin_send(p, sum);
  CHECK_OK(p->t, cpu->head_loss(p->cpu, (float *)losses->cpu, (double *)sum->cpu, NULL, NULL,
                                G2Z_FP32, logits->cpu, h->cpu, wte->cpu,
                                (const int32_t *)targets->cpu, 0, NULL, G2Z_OVERWRITE, N, C, V,
                                Vp, chunk));
  CHECK_OK(p->t, gpu->head_loss(p->gpu, (float *)losses->gpu, (double *)sum->gpu, NULL, NULL,
                                G2Z_FP32, logits->gpu, h->gpu, wte->gpu,
                                (const int32_t *)targets->gpu, 0, NULL, G2Z_OVERWRITE, N, C, V, Vp,
                                chunk));
  test_twin_compare(p, losses, "head_loss losses, no gradient", 8, 2 * rounded + 1e-6);
  test_twin_compare(p, sum, "head_loss sum, no gradient", 0, N * (2 * rounded + 1e-6));
  int n = N < 5 ? N : 5;
  test_twin *rows = test_twin_new(p, TEST_F32, (size_t)n * (size_t)V);
  CHECK_OK(p->t, cpu->head_logits(p->cpu, (float *)rows->cpu, h->cpu, wte->cpu, n, C, V));
  CHECK_OK(p->t, gpu->head_logits(p->gpu, (float *)rows->gpu, h->gpu, wte->gpu, n, C, V));
  test_twin_compare(p, rows, "head_logits", 4, noise);
  test_pair_clear(p);
}

/* Rows of h that are no numbers make their losses, their dh and all of dwte none, so that the step
 * is skipped; the other rows are as if they were not there. They lie in the first and the last of 18
 * tiles of 128 rows, of which there are 8 across: where exponentials are computed again, blocks of
 * a GPU with 132 multiprocessors leave tiles out before and behind those. */
static void test_cuda_head_poison(test_pair *p) {
  enum { N = 2200, C = 136, V = 1500, VP = 1536 };
  static const struct {
    int row;
    float poison;
  } bad[] = {{77, NAN}, {2190, INFINITY}};
  float scale = p->dtype == G2Z_FP16 ? 1024.0f : 1.0f, dloss = 1.0f / N;
  test_twin *h = test_twin_normal(p, TEST_ACT, N * C, 1, 1, 0);
  test_twin *wte = test_twin_normal(p, TEST_ACT, VP * C, 2, 0.17, 0); /* logits of size 2 */
  memset((float *)wte->cpu + V * C, 0, (VP - V) * C * sizeof(float));
  test_twin_send(p, wte);
  test_twin *targets = test_twin_tokens(p, N, V, 3), *logits = test_twin_new(p, TEST_ACT, N * VP);
  test_twin *losses = test_twin_new(p, TEST_F32, N), *sum = test_twin_new(p, TEST_F64, 1);
  test_twin *dh = test_twin_new(p, TEST_ACT, N * C), *dwte = test_twin_new(p, TEST_F32, VP * C);
  test_state state = test_state_make(p, scale, 1);
  CHECK_OK(p->t, p->cpu->ops->head_loss(p->cpu, (float *)losses->cpu, (double *)sum->cpu, dh->cpu,
                                        dwte->cpu, G2Z_FP32, logits->cpu, h->cpu, wte->cpu,
                                        (const int32_t *)targets->cpu, dloss, state.cpu,
                                        G2Z_OVERWRITE, N, C, V, VP, N));
  for (int b = 0; b < 2; b++) {
    ((float *)losses->cpu)[bad[b].row] = NAN;
    for (int i = 0; i < C; i++) ((float *)dh->cpu)[bad[b].row * C + i] = NAN;
    ((float *)h->cpu)[bad[b].row * C + 5] = bad[b].poison;
  }
  test_twin_send(p, h);
  CHECK_OK(p->t, p->gpu->ops->head_loss(p->gpu, (float *)losses->gpu, (double *)sum->gpu, dh->gpu,
                                        dwte->gpu, G2Z_FP32, logits->gpu, h->gpu, wte->gpu,
                                        (const int32_t *)targets->gpu, dloss, state.gpu,
                                        G2Z_OVERWRITE, N, C, V, VP, N));
  double logit = 6 * test_eps(p->dtype) + test_product_noise(p, C, 0.17);
  double g = (double)dloss * (double)scale;
  test_twin_compare(p, losses, "head_loss losses, rows are no numbers", 8, 2 * logit + 1e-6);
  test_twin_compare(p, dh, "head_loss dh, rows are no numbers", 2,
                    g * (2 * logit + 4 * test_eps(p->dtype) + 1e-6));
  float *found = (float *)malloc(dwte->bytes);
  int numbers = 0;
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, found, dwte->gpu, dwte->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (int i = 0; i < V * C; i++) numbers += !isnan(found[i]);
  CHECK(p->t, numbers == 0);
  free(found);
  test_pair_clear(p);
}

/* Whether head_loss trains with exponentials: in 16 bits on Hopper, where products are tuned. */
static int test_head_exponentials(const test_pair *p) {
  int fits = 0;
#ifdef __CUDACC__
  const g2z__cuda *cuda = g2z__cuda_of(p->gpu);
  int halves = p->dtype == G2Z_FP16 || p->dtype == G2Z_BF16;
  if (halves)
    fits = p->dtype == G2Z_FP16 ? g2z__head_fits<__half>(p->gpu, 300, 136, 1024)
                                : g2z__head_fits<__nv_bfloat16>(p->gpu, 300, 136, 1024);
  CHECK(p->t, fits == (cuda->hopper && halves && cuda->tune != G2Z_TUNE_OFF));
#else
  (void)p;
#endif
  return fits;
}

static void test_cuda_head(g2z_test *t) {
  static const struct {
    int N, C, V, chunk;
    double spread;
    float scale; /* of fp16 */
  } cases[] = {
      {1, 8, 2, 16, 2, 1024},
      {67, 40, 101, 32, 2, 1024},
      {300, 136, 1003, 300, 2, 1024},
      {300, 136, 1003, 300, 2, 1048576},  /* for fp16 alone */
      {300, 136, 2003, 160, 16, 1024},    /* words outshine the first 512, */
      {300, 136, 2003, 160, 128, 1024},   /* by more than e^88 here and there; */
      {300, 136, 2003, 160, 8192, 1024},  /* rounding alone moves them by 8 in fp16, */
      {300, 136, 2003, 160, 65536, 1024}, /* by more than 88 in bf16 */
      {9, 16, 50257, 4, 2, 1024},         /* GPT-2's words, in several chunks */
      {3, 16, 130001, 8, 2, 1024},        /* a row that no shared memory would hold */
  };
  CUDA_OR_SKIP(t);
  g2z_device *fp32;
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, G2Z_FP32, G2Z_FP32, &fp32));
  for (int types = 0; types < TEST_TYPES && fp32; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      int fp16 = p.dtype == G2Z_FP16;
      for (int tune = G2Z_TUNE_OFF; tune <= G2Z_TUNE_OWN; tune += G2Z_TUNE_OWN - G2Z_TUNE_OFF) {
        g2z_device_tune(p.gpu, (g2z_tune)tune); /* with logits in memory; with exponentials */
        int exponentials = test_head_exponentials(&p);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
          if (fp16 ? cases[i].spread < 10000 : cases[i].scale == 1024) /* 6 spreads are a number */
            test_cuda_head_one(&p, exponentials ? fp32 : NULL, cases[i].N, cases[i].C, cases[i].V,
                               cases[i].chunk, cases[i].spread, fp16 ? cases[i].scale : 1);
        test_cuda_head_poison(&p);
      }
    }
    test_pair_close(&p);
  }
  g2z_device_free(fp32);
}

static void test_cuda_cast(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      for (size_t shift = 0; shift < 3; shift++) {
        size_t n = 4099 + shift;
        test_twin *from = test_twin_normal(&p, TEST_F32, n, 1, 3000, 0);
        static const float corners[] = {0.0f,    65504.0f, 65519.0f, 65520.0f, 1e30f,   -1e30f,
                                        6e-8f,   2.98e-8f, 1e-40f,   1.0005f,  -0.333f, 3.0e38f};
        for (size_t i = 0; i < sizeof corners / sizeof *corners; i++)
          ((float *)from->cpu)[i * 7] = corners[i];
        test_twin_send(&p, from);
        test_twin *act = test_twin_at(&p, TEST_ACT, n, shift);
        test_twin *grad = test_twin_at(&p, TEST_GRAD, n, shift);
        CHECK_OK(t, p.cpu->ops->cast_act(p.cpu, act->cpu, (const float *)from->cpu, n));
        CHECK_OK(t, p.gpu->ops->cast_act(p.gpu, act->gpu, (const float *)from->gpu, n));
        CHECK_OK(t, p.cpu->ops->cast_grad(p.cpu, grad->cpu, (const float *)from->cpu, n));
        CHECK_OK(t, p.gpu->ops->cast_grad(p.gpu, grad->gpu, (const float *)from->gpu, n));
        test_twin_compare(&p, act, "cast_act", 0, 0);
        test_twin_compare(&p, grad, "cast_grad", 0, 0);
        test_pair_clear(&p);
      }
    }
    test_pair_close(&p);
  }
}

/* The kernel that adds up what other ranks sent, on the device's own stream. */
static g2z_status test_add_rows(test_pair *p, test_twin *to, const test_twin *from,
                                const test_twin *rows, int count, g2z_write mode) {
#ifdef __CUDACC__
  cudaStream_t stream = g2z__cuda_of(p->gpu)->stream;
  auto add = p->grad_dtype == G2Z_FP16   ? g2z__grad_add_on<__half, __half>
             : p->grad_dtype == G2Z_BF16 ? g2z__grad_add_on<__nv_bfloat16, __nv_bfloat16>
                                         : g2z__grad_add_on<float, float>;
  return add(p->gpu, stream, to->gpu, from->gpu, rows->gpu, count, mode, to->n);
#else
  (void)p, (void)to, (void)from, (void)rows, (void)count, (void)mode;
  return G2Z_UNSUPPORTED;
#endif
}

/* Rows are added in fp32 one after the other, then what was there, and rounded once. */
static void test_sum_rows(test_pair *p, size_t n, int count, g2z_write mode) {
  test_twin *from = test_twin_normal(p, TEST_GRAD, n, 1, 3, 0);
  test_twin *rows = test_twin_normal(p, TEST_GRAD, n * (size_t)count, 2, 3, 0);
  test_twin *to = test_twin_normal(p, TEST_GRAD, n, 3, 3, 0);
  test_twin *in_place = mode == G2Z_ACCUMULATE ? to : from;
  ((float *)from->cpu)[0] = g2z_round(p->grad_dtype, 65504.0f); /* fp16: beyond its largest */
  ((float *)rows->cpu)[0] = 64.0f;
  test_twin_send(p, from);
  test_twin_send(p, rows);
  for (size_t i = 0; i < n; i++) {
    float sum = ((float *)from->cpu)[i];
    for (int row = 0; row < count; row++) sum += ((float *)rows->cpu)[(size_t)row * n + i];
    if (mode == G2Z_ACCUMULATE) sum = ((float *)to->cpu)[i] + sum;
    ((float *)in_place->cpu)[i] = g2z_round(p->grad_dtype, sum);
  }
  CHECK_OK(p->t, test_add_rows(p, in_place, from, rows, count, mode));
  test_twin_compare(p, in_place, "grad_add of rows", 0, 0);
  test_twin_compare(p, rows, "rows, which stay as they were", 0, 0);
  test_pair_clear(p);
}

static void test_cuda_sums(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      for (int mode = 0; mode < 2; mode++) {
        g2z_write write = mode ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
        test_sum_rows(&p, 4, 1, write);
        test_sum_rows(&p, 1028, 3, write);
        test_sum_rows(&p, 1500000, 1, write); /* more than one turn of a block */
        test_sum_rows(&p, 40000, 7, write);
        test_twin *from = test_twin_normal(&p, TEST_GRAD, 5000, 1, 3, 0);
        test_twin *to = test_twin_normal(&p, TEST_GRAD, 5000, 2, 3, 0);
        CHECK_OK(t, p.cpu->ops->grad_add(p.cpu, to->cpu, from->cpu, write, to->n));
        CHECK_OK(t, p.gpu->ops->grad_add(p.gpu, to->gpu, from->gpu, write, to->n));
        test_twin_compare(&p, to, "grad_add", 0, 0);
        test_pair_clear(&p);
      }
    }
    test_pair_close(&p);
  }
}

/* Ranges that start anywhere, with ends that fill no pack. */
static void test_cuda_adamw(test_pair *p, const g2z_optimizer_config *config, test_state state) {
  enum { COUNT = 5, ELEMENTS = 70000 };
  static const g2z_update_range ranges[COUNT] = {
      {0, 0, 0, 0, 4096, 1},          {4096, 4096, 4096, 0, 5, 0}, {4104, 4104, 4101, 0, 3, 1},
      {4112, 4112, 4104, 0, 60001, 0}, {64200, 64112, 64112, 0, 4007, 1}};
  test_twin *params = test_twin_new(p, TEST_ACT, ELEMENTS);
  test_twin *grads = test_twin_normal(p, TEST_GRAD, ELEMENTS, 1, 4, 0);
  test_twin *master = test_twin_normal(p, TEST_F32, ELEMENTS, 2, 1, 0);
  test_twin *m = test_twin_normal(p, TEST_F32, ELEMENTS, 3, 0.01, 0);
  test_twin *v = test_twin_new(p, TEST_F32, ELEMENTS);
  for (int i = 0; i < ELEMENTS; i++) ((float *)v->cpu)[i] = 1e-4f * (float)(1 + i % 97);
  test_twin_send(p, v);
  void *on_gpu;
  CHECK_OK(p->t, p->gpu->ops->allocate(p->gpu, sizeof ranges, &on_gpu));
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, on_gpu, ranges, sizeof ranges));
  g2z_update update = {params->cpu, (float *)master->cpu, (float *)m->cpu, (float *)v->cpu,
                       grads->cpu, ranges, ranges, config, state.cpu};
  g2z_update update_gpu = {params->gpu, (float *)master->gpu, (float *)m->gpu, (float *)v->gpu,
                           grads->gpu, (const g2z_update_range *)on_gpu, ranges, config, state.gpu};
  CHECK_OK(p->t, p->cpu->ops->adamw(p->cpu, &update, 0, COUNT));
  CHECK_OK(p->t, p->gpu->ops->adamw(p->gpu, &update_gpu, 2, COUNT)); /* in parts, in any order */
  CHECK_OK(p->t, p->gpu->ops->adamw(p->gpu, &update_gpu, 0, 2));
  CHECK_OK(p->t, p->gpu->ops->adamw(p->gpu, &update_gpu, COUNT, COUNT));
  /* Compilers may fuse a product and an addition, on either side. */
  test_twin_compare(p, m, "adamw m", 2, 0x1p-24);
  test_twin_compare(p, v, "adamw v", 4, 0);
  test_twin_compare(p, master, "adamw master", 2, 0x1p-24);
  test_twin_compare(p, params, "adamw params", 1.01, 0x1p-24);
  p->gpu->ops->release(p->gpu, on_gpu);
}

static void test_cuda_state(test_pair *p, const g2z_step_state *want,
                            const g2z_step_state *on_gpu, const g2z_verdict *verdict) {
  g2z_step_state got;
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, &got, on_gpu, sizeof got));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  CHECK(p->t, memcmp(verdict->reported[got.step % 2], &got, sizeof got) == 0);
  CHECK(p->t, got.step == want->step && got.applied == want->applied);
  CHECK(p->t, got.skipped == want->skipped && got.skip == want->skip);
  CHECK(p->t, got.good_steps == want->good_steps && got.hysteresis == want->hysteresis);
  CHECK(p->t, got.skipped_at_minimum == want->skipped_at_minimum);
  CHECK(p->t, got.loss_scale == want->loss_scale && got.used_loss_scale == want->used_loss_scale);
  CHECK_NEAR(p->t, got.loss, want->loss, 1e-6 * fabs((double)want->loss));
  CHECK_NEAR(p->t, got.lr, want->lr, 1e-6 * fabs((double)want->lr));
  CHECK_NEAR(p->t, got.grad_multiplier, want->grad_multiplier,
             1e-6 * fabs((double)want->grad_multiplier));
  if (isfinite(want->grad_norm))
    CHECK_NEAR(p->t, got.grad_norm, want->grad_norm, 1e-6 * fabs((double)want->grad_norm));
  else
    CHECK(p->t, !isfinite(got.grad_norm));
}

static void test_cuda_optimizer(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (!test_pair_open(&p, t, types)) continue;
    g2z_train_config train = g2z_train_config_default();
    g2z_optimizer_config config = train.optimizer;
    config.clip = 1.0f;
    config.weight_decay = 0.1f;
    config.warmup = 3;
    config.steps = 100;
    config.loss_scale_dynamic = 1;
    config.loss_scale_window = 2;
    config.loss_scale_hysteresis = 2;
    test_state state = test_state_make(&p, p.dtype == G2Z_FP16 ? 8.0f : 1.0f, 0);
    test_twin *rows = test_twin_new(&p, TEST_F64, 3 * G2Z_VERDICT_COLUMNS);
    memset(rows->cpu, 0, 3 * G2Z_VERDICT_COLUMNS * sizeof(double));
    void *memory = NULL;
    CHECK_OK(t, p.gpu->ops->allocate_host(p.gpu, 2 * sizeof(g2z_step_state), &memory));
    g2z_step_state *reported = (g2z_step_state *)memory;
    for (int step = 0; step < 9; step++) {
      int bad = step == 4 || step == 5 || step == 6;
      double *row = (double *)rows->cpu;
      for (int k = 0; k < 3; k++) row[k * G2Z_VERDICT_COLUMNS + G2Z_VERDICT_LOSS] = 0.1 * k + step;
      test_twin_send(&p, rows);
      for (int k = 0; k < 3; k++) {
        size_t n = k == 0 ? 1 : k == 1 ? 1027 : 300001, shift = (size_t)(k + step) % 3;
        test_twin *grads = test_twin_at(&p, TEST_GRAD, n, shift);
        for (size_t i = 0; i < n; i++)
          ((float *)grads->cpu)[i] = g2z_round(p.grad_dtype, (float)((int)(i % 23) - 11) * 0.37f);
        if (bad) ((float *)grads->cpu)[n / 2] = step == 5 ? NAN : INFINITY;
        test_twin_send(&p, grads);
        g2z_range pieces[35]; /* more than a launch takes, at odd places */
        int count = n < 1000 ? 1 : 35;
        for (int i = 0; i < count; i++) {
          pieces[i].begin = n * (size_t)i / (size_t)count + (size_t)(i > 0);
          pieces[i].elements = n * (size_t)(i + 1) / (size_t)count + (size_t)(i + 1 < count) -
                               pieces[i].begin;
        }
        CHECK_OK(t, p.cpu->ops->grad_sumsq(p.cpu, row + k * G2Z_VERDICT_COLUMNS + G2Z_VERDICT_SQUARES,
                                           grads->cpu, pieces, count));
        CHECK_OK(t, p.gpu->ops->grad_sumsq(p.gpu, (double *)rows->gpu + k * G2Z_VERDICT_COLUMNS +
                                               G2Z_VERDICT_SQUARES, grads->gpu, pieces, count));
        p.count--; /* released here: 27 of them would not fit the list */
        free(grads->cpu);
        p.gpu->ops->release(p.gpu, grads->block);
      }
      if (!bad) test_twin_compare(&p, rows, "grad_sumsq", 8, 0);
      g2z_verdict on_cpu = {row, 3, 3, {NULL, NULL}};
      g2z_verdict on_gpu = {(double *)rows->gpu, 3, 3, {reported, reported + 1}};
      CHECK_OK(t, p.cpu->ops->decide(p.cpu, state.cpu, &on_cpu, &config, 77));
      CHECK_OK(t, p.gpu->ops->decide(p.gpu, state.gpu, &on_gpu, &config, 77));
      test_twin_compare(&p, rows, "decide's rows", 0, 0);
      test_cuda_state(&p, state.cpu, state.gpu, &on_gpu);
      CHECK(t, state.cpu->skip == bad);
      if (step == 3 || step == 4) { /* applied, and skipped: nothing but NaN in params then */
        int kept = p.count;
        test_cuda_adamw(&p, &config, state);
        for (; p.count > kept; p.count--) {
          free(p.twins[p.count - 1].cpu);
          p.gpu->ops->release(p.gpu, p.twins[p.count - 1].block);
        }
      }
    }
    p.gpu->ops->release_host(p.gpu, memory);
    test_pair_close(&p);
  }
}

/* The same work twice, eagerly and as a graph that runs twice: equal to the bit, with dropout. */
static void test_cuda_graph(g2z_test *t) {
  CUDA_OR_SKIP(t);
  test_pair p;
  if (!test_pair_open(&p, t, 2)) return;
  enum { B = 3, T = 67, C = 264, N = B * T, V = 1003, VP = 1024 };
  const g2z_ops *ops = p.gpu->ops;
  test_twin *tokens = test_twin_tokens(&p, N, V, 1), *targets = test_twin_tokens(&p, N, V, 2);
  test_twin *wte = test_twin_normal(&p, TEST_ACT, (size_t)VP * C, 1, 0.1, 0);
  test_twin *wpe = test_twin_normal(&p, TEST_ACT, (size_t)T * C, 2, 0.1, 0);
  test_twin *w = test_twin_normal(&p, TEST_ACT, (size_t)C * C, 3, 0.06, 0);
  test_twin *b = test_twin_normal(&p, TEST_ACT, C, 4, 0.1, 0);
  test_twin *x = test_twin_new(&p, TEST_ACT, (size_t)N * C);
  test_twin *y = test_twin_new(&p, TEST_ACT, (size_t)N * C);
  test_twin *h = test_twin_new(&p, TEST_ACT, (size_t)N * C);
  test_twin *dh = test_twin_new(&p, TEST_ACT, (size_t)N * C);
  test_twin *mean = test_twin_new(&p, TEST_F32, N), *rstd = test_twin_new(&p, TEST_F32, N);
  test_twin *dw = test_twin_new(&p, TEST_GRAD, C), *db = test_twin_new(&p, TEST_GRAD, C);
  test_twin *logits = test_twin_new(&p, TEST_ACT, (size_t)100 * VP);
  test_twin *losses = test_twin_new(&p, TEST_F32, N), *sum = test_twin_new(&p, TEST_F64, 1);
  test_twin *dwpe = test_twin_new(&p, TEST_GRAD, (size_t)T * C);
  test_twin *dwte = test_twin_new(&p, TEST_F32, (size_t)VP * C);
  test_state state = test_state_make(&p, 128, 11);
  g2z_dropout drop = test_dropout(state.gpu, 0.2f, T);
  void *first = malloc(dwte->bytes), *again = malloc(dwte->bytes);
  g2z_graph *graph = NULL;
  for (int run = 0; run < 4; run++) { /* eager, eager, recorded, and the graph once more */
    CHECK_OK(t, ops->zero(p.gpu, sum->gpu, sum->bytes));
    CHECK_OK(t, ops->zero(p.gpu, dwte->gpu, dwte->bytes));
    if (run == 2) CHECK_OK(t, g2z_graph_begin(p.gpu));
    if (run < 3) {
      CHECK_OK(t, ops->embed_fwd(p.gpu, x->gpu, (const int32_t *)tokens->gpu, wte->gpu, wpe->gpu,
                                 &drop, B, T, C));
      CHECK_OK(t, ops->linear_fwd(p.gpu, y->gpu, NULL, x->gpu, w->gpu, b->gpu, x->gpu, &drop, N, C,
                                  C));
      CHECK_OK(t, ops->layernorm_fwd(p.gpu, h->gpu, (float *)mean->gpu, (float *)rstd->gpu, y->gpu,
                                     b->gpu, b->gpu, N, C));
      CHECK_OK(t, ops->head_loss(p.gpu, (float *)losses->gpu, (double *)sum->gpu, dh->gpu,
                                 dwte->gpu, G2Z_FP32, logits->gpu, h->gpu, wte->gpu,
                                 (const int32_t *)targets->gpu, 0.01f, state.gpu, G2Z_OVERWRITE, N,
                                 C, V, VP, 100));
      CHECK_OK(t, ops->layernorm_bwd(p.gpu, y->gpu, NULL, dw->gpu, db->gpu, NULL, dh->gpu, x->gpu,
                                     b->gpu, (const float *)mean->gpu, (const float *)rstd->gpu,
                                     G2Z_ACCUMULATE, G2Z_OVERWRITE, NULL, N, C));
      CHECK_OK(t, ops->embed_bwd(p.gpu, (float *)dwte->gpu, dwpe->gpu, y->gpu,
                                 (const int32_t *)tokens->gpu, G2Z_OVERWRITE, &drop, B, T, C));
      CHECK_OK(t, ops->mark(p.gpu, 2));
    }
    if (run == 2) CHECK_OK(t, g2z_graph_end(p.gpu, &graph));
    if (run >= 2 && graph) CHECK_OK(t, g2z_graph_run(p.gpu, graph));
    CHECK_OK(t, ops->wait(p.gpu, 2));
    CHECK_OK(t, ops->download(p.gpu, run ? again : first, dwte->gpu, dwte->bytes));
    CHECK_OK(t, ops->synchronize(p.gpu));
    if (run) CHECK(t, memcmp(first, again, dwte->bytes) == 0);
  }
  g2z_graph_free(p.gpu, graph);
  CHECK_STATUS(t, g2z_graph_begin(p.cpu), G2Z_UNSUPPORTED, &t->services, "no graphs");
  free(first);
  free(again);
  test_pair_close(&p);
}
/* ----- CUDA attention against the CPU's ----------------------------------
 * On both, scores, statistics and sums are fp32. Tensor cores take P and dS rounded to the type,
 * which the CPU does not round; eps is the spacing of the type.
 * Each element: one more rounding of the result, and the roundings of the P or dS in its sum. These
 *   are independent, each up to eps/2 of its term, so their sum stays under 2 eps of the largest
 *   element of the tensor.
 * Each tensor: ||gpu - cpu|| <= eps/2 ||cpu||. Two roundings with a standard deviation of at most
 *   0.29 eps each make 0.41 eps; a wrong term or a missing one is far above.
 * fp32: scores of size s differ by about sqrt(HS) s 2^-24 in their sums, probabilities by as much
 *   of themselves: 64 eps for scores around 1, `spread`^2 times that for larger ones. */

static double test_attention_eps(const test_pair *p, double spread) {
  double eps = test_eps(p->dtype);
  return p->dtype == G2Z_FP16 || p->dtype == G2Z_BF16 ? eps : 64 * eps * spread * spread;
}

/* The GPU's numbers of a tensor, to be freed. */
static float *test_attention_fetch(test_pair *p, const test_twin *twin) {
  size_t size = test_kind_size(p, twin->kind);
  char *bytes = (char *)malloc(twin->bytes + 1);
  float *numbers = (float *)malloc((twin->n + 1) * sizeof(float));
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, twin->gpu, twin->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (size_t i = 0; i < twin->n; i++)
    numbers[i] = test_decode(test_twin_dtype(p, twin->kind), bytes + i * size);
  free(bytes);
  return numbers;
}

/* Both bounds, for columns [first, first + width) of rows of `row` numbers. Differences smaller
 * than the error of numbers around 0.1 never count: with one query dQ and dK are differences of
 * equals. */
static void test_attention_compare(test_pair *p, const test_twin *twin, const char *what,
                                   size_t first, size_t width, size_t row, double eps) {
  float *got = test_attention_fetch(p, twin);
  const float *want = (const float *)twin->cpu;
  double error = 0, norm = 0, largest = 0;
  size_t count = twin->n / row * width;
  for (size_t y = 0; y < twin->n; y += row)
    for (size_t x = first; x < first + width; x++) {
      double difference = (double)got[y + x] - (double)want[y + x];
      error += difference * difference;
      norm += (double)want[y + x] * (double)want[y + x];
      largest = fmax(largest, fabs((double)want[y + x]));
    }
  double bound = 0.5 * eps * (sqrt(norm) + 0.1 * sqrt((double)count));
  p->t->checks++;
  if (!(sqrt(error) <= bound))
    test_fail(p->t, __FILE__, __LINE__, "%s (%s): error %.3g, %.3g allowed, norm %.3g", what,
              g2z_dtype_text(p->dtype), sqrt(error), bound, sqrt(norm));
  free(got);
}

/* fp32's kernels, arithmetic on shared memory, take minutes for each shape where a tool follows every
 * access: G2Z_TEST_FP32_QUERIES leaves out what has more of them. */
static int test_attention_leaves_out(g2z_dtype dtype, int queries) {
  const char *most = getenv("G2Z_TEST_FP32_QUERIES");
  return most && dtype != G2Z_FP16 && dtype != G2Z_BF16 && queries > atoi(most);
}

static void test_attention_one(test_pair *p, int B, int T, int NH, int HS, float probability,
                               double spread) {
  if (test_attention_leaves_out(p->dtype, B * NH * T)) return;
  const g2z_ops *cpu = p->cpu->ops, *gpu = p->gpu->ops;
  int C = NH * HS;
  size_t width = (size_t)C, N = (size_t)B * (size_t)T, heads = (size_t)B * (size_t)NH;
  double eps = test_attention_eps(p, spread);
  char what[96];
  test_twin *qkv = test_twin_normal(p, TEST_ACT, N * 3 * width, (uint32_t)(T + HS), 1, 0);
  for (size_t i = 0; i < qkv->n; i++) /* powers of 2: still values of the type */
    if (i % (3 * width) < 2 * width) ((float *)qkv->cpu)[i] *= (float)spread;
  test_twin_send(p, qkv);
  test_twin *out = test_twin_new(p, TEST_ACT, N * width);
  test_twin *lse = test_twin_new(p, TEST_F32, heads * (size_t)T);
  test_state state = test_state_make(p, 1, 19);
  g2z_dropout drop = test_dropout(state.cpu, probability, T), drop_gpu = drop;
  drop_gpu.state = state.gpu;
  CHECK_OK(p->t, cpu->attention_fwd(p->cpu, out->cpu, (float *)lse->cpu, qkv->cpu, &drop, B, T, C,
                                    NH));
  CHECK_OK(p->t, gpu->attention_fwd(p->gpu, out->gpu, (float *)lse->gpu, qkv->gpu, &drop_gpu, B, T,
                                    C, NH));
  snprintf(what, sizeof what, "attention_fwd B=%d T=%d NH=%d HS=%d dropout=%g", B, T, NH, HS,
           (double)probability);
  test_attention_compare(p, out, what, 0, width, width, eps);
  test_twin_compare(p, out, what, 1, 2 * eps * 4);
  test_twin_compare(p, lse, what, 4, 64 * 0x1p-23 * spread * spread);

  test_twin *dout = test_twin_normal(p, TEST_ACT, N * width, (uint32_t)(T + HS + 1), 1, 0);
  test_twin *dqkv = test_twin_new(p, TEST_ACT, N * 3 * width);
  test_twin *dbias = test_twin_new(p, TEST_GRAD, 3 * width);
  test_twin_send(p, out); /* backward starts from the CPU's */
  test_twin_send(p, lse);
  snprintf(what, sizeof what, "attention_bwd B=%d T=%d NH=%d HS=%d dropout=%g", B, T, NH, HS,
           (double)probability);
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    CHECK_OK(p->t, cpu->attention_bwd(p->cpu, dqkv->cpu, dbias->cpu, dout->cpu, out->cpu,
                                      (const float *)lse->cpu, qkv->cpu, (g2z_write)mode, &drop, B,
                                      T, C, NH));
    CHECK_OK(p->t, gpu->attention_bwd(p->gpu, dqkv->gpu, dbias->gpu, dout->gpu, out->gpu,
                                      (const float *)lse->gpu, qkv->gpu, (g2z_write)mode,
                                      &drop_gpu, B, T, C, NH));
    double largest = 0, column = 0; /* an element; the norm of a column */
    for (size_t x = 0; x < 3 * width; x++) {
      double squares = 0;
      for (size_t y = x; y < dqkv->n; y += 3 * width) {
        double element = fabs((double)((const float *)dqkv->cpu)[y]);
        squares += element * element;
        largest = fmax(largest, element);
      }
      column = fmax(column, sqrt(squares));
    }
    for (size_t part = 0; part < 3; part++)
      test_attention_compare(p, dqkv, what, part * width, width, 3 * width, eps);
    test_twin_compare(p, dqkv, what, 1, 2 * eps * (largest + 0.1));
    /* A column adds N errors of 0.41 eps of its elements; six standard deviations, for the column
     * of the largest norm: those of V are larger than those of Q and K. */
    test_twin_compare(p, dbias, what, 2 + mode, 2.5 * eps * (column + 0.1));
  }
  test_pair_clear(p);
}

/* What Hopper's backward cuts into items: heads for several rounds, none cut; one head that is cut,
 * 9 blocks of keys in 7 parts; and a few heads more than there are multiprocessors, some whole and
 * some cut, with tiles of dQ in both places where they wait. */
static void test_attention_cuts(test_pair *p) {
  int shapes[][3] = {{27, 65, 10}, {1, 1100, 1}, {5, 330, 27}};
#ifdef __CUDACC__
  const g2z__cuda *cuda = g2z__cuda_of(p->gpu);
  shapes[2][2] = cuda->sms / 5 + 1;
#endif
  for (int i = 0; i < 3; i++) {
    int B = shapes[i][0], T = shapes[i][1], NH = shapes[i][2];
    test_attention_one(p, B, T, NH, 64, 0, 1);
#ifdef __CUDACC__
    g2z__hopper_cut cut;
    g2z__hopper_best_cut(&cut, T, B * NH, cuda->sms);
    CHECK(p->t, (cut.whole > 0) == (i != 1));
    CHECK(p->t, (cut.whole < B * NH) == (i != 0));
#endif
  }
}

static void test_cuda_attention(g2z_test *t) {
  CUDA_OR_SKIP(t);
  static const int sizes[] = {1, 7, 63, 64, 65, 129, 257, 600};
  static const int head_sizes[] = {8, 16, 24, 64, 80, 96, 128};
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      for (int i = 0; i < 8; i++)
        for (int k = 0; k < 7; k++) /* each type comes twice: with dropout and without */
          test_attention_one(&p, sizes[i] < 300 ? 2 : 1, sizes[i], sizes[i] < 300 ? 3 : 1,
                             head_sizes[k], (i + k + types) % 2 ? 0.3f : 0.0f, 1);
      test_attention_one(&p, 3, 192, 5, 64, 0, 4);    /* large scores: few keys have all the weight */
      test_attention_one(&p, 3, 100, 2, 48, 0.5f, 4); /* dropout on tensor cores: T is 4 x 25 */
      test_attention_one(&p, 13, 130, 12, 64, 0, 1);  /* more heads than a GPU has multiprocessors */
      test_attention_cuts(&p);
    }
    test_pair_close(&p);
  }
}

/* Bytes of all outputs after one forward and backward. */
static void test_attention_run(test_pair *p, unsigned char *bytes, const test_twin *qkv,
                               const test_twin *dout, int B, int T, int C, int NH) {
  size_t N = (size_t)B * (size_t)T, width = (size_t)C;
  test_twin *made[4];
  made[0] = test_twin_new(p, TEST_ACT, N * width);
  made[1] = test_twin_new(p, TEST_F32, N * (size_t)NH);
  made[2] = test_twin_new(p, TEST_ACT, N * 3 * width);
  made[3] = test_twin_new(p, TEST_GRAD, 3 * width);
  CHECK_OK(p->t, p->gpu->ops->attention_fwd(p->gpu, made[0]->gpu, (float *)made[1]->gpu, qkv->gpu,
                                            NULL, B, T, C, NH));
  CHECK_OK(p->t, p->gpu->ops->attention_bwd(p->gpu, made[2]->gpu, made[3]->gpu, dout->gpu,
                                            made[0]->gpu, (const float *)made[1]->gpu, qkv->gpu,
                                            G2Z_OVERWRITE, NULL, B, T, C, NH));
  for (int i = 0; i < 4; i++) {
    CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, made[i]->gpu, made[i]->bytes));
    CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
    bytes += made[i]->bytes;
  }
}

static void test_cuda_attention_repeats(g2z_test *t) {
  CUDA_OR_SKIP(t);
  static const int shapes[][4] = {
      {6, 321, 25, 64}, {2, 512, 3, 64}, {3, 1100, 3, 64}, {3, 260, 4, 96}};
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types))
      for (int i = 0; i < 4; i++) {
        int B = shapes[i][0], T = shapes[i][1], NH = shapes[i][2], C = NH * shapes[i][3];
        if (test_attention_leaves_out(p.dtype, B * NH * T)) continue;
        size_t N = (size_t)B * (size_t)T, width = (size_t)C;
        size_t bytes = (N * (4 * width + (size_t)NH) + 3 * width) * 4;
        unsigned char *first = (unsigned char *)calloc(1, bytes);
        unsigned char *again = (unsigned char *)calloc(1, bytes);
        test_twin *qkv = test_twin_normal(&p, TEST_ACT, N * 3 * width, 1, 1, 0);
        test_twin *dout = test_twin_normal(&p, TEST_ACT, N * width, 2, 1, 0);
        test_attention_run(&p, first, qkv, dout, B, T, C, NH);
        for (int run = 0; run < 3; run++) {
          test_attention_run(&p, again, qkv, dout, B, T, C, NH);
          CHECK(t, memcmp(first, again, bytes) == 0);
        }
        free(first);
        free(again);
        test_pair_clear(&p);
      }
    test_pair_close(&p);
  }
}

/* ----- safetensors and weights ------------------------------------------- */

/* A file of this header, with `data` zero bytes behind it. */
static const char *test_weights_file(g2z_test *t, const char *header, size_t data) {
  uint64_t length = strlen(header);
  char *bytes = (char *)calloc(1, 8 + length + data);
  memcpy(bytes, &length, 8);
  memcpy(bytes + 8, header, length);
  const char *path = test_path(t, "model.safetensors");
  test_write_file(t, path, bytes, 8 + length + data);
  free(bytes);
  return path;
}

static void test_safetensors_types(g2z_test *t) {
  /* Every half as the definition has it; NaN stays NaN. */
  static uint16_t halves[2][65536];
  static float got[65536];
  for (int i = 0; i < 65536; i++) halves[0][i] = halves[1][i] = (uint16_t)i;
  double wide[3] = {0.1, -1e-320, 16777217.0};
  const char *header =
      "{\"bf\":{\"dtype\":\"BF16\",\"shape\":[65536],\"data_offsets\":[131072,262144]},"
      "\"\\u0066h\":{\"shape\":[2,32768],\"dtype\":\"F16\",\"data_offsets\":[0,131072]},"
      "\"wide\":{\"dtype\":\"F64\",\"shape\":[1,3,1],\"data_offsets\":[262144,262168],\"x\":[{}]},"
      "\"none\":{\"dtype\":\"F32\",\"shape\":[4,0],\"data_offsets\":[262168,262168]},"
      "\"one\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[262168,262172]},"
      "\"bits\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[262172,262175]},"
      "\"__metadata__\":{\"format\":\"pt\"}}   ";
  uint64_t length = strlen(header);
  float one = 1.5f;
  FILE *file = fopen(test_path(t, "types"), "wb");
  CHECK(t, file != NULL);
  if (!file) return;
  fwrite(&length, 8, 1, file);
  fwrite(header, length, 1, file);
  fwrite(halves, sizeof halves, 1, file);
  fwrite(wide, sizeof wide, 1, file);
  fwrite(&one, sizeof one, 1, file);
  fwrite("\1\0\1", 3, 1, file);
  CHECK(t, fclose(file) == 0);

  g2z_safetensors *st;
  CHECK_OK(t, g2z_safetensors_open(&t->services, test_path(t, "types"), &st));
  if (!st) return;
  CHECK(t, g2z_safetensors_count(st) == 6 && g2z_safetensors_find(st, "f") == -1);
  g2z_safetensor tensor = g2z_safetensors_tensor(st, g2z_safetensors_find(st, "fh"));
  CHECK(t, tensor.type == G2Z_TENSOR_F16 && tensor.rank == 2 && tensor.shape[1] == 32768 &&
               tensor.elements == 65536 && tensor.bytes == 131072 && tensor.begin == 8 + length);
  CHECK_OK(t, g2z_safetensors_read(st, g2z_safetensors_find(st, "fh"), 0, 65536, got));
  int wrong = 0;
  for (int i = 0; i < 65536; i++) {
    int exponent = i >> 10 & 31, fraction = i & 1023;
    double value = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    if (exponent == 31) value = fraction ? NAN : INFINITY;
    if (i & 0x8000) value = -value;
    wrong += !(isnan(value) ? isnan(got[i]) : got[i] == value && !signbit(got[i]) == !(i >> 15));
  }
  CHECK(t, wrong == 0);
  CHECK_OK(t, g2z_safetensors_read(st, g2z_safetensors_find(st, "bf"), 1, 65535, got));
  for (int i = 1; i < 65536; i++) {
    uint32_t bits;
    memcpy(&bits, &got[i - 1], sizeof bits);
    wrong += bits != (uint32_t)i << 16;
  }
  CHECK(t, wrong == 0);
  int at = g2z_safetensors_find(st, "wide");
  CHECK_OK(t, g2z_safetensors_read(st, at, 0, 3, got));
  CHECK(t, got[0] == 0.1f && got[1] == 0 && got[2] == 16777216.0f);
  CHECK_OK(t, g2z_safetensors_read(st, at, 3, 0, got));
  CHECK_STATUS(t, g2z_safetensors_read(st, at, 2, 2, got), G2Z_BAD_ARGUMENT, &t->services,
               "\"wide\" has 3 elements, and 2 from 2 on");
  CHECK_STATUS(t, g2z_safetensors_read(st, at, SIZE_MAX, 2, got), G2Z_BAD_ARGUMENT, &t->services,
               "wide");
  CHECK_OK(t, g2z_safetensors_read(st, g2z_safetensors_find(st, "one"), 0, 1, got));
  CHECK(t, got[0] == 1.5f);
  CHECK_OK(t, g2z_safetensors_read(st, g2z_safetensors_find(st, "none"), 0, 0, got));
  CHECK_STATUS(t, g2z_safetensors_read(st, g2z_safetensors_find(st, "bits"), 0, 3, got),
               G2Z_UNSUPPORTED, &t->services, "is of type BOOL");
  CHECK(t, truncate(test_path(t, "types"), 262150) == 0); /* after it was opened */
  CHECK_STATUS(t, g2z_safetensors_read(st, at, 0, 3, got), G2Z_FORMAT, &t->services,
               "shrank while tensor \"wide\" was read");
  g2z_safetensors_free(st);
  g2z_safetensors_free(NULL);
}

static void test_safetensors_refused(g2z_test *t) {
#define TENSOR(name, type, shape, offsets) \
  "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
  static const struct { const char *header; size_t data; const char *sentence; } cases[] = {
      {"", 0, "expected an object, found the text's end"},
      {"[]", 0, "expected an object, found '['"},
      {"{", 0, "a name in quotes"},
      {"{} {}", 0, "expected the end"},
      {"{}", 1, "promises 0 bytes of tensors behind its header and has 1"},
      {"{\"a\":1}", 4, "expected an object, found '1'"},
      {"{\"a\":{}}", 4, "\"a\" lacks its dtype, shape or pair of data_offsets"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "lacks its dtype, shape or pair"},
      {"{" TENSOR("a", "F32", "[1]", "[0]") "}", 4, "lacks its dtype, shape or pair"},
      {"{" TENSOR("a", "F32", "[1]", "[0,4,8]") "}", 4, "with too many numbers"},
      {"{" TENSOR("a", "F33", "[1]", "[0,4]") "}", 4, "has dtype F33, which is not known"},
      {"{" TENSOR("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "with too many numbers"},
      {"{" TENSOR("a", "F32", "[-1]", "[0,4]") "}", 4, "shape below zero"},
      {"{" TENSOR("a", "F32", "[1.0]", "[0,4]") "}", 4, "1.0 is not an integer"},
      {"{" TENSOR("a", "F32", "[9223372036854775808]", "[0,4]") "}", 4, "64 bits"},
      {"{" TENSOR("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0, "more than 2^63 bytes"},
      {"{" TENSOR("a", "F32", "[4611686018427387904]", "[0,0]") "}", 0, "more than 2^63 bytes"},
      {"{" TENSOR("a", "F32", "[2]", "[0,4]") "}", 4, "its shape takes 8 bytes"},
      {"{" TENSOR("a", "F32", "[1]", "[4,0]") "}", 4, "from 4 to 0, but its shape takes 4"},
      {"{" TENSOR("a", "F32", "[1]", "[-4,0]") "}", 4, "data_offsets below zero"},
      {"{" TENSOR("a", "F32", "[1]", "[0,4]") "}", 3, "promises at least 4 bytes of tensors"},
      {"{" TENSOR("a", "F32", "[1]", "[0,4]") "}", 5, "promises 4 bytes of tensors"},
      {"{" TENSOR("a", "F32", "[1]", "[4,8]") "}", 8, "\"a\" begins at data offset 4, but those "
       "before it end at 0"},
      {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("b", "F32", "[1]", "[2,6]") "}", 6,
       "\"b\" begins at data offset 2, but those before it end at 4"},
      {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("b", "U8", "[1]", "[5,6]") "}", 6,
       "\"b\" begins at data offset 5"},
      {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("\\u0061", "U8", "[1]", "[4,5]") "}", 5,
       "names tensor \"a\" twice"},
      {"{" TENSOR("a\\u0000", "F32", "[1]", "[0,4]") "}", 4, "name contains a NUL"},
      {"{" TENSOR("a", "F32", "[0]", "[9223372036854775807,9223372036854775807]") "}", 0,
       "begins at data offset 9223372036854775807"},
      {"{\"__metadata__\":{\"a\":1}}", 0, "expected a string, found '1'"},
      {"{\"\xe9\":1}", 0, "byte 2 of the header is not UTF-8"}};
#undef TENSOR
  g2z_services *services = &t->services;
  g2z_safetensors *file;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *path = test_weights_file(t, cases[i].header, cases[i].data);
    CHECK_STATUS(t, g2z_safetensors_open(services, path, &file), G2Z_FORMAT, services,
                 cases[i].sentence);
    CHECK(t, file == NULL);
  }
  uint64_t lengths[] = {UINT64_MAX, 100000001, 1000, 9, UINT64_MAX - 7};
  const char *path = test_path(t, "length");
  for (size_t i = 0; i < 5; i++) {
    char bytes[17] = "12345678{}      ";
    memcpy(bytes, &lengths[i], 8);
    test_write_file(t, path, bytes, 16);
    CHECK_STATUS(t, g2z_safetensors_open(services, path, &file), G2Z_FORMAT, services,
                 "bytes and has 16 bytes in all");
  }
  CHECK_STATUS(t, g2z_safetensors_open(services, test_path(t, "no"), &file), G2Z_IO, services,
               "No such file");
  CHECK_STATUS(t, g2z_safetensors_open(services, t->directory, &file), G2Z_IO, services,
               "no regular file");

  /* Cut at every byte; every byte of the header changed. */
  g2z_safetensors_writer *writer;
  g2z_safetensor tensors[2];
  float values[7] = {1, 2, 3, 4, 5, 6, 7};
  memset(tensors, 0, sizeof tensors);
  tensors[0].name = "b";
  tensors[0].rank = 2;
  tensors[0].shape[0] = 2;
  tensors[0].shape[1] = 3;
  tensors[1].name = "a\"\\\n\xc3\xa9"; /* rank 0: a scalar */
  path = test_path(t, "two");
  CHECK_OK(t, g2z_safetensors_create(services, path, tensors, 2, &writer));
  CHECK_OK(t, g2z_safetensors_put(writer, values, 2));
  CHECK_STATUS(t, g2z_safetensors_commit(writer), G2Z_BAD_ARGUMENT, services,
               "was given 2 elements, but its tensors have 7");
  CHECK_OK(t, g2z_safetensors_put(writer, values + 2, 5));
  CHECK_OK(t, g2z_safetensors_commit(writer));
  g2z_safetensors_writer_free(writer);
  g2z_safetensors_writer_free(NULL);
  CHECK_OK(t, g2z_safetensors_open(services, path, &file));
  if (!file) return;
  CHECK(t, g2z_safetensors_tensor(file, 1).begin % 8 == 0);
  float back = 0;
  CHECK_OK(t, g2z_safetensors_read(file, g2z_safetensors_find(file, tensors[1].name), 0, 1, &back));
  CHECK(t, back == 7);
  g2z_safetensors_free(file);
  char *text;
  size_t bytes;
  CHECK_OK(t, g2z_read_file(services, path, 10000, &text, &bytes));
  for (size_t n = 0; n < bytes - 28; n++) {
    for (int bit = 0; bit < 8; bit++) {
      test_files_poke(t, path, n, text[n] ^ (1 << bit));
      g2z_status status = g2z_safetensors_open(services, path, &file);
      CHECK(t, status == G2Z_FORMAT || status == G2Z_OK);
      g2z_safetensors_free(file);
    }
    test_files_poke(t, path, n, text[n]);
  }
  for (size_t n = bytes; n-- > 0;) {
    CHECK(t, truncate(path, (off_t)n) == 0);
    CHECK(t, g2z_safetensors_open(services, path, &file) == G2Z_FORMAT && file == NULL);
  }
  g2z_release(services, text);
}

/* A tiny model whose canonical element i is i + 0.25, and what was asked of it. */
typedef struct test_weights {
  float *values;
  size_t count, next;
  size_t fail_at;               /* calls at or beyond this element fail */
} test_weights;

static g2z_status test_weights_give(void *user, size_t canonical, size_t count, float *out) {
  test_weights *w = (test_weights *)user;
  if (canonical + count > w->count || canonical >= w->fail_at) return G2Z_STOPPED;
  memcpy(out, w->values + canonical, count * sizeof(float));
  return G2Z_OK;
}

static g2z_status test_weights_take(void *user, size_t canonical, size_t count,
                                    const float *values) {
  test_weights *w = (test_weights *)user;
  if (canonical != w->next || canonical + count > w->count || canonical >= w->fail_at)
    return G2Z_STOPPED;
  memcpy(w->values + canonical, values, count * sizeof(float));
  w->next += count;
  return G2Z_OK;
}

static g2z_model_config test_weights_model(void) {
  g2z_model_config model = {2, 1, 8, 5, 9001, 8900}; /* wte is longer than a chunk; V is padded */
  return model;
}

static test_weights test_weights_values(void) {
  const g2z_model_config model = test_weights_model();
  const size_t C = (size_t)model.channels;
  test_weights w = {NULL, 2 * C + 2 * (12 * C * C + 13 * C) + (5 + 9001) * C, 0, SIZE_MAX};
  w.values = (float *)malloc(w.count * sizeof(float));
  for (size_t i = 0; i < w.count; i++) w.values[i] = (float)i + 0.25f;
  return w;
}

static void test_weights_round_trip(g2z_test *t) {
  const g2z_model_config model = test_weights_model();
  g2z_services *services = &t->services;
  test_weights w = test_weights_values(), back = test_weights_values();
  memset(back.values, 0, back.count * sizeof(float));
  char directory[512];
  snprintf(directory, sizeof directory, "%s", test_path(t, "new/dir"));
  CHECK_OK(t, g2z_weights_write(services, directory, &model, test_weights_give, &w));
  CHECK(t, test_files_count(t, "new/dir/") == 2);
  g2z_model_config read;
  CHECK_OK(t, g2z_weights_config(services, directory, &read));
  CHECK(t, memcmp(&read, &model, sizeof read) == 0);
  CHECK_OK(t, g2z_weights_read(services, directory, &read, test_weights_take, &back));
  CHECK(t, back.next == back.count && memcmp(back.values, w.values, w.count * sizeof(float)) == 0);

  /* Names, shapes and places as Hugging Face has them: [in, out], block 0 after block 1. */
  g2z_safetensors *file;
  float value = 0;
  CHECK_OK(t, g2z_safetensors_open(services, test_path(t, "new/dir/model.safetensors"), &file));
  if (!file) return;
  CHECK(t, g2z_safetensors_count(file) == 4 + 2 * 12);
  int index = g2z_safetensors_find(file, "transformer.h.1.mlp.c_fc.weight");
  CHECK(t, index >= 0);
  g2z_safetensor tensor = g2z_safetensors_tensor(file, index < 0 ? 0 : index);
  CHECK(t, tensor.rank == 2 && tensor.shape[0] == 8 && tensor.shape[1] == 32);
  CHECK_OK(t, g2z_safetensors_read(file, index, 1, 1, &value));
  CHECK(t, value == 16 + 8 + 256 + 32 + 1 + 0.25f); /* behind lnf, fcprojb, fcprojw and fcb */
  index = g2z_safetensors_find(file, "transformer.wte.weight");
  CHECK_OK(t, g2z_safetensors_read(file, index, 9001 * 8 - 1, 1, &value));
  CHECK(t, value == (float)(w.count - 1) + 0.25f);
  CHECK(t, g2z_safetensors_find(file, "lm_head.weight") == -1);
  g2z_safetensors_free(file);

  /* Two writes of the same weights are the same bytes. */
  char *first, *second;
  size_t bytes = 0, again = 1;
  CHECK_OK(t, g2z_read_file(services, test_path(t, "new/dir/model.safetensors"), 1 << 24, &first,
                            &bytes));
  CHECK_OK(t, g2z_weights_write(services, directory, &model, test_weights_give, &w));
  CHECK_OK(t, g2z_read_file(services, test_path(t, "new/dir/model.safetensors"), 1 << 24, &second,
                            &again));
  CHECK(t, bytes == again && memcmp(first, second, bytes) == 0);
  g2z_release(services, first);
  g2z_release(services, second);

  /* Who gives or takes may stop it; a write that stops leaves the old pair. */
  w.fail_at = 65536; /* the second chunk */
  CHECK(t, g2z_weights_write(services, directory, &model, test_weights_give, &w) == G2Z_STOPPED);
  back.fail_at = 1000;
  back.next = 0;
  CHECK(t, g2z_weights_read(services, directory, &model, test_weights_take, &back) == G2Z_STOPPED);
  w.fail_at = SIZE_MAX;
  struct rlimit before = test_files_limit(100000); /* the weights take 300 KB */
  CHECK_STATUS(t, g2z_weights_write(services, directory, &model, test_weights_give, &w), G2Z_IO,
               services, "File too large");
  test_files_unlimit(&before);
  CHECK(t, test_files_count(t, "new/dir/") == 2);
  back.fail_at = SIZE_MAX;
  back.next = 0;
  CHECK_OK(t, g2z_weights_read(services, directory, &model, test_weights_take, &back));
  g2z_model_config bad = model;
  bad.heads = 3;
  CHECK_STATUS(t, g2z_weights_write(services, directory, &bad, test_weights_give, &w),
               G2Z_BAD_ARGUMENT, services, "heads=3");
  free(w.values);
  free(back.values);
}

/* The file of a model of one layer, 8 channels, 4 positions and 3 tokens, with changes: tensor
 * `which` gets another name (NULL: is left out) and row count, and extra ones follow. */
static void test_weights_variant(g2z_test *t, const char *prefix, int which, const char *rename,
                                 uint64_t rows, const g2z_safetensor *extra, size_t extras) {
  struct named { const char *name; int rank; uint64_t shape[2]; };
  static const struct named names[] = {
      {"ln_f.weight", 1, {8, 0}}, {"ln_f.bias", 1, {8, 0}},
      {"h.0.mlp.c_proj.bias", 1, {8, 0}}, {"h.0.mlp.c_proj.weight", 2, {32, 8}},
      {"h.0.mlp.c_fc.bias", 1, {32, 0}}, {"h.0.mlp.c_fc.weight", 2, {8, 32}},
      {"h.0.ln_2.weight", 1, {8, 0}}, {"h.0.ln_2.bias", 1, {8, 0}},
      {"h.0.attn.c_proj.bias", 1, {8, 0}}, {"h.0.attn.c_proj.weight", 2, {8, 8}},
      {"h.0.attn.c_attn.bias", 1, {24, 0}}, {"h.0.attn.c_attn.weight", 2, {8, 24}},
      {"h.0.ln_1.weight", 1, {8, 0}}, {"h.0.ln_1.bias", 1, {8, 0}},
      {"wpe.weight", 2, {4, 8}}, {"wte.weight", 2, {3, 8}}};
  enum { COUNT = sizeof names / sizeof *names };
  g2z_safetensor tensors[COUNT + 4];
  char text[COUNT][64];
  memset(tensors, 0, sizeof tensors);
  size_t count = 0;
  float values[256];
  for (int i = 0; i < COUNT; i++) {
    if (i == which && !rename) continue;
    snprintf(text[i], sizeof text[i], "%s%s", prefix, i == which ? rename : names[i].name);
    tensors[count].name = text[i];
    tensors[count].rank = names[i].rank;
    memcpy(tensors[count].shape, names[i].shape, sizeof names[i].shape);
    if (i == which && rows) tensors[count].shape[0] = rows;
    count++;
  }
  for (size_t i = 0; i < extras; i++) tensors[count++] = extra[i];
  g2z_safetensors_writer *writer;
  CHECK_OK(t, g2z_safetensors_create(&t->services, test_path(t, "model.safetensors"), tensors,
                                     count, &writer));
  for (size_t i = 0; i < count; i++) {
    size_t elements = 1;
    for (int k = 0; k < tensors[i].rank; k++) elements *= (size_t)tensors[i].shape[k];
    int tied = strstr(tensors[i].name, "wte") || strcmp(tensors[i].name, "lm_head.weight") == 0;
    for (size_t k = 0; k < elements; k++) values[k] = (float)(tied ? 1 : i) + (float)k / 256;
    if (tensors[i].begin) values[elements - 1] += 1; /* a head that is not tied */
    CHECK_OK(t, g2z_safetensors_put(writer, values, elements));
  }
  CHECK_OK(t, g2z_safetensors_commit(writer));
  g2z_safetensors_writer_free(writer);
}

static void test_weights_variants(g2z_test *t) {
  g2z_services *services = &t->services;
  const g2z_model_config model = {1, 1, 8, 4, 3, 2};
  float values[2][16 + 872 + 56];
  test_weights w[2] = {{values[0], 944, 0, SIZE_MAX}, {values[1], 944, 0, SIZE_MAX}};
#define READ(i) (w[i].next = 0, \
                 g2z_weights_read(services, t->directory, &model, test_weights_take, &w[i]))
  g2z_safetensor extra[4];
  memset(extra, 0, sizeof extra);
  extra[0].name = "h.0.attn.bias";
  extra[1].name = "transformer.h.11.attn.masked_bias";
  extra[2].name = "lm_head.weight";
  extra[2].rank = 2;
  extra[2].shape[0] = 3;
  extra[2].shape[1] = 8;
  test_weights_variant(t, "transformer.", -1, NULL, 0, extra, 0);
  CHECK_OK(t, READ(0));
  test_weights_variant(t, "", -1, NULL, 0, extra, 3);
  CHECK_OK(t, READ(1));
  CHECK(t, w[0].next == 944 && w[1].next == 944);
  CHECK(t, memcmp(values[0], values[1], sizeof values[0]) == 0);

  extra[2].begin = 1;
  test_weights_variant(t, "", -1, NULL, 0, extra, 3);
  CHECK_STATUS(t, READ(0), G2Z_UNSUPPORTED, services, "lm_head.weight differs from wte.weight");
  CHECK(t, w[0].next == 0);
  extra[2].begin = 0;
  extra[2].shape[0] = 4;
  test_weights_variant(t, "", -1, NULL, 0, extra, 3);
  CHECK_STATUS(t, READ(0), G2Z_FORMAT, services,
               "\"lm_head.weight\" has the shape [4, 8], but the model needs [3, 8]");
  test_weights_variant(t, "transformer.", 5, NULL, 0, extra, 0);
  CHECK_STATUS(t, READ(0), G2Z_FORMAT, services,
               "no tensor \"transformer.h.0.mlp.c_fc.weight\", which a GPT-2 of 1 layers needs");
  test_weights_variant(t, "transformer.", 15, "wte.weight", 5, extra, 0);
  CHECK_STATUS(t, READ(0), G2Z_FORMAT, services, "shape [5, 8], but the model needs [3, 8]");
  test_weights_variant(t, "", 0, "ln_f.weight", 16, extra, 0);
  CHECK_STATUS(t, READ(0), G2Z_FORMAT, services, "\"ln_f.weight\" has the shape [16]");
  static const char *const unknown[] = {"h.1.ln_1.weight", "score.weight", "h.0.attn.bias2",
                                        "h..attn.bias", "h.0.attn.biases", "transformer.h.0"};
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
    extra[3].name = unknown[i];
    test_weights_variant(t, "", -1, NULL, 0, extra + 3, 1);
    CHECK_STATUS(t, READ(0), G2Z_FORMAT, services, unknown[i]);
    CHECK(t, strstr(services->error, "which a GPT-2 of 1 layers does not have") != NULL);
  }
  extra[3].name = "transformer.ln_f.bias";
  test_weights_variant(t, "", -1, NULL, 0, extra + 3, 1);
  CHECK_STATUS(t, READ(0), G2Z_FORMAT, services,
               "has both \"transformer.ln_f.bias\" and \"ln_f.bias\"");
  CHECK(t, w[0].next == 0); /* nothing was taken before all was compared */

  CHECK(t, unlink(test_path(t, "model.safetensors")) == 0);
  CHECK_STATUS(t, READ(0), G2Z_IO, services, "has no model.safetensors");
  test_write_file(t, test_path(t, "pytorch_model.bin"), "", 0);
  CHECK_STATUS(t, READ(0), G2Z_UNSUPPORTED, services, "safe_serialization=True");
  test_write_file(t, test_path(t, "model.safetensors.index.json"), "{}", 2);
  CHECK_STATUS(t, READ(0), G2Z_UNSUPPORTED, services, "split into several files");
#undef READ
}

static void test_weights_configs(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_model_config model;
#define SIZES "\"n_layer\":12,\"n_head\":12,\"n_embd\":768,\"n_positions\":1024," \
              "\"vocab_size\":50257"
  static const char *const good[] = { /* the first as OpenAI's weights are published */
      "{\"activation_function\":\"gelu_new\",\"architectures\":[\"GPT2LMHeadModel\"],"
      "\"attn_pdrop\":0.1,\"bos_token_id\":50256,\"initializer_range\":0.02,"
      "\"layer_norm_epsilon\":1e-05,\"model_type\":\"gpt2\",\"n_ctx\":1024," SIZES ","
      "\"summary_activation\":null,"
      "\"task_specific_params\":{\"text-generation\":{\"do_sample\":true,\"max_length\":50}}}",
      "{" SIZES "}", "{" SIZES ",\"n_inner\":null}", "{" SIZES ",\"n_inner\":3072}",
      "{" SIZES ",\"eos_token_id\":50256}", "{" SIZES ",\"eos_token_id\":[0, 7]}",
      "{" SIZES ",\"eos_token_id\":null}", "{" SIZES ",\"eos_token_id\":-1}",
      "{" SIZES ",\"activation_function\":\"gelu_pytorch_tanh\",\"layer_norm_epsilon\":0.00001}"};
  static const struct { const char *text; g2z_status status; const char *sentence; } bad[] = {
      {"", G2Z_FORMAT, "config.json, line 1, column 1: expected an object"},
      {"{}", G2Z_FORMAT, "has no n_layer, or 0"},
      {"{" SIZES ",\"n_head\":0}", G2Z_FORMAT, "has no n_head, or 0"},
      {"{" SIZES ",\"n_head\":-1}", G2Z_FORMAT, "n_head=-1 is not the size of a model"},
      {"{" SIZES ",\"vocab_size\":2147483648}", G2Z_FORMAT, "vocab_size=2147483648 is not"},
      {"{" SIZES ",\"n_embd\":\"768\"}", G2Z_FORMAT, "expected an integer, found '\"'"},
      {"{" SIZES ",\"n_embd\":7.5}", G2Z_FORMAT, "7.5 is not an integer"},
      {"{" SIZES ",\"n_inner\":768}", G2Z_UNSUPPORTED, "n_inner=768, and this kit computes 4 * n"},
      {"{" SIZES ",\"n_head\":5}", G2Z_BAD_ARGUMENT, "heads=5"},
      {"{" SIZES ",\"model_type\":\"llama\"}", G2Z_FORMAT, "model_type is \"llama\", and this kit "
       "computes \"gpt2\""},
      {"{" SIZES ",\"activation_function\":\"relu\"}", G2Z_FORMAT, "_function is \"relu\""},
      {"{" SIZES ",\"layer_norm_epsilon\":1e-6}", G2Z_FORMAT, "layer_norm_epsilon is 1e-06"},
      {"{" SIZES ",\"scale_attn_weights\":false}", G2Z_FORMAT, "scale_attn_weights is false"},
      {"{" SIZES ",\"scale_attn_by_inverse_layer_idx\":true}", G2Z_FORMAT, "_layer_idx is true"},
      {"{" SIZES ",\"reorder_and_upcast_attn\":true}", G2Z_FORMAT, "upcast_attn is true"},
      {"{" SIZES ",\"add_cross_attention\":true}", G2Z_FORMAT, "add_cross_attention is true"},
      {"{" SIZES ",\"tie_word_embeddings\":false}", G2Z_FORMAT, "tie_word_embeddings is false"}};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    test_write_file(t, test_path(t, "config.json"), good[i], strlen(good[i]));
    CHECK_OK(t, g2z_weights_config(services, t->directory, &model));
    g2z_model_config want = g2z_model_config_default();
    CHECK(t, memcmp(&model, &want, sizeof want) == 0);
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    test_write_file(t, test_path(t, "config.json"), bad[i].text, strlen(bad[i].text));
    CHECK_STATUS(t, g2z_weights_config(services, t->directory, &model), bad[i].status, services,
                 bad[i].sentence);
    CHECK(t, model.layers == 0);
  }
  test_write_file(t, test_path(t, "config.json"), good[0], strlen(good[0]));
  for (size_t n = strlen(good[0]); n-- > 0;) {
    CHECK(t, truncate(test_path(t, "config.json"), (off_t)n) == 0);
    CHECK(t, g2z_weights_config(services, t->directory, &model) == G2Z_FORMAT);
  }
  CHECK_STATUS(t, g2z_weights_config(services, test_path(t, "no"), &model), G2Z_IO, services,
               "no/config.json: No such file");
#undef SIZES
}

static void test_weights_no_memory(g2z_test *t) {
  const g2z_model_config model = test_weights_model();
  g2z_model_config read;
  test_weights w = test_weights_values();
  for (int n = 1, done = 0; !done && n < 100; n++) {
    w.next = 0;
    t->fail_at = n;
    g2z_status status =
        g2z_weights_write(&t->services, t->directory, &model, test_weights_give, &w);
    if (status == G2Z_OK) status = g2z_weights_config(&t->services, t->directory, &read);
    if (status == G2Z_OK)
      status = g2z_weights_read(&t->services, t->directory, &model, test_weights_take, &w);
    t->fail_at = 0;
    done = status == G2Z_OK;
    CHECK(t, done ? n > 15 : status == G2Z_NO_MEMORY);
    CHECK(t, t->allocations == 0);
    CHECK(t, test_files_count(t, "*.partial") == 0);
  }
  free(w.values);
}
/* ----- runs, their artifacts, flags, the command line -------------------- */

/* A shard of byte-level tokens, so regular that a tiny model learns it: "0 1 2 ... 9 0 1 ...". */
static void test_run_shard(g2z_test *t, const char *name, int tokens) {
  int32_t ids[2048];
  g2z_shard_writer *writer = NULL;
  for (int i = 0; i < tokens && i < 2048; i++)
    ids[i] = i % 2 ? 220 : 15 + i / 2 % 10; /* a space; the digits */
  CHECK_OK(t, g2z_shard_writer_create(&t->services, test_path(t, name), G2Z_SHARD_LLMC, &writer));
  if (writer) CHECK_OK(t, g2z_shard_writer_append(writer, ids, (size_t)tokens));
  if (writer) CHECK_OK(t, g2z_shard_writer_commit(writer));
  g2z_shard_writer_free(writer);
}

/* 8 steps in 2 epochs of 4, two batches of validation. Paths are copied: they must outlive it. */
typedef struct test_run_setup {
  g2z_run_config config;
  char train[512], val[512], run_dir[512], weights[512];
} test_run_setup;

static void test_run_prepare(g2z_test *t, test_run_setup *s, const char *run_dir) {
  s->config = g2z_run_config_default();
  snprintf(s->train, sizeof s->train, "%s", test_path(t, "digits_train_000000.bin"));
  snprintf(s->val, sizeof s->val, "%s", test_path(t, "digits_val_000000.bin"));
  snprintf(s->run_dir, sizeof s->run_dir, "%s", test_path(t, run_dir));
  snprintf(s->weights, sizeof s->weights, "%.400s/weights", s->run_dir);
  if (access(s->train, R_OK) != 0) {
    test_run_shard(t, "digits_train_000000.bin", 4 * 2 * 4 * 16 + 1);
    test_run_shard(t, "digits_val_000000.bin", 2 * 4 * 16 + 1);
  }
  g2z_model_config *model = &s->config.train.model;
  model->layers = 1;
  model->channels = 32;
  model->heads = 2;
  model->context = 16;
  model->vocab = 257;
  s->config.train.batch = 4;
  s->config.train.seq = 16;
  s->config.train.accum = 2;
  s->config.train.optimizer.lr = 1e-2f;
  s->config.train.train_glob = s->train;
  s->config.val_glob = s->val;
  s->config.run_dir = s->run_dir;
  s->config.save_weights = s->weights;
  s->config.prompt = "1 2 3";
  s->config.sample_tokens = 12;
  s->config.epochs = 2;
  s->config.command_line = "./train --prompt \"1 2 3\"";
}

typedef struct test_run_seen {
  int steps, validations, samples, saved, done;
  double first_loss, last_loss, val_loss;
  int64_t last_step;
  char sample[512], line[512];
} test_run_seen;

static int test_run_stop_at; /* the step behind which test_run_all asks to stop; 0: none */

static g2z_status test_run_all(g2z_test *t, const g2z_run_config *config, test_run_seen *seen) {
  g2z_context_config cc = g2z_context_config_default(&t->services);
  g2z_context *context = NULL;
  g2z_run *run = NULL;
  g2z_run_event event;
  cc.device = G2Z_DEVICE_CPU;
  memset(seen, 0, sizeof *seen);
  g2z_status status = g2z_context_create(&cc, &context);
  if (status == G2Z_OK) status = g2z_run_create(context, config, &run);
  while (status == G2Z_OK && !seen->done) {
    status = g2z_run_next(run, &event);
    if (status != G2Z_OK) break;
    CHECK(t, event.line && *event.line);
    if (config->resume && seen->last_step == 0)
      seen->last_step = event.metrics.step - (event.kind == G2Z_RUN_STEP);
    if (event.kind == G2Z_RUN_STEP) {
      if (seen->steps++ == 0) seen->first_loss = event.metrics.loss;
      CHECK(t, event.metrics.step == seen->last_step + 1);
      if (event.metrics.step == test_run_stop_at) g2z_run_request_stop(run, SIGTERM);
      CHECK(t, event.eta_seconds >= 0 && event.tokens_per_second > 0);
      seen->last_step = event.metrics.step;
      seen->last_loss = event.metrics.loss;
    } else if (event.kind == G2Z_RUN_VALIDATION) {
      CHECK(t, event.metrics.step == seen->last_step);
      seen->validations++;
      seen->val_loss = event.val_loss;
    } else if (event.kind == G2Z_RUN_SAMPLE) {
      seen->samples++;
      snprintf(seen->sample, sizeof seen->sample, "%s", event.sample);
    } else if (event.kind == G2Z_RUN_SAVED) {
      CHECK(t, event.metrics.step == seen->last_step);
      seen->saved++;
    } else {
      seen->done = 1;
      snprintf(seen->line, sizeof seen->line, "%s", event.line);
    }
  }
  g2z_run_free(run);
  g2z_context_free(context);
  return status;
}

/* The whole of DIRECTORY/name; NULL counts as a failure. Freed with g2z_release. */
static char *test_run_read(g2z_test *t, const char *directory, const char *name, size_t *bytes) {
  char path[700], *text = NULL;
  snprintf(path, sizeof path, "%s/%s", directory, name);
  CHECK_OK(t, g2z_read_file(&t->services, path, (size_t)1 << 26, &text, bytes));
  return text;
}

/* The first character of the value at "a.b.0.c" in a JSON text; 0 when there is none. */
static char test_json_kind(g2z_test *t, const char *text, size_t bytes, const char *path) {
  g2z_json json;
  g2z_json_text key;
  g2z_json_open(&json, &t->services, path, text, bytes);
  while (*path) {
    char part[64], open = g2z_json_peek(&json), close = open == '{' ? '}' : ']';
    size_t length = strcspn(path, ".");
    int found = 0, index = 0;
    snprintf(part, sizeof part, "%.*s", (int)length, path);
    if ((open != '{' && open != '[') || !g2z_json_enter(&json, open)) return 0;
    while (!found && g2z_json_next(&json, close, &key)) {
      found = open == '{' ? g2z_json_is(&key, part) : index++ == atoi(part);
      if (!found) g2z_json_skip(&json);
    }
    if (!found) return 0;
    path += length + (path[length] == '.');
  }
  return g2z_json_peek(&json);
}

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

static void test_run_schema(g2z_test *t, const char *text, size_t bytes, const char *const *schema,
                            size_t count) {
  for (size_t i = 0; i < count; i++) {
    char kind = test_json_kind(t, text, bytes, schema[i] + 2);
    if (kind >= '0' && kind <= '9') kind = '0';
    if (kind == 'f') kind = 't';
    t->checks++;
    if (kind != schema[i][0])
      test_fail(t, __FILE__, __LINE__, "%s is '%c', expected '%c'", schema[i] + 2,
                kind ? kind : '-', schema[i][0]);
  }
}

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
  g2z_safetensors *file = NULL;
  snprintf(path, sizeof path, "%s/model.safetensors", directory);
  CHECK_OK(t, g2z_safetensors_open(&t->services, path, &file));
  int index = file ? g2z_safetensors_find(file, "transformer.wte.weight") : -1;
  CHECK(t, index >= 0 && g2z_safetensors_tensor(file, index).shape[0] == (uint64_t)vocab);
  g2z_safetensors_free(file);
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

/* Runs `train ARGUMENTS` through the shell; returns the exit code, -1 when it did not exit. */
static int test_train(g2z_test *t, const char *arguments, char *output, size_t room) {
  const char *program = getenv("G2Z_TRAIN"); /* another build of it, such as a sanitized one */
  char command[2048];
  size_t used = 0, got;
  snprintf(command, sizeof command, "%s %s 2>&1", program ? program : "./train", arguments);
  fflush(stdout);
  FILE *pipe = popen(command, "r");
  output[0] = 0;
  CHECK(t, pipe != NULL);
  if (!pipe) return -1;
  while ((got = fread(output + used, 1, room - 1 - used, pipe)) > 0) used += got;
  output[used] = 0;
  int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int test_train_is_there(void) {
  const char *program = getenv("G2Z_TRAIN");
  return access(program ? program : "./train", X_OK) == 0;
}

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
  char output[16384];
  size_t free_bytes, total_bytes;
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train");
  if (g2z_device_memory(&t->services, G2Z_DEVICE_CUDA, &free_bytes, &total_bytes) == G2Z_OK)
    SKIP(t, "there is a GPU, so --device cuda is no error");
  CHECK(t, test_train(t, "--device cuda --prompt x --vocab-size 257 --run-dir none", output,
                      sizeof output) == 1);
  CHECK(t, strncmp(output, "train: ", 7) == 0);
  CHECK(t, strstr(output, "CUDA") || strstr(output, "cuda") || strstr(output, "GPU"));
  /* A plan is arithmetic: it needs neither the GPU nor the other ranks. */
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
  CHECK(t, access(test_path(t, "run/RUN_COMPLETE.txt"), R_OK) == 0);

  /* The tokenizer lies beside the weights, so nothing else has to be said to let them write. */
  snprintf(arguments, sizeof arguments,
           "--init-from %s --prompt '1 2' --temperature 0 --sample-tokens 4 --run-dir none "
           "--device cpu", test_path(t, "weights"));
  CHECK(t, test_train(t, arguments, output, sizeof output) == 0);
  CHECK(t, strstr(output, "sample after step 0:\n1 2") != NULL);
  setenv("NCCL_LOGS", "1", 1);
  CHECK(t, test_train(t, arguments, output, sizeof output) == 1);
  unsetenv("NCCL_LOGS");
  CHECK(t, strstr(output, "NCCL_LOGS=1 writes into the run directory") != NULL);
  /* The weights know the model: flags may repeat that, and not say otherwise. */
  static const char *const said[][2] = {
      {"--context 8", "--context says context=8, but the weights in "},
      {"--channels 32 --vocab-size 300", "have vocab=257: leave it out, or name other weights"},
      {"--model gpt2", "--model says layers=12, but the weights in "},
      {"--model gpt2 --layers 1", "--model says channels=768, but the weights in "},
      {"--model gpt2 --layers 1 --channels 32 --heads 4 --context 16", "RUN_COMPLETE"},
      {"--channels 32 --vocab-size 257", "RUN_COMPLETE"}};
  for (int i = 0; i < 6; i++) {
    snprintf(arguments, sizeof arguments, "--init-from %s --prompt 1 --sample-tokens 1 --run-dir "
             "none --device cpu %s", test_path(t, "weights"), said[i][0]);
    CHECK(t, test_train(t, arguments, output, sizeof output) == (i < 4));
    CHECK(t, strstr(output, said[i][1]) != NULL);
  }
}
/* ----- model: golden values, finite differences -------------------------- */

/* A trainer on rank 0 of 1 on the CPU, freed by test_trainer_close. */
typedef struct test_trainer {
  g2z_context *context;
  g2z_trainer *trainer;
} test_trainer;

static g2z_status test_trainer_open(g2z_test *t, const g2z_train_config *config,
                                    test_trainer *out) {
  g2z_context_config cc = g2z_context_config_default(&t->services);
  cc.device = G2Z_DEVICE_CPU;
  memset(out, 0, sizeof *out);
  g2z_status status = g2z_context_create(&cc, &out->context);
  if (status == G2Z_OK) status = g2z_trainer_create(out->context, config, &out->trainer);
  return status;
}

static void test_trainer_close(test_trainer *tt) {
  g2z_trainer_free(tt->trainer);
  g2z_context_free(tt->context);
}

/* Stops a test whose ground is missing: the failure is counted, the rest would only crash. */
#define REQUIRE_OK(t, call)                                        \
  do {                                                             \
    g2z_status required_ = (call);                                 \
    (t)->checks++;                                                 \
    if (required_ != G2Z_OK) {                                     \
      test_fail(t, __FILE__, __LINE__, "%s: %s", #call, (t)->services.error); \
      return;                                                      \
    }                                                              \
  } while (0)

static void test_tokens(int32_t *tokens, size_t count, int vocab, uint64_t seed) {
  for (size_t i = 0; i < count; i++) {
    uint32_t counter[4] = {0, 0, 0, 0}, out[4];
    counter[0] = (uint32_t)i;
    g2z_philox(seed, G2Z_RANDOM_SYNTHETIC, counter, out);
    tokens[i] = (int32_t)(out[0] % (uint32_t)vocab);
  }
}

/* The tensor `name` of golden/values.safetensors; freed with free. */
static float *test_golden(g2z_test *t, const char *name, size_t *count) {
  g2z_safetensors *file = NULL;
  g2z_safetensor tensor;
  float *values = NULL;
  *count = 0;
  CHECK_OK(t, g2z_safetensors_open(&t->services, "golden/values.safetensors", &file));
  if (!file) return NULL;
  int index = g2z_safetensors_find(file, name);
  CHECK(t, index >= 0);
  if (index >= 0) {
    tensor = g2z_safetensors_tensor(file, index);
    values = (float *)malloc(tensor.elements * sizeof(float));
    CHECK_OK(t, g2z_safetensors_read(file, index, 0, tensor.elements, values));
    *count = tensor.elements;
  }
  g2z_safetensors_free(file);
  return values;
}

static int32_t *test_golden_tokens(g2z_test *t, const char *name, size_t *count) {
  float *values = test_golden(t, name, count);
  int32_t *tokens = (int32_t *)malloc((*count ? *count : 1) * sizeof(int32_t));
  for (size_t i = 0; i < *count; i++) tokens[i] = (int32_t)values[i];
  free(values);
  return tokens;
}

/* The tiny model of golden/, at its batch of 3 x 20 tokens. */
static g2z_status test_golden_config(g2z_test *t, g2z_train_config *config) {
  *config = g2z_train_config_default();
  config->init_from = "golden/tiny";
  config->batch = 3;
  config->seq = 20;
  config->optimizer.schedule = G2Z_SCHEDULE_CONSTANT;
  config->optimizer.warmup = 0;
  config->optimizer.lr = 1e-3f;
  config->optimizer.min_lr = 0;
  return g2z_weights_config(&t->services, config->init_from, &config->model);
}

static void test_golden_forward(g2z_test *t) {
  g2z_train_config config;
  test_trainer tt;
  REQUIRE_OK(t, test_golden_config(t, &config));
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  size_t count, logits_count;
  int32_t *x = test_golden_tokens(t, "x", &count);
  float *want = test_golden(t, "logits", &logits_count);
  int V = config.model.vocab, T = config.seq;
  float *got = (float *)malloc((size_t)T * (size_t)V * sizeof(float));
  double worst = 0;
  CHECK(t, count == 60 && logits_count == 60u * 131u);
  for (int b = 0; b < config.batch && want; b++) {
    CHECK_OK(t, g2z_trainer_logits(tt.trainer, x + b * T, T, 0, got));
    for (int i = 0; i < T * V; i++)
      worst = fmax(worst, fabs((double)got[i] - (double)want[b * T * V + i]));
    float last[131]; /* the same row alone */
    CHECK_OK(t, g2z_trainer_logits(tt.trainer, x + b * T, T, 1, last));
    CHECK(t, memcmp(last, got + (T - 1) * V, sizeof last) == 0);
  }
  CHECK(t, worst > 0 && worst <= 1e-5);
  free(got);
  free(want);
  free(x);
  test_trainer_close(&tt);
}

/* L2 error of each gradient against its norm. Adding a constant to every key of a head shifts all
 * scores of a query alike: the key bias has no gradient, and only its absolute size means
 * anything. */
static void test_golden_gradients(g2z_test *t) {
  g2z_train_config config;
  test_trainer tt;
  g2z_report report;
  size_t count;
  REQUIRE_OK(t, test_golden_config(t, &config));
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  int32_t *x = test_golden_tokens(t, "x", &count), *y = test_golden_tokens(t, "y", &count);
  float *loss = test_golden(t, "loss", &count);
  CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, x, y, &report));
  CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
  CHECK_NEAR(t, report.loss, loss[0], 1e-5);
  const g2z_plan *plan = g2z_trainer_plan(tt.trainer);
  size_t C = (size_t)config.model.channels;
  for (int unit = 0; unit < plan->units; unit++) {
    size_t at = plan->unit[unit].canonical;
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      g2z_param_info info = g2z_param_describe(&config.model, (g2z_param)p);
      if (info.unit != plan->unit[unit].kind) continue;
      char name[96], block[16] = "";
      if (info.unit == G2Z_UNIT_BLOCK)
        snprintf(block, sizeof block, "h.%d.", config.model.layers - unit);
      snprintf(name, sizeof name, "grad.transformer.%s%s", block, info.hf_name);
      float *want = test_golden(t, name, &count);
      float *got = (float *)malloc(info.elements * sizeof(float));
      CHECK(t, want && count == info.elements);
      CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_GRADS, at, info.elements, got));
      double error = 0, norm = 0;
      for (size_t i = 0; want && i < count; i++) {
        if (p == G2Z_QKVB && i >= C && i < 2 * C) {
          CHECK_NEAR(t, got[i], 0, 1e-6);
          continue;
        }
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
      }
      CHECK(t, norm > 0);
      if (!(sqrt(error) <= 1e-4 * sqrt(norm)))
        test_fail(t, __FILE__, __LINE__, "%s: error %.3g of norm %.3g", name, sqrt(error),
                  sqrt(norm));
      at += info.elements;
      free(got);
      free(want);
    }
  }
  free(loss);
  free(x);
  free(y);
  test_trainer_close(&tt);
}

static void test_golden_adamw(g2z_test *t) {
  g2z_train_config config;
  test_trainer tt;
  g2z_report report;
  size_t count, steps;
  REQUIRE_OK(t, test_golden_config(t, &config));
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  int32_t *x = test_golden_tokens(t, "step_x", &count), *y = test_golden_tokens(t, "step_y", &count);
  float *want = test_golden(t, "step_loss", &steps);
  CHECK(t, steps == 10 && count == 600);
  for (size_t s = 0; s < steps; s++) {
    CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, x + s * 60, y + s * 60, &report));
    CHECK(t, report.step == (int64_t)s + 1 && report.loss_step == (int64_t)s); /* one step late */
    if (s > 0) CHECK_NEAR(t, report.loss, want[s - 1], 1e-4);
  }
  CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
  CHECK(t, report.loss_step == 10 && report.applied == 10);
  CHECK_NEAR(t, report.loss, want[9], 1e-4);
  free(want);
  free(x);
  free(y);
  test_trainer_close(&tt);
}

/* Along a random direction in each tensor: (loss(w + h d) - loss(w - h d)) / 2h against grad . d.
 * The loss has about 1e-7 of rounding: with h d of norm 1e-2 that is 1e-5 of slope. */
static void test_finite_differences(g2z_test *t) {
  g2z_train_config config = test_config_of(2, 2, 32, 12, 61);
  config.optimizer.lr = config.optimizer.min_lr = 0; /* a step measures and does not move */
  config.dropout = 0.2f; /* the mask is keyed by the step: each trainer's first step draws the same */
  const g2z_plan *plan;
  int32_t x[24], y[24];
  test_tokens(x, 24, 61, 1);
  test_tokens(y, 24, 61, 2);
  plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
  float *weights = (float *)malloc(plan->parameters * sizeof(float));
  float *grads = (float *)malloc(plan->parameters * sizeof(float));
  for (size_t i = 0; i < plan->parameters; i += 4) {
    double four[4];
    g2z__normal4(7, i / 4, four);
    for (int k = 0; k < 4; k++) weights[i + (size_t)k] = (float)(0.15 * four[k]);
  }
  for (int unit = 0, probe = 0; unit < plan->units; unit++) {
    size_t at = plan->unit[unit].canonical;
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      g2z_param_info info = g2z_param_describe(&config.model, (g2z_param)p);
      if (info.unit != plan->unit[unit].kind) continue;
      double losses[3], norm = 0, slope = 0, h = 2e-2;
      for (size_t i = 0; i < info.elements; i++) {
        double four[4];
        g2z__normal4(100 + (uint64_t)probe, i, four);
        norm += four[0] * four[0];
      }
      for (int side = -1; side <= 1; side++) {
        test_trainer tt;
        g2z_report report;
        REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
        CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, 0, plan->parameters, weights));
        float *moved = (float *)malloc(info.elements * sizeof(float));
        for (size_t i = 0; i < info.elements; i++) {
          double four[4];
          g2z__normal4(100 + (uint64_t)probe, i, four);
          moved[i] = (float)((double)weights[at + i] + side * h * four[0] / sqrt(norm));
        }
        CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, at, info.elements, moved));
        CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, x, y, &report));
        CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
        losses[side + 1] = (double)report.loss;
        if (side == 0) {
          CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_GRADS, at, info.elements, grads));
          for (size_t i = 0; i < info.elements; i++) {
            double four[4];
            g2z__normal4(100 + (uint64_t)probe, i, four);
            slope += (double)grads[i] * four[0] / sqrt(norm);
          }
        }
        free(moved);
        test_trainer_close(&tt);
      }
      CHECK_NEAR(t, slope, (losses[2] - losses[0]) / (2 * h), 3e-5 + 0.01 * fabs(slope));
      at += info.elements;
      probe++;
    }
  }
  free(weights);
  free(grads);
}

/* No token sees a later one, in logits of any length. */
static void test_causality(g2z_test *t) {
  g2z_train_config config = test_config_of(2, 2, 32, 40, 61);
  test_trainer tt;
  int32_t x[40];
  float whole[40 * 61], part[40 * 61];
  test_tokens(x, 40, 61, 3);
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_trainer_logits(tt.trainer, x, 40, 0, whole));
  for (int count = 1; count < 40; count += 6) {
    CHECK_OK(t, g2z_trainer_logits(tt.trainer, x, count, 0, part));
    for (int i = 0; i < count * 61; i++) CHECK_NEAR(t, part[i], whole[i], 2e-6);
  }
  x[39] = (x[39] + 1) % 61;
  CHECK_OK(t, g2z_trainer_logits(tt.trainer, x, 40, 0, part));
  CHECK(t, memcmp(part, whole, 39 * 61 * sizeof(float)) == 0);
  CHECK(t, memcmp(part + 39 * 61, whole + 39 * 61, 61 * sizeof(float)) != 0);
  x[5] = 61;
  CHECK_STATUS(t, g2z_trainer_logits(tt.trainer, x, 40, 0, part), G2Z_BAD_ARGUMENT, &t->services,
               "token=61");
  int32_t batch[80];
  g2z_report report;
  test_tokens(batch, 80, 61, 3);
  batch[79] = -1;
  CHECK_STATUS(t, g2z_trainer_step_batch(tt.trainer, batch, batch, &report), G2Z_BAD_ARGUMENT,
               &t->services, "token=-1 at position 79");
  CHECK_STATUS(t, g2z_trainer_logits(tt.trainer, x, 41, 0, part), G2Z_BAD_ARGUMENT, &t->services,
               "tokens=41");
  test_trainer_close(&tt);
}

/* ----- trainer ----------------------------------------------------------- */

/* Runs `steps` steps on one batch; losses[i] is the loss of step i. */
static void test_steps(g2z_test *t, g2z_trainer *trainer, const int32_t *x, const int32_t *y,
                       int steps, float *losses, g2z_report *last) {
  g2z_report report;
  int64_t before = 0;
  for (int s = 0; s <= steps; s++) {
    if (s < steps) CHECK_OK(t, g2z_trainer_step_batch(trainer, x, y, &report));
    else CHECK_OK(t, g2z_trainer_flush(trainer, &report));
    if (s == 0) before = report.loss_step;
    else if (losses) losses[report.loss_step - before - 1] = report.loss;
  }
  if (last) *last = report;
}

static void test_overfit(g2z_test *t) {
  static const g2z_dtype dtypes[] = {G2Z_FP32, G2Z_FP16, G2Z_BF16};
  for (int d = 0; d < 3; d++) {
    g2z_train_config config = test_config_of(2, 2, 32, 16, 61);
    config.dtype = dtypes[d];
    config.optimizer.lr = 3e-3f;
    config.optimizer.warmup = 10;
    config.optimizer.steps = 120;
    test_trainer tt;
    int32_t x[32], y[32];
    float losses[120];
    g2z_report last;
    test_tokens(x, 32, 61, 5);
    test_tokens(y, 32, 61, 6);
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    test_steps(t, tt.trainer, x, y, 120, losses, &last);
    CHECK_NEAR(t, losses[0], log(61.0), 0.1); /* a fresh model knows nothing */
    CHECK(t, losses[119] < 0.15f);
    CHECK(t, last.applied + last.skipped_total == 120 && last.skipped_total <= 2);
    test_trainer_close(&tt);
  }
}

/* The weights after some steps with everything on: dropout, accumulation, clipping, fp16. */
static void test_fingerprint(g2z_test *t, double bucket_mb, int stage, int accum, float *losses,
                             float *out, size_t *count) {
  g2z_train_config config = test_config_of(2, 2, 32, 16, 61);
  config.dtype = G2Z_FP16;
  config.dropout = 0.1f;
  config.accum = accum;
  config.bucket_mb = bucket_mb;
  config.zero_stage = stage;
  test_trainer tt;
  int32_t x[96], y[96];
  test_tokens(x, 96, 61, 5);
  test_tokens(y, 96, 61, 6);
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  test_steps(t, tt.trainer, x, y, 12, losses, NULL);
  *count = g2z_trainer_plan(tt.trainer)->parameters;
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 0, *count, out));
  test_trainer_close(&tt);
}

static void test_determinism(g2z_test *t) {
  enum { MOST = 40000 };
  float *first = (float *)malloc(MOST * sizeof(float)), *again = (float *)malloc(MOST * sizeof(float));
  float losses[2][12];
  size_t count, other;
  test_fingerprint(t, 0, 1, 3, losses[0], first, &count);
  CHECK(t, count > 0 && count <= MOST);
  test_fingerprint(t, 0, 1, 3, losses[1], again, &other);
  CHECK(t, count == other && memcmp(first, again, count * sizeof(float)) == 0);
  CHECK(t, memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
  test_fingerprint(t, 0, 0, 3, losses[1], again, &other); /* one rank: stages change nothing */
  CHECK(t, memcmp(first, again, count * sizeof(float)) == 0);
#ifdef _OPENMP
  int threads = omp_get_max_threads();
  omp_set_num_threads(threads == 1 ? 3 : 1);
  test_fingerprint(t, 0, 1, 3, losses[1], again, &other);
  omp_set_num_threads(threads);
  CHECK(t, memcmp(first, again, count * sizeof(float)) == 0);
#endif
  /* Buckets change the order in which the norm is added up, in double: the clip factor may move by
   * an ulp, and twelve AdamW steps of 6e-4 cannot carry that past 1e-5. */
  test_fingerprint(t, 0.01, 1, 3, losses[1], again, &other);
  for (size_t i = 0; i < count; i++) CHECK_NEAR(t, again[i], first[i], 1e-5);
  /* Stage 2 adds micro-steps up outside of the ops: with one of them it changes nothing either, but
   * that its buckets end with each unit. */
  test_fingerprint(t, 0.01, 1, 1, losses[0], first, &count);
  test_fingerprint(t, 0.01, 2, 1, losses[1], again, &other);
  for (size_t i = 0; i < count; i++) CHECK_NEAR(t, again[i], first[i], 1e-5);
  test_fingerprint(t, 0.01, 3, 1, losses[0], first, &count); /* all parameters are its own */
  CHECK(t, memcmp(first, again, count * sizeof(float)) == 0);
  free(first);
  free(again);
}

/* Calls of the ops that a block's forward is made of. */
static g2z_ops test_counted;
static const g2z_ops *test_counted_right;
static int test_counts[3];
static g2z_status test_count_layernorm(g2z_device *device, void *y, float *mean, float *rstd,
                                       const void *x, const void *w, const void *b, int N, int C) {
  test_counts[0]++;
  return test_counted_right->layernorm_fwd(device, y, mean, rstd, x, w, b, N, C);
}
static g2z_status test_count_linear(g2z_device *device, void *y, void *slope, const void *x,
                                    const void *w, const void *bias, const void *residual,
                                    const g2z_dropout *dropout, int N, int I, int O) {
  test_counts[1]++;
  return test_counted_right->linear_fwd(device, y, slope, x, w, bias, residual, dropout, N, I, O);
}
static g2z_status test_count_attention(g2z_device *device, void *out, float *lse, const void *qkv,
                                       const g2z_dropout *dropout, int B, int T, int C, int NH) {
  test_counts[2]++;
  return test_counted_right->attention_fwd(device, out, lse, qkv, dropout, B, T, C, NH);
}

enum { RECOMPUTE_STEPS = 12, RECOMPUTE_LAYERS = 3, RECOMPUTE_MOST = 60000 };
typedef struct test_recomputed {
  float losses[RECOMPUTE_STEPS];
  float weights[RECOMPUTE_MOST], grads[RECOMPUTE_MOST];
  int counts[3];
} test_recomputed;

/* Twelve steps, and what is left of them. */
static void test_recompute_run(g2z_test *t, g2z_device_kind device, const g2z_train_config *config,
                               test_recomputed *out) {
  int32_t x[3 * 2 * 16], y[3 * 2 * 16];
  float logits[61];
  test_trainer tt;
  g2z_context_config cc = g2z_context_config_default(&t->services);
  memset(out, 0, sizeof *out);
  memset(&tt, 0, sizeof tt);
  cc.device = device;
  test_tokens(x, 96, 61, 5);
  test_tokens(y, 96, 61, 6);
  REQUIRE_OK(t, g2z_context_create(&cc, &tt.context));
  g2z_status status = g2z_trainer_create(tt.context, config, &tt.trainer);
  CHECK_OK(t, status);
  if (status == G2Z_OK) {
    test_steps(t, tt.trainer, x, y, RECOMPUTE_STEPS - 1, out->losses, NULL);
    CHECK_OK(t, g2z_trainer_logits(tt.trainer, x, 16, 1, logits)); /* overwrites activations */
    test_counted_right = tt.trainer->device->ops;
    test_counted = *test_counted_right;
    test_counted.layernorm_fwd = test_count_layernorm;
    test_counted.linear_fwd = test_count_linear;
    test_counted.attention_fwd = test_count_attention;
    memset(test_counts, 0, sizeof test_counts);
    tt.trainer->device->ops = &test_counted;
    test_steps(t, tt.trainer, x, y, 1, out->losses + RECOMPUTE_STEPS - 1, NULL);
    tt.trainer->device->ops = test_counted_right;
    memcpy(out->counts, test_counts, sizeof test_counts);
    size_t count = g2z_trainer_plan(tt.trainer)->parameters;
    CHECK(t, count <= RECOMPUTE_MOST);
    CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 0, count, out->weights));
    CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_GRADS, 0, count, out->grads));
  }
  test_trainer_close(&tt);
}

/* Every loss, gradient and weight is the same to the bit, in each type and stage. Each block but
 * the last runs forward again, without its last product. */
static void test_recompute_on(g2z_test *t, g2z_device_kind device, int graph) {
  static test_recomputed kept, again;
  static const g2z_dtype dtypes[] = {G2Z_FP32, G2Z_FP16, G2Z_BF16};
  for (int i = 0; i < 6; i++) {
    g2z_train_config config = test_config_of(RECOMPUTE_LAYERS, 2, 32, 16, 61);
    config.dtype = dtypes[i % 3];
    if (device == G2Z_DEVICE_CUDA && !test_wants(config.dtype)) continue;
    config.dropout = i == 5 ? 0 : 0.1f;
    config.accum = i < 3 ? 3 : 1;
    config.zero_stage = (i + 1) % 3;
    config.bucket_mb = 0.02;
    config.graph = graph;
    config.tune = 0; /* two trainers may time one product otherwise */
    test_recompute_run(t, device, &config, &kept);
    config.recompute = G2Z_RECOMPUTE_BLOCK;
    test_recompute_run(t, device, &config, &again);
    CHECK(t, memcmp(kept.losses, again.losses, sizeof kept.losses) == 0);
    CHECK(t, memcmp(kept.weights, again.weights, sizeof kept.weights) == 0);
    CHECK(t, memcmp(kept.grads, again.grads, sizeof kept.grads) == 0);
    CHECK(t, kept.losses[RECOMPUTE_STEPS - 1] > 0 && kept.grads[0] != 0);
    if (graph) continue; /* ops are not called any more */
    int L = RECOMPUTE_LAYERS, accum = config.accum, twice = accum * (L - 1);
    CHECK(t, kept.counts[0] == accum * (2 * L + 1) && again.counts[0] == kept.counts[0] + 2 * twice);
    CHECK(t, kept.counts[1] == accum * 4 * L && again.counts[1] == kept.counts[1] + 3 * twice);
    CHECK(t, kept.counts[2] == accum * L && again.counts[2] == kept.counts[2] + twice);
  }
}

static void test_recompute(g2z_test *t) { test_recompute_on(t, G2Z_DEVICE_CPU, 0); }
static void test_cuda_recompute(g2z_test *t) {
  CUDA_OR_SKIP(t);
  test_recompute_on(t, G2Z_DEVICE_CUDA, 0);
  test_recompute_on(t, G2Z_DEVICE_CUDA, 1);
}

enum { CONFIGS = 64, CONFIGS_STEPS = 3, CONFIGS_TOKENS = 1024 };

/* One of a list that ends with -1. */
static int test_pick(uint64_t *state, const int *list) {
  int count = 0;
  while (list[count] >= 0) count++;
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return list[(*state >> 33) % (uint64_t)count];
}

/* Number i of as many configs as one likes: shapes that tiles fit and that they do not. */
static g2z_train_config test_configs_at(int i) {
  static const int layers[] = {1, 1, 2, 3, -1}, heads[] = {1, 1, 2, 3, 4, 5, 6, -1};
  static const int sizes[] = {8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 104, 120, 128, -1};
  static const int seqs[] = {1,   2,   7,   15,  16,  17,  31,  33,  63,  64,   65,
                             100, 127, 128, 129, 200, 255, 257, 400, 512, 1023, -1};
  static const int batches[] = {1, 2, 3, 4, 5, 8, 13, -1}, accums[] = {1, 1, 2, 3, -1};
  static const int vocabs[] = {257, 258, 300, 1000, 4097, 12345, 50257, 65536, -1};
  static const int halves[] = {0, 0, 1, -1};
  static const g2z_dtype dtypes[] = {G2Z_FP32, G2Z_TF32, G2Z_FP16, G2Z_BF16};
  uint64_t state = (uint64_t)i;
  int L = test_pick(&state, layers), NH = test_pick(&state, heads);
  int HS = test_pick(&state, sizes), T = test_pick(&state, seqs), V = test_pick(&state, vocabs);
  g2z_train_config config = test_config_of(L, NH, NH * HS, T, V);
  config.batch = test_pick(&state, batches);
  config.accum = test_pick(&state, accums);
  while (config.batch > 1 && config.accum * config.batch * config.seq > CONFIGS_TOKENS)
    config.batch /= 2;
  while (config.accum * config.seq > CONFIGS_TOKENS) config.accum--;
  config.dtype = dtypes[i % 4];
  config.dropout = test_pick(&state, halves) ? 0.1f : 0;
  config.graph = test_pick(&state, halves);
  config.recompute = test_pick(&state, halves) ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
  config.optimizer.lr = 1e-3f;
  config.optimizer.warmup = 0;
  return config;
}

/* Losses and norms of a config's steps. */
static g2z_status test_configs_run(g2z_test *t, g2z_device_kind device, g2z_train_config config,
                                   float (*out)[2]) {
  int32_t x[CONFIGS_TOKENS], y[CONFIGS_TOKENS];
  test_trainer tt;
  g2z_report report;
  g2z_context_config cc = g2z_context_config_default(&t->services);
  memset(&tt, 0, sizeof tt);
  cc.device = device;
  if (device == G2Z_DEVICE_CPU) { /* which has neither */
    config.graph = 0;
    if (config.dtype == G2Z_TF32) config.dtype = G2Z_FP32;
  }
  test_tokens(x, CONFIGS_TOKENS, config.model.vocab, 5);
  test_tokens(y, CONFIGS_TOKENS, config.model.vocab, 6);
  g2z_status status = g2z_context_create(&cc, &tt.context);
  if (status == G2Z_OK) status = g2z_trainer_create(tt.context, &config, &tt.trainer);
  for (int step = 0; step <= CONFIGS_STEPS && status == G2Z_OK; step++) {
    status = step < CONFIGS_STEPS ? g2z_trainer_step_batch(tt.trainer, x, y, &report)
                                  : g2z_trainer_flush(tt.trainer, &report);
    if (step == 0 || status != G2Z_OK) continue;
    out[report.loss_step - 1][0] = report.loss;
    out[report.loss_step - 1][1] = report.grad_norm;
  }
  test_trainer_close(&tt);
  return status;
}

/* Three steps of random configs. 668 of such, of up to 4,200 tokens, were at most a sixth as far
 * apart as 2e-5, 3e-3, 4e-3 and 3e-2 of the loss in fp32, tf32, fp16 and bf16, and ten times that
 * of the norm. G2Z_TEST_CONFIGS tries more of them. */
static void test_cuda_configs(g2z_test *t) {
  CUDA_OR_SKIP(t);
  static const double bounds[] = {1e-5, 1e-3, 2e-3, 1e-2}; /* by i % 4, as the types */
  const char *wanted = getenv("G2Z_TEST_CONFIGS");
  for (int i = 0; i < (wanted ? atoi(wanted) : CONFIGS); i++) {
    g2z_train_config config = test_configs_at(i);
    float gpu[CONFIGS_STEPS][2], cpu[CONFIGS_STEPS][2];
    int failures = t->failures;
    if (!test_wants(config.dtype)) continue;
    CHECK_OK(t, test_configs_run(t, G2Z_DEVICE_CUDA, config, gpu));
    CHECK_OK(t, test_configs_run(t, G2Z_DEVICE_CPU, config, cpu));
    for (int step = 0; step < CONFIGS_STEPS; step++) {
      CHECK_NEAR(t, gpu[step][0], cpu[step][0], bounds[i % 4] * fabs(cpu[step][0]));
      CHECK_NEAR(t, gpu[step][1], cpu[step][1], 10 * bounds[i % 4] * fabs(cpu[step][1]));
    }
    if (t->failures > failures) printf("    that was config %d\n", i);
  }
}

enum { EARLY_STEPS = 15, EARLY_TOKENS = 2 * 4 * 128, EARLY_MOST = 3000000 };

/* A tool that follows every access sees in few steps what the clock would show in many:
 * G2Z_TEST_EARLY_STEPS says how many. */
static int test_early_steps(void) {
  const char *wanted = getenv("G2Z_TEST_EARLY_STEPS");
  int steps = wanted ? atoi(wanted) : EARLY_STEPS;
  return steps < 2 ? 2 : steps > EARLY_STEPS ? EARLY_STEPS : steps;
}

/* Steps whose kernels may start while the one before ends, or may not. */
static void test_early_run(g2z_test *t, const g2z_train_config *config, int early, float *losses,
                           float *weights) {
  int32_t x[EARLY_TOKENS], y[EARLY_TOKENS];
  test_trainer tt;
  g2z_context_config cc = g2z_context_config_default(&t->services);
  memset(&tt, 0, sizeof tt);
  cc.device = G2Z_DEVICE_CUDA;
  test_tokens(x, EARLY_TOKENS, 1003, 5);
  test_tokens(y, EARLY_TOKENS, 1003, 6);
  REQUIRE_OK(t, g2z_context_create(&cc, &tt.context));
  g2z_status status = g2z_trainer_create(tt.context, config, &tt.trainer);
  CHECK_OK(t, status);
  if (status == G2Z_OK) {
#ifdef __CUDACC__
    if (!early) g2z__cuda_of(tt.trainer->device)->early_launch = 0;
#else
    (void)early; /* without CUDA the test is skipped */
#endif
    test_steps(t, tt.trainer, x, y, test_early_steps(), losses, NULL);
    size_t count = g2z_trainer_plan(tt.trainer)->parameters;
    CHECK(t, count <= EARLY_MOST);
    CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 0, count, weights));
  }
  test_trainer_close(&tt);
}

/* A kernel that started early and read too early would change bits sooner or later. */
static void test_cuda_early(g2z_test *t) {
  CUDA_OR_SKIP(t);
  static const g2z_dtype dtypes[] = {G2Z_FP16, G2Z_BF16, G2Z_FP32};
  float *weights[2], losses[2][EARLY_STEPS] = {{0}, {0}};
  int last = test_early_steps() - 1;
  for (int i = 0; i < 2; i++) weights[i] = (float *)calloc(EARLY_MOST, sizeof(float));
  for (int i = 0; i < 6 && weights[0] && weights[1]; i++) {
    if (!test_wants(dtypes[i % 3])) continue;
    g2z_train_config config = test_config_of(3, 4, 256, 128, 1003);
    config.batch = 4;
    config.accum = 2;
    config.dtype = dtypes[i % 3];
    while (test_attention_leaves_out(config.dtype, 4 * 4 * config.seq)) config.seq /= 2;
    config.dropout = i % 2 ? 0.1f : 0;
    config.optimizer.warmup = 0;
    config.tune = 0;
    config.graph = i / 3;
    test_early_run(t, &config, 0, losses[0], weights[0]);
    for (int again = 0; again < 4; again++) {
      config.graph = again % 2;
      test_early_run(t, &config, 1, losses[1], weights[1]);
      CHECK(t, memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
      CHECK(t, memcmp(weights[0], weights[1], EARLY_MOST * sizeof(float)) == 0);
    }
    CHECK(t, losses[0][last] > 0 && losses[0][last] < losses[0][0]);
  }
  for (int i = 0; i < 2; i++) free(weights[i]);
}

/* Three micro-steps of 2 sequences and one of 6 add up the same gradient. */
static void test_accumulation(g2z_test *t) {
  float losses[2][10];
  int32_t x[96], y[96];
  test_tokens(x, 96, 61, 5);
  test_tokens(y, 96, 61, 6);
  for (int i = 0; i < 2; i++) {
    g2z_train_config config = test_config_of(2, 2, 32, 16, 61);
    config.batch = i ? 6 : 2;
    config.accum = i ? 1 : 3;
    config.optimizer.lr = 3e-3f;
    config.optimizer.warmup = 0;
    test_trainer tt;
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    test_steps(t, tt.trainer, x, y, 10, losses[i], NULL);
    test_trainer_close(&tt);
  }
  for (int s = 0; s < 10; s++) CHECK_NEAR(t, losses[1][s], losses[0][s], 2e-5);
  CHECK(t, losses[0][9] < losses[0][0] - 0.5f);
}

/* A skipped step moves nothing but the scale: weights, m, v, AdamW's count and the schedule
 * stay. */
static void test_loss_scale(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 16, 8, 61);
  config.dtype = G2Z_FP16;
  config.optimizer.loss_scale = 1024;
  config.optimizer.loss_scale_window = 50;
  config.optimizer.loss_scale_hysteresis = 1;
  config.optimizer.lr = 1e-3f;
  test_trainer tt;
  int32_t x[16], y[16];
  g2z_report last;
  test_tokens(x, 16, 61, 5);
  test_tokens(y, 16, 61, 6);
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  test_steps(t, tt.trainer, x, y, 50, NULL, &last);
  CHECK(t, last.loss_scale == 1024 && last.applied == 50 && last.skipped_total == 0);
  test_steps(t, tt.trainer, x, y, 1, NULL, &last);
  CHECK(t, last.loss_scale == 2048); /* after 50 good steps it doubled */

  float good[16], huge[16], before[16], after[16], m_before[16], m_after[16];
  size_t lnfw = 0; /* canonical begin of the final LayerNorm's weights */
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, lnfw, 16, good));
  for (int i = 0; i < 16; i++) huge[i] = 60000.0f; /* logits and their gradients overflow fp16 */
  CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, lnfw, 16, huge));
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 64, 16, before));
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_M, 64, 16, m_before));
  test_steps(t, tt.trainer, x, y, 3, NULL, &last);
  CHECK(t, last.skipped == 1 && last.skipped_total == 3 && last.applied == 51);
  CHECK(t, last.loss_scale == 512 && !isfinite(last.grad_norm)); /* 2048, 1024, 512 */
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 64, 16, after));
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_M, 64, 16, m_after));
  CHECK(t, memcmp(before, after, sizeof before) == 0 && memcmp(m_before, m_after, sizeof after) == 0);

  CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, lnfw, 16, good));
  test_steps(t, tt.trainer, x, y, 1, NULL, &last);
  CHECK(t, last.skipped == 0 && last.applied == 52 && last.loss_scale == 256);
  test_trainer_close(&tt);
}

static void test_divergence(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 16, 8, 61);
  config.dtype = G2Z_FP16;
  config.optimizer.loss_scale = 2;
  config.optimizer.loss_scale_hysteresis = 1;
  test_trainer tt;
  int32_t x[16], y[16];
  g2z_report report;
  float nan = NAN;
  test_tokens(x, 16, 61, 5);
  test_tokens(y, 16, 61, 6);
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, 0, 1, &nan));
  g2z_status status = G2Z_OK;
  int steps = 0;
  while (status == G2Z_OK && steps < 80) {
    status = g2z_trainer_step_batch(tt.trainer, x, y, &report);
    steps++;
    if (status == G2Z_OK && report.loss_step) CHECK(t, isnan(report.loss)); /* a result, no error */
  }
  CHECK(t, status == G2Z_DIVERGED && strstr(t->services.error, "50 steps in a row") != NULL);
  CHECK(t, steps == 52); /* one halving, then fifty at the minimum, reported one step late */
  test_trainer_close(&tt);
}

static void test_canonical_access(g2z_test *t) {
  static const double buckets[] = {0, 0.003, 0.02};
  for (int b = 0; b < 3; b++)
    for (int stage = 0; stage <= 3; stage++) {
      g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
      config.bucket_mb = buckets[b];
      config.zero_stage = stage;
      test_trainer tt;
      float values[300], back[300];
      REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
      size_t parameters = g2z_trainer_plan(tt.trainer)->parameters;
      for (int i = 0; i < 300; i++) values[i] = (float)i + 0.5f;
      for (size_t at = 0; at + 300 <= parameters; at += 257) {
        CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_V, at, 300, values));
        CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_V, at, 300, back));
        CHECK(t, memcmp(values, back, sizeof back) == 0);
      }
      CHECK_STATUS(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_V, parameters, 1, back),
                   G2Z_BAD_ARGUMENT, &t->services, "outside");
      CHECK_STATUS(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_GRADS, 0, 1, values),
                   G2Z_BAD_ARGUMENT, &t->services, "not written");
      test_trainer_close(&tt);
    }
}

/* Initialisation: the spread of each tensor, and the same numbers for the same seed. */
static void test_initialisation(g2z_test *t) {
  g2z_train_config config = test_config_of(2, 4, 64, 32, 500);
  test_trainer tt;
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  const g2z_plan *plan = g2z_trainer_plan(tt.trainer);
  float *w = (float *)malloc(plan->parameters * sizeof(float));
  CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 0, plan->parameters, w));
  for (int unit = 0; unit < plan->units; unit++)
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      g2z_param_info info = g2z_param_describe(&config.model, (g2z_param)p);
      if (info.unit != plan->unit[unit].kind) continue;
      const float *v = w + plan->unit[unit].canonical + plan->offset[p];
      double sum = 0, square = 0, n = (double)info.elements;
      for (size_t i = 0; i < info.elements; i++) {
        sum += (double)v[i];
        square += (double)v[i] * (double)v[i];
      }
      double spread = info.init == G2Z_INIT_NORMAL ? 0.02 : info.init == G2Z_INIT_RESIDUAL ? 0.01 : 0;
      CHECK_NEAR(t, sum / n, info.init == G2Z_INIT_ONES, 5 * spread / sqrt(n));
      if (spread > 0) CHECK_NEAR(t, sqrt(square / n), spread, 5 * spread / sqrt(2 * n));
    }
  free(w);
  test_trainer_close(&tt);
}

/* Validation is the mean of the losses that steps without a learning rate report. */
static void test_validation(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 2, 16, 8, 61);
  config.optimizer.lr = config.optimizer.min_lr = 0;
  int32_t ids[8 * 8 + 1];
  test_tokens(ids, 65, 61, 9);
  g2z_shard_writer *writer;
  REQUIRE_OK(t, g2z_shard_writer_create(&t->services, test_path(t, "v.bin"), G2Z_SHARD_RAW, &writer));
  CHECK_OK(t, g2z_shard_writer_append(writer, ids, 65));
  CHECK_OK(t, g2z_shard_writer_commit(writer));
  g2z_shard_writer_free(writer);
  test_trainer tt;
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  g2z_loader_config lc;
  memset(&lc, 0, sizeof lc);
  lc.glob = test_path(t, "v.bin");
  lc.batch = 2;
  lc.seq = 8;
  lc.accum = lc.world = 1;
  lc.vocab = 61;
  g2z_loader *loader = NULL;
  REQUIRE_OK(t, g2z_loader_create(&t->services, &lc, &loader));
  CHECK(t, g2z_loader_steps_per_epoch(loader) == 4);
  double loss, sum = 0;
  CHECK_OK(t, g2z_trainer_validate(tt.trainer, loader, 4, &loss));
  for (int s = 0; s < 4; s++) {
    g2z_report report;
    int32_t x[16], y[16];
    for (int i = 0; i < 16; i++) {
      x[i] = ids[16 * s + i];
      y[i] = ids[16 * s + i + 1];
    }
    CHECK_OK(t, g2z_trainer_step_batch(tt.trainer, x, y, &report));
    CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
    sum += (double)report.loss;
  }
  CHECK_NEAR(t, loss, sum / 4, 1e-6);
  g2z_loader_free(loader);
  /* A loader of another vocabulary: its tokens are no rows of this model's wte. */
  lc.vocab = 65536;
  lc.glob = test_path(t, "wide.bin");
  ids[40] = 60000;
  REQUIRE_OK(t, g2z_shard_writer_create(&t->services, lc.glob, G2Z_SHARD_RAW, &writer));
  CHECK_OK(t, g2z_shard_writer_append(writer, ids, 65));
  CHECK_OK(t, g2z_shard_writer_commit(writer));
  g2z_shard_writer_free(writer);
  REQUIRE_OK(t, g2z_loader_create(&t->services, &lc, &loader));
  CHECK_STATUS(t, g2z_trainer_validate(tt.trainer, loader, 4, &loss), G2Z_BAD_ARGUMENT,
               &t->services, "token=60000 at position 8 must lie between 0 and 60");
  CHECK(t, isnan(loss));
  g2z_loader_free(loader);
  test_trainer_close(&tt);
}

/* Every allocation of a trainer's life fails once: a status each time, and nothing leaks. */
static void test_allocation_failures(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 16, 8, 61);
  int failures = 0;
  for (long at = 1; at < 200; at++) {
    test_trainer tt;
    t->fail_at = at;
    g2z_status status = test_trainer_open(t, &config, &tt);
    t->fail_at = 0;
    test_trainer_close(&tt);
    CHECK(t, t->allocations == 0);
    if (status == G2Z_OK) break;
    CHECK(t, status == G2Z_NO_MEMORY && tt.trainer == NULL);
    failures++;
  }
  CHECK(t, failures >= 10 && failures < 199);
}

static void test_context_refusals(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 16, 8, 61);
  test_trainer tt;
  config.dtype = G2Z_TF32;
  CHECK_STATUS(t, test_trainer_open(t, &config, &tt), G2Z_UNSUPPORTED, &t->services, "tf32");
  test_trainer_close(&tt);
  config.dtype = G2Z_FP32;
  config.batch = 1 << 20;
  config.model.context = 256;
  config.seq = 256;
  config.model.layers = 500;
  CHECK_STATUS(t, test_trainer_open(t, &config, &tt), G2Z_NO_MEMORY, &t->services,
               "with recompute=block fits");
  test_trainer_close(&tt);
}

/* ----- generation -------------------------------------------------------- */

static void test_sampling(g2z_test *t) {
  const float logits[5] = {1.0f, 3.0f, 2.0f, 0.0f, 3.0f};
  float scratch[10];
  g2z_sampling s = g2z_sampling_default();
  s.temperature = 0;
  CHECK(t, g2z_sample(logits, 5, &s, 0, scratch) == 1); /* equals: the smaller id */
  s.temperature = 1;
  int count[5] = {0, 0, 0, 0, 0};
  double sum = 0;
  for (int i = 0; i < 5; i++) sum += exp((double)logits[i]);
  for (uint32_t i = 0; i < 20000; i++) count[g2z_sample(logits, 5, &s, i, scratch)]++;
  for (int i = 0; i < 5; i++) { /* five standard deviations of a binomial */
    double p = exp((double)logits[i]) / sum;
    CHECK_NEAR(t, count[i] / 20000.0, p, 5 * sqrt(p * (1 - p) / 20000));
  }
  s.top_k = 3;
  for (uint32_t i = 0; i < 2000; i++) {
    int id = g2z_sample(logits, 5, &s, i, scratch);
    CHECK(t, id == 1 || id == 2 || id == 4);
  }
  s.top_k = 0;
  s.top_p = 0.5f; /* ids 1 and 4 have 0.42 each */
  memset(count, 0, sizeof count);
  for (uint32_t i = 0; i < 2000; i++) count[g2z_sample(logits, 5, &s, i, scratch)]++;
  CHECK(t, count[1] + count[4] == 2000 && count[1] > 800 && count[4] > 800);
  s.top_p = 1e-9f;
  CHECK(t, g2z_sample(logits, 5, &s, 9, scratch) == 1);
  const float one_broken[3] = {NAN, 1.0f, 2.0f};
  CHECK(t, g2z_sample(one_broken, 3, &s, 9, scratch) == 2);
  s.temperature = 0;
  CHECK(t, g2z_sample(one_broken, 3, &s, 9, scratch) == 2);
  s.temperature = 1;
  const float broken[3] = {NAN, NAN, NAN};
  int id = g2z_sample(broken, 3, &s, 9, scratch);
  CHECK(t, id >= 0 && id < 3);
}

/* A model that has learnt a cycle of tokens by heart writes it on, also past its context. */
static void test_generate_cycle(g2z_test *t) {
  enum { PERIOD = 7 };
  g2z_train_config config = test_config_of(1, 2, 32, 16, 61);
  config.optimizer.lr = 3e-3f;
  config.optimizer.warmup = 5;
  config.optimizer.steps = 80;
  test_trainer tt;
  int32_t x[32], y[32];
  for (int i = 0; i < 32; i++) {
    x[i] = 10 + 5 * (i % 16 % PERIOD);
    y[i] = 10 + 5 * ((i % 16 + 1) % PERIOD);
  }
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  test_steps(t, tt.trainer, x, y, 80, NULL, NULL);
  g2z_tokens tokens;
  memset(&tokens, 0, sizeof tokens);
  g2z_sampling s = g2z_sampling_default();
  s.temperature = 0;
  CHECK_STATUS(t, g2z_generate(tt.trainer, &tokens, 4, &s, -1, NULL, NULL), G2Z_BAD_ARGUMENT,
               &t->services, "no tokens");
  for (int i = 0; i < 3; i++) CHECK_OK(t, g2z__tokens_append(&t->services, &tokens, x[i]));
  CHECK_OK(t, g2z_generate(tt.trainer, &tokens, 13, &s, -1, NULL, NULL));
  CHECK(t, tokens.count == 16);
  for (size_t i = 0; i < tokens.count; i++) CHECK(t, tokens.ids[i] == 10 + 5 * (int)(i % PERIOD));
  CHECK_OK(t, g2z_generate(tt.trainer, &tokens, 10, &s, -1, NULL, NULL));
  CHECK(t, tokens.count == 26); /* the window slides: no position beyond the context is asked for */
  s.temperature = 1;
  size_t before = tokens.count;
  CHECK_OK(t, g2z_generate(tt.trainer, &tokens, 500, &s, 10, NULL, NULL));
  CHECK(t, tokens.ids[tokens.count - 1] == 10 || tokens.count == before + 500);
  s.top_p = 0;
  CHECK_STATUS(t, g2z_generate(tt.trainer, &tokens, 1, &s, -1, NULL, NULL), G2Z_BAD_ARGUMENT,
               &t->services, "top_p=0");
  g2z_tokens_free(&tokens);
  test_trainer_close(&tt);
}

/* A list of tokens belongs to the services it began with, whoever adds to it. */
static void test_tokens_services(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 2, 32, 16, 61);
  static g2z_test other;
  g2z_tokenizer *tokenizer = NULL;
  g2z_encoder *encoder = NULL;
  g2z_tokens tokens;
  test_trainer tt;
  char text[300];
  memset(&other, 0, sizeof other);
  memset(&tokens, 0, sizeof tokens);
  memset(text, '!', sizeof text);
  other.services.allocate = test_allocate;
  other.services.release = test_release;
  other.services.user = &other;
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_tokenizer_create(&t->services, NULL, &tokenizer));
  CHECK_OK(t, g2z_encoder_create(&t->services, tokenizer, &encoder));
  CHECK_OK(t, g2z__tokens_append(&other.services, &tokens, 1));
  other.fail_at = 1; /* the sentence goes to the services of the call */
  CHECK_STATUS(t, g2z_encode(encoder, text, sizeof text, G2Z_ENCODE_DEFAULT, &tokens),
               G2Z_NO_MEMORY, &t->services, "bytes");
  other.fail_at = 0;
  CHECK_OK(t, g2z_encode(encoder, text, sizeof text, G2Z_ENCODE_DEFAULT, &tokens));
  CHECK(t, tokens.services == &other.services && other.allocations == 1 && tokens.count == 301);
  long live = t->allocations;
  g2z_sampling sampling = g2z_sampling_default();
  CHECK_OK(t, g2z_generate(tt.trainer, &tokens, 300, &sampling, -1, NULL, NULL));
  CHECK(t, tokens.services == &other.services && other.allocations == 1 && t->allocations == live);
  other.fail_at = 1;
  t->services.error[0] = 0;
  CHECK_STATUS(t, g2z_generate(tt.trainer, &tokens, 3000, &sampling, -1, NULL, NULL),
               G2Z_NO_MEMORY, &t->services, "bytes");
  other.fail_at = 0;
  g2z_tokens_free(&tokens);
  g2z_tokens_free(NULL);
  CHECK(t, other.allocations == 0 && t->allocations == live);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
  test_trainer_close(&tt);
}

#ifndef G2Z_FUZZ

/* ----- the table --------------------------------------------------------- */

typedef struct g2z_test_entry {
  const char *name, *about;
  void (*run)(g2z_test *t);
} g2z_test_entry;

/* ----- ranks: real processes ---------------------------------------------
 * A rank program is a function that `./test_gpt2 --rank-program NAME ARGUMENTS` runs in a process
 * of its own; its result is the exit code. Processes are started with fork and exec: this one has
 * used OpenMP's threads, and maybe CUDA, which do not survive a fork. */

enum { TEST_RANKS = 8, TEST_WORDS = 24, RANKS_MOST = 256 /* by hand */ };

typedef struct test_ranks {
  int world, port;
  pid_t pid[TEST_RANKS];        /* 0: has ended */
  int code[TEST_RANKS];         /* exit code; 128 + signal; -1: had to be killed at the deadline */
  double ended[TEST_RANKS];     /* g2z_seconds() */
  char *output[TEST_RANKS];     /* what it printed, once it has ended; freed by test_ranks_free */
} test_ranks;

/* Ports of tests that run at the same time, in this process or another, do not meet. */
static int test_ranks_port(void) {
  static int turn;
  return 10000 + ((int)getpid() * 64 + 16 * turn++) % 9900;
}

static const char *test_ranks_file(const g2z_test *t, const test_ranks *ranks, int rank) {
  char name[64];
  snprintf(name, sizeof name, "rank_%d_%d.txt", ranks->port, rank);
  return test_path(t, name);
}

/* The environment of a rank: this process's without any launcher's variables, and then `extra`
 * ("NAME=value"). Freed as one block. */
static char **test_ranks_environment(const char *const *extra, int extras) {
  static const char *const dropped[] = {"RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "OMPI_", "PMI",
                                        "MPI_LOCAL", "SLURM_", "G2Z_RUN_ID=", "G2Z_RANKS_",
                                        "G2Z_SECRET=",
                                        "OMP_NUM_THREADS=", "TORCHELASTIC_"};
  int count = 0, kept = 0;
  while (environ[count]) count++;
  char **list = (char **)calloc((size_t)(count + extras + 1), sizeof(char *));
  for (int i = 0; i < count; i++) {
    int drop = 0;
    for (size_t k = 0; k < sizeof dropped / sizeof *dropped; k++)
      drop |= strncmp(environ[i], dropped[k], strlen(dropped[k])) == 0;
    if (!drop) list[kept++] = environ[i];
  }
  for (int i = 0; i < extras; i++) list[kept++] = (char *)(uintptr_t)extra[i];
  return list;
}

/* Starts a program with both outputs into the rank's file. It dies with this process. */
static pid_t test_ranks_exec(g2z_test *t, const char *path, char **argv, char **environment,
                             const char *output) {
  int file = open(output, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  CHECK(t, file >= 0);
  fflush(stdout);
  pid_t parent = getpid(), pid = fork();
  if (pid == 0) { /* from here to exec only what a signal handler may do */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent && dup2(file, 1) == 1 && dup2(file, 2) == 2)
      execve(path, argv, environment);
    _exit(127);
  }
  CHECK(t, pid > 0);
  close(file);
  return pid;
}

/* Starts `--rank-program PROGRAM ARGUMENTS` as ranks first..last of `world`, by hand as a user
 * would. A `variable` ("NAME=value", or NULL) comes first in their environment, and so counts. */
static void test_ranks_start(g2z_test *t, test_ranks *ranks, int first, int last,
                             const char *variable, const char *arguments) {
  char line[512], *argv[TEST_WORDS] = {NULL}, self[] = "test_gpt2", flag[] = "--rank-program";
  int words = 0;
  argv[words++] = self;
  argv[words++] = flag;
  snprintf(line, sizeof line, "%s", arguments);
  for (char *word = strtok(line, " "); word && words < TEST_WORDS - 1; word = strtok(NULL, " "))
    argv[words++] = word;
  for (int rank = first; rank <= last; rank++) {
    char text[6][64];
    const char *extra[7] = {variable, text[0], text[1], text[2], text[3], text[4], text[5]};
    snprintf(text[0], 64, "RANK=%d", rank);
    snprintf(text[1], 64, "WORLD_SIZE=%d", ranks->world);
    snprintf(text[2], 64, "MASTER_ADDR=127.0.0.1");
    snprintf(text[3], 64, "MASTER_PORT=%d", ranks->port);
    snprintf(text[4], 64, "OMP_NUM_THREADS=1");
    snprintf(text[5], 64, "G2Z_RUN_ID=test_%d_%d", (int)getpid(), ranks->port);
    char **environment = test_ranks_environment(variable ? extra : extra + 1, variable ? 7 : 6);
    ranks->pid[rank] = test_ranks_exec(t, "/proc/self/exe", argv, environment,
                                       test_ranks_file(t, ranks, rank));
    free(environment);
  }
}

static void test_ranks_open(test_ranks *ranks, int world) {
  memset(ranks, 0, sizeof *ranks);
  ranks->world = world;
  ranks->port = test_ranks_port();
}

/* Until all have ended, or for `seconds`: then those that are left are killed. */
static void test_ranks_wait(g2z_test *t, test_ranks *ranks, double seconds) {
  double deadline = g2z_seconds() + seconds;
  for (int running = 1; running;) {
    int late = g2z_seconds() > deadline;
    running = 0;
    for (int r = 0; r < TEST_RANKS; r++) {
      int status;
      if (ranks->pid[r] <= 0) continue;
      if (late) kill(ranks->pid[r], SIGKILL);
      if (waitpid(ranks->pid[r], &status, late ? 0 : WNOHANG) != ranks->pid[r]) {
        running = 1;
        continue;
      }
      ranks->ended[r] = g2z_seconds();
      ranks->code[r] = late ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      ranks->pid[r] = 0;
      size_t bytes;
      g2z_release(&t->services, ranks->output[r]);
      CHECK_OK(t, g2z_read_file(&t->services, test_ranks_file(t, ranks, r), 1 << 24,
                                &ranks->output[r], &bytes));
    }
    struct timespec pause = {0, 5000000};
    if (running) nanosleep(&pause, NULL);
  }
}

/* What a rank has printed so far. */
static void test_ranks_peek(g2z_test *t, const test_ranks *ranks, int rank, char *text,
                            size_t room) {
  int file = open(test_ranks_file(t, ranks, rank), O_RDONLY);
  int64_t got = file >= 0 ? g2z__pread(file, text, room - 1, 0) : 0;
  text[got > 0 ? got : 0] = 0;
  if (file >= 0) close(file);
}

/* Until all ranks have met, 20 s at most. */
static void test_ranks_await(g2z_test *t, const test_ranks *ranks) {
  char text[256];
  double end = g2z_seconds() + 20;
  for (int r = 0; r < ranks->world; r++)
    for (text[0] = 0; !strstr(text, "has met") && g2z_seconds() < end; usleep(2000))
      test_ranks_peek(t, ranks, r, text, sizeof text);
  CHECK(t, g2z_seconds() < end);
}

/* Rank r ended with this code and said this (NULL: anything). */
#define CHECK_RANK(t, ranks, r, want, part) test_ranks_check(t, __LINE__, ranks, r, want, part)
static void test_ranks_check(g2z_test *t, int line, const test_ranks *ranks, int rank, int want,
                             const char *part) {
  const char *output = ranks->output[rank] ? ranks->output[rank] : "";
  t->checks++;
  if (ranks->code[rank] != want || (part && !strstr(output, part)))
    test_fail(t, __FILE__, line, "rank %d ended with %d, expected %d and \"%s\"; it said:\n%s", rank,
              ranks->code[rank], want, part ? part : "", output);
}

static void test_ranks_free(g2z_test *t, test_ranks *ranks) {
  for (int r = 0; r < TEST_RANKS; r++) g2z_release(&t->services, ranks->output[r]);
}

/* ----- rank programs ----- */

static void rank_on_fault(void *user, const g2z_fault *fault) {
  (void)user;
  printf("fault of rank %d: %s\n", fault->rank, fault->sentence);
  fflush(stdout);
  _exit(70);
}

/* Joins with the environment's place and short deadlines; NULL after printing why not. Arguments
 * NAME=VALUE change the config. */
static g2z_ranks *rank_join(g2z_services *services, int argc, char **argv) {
  g2z_ranks_config config = g2z_ranks_config_default();
  g2z_ranks *ranks = NULL;
  memset(services, 0, sizeof *services);
  config.join_s = 20;
  config.on_fault = rank_on_fault;
  g2z_status status = g2z_place_find(services, &config.place);
  for (int i = 0; i < argc; i++) {
    const char *value = strchr(argv[i], '=');
    if (!value) continue;
    value++;
    if (strncmp(argv[i], "join=", 5) == 0) config.join_s = atof(value);
    if (strncmp(argv[i], "silence=", 8) == 0) config.silence_s = atof(value);
    if (strncmp(argv[i], "hang=", 5) == 0) config.hang_s = atof(value);
    if (strncmp(argv[i], "world=", 6) == 0) config.place.world = atoi(value);
    if (strncmp(argv[i], "local=", 6) == 0) config.place.local_world = atoi(value);
    if (strncmp(argv[i], "host=", 5) == 0)
      snprintf(config.place.host, sizeof config.place.host, "%s", value);
    if (strncmp(argv[i], "device=", 7) == 0) config.device = value;
    if (strncmp(argv[i], "build=", 6) == 0) config.build = value;
    if (strncmp(argv[i], "handler=", 8) == 0) config.on_fault = NULL;
  }
  if (status == G2Z_OK) status = g2z_ranks_join(services, &config, &ranks);
  if (status == G2Z_OK) printf("rank %d has met the others\n", config.place.rank);
  else printf("join: %s: %s\n", g2z_status_text(status), services->error);
  fflush(stdout);
  return ranks;
}

static int rank_failed(g2z_services *services, g2z_status status) {
  printf("failed: %s: %s\n", g2z_status_text(status), services->error);
  return 3;
}

/* Every call, several times, and what it must give. */
static int rank_calls(int argc, char **argv) {
  g2z_services services;
  g2z_ranks *ranks = rank_join(&services, argc, argv);
  if (!ranks) return 1;
  const g2z_place *place = g2z_ranks_place(ranks);
  const int rank = place->rank, world = place->world;
  int bad = 0, all[RANKS_MOST], mine, third = 0;
  char text[64];
  for (int turn = 0; turn < 50; turn++) {
    mine = 100 * turn + rank;
    bad += g2z_ranks_all_gather(ranks, &mine, sizeof mine, all) != G2Z_OK;
    for (int r = 0; r < world; r++) bad += all[r] != 100 * turn + r;
    third = rank == 0 ? turn * 7 : -1;
    bad += g2z_ranks_broadcast(ranks, &third, sizeof third) != G2Z_OK || third != turn * 7;
    bad += g2z_ranks_agree(ranks, G2Z_OK) != G2Z_OK;
    bad += g2z_ranks_same(ranks, "turn", turn % 2 ? "" : "one\ntwo") != G2Z_OK;
  }
  bad += g2z_ranks_all_gather(ranks, NULL, 0, all) != G2Z_OK; /* a barrier */
  /* The lowest failing rank's status and sentence reach everybody. */
  snprintf(services.error, sizeof services.error, "disk %d is full", rank);
  g2z_status status = g2z_ranks_agree(ranks, rank == world - 1 ? G2Z_IO : rank ? G2Z_DEVICE : G2Z_OK);
  snprintf(text, sizeof text, "rank 1: disk 1 is full");
  bad += status != (world > 2 ? G2Z_DEVICE : G2Z_IO) || strcmp(services.error, text) != 0;
  snprintf(text, sizeof text, "model gpt2\nbatch %d\nseq 8", rank == 1 ? 4 : 8);
  status = g2z_ranks_same(ranks, "config", text);
  bad += status != G2Z_BAD_ARGUMENT || !strstr(services.error, "the config of rank 1 differs from "
                                               "rank 0's: \"batch 4\" there, \"batch 8\" on rank 0");
  if (bad) printf("%d wrong; last: %s\n", bad, services.error);
  g2z_ranks_leave(ranks);
  return bad ? 2 : 0;
}

/* A stream of 64 MB each way between rank 0 and every other, checked by its sum. */
static int rank_stream(int argc, char **argv) {
  enum { COUNT = 16 << 20 };
  g2z_services services;
  g2z_ranks *ranks = rank_join(&services, argc, argv);
  if (!ranks) return 1;
  const g2z_place *place = g2z_ranks_place(ranks);
  uint32_t *numbers = (uint32_t *)malloc((size_t)COUNT * 4), sum = 0, want = 0;
  g2z_status status = G2Z_OK;
  double begin = g2z_seconds();
  for (uint32_t i = 0; i < COUNT; i++) numbers[i] = i * 2654435761u, want += numbers[i];
  for (int r = 1; r < place->world && status == G2Z_OK; r++) {
    if (place->rank && place->rank != r) continue;
    const int peer = place->rank ? 0 : r;
    if (place->rank) status = g2z__ranks_send(ranks, peer, numbers, (size_t)COUNT * 4);
    memset(numbers, 0, (size_t)COUNT * 4);
    if (status == G2Z_OK) status = g2z__ranks_receive(ranks, peer, numbers, (size_t)COUNT * 4);
    if (status == G2Z_OK && !place->rank)
      status = g2z__ranks_send(ranks, peer, numbers, (size_t)COUNT * 4);
  }
  for (uint32_t i = 0; i < COUNT; i++) sum += numbers[i];
  printf("%.3f s\n", g2z_seconds() - begin);
  free(numbers);
  if (status != G2Z_OK) return rank_failed(&services, status);
  g2z_ranks_leave(ranks);
  return sum == want ? 0 : 2;
}

/* Rank 1 makes another call than the others. */
static int rank_mismatch(int argc, char **argv) {
  g2z_services services;
  g2z_ranks *ranks = rank_join(&services, argc, argv);
  if (!ranks) return 1;
  int value = 0, all[RANKS_MOST];
  g2z_status status = g2z_ranks_place(ranks)->rank == 1
                          ? g2z_ranks_broadcast(ranks, &value, sizeof value)
                          : g2z_ranks_all_gather(ranks, &value, sizeof value, all);
  int code = rank_failed(&services, status);
  if (g2z_ranks_agree(ranks, G2Z_OK) == G2Z_OK) code = 4; /* once out of step, always */
  g2z_ranks_leave(ranks);
  return code;
}

/* ----- rank programs: ZeRO ----- */

enum { ZERO_STEPS = 20, ZERO_SEQ = 16, ZERO_STAGES = 4 };
/* Of a step; 1 to 4 ranks with three micro-steps divide the CPU's, 1, 2, 4 and 8 the GPUs'. */
enum { ZERO_ON_CPU = 36, ZERO_ON_GPU = 48, ZERO_SEQUENCES = ZERO_ON_GPU };
enum { ZERO_WORDS = 869 }; /* at most */
enum { ZERO_COLUMNS = ZERO_STAGES + 1, ZERO_DP = ZERO_STAGES, ZERO_CASES = 6 * ZERO_COLUMNS };

/* Case `index` of stages 0 to 3 and, in column ZERO_DP, the strategy of that name; three sizes of
 * buckets, one and three micro-steps. The largest bucket takes everything; the smallest cuts every
 * matrix. In stage 3 more blocks take turns than have a place. Every other time there are so many
 * words that a step's tokens are few beside them, and the embedding's gradient goes as rows.
 * What rounding may do stays small by eps, as AdamW's first steps are lr * g / (|g| + eps): with the
 * usual 1e-8 a gradient that is zero but for its rounding moves a weight by lr either way, and losses
 * of fp16 differ by 1e-3 for some seeds. From the usual first loss scale some seeds overflow in one
 * run and not in the other, and losses differ by the step that is skipped. */
static g2z_train_config zero_config(int index, int device, int world, g2z_dtype dtype) {
  static const double buckets[] = {1, 0.02, 0.002};
  int column = index % ZERO_COLUMNS;
  int vocab = index / ZERO_COLUMNS % 2 ? ZERO_WORDS : 61;
  g2z_train_config config = test_config_of(column == 3 ? 4 : 2, 2, 32, ZERO_SEQ, vocab);
  config.zero_stage = column == ZERO_DP ? 0 : column;
  config.strategy = column == ZERO_DP ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
  config.bucket_mb = buckets[index / ZERO_COLUMNS % 3];
  config.accum = index / (3 * ZERO_COLUMNS) ? 3 : 1;
  config.batch = (device ? ZERO_ON_GPU : ZERO_ON_CPU) / (world * config.accum);
  config.graph = index / ZERO_STAGES % 3 == 1 ? 0 : 2; /* on a GPU the other steps are graphs */
  config.gather = (g2z_gather)((index / ZERO_COLUMNS + column) % G2Z_GATHER_COUNT);
  config.reduce = (g2z_reduce)(index / ZERO_COLUMNS * 2 % G2Z_REDUCE_COUNT);
  config.tune = 0; /* trainers that time products may choose differently, and round differently */
  config.dtype = dtype;
  config.dropout = 0.1f;
  config.optimizer.lr = config.optimizer.min_lr = 4e-3f;
  config.optimizer.eps = 1e-4f;
  config.optimizer.loss_scale = 1024;
  config.optimizer.warmup = 0;
  return config;
}

/* This rank's part of the `sequences` of a step: sequence j goes to rank j % world. What follows a
 * token is a function of it, so that twenty steps learn something. */
static void zero_tokens(int step, int rank, int world, int sequences, int vocab, int32_t *x,
                        int32_t *y) {
  int apart = vocab / 61; /* 61 of the words, which lie in the slices of all ranks */
  int32_t all[ZERO_SEQUENCES * ZERO_SEQ];
  test_tokens(all, (size_t)sequences * ZERO_SEQ, 61, (uint64_t)step + 5);
  for (int j = rank, at = 0; j < sequences; j += world)
    for (int i = 0; i < ZERO_SEQ; i++, at++) {
      int word = all[j * ZERO_SEQ + i];
      x[at] = word * apart;
      y[at] = (word * 7 + 3) % 61 * apart;
    }
}

/* The losses of ZERO_STEPS steps. */
static g2z_status zero_train(g2z_trainer *trainer, float *losses) {
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  const g2z_plan *plan = g2z_trainer_plan(trainer);
  g2z_report report;
  for (int step = 0; step <= ZERO_STEPS; step++) {
    zero_tokens(step, plan->rank, plan->world, plan->batch * plan->accum * plan->world,
                plan->model.vocab, x, y);
    g2z_status status = step < ZERO_STEPS ? g2z_trainer_step_batch(trainer, x, y, &report)
                                          : g2z_trainer_flush(trainer, &report);
    if (status != G2Z_OK) return status;
    if (report.loss_step > 0) losses[report.loss_step - 1] = report.loss;
  }
  return G2Z_OK;
}

/* Leaves out one of the gathers: what a test must notice. */
static g2z_collectives zero_faulty;
static const g2z_collectives *zero_right;
static int zero_gathers;
static g2z_status zero_gather(g2z_comm *comm, const g2z_call *call) {
  if (call->kind == G2Z_CALL_GATHER && ++zero_gathers == 7) return G2Z_OK;
  return zero_right->play(comm, call);
}

/* Of the embedding's gradient in step 2 the other ranks' rows stay away. */
static g2z_status zero_rows(g2z_comm *comm, const g2z_call *call) {
  if (call->kind != G2Z_CALL_ROWS || call->span != G2Z_SPAN_EMBEDDING_ROWS ||
      ++zero_gathers != 4) /* a step's second: tokens, rows */
    return zero_right->play(comm, call);
  memset(call->to, 0, (size_t)comm->world * call->n);
  memcpy((char *)call->to + (size_t)comm->rank * call->n, call->from, call->n);
  return G2Z_OK;
}

/* Leaves out one of the reductions: a bucket's gradients stay the last step's, or this rank's own. */
static g2z_status zero_reduction(g2z_comm *comm, const g2z_call *call) {
  if (call->kind == G2Z_CALL_REDUCE && ++zero_gathers == 7) return G2Z_OK;
  return zero_right->play(comm, call);
}

/* What is done to a run beside its case. ZERO_LIKE + world: one rank takes micro-batches of the size
 * that those of `world` ranks have. ZERO_ROUNDED + world: the same, and each gradient moves as far
 * as the roundings of `world` ranks can move it. */
enum {
  ZERO_PLAIN,
  ZERO_FAULT,                   /* these three: a gather, rows, a reduction are left out once */
  ZERO_FAULT_ROWS,
  ZERO_FAULT_REDUCE,
  ZERO_RECOMPUTE,
  ZERO_LIKE,
  ZERO_ROUNDED = ZERO_LIKE + TEST_RANKS
};

static void zero_break(g2z_trainer *trainer, int how) {
  zero_right = trainer->comm->ops;
  zero_faulty = *zero_right;
  zero_faulty.play = how == ZERO_FAULT ? zero_gather : how == ZERO_FAULT_ROWS ? zero_rows
                                                                              : zero_reduction;
  trainer->comm->ops = &zero_faulty;
  zero_gathers = 0;
}

/* Before a step takes the norm of its gradients, which are fp32 on one rank, each moves up or down,
 * as a coin falls, by zero_move of itself and of the range's mean size: ranks' parts of opposite sign
 * are larger than their sum, and round by more. */
static g2z_ops zero_moving;
static const g2z_ops *zero_still;
static double zero_move;
static uint32_t zero_coin;
static g2z_status zero_sumsq(g2z_device *device, double *sum, const void *grads,
                             const g2z_range *ranges, int count) {
  static float part[1 << 17];
  for (int r = 0; r < count; r++) {
    size_t n = ranges[r].elements;
    float *at = (float *)grads + ranges[r].begin;
    double mean = 0;
    if (n > sizeof part / sizeof *part) return G2Z_BAD_ARGUMENT;
    g2z_status status = zero_still->download(device, part, at, n * sizeof *part);
    if (status == G2Z_OK) status = zero_still->synchronize(device);
    if (status != G2Z_OK) return status;
    for (size_t i = 0; i < n; i++) mean += fabs((double)part[i]) / (double)n;
    for (size_t i = 0; i < n; i++) {
      double move = zero_move * (fabs((double)part[i]) + mean);
      zero_coin = zero_coin * 1664525u + 1013904223u;
      part[i] += (float)(zero_coin >> 31 ? move : -move);
    }
    status = zero_still->upload(device, at, part, n * sizeof *part);
    if (status == G2Z_OK) status = zero_still->synchronize(device);
    if (status != G2Z_OK) return status;
  }
  return zero_still->grad_sumsq(device, sum, grads, ranges, count);
}

/* A sum over `world` ranks is rounded 2 world times at most, by half a unit in the last place each,
 * which is 2^-11 of a number in fp16 and 2^-8 in bf16: each rank's part, world - 1 sums, and what it
 * is compared with. */
static void zero_round(g2z_trainer *trainer, int world, g2z_dtype dtype) {
  zero_still = trainer->device->ops;
  zero_moving = *zero_still;
  zero_moving.grad_sumsq = zero_sumsq;
  zero_move = 2 * world * (dtype == G2Z_FP16 ? 0x1p-11 : 0x1p-8);
  zero_coin = 1;
  trainer->device->ops = &zero_moving;
}

/* zero DEVICE DTYPE CASES HOW FILE: rank 0 writes the losses of all cases to FILE. */
static int rank_zero(int argc, char **argv) {
  g2z_services services;
  memset(&services, 0, sizeof services);
  if (argc != 5) return 2;
  int dtype = atoi(argv[1]), cases = atoi(argv[2]), how = atoi(argv[3]);
  float losses[ZERO_CASES][ZERO_STEPS];
  g2z_context *context = NULL;
  g2z_context_config cc = g2z_context_config_default(&services);
  int gpu = atoi(argv[0]);
  cc.device = gpu ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU;
  g2z_status status = g2z_context_create(&cc, &context);
  for (int i = 0; i < cases && status == G2Z_OK; i++) {
    g2z_train_config config = zero_config(i, gpu, g2z_context_world(context), (g2z_dtype)dtype);
    g2z_trainer *trainer;
    config.recompute = how == ZERO_RECOMPUTE ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    int rounded = how > ZERO_ROUNDED ? how - ZERO_ROUNDED : 0;
    int like = rounded ? rounded : how > ZERO_LIKE ? how - ZERO_LIKE : 1;
    config.batch /= like;
    config.accum *= like;
    int faulty = how >= ZERO_FAULT && how <= ZERO_FAULT_REDUCE;
    if (rounded || faulty) config.graph = 0; /* the host takes part in the middle of a step */
    status = g2z_trainer_create(context, &config, &trainer);
    if (status != G2Z_OK) break;
    if (faulty) zero_break(trainer, how);
    if (rounded) zero_round(trainer, rounded, config.dtype);
    status = zero_train(trainer, losses[i]);
    if (rounded) trainer->device->ops = zero_still;
    g2z_trainer_free(trainer);
  }
  if (status == G2Z_OK && g2z_context_rank(context) == 0) {
    FILE *file = fopen(argv[4], "wb");
    if (!file || fwrite(losses, sizeof losses[0], (size_t)cases, file) != (size_t)cases ||
        fclose(file) != 0)
      status = G2Z_IO;
  }
  if (status != G2Z_OK) fprintf(stderr, "%s\n", services.error);
  g2z_context_free(context);
  return status == G2Z_OK ? 0 : 1;
}

/* Counts gathers, and looks at where blocks take turns when one is computed with: it is there, and
 * the next one of the pass is on its way. */
static g2z_trainer *turns_trainer;
static g2z_ops turns_ops;
static const g2z_ops *turns_right;
static int turns_seen, turns_wrong;
static void turns_look(int next) {
  const g2z_trainer *t = turns_trainer;
  int unit = t->needed, L = t->plan->model.layers;
  if (unit < 1 || unit > L) return; /* the final LayerNorm */
  turns_seen++;
  turns_wrong += t->turn[unit % 2] != unit || !t->turn_joined[unit % 2];
  turns_wrong += unit + next >= 1 && unit + next <= L && t->turn[(unit + next) % 2] != unit + next;
}
static g2z_status turns_fwd(g2z_device *device, void *y, float *mean, float *rstd, const void *x,
                            const void *w, const void *b, int N, int C) {
  turns_look(-1);
  return turns_right->layernorm_fwd(device, y, mean, rstd, x, w, b, N, C);
}
static g2z_status turns_bwd(g2z_device *device, void *dw, const void *x, const void *dy,
                            g2z_write mode, int N, int I, int O) {
  turns_look(1);
  return turns_right->linear_bwd_weight(device, dw, x, dy, mode, N, I, O);
}
static g2z_status turns_gather(g2z_comm *comm, const g2z_call *call) {
  zero_gathers += call->kind == G2Z_CALL_GATHER;
  return zero_right->play(comm, call);
}

/* turns CASE: three steps of stage 3 with a bucket for each unit. */
static int rank_turns(int argc, char **argv) {
  enum { STEPS = 3 };
  g2z_services services;
  memset(&services, 0, sizeof services);
  if (argc != 1) return 2;
  g2z_context *context = NULL;
  g2z_trainer *t = NULL;
  g2z_context_config cc = g2z_context_config_default(&services);
  cc.device = G2Z_DEVICE_CPU;
  g2z_status status = g2z_context_create(&cc, &context);
  g2z_train_config config = zero_config(atoi(argv[0]), 0, g2z_context_world(context), G2Z_FP32);
  if (status == G2Z_OK) status = g2z_trainer_create(context, &config, &t);
  if (status == G2Z_OK) {
    zero_right = t->comm->ops;
    zero_faulty = *zero_right;
    zero_faulty.play = turns_gather;
    t->comm->ops = &zero_faulty;
    turns_trainer = t;
    turns_right = t->device->ops;
    turns_ops = *turns_right;
    turns_ops.layernorm_fwd = turns_fwd;
    turns_ops.linear_bwd_weight = turns_bwd;
    t->device->ops = &turns_ops;
  }
  for (int step = 0; step < STEPS && status == G2Z_OK; step++) {
    int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
    g2z_report report;
    zero_tokens(step, g2z_context_rank(context), g2z_context_world(context),
                config.batch * config.accum * g2z_context_world(context), config.model.vocab, x, y);
    status = g2z_trainer_step_batch(t, x, y, &report);
  }
  /* Of L blocks, all but the two that lie there already come in each pass of each micro-step; an
   * update sends those two, wte, wpe and the final LayerNorm, as does the beginning. */
  int L = config.model.layers, most = 5 + STEPS * (2 * (L - 2) * config.accum + 5);
  int looks = STEPS * config.accum * L * (2 + 4); /* LayerNorms and products of a block */
  int wrong = zero_gathers != most || turns_seen != looks || turns_wrong;
  printf("%d gathers of %d, %d looks of %d, %d wrong\n", zero_gathers, most, turns_seen, looks,
         turns_wrong);
  /* The first block, which lies there, is written to: what is computed then is what is computed
   * when nothing lies there any more. */
  float logits[2][ZERO_WORDS] = {{0}}, zeros[512] = {0};
  for (int i = 0; i < 2 && status == G2Z_OK; i++) {
    int32_t token = 7;
    if (i == 0)
      status = g2z_trainer_write(t, G2Z_BUFFER_MASTER,
                                 t->plan->unit[L].canonical + 32, 512, zeros);
    if (status == G2Z_OK) status = g2z_trainer_logits(t, &token, 1, 1, logits[i]);
  }
  if (status == G2Z_OK && memcmp(logits[0], logits[1], sizeof logits[0]) != 0) {
    puts("what was written came late");
    wrong++;
  }
  g2z_trainer_free(t);
  g2z_context_free(context);
  return status != G2Z_OK || wrong;
}

/* Validates on a shard that rank 1 believes to have tokens that it has no place for. */
static g2z_status rank_validate(g2z_trainer *trainer, const char *shard) {
  const g2z_plan *plan = g2z_trainer_plan(trainer);
  g2z_services *services = g2z_context_services(g2z_trainer_context(trainer));
  g2z_loader_config config;
  g2z_loader *loader;
  double loss = 0;
  memset(&config, 0, sizeof config);
  config.glob = shard;
  config.batch = plan->batch;
  config.seq = plan->seq;
  config.accum = 1;
  config.rank = plan->rank;
  config.world = plan->world;
  config.vocab = plan->rank == 1 ? 30 : 61;
  g2z_status status = g2z_loader_create(services, &config, &loader);
  if (status == G2Z_OK) status = g2z_trainer_validate(trainer, loader, 3, &loss);
  g2z_loader_free(loader);
  return status;
}

/* trouble KIND DEVICE CASE SHARD: rank 1 brings a token that does not exist to step 4, or asks to
 * stop in step 3, or cannot validate on SHARD before step 4, which hinders no step. All ranks say
 * what became of it, from which step. On a GPU the step is a graph, and before step 4 all ask for
 * logits, which gathers parameters that the graph would have gathered. */
static int rank_trouble(int argc, char **argv) {
  g2z_services services;
  memset(&services, 0, sizeof services);
  if (argc != 4) return 2;
  int stop = strcmp(argv[0], "stop") == 0, token = strcmp(argv[0], "token") == 0;
  int gpu = atoi(argv[1]);
  g2z_context *context = NULL;
  g2z_trainer *trainer = NULL;
  g2z_context_config cc = g2z_context_config_default(&services);
  cc.device = gpu ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU;
  g2z_status status = g2z_context_create(&cc, &context);
  g2z_train_config config = zero_config(atoi(argv[2]), gpu, g2z_context_world(context), G2Z_FP32);
  config.graph = gpu;
  if (status == G2Z_OK) status = g2z_trainer_create(context, &config, &trainer);
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ] = {0}, y[ZERO_SEQUENCES * ZERO_SEQ];
  g2z_report report;
  char saved[512], said[G2Z_ERROR_BYTES];
  snprintf(saved, sizeof saved, "%s.%s.%s", argv[3], argv[0], argv[2]);
  if (status == G2Z_OK) status = g2z_trainer_save(trainer, saved);
  int step = 0;
  for (; step < 10 && status == G2Z_OK; step++) {
    int mine = g2z_context_rank(context) == 1;
    float logits[61];
    if (step == 4 && g2z_trainer_logits(trainer, x, 1, 1, logits) != G2Z_OK) break;
    if (step == 4 && !stop && !token && rank_validate(trainer, argv[3]) == G2Z_OK) break;
    zero_tokens(step, g2z_context_rank(context), g2z_context_world(context),
                config.batch * config.accum * g2z_context_world(context), config.model.vocab, x, y);
    if (mine && token && step == 4) x[17] = 61;
    if (mine && stop && step == 3) g2z_trainer_request_stop(trainer);
    status = g2z_trainer_step_batch(trainer, x, y, &report);
  }
  snprintf(said, sizeof said, "%s", services.error);
  x[17] = 0;
  g2z_status again = trainer ? g2z_trainer_load(trainer, saved) : status;
  for (int i = 0; i < 3 && again == G2Z_OK; i++)
    again = g2z_trainer_step_batch(trainer, x, y, &report);
  printf("step %d status %d, from what was saved %d: %s\n", step, (int)status, (int)again, said);
  g2z_trainer_free(trainer);
  g2z_context_free(context);
  return 0;
}
#include "tests/ranks.h"

/* Runs a line in a shell; what it printed, and its exit code. */
static int test_shell(const char *line, char *output, size_t room) {
  size_t used = 0, got;
  fflush(stdout);
  FILE *pipe = popen(line, "r");
  while (pipe && (got = fread(output + used, 1, room - 1 - used, pipe)) > 0) used += got;
  output[used] = 0;
  int status = pipe ? pclose(pipe) : -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* What the scripts hand to srun, which is played by one that prints its arguments. */
static void test_slurm_scripts(g2z_test *t) {
  static const struct { const char *script, *variables, *want; } cases[] = {
      {"train_1gpu.sbatch", "", "-K0|--wait=60|./train|--run-dir|@/run|"},
      {"train_4gpu.sbatch",
       "MICRO_BATCH_SIZE_PER_GPU=4 GRAD_ACCUM_STEPS=2 NCCL_LOGS=1 "
       "GPT2_EXTRA_ARGS='--train /*  --lr 1e-3'",
       "-K0|--wait=60|./train|--run-dir|@/run|--batch|4|--accum|2|--nccl-logs|--train|/*|--lr|1e-3|"},
      {"train_2x4gpu.sbatch", "NSYS=1 DIST_DEBUG=1",
       "-K0|--wait=0|--label|bash|slurm/profile.sh|@/run|./train|--run-dir|@/run|--graph|off|"},
      {"train_2gpu.sbatch", "GPT2_EXTRA_ARGS='--steps\n5'",
       "-K0|--wait=60|./train|--run-dir|@/run|--steps|5|"}};
  static const char fake[] = "#!/bin/sh\nprintf 'srun:'; printf '%s|' \"$@\"; echo\nexit 75\n";
  char line[1500], output[8192], want[1500];
  if (access("slurm/train.sh", R_OK) != 0) SKIP(t, "slurm/ is not here: run it in the repository");
  if (test_shell("bash --version", output, sizeof output) != 0) SKIP(t, "there is no bash");
  CHECK(t, test_shell("for f in slurm/*; do bash -n $f 2>&1 || exit 1; done", output,
                      sizeof output) == 0);
  if (test_shell("command -v shellcheck", output, sizeof output) == 0)
    CHECK(t, test_shell("shellcheck slurm/* 2>&1", output, sizeof output) == 0);
  test_write_file(t, test_path(t, "srun"), fake, sizeof fake - 1);
  CHECK(t, chmod(test_path(t, "srun"), 0755) == 0);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    snprintf(line, sizeof line,
             "env -u SLURM_SUBMIT_DIR PATH='%s':\"$PATH\" RUN_DIR='%s/run' %s bash slurm/%s 2>&1",
             t->directory, t->directory, cases[i].variables, cases[i].script);
    CHECK(t, test_shell(line, output, sizeof output) == 75); /* srun's code is the job's */
    size_t used = (size_t)snprintf(want, sizeof want, "srun:");
    for (const char *c = cases[i].want; *c; c++)
      used += (size_t)snprintf(want + used, sizeof want - used, *c == '@' ? "%s" : "%.1s",
                               *c == '@' ? t->directory : c);
    t->checks++;
    if (!strstr(output, want))
      test_fail(t, __FILE__, __LINE__, "%s\n  wanted %s\n  got %s", line, want, output);
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

static void test_ranks_stream(g2z_test *t) {
  test_ranks ranks;
  test_ranks_open(&ranks, 3);
  test_ranks_start(t, &ranks, 0, 2, NULL, "stream");
  test_ranks_wait(t, &ranks, 60);
  for (int r = 0; r < 3; r++) CHECK_RANK(t, &ranks, r, 0, NULL);
  test_ranks_free(t, &ranks);
}

/* ----- tests of ZeRO: several ranks compute what one computes ----- */

/* Runs rank_zero on `world` ranks. */
static int zero_run(g2z_test *t, int device, g2z_dtype dtype, int world, int cases, int how,
                    float losses[ZERO_CASES][ZERO_STEPS]) {
  char arguments[512], path[320];
  snprintf(path, sizeof path, "%s", test_path(t, "losses"));
  unlink(path);
  snprintf(arguments, sizeof arguments, "zero %d %d %d %d %s", device, (int)dtype, cases, how, path);
  int failures = t->failures;
  test_ranks ranks;
  test_ranks_open(&ranks, world);
  test_ranks_start(t, &ranks, 0, world - 1, NULL, arguments);
  test_ranks_wait(t, &ranks, 120);
  for (int r = 0; r < world; r++) CHECK_RANK(t, &ranks, r, 0, NULL);
  test_ranks_free(t, &ranks);
  if (t->failures > failures) return 0;
  FILE *file = fopen(path, "rb");
  size_t count = file ? fread(losses, sizeof losses[0], (size_t)cases, file) : 0;
  if (file) fclose(file);
  CHECK(t, count == (size_t)cases);
  return count == (size_t)cases;
}

/* The largest difference of any loss of any case from one rank's, in nats. */
static double zero_worst(float got[ZERO_CASES][ZERO_STEPS], float want[ZERO_CASES][ZERO_STEPS],
                         int cases) {
  double worst = 0;
  for (int i = 0; i < cases; i++)
    for (int step = 0; step < ZERO_STEPS; step++) {
      double difference = fabs((double)got[i][step] - (double)want[i][step]);
      if (!(difference <= worst)) worst = difference;
    }
  return worst;
}

/* How far `world` ranks' losses may be from one rank's, in nats. fp32: gradients differ in the order
 * of their sums, by some 2^-24, which AdamW carries into 20 steps of at most lr = 4e-3, and 32
 * products of a logit add up: 1e-6; a tenth of what is allowed, for activations round too.
 * 16 bits: each step rounds gradients, and parameters and activations that differ at all may round to
 * different neighbours, so no formula follows a difference through 20 steps. It is measured instead:
 * by a run of one rank whose gradients all move as far as roundings can move them in every step. Real
 * roundings go either way and mostly less far. Runs that differ by them alone stay closer together. */
static double zero_bound(g2z_test *t, int device, g2z_dtype dtype, int world, int cases,
                         float one[ZERO_CASES][ZERO_STEPS]) {
  static float rounded[ZERO_CASES][ZERO_STEPS];
  if (dtype == G2Z_FP32) return 1e-5;
  if (!zero_run(t, device, dtype, 1, cases, ZERO_ROUNDED + world, rounded)) return NAN;
  return zero_worst(rounded, one, cases);
}

/* Worlds from `least` to `most` against one rank. With 16 bits that rank takes micro-batches of the
 * same size, for a product's roundings depend on its shape, and adds up in fp32. */
static void test_zero_dtype(g2z_test *t, int device, g2z_dtype dtype, int least, int most) {
  static float one[ZERO_CASES][ZERO_STEPS], many[ZERO_CASES][ZERO_STEPS];
  if (!zero_run(t, device, dtype, 1, ZERO_CASES, ZERO_PLAIN, one)) return;
  for (int i = 0; i < ZERO_CASES; i++) CHECK(t, one[i][ZERO_STEPS - 1] < one[i][0] - 0.5f);
  for (int world = least; world <= most; world++) {
    if (!zero_run(t, device, dtype, world, ZERO_CASES, ZERO_PLAIN, many)) return;
    if (dtype != G2Z_FP32 && !zero_run(t, device, dtype, 1, ZERO_CASES, ZERO_LIKE + world, one))
      return;
    double worst = zero_worst(many, one, ZERO_CASES);
    double bound = zero_bound(t, device, dtype, world, ZERO_CASES, one);
    printf("      %s, %d ranks: losses differ by %.1e at most, and may by %.1e\n",
           g2z_dtype_text(dtype), world, worst, bound);
    CHECK_NEAR(t, worst, 0, bound);
    /* Through the connections rank 0 adds up what it would add up in stage 0. */
    for (int i = ZERO_DP; i < ZERO_CASES && !device; i += ZERO_COLUMNS)
      CHECK(t, memcmp(many[i], many[i - ZERO_DP], sizeof many[i]) == 0);
  }
}

/* The gradients of a third step of a rank alone; *apart: whether the embedding's part of wte's went
 * apart. The learning rate is too small to change a parameter, so that rounding does not grow. */
static g2z_status zero_alone_grads(g2z_test *t, const g2z_train_config *config, int *apart,
                                   float *grads, size_t limit, size_t *count) {
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  test_trainer tt;
  g2z_report report;
  g2z_status status = test_trainer_open(t, config, &tt);
  for (int step = 0; step < 3 && status == G2Z_OK; step++) {
    zero_tokens(step, 0, 1, config->batch * config->accum, config->model.vocab, x, y);
    status = g2z_trainer_step_batch(tt.trainer, x, y, &report);
  }
  if (status == G2Z_OK) {
    const g2z_plan *plan = g2z_trainer_plan(tt.trainer);
    *apart = plan->wte_rows && plan->dwte_dtype == config->dtype;
    *count = plan->parameters < limit ? plan->parameters : limit;
    status = g2z_trainer_read(tt.trainer, G2Z_BUFFER_GRADS, 0, *count, grads);
  }
  test_trainer_close(&tt);
  return status;
}

/* A rank alone rounds the head's part of wte's gradient at once: the same bits in every stage, and
 * what fp32 gives to within two roundings. */
static void test_zero_alone(g2z_test *t) {
  static const g2z_dtype dtypes[] = {G2Z_FP16, G2Z_BF16};
  static float wide[1 << 17], first[1 << 17], grads[1 << 17];
  for (int i = 0; i < 2; i++) {
    double unit = dtypes[i] == G2Z_FP16 ? 0x1p-11 : 0x1p-8, apart2 = 0, size2 = 0;
    for (int column = -1; column < ZERO_COLUMNS; column++) {
      int apart = 0;
      size_t n = 0;
      g2z_train_config config = zero_config(ZERO_COLUMNS, 0, 1, dtypes[i]); /* stage 0, many words */
      config.batch = 15; /* 240 tokens: one chunk */
      config.optimizer.lr = config.optimizer.min_lr = 1e-9f;
      config.grad_fp32 = column < 0;
      config.zero_stage = column > 0 && column < ZERO_DP ? column : 0;
      config.strategy = column == ZERO_DP ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
      CHECK_OK(t, zero_alone_grads(t, &config, &apart, column < 0 ? wide : grads, 1 << 17, &n));
      CHECK(t, apart == (column >= 0) && n > 0 && n < 1 << 17);
      if (column == 0) memcpy(first, grads, sizeof first);
      if (column > 0) CHECK(t, memcmp(grads, first, n * sizeof *grads) == 0);
      for (size_t k = 0; k < n && column == 0; k++) {
        double difference = (double)first[k] - (double)wide[k];
        apart2 += difference * difference;
        size2 += (double)wide[k] * (double)wide[k];
      }
    }
    CHECK(t, size2 > 0 && sqrt(apart2) <= 2 * unit * sqrt(size2));
  }
}

static void test_zero_equal(g2z_test *t) {
  test_zero_dtype(t, 0, G2Z_FP32, 2, 4);
}

static void test_zero_halves(g2z_test *t) {
  test_zero_dtype(t, 0, G2Z_FP16, 2, 3);
  test_zero_dtype(t, 0, G2Z_BF16, 2, 2);
}

/* Stage 3 gathers a block while the one before it is computed with, none more often than needed. */
static void test_zero_turns(g2z_test *t) {
  for (int accum = 0; accum < 2; accum++) {
    char arguments[64];
    test_ranks ranks;
    snprintf(arguments, sizeof arguments, "turns %d", 3 + 3 * ZERO_COLUMNS * accum);
    test_ranks_open(&ranks, 2);
    test_ranks_start(t, &ranks, 0, 1, NULL, arguments);
    test_ranks_wait(t, &ranks, 60);
    for (int r = 0; r < 2; r++) CHECK_RANK(t, &ranks, r, 0, " 0 wrong");
    test_ranks_free(t, &ranks);
  }
}

/* Activations made again change no bit on two ranks either, in any column and with any bucket: the
 * algorithms of products depend on their shapes alone, as tune is off. */
static void test_zero_recompute_on(g2z_test *t, int device, g2z_dtype dtype) {
  static float kept[ZERO_CASES][ZERO_STEPS], again[ZERO_CASES][ZERO_STEPS];
  const int cases = 3 * ZERO_COLUMNS; /* those of one micro-step */
  if (!zero_run(t, device, dtype, 2, cases, ZERO_PLAIN, kept) ||
      !zero_run(t, device, dtype, 2, cases, ZERO_RECOMPUTE, again))
    return;
  CHECK_NEAR(t, zero_worst(again, kept, cases), 0, 0);
}

static void test_zero_recompute(g2z_test *t) { test_zero_recompute_on(t, 0, G2Z_FP16); }

/* What befalls one rank is returned by all, from the same step, with the same sentence. */
static void test_zero_trouble_on(g2z_test *t, int device, int world) {
  static const struct { const char *kind, *says; } cases[] = {
      {"token", "step 6 status 1, from what was saved 0: rank 1: token=61 at position 17"},
      {"stop", "step 6 status 8, from what was saved 0: a stop was requested: step 5 was the "},
      {"validation", "step 10 status 0, from what was saved 0: rank 1: "}};
  int32_t ids[1600];
  g2z_shard_writer *writer = NULL;
  test_tokens(ids, 1600, 61, 3);
  REQUIRE_OK(t, g2z_shard_writer_create(&t->services, test_path(t, "val.bin"), G2Z_SHARD_LLMC,
                                        &writer));
  CHECK_OK(t, g2z_shard_writer_append(writer, ids, 1600));
  CHECK_OK(t, g2z_shard_writer_commit(writer));
  g2z_shard_writer_free(writer);
  for (int i = 0; i < 9; i++) { /* in stages 2 and 3, and strategy dp */
    char arguments[512];
    test_ranks ranks;
    snprintf(arguments, sizeof arguments, "trouble %s %d %d %s", cases[i / 3].kind, device,
             2 + i % 3, test_path(t, "val.bin"));
    test_ranks_open(&ranks, world);
    test_ranks_start(t, &ranks, 0, world - 1, NULL, arguments);
    test_ranks_wait(t, &ranks, 60);
    for (int r = 0; r < world; r++) CHECK_RANK(t, &ranks, r, 0, cases[i / 3].says);
    test_ranks_free(t, &ranks);
  }
}

static void test_zero_trouble(g2z_test *t) { test_zero_trouble_on(t, 0, 3); }

/* The comparison above sees a gather, rows or a reduction that is left out once in a run of twenty
 * steps. Where none is there to be left out, no bit changes: stage 0 gathers nothing, and the first
 * half of the cases sends no rows. Rows are left out in host memory, so on a CPU alone. */
static void test_zero_fault_on(g2z_test *t, int device, g2z_dtype dtype) {
  static float right[ZERO_CASES][ZERO_STEPS], wrong[ZERO_CASES][ZERO_STEPS];
  static float one[ZERO_CASES][ZERO_STEPS];
  const int cases = 2 * ZERO_COLUMNS;
  if (!zero_run(t, device, dtype, 2, cases, ZERO_PLAIN, right) ||
      !zero_run(t, device, dtype, 1, cases, ZERO_LIKE + 2, one))
    return;
  double bound = zero_bound(t, device, dtype, 2, cases, one);
  for (int how = ZERO_FAULT; how <= ZERO_FAULT_REDUCE; how++) {
    if (device && how == ZERO_FAULT_ROWS) continue;
    if (!zero_run(t, device, dtype, 2, cases, how, wrong)) return;
    for (int i = 0; i < cases; i++) {
      int clean = (how == ZERO_FAULT && i % ZERO_COLUMNS == 0) ||
                  (how == ZERO_FAULT_ROWS && i < ZERO_COLUMNS);
      CHECK(t, clean ? memcmp(wrong[i], right[i], sizeof wrong[i]) == 0
                     : zero_worst(wrong + i, right + i, 1) > 2 * bound);
    }
  }
}

/* On GPUs, through NCCL and copies. */
static void test_cuda_zero(g2z_test *t) {
  int count = 0;
#if defined(__CUDACC__)
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
#endif
  if (count < 2) {
    snprintf(t->skip, sizeof t->skip, "needs two GPUs, %d are here", count);
    return;
  }
  int world = count >= 8 ? 8 : count >= 4 ? 4 : 2;
  test_zero_dtype(t, 1, G2Z_FP32, world, world);
  test_zero_dtype(t, 1, G2Z_FP16, world, world);
  test_zero_recompute_on(t, 1, G2Z_FP16);
  test_zero_fault_on(t, 1, G2Z_FP16);
  test_zero_trouble_on(t, 1, world);
}

static void test_zero_fault(g2z_test *t) {
  test_zero_fault_on(t, 0, G2Z_FP32);
  test_zero_fault_on(t, 0, G2Z_FP16);
}

/* ----- checkpoints --------------------------------------------------------------------------- */

static void test_crc32c(g2z_test *t) {
  g2z__crc crc;
  unsigned char bytes[300];
  g2z__crc_init(&crc);
  CHECK(t, g2z__crc32c(&crc, 0, "123456789", 9) == 0xe3069283u);
  memset(bytes, 0, 32); /* RFC 3720, B.4 */
  CHECK(t, g2z__crc32c(&crc, 0, bytes, 32) == 0x8a9136aau);
  memset(bytes, 0xff, 32);
  CHECK(t, g2z__crc32c(&crc, 0, bytes, 32) == 0x62a8ab43u);
  uint32_t random = 7;
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)test_bpe_random(&random);
  for (size_t first = 0; first < 40; first++) /* in pieces, and by tables */
    for (size_t end = first; end < sizeof bytes; end += 7) {
      size_t cut = first + (end - first) / 3;
      uint32_t whole = g2z__crc32c(&crc, 0, bytes + first, end - first);
      uint32_t part = g2z__crc32c(&crc, 0, bytes + first, cut - first);
      CHECK(t, g2z__crc32c(&crc, part, bytes + cut, end - cut) == whole);
      CHECK(t, g2z__crc_tables(&crc, 0, bytes + first, end - first) == whole);
    }
}

/* A tiny model that reads "digits.bin": 125 sequences of 16. The caller frees with
 * test_trainer_close. */
static g2z_train_config test_saved_config(g2z_test *t, char shard[512]) {
  g2z_train_config config = test_config_of(1, 1, 16, 16, 257);
  snprintf(shard, 512, "%s", test_path(t, "digits.bin"));
  if (access(shard, R_OK) != 0) test_run_shard(t, "digits.bin", 2001);
  config.train_glob = shard;
  config.optimizer.lr = 1e-2f;
  config.optimizer.warmup = 2;
  config.optimizer.steps = 40;
  return config;
}

/* Steps until `steps` are done; losses by step, from 1. */
static void test_saved_steps(g2z_test *t, g2z_trainer *trainer, int64_t steps, float *losses,
                             g2z_report *last) {
  g2z_report report;
  CHECK_OK(t, g2z_trainer_flush(trainer, &report));
  while (report.step < steps) {
    CHECK_OK(t, g2z_trainer_step(trainer, &report));
    if (report.step == 0) return; /* it failed */
    losses[report.loss_step] = report.loss;
  }
  CHECK_OK(t, g2z_trainer_flush(trainer, &report));
  losses[report.loss_step] = report.loss;
  if (last) *last = report;
}

/* Gives a file of a checkpoint, and its trainer_state.json, the checksums that they would have if
 * they had been saved like that. */
static void test_saved_sign(g2z_test *t, const char *directory, const char *name) {
  g2z__crc crc;
  char path[700], entry[80];
  size_t bytes = 0, file_bytes = 0;
  char *text = test_run_read(t, directory, "trainer_state.json", &bytes);
  char *file = test_run_read(t, directory, name, &file_bytes);
  g2z__crc_init(&crc);
  snprintf(entry, sizeof entry, "\"name\": \"%s\"", name);
  char *at = text && file ? strstr(text, entry) : NULL;
  char *end = at ? strchr(at, ']') : NULL;
  CHECK(t, end != NULL);
  for (at = at ? strchr(at, '[') : NULL; at && end && (at = strchr(at, '"')) && at < end;) {
    size_t begin, count;
    int digits;
    CHECK(t, sscanf(at, "\"%zu %zu %n", &begin, &count, &digits) == 2 &&
                 begin + count <= file_bytes);
    snprintf(entry, 9, "%08" PRIx32, g2z__crc32c(&crc, 0, file + begin, count));
    memcpy(at + digits, entry, 8);
    at += digits + 9;
  }
  if (text) {
    snprintf(entry, 9, "%08" PRIx32, g2z__crc32c(&crc, 0, text, bytes - G2Z__SAVED_TAIL_BYTES));
    memcpy(text + bytes - G2Z__SAVED_TAIL_BYTES, entry, 8);
    snprintf(path, sizeof path, "%s/trainer_state.json", directory);
    test_write_file(t, path, text, bytes);
  }
  g2z_release(&t->services, text);
  g2z_release(&t->services, file);
}

/* In DIRECTORY/name the first `from` becomes `to`, which is as long. */
static void test_saved_replace(g2z_test *t, const char *directory, const char *name,
                               const char *from, const char *to) {
  char path[700];
  size_t bytes = 0;
  char *text = test_run_read(t, directory, name, &bytes);
  void *at = text ? memmem(text, bytes, from, strlen(from)) : NULL;
  CHECK(t, at != NULL && strlen(from) == strlen(to));
  if (at) memcpy(at, to, strlen(to));
  snprintf(path, sizeof path, "%s/%s", directory, name);
  test_write_file(t, path, text, bytes);
  g2z_release(&t->services, text);
}

/* Both directories hold the same files with the same bytes. */
static void test_saved_equal(g2z_test *t, const char *one, const char *two) {
  static const char *const names[] = {"model.safetensors", "config.json", "tuning.txt",
                                      "optimizer-00000-of-00001.safetensors",
                                      "trainer_state.json"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    size_t bytes[2] = {0, 0};
    char *left = test_run_read(t, one, names[i], &bytes[0]);
    char *right = test_run_read(t, two, names[i], &bytes[1]);
    t->checks++;
    if (left && right && (bytes[0] != bytes[1] || memcmp(left, right, bytes[0]) != 0))
      test_fail(t, __FILE__, __LINE__, "%s and %s differ in %s", one, two, names[i]);
    g2z_release(&t->services, left);
    g2z_release(&t->services, right);
  }
}

/* What is read from a checkpoint goes on as if nothing had happened, to the bit. */
static void test_checkpoint_resume(g2z_test *t) {
  enum { SAVE = 9, STEPS = 24 };
  for (int i = 0; i < 6; i++) {
    char shard[512], at[512], end[512], again[512];
    float losses[STEPS + 1] = {0}, resumed[STEPS + 1] = {0};
    g2z_train_config config = test_saved_config(t, shard);
    test_trainer tt;
    g2z_report middle, last;
    memset(&middle, 0, sizeof middle);
    memset(&last, 0, sizeof last);
    config.dtype = i % 3 == 0 ? G2Z_FP32 : i % 3 == 1 ? G2Z_FP16 : G2Z_BF16;
    config.dropout = i < 3 ? 0.1f : 0;
    config.accum = 1 + i % 2;
    config.model.layers = 1 + i % 2;
    config.zero_stage = i % 4;
    config.bucket_mb = i < 4 ? 0.004 : 0;
    config.optimizer.loss_scale = 16777216;  /* overflows, halves, */
    config.optimizer.loss_scale_window = 4;  /* and doubles until it overflows again */
    snprintf(at, sizeof at, "%s_%d", test_path(t, "at"), i);
    snprintf(end, sizeof end, "%s_%d", test_path(t, "end"), i);
    snprintf(again, sizeof again, "%s_%d", test_path(t, "again"), i);
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    test_saved_steps(t, tt.trainer, SAVE, losses, &middle);
    CHECK_OK(t, g2z_trainer_save(tt.trainer, at));
    test_saved_steps(t, tt.trainer, STEPS, losses, &last);
    CHECK_OK(t, g2z_trainer_save(tt.trainer, end));
    test_trainer_close(&tt);
    if (config.dtype == G2Z_FP16) {
      CHECK(t, middle.skipped_total > 0 && last.skipped_total > middle.skipped_total);
      CHECK(t, last.applied > middle.applied + 4);
    }
    config.seed = 1337;
    config.recompute = i % 2 ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE; /* no part of the state */
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    if (i % 2) { /* of what was, nothing is left; nor that it was stopped */
      g2z_status status = G2Z_OK;
      test_saved_steps(t, tt.trainer, 2, resumed, NULL);
      g2z_trainer_request_stop(tt.trainer);
      for (int n = 0; n < 4 && status == G2Z_OK; n++)
        status = g2z_trainer_step(tt.trainer, &middle);
      CHECK_STATUS(t, status, G2Z_STOPPED, &t->services, "a stop was requested: step 4 was the");
    }
    CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
    test_saved_steps(t, tt.trainer, STEPS, resumed, NULL);
    CHECK_OK(t, g2z_trainer_save(tt.trainer, again));
    CHECK(t, losses[STEPS] > 0);
    CHECK(t, memcmp(losses + SAVE, resumed + SAVE, (STEPS - SAVE + 1) * sizeof(float)) == 0);
    test_saved_equal(t, end, again);
    test_trainer_close(&tt);
  }
}

/* Another stage, bucket size, type, global batch: the same state. */
static void test_checkpoint_reshaped(g2z_test *t) {
  char shard[512], at[512];
  float losses[32], *was = (float *)malloc(3 * 20000 * sizeof(float)),
                    *is = (float *)malloc(3 * 20000 * sizeof(float));
  g2z_train_config config = test_saved_config(t, shard);
  test_trainer tt;
  g2z_report report;
  snprintf(at, sizeof at, "%s", test_path(t, "at"));
  config.bucket_mb = 0.003;
  config.dtype = G2Z_FP16;
  config.optimizer.loss_scale = 4096;
  config.batch = 3; /* 41 steps of 3 in an epoch of 125 */
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  test_saved_steps(t, tt.trainer, 7, losses, NULL);
  size_t P = g2z_trainer_plan(tt.trainer)->parameters;
  CHECK(t, P <= 20000);
  if (P > 20000) P = 20000;
  for (int b = 0; b < 3; b++)
    CHECK_OK(t, g2z_trainer_read(tt.trainer, (g2z_buffer)b, 0, P, was + (size_t)b * P));
  CHECK_OK(t, g2z_trainer_save(tt.trainer, at));
  test_trainer_close(&tt);
  for (int i = 0; i < 5; i++) {
    static const struct { int batch, accum; int64_t step; } shapes[] = {
        {3, 1, 7}, {1, 1, 21}, {5, 1, 4}, {4, 2, 2}, {10, 2, 1}}; /* 21 sequences were read */
    config.zero_stage = i % 4;
    config.strategy = i == 4 ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
    config.bucket_mb = 0.001 * (1 << i);
    config.dtype = i % 2 ? G2Z_FP32 : G2Z_FP16;
    config.batch = shapes[i].batch;
    config.accum = shapes[i].accum;
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
    for (int b = 0; b < 3; b++)
      CHECK_OK(t, g2z_trainer_read(tt.trainer, (g2z_buffer)b, 0, P, is + (size_t)b * P));
    CHECK(t, memcmp(was, is, 3 * P * sizeof(float)) == 0);
    g2z_loader_position position = g2z_loader_tell(g2z_trainer_loader(tt.trainer));
    CHECK(t, position.epoch == 0 && position.step == shapes[i].step);
    CHECK_OK(t, g2z_trainer_step(tt.trainer, &report));
    CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
    CHECK(t, report.step == 8 && report.applied == 8);
    CHECK(t, report.loss_scale == (i % 2 ? 1.0f : 4096.0f) && report.loss < losses[7] + 0.5f);
    test_trainer_close(&tt);
  }
  config.train_glob = NULL; /* the caller brings the data */
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
  test_trainer_close(&tt);
  test_run_shard(t, "other.bin", 1000); /* other data: the epoch starts over */
  snprintf(shard, sizeof shard, "%s", test_path(t, "other.bin"));
  config.train_glob = shard;
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
  CHECK(t, g2z_loader_tell(g2z_trainer_loader(tt.trainer)).step == 0);
  test_trainer_close(&tt);
  /* As many sequences: it goes on where they are the same, by whatever name, and where a checkpoint
   * does not say which they were. */
  for (int i = 0; i < 3; i++) {
    const size_t ends[] = {0, 1024, 1024 + 2 * 2000}; /* the first token, the last */
    test_run_shard(t, "other.bin", 2001);
    if (i) test_files_poke(t, shard, ends[i], '7');
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
    CHECK(t, g2z_loader_tell(g2z_trainer_loader(tt.trainer)).step == (i ? 0 : 1));
    test_trainer_close(&tt);
  }
  test_saved_replace(t, at, "trainer_state.json", "\"data\": ", "\"date\": ");
  test_saved_sign(t, at, "config.json");
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
  CHECK(t, g2z_loader_tell(g2z_trainer_loader(tt.trainer)).step == 1);
  test_trainer_close(&tt);
  for (int dynamic = 0; dynamic < 2; dynamic++) { /* a fixed scale is not one that was found */
    snprintf(at, sizeof at, "%s", test_path(t, "fixed"));
    config.dtype = G2Z_FP16;
    config.optimizer.loss_scale = dynamic ? 4096 : 64;
    config.optimizer.loss_scale_dynamic = dynamic;
    config.optimizer.loss_scale_window = 2; /* good steps with the fixed scale do not count */
    REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
    if (dynamic) CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
    for (int step = 0; step < (dynamic ? 2 : 3); step++)
      CHECK_OK(t, g2z_trainer_step(tt.trainer, &report));
    CHECK_OK(t, g2z_trainer_flush(tt.trainer, &report));
    CHECK(t, report.loss_scale == config.optimizer.loss_scale);
    if (!dynamic) CHECK_OK(t, g2z_trainer_save(tt.trainer, at));
    test_trainer_close(&tt);
  }
  free(was);
  free(is);
}

/* Every flipped bit, every missing byte and every missing file is found, and the trainer is as it
 * was. */
static void test_checkpoint_damage(g2z_test *t) {
  static const char *const names[] = {"trainer_state.json", "config.json", "model.safetensors",
                                      "optimizer-00000-of-00001.safetensors"};
  char at[512], path[700], moved[720];
  float losses[16] = {0}, after[16] = {0};
  g2z_train_config config = test_config_of(1, 1, 8, 8, 61);
  test_trainer tt;
  int32_t x[16], y[16];
  test_tokens(x, 16, 61, 5);
  test_tokens(y, 16, 61, 6);
  snprintf(at, sizeof at, "%s", test_path(t, "at"));
  config.seq = config.model.context = 8;
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  test_steps(t, tt.trainer, x, y, 3, losses, NULL);
  CHECK_OK(t, g2z_trainer_save(tt.trainer, at));
  test_steps(t, tt.trainer, x, y, 1, losses, NULL);
  int flips = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    size_t bytes = 0;
    char *text = test_run_read(t, at, names[i], &bytes);
    snprintf(path, sizeof path, "%s/%s", at, names[i]);
    for (size_t byte = 0; byte < bytes; byte++, flips++) {
      char flipped = (char)(text[byte] ^ (1 << byte % 8));
      test_files_poke(t, path, byte, flipped);
      g2z_status status = g2z_trainer_load(tt.trainer, at);
      t->checks++;
      if (status != G2Z_FORMAT || !strstr(t->services.error, at))
        test_fail(t, __FILE__, __LINE__, "bit %d of byte %zu of %s: %s", (int)(byte % 8), byte,
                  names[i], t->services.error);
      test_files_poke(t, path, byte, text[byte]);
    }
    for (size_t keep = 0; keep < bytes; keep += 1 + (bytes - keep) / 9) {
      CHECK(t, truncate(path, (off_t)keep) == 0);
      CHECK(t, g2z_trainer_load(tt.trainer, at) == G2Z_FORMAT);
    }
    CHECK_STATUS(t, g2z_trainer_load(tt.trainer, at), G2Z_FORMAT, &t->services, names[i]);
    test_write_file(t, path, text, bytes);
    snprintf(moved, sizeof moved, "%.700s.away", path);
    CHECK(t, rename(path, moved) == 0);
    CHECK_STATUS(t, g2z_trainer_load(tt.trainer, at), G2Z_FORMAT, &t->services,
                 i ? "which belongs to it" : "no trainer_state.json");
    CHECK(t, rename(moved, path) == 0);
    g2z_release(&t->services, text);
  }
  CHECK(t, flips > 20000);
  test_steps(t, tt.trainer, x, y, 2, losses, NULL);
  test_trainer_close(&tt);
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt)); /* none of that has left a trace */
  CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
  test_steps(t, tt.trainer, x, y, 1, after, NULL);
  test_steps(t, tt.trainer, x, y, 2, after, NULL);
  CHECK(t, losses[0] > 0 && memcmp(losses, after, 2 * sizeof(float)) == 0);
  test_trainer_close(&tt);
}

/* What is whole and does not fit. */
static void test_checkpoint_refused(g2z_test *t) {
  static const char optimizer[] = "optimizer-00000-of-00001.safetensors";
  char shard[512], at[512];
  float losses[16];
  g2z_train_config config = test_saved_config(t, shard), other;
  test_trainer tt;
  snprintf(at, sizeof at, "%s", test_path(t, "at"));
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  test_saved_steps(t, tt.trainer, 2, losses, NULL);
  CHECK_OK(t, g2z_trainer_save(tt.trainer, at));
#define LOAD(part) CHECK_STATUS(t, g2z_trainer_load(tt.trainer, at), G2Z_FORMAT, &t->services, part)
  CHECK_STATUS(t, g2z_trainer_save(tt.trainer, at), G2Z_BAD_ARGUMENT, &t->services,
               "at exists already: remove it, or save under another name");
  CHECK(t, test_files_count(t, "at") == 1);
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, test_path(t, "none")), G2Z_IO, &t->services,
               "cannot open the checkpoint");
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, t->directory), G2Z_FORMAT, &t->services,
               "no trainer_state.json, so it is no checkpoint: name a step-NNNNNN");
  CHECK_OK(t, g2z_trainer_save_weights(tt.trainer, test_path(t, "weights")));
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, test_path(t, "weights")), G2Z_FORMAT, &t->services,
               "has weights but no trainer_state.json");
  CHECK(t, rename(at, test_path(t, "at.partial")) == 0);
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, test_path(t, "at.partial")), G2Z_FORMAT,
               &t->services, "was being written when the run ended");
  CHECK(t, rename(test_path(t, "at.partial"), at) == 0);

  test_saved_replace(t, at, "trainer_state.json", "\"version\": 1", "\"version\": 7");
  LOAD("has version=7 of the format, and this program reads version 1");
  test_saved_replace(t, at, "trainer_state.json", "\"version\": 7", "\"version\": 1");
  test_saved_replace(t, at, "trainer_state.json", "gpt2_zero ch", "gpt3_zero ch");
  LOAD("does not begin as the state of a checkpoint does");
  test_saved_replace(t, at, "trainer_state.json", "gpt3_zero ch", "gpt2_zero ch");
  CHECK_OK(t, g2z_trainer_load(tt.trainer, at));

  test_saved_replace(t, at, optimizer, "m.0000000000", "m.0000000008");
  test_saved_sign(t, at, optimizer);
  LOAD("\"m.0000000008\" with 7680 elements leaves a gap from element 0 of 7680");
  test_saved_replace(t, at, optimizer, "m.0000000008", "v.0000000008");
  test_saved_sign(t, at, optimizer);
  LOAD("hold m up to element 0 of 7680: a file is missing");
  test_saved_replace(t, at, optimizer, "v.0000000008", "w.0000000008");
  test_saved_sign(t, at, optimizer);
  LOAD("tensor \"w.0000000008\" is no range of m or v in F32");
  test_saved_replace(t, at, optimizer, "w.0000000008", "m.0000000000");
  test_saved_sign(t, at, optimizer);
  CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
  test_saved_replace(t, at, "trainer_state.json", "\"optimizer-0", "\"optimizes-0");
  test_saved_sign(t, at, "config.json");
  LOAD("stands where optimizer-00000-of-00001.safetensors must");
#undef LOAD
  test_saved_replace(t, at, "trainer_state.json", "\"optimizes-0", "\"optimizer-0");
  test_saved_sign(t, at, "config.json");
  test_trainer_close(&tt);

  other = config;
  other.model.layers = 2;
  REQUIRE_OK(t, test_trainer_open(t, &other, &tt));
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, at), G2Z_BAD_ARGUMENT, &t->services,
               "at was saved by a model with layers=1, and this one has layers=2");
  test_trainer_close(&tt);
  other = config;
  other.model.vocab = 300;
  REQUIRE_OK(t, test_trainer_open(t, &other, &tt));
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, at), G2Z_BAD_ARGUMENT, &t->services, "vocab=257");
  test_trainer_close(&tt);
}

/* Full disks, permissions and memory: a sentence, nothing left, and the training goes on. */
static void test_checkpoint_trouble(g2z_test *t) {
  char shard[512], at[512];
  float losses[16] = {0};
  g2z_train_config config = test_saved_config(t, shard);
  test_trainer tt;
  snprintf(at, sizeof at, "%s", test_path(t, "at"));
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  test_saved_steps(t, tt.trainer, 2, losses, NULL);
  static const rlim_t limits[] = {100, 1000, 3000, 20000, 40000};
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) { /* each file in its turn */
    struct rlimit before = test_files_limit(limits[i]);
    g2z_status status = g2z_trainer_save(tt.trainer, at);
    test_files_unlimit(&before);
    CHECK_STATUS(t, status, G2Z_IO, &t->services, "raise the limit of file sizes");
    CHECK(t, test_files_count(t, "at") == 0);
  }
  uid_t self = geteuid();
  CHECK(t, chmod(t->directory, 0555) == 0);
  if (self != 0 || seteuid(65534) == 0) {
    CHECK_STATUS(t, g2z_trainer_save(tt.trainer, at), G2Z_IO, &t->services,
                 "cannot create the directory");
    CHECK(t, seteuid(self) == 0);
  }
  CHECK(t, chmod(t->directory, 0700) == 0);
  g2z_status status = G2Z_NO_MEMORY;
  int failed = 0;
  for (long n = 1; n < 1000 && status == G2Z_NO_MEMORY; n++) {
    t->fail_at = n;
    status = g2z_trainer_save(tt.trainer, at);
    t->fail_at = 0;
    failed += status == G2Z_NO_MEMORY;
    CHECK(t, status == G2Z_OK || test_files_count(t, "at") == 0);
  }
  CHECK(t, status == G2Z_OK && failed > 20);
  status = G2Z_NO_MEMORY;
  failed = 0;
  for (long n = 1; n < 1000 && status == G2Z_NO_MEMORY; n++) {
    t->fail_at = n;
    status = g2z_trainer_load(tt.trainer, at);
    t->fail_at = 0;
    failed += status == G2Z_NO_MEMORY;
  }
  CHECK(t, status == G2Z_OK && failed > 20);
  test_saved_steps(t, tt.trainer, 4, losses, NULL);
  CHECK(t, losses[4] > 0 && losses[4] < losses[1] + 1);
  snprintf(at, sizeof at, "%s//", test_path(t, "slashes")); /* as a shell completes a name */
  CHECK_OK(t, g2z_trainer_save(tt.trainer, at));
  CHECK_OK(t, g2z_trainer_load(tt.trainer, at));
  CHECK(t, test_files_count(t, "slashes") == 1 && test_files_count(t, "slashes/.partial") == 0);
  test_trainer_close(&tt);
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

/* A shell command on paths of the test. */
static void test_sh(g2z_test *t, const char *format, const char *one, const char *two) {
  char command[2048];
  CHECK(t, snprintf(command, sizeof command, format, one, two) < (int)sizeof command);
  fflush(stdout);
  CHECK(t, system(command) == 0);
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
  test_sh(t, "cd '%s' && for f in weights step-000008; do diff -r $f '%s'/$f || exit 1; done",
             a.run_dir, b.run_dir);
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
  test_sh(t, "diff -r '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);

  /* A run that ended has nothing to do; a longer one goes on. */
  b.config.resume = "latest";
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 0 && seen.done && access(test_path(t, "b/RUN_COMPLETE.txt"), F_OK) == 0);
  log = test_run_read(t, b.run_dir, "train.log", &bytes);
  CHECK(t, test_times(log, "no step is left: the last is 8, and the checkpoint is of step 8; a "
                           "larger epochs=2 goes on") == 1);
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
  test_sh(t, "diff -r '%s'/step-000006 '%s'/../moved", a.run_dir, b.run_dir);

  /* A checkpoint of another directory begins a run of its own. */
  test_run_saves(t, &b, "c");
  snprintf(path, sizeof path, "%s/step-000006", a.run_dir);
  b.config.resume = path;
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, seen.steps == 2 && seen.last_step == 8);
  test_sh(t, "diff -r '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);
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
  test_sh(t, "diff -r '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);

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
  CHECK(t, test_times(log, "no checkpoint in ") == 2 && test_times(log, "step 1/8 | loss") == 1);
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
  /* Torn behind the checkpoint's step: nothing is missing. */
  test_run_copy(t, a.run_dir, b.run_dir, "printf '{\"step\": 8, \"val' >> metrics.jsonl");
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  CHECK(t, strstr(test_run_warning, "b/metrics.jsonl, line ") != NULL);
  CHECK(t, strstr(test_run_warning, " is torn, and is cut off") != NULL);
  t->services.log = NULL;
  test_runs_equal(t, a.run_dir, b.run_dir);
  /* Damage before the last line names the line, and touches nothing. */
  static const char *const damages[] = {"sed -i '3s/:/;/' metrics.jsonl",
                                        "sed -i '3s/.*/{\"loss\": 1}/' metrics.jsonl",
                                        "sed -i '3s/.*//' metrics.jsonl"};
  for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
    test_run_copy(t, a.run_dir, b.run_dir, damages[i]);
    test_sh(t, "cp '%s/metrics.jsonl' '%s/damaged'", b.run_dir, t->directory);
    snprintf(part, sizeof part, "mend it, or delete it: sed -i 3d %.200s/metrics.jsonl", b.run_dir);
    CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_FORMAT, &t->services, part);
    CHECK(t, strstr(t->services.error, "b/metrics.jsonl, line 3: ") != NULL);
    test_sh(t, "cmp '%s/metrics.jsonl' '%s/damaged'", b.run_dir, t->directory);
  }
  /* The remedy, as the sentence says it, for a line that no sum is made of. */
  char *text = test_run_read(t, a.run_dir, "metrics.jsonl", &bytes);
  int line = 1;
  const char *saved = text ? strstr(text, "\"save_ms\"") : NULL;
  for (const char *c = text; saved && c < saved; c++) line += *c == '\n';
  g2z_release(&t->services, text);
  snprintf(part, sizeof part, "sed -i '%ds/{/[/' metrics.jsonl", line);
  test_run_copy(t, a.run_dir, b.run_dir, part);
  snprintf(part, sizeof part, "line %d: ", line);
  CHECK_STATUS(t, test_run_all(t, &b.config, &seen), G2Z_FORMAT, &t->services, part);
  const char *remedy = strstr(t->services.error, "sed -i");
  snprintf(part, sizeof part, "%s", remedy ? remedy : "false");
  test_sh(t, "%s && true '%s'", part, "");
  CHECK_OK(t, test_run_all(t, &b.config, &seen));
  test_runs_equal(t, a.run_dir, b.run_dir);
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
    test_sh(t, "diff -r '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);
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
    test_sh(t, "diff -r '%s'/step-000008 '%s'/step-000008", a.run_dir, b.run_dir);
    test_sh(t, "diff -r '%s'/weights '%s'/weights", a.run_dir, b.run_dir);
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
  test_sh(t, "diff -r '%s' '%s'", test_path(t, "whole/step-000060"),
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
        CHECK_RANK(t, &ranks, r, 0, r ? NULL : "/step-000012 world_size="); /* the checkpoint */
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
      if (turn == 0) test_sh(t, "diff -r '%s' '%s'", test_path(t, from), again);
      free(again);
    }
  }

  /* One rank's file twice, with checksums that are right; and one that is missing. Ranks 1 and 2
   * own as much of what pads wte, so their files are as long. */
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
               "/optimizer-00002-of-00004.safetensors: bytes 0 to ");
  test_saved_sign(t, base, "optimizer-00002-of-00004.safetensors");
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, base), G2Z_FORMAT, &t->services, " overlaps others");
  test_sh(t, "rm '%s/optimizer-00003-of-00004%s'", base, ".safetensors");
  CHECK_STATUS(t, g2z_trainer_load(tt.trainer, base), G2Z_FORMAT, &t->services,
               "has no optimizer-00003-of-00004.safetensors, which belongs to it");
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
  test_sh(t, "diff -r '%s' '%s'", test_path(t, "whole/step-000080"),
          test_path(t, "killed/step-000080"));
  test_runs_equal(t, test_path(t, "whole"), test_path(t, "killed"));
}

/* ----- tests of pages: reports, events, profiles -------------------------- */

/* How often `part` stands in `text`. */
static int test_page_count(const char *text, const char *part) {
  int count = 0;
  for (const char *at = text; at && (at = strstr(at, part)) != NULL; at += strlen(part)) count++;
  return count;
}

/* A page with everything that pages have: `count` points of a noisy curve, a spike, a gap. */
static g2z_status test_page_write(g2z_test *t, const char *path, size_t count) {
  static const char *const headers[] = {"GPUs", "tok/s"}, *const labels[] = {"<zero> 0", "zero 1"};
  static double x[20000], y[20000], bars[2] = {3, NAN}, high[2] = {4, 5};
  g2z_series series[2];
  g2z_chart chart;
  g2z_page *page;
  memset(series, 0, sizeof series);
  memset(&chart, 0, sizeof chart);
  for (size_t i = 0; i < count; i++) {
    x[i] = (double)i;
    y[i] = i == count / 2 ? 77 : i > count - 4 && i < count - 1 ? NAN : 3 + 0.1 * sin((double)i);
  }
  G2Z__TRY(g2z_page_create(&t->services, path, "a < b & \"c\" \x1b\xff", &page));
  g2z_page_fact(page, "machine", "%d x %s", 8, "<script>");
  g2z_page_text(page, "%s", "it's");
  g2z_page_table(page, NULL, 2, headers);
  g2z_page_cell(page, "%d", 1);
  g2z_page_cell(page, "%s", "");
  series[0].name = "measured";
  series[0].x = x;
  series[0].y = y;
  series[0].count = count;
  series[1] = series[0];
  series[1].mark = G2Z_MARK_POINTS;
  series[1].count = 3;
  chart.title = "Loss";
  chart.series = series;
  chart.series_count = 2;
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
  char path[512];
  size_t bytes = 0;
  snprintf(path, sizeof path, "%s", test_path(t, "page.html"));
  CHECK_OK(t, test_page_write(t, path, 20000));
  char *text = test_run_read(t, t->directory, "page.html", &bytes);
  if (!text) return;
  CHECK(t, strstr(text, "<h1>a &lt; b &amp; &quot;c&quot; \xef\xbf\xbd\xef\xbf\xbd</h1>") != NULL);
  CHECK(t, strstr(text, "<dd>8 x &lt;script&gt;</dd>") && strstr(text, "<p>it&#39;s</p>"));
  CHECK(t, strstr(text, "<tr><td>1<td>\xe2\x80\x93</tr>") && strstr(text, "&lt;zero&gt; 0</text>"));
  static const char *const pairs[][2] = {{"<dl>", "</dl>"}, {"<table", "</table>"},
                                         {"<svg", "</svg>"}, {"<figure>", "</figure>"},
                                         {"<div", "</div>"}, {"<span", "</span>"},
                                         {"<text", "</text>"}, {"<title>", "</title>"}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    CHECK(t, test_page_count(text, pairs[i][0]) > 0 &&
                 test_page_count(text, pairs[i][0]) == test_page_count(text, pairs[i][1]));
  CHECK(t, !strstr(text, "<script") && !strstr(text, "http") && !strstr(text, "nan"));
  CHECK(t, test_page_count(text, "class=bar") == 1); /* the other one is not known */
  CHECK(t, test_page_count(text, "class=dot") == 3);
  /* Of 20,000 points the spike is left and at most 1,000 are drawn; the gap before the last point
   * parts it from the others. */
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
  g2z_release(&t->services, text);
  CHECK_OK(t, test_page_write(t, path, 900));
  text = test_run_read(t, t->directory, "page.html", &bytes);
  line = text ? strstr(text, "class=\"series") : NULL;
  end = line ? strchr(line, '>') : NULL;
  CHECK(t, end && strncmp(end - 4, "h0\"/", 4) == 0); /* "h0": the last point, alone */
  g2z_release(&t->services, text);
  int failed = 0;
  g2z_status status = G2Z_NO_MEMORY;
  unlink(path);
  for (long at = 1; at < 100 && status == G2Z_NO_MEMORY; at++) {
    t->fail_at = at;
    status = test_page_write(t, path, 10);
    failed += status == G2Z_NO_MEMORY;
    CHECK(t, test_files_count(t, "page.html.partial") == 0);
  }
  t->fail_at = 0;
  CHECK(t, failed > 5 && status == G2Z_OK);
  CHECK_STATUS(t, test_page_write(t, "/nowhere/page.html", 10), G2Z_IO, &t->services, "/nowhere");
}

/* A whisker that reaches beyond the scale of its bars. */
static void test_page_whisker(g2z_test *t) {
  static const double y[] = {1}, low[] = {-1e30};
  static const char *const labels[] = {"one"};
  g2z_series series;
  g2z_chart chart;
  g2z_page *page;
  size_t bytes;
  memset(&series, 0, sizeof series);
  memset(&chart, 0, sizeof chart);
  series.name = chart.title = "bars";
  series.y = series.high = y;
  series.low = low;
  series.count = 1;
  chart.labels = labels;
  chart.series = &series;
  chart.series_count = 1;
  CHECK_OK(t, g2z_page_create(&t->services, test_path(t, "page.html"), "page", &page));
  g2z_page_chart(page, &chart);
  CHECK_OK(t, g2z_page_commit(page));
  g2z_page_free(page);
  char *text = test_run_read(t, t->directory, "page.html", &bytes);
  const char *whisker = text ? strstr(text, "class=whisker d=\"M") : NULL;
  char *end = NULL;
  CHECK(t, whisker && fabs(strtod(whisker + 18, &end)) < 1e6 && *end == ' ');
  g2z_release(&t->services, text);
}

/* Numbers that no scale can be made for must not show, and ticks are round. */
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
               {65536, 65536, G2Z_AXIS_AUTO, "65.54k", "65.54k"},
               {1e-310, 5e-320, G2Z_AXIS_AUTO, "0", "0"},
               {-1e300, INFINITY, G2Z_AXIS_LOG, "0", "1"},
               {3, 20, G2Z_AXIS_LOG, "2", "20"},
               {4.9995, 5.0005, G2Z_AXIS_LOG, "5", "5"},
               {-1, 1, G2Z_AXIS_LOG, "-1", "1"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2zp_extent extent = g2zp_nothing;
    g2zp_scale scale;
    char first[32] = "", last[32] = "";
    g2zp_extent_add(&extent, cases[i].low);
    g2zp_extent_add(&extent, cases[i].high);
    g2zp_extent_add(&extent, NAN);
    g2zp_scale_make(&scale, &extent, cases[i].axis, 1);
    scale.to = 100;
    CHECK(t, scale.ticks > 0 && scale.ticks <= 8);
    g2zp_tick_text(&scale, scale.tick[0], first);
    g2zp_tick_text(&scale, scale.tick[scale.ticks - 1], last);
    t->checks++;
    if (strcmp(first, cases[i].first) != 0 || strcmp(last, cases[i].last) != 0)
      test_fail(t, __FILE__, __LINE__, "%g to %g: ticks from %s to %s", cases[i].low,
                cases[i].high, first, last);
    for (int k = 0; k < scale.ticks; k++) {
      double at = g2zp_scale_at(&scale, scale.tick[k]);
      CHECK(t, at >= -1e-3 && at <= 100.001);
    }
  }
}

/* What test_run_all left, as a page and as events; then each of its files damaged in turn. */
static void test_run_report(g2z_test *t) {
  static const struct {
    const char *name, *text, *want;
  } foreign[] = {
      {"metrics.jsonl", "{\"step\": 1, \"loss\": }\n", "metrics.jsonl, line 1: "},
      {"metrics.jsonl", "{\"step\": 1}\n{\"loss\": 3}\n", "line 2: it has no step"},
      {"metrics.jsonl", "\x7f""ELF\n", "it is damaged, or no run's"},
      {"training_metrics.json", "[]", "must hold an object"},
      {"training_metrics.json", "{\"schema_version\": \"1.0\"}", "schema_version 1.0"},
      {"training_metrics.json", "{\"run_id\": 3}", "schema_version none"},
      {"training_metrics.json", "{\"schema_version\": \"2.0\"", "line 1"},
      {"launcher_metadata.json", "{", "launcher_metadata.json"},
      {"RUN_FAILED.json", "{\"a\" 1}", "RUN_FAILED.json"}};
  test_run_setup s;
  test_run_seen seen;
  size_t bytes = 0;
  char path[700], page[700];
  test_run_prepare(t, &s, "run");
  s.config.train.dtype = G2Z_FP16;
  s.config.command_line = "./train <&> \"x\"";
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  snprintf(page, sizeof page, "%.500s/report.html", s.run_dir);
  char *text = test_run_read(t, s.run_dir, "report.html", &bytes);
  static const char *const parts[] = {
      "<title>Run run</title>", "<dd>completed</dd>",
      "<dd>./train &lt;&amp;&gt; &quot;x&quot;</dd>",
      "<dt>precision</dt><dd>fp16</dd>", "<b>Loss</b>", "<b>Learning rate</b>",
      "<b>Gradient norm</b>", "<b>Throughput</b>", "<dt>loss scale</dt><dd>65536</dd>",
      "<dt>skipped steps</dt><dd>0</dd>", "<dt>planned memory per device, GiB</dt>",
      ">validation</span>", "Where the time went", "<th>training loss"};
  for (size_t i = 0; text && i < sizeof parts / sizeof *parts; i++) {
    t->checks++;
    if (!strstr(text, parts[i])) test_fail(t, __FILE__, __LINE__, "no %s in the page", parts[i]);
  }
  CHECK(t, text && test_page_count(text, "<tr><td>") == 2); /* two epochs */
  g2z_release(&t->services, text);
  for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
    char *before = NULL;
    size_t kept = 0;
    snprintf(path, sizeof path, "%.500s/%s", s.run_dir, foreign[i].name);
    if (access(path, F_OK) == 0) before = test_run_read(t, s.run_dir, foreign[i].name, &kept);
    test_write_file(t, path, foreign[i].text, strlen(foreign[i].text));
    unlink(page);
    CHECK_STATUS(t, g2z_report_run(&t->services, s.run_dir), G2Z_FORMAT, &t->services,
                 foreign[i].want);
    CHECK(t, access(page, F_OK) != 0 && test_files_count(t, "run/*.partial") == 0);
    if (before) test_write_file(t, path, before, kept);
    else unlink(path);
    g2z_release(&t->services, before);
  }
  CHECK_STATUS(t, g2z_report_run(&t->services, t->directory), G2Z_IO, &t->services,
               "metrics.jsonl");
  /* One that has not ended: what it wrote so far, with a line that is being written. */
  snprintf(path, sizeof path, "%.500s/metrics.jsonl", s.run_dir);
  FILE *file = fopen(path, "ab");
  CHECK(t, file && fputs("{\"step\": 9, \"lo", file) > 0 && fclose(file) == 0);
  snprintf(path, sizeof path, "%.500s/training_metrics.json", s.run_dir);
  CHECK(t, unlink(path) == 0);
  CHECK_OK(t, g2z_report_run(&t->services, s.run_dir));
  text = test_run_read(t, s.run_dir, "report.html", &bytes);
  CHECK(t, text && strstr(text, "it had not ended at 2") && strstr(text, "<b>Loss</b>"));
  g2z_release(&t->services, text);
  for (long at = 1, failed = 0;; at++) {
    unlink(page);
    t->fail_at = at;
    g2z_status status = g2z_report_run(&t->services, s.run_dir);
    t->fail_at = 0;
    CHECK(t, test_files_count(t, "run/*.partial") == 0);
    if (status == G2Z_NO_MEMORY && at < 500) failed++;
    else {
      CHECK(t, status == G2Z_OK && failed > 10);
      break;
    }
  }
}

/* A run of 2,000 epochs: a page that reads all of them for each of its 18,000 figures takes 10 s on
 * one core, one that reads each once 0.02 s. The bound lies between, far from both. */
static void test_run_report_epochs(g2z_test *t) {
  enum { EPOCHS = 2000 };
  static const char *const names[] = {
      "tokens_processed_global", "tokens_per_sec_global", "train_loss_avg_global",
      "val_loss_avg_global", "step_time_p95_sec", "epoch_wall_time_sec"};
  g2z_json_out out;
  g2z_writer *writer;
  g2z_run_facts facts;
  size_t bytes;
  memset(&out, 0, sizeof out);
  CHECK_OK(t, g2z_writer_create(&t->services, test_path(t, "metrics.jsonl"), &writer));
  for (int i = 1; i <= 3 * EPOCHS; i++)
    g2z_writer_printf(writer, "{\"step\": %d, \"loss\": 2.5, \"step_ms\": 7}\n", i);
  CHECK_OK(t, g2z_writer_commit(writer));
  g2z_writer_free(writer);
  CHECK_OK(t, g2z_writer_create(&t->services, test_path(t, "training_metrics.json"), &writer));
  out.writer = writer;
  g2z_writer_printf(writer, "{\"schema_version\": \"2.0\", \"run_id\": \"x\", \"hardware\": "
                            "{\"world_size\": 1}, \"summary\": {\"total_wall_time_sec\": 9}, "
                            "\"shutdown\": {\"reason\": \"completed\"}, \"epochs\":");
  g2z_json_begin(&out, NULL, '[');
  for (int i = 0; i < EPOCHS; i++) {
    g2z_json_begin(&out, NULL, '{');
    g2z_json_put_integer(&out, "epoch_idx", i);
    g2z_json_put_integer(&out, "steps", 3);
    g2z_json_put_number(&out, "step_time_p50_sec", 7 + i);
    for (int k = 0; k < 6; k++) g2z_json_put_number(&out, names[k], 1e6 + i);
    g2z_json_end(&out, '}');
  }
  g2z_json_end(&out, ']');
  g2z_writer_printf(writer, "}\n");
  CHECK_OK(t, g2z_writer_commit(writer));
  g2z_writer_free(writer);
  double begin = g2z_seconds();
  CHECK_OK(t, g2z_report_run(&t->services, t->directory));
  CHECK_OK(t, g2z_run_facts_read(&t->services, t->directory, &facts));
  CHECK(t, g2z_seconds() - begin < 2);
  CHECK(t, facts.steps == 3 && facts.step_p50_sec == 6 + EPOCHS);
  char *text = test_run_read(t, t->directory, "report.html", &bytes);
  CHECK(t, test_page_count(text, "<tr><td>") == EPOCHS);
  CHECK(t, text && strstr(text, "<tr><td>1999<td>3<td>1001999<td>") != NULL);
  CHECK(t, text && strstr(text, "<dd>completed</dd>") != NULL); /* the steps add up to the lines */
  g2z_release(&t->services, text);
}

static uint64_t test_event_varint(const unsigned char **at) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    value |= (uint64_t)(**at & 127) << shift;
    if (!(*(*at)++ & 128)) return value;
  }
}

typedef struct test_events {
  int events, values, starts;          /* starts: of SessionLog */
  int64_t first, last;                 /* steps of those with values */
  double loss[64], val_loss;           /* train/loss by step */
  char tags[2048];
} test_events;

/* Fields of one message; those inside are read in the same way: their numbers tell them apart. */
static void test_event_fields(g2z_test *t, const unsigned char *at, const unsigned char *end,
                              int depth, test_events *seen, int64_t *step, char tag[64]) {
  while (at < end) {
    uint64_t key = test_event_varint(&at);
    int field = (int)(key >> 3), type = (int)(key & 7);
    if (type == 0) {
      uint64_t value = test_event_varint(&at);
      if (depth == 0 && field == 2) *step = (int64_t)value;
      if (depth == 1 && field == 1) seen->starts += value == 1;
    } else if (type == 1) at += 8;
    else if (type == 5) {
      float value;
      memcpy(&value, at, sizeof value);
      at += 4;
      CHECK(t, depth == 2 && field == 2 && *step >= 0 && *step < 64);
      if (strcmp(tag, "train/loss") == 0) seen->loss[*step] = (double)value;
      if (strcmp(tag, "val/loss") == 0) seen->val_loss = (double)value;
      if (!seen->values++) seen->first = *step;
      seen->last = *step;
    } else {
      size_t length = (size_t)test_event_varint(&at);
      CHECK(t, type == 2 && length <= (size_t)(end - at));
      if (depth == 0 && field == 3) CHECK(t, length == 13 && !memcmp(at, "brain.Event:2", 13));
      else if (depth < 2) test_event_fields(t, at, at + length, depth + 1, seen, step, tag);
      else snprintf(tag, 64, "%.*s", (int)length, (const char *)at);
      at += length;
    }
  }
  CHECK(t, at == end);
}

static uint32_t test_event_sum(const void *bytes, size_t count) {
  const unsigned char *at = (const unsigned char *)bytes;
  uint32_t sum = 0xffffffffu;
  for (size_t i = 0; i < count; i++) {
    sum ^= at[i];
    for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78u : 0);
  }
  sum = ~sum;
  return (sum >> 15 | sum << 17) + 0xa282ead8u;
}

/* The index-th event file of a run, frame by frame. */
static void test_events_read(g2z_test *t, const char *run_dir, size_t index, test_events *seen) {
  char pattern[600], *text = NULL, tag[64] = "";
  size_t bytes = 0, at = 0;
  glob_t found;
  memset(seen, 0, sizeof *seen);
  memset(&found, 0, sizeof found);
  snprintf(pattern, sizeof pattern, "%.500s/events.out.tfevents.*", run_dir);
  int none = glob(pattern, 0, NULL, &found);
  CHECK(t, !none && found.gl_pathc > index);
  if (!none && found.gl_pathc > index)
    CHECK_OK(t, g2z_read_file(&t->services, found.gl_pathv[index], 1 << 26, &text, &bytes));
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
  g2z_release(&t->services, text);
}

/* A run, stopped and resumed: two files, which together hold each step once. */
static void test_run_events(g2z_test *t) {
  test_run_setup s;
  test_run_seen seen;
  test_events one, two;
  test_run_prepare(t, &s, "run");
  s.config.save_weights = NULL;
  s.config.save_every = 3;
  s.config.max_train_steps = 3;
  s.config.resume = "latest";
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  test_events_read(t, s.run_dir, 0, &one);
  CHECK(t, one.first == 1 && one.last == 3 && one.starts == 0 && one.events == 1 + 3 + 1);
  CHECK_NEAR(t, one.loss[3], seen.last_loss, 1e-7);
  CHECK_NEAR(t, one.val_loss, seen.val_loss, 1e-6);
  s.config.max_train_steps = 0;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  test_events_read(t, s.run_dir, 1, &two);
  CHECK(t, two.first == 4 && two.last == 8 && two.starts == 1);
  CHECK_NEAR(t, two.loss[8], seen.last_loss, 1e-7);
  CHECK(t, test_files_count(t, "run/events.out.tfevents.") == 2);
  test_run_prepare(t, &s, "without");
  s.config.tensorboard = 0;
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, test_files_count(t, "without/events") == 0);
}

/* ----- experiments -------------------------------------------------------- */

static void test_statistics(g2z_test *t) {
  double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2}, holes[] = {1, NAN, 2};
  const double same[] = {2, 4, 4, 4, 5, 5, 7, 9};
  CHECK_NEAR(t, g2z_median(odd, 3), 2, 0);
  CHECK_NEAR(t, g2z_median(even, 4), 2.5, 0);
  CHECK(t, isnan(g2z_median(holes, 3)) && isnan(g2z_median(NULL, 0)));
  CHECK_NEAR(t, g2z_deviation(same, 8), sqrt(32.0 / 7), 1e-12);
  CHECK(t, isnan(g2z_deviation(odd, 1)));
}

/* A summary with a point of each outcome. */
static g2z_summary *test_summary(g2z_test *t) {
  g2z_summary *summary = NULL;
  g2z_point *point;
  CHECK_OK(t, g2z_summary_create(&t->services, "scaling", &summary));
  snprintf(summary->hardware, sizeof summary->hardware, "2 x <GPU> & \"co\"");
  snprintf(summary->work, sizeof summary->work, "work");
  snprintf(summary->command_line, sizeof summary->command_line, "./bench scaling");
  snprintf(summary->commit, sizeof summary->commit, "0123456789abcdef");
  for (int i = 0; i < 3; i++) {
    CHECK_OK(t, g2z_summary_add(summary, &point));
    if (!point) break;
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

/* What is written is read again; the table and the page show it. */
static void test_summaries(g2z_test *t) {
  g2z_summary *summary = test_summary(t), *again = NULL;
  const char *path = strdup(test_path(t, "scaling_report.json"));
  char lines[4096] = "", *text;
  size_t bytes;
  g2z_page *page;
  CHECK_OK(t, g2z_summary_write(summary, path));
  CHECK_OK(t, g2z_summary_read(&t->services, path, &again));
  CHECK(t, again && again->count == 3 && strcmp(again->hardware, summary->hardware) == 0);
  for (size_t i = 0; again && i < 3; i++) {
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
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 20, &text, &bytes));
  CHECK(t, text && strstr(text, "\"speedup_vs_1gpu\": 1.9\n") && !strstr(text, "gpu_percent"));
  g2z_release(&t->services, text);
  g2z_summary_print(again, test_summary_line, lines);
  CHECK(t, strstr(lines, "| scaling | ranks | tokens/s | p50 ms | speed-up |\n"
                         "|---|---|---|---|---|\n"));
  CHECK(t, strstr(lines, "| 2 ranks | 2 | 1900 | 1.25 | 1.900 |\n"));
  CHECK(t, strstr(lines, "`./bench scaling`; commit 0123456789ab\n"));
  CHECK(t, strstr(lines, "skipped: 4 ranks: no such machine\n") && !strstr(lines, "| 4 ranks"));
  CHECK_OK(t, g2z_page_create(&t->services, test_path(t, "page.html"), "page", &page));
  CHECK_OK(t, g2z_summary_page(again, page));
  CHECK_OK(t, g2z_page_commit(page));
  g2z_page_free(page);
  CHECK_OK(t, g2z_read_file(&t->services, test_path(t, "page.html"), 1 << 20, &text, &bytes));
  CHECK(t, text && strstr(text, "2 x &lt;GPU&gt; &amp; ") && strstr(text, ">Speed-up<"));
  CHECK(t, text && strstr(text, "ideal") && strstr(text, "no such machine"));
  g2z_release(&t->services, text);
  g2z_summary_free(summary);
  g2z_summary_free(again);
  free((void *)path);
}

/* Texts that are full to the last byte, of what takes more room in a file, are read again. */
static void test_summaries_full(g2z_test *t) {
  static const char *const fills[] = {"\"", "\x1b", "\\\n"};
  g2z_summary *summary = test_summary(t), *again = NULL;
  char *path = strdup(test_path(t, "full_report.json"));
  for (int i = 0; i < 4; i++) { /* the last: umlauts, of which the room's end cuts one in two */
    const char *fill = i < 3 ? fills[i] : "\xc3\xbc";
    char *to[] = {summary->command_line, summary->points[2].reason};
    size_t room[] = {sizeof summary->command_line, sizeof summary->points[2].reason};
    for (int k = 0; k < 2; k++) {
      for (size_t at = 0; at + 1 < room[k]; at++) to[k][at] = fill[at % strlen(fill)];
      to[k][room[k] - 1] = 0;
    }
    CHECK_OK(t, g2z_summary_write(summary, path));
    CHECK_OK(t, g2z_summary_read(&t->services, path, &again));
    if (!again) continue;
    for (int k = 0; k < 2; k++)
      if (i == 3) to[k][room[k] - 2] = '?';
    CHECK(t, strcmp(again->command_line, summary->command_line) == 0);
    CHECK(t, strcmp(again->points[2].reason, summary->points[2].reason) == 0);
    g2z_summary_free(again);
  }
  g2z_summary_free(summary);
  free(path);
}

/* Files that are cut off or changed are refused with a sentence, and so are others' files. */
static void test_summaries_damaged(g2z_test *t) {
  static const struct { const char *from, *to, *says; } changes[] = {
      {"gpt2_zero experiment 1", "gpt2_zero experiment 9", "and not \"gpt2_zero experiment 1\""},
      {"\"1 ranks\"", "\"1 ranks, 1 ranks, 1 ranks, 1 ranks, 1 ranks, 1 ranks, 1 ranks, 1 ranks, "
       "1 ranks, 1 ranks, 1 ranks\"", "a text of more than the 95 bytes that have room"},
      {"\"scaling\"", "\"baking\"", "no experiment is called \"baking\""},
      {"\"outcome\": \"ok\"", "\"outcome\": \"no\"", "outcome is \"no\""},
      {"\"name\": \"1 ranks\"", "\"nome\": \"1 ranks\"", "a point without a name"},
      {"\"tokens_per_sec\": 1000", "\"tokens_per_sec\": true", ""},
      {"run_scaling_1", "../scaling_1", "is no run's name"},
      {"\"points\": [", "\"dots\": [", "has no points"}};
  g2z_summary *summary = test_summary(t), *again;
  char *path = strdup(test_path(t, "scaling_report.json")), *text = NULL, changed[8192];
  size_t bytes = 0;
  CHECK_OK(t, g2z_summary_write(summary, path));
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 20, &text, &bytes));
  for (size_t cut = 0; text && cut + 2 < bytes; cut += 3) { /* two are "}" and a line feed */
    test_write_file(t, path, text, cut);
    CHECK(t, g2z_summary_read(&t->services, path, &again) != G2Z_OK && !again);
    CHECK(t, t->services.error[0] != 0);
  }
  for (size_t i = 0; text && i < sizeof changes / sizeof *changes; i++) {
    const char *at = strstr(text, changes[i].from);
    CHECK(t, at != NULL);
    if (!at) continue;
    snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, changes[i].to,
             at + strlen(changes[i].from));
    test_write_file(t, path, changed, strlen(changed));
    CHECK_STATUS(t, g2z_summary_read(&t->services, path, &again), G2Z_FORMAT, &t->services,
                 changes[i].says);
  }
  g2z_release(&t->services, text);
  g2z_summary_free(summary);
  free(path);
}

static void test_count_watch(void *user) { ++*(int *)user; }

/* Jobs that a program starts one after the other: what they print, take and end with. */
static void test_ranks_run(g2z_test *t) {
  char name[] = "test_gpt2", list[] = "--list", none[] = "no_such_test", *text;
  char *argv[] = {name, list, NULL};
  const char *path = strdup(test_path(t, "out.txt"));
  int looks = 0, copies = 0;
  size_t bytes;
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
  job.ranks = 1; /* a process of its own as well; what it prints comes behind */
  CHECK_OK(t, g2z_ranks_run(&t->services, &job, &end));
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 20, &text, &bytes));
  for (const char *at = text; at && (at = strstr(at, "\nranks_run ")) != NULL; at++) copies++;
  CHECK(t, copies == 3);
  g2z_release(&t->services, text);
  argv[1] = none;
  job.ranks = 2;
  CHECK_OK(t, g2z_ranks_run(&t->services, &job, &end));
  CHECK(t, end.exit_code == 1);
  job.output = "/nowhere/out.txt";
  CHECK_STATUS(t, g2z_ranks_run(&t->services, &job, &end), G2Z_IO, &t->services, "/nowhere/out.txt");
  job.ranks = 0;
  CHECK_STATUS(t, g2z_ranks_run(&t->services, &job, &end), G2Z_BAD_ARGUMENT, &t->services,
               "0 ranks: must be from 1 to");
  free((void *)path);
}

/* Runs `bench ARGUMENTS` through the shell; returns the exit code. */
static int test_bench(const char *arguments, char *output, size_t room) {
  const char *program = getenv("G2Z_BENCH"); /* another build of it, such as a sanitized one */
  char command[2048];
  snprintf(command, sizeof command, "OMP_WAIT_POLICY=passive %s %s 2>&1",
           program ? program : "./bench", arguments);
  return test_shell(command, output, room);
}

static int test_bench_is_there(void) {
  const char *program = getenv("G2Z_BENCH");
  return access(program ? program : "./bench", X_OK) == 0;
}

/* As little as an experiment can do. */
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
      {"comm", "gpus sizes repeats device dtype out help"},
      {"report", "out help"}};
  char output[16384], arguments[64], flags[256], flag[64];
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
    snprintf(arguments, sizeof arguments, "%s --help", commands[i].command);
    CHECK(t, test_bench(arguments, output, sizeof output) == 0);
    snprintf(flags, sizeof flags, "%s", commands[i].flags);
    for (char *rest = NULL, *name = strtok_r(flags, " ", &rest); name;
         name = strtok_r(NULL, " ", &rest)) {
      snprintf(flag, sizeof flag, "\n  --%s ", name);
      t->checks++;
      if (!strstr(output, flag))
        test_fail(t, __FILE__, __LINE__, "bench %s --help lacks --%s", commands[i].command, name);
    }
    CHECK(t, strstr(output, "--run-dir") == NULL); /* of ranks alone */
    CHECK(t, strstr(output, "] [") == NULL);       /* one default each */
    if (i) continue;
    for (size_t k = 1; k < sizeof commands / sizeof *commands; k++) {
      snprintf(flag, sizeof flag, "\n  %s ", commands[k].command);
      CHECK(t, strstr(output, flag) != NULL);
    }
    CHECK(t, !strstr(output, "\n  point") && !strstr(output, "\n  exchange"));
  }
  CHECK(t, test_bench("point --help", output, sizeof output) == 0 && !strstr(output, "(null)"));
}

static void test_bench_refusals(g2z_test *t) {
  /* Each ends with exit code 1 and a line that begins with "bench: " and holds the words. */
  static const char *const cases[][2] = {
      {"scale", "scale is no sub-command: bench --help lists them"},
      {"scaling --bathc 4", "did you mean --batch?"},
      {"scaling --peer x", "there is no flag --peer"},
      {"scaling x", "this program takes flags only"},
      {"ops --train x", "there is no flag --train"},
      {"ops --steps 1", "there is no flag --steps"},
      {"ops --graph on", "there is no flag --graph"},
      {"--device cpu --model gpt2 --layers 2 --peer true", "--peer runs a --model as it is: leave"},
      {"--device cpu --peer true", "--peer runs a --model: name one, --model gpt2"},
      {"scaling --gpus 0 --out $D/s", "--gpus 0: numbers from 1 to 4096 are wanted"},
      {"scaling --gpus 1,,2 --out $D/s", "--gpus 1,,2: numbers from 1"},
      {"scaling --gpus 1,2, --out $D/s", "--gpus 1,2,: numbers from 1"},
      {"scaling --gpus '1, 2' --out $D/s", "--gpus 1, 2: numbers from 1 to 4096 are wanted"},
      {"scaling --gpus ' 1' --out $D/s", "--gpus  1: numbers from 1 to 4096 are wanted"},
      {"comm --sizes '1,\t2' --out $D/s", "with commas alone between them"},
      {"matrix --zero '0, 1' --out $D/s", "--zero 0, 1: up to 16 of dp|0|1|2|3 are wanted"},
      {"matrix --dtype fp16, --out $D/s", "--dtype fp16,: up to 16 of fp32|tf32|fp16|bf16"},
      {"matrix --dtype '' --out $D/s", "--dtype : up to 16 of fp32|tf32|fp16|bf16"},
      {"scaling --gpus 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17 --out $D/s",
       "more than 16 numbers"},
      {"matrix --zero 4 --out $D/s", "--zero 4: up to 16 of dp|0|1|2|3 are wanted"},
      {"matrix --dtype fp16,fp8 --out $D/s", "--dtype fp16,fp8: up to 16 of fp32|tf32|fp16|bf16"},
      {"buckets --sizes 1,x --out $D/s", "--sizes 1,x: numbers from 0"},
      {"scaling --device cpu --channels 60 --heads 7 --out $D/s",
       "no point can be measured here: channels=60 must divide by heads=7"},
      {"scaling --device cpu --gpus 1 --train $D/none --out $D/s",
       "no point can be measured here: no file is called or matches "},
      {"buckets --device cpu --train $D/x.bin --out $D/s", "x.bin has no shard header"},
      {"matrix --device cpu --train '' --out $D/s", "no token shards were named"},
      {"scaling --device cpu --gpus 1 --tokens 100000000000000 --out $D/s",
       "--tokens 100000000000000 are 195312500000 steps: at most 100000000 can be timed"},
      {"scaling --device cpu --gpus 1 --out /dev/null/x", "/dev/null"},
      {"comm --device cpu --gpus 2 --sizes 0 --out $D/s", "--sizes 0: numbers from 0.001"},
      {"scaling --device cpu --gpus 1,1.5 --out $D/s", "--gpus 1,1.5: 1.5 is no number of ranks"},
      {"buckets --device cpu --sizes 1,5e-4 --out $D/s",
       "--sizes 1,5e-4: 0.0005 MiB is less than the least, 0.001"},
      {"strategies --zero dp,0,dp --out $D/s", "--zero dp,0,dp: dp is there already"},
      {"matrix --dtype fp16,fp16 --out $D/s", "--dtype fp16,fp16: fp16 is there already"},
      {"comm --device cpu --gpus 1 --out $D/s", "nothing to exchange: --gpus takes 2 or more"},
      {"comm --sizes 1,4,1.0 --out $D/s", "--sizes 1,4,1.0: 1.0 is there already"},
      {"scaling --device cpu --steps 6 --tokens 99 --out $D/s", "--tokens and --steps both set"},
      {"point", "bench point needs --run-dir and --train"},
      {"exchange", "bench exchange needs --run-dir"},
      {"report", "name the directories"},
      {"report /nowhere", "/nowhere"},
      {"report $D", "holds no NAME_report.json and no training_metrics.json"}};
  char output[16384], line[1500];
  const char *program = getenv("G2Z_BENCH");
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  test_write_file(t, test_path(t, "x.bin"), "no shard\n", 9);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    snprintf(line, sizeof line, "D='%s'; OMP_WAIT_POLICY=passive %s %s 2>&1", t->directory,
             program ? program : "./bench", cases[i][0]);
    int code = test_shell(line, output, sizeof output);
    const char *said = strstr(output, "bench: ");
    t->checks++;
    if (code != 1 || !said || !strstr(said, cases[i][1]))
      test_fail(t, __FILE__, __LINE__, "bench %s ends with %d and says \"%s\"", cases[i][0], code,
                output);
    CHECK(t, test_files_count(t, "s") == 0); /* and nothing is left */
  }
}

/* The summary that an experiment left; NULL when it cannot be read. */
static g2z_summary *test_bench_summary(g2z_test *t, const char *name) {
  char path[600];
  g2z_summary *summary = NULL;
  snprintf(path, sizeof path, "%.250s/%s/%s_report.json", t->directory, name, name);
  CHECK_OK(t, g2z_summary_read(&t->services, path, &summary));
  return summary;
}

/* What holds for every point that went well: figures fit together, run directories are whole. */
static void test_bench_point(g2z_test *t, const g2z_summary *summary, const g2z_point *point) {
  const g2z_figures *f = &point->figures;
  g2z_run_facts facts;
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
    CHECK_OK(t, g2z_run_facts_read(&t->services, path, &facts));
    CHECK(t, facts.world_size == f->world_size && facts.micro_batch == f->micro_batch);
    CHECK(t, facts.steps == f->steps + 1 && facts.tokens_per_sec > 0); /* with its warm-up */
    strcat(path, "/train.log");
    CHECK(t, access(path, R_OK) == 0);
  }
}

/* Fixed work on 1, 2 and 3 ranks, of which 3 cannot divide it; two rounds. */
static void test_bench_scaling(g2z_test *t) {
  char output[16384], arguments[900];
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  snprintf(arguments, sizeof arguments, "scaling %s --gpus 1,2,3 --global-batch 4 --batch 2 "
           "--repeats 2 --dropout 0.1 --recompute block --out '%s'", test_bench_small,
           test_path(t, "scaling"));
  int lock; /* as if another experiment were at work there */
  CHECK_OK(t, g2z_make_directory(&t->services, test_path(t, "scaling")));
  CHECK_OK(t, g2z_lock_directory(&t->services, test_path(t, "scaling"), &lock));
  CHECK(t, test_bench(arguments, output, sizeof output) == 1);
  CHECK(t, strstr(output, "another program is at work in") != NULL);
  close(lock);
  CHECK(t, test_bench(arguments, output, sizeof output) == 0);
  CHECK(t, strstr(output, "\n[4/4] 2 ranks, repeat 2: ") && strstr(output, " left\n"));
  CHECK(t, strstr(output, "skipped: 3 ranks: 4 sequences cannot be divided among 3 ranks\n"));
  CHECK(t, strstr(output, "\n| 2 ranks | 2 | 2 | 1 | "));
  g2z_summary *s = test_bench_summary(t, "scaling");
  if (!s) return;
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
  g2z_summary_free(s);
  CHECK(t, access(test_path(t, "scaling/tokens.bin"), F_OK) != 0); /* as large as the work */
  size_t bytes; /* what bench was told reaches the ranks that it starts */
  char *text = test_run_read(t, test_path(t, "scaling"), "run_scaling_2/training_metrics.json",
                             &bytes);
  CHECK(t, text && strstr(text, "\"bench point --layers=1 --channels=16 --heads=2 ") != NULL);
  CHECK(t, text && strstr(text, " --dropout=0.1 ") && strstr(text, " --recompute=block "));
  g2z_release(&t->services, text);
  CHECK(t, test_bench(arguments, output, sizeof output) == 1); /* never over what is there */
  CHECK(t, strstr(output, "scaling_report.json is there already: choose another --out"));
  CHECK(t, unlink(test_path(t, "scaling/scaling_report.json")) == 0); /* as if it was stopped */
  CHECK(t, test_bench(arguments, output, sizeof output) == 1);
  CHECK(t, strstr(output, "run_scaling_1 is there already, of an experiment that did not end"));
  CHECK(t, access(test_path(t, "scaling/scaling_report.json"), F_OK) != 0);
}

static void test_bench_others(g2z_test *t) {
  static const struct { const char *name, *flags; size_t points; } cases[] = {
      {"buckets", "--sizes 0.005,4 --gpus 2", 2},
      {"matrix", "--gpus 1 --zero 0,2 --dtype fp16,fp32", 4},
      {"strategies", "--gpus 2 --zero dp,0", 2}};
  char output[16384], arguments[900];
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    snprintf(arguments, sizeof arguments, "%s %s --batch 2 --repeats 1 %s --out '%s'",
             cases[i].name, test_bench_small, cases[i].flags, test_path(t, cases[i].name));
    CHECK(t, test_bench(arguments, output, sizeof output) == 0);
    g2z_summary *s = test_bench_summary(t, cases[i].name);
    if (!s) continue;
    CHECK(t, s->count == cases[i].points);
    for (size_t k = 0; k < s->count; k++) test_bench_point(t, s, &s->points[k]);
    const g2z_figures *f = &s->points[0].figures;
    if (i == 0) { /* stage 1 reduces and gathers each bucket */
      CHECK(t, f->buckets > s->points[1].figures.buckets);
      CHECK(t, f->collectives_per_step == 2 * f->buckets && f->exposed_comm_ms > 0);
    }
    if (i == 1) CHECK(t, strcmp(s->points[0].name, "ZeRO 0, fp16") == 0);
    if (i == 2) CHECK(t, strcmp(s->points[0].name, "dp") == 0 && isnan(f->zero_stage));
    g2z_summary_free(s);
  }
  /* The small model of a CPU has as many positions as are asked for. */
  snprintf(arguments, sizeof arguments, "scaling --device cpu --layers 1 --channels 16 --seq 130 "
           "--vocab-size 64 --gpus 1 --global-batch 1 --steps 1 --repeats 1 --out '%s'",
           test_path(t, "long"));
  CHECK(t, test_bench(arguments, output, sizeof output) == 0);
  /* A run of one step has no second one, whose collectives are counted. */
  snprintf(arguments, sizeof arguments, "buckets --device cpu --layers 1 --channels 16 --seq 8 "
           "--vocab-size 64 --gpus 2 --sizes 1 --tokens 64 --warmup 0 --repeats 1 --out '%s'",
           test_path(t, "one"));
  CHECK(t, test_bench(arguments, output, sizeof output) == 0);
  CHECK(t, strstr(output, "fp32, 64 tokens after 0 steps of warm-up, 1 repeats") != NULL);
  CHECK(t, strstr(output, "| buckets | ranks |") && !strstr(output, "| collectives |"));
}

/* A point that fails says why, the others are measured all the same, and the exit code tells. */
static void test_bench_failing(g2z_test *t) {
  char output[16384], arguments[900];
  uint16_t tokens[1000];
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  for (int i = 0; i < 1000; i++) tokens[i] = (uint16_t)(i % 60);
  tokens[100] = 64; /* beyond the vocabulary */
  test_write_file(t, test_path(t, "bad.bin"), tokens, sizeof tokens);
  tokens[100] = 63;
  snprintf(arguments, sizeof arguments, "scaling %s --gpus 1,2 --global-batch 2 --repeats 2 "
           "--train '%s' --steps 200 --out '%s'", test_bench_small, test_path(t, "bad.bin"),
           test_path(t, "scaling"));
  CHECK(t, test_bench(arguments, output, sizeof output) == 1);
  CHECK(t, strstr(output, "[1/3] 1 rank, repeat 1: failed, exit code 1: ") != NULL ||
           strstr(output, "[1/4] 1 rank, repeat 1: failed, exit code 1: ") != NULL);
  CHECK(t, strstr(output, "bench: 2 of 2 points failed") != NULL);
  g2z_summary *s = test_bench_summary(t, "scaling");
  CHECK(t, s && s->count == 2 && s->points[1].outcome == G2Z_OUTCOME_FAILED);
  CHECK(t, s && strstr(s->points[1].reason, "token 64"));
  CHECK(t, s && s->points[1].repeats == 1); /* it is not tried again */
  g2z_summary_free(s);
}

/* A signal while ranks run, and one while tokens are written: a report tells what had ended. */
static void test_bench_stopped(g2z_test *t) {
  static const struct { const char *name, *flags, *when; int runs; } cases[] = {
      {"scaling", "--gpus 1,2 --global-batch 2 --batch 1 --repeats 2",
       "-e $D/run_scaling_2/train.log", 1},
      {"matrix", "--gpus 1 --zero 1 --dtype fp32 --batch 8192 --tokens 33554432",
       "-e $D/tokens.bin.partial", 0}};
  char output[16384], line[2048], want[128];
  const char *program = getenv("G2Z_BENCH");
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  test_write_file(t, test_path(t, "x.bin"), "no shard\n", 9);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    snprintf(line, sizeof line, "D='%s'; export OMP_WAIT_POLICY=passive; "
             "%s %s --device cpu --layers 1 --channels 16 --heads 2 --vocab-size 64 --seq 8 "
             "--warmup 0 %s %s --out $D 2>&1 & p=$!; "
             "until [ %s ] || ! kill -0 $p 2> /dev/null; do :; done; kill -TERM $p; wait $p",
             test_path(t, cases[i].name), program ? program : "./bench", cases[i].name,
             i ? "" : "--steps 3000", cases[i].flags, cases[i].when);
    CHECK(t, test_shell(line, output, sizeof output) == 1);
    snprintf(want, sizeof want, "bench: stopped by signal 15: the report tells of %d of ",
             cases[i].runs);
    CHECK(t, strstr(output, want) != NULL);
    snprintf(line, sizeof line, "%s/tokens.bin", cases[i].name);
    CHECK(t, access(test_path(t, line), F_OK) != 0);
    strcat(line, ".partial");
    CHECK(t, access(test_path(t, line), F_OK) != 0);
    g2z_summary *s = test_bench_summary(t, cases[i].name);
    if (!s) continue;
    snprintf(want, sizeof want, ", stopped by signal 15 after %d of ", cases[i].runs);
    CHECK(t, strstr(s->work, want) != NULL);
    for (int k = 0; k < (int)s->count; k++) { /* the first are measured */
      const g2z_point *p = &s->points[k];
      int measured = k < cases[i].runs;
      CHECK(t, p->repeats == measured);
      CHECK(t, p->outcome == (measured ? G2Z_OUTCOME_OK : G2Z_OUTCOME_SKIPPED));
      CHECK(t, measured ? p->figures.tokens_per_sec > 0 : strstr(p->reason, "was stopped") != NULL);
    }
    g2z_summary_free(s);
  }
}

static void test_bench_comm(g2z_test *t) {
  char output[16384], arguments[600];
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  snprintf(arguments, sizeof arguments, "comm --device cpu --gpus 1,2 --sizes 0.01,0.1 --repeats 1 "
           "--out '%s'", test_path(t, "comm"));
  CHECK(t, test_bench(arguments, output, sizeof output) == 0);
  CHECK(t, strstr(output, "skipped: 1 rank: alone there is nothing to exchange: "));
  g2z_summary *s = test_bench_summary(t, "comm");
  if (!s) return;
  CHECK(t, s->count == 1 + 2 * 5); /* five collectives */
  for (size_t i = 1; i < s->count; i++) {
    const g2z_figures *f = &s->points[i].figures;
    const char *name = s->points[i].name;
    double passes = strncmp(name, "all_reduce", 10) == 0 || strncmp(name, "reduce,", 7) == 0 ||
                    strncmp(name, "broadcast", 9) == 0 ? 1 : 0.5; /* of two ranks */
    double bus = passes * f->message_mib * 1048576 / (f->time_us * 1e-6) * 1e-9;
    CHECK(t, s->points[i].repeats == 1 && f->time_us > 0 && f->limit_gb_per_sec > 0);
    CHECK_NEAR(t, f->bus_gb_per_sec, bus, 1e-6 * bus);
    CHECK_NEAR(t, f->of_limit, bus / f->limit_gb_per_sec, 1e-6 * f->of_limit);
  }
  g2z_summary_free(s);
}

/* A page of what experiments and runs left; nothing when a file is not what it should be. */
static void test_bench_report(g2z_test *t) {
  char output[16384], arguments[900], *text = NULL, path[600];
  size_t bytes;
  if (!test_bench_is_there()) SKIP(t, "./bench is not built: make");
  snprintf(arguments, sizeof arguments, "scaling %s --gpus 1,2 --global-batch 2 --repeats 1 "
           "--out '%s'", test_bench_small, test_path(t, "all/scaling"));
  CHECK(t, test_bench(arguments, output, sizeof output) == 0);
  snprintf(arguments, sizeof arguments, "report '%s'", test_path(t, "all"));
  CHECK(t, test_bench(arguments, output, sizeof output) == 0);
  CHECK(t, strstr(output, "/all/report.html: 1 experiments, 2 runs\n"));
  snprintf(path, sizeof path, "%s", test_path(t, "all/report.html"));
  CHECK_OK(t, g2z_read_file(&t->services, path, 1 << 22, &text, &bytes));
  CHECK(t, text && strstr(text, ">Throughput<") && strstr(text, ">Speed-up<"));
  CHECK(t, text && strstr(text, "run_scaling_2") && strstr(text, "prefers-color-scheme"));
  CHECK(t, text && !strstr(text, "http") && !strstr(text, "<script")); /* no network, no script */
  g2z_release(&t->services, text);
  static const char *const files[] = {"all/scaling/scaling_report.json",
                                      "all/scaling/run_scaling_1/training_metrics.json"};
  for (int i = 0; i < 2; i++) {
    CHECK_OK(t, g2z_read_file(&t->services, test_path(t, files[i]), 1 << 22, &text, &bytes));
    static const char foreign[] = "{\"schema_version\": \"1.0\", \"format\": \"mine\"}";
    for (int k = 0; k < 2 && text; k++) {
      unlink(path);
      test_write_file(t, test_path(t, files[i]), k ? foreign : text,
                      k ? strlen(foreign) : bytes / 2);
      CHECK(t, test_bench(arguments, output, sizeof output) == 1);
      CHECK(t, strncmp(output, "bench: ", 7) == 0 && strstr(output, strrchr(files[i], '/')));
      CHECK(t, access(path, F_OK) != 0);
    }
    test_write_file(t, test_path(t, files[i]), text, bytes);
    g2z_release(&t->services, text);
  }
  CHECK(t, test_bench(arguments, output, sizeof output) == 0);
  snprintf(arguments, sizeof arguments, "report '%s'", test_path(t, "all/scaling/run_scaling_1"));
  CHECK(t, test_bench(arguments, output, sizeof output) == 1);
  CHECK(t, strstr(output, "is a run, with a report.html of its own: say where this one goes"));
}

/* Spans inside each other, more of them than a GPU has events for at a time. */
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
      g2z_span_begin(device, G2Z_SPAN_BACKWARD);
      CHECK_OK(t, device->ops->zero(device, memory, bytes));
      g2z_span_begin(device, G2Z_SPAN_NORM);
      CHECK_OK(t, device->ops->zero(device, memory, bytes));
      g2z_span_end(device, G2Z_SPAN_NORM);
      g2z_span_end(device, G2Z_SPAN_BACKWARD);
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

static void test_cuda_spans(g2z_test *t) {
  CUDA_OR_SKIP(t);
  test_spans_on(t, G2Z_DEVICE_CUDA);
}

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

/* The first string at "a.0.b" of a JSON text is this one. */
static void test_profile_is(g2z_test *t, const char *text, const char *path, const char *want) {
  g2zp_told told;
  char *got = NULL;
  memset(&told, 0, sizeof told);
  told.services = &t->services;
  told.path = (char *)path;
  told.text = (char *)text;
  told.bytes = strlen(text);
  CHECK_OK(t, g2zp_told_text(&told, path, &got));
  t->checks++;
  if (!got || strcmp(got, want) != 0)
    test_fail(t, __FILE__, __LINE__, "%s is \"%s\", expected \"%s\"", path, got ? got : "none",
              want);
  g2z_release(&t->services, got);
}

static void test_profile(g2z_test *t) {
  static const char *const damaged[][2] = {
      {"", "neither an NVTX Range Summary nor an OS Runtime Summary"},
      {"<html>\n", "neither an NVTX"},
      {" ** NVTX Range Summary (nvtx_sum):\n\n", "has no rows"},
      {" ** NVTX Range Summary (x):\n Time\n", "without a \"Total Time (ns)\""},
      {" ** NVTX Range Summary (x):\n a Total Time (ns\n", "without a \"Total Time (ns)\""},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n --- ---\n", "fewer than three columns"},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n -- -- --\n x 3  b\n", "line 4: no row"},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n -- -- --\n 101 3b\n", "line 4: no row"},
      {" ** NVTX Range Summary (x):\n a Total Time (ns) b\n -- -- --\n 1  3\n", "line 4: no row"},
      {" ** NVTX Range Summary (x):\n ** OS Runtime Summary (x):\n", "line 2: the table before"}};
  char stats[600], summary[600], *text;
  size_t bytes = 0;
  snprintf(stats, sizeof stats, "%s", test_path(t, "profiles/nsys_stats_node-1.txt"));
  snprintf(summary, sizeof summary, "%s", test_path(t, "profiles/profile_summary.json"));
  CHECK_STATUS(t, g2z_profile_run(&t->services, t->directory), G2Z_IO, &t->services,
               "no nsys_stats_*.txt");
  CHECK_OK(t, g2z_make_directory(&t->services, test_path(t, "profiles")));
  for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
    test_write_file(t, stats, damaged[i][0], strlen(damaged[i][0]));
    CHECK_STATUS(t, g2z_profile_run(&t->services, t->directory), G2Z_FORMAT, &t->services,
                 damaged[i][1]);
    CHECK(t, test_files_count(t, "profiles/profile_summary") == 0);
  }
  test_write_file(t, stats, test_stats_text, sizeof test_stats_text - 1);
  test_write_file(t, test_path(t, "training_metrics.json"), "{", 1);
  CHECK_STATUS(t, g2z_profile_run(&t->services, t->directory), G2Z_FORMAT, &t->services,
               "training_metrics.json");
  static const char metrics[] =
      "{\"schema_version\": \"2.0\", \"hardware\": {\"gpu_name\": \"H200\", \"world_size\": 8}, "
      "\"scheduler\": {\"job_id\": \"4711\"}}";
  test_write_file(t, test_path(t, "training_metrics.json"), metrics, sizeof metrics - 1);
  test_write_file(t, test_path(t, "profiles/nsys_4711_node-1.nsys-rep"), "x", 1);
  CHECK_OK(t, g2z_profile_run(&t->services, t->directory));
  text = test_run_read(t, t->directory, "profiles/profile_summary.json", &bytes);
  if (!text) return;
  static const char *const want[][2] = {
      {"slurm_job_id", "4711"},                 {"hosts.0", "node-1"},
      {"gpu", "H200"},                          {"nsys_report", "nsys_4711_node-1.nsys-rep"},
      {"inputs.0", "nsys_stats_node-1.txt"},    {"nvtx_top5.0.kind", "nvtx"},
      {"nvtx_top5.0.name", ":train/backward"},  {"nvtx_top5.0.total_time", "2765967562725 ns"},
      {"nvtx_top5.1.name", "NCCL:ncclAllGather  two"}, {"nvtx_top5.2.total_time", "1000000.5 ns"},
      {"nvtx_top5.2.raw", "      3.1         1,000,000.5          1       1,000,000  PushPop  "
                          ":zero/all_gather"},
      {"osrt_top5.0.name", "read"},             {"osrt_top5.1.total_time", "914.5806 ms"},
      {"osrt_top5.1.kind", "osrt"}};
  for (size_t i = 0; i < sizeof want / sizeof *want; i++)
    test_profile_is(t, text, want[i][0], want[i][1]);
  static const char *const schema[] = {
      "\" generated_at_utc", "\" run_dir", "\" slurm_job_id", "[ hosts", "0 world_size", "\" gpu",
      "n cuda", "n seq_length", "n micro_batch_size_per_gpu", "n grad_accum_steps",
      "n tokens_per_sec", "n total_wall_time_sec", "\" nsys_report", "[ inputs",
      "0 nvtx_top5.0.time_percent", "0 osrt_top5.0.time_percent"};
  test_run_schema(t, text, bytes, schema, sizeof schema / sizeof *schema);
  CHECK(t, !test_json_kind(t, text, bytes, "nvtx_top5.3") &&
               !test_json_kind(t, text, bytes, "osrt_top5.2"));
  g2z_release(&t->services, text);
  for (long at = 1, failed = 0;; at++) {
    unlink(summary);
    t->fail_at = at;
    g2z_status status = g2z_profile_run(&t->services, t->directory);
    t->fail_at = 0;
    CHECK(t, test_files_count(t, "profiles/*.partial") == 0);
    if (status == G2Z_NO_MEMORY && at < 500) failed++;
    else {
      CHECK(t, status == G2Z_OK && failed > 10);
      break;
    }
  }
}

/* train --profile, and the same summary made again from what it left. */
static void test_run_profile(g2z_test *t) {
  static const char *const earlier[] = {"run/profiles/nsys_stats_a.txt", "run/profiles/timers_.txt",
                                        "run/profiles/nsys_7_a.nsys-rep"};
  test_run_setup s;
  test_run_seen seen;
  size_t bytes = 0;
  char path[600];
  test_run_prepare(t, &s, "run");
  s.config.profile = 1;
  s.config.train.graph = 1;
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
               "profile needs graph off");
  s.config.train.graph = 2;
  s.config.run_dir = NULL;
  CHECK_STATUS(t, test_run_all(t, &s.config, &seen), G2Z_BAD_ARGUMENT, &t->services,
               "profile needs a run_dir");
  s.config.run_dir = s.run_dir;
  /* What an earlier run left there does not count, and damaged does no harm. */
  CHECK_OK(t, g2z_make_directory(&t->services, test_path(t, "run/profiles")));
  for (size_t i = 0; i < sizeof earlier / sizeof *earlier; i++)
    test_write_file(t, test_path(t, earlier[i]), "x\n", 2);
  CHECK_OK(t, test_run_all(t, &s.config, &seen));
  CHECK(t, test_files_count(t, "run/RUN_COMPLETE.txt") == 1);
  snprintf(path, sizeof path, "%.500s/profiles/profile_summary.json", s.run_dir);
  char *text = test_run_read(t, s.run_dir, "profiles/profile_summary.json", &bytes);
  static const char *const schema[] = {
      "0 world_size", "n nsys_report", "\" hosts.0", "\" inputs.0", "0 seq_length",
      "0 tokens_per_sec", "0 total_wall_time_sec", "\" nvtx_top5.4.name", "[ osrt_top5"};
  if (text) {
    test_run_schema(t, text, bytes, schema, sizeof schema / sizeof *schema);
    CHECK(t, strstr(text, "\":train/forward\"") && strstr(text, "\":train/backward\"") &&
                 strstr(text, "\":train/optimizer_step\""));
    CHECK(t, !test_json_kind(t, text, bytes, "osrt_top5.0"));
    CHECK(t, !test_json_kind(t, text, bytes, "inputs.1") && strstr(text, "\"timers_") != NULL);
  }
  g2z_release(&t->services, text);
  CHECK(t, unlink(path) == 0);
  CHECK_STATUS(t, g2z_profile_run(&t->services, s.run_dir), G2Z_FORMAT, &t->services,
               "nsys_stats_a.txt, line 1");
  for (size_t i = 0; i < sizeof earlier / sizeof *earlier; i++)
    CHECK(t, unlink(test_path(t, earlier[i])) == 0);
  CHECK_OK(t, g2z_profile_run(&t->services, s.run_dir));
  CHECK(t, access(path, R_OK) == 0);
}

/* slurm/profile.sh with an nsys that is played, and without one. */
static void test_profile_script(g2z_test *t) {
  static const char nsys[] =
      "#!/bin/sh\ncase $1 in\n"
      "profile) while [ \"$1\" != --output ]; do shift; done; echo x > \"$2.nsys-rep\"; shift 2; "
      "\"$@\";;\n"
      "stats) [ -e \"$5\" ] && echo ' ** NVTX Range Summary (x):';;\nesac\n";
  char line[1500], output[4096];
  if (access("slurm/profile.sh", R_OK) != 0) SKIP(t, "slurm/ is not here: run in the repository");
  if (test_shell("bash --version", output, sizeof output) != 0) SKIP(t, "there is no bash");
  CHECK_OK(t, g2z_make_directory(&t->services, test_path(t, "bin")));
  test_write_file(t, test_path(t, "bin/nsys"), nsys, sizeof nsys - 1);
  CHECK(t, chmod(test_path(t, "bin/nsys"), 0755) == 0);
#define RUN(before, what)                                                                        \
  (snprintf(line, sizeof line, "env -u SLURM_LOCALID PATH='%s/bin':\"$PATH\" SLURM_JOB_ID=7 "     \
            before " bash slurm/profile.sh '%s/run' " what " 2>&1", t->directory, t->directory),  \
   test_shell(line, output, sizeof output))
  CHECK(t, RUN("", "sh -c 'echo ran; exit 75'") == 75 && strstr(output, "ran"));
  CHECK(t, test_files_count(t, "run/profiles/nsys_7_*.nsys-rep") == 1);
  CHECK(t, test_files_count(t, "run/profiles/nsys_stats_*.txt") == 1);
  test_sh(t, "rm -r '%s/run'%s", t->directory, "");
  /* Slurm's signal goes to all processes; the program saves, and what was measured is kept. */
  CHECK(t, RUN("", "sh -c 'kill -USR1 $PPID $(cut -d\" \" -f4 /proc/$PPID/stat); sleep 0.2; "
                   "exit 75'") == 75);
  CHECK(t, test_files_count(t, "run/profiles/nsys_stats_*.txt") == 1);
  test_sh(t, "rm -r '%s/run'%s", t->directory, "");
  CHECK(t, RUN("SLURM_LOCALID=1", "echo ran") == 0 && strcmp(output, "ran\n") == 0);
  CHECK(t, test_files_count(t, "run") == 0); /* the first task of the host does it */
  CHECK(t, RUN("", "") == 1 && strstr(output, "slurm/profile.sh RUN_DIR"));
  if (test_shell("PATH=/usr/bin:/bin command -v nsys", output, sizeof output) == 0) return;
  snprintf(line, sizeof line, "PATH=/usr/bin:/bin bash slurm/profile.sh '%s/run' echo ran 2>&1",
           t->directory);
  CHECK(t, test_shell(line, output, sizeof output) == 0 && strstr(output, "ran --profile\n"));
#undef RUN
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

static const g2z_test_entry test_table[] = {
    {"files_writer", "a file appears whole or not at all", test_files_writer},
    {"files_refused", "reading what cannot be read is a sentence", test_files_refused},
    {"files_special", "FIFOs and links in place of files", test_files_special},
    {"files_pipe", "streams are read to their end", test_files_pipe},
    {"files_locked", "a file is written by one program at a time", test_files_locked},
    {"files_full_disk", "a full disk leaves nothing behind", test_files_full_disk},
    {"files_unwritable", "a directory without permission is refused", test_files_unwritable},
    {"files_no_memory", "files survive every failing allocation", test_files_no_memory},
    {"json_grammar", "RFC 8259, and nothing beyond it", test_json_grammar},
    {"json_sentences", "errors name label, line and column", test_json_sentences},
    {"json_numbers", "integers and reals at their limits", test_json_numbers},
    {"json_strings", "escapes, surrogates, invalid ones", test_json_strings},
    {"json_writer", "what is written reads back", test_json_writer},
    {"config_checks", "each bad value is refused with a sentence that names it", test_config_checks},
    {"schedules", "cosine, linear, constant and wsd at their corners", test_schedules},
    {"philox", "random numbers equal the published vectors", test_philox},
    {"plan_models", "parameter counts of the published models", test_plan_of_published_models},
    {"plan_tiles", "buckets, slices, shards and updates tile every world", test_plan_tiles},
    {"plan_last_buckets", "what completes last is cut small", test_plan_last_buckets},
    {"plan_head", "tokens whose logits exist at one time", test_plan_head},
    {"plan_wte_gradient", "what the head adds to wte is rounded at once where it may be", test_plan_wte_gradient},
    {"plan_graphs", "which steps are recorded as graphs", test_plan_graphs},
    {"plan_bytes", "bytes per rank of large models in every stage", test_plan_bytes},
    {"plan_decay", "weight decay reaches matrices only", test_plan_update_decay},
    {"plan_recompute", "activations that are kept, and that are made again", test_plan_recompute},
    {"plan_batch", "the largest batch that fits is the largest", test_plan_largest_batch},
    {"tokenizer_pieces", "GPT-2's pattern at its corners", test_tokenizer_pieces},
    {"tokenizer_bytes", "every byte goes round; invalid UTF-8", test_tokenizer_bytes},
    {"bpe_training", "merges equal Hugging Face's", test_bpe_training},
    {"tokenizer_formats", "merge lists and JSON, one tokenizer", test_tokenizer_formats},
    {"tokenizer_refusals", "damaged vocabularies are refused", test_tokenizer_refusals},
    {"tokenizer_cut", "a text cut at a safe place encodes alike", test_tokenizer_cut},
    {"tokenizer_long_pieces", "a million spaces, a million letters", test_tokenizer_long_pieces},
    {"tokenizer_scan", "the scan finds the pattern's pieces", test_tokenizer_scan},
    {"tokenizer_part", "a text that comes bit by bit encodes alike", test_tokenizer_part},
    {"bpe_trainers", "trainers that share a text learn alike", test_bpe_trainers_add},
    {"bpe_trainer_part", "a text in bits teaches what the whole does", test_bpe_trainer_part},
    {"tokenizer_threads", "threads share a tokenizer", test_tokenizer_threads},
    {"tokenizer_allocations", "the tokenizer survives every failing allocation", test_tokenizer_allocations},
    {"tokenizer_gpt2", "GPT-2's published vectors (needs make vocab)", test_tokenizer_gpt2},
    {"prepare_conventions", "shards as llm.c and nanoGPT lay them out", test_prepare_conventions},
    {"prepare_threads", "any number of threads, the same bytes", test_prepare_threads},
    {"prepare_packed", "gzip and zstd, whole and damaged", test_prepare_packed},
    {"prepare_open", "text without a place to cut", test_prepare_open},
    {"prepare_memory", "bounded, also to learn from text without a cut", test_prepare_memory},
    {"prepare_markers", "a job may end inside of a marker", test_prepare_markers},
    {"prepare_refusals", "bad input: a sentence, exit code 1, no file", test_prepare_refusals},
    {"prepare_filters", "--encode and --decode go round", test_prepare_filters},
    {"shuffle", "a permutation of any size, another each epoch", test_shuffle},
    {"shard_writer", "both formats, byte by byte", test_shard_writer},
    {"loader_ranks", "ranks share out each batch, none twice", test_loader_ranks},
    {"loader_seek", "a seek equals reading on", test_loader_seek},
    {"loader_refused", "bad shards are refused with a sentence", test_loader_refused},
    {"loader_damage", "a file that shrinks while it is read", test_loader_damage},
    {"loader_many_shards", "many shards, never read across", test_loader_many_shards},
    {"loader_no_memory", "the loader survives every failing allocation", test_loader_no_memory},
    {"ops_round", "fp16 and bf16, to the nearest even", test_ops_round},
    {"cgroup_memory", "the memory that control groups leave", test_cgroup_memory},
    {"ops_peaks", "rates by the data sheet, for names that are known", test_ops_peaks},
    {"ops_device", "what a device refuses", test_ops_device},
    {"ops_linear", "products and their epilogues", test_ops_linear},
    {"ops_layernorm", "LayerNorm, forward and backward", test_ops_layernorm},
    {"ops_attention", "causal attention, forward and backward", test_ops_attention},
    {"ops_attention_range", "scores far apart do not overflow", test_ops_attention_range},
    {"ops_embedding", "embedding, forward and backward", test_ops_embedding},
    {"ops_head", "LM head and cross-entropy in chunks", test_ops_head},
    {"ops_dropout", "the mask is a pure function", test_ops_dropout},
    {"ops_decide", "the verdict that ends a step", test_ops_decide},
    {"ops_adamw", "AdamW equals PyTorch's arithmetic", test_ops_adamw},
    {"ops_sums_and_casts", "norms and casts", test_ops_sums_and_casts},
    {"ops_threads", "any number of threads, the same bits", test_ops_threads},
    {"ops_stack", "every op on a stack of 64 KiB", test_ops_stack},
    {"cuda_device", "memory, order and errors of a GPU", test_cuda_device},
    {"cuda_embed", "embedding, with tokens in long runs", test_cuda_embed},
    {"cuda_layernorm", "LayerNorm at all row widths", test_cuda_layernorm},
    {"cuda_linear", "products with bias, GELU, residual, dropout", test_cuda_linear},
    {"cuda_products", "our own products, whatever the clock says", test_cuda_products},
    {"cuda_tuning", "a tuning table is written, read and refused", test_cuda_tuning},
    {"cuda_head", "LM head and cross-entropy", test_cuda_head},
    {"cuda_cast", "casts round as the CPU's, to the bit", test_cuda_cast},
    {"cuda_sums", "gradients of several ranks are added up, to the bit", test_cuda_sums},
    {"cuda_optimizer", "norm, verdict and AdamW", test_cuda_optimizer},
    {"cuda_graph", "a graph computes what the ops do, to the bit", test_cuda_graph},
    {"cuda_early", "kernels that start early change no bit", test_cuda_early},
    {"cuda_attention", "attention at odd lengths and all head sizes", test_cuda_attention},
    {"cuda_attention_repeats", "attention twice, to the bit", test_cuda_attention_repeats},
    {"safetensors_types", "each type is read as it should be", test_safetensors_types},
    {"safetensors_refused", "wrong offsets, shapes, types and lengths", test_safetensors_refused},
    {"weights_round_trip", "weights go out and come back, bit for bit", test_weights_round_trip},
    {"weights_variants", "names with and without a prefix, masks, tied heads", test_weights_variants},
    {"weights_configs", "what is no GPT-2 is refused", test_weights_configs},
    {"weights_no_memory", "weights survive every failing allocation", test_weights_no_memory},
    {"run_artifacts", "a run directory, field by field", test_run_artifacts},
    {"run_determinism", "two runs write the same bytes", test_run_determinism},
    {"run_length", "steps, epochs and limits", test_run_length},
    {"run_init_from", "a run starts from saved weights", test_run_init_from},
    {"run_padded_vocab", "what is saved names the token that ends a text", test_run_padded_vocab},
    {"run_slurm", "Slurm's variables reach the artifacts", test_run_slurm},
    {"run_refusals", "a run that cannot work does not start", test_run_refusals},
    {"run_full_disk", "a run on a full disk ends in a sentence", test_run_full_disk},
    {"run_damaged", "steps before a damaged batch are told", test_run_damaged},
    {"run_diverges", "the last skipped step is told before the end", test_run_diverges},
    {"run_no_page", "a run whose page cannot be written ends well", test_run_no_page},
    {"run_allocations", "a run survives every failing allocation", test_run_allocations},
    {"flags", "the command-line parser", test_flags},
    {"flags_arguments", "a table of flags as arguments, and back", test_flags_arguments},
    {"train_help", "--help lists each flag", test_train_help},
    {"train_refusals", "bad flags: a sentence and exit code 1", test_train_refusals},
    {"train_device", "--device cuda without one", test_train_device},
    {"train_run", "the program, from shard to weights", test_train_run},
    {"golden_forward", "logits equal Hugging Face's GPT-2", test_golden_forward},
    {"golden_gradients", "loss and every gradient equal Hugging Face's", test_golden_gradients},
    {"golden_adamw", "ten AdamW steps equal PyTorch's", test_golden_adamw},
    {"finite_differences", "each tensor's gradient is the slope of the loss", test_finite_differences},
    {"causality", "no token sees a later one", test_causality},
    {"overfit", "one batch is learnt by heart in fp32, fp16 and bf16", test_overfit},
    {"determinism", "two runs, stages and thread counts are bit-identical", test_determinism},
    {"recompute", "activations made again change no bit", test_recompute},
    {"cuda_recompute", "the same on a GPU, also as a graph", test_cuda_recompute},
    {"cuda_configs", "random configs learn the same on a GPU as on the CPU", test_cuda_configs},
    {"accumulation", "micro-steps add up to the larger batch", test_accumulation},
    {"loss_scale", "the scale grows, halves, skips and recovers", test_loss_scale},
    {"divergence", "fifty skips at the minimum scale end in a status", test_divergence},
    {"canonical_access", "any canonical range is read and written", test_canonical_access},
    {"initialisation", "each tensor starts with GPT-2's spread", test_initialisation},
    {"validation", "validation is the mean of the steps' losses", test_validation},
    {"allocation_failures", "every failing allocation is a status", test_allocation_failures},
    {"places", "a rank's place, from the variables of each launcher", test_places},
    {"places_refused", "variables that make no place are named", test_places_refused},
    {"ranks_calls", "2 to 5 processes meet, and every call gives what it should", test_ranks_calls},
    {"ranks_config", "a job of one, configs that cannot be, failing allocations", test_ranks_config},
    {"ranks_refusals", "ranks that do not fit together hear why, all of them", test_ranks_refusals},
    {"ranks_siphash", "the keyed MAC of members, against its reference", test_ranks_siphash},
    {"ranks_neighbours", "other services and jobs on the port", test_ranks_neighbours},
    {"ranks_second_job", "a second job by hand on the same port", test_ranks_second_job},
    {"ranks_strangers", "strangers on the port cost a job nothing and hear nothing", test_ranks_strangers},
    {"ranks_flood", "a flood of strangers keeps no rank out", test_ranks_flood},
    {"ranks_slurm", "where slurm/train.sh puts rank 0", test_ranks_slurm},
    {"ranks_secret", "who lacks the job's secret is a stranger", test_ranks_secret},
    {"ranks_address", "rank 0 listens at MASTER_ADDR alone", test_ranks_address},
    {"ranks_killed", "kill -9 of a rank ends the others, who name it", test_ranks_killed},
    {"ranks_stopped", "a stopped rank ends the job at the deadline", test_ranks_stopped},
    {"ranks_suspended", "a job that was suspended as a whole goes on", test_ranks_suspended},
    {"ranks_micro_steps", "each micro-step is progress", test_ranks_micro_steps},
    {"ranks_backlog", "heartbeats do not wait behind data", test_ranks_backlog},
    {"ranks_hang", "a rank that hangs is named, one that saves is left alone", test_ranks_hang},
    {"ranks_addresses", "an address that leads nowhere does not hide others", test_ranks_addresses},
    {"ranks_leaving", "leaving is no death, unless others go on", test_ranks_leaving},
    {"ranks_flight", "the flight recorder holds the last 1,024 collectives", test_ranks_flight},
    {"ranks_spawn", "a process that starts ranks, looks after them, hands signals on", test_ranks_spawn},
    {"ranks_mpirun", "ranks under mpirun", test_ranks_mpirun},
    {"ranks_train", "./train as its own launcher, and what that leaves", test_ranks_train},
    {"ranks_train_killed", "kill -9 of a rank of ./train, started by hand", test_ranks_train_killed},
    {"make_space", "the programs, in a directory with a space in its name", test_make_space},
    {"slurm_scripts", "the batch scripts start what their knobs say", test_slurm_scripts},
    {"ranks_stream", "64 MB each way between rank 0 and the others", test_ranks_stream},
    {"context_refusals", "ranks, types and sizes that cannot be had", test_context_refusals},
    {"sampling", "temperature, top-k and top-p draw what they should", test_sampling},
    {"generate", "a learnt cycle is written on, past the context too", test_generate_cycle},
    {"tokens_services", "tokens belong to the services they began with", test_tokens_services},
    {"zero_equal", "stages 0 to 3 and dp on 2, 3 and 4 ranks learn what one learns",
     test_zero_equal},
    {"zero_alone", "wte's gradient in two parts on one rank", test_zero_alone},
    {"zero_halves", "the same in fp16 and bf16", test_zero_halves},
    {"zero_recompute", "activations made again change no bit on two ranks", test_zero_recompute},
    {"cuda_zero", "the same on GPUs through NCCL", test_cuda_zero},
    {"zero_fault", "a gather, rows or a reduction left out once are seen", test_zero_fault},
    {"zero_turns", "stage 3 gathers a block one ahead of its use", test_zero_turns},
    {"zero_trouble", "what befalls one rank all return together", test_zero_trouble},
    {"crc32c", "CRC-32C against RFC 3720, in one piece and in several", test_crc32c},
    {"checkpoint_resume", "a resumed training is, to the bit, the unbroken one",
     test_checkpoint_resume},
    {"checkpoint_reshaped", "any stage, bucket size, type and batch takes a checkpoint up",
     test_checkpoint_reshaped},
    {"checkpoint_damage", "every flipped bit, missing byte and missing file is found",
     test_checkpoint_damage},
    {"checkpoint_refused", "checkpoints that do not fit are refused with a sentence",
     test_checkpoint_refused},
    {"checkpoint_trouble", "full disks and failing allocations leave nothing behind",
     test_checkpoint_trouble},
    {"run_resume", "a resumed run leaves the files of an unbroken one", test_run_resume},
    {"run_resume_torn", "damaged lines of metrics.jsonl are told", test_run_resume_torn},
    {"run_resume_latest", "the last checkpoint that is whole", test_run_resume_latest},
    {"run_resume_refusals", "what cannot be resumed is said before the first step",
     test_run_resume_refusals},
    {"run_goes_on", "what a run said at its end goes when it goes on", test_run_goes_on},
    {"run_stop", "a stop saves, says so and can be resumed", test_run_stop},
    {"train_unread", "a console that is closed or that nobody reads", test_train_unread},
    {"train_signals", "signals: checkpoint and exit code 75; a second one ends at once",
     test_train_signals},
    {"train_killed", "kill -9 at any moment leaves whole checkpoints", test_train_killed},
    {"train_ranks_resume", "saved on 4 ranks, resumed on 3 and on 1", test_train_ranks_resume},
    {"train_ranks_memory", "ranks on CPUs divide their host's memory", test_train_ranks_memory},
    {"train_ranks_latest", "all ranks take the checkpoint that is whole", test_train_ranks_latest},
    {"train_ranks_stuck", "a console that hangs keeps no rank", test_train_ranks_stuck},
    {"train_ranks_differ", "ranks whose settings differ say so before the first step",
     test_train_ranks_differ},
    {"train_ranks_killed", "kill -9 of a rank: the others name it, the next start goes on",
     test_train_ranks_killed},
    {"train_ranks_trouble", "what befalls one rank while saving is told by all",
     test_train_ranks_trouble},
    {"pages", "text is escaped, spikes and gaps survive thinning", test_pages},
    {"run_report", "a run's page, and the damaged files it is not made from", test_run_report},
    {"run_report_epochs", "the page of a run of 2,000 epochs, in one pass", test_run_report_epochs},
    {"run_short", "runs of no step and one step leave what readers want", test_run_short},
    {"run_events", "TensorBoard's frames, their checksums, a file for each start", test_run_events},
    {"spans", "what parts of a step take, by the clock", test_spans},
    {"cuda_spans", "the same between events of a GPU", test_cuda_spans},
    {"profile", "tables of nsys, and what is none", test_profile},
    {"run_profile", "a run that times its own parts", test_run_profile},
    {"profile_script", "slurm/profile.sh with and without nsys", test_profile_script},
    {"page_whisker", "a whisker beyond the scale of its bars", test_page_whisker},
    {"page_scales", "round ticks, and no number breaks an axis", test_page_scales},
    {"statistics", "medians and deviations, of none and with holes", test_statistics},
    {"summaries", "an experiment's file, table and page", test_summaries},
    {"summaries_full", "texts that fill their room and need escapes", test_summaries_full},
    {"summaries_damaged", "files that are cut off, changed or others' are refused",
     test_summaries_damaged},
    {"ranks_run", "jobs of a program: output, exit codes, what they took", test_ranks_run},
    {"bench_help", "--help of ./bench and of each sub-command", test_bench_help},
    {"bench_refusals", "what ./bench cannot do: a sentence and exit code 1", test_bench_refusals},
    {"bench_scaling", "fixed work on 1 and 2 ranks, in rounds", test_bench_scaling},
    {"bench_others", "buckets, matrix and strategies, small", test_bench_others},
    {"bench_failing", "a point that fails is told, and the others go on", test_bench_failing},
    {"bench_stopped", "a signal: a report of the runs that had ended", test_bench_stopped},
    {"bench_comm", "every collective against memcpy", test_bench_comm},
    {"bench_report", "a page of what was left, and none of damaged files", test_bench_report},
};

static int test_remove_entry(const char *path, const struct stat *info, int type,
                             struct FTW *where) {
  (void)info;
  (void)type;
  (void)where;
  return remove(path);
}

static int test_selected(const char *name, int argc, char **argv) {
  if (argc < 2) return 1;
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], name) == 0) return 1;
  return 0;
}

static void test_run(const g2z_test_entry *entry, int *passed, int *failed, int *skipped) {
  static g2z_test t;
  memset(&t, 0, sizeof t);
  t.name = entry->name;
  t.services.allocate = test_allocate;
  t.services.release = test_release;
  t.services.user = &t;
  const char *scratch = getenv("TMPDIR");
  snprintf(t.directory, sizeof t.directory, "%.200s/g2z_test_XXXXXX", scratch ? scratch : "/tmp");
  if (!mkdtemp(t.directory)) {
    fprintf(stderr, "cannot make %s: %s; set TMPDIR to a writable directory\n", t.directory,
            strerror(errno));
    exit(1);
  }
  double begin = g2z_seconds();
  entry->run(&t);
  for (int i = 0; i < 2; i++) g2z_plan_free(t.plans[i]);
  if (t.allocations != 0) test_fail(&t, __FILE__, __LINE__, "%ld blocks leaked", t.allocations);
  if (!t.skip[0] && t.checks == 0) test_fail(&t, __FILE__, __LINE__, "the test checked nothing");
  nftw(t.directory, test_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
  double seconds = g2z_seconds() - begin;
  if (t.failures) {
    printf("FAIL  %-28s %d of %d checks\n", t.name, t.failures, t.checks);
    ++*failed;
  } else if (t.skip[0]) {
    printf("skip  %-28s %s\n", t.name, t.skip);
    ++*skipped;
  } else {
    printf("ok    %-28s %d checks, %.2f s\n", t.name, t.checks, seconds);
    ++*passed;
  }
  fflush(stdout);
}

int main(int argc, char **argv) {
  const int count = (int)(sizeof test_table / sizeof *test_table);
  int passed = 0, failed = 0, skipped = 0;
  if (argc > 1 && strcmp(argv[1], "--rank-program") == 0) return rank_program(argc - 2, argv + 2);
  if (argc == 2 && strcmp(argv[1], "--list") == 0) {
    for (int i = 0; i < count; i++) printf("%-28s %s\n", test_table[i].name, test_table[i].about);
    return 0;
  }
  for (int i = 1; i < argc; i++) {
    int known = 0;
    for (int k = 0; k < count; k++) known |= strcmp(argv[i], test_table[k].name) == 0;
    if (!known) {
      fprintf(stderr, "no test is called \"%s\": ./test_gpt2 --list shows them\n", argv[i]);
      return 1;
    }
  }
  for (int i = 0; i < count; i++)
    if (test_selected(test_table[i].name, argc, argv))
      test_run(&test_table[i], &passed, &failed, &skipped);
  printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed > 0;
}

#else /* G2Z_FUZZ names one of the targets below */

/* ----- fuzz targets -------------------------------------------------------
 * For libFuzzer with AddressSanitizer and UBSan: `make fuzz` builds a program per target. */

#include <sys/mman.h>

static void fuzz_check(int condition) {
  if (!condition) __builtin_trap();
}

/* Reads everything in it, with recursion as callers do it. */
static void fuzz_walk(g2z_json *json) {
  g2z_json_text key;
  switch (g2z_json_peek(json)) {
    case '{':
    case '[': {
      char close = *json->at == '{' ? '}' : ']';
      if (g2z_json_enter(json, *json->at == '{' ? '{' : '['))
        while (g2z_json_next(json, close, close == '}' ? &key : NULL)) {
          if (close == '}') g2z_json_is(&key, "name");
          fuzz_walk(json);
        }
      break;
    }
    case '"': {
      g2z_json_text text = g2z_json_string(json);
      unsigned char *out = (unsigned char *)malloc(text.bytes ? text.bytes : 1);
      size_t bytes = text.at ? g2z_json_unescape(&text, out) : 0;
      fuzz_check(bytes <= text.bytes);
      if (text.at && !memchr(out, 0, bytes)) {
        char *name = (char *)calloc(1, bytes + 1);
        memcpy(name, out, bytes);
        fuzz_check(g2z_json_is(&text, name));
        free(name);
      }
      free(out);
      break;
    }
    case 't':
    case 'f': g2z_json_bool(json); break;
    case 'n': g2z_json_skip(json); break;
    default: {
      g2z_json again = *json;
      double value = g2z_json_number(json);
      int64_t integer = g2z_json_integer(&again);
      if (json->status == G2Z_OK && again.status == G2Z_OK) fuzz_check((double)integer == value);
      fuzz_check(isfinite(value));
    }
  }
}

/* Any bytes through the JSON reader. What a typed walk accepts, skip accepts, and
 * what is written from it is accepted again. */
static int fuzz_json(const uint8_t *data, size_t size) {
  g2z_services services;
  g2z_json json;
  memset(&services, 0, sizeof services);
  g2z_json_open(&json, &services, "fuzz", data, size);
  fuzz_walk(&json);
  g2z_status walked = g2z_json_close(&json);
  g2z_json_open(&json, &services, "fuzz", data, size);
  g2z_json_skip(&json);
  g2z_status skipped = g2z_json_close(&json);
  fuzz_check(json.at >= data && json.at <= data + size);
  fuzz_check(walked != G2Z_OK || skipped == G2Z_OK);
  if (skipped != G2Z_OK) fuzz_check(strlen(services.error) > 0);
  return 0;
}

/* Any bytes as an experiment's file. One that is accepted can be shown. */
static void fuzz_summary_line(void *user, const char *text) { *(size_t *)user += strlen(text); }
static int fuzz_summary(const uint8_t *data, size_t size) {
  g2z_services services;
  g2z_summary *summary;
  size_t shown = 0;
  memset(&services, 0, sizeof services);
  fuzz_check(g2z_summary_create(&services, "point", &summary) == G2Z_OK);
  if (g2zp_summary_parse(summary, "fuzz", (const char *)data, size) == G2Z_OK) {
    g2z_summary_print(summary, fuzz_summary_line, &shown);
    fuzz_check(summary->count > 0 && shown > 0);
  } else fuzz_check(strlen(services.error) > 0);
  g2z_summary_free(summary);
  return 0;
}

/* Any bytes as a vocabulary file. One that is accepted must encode the same bytes as a text. */
static int fuzz_vocab(const uint8_t *data, size_t bytes) {
  g2z_services services;
  g2z_tokenizer *tokenizer;
  g2z_encoder *encoder;
  g2z_tokens tokens;
  memset(&services, 0, sizeof services);
  memset(&tokens, 0, sizeof tokens);
  g2z_status status = g2z_tokenizer_parse(&services, "fuzz", data, bytes, &tokenizer);
  if (status != G2Z_OK) {
    fuzz_check(!tokenizer && services.error[0]);
    return 0;
  }
  fuzz_check(g2z_encoder_create(&services, tokenizer, &encoder) == G2Z_OK);
  fuzz_check(g2z_encode(encoder, data, bytes, G2Z_ENCODE_ALLOW_SPECIAL, &tokens) == G2Z_OK);
  for (size_t i = 0; i < tokens.count; i++)
    fuzz_check(tokens.ids[i] >= 0 && tokens.ids[i] < g2z_tokenizer_vocab(tokenizer));
  size_t total = 0, length;
  for (int id = 0; id < g2z_tokenizer_vocab(tokenizer); id++) {
    fuzz_check(g2z_tokenizer_token(tokenizer, id, &length) && length > 0);
    total += length;
  }
  fuzz_check(total >= 256 + 13);
  g2z_tokens_free(&tokens);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
  return 0;
}

static void fuzz_append(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                   g2z_tokens *tokens) {
  fuzz_check(g2z_encode(encoder, text, bytes, flags, tokens) == G2Z_OK);
}

static int fuzz_equal(const g2z_tokens *a, const g2z_tokens *b) {
  return a->count == b->count &&
         (a->count == 0 || memcmp(a->ids, b->ids, a->count * sizeof *a->ids) == 0);
}

/* Any bytes as a text: learnt from, cut, encoded and decoded, against what must hold for each. */
static int fuzz_encode(const uint8_t *data, size_t bytes) {
  g2z_services services;
  g2z_bpe_trainer *trainer;
  g2z_tokenizer *tokenizer;
  g2z_encoder *encoder;
  g2z_tokens whole, other;
  char *text;
  size_t length, cut = g2z_encode_cut(data, bytes);
  memset(&services, 0, sizeof services);
  memset(&whole, 0, sizeof whole);
  memset(&other, 0, sizeof other);
  fuzz_check(cut <= bytes);
  fuzz_check(g2z_bpe_trainer_create(&services, &trainer) == G2Z_OK);
  fuzz_check(g2z_bpe_trainer_feed(trainer, data, bytes) == G2Z_OK);
  int vocab = 257 + (bytes ? data[0] : 0);
  fuzz_check(g2z_bpe_trainer_finish(trainer, vocab, &tokenizer) == G2Z_OK);
  fuzz_check(g2z_tokenizer_vocab(tokenizer) <= vocab);
  fuzz_check(g2z_encoder_create(&services, tokenizer, &encoder) == G2Z_OK);
  fuzz_append(encoder, data, bytes, G2Z_ENCODE_DEFAULT, &whole);
  fuzz_append(encoder, data, cut, G2Z_ENCODE_DEFAULT, &other);
  fuzz_append(encoder, data + cut, bytes - cut, G2Z_ENCODE_DEFAULT, &other);
  fuzz_check(fuzz_equal(&whole, &other));
  size_t used;
  other.count = 0;
  fuzz_check(g2z_encode_part(encoder, data, bytes, G2Z_ENCODE_DEFAULT, &other, &used) == G2Z_OK);
  fuzz_check(used <= bytes);
  fuzz_append(encoder, data + used, bytes - used, G2Z_ENCODE_DEFAULT, &other);
  fuzz_check(fuzz_equal(&whole, &other));
  /* What comes back is valid, and encodes to the same ids. */
  fuzz_check(g2z_decode(&services, tokenizer, whole.ids, whole.count, &text, &length) == G2Z_OK);
  other.count = 0;
  fuzz_append(encoder, text, length, G2Z_ENCODE_STRICT, &other);
  fuzz_check(fuzz_equal(&whole, &other));
  int valid = length == bytes && memcmp(text, data, length) == 0;
  other.count = 0;
  fuzz_check((g2z_encode(encoder, data, bytes, G2Z_ENCODE_STRICT, &other) == G2Z_OK) == valid);
  g2z_release(&services, text);
  other.count = 0;
  fuzz_append(encoder, data, bytes, G2Z_ENCODE_ALLOW_SPECIAL, &other);
  g2z_tokens_free(&whole);
  g2z_tokens_free(&other);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
  g2z_bpe_trainer_free(trainer);
  return 0;
}

/* Any bytes as a token shard, which may shrink while it is read. */
static int fuzz_shard(const uint8_t *data, size_t size) {
  g2z_services services;
  g2z_loader_config config;
  g2z_loader *loader;
  char path[64];
  if (size < 4) return 0;
  memset(&services, 0, sizeof services);
  memset(&config, 0, sizeof config);
  int file = memfd_create("shard", MFD_CLOEXEC);
  fuzz_check(file >= 0 && write(file, data + 4, size - 4) == (ssize_t)(size - 4));
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  config.glob = path;
  config.batch = 1 + data[0] % 4;
  config.accum = 1 + data[0] / 4 % 4;
  config.world = 1 + data[0] / 16 % 4;
  config.rank = data[0] / 64 % config.world;
  config.seq = 1 + data[1] % 64;
  config.order = data[1] & 128 ? G2Z_ORDER_SHUFFLED : G2Z_ORDER_FILE;
  config.vocab = data[1] & 64 ? 256 : 65536;
  g2z_status status = g2z_loader_create(&services, &config, &loader);
  if (status == G2Z_OK) {
    const int64_t rows = (int64_t)config.batch * config.accum;
    fuzz_check(g2z_loader_steps_per_epoch(loader) >= 1);
    g2z_loader_position position = {data[2], data[3] % g2z_loader_steps_per_epoch(loader)};
    fuzz_check(g2z_loader_seek(loader, position) == G2Z_OK);
    for (int step = 0; step < 4 && status == G2Z_OK; step++) {
      const int32_t *x, *y;
      if (step == 1 && data[2] & 1) fuzz_check(ftruncate(file, (off_t)(size - 4) * data[3] / 256) == 0);
      status = g2z_loader_next(loader, &x, &y);
      for (int64_t i = 0; status == G2Z_OK && i < rows * config.seq; i++) {
        fuzz_check(x[i] >= 0 && x[i] < config.vocab && y[i] >= 0 && y[i] < config.vocab);
        if ((i + 1) % config.seq) fuzz_check(y[i] == x[i + 1]);
      }
    }
  }
  fuzz_check(status == G2Z_OK || services.error[0]);
  g2z_loader_free(loader);
  close(file);
  return 0;
}

static char fuzz_directory[64];

static void fuzz_put(const char *name, const uint8_t *data, size_t size) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", fuzz_directory, name);
  int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  fuzz_check(file >= 0 && write(file, data, size) == (ssize_t)size);
  close(file);
}

static g2z_status fuzz_take(void *user, size_t canonical, size_t count, const float *values) {
  size_t *next = (size_t *)user;
  double sum = 0;
  for (size_t i = 0; i < count; i++) sum += (double)values[i]; /* the sanitizer looks at each */
  fuzz_check(canonical == *next && (sum == sum || sum != sum));
  *next += count;
  return G2Z_OK;
}

static void fuzz_clean(void) {
  static const char *const names[] = {"config.json", "model.safetensors", "metrics.jsonl",
                                      "training_metrics.json", "report.html"};
  char path[128];
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    snprintf(path, sizeof path, "%s/%s", fuzz_directory, names[i]);
    unlink(path);
  }
  rmdir(fuzz_directory);
}

/* In memory, and removed at the end. */
static void fuzz_make_directory(void) {
  if (fuzz_directory[0]) return;
  snprintf(fuzz_directory, sizeof fuzz_directory, "/dev/shm/g2z_fuzz_%d", (int)getpid());
  fuzz_check(mkdir(fuzz_directory, 0700) == 0);
  atexit(fuzz_clean);
}

/* Any bytes as model.safetensors (first byte even) or config.json (odd). */
static int fuzz_safetensors(const uint8_t *data, size_t size) {
  const g2z_model_config tiny = {1, 1, 8, 4, 3, 2};
  g2z_services services;
  g2z_model_config model;
  g2z_safetensors *file;
  fuzz_make_directory();
  memset(&services, 0, sizeof services);
  if (size < 1) return 0;
  if (data[0] & 1) {
    fuzz_put("config.json", data + 1, size - 1);
    g2z_status status = g2z_weights_config(&services, fuzz_directory, &model);
    fuzz_check(status == G2Z_OK ? g2z_model_config_check(&services, &model) == G2Z_OK
                           : model.layers == 0 && services.error[0]);
    return 0;
  }
  fuzz_put("model.safetensors", data + 1, size - 1);
  char path[128];
  snprintf(path, sizeof path, "%s/model.safetensors", fuzz_directory);
  g2z_status status = g2z_safetensors_open(&services, path, &file);
  fuzz_check((status == G2Z_OK) == (file != NULL));
  uint64_t bytes = 0;
  for (int i = 0; file && i < g2z_safetensors_count(file); i++) {
    g2z_safetensor tensor = g2z_safetensors_tensor(file, i);
    fuzz_check(g2z_safetensors_find(file, tensor.name) == i);
    fuzz_check(tensor.begin + tensor.bytes <= size - 1 && tensor.elements <= tensor.bytes);
    bytes += tensor.bytes;
    float *values = (float *)malloc(tensor.elements ? tensor.elements * sizeof(float) : 1);
    status = g2z_safetensors_read(file, i, 0, tensor.elements, values);
    fuzz_check(status == G2Z_OK || status == G2Z_UNSUPPORTED);
    free(values);
  }
  fuzz_check(!file || bytes <= size);
  g2z_safetensors_free(file);
  size_t next = 0;
  status = g2z_weights_read(&services, fuzz_directory, &tiny, fuzz_take, &next);
  fuzz_check(status == G2Z_OK ? next == 944 : services.error[0] != 0);
  return 0;
}

/* trainer_state.json as it is parsed behind its checksum. */
static int fuzz_state(const uint8_t *data, size_t size) {
  g2z_services services;
  g2z__saved saved;
  memset(&services, 0, sizeof services);
  memset(&saved, 0, sizeof saved);
  g2z_status status = g2z__saved_parse(&services, "state", (const char *)data, size, &saved);
  fuzz_check(status == G2Z_OK || services.error[0]);
  for (size_t i = 0; status == G2Z_OK && i < saved.span_count; i++)
    fuzz_check(saved.spans[i].file >= 0 && saved.spans[i].file < saved.file_count);
  g2z_loader loader;
  memset(&loader, 0, sizeof loader);
  loader.config.seq = 1;
  loader.sequences = saved.sequences;
  loader.global = 7;
  if (status == G2Z_OK) fuzz_check(g2z__saved_position(&saved, &loader).step >= 0);
  g2z__saved_free(&services, &saved);
  return 0;
}

/* What `nsys stats` printed, or what passes for it. */
static int fuzz_stats(const uint8_t *data, size_t size) {
  g2z_services services;
  g2zp_profile profile;
  memset(&services, 0, sizeof services);
  memset(&profile, 0, sizeof profile);
  profile.services = &services;
  g2z_status status = g2zp_stats_read(&profile, "stats", (const char *)data, size);
  fuzz_check(status == G2Z_OK || services.error[0]);
  for (int kind = 0; kind < 2; kind++)
    for (int i = 0; i < profile.count[kind]; i++) {
      const g2zp_ranked *row = &profile.top[kind][i];
      fuzz_check(row->percent >= 0 && row->percent <= 100 && row->name_bytes > 0);
      fuzz_check(i == 0 || row->percent <= profile.top[kind][i - 1].percent);
      fuzz_check(row->raw >= (const char *)data && row->name >= row->raw);
      fuzz_check(row->raw + row->raw_bytes <= (const char *)data + size);
    }
  return 0;
}

/* The first two bytes say where metrics.jsonl ends and training_metrics.json begins. */
static int fuzz_report(const uint8_t *data, size_t size) {
  g2z_services services;
  char *text = NULL;
  size_t bytes = 0;
  char path[128];
  memset(&services, 0, sizeof services);
  fuzz_make_directory();
  if (size < 2) return 0;
  size_t cut = (size_t)(data[0] | data[1] << 8) % (size - 1);
  fuzz_put("metrics.jsonl", data + 2, cut);
  fuzz_put("training_metrics.json", data + 2 + cut, size - 2 - cut);
  snprintf(path, sizeof path, "%s/report.html", fuzz_directory);
  unlink(path);
  g2z_status status = g2z_report_run(&services, fuzz_directory);
  fuzz_check((status == G2Z_OK) == (access(path, F_OK) == 0));
  if (status != G2Z_OK) return 0;
  fuzz_check(g2z_read_file(&services, path, 1 << 26, &text, &bytes) == G2Z_OK);
  fuzz_check(strlen(text) == bytes && !strstr(text, "<script"));
  g2z_release(&services, text);
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return G2Z_FUZZ(data, size); }

#endif /* G2Z_FUZZ */
