/* train: trains GPT-2 on token shards, generates text and scores files. It also shows how to embed
 * gpt2_zero.h with extras/: flags, a run, and a loop over g2z_run_next. Builds as C11, as C++17 and
 * with nvcc: cc -O3 -x c train.cu -lm -lpthread */

#define GPT2_ZERO_IMPLEMENTATION
#include "gpt2_zero.h"
#include "extras/g2z_command.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef G2Z_GIT_COMMIT
#define G2Z_GIT_COMMIT NULL /* the Makefile sets it */
#endif

typedef struct program {
  g2z_run_options options;
  g2z_context_config context;
  g2z_context *open; /* the context of the training */
  g2z_run *run;      /* main frees `open` and `run` after it has printed why the run ended */
  int meets;         /* 1: g2z_run_launch was called, where the ranks meet */
} program;

static size_t in_place; /* width in columns of the progress on the terminal's last line; 0: none */
static char early[4096]; /* the first lines that were printed; the run copies them to train.log */

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

/* 1: progress is drawn in place. Not under a launcher: its output may be a terminal, too, but it
 * shows a line only when the line ends. */
static int on_terminal(const program *p) {
  const int launched = strcmp(p->context.ranks.place.launcher, "alone") != 0;
  const int in_foreground = isatty(STDOUT_FILENO) && tcgetpgrp(STDOUT_FILENO) == getpgrp();
  return in_foreground && !launched && !p->options.profile_mode;
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
  if (place->rank == 0) {
    snprintf(early + used, sizeof early - used, "%s%s\n", warning, sentence);
    printf("%s%s\n", warning, sentence);
  } else if (*warning) {
    printf("[rank %d] %s%s\n", place->rank, warning, sentence);
  }
  fflush(stdout);
}

/* On a terminal, each step replaces the previous one on the last line, at most ten times per
 * second. Elsewhere a step is printed every 5 seconds. The last step, the step before a validation,
 * spikes and other events get a separate line. */
static void print_event(const program *p, const g2z_run_event *event) {
  static double next;
  static char step[256]; /* the latest step; "": it has its own line */
  const double now = g2z_seconds();
  const int spike = event->metrics.skipped == 2;
  g2z_place place = p->context.ranks.place;
  if (place.rank != 0) return;
  if (event->kind == G2Z_RUN_DONE && isatty(STDOUT_FILENO)) return; /* its line is for programs */
  if (event->kind != G2Z_RUN_STEP || event->metrics.step == event->steps || spike) {
    if (event->kind == G2Z_RUN_VALIDATION && step[0]) print_log(&place, G2Z_LOG_INFO, step);
    print_log(&place, G2Z_LOG_INFO, event->line);
    if (event->kind == G2Z_RUN_VALIDATION || event->kind == G2Z_RUN_STEP) step[0] = 0;
    return;
  }
  snprintf(step, sizeof step, "%s", event->line);
  if (now < next) return;
  if (on_terminal(p)) {
    next = now + 0.1;
    put_in_place(step);
  } else {
    next = now + 5;
    print_log(&place, G2Z_LOG_INFO, step);
    step[0] = 0;
  }
}

/* Prints the progress of a validation or of --eval: in place on a terminal, else to standard error
 * every ten seconds. */
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

/* Prints "[rank 3] train: sentence", on rank 0 without the number. The names of settings in the
 * sentence become flags. */
static void print_error(const g2z_place *place, const char *library_sentence) {
  char sentence[2 * G2Z_ERROR_BYTES];
  g2z_run_options_words(library_sentence, sentence, sizeof sentence);
  leave_place();
  fflush(stdout);
  if (place->rank > 0) fprintf(stderr, "[rank %d] train: %s\n", place->rank, sentence);
  else fprintf(stderr, "train: %s\n", sentence);
}

/* ----- faults: another rank died or hangs -------------------------------- */

/* Reports the fault and ends the process. It runs in a thread of the library, because other threads
 * may wait for ever inside a collective. */
static void on_fault(void *user, const g2z_fault *fault) {
  const program *p = (const program *)user;
  const g2z_place *place = &p->context.ranks.place;
  const int share_console = strcmp(place->launcher, "ranks") == 0; /* train started the ranks */
  /* Rank 0 prints for all ranks. If rank 0 has the fault, each rank prints. */
  const int first = place->rank == 0 || fault->rank == 0;
  char sentence[sizeof fault->sentence], hint[G2Z_RUN_HINT_BYTES];
  g2z_run_end_within(8); /* even if the console or the file system hangs */
  memcpy(sentence, fault->sentence, sizeof sentence); /* from another rank: do not trust it */
  if (first || !share_console) print_error(place, g2z_tame(sentence));
  g2z_run_write_fault(&p->options, fault, hint);
  if (first && *hint) fprintf(stderr, "%s\n", hint);
  _exit(G2Z_EXIT_LOST);
}

/* ----- the work of a process ---------------------------------------------- */

static g2z_status train(program *p) {
  g2z_run_event event;
  p->meets = 1;
  p->context.ranks.on_fault = on_fault;
  p->context.ranks.user = p;
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

/* Prints the text that g2z_run_use generates. Returns 1 if the output is closed. */
static int put_text(void *user, const char *text, size_t bytes) {
  (void)user;
  leave_place();
  return fwrite(text, 1, bytes, stdout) != bytes || fflush(stdout) != 0;
}

static g2z_status work(program *p) {
  g2z_run_config *run = &p->options.run;
  run->progress = print_progress;
  run->progress_user = p;
  if (p->options.dry_run)
    return g2z_run_dry(p->context.services, &p->options, &p->context, print_line, NULL);
  if (run->train.train_glob || run->val_glob) return train(p);
  return g2z_run_use(&p->options, &p->context, put_text, NULL);
}

/* 1: before the ranks meet, all ranks of a host fail like this one: the command is wrong, or it
 * names a file that is not there or that the user may not open. 0: one rank may fail alone, when it
 * has no memory or cannot read a file. Its sentence must not be lost. */
static int fails_alike(g2z_status status, int os_error) {
  if (status == G2Z_IO) return os_error == ENOENT || os_error == EACCES;
  return status != G2Z_NO_MEMORY;
}

/* Prints why the work failed, unless another rank prints the same sentence. */
static void print_failure(const program *p, const g2z_services *services, g2z_status status) {
  const g2z_place *place = &p->context.ranks.place;
  g2z_services other; /* g2z_place_find may fail: it must not replace the sentence */
  g2z_place found;
  memset(&other, 0, sizeof other);
  if ((status == G2Z_STOPPED || services->alike) && place->rank != 0) return;
  if (!p->meets && fails_alike(status, services->os_error) &&
      g2z_place_find(&other, &found) == G2Z_OK && found.local_rank > 0)
    return;
  print_error(place, services->error);
}

static void print_help(void) {
  puts("train: trains GPT-2 on token shards of prepare_data, and generates text\n"
       "train      ./train --train 'data/NAME_train_*.bin' --val 'data/NAME_val_*.bin' \\\n"
       "             --vocab FILE --run-dir RUN_DIR --save-every 1000\n"
       "fine-tune  the same command with --init-from DIR --lr 3e-5, without --model\n"
       "           and --positions\n"
       "resume     the same command with --resume latest\n"
       "generate   ./train --init-from RUN_DIR/weights --prompt 'Once upon a time'\n"
       "           ./train --init-from RUN_DIR/weights --prompt - < FILE   for each line\n"
       "score      ./train --init-from RUN_DIR/weights --eval TEXT_FILE\n");
  g2z_run_options_print(print_line, NULL);
}

int main(int argc, char **argv) {
  g2z_services services;
  program p;
  int ends = 0, code = 0; /* 1: the process has nothing more to do, and ends with `code` */
  char *command_line = NULL;
  memset(&services, 0, sizeof services);
  g2z_status status = g2z_begin_program(&services, argv);
  signal(SIGPIPE, SIG_IGN); /* the reader of the output may end: train.log still gets all lines */
  memset(&p, 0, sizeof p);
  services.log = print_log;
  services.user = &p.context.ranks.place;
  p.options = g2z_run_options_default();
  if (status == G2Z_OK) status = g2z_flags_line(&services, argc, argv, &command_line);
  if (status == G2Z_OK) status = g2z_run_options_parse(&services, argc, argv, &p.options);
  if (status == G2Z_OK) {
    ends = p.options.help || p.options.version;
    if (p.options.version) puts("train " G2Z_VERSION);
    else if (p.options.help) print_help();
    else if (!p.options.dry_run)
      status = g2z_run_options_spawn(&services, &p.options, argv, &ends, &code);
  }
  if (status == G2Z_OK && !ends) {
    p.options.run.command_line = command_line;
    p.options.run.git_commit = G2Z_GIT_COMMIT;
    p.context = g2z_context_config_default(&services);
    if (p.options.run.git_commit) p.context.ranks.build = p.options.run.git_commit;
    status = g2z_run_options_settle(&services, &p.options, &p.context);
    if (status == G2Z_OK) status = work(&p);
  }
  if (status != G2Z_OK) print_failure(&p, &services, status);
  /* Print before these calls. In g2z_context_free the ranks wait for each other, and a launcher may
   * kill a rank that failed alone while it waits. */
  g2z_run_free(p.run);
  g2z_context_free(p.open);
  g2z_run_options_free(&services, &p.options);
  g2z_release(&services, command_line);
  if (code || status == G2Z_OK) return code;
  if (status == G2Z_LOST) return G2Z_EXIT_LOST;
  if (status == G2Z_STOPPED) return G2Z_EXIT_STOPPED;
  return 1;
}
