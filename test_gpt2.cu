/* gpt2_zero tests: the table of all tests, and main. The tests are in tests/, one header per room.
 * `./test_gpt2 --list` prints the table, `./test_gpt2 NAME...` runs the named tests. Many tests
 * mostly wait, so several processes share the table: one per core, G2Z_TEST_WORKERS of them if that
 * is set, and one alone on GPUs. A run ends with the line "N passed, N failed, N skipped". */

#ifndef G2Z_TEST_NO_IMPLEMENTATION
#define GPT2_ZERO_IMPLEMENTATION
#endif
#include "gpt2_zero.h"
#include "extras/g2z_command.h"
#include "extras/g2z_experiment.h"
#include "extras/g2z_report.h"
#include "extras/g2z_run.h"
#include "extras/g2z_text.h"
#include "extras/g2z_eval.h"

#ifndef G2Z_FUZZ

/* Tests name the operands of ops, as the library does with G2Z__RUN. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wmissing-field-initializers"
#if defined(__cplusplus)
#pragma clang diagnostic ignored "-Wc++20-designator"
#endif
#elif defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#if defined(__cplusplus) && __GNUC__ < 12
#pragma GCC diagnostic ignored "-Wpedantic"
#elif defined(__cplusplus)
#pragma GCC diagnostic ignored "-Wc++20-extensions"
#endif
#endif

#include "tests/mutants.h"
#include "tests/harness.h"
#include "tests/base.h"
#include "tests/layout.h"
#include "tests/text.h"
#include "tests/loader.h"
#include "tests/ops.h"
#include "tests/cuda.h"
#include "tests/weights.h"
#include "tests/inputs.h"
#include "tests/model.h"
#include "tests/inuse.h"
#include "tests/eval.h"
#include "tests/trainer.h"
#include "tests/checkpoint.h"
#include "tests/run.h"
#include "tests/muon.h"
#include "tests/ranks.h"
#include "tests/report.h"
#include "tests/bench.h"

/* ----- rank programs ----------------------------------------------------- */

/* Programs that train take a number of arguments, check like a test, and fail as it does. */
static const struct {
  const char *name;
  int (*run)(int argc, char **argv);
  void (*check)(g2z_test *t, char **argv);
  int arguments;
} rank_programs[] = {
    {"calls", rank_calls, NULL, 0},
    {"stream", rank_stream, NULL, 0},
    {"mismatch", rank_mismatch, NULL, 0},
    {"loop", rank_loop, NULL, 0},
    {"spawn", rank_spawn, NULL, 0},
    {"trap", rank_trap, NULL, 0},
    {"resume", NULL, rank_resume, 4},
    {"zero", NULL, rank_zero, 5},
    {"turns", NULL, rank_turns, 1},
    {"kinds", NULL, rank_kinds, 1},
    {"short", NULL, rank_short, 3},
    {"trouble", NULL, rank_trouble, 4},
    {"masked", NULL, rank_masked, 4},
    {"muon", NULL, rank_muon, 1},
    {"graphs", NULL, rank_graphs, 2},
    {"slow", NULL, rank_slow, 0},
    {"lost", rank_lost, NULL, 0},
};

static int rank_checks(void (*check)(g2z_test *t, char **argv), char **argv) {
  static g2z_test t;
  if (setjmp(t.stopped) == 0) check(&t, argv);
  test_end(&t, 0);
  free(t.owned);
  return t.failures != 0;
}

static int rank_program(int argc, char **argv) {
  for (size_t i = 0; i < sizeof rank_programs / sizeof *rank_programs; i++) {
    if (argc < 1 || strcmp(argv[0], rank_programs[i].name) != 0) continue;
    if (rank_programs[i].run) return rank_programs[i].run(argc - 1, argv + 1);
    if (argc - 1 != rank_programs[i].arguments) return 2;
    return rank_checks(rank_programs[i].check, argv + 1);
  }
  fprintf(stderr, "no rank program is called \"%s\"\n", argc > 0 ? argv[0] : "");
  return 99;
}

/* ----- the table --------------------------------------------------------- */

typedef struct g2z_test_entry {
  const char *name, *about;
  void (*run)(g2z_test *t);
} g2z_test_entry;

static const g2z_test_entry test_table[] = {
    {"files_writer", "a file appears whole or not at all", test_files_writer},
    {"files_refused", "reading what cannot be read is a sentence", test_files_refused},
    {"files_special", "FIFOs and links in place of files", test_files_special},
    {"files_pipe", "streams are read to their end", test_files_pipe},
    {"files_locked", "a file is written by one program at a time", test_files_locked},
    {"files_full_disk", "a full disk leaves no file", test_files_full_disk},
    {"files_unwritable", "a directory without permission is refused", test_files_unwritable},
    {"files_no_memory", "files survive every failing allocation", test_files_no_memory},
    {"json_grammar", "RFC 8259, and nothing beyond it", test_json_grammar},
    {"json_sentences", "errors name label, line and column", test_json_sentences},
    {"json_numbers", "integers and reals at their limits", test_json_numbers},
    {"json_strings", "escapes, surrogates, invalid ones", test_json_strings},
    {"utf8_show", "characters as a terminal can take them", test_utf8_show},
    {"json_writer", "what is written reads back", test_json_writer},
    {"config_checks", "each bad value is refused by name", test_config_checks},
    {"config_pairs", "values that do not fit each other are refused", test_config_pairs},
    {"schedules", "cosine, linear, constant, wsd and power at their corners", test_schedules},
    {"philox", "random numbers equal the published vectors", test_philox},
    {"plan_models", "parameter counts of the published models", test_plan_of_published_models},
    {"plan_tiles", "buckets, slices, shards and updates tile every world", test_plan_tiles},
    {"plan_last_buckets", "what completes last is cut small", test_plan_last_buckets},
    {"plan_head", "tokens whose logits exist at one time", test_plan_head},
    {"plan_wte_gradient", "when the head's part of wte is rounded at once", test_plan_wte_gradient},
    {"muon_homes", "each matrix has one home, and routes lead there", test_muon_homes},
    {"plan_hosts", "what carries between hosts is planned", test_plan_hosts},
    {"plan_graphs", "which steps are recorded as graphs", test_plan_graphs},
    {"plan_bytes", "bytes per rank of large models in every stage", test_plan_bytes},
    {"plan_recompute", "activations that are kept, and that are made again", test_plan_recompute},
    {"plan_batch", "the largest batch that fits is the largest", test_plan_largest_batch},
    {"tokenizer_pieces", "GPT-2's pattern at its corners", test_tokenizer_pieces},
    {"tokenizer_bytes", "every byte goes round; invalid UTF-8", test_tokenizer_bytes},
    {"bpe_training", "merges equal Hugging Face's, learnt at once and in parts", test_bpe_training},
    {"tokenizer_formats", "merge lists and JSON, one tokenizer", test_tokenizer_formats},
    {"tokenizer_refusals", "damaged vocabularies are refused", test_tokenizer_refusals},
    {"tokenizer_cut", "a text cut at a safe place encodes alike", test_tokenizer_cut},
    {"tokenizer_long_pieces", "a million spaces, a million letters", test_tokenizer_long_pieces},
    {"tokenizer_scan", "the scan finds the pattern's pieces", test_tokenizer_scan},
    {"text_white", "what Python's str.strip removes", test_text_white},
    {"tokenizer_part", "a text in bits encodes and teaches alike", test_tokenizer_part},
    {"tokenizer_allocations", "survives every failing allocation", test_tokenizer_allocations},
    {"tokenizer_again", "calls that failed are repeated", test_tokenizer_again},
    {"tokenizer_gpt2", "GPT-2's published vectors (needs make vocab)", test_tokenizer_gpt2},
    {"prepare_conventions", "shards as llm.c and nanoGPT lay them out", test_prepare_conventions},
    {"prepare_flags", "the flags of a training on the shards", test_prepare_flags},
    {"prepare_threads", "any number of threads, the same bytes", test_prepare_threads},
    {"prepare_jsonl", "JSON lines as Python writes them; damaged text", test_prepare_jsonl},
    {"prepare_packed", "gzip and zstd, whole and damaged", test_prepare_packed},
    {"prepare_open", "text without a place to cut", test_prepare_open},
    {"prepare_memory", "bounded, also to learn from text without a cut", test_prepare_memory},
    {"prepare_markers", "a job may end inside of a marker", test_prepare_markers},
    {"prepare_refusals", "bad input: a sentence, exit code 1, no file", test_prepare_refusals},
    {"prepare_replaces", "a set of shards is replaced whole, or refused", test_prepare_replaces},
    {"prepare_filters", "--encode and --decode go round", test_prepare_filters},
    {"shuffle", "a permutation of any size, another each epoch", test_shuffle},
    {"shard_writer", "both formats, byte by byte", test_shard_writer},
    {"loader_ranks", "ranks share out each batch, none twice", test_loader_ranks},
    {"loader_seek", "a seek equals reading on", test_loader_seek},
    {"loader_mixture", "sets by weight: order, shares, passes", test_loader_mixture},
    {"mixture_refused", "bad weights are refused with a sentence", test_mixture_refused},
    {"loader_refused", "bad shards are refused with a sentence", test_loader_refused},
    {"loader_damage", "a file that shrinks while it is read", test_loader_damage},
    {"loader_data", "which data count as the same", test_loader_data},
    {"loader_many_shards", "many shards, never read across", test_loader_many_shards},
    {"loader_replaced", "other data in the middle of a run", test_loader_replaced},
    {"loader_no_memory", "the loader survives every failing allocation", test_loader_no_memory},
    {"mask_writer", "masks byte by byte, and where there is none", test_mask_writer},
    {"loader_masks", "targets that do not count, on all ranks", test_loader_masks},
    {"masks_refused", "masks that do not fit their shard", test_masks_refused},
    {"masks_damage", "masks that are cut or go while they are read", test_masks_damage},
    {"prepare_masks", "prompts and completions, from JSON lines to targets", test_prepare_masks},
    {"ops_round", "fp16 and bf16, to the nearest even", test_ops_round},
    {"ops_8_bits", "the same of e4m3 and e5m2, and scales", test_ops_8_bits},
    {"cgroup_memory", "the memory that control groups leave", test_cgroup_memory},
    {"ops_peaks", "rates by the data sheet, for names that are known", test_ops_peaks},
    {"ops_device", "what a device refuses", test_ops_device},
    {"ops_forgotten", "each operand that a call must not leave out is asserted", test_ops_forgotten},
    {"device_missing", "why no GPU is used, and what asked for one", test_device_missing},
    {"ops_linear", "products and their epilogues", test_ops_linear},
    {"ops_layernorm", "LayerNorm, forward and backward", test_ops_layernorm},
    {"ops_attention", "causal attention, forward and backward", test_ops_attention},
    {"ops_attention_range", "scores far apart do not overflow", test_ops_attention_range},
    {"ops_embedding", "embedding, forward and backward", test_ops_embedding},
    {"ops_head", "LM head and cross-entropy in chunks", test_ops_head},
    {"ops_decide", "the verdict that ends a step", test_ops_decide},
    {"ops_adamw", "AdamW equals PyTorch's arithmetic", test_ops_adamw},
    {"ops_moments", "bf16 moments are right on average", test_ops_moments},
    {"ops_muon", "Muon equals a reference in double, and NumPy", test_ops_muon},
    {"ops_spikes", "gradient norms far above their mean", test_ops_spikes},
    {"ops_orthogonalize", "singular values of what Muon adds", test_ops_orthogonalize},
    {"ops_sums_and_casts", "norms and casts", test_ops_sums_and_casts},
    {"ops_threads", "any number of threads on small stacks, the same bits", test_ops_threads},
    {"cuda_device", "memory, order and errors of a GPU", test_cuda_device},
    {"cuda_embed", "embedding, with tokens in long runs", test_cuda_embed},
    {"cuda_layernorm", "LayerNorm at all row widths", test_cuda_layernorm},
    {"cuda_linear", "products with bias, GELU, residual, dropout, in 16 bits", test_cuda_linear},
    {"cuda_linear_wide", "the same in 32 bits", test_cuda_linear_wide},
    {"cuda_products", "our own products, whatever the timing", test_cuda_products},
    {"cuda_gelu", "GELU and its slope of every number in fp16", test_cuda_gelu},
    {"cuda_tuning", "a tuning table is written, read and refused", test_cuda_tuning},
    {"products_refused", "what to do if cuBLASLt has no product", test_products_refused},
    {"products_slices", "slices of 8-bit products fit their memory", test_products_slices},
    {"cuda_scratch", "scratch takes one block, and one per graph", test_cuda_scratch},
    {"cuda_trap", "a kernel's fault in a timing trial is that product's", test_cuda_trap},
    {"cuda_head", "LM head and cross-entropy in 16 bits", test_cuda_head},
    {"cuda_head_wide", "the same in 32 bits", test_cuda_head_wide},
    {"cuda_forgotten", "a GPU's ops assert their operands, too", test_cuda_forgotten},
    {"cuda_cast", "casts round as the CPU's, to the bit", test_cuda_cast},
    {"cuda_sums", "gradients of several ranks are added up, to the bit", test_cuda_sums},
    {"cuda_optimizer", "norm, verdict and AdamW", test_cuda_optimizer},
    {"cuda_muon", "momentum, Newton-Schulz and the update of Muon", test_cuda_muon},
    {"cuda_spikes", "a skipped step changes no bit on a GPU", test_cuda_spikes},
    {"cuda_early", "kernels that start early change no bit", test_cuda_early},
    {"cuda_attention", "attention in 16 bits, at odd lengths and all head sizes", test_cuda_attention},
    {"cuda_attention_wide", "the same in 32 bits", test_cuda_attention_wide},
    {"cuda_attention_repeats", "attention twice, to the bit", test_cuda_attention_repeats},
    {"safetensors_types", "each type is read as it should be", test_safetensors_types},
    {"safetensors_refused", "wrong offsets, shapes, types and lengths", test_safetensors_refused},
    {"weights_round_trip", "weights go out and come back, bit for bit", test_weights_round_trip},
    {"weights_variants", "names without a prefix, masks, tied heads", test_weights_variants},
    {"weights_configs", "what is no GPT-2 is refused", test_weights_configs},
    {"weights_split", "weights in several files", test_weights_split},
    {"vocab_hash", "shards name their vocabulary", test_vocab_hash},
    {"inputs", "what is handed in by mistake: exit code and sentence", test_inputs_rows},
    {"run_artifacts", "a run directory, field by field", test_run_artifacts},
    {"run_length", "steps, epochs and limits", test_run_length},
    {"run_targets", "steps in which no token counts", test_run_targets},
    {"run_padded_vocab", "what is saved names the token that ends a text", test_run_padded_vocab},
    {"run_refusals", "a run that cannot work does not start", test_run_refusals},
    {"run_full_disk", "a full disk ends a run, an unwritable page does not", test_run_full_disk},
    {"run_damaged", "steps before a damaged batch are reported", test_run_damaged},
    {"run_diverges", "the last skipped step is reported", test_run_diverges},
    {"run_mean", "the mean of the last losses decides whether a run diverged", test_run_mean},
    {"run_keeps_good", "a run that gets worse prunes nothing good", test_run_keeps_good},
    {"run_allocations", "a run survives every failing allocation", test_run_allocations},
    {"flags", "the command-line parser", test_flags},
    {"flags_foreign", "other programs' flags, and ours for them", test_flags_foreign},
    {"flags_arguments", "a table of flags as arguments, and back", test_flags_arguments},
    {"train_help", "--help lists each flag", test_train_help},
    {"train_refusals", "bad flags: a sentence and exit code 1", test_train_refusals},
    {"train_device", "--device cuda without one", test_train_device},
    {"train_run", "the program, from shard to weights", test_train_run},
    {"train_clamped", "numbers that 8 bits clamp are said once", test_train_clamped},
    {"train_console", "steps share one line of a terminal, which never wraps", test_train_console},
    {"train_hints", "the commands that a run prints can be pasted", test_train_hints},
    {"train_diverged", "a diverged run prints how to go back", test_train_diverged},
    {"train_tame", "names cannot steer a terminal; lines of 80 columns", test_train_tame},
    {"train_mixture", "sets by weight, resumed and on several ranks", test_train_mixture},
    {"golden_gradients", "logits, loss, gradients equal Hugging Face's", test_golden_gradients},
    {"golden_adamw", "ten AdamW steps equal PyTorch's", test_golden_adamw},
    {"finite_differences", "gradients are slopes of the loss", test_finite_differences},
    {"causality", "no token sees a later one", test_causality},
    {"overfit", "one batch is learnt by heart in fp32, fp16 and bf16", test_overfit},
    {"determinism", "two runs, stages and thread counts are bit-identical", test_determinism},
    {"recompute", "activations made again change no bit", test_recompute},
    {"cuda_recompute", "the same on a GPU, also as a graph", test_cuda_recompute},
    {"fp8", "products of 8 bits change the loss by little, and no score", test_fp8},
    {"cuda_fp8", "the same on a GPU, also as a graph", test_cuda_fp8},
    {"cuda_golden", "golden values on a GPU, in each type", test_cuda_golden},
    {"graphs_refused", "a step that cannot be recorded runs", test_graphs_refused},
    {"graphs_counted", "a step counts alike with and without graphs", test_graphs_counted},
    {"cuda_graphs_refused", "the same on a GPU", test_cuda_graphs_refused},
    {"cuda_algorithms", "of a score, a step and a checkpoint", test_cuda_algorithms},
    {"cuda_gpus", "two GPUs in one process, and other threads", test_cuda_gpus},
    {"cuda_resume", "stopped and repeated on GPUs, to the bit", test_cuda_resume},
    {"cuda_resume_graphs", "the same with recorded steps", test_cuda_resume_graphs},
    {"cuda_resume_muon", "the same with Muon", test_cuda_resume_muon},
    {"cuda_gradients", "random configs: gradients equal the CPU's", test_cuda_gradients},
    {"accumulation", "micro-steps add up to the larger batch", test_accumulation},
    {"loss_scale", "the scale grows, halves, skips and recovers", test_loss_scale},
    {"canonical_access", "any canonical range is read and written", test_canonical_access},
    {"initialisation", "each tensor starts with GPT-2's spread", test_initialisation},
    {"validation", "validation is the mean of the steps' losses", test_validation},
    {"memory_again", "a call that ran out of memory works again, and smaller", test_memory_again},
    {"memory_planned", "a CPU's step takes the memory that the plan counts", test_memory_planned},
    {"places", "a rank's place, from the variables of each launcher", test_places},
    {"places_refused", "variables that make no place are named", test_places_refused},
    {"ranks_calls", "2 to 5 processes meet, and every call, also with 32 MB", test_ranks_scenes},
    {"ranks_config", "a job of one, invalid configs, failing allocations", test_ranks_config},
    {"ranks_refusals", "ranks that do not fit together hear why, all of them", test_ranks_refusals},
    {"ranks_neighbours", "other services and jobs on the port", test_ranks_neighbours},
    {"ranks_strangers", "strangers on the port cost a job nothing", test_ranks_strangers},
    {"ranks_intruders", "listeners without the job's token end no rank", test_ranks_intruders},
    {"ranks_flood", "a flood of strangers keeps no rank out", test_ranks_flood},
    {"ranks_secret", "a process without the job's secret is refused", test_ranks_secret},
    {"ranks_address", "rank 0 listens at MASTER_ADDR alone", test_ranks_address},
    {"ranks_killed", "kill -9 of a rank ends the others; they name it", test_ranks_scenes},
    {"ranks_cut", "a connection that breaks: both ends are named at once", test_ranks_scenes},
    {"ranks_stopped", "a stopped rank ends the job at the deadline", test_ranks_scenes},
    {"ranks_suspended", "a job that was suspended as a whole continues", test_ranks_suspended},
    {"ranks_progress", "micro-steps count; heartbeats do not wait for data", test_ranks_scenes},
    {"cuda_lost_copy", "a lost rank ends programs without a handler", test_cuda_lost_copy},
    {"cuda_lost_nccl", "the same with NCCL alone", test_cuda_lost_nccl},
    {"cuda_lost_hosts", "the same on two hosts", test_cuda_lost_hosts},
    {"ranks_killed_gpu", "ranks on GPUs end when another was killed", test_ranks_scenes},
    {"ranks_trouble", "an error that the transport reports ends the job", test_ranks_scenes},
    {"ranks_hang", "a rank that hangs is named, one that saves is left alone", test_ranks_scenes},
    {"ranks_addresses", "an address that leads nowhere does not hide others", test_ranks_addresses},
    {"ranks_leaving", "leaving is no death, unless others continue", test_ranks_scenes},
    {"ranks_flight", "the flight recorder holds the last 1,024 collectives", test_ranks_flight},
    {"ranks_spawn", "a process that starts ranks and supervises them", test_ranks_spawn},
    {"ranks_terminal", "ranks on terminals with tostop, and stopped", test_ranks_terminal},
    {"ranks_mpirun", "ranks under mpirun", test_ranks_mpirun},
    {"ranks_train", "./train as its own launcher, and what that leaves", test_ranks_train},
    {"ranks_train_killed", "kill -9 of ranks of ./train, started by hand", test_ranks_train_killed},
    {"make_command", "a program whose command has changed is built again", test_make_command},
    {"make_fetch", "a download whose sum is wrong is refused", test_make_fetch},
    {"make_check", "the scripts of make check see faults", test_make_check},
    {"example_minimal", "examples/minimal.cu trains, resumes, on two ranks", test_example_minimal},
    {"example_gpt2", "recipes with --smoke: download, stop, resume", test_example_gpt2},
    {"example_finetune", "examples/finetune.sh, from weights to an answer", test_example_finetune},
    {"slurm_scripts", "the batch scripts start what their knobs say", test_slurm_scripts},
    {"rehearsal", "all products are timed before the first step or validation", test_rehearsal},
    {"cuda_rehearsal", "the same in a GPU's tuning table", test_cuda_rehearsal},
    {"context_refusals", "a model that does not fit the memory", test_context_refusals},
    {"sampling", "temperature, top-k and top-p draw what they should", test_sampling},
    {"model_scores", "scores equal Hugging Face's; ignored targets", test_model_scores},
    {"model_cache", "a model holds weights, one block and a cache, no more", test_model_cache},
    {"model_generates", "with a cache the same tokens as without", test_model_generates},
    {"model_context", "a text continues past the context", test_model_context},
    {"cuda_next", "the next token's ops on a GPU", test_cuda_next},
    {"cuda_draw", "drawing tokens on a GPU", test_cuda_draw},
    {"cuda_model", "a model in use on a GPU", test_cuda_model},
    {"cuda_shapes", "scores and generation on a GPU over vocabularies", test_cuda_shapes},
    {"masked", "targets that are left out of loss and gradient", test_masked},
    {"golden_masked", "fine-tuning equals PyTorch's on 1 and 3 ranks", test_golden_masked},
    {"eval_questions", "questions with endings, as counted by hand", test_eval_questions},
    {"eval_formats", "questions of six benchmarks, as counted by hand", test_eval_formats},
    {"eval_texts", "a text, documents and tokens have the same loss", test_eval_texts},
    {"eval_no_memory", "scores survive every failing allocation", test_eval_no_memory},
    {"eval_masks", "what a shard's mask leaves out is not scored", test_eval_masks},
    {"eval_writes", "what a model writes is shown alike in parts", test_eval_writes},
    {"eval_train", "./train scores files during training and after it", test_eval_train},
    {"examples", "score.c and generate.c, built", test_examples},
    {"model_no_memory", "a model survives every failing allocation", test_model_no_memory},
    {"tokens_services", "tokens belong to the services they began with", test_tokens_services},
    {"zero_equal", "stages 0 to 3 and dp on 2 to 4 ranks learn alike", test_zero_equal},
    {"zero_alone", "wte's gradient in two parts on one rank", test_zero_alone},
    {"zero_halves", "the same in fp16 and bf16", test_zero_halves},
    {"muon_bytes", "Muon needs less memory than AdamW", test_muon_bytes},
    {"muon_trainer", "steps of Muon and AdamW, tensor by tensor", test_muon_trainer},
    {"muon_change", "a run that resumes with the other optimizer", test_muon_change},
    {"muon_files", "checkpoints have no v of matrices", test_muon_files},
    {"train_rates", "the default learning rates, in a resume too", test_train_rates},
    {"train_muon", "spikes in a run, and its resume with AdamW", test_train_muon},
    {"spikes_trainer", "a skipped step changes no bit", test_spikes_trainer},
    {"muon_ranks", "Muon on several ranks: equal, resumed, skipped", test_muon_ranks},
    {"zero_recompute", "activations made again change no bit on two ranks", test_zero_recompute},
    {"cuda_zero", "the same on GPUs, in fp32", test_cuda_zero},
    {"cuda_zero_halves", "the same in fp16", test_cuda_zero_halves},
    {"cuda_zero_muon", "the same with Muon", test_cuda_zero_muon},
    {"cuda_zero_recompute", "recomputing changes no bit on two GPUs", test_cuda_zero_recompute},
    {"cuda_zero_trouble", "a rank's trouble on GPUs is returned by all", test_cuda_zero_trouble},
    {"cuda_zero_apart", "variables of NCCL keep the kit from copies", test_cuda_zero_apart},
    {"cuda_graphs_apart", "a rank that cannot record a step stays in step", test_cuda_graphs_apart},
    {"cuda_hosts", "two hosts, each with a GPU: NCCL alone", test_cuda_hosts},
    {"zero_kinds", "ranks with different GPUs time for themselves", test_zero_kinds},
    {"zero_short", "a rank without memory ends a call on all, at once", test_zero_short},
    {"zero_turns", "stage 3 gathers a block one ahead of its use", test_zero_turns},
    {"zero_trouble", "what befalls one rank all return together", test_zero_trouble},
    {"crc32c", "CRC-32C against RFC 3720, in one piece and in several", test_crc32c},
    {"checkpoint_resume", "a resumed training is the unbroken one", test_checkpoint_resume},
    {"checkpoint_reshaped", "other stages, types and batches resume", test_checkpoint_reshaped},
    {"checkpoint_data", "other data starts its epoch over", test_checkpoint_data},
    {"checkpoint_damage", "every flipped bit and missing byte is found", test_checkpoint_damage},
    {"checkpoint_refused", "checkpoints that do not fit are refused", test_checkpoint_refused},
    {"checkpoint_locale", "the same in a locale with a decimal comma", test_checkpoint_locale},
    {"checkpoint_trouble", "full disks, failing allocations: no file", test_checkpoint_trouble},
    {"run_resume", "a resumed run leaves the files of an unbroken one", test_run_resume},
    {"run_weights", "a run's weights have its validation loss and write its sample", test_run_weights},
    {"run_branches", "a checkpoint of another directory begins a new run", test_run_branches},
    {"run_short_epoch", "an epoch whose rest is less than a step ends", test_run_short_epoch},
    {"run_resume_torn", "damaged lines of metrics.jsonl are reported", test_run_resume_torn},
    {"run_resume_latest", "the last checkpoint that is whole", test_run_resume_latest},
    {"run_resume_refusals", "what cannot resume is refused at the start", test_run_resume_refusals},
    {"run_goes_on", "a run that continues drops its end report", test_run_goes_on},
    {"run_stop", "a stop saves; interrupted calls change nothing", test_run_stop},
    {"run_faults", "a call that fails on a log loses no line", test_run_faults},
    {"run_note", "a note with impossible numbers is refused", test_run_note},
    {"run_targets_resumed", "targets stay with their tokens", test_run_targets_resumed},
    {"run_linkless", "a file system without links keeps the best", test_run_linkless},
    {"train_removed", "a run whose files are removed under it fails", test_train_removed},
    {"train_unread", "a console that is closed or that nobody reads", test_train_unread},
    {"train_log", "train.log and the console hold the same lines", test_train_log},
    {"train_best", "the best checkpoint, patience, a target loss", test_train_best},
    {"train_best_honest", "the place of the best weights, and their loss", test_train_best_honest},
    {"train_stops_soon", "a signal ends validation, evaluation and sample", test_train_stops_soon},
    {"train_signals", "signals save, exit code 75; a second one ends at once", test_train_signals},
    {"train_killed", "kill -9 at any moment leaves whole checkpoints", test_train_killed},
    {"train_ranks_resume", "saved on 4 ranks, resumed on 3 and on 1", test_train_ranks_resume},
    {"train_ranks_memory", "ranks on CPUs divide their host's memory", test_train_ranks_memory},
    {"train_ranks_latest", "all ranks take the checkpoint that is whole", test_train_ranks_latest},
    {"train_ranks_stuck", "a console that hangs keeps no rank", test_train_ranks_stuck},
    {"train_ranks_differ", "ranks that differ, or cannot write, say so", test_train_ranks_differ},
    {"train_ranks_killed", "kill -9 of a rank: named, then resumed", test_train_ranks_killed},
    {"pages", "text is escaped, spikes and gaps survive thinning", test_pages},
    {"report_curves", "smoothed losses, and two runs in one chart", test_report_curves},
    {"report_compared", "when each of three runs reaches the same loss", test_report_compared},
    {"report_ends", "runs that are not complete, and a loss that is nan", test_report_ends},
    {"report_sets", "the best validation, when the validation tokens change", test_report_sets},
    {"report_bits", "bits per byte compare two vocabularies, and equal --eval's", test_report_bits},
    {"run_report", "a run's page, and the damaged files it is not made from", test_run_report},
    {"run_report_epochs", "the page of a run of 2,000 epochs, in one pass", test_run_report_epochs},
    {"run_short", "short runs, also in Slurm, leave what readers want", test_run_short},
    {"run_events", "TensorBoard's frames, their checksums, a file for each start", test_run_events},
    {"event_values", "TensorBoard: a mark for what is not finite, nothing for what is unknown", test_event_values},
    {"run_event_tags", "names of any length and bytes as TensorBoard's tags", test_run_event_tags},
    {"spans", "what parts of a step take, by the clock", test_spans},
    {"cuda_spans", "the same between events of a GPU", test_cuda_spans},
    {"profile", "tables of nsys, and what is none", test_profile},
    {"run_profile", "a run that times its own parts", test_run_profile},
    {"profile_script", "slurm/profile.sh with and without nsys", test_profile_script},
    {"page_scales", "round ticks, and no number breaks an axis", test_page_scales},
    {"statistics", "medians and deviations, of none and with holes", test_statistics},
    {"summaries", "an experiment's file, table and page", test_summaries},
    {"summaries_full", "texts that fill their room and need escapes", test_summaries_full},
    {"summaries_damaged", "cut, changed and foreign files are refused", test_summaries_damaged},
    {"ranks_run", "jobs of a program: output, exit codes, what they took", test_ranks_run},
    {"bench_help", "--help of ./bench and of each sub-command", test_bench_help},
    {"bench_refusals", "what ./bench cannot do: a sentence and exit code 1", test_bench_refusals},
    {"bench_ops", "ops of a step, as often as it calls them", test_bench_ops},
    {"bench_scaling", "fixed work on 1 and 2 ranks, in rounds", test_bench_scaling},
    {"bench_others", "buckets, matrix and strategies, small", test_bench_others},
    {"bench_failing", "a point that fails is reported; the others continue", test_bench_failing},
    {"bench_stopped", "a signal: a report of the runs that had ended", test_bench_stopped},
    {"bench_watched", "memory and use of GPUs, as nvidia-smi prints them", test_bench_watched},
    {"bench_comm", "every collective against memcpy", test_bench_comm},
    {"bench_report", "a page of what was left, and none of damaged files", test_bench_report},
};

enum { TEST_COUNT = sizeof test_table / sizeof *test_table, TEST_WORKERS = 4 };

static int test_remove_entry(const char *path, const struct stat *info, int type,
                             struct FTW *where) {
  (void)info;
  (void)type;
  (void)where;
  return remove(path);
}

static int test_selected(const char *name, int argc, char **argv) {
  if (argc < 2) return 1;
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], name) == 0) return 1;
  return 0;
}

/* What the workers share. */
typedef struct test_shared {
  int next, passed, failed, skipped;  /* next: index of the first test that no worker has taken */
} test_shared;

/* The beginning of a test's name tells what it needs. */
static void test_look_for(g2z_test *t) {
  const char *const programs[][2] = {{"train_", test_train_program()},
                                     {"prepare_", test_prepare_program()},
                                     {"bench_", test_bench_program()}};
  for (int i = 0; i < 3; i++)
    if (strncmp(t->name, programs[i][0], strlen(programs[i][0])) == 0 &&
        access(programs[i][1], X_OK) != 0)
      snprintf(t->skip, sizeof t->skip, "%s is not built: make", programs[i][1]);
  if (strncmp(t->name, "cuda_", 5) == 0 && !g2z_device_count(G2Z_DEVICE_CUDA))
    snprintf(t->skip, sizeof t->skip, "no GPU that this build can use");
}

static void test_run(const g2z_test_entry *entry, test_shared *shared) {
  static g2z_test t;
  memset(&t, 0, sizeof t);
  t.name = entry->name;
  t.services.allocate = test_allocate;
  t.services.release = test_release;
  t.services.user = &t;
  const char *scratch = getenv("TMPDIR");
  snprintf(t.directory, sizeof t.directory, "%.200s/g2z_test_XXXXXX", scratch ? scratch : "/tmp");
  if (!mkdtemp(t.directory)) {
    fprintf(stderr, "cannot make %s: %s; set TMPDIR to a writable directory\n", t.directory,
            strerror(errno));
    exit(1);
  }
  double begin = g2z_seconds();
  test_look_for(&t);
  if (!t.skip[0] && setjmp(t.stopped) == 0) entry->run(&t); /* REQUIRE_OK stops it */
  test_end(&t, 0);
  free(t.owned);
  for (int i = 0; i < 2; i++) g2z_plan_free(t.plans[i]);
  if (t.allocations != 0) test_fail(&t, __FILE__, __LINE__, "%ld blocks leaked", t.allocations);
  if (!t.skip[0] && t.checks == 0) test_fail(&t, __FILE__, __LINE__, "the test checked nothing");
  nftw(t.directory, test_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
  double seconds = g2z_seconds() - begin;
  if (t.failures) {
    printf("FAIL  %-28s %d of %d checks\n", t.name, t.failures, t.checks);
    __atomic_add_fetch(&shared->failed, 1, __ATOMIC_RELAXED);
  } else if (t.skip[0]) {
    printf("skip  %-28s %s\n", t.name, t.skip);
    __atomic_add_fetch(&shared->skipped, 1, __ATOMIC_RELAXED);
  } else {
    printf("ok    %-28s %d checks, %.2f s\n", t.name, t.checks, seconds);
    __atomic_add_fetch(&shared->passed, 1, __ATOMIC_RELAXED);
  }
  fflush(stdout);
}

/* Runs tests until none is left. Ports of concurrent workers are far apart. */
static void test_work(test_shared *shared, int worker, int argc, char **argv) {
  test_ports = 150 * worker;
  for (int i; (i = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < TEST_COUNT;)
    if (test_selected(test_table[i].name, argc, argv)) test_run(&test_table[i], shared);
}

/* The number of workers. One test needs one; on GPUs tests fill the memory and measure time. */
static int test_workers(int argc) {
  const char *wanted = getenv("G2Z_TEST_WORKERS");
#ifdef __CUDACC__
  const long cores = 1;
#else
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
#endif
  if (argc == 2) return 1;
  return wanted ? atoi(wanted) : cores > TEST_WORKERS ? TEST_WORKERS : (int)cores;
}

/* Each worker, and each program that it starts, gets its share of the cores: threads without a core
 * only wait for each other. */
static void test_share_cores(int workers) {
#ifdef _OPENMP
  const int threads = omp_get_max_threads() / workers;
  omp_set_num_threads(threads > 0 ? threads : 1);
  setenv("OMP_NUM_THREADS", test_text("%d", threads > 0 ? threads : 1), 1);
#else
  (void)workers;
#endif
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "--rank-program") == 0) return rank_program(argc - 2, argv + 2);
  if (argc == 2 && strcmp(argv[1], "--mutants") == 0) {
    mutants_print();
    return 0;
  }
  if (argc == 2 && strcmp(argv[1], "--list") == 0) {
    for (int i = 0; i < TEST_COUNT; i++)
      printf("%-28s %s\n", test_table[i].name, test_table[i].about);
    return 0;
  }
  for (int i = 1; i < argc; i++) {
    int known = 0;
    for (int k = 0; k < TEST_COUNT; k++) known |= strcmp(argv[i], test_table[k].name) == 0;
    if (!known) {
      fprintf(stderr, "no test is called \"%s\": ./test_gpt2 --list shows them\n", argv[i]);
      return 1;
    }
  }
  test_shared *shared = (test_shared *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t pids[TEST_WORKERS];
  const int workers = test_workers(argc);
  if (shared == MAP_FAILED || workers > TEST_WORKERS) {
    fprintf(stderr, "no memory for tests, or G2Z_TEST_WORKERS is above %d\n", TEST_WORKERS);
    return 1;
  }
  if (workers < 2) test_work(shared, 0, argc, argv);
  else test_share_cores(workers);
  for (int w = 0; w < workers && workers > 1; w++) {
    pids[w] = fork();
    if (pids[w]) continue;
    test_work(shared, w, argc, argv);
    return 0;
  }
  for (int w = 0; w < workers && workers > 1; w++) {
    int status = -1;
    if (pids[w] > 0 && waitpid(pids[w], &status, 0) == pids[w] && status == 0) continue;
    printf("FAIL  process %d ended with status %d during a test\n", (int)pids[w], status);
    shared->failed++;
  }
  printf("%d passed, %d failed, %d skipped\n", shared->passed, shared->failed, shared->skipped);
  return shared->failed > 0;
}

#else /* G2Z_FUZZ names one of the targets of tests/fuzz.h */

#include "tests/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return G2Z_FUZZ(data, size); }

#endif /* G2Z_FUZZ */
