/* Tests of the CPU's op table against naive references in double, and of what a host's device says
 * about itself. Tests that use private names of the header: cgroup_memory, ops_peaks; "internals"
 * stands above what writes such names. */

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
  mutate_device(e->device);
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
    x[i] = g2z__round(e->device->dtype, scale * ((float)(e->seed >> 20) / 2048.0f - 1.0f));
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
    if (g2z__round(dtype, got[i]) != got[i]) of_type = 0;
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
  CHECK(t, g2z__round(G2Z_FP16, 65504.0f) == 65504.0f && g2z__round(G2Z_FP16, 65519.99f) == 65504.0f);
  CHECK(t, g2z__round(G2Z_FP16, 65520.0f) == INFINITY && g2z__round(G2Z_FP16, -3e38f) == -INFINITY);
  CHECK(t, g2z__round(G2Z_FP16, 0.1f) == 0.0999755859375f);
  CHECK(t, g2z__round(G2Z_BF16, 0.1f) == 0.10009765625f && g2z__round(G2Z_BF16, 3.4e38f) == INFINITY);
  CHECK(t, g2z__round(G2Z_FP32, 0.1f) == 0.1f && g2z__round(G2Z_TF32, 0.1f) == 0.1f);
}

/* internals */
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

/* internals */
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
  CHECK_OK(t, g2z__tuning_read(device, "")); /* its own, and a GPU's */
  CHECK_OK(t, g2z__tuning_read(device, "gpt2_zero tuning 3, cuBLASLt 1, 2 SMs, x\n1 2\n"));
  CHECK_STATUS(t, g2z__tuning_read(device, "gpt2_zero tuning 1, cuBLASLt 1, 2 SMs, x\n"),
               G2Z_FORMAT, s, "begins with \"gpt2_zero tuning 1, cuBLASLt 1, 2 SMs, x\"");
  CHECK_STATUS(t, g2z__tuning_read(device, "\n"), G2Z_FORMAT, s, "a run's tuning.txt");
  CHECK(t, device->dtype == G2Z_BF16 && device->grad_dtype == G2Z_FP32 && device->services == s);
  CHECK(t, device->kind == G2Z_DEVICE_CPU && device->ops == g2z__cpu_ops());
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
    l.x[i] = g2z__round(e->device->dtype, l.x[i] + 3);
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
  for (size_t i = 0; i < 3 * n; i++) qkv[i] = rintf(qkv[i]); /* so that scores are exact */
  CHECK_OK(t, e.ops->attention_fwd(e.device, out, lse, qkv, NULL, 1, T, C, 1));
  ops_attention(want, size, lses, qkv, NULL, 1, T, C, 1, (size_t)-1, 0);
  for (size_t i = 0; i < n; i++) size[i] = 32;
  ops_expect(&e, "attention_fwd of large scores", out, want, size, n, G2Z_FP32, 16);
  for (int i = 0; i < T; i++) size[i] = 4096;
  ops_expect(&e, "its lse", lse, lses, size, (size_t)T, G2Z_FP32, 4);
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
    grads[i] = g2z__round(e->device->grad_dtype, grads[i]);
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
    for (size_t i = 0; i < words && !mode; i++) before[i] = g2z__round(grad, dwte[i]);
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
      exact &= params[i < 5000 ? i : i + 1] == g2z__round(ops_dtypes[which], master[i]);
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
    for (size_t j = 0; j < n; j++) exact &= act[j] == g2z__round(G2Z_FP16, x[j]);
    CHECK(t, exact);
    for (int again = 0; again < 2; again++) {
      g2z_write write = again ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
      CHECK_OK(t, e.ops->grad_add(e.device, grad, x, write, n));
      for (size_t j = 0; j < n; j++) exact &= grad[j] == (again ? x[j] + x[j] : x[j]);
    }
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
