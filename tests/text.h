/* Tests of extras/g2z_text.h and of ./prepare_data: text to tokens and back, vocabulary training,
 * shards. */

/* ----- tokenizer --------------------------------------------------------- */

static const char test_bpe_text[] =
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of Light, it was the season of Darkness.\n\nWe'd say it's 1859; they'll say we've 1000 or "
    "10000 chances, don't they? aaaaaaa aaaa aa! Café, cafés and naïve 東京, 東京都.    Four  "
    "spaces:\t\tand tabs.\r\n";

/* The merges of Hugging Face's BpeTrainer (tokenizers 0.23.3) for test_bpe_text: the first 120 of
 * 144. */
static const char test_bpe_merges[] =
    "#version: 0.2\n"
    "Ġ t\nĠ w\na a\na s\nh e\nĠt he\ni t\nĠ o\nĠ it\nĠw as\nĠo f\ne s\n0 0\nĠ s\na n\nc h\n"
    "o n\nĠ 1\nĠ aa\na f\na g\na y\nc es\ne p\ne as\ni m\ni s\nn es\no ch\nv e\n± ä\nº ¬\n"
    "Ã ©\næ Ŀ\nĠ b\nĠ Ġ\nĠ ag\nĠ ep\nĠ æĿ\nĠt im\nĠthe y\nĠs ay\nĠs eas\nan d\nĠ1 00\n"
    "Ġaa aa\naf Ã©\nnes s\n±ä º¬\nĠag e\nĠep och\nĠæĿ ±äº¬\nĠtim es\nĠseas on\n' d\n' l\n"
    "' s\n' t\n' ve\n5 9\n8 59\nC afÃ©\nD a\nF o\nI t\nL i\nW e\na b\na Ã\na ces\nc r\n"
    "c afÃ©\nd o\nd u\nd on\ne f\ne l\ne du\nf o\ng h\nh ness\ni n\ni ef\nk ness\nl it\n"
    "l is\nn aÃ\no r\no lis\np aces\nr kness\ns t\nu r\n¯ ve\né ĥ\nč Ċ\nĠ ch\nĠ and\n"
    "Ġ CafÃ©\nĠ Da\nĠ Fo\nĠ Li\nĠ cafÃ©\nĠ don\nĠ fo\nĠ in\nĠ naÃ\nĠt ab\nĠw e\nĠw is\n"
    "Ġw or\naa a\nĠo r\nes t\nĠs paces\nan ces\nĠ1 859\nĠb el\nĠb est\nĠĠ Ġ\n";

static void test_end_tokenizer(void *tokenizer) { g2z_tokenizer_free((g2z_tokenizer *)tokenizer); }
static void test_end_encoder(void *encoder) { g2z_encoder_free((g2z_encoder *)encoder); }
static void test_end_bpe(void *trainer) { g2z_bpe_trainer_free((g2z_bpe_trainer *)trainer); }

/* The vocabulary of a file; without a path, 256 bytes and the marker. The test owns it, and the
 * results of the next functions. */
static g2z_tokenizer *test_tokenizer(g2z_test *t, const char *path) {
  g2z_tokenizer *tokenizer;
  REQUIRE_OK(t, g2z_tokenizer_create(&t->services, path, &tokenizer));
  test_own(t, test_end_tokenizer, tokenizer);
  return tokenizer;
}

static g2z_encoder *test_encoder(g2z_test *t, const g2z_tokenizer *tokenizer) {
  g2z_encoder *encoder;
  REQUIRE_OK(t, g2z_encoder_create(&t->services, tokenizer, &encoder));
  test_own(t, test_end_encoder, encoder);
  return encoder;
}

static g2z_bpe_trainer *test_bpe_trainer(g2z_test *t) {
  g2z_bpe_trainer *trainer;
  REQUIRE_OK(t, g2z_bpe_trainer_create(&t->services, &trainer));
  test_own(t, test_end_bpe, trainer);
  return trainer;
}

static g2z_tokenizer *test_bpe_finish(g2z_test *t, g2z_bpe_trainer *trainer, int vocab) {
  g2z_tokenizer *tokenizer;
  REQUIRE_OK(t, g2z_bpe_trainer_finish(trainer, vocab, &tokenizer));
  test_own(t, test_end_tokenizer, tokenizer);
  return tokenizer;
}

/* The vocabulary of this size that a text teaches. */
static g2z_tokenizer *test_bpe_learn(g2z_test *t, const char *text, size_t bytes, int vocab) {
  g2z_bpe_trainer *trainer = test_bpe_trainer(t);
  CHECK_OK(t, g2z_bpe_trainer_feed(trainer, text, bytes, 0));
  return test_bpe_finish(t, trainer, vocab);
}

/* An encoder of test_bpe_text's vocabulary. */
static g2z_encoder *test_bpe_encoder(g2z_test *t) {
  return test_encoder(t, test_bpe_learn(t, test_bpe_text, sizeof test_bpe_text - 1, 377));
}

/* Ids that the test owns; none so far. */
static void test_end_ids(void *ids) { g2z_tokens_free((g2z_tokens *)ids); }
static g2z_tokens *test_ids(g2z_test *t) {
  g2z_tokens *ids = (g2z_tokens *)test_memory(t, sizeof *ids);
  test_own(t, test_end_ids, ids);
  return ids;
}

/* A text's ids from a new encoder. */
static g2z_tokens test_bpe_encode(g2z_test *t, const g2z_tokenizer *tokenizer, const char *text,
                                  size_t bytes, int flags) {
  g2z_tokens *ids = test_ids(t);
  const int kept = t->owned_count;
  CHECK_OK(t, g2z_encode(test_encoder(t, tokenizer), text, bytes, flags, ids));
  test_end(t, kept);
  return *ids;
}

static int test_bpe_equal(const g2z_tokens *a, const g2z_tokens *b) {
  return a->count == b->count &&
         (a->count == 0 || memcmp(a->ids, b->ids, a->count * sizeof *a->ids) == 0);
}

static void test_bpe_round_trip(g2z_test *t, const g2z_tokenizer *tokenizer, const char *text,
                                size_t bytes, const char *expected, size_t expected_bytes) {
  g2z_tokens tokens = test_bpe_encode(t, tokenizer, text, bytes, G2Z_ENCODE_DEFAULT);
  char *back = NULL;
  size_t back_bytes = 0;
  CHECK_OK(t, g2z_decode(&t->services, tokenizer, tokens.ids, tokens.count, &back, &back_bytes));
  FAIL_IF(t, !back || back_bytes != expected_bytes || memcmp(back, expected, expected_bytes) != 0,
          "\"%s\" comes back as \"%s\"", text, back ? back : "");
  g2z_release(&t->services, back);
}

/* Text that is hard to split: words, contractions, digits, white space of all widths, and bytes
 * that are not UTF-8. */
static size_t test_bpe_random_text(uint32_t *state, char *out, size_t limit) {
  static const char *const atoms[] = {
      " ", " ", "  ", "\n", "\r\n", "\t", "\xC2\xA0", "\xC2\x85", "\xE3\x80\x80", "\xE2\x80\xA8",
      "the", "best", "Caf\xC3\xA9", "it's", "'ll", "'", "we've", "1859", "000", "!?", "...",
      "\xE6\x9D\xB1\xE4\xBA\xAC", "\xF0\x9F\x98\x80", "\xE2\x80\x8B", "\xFF", "\xE2\x80", "\xC2",
      "\xF0\x9F", "aaaa", "a"};
  size_t bytes = 0;
  for (uint32_t n = test_bpe_random(state) % 12; n; n--) {
    const char *atom = atoms[test_bpe_random(state) % (sizeof atoms / sizeof *atoms)];
    size_t length = strlen(atom);
    if (bytes + length > limit) break;
    memcpy(out + bytes, atom, length);
    bytes += length;
  }
  return bytes;
}

/* Training until no pair is left makes each piece one token: the tokens of the training text are
 * the pieces of the pattern. */
static void test_tokenizer_pieces(g2z_test *t) {
  static const char *const cases[][2] = { /* text, pieces with | between */
      {"Hello world", "Hello| world"},
      {" Hello  world ", " Hello| | world| "},
      {"a\r\nb", "a|\r|\n|b"},
      {"a\n\nb", "a|\n|\n|b"},
      {"a\n\n", "a|\n\n"},
      {"a   b", "a|  | b"},
      {"a \t b", "a| \t| b"},
      {"a \tb", "a| |\t|b"},
      {"it's don't've we'll I'd I'm you're", "it|'s| don|'t|'ve| we|'ll| I|'d| I|'m| you|'re"},
      {"it'S 'sabc ''s 's", "it|'|S| '|sabc| ''|s| '|s"},
      {"'sabc'lla'l'vx're'r", "'s|abc|'ll|a|'|l|'|vx|'re|'|r"},
      {"abc123def 4,567.89", "abc|123|def| 4|,|567|.|89"},
      {"x=(y+1)*2;", "x|=(|y|+|1|)*|2|;"},
      {"Caf\xC3\xA9 na\xC3\xAFve", "Caf\xC3\xA9| na\xC3\xAFve"},
      /* NEL, no-break, line separator and ideographic space are white space, but not U+0020 */
      {"a\xC2\x85" "b", "a|\xC2\x85|b"},
      {"a\xC2\xA0" "b", "a|\xC2\xA0|b"},
      {"a\xE2\x80\xA8" "b", "a|\xE2\x80\xA8|b"},
      {"a \xE3\x80\x80" "b", "a| |\xE3\x80\x80|b"},
      {"a\xE3\x80\x80 b", "a|\xE3\x80\x80| b"},
      /* zero width space, byte order mark, Mongolian vowel separator and U+001C are not white
       * space */
      {"a\xE2\x80\x8B" "b", "a|\xE2\x80\x8B|b"},
      {"a\xEF\xBB\xBF!", "a|\xEF\xBB\xBF!"},
      {"a\xE1\xA0\x8E\x1C", "a|\xE1\xA0\x8E\x1C"},
      /* letters and numbers of other planes, and of Unicode 16: U+105C0, U+10D4A, U+1CCF0 */
      {"\xE6\x9D\xB1\xE4\xBA\xAC" "12\xD9\xA3\xC2\xBD\xE2\x85\xA7!",
       "\xE6\x9D\xB1\xE4\xBA\xAC|12\xD9\xA3\xC2\xBD\xE2\x85\xA7|!"},
      {"\xF0\x90\x97\x80\xF0\x90\xB5\x8A" "a\xF0\x9C\xB3\xB0" "5",
       "\xF0\x90\x97\x80\xF0\x90\xB5\x8A" "a|\xF0\x9C\xB3\xB0" "5"},
      {"\xF0\xA0\x80\x80\xF0\xB2\x8E\xAF\xF0\xB2\x8E\xB0",
       "\xF0\xA0\x80\x80\xF0\xB2\x8E\xAF|\xF0\xB2\x8E\xB0"},
      {"hi\xF0\x9F\x98\x80!! ok", "hi|\xF0\x9F\x98\x80!!| ok"},
      {"e\xCC\x81", "e|\xCC\x81"}, /* a combining accent is neither letter nor number */
      {"x<|endoftext|>", "x|<||endoftext||>"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *text = cases[i][0];
    g2z_tokenizer *tokenizer = test_bpe_learn(t, text, strlen(text), 2000);
    g2z_tokens tokens = test_bpe_encode(t, tokenizer, text, strlen(text), G2Z_ENCODE_DEFAULT);
    char pieces[256];
    size_t length = 0;
    for (size_t k = 0; k < tokens.count; k++) {
      size_t bytes;
      const unsigned char *token = g2z_tokenizer_token(tokenizer, tokens.ids[k], &bytes);
      if (k) pieces[length++] = '|';
      memcpy(pieces + length, token, bytes);
      length += bytes;
    }
    pieces[length] = 0;
    FAIL_IF(t, strcmp(pieces, cases[i][1]) != 0, "\"%s\" falls into %s", text, pieces);
  }
}

/* GPT-2's order of bytes: the 188 of Latin-1 that print, then the rest. */
static int test_byte_prints(int byte) {
  return (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
}

static void test_tokenizer_bytes(g2z_test *t) {
  static const char *const invalid[][2] = { /* as Python's decode(errors="replace") */
      {"a\xFFz", "a\xEF\xBF\xBDz"},
      {"\xC2", "\xEF\xBF\xBD"},
      {"\xC0\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD"},
      {"\xE2\x80z", "\xEF\xBF\xBDz"},
      {"\xF0\x9F\x98", "\xEF\xBF\xBD"},
      {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
      {"\xF4\x90\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
      {"\xE0\x80\xE0\xA0\xE0\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xE0\xA0\x80"},
      {"\xF0\x90\x80\xC3\xA9", "\xEF\xBF\xBD\xC3\xA9"},
  };
  g2z_tokenizer *tokenizer = test_tokenizer(t, NULL);
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 257 && g2z_tokenizer_eot(tokenizer) == 256);
  size_t bytes;
  int id = 0;
  for (int rest = 0; rest < 2; rest++)
    for (int byte = 0; byte < 256; byte++) {
      if (test_byte_prints(byte) == rest) continue;
      const unsigned char *single = g2z_tokenizer_token(tokenizer, id++, &bytes);
      CHECK(t, bytes == 1 && *single == byte);
    }
  const unsigned char *token = g2z_tokenizer_token(tokenizer, 256, &bytes);
  CHECK(t, bytes == 13 && memcmp(token, "<|endoftext|>", 13) == 0);
  CHECK(t, g2z_tokenizer_token(tokenizer, 257, &bytes) == NULL && bytes == 0);
  CHECK(t, g2z_tokenizer_token(tokenizer, -1, &bytes) == NULL && bytes == 0);
  for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++)
    test_bpe_round_trip(t, tokenizer, invalid[i][0], strlen(invalid[i][0]), invalid[i][1],
                        strlen(invalid[i][1]));
  test_bpe_round_trip(t, tokenizer, "a\0b", 3, "a\0b", 3);
  test_bpe_round_trip(t, tokenizer, "", 0, "", 0);

  g2z_encoder *encoder = test_encoder(t, tokenizer);
  g2z_tokens *tokens = test_ids(t);
  CHECK_OK(t, g2z_encode(encoder, "ab", 2, G2Z_ENCODE_STRICT, tokens));
  CHECK_FORMAT(t, g2z_encode(encoder, "abc\xE2\x80", 5, G2Z_ENCODE_STRICT, tokens),
               "byte 0xe2 at offset 3");
  CHECK(t, tokens->count == 2); /* a failed call appends nothing */
  const char special[] = "x<|endoftext|><|endoftext|>y";
  CHECK_OK(t, g2z_encode(encoder, special, strlen(special), G2Z_ENCODE_ALLOW_SPECIAL, tokens));
  CHECK(t, tokens->count == 6 && tokens->ids[3] == 256 && tokens->ids[4] == 256);
  tokens->count = 0;
  CHECK_OK(t, g2z_encode(encoder, special, strlen(special), G2Z_ENCODE_DEFAULT, tokens));
  CHECK(t, tokens->count == strlen(special));
  const int32_t beyond[] = {0, 257};
  char *text;
  CHECK_BAD(t, g2z_decode(&t->services, tokenizer, beyond, 2, &text, &bytes),
            "id 257 at position 1");
}

/* A text fed at once, in two parts, and to two trainers that are added: the pieces are the same
 * here. */
static void test_bpe_training(g2z_test *t) {
  const size_t bytes = sizeof test_bpe_text - 1;
  const size_t half = g2z_encode_cut(test_bpe_text, 300);
  for (int way = 0; way < 3; way++) {
    g2z_bpe_trainer *trainer = test_bpe_trainer(t), *other = test_bpe_trainer(t);
    g2z_tokenizer *tokenizer;
    const size_t cut = way ? half : 0;
    CHECK_BAD(t, g2z_bpe_trainer_finish(trainer, 256, &tokenizer), "a vocabulary of 256");
    CHECK_OK(t, g2z_bpe_trainer_feed(way == 2 ? other : trainer, test_bpe_text, cut, 0));
    CHECK_OK(t, g2z_bpe_trainer_feed(trainer, test_bpe_text + cut, bytes - cut, 0));
    if (way == 2) CHECK_OK(t, g2z_bpe_trainer_add(trainer, other));
    tokenizer = test_bpe_finish(t, trainer, 257 + 120);
    CHECK(t, g2z_tokenizer_vocab(tokenizer) == 257 + 120);
    CHECK_OK(t, g2z_tokenizer_write_merges(&t->services, tokenizer, test_path(t, "merges.txt")));
    CHECK(t, test_files_equal(t, test_path(t, "merges.txt"), test_bpe_merges,
                              sizeof test_bpe_merges - 1));
    test_bpe_round_trip(t, tokenizer, test_bpe_text, bytes, test_bpe_text, bytes);
    tokenizer = test_bpe_finish(t, trainer, 100000);
    CHECK(t, g2z_tokenizer_vocab(tokenizer) == 257 + 144); /* no pair is left */
  }
}

/* Writes merges.txt and its vocab.json into the test's directory. */
static g2z_tokenizer *test_bpe_files(g2z_test *t) {
  test_write_file(t, test_path(t, "merges.txt"), test_bpe_merges, strlen(test_bpe_merges));
  g2z_tokenizer *tokenizer = test_tokenizer(t, test_path(t, "merges.txt"));
  CHECK_OK(t, g2z_tokenizer_write_vocab(&t->services, tokenizer, test_path(t, "vocab.json")));
  return tokenizer;
}

/* A command that prints tokenizer.json of these files; `merge` is sed's way to a line's merge. */
#define TEST_TOKENIZER_JSON(merge)                                                               \
  "printf '{\"version\":\"1.0\",\"added_tokens\":[{\"id\":376,\"content\":\"<|endoftext|>\","    \
  "\"special\":true}],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","            \
  "\"add_prefix_space\":false,\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null," \
  "\"unk_token\":null,\"continuing_subword_prefix\":null,\"end_of_word_suffix\":\"\","           \
  "\"fuse_unk\":false,\"ignore_merges\":false,\"vocab\":'; cat vocab.json; "                     \
  "printf ',\"merges\":['; sed '1d; " merge "; $!s/$/,/' merges.txt; printf ']}}'"
static const char test_bpe_pairs[] = TEST_TOKENIZER_JSON("s/ /\",\"/; s/.*/[\"&\"]/");

static void test_tokenizer_formats(g2z_test *t) {
  static const char *const formats[] = { /* merges without a version, with a mark, with CR LF, with
                                          * blank lines at the end; JSON */
      "sed 1d merges.txt", "printf '\\357\\273\\277'; cat merges.txt", "sed 's/$/\\r/' merges.txt",
      "cat merges.txt; echo", "sed 's/$/\\r/' merges.txt; printf '\\r\\n\\n'",
      TEST_TOKENIZER_JSON("s/.*/\"&\"/"), test_bpe_pairs};
  g2z_tokenizer *original = test_bpe_files(t);
  g2z_tokens expected = test_bpe_encode(t, original, test_bpe_text, strlen(test_bpe_text), 0);
  CHECK(t, expected.count > 100 && expected.count < 250);
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    test_sh(t, "{ %s; } > a.file", formats[i]);
    g2z_tokenizer *tokenizer = test_tokenizer(t, test_path(t, "a.file"));
    CHECK(t, g2z_tokenizer_vocab(tokenizer) == g2z_tokenizer_vocab(original));
    g2z_tokens tokens = test_bpe_encode(t, tokenizer, test_bpe_text, strlen(test_bpe_text), 0);
    FAIL_IF(t, !test_bpe_equal(&tokens, &expected), "format %zu gives other ids", i);
  }
}

static void test_tokenizer_refusals(g2z_test *t) {
  static const struct {
    const char *text, *sentence;
    int foreign;
  } cases[] = {
      {"", "vocab is empty", 0},
      {"\r\n\n", "vocab is empty", 0},
      {"#version: 0.2\na b\nab\n", "vocab, line 3: \"ab\" is not two tokens", 0},
      {"a b\n\nb c\n", "vocab, line 2: \"\" is not two tokens", 0},
      {"a b c\n", "line 1: \"a b c\" is not two tokens", 0},
      {"a b\nab cd\n", "line 2: \"cd\" is neither a byte nor", 0},
      {"a b\nb c\nab c\na bc\n", "line 4: makes the token that has id 258 already", 0},
      {"a \x01\n", "line 1: \"\\x01\" is neither a byte nor", 0},
      {"a \xFF\n", "line 1: \"\\xff\" is neither a byte nor", 0},
      {"{\"model\":{\"merges\":[\"a b\",]}}", "vocab, column 2", 0},
      {"{\"model\":{\"merges\":[[\"a\",\"b\",\"c\"]]}}", ": a merge joins 2 tokens, not 3", 0},
      {"{\"model\":{\"merges\":[[\"a\"]]}}", "merge 0: a merge joins 2 tokens, not 1", 0},
      {"{\"model\":{\"merges\":[\"a b\"],\"vocab\":{\"!\":1}}}", "token 0: \"!\" has id 1", 0},
      {"{\"model\":{\"merges\":[\"a b\"],\"vocab\":{\"!\":0}}}",
       "the size of its vocabulary is 1, but bytes and merges make 257", 0},
      {"{\"model\":{\"vocab\":{}}}", "JSON without model.merges", 0},
      {"{\"!\":0,\"model\":5}", "JSON without model.merges", 0},
      {"{\"model\":{\"type\":\"WordPiece\",\"merges\":[]}}", "model.type must be BPE", 0},
      {"{\"model\":{\"end_of_word_suffix\":\"</w>\",\"merges\":[]}}", "a suffix or prefix of", 0},
      {"{\"model\":{\"merges\":[],\"continuing_subword_prefix\":\"#\"}}", "a suffix or pre", 0},
      {"{\"normalizer\":{},\"model\":{\"merges\":[]}}", "a normalizer is not supported", 0},
      {"{\"pre_tokenizer\":{\"type\":\"Whitespace\"},\"model\":{\"merges\":[]}}", "ByteLevel", 0},
      {"{\"pre_tokenizer\":null,\"model\":{\"merges\":[]}}", "ByteLevel", 0},
      {"{\"model\":{\"ignore_merges\":true,\"merges\":[]}}", "ignore_merges must be false", 0},
      {"{\"added_tokens\":[{\"id\":256,\"content\":\"<\\/s>\"}],\"model\":{\"merges\":[]}}",
       "the added token \"</s>\" has id 256, but <|endoftext|>, id 256, is the only one that is "
       "supported. For texts without \"</s>\" leave it out: jq '.added_tokens=[]' vocab > ", 0},
      {"{\"added_tokens\":[{\"id\":256,\"content\":\"<|endoftext|>\"},{\"id\":257,\"content\":"
       "\"[PAD]\"}],\"model\":{\"merges\":[]}}", "the added token \"[PAD]\" has id 257", 0},
      {"{\"added_tokens\":[{\"id\":0,\"content\":\"<|endoftext|>\"}],\"model\":{\"merges\":[]}}",
       "<|endoftext|> has id 0 but must be the last, 256", 0},
      {"{\"added_tokens\":[{\"lstrip\":true}],\"model\":{\"merges\":[]}}", "spaces around it", 0},
      {"IQ== 0\nIg== 1\n", "tiktoken's format", 1},
      {"\xC8\xD7\x34\x01\x02", "llm.c's format", 1}};
  char text[8192];
  g2z_tokenizer *tokenizer = NULL;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    CHECK_STATUS(t, g2z_tokenizer_parse(&t->services, "vocab", cases[i].text,
                                        strlen(cases[i].text), &tokenizer),
                 cases[i].foreign ? G2Z_UNSUPPORTED : G2Z_FORMAT, &t->services,
                 cases[i].sentence);
    CHECK(t, tokenizer == NULL);
    if (cases[i].foreign) CHECK_HAS(t, t->services.error, "merges.txt or tokenizer.json");
  }
  /* Doubling gives tokens of 2, 4, ... bytes: the 11th would have 2048. */
  size_t length = 0;
  for (size_t half = 1; half <= 1024; half *= 2) {
    memset(text + length, 'a', 2 * half + 2);
    text[length + half] = ' ';
    text[length + 2 * half + 1] = '\n';
    length += 2 * half + 2;
  }
  CHECK_FORMAT(t, g2z_tokenizer_parse(&t->services, "vocab", text, length, &tokenizer),
               "line 11: a token of 2048 bytes");
  CHECK_IO(t, g2z_tokenizer_create(&t->services, test_path(t, "none"), &tokenizer), "none");
  /* Ids of Hugging Face's trainer, which puts <|endoftext|> first; and the kit's own. */
  test_write_file(t, test_path(t, "merges.txt"), "a b\n", 4);
  static const char other[] = "{\"<|endoftext|>\": 0, \"!\": 1}";
  test_write_file(t, test_path(t, "vocab.json"), other, sizeof other - 1);
  CHECK_FORMAT(t, g2z_tokenizer_create(&t->services, test_path(t, "merges.txt"), &tokenizer),
               "vocab.json, token 0: \"<|endoftext|>\" has id 0, which does not follow");
  CHECK(t, tokenizer == NULL);
  CHECK_OK(t, g2z_tokenizer_parse(&t->services, "merges.txt", "a b\n", 4, &tokenizer));
  CHECK_OK(t, g2z_tokenizer_write_vocab(&t->services, tokenizer, test_path(t, "vocab.json")));
  g2z_tokenizer_free(tokenizer);
  test_tokenizer(t, test_path(t, "merges.txt"));
}

static void test_tokenizer_cut(g2z_test *t) {
  uint32_t state = 1;
  int wrong = 0, cuts = 0;
  g2z_encoder *encoder = test_bpe_encoder(t);
  g2z_tokens *whole = test_ids(t), *parts = test_ids(t);
  for (int i = 0; i < 20000; i++) {
    char text[64];
    size_t bytes = test_bpe_random_text(&state, text, sizeof text);
    size_t cut = g2z_encode_cut(text, bytes);
    cuts += cut > 0;
    whole->count = parts->count = 0;
    wrong += g2z_encode(encoder, text, bytes, 0, whole) != G2Z_OK ||
             g2z_encode(encoder, text, cut, 0, parts) != G2Z_OK ||
             g2z_encode(encoder, text + cut, bytes - cut, 0, parts) != G2Z_OK;
    wrong += !test_bpe_equal(whole, parts);
  }
  CHECK(t, wrong == 0 && cuts > 10000);
  CHECK(t, g2z_encode_cut("", 0) == 0 && g2z_encode_cut(" ", 1) == 0);
  CHECK(t, g2z_encode_cut("ab  c \n d", 9) == 5 && g2z_encode_cut("ab  c \n d", 5) == 2);
  CHECK(t, g2z_encode_cut("ab\xE3\x80\x80", 5) == 2); /* the character before the cut is whole */
  CHECK(t, g2z_encode_cut("ab\xE3\x80", 4) == 0);
  CHECK(t, g2z_encode_cut("a\xC2\xA0 b", 5) == 1);
}

/* White space is what Python's str.strip removes. */
static void test_text_white(g2z_test *t) {
  static const uint32_t white[][2] = { /* the characters of which str.isspace() is true */
      {0x09, 0x0D}, {0x1C, 0x20}, {0x85, 0x85}, {0xA0, 0xA0}, {0x1680, 0x1680}, {0x2000, 0x200A},
      {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
  for (uint32_t c = 1; c < 0x10000; c += c == 0xD7FF ? 0x801 : 1) {
    char text[16];
    int is_white = 0;
    size_t bytes = 0;
    for (size_t i = 0; i < G2Z_COUNT(white); i++)
      is_white |= c >= white[i][0] && c <= white[i][1];
    text[bytes++] = ' ';
    if (c >= 0x800) text[bytes++] = (char)(0xE0 | c >> 12);
    if (c >= 0x80) text[bytes++] = (char)(c < 0x800 ? 0xC0 | c >> 6 : 0x80 | (c >> 6 & 63));
    text[bytes++] = (char)(c < 0x80 ? c : 0x80 | (c & 63));
    text[bytes] = '\t';
    const size_t all = bytes + 1;
    FAIL_IF(t, g2z_text_white(text, all) != (is_white ? all : 1) ||
            g2z_text_white_end(text, all) != (is_white ? all : 1), "U+%04X", (unsigned)c);
  }
  CHECK(t, g2z_text_white("", 0) == 0 && g2z_text_white_end("", 0) == 0);
  CHECK(t, g2z_text_white(" \xE3\x80", 3) == 1 && g2z_text_white_end("\x80\x80 ", 3) == 1);
}

/* The id of these bytes; INT_MAX if they are no token. */
static int test_bpe_id(const g2z_tokenizer *tokenizer, const char *text, size_t bytes) {
  for (int id = bytes > 1 ? 256 : 0; id < g2z_tokenizer_eot(tokenizer); id++) {
    size_t length;
    const unsigned char *token = g2z_tokenizer_token(tokenizer, id, &length);
    if (length == bytes && memcmp(token, text, bytes) == 0) return id;
  }
  return INT_MAX;
}

/* The plain definition: join the neighbours that make the smallest id. */
static size_t test_bpe_plainly(const g2z_tokenizer *tokenizer, const char *piece, size_t bytes,
                               int32_t *ids) {
  size_t starts[1025], count = bytes;
  for (size_t i = 0; i <= bytes; i++) starts[i] = i;
  for (int best = 0; best < INT_MAX;) {
    size_t at = 0;
    best = INT_MAX;
    for (size_t i = 0; i + 1 < count; i++) {
      const int id = test_bpe_id(tokenizer, piece + starts[i], starts[i + 2] - starts[i]);
      if (id < best) {
        best = id;
        at = i;
      }
    }
    if (best == INT_MAX) continue;
    memmove(starts + at + 1, starts + at + 2, (count - at - 1) * sizeof *starts);
    count--;
  }
  for (size_t i = 0; i < count; i++)
    ids[i] = test_bpe_id(tokenizer, piece + starts[i], starts[i + 1] - starts[i]);
  return count;
}

static void test_tokenizer_long_pieces(g2z_test *t) {
  static const size_t sizes[] = {1, 15, 16, 127, 128, 129, 130, 300, 1000};
  static const char *const alphabets[] = {"a", "ab", "aab", "etaoin"};
  static char piece[1024], learnt[20000];
  static int32_t ids[1024];
  uint32_t state = 7;
  for (size_t i = 0; i < sizeof learnt; i++)
    learnt[i] = i % 97 == 96 ? ' ' : "etaoinaabb"[test_bpe_random(&state) % 10];
  memset(learnt, 'a', 64);
  g2z_tokenizer *tokenizer = test_bpe_learn(t, learnt, sizeof learnt, 257 + 60);
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
    for (size_t a = 0; a < sizeof alphabets / sizeof *alphabets; a++) {
      for (size_t i = 0; i < sizes[k]; i++)
        piece[i] = alphabets[a][test_bpe_random(&state) % strlen(alphabets[a])];
      g2z_tokens tokens = test_bpe_encode(t, tokenizer, piece, sizes[k], 0);
      size_t count = test_bpe_plainly(tokenizer, piece, sizes[k], ids);
      FAIL_IF(t, count != tokens.count || memcmp(ids, tokens.ids, count * sizeof *ids) != 0,
              "%zu letters of \"%s\": %zu tokens, expected %zu", sizes[k], alphabets[a],
              tokens.count, count);
    }

  /* Quadratic or recursive code would not return from this. */
  static char spaces[1000001];
  const size_t bytes = sizeof spaces;
  memset(spaces, ' ', bytes);
  spaces[bytes - 1] = 'A';
  tokenizer = test_bpe_learn(t, spaces, bytes, 300);
  CHECK(t, g2z_tokenizer_vocab(tokenizer) < 300); /* no token is longer than 1024 bytes */
  test_bpe_round_trip(t, tokenizer, spaces, bytes, spaces, bytes);
}

/* GPT-2's pattern again, one character at a time: the end of the piece that starts at p. */
static const unsigned char *test_piece_end(const unsigned char *classes, const unsigned char *p,
                                           const unsigned char *end) {
  const unsigned char *at = p, *next, *last = p;
  size_t contraction = *p == '\'' ? g2zt_contraction(p, end) : 0;
  if (contraction) return p + contraction;
  if (*p == ' ' && p + 1 < end) at = p + 1; /* one space joins the next run */
  int kind = g2zt_class(classes, at, &next);
  if (kind != G2ZT_WHITE) {
    do at = next;
    while (at < end && g2zt_class(classes, at, &next) == kind);
    return at;
  }
  for (at = p; at < end && g2zt_class(classes, at, &next) == G2ZT_WHITE; at = next) last = at;
  return at == end || last == p ? at : last; /* a run's last one splits off before a word */
}

/* The scan gives the same pieces as the pattern. */
static void test_pieces_equal(g2z_test *t, const unsigned char *classes,
                              const unsigned char *text, size_t bytes) {
  const unsigned char *end = text + bytes;
  int wrong = 0;
  for (const unsigned char *p = text, *next; p < end; p = next) {
    next = test_piece_end(classes, p, end);
    wrong += g2zt_piece_end(classes, p, end) != next;
  }
  FAIL_IF(t, wrong, "%d other pieces in \"%.*s\"", wrong, (int)bytes, (const char *)text);
}

/* Whether the validity check finds the first invalid byte after one byte of a text was changed. */
static int test_valid_equal(unsigned char *text, size_t bytes, uint32_t *state) {
  size_t at = bytes ? test_bpe_random(state) % bytes : 0, valid = 0;
  unsigned char kept = text[at];
  text[at] ^= (unsigned char)(1u << test_bpe_random(state) % 8);
  while (valid < bytes) {
    size_t step = g2z_utf8_length(text + valid, text + bytes);
    if (step == 0) break;
    valid += step;
  }
  int equal = g2zt_utf8_valid(text, bytes) == valid;
  text[at] = kept;
  return equal && g2zt_utf8_valid(text, bytes) == bytes;
}

/* Pieces of hard texts of many lengths, and of texts in which each Unicode class meets each
 * other. */
static void test_tokenizer_scan(g2z_test *t) {
  static unsigned char raw[12000], text[3 * sizeof raw];
  g2z_tokenizer *tokenizer = test_tokenizer(t, NULL);
  uint32_t state = 17;
  for (int i = 0; i < 3000; i++) {
    size_t want = test_bpe_random(&state) % (i % 50 ? 300 : sizeof raw - 64), bytes = 0;
    while (bytes < want) {
      if (test_bpe_random(&state) % 8 == 0) raw[bytes++] = (unsigned char)test_bpe_random(&state);
      else bytes += test_bpe_random_text(&state, (char *)raw + bytes, sizeof raw - bytes);
    }
    size_t used, valid = g2zt_utf8_repair(raw, bytes, text, SIZE_MAX, &used);
    test_pieces_equal(t, tokenizer->classes, text, valid);
    FAIL_IF(t, !test_valid_equal(text, valid, &state), "text %d is valid up to another byte", i);
  }
  /* Each character that has a class, and others, between two characters of each class. */
  for (uint32_t c = 0x20; c < G2ZT_CLASSIFIED; c += c < 0x3200 ? 1 : 1 + c / 512) {
    if (c >= 0xD800 && c < 0xE000) continue;
    unsigned char utf8[4];
    size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4, bytes = c % 64;
    memset(text, 'a', bytes);
    for (size_t k = length; k-- > 1;)
      utf8[k] = (unsigned char)(0x80 | (c >> 6 * (length - 1 - k) & 63));
    static const unsigned char firsts[] = {0, 0, 0xC0, 0xE0, 0xF0};
    utf8[0] = (unsigned char)(length == 1 ? c : firsts[length] | c >> 6 * (length - 1));
    for (const char *around = "a1 \n!'s"; *around; around++) {
      text[bytes++] = (unsigned char)*around;
      memcpy(text + bytes, utf8, length);
      bytes += length;
    }
    test_pieces_equal(t, tokenizer->classes, text, bytes);
  }
}

/* Ids of a text that is passed in small parts. */
static void test_bpe_stream(g2z_test *t, g2z_encoder *encoder, const char *text, size_t bytes,
                            size_t step, int flags, g2z_tokens *out) {
  size_t at = 0, seen = 0, used;
  out->count = 0;
  while (seen < bytes) {
    seen = seen + step < bytes ? seen + step : bytes;
    if (g2z_encode_part(encoder, text + at, seen - at, flags, out, &used) != G2Z_OK) break;
    if (used > seen - at) break;
    at += used;
  }
  CHECK(t, seen == bytes);
  CHECK_OK(t, g2z_encode(encoder, text + at, bytes - at, flags, out));
}

/* Training on a text in small parts gives the same vocabulary as on the whole. With merges until no
 * pair is left, the vocabulary reveals every different piece. */
static void test_bpe_learn_parts(g2z_test *t, const char *text, size_t bytes, size_t step,
                                 int flags) {
  size_t at = 0, seen = 0, used = 0;
  g2z_bpe_trainer *trainer = test_bpe_trainer(t);
  CHECK_OK(t, g2z_bpe_trainer_feed(trainer, text, bytes, flags));
  g2z_tokenizer *whole = test_bpe_finish(t, trainer, 65536);
  trainer = test_bpe_trainer(t);
  for (; seen < bytes; at += used) {
    seen = seen + step < bytes ? seen + step : bytes;
    CHECK_OK(t, g2z_bpe_trainer_feed_part(trainer, text + at, seen - at, flags, &used));
    CHECK(t, used <= seen - at);
  }
  CHECK(t, at > bytes - 100 && at <= bytes); /* no piece here has 100 bytes */
  CHECK_OK(t, g2z_bpe_trainer_feed(trainer, text + at, bytes - at, flags));
  g2z_tokenizer *parts = test_bpe_finish(t, trainer, 65536);
  CHECK(t, g2z_tokenizer_hash(whole) == g2z_tokenizer_hash(parts));
}

static void test_tokenizer_part(g2z_test *t) {
  static const char *const alphabets[] = {"etaoins", "a", "''!", "\xFF\xE6\x9D", "t<es "};
  static char text[3000];
  static char piece[2 * G2ZT_PART + 54321];
  static int32_t ids[sizeof piece];
  uint32_t state = 23;
  int wrong = 0;
  g2z_encoder *encoder = test_bpe_encoder(t);
  g2z_tokens *whole = test_ids(t), *parts = test_ids(t);
  for (int i = 0; i < 300; i++) {
    size_t bytes = 0, step = 1 + test_bpe_random(&state) % 200;
    int flags = i % 2 ? G2Z_ENCODE_ALLOW_SPECIAL : G2Z_ENCODE_DEFAULT;
    while (bytes < 2000) {
      bytes += test_bpe_random_text(&state, text + bytes, 64);
      if (test_bpe_random(&state) % 16) continue;
      bytes += (size_t)sprintf(text + bytes, "<|endoftext|>");
    }
    whole->count = 0;
    CHECK_OK(t, g2z_encode(encoder, text, bytes, flags, whole));
    test_bpe_stream(t, encoder, text, bytes, step, flags, parts);
    wrong += !test_bpe_equal(whole, parts);
    if (i < 100) test_bpe_learn_parts(t, text, bytes, step, flags);
  }
  CHECK(t, wrong == 0);
  /* Pieces larger than a part, merged at once and in parts: letters, apostrophes that begin
   * contractions only at the start of a piece, and bytes that are not UTF-8. */
  for (size_t a = 0; a < 5; a++) {
    size_t letters = strlen(alphabets[a]), bytes = sizeof piece, made = 0, used;
    for (size_t i = 0; i < bytes; i++) piece[i] = alphabets[a][test_bpe_random(&state) % letters];
    memcpy(piece + bytes - 8, "'s'll've", 8);
    whole->count = 0;
    CHECK_OK(t, g2z_encode(encoder, piece, bytes, 0, whole));
    if (a < 2) { /* all letters are one piece */
      CHECK_OK(t, g2zt_merge_part(&encoder->merger, (unsigned char *)piece, bytes - 8, 0, ids,
                                  &made, &used));
      CHECK(t, made + 3 <= whole->count && memcmp(ids, whole->ids, made * sizeof *ids) == 0);
    }
    test_bpe_stream(t, encoder, piece, bytes, 700000, 0, parts);
    CHECK(t, test_bpe_equal(whole, parts));
  }
}

/* Calls everything once; returns the status of the first call that failed. */
static g2z_status test_bpe_everything(g2z_test *t, const void *vocab, size_t bytes) {
  static char piece[400];
  g2z_tokenizer *tokenizer = NULL, *learnt = NULL;
  g2z_encoder *encoder = NULL;
  g2z_bpe_trainer *trainer = NULL;
  g2z_tokens tokens;
  char *text = NULL;
  memset(&tokens, 0, sizeof tokens);
  memset(piece, 'a', sizeof piece);
  g2z_status status = g2z_tokenizer_parse(&t->services, "vocab", vocab, bytes, &tokenizer);
  if (status == G2Z_OK) status = g2z_encoder_create(&t->services, tokenizer, &encoder);
  if (status == G2Z_OK) status = g2z_encode(encoder, "\xFFtest", 5, 0, &tokens);
  if (status == G2Z_OK) status = g2z_encode(encoder, piece, sizeof piece, 0, &tokens);
  if (status == G2Z_OK)
    status = g2z_decode(&t->services, tokenizer, tokens.ids, tokens.count, &text, &bytes);
  if (status == G2Z_OK) status = g2z_bpe_trainer_create(&t->services, &trainer);
  if (status == G2Z_OK)
    status = g2z_bpe_trainer_feed(trainer, test_bpe_text, sizeof test_bpe_text - 1, 0);
  if (status == G2Z_OK) status = g2z_bpe_trainer_finish(trainer, 300, &learnt);
  g2z_bpe_trainer_free(trainer);
  g2z_release(&t->services, text);
  g2z_tokens_free(&tokens);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(learnt);
  g2z_tokenizer_free(tokenizer);
  return status;
}

static void test_tokenizer_allocations(g2z_test *t) {
  test_bpe_files(t);
  test_sh(t, "{ %s; } > tokenizer.json", test_bpe_pairs);
  const char *json = test_read(t, "tokenizer.json");
  CHECK_NO_MEMORY(t, 20, 1000, test_bpe_everything(t, json, strlen(json)), 1);
  CHECK_NO_MEMORY(t, 20, 1000, test_bpe_everything(t, test_bpe_merges, strlen(test_bpe_merges)), 1);
}

/* Calls that fail at their first allocation, then at their second and so on until they succeed. The
 * objects stay the same, and the results are those of calls that never failed. */
static void test_tokenizer_again(g2z_test *t) {
  static const char marked[] = "the best<|endoftext|> times \xFF of the worst<|endoftext|>!";
  const char *text = test_bpe_text;
  const size_t bytes = sizeof test_bpe_text - 1, half = g2z_encode_cut(text, bytes / 2);
  const int special = G2Z_ENCODE_ALLOW_SPECIAL;
  g2z_bpe_trainer *trainer[2] = {test_bpe_trainer(t), test_bpe_trainer(t)};
  g2z_bpe_trainer *expected = test_bpe_trainer(t);
  g2z_tokenizer *tokenizer = NULL;
  CHECK_UNTIL_OK(t, 2, g2z_bpe_trainer_feed(trainer[0], text, half, 0));
  CHECK_UNTIL_OK(t, 2, g2z_bpe_trainer_feed(trainer[1], marked, sizeof marked - 1, special));
  CHECK_UNTIL_OK(t, 2, g2z_bpe_trainer_feed(trainer[1], text + half, bytes - half, 0));
  CHECK_UNTIL_OK(t, 2, g2z_bpe_trainer_add(trainer[0], trainer[1]));
  CHECK_UNTIL_OK(t, 2, g2z_bpe_trainer_finish(trainer[0], 350, &tokenizer));
  test_own(t, test_end_tokenizer, tokenizer);
  CHECK_OK(t, g2z_bpe_trainer_feed(expected, text, bytes, 0));
  CHECK_OK(t, g2z_bpe_trainer_feed(expected, marked, sizeof marked - 1, special));
  CHECK(t, g2z_tokenizer_hash(tokenizer) ==
               g2z_tokenizer_hash(test_bpe_finish(t, expected, 350)));
  g2z_encoder *encoder = test_encoder(t, tokenizer);
  g2z_tokens *ids = test_ids(t);
  CHECK_UNTIL_OK(t, 2, g2z_encode(encoder, marked, sizeof marked - 1, special, ids));
  const g2z_tokens whole = test_bpe_encode(t, tokenizer, marked, sizeof marked - 1, special);
  CHECK(t, test_bpe_equal(ids, &whole));
}

static void test_tokenizer_gpt2(g2z_test *t) {
  static const struct {
    const char *text;
    size_t count;
    int32_t ids[16];
  } cases[] = { /* from tiktoken; the pattern's corners are in tokenizer_pieces */
      {"Hello world!", 3, {15496, 995, 0}},
      {"a\n\nb", 4, {64, 198, 198, 65}},
      {"<|endoftext|>", 7, {27, 91, 437, 1659, 5239, 91, 29}},
      {"This    is  a sentence ", 9, {1212, 220, 220, 220, 318, 220, 257, 6827, 220}},
      {"we'll 12345 67,890.12", 10, {732, 1183, 17031, 2231, 8275, 11, 23, 3829, 13, 1065}},
      {"x = [i**2 for i in range(9)]\n\tx",
       16, {87, 796, 685, 72, 1174, 17, 329, 1312, 287, 2837, 7, 24, 15437, 198, 197, 87}},
      {"\xE3\x81\x93\xE3\x82\x93\xE3\x81\xAB\xE3\x81\xA1\xE3\x81\xAF",
       6, {46036, 22174, 28618, 2515, 94, 31676}},
      {"\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82",
       7, {140, 253, 21169, 18849, 38857, 16843, 20375}},
      {"\xF0\x9F\x91\x8B\xF0\x9F\x8C\x8E", 5, {41840, 233, 8582, 234, 236}},
      {"a\xC2\xA0" "b\xE3\x80\x80" "c", 6, {64, 1849, 65, 5099, 222, 66}},
      {"a\xE2\x80\x8B" "b\xEF\xBB\xBF" "c", 7, {64, 9525, 65, 171, 119, 123, 66}},
      {"---------------- ", 2, {1783, 220}},
      {"1\xD9\xA3\xC2\xBD\xE2\x85\xA7", 7, {16, 149, 96, 23141, 158, 227, 100}},
  };
  const char *path = "data/vocab.bpe";
  if (access(path, R_OK) != 0) SKIP(t, "data/vocab.bpe is not here: make vocab");
  g2z_tokenizer *tokenizer = test_tokenizer(t, path);
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 50257 && g2z_tokenizer_eot(tokenizer) == 50256);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_tokens tokens = test_bpe_encode(t, tokenizer, cases[i].text, strlen(cases[i].text), 0);
    FAIL_IF(t, tokens.count != cases[i].count ||
            memcmp(tokens.ids, cases[i].ids, tokens.count * sizeof *tokens.ids) != 0,
            "\"%s\" has other ids than GPT-2's", cases[i].text);
  }
  g2z_tokens tokens = test_bpe_encode(t, tokenizer, "\0", 1, 0);
  CHECK(t, tokens.count == 1 && tokens.ids[0] == 188);
  char spaces[4096];
  memset(spaces, ' ', sizeof spaces);
  test_bpe_round_trip(t, tokenizer, spaces, sizeof spaces, spaces, sizeof spaces);
}

/* ----- the command line of ./prepare_data -------------------------------- */

#define PREPARE_OR_SKIP(t) \
  if (access(test_prepare_program(), X_OK) != 0) SKIP(t, "./prepare_data is not built: make")

static char test_prepare_said[16384];

/* Runs `BEFORE prepare_data ARGUMENTS` in a shell in the test's directory, $D. $P is the program,
 * $R the repository. Adds --bytes unless the arguments name a vocabulary. Returns the exit code, -1
 * if it did not exit. */
#define test_prepare(t, before, ...) test_prepare_line(t, before, test_text(__VA_ARGS__))
static int test_prepare_line(g2z_test *t, const char *before, const char *words) {
  char command[4096];
  const char *program = test_prepare_program();
  const int named = strstr(words, "--vocab") || strstr(words, "--train-bpe") ||
                    strstr(words, "--bytes") || strstr(words, "--help");
  int length = snprintf(command, sizeof command, "R=$PWD; P=$(realpath '%s'); cd '%s'; D=.; "
                        "{ %s \"$P\" %s%s; } 2>&1", program, t->directory, before,
                        named ? "" : "--bytes ", words);
  CHECK(t, length < (int)sizeof command);
  return test_shell(command, test_prepare_said, sizeof test_prepare_said);
}

/* Consecutive runs of the program in one directory. */
typedef struct test_prepare_case {
  const char *before, *arguments;
  int code;
  const char *says;             /* after "=": the whole output */
} test_prepare_case;

static void test_prepare_ends(g2z_test *t, const char *before, const char *arguments, int want,
                              const char *says) {
  const int code = test_prepare_line(t, before, arguments), exact = *says == '=';
  const char *said = test_prepare_said;
  FAIL_IF(t, code != want || (exact ? strcmp(said, says + 1) != 0 : !strstr(said, says)),
          "%s prepare_data %s: exit code %d, expected \"%s\": %s", before, arguments, code, says,
          said);
}

static void test_prepare_cases(g2z_test *t, const test_prepare_case *cases, size_t count) {
  for (size_t i = 0; i < count; i++)
    test_prepare_ends(t, cases[i].before, cases[i].arguments, cases[i].code, cases[i].says);
}

/* Runs that must succeed. */
#define PREPARES(t, before, ...) test_prepare_ends(t, before, test_text(__VA_ARGS__), 0, "")

/* A shard in the test's directory holds these tokens; header: llm.c's format. */
static void test_prepare_shard(g2z_test *t, const char *name, int header, const int32_t *expected,
                               size_t count) {
  test_shard(t, "wanted", header ? G2Z_SHARD_LLMC : G2Z_SHARD_RAW, expected, (int)count);
  /* equal except for the vocabulary's hash, bytes 12 to 19 of a header */
  test_sh(t, "cmp %s %s wanted && cmp -i %d %s wanted", header ? "-n 12" : "", name,
          header ? 20 : 0, name);
}

/* Byte-level ids of a text in which # stands for <|endoftext|>; returns their count. */
static size_t test_prepare_ids(const char *text, int32_t *ids) {
  size_t count = 0;
  for (const unsigned char *c = (const unsigned char *)text; *c; c++, count++) {
    const int prints = test_byte_prints(*c);
    ids[count] = *c == '#' ? 256 : prints ? 0 : 188;
    for (int b = 0; b < *c && *c != '#'; b++) ids[count] += test_byte_prints(b) == prints;
  }
  return count;
}

/* A file that begins with valid UTF-8, followed by hard text; returns the number of bytes. */
static size_t test_prepare_text(g2z_test *t, const char *name, uint32_t state, char *text,
                                size_t limit) {
  size_t bytes = 0;
  for (; bytes < 66000; bytes += 6) memcpy(text + bytes, "plain ", 6);
  while (bytes + 64 < limit) bytes += test_bpe_random_text(&state, text + bytes, 64);
  test_write_file(t, test_path(t, name), text, bytes);
  return bytes;
}

/* Writes files into the test's directory from pairs of name and text. */
static void test_prepare_files(g2z_test *t, const char *const (*files)[2], size_t count) {
  for (size_t i = 0; i < count; i++)
    test_write_file(t, test_path(t, files[i][0]), files[i][1], strlen(files[i][1]));
}

static void test_prepare_conventions(g2z_test *t) {
  static const struct {
    const char *arguments, *file;
    int header;
    const char *tokens; /* for test_prepare_ids; NULL: the file does not exist */
  } cases[] = {
      {"--val-fraction 0 a.txt", "a_train_000000.bin", 1, "#one\n\n\ntwo 2\n\nthree"},
      {"--val-fraction 0 a.txt", "a_val_000000.bin", 1, NULL},
      {"--format raw --val-fraction 0.25 a.txt", "train.bin", 0, "one\n\n\ntwo 2\n\n#"},
      {"--format raw --val-fraction 0.25 a.txt", "val.bin", 0, "three#"},
      {"--format raw --eot none --val-fraction 0.25 --name b a.txt", "val_b.bin", 0, "three"},
      {"--split-docs blank --val-tokens 6 --name b a.txt", "b_train_000000.bin", 1,
       "#\ntwo 2\n\n#three"},
      {"--split-docs blank --val-tokens 6 a.txt", "a_val_000000.bin", 1, "#one\n\n"},
      {"--split-docs blank a.txt", "a_train_000000.bin", 1, "#\ntwo 2\n\n#three"},
      {"--split-docs blank --val-fraction 0 b.txt", "b_train_000000.bin", 1, "#\n\n\na\n\n#b"},
      {"--val-tokens 5 a.txt", "a_val_000000.bin", 1, "#one\n"},
      {"--val-tokens 5 --eot last a.txt", "a_train_000000.bin", 1, "\ntwo 2\n\nthree#"},
      {"--split-docs blank --val-tokens 7 a.txt", "a_train_000000.bin", 1, "\ntwo 2\n\n#three"},
      {"--split-docs blank --val-tokens 7 a.txt", "a_val_000000.bin", 1, "#one\n\n#"},
      {"--val-fraction 0 --shard-tokens 8 a.txt", "a_train_000000.bin", 1, "#one\n\n\nt"},
      {"--val-fraction 0 --shard-tokens 8 a.txt", "a_train_000001.bin", 1, "wo 2\n\nth"},
      {"--val-fraction 0 --shard-tokens 8 a.txt", "a_train_000002.bin", 1, "ree"},
      {"--split-docs eot --val-fraction 0 e.txt", "e_train_000000.bin", 1, "#a\n#b <|c"},
      {"--allow-special --val-fraction 0 e.txt", "e_train_000000.bin", 1, "##a\n##\n#b <|c#\n"},
      {"--split-docs eot --val-fraction 0 w.txt", "w_train_000000.bin", 1, "#a#\xC2\xA0\n\nb"},
      {"--split-docs blank --val-fraction 0 w.txt", "w_train_000000.bin", 1,
       "#a<|endoftext|>\xE3\x80\x80\xC2\x85\x1F<|endoftext|>\xC2\xA0\n\n#b"},
      {"--split-docs blank --val-fraction 0 v.txt", "v_train_000000.bin", 1, "#\xC2\xA0\n\nb"},
      {"--universal-newlines --val-fraction 0 crlf.txt", "crlf_train_000000.bin", 1, "#a\nb\nc\n"},
      {"--val-fraction 0 d.jsonl", "d_train_000000.bin", 1, "#A\"\n#second#"},
      {"--val-fraction 0 --field id d.jsonl", "d_train_000000.bin", 1, "#x1#x2#x3"},
      {"--val-fraction 0 d.jsonl d.jsonl", "d_train_000000.bin", 1, "#A\"\n#second##A\"\n#second#"},
      {"--val-fraction 0.25 a.txt a.txt", "a_val_000000.bin", 1, "#three#three"},
      {"--format raw d.jsonl", "val.bin", 0, "A\"\n#"}, /* the first of every twenty */
      {"--field id --val-tokens 6 - < d.jsonl", "stdin_train_000000.bin", 1, "#x3"},
      {"a.txt d.jsonl --val-tokens 7", "a_train_000000.bin", 1, "two 2\n\nthree#A\"\n#second#"},
  };
  static const char *const files[][2] = {
      {"a.txt", "one\n\n\ntwo 2\n\nthree"},
      {"e.txt", "<|endoftext|>a\n<|endoftext|><|endoftext|>\n<|endoftext|>b <|c<|endoftext|>\n"},
      {"b.txt", "\n\n\na\n\nb"},
      {"w.txt", "a<|endoftext|>\xE3\x80\x80\xC2\x85\x1F<|endoftext|>\xC2\xA0\n\nb"},
      {"v.txt", "\xC2\xA0\n\nb"},
      {"crlf.txt", "a\r\nb\rc\r\n"},
      {"d.jsonl",
       "{\"id\":\"x1\",\"content\":5,\"meta\":{\"text\":[1,{}]},\"text\":\"\\u0041\\\"\\n\"}\n"
       "   \n"
       "{\"content\":\"first\",\"id\":\"x2\",\"content\":\"second\"}\n"
       "{\"text\":\"no\",\"text\":\"\",\"id\":\"x3\",\"content\":\"no\"}"}};
  int32_t ids[64];
  test_prepare_files(t, files, sizeof files / sizeof *files);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int code = test_prepare(t, "rm -f *.bin;", "--out . --threads %d %s",
                            1 + (int)i % 3, cases[i].arguments);
    FAIL_IF(t, code != 0 || !strstr(test_prepare_said, " tokens"), "%s: exit code %d: %s",
            cases[i].arguments, code, test_prepare_said);
    if (!cases[i].tokens) CHECK(t, access(test_path(t, cases[i].file), F_OK) != 0);
    else test_prepare_shard(t, cases[i].file, cases[i].header, ids,
                            test_prepare_ids(cases[i].tokens, ids));
  }
}

/* The last line of output has the flags of a training on these shards. Here they are used. Other
 * sets in the directory have names that a careless pattern also matches. */
static void test_prepare_flags(g2z_test *t) {
  static const struct {
    const char *arguments, *flags;
  } cases[] = {
      {"--train-bpe 260 --out 1 --val-fraction 0.5 a.txt",
       "--train 1/a_train_000000.bin --val 1/a_val_000000.bin --vocab 1/a.bpe"},
      {"--vocab 1/a.bpe --out 2 --val-fraction 0 --name \"it's\" --shard-tokens 200 a.txt",
       "--train '2/it'\\''s_train_??????.bin' --vocab 1/a.bpe"},
      {"--bytes --out 3 --format raw --val-tokens 100 a.txt",
       "--train 3/train.bin --val 3/val.bin --vocab-size 257"},
      {"--vocab 1/a.bpe --out 2 --val-fraction 0 --name 'n[2]' --shard-tokens 200 a.txt",
       "--train '2/n\\[2\\]_train_??????.bin' --vocab 1/a.bpe"}};
  TRAIN_OR_SKIP(t);
  char *train = realpath(test_train_program(), NULL);
  test_sh(t, "seq 500 | tr '\\n' ' ' > a.txt && ln -s '%s' train", train);
  free(train);
  PREPARES(t, "", "--bytes --out 2 --val-fraction 0 --name n2 a.txt");
  PREPARES(t, "", "--bytes --out 2 --val-fraction 0 --name 'n[2]_train_1' a.txt");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_prepare_ends(t, "", cases[i].arguments, 0,
                      test_text("\nfor train   %s\n", cases[i].flags));
    test_sh(t, "./train %s --device cpu --layers 1 --channels 64 --seq 32 --batch 1 --steps 1 "
            "--run-dir r%d > out", cases[i].flags, (int)i);
  }
}

static void test_prepare_threads(g2z_test *t) {
  static char text[3000000];
  size_t bytes;
  bytes = test_prepare_text(t, "long.txt", 11, text, sizeof text);
  test_prepare_ends(t, "", "--train-bpe 400 --val-tokens 1000 --out 1 --threads 1 long.txt",
                    0, "vocabulary  400 tokens");
  g2z_tokenizer *tokenizer = test_tokenizer(t, test_path(t, "1/long.bpe"));
  CHECK(t, g2z_tokenizer_vocab(tokenizer) == 400);
  g2z_tokens expected = test_bpe_encode(t, tokenizer, text, bytes, 0);
  int32_t *ids = (int32_t *)test_memory(t, (expected.count + 1) * sizeof *ids);
  ids[0] = 399; /* the marker before the document */
  memcpy(ids + 1, expected.ids, expected.count * sizeof *ids);
  test_prepare_shard(t, "1/long_val_000000.bin", 1, ids, 1000);
  test_prepare_shard(t, "1/long_train_000000.bin", 1, ids + 1000, expected.count - 999);
  for (int threads = 2; threads < 8; threads += 5) {
    PREPARES(t, "cat long.txt |",
             "--vocab 1/long.bpe --val-tokens 1000 --out %d --threads %d -", threads, threads);
    test_prepare_shard(t, test_text("%d/stdin_train_000000.bin", threads), 1, ids + 1000,
                       expected.count - 999);
  }
}

/* Arguments after --out out, and the sentence that comes with exit code 1. */
static const char *const test_prepare_bad[][2] = {
    {"", "no input"},
    {"--colour x", "unexpected flag --colour"},
    {"--shard-tokens 99999999999999999999 a.txt", "must be from 1 to 2147483647"},
    {"--val-fraction 1 a.txt", "--val-fraction 1: must be from 0 to 0.999"},
    {"--eot middle a.txt", "must be one of first|last|none"},
    {"--bytes --vocab v a.txt", "give only one of them"},
    {"--val-fraction 0.1 --val-tokens 1 a.txt", "exclude each other"},
    {"--format raw --shard-tokens 9 a.txt", "--shard-tokens 9"},
    {"--name x/y a.txt", "--name x/y"},
    {"--field text a.txt", "--field text: "},
    {"--encode a.txt", "--encode reads standard input"},
    {"--encode", "--out has no effect with --encode: remove it"},
    {"--encode --decode", "give only one of them"},
    {"--train-bpe 300 -", "--train-bpe reads its text twice, but standard input "},
    {"--train-bpe 300 /dev/stdin < /dev/null", "twice, but /dev/stdin "},
    {"none.txt", "none.txt: No such file"},
    {"a.txt empty.txt", "empty.txt is empty: remove it from the command"},
    {"- < /dev/null", "standard input is empty"},
    {"blank.jsonl", "blank.jsonl holds no document"},
    {"--val-fraction 0.1 - < a.txt", "--val-fraction 0.1"},
    {".", "is a directory"},
    {"none.txt.gz", "none.txt.gz: No such file"},
    {"--val-fraction 0 a.txt not.gz", "not.gz: gzip -dc ended with exit code 1"},
    {"--strict --val-fraction 0 a.txt latin1.txt",
     "latin1.txt, from byte 0: invalid UTF-8: byte 0xe9 at offset 3"},
    {"--val-fraction 0 bad.jsonl", "bad.jsonl, line 3, column 12: "},
    {"--val-fraction 0 lacks.jsonl", "lacks.jsonl, line 2: no text in a field \"text\""},
    {"--val-fraction 0 --field body lacks.jsonl", "line 1: no text in a field \"body\""},
    {"--val-fraction 0 nan.jsonl", "nan.jsonl, line 1, column 7: expected"},
    {"--val-fraction 0 number.jsonl", "line 1, column 10: expected a string, found 'N'"},
    {"--val-fraction 0 bare.jsonl", "line 1, column 1: "},
    {"--train-bpe 300 --val-fraction 0 lacks.jsonl", "lacks.jsonl, line 2: no text"},
    {"--strict --val-fraction 0 lone.jsonl",
     "lone.jsonl, line 2, column 22: \\uDC00 is half of a surrogate pair"},
    /* a document in training and in validation */
    {"bare.jsonl ./bare.jsonl", "./bare.jsonl is given twice, the first time as bare.jsonl: its "
     "documents could be in training and in validation. Remove one of the two, or use "},
    {"--split-docs blank a.txt in.txt a.txt", "a.txt is given twice"},
    {"--val-tokens 2 a.txt in.txt a.txt", "a.txt is given twice"},
    {"--val-fraction 0 - - < a.txt", "it can be read only once: remove one -"},
    {"--val-tokens 99 a.txt", "for training: all 11 are in validation; give more text"},
    {"--vocab none.bpe a.txt", "none.bpe: No such file; check the path, or get GPT-2's"},
    {"--vocab '' a.txt", "cannot open \"\": No such file"},
    {"--vocab a.txt a.txt", "a.txt, line 1: "},
    {"--out a.txt/x a.txt", "a.txt"},
};

static void test_prepare_refusals(g2z_test *t) {
  static const char *const files[][2] = {
      {"a.txt", "some text\n"},
      {"in.txt", "no more than that\n"},
      {"empty.txt", ""},
      {"blank.jsonl", "\n \n"},
      {"latin1.txt", "caf\xE9\n"},
      {"not.gz", "no gzip"},
      {"bad.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"}\n{\"text\":\"c\"]\n"},
      {"lacks.jsonl", "{\"text\":\"a\"}\n{\"txt\":\"b\"}\n"},
      {"nan.jsonl", "{\"a\": nan, \"text\": \"b\"}"},
      {"number.jsonl", "{\"text\": NaN}"},
      {"bare.jsonl", "\"text\""},
      {"lone.jsonl", "{\"text\":\"\\uFFFD\",\"a\":\"\\uD800\"}\n"
                     "{\"text\":\"\\ud83d\\uDE00\\uDC00\"}\n"},
  };
  /* stopped by a signal, with a full disk, and with an output that is an input under another path,
   * or another program's file */
  static const test_prepare_case more[] = {
      {"{ cat a.txt; sleep 1; } |", "--out out - & sleep 0.3; kill -TERM $!; wait $!", 1,
       "stopped by signal 15"},
      {"mkfifo fifo;", "--out out fifo & sleep 0.3; kill -TERM $!; " /* no writer */
       "sleep 1; kill -KILL $! 2> /dev/null; wait $!", 1, "stopped by signal 15"},
      {"mkfifo fifo.gz; timeout 5", "--out out fifo.gz", 1, "fifo.gz: it is not a regular file"},
      {"for i in 1 2 3 4 5 6 7 8 9 10 11 12; do cat a.txt a.txt >> b.txt; "
       "cat b.txt >> a.txt; done; ulimit -f 64;", "--out out a.txt", 1,
       "File too large"},
      {"mkdir -p out/m.bpe.partial;", "--train-bpe 300 --out out --name m in.txt; "
       "rmdir out/m.bpe.partial; ls out", 0, "cannot create"},
      {"[ -z \"$(ls out)\" ] && mkdir \"a dir\" &&", "--out out \"a dir\"", 1, "name its files, '"},
      {"echo hello |", "--encode > /dev/full", 1, "cannot write standard output"},
      {"cp in.txt out/train.bin;", "--format raw --out out ./out/train.bin", 1,
       "out/train.bin would overwrite the input "},
      {"", "--format raw --overwrite --out out - < out/train.bin", 1,
       "out/train.bin would overwrite the input standard input"},
      {"cmp in.txt out/train.bin && mv out/train.bin out/x.bpe && ",
       "--train-bpe 300 --out out out/x.bpe", 1,
       "out/x.bpe would overwrite the input "},
      {"cmp in.txt out/x.bpe && rm out/x.bpe &&", "--help", 0, ""}};
  g2z_writer *other;
  test_prepare_files(t, files, sizeof files / sizeof *files);
  for (size_t i = 0; i < sizeof test_prepare_bad / sizeof *test_prepare_bad; i++) {
    CHECK(t, test_prepare(t, "", "--out out %s", test_prepare_bad[i][0]) == 1);
    CHECK(t, strncmp(test_prepare_said, "prepare_data: ", 14) == 0);
    CHECK_HAS(t, test_prepare_said, test_prepare_bad[i][1]);
  }
  test_prepare_cases(t, more, sizeof more / sizeof *more);
  CHECK_OK(t, g2z_writer_create(&t->services, test_path(t, "out/x_train_000000.bin"), &other));
  test_prepare_ends(t, "", "--name x --val-fraction 0 --out out in.txt", 1,
                    "another program writes");
  g2z_writer_free(other);
  CHECK(t, rmdir(test_path(t, "out")) == 0); /* nothing is left in it */
}

/* Checks that the shards of a pattern hold only `letter`; returns the number of tokens, 0 if the
 * loader refuses the shards. */
static int64_t test_prepare_set(g2z_test *t, const char *pattern, char letter) {
  const g2z_loader_config config = {test_path(t, pattern), 1, 1, 1, 0, 1, 257, G2Z_ORDER_FILE, 0};
  g2z_loader *loader = NULL;
  const int32_t *x, *y;
  if (g2z_loader_create(&t->services, &config, &loader) != G2Z_OK) return 0;
  int64_t tokens = loader->tokens;
  for (int64_t i = 1; i < loader->steps_per_epoch && tokens; i++)
    if (g2z_loader_next(loader, &x, &y) != G2Z_OK || (i > 1 && *x != letter - 33)) tokens = -1;
  g2z_loader_free(loader);
  return tokens;
}

/* On request a set of shards is replaced as a whole. After a kill at any moment, the patterns find
 * the old set, the new one, or a set that is refused. */
static void test_prepare_replaces(g2z_test *t) {
  enum { OLD = 801, NEW = 401, KILLS = 4 };
  static const char set[] = "--out k --name s --val-fraction 0 --shard-tokens 25";
  static const test_prepare_case cases[] = {
      {"", "--out 1 --val-fraction 0.5 d.jsonl", 0, ""},
      {"", "--out 1 --val-fraction 0.5 d.jsonl", 1,
       "d_train_000000.bin exists from an earlier run, with other files of its set: choose another "
       "--name or --out, or replace the whole set with --overwrite:\n"},
      {"", "--out 1 --train-bpe 300 --name d2 d.jsonl", 0, ""},
      /* a token in the text teaches no merge: five merges of "red" and "blue" */
      {"printf 'red<|endoftext|>blue<|endoftext|>red' > e.txt;",
       "--out 4 --train-bpe 300 --allow-special --val-fraction 0 e.txt", 0, "vocabulary  262 tok"},
      {"rm 1/d2_*.bin;", "--out 1 --train-bpe 300 --name d2 d.jsonl", 1, "1/d2.bpe exists"},
      {"", "--out 1 --name d2 d.jsonl", 0, ""}, /* only with --train-bpe part of the set */
      /* fewer shards, no validation, no mask: superfluous files of the set are removed, and no
       * others */
      {"", "--out 2 --name 'a b' --field a,b --val-fraction 0.5 --shard-tokens 2 p.jsonl", 0, ""},
      {"cd 2 && touch 'a b_train_7.bin' 'a b_train_x.bin' 'a b.bpe'; cd $OLDPWD;",
       "--out 2 --name 'a b' --field b --val-fraction 0 --overwrite p.jsonl; ls 2", 0,
       "\na b.bpe\na b_train_000000.bin\na b_train_7.bin\na b_train_x.bin\n"},
      {"", "--out 3 --format raw --val-fraction 0.5 d.jsonl", 0, ""},
      {"", "--out 3 --format raw --val-fraction 0 d.jsonl", 1, "3/train.bin exists"},
      {"", "--out 3 --format raw --val-fraction 0 --name x d.jsonl", 0, ""},
      {"", "--out 3 --format raw --val-fraction 0 --overwrite d.jsonl; ls 3", 0,
       "\ntrain.bin\ntrain_x.bin\n"},
      /* the output names the vocabulary; the advised command can be pasted */
      {"mkdir data; printf 'h e\\n' > data/vocab.bpe; "
       "printf hehe > \"a 'b.txt\"; \"$P\" --out 'o u t' a*b.txt 2>&1 | tail -n 1 > line; "
       "sh ./line; ls 'o u t'; rm -r data;", "--help", 0,
       "\na 'b_train_000000.bin\na 'b_val_000000.bin\n"},
      {"printf a | \"$P\" --encode;", "--help", 0, "Give --vocab FILE, or --bytes."},
      {"", "--field \"$(printf 'a\\033[2J')\" d.jsonl", 1, "no text in a field \"a?[2J\""},
      {"\"$P\" d.jsonl;", "--help", 0, "--vocab FILE, --train-bpe N to learn one, or --bytes."}};
  static const char *const files[][2] = {
      {"d.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n"},
      {"p.jsonl", "{\"a\":\"ab\",\"b\":\"c\"}\n{\"a\":\"a\",\"b\":\"c\"}\n"}};
  char text[OLD];
  int refused = 0;
  test_prepare_files(t, files, sizeof files / sizeof *files);
  test_prepare_cases(t, cases, sizeof cases / sizeof *cases);
  memset(text, 'o', OLD - 1);
  test_write_file(t, test_path(t, "old.txt"), text, OLD - 1);
  memset(text, 'n', NEW - 1);
  test_write_file(t, test_path(t, "new.txt"), text, NEW - 1);
  for (int i = 0; i < KILLS || (refused == 0 && i < 20 * KILLS); i++) {
    PREPARES(t, "rm -rf k;", "%s old.txt", set);
    CHECK(t, test_prepare_set(t, "k/s_train_*.bin", 'o') == OLD);
    /* killed after the commit has begun, at once or a little later */
    test_prepare(t, "", "%s --overwrite new.txt & n=0; while [ -s k/s_train_000000.bin ] && "
                 "[ -e k/s_train_000032.bin ] && [ $n -lt 2000000 ]; do "
                 "n=$((n + 1)); done; %s kill -9 $!; wait $!", set, i % 2 ? "sleep 0.01;" : "");
    int64_t old = test_prepare_set(t, "k/s_train_*.bin", 'o');
    int64_t new_ = test_prepare_set(t, "k/s_train_*.bin", 'n');
    CHECK(t, old == OLD || new_ == NEW || (old == 0 && new_ == 0));
    refused += old == 0 && new_ == 0;
    if (old == 0 && new_ == 0) CHECK(t, strstr(t->services.error, "is empty: prepare it again"));
    PREPARES(t, "", "%s --overwrite new.txt", set);
    CHECK(t, test_prepare_set(t, "k/s_train_*.bin", 'n') == NEW);
  }
  CHECK(t, refused > 0);
}

/* Lines as Python's JSON writers write them, and the texts that json.loads reads in "text". */
static void test_prepare_jsonl(g2z_test *t) {
  static const struct { const char *name, *lines, *text; } cases[] = {
      {"json.dumps of floats", "{\"a\": NaN, \"b\": [Infinity, -Infinity], \"text\": \"1\"}\n"
                               "{\"text\": \"2\", \"a\": {\"b\": NaN}}\n", "#1#2"},
      {"pandas", "{\"text\":\"a\\/b\",\"n\":null,\"x\":1.0e-300}\n{\"text\":\"c\",\"n\":3}\n",
       "#a/b#c"},
      {"utf-8-sig, CR LF", "\xEF\xBB\xBF{\"text\": \"a\"}\r\n\r\n{\"text\": \"b\"}\r\n", "#a#b"},
      {"ensure_ascii", "{\"text\": \"\\u00e9\\ud83d\\ude00\\ud83d\"}",
       "#\xC3\xA9\xF0\x9F\x98\x80\xEF\xBF\xBD"},
      {"ensure_ascii=False", "{\"text\": \"\xE2\x80\xA8\xC2\x85\xC3\xA9\"}",
       "#\xE2\x80\xA8\xC2\x85\xC3\xA9"},
      {"escapes", "{\"text\": \"\\\\n\\\"\\t\\u007f\\b\\f\"}", "#\\n\"\t\x7f\b\f"},
      {"a key twice", "{\"text\": \"a\", \"text\": \"b\"}", "#b"},
      {"numbers", "{\"n\": 123456789012345678901234567890, \"m\": -0.0, \"k\": 1E400, "
                  "\"text\": \"n\"}", "#n"},
      {"nesting", "{\"n\": [[[[[[[[[[[[{\"text\": \"no\"}]]]]]]]]]]]], \"text\": \"yes\"}", "#yes"},
      {"blank lines", "{\"text\":\"a\"}\n\v\xC2\xA0\xE3\x80\x80\x1C\n{\"text\":\"b\"}", "#a#b"},
      {"spaces", " { \"text\" : \"a\" } \n\t\n{\"text\":\"b\"}", "#a#b"}};
  static char text[200000];
  uint32_t state = 5;
  int32_t ids[64];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_write_file(t, test_path(t, "j.jsonl"), cases[i].lines, strlen(cases[i].lines));
    FAIL_IF(t, test_prepare(t, "", "--overwrite --out . --val-fraction 0 j.jsonl") != 0,
            "%s: %s", cases[i].name, test_prepare_said);
    test_prepare_shard(t, "j_train_000000.bin", 1, ids, test_prepare_ids(cases[i].text, ids));
  }
  /* One byte in fifty is damaged: each becomes U+FFFD, as --help states. */
  for (size_t i = 0; i < sizeof text; i++) {
    const int damaged = test_bpe_random(&state) % 50 == 0;
    text[i] = damaged ? (char)(128 + test_bpe_random(&state) % 128) : "some words "[i % 11];
  }
  test_write_file(t, test_path(t, "d.txt"), text, sizeof text);
  g2z_tokens all = test_bpe_encode(t, test_tokenizer(t, NULL), text, sizeof text, 0);
  PREPARES(t, "", "--format raw --eot none --out . --val-fraction 0 d.txt");
  test_prepare_shard(t, "train.bin", 0, all.ids, all.count);
}

static void test_prepare_packed(g2z_test *t) {
  /* five lines as `zstd --long=31 < FILE` packs them, with a window of 2 GiB */
  static const char wide[] =
      "\x28\xB5\x2F\xFD\x04\xA8\x55\x01\x00\xF0\x7B\x22\x74\x65\x78\x74\x22\x3A\x20\x22\x64\x6F"
      "\x63\x75\x6D\x65\x6E\x74\x20\x30\x22\x7D\x0A\x31\x32\x33\x34\x22\x7D\x0A\x04\x00\x40\x11"
      "\xA0\x1C\x50\x58\x4D\xA6\x18\x15\x85\x7A\x4A";
  static const char *const packers[][3] = { /* name, ending, what it says of a cut file */
      {"gzip", "gz", "unexpected end of file\"; if the file is damaged or cut short, copy"},
      {"zstd", "zst", "premature end\"; if the file is damaged or cut short, copy it again"}};
  static const char *const files[][2] = {
      {"not.gz", "no gzip"}, {"d.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n"}};
  static const test_prepare_case cases[] = { /* the packer's ending is added */
      {"", "--out 2 --val-fraction 0 --threads 2 --overwrite p.txt.", 0, ""},
      {"cmp 1/p_train_000000.bin 2/p_train_000000.bin &&", "--out 2 --val-fraction 0 "
       "d.jsonl.", 0, "2 documents, 5 tokens"},
      {"", "--out 3 --val-fraction 0 cut.", 1, "the file is damaged or cut short"},
      {"rmdir 3 && PATH=/nowhere", "--out 5 --val-fraction 0 p.txt.", 1, "cannot start "}};
  /* a gzip that is killed halfway; many files are distributed like unpacked ones; with few, the
   * last half's start is unknown */
  static const test_prepare_case gzip[] = {
      {"mkdir bin; printf '#!/bin/sh\necho text; kill -9 $$\n' > bin/gzip; "
       "chmod +x bin/gzip; PATH=bin:$PATH", "--out 3 --val-fraction 0 not.gz", 1,
       "gzip -dc was ended by signal 9"},
      {"for i in 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 20; do "
       "printf a$i | gzip -c > m$i.gz; done;", "--out 4 --val-fraction 0.5 m*.gz", 0,
       "train       10 documents, 40 tokens"},
      {"", "--out 4 --val-fraction 0.5 --overwrite m*.gz", 0,
       "val         10 documents, 40 tokens"},
      {"", "--out 4 --val-fraction 0.5 m0*.gz", 1, "is unknown until it ends"},
      {"", "--out 5 m01.gz", 0, "val         0 documents, 0 tokens. To validate on a part of this "
       "text: add --val-tokens N\n"}};
  static char text[400000];
  int found = 0;
  test_prepare_text(t, "p.txt", 29, text, sizeof text);
  test_prepare_files(t, files, 2);
  PREPARES(t, "", "--out 1 --val-fraction 0 p.txt");
  for (int i = 0; i < 2; i++) {
    const char *program = packers[i][0], *ending = packers[i][1];
    const char *pack = test_text(
        "command -v %s > /dev/null || exit 3; rm -rf 2; for f in p.txt d.jsonl; do "
        "%s -c $f > $f.%s; done; head -c 9000 p.txt.%s > cut.%s;", program, program, ending, ending,
        ending);
    if (test_prepare(t, pack, "--help") == 3) continue;
    found++;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
      test_prepare_ends(t, cases[k].before, test_text("%s%s", cases[k].arguments, ending),
                        cases[k].code, cases[k].says);
    CHECK(t, strstr(test_prepare_said, program) != NULL);
    test_prepare_ends(t, "", test_text("--out 3 --val-fraction 0 cut.%s", ending), 1,
                      packers[i][2]);
    if (i == 0) continue;
    test_write_file(t, test_path(t, "wide.jsonl.zst"), wide, sizeof wide - 1);
    test_prepare_ends(t, "", "--out 6 --val-fraction 0 wide.jsonl.zst", 0,
                      "5 documents, 55 tokens");
  }
  test_prepare_cases(t, gzip, system("command -v gzip > /dev/null") == 0 ? G2Z_COUNT(gzip) : 1);
  if (!found) SKIP(t, "neither gzip nor zstd is here");
}

/* Eight million letters without a space, then white space and words: no place to cut. The reference
 * is one call of the library. A piece without a cut is encoded while it is read, for any number of
 * threads. */
static void test_prepare_open(g2z_test *t) {
  static char text[9000000];
  const size_t bytes = sizeof text;
  uint32_t state = 31;
  size_t at = 0;
  while (at < bytes) text[at++] = "etaoinshr'd1"[test_bpe_random(&state) % 12];
  memset(text + bytes - 1000000, '\n', 999000);
  memcpy(text + bytes - 1000, "<|endoftext|> it's\n\nover", 24);
  test_write_file(t, test_path(t, "open.txt"), text, bytes);
  test_write_file(t, test_path(t, "merges.txt"), test_bpe_merges, strlen(test_bpe_merges));
  g2z_tokenizer *tokenizer = test_tokenizer(t, test_path(t, "merges.txt"));
  for (int special = 0; special < 2; special++) {
    g2z_tokens expected = test_bpe_encode(t, tokenizer, text, bytes,
                                          special ? G2Z_ENCODE_ALLOW_SPECIAL : G2Z_ENCODE_DEFAULT);
    for (int threads = 1; threads < 8; threads = threads < 3 ? threads + 1 : threads + 4) {
      PREPARES(t, "cat open.txt |", "--vocab merges.txt --val-fraction 0 --format raw --eot none "
               "%s --out %d --threads %d --overwrite -", special ? "--allow-special" : "", threads,
               threads);
      test_prepare_shard(t, test_text("%d/train.bin", threads), 0, expected.ids, expected.count);
    }
  }
  g2z_tokenizer *learnt = test_bpe_learn(t, text, bytes, 300);
  CHECK_OK(t, g2z_tokenizer_write_merges(&t->services, learnt, test_path(t, "learnt.txt")));
  for (int threads = 1; threads < 4; threads += 2)
    PREPARES(t, "", "--train-bpe 300 --val-fraction 0 --threads %d --overwrite --out l "
             "open.txt && cmp l/open.bpe learnt.txt", threads);
  test_prepare_ends(t, "", "--split-docs eot --val-fraction 0.5 --threads 2 --out e open.txt",
                    0, "train       1 document,"); /* one for validation */
}

/* 120 MB without a place to cut need little memory, also in vocabulary training. If the program
 * does not even start under the limit, the test sets none: AddressSanitizer reserves terabytes of
 * addresses. */
static void test_prepare_memory(g2z_test *t) {
  const char *limit = "ulimit -v 120000;";
  if (test_prepare(t, limit, "--help") != 0) limit = "";
  test_sh(t, "yes 'a1,b' | tr -d '\\n' | head -c 120000000 > m.txt");
  test_prepare_ends(t, limit, "--train-bpe 300 --val-fraction 0 --threads 1 --out m m.txt", 0,
                    "1 document, 90000002 tokens");
}

/* Documents of one letter, each followed by two markers, without white space. The first document is
 * long: an open job, which ends between 4 and 5 MiB, ends among the others. Each test adds a letter
 * to shift them, so that the job ends at each of the 27 bytes of a document. No end may add a
 * marker. */
static void test_prepare_markers(g2z_test *t) {
  static const char period[] = "a<|endoftext|><|endoftext|>";
  enum { PERIOD = sizeof period - 1, FIRST = 4190000, DOCUMENTS = 40000 };
  enum { LETTERS = FIRST + PERIOD, BYTES = PERIOD * DOCUMENTS };
  static char text[LETTERS + BYTES];
  static int32_t ids[LETTERS + 2 * DOCUMENTS];
  for (int i = 0; i < LETTERS; i++) ids[i] = (text[i] = 'a') - 33;
  for (int i = 0; i < BYTES; i++) text[LETTERS + i] = period[i % PERIOD];
  for (int i = 0; i < 2 * DOCUMENTS; i++) ids[LETTERS + i] = i % 2 ? 256 : 'a' - 33;
  for (size_t more = 0; more < PERIOD; more++) {
    const size_t begin = PERIOD - more;
    test_write_file(t, test_path(t, "m.txt"), text + begin, LETTERS + BYTES - begin);
    PREPARES(t, "", "--split-docs eot --eot last --val-fraction 0 --threads %zu --overwrite "
             "--out . m.txt", 1 + more % 3);
    test_prepare_shard(t, "m_train_000000.bin", 1, ids + begin, LETTERS + 2 * DOCUMENTS - begin);
  }
}

/* Sends signal 15 as soon as the program has a handler for it. */
#define TEST_TERM " & i=0; " \
                  "until [ $i = 200 ] || grep -qs 'SigCgt:.*[4-7c-f]...$' /proc/$!/status; " \
                  "do i=$((i + 1)); sleep 0.05; done; kill -TERM $!; wait $!"

static void test_prepare_filters(g2z_test *t) {
  static const char *const useless[] = {
      "train-bpe 300", "format raw", "name x", "shard-tokens 9", "val-fraction 0.1",
      "val-tokens 1", "field text", "split-docs eot", "universal-newlines", "allow-special",
      "strict", "eot last", "threads 251"};
  static const test_prepare_case cases[] = {
      {"printf 'Hi \\n' |", "--encode", 0, "=39 72 220 198\n"},
      {"printf 'a\n\nb\n\nc' |", "--encode --split-docs blank --eot last --threads 2 --strict", 0,
       "=64 198 198 256 65 198 198 256 66 256\n"},
      {"printf '39 72\\n\\t220 0' |", "--decode", 0, "=Hi !"},
      /* 4.5 MB of U+3000 are no document, although a job ends inside one of them */
      {"{ yes \"$(printf '\\343\\200\\200')\" | tr -d '\\n' | head -c 4500000; "
       "printf '<|endoftext|>a'; } |", "--encode --split-docs eot --eot last", 0, "=64 256\n"},
      {"", "--vocab merges.txt --encode < a.txt > ids; "
       "\"$P\" --vocab merges.txt --decode < ids > b.txt; cmp a.txt b.txt", 0, "="},
      {"{ yes 1 | head -5000; echo 257; } |", "--decode", 1, /* after many valid ones */
       "byte 10002: the id is above 256"},
      {"echo 1 99999999999 |", "--decode", 1, "byte 4: the id is above 256"},
      {"echo 1 -2 |", "--decode", 1, "byte 2: 0x2d is not a digit"},
      {"yes 1 | head -c 2000000000 |", "--decode > /dev/null" TEST_TERM, 1,
       "stopped by signal 15"}};
  test_help(t, "prepare_data", test_prepare_program());
  test_write_file(t, test_path(t, "merges.txt"), test_bpe_merges, strlen(test_bpe_merges));
  test_write_file(t, test_path(t, "a.txt"), test_bpe_text, strlen(test_bpe_text));
  for (size_t i = 0; i < sizeof useless / sizeof *useless; i++) /* text options: --encode too */
    for (int decode = i > 5; decode < 2; decode++) {
      const char *mode = decode ? "decode" : "encode";
      test_prepare_ends(t, "echo 1 |", test_text("--%s --%s", mode, useless[i]), 1,
                        test_text("--%.*s has no effect with --%s: remove it",
                                  (int)strcspn(useless[i], " "), useless[i], mode));
    }
  test_prepare_cases(t, cases, sizeof cases / sizeof *cases);
}
#undef TEST_TERM
