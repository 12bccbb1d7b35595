/* Tests of extras/g2z_eval.h: the loss of a file, computed by hand, and damaged files. */

/* A model's score of a file. */
static g2z_status eval_file(g2z_model *model, const g2z_tokenizer *tokenizer, const char *path,
                            g2z_eval *out) {
  g2z_eval_set *set;
  g2z_status status = g2z_eval_open(model->services, &model->config, tokenizer, path, &set);
  if (status == G2Z_OK) status = g2z_eval_run(set, model, NULL, NULL, out);
  g2z_eval_free(set);
  return status;
}

/* Loss of ids[first .. n), each given the ids before it, from the logits. */
static double eval_by_hand(g2z_test *t, g2z_model *model, const int32_t *ids, int first, int n) {
  const int V = model->config.vocab;
  float *logits = (float *)test_memory(t, (size_t)n * (size_t)V * sizeof *logits);
  double sum = 0;
  CHECK_OK(t, g2z_model_logits(model, ids, 1, n - 1, logits));
  for (int i = first; i < n; i++) {
    const float *row = logits + (size_t)(i - 1) * (size_t)V;
    double total = 0;
    for (int v = 0; v < V; v++) total += exp((double)row[v]);
    sum += log(total) - (double)row[ids[i]];
  }
  return sum;
}

static void eval_put(uint16_t *words, size_t *at, const int32_t *ids, int count) {
  words[(*at)++] = (uint16_t)count;
  for (int i = 0; i < count; i++) words[(*at)++] = (uint16_t)ids[i];
}

/* acc_bytes divides by an ending's bytes. They do not depend on the tokens, and the space before
 * the ending is not counted. */
static void eval_check_bytes(g2z_test *t) {
  static const struct {
    const char *ending;
    double bytes;
  } cases[] = {
      {" ab", 2}, {"ab", 2}, {"  ab", 3}, {" ", 1}, {" \xC3\xA9", 2}};
  static const char *const merges[] = {"#version: 0.2\n",
                                       "#version: 0.2\n\xC4\xA0 a\n\xC4\xA0" "a b\n"};
  for (int m = 0; m < 2; m++) {
    g2z_eval_set set;
    memset(&set, 0, sizeof set);
    test_write_file(t, test_path(t, "m"), merges[m], strlen(merges[m]));
    set.tokenizer = test_tokenizer(t, test_path(t, "m"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
      const char *ending = cases[i].ending;
      g2z_tokens ids = test_bpe_encode(t, set.tokenizer, ending, strlen(ending), 0);
      CHECK_NEAR(t, g2ze_bytes(&set, ids.ids, ids.count), cases[i].bytes, 0);
    }
  }
}

/* 20 questions with four endings of one to five tokens each: acc and acc_norm computed by hand. */
static void test_eval_questions(g2z_test *t) {
  enum { QUESTIONS = 20, ENDINGS = 4 };
  int32_t head[256] = {20240522, 1, QUESTIONS, 0}, ids[64];
  uint16_t words[4096];
  size_t at = 0;
  int right = 0, right_norm = 0, tokens = 0;
  double sum = 0;
  g2z_eval huge;
  char line[200];
  memset(&huge, 0, sizeof huge);
  huge.loss = 500;
  huge.perplexity = exp(500);
  g2z_eval_text(&huge, line);
  CHECK_HAS(t, line, "loss 500.0000 | perplexity 1.4e+217");
  eval_check_bytes(t);
  g2z_model *model = inuse_open(t, "golden/tiny", G2Z_FP32);
  for (int q = 0; q < QUESTIONS; q++) {
    const size_t begin = at;
    int begins = 1 + q % 9, best = 0, best_norm = 0;
    double least = INFINITY, least_norm = INFINITY;
    test_tokens(ids, 64, 131, (uint64_t)q);
    const uint16_t head[] = {65535, 0, (uint16_t)q, 0, ENDINGS};
    memcpy(words + at, head, sizeof head);
    at += sizeof head / sizeof *head;
    eval_put(words, &at, ids, begins);
    for (int i = 0; i < ENDINGS; i++) {
      int32_t whole[20];
      int length = 1 + (q + i) % 5;
      memcpy(whole, ids, (size_t)begins * sizeof *whole);
      memcpy(whole + begins, ids + 10 + 10 * i, (size_t)length * sizeof *whole);
      eval_put(words, &at, whole + begins, length);
      double loss = eval_by_hand(t, model, whole, begins, begins + length);
      if (loss < least) {
        least = loss;
        best = i;
      }
      if (loss / length < least_norm) {
        least_norm = loss / length;
        best_norm = i;
      }
      sum += loss;
      tokens += length;
    }
    int label = q % 3 ? best : (best + 1) % ENDINGS;
    words[begin + 3] = (uint16_t)label;
    right += best == label;
    right_norm += best_norm == label;
    words[begin + 1] = (uint16_t)(2 * (at - begin));
  }
  char *file = (char *)test_memory(t, sizeof head + 2 * at);
  const char *path = test_path(t, "questions.bin");
  memcpy(file, head, sizeof head);
  memcpy(file + sizeof head, words, 2 * at);
  test_write_file(t, path, file, sizeof head + 2 * at);
  g2z_eval result;
  CHECK_OK(t, eval_file(model, NULL, path, &result));
  CHECK(t, result.questions == QUESTIONS && result.tokens == tokens);
  CHECK_NEAR(t, result.acc, (double)right / QUESTIONS, 1e-12);
  CHECK_NEAR(t, result.acc_norm, (double)right_norm / QUESTIONS, 1e-12);
  CHECK(t, right != right_norm && isnan(result.acc_bytes));
  CHECK_NEAR(t, result.loss, sum / tokens, 1e-5);
  /* Damage: a byte of a question, a field of the header, a truncated file. */
  const struct {
    size_t at;
    int byte;
    size_t cut;
    const char *says;
  } damages[] = {
      {1024, 1, 0, "is damaged at byte 1024"},     {1026, 1, 0, "is damaged at byte 1024"},
      {1030, 9, 0, "is damaged at byte 1024"},     {1032, 200, 0, "is damaged at byte 1024"},
      {4, 2, 0, "in version 2"},                   {8, 0, 0, "holds 0 questions"},
      {8, QUESTIONS + 1, 0, "is damaged at byte"}, {0, 0x5a, 1, "is damaged at byte"},
      {8, QUESTIONS - 1, 0, "continues after its last question, at byte "},
      {0, 0, sizeof head + 2 * at - 99, "ends after 99 of the header's 1024 bytes"},
      {1036, 200, 0, "has token 200"}};
  for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
    size_t bytes = sizeof head + 2 * at - damages[i].cut;
    char was = file[damages[i].at];
    if (!damages[i].cut) file[damages[i].at] = (char)damages[i].byte;
    test_write_file(t, path, file, bytes);
    g2z_status status = eval_file(model, NULL, path, &result);
    FAIL_IF(t, status == G2Z_OK || !strstr(t->services.error, damages[i].says),
            "damage %zu: status %d, \"%s\"", i, (int)status, t->services.error);
    file[damages[i].at] = was;
  }
}

/* A text of JSON that has ' in place of ". */
static const char *eval_json(const char *text) {
  char *json = (char *)(uintptr_t)test_text("%s", text);
  for (char *c = json; *c; c++)
    if (*c == '\'') *c = '"';
  return json;
}

/* Questions of one format: lines of a file as eval_json takes them, and what they must become. */
typedef struct eval_format {
  const char *name;
  const char *keys[7];          /* the members of a question, before NULL */
  const char *line[3];          /* the third: or NULL */
  const char *row[3][5];        /* "context|ending" of each ending, before NULL */
  int acc, acc_norm, acc_bytes; /* right answers by each measure */
} eval_format;

/* In the model of test_eval_formats an ending of n bytes and k of the letter z costs A (n + 1 - k)
 * + B k: its space costs A too, and the context nothing. The right answers were counted by hand:
 *   " ab" costs 3 A, " abcdef" 7 A: ab by sum, abcdef by character (1.5 A, 1.17 A) and by byte.
 *   " zzzz" costs A + 4 B = 8.05, " a" 2 A = 14.3: zzzz by sum and by the others (2 and 14.3).
 *   " éé" costs 5 A, " abc" 4 A: abc by sum, by character (2.5 A, 1.33 A), éé by byte (1.25 A).
 *   " no" costs 3 A, " yes" 4 A: no by sum, yes by the others (1.5 A, 1.33 A).
 * Endings that cost the same: the first one. */
static const eval_format eval_formats[] = {
    {"HellaSwag", {"ctx", "endings", "label"},
     {"{'ind': 1, 'ctx': 'He ran.', 'endings': ['ab', 'abcdef'], 'label': 1}",
      "{'label': '0', 'ctx': 'A \\'b\\' ', 'endings': ['zzzz', 'a']}",
      "{'ctx': '', 'endings': ['abc', '\\u00e9\\u00e9', 'abcd'], 'label': '1'}"},
     {{"He ran.| ab", "He ran.| abcdef"}, {"A \"b\"|  zzzz", "A \"b\"|  a"},
      {"<|endoftext|>| abc", "<|endoftext|>| éé", "<|endoftext|>| abcd"}}, 1, 2, 3},
    {"ARC", {"question", "choices", "text", "label", "answerKey"},
     {"{'id': 'x', 'question': 'Why?', 'choices': {'text': ['ab', 'abcdef'], 'label': ['A', 'B']}, "
      "'answerKey': 'A'}",
      "{'question': 'Q2\\n', 'choices': {'label': ['1', '2'], 'text': ['zzzz', 'a']}, 'answerKey': "
      "'1'}"},
     {{"Question: Why?\nAnswer:| ab", "Question: Why?\nAnswer:| abcdef"},
      {"Question: Q2\n\nAnswer:| zzzz", "Question: Q2\n\nAnswer:| a"}}, 2, 1, 1},
    {"PIQA", {"goal", "sol1", "sol2", "label"},
     {"{'goal': 'Go', 'sol1': 'ab', 'sol2': 'abcdef', 'label': 1}",
      "{'goal': 'Go', 'sol1': 'a', 'sol2': 'zzzz', 'label': '0'}"},
     {{"Question: Go\nAnswer:| ab", "Question: Go\nAnswer:| abcdef"},
      {"Question: Go\nAnswer:| a", "Question: Go\nAnswer:| zzzz"}}, 0, 1, 1},
    {"WinoGrande", {"sentence", "option1", "option2", "answer"},
     {"{'sentence': 'Jo saw Al as _ was here. ', 'option1': 'Jo', 'option2': 'Al', 'answer': '1'}",
      "{'sentence': 'The _zz_z', 'option1': 'a_', 'option2': 'the z', 'answer': '2'}",
      "{'sentence': '_\\u00a0is\\u2003\\f', 'option1': 'A', 'option2': 'B', 'answer': 1}"},
     {{"Jo saw Al as Jo| was here.", "Jo saw Al as Al| was here."},
      {"The a_| zz_z", "The the z| zz_z"}, {"A| is", "B| is"}}, 2, 2, 2},
    {"OpenBookQA", {"question_stem", "choices", "text", "label", "answerKey"},
     {"{'question_stem': 'So', 'choices': {'text': ['ab', 'abcdef'], 'label': ['A', 'B']}, "
      "'answerKey': ' B'}",
      "{'question_stem': 'So', 'choices': {'text': ['a', 'zzzz', 'a', 'b'], 'label': ['A', 'B', "
      "'C', 'D']}, 'answerKey': 'B'}",
      "{'question_stem': 'So\\u00a0', 'choices': {'text': ['zzzz', 'a'], 'label': ['A', 'B']}, "
      "'answerKey': '\\u3000\\tA'}"}, /* str.rstrip, str.lstrip */
     {{"So| ab", "So| abcdef"}, {"So| a", "So| zzzz", "So| a", "So| b"},
      {"So|\xC2\xA0 zzzz", "So|\xC2\xA0 a"}}, 2, 3, 3},
    {"OpenBookQA", {"question", "stem", "choices", "text", "label", "answerKey"},
     {"{'id': '7', 'question': {'stem': 'So', 'choices': [{'text': 'ab', 'label': 'A'}, {'text': "
      "'abcdef', 'label': 'B'}]}, 'answerKey': 'B'}",
      "{'question': {'choices': [{'label': 'A', 'text': 'zzzz'}, {'label': 'B', 'text': 'a'}], "
      "'stem': 'So'}, 'answerKey': 'A'}"},
     {{"So| ab", "So| abcdef"}, {"So| zzzz", "So| a"}}, 1, 2, 2},
    {"BoolQ", {"question", "passage", "answer"},
     {"{'question': 'is it', 'title': 'T', 'answer': true, 'passage': 'It is.'}",
      "{'question': 'is it', 'answer': false, 'passage': 'P'}",
      "{'question': 'is it', 'answer': true, 'passage': 'P'}"},
     {{"It is.\nQuestion: is it?\nAnswer:| no", "It is.\nQuestion: is it?\nAnswer:| yes"},
      {"P\nQuestion: is it?\nAnswer:| no", "P\nQuestion: is it?\nAnswer:| yes"},
      {"P\nQuestion: is it?\nAnswer:| no", "P\nQuestion: is it?\nAnswer:| yes"}}, 1, 2, 2}};

/* Each row's tokens are those of its context and its ending, and its losses are known. Returns the
 * sum of the losses and adds the number of predicted tokens to *tokens. */
static double eval_check_rows(g2z_test *t, const eval_format *format, g2z_eval_set *set, double A,
                              double B, int *tokens) {
  size_t at = 0;
  double sum = 0;
  for (int q = 0; q < 3; q++)
    for (int i = 0; format->row[q][i]; i++, at++) {
      const char *want = format->row[q][i], *bar = strrchr(want, '|');
      const g2ze_row *row = &set->row[at];
      char *context = NULL, *ending = NULL;
      size_t bytes, known;
      if (at >= set->rows) {
        test_fail(t, __FILE__, __LINE__, "%s has only %zu rows", format->name, set->rows);
        return sum;
      }
      const int32_t *ids = set->tokens.ids + row->at;
      CHECK_OK(t, g2z_decode(&t->services, set->tokenizer, ids, (size_t)row->first, &context,
                             &known));
      CHECK_OK(t, g2z_decode(&t->services, set->tokenizer, ids + row->first,
                             (size_t)(row->count - row->first), &ending, &bytes));
      FAIL_IF(t, known != (size_t)(bar - want) || memcmp(context, want, known) != 0 ||
              strcmp(ending, bar + 1) != 0, "%s, question %d, ending %d: \"%s|%s\"", format->name,
              q, i, context, ending);
      double cost = 0;
      for (const char *c = bar + 1; *c; c++) cost += *c == 'z' ? B : A;
      CHECK_NEAR(t, row->sum, cost, 1e-4);
      sum += cost;
      *tokens += (int)strlen(bar + 1);
      g2z_release(&t->services, context);
      g2z_release(&t->services, ending);
    }
  CHECK(t, at == set->rows);
  return sum;
}

/* A file of which a question lacks a member, and other files without questions. */
static void eval_check_refused(g2z_test *t, g2z_model *model, const g2z_tokenizer *tokenizer) {
  static const char piqa[] = "{'goal': 'a', 'sol1': 'b', 'sol2': 'c', 'label': ";
  static const char many[] = "{'ctx': 'a', 'endings': [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17], "
                             "'label': 16}";
  static const char arc[] = "{'question': 'a', 'answerKey': 'A', 'choices': {'text': ['b', 'c'], "
                            "'label': ";
  static const struct { const char *text, *end, *says; } refused[] = {
      {piqa, "-1}", "line 1: \"label\" is \"-1\", the name of 0 endings: give a file with answers"},
      {piqa, "2}", "line 1: \"label\" is \"2\", the name of 0 endings"},
      {piqa, "null}", "line 1: \"label\" is missing in this question of PIQA"},
      {piqa, "0}\n{'text': 'a'}", "line 2: \"label\" is missing in this question of PIQA"},
      {"{'text': 'a'}\n", piqa, "line 2"},
      {"{'content': 'a'}\n{'goal': 'a', 'label': 1}", "", "line 2 has neither"},
      {many, "", "line 1: the question has more than 16 endings"},
      {"{'ctx': 'a', 'endings': ['b'], 'label': 0}", "", "\"endings.1\" is missing"},
      {"{'ctx': 'a', 'endings': 'b', 'label': 0}", "", "\"endings.0\" is missing"},
      {"{'ctx': ['a'], 'endings': ['b'], 'label': 0}", "", "\"ctx\" is missing"},
      {"{'ctx': 'a', 'endings': ['c', 'd', null, 'e'], 'label': 0}", "",
       "\"endings.2\" is missing in this question of HellaSwag"},
      {"{'ctx': 'a', 'endings': ['c', 'd', ['x']], 'label': 0}", "", "\"endings.2\" is missing"},
      {"{'question': {'stem': 'a', 'choices': [{'text': 'b', 'label': 'A'}, {'text': 'c', 'label': "
       "'B'}, {'label': 'C'}]}, 'answerKey': 'A'}", "", "\"question.choices.2.text\" is missing"},
      {arc, "['A', 'B', 'C']}}", "\"choices.text.2\" is missing in this question of ARC"},
      {arc, "['A']}}", "\"choices.label.1\" is missing in this question of ARC"},
      {arc, "['A', 'A']}}", "\"answerKey\" is \"A\", the name of 2 endings"},
      {"{'sentence': 'a b', 'option1': 'c', 'option2': 'd', 'answer': '1'}", "",
       "line 1: \"sentence\" has no _"}};
  const char *path = test_path(t, "refused.jsonl");
  g2z_eval result;
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    const char *text = eval_json(test_text("%s%s\n", refused[i].text, refused[i].end));
    test_write_file(t, path, text, strlen(text));
    CHECK(t, eval_file(model, tokenizer, path, &result) != G2Z_OK);
    CHECK_HAS(t, t->services.error, "refused.jsonl, line ", refused[i].says);
  }
  for (size_t f = 0; f < sizeof eval_formats / sizeof *eval_formats; f++)
    for (int k = 0; eval_formats[f].keys[k]; k++) {
      const char *key = test_text("\"%s\"", eval_formats[f].keys[k]);
      char line[400];
      snprintf(line, sizeof line, "%s", eval_json(eval_formats[f].line[1]));
      char *at = strstr(line, key);
      CHECK(t, at != NULL);
      if (at) at[1] = 'X';
      test_write_file(t, path, line, strlen(line)); /* without a whole question before it */
      CHECK(t, eval_file(model, tokenizer, path, &result) != G2Z_OK);
      const char *text = eval_json(test_text("%s\n \n%s\n", eval_formats[f].line[0], line));
      test_write_file(t, path, text, strlen(text));
      CHECK_STATUS(t, eval_file(model, tokenizer, path, &result), G2Z_FORMAT, &t->services,
                   "refused.jsonl, line 3: \"");
      CHECK_HAS(t, t->services.error, eval_formats[f].keys[k],
                test_text("\" is missing in this question of %s", eval_formats[f].name));
    }
}

/* Questions in each published format, by a model whose losses are known: its last LayerNorm gives
 * (1, 0, ...) for any context, so the first column of wte has the logits: ln 1000 for z, else 0. */
static void test_eval_formats(g2z_test *t) {
  enum { V = 257, C = 32, CONTEXT = 64 };
  const double A = log(1256), B = log(1.256);
  float values[V * C];
  g2z_train_config config = test_config_of(1, 2, C, CONTEXT, V);
  g2z_tokenizer *tokenizer = test_tokenizer(t, NULL);
  g2z_tokens z = test_bpe_encode(t, tokenizer, "z", 1, 0);
  g2z_trainer *trainer = test_trainer_of(t, &config);
  const g2z_plan *plan = trainer->plan;
  memset(values, 0, sizeof values);
  values[z.ids[0] * C] = logf(1000);
  CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, plan->unit[plan->wte].canonical,
                                V * C, values));
  memset(values, 0, sizeof values);
  values[C] = 1; /* LayerNorm's bias follows its weight */
  CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, plan->unit[0].canonical, 2 * C,
                                values));
  g2z_model *model = inuse_of(t, trainer, G2Z_FP32);
  for (size_t f = 0; f < sizeof eval_formats / sizeof *eval_formats; f++) {
    const eval_format *format = &eval_formats[f];
    const char *path = test_at(t, "%s%zu.jsonl", format->name, f);
    const char *third = format->line[2];
    const int questions = third ? 3 : 2;
    const char *text = eval_json(test_text("%s\n%s\n\n%s", format->line[0], format->line[1],
                                           third ? third : ""));
    g2z_eval_set *set = NULL;
    g2z_eval result;
    int tokens = 0;
    test_write_file(t, path, text, strlen(text));
    CHECK_OK(t, g2z_eval_open(&t->services, &model->config, tokenizer, path, &set));
    if (!set) continue;
    CHECK_OK(t, g2z_eval_run(set, model, NULL, NULL, &result));
    const double sum = eval_check_rows(t, format, set, A, B, &tokens);
    CHECK(t, result.questions == questions && result.tokens == tokens);
    CHECK(t, isnan(result.bits_per_byte));
    CHECK_NEAR(t, result.loss, sum / tokens, 1e-5);
    CHECK_NEAR(t, result.acc, (double)format->acc / questions, 1e-12);
    CHECK_NEAR(t, result.acc_norm, (double)format->acc_norm / questions, 1e-12);
    CHECK_NEAR(t, result.acc_bytes, (double)format->acc_bytes / questions, 1e-12);
    g2z_eval_free(set);
  }
  eval_check_refused(t, model, tokenizer);
}

/* An untrained model with a context of 16, saved as "weights" and opened for use; and the tokenizer
 * of a merge list (NULL: bytes). The test owns both. */
typedef struct eval_kit {
  g2z_model *model;
  g2z_tokenizer *tokenizer;
} eval_kit;

static eval_kit eval_open(g2z_test *t, int vocab, const char *merges) {
  const g2z_train_config config = test_config_of(1, 2, 32, 16, vocab);
  const eval_kit kit = {inuse_of(t, test_trainer_of(t, &config), G2Z_FP32),
                        test_tokenizer(t, merges)};
  return kit;
}

/* A damaged shard or mask is refused with the sentence that --train and --val have for it. */
static void eval_check_damaged(g2z_test *t, g2z_model *model) {
  static const char *const cases[][2] = { /* the damage, the sentence */
      {"truncate -s -2 a.bin", "promises 40 tokens in 1104 bytes but has 1102 bytes"},
      {"truncate -s -1 a.bin", "has 1103 bytes"}, {"printf x >> a.bin", "has 1105 bytes"},
      {"truncate -s 500 a.bin", "ends after 500 of the header's 1024 bytes"},
      {"printf x > a.bin", "an odd number of bytes, 1: a token takes 2."},
      {"yes text | head -n 99 > a.bin", "holds text, not tokens"},
      {"truncate -s -1 a.mask", "a.mask has 28 bytes, but the mask of the 40 tokens of "}};
  int32_t ids[40];
  g2z_eval result;
  g2z_loader *loader;
  test_tokens(ids, 40, 257, 3);
  const char *path = test_at(t, "a.bin");
  const g2z_loader_config config = test_loader_config(path, 1, 16);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    if (strstr(cases[i][0], "a.mask")) ids[7] |= G2Z_UNCOUNTED; /* so that there is a mask */
    test_shard(t, "a.bin", G2Z_SHARD_LLMC, ids, 40);
    CHECK_OK(t, eval_file(model, NULL, path, &result));
    test_sh(t, "%s", cases[i][0]);
    CHECK_FORMAT(t, eval_file(model, NULL, path, &result), cases[i][1]);
    const char *said = test_text("%s", t->services.error);
    CHECK_FORMAT(t, g2z_loader_create(&t->services, &config, &loader), said);
  }
  test_sh(t, "rm a.bin a.mask");
}

/* A text, its documents and its tokens: three functions and a computation by hand give one loss. */
static void test_eval_texts(g2z_test *t) {
  enum { CONTEXT = 16 };
  static const char line[] = "A small text, that is longer than the context of sixteen tokens.";
  g2z_eval text, lines, packed, shard;
  int32_t ids[sizeof line];
  double sum = 0;
  const eval_kit kit = eval_open(t, 257, NULL);
  g2z_model *model = kit.model;
  const g2z_tokenizer *tokenizer = kit.tokenizer;
  g2z_tokens encoded = test_bpe_encode(t, tokenizer, line, strlen(line), G2Z_ENCODE_DEFAULT);
  ids[0] = g2z_tokenizer_eot(tokenizer);
  const int count = 1 + (int)encoded.count;
  eval_check_damaged(t, model);
  memcpy(ids + 1, encoded.ids, encoded.count * sizeof *ids);
  for (int at = 0; at + 1 < count; at += CONTEXT) {
    int n = count - at < CONTEXT + 1 ? count - at : CONTEXT + 1;
    sum += eval_by_hand(t, model, ids + at, 1, n);
  }
  test_write_file(t, test_path(t, "a.txt"), line, strlen(line));
  CHECK_OK(t, eval_file(model, tokenizer, test_path(t, "a.txt"), &text));
  CHECK(t, text.tokens == count - 1 && text.questions == 0);
  CHECK_NEAR(t, text.loss, sum / (count - 1), 1e-5);
  CHECK_NEAR(t, text.perplexity, exp(text.loss), 1e-9);
  CHECK_NEAR(t, text.bits_per_byte, sum / log(2.0) / (double)strlen(line), 1e-5);
  char many[1024];
  snprintf(many, sizeof many, "{\"text\": \"%s\"}\n\f\xC2\xA0\n{\"id\": 7, \"text\": \"%s\"}\n",
           line, line);
  test_write_file(t, test_path(t, "a.jsonl"), many, strlen(many));
  CHECK_OK(t, eval_file(model, tokenizer, test_path(t, "a.jsonl"), &lines));
  CHECK(t, lines.tokens == 2 * text.tokens && fabs(lines.loss - text.loss) < 1e-9);
  /* packed, with a field that prepare_data also reads, and one that no program reads */
  snprintf(many, sizeof many, "{\"content\": \"%s\", \"n\": NaN}\n\n{\"text\": \"%s\"}\n", line,
           line);
  test_write_file(t, test_path(t, "p.jsonl"), many, strlen(many));
  if (system("command -v gzip > /dev/null") == 0) {
    test_sh(t, "gzip p.jsonl && gzip -c a.txt > a.txt.gz");
    CHECK_OK(t, eval_file(model, tokenizer, test_path(t, "p.jsonl.gz"), &packed));
    CHECK(t, packed.tokens == lines.tokens && packed.bits_per_byte == lines.bits_per_byte);
    CHECK_OK(t, eval_file(model, tokenizer, test_path(t, "a.txt.gz"), &packed));
    CHECK(t, packed.tokens == text.tokens && packed.loss == text.loss);
    /* bombs: recognized by the beginning, or too large */
    char *all = NULL;
    size_t bytes;
    test_sh(t, "head -c 4000000 /dev/zero | gzip > 0.gz; yes | head -c 4000000 | gzip > y.gz");
    CHECK_FORMAT(t, g2z_text_read(&t->services, test_path(t, "0.gz"), 1 << 20, &all, &bytes),
                 "0.gz is binary, not text in UTF-8");
    CHECK_FORMAT(t, g2z_text_read(&t->services, test_path(t, "y.gz"), 1 << 20, &all, &bytes),
                 "y.gz unpacks to more than 1048576 bytes");
  }
  test_shard(t, "a.bin", G2Z_SHARD_LLMC, ids, count);
  CHECK_OK(t, eval_file(model, NULL, test_path(t, "a.bin"), &shard));
  CHECK(t, shard.tokens == text.tokens && fabs(shard.loss - text.loss) < 1e-9);
  CHECK(t, isnan(shard.bits_per_byte));
  static const struct { const char *name, *text, *says; } refused[] = {
      {"b.txt", "", "b.txt has no token to predict: it is too short"},
      {"b.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"a\"}\n", "line 2 has neither \"text\" nor"},
      {"c.jsonl", "{\"text\": \"a\"\n", "c.jsonl, line 1"},
      {"d.bin", "abab", "has token 25185, but the model only 257"},
      {"c.bin", "ab", "no shard has two tokens, so there is none to predict"},
      {"e.txt", "\xff\xfe" "a", "e.txt is text in UTF-16, not text in UTF-8; convert it to text: "},
      {"g.gz", "no gzip", "g.gz: gzip -dc ended with exit code 1"}};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    test_write_file(t, test_path(t, refused[i].name), refused[i].text, strlen(refused[i].text));
    g2z_status status = eval_file(model, tokenizer, test_path(t, refused[i].name), &text);
    CHECK(t, status != G2Z_OK && strstr(t->services.error, refused[i].says));
  }
  CHECK_BAD(t, eval_file(model, NULL, test_path(t, "a.txt"), &text), "--vocab");
}

typedef struct eval_heard {
  char text[4096];
  size_t bytes;
} eval_heard;
static int eval_hear(void *user, const char *text, size_t bytes) {
  eval_heard *heard = (eval_heard *)user;
  memcpy(heard->text + heard->bytes, text, bytes);
  heard->bytes += bytes;
  return 0;
}

/* Files are opened, scored and continued with every allocation failing once: the calls that are made
 * again have the same results. */
static void test_eval_no_memory(g2z_test *t) {
  static const char *const files[][2] = {
      {"a.txt", "some text of several words"}, {"a.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n"},
      {"q.jsonl", "{\"goal\": \"a\", \"sol1\": \"b\", \"sol2\": \"c d\", \"label\": 1}\n"},
      {"s.bin", NULL}};
  const eval_kit kit = eval_open(t, 257, NULL);
  int32_t ids[40];
  test_tokens(ids, 40, 257, 3);
  ids[7] |= G2Z_UNCOUNTED;
  test_shard(t, "s.bin", G2Z_SHARD_LLMC, ids, 40);
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    const char *path = test_at(t, "%s", files[i][0]);
    g2z_eval expected, result;
    g2z_eval_set *set = NULL;
    if (files[i][1]) test_write_file(t, path, files[i][1], strlen(files[i][1]));
    CHECK_OK(t, eval_file(kit.model, kit.tokenizer, path, &expected));
    const long live = t->allocations;
    CHECK_UNTIL_OK(t, 4, g2z_eval_open(&t->services, &kit.model->config, kit.tokenizer, path, &set));
    CHECK_UNTIL_OK(t, 1, g2z_eval_run(set, kit.model, NULL, NULL, &result));
    CHECK(t, result.loss == expected.loss && result.tokens == expected.tokens);
    CHECK(t, result.questions == expected.questions && result.acc == expected.acc);
    g2z_eval_free(set);
    CHECK(t, t->allocations == live);
  }
  const g2z_sampling sampling = g2z_sampling_default();
  static eval_heard heard;
  CHECK_UNTIL_OK(t, 3, g2z_write_text(kit.model, kit.tokenizer, "some", 9, &sampling, eval_hear,
                                      &heard));
}

/* A mask with more bits than one read takes, and a shard that has grown since it was read. */
static void eval_check_mask(g2z_test *t) {
  enum { MANY = 40000 };
  int32_t *ids = (int32_t *)test_memory(t, MANY * sizeof *ids);
  const char *path = test_path(t, "many.bin");
  test_mask_shard(t, path, G2Z_SHARD_RAW, 0, MANY, 1);
  for (int i = 0; i < MANY; i++) ids[i] = i;
  CHECK_FORMAT(t, g2z_shard_mask(&t->services, path, ids, MANY - 1),
               "had 39999 tokens when it was read and has 40000 now");
  CHECK_OK(t, g2z_shard_mask(&t->services, path, ids, MANY));
  for (int i = 0; i < MANY; i++) CHECK(t, ids[i] == i + (mask_counts(i) ? 0 : G2Z_UNCOUNTED));
}

/* The loss of a shard with a mask covers only tokens that count: by hand and in validation. In the
 * first window all tokens count, in the third none, in the others some. */
static void test_eval_masks(g2z_test *t) {
  enum { CONTEXT = 16, V = 61, COUNT = 4 * CONTEXT + 1 };
  g2z_train_config config = test_config_of(1, 2, 32, CONTEXT, V);
  g2z_eval result;
  int32_t ids[COUNT], marked[COUNT];
  double sum = 0, validated = 0;
  int counted = 0;
  eval_check_mask(t);
  config.batch = 1;
  test_tokens(ids, COUNT, V, 3);
  for (int i = 0; i < COUNT; i++) {
    const int counts = (i <= CONTEXT || i % 5 > 1) && (i <= 2 * CONTEXT || i > 3 * CONTEXT);
    marked[i] = ids[i] | (counts ? 0 : G2Z_UNCOUNTED);
  }
  g2z_trainer *trainer = test_trainer_of(t, &config);
  g2z_model *model = inuse_of(t, trainer, G2Z_FP32);
  for (int i = 1; i < COUNT; i++) {
    const int begin = (i - 1) / CONTEXT * CONTEXT;
    if (marked[i] & G2Z_UNCOUNTED) continue;
    sum += eval_by_hand(t, model, ids + begin, i - begin, i - begin + 1);
    counted++;
  }
  const char *path = test_at(t, "a.bin");
  for (int format = 0; format < 2; format++) {
    test_shard(t, "a.bin", (g2z_shard_format)format, marked, COUNT);
    CHECK_OK(t, eval_file(model, NULL, path, &result));
    CHECK(t, result.tokens == counted && counted > 2 * CONTEXT && counted < 3 * CONTEXT);
    CHECK_NEAR(t, result.loss, sum / counted, 1e-5);
    CHECK_NEAR(t, result.perplexity, exp(result.loss), 1e-9);
  }
  g2z_loader_config data = test_loader_config(path, 1, CONTEXT);
  data.vocab = V;
  CHECK_OK(t, g2z_trainer_validate(trainer, test_loader(t, &data), 4, NULL, NULL, &validated));
  CHECK_NEAR(t, result.loss, validated, 1e-6);
  /* A mask that leaves out all tokens, and another shard's mask. */
  for (int i = 0; i < COUNT; i++) marked[i] |= G2Z_UNCOUNTED;
  test_shard(t, "a.bin", G2Z_SHARD_RAW, marked, COUNT);
  CHECK_BAD(t, eval_file(model, NULL, path, &result), "the masks exclude all of them");
  ids[0]++;
  test_write_file(t, path, ids, 2 * COUNT);
  CHECK_FORMAT(t, eval_file(model, NULL, path, &result), "a.mask is the mask of another shard");
}

/* Appends `bytes` bytes as g2z_utf8_show shows them. */
static void eval_show(eval_heard *want, const void *text, size_t bytes) {
  const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
  while (at < end) {
    const g2z_shown shown = g2z_utf8_show(at, end);
    eval_hear(want, shown.text, shown.bytes);
    at += shown.used;
  }
}

/* Counts its calls and wants no more text. */
static int eval_stop(void *user, const char *text, size_t bytes) {
  (void)text;
  (void)bytes;
  ++*(int *)user;
  return 1;
}

/* An untrained byte model writes any byte. The prompt and the output, shown byte by byte, look like
 * both shown at once. */
static void test_eval_writes(g2z_test *t) {
  enum { TOKENS = 600 };
  static const char prompt[] = "\xc3\xa9 \x1b[2J \xff \xe2\x82";
  char *text;
  int32_t ids[64 + TOKENS];
  size_t bytes, controls = 0;
  g2z_sampling sampling = g2z_sampling_default();
  static eval_heard heard, want;
  heard.bytes = want.bytes = 0;
  const eval_kit kit = eval_open(t, 257, NULL);
  g2z_model *model = kit.model;
  const g2z_tokenizer *tokenizer = kit.tokenizer;
  const g2z_tokens begin = test_bpe_encode(t, tokenizer, prompt, strlen(prompt), 0);
  size_t count = begin.count;
  memcpy(ids, begin.ids, count * sizeof *ids);
  sampling.stop = g2z_tokenizer_eot(tokenizer);
  CHECK_OK(t, g2z_model_generate(model, 1, ids, count + TOKENS, &count, &sampling, NULL, NULL));
  if (ids[count - 1] == g2z_tokenizer_eot(tokenizer)) count--;
  CHECK(t, count > begin.count + 50);
  CHECK_OK(t, g2z_decode(&t->services, tokenizer, ids + begin.count, count - begin.count, &text,
                         &bytes));
  eval_show(&want, prompt, strlen(prompt));
  eval_show(&want, text, bytes);
  CHECK_OK(t, g2z_write_text(model, tokenizer, prompt, TOKENS, &sampling, eval_hear, &heard));
  CHECK(t, heard.bytes == want.bytes && memcmp(heard.text, want.text, want.bytes) == 0);
  for (size_t i = 0; i < heard.bytes; i++) controls += heard.text[i] == 0x1b;
  CHECK(t, controls == 0);
  /* Nothing follows the call that stopped, however long the prompt is. */
  static char sentence[600];
  int calls = 0;
  memset(sentence, 'x', sizeof sentence - 1);
  CHECK_OK(t, g2z_write_text(model, tokenizer, sentence, 9, &sampling, eval_stop, &calls));
  CHECK(t, calls == 1);
  g2z_release(&t->services, text);
}

/* The loss that `output` contains for a file, after the first `after`; -1: none. */
static double eval_printed(const char *output, const char *after, const char *file) {
  const char *at = strstr(output, after);
  at = at ? strstr(at, file) : NULL;
  at = at ? strstr(at, " | loss ") : NULL;
  return at ? strtod(at + strlen(" | loss "), NULL) : -1;
}

/* ./train scores files during training and after it. Three ranks of ZeRO stage 3 print the scores
 * of the weights that they save, except for rounding in the fourth decimal. */
static void test_eval_train(g2z_test *t) {
  static const char *const files[] = {"x_val_0.bin", "a.txt"};
  char output[16384];
  TRAIN_OR_SKIP(t);
  test_run_shard(t, "x_train_0.bin", 2000);
  test_run_shard(t, "x_val_0.bin", 300);
  test_write_file(t, test_path(t, "a.txt"), "a text of few bytes", 19);
  const char *dir = test_at(t, "run"), *shard = test_at(t, "x_val_0.bin");
  const char *text = test_at(t, "a.txt");
  snprintf(output, sizeof output, "%s", test_trains(t, 0,
           "--train '%s' --vocab-size 257 --layers 2 --channels 32 --heads 4 --context 16 --batch 3 "
           "--steps 4 --lr 1e-2 --eval %s %s --eval-every 2 --device cpu --ranks 3 --zero 3 "
           "--run-dir %s", test_at(t, "x_train_*.bin"), shard, text, dir));
  const char *scored = test_trains(t, 0, "--init-from %s/weights --eval %s %s --device cpu", dir,
                                   shard, text);
  for (int i = 0; i < 2; i++) {
    double early = eval_printed(output, "step 2/4 | /", files[i]);
    double late = eval_printed(output, "step 4/4 | /", files[i]);
    CHECK(t, early > 0 && late > 0 && early != late);
    CHECK_NEAR(t, eval_printed(scored, "", files[i]), late, 1.5e-4);
  }
  CHECK_HAS(t, scored, " bits per byte | 19 tokens | ");
  test_sh(t, "grep -q 'Loss of --eval' %s/report.html && grep -q 'loss, x_val_0.bin' "
          "%s/report.html && grep -q 'loss, a.txt' %s/report.html", dir, dir, dir);
  /* Two files with the same name get two curves. */
  test_sh(t, "mkdir p q && echo one > p/e.txt && echo two > q/e.txt");
  const char *small = test_text("--train '%s' --vocab-size 257 --layers 1 --channels 8 --heads 1 "
                                "--context 8 --batch 1 --steps 1 --device cpu --sample-tokens 0",
                                test_at(t, "x_train_*.bin"));
  test_trains(t, 0, "%s --eval '%s' '%s' --run-dir %s", small, test_at(t, "p/e.txt"),
              test_at(t, "q/e.txt"), test_at(t, "pq"));
  test_sh(t, "for f in p q; do grep -q \"eval_file.*/$f/e.txt\" pq/metrics.jsonl && "
             "grep -aq \"eval/.*/$f/e.txt\" pq/events.out.* || exit 1; done");
}

/* The examples as `make examples` builds them: score's loss is that of the text's tokens in a shard,
 * per byte after the first token; generate continues the prompt; both refuse missing files. */
static void test_examples(g2z_test *t) {
  static const char text[] = "A text that is a little longer than one context of this model.";
  char output[4096];
  g2z_eval shard;
  if (access("build/examples/score", X_OK) || access("build/examples/generate", X_OK) ||
      access("prepare_data", X_OK))
    SKIP(t, "the examples are not built: make examples prepare_data");
  PREPARES(t, "", "--train-bpe 290 --out $D --name e $R/README.md");
  const char *dir = t->directory;
  test_write_file(t, test_path(t, "b.txt"), text, strlen(text));
  const eval_kit kit = eval_open(t, 300, test_at(t, "e.bpe"));
  g2z_tokens ids = test_bpe_encode(t, kit.tokenizer, text, strlen(text), G2Z_ENCODE_DEFAULT);
  test_shard(t, "b.bin", G2Z_SHARD_LLMC, ids.ids, (int)ids.count);
  CHECK_OK(t, eval_file(kit.model, NULL, test_path(t, "b.bin"), &shard));
#define EXAMPLE(format, ...) test_shell(test_text("build/examples/" format " 2>&1", __VA_ARGS__), \
                                        output, sizeof output)
  CHECK(t, EXAMPLE("score %s/weights %s/e.bpe %s/b.txt", dir, dir, dir) == 0);
  CHECK_HAS(t, output, test_text("%lld tokens: loss ", (long long)shard.tokens), test_text(
      ", %.3f bits per byte\n", shard.loss * (double)shard.tokens / log(2) / (strlen(text) - 1.0)));
  CHECK_NEAR(t, test_number(t, output, " tokens: loss "), shard.loss, 1e-4);
  CHECK(t, EXAMPLE("generate %s/weights %s/e.bpe 'A text' 20 0", dir, dir) == 0);
  CHECK(t, strncmp(output, "A text", 6) == 0 && strlen(output) >= 6 + 1 + 1);
  CHECK(t, EXAMPLE("score %s/none %s/e.bpe x", dir, dir) && strncmp(output, "score: ", 7) == 0);
  /* Inputs without a score: a text of one token, and a file that is not text. */
  test_write_file(t, test_path(t, "one.txt"), "A", 1);
  test_write_file(t, test_path(t, "wide.txt"), "\xff\xfe" "A\0B\0", 6);
  static const char *const texts[][2] = {{"one.txt", "one.txt has fewer than two tokens"},
                                         {"wide.txt", "wide.txt is text in UTF-16"}};
  for (int i = 0; i < 2; i++) {
    CHECK(t, EXAMPLE("score %s/weights %s/e.bpe %s/%s", dir, dir, dir, texts[i][0]) == 1);
    CHECK_HAS(t, output, texts[i][1]);
  }
#undef EXAMPLE
  /* The compile commands in the sources work. */
  CHECK(t, test_shell("for f in generate score; do $(sed -n 's/^ \\*     cc -O3/cc "
                      "-fsyntax-only/p' examples/$f.c) || exit 1; done 2>&1", output, sizeof output) == 0);
}
