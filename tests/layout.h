/* Tests of the room "plan": the parts of the model that each rank keeps, their buckets, and the
 * bytes that they take. */

/* ----- plan -------------------------------------------------------------- */

static void test_plan_of_published_models(g2z_test *t) {
  static const struct { const char *name; size_t parameters; } known[] = {
      {"gpt2", 124439808}, {"gpt2-medium", 354823168}, {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200}};
  for (int i = 0; i < 4; i++) {
    g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
    CHECK_OK(t, g2z_model_config_named(&t->services, known[i].name, &config.model));
    const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
    CHECK(t, plan->parameters == known[i].parameters);
    CHECK(t, plan->vocab_padded == 50304);
  }
}

/* Tensors tile the canonical space in order. In memory, units follow each other and start at the
 * planned offsets. Two units that share a gradient buffer never overlap wte's gradient. From stage
 * 2 on, a bucket lies inside one unit; wte's buckets do in any stage. */
static void test_plan_units(g2z_test *t, const g2z_plan *plan) {
  const g2z_unit *wte = &plan->unit[plan->wte];
  const int by_unit = plan->zero_stage >= 2;
  size_t at = 0, memory = 0, grain = 8 * (size_t)plan->world;
  for (int u = 0; u < plan->units; u++) {
    const g2z_unit *unit = &plan->unit[u];
    size_t begin = at, end = unit->grad_at;
    CHECK(t, unit->canonical == at && unit->begin == memory);
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      g2z_param_info info = g2z__param_describe(&plan->model, (g2z_param)p);
      if (info.unit != unit->kind) continue;
      CHECK(t, plan->offset[p] == at - begin);
      at += info.elements;
    }
    size_t elements = unit == wte ? (size_t)plan->vocab_padded * (size_t)plan->model.channels
                                  : at - begin;
    memory += elements;
    if (by_unit || u == plan->wpe) memory = (memory + grain - 1) / grain * grain;
    end += elements;
    CHECK(t, end <= plan->grad_elements && (unit == wte || end <= wte->grad_at));
    CHECK(t, !by_unit || u < 2 || unit == wte || unit->grad_at == unit[-2].grad_at);
  }
  CHECK(t, at == plan->parameters && plan->elements >= memory && plan->elements < memory + grain);
  CHECK(t, wte[1].begin == plan->elements);
  for (int k = 0; k < plan->buckets; k++) {
    const g2z_bucket *b = &plan->bucket[k];
    const g2z_unit *unit = &plan->unit[b->unit], *next = by_unit || unit == wte ? unit + 1 : wte;
    CHECK(t, b->begin >= unit->begin && b->begin < unit[1].begin);
    CHECK(t, b->elements <= plan->bucket_elements && b->begin + b->elements <= next->begin);
    CHECK(t, !by_unit || b->grad_at - unit->grad_at == b->begin - unit->begin);
  }
}

/* Two parts tile the parameters' buffer: the units' places, and this rank's slices of the units
 * that share the two block buffers. A bucket is gathered to its unit's place. */
static void test_plan_params(g2z_test *t, const g2z_plan *plan) {
  const int turns = plan->zero_stage == 3 && plan->world > 1, L = plan->model.layers;
  unsigned char *held = (unsigned char *)calloc(plan->param_elements, 1);
  size_t wrong = 0;
  for (int u = 0; u < plan->units; u++) {
    const g2z_unit *unit = &plan->unit[u];
    const int turning = turns && u >= 1 && u <= L;
    size_t size = unit[1].begin - unit->begin;
    CHECK(t, turns || unit->param_at == unit->begin);
    CHECK(t, !turning || u < 3 || unit->param_at == unit[-2].param_at);
    CHECK(t, unit->param_at + size <= plan->param_elements);
    for (size_t i = 0; i < size && (!turning || u < 3); i++) held[unit->param_at + i]++;
    for (size_t i = 0; i < size && turning && L == 1; i++)
      held[unit->begin + i]++; /* a single block leaves the second buffer unused */
  }
  for (int k = 0; k < plan->buckets; k++) {
    const g2z_bucket *b = &plan->bucket[k];
    const g2z_unit *unit = &plan->unit[b->unit];
    size_t to = b->param_at, from = b->own_param_at;
    CHECK(t, from % 8 == 0 && to % 8 == 0);
    CHECK(t, to - unit->param_at == b->begin - unit->begin);
    if (turns && b->unit >= 1 && b->unit <= L)
      for (size_t i = 0; i < b->own_elements; i++) held[from + i]++;
    else CHECK(t, from - to == b->own_begin - b->begin);
  }
  for (size_t i = 0; i < plan->param_elements; i++) wrong += held[i] != 1;
  CHECK(t, wrong == 0);
  free(held);
}

/* Counts in `seen` how many ranks own each element of memory (0x80: it is updated), and in `named`
 * how often each parameter is updated. Returns the number of updated elements; *decayed gets the
 * number with weight decay. */
static size_t test_plan_updates(g2z_test *t, const g2z_plan *plan, unsigned char *seen,
                                unsigned char *named, size_t *decayed) {
  const int apart = plan->world > 1 && (plan->zero_stage || plan->strategy == G2Z_STRATEGY_DP);
  const int dp = plan->strategy == G2Z_STRATEGY_DP;
  const g2z_bucket *b = plan->bucket;
  size_t shard = 0, updated = 0;
  for (int k = 0; k < plan->buckets; k++) {
    CHECK(t, b[k].own_begin % 8 == 0 && b[k].own_elements % 8 == 0 && b[k].shard_at == shard);
    CHECK(t, b[k].own_elements > 0 || (dp && plan->rank > 0));
    shard += b[k].own_elements;
    for (size_t i = 0; i < b[k].own_elements; i++) seen[b[k].own_begin + i]++;
  }
  CHECK(t, shard == plan->shard_elements);
  CHECK(t, (plan->bytes[G2Z_MEMORY_OPTIMIZER] > 0) == (shard > 0));
  CHECK(t, plan->updates == 0 || shard > 0);
  CHECK(t, plan->updates <= (size_t)plan->units * G2Z_PARAM_COUNT + (size_t)plan->buckets);
  for (size_t i = 0; i < plan->updates; i++) {
    const g2z_update_range *range = &plan->update[i];
    while (b + 1 < plan->bucket + plan->buckets && b[1].shard_at <= range->shard_at) b++;
    size_t inside = range->shard_at - b->shard_at, memory = b->own_begin + inside;
    CHECK(t, !apart || inside + range->elements <= b->own_elements); /* sent by bucket */
    for (size_t e = 0; e < range->elements; e++) {
      seen[memory + e] |= 0x80;
      named[range->canonical + e]++;
    }
    CHECK(t, range->sum_at == (plan->zero_stage < 2 ? memory : range->shard_at));
    CHECK(t, range->own_param_at == b->own_param_at + inside);
    CHECK(t, range->shard_at + range->elements <= plan->shard_elements);
    updated += range->elements;
    if (range->decay) *decayed += range->elements;
    /* Contiguous elements form one range. */
    CHECK(t, i == 0 || (inside == 0 && apart) || range->decay != range[-1].decay ||
                 range->own_param_at != range[-1].own_param_at + range[-1].elements ||
                 range->shard_at != range[-1].shard_at + range[-1].elements ||
                 range->canonical != range[-1].canonical + range[-1].elements);
  }
  return updated;
}

/* Slices of all ranks tile the memory; shards have no holes; updates cover each parameter once and
 * no padding, and only matrices decay. */
static void test_plan_tiles(g2z_test *t) {
  static const int worlds[] = {1, 2, 3, 4, 9, 13};
  static const double buckets[] = {0, 0.001, 0.01, 1, 0.00005};
  enum { CONTEXT = 24, VOCAB = 131, SIZES = 5, COLUMNS = 5 };
  for (int i = 0; i < 6 * SIZES * COLUMNS; i++) {
    const int world = worlds[i / COLUMNS / SIZES], size = i / COLUMNS % SIZES;
    const int column = i % COLUMNS, stage = column % 4, dp = column == 4;
    const int smallest = size == 4, L = 1 + (stage + size) % 4, C = smallest ? 8 : 48;
    g2z_train_config config = test_config_of(L, smallest ? 1 : 2, C, CONTEXT, VOCAB);
    config.zero_stage = stage;
    config.strategy = dp ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
    config.bucket_mb = buckets[size];
    const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, world);
    test_plan_units(t, plan);
    const int before = t->owned_count;
    unsigned char *seen = (unsigned char *)test_memory(t, plan->elements);
    unsigned char *named = (unsigned char *)test_memory(t, plan->parameters);
    size_t updated = 0, decayed = 0, wrong = 0, padding = 0;
    for (int rank = 0; rank < (column == 0 ? 1 : world); rank++) {
      plan = test_plan(t, &config, G2Z_DEVICE_CPU, rank, world);
      test_plan_params(t, plan);
      updated += test_plan_updates(t, plan, seen, named, &decayed);
    }
    CHECK(t, updated == plan->parameters);
    CHECK(t, decayed == (size_t)C * (size_t)(12 * L * C + CONTEXT + VOCAB));
    for (size_t e = 0; e < plan->elements; e++) {
      wrong += (seen[e] & 0x7f) != 1;
      padding += seen[e] == 0x01;
    }
    for (size_t e = 0; e < plan->parameters; e++) wrong += named[e] != 1;
    CHECK(t, wrong == 0 && padding == plan->elements - plan->parameters);
    test_end(t, before);
  }
}

/* Buckets that complete last are small: for GPT-2 124M in fp16 64 MiB, then 32, 16 and 8 before
 * wte. wte's gradient has pieces of at most 16 MiB if all of it is reduced at the end. It has
 * buckets of the full size if it is fp32, or if the embedding's part is sent as rows (up to 33,536
 * tokens). */
static void test_plan_last_buckets(g2z_test *t) {
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
  config.dtype = G2Z_FP16;
  config.seq = 16;
  for (int i = 0; i < 4; i++) {
    int accum = 1 + 2 * (i % 2), rows = i / 2; /* 3: gradients are fp32 */
    size_t most = accum == 1 && !rows ? 16 << 20 : 64 << 20, size = 8 << 20;
    config.accum = accum;
    config.batch = rows ? 524 : 525; /* 8,384 tokens per rank, or 8,400 */
    const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 4);
    CHECK(t, plan->wte_rows == rows);
    size_t wte = plan->unit[plan->wte].begin, bytes = (size_t)plan->grad_bytes;
    int bucket = plan->buckets - 1;
    for (; plan->bucket[bucket].begin > wte; bucket--)
      CHECK(t, plan->bucket[bucket].elements * bytes == most);
    CHECK(t, plan->bucket[bucket].begin == wte);
    CHECK(t, plan->bucket[bucket].elements * bytes < most); /* the remainder */
    for (; --bucket > 0; size = size < 64 << 20 ? 2 * size : size)
      CHECK(t, plan->bucket[bucket].elements * bytes == size);
    CHECK(t, bucket == 0 && plan->bucket[0].elements * bytes < size);
  }
}

/* The head takes all tokens at once if logits are small compared with activations, whatever the
 * batch; otherwise 8,192. A larger batch never needs less memory. */
static void test_plan_head(g2z_test *t) {
  for (int i = 0; i < 4; i++) { /* 124M with and without recomputation; medium; large vocabulary */
    size_t before = 0;
    for (int batch = 1; batch <= 80; batch++) {
      g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
      config.dtype = G2Z_FP16;
      config.batch = batch;
      if (i == 1) config.recompute = G2Z_RECOMPUTE_BLOCK;
      if (i == 2) config.model.layers = 24, config.model.channels = 1024, config.model.heads = 16;
      if (i == 3) config.model.vocab = 131072;
      int most = i % 2 ? 8192 : 65536;
      const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
      CHECK(t, plan->head_chunk == (batch * 1024 < most ? batch * 1024 : most));
      CHECK(t, plan->bytes_total > before);
      before = plan->bytes_total;
      plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
      CHECK(t, plan->head_chunk == 256);
    }
  }
}

/* Gradients are fp32 with more than two micro-steps. The LM head's part of wte's gradient is
 * rounded at once if one chunk of one micro-step computes all of it. It then needs no memory of its
 * own. */
static void test_plan_wte_gradient(g2z_test *t) {
  static const struct {
    int world, accum, batch, alone;
  } cases[] = {{1, 1, 2, 1}, {1, 1, 32, 1}, {1, 1, 33, 0}, {1, 2, 2, 0}, {2, 1, 2, 1}, {2, 2, 2, 0},
               {2, 3, 2, 0}, {12, 1, 4, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
    config.dtype = G2Z_FP16;
    config.accum = cases[i].accum;
    config.batch = cases[i].batch;
    const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, cases[i].world);
    size_t words = (size_t)plan->vocab_padded * (size_t)plan->model.channels;
    size_t logits = (size_t)plan->head_chunk * (size_t)plan->vocab_padded * 2;
    int apart = plan->dwte_dtype != plan->grad_dtype;
    CHECK(t, plan->grad_dtype == (config.accum > 2 ? G2Z_FP32 : G2Z_FP16));
    CHECK(t, (plan->dwte_dtype == G2Z_FP16) == cases[i].alone);
    CHECK(t, plan->bytes[G2Z_MEMORY_HEAD] == logits + (apart ? words * 4 : 0));
  }
}

/* A GPU records steps of any size as graphs unless the config forbids it; a CPU has no graphs. */
/* A step of very many launches is recorded only on request, and the plan counts a graph's memory. */
static void test_plan_long_graphs(g2z_test *t) {
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CUDA);
  for (int on = 2; on >= 0; on--) { /* auto, on, off */
    config.graph = on;
    config.accum = 8;
    const size_t some = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1)->bytes[G2Z_MEMORY_SCRATCH];
    CHECK(t, t->plans[1]->graphed == (on > 0));
    config.accum = 16;
    const size_t twice = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1)->bytes[G2Z_MEMORY_SCRATCH];
    CHECK(t, (twice > some) == (on > 0));
    config.accum = 1 << 20;
    CHECK(t, test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1)->graphed == (on == 1));
  }
}

/* Ranks of several hosts: NCCL carries, whatever the transport. On one host copy engines may. */
static void test_plan_hosts(g2z_test *t) {
  for (int i = 0; i < G2Z_TRANSPORT_COUNT; i++)
    for (int stage = 0; stage <= 3; stage++) {
      g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CUDA);
      g2z_plan *one = NULL, *two = NULL;
      config.batch = 1;
      config.seq = 512;
      config.zero_stage = stage;
      config.transport = (g2z_transport)i;
      CHECK_OK(t, g2z_plan_create(&t->services, &config, G2Z_DEVICE_CUDA, 3, 16, 16, &one));
      CHECK_OK(t, g2z_plan_create(&t->services, &config, G2Z_DEVICE_CUDA, 3, 16, 8, &two));
      const int copies = stage > 0 && i != G2Z_TRANSPORT_NCCL;
      CHECK(t, (one->reduce == G2Z_TRANSPORT_COPY) == copies);
      CHECK(t, two->reduce == G2Z_TRANSPORT_NCCL && two->gather == G2Z_TRANSPORT_NCCL);
      CHECK(t, (two->nccl_bytes > one->nccl_bytes) == copies);
      config.transport = G2Z_TRANSPORT_NCCL;
      const g2z_plan *nccl = test_plan(t, &config, G2Z_DEVICE_CUDA, 3, 16);
      CHECK(t, two->bytes_total == nccl->bytes_total && two->nccl_bytes == nccl->nccl_bytes);
      g2z_plan_free(one);
      g2z_plan_free(two);
    }
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CUDA);
  g2z_plan *none;
  CHECK_BAD(t, g2z_plan_create(&t->services, &config, G2Z_DEVICE_CUDA, 0, 2, 3, &none),
            "local_world=3");
}

static void test_plan_graphs(g2z_test *t) {
  test_plan_long_graphs(t);
  for (int i = 0; i < 6; i++) {
    g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
    config.batch = i < 3 ? 1 : 32;
    config.graph = i % 3;
    CHECK(t, test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1)->graphed == (config.graph > 0));
    if (config.graph != 1) /* the trainer refuses 1 */
      CHECK(t, test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1)->graphed == 0);
  }
}

/* The memory of a rank for large models on 8 GPUs, against the manual's formulas: they differ by
 * the units' padding. */
static void test_plan_bytes(g2z_test *t) {
  static const int shapes[2][3] = {{48, 25, 1600}, {32, 32, 4096}};
  for (int i = 0; i < 2; i++)
    for (int stage = 0; stage <= 3; stage++) {
      g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
      config.model.layers = shapes[i][0];
      config.model.heads = shapes[i][1];
      config.model.channels = shapes[i][2];
      config.dtype = i ? G2Z_BF16 : G2Z_FP16;
      config.zero_stage = stage;
      const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 5, 8);
      double C = shapes[i][2], L = shapes[i][0], Vp = 50304, block = 12 * C * C + 13 * C, N = 8;
      double stays = 2 * C + 1024 * C + Vp * C, P = L * block + stays, padding = 64 * (L + 3);
      double params = stage < 3 ? P : L * block / N + 2 * block + stays;
      double grads = stage < 2 ? P : P / N + 2 * block + Vp * C, optimizer = stage ? P / N : P;
      double inbox = stage ? 2 * (double)plan->bucket_elements * (N - 1) / N : 0;
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_PARAMS], 2 * params, 2 * padding + 256);
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_GRADS], 2 * (grads + inbox), 2 * padding + 512);
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_OPTIMIZER], 12 * optimizer, 12 * padding + 768);
      size_t symmetric = plan->nccl_bytes; /* for many tokens: 8 x 8 x 1024 */
      CHECK(t, plan->gather == G2Z_TRANSPORT_NCCL);
      config.batch = 2;
      plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 5, 8);
      CHECK(t, plan->gather == (stage ? G2Z_TRANSPORT_COPY : G2Z_TRANSPORT_NCCL));
      CHECK(t, (plan->nccl_bytes < symmetric) == (stage > 0));
      config.optimizer.kind = G2Z_OPTIMIZER_MUON; /* its weights travel by NCCL alone */
      CHECK(t, test_plan(t, &config, G2Z_DEVICE_CUDA, 5, 8)->nccl_bytes == symmetric);
    }
}

/* The GPU memory that a config needs. */
static size_t test_plan_needs(g2z_test *t, const g2z_train_config *config, int world) {
  const g2z_plan *plan = test_plan(t, config, G2Z_DEVICE_CUDA, 0, world);
  CHECK(t, (plan->nccl_bytes > 0) == (world > 1));
  return plan->bytes_total + plan->nccl_bytes;
}

static void test_plan_largest_batch(g2z_test *t) {
  const size_t budget = (size_t)40 << 30;
  int largest[4];
  for (int i = 0; i < 4; i++) { /* one GPU; four, where NCCL needs memory too */
    g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
    int world = i < 2 ? 1 : 4;
    config.recompute = i % 2 ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, world);
    CHECK(t, g2z_plan_largest_batch(plan, 1 << 20) == 0);
    config.batch = largest[i] = g2z_plan_largest_batch(plan, budget);
    CHECK(t, test_plan_needs(t, &config, world) <= budget);
    config.batch++;
    CHECK(t, test_plan_needs(t, &config, world) > budget);
  }
  CHECK(t, largest[1] > 2 * largest[0] && largest[3] > 2 * largest[2]);
  for (int transport = 0; transport < G2Z_TRANSPORT_COUNT; transport++)
    for (int batch = 1; batch <= 32; batch *= 2) { /* the memory that a batch needs allows */
      /* just this batch, for any config */
      g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CUDA);
      config.transport = (g2z_transport)transport;
      config.batch = batch;
      size_t needs = test_plan_needs(t, &config, 8);
      for (config.batch = 1; config.batch <= 64; config.batch *= 8) {
        const g2z_plan *other = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 8);
        CHECK(t, g2z_plan_largest_batch(other, needs) == batch);
        CHECK(t, g2z_plan_largest_batch(other, needs - 1) == batch - 1);
      }
    }
  g2z_train_config tiny = test_config_of(1, 1, 8, 1, 2); /* the largest batch must be valid */
  tiny.batch = g2z_plan_largest_batch(test_plan(t, &tiny, G2Z_DEVICE_CUDA, 0, 1), SIZE_MAX);
  CHECK_OK(t, test_config_check(&t->services, &tiny));
  g2z_train_config eight = g2z_train_config_default(G2Z_DEVICE_CUDA);
  /* whole times 128 tokens, or none */
  eight.fp8 = G2Z_FP8_ALL;
  eight.seq = 1000;
  eight.batch = 32;
  const g2z_plan *plan = test_plan(t, &eight, G2Z_DEVICE_CUDA, 0, 1);
  int most = g2z_plan_largest_batch(plan, budget);
  CHECK(t, most > 0 && most % 16 == 0);
  CHECK_STATUS(t, g2z_plan_fits(&t->services, &eight, plan, (size_t)3 << 30, 1), G2Z_NO_MEMORY,
               &t->services, "even at batch=16, the least with fp8=all; fp8=forward can take less");
}

/* The manual's formulas for fp16 bytes per token; these sizes need no padding. */
static void test_plan_recompute(g2z_test *t) {
  g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
  config.dtype = G2Z_FP16;
  for (int i = 0; i < 2; i++) {
    config.recompute = i ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
    size_t N = (size_t)plan->batch * (size_t)plan->seq, C = 768, L = 12, NH = 12;
    size_t token = i ? 2 * L * C + 44 * C + 4 * NH + 28 : L * (32 * C + 4 * NH + 16) + 14 * C + 12;
    CHECK(t, plan->bytes[G2Z_MEMORY_ACTIVATIONS] == N * token);
  }
}
