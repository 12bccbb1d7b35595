/* Tests of the room "weights": safetensors, and models in Hugging Face's layout. */

/* ----- safetensors and weights ------------------------------------------- */

/* A file with this header, followed by these bytes; `data` NULL: zeros. */
static const char *test_weights_file(g2z_test *t, const char *header, const void *data,
                                     size_t count) {
  const char *path = test_path(t, "model.safetensors");
  uint64_t length = strlen(header);
  char *bytes = (char *)test_memory(t, 8 + length + count);
  memcpy(bytes, &length, 8);
  memcpy(bytes + 8, header, length);
  if (data) memcpy(bytes + 8 + length, data, count);
  test_write_file(t, path, bytes, 8 + length + count);
  return path;
}

static void test_end_safetensors(void *file) { g2z__safetensors_free((g2z__safetensors *)file); }

/* The test owns the file. */
static g2z__safetensors *test_safetensors(g2z_test *t, const char *path) {
  g2z__safetensors *file;
  REQUIRE_OK(t, g2z__safetensors_open(&t->services, path, &file));
  test_own(t, test_end_safetensors, file);
  return file;
}

/* Reads elements of the tensor with this name. */
static g2z_status test_weights_read(g2z__safetensors *file, const char *name, size_t first,
                                    size_t count, float *out) {
  int index = g2z__safetensors_find(file, name);
  return index < 0 ? G2Z_BAD_ARGUMENT : g2z__safetensors_read(file, index, first, count, out);
}

static void test_safetensors_types(g2z_test *t) {
  static const char header[] =
      "{\"bf\":{\"dtype\":\"BF16\",\"shape\":[65536],\"data_offsets\":[131072,262144]},"
      "\"\\u0066h\":{\"shape\":[2,32768],\"dtype\":\"F16\",\"data_offsets\":[0,131072]},"
      "\"wide\":{\"dtype\":\"F64\",\"shape\":[1,3,1],\"data_offsets\":[262144,262168],\"x\":[{}]},"
      "\"none\":{\"dtype\":\"F32\",\"shape\":[4,0],\"data_offsets\":[262168,262168]},"
      "\"one\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[262168,262172]},"
      "\"bits\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[262172,262175]},"
      "\"__metadata__\":{\"format\":\"pt\"}}   ";
  static struct {
    uint16_t halves[2][65536];
    double wide[3];
    float one;
    char bits[4];
  } data = {{{0}, {0}}, {0.1, -1e-320, 16777217.0}, 1.5f, {1, 0, 1, 0}};
  static float got[65536];
  int wrong = 0;
  for (int i = 0; i < 65536; i++) data.halves[0][i] = data.halves[1][i] = (uint16_t)i;
  const char *path = test_weights_file(t, header, &data, 262175);
  g2z__safetensors *st = test_safetensors(t, path);
  CHECK(t, st->count == 6 && g2z__safetensors_find(st, "f") == -1);
  g2z__safetensor tensor = st->tensors[g2z__safetensors_find(st, "fh")];
  CHECK(t, tensor.type == G2Z__F16 && tensor.rank == 2 && tensor.shape[1] == 32768 &&
               tensor.elements == 65536 && tensor.bytes == 131072 &&
               tensor.begin == 8 + sizeof header - 1);
  CHECK_OK(t, test_weights_read(st, "fh", 0, 65536, got));
  for (int i = 0; i < 65536; i++) { /* every half by its definition; NaN stays NaN */
    int exponent = i >> 10 & 31, fraction = i & 1023;
    double value = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    if (exponent == 31) value = fraction ? NAN : INFINITY;
    if (i & 0x8000) value = -value;
    wrong += !(isnan(value) ? isnan(got[i]) : got[i] == value && !signbit(got[i]) == !(i >> 15));
  }
  CHECK_OK(t, test_weights_read(st, "bf", 1, 65535, got));
  for (int i = 1; i < 65536; i++) {
    uint32_t bits;
    memcpy(&bits, &got[i - 1], sizeof bits);
    wrong += bits != (uint32_t)i << 16;
  }
  CHECK(t, wrong == 0);
  CHECK_OK(t, test_weights_read(st, "wide", 0, 3, got));
  CHECK(t, got[0] == 0.1f && got[1] == 0 && got[2] == 16777216.0f);
  CHECK_OK(t, test_weights_read(st, "wide", 3, 0, got));
  CHECK_OK(t, test_weights_read(st, "one", 0, 1, got));
  CHECK(t, got[0] == 1.5f);
  CHECK_OK(t, test_weights_read(st, "none", 0, 0, got));
  CHECK_STATUS(t, test_weights_read(st, "bits", 0, 3, got), G2Z_UNSUPPORTED, &t->services,
               "is of type BOOL");
  CHECK(t, truncate(path, 262150) == 0); /* after it was opened */
  CHECK_FORMAT(t, test_weights_read(st, "wide", 0, 3, got), "ends before byte ");
  g2z__safetensors_free(NULL);
}

#define TENSOR(name, type, shape, offsets) \
  "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
static const struct {
  const char *header;
  size_t data;                  /* bytes after it */
  const char *sentence;
} test_safetensors_bad[] = {
    {"", 0, "expected an object, found the text's end"},
    {"[]", 0, "expected an object, found '['"},
    {"{", 0, "a name in quotes"},
    {"{} {}", 0, "expected the end"},
    {"{}", 1, "promises 0 bytes of tensors after its header but has 1"},
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
    {"{" TENSOR("a", "F32", "[1]", "[4,8]") "}", 8, "\"a\" begins at data offset 4, but"},
    {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("b", "F32", "[1]", "[2,6]") "}", 6,
     "\"b\" begins at data offset 2, but the tensors before it end at 4"},
    {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("b", "U8", "[1]", "[5,6]") "}", 6,
     "\"b\" begins at data offset 5"},
    {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("\\u0061", "U8", "[1]", "[4,5]") "}", 5,
     "names tensor \"a\" twice"},
    {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("a", "F32", "[1]", "[0,4]") "}", 4,
     "names tensor \"a\" twice"},
    {"{" TENSOR("a\\u0000", "F32", "[1]", "[0,4]") "}", 4, "name contains a NUL"},
    {"{" TENSOR("a", "F32", "[0]", "[9223372036854775807,9223372036854775807]") "}", 0,
     "begins at data offset 9223372036854775807"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "expected a string, found '1'"},
    {"{\"\xe9\":1}", 0, "byte 2 of the header is not UTF-8"}};

static void test_safetensors_refused(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z__safetensors *file;
  for (size_t i = 0; i < sizeof test_safetensors_bad / sizeof *test_safetensors_bad; i++) {
    const char *header = test_safetensors_bad[i].header;
    const char *path = test_weights_file(t, header, NULL, test_safetensors_bad[i].data);
    CHECK_FORMAT(t, g2z__safetensors_open(services, path, &file), test_safetensors_bad[i].sentence);
    CHECK(t, file == NULL);
    if (strstr(services->error, "damaged")) CHECK_HAS(t, services->error, "; copy it again");
  }
  const char *path = test_weights_file(t, "{\"__metadata__\":null}", NULL, 0);
  test_safetensors(t, path);
  /* Other formats under this name, 40 bytes each. */
  static const char *const others[][2] = {
      {"version https://git-lfs.github.com/spec/v1\n", "a pointer of git-lfs in place of the file"},
      {"PK\3\4", "a file of torch.save: save the model with"},
      {"\x80\x02\x8a\nl\xfc\x9c", "a pickle, as torch.save wrote it"},
      {"GGUF\3", "a GGUF file"},
      {"\x89HDF\r\n", "an HDF5 file of TensorFlow"},
      {"\xc6\xd7\x34\x01\x03", "weights of llm.c: its dev/eval/export_hf.py"},
      {"\x1f\x8b\x08\x08", "packed by gzip"},
      {"<!DOCTYPE html>", "a web page: download the file again"}};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    char bytes[41] = "";
    snprintf(bytes, sizeof bytes, "%s", others[i][0]);
    test_write_file(t, test_path(t, "other"), bytes, 40);
    CHECK_FORMAT(t, g2z__safetensors_open(services, test_path(t, "other"), &file), others[i][1]);
  }
  uint64_t lengths[] = {UINT64_MAX, 100000001, 1000, 9, UINT64_MAX - 7};
  path = test_path(t, "length");
  for (size_t i = 0; i < 5; i++) {
    char bytes[17] = "12345678{}      ";
    memcpy(bytes, &lengths[i], 8);
    test_write_file(t, path, bytes, 16);
    CHECK_FORMAT(t, g2z__safetensors_open(services, path, &file), "bytes but has 16 bytes in all");
  }
  CHECK_IO(t, g2z__safetensors_open(services, test_path(t, "no"), &file), "No such file");
  CHECK_IO(t, g2z__safetensors_open(services, t->directory, &file), "Is a directory; name a file");

  /* Truncated at every byte; every byte of the header changed. */
  const float values[7] = {1, 2, 3, 4, 5, 6, 7};
  float back = 0;
  path = test_weights_file(t, "{" TENSOR("b", "F32", "[2,3]", "[0,24]") ","
                           TENSOR("a\\\"\\\\\\n\xc3\xa9", "F32", "[]", "[24,28]") "}", values, 28);
  CHECK_OK(t, test_weights_read(test_safetensors(t, path), "a\"\\\n\xc3\xa9", 0, 1, &back));
  CHECK(t, back == 7);
  size_t bytes;
  const char *text = test_file(t, path, &bytes);
  for (size_t n = 0; n < bytes - 28; n++) {
    for (int bit = 0; bit < 8; bit++) {
      test_files_poke(t, path, n, text[n] ^ (1 << bit));
      g2z_status status = g2z__safetensors_open(services, path, &file);
      CHECK(t, status == G2Z_FORMAT || status == G2Z_OK);
      g2z__safetensors_free(file);
    }
    test_files_poke(t, path, n, text[n]);
  }
  for (size_t n = bytes; n-- > 0;) {
    CHECK(t, truncate(path, (off_t)n) == 0);
    CHECK(t, g2z__safetensors_open(services, path, &file) == G2Z_FORMAT && file == NULL);
  }
}
#undef TENSOR

/* A tiny model: wte is longer than a chunk, and the vocabulary needs padding. */
enum { TEST_WEIGHTS = 2 * 8 + 2 * (12 * 8 * 8 + 13 * 8) + (5 + 9001) * 8 };
static g2z_train_config test_weights_model(void) {
  g2z_train_config config = test_config_of(2, 1, 8, 5, 9001);
  config.model.eot = 8900;
  return config;
}

/* Saves that model as DIRECTORY/model.safetensors and config.json. Its canonical element i is
 * i + 0.25, except one if `at` is not below 0. */
static g2z_status test_weights_save(g2z_test *t, const g2z_train_config *config,
                                    const char *directory, int at, float value) {
  static float values[TEST_WEIGHTS];
  test_trainer tt;
  for (int i = 0; i < TEST_WEIGHTS; i++) values[i] = i == at ? value : (float)i + 0.25f;
  g2z_status status = test_trainer_open(t, config, &tt);
  if (status == G2Z_OK)
    status = g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, 0, TEST_WEIGHTS, values);
  if (status == G2Z_OK) status = g2z_trainer_save_weights(tt.trainer, directory);
  return status;
}

/* The weights of a trainer that begins with the files of a directory. */
static g2z_status test_weights_load(g2z_test *t, const g2z_train_config *config,
                                    const char *directory, float *values) {
  g2z_train_config from = *config;
  test_trainer tt;
  from.init_from = directory;
  g2z_status status = test_trainer_open(t, &from, &tt);
  if (status == G2Z_OK)
    status = g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 0, tt.trainer->plan->parameters,
                              values);
  return status;
}

/* A directory holds the values that test_weights_save saves. */
static void test_weights_equal(g2z_test *t, const g2z_train_config *config, const char *directory) {
  static float values[TEST_WEIGHTS];
  int wrong = 0;
  memset(values, 0, sizeof values);
  CHECK_OK(t, test_weights_load(t, config, directory, values));
  for (int i = 0; i < TEST_WEIGHTS; i++) wrong += values[i] != (float)i + 0.25f;
  CHECK(t, wrong == 0);
}

static void test_weights_round_trip(g2z_test *t) {
  static const struct { int at; float value; const char *sentence; } broken[] = {
      {0, NAN, "element 0 of tensor \"transformer.ln_f.weight\" is nan in fp32, not a finite"},
      {16 + 8 + 256 + 32 + 7, INFINITY, "7 of tensor \"transformer.h.1.mlp.c_fc.weight\" is inf"},
      {1800 + 8 * 8999, -INFINITY, "of tensor \"transformer.wte.weight\" is -inf"}};
  static float values[TEST_WEIGHTS];
  g2z_train_config config = test_weights_model();
  g2z_services *services = &t->services;
  g2z_model_config read;
  const char *directory = test_at(t, "new/dir"), *path = test_at(t, "new/dir/model.safetensors");
  float value = 0;
  size_t bytes = 0;
  config.model.vocab_hash = 5;
  CHECK_OK(t, test_weights_save(t, &config, directory, -1, 0));
  CHECK(t, test_files_count(t, "new/dir/") == 2);
  CHECK_OK(t, g2z_weights_config(services, directory, &read));
  CHECK(t, memcmp(&read, &config.model, sizeof read) == 0);
  test_weights_equal(t, &config, directory);

  /* Names, shapes and order as in Hugging Face's files: [in, out], block 0 after block 1. */
  g2z__safetensors *file = test_safetensors(t, path);
  CHECK(t, file->count == 4 + 2 * 12);
  int index = g2z__safetensors_find(file, "transformer.h.1.mlp.c_fc.weight");
  CHECK(t, index >= 0);
  g2z__safetensor tensor = file->tensors[index < 0 ? 0 : index];
  CHECK(t, tensor.rank == 2 && tensor.shape[0] == 8 && tensor.shape[1] == 32);
  CHECK(t, tensor.begin % 8 == 0);
  CHECK_OK(t, test_weights_read(file, "transformer.h.1.mlp.c_fc.weight", 1, 1, &value));
  CHECK(t, value == 16 + 8 + 256 + 32 + 1 + 0.25f); /* after lnf, fcprojb, fcprojw, fcb */
  CHECK_OK(t, test_weights_read(file, "transformer.wte.weight", 9001 * 8 - 1, 1, &value));
  CHECK(t, value == TEST_WEIGHTS - 1 + 0.25f);
  CHECK(t, g2z__safetensors_find(file, "lm_head.weight") == -1);

  /* Two writes of the same weights give the same bytes; a full disk leaves the old file. */
  const char *first = test_file(t, path, &bytes);
  CHECK_OK(t, test_weights_save(t, &config, directory, -1, 0));
  CHECK(t, test_files_equal(t, path, first, bytes));
  struct rlimit before = test_files_limit(100000); /* the weights take 300 KB */
  CHECK_IO(t, test_weights_save(t, &config, directory, -1, 0), "File too large");
  test_files_unlimit(&before);
  CHECK(t, test_files_count(t, "new/dir/") == 2 && test_files_equal(t, path, first, bytes));

  /* A weight that is not finite is refused, also if it only overflows fp32. */
  for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
    CHECK_OK(t, test_weights_save(t, &config, directory, broken[i].at, broken[i].value));
    CHECK_FORMAT(t, test_weights_load(t, &config, directory, values), broken[i].sentence);
  }
}

/* Writes the file of "whole", a model with one layer, again: with or without the prefix of its
 * names, with `rows` rows of the tensor `change` (0: without it), and with more tensors. One that
 * is not tied to wte has a `begin`. */
static void test_weights_variant(g2z_test *t, int prefix, const char *change, uint64_t rows,
                                 const g2z__safetensor *extra, size_t extras) {
  enum { PREFIX = sizeof "transformer." - 1 };
  g2z__safetensors *whole = test_safetensors(t, test_path(t, "whole/model.safetensors"));
  g2z__safetensor tensors[16 + 4];
  g2z_writer *writer;
  size_t count = 0;
  float values[256];
  CHECK(t, whole->count == 16);
  for (size_t i = 0; i < 16; i++) {
    g2z__safetensor *one = &tensors[count];
    *one = whole->tensors[i];
    const int changes = change && strcmp(one->name + PREFIX, change) == 0;
    if (changes && rows == 0) continue;
    if (changes) one->shape[0] = rows;
    if (!prefix) one->name += PREFIX;
    one->begin = 0;
    count++;
  }
  for (size_t i = 0; i < extras; i++) tensors[count++] = extra[i];
  CHECK_OK(t, g2z__safetensors_create(&t->services, test_path(t, "model.safetensors"), tensors,
                                     count, &writer));
  for (size_t i = 0; i < count; i++) {
    size_t elements = 1;
    for (int k = 0; k < tensors[i].rank; k++) elements *= (size_t)tensors[i].shape[k];
    int tied = strstr(tensors[i].name, "wte") || strcmp(tensors[i].name, "lm_head.weight") == 0;
    for (size_t k = 0; k < elements; k++) values[k] = (float)(tied ? 1 : i) + (float)k / 256;
    if (tensors[i].begin) values[elements - 1] += 1;
    CHECK_OK(t, g2z_writer_put(writer, values, elements * sizeof(float)));
  }
  CHECK_OK(t, g2z_writer_commit(writer));
  g2z_writer_free(writer);
}

static void test_weights_variants(g2z_test *t) {
  /* The file's head: none, tied, different (-1), or with this many rows; an extra tensor's name. */
  static const struct {
    int prefix;
    const char *change;
    uint64_t rows;
    int head;
    const char *extra;
    g2z_status status;
    const char *sentence;
  } bad[] = {
      {0, NULL, 0, -1, NULL, G2Z_UNSUPPORTED, "lm_head.weight differs from wte.weight"},
      {0, NULL, 0, 4, NULL, G2Z_FORMAT, "\"lm_head.weight\" has the shape [4, 8]"},
      {1, "h.0.mlp.c_fc.weight", 0, 0, NULL, G2Z_FORMAT,
       "no tensor \"transformer.h.0.mlp.c_fc.weight\", which a GPT-2 with layers=1 needs"},
      {1, "wte.weight", 5, 0, NULL, G2Z_FORMAT, "shape [5, 8], but the model needs [3, 8]"},
      {0, "ln_f.weight", 16, 0, NULL, G2Z_FORMAT, "\"ln_f.weight\" has the shape [16]"},
#define UNKNOWN(name) \
  {0, NULL, 0, 0, name, G2Z_FORMAT, name "\", which a GPT-2 with layers=1 does not have"}
      UNKNOWN("h.1.ln_1.weight"), UNKNOWN("score.weight"), UNKNOWN("h.0.attn.bias2"),
      UNKNOWN("h..attn.bias"), UNKNOWN("h.0.attn.biases"), UNKNOWN("transformer.h.0"),
#undef UNKNOWN
      {0, NULL, 0, 0, "transformer.ln_f.bias", G2Z_FORMAT,
       "has both \"transformer.ln_f.bias\" and \"ln_f.bias\""}};
  const g2z_train_config config = test_config_of(1, 1, 8, 4, 3);
  float values[2][16 + 872 + 56];
  g2z__safetensor extra[4];
  test_trainer tt;
#define READ(i) test_weights_load(t, &config, t->directory, values[i])
  REQUIRE_OK(t, test_trainer_open(t, &config, &tt));
  CHECK_OK(t, g2z_trainer_save_weights(tt.trainer, test_path(t, "whole")));
  test_sh(t, "cp whole/config.json .");
  memset(extra, 0, sizeof extra);
  extra[0].name = "h.0.attn.bias";
  extra[1].name = "transformer.h.11.attn.masked_bias";
  extra[2].name = "lm_head.weight";
  extra[2].rank = 2;
  extra[2].shape[0] = 3;
  extra[2].shape[1] = 8;
  test_weights_variant(t, 1, NULL, 0, extra, 0);
  CHECK_OK(t, READ(0));
  test_weights_variant(t, 0, NULL, 0, extra, 3);
  CHECK_OK(t, READ(1));
  CHECK(t, memcmp(values[0], values[1], sizeof values[0]) == 0);
  /* A writer may keep only the second of the two names of tied weights. */
  test_weights_variant(t, 1, "wte.weight", 0, extra + 2, 1);
  CHECK_OK(t, READ(1));
  CHECK(t, memcmp(values[0], values[1], sizeof values[0]) == 0);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    const g2z__safetensor *first = bad[i].head ? extra : extra + 3;
    extra[2].begin = bad[i].head < 0; /* untied */
    extra[2].shape[0] = bad[i].head > 0 ? (uint64_t)bad[i].head : 3;
    extra[3].name = bad[i].extra;
    test_weights_variant(t, bad[i].prefix, bad[i].change, bad[i].rows, first,
                         bad[i].head ? 3 : bad[i].extra != NULL);
    CHECK_STATUS(t, READ(0), bad[i].status, &t->services, bad[i].sentence);
  }
  CHECK(t, unlink(test_path(t, "model.safetensors")) == 0);
  CHECK_IO(t, READ(0), "has no model.safetensors");
  test_write_file(t, test_path(t, "pytorch_model.bin"), "", 0);
  CHECK_STATUS(t, READ(0), G2Z_UNSUPPORTED, &t->services, "safe_serialization=True");
#undef READ
}

static void test_weights_configs(g2z_test *t) {
  g2z_services *services = &t->services;
  g2z_model_config model;
#define SIZES "\"n_layer\":12,\"n_head\":12,\"n_embd\":768,\"n_positions\":1024," \
              "\"vocab_size\":50257"
  static const char *const good[] = { /* the first: OpenAI's published config */
      "{\"activation_function\":\"gelu_new\",\"architectures\":[\"GPT2LMHeadModel\"],"
      "\"attn_pdrop\":0.1,\"bos_token_id\":50256,\"initializer_range\":0.02,"
      "\"layer_norm_epsilon\":1e-05,\"model_type\":\"gpt2\",\"n_ctx\":1024," SIZES ","
      "\"summary_activation\":null,"
      "\"task_specific_params\":{\"text-generation\":{\"do_sample\":true,\"max_length\":50}}}",
      "{\"num_hidden_layers\":12,\"num_attention_heads\":12,\"hidden_size\":768,"
      "\"max_position_embeddings\":1024,\"vocab_size\":50257}",
      "{" SIZES "}", "{" SIZES ",\"n_inner\":null}", "{" SIZES ",\"n_inner\":3072}",
      "{" SIZES ",\"eos_token_id\":50256}", "{" SIZES ",\"eos_token_id\":[0, 7]}",
      "{" SIZES ",\"eos_token_id\":null}", "{" SIZES ",\"eos_token_id\":-1}",
      "{" SIZES ",\"activation_function\":\"gelu_pytorch_tanh\",\"layer_norm_epsilon\":0.00001}"};
  static const struct { const char *text; g2z_status status; const char *sentence; } bad[] = {
      {"", G2Z_FORMAT, "config.json, column 1: expected an object"},
      {"{", G2Z_FORMAT, "found the text's end: correct it, or copy it again"},
      {"{}", G2Z_FORMAT, "has no n_layer, or 0, so it is no config of a GPT-2: copy the "},
      {"{" SIZES ",\"n_head\":0}", G2Z_FORMAT, "has no n_head, or 0"},
      {"{" SIZES ",\"n_head\":-1}", G2Z_FORMAT, "n_head=-1 must be between 0 and 2147483647"},
      {"{" SIZES ",\"vocab_size\":2147483648}", G2Z_FORMAT, "vocab_size=2147483648 must be"},
      {"{" SIZES ",\"n_embd\":\"768\"}", G2Z_FORMAT, "expected an integer, found '\"'"},
      {"{" SIZES ",\"n_embd\":7.5}", G2Z_FORMAT, "7.5 is not an integer"},
      {"{" SIZES ",\"n_inner\":768}", G2Z_UNSUPPORTED, "= 3072: take a GPT-2 as publish"},
      {"{" SIZES ",\"n_head\":5}", G2Z_BAD_ARGUMENT, "heads=5"},
      {"{" SIZES ",\"model_type\":\"llama\"}", G2Z_FORMAT, "model_type is \"llama\", but"},
      {"{" SIZES ",\"activation_function\":\"relu\"}", G2Z_FORMAT, "_function is \"relu\""},
      {"{" SIZES ",\"layer_norm_epsilon\":1e-6}", G2Z_FORMAT, "is 1e-06, not 1e-05: take a"},
      {"{" SIZES ",\"scale_attn_weights\":false}", G2Z_FORMAT, "scale_attn_weights is false"},
      {"{" SIZES ",\"scale_attn_by_inverse_layer_idx\":true}", G2Z_FORMAT, "_layer_idx is true"},
      {"{" SIZES ",\"reorder_and_upcast_attn\":true}", G2Z_FORMAT, "upcast_attn is true"},
      {"{" SIZES ",\"add_cross_attention\":true}", G2Z_FORMAT, "add_cross_attention is true"},
      {"{" SIZES ",\"vocab_hash\":\"0123456789abcde\"}", G2Z_FORMAT, "hexadecimal digits: remove it"},
      {"{" SIZES ",\"tie_word_embeddings\":false}", G2Z_FORMAT, "tie_word_embeddings is false"}};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    test_write_file(t, test_path(t, "config.json"), good[i], strlen(good[i]));
    CHECK_OK(t, g2z_weights_config(services, t->directory, &model));
    g2z_model_config want = g2z_train_config_default(G2Z_DEVICE_CPU).model;
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
  CHECK_IO(t, g2z_weights_config(services, test_path(t, "no"), &model),
           "no/config.json: No such file");
#undef SIZES
}
