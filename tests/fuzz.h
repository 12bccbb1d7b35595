/* Targets for libFuzzer with AddressSanitizer and UBSan, one per file format: `make fuzz` builds
 * one program each. test_gpt2.cu includes them in place of the tests. "internals" marks code that
 * uses private names of the header. */

#include <sys/mman.h>

static void fuzz_check(int condition) {
  if (!condition) __builtin_trap();
}

/* Reads the whole value, recursively as callers do. */
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
    case 'f':
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

/* Any bytes through the JSON reader. If a typed walk accepts them, skip accepts them too, and the
 * text written from them is accepted again. */
static int fuzz_json(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2z_json json;
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

/* Any bytes as an experiment's file. An accepted file can be shown. */
static void fuzz_summary_line(void *user, const char *text) { *(size_t *)user += strlen(text); }
static int fuzz_summary(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2z_summary *summary;
  size_t shown = 0;
  const g2z_object file = {&services, (char *)"fuzz", (char *)data, size};
  g2z_json json;
  g2z_json_open(&json, &services, "fuzz", data, size); /* g2z_object_read refuses other bytes */
  g2z_json_skip(&json);
  if (g2z_json_close(&json) != G2Z_OK) return 0;
  fuzz_check(g2z_summary_create(&services, "point", &summary) == G2Z_OK);
  if (g2zx_get_summary(&file, summary) == G2Z_OK) {
    g2z_summary_print(summary, fuzz_summary_line, &shown);
    fuzz_check(summary->count > 0 && shown > 0);
  } else fuzz_check(strlen(services.error) > 0);
  g2z_summary_free(summary);
  return 0;
}

/* Any bytes as a vocabulary file. An accepted vocabulary encodes the same bytes as a text. */
static int fuzz_vocab(const uint8_t *data, size_t bytes) {
  g2z_services services = {0};
  g2z_tokenizer *tokenizer;
  g2z_encoder *encoder;
  g2z_tokens tokens = {0};
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

/* Any bytes as a text: train on it, cut, encode and decode it, and check the invariants of each. */
static int fuzz_encode(const uint8_t *data, size_t bytes) {
  g2z_services services = {0};
  g2z_bpe_trainer *trainer;
  g2z_tokenizer *tokenizer;
  g2z_encoder *encoder;
  g2z_tokens whole = {0}, other;
  char *text;
  size_t length, cut = g2z_encode_cut(data, bytes);
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
  /* The decoded text is valid and encodes to the same ids. */
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
  g2z_services services = {0};
  g2z_loader_config config = {0};
  g2z_loader *loader;
  char path[64];
  if (size < 4) return 0;
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
    fuzz_check(loader->steps_per_epoch >= 1);
    g2z_loader_position position = {data[2], data[3] % loader->steps_per_epoch};
    fuzz_check(g2z_loader_seek(loader, position) == G2Z_OK);
    for (int step = 0; step < 4 && status == G2Z_OK; step++) {
      const int32_t *x, *y;
      if (step == 1 && data[2] & 1) fuzz_check(ftruncate(file, (off_t)(size - 4) * data[3] / 256) == 0);
      status = g2z_loader_next(loader, &x, &y);
      for (int64_t i = 0; status == G2Z_OK && i < rows * config.seq; i++) {
        const int fills = config.order == G2Z_ORDER_FILE; /* with targets of -1 */
        fuzz_check(x[i] >= 0 && x[i] < config.vocab && y[i] >= -fills && y[i] < config.vocab);
        if ((i + 1) % config.seq && y[i + 1] >= 0) fuzz_check(y[i] == x[i + 1]);
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
  for (size_t i = 0; i < count; i++) sum += (double)values[i]; /* the sanitizer checks each value */
  fuzz_check(canonical == *next && (sum == sum || sum != sum));
  *next += count;
  return G2Z_OK;
}

static void fuzz_clean(void) {
  static const char *const names[] = {"config.json", "model.safetensors", "metrics.jsonl",
                                      "training_metrics.json", "report.html", "a.bin", "a.mask"};
  char path[128];
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    snprintf(path, sizeof path, "%s/%s", fuzz_directory, names[i]);
    unlink(path);
  }
  rmdir(fuzz_directory);
}

/* In memory, removed at the end. */
static void fuzz_make_directory(void) {
  if (fuzz_directory[0]) return;
  snprintf(fuzz_directory, sizeof fuzz_directory, "/dev/shm/g2z_fuzz_%d", (int)getpid());
  fuzz_check(mkdir(fuzz_directory, 0700) == 0);
  atexit(fuzz_clean);
}

/* internals */
/* Any bytes as the mask of a shard of 100 tokens. The first byte selects: if it is even, the right
 * header comes before the rest. */
static int fuzz_mask(const uint8_t *data, size_t size) {
  static const uint8_t head[16] = {'m', 'a', 's', 'k', 1, 0, 0, 0, 100};
  static uint8_t mask[4096];
  g2z_services services;
  g2z_loader_config config;
  g2z_loader *loader;
  const int32_t *x, *y;
  char path[128];
  uint16_t tokens[100];
  uint64_t hash = G2Z__HASH;
  if (size < 1 || size > 4000) return 0;
  memset(&services, 0, sizeof services);
  memset(&config, 0, sizeof config);
  for (uint16_t i = 0; i < 100; i++) tokens[i] = i;
  fuzz_make_directory();
  fuzz_put("a.bin", (const uint8_t *)tokens, sizeof tokens);
  snprintf(path, sizeof path, "%s/a.bin", fuzz_directory);
  int file = open(path, O_RDONLY), begin = data[0] % 2 ? 0 : 24;
  fuzz_check(file >= 0 && g2z__shard_hash(file, 0, 100, &hash));
  close(file);
  memcpy(mask, head, sizeof head);
  memcpy(mask + 16, &hash, sizeof hash);
  memcpy(mask + begin, data + 1, size - 1);
  fuzz_put("a.mask", mask, (size_t)begin + size - 1);
  config.glob = path;
  config.batch = config.accum = config.world = 1;
  config.seq = 9;
  config.vocab = 100;
  g2z_status status = g2z_loader_create(&services, &config, &loader);
  fuzz_check(status == G2Z_OK || services.error[0]);
  fuzz_check(status == G2Z_OK || begin == 0 || size - 1 != 13 ||
             strstr(services.error, "no token counts"));
  for (int step = 0; step < 11 && status == G2Z_OK; step++) {
    fuzz_check(g2z_loader_next(loader, &x, &y) == G2Z_OK);
    for (int i = 0; i < 9; i++) {
      int next = 9 * step + i + 1, counts = mask[24 + next / 8] >> next % 8 & 1;
      fuzz_check(x[i] == next - 1 && y[i] == (counts ? next : -1));
    }
  }
  g2z_loader_free(loader);
  return 0;
}

/* Any bytes as model.safetensors (first byte even) or config.json (odd). */
static int fuzz_safetensors(const uint8_t *data, size_t size) {
  const g2z_model_config tiny = {1, 1, 8, 4, 3, 2, 0};
  g2z_services services = {0};
  g2z_model_config model;
  g2z__safetensors *file;
  fuzz_make_directory();
  if (size < 1) return 0;
  if (data[0] & 1) {
    fuzz_put("config.json", data + 1, size - 1);
    g2z_status status = g2z_weights_config(&services, fuzz_directory, &model);
    fuzz_check(status == G2Z_OK ? g2z__model_config_check(&services, &model) == G2Z_OK
                           : model.layers == 0 && services.error[0]);
    return 0;
  }
  fuzz_put("model.safetensors", data + 1, size - 1);
  char path[128];
  snprintf(path, sizeof path, "%s/model.safetensors", fuzz_directory);
  g2z_status status = g2z__safetensors_open(&services, path, &file);
  fuzz_check((status == G2Z_OK) == (file != NULL));
  uint64_t bytes = 0;
  for (int i = 0; file && i < (int)file->count; i++) {
    g2z__safetensor tensor = file->tensors[i];
    fuzz_check(g2z__safetensors_find(file, tensor.name) == i);
    fuzz_check(tensor.begin + tensor.bytes <= size - 1 && tensor.elements <= tensor.bytes);
    bytes += tensor.bytes;
    float *values = (float *)malloc(tensor.elements ? tensor.elements * sizeof(float) : 1);
    status = g2z__safetensors_read(file, i, 0, tensor.elements, values);
    fuzz_check(status == G2Z_OK || status == G2Z_UNSUPPORTED);
    free(values);
  }
  fuzz_check(!file || bytes <= size);
  g2z__safetensors_free(file);
  size_t next = 0;
  status = g2z__weights_read(&services, fuzz_directory, &tiny, fuzz_take, &next);
  fuzz_check(status == G2Z_OK ? next == 944 : services.error[0] != 0);
  return 0;
}

/* internals */
/* trainer_state.json as it is parsed after its checksum is verified. */
static int fuzz_state(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2z__saved saved = {0};
  g2z_status status = g2z__saved_parse(&services, "state", (const char *)data, size, &saved);
  fuzz_check(status == G2Z_OK || services.error[0]);
  g2z_loader loader = {0};
  loader.config.seq = 1;
  loader.sequences = saved.sequences;
  loader.global = 7;
  if (status == G2Z_OK) fuzz_check(g2z__saved_position(&saved, &loader).step >= 0);
  g2z__saved_free(&services, &saved);
  return 0;
}

/* internals */
/* CHECKSUMS, with a last line that matches. */
static int fuzz_checksums(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2z__saved saved = {0};
  char *text = (char *)malloc(size + 64);
  if (!text) return 0;
  if (size) memcpy(text, data, size);
  size_t lines = 0;
  for (size_t i = 0; i < size; i++) lines += data[i] == '\n';
  const int last = snprintf(text + size, 64, "%08" PRIx32 " %zu lines\n",
                            g2z_crc32c(0, data, size), lines);
  g2z_status status = g2z__sums_parse(&services, "sums", text, size + (size_t)last, &saved);
  fuzz_check(status == G2Z_OK || services.error[0]);
  for (size_t i = 0; status == G2Z_OK && i < saved.sum_count; i++) {
    const g2z__sum *sum = &saved.sums[i];
    fuzz_check(sum->name[0] && !strchr(sum->name, '/') && strlen(sum->name) < sizeof sum->name);
    fuzz_check(sum->bytes <= INT64_MAX && sum->begin <= INT64_MAX - sum->bytes);
  }
  g2z__saved_free(&services, &saved);
  free(text);
  return 0;
}

/* internals */
/* The note of a run as it is parsed after its checksum is verified. */
static int fuzz_note(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2z_run run = {0};
  char *text = (char *)malloc(size + 1);
  if (!text) return 0;
  if (size) memcpy(text, data, size);
  text[size] = 0;
  run.services = &services;
  run.from.note = text;
  run.steps = 10;
  g2z_status status = g2zr_restore(&run);
  fuzz_check(status == G2Z_OK ? run.epoch_count > 0 : services.error[0] != 0);
  g2z_release(&services, run.epoch);
  g2z_release(&services, run.step_s);
  free(text);
  return 0;
}

/* Any bytes as the output of `nsys stats`. */
static int fuzz_stats(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2zp_profile profile = {0};
  char *text = (char *)malloc(size + 1);
  if (!text) return 0;
  if (size) memcpy(text, data, size);
  text[size] = 0;
  profile.services = &services;
  g2z_status status = g2zp_stats_read(&profile, "stats", text);
  fuzz_check(status == G2Z_OK || services.error[0]);
  for (int kind = 0; kind < 2; kind++)
    for (int i = 0; i < profile.count[kind]; i++) {
      const g2zp_ranked *row = &profile.top[kind][i];
      fuzz_check(row->percent >= 0 && row->percent <= 100 && row->line[row->name_at]);
      fuzz_check(i == 0 || row->percent <= profile.top[kind][i - 1].percent);
      fuzz_check(row->line >= text && row->line + strlen(row->line) <= text + size);
    }
  free(text);
  return 0;
}

/* The first two bytes give the end of metrics.jsonl and the start of training_metrics.json. */
static int fuzz_report(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  char *text = NULL;
  size_t bytes = 0;
  char path[128];
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
