/* The smallest program that trains a GPT-2: token shards in, losses out, a checkpoint every 100
 * steps and at the end. The next start resumes from the newest. Put gpt2_zero.h next to it and, for
 * nvcc, gpt2_zero_kernels.cuh; it needs nothing else:
 *     cc -O3 -march=native -fopenmp -x c minimal.cu -o minimal -lm -lpthread
 *     nvcc -O1 -gencode arch=compute_90a,code=sm_90a minimal.cu -o minimal -lcublasLt -lnccl
 *     ./minimal 'data/text_train_*.bin' [STEPS [BATCH [SEQ [LAYERS [CHANNELS]]]]]
 *     mpirun -np 8 ./minimal 'data/text_train_*.bin' 1000 32 1024 12 768 */
#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include <stdio.h>

/* Returns argument i, or `otherwise` if it is not given; 0: it is no number from 1 to a million. */
static int number(int argc, char **argv, int i, int otherwise) {
  if (i >= argc) return otherwise;
  char *end = NULL;
  long value = strtol(argv[i], &end, 10);
  if (*end || value < 1 || value > 1000000) return 0;
  return (int)value;
}

int main(int argc, char **argv) {
  static g2z_services services; /* malloc, and no log */
  static g2z_report report;
  g2z_context *context = NULL;
  g2z_trainer *trainer = NULL;
  char directory[64];
  g2z_status status = G2Z_OK;
  int there, last = 0; /* last: the step of the newest checkpoint */
  int steps = number(argc, argv, 2, 200);
  int batch = number(argc, argv, 3, 4);
  int seq = number(argc, argv, 4, 64);
  int layers = number(argc, argv, 5, 4);
  int channels = number(argc, argv, 6, 128);
  if (argc < 2 || argc > 7 || !steps || !batch || !seq || !layers || !channels) {
    fprintf(stderr, "use: %s SHARDS [STEPS [BATCH [SEQ [LAYERS [CHANNELS]]]]]\n", argv[0]);
    return 1;
  }
  g2z_context_config place = g2z_context_config_default(&services); /* from the launcher */
  g2z_train_config config = g2z_train_config_default(place.device);
  config.train_glob = argv[1];
  config.model.layers = layers;
  config.model.channels = channels;
  config.model.heads = channels % 64 ? 1 : channels / 64;
  config.model.context = config.seq = seq;
  config.batch = batch;
  config.optimizer.steps = steps;
  config.optimizer.warmup = steps / 10;
  for (int step = 1; step <= steps && status == G2Z_OK; step++) {
    snprintf(directory, sizeof directory, "minimal-step-%06d", step);
    status = g2z_is_there(&services, directory, &there);
    if (there) last = step;
  }
  snprintf(directory, sizeof directory, "minimal-step-%06d", last);
  if (status == G2Z_OK) status = g2z_context_create(&place, &context);
  if (status == G2Z_OK) status = g2z_trainer_create(context, &config, &trainer);
  if (status == G2Z_OK && last > 0) status = g2z_trainer_load(trainer, directory);
  for (int step = last + 1; step <= steps && status == G2Z_OK; step++) {
    status = g2z_trainer_step(trainer, &report); /* reports the step before; */
    for (int final = 0; final < 2 && status == G2Z_OK; final++) { /* the flush reports the last */
      if (final && step == steps) status = g2z_trainer_flush(trainer, &report);
      if (context->rank == 0 && report.loss_step == step - 1 + final && report.loss_step > last)
        printf("step %d: loss %.4f\n", (int)report.loss_step, (double)report.loss);
    }
    snprintf(directory, sizeof directory, "minimal-step-%06d", step);
    if (status == G2Z_OK && (step % 100 == 0 || step == steps))
      status = g2z_trainer_save(trainer, directory);
  }
  if (status != G2Z_OK) fprintf(stderr, "minimal: %s\n", services.error);
  g2z_trainer_free(trainer);
  g2z_context_free(context);
  return status != G2Z_OK;
}
