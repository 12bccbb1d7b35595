/* prepare_data: turns text into shards of GPT-2 tokens, and text into ids and back. It needs
 * gpt2_zero.h, extras/g2z_program.h and extras/g2z_text.h:
 * cc -O3 prepare_data.c -lm -lpthread -o prepare_data
 *
 *   files --> jobs of about 256 KiB --> ids --in the order of the text--> shards
 *
 * All threads do the same work: read the next job, encode it, wait until the earlier jobs are
 * written, write it. A job ends where a cut does not change the ids. So the output depends neither
 * on the number of threads nor on the size of a job. Each thread has one job in memory, whatever
 * the size of the text. Only three things must fit into memory as a whole: a line of JSON, the
 * different pieces that --train-bpe counts, and the white space before a document of --split-docs.
 * gzip -dc and zstd -dc unpack *.gz and *.zst through a pipe. */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_program.h"
#include "extras/g2z_text.h"

#include <dirent.h>
#include <poll.h>

#define TRY G2Z_TRY
#define fail g2z_fail

/* ----- options ----------------------------------------------------------- */

#define PATH_BYTES 4608         /* 4096 for a directory, and the name of a shard */
#define NAME_BYTES 200          /* longest --name: file systems allow 255 bytes, endings included */
#define SHARD_TOKENS 100000000  /* as in llm.c's scripts */
#define VOCAB_MAX 65536         /* a token of a shard is a uint16 */
#define THREADS_MAX 256

typedef enum split_docs { SPLIT_NONE, SPLIT_EOT, SPLIT_BLANK } split_docs;
typedef enum eot_place { EOT_FIRST, EOT_LAST, EOT_NONE } eot_place;
enum { TRAIN, VAL, BY_DOCUMENT }; /* the split of a text; BY_DOCUMENT: each document has its own */

typedef struct options {
  const char *vocab, *field, *out, *name;
  int train_bpe, bytes, split_docs, universal_newlines, allow_special, strict, format, eot;
  float val_fraction;
  int64_t val_tokens, shard_tokens;
  int encode, decode, threads, overwrite, help;
  int val_default;           /* 1: no flag chose the validation split */
  char **words;              /* [word_count]: the command line as it was typed */
  int word_count;
  char name_text[256];       /* the name of the shards */
  char fields[2][128];       /* JSON members: the text, and the member that may replace it */
  int paired;                /* 1: `fields` are a prompt and its completion instead */
} options;

/* What the program writes: shards, or what the flag of this name asks for. */
enum { SHARDS, ENCODE, DECODE };
static const char *const mode_names[] = {"shards", "encode", "decode"};

#define IN(mode) (1u << (mode))
#define TEXTS (IN(SHARDS) | IN(ENCODE))
#define ANY (TEXTS | IN(DECODE))

/* The list of all options, with the modes that use them. The parser and --help are made from it.
 * default_options() sets the defaults. A default outside the range of its option is not shown: the
 * help text explains it. */
#define FLAG_LIST(FLAG, GROUP)                                                                    \
  GROUP("Vocabulary (one of these)")                                                              \
  /*   in  name  kind  destination  minimum  maximum  value  help */                              \
  FLAG(ANY, "vocab", TEXT, vocab, 0, 0, "FILE",                                                   \
       "vocab.bpe, merges.txt or tokenizer.json")                                                 \
  FLAG(IN(SHARDS), "train-bpe", INT, train_bpe, 257, VOCAB_MAX, "N",                              \
       "learn N tokens from the text and write them to OUT/NAME.bpe")                             \
  FLAG(ANY, "bytes", SWITCH, bytes, 0, 0, "", "the 256 bytes and <|endoftext|>")                  \
  GROUP("Text")                                                                                   \
  FLAG(TEXTS, "field", TEXT, field, 0, 0, "NAME",                                                 \
       "field of the text in .jsonl [text, else content]; or PROMPT,COMPLETION")                  \
  FLAG(TEXTS, "split-docs", CHOICE, split_docs, 0, 0, "|none|eot|blank",                          \
       "what separates documents in a text; none: it is one document")                            \
  FLAG(TEXTS, "universal-newlines", SWITCH, universal_newlines, 0, 0, "",                         \
       "turn CR LF and CR into LF, as Python does with text files")                               \
  FLAG(TEXTS, "allow-special", SWITCH, allow_special, 0, 0, "",                                   \
       "read <|endoftext|> in a document as the token, not as 7 ordinary ones")                   \
  FLAG(TEXTS, "strict", SWITCH, strict, 0, 0, "",                                                 \
       "refuse invalid UTF-8 and lone surrogates instead of writing U+FFFD")                      \
  GROUP("Shards")                                                                                 \
  FLAG(IN(SHARDS), "format", CHOICE, format, 0, 0, "|llmc|raw",                                   \
       "uint16 tokens with llm.c's header, or without a header")                                  \
  FLAG(TEXTS, "eot", CHOICE, eot, 0, 0, "|first|last|none",                                       \
       "where a document gets <|endoftext|> [first for llmc, last for raw]")                      \
  FLAG(IN(SHARDS), "out", TEXT, out, 0, 0, "DIR",                                                 \
       "directory of the shards; created if it does not exist")                                   \
  FLAG(IN(SHARDS), "name", TEXT, name, 0, 0, "NAME",                                              \
       "name of the shards [name of the first FILE]")                                             \
  FLAG(IN(SHARDS), "overwrite", SWITCH, overwrite, 0, 0, "",                                      \
       "replace all shards of this name from an earlier run")                                     \
  FLAG(IN(SHARDS), "shard-tokens", INT64, shard_tokens, 1, 2147483647, "N",                       \
       "tokens per llmc shard; a document may be cut [100000000]")                                \
  GROUP("Validation")                                                                             \
  FLAG(IN(SHARDS), "val-fraction", FLOAT, val_fraction, 0, 0.999, "F",                            \
       "fraction of the documents; see below [0.05]")                                             \
  FLAG(IN(SHARDS), "val-tokens", INT64, val_tokens, 0, 1e15, "N",                                 \
       "or the first N tokens; a document may be cut")                                            \
  GROUP("Instead of shards")                                                                      \
  FLAG(IN(ENCODE), "encode", SWITCH, encode, 0, 0, "",                                            \
       "read text from standard input, print its ids")                                            \
  FLAG(IN(DECODE), "decode", SWITCH, decode, 0, 0, "",                                            \
       "read ids from standard input, print their text")                                          \
  GROUP("Program")                                                                                \
  FLAG(TEXTS, "threads", INT, threads, 1, THREADS_MAX, "N",                                       \
       "encoding threads; any N gives equal files")                                    \
  FLAG(ANY, "help", SWITCH, help, 0, 0, "", "print this help")

static const char help_begin[] =
    "prepare_data: turns text into shards of GPT-2 tokens\n"
    "  ./prepare_data --vocab data/vocab.bpe --out data FILE...\n"
    "  ./prepare_data --vocab data/vocab.bpe --encode < text > ids\n"
    "\n"
    "FILE.jsonl, .ndjson or .json holds one document per line; any other FILE is\n"
    "text in UTF-8. gzip and zstd unpack FILE.gz and FILE.zst. - is standard input:\n"
    "text, or one document per line if --field is given.\n";

static const char help_end[] =
    "\n"
    "Files:\n"
    "  --format llmc   OUT/NAME_train_000000.bin ..., OUT/NAME_val_000000.bin ...\n"
    "  --format raw    OUT/train.bin, OUT/val.bin;\n"
    "                  with --name OUT/train_NAME.bin, OUT/val_NAME.bin\n"
    "All files get these names together at the end; a failed run leaves none of\n"
    "them. Existing shards of this name stay unless --overwrite replaces all of\n"
    "them. If the replacement is interrupted, the first shard of each set is empty,\n"
    "and programs refuse the set.\n"
    "\n"
    "Fine-tuning: --field PROMPT,COMPLETION reads two fields. Each is encoded by\n"
    "itself, and nothing is put between their tokens. Training learns to predict\n"
    "the completion and <|endoftext|>, not the prompt: a mask next to each shard,\n"
    "OUT/NAME_train_000000.mask, marks the difference.\n"
    "\n"
    "Validation: --val-fraction F takes the fraction F of the documents, evenly\n"
    "spaced, beginning with the first: every 20th for 0.05. If the input is fewer\n"
    "than 10 / F texts of one document each, it takes the last F of the bytes of\n"
    "each text instead. The length of .gz, .zst and standard input is unknown: in\n"
    "this case they give no validation split. --train-bpe learns from all of the\n"
    "text. A file that is given twice counts twice. It is refused if its documents\n"
    "could be in both splits.\n"
    "nanoGPT's split of a text: --format raw --eot none --val-fraction 0.1 TEXT\n"
    "llm.c's split of a text:   --split-docs blank --val-tokens 32768 TEXT\n";

static options default_options(void) {
  options o;
  memset(&o, 0, sizeof o);
  o.out = ".";
  o.eot = -1;
  o.val_fraction = -1;
  o.val_tokens = -1;
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  if (cores < 1) cores = 1;
  if (cores > THREADS_MAX) cores = THREADS_MAX;
  o.threads = (int)cores;
  return o;
}

static void print_line(void *user, const char *text) {
  (void)user;
  puts(text);
}

/* Reads the options from argv, and moves the inputs to argv[1..*inputs]. Or prints --help. */
static g2z_status read_flags(g2z_services *services, int argc, char **argv, options *o,
                             int *inputs) {
#define FLAG(in, name, kind, destination, minimum, maximum, value, help) \
  {name, G2Z_FLAG_##kind, &o->destination, minimum, maximum, value, help},
#define GROUP(title) {"", G2Z_FLAG_GROUP, NULL, 0, 0, "", title ":"},
  const g2z_flag flags[] = {FLAG_LIST(FLAG, GROUP)};
#undef FLAG
#undef GROUP
  const int count = (int)(sizeof flags / sizeof *flags);
  options defaults = *o;
  g2z_status status = g2z_flags_parse(services, flags, count, argc, argv, 1, inputs);
  if (status != G2Z_OK || !o->help) return status;
  *o = defaults;
  puts(help_begin);
  g2z_flags_print(flags, count, print_line, NULL);
  fputs(help_end, stdout);
  o->help = 1;
  return G2Z_OK;
}

/* Commands to type next. main prints them after the error. */
static char advice[2048];

/* A change of the command that the user typed. */
typedef struct change {
  const char *flag, *value;    /* a flag to add, and its value; NULL: none */
  const char *path, *instead;  /* an input, and the name that replaces it; NULL: none */
} change;

/* Writes `advice`: the command `first` (unless ""), then the typed command with a change. */
static void advise(g2z_services *services, const options *o, const char *first, change with) {
  const char *joint = *first ? " &&\n" : "";
  char **words = (char **)calloc((size_t)o->word_count + 2, sizeof *words), *line = NULL;
  int count = 1;
  if (!words || !o->words) {
    free(words);
    return;
  }
  words[0] = o->words[0];
  if (with.flag) words[count++] = (char *)with.flag;
  if (with.value) words[count++] = (char *)with.value;
  for (int i = 1; i < o->word_count; i++) {
    words[count] = o->words[i];
    if (with.path && strcmp(o->words[i], with.path) == 0) words[count] = (char *)with.instead;
    count++;
  }
  if (g2z_flags_line(services, count, words, &line) == G2Z_OK &&
      strlen(line) + strlen(first) + 8 < sizeof advice)
    snprintf(advice, sizeof advice, ":\n%s%s%s", first, joint, line);
  else if (*first) snprintf(advice, sizeof advice, ":\n%s", first);
  g2z_release(services, line);
  free(words);
}

/* Reads the names of JSON fields from --field: one name, or the names of prompt and completion.
 * Without --field it is "text", or "content" in a document without "text". */
static g2z_status settle_fields(g2z_services *services, options *o) {
  const char *first = "text", *second = "content";
  const size_t most = sizeof o->fields[0] - 1;
  if (o->field) {
    const char *comma = strchr(o->field, ',');
    o->paired = comma != NULL;
    first = second = o->field;
    if (comma) second = comma + 1;
  }
  const size_t length = strcspn(first, ",");
  if (!length || !*second || strchr(second, ',') || length > most || strlen(second) > most)
    return fail(services, G2Z_BAD_ARGUMENT, "--field %.300s: give one field name, or two as in "
                "--field prompt,completion; each has 1 to %zu characters", first, most);
  snprintf(o->fields[0], sizeof o->fields[0], "%.*s", (int)length, first);
  snprintf(o->fields[1], sizeof o->fields[1], "%s", second);
  return G2Z_OK;
}

/* Chooses the name of the shards: --name, or the first input without its directory and its
 * endings. */
static g2z_status settle_name(g2z_services *services, options *o, const char *input) {
  if (o->name) {
    if (!*o->name || strlen(o->name) > NAME_BYTES || strchr(o->name, '/'))
      return fail(services, G2Z_BAD_ARGUMENT, "--name %.80s: give 1 to %d characters without a "
                  "slash; --out sets the directory", o->name, NAME_BYTES);
    snprintf(o->name_text, sizeof o->name_text, "%s", o->name);
    return G2Z_OK;
  }
  const char *slash = strrchr(input, '/'), *file = input;
  if (slash) file = slash + 1;
  if (strcmp(file, "-") == 0) file = "stdin";
  size_t length = g2z_text_named(file).bytes, dot = length;
  while (dot > 1 && file[dot - 1] != '.') dot--;
  if (dot > 1) length = dot - 1;
  if (length > NAME_BYTES) length = NAME_BYTES;
  snprintf(o->name_text, sizeof o->name_text, "%.*s", (int)length, file);
  return G2Z_OK;
}

/* Refuses options that contradict each other, and sets those that no flag has set. */
static g2z_status settle(g2z_services *services, options *o, char **inputs, int count) {
  const options defaults = default_options();
  int mode = SHARDS;
  if (o->encode) mode = ENCODE;
  else if (o->decode) mode = DECODE;
  if ((o->vocab != NULL) + (o->train_bpe != 0) + o->bytes > 1)
    return fail(services, G2Z_BAD_ARGUMENT,
                "--vocab, --train-bpe and --bytes each choose a vocabulary: give only one of them");
  TRY(settle_fields(services, o));
  if (!o->vocab && !o->train_bpe && !o->bytes) {
    const change with = {"--vocab", "data/vocab.bpe", NULL, NULL};
    advise(services, o, "", with);
    return fail(services, G2Z_BAD_ARGUMENT,
                "no vocabulary is chosen. Give --vocab FILE%s, or --bytes. For GPT-2's vocabulary, "
                "type make vocab once, then add --vocab data/vocab.bpe",
                mode == SHARDS ? ", --train-bpe N to learn one" : "");
  }
  if (o->encode && o->decode)
    return fail(services, G2Z_BAD_ARGUMENT,
                "--encode and --decode exclude each other: give only one of them");
  if (mode != SHARDS && count)
    return fail(services, G2Z_BAD_ARGUMENT,
                "%s: --%s reads standard input and takes no FILE; type < %s", inputs[0],
                mode_names[mode], inputs[0]);
#define FLAG(in, name, kind, destination, minimum, maximum, value, help)                          \
  if (!((in) & IN(mode)) &&                                                                       \
      memcmp(&o->destination, &defaults.destination, sizeof o->destination) != 0)                 \
    return fail(services, G2Z_BAD_ARGUMENT, "--%s has no effect with --%s: remove it", name,     \
                mode_names[mode]);
#define GROUP(title)
  FLAG_LIST(FLAG, GROUP)
#undef FLAG
#undef GROUP
  if (mode != SHARDS) {
    if (o->eot < 0) o->eot = EOT_NONE;
    o->val_fraction = 0;
    return G2Z_OK;
  }
  if (count == 0)
    return fail(services, G2Z_BAD_ARGUMENT,
                "no input: name text or .jsonl files, or - for standard input; see --help");
  if (o->val_fraction >= 0 && o->val_tokens >= 0)
    return fail(services, G2Z_BAD_ARGUMENT,
                "--val-fraction and --val-tokens exclude each other: give only one of them");
  o->val_default = o->val_fraction < 0 && o->val_tokens < 0;
  if (o->val_default) o->val_fraction = 0.05f;
  if (o->format == G2Z_SHARD_RAW) {
    if (o->shard_tokens)
      return fail(services, G2Z_BAD_ARGUMENT,
                  "--shard-tokens %" PRId64 ": --format raw writes one file per split: remove it, "
                  "or use --format llmc", o->shard_tokens);
    o->shard_tokens = INT64_MAX;
    if (o->eot < 0) o->eot = EOT_LAST;
  } else {
    if (!o->shard_tokens) o->shard_tokens = SHARD_TOKENS;
    if (o->eot < 0) o->eot = EOT_FIRST;
  }
  return settle_name(services, o, inputs[0]);
}

/* ----- reading: files -> jobs -------------------------------------------- */

#define JOB_BYTES 262144        /* so a job and its ids fit into a core's second-level cache */
#define OPEN_BYTES 4194304      /* text that has no cut for so many bytes is encoded in parts */
#define LINE_BYTES 268435456    /* the longest line of JSON */

typedef struct source {      /* a file, or a range of one */
  const char *path, *label;  /* label: the name in messages */
  int json;                  /* 1: one document per line */
  uint64_t begin, end;       /* range of bytes; end UINT64_MAX: to the end of the file */
  dev_t device;              /* device and inode identify a file that has several names */
  ino_t inode;
  int split;                 /* TRAIN, VAL or BY_DOCUMENT */
} source;

typedef struct segment {     /* a document, or the part of one in this job */
  const char *label;
  uint64_t place;            /* number of its line (json), or its offset in the file */
  size_t begin, bytes;       /* place in the job's text */
  int json, split;
  int starts, ends;          /* 1: the document starts in this segment; it ends in it */
  size_t text_bytes, tokens; /* number of encoded bytes; number of ids, with <|endoftext|> */
} segment;

typedef struct job {
  char *text;
  size_t bytes, text_capacity;
  segment *segments;
  size_t count, segments_capacity;
  size_t encoded;            /* number of encoded segments: all, unless one failed */
  uint64_t consumed;         /* number of bytes read from the inputs for this job */
  int open;                  /* 1: no cut was found; the last segment continues in the next job */
  size_t divided;            /* number of bytes that are divided into segments */
  size_t certain;            /* of an open segment: number of bytes whose ids are final */
  g2z_tokens tokens;
  g2z_status status;         /* result of encoding; its sentence is in the worker's services */
} job;

typedef struct reader {
  const options *o;
  g2z_services *services;
  const source *sources;
  int count, at;             /* number of sources; index of the current or next source */
  g2z_text_file text;        /* the current source; text.file -1: no source is open */
  int waits;                 /* 1: reading may block, since it is a pipe or a terminal */
  int look;                  /* 1: the first bytes of the source must be checked when read */
  uint64_t offset;           /* offset in the file of the next read */
  uint64_t place;            /* number of lines (json) or bytes of text before `rest` */
  char *rest;                /* text that was read and belongs to the next job */
  size_t rest_bytes, rest_capacity;
  int open;                  /* 1: the text of the last job ended without a cut */
  int carriage_return;       /* 1: the last byte read was CR, which became LF */
  int in_document;           /* 1: the next segment continues a document */
  int split;                 /* TRAIN or VAL: the split of that document */
  int blank;                 /* 1: so far this document is only white space */
  int64_t documents;
  int some;                  /* 1: at least one source had text */
} reader;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

static int is_stdin(const char *path) { return strcmp(path, "-") == 0; }

static g2z_status fail_stopped(g2z_services *services) {
  return fail(services, G2Z_STOPPED, "stopped by signal %d: no file was written", (int)stop_signal);
}

/* Returns a larger block with the same content. NULL: no memory; the old block stays valid. */
static void *widen(void *list, size_t *capacity, size_t need, size_t size) {
  if (need <= *capacity) return list;
  size_t larger = *capacity + *capacity / 2;
  if (larger < need) larger = need;
  if (larger > SIZE_MAX / size) return NULL;
  void *moved = realloc(list, larger * size);
  if (moved) *capacity = larger;
  return moved;
}

static g2z_status widen_text(g2z_services *services, char **text, size_t *capacity, size_t need) {
  char *wider = (char *)widen(*text, capacity, need + 1, 1); /* + 1: never a block of 0 bytes */
  if (!wider) return fail(services, G2Z_NO_MEMORY, "no memory for a text of %zu bytes", need);
  *text = wider;
  return G2Z_OK;
}

/* Returns 1 for a text of white space. `open` 1: the text may continue, so a truncated character at
 * its end may be white space, too. */
static int is_blank(const char *text, size_t bytes, int open) {
  const unsigned char *end = (const unsigned char *)text + bytes;
  const size_t rest = bytes - g2z_text_white(text, bytes);
  return rest == 0 || (open && rest < 3 && end[-(int)rest] >= 0xC2 &&
                       g2z_utf8_length(end - rest, end) == 0);
}

/* Turns CR LF and CR into LF in place; returns the new length. */
static size_t universal_newlines(char *text, size_t bytes, int *carriage_return) {
  size_t made = 0;
  for (size_t i = 0; i < bytes; i++) {
    int second = text[i] == '\n' && *carriage_return;
    *carriage_return = text[i] == '\r';
    if (!second) text[made++] = text[i] == '\r' ? '\n' : text[i];
  }
  return made;
}

/* Appends up to `count` bytes of the open source to the job. *end 1: the source has no more. */
static g2z_status read_some(reader *r, job *j, size_t count, int *end) {
  const source *from = &r->sources[r->at];
  const uint64_t left = from->end - r->offset;
  struct pollfd one = {r->text.file, POLLIN, 0};
  ssize_t got;
  *end = left == 0;
  if (*end) return G2Z_OK;
  if (count > left) count = (size_t)left;
  TRY(widen_text(r->services, &j->text, &j->text_capacity, j->bytes + count));
  do {
    while (r->waits && !stop_signal && poll(&one, 1, 100) < 1) continue; /* ends on a signal */
    if (stop_signal) return fail_stopped(r->services);
    got = read(r->text.file, j->text + j->bytes, count);
  } while (got < 0 && (errno == EINTR || errno == EAGAIN));
  if (got < 0) return g2z_fail_file(r->services, errno, "read", from->label);
  if (got == 0 && from->end != UINT64_MAX)
    return fail(r->services, G2Z_IO,
                "%s ends after %" PRIu64 " of %" PRIu64 " bytes: it changed while it was "
                "read; run again", from->label, r->offset, from->end);
  *end = got == 0;
  if (*end) return g2z_text_end(r->services, &r->text, r->offset);
  r->some = 1;
  r->offset += (uint64_t)got;
  j->consumed += (uint64_t)got;
  size_t made = (size_t)got;
  if (r->o->universal_newlines && !from->json)
    made = universal_newlines(j->text + j->bytes, made, &r->carriage_return);
  j->bytes += made;
  *end = r->offset == from->end;
  return G2Z_OK;
}

/* Cuts the job's text at `usable` and keeps the rest for the next job. */
static g2z_status keep_rest(reader *r, job *j, size_t usable) {
  r->rest_bytes = j->bytes - usable;
  TRY(widen_text(r->services, &r->rest, &r->rest_capacity, r->rest_bytes));
  if (r->rest_bytes) memcpy(r->rest, j->text + usable, r->rest_bytes);
  j->bytes = usable;
  return G2Z_OK;
}

/* Refuses a file whose first bytes are not text. `advice` gets the commands that convert it. */
static g2z_status check_text(g2z_services *services, const options *o, const source *from,
                             const char *text, size_t bytes) {
  g2z_text_remedy remedy;
  g2z_status status = g2z_text_check(services, from->path, from->json, text, bytes, &remedy);
  const change with = {NULL, NULL, from->path, remedy.made};
  if (status != G2Z_OK && remedy.command[0]) advise(services, o, remedy.command, with);
  return status;
}

/* The last place where a cut does not change the ids: after a line of JSON, or before white space.
 * 0: there is none. No line of JSON ends in the first `searched` bytes. */
static size_t find_cut(const job *j, int json, size_t searched) {
  if (!json) return g2z_encode_cut(j->text, j->bytes);
  const char *newline = (const char *)memrchr(j->text + searched, '\n', j->bytes - searched);
  if (!newline) return 0;
  return (size_t)(newline - j->text) + 1;
}

/* Fills the job's text with whole lines of JSON, or with text up to a cut that does not change the
 * ids. If text has no cut for OPEN_BYTES, the job is left open. *end 1: the source has no more. */
static g2z_status read_chunk(reader *r, job *j, int *end) {
  const int json = r->sources[r->at].json;
  size_t usable = 0, want = JOB_BYTES;
  *end = 0;
  TRY(widen_text(r->services, &j->text, &j->text_capacity, r->rest_bytes));
  if (r->rest_bytes) memcpy(j->text, r->rest, r->rest_bytes);
  j->bytes = r->rest_bytes;
  /* After a job without a cut, read at least a quarter of the rest in addition. --train-bpe needs a
   * long piece as a whole: with small steps its bytes would be copied too often. */
  if (r->open) want = OPEN_BYTES + r->rest_bytes / 4;
  want += r->rest_bytes;
  for (size_t searched = 0;; want += want / 4) {
    while (!*end && j->bytes < want) TRY(read_some(r, j, want - j->bytes, end));
    if (r->look) TRY(check_text(r->services, r->o, &r->sources[r->at], j->text, j->bytes));
    r->look = 0;
    if (*end) usable = j->bytes;
    else usable = find_cut(j, json, searched);
    if (usable || *end) break;
    searched = j->bytes;
    if (json && searched > LINE_BYTES)
      return fail(r->services, G2Z_FORMAT, "%s, line %" PRIu64 " has no end within %d MiB: "
                  "the file must be JSON with one document per line", r->sources[r->at].label,
                  r->place + 1, LINE_BYTES >> 20);
    j->open = !json && j->bytes >= OPEN_BYTES &&
              (r->in_document || r->o->split_docs == SPLIT_NONE || !is_blank(j->text, j->bytes, 1));
    if (j->open) break;
  }
  r->open = j->open;
  if (j->open) return G2Z_OK;
  return keep_rest(r, j, usable);
}

/* The F of --val-fraction F as the user typed it: the float 0.1f is slightly more than 0.1. */
static double val_fraction(const options *o) {
  if (o->val_fraction <= 0) return 0; /* -1: --val-tokens chooses the split */
  return floor((double)o->val_fraction * 1e7 + 0.5) / 1e7;
}

/* Begins a document and chooses its split. */
static void begin_document(reader *r) {
  const double index = (double)r->documents, fraction = val_fraction(r->o);
  r->documents++;
  r->split = r->sources[r->at].split;
  if (r->split == BY_DOCUMENT)
    r->split = ceil((index + 1) * fraction) > ceil(index * fraction) ? VAL : TRAIN;
  r->in_document = 1;
  r->blank = 1;
}

/* Adds a segment of the open document. */
static g2z_status add_segment(reader *r, job *j, size_t begin, size_t bytes, int starts, int ends) {
  segment *list = (segment *)widen(j->segments, &j->segments_capacity, j->count + 1, sizeof *list);
  if (!list) return fail(r->services, G2Z_NO_MEMORY, "no memory for %zu documents", j->count + 1);
  j->segments = list;
  segment *added = &list[j->count++];
  memset(added, 0, sizeof *added);
  added->label = r->sources[r->at].label;
  added->json = r->sources[r->at].json;
  added->place = r->place;
  if (!added->json) added->place += begin;
  added->begin = begin;
  added->bytes = bytes;
  added->split = r->split;
  added->starts = starts;
  added->ends = ends;
  r->in_document = !ends;
  r->blank = r->blank && j->open; /* a segment before a cut has other text than white space */
  return G2Z_OK;
}

/* Makes a document of each line that is not blank. */
static g2z_status split_lines(reader *r, job *j) {
  for (size_t at = 0; at < j->bytes;) {
    const char *line = j->text + at;
    size_t bytes = j->bytes - at;
    const char *newline = (const char *)memchr(line, '\n', bytes);
    if (newline) bytes = (size_t)(newline - line);
    r->place++;
    if (!is_blank(line, bytes, 0)) {
      begin_document(r);
      TRY(add_segment(r, j, at, bytes, 1, 1));
    }
    at += bytes + (newline != NULL);
  }
  return G2Z_OK;
}

static const char eot[] = "<|endoftext|>";
#define EOT_BYTES (sizeof eot - 1)

/* Finds the end of the document that is open at `at`, or begins there. *bytes: number of its bytes
 * in this text; *next: where the next document begins. Returns 0 if the document continues after
 * the text. Jobs cannot split a marker: a cut is before white space, never inside a marker; and an
 * open job leaves its last bytes, more than a marker has, to the next job. */
static int find_end(const reader *r, const job *j, size_t at, size_t *bytes, size_t *next) {
  const char *text = j->text + at, *found;
  const size_t left = j->bytes - at;
  *bytes = left;
  *next = j->bytes;
  if (r->o->split_docs == SPLIT_EOT) {
    found = (const char *)memmem(text, left, eot, EOT_BYTES);
    if (!found) return 0;
    *bytes = (size_t)(found - text);
    *next = at + *bytes + EOT_BYTES;
    return 1;
  }
  if (r->o->split_docs == SPLIT_BLANK) {
    size_t before = 0; /* blank lines at the start of a document do not end it */
    if (!r->in_document || r->blank) before = g2z_text_white(text, left);
    found = (const char *)memmem(text + before, left - before, "\n\n", 2);
    if (!found) return 0;
    *bytes = (size_t)(found - text) + 2;
    *next = at + *bytes;
    return 1;
  }
  return 0;
}

/* If the job's text ends with the beginning of a marker: the length of this beginning, at most
 * `bytes`. Else 0. */
static size_t begun_marker(const job *j, size_t bytes) {
  size_t begun = EOT_BYTES - 1;
  if (begun > bytes) begun = bytes;
  while (begun && memcmp(j->text + j->bytes - begun, eot, begun) != 0) begun--;
  return begun;
}

/* Splits a text into documents by --split-docs. Blank text between markers is not a document. */
static g2z_status split_text(reader *r, job *j, int end) {
  size_t at = 0;
  for (size_t next, bytes; at < j->bytes; at = next) {
    const int ends = find_end(r, j, at, &bytes, &next) || end, starts = !r->in_document;
    if (starts) {
      size_t marker = 0;
      if (!ends && j->open && r->o->split_docs == SPLIT_EOT) marker = begun_marker(j, bytes);
      if (r->o->split_docs != SPLIT_NONE && is_blank(j->text + at, bytes - marker, !ends)) {
        if (!ends) break; /* the next job shows whether a document begins here */
        continue;
      }
      begin_document(r);
    }
    TRY(add_segment(r, j, at, bytes, starts, ends));
  }
  r->place += j->bytes;
  j->divided = at;
  return G2Z_OK;
}

/* ----- workers: jobs -> ids ---------------------------------------------- */

typedef struct worker {
  const options *o;
  struct pool *pool;
  g2z_services services;
  g2z_encoder *encoder;
  g2z_bpe_trainer *trainer;  /* replaces the encoder during --train-bpe */
  job held;                  /* the worker's current job */
  char *document;            /* the text of a JSON document */
  size_t document_capacity;
  g2z_status status;         /* result of creating the encoder or the trainer */
  pthread_t thread;
} worker;

/* Unescapes a JSON document into w->document: length[0] bytes of its prompt, if it has one, then
 * length[1] bytes of the other text. An error begins with ": " or ", line 1, column N: "; the
 * caller adds the file and the line. */
static g2z_status json_document(worker *w, const char *line, size_t bytes, size_t length[2]) {
  const options *o = w->o;
  const char *const fields[] = {o->fields[0], o->fields[1]};
  const char *missing = NULL;
  g2z_json json;
  g2z_json_text found[2];
  TRY(g2z_text_document(&w->services, "", line, bytes, fields, o->paired, &json, found));
  const g2z_json_text *part[2] = {NULL, &found[1]}; /* the prompt; the other text */
  if (o->paired) part[0] = &found[0];
  else if (found[0].at) part[1] = &found[0];
  if (!part[1]->at) missing = fields[o->paired];
  if (part[0] && !part[0]->at) missing = fields[0];
  if (missing)
    return fail(&w->services, G2Z_FORMAT, ": no text in a field \"%s\"%s; to read another "
                "field: --field NAME", missing, o->field ? "" : " or \"content\"");
  length[0] = 0;
  for (int i = 0; i < 2; i++) {
    if (!part[i]) continue;
    if (o->strict && part[i]->lone) {
      json.at = part[i]->lone;
      return g2z_json_fail(&json, "%.6s is half of a surrogate pair: write both halves, or "
                           "remove --strict to read it as U+FFFD", (const char *)json.at);
    }
    TRY(widen_text(&w->services, &w->document, &w->document_capacity,
                   length[0] + part[i]->bytes));
    length[i] = g2z_json_unescape(part[i], (unsigned char *)w->document + length[0]);
  }
  return G2Z_OK;
}

/* Adds the file and the line or offset of a segment to an error. */
static g2z_status place_error(worker *w, const segment *s, g2z_status status) {
  static const char line_1[] = ", line 1";
  char sentence[G2Z_ERROR_BYTES];
  const char *what = sentence;
  if (status == G2Z_NO_MEMORY) return status;
  memcpy(sentence, w->services.error, sizeof sentence);
  if (strncmp(what, line_1, sizeof line_1 - 1) == 0) what += sizeof line_1 - 1;
  const char *joint = *what == ',' || *what == ':' ? "" : ": ";
  if (s->json)
    return fail(&w->services, status, "%s, line %" PRIu64 "%s%s", s->label, s->place, joint, what);
  return fail(&w->services, status, "%s, from byte %" PRIu64 ": %s", s->label, s->place, what);
}

/* Encodes one part of a segment, its prompt or its other text. For --train-bpe, counts its pieces
 * instead. */
static g2z_status encode_part(worker *w, job *j, const segment *s, const char *text, size_t bytes,
                              g2z_tokens *out) {
  const options *o = w->o;
  int flags = G2Z_ENCODE_DEFAULT;
  if (o->strict) flags |= G2Z_ENCODE_STRICT;
  if (o->allow_special) flags |= G2Z_ENCODE_ALLOW_SPECIAL;
  size_t *used = NULL; /* NULL: the text is complete */
  if (j->open && !s->ends) used = &j->certain;
  if (w->trainer) return g2z_bpe_trainer_feed_part(w->trainer, text, bytes, flags, used);
  return g2z_encode_part(w->encoder, text, bytes, flags, out, used);
}

static g2z_status encode_segment(worker *w, job *j, segment *s, g2z_tokens *out) {
  const options *o = w->o;
  const char *text = j->text + s->begin;
  size_t length[2] = {0, s->bytes}; /* of the prompt, of the other text */
  g2z_status status = G2Z_OK;
  if (s->starts && o->eot == EOT_FIRST && !w->trainer)
    TRY(g2z_encode(w->encoder, eot, EOT_BYTES, G2Z_ENCODE_ALLOW_SPECIAL, out));
  if (s->json) {
    status = json_document(w, text, s->bytes, length);
    text = w->document;
  }
  const size_t prompt = out->count;
  if (status == G2Z_OK && length[0]) status = encode_part(w, j, s, text, length[0], out);
  if (!o->encode)
    for (size_t i = prompt; i < out->count; i++) out->ids[i] |= G2Z_UNCOUNTED;
  if (status == G2Z_OK) status = encode_part(w, j, s, text + length[0], length[1], out);
  if (status != G2Z_OK) return place_error(w, s, status);
  s->text_bytes = length[0] + length[1];
  if (s->ends && o->eot == EOT_LAST && !w->trainer)
    TRY(g2z_encode(w->encoder, eot, EOT_BYTES, G2Z_ENCODE_ALLOW_SPECIAL, out));
  return G2Z_OK;
}

static void encode_job(worker *w, job *j) {
  for (j->encoded = 0; j->encoded < j->count; j->encoded++) {
    size_t before = j->tokens.count;
    j->status = encode_segment(w, j, &j->segments[j->encoded], &j->tokens);
    j->segments[j->encoded].tokens = j->tokens.count - before;
    if (j->status != G2Z_OK) break;
  }
}

/* Encodes the part of an open job whose ids are final. Keeps the rest for the next job. */
static g2z_status encode_open(reader *r, worker *w, job *j) {
  size_t usable = j->divided;
  if (j->count && !j->segments[j->count - 1].ends) {
    segment *last = &j->segments[j->count - 1];
    encode_job(w, j);
    if (j->status != G2Z_OK) return G2Z_OK; /* take_turn reports j->status */
    last->bytes = j->certain;
    last->text_bytes = j->certain;
    usable = last->begin + j->certain;
    r->blank = r->blank && is_blank(j->text + last->begin, j->certain, 0);
  } else {
    j->open = 0;
  }
  r->place -= j->bytes - usable;
  return keep_rest(r, j, usable);
}

static void close_source(reader *r) {
  g2z_text_close(&r->text);
  r->rest_bytes = 0;
}

/* Fills a job with at least one segment. The job stays empty if all inputs have been read. */
static g2z_status read_job(reader *r, worker *w, job *j) {
  while (j->count == 0) {
    int end;
    if (r->text.file < 0) {
      if (r->at == r->count) break;
      const source *from = &r->sources[r->at];
      struct stat info;
      TRY(g2z_text_open(r->services, from->path, &r->text));
      if (from->begin && lseek(r->text.file, (off_t)from->begin, SEEK_SET) < 0)
        return g2z_fail_file(r->services, errno, "read", from->label);
      r->look = from->end == UINT64_MAX;
      r->waits = fstat(r->text.file, &info) != 0 || !S_ISREG(info.st_mode);
      r->offset = from->begin;
      r->place = from->begin; /* for lines of JSON it is 0: only a text is read from the middle */
      r->carriage_return = 0;
      r->in_document = 0;
    }
    TRY(read_chunk(r, j, &end));
    if (r->sources[r->at].json) TRY(split_lines(r, j));
    else TRY(split_text(r, j, end));
    if (j->open) TRY(encode_open(r, w, j));
    if (end) {
      close_source(r);
      r->at++;
    }
  }
  return G2Z_OK;
}

/* ----- writing: ids -> shards -------------------------------------------- */

typedef struct stream {      /* the shards of one split */
  const char *split;         /* "train" or "val" */
  g2z_shard_writer *shard;   /* the shard that is being filled; output.shards owns it */
  int64_t in_shard, shards, tokens, counted;
  int64_t documents;         /* number of documents with ids in this split */
  int64_t document;          /* number of the last such document among all documents, from 1 */
  char path[PATH_BYTES];           /* path of the last shard */
} stream;

typedef struct output {
  const options *o;
  g2z_services *services;
  uint64_t vocab_hash;       /* put into the headers of the shards */
  stream streams[2];         /* TRAIN, VAL */
  g2z_shard_writer **shards; /* all shards of both splits, oldest first */
  size_t count, capacity;
  uint64_t bytes;            /* number of bytes read from the inputs so far */
  uint64_t text_bytes;       /* number of bytes in the documents so far */
  int64_t documents, tokens; /* their numbers so far */
  int learning;              /* 1: --train-bpe, which writes no ids */
} output;

static void shard_path(const options *o, const char *split, int64_t index, char *path,
                       size_t bytes) {
  if (o->format == G2Z_SHARD_LLMC)
    snprintf(path, bytes, "%s/%s_%s_%06" PRId64 ".bin", o->out, o->name_text, split, index);
  else if (o->name) snprintf(path, bytes, "%s/%s_%s.bin", o->out, split, o->name_text);
  else snprintf(path, bytes, "%s/%s.bin", o->out, split);
}

/* The file of the vocabulary that --train-bpe learns. */
static void learned_path(const options *o, char path[PATH_BYTES]) {
  snprintf(path, PATH_BYTES, "%s/%s.bpe", o->out, o->name_text);
}

/* Returns 1 if `name` is the name of a shard of this split, or of its mask. *index becomes the
 * number of the shard. */
static int is_shard(const options *o, const char *split, const char *name, int64_t *index) {
  char path[PATH_BYTES];
  shard_path(o, split, 0, path, sizeof path);
  const char *first = path + strlen(o->out) + 1;
  const size_t count = o->format == G2Z_SHARD_LLMC ? strlen("000000") : 0;
  const size_t length = strlen(first) - strlen(".bin") - count;
  *index = 0;
  if (strncmp(name, first, length) != 0) return 0;
  name += length;
  if (count && strspn(name, "0123456789") < count) return 0;
  if (count) *index = strtoll(name, (char **)&name, 10);
  return strcmp(name, ".bin") == 0 || strcmp(name, ".mask") == 0;
}

typedef struct old_set {     /* a walk over the files in --out that have the names of this run */
  const options *o;
  g2z_services *services;
  DIR *directory;            /* NULL: it does not exist */
  char path[PATH_BYTES];     /* the current file */
  int split;                 /* TRAIN or VAL; BY_DOCUMENT: it is the vocabulary of --train-bpe */
  int64_t index;             /* number of the shard */
} old_set;

static g2z_status old_set_open(g2z_services *services, const options *o, old_set *set) {
  set->o = o;
  set->services = services;
  set->directory = opendir(o->out);
  if (!set->directory && errno != ENOENT) return g2z_fail_file(services, errno, "list", o->out);
  return G2Z_OK;
}

static void old_set_close(old_set *set) {
  if (set->directory) closedir(set->directory);
}

/* Moves to the next file of the set. *some 0: there is none. */
static g2z_status old_set_next(old_set *set, int *some) {
  static const char *const splits[] = {"train", "val"};
  const options *o = set->o;
  *some = 0;
  while (set->directory && !*some) {
    errno = 0;
    const struct dirent *entry = readdir(set->directory);
    if (!entry && errno) return g2z_fail_file(set->services, errno, "list", o->out);
    if (!entry) break;
    for (set->split = TRAIN; set->split <= VAL; set->split++)
      if (is_shard(o, splits[set->split], entry->d_name, &set->index)) break;
    snprintf(set->path, sizeof set->path, "%s.bpe", o->name_text);
    *some = set->split <= VAL || (o->train_bpe && strcmp(entry->d_name, set->path) == 0);
    snprintf(set->path, sizeof set->path, "%s/%s", o->out, entry->d_name);
  }
  return G2Z_OK;
}

/* Counts the files of an earlier run with the names of this run; `found` becomes the first of them
 * by name. Fails if one of them is a source: an input must not be replaced by its own tokens. */
static g2z_status find_set(g2z_services *services, const options *o, const source *sources,
                           int source_count, size_t *count, char found[PATH_BYTES]) {
  old_set set;
  struct stat there;
  int some;
  *count = 0;
  TRY(old_set_open(services, o, &set));
  g2z_status status = old_set_next(&set, &some);
  while (status == G2Z_OK && some) {
    if (*count == 0 || strcmp(set.path, found) < 0) snprintf(found, PATH_BYTES, "%s", set.path);
    (*count)++;
    const int is_there = stat(set.path, &there) == 0;
    for (int i = 0; i < source_count && is_there; i++)
      if (sources[i].inode == there.st_ino && sources[i].device == there.st_dev)
        status = fail(services, G2Z_BAD_ARGUMENT, "%s would overwrite the input %s: choose another "
                      "--out or --name", set.path, sources[i].label);
    if (status == G2Z_OK) status = old_set_next(&set, &some);
  }
  old_set_close(&set);
  return status;
}

/* Removes the shards of an earlier run, and their masks, from number keep[split] of each split
 * on. */
static g2z_status remove_shards(g2z_services *services, const options *o, const int64_t keep[2]) {
  old_set set;
  int some;
  TRY(old_set_open(services, o, &set));
  g2z_status status = old_set_next(&set, &some);
  while (status == G2Z_OK && some) {
    if (set.split <= VAL && set.index >= keep[set.split] && g2z_unlink(set.path) != 0)
      status = g2z_fail_file(services, errno, "remove", set.path);
    if (status == G2Z_OK) status = old_set_next(&set, &some);
  }
  old_set_close(&set);
  return status;
}

/* Appends ids to a split, in as many shards as needed. The first shard of each split stays open:
 * its lock keeps other programs from using the names of the shards. */
static g2z_status write_ids(output *to, stream *s, const int32_t *ids, int64_t count) {
  if (count == 0) return G2Z_OK;
  s->tokens += count;
  for (int64_t i = 0; i < count; i++) s->counted += !(ids[i] & G2Z_UNCOUNTED);
  s->documents += s->document != to->documents;
  s->document = to->documents;
  while (count) {
    if (s->shard && s->in_shard == to->o->shard_tokens) {
      TRY(g2z_shard_writer_finish(s->shard, s->shards > 1));
      s->shard = NULL;
    }
    if (!s->shard) {
      g2z_shard_writer **list =
          (g2z_shard_writer **)widen(to->shards, &to->capacity, to->count + 1, sizeof *list);
      if (!list) return fail(to->services, G2Z_NO_MEMORY, "no memory for %zu shards", to->count);
      to->shards = list;
      shard_path(to->o, s->split, s->shards, s->path, sizeof s->path);
      TRY(g2z_shard_writer_create(to->services, s->path, (g2z_shard_format)to->o->format,
                                  to->vocab_hash, &s->shard));
      to->shards[to->count++] = s->shard;
      s->shards++;
      s->in_shard = 0;
    }
    int64_t take = to->o->shard_tokens - s->in_shard;
    if (take > count) take = count;
    TRY(g2z_shard_writer_append(s->shard, ids, (size_t)take));
    s->in_shard += take;
    ids += take;
    count -= take;
  }
  return G2Z_OK;
}

static g2z_status fail_output(g2z_services *services) {
  return fail(services, G2Z_IO, "cannot write standard output: %s", strerror(errno));
}

/* Prints the ids of --encode, with a space before each id except the first. */
static g2z_status print_ids(output *to, const int32_t *ids, size_t count) {
  const char *space = to->tokens ? " " : "";
  for (size_t i = 0; i < count; i++) {
    printf("%s%" PRId32, space, ids[i]);
    space = " ";
  }
  if (ferror(stdout)) return fail_output(to->services);
  return G2Z_OK;
}

/* Writes the ids of the next job, in the order of the text: to shards, or for --encode as numbers
 * to standard output. */
static g2z_status write_job(output *to, const job *j) {
  const options *o = to->o;
  const int32_t *ids = j->tokens.ids;
  to->bytes += j->consumed;
  if (o->encode && j->status == G2Z_OK) TRY(print_ids(to, ids, j->tokens.count));
  for (size_t i = 0; i < j->encoded; i++) {
    const segment *s = &j->segments[i];
    const int64_t count = (int64_t)s->tokens;
    to->text_bytes += s->text_bytes;
    to->tokens += count;
    if (to->learning || o->encode) continue;
    int64_t val = 0; /* so many tokens at the start of the segment are for validation */
    if (o->val_tokens >= 0) {
      val = o->val_tokens - to->streams[VAL].tokens;
      if (val > count) val = count;
    } else if (s->split == VAL) {
      val = count;
    }
    to->documents += s->starts;
    TRY(write_ids(to, &to->streams[VAL], ids, val));
    TRY(write_ids(to, &to->streams[TRAIN], ids + val, count - val));
    ids += count;
  }
  return G2Z_OK;
}

/* ----- the run ----------------------------------------------------------- */

/* The progress of a run, shown on a terminal five times a second. */
typedef struct progress {
  const char *verb;
  double begin, next;
  uint64_t total;            /* bytes of the inputs; 0: unknown */
} progress;

static void show_progress(progress *p, uint64_t bytes, int64_t tokens, int end) {
  double now = g2z_seconds(), seconds = now - p->begin;
  if (!isatty(STDERR_FILENO) || (now < p->next && !end)) return;
  p->next = now + 0.2;
  if (end) {
    fprintf(stderr, "\r\033[K");
    return;
  }
  double rate = (double)bytes / (seconds > 0 ? seconds : 1);
  fprintf(stderr, "\r\033[K%s  %.1f MB", p->verb, (double)bytes / 1e6);
  if (p->total) fprintf(stderr, " of %.1f MB", (double)p->total / 1e6);
  if (tokens) fprintf(stderr, "  %.1f M tokens", (double)tokens / 1e6);
  fprintf(stderr, "  %.1f MB/s", rate / 1e6);
  if (p->total > bytes && rate > 0) {
    int64_t left = (int64_t)((double)(p->total - bytes) / rate);
    fprintf(stderr, "  %" PRId64 ":%02d left", left / 60, (int)(left % 60));
  }
  fflush(stderr);
}

typedef struct pool {        /* the threads of a run and their shared state */
  const options *o;
  const g2z_tokenizer *tokenizer; /* NULL: --train-bpe learns one */
  worker *workers;           /* [o->threads]; the first worker runs on the caller's thread */
  int started;               /* number of workers that run, with the first one */
  pthread_mutex_t reading;   /* guards `input` and `read` */
  reader input;
  uint64_t read;             /* number of jobs read so far, and number of the next job */
  /* Only the worker whose job has the number `written` uses to, shown and status. */
  output *to;
  progress *shown;
  g2z_status status;         /* the first failure, in the order of the text */
  pthread_mutex_t lock;      /* guards the members below */
  pthread_cond_t next_turn;
  uint64_t written;          /* number of jobs written so far, and number of the next to write */
  int finished;              /* 1: no more jobs are read */
} pool;

static void finish_reading(pool *p) {
  pthread_mutex_lock(&p->lock);
  p->finished = 1;
  pthread_mutex_unlock(&p->lock);
}

/* Reads the worker's next job and its number. Returns 0 if there is none. A failure becomes a job
 * without text, and is reported in its turn: the jobs before it are written first, and may fail. */
static int read_next(pool *p, worker *w, uint64_t *number) {
  job *j = &w->held;
  j->count = 0;
  j->encoded = 0;
  j->tokens.count = 0;
  j->consumed = 0;
  j->open = 0;
  pthread_mutex_lock(&p->reading);
  pthread_mutex_lock(&p->lock);
  int some = !p->finished;
  pthread_mutex_unlock(&p->lock);
  if (some) {
    p->input.services = &w->services;
    j->status = G2Z_OK;
    g2z_status status = read_job(&p->input, w, j);
    if (status != G2Z_OK) {
      j->count = 0;
      j->status = status;
    }
    some = j->count || status != G2Z_OK;
    if (!j->count) finish_reading(p);
    *number = p->read;
    p->read += (uint64_t)some;
  }
  pthread_mutex_unlock(&p->reading);
  return some;
}

/* Waits until all jobs before number `number` are written, then writes the worker's job. */
static void take_turn(pool *p, worker *w, uint64_t number) {
  pthread_mutex_lock(&p->lock);
  while (p->written != number) pthread_cond_wait(&p->next_turn, &p->lock);
  pthread_mutex_unlock(&p->lock);
  if (p->status == G2Z_OK) {
    p->status = write_job(p->to, &w->held);
    if (p->status == G2Z_OK && w->held.status != G2Z_OK) {
      memcpy(p->to->services->error, w->services.error, G2Z_ERROR_BYTES);
      p->status = w->held.status;
    }
    if (p->status == G2Z_OK) show_progress(p->shown, p->to->bytes, p->to->tokens, 0);
    if (p->status == G2Z_OK && stop_signal) p->status = fail_stopped(p->to->services);
  }
  if (w->held.text_capacity > 2 * JOB_BYTES) { /* it had a long line, or text without cuts */
    free(w->held.text);
    g2z_tokens_free(&w->held.tokens);
    w->held.text = NULL;
    w->held.text_capacity = 0;
  }
  pthread_mutex_lock(&p->lock);
  p->finished |= p->status != G2Z_OK;
  p->written++;
  pthread_cond_broadcast(&p->next_turn);
  pthread_mutex_unlock(&p->lock);
}

/* Runs a worker. Each thread creates its own encoder, so that the memory of all encoders' caches is
 * cleared in parallel. */
static void *work(void *user) {
  worker *w = (worker *)user;
  pool *p = w->pool;
  uint64_t number;
  if (p->tokenizer) w->status = g2z_encoder_create(&w->services, p->tokenizer, &w->encoder);
  else w->status = g2z_bpe_trainer_create(&w->services, &w->trainer);
  if (w->status != G2Z_OK) finish_reading(p);
  while (w->status == G2Z_OK && read_next(p, w, &number)) {
    if (!w->held.open) encode_job(w, &w->held);
    take_turn(p, w, number);
  }
  return NULL;
}

static void pool_close(pool *p) {
  for (int i = 0; p->workers && i < p->o->threads; i++) {
    worker *w = &p->workers[i];
    free(w->held.text);
    free(w->held.segments);
    g2z_tokens_free(&w->held.tokens);
    g2z_encoder_free(w->encoder);
    g2z_bpe_trainer_free(w->trainer);
    free(w->document);
  }
  close_source(&p->input);
  free(p->input.rest);
  free(p->workers);
  pthread_mutex_destroy(&p->reading);
  pthread_mutex_destroy(&p->lock);
  pthread_cond_destroy(&p->next_turn);
}

/* Reads, encodes and writes everything. tokenizer NULL: counts pieces for a vocabulary instead.
 * Call pool_close afterwards, also after a failure. */
static g2z_status pool_run(pool *p, const options *o, const g2z_tokenizer *tokenizer,
                           const source *sources, int count, output *to, progress *shown) {
  memset(p, 0, sizeof *p);
  pthread_mutex_init(&p->reading, NULL);
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->next_turn, NULL);
  p->o = o;
  p->tokenizer = tokenizer;
  p->to = to;
  p->shown = shown;
  p->input.o = o;
  p->input.sources = sources;
  p->input.count = count;
  p->input.text.file = -1;
  p->workers = (worker *)calloc((size_t)o->threads, sizeof *p->workers);
  if (!p->workers)
    return fail(to->services, G2Z_NO_MEMORY, "no memory for %d threads", o->threads);
  g2z_status status = G2Z_OK;
  int error = 0;
  while (p->started < o->threads) {
    worker *w = &p->workers[p->started];
    w->o = o;
    w->pool = p;
    if (p->started) error = pthread_create(&w->thread, NULL, work, w);
    if (error) break;
    p->started++;
  }
  if (error) {
    status = fail(to->services, G2Z_IO, "cannot start thread %d of %d: %s; lower --threads",
                  p->started + 1, o->threads, strerror(error));
    finish_reading(p);
  } else {
    work(&p->workers[0]);
  }
  for (int i = 1; i < p->started; i++) pthread_join(p->workers[i].thread, NULL);
  for (int i = 0; i < p->started && status == G2Z_OK; i++) {
    status = p->workers[i].status;
    if (status != G2Z_OK)
      memcpy(to->services->error, p->workers[i].services.error, G2Z_ERROR_BYTES);
  }
  if (status != G2Z_OK) return status;
  return p->status;
}

static g2z_status encode_sources(g2z_services *services, const options *o,
                                 const g2z_tokenizer *tokenizer, const source *sources, int count,
                                 output *to, progress *shown) {
  pool p;
  g2z_status status = pool_run(&p, o, tokenizer, sources, count, to, shown);
  show_progress(shown, to->bytes, to->tokens, 1);
  if (status == G2Z_OK && p.input.documents == 0 && !o->encode)
    status = fail(services, G2Z_FORMAT, "%s %s: check that it is the right input", sources[0].label,
                  p.input.some ? "holds no document" : "is empty");
  pool_close(&p);
  return status;
}

/* Learns a vocabulary, for --train-bpe. Each thread counts the pieces of its jobs; the merges are
 * made from the sum of the counts. */
static g2z_status learn(g2z_services *services, const options *o, const source *sources, int count,
                        progress *shown, g2z_tokenizer **out) {
  pool p;
  output to;
  *out = NULL;
  memset(&to, 0, sizeof to);
  to.o = o;
  to.services = services;
  to.learning = 1;
  g2z_status status = pool_run(&p, o, NULL, sources, count, &to, shown);
  g2z_bpe_trainer *sum = NULL;
  if (status == G2Z_OK) status = g2z_bpe_trainer_create(services, &sum);
  for (int i = 0; i < o->threads && status == G2Z_OK; i++) {
    status = g2z_bpe_trainer_add(sum, p.workers[i].trainer);
    g2z_bpe_trainer_free(p.workers[i].trainer);
    p.workers[i].trainer = NULL;
  }
  if (status == G2Z_OK) status = g2z_bpe_trainer_finish(sum, o->train_bpe, out);
  g2z_bpe_trainer_free(sum);
  show_progress(shown, 0, 0, 1);
  pool_close(&p);
  return status;
}

/* ----- checking the inputs ----------------------------------------------- */

/* Checks before the run that an input can be read, and fills *s: the whole file as one source, with
 * the split BY_DOCUMENT. s->end is UINT64_MAX if the length is not known. */
static g2z_status check_input(g2z_services *services, const options *o, const char *path,
                              source *s) {
  struct stat info;
  char word[400];
  const g2z_text_name name = g2z_text_named(path);
  memset(s, 0, sizeof *s);
  s->path = path;
  s->label = path;
  s->json = name.json;
  s->end = UINT64_MAX;
  s->split = BY_DOCUMENT;
  if (is_stdin(path)) {
    s->label = "standard input";
    s->json = o->field != NULL;
    if (fstat(STDIN_FILENO, &info) != 0) return G2Z_OK; /* the first read reports the failure */
  } else if (stat(path, &info) != 0 || access(path, R_OK) != 0) {
    if (errno == ENOENT && strpbrk(path, "*?["))
      return fail(services, G2Z_IO, "there is no file %s: remove the quotes, and the shell "
                  "expands the pattern", path);
    return g2z_fail_file(services, errno, "read", path);
  }
  s->device = info.st_dev;
  s->inode = info.st_ino;
  if (is_stdin(path)) return G2Z_OK;
  if (S_ISDIR(info.st_mode))
    return fail(services, G2Z_IO, "%s is a directory: name its files, %s/*", path,
                g2z_shell_word(path, word, sizeof word));
  if (!S_ISREG(info.st_mode)) return G2Z_OK;
  if (info.st_size == 0)
    return fail(services, G2Z_FORMAT,
                "%s is empty: remove it from the command, or create it again", path);
  if (!name.unpack) s->end = (uint64_t)info.st_size;
  return G2Z_OK;
}

/* Makes a source of each input. *total: number of bytes of all; 0: not known. */
static g2z_status check_inputs(g2z_services *services, const options *o, char **inputs, int count,
                               source *given, uint64_t *total) {
  int lines = 0, unknown = 0;
  *total = 0;
  for (int i = 0; i < count; i++) {
    source *s = &given[i];
    TRY(check_input(services, o, inputs[i], s));
    const int is_unknown = s->end == UINT64_MAX;
    if (o->train_bpe && is_unknown && !g2z_text_named(inputs[i]).unpack)
      return fail(services, G2Z_BAD_ARGUMENT,
                  "--train-bpe reads its text twice, but %s can be read only once: save it to a "
                  "file", s->label);
    lines += s->json;
    unknown += is_unknown;
    if (!is_unknown) *total += s->end;
  }
  if (unknown) *total = 0;
  if (o->field && !lines)
    return fail(services, G2Z_BAD_ARGUMENT, "--field %.80s: %s is read as text, because its name "
                "does not end in .jsonl, .ndjson or .json: rename it, or remove --field",
                o->field, inputs[0]);
  return G2Z_OK;
}

static g2z_status read_at(g2z_services *services, const char *path, uint64_t offset, void *out,
                          size_t count, size_t *got) {
  int file;
  ssize_t some = -1;
  *got = 0;
  G2Z_RETRY(file, open(path, O_RDONLY | O_CLOEXEC));
  if (file >= 0) G2Z_RETRY(some, pread(file, out, count, (off_t)offset));
  const int error = errno;
  if (file >= 0) close(file);
  if (some < 0) return g2z_fail_file(services, error, "read", path);
  *got = (size_t)some;
  return G2Z_OK;
}

/* Finds the start of the last `fraction` of a text. The place is between two characters, and not
 * inside CR LF. */
static g2z_status find_tail(g2z_services *services, const char *path, uint64_t bytes,
                            double fraction, uint64_t *begin) {
  unsigned char around[4] = {0, 0, 0, 0}; /* up to three bytes before the place, and one after */
  *begin = (uint64_t)((double)bytes * (1 - fraction));
  const int at = *begin < 3 ? (int)*begin : 3;
  int back = 0;
  size_t got;
  TRY(read_at(services, path, *begin - (uint64_t)at, around, sizeof around, &got));
  while (back < at && (around[at - back] & 0xC0) == 0x80) back++;
  if (at && around[at] == '\n' && around[at - 1] == '\r') back = 1;
  *begin -= (uint64_t)back;
  return G2Z_OK;
}

/* Refuses a file that is given twice if its documents have their own splits: validation could then
 * use documents that the model was trained on. Otherwise such a file counts twice. */
static g2z_status check_twice(g2z_services *services, const options *o, const source *list,
                              int count, const source *added) {
  const int apart = added->split != BY_DOCUMENT || (val_fraction(o) == 0 && o->val_tokens <= 0);
  for (int i = 0; i < count; i++) {
    if (list[i].inode != added->inode || list[i].device != added->device) continue;
    if (is_stdin(added->path) && is_stdin(list[i].path))
      return fail(services, G2Z_BAD_ARGUMENT, "standard input is given twice, but it can be read "
                  "only once: remove one -");
    if (!apart)
      return fail(services, G2Z_BAD_ARGUMENT, "%.300s is given twice, the first time as %.300s: "
                  "its documents could be in training and in validation. Remove one of the two, "
                  "or use --val-fraction 0 instead of a validation split", added->label,
                  list[i].label);
  }
  return G2Z_OK;
}

/* Lists the sources to read. If there are only a few texts, and each is one document, they cannot
 * be split by document. Each then becomes two sources: its beginning for training, its end for
 * validation. */
static g2z_status list_sources(g2z_services *services, const options *o, const source *given,
                               int count, source *list, int *sources) {
  static char head[G2Z_TEXT_LOOK]; /* too large for a small stack */
  const double fraction = val_fraction(o);
  int texts = 0;
  size_t got;
  *sources = 0;
  for (int i = 0; i < count; i++) texts += o->split_docs == SPLIT_NONE && !given[i].json;
  for (int i = 0; i < count; i++) {
    source s = given[i];
    const int known = s.end != UINT64_MAX;
    if (known) {
      TRY(read_at(services, s.path, 0, head, sizeof head, &got));
      TRY(check_text(services, o, &s, head, got));
    }
    const int in_two = !s.json && o->split_docs == SPLIT_NONE && fraction > 0 &&
                       texts * fraction < 10; /* under ten documents would be for validation */
    if (in_two) s.split = TRAIN;
    if (in_two && !known && !o->val_default)
      return fail(services, G2Z_BAD_ARGUMENT,
                  "--val-fraction %g: the length of %s is unknown until it ends: use "
                  "--val-tokens N or --split-docs, or save it to a file",
                  (double)o->val_fraction, s.label);
    TRY(check_twice(services, o, list, *sources, &s));
    if (in_two && known) {
      source tail = s;
      tail.split = VAL;
      TRY(find_tail(services, s.path, s.end, fraction, &tail.begin));
      s.end = tail.begin;
      if (s.begin < s.end) list[(*sources)++] = s;
      if (tail.begin < tail.end) list[(*sources)++] = tail;
    } else {
      list[(*sources)++] = s;
    }
  }
  return G2Z_OK;
}

/* ----- the program ------------------------------------------------------- */

/* Gives the files their names, and removes the other files of an old set. `old`: number of files in
 * that set. The first shard of each split is an empty file until all other files have their names.
 * Readers refuse an empty file, so they never read an incomplete set or a mix of two sets. */
static g2z_status name_files(const options *o, output *to, const g2z_tokenizer *tokenizer,
                             size_t old) {
  char path[PATH_BYTES], empty[PATH_BYTES + 8];
  const int64_t shards[] = {to->streams[TRAIN].shards, to->streams[VAL].shards};
  const int guarded = old || to->count > 1;
  for (int i = 0; i < 2 && guarded; i++) {
    shard_path(o, to->streams[i].split, 0, path, sizeof path);
    snprintf(empty, sizeof empty, "%s.empty", path);
    int file;
    G2Z_RETRY(file, open(empty, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (file < 0 || close(file) != 0 || g2z_rename(empty, path) != 0)
      return g2z_fail_file(to->services, errno, "write", path);
  }
  learned_path(o, path);
  if (o->train_bpe) TRY(g2z_tokenizer_write_merges(to->services, tokenizer, path));
  const int64_t more[] = {shards[TRAIN] + !shards[TRAIN], shards[VAL] + !shards[VAL]};
  if (old) TRY(remove_shards(to->services, o, more));
  for (size_t i = to->count; i-- > 0;) TRY(g2z_shard_writer_commit(to->shards[i]));
  if (guarded) return remove_shards(to->services, o, shards);
  return G2Z_OK;
}

/* Writes all files to the disk, then gives them their names. If it fails and there was no old set,
 * no file is left. */
static g2z_status commit(const options *o, output *to, const g2z_tokenizer *tokenizer) {
  static const int64_t none[] = {0, 0};
  char path[PATH_BYTES], sentence[G2Z_ERROR_BYTES];
  size_t old;
  for (size_t i = 0; i < to->count; i++) TRY(g2z_shard_writer_finish(to->shards[i], 0));
  TRY(find_set(to->services, o, NULL, 0, &old, path));
  g2z_status status = name_files(o, to, tokenizer, old);
  if (status == G2Z_OK || old) return status;
  memcpy(sentence, to->services->error, sizeof sentence);
  remove_shards(to->services, o, none);
  learned_path(o, path);
  if (o->train_bpe) g2z_unlink(path);
  return fail(to->services, status, "%s", sentence);
}

/* Writes a pattern that matches the shards of this set and split, and of no other set. */
static void shard_pattern(const options *o, const char *split, char *pattern, size_t bytes) {
  char name[PATH_BYTES];
  size_t used = 0;
  snprintf(name, sizeof name, "%s/%s_%s_", o->out, o->name_text, split);
  for (const char *at = name; *at && used + 16 < bytes; at++) {
    if (strchr("*?[]\\", *at)) pattern[used++] = '\\';
    pattern[used++] = *at;
  }
  snprintf(pattern + used, bytes - used, "??????.bin"); /* the number of the shard */
}

/* Prints the flags of a training on these shards. */
static void print_flags(const options *o, const output *to, const g2z_tokenizer *tokenizer) {
  static const char *const flags[] = {"--train", "--val"};
  char paths[2][2 * PATH_BYTES], vocab[PATH_BYTES], *line = NULL;
  const char *words[6];
  int count = 0;
  for (int i = 0; i < 2; i++) {
    const stream *s = &to->streams[i];
    if (!s->shards) continue;
    if (s->shards > 1) shard_pattern(o, s->split, paths[i], sizeof paths[i]);
    else snprintf(paths[i], sizeof paths[i], "%s", s->path);
    words[count++] = flags[i];
    words[count++] = paths[i];
  }
  if (o->bytes) {
    words[count++] = "--vocab-size";
    snprintf(vocab, sizeof vocab, "%d", g2z_tokenizer_vocab(tokenizer));
  } else {
    words[count++] = "--vocab";
    if (o->train_bpe) learned_path(o, vocab);
    else snprintf(vocab, sizeof vocab, "%s", o->vocab);
  }
  words[count++] = vocab;
  if (g2z_flags_line(to->services, count, (char *const *)words, &line) == G2Z_OK)
    printf("for train   %s\n", line);
  g2z_release(to->services, line);
}

static void print_summary(const options *o, const output *to, const g2z_tokenizer *tokenizer,
                          double seconds) {
  const int vocab = g2z_tokenizer_vocab(tokenizer);
  char path[PATH_BYTES];
  if (o->train_bpe) {
    learned_path(o, path);
    printf("vocabulary  %d tokens: %s%s\n", vocab, path,
           o->train_bpe > vocab ? " (the text has no further pairs)" : "");
  } else {
    printf("vocabulary  %d tokens: %s\n", vocab, o->vocab ? o->vocab : "bytes");
  }
  for (int i = 0; i < 2; i++) {
    const stream *s = &to->streams[i];
    printf("%-10s  %" PRId64 " document%s, %" PRId64 " token%s", s->split, s->documents,
           G2Z_PLURAL(s->documents), s->tokens, G2Z_PLURAL(s->tokens));
    if (o->paired) printf(", %" PRId64 " of them targets", s->counted);
    if (s->shards > 1) printf(", %" PRId64 " shards to", s->shards);
    if (s->shards) printf(": %s", s->path);
    if (i == VAL && s->documents == 0 && o->val_default)
      printf(". To validate on a part of this text: add --val-tokens N");
    putchar('\n');
  }
  printf("text        %.1f MB in %.2f s, %.1f MB/s with %d thread%s, %.2f bytes per token\n",
         (double)to->bytes / 1e6, seconds, (double)to->bytes / 1e6 / seconds, o->threads,
         G2Z_PLURAL(o->threads), (double)to->text_bytes / (double)to->tokens);
  print_flags(o, to, tokenizer);
}

/* Encodes the sources into shards, and gives the shards their names. */
static g2z_status write_shards(g2z_services *services, const options *o, const source *sources,
                               int count, const g2z_tokenizer *tokenizer, progress *shown) {
  output to;
  memset(&to, 0, sizeof to);
  to.o = o;
  to.services = services;
  to.vocab_hash = g2z_tokenizer_hash(tokenizer);
  to.streams[TRAIN].split = "train";
  to.streams[VAL].split = "val";
  g2z_status status = encode_sources(services, o, tokenizer, sources, count, &to, shown);
  if (status == G2Z_OK && to.streams[TRAIN].tokens == 0)
    status = fail(services, G2Z_BAD_ARGUMENT,
                  "no token is left for training: all %" PRId64 " are in validation; give more "
                  "text, or --val-fraction 0 instead of a validation split",
                  to.streams[VAL].tokens);
  if (status == G2Z_OK) status = commit(o, &to, tokenizer);
  if (status == G2Z_OK) print_summary(o, &to, tokenizer, g2z_seconds() - shown->begin);
  for (size_t i = 0; i < to.count; i++) g2z_shard_writer_free(to.shards[i]);
  free(to.shards);
  return status;
}

/* Refuses to write over the shards of an earlier run, and over inputs. */
static g2z_status check_names(g2z_services *services, const options *o, const source *sources,
                              int count) {
  const change with = {"--overwrite", NULL, NULL, NULL};
  char found[PATH_BYTES];
  size_t old;
  TRY(g2z_make_directory(services, o->out));
  TRY(find_set(services, o, sources, count, &old, found));
  if (old == 0 || o->overwrite) return G2Z_OK;
  advise(services, o, "", with);
  return fail(services, G2Z_BAD_ARGUMENT, "%s exists from an earlier run%s: choose another --name "
              "or --out, or replace the whole set with --overwrite", found,
              old > 1 ? ", with other files of its set" : "");
}

/* Reads the vocabulary, or learns it from the sources. */
static g2z_status make_tokenizer(g2z_services *services, const options *o, const source *sources,
                                 int count, progress *shown, g2z_tokenizer **tokenizer) {
  if (o->train_bpe) return learn(services, o, sources, count, shown, tokenizer);
  TRY(g2z_tokenizer_create(services, o->vocab, tokenizer));
  const int vocab = g2z_tokenizer_vocab(*tokenizer);
  if (vocab <= VOCAB_MAX) return G2Z_OK;
  return fail(services, G2Z_UNSUPPORTED, "%s has %d tokens, but shards hold ids up to %d: use a "
              "vocabulary of at most %d", o->vocab, vocab, VOCAB_MAX - 1, VOCAB_MAX);
}

static g2z_status prepare_sources(g2z_services *services, const options *o, const source *sources,
                                  int count, progress *shown) {
  g2z_tokenizer *tokenizer = NULL;
  TRY(check_names(services, o, sources, count));
  shown->begin = g2z_seconds();
  shown->verb = "learning";
  g2z_status status = make_tokenizer(services, o, sources, count, shown, &tokenizer);
  shown->begin = g2z_seconds();
  shown->verb = "encoding";
  if (status == G2Z_OK) status = write_shards(services, o, sources, count, tokenizer, shown);
  g2z_tokenizer_free(tokenizer);
  return status;
}

static g2z_status prepare(g2z_services *services, const options *o, char **inputs, int count) {
  progress shown;
  int sources;
  memset(&shown, 0, sizeof shown);
  /* One source per input in `given`, then at most two per input in `list`. */
  source *given = (source *)calloc((size_t)count * 3, sizeof *given);
  if (!given) return fail(services, G2Z_NO_MEMORY, "no memory for %d inputs", count);
  source *list = given + count;
  g2z_status status = check_inputs(services, o, inputs, count, given, &shown.total);
  if (status == G2Z_OK) status = list_sources(services, o, given, count, list, &sources);
  if (status == G2Z_OK) status = prepare_sources(services, o, list, sources, &shown);
  free(given);
  return status;
}

static g2z_status encode_filter(g2z_services *services, const options *o,
                                const g2z_tokenizer *tokenizer) {
  const source input = {"-", "standard input", o->field != NULL, 0, UINT64_MAX, 0, 0, TRAIN};
  output to;
  progress shown;
  memset(&to, 0, sizeof to);
  memset(&shown, 0, sizeof shown);
  to.o = o;
  to.services = services;
  shown.verb = "encoding";
  shown.begin = g2z_seconds();
  TRY(encode_sources(services, o, tokenizer, &input, 1, &to, &shown));
  putchar('\n');
  if (fflush(stdout) != 0 || ferror(stdout)) return fail_output(services);
  return G2Z_OK;
}

static g2z_status decode_filter(g2z_services *services, const g2z_tokenizer *tokenizer) {
  const int vocab = g2z_tokenizer_vocab(tokenizer);
  int32_t ids[4096], id = -1; /* the id whose digits are being read; -1: none */
  char *text;
  size_t count = 0, bytes;
  uint64_t offset = 0;
  for (int c = 0; c != EOF; offset++) {
    c = getchar();
    if (stop_signal) return fail_stopped(services);
    int digit = c >= '0' && c <= '9';
    if (digit && id < 0) id = 0;
    if (digit) id = id * 10 + (c - '0');
    if (id >= vocab)
      return fail(services, G2Z_FORMAT, "standard input, byte %" PRIu64 ": the id is above %d: use "
                  "the vocabulary that encoded the text", offset, vocab - 1);
    if (!digit && c != EOF && c != ' ' && (c < '\t' || c > '\r'))
      return fail(services, G2Z_FORMAT, "standard input, byte %" PRIu64 ": 0x%02x is not a digit; "
                  "ids are decimal numbers separated by white space", offset, c);
    if (digit) continue;
    if (id >= 0) ids[count++] = id;
    id = -1;
    if (count < sizeof ids / sizeof *ids && c != EOF) continue;
    TRY(g2z_decode(services, tokenizer, ids, count, &text, &bytes));
    const size_t put = fwrite(text, 1, bytes, stdout);
    g2z_release(services, text);
    if (put != bytes) return fail_output(services);
    count = 0;
  }
  if (ferror(stdin)) return g2z_fail_file(services, errno, "read", "standard input");
  if (fflush(stdout) != 0) return fail_output(services);
  return G2Z_OK;
}

/* ----- main -------------------------------------------------------------- */

static g2z_status run(g2z_services *services, int argc, char **argv, options *o) {
  g2z_tokenizer *tokenizer;
  int count = 0;
  TRY(read_flags(services, argc, argv, o, &count));
  if (o->help) return G2Z_OK;
  TRY(settle(services, o, argv + 1, count));
  if (!o->encode && !o->decode) return prepare(services, o, argv + 1, count);
  TRY(g2z_tokenizer_create(services, o->vocab, &tokenizer));
  g2z_status status;
  if (o->encode) status = encode_filter(services, o, tokenizer);
  else status = decode_filter(services, tokenizer);
  g2z_tokenizer_free(tokenizer);
  return status;
}

int main(int argc, char **argv) {
  g2z_services services;
  struct sigaction stop;
  memset(&services, 0, sizeof services);
  g2z_status status = g2z_begin_program(&services, argv);
  memset(&stop, 0, sizeof stop);
  stop.sa_handler = on_signal; /* without SA_RESTART: a signal must end a read that waits */
  sigaction(SIGINT, &stop, NULL);
  sigaction(SIGTERM, &stop, NULL);
  sigaction(SIGHUP, &stop, NULL);
  options o = default_options();
  o.words = (char **)calloc((size_t)argc, sizeof *argv);
  for (int i = 0; i < argc && o.words; i++) o.words[o.word_count++] = argv[i];
  if (status == G2Z_OK) status = run(&services, argc, argv, &o);
  if (status != G2Z_OK) fprintf(stderr, "prepare_data: %s%s\n", services.error, advice);
  free(o.words);
  return status == G2Z_OK ? 0 : 1;
}
