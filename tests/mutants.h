/* Deliberate faults. G2Z_MUTANT=NAME breaks one thing in every device and communicator that a test
 * opens. Ops and collectives are tables of functions: a wrapped entry calls the real one and
 * changes its inputs or outputs. G2Z_MUTANT_DEVICE, "cpu" or "cuda", selects the backend. For each
 * mutant, tests/mutants.sh runs the tests in its row; a mutant that passes all of them shows a gap
 * in the tests. A graph can record all changes: they are copies and zeros in the device's queue. */

/* Columns: the name; the tests that should catch it, an op's and those of whole models; the fault.
 * Each is a pair of lists: on a CPU, and on a GPU. A GPU's list begins with types in brackets if the
 * fault exists only in these types. */
#define TESTS(cpu, gpu) cpu, gpu
#define OP_NONE TESTS("", "")
#define OP_EMBED TESTS("ops_embedding ", "cuda_embed ")
#define OP_NORM TESTS("ops_layernorm ", "cuda_layernorm ")
#define OP_LINEAR TESTS("ops_linear ", "cuda_linear ")
#define OP_ATTENTION TESTS("ops_attention ", "cuda_attention ")
#define OP_HEAD TESTS("ops_head ", "cuda_head ")
#define OP_DECIDE TESTS("ops_decide ", "cuda_optimizer ")
#define OP_ADAMW TESTS("ops_adamw ", "cuda_optimizer ")
#define OP_MUON TESTS("ops_muon ", "cuda_muon ")
#define IN_GOLDEN TESTS("golden_gradients", "cuda_golden")
#define IN_SLOPE TESTS("golden_gradients finite_differences", "cuda_golden")
#define IN_STEPS TESTS("golden_adamw", "cuda_golden")
#define IN_DROPOUT TESTS("finite_differences", "cuda_gradients")
#define IN_MICRO TESTS("accumulation", "cuda_gradients")
#define IN_TRAINED TESTS("muon_trainer", "")
#define IN_SKIPPED TESTS("spikes_trainer muon_ranks", "cuda_spikes")
#define IN_WRITTEN TESTS("model_generates", "cuda_next")
#define IN_ZERO TESTS("zero_equal", "cuda_zero")
#define IN_EXCHANGED TESTS("muon_ranks", "cuda_zero_muon")
#define MUTANT_LIST(X)                                                                             \
  X(embed_last_row, OP_EMBED, IN_GOLDEN, "the last token's embedding is zero")                     \
  X(embed_position, OP_EMBED, IN_GOLDEN, "the second token has the first one's embedding")         \
  X(embed_mask, OP_EMBED, IN_DROPOUT, "forward drops other elements than backward")                \
  X(embed_bwd_row, OP_EMBED, IN_GOLDEN, "the last token gives wte and wpe no gradient")            \
  X(embed_bwd_overwrite, OP_EMBED, IN_MICRO, "wpe's gradient forgets the micro-steps before")      \
  X(embed_bwd_mask, OP_EMBED, IN_DROPOUT, "wte's gradient has another dropout mask than forward")  \
  X(embed_add_part, OP_EMBED, TESTS("zero_alone", "cuda_gradients"),                               \
    "the last part of wte's rows gets nothing")                                                    \
  X(norm_mean, OP_NORM, IN_GOLDEN, "a row is centred for backward with another row's mean")        \
  X(norm_rstd, OP_NORM, IN_GOLDEN, "a row is scaled for backward with another row's deviation")    \
  X(norm_row, OP_NORM, IN_GOLDEN, "the last row is the first one's")                               \
  X(norm_weight, OP_NORM, IN_SLOPE, "LayerNorm's weight gets no gradient")                         \
  X(norm_bias, OP_NORM, IN_SLOPE, "LayerNorm's bias gets no gradient")                             \
  X(norm_dbias, OP_NORM, IN_GOLDEN, "the projection before LayerNorm gets no bias gradient")       \
  X(norm_bwd_row, OP_NORM, IN_GOLDEN, "backward leaves out the last row")                          \
  X(norm_overwrite, OP_NORM, IN_MICRO, "LayerNorm's gradients forget the micro-steps before")      \
  X(norm_accumulate, OP_NORM, IN_STEPS, "LayerNorm's gradients keep those of the last step")       \
  X(norm_residual, OP_NORM, IN_GOLDEN, "the residual's gradient is overwritten")                   \
  X(norm_mask, OP_NORM, IN_DROPOUT, "the projection's gradient has another dropout mask")          \
  X(linear_bias, OP_LINEAR, IN_GOLDEN, "a product adds the first row of its weights as bias")      \
  X(linear_residual, OP_LINEAR, IN_GOLDEN, "a product leaves the residual out")                    \
  X(linear_fp8, OP_NONE, TESTS("ops_linear fp8", "(fp16 bf16) cuda_linear cuda_fp8"),              \
    "a forward product rounds nothing to e4m3")                                                    \
  X(linear_clamped, OP_NONE, TESTS("ops_linear fp8", "(fp16 bf16) cuda_fp8"),                      \
    "numbers that 8 bits clamp do not count")                                                      \
  X(linear_row, OP_LINEAR, IN_GOLDEN, "a product leaves the last row as it was")                   \
  X(linear_mask, OP_LINEAR, IN_DROPOUT, "a projection drops other elements than backward")         \
  X(gelu_slope, OP_LINEAR, IN_GOLDEN, "the last row's GELU has slope zero")                        \
  X(data_slope, OP_LINEAR, IN_SLOPE, "backward leaves GELU's slope out")                           \
  X(data_fp8, OP_NONE, TESTS("ops_linear fp8", "(fp16) cuda_linear cuda_fp8"),                     \
    "a data gradient rounds nothing to 8 bits")                                                    \
  X(weight_fp8, OP_NONE, TESTS("ops_linear", "(fp16) cuda_linear cuda_fp8"),                       \
    "a weight gradient rounds nothing to 8 bits")                                                  \
  X(data_row, OP_LINEAR, IN_GOLDEN, "the last row's data gradient stays as it was")                \
  X(data_bias, OP_LINEAR, IN_SLOPE, "fc gets no bias gradient")                                    \
  X(data_overwrite, OP_LINEAR, IN_MICRO, "fc's bias gradient forgets the micro-steps before")      \
  X(weight_zero, OP_LINEAR, IN_SLOPE, "matrices get no gradient")                                  \
  X(weight_row, OP_LINEAR, IN_GOLDEN, "weight gradients leave out the last token")                 \
  X(weight_overwrite, OP_LINEAR, IN_MICRO, "weight gradients forget the micro-steps before")       \
  X(weight_accumulate, OP_LINEAR, IN_STEPS, "weight gradients keep those of the last step")        \
  X(attention_mask, OP_ATTENTION, TESTS("golden_gradients causality", "cuda_golden"),              \
    "the first query sees what the second one sees")                                               \
  X(attention_head, OP_ATTENTION, IN_GOLDEN, "in the last row one head is another")                \
  X(attention_lse, OP_ATTENTION, IN_GOLDEN, "a row's softmax is normalised as its neighbour's")    \
  X(attention_dropout, OP_ATTENTION, IN_DROPOUT, "forward drops other weights than backward")      \
  X(attention_dq, OP_ATTENTION, IN_SLOPE, "queries get no gradient")                               \
  X(attention_dk, OP_ATTENTION, IN_SLOPE, "keys get no gradient")                                  \
  X(attention_dv, OP_ATTENTION, IN_SLOPE, "values get no gradient")                                \
  X(attention_dv_tail, OP_ATTENTION, IN_GOLDEN, "the last key's value gets no gradient")           \
  X(attention_dq_head, OP_ATTENTION, IN_GOLDEN, "the first head's queries get no gradient")        \
  X(attention_bias, OP_ATTENTION, IN_SLOPE, "qkv gets no bias gradient")                           \
  X(attention_overwrite, OP_ATTENTION, IN_MICRO, "qkv's bias forgets the micro-steps before")      \
  X(head_scale, OP_HEAD, IN_GOLDEN, "the loss scale is applied twice")                             \
  X(head_dh, OP_HEAD, IN_GOLDEN, "the LM head sends no gradient to the model")                     \
  X(head_dwte, OP_HEAD, IN_SLOPE, "the LM head gives wte no gradient")                             \
  X(head_padding, OP_HEAD, IN_GOLDEN, "rows of padding reach the softmax")                         \
  X(head_row, OP_HEAD, IN_GOLDEN, "the last token has no loss")                                    \
  X(head_overwrite, OP_HEAD, IN_MICRO, "the LM head's part forgets the micro-steps before")        \
  X(head_fp8, OP_NONE, TESTS("ops_head fp8", "(fp16 bf16) cuda_head cuda_fp8"),                    \
    "logits come from operands that are not rounded to e4m3")                                      \
  X(head_fp8_gradients, OP_NONE, TESTS("ops_head", "(fp16) cuda_head"),                            \
    "the LM head's gradients come from numbers of 16 bits")                                        \
  X(norm_of_grads, OP_NONE, TESTS("ops_sums_and_casts zero_equal", "cuda_optimizer cuda_golden"),  \
    "the norm leaves the last range out")                                                          \
  X(decide_tokens, OP_DECIDE, IN_GOLDEN, "the loss is the mean over twice as many tokens")         \
  X(decide_clip, OP_DECIDE, IN_STEPS, "gradients are not clipped")                                 \
  X(decide_spikes, OP_NONE, TESTS("ops_spikes spikes_trainer", "cuda_spikes"),                     \
    "no spike is skipped")                                                                         \
  X(adamw_correction, OP_ADAMW, IN_STEPS, "AdamW corrects no bias")                                \
  X(adamw_decay, OP_ADAMW, IN_STEPS, "weights do not decay")                                       \
  X(adamw_moments, OP_ADAMW, IN_STEPS, "AdamW's two moments change places")                        \
  X(adamw_rate, OP_ADAMW, IN_TRAINED, "with Muon, AdamW has Muon's learning rate")                 \
  X(adamw_random, OP_NONE, TESTS("ops_moments", "cuda_optimizer"),                                 \
    "moments in bf16 round alike in every step")                                                   \
  X(adamw_range, OP_ADAMW, IN_STEPS, "the last range of weights stays as it was")                  \
  X(momentum_zero, OP_MUON, IN_TRAINED, "Muon has no momentum")                                    \
  X(momentum_range, OP_MUON, TESTS("muon_trainer", "cuda_zero_muon"),                              \
    "the last range has the direction of an earlier step")                                         \
  X(momentum_skip, OP_MUON, IN_SKIPPED, "a skipped step changes Muon's momentum")                  \
  X(orthogonal_tall, OP_MUON, TESTS("ops_orthogonalize muon_trainer", ""),                         \
    "a tall matrix is read as a wide one")                                                         \
  X(orthogonal_whole, OP_MUON, IN_TRAINED, "queries, keys and values are one matrix")              \
  X(orthogonal_last, OP_MUON, IN_TRAINED, "the last shape's matrices stay as they were")           \
  X(muon_scale, OP_MUON, IN_TRAINED, "an update's size does not depend on its matrix")             \
  X(muon_decay, OP_MUON, IN_TRAINED, "weights that Muon updates do not decay")                     \
  X(muon_range, OP_MUON, IN_TRAINED, "the last range of Muon's weights stays as it was")           \
  X(muon_skip, OP_MUON, IN_SKIPPED, "a skipped step changes weights that Muon updates")            \
  X(cast_tail, OP_NONE, TESTS("ops_sums_and_casts", "cuda_cast cuda_gradients"),                   \
    "a cast to gradients leaves out the last eight")                                               \
  X(add_overwrite, OP_NONE, TESTS("ops_sums_and_casts zero_equal", "cuda_sums"),                   \
    "the shard of sums forgets the micro-steps before")                                            \
  X(next_embed, OP_NONE, IN_WRITTEN, "the last of several sequences does not get its next token")  \
  X(next_attention, OP_NONE, IN_WRITTEN, "the last of several sequences attends to nothing new")   \
  X(draw_seed, OP_NONE, TESTS("model_context", "cuda_draw"),                                       \
    "tokens are drawn with another seed")                                                          \
  X(gather_once, OP_NONE, IN_ZERO, "one all-gather or broadcast is left out")                      \
  X(reduce_once, OP_NONE, IN_ZERO, "one reduction is left out")                                    \
  X(reduce_stale, OP_NONE, IN_ZERO, "every seventh sum is added to what lay in its place")         \
  X(reduce_overwrite, OP_NONE, IN_ZERO, "sums forget the micro-steps before")                      \
  X(rows_once, OP_NONE, IN_ZERO, "the other ranks' rows of wte's gradient stay away once")         \
  X(verdict_own, OP_NONE, IN_ZERO, "each rank decides by its own verdict alone")                   \
  X(exchange_home, OP_NONE, IN_EXCHANGED, "rank 0's matrices are sent to rank 1")                  \
  X(exchange_part, OP_NONE, IN_EXCHANGED, "a part of a matrix is an earlier step's")               \
  X(exchange_back, OP_NONE, IN_EXCHANGED, "a part of an update is an earlier step's")

typedef enum mutant {
  MUTANT_NONE,
#define X(name, op, whole, about) MUTANT_##name,
  MUTANT_LIST(X)
#undef X
  MUTANT_COUNT
} mutant;

static const struct { const char *name, *about, *tests[2]; } mutants[] = {
    {"none", "", {"", ""}},
#define JOIN(...) JOIN_PAIRS(__VA_ARGS__)
#define JOIN_PAIRS(op_cpu, op_gpu, cpu, gpu) {op_cpu cpu, op_gpu gpu}
#define X(name, op, whole, about) {#name, about, JOIN(op, whole)},
    MUTANT_LIST(X)
#undef X
};

/* This process's mutant for a kind of device. */
static mutant mutant_of(g2z_device_kind kind) {
  const char *name = getenv("G2Z_MUTANT"), *device = getenv("G2Z_MUTANT_DEVICE");
  const char *here = kind == G2Z_DEVICE_CUDA ? "cuda" : "cpu";
  if (!name || !device || strcmp(device, here) != 0) return MUTANT_NONE;
  for (int i = 1; i < MUTANT_COUNT; i++)
    if (strcmp(name, mutants[i].name) == 0) return (mutant)i;
  fprintf(stderr, "no mutant is called \"%s\": ./test_gpt2 --mutants lists them\n", name);
  exit(2);
}

/* A device's table with wrapped entries, and the real one. A test may put its own table on top. */
typedef struct mutated {
  const g2z_device *device;
  g2z_ops ops;
  const g2z_ops *right;
  mutant is;
  g2z_step_state *state;         /* device memory for changed copies */
  g2z_update_range *range;
} mutated;

static mutated *mutated_devices[64]; /* NULL after the last */

static mutated **mutated_place(const g2z_device *device) {
  mutated **place = mutated_devices;
  while (*place && (*place)->device != device) place++;
  return place;
}
static mutated *mutated_of(const g2z_device *device) { return *mutated_place(device); }

#define RIGHT(device) mutated_of(device)->right
#define IS(device, name) (mutated_of(device)->is == MUTANT_##name)

/* ----- changes in the device's queue ------------------------------------- */

static size_t mutant_bytes(const g2z_device *device, g2z_dtype dtype) {
  int half = dtype == G2Z_FP16 || dtype == G2Z_BF16;
  return device->kind == G2Z_DEVICE_CUDA && half ? 2 : 4;
}

static g2z_status mutant_copy(g2z_device *device, void *to, const void *from, size_t bytes) {
  if (device->kind == G2Z_DEVICE_CPU) {
    memmove(to, from, bytes);
    return G2Z_OK;
  }
#ifdef __CUDACC__
  G2Z__CUDA(device, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice,
                                    g2z__cuda_of(device)->stream));
#endif
  return G2Z_OK;
}

/* Replaces elements [at, at + count) of type `dtype` by the elements at `from`. */
static g2z_status mutant_move(g2z_device *device, g2z_dtype dtype, void *to, size_t at, size_t from,
                              size_t count) {
  size_t size = mutant_bytes(device, dtype);
  return mutant_copy(device, (char *)to + at * size, (char *)to + from * size, count * size);
}

/* Zeroes columns [at, at + count) of the first `rows` rows of `stride` elements. */
static g2z_status mutant_zero(g2z_device *device, g2z_dtype dtype, void *to, size_t rows,
                              size_t stride, size_t at, size_t count) {
  size_t size = mutant_bytes(device, dtype);
  if (!to || !rows) return G2Z_OK;
  if (device->kind == G2Z_DEVICE_CPU) {
    for (size_t r = 0; r < rows; r++)
      memset((char *)to + (r * stride + at) * size, 0, count * size);
    return G2Z_OK;
  }
#ifdef __CUDACC__
  G2Z__CUDA(device, cudaMemset2DAsync((char *)to + at * size, stride * size, 0, count * size, rows,
                                      g2z__cuda_of(device)->stream));
#endif
  return G2Z_OK;
}

/* ----- ops ---------------------------------------------------------------- */

static void mutant_close(g2z_device *device) {
  mutated *m = mutated_of(device);
  if (m->state) m->right->release(device, m->state);
  if (m->range) m->right->release(device, m->range);
  m->right->close(device);
  mutated **place = mutated_place(device), **last = place;
  while (last[1]) last++;
  *place = *last;
  *last = NULL;
  free(m);
}

static g2z_status mutant_embed_fwd(g2z_device *device, const g2z_embed_fwd *given) {
  g2z_embed_fwd op = *given;
  size_t N = (size_t)op.B * (size_t)op.T, c = (size_t)op.C;
  if (IS(device, embed_mask)) op.dropout.seed ^= 1;
  G2Z_TRY(RIGHT(device)->embed_fwd(device, &op));
  if (IS(device, embed_last_row))
    return mutant_zero(device, device->dtype, op.out, 1, 0, (N - 1) * c, c);
  if (IS(device, embed_position) && N > 1)
    return mutant_move(device, device->dtype, op.out, c, 0, c);
  return G2Z_OK;
}

static g2z_status mutant_embed_bwd(g2z_device *device, const g2z_embed_bwd *given) {
  g2z_embed_bwd op = *given;
  size_t c = (size_t)op.C, last = (size_t)op.B * (size_t)op.T - 1;
  if (IS(device, embed_bwd_overwrite)) op.mode = G2Z_OVERWRITE;
  if (IS(device, embed_bwd_mask)) op.dropout.seed ^= 1;
  if (IS(device, embed_bwd_row))
    G2Z_TRY(mutant_zero(device, device->dtype, (void *)op.dout, 1, 0, last * c, c));
  return RIGHT(device)->embed_bwd(device, &op);
}

static g2z_status mutant_embed_add(g2z_device *device, const g2z_embed_add *given) {
  g2z_embed_add op = *given;
  if (IS(device, embed_add_part) && op.count > 0) op.count--;
  return RIGHT(device)->embed_add(device, &op);
}

static g2z_status mutant_layernorm_fwd(g2z_device *device, const g2z_layernorm_fwd *given) {
  g2z_layernorm_fwd op = *given;
  size_t last = (size_t)op.N - 1, c = (size_t)op.C;
  G2Z_TRY(RIGHT(device)->layernorm_fwd(device, &op));
  if (IS(device, norm_mean)) return mutant_move(device, G2Z_FP32, op.mean, last, 0, 1);
  if (IS(device, norm_rstd)) return mutant_move(device, G2Z_FP32, op.rstd, last, 0, 1);
  if (IS(device, norm_row)) return mutant_move(device, device->dtype, op.y, last * c, 0, c);
  return G2Z_OK;
}

static g2z_status mutant_layernorm_bwd(g2z_device *device, const g2z_layernorm_bwd *given) {
  g2z_layernorm_bwd op = *given;
  const size_t c = (size_t)op.C;
  if (IS(device, norm_mask)) op.dropout.seed ^= 1;
  if (IS(device, norm_overwrite)) op.mode = G2Z_OVERWRITE;
  if (IS(device, norm_accumulate)) op.mode = G2Z_ACCUMULATE;
  if (IS(device, norm_residual)) op.res_mode = G2Z_OVERWRITE;
  if (IS(device, norm_bwd_row) && op.N > 1) op.N--;
  G2Z_TRY(RIGHT(device)->layernorm_bwd(device, &op));
  if (IS(device, norm_weight)) return mutant_zero(device, device->grad_dtype, op.dw, 1, 0, 0, c);
  if (IS(device, norm_bias)) return mutant_zero(device, device->grad_dtype, op.db, 1, 0, 0, c);
  if (IS(device, norm_dbias)) return mutant_zero(device, device->grad_dtype, op.dbias, 1, 0, 0, c);
  return G2Z_OK;
}

static g2z_status mutant_linear_fwd(g2z_device *device, const g2z_linear_fwd *given) {
  g2z_linear_fwd op = *given;
  const size_t o = (size_t)op.O;
  if (IS(device, linear_bias)) op.bias = op.w;
  if (IS(device, linear_residual)) op.residual = NULL;
  if (IS(device, linear_mask)) op.dropout.seed ^= 1;
  if (IS(device, linear_row) && op.N > 1) op.N--;
  if (IS(device, linear_fp8)) op.narrow_x = NULL;
  if (IS(device, linear_clamped)) device->clamped_inputs = NULL;
  G2Z_TRY(RIGHT(device)->linear_fwd(device, &op));
  if (IS(device, gelu_slope))
    return mutant_zero(device, device->dtype, op.slope, 1, 0, ((size_t)op.N - 1) * o, o);
  return G2Z_OK;
}

static g2z_status mutant_linear_bwd_data(g2z_device *device, const g2z_linear_bwd_data *given) {
  g2z_linear_bwd_data op = *given;
  if (IS(device, data_overwrite)) op.mode = G2Z_OVERWRITE;
  if (IS(device, data_fp8)) op.narrow = NULL;
  if (IS(device, data_row) && op.N > 1) op.N--;
  if (IS(device, data_slope)) op.slope = op.dbias = NULL;
  G2Z_TRY(RIGHT(device)->linear_bwd_data(device, &op));
  if (IS(device, data_bias))
    return mutant_zero(device, device->grad_dtype, op.dbias, 1, 0, 0, (size_t)op.K);
  return G2Z_OK;
}

static g2z_status mutant_linear_bwd_weight(g2z_device *device, const g2z_linear_bwd_weight *given) {
  g2z_linear_bwd_weight op = *given;
  if (IS(device, weight_overwrite)) op.mode = G2Z_OVERWRITE;
  if (IS(device, weight_accumulate)) op.mode = G2Z_ACCUMULATE;
  if (IS(device, weight_row) && op.N > 1) op.N--;
  if (IS(device, weight_fp8)) op.narrow_dy = NULL;
  G2Z_TRY(RIGHT(device)->linear_bwd_weight(device, &op));
  if (IS(device, weight_zero))
    return mutant_zero(device, device->grad_dtype, op.dw, 1, 0, 0, (size_t)op.K * (size_t)op.O);
  return G2Z_OK;
}

static g2z_status mutant_attention_fwd(g2z_device *device, const g2z_attention_fwd *given) {
  g2z_attention_fwd op = *given;
  const size_t c = (size_t)op.C, HS = (size_t)(op.C / op.NH);
  const size_t last = (size_t)op.B * (size_t)op.T - 1;
  if (IS(device, attention_dropout)) op.dropout.seed ^= 1;
  G2Z_TRY(RIGHT(device)->attention_fwd(device, &op));
  if (IS(device, attention_mask) && op.T > 1)
    return mutant_move(device, device->dtype, op.out, 0, c, c);
  if (IS(device, attention_head) && op.NH > 1)
    return mutant_move(device, device->dtype, op.out, last * c, last * c + HS, HS);
  if (IS(device, attention_lse) && op.T > 1) return mutant_move(device, G2Z_FP32, op.lse, 1, 0, 1);
  return G2Z_OK;
}

static g2z_status mutant_attention_bwd(g2z_device *device, const g2z_attention_bwd *given) {
  g2z_attention_bwd op = *given;
  const size_t c = (size_t)op.C, N = (size_t)op.B * (size_t)op.T, HS = (size_t)(op.C / op.NH);
  if (IS(device, attention_overwrite)) op.mode = G2Z_OVERWRITE;
  G2Z_TRY(RIGHT(device)->attention_bwd(device, &op));
  if (IS(device, attention_dq)) return mutant_zero(device, device->dtype, op.dqkv, N, 3 * c, 0, c);
  if (IS(device, attention_dk)) return mutant_zero(device, device->dtype, op.dqkv, N, 3 * c, c, c);
  if (IS(device, attention_dv))
    return mutant_zero(device, device->dtype, op.dqkv, N, 3 * c, 2 * c, c);
  if (IS(device, attention_dq_head))
    return mutant_zero(device, device->dtype, op.dqkv, N, 3 * c, 0, HS);
  if (IS(device, attention_dv_tail))
    return mutant_zero(device, device->dtype, op.dqkv, 1, 0, (N - 1) * 3 * c + 2 * c, c);
  if (IS(device, attention_bias))
    return mutant_zero(device, device->grad_dtype, op.dbias, 1, 0, 0, 3 * c);
  return G2Z_OK;
}

static g2z_status mutant_head_loss(g2z_device *device, const g2z_head_loss *given) {
  g2z_head_loss op = *given;
  const size_t c = (size_t)op.C;
  const g2z_fp8 fp8 = device->fp8;
  if (IS(device, head_scale)) op.dloss *= 2;
  if (IS(device, head_fp8)) device->fp8 = G2Z_FP8_NONE;
  if (IS(device, head_fp8_gradients) && fp8) device->fp8 = G2Z_FP8_LOGITS;
  if (IS(device, head_padding)) op.V = op.Vp;
  if (IS(device, head_row) && op.N > 1) op.N--;
  if (IS(device, head_overwrite)) op.mode = G2Z_OVERWRITE;
  g2z_status status = RIGHT(device)->head_loss(device, &op);
  device->fp8 = fp8;
  G2Z_TRY(status);
  if (IS(device, head_dh))
    return mutant_zero(device, device->dtype, op.dh, 1, 0, 0, (size_t)op.N * c);
  if (IS(device, head_dwte))
    return mutant_zero(device, op.dwte_dtype, op.dwte, 1, 0, 0, (size_t)op.Vp * c);
  return G2Z_OK;
}

static g2z_status mutant_embed_next(g2z_device *device, const g2z_embed_next *given) {
  g2z_embed_next op = *given;
  if (IS(device, next_embed) && op.B > 1) op.B--;
  return RIGHT(device)->embed_next(device, &op);
}

static g2z_status mutant_attention_next(g2z_device *device, const g2z_attention_next *given) {
  g2z_attention_next op = *given;
  if (IS(device, next_attention) && op.B > 1) op.B--;
  return RIGHT(device)->attention_next(device, &op);
}

static g2z_status mutant_draw(g2z_device *device, const g2z_draw *given) {
  g2z_draw op = *given;
  g2z_sampling other = *op.sampling;
  if (IS(device, draw_seed)) other.seed++;
  op.sampling = &other;
  return RIGHT(device)->draw(device, &op);
}

static g2z_status mutant_cast_grad(g2z_device *device, void *to, const float *from, size_t n) {
  if (IS(device, cast_tail)) n = n > 8 ? n - 8 : 0;
  return RIGHT(device)->cast_grad(device, to, from, n);
}

static g2z_status mutant_grad_add(g2z_device *device, void *to, const void *from, g2z_write mode,
                                  size_t n) {
  if (IS(device, add_overwrite)) mode = G2Z_OVERWRITE;
  return RIGHT(device)->grad_add(device, to, from, mode, n);
}

static g2z_status mutant_grad_sumsq(g2z_device *device, double *sum, const void *grads,
                                    const g2z_range *ranges, int count) {
  if (IS(device, norm_of_grads)) count--;
  return RIGHT(device)->grad_sumsq(device, sum, grads, ranges, count);
}

static g2z_status mutant_decide(g2z_device *device, g2z_step_state *state,
                                const g2z_verdict *verdict, const g2z_optimizer_config *config,
                                int64_t tokens) {
  g2z_optimizer_config other = *config;
  if (IS(device, decide_tokens)) tokens *= 2;
  if (IS(device, decide_clip)) other.clip = 0;
  if (IS(device, decide_spikes)) other.skip_spikes = 0;
  return RIGHT(device)->decide(device, state, verdict, &other, tokens);
}

/* *other reads a copy of the step's state. */
static g2z_status mutant_state(g2z_device *device, g2z_update *other) {
  mutated *m = mutated_of(device);
  if (!m->state) G2Z_TRY(m->right->allocate(device, sizeof *m->state, (void **)&m->state));
  G2Z_TRY(mutant_copy(device, m->state, other->state, sizeof *m->state));
  other->state = m->state;
  return G2Z_OK;
}

static g2z_status mutant_adamw(g2z_device *device, const g2z_update *update, size_t begin,
                               size_t end) {
  mutated *m = mutated_of(device);
  g2z_optimizer_config config = *update->config;
  g2z_update other = *update;
  other.config = &config;
  if (IS(device, adamw_decay)) config.weight_decay = 0;
  if (IS(device, adamw_rate)) config.adam_lr = config.lr;
  if (IS(device, adamw_moments)) other.m = update->v, other.v = update->m;
  if (IS(device, adamw_range) && end > begin) end--;
  if (IS(device, adamw_random)) {
    G2Z_TRY(mutant_state(device, &other));
    G2Z_TRY(m->right->zero(device, &m->state->step, sizeof m->state->step));
  }
  if (IS(device, adamw_correction)) { /* a late step needs no correction */
    G2Z_TRY(mutant_state(device, &other));
    /* The bits of a loss scale, such as 0x44800000, read as a huge number of steps. */
    G2Z_TRY(mutant_copy(device, &m->state->applied, &m->state->loss_scale, sizeof(float)));
  }
  return m->right->adamw(device, &other, begin, end);
}

static g2z_status mutant_momentum(g2z_device *device, void *u, const g2z_update *update,
                                  size_t begin, size_t end) {
  g2z_optimizer_config config = *update->config;
  g2z_update other = *update;
  other.config = &config;
  if (IS(device, momentum_zero)) config.momentum = 0;
  if (IS(device, momentum_range) && end > begin) end--;
  if (IS(device, momentum_skip)) {
    G2Z_TRY(mutant_state(device, &other));
    G2Z_TRY(mutant_zero(device, G2Z_FP32, &mutated_of(device)->state->skip, 1, 0, 0, 1));
  }
  return RIGHT(device)->momentum(device, u, &other, begin, end);
}

static g2z_status mutant_orthogonalize(g2z_device *device, void *area, const g2z_matrices *shapes,
                                       int count, void *work, size_t work_bytes) {
  g2z_matrices other[16];
  if (count > 16) return G2Z_BAD_ARGUMENT;
  for (int i = 0; i < count; i++) {
    other[i] = shapes[i];
    if (IS(device, orthogonal_tall) && shapes[i].rows > shapes[i].columns) {
      other[i].rows = shapes[i].columns;
      other[i].columns = shapes[i].rows;
    }
    if (IS(device, orthogonal_whole)) other[i].matrices = 1;
  }
  if (IS(device, orthogonal_last) && count > 0) count--;
  return RIGHT(device)->orthogonalize(device, area, other, count, work, work_bytes);
}

static g2z_status mutant_muon(g2z_device *device, const void *o, const g2z_update *update,
                              size_t begin, size_t end) {
  mutated *m = mutated_of(device);
  g2z_optimizer_config config = *update->config;
  g2z_update other = *update;
  other.config = &config;
  if (IS(device, muon_decay)) config.weight_decay = 0;
  if (IS(device, muon_range) && end > begin) end--;
  if (IS(device, muon_skip)) {
    G2Z_TRY(mutant_state(device, &other));
    G2Z_TRY(mutant_zero(device, G2Z_FP32, &m->state->skip, 1, 0, 0, 1));
  }
  if (!IS(device, muon_scale)) return m->right->muon(device, o, &other, begin, end);
  if (!m->range) G2Z_TRY(m->right->allocate(device, sizeof *m->range, (void **)&m->range));
  for (; begin < end; begin++) { /* the learning rate in place of the scale */
    g2z_update_range range = update->host_ranges[begin];
    range.scale = 1;
    other.ranges = m->range;
    other.host_ranges = &range;
    G2Z_TRY(mutant_copy(device, m->range, update->ranges + begin, sizeof *m->range));
    G2Z_TRY(mutant_copy(device, &m->range->scale, &update->state->lr, sizeof(float)));
    G2Z_TRY(m->right->muon(device, o, &other, 0, 1));
  }
  return G2Z_OK;
}

static void mutate_device(g2z_device *device) {
  mutant is = device ? mutant_of(device->kind) : MUTANT_NONE;
  mutated *m = is ? (mutated *)calloc(1, sizeof *m) : NULL;
  if (!m) return;
  mutated **place = mutated_place(device);
  if (place + 1 == mutated_devices + G2Z_COUNT(mutated_devices)) abort();
  *place = m;
  m->device = device;
  m->right = device->ops;
  m->ops = *device->ops;
  m->is = is;
  m->ops.close = mutant_close;
  m->ops.embed_fwd = mutant_embed_fwd;
  m->ops.embed_bwd = mutant_embed_bwd;
  m->ops.embed_add = mutant_embed_add;
  m->ops.layernorm_fwd = mutant_layernorm_fwd;
  m->ops.layernorm_bwd = mutant_layernorm_bwd;
  m->ops.linear_fwd = mutant_linear_fwd;
  m->ops.linear_bwd_data = mutant_linear_bwd_data;
  m->ops.linear_bwd_weight = mutant_linear_bwd_weight;
  m->ops.attention_fwd = mutant_attention_fwd;
  m->ops.attention_bwd = mutant_attention_bwd;
  m->ops.head_loss = mutant_head_loss;
  m->ops.embed_next = mutant_embed_next;
  m->ops.attention_next = mutant_attention_next;
  m->ops.draw = mutant_draw;
  m->ops.cast_grad = mutant_cast_grad;
  m->ops.grad_add = mutant_grad_add;
  m->ops.grad_sumsq = mutant_grad_sumsq;
  m->ops.decide = mutant_decide;
  m->ops.adamw = mutant_adamw;
  m->ops.momentum = mutant_momentum;
  m->ops.orthogonalize = mutant_orthogonalize;
  m->ops.muon = mutant_muon;
  device->ops = &m->ops;
}

/* ----- collectives -------------------------------------------------------- */

typedef struct mutated_comm {
  g2z_collectives ops;
  const g2z_collectives *right;
  mutant is;
  int seen;                      /* calls so far of the broken kind */
  g2z_route *routes;             /* exchange_home: they outlive a recorded step */
} mutated_comm;

static g2z_status mutant_play(g2z_comm *comm, const g2z_call *call) {
  enum { WHICH = 7 };            /* the call that is skipped once */
  mutated_comm *m = (mutated_comm *)comm->ops;
  g2z_call other = *call;
  int gathers = call->kind == G2Z_CALL_GATHER, reduces = call->kind == G2Z_CALL_REDUCE;
  if (m->is == MUTANT_gather_once && gathers && ++m->seen == WHICH) return G2Z_OK;
  if (m->is == MUTANT_reduce_once && reduces && ++m->seen == WHICH) return G2Z_OK;
  if (m->is == MUTANT_reduce_overwrite) other.write = G2Z_OVERWRITE;
  if (m->is == MUTANT_reduce_stale && reduces && ++m->seen % WHICH == 0)
    other.write = G2Z_ACCUMULATE;
  if (m->is == MUTANT_rows_once && call->kind == G2Z_CALL_ROWS &&
      call->span == G2Z_SPAN_EMBEDDING_ROWS && ++m->seen == 4) /* a step's second: the rows */
    return mutant_copy(comm->device, (char *)call->to + (size_t)comm->rank * call->n, call->from,
                       call->n);
  if (call->kind == G2Z_CALL_EXCHANGE && call->count > 0) {
    if (m->is == MUTANT_exchange_part && !call->back) other.count--;
    if (m->is == MUTANT_exchange_back && call->back) other.count--;
    if (m->is == MUTANT_exchange_home && !call->back) {
      const size_t bytes = (size_t)call->count * sizeof *m->routes;
      if (!m->routes) m->routes = (g2z_route *)malloc(bytes);
      if (!m->routes) return G2Z_NO_MEMORY;
      memcpy(m->routes, call->routes, bytes);
      for (int i = 0; i < call->count; i++) m->routes[i].home += m->routes[i].home == 0;
      other.routes = m->routes;
    }
  }
  return m->right->play(comm, &other);
}

static g2z_status mutant_rows_now(g2z_comm *comm, const g2z_call *rows, int *done) {
  mutated_comm *m = (mutated_comm *)comm->ops;
  if (m->is != MUTANT_verdict_own || rows->span != G2Z_SPAN_VERDICT)
    return m->right->rows_now(comm, rows, done);
  *done = 1;
  return G2Z_OK;
}

static void mutant_comm_close(g2z_comm *comm) {
  mutated_comm *m = (mutated_comm *)comm->ops;
  m->right->close(comm);
  free(m->routes);
  free(m);
}

static void mutate_comm(g2z_comm *comm) {
  mutant is = comm && comm->world > 1 ? mutant_of(comm->device->kind) : MUTANT_NONE;
  mutated_comm *m = is >= MUTANT_gather_once ? (mutated_comm *)calloc(1, sizeof *m) : NULL;
  if (!m) return;
  m->right = comm->ops;
  m->ops = *comm->ops;
  m->is = is;
  m->ops.play = mutant_play;
  m->ops.rows_now = mutant_rows_now;
  m->ops.close = mutant_comm_close;
  comm->ops = &m->ops;
}

#undef RIGHT
#undef IS

/* g2z_trainer_create, then applies the process's mutant. */
static g2z_status test_trainer_create(g2z_context *context, const g2z_train_config *config,
                                      g2z_trainer **out) {
  g2z_status status = g2z_trainer_create(context, config, out);
  if (status != G2Z_OK) return status;
  mutate_device((*out)->device);
  mutate_comm((*out)->comm);
  return G2Z_OK;
}

/* g2z_model_open, then applies it too. */
static g2z_status test_model_open(g2z_context *context, const char *directory, g2z_dtype dtype,
                                  g2z_model **out) {
  g2z_status status = g2z_model_open(context, directory, dtype, out);
  if (status == G2Z_OK) mutate_device((*out)->device);
  return status;
}

/* Prints one line per mutant: name, tests on a CPU, tests on a GPU, and the fault. */
static void mutants_print(void) {
  for (int i = 1; i < MUTANT_COUNT; i++)
    printf("%s:%s:%s:%s\n", mutants[i].name, mutants[i].tests[0], mutants[i].tests[1],
           mutants[i].about);
}
