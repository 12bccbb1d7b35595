/* Tests of the room "ranks": real processes that meet, exchange data, die, hang and are supervised,
 * and the scripts that start them. */

/* ----- rank programs ----- */

static void rank_on_fault(void *user, const g2z_fault *fault) {
  (void)user;
  printf("fault of rank %d: %s\n", fault->rank, fault->sentence);
  fflush(stdout);
  _exit(G2Z_EXIT_LOST);
}

static void rank_on_fault_returns(void *user, const g2z_fault *fault) {
  (void)user;
  printf("fault of rank %d: %s\n", fault->rank, fault->sentence);
  fflush(stdout);
}

/* Standard error becomes a pipe that takes no output. */
static void rank_console_full(void) {
  int ends[2];
  if (pipe(ends) != 0 || fcntl(ends[1], F_SETFL, O_NONBLOCK) != 0) exit(1);
  while (write(ends[1], "full", 4) > 0) {
  }
  fcntl(ends[1], F_SETFL, 0);
  dup2(ends[1], STDERR_FILENO);
}

static const char *rank_trouble_text(void *user) { return (const char *)user; }

static g2z_services rank_services; /* this process is one rank */

static void rank_log(void *user, g2z_log_level level, const char *sentence) {
  (void)user, (void)level;
  printf("%s\n", sentence);
  fflush(stdout);
}

/* Joins at the environment's place with short deadlines; on failure prints why and exits with 1.
 * Arguments NAME=VALUE change the config. */
static g2z_ranks *rank_join(int argc, char **argv) {
  g2z_ranks_config config = g2z_ranks_config_default();
  g2z_place *place = &config.place;
  g2z_ranks *ranks = NULL;
  rank_services.log = rank_log;
  config.on_fault = rank_on_fault;
  g2z_status status = g2z_place_find(&rank_services, place);
  for (int i = 0; i < argc; i++) {
    const char *value = strchr(argv[i], '=');
    if (!value++) continue;
    if (strncmp(argv[i], "join=", 5) == 0) config.join_s = rank_seconds(atof(value));
    if (strncmp(argv[i], "silence=", 8) == 0) config.silence_s = rank_seconds(atof(value));
    if (strncmp(argv[i], "hang=", 5) == 0) config.hang_s = rank_seconds(atof(value));
    if (strncmp(argv[i], "world=", 6) == 0) place->world = atoi(value);
    if (strncmp(argv[i], "local=", 6) == 0) place->local_world = atoi(value);
    if (strncmp(argv[i], "host=", 5) == 0) snprintf(place->host, sizeof place->host, "%s", value);
    if (strncmp(argv[i], "device=", 7) == 0) config.device = value;
    if (strncmp(argv[i], "build=", 6) == 0) config.build = value;
    if (strcmp(argv[i], "handler=none") == 0) config.on_fault = NULL;
    if (strcmp(argv[i], "handler=returns") == 0) config.on_fault = rank_on_fault_returns;
    if (strcmp(argv[i], "console=full") == 0) rank_console_full();
    if (strncmp(argv[i], "interrupts=", 11) == 0) test_interrupts = 1;
    if (strncmp(argv[i], "files=", 6) == 0) {
      const struct rlimit limit = {(rlim_t)atoi(value), (rlim_t)atoi(value)};
      setrlimit(RLIMIT_NOFILE, &limit);
    }
  }
  if (status == G2Z_OK) status = g2z__ranks_join(&rank_services, &config, &ranks);
  if (status == G2Z_OK) printf("rank %d has met the others\n", place->rank);
  else printf("join: %s: %s\n", test_meaning[status], rank_services.error);
  fflush(stdout);
  if (status != G2Z_OK) exit(1);
  return ranks;
}

/* Leaves the job; returns the exit code for this status. */
static int rank_end(g2z_ranks *ranks, g2z_status status) {
  if (status != G2Z_OK)
    printf("failed: %s: %s\n", test_meaning[status], rank_services.error);
  g2z__ranks_leave(ranks);
  return status == G2Z_OK ? 0 : 3;
}

/* Makes every call several times and checks its result. */
static int rank_calls(int argc, char **argv) {
  g2z_ranks *ranks = rank_join(argc, argv);
  const int rank = g2z_ranks_place(ranks)->rank, world = g2z_ranks_place(ranks)->world;
  const char *error = rank_services.error;
  int bad = 0, all[RANKS_MOST], mine, third = 0;
  char text[64];
  for (int turn = 0; turn < 50; turn++) {
    mine = 100 * turn + rank;
    bad += g2z_ranks_all_gather(ranks, &mine, sizeof mine, all) != G2Z_OK;
    for (int r = 0; r < world; r++) bad += all[r] != 100 * turn + r;
    third = rank == 0 ? turn * 7 : -1;
    bad += g2z_ranks_broadcast(ranks, &third, sizeof third) != G2Z_OK || third != turn * 7;
    bad += g2z_ranks_agree(ranks, G2Z_OK) != G2Z_OK;
    const char *const same[] = {"one\ntwo", "", NULL};
    bad += g2z_ranks_same(ranks, "turn", same[turn % 3]) != G2Z_OK;
  }
  bad += g2z_ranks_all_gather(ranks, NULL, 0, all) != G2Z_OK; /* a barrier */
  /* The lowest failing rank's status and sentence reach all ranks. */
  snprintf(rank_services.error, sizeof rank_services.error, "disk %d is full", rank);
  g2z_status mishap = rank == world - 1 ? G2Z_IO : rank ? G2Z_DEVICE : G2Z_OK;
  g2z_status status = g2z_ranks_agree(ranks, mishap);
  bad += status != (world > 2 ? G2Z_DEVICE : G2Z_IO);
  bad += strcmp(error, "rank 1: disk 1 is full") != 0 || !rank_services.alike;
  snprintf(text, sizeof text, "model gpt2\nbatch %d\nseq 8", rank == 1 ? 4 : 8);
  status = g2z_ranks_same(ranks, "config", text);
  bad += status != G2Z_BAD_ARGUMENT || !strstr(error, "rank 1: the config differs from rank 0's: "
                                                      "\"batch 4\" there, \"batch 8\" on rank 0");
  if (bad) printf("%d wrong; last: %s\n", bad, error);
  g2z__ranks_leave(ranks);
  return bad ? 2 : 0;
}

/* 32 MB of each rank reach all ranks. With late=SECONDS rank 0 receives later: heartbeats must not
 * queue up after data that has not been received. */
static int rank_stream(int argc, char **argv) {
  enum { COUNT = 8 << 20 };
  g2z_ranks *ranks = rank_join(argc, argv);
  const uint32_t rank = (uint32_t)g2z_ranks_place(ranks)->rank;
  const uint32_t world = (uint32_t)g2z_ranks_place(ranks)->world;
  uint32_t *all = (uint32_t *)calloc(world * COUNT, sizeof *all), *mine = all + rank * COUNT;
  int wrong = 0;
  for (uint32_t i = 0; i < COUNT; i++) mine[i] = (rank * COUNT + i) * 2654435761u;
  for (int i = 0; i < argc && !rank; i++)
    if (strncmp(argv[i], "late=", 5) == 0) rank_sleep(atof(argv[i] + 5));
  g2z_status status = g2z_ranks_all_gather(ranks, mine, COUNT * sizeof *mine, all);
  for (uint32_t i = 0; i < world * COUNT; i++) wrong += all[i] != i * 2654435761u;
  free(all);
  int code = rank_end(ranks, status);
  return code ? code : wrong ? 2 : 0;
}

/* Rank 1 makes a different call from the others'. */
static int rank_mismatch(int argc, char **argv) {
  g2z_ranks *ranks = rank_join(argc, argv);
  int value = 0, all[RANKS_MOST];
  g2z_status status = g2z_ranks_place(ranks)->rank == 1
                          ? g2z_ranks_broadcast(ranks, &value, sizeof value)
                          : g2z_ranks_all_gather(ranks, &value, sizeof value, all);
  printf("%s\n", rank_services.error);
  if (g2z_ranks_agree(ranks, G2Z_OK) == G2Z_OK) status = G2Z_OK; /* the job stays out of step */
  return rank_end(ranks, status);
}

/* ----- rank programs: one rank dies, hangs or leaves ----- */

/* "loop TURNS RANK WHAT": all ranks run short steps; in step 20 RANK does WHAT. */
static int rank_loop(int argc, char **argv) {
  g2z_ranks *ranks = rank_join(argc, argv);
  const int rank = g2z_ranks_place(ranks)->rank, turns = argc > 0 ? atoi(argv[0]) : 0;
  const int odd = argc > 1 && rank == atoi(argv[1]);
  const char *what = argc > 2 ? argv[2] : "";
  int all[RANKS_MOST];
  g2z_status status = G2Z_OK;
  for (int turn = 1; turn <= turns && status == G2Z_OK; turn++) {
    g2z__ranks_phase(ranks, "data", turn, 0);
    if (turn == 20 && strcmp(what, "stuck") == 0) { /* all ranks hang, the odd one first */
      if (!odd) rank_sleep(0.1);
      g2z__ranks_phase(ranks, "forward", turn, 0);
      rank_sleep(100);
    }
    if (turn == 20 && strcmp(what, "save") == 0) { /* a long phase that all ranks announced */
      g2z__ranks_phase(ranks, "save", turn, 5);
      if (odd) rank_sleep(1.5);
    } else if (turn == 20 && strncmp(what, "alone", 5) == 0) { /* the others wait; RANK leaves */
      g2z__ranks_note(ranks, "graph", -1, 0);
      if (!odd) rank_sleep(100);
      rank_sleep(0.2);
      g2z__ranks_alone(ranks);
      if (what[5]) rank_sleep(100); /* and its device hangs, too */
      break;
    } else if (turn == 20 && odd) {
      if (strcmp(what, "hang") == 0) rank_sleep(100);
      if (strcmp(what, "crash") == 0) abort();
      if (strcmp(what, "cut") == 0) shutdown(ranks->peers[rank ? 0 : 2].data.socket, SHUT_RDWR);
      if (strcmp(what, "leave") == 0) break;
      if (strcmp(what, "free") == 0) {
        g2z__ranks_part(ranks);
        break;
      }
      if (strcmp(what, "trouble") == 0)
        g2z__ranks_progress(ranks, NULL, rank_trouble_text, (void *)"a link is down");
    } else if (turn == 1 && odd && strcmp(what, "die") == 0) {
      raise(SIGKILL);
    }
    rank_sleep(0.001);
    g2z__ranks_phase(ranks, "forward", turn, 0);
    status = g2z_ranks_all_gather(ranks, &turn, sizeof turn, all);
  }
  if (status == G2Z_OK && odd && strcmp(what, "late") == 0) rank_sleep(0.5);
  if (status == G2Z_OK && !odd && strcmp(what, "linger") == 0) rank_sleep(100);
  int code = rank_end(ranks, status);
  if (status == G2Z_OK && odd && strcmp(what, "leave") == 0) rank_sleep(0.5);
  return code;
}

static volatile sig_atomic_t rank_signal;
static void rank_on_signal(int signal) { rank_signal = signal; }

/* "spawn WHAT": g2z_ranks_spawn starts three ranks; rank 1 does WHAT. */
static int rank_spawn(int argc, char **argv) {
  int is_parent, code;
  rank_services.log = rank_log;
  g2z_status status = g2z_ranks_spawn(&rank_services, 3, argv - 3, &is_parent, &code);
  if (status != G2Z_OK) return rank_end(NULL, status);
  if (is_parent) return code;
  const char *what = argc > 0 ? argv[0] : "";
  if (strcmp(what, "saved") == 0) { /* rank 1 fails after the others stopped */
    if (strcmp(getenv("RANK"), "1") != 0) _exit(G2Z_EXIT_STOPPED);
    rank_sleep(0.3);
    _exit(5);
  }
  if (strcmp(what, "early") == 0 && strcmp(getenv("RANK"), "1") == 0) raise(SIGKILL);
  if (strcmp(what, "early-exit") == 0 && strcmp(getenv("RANK"), "0") == 0) _exit(9);
  if (strncmp(what, "early", 5) != 0) signal(SIGTERM, rank_on_signal);
  g2z_ranks *ranks = rank_join(argc, argv);
  const g2z_place *place = g2z_ranks_place(ranks);
  printf("process %d is rank %d of %d, %d of %d here, %s\n", (int)getpid(), place->rank,
         place->world, place->local_rank, place->local_world, place->launcher);
  fflush(stdout);
  if (place->rank == 1 && strcmp(what, "exit") == 0) _exit(5);
  if (place->rank == 1 && strcmp(what, "kill") == 0) raise(SIGKILL);
  if (place->rank == 1 && strcmp(what, "stop") == 0) raise(SIGSTOP);
  int wait = strcmp(what, "signal") == 0 || strcmp(what, "orphan") == 0, value = 0;
  for (int turn = 0; wait && !rank_signal && turn < 10000; turn++) rank_sleep(0.005);
  if (rank_signal) printf("rank %d got signal %d\n", place->rank, (int)rank_signal);
  else status = g2z_ranks_broadcast(ranks, &value, sizeof value);
  code = rank_end(ranks, status);
  return rank_signal ? G2Z_EXIT_STOPPED : code;
}

/* "slow": a step of ten micro-steps, each of which takes 0.2 s on rank 1. The other rank waits for
 * their sum longer than hang_s, but each micro-step counts as progress. */
static g2z_ops slow_ops;
static const g2z_ops *slow_right;
static g2z_status slow_embed(g2z_device *device, const g2z_embed_fwd *op) {
  rank_sleep(0.2);
  return slow_right->embed_fwd(device, op);
}
static void rank_slow(g2z_test *t, char **argv) {
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ] = {0};
  g2z_report report;
  g2z_context *context;
  g2z_context_config cc = g2z_context_config_default(&t->services);
  (void)argv;
  cc.device = G2Z_DEVICE_CPU;
  cc.ranks.hang_s = rank_seconds(1);
  cc.ranks.on_fault = rank_on_fault;
  REQUIRE_OK(t, g2z_context_create(&cc, &context));
  test_own(t, test_end_context, context);
  g2z_train_config config = zero_config(0, 0, 2, G2Z_FP32);
  config.batch = 1;
  config.accum = 10;
  g2z_trainer *trainer = rank_trainer(t, context, &config);
  slow_right = trainer->device->ops;
  slow_ops = *slow_right;
  slow_ops.embed_fwd = slow_embed;
  if (context->rank == 1) trainer->device->ops = &slow_ops;
  REQUIRE_OK(t, g2z_trainer_step_batch(trainer, x, x, &report));
  REQUIRE_OK(t, g2z_trainer_flush(trainer, &report));
}

/* "lost TRANSPORT WHERE HOW": a program that embeds the library without a handler. At a place, one
 * rank is lost: it is killed or stopped, returns from main, or leaves the job. */
static void lost_here(const char *const words[3], const char *where, g2z_context *context,
                      g2z_trainer *trainer) {
  const char *how = words[2];
  if (context->rank != 1 || strcmp(words[1], where) != 0) return;
  printf("lost at %.3f\n", g2z_seconds());
  fflush(stdout);
  if (strcmp(how, "kill") == 0) raise(SIGKILL);
  if (strcmp(how, "stop") == 0) raise(SIGSTOP);
  if (strcmp(how, "leave") == 0) {
    g2z_trainer_free(trainer);
    g2z_context_free(context);
  }
  exit(0);
}
static int rank_lost(int argc, char **argv) {
  enum { STEPS = 40 };
  const char *const words[] = {argc > 0 ? argv[0] : "", argc > 1 ? argv[1] : "",
                               argc > 2 ? argv[2] : ""};
  int32_t x[ZERO_SEQUENCES * ZERO_SEQ], y[ZERO_SEQUENCES * ZERO_SEQ];
  g2z_context *context;
  g2z_trainer *trainer = NULL;
  g2z_report report;
  g2z_context_config cc = g2z_context_config_default(&rank_services);
  cc.ranks.silence_s = rank_seconds(2);
  g2z_status status = g2z_context_create(&cc, &context);
  if (status != G2Z_OK) return 1;
  g2z_train_config config = zero_config(1, 1, context->world, G2Z_FP16); /* ZeRO stage 1 */
  config.transport = strcmp(words[0], "nccl") == 0 ? G2Z_TRANSPORT_NCCL : G2Z_TRANSPORT_COPY;
  lost_here(words, "create", context, NULL);
  status = g2z_trainer_create(context, &config, &trainer);
  for (int step = 0; step < STEPS && status == G2Z_OK; step++) {
    zero_tokens(step, context->rank, context->world, config.batch * config.accum * context->world,
                config.model.vocab, x, y);
    if (step == STEPS / 2) lost_here(words, "step", context, trainer);
    status = g2z_trainer_step_batch(trainer, x, y, &report);
  }
  lost_here(words, "save", context, trainer);
  if (status == G2Z_OK) status = g2z_trainer_save(trainer, getenv("G2Z_TEST_SAVED"));
  if (status != G2Z_OK) printf("failed: %s\n", rank_services.error);
  lost_here(words, "free", context, trainer);
  g2z_trainer_free(trainer);
  g2z_context_free(context);
  return status == G2Z_OK ? 0 : 3;
}

/* ----- tests of places ----- */

/* The place that "NAME=value NAME=value" describes, in which ~ stands for a space, without any
 * launcher's other variables. No call here may use setenv, which may free the environment, while
 * environ is replaced. */
static g2z_status test_place(g2z_test *t, const char *variables, g2z_place *place) {
  char line[600], **kept = environ;
  const char *words[16];
  int count = 0;
  snprintf(line, sizeof line, "%s", variables);
  for (char *word = strtok(line, " "); word && count < 16; word = strtok(NULL, " ")) {
    for (char *c = word; *c; c++) *c = *c == '~' ? ' ' : *c;
    words[count++] = word;
  }
  environ = test_ranks_environment(words, count);
  g2z_status status = g2z_place_find(&t->services, place);
  free(environ);
  environ = kept;
  return status;
}

static void test_places(g2z_test *t) {
  static const struct {
    const char *variables;
    int rank, world, local_rank, local_world;
    const char *launcher, *host;
    int port;                   /* from 20000 on: derived from the job */
    const char *job;
  } cases[] = {
      {"", 0, 1, 0, 1, "alone", "127.0.0.1", 0, ""},
      {"SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_JOB_ID=7", 0, 1, 0, 1, "alone", "127.0.0.1", 0, ""},
      {"SLURM_NTASKS=8 SLURM_PROCID=0", 0, 1, 0, 1, "alone", "127.0.0.1", 0, ""},
      {"RANK= WORLD_SIZE=", 0, 1, 0, 1, "alone", "127.0.0.1", 0, ""},
      {"RANK=0 WORLD_SIZE=1", 0, 1, 0, 1, "torchrun", "127.0.0.1", 29850, "torchrun - - - 1"},
      {"RANK=2 WORLD_SIZE=4 MASTER_PORT=29500", 2, 4, 2, 4, "torchrun", "127.0.0.1", 29500,
       "torchrun - - 29500 4"},
      {"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node7 MASTER_PORT=29400 "
       "TORCHELASTIC_RUN_ID=abc TORCHELASTIC_RESTART_COUNT=2", 5, 8, 1, 4, "torchrun", "node7",
       29400, "torchrun abc 2 29400 8"},
      {"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=10.0.0.7 MASTER_PORT=1", 5, 8, 1, 0,
       "torchrun", "10.0.0.7", 1, "torchrun - - 1 8"},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=2 G2Z_RUN_ID=mine", 1, 2, 1, 2,
       "torchrun", "127.0.0.1", 2, "mine"},
      /* mpirun starts torchrun */
      {"RANK=1 WORLD_SIZE=2 MASTER_PORT=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", 1, 2, 1,
       2, "torchrun", "127.0.0.1", 2, "torchrun - - 2 2"},
      {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 "
       "OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=77", 3, 4, 3, 4, "openmpi", "127.0.0.1", 26528,
       "openmpi 77 -"},
      /* a batch job starts mpirun */
      {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
       "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=77 MASTER_PORT=4000 SLURM_NTASKS=4 "
       "SLURM_PROCID=0 MASTER_ADDR=n05", 3, 4, 1, 2, "openmpi", "n05", 4000, "openmpi 77 -"},
      {"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_JOBID=9", 1, 2, 1, 2, "pmi",
       "127.0.0.1", 22370, "pmi 9 - -"},
      {"PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=fe80::1", 3, 4, 1, 2,
       "pmi", "fe80::1", 23218, "pmi - - -"},
      {"PMI_RANK=3 PMI_SIZE=4 SLURM_LOCALID=1 SLURM_JOB_ID=8 SLURM_STEP_ID=1 MASTER_ADDR=gpu001", 3,
       4, 1, 0, "pmi", "gpu001", 21421, "pmi - 8 1"},
      {"SLURM_NTASKS=8 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 "
       "SLURM_STEP_NUM_NODES=2 SLURM_JOB_ID=4711 SLURM_STEP_ID=0 MASTER_ADDR=n05", 5, 8, 1, 0,
       "slurm", "n05", 21856, "slurm 4711 0 -"},
      {"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1", 1, 2, 1, 2,
       "slurm", "127.0.0.1", 25463, "slurm - - -"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_place place;
    CHECK_OK(t, test_place(t, cases[i].variables, &place));
    FAIL_IF(t, place.rank != cases[i].rank || place.world != cases[i].world ||
            place.local_rank != cases[i].local_rank || place.local_world != cases[i].local_world ||
            strcmp(place.launcher, cases[i].launcher) || strcmp(place.host, cases[i].host) ||
            strcmp(place.job, cases[i].job) || place.port != cases[i].port,
            "%s: rank %d/%d, local %d/%d, %s, %s:%d, \"%s\"", cases[i].variables, place.rank,
            place.world, place.local_rank, place.local_world, place.launcher, place.host,
            place.port, place.job);
    CHECK(t, place.unstarted == (strncmp(cases[i].variables, "SLURM_NTASKS=8 SLURM_PROCID=0", 29)
                                 ? 0 : 8));
  }
}

static void test_places_refused(g2z_test *t) {
  static const char *const cases[][2] = {
      {"RANK=1", "RANK=1 is set, but WORLD_SIZE is not"},
      {"WORLD_SIZE=2", "WORLD_SIZE=2 is set, but RANK is not"},
      {"RANK=2 WORLD_SIZE=2", "RANK=2: must be a whole number from 0 to 1"},
      {"RANK=-1 WORLD_SIZE=2", "RANK=-1: must be"},
      {"RANK=1x WORLD_SIZE=2", "RANK=1x: must be"},
      {"RANK=~1 WORLD_SIZE=2", "RANK= 1: must be"},
      {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0: must be a whole number from 1 to 4096"},
      {"RANK=0 WORLD_SIZE=99999999999", "WORLD_SIZE=99999999999: must be"},
      {"RANK=0 WORLD_SIZE=2", "without MASTER_PORT"},
      {"RANK=0 WORLD_SIZE=2 MASTER_PORT=0", "MASTER_PORT=0: must be"},
      {"RANK=0 WORLD_SIZE=2 MASTER_PORT=65535", "MASTER_PORT=65535: must be"},
      {"RANK=0 WORLD_SIZE=2 MASTER_PORT=1 LOCAL_RANK=2", "LOCAL_RANK=2: must be"},
      {"RANK=0 WORLD_SIZE=2 MASTER_PORT=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", "LOCAL_RANK=1: must"},
      {"RANK=0 WORLD_SIZE=2 MASTER_PORT=1 LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3: must be"},
      {"RANK=0 WORLD_SIZE=2 MASTER_PORT=1 MASTER_ADDR=n1", "set LOCAL_RANK"},
      {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_PORT=1", "set MASTER_ADDR"},
      {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_RANK=0 is set, but OMPI_COMM_WORLD_SIZE is not"},
      {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 "
       "OMPI_COMM_WORLD_LOCAL_SIZE=2", "mpirun -x MASTER_ADDR=HOST"},
      {"PMI_RANK=0 PMI_SIZE=4", "set LOCAL_RANK, together with RANK and WORLD_SIZE"},
      {"PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", "set MASTER_ADDR"},
      {"SLURM_NTASKS=0 SLURM_PROCID=0", "SLURM_NTASKS=0: must be a whole number from 1 to "},
      {"SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_TASKS=2 is set, but SLURM_PROCID is not"},
      {"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 SLURM_STEP_NODELIST=n[1-2]",
       "set MASTER_ADDR to its host"},
      {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
       "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_orte_hnp_uri=1.0;tcp://172.17.0.2:35871",
       "mpirun -x MASTER_ADDR=HOST"},
      {"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1", "set MASTER_ADDR to its host"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    g2z_place place;
    CHECK_BAD(t, test_place(t, cases[i][0], &place), cases[i][1]);
  }
}

/* ----- tests of ranks: what each rank does and how it ends ----- */

enum { NOBODY = -1 };

/* A job in which one rank may be odd. All others end with `code` and print both sentences; the odd
 * one prints them too if its code is the same. */
typedef struct test_scene {
  const char *test, *program, *odd_program; /* NULL: the same; "": the odd one is missing */
  int world, odd, code, odd_code;
  const char *says, *says_too;              /* in the output; NULL: anything */
  int signal;                               /* sent to the odd one */
  double after;                             /* seconds from the meeting of all to the signal */
  double within;                            /* seconds from the signal, or else the meeting,
                                             * to the end of all ranks; 0: any */
} test_scene;

#define ALL(test, program, world, code, says, too) \
  {test, program, NULL, world, NOBODY, code, 0, says, too, 0, 0, 0}
#define APART(test, program, odd_program, world, odd, code, says, too) \
  {test, program, odd_program, world, odd, code, code, says, too, 0, 0, 0}
#define LOOP(test, program, odd, odd_code, says) \
  {test, "loop " program, NULL, 4, odd, 70, odd_code, says, NULL, 0, 0, 0}
#define HIT(test, program, odd, code, says, too, signal, after) \
  {test, "loop 1000000" program, NULL, 4, odd, code, 137, says, too, signal, after, 10}
/* Ranks that have GPUs, by their word. */
#define GPUS(odd, odd_gpu, gpu, how, says) \
  {"ranks_killed_gpu", "loop 1000000 device=GPU-" #gpu how, \
   "loop 1000000 device=GPU-" #odd_gpu how, 2, odd, G2Z_EXIT_LOST, 137, says, NULL, SIGKILL, 0.1, 10}
#define CUT(odd) \
  {"ranks_cut", "loop 9999 " #odd " cut", NULL, 4, odd, 70, 70, "fault of rank 2: rank 2 on ", \
   " lost its data connection to rank 0 on ", 0, 0, 2}

static const test_scene test_scenes[] = {
    ALL("ranks_calls", "calls", 2, 0, NULL, NULL),
    ALL("ranks_calls", "calls", 5, 0, NULL, NULL),
    ALL("ranks_calls", "stream", 3, 0, NULL, NULL),
    ALL("ranks_calls", "calls interrupts=1", 3, 0, NULL, NULL),
    ALL("ranks_calls", "stream interrupts=1", 2, 0, NULL, NULL),
    ALL("ranks_calls", "calls files=20", 5, 0, NULL, NULL), /* more ranks than files may be open */
    APART("ranks_refusals", "calls build=one", "calls build=other", 3, 2, 1,
          "runs build other, rank 0 on", NULL),
    APART("ranks_refusals", "calls", "calls world=4", 3, 2, 1,
          "was started for 4 ranks, rank 0 on ", NULL),
    APART("ranks_refusals", "calls join=0.5", "", 3, 2, 1,
          " s only 2 of 3 ranks have met on ", NULL),
    APART("ranks_refusals", "calls device=GPU-1", "calls device=GPU-0", 3, 0, 1,
          "share one GPU (GPU-1)", NULL),
    APART("ranks_refusals", "calls join=0.3", "", 2, 0, 1, "rank 1 on ",
          " did not find rank 0 on 127.0.0.1, ports "),
    ALL("ranks_refusals", "mismatch", 3, 3, "rank 1 is in broadcast 1 with 0 bytes while rank 0 is "
        "in all_gather 1 with 4: all ranks must make the same calls", NULL),
    HIT("ranks_killed", "", 0, 70, "fault of rank 0: rank 0 on ", NULL, SIGKILL, 0),
    HIT("ranks_killed", "", 1, 70, "fault of rank 1: rank 1 on ", NULL, SIGKILL, 0.013),
    HIT("ranks_killed", "", 2, 70, "fault of rank 2: rank 2 on ", NULL, SIGKILL, 0.026),
    HIT("ranks_killed", "", 3, 70, "fault of rank 3: rank 3 on ", NULL, SIGKILL, 0.039),
    HIT("ranks_killed", " handler=none", 2, 3, "failed: another rank died, or does not answer: rank 2",
        NULL, SIGKILL, 0.1),
    HIT("ranks_killed", " handler=none", 0, 3, "failed: another rank died, or does not answer: rank 0",
        NULL, SIGKILL, 0.1),
    LOOP("ranks_killed", "9999 0 die", 0, 137, "rank 0 on "), /* at its first heartbeat */
    LOOP("ranks_killed", "9999 3 die", 3, 137, "rank 3 on "),
    HIT("ranks_killed", " handler=returns", 2, 3, "failed: another rank died", "fault of rank 2: ",
        SIGKILL, 0.1),
    GPUS(1, 1, 0, " handler=none", "rank 0 ends: rank 1 on "),
    GPUS(0, 0, 1, " handler=none", "rank 1 ends: rank 0 on "),
    GPUS(1, 1, 0, " handler=returns", "fault of rank 1: rank 1 on "),
    GPUS(1, 1, 0, " handler=none console=full", NULL),
    CUT(0), /* a connection between two living ranks is cut: both are named at once */
    CUT(2),
    HIT("ranks_stopped", " silence=0.7", 1, 70, "fault of rank 1: rank 1 on ", "does not answer",
        SIGSTOP, 0.1),
    HIT("ranks_stopped", " silence=0.7", 0, 70, "fault of rank 0: rank 0 on ", "does not answer",
        SIGSTOP, 0.1),
    ALL("ranks_progress", "slow", 2, 0, NULL, NULL),
    ALL("ranks_progress", "stream late=2 silence=0.7", 2, 0, NULL, NULL),
    ALL("ranks_hang", "loop 1000000 2 hang hang=0.7", 4, 70, "fault of rank 2: rank 2 on ",
        "at collective 19 of 20; last heard in phase data of step 20"),
    ALL("ranks_hang", "loop 1000000 2 stuck hang=0.7", 4, 70, "hangs: no progress for ", NULL),
    ALL("ranks_hang", "loop 40 1 save hang=0.7", 4, 0, NULL, NULL),
    LOOP("ranks_trouble", "9999 0 trouble", 0, 70, "fault of rank 0: rank 0 on "),
    LOOP("ranks_trouble", "9999 2 trouble", 2, 70,
         "reports a failed connection between GPUs (NCCL: a link is down)"),
    LOOP("ranks_leaving", "1000 0 leave", 0, 0, "left early"),
    LOOP("ranks_leaving", "1000 1 leave silence=2", 1, 0, "left early"),
    {"ranks_leaving", "loop 40 0 free", NULL, 4, 0, 3, 0, "rank 1 is in all_gather 20 with 4 bytes "
     "while rank 0 is in free 20 with 0: all ranks must make the same calls", NULL, 0, 0, 0},
    {"ranks_leaving", "loop 40 2 free", NULL, 4, 2, 3, 0, "rank 2 is in free 20 with 0 bytes while "
     "rank 0 is in all_gather 20 with 4: all ranks must make the same calls", NULL, 0, 0, 0},
    LOOP("ranks_leaving", "40 0 alone silence=2", 0, 0, "left early"),
    LOOP("ranks_leaving", "40 1 alone silence=2", 1, 0, "left early"),
    ALL("ranks_leaving", "loop 40 0 alone! hang=1", 4, 70, "fault of rank 0: rank 0 on ",
        "failed, and does not end"),
    ALL("ranks_leaving", "loop 40 1 alone! hang=1", 4, 70, "fault of rank 1: rank 1 on ",
        "failed, and does not end"),
    ALL("ranks_leaving", "loop 40 0 late", 4, 0, NULL, NULL),
    ALL("ranks_leaving", "loop 40 1 late", 4, 0, NULL, NULL),
    LOOP("ranks_leaving", "40 0 linger hang=0.7", 0, 0, "hangs: no progress for "),
    APART("ranks_address", "calls host=192.0.2.1 local=1", "", 2, 1, 1, /* no host's address */
          "rank 0 cannot listen at 192.0.2.1, ports ",
          "set MASTER_ADDR to the host on which rank 0 runs"),
    ALL("ranks_spawn", "spawn fine", 1, 0, "is rank 2 of 3, 2 of 3 here, ranks", NULL),
    ALL("ranks_spawn", "spawn exit", 1, 5, "fault of rank 1: rank 1 on ", NULL),
    ALL("ranks_spawn", "spawn kill", 1, 137, "fault of rank 1: rank 1 on ", NULL),
    ALL("ranks_spawn", "spawn stop silence=0.5", 1, 70, "fault of rank 1: rank 1 on ", NULL),
    ALL("ranks_spawn", "spawn saved", 1, 5, NULL, NULL),
    APART("ranks_spawn", "spawn fine", "", 2, 0, 3,
          "this process is rank 1 of 2, started by torchrun, and cannot start 3", NULL),
};
#undef ALL
#undef APART
#undef LOOP
#undef HIT
#undef GPUS
#undef CUT

/* Sends the odd one its signal, if it has one, and waits for the others. Then it kills the odd one
 * if that is stopped. */
static void test_scene_within(g2z_test *t, const test_scene *scene, test_ranks *ranks) {
  test_ranks_await(t, ranks);
  rank_sleep(scene->after);
  pid_t victim = scene->signal ? ranks->pid[scene->odd] : 0;
  double begin = g2z_seconds();
  if (scene->signal) {
    CHECK(t, victim > 0 && kill(victim, scene->signal) == 0);
    ranks->pid[scene->odd] = 0;
  }
  test_ranks_wait(t, ranks, 20);
  CHECK_SOON(t, begin, scene->within);
  if (!scene->signal) return;
  kill(victim, SIGKILL);
  ranks->pid[scene->odd] = victim;
}

/* Runs all scenes of the current test. */
static void test_ranks_scenes(g2z_test *t) {
  for (size_t i = 0; i < sizeof test_scenes / sizeof *test_scenes; i++) {
    const test_scene *scene = &test_scenes[i];
    if (strcmp(scene->test, t->name) != 0) continue;
    test_ranks ranks = test_ranks_open(scene->world);
    for (int r = 0; r < scene->world; r++) {
      int apart = r == scene->odd && scene->odd_program;
      const char *program = apart ? scene->odd_program : scene->program;
      if (*program) test_ranks_start(t, &ranks, r, r, NULL, program);
    }
    if (scene->within > 0) test_scene_within(t, scene, &ranks);
    test_ranks_wait(t, &ranks, 20);
    for (int r = 0; r < scene->world; r++) {
      int code = r == scene->odd ? scene->odd_code : scene->code, same = code == scene->code;
      if (r == scene->odd && scene->odd_program && !*scene->odd_program) continue;
      CHECK_RANK(t, &ranks, r, code, same ? scene->says : NULL);
      if (same && scene->says_too) CHECK_RANK(t, &ranks, r, code, scene->says_too);
    }
  }
}

/* All ranks of a job must end with 0. */
static void test_ranks_fine(g2z_test *t, test_ranks *ranks) {
  test_ranks_end(t, ranks, 20, 0, NULL);
}

static void test_ranks_refusals(g2z_test *t) {
  test_ranks_scenes(t);
  test_ranks ranks = test_ranks_open(3);
  test_ranks_start(t, &ranks, 0, 1, NULL, "calls join=20");
  rank_sleep(0.3 * test_busy()); /* both wait for the third rank */
  CHECK(t, kill(ranks.pid[1], SIGKILL) == 0);
  test_ranks_wait(t, &ranks, 20);
  CHECK_RANK(t, &ranks, 0, 1, "rank 1 on ");
  CHECK_RANK(t, &ranks, 0, 1, "ended while rank 0 waited for the others");
}

/* G2Z_OK: the other ranks did not come. */
static g2z_status test_ranks_join_alone(g2z_test *t, const g2z_ranks_config *config) {
  g2z_ranks *ranks;
  const g2z_status status = g2z__ranks_join(&t->services, config, &ranks);
  CHECK(t, ranks == NULL && status != G2Z_OK);
  return status == G2Z_LOST ? G2Z_OK : status;
}

/* Invalid configs, and every failing allocation of a rank 0 that remains alone. */
static void test_ranks_config(g2z_test *t) {
  static const struct { int world, rank; const char *sentence; } bad[] = {
      {0, 0, "rank 0 of 0"}, {2, 2, "rank 2 of 2"}, {2, 1, "port 0"}};
  g2z_services *services = &t->services;
  g2z_ranks_config config = g2z_ranks_config_default();
  g2z_ranks *ranks;
  int value = 5, all = 0;
  CHECK_OK(t, g2z__ranks_join(services, &config, &ranks)); /* a job of one: nothing to meet */
  CHECK(t, g2z_ranks_all_gather(ranks, &value, sizeof value, &all) == G2Z_OK && all == 5);
  CHECK(t, g2z_ranks_broadcast(ranks, &value, sizeof value) == G2Z_OK && value == 5);
  CHECK(t, g2z_ranks_agree(ranks, G2Z_IO) == G2Z_IO && g2z_ranks_agree(ranks, G2Z_OK) == G2Z_OK);
  CHECK(t, g2z_ranks_same(ranks, "config", "text") == G2Z_OK);
  CHECK(t, g2z_ranks_place(ranks)->world == 1);
  g2z__ranks_leave(ranks);
  g2z__ranks_leave(NULL);
  for (int i = 0; i < 3; i++) {
    config.place.world = bad[i].world;
    config.place.rank = bad[i].rank;
    CHECK_BAD(t, g2z__ranks_join(services, &config, &ranks), bad[i].sentence);
    CHECK(t, ranks == NULL);
  }
  config = g2z_ranks_config_default();
  config.place.world = config.place.local_world = 3;
  config.place.port = test_ranks_port();
  config.join_s = 0.01;
  CHECK_NO_MEMORY(t, 4, 20, test_ranks_join_alone(t, &config), 1);
  CHECK_HAS(t, services->error, "only 1 of 3 ranks have met");
}

/* ----- strangers on the port ----- */

static struct sockaddr_in test_stranger_address(const char *address, int port) {
  struct sockaddr_in there;
  memset(&there, 0, sizeof there);
  there.sin_family = AF_INET;
  there.sin_port = htons((uint16_t)port);
  there.sin_addr.s_addr = inet_addr(address);
  return there;
}

/* Connects to the port as a stranger does; -1: refused. */
static int test_stranger(const char *address, int port) {
  struct sockaddr_in there = test_stranger_address(address, port);
  int one = socket(AF_INET, SOCK_STREAM, 0);
  if (one >= 0 && connect(one, (struct sockaddr *)&there, sizeof there) == 0) return one;
  if (one >= 0) close(one);
  return -1;
}

/* The same, but waits until a rank 0 listens there. */
static int test_stranger_waits(g2z_test *t, const char *address, int port) {
  int one = -1;
  for (double begin = g2z_seconds(); one < 0 && !test_late(begin, 10); rank_sleep(0.002))
    one = test_stranger(address, port);
  CHECK(t, one >= 0);
  return one;
}

static void test_stranger_says(int one, const void *bytes, size_t count) {
  (void)!send(one, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* The number of bytes received within `seconds`, or until the connection ends (*ended). */
static size_t test_stranger_hears(int one, double seconds, int *ended) {
  char bytes[512];
  size_t count = 0;
  *ended = 0;
  for (double end = g2z_seconds() + seconds; g2z_seconds() < end && !*ended;) {
    struct pollfd entry = {one, POLLIN, 0};
    if (poll(&entry, 1, 20) <= 0) continue;
    ssize_t got = recv(one, bytes, sizeof bytes, 0);
    if (got > 0) count += (size_t)got;
    else *ended = 1;
  }
  return count;
}

/* A socket that listens at this port, which an ended connection of another test may still block for
 * sockets without SO_REUSEADDR. test_ranks_port() counts such a port as free. */
static int test_listen(g2z_test *t, const char *address, int port, int backlog) {
  struct sockaddr_in here = test_stranger_address(address, port);
  int one = socket(AF_INET, SOCK_STREAM, 0), reuse = 1;
  setsockopt(one, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
  CHECK(t, bind(one, (struct sockaddr *)&here, sizeof here) == 0 && listen(one, backlog) == 0);
  return one;
}

/* A silent service on the port; and two jobs on one port with different ids. */
static void test_ranks_neighbours(g2z_test *t) {
  test_ranks one, two;
  two = test_ranks_open(3);
  for (int job = 0; job < 2; job++) {
    one = test_ranks_open(2);
    one.port = two.port;
    int squatter = job ? -1 : test_listen(t, "127.0.0.1", one.port, 64);
    test_ranks_start(t, &one, 1, 1, NULL, "calls");
    if (job) test_ranks_start(t, &two, 0, 0, "G2Z_RUN_ID=another", "calls");
    test_ranks_start(t, &one, 0, 0, NULL, "calls");
    if (job) test_ranks_start(t, &two, 1, 2, "G2Z_RUN_ID=another", "calls");
    test_ranks_fine(t, &one);
    if (job) test_ranks_fine(t, &two);
    else close(squatter);
  }
  /* A job started by hand waits for its last rank. Meanwhile all ranks of another job, as many or
   * more, come to the same port. Neither job has an id, and neither ends the other. */
  for (int world = 3; world <= 4; world++) {
    one = test_ranks_open(3);
    two = test_ranks_open(world);
    two.port = one.port;
    test_ranks_start(t, &one, 0, 1, "G2Z_RUN_ID=", "calls");
    rank_sleep(0.4);
    test_ranks_start(t, &two, 0, 1, "G2Z_RUN_ID=", "calls");
    rank_sleep(0.4);
    test_ranks_start(t, &two, 3, world - 1, "G2Z_RUN_ID=", "calls");
    test_ranks_start(t, &one, 2, 2, "G2Z_RUN_ID=", "calls");
    test_ranks_start(t, &two, 2, 2, "G2Z_RUN_ID=", "calls");
    test_ranks_fine(t, &one);
    test_ranks_fine(t, &two);
  }
}

/* Rank 0 of two closes callers that know the job's token and claim a rank that does not exist. The
 * token comes from a rank 1 that mistakes the test for rank 0. */
static void test_ranks_outside(g2z_test *t, test_ranks *ranks) {
  static const int32_t claims[] = {0, 2, 1 << 30, -1};
  g2z__packet stolen;
  const size_t bytes = sizeof stolen.head + sizeof stolen.body.hello;
  int ended, thief = test_listen(t, "127.0.0.1", ranks->port, 1);
  struct pollfd entry = {thief, POLLIN, 0};
  test_ranks_start(t, ranks, 1, 1, NULL, "calls");
  CHECK(t, poll(&entry, 1, 10000) == 1);
  int victim = accept(thief, NULL, NULL);
  CHECK(t, recv(victim, &stolen, bytes, MSG_WAITALL) == (ssize_t)bytes);
  CHECK(t, kill(ranks->pid[1], SIGKILL) == 0);
  test_ranks_wait(t, ranks, 20); /* the end that closes first blocks its port for a while */
  close(victim);
  close(thief);
  test_ranks_start(t, ranks, 0, 0, NULL, "calls");
  for (int i = 0; i < 8; i++) {
    int caller = test_stranger_waits(t, "127.0.0.1", ranks->port);
    stolen.body.hello.rank = claims[i / 2];
    stolen.body.hello.control = i % 2;
    test_stranger_says(caller, &stolen, bytes);
    CHECK(t, test_stranger_hears(caller, test_busy(), &ended) == 0 && ended);
    close(caller);
  }
}

/* Visitors that are not ranks and keep their connections: some speak the protocol, without the
 * job's token. */
static void test_ranks_strangers(g2z_test *t) {
  enum { VISITORS = 100 };
  g2z__packet packet; /* HELLO of rank 1 of two, without the token */
  int visitors[VISITORS], ended;
  char noise[4096];
  test_ranks ranks = test_ranks_open(2);
  test_ranks_outside(t, &ranks);
  memset(noise, 'x', sizeof noise);
  memset(&packet, 0, sizeof packet);
  packet.body.hello.rank = packet.body.hello.control = 1;
  packet.body.hello.world = 2;
  for (int i = 0; i < VISITORS; i++) {
    visitors[i] = i && visitors[i - 1] < 0 ? -1 : test_stranger_waits(t, "127.0.0.1", ranks.port);
    if (i % 5 == 1) test_stranger_says(visitors[i], "GET / HTTP/1.1\r\n\r\n", 18);
    if (i % 5 == 2) test_stranger_says(visitors[i], noise, sizeof noise);
    if (i % 25 == 3) g2z__say(visitors[i], G2Z__HELLO, &packet.body);
    if (i == 8) g2z__say(visitors[i], G2Z__START, &packet.body);
    if (i % 25 == 8 && i > 8) g2z__say(visitors[i], G2Z__FAULT, &packet.body);
    if (i % 7 == 3) shutdown(visitors[i], SHUT_WR);
  }
  /* A silent visitor gets no bytes; one that sends nonsense is disconnected without a reply. */
  CHECK(t, test_stranger_hears(visitors[95], 0.3, &ended) == 0 && !ended);
  CHECK(t, test_stranger_hears(visitors[97], test_busy(), &ended) == 0 && ended);
  test_ranks_start(t, &ranks, 1, 1, NULL, "calls");
  test_ranks_fine(t, &ranks);
  for (int i = 0; i < VISITORS; i++) close(visitors[i]);
}

/* Connections in rapid succession while ranks meet. */
typedef struct test_flood {
  int port, stop, count;
} test_flood;
static void *test_flood_run(void *user) {
  enum { HELD = 300 };
  test_flood *flood = (test_flood *)user;
  int held[HELD];
  for (int i = 0; i < HELD; i++) held[i] = -1;
  for (; !__atomic_load_n(&flood->stop, __ATOMIC_RELAXED); flood->count++) {
    int *place = &held[flood->count % HELD];
    if (*place >= 0) close(*place);
    *place = test_stranger("127.0.0.1", flood->port);
    if (*place < 0) rank_sleep(0.001);
  }
  for (int i = 0; i < HELD; i++)
    if (held[i] >= 0) close(held[i]);
  return NULL;
}

static void test_ranks_flood(g2z_test *t) {
  test_flood flood;
  pthread_t thread;
  memset(&flood, 0, sizeof flood);
  test_ranks ranks = test_ranks_open(5);
  flood.port = ranks.port;
  test_ranks_start(t, &ranks, 0, 0, NULL, "calls");
  close(test_stranger_waits(t, "127.0.0.1", ranks.port));
  CHECK(t, pthread_create(&thread, NULL, test_flood_run, &flood) == 0);
  for (int r = 1; r < 5; r++) {
    rank_sleep(0.3); /* earlier ranks have met rank 0 by now and must stay */
    test_ranks_start(t, &ranks, r, r, NULL, "calls");
  }
  test_ranks_fine(t, &ranks);
  __atomic_store_n(&flood.stop, 1, __ATOMIC_RELAXED);
  pthread_join(thread, NULL);
  CHECK(t, flood.count > 500);
}

/* ----- listeners that are not rank 0 ----- */

/* An intruder's behaviour on its port: it uses the protocol's magic, without the job's token. */
typedef enum test_intrusion {
  SAY_NOTHING, SAY_GARBAGE, SAY_THE_SAME, SAY_FAULT, SAY_WELCOME_FAULT, SAY_WELCOME_START
} test_intrusion;
typedef struct test_intruder {
  test_intrusion does;
  int listener, stop, count;      /* count: connections so far */
  pthread_t thread;
} test_intruder;

static void *test_intruder_run(void *user) {
  enum { HELD = 64 };
  test_intruder *intruder = (test_intruder *)user;
  int held[HELD], count = 0;
  while (!__atomic_load_n(&intruder->stop, __ATOMIC_RELAXED)) {
    struct pollfd entry = {intruder->listener, POLLIN, 0};
    if (poll(&entry, 1, 20) <= 0) continue;
    int one = accept(intruder->listener, NULL, NULL);
    if (one < 0) continue;
    if (count == HELD) close(held[--count]);
    held[count++] = one;
    intruder->count++;
    g2z__packet packet;
    memset(&packet, 0, sizeof packet);
    entry.fd = one;
    ssize_t got = poll(&entry, 1, 1000) > 0 ? recv(one, &packet, sizeof packet, 0) : 0;
    if (intruder->does == SAY_GARBAGE) test_stranger_says(one, "HTTP/1.1 400 Bad\r\n\r\n", 20);
    if (intruder->does == SAY_THE_SAME && got > 0) test_stranger_says(one, &packet, (size_t)got);
    if (intruder->does >= SAY_WELCOME_FAULT) {
      g2z__welcome welcome; /* with the token that the rank sent */
      memset(&welcome, 0, sizeof welcome);
      memcpy(welcome.token, packet.body.hello.token, sizeof welcome.token);
      g2z__say(one, G2Z__WELCOME, &welcome);
    }
    const int32_t local = 1;
    g2z__ending ending;
    memset(&ending, 0, sizeof ending);
    ending.status = G2Z_LOST;
    snprintf(ending.fault.sentence, sizeof ending.fault.sentence, "an intruder says so");
    if (intruder->does == SAY_FAULT || intruder->does == SAY_WELCOME_FAULT)
      g2z__say(one, G2Z__FAULT, &ending);
    if (intruder->does == SAY_WELCOME_START) g2z__say(one, G2Z__START, &local);
  }
  while (count) close(held[--count]);
  return NULL;
}

/* Intruders take all of a job's ports except the last. Its ranks skip these ports, and no intruder
 * ends a rank or delays it. */
static void test_ranks_intruders(g2z_test *t) {
  test_ranks ranks;
  test_intruder intruders[3];
  for (int turn = 0; turn < 2; turn++) {
    ranks = test_ranks_open(3);
    memset(intruders, 0, sizeof intruders);
    for (int i = 0; i < 3; i++) {
      intruders[i].does = (test_intrusion)(3 * turn + i);
      intruders[i].listener = test_listen(t, "127.0.0.1", ranks.port + i, 64);
      CHECK(t, pthread_create(&intruders[i].thread, NULL, test_intruder_run, &intruders[i]) == 0);
    }
    test_ranks_start(t, &ranks, 0, 2, NULL, "calls");
    test_ranks_fine(t, &ranks);
    for (int i = 0; i < 3; i++) {
      __atomic_store_n(&intruders[i].stop, 1, __ATOMIC_RELAXED);
      pthread_join(intruders[i].thread, NULL);
      CHECK(t, intruders[i].count >= 2);
      close(intruders[i].listener);
    }
  }
}

/* A rank that knows the job's id but not its secret is a stranger to rank 0, and it takes rank 0
 * for a stranger. */
static void test_ranks_secret(g2z_test *t) {
  test_ranks ranks, other;
  ranks = test_ranks_open(2);
  other = test_ranks_open(2);
  other.port = ranks.port;
  test_ranks_start(t, &ranks, 0, 0, "G2Z_SECRET=open sesame", "calls");
  test_ranks_start(t, &other, 1, 1, "G2Z_SECRET=open barley", "calls join=1");
  test_ranks_wait(t, &other, 20);
  CHECK_RANK(t, &other, 1, 1, "did not find rank 0");
  CHECK_RANK(t, &other, 1, 1, "need the same WORLD_SIZE, ");
  CHECK(t, kill(ranks.pid[0], 0) == 0);
  test_ranks_start(t, &ranks, 1, 1, "G2Z_SECRET=open sesame", "calls");
  test_ranks_fine(t, &ranks);
  ranks = test_ranks_open(2);
  test_ranks_start(t, &ranks, 0, 0, "G2Z_SECRET=open sesame", "calls join=1");
  test_ranks_start(t, &ranks, 1, 1, NULL, "calls join=1");
  test_ranks_wait(t, &ranks, 20);
  CHECK_RANK(t, &ranks, 0, 1, "missing: rank 1 (");
  CHECK_RANK(t, &ranks, 0, 1, " callers had another WORLD_SIZE, MASTER_PORT, --run-id or ");
}

static struct addrinfo *test_resolve(g2z_test *t, const char *host) {
  struct addrinfo hints, *here = NULL;
  memset(&hints, 0, sizeof hints);
  hints.ai_socktype = SOCK_STREAM;
  CHECK(t, getaddrinfo(host, NULL, &hints, &here) == 0);
  return here;
}

/* Rank 0 listens only at MASTER_ADDR, also if not all ranks are on its host. Exception: a name that
 * is a loopback address here and may have another address on other hosts. */
static void test_ranks_address(g2z_test *t) {
  static const char *const mixed[] = {"127.0.1.1", "192.0.2.7", "::1"};
  struct addrinfo *here[3];
  test_ranks_scenes(t);
  test_ranks ranks = test_ranks_open(2);
  test_ranks_start(t, &ranks, 0, 0, NULL, "calls host=127.0.0.2 local=1");
  close(test_stranger_waits(t, "127.0.0.2", ranks.port));
  CHECK(t, test_stranger("127.0.0.1", ranks.port) < 0);
  test_ranks_start(t, &ranks, 1, 1, NULL, "calls host=127.0.0.2 local=1");
  test_ranks_fine(t, &ranks);

  for (int i = 2; i >= 0; i--) {
    here[i] = test_resolve(t, mixed[i]);
    if (i < 2) here[i]->ai_next = here[i + 1];
  }
  CHECK(t, !g2z__socket_widen(here[0]));
  for (int i = 0; i < 3; i++) CHECK(t, (here[i]->ai_family == AF_UNSPEC) == (i != 1));
  freeaddrinfo(here[0]);
  ranks = test_ranks_open(2); /* another spelling of 127.0.0.1 */
  test_ranks_start(t, &ranks, 0, 0, NULL, "calls host=0x7f000001 local=1");
  test_ranks_start(t, &ranks, 1, 1, NULL, "calls host=127.0.0.3 local=1");
  test_ranks_wait(t, &ranks, 20);
  CHECK_RANK(t, &ranks, 0, 0, "MASTER_ADDR=0x7f000001 is a loopback address on rank 0's host");
  CHECK_RANK(t, &ranks, 1, 0, NULL);
}

/* A host with two addresses: the first never answers, and enough time is left for the second. */
static void test_ranks_addresses(g2z_test *t) {
  int fillers[4];
  g2z_ranks *ranks;
  REQUIRE_OK(t, G2Z_NEW(&t->services, 1, &ranks));
  test_ranks job = test_ranks_open(2);
  int dead = test_listen(t, "127.0.0.2", job.port, 0);
  struct sockaddr_in at = test_stranger_address("127.0.0.2", job.port);
  for (int k = 0; k < 4; k++) { /* a full queue: the system drops new connections */
    fillers[k] = socket(AF_INET, SOCK_STREAM, 0);
    fcntl(fillers[k], F_SETFL, O_NONBLOCK);
    (void)!connect(fillers[k], (struct sockaddr *)&at, sizeof at);
  }
  struct addrinfo *here = test_resolve(t, "127.0.0.2");
  here->ai_next = test_resolve(t, "127.0.0.1");
  test_ranks_start(t, &job, 0, 0, NULL, "calls join=8");
  close(test_stranger_waits(t, "127.0.0.1", job.port));
  ranks->services = &t->services;
  ranks->config = g2z_ranks_config_default();
  g2z_place *place = &ranks->config.place;
  place->port = job.port;
  place->rank = 1;
  place->world = 2;
  snprintf(place->job, sizeof place->job, "test_%d_%d", (int)getpid(), job.port);
  ranks->addresses = here;
  ranks->wake = -1;
  pthread_mutex_init(&ranks->lock, NULL);
  double begin = g2z_seconds();
  CHECK_OK(t, g2z__ranks_meet(ranks));
  CHECK_SOON(t, begin, 9);
  g2z__ranks_leave(ranks);
  for (int k = 0; k < 4; k++) close(fillers[k]);
  close(dead);
  test_ranks_wait(t, &job, 20);
}

/* A whole job that is suspended for longer than its deadlines continues when its ranks wake one
 * after another, also if they are still meeting. */
static void test_ranks_suspended(g2z_test *t) {
  static const struct { const char *program; double seconds; } cases[] = {
      {"loop 500 silence=1", 2.5}, {"loop 500 silence=1", 1.3}, {"loop 500 hang=1", 2.5},
      {"calls join=2", 3}};
  test_ranks ranks;
  for (int i = 0; i < 4; i++) {
    const char *program = cases[i].program;
    int meeting = i == 3, count = meeting ? 3 : 4;
    ranks = test_ranks_open(4);
    test_ranks_start(t, &ranks, 0, count - 1, NULL, program);
    if (!meeting) test_ranks_await(t, &ranks);
    rank_sleep(meeting ? 0.3 : 0.1);
    for (int r = 0; r < count; r++) kill(ranks.pid[r], SIGSTOP);
    rank_sleep(cases[i].seconds);
    for (int r = 0; r < count; r++) {
      kill(ranks.pid[r], SIGCONT);
      rank_sleep(0.05);
    }
    test_ranks_start(t, &ranks, count, 3, NULL, program);
    test_ranks_fine(t, &ranks);
  }
}

static void test_ranks_flight(g2z_test *t) {
  g2z_ranks_config config = g2z_ranks_config_default();
  g2z_ranks *ranks;
  static volatile uint32_t progress = 77;
  int lines = 0;
  CHECK_OK(t, g2z__ranks_join(&t->services, &config, &ranks));
  if (!ranks) return;
  for (int i = 1; i <= 3000; i++) {
    g2z__ranks_phase(ranks, "backward", i / 10, 0);
    CHECK(t, g2z__ranks_note(ranks, "reduce_scatter", i % 7, 1000) == i);
  }
  g2z__ranks_progress(ranks, &progress, NULL, NULL);
  CHECK_OK(t, g2z_ranks_write_flight(ranks, &t->services, test_path(t, "flight.jsonl")));
  for (const char *line = test_read(t, "flight.jsonl"); *line; lines++) {
    const int sequence = lines ? 3000 - 1024 + lines : 3000;
    const size_t length = strcspn(line, "\n");
    const char *one = test_text("%.*s", (int)length, line);
    CHECK_OK(t, test_json_walk(t, line, length));
    CHECK_HAS(t, one, test_text("\"sequence\": %d,", sequence),
              test_text("\"step\": %d,", sequence / 10),
              lines ? test_text("\"bucket\": %d,", sequence % 7) : "\"progress\": 77");
    line += length + (line[length] == '\n');
  }
  CHECK(t, lines == 1025);
  g2z__ranks_leave(ranks);
}

/* ----- processes that start ranks ----- */

/* Waits until rank 0 has printed this so many times. */
static void test_ranks_until(g2z_test *t, const test_ranks *ranks, const char *part, int times,
                             double seconds, char text[4096]) {
  const double begin = g2z_seconds();
  for (text[0] = 0; test_times(text, part) < times && !test_late(begin, seconds); rank_sleep(0.01))
    test_ranks_peek(t, ranks, 0, text, 4096);
  CHECK_SOON(t, begin, seconds);
}

/* Whether a process ends within 3 s. */
static int test_process_ends(int process) {
  char path[64], stat[256];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  for (double begin = g2z_seconds(); !test_late(begin, 3); rank_sleep(0.01)) {
    FILE *file = fopen(path, "r");
    size_t got = file ? fread(stat, 1, sizeof stat - 1, file) : 0;
    if (file) fclose(file);
    stat[got] = 0;
    if (!got || strstr(stat, ") Z")) return 1; /* a zombie until init collects it */
  }
  return 0;
}

static void test_ranks_spawn(g2z_test *t) {
  static const struct { const char *program, *named, *how; int code; } early[] = {
      {"spawn early", "rank 1 (process ", ") was killed by signal 9 (", 137},
      {"spawn early-exit", "rank 0 (process ", ") ended with exit code 9", 9}};
  char text[4096], self[300];
  double begin = g2z_seconds();
  test_ranks_scenes(t);
  CHECK_SOON(t, begin, 12); /* waiting for the stopped rank takes 13 s */
  test_ranks ranks = test_ranks_open(1);
  /* A rank that dies before the ranks have met is named at once, and the others do not wait for
   * it. */
  for (int i = 0; i < 2; i++) {
    begin = g2z_seconds();
    test_ranks_start(t, &ranks, 0, 0, NULL, early[i].program);
    test_ranks_until(t, &ranks, early[i].named, 1, 2, text);
    test_ranks_wait(t, &ranks, 9);
    CHECK_RANK(t, &ranks, 0, early[i].code, early[i].named);
    CHECK_RANK(t, &ranks, 0, early[i].code, early[i].how);
    CHECK_SOON(t, begin, 6);
  }
  /* Signals reach the ranks through their parent, exactly once; the parent's death ends all of
   * them. */
  for (int orphan = 0; orphan < 2; orphan++) {
    test_ranks_start(t, &ranks, 0, 0, NULL, orphan ? "spawn orphan" : "spawn signal");
    test_ranks_until(t, &ranks, "process ", 3, 10, text);
    CHECK(t, kill(ranks.pid[0], orphan ? SIGKILL : SIGTERM) == 0);
    test_ranks_wait(t, &ranks, 20);
    CHECK_RANK(t, &ranks, 0, orphan ? 137 : 75, NULL);
    if (!orphan) CHECK(t, test_times(ranks.output[0], "got signal 15") == 3);
    for (const char *at = text; (at = strstr(at, "process ")) != NULL; at++)
      CHECK(t, test_process_ends(atoi(at + 8)));
  }

  /* Without /proc the program's name starts the ranks; if that fails, the error states why. */
  if (test_shell("unshare -rm mount -t tmpfs none /proc 2>&1", text, sizeof text) != 0) return;
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  self[length > 0 ? length : 0] = 0;
  for (int named = 1; named >= 0; named--) {
    int code = test_shell(test_text("unshare -rm bash -c 'mount -t tmpfs none /proc && exec -a "
                                    "\"%s\" \"%s\" --rank-program spawn fine' 2>&1",
                                    named ? self : "nobody", self), text, sizeof text);
    CHECK(t, code == (named ? 0 : 3));
    CHECK_HAS(t, text, named ? "is rank 2 of 3" : "rank 0 cannot be started: nobody: No such file");
  }
}

/* Ranks on a terminal to which background jobs may not write (stty tostop), and on one that is
 * stopped (Ctrl-S), for good or for a while: the supervising process does not wait for the
 * terminal. */
static void test_ranks_terminal(g2z_test *t) {
  static const struct {
    char *program;
    int code, stopped;
    double resumed;               /* seconds until it is resumed; 0: never */
    const char *says;
  } cases[] = {{(char *)"fine", 0, 0, 0, "is rank 2 of 3, 2 of 3 here, ranks"},
               {(char *)"early", 137, 1, 0, ""},
               {(char *)"early", 137, 1, 0.5, ") was killed by signal 9 ("}};
  if (!test_terminals()) SKIP(t, "there is no /dev/pts: mount devpts");
  for (int i = 0; i < 3; i++) {
    char *argv[] = {(char *)"test_gpt2", (char *)"--rank-program", (char *)"spawn",
                    cases[i].program, NULL};
    char output[4096] = "", **environment = test_ranks_environment(NULL, 0);
    struct termios modes;
    size_t used = 0;
    int status = -1, resumed = 0, master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(t, master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
    CHECK(t, terminal >= 0 && tcgetattr(terminal, &modes) == 0);
    modes.c_lflag |= TOSTOP;
    CHECK(t, tcsetattr(terminal, TCSANOW, &modes) == 0);
    if (cases[i].stopped) CHECK(t, tcflow(terminal, TCOOFF) == 0);
    fflush(stdout);
    const double begin = g2z_seconds();
    pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      setsid();
      if (ioctl(terminal, TIOCSCTTY, 0) == 0 && dup2(terminal, 1) == 1 && dup2(terminal, 2) == 2)
        execve("/proc/self/exe", argv, environment);
      _exit(127);
    }
    while (waitpid(child, &status, WNOHANG) == 0) {
      struct pollfd entry = {master, POLLIN, 0};
      ssize_t got = poll(&entry, 1, 20) > 0 ? read(master, output + used, 4095 - used) : 0;
      if (got > 0) used += (size_t)got;
      if (!resumed && cases[i].resumed > 0 && g2z_seconds() - begin > cases[i].resumed)
        resumed = tcflow(terminal, TCOON) == 0;
      if (test_late(begin, 9)) kill(child, SIGKILL);
    }
    struct pollfd entry = {master, POLLIN, 0};
    if (poll(&entry, 1, 0) > 0 && read(master, output + used, 4095 - used) > 0) used++;
    t->checks++;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code != cases[i].code || !strstr(output, cases[i].says))
      test_fail(t, __FILE__, __LINE__, "case %d ended with %x and said %s", i, status, output);
    close(terminal);
    close(master);
    free(environment);
  }
}

static void test_ranks_mpirun(g2z_test *t) {
  static const struct { const char *program, *part; } cases[] = {
      {"calls", NULL}, {"loop 1000000 1 crash", "fault of rank 1: rank 1 on "}};
  char command[700], output[4096], self[300];
  if (test_shell("mpirun --version 2>&1", output, sizeof output) != 0)
    SKIP(t, "there is no mpirun on the PATH");
  const int open_mpi = strstr(output, "Open MPI") || strstr(output, "OpenRTE");
  const char *flags = open_mpi ? "--allow-run-as-root --oversubscribe" : "";
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  self[length > 0 ? length : 0] = 0;
  for (int i = 0; i < 2; i++) {
    snprintf(command, sizeof command,
             "OMP_NUM_THREADS=1 timeout %.0f mpirun %s -np 3 %s --rank-program %s 2>&1",
             30 * test_busy(), flags, self, cases[i].program);
    int code = test_shell(command, output, sizeof output);
    t->checks++;
    if ((i == 0) != (code == 0) || code == 124 ||
        (open_mpi && cases[i].part && !strstr(output, cases[i].part))) /* MPICH ends them first */
      test_fail(t, __FILE__, __LINE__, "%s: code %d, and it said:\n%s", command, code, output);
  }
}

/* ./train starts its own ranks: the files that it leaves contain no secrets. */
static void test_ranks_train(g2z_test *t) {
  static const char *const files[] = {"launcher_metadata.json", "topo.txt", "ibstat.txt"};
  TRAIN_OR_SKIP(t);
  setenv("SLURM_JWT", "not for files", 1);
  setenv("G2Z_SECRET", "not for files either", 1);
  const char *said = test_trains(t, 0, "--ranks 2 --steps 3 --nccl-logs --batch 2 "
                                 "--sample-tokens 0 --run-dir %s %s", test_at(t, "run"),
                                 test_tiny(t));
  unsetenv("SLURM_JWT");
  unsetenv("G2Z_SECRET");
  CHECK(t, test_times(said, "RUN_COMPLETE") == 1 && strstr(said, "world_size=2"));
  CHECK_HAS(t, test_read(t, "run/%s", files[0]), "\"checkpoint_path\"", "\"rank0_host\"",
            "\"world_size\": 2", "\"git_commit\"", "\"slurm\": {", "\"env\": {",
            "\"nccl_env\": {", "\"launcher\": \"ranks\"", "\"NCCL_DEBUG\": \"INFO\"");
  for (int i = 0; i < 3; i++)
    CHECK(t, !strstr(test_read(t, "run/%s", files[i]), "not for files"));
  CHECK_HAS(t, test_trains(t, 1, "--gpus 99 %s", test_tiny(t)),
            "--gpus 99, but this process sees ");
}

/* Four ranks of ./train started by hand, without a supervisor. Those in `victims` (one bit each)
 * are killed at the same moment. The others exit and name one of them, also in RUN_FAILED.json. */
static void test_ranks_train_killed(g2z_test *t) {
  static const struct {
    int victims;
    const char *flags, *says;
  } cases[] = {{4, "--save-every 100000000", "No checkpoint was saved. To start again: the same"},
               {1, "--save-epochs --keep 1", "\nTo continue: the same command with --run-dir "},
               {3, "", "run2 --resume latest --save-every 1000\n"},
               {5, "--resume $(ls -d %s/run1/step-?????? | tail -n 1)", "To start again: the same"},
               {3, "--save-every 50 --keep 1", "run4 --resume latest\n"},
               {9, "--keep-best --val-every 50", "run5 --resume latest\n"}};
  TRAIN_OR_SKIP(t);
  for (int turn = 0; turn < 6; turn++) {
    test_ranks ranks;
    const char *run = test_text("run%d", turn);
    const int dead = cases[turn].victims;
    if (turn == 0) /* as if ranks had been killed while they wrote these files */
      test_sh(t, "mkdir run0 && touch run0/flight_rank_7.jsonl.partial "
                 "run0/RUN_FAILED.json.partial");
    char flags[1500];
    const int used = snprintf(flags, sizeof flags, "%s --steps 100000000 --batch 2 ",
                              test_digits(t, run));
    snprintf(flags + used, sizeof flags - (size_t)used, cases[turn].flags, t->directory);
    ranks = test_train_ranks(t, 4, flags);
    test_sh(t, "for i in $(seq 3000); do [ $(grep -c '\"loss' %s/metrics.jsonl) -gt 120 ] && exit; "
               "sleep 0.02; done 2> /dev/null; false", run);
    CHECK(t, !test_there(t, "run0/flight_rank_7.jsonl.partial") &&
                 !test_there(t, "run0/RUN_FAILED.json.partial"));
    rank_sleep(0.2);
    double begin = g2z_seconds();
    for (int r = 0; r < 4; r++)
      if (dead >> r & 1) CHECK(t, kill(ranks.pid[r], SIGKILL) == 0);
    test_ranks_wait(t, &ranks, 20);
    CHECK_SOON(t, begin, 10);
    const char *text = test_read(t, "run%d/RUN_FAILED.json", turn);
    const double named = test_number(t, text, "\"rank\": ");
    CHECK(t, named >= 0 && named < 4 && dead >> (int)named & 1);
    const double writer = test_number(t, text, "\"reported_by_rank\": ");
    CHECK(t, writer >= 0 && writer < 4 && !(dead >> (int)writer & 1));
    for (int r = 0; r < 4; r++) {
      int killed = dead >> r & 1;
      CHECK_RANK(t, &ranks, r, killed ? 128 + SIGKILL : G2Z_EXIT_LOST, killed ? NULL :
                 " died: its connection was lost; last heard in phase ");
      CHECK(t, killed || test_there(t, test_text("run%d/flight_rank_%d.jsonl", turn, r)));
      if (!killed) CHECK_HAS(t, ranks.output[r], "train: rank ");
      if (!killed && (r == 0 || named == 0)) CHECK_HAS(t, ranks.output[r], cases[turn].says);
    }
  }
}

/* Programs without a handler, on two GPUs: the other rank ends within ten seconds, with a sentence
 * and an exit code of its own. In the save and at the end a rank may have done its part before it
 * hears of the loss. Several jobs run at a time. */
static void test_lost(g2z_test *t, const char *transport) {
  enum { JOBS = 4 };
  static const char *const cases[] = {"create kill", "create stop",  "create return", "create leave",
                                      "step kill",   "step stop",    "step return",   "step leave",
                                      "save kill",   "save stop",    "save return",   "save leave",
                                      "free kill",   "free stop",    "free return",   "free leave"};
  enum { CASES = (int)(sizeof cases / sizeof *cases) };
  if (!zero_gpus(t)) return;
  for (int first = 0; first < CASES; first += JOBS) {
    test_ranks jobs[JOBS];
    for (int i = 0; i < JOBS; i++) {
      jobs[i] = test_ranks_open(2);
      setenv("G2Z_TEST_SAVED", test_at(t, "saved%d", first + i), 1);
      test_ranks_start(t, &jobs[i], 0, 1, NULL, test_text("lost %s %s", transport,
                                                          cases[first + i]));
    }
    for (int i = 0; i < JOBS; i++) {
      const char *name = cases[first + i];
      const pid_t victim = jobs[i].pid[1];
      const int freed = strncmp(name, "free", 4) == 0, leaves = strstr(name, "leave") != NULL;
      const int refused = strcmp(name, "save leave") == 0; /* "make the same calls" */
      if (strstr(name, "stop")) jobs[i].pid[1] = 0; /* it does not end */
      test_ranks_wait(t, &jobs[i], 60);
      if (!jobs[i].code[1]) jobs[i].output[1] = test_file(t, test_ranks_file(t, &jobs[i], 1), NULL);
      const char *at = strstr(jobs[i].output[1], "lost at ");
      const double late = at ? jobs[i].ended[0] - atof(at + 8) : NAN;
      FAIL_IF(t, !(late < rank_seconds(10)), "%s: rank 0 ended %.1f s after the loss", name, late);
      if (refused && jobs[i].code[0] == 3) CHECK_RANK(t, &jobs[i], 0, 3, "the same calls");
      else if (!freed) CHECK_RANK(t, &jobs[i], 0, G2Z_EXIT_LOST, "rank 0 ends: rank 1 on ");
      else if (leaves) CHECK_RANK(t, &jobs[i], 0, 0, NULL);
      else FAIL_IF(t, jobs[i].code[0] != 0 && jobs[i].code[0] != G2Z_EXIT_LOST,
                   "%s: rank 0 ended with %d", name, jobs[i].code[0]);
      if (strstr(name, "stop")) {
        kill(victim, SIGKILL);
        waitpid(victim, NULL, 0);
      }
    }
  }
  unsetenv("G2Z_TEST_SAVED");
}
static void test_cuda_lost_copy(g2z_test *t) { test_lost(t, "copy"); }
static void test_cuda_lost_nccl(g2z_test *t) { test_lost(t, "nccl"); }
static void test_cuda_lost_hosts(g2z_test *t) {
  test_hosts = 1;
  test_lost(t, "nccl");
  test_hosts = 0;
}

/* The scripts' arguments to srun. A fake srun prints its arguments and the variables that locate
 * rank 0; @ is the test's directory, . is the repository. On several nodes rank 0 runs on the first
 * node. Each batch script also runs in the way that sbatch runs it from another directory: as a
 * copy, whose original path scontrol reports. */
static void test_slurm_scripts(g2z_test *t) {
  static const struct { const char *script, *variables, *want; } cases[] = {
      {"train_1gpu.sbatch", "", "srun:-K0|--wait=60|./train|--run-dir|@/run|"},
      {"train_4gpu.sbatch",
       "MICRO_BATCH_SIZE_PER_GPU=4 GRAD_ACCUM_STEPS=2 NCCL_LOGS=1 "
       "GPT2_EXTRA_ARGS='--train /*  --lr 1e-3'",
       "srun:-K0|--wait=60|./train|--run-dir|@/run|--batch|4|--accum|2|--nccl-logs|--train|/*|"
       "--lr|1e-3|"},
      {"train_2x4gpu.sbatch", "NSYS=1 DIST_DEBUG=1",
       "srun:-K0|--wait=0|--label|bash|./slurm/profile.sh|@/run|./train|--run-dir|@/run|--graph|"
       "off|"},
      {"train_2gpu.sbatch", "GPT2_EXTRA_ARGS='--steps\n5'",
       "srun:-K0|--wait=60|./train|--run-dir|@/run|--steps|5|"},
      {"train.sh", "SLURM_JOB_NUM_NODES=2", "address n07, secret of 32\n"},
      {"train.sh", "SLURM_JOB_NUM_NODES=2 MASTER_ADDR=ib7 G2Z_SECRET=four",
       "address ib7, secret of 4\n"},
      {"train.sh", "SLURM_JOB_NUM_NODES=1", "address , secret of 32\n"}};
  static const char *const fakes[][2] = {
      {"srun", "#!/bin/sh\nprintf 'srun:'; printf '%s|' \"$@\"; echo\n"
               "echo \"address $MASTER_ADDR, secret of ${#G2Z_SECRET}\"; exit 75\n"},
      {"scontrol", "#!/bin/sh\n[ \"$*\" = 'show hostnames n[07-08]' ] && printf 'n07\\nn08\\n'\n"
                   "[ \"$*\" = 'show job 7' ] && echo \"   Command=$COMMAND\"\nexit 0\n"}};
  char output[8192];
  if (access("slurm/train.sh", R_OK) != 0) SKIP(t, "slurm/ is not here: run it in the repository");
  if (test_shell("bash --version", output, sizeof output) != 0) SKIP(t, "there is no bash");
  CHECK(t, test_shell("for f in slurm/* tests/*.sh; do bash -n $f 2>&1 || exit 1; done", output,
                      sizeof output) == 0);
  if (test_shell("command -v shellcheck", output, sizeof output) == 0)
    CHECK(t, test_shell("shellcheck slurm/* tests/*.sh 2>&1", output, sizeof output) == 0);
  for (int i = 0; i < 2; i++) {
    test_write_file(t, test_path(t, fakes[i][0]), fakes[i][1], strlen(fakes[i][1]));
    CHECK(t, chmod(test_path(t, fakes[i][0]), 0755) == 0);
  }
  for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
    const char *script = cases[i / 2].script;
    const int copy = i % 2;
    if (copy && !strstr(script, ".sbatch")) continue;
    const char *line =
        test_text("D='%s'; export RUN_DIR=\"$D/run\" SLURM_JOB_NODELIST='n[07-08]'\n"
                  "root=$PWD script=%s\n"
                  "unset SLURM_SUBMIT_DIR SLURM_JOB_ID MASTER_ADDR G2Z_SECRET\n"
                  "cp slurm/$script \"$D/slurm_script\"; PATH=$D:$PATH\n"
                  "%s %s bash %s 2>&1 | sed \"s#$D#@#g; s#$root#.#g\"; exit ${PIPESTATUS[0]}",
                  t->directory, script,
                  copy ? "cd \"$D\" && COMMAND=\"$root/slurm/$script\" SLURM_JOB_ID=7 "
                         "SLURM_SUBMIT_DIR=$D" : "", cases[i / 2].variables,
                  copy ? "slurm_script" : test_text("slurm/%s", script));
    test_write_file(t, test_path(t, "line"), line, strlen(line));
    CHECK(t, test_shell(test_text("bash '%s'", test_path(t, "line")), output, sizeof output) == 75);
    CHECK_HAS(t, output, cases[i / 2].want); /* srun's code, 75, is the job's */
  }
}
