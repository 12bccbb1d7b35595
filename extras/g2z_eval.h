/* g2z_eval.h: how well a model predicts a file, beside gpt2_zero.h and g2z_text.h. MIT licence.
 *
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_eval.h"                                      // this order; g2z_text.h beside it
 *     g2z_eval result;
 *     status = g2z_eval_file(model, tokenizer, "hellaswag_val.bin", NULL, NULL, &result);
 *
 * FILES, told apart by their first bytes and their names
 *     questions   llm.c's file of multiple choices (HellaSwag): 256 int32 20240522, 1, count,
 *                 longest; then for each question uint16 65535, its bytes, its number, the right
 *                 ending, the number of endings, and lengths with tokens: the context's, each
 *                 ending's
 *     shards      tokens, as prepare_data, llm.c and nanoGPT write them: *.bin
 *     .jsonl      a document for each line: its "text"
 *     text        anything else
 * Tokens are predicted in windows of the model's context that do not overlap. A text or document
 * begins behind the end-of-text token; of shards the first token is not predicted.
 *
 * Names that begin with g2ze_ are private. */

#ifndef G2Z_EVAL_INCLUDED
#define G2Z_EVAL_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_eval.h: include gpt2_zero.h before it"
#endif

#include "g2z_text.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct g2z_eval {
  int64_t tokens;               /* predicted */
  double loss, perplexity;      /* mean over them; of questions over the tokens of all endings */
  double bits_per_byte;         /* NaN: how many bytes they are is not known, as of shards */
  int64_t questions;            /* 0: the file has none */
  double acc;                   /* share of questions whose right ending is the likeliest */
  double acc_norm;              /* the same by likelihood per token, as llm.c counts */
  double acc_norm_bytes;        /* and per byte, as the EleutherAI harness; NaN: no tokenizer */
} g2z_eval;
/* tokenizer may be NULL where the file holds tokens. `progress` (or NULL) hears the share that is
 * done, now and then. */
G2Z_API g2z_status g2z_eval_file(g2z_model *model, const g2z_tokenizer *tokenizer,
                                 const char *path, void (*progress)(void *user, double share),
                                 void *user, g2z_eval *out);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_EVAL_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_EVAL_IMPLEMENTED)
#define G2Z_EVAL_IMPLEMENTED

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define G2ZE_TRY(call)                             \
  do {                                             \
    g2z_status try_status_ = (call);               \
    if (try_status_ != G2Z_OK) return try_status_; \
  } while (0)

#define G2ZE_ROWS 128           /* that are scored together */
#define G2ZE_ENDINGS 16         /* of a question, at most */
#define G2ZE_FILE_MAX ((size_t)1 << 32)

#ifdef __cplusplus
extern "C" {
#endif

typedef struct g2ze_row {       /* a window, or a question's context and one of its endings */
  int tokens;                   /* that are predicted or read: its length less one */
  int64_t counted;
  double sum;                   /* of its losses, once it was scored */
} g2ze_row;

typedef struct g2ze_state {
  g2z_model *model;
  g2z_services *services;
  const g2z_tokenizer *tokenizer;
  const char *path;
  void (*progress)(void *user, double share);
  void *user;
  g2ze_row rows[G2ZE_ROWS];
  int count;
  int32_t *tokens, *targets;    /* [G2ZE_ROWS, context] */
  float *losses;
  double sum;                   /* of all rows so far */
  int64_t counted, bytes;
} g2ze_state;

/* Scores the rows that wait. They move together until the longest fits beside the next. */
static g2z_status g2ze_flush(g2ze_state *s) {
  const size_t context = (size_t)s->model->config.context;
  size_t T = 0;
  double mean;
  for (int i = 0; i < s->count; i++)
    if ((size_t)s->rows[i].tokens > T) T = (size_t)s->rows[i].tokens;
  for (size_t i = 0; i < (size_t)s->count; i++) {
    size_t n = (size_t)s->rows[i].tokens;
    memmove(s->tokens + i * T, s->tokens + i * context, n * sizeof *s->tokens);
    memmove(s->targets + i * T, s->targets + i * context, n * sizeof *s->targets);
    for (size_t t = n; t < T; t++) s->tokens[i * T + t] = 0, s->targets[i * T + t] = -1;
  }
  if (s->count)
    G2ZE_TRY(g2z_model_score(s->model, s->tokens, s->targets, s->count, (int)T, s->losses, &mean));
  for (size_t i = 0; i < (size_t)s->count; i++) {
    s->rows[i].sum = 0;
    for (size_t t = 0; t < T; t++) s->rows[i].sum += (double)s->losses[i * T + t];
    s->sum += s->rows[i].sum;
    s->counted += s->rows[i].counted;
  }
  s->count = 0;
  return G2Z_OK;
}

/* A row of ids[0 .. count): those from `first` on are predicted. There is room for it. */
static g2z_status g2ze_add(g2ze_state *s, const int32_t *ids, size_t count, size_t first) {
  const size_t context = (size_t)s->model->config.context;
  g2ze_row *row = &s->rows[s->count];
  int32_t *tokens = s->tokens + (size_t)s->count * context;
  int32_t *targets = s->targets + (size_t)s->count * context;
  if (count > context + 1) { /* what is predicted stands at the end */
    ids += count - (context + 1);
    first = first > count - (context + 1) ? first - (count - (context + 1)) : 1;
    count = context + 1;
  }
  row->tokens = (int)(count - 1);
  row->counted = (int64_t)(count - first);
  for (size_t t = 0; t + 1 < count; t++) {
    tokens[t] = ids[t];
    targets[t] = t + 1 < first ? -1 : ids[t + 1];
  }
  s->count++;
  return G2Z_OK;
}

/* ids[0 .. count) in windows; the first is not predicted. */
static g2z_status g2ze_windows(g2ze_state *s, const int32_t *ids, size_t count) {
  const size_t context = (size_t)s->model->config.context;
  for (size_t at = 0; at + 1 < count; at += context) {
    size_t n = count - at < context + 1 ? count - at : context + 1;
    if (s->count == G2ZE_ROWS) G2ZE_TRY(g2ze_flush(s));
    G2ZE_TRY(g2ze_add(s, ids + at, n, 1));
    if (s->progress && count > 100 * context) s->progress(s->user, (double)at / (double)count);
  }
  return G2Z_OK;
}

/* ----- text and documents --------------------------------------------------- */

static g2z_status g2ze_document(g2ze_state *s, g2z_encoder *encoder, const void *text,
                                size_t bytes) {
  g2z_tokens ids;
  memset(&ids, 0, sizeof ids);
  G2ZE_TRY(g2z_tokens_reserve(s->services, &ids, 1));
  ids.ids[ids.count++] = g2z_tokenizer_eot(s->tokenizer);
  g2z_status status = g2z_encode(encoder, text, bytes, G2Z_ENCODE_DEFAULT, &ids);
  s->bytes += (int64_t)bytes;
  if (status == G2Z_OK) status = g2ze_windows(s, ids.ids, ids.count);
  g2z_tokens_free(&ids);
  return status;
}

/* A line's "text"; a line without one is an error. */
static g2z_status g2ze_line(g2ze_state *s, g2z_encoder *encoder, char *line, size_t bytes,
                            int number) {
  g2z_json json;
  g2z_json_text key, text = {NULL, 0, NULL};
  char label[700];
  snprintf(label, sizeof label, "%.600s, line %d", s->path, number);
  g2z_json_open(&json, s->services, label, line, bytes);
  if (g2z_json_enter(&json, '{'))
    while (g2z_json_next(&json, '}', &key)) {
      if (g2z_json_is(&key, "text")) text = g2z_json_string(&json);
      else g2z_json_skip(&json);
    }
  G2ZE_TRY(g2z_json_close(&json));
  if (!text.at)
    return g2z_fail(s->services, G2Z_FORMAT, "%s has no \"text\": each line of a .jsonl file is a "
                    "JSON object with that key", label);
  unsigned char *plain = (unsigned char *)line;
  return g2ze_document(s, encoder, plain, g2z_json_unescape(&text, plain));
}

static g2z_status g2ze_lines(g2ze_state *s, g2z_encoder *encoder, char *text, size_t bytes) {
  int number = 1;
  for (size_t at = 0, n; at < bytes; at += n + 1, number++) {
    const char *end = (const char *)memchr(text + at, '\n', bytes - at);
    n = end ? (size_t)(end - (text + at)) : bytes - at;
    if (s->progress && number % 100 == 0) s->progress(s->user, (double)at / (double)bytes);
    if (strspn(text + at, " \t\r") < n) G2ZE_TRY(g2ze_line(s, encoder, text + at, n, number));
  }
  return G2Z_OK;
}

static g2z_status g2ze_text(g2ze_state *s, char *text, size_t bytes) {
  const char *dot = strrchr(s->path, '.');
  g2z_encoder *encoder;
  if (!s->tokenizer)
    return g2z_fail(s->services, G2Z_BAD_ARGUMENT, "%s is text, and there is no vocabulary to read "
                    "it with: name one with --vocab", s->path);
  G2ZE_TRY(g2z_encoder_create(s->services, s->tokenizer, &encoder));
  int lines = dot && (strcmp(dot, ".jsonl") == 0 || strcmp(dot, ".ndjson") == 0);
  g2z_status status = lines ? g2ze_lines(s, encoder, text, bytes)
                            : g2ze_document(s, encoder, text, bytes);
  if (status == G2Z_OK) status = g2ze_flush(s);
  g2z_encoder_free(encoder);
  return status;
}

/* ----- tokens ----------------------------------------------------------------- */

static g2z_status g2ze_shard(g2ze_state *s, const char *text, size_t bytes, size_t begin) {
  size_t count = (bytes - begin) / 2;
  void *memory;
  G2ZE_TRY(g2z_allocate(s->services, count + 1, sizeof(int32_t), &memory));
  int32_t *ids = (int32_t *)memory;
  for (size_t i = 0; i < count; i++) {
    uint16_t token;
    memcpy(&token, text + begin + 2 * i, sizeof token);
    ids[i] = token;
  }
  g2z_status status = g2ze_windows(s, ids, count);
  if (status == G2Z_OK) status = g2ze_flush(s);
  g2z_release(s->services, memory);
  return status;
}

/* ----- questions -------------------------------------------------------------- */

typedef struct g2ze_reader {    /* of a file of uint16 */
  const char *text;
  size_t at, end;               /* in uint16 */
} g2ze_reader;

/* -1 at the end. */
static int g2ze_next(g2ze_reader *r) {
  uint16_t word;
  if (r->at == r->end) return -1;
  memcpy(&word, r->text + 2 * r->at++, sizeof word);
  return word;
}

/* A length and as many tokens behind ids[count); returns how many there are then, or 0. */
static size_t g2ze_tokens(g2ze_reader *r, int32_t *ids, size_t count) {
  int length = g2ze_next(r);
  if (length <= 0 || (size_t)length > r->end - r->at) return 0;
  for (int i = 0; i < length; i++) ids[count++] = g2ze_next(r);
  return count;
}

/* The bytes of an ending without the space that it begins with; 0 without a tokenizer. */
static double g2ze_bytes(const g2ze_state *s, const int32_t *ids, size_t count) {
  size_t sum = 0, bytes;
  for (size_t i = 0; s->tokenizer && i < count; i++) {
    const unsigned char *token = g2z_tokenizer_token(s->tokenizer, ids[i], &bytes);
    sum += i == 0 && bytes > 1 && token[0] == ' ' ? bytes - 1 : bytes;
  }
  return (double)sum;
}

/* One question: its rows, and which ending each measure takes. ids: room for two rows. */
static g2z_status g2ze_question(g2ze_state *s, g2ze_reader *r, int32_t *ids, int right[3]) {
  double bytes[G2ZE_ENDINGS];
  const size_t begin = r->at;
  const int mark = g2ze_next(r), size = g2ze_next(r), number = g2ze_next(r);
  const int label = g2ze_next(r), endings = g2ze_next(r);
  size_t context = g2ze_tokens(r, ids, 0);
  int whole = mark == 65535 && endings > 0 && endings <= G2ZE_ENDINGS && label < endings && context;
  for (int i = 0; i < endings && whole; i++) {
    size_t count = g2ze_tokens(r, ids, context);
    whole = count > 0;
    if (!whole) break;
    bytes[i] = g2ze_bytes(s, ids + context, count - context);
    G2ZE_TRY(g2ze_add(s, ids, count, context));
  }
  if (!whole || size != (int)(2 * (r->at - begin)))
    return g2z_fail(s->services, G2Z_FORMAT, "%s is damaged at byte %zu, in the question behind "
                    "number %d: make it again with llm.c's dev/data/hellaswag.py", s->path,
                    1024 + 2 * begin, number);
  G2ZE_TRY(g2ze_flush(s));
  for (int by = 0; by < 3; by++) {
    int best = 0;
    double least = INFINITY;
    for (int i = 0; i < endings; i++) {
      double per = by == 0 ? 1 : by == 1 ? (double)s->rows[i].counted : bytes[i];
      if (s->rows[i].sum / per < least) least = s->rows[i].sum / per, best = i;
    }
    right[by] = best == label;
  }
  return G2Z_OK;
}

static g2z_status g2ze_questions(g2ze_state *s, const char *text, size_t bytes, int count,
                                 g2z_eval *out) {
  g2ze_reader reader = {text + 1024, 0, (bytes - 1024) / 2};
  int64_t sums[3] = {0, 0, 0};
  void *memory;
  G2ZE_TRY(g2z_allocate(s->services, 2 * 65536, sizeof(int32_t), &memory));
  g2z_status status = G2Z_OK;
  for (int i = 0; i < count && status == G2Z_OK; i++) {
    int right[3] = {0, 0, 0};
    status = g2ze_question(s, &reader, (int32_t *)memory, right);
    for (int by = 0; by < 3; by++) sums[by] += right[by];
    if (s->progress && i % 20 == 0) s->progress(s->user, (double)i / count);
  }
  g2z_release(s->services, memory);
  out->questions = count;
  out->acc = (double)sums[0] / count;
  out->acc_norm = (double)sums[1] / count;
  out->acc_norm_bytes = s->tokenizer ? (double)sums[2] / count : NAN;
  return status;
}

/* ----- a file ------------------------------------------------------------------ */

static g2z_status g2ze_read(g2ze_state *s, char *text, size_t bytes, g2z_eval *out) {
  const char *dot = strrchr(s->path, '.');
  int32_t head[4] = {0, 0, 0, 0};
  if (bytes >= 1024) memcpy(head, text, sizeof head);
  if (head[0] == 20240522 && (head[1] != 1 || head[2] < 1))
    return g2z_fail(s->services, G2Z_FORMAT, "%s holds %d questions in version %d: there must be "
                    "some, in version 1", s->path, (int)head[2], (int)head[1]);
  if (head[0] == 20240522) return g2ze_questions(s, text, bytes, head[2], out);
  if (head[0] == 20240520) return g2ze_shard(s, text, bytes, 1024);
  if (dot && strcmp(dot, ".bin") == 0) return g2ze_shard(s, text, bytes, 0);
  return g2ze_text(s, text, bytes);
}

G2Z_API g2z_status g2z_eval_file(g2z_model *model, const g2z_tokenizer *tokenizer,
                                 const char *path, void (*progress)(void *user, double share),
                                 void *user, g2z_eval *out) {
  g2ze_state s;
  char *text;
  size_t bytes, room = G2ZE_ROWS * (size_t)model->config.context;
  void *memory;
  memset(&s, 0, sizeof s);
  memset(out, 0, sizeof *out);
  s.model = model;
  s.services = model->services;
  s.tokenizer = tokenizer;
  s.path = path;
  s.progress = progress;
  s.user = user;
  if (tokenizer && g2z_tokenizer_vocab(tokenizer) > model->config.vocab)
    return g2z_fail(s.services, G2Z_BAD_ARGUMENT, "the vocabulary has %d tokens and the model %d: "
                    "take the one that the model was trained with", g2z_tokenizer_vocab(tokenizer),
                    model->config.vocab);
  G2ZE_TRY(g2z_read_file(s.services, path, G2ZE_FILE_MAX, &text, &bytes));
  g2z_status status = g2z_allocate(s.services, 3 * room, sizeof(int32_t), &memory);
  s.tokens = (int32_t *)memory;
  if (status == G2Z_OK) {
    s.targets = s.tokens + room;
    s.losses = (float *)(s.targets + room);
    status = g2ze_read(&s, text, bytes, out);
    g2z_release(s.services, memory);
  }
  g2z_release(s.services, text);
  G2ZE_TRY(status);
  if (!s.counted)
    return g2z_fail(s.services, G2Z_BAD_ARGUMENT, "%s has no token that could be predicted", path);
  out->tokens = s.counted;
  out->loss = s.sum / (double)s.counted;
  out->perplexity = exp(out->loss);
  out->bits_per_byte = s.bytes ? s.sum / log(2.0) / (double)s.bytes : NAN;
  return G2Z_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_EVAL_IMPLEMENTED */
