/* The base of all tests: checks, a test's memory, and helpers that several files use. test_gpt2.cu
 * includes it first. */

#include <arpa/inet.h>
#include <ftw.h>
#include <locale.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>

/* ----- harness ---------------------------------------------------------- */

typedef struct test_owned {
  void (*end)(void *what);
  void *what;
} test_owned;

typedef struct g2z_test {
  const char *name;
  g2z_services services;
  char directory[256];   /* an empty directory of this test, removed when it ends */
  char skip[160];        /* why it was skipped; empty: it ran */
  int checks, failures;
  long allocations;      /* blocks that are live now */
  long fail_at;          /* > 0: the allocation in so many calls and all later ones fail */
  g2z_plan *plans[2];    /* the last two of test_plan */
  test_owned *owned;     /* [owned_count], see test_own */
  int owned_count;
  jmp_buf stopped;
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
  if (getenv("G2Z_MUTANT")) exit(1); /* the mutant is caught; more tests would only take time */
}

#define CHECK(t, condition)                                                       \
  do {                                                                            \
    (t)->checks++;                                                                \
    if (!(condition)) test_fail(t, __FILE__, __LINE__, "not true: %s", #condition); \
  } while (0)

/* A check with a message of its own. */
#define FAIL_IF(t, condition, ...)                                \
  do {                                                            \
    (t)->checks++;                                                \
    if (condition) test_fail(t, __FILE__, __LINE__, __VA_ARGS__); \
  } while (0)

#define CHECK_NEAR(t, got, want, tolerance)                                                    \
  do {                                                                                         \
    double got_ = (got), want_ = (want), tolerance_ = (tolerance);                             \
    (t)->checks++;                                                                             \
    if (!(fabs(got_ - want_) <= tolerance_)) /* NaN fails */                                   \
      test_fail(t, __FILE__, __LINE__, "%s is %.9g, expected %.9g within %.3g", #got, got_, want_, \
                tolerance_);                                                                   \
  } while (0)

/* The first place where a text counts one thing as many, such as "1 bytes"; NULL: there is none. */
static const char *test_one_as_many(const char *text) {
  static const char *const many[] = {
      "batches", "buckets", "bytes", "documents", "epochs", "files", "GPUs", "heads", "layers",
      "points", "processes", "questions", "ranks", "runs", "sequences", "shards", "steps",
      "targets", "threads", "tokens"};
  for (const char *at = text; (at = strstr(at, "1 ")) != NULL; at++)
    for (size_t i = 0; i < G2Z_COUNT(many) && (at == text || strchr(" (\n", at[-1])); i++) {
      const size_t bytes = strlen(many[i]);
      if (strncmp(at + 2, many[i], bytes) == 0 && !isalpha((unsigned char)at[2 + bytes])) return at;
    }
  return NULL;
}

/* The call returns `want`, and its sentence contains `part` (NULL: any). */
#define CHECK_STATUS(t, call, want, owner, part) \
  test_status(t, __FILE__, __LINE__, #call, call, want, owner, part)
#define X(name, meaning) meaning,
static const char *const test_meaning[] = {G2Z_STATUS_LIST(X)}; /* of a g2z_status */
#undef X
static void test_status(g2z_test *t, const char *file, int line, const char *text, g2z_status got,
                        g2z_status want, const g2z_services *services, const char *part) {
  t->checks++;
  if (got != want)
    test_fail(t, file, line, "%s returned \"%s\" (%s), expected \"%s\"", text,
              test_meaning[got], got ? services->error : "", test_meaning[want]);
  else if (part && !strstr(services->error, part))
    test_fail(t, file, line, "%s said \"%s\", which lacks \"%s\"", text, services->error, part);
  else if (got && test_one_as_many(services->error))
    test_fail(t, file, line, "%s counts one as many", services->error);
}
#define CHECK_OK(t, call) \
  test_status(t, __FILE__, __LINE__, #call, call, G2Z_OK, &(t)->services, NULL)

/* Calls an op with named operands, as G2Z__RUN does in the library. */
#define TEST_RUN(t, device, op, ...)                      \
  do {                                                    \
    g2z_device *run_on_ = (device);                       \
    const g2z_##op run_ = {__VA_ARGS__};                  \
    CHECK_OK(t, run_on_->ops->op(run_on_, &run_));        \
  } while (0)

/* Stops a test whose precondition fails: the failure is counted, and the rest would only crash. */
#define REQUIRE_OK(t, call)                                        \
  do {                                                             \
    g2z_status required_ = (call);                                 \
    (t)->checks++;                                                 \
    if (required_ != G2Z_OK) {                                     \
      test_fail(t, __FILE__, __LINE__, "%s: %s", #call, (t)->services.error); \
      longjmp((t)->stopped, 1);                                    \
    }                                                              \
  } while (0)

/* The test owns what its helpers open, and their memory. Its runner ends all of it, the last first,
 * and then looks for leaks. */
static void test_own(g2z_test *t, void (*end)(void *what), void *what) {
  t->owned = (test_owned *)realloc(t->owned, (size_t)(t->owned_count + 1) * sizeof *t->owned);
  if (!t->owned) abort();
  t->owned[t->owned_count].end = end;
  t->owned[t->owned_count++].what = what;
}

/* Ends what the test owns, except the first `kept`. */
static void test_end(g2z_test *t, int kept) {
  while (t->owned_count > kept) {
    const test_owned last = t->owned[--t->owned_count];
    last.end(last.what);
  }
}

/* Zeroed memory that the test owns. */
static void *test_memory(g2z_test *t, size_t bytes) {
  void *memory = calloc(1, bytes ? bytes : 1);
  if (!memory) abort();
  test_own(t, free, memory);
  return memory;
}

static double test_cpu_seconds(void) {
  struct timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

/* How busy the machine is; 1: it is idle otherwise. Tests' deadlines are for an idle machine and
 * are multiplied by this, so that a busy one makes no test fail. Measured as the time in which this
 * thread gets 30 ms of processor time, divided by 30 ms. */
static double test_busiest = 1;   /* largest value measured so far */
static double test_busy(void) {
  const double begin = g2z_seconds(), cpu = test_cpu_seconds();
  while (test_cpu_seconds() - cpu < 0.03) continue;
  const double busy = (g2z_seconds() - begin) / 0.03;
  if (busy > test_busiest) test_busiest = busy;
  return busy > 1 ? busy : 1;
}

/* Whether more than `seconds` have passed since `begin`. Measures the load before it returns 1. */
static int test_late(double begin, double seconds) {
  const double passed = g2z_seconds() - begin;
  if (passed <= seconds * test_busiest) return 0;
  test_busy();
  return passed > seconds * test_busiest;
}

/* Less than this time has passed. */
#define CHECK_SOON(t, begin, seconds)                                                    \
  do {                                                                                   \
    (t)->checks++;                                                                       \
    if (test_late(begin, seconds))                                                       \
      test_fail(t, __FILE__, __LINE__, "took %.3g s, expected %.3g", g2z_seconds() - (begin), \
                (double)(seconds));                                                      \
  } while (0)

#define SKIP(t, reason)                                     \
  do {                                                      \
    snprintf((t)->skip, sizeof(t)->skip, "%s", reason);     \
    return;                                                 \
  } while (0)

/* "DIRECTORY/name" in a buffer that stays valid for three more calls. */
static const char *test_path(const g2z_test *t, const char *name) {
  static char paths[4][512];
  static int turn;
  char *path = paths[turn++ % 4];
  snprintf(path, 512, "%.250s/%.250s", t->directory, name);
  return path;
}

/* A text that the test owns. */
static const char *test_kept(g2z_test *t, const char *text) {
  return strcpy((char *)test_memory(t, strlen(text) + 1), text);
}

/* A formatted text in one of 64 buffers, which are reused cyclically. Functions that take such a
 * text have a macro that takes its format. */
G2Z_PRINTF(1, 2)
static const char *test_text(const char *format, ...) {
  static char texts[64][4096];
  static int turn;
  char *text = texts[turn++ % 64];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof *texts, format, arguments);
  va_end(arguments);
  return text;
}

/* "DIRECTORY/..." in one of the same buffers. */
#define test_at(t, ...) test_text("%s/%s", (t)->directory, test_text(__VA_ARGS__))

/* The text contains all of these parts. */
#define CHECK_HAS(t, text, ...) \
  test_has(t, __FILE__, __LINE__, text, __VA_ARGS__, (const char *)NULL)
static void test_has(g2z_test *t, const char *file, int line, const char *text, ...) {
  va_list parts;
  va_start(parts, text);
  for (const char *part; (part = va_arg(parts, const char *)) != NULL;) {
    t->checks++;
    if (!strstr(text, part)) test_fail(t, file, line, "\"%s\" lacks \"%s\"", text, part);
  }
  va_end(parts);
}

/* The number after `key`, which the text must contain. */
static double test_number(g2z_test *t, const char *text, const char *key) {
  const char *at = strstr(text, key);
  char *end = NULL;
  const double number = at ? strtod(at + strlen(key), &end) : NAN;
  FAIL_IF(t, !at || end == at + strlen(key), "no number after \"%s\" in \"%.200s\"", key, text);
  return number;
}

static int test_times(const char *text, const char *part) {
  int times = 0;
  for (; text && (text = strstr(text, part)) != NULL; text++) times++;
  return times;
}

static void test_write_file(g2z_test *t, const char *path, const void *bytes, size_t count) {
  FILE *file = fopen(path, "wb");
  CHECK(t, file != NULL);
  if (!file) return;
  CHECK(t, fwrite(bytes, 1, count, file) == count);
  CHECK(t, fclose(file) == 0);
}

/* Repeats a call in which one allocation after another fails: it returns G2Z_NO_MEMORY, leaks
 * nothing, and `holds` is true. The call that succeeds makes more than `least` allocations. */
#define CHECK_NO_MEMORY(t, least, most, call, holds)           \
  do {                                                         \
    const long live_ = (t)->allocations;                       \
    g2z_status status_ = G2Z_NO_MEMORY;                        \
    long at_ = 0;                                              \
    while (status_ == G2Z_NO_MEMORY && at_ < (most)) {         \
      (t)->fail_at = ++at_;                                    \
      status_ = (call);                                        \
      (t)->fail_at = 0;                                        \
      CHECK(t, (t)->allocations == live_);                     \
      CHECK(t, status_ != G2Z_NO_MEMORY || (holds));           \
    }                                                          \
    CHECK(t, status_ == G2Z_OK && at_ > (least));              \
  } while (0)

/* The call, on the same objects each time, fails at `least` allocations or more before it succeeds:
 * at its first, then at its second and so on. */
#define CHECK_UNTIL_OK(t, least, call)                                   \
  do {                                                                   \
    g2z_status status_ = G2Z_NO_MEMORY;                                  \
    long failed_ = -1;                                                   \
    while (status_ == G2Z_NO_MEMORY && ++failed_ < 1000) {               \
      (t)->fail_at = failed_ + 1;                                        \
      status_ = (call);                                                  \
      (t)->fail_at = 0;                                                  \
    }                                                                    \
    FAIL_IF(t, status_ != G2Z_OK || failed_ < (least),                   \
            "status %d after %ld failures", (int)status_, failed_);      \
  } while (0)

/* ----- warnings ---------------------------------------------------------- */

static char test_warnings[4096]; /* one per line, since test_warnings_begin */
static void test_warn(void *user, g2z_log_level level, const char *sentence) {
  const size_t used = strlen(test_warnings);
  (void)user;
  if (level == G2Z_LOG_WARNING)
    snprintf(test_warnings + used, sizeof test_warnings - used, "%s\n", sentence);
}

static void test_warnings_begin(g2z_test *t) {
  test_warnings[0] = 0;
  t->services.log = test_warn;
}

static const char *test_warnings_end(g2z_test *t) {
  t->services.log = NULL;
  return test_warnings;
}

/* ----- files ------------------------------------------------------------- */

/* The number of entries in the test's directory, or in a directory inside it. */
static int test_files_count(const g2z_test *t, const char *below) {
  char pattern[600];
  snprintf(pattern, sizeof pattern, "%.250s/%.250s*", t->directory, below);
  glob_t found;
  memset(&found, 0, sizeof found);
  int count = glob(pattern, 0, NULL, &found) == 0 ? (int)found.gl_pathc : 0;
  globfree(&found);
  return count;
}

/* All of a file. The test owns it. An unreadable file is a failure and gives "". */
static char *test_file(g2z_test *t, const char *path, size_t *bytes) {
  g2z_services services; /* the test may use its own to make allocations fail */
  char *text = NULL;
  size_t size = 0;
  memset(&services, 0, sizeof services);
  CHECK_STATUS(t, g2z_read_file(&services, path, (size_t)1 << 26, &text, &size), G2Z_OK, &services,
               NULL);
  char *copy = (char *)test_memory(t, size + 1);
  if (text) memcpy(copy, text, size);
  if (bytes) *bytes = size;
  free(text);
  return copy;
}

/* The text of a file below the test's directory. */
#define test_read(t, ...) test_file(t, test_at(t, __VA_ARGS__), NULL)

/* Whether a file or directory of this name exists below the test's directory. */
static int test_there(const g2z_test *t, const char *name) {
  return access(test_at(t, "%s", name), F_OK) == 0;
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

/* Limits the size of files to simulate a full disk. */
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

/* ----- system calls that signals interrupt, or that fail -----------------
 * This program's symbols take precedence over the C library's, so its own calls come here. While
 * test_interrupts is set, every other call is interrupted, and the rest transfer half of the
 * bytes. While test_fault.name is set, one call fails. */

static int test_interrupts;
enum { TEST_WRITE, TEST_STAT, TEST_SYMLINK };
static struct {
  const char *name;      /* the end of the file's path; NULL: none fails */
  int call;              /* which system call; TEST_WRITE first writes half of its bytes */
  int at;                /* the call that fails, counted from 1; 0: all; */
  int seen;              /* the calls so far */
  int error;
  const char *line;      /* not NULL: this shell command runs then, and the call succeeds. It copies
                          * the files that a kill would leave */
} test_fault;
#if defined(__linux__)
static int test_interrupted(void) {
  static unsigned turn;
  if (!test_interrupts || __atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED) % 2) return 0;
  errno = EINTR;
  return 1;
}

static size_t test_some(size_t count) { return test_interrupts ? count / 2 + count % 2 : count; }

static int test_fails(const char *path, int call) {
  const size_t bytes = strlen(path), end = test_fault.name ? strlen(test_fault.name) : 0;
  if (!end || test_fault.call != call || bytes < end ||
      strcmp(path + bytes - end, test_fault.name) != 0 ||
      (++test_fault.seen != test_fault.at && test_fault.at > 0))
    return 0;
  if (test_fault.line) return system(test_fault.line) != 0;
  errno = test_fault.error;
  return 1;
}

static ssize_t test_write(int file, const void *from, size_t count) {
  char link[64], path[PATH_MAX] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  if (test_fault.name && readlink(link, path, sizeof path - 1) > 0 &&
      test_fails(path, TEST_WRITE)) {
    syscall(SYS_write, file, from, count / 2);
    errno = test_fault.error;
    return -1;
  }
  return syscall(SYS_write, file, from, test_some(count));
}

int test_call_stat(const char *path, struct stat *out) __asm__("stat");
int test_call_stat(const char *path, struct stat *out) {
  return test_fails(path, TEST_STAT) ? -1 : fstatat(AT_FDCWD, path, out, 0);
}

int test_call_symlink(const char *to, const char *path) __asm__("symlink");
int test_call_symlink(const char *to, const char *path) {
  return test_fails(path, TEST_SYMLINK) ? -1 : symlinkat(to, AT_FDCWD, path);
}

#define INTERRUPTED(result, name, parameters, call)                                  \
  result test_call_##name parameters __asm__(#name);                                 \
  result test_call_##name parameters { return test_interrupted() ? -1 : (result)(call); }
INTERRUPTED(int, open, (const char *path, int flags, unsigned mode),
            syscall(SYS_openat, AT_FDCWD, path, flags, mode))
INTERRUPTED(int, rename, (const char *from, const char *to), renameat(AT_FDCWD, from, AT_FDCWD, to))
INTERRUPTED(int, unlink, (const char *path), unlinkat(AT_FDCWD, path, 0))
INTERRUPTED(int, mkdir, (const char *path, mode_t mode), mkdirat(AT_FDCWD, path, mode))
INTERRUPTED(int, fsync, (int file), 0 && file) /* only a power cut would show a difference */
INTERRUPTED(int, ftruncate, (int file, off_t bytes), syscall(SYS_ftruncate, file, bytes))
INTERRUPTED(ssize_t, read, (int file, void *to, size_t count),
            syscall(SYS_read, file, to, test_some(count)))
INTERRUPTED(ssize_t, write, (int file, const void *from, size_t count),
            test_write(file, from, count))
INTERRUPTED(ssize_t, pread, (int file, void *to, size_t count, off_t at),
            syscall(SYS_pread64, file, to, test_some(count), at))
INTERRUPTED(ssize_t, pwrite, (int file, const void *from, size_t count, off_t at),
            syscall(SYS_pwrite64, file, from, test_some(count), at))
INTERRUPTED(ssize_t, send, (int file, const void *from, size_t count, int flags),
            syscall(SYS_sendto, file, from, test_some(count), flags, NULL, 0))
INTERRUPTED(ssize_t, recv, (int file, void *to, size_t count, int flags),
            syscall(SYS_recvfrom, file, to, test_some(count), flags, NULL, NULL))
INTERRUPTED(int, accept, (int file, struct sockaddr *address, socklen_t *bytes),
            syscall(SYS_accept4, file, address, bytes, 0))
#undef INTERRUPTED
#endif

/* ----- shells ------------------------------------------------------------ */

/* Runs a line in a shell; returns its output and exit code, or -1 if the output counts wrongly. */
static int test_shell(const char *line, char *output, size_t room) {
  size_t used = 0, got;
  fflush(stdout);
  FILE *pipe = popen(line, "r");
  while (pipe && (got = fread(output + used, 1, room - 1 - used, pipe)) > 0) used += got;
  output[used] = 0;
  int status = pipe ? pclose(pipe) : -1;
  const char *wrong = test_one_as_many(output);
  if (wrong) printf("    \"%.60s\" counts one as many\n", wrong);
  return !wrong && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Runs a shell command in the test's directory; it must succeed. */
#define test_sh(t, ...) test_sh_line(t, test_text(__VA_ARGS__))
static void test_sh_line(g2z_test *t, const char *line) {
  fflush(stdout);
  FAIL_IF(t, system(test_text("cd '%s' && { %s; }", t->directory, line)) != 0, "failed: %s", line);
}

/* --help of a program has lines of at most 80 columns. */
static void test_narrow(g2z_test *t, const char *program, const char *said) {
  for (const char *line = said; *line; line += strspn(line, "\n")) {
    const size_t wide = strcspn(line, "\n");
    FAIL_IF(t, wide > 80, "%s --help: %.*s", program, (int)wide, line);
    line += wide;
  }
}

/* --help of a program lists the flags that docs/flags.md lists. */
static void test_help(g2z_test *t, const char *name, const char *program) {
  char said[16384];
  const char *want = test_at(t, "flags_wanted");
  int code = test_shell(test_text("awk '/^## /{on=$2 == \"./%s\"} on && /^  --/{print $1}' "
                                  "docs/flags.md > '%s'; '%s' --help | awk '/^  --/{print $1}' | "
                                  "diff - '%s' && [ -s '%s' ]", name, want, program, want, want),
                        said, sizeof said);
  FAIL_IF(t, code != 0, "%s --help and docs/flags.md: %s", name, said);
  CHECK(t, test_shell(test_text("'%s' --help", program), said, sizeof said) == 0);
  test_narrow(t, name, said);
}

/* 1: this machine can open pseudo-terminals; a container may lack /dev/pts. */
static int test_terminals(void) {
  int master = posix_openpt(O_RDWR | O_NOCTTY);
  const int there = master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0 &&
                    access(ptsname(master), R_OK | W_OK) == 0;
  if (master >= 0) close(master);
  return there;
}

/* ----- random numbers, configs and plans --------------------------------- */

static uint32_t test_bpe_random(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

static g2z_train_config test_config_of(int layers, int heads, int channels, int context,
                                       int vocab) {
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
  config.model.layers = layers;
  config.model.heads = heads;
  config.model.channels = channels;
  config.model.context = context;
  config.model.vocab = vocab;
  config.seq = context;
  config.batch = 2;
  return config;
}

/* The plan of a config. It stays valid until two more are made. */
static const g2z_plan *test_plan(g2z_test *t, const g2z_train_config *config,
                                 g2z_device_kind device, int rank, int world) {
  g2z_plan_free(t->plans[0]);
  t->plans[0] = t->plans[1];
  CHECK_OK(t, g2z_plan_create(&t->services, config, device, rank, world, 0, &t->plans[1]));
  return t->plans[1];
}

/* Whether a plan accepts this config. */
static g2z_status test_config_check(g2z_services *services, const g2z_train_config *config) {
  g2z_plan *plan = NULL;
  const g2z_status status = g2z_plan_create(services, config, G2Z_DEVICE_CUDA, 0, 1, 1, &plan);
  g2z_plan_free(plan);
  return status;
}

/* ----- GPUs -------------------------------------------------------------- */

#define CUDA_OR_SKIP(t) \
  if (!g2z_device_count(G2Z_DEVICE_CUDA)) SKIP(t, "no GPU that this build can use")

/* Whether tests on a GPU use this type: G2Z_TEST_DTYPES, such as "fp16,bf16", selects some. */
static int test_wants(g2z_dtype dtype) {
  const char *wanted = getenv("G2Z_TEST_DTYPES");
  return !wanted || strstr(wanted, g2z_dtype_text(dtype));
}

/* Under a tool that follows every access, fp32's kernels, which compute in shared memory, take
 * minutes per shape: G2Z_TEST_FP32_QUERIES leaves out shapes with more queries. */
static int test_attention_leaves_out(g2z_dtype dtype, int queries) {
  const char *most = getenv("G2Z_TEST_FP32_QUERIES");
  return most && dtype != G2Z_FP16 && dtype != G2Z_BF16 && queries > atoi(most);
}

/* ----- trainers ---------------------------------------------------------- */

static void test_end_context(void *context) { g2z_context_free((g2z_context *)context); }
static void test_end_trainer(void *trainer) { g2z_trainer_free((g2z_trainer *)trainer); }

/* The test owns the context. */
static g2z_status test_context(g2z_test *t, g2z_device_kind device, g2z_context **out) {
  g2z_context_config config = g2z_context_config_default(&t->services);
  config.device = device;
  g2z_status status = g2z_context_create(&config, out);
  if (status == G2Z_OK) test_own(t, test_end_context, *out);
  return status;
}

/* A trainer on rank 0 of 1. The test owns it; test_trainer_close frees it, and what came later. */
typedef struct test_trainer {
  g2z_context *context;
  g2z_trainer *trainer;
  int before;                    /* what the test owned before */
} test_trainer;

static g2z_status test_trainer_on(g2z_test *t, g2z_device_kind device,
                                  const g2z_train_config *config, test_trainer *out) {
  memset(out, 0, sizeof *out);
  out->before = t->owned_count;
  g2z_status status = test_context(t, device, &out->context);
  if (status == G2Z_OK) status = test_trainer_create(out->context, config, &out->trainer);
  if (status == G2Z_OK) test_own(t, test_end_trainer, out->trainer);
  return status;
}

static g2z_status test_trainer_open(g2z_test *t, const g2z_train_config *config,
                                    test_trainer *out) {
  return test_trainer_on(t, G2Z_DEVICE_CPU, config, out);
}

static g2z_trainer *test_trainer_of(g2z_test *t, const g2z_train_config *config) {
  test_trainer tt;
  REQUIRE_OK(t, test_trainer_open(t, config, &tt));
  return tt.trainer;
}

static void test_trainer_close(g2z_test *t, const test_trainer *tt) { test_end(t, tt->before); }

static void test_tokens(int32_t *tokens, size_t count, int vocab, uint64_t seed) {
  for (size_t i = 0; i < count; i++) {
    uint32_t counter[4] = {0, 0, 0, 0}, out[4];
    counter[0] = (uint32_t)i;
    g2z_philox(seed, G2Z_RANDOM_SYNTHETIC, counter, out);
    tokens[i] = (int32_t)(out[0] % (uint32_t)vocab);
  }
}

/* Random tokens below 61, for a step of at most 96. */
typedef struct test_batch {
  int32_t x[96], y[96];
} test_batch;

static test_batch test_some_batch(void) {
  test_batch batch;
  test_tokens(batch.x, 96, 61, 5);
  test_tokens(batch.y, 96, 61, 6);
  return batch;
}

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

/* ----- runs -------------------------------------------------------------- */

static g2z_status test_shard_write(g2z_test *t, const char *path, g2z_shard_format format,
                                   uint64_t vocab_hash, const int32_t *ids, int count) {
  g2z_shard_writer *writer = NULL;
  g2z_status status = g2z_shard_writer_create(&t->services, path, format, vocab_hash, &writer);
  if (status == G2Z_OK) status = g2z_shard_writer_append(writer, ids, (size_t)count);
  if (status == G2Z_OK) status = g2z_shard_writer_commit(writer);
  g2z_shard_writer_free(writer);
  return status;
}

/* A shard of these tokens in the test's directory. */
static void test_shard(g2z_test *t, const char *name, g2z_shard_format format, const int32_t *ids,
                       int count) {
  CHECK_OK(t, test_shard_write(t, test_path(t, name), format, 0, ids, count));
}

/* A shard of byte-level tokens, regular enough for a tiny model to learn: "0 1 2 ... 9 0 1 ...". */
static void test_run_shard(g2z_test *t, const char *name, int tokens) {
  int32_t ids[2048];
  for (int i = 0; i < tokens && i < 2048; i++)
    ids[i] = i % 2 ? 220 : 15 + i / 2 % 10; /* a space; the digits */
  test_shard(t, name, G2Z_SHARD_LLMC, ids, tokens);
}

/* 8 steps in 2 epochs of 4, two validation batches. The test owns the paths. */
typedef struct test_run_setup {
  g2z_run_config config;
  const char *train, *val, *run_dir, *weights;
} test_run_setup;

static test_run_setup test_run_prepare(g2z_test *t, const char *run_dir) {
  test_run_setup setup, *s = &setup;
  s->config = g2z_run_config_default(G2Z_DEVICE_CPU);
  s->train = test_kept(t, test_path(t, "digits_train_000000.bin"));
  s->val = test_kept(t, test_path(t, "digits_val_000000.bin"));
  s->run_dir = test_kept(t, test_path(t, run_dir));
  s->weights = test_kept(t, test_text("%s/weights", s->run_dir));
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
  return setup;
}

typedef struct test_run_seen {
  int steps, validations, samples, saved, done;
  int skipped, nans;             /* steps that were not applied; lines with "loss nan" */
  double first_loss, last_loss, val_loss;
  int64_t last_step;
  char sample[512], line[512];
} test_run_seen;

static void test_end_run(void *run) { g2z_run_free((g2z_run *)run); }

/* A run on a CPU. The test owns it. */
static g2z_status test_run_open(g2z_test *t, const g2z_run_config *config, g2z_run **out) {
  g2z_context *context = NULL;
  g2z_status status = test_context(t, G2Z_DEVICE_CPU, &context);
  *out = NULL;
  if (status == G2Z_OK) status = g2z_run_create(context, config, out);
  if (*out) test_own(t, test_end_run, *out);
  return status;
}

/* The next test_run_all asks to stop after this step, or sets a weight to NaN, with the sign that
 * x86 gives a NaN, before this event; 0: never. */
static int test_run_stop_at, test_run_spoil_at;

static g2z_status test_run_all(g2z_test *t, const g2z_run_config *config, test_run_seen *seen) {
  const int before = t->owned_count;
  g2z_run *run;
  g2z_run_event event;
  memset(seen, 0, sizeof *seen);
  g2z_status status = test_run_open(t, config, &run);
  for (int events = 1; status == G2Z_OK && !seen->done; events++) {
    const float nan = copysignf(NAN, -1);
    if (events == test_run_spoil_at)
      CHECK_OK(t, g2z_trainer_write(g2z_run_trainer(run), G2Z_BUFFER_MASTER, 0, 1, &nan));
    status = g2z_run_next(run, &event);
    if (status == G2Z_DIVERGED) CHECK(t, g2z_run_next(run, &event) == status); /* for good */
    if (status != G2Z_OK) break;
    CHECK(t, event.line && *event.line);
    seen->nans += strstr(event.line, "loss nan") && !strstr(event.line, "-nan");
    if (config->resume && seen->last_step == 0)
      seen->last_step = event.metrics.step - (event.kind == G2Z_RUN_STEP);
    if (event.kind == G2Z_RUN_STEP) {
      if (seen->steps++ == 0) seen->first_loss = event.metrics.loss;
      seen->skipped += event.metrics.skipped != 0;
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
    } else if (event.kind == G2Z_RUN_DONE) {
      seen->done = 1;
      snprintf(seen->line, sizeof seen->line, "%s", event.line);
    }
  }
  test_run_stop_at = test_run_spoil_at = 0;
  test_end(t, before);
  return status;
}

/* A run must end well; returns its events. */
static test_run_seen test_run_well(g2z_test *t, const test_run_setup *s) {
  test_run_seen seen;
  CHECK_OK(t, test_run_all(t, &s->config, &seen));
  return seen;
}

/* The first character of the value at "a.b.0.c" in a JSON text; 0 if there is none. */
static char test_json_kind(g2z_test *t, const char *text, size_t bytes, const char *at) {
  const g2z_object object = {&t->services, (char *)"a text", (char *)(uintptr_t)text, bytes};
  g2z_json json;
  return g2z_object_at(&object, at, &json) ? g2z_json_peek(&json) : '\0';
}

static void test_run_schema(g2z_test *t, const char *text, size_t bytes, const char *const *schema,
                            size_t count) {
  for (size_t i = 0; i < count; i++) {
    char kind = test_json_kind(t, text, bytes, schema[i] + 2);
    if (kind >= '0' && kind <= '9') kind = '0';
    if (kind == 'f') kind = 't';
    FAIL_IF(t, kind != schema[i][0], "%s is '%c', expected '%c'", schema[i] + 2, kind ? kind : '-',
            schema[i][0]);
  }
}

/* A program, or the variable's: another build of it, for instance with sanitizers. */
static const char *test_program(const char *variable, const char *program) {
  const char *other = getenv(variable);
  return other ? other : program;
}
#define test_train_program() test_program("G2Z_TRAIN", "./train")
#define test_prepare_program() test_program("G2Z_PREPARE_DATA", "./prepare_data")
#define test_bench_program() test_program("G2Z_BENCH", "./bench")

/* Runs `train ARGUMENTS` in a shell; it must end with `code`. The output stays valid until the next
 * call. */
#define test_trains(t, code, ...) test_trains_line(t, code, test_text(__VA_ARGS__))
static const char *test_trains_line(g2z_test *t, int code, const char *line) {
  static char output[1 << 16];
  int got = test_shell(test_text("%s %s 2>&1", test_train_program(), line), output, sizeof output);
  FAIL_IF(t, got != code, "train %s ended with %d, expected %d: %s", line, got, code, output);
  return output;
}

static int test_train_is_there(void) { return access(test_train_program(), X_OK) == 0; }
#define TRAIN_OR_SKIP(t) \
  if (!test_train_is_there()) SKIP(t, "./train is not built: make train")

/* ----- checkpoints ------------------------------------------------------- */

/* A tiny model that reads "digits.bin": 125 sequences of 16. */
static g2z_train_config test_saved_config(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 16, 16, 257);
  const char *shard = test_kept(t, test_path(t, "digits.bin"));
  if (access(shard, R_OK) != 0) test_run_shard(t, "digits.bin", 2001);
  config.train_glob = shard;
  config.optimizer.lr = 1e-2f;
  config.optimizer.warmup = 2;
  config.optimizer.steps = 40;
  return config;
}

/* Updates a file's line in CHECKSUMS, as if the checkpoint had been saved with it. */
static void test_saved_sign(g2z_test *t, const char *directory, const char *name) {
  const char *path = test_text("%s/CHECKSUMS", directory);
  size_t bytes, file_bytes;
  char *text = test_file(t, path, &bytes), *last = text + bytes - 1; /* the last line's start */
  const char *file = test_file(t, test_text("%s/%s", directory, name), &file_bytes);
  char *at = strstr(text, test_text(" %zu 0 %s\n", file_bytes, name));
  CHECK(t, at != NULL);
  if (!at) return;
  while (last[-1] != '\n') last--;
  memcpy(at - 8, test_text("%08" PRIx32, g2z_crc32c(0, file, file_bytes)), 8);
  memcpy(last, test_text("%08" PRIx32, g2z_crc32c(0, text, (size_t)(last - text))), 8);
  test_write_file(t, path, text, bytes);
}

/* ----- the configs of ZeRO ----------------------------------------------- */

enum { ZERO_STEPS = 12, ZERO_SEQ = 16, ZERO_STAGES = 4 };
/* Sequences per step: with 3 micro-steps, 1 to 4 ranks divide the CPU's, 1, 2, 4 and 8 the GPUs' */
enum { ZERO_ON_CPU = 36, ZERO_ON_GPU = 48, ZERO_SEQUENCES = ZERO_ON_GPU };
enum { ZERO_WORDS = 869 }; /* largest vocabulary */
enum { ZERO_COLUMNS = ZERO_STAGES + 1, ZERO_DP = ZERO_STAGES, ZERO_CASES = 6 * ZERO_COLUMNS };

/* Case `index` of stages 0 to 3 and, in column ZERO_DP, strategy dp; three bucket sizes, one and
 * three micro-steps. The largest bucket takes everything; the smallest cuts every matrix. Stage 3
 * has more blocks than block buffers. In every other case the vocabulary is so large that a step's
 * tokens are few in comparison, and the embedding's gradient is sent as rows.
 * A large eps limits the effect of rounding. AdamW's first steps are lr * g / (|g| + eps): with the
 * usual 1e-8, a gradient that is zero except for rounding moves a weight by lr either way, and
 * losses of fp16 differ by 1e-3 for some seeds. With the usual first loss scale, some seeds
 * overflow in one run and not in the other, and losses differ by the skipped step. */
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
  config.transport = (g2z_transport)((index / ZERO_COLUMNS + column) % G2Z_TRANSPORT_COUNT);
  /* Trainers that time products may choose different algorithms, and so round differently. */
  config.tune = index % 2 ? G2Z_TUNE_OWN : G2Z_TUNE_OFF;
  config.dtype = dtype;
  config.dropout = 0.1f;
  config.optimizer.lr = config.optimizer.min_lr = 4e-3f;
  config.optimizer.eps = 1e-4f;
  config.optimizer.loss_scale = 1024;
  config.optimizer.warmup = 0;
  return config;
}

static void rank_sleep(double seconds) {
  struct timespec pause = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
  while (nanosleep(&pause, &pause) != 0) {
  }
}

/* The deadline of a rank program. */
static double rank_seconds(double seconds) {
  const char *busy = getenv("G2Z_TEST_BUSY");
  return busy && atof(busy) > 1 ? seconds * atof(busy) : seconds;
}

/* What a rank program opens belongs to its g2z_test, as in a test. */
static g2z_context *rank_context(g2z_test *t, int gpu) {
  g2z_context *context;
  REQUIRE_OK(t, test_context(t, gpu ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU, &context));
  return context;
}

static g2z_trainer *rank_trainer(g2z_test *t, g2z_context *context,
                                 const g2z_train_config *config) {
  g2z_trainer *trainer;
  REQUIRE_OK(t, test_trainer_create(context, config, &trainer));
  test_own(t, test_end_trainer, trainer);
  return trainer;
}

/* A rank program leaves its results in a file. */
static g2z_status rank_leaves(const char *path, const void *results, size_t bytes) {
  FILE *file = fopen(path, "wb");
  const int whole = file && fwrite(results, 1, bytes, file) == bytes;
  return file && fclose(file) == 0 && whole ? G2Z_OK : G2Z_IO;
}

/* The test takes them, all at once; 0: they are not there. */
static int test_takes(g2z_test *t, const char *path, void *results, size_t bytes) {
  const int before = t->owned_count;
  size_t found;
  const char *text = test_file(t, path, &found);
  CHECK(t, found == bytes);
  if (found == bytes) memcpy(results, text, bytes);
  test_end(t, before);
  unlink(path);
  return found == bytes;
}

/* ----- ranks: real processes ---------------------------------------------
 * A rank program is a function that `./test_gpt2 --rank-program NAME ARGUMENTS` runs in a separate
 * process; its result is the exit code. Processes are started with fork and exec: the test process
 * has used OpenMP's threads, and maybe CUDA, which do not survive a fork. */

enum { TEST_RANKS = 8, TEST_WORDS = 40, RANKS_MOST = 256 /* for use by hand */ };

typedef struct test_ranks {
  int world, port;
  int hosts;                    /* 1: each rank is as if on a host of its own, with one GPU */
  pid_t pid[TEST_RANKS];        /* 0: has ended */
  int code[TEST_RANKS];         /* exit code; 128 + signal; -1: had to be killed at the deadline */
  double ended[TEST_RANKS];     /* g2z_seconds() */
  char *output[TEST_RANKS];     /* its output, once it has ended */
} test_ranks;

/* The first of 16 ports. Tests that run at the same time, in this process or another, use different
 * ones. Another program may hold a port: the four that ranks try must be free. */
static int test_ports; /* how many this process has handed out */
static int test_ranks_port(void) {
  for (int tries = 0;; tries++) {
    int port = 10000 + ((int)getpid() * 64 + 16 * test_ports++) % 9900, ready = 0;
    for (int at = port; at < port + 4; at++) {
      struct sockaddr_in here;
      int one = socket(AF_INET, SOCK_STREAM, 0), reuse = 1;
      memset(&here, 0, sizeof here);
      here.sin_family = AF_INET;
      here.sin_port = htons((uint16_t)at);
      setsockopt(one, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
      ready += bind(one, (struct sockaddr *)&here, sizeof here) == 0 && listen(one, 1) == 0;
      close(one);
    }
    if (ready == 4 || tries == 100) return port;
  }
}

static const char *test_ranks_file(const g2z_test *t, const test_ranks *ranks, int rank) {
  char name[64];
  snprintf(name, sizeof name, "rank_%d_%d.txt", ranks->port, rank);
  return test_path(t, name);
}

/* A rank's environment: this process's, without any launcher's variables and those in `extra`
 * ("NAME=value"), which follows. Freed as one block. */
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
    for (int k = 0; k < extras; k++)
      drop |= strncmp(environ[i], extra[k], strcspn(extra[k], "=") + 1) == 0;
    if (!drop) list[kept++] = environ[i];
  }
  for (int i = 0; i < extras; i++) list[kept++] = (char *)(uintptr_t)extra[i];
  return list;
}

/* The GPU of number `index`, as CUDA_VISIBLE_DEVICES names it. */
static const char *test_gpu_name(int index) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) return test_text("%d", index);
  for (int i = 0; i < index && strchr(list, ','); i++) list = strchr(list, ',') + 1;
  return test_text("%.*s", (int)strcspn(list, ","), list);
}

/* Starts a program as `rank` of ranks->world, as a user would by hand, with stdout and stderr in
 * the rank's file. It dies with this process. A `variable` ("NAME=value", or NULL) comes first in
 * its environment and therefore takes precedence. */
static void test_ranks_launch(g2z_test *t, test_ranks *ranks, int rank, const char *variable,
                              const char *program, char **argv) {
  const char *extra[] = {variable ? variable : "MASTER_ADDR=127.0.0.1",
                         test_text("RANK=%d", rank), test_text("WORLD_SIZE=%d", ranks->world),
                         "MASTER_ADDR=127.0.0.1", test_text("MASTER_PORT=%d", ranks->port),
                         "OMP_NUM_THREADS=1",
                         test_text("G2Z_RUN_ID=test_%d_%d", (int)getpid(), ranks->port),
                         /* for `hosts` only: */
                         "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", test_text("NCCL_HOSTID=%d", rank),
                         test_text("CUDA_VISIBLE_DEVICES=%s", test_gpu_name(rank))};
  char **environment = test_ranks_environment(extra, ranks->hosts ? 11 : 7);
  int file = open(test_ranks_file(t, ranks, rank), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  CHECK(t, file >= 0);
  fflush(stdout);
  pid_t parent = getpid(), pid = fork();
  if (pid == 0) { /* until exec, only calls that a signal handler may make */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent && dup2(file, 1) == 1 && dup2(file, 2) == 2)
      execve(program, argv, environment);
    _exit(127);
  }
  CHECK(t, pid > 0);
  close(file);
  ranks->pid[rank] = pid;
  free(environment);
}

/* Starts `--rank-program PROGRAM ARGUMENTS` in the same way, as ranks first..last. */
static void test_ranks_start(g2z_test *t, test_ranks *ranks, int first, int last,
                             const char *variable, const char *arguments) {
  char copy[2048], name[] = "test_gpt2", option[] = "--rank-program";
  char *argv[TEST_WORDS] = {name, option, NULL};
  int words = 2;
  setenv("G2Z_TEST_BUSY", test_text("%.1f", test_busy()), 1); /* rank_seconds multiplies by it */
  CHECK(t, snprintf(copy, sizeof copy, "%s", arguments) < (int)sizeof copy);
  for (char *word = strtok(copy, " "); word && words < TEST_WORDS - 1; word = strtok(NULL, " "))
    argv[words++] = word;
  for (int rank = first; rank <= last; rank++)
    test_ranks_launch(t, ranks, rank, variable, "/proc/self/exe", argv);
}

static int test_hosts; /* test_ranks.hosts of the ranks that are opened next */

static test_ranks test_ranks_open(int world) {
  test_ranks ranks;
  memset(&ranks, 0, sizeof ranks);
  ranks.world = world;
  ranks.hosts = test_hosts;
  ranks.port = test_ranks_port();
  return ranks;
}

/* Waits until all have ended, at most `seconds`; then kills the rest. */
static void test_ranks_wait(g2z_test *t, test_ranks *ranks, double seconds) {
  double begin = g2z_seconds();
  for (int running = 1; running;) {
    int late = test_late(begin, seconds);
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
      ranks->output[r] = test_file(t, test_ranks_file(t, ranks, r), NULL);
    }
    struct timespec pause = {0, 5000000};
    if (running) nanosleep(&pause, NULL);
  }
}

/* A rank's output so far. */
static void test_ranks_peek(g2z_test *t, const test_ranks *ranks, int rank, char *text,
                            size_t room) {
  int file = open(test_ranks_file(t, ranks, rank), O_RDONLY);
  ssize_t got = file >= 0 ? read(file, text, room - 1) : 0;
  text[got > 0 ? got : 0] = 0;
  if (file >= 0) close(file);
}

/* Waits until all ranks have met, at most 20 s. */
static void test_ranks_await(g2z_test *t, const test_ranks *ranks) {
  char text[256];
  double begin = g2z_seconds();
  for (int r = 0; r < ranks->world; r++)
    for (text[0] = 0; !strstr(text, "has met") && !test_late(begin, 20); usleep(2000))
      test_ranks_peek(t, ranks, r, text, sizeof text);
  CHECK_SOON(t, begin, 20);
}

/* Rank r ended with this code and its output contains this (NULL: anything). */
#define CHECK_RANK(t, ranks, r, want, part) \
  test_ranks_check(t, __FILE__, __LINE__, ranks, r, want, part)
static void test_ranks_check(g2z_test *t, const char *file, int line, const test_ranks *ranks,
                             int rank, int want, const char *part) {
  const char *output = ranks->output[rank] ? ranks->output[rank] : "";
  t->checks++;
  if (ranks->code[rank] != want || (part && !strstr(output, part)))
    test_fail(t, file, line, "rank %d ended with %d, expected %d and \"%s\"; it said:\n%s", rank,
              ranks->code[rank], want, part ? part : "", output);
}

/* All ranks end with this code and this output within `seconds`. */
static void test_ranks_end(g2z_test *t, test_ranks *ranks, double seconds, int code,
                           const char *says) {
  test_ranks_wait(t, ranks, seconds);
  for (int r = 0; r < ranks->world; r++) CHECK_RANK(t, ranks, r, code, says);
}

/* Runs a rank program on `world` ranks, all of which end this way within two minutes. */
#define test_ranks_job(t, world, code, says, ...) \
  test_ranks_line(t, world, code, says, test_text(__VA_ARGS__))
static void test_ranks_line(g2z_test *t, int world, int code, const char *says, const char *line) {
  test_ranks ranks = test_ranks_open(world);
  test_ranks_start(t, &ranks, 0, world - 1, NULL, line);
  test_ranks_end(t, &ranks, 120, code, says);
}
