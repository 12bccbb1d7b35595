/* g2z_text.h: text to GPT-2's token ids and back, on top of gpt2_zero.h. MIT licence.
 *
 * QUICK START
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_text.h"                                      // this order
 *     static g2z_services services;                               // malloc, no log
 *     g2z_tokenizer *tokenizer = NULL;  g2z_encoder *encoder = NULL;
 *     g2z_tokens tokens = {0};  const char *text = "Hello world!";
 *     g2z_status status = g2z_tokenizer_create(&services, "vocab.bpe", &tokenizer);
 *     if (status == G2Z_OK) status = g2z_encoder_create(&services, tokenizer, &encoder);
 *     if (status == G2Z_OK) status = g2z_encode(encoder, text, strlen(text), 0, &tokens);
 *     if (status != G2Z_OK) puts(services.error);                 // 15496 995 0 in tokens.ids
 *     g2z_tokens_free(&tokens);  g2z_encoder_free(encoder);  g2z_tokenizer_free(tokenizer);
 *
 * Names that begin with g2zt_ or G2ZT_ are private.
 *
 * DOES NOT
 *     - split texts by other patterns than GPT-2's, or normalize them;
 *     - know special tokens other than <|endoftext|>;
 *     - read vocabularies that list tokens instead of merges (tiktoken's, llm.c's).
 *
 * FROM TEXT TO IDS
 *     bytes    Text is UTF-8. Invalid bytes become U+FFFD or are refused.
 *     pieces   GPT-2's pattern splits the text into words, numbers, punctuation and white space, by
 *              the classes of Unicode 16.0. No token crosses the border of two pieces.
 *     cache    Nearly every piece has occurred before: an encoder keeps the ids of 131,072 pieces.
 *     merges   A new piece starts as single bytes. Among the pairs that a merge joins, the one with
 *              the smallest id is joined first, until none is left.
 *     ids      Every text gets the same ids as from OpenAI's and Hugging Face's encoders.
 *
 * LONG TEXTS, THREADS
 *     Threads may share a tokenizer, which never changes; each thread needs its own encoder.
 *     g2z_encode_cut finds a place to cut a text so that the parts give the ids of the whole.
 *     g2z_encode_part encodes a text that arrives in parts, in bounded memory.
 *
 * VOCABULARY FILES
 *     vocab.bpe, merges.txt   "#version: 0.2", then one line "LEFT RIGHT" per merge. Each byte is a
 *                             printable character: 33-126, 161-172 and 174-255 stand for
 *                             themselves, the other 68 are U+0100, U+0101, ... in their order
 *     tokenizer.json          Hugging Face's, of a byte-level BPE without a normalizer and without
 *                             added tokens except <|endoftext|>. Truncation, padding, dropout and
 *                             post_processor are ignored
 *     vocab.json              token to id; compared if it lies next to merges.txt
 *     Ids follow from the merges alone: 0 to 255 are the bytes, first the printable ones, then the
 *     other 68; merge i makes 256 + i; <|endoftext|> is the last.
 *
 * PAPERS: Radford et al. 2019 (GPT-2); Sennrich et al. 2016, arXiv:1508.07909 (BPE) */

#ifndef G2Z_TEXT_INCLUDED
#define G2Z_TEXT_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_text.h: include gpt2_zero.h before it"
#endif
#include "g2z_program.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ----- vocabulary -------------------------------------------------------- */

/* A list of merges and its tokens. It keeps `services`, which must outlive it. */
typedef struct g2z_tokenizer g2z_tokenizer;

/* Reads vocab.bpe, merges.txt or tokenizer.json; the content shows which. path NULL: makes the
 * byte-level vocabulary, 256 tokens and <|endoftext|>. Refuses ids that do not follow from the
 * merges, a token of more than 1024 bytes, and more than 1048576 tokens. */
G2Z_API g2z_status g2z_tokenizer_create(g2z_services *services, const char *path,
                                        g2z_tokenizer **out);
/* Reads a vocabulary from memory; keeps no pointer to `text`. `label` names it in errors. */
G2Z_API g2z_status g2z_tokenizer_parse(g2z_services *services, const char *label, const void *text,
                                       size_t bytes, g2z_tokenizer **out);
G2Z_API void g2z_tokenizer_free(g2z_tokenizer *tokenizer); /* NULL is fine */
/* The number of ids: 256 + merges + 1. GPT-2: 50257. <|endoftext|> is the last. */
G2Z_API int g2z_tokenizer_vocab(const g2z_tokenizer *tokenizer);
G2Z_API int g2z_tokenizer_eot(const g2z_tokenizer *tokenizer);
/* Identifies a vocabulary; never 0. It is the 64-bit FNV-1a of the merges: two uint32 ids each. */
G2Z_API uint64_t g2z_tokenizer_hash(const g2z_tokenizer *tokenizer);
/* The bytes of a token, owned by the tokenizer; NULL for an unknown id. <|endoftext|> has 13. */
G2Z_API const unsigned char *g2z_tokenizer_token(const g2z_tokenizer *tokenizer, int id,
                                                 size_t *bytes);
/* Writes merges.txt, which g2z_tokenizer_create and the encoders of Hugging Face and OpenAI
 * read. */
G2Z_API g2z_status g2z_tokenizer_write_merges(g2z_services *services,
                                              const g2z_tokenizer *tokenizer, const char *path);
/* Writes vocab.json. transformers' GPT2Tokenizer opens it together with merges.txt. */
G2Z_API g2z_status g2z_tokenizer_write_vocab(g2z_services *services,
                                             const g2z_tokenizer *tokenizer, const char *path);

/* ----- encode and decode ------------------------------------------------- */

typedef struct g2z_tokens {     /* a growable list of ids; zero it to start */
  int32_t *ids;
  size_t count, capacity;
  g2z_services *services;       /* set by the first call that appends */
} g2z_tokens;
/* Makes room for a total of `need` ids, with the list's own services. If it fails, the sentence is
 * in `services`. */
G2Z_API g2z_status g2z_tokens_reserve(g2z_services *services, g2z_tokens *tokens, size_t need);
G2Z_API void g2z_tokens_free(g2z_tokens *tokens); /* NULL is fine */

/* The encoder of one thread. It has a cache of 8 MiB. It also needs 48 bytes of memory per byte of
 * the longest piece; a piece of more than 1 MiB needs no more. It keeps `services` and
 * `tokenizer`. */
typedef struct g2z_encoder g2z_encoder;

typedef enum g2z_encode_flags {
  G2Z_ENCODE_DEFAULT = 0,       /* invalid UTF-8 becomes U+FFFD; <|endoftext|> is ordinary text */
  G2Z_ENCODE_STRICT = 1,        /* invalid UTF-8 fails with G2Z_FORMAT and the offset */
  G2Z_ENCODE_ALLOW_SPECIAL = 2  /* <|endoftext|> in the text becomes its id */
} g2z_encode_flags;

G2Z_API g2z_status g2z_encoder_create(g2z_services *services, const g2z_tokenizer *tokenizer,
                                      g2z_encoder **out);
G2Z_API void g2z_encoder_free(g2z_encoder *encoder); /* NULL is fine */
/* Appends the ids of a complete text: the end of the text ends its last piece. `flags` is a sum of
 * g2z_encode_flags. A call that fails appends nothing. */
G2Z_API g2z_status g2z_encode(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                              g2z_tokens *out);
/* The largest p up to `bytes` where white space follows another character; 0 if there is none.
 * Encoding [0, p) and the rest separately gives the ids of the whole. */
G2Z_API size_t g2z_encode_cut(const void *text, size_t bytes);
/* Encodes a text of any length in bounded memory, part by part, even if g2z_encode_cut finds no
 * place. Appends the ids that no later text can change; they stand for the first *used bytes. The
 * next call gets the bytes after these, and more text. used NULL: the text ends here. Later text
 * cannot change a piece that ends at least 64 bytes before the end, or the first part of a piece of
 * more than about 1 MiB. */
G2Z_API g2z_status g2z_encode_part(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                                   g2z_tokens *out, size_t *used);
/* Makes the text of ids (not necessarily valid UTF-8) and a NUL; free *text with g2z_release.
 * G2Z_BAD_ARGUMENT: an id is outside the vocabulary. */
G2Z_API g2z_status g2z_decode(g2z_services *services, const g2z_tokenizer *tokenizer,
                              const int32_t *ids, size_t count, char **text, size_t *bytes);

/* ----- learning a vocabulary --------------------------------------------- */

/* Counts the pieces of texts and makes merges, as Hugging Face's trainer does: the most frequent
 * pair comes first; of equally frequent pairs, the smaller pair of ids. It keeps `services`, and
 * one copy of each different piece. */
typedef struct g2z_bpe_trainer g2z_bpe_trainer;
G2Z_API g2z_status g2z_bpe_trainer_create(g2z_services *services, g2z_bpe_trainer **out);
/* Counts the pieces that g2z_encode makes of a complete text. A call that fails counts none. */
G2Z_API g2z_status g2z_bpe_trainer_feed(g2z_bpe_trainer *trainer, const void *text, size_t bytes,
                                        int flags);
/* Counts the pieces that g2z_encode_part makes of the first *used bytes. used NULL: the text is
 * complete. */
G2Z_API g2z_status g2z_bpe_trainer_feed_part(g2z_bpe_trainer *trainer, const void *text,
                                             size_t bytes, int flags, size_t *used);
/* Adds the counts of `other`, which another thread may have fed. A call that fails adds none. */
G2Z_API g2z_status g2z_bpe_trainer_add(g2z_bpe_trainer *trainer, const g2z_bpe_trainer *other);
/* Makes vocab - 257 merges, or fewer if no pair is left. A token has at most 1024 bytes. The
 * trainer keeps its counts: it may be fed more and finished again. */
G2Z_API g2z_status g2z_bpe_trainer_finish(g2z_bpe_trainer *trainer, int vocab,
                                          g2z_tokenizer **out);
G2Z_API void g2z_bpe_trainer_free(g2z_bpe_trainer *trainer); /* NULL is fine */

/* ----- files of text ------------------------------------------------------ */

typedef struct g2z_text_name {  /* what a file's name shows */
  const char *unpack;           /* "gzip -dc" for FILE.gz, "zstd -dc --long=31" for FILE.zst; NULL:
                                 * not packed */
  size_t bytes;                 /* length of the name without .gz or .zst */
  int json;                     /* FILE.jsonl, .ndjson, .json: one document per line */
} g2z_text_name;
G2Z_API g2z_text_name g2z_text_named(const char *path);

typedef struct g2z_text_file {  /* a file, or the output of its unpacker */
  const char *label, *unpack;
  int file, child;              /* descriptor to read, -1: closed; unpacker's process, 0: none */
  int errors;                   /* standard error of the unpacker, if there is one */
} g2z_text_file;
/* Opens a file; "-" is standard input. For a packed file, starts the unpacker. Reading may block if
 * the file is a pipe. */
G2Z_API g2z_status g2z_text_open(g2z_services *services, const char *path, g2z_text_file *out);
/* Call it when all `bytes` bytes were read. If the unpacker failed, the call fails with its
 * message. */
G2Z_API g2z_status g2z_text_end(g2z_services *services, g2z_text_file *text, uint64_t bytes);
G2Z_API void g2z_text_close(g2z_text_file *text); /* may be called at any time */
/* Reads a whole file as g2z_read_file does. Unpacks a packed file, which must contain text. */
G2Z_API g2z_status g2z_text_read(g2z_services *services, const char *path, size_t limit,
                                 char **text, size_t *bytes);

/* The number of bytes of white space at the start, or at the end, of a text. It is the white space
 * that Python's str.strip removes, as datasets and other programs do: Unicode's White_Space, and
 * U+001C to U+001F. */
G2Z_API size_t g2z_text_white(const void *text, size_t bytes);
G2Z_API size_t g2z_text_white_end(const void *text, size_t bytes);

#define G2Z_TEXT_LOOK 65536     /* first bytes of a file that show its kind */
typedef struct g2z_text_remedy {
  char command[700];            /* shell command that converts the file to text; "": none */
  char made[400];               /* name of the file that the command makes */
} g2z_text_remedy;
/* Refuses a file whose first bytes are not text in UTF-8. Up to 1 % of the characters may be
 * invalid; up to 10 %, unless more than three quarters of them are letters in Latin-1. The command
 * that converts the file is put into *remedy, or if `remedy` is NULL, into the error's sentence. */
G2Z_API g2z_status g2z_text_check(g2z_services *services, const char *path, int json,
                                  const char *text, size_t bytes, g2z_text_remedy *remedy);
/* Finds the values of the fields fields[0] and fields[1] in a line of JSON. Values must be strings.
 * With `both` 0, a fields[1] that is no string is ignored. If a field occurs twice, the last one
 * counts. found[i].at NULL: the field is missing. `label` and `json` are as in g2z_json_open. */
G2Z_API g2z_status g2z_text_document(g2z_services *services, const char *label, const char *line,
                                     size_t bytes, const char *const fields[2], int both,
                                     g2z_json *json, g2z_json_text found[2]);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_TEXT_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_TEXT_IMPLEMENTED)
#define G2Z_TEXT_IMPLEMENTED

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#define G2ZT_TOKEN_BYTES 1024      /* GPT-2's longest token has 128 bytes */
#define G2ZT_VOCAB_MAX 1048576     /* tokens of 1024 bytes: at most 1 GiB in all */
#define G2ZT_EOT "<|endoftext|>"
#define G2ZT_EOT_BYTES (sizeof G2ZT_EOT - 1)

/* ===== UTF-8 and classes =================================================
 * In:  bytes. Out: characters, and the class of each in GPT-2's pattern.
 * Law: g2zt_valid_text is called first: the functions that look for characters need valid text. */

enum { G2ZT_OTHER, G2ZT_LETTER, G2ZT_NUMBER, G2ZT_WHITE };

/* The classes of Unicode 16.0 from U+0000 on, as runs. A run is a letter and its length if that is
 * above 1: o others, l letters (general category L), n numbers (N), w White_Space. All characters
 * after the last run are o. */
#define G2ZT_CLASSIFIED 0x323B0
static const char g2zt_class_runs[] =
    "o9w5o18wo15n10o7l26o6l26o10wo26wo9lo7n2olo3nlon3ol23ol31ol458o4l12o14l5o7lolo129l5ol2o2l4olo6l"
    "ol3olol20ol83ol139o8l166ol38o2lo6l41o71l27o4l4o45l43o21n10o4l2ol99olo15l2o7l2n10l3o2lo16lol30o"
    "29l89o11lo14n10l33o9l2o4lo5l22o4lo9lo3lo23l25o7l11o5l24ol6o17l42o58l54o3lo18lo7l10o4n10ol16o4l"
    "8o2l2o2l22ol7olo3l4o3lo16lo13l2ol3o4n10l2o2n6o2lo8l6o4l2o2l22ol7ol2ol2ol2o31l4olo7n10o2l3o16l9"
    "ol3ol22ol7ol2ol5o3lo18lo15l2o4n10o9lo11l8o2l2o2l22ol7ol2ol5o3lo30l2ol3o4n10oln6o11lol6o3l3ol4o"
    "3l2olol2o3l2o3l3o3l12o22lo21n13o18l8ol3ol23ol16o3lo26l3o2lo2l2o4n10o8n7olo4l8ol3ol23ol10ol5o3l"
    "o31l2ol2o4n10ol2o17l9ol3ol41o2lo16lo5l3on7l3o4n19ol6o5l18o3l24ol9olo2l7o31n10o17l48ol2o12l7o9n"
    "10o39l2olol5ol24olol10ol2o9lo2l5olo9n10o2l4o32lo31n20o12l8ol36o27l5o115l43o20ln10o6l6o4l4o3lo3"
    "l2o7l3o4l13o12lon10o6l38olo5lo2l43ol333ol4o2l7olol4o2l41ol4o2l33ol4o2l7olol4o2l15ol57ol4o2l67o"
    "14n20o3l16o16l86o2l6o3l620o2l17wl26o5l75o3n3l8o7l18o13l19o14l18o14l13ol3o15l52o35lo4lo3n10o6n1"
    "0o22n10o6l89o7l5o2l34olo5l70o10l31o39n10l30o2l5o11l44o4l26o6n11o37l23o9l53o43n10o6n10o13lo93l4"
    "7o17l8o3n10o41l30o13l2n10l44o26l36o28n10o3l3n10l36o2l11o5l43o2l3o41l4ol6ol2o3lo5l192o64l278o2l"
    "6o2l38o2l6o2l8olololol31o2l53ol7olo3l3ol7o3l4o2l6o4l13o5l3ol7o3w11o29w2o5wo47wo16nlo2n6o5ln10o"
    "6l13o101lo4lo2l10olo3l5o6lololol4ol11o2l4o5l5o4lon51l2n5o726n60o78n22o630n30o1132l229o6l4o3l2o"
    "9no2l38olo5lo2l56o7lo16l23o9l7ol7ol7ol7ol7ol7ol7ol7o80lo464wo4l2no25n9o7l5o2n3l2o4l86o6l3ol90o"
    "l4o5l43ol94o3n4o10l32o48l16o32n10o30n8on15o32n10o39n15o320l6592o64l22157o67l46o2l269o3l16n10l2"
    "o20l47o16l31o2l70n10o39l9o2l103o2l67o2l2olol8o21l16ol3ol4ol23o13n6o10l52o14l50o28n10o24l6o3lol"
    "2on10l28o10l23o25l29o7l47o28ln10o6l5ol10n10l5ol41o23l3ol8o4n10o6l23o3lo3l50olo3l2o2l5o2lolo24l"
    "3o2l11o7l3o12l6o2l6o2l6o9l7ol7ol43ol14o6l115o13n10o6l11172o12l23o4l49o8452l366o2l106o38l7o12l5"
    "o5lol10ol13ol5olol2ol2ol108o33l363o18l64o2l54o40l12o116l5ol135o19n10o7l26o6l26o11l89o3l6o2l6o2"
    "l6o2l3o35l12ol26ol19ol2ol15o2l14o34l123o12n45o12n57o17n2o244l29o3l49o16n27o4l32n4o9l20nl8no5l3"
    "8o10l30o2l36o4l8on5o42l158o2n10o6l36o4l36o4l40o8l52o12l11ol15ol7ol2ol11ol15ol7ol2o3l52o12l311o"
    "9l22o10l8o24l6ol42ol9o69l6o2lol44ol2o3lo2l23o2n8l23o2n7l31o8n9o48l19ol2o5n5l22n6o4l26o70l56o4n"
    "2l2n16o2n46lo15l4ol3ol29o10n9o23l29n2ol29n3o32l8ol28o6n5o16l54o10l22o2n8l19o5n8l18o23n7o80l73o"
    "55l51o13l51o7n6l36o12n10o6n10l28o9l23o218n31ol42o6l2o16l3o59l29n10lo8l22o11n4o27l18o46l21n7o20"
    "l23o12l53o26n30ol2o2lo13l45o32l25o7n10o9l36o15n10o4lo2lo8l35o3lo12l48o14l4o11n10lolo4n20o11l18"
    "ol25o19l2o63l7olol4ol15ol10o7l47o17n10o11l8o2l2o2l22ol7ol2ol5o3lo18lo12l5o30l10olo2lol38olo25l"
    "olo44l53o18l4o5n10o5l3o30l48o20l2olo8n10o166l47o41l4o36l48o20lo11n10o38l43o13lo7n10o6n20o28l27"
    "o21n12o4l7o185l44o116l64n19o12l8o2lo2l8ol2ol24o15lolo14n10o70l8o2l39o16lolo28lo10l40o7lo21lo11"
    "l46o19lo18l73o199l33o15n10o6l9ol37o17lo15n29o5l30o112l7ol2ol38o21lo9n10o6l6ol2ol32o14lo7n10o31"
    "0l19o15lol13ol34o28n10o86lo15n21o43l922o102n111o17l196o2636l97o15l1072o17l6o25l3995o5l583o6841"
    "l30o18n10o1734l569o7l31on10o6l79on10o6l30o18l48o16l4o12n10on7ol21o5l19o432l45o3n10o198l64n23o1"
    "05l75o5lo66l13o64l2olo28l6136o8l1238o41l10o8935l4ol7ol2ol291o15lo29l3o2lo14l4o8l396o2308l107o5"
    "l13o3l9o7l10o4182n10o1478n20o12n20o108n25o135l85ol71ol2o2lo2l2o2l4ol12olol7ol65ol4o2l8ol7ol28o"
    "l4ol5olo3l7ol340o2l25ol25ol31ol25ol31ol25ol31ol25ol31ol25ol8o2n50o1792l31o6l6o261l62o146l45o10"
    "l7o2n10o4lo321l30o18l44o4n10o470l28o4n10o214l30o2ln10o485l7ol4ol2ol15ol197o2n9o48l68o7lo4n10o7"
    "91n59on3on4o76n45on15o194l4ol27ol2olo2lol10ol4ololo6lo4lololol3ol2olo2lololololol2olo2l4ol7ol4"
    "ol4olol10ol17o5l3ol5ol17o580n13o2787n10o1030l42720o32l4154o6l222o2l5762o14l7473o15l622o2466l54"
    "2o1506l4939o5l4192";

/* Makes a table with the class of each code point. It has 201 KiB, but a text uses only a few of
 * its cache lines. */
static g2z_status g2zt_classes_create(g2z_services *services, unsigned char **out) {
  static const char kinds[] = "olnw"; /* in the order of the enum */
  G2Z_TRY(G2Z_NEW(services, G2ZT_CLASSIFIED, out));
  size_t at = 0;
  for (const char *run = g2zt_class_runs; *run;) {
    int kind = (int)(strchr(kinds, *run++) - kinds);
    char *after;
    size_t count = strtoul(run, &after, 10);
    if (after == run) count = 1;
    memset(*out + at, kind, count);
    at += count;
    run = after;
  }
  return G2Z_OK;
}

/* The class of the character at p, which must be valid. *next becomes the place after it. */
static inline int g2zt_class(const unsigned char *classes, const unsigned char *p,
                             const unsigned char **next) {
  uint32_t c = *p++;
  if (c >= 0x80) {
    int more = 1 + (c >= 0xE0) + (c >= 0xF0);
    for (c &= 0x3Fu >> more; more; more--) c = c << 6 | (*p++ & 0x3Fu);
  }
  *next = p;
  if (c >= G2ZT_CLASSIFIED) return G2ZT_OTHER;
  return classes[c];
}

/* At p there is no valid character. Returns the number of bytes that one U+FFFD replaces there: the
 * longest run of bytes that can begin a character, or 1 (Unicode's "maximal subpart", as in
 * Python). */
static size_t g2zt_utf8_broken(const unsigned char *p, const unsigned char *end) {
  for (size_t count = 3; count > 1; count--)
    for (int fill = 0x80; count <= (size_t)(end - p) && fill <= 0xBF; fill += 0x3F) {
      unsigned char whole[4]; /* 0x80 or 0xBF is a valid second byte after any first byte */
      memset(whole, fill, sizeof whole);
      memcpy(whole, p, count);
      if (g2z_utf8_length(whole, whole + 4) > count) return count;
    }
  return 1;
}

/* The number of bytes before the first invalid one. */
static size_t g2zt_utf8_valid(const unsigned char *text, size_t bytes) {
  const unsigned char *p = text, *end = text + bytes;
  for (size_t step = 0; p < end; p += step) {
    for (uint64_t eight; end - p >= 8; p += 8) { /* ASCII */
      memcpy(&eight, p, 8);
      if (eight & 0x8080808080808080u) break;
    }
    if (p == end) break;
    step = g2z_utf8_length(p, end);
    if (step == 0) break;
  }
  return (size_t)(p - text);
}

/* Copies text with U+FFFD in place of invalid bytes until `most` bytes are written. Returns the
 * number written for the first *used bytes. out NULL: only counts. */
static size_t g2zt_utf8_repair(const unsigned char *text, size_t bytes, unsigned char *out,
                               size_t most, size_t *used) {
  size_t made = 0, at = 0;
  while (at < bytes && made < most) {
    const void *character = text + at;
    size_t step = g2z_utf8_length(text + at, text + bytes), count = step;
    if (step == 0) {
      character = "\xEF\xBF\xBD"; /* U+FFFD */
      count = 3;
      step = g2zt_utf8_broken(text + at, text + bytes);
    }
    if (out) memcpy(out + made, character, count);
    made += count;
    at += step;
  }
  *used = at;
  return made;
}

typedef struct g2zt_repair { /* memory for repaired texts */
  unsigned char *bytes;
  size_t capacity;
} g2zt_repair;

/* If *text is not valid UTF-8, points *text to a repaired copy in `repair`. With `strict`, fails
 * instead. */
static g2z_status g2zt_valid_text(g2z_services *services, g2zt_repair *repair, int strict,
                                  const unsigned char **text, size_t *bytes) {
  size_t valid = g2zt_utf8_valid(*text, *bytes);
  if (valid == *bytes) return G2Z_OK;
  if (strict)
    return g2z_fail(services, G2Z_FORMAT, "invalid UTF-8: byte 0x%02x at offset %zu; convert the "
                    "text to UTF-8, or encode without G2Z_ENCODE_STRICT (--strict) for U+FFFD in "
                    "its place", (*text)[valid], valid);
  size_t used, repaired = g2zt_utf8_repair(*text, *bytes, NULL, SIZE_MAX, &used);
  G2Z_TRY(G2Z_GROW(services, &repair->bytes, &repair->capacity, 0, repaired));
  g2zt_utf8_repair(*text, *bytes, repair->bytes, SIZE_MAX, &used);
  *text = repair->bytes;
  *bytes = repaired;
  return G2Z_OK;
}

/* ===== pieces ============================================================
 * In:  valid text. Out: where its pieces end, by GPT-2's pattern,
 *        's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * Law: a run of one class other than white space is a piece, with one space before it. The last
 *      character of a run of white space begins the next piece if text follows. The end of a piece
 *      is certain once the character after it and the two bytes after an apostrophe are known. */

#define G2ZT_CERTAIN 64 /* later text does not change a piece that ends so far before the end */

/* The last place at which the end of a piece is certain, although the text may continue. */
static const unsigned char *g2zt_certain(const unsigned char *text, const unsigned char *end) {
  if (end - text <= G2ZT_CERTAIN) return text;
  return end - G2ZT_CERTAIN;
}

/* The length of the contraction that begins with the apostrophe at p; 0: there is none. */
static size_t g2zt_contraction(const unsigned char *p, const unsigned char *end) {
  if (end - p < 2) return 0;
  if (p[1] == 's' || p[1] == 'd' || p[1] == 'm' || p[1] == 't') return 2;
  if (end - p < 3) return 0;
  if (p[1] == 'l' && p[2] == 'l') return 3;
  if ((p[1] == 'v' || p[1] == 'r') && p[2] == 'e') return 3;
  return 0;
}

/* The end of the piece that starts at p. */
static inline const unsigned char *g2zt_piece_end(const unsigned char *classes,
                                                  const unsigned char *p,
                                                  const unsigned char *end) {
  const unsigned char *at = p, *next, *last = p;
  if (*p == '\'' && g2zt_contraction(p, end)) return p + g2zt_contraction(p, end);
  if (*p == ' ' && p + 1 < end) at++;
  int kind = g2zt_class(classes, at, &next);
  if (kind == G2ZT_LETTER) {
    /* Skip ASCII letters, eight at a time: in a loop over bytes, the processor mispredicts the end
     * of nearly every word. In `others`, the top bit of a byte marks a byte that is no letter. Each
     * byte is added as 7 bits, so no sum carries into the next byte. */
    const uint64_t ones = 0x0101010101010101u, top = 0x80 * ones;
    while (end - next >= 8) {
      uint64_t eight;
      memcpy(&eight, next, 8);
      const uint64_t small = (eight & ~top) | 0x20 * ones;
      const uint64_t from_a = small + (0x80 - 'a') * ones;
      const uint64_t above_z = small + (0x80 - 'z' - 1) * ones;
      const uint64_t others = (~from_a | above_z | eight) & top;
      if (others) {
        next += __builtin_ctzll(others) / 8;
        break;
      }
      next += 8;
    }
    if (next < end && *next < 0x80 && classes[*next] != G2ZT_LETTER) return next;
  }
  if (kind != G2ZT_WHITE) {
    do at = next;
    while (at < end && g2zt_class(classes, at, &next) == kind);
    return at;
  }
  for (at = p; at < end && g2zt_class(classes, at, &next) == G2ZT_WHITE; at = next) last = at;
  if (at == end || last == p) return at;
  return last;
}

/* The length of the White_Space character at p; 0: there is another character, or an incomplete
 * one. Needs no table, and the text may be invalid. */
static size_t g2zt_white_bytes(const unsigned char *p, const unsigned char *end) {
  if (p == end) return 0;
  if (*p == ' ' || (*p >= 0x09 && *p <= 0x0D)) return 1;
  if (end - p >= 2 && p[0] == 0xC2 && (p[1] == 0x85 || p[1] == 0xA0)) return 2;
  if (end - p < 3 || p[0] < 0xE1 || p[0] > 0xE3) return 0;
  uint32_t c = (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
  if ((p[1] & 0xC0) != 0x80 || (p[2] & 0xC0) != 0x80) return 0;
  if ((c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
      c == 0x1680 || c == 0x3000)
    return 3;
  return 0;
}

G2Z_API size_t g2z_encode_cut(const void *text, size_t bytes) {
  const unsigned char *begin = (const unsigned char *)text, *end = begin + bytes;
  for (size_t p = bytes; p-- > 1;) {
    if (!g2zt_white_bytes(begin + p, end)) continue;
    int white_before = 0; /* 1: white space precedes p; the text may be invalid */
    for (size_t back = 1; back <= 3 && back <= p; back++)
      white_before |= g2zt_white_bytes(begin + p - back, begin + p) == back;
    if (!white_before) return p;
  }
  return 0;
}

/* ===== tables ============================================================
 * In:  byte strings. Out: the number of a string; the smallest of many items.
 * Law: strings are in a hash table with linear probing, at most half full; nothing is ever removed.
 *      The caller grows a heap before it pushes. */

typedef struct g2zt_words { /* a set of byte strings ("words"), numbered as they were added */
  unsigned char *bytes;     /* all strings, concatenated */
  size_t bytes_capacity;
  uint32_t *starts;         /* [count + 1] */
  size_t starts_capacity;
  uint32_t *table;          /* [slots] number of a word + 1; 0: the slot is empty */
  size_t slots;             /* a power of two; 0 before the first word */
  size_t count;
} g2zt_words;

static void g2zt_words_free(g2z_services *services, g2zt_words *words) {
  g2z_release(services, words->bytes);
  g2z_release(services, words->starts);
  g2z_release(services, words->table);
}

static inline size_t g2zt_word_bytes(const g2zt_words *words, size_t word) {
  return words->starts[word + 1] - words->starts[word];
}

/* The number of bytes of all words. */
static size_t g2zt_words_bytes(const g2zt_words *words) {
  if (words->count == 0) return 0;
  return words->starts[words->count];
}

/* The slot of a word; if the set lacks the word, the empty slot for it. */
static inline size_t g2zt_words_slot(const g2zt_words *words, const unsigned char *bytes,
                                     size_t count) {
  const uint64_t odd = 0x9E3779B97F4A7C15u;
  uint64_t hash = count * odd;
  for (size_t at = 0; at < count; at += 8) {
    uint64_t eight = 0;
    memcpy(&eight, bytes + at, count - at < 8 ? count - at : 8);
    hash = (hash ^ eight) * odd;
    hash ^= hash >> 29;
  }
  size_t slot = (size_t)(hash ^ hash >> 32) & (words->slots - 1);
  for (; words->table[slot]; slot = (slot + 1) & (words->slots - 1)) {
    size_t word = words->table[slot] - 1;
    if (g2zt_word_bytes(words, word) == count &&
        memcmp(words->bytes + words->starts[word], bytes, count) == 0)
      break;
  }
  return slot;
}

/* The number of a word, or -1. The set must not be empty. */
static inline int64_t g2zt_words_find(const g2zt_words *words, const unsigned char *bytes,
                                      size_t count) {
  return (int64_t)words->table[g2zt_words_slot(words, bytes, count)] - 1;
}

/* Finds or adds a word. *word becomes its number. A word is new if *word equals the count before
 * the call. */
static g2z_status g2zt_words_add(g2z_services *services, g2zt_words *words,
                                 const unsigned char *bytes, size_t count, size_t *word) {
  const size_t used = g2zt_words_bytes(words);
  if (words->count * 2 >= words->slots) {
    uint32_t *table;
    size_t slots = 1024;
    if (words->slots) slots = words->slots * 2;
    G2Z_TRY(G2Z_NEW(services, slots, &table));
    g2z_release(services, words->table);
    words->table = table;
    words->slots = slots;
    for (size_t i = 0; i < words->count; i++)
      words->table[g2zt_words_slot(words, words->bytes + words->starts[i],
                                   g2zt_word_bytes(words, i))] = (uint32_t)i + 1;
  }
  size_t slot = g2zt_words_slot(words, bytes, count);
  if (words->table[slot]) {
    *word = words->table[slot] - 1;
    return G2Z_OK;
  }
  *word = words->count;
  /* The limit leaves room for the barriers between words during vocabulary training. */
  if (used + words->count + count >= UINT32_MAX - 2)
    return g2z_fail(services, G2Z_UNSUPPORTED, "more than 4 GiB of different words: learn the "
                    "vocabulary from a part of the text");
  G2Z_TRY(G2Z_GROW(services, &words->bytes, &words->bytes_capacity, used, used + count));
  G2Z_TRY(G2Z_GROW(services, &words->starts, &words->starts_capacity,
                   words->count + (words->count > 0), words->count + 2));
  memcpy(words->bytes + used, bytes, count);
  words->starts[words->count] = (uint32_t)used;
  words->starts[words->count + 1] = (uint32_t)(used + count);
  words->table[slot] = (uint32_t)++words->count;
  return G2Z_OK;
}

typedef struct g2zt_pair { /* two ids; in a set of pairs they are a word of 8 bytes */
  uint32_t left, right;
} g2zt_pair;

static inline g2zt_pair g2zt_pair_at(const g2zt_words *pairs, size_t number) {
  g2zt_pair pair;
  memcpy(&pair, pairs->bytes + number * sizeof pair, sizeof pair);
  return pair;
}

typedef struct g2zt_item { /* ordered by first, then by second */
  uint64_t first, second;
} g2zt_item;

typedef struct g2zt_heap {
  g2zt_item *items;
  size_t count, capacity;
} g2zt_heap;

static inline int g2zt_item_before(const g2zt_item *a, const g2zt_item *b) {
  if (a->first != b->first) return a->first < b->first;
  return a->second < b->second;
}

static void g2zt_heap_push(g2zt_heap *heap, uint64_t first, uint64_t second) {
  g2zt_item item = {first, second}, *items = heap->items;
  size_t hole = heap->count++;
  for (; hole && g2zt_item_before(&item, &items[(hole - 1) / 2]); hole = (hole - 1) / 2)
    items[hole] = items[(hole - 1) / 2];
  items[hole] = item;
}

/* Removes items[0], the smallest. */
static void g2zt_heap_pop(g2zt_heap *heap) {
  g2zt_item *items = heap->items, *last = &items[--heap->count];
  size_t hole = 0, child;
  for (; (child = 2 * hole + 1) < heap->count; hole = child) {
    child += child + 1 < heap->count && g2zt_item_before(&items[child + 1], &items[child]);
    if (g2zt_item_before(last, &items[child])) break;
    items[hole] = items[child];
  }
  items[hole] = *last;
}

/* ===== vocabulary ========================================================
 * In:  merges, in order. Out: tokens, their ids, and the id that two ids make.
 * Law: ids follow from the merges alone. A merge joins two older tokens, so its id is above their
 *      ids. Therefore a merge makes only later merges possible. */

struct g2z_tokenizer {
  g2z_services *services;
  g2zt_words tokens;        /* all except <|endoftext|>, in the order of their ids */
  g2zt_words merges;        /* pairs of ids: pair number i makes the id 256 + i */
  uint64_t may_join[16384]; /* one bit per hash of two ids; 0: no pair with this hash makes an id */
  int32_t byte_ids[256];
  unsigned char *classes;   /* [G2ZT_CLASSIFIED] */
};

#define G2ZT_PRINTABLE 188 /* number of bytes that print in Latin-1: these have the first ids */

/* Makes the byte-level vocabulary. Merges may be added to it. */
static g2z_status g2zt_tokenizer_new(g2z_services *services, g2z_tokenizer **out) {
  static const unsigned char runs[][2] = {
      {'!', '~'}, {161, 172}, {174, 255}, /* these print; 173 is the soft hyphen */
      {0, ' '}, {127, 160}, {173, 173}};
  G2Z_TRY(G2Z_NEW(services, 1, out));
  g2z_tokenizer *tokenizer = *out;
  tokenizer->services = services;
  g2z_status status = g2zt_classes_create(services, &tokenizer->classes);
  int id = 0;
  for (size_t run = 0; run < G2Z_COUNT(runs); run++)
    for (int c = runs[run][0]; c <= runs[run][1] && status == G2Z_OK; c++) {
      const unsigned char byte = (unsigned char)c;
      size_t word;
      tokenizer->byte_ids[byte] = id++;
      status = g2zt_words_add(services, &tokenizer->tokens, &byte, 1, &word);
    }
  if (status == G2Z_OK) return G2Z_OK;
  g2z_tokenizer_free(tokenizer);
  *out = NULL;
  return status;
}

/* The bit of may_join that belongs to two ids: a hash below 2^20. */
static inline size_t g2zt_join_bit(uint32_t left, uint32_t right) {
  return (size_t)(((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u >> 44);
}

/* Adds the merge of two tokens, which makes the next id. On G2Z_FORMAT the error's sentence
 * contains only the reason: the caller adds the place. */
static g2z_status g2zt_tokenizer_join(g2z_tokenizer *tokenizer, uint32_t left, uint32_t right) {
  g2z_services *services = tokenizer->services;
  g2zt_words *tokens = &tokenizer->tokens;
  const g2zt_pair pair = {left, right};
  size_t next = tokens->count, a = g2zt_word_bytes(tokens, left), id;
  size_t b = g2zt_word_bytes(tokens, right);
  unsigned char joined[G2ZT_TOKEN_BYTES];
  if (a + b > sizeof joined)
    return g2z_fail(services, G2Z_FORMAT, "a token of %zu bytes; at most %d are supported", a + b,
                    G2ZT_TOKEN_BYTES);
  if (next + 1 >= G2ZT_VOCAB_MAX)
    return g2z_fail(services, G2Z_FORMAT, "more than %d tokens", G2ZT_VOCAB_MAX);
  memcpy(joined, tokens->bytes + tokens->starts[left], a);
  memcpy(joined + a, tokens->bytes + tokens->starts[right], b);
  G2Z_TRY(g2zt_words_add(services, tokens, joined, a + b, &id));
  if (id != next)
    return g2z_fail(services, G2Z_FORMAT, "makes the token that has id %zu already", id);
  size_t bit = g2zt_join_bit(left, right);
  tokenizer->may_join[bit / 64] |= (uint64_t)1 << bit % 64;
  return g2zt_words_add(services, &tokenizer->merges, (const unsigned char *)&pair, sizeof pair,
                        &id);
}

G2Z_API void g2z_tokenizer_free(g2z_tokenizer *tokenizer) {
  if (!tokenizer) return;
  g2z_services *services = tokenizer->services;
  g2zt_words_free(services, &tokenizer->tokens);
  g2zt_words_free(services, &tokenizer->merges);
  g2z_release(services, tokenizer->classes);
  g2z_release(services, tokenizer);
}

G2Z_API int g2z_tokenizer_vocab(const g2z_tokenizer *tokenizer) {
  return (int)tokenizer->tokens.count + 1;
}

G2Z_API int g2z_tokenizer_eot(const g2z_tokenizer *tokenizer) {
  return (int)tokenizer->tokens.count;
}

G2Z_API uint64_t g2z_tokenizer_hash(const g2z_tokenizer *tokenizer) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < tokenizer->merges.count; i++) {
    const g2zt_pair merge = g2zt_pair_at(&tokenizer->merges, i);
    uint64_t ids = merge.left | (uint64_t)merge.right << 32;
    for (int byte = 0; byte < 64; byte += 8) hash = (hash ^ (ids >> byte & 255)) * 0x100000001b3u;
  }
  if (hash == 0) return 1;
  return hash;
}

G2Z_API const unsigned char *g2z_tokenizer_token(const g2z_tokenizer *tokenizer, int id,
                                                 size_t *bytes) {
  const g2zt_words *tokens = &tokenizer->tokens;
  *bytes = 0;
  if (id < 0 || (size_t)id > tokens->count) return NULL;
  if ((size_t)id == tokens->count) {
    *bytes = G2ZT_EOT_BYTES;
    return (const unsigned char *)G2ZT_EOT;
  }
  *bytes = g2zt_word_bytes(tokens, (size_t)id);
  return tokens->bytes + tokens->starts[id];
}

/* ===== merging ===========================================================
 * In:  a piece. Out: its ids.
 * Law: the merge with the smallest id comes first; of merges with the same id, the leftmost. A heap
 *      of (id, place) yields them in that order. */

#define G2ZT_PART 1048576 /* a longer piece is merged in parts: a byte needs 48 bytes of memory */

typedef struct g2zt_symbol { /* some bytes of the piece; its place: offset of the first byte */
  uint32_t id;
  uint32_t joined;           /* the id that it makes with the next symbol; 0: none */
  uint32_t next, previous;   /* places of its neighbours */
} g2zt_symbol;

typedef struct g2zt_merger { /* memory that is reused for each piece */
  g2z_services *services;
  const g2z_tokenizer *tokenizer;
  g2zt_symbol *symbols;
  size_t symbols_capacity;
  g2zt_heap heap;            /* (id, place) of pending merges and of stale ones */
} g2zt_merger;

/* Puts the merge of the symbols at `at` and `next` into the heap, if they make an id. An item of
 * `at` that is already in the heap becomes stale: no two pairs make the same id, so its id differs
 * from `joined`. */
static void g2zt_meet(g2zt_merger *merger, uint32_t at, uint32_t next) {
  const g2z_tokenizer *tokenizer = merger->tokenizer;
  const g2zt_pair pair = {merger->symbols[at].id, merger->symbols[next].id};
  size_t bit = g2zt_join_bit(pair.left, pair.right);
  merger->symbols[at].joined = 0;
  /* Most pairs make no id. may_join shows this with 128 KiB, which fit into a core's cache. */
  if (!(tokenizer->may_join[bit / 64] >> bit % 64 & 1)) return;
  int64_t merge = g2zt_words_find(&tokenizer->merges, (const unsigned char *)&pair, sizeof pair);
  if (merge < 0) return;
  merger->symbols[at].joined = (uint32_t)merge + 256;
  g2zt_heap_push(&merger->heap, (uint64_t)merge + 256, at);
}

/* The smallest id, `from` or above, of a merge whose left token is `token`; UINT32_MAX: none. */
static uint32_t g2zt_merge_of_left(const g2z_tokenizer *tokenizer, uint32_t token, uint32_t from) {
  if (from < 256) from = 256;
  for (size_t id = from; id < tokenizer->tokens.count; id++)
    if (g2zt_pair_at(&tokenizer->merges, id - 256).left == token) return (uint32_t)id;
  return UINT32_MAX;
}

/* Turns `count` bytes of a piece into *made ids, which stand for *used bytes. `ids` has room for
 * one id per byte. `open` 0: all bytes are used. `open` 1: the piece continues, so an unknown
 * symbol follows the last symbol and might merge with it. Merges are done in the order of their
 * ids. When the left token of the next merge is the last symbol, that symbol becomes uncertain and
 * is dropped. The remaining ids are the first ids of the whole piece, because no merge crosses
 * their end. */
static g2z_status g2zt_merge_part(g2zt_merger *merger, const unsigned char *piece, size_t count,
                                  int open, int32_t *ids, size_t *made, size_t *used) {
  const g2z_tokenizer *tokenizer = merger->tokenizer;
  g2z_services *services = merger->services;
  uint32_t end = (uint32_t)count, last = end - 1, risk = UINT32_MAX; /* id that drops `last` */
  G2Z_ASSERT(count && count < UINT32_MAX);
  G2Z_TRY(G2Z_GROW(services, &merger->symbols, &merger->symbols_capacity, 0, count));
  /* The heap begins with less than `count` items. Each of less than `count` merges removes one item
   * and adds at most two. */
  G2Z_TRY(G2Z_GROW(services, &merger->heap.items, &merger->heap.capacity, 0, 2 * count));
  g2zt_symbol *symbols = merger->symbols;
  for (uint32_t i = 0; i < end; i++) {
    symbols[i].id = (uint32_t)tokenizer->byte_ids[piece[i]];
    symbols[i].joined = 0;
    symbols[i].next = i + 1;
    symbols[i].previous = i - 1; /* for the first symbol it is never read */
  }
  merger->heap.count = 0;
  for (uint32_t i = 0; i < last; i++) g2zt_meet(merger, i, i + 1);
  if (open) risk = g2zt_merge_of_left(tokenizer, symbols[last].id, 0);
  while (end) {
    g2zt_item least = {UINT32_MAX, 0};
    if (merger->heap.count) least = merger->heap.items[0];
    uint32_t id = (uint32_t)least.first, at = (uint32_t)least.second;
    if (risk < id) {
      end = last;
      if (end == 0) break;
      last = symbols[last].previous;
      symbols[last].joined = 0;
      symbols[last].next = end;
      risk = g2zt_merge_of_left(tokenizer, symbols[last].id, risk + 1);
      continue;
    }
    if (id == UINT32_MAX) break;
    g2zt_heap_pop(&merger->heap);
    if (at >= end || symbols[at].joined != id) continue; /* the item is dropped or stale */
    uint32_t right = symbols[at].next, next = symbols[right].next;
    symbols[at].id = id;
    symbols[at].next = next;
    symbols[at].joined = 0;
    symbols[right].joined = 0;
    if (at) g2zt_meet(merger, symbols[at].previous, at);
    if (next < end) {
      symbols[next].previous = at;
      g2zt_meet(merger, at, next);
    } else {
      last = at;
      if (open) risk = g2zt_merge_of_left(tokenizer, id, id + 1);
    }
  }
  *used = end;
  *made = 0;
  for (uint32_t i = 0; i < end; i = symbols[i].next) ids[(*made)++] = (int32_t)symbols[i].id;
  return G2Z_OK;
}

/* Does the same for a piece of any length, in parts of 1 MiB. A part ends where no later byte can
 * change its ids; the next part begins there as if it were a piece. */
static g2z_status g2zt_merge(g2zt_merger *merger, const unsigned char *piece, size_t count,
                             int open, int32_t *ids, size_t *made, size_t *used) {
  size_t most = G2ZT_PART;
  *made = 0;
  *used = 0;
  while (*used < count) {
    size_t part = count - *used, some, bytes;
    const int last = part <= most;
    if (!last) part = most;
    G2Z_TRY(g2zt_merge_part(merger, piece + *used, part, open || !last, ids + *made, &some,
                            &bytes));
    *made += some;
    *used += bytes;
    if (last) break;
    if (bytes == 0) most *= 2; /* no id was certain: try a longer part */
  }
  return G2Z_OK;
}

/* ===== encoding ==========================================================
 * In:  text, or ids. Out: ids, appended to a list, or their bytes.
 * Law: bytes -> valid text -> pieces -> cache -> merges -> ids. The cache holds the same ids that
 *      merging would give. */

#define G2ZT_WORDS_BITS 17
#define G2ZT_WORD_BYTES 31
#define G2ZT_WORD_IDS 7
#define G2ZT_BATCH 64       /* the cache lines of this number of pieces are prefetched together */

typedef struct g2zt_key {   /* a piece of up to 31 bytes, then zeros; in the last byte its length */
  uint64_t eights[4];
} g2zt_key;

typedef struct g2zt_word {  /* an entry of the cache: a piece that was merged before */
  g2zt_key key;             /* zero: the entry is free, since no piece is empty */
  int32_t ids[G2ZT_WORD_IDS];
  uint32_t count;           /* number of ids */
} g2zt_word;

static_assert(sizeof(g2zt_word) == 64, "a word is a cache line");

struct g2z_encoder {
  g2z_services *services;
  const g2z_tokenizer *tokenizer;
  g2zt_repair repair;
  g2zt_merger merger;
  void *cache;              /* the allocation that contains the words */
  g2zt_word *words;         /* [1 << G2ZT_WORDS_BITS] */
  uint64_t masks[G2ZT_WORD_BYTES + 1][4]; /* row n keeps the first n bytes of a key */
};

G2Z_API g2z_status g2z_encoder_create(g2z_services *services, const g2z_tokenizer *tokenizer,
                                      g2z_encoder **out) {
  const size_t line = sizeof(g2zt_word), count = (size_t)1 << G2ZT_WORDS_BITS;
  G2Z_TRY(G2Z_NEW(services, 1, out));
  g2z_encoder *encoder = *out;
  encoder->services = services;
  encoder->tokenizer = tokenizer;
  encoder->merger.services = services;
  encoder->merger.tokenizer = tokenizer;
  for (size_t n = 0; n <= G2ZT_WORD_BYTES; n++) memset(encoder->masks[n], 0xFF, n);
  g2z_status status = g2z_allocate(services, count + 1, line, &encoder->cache);
  encoder->words = (g2zt_word *)(((uintptr_t)encoder->cache + line - 1) / line * line);
  if (status == G2Z_OK) return G2Z_OK;
  g2z_encoder_free(encoder);
  *out = NULL;
  return status;
}

G2Z_API void g2z_encoder_free(g2z_encoder *encoder) {
  if (!encoder) return;
  g2z_services *services = encoder->services;
  g2z_release(services, encoder->repair.bytes);
  g2z_release(services, encoder->cache);
  g2z_release(services, encoder->merger.symbols);
  g2z_release(services, encoder->merger.heap.items);
  g2z_release(services, encoder);
}

/* The key of a piece. Reads 32 bytes at once if the text has so many left. */
static inline g2zt_key g2zt_key_of(const g2z_encoder *encoder, const unsigned char *p, size_t bytes,
                                   const unsigned char *end) {
  g2zt_key key;
  memset(&key, 0, sizeof key);
  if (bytes > G2ZT_WORD_BYTES) { /* no word has this key */
    key.eights[3] = UINT64_MAX;
    return key;
  }
  if ((size_t)(end - p) >= sizeof key) memcpy(&key, p, sizeof key);
  else memcpy(&key, p, bytes);
  for (int i = 0; i < 4; i++) key.eights[i] &= encoder->masks[bytes][i];
  key.eights[3] |= (uint64_t)bytes << 56;
  return key;
}

static inline int g2zt_key_equal(const g2zt_key *a, const g2zt_key *b) {
  uint64_t differs = 0;
  for (int i = 0; i < 4; i++) differs |= a->eights[i] ^ b->eights[i];
  return differs == 0;
}

/* The first place of a key in the cache. */
static inline size_t g2zt_key_hash(const g2zt_key *key) {
  const uint64_t *k = key->eights;
  const uint64_t hash = (k[0] * 0x9E3779B97F4A7C15u) ^ (k[1] * 0xC2B2AE3D27D4EB4Fu) ^
                        ((k[2] ^ k[3] >> 3) * 0x165667B19E3779F9u);
  return (size_t)((hash ^ hash >> 32) * 0x9E3779B97F4A7C15u >> (64 - G2ZT_WORDS_BITS));
}

G2Z_API void g2z_tokens_free(g2z_tokens *tokens) {
  if (!tokens) return;
  if (tokens->services) g2z_release(tokens->services, tokens->ids);
  memset(tokens, 0, sizeof *tokens);
}

G2Z_API g2z_status g2z_tokens_reserve(g2z_services *services, g2z_tokens *tokens, size_t need) {
  if (!tokens->services) tokens->services = services;
  const g2z_status status =
      G2Z_GROW(tokens->services, &tokens->ids, &tokens->capacity, tokens->count, need);
  if (status != G2Z_OK && tokens->services != services)
    memcpy(services->error, tokens->services->error, sizeof services->error);
  return status;
}

/* Appends the ids of a word. Copies the whole array, although it adds only `count` ids: in a loop
 * over `count` ids, the processor would often mispredict the end. */
static inline void g2zt_append(const g2zt_word *word, g2z_tokens *out) {
  memcpy(out->ids + out->count, word->ids, sizeof word->ids);
  out->count += word->count;
}

/* Appends the ids of a piece that was not found in its first place of the cache, `word`. Its second
 * place is the neighbour of `word`. If it is in neither place, the piece is merged. A short piece
 * is then put into the first place if that is free, else into the second. So the pieces that occur
 * early, mostly frequent ones, stay in their first place. */
static g2z_status g2zt_encode_other(g2z_encoder *encoder, const unsigned char *piece, size_t bytes,
                                    const g2zt_key *key, g2zt_word *word, g2z_tokens *out) {
  g2zt_word *second = &encoder->words[(size_t)(word - encoder->words) ^ 1];
  int32_t *ids = out->ids + out->count;
  size_t made, used;
  if (g2zt_key_equal(&second->key, key)) {
    g2zt_append(second, out);
    return G2Z_OK;
  }
  G2Z_TRY(g2zt_merge(&encoder->merger, piece, bytes, 0, ids, &made, &used));
  out->count += made;
  if (bytes > G2ZT_WORD_BYTES || made > G2ZT_WORD_IDS) return G2Z_OK;
  if (word->count) word = second;
  word->key = *key;
  memcpy(word->ids, ids, made * sizeof *ids);
  word->count = (uint32_t)made;
  return G2Z_OK;
}

/* Encodes the beginning of a piece that may continue after `bytes` bytes: appends the ids of its
 * first *used bytes. The next call reads the rest as if a piece began there. So the rest must not
 * begin like a contraction, or inside a character. */
static g2z_status g2zt_encode_begun(g2z_encoder *encoder, const unsigned char *piece, size_t bytes,
                                    const unsigned char *end, g2z_tokens *out, size_t *used) {
  const g2zt_words *tokens = &encoder->tokenizer->tokens;
  size_t made;
  G2Z_TRY(g2z_tokens_reserve(encoder->services, out, out->count + bytes));
  const int32_t *ids = out->ids + out->count;
  G2Z_TRY(g2zt_merge(&encoder->merger, piece, bytes, 1, out->ids + out->count, &made, used));
  while (made) {
    const unsigned char *rest = piece + *used;
    const int inside = (*rest & 0xC0) == 0x80;
    if (!inside && (*rest != '\'' || !g2zt_contraction(rest, end))) break;
    made--;
    *used -= g2zt_word_bytes(tokens, (size_t)ids[made]);
  }
  out->count += made;
  return G2Z_OK;
}

/* Appends the ids of valid text without special tokens. *used: number of bytes that were encoded.
 * `open` 1: the text may continue after `bytes` bytes; encodes only the part that later text cannot
 * change. */
static g2z_status g2zt_encode_ordinary(g2z_encoder *encoder, const unsigned char *text,
                                       size_t bytes, int open, g2z_tokens *out, size_t *used) {
  const unsigned char *p = text, *end = text + bytes, *limit = end;
  const unsigned char *starts[G2ZT_BATCH + 1]; /* starts of the pieces, and end of the last */
  g2zt_key keys[G2ZT_BATCH];
  g2zt_word *words[G2ZT_BATCH];                /* first place of each piece in the cache */
  if (open) limit = g2zt_certain(text, end);
  while (p < limit) {
    /* Find the next pieces, and prefetch their words. */
    size_t count = 0;
    starts[0] = p;
    while (count < G2ZT_BATCH && p < limit) {
      const unsigned char *next = g2zt_piece_end(encoder->tokenizer->classes, p, end);
      if (next > limit) break;
      keys[count] = g2zt_key_of(encoder, p, (size_t)(next - p), end);
      words[count] = &encoder->words[g2zt_key_hash(&keys[count])];
      __builtin_prefetch(words[count]);
      count++;
      starts[count] = next;
      p = next;
    }
    if (count == 0) break;
    /* Append the ids of these pieces. */
    size_t most = out->count + (size_t)(p - starts[0]) + G2ZT_WORD_IDS;
    G2Z_TRY(g2z_tokens_reserve(encoder->services, out, most));
    for (size_t i = 0; i < count; i++)
      if (g2zt_key_equal(&words[i]->key, &keys[i])) g2zt_append(words[i], out);
      else G2Z_TRY(g2zt_encode_other(encoder, starts[i], (size_t)(starts[i + 1] - starts[i]),
                                     &keys[i], words[i], out));
  }
  *used = (size_t)(p - text);
  if (!open || limit - p < G2ZT_PART) return G2Z_OK;
  size_t begun; /* number of bytes of a long piece that are encoded */
  G2Z_TRY(g2zt_encode_begun(encoder, p, (size_t)(limit - p), end, out, &begun));
  *used += begun;
  return G2Z_OK;
}

/* The first <|endoftext|> that `flags` make a token; NULL: none. memmem() would need _GNU_SOURCE
 * before all system headers. */
static const unsigned char *g2zt_find_eot(const unsigned char *p, const unsigned char *end,
                                          int flags) {
  if (!(flags & G2Z_ENCODE_ALLOW_SPECIAL)) return NULL;
  for (; (size_t)(end - p) >= G2ZT_EOT_BYTES; p++) {
    p = (const unsigned char *)memchr(p, '<', (size_t)(end - p) - (G2ZT_EOT_BYTES - 1));
    if (!p || memcmp(p, G2ZT_EOT, G2ZT_EOT_BYTES) == 0) return p;
  }
  return NULL;
}

/* The number of bytes of a text, without its last character if that is truncated. */
static size_t g2zt_utf8_whole(const unsigned char *text, size_t bytes) {
  const unsigned char *end = text + bytes;
  for (size_t back = 1; back <= 3 && back <= bytes; back++) {
    const unsigned char *p = end - back;
    if ((*p & 0xC0) == 0x80) continue; /* not the first byte of the character */
    if (*p >= 0xC0 && !g2z_utf8_length(p, end) && g2zt_utf8_broken(p, end) == back)
      return bytes - back;
    break;
  }
  return bytes;
}

/* Appends the ids of valid text. As in tiktoken and Hugging Face's encoder, the parts between
 * special <|endoftext|> are encoded separately. `open` and *used are as in g2zt_encode_ordinary. */
static g2z_status g2zt_encode_valid(g2z_encoder *encoder, const unsigned char *text, size_t bytes,
                                    int flags, int open, g2z_tokens *out, size_t *used) {
  const unsigned char *p = text, *end = text + bytes;
  for (;;) {
    const unsigned char *eot = g2zt_find_eot(p, end, flags);
    if (!eot) break;
    G2Z_TRY(g2zt_encode_ordinary(encoder, p, (size_t)(eot - p), 0, out, used));
    G2Z_TRY(g2z_tokens_reserve(encoder->services, out, out->count + 1));
    out->ids[out->count++] = g2z_tokenizer_eot(encoder->tokenizer);
    p = eot + G2ZT_EOT_BYTES;
  }
  G2Z_TRY(g2zt_encode_ordinary(encoder, p, (size_t)(end - p), open, out, used));
  *used += (size_t)(p - text);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_encode_part(g2z_encoder *encoder, const void *given, size_t bytes,
                                   int flags, g2z_tokens *out, size_t *used) {
  const unsigned char *text = (const unsigned char *)given, *valid = text;
  const size_t before = out->count;
  const int open = used != NULL;
  size_t all;
  if (!open) used = &all;
  *used = 0;
  if (open) bytes = g2zt_utf8_whole(text, bytes);
  if (bytes == 0) return G2Z_OK;
  size_t valid_bytes = bytes;
  G2Z_TRY(g2zt_valid_text(encoder->services, &encoder->repair, flags & G2Z_ENCODE_STRICT, &valid,
                          &valid_bytes));
  g2z_status status = g2zt_encode_valid(encoder, valid, valid_bytes, flags, open, out, used);
  if (status != G2Z_OK) {
    out->count = before;
    return status;
  }
  if (valid != text) g2zt_utf8_repair(text, bytes, NULL, *used, used); /* given bytes */
  return G2Z_OK;
}

G2Z_API g2z_status g2z_encode(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                              g2z_tokens *out) {
  return g2z_encode_part(encoder, text, bytes, flags, out, NULL);
}

G2Z_API g2z_status g2z_decode(g2z_services *services, const g2z_tokenizer *tokenizer,
                              const int32_t *ids, size_t count, char **text, size_t *bytes) {
  size_t total = 0, length;
  *text = NULL;
  *bytes = 0;
  for (size_t i = 0; i < count; i++) {
    if (!g2z_tokenizer_token(tokenizer, ids[i], &length))
      return g2z_fail(services, G2Z_BAD_ARGUMENT, "id %" PRId32 " at position %zu is not below the "
                      "vocabulary's %d; decode with the vocabulary that encoded", ids[i], i,
                      g2z_tokenizer_vocab(tokenizer));
    total += length;
  }
  G2Z_TRY(G2Z_NEW(services, total + 1, text));
  for (size_t i = 0; i < count; i++) {
    const unsigned char *token = g2z_tokenizer_token(tokenizer, ids[i], &length);
    memcpy(*text + *bytes, token, length);
    *bytes += length;
  }
  return G2Z_OK;
}

/* ===== vocabulary files ==================================================
 * In:  merge lists and JSON. Out: a vocabulary; and the files of a vocabulary.
 * Law: the ids must be made as GPT-2's are: else the error names the line or the entry. */

#define G2ZT_NAME_BYTES (2 * G2ZT_TOKEN_BYTES + 1)

/* Returns 1 if a file begins with `beginning`. */
static int g2zt_begins(const void *text, size_t bytes, const char *beginning) {
  const size_t count = strlen(beginning);
  return bytes >= count && memcmp(text, beginning, count) == 0;
}

/* The length of a file's byte order mark in UTF-8; 0: it has none. */
static size_t g2zt_byte_order_mark(const void *text, size_t bytes) {
  static const char mark[] = "\xEF\xBB\xBF";
  if (!g2zt_begins(text, bytes, mark)) return 0;
  return strlen(mark);
}

/* Writes a token as vocabulary files do, with a NUL; returns the length. Each byte becomes a
 * printable character in UTF-8: itself, or for the other 68 bytes, U+0100 + its index among
 * them. */
static size_t g2zt_token_name(const g2z_tokenizer *tokenizer, int id, char out[G2ZT_NAME_BYTES]) {
  size_t bytes, length = 0;
  const unsigned char *token = g2z_tokenizer_token(tokenizer, id, &bytes);
  for (size_t i = 0; i < bytes; i++) {
    const int byte_id = tokenizer->byte_ids[token[i]];
    int c = token[i];
    if (byte_id >= G2ZT_PRINTABLE) c = 0x100 + byte_id - G2ZT_PRINTABLE;
    if (c < 0x80) {
      out[length++] = (char)c;
    } else {
      out[length++] = (char)(0xC0 | c >> 6);
      out[length++] = (char)(0x80 | (c & 0x3F));
    }
  }
  out[length] = 0;
  return length;
}

typedef struct g2zt_reading { /* the state of reading a vocabulary file */
  g2z_services *services;
  const char *label;          /* "gpt2/vocab.bpe" */
  const char *unit;           /* for messages: "line", "merge" or "token" */
  size_t number;              /* for messages: number of this line, merge or token */
  g2z_tokenizer *tokenizer;
  g2zt_words names;           /* the tokens, as vocabulary files write them */
  unsigned char *text;        /* the last JSON string, unescaped */
  size_t text_capacity;
} g2zt_reading;

G2Z_PRINTF(2, 3)
static g2z_status g2zt_reading_fail(g2zt_reading *reading, const char *format, ...) {
  char reason[G2Z_ERROR_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  return g2z_fail(reading->services, G2Z_FORMAT, "%s, %s %zu: %s", reading->label, reading->unit,
                  reading->number, reason);
}

/* The first bytes of a string in a file, made printable for messages. A byte may become four
 * characters, such as \x1b. */
#define G2ZT_SHOWN 48
typedef struct g2zt_shown {
  char text[G2ZT_SHOWN * 4 + sizeof "..."];
} g2zt_shown;
static g2zt_shown g2zt_show(const unsigned char *bytes, size_t count) {
  g2zt_shown shown;
  size_t length = 0;
  for (size_t i = 0; i < count && i < G2ZT_SHOWN; i++) {
    size_t valid = g2z_utf8_length(bytes + i, bytes + count);
    if (bytes[i] < 0x20 || bytes[i] == 0x7F || !valid) {
      length += (size_t)snprintf(shown.text + length, 5, "\\x%02x", bytes[i]);
      continue;
    }
    memcpy(shown.text + length, bytes + i, valid);
    length += valid;
    i += valid - 1;
  }
  snprintf(shown.text + length, sizeof shown.text - length, "%s", count > G2ZT_SHOWN ? "..." : "");
  return shown;
}

/* Adds a merge that the file has as "left right". */
static g2z_status g2zt_read_merge(g2zt_reading *reading, const unsigned char *line, size_t bytes) {
  const unsigned char *end = line + bytes;
  const unsigned char *space = (const unsigned char *)memchr(line, ' ', bytes);
  if (!space || space == line || space + 1 == end ||
      memchr(space + 1, ' ', (size_t)(end - space - 1)))
    return g2zt_reading_fail(reading, "\"%s\" is not two tokens with a space between them",
                             g2zt_show(line, bytes).text);
  const unsigned char *names[2] = {line, space + 1};
  const size_t lengths[2] = {(size_t)(space - line), (size_t)(end - space - 1)};
  int64_t ids[2];
  for (int i = 0; i < 2; i++) {
    ids[i] = g2zt_words_find(&reading->names, names[i], lengths[i]);
    if (ids[i] < 0)
      return g2zt_reading_fail(reading, "\"%s\" is neither a byte nor made by an earlier merge; "
                               "give a byte-level BPE vocabulary like GPT-2's",
                               g2zt_show(names[i], lengths[i]).text);
  }
  g2z_status status = g2zt_tokenizer_join(reading->tokenizer, (uint32_t)ids[0], (uint32_t)ids[1]);
  if (status == G2Z_FORMAT) {
    char reason[G2Z_ERROR_BYTES];
    memcpy(reason, reading->services->error, sizeof reason);
    return g2zt_reading_fail(reading, "%s", reason);
  }
  if (status != G2Z_OK) return status;
  unsigned char name[G2ZT_NAME_BYTES];
  size_t word;
  memcpy(name, names[0], lengths[0]);
  memcpy(name + lengths[0], names[1], lengths[1]);
  return g2zt_words_add(reading->services, &reading->names, name, lengths[0] + lengths[1], &word);
}

/* Unescapes a JSON string into reading->text, after its first *bytes bytes. */
static g2z_status g2zt_read_text(g2zt_reading *reading, g2z_json_text text, size_t *bytes) {
  G2Z_TRY(G2Z_GROW(reading->services, &reading->text, &reading->text_capacity, *bytes,
                   *bytes + text.bytes + 1));
  *bytes += g2z_json_unescape(&text, reading->text + *bytes);
  return G2Z_OK;
}

/* Reads model.merges of tokenizer.json: "left right" or ["left", "right"]. */
static g2z_status g2zt_read_json_merges(g2zt_reading *reading, g2z_json *json) {
  if (!g2z_json_enter(json, '[')) return G2Z_OK;
  for (; g2z_json_next(json, ']', NULL); reading->number++) {
    size_t bytes = 0, count = 0;
    if (g2z_json_peek(json) != '[') {
      G2Z_TRY(g2zt_read_text(reading, g2z_json_string(json), &bytes));
    } else {
      for (g2z_json_enter(json, '['); g2z_json_next(json, ']', NULL); count++) {
        if (count) reading->text[bytes++] = ' '; /* g2zt_read_text left room for a byte */
        G2Z_TRY(g2zt_read_text(reading, g2z_json_string(json), &bytes));
      }
      if (json->status == G2Z_OK && count != 2)
        return g2zt_reading_fail(reading, "a merge joins 2 tokens, not %zu", count);
    }
    if (json->status != G2Z_OK) return G2Z_OK;
    G2Z_TRY(g2zt_read_merge(reading, reading->text, bytes));
  }
  return G2Z_OK;
}

/* Reads model.vocab of tokenizer.json: its ids must be those that follow from the merges. */
static g2z_status g2zt_read_json_vocab(g2zt_reading *reading, g2z_json *json) {
  const g2zt_words *tokens = &reading->tokenizer->tokens;
  size_t known = 0;
  g2z_json_text key;
  if (!g2z_json_enter(json, '{')) return G2Z_OK;
  for (reading->number = 0; g2z_json_next(json, '}', &key); reading->number++) {
    size_t bytes = 0;
    int64_t id = g2z_json_integer(json);
    if (json->status != G2Z_OK) return G2Z_OK;
    if (g2z_json_is(&key, G2ZT_EOT) && id == (int64_t)tokens->count) continue;
    G2Z_TRY(g2zt_read_text(reading, key, &bytes));
    if (id < 0 || id != g2zt_words_find(&reading->names, reading->text, bytes))
      return g2zt_reading_fail(reading, "\"%s\" has id %" PRId64 ", which does not follow from the "
                               "merges (256 bytes, then the merges in order, then " G2ZT_EOT "): "
                               "weights with such ids cannot be used. For a new model give "
                               "merges.txt without vocab.json",
                               g2zt_show(reading->text, bytes).text, id);
    known++;
  }
  if (json->status == G2Z_OK && known != tokens->count)
    return g2z_fail(reading->services, G2Z_FORMAT, "%s: the size of its vocabulary is %zu, but "
                    "bytes and merges make %zu", reading->label, known, tokens->count);
  return G2Z_OK;
}

#define G2ZT_AFFIX "a suffix or prefix of words is not supported; GPT-2 has none"
#define G2ZT_ALONE \
  G2ZT_EOT " must be a token in every text, with the spaces around it left (lstrip, rstrip and " \
  "single_word are false)"
#define G2ZT_PIECES                                                                             \
  "pre_tokenizer must be of type ByteLevel, without add_prefix_space and with use_regex, like " \
  "GPT-2's; other patterns are not supported"
/* Members of tokenizer.json that could change the ids. Each must have this value, or null. */
static const struct { const char *object, *member, *value, *refusal; } g2zt_facts[] = {
    {"model", "type", "\"BPE\"", "model.type must be BPE, like GPT-2's"},
    {"model", "end_of_word_suffix", "\"\"", G2ZT_AFFIX},
    {"model", "continuing_subword_prefix", "\"\"", G2ZT_AFFIX},
    {"model", "ignore_merges", "false", "model.ignore_merges must be false, like GPT-2's"},
    {"added_tokens", "lstrip", "false", G2ZT_ALONE},
    {"added_tokens", "rstrip", "false", G2ZT_ALONE},
    {"added_tokens", "single_word", "false", G2ZT_ALONE},
    {"pre_tokenizer", "type", "\"ByteLevel\"", G2ZT_PIECES},
    {"pre_tokenizer", "use_regex", "true", G2ZT_PIECES},
    {"pre_tokenizer", "add_prefix_space", "false", G2ZT_PIECES},
    {"", "normalizer", "null", "a normalizer is not supported; GPT-2 has none (null)"}};

/* Reads a member. 1: it is one of g2zt_facts and has the right value. A wrong value is an error,
 * except null. */
static int g2zt_read_json_fact(g2z_json *json, const char *object, const g2z_json_text *key) {
  g2z_json_peek(json); /* moves to the value */
  const char *value = (const char *)json->at;
  g2z_json_skip(json);
  size_t bytes = (size_t)((const char *)json->at - value);
  for (size_t i = 0; i < G2Z_COUNT(g2zt_facts); i++) {
    const char *want = g2zt_facts[i].value;
    if (strcmp(object, g2zt_facts[i].object) || !g2z_json_is(key, g2zt_facts[i].member)) continue;
    if (bytes == strlen(want) && memcmp(value, want, bytes) == 0) return 1;
    if (bytes != 4 || memcmp(value, "null", 4)) g2z_json_fail(json, "%s", g2zt_facts[i].refusal);
  }
  return 0;
}

/* Reads added_tokens of tokenizer.json. Hugging Face's encoder finds these tokens in every text, so
 * any of them except <|endoftext|> would change ids. */
static g2z_status g2zt_read_json_added(g2zt_reading *reading, g2z_json *json) {
  const int eot = g2z_tokenizer_eot(reading->tokenizer);
  char word[400];
  g2z_json_text key;
  if (!g2z_json_enter(json, '[')) return G2Z_OK;
  while (g2z_json_next(json, ']', NULL)) {
    g2z_json_text content = {(const unsigned char *)"", 0, NULL};
    size_t bytes = 0;
    int64_t id = -1;
    if (!g2z_json_enter(json, '{')) break;
    while (g2z_json_next(json, '}', &key)) {
      if (g2z_json_is(&key, "content")) content = g2z_json_string(json);
      else if (g2z_json_is(&key, "id")) id = g2z_json_integer(json);
      else g2zt_read_json_fact(json, "added_tokens", &key);
    }
    if (json->status != G2Z_OK) break;
    if (!g2z_json_is(&content, G2ZT_EOT)) {
      G2Z_TRY(g2zt_read_text(reading, content, &bytes));
      const g2zt_shown name = g2zt_show(reading->text, bytes);
      return g2z_json_fail(json, "the added token \"%s\" has id %" PRId64 ", but " G2ZT_EOT ", id "
                           "%d, is the only one that is supported. For texts without \"%s\" leave "
                           "it out: jq '.added_tokens=[]' %s > without.json", name.text, id, eot,
                           name.text, g2z_shell_word(reading->label, word, sizeof word));
    }
    if (id != eot)
      return g2z_json_fail(json, "%s has id %" PRId64 " but must be the last, %d, so weights with "
                           "such ids cannot be used; for a new model take merges.txt without "
                           "vocab.json", G2ZT_EOT, id, eot);
  }
  return G2Z_OK;
}

/* Reads tokenizer.json, whose members may have any order. Everything is checked against the merges.
 * So a first walk reads only the model's merges and facts; a second walk reads the rest. */
static g2z_status g2zt_read_json_first(g2zt_reading *reading, const void *text, size_t bytes) {
  g2z_json json;
  g2z_json_text key;
  int merges = 0;
  reading->unit = "merge";
  g2z_json_open(&json, reading->services, reading->label, text, bytes);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    if (g2z_json_peek(&json) != '{' || !g2z_json_is(&key, "model")) {
      g2z_json_skip(&json);
      continue;
    }
    g2z_json_enter(&json, '{');
    while (g2z_json_next(&json, '}', &key)) {
      if (g2z_json_is(&key, "merges") && !merges) {
        merges = 1;
        G2Z_TRY(g2zt_read_json_merges(reading, &json));
      } else {
        g2zt_read_json_fact(&json, "model", &key);
      }
    }
  }
  G2Z_TRY(g2z_json_close(&json));
  if (merges) return G2Z_OK;
  return g2z_fail(reading->services, G2Z_FORMAT, "%s is JSON without model.merges; give Hugging "
                  "Face's tokenizer.json, or merges.txt", reading->label);
}

static g2z_status g2zt_read_json_second(g2zt_reading *reading, const void *text, size_t bytes) {
  g2z_json json;
  g2z_json_text key;
  int vocab = 0, pieces = 0;
  reading->unit = "token";
  g2z_json_open(&json, reading->services, reading->label, text, bytes);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    const int object = g2z_json_peek(&json) == '{';
    if (object && g2z_json_is(&key, "model")) {
      g2z_json_enter(&json, '{');
      while (g2z_json_next(&json, '}', &key)) {
        if (g2z_json_is(&key, "vocab") && !vocab) {
          vocab = 1;
          G2Z_TRY(g2zt_read_json_vocab(reading, &json));
        } else {
          g2z_json_skip(&json);
        }
      }
    } else if (object && g2z_json_is(&key, "pre_tokenizer")) {
      g2z_json_enter(&json, '{');
      while (g2z_json_next(&json, '}', &key))
        pieces |= g2zt_read_json_fact(&json, "pre_tokenizer", &key) && g2z_json_is(&key, "type");
    } else if (g2z_json_is(&key, "added_tokens")) {
      G2Z_TRY(g2zt_read_json_added(reading, &json));
    } else {
      g2zt_read_json_fact(&json, "", &key);
    }
  }
  G2Z_TRY(g2z_json_close(&json));
  if (vocab && pieces) return G2Z_OK;
  return g2z_fail(reading->services, G2Z_FORMAT, "%s is JSON without model.vocab and a "
                  "pre_tokenizer of type ByteLevel; give Hugging Face's tokenizer.json, or "
                  "merges.txt", reading->label);
}

/* Reads vocab.bpe or merges.txt: one merge per line. */
static g2z_status g2zt_read_lines(g2zt_reading *reading, const unsigned char *text, size_t bytes) {
  static const char version[] = "#version";
  const unsigned char *end = text + bytes;
  while (text < end) {
    size_t length = (size_t)(end - text);
    const unsigned char *newline = (const unsigned char *)memchr(text, '\n', length);
    if (newline) length = (size_t)(newline - text);
    const unsigned char *line = text;
    text += length + (newline != NULL);
    if (length && line[length - 1] == '\r') length--;
    reading->number++;
    if (reading->number == 1 && g2zt_begins(line, length, version)) continue;
    G2Z_TRY(g2zt_read_merge(reading, line, length));
  }
  return G2Z_OK;
}

/* Recognises the format by the first line. The first merge joins two bytes, so its line has at most
 * 5 characters: a longer line that begins with a brace is JSON. */
static g2z_status g2zt_read_vocabulary(g2zt_reading *reading, const unsigned char *text,
                                       size_t bytes) {
  const size_t mark = g2zt_byte_order_mark(text, bytes);
  text += mark;
  bytes -= mark;
  while (bytes && (text[bytes - 1] == '\n' || text[bytes - 1] == '\r')) bytes--; /* blank lines */
  if (bytes == 0)
    return g2z_fail(reading->services, G2Z_FORMAT, "%s is empty; expected a vocabulary",
                    reading->label);
  const int is_tiktoken = bytes >= 6 && text[4] == ' ' && text[5] == '0';
  const int is_llmc = g2zt_begins(text, bytes, "\xC8\xD7\x34\x01");
  if (is_tiktoken || is_llmc)
    return g2z_fail(reading->services, G2Z_UNSUPPORTED, "%s is a vocabulary in %s's format, which "
                    "is not supported: give it as vocab.bpe, merges.txt or tokenizer.json",
                    reading->label, is_llmc ? "llm.c" : "tiktoken");
  const size_t merge = bytes < 6 ? bytes : 6; /* the first merge's line ends within so many bytes */
  if (bytes == 1 || text[0] != '{' || (text[1] == ' ' && memchr(text, '\n', merge)))
    return g2zt_read_lines(reading, text, bytes);
  G2Z_TRY(g2zt_read_json_first(reading, text, bytes));
  return g2zt_read_json_second(reading, text, bytes);
}

/* Reads a vocabulary into a new tokenizer. only_ids 1: reads vocab.json, and compares its ids with
 * the tokenizer. */
static g2z_status g2zt_read(g2z_tokenizer *tokenizer, int only_ids, const char *label,
                            const void *text, size_t bytes) {
  g2z_services *services = tokenizer->services;
  g2zt_reading reading;
  g2z_json json;
  memset(&reading, 0, sizeof reading);
  reading.services = services;
  reading.label = label;
  reading.unit = only_ids ? "token" : "line";
  reading.tokenizer = tokenizer;
  g2z_status status = G2Z_OK;
  for (int id = 0; id < g2z_tokenizer_eot(tokenizer) && status == G2Z_OK; id++) {
    char name[G2ZT_NAME_BYTES];
    size_t length = g2zt_token_name(tokenizer, id, name), word;
    status = g2zt_words_add(services, &reading.names, (unsigned char *)name, length, &word);
  }
  if (status == G2Z_OK && only_ids) {
    g2z_json_open(&json, services, label, text, bytes);
    status = g2zt_read_json_vocab(&reading, &json);
    if (status == G2Z_OK) status = g2z_json_close(&json);
  } else if (status == G2Z_OK) {
    status = g2zt_read_vocabulary(&reading, (const unsigned char *)text, bytes);
  }
  g2zt_words_free(services, &reading.names);
  g2z_release(services, reading.text);
  return status;
}

G2Z_API g2z_status g2z_tokenizer_parse(g2z_services *services, const char *label, const void *text,
                                       size_t bytes, g2z_tokenizer **out) {
  *out = NULL;
  if (g2zt_begins(text, bytes, "version https://git-lfs"))
    return g2z_fail(services, G2Z_FORMAT, "%.300s is a pointer of git-lfs in place of the file: "
                    "type git lfs pull in its directory", label);
  G2Z_TRY(g2zt_tokenizer_new(services, out));
  g2z_status status = g2zt_read(*out, 0, label, text, bytes);
  if (status == G2Z_OK) return G2Z_OK;
  g2z_tokenizer_free(*out);
  *out = NULL;
  return status;
}

G2Z_API g2z_status g2z_tokenizer_create(g2z_services *services, const char *path,
                                        g2z_tokenizer **out) {
  char *text;
  size_t bytes;
  int there;
  *out = NULL;
  if (!path) return g2zt_tokenizer_new(services, out);
  G2Z_TRY(g2z_is_there(services, path, &there));
  if (!there) {
    g2z_fail(services, G2Z_IO, "cannot open %s: No such file; check the path, or get "
             "GPT-2's by `make vocab`, which writes data/vocab.bpe", path[0] ? path :
             "\"\"");
    services->os_error = ENOENT;
    return G2Z_IO;
  }
  G2Z_TRY(g2z_read_file(services, path, (size_t)1 << 30, &text, &bytes));
  g2z_status status = g2z_tokenizer_parse(services, path, text, bytes, out);
  g2z_release(services, text);
  const char *slash = strrchr(path, '/'), *name = path;
  if (slash) name = slash + 1;
  if (status != G2Z_OK || strcmp(name, "merges.txt") != 0) return status;
  /* Hugging Face's programs write both merges.txt and vocab.json. */
  char ids[4200];
  snprintf(ids, sizeof ids, "%.*svocab.json", (int)(name - path), path);
  status = g2z_is_there(services, ids, &there);
  if (status == G2Z_OK && there) {
    status = g2z_read_file(services, ids, (size_t)1 << 30, &text, &bytes);
    if (status == G2Z_OK) status = g2zt_read(*out, 1, ids, text, bytes);
    g2z_release(services, text);
  }
  if (status == G2Z_OK) return G2Z_OK;
  g2z_tokenizer_free(*out);
  *out = NULL;
  return status;
}

G2Z_API g2z_status g2z_tokenizer_write_merges(g2z_services *services,
                                              const g2z_tokenizer *tokenizer, const char *path) {
  g2z_writer *writer;
  char left[G2ZT_NAME_BYTES], right[G2ZT_NAME_BYTES];
  G2Z_TRY(g2z_writer_create(services, path, &writer));
  g2z_status status = g2z_writer_printf(writer, "#version: 0.2\n");
  for (size_t i = 0; i < tokenizer->merges.count && status == G2Z_OK; i++) {
    const g2zt_pair merge = g2zt_pair_at(&tokenizer->merges, i);
    g2zt_token_name(tokenizer, (int)merge.left, left);
    g2zt_token_name(tokenizer, (int)merge.right, right);
    status = g2z_writer_printf(writer, "%s %s\n", left, right);
  }
  if (status == G2Z_OK) status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

G2Z_API g2z_status g2z_tokenizer_write_vocab(g2z_services *services, const g2z_tokenizer *tokenizer,
                                             const char *path) {
  g2z_json_out out;
  char token[G2ZT_NAME_BYTES];
  memset(&out, 0, sizeof out);
  G2Z_TRY(g2z_writer_create(services, path, &out.writer));
  g2z_json_begin(&out, NULL, '{');
  for (int id = 0; id < g2z_tokenizer_vocab(tokenizer); id++) {
    g2zt_token_name(tokenizer, id, token);
    g2z_json_put_integer(&out, token, id);
  }
  g2z_json_end(&out, '}');
  g2z_status status = g2z_writer_commit(out.writer);
  g2z_writer_free(out.writer);
  return status;
}

/* ===== learning a vocabulary =============================================
 * In:  texts. Out: merges.
 * Law: pieces are counted first. Then, again and again, the most frequent pair of neighbours
 *      becomes a token; of equally frequent pairs, the smaller pair of ids. A merge visits only the
 *      places of its pair, and a heap yields the best pair. */

struct g2z_bpe_trainer {
  g2z_services *services;
  unsigned char *classes;
  g2zt_repair repair;
  g2zt_words words;        /* the different pieces of all texts */
  int64_t *counts;         /* [words.count] number of times that each piece occurred */
  size_t counts_capacity;
};

G2Z_API g2z_status g2z_bpe_trainer_create(g2z_services *services, g2z_bpe_trainer **out) {
  G2Z_TRY(G2Z_NEW(services, 1, out));
  g2z_bpe_trainer *trainer = *out;
  trainer->services = services;
  g2z_status status = g2zt_classes_create(services, &trainer->classes);
  if (status == G2Z_OK) return G2Z_OK;
  g2z_bpe_trainer_free(trainer);
  *out = NULL;
  return status;
}

G2Z_API void g2z_bpe_trainer_free(g2z_bpe_trainer *trainer) {
  if (!trainer) return;
  g2z_services *services = trainer->services;
  g2z_release(services, trainer->classes);
  g2z_release(services, trainer->repair.bytes);
  g2zt_words_free(services, &trainer->words);
  g2z_release(services, trainer->counts);
  g2z_release(services, trainer);
}

/* Counts a piece that occurred `times` times. The call cannot fail if the piece is known. */
static inline g2z_status g2zt_trainer_count(g2z_bpe_trainer *trainer, const unsigned char *piece,
                                            size_t bytes, int64_t times) {
  const size_t known = trainer->words.count;
  int64_t found = -1;
  size_t word;
  if (known) found = g2zt_words_find(&trainer->words, piece, bytes);
  if (found >= 0) {
    trainer->counts[found] += times;
    return G2Z_OK;
  }
  G2Z_TRY(G2Z_GROW(trainer->services, &trainer->counts, &trainer->counts_capacity, known,
                   known + 1));
  G2Z_TRY(g2zt_words_add(trainer->services, &trainer->words, piece, bytes, &word));
  trainer->counts[word] = times;
  return G2Z_OK;
}

/* Adds `times` to the count of each piece of valid text, up to *stop. *stop becomes the end of the
 * text, or in an open text the last certain end of a piece. After a failure it is the first piece
 * that was not counted. */
static g2z_status g2zt_trainer_walk(g2z_bpe_trainer *trainer, const unsigned char *p,
                                    const unsigned char *end, int flags, int open, int64_t times,
                                    const unsigned char **stop) {
  const unsigned char *eot;
  *stop = p;
  do { /* for each part between special <|endoftext|>, which no piece crosses */
    const unsigned char *last = end, *limit = end;
    eot = g2zt_find_eot(p, end, flags);
    if (eot) last = limit = eot;
    else if (open) limit = g2zt_certain(p, end); /* this also excludes a truncated character */
    while (p < limit) {
      const unsigned char *next = g2zt_piece_end(trainer->classes, p, last);
      if (next > limit) break;
      G2Z_TRY(g2zt_trainer_count(trainer, p, (size_t)(next - p), times));
      p = next;
      *stop = p;
    }
    if (eot) {
      p = eot + G2ZT_EOT_BYTES;
      *stop = p;
    }
  } while (eot);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_bpe_trainer_feed_part(g2z_bpe_trainer *trainer, const void *text,
                                             size_t bytes, int flags, size_t *used) {
  const unsigned char *begin = (const unsigned char *)text, *stop;
  size_t valid = bytes, all;
  const int open = used != NULL;
  if (!open) used = &all;
  *used = 0;
  if (bytes == 0) return G2Z_OK;
  G2Z_TRY(g2zt_valid_text(trainer->services, &trainer->repair, flags & G2Z_ENCODE_STRICT, &begin,
                          &valid));
  g2z_status status = g2zt_trainer_walk(trainer, begin, begin + valid, flags, open, 1, &stop);
  if (status != G2Z_OK) { /* subtract what was counted */
    g2zt_trainer_walk(trainer, begin, stop, flags, 0, -1, &stop);
    return status;
  }
  *used = (size_t)(stop - begin);
  if (begin != text) /* convert to a number of bytes of the unrepaired text */
    g2zt_utf8_repair((const unsigned char *)text, bytes, NULL, *used, used);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_bpe_trainer_feed(g2z_bpe_trainer *trainer, const void *text, size_t bytes,
                                        int flags) {
  return g2z_bpe_trainer_feed_part(trainer, text, bytes, flags, NULL);
}

G2Z_API g2z_status g2z_bpe_trainer_add(g2z_bpe_trainer *trainer, const g2z_bpe_trainer *other) {
  const g2zt_words *words = &other->words;
  g2z_status status = G2Z_OK;
  size_t added = 0;
  for (; added < words->count; added++) {
    status = g2zt_trainer_count(trainer, words->bytes + words->starts[added],
                                g2zt_word_bytes(words, added), other->counts[added]);
    if (status != G2Z_OK) break;
  }
  if (status == G2Z_OK) return G2Z_OK;
  for (size_t i = 0; i < added; i++) /* subtract what was added */
    g2zt_trainer_count(trainer, words->bytes + words->starts[i], g2zt_word_bytes(words, i),
                       -other->counts[i]);
  return status;
}

/* All words are in one array, with one site per byte. A symbol of n bytes has n sites; its first
 * and its last site have its id, so that both neighbours are found without links. A barrier (id -1)
 * stands before, between and after words. The sites at which the same pair of symbols begins form a
 * doubly linked list: a merge of the pair visits only these sites. */
typedef struct g2zt_site {
  int32_t id;              /* -1: a barrier, or inside a symbol */
  uint32_t word;           /* the word of this byte */
  uint32_t list;           /* the list that this site is in; 0: none */
  uint32_t before, after;  /* neighbours in this list; 0: none, since site 0 is a barrier */
} g2zt_site;

typedef struct g2zt_record { /* a pair of tokens during training */
  int64_t count;             /* number of times that it occurs in all texts */
  uint32_t first;            /* first site of its list; 0: none */
} g2zt_record;

typedef struct g2zt_learning {
  g2z_services *services;
  g2z_tokenizer *tokenizer;
  const int64_t *counts;     /* number of times that each word occurs */
  g2zt_site *sites;          /* all words, with barriers */
  g2zt_words pairs;          /* pair number i has the record number i + 1 */
  g2zt_record *records;      /* records[0] is unused: list 0 means none */
  size_t records_capacity;
  g2zt_heap heap;            /* (INT64_MAX - count, left << 32 | right); count may be outdated */
} g2zt_learning;

/* The symbol after the symbol at `at`; a barrier if there is none. */
static inline uint32_t g2zt_site_next(const g2zt_learning *learning, uint32_t at) {
  return at + (uint32_t)g2zt_word_bytes(&learning->tokenizer->tokens,
                                        (size_t)learning->sites[at].id);
}

/* The symbol before the symbol at `at`; 0 if there is none. */
static inline uint32_t g2zt_site_previous(const g2zt_learning *learning, uint32_t at) {
  const int32_t id = learning->sites[at - 1].id;
  if (id < 0) return 0;
  return at - (uint32_t)g2zt_word_bytes(&learning->tokenizer->tokens, (size_t)id);
}

/* Puts the records from `first` on into the heap: the pairs that the last merge made. */
static g2z_status g2zt_learn_enter(g2zt_learning *learning, size_t first) {
  G2Z_TRY(G2Z_GROW(learning->services, &learning->heap.items, &learning->heap.capacity,
                   learning->heap.count,
                   learning->heap.count + learning->pairs.count + 1 - first));
  for (size_t i = first; i <= learning->pairs.count; i++) {
    const g2zt_pair pair = g2zt_pair_at(&learning->pairs, i - 1);
    if (learning->records[i].count)
      g2zt_heap_push(&learning->heap, (uint64_t)(INT64_MAX - learning->records[i].count),
                     (uint64_t)pair.left << 32 | pair.right);
  }
  return G2Z_OK;
}

/* Adds the pair of the symbol at `at` and its right neighbour to the record of this pair. */
static g2z_status g2zt_learn_link(g2zt_learning *learning, uint32_t at) {
  g2zt_site *sites = learning->sites;
  const g2zt_words *tokens = &learning->tokenizer->tokens;
  int32_t right = sites[g2zt_site_next(learning, at)].id;
  const g2zt_pair pair = {(uint32_t)sites[at].id, (uint32_t)right};
  size_t known = learning->pairs.count, index;
  if (right < 0 ||
      g2zt_word_bytes(tokens, pair.left) + g2zt_word_bytes(tokens, pair.right) > G2ZT_TOKEN_BYTES)
    return G2Z_OK;
  G2Z_TRY(G2Z_GROW(learning->services, &learning->records, &learning->records_capacity,
                   known + (known > 0), known + 2));
  G2Z_TRY(g2zt_words_add(learning->services, &learning->pairs, (const unsigned char *)&pair,
                         sizeof pair, &index));
  g2zt_record *record = &learning->records[index + 1];
  if (index == known) memset(record, 0, sizeof *record);
  record->count += learning->counts[sites[at].word];
  sites[at].list = (uint32_t)index + 1;
  sites[at].before = 0;
  sites[at].after = record->first;
  if (record->first) sites[record->first].before = at;
  record->first = at;
  return G2Z_OK;
}

/* Removes a site from its list, if it is in one. */
static void g2zt_learn_unlink(g2zt_learning *learning, uint32_t at) {
  g2zt_site *sites = learning->sites;
  g2zt_record *record = &learning->records[sites[at].list];
  uint32_t before = sites[at].before, after = sites[at].after;
  if (!sites[at].list) return;
  record->count -= learning->counts[sites[at].word];
  if (before) sites[before].after = after;
  else record->first = after;
  if (after) sites[after].before = before;
  sites[at].list = 0;
}

/* Makes the sites of all words, with single bytes as symbols, and records their pairs. */
static g2z_status g2zt_learn_begin(g2zt_learning *learning, const g2zt_words *words) {
  const size_t total = 1 + words->count + g2zt_words_bytes(words);
  G2Z_TRY(G2Z_NEW(learning->services, total, &learning->sites));
  g2zt_site *site = learning->sites;
  site->id = -1;
  for (size_t word = 0; word < words->count; word++) {
    for (size_t i = words->starts[word]; i < words->starts[word + 1]; i++) {
      site++;
      site->id = learning->tokenizer->byte_ids[words->bytes[i]];
      site->word = (uint32_t)word;
    }
    site++;
    site->id = -1;
  }
  for (uint32_t at = (uint32_t)total - 1; at > 0; at--)
    if (learning->sites[at].id >= 0) G2Z_TRY(g2zt_learn_link(learning, at));
  return g2zt_learn_enter(learning, 1);
}

/* The record of the most frequent pair; 0: no pair is left. Counts only fall. So an outdated item
 * is put back with its present count, and the first item with a present count is the best. */
static uint32_t g2zt_learn_best(g2zt_learning *learning) {
  while (learning->heap.count) {
    const g2zt_item item = learning->heap.items[0];
    const g2zt_pair ids = {(uint32_t)(item.second >> 32), (uint32_t)item.second};
    const int64_t number = g2zt_words_find(&learning->pairs, (const unsigned char *)&ids,
                                           sizeof ids);
    const int64_t count = learning->records[number + 1].count;
    const uint64_t first = (uint64_t)(INT64_MAX - count);
    g2zt_heap_pop(&learning->heap);
    if (first == item.first) return (uint32_t)number + 1;
    if (count) g2zt_heap_push(&learning->heap, first, item.second);
  }
  return 0;
}

/* Merges the symbol at *at with the next one into `id`, and moves *at to the symbol after them. */
static g2z_status g2zt_learn_merge(g2zt_learning *learning, uint32_t *at, int32_t id) {
  g2zt_site *sites = learning->sites;
  const uint32_t second = g2zt_site_next(learning, *at);
  const uint32_t previous = g2zt_site_previous(learning, *at);
  g2zt_learn_unlink(learning, *at);
  g2zt_learn_unlink(learning, second);
  g2zt_learn_unlink(learning, previous); /* `previous` may be site 0, which is in no list */
  sites[second - 1].id = -1;
  sites[second].id = -1;
  sites[*at].id = id;
  const uint32_t next = g2zt_site_next(learning, *at);
  sites[next - 1].id = id;
  G2Z_TRY(g2zt_learn_link(learning, *at));
  if (previous) G2Z_TRY(g2zt_learn_link(learning, previous));
  *at = next;
  return G2Z_OK;
}

static g2z_status g2zt_learn(g2zt_learning *learning, const g2zt_words *words, int vocab) {
  G2Z_TRY(g2zt_learn_begin(learning, words));
  const g2zt_site *sites = learning->sites;
  while (g2z_tokenizer_vocab(learning->tokenizer) < vocab) {
    const uint32_t best = g2zt_learn_best(learning);
    if (!best) break;
    const size_t known = learning->pairs.count + 1;
    const int32_t id = (int32_t)learning->tokenizer->tokens.count;
    const g2zt_pair pair = g2zt_pair_at(&learning->pairs, best - 1);
    G2Z_TRY(g2zt_tokenizer_join(learning->tokenizer, pair.left, pair.right));
    while (learning->records[best].first) {
      /* In a run of x, the sites of the pair (x, x) overlap: merge them from left to right. Each
       * run is merged as a whole, so that its symbols are visited only a few times. */
      uint32_t at = learning->records[best].first;
      uint32_t previous = g2zt_site_previous(learning, at);
      while (previous && sites[previous].list == best) {
        at = previous;
        previous = g2zt_site_previous(learning, at);
      }
      do {
        G2Z_TRY(g2zt_learn_merge(learning, &at, id));
      } while (sites[at].list == best);
    }
    G2Z_TRY(g2zt_learn_enter(learning, known));
  }
  return G2Z_OK;
}

G2Z_API g2z_status g2z_bpe_trainer_finish(g2z_bpe_trainer *trainer, int vocab,
                                          g2z_tokenizer **out) {
  g2z_services *services = trainer->services;
  g2zt_learning learning;
  memset(&learning, 0, sizeof learning);
  *out = NULL;
  if (vocab < 257 || vocab > G2ZT_VOCAB_MAX)
    return g2z_fail(services, G2Z_BAD_ARGUMENT, "a vocabulary of %d; choose 257 (the bytes and %s) "
                    "to %d", vocab, G2ZT_EOT, G2ZT_VOCAB_MAX);
  G2Z_TRY(g2zt_tokenizer_new(services, &learning.tokenizer));
  learning.services = services;
  learning.counts = trainer->counts;
  g2z_status status = g2zt_learn(&learning, &trainer->words, vocab);
  g2z_release(services, learning.sites);
  g2zt_words_free(services, &learning.pairs);
  g2z_release(services, learning.records);
  g2z_release(services, learning.heap.items);
  if (status == G2Z_OK) *out = learning.tokenizer;
  else g2z_tokenizer_free(learning.tokenizer);
  return status;
}

/* ===== files of text =====================================================
 * In:  a path. Out: its text, unpacked; the strings of its documents.
 * Law: a file that is not text is refused; the message names its kind and a command that converts
 *      it. */

/* Returns 1 if the first `length` bytes of a name end with `ending`. */
static int g2zt_ends(const char *name, size_t length, const char *ending) {
  size_t tail = strlen(ending);
  return length > tail && memcmp(name + length - tail, ending, tail) == 0;
}

/* The endings of packed files' names, and the commands that unpack the files. Without --long=31
 * zstd refuses windows of more than 128 MiB; it needs their memory only if the file has such
 * windows. */
static const char *const g2zt_packed[][2] = {{".gz", "gzip -dc"}, {".zst", "zstd -dc --long=31"}};

G2Z_API g2z_text_name g2z_text_named(const char *path) {
  g2z_text_name name = {NULL, strlen(path), 0};
  for (size_t i = 0; i < G2Z_COUNT(g2zt_packed) && !name.unpack; i++) {
    if (!g2zt_ends(path, name.bytes, g2zt_packed[i][0])) continue;
    name.unpack = g2zt_packed[i][1];
    name.bytes -= strlen(g2zt_packed[i][0]);
  }
  name.json = g2zt_ends(path, name.bytes, ".jsonl") || g2zt_ends(path, name.bytes, ".ndjson") ||
              g2zt_ends(path, name.bytes, ".json");
  return name;
}

/* Starts the unpacker, which reads the file out->file. Then out->file becomes its output. */
static g2z_status g2zt_unpack(g2z_services *services, const char *path, g2z_text_file *out) {
  extern char **environ;
  const int given = out->file;
  char words[64], word[700], *arguments[8], *rest = NULL;
  int unpacked[2] = {-1, -1}, messages[2] = {-1, -1}; /* pipes: [0] to read, [1] to write */
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  sigset_t defaults;
  struct stat info;
  pid_t child = 0;
  if (fstat(given, &info) != 0 || !S_ISREG(info.st_mode)) {
    g2z_text_close(out);
    return g2z_fail(services, G2Z_IO, "cannot read %s: it is not a regular file; unpack it into "
                    "one: %s %s > FILE", path, out->unpack,
                    g2z_shell_word(path, word, sizeof word));
  }
  if (pipe(unpacked) != 0 || pipe(messages) != 0) {
    const int error = errno;
    if (unpacked[0] >= 0) close(unpacked[0]);
    if (unpacked[1] >= 0) close(unpacked[1]);
    g2z_text_close(out);
    return g2z_fail_file(services, error, "read", path);
  }
  for (int i = 0; i < 2; i++) {
    fcntl(unpacked[i], F_SETFD, FD_CLOEXEC);
    fcntl(messages[i], F_SETFD, FD_CLOEXEC);
    /* Messages are read only after the process has ended: it must not wait on a full pipe. */
    fcntl(messages[i], F_SETFL, O_NONBLOCK);
  }
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_adddup2(&actions, given, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, unpacked[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, messages[1], STDERR_FILENO);
  sigemptyset(&defaults); /* an ignored signal would stay ignored in the child */
  sigaddset(&defaults, SIGPIPE);
  sigaddset(&defaults, SIGXFSZ);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  int count = 0;
  snprintf(words, sizeof words, "%s", out->unpack);
  for (char *one = strtok_r(words, " ", &rest); one; one = strtok_r(NULL, " ", &rest))
    arguments[count++] = one;
  arguments[count] = NULL;
  const int error = posix_spawnp(&child, arguments[0], &actions, &attributes, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(unpacked[1]);
  close(messages[1]);
  close(given);
  out->file = unpacked[0];
  out->errors = messages[0];
  out->child = (int)child;
  if (!error) return G2Z_OK;
  out->child = 0;
  close(out->errors);
  g2z_text_close(out);
  return g2z_fail(services, G2Z_UNSUPPORTED, "%s: cannot start %s: %s; install it, or unpack the "
                  "file", path, arguments[0], strerror(error));
}

G2Z_API g2z_status g2z_text_open(g2z_services *services, const char *path, g2z_text_file *out) {
  const int is_stdin = strcmp(path, "-") == 0;
  out->label = is_stdin ? "standard input" : path;
  out->unpack = g2z_text_named(path).unpack;
  out->child = 0;
  out->file = -1;
  /* O_NONBLOCK: a FIFO may have no writer yet. The caller waits for it, where a signal can stop the
   * wait. */
  if (is_stdin) out->file = dup(STDIN_FILENO);
  else G2Z_RETRY(out->file, open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (out->file < 0) return g2z_fail_file(services, errno, "read", out->label);
  if (out->unpack) return g2zt_unpack(services, path, out);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_text_end(g2z_services *services, g2z_text_file *text, uint64_t bytes) {
  char said[400], *reason = said;
  int code = 0;
  if (!text->child) return G2Z_OK;
  while (waitpid(text->child, &code, 0) < 0 && errno == EINTR) continue;
  text->child = 0;
  ssize_t length;
  G2Z_RETRY(length, read(text->errors, said, sizeof said - 1));
  close(text->errors);
  if (code == 0) return G2Z_OK;
  if (WIFSIGNALED(code))
    return g2z_fail(services, G2Z_IO, "%s: %s was ended by signal %d; start again", text->label,
                    text->unpack, WTERMSIG(code));
  if (length < 0) length = 0;
  said[length] = 0;
  reason += strspn(reason, " \r\n");
  reason[strcspn(reason, "\r\n")] = 0; /* the first line names the cause */
  length = (ssize_t)strlen(reason);
  while (length && reason[length - 1] == ' ') reason[--length] = 0;
  return g2z_fail(services, G2Z_FORMAT, "%.300s: %s ended with exit code %d after %" PRIu64 " "
                  "bytes of text, with the message \"%s\"; if the file is damaged or cut short, "
                  "copy it again", text->label, text->unpack, WEXITSTATUS(code), bytes,
                  *reason ? reason : "none");
}

G2Z_API void g2z_text_close(g2z_text_file *text) {
  if (text->file >= 0) close(text->file);
  if (text->child) {
    kill(text->child, SIGKILL);
    close(text->errors);
  }
  while (text->child && waitpid(text->child, NULL, 0) < 0 && errno == EINTR) continue;
  text->file = -1;
  text->child = 0;
}

G2Z_API g2z_status g2z_text_read(g2z_services *services, const char *path, size_t limit,
                                 char **text, size_t *bytes) {
  g2z_text_file from;
  size_t capacity = 0;
  *text = NULL;
  *bytes = 0;
  if (!g2z_text_named(path).unpack) return g2z_read_file(services, path, limit, text, bytes);
  G2Z_TRY(g2z_text_open(services, path, &from));
  void *list = NULL;
  g2z_status status = G2Z_OK;
  for (ssize_t got = 1; got && status == G2Z_OK;) {
    status = g2z_grow(services, &list, &capacity, *bytes, *bytes + 65536, 1);
    if (status != G2Z_OK) break;
    G2Z_RETRY(got, read(from.file, (char *)list + *bytes, 65536));
    if (got < 0) status = g2z_fail_file(services, errno, "read", path);
    else *bytes += (size_t)got;
    if (got > 0 && *bytes >= G2Z_TEXT_LOOK && *bytes - (size_t)got < G2Z_TEXT_LOOK)
      status = g2z_text_check(services, path, g2z_text_named(path).json, (char *)list, *bytes,
                              NULL); /* early: the output may be huge */
    if (*bytes > limit)
      status = g2z_fail(services, G2Z_FORMAT, "%s unpacks to more than %zu bytes, the limit for a "
                        "file of this kind: split it", path, limit);
  }
  if (status == G2Z_OK) status = g2z_text_end(services, &from, *bytes);
  g2z_text_close(&from);
  if (status == G2Z_OK) *text = (char *)list;
  else g2z_release(services, list);
  return status;
}

/* The length of the character at p, if str.strip removes it; else 0. */
static size_t g2zt_strip_bytes(const unsigned char *p, const unsigned char *end) {
  if (p < end && *p >= 0x1C && *p <= 0x1F) return 1;
  return g2zt_white_bytes(p, end);
}

G2Z_API size_t g2z_text_white(const void *text, size_t bytes) {
  const unsigned char *begin = (const unsigned char *)text;
  size_t at = 0;
  for (size_t step = 1; step; at += step) step = g2zt_strip_bytes(begin + at, begin + bytes);
  return at;
}

G2Z_API size_t g2z_text_white_end(const void *text, size_t bytes) {
  const unsigned char *begin = (const unsigned char *)text;
  size_t left = bytes;
  for (size_t back = 1; back <= 3 && back <= left; back++) {
    if (g2zt_strip_bytes(begin + left - back, begin + left) != back) continue;
    left -= back;
    back = 0; /* continue with the character before it */
  }
  return bytes - left;
}

/* Files that users name by mistake: bytes near the start of the file, its kind, and a command that
 * prints its text, or its documents as lines of JSON. %s stands for the file's name. */
#define G2ZT_PYTHON(module, batches)                                                          \
  "python3 -c 'import json, sys, " module "; [print(json.dumps(row, default=str)) for batch " \
  "in " batches " for row in batch.to_pylist()]' %s"
#define G2ZT_MAGIC(at, bytes) at, sizeof bytes - 1, bytes
static const struct {
  size_t at, count;
  const char *bytes, *what, *command;
  int json;
} g2zt_magics[] = {
    {G2ZT_MAGIC(0, "PAR1"), "a Parquet file",
     G2ZT_PYTHON("pyarrow.parquet", "pyarrow.parquet.ParquetFile(sys.argv[1]).iter_batches()"), 1},
    {G2ZT_MAGIC(0, "ARROW1"), "an Arrow file",
     G2ZT_PYTHON("pyarrow", "pyarrow.ipc.open_file(sys.argv[1]).read_all().to_batches()"), 1},
    {G2ZT_MAGIC(0, "\xFF\xFF\xFF\xFF"), "an Arrow stream",
     G2ZT_PYTHON("pyarrow", "pyarrow.ipc.open_stream(sys.argv[1])"), 1},
    {G2ZT_MAGIC(0, "\x1F\x8B"), "packed by gzip", "gzip -dc < %s", 0},
    {G2ZT_MAGIC(0, "\x28\xB5\x2F\xFD"), "packed by zstd", "zstd -dc --long=31 %s", 0},
    {G2ZT_MAGIC(0, "\xFD" "7zXZ"), "packed by xz", "xz -dc %s", 0},
    {G2ZT_MAGIC(4, "1AY&SY"), "packed by bzip2", "bzip2 -dc %s", 0},
    {G2ZT_MAGIC(0, "7z\xBC\xAF\x27\x1C"), "a 7-Zip archive", "7z x -so %s", 0},
    {G2ZT_MAGIC(0, "PK\x03\x04"), "a zip archive", "unzip -p %s", 0},
    {G2ZT_MAGIC(257, "ustar"), "a tar archive", "tar -xOf %s", 0},
    {G2ZT_MAGIC(0, "%PDF-"), "a PDF", "pdftotext %s -", 0},
    {G2ZT_MAGIC(0, "\x7F" "ELF"), "a program or a library (ELF)", "", 0},
    {G2ZT_MAGIC(0, "\x88\xD8\x34\x01"), "a shard of tokens", "", 0},
    {G2ZT_MAGIC(0, "version https://git-lfs"), "a pointer of git-lfs (type git lfs pull)", "", 0},
    {G2ZT_MAGIC(0, "\xFF\xFE\0\0"), "text in UTF-32", "iconv -f utf-32 -t utf-8 %s", 0},
    {G2ZT_MAGIC(0, "\xFF\xFE"), "text in UTF-16", "iconv -f utf-16 -t utf-8 %s", 0},
    {G2ZT_MAGIC(0, "\xFE\xFF"), "text in UTF-16", "iconv -f utf-16 -t utf-8 %s", 0}};
#undef G2ZT_MAGIC
#undef G2ZT_PYTHON

/* Refuses a file. `what` names its kind; `command` prints its text, or with `json` its documents as
 * lines of JSON. command "": there is none. */
static g2z_status g2zt_no_text(g2z_services *services, const char *path, const char *what,
                               const char *command, int json, g2z_text_remedy *remedy) {
  const char *given = path, *label = path, *pack = g2z_text_named(path).unpack;
  const char *kind = "text", *ending = "txt";
  char word[400], made_word[400], print[600], unpack[460] = "";
  struct stat info;
  g2z_text_remedy made;
  memset(&made, 0, sizeof made);
  if (strcmp(path, "-") == 0) {
    given = "FILE";
    label = "standard input";
  }
  if (json) {
    kind = "lines of JSON";
    ending = "jsonl";
  }
  if (remedy) *remedy = made;
  if (!*command)
    return g2z_fail(services, G2Z_FORMAT, "%.200s is %s, not text in UTF-8: give a text file",
                    label, what);
  snprintf(made.made, sizeof made.made, "%.380s.%s", given, ending);
  for (int i = 2; stat(made.made, &info) == 0; i++) /* the command must not replace a file */
    snprintf(made.made, sizeof made.made, "%.380s-%d.%s", given, i, ending);
  g2z_shell_word(given, word, sizeof word);
  g2z_shell_word(made.made, made_word, sizeof made_word);
  if (pack) {
    snprintf(unpack, sizeof unpack, "%s %s | ", pack, word);
    snprintf(word, sizeof word, "-"); /* the command reads the output of the unpacker */
  }
  snprintf(print, sizeof print, command, word);
  const int length = snprintf(made.command, sizeof made.command, "%s%s > %s", unpack, print,
                              made_word);
  if ((size_t)length >= sizeof made.command) made.command[0] = 0;
  if (!remedy)
    return g2z_fail(services, G2Z_FORMAT, "%.200s is %s, not text in UTF-8; convert it to %s: %s",
                    label, what, kind, made.command);
  *remedy = made;
  return g2z_fail(services, G2Z_FORMAT, "%.200s is %s, not text in UTF-8; convert it to %s", label,
                  what, kind);
}

G2Z_API g2z_status g2z_text_check(g2z_services *services, const char *path, int json,
                                  const char *text, size_t bytes, g2z_text_remedy *remedy) {
  if (bytes > G2Z_TEXT_LOOK) bytes = G2Z_TEXT_LOOK;
  static const char *const from_utf16[2] = {"iconv -f utf-16be -t utf-8 %s",
                                            "iconv -f utf-16le -t utf-8 %s"};
  const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
  const int lines = json || strstr(path, ".json");
  size_t characters = 0, wrong = 0, letters = 0, controls = 0, zeros[2] = {0, 0};
  char what[128];
  const size_t mark = g2zt_byte_order_mark(text, bytes);
  const size_t first = mark + g2z_text_white(text + mark, bytes - mark);
  if (lines && first < bytes && text[first] == '[')
    return g2zt_no_text(services, path, "an array of JSON", "jq -c '.[]' %s", 1, remedy);
  if (lines && first < bytes && text[first] == '{' &&
      memchr(text + first + 1, '\n', g2z_text_white(text + first + 1, bytes - first - 1)))
    return g2zt_no_text(services, path, "JSON with line breaks inside of objects", "jq -c . %s", 1,
                        remedy);
  for (size_t i = 0; i < G2Z_COUNT(g2zt_magics); i++)
    if (g2zt_magics[i].at + g2zt_magics[i].count <= bytes &&
        memcmp(text + g2zt_magics[i].at, g2zt_magics[i].bytes, g2zt_magics[i].count) == 0)
      return g2zt_no_text(services, path, g2zt_magics[i].what, g2zt_magics[i].command,
                          lines || g2zt_magics[i].json, remedy);
  for (size_t i = 0; i < bytes; i++) {
    zeros[i % 2] += text[i] == 0;
    controls += (at[i] < 0x20 && !strchr("\t\n\v\f\r\x1b", text[i])) || text[i] == 0;
  }
  for (int odd = 0; odd < 2; odd++) /* in UTF-16, every second byte of Latin letters is 0 */
    if (zeros[odd] * 4 > bytes && zeros[!odd] * 8 < bytes)
      return g2zt_no_text(services, path, "text in UTF-16", from_utf16[odd], lines, remedy);
  if (controls * 30 > bytes || (bytes > 1 && (!text[0] || !text[1])))
    return g2zt_no_text(services, path, "binary", "", lines, remedy);
  for (; end - at > 3; characters++) { /* the last character may be truncated */
    const size_t step = g2z_utf8_length(at, end);
    if (step == 0) {
      wrong++;
      letters += *at >= 0xC0 && *at < 0xFE && *at != 0xD7 && *at != 0xF7;
    }
    at += step + (step == 0);
  }
  const int latin = letters * 4 > wrong * 3;
  if (wrong * 100 <= characters || (!latin && wrong * 10 <= characters)) return G2Z_OK;
  const char *encoding = "in another encoding", *command = "iconv -f ENCODING -t utf-8 %s";
  if (latin) {
    encoding = "perhaps in Latin-1";
    command = "iconv -f latin1 -t utf-8 %s";
  }
  snprintf(what, sizeof what, "%s (%zu of its first %zu characters are invalid)", encoding, wrong,
           characters);
  return g2zt_no_text(services, path, what, command, lines, remedy);
}

G2Z_API g2z_status g2z_text_document(g2z_services *services, const char *label, const char *line,
                                     size_t bytes, const char *const fields[2], int both,
                                     g2z_json *json, g2z_json_text found[2]) {
  g2z_json_text key;
  memset(found, 0, 2 * sizeof *found);
  g2z_json_open(json, services, label, line, bytes);
  g2z_json_enter(json, '{');
  while (g2z_json_next(json, '}', &key)) {
    int which = -1;
    if (g2z_json_is(&key, fields[0])) which = 0;
    else if (g2z_json_is(&key, fields[1])) which = 1;
    if (which == 0 || (which == 1 && (both || g2z_json_peek(json) == '"')))
      found[which] = g2z_json_string(json);
    else g2z_json_skip(json);
  }
  return g2z_json_close(json);
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_TEXT_IMPLEMENTED */
