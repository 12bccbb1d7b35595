/* train: trains GPT-2 on token shards, generates text and scores files. It also shows how to embed
 * gpt2_zero.h with extras/: flags, a run, and a loop over g2z_run_next. Builds as C11, as C++17 and
 * with nvcc: cc -O3 -x c train.cu -lm -lpthread */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_command.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef G2Z_GIT_COMMIT
#define G2Z_GIT_COMMIT NULL /* the Makefile sets it */
#endif

typedef struct program {
  g2z_run_options options;
  g2z_context_config context;
  g2z_context *open;  /* of the training, */
  g2z_run *run;       /* and its run, until main has printed why it ended */
  const char *scored; /* the file that --eval scores now */
} program;

static size_t in_place; /* columns of the progress on the terminal's last line; 0: none */
static char early[4096]; /* the first lines printed; the run copies them into train.log */

/* Clears the terminal's last line. */
static void leave_place(void) {
  if (in_place) printf("\r%*s\r", (int)in_place, "");
  in_place = 0;
}

/* Replaces the terminal's last line, which must not wrap. */
static void put_in_place(const char *text) {
  struct winsize window;
  int columns = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 ? window.ws_col - 1 : 79;
  if (columns <= 0 || columns > 79) columns = 79;
  leave_place();
  in_place = (size_t)printf("%.*s", columns, text);
  fflush(stdout);
}

/* 1: progress is drawn in place. A launcher's output may be a terminal, too, but the launcher shows
 * a line only when it ends. */
static int on_terminal(const program *p) {
  return strcmp(p->context.ranks.place.launcher, "alone") == 0 && isatty(STDOUT_FILENO) &&
         tcgetpgrp(STDOUT_FILENO) == getpgrp() && !p->options.profile_mode;
}

static void print_line(void *user, const char *text) {
  (void)user;
  puts(text);
}

/* Prints rank 0's log, and warnings of other ranks. user: const g2z_place *. */
static void print_log(void *user, g2z_log_level level, const char *sentence) {
  const g2z_place *place = (const g2z_place *)user;
  const char *warning = level == G2Z_LOG_WARNING ? "warning: " : "";
  const size_t used = strlen(early);
  leave_place();
  if (place->rank == 0) snprintf(early + used, sizeof early - used, "%s%s\n", warning, sentence);
  if (place->rank == 0) printf("%s%s\n", warning, sentence);
  else if (*warning) printf("[rank %d] %s%s\n", place->rank, warning, sentence);
  fflush(stdout);
}

/* On a terminal, each step replaces the previous one on the last line, at most ten times per
 * second. Elsewhere a step is printed every 5 seconds. The last step, the step before a validation,
 * spikes and other events get a separate line. */
static void print_event(const program *p, const g2z_run_event *event) {
  static double next;
  static char step[256]; /* the latest step; "": it has its own line */
  const double now = g2z_seconds();
  const int terminal = on_terminal(p);
  g2z_place place = p->context.ranks.place;
  if (place.rank != 0) return;
  const int spike = event->metrics.skipped == 2;
  if (event->kind != G2Z_RUN_STEP || event->metrics.step == event->steps || spike) {
    if (event->kind == G2Z_RUN_VALIDATION && step[0]) print_log(&place, G2Z_LOG_INFO, step);
    print_log(&place, G2Z_LOG_INFO, event->line);
    if (event->kind == G2Z_RUN_VALIDATION || event->kind == G2Z_RUN_STEP) step[0] = 0;
    return;
  }
  snprintf(step, sizeof step, "%s", event->line);
  if (now < next) return;
  next = now + (terminal ? 0.1 : 5);
  if (terminal) put_in_place(step);
  else print_log(&place, G2Z_LOG_INFO, step);
  if (!terminal) step[0] = 0;
}

/* Progress of a validation or of --eval: in place, or every ten seconds on standard error. */
static void print_progress(void *user, const char *name, double share) {
  static double next;
  const program *p = (const program *)user;
  const double now = g2z_seconds();
  const int terminal = on_terminal(p);
  char text[80];
  if (share == 0) next = now + (terminal ? 0 : 10);
  if (now < next) return;
  next = now + (terminal ? 0.1 : 10);
  snprintf(text, sizeof text, "%.50s: %.0f %%", name, 100 * share);
  if (terminal) put_in_place(g2z_tame(text));
  else fprintf(stderr, "%s\n", g2z_tame(text));
}

/* "[rank 3] train: sentence"; rank 0 prints no number. Settings have the names of their flags. */
static void print_error(const g2z_place *place, const char *library_sentence) {
  char sentence[2 * G2Z_ERROR_BYTES];
  g2z_run_options_words(library_sentence, sentence, sizeof sentence);
  leave_place();
  fflush(stdout);
  if (place->rank > 0) fprintf(stderr, "[rank %d] train: %s\n", place->rank, sentence);
  else fprintf(stderr, "train: %s\n", sentence);
}

/* ----- faults: another rank died or hangs -------------------------------- */

static void on_alarm(int number) {
  (void)number;
  _exit(G2Z_EXIT_LOST);
}

/* Reports the fault and ends the process. Runs in a thread of the library: other threads may wait
 * for ever inside a collective. */
static void on_fault(void *user, const g2z_fault *fault) {
  const program *p = (const program *)user;
  const g2z_place *place = &p->context.ranks.place;
  /* A file system or a console that hangs must not keep this process alive. The library's threads
   * block the signal. */
  sigset_t alarms;
  signal(SIGALRM, on_alarm);
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
  alarm(8);
  char sentence[sizeof fault->sentence], word[1200]; /* the sentence may come from another rank */
  memcpy(sentence, fault->sentence, sizeof sentence);
  /* Ranks that train started share a console: rank 0 prints for all of them while it is alive. */
  const int first = place->rank == 0 || fault->rank == 0;
  if (first || strcmp(place->launcher, "ranks") != 0) print_error(place, g2z_tame(sentence));
  const g2z_run_config *run = &p->options.run;
  DIR *directory = first && run->run_dir ? opendir(run->run_dir) : NULL;
  int saved = 0, saves = run->save_every > 0 || run->save_epochs || run->keep_best;
  for (struct dirent *entry; directory && (entry = readdir(directory)) != NULL;)
    saved |= strncmp(entry->d_name, "step-", 5) == 0 && !strchr(entry->d_name, '.');
  if (directory)
    fprintf(stderr, "%s: the same command with --run-dir %s --resume latest%s\n",
            saved ? "To continue" : "No checkpoint was saved. To start again",
            g2z_shell_word(run->run_dir, word, sizeof word),
            saved || saves ? "" : " --save-every 1000");
  g2z_run_write_fault(&p->options, fault);
  _exit(G2Z_EXIT_LOST);
}

/* ----- training ----------------------------------------------------------- */

/* Prints the memory plan and whether it fits. */
static g2z_status dry_run(g2z_services *services, const g2z_run_options *o,
                          const g2z_context_config *context) {
  g2z_train_config config = o->run.train;
  g2z_plan *plan;
  size_t free_bytes, total_bytes;
  if (context->ranks.place.rank != 0) return G2Z_OK; /* rank 0's plan is the largest */
  config.optimizer.warmup = 0; /* the plan does not depend on the schedule */
  config.optimizer.min_lr = 0;
  G2Z_TRY(g2z_plan_create(services, &config, context->device, context->ranks.place.rank,
                          context->ranks.place.world, context->ranks.place.local_world, &plan));
  if (g2z_device_memory(services, context->device, &free_bytes, &total_bytes) != G2Z_OK) {
    puts("this machine has no such device, so its memory is not known");
    free_bytes = 0;
  }
  const int local = context->ranks.place.local_world;
  const int sharing = context->device == G2Z_DEVICE_CPU && local > 1 ? local : 1;
  free_bytes /= (size_t)sharing; /* this rank's share of the host's memory */
  g2z_plan_print(plan, free_bytes, print_line, NULL);
  g2z_status status = G2Z_OK;
  if (free_bytes) status = g2z_plan_fits(services, &config, plan, free_bytes, sharing);
  g2z_plan_free(plan);
  return status;
}

static g2z_status train(program *p) {
  g2z_run_event event;
  p->context.ranks.on_fault = on_fault;
  p->context.ranks.user = p;
  p->options.run.progress = print_progress;
  p->options.run.progress_user = p;
  p->options.run.early = early;
  G2Z_TRY(g2z_run_launch(&p->options, &p->context, &p->open, &p->run));
  g2z_run_catch_signals(p->run);
  g2z_status status;
  while ((status = g2z_run_next(p->run, &event)) == G2Z_OK) {
    print_event(p, &event);
    if (event.kind == G2Z_RUN_DONE) break;
  }
  g2z_run_catch_signals(NULL);
  return status;
}

/* ----- a model in use: no training, no run directory -------------------------- */

/* Returns 1 if the output is closed. */
static int put_text(void *user, const char *text, size_t bytes) {
  (void)user;
  return fwrite(text, 1, bytes, stdout) != bytes || fflush(stdout) != 0;
}

static g2z_status write_text(const program *p, g2z_model *model, const g2z_tokenizer *tokenizer,
                             const char *prompt) {
  const g2z_run_config *run = &p->options.run;
  g2z_status status = g2z_write_text(model, tokenizer, prompt, run->sample_tokens, &run->sampling,
                                     put_text, NULL);
  puts("");
  return status;
}

/* Continues each line of the standard input, as a prompt. On a terminal, asks for them. */
static g2z_status converse(const program *p, g2z_model *model, const g2z_tokenizer *tokenizer) {
  const char *ask = isatty(STDIN_FILENO) ? "> " : "";
  g2z_services *services = model->services;
  g2z_status status = G2Z_OK;
  char *line = NULL;
  size_t room = 0;
  if (*ask) puts("Type a prompt, then Enter. Ctrl-D ends.");
  for (int number = 1; status == G2Z_OK; number++) {
    fputs(ask, stdout);
    fflush(stdout);
    const ssize_t bytes = getline(&line, &room, stdin);
    if (bytes < 0) break;
    if (strlen(line) != (size_t)bytes)
      status = g2z_fail(services, G2Z_FORMAT, "line %d of the prompts has a zero byte: give text",
                        number);
    line[strcspn(line, "\r\n")] = 0;
    if (*line && status == G2Z_OK) status = write_text(p, model, tokenizer, line);
  }
  if (ferror(stdin)) status = g2z_fail_file(services, errno, "read", "standard input");
  if (*ask) puts("");
  free(line);
  return status;
}

static void print_share(void *user, double share) {
  print_progress(user, ((const program *)user)->scored, share);
}

/* Scores the files of --eval and prints a line for each. */
static g2z_status evaluate(program *p, g2z_model *model, const g2z_tokenizer *tokenizer) {
  const g2z_texts *files = &p->options.run.eval;
  for (int i = 0; i < files->count; i++) {
    g2z_eval_set *set;
    g2z_eval result;
    char text[200], name[1024];
    const double begin = g2z_seconds();
    snprintf(name, sizeof name, "%s", files->text[i]);
    p->scored = g2z_tame(name);
    G2Z_TRY(g2z_eval_open(model->services, &model->config, tokenizer, files->text[i], &set));
    g2z_status status = g2z_eval_run(set, model, print_share, p, &result);
    g2z_eval_free(set);
    leave_place();
    G2Z_TRY(status);
    g2z_eval_text(&result, text);
    printf("%s | %s | %.2f s\n", name, text, g2z_seconds() - begin);
  }
  return G2Z_OK;
}

static g2z_status use_model(program *p, g2z_context *context, g2z_model *model) {
  const g2z_run_config *run = &p->options.run;
  const int files = run->eval.count, lines = run->prompt && strcmp(run->prompt, "-") == 0;
  const int asks = lines || (!run->prompt && !files);
  g2z_services *services = context->services;
  g2z_tokenizer *tokenizer = NULL;
  if (asks && !lines && !isatty(STDIN_FILENO))
    G2Z_REFUSE(services, "give something to do with these weights: --prompt TEXT, --prompt - for "
               "each line of standard input, --eval FILE, or --train GLOB");
  if (run->vocab || model->config.vocab == 257)
    G2Z_TRY(g2z_tokenizer_create(services, run->vocab, &tokenizer));
  g2z_status status = evaluate(p, model, tokenizer);
  if (status == G2Z_OK && (asks || run->prompt) && !tokenizer)
    status = g2z_fail(services, G2Z_BAD_ARGUMENT, "%s has no tokenizer: give the one that the "
                      "model was trained with, --vocab FILE", run->train.init_from);
  else if (status == G2Z_OK && asks) status = converse(p, model, tokenizer);
  else if (status == G2Z_OK && run->prompt) status = write_text(p, model, tokenizer, run->prompt);
  g2z_tokenizer_free(tokenizer);
  return status;
}

static g2z_status use(program *p) {
  const g2z_train_config *train = &p->options.run.train;
  const int world = p->context.ranks.place.world;
  g2z_context *context = NULL;
  g2z_model *model = NULL;
  if (world > 1)
    G2Z_REFUSE(p->context.services, "there are %d processes, but one generates and scores: start "
               "one, without --ranks, --gpus and launcher, or with srun -n 1", world);
  g2z_status status = g2z_context_create(&p->context, &context);
  if (status == G2Z_OK) status = g2z_model_open(context, train->init_from, train->dtype, &model);
  if (status == G2Z_OK) status = use_model(p, context, model);
  g2z_model_free(model);
  g2z_context_free(context);
  return status;
}

int main(int argc, char **argv) {
  g2z_services services;
  program p;
  int is_parent = 0, code = 0, alike = 1; /* alike: all ranks of a host fail alike */
  memset(&services, 0, sizeof services);
  g2z_status status = g2z_begin_program(&services, argv);
  signal(SIGPIPE, SIG_IGN); /* the console's reader may end; train.log has all lines */
  memset(&p, 0, sizeof p);
  services.log = print_log;
  services.user = &p.context.ranks.place;
  p.options = g2z_run_options_default();
  char *command_line = NULL;
  if (status == G2Z_OK) status = g2z_flags_line(&services, argc, argv, &command_line);
  if (status == G2Z_OK) status = g2z_run_options_parse(&services, argc, argv, &p.options);
  const int help = status == G2Z_OK && (p.options.help || p.options.version);
  if (help && p.options.version) puts("train " G2Z_VERSION);
  else if (help) {
    puts("train: trains GPT-2 on token shards of prepare_data, and generates text\n"
         "train      ./train --train 'data/NAME_train_*.bin' --val 'data/NAME_val_*.bin' \\\n"
         "             --vocab FILE --run-dir RUN_DIR --save-every 1000\n"
         "fine-tune  the same command with --init-from DIR --lr 3e-5, without --model\n"
         "resume     the same command with --resume latest\n"
         "generate   ./train --init-from RUN_DIR/weights --prompt 'Once upon a time'\n"
         "           ./train --init-from RUN_DIR/weights --prompt - < FILE    for each line\n"
         "score      ./train --init-from RUN_DIR/weights --eval TEXT_FILE\n");
    g2z_run_options_print(print_line, NULL);
  } else if (status == G2Z_OK && !p.options.dry_run)
    status = g2z_run_options_spawn(&services, &p.options, argv, &is_parent, &code);
  if (status == G2Z_OK && !help && !is_parent) {
    p.options.run.command_line = command_line;
    p.options.run.git_commit = G2Z_GIT_COMMIT;
    p.context = g2z_context_config_default(&services);
    status = g2z_run_options_settle(&services, &p.options, &p.context);
    const int trains = p.options.run.train.train_glob || p.options.run.val_glob;
    if (status == G2Z_OK) {
      alike = !trains && p.context.ranks.place.world > 1;
      status = p.options.dry_run ? dry_run(&services, &p.options, &p.context)
               : trains          ? train(&p)
                                 : use(&p);
    }
  }
  /* Rank 0 prints a sentence that all ranks have. */
  const int same = status == G2Z_STOPPED || services.alike;
  int printed = same && p.context.ranks.place.rank != 0;
  if (status != G2Z_OK && status != G2Z_NO_MEMORY && alike) {
    g2z_services other; /* so that its error does not replace the sentence */
    g2z_place place;
    memset(&other, 0, sizeof other);
    printed = g2z_place_find(&other, &place) == G2Z_OK && place.local_rank > 0;
  }
  if (status != G2Z_OK && !printed) print_error(&p.context.ranks.place, services.error);
  /* The ranks meet here, after the print: a rank that failed alone waits, and may be ended. */
  g2z_run_free(p.run);
  g2z_context_free(p.open);
  g2z_run_options_free(&services, &p.options);
  g2z_release(&services, command_line);
  if (code || status == G2Z_OK) return code;
  return status == G2Z_LOST ? G2Z_EXIT_LOST : status == G2Z_STOPPED ? G2Z_EXIT_STOPPED : 1;
}
