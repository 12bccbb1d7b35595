/* Continues a prompt with a trained or published GPT-2, and prints each token as it is generated:
 *     cc -O3 -march=native -fopenmp -I. -Iextras examples/generate.c -o generate -lm -lpthread
 *     nvcc -O1 -x cu -I. -Iextras examples/generate.c -o generate -lcublasLt -lnccl    (on a GPU)
 *     ./generate WEIGHTS_DIRECTORY VOCABULARY "Once upon a time" [TOKENS [TEMPERATURE]] */
#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "g2z_text.h"
#include <stdio.h>

static int print_token(void *user, int sequence, int32_t token) {
  size_t bytes;
  const unsigned char *text = g2z_tokenizer_token((const g2z_tokenizer *)user, token, &bytes);
  (void)sequence;
  fwrite(text, 1, bytes, stdout);
  return fflush(stdout) != 0; /* the output was closed: stop */
}

int main(int argc, char **argv) {
  static g2z_services services; /* malloc, and no log */
  g2z_context *context = NULL;
  g2z_model *model = NULL;
  g2z_tokenizer *tokenizer = NULL;
  g2z_encoder *encoder = NULL;
  g2z_tokens text = {NULL, 0, 0, NULL};
  if (argc < 4 || argc > 6) {
    fprintf(stderr, "use: %s WEIGHTS VOCAB PROMPT [TOKENS [TEMPERATURE]]\n", argv[0]);
    return 1;
  }
  g2z_context_config place = g2z_context_config_default(&services);
  g2z_dtype dtype = g2z_dtype_default(place.device);
  g2z_sampling sampling = g2z_sampling_default();
  sampling.temperature = argc > 5 ? strtof(argv[5], NULL) : 0.8f;
  sampling.seed = (uint64_t)time(NULL);
  g2z_status status = g2z_context_create(&place, &context);
  if (status == G2Z_OK) status = g2z_model_open(context, argv[1], dtype, &model);
  if (status == G2Z_OK) status = g2z_tokenizer_create(&services, argv[2], &tokenizer);
  if (status == G2Z_OK && model->config.vocab_hash &&
      model->config.vocab_hash != g2z_tokenizer_hash(tokenizer))
    status = g2z_fail(&services, G2Z_BAD_ARGUMENT, "%s is not the vocabulary of %s", argv[2],
                      argv[1]);
  if (status == G2Z_OK) status = g2z_encoder_create(&services, tokenizer, &encoder);
  if (status == G2Z_OK)
    status = g2z_encode(encoder, argv[3], strlen(argv[3]), G2Z_ENCODE_DEFAULT, &text);
  size_t more = argc > 4 ? strtoul(argv[4], NULL, 10) : 100;
  size_t room = text.count + more;
  if (status == G2Z_OK) status = g2z_tokens_reserve(&services, &text, room);
  if (status == G2Z_OK) printf("%s", argv[3]);
  if (status == G2Z_OK) {
    sampling.stop = g2z_tokenizer_eot(tokenizer);
    status = g2z_model_generate(model, 1, text.ids, room, &text.count, &sampling, print_token,
                                tokenizer);
  }
  puts("");
  if (status != G2Z_OK) fprintf(stderr, "generate: %s\n", services.error);
  g2z_tokens_free(&text);
  g2z_encoder_free(encoder);
  g2z_tokenizer_free(tokenizer);
  g2z_model_free(model);
  g2z_context_free(context);
  return status != G2Z_OK;
}
