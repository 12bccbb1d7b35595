/* Prints the perplexity of a text under a trained or published GPT-2, in windows of its context:
 *     cc -O3 -march=native -fopenmp -I. -Iextras examples/score.c -o score -lm -lpthread
 *     nvcc -O1 -x cu -I. -Iextras examples/score.c -o score -lcublasLt -lnccl          (on a GPU)
 *     ./score WEIGHTS_DIRECTORY VOCABULARY TEXT_FILE */
#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "g2z_text.h"
#include <stdio.h>

int main(int argc, char **argv) {
  static g2z_services services; /* malloc, and no log */
  g2z_context *context = NULL;
  g2z_model *model = NULL;
  g2z_tokenizer *tokenizer = NULL;
  g2z_encoder *encoder = NULL;
  g2z_tokens text = {NULL, 0, 0, NULL};
  char *bytes = NULL;
  size_t count = 0, first = 0; /* bytes of the text, and of its first token */
  double sum = 0, mean;
  int64_t scored = 0;
  if (argc != 4) {
    fprintf(stderr, "use: %s WEIGHTS VOCABULARY TEXT\n", argv[0]);
    return 1;
  }
  g2z_context_config place = g2z_context_config_default(&services);
  g2z_dtype dtype = g2z_dtype_default(place.device);
  g2z_status status = g2z_context_create(&place, &context);
  if (status == G2Z_OK) status = g2z_model_open(context, argv[1], dtype, &model);
  if (status == G2Z_OK) status = g2z_tokenizer_create(&services, argv[2], &tokenizer);
  if (status == G2Z_OK && model->config.vocab_hash &&
      model->config.vocab_hash != g2z_tokenizer_hash(tokenizer))
    status = g2z_fail(&services, G2Z_BAD_ARGUMENT, "%s is not the vocabulary of %s", argv[2],
                      argv[1]);
  if (status == G2Z_OK) status = g2z_encoder_create(&services, tokenizer, &encoder);
  if (status == G2Z_OK) status = g2z_text_read(&services, argv[3], (size_t)1 << 30, &bytes, &count);
  if (status == G2Z_OK) status = g2z_text_check(&services, argv[3], 0, bytes, count, NULL);
  if (status == G2Z_OK) status = g2z_encode(encoder, bytes, count, G2Z_ENCODE_DEFAULT, &text);
  if (status == G2Z_OK && text.count < 2)
    status = g2z_fail(&services, G2Z_BAD_ARGUMENT, "%s has fewer than two tokens", argv[3]);
  while (status == G2Z_OK && scored + 1 < (int64_t)text.count) { /* every token except the first */
    int64_t left = (int64_t)text.count - 1 - scored, context_length = model->config.context;
    if (scored == 0) g2z_tokenizer_token(tokenizer, text.ids[0], &first);
    int T = (int)(left < context_length ? left : context_length);
    const int32_t *at = text.ids + scored;
    status = g2z_model_score(model, at, at + 1, 1, T, NULL, &mean);
    sum += mean * T;
    scored += T;
  }
  if (status == G2Z_OK) {
    double loss = sum / (double)scored;
    printf("%lld tokens: loss %.4f, perplexity %.2f, %.3f bits per byte\n", (long long)scored, loss,
           exp(loss), sum / log(2.0) / (double)(count - first));
  } else {
    fprintf(stderr, "score: %s\n", services.error);
  }
  g2z_release(&services, bytes);
  g2z_tokens_free(&text);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
  g2z_model_free(model);
  g2z_context_free(context);
  return status != G2Z_OK;
}
