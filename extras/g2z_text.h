/* g2z_text.h: text to token ids and back, beside gpt2_zero.h. MIT licence.
 *
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_text.h"
 *
 * It uses the public functions of gpt2_zero.h alone, and its switches.
 *
 * TOKENIZER: text to ids at the speed of the disk, exact for every text and vocabulary
 *     pieces   The pattern of GPT-2 is algebra on bit masks: a bit for each byte of a block of 64
 *              says letter, number, white space.
 *     cache    Nearly all pieces came before: each encoder remembers 131,072 of at most 31 bytes.
 *     merges   A piece that is new is merged, the smallest id first. Pieces over 1 MiB are merged a
 *              MiB at a time.
 *     threads  Texts are cut where the pattern does not notice: g2z_encode_cut. A text that comes
 *              in bits, or has no such place, is encoded as far as nothing can change:
 *              g2z_encode_part. */

#ifndef G2Z_TEXT_INCLUDED
#define G2Z_TEXT_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_text.h: include gpt2_zero.h before it"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ===== tokenizer ===================================================
 * GPT-2's byte-level BPE, exact over Unicode 16.0. A g2z_tokenizer is immutable once created and
 * may be shared between threads; each thread that encodes has a g2z_encoder of its own: 8 MiB,
 * most of them a cache, and 32 bytes for each byte of a long piece's first MiB. */

typedef struct g2z_tokenizer g2z_tokenizer;
typedef struct g2z_encoder g2z_encoder;

/* From a file: vocab.bpe / merges.txt or tokenizer.json, told apart by content. path NULL: the byte-level vocabulary, 256 tokens and the end of text. Refused
 * are ids that do not follow from the merges in GPT-2's way (the bytes in its order, the merges,
 * <|endoftext|>), tokens of more than 1024 bytes, and more than 1048576 of them. */
G2Z_API g2z_status g2z_tokenizer_create(g2z_services *services, const char *path,
                                        g2z_tokenizer **out);
/* The same from memory. `label` names it in errors. */
G2Z_API g2z_status g2z_tokenizer_parse(g2z_services *services, const char *label, const void *text,
                                       size_t bytes, g2z_tokenizer **out);
G2Z_API void g2z_tokenizer_free(g2z_tokenizer *tokenizer); /* NULL is fine */
/* The number of ids: 256 + merges + 1. GPT-2: 50257. */
G2Z_API int g2z_tokenizer_vocab(const g2z_tokenizer *tokenizer);
/* The id of <|endoftext|>: the last one. */
G2Z_API int g2z_tokenizer_eot(const g2z_tokenizer *tokenizer);
/* The bytes of a token; NULL and 0 for an id that does not exist. <|endoftext|> has 13. */
G2Z_API const unsigned char *g2z_tokenizer_token(const g2z_tokenizer *tokenizer, int id,
                                                 size_t *bytes);
/* merges.txt: a version line, then a merge per line, as Hugging Face and OpenAI write it. */
G2Z_API g2z_status g2z_tokenizer_write_merges(g2z_services *services,
                                              const g2z_tokenizer *tokenizer, const char *path);
/* vocab.json: token to id, so that transformers' GPT2Tokenizer opens the pair. */
G2Z_API g2z_status g2z_tokenizer_write_vocab(g2z_services *services,
                                             const g2z_tokenizer *tokenizer, const char *path);

typedef enum g2z_encode_flags {
  G2Z_ENCODE_DEFAULT = 0,       /* invalid UTF-8 becomes U+FFFD; <|endoftext|> is ordinary text */
  G2Z_ENCODE_STRICT = 1,        /* invalid UTF-8 is G2Z_FORMAT; the sentence names the offset */
  G2Z_ENCODE_ALLOW_SPECIAL = 2  /* <|endoftext|> in the text becomes its id */
} g2z_encode_flags;

G2Z_API g2z_status g2z_encoder_create(g2z_services *services, const g2z_tokenizer *tokenizer,
                                      g2z_encoder **out);
G2Z_API void g2z_encoder_free(g2z_encoder *encoder); /* NULL is fine */
/* Appends the ids of `text`, a text that is complete: its end is an end for the pattern. `flags` is
 * a sum of g2z_encode_flags. Time and memory are linear in the length; a call that fails appends
 * nothing. */
G2Z_API g2z_status g2z_encode(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                              g2z_tokens *out);
/* The largest p up to `bytes` where the character before is not white space and the one at p is;
 * 0 when there is none. Encoding [0, p) and the rest on their own gives the ids of the whole: so a
 * text of any length is cut. */
G2Z_API size_t g2z_encode_cut(const void *text, size_t bytes);
/* Appends the ids of as much of a text's beginning as nothing behind `bytes` can change; *used says
 * how much that is. Go on with the rest and more behind it. With this a text of any length is
 * encoded in bounded memory, also where g2z_encode_cut finds no place. Ids come out for each piece
 * that ends 64 bytes or more before the end, from about 1 MiB on also for part of a longer one. */
G2Z_API g2z_status g2z_encode_part(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                                   g2z_tokens *out, size_t *used);
/* The bytes of ids one after the other (not necessarily valid UTF-8), a NUL behind the last; freed
 * with g2z_release. An id outside the vocabulary is G2Z_BAD_ARGUMENT. */
G2Z_API g2z_status g2z_decode(g2z_services *services, const g2z_tokenizer *tokenizer,
                              const int32_t *ids, size_t count, char **text, size_t *bytes);

/* Learns a vocabulary: GPT-2's pre-tokenization, then the most frequent pair first, ties by the
 * smaller pair of ids, as Hugging Face's trainer. Texts are fed one complete document a call. Stops
 * early when no pair is left. */
typedef struct g2z_bpe_trainer g2z_bpe_trainer;
G2Z_API g2z_status g2z_bpe_trainer_create(g2z_services *services, g2z_bpe_trainer **out);
G2Z_API g2z_status g2z_bpe_trainer_feed(g2z_bpe_trainer *trainer, const void *text, size_t bytes);
/* Counts as much of a text's beginning as nothing behind `bytes` can change; *used says how much
 * that is. Go on with the rest and more behind it: so a text that g2z_encode_cut finds no place in
 * is fed in bounded memory, if its pieces are. What counts is each piece that ends 64 bytes or more
 * before the end. */
G2Z_API g2z_status g2z_bpe_trainer_feed_part(g2z_bpe_trainer *trainer, const void *text,
                                             size_t bytes, size_t *used);
/* Counts what `other` was fed, as if this trainer had been: so threads share the counting. */
G2Z_API g2z_status g2z_bpe_trainer_add(g2z_bpe_trainer *trainer, const g2z_bpe_trainer *other);
/* `vocab` counts the 256 bytes and <|endoftext|>: at most vocab - 257 merges, whose tokens have at
 * most 1024 bytes. The trainer keeps what it was fed, and may be fed on and finished again. */
G2Z_API g2z_status g2z_bpe_trainer_finish(g2z_bpe_trainer *trainer, int vocab,
                                          g2z_tokenizer **out);
G2Z_API void g2z_bpe_trainer_free(g2z_bpe_trainer *trainer); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif /* G2Z_TEXT_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_TEXT_IMPLEMENTED)
#define G2Z_TEXT_IMPLEMENTED

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A caller's bug, not an input: overridable, and never has a side effect. */
#ifndef G2Z_ASSERT
#define G2Z_ASSERT(condition) assert(condition)
#endif

/* In static mode a program may leave most of the library unused. */
#if defined(__GNUC__)
#define G2ZT_PRIVATE static __attribute__((unused))
#else
#define G2ZT_PRIVATE static
#endif

#define G2ZT_TRY(call)                             \
  do {                                             \
    g2z_status try_status_ = (call);               \
    if (try_status_ != G2Z_OK) return try_status_; \
  } while (0)

#ifdef __cplusplus
extern "C" {
#endif

/* ----- memory ------------------------------------------------------------ */

/* `count` zeroed elements of `size` bytes. *out is NULL on failure. */
static g2z_status g2zt_alloc(g2z_services *services, size_t count, size_t size, void **out) {
  *out = NULL;
  if (size && count > SIZE_MAX / size)
    return g2z_fail(services, G2Z_NO_MEMORY, "%zu elements of %zu bytes exceed the address space",
                    count, size);
  size_t bytes = count && size ? count * size : 1;
  /* calloc's large blocks are zero without being touched: the system hands out clean pages. */
  *out = services->allocate ? services->allocate(services->user, bytes) : calloc(1, bytes);
  if (!*out) return g2z_fail(services, G2Z_NO_MEMORY, "no memory for %zu bytes", bytes);
  if (services->allocate) memset(*out, 0, bytes);
  return G2Z_OK;
}

/* Grows a list so that `need` elements fit; the content is kept, also on failure. */
static g2z_status g2zt_grow(g2z_services *services, void **list, size_t *capacity, size_t used,
                            size_t need, size_t size) {
  if (need <= *capacity) return G2Z_OK;
  size_t larger = *capacity + *capacity / 2;
  if (larger < need) larger = need;
  if (larger < 64) larger = 64;
  void *moved;
  G2ZT_TRY(g2zt_alloc(services, larger, size, &moved));
  if (used) memcpy(moved, *list, used * size);
  g2z_release(services, *list);
  *list = moved;
  *capacity = larger;
  return G2Z_OK;
}

/* ===== tokenizer ===================================================
 * In:  text as bytes; a vocabulary from one of two file formats, or learnt from texts.
 * Out: token ids, the bytes that they stand for, the vocabulary as files.
 * Law: text -> valid UTF-8 -> pieces -> merges inside a piece, the smallest id first. Each stage
 *      knows nothing of the others. Ids follow from the merges alone: 0-255 are the bytes in
 *      GPT-2's order, merge i makes 256 + i, the last is <|endoftext|>. A merge joins older tokens,
 *      so its id exceeds theirs: what a merge makes possible always comes later. */

#define G2Z__TOKEN_BYTES 1024      /* GPT-2's longest token has 128 bytes */
#define G2Z__VOCAB_MAX 1048576     /* with the line above: tokens take at most 1 GiB */
#define G2Z__EOT "<|endoftext|>"
#define G2Z__EOT_BYTES (sizeof G2Z__EOT - 1)

/* g2zt_grow for a list of `type`; returns from the function that it stands in when it fails. */
#define G2Z__GROW(services, type, list, capacity, used, need)                                \
  do {                                                                                       \
    void *grown_ = (list);                                                                   \
    g2z_status grow_ = g2zt_grow(services, &grown_, &(capacity), used, need, sizeof(type));  \
    (list) = (type *)grown_;                                                                 \
    if (grow_ != G2Z_OK) return grow_;                                                       \
  } while (0)

/* ----- UTF-8 and classes ------------------------------------------------- */

enum { G2Z__OTHER, G2Z__LETTER, G2Z__NUMBER, G2Z__WHITE };

/* The classes of Unicode 16.0 from U+0000 on, as run lengths: o others, l letters (general category
 * L), n numbers (N), w White_Space. What lies beyond the last run is o. */
#define G2Z__CLASSIFIED 0x323B0
static const char g2z__class_runs[] =
    "o9w5o18w1o15n10o7l26o6l26o10w1o26w1o9l1o7n2o1l1o3n1l1o1n3o1l23o1l31o1l458o4l12o14l5o7l1o1l1"
    "o129l5o1l2o2l4o1l1o6l1o1l3o1l1o1l20o1l83o1l139o8l166o1l38o2l1o6l41o71l27o4l4o45l43o21n10o4l2o1"
    "l99o1l1o15l2o7l2n10l3o2l1o16l1o1l30o29l89o11l1o14n10l33o9l2o4l1o5l22o4l1o9l1o3l1o23l25o7l11o5"
    "l24o1l6o17l42o58l54o3l1o18l1o7l10o4n10o1l16o4l8o2l2o2l22o1l7o1l1o3l4o3l1o16l1o13l2o1l3o4n10l2"
    "o2n6o2l1o8l6o4l2o2l22o1l7o1l2o1l2o1l2o31l4o1l1o7n10o2l3o16l9o1l3o1l22o1l7o1l2o1l5o3l1o18l1o15"
    "l2o4n10o9l1o11l8o2l2o2l22o1l7o1l2o1l5o3l1o30l2o1l3o4n10o1l1n6o11l1o1l6o3l3o1l4o3l2o1l1o1l2o3l2"
    "o3l3o3l12o22l1o21n13o18l8o1l3o1l23o1l16o3l1o26l3o2l1o2l2o4n10o8n7o1l1o4l8o1l3o1l23o1l10o1l5o3"
    "l1o31l2o1l2o4n10o1l2o17l9o1l3o1l41o2l1o16l1o5l3o1n7l3o4n19o1l6o5l18o3l24o1l9o1l1o2l7o31n10o17"
    "l48o1l2o12l7o9n10o39l2o1l1o1l5o1l24o1l1o1l10o1l2o9l1o2l5o1l1o9n10o2l4o32l1o31n20o12l8o1l36o27"
    "l5o115l43o20l1n10o6l6o4l4o3l1o3l2o7l3o4l13o12l1o1n10o6l38o1l1o5l1o2l43o1l333o1l4o2l7o1l1o1l4o2"
    "l41o1l4o2l33o1l4o2l7o1l1o1l4o2l15o1l57o1l4o2l67o14n20o3l16o16l86o2l6o3l620o2l17w1l26o5l75o3n3"
    "l8o7l18o13l19o14l18o14l13o1l3o15l52o35l1o4l1o3n10o6n10o22n10o6l89o7l5o2l34o1l1o5l70o10l31o39"
    "n10l30o2l5o11l44o4l26o6n11o37l23o9l53o43n10o6n10o13l1o93l47o17l8o3n10o41l30o13l2n10l44o26l36"
    "o28n10o3l3n10l36o2l11o5l43o2l3o41l4o1l6o1l2o3l1o5l192o64l278o2l6o2l38o2l6o2l8o1l1o1l1o1l1o1l31"
    "o2l53o1l7o1l1o3l3o1l7o3l4o2l6o4l13o5l3o1l7o3w11o29w2o5w1o47w1o16n1l1o2n6o5l1n10o6l13o101l1o4l1"
    "o2l10o1l1o3l5o6l1o1l1o1l1o1l4o1l11o2l4o5l5o4l1o1n51l2n5o726n60o78n22o630n30o1132l229o6l4o3l2o9"
    "n1o2l38o1l1o5l1o2l56o7l1o16l23o9l7o1l7o1l7o1l7o1l7o1l7o1l7o1l7o80l1o464w1o4l2n1o25n9o7l5o2n3l2"
    "o4l86o6l3o1l90o1l4o5l43o1l94o3n4o10l32o48l16o32n10o30n8o1n15o32n10o39n15o320l6592o64l22157o67"
    "l46o2l269o3l16n10l2o20l47o16l31o2l70n10o39l9o2l103o2l67o2l2o1l1o1l8o21l16o1l3o1l4o1l23o13n6o10"
    "l52o14l50o28n10o24l6o3l1o1l2o1n10l28o10l23o25l29o7l47o28l1n10o6l5o1l10n10l5o1l41o23l3o1l8o4n10"
    "o6l23o3l1o3l50o1l1o3l2o2l5o2l1o1l1o24l3o2l11o7l3o12l6o2l6o2l6o9l7o1l7o1l43o1l14o6l115o13n10o6"
    "l11172o12l23o4l49o8452l366o2l106o38l7o12l5o5l1o1l10o1l13o1l5o1l1o1l2o1l2o1l108o33l363o18l64o2"
    "l54o40l12o116l5o1l135o19n10o7l26o6l26o11l89o3l6o2l6o2l6o2l3o35l12o1l26o1l19o1l2o1l15o2l14o34"
    "l123o12n45o12n57o17n2o244l29o3l49o16n27o4l32n4o9l20n1l8n1o5l38o10l30o2l36o4l8o1n5o42l158o2n10"
    "o6l36o4l36o4l40o8l52o12l11o1l15o1l7o1l2o1l11o1l15o1l7o1l2o3l52o12l311o9l22o10l8o24l6o1l42o1l9"
    "o69l6o2l1o1l44o1l2o3l1o2l23o2n8l23o2n7l31o8n9o48l19o1l2o5n5l22n6o4l26o70l56o4n2l2n16o2n46l1o15"
    "l4o1l3o1l29o10n9o23l29n2o1l29n3o32l8o1l28o6n5o16l54o10l22o2n8l19o5n8l18o23n7o80l73o55l51o13l51"
    "o7n6l36o12n10o6n10l28o9l23o218n31o1l42o6l2o16l3o59l29n10l1o8l22o11n4o27l18o46l21n7o20l23o12l53"
    "o26n30o1l2o2l1o13l45o32l25o7n10o9l36o15n10o4l1o2l1o8l35o3l1o12l48o14l4o11n10l1o1l1o4n20o11l18"
    "o1l25o19l2o63l7o1l1o1l4o1l15o1l10o7l47o17n10o11l8o2l2o2l22o1l7o1l2o1l5o3l1o18l1o12l5o30l10o1l1"
    "o2l1o1l38o1l1o25l1o1l1o44l53o18l4o5n10o5l3o30l48o20l2o1l1o8n10o166l47o41l4o36l48o20l1o11n10o38"
    "l43o13l1o7n10o6n20o28l27o21n12o4l7o185l44o116l64n19o12l8o2l1o2l8o1l2o1l24o15l1o1l1o14n10o70l8"
    "o2l39o16l1o1l1o28l1o10l40o7l1o21l1o11l46o19l1o18l73o199l33o15n10o6l9o1l37o17l1o15n29o5l30o112"
    "l7o1l2o1l38o21l1o9n10o6l6o1l2o1l32o14l1o7n10o310l19o15l1o1l13o1l34o28n10o86l1o15n21o43l922o102"
    "n111o17l196o2636l97o15l1072o17l6o25l3995o5l583o6841l30o18n10o1734l569o7l31o1n10o6l79o1n10o6l30"
    "o18l48o16l4o12n10o1n7o1l21o5l19o432l45o3n10o198l64n23o105l75o5l1o66l13o64l2o1l1o28l6136o8l1238"
    "o41l10o8935l4o1l7o1l2o1l291o15l1o29l3o2l1o14l4o8l396o2308l107o5l13o3l9o7l10o4182n10o1478n20o12"
    "n20o108n25o135l85o1l71o1l2o2l1o2l2o2l4o1l12o1l1o1l7o1l65o1l4o2l8o1l7o1l28o1l4o1l5o1l1o3l7o1"
    "l340o2l25o1l25o1l31o1l25o1l31o1l25o1l31o1l25o1l31o1l25o1l8o2n50o1792l31o6l6o261l62o146l45o10l7"
    "o2n10o4l1o321l30o18l44o4n10o470l28o4n10o214l30o2l1n10o485l7o1l4o1l2o1l15o1l197o2n9o48l68o7l1o4"
    "n10o791n59o1n3o1n4o76n45o1n15o194l4o1l27o1l2o1l1o2l1o1l10o1l4o1l1o1l1o6l1o4l1o1l1o1l1o1l3o1l2"
    "o1l1o2l1o1l1o1l1o1l1o1l1o1l2o1l1o2l4o1l7o1l4o1l4o1l1o1l10o1l17o5l3o1l5o1l17o580n13o2787n10"
    "o1030l42720o32l4154o6l222o2l5762o14l7473o15l622o2466l542o1506l4939o5l4192";

/* One byte per code point: a table of 201 KiB, of which a text touches a few cache lines. */
G2ZT_PRIVATE g2z_status g2z__classes_create(g2z_services *services, unsigned char **out) {
  void *memory;
  *out = NULL;
  G2ZT_TRY(g2zt_alloc(services, G2Z__CLASSIFIED, 1, &memory));
  *out = (unsigned char *)memory;
  size_t at = 0;
  for (const char *run = g2z__class_runs; *run;) {
    int letter = *run++, class_of_run = letter == 'l'   ? G2Z__LETTER
                                        : letter == 'n' ? G2Z__NUMBER
                                        : letter == 'w' ? G2Z__WHITE
                                                        : G2Z__OTHER;
    size_t count = 0;
    while (*run >= '0' && *run <= '9') count = count * 10 + (size_t)(*run++ - '0');
    memset(*out + at, class_of_run, count);
    at += count;
  }
  G2Z_ASSERT(at == G2Z__CLASSIFIED);
  return G2Z_OK;
}

/* The length of the character at p, or, where UTF-8 is invalid, minus the length of what one U+FFFD
 * replaces: the longest beginning of a character, at least one byte (Unicode's "maximal subpart",
 * as Python and Rust have it). */
G2ZT_PRIVATE int g2z__utf8_step(const unsigned char *p, const unsigned char *end) {
  unsigned lead = *p;
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return -1;
  int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  /* Only the second byte depends on the first: no overlong forms, surrogates, or > U+10FFFF. */
  unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int i = 1; i < length; i++) {
    if (p + i == end || p[i] < low || p[i] > high) return -i;
    low = 0x80;
    high = 0xBF;
  }
  return length;
}

/* The bytes up to the first that is not valid UTF-8. */
G2ZT_PRIVATE size_t g2z__utf8_valid(const unsigned char *text, size_t bytes) {
  const unsigned char *p = text, *end = text + bytes;
  while (p < end) {
    uint64_t eights[4], high = 0;
    for (; end - p >= 32; p += 32) {
      memcpy(eights, p, sizeof eights);
      if ((eights[0] | eights[1] | eights[2] | eights[3]) & 0x8080808080808080u) break;
    }
    for (; end - p >= 8; p += 8) {
      memcpy(eights, p, 8);
      if ((high = eights[0] & 0x8080808080808080u) != 0) break;
    }
    if (high) p += __builtin_ctzll(high) / 8;
    else while (p < end && *p < 0x80) p++;
    while (p < end && *p >= 0x80) { /* most characters in two tests; a step knows the rest */
      int step = end - p < 3                                              ? 0
                 : p[0] >= 0xC2 && p[0] < 0xE0 && (p[1] & 0xC0) == 0x80   ? 2
                 : p[0] > 0xE0 && p[0] < 0xF0 && p[0] != 0xED &&
                         (p[1] & 0xC0) == 0x80 && (p[2] & 0xC0) == 0x80   ? 3
                                                                          : 0;
      if (step == 0) step = g2z__utf8_step(p, end);
      if (step < 0) return (size_t)(p - text);
      p += step;
    }
  }
  return (size_t)(p - text);
}

/* Copies text with U+FFFD for what is invalid; returns the length. out NULL: only the length. */
G2ZT_PRIVATE size_t g2z__utf8_repair(const unsigned char *text, size_t bytes, unsigned char *out) {
  size_t made = 0;
  for (size_t at = 0; at < bytes;) {
    int step = g2z__utf8_step(text + at, text + bytes);
    size_t count = step < 0 ? 3 : (size_t)step;
    if (out) memcpy(out + made, step < 0 ? (const void *)"\xEF\xBF\xBD" : text + at, count);
    made += count;
    at += (size_t)(step < 0 ? -step : step);
  }
  return made;
}

typedef struct g2z__repair { /* room for texts that need one */
  unsigned char *bytes;
  size_t capacity;
} g2z__repair;

/* Points *text at valid UTF-8: itself, or a repaired copy in `repair`. strict: fails instead. */
G2ZT_PRIVATE g2z_status g2z__valid_text(g2z_services *services,
                                        g2z__repair *repair, int strict,
                                        const unsigned char **text, size_t *bytes) {
  size_t valid = g2z__utf8_valid(*text, *bytes);
  if (valid == *bytes) return G2Z_OK;
  if (strict)
    return g2z_fail(services, G2Z_FORMAT,
                     "invalid UTF-8: byte 0x%02x at offset %zu; convert the text to UTF-8, or "
                     "encode without G2Z_ENCODE_STRICT (--strict) to have it replaced by U+FFFD",
                     (*text)[valid], valid);
  size_t repaired = g2z__utf8_repair(*text, *bytes, NULL);
  G2Z__GROW(services, unsigned char, repair->bytes, repair->capacity, 0, repaired);
  g2z__utf8_repair(*text, *bytes, repair->bytes);
  *text = repair->bytes;
  *bytes = repaired;
  return G2Z_OK;
}

/* The class of the character at p, which is valid; *next is the one behind it. */
static inline int g2z__class_at(const unsigned char *classes, const unsigned char *p,
                                const unsigned char **next) {
  uint32_t c = p[0];
  if (c < 0x80) {
    *next = p + 1;
  } else if (c < 0xE0) {
    c = (c & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    *next = p + 2;
  } else if (c < 0xF0) {
    c = (c & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    *next = p + 3;
  } else {
    c = (c & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
    *next = p + 4;
  }
  return c < G2Z__CLASSIFIED ? classes[c] : (int)G2Z__OTHER;
}

/* ----- pieces: 64 bytes at a time ----------------------------------------
 * This is GPT-2's pattern,
 *   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * as algebra on bit masks. Bit i of a mask says something of byte i of a block of 64; every byte of
 * a character has the character's class. Characters beyond ASCII are looked up one by
 * one, and g2z__block_starts finds where pieces start. What lies behind the text's end counts as white. */

#define G2Z__BLOCK 64
#define G2Z__SCAN_BLOCKS 64 /* a scan goes 4 KiB at a time: its masks and starts stay in L1 */
#define G2Z__SCAN_STARTS (G2Z__SCAN_BLOCKS * G2Z__BLOCK + 8) /* they are stored in eights */

typedef struct g2z__masks {
  uint64_t letter, number, white;
  uint64_t space;           /* U+0020 */
  uint64_t quote;           /* the apostrophe, U+0027 */
  uint64_t white1;          /* white space of one byte; the first bytes of it in two and three */
  uint64_t white2, white3;
  uint64_t lead;            /* the first byte of a character beyond ASCII */
} g2z__masks;

/* Eight bytes at a time, in any C: bit 7 of each byte of a word answers, and a product gathers the
 * eight answers. A comparison of 7-bit values never carries into the next byte. */
G2ZT_PRIVATE void g2z__classify(const unsigned char *text, size_t blocks, g2z__masks *out) {
  const uint64_t ones = 0x0101010101010101u, low = 0x7F7F7F7F7F7F7F7Fu;
#define G2Z__FROM(x, least) ((x) + ones * (0x80 - (least)))  /* bit 7: the byte is >= least */
#define G2Z__GATHER(x) (((x) >> 7 & ones) * 0x0102040810204080u >> 56)
  for (size_t block = 0; block < blocks; block++) {
    g2z__masks m;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < G2Z__BLOCK; i += 8) {
      uint64_t x, eight;
      memcpy(&eight, text + block * G2Z__BLOCK + i, 8);
      x = eight & low;
      uint64_t ascii = ~eight, folded = x | ones * 0x20;
      uint64_t letter = G2Z__FROM(folded, 'a') & ~G2Z__FROM(folded, 'z' + 1) & ascii;
      uint64_t number = G2Z__FROM(x, '0') & ~G2Z__FROM(x, '9' + 1) & ascii;
      uint64_t space = G2Z__FROM(x, ' ') & ~G2Z__FROM(x, ' ' + 1) & ascii;
      uint64_t control = G2Z__FROM(x, 9) & ~G2Z__FROM(x, 13 + 1) & ascii;
      uint64_t quote = G2Z__FROM(x, '\'') & ~G2Z__FROM(x, '\'' + 1) & ascii;
      m.letter |= G2Z__GATHER(letter) << i;
      m.number |= G2Z__GATHER(number) << i;
      m.space |= G2Z__GATHER(space) << i;
      m.white1 |= G2Z__GATHER(space | control) << i;
      m.quote |= G2Z__GATHER(quote) << i;
      m.lead |= G2Z__GATHER(eight & eight << 1) << i;
    }
    m.white = m.white1;
    out[block] = m;
  }
#undef G2Z__FROM
#undef G2Z__GATHER
}

typedef struct g2z__scan {           /* where a scan of a text is; the text is valid UTF-8 */
  const unsigned char *text, *classes;
  size_t bytes;
  size_t block, blocks;        /* masks[0] belongs to `block`; there are `blocks` with text */
  int spill, spill_class;      /* bytes of the last character that lie in the next block */
  uint64_t clear, set;         /* what a contraction changes in the next block's starts */
  g2z__masks before;           /* of the block before masks[0]; zero at the beginning */
  g2z__masks masks[G2Z__SCAN_BLOCKS + 1];
} g2z__scan;

/* Adds what is beyond ASCII to the masks of the block at `base`. */
G2ZT_PRIVATE void g2z__block_beyond_ascii(g2z__scan *scan, size_t base, g2z__masks *m) {
  uint64_t of_class[4] = {0, 0, 0, 0};
  if (scan->spill) of_class[scan->spill_class] |= ((uint64_t)1 << scan->spill) - 1;
  scan->spill = 0;
  for (uint64_t leads = m->lead; leads; leads &= leads - 1) {
    int i = __builtin_ctzll(leads);
    const unsigned char *next, *p = scan->text + base + i;
    int kind = g2z__class_at(scan->classes, p, &next), length = (int)(next - p);
    of_class[kind] |= (((uint64_t)1 << length) - 1) << i;
    if (i + length > G2Z__BLOCK) {
      scan->spill = i + length - G2Z__BLOCK;
      scan->spill_class = kind;
    }
    if (kind == G2Z__WHITE) *(length == 2 ? &m->white2 : &m->white3) |= (uint64_t)1 << i;
  }
  m->letter |= of_class[G2Z__LETTER];
  m->number |= of_class[G2Z__NUMBER];
  m->white |= of_class[G2Z__WHITE];
}

/* Makes the masks of `count` blocks from `block` on. */
G2ZT_PRIVATE void g2z__scan_masks(g2z__scan *scan, size_t block, g2z__masks *out, size_t count) {
  size_t whole = scan->bytes / G2Z__BLOCK, rest = scan->bytes % G2Z__BLOCK, ready = 0;
  if (block < whole) {
    ready = whole - block < count ? whole - block : count;
    g2z__classify(scan->text + block * G2Z__BLOCK, ready, out);
  }
  for (; ready < count; ready++) { /* the text's last bytes, and what follows them */
    unsigned char padded[G2Z__BLOCK];
    memset(padded, ' ', sizeof padded);
    if (block + ready == whole) memcpy(padded, scan->text + whole * G2Z__BLOCK, rest);
    g2z__classify(padded, 1, out + ready);
  }
  for (size_t i = 0; i < count; i++)
    if (out[i].lead || scan->spill)
      g2z__block_beyond_ascii(scan, (block + i) * G2Z__BLOCK, &out[i]);
}

G2ZT_PRIVATE void g2z__scan_open(g2z__scan *scan, const unsigned char *classes,
                                 const unsigned char *text, size_t bytes) {
  scan->text = text;
  scan->classes = classes;
  scan->bytes = bytes;
  scan->block = 0;
  scan->blocks = (bytes + G2Z__BLOCK - 1) / G2Z__BLOCK;
  scan->spill = 0;
  scan->clear = scan->set = 0;
  memset(&scan->before, 0, sizeof scan->before);
  g2z__scan_masks(scan, 0, scan->masks, 1);
}

/* The bytes of a contraction behind the apostrophe at p; 0: none. */
G2ZT_PRIVATE int g2z__contraction(const unsigned char *p, const unsigned char *end) {
  int one = end - p > 1 ? p[1] : 0, two = end - p > 2 ? p[2] : 0;
  if (one == 's' || one == 'd' || one == 'm' || one == 't') return 2;
  return (one == 'l' && two == 'l') || ((one == 'v' || one == 'r') && two == 'e') ? 3 : 0;
}

/* A contraction starts where a piece starts with an apostrophe, and the next piece right behind it:
 * the letters in between start none. */
G2ZT_PRIVATE uint64_t g2z__block_contractions(g2z__scan *scan, size_t base, uint64_t quotes,
                                              uint64_t starts) {
  const unsigned char *end = scan->text + scan->bytes;
  uint64_t clear = scan->clear, set = scan->set;
  scan->clear = scan->set = 0;
  for (; quotes; quotes &= quotes - 1) {
    int i = __builtin_ctzll(quotes), next = i + 1;
    int behind = i + g2z__contraction(scan->text + base + i, end);
    if (behind == i) continue;
    *(next < G2Z__BLOCK ? &clear : &scan->clear) |= (uint64_t)1 << next % G2Z__BLOCK;
    *(behind < G2Z__BLOCK ? &set : &scan->set) |= (uint64_t)1 << behind % G2Z__BLOCK;
  }
  return (starts & ~clear) | set;
}

/* Where pieces start in the block of masks m: after p, before n. */
static inline uint64_t g2z__block_starts(g2z__scan *scan, size_t base, const g2z__masks *p,
                                         const g2z__masks *m, const g2z__masks *n) {
#define G2Z__BEFORE(mask) (m->mask << 1 | p->mask >> 63)            /* of the byte before */
#define G2Z__AHEAD(mask, by) (m->mask >> (by) | n->mask << (64 - (by)))
  uint64_t any = m->letter | m->number | m->white, letter = G2Z__BEFORE(letter);
  uint64_t number = G2Z__BEFORE(number), white = G2Z__BEFORE(white), space = G2Z__BEFORE(space);
  uint64_t other = ~(letter | number | white);
  if (base == 0) other &= ~(uint64_t)1; /* before the text there is nothing */
  /* A run of one class, unless the space before it has taken it; */
  uint64_t runs = ((m->letter & ~letter) | (m->number & ~number) | (~any & ~other)) & ~space;
  /* a run of white space; and the last of it, if something follows. */
  runs |= m->white & ~white;
  runs |= (m->white1 & ~G2Z__AHEAD(white, 1)) | (m->white2 & ~G2Z__AHEAD(white, 2)) |
          (m->white3 & ~G2Z__AHEAD(white, 3));
#undef G2Z__BEFORE
#undef G2Z__AHEAD
  uint64_t quotes = m->quote & runs;
  if (quotes | scan->clear | scan->set) runs = g2z__block_contractions(scan, base, quotes, runs);
  return runs;
}

/* Stores where the pieces of the next blocks start, whose masks are ready; returns how many do.
 * Eight are stored at a time, so that no branch asks for less. */
static size_t g2z__starts(g2z__scan *scan, size_t blocks, size_t *starts) {
  size_t count = 0;
  for (size_t i = 0; i < blocks; i++) {
    const g2z__masks *m = &scan->masks[i];
    size_t base = (scan->block + i) * G2Z__BLOCK;
    uint64_t bits = g2z__block_starts(scan, base, i ? m - 1 : &scan->before, m, m + 1);
    size_t some = (size_t)__builtin_popcountll(bits), *out = starts + count;
    for (size_t k = 0; k < some; k += 8)
      for (size_t n = 0; n < 8; n++, bits &= bits - 1)
        out[k + n] = base + (size_t)__builtin_ctzll(bits | (uint64_t)1 << 63);
    count += some;
  }
  return count;
}

/* Stores where the pieces of the next blocks start, and returns how many do; the end of the scan is
 * where scan->block reaches scan->blocks. `starts` has room for G2Z__SCAN_STARTS. */
G2ZT_PRIVATE size_t g2z__scan_next(g2z__scan *scan, size_t *starts) {
  size_t blocks = scan->blocks - scan->block;
  if (blocks > G2Z__SCAN_BLOCKS) blocks = G2Z__SCAN_BLOCKS;
  g2z__masks *masks = scan->masks;
  g2z__scan_masks(scan, scan->block + 1, masks + 1, blocks);
  size_t count = g2z__starts(scan, blocks, starts);
  if (blocks) scan->before = masks[blocks - 1];
  masks[0] = masks[blocks];
  scan->block += blocks;
  /* A contraction may end the text, and white space behind the text starts a piece there. */
  while (count && starts[count - 1] >= scan->bytes) count--;
  return count;
}

/* The bytes of the White_Space character at p; 0: another character, or an incomplete one. It needs
 * no table, and no valid text around it. */
G2ZT_PRIVATE size_t g2z__white_bytes(const unsigned char *p, const unsigned char *end) {
  if (p == end) return 0;
  if (*p == ' ' || (*p >= 0x09 && *p <= 0x0D)) return 1;
  if (end - p >= 2 && p[0] == 0xC2) return p[1] == 0x85 || p[1] == 0xA0 ? 2 : 0;
  if (end - p < 3 || p[0] < 0xE1 || p[0] > 0xE3) return 0;
  uint32_t c = (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
  int valid = (p[1] & 0xC0) == 0x80 && (p[2] & 0xC0) == 0x80;
  return valid && (c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
                   c == 0x202F || c == 0x205F || c == 0x3000)
             ? 3
             : 0;
}

G2Z_API size_t g2z_encode_cut(const void *text, size_t bytes) {
  const unsigned char *begin = (const unsigned char *)text, *end = begin + bytes;
  for (size_t p = bytes; p-- > 1;) {
    if (!g2z__white_bytes(begin + p, end)) continue;
    int white_before = 0; /* these bytes start characters, whatever stands around them */
    for (size_t back = 1; back <= 3 && back <= p; back++)
      white_before |= g2z__white_bytes(begin + p - back, begin + p) == back;
    if (!white_before) return p;
  }
  return 0;
}

/* ----- words and pairs: the two hash tables ------------------------------ */

#define G2Z__WORDS_SLOTS 131072 /* at first: as many as GPT-2's vocabulary takes */

typedef struct g2z__words { /* a set of byte strings, numbered as they come */
  unsigned char *bytes;     /* one after the other */
  size_t bytes_capacity;
  uint32_t *starts;         /* [count + 1] */
  size_t starts_capacity;
  uint32_t *table;          /* number + 1; 0: empty */
  size_t slots;             /* a power of two, at least twice count */
  size_t count;
} g2z__words;

G2ZT_PRIVATE void g2z__words_free(g2z_services *services, g2z__words *words) {
  g2z_release(services, words->bytes);
  g2z_release(services, words->starts);
  g2z_release(services, words->table);
}

static inline size_t g2z__word_bytes(const g2z__words *words, size_t word) {
  return words->starts[word + 1] - words->starts[word];
}

/* The first place of a word in the table. */
static inline size_t g2z__words_home(const g2z__words *words, const unsigned char *bytes,
                                     size_t count) {
  const uint64_t odd = 0x9E3779B97F4A7C15u;
  uint64_t hash = count * odd, eight;
  const unsigned char *p = bytes;
  for (size_t left = count; left; p += left < 8 ? left : 8, left -= left < 8 ? left : 8) {
    eight = 0;
    memcpy(&eight, p, left < 8 ? left : 8);
    hash = (hash ^ eight) * odd;
    hash ^= hash >> 29;
  }
  return (size_t)(hash ^ hash >> 32) & (words->slots - 1);
}

G2ZT_PRIVATE size_t g2z__words_slot(const g2z__words *words, const unsigned char *bytes,
                                    size_t count) {
  size_t slot = g2z__words_home(words, bytes, count);
  for (; words->table[slot]; slot = (slot + 1) & (words->slots - 1)) {
    size_t word = words->table[slot] - 1;
    if (g2z__word_bytes(words, word) == count &&
        memcmp(words->bytes + words->starts[word], bytes, count) == 0)
      break;
  }
  return slot;
}

/* The number of a word, or -1. */
G2ZT_PRIVATE int64_t g2z__words_find(const g2z__words *words, const unsigned char *bytes,
                                     size_t count) {
  return words->slots ? (int64_t)words->table[g2z__words_slot(words, bytes, count)] - 1 : -1;
}

G2ZT_PRIVATE g2z_status g2z__words_widen(g2z_services *services, g2z__words *words) {
  size_t slots = words->slots ? words->slots * 2 : G2Z__WORDS_SLOTS;
  void *memory;
  G2ZT_TRY(g2zt_alloc(services, slots, sizeof *words->table, &memory));
  g2z_release(services, words->table);
  words->table = (uint32_t *)memory;
  words->slots = slots;
  for (size_t word = 0; word < words->count; word++) { /* no two are equal: none is compared */
    size_t slot = g2z__words_home(words, words->bytes + words->starts[word],
                                  g2z__word_bytes(words, word));
    while (words->table[slot]) slot = (slot + 1) & (slots - 1);
    words->table[slot] = (uint32_t)word + 1;
  }
  return G2Z_OK;
}

/* The number of a word, which is added when it is new: then it is the count before. */
G2ZT_PRIVATE g2z_status g2z__words_add(g2z_services *services, g2z__words *words,
                                       const unsigned char *bytes, size_t count, size_t *word) {
  size_t used = words->count ? words->starts[words->count] : 0, slot;
  if (words->count * 2 >= words->slots) G2ZT_TRY(g2z__words_widen(services, words));
  slot = g2z__words_slot(words, bytes, count);
  *word = words->table[slot] ? words->table[slot] - 1 : words->count;
  if (words->table[slot]) return G2Z_OK;
  /* 2^32 - 2 leaves room for the barriers of g2z__site lists, which also count in 32 bits. */
  if (used + words->count + count >= UINT32_MAX - 2)
    return g2z_fail(services, G2Z_UNSUPPORTED,
                     "more than 4 GiB of different words; train on a part of the text");
  G2Z__GROW(services, unsigned char, words->bytes, words->bytes_capacity, used, used + count);
  G2Z__GROW(services, uint32_t, words->starts, words->starts_capacity,
            words->count ? words->count + 1 : 0, words->count + 2);
  memcpy(words->bytes + used, bytes, count);
  words->starts[words->count] = (uint32_t)used;
  words->starts[words->count + 1] = (uint32_t)(used + count);
  words->table[slot] = (uint32_t)++words->count;
  return G2Z_OK;
}

typedef struct g2z__pair { /* two neighbours, and what the table's owner knows of them */
  int32_t left, right;
  uint32_t value;          /* 0: an empty slot */
} g2z__pair;

typedef struct g2z__pairs {
  g2z__pair *slots;
  size_t count, capacity;  /* a power of two, at least twice count; 0 before the first */
} g2z__pairs;

static inline g2z__pair *g2z__pairs_slot(const g2z__pairs *pairs, int32_t left, int32_t right) {
  uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
  size_t mask = pairs->capacity - 1, at = (size_t)(hash ^ hash >> 32) & mask;
  while (pairs->slots[at].value &&
         (pairs->slots[at].left != left || pairs->slots[at].right != right))
    at = (at + 1) & mask;
  return &pairs->slots[at];
}

/* The value of a pair; 0: not in the table. */
static inline uint32_t g2z__pairs_find(const g2z__pairs *pairs, int32_t left, int32_t right) {
  return pairs->capacity ? g2z__pairs_slot(pairs, left, right)->value : 0;
}

/* Adds a pair that is not in the table. */
G2ZT_PRIVATE g2z_status g2z__pairs_add(g2z_services *services, g2z__pairs *pairs, int32_t left,
                                       int32_t right, uint32_t value) {
  if (pairs->count * 2 >= pairs->capacity) {
    g2z__pairs larger = *pairs;
    void *memory;
    larger.capacity = pairs->capacity ? pairs->capacity * 2 : 1024;
    G2ZT_TRY(g2zt_alloc(services, larger.capacity, sizeof *larger.slots, &memory));
    larger.slots = (g2z__pair *)memory;
    for (size_t i = 0; i < pairs->capacity; i++)
      if (pairs->slots[i].value)
        *g2z__pairs_slot(&larger, pairs->slots[i].left, pairs->slots[i].right) = pairs->slots[i];
    g2z_release(services, pairs->slots);
    *pairs = larger;
  }
  g2z__pair *slot = g2z__pairs_slot(pairs, left, right);
  slot->left = left;
  slot->right = right;
  slot->value = value;
  pairs->count++;
  return G2Z_OK;
}

/* Merges: what two ids make. A slot holds left << 40 | right << 20 | id, since ids have at most 20
 * bits; 0 is empty. Most pairs that are asked for make nothing; the bits say so, in 128 KiB, where
 * the slots of GPT-2's merges take 512 KiB of a second cache that often has 1 MiB. */
#define G2Z__JOIN_BITS 20
#define G2Z__JOINS_CAPACITY 65536 /* at first: as many as GPT-2's vocabulary takes */
typedef struct g2z__joins {
  uint64_t maybe[(1 << G2Z__JOIN_BITS) / 64]; /* a bit per hash of pairs: 0 for those of none */
  uint64_t *slots;
  size_t count, capacity; /* a power of two, at least 8/7 of count */
} g2z__joins;

static_assert(G2Z__VOCAB_MAX <= 1 << 20, "an id must fit into 20 bits: three share 64");

static inline size_t g2z__joins_slot(const g2z__joins *joins, uint64_t pair) {
  uint64_t hash = pair * 0x9E3779B97F4A7C15u;
  size_t mask = joins->capacity - 1, at = (size_t)(hash ^ hash >> 32) & mask;
  while (joins->slots[at] && joins->slots[at] >> 20 != pair) at = (at + 1) & mask;
  return at;
}

static inline size_t g2z__joins_bit(uint64_t pair) {
  return (size_t)(pair * 0x9E3779B97F4A7C15u >> (64 - G2Z__JOIN_BITS));
}

/* The id that two make; 0: they make none. */
static inline uint32_t g2z__joins_find(const g2z__joins *joins, uint32_t left, uint32_t right) {
  uint64_t pair = (uint64_t)left << 20 | right;
  size_t bit = g2z__joins_bit(pair);
  if (!(joins->maybe[bit / 64] >> bit % 64 & 1)) return 0;
  return (uint32_t)(joins->slots[g2z__joins_slot(joins, pair)] & 0xFFFFF);
}

/* Adds a pair that is not in the table. */
G2ZT_PRIVATE g2z_status g2z__joins_add(g2z_services *services, g2z__joins *joins, uint32_t left,
                                       uint32_t right, uint32_t id) {
  if (joins->count * 8 >= joins->capacity * 7) {
    uint64_t *old = joins->slots;
    size_t count = joins->capacity;
    void *memory;
    G2ZT_TRY(g2zt_alloc(services, count * 2, sizeof *old, &memory));
    joins->slots = (uint64_t *)memory;
    joins->capacity = count * 2;
    for (size_t i = 0; i < count; i++)
      if (old[i]) joins->slots[g2z__joins_slot(joins, old[i] >> 20)] = old[i];
    g2z_release(services, old);
  }
  uint64_t pair = (uint64_t)left << 20 | right;
  size_t bit = g2z__joins_bit(pair);
  joins->maybe[bit / 64] |= (uint64_t)1 << bit % 64;
  joins->slots[g2z__joins_slot(joins, pair)] = pair << 20 | id;
  joins->count++;
  return G2Z_OK;
}

/* ----- the vocabulary ---------------------------------------------------- */

struct g2z_tokenizer {
  g2z_services *services;
  g2z__words tokens;        /* all but <|endoftext|>, in the order of their ids */
  g2z__joins joins;
  g2z__pair *merges;        /* [tokens.count - 256]: the same in order */
  size_t merges_capacity;
  uint32_t *byte_pairs;     /* [65536] the id of two bytes, first << 8 | second; 0: none */
  int32_t byte_ids[256];
  unsigned char *classes;   /* [G2Z__CLASSIFIED] */
};

/* GPT-2's order of the bytes: those that print in Latin-1 first, and then the other 68. */
G2ZT_PRIVATE int g2z__byte_of_id(int id) {
  if (id < 94) return id + 33;         /* !..~ */
  if (id < 106) return id - 94 + 161;  /* inverted exclamation mark..not sign */
  if (id < 188) return id - 106 + 174; /* registered sign..y with diaeresis */
  if (id < 221) return id - 188;       /* controls and the space */
  return id < 255 ? id - 221 + 127 : 173;
}

/* In files a byte stands as a character that can be seen: itself when it prints, else U+0100 +
 * its place among the other 68. Writes its UTF-8, returns the length. */
G2ZT_PRIVATE size_t g2z__byte_put(const g2z_tokenizer *tokenizer, unsigned char byte, char *out) {
  int id = tokenizer->byte_ids[byte], c = id < 188 ? byte : id - 188 + 256;
  if (c < 0x80) {
    out[0] = (char)c;
    return 1;
  }
  out[0] = (char)(0xC0 | c >> 6);
  out[1] = (char)(0x80 | (c & 0x3F));
  return 2;
}

/* A token as files show it, NUL behind it. */
G2ZT_PRIVATE void g2z__token_put(const g2z_tokenizer *tokenizer, int id,
                                 char out[2 * G2Z__TOKEN_BYTES + 1]) {
  size_t bytes, length = 0;
  const unsigned char *token = g2z_tokenizer_token(tokenizer, id, &bytes);
  for (size_t i = 0; i < bytes; i++)
    length += g2z__byte_put(tokenizer, token[i], out + length);
  out[length] = 0;
}

/* The inverse: the bytes that `count` bytes of UTF-8 in a file stand for; 0 when they are not such
 * a text, or longer than a token may be. */
G2ZT_PRIVATE size_t g2z__token_get(const g2z_tokenizer *tokenizer, const unsigned char *text,
                                   size_t count, unsigned char out[G2Z__TOKEN_BYTES]) {
  size_t length = 0;
  for (size_t at = 0; at < count; length++) {
    int step = g2z__utf8_step(text + at, text + count);
    if (step < 1 || step > 2 || length == G2Z__TOKEN_BYTES) return 0;
    int c = step == 1 ? text[at] : (text[at] & 0x1F) << 6 | (text[at + 1] & 0x3F);
    if (c < 256 ? tokenizer->byte_ids[c] >= 188 : c >= 256 + 68) return 0;
    out[length] = (unsigned char)(c < 256 ? c : g2z__byte_of_id(188 + c - 256));
    at += (size_t)step;
  }
  return length;
}

/* The byte-level vocabulary, to which merges may be added. */
G2ZT_PRIVATE g2z_status g2z__tokenizer_new(g2z_services *services, g2z_tokenizer **out) {
  void *memory;
  *out = NULL;
  G2ZT_TRY(g2zt_alloc(services, 1, sizeof **out, &memory));
  g2z_tokenizer *tokenizer = (g2z_tokenizer *)memory;
  tokenizer->services = services;
  g2z_status status = g2z__classes_create(services, &tokenizer->classes);
  if (status == G2Z_OK) status = g2zt_alloc(services, 65536, sizeof(uint32_t), &memory);
  if (status == G2Z_OK) {
    tokenizer->byte_pairs = (uint32_t *)memory;
    status = g2zt_alloc(services, G2Z__JOINS_CAPACITY, sizeof(uint64_t), &memory);
  }
  if (status == G2Z_OK) {
    tokenizer->joins.slots = (uint64_t *)memory;
    tokenizer->joins.capacity = G2Z__JOINS_CAPACITY;
  }
  for (int id = 0; id < 256 && status == G2Z_OK; id++) {
    unsigned char byte = (unsigned char)g2z__byte_of_id(id);
    tokenizer->byte_ids[byte] = id;
    size_t word;
    status = g2z__words_add(services, &tokenizer->tokens, &byte, 1, &word);
  }
  if (status != G2Z_OK) {
    g2z_tokenizer_free(tokenizer);
    return status;
  }
  *out = tokenizer;
  return G2Z_OK;
}

/* The next id is the merge of two that exist. G2Z_FORMAT's sentence is only the reason. */
G2ZT_PRIVATE g2z_status g2z__tokenizer_join(g2z_tokenizer *tokenizer, int32_t left, int32_t right) {
  g2z_services *services = tokenizer->services;
  g2z__words *tokens = &tokenizer->tokens;
  size_t merge = tokens->count - 256, a = g2z__word_bytes(tokens, (size_t)left);
  size_t b = g2z__word_bytes(tokens, (size_t)right);
  unsigned char joined[G2Z__TOKEN_BYTES];
  if (a + b > sizeof joined)
    return g2z_fail(services, G2Z_FORMAT, "a token of %zu bytes; at most %d are supported", a + b,
                     G2Z__TOKEN_BYTES);
  if (tokens->count + 1 >= G2Z__VOCAB_MAX)
    return g2z_fail(services, G2Z_FORMAT, "more than %d tokens", G2Z__VOCAB_MAX);
  memcpy(joined, tokens->bytes + tokens->starts[left], a);
  memcpy(joined + a, tokens->bytes + tokens->starts[right], b);
  G2Z__GROW(services, g2z__pair, tokenizer->merges, tokenizer->merges_capacity, merge, merge + 1);
  size_t id;
  G2ZT_TRY(g2z__words_add(services, tokens, joined, a + b, &id));
  if (id != merge + 256)
    return g2z_fail(services, G2Z_FORMAT, "makes the token that has id %d already", (int)id);
  tokenizer->merges[merge].left = left;
  tokenizer->merges[merge].right = right;
  tokenizer->merges[merge].value = (uint32_t)id;
  G2ZT_TRY(g2z__joins_add(services, &tokenizer->joins, (uint32_t)left, (uint32_t)right,
                          (uint32_t)id));
  if (left < 256 && right < 256)
    tokenizer->byte_pairs[joined[0] << 8 | joined[1]] = (uint32_t)id;
  return G2Z_OK;
}

G2Z_API void g2z_tokenizer_free(g2z_tokenizer *tokenizer) {
  if (!tokenizer) return;
  g2z_services *services = tokenizer->services;
  g2z__words_free(services, &tokenizer->tokens);
  g2z_release(services, tokenizer->joins.slots);
  g2z_release(services, tokenizer->byte_pairs);
  g2z_release(services, tokenizer->merges);
  g2z_release(services, tokenizer->classes);
  g2z_release(services, tokenizer);
}

G2Z_API int g2z_tokenizer_vocab(const g2z_tokenizer *tokenizer) {
  return (int)tokenizer->tokens.count + 1;
}

G2Z_API int g2z_tokenizer_eot(const g2z_tokenizer *tokenizer) {
  return (int)tokenizer->tokens.count;
}

G2Z_API const unsigned char *g2z_tokenizer_token(const g2z_tokenizer *tokenizer, int id,
                                                 size_t *bytes) {
  const g2z__words *tokens = &tokenizer->tokens;
  *bytes = 0;
  if (id < 0 || (size_t)id > tokens->count) return NULL;
  int eot = (size_t)id == tokens->count;
  *bytes = eot ? G2Z__EOT_BYTES : g2z__word_bytes(tokens, (size_t)id);
  return eot ? (const unsigned char *)G2Z__EOT : tokens->bytes + tokens->starts[id];
}

/* ----- merging: one piece of valid text -> ids ---------------------------
 * A piece starts as one symbol for each byte. The merge with the smallest id comes first, the
 * leftmost of equals first: a heap of id << 32 | place hands them out in that order. */

#define G2ZT_PART 1048576 /* longer pieces are merged in parts: 32 bytes of scratch for each byte */

typedef struct g2zt_symbol { /* stands where its first byte does */
  uint32_t id;
  uint32_t joined;           /* what it makes with the next symbol; 0: nothing */
  uint32_t next, previous;   /* places of its neighbours */
} g2zt_symbol;

typedef struct g2zt_merger { /* memory that pieces share, one after the other */
  g2zt_symbol *symbols;
  size_t symbols_capacity;
  uint64_t *heap;
  size_t heap_capacity, waiting;
} g2zt_merger;

/* ----- the cache: pieces that were merged before -------------------------
 * Nearly every piece of a text came before. A word is a cache line: its first half is the key, the
 * second its ids. One that collides with another takes its place. */

#define G2ZT_WORDS_BITS 17
#define G2ZT_WORD_BYTES 31
#define G2ZT_WORD_IDS 7

typedef struct g2zt_key {   /* a piece, zeros behind it; its length is the last byte */
  uint64_t eights[4];
} g2zt_key;

typedef struct g2zt_word {
  g2zt_key key;             /* zero: empty, as no piece has no bytes */
  int32_t ids[G2ZT_WORD_IDS];
  uint32_t count;           /* of ids */
} g2zt_word;

static_assert(sizeof(g2zt_word) == 64, "a word is a cache line");

struct g2z_encoder {
  g2z_services *services;
  const g2z_tokenizer *tokenizer;
  g2z__repair repair;
  void *cache;              /* the block that `words` lie in */
  g2zt_word *words;         /* [1 << G2ZT_WORDS_BITS] */
  uint64_t masks[G2ZT_WORD_BYTES + 1][4]; /* row n keeps the first n bytes of a key */
  g2zt_merger merger;
  g2z__scan scan;
  size_t starts[G2Z__SCAN_STARTS + 2];
};

static void g2zt_heap_push(g2zt_merger *merger, uint64_t merge) {
  size_t hole = merger->waiting++;
  for (; hole && merger->heap[(hole - 1) / 2] > merge; hole = (hole - 1) / 2)
    merger->heap[hole] = merger->heap[(hole - 1) / 2];
  merger->heap[hole] = merge;
}

static uint64_t g2zt_heap_pop(g2zt_merger *merger) {
  uint64_t *heap = merger->heap, first = heap[0], last = heap[--merger->waiting];
  size_t hole = 0, child;
  while ((child = 2 * hole + 1) < merger->waiting) {
    child += child + 1 < merger->waiting && heap[child + 1] < heap[child];
    if (heap[child] >= last) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = last;
  return first;
}

/* Looks up what the symbol at `at` makes with the one at `next`. What waited for it before is stale
 * from here on: g2zt_merge knows by `joined`. No pair comes back once one of the two has changed. */
static void g2zt_meet(const g2z_tokenizer *tokenizer, g2zt_merger *merger, uint32_t at,
                      uint32_t next) {
  g2zt_symbol *symbols = merger->symbols;
  uint32_t id = g2z__joins_find(&tokenizer->joins, symbols[at].id, symbols[next].id);
  symbols[at].joined = id;
  if (id) g2zt_heap_push(merger, (uint64_t)id << 32 | at);
}

/* The first merge from `from` on that has this token on its left; UINT32_MAX: there is none. */
static uint32_t g2zt_merge_of_left(const g2z_tokenizer *tokenizer, uint32_t token, uint32_t from) {
  for (uint32_t id = from < 256 ? 256 : from; id < tokenizer->tokens.count; id++)
    if ((uint32_t)tokenizer->merges[id - 256].left == token) return id;
  return UINT32_MAX;
}

/* Merges the symbols as far as the first `end` bytes tell, and returns how many bytes they are then.
 * open: the piece goes on, and what is right of the last symbol is not known. Merges come in the
 * order of their ids, so the last symbol is what it would be in the whole piece until the turn of
 * one that has it on its left: then it may merge with what is not seen, and is dropped. What is left
 * at the end are ids of the whole piece, up to a place that no merge reaches across. */
static uint32_t g2zt_merge_symbols(const g2z_tokenizer *tokenizer, g2zt_merger *merger,
                                   uint32_t end, int open) {
  g2zt_symbol *symbols = merger->symbols;
  uint32_t last = end - 1, risk = open ? g2zt_merge_of_left(tokenizer, symbols[last].id, 0)
                                       : UINT32_MAX;
  for (;;) {
    uint32_t id = merger->waiting ? (uint32_t)(merger->heap[0] >> 32) : UINT32_MAX;
    if (risk < id) { /* the last symbol goes */
      end = last;
      if (end == 0) return 0;
      last = symbols[last].previous;
      symbols[last].joined = 0;
      symbols[last].next = end;
      risk = g2zt_merge_of_left(tokenizer, symbols[last].id, risk + 1);
      continue;
    }
    if (id == UINT32_MAX) return end;
    uint32_t at = (uint32_t)g2zt_heap_pop(merger), gone = symbols[at].next, next;
    if (symbols[at].joined != id || at >= end) continue; /* stale */
    next = symbols[gone].next;
    symbols[at].id = id;
    symbols[at].joined = symbols[gone].joined = 0;
    symbols[at].next = next;
    if (next < end) {
      symbols[next].previous = at;
      g2zt_meet(tokenizer, merger, at, next);
    } else {
      last = at;
      if (open) risk = g2zt_merge_of_left(tokenizer, id, id + 1);
    }
    if (at) g2zt_meet(tokenizer, merger, symbols[at].previous, at);
  }
}

/* Turns `count` bytes of a piece, at most 2^32 - 2, into ids; `ids` has room for one for each byte.
 * *made is how many there are, *used how many bytes they stand for: all, unless it is open. */
static g2z_status g2zt_merge_part(g2z_encoder *encoder, const unsigned char *piece, size_t count,
                                  int open, int32_t *ids, size_t *made, size_t *used) {
  const g2z_tokenizer *tokenizer = encoder->tokenizer;
  g2zt_merger *merger = &encoder->merger;
  G2Z_ASSERT(count && count < UINT32_MAX - 1);
  /* A merge takes one from the heap and enters at most two. */
  G2Z__GROW(encoder->services, g2zt_symbol, merger->symbols, merger->symbols_capacity, 0, count);
  G2Z__GROW(encoder->services, uint64_t, merger->heap, merger->heap_capacity, 0, 2 * count);
  g2zt_symbol *symbols = merger->symbols;
  for (uint32_t i = 0; i < count; i++) {
    symbols[i].id = (uint32_t)tokenizer->byte_ids[piece[i]];
    symbols[i].joined = 0;
    symbols[i].next = i + 1;
    symbols[i].previous = i - 1;
  }
  merger->waiting = 0;
  for (uint32_t i = 0; i + 1 < count; i++) g2zt_meet(tokenizer, merger, i, i + 1);
  *used = g2zt_merge_symbols(tokenizer, merger, (uint32_t)count, open);
  *made = 0;
  for (size_t i = 0; i < *used; i = symbols[i].next) ids[(*made)++] = (int32_t)symbols[i].id;
  return G2Z_OK;
}

/* The same for a piece of any length, a MiB at a time: each part ends where nothing behind it can
 * change its ids, and merging begins anew there. */
static g2z_status g2zt_merge(g2z_encoder *encoder, const unsigned char *piece, size_t count,
                             int open, int32_t *ids, size_t *made, size_t *used) {
  size_t part = G2ZT_PART;
  *made = *used = 0;
  while (*used < count) {
    size_t left = count - *used, some, bytes;
    int last = part >= left;
    G2ZT_TRY(g2zt_merge_part(encoder, piece + *used, last ? left : part, open || !last,
                             ids + *made, &some, &bytes));
    *made += some;
    *used += bytes;
    if (last) break;
    if (bytes == 0) part *= 2;
  }
  return G2Z_OK;
}

/* The key of 1 to 31 bytes at p. All 32 are read where the text has them, and masked. */
static inline g2zt_key g2zt_key_of(const g2z_encoder *encoder, const unsigned char *p,
                                   size_t bytes, const unsigned char *end) {
  g2zt_key key;
  const uint64_t *mask = encoder->masks[bytes];
  if ((size_t)(end - p) >= sizeof key) {
    memcpy(&key, p, sizeof key);
  } else {
    memset(&key, 0, sizeof key);
    memcpy(&key, p, bytes);
  }
  for (int i = 0; i < 4; i++) key.eights[i] &= mask[i];
  key.eights[3] |= (uint64_t)bytes << 56;
  return key;
}

static inline g2zt_word *g2zt_word_of(const g2z_encoder *encoder, const g2zt_key *key) {
  const uint64_t *k = key->eights;
  uint64_t hash = k[0] * 0x9E3779B97F4A7C15u ^ k[1] * 0xC2B2AE3D27D4EB4Fu ^
                  k[2] * 0x165667B19E3779F9u ^ k[3] * 0xD6E8FEB86659FD93u;
  return &encoder->words[(hash ^ hash >> 32) * 0x9E3779B97F4A7C15u >> (64 - G2ZT_WORDS_BITS)];
}

static inline int g2zt_key_equal(const g2zt_key *a, const g2zt_key *b) {
  uint64_t differs = 0;
  for (int i = 0; i < 4; i++) differs |= a->eights[i] ^ b->eights[i];
  return differs == 0;
}

/* Appends the ids of a piece that is not in its word, and puts it there. */
static g2z_status g2zt_encode_new(g2z_encoder *encoder, const unsigned char *piece, size_t bytes,
                                  const g2zt_key *key, g2zt_word *word, g2z_tokens *out) {
  int32_t *ids = out->ids + out->count;
  size_t made, used;
  G2ZT_TRY(g2zt_merge(encoder, piece, bytes, 0, ids, &made, &used));
  out->count += made;
  if (bytes > G2ZT_WORD_BYTES || made > G2ZT_WORD_IDS) return G2Z_OK;
  word->key = *key;
  memcpy(word->ids, ids, made * sizeof *ids);
  word->count = (uint32_t)made;
  return G2Z_OK;
}

/* ----- encode and decode ------------------------------------------------- */

G2Z_API g2z_status g2z_encoder_create(g2z_services *services, const g2z_tokenizer *tokenizer,
                                      g2z_encoder **out) {
  const size_t line = sizeof(g2zt_word);
  void *memory;
  *out = NULL;
  G2ZT_TRY(g2zt_alloc(services, 1, sizeof **out, &memory));
  g2z_encoder *encoder = (g2z_encoder *)memory;
  encoder->services = services;
  encoder->tokenizer = tokenizer;
  for (size_t n = 0; n <= G2ZT_WORD_BYTES; n++) memset(encoder->masks[n], 0xFF, n);
  g2z_status status =
      g2zt_alloc(services, ((size_t)1 << G2ZT_WORDS_BITS) + 1, line, &encoder->cache);
  if (status == G2Z_OK) {
    encoder->words = (g2zt_word *)(((uintptr_t)encoder->cache + line - 1) / line * line);
    *out = encoder;
  } else {
    g2z_encoder_free(encoder);
  }
  return status;
}

G2Z_API void g2z_encoder_free(g2z_encoder *encoder) {
  if (!encoder) return;
  g2z_services *services = encoder->services;
  g2z_release(services, encoder->repair.bytes);
  g2z_release(services, encoder->cache);
  g2z_release(services, encoder->merger.symbols);
  g2z_release(services, encoder->merger.heap);
  g2z_release(services, encoder);
}

/* Room for `need` ids. `services` hear why there is none, also when the list came to be with others. */
static g2z_status g2zt_reserve(g2z_services *services, g2z_tokens *tokens, size_t need) {
  if (!tokens->services) tokens->services = services;
  void *ids = tokens->ids;
  g2z_status status = g2zt_grow(tokens->services, &ids, &tokens->capacity, tokens->count, need,
                                sizeof(int32_t));
  tokens->ids = (int32_t *)ids;
  if (status != G2Z_OK && tokens->services != services)
    memcpy(services->error, tokens->services->error, sizeof services->error);
  return status;
}

#define G2ZT_BATCH 64

/* Appends the ids of `count` pieces: number i is text[starts[i]..starts[i + 1]). The words of a
 * batch are fetched together before the first is looked at. */
static g2z_status g2zt_encode_pieces(g2z_encoder *encoder, const unsigned char *text, size_t bytes,
                                     const size_t *starts, size_t count, g2z_tokens *out) {
  g2zt_key keys[G2ZT_BATCH];
  g2zt_word *words[G2ZT_BATCH];
  for (size_t from = 0, to; from < count; from = to) {
    to = count - from < G2ZT_BATCH ? count : from + G2ZT_BATCH;
    for (size_t i = from; i < to; i++) {
      size_t length = starts[i + 1] - starts[i];
      keys[i - from] = g2zt_key_of(encoder, text + starts[i],
                                   length <= G2ZT_WORD_BYTES ? length : 0, text + bytes);
      words[i - from] = g2zt_word_of(encoder, &keys[i - from]);
      __builtin_prefetch(words[i - from]);
    }
    int32_t *ids = out->ids + out->count;
    for (size_t i = from; i < to; i++) {
      g2zt_word *word = words[i - from];
      size_t length = starts[i + 1] - starts[i];
      if (length <= G2ZT_WORD_BYTES && g2zt_key_equal(&word->key, &keys[i - from])) {
        memcpy(ids, word->ids, sizeof word->ids);
        ids += word->count;
        continue;
      }
      out->count = (size_t)(ids - out->ids);
      G2ZT_TRY(g2zt_encode_new(encoder, text + starts[i], length, &keys[i - from], word, out));
      ids = out->ids + out->count;
    }
    out->count = (size_t)(ids - out->ids);
  }
  return G2Z_OK;
}

/* Appends the ids of valid text without special tokens; *used is how much of it. open: the text may
 * go on behind `bytes`, and only what no continuation changes is encoded. Then the pattern is sure
 * of what it says 64 bytes before the end: it never looks further ahead. */
G2ZT_PRIVATE g2z_status g2z__encode_ordinary(g2z_encoder *encoder, const unsigned char *text,
                                             size_t bytes, int open, g2z_tokens *out,
                                             size_t *used) {
  g2z__scan *scan = &encoder->scan;
  size_t limit = open ? bytes > G2Z__BLOCK ? bytes - G2Z__BLOCK : 0 : bytes, from = 0;
  *used = 0;
  if (limit == 0) return G2Z_OK;
  g2z__scan_open(scan, encoder->tokenizer->classes, text, bytes);
  while (scan->block < scan->blocks) {
    size_t *starts = encoder->starts;
    starts[0] = from; /* the piece that is still open; the first start is the text's */
    size_t count = scan->block == 0 ? g2z__scan_next(scan, starts)
                                    : 1 + g2z__scan_next(scan, starts + 1);
    if (scan->block == scan->blocks) starts[count++] = bytes;
    int over = starts[count - 1] > limit;
    while (starts[count - 1] > limit) count--;
    G2ZT_TRY(g2zt_reserve(encoder->services, out,
                                 out->count + (starts[count - 1] - from) + G2ZT_WORD_IDS));
    G2ZT_TRY(g2zt_encode_pieces(encoder, text, bytes, starts, count - 1, out));
    from = starts[count - 1];
    if (over) break;
  }
  *used = from;
  if (!open || limit - from < G2ZT_PART) return G2Z_OK;
  /* A long piece that has begun. What is left of it must not look like a contraction. */
  size_t made, merged;
  G2ZT_TRY(g2zt_reserve(encoder->services, out, out->count + (limit - from)));
  G2ZT_TRY(g2zt_merge(encoder, text + from, limit - from, 1, out->ids + out->count, &made,
                            &merged));
  for (; made; made--) {
    const unsigned char *rest = text + from + merged;
    if ((*rest & 0xC0) != 0x80 && (*rest != '\'' || !g2z__contraction(rest, text + bytes))) break;
    merged -= g2z__word_bytes(&encoder->tokenizer->tokens,
                              (size_t)out->ids[out->count + made - 1]);
  }
  out->count += made;
  *used = from + merged;
  return G2Z_OK;
}

/* The same where <|endoftext|> stands for its id. What is around it is encoded on its own, as
 * tiktoken and Hugging Face do. */
G2ZT_PRIVATE g2z_status g2z__encode_special(g2z_encoder *encoder, const unsigned char *text,
                                            size_t bytes, int open, g2z_tokens *out,
                                            size_t *used) {
  size_t at = 0;
  for (;;) {
    const unsigned char *eot =
        (const unsigned char *)memmem(text + at, bytes - at, G2Z__EOT, G2Z__EOT_BYTES);
    size_t end = eot ? (size_t)(eot - text) : bytes;
    G2ZT_TRY(g2z__encode_ordinary(encoder, text + at, end - at, open && !eot, out, used));
    *used += at;
    if (!eot) return G2Z_OK;
    G2ZT_TRY(g2zt_reserve(encoder->services, out, out->count + 1));
    out->ids[out->count++] = g2z_tokenizer_eot(encoder->tokenizer);
    at = end + G2Z__EOT_BYTES;
  }
}

/* Of `bytes` bytes without a last character that is cut off: how many. */
G2ZT_PRIVATE size_t g2z__utf8_trim(const unsigned char *text, size_t bytes) {
  for (size_t back = 1; back <= 3 && back <= bytes; back++) {
    const unsigned char *p = text + bytes - back;
    if ((*p & 0xC0) == 0x80) continue;
    return *p >= 0xC0 && g2z__utf8_step(p, text + bytes) == -(int)back ? bytes - back : bytes;
  }
  return bytes;
}

/* How many bytes of a text became the first `repaired` bytes of its valid form. */
G2ZT_PRIVATE size_t g2z__utf8_given(const unsigned char *text, size_t bytes, size_t repaired) {
  size_t at = 0;
  for (size_t made = 0; made < repaired;) {
    int step = g2z__utf8_step(text + at, text + bytes);
    made += step < 0 ? 3 : (size_t)step;
    at += (size_t)(step < 0 ? -step : step);
  }
  return at;
}

G2ZT_PRIVATE g2z_status g2z__encode(g2z_encoder *encoder, const unsigned char *text, size_t bytes,
                                    int flags, int open, g2z_tokens *out, size_t *used) {
  const unsigned char *valid = text;
  *used = 0;
  if (open) bytes = g2z__utf8_trim(text, bytes);
  if (bytes == 0) return G2Z_OK;
  size_t valid_bytes = bytes, before = out->count;
  G2ZT_TRY(g2z__valid_text(encoder->services, &encoder->repair,
                           flags & G2Z_ENCODE_STRICT, &valid, &valid_bytes));
  g2z_status status = flags & G2Z_ENCODE_ALLOW_SPECIAL
                          ? g2z__encode_special(encoder, valid, valid_bytes, open, out, used)
                          : g2z__encode_ordinary(encoder, valid, valid_bytes, open, out, used);
  if (status != G2Z_OK) out->count = before;
  if (valid != text && open && status == G2Z_OK) *used = g2z__utf8_given(text, bytes, *used);
  return status;
}

G2Z_API g2z_status g2z_encode(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                              g2z_tokens *out) {
  size_t used;
  return g2z__encode(encoder, (const unsigned char *)text, bytes, flags, 0, out, &used);
}

G2Z_API g2z_status g2z_encode_part(g2z_encoder *encoder, const void *text, size_t bytes, int flags,
                                   g2z_tokens *out, size_t *used) {
  return g2z__encode(encoder, (const unsigned char *)text, bytes, flags, 1, out, used);
}

G2Z_API g2z_status g2z_decode(g2z_services *services, const g2z_tokenizer *tokenizer,
                              const int32_t *ids, size_t count, char **text, size_t *bytes) {
  size_t total = 0, length;
  void *memory;
  *text = NULL;
  *bytes = 0;
  for (size_t i = 0; i < count; i++) {
    if (!g2z_tokenizer_token(tokenizer, ids[i], &length))
      return g2z_fail(services, G2Z_BAD_ARGUMENT,
                       "id %" PRId32 " at position %zu is not below the vocabulary's %d; decode "
                       "with the vocabulary that encoded",
                       ids[i], i, g2z_tokenizer_vocab(tokenizer));
    total += length;
  }
  G2ZT_TRY(g2zt_alloc(services, total + 1, 1, &memory));
  *text = (char *)memory;
  for (size_t i = 0; i < count; i++) {
    const unsigned char *token = g2z_tokenizer_token(tokenizer, ids[i], &length);
    memcpy(*text + *bytes, token, length);
    *bytes += length;
  }
  return G2Z_OK;
}

/* ----- vocabulary files -------------------------------------------------- */

typedef struct g2z__reading { /* where a vocabulary file is being read */
  g2z_services *services;
  const char *label;          /* "gpt2/vocab.bpe" */
  const char *unit;           /* "line", "merge" or "token", */
  size_t number;              /* and which one, for error sentences */
  g2z_tokenizer *tokenizer;
  unsigned char *text;        /* the last unescaped string */
  size_t text_capacity;
} g2z__reading;

G2Z_PRINTF(2, 3)
G2ZT_PRIVATE g2z_status g2z__reading_fail(g2z__reading *reading, const char *format, ...) {
  char reason[G2Z_ERROR_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  return g2z_fail(reading->services, G2Z_FORMAT, "%s, %s %zu: %s", reading->label, reading->unit,
                   reading->number, reason);
}

/* Up to 48 bytes of a file as something that may stand in a sentence. */
typedef struct g2z__shown {
  char text[48 * 4 + 4];
} g2z__shown;
G2ZT_PRIVATE g2z__shown g2z__show(const unsigned char *bytes, size_t count) {
  g2z__shown shown;
  size_t length = 0;
  for (size_t i = 0; i < count && i < 48; i++) {
    int valid = g2z__utf8_step(bytes + i, bytes + count);
    if (bytes[i] < 0x20 || bytes[i] == 0x7F || valid < 1) {
      length += (size_t)snprintf(shown.text + length, 5, "\\x%02x", bytes[i]);
      continue;
    }
    memcpy(shown.text + length, bytes + i, (size_t)valid);
    length += (size_t)valid;
    i += (size_t)valid - 1;
  }
  memcpy(shown.text + length, count > 48 ? "..." : "", count > 48 ? 4 : 1);
  return shown;
}

/* Adds the merge of two ids, and says where in the file it stands when that is not possible. */
G2ZT_PRIVATE g2z_status g2z__read_join(g2z__reading *reading, int32_t left, int32_t right) {
  g2z_status status = g2z__tokenizer_join(reading->tokenizer, left, right);
  char reason[G2Z_ERROR_BYTES];
  if (status != G2Z_FORMAT) return status;
  memcpy(reason, reading->services->error, sizeof reason);
  return g2z__reading_fail(reading, "%s", reason);
}

/* Adds a merge of two tokens as files show them. */
G2ZT_PRIVATE g2z_status g2z__read_merge(g2z__reading *reading, const unsigned char *left,
                                        size_t left_bytes, const unsigned char *right,
                                        size_t right_bytes) {
  const unsigned char *texts[2] = {left, right};
  size_t lengths[2] = {left_bytes, right_bytes};
  int32_t ids[2];
  for (int i = 0; i < 2; i++) {
    unsigned char token[G2Z__TOKEN_BYTES];
    size_t bytes = g2z__token_get(reading->tokenizer, texts[i], lengths[i], token);
    ids[i] = bytes ? (int32_t)g2z__words_find(&reading->tokenizer->tokens, token, bytes) : -1;
    if (ids[i] < 0)
      return g2z__reading_fail(reading,
                               "\"%s\" is neither a byte nor made by a merge before; give a "
                               "byte-level BPE vocabulary as GPT-2's",
                               g2z__show(texts[i], lengths[i]).text);
  }
  return g2z__read_join(reading, ids[0], ids[1]);
}

/* "left right". */
G2ZT_PRIVATE g2z_status g2z__read_merge_line(g2z__reading *reading, const unsigned char *line,
                                             size_t bytes) {
  const unsigned char *space = (const unsigned char *)memchr(line, ' ', bytes);
  size_t left = space ? (size_t)(space - line) : 0;
  if (!left || left + 1 == bytes || memchr(space + 1, ' ', bytes - left - 1))
    return g2z__reading_fail(reading, "\"%s\" is not two tokens with a space between",
                             g2z__show(line, bytes).text);
  return g2z__read_merge(reading, line, left, space + 1, bytes - left - 1);
}

/* Takes the next line off a text, without its end. */
G2ZT_PRIVATE int g2z__read_line(g2z__reading *reading, const unsigned char **at,
                                const unsigned char *end, const unsigned char **line,
                                size_t *bytes) {
  if (*at == end) return 0;
  const unsigned char *newline = (const unsigned char *)memchr(*at, '\n', (size_t)(end - *at));
  *line = *at;
  *bytes = (size_t)((newline ? newline : end) - *at);
  *at = newline ? newline + 1 : end;
  if (*bytes && (*line)[*bytes - 1] == '\r') --*bytes;
  reading->number++;
  return 1;
}

/* vocab.bpe, merges.txt. */
G2ZT_PRIVATE g2z_status g2z__read_merges(g2z__reading *reading, const unsigned char *text,
                                         const unsigned char *end) {
  const unsigned char *line;
  size_t bytes;
  while (g2z__read_line(reading, &text, end, &line, &bytes)) {
    if (reading->number == 1 && bytes >= 8 && memcmp(line, "#version", 8) == 0) continue;
    G2ZT_TRY(g2z__read_merge_line(reading, line, bytes));
  }
  return G2Z_OK;
}

/* Unescapes a JSON string into memory that the reading keeps; "" after an error in JSON. */
G2ZT_PRIVATE g2z_status g2z__read_text(g2z__reading *reading, g2z_json_text text,
                                       const unsigned char **out, size_t *bytes) {
  *out = NULL;
  *bytes = 0;
  G2Z__GROW(reading->services, unsigned char, reading->text, reading->text_capacity, 0,
            text.bytes + 1);
  *bytes = g2z_json_unescape(&text, reading->text);
  *out = reading->text;
  return G2Z_OK;
}

/* tokenizer.json, model.merges: "left right" or ["left", "right"]. */
G2ZT_PRIVATE g2z_status g2z__read_json_merges(g2z__reading *reading, g2z_json *json) {
  const unsigned char *text;
  size_t bytes;
  if (!g2z_json_enter(json, '[')) return G2Z_OK;
  for (; g2z_json_next(json, ']', NULL); reading->number++) {
    if (g2z_json_peek(json) != '[') {
      G2ZT_TRY(g2z__read_text(reading, g2z_json_string(json), &text, &bytes));
      if (json->status == G2Z_OK) G2ZT_TRY(g2z__read_merge_line(reading, text, bytes));
      continue;
    }
    unsigned char left[2 * G2Z__TOKEN_BYTES];
    size_t count = 0, left_bytes = 0;
    for (g2z_json_enter(json, '['); g2z_json_next(json, ']', NULL); count++) {
      G2ZT_TRY(g2z__read_text(reading, g2z_json_string(json), &text, &bytes));
      if (json->status != G2Z_OK) return G2Z_OK;
      if (count == 1) G2ZT_TRY(g2z__read_merge(reading, left, left_bytes, text, bytes));
      if (count > 0) continue;
      left_bytes = bytes < sizeof left ? bytes : sizeof left; /* cut, it is no token either */
      memcpy(left, text, left_bytes);
    }
    if (json->status == G2Z_OK && count != 2)
      return g2z__reading_fail(reading, "joins %zu tokens; a merge joins 2", count);
  }
  return G2Z_OK;
}

/* tokenizer.json, model.vocab: it must give the ids that follow from the merges. */
G2ZT_PRIVATE g2z_status g2z__read_json_vocab(g2z__reading *reading, g2z_json *json) {
  const g2z__words *tokens = &reading->tokenizer->tokens;
  size_t known = 0;
  g2z_json_text key;
  if (!g2z_json_enter(json, '{')) return G2Z_OK;
  for (reading->number = 0; g2z_json_next(json, '}', &key); reading->number++) {
    const unsigned char *text;
    unsigned char token[G2Z__TOKEN_BYTES];
    size_t bytes;
    int64_t id = g2z_json_integer(json);
    if (json->status != G2Z_OK) return G2Z_OK;
    if (g2z_json_is(&key, G2Z__EOT) && id == (int64_t)tokens->count) continue;
    G2ZT_TRY(g2z__read_text(reading, key, &text, &bytes));
    size_t count = g2z__token_get(reading->tokenizer, text, bytes, token);
    int64_t expected = count ? g2z__words_find(tokens, token, count) : -1;
    if (id != expected || id < 0)
      return g2z__reading_fail(reading,
                               "\"%s\" has id %" PRId64 ", which does not follow from the merges "
                               "(256 bytes, then the merges in order, then " G2Z__EOT
                               "); train it without special tokens, or use its merges.txt",
                               g2z__show(text, bytes).text, id);
    known++;
  }
  if (json->status == G2Z_OK && known != tokens->count)
    return g2z_fail(reading->services, G2Z_FORMAT,
                     "%s: model.vocab has %zu tokens, but bytes and merges make %zu",
                     reading->label, known, tokens->count);
  return G2Z_OK;
}

/* tokenizer.json, added_tokens: those beyond the vocabulary change nothing in ordinary text. */
G2ZT_PRIVATE g2z_status g2z__read_json_added(g2z__reading *reading, g2z_json *json) {
  int eot = g2z_tokenizer_eot(reading->tokenizer);
  g2z_json_text key;
  if (!g2z_json_enter(json, '[')) return G2Z_OK;
  while (g2z_json_next(json, ']', NULL)) {
    int64_t id = -1;
    int is_eot = 0;
    if (!g2z_json_enter(json, '{')) break;
    while (g2z_json_next(json, '}', &key)) {
      if (g2z_json_is(&key, "id")) {
        id = g2z_json_integer(json);
      } else if (g2z_json_is(&key, "content")) {
        g2z_json_text content = g2z_json_string(json);
        is_eot = g2z_json_is(&content, G2Z__EOT);
      } else {
        g2z_json_skip(json);
      }
    }
    if (json->status == G2Z_OK && is_eot && id != eot)
      return g2z_json_fail(json, "%s has id %" PRId64 " but must be the last, %d; use merges.txt",
                           G2Z__EOT, id, eot);
  }
  return G2Z_OK;
}

/* tokenizer.json, pre_tokenizer: anything but GPT-2's would cut texts into other pieces. */
G2ZT_PRIVATE g2z_status g2z__read_json_pieces(g2z_json *json) {
  static const char refusal[] =
      "pre_tokenizer must be of type ByteLevel, without add_prefix_space and with use_regex, as "
      "GPT-2's; other patterns are not supported";
  int byte_level = 0;
  g2z_json_text key;
  if (g2z_json_peek(json) != '{') return g2z_json_fail(json, "%s", refusal);
  g2z_json_enter(json, '{');
  while (g2z_json_next(json, '}', &key)) {
    if (g2z_json_is(&key, "type")) {
      g2z_json_text type = g2z_json_string(json);
      byte_level = g2z_json_is(&type, "ByteLevel");
    } else if (g2z_json_is(&key, "add_prefix_space")) {
      if (g2z_json_bool(json)) return g2z_json_fail(json, "%s", refusal);
    } else if (g2z_json_is(&key, "use_regex")) {
      if (!g2z_json_bool(json)) return g2z_json_fail(json, "%s", refusal);
    } else {
      g2z_json_skip(json);
    }
  }
  return byte_level ? G2Z_OK : g2z_json_fail(json, "%s", refusal);
}

/* One walk through tokenizer.json. Its members come in any order and the rest is checked against
 * the merges, so the first walk takes only these; the second (check = 1) all else that matters. */
G2ZT_PRIVATE g2z_status g2z__read_json_walk(g2z__reading *reading, int check, const void *text,
                                            size_t bytes) {
  g2z_json json;
  g2z_json_text key;
  int merges = 0, vocab = 0, pieces = 0;
  g2z_json_open(&json, reading->services, reading->label, text, bytes);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    if (g2z_json_is(&key, "model") && g2z_json_peek(&json) == '{') {
      g2z_json_enter(&json, '{');
      while (g2z_json_next(&json, '}', &key)) {
        if (g2z_json_is(&key, "merges") && !check && !merges++) {
          G2ZT_TRY(g2z__read_json_merges(reading, &json));
        } else if (g2z_json_is(&key, "vocab") && check && !vocab++) {
          G2ZT_TRY(g2z__read_json_vocab(reading, &json));
        } else {
          g2z_json_skip(&json);
        }
      }
    } else if (check && g2z_json_is(&key, "added_tokens")) {
      G2ZT_TRY(g2z__read_json_added(reading, &json));
    } else if (check && g2z_json_is(&key, "pre_tokenizer")) {
      G2ZT_TRY(g2z__read_json_pieces(&json));
      pieces = 1;
    } else if (check && g2z_json_is(&key, "normalizer") && g2z_json_peek(&json) != 'n') {
      return g2z_json_fail(&json, "a normalizer is not supported; GPT-2 has none (null)");
    } else {
      g2z_json_skip(&json);
    }
  }
  G2ZT_TRY(g2z_json_close(&json));
  if (check ? vocab && pieces : merges) return G2Z_OK;
  return g2z_fail(reading->services, G2Z_FORMAT,
                   "%s is JSON without %s; give Hugging Face's tokenizer.json, or merges.txt",
                   reading->label, check ? "model.vocab and pre_tokenizer" : "model.merges");
}

G2ZT_PRIVATE g2z_status g2z__read_json(g2z__reading *reading, const void *text, size_t bytes) {
  reading->unit = "merge";
  G2ZT_TRY(g2z__read_json_walk(reading, 0, text, bytes));
  reading->unit = "token";
  return g2z__read_json_walk(reading, 1, text, bytes);
}

/* Tells the formats apart by their first line. The first merge is of two bytes, so its line is at
 * most 5 long: a longer one that begins with a brace is JSON. */
G2ZT_PRIVATE g2z_status g2z__read_vocabulary(g2z__reading *reading, const unsigned char *text,
                                             size_t bytes) {
  if (bytes == 0)
    return g2z_fail(reading->services, G2Z_FORMAT, "%s is empty; expected a vocabulary",
                    reading->label);
  if (bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { /* some editors' byte order mark */
    text += 3;
    bytes -= 3;
  }
  int is_tiktoken = bytes >= 6 && text[4] == ' ' && text[5] == '0';
  int is_llmc = bytes >= 4 && memcmp(text, "\xC8\xD7\x34\x01", 4) == 0;
  if (is_tiktoken || is_llmc)
    return g2z_fail(reading->services, G2Z_UNSUPPORTED,
                    "%s is a vocabulary in %s's format, which is not supported: give the same one "
                    "as vocab.bpe, merges.txt or tokenizer.json", reading->label,
                    is_llmc ? "llm.c" : "tiktoken");
  int is_json = bytes > 1 && text[0] == '{' &&
                (text[1] != ' ' || !memchr(text, '\n', bytes < 6 ? bytes : 6));
  return is_json ? g2z__read_json(reading, text, bytes)
                 : g2z__read_merges(reading, text, text + bytes);
}

G2Z_API g2z_status g2z_tokenizer_parse(g2z_services *services, const char *label, const void *text,
                                       size_t bytes, g2z_tokenizer **out) {
  g2z__reading reading;
  memset(&reading, 0, sizeof reading);
  reading.services = services;
  reading.label = label;
  reading.unit = "line";
  *out = NULL;
  G2ZT_TRY(g2z__tokenizer_new(services, &reading.tokenizer));
  g2z_status status = g2z__read_vocabulary(&reading, (const unsigned char *)text, bytes);
  g2z_release(services, reading.text);
  if (status == G2Z_OK) *out = reading.tokenizer;
  else g2z_tokenizer_free(reading.tokenizer);
  return status;
}

G2Z_API g2z_status g2z_tokenizer_create(g2z_services *services, const char *path,
                                        g2z_tokenizer **out) {
  char *text;
  size_t bytes;
  *out = NULL;
  if (!path) return g2z__tokenizer_new(services, out);
  G2ZT_TRY(g2z_read_file(services, path, (size_t)1 << 30, &text, &bytes));
  g2z_status status = g2z_tokenizer_parse(services, path, text, bytes, out);
  g2z_release(services, text);
  return status;
}

G2Z_API g2z_status g2z_tokenizer_write_merges(g2z_services *services,
                                              const g2z_tokenizer *tokenizer, const char *path) {
  g2z_writer *writer;
  char left[2 * G2Z__TOKEN_BYTES + 1], right[2 * G2Z__TOKEN_BYTES + 1];
  G2ZT_TRY(g2z_writer_create(services, path, &writer));
  g2z_status status = g2z_writer_printf(writer, "#version: 0.2\n");
  for (size_t i = 0; i + 256 < tokenizer->tokens.count && status == G2Z_OK; i++) {
    g2z__token_put(tokenizer, tokenizer->merges[i].left, left);
    g2z__token_put(tokenizer, tokenizer->merges[i].right, right);
    status = g2z_writer_printf(writer, "%s %s\n", left, right);
  }
  if (status == G2Z_OK) status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

G2Z_API g2z_status g2z_tokenizer_write_vocab(g2z_services *services,
                                             const g2z_tokenizer *tokenizer, const char *path) {
  g2z_json_out out;
  char token[2 * G2Z__TOKEN_BYTES + 1];
  memset(&out, 0, sizeof out);
  G2ZT_TRY(g2z_writer_create(services, path, &out.writer));
  g2z_json_begin(&out, NULL, '{');
  for (int id = 0; id < g2z_tokenizer_vocab(tokenizer); id++) {
    g2z__token_put(tokenizer, id, token);
    g2z_json_put_integer(&out, token, id);
  }
  g2z_json_end(&out, '}');
  g2z_status status = g2z_writer_commit(out.writer);
  g2z_writer_free(out.writer);
  return status;
}

/* ----- learning a vocabulary --------------------------------------------- */

/* A text as a row of symbols in place: a symbol of n bytes is n sites, and its id stands in the
 * first and in the last of them, so that both neighbours are found without links. A barrier (id -1)
 * stands before, between and behind words. The sites where the same pair of symbols starts form a
 * doubly linked list, so that a merge visits exactly those, and nothing is ever searched. */
typedef struct g2z__site {
  int32_t id;              /* -1: a barrier, or inside a symbol */
  uint32_t list;           /* the list that this site is in; 0: none */
  uint32_t before, after;  /* in the list; 0: none, as site 0 is a barrier */
} g2z__site;

static inline void g2z__site_link(g2z__site *sites, uint32_t *first, uint32_t at, uint32_t list) {
  sites[at].list = list;
  sites[at].before = 0;
  sites[at].after = *first;
  if (*first) sites[*first].before = at;
  *first = at;
}

static inline void g2z__site_unlink(g2z__site *sites, uint32_t *first, uint32_t at) {
  uint32_t before = sites[at].before, after = sites[at].after;
  if (before) sites[before].after = after;
  else *first = after;
  if (after) sites[after].before = before;
  sites[at].list = 0;
}

/* The symbol behind the one at `at`; a barrier when there is none. */
static inline uint32_t g2z__site_next(const g2z_tokenizer *tokenizer, const g2z__site *sites,
                                      uint32_t at) {
  return at + (uint32_t)g2z__word_bytes(&tokenizer->tokens, (size_t)sites[at].id);
}

/* The symbol before the one at `at`; 0 when there is none. */
static inline uint32_t g2z__site_previous(const g2z_tokenizer *tokenizer, const g2z__site *sites,
                                          uint32_t at) {
  int32_t id = sites[at - 1].id;
  return id < 0 ? 0 : at - (uint32_t)g2z__word_bytes(&tokenizer->tokens, (size_t)id);
}

/* The symbol at `at` and the next become `id`; neither may be in a list. */
static inline void g2z__site_merge(const g2z_tokenizer *tokenizer, g2z__site *sites, uint32_t at,
                                   int32_t id) {
  uint32_t second = g2z__site_next(tokenizer, sites, at);
  sites[second - 1].id = sites[second].id = -1;
  sites[at].id = id;
  sites[g2z__site_next(tokenizer, sites, at) - 1].id = id;
}

/* The first of the sites that overlap `at` in its list: of the pair (x, x) in a run of x. There,
 * merges must go from left to right; taking a run whole visits each of its symbols only a few
 * times. */
static inline uint32_t g2z__site_run(const g2z_tokenizer *tokenizer, const g2z__site *sites,
                                     uint32_t at) {
  uint32_t previous;
  while ((previous = g2z__site_previous(tokenizer, sites, at)) &&
         sites[previous].list == sites[at].list)
    at = previous;
  return at;
}

/* Up to 8 or 16 bytes as a key: no byte of valid text is 0xFF, so no byte of the inverse is 0 but
 * those that are not the piece's, and an empty slot's key is nobody's. Row n of the masks keeps n
 * bytes. */
#define G2Z__LOW(n) {UINT64_MAX >> (64 - 8 * (n)), 0}
#define G2Z__ALL(n) {UINT64_MAX, UINT64_MAX >> (128 - 8 * (n))}
static const uint64_t g2z__key_masks[17][2] = {
    {0, 0},      G2Z__LOW(1), G2Z__LOW(2),  G2Z__LOW(3),  G2Z__LOW(4),  G2Z__LOW(5),
    G2Z__LOW(6), G2Z__LOW(7), G2Z__LOW(8),  G2Z__ALL(9),  G2Z__ALL(10), G2Z__ALL(11),
    G2Z__ALL(12), G2Z__ALL(13), G2Z__ALL(14), G2Z__ALL(15), G2Z__ALL(16)};
#undef G2Z__LOW
#undef G2Z__ALL

typedef struct g2z__key {
  uint64_t first, second;
} g2z__key;

/* The key of `bytes` bytes, or of the first 16 of more. Reads 16 bytes. */
static inline g2z__key g2z__key_of(const unsigned char *p, size_t bytes) {
  const uint64_t *mask = g2z__key_masks[bytes < 16 ? bytes : 16]; /* a branch would be guessed */
  g2z__key key;
  memcpy(&key, p, sizeof key);
  key.first = ~key.first & mask[0];
  key.second = ~key.second & mask[1];
  return key;
}

static inline uint64_t g2z__key_differs(g2z__key a, g2z__key b) {
  return (a.first ^ b.first) | (a.second ^ b.second);
}

static inline size_t g2z__key_hash(g2z__key key, int bits) {
  uint64_t mixed = key.first ^ key.second * 31;
  return (size_t)((mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15u >> (64 - bits));
}

#define G2Z__RECENT_BITS 16

typedef struct g2z__recent { /* a piece of at most 16 bytes that came lately, and its number */
  g2z__key key;
  size_t word;
} g2z__recent;

struct g2z_bpe_trainer {
  g2z_services *services;
  unsigned char *classes;
  g2z__repair repair;
  g2z__words words;        /* the different pieces of all texts */
  int64_t *counts;         /* [words.count] how often each occurred */
  size_t counts_capacity;
  g2z__recent *recent;     /* [1 << G2Z__RECENT_BITS], so that few pieces are looked up */
  g2z__scan scan;
  size_t starts[G2Z__SCAN_STARTS + 2];
};

typedef struct g2z__record { /* a pair of tokens, while a vocabulary is learnt */
  int64_t count;             /* its occurrences in all texts */
  int32_t left, right;
  uint32_t first;            /* the list of its sites */
} g2z__record;

typedef struct g2z__candidate { /* a record as it was when it entered the heap */
  int64_t count;
  uint32_t record;
} g2z__candidate;

typedef struct g2z__learning {
  g2z_services *services;
  g2z_tokenizer *tokenizer;
  const int64_t *counts;     /* of words */
  g2z__site *sites;          /* all words, with barriers */
  uint32_t *words;           /* of each site */
  g2z__pairs pairs;          /* two ids -> index of their record */
  g2z__record *records;      /* records[0] is nobody's: a site in list 0 is in none */
  size_t record_count, records_capacity;
  g2z__candidate *heap;      /* the best first */
  size_t heap_count, heap_capacity;
} g2z__learning;

G2Z_API g2z_status g2z_bpe_trainer_create(g2z_services *services, g2z_bpe_trainer **out) {
  void *memory;
  *out = NULL;
  G2ZT_TRY(g2zt_alloc(services, 1, sizeof **out, &memory));
  g2z_bpe_trainer *trainer = (g2z_bpe_trainer *)memory;
  trainer->services = services;
  g2z_status status = g2z__classes_create(services, &trainer->classes);
  if (status == G2Z_OK)
    status = g2zt_alloc(services, (size_t)1 << G2Z__RECENT_BITS, sizeof(g2z__recent), &memory);
  trainer->recent = status == G2Z_OK ? (g2z__recent *)memory : NULL;
  if (status == G2Z_OK) *out = trainer;
  else g2z_bpe_trainer_free(trainer);
  return status;
}

G2Z_API void g2z_bpe_trainer_free(g2z_bpe_trainer *trainer) {
  if (!trainer) return;
  g2z_services *services = trainer->services;
  g2z_release(services, trainer->classes);
  g2z_release(services, trainer->recent);
  g2z_release(services, trainer->repair.bytes);
  g2z__words_free(services, &trainer->words);
  g2z_release(services, trainer->counts);
  g2z_release(services, trainer);
}

/* The number of a word, which is added with a count of 0 when it is new. */
G2ZT_PRIVATE g2z_status g2z__trainer_word(g2z_bpe_trainer *trainer, const unsigned char *bytes,
                                          size_t count, size_t *word) {
  size_t known = trainer->words.count;
  G2Z__GROW(trainer->services, int64_t, trainer->counts, trainer->counts_capacity, known,
            known + 1);
  G2ZT_TRY(g2z__words_add(trainer->services, &trainer->words, bytes, count, word));
  if (*word == known) trainer->counts[known] = 0;
  return G2Z_OK;
}

/* Counts a piece; `room` bytes can be read from p on. */
G2ZT_PRIVATE g2z_status g2z__trainer_count(g2z_bpe_trainer *trainer, const unsigned char *p,
                                           size_t bytes, size_t room) {
  size_t word;
  if (bytes > 16 || room < 16) {
    G2ZT_TRY(g2z__trainer_word(trainer, p, bytes, &word));
    trainer->counts[word]++;
    return G2Z_OK;
  }
  g2z__key key = g2z__key_of(p, bytes);
  g2z__recent *recent = &trainer->recent[g2z__key_hash(key, G2Z__RECENT_BITS)];
  if (g2z__key_differs(recent->key, key)) {
    G2ZT_TRY(g2z__trainer_word(trainer, p, bytes, &word));
    recent->key = key;
    recent->word = word;
  }
  trainer->counts[recent->word]++;
  return G2Z_OK;
}

/* Counts the pieces of a text. open: as in g2z__encode_ordinary; a character that is cut off at the
 * end needs no care, for what is counted ends 64 bytes before. */
G2ZT_PRIVATE g2z_status g2z__trainer_feed(g2z_bpe_trainer *trainer, const unsigned char *text,
                                          size_t bytes, int open, size_t *used) {
  const unsigned char *p = text;
  g2z__scan *scan = &trainer->scan;
  size_t from = 0, *starts = trainer->starts;
  *used = 0;
  if (bytes == 0) return G2Z_OK;
  size_t valid = bytes;
  G2ZT_TRY(
      g2z__valid_text(trainer->services, &trainer->repair, 0, &p, &valid));
  size_t limit = open ? valid > G2Z__BLOCK ? valid - G2Z__BLOCK : 0 : valid;
  g2z__scan_open(scan, trainer->classes, p, valid);
  for (int over = 0; !over && scan->block < scan->blocks;) {
    size_t i = scan->block == 0, count = g2z__scan_next(scan, starts);
    if (scan->block == scan->blocks) starts[count++] = valid;
    for (; count && starts[count - 1] > limit; count--) over = 1;
    for (; i < count; from = starts[i++])
      G2ZT_TRY(g2z__trainer_count(trainer, p + from, starts[i] - from, valid - from));
  }
  *used = open && p != text ? g2z__utf8_given(text, bytes, from) : from;
  return G2Z_OK;
}

G2Z_API g2z_status g2z_bpe_trainer_feed(g2z_bpe_trainer *trainer, const void *text, size_t bytes) {
  size_t used;
  return g2z__trainer_feed(trainer, (const unsigned char *)text, bytes, 0, &used);
}

G2Z_API g2z_status g2z_bpe_trainer_feed_part(g2z_bpe_trainer *trainer, const void *text,
                                             size_t bytes, size_t *used) {
  return g2z__trainer_feed(trainer, (const unsigned char *)text, bytes, 1, used);
}

G2Z_API g2z_status g2z_bpe_trainer_add(g2z_bpe_trainer *trainer, const g2z_bpe_trainer *other) {
  const g2z__words *words = &other->words;
  size_t mine;
  for (size_t word = 0; word < words->count; word++) {
    G2ZT_TRY(g2z__trainer_word(trainer, words->bytes + words->starts[word],
                               g2z__word_bytes(words, word), &mine));
    trainer->counts[mine] += other->counts[word];
  }
  return G2Z_OK;
}

/* Whether a merges before b. */
G2ZT_PRIVATE int g2z__candidate_before(const g2z__learning *learning, g2z__candidate a,
                                       g2z__candidate b) {
  const g2z__record *x = &learning->records[a.record], *y = &learning->records[b.record];
  if (a.count != b.count) return a.count > b.count;
  return x->left != y->left ? x->left < y->left : x->right < y->right;
}

/* Puts the candidate into the hole at the root of the heap. */
G2ZT_PRIVATE void g2z__heap_settle(g2z__learning *learning, g2z__candidate candidate) {
  size_t hole = 0, child;
  for (; (child = 2 * hole + 1) < learning->heap_count; hole = child) {
    if (child + 1 < learning->heap_count &&
        g2z__candidate_before(learning, learning->heap[child + 1], learning->heap[child]))
      child++;
    if (!g2z__candidate_before(learning, learning->heap[child], candidate)) break;
    learning->heap[hole] = learning->heap[child];
  }
  learning->heap[hole] = candidate;
}

/* Enters the records from `first` on: those of the pairs that the last merge made. */
G2ZT_PRIVATE g2z_status g2z__heap_enter(g2z__learning *learning, size_t first) {
  for (size_t i = first; i < learning->record_count; i++) {
    g2z__candidate candidate = {learning->records[i].count, (uint32_t)i};
    if (candidate.count == 0) continue;
    G2Z__GROW(learning->services, g2z__candidate, learning->heap, learning->heap_capacity,
              learning->heap_count, learning->heap_count + 1);
    size_t hole = learning->heap_count++, parent;
    for (; hole; hole = parent) {
      parent = (hole - 1) / 2;
      if (!g2z__candidate_before(learning, candidate, learning->heap[parent])) break;
      learning->heap[hole] = learning->heap[parent];
    }
    learning->heap[hole] = candidate;
  }
  return G2Z_OK;
}

/* The most frequent pair; 0: none is left. Counts only fall once a record is in the heap, so one
 * that is out of date sinks to where it belongs, and the first that is not is the best. */
G2ZT_PRIVATE uint32_t g2z__heap_best(g2z__learning *learning) {
  while (learning->heap_count) {
    g2z__candidate best = learning->heap[0];
    int64_t count = learning->records[best.record].count;
    int current = best.count == count;
    best.count = count;
    if (current || count == 0) {
      g2z__candidate last = learning->heap[--learning->heap_count];
      if (learning->heap_count) g2z__heap_settle(learning, last);
      if (current) return best.record;
    } else {
      g2z__heap_settle(learning, best);
    }
  }
  return 0;
}

/* Enters the symbol at `at` and its right neighbour in the record of their pair. */
G2ZT_PRIVATE g2z_status g2z__learn_link(g2z__learning *learning, uint32_t at) {
  g2z__site *sites = learning->sites;
  const g2z__words *tokens = &learning->tokenizer->tokens;
  int32_t left = sites[at].id;
  int32_t right = sites[g2z__site_next(learning->tokenizer, sites, at)].id;
  if (right < 0 || g2z__word_bytes(tokens, (size_t)left) + g2z__word_bytes(tokens, (size_t)right) >
                       G2Z__TOKEN_BYTES)
    return G2Z_OK;
  uint32_t index = g2z__pairs_find(&learning->pairs, left, right);
  if (!index) {
    g2z__record record = {0, left, right, 0};
    index = (uint32_t)learning->record_count;
    G2Z__GROW(learning->services, g2z__record, learning->records, learning->records_capacity,
              learning->record_count, learning->record_count + 1);
    G2ZT_TRY(g2z__pairs_add(learning->services, &learning->pairs, left, right, index));
    learning->records[learning->record_count++] = record;
  }
  learning->records[index].count += learning->counts[learning->words[at]];
  g2z__site_link(sites, &learning->records[index].first, at, index);
  return G2Z_OK;
}

/* Merges the symbol at `at` with the next. */
G2ZT_PRIVATE g2z_status g2z__learn_site(g2z__learning *learning, uint32_t at, int32_t id) {
  g2z__site *sites = learning->sites;
  uint32_t previous = g2z__site_previous(learning->tokenizer, sites, at);
  uint32_t touched[3] = {at, g2z__site_next(learning->tokenizer, sites, at), previous};
  for (int i = 0; i < 3; i++) {
    g2z__record *record = &learning->records[sites[touched[i]].list];
    if (!sites[touched[i]].list) continue;
    record->count -= learning->counts[learning->words[at]];
    g2z__site_unlink(sites, &record->first, touched[i]);
  }
  g2z__site_merge(learning->tokenizer, sites, at, id);
  G2ZT_TRY(g2z__learn_link(learning, at));
  return previous ? g2z__learn_link(learning, previous) : G2Z_OK;
}

/* Lays the words out as sites of single bytes and counts their pairs. */
G2ZT_PRIVATE g2z_status g2z__learn_start(g2z__learning *learning, const g2z__words *words) {
  size_t total = 1 + words->count + (words->count ? words->starts[words->count] : 0);
  void *memory;
  G2ZT_TRY(g2zt_alloc(learning->services, total, sizeof *learning->sites, &memory));
  learning->sites = (g2z__site *)memory;
  G2ZT_TRY(g2zt_alloc(learning->services, total, sizeof *learning->words, &memory));
  learning->words = (uint32_t *)memory;
  G2Z__GROW(learning->services, g2z__record, learning->records, learning->records_capacity, 0, 1);
  learning->record_count = 1;
  uint32_t at = 0;
  learning->sites[at++].id = -1;
  for (size_t word = 0; word < words->count; word++) {
    for (size_t i = words->starts[word]; i < words->starts[word + 1]; i++, at++) {
      learning->sites[at].id = learning->tokenizer->byte_ids[words->bytes[i]];
      learning->words[at] = (uint32_t)word;
    }
    learning->sites[at++].id = -1;
  }
  while (--at)
    if (learning->sites[at].id >= 0) G2ZT_TRY(g2z__learn_link(learning, at));
  return g2z__heap_enter(learning, 1);
}

G2ZT_PRIVATE g2z_status g2z__learn(g2z__learning *learning, const g2z__words *words, int vocab) {
  G2ZT_TRY(g2z__learn_start(learning, words));
  while (g2z_tokenizer_vocab(learning->tokenizer) < vocab) {
    uint32_t best = g2z__heap_best(learning);
    if (!best) break;
    size_t known = learning->record_count;
    int32_t id = (int32_t)learning->tokenizer->tokens.count;
    G2ZT_TRY(g2z__tokenizer_join(learning->tokenizer, learning->records[best].left,
                                 learning->records[best].right));
    while (learning->records[best].first) {
      uint32_t at =
          g2z__site_run(learning->tokenizer, learning->sites, learning->records[best].first);
      do {
        G2ZT_TRY(g2z__learn_site(learning, at, id));
        at = g2z__site_next(learning->tokenizer, learning->sites, at);
      } while (learning->sites[at].list == best);
    }
    G2ZT_TRY(g2z__heap_enter(learning, known));
  }
  return G2Z_OK;
}

G2Z_API g2z_status g2z_bpe_trainer_finish(g2z_bpe_trainer *trainer, int vocab,
                                          g2z_tokenizer **out) {
  g2z_services *services = trainer->services;
  g2z__learning learning;
  memset(&learning, 0, sizeof learning);
  *out = NULL;
  if (vocab < 257 || vocab > G2Z__VOCAB_MAX)
    return g2z_fail(services, G2Z_BAD_ARGUMENT,
                     "a vocabulary of %d; choose 257 (the bytes and %s) to %d", vocab, G2Z__EOT,
                     G2Z__VOCAB_MAX);
  G2ZT_TRY(g2z__tokenizer_new(services, &learning.tokenizer));
  learning.services = services;
  learning.counts = trainer->counts;
  g2z_status status = g2z__learn(&learning, &trainer->words, vocab);
  g2z_release(services, learning.sites);
  g2z_release(services, learning.words);
  g2z_release(services, learning.pairs.slots);
  g2z_release(services, learning.records);
  g2z_release(services, learning.heap);
  if (status == G2Z_OK) *out = learning.tokenizer;
  else g2z_tokenizer_free(learning.tokenizer);
  return status;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_TEXT_IMPLEMENTED */
