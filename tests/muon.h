/* Tests of Muon: its arithmetic against a reference in double and against NumPy, the plan's homes
 * and routes, and ranks that share the work. */

/* ----- Muon: the reference ----------------------------------------------- */

/* Orthogonalizes x[rows,columns]; `row` is the distance between the starts of two rows. As Jordan
 * et al. 2024: X = x / |x|; five times A = X X^T, X = a X + (b A + c A A) X, with X transposed if
 * rows > columns. */
static void muon_orthogonal(double *x, int rows, int columns, int row) {
  const int m = rows < columns ? rows : columns, n = rows + columns - m;
  double *X = (double *)calloc((size_t)(2 * m * n + 2 * m * m), sizeof *X), squares = 0;
  double *Y = X + m * n, *A = Y + m * n, *P = A + m * m;
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      X[i * n + j] = rows == m ? x[i * row + j] : x[j * row + i];
      squares += X[i * n + j] * X[i * n + j];
    }
  for (int i = 0; i < m * n && squares > 0; i++) X[i] /= sqrt(squares);
  for (int step = 0; step < 5; step++) {
    memset(Y, 0, (size_t)(m * n + 2 * m * m) * sizeof *Y);
    for (int i = 0; i < m; i++)
      for (int j = 0; j < m; j++)
        for (int k = 0; k < n; k++) A[i * m + j] += X[i * n + k] * X[j * n + k];
    for (int i = 0; i < m; i++)
      for (int j = 0; j < m; j++) {
        double square = 0;
        for (int k = 0; k < m; k++) square += A[i * m + k] * A[k * m + j];
        P[i * m + j] = -4.7750 * A[i * m + j] + 2.0315 * square;
      }
    for (int i = 0; i < m; i++)
      for (int k = 0; k < m; k++)
        for (int j = 0; j < n; j++) Y[i * n + j] += P[i * m + k] * X[k * n + j];
    for (int i = 0; i < m * n; i++) X[i] = 3.4445 * X[i] + Y[i];
  }
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) *(rows == m ? x + i * row + j : x + j * row + i) = X[i * n + j];
  free(X);
}

/* The number of matrices that Muon updates in a tensor; 0: AdamW updates it. */
static int muon_matrices(g2z_param p) {
  return p == G2Z_QKVW ? 3 : p == G2Z_ATTPROJW || p == G2Z_FCW || p == G2Z_FCPROJW ? 1 : 0;
}

/* ----- Muon: the ops ----------------------------------------------------- */

/* Two steps of the three ops on two weights, a tall and a square one. Each holds three matrices
 * side by side. A weight lies in one or two ranges, and each range has different places in
 * parameters, gradients, master and u. */
static void test_ops_muon(g2z_test *t) {
  enum { N = 2752, RANGES = 5, GAP = 8 * (RANGES + 1), WORK = G2Z_ORTHOGONALIZE_WORK(24, 24) };
  static const g2z_matrices shapes[] = {{0, 2, 16, 48, 3}, {1536, 1, 40, 16, 1},
                                        {2176, 1, 24, 24, 1}};
  static const int begins[RANGES + 1] = {0, 504, 768, 1536, 2176, N}, columns[RANGES] = {16, 16, 16,
                                                                                        16, 24};
  /* Every 400th weight in the order of u, from peers/muon_numpy.py. */
  static const double numpy[] = {-0.862051774, 0.273614173, -0.380647126, 0.585927034,
                                 0.359086765,  -0.454639064, 0.206349910};
  for (int which = 0; which < 3; which++) {
    ops_env e = ops_open(t, ops_dtypes[which], G2Z_FP32);
    float *grads = ops_random(&e, N + GAP, 64), *master = ops_random(&e, N, 1);
    float *m = ops_filled(&e, N, 0), *params = ops_output(&e, N + GAP), *u = ops_output(&e, N);
    float *v = ops_output(&e, 8), *work = ops_output(&e, WORK), *kept = ops_output(&e, N);
    double *want = ops_doubles(&e, N), *want_m = ops_doubles(&e, N), *want_u = ops_doubles(&e, N);
    g2z_optimizer_config config = ops_optimizer();
    g2z_step_state s;
    g2z_update_range ranges[RANGES];
    memset(&s, 0, sizeof s);
    memset(ranges, 0, sizeof ranges);
    s.loss_scale = 64;
    config.momentum = 0.95f;
    for (int r = 0; r < RANGES; r++) {
      ranges[r].u_at = (size_t)begins[r];
      ranges[r].elements = (size_t)(begins[r + 1] - begins[r]);
      ranges[r].own_param_at = ranges[r].u_at + 8 * (size_t)r;
      ranges[r].sum_at = ranges[r].own_param_at + 8;
      ranges[r].shard_at = (size_t)(N - begins[r + 1]);
      ranges[r].decay = r % 2;
      ranges[r].scale = (float)(0.2 * sqrt(columns[r]));
      for (size_t i = 0; i < ranges[r].elements; i++)
        want[ranges[r].u_at + i] = (double)master[ranges[r].shard_at + i];
    }
    g2z_update update = {params, master, m, v, grads, ranges, ranges, &config, &s};
    int near = 1, exact = 1;
    for (int step = 0; step < 2; step++) {
      ops_decide(&e, &s, &config, 4096);
      OPS_CALL(&e, momentum, u, &update, 2, RANGES); /* in parts, in any order */
      OPS_CALL(&e, momentum, u, &update, 0, 2);
      OPS_CALL(&e, momentum, u, &update, 2, 2);
      for (int r = 0; r < RANGES; r++)
        for (size_t i = 0; i < ranges[r].elements; i++) {
          const double g = (double)grads[ranges[r].sum_at + i] / 64;
          double *moment = want_m + ranges[r].u_at + i;
          *moment = 0.95 * *moment + g;
          want_u[ranges[r].u_at + i] = g + 0.95 * *moment;
          near &= fabs((double)m[ranges[r].shard_at + i] - *moment) < 1e-6;
        }
      ops_expect(&e, "momentum's u", u, want_u, NULL, N, G2Z_FP32, 8);
      OPS_CALL(&e, orthogonalize, u, shapes, 3, work, WORK * sizeof *work);
      for (int i = 0; i < 6; i++)
        muon_orthogonal(want_u + 768 * (i / 3) + 16 * (i % 3), 16, 16, 48);
      muon_orthogonal(want_u + 1536, 40, 16, 16);
      muon_orthogonal(want_u + 2176, 24, 24, 24);
      for (int i = 0; i < N; i++) near &= fabs((double)u[i] - want_u[i]) < 1e-5;
      OPS_CALL(&e, muon, u, &update, 1, 3);
      OPS_CALL(&e, muon, u, &update, 3, RANGES);
      OPS_CALL(&e, muon, u, &update, 0, 1);
      for (int r = 0; r < RANGES; r++)
        for (size_t i = 0; i < ranges[r].elements; i++) {
          double *weight = want + ranges[r].u_at + i;
          const double decay = ranges[r].decay ? (double)config.weight_decay * *weight : 0;
          *weight -= (double)s.lr * (0.2 * sqrt(columns[r]) * want_u[ranges[r].u_at + i] + decay);
          const float got = master[ranges[r].shard_at + i];
          near &= fabs((double)got - *weight) < 4e-7;
          exact &= params[ranges[r].own_param_at + i] == g2z__round(ops_dtypes[which], got);
        }
    }
    CHECK(t, near && exact);
    for (int i = 0; i < 7 && which == 0; i++) CHECK_NEAR(t, want[400 * i], numpy[i], 1e-8);
    for (int i = 0; i < 8; i++) exact &= v[i] == 777 && params[504 + i] == 777;
    CHECK(t, exact); /* v, and parameters between ranges, are not touched */
    /* A skipped step changes nothing. */
    float *const buffers[] = {master, m, params, u};
    ops_decide(&e, &s, &config, NAN);
    for (int b = 0; b < 4; b++) {
      memcpy(kept, buffers[b], N * sizeof *kept);
      OPS_CALL(&e, momentum, u, &update, 0, RANGES);
      OPS_CALL(&e, muon, u, &update, 0, RANGES);
      CHECK(t, memcmp(kept, buffers[b], N * sizeof *kept) == 0);
    }
    ops_close(&e);
  }
}

/* An orthogonal matrix [n,n]: two reflections. */
static double *muon_basis(ops_env *e, int n) {
  double *q = ops_doubles(e, n * n);
  for (int i = 0; i < n; i++) q[i * n + i] = 1;
  for (int turn = 0; turn < 2; turn++) {
    const float *v = ops_random(e, n, 1);
    double size = 0;
    for (int j = 0; j < n; j++) size += (double)v[j] * (double)v[j];
    for (int i = 0; i < n; i++) {
      double along = 0;
      for (int j = 0; j < n; j++) along += q[i * n + j] * (double)v[j];
      for (int j = 0; j < n; j++) q[i * n + j] -= 2 * along * (double)v[j] / size;
    }
  }
  return q;
}

/* Orthogonalizes U S V^T with known U, S and V. U^T O V must be diagonal: the singular vectors
 * stay, and five steps of the polynomial change each singular value. Values above 0.002 |u| end in
 * [0.65, 1.25]. Smaller values, and roundings, grow by a factor of 3.4445^5 at most. */
static void test_ops_orthogonalize(g2z_test *t) {
  static const int sizes[][2] = {{24, 24}, {16, 48}, {48, 16}, {1, 24}, {24, 1}, {40, 41}, {8, 8}};
  enum { SPREAD, EQUAL, SMALL, RANK_1, ZERO, SPECTRA };
  static const double magnitudes[] = {1, 1e-25, 1e15};
  for (int i = 0; i < 7 * SPECTRA; i++) {
    const int rows = sizes[i % 7][0], columns = sizes[i % 7][1], spectrum = i / 7;
    const int least = rows < columns ? rows : columns, most = rows + columns - least;
    double s[64], size = 0, worst = 0;
    ops_env e = ops_open(t, G2Z_FP32, G2Z_FP32);
    e.seed = (uint32_t)i + 1;
    const double *U = muon_basis(&e, rows), *V = muon_basis(&e, columns);
    float *x = ops_filled(&e, rows * columns, 0), *again = ops_filled(&e, rows * columns, 0);
    float *work = ops_output(&e, 3 * (int)G2Z_ORTHOGONALIZE_WORK(least, most));
    for (int k = 0; k < least; k++) {
      s[k] = spectrum == SPREAD ? pow(0.005, k / (least - 0.999)) : k == 0 || spectrum == EQUAL;
      if (spectrum == SMALL && k) s[k] = 0.0021;
      if (spectrum == ZERO) s[k] = 0;
      size += s[k] * s[k];
    }
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < columns; c++) {
        double sum = 0;
        for (int k = 0; k < least; k++) sum += U[r * rows + k] * s[k] * V[c * columns + k];
        x[r * columns + c] = again[r * columns + c] = (float)(sum * magnitudes[i % 3]);
      }
    const g2z_matrices shape = {0, 1, rows, columns, 1};
    const size_t bytes = G2Z_ORTHOGONALIZE_WORK(least, most) * sizeof(float);
    OPS_CALL(&e, orthogonalize, x, &shape, 1, work, bytes);
    OPS_CALL(&e, orthogonalize, again, &shape, 1, work, 3 * bytes);
    CHECK(t, memcmp(x, again, (size_t)(rows * columns) * sizeof *x) == 0);
    for (int k = 0; k < rows; k++)
      for (int l = 0; l < columns; l++) {
        double got = 0, want = k == l && size > 0 ? s[k] / sqrt(size) : 0;
        for (int r = 0; r < rows; r++)
          for (int c = 0; c < columns; c++)
            got += U[r * rows + k] * (double)x[r * columns + c] * V[c * columns + l];
        const int inside = want > 0.002;
        for (int step = 0; step < 5; step++)
          want = 3.4445 * want - 4.7750 * pow(want, 3) + 2.0315 * pow(want, 5);
        if (inside) CHECK(t, got > 0.65 && got < 1.25);
        if (spectrum == SPREAD && k == l) CHECK(t, inside);
        if (!(fabs(got - want) <= worst)) worst = fabs(got - want);
      }
    CHECK_NEAR(t, worst, 0, spectrum == ZERO ? 0 : 486 * 0x1p-22);
    ops_close(&e);
  }
}

/* ----- spikes ------------------------------------------------------------ */

/* The state after this gradient norm. */
static g2z_step_state spikes_after(ops_env *e, g2z_step_state state,
                                   const g2z_optimizer_config *config, double norm) {
  ops_decide(e, &state, config, pow(norm * (double)state.loss_scale, 2));
  return state;
}

/* Norms rise tenfold for good. The oracle computes mean and deviation from a list of the norms that
 * count. A run that was resumed without statistics collects 20 norms first. */
static void test_spikes_rise(g2z_test *t, ops_env *e, const g2z_optimizer_config *config) {
  for (int resumed = 0; resumed < 2; resumed++) {
    double norms[100];
    int count = 0, in_row = 0, spikes = 0;
    g2z_step_state s;
    memset(&s, 0, sizeof s);
    s.loss_scale = 1024;
    if (resumed) s.applied = s.step = 1000;
    for (int step = 0; step < 179; step++) {
      double norm = (step < 60 ? 1 : 10) * (1 + 0.1 * sin(step * step)), mean = 0, squares = 0;
      if (step == 30) norm = 3; /* a single spike */
      if (in_row == 20) count = 0;
      for (int i = 0; i < count; i++) mean += norms[i] / count;
      for (int i = 0; i < count; i++) squares += pow(norms[i] - mean, 2);
      const int spike = count >= 20 && norm > mean + 3 * sqrt(squares / count);
      if (!spike) norms[count++] = norm;
      spikes += spike;
      in_row = spike ? in_row + 1 : 0;
      s = spikes_after(e, s, config, norm);
      FAIL_IF(t, s.skip != 2 * spike || s.normed != count, "step %d: skip is %d, not %d, with %"
              PRId64 " norms, not %d", step, s.skip, 2 * spike, s.normed, count);
    }
    CHECK(t, s.spikes == spikes && spikes == 21 && s.skipped == 21);
  }
}

static void test_ops_spikes(g2z_test *t) {
  ops_env e = ops_open(t, G2Z_FP16, G2Z_FP16);
  g2z_optimizer_config config = ops_optimizer(), off = config;
  g2z_step_state s, next, early;
  memset(&s, 0, sizeof s);
  s.loss_scale = 1024;
  s.hysteresis = 1;
  config.skip_spikes = 3;
  config.loss_scale_window = 1000;
  for (int i = 0; i < 20; i++) { /* the mean is 2, the deviation 1 */
    if (i == 19) early = s;
    s = spikes_after(&e, s, &config, i % 2 ? 3 : 1);
  }
  early = spikes_after(&e, early, &config, 1000); /* too few norms to judge a spike */
  CHECK(t, s.applied == 20 && s.spikes == 0 && early.applied == 20 && early.spikes == 0);
  CHECK_NEAR(t, s.norm_mean, 2, 1e-6);
  CHECK_NEAR(t, s.norm_deviation, 1, 1e-6);
  next = spikes_after(&e, s, &config, 4.9);
  CHECK(t, next.skip == 0 && next.applied == 21 && next.norm_mean > s.norm_mean);
  next = spikes_after(&e, s, &off, 5.1); /* 0 is off */
  CHECK(t, next.skip == 0 && next.applied == 21 && next.norm_mean > s.norm_mean);
  next = spikes_after(&e, s, &config, 5.1);
  CHECK(t, next.skip == 2 && next.spikes == 1 && next.skipped == 1 && next.applied == 20);
  CHECK(t, next.grad_multiplier == 0 && next.norm_mean == s.norm_mean);
  CHECK(t, next.norm_deviation == s.norm_deviation && next.loss_scale == 1024);
  CHECK(t, next.good_steps == s.good_steps && next.hysteresis == 1 && !next.skipped_at_minimum);
  next = spikes_after(&e, next, &config, INFINITY); /* an overflow is no spike */
  CHECK(t, next.skip == 1 && next.spikes == 1 && next.skipped == 2 && next.loss_scale == 512);
  CHECK(t, next.norm_mean == s.norm_mean && next.norm_deviation == s.norm_deviation);
  /* A step that a rank failed, or that has no targets, is no spike either. */
  for (int failed = 0; failed < 2; failed++) {
    next = s;
    ops_decide_as(&e, &next, &config, 1e10, failed ? G2Z_IO : G2Z_OK, failed ? 0 : 10);
    CHECK(t, next.skip == 1 && next.spikes == 0 && next.norm_mean == s.norm_mean);
  }
  test_spikes_rise(t, &e, &config);
  /* Mean and deviation cover about the last 100 steps. */
  for (int i = 0; i < 1200; i++) s = spikes_after(&e, s, &off, i % 2 ? 13 : 11);
  CHECK_NEAR(t, s.norm_mean, 12, 0.1);
  CHECK_NEAR(t, s.norm_deviation, 1, 0.1);
  ops_close(&e);
}

/* ----- Muon: the plan ---------------------------------------------------- */

/* The plans of all ranks state where each element of Muon's weights goes. */
typedef struct muon_map {
  int32_t *canonical[TEST_RANKS + 1];   /* per rank: canonical index of each u; -1: none */
  unsigned char *home[TEST_RANKS + 1];  /* per rank: writes to each element of its area */
  unsigned char *owners;                /* per canonical element: ranks that own it */
  unsigned char *arrives;               /* per canonical element: routes that take it home */
  double load[TEST_RANKS + 1];
} muon_map;

/* The multiplications of a step of Newton-Schulz, halved: X X^T, A A, and P X. */
static double muon_cost(double rows, double columns) {
  const double m = rows < columns ? rows : columns, n = rows + columns - m;
  return 2 * m * m * n + m * m * m;
}

/* One rank's update ranges: Muon's ranges are pieces of weights; together with AdamW's ranges they
 * cover the rank's slices. v has places only for AdamW's ranges. */
static void muon_ranges(g2z_test *t, const g2z_plan *plan, muon_map *map) {
  size_t matrices = 0, wrong = 0;
  unsigned char *v = (unsigned char *)calloc(plan->v_elements + 1, 1);
  for (size_t i = 0; i < plan->updates; i++) {
    const g2z_update_range *range = &plan->update[i];
    double scale = 0;
    for (int w = 0; w < plan->muon_weights; w++) {
      const g2z_param_info info = g2z__param_describe(&plan->model, plan->weight[w].param);
      const size_t begin = plan->unit[plan->weight[w].unit].canonical +
                           plan->offset[plan->weight[w].param];
      const size_t columns = info.cols / (size_t)muon_matrices(plan->weight[w].param);
      if (range->canonical + range->elements <= begin || range->canonical >= begin + info.elements)
        continue;
      CHECK(t, range->canonical >= begin);
      CHECK(t, range->canonical + range->elements <= begin + info.elements);
      scale = 0.2 * sqrt((double)columns);
    }
    CHECK_NEAR(t, range->scale, scale, 1e-6 * scale);
    CHECK(t, (i >= plan->muon_updates) == (scale > 0));
    for (size_t e = 0; e < range->elements; e++) {
      if (scale > 0) {
        int32_t *at = &map->canonical[plan->rank][range->u_at + e];
        wrong += *at != -1;
        *at = (int32_t)(range->canonical + e);
        map->owners[range->canonical + e]++;
        matrices++;
      } else wrong += range->v_at + e >= plan->v_elements || v[range->v_at + e]++ != 0;
    }
  }
  /* The rest of v is padding, as in the shard. */
  CHECK(t, wrong == 0 && plan->v_elements == plan->shard_elements - matrices);
  free(v);
}

/* The shapes of a rank list exactly the weights that are at home there. Each area has room. */
static void muon_shapes(g2z_test *t, const g2z_plan *plan) {
  const int root = plan->strategy == G2Z_STRATEGY_DP && plan->rank > 0;
  int found = 0, listed = 0;
  size_t end = 0;
  for (int s = 0; s < plan->shapes; s++) listed += plan->shape[s].weights;
  for (int w = 0; w < plan->muon_weights; w++) {
    const g2z_weight *weight = &plan->weight[w];
    const g2z_param_info info = g2z__param_describe(&plan->model, weight->param);
    if (root || (weight->home != -1 && weight->home != plan->rank)) continue;
    if (weight->home_at + info.elements > end) end = weight->home_at + info.elements;
    for (int s = 0; s < plan->shapes; s++) {
      const g2z_matrices *shape = &plan->shape[s];
      const size_t inside = weight->home_at - shape->at; /* huge if home_at lies below */
      found += shape->rows == (int)info.rows && shape->columns == (int)info.cols &&
               shape->matrices == muon_matrices(weight->param) && inside % info.elements == 0 &&
               inside / info.elements < (size_t)shape->weights;
    }
  }
  CHECK(t, found == listed);
  const size_t u = (plan->shard_elements - plan->v_elements) * (size_t)plan->u_bytes;
  CHECK(t, end * (size_t)plan->u_bytes <= plan->work_begin);
  CHECK(t, !plan->routes || end * (size_t)plan->u_bytes <= plan->u_begin);
  CHECK(t, plan->work_begin + plan->work_bytes <= plan->bytes[G2Z_MEMORY_HEAD]);
  CHECK(t, plan->u_begin + u <= plan->bytes[G2Z_MEMORY_HEAD]);
  for (int s = 0; s < plan->shapes; s++) {
    const g2z_matrices *shape = &plan->shape[s];
    const int rows = shape->rows, columns = shape->columns / shape->matrices;
    const int m = rows < columns ? rows : columns;
    CHECK(t, G2Z_ORTHOGONALIZE_WORK(m, rows + columns - m) * (size_t)plan->u_bytes <=
                 plan->work_bytes);
  }
}

/* All ranks know the same weights, homes and routes. A route takes an element from the owner's u to
 * its place at home. Each element arrives once, and no place at home is written twice. */
static void muon_routes(g2z_test *t, const g2z_plan *plan, muon_map *map) {
  size_t wrong = 0, moved = 0;
  const int travels = plan->world > 1 && plan->zero_stage > 0 &&
                      plan->strategy == G2Z_STRATEGY_ZERO;
  double most = 0, least = INFINITY, largest = 0;
  CHECK(t, plan->muon_weights == 4 * plan->model.layers && (plan->routes > 0) == travels);
  for (int r = 0; r < plan->routes; r++) {
    const g2z_route *route = &plan->route[r];
    wrong += (route->owner_at | route->home_at | route->elements) % 8 != 0;
    wrong += route->owner < 0 || route->owner >= plan->world;
    for (size_t e = 0; e < route->elements; e++, moved++) {
      const int32_t canonical = map->canonical[route->owner][route->owner_at + e];
      if (canonical < 0 || map->arrives[canonical]++) wrong++;
      wrong += map->home[route->home][route->home_at + e]++ != 0;
    }
  }
  size_t r = 0, left = plan->routes ? plan->route[0].elements : 0, count = 0;
  for (int w = 0; w < plan->muon_weights; w++) {
    const g2z_weight *weight = &plan->weight[w];
    const g2z_param_info info = g2z__param_describe(&plan->model, weight->param);
    const size_t begin = plan->unit[weight->unit].canonical + plan->offset[weight->param];
    const int matrices = muon_matrices(weight->param);
    const double cost = matrices * muon_cost((double)info.rows, (double)info.cols / matrices);
    count += info.elements;
    if (cost > largest) largest = cost;
    wrong += travels ? weight->home < 0 || weight->home >= plan->world : weight->home != -1;
    if (travels) map->load[weight->home] += cost;
    for (size_t e = 0; e < info.elements; e++, left--) {
      const int dp = plan->strategy == G2Z_STRATEGY_DP;
      wrong += map->owners[begin + e] != (travels || dp ? 1 : plan->world);
      if (!travels) { /* no route: u is made at home */
        for (int rank = 0; rank < (dp ? 1 : plan->world); rank++)
          wrong += map->canonical[rank][weight->home_at + e] != (int32_t)(begin + e);
        continue;
      }
      if (left == 0) left = plan->route[++r].elements; /* routes come in the order of the weights */
      const g2z_route *route = &plan->route[r];
      const size_t inside = route->elements - left;
      wrong += map->arrives[begin + e] != 1 || route->home != weight->home ||
               route->home_at + inside != weight->home_at + e ||
               map->canonical[route->owner][route->owner_at + inside] != (int32_t)(begin + e);
    }
  }
  CHECK(t, wrong == 0 && moved == (travels ? count : 0));
  for (int rank = 0; rank < plan->world && travels; rank++) {
    if (map->load[rank] > most) most = map->load[rank];
    if (map->load[rank] < least) least = map->load[rank];
  }
  CHECK(t, !travels || most - least <= largest);
}

static void test_muon_homes(g2z_test *t) {
  static const double buckets[] = {0, 0.002, 0.02};
  enum { COLUMNS = 5, MOST = 9 };
  for (int i = 0; i < MOST * COLUMNS * 3; i++) {
    const int world = 1 + i / COLUMNS / 3, column = i % COLUMNS, size = i / COLUMNS % 3;
    g2z_train_config config = test_config_of(1 + (i + world) % 5, 2, 16 << (i % 2), 8, 61);
    const int before = t->owned_count;
    muon_map map;
    g2z_weight *weights = NULL;
    g2z_route *routes = NULL;
    config.optimizer.kind = G2Z_OPTIMIZER_MUON;
    config.zero_stage = column % 4;
    config.strategy = column == 4 ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
    config.bucket_mb = buckets[size];
    const g2z_device_kind device = i % 4 == 3 ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU;
    memset(&map, 0, sizeof map);
    const g2z_plan *plan = test_plan(t, &config, device, 0, world);
    const size_t P = plan->parameters;
    map.owners = (unsigned char *)test_memory(t, 2 * P);
    map.arrives = map.owners + P;
    for (int rank = 0; rank < world; rank++) {
      map.canonical[rank] = (int32_t *)test_memory(t, P * sizeof(int32_t));
      memset(map.canonical[rank], 0xff, P * sizeof(int32_t)); /* -1 */
      map.home[rank] = (unsigned char *)test_memory(t, P);
    }
    for (int rank = 0; rank < world; rank++) {
      plan = test_plan(t, &config, device, rank, world);
      const size_t bytes = (size_t)plan->muon_weights * sizeof *weights;
      const size_t route_bytes = (size_t)plan->routes * sizeof *routes;
      muon_ranges(t, plan, &map);
      muon_shapes(t, plan);
      if (rank == 0) {
        weights = (g2z_weight *)test_memory(t, bytes);
        routes = (g2z_route *)test_memory(t, route_bytes);
        memcpy(weights, plan->weight, bytes);
        if (plan->routes) memcpy(routes, plan->route, route_bytes);
      }
      CHECK(t, memcmp(weights, plan->weight, bytes) == 0);
      CHECK(t, !plan->routes || memcmp(routes, plan->route, route_bytes) == 0);
    }
    muon_routes(t, plan, &map);
    test_end(t, before);
  }
}

/* A rank never needs more memory than with AdamW, apart from NCCL's, except for few tokens on many
 * ranks: the memory of the logits is then smaller than the matrices at home and their scratch. */
static void test_muon_bytes(g2z_test *t) {
  static const char *const models[] = {"gpt2", "gpt2-medium", "gpt2-xl"};
  for (int i = 0; i < 3 * 4 * 5 * 4; i++) {
    const int world = 1 << i / 3 % 4, column = i / 12 % 5, rank = column == 4 ? 0 : world - 1;
    g2z_train_config config = g2z_train_config_default(G2Z_DEVICE_CPU);
    size_t needs[2];
    CHECK_OK(t, g2z_model_config_named(&t->services, models[i % 3], &config.model));
    config.dtype = (i + i / 60) % 2 ? G2Z_FP16 : G2Z_FP32;
    config.zero_stage = column % 4;
    config.strategy = column == 4 ? G2Z_STRATEGY_DP : G2Z_STRATEGY_ZERO;
    config.batch = (world > 2 ? 4 : 1) << i / 60;
    for (int kind = 0; kind < 2; kind++) {
      config.optimizer.kind = (g2z_optimizer)kind;
      const g2z_plan *plan = test_plan(t, &config, G2Z_DEVICE_CUDA, rank, world);
      needs[kind] = plan->bytes_total;
    }
    CHECK(t, needs[G2Z_OPTIMIZER_MUON] < needs[G2Z_OPTIMIZER_ADAMW]);
  }
}

/* ----- Muon: a trainer --------------------------------------------------- */

typedef struct muon_step {
  float *was[3], *is[3], *grads; /* master, m and v before, after; of each parameter */
  g2z_optimizer_config config;
  g2z_report report;
} muon_step;

/* One tensor's step, in double. */
static void muon_tensor(g2z_test *t, void *user, const char *name, g2z_param param,
                        size_t canonical, size_t elements) {
  const muon_step *s = (const muon_step *)user;
  const g2z_plan *plan = (const g2z_plan *)t->plans[1];
  const g2z_param_info info = g2z__param_describe(&plan->model, param);
  const g2z_optimizer_config *c = &s->config;
  const int matrices = muon_matrices(param), rows = (int)info.rows, columns = (int)info.cols;
  const double share = matrices ? 1 : (double)c->adam_lr / (double)c->lr;
  const double lr = (double)s->report.lr * share, applied = (double)s->report.applied;
  const double clip = (double)c->clip / ((double)s->report.grad_norm + 1e-6);
  double *step = (double *)test_memory(t, elements * sizeof *step), worst[3] = {0, 0, 0};
  double b1 = matrices ? (double)c->momentum : (double)c->beta1, b2 = (double)c->beta2;
  for (int part = 0; part < 2; part++) {
    for (size_t i = 0; i < elements; i++) {
      const size_t at = canonical + i;
      const double g = (double)s->grads[at] * (clip < 1 ? clip : 1);
      const double m = b1 * (double)s->was[1][at] + (matrices ? g : (1 - b1) * g);
      const double v = matrices ? 0 : b2 * (double)s->was[2][at] + (1 - b2) * g * g;
      const double decay = info.rank == 2 ? lr * (double)c->weight_decay : 0;
      if (part == 0 && matrices) step[i] = g + b1 * m;
      if (part == 0 && !matrices)
        step[i] = m / (1 - pow(b1, applied)) /
                  (sqrt(v / (1 - pow(b2, applied))) + (double)c->eps);
      if (part == 0) continue;
      const double want[3] = {(double)s->was[0][at] * (1 - decay) - lr * step[i], m, v};
      for (int b = 0; b < 3; b++) {
        const double off = fabs((double)s->is[b][at] - want[b]);
        if (!(off <= worst[b])) worst[b] = off;
      }
    }
    for (int i = 0; i < matrices && part == 0; i++)
      muon_orthogonal(step + columns / matrices * i, rows, columns / matrices, columns);
    for (size_t i = 0; i < elements && part == 0 && matrices; i++)
      step[i] *= 0.2 * sqrt(columns / matrices);
  }
  FAIL_IF(t, !(worst[0] <= 1e-5 && worst[1] <= 1e-6 && worst[2] <= 1e-6),
          "%s: weights are off by %.3g, m by %.3g, v by %.3g", name, worst[0], worst[1], worst[2]);
}

/* Two steps of a model on one rank, tensor by tensor: matrices of blocks follow Muon, with a
 * clipped gradient, and have no v; the others follow AdamW. */
static void test_muon_trainer(g2z_test *t) {
  for (int i = 0; i < 4; i++) {
    g2z_train_config config = test_config_of(2, 2, 32, 16, 61);
    test_batch b = test_some_batch();
    muon_step s;
    config.zero_stage = i;
    config.accum = 1 + i % 2;
    config.bucket_mb = i == 1 ? 0.01 : 0;
    config.optimizer.kind = G2Z_OPTIMIZER_MUON;
    config.optimizer.momentum = 0.9f;
    config.optimizer.lr = config.optimizer.min_lr = 2e-2f;
    config.optimizer.adam_lr = 5e-3f;
    config.optimizer.warmup = 0;
    config.optimizer.clip = 0.5f;
    const size_t P = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1)->parameters;
    float *memory = (float *)test_memory(t, 7 * P * sizeof *memory);
    for (int part = 0; part < 3; part++) {
      s.was[part] = memory + (size_t)part * P;
      s.is[part] = s.was[part] + 3 * P;
    }
    s.grads = memory + 6 * P;
    s.config = config.optimizer;
    g2z_trainer *trainer = test_trainer_of(t, &config);
    for (int step = 0; step < 2; step++) {
      for (int part = 0; part < 3; part++)
        CHECK_OK(t, g2z_trainer_read(trainer, (g2z_buffer)part, 0, P, s.was[part]));
      test_steps(t, trainer, b.x, b.y, 1, NULL, &s.report);
      for (int part = 0; part < 3; part++)
        CHECK_OK(t, g2z_trainer_read(trainer, (g2z_buffer)part, 0, P, s.is[part]));
      CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_GRADS, 0, P, s.grads));
      CHECK(t, s.report.applied == step + 1 && s.report.grad_norm > s.config.clip);
      test_tensors(t, trainer->plan, muon_tensor, &s);
    }
  }
}

/* A step with a spike and one with NaN are skipped, before and after a resume. With either
 * optimizer no bit of the state changes. */
static void test_spikes_on(g2z_test *t, g2z_device_kind device) {
  static float states[2][3][20000];
  for (int i = 0; i < 4; i++) {
    const int kind = i / 2, resumed = i % 2;
    g2z_train_config config = test_config_of(1, 1, 16, 8, 61);
    test_batch b = test_some_batch();
    const char *saved = test_at(t, "spikes%d", kind);
    float good[16], high[16];
    g2z_report last;
    test_trainer tt;
    config.dtype = G2Z_FP16;
    config.tune = G2Z_TUNE_OFF;
    config.optimizer.kind = (g2z_optimizer)kind;
    config.optimizer.skip_spikes = 8;
    config.optimizer.loss_scale = 256;
    REQUIRE_OK(t, test_trainer_on(t, device, &config, &tt));
    const size_t P = tt.trainer->plan->parameters;
    CHECK(t, P <= 20000);
    if (resumed) CHECK_OK(t, g2z_trainer_load(tt.trainer, saved));
    else test_steps(t, tt.trainer, b.x, b.y, 22, NULL, &last);
    if (!resumed) CHECK(t, last.applied == 22 && last.spikes == 0 && last.loss_scale == 256);
    if (!resumed) CHECK_OK(t, g2z_trainer_save(tt.trainer, saved));
    /* The last LayerNorm's weights multiply all gradients below it. */
    CHECK_OK(t, g2z_trainer_read(tt.trainer, G2Z_BUFFER_MASTER, 0, 16, good));
    for (int nan = 0; nan < 2; nan++) {
      for (int k = 0; k < 16; k++) high[k] = nan ? NAN : 20 * good[k];
      CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, 0, 16, high));
      for (int after = 0; after < 2; after++) {
        if (after) test_steps(t, tt.trainer, b.x, b.y, 1, NULL, &last);
        for (int part = 0; part < 3; part++)
          CHECK_OK(t, g2z_trainer_read(tt.trainer, (g2z_buffer)part, 0, P, states[after][part]));
      }
      CHECK(t, last.skipped == 2 - nan && last.spikes == 1 && last.skipped_total == 1 + nan);
      CHECK(t, last.applied == 22 && last.loss_scale == 256);
      CHECK(t, nan || isfinite(last.grad_norm));
      CHECK(t, memcmp(states[0], states[1], sizeof states[0]) == 0);
    }
    CHECK_OK(t, g2z_trainer_write(tt.trainer, G2Z_BUFFER_MASTER, 0, 16, good));
    test_steps(t, tt.trainer, b.x, b.y, 1, NULL, &last);
    CHECK(t, !last.skipped && last.spikes == 1 && last.applied == 23 && isfinite(last.loss));
    test_trainer_close(t, &tt);
  }
}

static void test_spikes_trainer(g2z_test *t) { test_spikes_on(t, G2Z_DEVICE_CPU); }
static void test_cuda_spikes(g2z_test *t) {
  test_spikes_on(t, G2Z_DEVICE_CUDA);
}

/* After a change of optimizer the moments of matrices start at zero; other moments stay. */
static void muon_changed(g2z_test *t, void *user, const char *name, g2z_param param,
                         size_t canonical, size_t elements) {
  float *const *moments = (float *const *)user; /* saved m and v; loaded m and v */
  int zero = 1, same = 1;
  for (int part = 0; part < 2; part++)
    for (size_t i = canonical; i < canonical + elements; i++) {
      zero &= moments[2 + part][i] == 0;
      same &= moments[2 + part][i] == moments[part][i];
    }
  FAIL_IF(t, muon_matrices(param) ? !zero : !same || zero, "%s: moments are %s", name, zero ? "zero"
          : "not right");
}

/* A run resumes with the other optimizer: its matrices' moments start at zero, with a warning, and
 * its first step is no larger than AdamW's steps are. */
static void test_muon_change(g2z_test *t) {
  for (int muon = 0; muon < 2; muon++) { /* 0: saved with AdamW; 1: with Muon */
    float losses[16], *moments[6];
    g2z_train_config config = test_saved_config(t);
    const char *at = test_at(t, "change%d", muon);
    g2z_trainer *trainer = NULL;
    double moved = 0;
    config.optimizer.kind = muon ? G2Z_OPTIMIZER_MUON : G2Z_OPTIMIZER_ADAMW;
    const size_t P = test_plan(t, &config, G2Z_DEVICE_CPU, 0, 1)->parameters;
    for (int i = 0; i < 6; i++) moments[i] = (float *)test_memory(t, P * sizeof(float));
    for (int other = 0; other < 2; other++) {
      test_warnings_begin(t);
      if (other) config.optimizer.kind = muon ? G2Z_OPTIMIZER_ADAMW : G2Z_OPTIMIZER_MUON;
      trainer = test_trainer_of(t, &config);
      if (other) CHECK_OK(t, g2z_trainer_load(trainer, at));
      else test_saved_steps(t, trainer, 3, losses, NULL);
      test_warnings_end(t);
      if (!other) CHECK_OK(t, g2z_trainer_save(trainer, at));
      for (int part = 0; part < 2; part++)
        CHECK_OK(t, g2z_trainer_read(trainer, part ? G2Z_BUFFER_V : G2Z_BUFFER_M, 0, P,
                                     moments[2 * other + part]));
    }
    CHECK_HAS(t, test_warnings, muon ? "muon -> adamw" : "adamw -> muon", "zero");
    test_tensors(t, trainer->plan, muon_changed, moments);
    CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, P, moments[4]));
    test_saved_steps(t, trainer, 4, losses, NULL);
    CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, P, moments[5]));
    for (size_t i = 0; i < P; i++)
      moved = fmax(moved, fabs((double)moments[5][i] - (double)moments[4][i]));
    CHECK(t, isfinite(losses[4]) && moved > 0 && moved < 2 * (double)config.optimizer.lr);
  }
}

/* In a file, v of Muon's weights is zero; v of other tensors is not. */
static void muon_filed(g2z_test *t, void *user, const char *name, g2z_param param,
                       size_t canonical, size_t elements) {
  const float *v = (const float *)user;
  int zero = 1;
  for (size_t i = canonical; i < canonical + elements; i++) zero &= v[i] == 0;
  FAIL_IF(t, zero != (muon_matrices(param) > 0), "%s: v is %s", name, zero ? "zero" : "not zero");
}

static void test_muon_files(g2z_test *t) {
  char *text;
  float losses[8], *v;
  size_t bytes;
  g2z_train_config config = test_saved_config(t);
  const char *at = test_at(t, "zeros");
  config.optimizer.kind = G2Z_OPTIMIZER_MUON;
  g2z_trainer *trainer = test_trainer_of(t, &config);
  test_saved_steps(t, trainer, 2, losses, NULL);
  CHECK_OK(t, g2z_trainer_save(trainer, at));
  const size_t P = trainer->plan->parameters;
  text = test_file(t, test_at(t, "zeros/optimizer.state"), &bytes);
  v = (float *)test_memory(t, P * sizeof *v);
  if (bytes > P * sizeof(float)) memcpy(v, text + bytes - P * sizeof(float), P * sizeof(float));
  test_tensors(t, trainer->plan, muon_filed, v);
  CHECK_OK(t, g2z_trainer_load(trainer, at));
}

/* The program reports the optimizer and numbers the spikes. With lr 0 the norms differ only because
 * the batches differ: some exceed the mean by more than 0.3 deviations. */
static void test_train_muon(g2z_test *t) {
  const char *said = test_trains(t, 0, "%s --batch 2 --steps 40 --optimizer muon --skip-spikes 0.3 "
                                 "--lr 0 --save-every 30 --run-dir %s", test_tiny(t),
                                 test_at(t, "muon"));
  const char *log = test_read(t, "muon/train.log"), *metrics = test_read(t, "muon/metrics.jsonl");
  const int spikes = test_times(metrics, "\"skipped\": 2");
  CHECK(t, spikes > 0 && test_times(metrics, "\"skipped\": 1") == 0);
  /* The console shows each spike, and how many there were. */
  CHECK_HAS(t, said, "optimizer: Muon for the blocks' ", " weights, AdamW for the rest\n",
            "\nschedule: cosine, lr 0 to 0 for Muon, lr 0 for AdamW, 4 steps of warm-up\n",
            "\nspikes: skips steps whose gradient norm is 0.3 deviations above its mean\n",
            test_text(", 40 steps (%d skipped, %d as spikes), 1280 tokens, ", spikes, spikes));
  CHECK(t, test_times(said, " | spike ") == spikes);
  CHECK_HAS(t, log, " | spike 1, skipped\n", test_text(" | spike %d, skipped\n", spikes));
  CHECK(t, test_times(log, " | spike ") == spikes);
  CHECK_HAS(t, test_read(t, "muon/training_metrics.json"), "\"optimizer\": \"muon\"",
            "\"adam_lr\": 0,",
            test_text("\"optimizer_steps\": %d,", 40 - spikes));
  CHECK_HAS(t, test_trains(t, 0, "%s --batch 2 --steps 40 --resume %s --run-dir %s", test_tiny(t),
                           test_at(t, "muon/step-000030"), test_at(t, "adamw")),
            "optimizer changed since the checkpoint: muon -> adamw; the moments of the blocks' "
            "weights start at zero");
}

/* The default learning rates. A resume whose flags repeat them changes no setting. A run that
 * diverges names the rates that it had. */
static void test_train_rates(g2z_test *t) {
  static const struct {
    const char *flags, *repeated, *says;
  } cases[] = {
      {"", "--lr 6e-4 --min-lr 6e-5", "cosine, lr 0.0006 to 6e-05, "},
      {"--lr 1.2345678e-4", "--min-lr 1.2345678e-5", "cosine, lr 0.000123457 to 1.23457e-05, "},
      {"--optimizer muon", "--lr 4e-3 --min-lr 4e-4 --adam-lr 2.4e-3 --momentum 0.9",
       "cosine, lr 0.004 to 0.0004 for Muon, lr 0.0024 for AdamW, "},
      {"--optimizer muon --lr 1e-4", "--min-lr 1e-5 --adam-lr 6e-5",
       "cosine, lr 0.0001 to 1e-05 for Muon, lr 6e-05 for AdamW, "}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *always = test_text("%s --batch 2 --steps 4 --save-every 2 %s --run-dir %s/rates%zu",
                                   test_tiny(t), cases[i].flags, t->directory, i);
    CHECK_HAS(t, test_trains(t, 0, "%s --max-train-steps 2", always), cases[i].says);
    const char *said = test_trains(t, 0, "%s --resume latest %s", always, cases[i].repeated);
    CHECK_HAS(t, said, "resumed after step 2", cases[i].says);
    CHECK(t, !strstr(said, "changed since"));
  }
  CHECK_HAS(t, test_read(t, "rates1/training_metrics.json"), "\"lr\": 0.00012345678,");
  CHECK_HAS(t, test_trains(t, 0, "%s --steps 3 --run-dir none --optimizer muon --lr 1e-4 "
                           "--adam-lr 5", test_tiny(t)), "warning: the run diverged: ",
            ": it needs a lower --lr (0.0001) and --adam-lr (5)\n");
}

/* ----- Muon: rank programs ----------------------------------------------- */

enum { MUON_STEPS = 6, MUON_SAVED = 3, MUON_MOST = 90000 };
/* A rank's results of a training in one column of zero_config; NaN: weights of other ranks. */
typedef struct muon_result {
  /* [0]: from the start; [1]: from the checkpoint that one rank saved after MUON_SAVED steps. */
  float losses[2][MUON_STEPS], weights[2][MUON_MOST];
} muon_result;

/* One or two micro-steps, a small or a large vocabulary, two sizes of buckets. Ranks share 24
 * sequences. */
static g2z_train_config muon_config(int column, int world) {
  g2z_train_config config = zero_config(column + ZERO_COLUMNS * (column % 2), 0, world, G2Z_FP32);
  config.bucket_mb = column % 2 ? 0.02 : 0.002;
  config.accum = 1 + column % 2;
  config.batch = 24 / (world * config.accum);
  config.dropout = 0;
  config.optimizer.kind = G2Z_OPTIMIZER_MUON;
  return config;
}

/* Steps first..last - 1 and their losses. */
static void muon_steps(g2z_test *t, g2z_trainer *trainer, int first, int last, float *losses) {
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  const g2z_plan *plan = trainer->plan;
  g2z_report report;
  for (int step = first; step < last; step++) {
    zero_tokens(step, plan->rank, plan->world, plan->batch * plan->accum * plan->world,
                plan->model.vocab, x, y);
    REQUIRE_OK(t, g2z_trainer_step_batch(trainer, x, y, &report));
    REQUIRE_OK(t, g2z_trainer_flush(trainer, &report));
    losses[step] = report.loss;
  }
}

/* A step with a NaN in a weight, which makes all gradients NaN, changes no bit. */
static void muon_skips(g2z_test *t, g2z_trainer *trainer) {
  static float states[2][3][MUON_MOST];
  const float nan = NAN;
  float losses[1], good = 0;
  CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, 1, &good));
  CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, 0, 1, &nan));
  for (int after = 0; after < 2; after++) {
    if (after) muon_steps(t, trainer, 0, 1, losses);
    for (int b = 0; b < 3; b++)
      CHECK_OK(t, g2z_trainer_read(trainer, (g2z_buffer)b, 0, trainer->plan->parameters,
                                   states[after][b]));
  }
  for (int b = 0; b < 3; b++)
    CHECK(t, memcmp(states[0][b], states[1][b], sizeof states[0][b]) == 0);
  CHECK_OK(t, g2z_trainer_write(trainer, G2Z_BUFFER_MASTER, 0, 1, &good));
}

/* muon DIRECTORY: in each column, a training that saves; the same resumed, with a skipped step; and
 * on several ranks one that resumes where one rank saved. Writes its results to a file. */
static void rank_muon(g2z_test *t, char **argv) {
  static muon_result results[ZERO_COLUMNS], again;
  g2z_context *context = rank_context(t, 0);
  const int world = context->world, before = t->owned_count;
  const size_t rest = (MUON_STEPS - MUON_SAVED) * sizeof(float);
  for (int i = 0; i < 3 * ZERO_COLUMNS; i++) {
    const int column = i / 3, turn = i % 3, other = turn == 2;
    const g2z_train_config config = muon_config(column, world);
    muon_result *first = &results[column], *out = turn == 1 ? &again : first;
    const char *saved = test_text("%s/at.%d.%d", argv[0], column, turn < 2 ? world : 1);
    g2z_trainer *trainer = rank_trainer(t, context, &config);
    for (int e = 0; e < MUON_MOST; e++) out->weights[other][e] = NAN;
    if (turn > 0) REQUIRE_OK(t, g2z_trainer_load(trainer, saved));
    else muon_steps(t, trainer, 0, MUON_SAVED, out->losses[0]);
    if (turn == 0) REQUIRE_OK(t, g2z_trainer_save(trainer, saved));
    if (turn == 1) muon_skips(t, trainer);
    muon_steps(t, trainer, MUON_SAVED, MUON_STEPS, out->losses[other]);
    CHECK_OK(t, g2z_trainer_read(trainer, G2Z_BUFFER_MASTER, 0, trainer->plan->parameters,
                                 out->weights[other]));
    if (turn == 1) { /* resumed, it is the same */
      CHECK(t, memcmp(again.losses[0] + MUON_SAVED, first->losses[0] + MUON_SAVED, rest) == 0);
      CHECK(t, memcmp(again.weights[0], first->weights[0], sizeof again.weights[0]) == 0);
    }
    test_end(t, before);
  }
  CHECK_OK(t, rank_leaves(test_text("%s/result.%d", argv[0], context->rank), results,
                          sizeof results));
}

/* Runs rank_muon; the ranks' weights are put together. */
static int muon_run(g2z_test *t, int world, muon_result results[ZERO_COLUMNS]) {
  static muon_result mine[ZERO_COLUMNS];
  const int failures = t->failures;
  test_ranks_job(t, world, 0, NULL, "muon %s", t->directory);
  for (int rank = 0; rank < world && t->failures == failures; rank++) {
    test_takes(t, test_at(t, "result.%d", rank), mine, sizeof mine);
    if (rank == 0) memcpy(results, mine, sizeof mine);
    for (int i = 0; i < 2 * ZERO_COLUMNS; i++)
      for (int e = 0; e < MUON_MOST; e++) {
        const float weight = mine[i / 2].weights[i % 2][e];
        if (!isnan(weight)) results[i / 2].weights[i % 2][e] = weight;
      }
  }
  return t->failures == failures;
}

/* Two to four ranks against one, from the start and from one rank's checkpoint. Gradients differ by
 * some 2^-24. Newton-Schulz multiplies that by up to 3.4445^5 = 485 in directions with small
 * singular values, and a weight moves by lr 0.2 sqrt(4 C) = 0.009 of it: 3e-7 a step. */
static void test_muon_ranks(g2z_test *t) {
  static muon_result one[ZERO_COLUMNS], many[ZERO_COLUMNS];
  for (int world = 1; world <= 4; world++) {
    if (!muon_run(t, world, world == 1 ? one : many)) return;
    double worst = 0, apart = 0;
    for (int i = 0; i < ZERO_COLUMNS && world > 1; i++) {
      for (int resumed = 0; resumed < 2; resumed++) {
        for (int step = resumed ? MUON_SAVED : 0; step < MUON_STEPS; step++) {
          const double off = fabs((double)many[i].losses[resumed][step] -
                                  (double)one[i].losses[0][step]);
          if (!(off <= worst)) worst = off;
        }
        for (int e = 0; e < MUON_MOST; e++) {
          const float want = one[i].weights[0][e], got = many[i].weights[resumed][e];
          const double off = fabs((double)got - (double)want);
          if (isnan(want) && isnan(got)) continue; /* after the last parameter */
          if (!(off <= apart)) apart = off;
        }
      }
    }
    if (world == 1) continue;
    CHECK_NEAR(t, worst, 0, 2e-6);
    CHECK_NEAR(t, apart, 0, 2e-6);
    /* With strategy dp rank 0 computes the same as each rank in stage 0. */
    CHECK(t, memcmp(&many[ZERO_DP], &many[0], sizeof many[0]) == 0);
  }
}
