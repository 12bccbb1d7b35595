/* Tests of the room "plan": who keeps which part of the model, in which bucket, and how many bytes
 * that takes. Tests that use private names of the header: plan_tiles, plan_recompute; "internals"
 * stands above what writes such names. */

/* ----- plan -------------------------------------------------------------- */

static void test_plan_of_published_models(g2z_test *t) {
  static const struct { const char *name; size_t parameters; } known[] = {
      {"gpt2", 124439808}, {"gpt2-medium", 354823168}, {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200}};
  for (int i = 0; i < 4; i++) {
    g2z_train_config config = g2z_train_config_default();
    const g2z_plan *plan;
    CHECK_OK(t, g2z_model_config_named(&t->services, known[i].name, &config.model));
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
    CHECK(t, plan->parameters == known[i].parameters);
    CHECK(t, plan->vocab_padded == 50304);
  }
}

/* Tensors tile the canonical space in order; in memory units follow each other and each starts as
 * the plan promises; two units that take turns never lie where wte's gradient lies. */
static void test_plan_units(g2z_test *t, const g2z_plan *plan) {
  size_t at = 0, memory = 0, grain = 8 * (size_t)plan->world;
  for (int unit = 0; unit < plan->units; unit++) {
    size_t begin = at;
    CHECK(t, plan->unit[unit].canonical == at && plan->unit[unit].begin == memory);
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      g2z_param_info info = g2z_param_describe(&plan->model, (g2z_param)p);
      if (info.unit != plan->unit[unit].kind) continue;
      CHECK(t, plan->offset[p] == at - begin);
      at += info.elements;
    }
    int wte = unit == plan->wte;
    size_t room = wte ? (size_t)plan->vocab_padded * (size_t)plan->model.channels : at - begin;
    memory += room;
    if (plan->zero_stage >= 2 || unit == plan->wpe)
      memory = (memory + grain - 1) / grain * grain;
    size_t grad = plan->unit[unit].grad_at, last = plan->unit[plan->units - 1].grad_at;
    CHECK(t, grad + room <= plan->grad_elements && (wte || grad + room <= last));
    CHECK(t, plan->zero_stage < 2 || unit < 2 || wte || grad == plan->unit[unit - 2].grad_at);
  }
  CHECK(t, at == plan->parameters && plan->elements >= memory &&
               plan->elements < memory + grain);
  int units_end = 0;
  for (int k = 0; k < plan->buckets; k++) { /* each lies inside one unit, from stage 2 on; wte's do
                                             * in any stage */
    g2z_bucket bucket = plan->bucket[k];
    size_t end = bucket.begin + bucket.elements;
    while (units_end < plan->units - 1 && plan->unit[units_end + 1].begin <= bucket.begin)
      units_end++;
    size_t unit_end = units_end == plan->units - 1 ? plan->elements
                                                   : plan->unit[units_end + 1].begin;
    if (plan->zero_stage < 2 && units_end < plan->units - 1)
      unit_end = plan->unit[plan->units - 1].begin;
    CHECK(t, bucket.elements <= plan->bucket_elements && end <= unit_end);
    CHECK(t, plan->zero_stage < 2 ||
                 plan->bucket[k].grad_at - plan->unit[units_end].grad_at ==
                     bucket.begin - plan->unit[units_end].begin);
  }
}

/* The parameters' buffer is tiled by the units' places and by this rank's slices of the units that
 * take turns; a bucket is gathered to where its unit is read. */
static void test_plan_params(g2z_test *t, const g2z_plan *plan) {
  int turns = plan->zero_stage == 3 && plan->world > 1, L = plan->model.layers, unit = 0;
  unsigned char *held = (unsigned char *)calloc(plan->param_elements, 1);
  size_t wrong = 0;
  for (int u = 0; u < plan->units; u++) {
    size_t begin = plan->unit[u].begin, place = plan->unit[u].param_at;
    size_t end = u == plan->units - 1 ? plan->elements : plan->unit[u + 1].begin;
    int turning = turns && u >= 1 && u <= L;
    CHECK(t, turning || turns || place == begin);
    CHECK(t, !turning || u < 3 || place == plan->unit[u - 2].param_at);
    CHECK(t, place + (end - begin) <= plan->param_elements);
    for (size_t i = 0; i < end - begin && (!turning || u < 3); i++) held[place + i]++;
  }
  for (size_t i = 0; turns && L == 1 && i < plan->unit[2].begin - plan->unit[1].begin; i++)
    held[plan->unit[1].begin + i]++; /* of two places one block takes the second */
  for (int k = 0; k < plan->buckets; k++) {
    g2z_bucket bucket = plan->bucket[k];
    while (unit < plan->units - 1 && plan->unit[unit + 1].begin <= bucket.begin) unit++;
    size_t to = plan->bucket[k].param_at, from = plan->bucket[k].own_param_at;
    CHECK(t, from % 8 == 0 && to % 8 == 0);
    CHECK(t, to - plan->unit[unit].param_at == bucket.begin - plan->unit[unit].begin);
    if (turns && unit >= 1 && unit <= L)
      for (size_t i = 0; i < bucket.own_elements; i++) held[from + i]++;
    else CHECK(t, from - to == bucket.own_begin - bucket.begin);
  }
  for (size_t i = 0; i < plan->param_elements; i++) wrong += held[i] != 1;
  CHECK(t, wrong == 0);
  free(held);
}

/* internals */
/* Slices of all ranks tile the memory; shards have no holes; updates cover each parameter once,
 * with its own decay, and no padding. */
static void test_plan_tiles(g2z_test *t) {
  static const int worlds[] = {1, 2, 3, 4, 9, 13};
  static const double buckets[] = {0, 0.001, 0.01, 1, 0.00005};
  g2z_train_config config = test_config_of(3, 2, 48, 24, 131);
  for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
    for (size_t b = 0; b < sizeof buckets / sizeof *buckets; b++)
      for (int column = 0; column <= 4; column++) { /* the last is strategy dp */
        int stage = column % 4, dp = column == 4;
        config.zero_stage = stage;
        config.strategy = dp ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
        config.bucket_mb = buckets[b];
        config.model.layers = 1 + (stage + (int)b) % 4;
        if (b == 4) config.model.channels = 8, config.model.heads = 1; /* as small as can be */
        else config.model.channels = 48, config.model.heads = 2;
        const g2z_plan *plan;
        plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, worlds[w]);
        test_plan_units(t, plan);
        unsigned char *seen = (unsigned char *)calloc(plan->elements, 1);
        unsigned char *named = (unsigned char *)calloc(plan->parameters, 1);
        size_t updated = 0;
        for (int rank = 0; rank < (column == 0 ? 1 : worlds[w]); rank++) {
          plan = test_plan(t, &config, G2Z_DEVICE_CPU, rank, worlds[w]);
          test_plan_params(t, plan);
          size_t shard = 0;
          for (int k = 0; k < plan->buckets; k++) {
            g2z_range slice = {plan->bucket[k].own_begin, plan->bucket[k].own_elements};
            CHECK(t, slice.begin % 8 == 0 && slice.elements % 8 == 0);
            CHECK(t, plan->bucket[k].shard_at == shard);
            CHECK(t, slice.elements > 0 || (dp && rank > 0));
            shard += slice.elements;
            for (size_t i = 0; i < slice.elements; i++) seen[slice.begin + i]++;
          }
          CHECK(t, shard == plan->shard_elements);
          CHECK(t, (plan->bytes[G2Z_MEMORY_OPTIMIZER] > 0) == (shard > 0));
          const g2z_update_range *ranges = plan->update;
          CHECK(t, (plan->updates == 0 || shard > 0) &&
                       plan->updates <= g2z__plan_updates_limit(plan));
          for (size_t i = 0, k = 0; i < plan->updates; i++) {
            while ((int)k + 1 < plan->buckets &&
                   plan->bucket[k + 1].shard_at <= ranges[i].shard)
              k++;
            g2z_range slice = {plan->bucket[k].own_begin, plan->bucket[k].own_elements};
            size_t inside = ranges[i].shard - plan->bucket[k].shard_at;
            size_t memory = slice.begin + inside;
            CHECK(t, column == 0 || worlds[w] == 1 || /* what is sent by buckets is cut by them */
                         inside + ranges[i].elements <= slice.elements);
            for (size_t e = 0; e < ranges[i].elements; e++) {
              seen[memory + e] |= 0x80;
              named[ranges[i].canonical + e]++;
            }
            CHECK(t, ranges[i].grad == (stage < 2 ? memory : ranges[i].shard));
            CHECK(t, ranges[i].param == plan->bucket[k].own_param_at + inside);
            updated += ranges[i].elements;
            CHECK(t, ranges[i].shard + ranges[i].elements <= plan->shard_elements);
            CHECK(t, i == 0 || (inside == 0 && column > 0 && worlds[w] > 1) ||
                         ranges[i].decay != ranges[i - 1].decay ||
                         ranges[i].param != ranges[i - 1].param + ranges[i - 1].elements ||
                         ranges[i].shard != ranges[i - 1].shard + ranges[i - 1].elements ||
                         ranges[i].canonical != ranges[i - 1].canonical + ranges[i - 1].elements);
          }
        }
        CHECK(t, updated == plan->parameters);
        size_t wrong = 0, unseen = 0;
        for (size_t i = 0; i < plan->elements; i++) {
          wrong += (seen[i] & 0x7f) != 1;
          unseen += seen[i] == 0x01;
        }
        for (size_t i = 0; i < plan->parameters; i++) wrong += named[i] != 1;
        CHECK(t, wrong == 0 && unseen == plan->elements - plan->parameters);
        free(seen);
        free(named);
      }
}

/* What completes last is cut small: of GPT-2 124M in fp16 64 MiB, 32, 16 and 8 before wte. Where
 * that goes whole at the end, it goes in pieces of at most 16 MiB, but in fp32 in buckets of the
 * full size, as where its embedding's part goes as rows: of up to 33,536 tokens. */
static void test_plan_last_buckets(g2z_test *t) {
  g2z_train_config config = g2z_train_config_default();
  config.dtype = G2Z_FP16;
  config.seq = 16;
  for (int i = 0; i < 4; i++) {
    const g2z_plan *plan;
    int accum = 1 + i % 2, rows = i / 2;
    size_t most = accum == 1 && !rows ? 16 << 20 : 64 << 20, size = 8 << 20;
    config.accum = accum;
    config.batch = rows ? 524 : 525; /* a rank's 8,384 tokens, or 8,400 */
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 4);
    CHECK(t, plan->wte_rows == rows);
    size_t wte = plan->unit[plan->wte].begin, bytes = (size_t)plan->grad_bytes;
    int bucket = plan->buckets - 1;
    for (; plan->bucket[bucket].begin > wte; bucket--)
      CHECK(t, plan->bucket[bucket].elements * bytes == most);
    CHECK(t, plan->bucket[bucket].begin == wte);
    CHECK(t, plan->bucket[bucket].elements * bytes < most); /* what is odd */
    for (; --bucket > 0; size = size < 64 << 20 ? 2 * size : size)
      CHECK(t, plan->bucket[bucket].elements * bytes == size);
    CHECK(t, bucket == 0 && plan->bucket[0].elements * bytes < size);
  }
}

/* The head takes all tokens at once where logits are small beside activations, whatever the batch;
 * else 8,192. A larger batch never needs less memory. */
static void test_plan_head(g2z_test *t) {
  for (int i = 0; i < 4; i++) { /* 124M with and without recomputation; medium; many words */
    size_t before = 0;
    for (int batch = 1; batch <= 80; batch++) {
      g2z_train_config config = g2z_train_config_default();
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

/* The LM head's part of wte's gradient is rounded at once where it is all in one chunk of one
 * micro-step, and then needs no memory of its own. */
static void test_plan_wte_gradient(g2z_test *t) {
  static const struct {
    int world, accum, batch, alone;
  } cases[] = {{1, 1, 2, 1}, {1, 1, 32, 1}, {1, 1, 33, 0}, {1, 2, 2, 0}, {2, 1, 2, 1}, {2, 2, 2, 0},
               {12, 1, 4, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_train_config config = g2z_train_config_default();
    config.dtype = G2Z_FP16;
    config.accum = cases[i].accum;
    config.batch = cases[i].batch;
    const g2z_plan *plan;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, cases[i].world);
    size_t words = (size_t)plan->vocab_padded * (size_t)plan->model.channels;
    size_t logits = (size_t)plan->head_chunk * (size_t)plan->vocab_padded * 2;
    int apart = plan->dwte_dtype != plan->grad_dtype;
    CHECK(t, (plan->dwte_dtype == G2Z_FP16) == cases[i].alone);
    CHECK(t, plan->bytes[G2Z_MEMORY_HEAD] == logits + (apart ? words * 4 : 0));
  }
}

/* A GPU records steps of any size as graphs, unless it is told not to; a CPU has none. */
static void test_plan_graphs(g2z_test *t) {
  for (int batch = 1; batch <= 32; batch *= 32)
    for (int graph = 0; graph <= 2; graph++) {
      g2z_train_config config = g2z_train_config_default();
      config.batch = batch;
      config.graph = graph;
      const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
      CHECK(t, plan->graphed == (graph > 0));
      if (graph == 1) continue; /* refused by the trainer */
      plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
      CHECK(t, plan->graphed == 0);
    }
}

/* What a rank holds of large models on 8 GPUs, from the formulas of the manual: a difference is the
 * units' padding. */
static void test_plan_bytes(g2z_test *t) {
  static const int shapes[2][3] = {{48, 25, 1600}, {32, 32, 4096}};
  for (int i = 0; i < 2; i++)
    for (int stage = 0; stage <= 3; stage++) {
      g2z_train_config config = g2z_train_config_default();
      const g2z_plan *plan;
      config.model.layers = shapes[i][0];
      config.model.heads = shapes[i][1];
      config.model.channels = shapes[i][2];
      config.dtype = i ? G2Z_BF16 : G2Z_FP16;
      config.zero_stage = stage;
      plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 5, 8);
      double C = shapes[i][2], L = shapes[i][0], Vp = 50304, block = 12 * C * C + 13 * C, N = 8;
      double stays = 2 * C + 1024 * C + Vp * C, P = L * block + stays, padding = 64 * (L + 3);
      double params = stage < 3 ? P : L * block / N + 2 * block + stays;
      double grads = stage < 2 ? P : P / N + 2 * block + Vp * C, optimizer = stage ? P / N : P;
      double inbox = stage ? 2 * (double)plan->bucket_elements * (N - 1) / N : 0;
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_PARAMS], 2 * params, 2 * padding + 256);
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_GRADS], 2 * (grads + inbox), 2 * padding + 512);
      CHECK_NEAR(t, (double)plan->bytes[G2Z_MEMORY_OPTIMIZER], 12 * optimizer, 12 * padding + 768);
      size_t symmetric = plan->nccl_bytes; /* of 8 x 8 x 1024 tokens, that is many */
      CHECK(t, plan->gather == G2Z_TRANSPORT_NCCL);
      config.batch = 2;
      plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 5, 8);
      CHECK(t, plan->gather == (stage ? G2Z_TRANSPORT_COPY : G2Z_TRANSPORT_NCCL));
      CHECK(t, (plan->nccl_bytes < symmetric) == (stage > 0));
    }
}

static void test_plan_update_decay(g2z_test *t) {
  g2z_train_config config = test_config_of(1, 1, 8, 8, 10);
  const g2z_plan *plan;
  plan = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1);
  size_t decayed = 0;
  for (size_t i = 0; i < plan->updates; i++)
    if (plan->update[i].decay) decayed += plan->update[i].elements;
  CHECK(t, decayed == 12 * 8 * 8 + 8 * 8 + 10 * 8); /* four matrices, wpe, wte */
}

static void test_plan_largest_batch(g2z_test *t) {
  int largest[4];
  for (int i = 0; i < 4; i++) { /* alone, and on four GPUs, where NCCL takes something too */
    g2z_train_config config = g2z_train_config_default();
    const g2z_plan *plan;
    int world = i < 2 ? 1 : 4;
    config.recompute = i % 2 ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, world);
    size_t budget = (size_t)40 << 30;
    CHECK(t, (plan->nccl_bytes > 0) == (world > 1));
    config.batch = largest[i] = g2z__plan_largest_batch(plan, budget);
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, world);
    CHECK(t, plan->bytes_total + plan->nccl_bytes <= budget);
    config.batch = largest[i] + 1;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, world);
    CHECK(t, plan->bytes_total + plan->nccl_bytes > budget);
    CHECK(t, g2z__plan_largest_batch(plan, 1 << 20) == 0);
  }
  CHECK(t, largest[1] > 2 * largest[0] && largest[3] > 2 * largest[2]);
  for (int transport = 0; transport < G2Z_TRANSPORT_COUNT; transport++)
    for (int batch = 1; batch <= 32; batch *= 2) { /* what a batch needs is enough for it and no */
      g2z_train_config config = g2z_train_config_default(); /* more, whatever batch asks */
      const g2z_plan *plan, *other;
      config.dtype = G2Z_FP16;
      config.transport = (g2z_transport)transport;
      config.batch = batch;
      plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 8);
      size_t needs = plan->bytes_total + plan->nccl_bytes;
      for (config.batch = 1; config.batch <= 64; config.batch *= 8) {
        other = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 8);
        CHECK(t, g2z__plan_largest_batch(other, needs) == batch);
        CHECK(t, g2z__plan_largest_batch(other, needs - 1) == batch - 1);
      }
    }
  g2z_train_config tiny = test_config_of(1, 1, 8, 1, 2); /* what fits must be allowed too */
  const g2z_plan *plan;
  plan = test_plan(t, &tiny, G2Z_DEVICE_CUDA, 0, 1);
  tiny.batch = g2z__plan_largest_batch(plan, SIZE_MAX);
  CHECK_OK(t, g2z__train_config_check(&t->services, &tiny));
}

/* internals */
/* The bytes per token that the manual states, of fp16; these sizes need no padding. */
static void test_plan_recompute(g2z_test *t) {
  g2z_train_config config = g2z_train_config_default();
  config.dtype = G2Z_FP16;
  for (int i = 0; i < 2; i++) {
    const g2z_plan *plan;
    config.recompute = i ? G2Z_RECOMPUTE_BLOCK : G2Z_RECOMPUTE_NONE;
    plan = test_plan(t, &config, G2Z_DEVICE_CUDA, 0, 1);
    size_t N = (size_t)plan->batch * (size_t)plan->seq, C = 768, L = 12, NH = 12;
    size_t token = i ? 2 * L * C + 44 * C + 4 * NH + 28 : L * (32 * C + 4 * NH + 16) + 14 * C + 12;
    CHECK(t, plan->bytes[G2Z_MEMORY_ACTIVATIONS] == N * token);
    /* No two buffers that live at the same time share a byte. */
    unsigned char *owner = (unsigned char *)calloc(plan->bytes[G2Z_MEMORY_ACTIVATIONS] / 256, 1);
    size_t twice = 0;
    for (int layer = 0; layer < (int)L; layer++)
      for (int which = 0; which < G2Z__ACT_COUNT; which++) {
        int stream = which == G2Z__ACT_RES3, once = which == G2Z__ACT_EMBED || which >= G2Z__ACT_LNF;
        if (layer > 0 && (once || (i && !stream))) continue;
        size_t begin = g2z__activation_offset(plan, (g2z__activation)which, layer);
        unsigned char *block = &owner[begin / 256];
        twice += begin % 256 != 0 || *block;
        *block = 1;
      }
    CHECK(t, twice == 0);
    free(owner);
  }
}
