/* Tests of the CPU's op table against naive references in double, and of the properties that a
 * host's device reports. */

/* ----- >>10 ops: the CPU's table against naive references in double --------
 * Every buffer lies between guard values. Sizes leave tails in every block, and each op has a size
 * that uses several threads. A bound is a number of fp32 roundings of the sum of the terms'
 * magnitudes; 16-bit types get one more unit in the last place of the result, since either
 * neighbour is right if the reference is close to a tie. */

#define OPS_GUARD 16
#define OPS_BLOCKS 128

typedef struct ops_env {
  g2z_test *t;
  g2z_device *device;
  const g2z_ops *ops;
  g2z_dtype dtype, grad;
  float *blocks[OPS_BLOCKS];
  int counts[OPS_BLOCKS];
  int used;
  uint32_t seed;
  g2z_step_state state; /* the state that these ops read and write */
  g2z_dropout dropout;
} ops_env;

#define OPS_CALL(e, op, ...) CHECK_OK((e)->t, (e)->ops->op((e)->device, __VA_ARGS__))
#define OPS_RUN(e, op, ...) TEST_RUN((e)->t, (e)->device, op, __VA_ARGS__)

static uint64_t ops_hash; /* hash of all buffers since the test reset it */

static ops_env ops_open(g2z_test *t, g2z_dtype dtype, g2z_dtype grad) {
  ops_env e;
  memset(&e, 0, sizeof e);
  e.t = t;
  e.dtype = dtype;
  e.grad = grad;
  e.seed = 1;
  e.state.step = 11;
  e.state.loss_scale = 1;
  REQUIRE_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, dtype, grad, &e.device));
  mutate_device(e.device);
  e.ops = e.device->ops;
  return e;
}

/* An output: `count` floats that hold `value`, between guards. */
static float *ops_filled(ops_env *e, int count, float value) {
  if (count < 0 || e->used == OPS_BLOCKS) abort();
  float *block = (float *)malloc(((size_t)count + 2 * OPS_GUARD) * sizeof *block);
  if (!block) abort();
  for (int i = 0; i < count + 2 * OPS_GUARD; i++) block[i] = -98765.25f;
  for (int i = 0; i < count; i++) block[OPS_GUARD + i] = value;
  e->blocks[e->used] = block;
  e->counts[e->used++] = count;
  return block + OPS_GUARD;
}

/* An output that holds no right value yet. */
static float *ops_output(ops_env *e, int count) { return ops_filled(e, count, 777); }

/* An input: multiples of scale / 2048 in [-scale, scale), in the device's type, so that each is
 * exact in fp16 if scale is a power of two. */
static float *ops_random(ops_env *e, int count, float scale) {
  float *x = ops_filled(e, count, 0);
  for (int i = 0; i < count; i++) {
    e->seed = e->seed * 1664525u + 1013904223u;
    x[i] = g2z__round(e->dtype, scale * ((float)(e->seed >> 20) / 2048.0f - 1.0f));
  }
  return x;
}

/* Memory for references. The guard keeps malloc's alignment, which suffices for double. */
static double *ops_doubles(ops_env *e, int count) {
  return (double *)(void *)ops_filled(e, 2 * count, 0);
}

/* Checks all guards and frees everything. */
static void ops_close(ops_env *e) {
  int intact = 1;
  for (int b = 0; b < e->used; b++) {
    float *block = e->blocks[b], *end = block + OPS_GUARD + e->counts[b];
    const unsigned char *bytes = (const unsigned char *)(block + OPS_GUARD);
    for (int i = 0; i < OPS_GUARD; i++)
      intact &= block[i] == -98765.25f && end[i] == -98765.25f;
    for (int i = 0; i < 4 * e->counts[b]; i++) ops_hash = (ops_hash ^ bytes[i]) * 0x100000001b3u;
    free(block);
  }
  CHECK(e->t, intact);
  g2z_device_free(e->device);
}

static const g2z_dtype ops_dtypes[3] = {G2Z_FP32, G2Z_FP16, G2Z_BF16};

/* Each size in each type; the second size with gradients in fp32. */
static void ops_each(g2z_test *t, void (*run)(ops_env *e, const int *size), const int (*sizes)[4],
                     int count) {
  for (int i = 0; i < 3; i++)
    for (int s = 0; s < count; s++) {
      ops_env e = ops_open(t, ops_dtypes[i], s == 1 ? G2Z_FP32 : ops_dtypes[i]);
      run(&e, sizes[s]);
      ops_close(&e);
    }
}

/* The distance between x's neighbours in a type; 0 for fp32, where the other bound is enough. */
static double ops_ulp(g2z_dtype dtype, double x) {
  if (dtype != G2Z_FP16 && dtype != G2Z_BF16) return 0;
  int exponent;
  frexp(x, &exponent); /* |x| in [2^(exponent-1), 2^exponent) */
  if (dtype == G2Z_BF16) return ldexp(1.0, exponent - 8);
  return ldexp(1.0, (exponent < -13 ? -13 : exponent) - 11);
}

/* got = want within `roundings` fp32 roundings of `size` (NULL: of |want|) plus a ulp of the type,
 * and every value is representable. Reports only the worst element. */
static void ops_expect(ops_env *e, const char *what, const float *got, const double *want,
                       const double *size, int count, g2z_dtype dtype, double roundings) {
  double worst = 0;
  int at = 0, of_type = 1;
  for (int i = 0; i < count; i++) {
    double bound = roundings * ldexp(size ? size[i] : fabs(want[i]), -24) +
                   ops_ulp(dtype, want[i]) + 1e-37;
    double ratio = fabs((double)got[i] - want[i]) / bound;
    if (!(ratio <= worst)) worst = ratio, at = i; /* a NaN stays the worst element */
    if (g2z__round(dtype, got[i]) != got[i]) of_type = 0;
    if (worst != worst) break;
  }
  FAIL_IF(e->t, !(worst <= 1), "%s: element %d of %d is %.9g, expected %.9g: %.3g times "
          "the bound", what, at, count, (double)got[at], want[at], worst);
  if (!of_type) test_fail(e->t, __FILE__, __LINE__, "%s: not rounded to its type", what);
}

/* The bound of a blocked sum of n terms. Roundings add up like a random walk, so about sqrt(n) of
 * them remain; four times that has never been observed. */
static double ops_walk(int n) { return 4 + 4 * sqrt((double)n); }

/* Initial values of a result and of its magnitudes: 0, or `before` if the op adds. */
static void ops_begin(double *sum, double *size, const float *before, int count) {
  for (int i = 0; i < count; i++) {
    sum[i] = before ? (double)before[i] : 0;
    size[i] = fabs(sum[i]);
  }
}

/* c += a b in double, element (i,k) of a at a[i * ar + k * ac]; size: the same of magnitudes. */
static void ops_product(double *c, double *size, const float *a, int ar, int ac, const float *b,
                        int br, int bc, int M, int N, int K) {
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++)
      for (int k = 0; k < K; k++) {
        double term = (double)a[i * ar + k * ac] * (double)b[k * br + j * bc];
        c[i * N + j] += term;
        size[i * N + j] += fabs(term);
      }
}

/* got[C] is the sum of x[N,C]'s rows, plus `before` unless it is NULL. */
static void ops_expect_sums(ops_env *e, const char *what, const float *got, const float *x,
                            const float *before, int N, int C) {
  double *sum = ops_doubles(e, C), *size = ops_doubles(e, C);
  ops_begin(sum, size, before, C);
  for (int i = 0; i < N * C; i++) {
    sum[i % C] += (double)x[i];
    size[i % C] += fabs((double)x[i]);
  }
  ops_expect(e, what, got, sum, size, C, e->grad, ops_walk(N));
}

static g2z_write ops_write(const float *before) {
  return before ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
}

/* This step's dropout for sequences of `seq` rows. */
static const g2z_dropout *ops_dropout(ops_env *e, float probability, int seq) {
  g2z_dropout *d = &e->dropout;
  d->probability = probability;
  d->site = 7;
  d->first = 3;
  d->stride = 5;
  d->seq = seq;
  d->seed = 0x123456789abcdefull;
  d->state = &e->state;
  return d;
}

/* Dropout's factor as the header defines it. */
static double ops_factor(const g2z_dropout *d, int b, int element) {
  if (!(d->probability > 0)) return 1;
  uint32_t counter[4], bits[4];
  counter[0] = (uint32_t)element / 4;
  counter[1] = d->first + (uint32_t)b * d->stride;
  counter[2] = d->site;
  counter[3] = (uint32_t)d->state->step;
  g2z_philox(d->seed, G2Z_RANDOM_DROPOUT, counter, bits);
  return g2z_uniform(bits[element % 4]) >= d->probability ? 1.0 / (1.0 - d->probability) : 0.0;
}

/* The factor of element i of rows of C channels; elements are numbered within their sequence. */
static double ops_row_factor(const g2z_dropout *d, int i, int C) {
  return ops_factor(d, i / (d->seq * C), i % (d->seq * C));
}

/* ----- rounding and devices --------------------------------------------- */

/* The value of 16 bits, computed without rounding. */
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
        /* After the largest value comes infinity. */
        double top = bits == largest ? (sign ? -INFINITY : INFINITY) : high;
        if (bits == largest) even = top;
        float middle = (float)((low + high) / 2);
        wrong += g2z__round(dtype, (float)low) != (float)low;
        wrong += g2z__round(dtype, middle) != (float)even;
        wrong += g2z__round(dtype, nextafterf(middle, 0.0f)) != (float)low;
        wrong += g2z__round(dtype, nextafterf(middle, sign ? -INFINITY : INFINITY)) != (float)top;
      }
    CHECK(t, wrong == 0);
    CHECK(t, isnan(g2z__round(dtype, NAN)) && isnan(g2z__round(dtype, -NAN)));
    CHECK(t, g2z__round(dtype, INFINITY) == INFINITY && g2z__round(dtype, -INFINITY) == -INFINITY);
    CHECK(t, signbit(g2z__round(dtype, -0.0f)) && signbit(g2z__round(dtype, -1e-45f)));
  }
  CHECK(t, g2z__round(G2Z_FP16, 65504.0f) == 65504.0f);
  CHECK(t, g2z__round(G2Z_FP16, 65519.99f) == 65504.0f);
  CHECK(t, g2z__round(G2Z_FP16, 65520.0f) == INFINITY && g2z__round(G2Z_FP16, -3e38f) == -INFINITY);
  CHECK(t, g2z__round(G2Z_FP16, 0.1f) == 0.0999755859375f);
  CHECK(t, g2z__round(G2Z_BF16, 0.1f) == 0.10009765625f);
  CHECK(t, g2z__round(G2Z_BF16, 3.4e38f) == INFINITY);
  CHECK(t, g2z__round(G2Z_FP32, 0.1f) == 0.1f && g2z__round(G2Z_TF32, 0.1f) == 0.1f);
}

/* 8-bit formats. `most` encodes the largest number. */
typedef struct ops_narrow_format {
  int fraction, bias, most;
  float (*round)(float x);
} ops_narrow_format;
static const ops_narrow_format ops_e4m3 = {3, 7, 0x7e, g2z__round_e4m3};
static const ops_narrow_format ops_e5m2 = {2, 15, 0x7b, g2z__round_e5m2};

/* The value of 8 bits without a sign. */
static double ops_decode_8(const ops_narrow_format *f, int bits) {
  int exponent = bits >> f->fraction, one = 1 << f->fraction, last = -f->bias - f->fraction;
  return exponent ? ldexp(one + bits % one, exponent + last) : ldexp(bits, 1 + last);
}

static void ops_check_format(g2z_test *t, const ops_narrow_format *f) {
  const float most = (float)ops_decode_8(f, f->most);
  long wrong = 0;
  for (int bits = 0; bits < f->most; bits++)
    for (int sign = -1; sign < 2; sign += 2) {
      float low = (float)(sign * ops_decode_8(f, bits));
      float high = (float)(sign * ops_decode_8(f, bits + 1)), middle = (low + high) / 2;
      wrong += f->round(low) != low || f->round(high) != high;
      wrong += f->round(middle) != (bits & 1 ? high : low);
      wrong += f->round(nextafterf(middle, low)) != low;
      wrong += f->round(nextafterf(middle, high)) != high;
    }
  CHECK(t, wrong == 0);
  CHECK(t, f->round(nextafterf(most, INFINITY)) == most && f->round(-3e38f) == -most);
  CHECK(t, f->round(INFINITY) == most && isnan(f->round(-NAN)));
  CHECK(t, signbit(f->round(-0.0f)) && signbit(f->round(-1e-45f)));
}

static void test_ops_8_bits(g2z_test *t) {
  ops_check_format(t, &ops_e4m3);
  ops_check_format(t, &ops_e5m2);
  CHECK(t, g2z__round_e4m3(449) == 448 && g2z__round_e5m2(65504) == 57344);
  for (float largest = 1e-35f; largest < 1e38f; largest *= 1.03f) {
    int exponent;
    float scale = g2z__e4m3_scale(largest);
    CHECK(t, largest * scale <= 448 && 2 * largest * scale > 448);
    CHECK(t, frexpf(scale, &exponent) == 0.5f && 1 / scale * scale == 1);
  }
  CHECK(t, g2z__e4m3_scale(448) == 1 && g2z__e4m3_scale(nextafterf(448, 500)) == 0.5f);
  CHECK(t, isfinite(g2z__e4m3_scale(0)) && isfinite(1 / g2z__e4m3_scale(1e-45f)));
  CHECK(t, isnan(g2z__e4m3_scale(INFINITY)) && isnan(g2z__e4m3_scale(NAN)));
}

/* The memory that control groups allow on a machine with 1000 bytes, 700 of them free. */
static void test_cgroup_memory(g2z_test *t) {
  static const struct { const char *files[12]; size_t free_bytes, total_bytes; } cases[] = {
      {{NULL}, 700, 1000},                                       /* no Linux or control groups */
      {{"proc/self/cgroup", "0::/\n"}, 700, 1000},               /* the root group has no limit */
      {{"proc/self/cgroup", "0::/a/b\n",                         /* own limit, less what is used */
        "sys/fs/cgroup/a/b/memory.max", "600\n", "sys/fs/cgroup/a/b/memory.current", "500\n",
        "sys/fs/cgroup/a/b/memory.stat", "anon 7\ninactive_file 50\nactive_file 60\n"}, 150, 600},
      {{"proc/self/cgroup", "0::/a/b\n",                         /* the parent's limit is lower */
        "sys/fs/cgroup/a/b/memory.max", "max\n", "sys/fs/cgroup/a/b/memory.current", "500\n",
        "sys/fs/cgroup/a/memory.max", "900\n", "sys/fs/cgroup/a/memory.current", "650\n"}, 250,
       900},
      {{"proc/self/cgroup", "0::/a\n", "sys/fs/cgroup/a/memory.max", "900\n",
        "sys/fs/cgroup/memory.max", "800\n", "sys/fs/cgroup/memory.current", "10\n"}, 700, 800},
      {{"proc/self/cgroup", "0::/../../elsewhere\n",         /* in a container: the mount's limit */
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
    const char *root = test_at(t, "machine%zu", i);
    char path[700];
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
  /* If this process has a limit, the device's figures respect it. */
  size_t free_bytes, total_bytes, limited_free = SIZE_MAX, limited_total = SIZE_MAX;
  CHECK_OK(t, g2z_device_memory(&t->services, G2Z_DEVICE_CPU, &free_bytes, &total_bytes));
  g2z__cgroup_memory("", &limited_free, &limited_total);
  CHECK(t, total_bytes <= limited_total && free_bytes <= limited_total && total_bytes > 0);
}

/* Peak rates need the whole name: a variant, another chip or a part of a GPU has another rate. */
static void test_ops_peaks(g2z_test *t) {
  static const struct { const char *name; double half, single; } cases[] = { /* 0: unknown */
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
    double half = g2zr_peak_flops(cases[i].name, G2Z_FP16) * 1e-12;
    double single = g2zr_peak_flops(cases[i].name, G2Z_FP32) * 1e-12;
    FAIL_IF(t, cases[i].half > 0 ? fabs(half - cases[i].half) > 1e-9 ||
            fabs(single - cases[i].single) > 1e-9 : !isnan(half) || !isnan(single),
            "\"%s\": %g and %g TFLOP/s", cases[i].name, half, single);
  }
  CHECK(t, g2zr_peak_flops("NVIDIA H200", G2Z_BF16) == g2zr_peak_flops("NVIDIA H200", G2Z_FP16));
  CHECK(t, g2zr_peak_flops("NVIDIA H200", G2Z_TF32) == 494.7e12);
  CHECK(t, isnan(g2zr_peak_flops("Tesla T4", G2Z_TF32))); /* it has no tf32 */
}

/* The error for a process that sees no GPU names the variable that promises GPUs. */
static void test_device_missing(g2z_test *t) {
  static const char *const names[] = {"SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES",
                                      "NVIDIA_VISIBLE_DEVICES"};
  static const struct { const char *values[3], *says; } cases[] = {
      {{NULL, NULL, NULL}, NULL},
      {{"0,1", NULL, NULL}, "SLURM_JOB_GPUS=0,1 promises GPUs"},
      {{"", "3", "all"}, "CUDA_VISIBLE_DEVICES=3 promises GPUs"},
      {{NULL, NULL, "all"}, "NVIDIA_VISIBLE_DEVICES=all promises GPUs"},
      {{NULL, NULL, "void"}, NULL},
      {{"0,1", "", "all"}, NULL}, /* the user hides them */
      {{"0,1", "-1", "all"}, NULL}};
  char *kept[3];
  for (int k = 0; k < 3; k++) kept[k] = getenv(names[k]) ? strdup(getenv(names[k])) : NULL;
  const int here = g2z_device_count(G2Z_DEVICE_CUDA);
  if (here) snprintf(t->skip, sizeof t->skip, "%d GPUs are here", here);
  for (size_t i = 0; i < sizeof cases / sizeof *cases && !here; i++) {
    for (int k = 0; k < 3; k++)
      if (!cases[i].values[k]) unsetenv(names[k]);
      else setenv(names[k], cases[i].values[k], 1);
    g2z_status status = g2z_device_find_gpu(&t->services);
    CHECK(t, status != G2Z_OK && (status == G2Z_DEVICE || !cases[i].says));
    CHECK_HAS(t, t->services.error, cases[i].says ? cases[i].says : ": ");
    CHECK(t, cases[i].says || !strstr(t->services.error, "promises"));
  }
  for (int k = 0; k < 3; k++) {
    if (kept[k]) setenv(names[k], kept[k], 1);
    else unsetenv(names[k]);
    free(kept[k]);
  }
}

static g2z_status ops_no_timers(g2z_device *device) {
  return g2z_fail(device->services, G2Z_NO_MEMORY, "no timers");
}

static void test_ops_device(g2z_test *t) {
  static const struct { g2z_dtype dtype, grad; g2z_status status; const char *says; } refused[] = {
      {G2Z_TF32, G2Z_TF32, G2Z_UNSUPPORTED, "--dtype fp32"},
      {G2Z_FP16, G2Z_BF16, G2Z_BAD_ARGUMENT, "gradients"},
      {(g2z_dtype)9, G2Z_FP32, G2Z_BAD_ARGUMENT, "type 9"},
      {G2Z_FP32, G2Z_FP32, G2Z_NO_MEMORY, NULL}}; /* in the last case an allocation fails */
  g2z_services *s = &t->services;
  g2z_device *device;
  size_t free_bytes, total_bytes;
  for (int i = 0; i < 4; i++) {
    t->fail_at = i == 3;
    CHECK_STATUS(t, g2z_device_create(s, G2Z_DEVICE_CPU, refused[i].dtype, refused[i].grad,
                                      &device), refused[i].status, s, refused[i].says);
    CHECK(t, device == NULL);
  }
  t->fail_at = 0;
  g2z_device_free(NULL);
  CHECK_OK(t, g2z_device_memory(s, G2Z_DEVICE_CPU, &free_bytes, &total_bytes));
  CHECK(t, free_bytes >= 1 << 20 && free_bytes <= total_bytes);
  CHECK_OK(t, g2z_device_create(s, G2Z_DEVICE_CPU, G2Z_BF16, G2Z_FP32, &device));
  CHECK_OK(t, g2z__tuning_read(device, "")); /* a CPU's is empty; it accepts a GPU's */
  CHECK_OK(t, g2z__tuning_read(device, "gpt2_zero tuning 4, cuBLASLt 1, 2 SMs, x\n1 2\n"));
  CHECK_STATUS(t, g2z__tuning_read(device, "gpt2_zero tuning 1, cuBLASLt 1, 2 SMs, x\n"),
               G2Z_FORMAT, s, "begins with \"gpt2_zero tuning 1, cuBLASLt 1, 2 SMs, x\"");
  CHECK_STATUS(t, g2z__tuning_read(device, "\n"), G2Z_FORMAT, s, "a run's tuning.txt");
  CHECK(t, device->dtype == G2Z_BF16 && device->grad_dtype == G2Z_FP32 && device->services == s);
  CHECK(t, device->kind == G2Z_DEVICE_CPU);
  void *memory;
  char text[6] = "hello", back[6] = "", zeros[1000] = {0};
  CHECK_OK(t, device->ops->allocate(device, 1000, &memory));
  CHECK(t, memcmp(memory, zeros, 1000) == 0);
  CHECK_OK(t, device->ops->upload(device, memory, text, 6));
  CHECK_OK(t, device->ops->mark(device, 7));
  CHECK_OK(t, device->ops->wait(device, 7));
  CHECK_OK(t, device->ops->download(device, back, memory, 6));
  CHECK_OK(t, device->ops->synchronize(device));
  CHECK(t, strcmp(back, "hello") == 0);
  CHECK_STATUS(t, device->ops->graph_begin(device), G2Z_UNSUPPORTED, s, "no graphs");
  CHECK_OK(t, device->ops->zero(device, memory, 3));
  CHECK(t, memcmp(memory, "\0\0\0lo", 6) == 0);
  device->ops->release(device, memory);
  t->fail_at = 1;
  CHECK_STATUS(t, device->ops->allocate(device, 1000, &memory), G2Z_NO_MEMORY, s, "1000 bytes");
  CHECK_STATUS(t, device->ops->allocate_host(device, 1000, &memory), G2Z_NO_MEMORY, s, NULL);
  CHECK(t, memory == NULL);
  float x[4] = {1, 2, 3, 4}, y[4]; /* a product packs its operands into memory of the services */
  CHECK_STATUS(t, device->ops->head_logits(device, y, x, x, 2, 2, 2), G2Z_NO_MEMORY, s, NULL);
  t->fail_at = 0;
  CHECK_OK(t, device->ops->head_logits(device, y, x, x, 2, 2, 2));
  CHECK_OK(t, device->ops->head_logits(device, y, x, x, 0, 2, 2)); /* no rows */
  CHECK(t, y[0] == 5 && y[1] == 11 && y[2] == 11 && y[3] == 25);
  /* Timers that could not be opened are opened by the next call. */
  const g2z_ops *right = device->ops;
  g2z_ops broken = *right;
  broken.timers_open = ops_no_timers;
  device->ops = &broken;
  CHECK_STATUS(t, g2z_device_time_spans(device), G2Z_NO_MEMORY, s, "no timers");
  device->ops = right;
  CHECK_OK(t, g2z_device_time_spans(device));
  CHECK(t, device->timers && device->timers->status == G2Z_OK);
  g2z_device_free(device);
}

/* The id that a device draws from these logits, as number `index` of a text. */
static int test_draws(g2z_test *t, g2z_device *device, const float *logits, int V,
                      const g2z_sampling *sampling, int index) {
  int32_t token = -2, drawn = index, position = 0;
  TEST_RUN(t, device, draw, .tokens = &token, .drawn = &drawn, .positions = &position,
           .logits = logits, .sampling = sampling, .B = 1, .V = V, .T = 2);
  return token;
}

/* ----- operands that a call forgot --------------------------------------- */

/* All pointers and sizes of all operands. MAY: a call may leave it out. */
#define OPS_STRUCTS(X)                                                                            \
  X(embed_fwd) X(embed_bwd) X(embed_add) X(embed_next) X(attention_next) X(layernorm_fwd)         \
  X(layernorm_bwd) X(linear_fwd) X(linear_bwd_data) X(linear_bwd_weight) X(attention_fwd)         \
  X(attention_bwd) X(head_loss) X(draw)
#define OPS_MEMBERS(MUST, MAY)                                                                    \
  MUST(embed_fwd, out) MUST(embed_fwd, tokens) MUST(embed_fwd, wte) MUST(embed_fwd, wpe)          \
  MUST(embed_fwd, B) MUST(embed_fwd, T) MUST(embed_fwd, C)                                        \
  MAY(embed_bwd, dwte) MUST(embed_bwd, dwpe) MUST(embed_bwd, dout) MUST(embed_bwd, tokens)        \
  MUST(embed_bwd, B) MUST(embed_bwd, T) MUST(embed_bwd, C)                                        \
  MUST(embed_add, grads) MUST(embed_add, parts) MAY(embed_add, count) MUST(embed_add, rows)       \
  MUST(embed_add, order) MUST(embed_add, N) MUST(embed_add, C)                                    \
  MUST(embed_next, out) MUST(embed_next, tokens) MUST(embed_next, positions)                      \
  MUST(embed_next, wte) MUST(embed_next, wpe) MUST(embed_next, B) MUST(embed_next, C)             \
  MUST(attention_next, out) MUST(attention_next, past) MUST(attention_next, rows)                 \
  MUST(attention_next, positions) MUST(attention_next, B) MUST(attention_next, T)                 \
  MUST(attention_next, C) MUST(attention_next, NH)                                                \
  MUST(layernorm_fwd, y) MAY(layernorm_fwd, narrow) MUST(layernorm_fwd, mean)                     \
  MUST(layernorm_fwd, rstd) MUST(layernorm_fwd, x) MUST(layernorm_fwd, w)                         \
  MUST(layernorm_fwd, b) MUST(layernorm_fwd, N) MUST(layernorm_fwd, C)                            \
  MUST(layernorm_bwd, dres) MAY(layernorm_bwd, dropped) MAY(layernorm_bwd, narrow)                \
  MUST(layernorm_bwd, dw) MUST(layernorm_bwd, db) MAY(layernorm_bwd, dbias)                       \
  MUST(layernorm_bwd, dy)                                                                         \
  MUST(layernorm_bwd, x) MUST(layernorm_bwd, w) MUST(layernorm_bwd, mean)                         \
  MUST(layernorm_bwd, rstd) MUST(layernorm_bwd, N) MUST(layernorm_bwd, C)                         \
  MUST(linear_fwd, y) MAY(linear_fwd, narrow_y) MAY(linear_fwd, slope) MUST(linear_fwd, x)        \
  MAY(linear_fwd, narrow_x) MUST(linear_fwd, w) MUST(linear_fwd, bias)                            \
  MAY(linear_fwd, residual) MUST(linear_fwd, N) MUST(linear_fwd, K) MUST(linear_fwd, O)           \
  MUST(linear_bwd_data, dx) MUST(linear_bwd_data, dbias) MUST(linear_bwd_data, dy)                \
  MUST(linear_bwd_data, w) MAY(linear_bwd_data, slope) MAY(linear_bwd_data, narrow)               \
  MUST(linear_bwd_data, N) MUST(linear_bwd_data, K) MUST(linear_bwd_data, O)                      \
  MUST(linear_bwd_weight, dw) MUST(linear_bwd_weight, x) MUST(linear_bwd_weight, dy)              \
  MAY(linear_bwd_weight, narrow_dy) MAY(linear_bwd_weight, columns_x) MUST(linear_bwd_weight, N)  \
  MUST(linear_bwd_weight, K)                                                                      \
  MUST(linear_bwd_weight, O)                                                                      \
  MUST(attention_fwd, out) MAY(attention_fwd, narrow) MUST(attention_fwd, lse)                    \
  MUST(attention_fwd, qkv) MUST(attention_fwd, B) MUST(attention_fwd, T) MUST(attention_fwd, C)   \
  MUST(attention_fwd, NH)                                                                         \
  MUST(attention_bwd, dqkv) MAY(attention_bwd, narrow) MAY(attention_bwd, columns)                \
  MUST(attention_bwd, dbias)                                                                      \
  MUST(attention_bwd, dout) MUST(attention_bwd, out) MUST(attention_bwd, lse)                     \
  MUST(attention_bwd, qkv) MUST(attention_bwd, B) MUST(attention_bwd, T) MUST(attention_bwd, C)   \
  MUST(attention_bwd, NH)                                                                         \
  MUST(head_loss, losses) MUST(head_loss, loss_sum) MAY(head_loss, dh) MUST(head_loss, dwte)      \
  MUST(head_loss, logits) MUST(head_loss, h) MUST(head_loss, wte) MUST(head_loss, targets)        \
  MUST(head_loss, state) MUST(head_loss, N) MUST(head_loss, C) MUST(head_loss, V)                 \
  MUST(head_loss, Vp) MUST(head_loss, chunk)                                                      \
  MUST(draw, tokens) MUST(draw, drawn) MUST(draw, positions) MUST(draw, logits)                   \
  MUST(draw, sampling) MUST(draw, B) MUST(draw, V) MUST(draw, T)

#define X(op)                                                                         \
  static int ops_whole_##op(const void *operands) {                                   \
    return g2z__##op##_whole((const g2z_##op *)operands);                             \
  }                                                                                   \
  static g2z_status ops_run_##op(g2z_device *device, const void *operands) {          \
    return device->ops->op(device, (const g2z_##op *)operands);                       \
  }
OPS_STRUCTS(X)
#undef X

typedef union ops_operands {
#define X(op) g2z_##op op;
  OPS_STRUCTS(X)
#undef X
} ops_operands;

/* Every op of a device ends the program if it is called without operands. */
static void ops_expect_asserts(g2z_test *t, g2z_device *device) {
  static const struct {
    const char *name;
    g2z_status (*run)(g2z_device *device, const void *operands);
  } ops[] = {
#define X(op) {#op, ops_run_##op},
      OPS_STRUCTS(X)
#undef X
  };
  for (size_t i = 0; i < G2Z_COUNT(ops); i++) {
    ops_operands none;
    memset(&none, 0, sizeof none);
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
      const struct rlimit no_core = {0, 0};
      setrlimit(RLIMIT_CORE, &no_core);
      if (!freopen("/dev/null", "w", stderr)) _exit(1);
      ops[i].run(device, &none);
      _exit(0);
    }
    int ended = 0;
    CHECK(t, child > 0 && waitpid(child, &ended, 0) == child);
    FAIL_IF(t, !WIFSIGNALED(ended) || WTERMSIG(ended) != SIGABRT, "%s runs without operands",
               ops[i].name);
  }
}

/* A forgotten member is 0. Each one that an op needs is asserted, and no other. */
static void test_ops_forgotten(g2z_test *t) {
  static const struct {
    const char *name;
    int (*whole)(const void *operands);
    size_t at, bytes;
    int needed;
  } members[] = {
#define MEMBER(op, member, needed)                                                       \
  {#op "." #member, ops_whole_##op, offsetof(g2z_##op, member),                          \
   sizeof((const g2z_##op *)0)->member, needed},
#define MUST(op, member) MEMBER(op, member, 1)
#define MAY(op, member) MEMBER(op, member, 0)
      OPS_MEMBERS(MUST, MAY)
#undef MAY
#undef MUST
#undef MEMBER
  };
  for (size_t i = 0; i < G2Z_COUNT(members); i++) {
    ops_operands operands;
    memset(&operands, 1, sizeof operands); /* all pointers, all sizes are there */
    CHECK(t, members[i].whole(&operands));
    memset((char *)&operands + members[i].at, 0, members[i].bytes);
    FAIL_IF(t, members[i].whole(&operands) == members[i].needed, "%s: asserted or not, wrongly",
            members[i].name);
  }
  g2z_device *device;
  REQUIRE_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, G2Z_FP32, G2Z_FP32, &device));
  ops_expect_asserts(t, device);
  g2z_device_free(device);
}

/* ----- 8 bits ------------------------------------------------------------ */

/* rows[n,C] in 8 bits. The scale is `fixed`, or if that is 0, for each row the largest power of two
 * that keeps it in range. */
static float *ops_narrow(ops_env *e, const ops_narrow_format *f, const float *rows, int n, int C,
                         double fixed) {
  float *out = ops_output(e, n * C);
  for (int i = 0; i < n; i++) {
    double largest = 0, scale = fixed > 0 ? fixed : ldexp(1, 40);
    for (int c = 0; c < C; c++) largest = fmax(largest, fabs((double)rows[i * C + c]));
    while (!(fixed > 0) && largest * scale > ops_decode_8(f, f->most)) scale /= 2;
    for (int c = 0; c < C; c++) {
      double x = (double)rows[i * C + c] * scale, size = fabs(x);
      int bits = 0;
      while (bits < f->most && ops_decode_8(f, bits + 1) <= size) bits++;
      double down = size - ops_decode_8(f, bits), up = ops_decode_8(f, bits + 1) - size;
      if (bits < f->most && (up < down || (up == down && bits % 2))) bits++;
      out[i * C + c] = (float)(copysign(ops_decode_8(f, bits), x) / scale);
    }
  }
  return out;
}

/* ----- linear ----------------------------------------------------------- */

/* 0.5 x (1 + tanh u), written so that it does not cancel: 1 + tanh u is 2 / (1 + e^(-2u)). */
static double ops_gelu(double x) {
  return x / (1 + exp(-2 * sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

/* GELU's slope as a central difference, which in double is exact to 1e-10. */
static double ops_gelu_slope(double x) {
  return (ops_gelu(x + 1e-5) - ops_gelu(x - 1e-5)) / 2e-5;
}

static void ops_linear_forward(ops_env *e, const int *shape) {
  int N = shape[0], I = shape[1], O = shape[2], n = N * O, known = e->dtype == G2Z_FP32;
  float *x = ops_random(e, N * I, 1), *w = ops_random(e, I * O, 0.25f);
  float *bias = ops_random(e, O, 1), *residual = ops_random(e, n, 4);
  float *y = ops_output(e, n), *slope = ops_output(e, n);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n), *more = ops_doubles(e, n);
  double *slopes = ops_doubles(e, n), *slope_size = ops_doubles(e, n);
  const float *left = x, *right = w, *narrow = e->device->fp8 ? x : NULL; /* not NULL is enough */
  if (narrow) {
    left = ops_narrow(e, &ops_e4m3, x, N, I, 4);
    right = ops_narrow(e, &ops_e4m3, w, I, O, 32);
  }
  for (int row = 0; row < N; row++) ops_begin(want + row * O, size + row * O, bias, O);
  ops_product(want, size, left, I, 1, right, O, 1, N, O, I);
  OPS_RUN(e, linear_fwd, .y = y, .x = x, .narrow_x = narrow, .w = w, .bias = bias, .N = N, .K = I,
          .O = O);
  ops_expect(e, "linear_fwd", y, want, size, n, e->dtype, ops_walk(I));

  /* The sigmoid's exponent is off by 3 roundings of 2u, and u is below 6 where it matters. GELU's
   * input is known exactly in fp32, where it was just stored. In other types it has the error of
   * its sum. GELU's slope is below 1.13, and the slope's own slope is below 1. */
  for (int i = 0; i < n; i++) {
    double input = known ? (double)y[i] : want[i];
    more[i] = ops_gelu(input);
    slopes[i] = ops_gelu_slope(input);
    slope_size[i] = 1 + (known ? 0 : size[i]);
  }
  double input_error = known ? 0 : ops_walk(I);
  memset(y, 0, (size_t)n * sizeof *y);
  OPS_RUN(e, linear_fwd, .y = y, .slope = slope, .x = x, .narrow_x = narrow, .w = w, .bias = bias,
          .N = N, .K = I, .O = O);
  ops_expect(e, "its gelu", y, more, known ? NULL : size, n, e->dtype, 60 + 2 * input_error);
  ops_expect(e, "its slope", slope, slopes, slope_size, n, e->dtype, 60 + input_error);

  for (int i = 0; i < n; i++) size[i] += fabs((double)residual[i]);
  for (int drop = 0; drop < 2; drop++) { /* N / 2 rows per sequence; an odd N begins a third */
    const g2z_dropout *d = ops_dropout(e, drop ? 0.3f : 0, N > 3 ? N / 2 : 1);
    for (int i = 0; i < n; i++)
      more[i] = want[i] * ops_row_factor(d, i, O) + (double)residual[i];
    memcpy(y, residual, (size_t)n * sizeof *y); /* in place: y is the residual */
    OPS_RUN(e, linear_fwd, .y = y, .x = x, .narrow_x = narrow, .w = w, .bias = bias, .residual = y,
            .dropout = *d, .N = N, .K = I, .O = O);
    ops_expect(e, "linear_fwd into the residual", y, more, size, n, e->dtype, 2 * ops_walk(I));
  }
}

static void ops_linear_backward(ops_env *e, const int *shape) {
  int N = shape[0], I = shape[1], O = shape[2], n = N * I, weights = I * O;
  float *x = ops_random(e, n, 1), *w = ops_random(e, weights, 0.25f), *slope = ops_random(e, n, 4);
  float *dy = ops_random(e, N * O, 1), *before = ops_random(e, weights, 8);
  float *dx = ops_output(e, n), *dw = ops_output(e, weights), *dbias = ops_output(e, I);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n);
  double *want_w = ops_doubles(e, weights), *size_w = ops_doubles(e, weights);
  float *left = dy, *right = w, *x8 = x, *narrow = e->device->fp8 ? dy : NULL;
  if (narrow) {
    left = ops_narrow(e, &ops_e5m2, dy, N, O, 1);
    right = ops_narrow(e, &ops_e4m3, w, I, O, 32);
    x8 = ops_narrow(e, &ops_e4m3, x, N, I, 4);
  }
  ops_product(want, size, left, O, 1, right, 1, O, N, I, O);
  OPS_RUN(e, linear_bwd_data, .dx = dx, .dy = dy, .w = w, .narrow = narrow, .N = N, .K = I, .O = O);
  ops_expect(e, "linear_bwd_data", dx, want, size, n, e->dtype, ops_walk(O));
  for (int i = 0; i < n; i++) {
    want[i] *= (double)slope[i];
    size[i] *= fabs((double)slope[i]);
  }
  for (int mode = 0; mode < 2; mode++) {
    const float *old = mode ? before : NULL;
    memset(dx, 0, (size_t)n * sizeof *dx);
    memcpy(dbias, before, (size_t)I * sizeof *dbias);
    memcpy(dw, before, (size_t)weights * sizeof *dw);
    OPS_RUN(e, linear_bwd_data, .dx = dx, .dbias = dbias, .dy = dy, .w = w, .slope = slope,
            .narrow = narrow, .mode = ops_write(old), .N = N, .K = I, .O = O);
    ops_expect(e, "linear_bwd_data with a slope", dx, want, size, n, e->dtype, ops_walk(O));
    ops_expect_sums(e, "linear_bwd_data's dbias", dbias, dx, old, N, I);
    ops_begin(want_w, size_w, old, weights);
    ops_product(want_w, size_w, x8, 1, I, left, O, 1, I, O, N);
    OPS_RUN(e, linear_bwd_weight, .dw = dw, .x = x, .dy = dy, .narrow_dy = narrow,
            .mode = ops_write(old), .N = N, .K = I, .O = O);
    ops_expect(e, "linear_bwd_weight", dw, want_w, size_w, weights, e->grad, ops_walk(N));
  }
}

/* Forward counts inputs that become 112 in 8 bits and weights that become 14, also wte's, and NaN.
 * Backward rounds the same numbers and counts nothing. */
static void ops_clamped(ops_env *e, const int *shape) {
  static const float inputs[8] = {107.5f, -107.5f, 108, -108, 112, -4096, NAN, 0};
  static const float weights[8] = {13.4375f, -13.4375f, 13.5f, -13.5f, 14, -64, 0, 14.5f};
  float *x = ops_random(e, 8 * 8, 1), *w = ops_random(e, 8 * 8, 0.25f), *y = ops_output(e, 8 * 8);
  float *losses = ops_output(e, 8), *logits = ops_output(e, 8 * 16);
  const int32_t targets[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  double counts[2] = {0, 100}, loss_sum = 0;
  (void)shape;
  e->device->clamped_inputs = &counts[0];
  e->device->clamped_weights = &counts[1];
  for (int i = 0; i < 8; i++) {
    x[i * 9 % 64] = inputs[i];
    w[i * 10 % 64] = weights[i];
  }
  OPS_RUN(e, linear_fwd, .y = y, .x = x, .narrow_x = x, .w = w, .bias = w, .N = 8, .K = 8, .O = 8);
  CHECK(e->t, counts[0] == 5 && counts[1] == 105);
  OPS_RUN(e, linear_bwd_data, .dx = y, .dy = x, .w = w, .narrow = x, .N = 8, .K = 8, .O = 8);
  OPS_RUN(e, linear_bwd_weight, .dw = y, .x = x, .dy = x, .narrow_dy = x, .N = 8, .K = 8, .O = 8);
  CHECK(e->t, counts[0] == 5 && counts[1] == 105);
  e->device->fp8 = G2Z_FP8_LOGITS;
  OPS_RUN(e, head_loss, .losses = losses, .loss_sum = &loss_sum, .dh = y, .dwte = x,
          .dwte_dtype = G2Z_FP32, .logits = logits, .h = x, .wte = w, .targets = targets,
          .dloss = 1, .state = &e->state, .N = 8, .C = 8, .V = 8, .Vp = 8, .chunk = 8);
  CHECK(e->t, counts[0] == 5 && counts[1] == 110);
  e->device->clamped_inputs = e->device->clamped_weights = NULL; /* not wanted: nothing counts */
  OPS_RUN(e, linear_fwd, .y = y, .x = w, .narrow_x = w, .w = w, .bias = w, .N = 8, .K = 8, .O = 8);
}

/* A row of a product has the same bits alone, among few rows and among many: in generation, which
 * computes one row per sequence, and in training. For both orders of b in memory. A number of row 126
 * is infinite, which must not reach other rows. */
static void ops_rows(ops_env *e, const int *shape) {
  static const int counts[5] = {1, 3, 5, 9, 100};
  const int N = shape[0], I = shape[1], O = shape[2];
  float *x = ops_random(e, N * I, 1), *dy = ops_random(e, N * O, 1);
  float *w = ops_random(e, I * O, 0.25f), *bias = ops_random(e, O, 1);
  float *y[2], *slope[2], *dx[2], *logits[2];
  x[126 * I] = dy[126 * O] = INFINITY;
  for (int k = 0; k < 2; k++) {
    y[k] = ops_output(e, N * O);
    slope[k] = ops_output(e, N * O);
    dx[k] = ops_output(e, N * I);
    logits[k] = ops_output(e, N * O);
  }
  for (int i = -1; i < 5; i++) { /* all rows first, then `rows` of them from `row` on */
    const int few = i >= 0;
    int rows = N;
    if (few) rows = counts[i];
    const int row = (N - rows) / 2;
    const size_t size = (size_t)rows * sizeof(float);
    OPS_RUN(e, linear_fwd, .y = y[few], .slope = slope[few], .x = x + row * I, .w = w, .bias = bias,
            .N = rows, .K = I, .O = O);
    OPS_RUN(e, linear_bwd_data, .dx = dx[few], .dy = dy + row * O, .w = w, .N = rows, .K = I,
            .O = O);
    OPS_CALL(e, head_logits, logits[few], x + row * I, w, rows, I, O);
    if (!few) continue;
    CHECK(e->t, memcmp(y[1], y[0] + row * O, size * (size_t)O) == 0);
    CHECK(e->t, memcmp(slope[1], slope[0] + row * O, size * (size_t)O) == 0);
    CHECK(e->t, memcmp(dx[1], dx[0] + row * I, size * (size_t)I) == 0);
    CHECK(e->t, memcmp(logits[1], logits[0] + row * O, size * (size_t)O) == 0);
  }
}

static void ops_linear_fp8(ops_env *e, const int *shape) {
  e->device->fp8 = G2Z_FP8_ALL;
  ops_linear_forward(e, shape);
  ops_linear_backward(e, shape);
}

static void test_ops_linear(g2z_test *t) {
  /* One of everything; smaller than a tile; one row, part of whose columns fill tiles; beyond
   * every block: 256 rows, 384 columns, 128 deep. */
  static const int shapes[6][4] = {{1, 1, 1},        {5, 24, 16},   {1, 131, 300},
                                   {37, 401, 133}, {301, 136, 264}, {3, 150, 401}};
  ops_each(t, ops_linear_forward, shapes, 6);
  ops_each(t, ops_linear_fp8, shapes, 6);
  ops_each(t, ops_linear_backward, shapes, 6);
  ops_each(t, ops_clamped, shapes, 1);
  /* The third has columns for the widest tile, one of each narrower one, and a rest. The last task
   * of the fourth has 375 columns: more than whole vectors, and nearly as many as a task can have. */
  static const int rows[4][4] = {
      {256, 200, 300}, {256, 131, 37}, {256, 208, 535}, {256, 136, 1527}};
  ops_each(t, ops_rows, rows, 4);
}

/* ----- LayerNorm -------------------------------------------------------- */

typedef struct ops_norm { /* a LayerNorm and the expected results of its forward pass */
  int N, C;
  float *x, *w, *mean, *rstd;
  double *means, *rstds;
} ops_norm;

static ops_norm ops_layernorm_forward(ops_env *e, int N, int C) {
  int n = N * C;
  ops_norm l;
  l.N = N;
  l.C = C;
  l.x = ops_random(e, n, 2);
  l.w = ops_random(e, C, 1);
  l.mean = ops_output(e, N);
  l.rstd = ops_output(e, N);
  l.means = ops_doubles(e, N);
  l.rstds = ops_doubles(e, N);
  float *b = ops_random(e, C, 1), *y = ops_output(e, n);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n);
  for (int i = 0; i < n; i++) l.x[i] = g2z__round(e->dtype, l.x[i] + 3); /* a mean other than 0 */
  for (int r = 0; r < N; r++) {
    const float *x = l.x + r * C;
    double m = 0, variance = 0;
    for (int c = 0; c < C; c++) m += (double)x[c] / C;
    for (int c = 0; c < C; c++) variance += pow((double)x[c] - m, 2) / C;
    l.means[r] = m;
    l.rstds[r] = 1 / sqrt(variance + 1e-5);
    for (int c = 0; c < C; c++) {
      want[r * C + c] = ((double)x[c] - m) * l.rstds[r] * (double)l.w[c] + (double)b[c];
      size[r * C + c] = 5 * l.rstds[r] * fabs((double)l.w[c]) + fabs((double)b[c]);
    }
  }
  OPS_RUN(e, layernorm_fwd, .y = y, .mean = l.mean, .rstd = l.rstd, .x = l.x, .w = l.w, .b = b,
          .N = N, .C = C);
  ops_expect(e, "layernorm_fwd", y, want, size, n, e->dtype, 16);
  ops_expect(e, "layernorm_fwd's mean", l.mean, l.means, NULL, N, G2Z_FP32, 16);
  ops_expect(e, "layernorm_fwd's rstd", l.rstd, l.rstds, NULL, N, G2Z_FP32, 64);
  return l;
}

/* Adds dy's contribution to dres and dw. */
static void ops_layernorm_gradients(const ops_norm *l, const float *dy, double *dres,
                                    double *dres_size, double *dw, double *dw_size) {
  int C = l->C;
  for (int r = 0; r < l->N; r++) {
    double g = 0, gx = 0, rstd = l->rstds[r];
    for (int c = 0; c < C; c++) {
      double term = (double)dy[r * C + c] * (double)l->w[c];
      g += term / C;
      gx += term * ((double)l->x[r * C + c] - l->means[r]) * rstd / C;
    }
    for (int c = 0; c < C; c++) {
      int i = r * C + c;
      double xhat = ((double)l->x[i] - l->means[r]) * rstd;
      dres[i] += rstd * ((double)dy[i] * (double)l->w[c] - g - xhat * gx);
      dres_size[i] += rstd * (2 + (1 + fabs(xhat)) * 5 * rstd);
      dw[c] += (double)dy[i] * xhat;
      dw_size[c] += fabs((double)dy[i]) * 5 * rstd;
    }
  }
}

static void ops_layernorm(ops_env *e, const int *shape) {
  int N = shape[0], C = shape[1], drop = shape[2], n = N * C;
  const ops_norm l = ops_layernorm_forward(e, N, C);
  const g2z_dropout *d = ops_dropout(e, drop ? 0.4f : 0, N > 3 ? N / 2 : 1);
  float *dy = ops_random(e, n, 1), *before = ops_random(e, n, 8), *dres = ops_output(e, n);
  float *dropped = ops_output(e, n), *plain = ops_output(e, n);
  float *dw = ops_output(e, C), *db = ops_output(e, C), *dbias = ops_output(e, C);
  double *want = ops_doubles(e, n), *size = ops_doubles(e, n);
  double *sums = ops_doubles(e, C), *sizes = ops_doubles(e, C);
  for (int mode = 3; mode >= 0; mode--) { /* bit 0: += for dres; bit 1: += for parameters */
    const float *old = mode & 1 ? before : NULL, *old_params = mode & 2 ? before : NULL;
    memcpy(dres, before, (size_t)n * sizeof *dres);
    memcpy(dw, before, (size_t)C * sizeof *dw);
    memcpy(db, before, (size_t)C * sizeof *db);
    memcpy(dbias, before, (size_t)C * sizeof *dbias);
    OPS_RUN(e, layernorm_bwd, .dres = dres, .dropped = dropped, .dw = dw, .db = db, .dbias = dbias,
            .dy = dy, .x = l.x, .w = l.w, .mean = l.mean, .rstd = l.rstd,
            .res_mode = ops_write(old), .mode = ops_write(old_params), .dropout = *d, .N = N,
            .C = C);
    ops_begin(want, size, old, n);
    ops_begin(sums, sizes, old_params, C);
    ops_layernorm_gradients(&l, dy, want, size, sums, sizes);
    ops_expect(e, "layernorm_bwd's dres", dres, want, size, n, e->dtype, 24);
    ops_expect(e, "layernorm_bwd's dw", dw, sums, sizes, C, e->grad, ops_walk(N));
    ops_expect_sums(e, "layernorm_bwd's db", db, dy, old_params, N, C);
    ops_expect_sums(e, "layernorm_bwd's dbias", dbias, drop ? dropped : dres, old_params, N, C);
    for (int i = 0; i < n; i++) want[i] = drop ? (double)dres[i] * ops_row_factor(d, i, C) : 777;
    ops_expect(e, "layernorm_bwd's dropped", dropped, want, NULL, n, drop ? e->dtype : G2Z_FP32, 4);
  }
  /* The first LayerNorm follows no projection: no dbias, and no use for `dropped`. */
  OPS_RUN(e, layernorm_bwd, .dres = plain, .dw = dw, .db = db, .dy = dy, .x = l.x, .w = l.w,
          .mean = l.mean, .rstd = l.rstd, .dropout = *d, .N = N, .C = C);
  CHECK(e->t, memcmp(plain, dres, (size_t)n * sizeof *dres) == 0);
}

static void test_ops_layernorm(g2z_test *t) {
  static const int shapes[4][4] = {{1, 8, 0}, {7, 40, 1}, {150, 37, 0}, {37, 776, 1}};
  ops_each(t, ops_layernorm, shapes, 4);
}

/* ----- attention -------------------------------------------------------- */

/* out[B,T,C], lse[B,NH,T] and out's sums of magnitudes, by the definition. */
static void ops_attention(double *out, double *size, double *lse, const double *qkv,
                          const g2z_dropout *d, int B, int T, int C, int NH) {
  int HS = C / NH;
  double *p = (double *)malloc((size_t)T * sizeof *p);
  if (!p) abort();
  memset(out, 0, (size_t)(B * T * C) * sizeof *out);
  memset(size, 0, (size_t)(B * T * C) * sizeof *size);
  for (int i = 0; i < B * NH * T; i++) {
    int b = i / NH / T, h = i / T % NH, q = i % T, to = (b * T + q) * C + h * HS;
    const double *query = qkv + (b * T + q) * 3 * C + h * HS;
    const double *key = qkv + b * T * 3 * C + h * HS + C;
    double max = -INFINITY, sum = 0;
    for (int k = 0; k <= q; k++) {
      p[k] = 0;
      for (int c = 0; c < HS; c++) p[k] += query[c] * key[k * 3 * C + c] / sqrt((double)HS);
      if (p[k] > max) max = p[k];
    }
    for (int k = 0; k <= q; k++) sum += exp(p[k] - max);
    lse[i] = max + log(sum);
    for (int k = 0; k <= q; k++) {
      double weight = exp(p[k] - lse[i]) * ops_factor(d, b, (h * T + q) * T + k);
      for (int c = 0; c < HS; c++) {
        out[to + c] += weight * key[k * 3 * C + C + c];
        size[to + c] += weight * fabs(key[k * 3 * C + C + c]);
      }
    }
  }
  free(p);
}

/* The gradient by the chain rule, from the lse and out that the op receives. */
static void ops_attention_back(double *dqkv, double *size, const float *dout, const float *out,
                               const float *lse, const double *qkv, const g2z_dropout *dropout,
                               int B, int T, int C, int NH) {
  int HS = C / NH;
  double root = 1 / sqrt((double)HS);
  for (int i = 0; i < B * NH * T; i++)
    for (int q = i % T, k = 0; k <= q; k++) {
      int b = i / NH / T, h = i / T % NH, at_o = (b * T + q) * C + h * HS;
      int at_q = (b * T + q) * 3 * C + h * HS, at_k = (b * T + k) * 3 * C + h * HS + C;
      int at_v = at_k + C;
      double s = 0, dp = 0, d = 0, all = 0;
      for (int c = 0; c < HS; c++) {
        double dy = (double)dout[at_o + c];
        s += qkv[at_q + c] * qkv[at_k + c] * root;
        dp += dy * qkv[at_v + c];
        d += dy * (double)out[at_o + c];
        all += fabs(dy);
      }
      double p = exp(s - (double)lse[i]), f = ops_factor(dropout, b, (h * T + q) * T + k);
      double ds = p * (dp * f - d) * root, ds_size = p * all * (f + 1) * root;
      for (int c = 0; c < HS; c++) {
        dqkv[at_q + c] += ds * qkv[at_k + c];
        dqkv[at_k + c] += ds * qkv[at_q + c];
        dqkv[at_v + c] += p * f * (double)dout[at_o + c];
        size[at_q + c] += ds_size * fabs(qkv[at_k + c]);
        size[at_k + c] += ds_size * fabs(qkv[at_q + c]);
        size[at_v + c] += p * f * fabs((double)dout[at_o + c]);
      }
    }
}

static void ops_attention_with(ops_env *e, const int *shape, const g2z_dropout *d) {
  int B = shape[0], T = shape[1], C = shape[2], NH = shape[3], n = B * T * C, rows = B * NH * T;
  float *qkv = ops_random(e, 3 * n, 2), *dout = ops_random(e, n, 1);
  float *out = ops_output(e, n), *lse = ops_output(e, rows);
  double *want = ops_doubles(e, 3 * n), *size = ops_doubles(e, 3 * n), *lses = ops_doubles(e, rows);
  double *exact = ops_doubles(e, 3 * n);
  for (int i = 0; i < 3 * n; i++) exact[i] = (double)qkv[i];
  ops_attention(want, size, lses, exact, d, B, T, C, NH);
  OPS_RUN(e, attention_fwd, .out = out, .lse = lse, .qkv = qkv, .dropout = *d, .B = B, .T = T,
          .C = C, .NH = NH);
  /* A score is a sum of HS terms of up to 4 / sqrt(HS). Its error is an error of the exponent, so
   * it scales the result by that number of roundings. */
  double roundings = 8 * sqrt((double)(C / NH)) + ops_walk(T);
  ops_expect(e, "attention_fwd", out, want, size, n, e->dtype, roundings);
  for (int i = 0; i < rows; i++) size[i] = 4 + fabs(lses[i]);
  ops_expect(e, "attention_fwd's lse", lse, lses, size, rows, G2Z_FP32, 16);

  float *dqkv = ops_output(e, 3 * n), *before = ops_random(e, 3 * C, 8);
  float *dbias = ops_output(e, 3 * C);
  ops_begin(want, size, NULL, 3 * n);
  ops_attention_back(want, size, dout, out, lse, exact, d, B, T, C, NH);
  for (int mode = 0; mode < 2; mode++) {
    const float *old = mode ? before : NULL;
    memcpy(dbias, before, (size_t)(3 * C) * sizeof *dbias);
    OPS_RUN(e, attention_bwd, .dqkv = dqkv, .dbias = dbias, .dout = dout, .out = out, .lse = lse,
            .qkv = qkv, .mode = ops_write(old), .dropout = *d, .B = B, .T = T, .C = C, .NH = NH);
    ops_expect(e, "attention_bwd", dqkv, want, size, 3 * n, e->dtype, 2 * roundings);
    ops_expect_sums(e, "attention_bwd's dbias", dbias, dqkv, old, B * T, 3 * C);
  }
}

static void ops_attention_at(ops_env *e, const int *shape) {
  ops_attention_with(e, shape, ops_dropout(e, 0, shape[1]));
  ops_attention_with(e, shape, ops_dropout(e, 0.25f, shape[1]));
}

/* A query has the same bits alone, in generation, as among the queries of a sequence. */
static void ops_attention_alone(ops_env *e, const int *shape) {
  const int B = shape[0], T = shape[1], C = shape[2], NH = shape[3], n = B * T * C;
  float *qkv = ops_random(e, 3 * n, 2), *out = ops_output(e, n), *lse = ops_output(e, B * NH * T);
  float *rows = ops_output(e, B * 3 * C), *past = ops_output(e, 3 * n), *one = ops_output(e, B * C);
  int32_t *positions = (int32_t *)test_memory(e->t, (size_t)B * sizeof *positions);
  OPS_RUN(e, attention_fwd, .out = out, .lse = lse, .qkv = qkv, .B = B, .T = T, .C = C, .NH = NH);
  for (int t = 0; t < T; t++) {
    for (int b = 0; b < B; b++) {
      positions[b] = t;
      memcpy(rows + b * 3 * C, qkv + (b * T + t) * 3 * C, (size_t)(3 * C) * sizeof *rows);
    }
    OPS_RUN(e, attention_next, .out = one, .past = past, .rows = rows, .positions = positions,
            .B = B, .T = T, .C = C, .NH = NH);
    for (int b = 0; b < B; b++)
      CHECK(e->t, memcmp(one + b * C, out + (b * T + t) * C, (size_t)C * sizeof *one) == 0);
  }
}

static void test_ops_attention(g2z_test *t) {
  /* Sequences longer than a block of 64 queries or 48 keys; the smallest head and the largest. */
  static const int shapes[5][4] = {{1, 1, 8, 1}, {2, 5, 48, 2}, {1, 67, 128, 2}, {2, 149, 24, 3},
                                   {3, 97, 128, 1}};
  ops_each(t, ops_attention_at, shapes, 5);
  ops_each(t, ops_attention_alone, shapes, 5);
}

/* Scores of up to 3,000: softmax must subtract the maximum before it exponentiates, and must ignore
 * masked keys, however large. */
static void test_ops_attention_range(g2z_test *t) {
  enum { T = 130, C = 16, N = T * C };
  ops_env e = ops_open(t, G2Z_FP32, G2Z_FP32);
  float *qkv = ops_random(&e, 3 * N, 32), *out = ops_output(&e, N);
  float *lse = ops_output(&e, T), *again = ops_output(&e, N);
  double *want = ops_doubles(&e, N), *size = ops_doubles(&e, N), *lses = ops_doubles(&e, T);
  double *exact = ops_doubles(&e, 3 * N);
  for (int i = 0; i < 3 * N; i++) exact[i] = qkv[i] = rintf(qkv[i]); /* exact scores */
  OPS_RUN(&e, attention_fwd, .out = out, .lse = lse, .qkv = qkv, .B = 1, .T = T, .C = C, .NH = 1);
  ops_attention(want, size, lses, exact, ops_dropout(&e, 0, T), 1, T, C, 1);
  for (int i = 0; i < N; i++) size[i] = 32;
  ops_expect(&e, "attention_fwd of large scores", out, want, size, N, G2Z_FP32, 16);
  for (int i = 0; i < T; i++) size[i] = 4096;
  ops_expect(&e, "its lse", lse, lses, size, T, G2Z_FP32, 4);
  for (int i = 0; i < 3 * C; i++) qkv[3 * (T - 1) * C + i] = 1e18f; /* the last token's q, k, v */
  OPS_RUN(&e, attention_fwd, .out = again, .lse = lse, .qkv = qkv, .B = 1, .T = T, .C = C, .NH = 1);
  CHECK(t, memcmp(out, again, (N - C) * sizeof *out) == 0);
  ops_close(&e);
}

/* ----- embedding -------------------------------------------------------- */

static void ops_embedding(ops_env *e, int B, int T, int C, int V) {
  int n = B * T * C, words = V * C, places = (T + 2) * C;
  float *wte = ops_random(e, words, 1), *wpe = ops_random(e, places, 1), *out = ops_output(e, n);
  float *dout = ops_random(e, n, 1), *before = ops_random(e, words + places, 4);
  float *dwte = ops_output(e, words), *dwpe = ops_output(e, places);
  int32_t *tokens = (int32_t *)test_memory(e->t, (size_t)(B * T) * sizeof *tokens);
  double *want = ops_doubles(e, n), *sums = ops_doubles(e, words + places);
  double *sizes = ops_doubles(e, words + places);
  const g2z_dropout *d = ops_dropout(e, T > 1 ? 0.5f : 0, T);
  for (int i = 0; i < B * T; i++) tokens[i] = (i * i + 3) % V; /* repeated and missing tokens */
  for (int i = 0; i < n; i++) {
    double sum = (double)wte[tokens[i / C] * C + i % C] + (double)wpe[i % (T * C)];
    want[i] = sum * ops_row_factor(d, i, C);
  }
  OPS_RUN(e, embed_fwd, .out = out, .tokens = tokens, .wte = wte, .wpe = wpe, .dropout = *d, .B = B,
          .T = T, .C = C);
  ops_expect(e, "embed_fwd", out, want, NULL, n, e->dtype, 4);
  for (int mode = 0; mode < 2; mode++) {
    const float *old = mode ? before + words : NULL;
    memcpy(dwte, before, (size_t)words * sizeof *dwte);
    memcpy(dwpe, before + words, (size_t)places * sizeof *dwpe);
    ops_begin(sums, sizes, before, words); /* dwte always adds; dwpe adds in one mode */
    ops_begin(sums + words, sizes + words, old, places);
    for (int i = 0; i < n; i++) {
      double g = (double)dout[i] * ops_row_factor(d, i, C);
      int at[2] = {tokens[i / C] * C + i % C, words + i % (T * C)};
      for (int k = 0; k < 2; k++) {
        sums[at[k]] += g;
        sizes[at[k]] += fabs(g);
      }
    }
    OPS_RUN(e, embed_bwd, .dwte = dwte, .dwpe = dwpe, .dout = dout, .tokens = tokens,
            .mode = ops_write(old), .dropout = *d, .B = B, .T = T, .C = C);
    ops_expect(e, "embed_bwd's dwte", dwte, sums, sizes, words, G2Z_FP32, ops_walk(B * T));
    ops_expect(e, "embed_bwd's dwpe", dwpe, sums + words, sizes + words, T * C, e->grad,
               ops_walk(B));
    /* Rows beyond the sequence length belong to longer sequences. */
    CHECK(e->t, memcmp(dwpe + T * C, before + words + T * C, (size_t)(2 * C) * sizeof(float)) == 0);
  }
}

/* Adds all tokens' rows to a part of wte's gradient: nothing outside of the part changes. */
static void ops_embedding_add(ops_env *e, int N, int C, int V, int first, int count) {
  int words = V * C;
  float *rows = ops_random(e, N * C, 1), *grads = ops_random(e, words, 4);
  double *sums = ops_doubles(e, words), *sizes = ops_doubles(e, words);
  int32_t *tokens = (int32_t *)test_memory(e->t, (size_t)(3 * N) * sizeof *tokens);
  int32_t *order = tokens + N;
  for (int i = 0; i < N; i++) tokens[i] = (i * i + 3) % V;
  for (int i = 0; i < words; i++) grads[i] = g2z__round(e->grad, grads[i]);
  ops_begin(sums, sizes, grads, words);
  for (int i = 0; i < N * C; i++) {
    int at = tokens[i / C] * C + i % C;
    if (at < first || at >= first + count) continue;
    sums[at] += (double)rows[i];
    sizes[at] += fabs((double)rows[i]);
  }
  OPS_CALL(e, embed_order, order, tokens, N);
  for (int i = 0; i < N; i++) {
    CHECK(e->t, order[i] == tokens[order[N + i]]);
    CHECK(e->t, i == 0 || order[i - 1] < order[i] ||
                    (order[i - 1] == order[i] && order[N + i - 1] < order[N + i]));
  }
  g2z_row_part part = {(size_t)first, (size_t)count, (size_t)first};
  OPS_RUN(e, embed_add, .grads = grads, .parts = &part, .count = 1, .rows = rows, .order = order,
          .N = N, .C = C);
  ops_expect(e, "embed_add", grads, sums, sizes, words, e->grad, ops_walk(N));
}

static void ops_embedding_at(ops_env *e, const int *shape) {
  int N = shape[0] * shape[1], C = shape[2], V = shape[3];
  ops_embedding(e, shape[0], shape[1], C, V);
  ops_embedding_add(e, N, C, V, 0, C * V);
  ops_embedding_add(e, N, C, V, 8, C * V / 2 / 8 * 8); /* the part begins and ends within rows */
}

static void test_ops_embedding(g2z_test *t) {
  static const int shapes[3][4] = {{1, 1, 8, 3}, {3, 11, 40, 17}, {5, 140, 144, 5}};
  ops_each(t, ops_embedding_at, shapes, 3);
}

/* ----- LM head ---------------------------------------------------------- */

/* Losses, and dlogits of 8 times the loss, from logits rounded to the type. */
static void ops_classify(g2z_dtype dtype, double *loss, double *size, float *dlogits,
                         const float *logits, const int32_t *targets, int N, int V) {
  for (int i = 0; i < N; i++) {
    const float *row = logits + i * V;
    double max = -INFINITY, sum = 0, at = (double)g2z__round(dtype, row[targets[i]]);
    for (int v = 0; v < V; v++) max = fmax(max, (double)g2z__round(dtype, row[v]));
    for (int v = 0; v < V; v++) sum += exp((double)g2z__round(dtype, row[v]) - max);
    loss[i] = log(sum) + max - at;
    size[i] = 4 + fabs(max) + fabs(at);
    for (int v = 0; v < V; v++) {
      double p = exp((double)g2z__round(dtype, row[v]) - max) / sum;
      dlogits[i * V + v] = g2z__round(dtype, (float)(8 * (p - (v == targets[i]))));
    }
  }
}

static void ops_head(ops_env *e, const int *shape) {
  int N = shape[0], C = shape[1], V = shape[2], chunk = shape[3], Vp = (V + 127) / 128 * 128;
  int n = N * C, words = Vp * C, all = N * V;
  float *h = ops_random(e, n, 2), *wte = ops_random(e, words, 0.5f);
  float *before = ops_random(e, words, 4), *own = ops_output(e, all), *d = ops_output(e, all);
  float *logits = ops_output(e, chunk * Vp), *losses = ops_output(e, N);
  float *dh = ops_output(e, n), *dwte = ops_output(e, words);
  double *want = ops_doubles(e, all), *size = ops_doubles(e, all), *want_h = ops_doubles(e, n);
  double *want_loss = ops_doubles(e, N), *size_h = ops_doubles(e, n);
  double *want_w = ops_doubles(e, words), *size_w = ops_doubles(e, words);
  int32_t *targets = (int32_t *)test_memory(e->t, (size_t)N * sizeof *targets);
  for (int i = 0; i < N; i++) targets[i] = i == 0 ? V - 1 : (i * 31) % V;
  for (int i = V * C; i < words; i++) wte[i] = 1e30f; /* would ruin every softmax */
  const float dloss = 1.0f / 64;
  e->state.loss_scale = 512;

  ops_product(want, size, h, C, 1, wte, 1, C, N, V, C);
  OPS_CALL(e, head_logits, own, h, wte, N, C, V);
  ops_expect(e, "head_logits", own, want, size, all, G2Z_FP32, ops_walk(C));
  /* If the reference is at a tie, a logit differs by a ulp, and so does the loss. The rest
   * therefore uses the op's own logits, which were just checked. */
  ops_classify(e->dtype, want_loss, size, d, own, targets, N, V);
  double loss_sum = 2.5, in_order = 2.5;
  OPS_RUN(e, head_loss, .losses = losses, .loss_sum = &loss_sum, .dwte_dtype = G2Z_FP32,
          .logits = logits, .h = h, .wte = wte, .targets = targets, .dloss = dloss,
          .state = &e->state, .N = N, .C = C, .V = V, .Vp = Vp, .chunk = chunk);
  ops_expect(e, "head_loss, evaluation", losses, want_loss, size, N, G2Z_FP32, 16);
  for (int i = 0; i < N; i++) in_order += (double)losses[i];
  CHECK(e->t, loss_sum == in_order);

  if (e->device->fp8) { /* only logits are products of rounded operands */
    float *narrow_h = ops_narrow(e, &ops_e4m3, h, N, C, 0);
    float *narrow_wte = ops_narrow(e, &ops_e4m3, wte, V, C, 32);
    memset(want, 0, (size_t)all * sizeof *want);
    memset(size, 0, (size_t)all * sizeof *size);
    ops_product(want, size, narrow_h, C, 1, narrow_wte, 1, C, N, V, C);
    OPS_CALL(e, head_logits, own, narrow_h, narrow_wte, N, C, V);
    ops_expect(e, "logits of e4m3", own, want, size, all, G2Z_FP32, ops_walk(C));
    ops_classify(e->dtype, want_loss, size, d, own, targets, N, V);
  }
  ops_product(want_h, size_h, d, V, 1, wte, C, 1, N, C, V);
  for (int mode = 0; mode < 2; mode++) {
    const float *old = mode ? before : NULL;
    memcpy(dwte, before, (size_t)words * sizeof *dwte);
    memset(losses, 0, (size_t)N * sizeof *losses);
    ops_begin(want_w, size_w, old, words);
    ops_product(want_w, size_w, d, 1, V, h, C, 1, V, C, N);
    OPS_RUN(e, head_loss, .losses = losses, .loss_sum = &loss_sum, .dh = dh, .dwte = dwte,
            .dwte_dtype = G2Z_FP32, .logits = logits, .h = h, .wte = wte, .targets = targets,
            .dloss = dloss, .state = &e->state, .mode = ops_write(old), .N = N, .C = C, .V = V,
            .Vp = Vp, .chunk = chunk);
    ops_expect(e, "head_loss", losses, want_loss, size, N, G2Z_FP32, 16);
    for (int i = (N - 1) / chunk * chunk; i < N; i++) { /* only the last chunk's dlogits remain */
      for (int v = 0; v < V; v++) want[v] = (double)d[i * V + v];
      ops_expect(e, "its dlogits", logits + i % chunk * Vp, want, NULL, V, e->dtype, 128);
    }
    /* An element of dlogits that rounds to the other neighbour is off by 2^-10 of itself in fp16
     * and by 2^-7 in bf16: 2^14 and 2^17 roundings. fp32 has the exponent's error. */
    double each = e->dtype == G2Z_FP32 ? 128 : e->dtype == G2Z_FP16 ? 16384 : 131072;
    ops_expect(e, "head_loss's dh", dh, want_h, size_h, n, e->dtype, each + ops_walk(V));
    ops_expect(e, "head_loss's dwte", dwte, want_w, size_w, words, G2Z_FP32, each + ops_walk(N));
    for (int i = 0; i < words && !mode; i++) before[i] = g2z__round(e->grad, dwte[i]);
    if (mode || N > chunk) continue; /* one chunk may be rounded directly */
    OPS_RUN(e, head_loss, .losses = losses, .loss_sum = &loss_sum, .dh = dh, .dwte = dwte,
            .dwte_dtype = e->grad, .logits = logits, .h = h, .wte = wte, .targets = targets,
            .dloss = dloss, .state = &e->state, .N = N, .C = C, .V = V, .Vp = Vp, .chunk = chunk);
    CHECK(e->t, memcmp(dwte, before, (size_t)words * sizeof *dwte) == 0);
  }
}

/* A row's sum of exponentials in 8 bits: 2^8 times a factor from 1 to 2, which differs by row. */
static double ops_head_sum(int row) {
  return exp2(8 + floor(fmod(row * 2654435769.0, 4294967296.0) / 256) / 16777216);
}
/* Gradients in 8 bits. dlogits are the numbers of e5m2 nearest to the exact ones; dh and dwte are
 * their products with rounded operands. Only the last chunk's dlogits remain, so each
 * chunk also runs alone. */
static void ops_head_eight(ops_env *e, const int *shape) {
  const int N = shape[0], C = shape[1], V = shape[2], Vp = (V + 127) / 128 * 128, rows = 128;
  float *h = ops_random(e, N * C, 2), *wte = ops_random(e, Vp * C, 0.5f);
  float *own = ops_output(e, rows * V), *logits = ops_output(e, rows * Vp);
  float *losses = ops_output(e, N), *dh = ops_output(e, N * C), *dwte = ops_output(e, Vp * C);
  float *narrow_h = ops_narrow(e, &ops_e4m3, h, N, C, 0), *right = ops_output(e, rows * C);
  float *narrow_wte = ops_narrow(e, &ops_e4m3, wte, V, C, 32), *before = ops_output(e, Vp * C);
  double *want_h = ops_doubles(e, rows * C), *size_h = ops_doubles(e, rows * C), loss_sum = 0;
  double *want_w = ops_doubles(e, V * C), *size_w = ops_doubles(e, V * C);
  int32_t *targets = (int32_t *)malloc((size_t)N * sizeof *targets);
  for (int i = 0; i < N; i++) targets[i] = i % 50 == 7 ? -1 : (i * 31) % V;
  const float dloss = 1.0f / 64, g = 8;
  e->device->fp8 = G2Z_FP8_ALL;
  e->state.loss_scale = 512;
  for (int first = 0; first < N; first += rows) {
    const float *from = h + first * C;
    ops_begin(want_w, size_w, first ? dwte : NULL, V * C);
    ops_begin(want_h, size_h, NULL, rows * C);
    OPS_CALL(e, head_logits, own, narrow_h + first * C, narrow_wte, rows, C, V);
    OPS_RUN(e, head_loss, .losses = losses, .loss_sum = &loss_sum, .dh = dh, .dwte = dwte,
            .dwte_dtype = G2Z_FP32, .logits = logits, .h = from, .wte = wte,
            .targets = targets + first, .dloss = dloss, .state = &e->state,
            .mode = first ? G2Z_ACCUMULATE : G2Z_OVERWRITE, .N = rows, .C = C, .V = V, .Vp = Vp,
            .chunk = rows);
    ops_product(want_h, size_h, logits, Vp, 1, narrow_wte, C, 1, rows, C, V);
    for (int i = 0; i < rows; i++) {
      const int target = targets[first + i];
      const double z = ops_head_sum(i);
      double sum = 0, exact = 0;
      for (int v = 0; v < V; v++) sum += exp((double)g2z__round(e->dtype, own[i * V + v]));
      for (int v = 0; v < V; v++) {
        const double p = exp((double)g2z__round(e->dtype, own[i * V + v])) / sum;
        const double want = target < 0 ? 0 : (p - (v == target)) * z;
        const double ulp = ldexp(1, fabs(want) < 0x1p-14 ? -16 : ilogb(want) - 2);
        const float got = logits[i * Vp + v];
        if (v == target) exact = want;
        FAIL_IF(e->t, !(got == g2z__round_e5m2(got) && fabs((double)got - want) <= 0.50001 * ulp),
                "dlogits[%d,%d] is %g; exact: %g", i, v, (double)got, want);
      }
      for (int c = 0; c < C; c++) {
        double *at = want_h + i * C + c;
        if (target >= 0)
          *at += (exact * 0.99724 - (double)logits[i * Vp + target]) *
                 (double)narrow_wte[target * C + c];
        *at *= (double)g / z, size_h[i * C + c] *= (double)g / z;
        right[i * C + c] = g2z__round_e4m3(from[i * C + c] * (512 / (float)z)) * (g / 512);
      }
    }
    ops_product(want_w, size_w, logits, 1, Vp, right, C, 1, V, C, rows);
    ops_expect(e, "head_loss's dh in 8 bits", dh, want_h, size_h, rows * C, e->dtype,
               64 + ops_walk(V));
    ops_expect(e, "head_loss's dwte in 8 bits", dwte, want_w, size_w, V * C, G2Z_FP32,
               ops_walk(rows));
  }
  OPS_RUN(e, head_loss, .losses = losses, .loss_sum = &loss_sum, .dh = dh, .dwte = before,
          .dwte_dtype = G2Z_FP32, .logits = logits, .h = h, .wte = wte, .targets = targets,
          .dloss = dloss, .state = &e->state, .N = N, .C = C, .V = V, .Vp = Vp, .chunk = rows);
  CHECK(e->t, memcmp(before, dwte, (size_t)(V * C) * sizeof *dwte) == 0);
  free(targets);
}

static void ops_head_fp8(ops_env *e, const int *shape) {
  e->device->fp8 = G2Z_FP8_LOGITS;
  ops_head(e, shape);
}

static void test_ops_head(g2z_test *t) {
  static const int shapes[4][4] = {
      {1, 8, 2, 1}, {37, 24, 301, 10}, {70, 40, 1100, 64}, {37, 24, 301, 37}};
  ops_each(t, ops_head, shapes, 4);
  ops_each(t, ops_head_fp8, shapes, 4);
  static const int eight[2][4] = {{128, 16, 301, 128}, {256, 48, 130, 128}};
  ops_each(t, ops_head_eight, eight, 2);
}

/* ----- end of a step ---------------------------------------------------- */

static g2z_optimizer_config ops_optimizer(void) {
  g2z_optimizer_config c = g2z_train_config_default(G2Z_DEVICE_CPU).optimizer;
  c.lr = 1e-2f;
  c.min_lr = 1e-3f;
  c.clip = 0;
  c.schedule = G2Z_SCHEDULE_LINEAR;
  c.warmup = 4;
  c.steps = 100;
  c.loss_scale_window = 50;
  c.loss_scale_hysteresis = 1;
  return c;
}

/* Decides a step of 10 targets whose gradients have this total sum of squares. `status`: a rank's
 * failure. `masked`: no target counts. */
static void ops_decide_as(ops_env *e, g2z_step_state *state, const g2z_optimizer_config *config,
                          double sum, g2z_status status, int masked) {
  double rows[3][G2Z_VERDICT_COLUMNS], votes[3][G2Z_VERDICT_COLUMNS];
  g2z_step_state reported[2];
  g2z_verdict verdict = {rows[0], 3, 3, {&reported[0], &reported[1]}};
  memset(rows, 0, sizeof rows);
  for (int rank = 0; rank < 3; rank++) {
    rows[rank][G2Z_VERDICT_LOSS] = 10;
    rows[rank][G2Z_VERDICT_SQUARES] = rank == 0 ? sum / 2 : sum / 4;
    rows[rank][G2Z_VERDICT_CLAMPED_INPUTS] = rank + 1;
    rows[rank][G2Z_VERDICT_CLAMPED_WEIGHTS] = 7; /* all ranks have the same weights */
  }
  rows[1][G2Z_VERDICT_STATUS] = (double)status;
  rows[2][G2Z_VERDICT_MASKED] = masked;
  memcpy(votes, rows, sizeof rows);
  CHECK_OK(e->t, e->ops->decide(e->device, state, &verdict, config, 10));
  CHECK(e->t, memcmp(rows, votes, sizeof rows) == 0);
  CHECK(e->t, state->status == (int32_t)status && !state->stop);
  CHECK(e->t, masked ? isnan(state->loss) : state->loss == 3.0f);
  CHECK(e->t, state->counted == 10 - masked);
  CHECK(e->t, state->clamped_inputs == 1 + 2 + 3 && state->clamped_weights == 7);
  CHECK(e->t, state->step == state->applied + state->skipped);
  CHECK(e->t, memcmp(&reported[state->step % 2], state, sizeof *state) == 0);
}

static void ops_decide(ops_env *e, g2z_step_state *state, const g2z_optimizer_config *config,
                       double sum) {
  ops_decide_as(e, state, config, sum, G2Z_OK, 0);
}

static void ops_decide_scale(g2z_test *t) {
  ops_env e = ops_open(t, G2Z_FP16, G2Z_FP16);
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
  /* An overflow halves the scale and skips the step; AdamW's count and the schedule stay. */
  float lr = g2z_schedule_lr(&config, 50);
  ops_decide(&e, &s, &config, INFINITY);
  CHECK(t, s.loss_scale == 65536 && s.skip == 1 && s.skipped == 1 && s.applied == 50);
  CHECK(t, s.step == 51 && s.grad_multiplier == 0 && s.lr == lr && s.used_loss_scale == 131072);
  CHECK(t, isinf(s.grad_norm) && s.loss == 3 && s.skipped_at_minimum == 0);
  ops_decide(&e, &s, &config, NAN);
  CHECK(t, s.loss_scale == 32768 && s.skipped == 2 && isnan(s.grad_norm));
  ops_decide(&e, &s, &config, 1);
  CHECK(t, s.skip == 0 && s.applied == 51 && s.lr == lr && s.good_steps == 1);

  /* Hysteresis 2: the second overflow halves the scale, and so does each one until a good
   * window. */
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

  /* A scale of 1 cannot shrink: these skips are counted until a good step. At 2^24 it stops
   * growing. */
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

  /* A step is skipped if a rank failed or if no target counts. The scale stays. */
  config.loss_scale_dynamic = 1;
  g2z_step_state good = s;
  for (int i = 0; i < 2; i++) ops_decide_as(&e, &s, &config, i ? NAN : 1, G2Z_IO, 0);
  for (int i = 0; i < 2; i++) ops_decide_as(&e, &s, &config, i ? NAN : 0, G2Z_OK, 10);
  CHECK(t, s.skip == 1 && s.skipped == good.skipped + 4 && s.applied == good.applied);
  CHECK(t, s.grad_multiplier == 0 && s.loss_scale == good.loss_scale);
  CHECK(t, s.good_steps == good.good_steps && s.hysteresis == good.hysteresis);
  CHECK(t, s.skipped_at_minimum == 0);

  /* A saturated count stays. */
  config.loss_scale_dynamic = 0;
  s.good_steps = INT32_MAX;
  ops_decide(&e, &s, &config, 1);
  CHECK(t, s.good_steps == INT32_MAX);
  ops_close(&e);
}

static void test_ops_decide(g2z_test *t) {
  ops_decide_scale(t);
  ops_env e = ops_open(t, G2Z_BF16, G2Z_FP32);
  g2z_optimizer_config config = ops_optimizer(); /* dynamic scale: fp16 only */
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
  /* The schedule counts applied steps, from 0 on. */
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
    ops_env e = ops_open(t, ops_dtypes[which], G2Z_FP32);
    size_t n = 29001; /* two ranges, each of several threads, and a tail */
    float *params = ops_filled(&e, n, 777), *master = ops_random(&e, n, 1);
    float *m = ops_filled(&e, n, 0), *v = ops_filled(&e, n, 0), *grads = ops_random(&e, n, 64);
    double *want = ops_doubles(&e, n), *want_m = ops_doubles(&e, n), *want_v = ops_doubles(&e, n);
    g2z_optimizer_config config = ops_optimizer();
    const double share = which == 1 ? 0.4 : 1; /* adam_lr / lr, which counts with Muon only */
    g2z_step_state s;
    config.kind = which == 1 ? G2Z_OPTIMIZER_MUON : G2Z_OPTIMIZER_ADAMW;
    config.adam_lr = 0.4f * config.lr;
    memset(&s, 0, sizeof s);
    s.loss_scale = 64;
    /* Two ranges, one with decay, and between them one element that has no owner: offsets in memory
     * and in the shard differ, as under ZeRO. */
    g2z_update_range ranges[2];
    memset(ranges, 0, sizeof ranges);
    ranges[0].elements = 15000;
    ranges[0].decay = 1;
    ranges[1].own_param_at = ranges[1].sum_at = 15001;
    ranges[1].shard_at = ranges[1].v_at = 15000;
    ranges[1].elements = 14000;
    for (size_t i = 0; i < n; i++) want[i] = (double)master[i];
    g2z_update update = {params, master, m, v, grads, ranges, ranges, &config, &s};
    for (int step = 1; step <= 3; step++) {
      ops_decide(&e, &s, &config, 4096);
      OPS_CALL(&e, adamw, &update, 1, 2); /* in parts, in any order */
      OPS_CALL(&e, adamw, &update, 0, 1);
      OPS_CALL(&e, adamw, &update, 2, 2);
      for (size_t i = 0; i < 29000; i++) {
        double g = (double)grads[i < 15000 ? i : i + 1] / 64, b1 = config.beta1, b2 = config.beta2;
        want_m[i] = b1 * want_m[i] + (1 - b1) * g;
        want_v[i] = b2 * want_v[i] + (1 - b2) * g * g;
        if (i < 15000) want[i] *= 1 - share * (double)s.lr * (double)config.weight_decay;
        want[i] -= share * (double)s.lr * (want_m[i] / (1 - pow(b1, step))) /
                   (sqrt(want_v[i] / (1 - pow(b2, step))) + (double)config.eps);
      }
    }
    ops_expect(&e, "adamw's master", master, want, NULL, 29000, G2Z_FP32, 1e4);
    int near = 1, exact = 1;
    for (size_t i = 0; i < 29000; i++) { /* weights are about 1, three updates 0.02 */
      near &= fabs((double)master[i] - want[i]) < 4e-7;
      near &= fabs((double)m[i] - want_m[i]) < 1e-6 && fabs((double)v[i] - want_v[i]) < 1e-6;
      exact &= params[i < 15000 ? i : i + 1] == g2z__round(ops_dtypes[which], master[i]);
    }
    CHECK(t, near);
    CHECK(t, exact && params[15000] == 777 && m[29000] == 0 && v[29000] == 0);
    CHECK(t, (double)master[29000] == want[29000]);
    /* A skipped step changes nothing. */
    float *kept = ops_filled(&e, n, 0);
    memcpy(kept, master, n * sizeof *kept);
    ops_decide(&e, &s, &config, NAN);
    OPS_CALL(&e, adamw, &update, 0, 2);
    CHECK(t, memcmp(kept, master, n * sizeof *kept) == 0);
    ops_close(&e);
  }
}

/* Moments in bf16 lie next to those in fp32, on both sides, and are right on average. Each step and
 * element draws its own numbers: steps from the same values differ. The numbers stay the same if a
 * range ends inside a group of four elements. */
static void test_ops_moments(g2z_test *t) {
  enum { N = 20000 };
  static float m[4][N], v[4][N];
  ops_env e = ops_open(t, G2Z_FP16, G2Z_FP32);
  float *params = ops_filled(&e, N, 0), *grads = ops_filled(&e, N, 1);
  g2z_optimizer_config config = ops_optimizer();
  g2z_step_state s;
  memset(&s, 0, sizeof s);
  s.loss_scale = 1;
  for (int run = 0; run < 4; run++) {
    const size_t cut = run == 3 ? 5 : N;
    g2z_update_range ranges[2] = {{0, 0, 0, 0, 0, 4, cut, 0, 0},
                                  {cut, cut, cut, cut, cut, 4 + cut, N - cut, 0, 0}};
    float *master = ops_filled(&e, N, 1);
    g2z_update update = {params, master, m[run], v[run], grads, ranges, ranges, &config, &s};
    config.moments_bf16 = run > 0;
    s.step = run < 3 ? run : 2;
    s.applied = 1;
    s.grad_multiplier = 1;
    for (int i = 0; i < N; i++) m[run][i] = v[run][i] = 0.75f;
    OPS_CALL(&e, adamw, &update, 0, 2);
  }
  CHECK(t, memcmp(m[2], m[3], sizeof m[2]) == 0 && memcmp(v[2], v[3], sizeof v[2]) == 0);
  double mean[2] = {0, 0}, both = 0, differ = 0;
  int beside = 1;
  for (int run = 1; run < 3; run++)
    for (int i = 0; i < N; i++) {
      const float of[2] = {m[run][i], v[run][i]}, exact[2] = {m[0][i], v[0][i]};
      double up[2];
      for (int k = 0; k < 2; k++) { /* between 0.5 and 1 bf16 has steps of 2^-8 */
        beside &= fabsf(of[k] - exact[k]) < 0x1p-8f && g2z__round_bf16(of[k]) == of[k];
        mean[k] += (double)(of[k] - exact[k]) / (2 * N);
        up[k] = of[k] > exact[k];
      }
      both += up[0] * up[1] / (2 * N);
      differ += run == 2 ? (double)(m[1][i] != m[2][i]) / N : 0;
    }
  double share[2]; /* of the numbers that go up */
  for (int k = 0; k < 2; k++) {
    double exact = (double)(k ? v : m)[0][0] * 256;
    share[k] = exact - floor(exact);
    CHECK_NEAR(t, mean[k], 0, 4 * 0x1p-8 * sqrt(share[k] * (1 - share[k]) / (2 * N)));
    CHECK(t, share[k] > 0.1 && share[k] < 0.9);
  }
  CHECK(t, beside);
  CHECK_NEAR(t, both, share[0] * share[1], 0.01);
  CHECK_NEAR(t, differ, 2 * share[0] * (1 - share[0]), 0.02);
  ops_close(&e);
}

static void test_ops_sums_and_casts(g2z_test *t) {
  ops_env e = ops_open(t, G2Z_FP16, G2Z_FP32);
  static const size_t counts[5] = {0, 1, 63, 65, 200003};
  for (int i = 0; i < 5; i++) {
    size_t n = counts[i];
    float *x = ops_random(&e, n, 8), *act = ops_filled(&e, n, 777), *grad = ops_filled(&e, n, 777);
    double want = 0, sum = 777;
    g2z_range all = {0, n};
    for (size_t j = 0; j < n; j++) want += (double)x[j] * (double)x[j];
    OPS_CALL(&e, grad_sumsq, &sum, x, &all, 1);
    CHECK_NEAR(t, sum, 777 + want, 1e-12 * (777 + want));
    for (size_t j = 0; j < n; j++) x[j] *= 1.0001f;
    OPS_CALL(&e, cast_act, act, x, n);
    OPS_CALL(&e, cast_grad, grad, x, n);
    CHECK(t, memcmp(grad, x, n * sizeof *x) == 0);
    int exact = 1;
    for (size_t j = 0; j < n; j++) exact &= act[j] == g2z__round(G2Z_FP16, x[j]);
    CHECK(t, exact);
    for (int again = 0; again < 2; again++) {
      g2z_write write = again ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
      OPS_CALL(&e, grad_add, grad, x, write, n);
      for (size_t j = 0; j < n; j++) exact &= grad[j] == (again ? x[j] + x[j] : x[j]);
    }
    CHECK(t, exact);
    if (!n) continue;
    /* Squares of 1e38 stay finite in double; one infinity or NaN anywhere is detected. */
    x[n - 1] = 1e38f;
    OPS_CALL(&e, grad_sumsq, &sum, x, &all, 1);
    CHECK(t, isfinite(sum));
    for (int nan = 0; nan < 2; nan++) {
      x[n / 2] = nan ? NAN : INFINITY;
      OPS_CALL(&e, grad_sumsq, &sum, x, &all, 1);
      CHECK(t, !isfinite(sum));
    }
  }
  ops_close(&e);
}

/* ----- threads and stacks ------------------------------------------------- */

#if defined(_OPENMP)
#include <omp.h>
#endif

static int ops_threads; /* OpenMP threads that an op may use */

static void *ops_on_thread(void *t) {
  static void (*const runs[])(g2z_test *) = {
      test_ops_linear,    test_ops_layernorm, test_ops_attention, test_ops_attention_range,
      test_ops_embedding, test_ops_head,      test_ops_decide,    test_ops_adamw,
      test_ops_sums_and_casts};
#if defined(_OPENMP)
  omp_set_num_threads(ops_threads);
#endif
  for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) runs[i]((g2z_test *)t);
  return NULL;
}

static void *ops_nothing(void *user) { return user; }

/* 64 KiB more than a thread needs to start: thread-local variables of all libraries are on its
 * stack, and CUDA adds more of them. */
static size_t ops_small_stack(void) {
  for (size_t bytes = (size_t)PTHREAD_STACK_MIN;; bytes += 4096) {
    pthread_attr_t small;
    pthread_t thread;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, bytes);
    int failed = pthread_create(&thread, &small, ops_nothing, NULL);
    pthread_attr_destroy(&small);
    if (!failed) pthread_join(thread, NULL);
    if (!failed || bytes > (size_t)1 << 24) return bytes + 64 * 1024;
  }
}

/* All of the above on small stacks, with 1 to 4 threads: equal bits in all buffers. OpenMP's
 * threads get their stack from the environment, so a process that is started with it does this. */
static void test_ops_threads(g2z_test *t) {
  uint64_t first = 0;
  pthread_attr_t small;
  pthread_t thread;
  char output[4096];
  if (!getenv("OMP_STACKSIZE")) {
    int code = test_shell(test_text("OMP_STACKSIZE=%zuB /proc/%d/exe ops_threads",
                                    ops_small_stack(), (int)getpid()), output, sizeof output);
    CHECK(t, code == 0);
    if (code != 0) printf("%s", output);
    return;
  }
  CHECK(t, pthread_attr_init(&small) == 0 &&
               pthread_attr_setstacksize(&small, ops_small_stack()) == 0);
  for (int count = 1; count <= 4; count++) {
    ops_hash = 0;
    ops_threads = count;
    int failed = pthread_create(&thread, &small, ops_on_thread, t);
    CHECK(t, !failed);
    if (failed) break;
    CHECK(t, pthread_join(thread, NULL) == 0);
    if (count == 1) first = ops_hash;
    CHECK(t, ops_hash == first);
  }
  pthread_attr_destroy(&small);
}
