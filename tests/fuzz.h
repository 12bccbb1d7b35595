/* Targets for libFuzzer with AddressSanitizer and UBSan, one per file format: `make fuzz` builds
 * one program each. test_gpt2.cu includes them in place of the tests. */

#include <sys/mman.h>

static void fuzz_check(int condition) {
  if (!condition) __builtin_trap();
}

/* A failure has a sentence. */
static void fuzz_said(g2z_status status, const g2z_services *services) {
  fuzz_check(status == G2Z_OK || services->error[0]);
}

/* The input as a text, freed by the caller. */
static char *fuzz_text(const uint8_t *data, size_t size) {
  char *text = (char *)calloc(1, size + 1);
  fuzz_check(text != NULL);
  if (size) memcpy(text, data, size);
  return text;
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
        char *name = fuzz_text(out, bytes);
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
  fuzz_said(skipped, &services);
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

/* The ids are equal; *b is emptied. */
static void fuzz_equal(const g2z_tokens *a, g2z_tokens *b) {
  fuzz_check(a->count == b->count);
  fuzz_check(a->count == 0 || memcmp(a->ids, b->ids, a->count * sizeof *a->ids) == 0);
  b->count = 0;
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
  fuzz_check(g2z_bpe_trainer_feed(trainer, data, bytes, 0) == G2Z_OK);
  int vocab = 257 + (bytes ? data[0] : 0);
  fuzz_check(g2z_bpe_trainer_finish(trainer, vocab, &tokenizer) == G2Z_OK);
  fuzz_check(g2z_tokenizer_vocab(tokenizer) <= vocab);
  fuzz_check(g2z_encoder_create(&services, tokenizer, &encoder) == G2Z_OK);
  fuzz_append(encoder, data, bytes, G2Z_ENCODE_DEFAULT, &whole);
  fuzz_append(encoder, data, cut, G2Z_ENCODE_DEFAULT, &other);
  fuzz_append(encoder, data + cut, bytes - cut, G2Z_ENCODE_DEFAULT, &other);
  fuzz_equal(&whole, &other);
  size_t used;
  fuzz_check(g2z_encode_part(encoder, data, bytes, G2Z_ENCODE_DEFAULT, &other, &used) == G2Z_OK);
  fuzz_check(used <= bytes);
  fuzz_append(encoder, data + used, bytes - used, G2Z_ENCODE_DEFAULT, &other);
  fuzz_equal(&whole, &other);
  /* The decoded text is valid and encodes to the same ids. */
  fuzz_check(g2z_decode(&services, tokenizer, whole.ids, whole.count, &text, &length) == G2Z_OK);
  fuzz_append(encoder, text, length, G2Z_ENCODE_STRICT, &other);
  fuzz_equal(&whole, &other);
  int valid = length == bytes && memcmp(text, data, length) == 0;
  fuzz_check((g2z_encode(encoder, data, bytes, G2Z_ENCODE_STRICT, &other) == G2Z_OK) == valid);
  g2z_release(&services, text);
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
      if (step == 1 && data[2] & 1)
        fuzz_check(ftruncate(file, (off_t)(size - 4) * data[3] / 256) == 0);
      status = g2z_loader_next(loader, &x, &y);
      for (int64_t i = 0; status == G2Z_OK && i < rows * config.seq; i++) {
        const int fills = config.order == G2Z_ORDER_FILE; /* with targets of -1 */
        fuzz_check(x[i] >= 0 && x[i] < config.vocab && y[i] >= -fills && y[i] < config.vocab);
        if ((i + 1) % config.seq && y[i + 1] >= 0) fuzz_check(y[i] == x[i + 1]);
      }
    }
  }
  fuzz_said(status, &services);
  g2z_loader_free(loader);
  close(file);
  return 0;
}

static char fuzz_directory[64];

/* The path of a file in it; valid until the next call. */
static const char *fuzz_path(const char *name) {
  static char path[128];
  snprintf(path, sizeof path, "%s/%s", fuzz_directory, name);
  return path;
}

static void fuzz_put(const char *name, const void *data, size_t size) {
  int file = open(fuzz_path(name), O_RDWR | O_CREAT | O_TRUNC, 0600);
  fuzz_check(file >= 0 && write(file, data, size) == (ssize_t)size);
  close(file);
}

static void fuzz_clean(void) {
  char command[128];
  snprintf(command, sizeof command, "rm -r '%s'", fuzz_directory);
  fuzz_check(system(command) == 0);
}

/* In memory, removed at the end. */
static void fuzz_make_directory(void) {
  if (fuzz_directory[0]) return;
  snprintf(fuzz_directory, sizeof fuzz_directory, "/dev/shm/g2z_fuzz_%d", (int)getpid());
  fuzz_check(mkdir(fuzz_directory, 0700) == 0);
  atexit(fuzz_clean);
}

/* Any bytes as the mask of a shard of 100 tokens. The first byte selects: if it is even, the right
 * header comes before the rest. */
static int fuzz_mask(const uint8_t *data, size_t size) {
  enum { HEAD = 24, TOKENS = 100 };
  static uint8_t mask[HEAD + 4000];
  g2z_services services = {0};
  g2z_loader_config config = {0};
  g2z_shard_writer *writer;
  g2z_loader *loader;
  const int32_t *x, *y;
  int32_t ids[TOKENS];
  if (size < 1 || size > 4000) return 0;
  fuzz_make_directory();
  for (int i = 0; i < TOKENS; i++) ids[i] = i;
  ids[0] |= G2Z_UNCOUNTED;
  fuzz_check(g2z_shard_writer_create(&services, fuzz_path("a.bin"), G2Z_SHARD_RAW, 0, &writer) ==
             G2Z_OK);
  fuzz_check(g2z_shard_writer_append(writer, ids, TOKENS) == G2Z_OK);
  fuzz_check(g2z_shard_writer_commit(writer) == G2Z_OK);
  g2z_shard_writer_free(writer);
  int file = open(fuzz_path("a.mask"), O_RDONLY), begin = data[0] % 2 ? 0 : HEAD;
  fuzz_check(read(file, mask, HEAD) == HEAD);
  close(file);
  memcpy(mask + begin, data + 1, size - 1);
  fuzz_put("a.mask", mask, (size_t)begin + size - 1);
  config.glob = fuzz_path("a.bin");
  config.batch = config.accum = config.world = 1;
  config.seq = 9;
  config.vocab = TOKENS;
  g2z_status status = g2z_loader_create(&services, &config, &loader);
  fuzz_said(status, &services);
  fuzz_check(status == G2Z_OK || begin == 0 || size - 1 != 13 ||
             strstr(services.error, "no token counts"));
  for (int step = 0; step < 11 && status == G2Z_OK; step++) {
    fuzz_check(g2z_loader_next(loader, &x, &y) == G2Z_OK);
    for (int i = 0; i < 9; i++) {
      int next = 9 * step + i + 1, counts = mask[HEAD + next / 8] >> next % 8 & 1;
      fuzz_check(x[i] == next - 1 && y[i] == (counts ? next : -1));
    }
  }
  g2z_loader_free(loader);
  return 0;
}

/* Any bytes as model.safetensors (first byte even) or config.json (odd). */
static int fuzz_safetensors(const uint8_t *data, size_t size) {
  static const char tiny[] = "{\"n_layer\":1,\"n_head\":1,\"n_embd\":8,\"n_positions\":4,"
                             "\"vocab_size\":3}";
  static g2z_services services;
  static g2z_context *context;
  g2z_model_config config;
  g2z_model *model;
  g2z__safetensors *file;
  fuzz_make_directory();
  if (size < 1) return 0;
  services.error[0] = 0;
  if (data[0] & 1) {
    fuzz_put("config.json", data + 1, size - 1);
    g2z_status status = g2z_weights_config(&services, fuzz_directory, &config);
    fuzz_said(status, &services);
    fuzz_check((status == G2Z_OK) == (config.layers > 0));
    fuzz_check(status != G2Z_OK || config.channels % config.heads == 0);
    return 0;
  }
  fuzz_put("model.safetensors", data + 1, size - 1);
  g2z_status status = g2z__safetensors_open(&services, fuzz_path("model.safetensors"), &file);
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
  if (!context) {
    g2z_context_config cc = g2z_context_config_default(&services);
    cc.device = G2Z_DEVICE_CPU;
    fuzz_check(g2z_context_create(&cc, &context) == G2Z_OK);
  }
  fuzz_put("config.json", tiny, sizeof tiny - 1);
  status = g2z_model_open(context, fuzz_directory, G2Z_FP32, &model);
  fuzz_said(status, &services);
  fuzz_check((status == G2Z_OK) == (model != NULL));
  g2z_model_free(model);
  return 0;
}

/* Any bytes as CHECKSUMS (first byte even), whose last line is added, or as trainer_state.json
 * after its version (odd), with its line in CHECKSUMS. */
static int fuzz_checkpoint(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2z_checkpoint saved;
  g2z_loader loader = {0};
  size_t lines = 0;
  if (size < 1) return 0;
  const int is_state = data[0] & 1;
  char *input = fuzz_text(data + 1, size - 1), *state = (char *)malloc(size + 128);
  char *sums = (char *)malloc(size + 128);
  const size_t length = (size_t)sprintf(
      state, "{\"format\": \"gpt2_zero checkpoint\", \"version\": %d%s", G2Z__CHECKPOINT_VERSION,
      is_state ? input : "}");
  size_t at = size - 1;
  memcpy(sums, input, at);
  if (is_state)
    at = (size_t)sprintf(sums, "%08" PRIx32 " %zu 0 trainer_state.json\n",
                         g2z_crc32c(0, state, length), length);
  for (size_t i = 0; i < at; i++) lines += sums[i] == '\n';
  at += (size_t)sprintf(sums + at, "%08" PRIx32 " %zu lines\n", g2z_crc32c(0, sums, at), lines);
  fuzz_make_directory();
  fuzz_put("trainer_state.json", state, length);
  fuzz_put("CHECKSUMS", sums, at);
  const char *sequences = strstr(input, "\"sequences\":");
  loader.config.seq = 1;
  loader.sequences = sequences ? strtoll(sequences + 12, NULL, 10) : 0;
  loader.global = 7;
  g2z_status status = g2z_checkpoint_read(&services, fuzz_directory, &loader, &saved);
  fuzz_said(status, &services);
  if (status == G2Z_OK) fuzz_check(saved.next.step >= 0);
  /* Accepted lines: names without a slash, and parts of files below 2^63 bytes. */
  const int accepted = !is_state && !strstr(services.error, "CHECKSUMS is damaged");
  for (const char *line = sums, *next; accepted && lines--; line = next + 1) {
    uint64_t bytes, begin;
    next = strchr(line, '\n');
    fuzz_check(sscanf(line, "%*x %" SCNu64 " %" SCNu64 " ", &bytes, &begin) == 2);
    fuzz_check(!memchr(line, '/', (size_t)(next - line)));
    fuzz_check(bytes <= INT64_MAX && begin <= INT64_MAX - bytes);
  }
  free(state);
  free(sums);
  free(input);
  return 0;
}

/* The note of a run as it is parsed after its checksum is verified. */
static int fuzz_note(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2z_run run = {0};
  run.services = &services;
  run.from.note = fuzz_text(data, size);
  run.steps = 10;
  g2z_status status = g2zr_restore(&run);
  fuzz_check(status == G2Z_OK ? run.epoch_count > 0 : services.error[0] != 0);
  free(run.from.note);
  g2z_release(&services, run.epoch);
  g2z_release(&services, run.step_s);
  return 0;
}

/* Any bytes as the output of `nsys stats`. */
static int fuzz_stats(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  g2zp_profile profile = {0};
  char *text = fuzz_text(data, size);
  profile.services = &services;
  fuzz_said(g2zp_stats_read(&profile, "stats", text), &services);
  for (int kind = 0; kind < 2; kind++)
    for (int i = 0; i < profile.count[kind]; i++) {
      const g2zp_ranked *row = &profile.top[kind][i];
      fuzz_check(row->percent >= 0 && row->percent <= 100 && row->line[row->name_at]);
      fuzz_check(i == 0 || row->percent <= profile.top[kind][i - 1].percent);
    }
  free(text);
  return 0;
}

/* The first two bytes give the end of metrics.jsonl and the start of training_metrics.json. */
static int fuzz_report(const uint8_t *data, size_t size) {
  g2z_services services = {0};
  char *text = NULL;
  size_t bytes = 0;
  fuzz_make_directory();
  if (size < 2) return 0;
  size_t cut = (size_t)(data[0] | data[1] << 8) % (size - 1);
  fuzz_put("metrics.jsonl", data + 2, cut);
  fuzz_put("training_metrics.json", data + 2 + cut, size - 2 - cut);
  const char *path = fuzz_path("report.html");
  unlink(path);
  g2z_status status = g2z_report_run(&services, fuzz_directory);
  fuzz_check((status == G2Z_OK) == (access(path, F_OK) == 0));
  if (status != G2Z_OK) return 0;
  fuzz_check(g2z_read_file(&services, path, 1 << 26, &text, &bytes) == G2Z_OK);
  fuzz_check(strlen(text) == bytes && !strstr(text, "<script"));
  g2z_release(&services, text);
  return 0;
}
