/* bench measures what is fast on this machine, what is not, and why. Without a sub-command it times
 * whole training steps, then each op of a step against two limits measured in the same run: the
 * rates of a large matrix product and of a copy (extras/g2z_bench.h). Sub-commands are experiments
 * over several configurations. Each configuration runs in separate processes and writes a run
 * directory; `bench report` makes a page of them (extras/g2z_experiment.h). */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_bench.h"
#include "extras/g2z_experiment.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef G2Z_GIT_COMMIT
#define G2Z_GIT_COMMIT NULL /* the Makefile defines it */
#endif

#define TRY G2Z_TRY

static void print_line(void *user, const char *text) {
  (void)user;
  puts(text);
}

/* ----- whole steps ------------------------------------------------------ */

static g2z_status time_steps(g2z_context *context, const g2z_bench *o, g2z_stopwatch *w) {
  g2z_services *services = context->services;
  const int warm = 2; /* untimed steps, which touch pages, fill caches and choose algorithms */
  size_t count = (size_t)o->train.accum * (size_t)o->train.batch * (size_t)o->train.seq;
  int32_t *tokens;
  g2z_trainer *trainer = NULL;
  g2z_report report;
  TRY(g2z_zipf_tokens(services, o->train.seed, o->train.model.vocab, count + 1, &tokens));
  g2z_status status = g2z_trainer_create(context, &o->train, &trainer);
  for (int step = -warm; step < o->work.steps && status == G2Z_OK; step++) {
    double begin = g2z_seconds();
    if (o->train.train_glob) status = g2z_trainer_step(trainer, &report);
    else status = g2z_trainer_step_batch(trainer, tokens, tokens + 1, &report);
    if (step < 0) continue;
    w->step_s[w->count] = g2z_seconds() - begin;
    w->exposed_s[w->count++] = report.exposed_comm_ms * 1e-3;
  }
  if (status == G2Z_OK) status = g2z_trainer_flush(trainer, &report);
  if (status == G2Z_OK) status = g2z_stopwatch_ranks(context, w);
  g2z_trainer_free(trainer);
  g2z_release(services, tokens);
  return status;
}

/* ----- ops -------------------------------------------------------------- */

static int order_of_gaps(const void *a, const void *b) {
  const g2z_watch_row *x = (const g2z_watch_row *)a, *y = (const g2z_watch_row *)b;
  double left = x->calls * (x->seconds - x->limit_s), right = y->calls * (y->seconds - y->limit_s);
  return (left < right) - (left > right);
}

/* Prints each op of a step, and how far it is from its limit. The op with the largest gap, in ns
 * per token of the step, comes first. step_s NaN: shares are shares of the sum of all ops. */
static g2z_status time_ops(g2z_trainer *t, const g2z_bench *o, const g2z_limits *limit,
                           double step_s) {
  const g2z_plan *plan = t->plan;
  const double tokens = (double)plan->batch * plan->seq * plan->accum;
  double sum_s = 0;
  const int stepped = !isnan(step_s);
  g2z_watch w;
  printf("\nlimits measured here: a %d x %d x %d product at %.1f GFLOP/s, a copy at %.2f GB/s\n\n",
         limit->side, limit->side, limit->side, limit->product * 1e-9, limit->copy * 1e-9);
  fflush(stdout);
  int32_t *ids;
  TRY(g2z_zipf_tokens(t->services, o->train.seed, plan->model.vocab, (size_t)tokens + 1, &ids));
  g2z_status status = g2z_watch_step(t, ids, &w);
  g2z_release(t->services, ids);
  TRY(status);
  for (g2z_watch_row *row = w.rows; row < w.rows + w.count; row++) {
    row->seconds = row->timed.s[2];
    row->limit_s = row->amount / (row->unit[1] == 'F' ? limit->product : limit->copy);
    sum_s += row->calls * row->seconds;
  }
  qsort(w.rows, (size_t)w.count, sizeof *w.rows, order_of_gaps);
  printf("%-19s %6s %10s %9s %6s %17s %6s %8s  %s\n", "op", "calls", "us/call", "ms/step", "share",
         "rate", "limit", "gap ns/t", "counted as");
  if (!stepped) step_s = sum_s;
  for (const g2z_watch_row *row = w.rows; row < w.rows + w.count; row++)
    printf("%-19s %6.0f %10.1f %9.2f %5.1f%% %9.2f %7s/s %5.1f%% %8.1f  %s\n", row->name,
           row->calls, row->seconds * 1e6, row->calls * row->seconds * 1e3,
           100 * row->calls * row->seconds / step_s, row->amount / row->seconds * 1e-9, row->unit,
           100 * row->limit_s / row->seconds,
           row->calls * (row->seconds - row->limit_s) * 1e9 / tokens, row->formula);
  printf("%-19s %6s %10s %9.2f %5.1f%%  of %s; an op that runs alone may find its data in a cache, "
         "and then exceeds 100 %% of the copy's rate\n", "sum", "", "", sum_s * 1e3,
         100 * sum_s / step_s, stepped ? "the median step" : "the sum");

  /* Attention has a second limit, its exponentials: another unit of the GPU computes them. The
   * larger of the two limits applies. Causal attention has T / 2 keys per query and head. Backward
   * computes the same exponentials again, and 5 products instead of 2. */
  const double rate = t->device->info.exponentials_per_s;
  const double s = (double)plan->batch * plan->seq * plan->seq * plan->model.heads / 2 / rate;
  for (const g2z_watch_row *row = w.rows; row < w.rows + w.count && s > 0; row++)
    if (strncmp(row->name, "attention", 9) == 0)
      printf("%-19s its exponentials alone take %.1f us/call, %.1f %% of its time, its products "
             "%.1f us; B * T * T * NH / 2 exponentials at %.3g/s, 16 per clock and "
             "multiprocessor\n",
             row->name, s * 1e6, 100 * s / row->seconds, row->limit_s * 1e6, rate);

  if (!stepped) return G2Z_OK;
  const double flops = g2z_flops_per_token(plan);
  printf("MFU         %.1f %% of the measured product's rate: %.2f MFLOP per token, "
         "6 (12 L C C + V C) + 6 L T C\n", 100 * flops * tokens / step_s / limit->product,
         flops * 1e-6);
  return G2Z_OK;
}

/* Times the ops of a trainer. It has no graphs, so that each op is called. */
static g2z_status run_plan_ops(const g2z_bench *o, const g2z_context_config *config,
                               const g2z_plan *plan, double step_s) {
  g2z_train_config train = o->train;
  g2z_context *context;
  g2z_trainer *trainer = NULL;
  g2z_limits limit;
  train.graph = 0;
  train.train_glob = NULL;
  TRY(g2z_limits_measure(config->services, plan, &limit));
  TRY(g2z_context_create(config, &context));
  g2z_status status = g2z_trainer_create(context, &train, &trainer);
  if (status == G2Z_OK) status = time_ops(trainer, o, &limit, step_s);
  g2z_trainer_free(trainer);
  g2z_context_free(context);
  return status;
}

/* ----- a peer ----------------------------------------------------------- */

/* Runs the COMMAND of --peer with flags that describe this work. Its last line that begins with {
 * must be JSON with its name, "peer", and its speed, "tokens_per_second". */
static g2z_status run_peer(g2z_services *services, const g2z_bench *o, double tokens_per_second) {
  char command[1024], line[4096], last[4096] = "", name[128] = "the peer";
  snprintf(command, sizeof command, "%.700s --model %s --dtype %s --batch %d --seq %d --accum %d "
           "--steps %d", o->peer, o->model ? o->model : "gpt2", g2z_dtype_text(o->train.dtype),
           o->train.batch, o->train.seq, o->train.accum, o->work.steps);
  printf("\npeer        %s\n", command);
  fflush(stdout);
  FILE *pipe = popen(command, "r");
  while (pipe && fgets(line, sizeof line, pipe))
    if (line[0] == '{') memcpy(last, line, sizeof last);
  int code = -1;
  if (pipe) code = pclose(pipe);
  g2z_json json;
  g2z_json_text key;
  double theirs = 0;
  g2z_json_open(&json, services, "the last line of --peer", last, strlen(last));
  if (code == 0 && g2z_json_enter(&json, '{'))
    while (g2z_json_next(&json, '}', &key)) {
      if (g2z_json_is(&key, "tokens_per_second")) theirs = g2z_json_number(&json);
      else if (g2z_json_is(&key, "peer")) {
        g2z_json_text text = g2z_json_string(&json);
        snprintf(name, sizeof name, "%.*s", (int)(text.bytes < 100 ? text.bytes : 100),
                 (const char *)text.at);
      } else g2z_json_skip(&json);
    }
  if (code != 0)
    return g2z_fail(services, G2Z_IO, "--peer: `%.400s` failed; run it by itself to see why",
                    command);
  if (last[0]) TRY(g2z_json_close(&json));
  if (!(theirs > 0))
    return g2z_fail(services, G2Z_IO, "--peer: `%.400s` printed no \"tokens_per_second\"; run it "
                    "by itself to see why", command);
  printf("peer        %.0f tokens/s by %s; bench is %.3f times as fast\n", theirs, name,
         tokens_per_second / theirs);
  return G2Z_OK;
}

static g2z_status report_steps(g2z_services *services, const g2z_bench *o,
                               const g2z_context_config *config, const g2z_plan *plan,
                               g2z_stopwatch *w) {
  const size_t count = (size_t)w->count;
  double tokens = (double)plan->batch * plan->seq * plan->accum * plan->world;
  double median_s = g2z_median(w->step_s, count); /* sorts step_s */
  printf("\nstep        %.2f ms median, %.2f minimum, %.2f maximum of %d step%s\n", median_s * 1e3,
         w->step_s[0] * 1e3, w->step_s[count - 1] * 1e3, w->count, G2Z_PLURAL(w->count));
  printf("throughput  %.0f tokens/s\n", tokens / median_s);
  fflush(stdout);
  if (plan->world > 1) { /* ops are only timed on one rank */
    double exposed_s = g2z_median(w->exposed_s, count);
    printf("exposed     %.3f ms of communication, %.1f %% of the step; at most %.3f ms with "
           "waiting for slower ranks\n", exposed_s * 1e3, 100 * exposed_s / median_s,
           g2z_median(w->waited_s, count) * 1e3);
    return G2Z_OK;
  }
  if (o->peer) TRY(run_peer(services, o, tokens / median_s));
  if (o->without_ops) return G2Z_OK;
  return run_plan_ops(o, config, plan, median_s);
}

static g2z_status run_step(g2z_services *services, const g2z_bench *o,
                           const g2z_context_config *config) {
  g2z_context *context;
  g2z_plan *plan;
  g2z_stopwatch w;
  const g2z_place *place = &config->ranks.place;
  const g2z_model_config *shape = &o->shape;
  if (o->peer) { /* refuse work that run_peer's flags do not describe: the peer's would differ */
    if (shape->layers || shape->channels || shape->heads || shape->vocab || o->train.dropout > 0)
      G2Z_REFUSE(services, "--peer runs an unchanged --model: remove --layers, --channels, "
                 "--heads, --vocab-size and --dropout");
    if (!o->model && config->device == G2Z_DEVICE_CPU)
      G2Z_REFUSE(services, "--peer needs a --model; add --model gpt2");
    if (place->world > 1)
      G2Z_REFUSE(services, "--peer runs on one rank, but bench has %d: run it without mpirun, srun "
                 "or torchrun", place->world);
  }
  TRY(g2z_plan_create(services, &o->train, config->device, place->rank, place->world,
                      place->local_world, &plan));
  g2z_plan_print(plan, 0, print_line, NULL);
  g2z_status status = g2z_stopwatch_open(services, o->work.steps, &w);
  if (status == G2Z_OK) status = g2z_context_create(config, &context);
  if (status == G2Z_OK) {
    status = time_steps(context, o, &w);
    g2z_context_free(context);
  }
  if (status == G2Z_OK) status = report_steps(services, o, config, plan, &w);
  g2z_release(services, w.step_s);
  g2z_plan_free(plan);
  return status;
}

static g2z_status run_ops(g2z_services *services, const g2z_bench *o,
                          const g2z_context_config *config) {
  g2z_plan *plan;
  if (config->ranks.place.world > 1)
    G2Z_REFUSE(services, "bench ops times one rank, and this process is one of %d: run it without "
               "mpirun, srun or torchrun", config->ranks.place.world);
  TRY(g2z_plan_create(services, &o->train, config->device, 0, 1, 1, &plan));
  g2z_plan_print(plan, 0, print_line, NULL);
  g2z_status status = run_plan_ops(o, config, plan, NAN);
  g2z_plan_free(plan);
  return status;
}

/* ----- the program -------------------------------------------------------- */

static void print_log(void *user, g2z_log_level level, const char *sentence) {
  (void)user;
  printf("%s%s\n", level == G2Z_LOG_WARNING ? "warning: " : "", sentence);
  fflush(stdout);
}

/* Reports the fault and ends the process. It runs in a thread of the library, because other threads
 * may wait for ever inside a collective. */
static void on_fault(void *user, const g2z_fault *fault) {
  (void)user;
  fprintf(stderr, "bench: %s\n", fault->sentence);
  _exit(G2Z_EXIT_LOST);
}

static g2z_status run_command(g2z_services *services, const g2z_bench *o,
                              const g2z_context_config *config) {
  if (o->command == G2Z_BENCH_step) return run_step(services, o, config);
  if (o->command == G2Z_BENCH_ops) return run_ops(services, o, config);
  if (o->command != G2Z_BENCH_profile) return g2z_bench_run(services, o, config);
  if (o->argc < 2)
    G2Z_REFUSE(services, "name the run directories: bench profile RUN_DIR...");
  for (int i = 1; i < o->argc; i++) {
    const g2z_path path = g2z_path_in(o->argv[i], "profiles/profile_summary.json");
    char word[sizeof path.text + 32];
    TRY(g2z_profile_run(services, o->argv[i]));
    printf("To see what took most time: cat %s\n", g2z_shell_word(path.text, word, sizeof word));
  }
  return G2Z_OK;
}

int main(int argc, char **argv) {
  g2z_services services;
  memset(&services, 0, sizeof services);
  g2z_status status = g2z_begin_program(&services, argv);
  services.log = print_log;
  g2z_bench o;
  char *command_line = NULL;
  g2z_context_config context = g2z_context_config_default(&services);
  context.ranks.on_fault = on_fault;
  if (status == G2Z_OK) status = g2z_flags_line(&services, argc, argv, &command_line);
  if (status == G2Z_OK) status = g2z_bench_read(&services, argc, argv, &context, &o);
  if (status == G2Z_OK && o.help) g2z_bench_help(&o, print_line, NULL);
  else if (status == G2Z_OK) {
    o.command_line = command_line;
    o.commit = G2Z_GIT_COMMIT;
    if (o.commit) context.ranks.build = o.commit;
    if (context.ranks.place.rank != 0 && !freopen("/dev/null", "w", stdout))
      fprintf(stderr, "bench: rank %d cannot close its standard output\n",
              context.ranks.place.rank);
    status = run_command(&services, &o, &context);
  }
  if (status != G2Z_OK) fprintf(stderr, "bench: %s\n", services.error);
  g2z_release(&services, command_line);
  return status != G2Z_OK;
}
