/* Tests of the CUDA op table against the CPU's. Each is skipped if there is no GPU. Tests that use
 * private names of the header: cuda_products, cuda_head, cuda_sums, cuda_attention; "internals"
 * marks code that uses such names. */

/* ----- CUDA ops against the CPU's ----------------------------------------
 * Each op runs on both devices with the same inputs, exact in their type, and the outputs must
 *   agree: |cuda - cpu| <= ulps * eps(type) * |cpu| + noise
 * ulps   roundings: two devices that round nearly equal values can land on neighbours (1), and an
 *        op that rounds in between (a product before its GELU or dropout) adds one for each.
 * noise  the order of additions: a sum of K random terms of size s passes through values of size
 *        s * sqrt(K), and each of its K roundings moves it by up to 2^-24 of that, at random: s *
 *        K * 2^-24 in all, taken four times for the worst of many sums; tensor cores keep a bit
 *        less, and tf32 takes inputs with 11 bits of precision.
 * On the GPU every output is poisoned with NaNs first and has guard bytes before and after it. */

typedef enum test_kind { TEST_ACT, TEST_GRAD, TEST_F32, TEST_BF16, TEST_F64, TEST_I32 } test_kind;

enum { TEST_GUARD = 512, TEST_TWINS = 48 };

typedef struct test_twin {   /* one tensor on both devices */
  test_kind kind;
  size_t n, bytes;           /* on the GPU */
  size_t shift;              /* bytes from an aligned address to the tensor */
  void *cpu, *block, *gpu;   /* the GPU's tensor lies inside a guarded block */
} test_twin;

typedef struct test_pair {   /* both devices, and one test's tensors */
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
/* The row where 16 bits begin. Long tests are divided there: each takes less than 30 s. */
enum { TEST_HALVES = 2 };

/* Opens both devices. Returns 0 if there is no GPU or the type is not selected. */
static int test_pair_open(test_pair *p, g2z_test *t, int types) {
  memset(p, 0, sizeof *p);
  if (!test_wants(test_types[types].dtype)) return 0;
  p->t = t;
  p->dtype = test_types[types].dtype;
  p->grad_dtype = test_types[types].grad_dtype;
  g2z_dtype cpu_dtype = p->dtype == G2Z_TF32 ? G2Z_FP32 : p->dtype;
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, cpu_dtype, p->grad_dtype, &p->cpu));
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, p->dtype, p->grad_dtype, &p->gpu));
  mutate_device(p->gpu);
  return p->cpu && p->gpu;
}

/* Releases the tensors and keeps the devices. */
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
  return kind == TEST_ACT    ? p->dtype
         : kind == TEST_GRAD ? p->grad_dtype
         : kind == TEST_BF16 ? G2Z_BF16 : G2Z_FP32;
}

static double test_eps(g2z_dtype dtype) {
  return dtype == G2Z_FP16 ? 0x1p-10 : dtype == G2Z_BF16 ? 0x1p-7 : 0x1p-23;
}

/* test_encode rounds a float to the type, as the GPU stores it. test_decode converts it back. */
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

/* A tensor of n numbers, NaN (or -1) everywhere, `shift` elements after an aligned address. */
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
  memset(bytes, 0xff, block); /* NaN in every type, also in the guards */
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, twin->block, bytes, block));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  free(bytes);
  return twin;
}
static test_twin *test_twin_new(test_pair *p, test_kind kind, size_t n) {
  return test_twin_at(p, kind, n, 0);
}

/* Copies the CPU's values to the GPU. Floats must be values of the type. */
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
        g2z__round(test_twin_dtype(p, kind), (float)(normal * scale + shift));
  }
  test_twin_send(p, twin);
  return twin;
}

/* Tokens below `vocab`, small ones more often; with vocab 1 all are one run. */
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

/* The largest error relative to the bound (1: at the bound), after a check of the guards. */
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
    } else if (twin->kind == TEST_I32) {
      int32_t whole;
      memcpy(&whole, bytes + begin + i * size, sizeof whole);
      x = whole;
      y = ((const int32_t *)twin->cpu)[i];
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

/* A GPU tensor as fp32; the caller frees it. */
static float *test_twin_fetch(test_pair *p, const test_twin *twin) {
  size_t size = test_kind_size(p, twin->kind);
  char *bytes = (char *)malloc(twin->bytes + 1);
  float *values = (float *)malloc((twin->n + 1) * sizeof *values);
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, twin->gpu, twin->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (size_t i = 0; i < twin->n; i++)
    values[i] = test_decode(test_twin_dtype(p, twin->kind), bytes + i * size);
  free(bytes);
  return values;
}

/* x as the op argument `narrow` stores it: 4 x in e4m3, or a gradient x in e5m2. */
static uint8_t test_narrow_byte(float x, int gradient) {
  float rounded = gradient ? g2z__round_e5m2(x) : g2z__round_e4m3(4 * x);
  int fraction = gradient ? 2 : 3, bias = gradient ? 15 : 7;
  uint32_t magnitude;
  memcpy(&magnitude, &rounded, sizeof magnitude);
  const uint32_t sign = magnitude >> 24 & 0x80u;
  magnitude &= 0x7fffffffu;
  if (fabsf(rounded) < ldexpf(1, 1 - bias))
    magnitude = (uint32_t)ldexpf(fabsf(rounded), bias - 1 + fraction);
  else magnitude = (magnitude >> (23 - fraction)) - ((uint32_t)(127 - bias) << fraction);
  return (uint8_t)(sign | magnitude);
}
static test_twin *test_narrow_new(test_pair *p, size_t rows, size_t n) {
  return test_twin_new(p, TEST_ACT, rows * G2Z_NARROW_ROW(n) / 2);
}
/* Sends the GPU's of[rows,n], rounded to 8 bits, to `narrow`. test_narrow_check: the GPU has
 * written exactly these bytes there. */
static void test_narrow_send(test_pair *p, test_twin *narrow, const test_twin *of, size_t n,
                             int gradient) {
  uint8_t *bytes = (uint8_t *)calloc(narrow->bytes, 1);
  float *values = test_twin_fetch(p, of);
  for (size_t i = 0; i < of->n; i++)
    bytes[i / n * G2Z_NARROW_ROW(n) + i % n] = test_narrow_byte(values[i], gradient);
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, narrow->gpu, bytes, narrow->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  free(values);
  free(bytes);
}
static void test_narrow_check(test_pair *p, const test_twin *narrow, const test_twin *of,
                              size_t n) {
  uint8_t *bytes = (uint8_t *)malloc(narrow->bytes);
  float *values = test_twin_fetch(p, of);
  size_t wrong = 0;
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, narrow->gpu, narrow->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (size_t i = 0; i < of->n; i++)
    wrong += bytes[i / n * G2Z_NARROW_ROW(n) + i % n] != test_narrow_byte(values[i], 0);
  CHECK(p->t, wrong == 0);
  free(values);
  free(bytes);
}

/* The 8-bit rows and columns that replace of[N,n], from the GPU's values. */
static uint8_t *test_both_bytes(test_pair *p, const test_twin *of, size_t n, int gradient) {
  const size_t rows = of->n / n;
  uint8_t *bytes = (uint8_t *)malloc(2 * of->n);
  float *values = test_twin_fetch(p, of);
  for (size_t i = 0; i < of->n; i++) {
    const size_t row = i / n, place = row / 128 * 128 + row % 64 / 16 * 32 + row % 8 * 4 +
                                      row % 128 / 64 * 2 + row % 16 / 8;
    bytes[i] = bytes[of->n + i % n * rows + place] = test_narrow_byte(values[i], gradient);
  }
  free(values);
  return bytes;
}
static void test_both_send(test_pair *p, test_twin *to, const test_twin *of, size_t n,
                           int gradient) {
  uint8_t *bytes = test_both_bytes(p, of, n, gradient);
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, to->gpu, bytes, 2 * of->n));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  free(bytes);
}
static void test_both_check(test_pair *p, const test_twin *both, const test_twin *of, size_t n,
                            int gradient) {
  uint8_t *want = test_both_bytes(p, of, n, gradient), *bytes = (uint8_t *)malloc(2 * of->n);
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, both->gpu, 2 * of->n));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  CHECK(p->t, memcmp(want, bytes, 2 * of->n) == 0);
  free(want);
  free(bytes);
}
/* Replaces 8-bit rows and columns of gradients by the numbers of the rows; columns are equal. */
static void test_both_open(test_pair *p, test_twin *x, size_t n) {
  uint8_t *bytes = (uint8_t *)malloc(2 * x->n);
  uint16_t *halves = (uint16_t *)malloc(2 * x->n);
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, x->gpu, 2 * x->n));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (size_t i = 0; i < x->n; i++) halves[i] = (uint16_t)(bytes[i] << 8); /* half of an fp16 */
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, x->gpu, halves, 2 * x->n));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  uint8_t *want = test_both_bytes(p, x, n, 1);
  CHECK(p->t, memcmp(want, bytes, 2 * x->n) == 0);
  free(want);
  free(halves);
  free(bytes);
}

/* sums[C] is `times` the column sums of the GPU's own rows[N,C]: a missing row shows. The kernel
 * may add values before or after it rounds them. Each rounding errs at random by at most half a
 * unit in the last place. N of them make sqrt(N) times 0.29 units; the worst of many columns gets
 * four times that. */
static void test_column_sums(test_pair *p, const test_twin *rows, const test_twin *sums, int C,
                             int times, const char *what) {
  float *x = test_twin_fetch(p, rows), *got = test_twin_fetch(p, sums);
  double eps = test_eps(p->dtype), grad_eps = test_eps(p->grad_dtype);
  const size_t width = (size_t)C, N = rows->n / width;
  for (size_t c = 0; c < width; c++) {
    double sum = 0, squares = 0;
    for (size_t r = 0; r < N; r++) {
      sum += (double)x[r * width + c];
      squares += (double)x[r * width + c] * (double)x[r * width + c];
    }
    double bound = times * (4 * 0.29 * (eps + 0x1p-20) * sqrt(squares) + grad_eps * fabs(sum)) +
                   0x1p-20;
    FAIL_IF(p->t, !(fabs((double)got[c] - times * sum) <= bound),
            "%s (%s, gradients %s): column %zu is %.9g, its rows make %.9g, within %.3g", what,
            g2z_dtype_text(p->dtype), g2z_dtype_text(p->grad_dtype), c, (double)got[c], times * sum,
            bound);
  }
  free(x);
  free(got);
}

/* The error that the order of additions may cause in a sum or product of K terms of about
 * `term`. */
static double test_sum_noise(int K, double term) { return 4 * (K + 8) * term * 0x1p-24; }
static double test_product_noise(const test_pair *p, int K, double term) {
  double sum = test_sum_noise(K, term);
  if (p->dtype == G2Z_TF32) return sum + 8 * sqrt((double)K) * term * 0x1p-11;
  return p->dtype == G2Z_FP32 ? sum : 2 * sum;
}

/* The error of a sum of size `spread` over K 8-bit products: a tensor core truncates the sum of
 * each 32 products, which is up to 6 spreads, to 13 bits. */
static double test_e4m3_noise(int K, double spread) { return 6 * spread * (K / 32 + 1) * 0x1p-13; }

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

/* Sets both devices' states alike. */
typedef struct test_dropouts {
  g2z_dropout on[2];
} test_dropouts;

static test_dropouts test_dropout_make(test_state state, float probability, int seq) {
  test_dropouts both = {{test_dropout(state.cpu, probability, seq),
                         test_dropout(state.gpu, probability, seq)}};
  return both;
}

/* Calls an op on both devices; HERE(x) is x on the device that runs. */
#define HERE(x) (on ? (x)->gpu : (x)->cpu)
#define BOTH_CALL(p, op, ...)                                 \
  for (int on = 0; on < 2; on++) {                            \
    g2z_device *device_ = HERE(p);                            \
    CHECK_OK((p)->t, device_->ops->op(device_, __VA_ARGS__)); \
  }
#define BOTH_RUN(p, op, ...) \
  for (int on = 0; on < 2; on++) TEST_RUN((p)->t, HERE(p), op, __VA_ARGS__)

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
  CHECK_OK(t, ops->synchronize(device)); /* the failure left no trace */
  free(back);
  ops->release(device, memory);
  ops->release_host(device, pinned);
  g2z_device_free(device);
  CHECK_BAD(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, G2Z_FP16, G2Z_BF16, &device),
            "same type or fp32");
}

static void test_cuda_forgotten(g2z_test *t) {
  g2z_device *device;
  CUDA_OR_SKIP(t);
  REQUIRE_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, G2Z_FP16, G2Z_FP16, &device));
  ops_expect_asserts(t, device);
  CHECK_OK(t, device->ops->synchronize(device)); /* the children have left it whole */
  g2z_device_free(device);
}

static void test_cuda_embed_one(test_pair *p, int B, int T, int C, int V, float probability) {
  size_t N = (size_t)B * (size_t)T, width = (size_t)C;
  test_twin *tokens = test_twin_tokens(p, N, V, (uint32_t)C);
  test_twin *wte = test_twin_normal(p, TEST_ACT, (size_t)V * width, 1, 0.5, 0);
  test_twin *wpe = test_twin_normal(p, TEST_ACT, (size_t)T * width, 2, 0.5, 0);
  test_twin *out = test_twin_new(p, TEST_ACT, N * width);
  test_dropouts drop = test_dropout_make(test_state_make(p, 1, 41), probability, T);
  BOTH_RUN(p, embed_fwd, .out = HERE(out), .tokens = (const int32_t *)HERE(tokens),
           .wte = HERE(wte), .wpe = HERE(wpe), .dropout = drop.on[on], .B = B, .T = T, .C = C);
  test_twin_compare(p, out, "embed_fwd", 0, 0); /* one addition, one product: bit-equal */

  test_twin *dout = test_twin_normal(p, TEST_ACT, N * width, 3, 1, 0);
  test_twin *dwte = test_twin_normal(p, TEST_F32, (size_t)V * width, 4, 1, 0);
  test_twin *dwpe = test_twin_new(p, TEST_GRAD, (size_t)T * width);
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    BOTH_RUN(p, embed_bwd, .dwte = (float *)HERE(dwte), .dwpe = HERE(dwpe), .dout = HERE(dout),
             .tokens = (const int32_t *)HERE(tokens), .mode = (g2z_write)mode,
             .dropout = drop.on[on], .B = B, .T = T, .C = C);
    test_twin_compare(p, dwte, "embed_bwd dwte", 2, test_sum_noise((int)N, 2));
    test_twin_compare(p, dwpe, "embed_bwd dwpe", 2, test_sum_noise(B, 2));
  }
  /* Three parts with gaps between them, which split rows; then only the first part. */
  enum { GAP = 16 };
  size_t words = (size_t)V * width, third = words / 3 / 8 * 8;
  g2z_row_part parts[3] = {{0, third, 0}, {third, third, third + GAP},
                           {2 * third, words - 2 * third, 2 * (third + GAP)}};
  test_twin *order = test_twin_tokens(p, 2 * N, V, 1);
  BOTH_CALL(p, embed_order, (int32_t *)HERE(order), (const int32_t *)HERE(tokens), (int)N);
  test_twin_compare(p, order, "embed_order", 0, 0); /* stable: equal tokens keep their order */
  for (int count = 3; count > 0; count -= 2) {
    test_twin *grads = test_twin_normal(p, TEST_GRAD, words + 2 * GAP, 5, 1, 0);
    BOTH_RUN(p, embed_add, .grads = HERE(grads), .parts = parts, .count = count, .rows = HERE(dout),
             .order = (const int32_t *)HERE(order), .N = (int)N, .C = C);
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
      test_cuda_embed_one(&p, 2, 4100, 264, 300, 0); /* two sorted segments are merged */
      test_cuda_embed_one(&p, 1, 8193, 8, 300, 0); /* the last segment has one token */
      test_cuda_embed_one(&p, 2, 8192, 24, 1, 0); /* whole segments of one token */
      test_cuda_embed_one(&p, 3, 9001, 8, 150000, 0); /* four segments; ids of more than 16 bits */
      test_cuda_embed_one(&p, 2, 129, 8, 150000, 0); /* the same in one segment */
    }
    test_pair_close(&p);
  }
}

static void test_cuda_layernorm_one(test_pair *p, int N, int C, float probability) {
  size_t width = (size_t)C, all = (size_t)N * width;
  test_twin *x = test_twin_normal(p, TEST_ACT, all, 1, 2, 0.5);
  test_twin *w = test_twin_normal(p, TEST_ACT, width, 2, 0.2, 1);
  test_twin *b = test_twin_normal(p, TEST_ACT, width, 3, 0.2, 0);
  test_twin *y = test_twin_new(p, TEST_ACT, all), *narrow = test_narrow_new(p, (size_t)N, width);
  test_twin *mean = test_twin_new(p, TEST_F32, (size_t)N);
  test_twin *rstd = test_twin_new(p, TEST_F32, (size_t)N);
  const int halves = p->dtype == G2Z_FP16 || p->dtype == G2Z_BF16;
  const int columns = p->dtype == G2Z_FP16 && N % 128 == 0 && C % 16 == 0;
  ((float *)b->cpu)[0] = -200, ((float *)b->cpu)[1] = 1e-3f; /* too large for e4m3; subnormal */
  ((float *)w->cpu)[1] = 0;
  test_twin_send(p, b);
  test_twin_send(p, w);
  BOTH_RUN(p, layernorm_fwd, .y = HERE(y), .narrow = halves ? HERE(narrow) : NULL,
           .mean = (float *)HERE(mean), .rstd = (float *)HERE(rstd), .x = HERE(x), .w = HERE(w),
           .b = HERE(b), .N = N, .C = C);
  if (halves) test_narrow_check(p, narrow, y, width);
  if (columns) {
    test_twin *both = test_twin_new(p, TEST_ACT, all);
    TEST_RUN(p->t, p->gpu, layernorm_fwd, .y = both->gpu, .narrow = both->gpu,
             .mean = (float *)mean->gpu, .rstd = (float *)rstd->gpu, .x = x->gpu, .w = w->gpu,
             .b = b->gpu, .N = N, .C = C);
    test_both_check(p, both, y, width, 0);
  }
  test_twin_compare(p, mean, "layernorm_fwd mean", 2, 2 * 0x1p-22);
  test_twin_compare(p, rstd, "layernorm_fwd rstd", 16, 0);
  test_twin_compare(p, y, "layernorm_fwd y", 1.01, 32 * 0x1p-23);

  test_twin *dy = test_twin_normal(p, TEST_ACT, all, 4, 1, 0);
  test_twin *dres = test_twin_normal(p, TEST_ACT, all, 5, 1, 0);
  test_twin *dropped = test_twin_new(p, TEST_ACT, all);
  test_twin *both = test_twin_new(p, TEST_ACT, all), *instead = test_twin_new(p, TEST_ACT, all);
  test_twin *dw = test_twin_new(p, TEST_GRAD, width), *db = test_twin_new(p, TEST_GRAD, width);
  test_twin *dbias = test_twin_new(p, TEST_GRAD, width);
  test_dropouts drop = test_dropout_make(test_state_make(p, 1, 3), probability, N > 2 ? N / 2 : 1);
  for (int round = 0; round < 4; round++) {
    g2z_write res_mode = round % 2 ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
    g2z_write mode = round / 2 ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
    int with_bias = round != 1;
    BOTH_RUN(p, layernorm_bwd, .dres = HERE(dres), .dropped = HERE(dropped),
             .narrow = columns ? HERE(both) : NULL, .dw = HERE(dw), .db = HERE(db),
             .dbias = with_bias ? HERE(dbias) : NULL, .dy = HERE(dy), .x = HERE(x), .w = HERE(w),
             .mean = (const float *)HERE(mean), .rstd = (const float *)HERE(rstd),
             .res_mode = res_mode, .mode = mode, .dropout = drop.on[on], .N = N, .C = C);
    test_twin *received = probability > 0 ? dropped : dres;
    if (columns) test_both_check(p, both, received, width, 1);
    if (columns && round == 0) { /* again, with the copy in place of `dropped` */
      TEST_RUN(p->t, p->gpu, layernorm_bwd, .dres = dres->gpu, .dropped = instead->gpu,
               .narrow = instead->gpu, .dw = dw->gpu, .db = db->gpu, .dbias = dbias->gpu,
               .dy = dy->gpu, .x = x->gpu, .w = w->gpu, .mean = (const float *)mean->gpu,
               .rstd = (const float *)rstd->gpu, .dropout = drop.on[1], .N = N, .C = C);
      test_both_check(p, instead, received, width, 1);
    }
    double ulps = 1.01 + round; /* dres accumulates roundings over the rounds */
    double stored = ulps * test_eps(p->dtype) * 4; /* possible error of one row's element */
    test_twin_compare(p, dres, "layernorm_bwd dres", ulps, 64 * 0x1p-23);
    if (probability > 0)
      test_twin_compare(p, dropped, "layernorm_bwd dropped", ulps + 1, 64 * 0x1p-23);
    test_twin_compare(p, dw, "layernorm_bwd dw", 2, test_sum_noise(N, 16));
    test_twin_compare(p, db, "layernorm_bwd db", 2, test_sum_noise(N, 4));
    if (with_bias) /* terms may be adjacent floats: a few round differently */
      test_twin_compare(p, dbias, "layernorm_bwd dbias", 2,
                        sqrt((double)N) * stored + test_sum_noise(N, 4));
    if (round == 0) test_column_sums(p, received, dbias, C, 1, "layernorm_bwd dbias");
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
      test_cuda_layernorm_one(&p, 256, 784, 0);
      if (p.dtype == G2Z_FP16) test_cuda_layernorm_one(&p, 19, 4104, 0.1f);
      if (p.dtype == G2Z_FP16) { /* 8-bit columns: lanes hold rows, up to 2048 channels */
        test_cuda_layernorm_one(&p, 384, 768, 0);
        test_cuda_layernorm_one(&p, 384, 1024, 0.1f);
        test_cuda_layernorm_one(&p, 128, 1600, 0);
        test_cuda_layernorm_one(&p, 128, 256, 0.1f); /* lanes hold 1, 5 and 8 packs */
        test_cuda_layernorm_one(&p, 128, 1168, 0);
        test_cuda_layernorm_one(&p, 128, 2048, 0);
        test_cuda_layernorm_one(&p, 128, 2064, 0.1f);
      }
      float one = 0; /* the op does not get as far as reading it */
      const g2z_layernorm_fwd wide = {.y = &one, .mean = &one, .rstd = &one, .x = &one, .w = &one,
                                      .b = &one, .N = 1, .C = 8200};
      CHECK_STATUS(t, p.gpu->ops->layernorm_fwd(p.gpu, &wide),
                   G2Z_UNSUPPORTED, &t->services, "fewer channels");
    }
    test_pair_close(&p);
  }
}

static void test_linear_forward(test_pair *p, int N, int I, int O) {
  size_t in = (size_t)N * (size_t)I, out = (size_t)N * (size_t)O, cells = (size_t)I * (size_t)O;
  const int fp8 = p->gpu->fp8 != G2Z_FP8_NONE;
  test_twin *x = test_twin_normal(p, TEST_ACT, in, 1, 1, 0);
  test_twin *w = test_twin_normal(p, TEST_ACT, cells, 2, 1 / sqrt((double)I), 0);
  test_twin *bias = test_twin_normal(p, TEST_ACT, (size_t)O, 3, 0.5, 0);
  test_twin *residual = test_twin_normal(p, TEST_ACT, out, 4, 1, 0);
  test_twin *stream = test_twin_normal(p, TEST_ACT, out, 4, 1, 0);
  test_twin *y = test_twin_new(p, TEST_ACT, out), *slope = test_twin_new(p, TEST_ACT, out);
  test_twin *narrow_x = test_narrow_new(p, (size_t)N, (size_t)I);
  test_twin *narrow_y = test_narrow_new(p, (size_t)N, (size_t)O);
  test_dropouts drop = test_dropout_make(test_state_make(p, 1, 9), 0.3f, N);
  double noise = test_product_noise(p, I, 1 / sqrt((double)I)), eps = test_eps(p->dtype);
  if (fp8) test_narrow_send(p, narrow_x, x, (size_t)I, 0);
  if (fp8) noise += test_e4m3_noise(I, 1);
  enum { PLAIN, GELU, RESIDUAL, IN_PLACE, DROPOUT, DROPOUT_IN_PLACE, FORMS };
  static const char *const names[] = {"linear_fwd",          "linear_fwd gelu",
                                      "linear_fwd residual", "linear_fwd residual in place",
                                      "linear_fwd dropout",  "linear_fwd dropout in place"};
  const g2z_dropout off = test_dropout(NULL, 0, 1);
  for (int form = PLAIN; form < FORMS; form++) {
    int in_place = form == IN_PLACE || form == DROPOUT_IN_PLACE, drops = form >= DROPOUT;
    test_twin *to = in_place ? stream : y;
    test_twin *add = form < RESIDUAL ? NULL : in_place ? stream : residual;
    BOTH_RUN(p, linear_fwd, .y = HERE(to), .narrow_y = fp8 && form == GELU ? HERE(narrow_y) : NULL,
             .slope = form == GELU ? HERE(slope) : NULL, .x = HERE(x),
             .narrow_x = fp8 ? HERE(narrow_x) : NULL, .w = HERE(w), .bias = HERE(bias),
             .residual = add ? HERE(add) : NULL, .dropout = drops ? drop.on[on] : off, .N = N,
             .K = I, .O = O);
    if (fp8 && form == GELU) test_narrow_check(p, narrow_y, y, (size_t)O);
    if (form == GELU && p->gpu->fp8 == G2Z_FP8_ALL) {
      test_twin *both = test_twin_new(p, TEST_ACT, out);
      TEST_RUN(p->t, p->gpu, linear_fwd, .y = both->gpu, .narrow_y = both->gpu, .slope = slope->gpu,
               .x = x->gpu, .narrow_x = narrow_x->gpu, .w = w->gpu, .bias = bias->gpu, .N = N,
               .K = I, .O = O);
      test_both_check(p, both, y, (size_t)O, 0);
    }
    /* Some forms also round a value of up to 6 before the last step. GELU: its input, if cuBLASLt
     * computes the product; GELU's slope is up to 1.13, and the slope itself changes by at most 0.8
     * times the input's change. In fp16 Hopper computes both as cuda_gelu tests: they are off by at
     * most 5 and, up to inputs of 6, 8 units of 2^-11 = eps / 2. Dropout: the product. In place:
     * the product, in cuBLASLt 13.1. */
    double extra = form == GELU || form == IN_PLACE ? 3 * eps : drops ? 5 * eps : 0;
    double steep = p->dtype == G2Z_FP16 ? 4 * eps : 2 * eps;
    test_twin_compare(p, to, names[form], 1.01, 2 * noise + extra);
    if (form == GELU) test_twin_compare(p, slope, "linear_fwd slope", 1.01, noise + steep);
    if (form == IN_PLACE) { /* both continue from the same numbers */
      memcpy(stream->cpu, residual->cpu, out * sizeof(float));
      test_twin_send(p, stream);
    }
  }
  test_pair_clear(p);
}

static void test_linear_backward(test_pair *p, int N, int I, int O) {
  size_t in = (size_t)N * (size_t)I, out = (size_t)N * (size_t)O, cells = (size_t)I * (size_t)O;
  const int fp8 = p->gpu->fp8 == G2Z_FP8_ALL;
  double term = 1 / sqrt((double)I), noise = test_product_noise(p, O, term);
  double largest = 6 * sqrt((double)O) * term, eps = test_eps(p->dtype); /* of dx */
  test_twin *x = test_twin_normal(p, TEST_ACT, in, 1, 1, 0);
  test_twin *w = test_twin_normal(p, TEST_ACT, cells, 2, term, 0);
  test_twin *dy = test_twin_normal(p, TEST_ACT, out, 5, 1, 0);
  test_twin *dx = test_twin_new(p, TEST_ACT, in);
  test_twin *into = test_twin_normal(p, TEST_ACT, in, 6, 1, 0);
  test_twin *dbias = test_twin_new(p, TEST_GRAD, (size_t)I);
  test_twin *dw = test_twin_new(p, TEST_GRAD, cells);
  /* Replaced by 8-bit rows and columns: */
  test_twin *both_dy = test_twin_new(p, TEST_ACT, out);
  test_twin *both_x = test_twin_normal(p, TEST_ACT, in, 7, 1, 1);
  test_twin *biased_dy = test_twin_normal(p, TEST_ACT, out, 8, 1, 0.5);
  test_twin *narrow_dy = test_narrow_new(p, (size_t)N, (size_t)O);
  ((float *)into->cpu)[1] = g2z__round(p->dtype, 4e-5f); /* subnormal in e5m2 */
  test_twin_send(p, into);
  if (fp8) test_narrow_send(p, narrow_dy, dy, (size_t)O, 1);
  if (fp8) noise += test_e4m3_noise(O, sqrt((double)O) * term);
  BOTH_RUN(p, linear_bwd_data, .dx = HERE(dx), .dy = HERE(dy), .w = HERE(w),
           .narrow = fp8 ? HERE(narrow_dy) : NULL, .N = N, .K = I, .O = O);
  test_twin_compare(p, dx, "linear_bwd_data", 1.01, noise);
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    BOTH_RUN(p, linear_bwd_data, .dx = HERE(dx), .dbias = HERE(dbias), .dy = HERE(dy), .w = HERE(w),
             .slope = HERE(into), .narrow = fp8 ? HERE(narrow_dy) : NULL, .mode = (g2z_write)mode,
             .N = N, .K = I, .O = O);
    if (fp8) test_both_open(p, dx, (size_t)I);
    /* e5m2 rounds a number by up to an eighth, and by 2^-17 if it is subnormal. */
    test_twin_compare(p, dx, "linear_bwd_data slope", fp8 ? 0x1p-3 / eps + 3 : 2.5,
                      6 * noise + (fp8 ? 0x1p-17 : 0));
    test_twin_compare(p, dbias, "linear_bwd_data dbias", 2,
                      (1 + mode) * 4 * sqrt((double)N) * (eps + 0x1p-22) * largest +
                          sqrt((double)N) * 2 * noise);
    if (!fp8) test_column_sums(p, dx, dbias, I, 1 + mode, "linear_bwd_data dbias");
    BOTH_RUN(p, linear_bwd_weight, .dw = HERE(dw), .x = HERE(x), .dy = HERE(dy),
             .mode = (g2z_write)mode, .N = N, .K = I, .O = O);
    test_twin_compare(p, dw, "linear_bwd_weight", 1.01 + 2 * mode,
                      (1 + mode) * test_product_noise(p, N, 2));
  }
  /* Means let sums grow with N: without fp32 sums of 256 tokens, 4,096 tokens would lose more. */
  if (fp8) test_both_send(p, both_dy, biased_dy, (size_t)O, 1);
  if (fp8) test_both_send(p, both_x, both_x, (size_t)I, 0);
  for (int mode = G2Z_OVERWRITE; fp8 && mode <= G2Z_ACCUMULATE; mode++) {
    BOTH_RUN(p, linear_bwd_weight, .dw = HERE(dw), .x = HERE(both_x), .dy = HERE(biased_dy),
             .narrow_dy = HERE(both_dy), .columns_x = mode ? (char *)HERE(both_x) + in : NULL,
             .mode = (g2z_write)mode, .N = N, .K = I, .O = O);
    test_twin_compare(p, dw, "linear_bwd_weight in 8 bits", 1.01 + 2 * mode,
                      (1 + mode) * (test_product_noise(p, N, 2) +
                                    (double)N / 32 * (256 * 0.5 + 6 * sqrt(256)) * 0x1p-13));
  }
  test_pair_clear(p);
}

/* internals */
/* A GPU without our own products takes slices of so many bytes for 8-bit results. */
static void test_slices(test_pair *p, size_t bytes) {
#ifdef __CUDACC__
  g2z__cuda_of(p->gpu)->slice_bytes = bytes;
#else
  (void)p, (void)bytes;
#endif
}

/* With 8 bits only if the GPU has products of this shape. */
static void test_cuda_linear_one(test_pair *p, int N, int I, int O) {
  if (p->gpu->fp8 && (I % p->gpu->info.fp8 || O % p->gpu->info.fp8)) return;
  test_linear_forward(p, N, I, O);
  test_linear_backward(p, N, I, O);
}

static void test_cuda_linear_types(g2z_test *t, int first, int end) {
  CUDA_OR_SKIP(t);
  for (int types = first; types < end; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      test_cuda_linear_one(&p, 1, 8, 24);
      test_cuda_linear_one(&p, 37, 40, 120);
      test_cuda_linear_one(&p, 131, 256, 768);
      test_cuda_linear_one(&p, 515, 1032, 136);
      if (p.gpu->info.fp8 && (p.dtype == G2Z_FP16 || p.dtype == G2Z_BF16)) {
        p.gpu->fp8 = p.cpu->fp8 = G2Z_FP8_FORWARD;
        test_cuda_linear_one(&p, 1, 8, 24);
        test_cuda_linear_one(&p, 515, 1032, 136);
        test_cuda_linear_one(&p, 4200, 72, 1544);
        test_cuda_linear_one(&p, 4200, 1544, 72);
        test_cuda_linear_one(&p, 1, 16, 48);
        test_cuda_linear_one(&p, 4200, 1552, 80);
      }
      if (p.gpu->info.fp8 && p.dtype == G2Z_FP16) {
        p.gpu->fp8 = p.cpu->fp8 = G2Z_FP8_ALL;
        test_cuda_linear_one(&p, 128, 128, 64);
        test_cuda_linear_one(&p, 384, 1088, 128);
        test_cuda_linear_one(&p, 4096, 64, 320);
      }
      test_slices(&p, 1 << 16); /* slices of 128 rows, one shorter or all equal */
      if (p.gpu->info.fp8 && (p.dtype == G2Z_FP16 || p.dtype == G2Z_BF16)) {
        p.gpu->fp8 = p.cpu->fp8 = G2Z_FP8_FORWARD;
        test_cuda_linear_one(&p, 515, 1040, 144);
        if (p.dtype == G2Z_FP16) p.gpu->fp8 = p.cpu->fp8 = G2Z_FP8_ALL;
        test_cuda_linear_one(&p, 384, 1088, 192);
      }
    }
    test_pair_close(&p);
  }
}
static void test_cuda_linear(g2z_test *t) { test_cuda_linear_types(t, TEST_HALVES, TEST_TYPES); }
static void test_cuda_linear_wide(g2z_test *t) { test_cuda_linear_types(t, 0, TEST_HALVES); }

/* internals */
/* Our own products, chosen by timing or forced: smaller than a tile, more tiles than a GPU has
 * multiprocessors both forward and backward, and no dimension a multiple of a tile. */
static void test_cuda_products(g2z_test *t) {
  CUDA_OR_SKIP(t);
#ifdef __CUDACC__
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      const g2z__cuda *cuda = g2z__cuda_of(p.gpu);
      int ours = 0, here = cuda->hopper && (p.dtype == G2Z_FP16 || p.dtype == G2Z_BF16);
      p.gpu->tune = G2Z_TUNE_OWN;
      test_cuda_linear_one(&p, 1, 8, 24);
      test_cuda_linear_one(&p, 37, 40, 120);
      test_cuda_linear_one(&p, 515, 1032, 136);
      if (here) {
        test_cuda_linear_one(&p, 4200, 72, 1544);
        test_cuda_linear_one(&p, 4200, 1544, 72);
      }
      for (int i = 0; i < cuda->product_count; i++)
        ours += cuda->products[i].way == G2Z__WAY_HOPPER;
      /* per shape: plain, with an addend, GELU, data gradient, data gradient through GELU */
      CHECK(t, ours == (here ? 5 * 4 : 0));
    }
    test_pair_close(&p);
  }
#endif
}

/* GELU and its slope of every number in fp16, through products by 1. Hopper computes them in fp16.
 * Units of 2^-11: tanh truncates one; 1 - tanh^2 is off by one after its correction. So the slope
 * is off by |x| u' / 2, below 5.1 up to |x| = 4 and then 1.26 |x|, and by one for its roundings.
 * GELU is off by |x| / 2 for each unit of tanh, and by its roundings and its input's. */
static void test_cuda_gelu(g2z_test *t) {
  CUDA_OR_SKIP(t);
  enum { WIDTH = 8, HALF = 0x7c00, NUMBERS = 2 * HALF, N = NUMBERS / WIDTH };
  test_pair p;
  if (test_pair_open(&p, t, TEST_HALVES)) {
    test_twin *x = test_twin_new(&p, TEST_ACT, NUMBERS), *y = test_twin_new(&p, TEST_ACT, NUMBERS);
    test_twin *slope = test_twin_new(&p, TEST_ACT, NUMBERS);
    test_twin *w = test_twin_new(&p, TEST_ACT, WIDTH * WIDTH);
    test_twin *bias = test_twin_normal(&p, TEST_ACT, WIDTH, 1, 0, 0);
    for (int i = 0; i < NUMBERS; i++) {
      const uint16_t bits = (uint16_t)(i < HALF ? i : 0x8000 + i - HALF);
      ((float *)x->cpu)[i] = test_decode(G2Z_FP16, &bits);
    }
    for (int i = 0; i < WIDTH * WIDTH; i++) ((float *)w->cpu)[i] = i % (WIDTH + 1) == 0;
    test_twin_send(&p, x);
    test_twin_send(&p, w);
    p.gpu->tune = G2Z_TUNE_OWN;
    TEST_RUN(t, p.gpu, linear_fwd, .y = y->gpu, .slope = slope->gpu, .x = x->gpu, .w = w->gpu,
             .bias = bias->gpu, .N = N, .K = WIDTH, .O = WIDTH);
    float *got = test_twin_fetch(&p, y), *steep = test_twin_fetch(&p, slope);
    for (int i = 0; i < NUMBERS; i++) {
      const double at = (double)((float *)x->cpu)[i], size = fabs(at), want = ops_gelu(at);
      const double bound = (fmax(5, size / 2) + fabs(want)) * 0x1p-11;
      const double steepness = ops_gelu_slope(at);
      const double slope_bound = (fmax(5.1, 1.26 * size) + 1) * 0x1p-11;
      FAIL_IF(t, !(fabs((double)got[i] - want) <= bound), "GELU of %g is %g, not %g", at,
              (double)got[i], want);
      FAIL_IF(t, !(fabs((double)steep[i] - steepness) <= slope_bound),
              "GELU's slope at %g is %g, not %g", at, (double)steep[i], steepness);
    }
    free(got);
    free(steep);
  }
  test_pair_close(&p);
}

/* internals */
/* A tuning table is written to a file and read back; a table that does not fit is refused. */
static void test_cuda_tuning(g2z_test *t) {
  CUDA_OR_SKIP(t);
  test_pair p;
  if (!test_pair_open(&p, t, 2)) return;
  test_cuda_linear_one(&p, 131, 256, 768);
  char *text, *again;
  CHECK_OK(t, p.gpu->ops->tuning(p.gpu, &text));
  size_t bytes = strlen(text);
  int lines = 0, timed = 0;
  for (const char *at = text; *at; at++) lines += *at == '\n';
#ifdef __CUDACC__
  const g2z__cuda *cuda = g2z__cuda_of(p.gpu);
  for (int i = 0; i < cuda->product_count; i++) timed += cuda->products[i].us > 0;
  CHECK(t, timed >= (cuda->hopper ? 5 : 3)); /* forward, two gradients; Hopper: GELU's, too */
#endif
  CHECK(t, lines == 1 + timed); /* one header line */
  test_pair_close(&p);

  if (!test_pair_open(&p, t, 2)) return;
  CHECK_OK(t, g2z__tuning_read(p.gpu, text));
  test_cuda_linear_one(&p, 131, 256, 768); /* with the choices from the file */
  CHECK_OK(t, p.gpu->ops->tuning(p.gpu, &again));
  CHECK(t, strcmp(text, again) == 0);
  test_pair_close(&p);

  if (!test_pair_open(&p, t, 2)) return;
  again[20] ^= 1;
  CHECK_FORMAT(t, g2z__tuning_read(p.gpu, again), "another GPU");
  again[20] ^= 1;
  again[bytes - 1] = 0;
  CHECK_FORMAT(t, g2z__tuning_read(p.gpu, again), "no product");
  again[bytes - 1] = '\n';
  char *way = strstr(again, " cublaslt ") ? strstr(again, " cublaslt ") : strstr(again, " hopper");
  CHECK(t, way != NULL);
  if (way) way[2] ^= 1;
  CHECK_FORMAT(t, g2z__tuning_read(p.gpu, again), "no product");
  p.gpu->tune = G2Z_TUNE_OFF;
  test_cuda_linear_one(&p, 131, 256, 768); /* the heuristic's choices */
  g2z_release(&t->services, text);
  g2z_release(&t->services, again);
  test_pair_close(&p);
}

/* Some versions of cuBLASLt have no product in 8 bits for a shape on a GPU. No GPU is needed. */
static void test_products_refused(g2z_test *t) {
#ifdef __CUDACC__
  const struct {
    int type;
    cublasStatus_t status;
    int remedy;
  } refused[] = {
      {CUDA_R_16F, CUBLAS_STATUS_NOT_SUPPORTED, 0},
      {CUDA_R_8F_E4M3, CUBLAS_STATUS_NOT_SUPPORTED, 1},
      {CUDA_R_8F_E5M2, CUBLAS_STATUS_NOT_SUPPORTED, 1},
      {G2Z__E4M3_TWICE, CUBLAS_STATUS_NOT_SUPPORTED, 1},
      {G2Z__E4M3_TWICE, CUBLAS_STATUS_EXECUTION_FAILED, 0}};
  g2z_device device = {};
  device.services = &t->services;
  device.dtype = G2Z_FP16;
  for (size_t i = 0; i < G2Z_COUNT(refused); i++) {
    g2z__lt_key key = {};
    key.n = 131;
    key.m = 256;
    key.k = 768;
    key.type = refused[i].type;
    CHECK_STATUS(t, g2z__lt_fail(&device, refused[i].status, "the choice of an algorithm", &key),
                 G2Z_DEVICE, &t->services, "[131,256] = [131,768] [768,256] (epilogue 0, dtype fp");
    CHECK(t, !!strstr(t->services.error, "take fp8=none, or another") == refused[i].remedy);
  }
#else
  SKIP(t, "not compiled by nvcc");
#endif
}

/* A GPU without our own products takes 8-bit results in slices: whole blocks of 128 rows, for which
 * the plan counted memory. No GPU is needed. */
static void test_products_slices(g2z_test *t) {
#ifdef __CUDACC__
  static const int N[] = {1, 127, 128, 129, 1000, 4096, 8192, 24576, 32768, 65536, 98304};
  static const size_t row_bytes[] = {256, 3072, 6144, 12800, 65536, 100608, 262400};
  g2z__cuda cuda = {};
  g2z_device device = {};
  cuda.slice_bytes = G2Z__SLICE_BYTES;
  device.backend = &cuda;
  for (size_t n = 0; n < G2Z_COUNT(N); n++)
    for (size_t i = 0; i < G2Z_COUNT(row_bytes); i++) {
      const int rows = g2z__slice_rows(&device, N[n], row_bytes[i]);
      const size_t bytes = g2z__slice_bytes(&device, N[n], row_bytes[i]);
      const size_t planned = G2Z__MAX(G2Z__SLICE_BYTES, 128 * row_bytes[i]);
      CHECK(t, rows > 0 && rows <= N[n] && (rows == N[n] || rows % 128 == 0));
      CHECK(t, (size_t)rows * row_bytes[i] <= bytes && bytes <= planned);
    }
#else
  SKIP(t, "not compiled by nvcc");
#endif
}

/* A smaller block of scratch is freed, unless a graph may use it. */
static void test_cuda_scratch(g2z_test *t) {
  CUDA_OR_SKIP(t);
#ifdef __CUDACC__
  g2z_device *gpu = NULL;
  g2z_graph *graph = NULL;
  void *memory;
  REQUIRE_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CUDA, G2Z_FP16, G2Z_FP16, &gpu));
  const g2z__cuda *cuda = g2z__cuda_of(gpu);
  for (size_t bytes = 1 << 20; bytes <= 4 << 20; bytes *= 2) {
    CHECK_OK(t, g2z__scratch(gpu, bytes, &memory));
    CHECK(t, cuda->scratch_count == 1 && cuda->scratch_bytes[0] >= bytes);
  }
  CHECK_OK(t, gpu->ops->graph_begin(gpu));
  CHECK_OK(t, gpu->ops->zero(gpu, memory, 4));
  CHECK_OK(t, gpu->ops->graph_end(gpu, &graph));
  for (size_t bytes = 16 << 20; bytes <= 64 << 20; bytes *= 2) {
    CHECK_OK(t, g2z__scratch(gpu, bytes, &memory));
    CHECK(t, cuda->scratch_count == 2 && cuda->scratch_bytes[1] >= bytes);
  }
  CHECK_OK(t, gpu->ops->graph_run(gpu, graph));
  CHECK_OK(t, gpu->ops->synchronize(gpu));
  gpu->ops->graph_free(gpu, graph);
  g2z_device_free(gpu);
#endif
}

#ifdef __CUDACC__
static __global__ void test_k_trap(void) { __trap(); }
#endif
/* Rank program: times a way that is refused, then one whose kernel fails. A program of its own,
 * because the GPU is lost to it afterwards. */
static int rank_trap(int argc, char **argv) {
  (void)argc, (void)argv;
#ifdef __CUDACC__
  g2z_services services = {};
  g2z_device *gpu = NULL;
  g2z__lt_product best = {};
  const g2z__lt_operands on = {};
  best.key.n = 131;
  best.key.m = 256;
  best.key.k = 768;
  if (g2z_device_create(&services, G2Z_DEVICE_CUDA, G2Z_FP16, G2Z_FP16, &gpu) != G2Z_OK) return 2;
  auto refused = [] { return CUBLAS_STATUS_NOT_SUPPORTED; };
  auto traps = [&] { return test_k_trap<<<1, 1, 0, g2z__cuda_of(gpu)->stream>>>(), G2Z_OK; };
  if (g2z__lt_try(gpu, &best, &on, G2Z__WAY_CUBLASLT, NULL, refused) != G2Z_OK) return 3;
  if (g2z__lt_try(gpu, &best, &on, G2Z__WAY_HOPPER, NULL, traps) != G2Z_DEVICE) return 4;
  printf("%s\n", services.error);
  return best.us > 0 ? 5 : 0;
#endif
  return 1;
}
static void test_cuda_trap(g2z_test *t) {
  CUDA_OR_SKIP(t);
  test_ranks_job(t, 1, 0, "timing the product [131,256] = [131,768] [768,256] (epilogue 0, dtype "
                 "fp16) by hopper: ", "trap");
}

/* got differs from want by `least` to `bound` of want's norm, over all rows and over the rows that
 * are no target; targets NULL: over all rows only. */
static void test_head_norm(test_pair *p, const test_twin *gradient, const test_twin *targets, int C,
                           double least, double bound) {
  float *got = test_twin_fetch(p, gradient);
  const float *want = (const float *)gradient->cpu;
  for (int all = targets ? 0 : 1; all < 2; all++) {
    double off = 0, size = 0;
    for (size_t row = 0; row < gradient->n / (size_t)C; row++) {
      int is_target = 0;
      for (size_t i = 0; targets && i < targets->n; i++)
        is_target |= ((const int32_t *)targets->cpu)[i] == (int32_t)row;
      for (size_t i = row * (size_t)C; i < (row + 1) * (size_t)C && (all || !is_target); i++) {
        off += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
        size += (double)want[i] * (double)want[i];
      }
    }
    FAIL_IF(p->t, !(sqrt(off) >= least * sqrt(size) && sqrt(off) <= bound * sqrt(size)),
            "head_loss %s of %s (%s): off by %.3g of %.3g, bounds %.3g and %.3g",
            targets ? "dwte" : "dh", all ? "all rows" : "words that are no target",
            g2z_dtype_text(p->dtype), sqrt(off), sqrt(size), least, bound);
  }
  free(got);
}

/* 8-bit exponentials of a chunk, with -(z - e) at the targets: the columns after the rows have the
 * same numbers, and rows with a target add up to nearly 0. */
static void test_head_drift(test_pair *p, const test_twin *logits, int Vp, int n, double bound) {
  const size_t all = (size_t)n * (size_t)Vp;
  uint8_t *bytes = (uint8_t *)malloc(2 * all);
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, logits->gpu, 2 * all));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  double drift = 0;
  int apart = 0, count = 0;
  for (int row = 0; row < n; row++) {
    const int place = row / 128 * 128 + row % 64 / 16 * 32 + row % 8 * 4 + row % 128 / 64 * 2 +
                      row % 16 / 8;
    double sum = 0, target = 0;
    for (int word = 0; word < Vp; word++) {
      const uint8_t e = bytes[(size_t)row * (size_t)Vp + (size_t)word];
      const double magnitude = e % 128 < 4 ? ldexp(e % 4, -16) /* e5m2 */
                                           : ldexp(4 + e % 4, e / 4 % 32 - 17);
      apart += bytes[all + (size_t)word * (size_t)n + (size_t)place] != e;
      if (e >= 128) target -= magnitude;
      else sum += magnitude;
    }
    if (target < 0) drift += sum / target + 1, count++;
  }
  FAIL_IF(p->t, apart || count < n - 1 || !(fabs(drift / count) < bound),
          "8-bit exponentials: %d numbers of rows and columns differ; %d of %d rows have a target, "
          "and add up to %.3g of it", apart, count, n, drift / count);
  free(bytes);
}

/* The target's exact term shrinks by 0.0028, as the rounded terms do, and by 0.0007 because its row
 * of wte is in e4m3. The other terms cancel out over the rows. */
static void test_head_shrinks(test_pair *p, const test_twin *dh, const test_twin *wte,
                              const test_twin *targets, int C) {
  float *got = test_twin_fetch(p, dh);
  double off = 0, size = 0;
  for (size_t i = 0; i < targets->n; i++) {
    const int target = ((const int32_t *)targets->cpu)[i];
    const float *w = (const float *)wte->cpu + (size_t)(target < 0 ? 0 : target) * (size_t)C;
    for (size_t c = 0; target >= 0 && c < (size_t)C; c++) {
      const double want = (double)((const float *)dh->cpu)[i * (size_t)C + c];
      off += ((double)got[i * (size_t)C + c] - want) * (double)w[c];
      size += want * (double)w[c];
    }
  }
  FAIL_IF(p->t, !(off / size > -0.0050 && off / size < -0.0018),
          "head_loss dh along the targets' words is %.4f too large", off / size);
  free(got);
}

/* *sum is 0.5 plus the sum of the GPU's own losses[N]: an omitted token shows. */
static void test_head_sum(test_pair *p, const test_twin *sum, const test_twin *losses) {
  float *values = test_twin_fetch(p, losses);
  double got = 0, want = 0.5;
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, &got, sum->gpu, sizeof got));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (size_t i = 0; i < losses->n; i++) want += (double)values[i];
  CHECK_NEAR(p->t, got, want, 1e-13 * (double)losses->n * fabs(want));
  free(values);
}

/* Logits are of size `spread`. `exact` is an fp32 CPU and gives the expected loss and gradients if
 * training does not round logits. NULL: training rounds them, and p->cpu does the same. */
static void test_cuda_head_one(test_pair *p, g2z_device *exact, int N, int C, int V, int chunk,
                               double spread, float scale) {
  test_pair training = *p;
  if (exact) training.cpu = exact;
  int Vp = (V + 127) / 128 * 128;
  size_t width = (size_t)C, all = (size_t)N * width, words = (size_t)Vp * width;
  float dloss = 1.0f / (float)N;
  test_twin *h = test_twin_normal(p, TEST_ACT, all, 1, 1, 0);
  test_twin *wte = test_twin_normal(p, TEST_ACT, words, 2, spread / sqrt((double)C), 0);
  memset((float *)wte->cpu + (size_t)V * width, 0, (size_t)(Vp - V) * width * sizeof(float));
  test_twin_send(p, wte);
  test_twin *targets = test_twin_tokens(p, (size_t)N, V, 3);
  ((int32_t *)targets->cpu)[N - 1] = V - 1;
  if (N > 2) ((int32_t *)targets->cpu)[N / 2] = -1; /* neither loss nor gradient */
  test_twin_send(p, targets);
  test_twin *logits = test_twin_new(p, TEST_ACT, (size_t)chunk * (size_t)Vp);
  test_twin *losses = test_twin_new(p, TEST_F32, (size_t)N), *sum = test_twin_new(p, TEST_F64, 1);
  test_twin *dh = test_twin_new(p, TEST_ACT, all), *dwte = test_twin_new(p, TEST_F32, words);
  test_state state = test_state_make(p, scale, 1);
  double eps = test_eps(p->dtype);
  /* A logit of up to 6 spreads that rounds differently changes a loss by eps * 6 spreads, and a
   * probability by the same relative amount. */
  double noise = test_product_noise(p, C, spread / sqrt((double)C));
  double rounded = 3 * spread * eps + noise, logit = exact ? noise : rounded;
  if (p->gpu->fp8) logit += test_e4m3_noise(C, spread);
  if (p->gpu->fp8) noise += test_e4m3_noise(C, spread);
  /* The largest relative error of an exponential in e5m2, and of its factor in e4m3. A word's
   * gradient adds the errors of its tokens; dh's largest term, the target's, is exact. */
  const int narrow = p->gpu->fp8 == G2Z_FP8_ALL;
  const double eighth = narrow ? 0x1p-3 + 0x1p-4 : 0;
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    *(double *)sum->cpu = 0.5;
    test_twin_send(p, sum);
    BOTH_RUN(&training, head_loss, .losses = (float *)HERE(losses), .loss_sum = (double *)HERE(sum),
             .dh = HERE(dh), .dwte = HERE(dwte), .dwte_dtype = G2Z_FP32, .logits = HERE(logits),
             .h = HERE(h), .wte = HERE(wte), .targets = (const int32_t *)HERE(targets),
             .dloss = dloss, .state = HERE(&state), .mode = (g2z_write)mode, .N = N, .C = C, .V = V,
             .Vp = Vp, .chunk = chunk);
    double g = (double)dloss * (double)scale;
    double word = spread / sqrt((double)C) > 1 ? spread / sqrt((double)C) : 1; /* wte's size */
    test_twin_compare(p, losses, "head_loss losses", 8, 2 * logit + 1e-6);
    test_head_sum(p, sum, losses);
    test_twin_compare(p, dh, "head_loss dh", 2,
                      g * word * (2 * logit + 4 * eps + 1e-6 + 4 * eighth));
    test_twin_compare(p, dwte, "head_loss dwte", 8,
                      (1 + mode) * g * (sqrt((double)N) * 4 * (2 * logit + 4 * eps + 1e-6) +
                                        16 * eighth));
    /* Rounding a logit of size `spread` changes its probability by 0.29 eps spread, relative. */
    double relative = 2 * (spread + 2) * eps + 4 * noise + 1e-5;
    /* e5m2 errs by 0.07 on average. If no logit is far above the others, the exact term makes most
     * of dh: one that was rounded would err by 0.05. */
    test_head_norm(p, dwte, targets, C, narrow ? 0.03 : 0, relative + narrow * 0.09);
    test_head_norm(p, dh, NULL, C, narrow ? 0.003 : 0,
                   relative + narrow * (spread < 3 ? 0.03 : 0.09));
    if (narrow) test_head_drift(p, logits, Vp, (N - 1) % chunk + 1, spread < 3 ? 0.01 : 0.03);
    if (narrow && spread < 3) test_head_shrinks(p, dh, wte, targets, C);
  }
  if (N <= chunk) { /* rounded without a sum in fp32 */
    test_twin *narrow = test_twin_new(p, TEST_GRAD, words);
    g2z_dtype grad = p->cpu->grad_dtype;
    BOTH_RUN(&training, head_loss, .losses = (float *)HERE(losses), .loss_sum = (double *)HERE(sum),
             .dh = HERE(dh), .dwte = HERE(narrow), .dwte_dtype = grad, .logits = HERE(logits),
             .h = HERE(h), .wte = HERE(wte), .targets = (const int32_t *)HERE(targets),
             .dloss = dloss, .state = HERE(&state), .N = N, .C = C, .V = V, .Vp = Vp,
             .chunk = chunk);
    test_twin_compare(p, narrow, "head_loss dwte, rounded", 8,
                      (double)dloss * (double)scale *
                          (sqrt((double)N) * 4 * (2 * logit + 4 * eps + 1e-6) + 16 * eighth));
  }
  *(double *)sum->cpu = 0.5;
  test_twin_send(p, sum);
  BOTH_RUN(p, head_loss, .losses = (float *)HERE(losses), .loss_sum = (double *)HERE(sum),
           .dwte_dtype = G2Z_FP32, .logits = HERE(logits), .h = HERE(h), .wte = HERE(wte),
           .targets = (const int32_t *)HERE(targets), .dloss = 0, .N = N, .C = C, .V = V, .Vp = Vp,
           .chunk = chunk);
  test_twin_compare(p, losses, "head_loss losses, no gradient", 8, 2 * rounded + 1e-6);
  test_head_sum(p, sum, losses);
  int n = N < 5 ? N : 5;
  test_twin *rows = test_twin_new(p, TEST_F32, (size_t)n * (size_t)V);
  BOTH_CALL(p, head_logits, (float *)HERE(rows), HERE(h), HERE(wte), n, C, V);
  BOTH_CALL(p, head_logits, (float *)HERE(rows), HERE(h), HERE(wte), 0, C, V);
  test_twin_compare(p, rows, "head_logits", 4, noise);
  test_pair_clear(p);
}

/* Rows of h with NaNs make their losses, their dh and all of dwte NaN, so that the step is skipped;
 * the other rows are unaffected. They lie in the first and the last of 18 tiles of 128 rows; there
 * are 8 tiles across. If exponentials are recomputed, blocks of a GPU with 132 multiprocessors
 * skip tiles before and after these. */
static void test_cuda_head_poison(test_pair *p) {
  enum { N = 2304, C = 144, V = 1500, VP = 1536 };
  static const struct {
    int row;
    float poison;
  } bad[] = {{77, NAN}, {2190, INFINITY}};
  const double eighth = p->gpu->fp8 == G2Z_FP8_ALL ? 0x1p-3 + 0x1p-4 : 0;
  float scale = p->dtype == G2Z_FP16 ? 1024.0f : 1.0f, dloss = 1.0f / N;
  test_twin *h = test_twin_normal(p, TEST_ACT, N * C, 1, 1, 0);
  test_twin *wte = test_twin_normal(p, TEST_ACT, VP * C, 2, 0.17, 0); /* logits of size 2 */
  memset((float *)wte->cpu + V * C, 0, (VP - V) * C * sizeof(float));
  test_twin_send(p, wte);
  test_twin *targets = test_twin_tokens(p, N, V, 3), *logits = test_twin_new(p, TEST_ACT, N * VP);
  test_twin *losses = test_twin_new(p, TEST_F32, N), *sum = test_twin_new(p, TEST_F64, 1);
  test_twin *dh = test_twin_new(p, TEST_ACT, N * C), *dwte = test_twin_new(p, TEST_F32, VP * C);
  test_state state = test_state_make(p, scale, 1);
  TEST_RUN(p->t, p->cpu, head_loss, .losses = (float *)losses->cpu, .loss_sum = (double *)sum->cpu,
           .dh = dh->cpu, .dwte = dwte->cpu, .dwte_dtype = G2Z_FP32, .logits = logits->cpu,
           .h = h->cpu, .wte = wte->cpu, .targets = (const int32_t *)targets->cpu, .dloss = dloss,
           .state = state.cpu, .N = N, .C = C, .V = V, .Vp = VP, .chunk = N);
  for (int b = 0; b < 2; b++) {
    ((float *)losses->cpu)[bad[b].row] = NAN;
    for (int i = 0; i < C; i++) ((float *)dh->cpu)[bad[b].row * C + i] = NAN;
    ((float *)h->cpu)[bad[b].row * C + 5] = bad[b].poison;
  }
  test_twin_send(p, h);
  TEST_RUN(p->t, p->gpu, head_loss, .losses = (float *)losses->gpu, .loss_sum = (double *)sum->gpu,
           .dh = dh->gpu, .dwte = dwte->gpu, .dwte_dtype = G2Z_FP32, .logits = logits->gpu,
           .h = h->gpu, .wte = wte->gpu, .targets = (const int32_t *)targets->gpu, .dloss = dloss,
           .state = state.gpu, .N = N, .C = C, .V = V, .Vp = VP, .chunk = N);
  double logit = 6 * test_eps(p->dtype) + test_product_noise(p, C, 0.17);
  if (p->gpu->fp8) logit += test_e4m3_noise(C, 2);
  double g = (double)dloss * (double)scale;
  test_twin_compare(p, losses, "head_loss losses, rows are no numbers", 8, 2 * logit + 1e-6);
  test_twin_compare(p, dh, "head_loss dh, rows are no numbers", 2,
                    g * (2 * logit + 4 * test_eps(p->dtype) + 1e-6 + eighth));
  float *found = (float *)malloc(dwte->bytes);
  int numbers = 0;
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, found, dwte->gpu, dwte->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  for (int i = 0; i < V * C; i++) numbers += !isnan(found[i]);
  CHECK(p->t, numbers == 0);
  free(found);
  test_pair_clear(p);
}

/* Logits as in a trained model. The row of token i's target is along h[i], and has logit 16. A
 * rival word along h[i] has 15.5, so that the target's probability is 0.62. All terms of these two
 * sums are positive. A tensor core truncates 8-bit sums, and so takes about as much from both: 0.15
 * on an H200. Loss and gradient hardly change if both are truncated. If the target's logit alone
 * were exact, the mean loss would be too low by what truncation takes, and a row of the gradient
 * would not add up to 0. */
static void test_cuda_head_along(test_pair *p, g2z_device *exact) {
  enum { N = 256, C = 768, V = 3 * N, VP = V };
  test_pair training = *p;
  if (exact) training.cpu = exact;
  test_twin *h = test_twin_normal(p, TEST_ACT, N * C, 1, 1, 0);
  test_twin *wte = test_twin_normal(p, TEST_ACT, VP * C, 2, 0.07, 0); /* logits of size 2 */
  test_twin *targets = test_twin_new(p, TEST_I32, N);
  for (int i = 0; i < N; i++) {
    const float *along = (const float *)h->cpu + i * C;
    const int target = 3 * i + i % 3, rival = 3 * i + (i + 1) % 3; /* in all columns of tiles */
    double square = 0;
    for (int c = 0; c < C; c++) square += (double)along[c] * (double)along[c];
    for (int c = 0; c < C; c++) {
      const double one = (double)along[c] / square;
      ((float *)wte->cpu)[target * C + c] = g2z__round(p->dtype, (float)(16 * one));
      ((float *)wte->cpu)[rival * C + c] = g2z__round(p->dtype, (float)(15.5 * one));
    }
    ((int32_t *)targets->cpu)[i] = target;
  }
  test_twin_send(p, wte);
  test_twin_send(p, targets);
  test_twin *logits = test_twin_new(p, TEST_ACT, N * VP), *losses = test_twin_new(p, TEST_F32, N);
  test_twin *sum = test_twin_new(p, TEST_F64, 1), *dh = test_twin_new(p, TEST_ACT, N * C);
  test_twin *dwte = test_twin_new(p, TEST_F32, VP * C);
  test_state state = test_state_make(p, p->dtype == G2Z_FP16 ? 1024.0f : 1.0f, 1);
  BOTH_RUN(&training, head_loss, .losses = (float *)HERE(losses), .loss_sum = (double *)HERE(sum),
           .dh = HERE(dh), .dwte = HERE(dwte), .dwte_dtype = G2Z_FP32, .logits = HERE(logits),
           .h = HERE(h), .wte = HERE(wte), .targets = (const int32_t *)HERE(targets),
           .dloss = 1.0f / N, .state = HERE(&state), .N = N, .C = C, .V = V, .Vp = VP, .chunk = N);
  /* Truncation takes slightly different parts of a token's two logits. In models of a tensor core
   * this changes the mean loss by 0.0016 at most. */
  float *got = test_twin_fetch(p, losses);
  double off = 0;
  for (int i = 0; i < N; i++) off += (double)got[i] - (double)((const float *)losses->cpu)[i];
  FAIL_IF(p->t, !(fabs(off / N) < 0.002),
          "head_loss (%s, fp8 %d): targets of logit 16 have a mean loss that is %.5f too large",
          g2z_dtype_text(p->dtype), (int)p->gpu->fp8, off / N);
  free(got);
  if (p->gpu->fp8 == G2Z_FP8_ALL) { /* e5m2 rounds the rival by up to 1/8, at random */
    test_head_drift(p, logits, VP, N, 0.03);
    test_pair_clear(p);
    return;
  }
  /* The logits became a multiple of their gradient. Rounding changes each of its two large numbers
   * by half of eps at most. */
  got = test_twin_fetch(p, logits);
  double drift = 0;
  for (int i = 0; i < N; i++) {
    double row = 0;
    for (int word = 0; word < VP; word++) row += (double)got[i * VP + word];
    drift -= row / (double)got[i * VP + ((const int32_t *)targets->cpu)[i]] / N;
  }
  FAIL_IF(p->t, !(fabs(drift) < test_eps(p->dtype) + 1e-4),
          "head_loss (%s, fp8 %d): rows of the gradient add up to %.3g of the target's part",
          g2z_dtype_text(p->dtype), (int)p->gpu->fp8, drift);
  free(got);
  test_pair_clear(p);
}

/* internals */
/* Returns 1 if head_loss trains with exponentials: in 16 bits on Hopper, if products are tuned or
 * fp8 is on. */
static int test_head_exponentials(const test_pair *p) {
  int fits = 0;
#ifdef __CUDACC__
  const g2z__cuda *cuda = g2z__cuda_of(p->gpu);
  int halves = p->dtype == G2Z_FP16 || p->dtype == G2Z_BF16;
  if (halves)
    fits = p->dtype == G2Z_FP16 ? g2z__head_fits<__half>(p->gpu, 300, 136, 1024)
                                : g2z__head_fits<__nv_bfloat16>(p->gpu, 300, 136, 1024);
  CHECK(p->t, fits == (cuda->hopper && halves && (p->gpu->tune != G2Z_TUNE_OFF || p->gpu->fp8)));
#else
  (void)p;
#endif
  return fits;
}

static void test_cuda_head_types(g2z_test *t, int first, int end) {
  static const struct {
    int N, C, V, chunk;
    double spread;
    float scale; /* loss scale in fp16 */
  } cases[] = {
      {1, 8, 2, 16, 2, 1024},
      {67, 40, 101, 32, 2, 1024},
      {300, 136, 1003, 300, 2, 1024},
      {300, 136, 1003, 300, 2, 1048576},  /* only for fp16 */
      {300, 136, 2003, 160, 16, 1024},    /* logits above the first 512, */
      {300, 136, 2003, 160, 128, 1024},   /* some by a factor above e^88; */
      {300, 136, 2003, 160, 8192, 1024},  /* rounding alone moves them by 8 in fp16, */
      {300, 136, 2003, 160, 65536, 1024}, /* by more than 88 in bf16 */
      {9, 16, 50257, 4, 2, 1024},         /* GPT-2's vocabulary, several chunks */
      {384, 144, 1003, 256, 2, 1024},     /* gradients in 8 bits */
      {256, 144, 2003, 256, 16, 1024},
      {256, 576, 2003, 256, 128, 1024},   /* where some sums overflow */
      {3, 16, 130001, 8, 2, 1024},        /* a row too long for shared memory */
      {67, 48, 101, 32, 2, 1024},
      {300, 144, 2003, 160, 128, 1024},
  };
  static const struct {
    g2z_tune tune;
    g2z_fp8 fp8;
  } ways[] = {{G2Z_TUNE_OFF, G2Z_FP8_NONE},    /* logits in memory */
              {G2Z_TUNE_OWN, G2Z_FP8_NONE},    /* exponentials */
              {G2Z_TUNE_OFF, G2Z_FP8_LOGITS},  /* exponentials of e4m3 products */
              {G2Z_TUNE_OFF, G2Z_FP8_ALL}};    /* and in e5m2, in fp16 */
  CUDA_OR_SKIP(t);
  g2z_device *fp32;
  CHECK_OK(t, g2z_device_create(&t->services, G2Z_DEVICE_CPU, G2Z_FP32, G2Z_FP32, &fp32));
  for (int types = first; types < end && fp32; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      int fp16 = p.dtype == G2Z_FP16, halves = fp16 || p.dtype == G2Z_BF16;
      test_slices(&p, 1 << 18); /* slices of 128 rows */
      for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        if (ways[way].fp8 && !(p.gpu->info.fp8 && halves)) continue;
        if (ways[way].fp8 == G2Z_FP8_ALL && !fp16) continue;
        const int multiple = ways[way].fp8 ? p.gpu->info.fp8 : 1; /* of channels */
        p.gpu->tune = ways[way].tune;
        p.gpu->fp8 = ways[way].fp8;
        p.cpu->fp8 = ways[way].fp8 ? G2Z_FP8_LOGITS : G2Z_FP8_NONE; /* gradients stay exact */
        fp32->fp8 = p.cpu->fp8;
        int exponentials = test_head_exponentials(&p);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
          if (cases[i].C % multiple == 0 && /* fp16 holds 6 spreads */
              (ways[way].fp8 < G2Z_FP8_ALL || cases[i].N % 128 == 0) &&
              (fp16 ? cases[i].spread < 10000 : cases[i].scale == 1024))
            test_cuda_head_one(&p, exponentials ? fp32 : NULL, cases[i].N, cases[i].C, cases[i].V,
                               cases[i].chunk, cases[i].spread, fp16 ? cases[i].scale : 1);
        test_cuda_head_poison(&p);
        test_cuda_head_along(&p, exponentials ? fp32 : NULL);
      }
    }
    test_pair_close(&p);
  }
  g2z_device_free(fp32);
}
static void test_cuda_head(g2z_test *t) { test_cuda_head_types(t, TEST_HALVES, TEST_TYPES); }
static void test_cuda_head_wide(g2z_test *t) { test_cuda_head_types(t, 0, TEST_HALVES); }

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

/* internals */
/* The kernel that adds parts from other ranks, on the device's own stream. */
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

/* Rows are added in fp32 in order, then the old value, and the result is rounded once. */
static void test_sum_rows(test_pair *p, size_t n, int count, g2z_write mode) {
  test_twin *from = test_twin_normal(p, TEST_GRAD, n, 1, 3, 0);
  test_twin *rows = test_twin_normal(p, TEST_GRAD, n * (size_t)count, 2, 3, 0);
  test_twin *to = test_twin_normal(p, TEST_GRAD, n, 3, 3, 0);
  test_twin *in_place = mode == G2Z_ACCUMULATE ? to : from;
  ((float *)from->cpu)[0] = g2z__round(p->grad_dtype, 65504.0f); /* the sum overflows fp16 */
  ((float *)rows->cpu)[0] = 64.0f;
  test_twin_send(p, from);
  test_twin_send(p, rows);
  for (size_t i = 0; i < n; i++) {
    float sum = ((float *)from->cpu)[i];
    for (int row = 0; row < count; row++) sum += ((float *)rows->cpu)[(size_t)row * n + i];
    if (mode == G2Z_ACCUMULATE) sum = ((float *)to->cpu)[i] + sum;
    ((float *)in_place->cpu)[i] = g2z__round(p->grad_dtype, sum);
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
        test_sum_rows(&p, 1500000, 1, write); /* a block makes several passes */
        test_sum_rows(&p, 40000, 7, write);
        test_twin *from = test_twin_normal(&p, TEST_GRAD, 5000, 1, 3, 0);
        test_twin *to = test_twin_normal(&p, TEST_GRAD, 5000, 2, 3, 0);
        BOTH_CALL(&p, grad_add, HERE(to), HERE(from), write, to->n);
        test_twin_compare(&p, to, "grad_add", 0, 0);
        test_pair_clear(&p);
      }
    }
    test_pair_close(&p);
  }
}

/* Ranges with any start, whose ends do not fill a pack. */
/* The number of elements that differ. */
static size_t test_twin_differs(test_pair *p, const test_twin *twin) {
  float *got = test_twin_fetch(p, twin);
  size_t differ = 0;
  for (size_t i = 0; i < twin->n; i++) differ += got[i] != ((const float *)twin->cpu)[i];
  free(got);
  return differ;
}

static void test_cuda_adamw(test_pair *p, const g2z_optimizer_config *config, test_state state) {
  enum { COUNT = 5, ELEMENTS = 70000 };
  static const g2z_update_range ranges[COUNT] = {
      {0, 0, 0, 0, 0, 8, 4096, 1, 0},
      {4096, 4096, 4096, 4096, 0, 7003, 5, 0, 0},
      {4104, 4104, 4101, 4101, 0, 9001, 3, 1, 0},
      {4112, 4112, 4104, 4104, 0, 16384, 60001, 0, 0},
      {64200, 64112, 64112, 64112, 0, 100002, 4007, 1, 0}};
  const int bf16 = config->moments_bf16;
  test_twin *params = test_twin_new(p, TEST_ACT, ELEMENTS);
  test_twin *grads = test_twin_normal(p, TEST_GRAD, ELEMENTS, 1, 4, 0);
  test_twin *master = test_twin_normal(p, TEST_F32, ELEMENTS, 2, 1, 0);
  test_twin *m = test_twin_normal(p, bf16 ? TEST_BF16 : TEST_F32, ELEMENTS, 3, 0.01, 0);
  test_twin *v = test_twin_new(p, bf16 ? TEST_BF16 : TEST_F32, ELEMENTS);
  for (int i = 0; i < ELEMENTS; i++)
    ((float *)v->cpu)[i] = g2z__round(bf16 ? G2Z_BF16 : G2Z_FP32, 1e-4f * (float)(1 + i % 97));
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
  /* A compiler may fuse a product and an addition, for either device. */
  test_twin_compare(p, m, "adamw m", 2, 0x1p-24);
  test_twin_compare(p, v, "adamw v", 4, 0);
  if (bf16) CHECK(p->t, test_twin_differs(p, m) + test_twin_differs(p, v) < ELEMENTS / 100);
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
  CHECK(p->t, got.counted == want->counted && got.normed == want->normed);
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

/* The bytes of a GPU tensor; the caller frees them. */
static char *test_twin_bytes(test_pair *p, const test_twin *twin) {
  char *bytes = (char *)malloc(twin->bytes + 1);
  CHECK_OK(p->t, p->gpu->ops->download(p->gpu, bytes, twin->gpu, twin->bytes));
  CHECK_OK(p->t, p->gpu->ops->synchronize(p->gpu));
  return bytes;
}

static void test_cuda_optimizer(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (!test_pair_open(&p, t, types)) continue;
    g2z_train_config train = g2z_train_config_default(G2Z_DEVICE_CPU);
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
    void *memory = NULL;
    CHECK_OK(t, p.gpu->ops->allocate_host(p.gpu, 2 * sizeof(g2z_step_state), &memory));
    g2z_step_state *reported = (g2z_step_state *)memory;
    for (int step = 0; step < 9; step++) {
      int bad = step == 4 || step == 5 || step == 6;
      double *row = (double *)rows->cpu;
      memset(row, 0, 3 * G2Z_VERDICT_COLUMNS * sizeof *row);
      for (int k = 0; k < 3; k++) row[k * G2Z_VERDICT_COLUMNS + G2Z_VERDICT_LOSS] = 0.1 * k + step;
      test_twin_send(&p, rows);
      for (int k = 0; k < 3; k++) {
        size_t n = k == 0 ? 1 : k == 1 ? 1027 : 300001, shift = (size_t)(k + step) % 3;
        test_twin *grads = test_twin_at(&p, TEST_GRAD, n, shift);
        for (size_t i = 0; i < n; i++)
          ((float *)grads->cpu)[i] = g2z__round(p.grad_dtype, (float)((int)(i % 23) - 11) * 0.37f);
        if (bad) ((float *)grads->cpu)[n / 2] = step == 5 ? NAN : INFINITY;
        test_twin_send(&p, grads);
        g2z_range pieces[35]; /* for two launches; they begin at odd places */
        int count = n < 1000 ? 1 : 35;
        for (int i = 0; i < count; i++) {
          pieces[i].begin = n * (size_t)i / (size_t)count + (size_t)(i > 0);
          pieces[i].elements = n * (size_t)(i + 1) / (size_t)count + (size_t)(i + 1 < count) -
                               pieces[i].begin;
        }
        BOTH_CALL(&p, grad_sumsq,
                  (double *)HERE(rows) + k * G2Z_VERDICT_COLUMNS + G2Z_VERDICT_SQUARES, HERE(grads),
                  pieces, count);
        p.count--; /* release it here: the list has no room for 27 */
        free(grads->cpu);
        p.gpu->ops->release(p.gpu, grads->block);
      }
      if (!bad) test_twin_compare(&p, rows, "grad_sumsq", 8, 0);
      g2z_verdict on_cpu = {row, 3, 3, {NULL, NULL}};
      g2z_verdict on_gpu = {(double *)rows->gpu, 3, 3, {reported, reported + 1}};
      CHECK_OK(t, p.cpu->ops->decide(p.cpu, state.cpu, &on_cpu, &config, 77));
      char *votes = test_twin_bytes(&p, rows);
      CHECK_OK(t, p.gpu->ops->decide(p.gpu, state.gpu, &on_gpu, &config, 77));
      char *after = test_twin_bytes(&p, rows);
      CHECK(t, memcmp(after, votes, rows->bytes) == 0); /* it only reads the votes */
      free(votes);
      free(after);
      test_cuda_state(&p, state.cpu, state.gpu, &on_gpu);
      CHECK(t, state.cpu->skip == bad);
      if (step == 3 || step == 4) { /* applied, and skipped: params are all NaN */
        int kept = p.count;
        test_cuda_adamw(&p, &config, state);
        config.moments_bf16 = 1;
        test_cuda_adamw(&p, &config, state);
        config.moments_bf16 = 0;
        config.kind = G2Z_OPTIMIZER_MUON;
        config.adam_lr = 0.4f * config.lr;
        test_cuda_adamw(&p, &config, state);
        config.kind = G2Z_OPTIMIZER_ADAMW;
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

/* ----- Muon -------------------------------------------------------------- */

/* Momentum and the update, over ranges, some of them not aligned. In a skipped step they write
 * nothing: every output keeps its NaNs or its values. Neither op uses v. */
static void test_cuda_muon_slices(test_pair *p, int skip) {
  enum { COUNT = 5, ELEMENTS = 70000 };
  static const g2z_update_range ranges[COUNT] = {
      {0, 0, 0, 0, 0, 0, 4096, 1, 5.5f},
      {4096, 4096, 4096, 0, 4096, 0, 5, 0, 2},
      {4104, 4104, 4101, 0, 4103, 0, 3, 1, 11},
      {4112, 4112, 4104, 0, 4112, 0, 60001, 0, 0.6f},
      {64200, 64112, 64112, 0, 64116, 0, 4007, 1, 7.7f}};
  g2z_optimizer_config config = g2z_train_config_default(G2Z_DEVICE_CPU).optimizer;
  config.momentum = 0.9f;
  config.weight_decay = 0.1f;
  test_state state = test_state_make(p, 1, 0);
  state.cpu->skip = skip;
  state.cpu->lr = 0.02f;
  state.cpu->grad_multiplier = 0.3f;
  test_twin_send(p, &p->twins[p->count - 1]);
  test_twin *params = test_twin_new(p, TEST_ACT, ELEMENTS);
  test_twin *grads = test_twin_normal(p, TEST_GRAD, ELEMENTS, 1, 4, 0);
  test_twin *master = test_twin_normal(p, TEST_F32, ELEMENTS, 2, 1, 0);
  test_twin *m = test_twin_normal(p, TEST_F32, ELEMENTS, 3, 2, 0);
  test_twin *u = test_twin_new(p, TEST_BF16, ELEMENTS);
  test_twin *o = test_twin_normal(p, TEST_BF16, ELEMENTS, 4, 0.05, 0);
  void *on_gpu;
  CHECK_OK(p->t, p->gpu->ops->allocate(p->gpu, sizeof ranges, &on_gpu));
  CHECK_OK(p->t, p->gpu->ops->upload(p->gpu, on_gpu, ranges, sizeof ranges));
  g2z_update update = {params->cpu, (float *)master->cpu, (float *)m->cpu, NULL, grads->cpu,
                       ranges, ranges, &config, state.cpu};
  g2z_update update_gpu = {params->gpu, (float *)master->gpu, (float *)m->gpu, NULL, grads->gpu,
                           (const g2z_update_range *)on_gpu, ranges, &config, state.gpu};
  CHECK_OK(p->t, p->cpu->ops->momentum(p->cpu, u->cpu, &update, 0, COUNT));
  CHECK_OK(p->t, p->gpu->ops->momentum(p->gpu, u->gpu, &update_gpu, 2, COUNT));
  CHECK_OK(p->t, p->gpu->ops->momentum(p->gpu, u->gpu, &update_gpu, 0, 2));
  CHECK_OK(p->t, p->gpu->ops->momentum(p->gpu, u->gpu, &update_gpu, COUNT, COUNT));
  CHECK_OK(p->t, p->cpu->ops->muon(p->cpu, o->cpu, &update, 0, COUNT));
  CHECK_OK(p->t, p->gpu->ops->muon(p->gpu, o->gpu, &update_gpu, 2, COUNT));
  CHECK_OK(p->t, p->gpu->ops->muon(p->gpu, o->gpu, &update_gpu, 0, 2));
  CHECK_OK(p->t, p->gpu->ops->muon(p->gpu, o->gpu, &update_gpu, COUNT, COUNT));
  /* A compiler may fuse a product and an addition; terms of up to 8 can cancel. */
  test_twin_compare(p, m, "momentum m", skip ? 0 : 2, skip ? 0 : 0x1p-21);
  test_twin_compare(p, u, "momentum u", skip ? 0 : 1.01, skip ? 0 : 0x1p-21);
  test_twin_compare(p, master, "muon master", skip ? 0 : 2, skip ? 0 : 0x1p-23);
  test_twin_compare(p, params, "muon params", skip ? 0 : 1.01, skip ? 0 : 0x1p-23);
  p->gpu->ops->release(p->gpu, on_gpu);
}

/* Orthogonalizes all shapes at once. In each, weight 1 is zero and weight 2 has rank 1. Tensor
 * cores take X, A and the polynomial rounded to bf16, which the CPU does not round: 16 roundings
 * with a standard deviation of about 2^-9.8 each, which later steps multiply by up to 3.4. In a
 * simulation a matrix differs by 0.006 to 0.033 of its norm, an 8 x 8 one rarely by 0.09. */
static void test_cuda_orthogonalize(test_pair *p) {
  enum { SHAPES = 9 };
  g2z_matrices shapes[SHAPES] = {{0, 3, 8, 8, 1},      {0, 3, 24, 8, 1},    {0, 3, 48, 200, 1},
                                 {0, 3, 200, 48, 1},   {0, 5, 40, 120, 3},  {0, 3, 136, 136, 1},
                                 {0, 3, 72, 1080, 3},  {0, 4, 96, 768, 1},  {0, 4, 768, 96, 1}};
  size_t at = 0, work_elements = 0, least = 0;
  for (int s = 0; s < SHAPES; s++) {
    const int width = shapes[s].columns / shapes[s].matrices;
    const int side = shapes[s].rows < width ? shapes[s].rows : width;
    const size_t one = G2Z_ORTHOGONALIZE_WORK(side, shapes[s].rows + width - side);
    shapes[s].at = at;
    at += (size_t)shapes[s].weights * (size_t)shapes[s].rows * (size_t)shapes[s].columns;
    if (least < one) least = one;
  }
  work_elements = 15 * least;
  test_twin *x = test_twin_normal(p, TEST_BF16, at, 5, 0.001, 0);
  test_twin *work = test_twin_new(p, TEST_BF16, work_elements);
  for (int s = 0; s < SHAPES; s++) {
    const size_t elements = (size_t)shapes[s].rows * (size_t)shapes[s].columns;
    float *weight = (float *)x->cpu + shapes[s].at + elements;
    for (size_t i = 0; i < elements; i++) weight[i] = 0, weight[elements + i] = 0x1p-9f;
  }
  float *start = (float *)malloc(x->n * sizeof *start);
  memcpy(start, x->cpu, x->n * sizeof *start);
  /* Three runs give the same bits: two with room for many matrices at a time, one with room for
   * one. */
  char *first = NULL;
  for (int run = 0; run < 3; run++) {
    memcpy(x->cpu, start, x->n * sizeof *start);
    test_twin_send(p, x);
    CHECK_OK(p->t, p->gpu->ops->orthogonalize(p->gpu, x->gpu, shapes, SHAPES, work->gpu,
                                              (run == 2 ? least : work_elements) * 2));
    char *bytes = test_twin_bytes(p, x);
    if (first) CHECK(p->t, memcmp(first, bytes, x->bytes) == 0);
    else first = bytes;
    if (bytes != first) free(bytes);
  }
  free(first);
  free(start);
  CHECK_OK(p->t, p->cpu->ops->orthogonalize(p->cpu, x->cpu, shapes, SHAPES, work->cpu,
                                            work_elements * sizeof(float)));
  float *got = test_twin_fetch(p, x);
  for (int s = 0; s < SHAPES; s++)
    for (int i = 0; i < shapes[s].weights * shapes[s].matrices; i++) {
      const int width = shapes[s].columns / shapes[s].matrices;
      const size_t begin = shapes[s].at + (size_t)(i / shapes[s].matrices * shapes[s].rows) *
                                              (size_t)shapes[s].columns +
                           (size_t)(i % shapes[s].matrices * width);
      double squares = 0, differ = 0;
      for (int row = 0; row < shapes[s].rows; row++)
        for (int column = 0; column < width; column++) {
          const size_t e = begin + (size_t)row * (size_t)shapes[s].columns + (size_t)column;
          const double want = (double)((const float *)x->cpu)[e];
          squares += want * want;
          differ += ((double)got[e] - want) * ((double)got[e] - want);
        }
      p->t->checks++;
      if (!(sqrt(differ) <= 0.1 * sqrt(squares))) /* NaN fails; zeros must be equal */
        test_fail(p->t, __FILE__, __LINE__,
                  "matrix %d of [%d,%d]: the norm of the difference is %.3g of %.3g", i,
                  shapes[s].rows, width, sqrt(differ), sqrt(squares));
    }
  free(got);
  test_twin_compare(p, x, "orthogonalize", 0, 1); /* checks guards; differences below 1 */
  got = test_twin_fetch(p, work);
  memcpy(work->cpu, got, work->n * sizeof *got);
  free(got);
  test_twin_compare(p, work, "orthogonalize's scratch", 0, 0); /* guards */
}

static void test_cuda_muon(g2z_test *t) {
  CUDA_OR_SKIP(t);
  for (int types = 0; types < TEST_TYPES; types++) {
    test_pair p;
    if (!test_pair_open(&p, t, types)) continue;
    test_cuda_muon_slices(&p, 0);
    test_pair_clear(&p);
    test_cuda_muon_slices(&p, 1);
    test_pair_clear(&p);
    /* u is bf16 whatever the type is; tf32 chooses how other products compute. */
    if (p.dtype == G2Z_TF32 || p.dtype == G2Z_FP16) test_cuda_orthogonalize(&p);
    test_pair_close(&p);
  }
}

/* ----- CUDA attention against the CPU's ----------------------------------
 * Both compute scores, statistics and sums in fp32. Tensor cores take P and dS rounded to the type,
 * which the CPU does not round; eps is the spacing of the type.
 * Each element: one more rounding of the result, and the roundings of P or dS in its sum. These
 *   are independent, each up to eps/2 of its term, so their sum stays under 2 eps of the largest
 *   element of the tensor.
 * Each tensor: ||gpu - cpu|| <= eps/2 ||cpu||. Two roundings with a standard deviation of at most
 *   0.29 eps each make 0.41 eps; a wrong or missing term makes far more.
 * fp32: scores of size s differ by about sqrt(HS) s 2^-24, from their sums, and probabilities by
 *   the same relative amount: 64 eps for scores around 1, `spread`^2 times that for larger ones. */

static double test_attention_eps(const test_pair *p, double spread) {
  double eps = test_eps(p->dtype);
  return p->dtype == G2Z_FP16 || p->dtype == G2Z_BF16 ? eps : 64 * eps * spread * spread;
}

/* Both bounds, for columns [first, first + width) of rows of `row` numbers. Differences below the
 * error of numbers around 0.1 never count: with one query, dQ and dK are differences of equal
 * numbers. */
static void test_attention_compare(test_pair *p, const test_twin *twin, const char *what,
                                   size_t first, size_t width, size_t row, double eps) {
  float *got = test_twin_fetch(p, twin);
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
  FAIL_IF(p->t, !(sqrt(error) <= bound), "%s (%s): error %.3g, %.3g allowed, norm %.3g", what,
          g2z_dtype_text(p->dtype), sqrt(error), bound, sqrt(norm));
  free(got);
}

static void test_attention_one(test_pair *p, int B, int T, int NH, int HS, float probability,
                               double spread) {
  if (test_attention_leaves_out(p->dtype, B * NH * T)) return;
  int C = NH * HS;
  size_t width = (size_t)C, N = (size_t)B * (size_t)T, heads = (size_t)B * (size_t)NH;
  double eps = test_attention_eps(p, spread);
  char what[96];
  test_twin *qkv = test_twin_normal(p, TEST_ACT, N * 3 * width, (uint32_t)(T + HS), 1, 0);
  for (size_t i = 0; i < qkv->n; i++) /* powers of 2: exact in the type */
    if (i % (3 * width) < 2 * width) ((float *)qkv->cpu)[i] *= (float)spread;
  test_twin_send(p, qkv);
  test_twin *out = test_twin_new(p, TEST_ACT, N * width);
  test_twin *lse = test_twin_new(p, TEST_F32, heads * (size_t)T);
  test_dropouts drop = test_dropout_make(test_state_make(p, 1, 19), probability, T);
  const int halves = p->dtype == G2Z_FP16 || p->dtype == G2Z_BF16;
  test_twin *narrow = test_narrow_new(p, N, width);
  BOTH_RUN(p, attention_fwd, .out = HERE(out), .narrow = halves ? HERE(narrow) : NULL,
           .lse = (float *)HERE(lse), .qkv = HERE(qkv), .dropout = drop.on[on], .B = B, .T = T,
           .C = C, .NH = NH);
  if (halves) test_narrow_check(p, narrow, out, width);
  snprintf(what, sizeof what, "attention_fwd B=%d T=%d NH=%d HS=%d dropout=%g", B, T, NH, HS,
           (double)probability);
  test_attention_compare(p, out, what, 0, width, width, eps);
  test_twin_compare(p, out, what, 1, 2 * eps * 4);
  test_twin_compare(p, lse, what, 4, 64 * 0x1p-23 * spread * spread);

  test_twin *dout = test_twin_normal(p, TEST_ACT, N * width, (uint32_t)(T + HS + 1), 1, 0);
  test_twin *dqkv = test_twin_new(p, TEST_ACT, N * 3 * width);
  test_twin *dbias = test_twin_new(p, TEST_GRAD, 3 * width);
  test_twin_send(p, out); /* backward starts from the CPU's values */
  test_twin_send(p, lse);
  snprintf(what, sizeof what, "attention_bwd B=%d T=%d NH=%d HS=%d dropout=%g", B, T, NH, HS,
           (double)probability);
  for (int mode = G2Z_OVERWRITE; mode <= G2Z_ACCUMULATE; mode++) {
    BOTH_RUN(p, attention_bwd, .dqkv = HERE(dqkv), .dbias = HERE(dbias), .dout = HERE(dout),
             .out = HERE(out), .lse = (const float *)HERE(lse), .qkv = HERE(qkv),
             .mode = (g2z_write)mode, .dropout = drop.on[on], .B = B, .T = T, .C = C, .NH = NH);
    double largest = 0, column = 0; /* largest element; largest norm of a column */
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
    /* A column adds N errors of 0.41 eps of its elements. The bound is six standard deviations for
     * the column of the largest norm: V's columns are larger than Q's and K's. */
    test_twin_compare(p, dbias, what, 2 + mode, 2.5 * eps * (column + 0.1));
  }
  if (p->dtype == G2Z_FP16 && N % 128 == 0 && C % 16 == 0) {
    test_twin *both = test_twin_new(p, TEST_ACT, dqkv->n), *of = test_twin_new(p, TEST_ACT, out->n);
    test_narrow_send(p, of, out, width, 0); /* the rows; the columns follow */
    TEST_RUN(p->t, p->gpu, attention_bwd, .dqkv = dqkv->gpu, .narrow = both->gpu,
             .columns = (char *)of->gpu + out->n, .dbias = dbias->gpu, .dout = dout->gpu,
             .out = out->gpu, .lse = (const float *)lse->gpu, .qkv = qkv->gpu,
             .dropout = drop.on[1], .B = B, .T = T, .C = C, .NH = NH);
    test_both_check(p, both, dqkv, 3 * width, 1);
    test_both_check(p, of, out, width, 0);
  }
  test_pair_clear(p);
}

/* dQ of queries 1 and 2 overflows fp16 with opposite signs; its sum does not, nor do dK and dV. The
 * copy in 8 bits holds no infinity, so the bias gradient must not be a number. */
static void test_attention_overflow(test_pair *p) {
  static const int shapes[][4] = {{1, 128, 1, 64}, {2, 64, 400, 64}, {4, 32, 1, 96}};
  for (int i = 0; i < 3; i++) { /* cut heads; whole heads; kernels for all head sizes */
    int B = shapes[i][0], T = shapes[i][1], NH = shapes[i][2], C = NH * shapes[i][3], finite = 0;
    size_t width = (size_t)C, N = (size_t)B * (size_t)T;
    test_twin *qkv = test_twin_normal(p, TEST_ACT, N * 3 * width, 1, 0, 0);
    test_twin *dout = test_twin_normal(p, TEST_ACT, N * width, 1, 0, 0);
    test_twin *out = test_twin_new(p, TEST_ACT, N * width);
    test_twin *lse = test_twin_new(p, TEST_F32, N * (size_t)NH);
    test_twin *dqkv = test_twin_new(p, TEST_ACT, N * 3 * width);
    test_twin *both = test_twin_new(p, TEST_ACT, N * 3 * width);
    test_twin *dbias = test_twin_new(p, TEST_GRAD, 3 * width);
    ((float *)qkv->cpu)[width + 5] = 32768; /* K and V of key 0 */
    ((float *)qkv->cpu)[2 * width] = 16;
    ((float *)dout->cpu)[width] = 16;
    ((float *)dout->cpu)[2 * width] = -16;
    test_twin_send(p, qkv);
    test_twin_send(p, dout);
    TEST_RUN(p->t, p->gpu, attention_fwd, .out = out->gpu, .lse = (float *)lse->gpu,
             .qkv = qkv->gpu, .B = B, .T = T, .C = C, .NH = NH);
    TEST_RUN(p->t, p->gpu, attention_bwd, .dqkv = dqkv->gpu, .narrow = both->gpu,
             .dbias = dbias->gpu, .dout = dout->gpu, .out = out->gpu,
             .lse = (const float *)lse->gpu, .qkv = qkv->gpu, .B = B, .T = T, .C = C, .NH = NH);
    float *sums = test_twin_fetch(p, dbias);
    for (size_t x = 0; x < 3 * width; x++) finite += isfinite(sums[x]) != 0;
    CHECK(p->t, !isfinite(sums[5]) && finite == 3 * C - 1);
    free(sums);
    test_pair_clear(p);
  }
}

/* internals */
/* Hopper's backward cuts heads into work items. The cases: many heads, of which none is cut; one
 * head of 9 key blocks that is cut into 7 parts; slightly more heads than multiprocessors, some
 * whole and some cut, so that tiles of dQ wait in both places. */
static void test_attention_cuts(test_pair *p) {
  int shapes[][3] = {{27, 65, 10}, {1, 1100, 1}, {4, 352, 34}};
#ifdef __CUDACC__
  const g2z__cuda *cuda = g2z__cuda_of(p->gpu);
  shapes[2][2] = cuda->sms / 4 + 1;
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

static void test_cuda_attention_types(g2z_test *t, int first, int end) {
  CUDA_OR_SKIP(t);
  static const int sizes[] = {1, 7, 63, 64, 65, 129, 257, 600};
  static const int head_sizes[] = {8, 16, 24, 64, 80, 96, 128};
  for (int types = first; types < end; types++) {
    test_pair p;
    if (test_pair_open(&p, t, types)) {
      for (int i = 0; i < 8; i++)
        for (int k = 0; k < 7; k++) /* each type twice: with and without dropout */
          test_attention_one(&p, sizes[i] < 300 ? 2 : 1, sizes[i], sizes[i] < 300 ? 3 : 1,
                             head_sizes[k], (i + k + types) % 2 ? 0.3f : 0.0f, 1);
      test_attention_one(&p, 4, 192, 5, 64, 0, 4);    /* large scores: few keys get all weight */
      test_attention_one(&p, 3, 100, 2, 48, 0.5f, 4); /* dropout on tensor cores: T is 4 x 25 */
      test_attention_one(&p, 13, 130, 12, 64, 0, 1);  /* more heads than multiprocessors */
      test_attention_one(&p, 4, 96, 2, 64, 0, 1);     /* 8-bit columns, and padding of statistics */
      test_attention_cuts(&p);
      if (p.dtype == G2Z_FP16) test_attention_overflow(&p);
    }
    test_pair_close(&p);
  }
}
static void test_cuda_attention(g2z_test *t) {
  test_cuda_attention_types(t, TEST_HALVES, TEST_TYPES);
}
static void test_cuda_attention_wide(g2z_test *t) { test_cuda_attention_types(t, 0, TEST_HALVES); }

/* Runs forward and backward once and copies the bytes of all outputs. */
static void test_attention_run(test_pair *p, unsigned char *bytes, const test_twin *qkv,
                               const test_twin *dout, int B, int T, int C, int NH) {
  size_t N = (size_t)B * (size_t)T, width = (size_t)C;
  test_twin *made[4];
  made[0] = test_twin_new(p, TEST_ACT, N * width);
  made[1] = test_twin_new(p, TEST_F32, N * (size_t)NH);
  made[2] = test_twin_new(p, TEST_ACT, N * 3 * width);
  made[3] = test_twin_new(p, TEST_GRAD, 3 * width);
  TEST_RUN(p->t, p->gpu, attention_fwd, .out = made[0]->gpu, .lse = (float *)made[1]->gpu,
           .qkv = qkv->gpu, .B = B, .T = T, .C = C, .NH = NH);
  TEST_RUN(p->t, p->gpu, attention_bwd, .dqkv = made[2]->gpu, .dbias = made[3]->gpu,
           .dout = dout->gpu, .out = made[0]->gpu, .lse = (const float *)made[1]->gpu,
           .qkv = qkv->gpu, .B = B, .T = T, .C = C, .NH = NH);
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
