/* g2z_eval.h: measures how well a model of gpt2_zero.h predicts a file, and generates text.
 * MIT licence.
 *
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_eval.h"                          // this order
 *     g2z_eval_set *set;  g2z_eval result;
 *     status = g2z_eval_open(services, &model->config, tokenizer, "hellaswag_val.bin", &set);
 *     if (status == G2Z_OK) status = g2z_eval_run(set, model, NULL, NULL, &result);
 *     g2z_eval_free(set);
 *
 * FILES, recognised by their first bytes and their names
 *     questions   llm.c's file of multiple choices (HellaSwag): 256 int32, which begin with
 *                 20240522, 1, number of questions, longest question. Then uint16, per question:
 *                 65535, its bytes, its number, the right ending, the number of endings; then
 *                 length and tokens of the context and of each ending
 *     shards      tokens in a file of prepare_data, llm.c or nanoGPT: *.bin
 *     .jsonl      one document per line, in "text" or else "content"; or one question per line, in
 *                 a format of g2ze_formats, which the first line shows; also .ndjson and .json
 *     text        anything else; .gz and .zst are unpacked
 * Tokens are predicted in windows of the model's context that do not overlap. A text or document
 * follows an end-of-text token. In shards, the first token is not predicted, and neither are tokens
 * that a mask excludes (docs/formats.md).
 *
 * Names that begin with g2ze_ are private. */

#ifndef G2Z_EVAL_INCLUDED
#define G2Z_EVAL_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_eval.h: include gpt2_zero.h before it"
#endif

#include "g2z_report.h"
#include "g2z_text.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct g2z_eval {
  int64_t tokens;               /* number of predicted tokens */
  double loss, perplexity;      /* mean over these tokens; of questions, over all endings */
  double bits_per_byte;         /* NaN: the number of bytes is unknown, as for shards */
  int64_t questions;            /* 0: not a file of questions */
  double acc;                   /* share of questions whose right ending has the lowest loss */
  double acc_norm;              /* the same by loss per character, as in EleutherAI's harness; for
                                 * llm.c's file by loss per token, as in llm.c */
  double acc_bytes;             /* the same by loss per byte, as in the harness: the first space of
                                 * an ending is not counted. NaN: no tokenizer */
} g2z_eval;

typedef struct g2z_eval_set g2z_eval_set; /* a file's tokens, in memory */
/* Reads and checks a file for models of `config`. For a file of tokens, tokenizer may be NULL. */
G2Z_API g2z_status g2z_eval_open(g2z_services *services, const g2z_model_config *config,
                                 const g2z_tokenizer *tokenizer, const char *path,
                                 g2z_eval_set **out);
/* Scores the set. With a trainer's model all ranks make the same call, and each gets the result.
 * `progress` receives the share that is finished; it may be NULL. */
G2Z_API g2z_status g2z_eval_run(g2z_eval_set *set, g2z_model *model,
                                void (*progress)(void *user, double share), void *user,
                                g2z_eval *out);
G2Z_API void g2z_eval_free(g2z_eval_set *set); /* NULL is fine */
/* Formats a result: "loss 3.1234 | perplexity 22.7231 | ...". */
G2Z_API void g2z_eval_text(const g2z_eval *result, char text[200]);

/* Receives generated text: whole characters of UTF-8, without terminal controls. A call with 0
 * bytes means that the model ended the text. If it returns anything except 0, the generation
 * ends. */
typedef int (*g2z_text_put)(void *user, const char *text, size_t bytes);
/* Generates up to `tokens` tokens after a prompt. The prompt "" stands for the end-of-text token.
 * `put` receives the prompt, then the text while it is generated. */
G2Z_API g2z_status g2z_write_text(g2z_model *model, const g2z_tokenizer *tokenizer,
                                  const char *prompt, int tokens, const g2z_sampling *sampling,
                                  g2z_text_put put, void *user);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_EVAL_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_EVAL_IMPLEMENTED)
#define G2Z_EVAL_IMPLEMENTED

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define G2ZE_ROWS 128           /* most rows that are scored together */
#define G2ZE_TOKENS 8192        /* most tokens that are scored together: they keep a CPU busy */
#define G2ZE_ENDINGS 16         /* most endings of a question */
#define G2ZE_FILE_MAX ((size_t)1 << 32)
/* llm.c's files begin with 256 int32. The first one shows the kind of file, the second is 1. */
#define G2ZE_HEADER 1024
#define G2ZE_SHARD 20240520
#define G2ZE_QUESTIONS 20240522
#define G2ZE_QUESTION_MARK 65535 /* begins each question */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct g2ze_row {       /* a window, or a question's context and one of its endings */
  size_t at;                    /* set->tokens.ids[at .. at + count) */
  int count, first;             /* the tokens from number `first` on are predicted */
  int counted;                  /* number of predicted tokens that count in the loss */
  double bytes, length;         /* of an ending; length in characters, for llm.c's file in tokens */
  double sum;                   /* sum of the row's losses, after scoring */
} g2ze_row;

typedef struct g2ze_question {
  size_t row;                   /* the row of its first ending */
  int endings, label;
} g2ze_question;

typedef struct g2ze_format {    /* a format of published questions */
  const char *name;
  const char *field[4];         /* paths of fields; %d is the number of an element. field[0] has the
                                 * name of the right ending */
  const char *row[2];           /* row[i] describes the row of ending i; if row[1] is NULL, row[0]
                                 * describes all. %N stands for field[N]. | is the space between the
                                 * context and the ending. After a sentence with the gap _: < keeps
                                 * its text before the gap, > keeps its text after the gap */
  const char *keys;             /* names of the endings: words; or %3, the elements of field[3] */
} g2ze_format;

struct g2z_eval_set {
  g2z_services *services;
  g2z_model_config config;
  const g2z_tokenizer *tokenizer;
  const char *path;             /* valid while the file is read */
  g2z_tokens tokens;            /* G2Z_UNCOUNTED is set on tokens that a mask excludes */
  g2ze_row *row;
  size_t rows, row_capacity;
  g2ze_question *question;
  size_t questions, question_capacity;
  const g2ze_format *format;    /* format of the questions in a .jsonl file; NULL: documents */
  char *made;                   /* text of a row */
  size_t made_capacity;
  int64_t bytes;                /* length of the text in bytes; 0: unknown */
};

/* Adds the row tokens.ids[at .. at + count), whose tokens are predicted from number `first` on. A
 * row that is longer than the context loses its beginning. A row without a token that counts is
 * not added. */
static g2z_status g2ze_add(g2z_eval_set *s, size_t at, size_t count, size_t first, double bytes) {
  const size_t most = (size_t)s->config.context + 1;
  if (count > most) {
    const size_t cut = count - most;
    at += cut;
    count = most;
    first = first > cut ? first - cut : 1;
  }
  int counted = 0;
  for (size_t i = first; i < count; i++) counted += !(s->tokens.ids[at + i] & G2Z_UNCOUNTED);
  if (!counted) return G2Z_OK;
  G2Z_TRY(G2Z_GROW(s->services, &s->row, &s->row_capacity, s->rows, s->rows + 1));
  g2ze_row *row = &s->row[s->rows++];
  row->at = at;
  row->count = (int)count;
  row->first = (int)first;
  row->counted = counted;
  row->bytes = bytes;
  row->length = counted;
  return G2Z_OK;
}

/* Adds all tokens from number `at` on as windows. The first of them is not predicted. */
static g2z_status g2ze_windows(g2z_eval_set *s, size_t at) {
  const size_t context = (size_t)s->config.context, end = s->tokens.count;
  for (; at + 1 < end; at += context) {
    size_t count = end - at;
    if (count > context + 1) count = context + 1;
    G2Z_TRY(g2ze_add(s, at, count, 1, 0));
  }
  return G2Z_OK;
}

/* ----- questions in lines of JSON --------------------------------------------- */

/* The contexts are as in EleutherAI's harness, except HellaSwag's: it is ctx alone, as in llm.c.
 * White space is what Python's str.strip removes, as in the harness (g2z_text_white). */
static const g2ze_format g2ze_formats[] = {
    {"HellaSwag", {"label", "ctx", "endings.%d"}, {"%1|%2"},
     "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"},
    {"ARC", {"answerKey", "question", "choices.text.%d", "choices.label.%d"},
     {"Question: %1\nAnswer:|%2"}, "%3"},
    {"PIQA", {"label", "goal", "sol1", "sol2"},
     {"Question: %1\nAnswer:|%2", "Question: %1\nAnswer:|%3"}, "0 1"},
    {"WinoGrande", {"answer", "sentence", "option1", "option2"}, {"%1<%2|%1>", "%1<%3|%1>"}, "1 2"},
    {"OpenBookQA", {"answerKey", "question_stem", "choices.text.%d", "choices.label.%d"},
     {"%1|%2"}, "%3"},
    {"OpenBookQA",
     {"answerKey", "question.stem", "question.choices.%d.text", "question.choices.%d.label"},
     {"%1|%2"}, "%3"},
    {"BoolQ", {"answer", "passage", "question"},
     {"%1\nQuestion: %2?\nAnswer:|no", "%1\nQuestion: %2?\nAnswer:|yes"}, "false true"}};

/* Finds field number `field` of a format in a line: a string, number or word. `i` replaces %d. */
static g2z_status g2ze_find(const g2z_object *line, const g2ze_format *format, int field, int i,
                            g2z_json_text *out) {
  char at[48];
  g2z_json json;
  snprintf(at, sizeof at, format->field[field], i);
  char kind = 'n'; /* null counts as missing */
  if (g2z_object_at(line, at, &json)) kind = (char)g2z_json_peek(&json);
  if (strchr("n[{", kind))
    return g2z_fail(line->services, G2Z_FORMAT, "%s: \"%s\" is missing in this question of %s. "
                    "docs/formats.md lists the fields", line->path, at, format->name);
  const size_t quote = kind == '"';
  out->at = json.at + quote;
  g2z_json_skip(&json);
  out->bytes = (size_t)(json.at - out->at) - quote;
  return G2Z_OK;
}

/* The format whose fields a line has: the one with most fields present, at least two. NULL:
 * none. */
static const g2ze_format *g2ze_format_of(const g2z_object *line) {
  const g2ze_format *best = NULL;
  g2z_json_text text;
  int most = 1;
  for (size_t i = 0; i < G2Z_COUNT(g2ze_formats); i++) {
    const g2ze_format *format = &g2ze_formats[i];
    int present = 0;
    for (int k = 0; k < 4 && format->field[k]; k++)
      present += g2ze_find(line, format, k, 0, &text) == G2Z_OK;
    if (present <= most) continue;
    most = present;
    best = format;
  }
  return best;
}

/* The number of elements of the list that a path indexes with %d; 0: there is no list. */
static int g2ze_count(const g2z_object *line, const char *path) {
  char at[48];
  g2z_json json;
  int count = 0;
  const char *index = path ? strstr(path, ".%d") : NULL;
  if (!index) return 0;
  snprintf(at, sizeof at, "%.*s", (int)(index - path), path);
  if (!g2z_object_list(line, at, &json)) return 0;
  while (g2z_json_next(&json, ']', NULL)) {
    g2z_json_skip(&json);
    count++;
  }
  return count;
}

/* Writes the text of ending i's row into s->made. The context reaches to *ending, the ending from
 * there to *end. */
static g2z_status g2ze_fill(g2z_eval_set *s, const g2z_object *line, int i, char **ending,
                            char **end) {
  const g2ze_format *format = s->format;
  const char *form = format->row[0];
  g2z_json_text text;
  char *to = s->made;
  if (format->row[1]) form = format->row[i];
  *ending = to;
  for (; *form; form++) {
    char *gap = (char *)memchr(*ending, '_', (size_t)(to - *ending));
    if (strchr("<>", *form) && !gap)
      G2Z_REFUSE(s->services, "%s: \"sentence\" has no _, the gap for the options", line->path);
    if (*form == '%') {
      form++;
      G2Z_TRY(g2ze_find(line, format, *form - '0', i, &text));
      to += g2z_json_unescape(&text, (unsigned char *)to);
    } else if (*form == '<') {
      to = gap;
    } else if (*form == '>') {
      gap++;
      gap += g2z_text_white(gap, (size_t)(to - gap));
      to -= g2z_text_white_end(gap, (size_t)(to - gap));
      memmove(*ending, gap, (size_t)(to - gap));
      to -= gap - *ending;
    } else if (*form == '|') {
      *to++ = ' ';
      *ending = to;
    } else {
      *to++ = *form;
    }
  }
  *end = to;
  return G2Z_OK;
}

/* Adds the row of ending i. */
static g2z_status g2ze_add_ending(g2z_eval_set *s, g2z_encoder *encoder, const g2z_object *line,
                                  int i) {
  const size_t at = s->tokens.count;
  char *ending = NULL, *end = NULL; /* NULL: gcc -O1 does not see that g2ze_fill sets them */
  G2Z_TRY(g2ze_fill(s, line, i, &ending, &end));
  /* White space before an ending is encoded with the ending, as in the harness: GPT-2's tokens
   * begin with a space. */
  char *context_end = ending - g2z_text_white_end(s->made, (size_t)(ending - s->made));
  const size_t known = (size_t)(context_end - s->made);
  G2Z_TRY(g2z_tokens_reserve(s->services, &s->tokens, at + 1));
  if (!known) s->tokens.ids[s->tokens.count++] = g2z_tokenizer_eot(s->tokenizer);
  G2Z_TRY(g2z_encode(encoder, s->made, known, G2Z_ENCODE_DEFAULT, &s->tokens));
  const size_t first = s->tokens.count - at;
  G2Z_TRY(g2z_encode(encoder, context_end, (size_t)(end - context_end), G2Z_ENCODE_DEFAULT,
                     &s->tokens));
  G2Z_TRY(g2ze_add(s, at, s->tokens.count - at, first, (double)(end - ending)));
  double characters = 0;
  for (; ending < end; ending++) characters += (*ending & 0xC0) != 0x80;
  s->row[s->rows - 1].length = characters;
  return G2Z_OK;
}

/* Writes the name of ending i into s->made. *keys is at this name in format->keys, and moves to the
 * next name. */
static g2z_status g2ze_name(g2z_eval_set *s, const g2z_object *line, int i, const char **keys,
                            size_t *bytes) {
  g2z_json_text text;
  int used = 0;
  if (**keys == '%') {
    G2Z_TRY(g2ze_find(line, s->format, 3, i, &text));
    *bytes = g2z_json_unescape(&text, (unsigned char *)s->made);
    return G2Z_OK;
  }
  sscanf(*keys, "%s%n", s->made, &used);
  *bytes = strlen(s->made);
  *keys += used;
  return G2Z_OK;
}

/* Adds the question in a line, with one row per ending. */
static g2z_status g2ze_ask(g2z_eval_set *s, g2z_encoder *encoder, const g2z_object *line) {
  const g2ze_format *format = s->format;
  const char *keys = format->keys;
  const int texts = g2ze_count(line, format->field[2]), names = g2ze_count(line, format->field[3]);
  g2z_json_text text;
  G2Z_TRY(g2ze_find(line, format, 0, 0, &text));
  G2Z_TRY(G2Z_GROW(s->services, &s->question, &s->question_capacity, s->questions,
                   s->questions + 1));
  g2ze_question *question = &s->question[s->questions++];
  question->row = s->rows;
  /* Each element of the lists is an ending, also a damaged one: that is an error below. */
  question->endings = 2;
  if (question->endings < texts) question->endings = texts;
  if (question->endings < names) question->endings = names;
  /* The text of a row has each field of the line at most twice, and less than 100 bytes of the
   * format. Behind this room is the name of the right ending, without white space at its start, as
   * in the harness. */
  const size_t room = 2 * line->bytes + 100;
  G2Z_TRY(G2Z_GROW(s->services, &s->made, &s->made_capacity, 0, room + line->bytes));
  char *right = s->made + room;
  size_t right_bytes = g2z_json_unescape(&text, (unsigned char *)right);
  const size_t white = g2z_text_white(right, right_bytes);
  right += white;
  right_bytes -= white;
  int named = 0; /* number of endings that have this name */
  for (int i = 0; i < question->endings; i++) {
    size_t bytes;
    if (i == G2ZE_ENDINGS)
      G2Z_REFUSE(s->services, "%s: the question has more than %d endings", line->path, i);
    G2Z_TRY(g2ze_add_ending(s, encoder, line, i));
    G2Z_TRY(g2ze_name(s, line, i, &keys, &bytes));
    if (bytes != right_bytes || memcmp(s->made, right, bytes) != 0) continue;
    question->label = i;
    named++;
  }
  if (named == 1) return G2Z_OK;
  if (right_bytes > 40) right_bytes = 40;
  return g2z_fail(s->services, G2Z_FORMAT, "%s: \"%s\" is \"%.*s\", the name of %d endings: give a "
                  "file with answers, such as the validation split", line->path, format->field[0],
                  (int)right_bytes, right, named);
}

/* ----- text and documents --------------------------------------------------- */

static g2z_status g2ze_document(g2z_eval_set *s, g2z_encoder *encoder, const void *text,
                                size_t bytes) {
  const size_t at = s->tokens.count;
  G2Z_TRY(g2z_tokens_reserve(s->services, &s->tokens, at + 1));
  s->tokens.ids[s->tokens.count++] = g2z_tokenizer_eot(s->tokenizer);
  s->bytes += (int64_t)bytes;
  G2Z_TRY(g2z_encode(encoder, text, bytes, G2Z_ENCODE_DEFAULT, &s->tokens));
  return g2ze_windows(s, at);
}

/* Adds the question or the document in each line that is not blank. The text of a document is found
 * as in prepare_data. */
static g2z_status g2ze_lines(g2z_eval_set *s, g2z_encoder *encoder, char *text, size_t bytes) {
  static const char *const fields[] = {"text", "content"};
  int number = 0;
  for (size_t at = 0, n; at < bytes; at += n + 1) {
    char *line = text + at;
    g2z_json json;
    g2z_json_text found[2];
    char label[700];
    n = bytes - at;
    const char *newline = (const char *)memchr(line, '\n', n);
    if (newline) n = (size_t)(newline - line);
    number++;
    if (g2z_text_white(line, n) == n) continue;
    snprintf(label, sizeof label, "%.600s, line %d", s->path, number);
    G2Z_TRY(g2z_text_document(s->services, label, line, n, fields, 0, &json, found));
    const g2z_json_text *document = &found[!found[0].at];
    const g2z_object object = {s->services, label, line, n};
    if (!s->rows && !document->at) s->format = g2ze_format_of(&object);
    if (s->format) {
      G2Z_TRY(g2ze_ask(s, encoder, &object));
      continue;
    }
    if (!document->at)
      return g2z_fail(s->services, G2Z_FORMAT, "%s has neither \"text\" nor \"content\": each "
                      "line of a .jsonl file must be an object with one of them, or a question "
                      "(docs/formats.md lists their fields)", label);
    unsigned char *plain = (unsigned char *)line;
    G2Z_TRY(g2ze_document(s, encoder, plain, g2z_json_unescape(document, plain)));
  }
  return G2Z_OK;
}

static g2z_status g2ze_text(g2z_eval_set *s, char *text, size_t bytes) {
  const int lines = g2z_text_named(s->path).json;
  g2z_encoder *encoder;
  G2Z_TRY(g2z_text_check(s->services, s->path, lines, text, bytes, NULL));
  if (!s->tokenizer)
    G2Z_REFUSE(s->services, "%s is text, which needs a tokenizer: give --vocab FILE", s->path);
  G2Z_TRY(g2z_encoder_create(s->services, s->tokenizer, &encoder));
  g2z_status status;
  if (lines) status = g2ze_lines(s, encoder, text, bytes);
  else status = g2ze_document(s, encoder, text, bytes);
  g2z_encoder_free(encoder);
  return status;
}

/* ----- tokens ----------------------------------------------------------------- */

/* Appends `count` tokens, which are uint16 in the file. */
static g2z_status g2ze_take(g2z_eval_set *s, const char *from, size_t count) {
  G2Z_TRY(g2z_tokens_reserve(s->services, &s->tokens, s->tokens.count + count));
  for (size_t i = 0; i < count; i++) {
    uint16_t token;
    memcpy(&token, from + 2 * i, sizeof token);
    if (token >= s->config.vocab)
      return g2z_fail(s->services, G2Z_FORMAT, "%s has token %d, but the model only %d tokens: "
                      "prepare it with the model's vocabulary", s->path, token, s->config.vocab);
    s->tokens.ids[s->tokens.count++] = token;
  }
  return G2Z_OK;
}

/* Adds a shard. A loader is created only for its checks: it refuses a damaged shard, and a mask
 * that belongs to another shard. */
static g2z_status g2ze_shard(g2z_eval_set *s, const char *text, size_t bytes, size_t begin) {
  const g2z_loader_config config = {s->path, 1, 1, 1, 0, 1, s->config.vocab, G2Z_ORDER_FILE, 0};
  g2z_loader *loader;
  G2Z_TRY(g2z_loader_create(s->services, &config, &loader));
  const uint64_t hash = loader->vocab_hash;
  g2z_loader_free(loader);
  uint64_t known = s->config.vocab_hash;
  if (!known && s->tokenizer) known = g2z_tokenizer_hash(s->tokenizer);
  if (hash && known && hash != known)
    G2Z_REFUSE(s->services, "%s was made with another vocabulary than the model's: prepare it "
               "again with ./prepare_data --vocab FILE", s->path);
  G2Z_TRY(g2ze_take(s, text + begin, (bytes - begin) / 2));
  G2Z_TRY(g2z_shard_mask(s->services, s->path, s->tokens.ids, s->tokens.count));
  return g2ze_windows(s, 0);
}

/* ----- questions -------------------------------------------------------------- */

typedef struct g2ze_reader {    /* reads a file of uint16 */
  const char *text;
  size_t at, end;               /* counted in uint16 */
} g2ze_reader;

/* Reads the next value; -1 at the end. */
static int g2ze_next(g2ze_reader *r) {
  uint16_t word;
  if (r->at == r->end) return -1;
  memcpy(&word, r->text + 2 * r->at++, sizeof word);
  return word;
}

/* Reads a length, and skips so many tokens, which begin at *from. Returns the length; 0: the file
 * ends before, or the length is 0. */
static size_t g2ze_words(g2ze_reader *r, const char **from) {
  int length = g2ze_next(r);
  if (length <= 0 || (size_t)length > r->end - r->at) return 0;
  *from = r->text + 2 * r->at;
  r->at += (size_t)length;
  return (size_t)length;
}

/* The length of an ending's text in bytes; 0 without a tokenizer. The first space separates the
 * ending from its context: it is not counted, whether it is part of a token or a whole token. */
static double g2ze_bytes(const g2z_eval_set *s, const int32_t *ids, size_t count) {
  size_t sum = 0, bytes;
  int space = 0;
  for (size_t i = 0; s->tokenizer && i < count; i++) {
    const unsigned char *token = g2z_tokenizer_token(s->tokenizer, ids[i], &bytes);
    if (sum == 0 && bytes) space = token[0] == ' ';
    sum += bytes;
  }
  if (sum > 1 && space) sum--;
  return (double)sum;
}

/* Adds one row per ending: the context, then the ending. */
static g2z_status g2ze_read_questions(g2z_eval_set *s, const char *text, size_t bytes, int count) {
  if (bytes < G2ZE_HEADER)
    return g2z_fail(s->services, G2Z_FORMAT, "%s ends after %zu of the header's %d bytes: make "
                    "it again with llm.c's dev/data/hellaswag.py", s->path, bytes, G2ZE_HEADER);
  g2ze_reader reader = {text + G2ZE_HEADER, 0, (bytes - G2ZE_HEADER) / 2}, *r = &reader;
  const char *context, *ending;
  for (int q = 0; q < count; q++) {
    G2Z_TRY(G2Z_GROW(s->services, &s->question, &s->question_capacity, s->questions,
                     s->questions + 1));
    g2ze_question *question = &s->question[s->questions++];
    const size_t begin = r->at;
    const int mark = g2ze_next(r), size = g2ze_next(r), number = g2ze_next(r);
    question->label = g2ze_next(r);
    question->endings = g2ze_next(r);
    question->row = s->rows;
    const size_t known = g2ze_words(r, &context);
    int whole = mark == G2ZE_QUESTION_MARK && known && question->endings > 0 &&
                question->endings <= G2ZE_ENDINGS && question->label < question->endings;
    for (int i = 0; i < question->endings && whole; i++) {
      const size_t at = s->tokens.count, length = g2ze_words(r, &ending);
      whole = length > 0;
      if (!whole) break;
      G2Z_TRY(g2ze_take(s, context, known));
      G2Z_TRY(g2ze_take(s, ending, length));
      G2Z_TRY(g2ze_add(s, at, known + length, known,
                       g2ze_bytes(s, s->tokens.ids + at + known, length)));
    }
    if (!whole || size != (int)(2 * (r->at - begin)))
      return g2z_fail(s->services, G2Z_FORMAT, "%s is damaged at byte %zu, in the question after "
                      "number %d: make it again with llm.c's dev/data/hellaswag.py", s->path,
                      G2ZE_HEADER + 2 * begin, number);
  }
  const size_t end = G2ZE_HEADER + 2 * r->at;
  if (bytes == end) return G2Z_OK;
  return g2z_fail(s->services, G2Z_FORMAT, "%s continues after its last question, at byte %zu: "
                  "make it again with llm.c's dev/data/hellaswag.py", s->path, end);
}

/* ----- a file ------------------------------------------------------------------ */

static g2z_status g2ze_read(g2z_eval_set *s, char *text, size_t bytes) {
  const char *dot = strrchr(s->path, '.');
  int32_t head[4] = {0, 0, 0, 0};
  if (bytes >= sizeof head && !g2z_text_named(s->path).unpack) memcpy(head, text, sizeof head);
  if (head[0] == G2ZE_QUESTIONS && (head[1] != 1 || head[2] < 1))
    return g2z_fail(s->services, G2Z_FORMAT, "%s holds %d question%s in version %d: it must hold "
                    "at least one, in version 1", s->path, head[2], G2Z_PLURAL(head[2]), head[1]);
  if (head[0] == G2ZE_QUESTIONS) return g2ze_read_questions(s, text, bytes, head[2]);
  if (head[0] == G2ZE_SHARD) return g2ze_shard(s, text, bytes, G2ZE_HEADER);
  if (dot && strcmp(dot, ".bin") == 0) return g2ze_shard(s, text, bytes, 0);
  return g2ze_text(s, text, bytes);
}

/* Refuses a tokenizer that is not the model's. NULL is fine. */
static g2z_status g2ze_check_tokenizer(g2z_services *services, const g2z_model_config *model,
                                       const g2z_tokenizer *tokenizer) {
  if (tokenizer && g2z_tokenizer_vocab(tokenizer) > model->vocab)
    G2Z_REFUSE(services, "the tokenizer has %d tokens, but the model only %d: give the one that "
               "the model was trained with, --vocab FILE", g2z_tokenizer_vocab(tokenizer),
               model->vocab);
  if (tokenizer && model->vocab_hash && g2z_tokenizer_hash(tokenizer) != model->vocab_hash)
    G2Z_REFUSE(services, "the tokenizer is not the model's: give the one that the model was "
               "trained with, --vocab FILE, or remove --vocab");
  return G2Z_OK;
}

static g2z_status g2ze_load(g2z_eval_set *s) {
  char *text;
  size_t bytes;
  G2Z_TRY(g2ze_check_tokenizer(s->services, &s->config, s->tokenizer));
  G2Z_TRY(g2z_text_read(s->services, s->path, G2ZE_FILE_MAX, &text, &bytes));
  g2z_status status = g2ze_read(s, text, bytes);
  g2z_release(s->services, text);
  G2Z_TRY(status);
  if (s->rows) return G2Z_OK;
  G2Z_REFUSE(s->services, "%s has no token to predict: it is too short", s->path);
}

G2Z_API g2z_status g2z_eval_open(g2z_services *services, const g2z_model_config *config,
                                 const g2z_tokenizer *tokenizer, const char *path,
                                 g2z_eval_set **out) {
  G2Z_TRY(G2Z_NEW(services, 1, out));
  g2z_eval_set *s = *out;
  s->services = services;
  s->config = *config;
  s->tokenizer = tokenizer;
  s->path = path;
  g2z_status status = g2ze_load(s);
  if (status == G2Z_OK) return G2Z_OK;
  g2z_eval_free(s);
  *out = NULL;
  return status;
}

G2Z_API void g2z_eval_free(g2z_eval_set *s) {
  if (!s) return;
  g2z_tokens_free(&s->tokens);
  g2z_release(s->services, s->row);
  g2z_release(s->services, s->question);
  g2z_release(s->services, s->made);
  g2z_release(s->services, s);
}

/* ----- scores ------------------------------------------------------------------ */

typedef struct g2ze_batch {     /* each has room for [G2ZE_ROWS, context] */
  int32_t *tokens, *targets;
  float *losses;
} g2ze_batch;

/* Scores `count` rows, padded to the length of the longest. */
static g2z_status g2ze_score(const g2z_eval_set *s, g2ze_row *row, int count, g2z_model *model,
                             const g2ze_batch *batch) {
  int T = 1;
  double mean;
  for (int i = 0; i < count; i++)
    if (T < row[i].count - 1) T = row[i].count - 1;
  for (int i = 0; i < count; i++)
    for (int t = 0; t < T; t++) {
      const int32_t *ids = s->tokens.ids + row[i].at + t;
      const int at = i * T + t, inside = t + 1 < row[i].count;
      const int counts = inside && t + 1 >= row[i].first && !(ids[1] & G2Z_UNCOUNTED);
      batch->tokens[at] = inside ? ids[0] & ~G2Z_UNCOUNTED : 0;
      batch->targets[at] = counts ? ids[1] : -1;
    }
  G2Z_TRY(g2z_model_score(model, batch->tokens, batch->targets, count, T, batch->losses, &mean));
  for (int i = 0; i < count; i++) {
    row[i].sum = 0;
    for (int t = 0; t < T; t++) row[i].sum += (double)batch->losses[i * T + t];
  }
  return G2Z_OK;
}

/* Computes the shares of questions whose right ending has the least loss: the sum, the loss per
 * character (or token) of the ending, and the loss per byte. */
static void g2ze_choose(const g2z_eval_set *s, g2z_eval *out) {
  enum { BY_ALL, BY_LENGTH, BY_BYTES, MEASURES };
  int64_t right[MEASURES] = {0, 0, 0};
  for (size_t q = 0; q < s->questions; q++) {
    const g2ze_question *question = &s->question[q];
    double least[MEASURES] = {INFINITY, INFINITY, INFINITY};
    int best[MEASURES] = {0, 0, 0};
    for (int i = 0; i < question->endings; i++) {
      const g2ze_row *row = &s->row[question->row + (size_t)i];
      const double per[MEASURES] = {1, row->length, row->bytes};
      for (int m = 0; m < MEASURES; m++) {
        const double loss = row->sum / per[m];
        if (loss < least[m]) {
          least[m] = loss;
          best[m] = i;
        }
      }
    }
    for (int m = 0; m < MEASURES; m++) right[m] += best[m] == question->label;
  }
  out->questions = (int64_t)s->questions;
  out->acc = (double)right[BY_ALL] / (double)s->questions;
  out->acc_norm = (double)right[BY_LENGTH] / (double)s->questions;
  out->acc_bytes = NAN;
  if (s->tokenizer) out->acc_bytes = (double)right[BY_BYTES] / (double)s->questions;
}

/* The number of rows from `at` on that are scored together. Padded to the longest one, they have at
 * most G2ZE_TOKENS tokens; a single row may have more. */
static size_t g2ze_together(const g2z_eval_set *s, size_t at) {
  size_t count = 0, longest = 0;
  while (at + count < s->rows && count < G2ZE_ROWS) {
    const size_t length = (size_t)s->row[at + count].count;
    if (length > longest) longest = length;
    if (count && (count + 1) * longest > G2ZE_TOKENS) break;
    count++;
  }
  return count;
}

G2Z_API g2z_status g2z_eval_run(g2z_eval_set *s, g2z_model *model,
                                void (*progress)(void *user, double share), void *user,
                                g2z_eval *out) {
  const size_t room = G2ZE_ROWS * (size_t)s->config.context;
  g2ze_batch batch;
  double sum = 0;
  memset(out, 0, sizeof *out);
  G2Z_TRY(G2Z_NEW(s->services, 3 * room, &batch.tokens));
  batch.targets = batch.tokens + room;
  batch.losses = (float *)(batch.targets + room);
  g2z_status status = G2Z_OK;
  for (size_t at = 0, count; at < s->rows && status == G2Z_OK; at += count) {
    count = g2ze_together(s, at);
    if (progress) progress(user, (double)at / (double)s->rows);
    status = g2ze_score(s, s->row + at, (int)count, model, &batch);
  }
  g2z_release(s->services, batch.tokens);
  G2Z_TRY(status);
  for (size_t i = 0; i < s->rows; i++) {
    out->tokens += s->row[i].counted;
    sum += s->row[i].sum;
  }
  out->loss = sum / (double)out->tokens;
  if (!model->trainer && !isfinite(out->loss)) /* a trainer checks its own loss */
    return g2z_fail(s->services, G2Z_DIVERGED, "the loss is %s: numbers in the model are too large "
                    "for its type. Give --dtype fp32", isnan(out->loss) ? "nan" : "infinite");
  out->perplexity = exp(out->loss);
  out->bits_per_byte = NAN;
  if (s->bytes) out->bits_per_byte = sum / log(2.0) / (double)s->bytes;
  if (s->questions) g2ze_choose(s, out);
  return G2Z_OK;
}

G2Z_API void g2z_eval_text(const g2z_eval *e, char text[200]) {
  const size_t room = 200;
  int at = snprintf(text, room, "loss %.4f | perplexity ", e->loss);
  if (e->perplexity < 1e6) at += snprintf(text + at, room - (size_t)at, "%.2f", e->perplexity);
  else at += snprintf(text + at, room - (size_t)at, "%.3g", e->perplexity);
  if (!isnan(e->bits_per_byte) && !e->questions)
    at += snprintf(text + at, room - (size_t)at, " | %.4f bits per byte", e->bits_per_byte);
  at += snprintf(text + at, room - (size_t)at, " | %" PRId64 " token%s", e->tokens,
                 G2Z_PLURAL(e->tokens));
  if (!e->questions) return;
  at += snprintf(text + at, room - (size_t)at,
                 " | %" PRId64 " question%s: acc %.4f, acc_norm %.4f", e->questions,
                 G2Z_PLURAL(e->questions), e->acc, e->acc_norm);
  if (!isnan(e->acc_bytes))
    snprintf(text + at, room - (size_t)at, ", acc_bytes %.4f", e->acc_bytes);
}

/* ----- writing ----------------------------------------------------------------- */

typedef struct g2ze_writer {
  const g2z_tokenizer *tokenizer;
  g2z_text_put put;
  void *user;
  unsigned char held[8];        /* bytes of a character that is not complete yet */
  size_t count;
  int ended;
} g2ze_writer;

/* Puts the complete characters. `last` 1: no byte follows, so all are put. */
static void g2ze_put_held(g2ze_writer *w, int last) {
  while (w->count && !w->ended) {
    const unsigned char *end = w->held + w->count;
    if (w->count < 4 && !last && !g2z_utf8_length(w->held, end)) break; /* more bytes follow */
    const g2z_shown shown = g2z_utf8_show(w->held, end);
    w->ended = w->put(w->user, shown.text, shown.bytes);
    w->count -= shown.used;
    memmove(w->held, w->held + shown.used, w->count);
  }
}

/* Puts each character when its last byte arrives. */
static void g2ze_put(g2ze_writer *w, const unsigned char *text, size_t bytes, int last) {
  for (size_t i = 0; i < bytes && !w->ended; i++) {
    w->held[w->count++] = text[i];
    g2ze_put_held(w, 0);
  }
  if (last) g2ze_put_held(w, 1);
}

static int g2ze_each(void *user, int sequence, int32_t token) {
  g2ze_writer *w = (g2ze_writer *)user;
  size_t bytes;
  (void)sequence;
  /* If a model's vocabulary was rounded up, the model has more ids than its tokenizer. */
  if (token >= g2z_tokenizer_vocab(w->tokenizer)) return 0;
  if (token == g2z_tokenizer_eot(w->tokenizer)) {
    g2ze_put(w, NULL, 0, 1);
    return w->put(w->user, "", 0);
  }
  const unsigned char *text = g2z_tokenizer_token(w->tokenizer, token, &bytes);
  g2ze_put(w, text, bytes, 0);
  return w->ended;
}

G2Z_API g2z_status g2z_write_text(g2z_model *model, const g2z_tokenizer *tokenizer,
                                  const char *prompt, int tokens, const g2z_sampling *sampling,
                                  g2z_text_put put, void *user) {
  g2z_encoder *encoder;
  g2z_tokens ids;
  g2ze_writer w;
  g2z_sampling until_eot = *sampling;
  memset(&ids, 0, sizeof ids);
  memset(&w, 0, sizeof w);
  w.tokenizer = tokenizer;
  w.put = put;
  w.user = user;
  G2Z_TRY(g2ze_check_tokenizer(model->services, &model->config, tokenizer));
  until_eot.stop = g2z_tokenizer_eot(tokenizer);
  g2ze_put(&w, (const unsigned char *)prompt, strlen(prompt), 1);
  if (!*prompt) prompt = "<|endoftext|>";
  G2Z_TRY(g2z_encoder_create(model->services, tokenizer, &encoder));
  g2z_status status = g2z_encode(encoder, prompt, strlen(prompt), G2Z_ENCODE_ALLOW_SPECIAL, &ids);
  g2z_encoder_free(encoder);
  const size_t room = ids.count + (size_t)tokens;
  if (status == G2Z_OK) status = g2z_tokens_reserve(model->services, &ids, room);
  if (status == G2Z_OK && !w.ended)
    status = g2z_model_generate(model, 1, ids.ids, room, &ids.count, &until_eot, g2ze_each, &w);
  g2ze_put(&w, NULL, 0, 1);
  g2z_tokens_free(&ids);
  return status;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_EVAL_IMPLEMENTED */
