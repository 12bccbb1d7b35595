/* g2z_program.h: common parts of command-line programs that use gpt2_zero.h: a table of flags,
 * ranks that a program starts itself, and the start of main. MIT licence.
 *
 * QUICK START
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     #include "g2z_program.h"                                   // this order
 *     static g2z_services services;                               // malloc, no log
 *     int steps = 100;
 *     const g2z_flag flags[] = {{"steps", G2Z_FLAG_INT, &steps, 1, 1e6, "N", "length of the run"}};
 *     if (g2z_flags_parse(&services, flags, 1, argc, argv, 1, NULL)) puts(services.error);
 *
 * Names that begin with g2zg_ or G2ZG_ are private.
 *
 * CONTENTS: flags; ranks of this host; text for terminals and shells; the start of main */

#ifndef G2Z_PROGRAM_INCLUDED
#define G2Z_PROGRAM_INCLUDED

#ifndef G2Z_INCLUDED
#error "g2z_program.h: include gpt2_zero.h before it"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ===== flags =============================================================
 * Command lines for programs around the library. The parser, --help and docs/flags.md are made from
 * one table. A flag is written --name VALUE or --name=VALUE. If it is given twice, the last value
 * counts. */

typedef enum g2z_flag_kind {
  G2Z_FLAG_GROUP,    /* not a flag: a heading of the help text */
  G2Z_FLAG_SWITCH,   /* int: becomes 1; takes no value */
  G2Z_FLAG_TEXT,     /* const char *: points into argv */
  G2Z_FLAG_GLOB,     /* const char *: a file pattern. A second, different pattern is an error, since
                      * the files of the first would not be used */
  G2Z_FLAG_TEXTS,    /* g2z_texts: appends all arguments up to the next flag */
  G2Z_FLAG_GLOBS,    /* g2z_texts: appends one file pattern; a repeated pattern counts once. A
                      * repeated "GLOB:WEIGHT" is an error: weights do not add up */
  G2Z_FLAG_CHOICE,   /* int or enum: the index of the given word in `value` */
  G2Z_FLAG_INT,      /* int */
  G2Z_FLAG_INT64,    /* int64_t */
  G2Z_FLAG_UINT64,   /* uint64_t; any value: minimum and maximum are ignored */
  G2Z_FLAG_FLOAT     /* float */
} g2z_flag_kind;

#define G2Z_TEXTS 16             /* largest number of files that a flag takes */
typedef struct g2z_texts {
  int count;
  const char *text[G2Z_TEXTS];
} g2z_texts;

typedef struct g2z_flag {
  const char *name;          /* without dashes */
  g2z_flag_kind kind;
  void *destination;         /* has the default, which --help shows if it is in the range */
  double minimum, maximum;   /* range of a number, inclusive */
  const char *value;         /* name of the value in --help: "N", "DIR"; for a choice its words:
                              * "|cpu|cuda" */
  const char *help;
} g2z_flag;

/* The arguments begin at argv[first]; first is 1, or 2 after a sub-command. Arguments that are not
 * flags move to the front, to argv[first] and the places after it, and *rest becomes their number.
 * rest NULL: such an argument is an error. If a flag belongs to another program, the error names
 * this program's flag. -h is --help. */
G2Z_API g2z_status g2z_flags_parse(g2z_services *services, const g2z_flag *flags, int count,
                                   int argc, char **argv, int first, int *rest);
/* Prints the table in lines of 80 columns. Call it before parsing: it shows the values of the
 * destinations as defaults. */
G2Z_API void g2z_flags_print(const g2z_flag *flags, int count,
                             void (*line)(void *user, const char *text), void *user);
/* Makes arguments from the table, for a program that starts itself again: the words of `first`,
 * then one "--name=VALUE" for each flag whose destination has a value in its range. The parser
 * reads exactly the same value again. The list ends with NULL. Free *argv with g2z_release. */
G2Z_API g2z_status g2z_flags_arguments(g2z_services *services, const g2z_flag *flags, int count,
                                       const char *const *first, int first_count, char ***argv);
/* The weight in a pattern of --train, such as "0.7" in "A_*.bin:0.7": a pointer into `glob`; NULL:
 * there is none. If a file has the whole pattern as its name, the pattern has no weight. The
 * library reads patterns in the same way. */
G2Z_API const char *g2z_glob_weight(const char *glob);
/* Writes argv as one line that a shell splits into the same words. Free *line with g2z_release. */
G2Z_API g2z_status g2z_flags_line(g2z_services *services, int argc, char *const *argv,
                                  char **line);

/* ===== ranks of this host ================================================
 * Starts the ranks of a job without mpirun: the same program, once for each rank. */

/* An exit code of programs around the library, in addition to G2Z_EXIT_LOST. */
#define G2Z_EXIT_STOPPED 75  /* a stop was requested; the state is saved if there is a run_dir */

typedef struct g2z_job {    /* processes that this one starts and supervises */
  int ranks;                      /* number of processes; also 1 starts a process */
  char **argv;                    /* for each rank: the program, its arguments, NULL */
  const char *output;             /* file for the ranks' output; NULL: this process's output */
  void (*watch)(void *user);      /* called at the start, then ten times a second; NULL: never */
  void *user;
} g2z_job;
typedef struct g2z_job_end {
  int exit_code;                  /* 0, or the exit code of the first rank that failed by itself; if
                                   * a signal killed that rank, 128 + signal */
  int signal;                     /* the last signal that was passed on; 0: none */
  double cpu_s;                   /* CPU time of all processes, user and system */
  size_t rank_bytes;              /* the largest resident memory of a process */
} g2z_job_end;
/* Starts this program job->ranks times, as ranks of one job on this host, and waits for all of
 * them. The ranks share a random secret, or G2Z_SECRET if it is set. When this process receives
 * SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2, it passes the signal on to the ranks. When a rank
 * fails, the log reports at once which rank failed, and how, unless job->output is set. The other
 * ranks get SIGTERM after two seconds and SIGKILL after 13 seconds. Call it before any thread
 * starts. */
G2Z_API g2z_status g2z_ranks_run(g2z_services *services, const g2z_job *job, g2z_job_end *out);
/* The same for a program that starts its own ranks. *is_parent 0: this process is a rank and
 * continues; for one rank, no process is started. *is_parent 1: all ranks have ended; the program
 * should return *exit_code. */
G2Z_API g2z_status g2z_ranks_spawn(g2z_services *services, int ranks, char **argv, int *is_parent,
                                   int *exit_code);

/* ===== text for terminals and shells ===================================== */

/* The character at `at`, before `end`, in a form that is safe to print. A byte of invalid UTF-8
 * becomes U+FFFD, and so does a control character other than tab and line feed. */
typedef struct g2z_shown {
  const char *text;             /* not terminated */
  size_t bytes, used;           /* number of bytes of `text`; of the input that it stands for */
} g2z_shown;
G2Z_API g2z_shown g2z_utf8_show(const unsigned char *at, const unsigned char *end);
/* Writes `text` as one word of a shell command: plain, in '...', or in bash's $'...' if it has
 * control characters or invalid UTF-8. Returns `word`, which becomes "..." if it is too short. */
G2Z_API const char *g2z_shell_word(const char *text, char *word, size_t room);
/* Writes `text` as a string of JSON, with its quotes. Replaces the characters that g2z_utf8_show
 * replaces. Returns `word`, which needs room for G2Z_JSON_WORD(strlen(text)) bytes. */
#define G2Z_JSON_WORD(bytes) (3 * (bytes) + 3)
G2Z_API const char *g2z_json_word(const char *text, char *word);

/* ===== the start of main ================================================= */

/* The first call of main. If standard input, output or error is closed, it becomes /dev/null:
 * otherwise the next file that the program opens would take its place. A write beyond `ulimit -f`
 * becomes an error instead of a signal. OpenMP's waiting threads sleep, unless OMP_WAIT_POLICY is
 * set: if other work needs a core, spinning costs most of the speed. A stack limit (ulimit -s) that
 * is too small is raised; if that is not allowed, the call fails. On Linux, top and pgrep show the
 * last part of argv[0] as the name of the process. */
G2Z_API g2z_status g2z_begin_program(g2z_services *services, char **argv);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_PROGRAM_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_PROGRAM_IMPLEMENTED)
#define G2Z_PROGRAM_IMPLEMENTED

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__linux__)
#include <sys/prctl.h>
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <sys/random.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ===== flags =============================================================
 * In:  a table of flags and argv. Out: values in the table's destinations.
 * Law: a value is read completely or refused. Nothing is guessed, and the error names an unknown
 * flag. */

/* An argument as messages show it: an empty one as "". */
static const char *g2zg_shown(const char *text) { return text[0] ? text : "\"\""; }

static const g2z_flag *g2zg_flag_find(const g2z_flag *flags, int count, const char *name,
                                      size_t length) {
  for (int i = 0; i < count; i++)
    if (flags[i].kind != G2Z_FLAG_GROUP && strlen(flags[i].name) == length &&
        memcmp(flags[i].name, name, length) == 0)
      return &flags[i];
  return NULL;
}

/* Flags of nanoGPT, llm.c (C and Python), Hugging Face's Trainer, DeepSpeed and Megatron-LM, each
 * with the flag to type here. Names with a dash belong to llm.c's C programs. */
static const struct { const char *theirs, *ours; } g2zg_foreign[] = {
    /* data */
    {"-i dataset train_file train_data_path data_path input_bin",
     "--train 'data/NAME_train_*.bin'"},
    {"-j validation_file valid_data_path input_val_bin", "--val 'data/NAME_val_*.bin'"},
    {"tokenizer tokenizer_name tokenizer_model vocab_file merge_file", "--vocab FILE"},
    {"split", "remove it: ./prepare_data splits the text"},
    {"num_workers dataloader_num_workers", "remove it: a thread prefetches the data"},
    /* model */
    {"model_type model_name config_name model_size", "--model NAME"},
    {"-e model_name_or_path pretrained_checkpoint finetune", "--init-from DIR"},
    {"n_layer n_layers num_layers num_hidden_layers", "--layers N"},
    {"n_embd d_model hidden_size", "--channels N"},
    {"n_head n_heads num_heads num_attention_heads", "--heads N"},
    {"n_positions n_ctx max_position_embeddings context_length", "--context N"},
    {"-t block_size sequence_length seq_length seq_len max_length max_seq_length", "--seq N"},
    {"attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop", "--dropout P"},
    {"make_vocab_size_divisible_by", "remove it: the vocabulary is padded to a multiple of 128"},
    {"bias swiglu normalization rotary_base use_rotary_position_embeddings position_embedding_type "
     "untie_embeddings_and_output_weights", "remove it: the model is GPT-2's"},
    /* batch and length */
    {"-b batch_size micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
     "micro_batch_size_per_gpu device_batch_size", "--batch N"},
    {"train_batch_size", "--global-batch N"},
    {"-d total_batch_size", "--global-batch N, in sequences: tokens divided by --seq"},
    {"per_device_eval_batch_size", "remove it: validation uses --batch N"},
    {"gradient_accumulation_steps grad_accum_steps", "--accum N, on each rank"},
    {"-x max_iters max_steps num_iterations train_iters lr_decay_iters lr_decay_steps "
     "total_num_steps", "--steps N"},
    {"train_samples lr_decay_samples", "--steps N: samples divided by --global-batch"},
    {"num_train_epochs num_epochs", "--epochs N"},
    {"-a overfit_single_batch", "--train FILE of one batch, with --epochs N"},
    /* optimizer */
    {"-l learning_rate", "--lr X"},
    {"-k lr_scheduler_type lr_decay_style scheduler decay_lr",
     "--schedule cosine|linear|constant|wsd|power"},
    {"-u warmup_iters warmup_steps lr_warmup_iters lr_warmup_steps warmup_num_steps",
     "--warmup N, in steps"},
    {"warmup_ratio lr_warmup_fraction lr_warmup_samples",
     "--warmup N, in steps: the fraction times --steps"},
    {"-q learning_rate_decay_frac", "--min-lr X, a rate: the fraction times --lr"},
    {"-c", "--weight-decay X"},
    {"grad_clip clip_grad max_grad_norm gradient_clipping", "--clip X"},
    {"adam_beta1", "--beta1 X"},
    {"adam_beta2", "--beta2 X"},
    {"betas", "--beta1 X --beta2 X"},
    {"adam_epsilon adam_eps", "--eps X"},
    {"optim muon optimizer_name", "--optimizer adamw|muon"},
    {"muon_momentum", "--momentum X"},
    /* numbers and device */
    {"cpu use_cpu no_cuda", "--device cpu"},
    {"cuda gpu", "--device cuda"},
    {"fp16 half", "--dtype fp16"},
    {"bf16 bfloat16", "--dtype bf16"},
    {"-f tf32 tensorcores", "--dtype tf32"},
    {"fp32", "--dtype fp32"},
    {"precision mixed_precision params_dtype amp", "--dtype fp32|tf32|fp16|bf16"},
    {"fp8_format", "--fp8 none|logits|forward|all"},
    {"initial_scale_power initial_loss_scale", "--loss-scale X; without it the scale is dynamic"},
    {"-w", "remove it: the optimizer has fp32 master weights"},
    {"-z zero_stage stage zero_optimization deepspeed deepspeed_config fsdp "
     "use_distributed_optimizer data_parallel_sharding_strategy", "--zero STAGE"},
    {"reduce_bucket_size allgather_bucket_size ddp_bucket_size ddp_bucket_cap_mb",
     "--bucket-mb X, in MiB"},
    {"accumulate_allreduce_grads_in_fp32 grad_accum_dtype", "--grad-dtype fp32"},
    {"-r gradient_checkpointing activation_checkpointing recompute_activations "
     "recompute_granularity recompute_method recompute_num_layers checkpoint_activations",
     "--recompute block"},
    {"cpu_offload offload_optimizer offload_param optimizer_cpu_offload",
     "offloading to the host is not supported; --zero 3 --recompute block saves memory"},
    {"tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
     "expert_model_parallel_size sequence_parallel",
     "ranks split the data, and --zero 3 shards the model over them"},
    {"compile torch_compile", "remove it: the step is recorded as CUDA graphs, --graph auto"},
    {"flash use_flash_attn attn_implementation -ge", "remove it: kernels are fused"},
    {"data_seed", "--seed N"},
    /* ranks */
    {"-pn nproc_per_node num_gpus gpus_per_node num_processes", "--gpus N"},
    {"nnodes num_nodes node_rank rank local_rank master_addr master_port hostfile backend "
     "distributed_backend ddp_backend -pr -pg -pm -ps -pp",
     "remove it: torchrun, mpirun or srun starts ranks on several hosts"},
    /* validation and samples */
    {"-v eval_interval eval_steps val_loss_every", "--val-every N"},
    {"-m eval_iters val_max_steps", "--val-steps N"},
    {"do_train do_eval eval_strategy evaluation_strategy",
     "--train GLOB trains, --val GLOB validates, --val-every N sets how often"},
    {"eval_only inference_only", "--val GLOB without --train, or --eval FILE"},
    {"-s", "--sample-every N"},
    {"-g max_new_tokens", "--sample-tokens N"},
    {"num_samples", "each start writes one sample; --sample-seed N gives another"},
    {"start", "--prompt TEXT"},
    {"do_sample", "--temperature 0 for the likeliest token"},
    {"hellaswag", "--eval FILE, llm.c's file of HellaSwag"},
    /* checkpoints and results */
    {"-n save_steps save_interval", "--save-every N"},
    {"save_strategy always_save_checkpoint", "--save-every N or --save-epochs"},
    {"-nk save_total_limit", "--keep N"},
    {"-y resume_from_checkpoint load load_checkpoint", "--resume latest"},
    {"-o out_dir output_dir log_dir logging_dir tensorboard_dir save", "--run-dir DIR"},
    {"overwrite_output_dir", "runs are never overwritten: --run-dir DIR, a new one"},
    {"log_interval logging_steps steps_per_print -lg",
     "remove it: metrics.jsonl in --run-dir has every step"},
    {"wandb wandb_log wandb_project wandb_run_name wandb_exp_name wandb_entity report_to run_name",
     "nothing is uploaded; --run-dir DIR has metrics.jsonl and TensorBoard's files"},
    {"push_to_hub", "--save-weights DIR writes Hugging Face's format; upload it with their tools"},
    {"use_pytorch_profiler profile_step_start", "--profile"},
    {"config config_file yaml_cfg", "there are only flags; to keep them in a file: $(cat FILE)"},
};

/* 1: the names are equal. _ and - count as equal: other programs use both. */
static int g2zg_same_name(const char *theirs, size_t bytes, const char *name, size_t length) {
  size_t same = 0;
  while (same < length && same < bytes &&
         (theirs[same] == name[same] ||
          (same && strchr("_-", theirs[same]) && strchr("_-", name[same]))))
    same++;
  return same == length && same == bytes;
}

/* What to type in place of another program's flag; NULL: the flag is not known, or this program has
 * no flag for it. */
static const char *g2zg_flag_foreign(const g2z_flag *flags, int count, const char *name,
                                     size_t length) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789-";
  const char *ours = NULL;
  for (size_t i = 0; i < G2Z_COUNT(g2zg_foreign) && !ours; i++)
    for (const char *word = g2zg_foreign[i].theirs; *word; word += strspn(word, " ")) {
      const size_t bytes = strcspn(word, " ");
      if (g2zg_same_name(word, bytes, name, length)) ours = g2zg_foreign[i].ours;
      word += bytes;
    }
  if (!ours || (!strstr(ours, "--") && !g2zg_flag_find(flags, count, "train", 5))) return NULL;
  for (const char *at = ours; (at = strstr(at, "--")) != NULL; at += 2)
    if (!g2zg_flag_find(flags, count, at + 2, strspn(at + 2, letters))) return NULL;
  return ours;
}

/* Refuses an unknown flag, such as "-b" or "--n_layer=12", and names this program's flag if there
 * is one. */
static g2z_status g2zg_flag_unknown(g2z_services *services, const g2z_flag *flags, int count,
                                    char **argv, int first, const char *argument) {
  const size_t whole = strcspn(argument, "="), dashes = strspn(argument, "-");
  const char *name = argument + dashes, *ours = NULL;
  const int shown = whole < 80 ? (int)whole : 80;
  const size_t length = whole - dashes;
  char word[300];
  for (int i = 0; i < count; i++)
    if (flags[i].kind != G2Z_FLAG_GROUP &&
        g2zg_same_name(flags[i].name, strlen(flags[i].name), name, length))
      G2Z_REFUSE(services, "unexpected flag %.*s: type --%s %s", shown, argument, flags[i].name,
                 flags[i].value + (flags[i].kind == G2Z_FLAG_CHOICE));
  if (dashes == 1) ours = g2zg_flag_foreign(flags, count, argument, whole);
  if (!ours && length > 1) ours = g2zg_flag_foreign(flags, count, name, length);
  if (ours && strncmp(ours, "--", 2) == 0)
    G2Z_REFUSE(services, "unexpected flag %.*s: type %s", shown, argument, ours);
  if (ours) G2Z_REFUSE(services, "unexpected flag %.*s: %s", shown, argument, ours);
  const char *program = g2z_shell_word(argv[0], word, sizeof word);
  if (first > 1)
    G2Z_REFUSE(services, "unexpected flag %.*s: %s %s --help lists all flags", shown, argument,
               program, argv[1]);
  G2Z_REFUSE(services, "unexpected flag %.*s: %s --help lists all flags", shown, argument, program);
}

/* A bound or a default as a user would type it: "0.5", "1e+06". */
static void g2zg_number_text(double number, char text[32]) {
  if (number == floor(number) && fabs(number) < 1e15) snprintf(text, 32, "%.0f", number);
  else snprintf(text, 32, "%.6g", number);
}

G2Z_API const char *g2z_glob_weight(const char *glob) {
  const char *colon = strrchr(glob, ':');
  struct stat info;
  if (!colon || !colon[1] || colon[1 + strspn(colon + 1, "+-.,%0123456789eE")]) return NULL;
  if (stat(glob, &info) == 0) return NULL;
  return colon + 1;
}

static g2z_status g2zg_flag_set(g2z_services *services, const g2z_flag *flag, const char *text) {
  if (flag->kind == G2Z_FLAG_TEXT || flag->kind == G2Z_FLAG_GLOB) {
    const char **destination = (const char **)flag->destination;
    if (flag->kind == G2Z_FLAG_GLOB && *destination && strcmp(*destination, text) != 0)
      G2Z_REFUSE(services, "--%s is given twice, as %.200s and as %.200s, but takes one pattern: "
                 "put the files into one directory and type --%s 'DIR/NAME_*.bin', with quotes",
                 flag->name, *destination, text, flag->name);
    *destination = text;
    return G2Z_OK;
  }
  if (flag->kind == G2Z_FLAG_TEXTS || flag->kind == G2Z_FLAG_GLOBS) {
    g2z_texts *texts = (g2z_texts *)flag->destination;
    for (int i = 0; i < texts->count && flag->kind == G2Z_FLAG_GLOBS; i++) {
      if (strcmp(texts->text[i], text) != 0) continue;
      if (g2z_glob_weight(text))
        G2Z_REFUSE(services, "--%s %.300s is given twice, but would count once: remove one of "
                   "them, or give the files once, with a larger weight", flag->name, text);
      return G2Z_OK;
    }
    if (texts->count == G2Z_TEXTS)
      G2Z_REFUSE(services, "--%s takes at most %d values: remove %.300s", flag->name, G2Z_TEXTS,
                 text);
    texts->text[texts->count++] = text;
    return G2Z_OK;
  }
  if (flag->kind == G2Z_FLAG_CHOICE) {
    const int index = g2z_word_find(flag->value, text, strlen(text));
    if (index < 0)
      G2Z_REFUSE(services, "--%s %.80s: must be one of %s", flag->name, g2zg_shown(text),
                 flag->value + 1);
    memcpy(flag->destination, &index, sizeof index);
    return G2Z_OK;
  }
  /* Read a number. */
  int whole = flag->kind != G2Z_FLAG_FLOAT, negative = text[0] == '-', in_range = 1;
  char *end = NULL;
  int64_t integer = 0;
  uint64_t natural = 0;
  double number = 0;
  errno = 0;
  if (flag->kind == G2Z_FLAG_UINT64) {
    natural = strtoull(text, &end, 10);
    in_range = !negative; /* strtoull would turn -1 into a large number */
  } else if (whole) number = (double)(integer = strtoll(text, &end, 10));
  else number = strtod(text, &end);
  int space = text[0] == ' ' || (text[0] >= '\t' && text[0] <= '\r'); /* strtoll would skip it */
  if (end == text || *end || space) {
    /* Suggest the number that the text begins with, if any. Not for 4k, which may mean 4000. */
    const char *begin = text + strspn(text, " \t\n\v\f\r");
    char remedy[160] = "";
    number = strtod(begin, &end);
    const int known = end > begin && isfinite(number) && !(*end && strchr("kKmMgG", *end));
    if (known && whole) { /* the nearest number that is allowed */
      number = fmin(fmax(number, flag->minimum), 9e15);
      if (flag->kind != G2Z_FLAG_UINT64) number = fmin(number, flag->maximum);
      snprintf(remedy, sizeof remedy, "; write --%s %.0f", flag->name, number);
    } else if (known && number >= flag->minimum && number <= flag->maximum)
      snprintf(remedy, sizeof remedy, "; write --%s %.*s", flag->name, (int)(end - begin), begin);
    const char *wanted = whole ? "a whole number" : "a number";
    G2Z_REFUSE(services, "--%s %.80s: not %s%s", flag->name, g2zg_shown(text), wanted, remedy);
  }
  if (whole && errno == ERANGE) in_range = 0;
  if (flag->kind != G2Z_FLAG_UINT64) /* a NaN is out of range, too */
    in_range = in_range && number >= flag->minimum && number <= flag->maximum;
  if (!in_range) {
    char least[32], most[32];
    g2zg_number_text(flag->minimum, least);
    g2zg_number_text(flag->maximum, most);
    if (flag->kind == G2Z_FLAG_UINT64) {
      snprintf(least, sizeof least, "0");
      snprintf(most, sizeof most, "%" PRIu64, UINT64_MAX);
    }
    if (flag->kind == G2Z_FLAG_INT64 && flag->maximum >= 9e18)
      snprintf(most, sizeof most, "%" PRId64, INT64_MAX);
    G2Z_REFUSE(services, "--%s %.80s: must be from %s to %s", flag->name, text, least, most);
  }
  if (flag->kind == G2Z_FLAG_UINT64) *(uint64_t *)flag->destination = natural;
  else if (flag->kind == G2Z_FLAG_INT64) *(int64_t *)flag->destination = integer;
  else if (flag->kind == G2Z_FLAG_INT) *(int *)flag->destination = (int)integer;
  else *(float *)flag->destination = (float)number;
  return G2Z_OK;
}

G2Z_API g2z_status g2z_flags_parse(g2z_services *services, const g2z_flag *flags, int count,
                                   int argc, char **argv, int first, int *rest) {
  int kept = 0;
  for (int i = first; i < argc; i++) {
    static char help[] = "--help";
    if (strcmp(argv[i], "-h") == 0) argv[i] = help;
    char *argument = argv[i];
    if (argument[0] != '-' || !argument[1]) { /* "-" is standard input */
      if (!rest && strchr(argument, ':'))
        G2Z_REFUSE(services, "unexpected argument \"%.80s\": repeat the flag, as in --train "
                   "'A_*.bin:0.7' --train 'B_*.bin:0.3'", argument);
      if (!rest)
        G2Z_REFUSE(services, "unexpected argument \"%.80s\": put patterns and text with spaces in "
                   "quotes, as in --train 'data/NAME_*.bin'", argument);
      argv[first + kept++] = argument;
      continue;
    }
    const g2z_flag *flag = NULL;
    if (argument[1] == '-')
      flag = g2zg_flag_find(flags, count, argument + 2, strcspn(argument + 2, "="));
    if (!flag) return g2zg_flag_unknown(services, flags, count, argv, first, argument);
    const char *value = strchr(argument, '=');
    if (value) value++;
    if (flag->kind == G2Z_FLAG_SWITCH) {
      if (value) G2Z_REFUSE(services, "--%s takes no value: remove =%.80s", flag->name, value);
      *(int *)flag->destination = 1;
      continue;
    }
    if (!value && i + 1 < argc) {
      const char *next = argv[i + 1];
      const int is_flag = strncmp(next, "--", 2) == 0 &&
                          g2zg_flag_find(flags, count, next + 2, strcspn(next + 2, "="));
      if (!is_flag) value = argv[++i];
    }
    if (!value)
      G2Z_REFUSE(services, "--%s needs a value: --%s %s", flag->name, flag->name, flag->value +
                 (flag->kind == G2Z_FLAG_CHOICE));
    G2Z_TRY(g2zg_flag_set(services, flag, value));
    while (flag->kind == G2Z_FLAG_TEXTS && i + 1 < argc && argv[i + 1][0] != '-')
      G2Z_TRY(g2zg_flag_set(services, flag, argv[++i]));
  }
  if (rest) *rest = kept;
  return G2Z_OK;
}

/* Writes the default as text: the value of the destination; "" if that is out of range. */
static void g2zg_flag_default(const g2z_flag *flag, char text[64]) {
  text[0] = 0;
  double number = 0, minimum = flag->minimum, maximum = flag->maximum;
  switch (flag->kind) {
    case G2Z_FLAG_GROUP:
    case G2Z_FLAG_TEXTS:
    case G2Z_FLAG_GLOBS:
    case G2Z_FLAG_SWITCH: return;
    case G2Z_FLAG_GLOB:
    case G2Z_FLAG_TEXT: {
      const char *value = *(const char **)flag->destination;
      if (value && *value) snprintf(text, 64, "%s", value);
      return;
    }
    case G2Z_FLAG_CHOICE: {
      int index;
      size_t length;
      memcpy(&index, flag->destination, sizeof index); /* it may be an enum of unsigned type */
      const char *word = g2z_word(flag->value, index, &length);
      if (word) snprintf(text, 64, "%.*s", (int)length, word);
      return;
    }
    case G2Z_FLAG_UINT64:
      snprintf(text, 64, "%" PRIu64, *(uint64_t *)flag->destination);
      return;
    case G2Z_FLAG_INT:
      number = *(int *)flag->destination;
      break;
    case G2Z_FLAG_INT64:
      number = (double)*(int64_t *)flag->destination;
      break;
    case G2Z_FLAG_FLOAT: /* the float 0.99 is larger than the double 0.99 */
      number = *(float *)flag->destination;
      minimum = (float)minimum;
      maximum = (float)maximum;
      break;
  }
  if (!(number >= minimum && number <= maximum)) return;
  g2zg_number_text(number, text);
  if (flag->kind == G2Z_FLAG_INT64) /* not every int64 is a double */
    snprintf(text, 64, "%" PRId64, *(int64_t *)flag->destination);
  if (flag->kind == G2Z_FLAG_FLOAT && (float)strtod(text, NULL) != (float)number)
    snprintf(text, 64, "%.9g", number);
}

/* Writes a flag as one argument. Returns its length, as snprintf does; 0: the flag has no value. */
static int g2zg_flag_argument(const g2z_flag *flag, char *out, size_t room) {
  char text[64];
  const char *value = text;
  g2zg_flag_default(flag, text);
  if (flag->kind == G2Z_FLAG_SWITCH) {
    if (!*(int *)flag->destination) return 0;
    return snprintf(out, room, "--%s", flag->name);
  }
  if (flag->kind == G2Z_FLAG_TEXT || flag->kind == G2Z_FLAG_GLOB)
    value = *(const char **)flag->destination; /* may be long or "", unlike in `text` */
  else if (!text[0]) return 0;
  if (!value) return 0;
  return snprintf(out, room, "--%s=%s", flag->name, value);
}

G2Z_API g2z_status g2z_flags_arguments(g2z_services *services, const g2z_flag *flags, int count,
                                       const char *const *first, int first_count, char ***argv) {
  size_t places = (size_t)(first_count + count + 1), bytes = places * sizeof(char *);
  for (int i = 0; i < first_count; i++) bytes += strlen(first[i]) + 1;
  for (int i = 0; i < count; i++) bytes += (size_t)g2zg_flag_argument(&flags[i], NULL, 0) + 1;
  G2Z_TRY(g2z_allocate(services, bytes, 1, argv)); /* the pointers, then the texts */
  char **out = *argv, *to = (char *)(out + places), *end = (char *)out + bytes;
  for (int i = 0; i < first_count; i++) {
    *out++ = to;
    to += snprintf(to, (size_t)(end - to), "%s", first[i]) + 1;
  }
  for (int i = 0; i < count; i++) {
    const int length = g2zg_flag_argument(&flags[i], to, (size_t)(end - to));
    if (length == 0) continue;
    *out++ = to;
    to += length + 1;
  }
  *out = NULL;
  return G2Z_OK;
}

G2Z_API void g2z_flags_print(const g2z_flag *flags, int count,
                             void (*line)(void *user, const char *text), void *user) {
  for (int i = 0; i < count; i++) {
    const g2z_flag *flag = &flags[i];
    char name[96], value[64], help[512], text[640];
    if (flag->kind == G2Z_FLAG_GROUP) {
      if (i) line(user, "");
      line(user, flag->help);
      continue;
    }
    const char *placeholder = flag->value ? flag->value : "";
    snprintf(name, sizeof name, "--%s %s", flag->name,
             placeholder + (flag->kind == G2Z_FLAG_CHOICE));
    if (strlen(name) > 30) { /* too wide for its column: it gets its own line */
      snprintf(text, sizeof text, "  %s", name);
      line(user, text);
      name[0] = 0;
    }
    g2zg_flag_default(flag, value);
    snprintf(help, sizeof help, "%s", flag->help);
    if (value[0]) snprintf(help, sizeof help, "%s [%s]", flag->help, value);
    const char *at = help;
    do { /* a line; the first has the name, even without help */
      size_t length = strlen(at);
      if (length > 47) {
        for (length = 47; length > 0 && at[length] != ' ';) length--;
        if (length == 0) length = strcspn(at, " ");
        const char *bracket = (const char *)memchr(at + 1, '[', length - 1); /* stays in one line */
        if (bracket && bracket[-1] == ' ' && strlen(bracket) <= 47)
          length = (size_t)(bracket - 1 - at);
      }
      snprintf(text, sizeof text, "  %-30s %.*s", name, (int)length, at);
      line(user, text);
      at += length;
      at += strspn(at, " ");
      name[0] = 0;
    } while (*at);
  }
}

G2Z_API g2z_status g2z_flags_line(g2z_services *services, int argc, char *const *argv,
                                  char **line) {
  size_t bytes = 8;
  for (int i = 0; i < argc; i++) bytes += 4 * strlen(argv[i]) + 4; /* ' becomes '\'' */
  G2Z_TRY(G2Z_NEW(services, bytes, line));
  char *to = *line, *end = to + bytes;
  for (int i = 0; i < argc; i++) {
    if (i) *to++ = ' ';
    to += strlen(g2z_shell_word(argv[i], to, (size_t)(end - to)));
  }
  return G2Z_OK;
}

/* ===== ranks of this host ================================================
 * In:  a program and a number of ranks. Out: their common exit code.
 * Law: no rank outlives this process, and the log names the rank whose failure came first. */

static const int g2zg_spawn_signals[] = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};

#define G2ZG_SPAWN_RANKS 4096
#define G2ZG_SPAWN_VARIABLES 10
typedef struct g2zg_spawn {       /* a job, as its parent sees it */
  g2z_services *services;
  const g2z_job *job;
  int output;                     /* descriptor; -1: this process's output */
  char texts[G2ZG_SPAWN_VARIABLES][192]; /* the variables that a launcher sets */
  char **environment;             /* `texts`, then this process's variables */
  sigset_t signals, before;       /* signals to wait for; the signal mask of the ranks */
  pid_t *processes;               /* [ranks]; 0: not started, or ended */
  double failed;                  /* g2z_seconds() when the first rank failed; 0: none failed */
  int haste;                      /* 1: the other ranks were sent SIGTERM; 2: SIGKILL */
  char news[160];                 /* sentence about a failed rank that is not logged yet; or "" */
  g2z_job_end *end;
} g2zg_spawn;

/* Makes the environment of the ranks. The secret is random unless the user set G2Z_SECRET. */
static g2z_status g2zg_spawn_environment(g2zg_spawn *spawn) {
  extern char **environ;
  char secret[128] = "", id[64];
  const char *set = getenv("G2Z_SECRET");
  uint8_t random[16];
  size_t count = 0, kept = 0, room = sizeof *spawn->texts;
  struct timespec now;
  if (getentropy(random, sizeof random) != 0)
    return g2z_fail(spawn->services, G2Z_IO, "cannot get random numbers: %s", strerror(errno));
  for (int i = 0; i < 16; i++) snprintf(secret + 2 * i, 3, "%02x", random[i]);
  if (set && *set) snprintf(secret, sizeof secret, "%s", set);
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(id, sizeof id, "ranks %d %lld.%09ld", (int)getpid(), (long long)now.tv_sec, now.tv_nsec);
  snprintf(spawn->texts[0], room, "RANK=");       /* g2zg_spawn_one sets these two for each rank */
  snprintf(spawn->texts[1], room, "LOCAL_RANK=");
  snprintf(spawn->texts[2], room, "WORLD_SIZE=%d", spawn->job->ranks);
  snprintf(spawn->texts[3], room, "LOCAL_WORLD_SIZE=%d", spawn->job->ranks);
  snprintf(spawn->texts[4], room, "MASTER_ADDR=127.0.0.1");
  snprintf(spawn->texts[5], room, "MASTER_PORT=%d", 20000 + (random[0] << 8 | random[1]) % 9900);
  snprintf(spawn->texts[6], room, "G2Z_RUN_ID=%s", id);
  snprintf(spawn->texts[7], room, "G2Z_SECRET=%s", secret);
  snprintf(spawn->texts[8], room, "G2Z_RANKS_PARENT=%d", (int)getpid());
  /* Each rank would bind its threads to the same cores, the first ones. */
  snprintf(spawn->texts[9], room, "OMP_PROC_BIND=false");
  while (environ[count]) count++;
  G2Z_TRY(G2Z_NEW(spawn->services, count + G2ZG_SPAWN_VARIABLES + 1, &spawn->environment));
  for (int k = 0; k < G2ZG_SPAWN_VARIABLES; k++) spawn->environment[kept++] = spawn->texts[k];
  for (size_t i = 0; i < count; i++) {
    int drop = 0;
    for (int k = 0; k < G2ZG_SPAWN_VARIABLES; k++)
      drop |= strncmp(environ[i], spawn->texts[k], strcspn(spawn->texts[k], "=") + 1) == 0;
    if (!drop) spawn->environment[kept++] = environ[i];
  }
  return G2Z_OK;
}

/* Starts one rank in a new process group. In the parent's group, a signal from a terminal or from
 * `timeout` would reach the rank twice, and a second signal ends it at once. A successful exec
 * closes the pipe; if exec fails, the pipe carries errno. */
static g2z_status g2zg_spawn_one(g2zg_spawn *spawn, int rank) {
  extern char **environ;
  int ends[2], error = 0;
  ssize_t got = 0;
  snprintf(spawn->texts[0], sizeof *spawn->texts, "RANK=%d", rank);
  snprintf(spawn->texts[1], sizeof *spawn->texts, "LOCAL_RANK=%d", rank);
  if (pipe(ends) != 0)
    return g2z_fail(spawn->services, G2Z_NO_MEMORY, "rank %d cannot be started: %s", rank,
                    strerror(errno));
  for (int i = 0; i < 2; i++) fcntl(ends[i], F_SETFD, FD_CLOEXEC);
  pid_t parent = getpid(), child = fork();
  if (child == 0) { /* before exec, only calls that are allowed in a signal handler */
#if defined(__linux__)
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* the rank dies with its parent */
#endif
    setpgid(0, 0);
    /* A signal that arrives before exec must not run a handler of this program. Ignored signals
     * stay ignored: exec does not change them. */
    for (size_t i = 0; i < G2Z_COUNT(g2zg_spawn_signals); i++) {
      struct sigaction action;
      if (sigaction(g2zg_spawn_signals[i], NULL, &action) != 0 || action.sa_handler == SIG_IGN)
        continue;
      action.sa_handler = SIG_DFL;
      sigaction(g2zg_spawn_signals[i], &action, NULL);
    }
    signal(SIGTTOU, SIG_IGN); /* with `stty tostop`, its first line would stop the rank */
    sigprocmask(SIG_SETMASK, &spawn->before, NULL);
    int output = spawn->output;
    int printing = output < 0 || (dup2(output, STDOUT_FILENO) >= 0 &&
                                  dup2(output, STDERR_FILENO) >= 0);
    if (printing && getppid() == parent) {
      environ = spawn->environment;
      execv("/proc/self/exe", spawn->job->argv);
      execvp(spawn->job->argv[0], spawn->job->argv); /* without /proc: find the program by name */
    }
    error = errno;
    g2z_write_bytes(ends[1], &error, sizeof error);
    _exit(127);
  }
  if (child < 0) error = errno;
  close(ends[1]);
  G2Z_RETRY(got, read(ends[0], &error, sizeof error));
  close(ends[0]);
  if (child > 0 && got <= 0) {
    spawn->processes[rank] = child;
    return G2Z_OK;
  }
  g2z_status why = G2Z_NO_MEMORY; /* fork failed */
  if (child > 0) {                /* exec failed */
    waitpid(child, NULL, 0);
    why = G2Z_IO;
  }
  return g2z_fail(spawn->services, why, "rank %d cannot be started: %s: %s", rank,
                  spawn->job->argv[0], strerror(error));
}

static void g2zg_spawn_signal(const g2zg_spawn *spawn, int signal) {
  for (int r = 0; r < spawn->job->ranks; r++)
    if (spawn->processes[r] > 0) kill(spawn->processes[r], signal);
}

/* The weight of a rank's exit code: the first code with the largest weight is the job's. */
static int g2zg_spawn_weight(int code) {
  if (code == 0) return 0;
  if (code == G2Z_EXIT_STOPPED) return 1;
  if (code == G2Z_EXIT_LOST) return 2;
  return 3;
}

/* Starts all ranks and waits until all have ended. Calls job->watch at least once, even if the
 * ranks end at once. */
static g2z_status g2zg_spawn_all(g2zg_spawn *spawn) {
  const struct timespec pause = {0, 100000000};
  const g2z_job *job = spawn->job;
  g2z_job_end *end = spawn->end;
  int running;
  sigemptyset(&spawn->signals);
  for (size_t i = 0; i < G2Z_COUNT(g2zg_spawn_signals); i++)
    sigaddset(&spawn->signals, g2zg_spawn_signals[i]);
  sigprocmask(SIG_BLOCK, &spawn->signals, &spawn->before);
  struct sigaction ordinary, child;
  memset(&ordinary, 0, sizeof ordinary);
  ordinary.sa_handler = SIG_DFL; /* sigtimedwait() does not see ignored signals */
  sigaction(SIGCHLD, &ordinary, &child);
  g2z_status status = G2Z_OK;
  for (int r = 0; r < job->ranks && status == G2Z_OK; r++)
    status = g2zg_spawn_one(spawn, r);
  if (status != G2Z_OK) g2zg_spawn_signal(spawn, SIGKILL);
  do {
    if (job->watch) job->watch(job->user);
    /* Wait up to a tenth of a second for the next signal; 0 or less: none arrived. */
    int number = 0;
#if defined(__APPLE__) /* no sigtimedwait */
    sigset_t pending;
    nanosleep(&pause, NULL);
    sigpending(&pending);
    for (size_t i = 0; i < G2Z_COUNT(g2zg_spawn_signals) && !number; i++)
      if (sigismember(&pending, g2zg_spawn_signals[i]) == 1) sigwait(&spawn->signals, &number);
#else
    number = sigtimedwait(&spawn->signals, NULL, &pause);
#endif
    if (number > 0 && number != SIGCHLD) {
      end->signal = number;
      g2zg_spawn_signal(spawn, number);
    }
    running = 0;
    for (int r = 0; r < job->ranks; r++) {
      const pid_t process = spawn->processes[r];
      int ended;
      struct rusage used;
      if (process <= 0) continue;
      if (wait4(process, &ended, WNOHANG, &used) != process) {
        running++;
        continue;
      }
      /* This rank has ended. Report the first failure. */
      spawn->processes[r] = 0;
      end->cpu_s += (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                    1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
      const size_t resident = (size_t)used.ru_maxrss * 1024; /* on Linux it is in KiB */
      if (resident > end->rank_bytes) end->rank_bytes = resident;
      int code = WEXITSTATUS(ended), killed = 0; /* killed: the signal that killed it */
      if (!WIFEXITED(ended)) {
        killed = WTERMSIG(ended);
        code = 128 + killed;
        if (spawn->haste) code = G2Z_EXIT_LOST; /* killed by this process */
      }
      if (g2zg_spawn_weight(code) <= g2zg_spawn_weight(end->exit_code)) continue;
      end->exit_code = code;
      if (g2zg_spawn_weight(code) < 3 || job->output || spawn->news[0]) continue;
      if (killed)
        snprintf(spawn->news, sizeof spawn->news, "rank %d (process %d) was killed by signal %d "
                 "(%s)", r, (int)process, killed, strsignal(killed));
      else
        snprintf(spawn->news, sizeof spawn->news, "rank %d (process %d) ended with exit code %d",
                 r, (int)process, code);
    }
    /* Log the failure. Wait while standard output is blocked, for example after Ctrl-S: this
     * process must continue to watch its ranks and to pass on signals. */
    struct pollfd console = {STDOUT_FILENO, POLLOUT, 0};
    if (spawn->news[0] && poll(&console, 1, 0) != 0) {
      g2z_log(spawn->services, G2Z_LOG_WARNING, "%s", spawn->news);
      spawn->news[0] = 0;
    }
    const double now = g2z_seconds();
    if (spawn->failed == 0 && g2zg_spawn_weight(end->exit_code) > 1) {
      spawn->failed = now;
      g2zg_spawn_signal(spawn, SIGCONT); /* a rank that is stopped must be able to end */
    }
    if (spawn->failed > 0 && now > spawn->failed + 13 && spawn->haste < 2) {
      g2zg_spawn_signal(spawn, SIGKILL);
      spawn->haste = 2;
    } else if (spawn->failed > 0 && now > spawn->failed + 2 && spawn->haste < 1) {
      g2zg_spawn_signal(spawn, SIGTERM);
      spawn->haste = 1;
    }
  } while (running > 0);
  sigaction(SIGCHLD, &child, NULL);
  sigprocmask(SIG_SETMASK, &spawn->before, NULL);
  return status;
}

/* Refuses to start ranks if this process is a rank that another launcher started. *inside 1: it is
 * a rank that this program started. */
static g2z_status g2zg_spawn_check(g2z_services *services, int ranks, int *inside) {
  g2z_place place;
  *inside = 0;
  if (ranks < 1 || ranks > G2ZG_SPAWN_RANKS)
    G2Z_REFUSE(services, "%d ranks: give 1 to %d", ranks, G2ZG_SPAWN_RANKS);
  if (g2z_place_find(services, &place) != G2Z_OK) return G2Z_OK;
  *inside = strcmp(place.launcher, "ranks") == 0;
  if (place.world <= 1 || *inside) return G2Z_OK;
  G2Z_REFUSE(services, "this process is rank %d of %d, started by %s, and cannot start %d ranks: "
             "remove --ranks or --gpus", place.rank, place.world, place.launcher, ranks);
}

G2Z_API g2z_status g2z_ranks_run(g2z_services *services, const g2z_job *job, g2z_job_end *out) {
  g2zg_spawn spawn;
  int inside;
  memset(&spawn, 0, sizeof spawn);
  memset(out, 0, sizeof *out);
  spawn.services = services;
  spawn.job = job;
  spawn.end = out;
  spawn.output = -1;
  G2Z_TRY(g2zg_spawn_check(services, job->ranks, &inside));
  if (job->output) {
    G2Z_RETRY(spawn.output, open(job->output, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (spawn.output < 0) return g2z_fail_file(services, errno, "open", job->output);
  }
  g2z_status status = G2Z_NEW(services, (size_t)job->ranks, &spawn.processes);
  if (status == G2Z_OK) status = g2zg_spawn_environment(&spawn);
  if (status == G2Z_OK) status = g2zg_spawn_all(&spawn);
  g2z_release(services, spawn.environment);
  g2z_release(services, spawn.processes);
  if (spawn.output >= 0) close(spawn.output);
  return status;
}

G2Z_API g2z_status g2z_ranks_spawn(g2z_services *services, int ranks, char **argv, int *is_parent,
                                   int *exit_code) {
  g2z_job job;
  g2z_job_end end;
  int inside;
  *is_parent = *exit_code = 0;
  G2Z_TRY(g2zg_spawn_check(services, ranks, &inside));
  if (inside || ranks == 1) return G2Z_OK;
  *is_parent = 1;
  memset(&job, 0, sizeof job);
  job.ranks = ranks;
  job.argv = argv;
  g2z_status status = g2z_ranks_run(services, &job, &end);
  *exit_code = end.exit_code;
  return status;
}

/* ===== text for terminals and shells ===================================== */

G2Z_API g2z_shown g2z_utf8_show(const unsigned char *at, const unsigned char *end) {
  const size_t length = g2z_utf8_length(at, end);
  const int control = *at == 0x7f || (*at < 0x20 && *at != '\n' && *at != '\t') ||
                      (length == 2 && *at == 0xc2 && at[1] < 0xa0); /* U+0080 to U+009F */
  g2z_shown shown = {(const char *)at, length, length};
  if (!length || control) {
    shown.text = "\xef\xbf\xbd";
    shown.bytes = 3;
  }
  if (!length) shown.used = 1;
  return shown;
}

G2Z_API const char *g2z_shell_word(const char *text, char *word, size_t room) {
  static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
                              "_-+=:,./@%";
  const unsigned char *at = (const unsigned char *)text, *end = at + strlen(text);
  const char *quote = "'";
  int odd = 0;
  if (*text && !text[strspn(text, plain)]) quote = "";
  while (at < end) {
    const g2z_shown shown = g2z_utf8_show(at, end);
    odd |= shown.text != (const char *)at || *at == '\n' || *at == '\t';
    at += shown.used;
  }
  size_t used = (size_t)snprintf(word, room, "%s%s", odd ? "$" : "", quote);
  for (at = (const unsigned char *)text; at < end && used + 6 < room; at++) {
    const int special = *at == '\'' || *at == '\\', control = *at < ' ' || *at >= 0x7f;
    if (odd && (special || control)) used += (size_t)snprintf(word + used, 6, "\\%03o", *at);
    else if (*at == '\'') used += (size_t)snprintf(word + used, 6, "'\\''");
    else word[used++] = (char)*at;
  }
  snprintf(word + used, room - used, "%s", quote);
  if (at < end || used + 2 > room) snprintf(word, room, "...");
  return word;
}

G2Z_API const char *g2z_json_word(const char *text, char *word) {
  const unsigned char *at = (const unsigned char *)text, *end = at + strlen(text);
  char *to = word;
  *to++ = '"';
  while (at < end) {
    const g2z_shown shown = g2z_utf8_show(at, end);
    if (strchr("\n\t\"\\", *at)) *to++ = '\\';
    if (*at == '\n') *to++ = 'n';
    else if (*at == '\t') *to++ = 't';
    else {
      memcpy(to, shown.text, shown.bytes);
      to += shown.bytes;
    }
    at += shown.used;
  }
  memcpy(to, "\"", 2);
  return word;
}

/* ===== the start of main =================================================
 * In: the process as it was started. Out: usable standard files, stack and OpenMP threads. */

#define G2ZG_STACK 131072 /* bytes. main and the threads were measured to use at most 80,000 */

/* With OMP_PROC_BIND, OpenMP binds the first thread to its first place before main. The threads and
 * the programs that this thread starts would inherit this one core. So the thread gets the cores of
 * all places back; OpenMP's other threads stay bound. If the system refuses, one core remains. */
static g2z_status g2zg_unbind(g2z_services *services) {
#if defined(__linux__) && defined(_OPENMP)
  enum { CORES = 8192, WORD = 8 * sizeof(unsigned long) };
  unsigned long mask[CORES / WORD] = {0};
  const int places = omp_get_num_places(); /* 0: not bound */
  for (int place = 0; place < places; place++) {
    const int count = omp_get_place_num_procs(place);
    int *cores;
    G2Z_TRY(G2Z_NEW(services, (size_t)count, &cores));
    omp_get_place_proc_ids(place, cores);
    for (int i = 0; i < count; i++)
      if (cores[i] < CORES) mask[cores[i] / WORD] |= 1ul << cores[i] % WORD;
    g2z_release(services, cores);
  }
  if (places > 0) syscall(SYS_sched_setaffinity, 0, sizeof mask, mask);
#else
  (void)services;
#endif
  return G2Z_OK;
}

G2Z_API g2z_status g2z_begin_program(g2z_services *services, char **argv) {
  int open_files = 1, again = 0;
  struct rlimit stack;
  G2Z_TRY(g2zg_unbind(services));
  for (int file = STDIN_FILENO; file <= STDERR_FILENO && open_files; file++)
    if (fcntl(file, F_GETFD) < 0) open_files = open("/dev/null", O_RDWR) >= 0; /* the lowest */
  signal(SIGXFSZ, SIG_IGN);
  if (getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur < G2ZG_STACK) {
    const long kib = (long)(stack.rlim_cur / 1024);
    stack.rlim_cur = 8u << 20;
    if (stack.rlim_max < stack.rlim_cur) stack.rlim_cur = stack.rlim_max;
    again = setrlimit(RLIMIT_STACK, &stack) == 0; /* threads inherit the initial limit */
    if (!again || stack.rlim_cur < G2ZG_STACK)
      return g2z_fail(services, G2Z_NO_MEMORY, "the stack is limited to %ld KiB, but %d are "
                      "needed: type ulimit -s 8192, in a new shell if that is refused", kib,
                      G2ZG_STACK / 1024);
  }
#ifdef _OPENMP /* OpenMP reads the variable before main: the program must start again */
  again |= !getenv("OMP_WAIT_POLICY") && setenv("OMP_WAIT_POLICY", "passive", 1) == 0;
#endif
  if (again) execv("/proc/self/exe", argv);
#if defined(__linux__) /* started again as /proc/self/exe, the program has the name "exe" */
  const char *name = argv[0];
  if (name && strrchr(name, '/')) name = strrchr(name, '/') + 1;
  if (name) prctl(PR_SET_NAME, name); /* top and pgrep show it */
#endif
  return G2Z_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* G2Z_PROGRAM_IMPLEMENTED */
