/* gpt2_zero.h: GPT-2, from text to a trained model that generates text. MIT licence.
 * A CPU needs this header alone. Under nvcc its implementation includes gpt2_zero_kernels.cuh, too.
 *
 * QUICK START
 *     #define GPT2_ZERO_IMPLEMENTATION
 *     #include "gpt2_zero.h"
 *     int main(void) {
 *       static g2z_services services;                            // malloc, no log
 *       g2z_context *context = NULL;  g2z_trainer *trainer = NULL;  g2z_report report;
 *       g2z_context_config cc = g2z_context_config_default(&services);
 *       g2z_train_config tc = g2z_train_config_default(cc.device); // GPT-2 124M
 *       tc.train_glob = "data/text_train_*.bin";                  // from prepare_data
 *       g2z_status status = g2z_context_create(&cc, &context);
 *       if (status == G2Z_OK) status = g2z_trainer_create(context, &tc, &trainer);
 *       for (int i = 0; i < 1000 && status == G2Z_OK; i++)
 *         status = g2z_trainer_step(trainer, &report);
 *       if (status == G2Z_OK) status = g2z_trainer_save_weights(trainer, "gpt2-mine");
 *       if (status != G2Z_OK) puts(services.error);              // a sentence with the values
 *       g2z_trainer_free(trainer);  g2z_context_free(context);  return status != G2Z_OK; }
 *     cc -O3 -march=native -fopenmp main.c -lm -lpthread
 *
 * LEVELS, each built on the one below
 *     drive a trainer               g2z_trainer_*  rooms 13 to 16
 *     use one piece                 the plan, the loader, one op: rooms 03 to 12
 *     Above them stand extras/: text (g2z_text.h), a whole training and its directory (g2z_run.h),
 *     pages that compare runs (g2z_report.h). The library needs none of them. They use its public
 *     functions alone; its build switches and its error contract apply to them, too.
 *
 * DOES NOT
 *     - split the computation of a model: each rank runs the whole model on its own sequences;
 *     - read tokens wider than 16 bits;
 *     - exit, abort or print: it returns a status and logs through a callback. One exception: a
 *       rank on a GPU ends its process when another rank is lost (room 10, on_fault).
 *
 * BUILD SWITCHES, before the include
 *     GPT2_ZERO_IMPLEMENTATION   in one file of the program: include the implementation too
 *     G2Z_STATIC                 everything is static: each file that includes it has its own copy
 *     G2Z_API                    your own linkage for public functions
 *     G2Z_ASSERT(condition)      reports a bug of the caller; default assert()
 *     G2Z_NO_NCCL                with nvcc: build for one GPU, even if <nccl.h> exists
 *     G2Z_IMPLEMENTED            the implementation is in another object, which programs share:
 *                                this file, compiled with GPT2_ZERO_IMPLEMENTATION (see Makefile)
 *     G2Z_KERNELS                with nvcc: empty in that object; extern in a program with its own
 *                                implementation (G2Z_STATIC) that needs only the object's kernels.
 *                                If the linker misses g2z__cuda_fill, the object is of another
 *                                version
 *     G2Z_VERSION is the version of this file, as a string
 *     The same text compiles as C11 (gcc, clang) and as C++17 (g++, clang++, nvcc), before or after
 *     any system header, with one exception: under -std=c11 the first C library header hides POSIX
 *     for the whole file. Then include gpt2_zero.h first, or compile with -std=gnu11.
 *     -ffast-math is refused.
 *
 * TABLE OF CONTENTS: rooms of declarations >>dNN and of implementations >>iNN. Each room uses only
 *     rooms above it, except the page and i08, which opens the table of i09. In
 *     gpt2_zero_kernels.cuh rooms are called >>kNN; >>k80 has the collectives. To understand ZeRO,
 *     read i00, d06, i13, i11 and i06, in this order; 02, 04, 07, 10, 12 and 16 are plumbing.
 *           >>i00   the page            one step of ZeRO: gradients, verdict, optimizer, Muon
 *     >>d01         status              one enum, one sentence each
 *     >>d02 >>i02   services and files  allocator, log, clock; files that appear whole
 *     >>d03         random numbers      counter-based: Philox
 *     >>d04 >>i04   JSON                a reader without allocation, a writer
 *     >>d05 >>i05   config              models, optimizer, training; schedules
 *     >>d06 >>i06   plan                where everything lies, and its bytes; Muon's homes
 *     >>d07 >>i07   shards and loader   token files, order of an epoch, prefetch
 *     >>d08 >>i08   op table            what a device can do; NUMERICS: where it rounds; tuning
 *           >>i09   CPU ops             the oracle of every other device
 *     >>d10 >>i10   ranks               the processes of a job: meeting, heartbeats, faults
 *     >>d11 >>i11   collectives         sums and copies between ranks; transports; CUDA graphs
 *     >>d12 >>i12   weights             safetensors; GPT-2 as Hugging Face stores it
 *     >>d13 >>i13   context and model   a process's place in the job; forward and backward
 *     >>d14 >>i14   trainer             training, step by step; tuning and graphs of a step
 *     >>d15 >>i15   model in use        scoring and continuing texts, with a key-value cache
 *     >>d16 >>i16   checkpoints         a training state that any number of ranks can resume
 *
 * VOCABULARY
 *     B sequences per micro-step and rank, T tokens per sequence, N = B*T, C channels, L layers,
 *     NH heads, HS = C/NH channels per head, V vocabulary, Vp = V padded to a multiple of 128.
 *     wte, wpe     token and position embedding; wte is also the weight of the LM head
 *     micro-step   forward and backward over [B,T]; a step is `accum` micro-steps and one update
 *     unit         what the plan lays out as one piece: the final LayerNorm, a block, wpe or wte
 *     bucket       a contiguous range of the gradient buffer that is reduced in one collective
 *     slice        a rank's part of a bucket;  shard: all slices of a rank, one after the other
 *     canonical    an element's index in the unpadded list of parameters: the index that files use
 *     master       fp32 weights that the optimizer updates; `params` are these, rounded to dtype
 *     home         the rank that orthogonalizes a weight for Muon (room 06)
 *
 * PIPELINE
 *     text --g2z_encode--> ids --g2z_shard_writer--> shards --g2z_loader--> x[B,T], y[B,T]
 *       --> embed --> L x { LN, QKV, attention, proj + residual, LN, fc + GELU, fcproj + residual }
 *       --> LN --> LM head and loss, in chunks of tokens
 *       --> backward, into one flat buffer, in the order that gradients complete
 *       --> bucket complete: summed over the ranks while backward continues; sum of squares
 *       --> verdict of all ranks: finite?, norm, clip factor, learning rate, loss scale
 *       --> AdamW or Muon on the fp32 shard --> params = round(master)
 *       --> bucket updated: sent to the other ranks during the next forward pass
 *     The host enqueues all of this and reads g2z_step_state one step later.
 *
 * ZERO over N ranks, P parameters, g bytes per gradient: bytes per rank, and what a step sends
 *     stage 0   (2 + g + 12) P          gradients: all-reduce
 *     stage 1   (2 + g) P + 12 P / N    gradients: reduce-scatter; parameters: all-gather (default)
 *     stage 2   2 P + (g + 12) P / N    the same, but it reduces gradients in each micro-step
 *     stage 3   (2 + g + 12) P / N      the same, but it gathers a block's parameters in each pass
 *     dp        (2 + g) P, 12 P more    gradients: reduce to rank 0, which updates all; parameters:
 *               on rank 0               broadcast. The baseline for ZeRO: --strategy dp
 *     Stages 2 and 3 also hold gradients of two blocks and of wte; stage 3 also holds parameters of
 *     two blocks, wte, wpe and the final LayerNorm. A single rank has all parameters in any stage.
 *     All stages learn the same within rounding, and each opens the others' checkpoints. Room i00,
 *     the page, shows what each stage sends, and when; docs/zero.md explains it. Collectives run on
 *     a separate CUDA stream.
 *
 * MEMORY of GPT-2 124M, fp16, one rank, B=8, T=1024 (train --dry-run)
 *     parameters, fp16                       0.232 GiB   stage 3 on 8 ranks: 0.120 GiB
 *     gradients, fp16                        0.232 GiB   in buckets of up to 64 MiB
 *     master weights, m, v, fp32             1.391 GiB   1 / world of it from ZeRO stage 1 on;
 *                                                        with Muon 1.075: its weights have no v
 *     activations (right: bytes per token)   2.338 GiB   L (32 C + 4 NH + 16) + 14 C + 12
 *       with --recompute block               0.399 GiB   2 L C + 44 C + 4 NH + 28; 15 % more flops
 *     LM head: logits of all 8,192 tokens    0.768 GiB   8,192 tokens at a time if all logits would
 *                                                        take over half as much as activations
 *       wte's gradient, fp32                 0.144 GiB   if the others are not fp32, and chunks or
 *                                                        micro-steps > 1, or world x N > 2/3 Vp
 *     scratch of the ops, CUDA graphs        0.308 GiB   plus CUDA's context, about 0.5 GiB
 *
 * DETERMINISM
 *     The same binary, config, kind of machine, world and tuning table (rank 0's, for all) give
 *     bit-identical losses, weights and files, whatever the number of threads. Every sum has an
 *     order that depends on shapes alone; random numbers are keyed by (seed, step, sequence in the
 *     global batch, layer, element). With another world, bucket size or micro-batch size sums have
 *     another order: results are equal within rounding.
 *
 * ERRORS
 *     Every call that can fail returns a g2z_status, and writes a sentence with the values and the
 *     remedy to g2z_services.error. Outputs are the last arguments and are NULL on failure. _free
 *     accepts NULL. Files are checked before they are used. A file gets its final name only when it
 *     is whole: until then it is "NAME.partial". G2Z_ASSERT catches bugs of the caller. If another
 *     rank dies or hangs, ranks on CPUs return G2Z_LOST; ranks on GPUs end with exit code
 *     G2Z_EXIT_LOST, 70 (room 10).
 *
 * THREADS
 *     An object is used by one thread at a time, and may move to another. A g2z_tokenizer is
 *     immutable and may be shared. A program may use several GPUs: a context belongs to the GPU
 *     that was current when it was created, or, in a job of several ranks, to the GPU of its local
 *     rank. Each call makes its object's GPU current.
 *     A loader reads the next step in a thread of its own. In a job of several ranks, each has a
 *     thread that watches the others and calls on_fault. OpenMP threads live inside CPU ops.
 *
 * FILE FORMATS (little-endian)
 *     token shard, llm.c    int32[256]: 20240520, 1, number of tokens, u64 hash of the vocabulary
 *                           (0: not known), zeros; then uint16 tokens
 *     token shard, raw      uint16 tokens, nothing else
 *     mask, NAME.mask       next to the shard NAME.bin: int32 0x6b73616d ("mask"), 1, int64 number
 *                           of tokens, u64 FNV-1a hash of that number and of the shard's first and
 *                           last 256 bytes of tokens; then one bit per token, 1: it counts
 *     model.safetensors     u64 header bytes, JSON {name: {dtype, shape, data_offsets}}, data;
 *                           names and shapes of Hugging Face's GPT2LMHeadModel; weights are [in,
 *                           out]. Or model.safetensors.index.json, whose weight_map names the files
 *     config.json           its GPT2Config, with vocab_hash in 16 hexadecimal digits, if known
 *
 * PAPERS (a paper on one op is named at the op)
 *     Radford et al. 2019, Language models are unsupervised multitask learners (GPT-2)
 *     Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO)
 *     Loshchilov and Hutter 2019, arXiv:1711.05101 (AdamW)
 *     Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982 (Muon) */

#ifndef G2Z_INCLUDED
#define G2Z_INCLUDED
#define G2Z_VERSION "1.0.0-dev"

/* The implementation needs POSIX.1-2008 (pread, glob, threads) and some BSD calls (flock).
 * Strict C modes hide both unless this macro precedes the first system header. The code uses
 * nothing that only _GNU_SOURCE declares. */
#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef G2Z_API
#if defined(G2Z_STATIC) && defined(__GNUC__)
#define G2Z_API static __attribute__((unused)) /* a program may leave some functions unused */
#elif defined(G2Z_STATIC)
#define G2Z_API static
#else
#define G2Z_API extern
#endif
#endif

#if defined(__CUDACC__)
#define G2Z_HOST_DEVICE __host__ __device__
#else
#define G2Z_HOST_DEVICE
#endif

#if defined(__GNUC__)
#define G2Z_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define G2Z_PRINTF(text, first)
#endif

/* Catches bugs of the caller, not bad input: overridable, and its condition has no side effect. */
#ifndef G2Z_ASSERT
#define G2Z_ASSERT(condition) assert(condition)
#endif

/* For the library and programs around it. TRY and REFUSE return from the calling function. */
#define G2Z_TRY(call)                              \
  do {                                             \
    g2z_status try_status_ = (call);               \
    if (try_status_ != G2Z_OK) return try_status_; \
  } while (0)
#define G2Z_REFUSE(services, ...) return g2z_fail(services, G2Z_BAD_ARGUMENT, __VA_ARGS__)
#define G2Z_COUNT(table) (sizeof table / sizeof *(table))
#define G2Z_PLURAL(count) ((count) == 1 ? "" : "s") /* for "%d step%s" */

/* ===== >>d01 status ======================================================
 * Every call that can fail returns one of these. The sentence with the values is in `error` of the
 * g2z_services (room 02) that the call was given. */

#define G2Z_STATUS_LIST(X)                                                                        \
  /*  name           meaning */                                                                   \
  X(OK,           "success")                                                                      \
  X(BAD_ARGUMENT, "a value that the call cannot accept")                                          \
  X(IO,           "a file or directory cannot be opened, read or written")                        \
  X(FORMAT,       "a file's content is not what its format promises")                             \
  X(NO_MEMORY,    "host or device memory ran out")                                                \
  X(UNSUPPORTED,  "known, but not to be had in this build or on this machine")                    \
  X(DEVICE,       "a CUDA, cuBLAS or NCCL call failed")                                           \
  X(DIVERGED,     "the model computes numbers that are not finite")                               \
  X(STOPPED,      "a stop was requested")                                                         \
  X(LOST,         "another rank died, or does not answer")

/* What such a list expands to: enumerators, texts, and the words that a setting accepts. */
#define G2Z_LIST_NAME(name, ...) G2Z_##name,
#define G2Z_LIST_TEXT(name, text) text,
#define G2Z_LIST_WORD(name, text) "|" text
typedef enum g2z_status { G2Z_STATUS_LIST(G2Z_LIST_NAME) G2Z_STATUS_COUNT } g2z_status;

/* ===== >>d02 services and files ==========================================
 * The services that a program may provide to the library. All zero means: malloc and free, no log.
 * One g2z_services belongs to one thread at a time. Objects keep the pointer, so it must outlive
 * them. After a call that failed, `error` holds a sentence that names the values and the remedy. */

#define G2Z_ERROR_BYTES 768

typedef enum g2z_log_level { G2Z_LOG_INFO, G2Z_LOG_WARNING } g2z_log_level;

typedef struct g2z_services {
  void *(*allocate)(void *user, size_t bytes);  /* NULL: malloc; a block aligned as malloc's */
  void (*release)(void *user, void *memory);    /* NULL: free; memory is never NULL */
  void (*log)(void *user, g2z_log_level level, const char *sentence); /* NULL: silent */
  void *user;                                   /* handed to the three above */
  void (*also)(void *listener, g2z_log_level level, const char *sentence); /* a second log */
  void *listener;
  char error[G2Z_ERROR_BYTES];                  /* the sentence of the last failure */
  int alike;                                    /* 1: all ranks of the job have this sentence */
  int os_error;                                 /* errno of its failed call on a file; or 0 */
} g2z_services;

/* Text quoted from a file, an argument or another rank must not steer a terminal. Replaces control
 * characters by '?', in place; also U+0080 to U+009F, since U+009B acts like ESC [. Returns
 * `text`. */
G2Z_API char *g2z_tame(char *text);
/* Stores the sentence of a failure, tamed, and returns its status. */
G2Z_API g2z_status g2z_fail(g2z_services *services, g2z_status status, const char *format, ...)
    G2Z_PRINTF(3, 4);

/* "cannot write runs/a.bin: No space left on device; free some space or ...": the sentence for
 * a failed system call on `path`; `error` is its errno. action: "write". Returns G2Z_IO. */
G2Z_API g2z_status g2z_fail_file(g2z_services *services, int error, const char *action,
                                 const char *path);
/* Returns G2Z_BAD_ARGUMENT unless least <= value <= most; the sentence has name and bounds. */
G2Z_API g2z_status g2z_check_range(g2z_services *services, const char *name, int64_t value,
                                   int64_t least, int64_t most);
/* Passes a sentence, tamed, to both logs of the services. */
G2Z_API void g2z_log(g2z_services *services, g2z_log_level level, const char *format, ...)
    G2Z_PRINTF(3, 4);

/* Allocates `count` zeroed elements of `size` bytes, to be freed with g2z_release. `out` is the
 * address of a pointer, which becomes NULL on failure. */
G2Z_API g2z_status g2z_allocate(g2z_services *services, size_t count, size_t size, void *out);
/* Grows a list to `need` elements. `list`: the address of a pointer. The first `used` elements are
 * kept; a failure changes nothing. */
G2Z_API g2z_status g2z_grow(g2z_services *services, void *list, size_t *capacity, size_t used,
                            size_t need, size_t size);
/* Both take the element size from the pointer: G2Z_NEW(services, count, &pointer). */
#define G2Z_NEW(services, count, pointer) \
  g2z_allocate(services, count, sizeof **(pointer), pointer)
#define G2Z_GROW(services, list, capacity, used, need) \
  g2z_grow(services, list, capacity, used, need, sizeof **(list))
G2Z_API void g2z_release(g2z_services *services, void *memory); /* NULL is fine */

/* Seconds on a monotonic clock; only differences mean anything. */
G2Z_API double g2z_seconds(void);

/* A file under construction. It grows as "PATH.partial" in the directory of its final name, locked
 * against other writers if the file system can lock. Both must be regular files if they exist. The
 * first failure (a full disk) sticks: every later call returns it again, so a caller may put
 * everything and check only the commit. */
typedef struct g2z_writer g2z_writer;
G2Z_API g2z_status g2z_writer_create(g2z_services *services, const char *path, g2z_writer **out);
G2Z_API g2z_status g2z_writer_put(g2z_writer *writer, const void *bytes, size_t count);
G2Z_API g2z_status g2z_writer_printf(g2z_writer *writer, const char *format, ...) G2Z_PRINTF(2, 3);
G2Z_API g2z_status g2z_writer_flush(g2z_writer *writer); /* readers see what was put */
/* Returns when everything put so far is on the disk under the final name. The caller may append
 * more and commit again, for a file that is read while it grows. */
G2Z_API g2z_status g2z_writer_commit(g2z_writer *writer);
G2Z_API void g2z_writer_free(g2z_writer *writer); /* NULL is fine; removes an uncommitted file */

/* Reads a whole file into memory, followed by one NUL that `*bytes` does not count. Refuses files
 * over `limit` bytes, and anything except a regular file or a pipe that the shell made
 * (/dev/fd/63). The caller frees the text with g2z_release. */
G2Z_API g2z_status g2z_read_file(g2z_services *services, const char *path, size_t limit,
                                 char **text, size_t *bytes);
/* Repeats a system call that a signal interrupted; on some network and FUSE file systems even
 * open(), fsync(), mkdir() and rename(). */
#define G2Z_RETRY(result, call) while (((result) = (call)) < 0 && errno == EINTR) continue
/* write() of all bytes, repeated if a signal interrupts it. Returns 0 on failure, with errno. */
G2Z_API int g2z_write_bytes(int file, const void *bytes, size_t count);
/* mkdir -p. */
G2Z_API g2z_status g2z_make_directory(g2z_services *services, const char *path);
/* rename() and unlink(), repeated if a signal interrupts them. 0 on success, else -1 with errno. */
G2Z_API int g2z_rename(const char *from, const char *to);
G2Z_API int g2z_unlink(const char *path);
/* *there: 1 if anything has this name, even a broken link. The call fails if this is not known:
 * after a wrong "no" the caller would start again and overwrite files that it cannot see. */
G2Z_API g2z_status g2z_is_there(g2z_services *services, const char *path, int *there);
/* "DIRECTORY/name" with a formatted name. It is "", which cannot be opened, if the directory is ""
 * or NULL. A path that is cut off exceeds the system's limit, so it cannot be opened either. */
typedef struct g2z_path {
  char text[4160];
} g2z_path;
G2Z_API g2z_path g2z_path_in(const char *directory, const char *format, ...) G2Z_PRINTF(2, 3);

/* ===== >>d03 random numbers ==============================================
 * Counter-based: a number is a pure function of (seed, stream, counter). So nothing has to be
 * stored, any rank can compute any number, and a resumed run draws the same numbers.
 * Philox4x32-10: Salmon et al. 2011, doi:10.1145/2063384.2063405. */

typedef enum g2z_random_stream {
  G2Z_RANDOM_INIT = 1,  /* counter: canonical element / 4 (low, high), 0, 0 */
  G2Z_RANDOM_DROPOUT,   /* counter: element / 4, sequence in the global batch, site, step */
  G2Z_RANDOM_SHUFFLE,   /* counter: half, round, epoch (low, high) */
  G2Z_RANDOM_SAMPLE,    /* counter: index of the drawn token, 0, 0, 0 */
  G2Z_RANDOM_SYNTHETIC, /* counter: index of a synthetic token / 4 (low, high), 0, 0 */
  G2Z_RANDOM_MEMBER,    /* counter: 0 of a job's members, 1 of its rank 0; 0, 0, 0 */
  G2Z_RANDOM_MOMENTS    /* counter: canonical element / 4 (low, high), step, 0; seed 0 */
} g2z_random_stream;

/* out[4] = Philox4x32-10(counter), keyed by the seed with the stream mixed in. */
static inline G2Z_HOST_DEVICE void g2z_philox(uint64_t seed, g2z_random_stream stream,
                                              const uint32_t counter[4], uint32_t out[4]) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32) ^ ((uint32_t)stream * 0x85ebca6bu);
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xd2511f53u * c0, p1 = (uint64_t)0xcd9e8d57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c0 = n0;
    c1 = (uint32_t)p1;
    c2 = n2;
    c3 = (uint32_t)p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}
/* Uniform in [0, 1) with 24 bits: exact in fp32. */
static inline G2Z_HOST_DEVICE float g2z_uniform(uint32_t bits) {
  return (float)(bits >> 8) * 5.9604644775390625e-8f;
}

/* ===== >>d04 JSON ========================================================
 * A reader without allocation that walks a text in place, and a writer. They serve config.json,
 * safetensors headers, tokenizer.json, .jsonl documents and the artifacts of a run.
 *
 *   g2z_json json;  g2z_json_text key;
 *   g2z_json_open(&json, services, "config.json", text, bytes);
 *   if (g2z_json_enter(&json, '{'))
 *     while (g2z_json_next(&json, '}', &key))
 *       if (g2z_json_is(&key, "n_layer")) layers = g2z_json_integer(&json);
 *       else g2z_json_skip(&json);
 *   status = g2z_json_close(&json);   the first error, with label, line and column; or OK
 *
 * After an error every call is harmless: enter and next return 0, values are 0. Nesting is limited
 * to G2Z_JSON_DEPTH. Strings must be valid (RFC 8259); UTF-8 is not checked here. */

#define G2Z_JSON_DEPTH 64

typedef struct g2z_json {
  g2z_services *services;
  const char *label;                      /* name of the text in error sentences */
  const unsigned char *begin, *at, *end;
  int depth;
  int first;                              /* 1: next() has not been called in this container yet */
  g2z_status status;
} g2z_json;

typedef struct g2z_json_text {            /* a string as in the file: escaped, without its quotes */
  const unsigned char *at;
  size_t bytes;
  const unsigned char *lone;              /* the first escape of half a surrogate pair, or NULL */
} g2z_json_text;

G2Z_API void g2z_json_open(g2z_json *json, g2z_services *services, const char *label,
                           const void *text, size_t bytes);
G2Z_API int g2z_json_enter(g2z_json *json, char open);  /* '{' or '['; 1 on success */
/* Returns 1 at the next value; *key is its name, and `key` is NULL in an array. Returns 0 when the
 * container is closed, and after an error. */
G2Z_API int g2z_json_next(g2z_json *json, char close, g2z_json_text *key);
/* 1: the string, unescaped, is `name`. */
G2Z_API int g2z_json_is(const g2z_json_text *text, const char *name);
/* The first character of the value: { [ " t f n - or a digit; 0 after an error or at the end. */
G2Z_API char g2z_json_peek(g2z_json *json);
G2Z_API int64_t g2z_json_integer(g2z_json *json);       /* an error unless it is an int64 */
G2Z_API double g2z_json_number(g2z_json *json);
G2Z_API g2z_json_text g2z_json_string(g2z_json *json);
/* Writes the unescaped UTF-8 of a string and returns its length, at most text->bytes. `out` may
 * be the string's own memory. */
G2Z_API size_t g2z_json_unescape(const g2z_json_text *text, unsigned char *out);
G2Z_API void g2z_json_skip(g2z_json *json); /* any value; also NaN and Infinity, as in Python */
G2Z_API g2z_status g2z_json_fail(g2z_json *json, const char *format, ...) G2Z_PRINTF(2, 3);
G2Z_API g2z_status g2z_json_close(g2z_json *json);      /* also an error: text after the value */

/* The bytes of the valid UTF-8 character at `at` (before `end`); 0: there is none. */
G2Z_API size_t g2z_utf8_length(const unsigned char *at, const unsigned char *end);
/* Replaces the locale's decimal point in a number that printf wrote by ".". */
G2Z_API void g2z_plain_number(char *text);

/* The writer adds commas, indentation and escapes. key is NULL inside arrays. Numbers that JSON
 * lacks (NaN, infinities) become null. indent 0 writes one line. Errors stick in the g2z_writer,
 * and g2z_writer_commit returns them. */
typedef struct g2z_json_out {
  g2z_writer *writer;
  int indent;                             /* spaces per level; 0: one line */
  int depth;                              /* start with 0 */
  int filled;                             /* 1: the open container has a member already */
} g2z_json_out;
G2Z_API void g2z_json_begin(g2z_json_out *out, const char *key, char open);
G2Z_API void g2z_json_end(g2z_json_out *out, char close);
/* Writes null if text is NULL. */
G2Z_API void g2z_json_put_string(g2z_json_out *out, const char *key, const char *text);
G2Z_API void g2z_json_put_integer(g2z_json_out *out, const char *key, int64_t value);
G2Z_API void g2z_json_put_number(g2z_json_out *out, const char *key, double value); /* %.9g */
G2Z_API void g2z_json_put_bool(g2z_json_out *out, const char *key, int value);
/* Writes a JSON file: one object, whose members `put` writes. */
typedef void (*g2z_note)(void *user, g2z_json_out *out);
G2Z_API g2z_status g2z_json_write(g2z_services *services, const char *path, g2z_note put,
                                  void *user);

/* ===== >>d05 config ======================================================
 * Start from a _default() and change what you need: 0 is a legal warm-up, weight decay and seed. */

#define G2Z_MODEL_LIST(X)                                                                         \
  /*  name           layers heads channels */                                                     \
  X("gpt2",            12,   12,    768)                                                          \
  X("gpt2-medium",     24,   16,   1024)                                                          \
  X("gpt2-large",      36,   20,   1280)                                                          \
  X("gpt2-xl",         48,   25,   1600)

#define G2Z_DTYPE_LIST(X)                                                                         \
  X(FP32,  "fp32")                                                                                \
  X(TF32,  "tf32")                                                                                \
  X(FP16,  "fp16")                                                                                \
  X(BF16,  "bf16")

#define G2Z_SCHEDULE_LIST(X)                                                                      \
  X(SCHEDULE_COSINE,   "cosine")   /* half a cosine from lr to min_lr */                          \
  X(SCHEDULE_LINEAR,   "linear")   /* a line from lr to min_lr */                                 \
  X(SCHEDULE_CONSTANT, "constant") /* lr */                                                       \
  X(SCHEDULE_WSD,      "wsd")      /* warmup-stable-decay: a line to min_lr in the last fifth */  \
  X(SCHEDULE_POWER,    "power")    /* falls later than linear: the part left, to the power 0.7 */

/* How gradients and parameters travel between the GPUs of one host. Between hosts NCCL does it. */
#define G2Z_TRANSPORT_LIST(X)                                                                     \
  X(TRANSPORT_AUTO, "auto") /* gradients: copy; parameters: copy for few tokens, nccl for many */ \
  X(TRANSPORT_NCCL, "nccl") /* NCCL's kernels, through symmetric windows if it has them */        \
  X(TRANSPORT_COPY, "copy") /* copy engines; each GPU adds up the gradients that it receives */

#define G2Z_STRATEGY_LIST(X)                                                                      \
  X(STRATEGY_ZERO, "zero") /* ZeRO; zero_stage is its stage */                                    \
  X(STRATEGY_DP,   "dp")   /* one optimizer: rank 0 updates everything, the others wait for it */

#define G2Z_RECOMPUTE_LIST(X)                                                                     \
  X(RECOMPUTE_NONE,  "none")  /* activations are kept from forward to backward */                 \
  X(RECOMPUTE_BLOCK, "block") /* only block inputs are kept; forward runs again before backward */

/* The products of training that take 8-bit operands. These are e4m3 (4 bits of exponent, 3 of
 * fraction); gradients are e5m2. */
#define G2Z_FP8_LIST(X)                                                                           \
  X(FP8_NONE,    "none")    /* all products have operands of dtype */                             \
  X(FP8_LOGITS,  "logits")  /* the product that makes the LM head's logits */                     \
  X(FP8_FORWARD, "forward") /* logits, and the forward products qkv, attproj, fc and fcproj */    \
  X(FP8_ALL,     "all")     /* forward, and all gradients; fp16 only */

/* The first weights of wpe. With sines, attention learns sooner to find earlier tokens. */
#define G2Z_POSITIONS_LIST(X)                                                                     \
  X(POSITIONS_NORMAL, "normal") /* random, as GPT-2's: standard deviation 0.02 */                 \
  X(POSITIONS_SINES,  "sines")  /* sine and cosine waves: Vaswani et al. 2017, arXiv:1706.03762 */

#define G2Z_OPTIMIZER_LIST(X)                                                                     \
  X(OPTIMIZER_ADAMW, "adamw")                                                                     \
  X(OPTIMIZER_MUON,  "muon")  /* Muon for the blocks' matrices, AdamW for the rest */

#define G2Z_DEVICE_LIST(X)                                                                        \
  X(DEVICE_CPU,  "cpu")                                                                           \
  X(DEVICE_CUDA, "cuda")

typedef enum g2z_dtype { G2Z_DTYPE_LIST(G2Z_LIST_NAME) G2Z_DTYPE_COUNT } g2z_dtype;
typedef enum g2z_schedule { G2Z_SCHEDULE_LIST(G2Z_LIST_NAME) G2Z_SCHEDULE_COUNT } g2z_schedule;
typedef enum g2z_transport { G2Z_TRANSPORT_LIST(G2Z_LIST_NAME) G2Z_TRANSPORT_COUNT } g2z_transport;
typedef enum g2z_strategy { G2Z_STRATEGY_LIST(G2Z_LIST_NAME) G2Z_STRATEGY_COUNT } g2z_strategy;
typedef enum g2z_recompute { G2Z_RECOMPUTE_LIST(G2Z_LIST_NAME) G2Z_RECOMPUTE_COUNT } g2z_recompute;
typedef enum g2z_fp8 { G2Z_FP8_LIST(G2Z_LIST_NAME) G2Z_FP8_COUNT } g2z_fp8;
typedef enum g2z_positions { G2Z_POSITIONS_LIST(G2Z_LIST_NAME) G2Z_POSITIONS_COUNT } g2z_positions;
typedef enum g2z_optimizer { G2Z_OPTIMIZER_LIST(G2Z_LIST_NAME) G2Z_OPTIMIZER_COUNT } g2z_optimizer;
typedef enum g2z_device_kind { G2Z_DEVICE_LIST(G2Z_LIST_NAME) G2Z_DEVICE_COUNT } g2z_device_kind;

G2Z_API const char *g2z_dtype_text(g2z_dtype dtype); /* "fp16" */
/* The type in which a device trains and generates by default: fp16 on a GPU, fp32 on a CPU. */
G2Z_API g2z_dtype g2z_dtype_default(g2z_device_kind device);

/* The shape of a GPT-2. As published, LayerNorm's epsilon is 1e-5, and GELU has its tanh form. */
#define G2Z_LAYERNORM_EPS 1e-5f
#define G2Z_MAX_HEAD_SIZE 128
typedef struct g2z_model_config {
  int layers;    /* L */
  int heads;     /* NH; divides channels; channels / heads = HS, a multiple of 8 up to 128 */
  int channels;  /* C */
  int context;   /* positions in wpe: the longest sequence */
  int vocab;     /* V; in memory padded to Vp, the next multiple of 128 */
  int eot;       /* <|endoftext|>, for readers of config.json: the tokenizer's, even if V was
                  * rounded up; if the tokenizer's is outside V, the last token of V */
  uint64_t vocab_hash; /* of the vocabulary that its ids belong to; 0: not known */
} g2z_model_config;

/* One of G2Z_MODEL_LIST by name, with context 1024, vocab 50257 and eot 50256. */
G2Z_API g2z_status g2z_model_config_named(g2z_services *services, const char *name,
                                          g2z_model_config *out);

typedef struct g2z_optimizer_config {     /* papers: manual, PAPERS */
  g2z_optimizer kind;                     /* weight_decay and clip serve both */
  float lr, min_lr;                       /* peak and final learning rate; with Muon, of its
                                           * matrices. Defaults suit AdamW: give Muon 4e-3, 4e-4 */
  float adam_lr;                          /* Muon: peak rate of the weights that AdamW updates. It
                                           * follows lr's schedule, down to min_lr adam_lr / lr */
  float beta1, beta2, eps;                /* of AdamW */
  int moments_bf16;                       /* 1: AdamW's m and v are bf16, rounded at random */
  float momentum;                         /* of Muon */
  float weight_decay;                     /* decoupled; matrices only, no biases, no LayerNorm */
  float clip;                             /* global gradient norm; 0: no clipping */
  float skip_spikes;                      /* Z: skips a step whose gradient norm lies more than Z
                                           * deviations above the mean of applied steps; 0: none */
  g2z_schedule schedule;
  int64_t warmup;                         /* applied steps of linear warm-up */
  int64_t steps;                          /* the schedule's horizon, in applied steps */
  int loss_scale_dynamic;                 /* fp16 only; in other types the scale is always 1 */
  float loss_scale;                       /* the initial scale, or the fixed one */
  int loss_scale_window;                  /* good steps before it doubles */
  int loss_scale_hysteresis;              /* overflows until it halves; 1: the first halves it */
} g2z_optimizer_config;

typedef struct g2z_train_config {
  uint32_t stamp;               /* set by _default(): a config without it is refused */
  g2z_model_config model;
  int batch;                    /* B: sequences per micro-step and rank */
  int seq;                      /* T: tokens per sequence, at most model.context */
  int accum;                    /* micro-steps per step */
  g2z_optimizer_config optimizer;
  g2z_dtype dtype;              /* default: g2z_dtype_default of the device */
  g2z_fp8 fp8;                  /* in training steps only; needs fp16 (or bf16, up to FORWARD) and
                                 * a GPU of compute capability 8.9 or newer, or a CPU, which rounds
                                 * as Hopper does. Channels are a multiple of g2z_device_info.fp8.
                                 * ALL: batch x seq is a multiple of 128, and channels of 16 */
  float dropout;                /* probability, for the embedding, the attention weights and both
                                 * projections; 0: none */
  uint64_t seed;
  int zero_stage;               /* 0 to 3: see the manual, ZERO */
  g2z_strategy strategy;        /* DP: with zero_stage 0 */
  int grad_fp32;                /* 1: gradients are stored and sent in fp32 in any case */
  float bucket_mb;              /* MiB per gradient bucket; 0: max(64 MiB, 2 MB x world) */
  g2z_transport transport;      /* between GPUs. COPY rounds a sum of gradients once, NCCL once per
                                 * rank */
  g2z_recompute recompute;      /* the part of forward that runs twice: less memory, same results */
  int graph;                    /* record the step as CUDA graphs: 0 no, 1 yes, 2 (auto) on a GPU,
                                 * if the step has at most 16,384 launches and can be recorded */
  int tune;                     /* g2z_tune; ON: a GPU times the algorithms of each product once */
  const char *tuning;           /* file with an earlier run's choices, to repeat them; or NULL */
  const char *train_glob;       /* g2z_loader_config's glob; NULL: the caller passes batches */
  const char *init_from;        /* directory of model.safetensors, config.json; NULL: random */
  g2z_positions positions;      /* without init_from: the first weights of wpe */
} g2z_train_config;

/* GPT-2 124M, in the default type of the device that will train: g2z_context_config.device. */
G2Z_API g2z_train_config g2z_train_config_default(g2z_device_kind device);

/* A number or a choice of g2z_train_config. The table of all settings is in room i05. */
typedef enum g2z_setting_kind {
  G2Z_SETTING_INT, G2Z_SETTING_INT64, G2Z_SETTING_UINT64, G2Z_SETTING_FLOAT,
  G2Z_SETTING_CHOICE          /* an int or an enum: an index into `words` */
} g2z_setting_kind;

typedef enum g2z_on_resume {
  G2Z_RESUME_SAME,            /* a checkpoint with another value is refused */
  G2Z_RESUME_WARN,            /* another value changes the training: a warning */
  G2Z_RESUME_ROUNDS,          /* another value changes at most rounding: a log line */
  G2Z_RESUME_FREE             /* the value changes no result: checkpoints omit it */
} g2z_on_resume;

typedef struct g2z_setting {
  const char *name;           /* as in sentences and checkpoints */
  g2z_setting_kind kind;
  size_t at;                  /* offset in g2z_train_config */
  const char *standard;       /* the default; NULL: it depends on the device */
  double least, most;         /* inclusive bounds; none if they are equal */
  const char *words;          /* of a CHOICE: "|none|block" */
  g2z_on_resume on_resume;
} g2z_setting;

/* Word number `index` of a list such as "|none|block", and its length. NULL: no such word, or no
 * list. */
G2Z_API const char *g2z_word(const char *words, int index, size_t *length);
/* The index of text[0 .. bytes) in such a list; -1: no such word. */
G2Z_API int g2z_word_find(const char *words, const char *text, size_t bytes);
/* The setting with that name, or NULL. */
G2Z_API const g2z_setting *g2z_setting_find(const char *name);

/* The learning rate of applied step `applied` (0 is the first): warm-up, then the schedule. */
static inline G2Z_HOST_DEVICE float g2z_schedule_lr(const g2z_optimizer_config *config,
                                                    int64_t applied) {
  if (applied < config->warmup)
    return (float)(config->lr * (double)(applied + 1) / (double)config->warmup);
  double span = (double)(config->steps - config->warmup);
  double done = 1.0;
  if (span > 0) done = (double)(applied - config->warmup) / span;
  if (done > 1.0) done = 1.0;
  double left = 1.0 - done;                /* 1 at the end of warm-up, 0 at the horizon */
  switch (config->schedule) {
    case G2Z_SCHEDULE_COSINE:
      left = 0.5 + 0.5 * cos(3.14159265358979323846 * (1.0 - left));
      break;
    case G2Z_SCHEDULE_CONSTANT:
      left = 1.0;
      break;
    case G2Z_SCHEDULE_WSD:
      left = left < 0.2 ? left / 0.2 : 1.0;
      break;
    case G2Z_SCHEDULE_POWER:
      left = pow(left, 0.7);
      break;
    case G2Z_SCHEDULE_LINEAR:
    case G2Z_SCHEDULE_COUNT:
      break;
  }
  return (float)(config->min_lr + (double)(config->lr - config->min_lr) * left);
}

/* ===== >>d06 plan ========================================================
 * Where everything lies in memory: a pure function of config, world size, stage and type. Only the
 * size of a CPU's scratch also depends on the process's number of threads. The plan fills tables
 * once; the allocator, the trainer, the files, --dry-run and the tests read them.
 *
 * Parameters are one flat list, ordered as backward completes their gradients: unit 0 is the final
 * LayerNorm, units 1..L are blocks L-1..0, then wpe, then wte. Inside a unit parameters stand in
 * G2Z_PARAM_LIST order. An element of this list has two indices:
 * canonical   Its index in the unpadded list, the same for every world, stage and bucket size.
 *             Files use only canonical ranges.
 * memory      Its index in this run's padded list. wte's rows V..Vp-1 are padding that stays zero.
 *             Stages 0 and 1 also pad before and after wte; stages 2 and 3 pad each unit to a
 *             multiple of 8*slices.
 *
 * bucket      A range of memory that is reduced in one collective: at most bucket_elements, a
 *             multiple of 8*slices, so that each of `slices` equal slices starts on 16 bytes.
 *             plan.owner sets the part of it that a rank owns: its slice, all or nothing. master
 *             and m hold a rank's parts one after the other.
 * home        The rank that orthogonalizes a weight for Muon (page). `route` lists the pieces of
 *             weights that travel between owners and homes. If an owner has whole weights (stage 0,
 *             dp, one rank), it is their home, and nothing travels.
 * A parameter lies at unit[u].param_at + offset[p], its gradient at unit[u].grad_at + offset[p]. */

#define G2Z_PARAM_LIST(X)                                                                         \
  /*  name      unit   rank  rows  cols  init       decay  muon  Hugging Face name */             \
  X(LNFW,      LNF,    1,    1,    C,    ONES,      0,     0,    "ln_f.weight")                   \
  X(LNFB,      LNF,    1,    1,    C,    ZEROS,     0,     0,    "ln_f.bias")                     \
  X(FCPROJB,   BLOCK,  1,    1,    C,    ZEROS,     0,     0,    "mlp.c_proj.bias")               \
  X(FCPROJW,   BLOCK,  2,    4*C,  C,    RESIDUAL,  1,     1,    "mlp.c_proj.weight")             \
  X(FCB,       BLOCK,  1,    1,    4*C,  ZEROS,     0,     0,    "mlp.c_fc.bias")                 \
  X(FCW,       BLOCK,  2,    C,    4*C,  NORMAL,    1,     1,    "mlp.c_fc.weight")               \
  X(LN2W,      BLOCK,  1,    1,    C,    ONES,      0,     0,    "ln_2.weight")                   \
  X(LN2B,      BLOCK,  1,    1,    C,    ZEROS,     0,     0,    "ln_2.bias")                     \
  X(ATTPROJB,  BLOCK,  1,    1,    C,    ZEROS,     0,     0,    "attn.c_proj.bias")              \
  X(ATTPROJW,  BLOCK,  2,    C,    C,    RESIDUAL,  1,     1,    "attn.c_proj.weight")            \
  X(QKVB,      BLOCK,  1,    1,    3*C,  ZEROS,     0,     0,    "attn.c_attn.bias")              \
  X(QKVW,      BLOCK,  2,    C,    3*C,  NORMAL,    1,     3,    "attn.c_attn.weight")            \
  X(LN1W,      BLOCK,  1,    1,    C,    ONES,      0,     0,    "ln_1.weight")                   \
  X(LN1B,      BLOCK,  1,    1,    C,    ZEROS,     0,     0,    "ln_1.bias")                     \
  X(WPE,       WPE,    2,    CTX,  C,    POSITIONS, 1,     0,    "wpe.weight")                    \
  X(WTE,       WTE,    2,    V,    C,    NORMAL,    1,     0,    "wte.weight")

typedef enum g2z_unit_kind {
  G2Z_UNIT_LNF,
  G2Z_UNIT_BLOCK,
  G2Z_UNIT_WPE,
  G2Z_UNIT_WTE
} g2z_unit_kind;
typedef enum g2z_init {
  G2Z_INIT_ZEROS,
  G2Z_INIT_ONES,
  G2Z_INIT_NORMAL,              /* standard deviation 0.02 */
  G2Z_INIT_RESIDUAL,            /* 0.02 / sqrt(2 L) */
  G2Z_INIT_POSITIONS            /* as NORMAL, or sines: g2z_train_config.positions */
} g2z_init;
typedef enum g2z_param { G2Z_PARAM_LIST(G2Z_LIST_NAME) G2Z_PARAM_COUNT } g2z_param;

typedef struct g2z_param_info { /* a row of the table, for one model */
  const char *name;             /* "QKVW" */
  const char *hf_name;          /* "attn.c_attn.weight"; files put "h.N." before it in a block */
  g2z_unit_kind unit;
  g2z_init init;
  int decay;                    /* 1: weight decay applies */
  int muon;                     /* number of matrices for Muon, side by side in columns; 0: AdamW */
  int rank;                     /* dimensions: 1 or 2 */
  size_t rows, cols, elements;  /* unpadded */
} g2z_param_info;

/* Kinds of memory, counted in bytes per rank. */
#define G2Z_MEMORY_LIST(X)                                                                        \
  X(MEMORY_PARAMS,      "parameters")                                                             \
  X(MEMORY_GRADS,       "gradients")/* with the memory that sends and receives one bucket */      \
  X(MEMORY_OPTIMIZER,   "master weights in fp32, m and v")                                        \
  X(MEMORY_ACTIVATIONS, "activations")                                                            \
  X(MEMORY_HEAD,        "LM head: chunk of logits, and wte's fp32 gradient if separate")          \
  X(MEMORY_BATCHES,     "token batches and step state")                                           \
  X(MEMORY_SCRATCH,     "scratch of the ops, and CUDA graphs")
typedef enum g2z_memory { G2Z_MEMORY_LIST(G2Z_LIST_NAME) G2Z_MEMORY_COUNT } g2z_memory;

/* Which of a buffer's n elements a rank owns: the rule of REDUCE and GATHER (d11). To shard in
 * another way, for example inside each node, add a row and set plan->slice and ->slices. Other code
 * asks for SLICES, or divides by the world: plan_owned(), plan_fill(), plan_homes(), plan_bytes()
 * and g2z_plan_create() (i06), which gets no local rank; plan_give_homes() and plan_routes(), where
 * a slice's number is a rank; star_reduce(), star_rows() and call_span() (i11); room k80;
 * verdict.owners, whose rows are the first ones, and trainer_rehearse() (i14); saver_begin() (i16).
 */
typedef enum g2z_owner {
  G2Z_OWNER_SLICES,            /* rank r owns slice r, n / slices elements */
  G2Z_OWNER_ALL,               /* each rank owns all */
  G2Z_OWNER_ROOT,              /* rank 0 owns all */
  G2Z_OWNER_COUNT
} g2z_owner;

typedef struct g2z_unit {         /* a part of the model whose gradients complete together */
  g2z_unit_kind kind;
  int gathered;                   /* 1: gathered for each pass into one of two buffers (stage 3) */
  int bucket;                     /* the bucket where it begins */
  size_t begin, canonical;        /* index of its first element: in memory, and canonical */
  size_t elements, padded;        /* without and with padding to a multiple of 8*slices */
  size_t param_at, grad_at;       /* its index in this rank's parameters and gradients */
} g2z_unit;

typedef struct g2z_bucket {       /* a range of gradients that is reduced in one collective */
  size_t begin, elements;         /* in memory */
  size_t own_begin, own_elements; /* this rank's slice of it, in memory */
  size_t param_at, own_param_at;  /* index of the bucket, of the slice, in this rank's parameters */
  size_t grad_at, sum_at;         /* the bucket's index in the gradients, the slice's in the sums */
  size_t shard_at;                /* the slice's index in master and m */
  size_t first_update[G2Z_OPTIMIZER_COUNT]; /* index of the slice's first range of each optimizer */
  int unit, last_unit;            /* it begins in `unit`; last_unit's backward pass completes it */
} g2z_bucket;

/* A range that the optimizer updates: of this rank's slices without padding, cut where weight decay
 * changes and, if other ranks wait for parameters, where buckets end. Muon's lies in one weight. */
typedef struct g2z_update_range {
  /* Indices of its first element, as in g2z_bucket. AdamW: v_at, in v, which has no elements for
   * Muon's weights. Muon: u_at, in u and O. */
  size_t own_param_at, sum_at, shard_at, v_at, u_at;
  size_t canonical;
  size_t elements;
  int decay;
  float scale;       /* Muon: O's factor, 0.2 sqrt(columns of a matrix); AdamW: 0 */
} g2z_update_range;

/* A weight that Muon updates, and its home. */
typedef struct g2z_weight {
  int unit;
  g2z_param param;
  int home;          /* a rank; -1: each owner has the whole weight */
  size_t home_at;    /* its first element in the home's area */
} g2z_weight;

/* A piece of a weight: elements [owner_at, owner_at + elements) of the owner's u, and [home_at,
 * home_at + elements) of the home's area. All three are multiples of 8. */
typedef struct g2z_route {
  int owner, home;   /* ranks; they may be the same */
  size_t owner_at, home_at, elements;
} g2z_route;

/* Weights of one shape that lie one after the other in the home's area. */
typedef struct g2z_matrices {
  size_t at;         /* the first element */
  int weights;
  int rows, columns; /* of a weight */
  int matrices;      /* per weight: [rows, columns / matrices] each, side by side in its rows */
} g2z_matrices;

typedef struct g2z_plan {
  g2z_services *services;
  g2z_model_config model;

  /* ----- the job and its stage ----- */
  g2z_device_kind device;
  int rank, world, zero_stage;
  int local_world;                /* ranks on this rank's host; 0: not known */
  int slice, slices;              /* of each bucket: the number of this rank's slice, and how many
                                   * slices there are. They equal rank and world */
  g2z_strategy strategy;
  g2z_owner owner;                /* the ranks that get a bucket's sum and send its parameters */
  int by_unit;                    /* 1 from stage 2 on: units share two gradient buffers. A unit's
                                   * gradient leaves its buffer in each micro-step, and its sum goes
                                   * into a shard. Each unit is padded and reduced separately */
  int gathers;                    /* 1: a rank waits for parameters that other ranks update */
  g2z_transport transport;        /* the config's; NCCL if no rank owns a slice, or if the ranks
                                   * are on several hosts */
  /* The transports of gradients and of parameters, chosen from `transport`: COPY or NCCL. COPY
   * needs an inbox for gradients. GPUs that cannot write to each other use NCCL instead. */
  g2z_transport reduce, gather;
  int graphed;                    /* 1: a step is recorded as CUDA graphs, and played */
  size_t launches;                /* about the number of kernels in a step */

  /* ----- a pass ----- */
  int batch, seq, accum;          /* B, T, micro-steps */
  size_t tokens;                  /* B T */
  int64_t step_tokens;            /* of all ranks and micro-steps */
  int vocab_padded;               /* Vp */
  int head_chunk;                 /* tokens whose logits exist at the same time */
  int dropout;                    /* 1: dropout is on */
  g2z_recompute recompute;        /* BLOCK: keeps one block's activations and every block's input */
  int forward_only;               /* 1: no backward pass follows */
  int cached;                     /* sequences of `seq` tokens in the key-value cache; 0: none */

  /* ----- types ----- */
  g2z_dtype dtype;                /* of parameters and activations */
  g2z_dtype grad_dtype;           /* fp32 if TF32, grad_fp32 or accum > 2; else dtype */
  g2z_dtype wire_dtype;           /* NCCL and CPU ranks round gradients to it before they travel:
                                   * fp32 if TF32 or grad_fp32; else dtype */
  g2z_dtype dwte_dtype;           /* of the LM head's part of wte's gradient: fp32, or grad_dtype if
                                   * nothing is added before it is sent */
  g2z_fp8 fp8;                    /* needs more scratch */
  size_t dtype_bytes, grad_bytes; /* per element in memory: 4 on the CPU, which stores fp32 */

  /* ----- sizes ----- */
  size_t parameters;              /* of the model: canonical */
  size_t elements;                /* in memory: with padding */
  size_t param_elements;          /* of the parameters' buffer */
  size_t slices_at;               /* where this rank's slices of gathered units begin in it */
  size_t grad_elements;           /* of the buffer that backward writes to */
  size_t bucket_elements;         /* of a full bucket */
  size_t shard_elements;          /* of all this rank's slices */
  size_t logits_bytes;            /* of the logits' memory; wte_rows and Muon use it, too */
  int wte_rows;                   /* 1: the embedding's part of wte's gradient is sent separately,
                                   * one row per token of each rank; 0: with the head's part */
  /* If wte_rows, the memory of the logits holds the row_count rows of all ranks, then at
   * row_tokens_at their tokens, then at row_order_at the order of these tokens, as embed_order
   * writes it. Both are offsets in bytes. */
  size_t row_count, row_tokens_at, row_order_at;
  size_t narrow_bytes;            /* of the blocks' 8-bit weights; 0: products round them */
  size_t bytes[G2Z_MEMORY_COUNT]; /* per rank */
  size_t bytes_total;
  size_t nccl_bytes;              /* in addition: what NCCL 2.28 takes of each GPU. A single process
                                   * cannot measure it, so it is fixed: 390 MiB for a communicator,
                                   * 800 after its kernels have carried something large, as they do
                                   * when Muon's weights travel */

  /* ----- tables; `unit` and `bucket` have one more entry, which begins where the last one ends */
  int units, buckets;             /* units: L + 3 */
  int wpe, wte;                   /* the last two units */
  int early;                      /* the step updates and shares buckets from this one on before the
                                   * others. Muon: wte's. AdamW: block 0's, wpe's and wte's, which
                                   * forward reads first; if !gathers, all */
  size_t updates;                 /* ranges; those from `muon_updates` on are Muon's */
  size_t muon_updates;
  g2z_unit *unit;                 /* [units + 1] */
  g2z_bucket *bucket;             /* [buckets + 1] */
  g2z_update_range *update;       /* [updates] */
  size_t offset[G2Z_PARAM_COUNT]; /* of each parameter inside its unit */

  /* ----- Muon ----- */
  g2z_optimizer optimizer;
  int muon_weights;               /* number of weights that Muon updates: 4 per block, or 0 */
  size_t u_bytes;                 /* per element of u and O: 2, bf16; 4 on a CPU, fp32 */
  size_t moment_bytes;            /* of an element of m and v: 4, or 2 for bf16 on a GPU */
  size_t v_elements;              /* of v: shard_elements without Muon's weights */
  /* Muon's areas, in bytes from the start of the logits' memory. At 0 lie the weights at home on
   * this rank, at work_begin the scratch of orthogonalize, at u_begin u and O of this rank's
   * slices. Without routes u and O are the weights at home: u_begin is 0. With routes they
   * share the scratch's memory: u leaves before orthogonalize runs, and O returns after it. */
  size_t u_begin, work_begin, work_bytes;
  int shapes, routes;
  g2z_weight *weight;             /* [muon_weights], in the order of memory */
  g2z_matrices shape[4];          /* [shapes]: the weights at home on this rank */
  g2z_route *route;               /* [routes], the same on all ranks; none: nothing travels */
} g2z_plan;

typedef struct g2z_range {
  size_t begin, elements;
} g2z_range;

/* The plan of a config for one rank of `world`, of which local_world share this rank's host (0: not
 * known, planned as one host). Checks the config first. */
G2Z_API g2z_status g2z_plan_create(g2z_services *services, const g2z_train_config *config,
                                   g2z_device_kind device, int rank, int world, int local_world,
                                   g2z_plan **out);
G2Z_API void g2z_plan_free(g2z_plan *plan); /* NULL is fine */
/* Returns G2Z_NO_MEMORY unless the plan of `config` fits into `free_bytes`; the sentence names the
 * batch, recomputation and ZeRO stages that would fit. sharing: ranks that share host memory. */
G2Z_API g2z_status g2z_plan_fits(g2z_services *services, const g2z_train_config *config,
                                 const g2z_plan *plan, size_t free_bytes, int sharing);
/* The largest B whose plan fits into `free_bytes` together with NCCL's memory; 0: none fits. */
G2Z_API int g2z_plan_largest_batch(const g2z_plan *plan, size_t free_bytes);

/* ===== >>d07 shards and loader ===========================================
 * Shards are files of uint16 tokens (manual, FILE FORMATS); the content shows whether there is
 * llm.c's header. A loader refuses shards of two vocabularies. A sequence is T+1 consecutive tokens
 * of one shard: x, and y one token later. Sequence i of a shard starts at token i*T, so a shard of
 * n tokens holds (n-1)/T sequences. Training skips the rest, which is fewer than T+1 tokens.
 *
 * A shard NAME.bin may have a mask next to it, NAME.mask, with one bit per token. A token that does
 * not count still stands in x, but is no target: its y is -1. Without a mask all tokens count.
 *
 * Step s of an epoch takes positions [s*G, (s+1)*G) of its order, where G = batch * accum * world;
 * position j of these belongs to rank j % world. There are two orders:
 *   SHUFFLED   For training: a permutation of the sequences keyed by (seed, epoch). It omits its
 *              last N % G sequences, which differ from epoch to epoch.
 *   FILE       For validation: every token of every shard is a target once, except a shard's first.
 *              A shard's last sequence may be shorter than T, and the last step may have fewer than
 *              G sequences: both are filled up with token 0 and targets of -1.
 *
 * SHUFFLED also mixes sets of shards by weight: the glob then has a line PATTERN:WEIGHT per set. A
 * mixture has one epoch without end. The next sequence depends only on the number of sequences read
 * before it, so every world reads the same order. Each set has its own passes over its sequences,
 * and every pass has its own shuffle.
 *
 * A prefetch thread reads ahead. Its errors (a file that shrank, a token beyond the vocabulary)
 * are returned by the call that needs the data. Shards must stay as they are during a run: if the
 * inode or the time of change (st_ctime) of a shard or its mask is another than when it was last
 * read, the loader hashes the samples again that make up `data`. If they differ, it fails. So a
 * shard may be touched or copied anew, but not replaced by another. */

typedef enum g2z_shard_format { G2Z_SHARD_LLMC, G2Z_SHARD_RAW } g2z_shard_format;

typedef struct g2z_shard_writer g2z_shard_writer;
/* vocab_hash: the hash of the vocabulary, for llm.c's header; 0: unknown. */
G2Z_API g2z_status g2z_shard_writer_create(g2z_services *services, const char *path,
                                           g2z_shard_format format, uint64_t vocab_hash,
                                           g2z_shard_writer **out);
/* ids are 0..65535; with G2Z_UNCOUNTED added, the token does not count. A shard with such tokens
 * gets a mask; the commit of any other shard removes an earlier mask of this name. A call that
 * fails for lack of memory appends nothing; after a failure of the disk the commit fails, too. */
#define G2Z_UNCOUNTED (1 << 30)
G2Z_API g2z_status g2z_shard_writer_append(g2z_shard_writer *writer, const int32_t *ids,
                                           size_t count);
/* Does all of a commit except the rename, for shards that are committed together at the end.
 * unlock: 1 also closes the file and releases its lock; another writer could then take the name. */
G2Z_API g2z_status g2z_shard_writer_finish(g2z_shard_writer *writer, int unlock);
G2Z_API g2z_status g2z_shard_writer_commit(g2z_shard_writer *writer); /* header, fsync, rename */
G2Z_API void g2z_shard_writer_free(g2z_shard_writer *writer); /* removes an uncommitted file */
/* Adds G2Z_UNCOUNTED to each id that the shard's mask excludes; `ids` are all its tokens. */
G2Z_API g2z_status g2z_shard_mask(g2z_services *services, const char *path, int32_t *ids,
                                  size_t count);

typedef enum g2z_order { G2Z_ORDER_FILE, G2Z_ORDER_SHUFFLED } g2z_order;

typedef struct g2z_loader_config {
  const char *glob;             /* a file or a pattern, read in the order of names; or, in SHUFFLED
                                 * order, several with weights: "web_*.bin:0.7\ncode_*.bin:0.3" */
  int batch, seq, accum;        /* B, T, micro-steps */
  int rank, world;
  int vocab;                    /* every token must be smaller */
  g2z_order order;
  uint64_t seed;
} g2z_loader_config;

typedef struct g2z_loader_position { /* the step that is read next; checkpoints keep it */
  int64_t epoch, step;
} g2z_loader_position;

#define G2Z_SETS 16
typedef struct g2z_loader_set { /* shards of one pattern */
  const char *glob, *weight;    /* the pattern; its weight as text, "" without weights */
  double share;                 /* of all sequences, by the weights; NaN without weights */
  uint64_t part;                /* of the sequences that the sets before it leave, times 2^32 */
  int64_t tokens;               /* in its shards */
  int64_t first, sequences;     /* N_k, and the number of the first one among all sets' */
} g2z_loader_set;

typedef struct g2z_loader {     /* only the functions below write it */
  g2z_loader_config config;     /* the caller's, except glob: NULL */
  int64_t tokens;               /* in all shards */
  int64_t sequences;            /* N */
  int64_t rows;                 /* of x and y: accum * B */
  int64_t global;               /* G */
  int64_t steps_per_epoch;      /* N / G, at least 1; in FILE order rounded up; 2^60 / G if mixed */
  g2z_loader_position position; /* of the step that g2z_loader_next returns next */
  uint64_t data;                /* hash of each shard's length, first and last tokens, samples */
  uint64_t vocab_hash;          /* from the shards' headers; 0: none has it */
  const char *vocab_shard;      /* a shard that has it */
  g2z_loader_set set[G2Z_SETS];
  int sets, mixed;              /* number of sets; 1: they have weights */
  struct g2z__prefetch *reader;
} g2z_loader;

G2Z_API g2z_status g2z_loader_create(g2z_services *services, const g2z_loader_config *config,
                                     g2z_loader **out);
G2Z_API void g2z_loader_free(g2z_loader *loader); /* NULL is fine */
/* The tokens of the next step: x and y, each [accum, B, T], stay valid until the next call. */
G2Z_API g2z_status g2z_loader_next(g2z_loader *loader, const int32_t **x, const int32_t **y);
G2Z_API g2z_status g2z_loader_seek(g2z_loader *loader, g2z_loader_position position);
/* Of a mixture: the number of sequences that each set gives to the steps before the position. */
G2Z_API void g2z_loader_count(const g2z_loader *loader, int64_t counts[G2Z_SETS]);
/* Refuses training data and validation data that share a file, even under two names. A pattern that
 * matches no file passes: the loader reports it. */
G2Z_API g2z_status g2z_shards_apart(g2z_services *services, const char *train, const char *val);

/* ===== >>d08 op table ====================================================
 * The model is written once, with these ops; CPU and CUDA each fill the table. Op X of a CPU is
 * g2z__cpu_X (room 09), of a GPU g2z_cuda_X (gpt2_zero_kernels.cuh). An op enqueues its work and
 * returns. Its results are valid after wait() or synchronize(). All pointers are to device memory,
 * except those marked host.
 *
 * Types: "act" is the device's dtype, "grad" its grad_dtype; f32 and f64 are fp32 and fp64. The CPU
 * stores act and grad as fp32 and rounds every output to a value of its type.
 * Layouts are row-major, outputs come first, N = B*T. Weights are [in, out], as Hugging Face's
 * Conv1D. G2Z_OVERWRITE means =, G2Z_ACCUMULATE means +=; the mode of an op also holds for its bias
 * or norm gradients. Sums run in an order that depends only on shapes: bitwise repeatable.
 *
 * NUMERICS: the type of every value, and when it is rounded ("act" is --dtype)
 *   parameters                    act        once, from the master weights, in the update
 *   every op's output             act        once; inside an op everything is fp32
 *                                            (a CPU's norms, softmax and column sums: fp64)
 *   GELU and its slope, Hopper    act        fp16 only: computed in fp16, within 0.0025 and 0.003
 *                                            (up to inputs of 5)
 *   residual stream               act        after each addition
 *   LayerNorm mean, rstd          fp32       never rounded
 *   attention scores, softmax     fp32       lse is fp32; out is act. On tensor cores the weights
 *                                            are rounded to act before they multiply V
 *   logits                        act        the softmax starts from the rounded logits
 *   gradient of logits            act        after multiplication by the loss scale
 *     on Hopper, in 16 bits,      act        replaces both: exp(logit - the row's reference), of a
 *     unless tune is off; with               logit in fp32, or with fp8 on other GPUs in act. The
 *     fp8 on all GPUs                        gradient's other factors multiply dh and the rows of
 *                                            h; these rows are rounded again
 *   operands of logits,           e4m3       in training only: rows of h times powers of two,
 *     fp8=logits                             wte times 32. Hopper's 8-bit sums keep 14 bits
 *   operands of qkv, attproj,     e4m3       in training only: inputs times 4, weights times 32;
 *     fc, fcproj, fp8=forward                clamped to 448, the largest of e4m3. A step counts
 *                                            inputs of 108 or more and weights, wte's too, of 13.5
 *                                            or more, which become 448: see g2z_report
 *   gradients that enter qkv,     e5m2       clamped to 57344. Weight gradients multiply them by
 *     attproj, fc, fcproj, fp8=all           the inputs in e4m3. fc's is also rounded to act before
 *                                            the slope multiplies it; its bias gradient adds four
 *                                            rows in act, the sums in fp32
 *   operands of the LM head's     e4m3       h times 2^9 over its row's sum of exponentials, wte
 *     gradients, fp8=all                     times 32; clamped to 448
 *     exponentials                e5m2       in dh a target's term is not rounded
 *   weight and bias gradients     grad type  act; fp32 with --accum > 2, tf32 or --grad-dtype fp32
 *   their sums over the ranks     grad type  copy engines: summed in fp32, rounded once. NCCL:
 *                                            rounded to act before they travel, and perhaps at
 *                                            each hop; not with --grad-dtype fp32
 *   wte's gradient                fp32       LM head's chunks and embedding add up in fp32; cast
 *                                            to the grad type once, at the end
 *     with few tokens             grad type  the LM head's part is rounded, then summed over the
 *                                            ranks; the embedding's rows (act) are added to it
 *                                            in fp32 and rounded once
 *   token losses                  fp32       their sum is fp64
 *   sum of squares of gradients   fp64
 *   master, m, v, AdamW           fp32       with moments=bf16 m and v are rounded at random: up or
 *                                            down, so that the mean stays
 *   Muon's u, X and O             bf16       sums of products in fp32; fp32 on a CPU
 *   fp16 has 5 exponent bits, so the loss is multiplied by a scale (Micikevicius et al. 2018,
 *   arXiv:1710.03740): 2^16 first, doubled after loss_scale_window good steps, halved when a
 *   gradient is not finite (from the loss_scale_hysteresis-th time on), never below 1. In every
 *   type a step whose gradients are not finite is skipped: weights, m, v, AdamW's count and the
 *   schedule stay. A step without a target that counts is skipped, too: its loss is NaN, and the
 *   loss scale stays. After 50 skips in a row at a scale that cannot shrink, a step returns
 *   G2Z_DIVERGED. A loss of NaN is a result, not an error.
 *   tf32 is fp32, but products round their inputs to 10 bits of mantissa: GPUs only. */

typedef enum g2z_write { G2Z_OVERWRITE, G2Z_ACCUMULATE } g2z_write;

/* The state of the step. It is in device memory, so no op and no decision waits for the host. */
typedef struct g2z_step_state {
  int64_t step;              /* steps finished, applied or skipped; dropout depends on it */
  int64_t applied;           /* steps applied; for AdamW's bias correction and the schedule */
  int64_t skipped;           /* steps skipped in total */
  int64_t counted;           /* last step: targets of all ranks that are not -1 */
  int32_t skipped_at_minimum;/* in a row, while the loss scale could not shrink further */
  int32_t good_steps;        /* in a row, since the scale grew or gradients were not finite */
  int32_t hysteresis;        /* overflows left before the scale halves */
  int32_t skip;              /* verdict on the last step. 0: applied. 1: its gradients were not
                              * finite, no target counted, or a rank failed in it. 2: a spike */
  int32_t status;            /* of the last step: the g2z_status of the rank that failed in it */
  int32_t stop;              /* of the last step. 1: a rank was asked to stop */
  float loss_scale;          /* multiplies the loss gradient of the step that runs */
  float grad_multiplier;     /* of gradients: clip factor / loss scale x targets / `counted` */
  float loss;                /* last step: mean loss of the targets that count; NaN: none counts */
  float grad_norm;           /* last step: global norm, unscaled, before clipping */
  float lr;                  /* last step: learning rate, also of a skipped step */
  float used_loss_scale;     /* last step */
  /* Moving average of grad_norm and its standard deviation over about the last 100 applied steps.
   * With skip_spikes Z, once 20 norms were counted, grad_norm > mean + Z deviations is a spike.
   * After 20 spikes in a row the next step is applied, and the statistics start again with it. */
  float norm_mean, norm_deviation;
  int64_t normed;            /* number of norms in the statistics, at most 100 */
  int32_t spikes_in_row;
  int32_t spikes;            /* in total; `skipped` counts them, too */
  int64_t clamped_inputs;    /* last step: numbers that 8 bits clamp, as in g2z_report */
  int64_t clamped_weights;
} g2z_step_state;

/* The ranks' votes on a step that is about to end: one row of doubles per rank. */
enum {
  G2Z_VERDICT_LOSS,          /* sum of the losses of its tokens, all micro-steps together */
  G2Z_VERDICT_SQUARES,       /* sum of squares of the gradients that the rank owns */
  G2Z_VERDICT_CLAMPED_INPUTS,  /* numbers that its forward passes clamped in 8 bits */
  G2Z_VERDICT_CLAMPED_WEIGHTS, /* the same for weights: all ranks count the same ones */
  G2Z_VERDICT_STATUS,        /* the rank's g2z_status; not G2Z_OK: the step is skipped */
  G2Z_VERDICT_STOP,          /* 1: the rank was asked to stop */
  G2Z_VERDICT_MASKED,        /* targets of -1: gradients and losses are means over the others */
  G2Z_VERDICT_COLUMNS,
  G2Z_VERDICT_SUMS = G2Z_VERDICT_STATUS /* number of the first columns, which a step zeroes first */
};
typedef struct g2z_verdict {
  double *rows;              /* device, [world, G2Z_VERDICT_COLUMNS] */
  int world;
  int owners;                /* rows whose squares count: 1 if all ranks own the same elements */
  g2z_step_state *reported[2]; /* from allocate_host(): the state after the decision of an even and
                                * of an odd step; or both NULL */
} g2z_verdict;

/* Dropout. Its masks are never stored, but computed again wherever they are needed. Element e of
 * sequence s at a site is kept when g2z_uniform(philox(seed, DROPOUT, {e / 4, s, site, step})[e %
 * 4]) >= probability, and scaled by 1 / (1 - probability). e = t*C + c for rows, (h*T + query)*T +
 * key for attention; it is below 2^34, since e / 4 has 32 bits. */
typedef struct g2z_dropout {
  float probability;             /* 0: off, and nothing below is read */
  uint32_t site;                 /* which dropout of the model */
  uint32_t first, stride;        /* sequence b of the op is sequence first + b*stride of the step */
  int seq;                       /* T: rows per sequence */
  uint64_t seed;
  const g2z_step_state *state;   /* device: the step */
} g2z_dropout;

/* Elements [first, first + elements) of wte's gradient [Vp, C] lie at element `at` of a buffer. All
 * three are multiples of 8. */
typedef struct g2z_row_part {
  size_t first, elements, at;
} g2z_row_part;

/* Operands of AdamW and Muon, in device memory except config and host_ranges (a copy of ranges). */
typedef struct g2z_update {
  void *params;                  /* act out */
  float *master;                 /* in place, as m and v */
  void *m, *v;                   /* f32, or config->moments_bf16, which a CPU stores as f32 */
  const void *sums;
  const g2z_update_range *ranges, *host_ranges;
  const g2z_optimizer_config *config;
  const g2z_step_state *state;
} g2z_update;

/* The parts of a step, for profilers (NVTX, on a GPU) and the device's own timers. A span may
 * contain other spans, but not itself. Spans inside a graph are neither traced nor timed. */
#define G2Z_SPAN_LIST(X)                                                                          \
  /*  name            text */                                                                     \
  X(SPAN_FORWARD,        "train/forward")                                                         \
  X(SPAN_BACKWARD,       "train/backward")                                                        \
  X(SPAN_OPTIMIZER_STEP, "train/optimizer_step")                                                  \
  X(SPAN_NORM,           "optimizer/norm")                                                        \
  X(SPAN_DECIDE,         "optimizer/decide")                                                      \
  X(SPAN_ADAMW,          "optimizer/adamw")                                                       \
  X(SPAN_MOMENTUM,       "optimizer/momentum")                                                    \
  X(SPAN_ORTHOGONALIZE,  "optimizer/orthogonalize")                                               \
  X(SPAN_MUON,           "optimizer/muon")                                                        \
  X(SPAN_VAL_FORWARD,    "val/forward")                                                           \
  X(SPAN_REDUCE_SCATTER, "zero/reduce_scatter")                                                   \
  X(SPAN_ALL_REDUCE,     "zero/all_reduce")                                                       \
  X(SPAN_ALL_GATHER,     "zero/all_gather")                                                       \
  X(SPAN_REDUCE,         "zero/reduce")                                                           \
  X(SPAN_BROADCAST,      "zero/broadcast")                                                        \
  X(SPAN_EMBEDDING_ROWS, "zero/embedding_rows")                                                   \
  X(SPAN_EXCHANGE,       "zero/exchange")                                                         \
  X(SPAN_VERDICT,        "zero/verdict")

typedef enum g2z_span { G2Z_SPAN_LIST(G2Z_LIST_NAME) G2Z_SPAN_COUNT } g2z_span;

/* A GPU times the algorithms of a product when its shape first appears while tuning is ON, and
 * keeps the fastest; choices made while it was OFF are made again. The choice changes the order of
 * addition: to repeat a run to the bit, read its table. */
typedef enum g2z_tune {
  G2Z_TUNE_OFF,                /* the library's first choice: best for shapes that appear once, as
                                * in generation. The LM head then stores logits on Hopper, too */
  G2Z_TUNE_ON,                 /* the fastest of the library's algorithms and our own kernel. On
                                * Hopper, for 16-bit gradients, the LM head's exponentials always
                                * come from our own kernel */
  G2Z_TUNE_OWN                 /* to test our own kernel: it computes all products that it can */
} g2z_tune;

typedef struct g2z_graph g2z_graph;

typedef struct g2z_device g2z_device;

/* How to draw tokens from logits. */
typedef struct g2z_sampling {
  float temperature;   /* 0: always the likeliest token */
  int top_k;           /* 0: all; else the k likeliest tokens, and tokens as likely as the k-th */
  float top_p;         /* 1: all; else the likeliest tokens, as few as together have this
                        * probability, and tokens as likely as the last of them */
  uint64_t seed;
  int stop;            /* g2z_model_generate: the token that ends a sequence; -1: none does */
} g2z_sampling;

/* Bytes of a row of n 8-bit numbers. */
#define G2Z_NARROW_ROW(n) (((size_t)(n) + 15) / 16 * 16)

/* ----- operands ---------------------------------------------------------
 * Each op with many operands takes a struct of its name, so that a call names what it passes. A
 * member that a call leaves out is 0: no pointer, G2Z_OVERWRITE, no dropout. The op asserts that
 * sizes and pointers are there, except pointers that may be NULL, in brackets here.
 *
 * `narrow` is an 8-bit copy that one op writes and the next product reads: activations times 4 in
 * e4m3, gradients in e5m2. A row of n takes G2Z_NARROW_ROW(n) bytes. A CPU neither writes nor reads
 * it: its products round x and dy themselves. With fp8=all N is a multiple of 128 and n of 16, in
 * products with a slope of 64, and `narrow` may be the tensor [N,n] itself. Then its 8-bit rows
 * [N,n] and, after them, columns [n,N] replace it. Columns have another order of tokens within each
 * 128. Only products with 8-bit operands read such a tensor.
 *
 * An op that rounds inputs or weights of a forward product to e4m3 adds the number of those that
 * become 448 or are NaN to *device->clamped_inputs or *device->clamped_weights. Inputs count where
 * they are rounded: in the op that writes `narrow`; on a CPU in the product. */

/* out = dropout(wte[token] + wpe[t]) */
typedef struct g2z_embed_fwd {
  void *out;                     /* [N,C] act */
  const int32_t *tokens;         /* [N] */
  const void *wte, *wpe;         /* [V,C], [T,C] act */
  g2z_dropout dropout;
  int B, T, C;
} g2z_embed_fwd;

typedef struct g2z_embed_bwd {
  float *dwte;                   /* [Vp,C] +=; (NULL: only dwpe) */
  void *dwpe;                    /* [T,C] grad (mode) */
  const void *dout;              /* [N,C] act */
  const int32_t *tokens;         /* [N] */
  g2z_write mode;
  g2z_dropout dropout;
  int B, T, C;
} g2z_embed_bwd;

/* The same if dwte is divided among ranks: sums rows by token, and adds the parts of these sums
 * that `parts` lists to grads. A token's rows and the old value add up in fp32 and are rounded
 * once. */
typedef struct g2z_embed_add {
  void *grads;                   /* grad */
  const g2z_row_part *parts;     /* [count], host; no two overlap; (NULL if count is 0) */
  int count;
  const void *rows;              /* [N,C] act */
  const int32_t *order;          /* [2 N], from embed_order */
  int N, C;
} g2z_embed_add;

/* Embeds the next token of each of B sequences: out = wte[token] + wpe[position]. */
typedef struct g2z_embed_next {
  void *out;                     /* [B,C] act */
  const int32_t *tokens;         /* [B] */
  const int32_t *positions;      /* [B]: the number of tokens before it */
  const void *wte, *wpe;         /* act */
  int B, C;
} g2z_embed_next;

/* Attention for that next token. Row b of rows is stored as row positions[b] of past; out[b]
 * attends to rows 0..positions[b] of past. */
typedef struct g2z_attention_next {
  void *out;                     /* [B,NH,HS] act */
  void *past;                    /* [B,T,3,NH,HS] act, in and out */
  const void *rows;              /* [B,3,NH,HS] act */
  const int32_t *positions;      /* [B] */
  int B, T, C, NH;
} g2z_attention_next;

/* y = (x - mean) * rstd * w + b */
typedef struct g2z_layernorm_fwd {
  void *y;                       /* [N,C] act */
  void *narrow;                  /* (rows of C: y in 8 bits) */
  float *mean, *rstd;            /* [N]: for backward */
  const void *x, *w, *b;         /* [N,C], [C], [C] act */
  int N, C;
} g2z_layernorm_fwd;

/* dropped = dropout'(dres) is the gradient that the projection or embedding below this residual
 * receives. Without dropout that gradient is dres, and `dropped` is not written. narrow needs fp16:
 * a GPU does not write it in another type. narrow may be `dropped`: then it replaces it. */
typedef struct g2z_layernorm_bwd {
  void *dres;                    /* [N,C] act: dx, or += dx (res_mode) */
  void *dropped;                 /* ([N,C] act) */
  void *narrow;                  /* (rows of C, then columns: this gradient in 8 bits) */
  void *dw, *db;                 /* [C] grad (mode) */
  void *dbias;                   /* ([C] grad (mode): column sums of `dropped`, or of dres) */
  const void *dy, *x, *w;        /* [N,C], [N,C], [C] act */
  const float *mean, *rstd;      /* [N] */
  g2z_write res_mode, mode;
  g2z_dropout dropout;
  int N, C;
} g2z_layernorm_bwd;

/* y = x w + bias, and then
 *   with slope:    slope = gelu'(that), all that backward needs; y = gelu(that)
 *   with residual: y = residual + dropout(that); y may be residual
 * With narrow_x the product reads x from there and rounds w to e4m3, times 32. */
typedef struct g2z_linear_fwd {
  void *y;                       /* [N,O] act */
  void *narrow_y;                /* (rows of O: y in 8 bits; with narrow_x and slope) */
  void *slope;                   /* ([N,O] act) */
  const void *x;                 /* [N,K] act */
  const void *narrow_x;          /* (rows of K) */
  const void *w, *bias;          /* [K,O], [O] act */
  const void *residual;          /* ([N,O] act) */
  g2z_dropout dropout;           /* with residual */
  int N, K, O;
} g2z_linear_fwd;

/* dx = dy w^T. With slope, where x = gelu(z): dx = (dy w^T) * slope is the gradient of z. With
 * narrow, in fp16: dy is rounded to e5m2, w to e4m3, times 32. dy is then read from narrow. With
 * slope, dx's rows and columns in 8 bits replace dx. */
typedef struct g2z_linear_bwd_data {
  void *dx;                      /* [N,K] act */
  void *dbias;                   /* with slope: [K] grad (mode): column sums of dx */
  const void *dy, *w;            /* [N,O], [K,O] act */
  const void *slope;             /* ([N,K] act) */
  const void *narrow;            /* (rows of O) */
  g2z_write mode;
  int N, K, O;
} g2z_linear_bwd_data;

/* dw = x^T dy. With narrow_dy, in fp16: x is rounded to e4m3, dy to e5m2. narrow_dy has dy's rows
 * and columns, columns_x has x's columns. Without columns_x, x's rows and columns have replaced
 * x. */
typedef struct g2z_linear_bwd_weight {
  void *dw;                      /* [K,O] grad (mode) */
  const void *x, *dy;            /* [N,K], [N,O] act */
  const void *narrow_dy;         /* (rows of O, then columns) */
  const void *columns_x;         /* ([K,N] in 8 bits) */
  g2z_write mode;
  int N, K, O;
} g2z_linear_bwd_weight;

/* Causal self-attention on packed qkv. Dao et al. 2022, arXiv:2205.14135. */
typedef struct g2z_attention_fwd {
  void *out;                     /* [B,T,NH,HS] act */
  void *narrow;                  /* (rows of C: out in 8 bits) */
  float *lse;                    /* [B,NH,T]: log sum exp of the scaled scores */
  const void *qkv;               /* [B,T,3,NH,HS] act */
  g2z_dropout dropout;
  int B, T, C, NH;
} g2z_attention_fwd;

typedef struct g2z_attention_bwd {
  void *dqkv;                    /* [B,T,3,NH,HS] act; with narrow it may stay unwritten */
  void *narrow;                  /* (rows of 3C, then columns) */
  void *columns;                 /* ([C,B*T]: columns of `out` in 8 bits, written here) */
  void *dbias;                   /* [3C] grad (mode): column sums of dqkv */
  const void *dout, *out;        /* [B,T,NH,HS] act */
  const float *lse;              /* [B,NH,T] */
  const void *qkv;               /* [B,T,3,NH,HS] act */
  g2z_write mode;
  g2z_dropout dropout;
  int B, T, C, NH;
} g2z_attention_bwd;

/* LM head and cross-entropy, with the logits of `chunk` tokens at a time. dh and dwte are gradients
 * of loss * dloss * state->loss_scale. A target of -1 has loss 0 and no gradient. Rows V..Vp-1 of
 * wte never reach the softmax; dwte is 0 there. With dh and device->fp8, h and wte are rounded to
 * e4m3 before they make logits: h with a scale per row, wte times 32. dh and dwte are made from
 * 8-bit numbers with fp8=all, else from the original h and wte. */
typedef struct g2z_head_loss {
  float *losses;                 /* [N]: per token */
  double *loss_sum;              /* += their sum */
  void *dh;                      /* ([N,C] act; NULL: no gradients) */
  void *dwte;                    /* with dh: [Vp,C] dwte_dtype (mode) */
  g2z_dtype dwte_dtype;          /* fp32, or grad's if a single chunk overwrites dwte */
  void *logits;                  /* [chunk,Vp] act: scratch */
  const void *h, *wte;           /* [N,C], [Vp,C] act */
  const int32_t *targets;        /* [N] */
  float dloss;
  const g2z_step_state *state;   /* with dh */
  g2z_write mode;
  int N, C, V, Vp, chunk;
} g2z_head_loss;

/* tokens[b] = a draw from logits[b] with seed + b and the index drawn[b]; -1 if no logit is a
 * number. Then adds 1 to drawn[b], and to positions[b] up to T - 1. */
typedef struct g2z_draw {
  int32_t *tokens;               /* [B], as the next two */
  int32_t *drawn, *positions;
  const float *logits;           /* [B,V] */
  const g2z_sampling *sampling;  /* host */
  int B, V, T;
} g2z_draw;

typedef struct g2z_ops {
  /* Tensors of products (linear_*, attention_*, head_*, orthogonalize) start at multiples of 16
   * bytes.
   *
   * Memory and order. allocate() returns zeroed memory, aligned to 16 bytes. An upload from memory
   * of allocate_host runs while the host continues. mark(event) puts a mark into the queue;
   * wait(event) blocks the host until the device has passed that mark; events are 0..7. */
  g2z_status (*allocate)(g2z_device *device, size_t bytes, void **out);
  void (*release)(g2z_device *device, void *memory);
  g2z_status (*allocate_host)(g2z_device *device, size_t bytes, void **out);
  void (*release_host)(g2z_device *device, void *memory);
  g2z_status (*upload)(g2z_device *device, void *to, const void *host_from, size_t bytes);
  g2z_status (*download)(g2z_device *device, void *host_to, const void *from, size_t bytes);
  g2z_status (*zero)(g2z_device *device, void *memory, size_t bytes);
  g2z_status (*mark)(g2z_device *device, int event);
  g2z_status (*wait)(g2z_device *device, int event);
  g2z_status (*synchronize)(g2z_device *device);
  void (*close)(g2z_device *device);

  /* Graphs: work that is recorded once and then launched as a whole. Between begin and end, ops and
   * mark() are recorded and do not run. Run the same work once before: then scratch has its size
   * and every product its algorithm. Uploads and downloads in a graph use the same pinned memory
   * each time. Free the graph before anything it touches. If nothing was recorded, *out is NULL,
   * which graph_free() accepts. The CPU has none: begin fails, and the other three are NULL. */
  g2z_status (*graph_begin)(g2z_device *device);
  g2z_status (*graph_end)(g2z_device *device, g2z_graph **out);
  g2z_status (*graph_run)(g2z_device *device, const g2z_graph *graph);
  void (*graph_free)(g2z_device *device, g2z_graph *graph);

  /* For g2z_device_time_spans. timers_open() holds nothing after a failure. timers_settle() waits
   * until all spans that ended are counted. */
  void (*span_begin)(const g2z_device *device, g2z_span span);
  void (*span_end)(const g2z_device *device, g2z_span span);
  g2z_status (*timers_open)(g2z_device *device);
  g2z_status (*timers_settle)(g2z_device *device);

  /* The table of the algorithms chosen by device->tune, empty on a CPU; free it with g2z_release.
   * The choices of a table that tuning_read() reads replace the device's. */
  g2z_status (*tuning)(g2z_device *device, char **text);
  g2z_status (*tuning_read)(g2z_device *device, const char *text);

  /* One struct of operands each, above. */
  g2z_status (*embed_fwd)(g2z_device *device, const g2z_embed_fwd *op);
  g2z_status (*embed_bwd)(g2z_device *device, const g2z_embed_bwd *op);
  g2z_status (*embed_add)(g2z_device *device, const g2z_embed_add *op);
  g2z_status (*embed_next)(g2z_device *device, const g2z_embed_next *op);
  g2z_status (*layernorm_fwd)(g2z_device *device, const g2z_layernorm_fwd *op);
  g2z_status (*layernorm_bwd)(g2z_device *device, const g2z_layernorm_bwd *op);
  g2z_status (*linear_fwd)(g2z_device *device, const g2z_linear_fwd *op);
  g2z_status (*linear_bwd_data)(g2z_device *device, const g2z_linear_bwd_data *op);
  g2z_status (*linear_bwd_weight)(g2z_device *device, const g2z_linear_bwd_weight *op);
  g2z_status (*attention_fwd)(g2z_device *device, const g2z_attention_fwd *op);
  g2z_status (*attention_bwd)(g2z_device *device, const g2z_attention_bwd *op);
  g2z_status (*attention_next)(g2z_device *device, const g2z_attention_next *op);
  g2z_status (*head_loss)(g2z_device *device, const g2z_head_loss *op);
  g2z_status (*draw)(g2z_device *device, const g2z_draw *op);

  /* order[2 N] i32: tokens[N] in ascending order (stable), then the position of each before the
   * sort. */
  g2z_status (*embed_order)(g2z_device *device, int32_t *order, const int32_t *tokens, int N);
  /* Writes the 8-bit copies device->narrow [first, first + 4), which 8-bit products then read. */
  g2z_status (*narrow_weights)(g2z_device *device, int first);

  /* logits[n,V] f32 = h[n,C] wte^T */
  g2z_status (*head_logits)(g2z_device *device, float *logits, const void *h, const void *wte,
                            int n, int C, int V);

  /* to[n] act = round(from[n]); to[n] grad = round(from[n]) */
  g2z_status (*cast_act)(g2z_device *device, void *to, const float *from, size_t n);
  g2z_status (*cast_grad)(g2z_device *device, void *to, const float *from, size_t n);

  /* to[n] grad = from[n], or += */
  g2z_status (*grad_add)(g2z_device *device, void *to, const void *from, g2z_write mode, size_t n);
  /* *sum f64 += squares of grads in ranges (host memory); not finite if one element is not. */
  g2z_status (*grad_sumsq)(g2z_device *device, double *sum, const void *grads,
                           const g2z_range *ranges, int count);
  /* Ends a step: the verdict, loss scale, clip factor, learning rate, counters. `tokens` is the
   * number of all targets, also of -1; backward divided by it. The votes add up in the order of
   * ranks, so that all ranks get the same result. */
  g2z_status (*decide)(g2z_device *device, g2z_step_state *state, const g2z_verdict *verdict,
                       const g2z_optimizer_config *config, int64_t tokens);
  /* AdamW on ranges [begin, end), or nothing when state->skip; params = round(master). With Muon
   * the learning rate is state->lr adam_lr / lr. */
  g2z_status (*adamw)(g2z_device *device, const g2z_update *update, size_t begin, size_t end);

  /* Muon on ranges [begin, end), in three ops. u and O are bf16 on a GPU and fp32 on a CPU.
   * momentum: with g = sums * state->grad_multiplier and beta = config->momentum,
   *   m = beta m + g; u[u_at] = g + beta m, with the new m. Nothing when state->skip.
   * orthogonalize: all matrices of `shapes` (host memory) in `area`, in place. X = x / |x|, by the
   *   Frobenius norm (zero stays zero); five times A = X X^T, X = a X + (b A + c A A) X with the
   *   factors below; X is transposed meanwhile if it has more rows than columns. work: scratch,
   *   aligned to 256 bytes; a matrix needs G2Z_ORTHOGONALIZE_WORK elements of u's type. The op
   *   takes as many matrices of one shape together as fit; their number changes no result. It runs
   *   in skipped steps, too; the result is then not used.
   * muon: master -= lr (range.scale O[u_at] + weight_decay master), without the last term if
   *   !range.decay; params = round(master). lr is state->lr. Nothing when state->skip.
   * v is not touched. */
  g2z_status (*momentum)(g2z_device *device, void *u, const g2z_update *update, size_t begin,
                         size_t end);
  g2z_status (*orthogonalize)(g2z_device *device, void *area, const g2z_matrices *shapes, int count,
                              void *work, size_t work_bytes);
  g2z_status (*muon)(g2z_device *device, const void *o, const g2z_update *update, size_t begin,
                     size_t end);
} g2z_ops;

/* Jordan et al. 2024: five iterations map singular values in [0.0016, 1] into [0.68, 1.20]. */
#define G2Z_ORTHOGONALIZE_STEPS 5
#define G2Z_ORTHOGONALIZE_A 3.4445f
#define G2Z_ORTHOGONALIZE_B -4.7750f
#define G2Z_ORTHOGONALIZE_C 2.0315f
/* Elements of scratch for a matrix with sides m <= n: X twice, A, and b A + c A A. */
#define G2Z_ORTHOGONALIZE_WORK(m, n) (2 * (size_t)(m) * (size_t)(n) + 2 * (size_t)(m) * (size_t)(m))

/* A description of the device, for logs and the files of a run. */
typedef struct g2z_device_info {
  char name[128];              /* "NVIDIA H200"; a CPU has "" here and in the next two */
  char runtime[32];            /* "13.0": the version of CUDA */
  char collectives[32];        /* "2.28.9": the version of NCCL */
  int count;                   /* number of GPUs that this process can see */
  double exponentials_per_s;   /* in fp32, at the highest clock; NaN: unknown, as on a CPU */
  int fp8;                     /* 0: no products in 8 bits. Else channels must be a multiple of
                                * this: of 1 on a CPU and on Hopper, of 16 on other GPUs */
  int bf16;                    /* 1: products in bf16 are possible: a CPU, or sm_80 and newer */
} g2z_device_info;

/* A weight and its e4m3 copies, times 32. */
typedef struct g2z_narrow_weight {
  const void *w;               /* [K,O] act */
  uint8_t *columns;            /* [O] rows of K, for linear_fwd */
  uint8_t *rows;               /* [K] rows of O, for linear_bwd_data; or NULL */
  int K, O;
} g2z_narrow_weight;

struct g2z_device {
  /* Every call goes through this table. A program may point it at its own copy, whose entries call
   * the old table, to time, count or break ops. Recorded graphs keep what they recorded. */
  const g2z_ops *ops;
  g2z_services *services;
  g2z_device_kind kind;
  g2z_dtype dtype, grad_dtype;
  int tune;                    /* a g2z_tune that the caller may change; initially ON */
  g2z_fp8 fp8;                 /* products of training in 8 bits; initially NONE */
  const g2z_narrow_weight *narrow; /* the caller's memory */
  int narrow_count;            /* 0: each 8-bit product rounds its own weight */
  double *clamped_inputs;      /* device: counters; NULL: nothing is counted */
  double *clamped_weights;
  g2z_device_info info;
  void *backend;               /* the backend's private state */
  struct g2z__timers *timers;  /* of spans; NULL: not timed */
};

G2Z_API g2z_status g2z_device_create(g2z_services *services, g2z_device_kind kind, g2z_dtype dtype,
                                     g2z_dtype grad_dtype, g2z_device **out);
G2Z_API void g2z_device_free(g2z_device *device); /* NULL is fine */
/* CPU: 1. CUDA: the number of GPUs that this process sees. */
G2Z_API int g2z_device_count(g2z_device_kind kind);
/* G2Z_OK: this process sees a GPU. Otherwise the sentence gives the reason and the variable that
 * promised a GPU. A program that then uses the CPU should print the sentence as a warning, except
 * after G2Z_UNSUPPORTED: this build has no CUDA, and nothing promises a GPU. */
G2Z_API g2z_status g2z_device_find_gpu(g2z_services *services);
/* Free and total bytes of memory of a device of this kind. A CPU has at most what the control
 * groups of this process (a container's, a batch job's) allow. */
G2Z_API g2z_status g2z_device_memory(g2z_services *services, g2z_device_kind kind,
                                     size_t *free_bytes, size_t *total_bytes);

typedef struct g2z_span_times {
  int64_t count;
  double total_s, min_s, max_s;
} g2z_span_times;
/* Starts to time spans: on a GPU between events in the queue where their work runs, on a CPU by the
 * clock. Before this call spans cost nothing. */
G2Z_API g2z_status g2z_device_time_spans(g2z_device *device);
/* The times so far; waits for the device. All 0 if spans are not timed. */
G2Z_API g2z_status g2z_device_span_times(g2z_device *device, g2z_span_times out[G2Z_SPAN_COUNT]);

/* ===== >>d10 ranks =======================================================
 * The processes of a job are its ranks, each with a GPU or a share of the CPU. They meet at rank 0
 * over TCP and compare their settings. Then these connections carry small messages between hosts,
 * the collectives of CPU ranks, and heartbeats.
 *
 * A rank's place comes from its launcher's variables, which g2z__launchers (i10) lists. In order of
 * precedence: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (by hand, torchrun, train --gpus
 * N), then the variables of Open MPI, MPICH and Intel MPI, srun.
 * Rank 0 listens on MASTER_PORT or on a port made from the job's id; if that is taken, on one of
 * the next three. If all ranks are on one host, it listens on that host alone; else at MASTER_ADDR,
 * or on all interfaces if MASTER_ADDR is a loopback address on rank 0's host. The job's id (the
 * launcher's, or G2Z_RUN_ID) and secret (G2Z_SECRET; random with --gpus) give two tokens: members
 * send one, rank 0 sends the other, and a connection without its token is closed. Nothing is
 * encrypted: anyone who listens on the network can join the job, and can guess a short secret. Use
 * a network that you trust. MPICH and ranks by hand have no id: two such jobs on one host each need
 * their own MASTER_PORT or G2Z_RUN_ID.
 *
 * Three things end the job: a connection that ends without a goodbye (a killed process: noticed
 * within 10 s), silence_s without a heartbeat (a host that is gone: 30 s), and hang_s without a
 * micro-step or collective (a hang: 600 s). An asynchronous error of NCCL, such as a dead link,
 * ends it within seconds. Rank 0 names the culprit to all ranks; if it is rank 0, each rank names
 * it. Then ranks on CPUs return G2Z_LOST. A rank on a GPU ends its process with exit code
 * G2Z_EXIT_LOST: its GPU may wait for the lost rank for ever, and so would every call that waits
 * for the GPU, even NCCL's abort.
 *
 * After g2z_context_create all ranks make every call in the same order. Any rank may call these
 * alone: g2z_ranks_place, _collectives and _write_flight, g2z_trainer_fail and _request_stop. A job
 * of one rank opens no connection. */

#define G2Z_EXIT_LOST 70     /* exit code: another rank died or hangs; its output has the cause */

typedef struct g2z_place {  /* a process's place in the job */
  int rank, world;
  int local_rank, local_world;    /* among the ranks on this host; local_world 0: not known yet */
  int unstarted;                  /* number of tasks in Slurm's allocation, if there are several and
                                   * this process is none of them; else 0. g2z_trainer_create then
                                   * refuses to train alone; a program that wants that sets 0 */
  char launcher[16];              /* "alone", "ranks", "torchrun", "openmpi", "pmi" or "slurm" */
  char host[256];                 /* where rank 0 listens: a name or an address */
  int port;                       /* the first port that is tried there */
  char job[128];                  /* the job's id: only ranks with the same id can meet */
  char secret[128];               /* ranks also need the same secret; "": the id is enough */
} g2z_place;

/* This process's place, from the variables of its launcher; without them it is alone. Returns
 * G2Z_BAD_ARGUMENT if variables contradict each other or one is missing. */
G2Z_API g2z_status g2z_place_find(g2z_services *services, g2z_place *out);

typedef struct g2z_fault {  /* why the job ends */
  int rank;                       /* the rank that died or hangs */
  char host[64];
  char phase[32];                 /* its last activity: "step", "save", ... */
  int64_t step;
  char sentence[512];             /* the whole report, to print */
} g2z_fault;

typedef struct g2z_ranks_config {
  g2z_place place;
  const char *device;             /* unique name of the GPU, which ranks must not share; CPU: "" */
  const char *build;              /* the program's commit or ""; must be equal on all ranks */
  double join_s;                  /* longest wait until all ranks have joined */
  double silence_s;               /* a rank without a heartbeat for this time is dead; 0: never */
  double hang_s;                  /* a rank without progress for this time hangs; 0: never */
  /* Called once, from a thread of the library, when the job cannot continue. It may report the
   * fault, and may end the process itself. NULL: a rank on a GPU writes the sentence to standard
   * error. After it returns, a rank on a GPU ends (see above) by _exit, which does not flush
   * stdio's buffers; on a CPU calls return G2Z_LOST. */
  void (*on_fault)(void *user, const g2z_fault *fault);
  void *user;
} g2z_ranks_config;
/* Alone, "", "", 120 s, 30 s, 600 s, no handler. Time does not count while this process is
 * suspended (SIGSTOP, a frozen container or machine). */
G2Z_API g2z_ranks_config g2z_ranks_config_default(void);

typedef struct g2z_ranks g2z_ranks;
G2Z_API const g2z_place *g2z_ranks_place(const g2z_ranks *ranks);

/* Gathers mine[bytes] of every rank into all[world][bytes], in the order of ranks. This call and
 * the next three return G2Z_LOST if a rank died. */
G2Z_API g2z_status g2z_ranks_all_gather(g2z_ranks *ranks, const void *mine, size_t bytes,
                                        void *all);
/* Copies rank 0's bytes to all ranks. */
G2Z_API g2z_status g2z_ranks_broadcast(g2z_ranks *ranks, void *bytes, size_t count);
/* Returns the same status and sentence on all ranks: the lowest failed rank's, or G2Z_OK. */
G2Z_API g2z_status g2z_ranks_agree(g2z_ranks *ranks, g2z_status mine);
/* G2Z_BAD_ARGUMENT on all ranks if a text differs from rank 0's; names the first such line. */
G2Z_API g2z_status g2z_ranks_same(g2z_ranks *ranks, const char *what, const char *text);
/* Counts this rank's collectives that moved a bucket in this step, among its last 1,024.
 * Collectives inside a graph count only in the step that recorded it. */
G2Z_API int g2z_ranks_collectives(g2z_ranks *ranks, int64_t step);
/* The flight recorder: one line of JSON with the rank's present state, then one for each of its
 * last 1,024 collectives. For on_fault: `services` must belong to the calling thread. */
G2Z_API g2z_status g2z_ranks_write_flight(g2z_ranks *ranks, g2z_services *services,
                                          const char *path);

/* ===== >>d11 collectives =================================================
 * Copies and sums between the ranks' device memories: by copy engines and NCCL between GPUs, by the
 * connections of room 10 between CPU ranks; a job of one rank sends nothing. Calls run in order on
 * a separate queue while the device computes. AFTER makes the queue wait for the device, WAIT makes
 * the device wait for the queue; the host waits only if CPU ranks send. All ranks submit the same
 * calls in the same order. The calls of a step can be recorded and played again.
 *
 * A g2z_transport is a user's word; a g2z_collectives is a backend. The GPUs' backend (>>k80)
 * serves both words, NCCL and COPY. The CPU ranks' backend (g2z__plain) serves neither.
 * To add a backend:
 *   1. Fill a g2z_collectives. play() receives each kind of call except GRAPH, and times what it
 *      sends as the span of g2z__call_span. It receives the same calls again in each replay. It may
 *      block if AFTER, MARK and WAIT then have nothing to do. Other members: see g2z_collectives.
 *   2. Choose it in g2z__cuda_comm_open or, for CPU ranks, in g2z_comm_create.
 *   3. If calls do not block, pass g2z__ranks_progress the address of a counter that each MARK
 *      raises: heartbeats report it, and a counter that stands still for hang_s ends the job. Pass
 *      it a function that reports asynchronous errors, too.
 * To add a word: name it in G2Z_TRANSPORT_LIST and, for the log, in g2z__comm_carrier. Set
 * plan->reduce in g2z_plan_create, where every word except NCCL means COPY, and plan->gather in
 * g2z__plan_batch. Count its memory in g2z__plan_bytes. A word has an effect only on GPUs of one
 * host in ZeRO stages 1 to 3: g2z_plan_create gives other jobs NCCL. */

typedef struct g2z_comm g2z_comm;

typedef enum g2z_call_kind {
  G2Z_CALL_AFTER,  /* The queue waits until this rank's device has finished all its work so far.
                    * With `all` it also waits for the other ranks' devices, so that copies may
                    * write to their memory. NCCL needs no barrier: its calls wait themselves. */
  G2Z_CALL_REDUCE, /* Sums from[n] grad over all ranks, sent in the wire's type; `to` grad (write)
                    * gets the part that this rank owns. With SLICES, `to` may be this rank's slice
                    * of `from`; with ALL and ROOT, `to` is `from`. Afterwards the rest of `from`
                    * is undefined. Only elements that are 0 on all ranks stay 0: up to stage 1,
                    * padding is zeroed once, when it is allocated. */
  G2Z_CALL_GATHER, /* to[n] act: each owner's part from[n / world], or from[n] of rank 0. `from` may
                    * be that part of `to` itself. No rank may still be reading `to`: the caller
                    * ensures this, if necessary by AFTER with `all`. */
  G2Z_CALL_ROWS,   /* to[world][n bytes]: row r is rank r's from[n]. `from` may be this rank's row
                    * of `to`; in a job of one it is. No rank may still be reading the rows. */
  G2Z_CALL_CAST,   /* to[n] grad = round(from[n] fp32) */
  G2Z_CALL_EXCHANGE, /* Each route moves its elements, of n bytes each, from the owner's `from` to
                    * the home's `to`; with `back`, from the home's `from` to the owner's `to`.
                    * owner_at is an index in the owner's memory, home_at in the home's. If owner
                    * and home are the same rank, it copies. `from` and `to` do not overlap, and
                    * no two routes write the same element. */
  G2Z_CALL_MARK,   /* Puts mark number `place` into the queue. When the queue has passed it, all
                    * earlier calls are complete on this rank. Numbers are 0..places-1. */
  G2Z_CALL_WAIT,   /* The device waits until the queue has passed the mark. */
  G2Z_CALL_GRAPH   /* in a recorded step: the device's work between two WAITs */
} g2z_call_kind;

typedef struct g2z_call {
  g2z_call_kind kind;
  g2z_owner owner;             /* REDUCE, GATHER */
  g2z_write write;             /* REDUCE */
  g2z_span span;               /* ROWS: the span that they are timed as */
  int place;                   /* number of a mark; AFTER: of a departure, which submit sets */
  int all;                     /* AFTER */
  int back;                    /* EXCHANGE; 1: from homes to owners */
  const g2z_route *routes;     /* EXCHANGE: [count], host memory that outlives a recorded step */
  int count;
  void *to, *from;
  size_t n;
  g2z_graph *graph;
} g2z_call;

typedef struct g2z_collectives { /* an implementation of the calls */
  const char *name;
  /* Records the end of the device's work so far, for AFTER. While a graph is recorded,
   * *departure names a point inside the graph, which each run of the graph passes again. NULL if
   * play() ignores AFTER. */
  g2z_status (*depart)(g2z_comm *comm, int *departure);
  /* Enqueues one call. AFTER waits for the departure `place`; if that is inside a graph, for the
   * graph's latest run to pass it. If calls block (CPU), play() ignores AFTER, MARK and WAIT. */
  g2z_status (*play)(g2z_comm *comm, const g2z_call *call);
  /* Does ROWS of at most 256 bytes, a multiple of 4, in the order of the device's own work, even
   * while a graph is being recorded. *done 0: it cannot do that, and did nothing. */
  g2z_status (*rows_now)(g2z_comm *comm, const g2z_call *rows, int *done);
  /* Zeroed memory of the kind that is fastest to send: for both ends of GATHER and of EXCHANGE, and
   * for ROWS. All ranks allocate the same sizes in the same order. */
  g2z_status (*allocate)(g2z_comm *comm, size_t bytes, void **out);
  void (*release)(g2z_comm *comm, void *memory);
  /* A lap lasts from lap(), with number 0 or 1, to the next lap(). When the device has passed a
   * lap, waited_ms() returns how long it waited for other ranks in it. A backend may time only some
   * laps. For the others waited_ms() repeats the last measured time. */
  void (*lap)(g2z_comm *comm, int lap);
  double (*waited_ms)(g2z_comm *comm, int lap);
  void (*close)(g2z_comm *comm);
} g2z_collectives;

struct g2z_comm {
  const g2z_collectives *ops;
  g2z_services *services;
  g2z_ranks *ranks;
  g2z_device *device;
  int rank, world;
  g2z_dtype wire;              /* the type of gradients that NCCL or CPU ranks send, and of sums */
  g2z_transport gather;        /* the transport of parameters; never AUTO */
  g2z_transport reduce;        /* the transport of gradients; with COPY they travel in grad_dtype */
  int lap_now;
  double lap_s[2];
  float *chunk;                /* CPU ranks: receive buffer, on rank 0 */
  struct g2z__record *record;  /* while a step is recorded */
  void *backend;
};

typedef struct g2z_comm_config {
  int places;                  /* number of marks */
  size_t most;                 /* elements of the largest reduction */
  g2z_dtype wire;              /* the device's dtype or grad_dtype: what a reduction rounds to */
  g2z_transport gather, reduce; /* not AUTO. COPY becomes NCCL if it is impossible */
} g2z_comm_config;

G2Z_API g2z_status g2z_comm_create(g2z_ranks *ranks, g2z_device *device,
                                   const g2z_comm_config *config, g2z_comm **out);
G2Z_API void g2z_comm_free(g2z_comm *comm); /* NULL is fine; before its device */
/* A call with the members that most kinds need; the others are 0: not `all`, place 0. */
G2Z_API g2z_call g2z_call_of(g2z_call_kind kind, void *to, const void *from, size_t n);
/* Enqueues a call, or appends it to the step that is being recorded. */
G2Z_API g2z_status g2z_comm_submit(g2z_comm *comm, const g2z_call *call);

/* ===== >>d12 weights =====================================================
 * GPT-2 in the files of Hugging Face's GPT2LMHeadModel: model.safetensors, whole or in several
 * files, and config.json. A trainer can start from them (init_from) and save them as one file
 * (g2z_trainer_save_weights). */

/* The model of DIRECTORY/config.json; refuses anything except a GPT-2 as published. */
G2Z_API g2z_status g2z_weights_config(g2z_services *services, const char *directory,
                                      g2z_model_config *out);

/* ===== >>d13 context and model ===========================================
 * The context is this process's place in the job. A model is a plan's memory on the device. */

typedef struct g2z_context {      /* read only */
  g2z_services *services;
  g2z_device_kind device;
  int gpu;                        /* CUDA's number of its GPU */
  int rank, world;
  g2z_ranks *ranks;
} g2z_context;
typedef struct g2z_context_config {
  g2z_services *services;         /* must outlive the context; never NULL */
  g2z_device_kind device;
  g2z_ranks_config ranks;         /* place.world 0: g2z_place_find fills place. The call sets device
                                   * and adds the library's compiler to build */
} g2z_context_config;

/* The default device, and the place from the launcher. */
G2Z_API g2z_context_config g2z_context_config_default(g2z_services *services);
G2Z_API g2z_status g2z_context_create(const g2z_context_config *config, g2z_context **out);
G2Z_API void g2z_context_free(g2z_context *context); /* NULL is fine */

typedef struct g2z_trainer g2z_trainer;

typedef struct g2z_model {
  g2z_services *services;       /* read only, as are all members up to `trainer` */
  g2z_model_config config;
  g2z_device *device;
  g2z_plan *plan;
  size_t bytes;                 /* its memory on the device; 0: the trainer holds it */
  g2z_trainer *trainer;         /* the trainer that owns it; NULL: g2z_model_open opened it */
  /* The rest is private. */
  char *params, *grads;         /* flat, by the plan's offsets. No trainer: no grads, no dwte */
  char *activations;
  char *logits;                 /* [head_chunk, Vp] act */
  void *dwte;                   /* [Vp, C] dwte_dtype: wte's gradient; in grads if of their type */
  int32_t *tokens;              /* device: [accum, B, T] of a step, or [B, T] of one pass */
  int32_t *targets;             /* the same, at the end of `tokens` */
  double *sum;                  /* device: of losses */
} g2z_model;

/* ===== >>d14 trainer =====================================================
 * A model in training, one step per call. A call enqueues a step and reads the results of the
 * previous one: report.loss belongs to report.loss_step. g2z_trainer_flush waits for all steps. */

typedef struct g2z_report {
  int64_t step;          /* steps enqueued so far, this one included */
  int64_t loss_step;     /* the step that the fields below belong to; 0: none is finished yet */
  float loss;            /* mean over the targets of the global batch that count; NaN: none does */
  int64_t counted;       /* number of targets that count */
  /* Numbers that are NaN, or that 8 bits clamp in forward. Inputs of products are clamped from 108
   * on; all ranks and micro-steps count. Weights are clamped from 13.5 on; each counts once. Both
   * are 0 without fp8. */
  int64_t clamped_inputs, clamped_weights;
  float grad_norm;       /* before clipping. Not finite, or counted 0: the step was skipped */
  float lr;
  float loss_scale;      /* loss scale of the step */
  int skipped;           /* 0: the weights changed. 1: they did not. 2: because of a spike */
  int64_t skipped_total; /* includes `spikes` */
  int64_t spikes;
  int64_t applied;       /* steps applied up to loss_step */
  double data_ms;        /* waiting for tokens */
  double exposed_comm_ms;/* time that the device waited for other ranks. GPUs measure every 8th
                          * step; the others repeat its time. NaN: not measured */
} g2z_report;

/* ----- the trainer, whose first members may be read ----- */

/* One pass over a micro-batch: the arguments of forward and backward. */
typedef struct g2z__pass {
  const int32_t *x;         /* device, [B,T] */
  const int32_t *y;         /* device, [B,T]; NULL: no loss wanted */
  int B, T;
  g2z_dropout dropout;      /* `site` is set for each use */
  g2z_write write;          /* overwrite gradients, or add to earlier micro-steps' */
  int keep_rows;            /* 1: the embedding's part of wte's gradient is not added, but kept as
                             * one row per token: see g2z__gather_rows */
  const int32_t *positions; /* device, [B], for T = 1, one next token per sequence: the number of
                             * tokens before it in the cache [B,window]. NULL: whole sequences */
  int window, sequence;     /* of the cache: tokens per sequence; and, if whole sequences are read,
                             * the first one's number */
} g2z__pass;

typedef struct g2z__record {
  g2z_call *calls;
  size_t count, capacity;
  size_t meanwhile;            /* the first call since the last graph */
} g2z__record;

/* This rank's vote: doubles of its row of the verdict, from G2Z_VERDICT_STATUS on. */
typedef struct g2z__ballot {
  double status, stop, masked;
} g2z__ballot;

struct g2z_trainer {
  g2z_context *context;              /* read only, as are all members up to `model` */
  g2z_services *services;
  g2z_train_config config;
  g2z_plan *plan;
  g2z_device *device;
  g2z_loader *loader;                /* NULL without shards */
  g2z_model model;                   /* for g2z_model_score, _logits and _generate, too */
  /* The rest is private. */
  g2z_comm *comm;                    /* its marks: g2z__queue_place */
  g2z__record record;                /* of a step; empty until a step is recorded */
  float *master;                     /* [shard_elements] */
  char *m, *v;                       /* the same in the moments' type; v: [v_elements] */
  char *sums;                        /* grad: this rank's part of the sums over ranks. From stage 2
                                      * on [shard_elements], else in the model's gradients */
  g2z_step_state *state;             /* device */
  g2z_verdict verdict;
  g2z__ballot *ballot[2];            /* host, by parity of the step */
  g2z__ballot voted;                 /* the ballot that is now in the verdict */
  int64_t masked;                    /* targets of -1 in the step that is about to be enqueued */
  g2z_update_range *ranges;          /* device: a copy of the plan's */
  g2z_update update;                 /* operands of AdamW and Muon, from g2z__trainer_first */
  g2z_range *pieces;                 /* host, [buckets]: ranges of gradients, for g2z__square */
  g2z_narrow_weight *narrow;         /* host, 4 per block: 8-bit copies; or NULL */
  uint8_t *narrow_at;                /* device: the memory of these copies */
  g2z_row_part *row_parts;           /* host: this rank's parts of wte's gradient */
  int row_part_count;
  const void *gathered_rows;         /* device: gradient rows of the embedding, from all ranks */
  const int32_t *row_tokens;         /* device: the token of each of these rows */
  int32_t *staged[2];                /* host, x followed by y of one step */
  double data_s[2];                  /* waiting for tokens, by parity of the step */
  int64_t stagings, enqueued;
  int64_t noted;                     /* number of collectives in a step without graphs */
  int64_t resumed_step, resumed_tokens; /* of the checkpoint; 0: none was loaded */
  int micro_step;                    /* the micro-step that is being enqueued */
  g2z__pass pass;                    /* its tokens, and how its gradients are written */
  int stale;                         /* 1: masters were written, and other ranks' params are old */
  int joined;                        /* number of gathers, in order, that the device waited for */
  int needed;                        /* the unit that was requested last; only a test reads it */
  int buffered[2];                   /* stage 3: the unit whose parameters are in each of the two
                                      * block buffers, or arriving there; 0: none */
  int buffered_joined[2];            /* 1: the device waited for them */
  int tuned;                         /* 1: all ranks use rank 0's choices of algorithms */
  int stop_requested, stop_agreed;
  g2z_status failed;                 /* G2Z_OK, or why this rank takes no more steps */
  char failure[G2Z_ERROR_BYTES];
};

G2Z_API g2z_status g2z_trainer_create(g2z_context *context, const g2z_train_config *config,
                                      g2z_trainer **out);
/* NULL is fine. On GPUs all ranks free together: one that comes alone is lost to the others. */
G2Z_API void g2z_trainer_free(g2z_trainer *trainer);
/* Trains one step on the next batch of the config's shards. G2Z_DIVERGED: see d08, NUMERICS.
 * All ranks of a job make the same calls, and the same call returns the same status on all. If one
 * rank fails (a shard that cannot be read), the call still returns G2Z_OK on all ranks, and the
 * step is skipped. The next call enqueues one more step, which is skipped, too, and returns the
 * failure on all ranks, as do further ones until a checkpoint is loaded. A call that fails still
 * reports the last finished step if no earlier call has: loss_step is then not 0. */
G2Z_API g2z_status g2z_trainer_step(g2z_trainer *trainer, g2z_report *report);
/* Trains one step on the caller's tokens, x and y [accum, B, T] in host memory. A y of -1 does not
 * count: loss and gradient are means over the other targets, of all ranks and micro-steps. */
G2Z_API g2z_status g2z_trainer_step_batch(g2z_trainer *trainer, const int32_t *x, const int32_t *y,
                                          g2z_report *report);
/* Asks all ranks to stop; may be called from a signal handler. The request reaches all ranks within
 * two steps. Then step and step_batch return G2Z_STOPPED and enqueue nothing, until a checkpoint is
 * loaded. Validation, scores and generation return G2Z_STOPPED before their next batch or token. */
G2Z_API void g2z_trainer_request_stop(g2z_trainer *trainer);
/* Waits for all enqueued steps; the report is the last one's. */
G2Z_API g2z_status g2z_trainer_flush(g2z_trainer *trainer, g2z_report *report);
/* Reports a failure outside the steps on this rank; services->error has the reason. All ranks
 * return this status from a later step; none waits for it. Only the first failure counts. */
G2Z_API void g2z_trainer_fail(g2z_trainer *trainer, g2z_status status);

/* Canonical ranges of the trainer's buffers, as fp32 in host memory. */
typedef enum g2z_buffer {
  G2Z_BUFFER_MASTER,
  G2Z_BUFFER_M,
  G2Z_BUFFER_V,       /* weights that Muon updates have no v: 0 when read, ignored when written */
  G2Z_BUFFER_GRADS    /* of the last step, times its loss scale; read only */
} g2z_buffer;
G2Z_API g2z_status g2z_trainer_read(g2z_trainer *trainer, g2z_buffer buffer, size_t canonical,
                                    size_t count, float *out);
/* Writing MASTER also sets the parameters of that range. With moments=bf16, M and V are rounded. */
G2Z_API g2z_status g2z_trainer_write(g2z_trainer *trainer, g2z_buffer buffer, size_t canonical,
                                     size_t count, const float *values);
/* Writes the algorithms that a GPU chose, for g2z_train_config.tuning; empty on a CPU. */
G2Z_API g2z_status g2z_trainer_write_tuning(g2z_trainer *trainer, const char *path);
/* Writes the master weights as model.safetensors and config.json in Hugging Face's form. */
G2Z_API g2z_status g2z_trainer_save_weights(g2z_trainer *trainer, const char *directory);

/* ===== >>d15 model in use =================================================
 * A trained or published GPT-2: only weights, in any type, and a workspace. It scores texts and
 * continues them. &trainer->model is a trainer's model, with its present weights. All ranks of the
 * job then make the same call, since the parameters may be divided among them, and a pass has at
 * most B*T tokens of the config, in sequences of any length. */

/* Opens DIRECTORY/model.safetensors and config.json, in Hugging Face's form or from a checkpoint.
 * Each rank of a job has its own model. */
G2Z_API g2z_status g2z_model_open(g2z_context *context, const char *directory, g2z_dtype dtype,
                                  g2z_model **out);
G2Z_API void g2z_model_free(g2z_model *model); /* NULL is fine; not for &trainer->model */
/* losses[B,T]: -log of the probability that the model gives targets[B,T] after tokens[B,T]; 0 if
 * the target is -1, which does not count. *mean: the mean over the targets that count; NaN if none
 * counts. losses may be NULL. T is at most config.context. */
G2Z_API g2z_status g2z_model_score(g2z_model *model, const int32_t *tokens, const int32_t *targets,
                                   int B, int T, float *losses, double *mean);
/* Computes logits[B,T,V], V after each token. */
G2Z_API g2z_status g2z_model_logits(g2z_model *model, const int32_t *tokens, int B, int T,
                                    float *logits);
/* Computes the mean loss, without dropout, over the next `steps` batches of a loader, which has the
 * trainer's B and T and accum 1. It covers the targets of all ranks that count; if none counts, it
 * fails. `progress`, unless NULL, receives the finished share. */
G2Z_API g2z_status g2z_trainer_validate(g2z_trainer *trainer, g2z_loader *loader, int64_t steps,
                                        void (*progress)(void *user, double share), void *user,
                                        double *loss);

G2Z_API g2z_sampling g2z_sampling_default(void); /* temperature 1, no limits, seed 1, no stop */
/* Refuses a value that g2z_model_generate would refuse. */
G2Z_API g2z_status g2z_sampling_check(g2z_services *services, const g2z_sampling *sampling);
/* Called with each token as it is drawn; a result other than 0 ends the sequence after it. */
typedef int (*g2z_each_token)(void *user, int sequence, int32_t token);
/* Continues `count` sequences together, each with a key-value cache. Row i of ids[count][capacity]
 * holds lengths[i] tokens; the call appends tokens and adds their number to lengths[i]. A sequence
 * ends after sampling->stop, or when its row is full. Sequence i draws the random numbers of a
 * call for it alone with seed sampling->seed + i. A text longer than config.context continues from
 * its last half context. each may be NULL. The cache takes 3 C values per layer and token of all
 * sequences; all other memory is for one sequence. A trainer's model has no cache: it computes the
 * whole text again for each token. */
G2Z_API g2z_status g2z_model_generate(g2z_model *model, int count, int32_t *ids, size_t capacity,
                                      size_t *lengths, const g2z_sampling *sampling,
                                      g2z_each_token each, void *user);

/* ===== >>d16 checkpoints =================================================
 * The state that a training needs to continue, in a directory; docs/formats.md describes its files,
 * and from_pretrained opens it, too. It has its name only when all files are whole and on the disk:
 * a crash leaves the earlier checkpoints, and a .partial that the next start removes. Any world
 * size, stage, bucket size and type can resume it: files use canonical ranges. Keep batch x accum x
 * world the same to keep the schedule. All ranks call save and load together. */

/* DIRECTORY must not exist. If one rank fails, all fail and nothing is left. */
G2Z_API g2z_status g2z_trainer_save(g2z_trainer *trainer, const char *directory);
/* The same with additions of the program. Before the directory gets its name, rank 0 calls `note`
 * and `files`; both may be NULL. `note` puts members into the object in DIRECTORY/note.json, and
 * `files` writes other files into the directory that it is given. If the save fails, these files
 * stay, except a tokenizer's. */
typedef g2z_status (*g2z_files)(void *user, const char *directory);
G2Z_API g2z_status g2z_trainer_save_with(g2z_trainer *trainer, const char *directory,
                                         g2z_note note, g2z_files files, void *user);
/* Checks every byte before anything of the trainer changes. With the same world, config and machine
 * the next steps are bit-identical to the steps of the run that saved. The model must be the same.
 * All other settings stay as the trainer has them, and the log names those that differ. With
 * another global batch the sequences read so far are converted to steps of the new size, rounded
 * down. With other data (docs/formats.md, `data`) or another T the epoch starts over. */
G2Z_API g2z_status g2z_trainer_load(g2z_trainer *trainer, const char *directory);

typedef struct g2z_checkpoint {
  int64_t step, tokens;         /* trained on so far */
  int64_t epoch, epoch_step;    /* of the run that saved: its epoch, and the steps read from it */
  g2z_loader_position next;     /* the loader's position when a trainer has loaded the checkpoint */
  char *note;                   /* note.json, freed with g2z_release; NULL: there is none */
} g2z_checkpoint;
/* Reads trainer_state.json and note.json. G2Z_FORMAT: one is damaged. G2Z_BAD_ARGUMENT: a mixture
 * cannot continue with this loader. Without a loader (NULL) `next` stays zero. */
G2Z_API g2z_status g2z_checkpoint_read(g2z_services *services, const char *directory,
                                       const g2z_loader *loader, g2z_checkpoint *out);
/* Removes a checkpoint, whole or not, and its tokenizer. It removes no other files, and follows no
 * links. 0: the directory still exists, and errno has the reason. */
G2Z_API int g2z_checkpoint_remove(const char *directory);
/* CRC-32C of `count` bytes. `sum` is the checksum of the bytes before them; 0 if there are none. */
G2Z_API uint32_t g2z_crc32c(uint32_t sum, const void *bytes, size_t count);

#ifdef __cplusplus
}
#endif
#endif /* G2Z_INCLUDED */

#if defined(GPT2_ZERO_IMPLEMENTATION) && !defined(G2Z_IMPLEMENTED)
#define G2Z_IMPLEMENTED

/* -ffast-math makes isfinite() true for a NaN: gradients that are not finite would be applied. */
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || __FINITE_MATH_ONLY__ + 0
#error "gpt2_zero.h: -ffast-math removes NaN, and a NaN marks a step that must be skipped: \
compile without it (-O3 in place of -Ofast), or add -fno-fast-math at the end"
#endif

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
/* Only rooms i08 and i09 make a program faster if their host code is compiled with -O3. So nvcc
 * compiles them with -O3 after any -O, and -O1 halves the host compiler's time. Intrinsics need the
 * same: gcc inlines little into a function that contains code of other options. */
#if defined(__CUDACC__) && defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__)
#define G2Z__OPTIMIZES
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675 /* nvcc passes these pragmas to gcc, but does not know them */
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif
#if defined(__SSE2__)
#include <immintrin.h> /* vectors of products; CRC-32C as an instruction */
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(G2Z__OPTIMIZES)
#pragma GCC pop_options
#endif

/* The first header of the C library in a file fixes which functions all of them declare. */
#if defined(__GLIBC__) && !(defined(__USE_XOPEN2K8) && defined(__USE_MISC))
#error "gpt2_zero.h: a system header before it has hidden POSIX: compile with -std=gnu11 in place \
of -std=c11, or include gpt2_zero.h first"
#endif

/* In static mode a program may leave most of the library unused. */
#if defined(__GNUC__)
#define G2Z__PRIVATE static __attribute__((unused))
#else
#define G2Z__PRIVATE static
#endif

/* Of two numbers of one type. One of them is evaluated twice: it must have no side effect. */
#define G2Z__MIN(a, b) ((a) < (b) ? (a) : (b))
#define G2Z__MAX(a, b) ((a) > (b) ? (a) : (b))

/* Calls an op: G2Z__RUN(device, layernorm_fwd, .y = y, ..., .C = C). Members stand in the order of
 * their declaration. C++17 compilers know these initializers as an extension. */
#define G2Z__RUN(device, op, ...)                   \
  do {                                              \
    const g2z_##op run_ = {__VA_ARGS__};            \
    G2Z_TRY((device)->ops->op(device, &run_));      \
  } while (0)
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wmissing-field-initializers"
#if defined(__cplusplus)
#pragma clang diagnostic ignored "-Wc++20-designator"
#endif
#elif defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#if defined(__cplusplus) && __GNUC__ < 12
#pragma GCC diagnostic ignored "-Wpedantic"
#elif defined(__cplusplus)
#pragma GCC diagnostic ignored "-Wc++20-extensions"
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ===== >>i00 the page ====================================================
 * One step of ZeRO, from tokens on the device to new parameters. Everything else serves it. On
 * GPUs the second step is recorded: comm_submit() then only lists the calls, and trainer_enqueue()
 * (room 14) plays the list in every later step.
 *
 *   stage | [A] wait_parameters   | [B] wait_gradients   | [C] reduce_bucket     | [D] share
 *   ------+-----------------------+----------------------+-----------------------+---------------
 *   0     | nothing               | nothing              | all-reduce, in the    | nothing
 *         |                       |                      | last micro-step       |
 *   1     | until the unit's      | nothing              | reduce-scatter, in    | all-gather
 *         | buckets have arrived  |                      | the last micro-step   |
 *   2     | as in stage 1         | until the unit that  | reduce-scatter, in    | all-gather
 *         |                       | shares this unit's   | each micro-step,      |
 *         |                       | buffer is reduced    | added to a shard      |
 *   3     | gather the block, and | as in stage 2        | as in stage 2         | all-gather; of
 *         | start the next one's  |                      |                       | blocks only two
 *   dp    | as in stage 1         | nothing              | reduce to rank 0, in  | broadcast from
 *         |                       |                      | the last micro-step   | rank 0
 *   Stages 0, 1 and dp add up the earlier micro-steps locally, in the gradient buffer.
 *
 * Where a gradient lies: each step moves it down this table, from buffer to buffer. The plan holds
 * all indices; its buckets and update ranges name them as here. Functions stand without g2z__.
 *   buffer         index of an element        written by
 *   model.dwte     wte alone, [Vp, C]         head(); unit_backward() of wpe, if !pass.keep_rows
 *   model.grads    unit.grad_at + offset[p];  unit_backward() and unit_backward_norm() (room 13).
 *                  bucket.grad_at             wte: reduce_bucket() casts dwte, unless dwte is here
 *   sums           sum_at of this rank's      reduce_bucket(). On CPUs star_reduce() adds (room
 *                  slice                      11), on GPUs room k80. collect() adds the rows that
 *                                             gather_rows() sends, if plan.wte_rows. `sums` is
 *                                             model.grads up to stage 1; from stage 2 on, a shard
 *   master, m      shard_at                   optimize(): adamw_element() or muon_element() (room
 *                                             08); Muon's m: muon_to_homes()
 *   v              v_at                       optimize(): adamw
 *   model.params   own_param_at               optimize(): the rounded master. Then share() fills
 *                                             the bucket, at param_at, on every rank
 * With fp16 and two micro-steps, gradients, sums and what travels are fp16; only dwte is fp32.
 * From stage 2 on, micro-step 0 overwrites the shard, and micro-step 1 adds to it and rounds.
 * Between sums and master, collect() waits for the sums and squares them, and judge() turns the
 * squares of all ranks into one factor. adamw and momentum multiply the sums by it. The optimizer's
 * ops get the addresses of these buffers in t->update, which trainer_first() (room 14) fills.
 *
 * The new parameters travel during the next forward pass. Before forward() or unit_backward() reads
 * a unit's parameters, wait_parameters() makes the device wait until they have arrived.
 *
 * Muon updates the blocks' weights, and needs whole matrices, but a slice may begin and end inside
 * a matrix. So each weight has a home rank. muon_to_homes() computes u, the gradient plus momentum,
 * of this rank's slices and sends it to the homes. There muon_at_homes() orthogonalizes u to O, and
 * sends O back to the owners of the slices. optimize() applies O together with AdamW's other
 * updates. wte is updated and shared while u travels.
 *
 * To add an optimizer:
 *   declare   G2Z_OPTIMIZER_LIST (d05), its settings (i05), and a column of G2Z_PARAM_LIST (d06)
 *   check     train_config_check() (i05) ties moments=bf16 to AdamW
 *   plan      plan_updates() cuts its ranges; plan_homes() gives whole weights homes and routes,
 *             and sets v_elements; plan_fill() sets plan.early
 *   memory    its state is a row of G2Z__TRAINER_BUFFERS (i06). State has one element per
 *             parameter: a rank holds its slices, a file all in canonical order. State of a whole
 *             matrix, such as Shampoo's L and R, needs new code: allocate it at homes by
 *             plan.weight, save it by (unit, param); homes change with the world. Scratch in the
 *             logits' memory lasts until the next head().
 *   ops       d08, i09 and gpt2_zero_kernels.cuh; muon_to_homes(), muon_at_homes(), optimize() and
 *             trainer_rehearse() (i14) call them; device_suits() checks the GPU. In a skipped step
 *             (state->skip) no op may change a weight or a moment.
 *   files     g2z_buffer; trainer_shard(), where scale > 0 means Muon, trainer_read() and _write()
 *             (i14); transfer_buffer(), _elements(), saver_begin() and loading_fill() (i16), which
 *             resets the state of weights whose optimizer changed
 *   log       trainer_open() (i14)
 *
 * When a rank may overwrite memory that another rank reads:
 *   parameters      After the verdict. A rank enqueues its verdict after its last backward pass, so
 *                   when all verdicts have arrived no rank reads old parameters any more.
 *   block buffers   Stage 3, during a pass: when the devices of all ranks are done with the block
 *                   in that buffer. The call AFTER with `all` waits for that.
 *   logits          In the last micro-step, when the heads of all ranks are done: reduce_head()
 *                   waits for that. Then the tokens and rows of other ranks arrive there.
 *   Muon's areas    In the logits' memory, from the verdict to the next step's head(). embed_add,
 *                   which reads rows there, is enqueued before the verdict. The update, which reads
 *                   O there, is enqueued before the next head. Another rank writes only the
 *                   elements that its routes bring here.
 *   verdicts        After this rank's reductions of this step. They wait for every rank's backward
 *                   pass. A rank enqueues that pass after its previous decision, which read the old
 *                   row.
 *   inboxes         If copy engines carry gradients, an inbox has two halves, used alternately.
 *                   Reductions i and i-2 use the same half. It is free: all ranks met in reduction
 *                   i-1, and each had added up reduction i-2 before that.
 *
 * The step only enqueues. On a GPU a call fails only if this rank's device is lost; on CPUs also if
 * another rank is, or memory ends. Any other failure of a rank travels in the verdict, so that no
 * rank waits in a collective for ever. */

/* The parts of the step, which follow it in this room. */
G2Z__PRIVATE g2z_status g2z__begin_step(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__begin_micro_step(g2z_trainer *t, int m);
G2Z__PRIVATE g2z_status g2z__wait_parameters(g2z_trainer *t, int unit, int next);
G2Z__PRIVATE g2z_status g2z__forward(g2z_trainer *t, int unit);
G2Z__PRIVATE g2z_status g2z__wait_gradients(g2z_trainer *t, int unit);
G2Z__PRIVATE g2z_status g2z__head(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__reduce_head(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__reduce_bucket(g2z_trainer *t, int bucket);
G2Z__PRIVATE g2z_status g2z__gather_rows(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__end_micro_step(g2z_trainer *t, int reduced);
G2Z__PRIVATE g2z_status g2z__collect(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__judge(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__muon_to_homes(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__muon_at_homes(g2z_trainer *t);
G2Z__PRIVATE g2z_status g2z__optimize(g2z_trainer *t, int from, int to);
G2Z__PRIVATE g2z_status g2z__share(g2z_trainer *t, int from, int to);

/* From rooms 13 and 10. */
G2Z__PRIVATE g2z_status g2z__unit_forward(const g2z_model *model, const g2z__pass *pass, int unit);
G2Z__PRIVATE g2z_status g2z__head_loss(const g2z_model *model, const g2z__pass *pass,
                                       double *loss_sum, const g2z_step_state *state);
G2Z__PRIVATE g2z_status g2z__unit_backward(const g2z_model *model, const g2z__pass *pass, int unit);
G2Z__PRIVATE g2z_status g2z__unit_backward_norm(const g2z_model *model, const g2z__pass *pass,
                                                int unit);
G2Z__PRIVATE const void *g2z__dropped(const g2z_model *model, const g2z__pass *pass);
G2Z__PRIVATE void g2z__ranks_phase(g2z_ranks *ranks, const char *phase, int64_t step,
                                   double extra_s);
G2Z__PRIVATE int64_t g2z__ranks_note(g2z_ranks *ranks, const char *kind, int bucket, size_t bytes);

G2Z__PRIVATE g2z_status g2z__zero_step(g2z_trainer *t, const g2z_plan *plan) {
  const int wte = plan->wte;
  G2Z_TRY(g2z__begin_step(t));
  for (int m = 0; m < plan->accum; m++) {
    const int last = m == plan->accum - 1;
    const int sends = plan->by_unit || last;             /* gradients leave for their owners */
    const int rows = last && plan->wte_rows;             /* wte's gradient leaves in two parts */
    int b = 0, buckets = plan->buckets;                  /* those that backward completes */
    if (rows) buckets = plan->unit[wte].bucket;          /* all except wte's */
    G2Z_TRY(g2z__begin_micro_step(t, m));
    for (int u = wte; u >= 0; u--) {                     /* wte, wpe, the blocks, final LayerNorm */
      G2Z_TRY(g2z__wait_parameters(t, u, u - 1));        /* [A], and prefetch the next unit */
      G2Z_TRY(g2z__forward(t, u));
    }
    G2Z_TRY(g2z__wait_parameters(t, wte, wte));          /* [A]: the head reads wte, too */
    G2Z_TRY(g2z__wait_gradients(t, wte));                /* [B] */
    G2Z_TRY(g2z__head(t));                               /* loss, dh, head's part of dwte */
    if (rows) G2Z_TRY(g2z__reduce_head(t));              /* [C] of wte, during all of backward */
    G2Z_TRY(g2z__wait_gradients(t, 0));
    for (int u = 0; u <= wte; u++) {                     /* gradients complete in this order */
      G2Z_TRY(g2z__wait_parameters(t, u, u + 1));        /* [A] */
      G2Z_TRY(g2z__unit_backward(&t->model, &t->pass, u)); /* recomputes first, if asked to */
      if (u + 1 < wte) G2Z_TRY(g2z__wait_gradients(t, u + 1)); /* [B] */
      G2Z_TRY(g2z__unit_backward_norm(&t->model, &t->pass, u)); /* also a bias of unit u + 1 */
      while (sends && b < buckets && plan->bucket[b].last_unit <= u)
        G2Z_TRY(g2z__reduce_bucket(t, b++));             /* [C] while backward continues */
    }
    if (rows) G2Z_TRY(g2z__gather_rows(t));              /* embedding's part, one row per token */
    G2Z_TRY(g2z__end_micro_step(t, sends));
  }
  G2Z_TRY(g2z__collect(t));                              /* sums over the ranks, their squares */
  G2Z_TRY(g2z__judge(t));                                /* finite? else skip; clip, loss scale */
  G2Z_TRY(g2z__muon_to_homes(t));                        /* u, to the homes of whole matrices */
  G2Z_TRY(g2z__optimize(t, plan->early, plan->buckets)); /* what the next forward reads first */
  G2Z_TRY(g2z__share(t, plan->early, plan->buckets));    /* [D] while AdamW continues */
  G2Z_TRY(g2z__muon_at_homes(t));                        /* u becomes O, which returns to slices */
  G2Z_TRY(g2z__optimize(t, 0, plan->early));             /* the other buckets */
  return g2z__share(t, 0, plan->early);                  /* [D] during the next forward pass */
}

/* The addresses of the table above, from the plan's indices. */
G2Z__PRIVATE char *g2z__params_at(const g2z_model *model, size_t at) {
  return model->params + at * model->plan->dtype_bytes;
}
G2Z__PRIVATE char *g2z__grads_at(const g2z_model *model, size_t at) {
  return model->grads + at * model->plan->grad_bytes;
}
G2Z__PRIVATE char *g2z__sums_at(const g2z_trainer *t, size_t at) {
  return t->sums + at * t->plan->grad_bytes;
}

/* Runs an op with these arguments, and times it as a span. */
#define G2Z__SPAN(device, name, op, ...)                          \
  do {                                                            \
    (device)->ops->span_begin(device, G2Z_SPAN_##name);           \
    G2Z_TRY((device)->ops->op(device, __VA_ARGS__));              \
    (device)->ops->span_end(device, G2Z_SPAN_##name);             \
  } while (0)

/* Marks in the queue of room 11: one per kind and bucket. The last four kinds use bucket 0 only. */
typedef enum g2z__queue_place {
  G2Z__PLACE_REDUCED,   /* a bucket's gradients are summed */
  G2Z__PLACE_GATHERED,  /* a bucket's parameters have arrived */
  G2Z__PLACE_VERDICT,
  G2Z__PLACE_ROWS,      /* the embedding's part of wte's gradient has arrived */
  G2Z__PLACE_PROGRESS,  /* the end of a micro-step that reduces nothing */
  G2Z__PLACE_EXCHANGED, /* Muon: u is at home, or O has returned */
  G2Z__PLACE_KINDS
} g2z__queue_place;

/* Puts a mark into the queue, or makes the device wait for it. */
G2Z__PRIVATE g2z_status g2z__queue(g2z_trainer *t, g2z_call_kind kind, g2z__queue_place place,
                                   int bucket) {
  g2z_call call = g2z_call_of(kind, NULL, NULL, 0);
  call.place = (int)place * t->plan->buckets + bucket;
  return g2z_comm_submit(t->comm, &call);
}

/* Makes the queue wait for the work that this device has so far; with `all`, every device. */
G2Z__PRIVATE g2z_status g2z__queue_after(g2z_trainer *t, int all) {
  g2z_call call = g2z_call_of(G2Z_CALL_AFTER, NULL, NULL, 0);
  call.all = all;
  return g2z_comm_submit(t->comm, &call);
}

/* ----- a micro-step on this rank ------------------------------------------ */

G2Z__PRIVATE double *g2z__my_verdict(const g2z_trainer *t) {
  return t->verdict.rows + (size_t)t->plan->rank * G2Z_VERDICT_COLUMNS;
}

/* A forward pass over x[B,T] alone: no targets, dropout or cache. */
G2Z__PRIVATE g2z__pass g2z__pass_over(const int32_t *x, int B, int T) {
  g2z__pass pass;
  memset(&pass, 0, sizeof pass);
  pass.x = x;
  pass.B = B;
  pass.T = T;
  return pass;
}

/* The pass of micro-step m, with its tokens and dropout. */
G2Z__PRIVATE g2z__pass g2z__trainer_pass(const g2z_trainer *t, int m) {
  const g2z_plan *plan = t->plan;
  const size_t first = (size_t)m * plan->tokens;
  g2z__pass pass = g2z__pass_over(t->model.tokens + first, plan->batch, plan->seq);
  pass.y = t->model.targets + first;
  pass.dropout.probability = t->config.dropout;
  pass.dropout.first =
      (uint32_t)m * (uint32_t)plan->batch * (uint32_t)plan->world + (uint32_t)plan->rank;
  pass.dropout.stride = (uint32_t)plan->world;
  pass.dropout.seq = plan->seq;
  pass.dropout.seed = t->config.seed;
  pass.dropout.state = t->state;
  return pass;
}

/* Zeroes this rank's sums and counts: a step that failed leaves its own there. */
G2Z__PRIVATE g2z_status g2z__begin_step(g2z_trainer *t) {
  return t->device->ops->zero(t->device, g2z__my_verdict(t), G2Z_VERDICT_SUMS * sizeof(double));
}

/* From stage 2 on, gradients are sent after each micro-step, so backward overwrites them. Forward
 * counts the numbers that 8 bits clamp. It counts weights in micro-step 0 alone, since all
 * micro-steps round the same weights. */
G2Z__PRIVATE g2z_status g2z__begin_micro_step(g2z_trainer *t, int m) {
  double *row = g2z__my_verdict(t);
  t->micro_step = m;
  t->pass = g2z__trainer_pass(t, m);
  t->pass.write = m == 0 || t->plan->by_unit ? G2Z_OVERWRITE : G2Z_ACCUMULATE;
  t->pass.keep_rows = t->plan->wte_rows && m == t->plan->accum - 1;
  t->device->clamped_inputs = row + G2Z_VERDICT_CLAMPED_INPUTS;
  t->device->clamped_weights = m == 0 ? row + G2Z_VERDICT_CLAMPED_WEIGHTS : NULL;
  t->device->ops->span_begin(t->device, G2Z_SPAN_FORWARD);
  return G2Z_OK;
}

/* Weights change only between steps, so micro-step 0 makes the 8-bit copies for the whole step. */
G2Z__PRIVATE g2z_status g2z__forward(g2z_trainer *t, int unit) {
  const int block = t->plan->unit[unit].kind == G2Z_UNIT_BLOCK;
  if (block && t->micro_step == 0 && t->device->narrow_count)
    G2Z_TRY(t->device->ops->narrow_weights(t->device, 4 * (t->plan->model.layers - unit)));
  return g2z__unit_forward(&t->model, &t->pass, unit);
}

/* The LM head: the end of forward, and the beginning of backward. */
G2Z__PRIVATE g2z_status g2z__head(g2z_trainer *t) {
  double *loss_sum = g2z__my_verdict(t) + G2Z_VERDICT_LOSS;
  G2Z_TRY(g2z__head_loss(&t->model, &t->pass, loss_sum, t->state));
  t->device->clamped_inputs = NULL; /* backward may compute activations again */
  t->device->clamped_weights = NULL;
  t->device->ops->span_end(t->device, G2Z_SPAN_FORWARD);
  t->device->ops->span_begin(t->device, G2Z_SPAN_BACKWARD);
  return G2Z_OK;
}

/* Reports progress to the watcher; if nothing was reduced, again when the device reaches a mark. */
G2Z__PRIVATE g2z_status g2z__end_micro_step(g2z_trainer *t, int reduced) {
  t->device->ops->span_end(t->device, G2Z_SPAN_BACKWARD);
  g2z__ranks_phase(t->context->ranks, "step", t->enqueued + 1, 0);
  if (reduced) return G2Z_OK;
  G2Z_TRY(g2z__queue_after(t, 0));
  return g2z__queue(t, G2Z_CALL_MARK, G2Z__PLACE_PROGRESS, 0);
}

/* ----- gradients to their owners ------------------------------------------ */

/* [B] From stage 2 on, the units alternate between two gradient buffers; wte has its own buffer.
 * Waits until the gradient that was in the buffer before is reduced: of unit - 2, in this
 * micro-step; of wte, in the previous one. The wait for wte covers units 0 and 1, too, because its
 * reduction is the last in the queue. Then zeroes the elements that backward does not write: the
 * padding, and positions of wpe beyond the sequence length. */
G2Z__PRIVATE g2z_status g2z__wait_gradients(g2z_trainer *t, int unit) {
  const g2z_plan *plan = t->plan;
  const g2z_unit *u = &plan->unit[unit];
  if (!plan->by_unit) return G2Z_OK;
  if (unit == plan->wte) { /* backward writes all of it: no element is left to zero */
    if (t->micro_step == 0) return G2Z_OK;
    return g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_REDUCED, plan->buckets - 1);
  }
  if (unit >= 2) /* wait for the last bucket of unit - 2 */
    G2Z_TRY(g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_REDUCED, plan->unit[unit - 1].bucket - 1));
  const size_t written = unit == plan->wpe ? 0 : u->elements;
  if (written == u->padded) return G2Z_OK;
  return t->device->ops->zero(t->device, g2z__grads_at(&t->model, u->grad_at + written),
                              (u->padded - written) * plan->grad_bytes);
}

/* [C] Sums a bucket's gradients over the ranks on the communication stream, while backward
 * continues. From stage 2 on, each micro-step's sum is added to the owner's shard. */
G2Z__PRIVATE g2z_status g2z__reduce_bucket(g2z_trainer *t, int bucket) {
  const g2z_plan *plan = t->plan;
  const g2z_bucket *b = &plan->bucket[bucket];
  const g2z_unit *wte = &plan->unit[plan->wte];
  char *grads = g2z__grads_at(&t->model, b->grad_at);
  /* Round this bucket's part of wte's fp32 gradient to the gradient type, without the padding of
   * the last buckets. It runs during backward if wte's gradient is reduced in two parts. */
  if (plan->dwte_dtype != plan->grad_dtype && b->begin >= wte->begin &&
      b->begin < wte->begin + wte->elements) {
    const size_t first = b->begin - wte->begin, n = G2Z__MIN(b->elements, wte->elements - first);
    const float *from = (const float *)t->model.dwte + first;
    const g2z_call cast = g2z_call_of(G2Z_CALL_CAST, grads, from, n); /* on the queue */
    if (t->pass.keep_rows) G2Z_TRY(g2z_comm_submit(t->comm, &cast));
    else G2Z_TRY(t->device->ops->cast_grad(t->device, grads, from, n));
  }
  g2z_call call = g2z_call_of(G2Z_CALL_REDUCE, g2z__sums_at(t, b->sum_at), grads, b->elements);
  call.owner = plan->owner;
  call.write = plan->by_unit && t->micro_step > 0 ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
  g2z__ranks_note(t->context->ranks, "reduce", bucket, b->elements * plan->grad_bytes);
  G2Z_TRY(g2z__queue_after(t, 0)); /* backward has written the bucket */
  G2Z_TRY(g2z_comm_submit(t->comm, &call));
  return g2z__queue(t, G2Z_CALL_MARK, G2Z__PLACE_REDUCED, bucket);
}

/* [C] In a step's last micro-step wte's gradient may be reduced in two parts. The first part, the
 * head's and everything from earlier micro-steps, is reduced during backward. Before that, all
 * ranks gather the tokens, because the second part has a row for each. A single rank copies
 * nothing. */
G2Z__PRIVATE g2z_status g2z__reduce_head(g2z_trainer *t) {
  const g2z_plan *plan = t->plan;
  const size_t bytes = plan->tokens * sizeof(int32_t);
  int32_t *gathered = (int32_t *)(t->model.logits + plan->row_tokens_at);
  t->row_tokens = plan->world == 1 ? t->pass.x : gathered;
  g2z__ranks_note(t->context->ranks, "tokens", -1, bytes);
  G2Z_TRY(g2z__queue_after(t, 1)); /* all ranks have read their logits */
  g2z_call call = g2z_call_of(G2Z_CALL_ROWS, (void *)t->row_tokens, t->pass.x, bytes);
  call.span = G2Z_SPAN_EMBEDDING_ROWS;
  G2Z_TRY(g2z_comm_submit(t->comm, &call));
  for (int bucket = plan->unit[plan->wte].bucket; bucket < plan->buckets; bucket++)
    G2Z_TRY(g2z__reduce_bucket(t, bucket));
  return G2Z_OK;
}

/* [C] The second part: all ranks gather the row that each token adds to wte's gradient. */
G2Z__PRIVATE g2z_status g2z__gather_rows(g2z_trainer *t) {
  const g2z_plan *plan = t->plan;
  const size_t bytes = plan->tokens * (size_t)plan->model.channels * plan->dtype_bytes;
  const void *mine = g2z__dropped(&t->model, &t->pass);
  t->gathered_rows = plan->world == 1 ? mine : t->model.logits;
  g2z__ranks_note(t->context->ranks, "rows", -1, bytes);
  G2Z_TRY(g2z__queue_after(t, 0));
  g2z_call call = g2z_call_of(G2Z_CALL_ROWS, (void *)t->gathered_rows, mine, bytes);
  call.span = G2Z_SPAN_EMBEDDING_ROWS;
  G2Z_TRY(g2z_comm_submit(t->comm, &call));
  return g2z__queue(t, G2Z_CALL_MARK, G2Z__PLACE_ROWS, 0);
}

/* Sums the squares of this rank's gradients in buckets [from, to). */
G2Z__PRIVATE g2z_status g2z__square(g2z_trainer *t, int from, int to) {
  int count = 0;
  g2z_range *last = NULL;
  for (int bucket = from; bucket < to; bucket++) {
    const g2z_bucket *b = &t->plan->bucket[bucket];
    if (b->own_elements == 0) continue;
    if (last && last->begin + last->elements == b->sum_at) {
      last->elements += b->own_elements;
      continue;
    }
    last = &t->pieces[count++];
    last->begin = b->sum_at;
    last->elements = b->own_elements;
  }
  double *squares = g2z__my_verdict(t) + G2Z_VERDICT_SQUARES;
  G2Z__SPAN(t->device, NORM, grad_sumsq, squares, t->sums, t->pieces, count);
  return G2Z_OK;
}

/* Waits for the reductions, and sums the squares of the results. The buckets before `last` are
 * squared while `last`, which backward completed last, is still being reduced. */
G2Z__PRIVATE g2z_status g2z__collect(g2z_trainer *t) {
  const g2z_plan *plan = t->plan;
  const g2z_ops *ops = t->device->ops;
  int32_t *order = NULL;
  int last = plan->buckets - 1;
  if (plan->wte_rows) last = plan->unit[plan->wte].bucket - 1;
  if (plan->world == 1) last = 0; /* a single rank sends nothing: it squares all at once */
  ops->span_begin(t->device, G2Z_SPAN_OPTIMIZER_STEP);
  if (plan->wte_rows) { /* sort the tokens while their rows are being gathered */
    order = (int32_t *)(t->model.logits + plan->row_order_at);
    G2Z_TRY(g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_REDUCED, plan->unit[plan->wte].bucket));
    G2Z_TRY(ops->embed_order(t->device, order, t->row_tokens, (int)plan->row_count));
  }
  if (last > 0) {
    G2Z_TRY(g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_REDUCED, last - 1)); /* and all earlier ones */
    G2Z_TRY(g2z__square(t, 0, last));
  }
  if (plan->wte_rows) { /* add the rows to this rank's part of wte */
    G2Z_TRY(g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_ROWS, 0));
    G2Z__RUN(t->device, embed_add, .grads = t->sums, .parts = t->row_parts,
             .count = t->row_part_count, .rows = t->gathered_rows, .order = order,
             .N = (int)plan->row_count, .C = plan->model.channels);
  }
  G2Z_TRY(g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_REDUCED, last));
  return g2z__square(t, last, plan->buckets);
}

/* All ranks gather every rank's row of the verdict, on the device's own queue if possible. Then
 * each device decides for itself, with the same result (g2z__decide, room 08). After that no rank
 * reads old parameters any more, and none has gathered new ones yet. */
G2Z__PRIVATE g2z_status g2z__judge(g2z_trainer *t) {
  const size_t bytes = G2Z_VERDICT_COLUMNS * sizeof(double);
  int done = 0;
  g2z_call call = g2z_call_of(G2Z_CALL_ROWS, t->verdict.rows, g2z__my_verdict(t), bytes);
  call.span = G2Z_SPAN_VERDICT;
  g2z__ranks_note(t->context->ranks, "verdict", -1, bytes);
  G2Z_TRY(t->comm->ops->rows_now(t->comm, &call, &done));
  if (!done) {
    G2Z_TRY(g2z__queue_after(t, 0));
    G2Z_TRY(g2z_comm_submit(t->comm, &call));
    G2Z_TRY(g2z__queue(t, G2Z_CALL_MARK, G2Z__PLACE_VERDICT, 0));
    G2Z_TRY(g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_VERDICT, 0));
  }
  G2Z__SPAN(t->device, DECIDE, decide, t->state, &t->verdict, &t->config.optimizer,
            t->plan->step_tokens);
  t->buffered[0] = t->buffered[1] = t->joined = t->stale = 0;
  return G2Z_OK;
}

/* Muon: sends u to the homes, or O back to the owners. */
typedef enum g2z__direction { G2Z__TO_HOMES, G2Z__TO_OWNERS } g2z__direction;
G2Z__PRIVATE g2z_status g2z__exchange(g2z_trainer *t, g2z__direction direction) {
  const g2z_plan *plan = t->plan;
  char *home = t->model.logits, *own = home + plan->u_begin;
  const int back = direction == G2Z__TO_OWNERS;
  if (!plan->routes) return G2Z_OK;
  g2z_call call = g2z_call_of(G2Z_CALL_EXCHANGE, home, own, plan->u_bytes);
  if (back) call = g2z_call_of(G2Z_CALL_EXCHANGE, own, home, plan->u_bytes);
  call.routes = plan->route;
  call.count = plan->routes;
  call.back = back;
  g2z__ranks_note(t->context->ranks, "exchange", -1,
                  (plan->shard_elements - plan->v_elements) * plan->u_bytes);
  G2Z_TRY(g2z__queue_after(t, 0));
  G2Z_TRY(g2z_comm_submit(t->comm, &call));
  return g2z__queue(t, G2Z_CALL_MARK, G2Z__PLACE_EXCHANGED, 0);
}

/* ----- new parameters, and their way from the owners ----------------------- */

/* Computes u of this rank's slices, and sends it to the homes. In a skipped step u is not computed;
 * old bytes travel, and their result is not used. */
G2Z__PRIVATE g2z_status g2z__muon_to_homes(g2z_trainer *t) {
  const g2z_plan *plan = t->plan;
  if (!plan->muon_weights) return G2Z_OK;
  G2Z__SPAN(t->device, MOMENTUM, momentum, t->model.logits + plan->u_begin, &t->update,
            plan->muon_updates, plan->updates);
  return g2z__exchange(t, G2Z__TO_HOMES);
}

/* Waits for u of the weights at home, turns it into O, and waits for O of this rank's slices. */
G2Z__PRIVATE g2z_status g2z__muon_at_homes(g2z_trainer *t) {
  const g2z_plan *plan = t->plan;
  char *area = t->model.logits;
  if (!plan->muon_weights) return G2Z_OK;
  if (plan->routes) G2Z_TRY(g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_EXCHANGED, 0));
  G2Z__SPAN(t->device, ORTHOGONALIZE, orthogonalize, area, plan->shape, plan->shapes,
            area + plan->work_begin, plan->logits_bytes - plan->work_begin);
  G2Z_TRY(g2z__exchange(t, G2Z__TO_OWNERS));
  if (!plan->routes) return G2Z_OK;
  return g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_EXCHANGED, 0);
}

/* Runs AdamW, then Muon, on this rank's parameters in buckets [from, to). */
G2Z__PRIVATE g2z_status g2z__optimize(g2z_trainer *t, int from, int to) {
  const g2z_bucket *first = &t->plan->bucket[from], *end = &t->plan->bucket[to];
  if (from == to) return G2Z_OK;
  G2Z__SPAN(t->device, ADAMW, adamw, &t->update, first->first_update[G2Z_OPTIMIZER_ADAMW],
            end->first_update[G2Z_OPTIMIZER_ADAMW]);
  const size_t begin = first->first_update[G2Z_OPTIMIZER_MUON];
  if (begin < end->first_update[G2Z_OPTIMIZER_MUON])
    G2Z__SPAN(t->device, MUON, muon, t->model.logits + t->plan->u_begin, &t->update, begin,
              end->first_update[G2Z_OPTIMIZER_MUON]);
  return G2Z_OK;
}

/* Gathers a bucket's parameters from their owners to all ranks. The caller has submitted AFTER. */
G2Z__PRIVATE g2z_status g2z__gather_bucket(g2z_trainer *t, int bucket) {
  const g2z_bucket *b = &t->plan->bucket[bucket];
  g2z_call call = g2z_call_of(G2Z_CALL_GATHER, g2z__params_at(&t->model, b->param_at),
                              g2z__params_at(&t->model, b->own_param_at), b->elements);
  call.owner = t->plan->owner;
  g2z__ranks_note(t->context->ranks, "gather", bucket, b->elements * t->plan->dtype_bytes);
  G2Z_TRY(g2z_comm_submit(t->comm, &call));
  return g2z__queue(t, G2Z_CALL_MARK, G2Z__PLACE_GATHERED, bucket);
}

/* Stage 3: gathers a block into its buffer, unless it is there. Does nothing for other units and
 * for -1. */
G2Z__PRIVATE g2z_status g2z__gather_unit(g2z_trainer *t, int unit) {
  const g2z_unit *u = t->plan->unit;
  if (unit < 0 || !u[unit].gathered || t->buffered[unit % 2] == unit) return G2Z_OK;
  G2Z_TRY(g2z__queue_after(t, 1)); /* all ranks have finished with the old block */
  for (int bucket = u[unit + 1].bucket - 1; bucket >= u[unit].bucket; bucket--)
    G2Z_TRY(g2z__gather_bucket(t, bucket));
  t->buffered[unit % 2] = unit;
  t->buffered_joined[unit % 2] = 0;
  return G2Z_OK;
}

/* Makes the device wait for a unit's parameters: for its first bucket, which is gathered last. */
G2Z__PRIVATE g2z_status g2z__arrive(g2z_trainer *t, int unit) {
  const g2z_unit *u = &t->plan->unit[unit];
  if (u->gathered) {
    if (t->buffered_joined[unit % 2]) return G2Z_OK;
    t->buffered_joined[unit % 2] = 1;
  } else {
    const int gathers = t->plan->buckets - u->bucket; /* the last bucket is gathered first */
    if (t->joined >= gathers) return G2Z_OK;
    t->joined = gathers;
  }
  return g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_GATHERED, u->bucket);
}

/* [A] Waits for a unit's parameters, and prefetches the next unit of the pass while this one
 * computes. At the end of a pass the buffers hold its last two blocks. The next pass begins with
 * these, because it runs in the other direction. */
G2Z__PRIVATE g2z_status g2z__wait_parameters(g2z_trainer *t, int unit, int next) {
  if (!t->plan->gathers) return G2Z_OK;
  t->needed = unit;
  G2Z_TRY(g2z__gather_unit(t, unit));
  G2Z_TRY(g2z__arrive(t, unit));
  return g2z__gather_unit(t, next);
}

/* The unit of forward's second block, or of the only block. The first two have one buffer each. */
G2Z__PRIVATE int g2z__trainer_second(const g2z_trainer *t) {
  return G2Z__MAX(t->plan->model.layers - 1, 1);
}

/* [D] Gathers the new parameters of buckets [from, to) while the device continues. In stage 3 it
 * gathers only two blocks, the first ones of the next forward pass. The others follow when they are
 * needed. */
G2Z__PRIVATE g2z_status g2z__share(g2z_trainer *t, int from, int to) {
  const g2z_plan *plan = t->plan;
  if (to == plan->early) t->device->ops->span_end(t->device, G2Z_SPAN_OPTIMIZER_STEP);
  if (!plan->gathers) return G2Z_OK;
  G2Z_TRY(g2z__queue_after(t, 0));
  for (int bucket = to - 1; bucket >= from; bucket--) {
    const int unit = plan->bucket[bucket].unit;
    const g2z_unit *u = &plan->unit[unit];
    if (!u->gathered) G2Z_TRY(g2z__gather_bucket(t, bucket));
    else if (unit >= g2z__trainer_second(t) && bucket == u->bucket) /* once per block */
      G2Z_TRY(g2z__gather_unit(t, unit));
  }
  return G2Z_OK;
}

/* Gathers stale parameters, except stage 3's blocks, when no rank reads the old ones any more. */
G2Z__PRIVATE g2z_status g2z__refresh(g2z_trainer *t) {
  const g2z_plan *plan = t->plan;
  if (!t->stale || !plan->gathers) return G2Z_OK;
  G2Z_TRY(g2z__queue_after(t, 1));
  for (int bucket = plan->buckets - 1; bucket >= 0; bucket--)
    if (!plan->unit[plan->bucket[bucket].unit].gathered)
      G2Z_TRY(g2z__gather_bucket(t, bucket));
  t->joined = t->stale = 0;
  return g2z__queue(t, G2Z_CALL_WAIT, G2Z__PLACE_GATHERED, plan->buckets - 1);
}

/* A recorded step expects the parameters on this rank that were there after the previous step.
 * Gathers them again after a load, a validation or a generation has changed that. */
G2Z__PRIVATE g2z_status g2z__restore(g2z_trainer *t) {
  if (!t->plan->gathers) return G2Z_OK;
  G2Z_TRY(g2z__refresh(t));
  for (int unit = t->plan->model.layers; unit >= g2z__trainer_second(t); unit--)
    G2Z_TRY(g2z__gather_unit(t, unit));
  t->joined = t->buffered_joined[0] = t->buffered_joined[1] = 0;
  return G2Z_OK;
}

/* ===== >>i02 services and files ==========================================
 * In: requests for memory, log lines, files. Out: what was requested, or a sentence for the
 * failure. Law: nothing below this room calls malloc, free or printf itself. */

G2Z_API char *g2z_tame(char *text) {
  for (unsigned char *c = (unsigned char *)text; *c; c++)
    if (*c < 0x20 || *c == 0x7f) *c = '?';
    else if (*c == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0) c[0] = c[1] = '?';
  return text;
}

/* Prints the arguments that follow `format` into an array. */
#define G2Z__PRINT(array, format)                        \
  do {                                                   \
    va_list arguments_;                                  \
    va_start(arguments_, format);                        \
    vsnprintf(array, sizeof(array), format, arguments_); \
    va_end(arguments_);                                  \
  } while (0)

G2Z_API g2z_status g2z_fail(g2z_services *services, g2z_status status, const char *format, ...) {
  G2Z__PRINT(services->error, format);
  g2z_tame(services->error);
  services->alike = 0;
  services->os_error = 0;
  return status;
}

G2Z_API g2z_status g2z_check_range(g2z_services *services, const char *name, int64_t value,
                                   int64_t least, int64_t most) {
  if (value >= least && value <= most) return G2Z_OK;
  G2Z_REFUSE(services, "%s=%" PRId64 " must lie between %" PRId64 " and %" PRId64, name, value,
             least, most);
}

G2Z_API void g2z_log(g2z_services *services, g2z_log_level level, const char *format, ...) {
  if (!services->log && !services->also) return;
  char sentence[G2Z_ERROR_BYTES];
  G2Z__PRINT(sentence, format);
  g2z_tame(sentence);
  if (services->log) (services->log)(services->user, level, sentence); /* `log` may be a macro */
  if (services->also) services->also(services->listener, level, sentence);
}

G2Z_API g2z_status g2z_allocate(g2z_services *services, size_t count, size_t size, void *out) {
  void *memory = NULL;
  memcpy(out, &memory, sizeof memory);
  if (size && count > SIZE_MAX / size)
    return g2z_fail(services, G2Z_NO_MEMORY, "%zu elements of %zu bytes exceed the address space",
                    count, size);
  size_t bytes = count * size;
  if (bytes == 0) bytes = 1;
  if (services->allocate) {
    memory = services->allocate(services->user, bytes);
    if (memory) memset(memory, 0, bytes);
  } else memory = calloc(1, bytes); /* large blocks are zeroed pages that it does not touch */
  if (!memory)
    return g2z_fail(services, G2Z_NO_MEMORY, "no memory for %zu bytes (%.1f MiB)", bytes,
                    (double)bytes / 1048576.0);
  memcpy(out, &memory, sizeof memory);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_grow(g2z_services *services, void *list, size_t *capacity, size_t used,
                            size_t need, size_t size) {
  if (need <= *capacity) return G2Z_OK;
  const size_t half_more = *capacity + *capacity / 2;
  const size_t larger = G2Z__MAX(G2Z__MAX(half_more, need), 64);
  void *old, *moved;
  memcpy(&old, list, sizeof old);
  G2Z_TRY(g2z_allocate(services, larger, size, &moved));
  if (used) memcpy(moved, old, used * size);
  g2z_release(services, old);
  memcpy(list, &moved, sizeof moved);
  *capacity = larger;
  return G2Z_OK;
}

G2Z_API void g2z_release(g2z_services *services, void *memory) {
  if (!memory) return;
  if (services->release) services->release(services->user, memory);
  else free(memory);
}

G2Z_API double g2z_seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Starts a thread that blocks all signals: the program's threads take them. Returns 0 or errno. */
G2Z__PRIVATE int g2z__thread_start(pthread_t *thread, void *(*run)(void *), void *user) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(thread, NULL, run, user);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

/* ----- files -------------------------------------------------------------
 * Readers use pread, so that several can share a descriptor. Writers never show a half-written file
 * under its final name. */

static_assert(sizeof(off_t) == 8, "compile with -D_FILE_OFFSET_BITS=64: shards exceed 2 GiB");
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "gpt2_zero.h: its file formats are little-endian and are read in place; so must the host be"
#endif

/* What a user can do about an errno. */
G2Z__PRIVATE const char *g2z__file_remedy(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT: return "free some space or choose another directory";
    case EFBIG: return "raise the limit of file sizes (ulimit -f) or write less";
    case EACCES:
    case EPERM: return "change its permissions or choose another directory";
    case EROFS: return "choose a directory on a writable file system";
    case ENOENT: return "check the name and the directory";
    case ENOTDIR:
    case EEXIST: return "a file stands where a directory is needed: choose another path";
    case EISDIR: return "name a file";
    case ELOOP: return "it is a symbolic link: remove it, or name what it leads to";
    case ENAMETOOLONG: return "choose a shorter path";
    case ENXIO: return "it is a FIFO: remove it, or choose another path";
    case EMFILE:
    case ENFILE: return "raise the limit of open files (ulimit -n)";
    default: return "check the path and the device";
  }
}

G2Z_API g2z_status g2z_fail_file(g2z_services *services, int error, const char *action,
                                 const char *path) {
  if (!*path) path = "\"\"";
  /* glibc's strerror is thread-safe for every errno that exists; strerror_r has two signatures. */
  g2z_fail(services, G2Z_IO, "cannot %s %s: %s; %s", action, path, strerror(error),
           g2z__file_remedy(error));
  services->os_error = error;
  return G2Z_IO;
}

G2Z_API g2z_path g2z_path_in(const char *directory, const char *format, ...) {
  g2z_path path;
  va_list arguments;
  path.text[0] = 0;
  if (!directory || !*directory) return path;
  int used = snprintf(path.text, sizeof path.text, "%.4096s/", directory);
  va_start(arguments, format);
  vsnprintf(path.text + used, sizeof path.text - (size_t)used, format, arguments);
  va_end(arguments);
  return path;
}

#define G2Z__HASH 0xcbf29ce484222325u /* the hash of no bytes */

/* Continues an FNV-1a hash with these bytes: `hash` covers the bytes before them. */
G2Z__PRIVATE uint64_t g2z__hash(uint64_t hash, const void *bytes, size_t count) {
  const unsigned char *at = (const unsigned char *)bytes;
  for (size_t i = 0; i < count; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
  return hash;
}

/* Reads `count` bytes at `offset`. Returns how many were read: fewer at the file's end;
 * -1 with errno. */
G2Z__PRIVATE int64_t g2z__pread(int file, void *out, size_t count, uint64_t offset) {
  size_t done = 0;
  while (done < count) {
    ssize_t got;
    G2Z_RETRY(got, pread(file, (char *)out + done, count - done, (off_t)(offset + done)));
    if (got < 0) return -1;
    if (got == 0) break;
    done += (size_t)got;
  }
  return (int64_t)done;
}

/* Reads all `bytes` at `offset` of a file whose path is `path`, or fails. */
G2Z__PRIVATE g2z_status g2z__read_at(g2z_services *services, int file, const char *path, void *out,
                                     size_t bytes, uint64_t offset) {
  const int64_t got = g2z__pread(file, out, bytes, offset);
  if (got < 0) return g2z_fail_file(services, errno, "read", path);
  if ((size_t)got == bytes) return G2Z_OK;
  return g2z_fail(services, G2Z_FORMAT, "%s ends before byte %" PRIu64 ": it was cut, or written "
                  "while it was read; copy or make it again", path, offset + bytes);
}

G2Z__PRIVATE int g2z__open_file(const char *path, int flags) {
  int file;
  G2Z_RETRY(file, open(path, flags | O_CLOEXEC, 0666));
  return file;
}

/* Writes at an offset or, if it is -1, at the file's position. */
G2Z__PRIVATE int g2z__pwrite(int file, const void *bytes, size_t count, int64_t offset) {
  for (size_t done = 0; done < count;) {
    const char *from = (const char *)bytes + done;
    ssize_t put;
    if (offset < 0) G2Z_RETRY(put, write(file, from, count - done));
    else G2Z_RETRY(put, pwrite(file, from, count - done, (off_t)offset + (off_t)done));
    if (put < 0) return 0;
    done += (size_t)put;
  }
  return 1;
}

G2Z_API int g2z_write_bytes(int file, const void *bytes, size_t count) {
  return g2z__pwrite(file, bytes, count, -1);
}

G2Z__PRIVATE int g2z__sync(int file) {
  int done;
  G2Z_RETRY(done, fsync(file));
  return done;
}

G2Z__PRIVATE int g2z__resize(int file, uint64_t bytes) {
  int done;
  G2Z_RETRY(done, ftruncate(file, (off_t)bytes));
  return done;
}

G2Z_API int g2z_rename(const char *from, const char *to) {
  int done;
  G2Z_RETRY(done, rename(from, to));
  return done;
}

G2Z_API int g2z_unlink(const char *path) {
  int done;
  G2Z_RETRY(done, unlink(path));
  return done;
}

/* A new name is durable only after its directory is synced. Closes `directory`, which is -1 if it
 * could not be opened. Returns an errno. A directory that cannot be synced (on some network and
 * FUSE file systems) is no error: the file itself is complete. */
G2Z__PRIVATE int g2z__sync_directory(int directory) {
  int error = 0;
  if (directory < 0) return 0;
  if (g2z__sync(directory) != 0) error = errno;
  close(directory);
  if (error == EIO || error == ENOSPC || error == EDQUOT) return error;
  return 0;
}

/* The kind of a file, in words for a sentence. */
G2Z__PRIVATE const char *g2z__kind_of_file(const struct stat *info) {
  if (S_ISDIR(info->st_mode)) return "a directory";
  if (S_ISLNK(info->st_mode)) return "a symbolic link";
  if (S_ISFIFO(info->st_mode)) return "a FIFO";
  return "not a regular file";
}

struct g2z_writer {
  g2z_services *services;
  int file;                    /* -1: closed, and all bytes are on the disk */
  int pending;                 /* PATH.partial exists and is this writer's */
  int error;                   /* errno of the first failure, which sticks; 0: none */
  const char *action;          /* the action that failed */
  uint64_t written;            /* bytes put so far */
  size_t held;                 /* how many of them only `buffer` holds so far */
  char *path, *partial;        /* after the struct, in the same allocation */
  char buffer[65536];
};

/* Keeps the errno of the first call that failed. Every later call returns its sentence again. */
G2Z__PRIVATE g2z_status g2z__writer_check(g2z_writer *writer, int good, const char *action) {
  if (good && !writer->error) return G2Z_OK;
  if (!writer->error) {
    writer->error = errno;
    writer->action = action;
  }
  return g2z_fail_file(writer->services, writer->error, writer->action, writer->path);
}

/* Opens PATH.partial, locks it and empties it. The lock keeps other writers away until the file is
 * closed; the file of a killed program has no lock. */
G2Z__PRIVATE g2z_status g2z__writer_open(g2z_writer *writer) {
  g2z_services *services = writer->services;
  struct stat mine, named;
  /* O_NOFOLLOW: a link would lead elsewhere. O_NONBLOCK: a FIFO would wait for a reader. */
  writer->file = g2z__open_file(writer->partial, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
  if (writer->file < 0 && (errno == ELOOP || errno == ENXIO)) /* it is a link, or a FIFO */
    return g2z_fail_file(services, errno, "create", writer->partial);
  if (writer->file < 0 || fstat(writer->file, &mine) != 0)
    return g2z_fail_file(services, errno, "create", writer->path);
  if (!S_ISREG(mine.st_mode))
    return g2z_fail(services, G2Z_IO, "cannot write %s: it is %s; remove it", writer->partial,
                    g2z__kind_of_file(&mine));
  /* If another program renamed the file between our open() and our lock, we hold the lock of its
   * complete file, and leave that alone. */
  if ((flock(writer->file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) ||
      lstat(writer->partial, &named) != 0 || named.st_ino != mine.st_ino)
    return g2z_fail(services, G2Z_IO, "another program writes %s: wait until it ends, or choose "
                    "another name", writer->path);
  if (g2z__resize(writer->file, 0) != 0)
    return g2z_fail_file(services, errno, "empty", writer->partial);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_writer_create(g2z_services *services, const char *path, g2z_writer **out) {
  *out = NULL;
  size_t bytes = strlen(path) + 1;
  struct stat there;
  g2z_writer *writer;
  if (!*path) return g2z_fail_file(services, ENOENT, "create", path); /* else: ".partial" */
  /* At the end a rename would replace a device such as /dev/null, or a link. If there is a
   * directory, the rename would fail, after all the work. */
  if (lstat(path, &there) == 0 && !S_ISREG(there.st_mode))
    return g2z_fail(services, G2Z_IO, "cannot write %s: it is %s; name a file", path,
                    g2z__kind_of_file(&there));
  G2Z_TRY(g2z_allocate(services, 1, sizeof *writer + 2 * bytes + 8, &writer));
  writer->services = services;
  writer->path = (char *)(writer + 1);
  writer->partial = writer->path + bytes;
  memcpy(writer->path, path, bytes);
  snprintf(writer->partial, bytes + 8, "%s.partial", path);
  const g2z_status status = g2z__writer_open(writer);
  writer->pending = status == G2Z_OK;
  if (status == G2Z_OK) *out = writer;
  else g2z_writer_free(writer);
  return status;
}

G2Z_API g2z_status g2z_writer_put(g2z_writer *writer, const void *bytes, size_t count) {
  writer->written += count;
  if (count > sizeof writer->buffer - writer->held) G2Z_TRY(g2z_writer_flush(writer));
  if (writer->error || count > sizeof writer->buffer)
    return g2z__writer_check(writer, writer->error || g2z_write_bytes(writer->file, bytes, count),
                             "write");
  if (count) memcpy(writer->buffer + writer->held, bytes, count);
  writer->held += count;
  return G2Z_OK;
}

G2Z_API g2z_status g2z_writer_printf(g2z_writer *writer, const char *format, ...) {
  const size_t space = sizeof writer->buffer - writer->held;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(writer->buffer + writer->held, space, format, arguments);
  va_end(arguments);
  if (writer->error || length < 0) return g2z__writer_check(writer, length >= 0, "write");
  if ((size_t)length < space) {
    writer->held += (size_t)length;
    writer->written += (uint64_t)length;
    return G2Z_OK;
  }
  char *text; /* for a text that does not fit into the rest of the buffer */
  g2z_status status = G2Z_NEW(writer->services, (size_t)length + 1, &text);
  if (status != G2Z_OK) {
    writer->error = ENOMEM;
    writer->action = "write";
    return status;
  }
  va_start(arguments, format);
  vsnprintf(text, (size_t)length + 1, format, arguments);
  va_end(arguments);
  status = g2z_writer_put(writer, text, (size_t)length);
  g2z_release(writer->services, text);
  return status;
}

G2Z_API g2z_status g2z_writer_flush(g2z_writer *writer) {
  const size_t held = writer->held;
  writer->held = 0;
  return g2z__writer_check(
      writer, writer->error || g2z_write_bytes(writer->file, writer->buffer, held), "write");
}

/* Overwrites bytes that were put before: headers with counts. */
G2Z__PRIVATE g2z_status g2z__writer_patch(g2z_writer *writer, uint64_t offset, const void *bytes,
                                          size_t count) {
  G2Z_ASSERT(count <= writer->written && offset <= writer->written - count);
  G2Z_TRY(g2z_writer_flush(writer));
  return g2z__writer_check(writer, g2z__pwrite(writer->file, bytes, count, (int64_t)offset),
                           "write");
}

/* The first half of a commit: the whole file is on the disk, under the name PATH.partial. `shut`
 * also closes it, for many files that are renamed together; only commit and free may follow. */
G2Z__PRIVATE g2z_status g2z__writer_finish(g2z_writer *writer, int shut) {
  const int file = writer->file;
  if (file < 0) return g2z__writer_check(writer, 1, "");
  G2Z_TRY(g2z_writer_flush(writer));
  G2Z_TRY(g2z__writer_check(writer, g2z__sync(file) == 0, "sync"));
  if (!shut) return G2Z_OK;
  writer->file = -1;
  return g2z__writer_check(writer, close(file) == 0 || errno == EINTR, "close");
}

G2Z_API g2z_status g2z_writer_commit(g2z_writer *writer) {
  G2Z_TRY(g2z__writer_finish(writer, 0));
  if (!writer->pending) return G2Z_OK;
  G2Z_TRY(g2z__writer_check(writer, g2z_rename(writer->partial, writer->path) == 0,
                            "rename a complete file to"));
  writer->pending = 0;
  char directory[PATH_MAX] = ".";
  const char *slash = strrchr(writer->path, '/');
  if (slash) {
    int length = (int)(slash - writer->path);
    if (length == 0) length = 1; /* the root is its slash */
    snprintf(directory, sizeof directory, "%.*s", length, writer->path);
  }
  const int error = g2z__sync_directory(g2z__open_file(directory, O_RDONLY | O_DIRECTORY));
  if (error) return g2z_fail_file(writer->services, error, "sync the directory", directory);
  return G2Z_OK;
}

G2Z_API void g2z_writer_free(g2z_writer *writer) {
  if (!writer) return;
  if (writer->pending) g2z_unlink(writer->partial); /* while the lock keeps others away */
  if (writer->file >= 0) close(writer->file);
  g2z_release(writer->services, writer);
}

/* Opens a file for reading. Refuses a FIFO, which may never get a writer, except a pipe that the
 * shell made, as in --vocab <(zcat FILE). *file is -1 on failure. */
G2Z__PRIVATE g2z_status g2z__open_read(g2z_services *services, const char *path, int *file) {
  const int shell = strncmp(path, "/dev/", 5) == 0 || strncmp(path, "/proc/", 6) == 0;
  int flags = O_RDONLY;
  struct stat info;
  if (!shell) flags |= O_NONBLOCK;
  *file = g2z__open_file(path, flags);
  if (*file < 0 || fstat(*file, &info) != 0) return g2z_fail_file(services, errno, "open", path);
  if (S_ISREG(info.st_mode) || (shell && S_ISFIFO(info.st_mode))) return G2Z_OK;
  close(*file);
  *file = -1;
  if (S_ISDIR(info.st_mode)) return g2z_fail_file(services, EISDIR, "read", path);
  return g2z_fail(services, G2Z_IO, "cannot read %s: it is %s; name a file", path,
                  g2z__kind_of_file(&info));
}

/* Pipes have no size, and files may grow, so this reads until read() returns 0. */
G2Z__PRIVATE g2z_status g2z__read_open_file(g2z_services *services, const char *path, int file,
                                            size_t limit, char **text, size_t *bytes) {
  struct stat info;
  if (fstat(file, &info) != 0) return g2z_fail_file(services, errno, "read", path);
  size_t need = (size_t)info.st_size, capacity = 0;
  for (ssize_t got = 1; got != 0;) {
    if (need > limit)
      return g2z_fail(services, G2Z_FORMAT, "%s has more than %zu bytes, the limit for a file of "
                      "this kind: check that it is the right file", path, limit);
    G2Z_TRY(G2Z_GROW(services, text, &capacity, *bytes, need + 2)); /* and a byte, and a NUL */
    G2Z_RETRY(got, read(file, *text + *bytes, capacity - *bytes - 1));
    if (got < 0) return g2z_fail_file(services, errno, "read", path);
    *bytes += (size_t)got;
    need = G2Z__MAX(need, *bytes);
  }
  (*text)[*bytes] = 0;
  return G2Z_OK;
}

G2Z_API g2z_status g2z_read_file(g2z_services *services, const char *path, size_t limit,
                                 char **text, size_t *bytes) {
  int file;
  *text = NULL;
  *bytes = 0;
  g2z_status status = g2z__open_read(services, path, &file);
  if (status == G2Z_OK) status = g2z__read_open_file(services, path, file, limit, text, bytes);
  if (file >= 0) close(file);
  if (status == G2Z_OK) return G2Z_OK;
  g2z_release(services, *text);
  *text = NULL;
  *bytes = 0;
  return status;
}

G2Z_API g2z_status g2z_make_directory(g2z_services *services, const char *path) {
  char prefix[PATH_MAX] = "";
  size_t length = strlen(path);
  if (length == 0) return g2z_fail_file(services, ENOENT, "create", path);
  if (length >= sizeof prefix) return g2z_fail_file(services, ENAMETOOLONG, "create", path);
  for (size_t i = 1; i <= length; i++) {
    struct stat info;
    int done;
    if (path[i] != '/' && path[i] != 0) continue;
    memcpy(prefix, path, i);
    G2Z_RETRY(done, mkdir(prefix, 0777));
    if (done == 0) continue;
    int error = errno; /* may not be EEXIST although the directory exists (read-only mounts) */
    if (stat(prefix, &info) != 0 || !S_ISDIR(info.st_mode))
      return g2z_fail_file(services, error, "create the directory", prefix);
  }
  return G2Z_OK;
}

G2Z_API g2z_status g2z_is_there(g2z_services *services, const char *path, int *there) {
  struct stat info;
  *there = lstat(path, &info) == 0;
  if (*there || errno == ENOENT || errno == ENOTDIR) return G2Z_OK;
  return g2z_fail_file(services, errno, "find out whether there is", path);
}

/* ----- memory that the system allows ----- */

#define G2Z__KERNEL_TEXT 4096 /* bytes that are read from a file in /proc or /sys */

/* Reads the beginning of such a file; empty if it cannot be read. */
G2Z__PRIVATE void g2z__kernel_text(const char *directory, const char *name,
                                   char text[G2Z__KERNEL_TEXT]) {
  g2z_path path;
  snprintf(path.text, sizeof path.text, "%.4000s/%.99s", directory, name);
  text[0] = 0;
  FILE *file = fopen(path.text, "re");
  if (!file) return;
  const size_t used = fread(text, 1, G2Z__KERNEL_TEXT - 1, file);
  text[used] = 0;
  fclose(file);
}

/* The number after `key` in such a file; `none` if there is no number, as in "max". */
G2Z__PRIVATE uint64_t g2z__kernel_number(const char *directory, const char *name, const char *key,
                                         uint64_t none) {
  char text[G2Z__KERNEL_TEXT], *end;
  g2z__kernel_text(directory, name, text);
  const char *at = strstr(text, key);
  if (!at) return none;
  at += strlen(key);
  const uint64_t number = strtoull(at, &end, 10);
  if (end == at) return none;
  return number;
}

/* Lowers both numbers to the memory that the control groups of this process allow. File pages that
 * the kernel reclaims first do not count as used. In a container the mount may be the group itself.
 * Then the group's path in /proc does not exist below it: a missing file sets no limit. Tests set
 * `root`. */
G2Z__PRIVATE void g2z__cgroup_memory(const char *root, size_t *free_bytes, size_t *total_bytes) {
  static const struct { const char *mount, *limit, *used, *cache; } versions[] = {
      {"/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "\ntotal_inactive_file "},
      {"", "memory.max", "memory.current", "\ninactive_file "}};
  char text[G2Z__KERNEL_TEXT], directory[G2Z__KERNEL_TEXT];
  g2z__kernel_text(root, "proc/self/cgroup", text);
  for (char *line = text, *next; *line; line = next) { /* "4:memory:/PATH", "0::/PATH" */
    next = line + strcspn(line, "\n");
    if (*next) *next++ = 0;
    const char *group = strstr(line, "::/"), *first = strstr(line, ":memory:/");
    const int v = !first;
    if (!group) group = first;
    if (!group) continue;
    const size_t mount = (size_t)snprintf(directory, sizeof directory, "%.2000s/sys/fs/cgroup%s",
                                          root, versions[v].mount);
    const char *path = strchr(group, '/');
    if (mount + strlen(path) >= sizeof directory) continue;
    strcpy(directory + mount, path);
    for (char *end = directory; end; end = strrchr(directory + mount, '/')) {
      if (end > directory) *end = 0;
      uint64_t limit = g2z__kernel_number(directory, versions[v].limit, "", UINT64_MAX);
      uint64_t used = g2z__kernel_number(directory, versions[v].used, "", 0);
      uint64_t cache = g2z__kernel_number(directory, "memory.stat", versions[v].cache, 0);
      used = used > cache ? used - cache : 0;
      uint64_t left = limit > used ? limit - used : 0;
      if (limit < *total_bytes) *total_bytes = (size_t)limit;
      if (left < *free_bytes) *free_bytes = (size_t)left;
    }
  }
}

/* The sign of a NaN is meaningless; without this, logs show "-nan". */
G2Z__PRIVATE double g2z__nan_unsigned(double value) { return isnan(value) ? NAN : value; }

/* ===== >>i04 JSON ========================================================
 * In:  any bytes that should be JSON, or values to write. Out: values in place, or a text.
 * Law: no allocation, no recursion, nothing read beyond `end`, no locale. Text that RFC 8259
 * forbids is an error with its line and column, except NaN and Infinity in skipped values. */

/* ----- reader ----- */

G2Z_API g2z_status g2z_json_fail(g2z_json *json, const char *format, ...) {
  if (json->status != G2Z_OK) return json->status; /* the first error explains the others */
  char what[G2Z_ERROR_BYTES];
  G2Z__PRINT(what, format);
  char line[32] = ""; /* a text of one line is often a line of a file, which the label names */
  size_t lines = 1;
  const unsigned char *start = json->begin;
  for (const unsigned char *c = json->begin; c < json->at; c++)
    if (*c == '\n') {
      lines++;
      start = c + 1;
    }
  if (json->begin < json->end && memchr(json->begin, '\n', (size_t)(json->end - json->begin)))
    snprintf(line, sizeof line, "line %zu, ", lines);
  json->status = g2z_fail(json->services, G2Z_FORMAT, "%s, %scolumn %zu: %s", json->label, line,
                          (size_t)(json->at - start) + 1, what);
  return json->status;
}

G2Z__PRIVATE void g2z__json_expected(g2z_json *json, const char *expected) {
  char found[16] = "the text's end";
  if (json->at < json->end) {
    const int c = *json->at;
    if (c > 0x20 && c < 0x7f) snprintf(found, sizeof found, "'%c'", c);
    else snprintf(found, sizeof found, "byte 0x%02x", c);
  }
  g2z_json_fail(json, "expected %s, found %s: correct it, or copy it again", expected, found);
}

G2Z_API void g2z_json_open(g2z_json *json, g2z_services *services, const char *label,
                           const void *text, size_t bytes) {
  memset(json, 0, sizeof *json);
  json->services = services;
  json->label = label;
  json->begin = json->at = (const unsigned char *)text;
  json->end = json->begin + bytes;
  /* A byte order mark is not JSON, but RFC 8259 lets a reader ignore it, and editors write it. */
  if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) json->at += 3;
}

/* Skips white space and returns the byte after it; 0 at the end and after an error. */
G2Z__PRIVATE unsigned char g2z__json_space(g2z_json *json) {
  if (json->status != G2Z_OK) return 0;
  while (json->at < json->end &&
         (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
    json->at++;
  if (json->at >= json->end) return 0;
  return *json->at;
}

G2Z_API char g2z_json_peek(g2z_json *json) {
  unsigned char c = g2z__json_space(json);
  if (c == 0 || !strchr("{[\"tfn-0123456789", c)) return 0;
  return (char)c;
}

/* Steps over the byte c, or fails if it is not there. */
G2Z__PRIVATE int g2z__json_take(g2z_json *json, char c, const char *expected) {
  if (g2z__json_space(json) != (unsigned char)c) {
    g2z__json_expected(json, expected);
    return 0;
  }
  json->at++;
  return 1;
}

G2Z_API int g2z_json_enter(g2z_json *json, char open) {
  if (!g2z__json_take(json, open, open == '{' ? "an object" : "an array")) return 0;
  json->first = 1;
  if (++json->depth <= G2Z_JSON_DEPTH) return 1;
  g2z_json_fail(json, "nested deeper than %d levels: flatten it", G2Z_JSON_DEPTH);
  return 0;
}

/* The value of four hexadecimal digits, or -1. */
G2Z__PRIVATE int g2z__json_hex4(const unsigned char *at, const unsigned char *end) {
  char digits[5] = "";
  if (end - at < 4) return -1;
  memcpy(digits, at, 4);
  if (strspn(digits, "0123456789abcdefABCDEF") < 4) return -1;
  return (int)strtol(digits, NULL, 16);
}

/* Decodes the escape at *at to UTF-8 and steps over it. Returns the number of bytes, 1 to 4, or 0
 * if it is no JSON escape. Half a surrogate pair becomes U+FFFD. */
G2Z__PRIVATE size_t g2z__json_escape(const unsigned char **at, const unsigned char *end,
                                     unsigned char out[4]) {
  static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
  const unsigned char *c = *at;
  if (end - c < 2) return 0;
  const void *name = memchr(names, c[1], sizeof names - 1);
  if (name) {
    out[0] = (unsigned char)values[(const char *)name - names];
    *at += 2;
    return 1;
  }
  if (c[1] != 'u') return 0;
  int code = g2z__json_hex4(c + 2, end);
  if (code < 0) return 0;
  c += 6;
  if (code >= 0xd800 && code < 0xdc00 && end - c >= 6 && c[0] == '\\' && c[1] == 'u') {
    int low = g2z__json_hex4(c + 2, end);
    if (low >= 0xdc00 && low < 0xe000) {
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
      c += 6;
    }
  }
  *at = c;
  if (code >= 0xd800 && code < 0xe000) code = 0xfffd;
  if (code < 0x80) {
    out[0] = (unsigned char)code;
    return 1;
  }
  const size_t bytes = (size_t)2 + (code >= 0x800) + (code >= 0x10000);
  for (size_t i = bytes - 1; i > 0; i--) { /* each byte after the first takes 6 bits */
    out[i] = (unsigned char)(0x80 | (code & 0x3f));
    code >>= 6;
  }
  out[0] = (unsigned char)((0xf00 >> bytes & 0xf0) | code); /* its high bits count the bytes */
  return bytes;
}

G2Z__PRIVATE g2z_json_text g2z__json_quoted(g2z_json *json, const char *expected) {
  g2z_json_text none = {(const unsigned char *)"", 0, NULL}, text = none; /* not NULL + 0 */
  if (!g2z__json_take(json, '"', expected)) return none;
  const unsigned char *c = json->at, *end = json->end;
  text.at = c;
  while (c < end && *c != '"' && *c >= 0x20) {
    if (*c != '\\') {
      c++;
      continue;
    }
    const unsigned char *escape = c;
    unsigned char out[4];
    const size_t bytes = g2z__json_escape(&c, end, out);
    if (bytes == 0) break;
    if (bytes != 3 || text.lone) continue;
    const int code = g2z__json_hex4(escape + 2, end);
    if (code >= 0xd800 && code < 0xe000) text.lone = escape; /* a pair has 4 bytes */
  }
  if (c < end && *c == '"') {
    text.bytes = (size_t)(c - text.at);
    json->at = c + 1;
    return text;
  }
  json->at = c;
  if (end - c < 2) {
    json->at = text.at - 1; /* the opening quote */
    g2z_json_fail(json, "this string has no closing quote: add it, or copy it again");
  } else if (*c != '\\') g2z_json_fail(json, "a control character in a string: escape it");
  else if (c[1] == 'u') g2z_json_fail(json, "\\u needs four hexadecimal digits");
  else g2z_json_fail(json, "no such escape in JSON");
  return none;
}

G2Z_API g2z_json_text g2z_json_string(g2z_json *json) { return g2z__json_quoted(json, "a string"); }

G2Z_API int g2z_json_next(g2z_json *json, char close, g2z_json_text *key) {
  unsigned char c = g2z__json_space(json);
  int first = json->first;
  if (key) memset(key, 0, sizeof *key);
  if (json->status != G2Z_OK) return 0;
  json->first = 0;
  if (c == (unsigned char)close) {
    json->at++;
    json->depth--;
    return 0;
  }
  const char *expected = close == '}' ? "',' or '}'" : "',' or ']'";
  if (!first && !g2z__json_take(json, ',', expected)) return 0;
  if (close != '}') return 1;
  *key = g2z__json_quoted(json, "a name in quotes");
  return g2z__json_take(json, ':', "':'");
}

G2Z_API int g2z_json_is(const g2z_json_text *text, const char *name) {
  const unsigned char *at = text->at, *end = at + text->bytes, *want = (const unsigned char *)name;
  unsigned char got[4];
  while (at < end) {
    size_t bytes = 1;
    got[0] = *at;
    if (*at != '\\') at++;
    else if ((bytes = g2z__json_escape(&at, end, got)) == 0) return 0;
    for (size_t i = 0; i < bytes; i++, want++) /* an escaped NUL is not the name's end */
      if (*want == 0 || *want != got[i]) return 0;
  }
  return *want == 0;
}

G2Z_API size_t g2z_json_unescape(const g2z_json_text *text, unsigned char *out) {
  const unsigned char *at = text->at, *end = at + text->bytes;
  unsigned char *to = out, got[4];
  while (at < end) {
    size_t plain = (size_t)(end - at);
    const void *escape = memchr(at, '\\', plain);
    if (escape) plain = (size_t)((const unsigned char *)escape - at);
    memmove(to, at, plain);
    to += plain;
    at += plain;
    if (!escape) break;
    const size_t bytes = g2z__json_escape(&at, end, got);
    if (bytes == 0) break;
    memcpy(to, got, bytes);
    to += bytes;
  }
  return (size_t)(to - out);
}

G2Z__PRIVATE const unsigned char *g2z__json_digits(const unsigned char *c,
                                                   const unsigned char *end) {
  while (c < end && *c >= '0' && *c <= '9') c++;
  return c;
}

/* The length of the number at json->at, which stays there; 0 after an error. */
G2Z__PRIVATE size_t g2z__json_scan(g2z_json *json, const char *expected) {
  unsigned char start = g2z__json_space(json);
  if (start != '-' && (start < '0' || start > '9')) {
    g2z__json_expected(json, expected);
    return 0;
  }
  const unsigned char *end = json->end, *digits = json->at + (start == '-');
  const unsigned char *c = g2z__json_digits(digits, end);
  int valid = c == digits + 1 || (c > digits && *digits != '0');
  if (c < end && *c == '.') {
    digits = c + 1;
    c = g2z__json_digits(digits, end);
    valid &= c > digits;
  }
  if (c < end && (*c == 'e' || *c == 'E')) {
    digits = c + 1 + (c + 1 < end && (c[1] == '+' || c[1] == '-'));
    c = g2z__json_digits(digits, end);
    valid &= c > digits;
  }
  if (valid) return (size_t)(c - json->at);
  g2z_json_fail(json, "not a number as JSON writes it (such as 12, -0.5 or 1e-5)");
  return 0;
}

/* Reports the number at json->at, which has `bytes` bytes, as an error. */
G2Z__PRIVATE void g2z__json_fail_number(g2z_json *json, size_t bytes, const char *why) {
  const int shown = (int)G2Z__MIN(bytes, 40);
  g2z_json_fail(json, "%.*s %s", shown, (const char *)json->at, why);
}

G2Z_API int64_t g2z_json_integer(g2z_json *json) {
  size_t bytes = g2z__json_scan(json, "an integer");
  const unsigned char *c = json->at, *end = c + bytes;
  int negative = bytes > 0 && *c == '-';
  const int64_t least = negative ? INT64_MIN : -INT64_MAX;
  int64_t value = 0; /* counts down, because an int64 has no 2^63 */
  const char *why = NULL;
  c += negative;
  if (g2z__json_digits(c, end) < end) why = "is not an integer";
  for (; c < end && !why; c++) {
    int digit = *c - '0';
    if (value < (least + digit) / 10) why = "does not fit into 64 bits";
    else value = value * 10 - digit;
  }
  if (why) {
    g2z__json_fail_number(json, bytes, why);
    return 0;
  }
  json->at = end;
  return negative ? value : -value;
}

G2Z_API double g2z_json_number(g2z_json *json) {
  size_t bytes = g2z__json_scan(json, "a number"), length = 0;
  char text[4096], zero[16]; /* at most 767 digits decide how a number rounds to double */
  if (bytes == 0) return 0;
  if (bytes > sizeof text - sizeof zero) {
    g2z__json_fail_number(json, bytes, "... has more than 4000 characters: round it");
    return 0;
  }
  /* strtod wants the locale's decimal point, which may take several bytes: "0.0" shows it. */
  snprintf(zero, sizeof zero, "%.1f", 0.0);
  size_t point = strlen(zero) - 2;
  for (size_t i = 0; i < bytes; i++)
    if (json->at[i] != '.') text[length++] = (char)json->at[i];
    else {
      memcpy(text + length, zero + 1, point);
      length += point;
    }
  text[length] = 0;
  double value = strtod(text, NULL);
  if (isfinite(value)) {
    json->at += bytes;
    return value;
  }
  g2z__json_fail_number(json, bytes, "is too large for a double");
  return 0;
}

G2Z__PRIVATE int g2z__json_word(g2z_json *json, const char *word) {
  size_t length = strlen(word);
  g2z__json_space(json);
  if (json->status != G2Z_OK || (size_t)(json->end - json->at) < length ||
      memcmp(json->at, word, length) != 0)
    return 0;
  json->at += length;
  return 1;
}

G2Z_API void g2z_json_skip(g2z_json *json) {
  char closers[G2Z_JSON_DEPTH];
  int open = 0;
  do {
    char c = g2z_json_peek(json);
    if (c == '{' || c == '[') {
      if (!g2z_json_enter(json, c)) return;
      closers[open++] = c == '{' ? '}' : ']';
    } else if (c == '"') g2z_json_string(json);
    else if (c == 't' || c == 'f') {
      if (!g2z__json_word(json, "true") && !g2z__json_word(json, "false"))
        g2z__json_expected(json, "true or false");
    } else if (!g2z__json_word(json, "null") && !g2z__json_word(json, "NaN") &&
               !g2z__json_word(json, "Infinity") && !g2z__json_word(json, "-Infinity")) {
      size_t bytes = g2z__json_scan(json, "a value");
      json->at += bytes;
    }
    g2z_json_text key;
    while (open > 0 && !g2z_json_next(json, closers[open - 1], &key)) {
      if (json->status != G2Z_OK) return;
      open--;
    }
  } while (open > 0);
}

G2Z_API g2z_status g2z_json_close(g2z_json *json) {
  g2z__json_space(json);
  if (json->status == G2Z_OK && json->at < json->end) g2z__json_expected(json, "the end");
  return json->status;
}

/* RFC 3629 */
G2Z_API size_t g2z_utf8_length(const unsigned char *at, const unsigned char *end) {
  unsigned char c = *at;
  if (c < 0x80) return 1;
  if (c < 0xc2 || c > 0xf4) return 0;
  const size_t bytes = (size_t)2 + (c >= 0xe0) + (c >= 0xf0);
  if ((size_t)(end - at) < bytes) return 0;
  for (size_t i = 1; i < bytes; i++)
    if ((at[i] & 0xc0) != 0x80) return 0;
  /* Overlong forms, surrogates and codes beyond U+10FFFF show in the second byte. */
  if ((c == 0xe0 && at[1] < 0xa0) || (c == 0xed && at[1] > 0x9f)) return 0;
  if ((c == 0xf0 && at[1] < 0x90) || (c == 0xf4 && at[1] > 0x8f)) return 0;
  return bytes;
}

/* ----- writer ----- */

/* A command line may hold any bytes, but JSON must be UTF-8: invalid bytes become U+FFFD. */
G2Z__PRIVATE void g2z__json_quote(g2z_writer *writer, const char *text) {
  const unsigned char *at = (const unsigned char *)text, *end = at + strlen(text);
  g2z_writer_put(writer, "\"", 1);
  while (at < end) {
    const unsigned char *plain = at;
    size_t bytes = 1;
    while (at < end && *at >= 0x20 && *at != '"' && *at != '\\' &&
           (bytes = g2z_utf8_length(at, end)) > 0)
      at += bytes;
    g2z_writer_put(writer, plain, (size_t)(at - plain));
    if (at == end) break;
    if (bytes == 0) g2z_writer_put(writer, "\xef\xbf\xbd", 3);
    else if (*at == '"' || *at == '\\') g2z_writer_printf(writer, "\\%c", *at);
    else if (*at == '\n') g2z_writer_put(writer, "\\n", 2);
    else if (*at == '\t') g2z_writer_put(writer, "\\t", 2);
    else g2z_writer_printf(writer, "\\u%04x", *at);
    at++;
  }
  g2z_writer_put(writer, "\"", 1);
}

G2Z__PRIVATE void g2z__json_line(g2z_json_out *out) {
  if (out->indent > 0) g2z_writer_printf(out->writer, "\n%*s", out->indent * out->depth, "");
}

/* Writes what precedes a value: the comma, the line break and the name. */
G2Z__PRIVATE void g2z__json_member(g2z_json_out *out, const char *key) {
  if (out->filled) g2z_writer_put(out->writer, ", ", out->indent > 0 ? 1 : 2);
  if (out->depth > 0) g2z__json_line(out);
  if (key) {
    g2z__json_quote(out->writer, key);
    g2z_writer_put(out->writer, ": ", 2);
  }
  out->filled = 1;
}

G2Z_API void g2z_json_begin(g2z_json_out *out, const char *key, char open) {
  g2z__json_member(out, key);
  g2z_writer_put(out->writer, &open, 1);
  out->depth++;
  out->filled = 0;
}

G2Z_API void g2z_json_end(g2z_json_out *out, char close) {
  out->depth--;
  if (out->filled) g2z__json_line(out);
  g2z_writer_put(out->writer, &close, 1);
  out->filled = out->depth > 0; /* at level 0 another text may follow: .jsonl */
}

G2Z__PRIVATE void g2z__json_put(g2z_json_out *out, const char *key, const char *word) {
  g2z__json_member(out, key);
  g2z_writer_put(out->writer, word, strlen(word));
}

G2Z_API void g2z_json_put_string(g2z_json_out *out, const char *key, const char *text) {
  g2z__json_member(out, key);
  if (text) g2z__json_quote(out->writer, text);
  else g2z_writer_put(out->writer, "null", 4);
}

G2Z_API void g2z_json_put_integer(g2z_json_out *out, const char *key, int64_t value) {
  char text[32];
  snprintf(text, sizeof text, "%" PRId64, value);
  g2z__json_put(out, key, text);
}

/* The locale's decimal point may take several bytes. */
G2Z_API void g2z_plain_number(char *text) {
  char *to = text;
  for (const char *c = text; *c; c++) {
    int foreign = !strchr("0123456789+-e", *c);
    if (!foreign) *to++ = *c;
    else if (to == text || to[-1] != '.') *to++ = '.';
  }
  *to = 0;
}

G2Z_API void g2z_json_put_number(g2z_json_out *out, const char *key, double value) {
  char text[32];
  snprintf(text, sizeof text, "%.9g", value);
  g2z_plain_number(text);
  g2z__json_put(out, key, isfinite(value) ? text : "null");
}

G2Z_API void g2z_json_put_bool(g2z_json_out *out, const char *key, int value) {
  g2z__json_put(out, key, value ? "true" : "false");
}

G2Z_API g2z_status g2z_json_write(g2z_services *services, const char *path, g2z_note put,
                                  void *user) {
  g2z_writer *writer;
  G2Z_TRY(g2z_writer_create(services, path, &writer));
  g2z_json_out out = {writer, 2, 0, 0};
  g2z_json_begin(&out, NULL, '{');
  put(user, &out);
  g2z_json_end(&out, '}');
  g2z_writer_put(writer, "\n", 1);
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

/* ===== >>i05 config ======================================================
 * In:  the user's settings. Out: a config whose values agree with each other, or a sentence.
 * Law: every value is checked here, once; later rooms rely on it. */

#define G2Z__STAMP 0x67327a63u
#define G2Z__EOT 50256 /* <|endoftext|> of GPT-2's vocabulary */
/* Limits that keep every index within its type: rows in int, elements in size_t, files in int64. */
#define G2Z__MAX_VOCAB (1 << 24)
#define G2Z__MAX_BATCH (1 << 20)
#define G2Z__MAX_TOKENS (1 << 28) /* per micro-step */

static const char *const g2z__device_texts[] = {G2Z_DEVICE_LIST(G2Z_LIST_TEXT)};
static const char *const g2z__strategy_texts[] = {G2Z_STRATEGY_LIST(G2Z_LIST_TEXT)};
static const char *const g2z__fp8_texts[] = {G2Z_FP8_LIST(G2Z_LIST_TEXT)};

G2Z_API const char *g2z_dtype_text(g2z_dtype dtype) {
  static const char *const texts[] = {G2Z_DTYPE_LIST(G2Z_LIST_TEXT)};
  return (size_t)dtype < G2Z_COUNT(texts) ? texts[dtype] : "?";
}

G2Z_API g2z_status g2z_model_config_named(g2z_services *services, const char *name,
                                          g2z_model_config *out) {
#define X(known, L, NH, C)                                 \
  if (strcmp(name, known) == 0) {                          \
    *out = g2z_train_config_default(G2Z_DEVICE_CPU).model; \
    out->layers = L;                                       \
    out->heads = NH;                                       \
    out->channels = C;                                     \
    return G2Z_OK;                                         \
  }
  G2Z_MODEL_LIST(X)
#undef X
#define X(known, layers, heads, channels) " " known
  G2Z_REFUSE(services, "no model is called \"%.64s\": take one of" G2Z_MODEL_LIST(X) ", or give "
             "layers, heads and channels", name);
#undef X
}

/* ----- settings: one table of names, types, defaults, bounds, and what a resume does ----- */

static const g2z_setting g2z__settings[] = {
#define NUMBER(name, kind, member, standard, least, most, on_resume)                             \
  {#name, G2Z_SETTING_##kind, offsetof(g2z_train_config, member), standard, least, most, NULL,   \
   G2Z_RESUME_##on_resume}
#define CHOICE(name, member, standard, words, on_resume)                                         \
  {#name, G2Z_SETTING_CHOICE, offsetof(g2z_train_config, member), standard, 0, 0, words,         \
   G2Z_RESUME_##on_resume}
    /*     name      kind   member             default least most              on resume */
    NUMBER(layers,   INT, model.layers,           "12", 1, 1024,                    SAME),
    NUMBER(heads,    INT, model.heads,            "12", 1, 65536,                   SAME),
    NUMBER(channels, INT, model.channels,        "768", 8, 65536,                   SAME),
    NUMBER(context,  INT, model.context,        "1024", 1, 1 << 20,                 SAME),
    NUMBER(vocab,    INT, model.vocab,         "50257", 2, G2Z__MAX_VOCAB,          SAME),
    NUMBER(batch,    INT, batch,                   "8", 1, G2Z__MAX_BATCH,          WARN),
    NUMBER(seq,      INT, seq,                  "1024", 1, 1 << 20,                 WARN),
    NUMBER(accum,    INT, accum,                   "1", 1, 1 << 20,                 WARN),
    NUMBER(steps,    INT64, optimizer.steps,    "1000", 1, 1e12,                    WARN),
    NUMBER(warmup,   INT64, optimizer.warmup,    "100", 0, 1e12,                    WARN),
    NUMBER(lr,       FLOAT, optimizer.lr,       "6e-4", 0, 1e6,                     WARN),
    NUMBER(min_lr,   FLOAT, optimizer.min_lr,   "6e-5", 0, 1e6,                     WARN),
    NUMBER(adam_lr,  FLOAT, optimizer.adam_lr, "2.4e-3", 0, 1e6,                    WARN),
    NUMBER(beta1,    FLOAT, optimizer.beta1,     "0.9", 0, 0.999999,                WARN),
    NUMBER(beta2,    FLOAT, optimizer.beta2,    "0.95", 0, 0.999999,                WARN),
    NUMBER(eps,      FLOAT, optimizer.eps,      "1e-8", 1e-30, 1,                   WARN),
    NUMBER(momentum, FLOAT, optimizer.momentum,  "0.9", 0, 0.999999,                WARN),
    NUMBER(weight_decay, FLOAT, optimizer.weight_decay, "0.1", 0, 1e6,              WARN),
    NUMBER(clip,     FLOAT, optimizer.clip,        "1", 0, 1e30,                    WARN),
    NUMBER(skip_spikes, FLOAT, optimizer.skip_spikes, "0", 0, 1e6,                  WARN),
    NUMBER(dropout,  FLOAT, dropout,               "0", 0, 0.99,                    WARN),
    NUMBER(seed,     UINT64, seed,              "1337", 0, 0,                       WARN),
    NUMBER(loss_scale, FLOAT, optimizer.loss_scale, "65536", 1, 16777216,           ROUNDS),
    NUMBER(loss_scale_dynamic, INT, optimizer.loss_scale_dynamic, "1", 0, 1,        ROUNDS),
    NUMBER(loss_scale_window, INT, optimizer.loss_scale_window, "1000", 1, 1 << 30, ROUNDS),
    NUMBER(loss_scale_hysteresis, INT, optimizer.loss_scale_hysteresis, "2", 1, 1 << 30, ROUNDS),
    NUMBER(zero_stage, INT, zero_stage,            "1", 0, 3,                       ROUNDS),
    NUMBER(bucket_mb, FLOAT, bucket_mb,            "0", 0, 65536,                   ROUNDS),
    CHOICE(schedule,  optimizer.schedule, "cosine", G2Z_SCHEDULE_LIST(G2Z_LIST_WORD), WARN),
    CHOICE(moments,   optimizer.moments_bf16, "fp32", "|fp32|bf16", ROUNDS),
    CHOICE(optimizer, optimizer.kind, "adamw", G2Z_OPTIMIZER_LIST(G2Z_LIST_WORD), WARN),
    CHOICE(positions, positions, "normal", G2Z_POSITIONS_LIST(G2Z_LIST_WORD), WARN),
    CHOICE(dtype,     dtype,     NULL,   G2Z_DTYPE_LIST(G2Z_LIST_WORD), WARN),
    CHOICE(fp8,       fp8,       "none", G2Z_FP8_LIST(G2Z_LIST_WORD),        WARN),
    CHOICE(grad_fp32, grad_fp32, "same", "|same|fp32",                   ROUNDS),
    CHOICE(strategy,  strategy,  "zero", G2Z_STRATEGY_LIST(G2Z_LIST_WORD),   ROUNDS),
    CHOICE(transport, transport, "auto", G2Z_TRANSPORT_LIST(G2Z_LIST_WORD),  ROUNDS),
    CHOICE(recompute, recompute, "none", G2Z_RECOMPUTE_LIST(G2Z_LIST_WORD),  FREE),
    CHOICE(graph,     graph,     "auto", "|off|on|auto",                 ROUNDS),
    CHOICE(tune,      tune,      "on",   "|off|on|own",                  ROUNDS),
#undef NUMBER
#undef CHOICE
};
enum { G2Z__SETTINGS = G2Z_COUNT(g2z__settings),
       G2Z__MODEL_SETTINGS = 5 }; /* the first rows */
#define G2Z__SETTING_BYTES 32      /* of a value's text */

G2Z_API const g2z_setting *g2z_setting_find(const char *name) {
  for (int i = 0; i < G2Z__SETTINGS; i++)
    if (strcmp(g2z__settings[i].name, name) == 0) return &g2z__settings[i];
  return NULL;
}

G2Z_API const char *g2z_word(const char *words, int index, size_t *length) {
  const char *word = words;
  *length = 0;
  if (!words || index < 0) return NULL;
  for (; index >= 0; index--) {
    word = strchr(word, '|');
    if (!word) return NULL;
    word++;
  }
  *length = strcspn(word, "|");
  return word;
}

G2Z_API int g2z_word_find(const char *words, const char *text, size_t bytes) {
  size_t length;
  const char *word;
  for (int i = 0; (word = g2z_word(words, i, &length)) != NULL; i++)
    if (length == bytes && memcmp(word, text, bytes) == 0) return i;
  return -1;
}

/* A value as a number, exact up to 2^53. An enum's type may be unsigned. */
G2Z__PRIVATE double g2z__setting_number(const g2z_setting *setting, const void *config) {
  const char *at = (const char *)config + setting->at;
  int number;
  if (setting->kind == G2Z_SETTING_INT64) return (double)*(const int64_t *)at;
  if (setting->kind == G2Z_SETTING_UINT64) return (double)*(const uint64_t *)at;
  if (setting->kind == G2Z_SETTING_FLOAT) return (double)*(const float *)at;
  memcpy(&number, at, sizeof number);
  return number;
}

/* A value as text, in any locale; a float in the shortest form that reads as the same float. */
G2Z__PRIVATE void g2z__setting_text(const g2z_setting *setting, const void *config,
                                    char text[G2Z__SETTING_BYTES]) {
  const double number = g2z__setting_number(setting, config);
  const char *at = (const char *)config + setting->at;
  size_t length;
  const char *word = NULL;
  if (setting->words) word = g2z_word(setting->words, (int)number, &length);
  if (word) snprintf(text, G2Z__SETTING_BYTES, "%.*s", (int)length, word);
  else if (setting->kind == G2Z_SETTING_UINT64)
    snprintf(text, G2Z__SETTING_BYTES, "%" PRIu64, *(const uint64_t *)at);
  else if (setting->kind == G2Z_SETTING_INT64)
    snprintf(text, G2Z__SETTING_BYTES, "%" PRId64, *(const int64_t *)at);
  else if (setting->kind != G2Z_SETTING_FLOAT)
    snprintf(text, G2Z__SETTING_BYTES, "%.0f", number);
  else {
    for (int digits = 6; digits <= 9; digits++) {
      snprintf(text, G2Z__SETTING_BYTES, "%.*g", digits, number);
      if ((float)strtod(text, NULL) == (float)number) break;
    }
    if (isfinite(number)) g2z_plain_number(text);
  }
}

/* Reads a value from text; 0: the text is not a value. g2z__settings_check checks the bounds. */
G2Z__PRIVATE int g2z__setting_read(const g2z_setting *setting, void *config, const char *text) {
  char *at = (char *)config + setting->at, *end = NULL;
  if (setting->words) {
    const int index = g2z_word_find(setting->words, text, strlen(text));
    if (index >= 0) memcpy(at, &index, sizeof index);
    return index >= 0;
  }
  if (setting->kind == G2Z_SETTING_FLOAT) { /* as JSON writes it, in any locale */
    g2z_services silent;
    g2z_json json;
    memset(&silent, 0, sizeof silent);
    g2z_json_open(&json, &silent, setting->name, text, strlen(text));
    *(float *)at = (float)g2z_json_number(&json);
    return g2z_json_close(&json) == G2Z_OK;
  }
  errno = 0;
  if (setting->kind == G2Z_SETTING_INT) {
    const int64_t number = strtoll(text, &end, 10);
    if (number != (int)number) return 0;
    *(int *)at = (int)number;
  } else if (setting->kind == G2Z_SETTING_INT64) *(int64_t *)at = strtoll(text, &end, 10);
  else *(uint64_t *)at = strtoull(text, &end, 10);
  return end != text && !*end && errno == 0;
}

/* Checks settings against their bounds; NaN is out of bounds. */
G2Z__PRIVATE g2z_status g2z__settings_check(g2z_services *services, const g2z_setting *settings,
                                            size_t count, const void *config) {
  for (const g2z_setting *setting = settings; setting < settings + count; setting++) {
    const double value = g2z__setting_number(setting, config);
    double least = setting->least, most = setting->most;
    char text[G2Z__SETTING_BYTES];
    size_t length;
    if (setting->words) {
      if (g2z_word(setting->words, (int)value, &length)) continue;
      g2z__setting_text(setting, config, text);
      G2Z_REFUSE(services, "%s=%s is none of %s", setting->name, text, setting->words + 1);
    }
    if (setting->kind == G2Z_SETTING_FLOAT) { /* round the bounds like the value */
      least = (double)(float)least;
      most = (double)(float)most;
    }
    if (least == most || (value >= least && value <= most)) continue;
    g2z__setting_text(setting, config, text);
    G2Z_REFUSE(services, "%s=%s must lie between %.15g and %.15g", setting->name, text,
               setting->least, setting->most);
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__model_config_check(g2z_services *services,
                                                const g2z_model_config *config) {
  g2z_train_config train;
  train.model = *config;
  G2Z_TRY(g2z__settings_check(services, g2z__settings, G2Z__MODEL_SETTINGS, &train));
  if (config->channels % config->heads)
    G2Z_REFUSE(services, "channels=%d must divide by heads=%d: change one of them",
               config->channels, config->heads);
  const int head_size = config->channels / config->heads;
  const int channels = config->channels / 8 * 8;
  const int advised = channels % 64 == 0 ? 64 : 8; /* head size */
  if (head_size % 8 || head_size > G2Z_MAX_HEAD_SIZE)
    G2Z_REFUSE(services, "channels=%d / heads=%d gives a head size of %d, which must be a multiple "
               "of 8 up to %d: with channels=%d, heads=%d would give %d", config->channels,
               config->heads, head_size, G2Z_MAX_HEAD_SIZE, channels, channels / advised, advised);
  return G2Z_OK;
}

G2Z_API g2z_dtype g2z_dtype_default(g2z_device_kind device) {
  return device == G2Z_DEVICE_CUDA ? G2Z_FP16 : G2Z_FP32;
}

G2Z_API g2z_train_config g2z_train_config_default(g2z_device_kind device) {
  g2z_train_config config;
  memset(&config, 0, sizeof config);
  config.stamp = G2Z__STAMP;
  config.model.eot = G2Z__EOT;
  for (int i = 0; i < G2Z__SETTINGS; i++)
    if (g2z__settings[i].standard)
      g2z__setting_read(&g2z__settings[i], &config, g2z__settings[i].standard);
  config.dtype = g2z_dtype_default(device);
  return config;
}

G2Z__PRIVATE g2z_status g2z__train_config_check(g2z_services *services,
                                                const g2z_train_config *config) {
  if (config->stamp != G2Z__STAMP)
    G2Z_REFUSE(services, "this g2z_train_config was never initialised: start from "
               "g2z_train_config_default()");
  G2Z_TRY(g2z__settings_check(services, g2z__settings, G2Z__SETTINGS, config));
  G2Z_TRY(g2z__model_config_check(services, &config->model));
  if (config->seq > config->model.context)
    G2Z_REFUSE(services, "seq=%d is longer than the model's context=%d: shorten seq or raise "
               "context", config->seq, config->model.context);
  if ((int64_t)config->batch * config->seq > G2Z__MAX_TOKENS)
    G2Z_REFUSE(services, "batch=%d x seq=%d is more than 2^28 tokens in one micro-step: lower "
               "batch and raise accum", config->batch, config->seq);
  if (config->optimizer.min_lr > config->optimizer.lr)
    G2Z_REFUSE(services, "min_lr=%g must be at most lr=%g", (double)config->optimizer.min_lr,
               (double)config->optimizer.lr);
  const char *or_bf16 = config->fp8 == G2Z_FP8_ALL ? "" : " or bf16";
  if (config->fp8 && config->dtype != G2Z_FP16 && config->dtype != G2Z_BF16)
    G2Z_REFUSE(services, "fp8=%s rounds numbers of 16 bits to 8, and dtype=%s has 32: take "
               "dtype=fp16%s, or fp8=none", g2z__fp8_texts[config->fp8],
               g2z_dtype_text(config->dtype), or_bf16);
  if (config->fp8 == G2Z_FP8_ALL && config->dtype != G2Z_FP16)
    G2Z_REFUSE(services, "fp8=all rounds gradients to e5m2, whose smallest number is 1.5e-5, and "
               "only dtype=fp16 scales the loss: take dtype=fp16, or fp8=forward");
  if (config->fp8 == G2Z_FP8_ALL &&
      ((int64_t)config->batch * config->seq % 128 || config->model.channels % 16))
    G2Z_REFUSE(services, "fp8=all needs batch x seq to be a multiple of 128, and channels of 16; "
               "they are %" PRId64 " and %d: change them, or take fp8=forward",
               (int64_t)config->batch * config->seq, config->model.channels);
  /* Attention's scores are the largest tensor with dropout: heads have at most 128 channels. */
  int64_t scores = (int64_t)config->model.heads * config->seq * config->seq;
  if (config->dropout > 0 && scores > INT64_C(1) << 34)
    G2Z_REFUSE(services, "dropout=%g would repeat its masks: heads=%d x seq=%d x seq is "
               "%" PRId64 ", but at most 2^34 masks differ: shorten seq, or take dropout=0",
               (double)config->dropout, config->model.heads, config->seq, scores);
  if (config->optimizer.moments_bf16 && config->optimizer.kind != G2Z_OPTIMIZER_ADAMW)
    G2Z_REFUSE(services, "moments=bf16 is for AdamW: take optimizer=adamw, or moments=fp32");
  if (config->optimizer.kind == G2Z_OPTIMIZER_MUON && config->optimizer.lr == 0 &&
      config->optimizer.adam_lr > 0)
    G2Z_REFUSE(services, "adam_lr=%g follows lr's schedule, and lr=0 has none: take lr=0.004, or "
               "adam_lr=0", (double)config->optimizer.adam_lr);
  if (config->strategy == G2Z_STRATEGY_DP && config->zero_stage != 0)
    G2Z_REFUSE(services, "strategy=dp keeps one optimizer, on rank 0, and zero_stage=%d shards it: "
               "take zero_stage=0, or strategy=zero", config->zero_stage);
  return G2Z_OK;
}

/* Refuses `what` if the hash of its vocabulary differs from the model's: ids would mean other
 * texts. *known is the model's hash; 0 (unknown) becomes `hash`. */
G2Z__PRIVATE g2z_status g2z__vocab_agree(g2z_services *services, uint64_t *known, uint64_t hash,
                                         const char *what) {
  if (*known && hash && *known != hash)
    G2Z_REFUSE(services, "%.400s has another vocabulary (hash %016" PRIx64 ") than the model (hash "
               "%016" PRIx64 "): prepare the text with the vocabulary of the model, ./prepare_data "
               "--vocab FILE, or begin a new model", what, hash, *known);
  if (hash) *known = hash;
  return G2Z_OK;
}

/* ===== >>i06 plan ========================================================
 * In: a config, a device kind, a rank and the world size. Out: where everything lies, and sizes.
 * Law: pure functions. Only this room lays out buffers and shards, and gives them their bytes. */

/* Activations of a forward pass that backward needs, and backward's own scratch. Copies: in
 * training STREAM, LAYER and CACHE have one copy per layer; with recomputation all layers share one
 * copy of LAYER and of CACHE. A model that only runs forward has one copy of each, and no BACKWARD.
 * To generate, it keeps each layer's QKV, the key-value cache: K tokens, while N run at a time.
 * Types: A the plan's dtype, F fp32. Some buffers are used again:
 *   lnf     after the head: the gradient after dropout ("dropped" of layernorm_bwd)
 *   fc      of a layer, after fcproj's weight gradient: ln2's gradient, followed by qkv's in 8
 *           bits. In generation token by token: the token's row of qkv before it enters the cache
 *   wide    4 C per token: fc's gradient; or qkv's (3 C) followed by attention's (C); while a block
 *           runs forward, 8-bit activations
 * With fp8=all ln1, ln2, fc, wide as fc's gradient, and lnf as the gradient that fcproj or
 * the attention projection receives, hold 8-bit rows and columns. */
#define G2Z__ACTIVATION_LIST(X)                                          \
  /*  name      copies  type  elements */                                \
  X(EMBED,     ONCE,    A,    (N) * C)      /* residual stream at block 0 */ \
  X(LN1,       LAYER,   A,    (N) * C)                                   \
  X(LN1_MEAN,  LAYER,   F,    (N))                                       \
  X(LN1_RSTD,  LAYER,   F,    (N))                                       \
  X(QKV,       CACHE,   A,    (K) * 3 * C)                               \
  X(ATT,       LAYER,   A,    (N) * C)                                   \
  X(LSE,       LAYER,   F,    (N) * NH)                                  \
  X(RES2,      LAYER,   A,    (N) * C)      /* residual stream after attention */ \
  X(LN2,       LAYER,   A,    (N) * C)                                   \
  X(LN2_MEAN,  LAYER,   F,    (N))                                       \
  X(LN2_RSTD,  LAYER,   F,    (N))                                       \
  X(FCSLOPE,   LAYER,   A,    (N) * 4 * C)  /* GELU's slope */           \
  X(FC,        LAYER,   A,    (N) * 4 * C)  /* GELU's output */          \
  X(RES3,      STREAM,  A,    (N) * C)      /* residual stream after the block */ \
  X(LNF,       ONCE,    A,    (N) * C)                                   \
  X(LNF_MEAN,  ONCE,    F,    (N))                                       \
  X(LNF_RSTD,  ONCE,    F,    (N))                                       \
  X(LOSSES,    ONCE,    F,    (N))                                       \
  X(DRES,      BACKWARD, A,   (N) * C)      /* gradient of the residual stream */ \
  X(WIDE,      BACKWARD, A,   (N) * 4 * C)

#define X(name, scope, type, elements) G2Z__ACT_##name,
typedef enum g2z__activation { G2Z__ACTIVATION_LIST(X) G2Z__ACT_COUNT } g2z__activation;
#undef X

G2Z__PRIVATE size_t g2z__round_up(size_t count, size_t grain) {
  return (count + grain - 1) / grain * grain;
}

/* Buffers start on multiples of this many bytes: wide enough for every vector and TMA access. */
#define G2Z__ALIGN 256
G2Z__PRIVATE size_t g2z__align(size_t bytes) { return g2z__round_up(bytes, G2Z__ALIGN); }

/* Where activation `which` of layer `layer` starts; G2Z__ACT_COUNT: where all of them end. */
G2Z__PRIVATE size_t g2z__activation_offset(const g2z_plan *plan, g2z__activation which, int layer) {
  const size_t C = (size_t)plan->model.channels, NH = (size_t)plan->model.heads;
  const size_t N = plan->tokens, A = plan->dtype_bytes, F = sizeof(float);
  const size_t layers = (size_t)plan->model.layers;
  const size_t ONCE = 1, BACKWARD = !plan->forward_only;
  size_t STREAM = layers, LAYER = layers, K = N, at = 0;
  if (plan->forward_only) STREAM = 1;
  if (plan->forward_only || plan->recompute == G2Z_RECOMPUTE_BLOCK) LAYER = 1;
  size_t CACHE = LAYER;
  if (plan->cached) {
    CACHE = layers;
    K = (size_t)plan->cached * (size_t)plan->seq;
  }
#define X(name, copies, type, elements)                                                     \
  if (which == G2Z__ACT_##name)                                                             \
    return at + (copies > 1 ? (size_t)layer : 0) * g2z__align((elements) * type);           \
  at += copies * g2z__align((elements) * type);
  G2Z__ACTIVATION_LIST(X)
#undef X
  return at;
}

G2Z__PRIVATE g2z_param_info g2z__param_describe(const g2z_model_config *model, g2z_param param) {
  const size_t C = (size_t)model->channels, CTX = (size_t)model->context;
  const size_t V = (size_t)model->vocab;
  const g2z_param_info params[] = {
#define X(id, unit, rank, rows, cols, init, decay, muon, hf_name)                                 \
  {#id, hf_name, G2Z_UNIT_##unit, G2Z_INIT_##init, decay, muon, rank, rows, cols, (cols) * (rows)},
      G2Z_PARAM_LIST(X)
#undef X
  };
  return params[param];
}

G2Z__PRIVATE g2z_unit_kind g2z__unit_kind(const g2z_model_config *model, int unit) {
  if (unit == 0) return G2Z_UNIT_LNF;
  if (unit <= model->layers) return G2Z_UNIT_BLOCK;
  if (unit == model->layers + 1) return G2Z_UNIT_WPE;
  return G2Z_UNIT_WTE;
}

/* The number of `elements` that this rank owns, of a bucket or of a range of buckets. */
G2Z__PRIVATE size_t g2z__plan_owned(const g2z_plan *plan, size_t elements) {
  if (plan->owner == G2Z_OWNER_SLICES) return elements / (size_t)plan->slices;
  if (plan->owner == G2Z_OWNER_ROOT && plan->rank > 0) return 0;
  return elements;
}

/* Buckets are multiples of this many elements. */
G2Z__PRIVATE size_t g2z__plan_grain(const g2z_plan *plan) { return 8 * (size_t)plan->slices; }

/* Size limits of the buckets that are reduced last, when no computation is left to hide their
 * traffic. LAST: of the last bucket before wte. PIECE: of wte's buckets; each is cast while the one
 * before it travels. PIECE does not apply to fp32 gradients, which need no cast. It does not apply
 * either if the embedding's part travels as rows: then backward hides wte's other part. */
#define G2Z__LAST_BYTES ((size_t)8 << 20)
#define G2Z__PIECE_BYTES ((size_t)16 << 20)

/* `elements`, or as many whole grains as fit into one of these limits, if that is less. At least
 * one fits: a grain has at most 2^19 elements, since there are at most 2^16 ranks. */
G2Z__PRIVATE size_t g2z__plan_at_most(const g2z_plan *plan, size_t elements, size_t bytes) {
  const size_t grain = g2z__plan_grain(plan);
  return G2Z__MIN(elements, bytes / plan->grad_bytes / grain * grain);
}

/* Cuts the memory into buckets, the last one first. Units [first, next) share buckets: up to stage
 * 1 all units before wte, else none. Each such part is cut from its end, so that the odd size is
 * its first bucket's. Before wte the last bucket is small, and each bucket is at most twice as
 * large as the next, because it travels while backward computes the next. Returns the number of
 * buckets. Writes them in front of `end`, unless that is NULL. */
G2Z__PRIVATE int g2z__plan_cut(const g2z_plan *plan, g2z_bucket *end) {
  int count = 0;
  for (int next = plan->units, first; next > 0; next = first) {
    first = 0;
    if (plan->by_unit || next == plan->units) first = next - 1;
    const size_t begin = plan->unit[first].begin;
    size_t left = plan->unit[next].begin - begin, full = plan->bucket_elements;
    if (first == plan->wte && plan->grad_dtype != G2Z_FP32 && !plan->wte_rows)
      full = g2z__plan_at_most(plan, full, G2Z__PIECE_BYTES);
    size_t size = full;
    if (next == plan->wte) size = g2z__plan_at_most(plan, full, G2Z__LAST_BYTES);
    for (; left > 0; count++) {
      const size_t elements = G2Z__MIN(size, left);
      left -= elements;
      size = G2Z__MIN(2 * size, full);
      if (!end) continue;
      end[-1 - count].begin = begin + left;
      end[-1 - count].elements = elements;
    }
  }
  return count;
}

/* Maximum number of update ranges, which end where decay changes and where buckets end. */
G2Z__PRIVATE size_t g2z__plan_updates_limit(const g2z_plan *plan) {
  return (size_t)plan->units * G2Z_PARAM_COUNT + (size_t)plan->buckets;
}

/* Muon: lists the weights in the order of memory. */
G2Z__PRIVATE g2z_status g2z__plan_weights(g2z_plan *plan) {
  int count = 0;
  G2Z_TRY(G2Z_NEW(plan->services, (size_t)plan->muon_weights, &plan->weight));
  for (int unit = 1; unit < plan->wpe; unit++)
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      const g2z_weight weight = {unit, (g2z_param)p, -1, 0};
      if (g2z__param_describe(&plan->model, weight.param).muon) plan->weight[count++] = weight;
    }
  return G2Z_OK;
}

/* Gives each weight a home: the rank that has the least work so far. The costliest weight comes
 * first, and equal ones in the order of memory. A matrix with sides m <= n costs m m (2 n + m),
 * times a constant. */
G2Z__PRIVATE g2z_status g2z__plan_give_homes(g2z_plan *plan) {
  double cost[G2Z_PARAM_COUNT] = {0}, *work;
  g2z_weight *end = plan->weight + plan->muon_weights;
  G2Z_TRY(G2Z_NEW(plan->services, (size_t)plan->world, &work));
  for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
    const g2z_param_info info = g2z__param_describe(&plan->model, (g2z_param)p);
    if (!info.muon) continue;
    const size_t columns = info.cols / (size_t)info.muon;
    const double m = (double)G2Z__MIN(info.rows, columns);
    const double n = (double)G2Z__MAX(info.rows, columns);
    cost[p] = info.muon * (m * m * (2 * n + m));
  }
  for (int given = 0; given < plan->muon_weights; given++) {
    g2z_weight *next = NULL;
    for (g2z_weight *w = plan->weight; w < end; w++)
      if (w->home < 0 && (!next || cost[w->param] > cost[next->param])) next = w;
    next->home = 0;
    for (int rank = 1; rank < plan->world; rank++)
      if (work[rank] < work[next->home]) next->home = rank;
    work[next->home] += cost[next->param];
  }
  g2z_release(plan->services, work);
  return G2Z_OK;
}

/* Places the weights in their homes' areas, those of one parameter together. A weight without a
 * home has the same place on every rank that owns it. filled[rank]: elements in the rank's area. */
G2Z__PRIVATE void g2z__plan_place_weights(g2z_plan *plan, size_t *filled) {
  for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
    const g2z_param_info info = g2z__param_describe(&plan->model, (g2z_param)p);
    if (!info.muon) continue;
    g2z_matrices here = {filled[plan->rank], 0, (int)info.rows, (int)info.cols, info.muon};
    for (g2z_weight *w = plan->weight; w < plan->weight + plan->muon_weights; w++) {
      if ((int)w->param != p) continue;
      const int home = w->home < 0 ? plan->rank : w->home;
      w->home_at = filled[home];
      filled[home] += info.elements;
      here.weights += home == plan->rank;
    }
    if (here.weights && plan->shard_elements > 0) plan->shape[plan->shapes++] = here;
  }
}

/* Lists the routes, each weight's pieces in the order of memory. A piece ends where its weight or
 * its owner's slice does. sent[rank]: elements of u that the rank sends. */
G2Z__PRIVATE void g2z__plan_routes(g2z_plan *plan, size_t *sent) {
  const g2z_bucket *b = plan->bucket;
  for (const g2z_weight *w = plan->weight; w < plan->weight + plan->muon_weights; w++) {
    const size_t begin = plan->unit[w->unit].begin + plan->offset[w->param];
    const size_t end = begin + g2z__param_describe(&plan->model, w->param).elements;
    for (size_t at = begin, next; at < end; at = next) {
      while (b->begin + b->elements <= at) b++;
      const size_t slice = g2z__plan_owned(plan, b->elements), owner = (at - b->begin) / slice;
      next = G2Z__MIN(b->begin + (owner + 1) * slice, end);
      const g2z_route route = {(int)owner, w->home, sent[owner], w->home_at + (at - begin),
                               next - at};
      plan->route[plan->routes++] = route;
      sent[owner] += route.elements;
    }
  }
}

/* Sizes Muon's areas for the rank that needs most, so that they are equal on all. home: elements of
 * the weights at home there; u: of its slices of all weights, if they travel. */
G2Z__PRIVATE void g2z__plan_areas(g2z_plan *plan, size_t home, size_t u) {
  const size_t C = (size_t)plan->model.channels;
  const size_t one = G2Z_ORTHOGONALIZE_WORK(C, 4 * C) * plan->u_bytes; /* the largest matrix */
  size_t v_bytes = home * sizeof(float), work = one;
  plan->work_begin = g2z__align(home * plan->u_bytes);
  if (plan->routes) {
    plan->u_begin = plan->work_begin;
    v_bytes = u * sizeof(float);
  }

  /* Scratch for 12 matrices keeps a GPU busy. It is smaller if all areas together would otherwise
   * take more memory than Muon saves by having no v. */
  if (v_bytes > plan->work_begin + one) work = G2Z__MIN(v_bytes - plan->work_begin, 12 * one);
  plan->work_bytes = g2z__align(G2Z__MAX(work, u * plan->u_bytes));
}

/* Muon: the weights' homes, the routes, and the areas. */
G2Z__PRIVATE g2z_status g2z__plan_homes(g2z_plan *plan) {
  const size_t world = (size_t)plan->world;
  const size_t most_routes =
      (size_t)plan->muon_weights + (size_t)plan->buckets * (size_t)plan->slices;
  const int travels = plan->owner == G2Z_OWNER_SLICES && world > 1; /* else owners have all */
  size_t home = 0, u = 0, *filled, *sent;
  plan->v_elements = plan->shard_elements;
  if (!plan->muon_weights) return G2Z_OK;
  G2Z_TRY(g2z__plan_weights(plan));
  if (travels) {
    G2Z_TRY(g2z__plan_give_homes(plan));
    G2Z_TRY(G2Z_NEW(plan->services, most_routes, &plan->route));
  }
  G2Z_TRY(G2Z_NEW(plan->services, 2 * world, &filled));
  sent = filled + world;
  g2z__plan_place_weights(plan, filled);
  if (travels) {
    g2z__plan_routes(plan, sent);
    plan->v_elements -= sent[plan->rank];
  } else if (plan->shard_elements > 0) plan->v_elements -= filled[plan->rank];
  for (size_t rank = 0; rank < world; rank++) {
    home = G2Z__MAX(home, filled[rank]);
    u = G2Z__MAX(u, sent[rank]);
  }
  g2z_release(plan->services, filled);
  g2z__plan_areas(plan, home, u);
  return G2Z_OK;
}

/* The part of parameter p of a unit that lies in this rank's slice of a bucket; it may have no
 * elements. v_at, u_at and scale stay 0. */
G2Z__PRIVATE g2z_update_range g2z__plan_owned_range(const g2z_plan *plan, const g2z_bucket *b,
                                                    const g2z_unit *unit, g2z_param p) {
  const g2z_param_info info = g2z__param_describe(&plan->model, p);
  const size_t begin = unit->begin + plan->offset[p];
  const size_t from = G2Z__MAX(begin, b->own_begin);
  const size_t to = G2Z__MIN(begin + info.elements, b->own_begin + b->own_elements);
  g2z_update_range range;
  memset(&range, 0, sizeof range);
  if (info.unit != unit->kind || from >= to) return range;
  const size_t inside = from - b->own_begin;
  range.own_param_at = b->own_param_at + inside;
  range.sum_at = b->sum_at + inside;
  range.shard_at = b->shard_at + inside;
  range.canonical = unit->canonical + (from - unit->begin);
  range.elements = to - from;
  range.decay = info.decay;
  return range;
}

/* Appends an update range, or adds its elements to the last one if that ends where it begins and is
 * number `from` or later. */
G2Z__PRIVATE void g2z__plan_add_update(g2z_plan *plan, size_t from, const g2z_update_range *range) {
  if (plan->updates > from) {
    g2z_update_range *last = &plan->update[plan->updates - 1];
    if (last->decay == range->decay &&
        last->own_param_at + last->elements == range->own_param_at &&
        last->shard_at + last->elements == range->shard_at &&
        last->canonical + last->elements == range->canonical) {
      last->elements += range->elements;
      return;
    }
  }
  plan->update[plan->updates++] = *range;
}

/* Appends this rank's update ranges of one optimizer, parameter by parameter. */
G2Z__PRIVATE void g2z__plan_updates(g2z_plan *plan, g2z_optimizer kind) {
  const size_t start = plan->updates;
  const g2z_weight *weight = plan->weight;
  size_t muon = 0; /* elements of Muon's weights so far, which v lacks and u has */
  for (int k = 0; k < plan->buckets; k++) {
    g2z_bucket *b = &plan->bucket[k];
    b->first_update[kind] = plan->updates;
    /* If other ranks wait for this bucket, its first range begins with it. */
    const int cut = plan->gathers || (plan->muon_weights && k == plan->early);
    const size_t from = cut ? plan->updates : start;
    for (int u = b->unit; u <= b->last_unit; u++)
      for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
        const g2z_unit *unit = &plan->unit[u];
        g2z_update_range range = g2z__plan_owned_range(plan, b, unit, (g2z_param)p);
        if (range.elements == 0) continue;
        const g2z_param_info info = g2z__param_describe(&plan->model, (g2z_param)p);
        g2z_optimizer its = G2Z_OPTIMIZER_ADAMW;
        range.v_at = range.shard_at - muon;
        if (plan->muon_weights > 0 && info.muon > 0) {
          its = G2Z_OPTIMIZER_MUON;
          while (weight->unit != u || (int)weight->param != p) weight++;
          const size_t begin = unit->canonical + plan->offset[p];
          range.u_at = plan->routes ? muon : weight->home_at + (range.canonical - begin);
          range.v_at = 0;
          range.scale = (float)(0.2 * sqrt((double)(info.cols / (size_t)info.muon)));
          muon += range.elements;
        }
        if (its == kind) g2z__plan_add_update(plan, from, &range);
      }
  }
  plan->bucket[plan->buckets].first_update[kind] = plan->updates;
}

/* Fills in the tables of buckets, homes, routes and update ranges. */
G2Z__PRIVATE g2z_status g2z__plan_fill(g2z_plan *plan) {
  G2Z_TRY(G2Z_NEW(plan->services, (size_t)plan->buckets + 1, &plan->bucket));
  G2Z_TRY(G2Z_NEW(plan->services, g2z__plan_updates_limit(plan), &plan->update));
  g2z__plan_cut(plan, &plan->bucket[plan->buckets]);
  plan->bucket[plan->buckets].begin = plan->elements;
  for (int k = 0, numbered = 0; k < plan->buckets; k++) {
    g2z_bucket *b = &plan->bucket[k];
    b->unit = 0;
    while (plan->unit[b->unit + 1].begin <= b->begin) b->unit++;
    b->last_unit = b->unit;
    while (plan->unit[b->last_unit + 1].begin < b->begin + b->elements) b->last_unit++;
    const g2z_unit *unit = &plan->unit[b->unit];
    b->param_at = unit->param_at + (b->begin - unit->begin);
    b->grad_at = unit->grad_at + (b->begin - unit->begin);
    /* Buckets tile the memory, and a rank owns the same part of each. */
    b->own_elements = g2z__plan_owned(plan, b->elements);
    b->own_begin = b->begin;
    if (plan->owner == G2Z_OWNER_SLICES) b->own_begin += (size_t)plan->slice * b->own_elements;
    b->shard_at = g2z__plan_owned(plan, b->begin);
    b->sum_at = plan->by_unit ? b->shard_at : b->own_begin;
    b->own_param_at = b->param_at + (b->own_begin - b->begin);
    if (unit->gathered)
      b->own_param_at = plan->slices_at + b->shard_at - g2z__plan_owned(plan, plan->unit[1].begin);
    for (; numbered <= b->last_unit; numbered++) plan->unit[numbered].bucket = k;
  }
  plan->unit[plan->units].bucket = plan->buckets;

  plan->early = 0;
  if (plan->muon_weights) plan->early = plan->unit[plan->wte].bucket;
  else if (plan->gathers) plan->early = plan->unit[plan->model.layers].bucket; /* block 0 */
  G2Z_TRY(g2z__plan_homes(plan));
  g2z__plan_updates(plan, G2Z_OPTIMIZER_ADAMW);
  plan->muon_updates = plan->updates;
  g2z__plan_updates(plan, G2Z_OPTIMIZER_MUON);
  return G2Z_OK;
}

/* With graph=auto a step of more kernels is not recorded: it takes long enough to hide its
 * launches, and a graph takes memory for each. How much is the driver's choice: this is planned. */
#define G2Z__GRAPH_LAUNCHES 16384
#define G2Z__GRAPH_LAUNCH_BYTES ((size_t)64 << 10)
/* About the number of kernels of a micro-step: of each block, and of the rest. */
#define G2Z__BLOCK_LAUNCHES 26
#define G2Z__OTHER_LAUNCHES 4

/* Sizes in the kernels for Hopper. */
#define G2Z__HOPPER_SPLITS 8     /* maximum of parts of a head in attention's backward */
#define G2Z__ATTENTION_PARTS 320 /* maximum of heads, or parts of heads, whose dQ is in scratch */
#define G2Z__PRODUCT_COLUMNS 192 /* in a tile of our own products */

/* Sizes in the CPU ops. A thread has memory for a task of a product: sums, and panels of both
 * operands. */
#define G2Z__STEPS 128           /* k of a panel: products that are added up as a group */
#define G2Z__TASK_ROWS 256       /* most rows of a task */
#define G2Z__TASK_COLUMNS 384    /* most columns; a task's rows of sums are so far apart */
#define G2Z__TASK_SUMS (G2Z__TASK_ROWS * G2Z__TASK_COLUMNS)
#define G2Z__TASK_FLOATS \
  (G2Z__TASK_SUMS + (G2Z__TASK_ROWS + G2Z__TASK_COLUMNS) * G2Z__STEPS)
#define G2Z__QUERIES 64          /* most in a block of attention; T = 1024: 256 KB of scores */

/* Sizes in the kernels for 8 bits on other GPUs. */
#define G2Z__FP8_MULTIPLE 16     /* cuBLASLt's products in 8 bits need it of K and M */
#define G2Z__SLICE_BYTES ((size_t)32 << 20) /* a part of a product that stays in L2 */

/* Tables of buffers. plan_bytes() counts the buffers; trainer_allocate() (i14) and model_extend()
 * (i15) allocate them; trainer_release() and model_release() free them. The tables name the plan
 * `p`, the model `m` and the trainer `t` of the function that walks them.
 *   address  the member that points to the buffer
 *   kind     the kind of memory that the plan counts the buffer as
 *   where    DEVICE: the device's own memory. SHARED: memory of the device that other ranks access,
 *            so the communicator allocates it; a model in use has no other ranks, and takes the
 *            device's own. HOST: pinned memory of the host
 *   bytes    0: there is no such buffer, and the member may point into another one
 * Other memory has another lifetime: the communicator's (k80), scratch of the ops, the tokens and
 * logits of a generation (i15), the host's tables. */
typedef enum g2z__where { G2Z__DEVICE, G2Z__HOST, G2Z__SHARED } g2z__where;

/* Buffers of every model. In `tokens` the targets of a step follow its tokens without a gap. */
#define G2Z__MODEL_BUFFERS(X)                                                                     \
  /* address         kind         where   bytes */                                                \
  X(m->activations,  ACTIVATIONS, DEVICE, g2z__activation_offset(p, G2Z__ACT_COUNT, 0))           \
  X(m->tokens,       BATCHES,     DEVICE, 2 * g2z__align(g2z__plan_tokens(p) * sizeof(int32_t)))  \
  X(m->sum,          BATCHES,     DEVICE, sizeof(double))                                         \
  X(m->params,       PARAMS,      SHARED, p->param_elements * p->dtype_bytes)                     \
  X(m->logits,       HEAD,        SHARED, p->logits_bytes)

/* More buffers of a model in training, and of its trainer. */
#define G2Z__TRAINER_BUFFERS(X)                                                                   \
  X(m->grads,        GRADS,       DEVICE, p->grad_elements * p->grad_bytes)                       \
  X(m->dwte,         HEAD,        DEVICE, g2z__plan_dwte(p) * sizeof(float))                      \
  X(t->sums,         GRADS,       DEVICE, p->by_unit ? p->shard_elements * p->grad_bytes : 0)     \
  X(t->narrow_at,    PARAMS,      DEVICE, p->narrow_bytes)                                        \
  X(t->master,       OPTIMIZER,   DEVICE, p->shard_elements * sizeof(float))                      \
  X(t->m,            OPTIMIZER,   DEVICE, p->shard_elements * p->moment_bytes)                    \
  X(t->v,            OPTIMIZER,   DEVICE, p->v_elements * p->moment_bytes)                        \
  X(t->state,        BATCHES,     DEVICE, sizeof(g2z_step_state))                                 \
  X(t->ranges,       BATCHES,     DEVICE, g2z__plan_updates_limit(p) * sizeof(g2z_update_range))  \
  X(t->verdict.rows, BATCHES,     SHARED, (size_t)p->world * G2Z_VERDICT_COLUMNS * sizeof(double))

/* Buffers of a trainer on the host. The plan counts only the device's memory. */
#define G2Z__PINNED_BUFFERS(X)                                                                    \
  X(t->staged[0],    NONE,        HOST,   2 * g2z__plan_tokens(p) * sizeof(int32_t))              \
  X(t->staged[1],    NONE,        HOST,   2 * g2z__plan_tokens(p) * sizeof(int32_t))              \
  X(t->verdict.reported[0], NONE, HOST,   sizeof(g2z_step_state))                                 \
  X(t->verdict.reported[1], NONE, HOST,   sizeof(g2z_step_state))                                 \
  X(t->ballot[0],    NONE,        HOST,   sizeof(g2z__ballot))                                    \
  X(t->ballot[1],    NONE,        HOST,   sizeof(g2z__ballot))

#define G2Z__BUFFERS(X) G2Z__MODEL_BUFFERS(X) G2Z__TRAINER_BUFFERS(X) G2Z__PINNED_BUFFERS(X)

/* Tokens of a step on this rank. */
G2Z__PRIVATE size_t g2z__plan_tokens(const g2z_plan *plan) {
  return (size_t)plan->accum * plan->tokens;
}

/* The largest request of a CUDA op for scratch, except products: attention's with what may surround
 * it, or the LM head's. */
G2Z__PRIVATE size_t g2z__plan_request(const g2z_plan *plan) {
  const size_t N = plan->tokens, C = (size_t)plan->model.channels, B = (size_t)plan->batch;
  const size_t NH = (size_t)plan->model.heads, Vp = (size_t)plan->vocab_padded;
  const int halves = plan->dtype_bytes == 2;
  const size_t rows = g2z__round_up((size_t)plan->seq, 64); /* of a sequence, in whole tiles */
  const size_t statistics = B * rows * NH * 2 * sizeof(float);
  const size_t sums = (N / 32 + 2048) * C * sizeof(float); /* parts of column sums */
  const size_t sort = 4 * N * sizeof(int32_t) + 1024;      /* of the tokens: four lists */
  size_t attention = statistics + sort + sums;
  if (halves && C == 64 * NH) { /* parts of dQ in fp32, on Hopper */
    const size_t parts = G2Z__MIN(G2Z__HOPPER_SPLITS * B * NH, G2Z__ATTENTION_PARTS);
    attention += parts * rows * 64 * sizeof(float);
  }
  if (plan->dropout) attention += N * C * plan->dtype_bytes;            /* a projection's output */
  if (plan->fp8 >= G2Z_FP8_FORWARD) attention += 4 * C * (C + 16) + 1024; /* a weight in 8 bits */
  if (plan->fp8 >= G2Z_FP8_ALL) attention += G2Z__SLICE_BYTES;          /* of a data gradient */
  if (!halves) return attention;

  const size_t chunk = (size_t)plan->head_chunk, numbers = 4; /* per row: reference, target, ... */
  const size_t tiles = (Vp / G2Z__PRODUCT_COLUMNS + 1) * 2 * sizeof(float); /* a row's sums */
  const size_t dh = C * sizeof(float);                        /* in the memory of these sums */
  size_t head = chunk * (G2Z__MAX(tiles, dh) + numbers * sizeof(float)) + 4096;
  if (plan->fp8) head += (chunk + Vp) * (C + 16);             /* h and wte in 8 bits */
  if (plan->fp8 >= G2Z_FP8_ALL) {
    head += Vp * C + chunk * sizeof(float);                   /* wte's columns; factors */
    head += G2Z__MAX(G2Z__SLICE_BYTES, 128 * Vp * 2);         /* logits */
  }
  return G2Z__MAX(attention, head);
}

/* The threads that CPU ops use in a process. The ranks of a host divide its cores, unless they are
 * already bound to cores: if every rank used all cores, all would run ten times slower. */
G2Z__PRIVATE int g2z__plan_threads(int local_world) {
#ifdef _OPENMP
  const int cores = omp_get_num_procs();
  if (local_world > 1 && !getenv("OMP_NUM_THREADS") && cores >= sysconf(_SC_NPROCESSORS_ONLN))
    return G2Z__MAX(cores / local_world, 1);
  return omp_get_max_threads();
#else
  (void)local_world;
  return 1;
#endif
}

/* Floats of a thread: of a task, then `more`. Both parts are whole cache lines. */
G2Z__PRIVATE size_t g2z__plan_thread(size_t more) {
  return G2Z__TASK_FLOATS + g2z__round_up(more, 16);
}

/* The CPU ops' scratch: memory of the threads, in which attention has a block of scores, and its
 * backward two; and the rounded operands of a product in 8 bits. Scores of texts and validation
 * have longer sequences than training if its batch has as many tokens. */
G2Z__PRIVATE size_t g2z__plan_cpu_scratch(const g2z_plan *plan) {
  const size_t N = plan->tokens, C = (size_t)plan->model.channels, V = (size_t)plan->model.vocab;
  const size_t longest = G2Z__MIN((size_t)plan->model.context, N);
  const size_t scores = G2Z__QUERIES * G2Z__MAX(2 * (size_t)plan->seq, longest);
  const size_t threads = (size_t)g2z__plan_threads(plan->local_world);
  size_t rounded = 0;
  if (plan->fp8) rounded = (N + V) * C + N;
  if (plan->fp8 >= G2Z_FP8_FORWARD) rounded = G2Z__MAX(rounded, 4 * C * (N + C));
  if (plan->fp8 >= G2Z_FP8_ALL) rounded = G2Z__MAX(rounded, 5 * N * C);
  return (threads * g2z__plan_thread(scores) + 16 + rounded) * sizeof(float);
}

/* Elements of wte's gradient; 0 if its type is the other gradients' type: then it lies in grads. */
G2Z__PRIVATE size_t g2z__plan_dwte(const g2z_plan *plan) {
  if (plan->dwte_dtype == plan->grad_dtype) return 0;
  return (size_t)plan->vocab_padded * (size_t)plan->model.channels;
}

G2Z__PRIVATE void g2z__plan_bytes(g2z_plan *plan) {
  size_t *bytes = plan->bytes;
  /* The blocks' weights in 8 bits, each once for forward and once for backward. A gathered block
   * has none: each pass would have to round it again. */
  const int kept = plan->fp8 >= G2Z_FP8_FORWARD && plan->device == G2Z_DEVICE_CUDA &&
                   !plan->unit[1].gathered;
  plan->narrow_bytes = 0;
  for (int param = 0; param < G2Z_PARAM_COUNT && kept; param++) {
    const g2z_param_info w = g2z__param_describe(&plan->model, (g2z_param)param);
    if (w.unit == G2Z_UNIT_BLOCK && w.rank == 2)
      plan->narrow_bytes += (size_t)plan->model.layers *
                            (g2z__align(w.rows * G2Z_NARROW_ROW(w.cols)) +
                             g2z__align(w.cols * G2Z_NARROW_ROW(w.rows)));
  }
  if (plan->logits_bytes < plan->work_begin + plan->work_bytes)
    plan->logits_bytes = plan->work_begin + plan->work_bytes;

  memset(bytes, 0, sizeof plan->bytes);
  const g2z_plan *p = plan;
#define X(address, kind, where, size) bytes[G2Z_MEMORY_##kind] += g2z__align(size);
  G2Z__MODEL_BUFFERS(X)
  G2Z__TRAINER_BUFFERS(X)
#undef X

  /* The communicator's inbox, or its copy of a bucket in the wire's type. */
  if (plan->reduce == G2Z_TRANSPORT_COPY)
    bytes[G2Z_MEMORY_GRADS] += g2z__align(2 * (plan->bucket_elements / (size_t)plan->slices) *
                                          (size_t)(plan->world - 1) * plan->grad_bytes);
  else if (plan->world > 1 && plan->device == G2Z_DEVICE_CUDA &&
           plan->wire_dtype != plan->grad_dtype)
    bytes[G2Z_MEMORY_GRADS] += g2z__align(plan->bucket_elements * 2);

  /* 32 MiB for products. Scratch grows by a factor of 1.5, so the block is up to 1.5 times the
   * largest request. A block of a recorded graph stays when a score or a generation needs a larger
   * one: 3 times covers one such block. */
  if (plan->device == G2Z_DEVICE_CUDA)
    bytes[G2Z_MEMORY_SCRATCH] = ((size_t)32 << 20) + 3 * g2z__align(g2z__plan_request(plan));
  else
    bytes[G2Z_MEMORY_SCRATCH] = g2z__align(g2z__plan_cpu_scratch(plan));
  if (plan->graphed) bytes[G2Z_MEMORY_SCRATCH] += plan->launches * G2Z__GRAPH_LAUNCH_BYTES;

  plan->nccl_bytes = 0;
  if (plan->world > 1 && plan->device == G2Z_DEVICE_CUDA) {
    const int copies = plan->reduce == G2Z_TRANSPORT_COPY &&
                       plan->gather == G2Z_TRANSPORT_COPY && !plan->routes;
    plan->nccl_bytes = (size_t)(copies ? 390 : 800) << 20;
  }
  plan->bytes_total = 0;
  for (int i = 0; i < G2Z_MEMORY_COUNT; i++) plan->bytes_total += bytes[i];
}

/* Fills in everything that depends on the micro-batch. */
G2Z__PRIVATE void g2z__plan_batch(g2z_plan *plan, int batch) {
  const int tokens = batch * plan->seq;
  const size_t C = (size_t)plan->model.channels;
  plan->batch = batch;
  plan->tokens = (size_t)tokens;
  plan->step_tokens = (int64_t)tokens * plan->accum * plan->world;

  /* The number of tokens whose logits exist at the same time. On a CPU: as many as fit into the
   * caches together with the rows of wte that they are multiplied with. On a GPU: all, up to
   * 65,536, if the logits take at most half as much memory as the activations; else 8,192. Each
   * further chunk reads and writes wte's fp32 gradient again. Logits and activations both grow with
   * the tokens, so the limit is the same for every batch, and a larger batch never needs less
   * memory. The number of chunks changes the order of sums, so it follows from the config alone,
   * not from a GPU's free memory. */
  g2z_plan one = *plan;
  one.tokens = (size_t)plan->seq;
  size_t activations = g2z__activation_offset(&one, G2Z__ACT_COUNT, 0);
  size_t logits = (size_t)plan->seq * (size_t)plan->vocab_padded * plan->dtype_bytes;
  int limit = 2 * logits <= activations ? 65536 : 8192;
  if (plan->device == G2Z_DEVICE_CPU) limit = 256;
  plan->head_chunk = G2Z__MIN(tokens, limit);
  /* At least sizeof(float), because generation needs a row of fp32. */
  const size_t column = G2Z__MAX((size_t)plan->head_chunk * plan->dtype_bytes, sizeof(float));
  plan->logits_bytes = g2z__align(column * (size_t)plan->vocab_padded);

  /* The embedding's part of wte's gradient is sent separately if that is clearly faster than
   * sending all of wte's gradient at the end: if its rows are at most two thirds of wte's. A single
   * rank gains if the head's part can then be rounded at once, because nothing is added to it. */
  const int alone = plan->accum == 1 && plan->head_chunk == tokens;
  plan->row_count = (size_t)plan->world * plan->tokens;
  plan->row_tokens_at = g2z__align(plan->row_count * C * plan->dtype_bytes);
  plan->row_order_at = plan->row_tokens_at + g2z__align(plan->row_count * sizeof(int32_t));
  plan->wte_rows = (plan->world > 1 || (plan->grad_dtype != G2Z_FP32 && alone)) &&
                   3 * plan->row_count <= 2 * (size_t)plan->vocab_padded &&
                   plan->row_order_at + 2 * plan->row_count * sizeof(int32_t) <= plan->logits_bytes;
  plan->dwte_dtype = plan->wte_rows && alone ? plan->grad_dtype : G2Z_FP32;

  /* Copy engines are faster for few tokens, NCCL's symmetric windows for many. */
  plan->gather = plan->transport;
  if (plan->gather == G2Z_TRANSPORT_AUTO)
    plan->gather = plan->wte_rows ? G2Z_TRANSPORT_COPY : G2Z_TRANSPORT_NCCL;
  plan->buckets = g2z__plan_cut(plan, NULL);
  g2z__plan_bytes(plan);
}

/* Fills in kind, size and indices of each unit, then the bucket size and the rest of the plan. */
G2Z__PRIVATE g2z_status g2z__plan_lay_out(g2z_plan *plan, const g2z_train_config *config) {
  const size_t C = (size_t)plan->model.channels, grain = g2z__plan_grain(plan);
  size_t elements[] = {0, 0, 0, 0}, at = 0, canonical = 0;
  G2Z_TRY(G2Z_NEW(plan->services, (size_t)plan->units + 1, &plan->unit));

  /* Units before wte follow each other without padding up to stage 1; wte has its own buckets. */
  for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
    g2z_param_info info = g2z__param_describe(&plan->model, (g2z_param)p);
    plan->offset[p] = elements[info.unit];
    elements[info.unit] += info.elements;
  }
  elements[G2Z_UNIT_WTE] = (size_t)plan->vocab_padded * C;
  for (int u = 0; u < plan->units; u++) {
    g2z_unit *unit = &plan->unit[u];
    unit->kind = g2z__unit_kind(&plan->model, u);
    unit->gathered = plan->zero_stage >= 3 && plan->slices > 1 && unit->kind == G2Z_UNIT_BLOCK;
    unit->elements = elements[unit->kind];
    unit->padded = g2z__round_up(unit->elements, grain);
    unit->canonical = canonical;
    unit->begin = at;
    if (u == plan->wte) unit->begin = g2z__round_up(at, grain);
    at = unit->begin + (plan->by_unit ? unit->padded : unit->elements);
    canonical += unit->elements;
  }
  plan->elements = plan->unit[plan->units].begin = g2z__round_up(at, grain);
  plan->parameters = plan->unit[plan->wte].canonical + (size_t)plan->model.vocab * C;
  plan->shard_elements = g2z__plan_owned(plan, plan->elements);

  /* Where the parameters lie on this rank. Gathered blocks share two buffers, which follow the
   * final LayerNorm. Their slices follow wte. */
  const g2z_unit *block = &plan->unit[1], *wte = &plan->unit[plan->wte];
  size_t blocks = 0, buffers = 0; /* elements of all gathered blocks, and of the two buffers */
  if (block->gathered) {
    blocks = (size_t)plan->model.layers * block->padded;
    buffers = 2 * block->padded;
  }
  for (int u = 0; u < plan->units; u++) {
    g2z_unit *unit = &plan->unit[u];
    unit->param_at = unit->begin;
    if (unit->gathered) unit->param_at = block->begin + (size_t)(u % 2) * block->padded;
    else if (u > 0) unit->param_at = unit->begin - blocks + buffers;
  }
  plan->slices_at = wte->param_at + plan->elements - wte->begin;
  plan->param_elements = plan->slices_at + blocks / (size_t)plan->slices;

  /* Where backward writes the gradients. From stage 2 on, the units alternate between two buffers,
   * and wte has its own. */
  const size_t buffer = G2Z__MAX(block->padded, plan->unit[plan->wpe].padded);
  for (int u = 0; u < plan->units; u++) {
    g2z_unit *unit = &plan->unit[u];
    if (!plan->by_unit) unit->grad_at = unit->begin;
    else if (u == plan->wte) unit->grad_at = 2 * buffer;
    else unit->grad_at = (size_t)(u % 2) * buffer;
  }
  plan->grad_elements = plan->elements;
  if (plan->by_unit) plan->grad_elements = wte->grad_at + wte->padded;

  /* Buckets smaller than 64 MiB need more collectives, and each costs time to start. Larger buckets
   * leave more traffic for the end of the step, when no computation hides it. */
  double bytes = 64.0 * 1048576.0;
  if (config->bucket_mb > 0) bytes = (double)config->bucket_mb * 1048576.0;
  else if (bytes < 2e6 * plan->world) bytes = 2e6 * plan->world;
  const size_t bucket = (size_t)(bytes / plan->grad_bytes) / grain * grain;
  plan->bucket_elements = G2Z__MIN(G2Z__MAX(bucket, grain), plan->elements);
  const size_t most = plan->elements / plan->bucket_elements + (size_t)plan->units;
  if (most > 1 << 16)
    G2Z_REFUSE(plan->services, "buckets of %.4g MiB cut %zu gradients into %zu buckets: take a "
               "larger bucket_mb", (double)plan->bucket_elements * plan->grad_bytes / 1048576.0,
               plan->elements, most);
  g2z__plan_batch(plan, config->batch);
  G2Z_TRY(g2z__plan_fill(plan));
  g2z__plan_bytes(plan); /* again, with Muon's areas and v */
  return G2Z_OK;
}

G2Z_API g2z_status g2z_plan_create(g2z_services *services, const g2z_train_config *config,
                                   g2z_device_kind device, int rank, int world, int local_world,
                                   g2z_plan **out) {
  g2z_plan *plan;
  *out = NULL;
  G2Z_TRY(g2z__train_config_check(services, config));
  G2Z_TRY(g2z_check_range(services, "world", world, 1, 1 << 16));
  G2Z_TRY(g2z_check_range(services, "rank", rank, 0, world - 1));
  G2Z_TRY(g2z_check_range(services, "local_world", local_world, 0, world));
  if (config->graph == 1 && device == G2Z_DEVICE_CPU)
    return g2z_fail(services, G2Z_UNSUPPORTED, "graph=1 needs a GPU: leave it off on a CPU");
  G2Z_TRY(G2Z_NEW(services, 1, &plan));
  plan->services = services;
  plan->model = config->model;
  plan->vocab_padded = (config->model.vocab + 127) / 128 * 128;
  plan->units = config->model.layers + 3;
  plan->wpe = plan->units - 2;
  plan->wte = plan->units - 1;

  plan->device = device;
  plan->rank = plan->slice = rank;
  plan->world = plan->slices = world;
  plan->local_world = local_world;
  plan->zero_stage = config->zero_stage;
  plan->strategy = config->strategy;
  /* To add a stage, say what it is here: `owner`, `by_unit`, `gathers`, and in plan_lay_out
   * unit.gathered. Code that lays out memory or runs a step reads these, not the stage. Then follow
   * [A] to [D] of the page and its table. 3 is also a bound in g2z__settings and g2z_plan_fits. */
  plan->owner = G2Z_OWNER_SLICES;
  if (config->zero_stage == 0) plan->owner = G2Z_OWNER_ALL;
  if (config->strategy == G2Z_STRATEGY_DP) plan->owner = G2Z_OWNER_ROOT;
  plan->by_unit = config->zero_stage >= 2;
  plan->gathers = world > 1 && plan->owner != G2Z_OWNER_ALL;
  const int one_host = local_world == 0 || local_world == world;
  const int copies = plan->owner == G2Z_OWNER_SLICES && world > 1 && device == G2Z_DEVICE_CUDA;
  plan->transport = plan->reduce = G2Z_TRANSPORT_NCCL;
  if (copies && one_host) plan->transport = config->transport;
  if (plan->transport != G2Z_TRANSPORT_NCCL) plan->reduce = G2Z_TRANSPORT_COPY;

  plan->seq = config->seq;
  plan->accum = config->accum;
  plan->dropout = config->dropout > 0;
  plan->recompute = config->recompute;
  const size_t launches = G2Z__BLOCK_LAUNCHES * (size_t)config->model.layers + G2Z__OTHER_LAUNCHES;
  plan->launches = (size_t)config->accum * launches;
  plan->graphed = config->graph == 1;
  if (config->graph == 2)
    plan->graphed = device == G2Z_DEVICE_CUDA && plan->launches <= G2Z__GRAPH_LAUNCHES;

  plan->dtype = plan->grad_dtype = plan->wire_dtype = config->dtype;
  plan->fp8 = config->fp8;
  const int wide = config->grad_fp32 || config->dtype == G2Z_TF32;
  if (wide) plan->wire_dtype = G2Z_FP32;
  if (wide || config->accum > 2) plan->grad_dtype = G2Z_FP32;
  plan->dtype_bytes = plan->grad_bytes = plan->moment_bytes = plan->u_bytes = sizeof(float);
  if (device == G2Z_DEVICE_CUDA) { /* a CPU stores everything as fp32 */
    if (plan->dtype == G2Z_FP16 || plan->dtype == G2Z_BF16) plan->dtype_bytes = 2;
    if (plan->grad_dtype != G2Z_FP32) plan->grad_bytes = 2;
    if (config->optimizer.moments_bf16) plan->moment_bytes = 2;
    plan->u_bytes = 2;
  }

  plan->optimizer = config->optimizer.kind;
  if (plan->optimizer == G2Z_OPTIMIZER_MUON)
    for (int p = 0; p < G2Z_PARAM_COUNT; p++)
      if (g2z__param_describe(&plan->model, (g2z_param)p).muon)
        plan->muon_weights += config->model.layers;
  const g2z_status status = g2z__plan_lay_out(plan, config);
  if (status != G2Z_OK) g2z_plan_free(plan);
  else *out = plan;
  return status;
}

G2Z_API void g2z_plan_free(g2z_plan *plan) {
  if (!plan) return;
  g2z_release(plan->services, plan->unit);
  g2z_release(plan->services, plan->bucket);
  g2z_release(plan->services, plan->update);
  g2z_release(plan->services, plan->weight);
  g2z_release(plan->services, plan->route);
  g2z_release(plan->services, plan);
}

/* Bytes that must be free when a process has created only its context. */
G2Z__PRIVATE size_t g2z__plan_needs(const g2z_plan *plan) {
  return plan->bytes_total + plan->nccl_bytes;
}

/* The batch is a multiple of this: fp8=all needs a multiple of 128 tokens. */
G2Z__PRIVATE int g2z__plan_least_batch(const g2z_plan *plan) {
  int least = 1;
  while (plan->fp8 == G2Z_FP8_ALL && (int64_t)least * plan->seq % 128) least *= 2;
  return least;
}

G2Z_API int g2z_plan_largest_batch(const g2z_plan *plan, size_t free_bytes) {
  int fits = 0;
  for (int step = G2Z__MAX_BATCH; step > 0; step /= 2) { /* binary search: the bytes grow with B */
    g2z_plan trial = *plan;
    if (fits + step > G2Z__MAX_BATCH || fits + step > G2Z__MAX_TOKENS / plan->seq) continue;
    g2z__plan_batch(&trial, fits + step);
    if (g2z__plan_needs(&trial) <= free_bytes) fits += step;
  }
  return fits - fits % g2z__plan_least_batch(plan);
}

G2Z__PRIVATE double g2z__gib(size_t bytes) { return (double)bytes / 1073741824.0; }

G2Z_API g2z_status g2z_plan_fits(g2z_services *services, const g2z_train_config *config,
                                 const g2z_plan *plan, size_t free_bytes, int sharing) {
  const int shards = plan->world > 1 && plan->strategy == G2Z_STRATEGY_ZERO;
  const double needs = g2z__gib(g2z__plan_needs(plan)), there = g2z__gib(free_bytes);
  char remedy[300] = "", each[64] = "", zero[32] = "";
  if (g2z__plan_needs(plan) <= free_bytes) return G2Z_OK;
  if (sharing > 1) snprintf(each, sizeof each, " for each of the %d ranks on this host", sharing);
  int most = 0; /* the largest batch of all trials, at most the requested one */
  /* Trials: each stage from the config's on, without recomputation and with it. */
  const int trials = shards ? 2 * (4 - config->zero_stage) : 2;
  for (int i = 0; i < trials && most < plan->batch; i++) {
    g2z_train_config trial = *config;
    g2z_plan *leaner;
    const char *recompute = "", *joins = " with";
    trial.zero_stage += i / 2;
    if (i % 2 == 1) {
      trial.recompute = G2Z_RECOMPUTE_BLOCK;
      recompute = " with recompute=block";
      joins = " and";
    }
    G2Z_TRY(g2z_plan_create(services, &trial, plan->device, plan->rank, plan->world,
                            plan->local_world, &leaner));
    int batch = g2z_plan_largest_batch(leaner, free_bytes);
    batch = G2Z__MIN(batch, plan->batch);
    g2z_plan_free(leaner);
    if (batch <= most) continue;
    most = batch;
    if (i > 1) snprintf(zero, sizeof zero, "%s zero_stage=%d", joins, trial.zero_stage);
    const size_t used = strlen(remedy);
    const char *comma = used ? ", " : "";
    snprintf(remedy + used, sizeof remedy - used, "%sbatch=%d%s%s fits", comma, batch, recompute,
             zero);
  }
  const char *accum = most < plan->batch ? "; accum can be raised to keep the global batch" : "";
  if (most > 0)
    return g2z_fail(services, G2Z_NO_MEMORY,
                    "batch=%d needs %.2f GiB and %.2f GiB are free%s: %s%s", plan->batch, needs,
                    there, each, remedy, accum);
  const int least = g2z__plan_least_batch(plan);
  const char *fp8 = least > 1 ? ", the least with fp8=all; fp8=forward can take less" : "";
  const char *ranks = shards ? ", more ranks" : "";
  return g2z_fail(services, G2Z_NO_MEMORY,
                  "the model needs %.2f GiB at batch=%d and more than the %.2f GiB that are free%s "
                  "even at batch=%d%s: take a smaller model%s or a shorter seq", needs, plan->batch,
                  there, each, least, fp8, ranks);
}

/* ===== >>i07 shards and loader ===========================================
 * In:  token shards on disk (byte layout: manual, FILE FORMATS).
 * Out: x[accum,B,T] and y, which is x shifted by one token; both are read one step ahead.
 * Law: the tokens of a step are a pure function of the files, the config and the position. Sizes,
 * counts and tokens are checked before use. */

#define G2Z__SHARD_MAGIC 20240520
#define G2Z__SHARD_HEADER 1024   /* bytes: 256 int32 */

/* Adds a shard's token count, first and last tokens to a hash; 0: the file cannot be read. */
G2Z__PRIVATE int g2z__shard_hash(int file, uint64_t begin, int64_t tokens, uint64_t *hash) {
  unsigned char ends[2][256];
  const size_t bytes = G2Z__MIN(2 * (size_t)tokens, sizeof ends[0]);
  memset(ends, 0, sizeof ends);
  if (g2z__pread(file, ends[0], bytes, begin) < 0 ||
      g2z__pread(file, ends[1], bytes, begin + 2 * (uint64_t)tokens - bytes) < 0)
    return 0;
  *hash = g2z__hash(g2z__hash(*hash, &tokens, sizeof tokens), ends, sizeof ends);
  return 1;
}

#define G2Z__MASK_MAGIC 0x6b73616d /* "mask" */
typedef struct g2z__mask {         /* the header of a mask; its bits follow */
  int32_t magic, version;
  int64_t tokens;
  uint64_t shard;                  /* g2z__shard_hash of the shard that it belongs to */
} g2z__mask;
static_assert(sizeof(g2z__mask) == 24, "the layout of masks");

/* The path NAME.mask of shard NAME.bin. */
G2Z__PRIVATE g2z_path g2z__mask_of(const char *shard) {
  g2z_path path;
  size_t length = strlen(shard);
  if (length > 4 && strcmp(shard + length - 4, ".bin") == 0) length -= 4;
  snprintf(path.text, sizeof path.text, "%.*s.mask", (int)length, shard);
  return path;
}

/* ----- writing ----- */

struct g2z_shard_writer {
  g2z_services *services;
  g2z_writer *file, *mask;     /* mask: NULL while all tokens count */
  g2z_shard_format format;
  uint64_t tokens;
  unsigned char bits;          /* last byte of the mask, not full yet: tokens % 8 bits */
  int finished;
};

G2Z_API g2z_status g2z_shard_writer_create(g2z_services *services, const char *path,
                                           g2z_shard_format format, uint64_t vocab_hash,
                                           g2z_shard_writer **out) {
  *out = NULL;
  g2z_shard_writer *writer;
  G2Z_TRY(G2Z_NEW(services, 1, &writer));
  writer->services = services;
  writer->format = format;
  g2z_status status = g2z_writer_create(services, path, &writer->file);
  if (status == G2Z_OK && format == G2Z_SHARD_LLMC) {
    /* The count stays 0 until finish(): no reader takes an unfinished shard for a complete one. */
    int32_t header[G2Z__SHARD_HEADER / 4] = {G2Z__SHARD_MAGIC, 1, 0};
    memcpy(header + 3, &vocab_hash, sizeof vocab_hash);
    status = g2z_writer_put(writer->file, header, sizeof header);
  }
  if (status == G2Z_OK) *out = writer;
  else g2z_shard_writer_free(writer);
  return status;
}

G2Z_API g2z_status g2z_shard_writer_append(g2z_shard_writer *writer, const int32_t *ids,
                                           size_t count) {
  int32_t all = 0;
  for (size_t i = 0; i < count; i++) { /* checks all first: if one id is bad, nothing is appended */
    if ((uint32_t)(ids[i] & ~G2Z_UNCOUNTED) > 65535)
      G2Z_REFUSE(writer->services, "id %" PRId32 " does not fit into a shard, which holds ids 0 to "
                 "65535: use a smaller vocabulary", ids[i]);
    all |= ids[i];
  }
  if (writer->format == G2Z_SHARD_LLMC && count > INT32_MAX - writer->tokens)
    G2Z_REFUSE(writer->services, "a shard with llm.c's header holds at most %d tokens, but this "
               "one would get %" PRIu64 ": write more shards", INT32_MAX, writer->tokens + count);
  /* The first token that does not count begins the mask. All tokens before it count. */
  if (all & G2Z_UNCOUNTED && !writer->mask) {
    const g2z__mask none = {0, 0, 0, 0}; /* finish() writes the real header */
    G2Z_TRY(g2z_writer_create(writer->services, g2z__mask_of(writer->file->path).text,
                              &writer->mask));
    G2Z_TRY(g2z_writer_put(writer->mask, &none, sizeof none));
    for (uint64_t k = 0; k < writer->tokens / 8; k++)
      G2Z_TRY(g2z_writer_put(writer->mask, "\xff", 1));
  }
  uint16_t narrow[4096];
  for (size_t done = 0, n; done < count; done += n) {
    n = G2Z__MIN(count - done, G2Z_COUNT(narrow));
    for (size_t i = 0; i < n; i++) narrow[i] = (uint16_t)ids[done + i];
    G2Z_TRY(g2z_writer_put(writer->file, narrow, n * sizeof narrow[0]));
  }
  for (size_t i = 0; i < count; i++, writer->tokens++) {
    const int counts = !(ids[i] & G2Z_UNCOUNTED), at = (int)(writer->tokens % 8);
    if (at == 0) writer->bits = 0;
    writer->bits |= (unsigned char)(counts << at);
    if (at == 7 && writer->mask) G2Z_TRY(g2z_writer_put(writer->mask, &writer->bits, 1));
  }
  return G2Z_OK;
}

G2Z_API g2z_status g2z_shard_writer_finish(g2z_shard_writer *writer, int unlock) {
  if (writer->finished) return G2Z_OK;
  const char *shard = writer->file->partial;
  const int32_t count = (int32_t)writer->tokens;
  if (writer->format == G2Z_SHARD_LLMC)
    G2Z_TRY(g2z__writer_patch(writer->file, 2 * sizeof count, &count, sizeof count));
  G2Z_TRY(g2z__writer_finish(writer->file, 0));
  if (writer->mask) {
    g2z__mask head = {G2Z__MASK_MAGIC, 1, (int64_t)writer->tokens, G2Z__HASH};
    if (writer->tokens % 8) G2Z_TRY(g2z_writer_put(writer->mask, &writer->bits, 1));
    /* The hash needs the shard's first tokens, which are only in the file. */
    const int file = g2z__open_file(shard, O_RDONLY);
    const int good = file >= 0 && g2z__shard_hash(file, writer->file->written - 2 * writer->tokens,
                                                  head.tokens, &head.shard);
    const int error = errno;
    if (file >= 0) close(file);
    if (!good) return g2z_fail_file(writer->services, error, "read", shard);
    G2Z_TRY(g2z__writer_patch(writer->mask, 0, &head, sizeof head));
    G2Z_TRY(g2z__writer_finish(writer->mask, unlock));
  }
  writer->finished = 1;
  if (!unlock) return G2Z_OK;
  return g2z__writer_finish(writer->file, 1);
}

/* Commits the mask before the shard, and removes an old mask after it: a crash in between leaves a
 * pair that the loader refuses. */
G2Z_API g2z_status g2z_shard_writer_commit(g2z_shard_writer *writer) {
  G2Z_TRY(g2z_shard_writer_finish(writer, 0));
  if (writer->mask) G2Z_TRY(g2z_writer_commit(writer->mask));
  G2Z_TRY(g2z_writer_commit(writer->file));
  const g2z_path old = g2z__mask_of(writer->file->path);
  if (!writer->mask && g2z_unlink(old.text) != 0 && errno != ENOENT)
    return g2z_fail_file(writer->services, errno, "remove the mask of an earlier shard", old.text);
  return G2Z_OK;
}

G2Z_API void g2z_shard_writer_free(g2z_shard_writer *writer) {
  if (!writer) return;
  g2z_writer_free(writer->mask);
  g2z_writer_free(writer->file);
  g2z_release(writer->services, writer);
}

/* ----- opening ----- */

/* What a file system knows of a file's content. No user can set the time of the last change
 * (st_ctime): writing sets it, and so does a new name. A file that takes the name of another may
 * get the same time, but has another inode. */
typedef struct g2z__version {
  uint64_t inode;
  int64_t changed;   /* in ns */
} g2z__version;

typedef struct g2z__shard {
  const char *path;
  int file, mask;    /* valid while the shard is open; mask -1: all tokens count */
  uint64_t begin;    /* offset of the tokens in the file */
  uint64_t bytes;    /* size of the file; 0: never opened */
  int64_t tokens;
  int64_t first;     /* index of its first sequence, counted over all shards */
  uint64_t vocab_hash;
  uint64_t hash;     /* of its data: g2z__shard_samples() */
  g2z__version version[2]; /* of the file and of its mask when they had this hash */
} g2z__shard;

/* Files of other kinds that users name by mistake, by the number with which they begin. */
static const struct {
  int32_t magic;
  const char *what;
} g2z__shard_others[] = {
    {20240801, "a shard of llm.c with uint32 tokens of Llama 3"},
    {20240522, "an evaluation file of llm.c, such as HellaSwag's, which --eval reads"},
    {20240326, "a model of llm.c"},
    {20240328, "a tokenizer of llm.c"},
    {G2Z__MASK_MAGIC, "the mask of a token shard"}};

/* Checks an open shard by its size and first bytes. A shard that was checked before must have its
 * old size and kind of header. */
G2Z__PRIVATE g2z_status g2z__shard_check(g2z_services *services, g2z__shard *shard) {
  const char *path = shard->path;
  const uint64_t old_bytes = shard->bytes, old_begin = shard->begin;
  unsigned char head[256];
  int32_t header[5] = {0, 0, 0, 0, 0};
  struct stat info;
  if (fstat(shard->file, &info) != 0)
    return g2z_fail_file(services, errno, "read the shard", path);
  if (!S_ISREG(info.st_mode)) {
    const char *what = S_ISDIR(info.st_mode) ? "a directory" : "no regular file";
    return g2z_fail(services, G2Z_IO, "%s is %s, not a token shard: name files, as in "
                    "'data/NAME_train_*.bin'", path, what);
  }
  const int64_t got = g2z__pread(shard->file, head, sizeof head, 0);
  if (got < 0) return g2z_fail_file(services, errno, "read the shard", path);
  memcpy(header, head, G2Z__MIN((size_t)got, sizeof header));
  for (size_t i = 0; i < G2Z_COUNT(g2z__shard_others); i++)
    if (header[0] == g2z__shard_others[i].magic)
      return g2z_fail(services, G2Z_UNSUPPORTED, "%s is %s, not a token shard of GPT-2: name "
                      "shards that prepare_data made of a text, as in 'data/NAME_train_*.bin'",
                      path, g2z__shard_others[i].what);
  shard->bytes = (uint64_t)info.st_size;
  shard->begin = header[0] == G2Z__SHARD_MAGIC ? G2Z__SHARD_HEADER : 0;
  shard->tokens = ((int64_t)shard->bytes - (int64_t)shard->begin) / 2;
  const uint64_t promised = G2Z__SHARD_HEADER + 2 * (uint64_t)G2Z__MAX(header[2], 0);
  if (shard->bytes == 0)
    return g2z_fail(services, G2Z_FORMAT, "%s is empty: prepare it again", path);
  if (shard->begin) {
    if (shard->bytes < shard->begin)
      return g2z_fail(services, G2Z_FORMAT,
                      "%s begins as a token shard but ends after %" PRIu64 " of the header's %d "
                      "bytes: copy or prepare it again", path, shard->bytes, G2Z__SHARD_HEADER);
    if (header[1] != 1)
      return g2z_fail(services, G2Z_UNSUPPORTED, "%s is version %d of llm.c's shards, but only "
                      "version 1 (uint16 tokens) is known: prepare it again", path, header[1]);
    if (header[2] < 0 || promised != shard->bytes)
      return g2z_fail(services, G2Z_FORMAT, "%s promises %d token%s in %" PRIu64 " bytes but has "
                      "%" PRIu64 " bytes: it is unfinished or was cut; copy or prepare it again",
                      path, header[2], G2Z_PLURAL(header[2]), promised, shard->bytes);
    memcpy(&shard->vocab_hash, header + 3, sizeof shard->vocab_hash);
  } else {
    /* The most common mistake is to name a text file. In prose or code, one in fifteen of GPT-2's
     * tokens looks like two printable bytes, so 32 such tokens in a row must be text. */
    int64_t printable = 0;
    while (printable < got && ((head[printable] >= 0x20 && head[printable] <= 0x7e) ||
                               (head[printable] >= '\t' && head[printable] <= '\r')))
      printable++;
    if (printable == got && got >= 64)
      return g2z_fail(services, G2Z_FORMAT, "%s holds text, not tokens: make shards of it with "
                      "./prepare_data --vocab FILE --out DIR TEXT", path);
    if (shard->bytes % 2)
      return g2z_fail(services, G2Z_FORMAT, "%s has no shard header, and an odd number of bytes, "
                      "%" PRIu64 ": a token takes 2. It was cut or holds no tokens. Copy it again, "
                      "or make shards with ./prepare_data --vocab FILE --out DIR TEXT", path,
                      shard->bytes);
  }
  if (!old_bytes || (old_bytes == shard->bytes && old_begin == shard->begin)) return G2Z_OK;
  return g2z_fail(services, G2Z_FORMAT,
                  "%s had %" PRIu64 " bytes when the run began and has %" PRIu64 " now: do not "
                  "write shards while they are read", path, old_bytes, shard->bytes);
}

/* Checks that the open mask of an open shard is whole and belongs to it. */
G2Z__PRIVATE g2z_status g2z__mask_check(g2z_services *services, const g2z__shard *shard) {
  const g2z_path path = g2z__mask_of(shard->path);
  g2z__mask head = {0, 0, 0, 0};
  uint64_t bytes = sizeof head + ((uint64_t)shard->tokens + 7) / 8, hash = G2Z__HASH;
  struct stat info;
  if (fstat(shard->mask, &info) != 0 || g2z__pread(shard->mask, &head, sizeof head, 0) < 0 ||
      !g2z__shard_hash(shard->file, shard->begin, shard->tokens, &hash))
    return g2z_fail_file(services, errno, "read the mask", path.text);
  if (head.magic != G2Z__MASK_MAGIC)
    return g2z_fail(services, G2Z_FORMAT, "%s has the name of the mask of %s but is not a mask: "
                    "rename it", path.text, shard->path);
  if (head.version != 1 && info.st_size >= (off_t)sizeof head)
    return g2z_fail(services, G2Z_UNSUPPORTED, "%s is version %d of masks, but only version 1 is "
                    "known: prepare the shards again", path.text, head.version);
  if ((uint64_t)info.st_size != bytes)
    return g2z_fail(services, G2Z_FORMAT,
                    "%s has %" PRIu64 " bytes, but the mask of the %" PRId64 " tokens of %s has "
                    "%" PRIu64 ": it was cut or belongs to another shard; copy or prepare both "
                    "again", path.text, (uint64_t)info.st_size, shard->tokens, shard->path, bytes);
  if (head.tokens == shard->tokens && head.shard == hash) return G2Z_OK;
  return g2z_fail(services, G2Z_FORMAT,
                  "%s is the mask of another shard (%" PRId64 " tokens, hash %016" PRIx64 "), not "
                  "of %s (%" PRId64 " tokens, hash %016" PRIx64 "): copy or prepare both again",
                  path.text, head.tokens, head.shard, shard->path, shard->tokens, hash);
}

G2Z__PRIVATE void g2z__shard_close(const g2z__shard *shard) {
  close(shard->file);
  if (shard->mask >= 0) close(shard->mask);
}

/* Opens a shard and its mask, if there is one; neither stays open after a failure. */
G2Z__PRIVATE g2z_status g2z__shard_open(g2z_services *services, g2z__shard *shard) {
  const g2z_path mask = g2z__mask_of(shard->path);
  shard->mask = -1;
  shard->file = g2z__open_file(shard->path, O_RDONLY | O_NONBLOCK); /* a FIFO must not block */
  if (shard->file < 0) return g2z_fail_file(services, errno, "open the shard", shard->path);
  g2z_status status = g2z__shard_check(services, shard);
  if (status == G2Z_OK) {
    shard->mask = g2z__open_file(mask.text, O_RDONLY | O_NONBLOCK);
    if (shard->mask >= 0) status = g2z__mask_check(services, shard);
    else if (errno != ENOENT) status = g2z_fail_file(services, errno, "read the mask", mask.text);
  }
  if (status != G2Z_OK) g2z__shard_close(shard);
  return status;
}

/* Reads bits first to first + T of a shard's mask. Bit `first` is bit first % 8 of bits[0]. */
G2Z__PRIVATE g2z_status g2z__mask_bits(g2z_services *services, const g2z__shard *shard,
                                       int64_t first, int64_t T, unsigned char *bits) {
  const size_t bytes = (size_t)(first % 8 + T) / 8 + 1;
  memset(bits, 0xff, bytes);
  if (shard->mask < 0) return G2Z_OK;
  return g2z__read_at(services, shard->mask, g2z__mask_of(shard->path).text, bits, bytes,
                      sizeof(g2z__mask) + (uint64_t)first / 8);
}

G2Z_API g2z_status g2z_shard_mask(g2z_services *services, const char *path, int32_t *ids,
                                  size_t count) {
  unsigned char bits[4096];
  g2z__shard shard;
  int there;
  memset(&shard, 0, sizeof shard);
  shard.path = path;
  G2Z_TRY(g2z_is_there(services, g2z__mask_of(path).text, &there));
  if (!there) return G2Z_OK;
  G2Z_TRY(g2z__shard_open(services, &shard));
  g2z_status status = G2Z_OK;
  if ((uint64_t)shard.tokens != count)
    status = g2z_fail(services, G2Z_FORMAT, "%s had %zu tokens when it was read and has %" PRId64
                      " now: do not write shards while they are read", path, count, shard.tokens);
  for (size_t at = 0, n; at < count && status == G2Z_OK; at += n) {
    n = G2Z__MIN(count - at, 8 * sizeof bits);
    status = g2z__mask_bits(services, &shard, (int64_t)at, (int64_t)n - 1, bits);
    for (size_t i = 0; i < n && status == G2Z_OK; i++)
      if (!(bits[i / 8] >> i % 8 & 1)) ids[at + i] |= G2Z_UNCOUNTED;
  }
  g2z__shard_close(&shard);
  return status;
}

/* ----- order ----- */

/* The order of an epoch, a pure function: which of `count` sequences stands at `position`.
 * A Feistel network over pairs of digits below `side`, the smallest number whose square holds
 * count, walked until it lands below count: both are permutations, so the result is one, without
 * memory, and a second walk is rare. Luby and Rackoff 1988, "How to construct pseudorandom
 * permutations"; digits and walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
 * domains". Four rounds would do for large domains; eight mix a handful of sequences as well. */
G2Z__PRIVATE int64_t g2z__shuffle(uint64_t seed, int64_t epoch, int64_t count, int64_t position) {
  G2Z_ASSERT(position >= 0 && position < count);
  uint64_t side = (uint64_t)sqrt((double)count), at = (uint64_t)position;
  while (side * side < (uint64_t)count) side++;
  do {
    uint64_t left = at / side, right = at % side;
    for (uint32_t round = 0; round < 8; round++) {
      uint32_t counter[4], random[4];
      counter[0] = (uint32_t)right; /* below 2^32, since count is below 2^63 */
      counter[1] = round;
      counter[2] = (uint32_t)epoch;
      counter[3] = (uint32_t)((uint64_t)epoch >> 32);
      g2z_philox(seed, G2Z_RANDOM_SHUFFLE, counter, random);
      uint64_t next = (left + (random[0] * side >> 32)) % side;
      left = right;
      right = next;
    }
    at = left * side + right;
  } while (at >= (uint64_t)count);
  return (int64_t)at;
}

/* ----- the loader: a double buffer, which a thread fills ----- */

#define G2Z__LOADER_FILES 128    /* shards kept open, with masks; the usual limit is 1024 files */
#define G2Z__LOADER_SAMPLES 1024 /* of all shards; each may need a round trip to a server */

typedef struct g2z__prefetch {
  g2z_services *caller;
  g2z_services services;         /* a copy: the thread has its own error text */
  glob_t found;                  /* owns the paths */
  g2z__shard *shards;
  size_t shard_count;
  char *globs;                   /* the text of the sets */
  g2z__shard *open[G2Z__LOADER_FILES]; /* shard s may be open in slot s % G2Z__LOADER_FILES */
  uint16_t *raw;                 /* T+1 tokens as in the file */
  unsigned char *bits;           /* the mask's bytes for these tokens; after them in raw's memory */
  int32_t *buffer[2];            /* [2, rows, T]: x, then y */
  int fill;                      /* the thread's buffer; the caller has the other one */
  g2z_status status;             /* of the last read */
  pthread_t thread;
  int running;                   /* 1: the thread reads step loader->position */
} g2z__prefetch;

/* Zeros if no file is open. */
G2Z__PRIVATE g2z__version g2z__version_of(int file) {
  g2z__version version = {0, 0};
  struct stat info;
  if (file < 0 || fstat(file, &info) != 0) return version;
  version.inode = (uint64_t)info.st_ino;
  version.changed = (int64_t)info.st_ctim.tv_sec * 1000000000 + info.st_ctim.tv_nsec;
  return version;
}

/* Hashes the data of an open shard: its ends, and samples of its tokens and mask bits. Returns 0 if
 * it cannot be read, with errno. */
G2Z__PRIVATE int g2z__shard_samples(const g2z__shard *shard, int64_t samples, uint64_t *hash) {
  unsigned char sample[2][128];
  *hash = G2Z__HASH;
  int good = g2z__shard_hash(shard->file, shard->begin, shard->tokens, hash);
  for (int64_t i = 0; i < samples && i < shard->tokens && good; i++) {
    const uint64_t at = (uint64_t)g2z__shuffle(0, 0, shard->tokens, i);
    memset(sample, 0, sizeof sample);
    good = g2z__pread(shard->file, sample[0], sizeof sample[0], shard->begin + 2 * at) >= 0;
    if (good && shard->mask >= 0)
      good = g2z__pread(shard->mask, sample[1], sizeof sample[1], sizeof(g2z__mask) + at / 8) >= 0;
    *hash = g2z__hash(*hash, sample, sizeof sample);
  }
  return good;
}

/* Opens shard s unless it is open. Fails if its data changed since it was first opened. */
G2Z__PRIVATE g2z_status g2z__loader_file(g2z_loader *loader, size_t s) {
  g2z__prefetch *reader = loader->reader;
  g2z_services *services = &reader->services;
  g2z__shard *shard = &reader->shards[s], **place = &reader->open[s % G2Z__LOADER_FILES];
  g2z__shard found = *shard;
  const int first = shard->bytes == 0, open = *place == shard;
  if (!open) {
    if (*place) g2z__shard_close(*place);
    *place = NULL;
    G2Z_TRY(g2z__shard_open(services, &found));
    if (!first && (shard->mask < 0) != (found.mask < 0)) {
      g2z__shard_close(&found);
      return g2z_fail(services, G2Z_FORMAT, "the mask of %s was added or removed during the run: "
                      "do not write shards while they are read", shard->path);
    }
    *shard = found;
    *place = shard;
  }
  /* The version is read before the hash, so that the next call sees a change in between. */
  const g2z__version version[2] = {g2z__version_of(shard->file), g2z__version_of(shard->mask)};
  if (!first && memcmp(version, shard->version, sizeof version) == 0) return G2Z_OK;
  if (open) G2Z_TRY(g2z__shard_check(services, &found));
  if (open && found.mask >= 0) G2Z_TRY(g2z__mask_check(services, &found));
  uint64_t hash;
  if (!g2z__shard_samples(shard, 1 + G2Z__LOADER_SAMPLES / (int64_t)reader->shard_count, &hash))
    return g2z_fail_file(services, errno, "read the shard", shard->path);
  if (!first && hash != shard->hash)
    return g2z_fail(services, G2Z_FORMAT, "%s or its mask was replaced during the run, and the "
                    "tokens are others than before. Put the old file back, then resume; or start "
                    "a new run. Do not write shards while they are read", shard->path);
  shard->hash = hash;
  memcpy(shard->version, version, sizeof version);
  return G2Z_OK;
}

/* How many of the first `count` positions a set takes: floor(count * part / 2^32). The product is
 * computed in two halves, because count may have 63 bits and part 33. */
G2Z__PRIVATE uint64_t g2z__set_takes(uint64_t count, uint64_t part) {
  return (count >> 32) * part + ((count & UINT32_MAX) * part >> 32);
}

/* The sequence at a position of a mixture: its set, and *number, counted within the set. Set k
 * takes the fraction `part` of the positions that sets 0 to k-1 leave, evenly spaced; random draws
 * would miss the weights by more. Positions are permuted within blocks of 128. Without that, sets
 * and ranks could alternate in the same rhythm, so that a rank reads only some of the sets. */
G2Z__PRIVATE int g2z__set_at(const g2z_loader *loader, int64_t position, int64_t *number) {
  const int64_t block = position / 128;
  uint64_t at = (uint64_t)(block * 128 +
                           g2z__shuffle(loader->config.seed, block, 128, position % 128));
  for (int k = 0;; k++) {
    const uint64_t taken = g2z__set_takes(at, loader->set[k].part);
    *number = (int64_t)taken;
    if (g2z__set_takes(at + 1, loader->set[k].part) > taken) return k;
    at -= taken;
  }
}

G2Z_API void g2z_loader_count(const g2z_loader *loader, int64_t counts[G2Z_SETS]) {
  const int64_t positions = loader->position.step * loader->global, whole = positions / 128 * 128;
  uint64_t left = (uint64_t)whole;
  for (int k = 0; k < loader->sets; k++) {
    const uint64_t taken = g2z__set_takes(left, loader->set[k].part);
    counts[k] = (int64_t)taken;
    left -= taken;
  }
  for (int64_t at = whole, number; at < positions; at++) counts[g2z__set_at(loader, at, &number)]++;
}

/* Reads step loader->position into the thread's buffer, and pads short sequences (room d07). */
G2Z__PRIVATE g2z_status g2z__loader_read(g2z_loader *loader) {
  const g2z_loader_config *config = &loader->config;
  g2z__prefetch *reader = loader->reader;
  g2z_services *services = &reader->services;
  const size_t size = (size_t)loader->rows * (size_t)config->seq * sizeof(int32_t);
  int32_t *x = reader->buffer[reader->fill], *y = x + loader->rows * config->seq;
  uint16_t *raw = reader->raw;
  memset(x, 0, size);
  memset(y, 0xff, size);
  for (int64_t row = 0; row < loader->rows; row++, x += config->seq, y += config->seq) {
    int64_t index = loader->position.step * loader->global + row * config->world + config->rank;
    if (loader->mixed) {
      int64_t number;
      const int k = g2z__set_at(loader, index, &number);
      const int64_t count = loader->set[k].sequences;
      index = loader->set[k].first + g2z__shuffle(config->seed ^ (uint64_t)k, number / count, count,
                                                  number % count);
    } else if (config->order == G2Z_ORDER_SHUFFLED)
      index = g2z__shuffle(config->seed, loader->position.epoch, loader->sequences, index);
    if (index >= loader->sequences) continue;
    size_t low = 0, high = reader->shard_count; /* find the last shard with first <= index */
    while (high - low > 1) {
      const size_t middle = low + (high - low) / 2;
      if (reader->shards[middle].first <= index) low = middle;
      else high = middle;
    }
    G2Z_TRY(g2z__loader_file(loader, low));
    const g2z__shard *shard = &reader->shards[low];
    const int64_t first = (index - shard->first) * config->seq, rest = shard->tokens - 1 - first;
    const int64_t T = G2Z__MIN(rest, config->seq);
    G2Z_TRY(g2z__read_at(services, shard->file, shard->path, raw, (size_t)(T + 1) * 2,
                         shard->begin + 2 * (uint64_t)first));
    G2Z_TRY(g2z__mask_bits(services, shard, first, T, reader->bits));
    for (int64_t t = 0; t <= T; t++) {
      if (raw[t] >= config->vocab)
        return g2z_fail(services, G2Z_FORMAT, "%s: token %d at index %" PRId64 " is outside the "
                        "vocabulary of %d: prepare the text with the model's vocabulary, or check "
                        "that it is the right file", shard->path, raw[t], first + t, config->vocab);
      const int counts = reader->bits[(first % 8 + t) / 8] >> (first + t) % 8 & 1;
      if (t < T) x[t] = raw[t];
      if (t > 0 && counts) y[t - 1] = raw[t]; /* the other targets stay -1 */
    }
  }
  return G2Z_OK;
}

G2Z__PRIVATE void *g2z__loader_thread(void *user) {
  g2z_loader *loader = (g2z_loader *)user;
  loader->reader->status = g2z__loader_read(loader);
  return NULL;
}

/* Reads the next step in a thread. If no thread can be started, reads it at once. */
G2Z__PRIVATE void g2z__loader_start(g2z_loader *loader) {
  g2z__prefetch *reader = loader->reader;
  reader->running = g2z__thread_start(&reader->thread, g2z__loader_thread, loader) == 0;
  if (!reader->running) g2z__loader_thread(loader);
}

G2Z__PRIVATE void g2z__loader_join(g2z__prefetch *reader) {
  if (reader->running) pthread_join(reader->thread, NULL);
  reader->running = 0;
}

G2Z__PRIVATE int g2z__loader_by_name(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Appends shards in the order of their bytes: glob's own order depends on the locale. The caller
 * passes `found` zeroed before the first call, and frees it with globfree. */
G2Z__PRIVATE g2z_status g2z__shards_find(g2z_services *services, const char *given, glob_t *found) {
  struct stat info;
  int is_name = stat(given, &info) == 0; /* of a file, as "data[1].bin" may be: not a pattern */
  if (!is_name && errno != ENOENT && errno != ENOTDIR) /* glob would call it missing */
    return g2z_fail_file(services, errno, "read", given);
  char *pattern;
  G2Z_TRY(G2Z_NEW(services, 2 * strlen(given) + 1, &pattern));
  char *end = pattern;
  for (const char *at = given; *at; *end++ = *at++)
    if (is_name && *at != '/') *end++ = '\\';
  const size_t before = found->gl_pathc;
  int flags = GLOB_ERR | GLOB_NOSORT;
  if (before) flags |= GLOB_APPEND;
  const int error = glob(pattern, flags, NULL, found);
  int number = errno;
  if (error == GLOB_NOSPACE) number = ENOMEM;
  g2z_release(services, pattern);
  if (error == GLOB_NOMATCH)
    return g2z_fail(services, G2Z_IO, "no file has the name or pattern \"%s\": check the path, "
                    "and quote a pattern in the shell", given);
  if (error) return g2z_fail_file(services, number, "list the files of", given);
  qsort(found->gl_pathv + before, found->gl_pathc - before, sizeof(char *), g2z__loader_by_name);
  return G2Z_OK;
}

/* Reads the sets of a loader's glob. The strings of `set` lie in *text, which the caller releases.
 * If there is a file of the name PATTERN:WEIGHT, this names the file: there is no weight. */
G2Z__PRIVATE g2z_status g2z__sets_read(g2z_services *services, const char *given, char **text,
                                       g2z_loader_set set[G2Z_SETS], int *sets) {
  struct stat info;
  char *stop;
  int weights = 0;
  double sum = 0, rest = 0;
  *sets = 0;
  G2Z_TRY(G2Z_NEW(services, strlen(given) + 1, text));
  strcpy(*text, given);
  const int is_name = stat(given, &info) == 0;
  for (char *at = *text, *end; at; at = end) {
    if (*sets == G2Z_SETS)
      G2Z_REFUSE(services, "at most %d sets of shards can be mixed: put the files of some into one "
                 "directory and give it one pattern and one weight", G2Z_SETS);
    end = is_name ? NULL : strchr(at, '\n');
    if (end) *end++ = 0;
    g2z_loader_set *one = &set[(*sets)++];
    memset(one, 0, sizeof *one);
    one->glob = at;
    one->weight = "";
    one->share = NAN;
    char *colon = strrchr(at, ':');
    if (!colon || !colon[1] || colon[1 + strspn(colon + 1, "+-.,%0123456789eE")] ||
        stat(at, &info) == 0)
      continue;
    one->share = strtod(colon + 1, &stop);
    if (*stop || !(one->share >= 0 && one->share <= 1e9))
      G2Z_REFUSE(services, "the weight in \"%s\" must be a number from 0 to 1e9: type --train "
                 "'%.*s:0.5'", at, (int)(colon - at), at);
    *colon = 0;
    one->weight = colon + 1;
    weights++;
    sum += one->share;
  }
  for (int k = 0; k < *sets && *sets > 1; k++)
    if (!set[k].weight[0])
      G2Z_REFUSE(services, "the set \"%s\" has no weight, but with %d sets each needs one: type "
                 "--train '%s:0.5', and the same for the others; or put all files into one "
                 "directory and type --train 'DIR/NAME_*.bin'", set[k].glob, *sets, set[k].glob);
  if (weights && sum == 0)
    G2Z_REFUSE(services, "the weights are all 0, so no set has data: type --train '%s:1'",
               set[0].glob);
  for (int k = *sets - 1; weights && k >= 0; k--) {
    rest += set[k].share;
    if (rest > 0) set[k].part = (uint64_t)(set[k].share / rest * 4294967296.0 + 0.5);
    set[k].share /= sum;
  }
  return G2Z_OK;
}

G2Z_API g2z_status g2z_shards_apart(g2z_services *services, const char *train, const char *val) {
  glob_t found[2];
  struct stat *others = NULL, one;
  const char *shared = NULL;
  char *text = NULL;
  g2z_loader_set set[G2Z_SETS], *owner = set;
  size_t ends[G2Z_SETS];
  int sets;
  memset(found, 0, sizeof found);
  g2z_status status = g2z__sets_read(services, train, &text, set, &sets);
  for (int k = 0; k < sets && status == G2Z_OK; k++) {
    status = g2z__shards_find(services, set[k].glob, &found[0]);
    ends[k] = found[0].gl_pathc;
    if (status == G2Z_IO) status = G2Z_OK;
  }
  if (status == G2Z_OK) status = g2z__shards_find(services, val, &found[1]);
  if (status == G2Z_IO) status = G2Z_OK;
  if (status == G2Z_OK) status = G2Z_NEW(services, found[1].gl_pathc, &others);
  /* Finds a file that is in both lists, even under two names. A missing file keeps zeros. */
  for (size_t k = 0; others && k < found[1].gl_pathc; k++) stat(found[1].gl_pathv[k], &others[k]);
  for (size_t i = 0; others && !shared && i < found[0].gl_pathc; i++) {
    while (i == ends[owner - set]) owner++;
    if (stat(found[0].gl_pathv[i], &one) != 0) continue;
    for (size_t k = 0; k < found[1].gl_pathc; k++)
      if (one.st_ino == others[k].st_ino && one.st_dev == others[k].st_dev)
        shared = found[0].gl_pathv[i];
  }
  if (shared)
    status = g2z_fail(services, G2Z_BAD_ARGUMENT, "%s is both a training and a validation shard: "
                      "\"%s\" and \"%s\" match it; narrow one of them, for example to "
                      "*_train_*.bin or *_val_*.bin", shared, owner->glob, val);
  g2z_release(services, others);
  g2z_release(services, text);
  globfree(&found[0]);
  globfree(&found[1]);
  return status;
}

/* Sets *counts to 1 if the mask of an open shard counts one of tokens 1 to `targets`. */
G2Z__PRIVATE g2z_status g2z__mask_counts(g2z_services *services, const g2z__shard *shard,
                                         int64_t targets, int *counts) {
  unsigned char bits[4096];
  const int64_t most = 8 * (int64_t)sizeof bits;
  if (targets == 0) return G2Z_OK;
  for (int64_t at = 0, n; at <= targets && !*counts; at += n) {
    n = G2Z__MIN(targets + 1 - at, most);
    G2Z_TRY(g2z__mask_bits(services, shard, at, n - 1, bits));
    for (int64_t i = at == 0; i < n; i++) *counts |= bits[i / 8] >> i % 8 & 1;
  }
  return G2Z_OK;
}

/* Opens shard s, and adds its tokens and sequences to `set` and to the loader. *counts becomes 1 if
 * some token of the shard is a target that counts. */
G2Z__PRIVATE g2z_status g2z__loader_add(g2z_loader *loader, size_t s, g2z_loader_set *set,
                                        int *counts) {
  const int64_t seq = loader->config.seq;
  g2z_services *services = &loader->reader->services;
  g2z__shard *shard = &loader->reader->shards[s];
  shard->path = loader->reader->found.gl_pathv[s];
  G2Z_TRY(g2z__loader_file(loader, s));
  if (shard->vocab_hash && !loader->vocab_hash) {
    loader->vocab_hash = shard->vocab_hash;
    loader->vocab_shard = shard->path;
  }
  if (shard->vocab_hash && shard->vocab_hash != loader->vocab_hash)
    return g2z_fail(services, G2Z_FORMAT, "%s and %s were made with different vocabularies: "
                    "narrow the pattern, or prepare their texts again with one --vocab",
                    loader->vocab_shard, shard->path);
  loader->data = g2z__hash(loader->data, &shard->hash, sizeof shard->hash);

  /* Tokens 1 to `targets` are targets. In file order these are all tokens after the first. */
  int64_t targets = G2Z__MAX(shard->tokens, 1) - 1;
  if (loader->config.order != G2Z_ORDER_FILE) targets -= targets % seq;
  shard->first = loader->sequences;
  loader->tokens += shard->tokens;
  loader->sequences += (targets + seq - 1) / seq;
  set->tokens += shard->tokens;
  set->sequences = loader->sequences - set->first;
  return g2z__mask_counts(services, shard, targets, counts);
}

/* Refuses data in which no token counts, or which has no sequence for a set or for a step. */
G2Z__PRIVATE g2z_status g2z__loader_check(const g2z_loader *loader, int counts) {
  const g2z_loader_config *config = &loader->config;
  const g2z__prefetch *reader = loader->reader;
  g2z_services *services = &loader->reader->services;
  const char *path = reader->shards[0].path, *more = reader->shard_count > 1 ? " and others" : "";
  for (int k = 0; k < loader->sets; k++) {
    const g2z_loader_set *set = &loader->set[k];
    if (loader->mixed && set->part && !set->sequences)
      G2Z_REFUSE(services, "the set \"%s\" of weight %s has no shard of %d tokens, which one "
                 "sequence needs: use more data, or lower seq", set->glob, set->weight,
                 config->seq + 1);
  }
  if (loader->steps_per_epoch == 0 && config->order == G2Z_ORDER_FILE)
    G2Z_REFUSE(services, "%s%s: no shard has two tokens, so there is none to predict: use more "
               "data", path, more);
  if (loader->steps_per_epoch == 0)
    G2Z_REFUSE(services, "%s%s: %" PRId64 " token%s in %zu shard%s hold %" PRId64 " sequence%s "
               "of %d+1, but a step of batch %d x accum %d x world %d needs %" PRId64 ", so at "
               "least %.0f tokens in shards of at least %d: use more data, or lower batch, accum "
               "or seq", path, more, loader->tokens, G2Z_PLURAL(loader->tokens),
               reader->shard_count, G2Z_PLURAL(reader->shard_count), loader->sequences,
               G2Z_PLURAL(loader->sequences), config->seq, config->batch, config->accum,
               config->world, loader->global, (double)loader->global * config->seq + 1,
               config->seq + 1);
  if (!counts)
    G2Z_REFUSE(services, "%s%s: no token counts, because the masks exclude all of them: prepare "
               "the text again, with completions that are not empty", path, more);
  return G2Z_OK;
}

/* Opens and counts every shard once, so that a damaged one is found before training starts. */
G2Z__PRIVATE g2z_status g2z__loader_build(g2z_loader *loader, const char *pattern) {
  g2z__prefetch *reader = loader->reader;
  g2z_services *services = &reader->services;
  g2z_loader_set *set = loader->set;
  const size_t T = (size_t)loader->config.seq;
  const int in_file_order = loader->config.order == G2Z_ORDER_FILE;
  int counts = 0;        /* 1: some token counts as a target */
  size_t ends[G2Z_SETS]; /* of the sets in the list of files */

  /* The files of the sets. */
  G2Z_TRY(g2z__sets_read(services, pattern, &reader->globs, set, &loader->sets));
  loader->mixed = set[0].weight[0] != 0;
  if (loader->mixed && in_file_order)
    G2Z_REFUSE(services, "%s has a weight, but only training shards can have one: type --val '%s'",
               pattern, set[0].glob);
  for (int k = 0; k < loader->sets; k++) {
    G2Z_TRY(g2z__shards_find(services, set[k].glob, &reader->found));
    ends[k] = reader->found.gl_pathc;
  }
  reader->shard_count = reader->found.gl_pathc;
  G2Z_TRY(G2Z_NEW(services, reader->shard_count, &reader->shards));

  /* Their tokens. */
  loader->data = G2Z__HASH;
  int k = 0;
  for (size_t s = 0; s < reader->shard_count; s++) {
    if (s == ends[k]) set[++k].first = loader->sequences;
    G2Z_TRY(g2z__loader_add(loader, s, &set[k], &counts));
  }
  if (loader->mixed) {
    for (k = 0; k < loader->sets; k++) {
      loader->data = g2z__hash(loader->data, &set[k].part, sizeof set[k].part);
      loader->data = g2z__hash(loader->data, &set[k].sequences, sizeof set[k].sequences);
    }
    loader->steps_per_epoch = (INT64_C(1) << 60) / loader->global; /* a mixture has no end */
  } else if (in_file_order) { /* the last step may have fewer sequences */
    loader->steps_per_epoch = (loader->sequences + loader->global - 1) / loader->global;
  } else {
    loader->steps_per_epoch = loader->sequences / loader->global;
  }
  G2Z_TRY(g2z__loader_check(loader, counts));

  /* Room for two steps, and for one sequence with its mask. */
  for (int i = 0; i < 2; i++)
    G2Z_TRY(G2Z_NEW(services, 2 * T * (size_t)loader->rows, &reader->buffer[i]));
  G2Z_TRY(G2Z_NEW(services, T + 1 + T / 16 + 2, &reader->raw));
  reader->bits = (unsigned char *)(reader->raw + T + 1);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_loader_create(g2z_services *services, const g2z_loader_config *config,
                                     g2z_loader **out) {
  *out = NULL;
  const int most = 1 << 20; /* at most 2^60 sequences per step */
  G2Z_TRY(g2z_check_range(services, "batch", config->batch, 1, most));
  G2Z_TRY(g2z_check_range(services, "seq", config->seq, 1, most));
  G2Z_TRY(g2z_check_range(services, "accum", config->accum, 1, most));
  G2Z_TRY(g2z_check_range(services, "world", config->world, 1, most));
  G2Z_TRY(g2z_check_range(services, "rank", config->rank, 0, config->world - 1));
  G2Z_TRY(g2z_check_range(services, "vocab", config->vocab, 1, INT32_MAX));
  if (!config->glob || !config->glob[0])
    G2Z_REFUSE(services, "no token shards were named: give a file or a pattern such as "
               "\"data/train_*.bin\"");
  g2z_loader *loader;
  G2Z_TRY(g2z_allocate(services, 1, sizeof *loader + sizeof(g2z__prefetch), &loader));
  loader->reader = (g2z__prefetch *)(loader + 1);
  loader->reader->caller = services;
  loader->reader->services = *services;
  loader->config = *config;
  loader->config.glob = NULL;
  loader->rows = (int64_t)config->batch * config->accum;
  loader->global = loader->rows * config->world;
  g2z_status status = g2z__loader_build(loader, config->glob);
  if (status != G2Z_OK) {
    g2z_fail(services, status, "%s", loader->reader->services.error);
    g2z_loader_free(loader);
    return status;
  }
  g2z__loader_start(loader);
  *out = loader;
  return G2Z_OK;
}

G2Z_API void g2z_loader_free(g2z_loader *loader) {
  if (!loader) return;
  g2z__prefetch *reader = loader->reader;
  g2z__loader_join(reader);
  for (int i = 0; i < G2Z__LOADER_FILES; i++)
    if (reader->open[i]) g2z__shard_close(reader->open[i]);
  for (int i = 0; i < 2; i++) g2z_release(reader->caller, reader->buffer[i]);
  g2z_release(reader->caller, reader->raw);
  g2z_release(reader->caller, reader->shards);
  g2z_release(reader->caller, reader->globs);
  globfree(&reader->found);
  g2z_release(reader->caller, loader);
}

/* After a failed read, returns that failure until a seek. */
G2Z_API g2z_status g2z_loader_next(g2z_loader *loader, const int32_t **x, const int32_t **y) {
  g2z__prefetch *reader = loader->reader;
  *x = *y = NULL;
  g2z__loader_join(reader);
  if (reader->status != G2Z_OK)
    return g2z_fail(reader->caller, reader->status, "%s", reader->services.error);
  *x = reader->buffer[reader->fill];
  *y = *x + loader->rows * loader->config.seq;
  reader->fill = !reader->fill;
  if (++loader->position.step == loader->steps_per_epoch) {
    loader->position.step = 0;
    loader->position.epoch++;
  }
  g2z__loader_start(loader);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_loader_seek(g2z_loader *loader, g2z_loader_position position) {
  if (position.epoch < 0 || position.epoch > INT64_MAX / 2 || position.step < 0 ||
      position.step >= loader->steps_per_epoch)
    G2Z_REFUSE(loader->reader->caller, "no step %" PRId64 " of epoch %" PRId64 " in this data, "
               "with %" PRId64 " in an epoch: resume with the same data and global batch",
               position.step, position.epoch, loader->steps_per_epoch);
  g2z__loader_join(loader->reader);
  loader->position = position;
  g2z__loader_start(loader);
  return G2Z_OK;
}

/* ===== >>i08 op table ====================================================
 * In: a kind of device and its number types. Out: a g2z_device with the table of ops. Law:
 * arithmetic that must be equal in every backend is here, once, and runs on host and device:
 * rounding to a type, dropout, the verdict that ends a step, AdamW, Muon. */

#if defined(G2Z__OPTIMIZES)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif

/* ----- rounding --------------------------------------------------------- */

static inline G2Z_HOST_DEVICE uint32_t g2z__bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline G2Z_HOST_DEVICE float g2z__from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The nearest fp16, ties to even. It has no branches, so that loops over it vectorise: it computes
 * all cases and selects one by signed comparisons, which SSE2 has. */
static inline G2Z_HOST_DEVICE float g2z__round_fp16(float x) {
  uint32_t bits = g2z__bits_of(x), magnitude = bits & 0x7fffffffu;
  /* fp16 keeps 10 of the 23 fraction bits. A carry makes the next power of two. */
  uint32_t rounded = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
  rounded = (int32_t)rounded >= 0x47800000 ? 0x7f800000u : rounded; /* 65536 and above: infinity */
  /* Below 2^-14 fp16 has steps of 2^-24, the spacing of fp32 in [0.5, 1). */
  uint32_t subnormal = g2z__bits_of((g2z__from_bits(magnitude) + 0.5f) - 0.5f);
  rounded = (int32_t)magnitude < 0x38800000 ? subnormal : rounded;
  rounded = (int32_t)magnitude > 0x7f800000 ? 0x7fc00000u : rounded; /* NaN */
  return g2z__from_bits(rounded | (bits & 0x80000000u));
}

/* The nearest bf16, ties to even: the upper half of an fp32. */
static inline G2Z_HOST_DEVICE float g2z__round_bf16(float x) {
  uint32_t bits = g2z__bits_of(x);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  /* The carry of a NaN would run through its exponent and leave a zero. */
  rounded = (bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x400000u) & 0xffff0000u : rounded;
  return g2z__from_bits(rounded);
}

/* The nearest number with `dropped` fewer fraction bits than fp32, ties to even. Numbers above
 * `most` become `most`. Numbers of the format that are below `least` are equally far apart, as far
 * as fp32 numbers near `steps`. `most` and `least` are the bits of fp32 numbers. */
static inline G2Z_HOST_DEVICE float g2z__round_8(float x, int dropped, int32_t most, int32_t least,
                                                 float steps) {
  uint32_t bits = g2z__bits_of(x), magnitude = bits & 0x7fffffffu, ulp = 1u << dropped;
  uint32_t rounded = (magnitude + ulp / 2 - 1 + ((magnitude >> dropped) & 1u)) & ~(ulp - 1);
  uint32_t subnormal = g2z__bits_of((g2z__from_bits(magnitude) + steps) - steps);
  rounded = (int32_t)rounded > most ? (uint32_t)most : rounded;
  rounded = (int32_t)magnitude < least ? subnormal : rounded;
  rounded = (int32_t)magnitude > 0x7f800000 ? 0x7fc00000u : rounded; /* NaN */
  return g2z__from_bits(rounded | (bits & 0x80000000u));
}
/* e4m3: a sign, 4 bits of exponent, 3 of fraction. From 2^-6 to 448; below, steps of 2^-9. */
static inline G2Z_HOST_DEVICE float g2z__round_e4m3(float x) {
  return g2z__round_8(x, 20, 0x43e00000, 0x3c800000, 0x1p14f);
}
/* e5m2 is the upper byte of fp16. From 2^-14 to 57344; below, steps of 2^-16. */
static inline G2Z_HOST_DEVICE float g2z__round_e5m2(float x) {
  return g2z__round_8(x, 21, 0x47600000, 0x38800000, 0x1p7f);
}

/* The factor by which numbers up to `largest` are multiplied before they are rounded to e4m3: the
 * largest power of two that keeps them in range. A power of two and its inverse lose no digits.
 * Infinity or NaN gives NaN, so that every product becomes NaN. */
static inline G2Z_HOST_DEVICE float g2z__e4m3_scale(float largest) {
  uint32_t bits = g2z__bits_of(largest), exponent = bits >> 23;
  uint32_t scale = 262 - exponent - ((bits & 0x7fffffu) > 0x600000u); /* 448 = 1.75 * 2^8 */
  if (exponent == 255) return NAN;
  return g2z__from_bits(G2Z__MIN(scale, 253) << 23); /* finite for 0, too */
}

/* Factors of activations and weights before they are rounded to e4m3. Outputs of LayerNorm,
 * attention and GELU keep full precision from 2^-8 to 112, weights from 2^-11 to 14. */
#define G2Z__E4M3_X 4.0f
#define G2Z__E4M3_W 32.0f

/* A row's gradient of logits adds up to 0. If its numbers in e5m2 do not, all logits drift
 * together. Rounding multiplies numbers by this factor on average if their positions between powers
 * of 2 are random. The factor 2^g2z__head_part(row) makes the positions random. */
#define G2Z__E5M2_SHRINKS 0.99724f
static inline G2Z_HOST_DEVICE float g2z__head_part(int row) {
  return (float)((uint32_t)row * 2654435769u >> 8) * 0x1p-24f;
}

/* x rounded to the type, ties to even. TF32 is stored as fp32; tensor cores cut it. */
G2Z__PRIVATE float g2z__round(g2z_dtype dtype, float x) {
  if (dtype == G2Z_FP16) return g2z__round_fp16(x);
  if (dtype == G2Z_BF16) return g2z__round_bf16(x);
  return x;
}

/* The value of an FP16 or BF16 number. */
G2Z__PRIVATE float g2z__widen(g2z_dtype dtype, uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  if (dtype == G2Z_FP16) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest < 0x400u) { /* zero or subnormal: a multiple of 2^-24 */
      const float value = (float)rest * 5.9604644775390625e-8f;
      return sign ? -value : value;
    }
    /* fp32 has another bias of the exponent. Infinity and NaN have the largest exponent in both. */
    const uint32_t bias = rest >= 0x7c00u ? 0x70000000u : 0x38000000u;
    bits = sign | ((rest << 13) + bias);
  }
  return g2z__from_bits(bits);
}

/* ----- operands ---------------------------------------------------------
 * No compiler sees that a call has left out a member. So each op of each backend first asserts that
 * the sizes and pointers which it needs are there. */

static inline int g2z__embed_fwd_whole(const g2z_embed_fwd *op) {
  return op->out && op->tokens && op->wte && op->wpe && op->B > 0 && op->T > 0 && op->C > 0;
}
static inline int g2z__embed_bwd_whole(const g2z_embed_bwd *op) {
  return op->dwpe && op->dout && op->tokens && op->B > 0 && op->T > 0 && op->C > 0;
}
static inline int g2z__embed_add_whole(const g2z_embed_add *op) {
  return op->grads && (op->parts || op->count == 0) && op->rows && op->order && op->N > 0 &&
         op->C > 0;
}
static inline int g2z__embed_next_whole(const g2z_embed_next *op) {
  return op->out && op->tokens && op->positions && op->wte && op->wpe && op->B > 0 && op->C > 0;
}
static inline int g2z__layernorm_fwd_whole(const g2z_layernorm_fwd *op) {
  return op->y && op->mean && op->rstd && op->x && op->w && op->b && op->N > 0 && op->C > 0;
}
static inline int g2z__layernorm_bwd_whole(const g2z_layernorm_bwd *op) {
  return op->dres && op->dw && op->db && op->dy && op->x && op->w && op->mean && op->rstd &&
         op->N > 0 && op->C > 0;
}
static inline int g2z__linear_fwd_whole(const g2z_linear_fwd *op) {
  return op->y && op->x && op->w && op->bias && op->N > 0 && op->K > 0 && op->O > 0;
}
static inline int g2z__linear_bwd_data_whole(const g2z_linear_bwd_data *op) {
  return op->dx && (op->dbias || !op->slope) && op->dy && op->w && op->N > 0 && op->K > 0 &&
         op->O > 0;
}
static inline int g2z__linear_bwd_weight_whole(const g2z_linear_bwd_weight *op) {
  return op->dw && op->x && op->dy && op->N > 0 && op->K > 0 && op->O > 0;
}
static inline int g2z__attention_fwd_whole(const g2z_attention_fwd *op) {
  return op->out && op->lse && op->qkv && op->B > 0 && op->T > 0 && op->C > 0 && op->NH > 0;
}
static inline int g2z__attention_bwd_whole(const g2z_attention_bwd *op) {
  return op->dqkv && op->dbias && op->dout && op->out && op->lse && op->qkv && op->B > 0 &&
         op->T > 0 && op->C > 0 && op->NH > 0;
}
static inline int g2z__attention_next_whole(const g2z_attention_next *op) {
  return op->out && op->past && op->rows && op->positions && op->B > 0 && op->T > 0 && op->C > 0 &&
         op->NH > 0;
}
static inline int g2z__head_loss_whole(const g2z_head_loss *op) {
  const int gradients = op->dwte && op->state;
  return op->losses && op->loss_sum && (gradients || !op->dh) && op->logits && op->h && op->wte &&
         op->targets && op->N > 0 && op->C > 0 && op->V > 0 && op->Vp > 0 && op->chunk > 0;
}
static inline int g2z__draw_whole(const g2z_draw *op) {
  return op->tokens && op->drawn && op->positions && op->logits && op->sampling && op->B > 0 &&
         op->V > 0 && op->T > 0;
}

/* ----- dropout ---------------------------------------------------------- */

static inline G2Z_HOST_DEVICE int g2z__dropout_on(const g2z_dropout *dropout) {
  return dropout && dropout->probability > 0;
}

/* The factors of elements 4 * group .. 4 * group + 3 of a sequence: 0 or 1 / (1 - probability). */
static inline G2Z_HOST_DEVICE void g2z__dropout_group(const g2z_dropout *dropout,
                                                      uint32_t sequence, uint32_t group,
                                                      float factors[4]) {
  uint32_t counter[4] = {group, sequence, dropout->site, (uint32_t)dropout->state->step};
  uint32_t bits[4];
  g2z_philox(dropout->seed, G2Z_RANDOM_DROPOUT, counter, bits);
  float kept = 1.0f / (1.0f - dropout->probability);
  for (int i = 0; i < 4; i++)
    factors[i] = g2z_uniform(bits[i]) >= dropout->probability ? kept : 0.0f;
}

/* ----- a draw ----------------------------------------------------------- */

/* Maps a logit to a whole number: more likely tokens get higher ones, NaN the lowest. */
static inline G2Z_HOST_DEVICE uint32_t g2z__draw_order(float logit) {
  uint32_t bits = g2z__bits_of(logit);
  if (logit != logit) return 0;
  return bits >> 31 ? ~bits : bits | UINT32_C(0x80000000);
}

/* A token's probability divided by the likeliest token's. */
static inline G2Z_HOST_DEVICE float g2z__draw_weight(float logit, float best, float temperature) {
  float weight = expf((logit - best) / temperature);
  return weight > 0 ? weight : 0; /* a NaN gets 0, too: it is never drawn */
}

static inline G2Z_HOST_DEVICE float g2z__draw_uniform(uint64_t seed, uint32_t index) {
  uint32_t counter[4] = {index, 0, 0, 0}, bits[4];
  g2z_philox(seed, G2Z_RANDOM_SAMPLE, counter, bits);
  return g2z_uniform(bits[0]);
}

/* ----- the end of a step ------------------------------------------------ */

#define G2Z__LOSS_SCALE_MAX 16777216.0f /* 2^24 */

#define G2Z__SPIKE_WINDOW 100 /* applied steps that the average covers */
#define G2Z__SPIKE_FIRST 20   /* norms in the statistics before a spike is possible */
#define G2Z__SPIKES_IN_ROW 20 /* after so many, the statistics start again */

/* Returns 1 if the norm lies more than skip_spikes deviations above the mean of applied steps.
 * Otherwise the step will be applied, and its norm enters mean and deviation. */
static inline G2Z_HOST_DEVICE int g2z__decide_spike(g2z_step_state *state,
                                                    const g2z_optimizer_config *config) {
  if (state->spikes_in_row >= G2Z__SPIKES_IN_ROW) state->normed = 0; /* norms have a new level */
  if (state->normed == 0) state->norm_mean = state->grad_norm;
  const double above = (double)state->grad_norm - (double)state->norm_mean;
  const double deviation = (double)state->norm_deviation;
  if (config->skip_spikes > 0 && state->normed >= G2Z__SPIKE_FIRST &&
      above > config->skip_spikes * deviation) {
    state->spikes++;
    state->spikes_in_row++;
    return 1;
  }
  /* Mean and deviation of the first 100 norms are exact. With one norm the deviation is 0. */
  if (state->normed < G2Z__SPIKE_WINDOW) state->normed++;
  const double count = (double)state->normed;
  state->norm_mean = (float)((double)state->norm_mean + above / count);
  state->norm_deviation =
      (float)sqrt((1.0 - 1.0 / count) * (deviation * deviation + above * above / count));
  state->spikes_in_row = 0;
  return 0;
}

/* Decides from the ranks' rows whether the step is applied or skipped, updates the state (loss,
 * norm, learning rate, loss scale), and reports it. `dynamic`: fp16 with a dynamic loss scale. */
static inline G2Z_HOST_DEVICE void g2z__decide(g2z_step_state *state, const g2z_verdict *verdict,
                                               const g2z_optimizer_config *config, int dynamic,
                                               int64_t tokens) {
  double sum = 0, loss = 0, masked = 0, inputs = 0, weights = 0;
  state->status = G2Z_OK;
  state->stop = 0;
  for (int rank = 0; rank < verdict->world; rank++) {
    const double *row = verdict->rows + (size_t)rank * G2Z_VERDICT_COLUMNS;
    loss += row[G2Z_VERDICT_LOSS];
    masked += row[G2Z_VERDICT_MASKED];
    inputs += row[G2Z_VERDICT_CLAMPED_INPUTS];
    weights = fmax(weights, row[G2Z_VERDICT_CLAMPED_WEIGHTS]);
    if (rank < verdict->owners) sum += row[G2Z_VERDICT_SQUARES];
    if (state->status == G2Z_OK) state->status = (int32_t)row[G2Z_VERDICT_STATUS];
    if (row[G2Z_VERDICT_STOP] > 0) state->stop = 1;
  }
  /* Backward took the mean over all targets; `more` makes it the mean over those that count. */
  double counted = (double)tokens - masked, more = 0;
  state->loss = NAN;
  if (counted > 0) {
    more = (double)tokens / counted;
    state->loss = (float)(loss / counted);
  }
  float norm = (float)(sqrt(sum) / (double)state->loss_scale * more);
  state->counted = (int64_t)counted;
  state->clamped_inputs = (int64_t)inputs;
  state->clamped_weights = (int64_t)weights;
  state->grad_norm = norm;
  state->lr = g2z_schedule_lr(config, state->applied);
  state->used_loss_scale = state->loss_scale;
  state->step++;

  /* If a rank failed or no target counts, the norm is no reason to change the loss scale. */
  const int sound = state->status == G2Z_OK && state->counted > 0;
  const int finite = norm <= 3.40282347e38f; /* neither infinite nor NaN */
  const int can_shrink = dynamic && state->loss_scale > 1.0f;
  state->skip = 0;
  if (!sound || !finite) state->skip = 1;
  else if (g2z__decide_spike(state, config)) state->skip = 2;
  if (state->skip != 1) {
    state->skipped_at_minimum = 0;
  } else if (sound) {
    /* As in DeepSpeed: the hysteresis-th overflow halves the scale. So does each later overflow
     * until a window of good steps has passed, so that a scale that is far too high falls fast. */
    state->good_steps = 0;
    if (!can_shrink) {
      state->skipped_at_minimum++;
    } else {
      state->skipped_at_minimum = 0;
      if (state->hysteresis > 1) state->hysteresis--;
      else state->loss_scale = fmaxf(0.5f * state->loss_scale, 1.0f);
    }
  }
  if (state->skip) {
    state->skipped++;
    state->grad_multiplier = 0;
  } else {
    /* The same as torch.nn.utils.clip_grad_norm_, with its 1e-6. */
    float clip = 1.0f;
    if (config->clip > 0) clip = fminf(config->clip / (norm + 1e-6f), 1.0f);
    state->grad_multiplier = clip / state->loss_scale * (float)more;
    state->applied++;
    if (state->good_steps < INT32_MAX) state->good_steps++;
    if (dynamic && state->good_steps >= config->loss_scale_window) {
      state->good_steps = 0;
      state->hysteresis = config->loss_scale_hysteresis;
      if (state->loss_scale < G2Z__LOSS_SCALE_MAX) state->loss_scale *= 2.0f;
    }
  }
  g2z_step_state *report = state->step % 2 ? verdict->reported[1] : verdict->reported[0];
  if (report) *report = *state;
}

/* What an update multiplies a weight by: 1 - lr * weight_decay, or 1. */
static inline G2Z_HOST_DEVICE float g2z__decay_factor(const g2z_optimizer_config *config, double lr,
                                                      int decay) {
  if (!decay) return 1.0f;
  return (float)(1.0 - lr * config->weight_decay);
}

/* AdamW's factors of one step, the same for all elements of a range. */
typedef struct g2z__adamw_factors {
  float gradient;         /* state->grad_multiplier */
  float decay;            /* g2z__decay_factor */
  float beta2;
  float new_m, new_v;     /* 1 - beta1, 1 - beta2 */
  float step;             /* lr / (1 - beta1^t) */
  float root;             /* sqrt(1 - beta2^t) */
  float eps;
} g2z__adamw_factors;

/* t is state->applied, which already counts this step: 1 for the first. */
static inline G2Z_HOST_DEVICE g2z__adamw_factors
g2z__adamw_prepare(const g2z_optimizer_config *config, const g2z_step_state *state, int decay) {
  double t = (double)state->applied, lr = (double)state->lr;
  g2z__adamw_factors factors;
  if (config->kind == G2Z_OPTIMIZER_MUON && config->lr > 0)
    lr *= (double)config->adam_lr / (double)config->lr;
  factors.gradient = state->grad_multiplier;
  factors.decay = g2z__decay_factor(config, lr, decay);
  factors.beta2 = config->beta2;
  factors.new_m = (float)(1.0 - (double)config->beta1);
  factors.new_v = (float)(1.0 - (double)config->beta2);
  factors.step = (float)(lr / (1.0 - pow((double)config->beta1, t)));
  factors.root = (float)sqrt(1.0 - pow((double)config->beta2, t));
  factors.eps = config->eps;
  return factors;
}

/* torch.optim.AdamW's arithmetic for one element: updates its moments. */
static inline G2Z_HOST_DEVICE void g2z__adamw_moments(const g2z__adamw_factors *factors, float *m,
                                                      float *v, float gradient) {
  gradient *= factors->gradient;
  *m += factors->new_m * (gradient - *m);
  *v = factors->beta2 * *v + factors->new_v * (gradient * gradient);
}
/* Returns the new master weight. root: the square root of the new v. */
static inline G2Z_HOST_DEVICE float g2z__adamw_weight(const g2z__adamw_factors *factors,
                                                      float weight, float m, float root) {
  return weight * factors->decay - factors->step * (m / (root / factors->root + factors->eps));
}
/* The two together. Returns the new master weight. */
static inline G2Z_HOST_DEVICE float g2z__adamw_element(const g2z__adamw_factors *factors,
                                                       float weight, float *m, float *v,
                                                       float gradient) {
  g2z__adamw_moments(factors, m, v, gradient);
  return g2z__adamw_weight(factors, weight, *m, sqrtf(*v));
}

/* In bf16, m and v are rounded at random, to the next smaller or larger magnitude, so that the mean
 * stays. Rounding to the nearest would always lose a change of less than half a step. random[i] is
 * for element 4 group + i: its lower half for m, its upper half for v. */
static inline G2Z_HOST_DEVICE void g2z__moments_random(const g2z_step_state *state, uint64_t group,
                                                       uint32_t random[4]) {
  uint32_t counter[4] = {(uint32_t)group, (uint32_t)(group >> 32), (uint32_t)state->step, 0};
  g2z_philox(0, G2Z_RANDOM_MOMENTS, counter, random);
}
static inline G2Z_HOST_DEVICE float g2z__round_random(float x, uint32_t random) {
  return g2z__from_bits((g2z__bits_of(x) + (random & 0xffffu)) & 0xffff0000u);
}

/* Muon's momentum for one element: updates m and returns u. multiplier: state->grad_multiplier. */
static inline G2Z_HOST_DEVICE float g2z__momentum_element(float beta, float multiplier, float *m,
                                                          float gradient) {
  gradient *= multiplier;
  *m = beta * *m + gradient;
  return gradient + beta * *m;
}

/* Factors of Muon's update, the same for all elements of a range. */
typedef struct g2z__muon_factors {
  float decay;            /* g2z__decay_factor */
  float step;             /* lr * scale */
} g2z__muon_factors;
static inline G2Z_HOST_DEVICE g2z__muon_factors
g2z__muon_prepare(const g2z_optimizer_config *config, const g2z_step_state *state, int decay,
                  float scale) {
  g2z__muon_factors factors;
  factors.decay = g2z__decay_factor(config, (double)state->lr, decay);
  factors.step = (float)((double)state->lr * scale);
  return factors;
}
/* Muon's update of one element; returns the new master weight. */
static inline G2Z_HOST_DEVICE float g2z__muon_element(const g2z__muon_factors *factors,
                                                      float weight, float o) {
  return weight * factors->decay - factors->step * o;
}

/* ----- devices ---------------------------------------------------------- */

static const g2z_ops *g2z__cpu_ops(void);

#if defined(__CUDACC__) /* gpt2_zero_kernels.cuh, >>k10 and >>k90 */
static int g2z__cuda_count(void);
static g2z_status g2z__cuda_find(g2z_services *services, const char *promise);
static g2z_status g2z__cuda_memory(g2z_services *services, size_t *free_bytes, size_t *total_bytes);
static int g2z__cuda_current(void); /* the number of the calling thread's GPU */
static g2z_status g2z__cuda_use(g2z_services *services, int gpu); /* makes it current */
static g2z_status g2z__cuda_select(g2z_services *services, int local_rank, char id[64]);
static g2z_status g2z__cuda_open(g2z_device *device); /* sets ops and backend */
#else
G2Z__PRIVATE int g2z__cuda_count(void) { return 0; }
G2Z__PRIVATE g2z_status g2z__cuda_find(g2z_services *services, const char *promise) {
  const g2z_status status = *promise ? G2Z_DEVICE : G2Z_UNSUPPORTED;
  return g2z_fail(services, status,
                  "this build has no CUDA%s: run make where nvcc and a GPU are found, or make "
                  "ARCH=90a elsewhere, or use --device cpu", promise);
}
G2Z__PRIVATE g2z_status g2z__cuda_memory(g2z_services *services, size_t *free_bytes,
                                         size_t *total_bytes) {
  *free_bytes = *total_bytes = 0;
  return g2z__cuda_find(services, "");
}
G2Z__PRIVATE int g2z__cuda_current(void) { return 0; }
G2Z__PRIVATE g2z_status g2z__cuda_use(g2z_services *services, int gpu) {
  (void)gpu;
  return g2z__cuda_find(services, "");
}
G2Z__PRIVATE g2z_status g2z__cuda_select(g2z_services *services, int local_rank, char id[64]) {
  (void)local_rank, (void)id;
  return g2z__cuda_find(services, "");
}
G2Z__PRIVATE g2z_status g2z__cuda_open(g2z_device *device) {
  return g2z__cuda_find(device->services, "");
}
#endif

G2Z_API int g2z_device_count(g2z_device_kind kind) {
  if (kind == G2Z_DEVICE_CPU) return 1;
  return g2z__cuda_count();
}

G2Z_API g2z_status g2z_device_find_gpu(g2z_services *services) {
  static const char *const names[] = {"SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES",
                                      "NVIDIA_VISIBLE_DEVICES"};
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  const int hidden = visible && (!*visible || *visible == '-'); /* the user hides all GPUs */
  char promise[128] = "";
  for (int i = 0; i < 3 && !hidden && !*promise; i++) {
    const char *value = getenv(names[i]);
    if (value && *value && strcmp(value, "none") && strcmp(value, "void"))
      snprintf(promise, sizeof promise, ", though %s=%.60s promises GPUs", names[i], value);
  }
  return g2z__cuda_find(services, promise);
}

G2Z_API g2z_status g2z_device_create(g2z_services *services, g2z_device_kind kind, g2z_dtype dtype,
                                     g2z_dtype grad_dtype, g2z_device **out) {
  *out = NULL;
  if ((unsigned)dtype >= G2Z_DTYPE_COUNT || (grad_dtype != dtype && grad_dtype != G2Z_FP32))
    G2Z_REFUSE(services, "a device cannot have type %d with gradients of type %d: gradients have "
               "the same type or fp32", (int)dtype, (int)grad_dtype);
  if (kind == G2Z_DEVICE_CPU && dtype == G2Z_TF32)
    return g2z_fail(services, G2Z_UNSUPPORTED,
                    "dtype tf32 needs tensor cores, which the cpu lacks: use --dtype fp32");
  g2z_device *device;
  G2Z_TRY(G2Z_NEW(services, 1, &device));
  device->ops = g2z__cpu_ops();
  device->services = services;
  device->kind = kind;
  device->dtype = dtype;
  device->grad_dtype = grad_dtype;
  device->tune = G2Z_TUNE_ON;
  device->info.exponentials_per_s = NAN;
  device->info.fp8 = device->info.bf16 = kind == G2Z_DEVICE_CPU;
  g2z_status status = G2Z_OK;
  if (kind == G2Z_DEVICE_CUDA) status = g2z__cuda_open(device);
  if (status != G2Z_OK) g2z_release(services, device);
  else *out = device;
  return status;
}

G2Z_API void g2z_device_free(g2z_device *device) {
  if (!device) return;
  device->ops->close(device);
  g2z_release(device->services, device->timers);
  g2z_release(device->services, device);
}

/* The beginning of each GPU's table. The number is the version of its format. */
#define G2Z__TUNING_HEAD "gpt2_zero tuning 4, "

G2Z__PRIVATE g2z_status g2z__tuning_read(g2z_device *device, const char *text) {
  int own = device->kind == G2Z_DEVICE_CPU && !*text;
  char first[49]; /* first line of the text */
  snprintf(first, sizeof first, "%.*s", (int)strcspn(text, "\n"), text);
  if (!own && strncmp(text, G2Z__TUNING_HEAD, strlen(G2Z__TUNING_HEAD)) != 0)
    return g2z_fail(device->services, G2Z_FORMAT, "no tuning table of this build: it begins with "
                    "\"%s\" and not with \"" G2Z__TUNING_HEAD "...\"; take a run's tuning.txt, or "
                    "none to tune anew", first);
  return device->ops->tuning_read(device, text);
}

struct g2z__timers {
  g2z_span_times span[G2Z_SPAN_COUNT];
  double begun[G2Z_SPAN_COUNT];      /* CPU: start time */
  g2z_status status;                 /* first failure of a GPU's events: span calls return none */
  void *backend;
};

G2Z__PRIVATE void g2z__timers_add(struct g2z__timers *timers, g2z_span span, double seconds) {
  g2z_span_times *s = &timers->span[span];
  if (!s->count || seconds < s->min_s) s->min_s = seconds;
  if (!s->count || seconds > s->max_s) s->max_s = seconds;
  s->total_s += seconds;
  s->count++;
}

G2Z_API g2z_status g2z_device_time_spans(g2z_device *device) {
  if (device->timers) return G2Z_OK;
  G2Z_TRY(G2Z_NEW(device->services, 1, &device->timers));
  g2z_status status = device->ops->timers_open(device);
  if (status == G2Z_OK) return G2Z_OK;
  g2z_release(device->services, device->timers);
  device->timers = NULL;
  return status;
}

G2Z_API g2z_status g2z_device_span_times(g2z_device *device, g2z_span_times out[G2Z_SPAN_COUNT]) {
  memset(out, 0, G2Z_SPAN_COUNT * sizeof *out);
  if (!device->timers) return G2Z_OK;
  G2Z_TRY(device->ops->timers_settle(device));
  memcpy(out, device->timers->span, G2Z_SPAN_COUNT * sizeof *out);
  return G2Z_OK;
}

G2Z_API g2z_status g2z_device_memory(g2z_services *services, g2z_device_kind kind,
                                     size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = *total_bytes = 0;
  if (kind == G2Z_DEVICE_CUDA) return g2z__cuda_memory(services, free_bytes, total_bytes);
  *free_bytes = 1024 * (size_t)g2z__kernel_number("/proc", "meminfo", "MemAvailable:", 0);
  *total_bytes = 1024 * (size_t)g2z__kernel_number("/proc", "meminfo", "MemTotal:", 0);
  if (*free_bytes && *total_bytes) {
    g2z__cgroup_memory("", free_bytes, total_bytes);
    return G2Z_OK;
  }
  /* Not Linux, or Linux before 3.14: POSIX gives nothing better than the physical memory. */
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0)
    return g2z_fail(services, G2Z_UNSUPPORTED,
                    "this system does not report how much memory it has: plan without it");
  *free_bytes = *total_bytes = (size_t)pages * (size_t)page;
  return G2Z_OK;
}

/* ===== >>i09 CPU ops =====================================================
 * In:  tensors as fp32 in host memory. Out: the same; outputs hold values of the device's types.
 * Law: a thread owns the elements that it writes, and each element's sum runs in an order that
 *      depends on the shapes alone: no result depends on the number of threads.
 * Each op is written as its formula, except products, which take most of the time. Arithmetic is
 * fp32, matrix products too; norms, softmax and column sums add up in fp64. An output is rounded
 * once, when it is stored. */

/* Runs a loop in parallel if it has enough operations: waking the threads also costs time. */
#define G2Z__PRAGMA(text) _Pragma(#text)
#if defined(_OPENMP)
#define G2Z__PARALLEL(work) \
  G2Z__PRAGMA(omp parallel for schedule(guided) if((double)(work) > 2e5))
G2Z__PRIVATE int g2z__cpu_threads(void) { return omp_get_max_threads(); }
G2Z__PRIVATE int g2z__cpu_thread(void) { return omp_get_thread_num(); }
#else
#define G2Z__PARALLEL(work)
G2Z__PRIVATE int g2z__cpu_threads(void) { return 1; }
G2Z__PRIVATE int g2z__cpu_thread(void) { return 0; }
#endif

/* ----- vectors -----------------------------------------------------------
 * A compiler must not reorder a sum of floats to vectorise it. So products and exponentials are
 * written with vectors of the target's size, in the notation of gcc and clang: x * y is a product
 * lane by lane. Instructions without a notation get a macro. Where the target has FMA, a product
 * and its sum are rounded once, on SSE2 twice: these results differ. Otherwise no result depends on
 * the size of a vector. */

/* FMA: x * y + z. ROOT: square roots. LOW and HIGH interleave the low or high halves of x and y:
 * LOW is x[0], y[0], x[1], y[1], ... */
#if defined(__AVX512F__)
#define G2Z__VECTOR 16 /* floats */
#define G2Z__FMA(x, y, z) _mm512_fmadd_ps(x, y, z)
#define G2Z__ROOT(x) _mm512_maskz_sqrt_ps(0xffff, x) /* gcc warns of the one without a mask */
#define G2Z__LOW(x, y) \
  _mm512_permutex2var_ps( \
      x, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), y)
#define G2Z__HIGH(x, y) \
  _mm512_permutex2var_ps( \
      x, _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31), y)
#elif defined(__AVX2__) && defined(__FMA__)
#define G2Z__VECTOR 8
#define G2Z__FMA(x, y, z) _mm256_fmadd_ps(x, y, z)
#define G2Z__ROOT(x) _mm256_sqrt_ps(x)
#define G2Z__LOW(x, y) \
  _mm256_permute2f128_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y), 0x20)
#define G2Z__HIGH(x, y) \
  _mm256_permute2f128_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y), 0x31)
#elif defined(__aarch64__)
#define G2Z__VECTOR 4
#define G2Z__FMA(x, y, z) vfmaq_f32(z, x, y)
#define G2Z__ROOT(x) vsqrtq_f32(x)
#define G2Z__LOW(x, y) vzip1q_f32(x, y)
#define G2Z__HIGH(x, y) vzip2q_f32(x, y)
#elif defined(__SSE2__)
#define G2Z__VECTOR 4
#define G2Z__FMA(x, y, z) ((x) * (y) + (z))
#define G2Z__ROOT(x) _mm_sqrt_ps(x)
#define G2Z__LOW(x, y) _mm_unpacklo_ps(x, y)
#define G2Z__HIGH(x, y) _mm_unpackhi_ps(x, y)
#else
#define G2Z__VECTOR 4
#define G2Z__FMA(x, y, z) ((x) * (y) + (z))
#endif

#if defined(__clang__)
#define G2Z__UNROLL G2Z__PRAGMA(unroll)
#elif defined(__CUDACC__)
#define G2Z__UNROLL /* nvcc and its host compiler know no pragma in common */
#else
#define G2Z__UNROLL G2Z__PRAGMA(GCC unroll 24)
#endif

/* If a program includes <immintrin.h> before this file, its functions have other options than ours,
 * and gcc inlines the small ones here only if it must. */
#define G2Z__INLINE static inline __attribute__((always_inline))

/* They may lie anywhere in an array of floats. */
typedef float g2z__cpu_vector __attribute__((vector_size(4 * G2Z__VECTOR), aligned(4), may_alias));
typedef int32_t g2z__cpu_integers __attribute__((vector_size(4 * G2Z__VECTOR)));

/* A vector whose lanes are x. x - 0 is x, even if x is -0. */
G2Z__INLINE g2z__cpu_vector g2z__cpu_all(float x) {
  const g2z__cpu_vector zero = {0};
  return x - zero;
}

/* Lane by lane: x where the condition, a comparison of vectors, holds; y elsewhere. */
G2Z__INLINE g2z__cpu_vector g2z__cpu_choose(g2z__cpu_integers condition, g2z__cpu_vector x,
                                            g2z__cpu_vector y) {
  return (g2z__cpu_vector)(((g2z__cpu_integers)x & condition) |
                           ((g2z__cpu_integers)y & ~condition));
}

/* Transposes the square x: element j of x[i] becomes element i of x[j]. A round interleaves vector
 * i of the first half with vector i of the second. So the highest bit of an element's index,
 * i * G2Z__VECTOR + j, becomes the lowest; after log2(G2Z__VECTOR) rounds i and j have changed
 * places. */
G2Z__INLINE void g2z__cpu_transpose(g2z__cpu_vector *x) {
  g2z__cpu_vector y[G2Z__VECTOR];
#if defined(G2Z__LOW)
  const int half = G2Z__VECTOR / 2;
  G2Z__UNROLL
  for (int round = 1; round < G2Z__VECTOR; round *= 2) {
    G2Z__UNROLL
    for (int i = 0; i < half; i++) {
      y[2 * i] = G2Z__LOW(x[i], x[i + half]);
      y[2 * i + 1] = G2Z__HIGH(x[i], x[i + half]);
    }
    memcpy(x, y, sizeof y);
  }
#else
  for (int i = 0; i < G2Z__VECTOR; i++)
    for (int j = 0; j < G2Z__VECTOR; j++) y[j][i] = x[i][j];
  memcpy(x, y, sizeof y);
#endif
}

/* exp(x), within 1.4 units in the last place; 0 below -87.3, exp(88) above 88, NaN for NaN. With
 * n = the integer nearest to x / ln 2 and r = x - n ln 2, it is 2^n exp(r); the polynomial is from
 * Cephes. Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits. */
G2Z__INLINE g2z__cpu_vector g2z__cpu_exp(g2z__cpu_vector x) {
  const g2z__cpu_vector integer = g2z__cpu_all(0x1.8p23f);
  const g2z__cpu_integers high = x > 88.0f, low = x < -87.3f;
  x = g2z__cpu_choose(high, g2z__cpu_all(88.0f), x);
  const g2z__cpu_vector shifted = G2Z__FMA(x, g2z__cpu_all(1.44269504f), integer);
  const g2z__cpu_vector n = shifted - integer;
  g2z__cpu_vector r = G2Z__FMA(n, g2z__cpu_all(-0.693359375f), x); /* exact */
  r = G2Z__FMA(n, g2z__cpu_all(2.12194440e-4f), r);
  g2z__cpu_vector sum = g2z__cpu_all(1.9875691500e-4f);
  sum = G2Z__FMA(sum, r, g2z__cpu_all(1.3981999507e-3f));
  sum = G2Z__FMA(sum, r, g2z__cpu_all(8.3334519073e-3f));
  sum = G2Z__FMA(sum, r, g2z__cpu_all(4.1665795894e-2f));
  sum = G2Z__FMA(sum, r, g2z__cpu_all(1.6666665459e-1f));
  sum = G2Z__FMA(sum, r, g2z__cpu_all(5.0000001201e-1f));
  sum = G2Z__FMA(sum, r * r, r) + 1.0f;
  const g2z__cpu_integers power = ((g2z__cpu_integers)shifted + 127) << 23;
  return g2z__cpu_choose(low, g2z__cpu_all(0), sum * (g2z__cpu_vector)power);
}

/* x[n] = exp(x[n] - less) */
G2Z__PRIVATE void g2z__cpu_exps(float *x, float less, int n) {
  int i = 0;
  for (; i + G2Z__VECTOR <= n; i += G2Z__VECTOR) {
    g2z__cpu_vector *at = (g2z__cpu_vector *)(x + i);
    *at = g2z__cpu_exp(*at - less);
  }
  g2z__cpu_vector rest = {0};
  memcpy(&rest, x + i, (size_t)(n - i) * sizeof *x);
  rest = g2z__cpu_exp(rest - less);
  memcpy(x + i, &rest, (size_t)(n - i) * sizeof *x);
}

/* The largest of x[n] that is not NaN, or -INFINITY. */
G2Z__PRIVATE float g2z__cpu_largest(const float *x, int n) {
  g2z__cpu_vector most = g2z__cpu_all(-INFINITY);
  float largest = -INFINITY;
  int i = 0;
  for (; i + G2Z__VECTOR <= n; i += G2Z__VECTOR) {
    const g2z__cpu_vector at = *(const g2z__cpu_vector *)(x + i);
    most = g2z__cpu_choose(at > most, at, most);
  }
  for (int j = 0; j < G2Z__VECTOR; j++) largest = G2Z__MAX(most[j], largest);
  for (; i < n; i++) largest = G2Z__MAX(x[i], largest);
  return largest;
}

/* to[n] = the square roots of from[n]. Compilers do not vectorise sqrtf: it may set errno. */
G2Z__PRIVATE void g2z__cpu_roots(float *to, const float *from, int n) {
  int i = 0;
#ifdef G2Z__ROOT
  for (; i + G2Z__VECTOR <= n; i += G2Z__VECTOR)
    *(g2z__cpu_vector *)(to + i) = G2Z__ROOT(*(const g2z__cpu_vector *)(from + i));
#endif
  for (; i < n; i++) to[i] = sqrtf(from[i]);
}

/* to[n] = from[n], rounded to the type. */
G2Z__PRIVATE void g2z__cpu_store(g2z_dtype dtype, float *__restrict__ to,
                                 const float *__restrict__ from, int n) {
  if (dtype == G2Z_FP16)
    for (int i = 0; i < n; i++) to[i] = g2z__round_fp16(from[i]);
  else if (dtype == G2Z_BF16)
    for (int i = 0; i < n; i++) to[i] = g2z__round_bf16(from[i]);
  else
    memcpy(to, from, (size_t)n * sizeof *to);
}

/* The sum of x[n]. Here and below element i is added in lane i % 16. */
#define G2Z__LANES 16
G2Z__PRIVATE double g2z__cpu_sum(const float *x, int n) {
  double lanes[G2Z__LANES] = {0}, sum = 0;
  int i = 0;
  for (; i + G2Z__LANES <= n; i += G2Z__LANES)
    for (int j = 0; j < G2Z__LANES; j++) lanes[j] += (double)x[i + j];
  for (; i < n; i++) lanes[i % G2Z__LANES] += (double)x[i];
  for (int j = 0; j < G2Z__LANES; j++) sum += lanes[j];
  return sum;
}

/* The sum of a[i] * b[i]: element i is added in lane i % 16, then the lanes are added in pairs. */
G2Z__PRIVATE float g2z__cpu_dot(const float *a, const float *b, int n) {
  float lanes[G2Z__LANES] = {0};
  int i = 0;
  for (; i + G2Z__LANES <= n; i += G2Z__LANES)
    for (int j = 0; j < G2Z__LANES; j++) lanes[j] += a[i + j] * b[i + j];
  for (; i < n; i++) lanes[i % G2Z__LANES] += a[i] * b[i];
  for (int width = G2Z__LANES / 2; width; width /= 2)
    for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
  return lanes[0];
}

/* The dropout factor of element e of the op's sequence b; 1 if dropout is off. */
static inline float g2z__cpu_factor(const g2z_dropout *dropout, int b, uint64_t e) {
  if (!g2z__dropout_on(dropout)) return 1.0f;
  float factors[4];
  g2z__dropout_group(dropout, dropout->first + (uint32_t)b * dropout->stride, (uint32_t)(e / 4),
                     factors);
  return factors[e % 4];
}

/* x[i] *= the dropout factor of element e + i of the op's sequence b. */
G2Z__PRIVATE void g2z__cpu_drop(float *x, int n, const g2z_dropout *dropout, int b, uint64_t e) {
  float factors[4];
  if (!g2z__dropout_on(dropout)) return;
  for (int i = 0; i < n; i++, e++) {
    if (i == 0 || e % 4 == 0)
      g2z__dropout_group(dropout, dropout->first + (uint32_t)b * dropout->stride,
                         (uint32_t)(e / 4), factors);
    x[i] *= factors[e % 4];
  }
}

/* The same for element (row, column) of [B*T,C]. */
static inline float g2z__cpu_row_factor(const g2z_dropout *dropout, int row, int column, int C) {
  if (!g2z__dropout_on(dropout)) return 1.0f;
  uint64_t t = (uint64_t)(row % dropout->seq);
  return g2z__cpu_factor(dropout, row / dropout->seq, t * (uint64_t)C + (uint64_t)column);
}

/* ----- products ---------------------------------------------------------
 * out[M,N] = a[M,K] b[K,N], then the op's epilogue. As in GotoBLAS, each level of memory holds what
 * the loops inside it read again and again. Sizes are for AVX-512, whose 32 registers have 16
 * floats:
 *
 *   registers   tile    8 rows x 3 vectors of sums. For each k, 3 vectors of b and 8 numbers of a
 *                       give 24 FMAs. Targets with 16 registers have tiles of 4 rows.
 *   L1          panels  128 k for a tile: 24 KB of b for 48 columns, 4 KB of a for 8 rows
 *   L2          task    256 rows x 384 columns: its sums (384 KB), and its panels of a (128 KB) and
 *                       of b (192 KB)
 *
 *   for each task                          threads share the tasks
 *     for each 128 k
 *       pack a and b into panels           a[k][16], b[k][48]; missing rows and columns are 0
 *       for each panel of b                it stays in L1
 *         for each panel of a              a tile adds 128 products to each of its sums
 *     for each row: the epilogue
 *
 * A task whose rows fit one tile uses each number of b once: it reads b in place.
 * To pack 256 + 384 numbers for 256 x 384 FMAs takes a tenth of the time. A tile adds up 128
 * products before it adds them to the sum, so that long sums lose few digits. This order depends on
 * k alone: tasks and threads change no bit, and a row has the same bits alone and among others. */

#if defined(__AVX512F__) || defined(__aarch64__)
#define G2Z__TILE_ROWS 8
#else
#define G2Z__TILE_ROWS 4
#endif
#define G2Z__TILE_VECTORS 3
#define G2Z__TILE_COLUMNS (G2Z__TILE_VECTORS * G2Z__VECTOR)
/* A panel of a has whole vectors of rows, so that a square of them can be transposed: with AVX-512
 * and AVX2 the rows of two tiles. */
#define G2Z__PANEL_ROWS G2Z__MAX(G2Z__VECTOR, G2Z__TILE_ROWS)
#define G2Z__TILE_SUMS (G2Z__TILE_ROWS * G2Z__TILE_VECTORS) /* vectors */
#define G2Z__TASK_GRAIN 96 /* columns of a task come in multiples of it, and of any tile */

typedef struct g2z__cpu_matrix { /* element (i,j) is at[i * row + j * column] */
  const float *at;
  ptrdiff_t row, column;
} g2z__cpu_matrix;

static inline g2z__cpu_matrix g2z__cpu_rows(const void *x, ptrdiff_t columns) {
  g2z__cpu_matrix matrix = {(const float *)x, columns, 1};
  return matrix;
}

static inline g2z__cpu_matrix g2z__cpu_transposed(const void *x, ptrdiff_t columns) {
  g2z__cpu_matrix matrix = {(const float *)x, 1, columns};
  return matrix;
}

typedef struct g2z__cpu_product {
  int M, N, K;
  g2z__cpu_matrix a, b;
  float *out;                  /* [M,out_row] */
  ptrdiff_t out_row;
  g2z_dtype dtype;             /* of out and slope */
  g2z_write mode;
  const float *bias;           /* [N], or NULL */
  float *slope;                /* [M,out_row], or NULL; so are times and residual */
  const float *times, *residual;
  const g2z_dropout *dropout;
} g2z__cpu_product;

G2Z__PRIVATE g2z__cpu_product g2z__cpu_product_of(int M, int N, int K, g2z__cpu_matrix a,
                                                  g2z__cpu_matrix b) {
  g2z__cpu_product product;
  memset(&product, 0, sizeof product);
  product.M = M;
  product.N = N;
  product.K = K;
  product.a = a;
  product.b = b;
  product.out_row = N;
  return product;
}

/* square[k][i] = from[i * row + k]. The rows that come next are fetched meanwhile. */
G2Z__INLINE void g2z__cpu_turn(g2z__cpu_vector *square, const float *from, ptrdiff_t row) {
  G2Z__UNROLL
  for (int i = 0; i < G2Z__VECTOR; i++) {
    square[i] = *(const g2z__cpu_vector *)(from + i * row);
    __builtin_prefetch(from + (i + G2Z__VECTOR) * row);
  }
  g2z__cpu_transpose(square);
}

/* Packs K elements of each lane, a row of a or a column of b, into panels of `width` lanes:
 * to[panel][k][width]. Element (i,k) of `from` is lane i at k; missing lanes are 0. Vectors follow
 * the memory's rows: they copy lanes, or squares of lanes and k are transposed. */
G2Z__PRIVATE void g2z__cpu_pack(float *to, g2z__cpu_matrix from, int lanes, int K, int width) {
  for (int first = 0; first < lanes; first += width, to += width * K) {
    const float *at = from.at + first * from.row;
    const int here = G2Z__MIN(width, lanes - first), whole = here / G2Z__VECTOR * G2Z__VECTOR;
    int deep = 0; /* the first `deep` k of the first `whole` lanes are packed by vectors */
    if (here < width) memset(to, 0, (size_t)width * (size_t)K * sizeof *to);
    if (from.row == 1) {
      deep = K;
      for (int k = 0; k < deep; k++)
        for (int i = 0; i < whole; i += G2Z__VECTOR)
          *(g2z__cpu_vector *)(to + k * width + i) =
              *(const g2z__cpu_vector *)(at + k * from.column + i);
    } else if (from.column == 1) {
      deep = K / G2Z__VECTOR * G2Z__VECTOR;
      for (int i = 0; i < whole; i += G2Z__VECTOR)
        for (int k = 0; k < deep; k += G2Z__VECTOR) {
          g2z__cpu_vector square[G2Z__VECTOR];
          g2z__cpu_turn(square, at + i * from.row + k, from.row);
          G2Z__UNROLL
          for (int j = 0; j < G2Z__VECTOR; j++)
            *(g2z__cpu_vector *)(to + (k + j) * width + i) = square[j];
        }
    }
    for (int k = 0; k < K; k++)
      for (int i = (k < deep) * whole; i < here; i++)
        to[k * width + i] = at[i * from.row + k * from.column];
  }
}

/* Adds a[K][rows] b[K][vectors] to sums of a task. a is a panel, of G2Z__PANEL_ROWS numbers per k;
 * rows of b are b_row apart. `rows` and `vectors` are constants of each call, so that the compiler
 * unrolls the loops and keeps the sums in registers. */
G2Z__INLINE void g2z__cpu_tile(int rows, int vectors, float *sums, const float *a, const float *b,
                               ptrdiff_t b_row, int K) {
  g2z__cpu_vector sum[G2Z__TILE_SUMS];
  memset(sum, 0, sizeof sum);
  for (int k = 0; k < K; k++, a += G2Z__PANEL_ROWS, b += b_row) {
    const g2z__cpu_vector *y = (const g2z__cpu_vector *)b;
    G2Z__UNROLL
    for (int i = 0; i < rows; i++) {
      const g2z__cpu_vector x = g2z__cpu_all(a[i]);
      G2Z__UNROLL
      for (int v = 0; v < vectors; v++)
        sum[i * vectors + v] = G2Z__FMA(x, y[v], sum[i * vectors + v]);
    }
  }
  G2Z__UNROLL
  for (int i = 0; i < rows; i++) {
    g2z__cpu_vector *to = (g2z__cpu_vector *)(sums + i * G2Z__TASK_COLUMNS);
    G2Z__UNROLL
    for (int v = 0; v < vectors; v++) to[v] += sum[i * vectors + v];
  }
}

/* The same for G2Z__VECTOR columns of b whose k lie side by side: squares of b are transposed in
 * registers. K: a multiple of G2Z__VECTOR. */
G2Z__INLINE void g2z__cpu_tile_turned(float *sums, const float *a, const float *b,
                                      ptrdiff_t b_column, int K) {
  g2z__cpu_vector sum[G2Z__TILE_ROWS], square[G2Z__VECTOR];
  memset(sum, 0, sizeof sum);
  for (; K > 0; K -= G2Z__VECTOR, b += G2Z__VECTOR) {
    g2z__cpu_turn(square, b, b_column);
    G2Z__UNROLL
    for (int k = 0; k < G2Z__VECTOR; k++, a += G2Z__PANEL_ROWS)
      G2Z__UNROLL
      for (int i = 0; i < G2Z__TILE_ROWS; i++)
        sum[i] = G2Z__FMA(g2z__cpu_all(a[i]), square[k], sum[i]);
  }
  G2Z__UNROLL
  for (int i = 0; i < G2Z__TILE_ROWS; i++)
    *(g2z__cpu_vector *)(sums + i * G2Z__TASK_COLUMNS) += sum[i];
}

/* Multiplies a, one panel of at most G2Z__TILE_ROWS rows, with columns of b in place, and returns
 * how many: the others need panels. So few rows use each number of b once, and memory is the limit.
 * The fewer rows, the more columns a tile takes, and the longer the pieces of memory that it reads.
 * Element (j,k) of b is column j at k. */
G2Z__PRIVATE int g2z__cpu_in_place(float *sums, const float *a, int rows, g2z__cpu_matrix b,
                                   int columns, int K) {
  int j = 0;
  if (b.column == 1 && K % G2Z__VECTOR == 0)
    for (; j + G2Z__VECTOR <= columns; j += G2Z__VECTOR)
      g2z__cpu_tile_turned(sums + j, a, b.at + j * b.row, b.row, K);
  if (b.row != 1) return j;
  if (rows == 1)
    for (; j + G2Z__TILE_SUMS * G2Z__VECTOR <= columns; j += G2Z__TILE_SUMS * G2Z__VECTOR)
      g2z__cpu_tile(1, G2Z__TILE_SUMS, sums + j, a, b.at + j, b.column, K);
  if (rows <= G2Z__TILE_ROWS / 2)
    for (; j + 2 * G2Z__TILE_COLUMNS <= columns; j += 2 * G2Z__TILE_COLUMNS)
      g2z__cpu_tile(G2Z__TILE_ROWS / 2, 2 * G2Z__TILE_VECTORS, sums + j, a, b.at + j, b.column, K);
  for (; j + G2Z__TILE_COLUMNS <= columns; j += G2Z__TILE_COLUMNS)
    g2z__cpu_tile(G2Z__TILE_ROWS, G2Z__TILE_VECTORS, sums + j, a, b.at + j, b.column, K);
  return j;
}

#define G2Z__GELU_SCALE 0.797884561f /* sqrt(2 / pi) */
#define G2Z__GELU_CUBE 0.044715f

/* y[n] = GELU(y[n]); slope[n] is its derivative, rounded to the type. n: at most a task's columns.
 * GELU's tanh form, 0.5 y (1 + tanh u), is y times 1 / (1 + e) with e = exp(-2u). This loses no
 * digits where tanh u is near -1. */
G2Z__PRIVATE void g2z__cpu_gelu(g2z_dtype dtype, float *__restrict__ y, float *slope, int n) {
  float exps[G2Z__TASK_COLUMNS], slopes[G2Z__TASK_COLUMNS];
  for (int j = 0; j < n; j++)
    exps[j] = y[j] * (y[j] * y[j] * (-2.0f * G2Z__GELU_SCALE * G2Z__GELU_CUBE) -
                      2.0f * G2Z__GELU_SCALE);
  g2z__cpu_exps(exps, 0, n);
  for (int j = 0; j < n; j++) {
    const float du = y[j] * y[j] * (3.0f * G2Z__GELU_SCALE * G2Z__GELU_CUBE) + G2Z__GELU_SCALE;
    const float e = exps[j], gate = 1.0f / (e + 1.0f);
    slopes[j] = gate + 2.0f * y[j] * du * gate * (e * gate);
    y[j] *= gate;
  }
  g2z__cpu_store(dtype, slope, slopes, n);
}

/* The epilogue of n columns of a row: turns the sums y[n] into the output, and stores it. */
G2Z__PRIVATE void g2z__cpu_finish(const g2z__cpu_product *p, float *__restrict__ y, int row,
                                  int column, int n) {
  const ptrdiff_t at = row * p->out_row + column;
  if (p->bias)
    for (int j = 0; j < n; j++) y[j] += p->bias[column + j];
  if (p->slope) g2z__cpu_gelu(p->dtype, y, p->slope + at, n);
  if (p->times)
    for (int j = 0; j < n; j++) y[j] *= p->times[at + j];
  if (p->residual) {
    if (g2z__dropout_on(p->dropout))
      g2z__cpu_drop(y, n, p->dropout, row / p->dropout->seq,
                    (uint64_t)(row % p->dropout->seq) * (uint64_t)p->N + (uint64_t)column);
    for (int j = 0; j < n; j++) y[j] += p->residual[at + j];
  }
  if (p->mode == G2Z_ACCUMULATE)
    for (int j = 0; j < n; j++) y[j] += p->out[at + j];
  g2z__cpu_store(p->dtype, p->out + at, y, n);
}

/* A task: rows x columns of `out` from (row,column) on. */
G2Z__PRIVATE void g2z__cpu_task(const g2z__cpu_product *p, float *memory, int row, int rows,
                                int column, int columns) {
  float *sums = memory, *a = sums + G2Z__TASK_SUMS, *b = a + G2Z__TASK_ROWS * G2Z__STEPS;
  memset(sums, 0, (size_t)rows * G2Z__TASK_COLUMNS * sizeof *sums);
  for (int first = 0; first < p->K; first += G2Z__STEPS) {
    const int K = G2Z__MIN(G2Z__STEPS, p->K - first);
    const g2z__cpu_matrix left = {p->a.at + (row * p->a.row + first * p->a.column), p->a.row,
                                  p->a.column};
    g2z__cpu_matrix right = {p->b.at + (first * p->b.row + column * p->b.column), p->b.column,
                             p->b.row};
    int done = 0; /* columns */
    g2z__cpu_pack(a, left, rows, K, G2Z__PANEL_ROWS);
    if (rows <= G2Z__TILE_ROWS) done = g2z__cpu_in_place(sums, a, rows, right, columns, K);
    right.at += done * right.row;
    g2z__cpu_pack(b, right, columns - done, K, G2Z__TILE_COLUMNS);
    for (int j = done; j < columns; j += G2Z__TILE_COLUMNS)
      for (int i = 0; i < rows; i += G2Z__TILE_ROWS) {
        float *to = sums + i * G2Z__TASK_COLUMNS + j;
        const float *x = a + (i - i % G2Z__PANEL_ROWS) * K + i % G2Z__PANEL_ROWS;
        const float *y = b + (j - done) * K;
        if (columns - j <= G2Z__VECTOR) /* a wider tile would end in the next row of sums */
          g2z__cpu_tile(G2Z__TILE_ROWS, 1, to, x, y, G2Z__TILE_COLUMNS, K);
        else
          g2z__cpu_tile(G2Z__TILE_ROWS, G2Z__TILE_VECTORS, to, x, y, G2Z__TILE_COLUMNS, K);
      }
  }
  for (int i = 0; i < rows; i++)
    g2z__cpu_finish(p, sums + i * G2Z__TASK_COLUMNS, row + i, column, columns);
}

typedef struct g2z__cpu_backend {
  float *memory;               /* of all threads: ops reuse it */
  size_t floats;
} g2z__cpu_backend;

typedef struct g2z__cpu_memory {
  float *first;                /* thread 0's */
  size_t each;
} g2z__cpu_memory;

/* Memory for each thread: of a task, then `more` floats. Both are aligned to cache lines. Of the
 * plan's size at most: the old memory is released first. */
G2Z__PRIVATE g2z_status g2z__cpu_reserve(g2z_device *device, size_t more, g2z__cpu_memory *out) {
  if (!device->backend) {
    g2z__cpu_backend *created;
    G2Z_TRY(G2Z_NEW(device->services, 1, &created));
    device->backend = created;
  }
  g2z__cpu_backend *backend = (g2z__cpu_backend *)device->backend;
  out->each = g2z__plan_thread(more);
  const size_t floats = (size_t)g2z__cpu_threads() * out->each + 16;
  if (backend->floats < floats) {
    g2z_release(device->services, backend->memory);
    backend->memory = NULL;
    backend->floats = 0;
    G2Z_TRY(G2Z_NEW(device->services, floats, &backend->memory));
    backend->floats = floats;
  }
  out->first = backend->memory + (64 - (uintptr_t)backend->memory % 64) % 64 / sizeof(float);
  return G2Z_OK;
}

/* The part of the thread that calls it. */
G2Z__PRIVATE float *g2z__cpu_mine(const g2z__cpu_memory *memory) {
  return memory->first + (size_t)g2z__cpu_thread() * memory->each;
}

/* The whole product by the thread that calls it. */
G2Z__PRIVATE void g2z__cpu_multiply_here(const g2z__cpu_product *p, float *memory) {
  for (int column = 0; column < p->N; column += G2Z__TASK_COLUMNS)
    for (int row = 0; row < p->M; row += G2Z__TASK_ROWS)
      g2z__cpu_task(p, memory, row, G2Z__MIN(G2Z__TASK_ROWS, p->M - row), column,
                    G2Z__MIN(G2Z__TASK_COLUMNS, p->N - column));
}

/* The size of equal parts of n: at most `most`, a multiple of `grain`, which n = 0 has as well. */
G2Z__PRIVATE int g2z__cpu_part(int n, int most, int grain) {
  const int parts = G2Z__MAX(1, (n + most - 1) / most);
  const int part = G2Z__MAX(1, (n + parts - 1) / parts);
  return (part + grain - 1) / grain * grain;
}

/* Chooses the size of tasks that gives the busiest thread the least work: one per sum, and 16 per
 * number that is packed. */
G2Z__PRIVATE g2z_status g2z__cpu_multiply(g2z_device *device, const g2z__cpu_product *p) {
  const int threads = g2z__cpu_threads();
  int rows = 0, columns = 0;
  double least = INFINITY;
  g2z__cpu_memory memory;
  G2Z_TRY(g2z__cpu_reserve(device, 0, &memory));
  for (int most_rows = G2Z__TASK_ROWS; most_rows >= 32; most_rows /= 2)
    for (int most_columns = G2Z__TASK_COLUMNS; most_columns >= G2Z__TASK_GRAIN; most_columns /= 2) {
      const int r = g2z__cpu_part(p->M, most_rows, G2Z__TILE_ROWS);
      const int c = g2z__cpu_part(p->N, most_columns, G2Z__TASK_GRAIN);
      const int64_t tasks = (int64_t)((p->M + r - 1) / r) * ((p->N + c - 1) / c);
      const double work = (double)((tasks + threads - 1) / threads) * (r * c + 16.0 * (r + c));
      if (work >= least) continue;
      least = work;
      rows = r;
      columns = c;
    }
  const int64_t down = (p->M + rows - 1) / rows;
  const int64_t tasks = down * ((p->N + columns - 1) / columns);
  G2Z__PARALLEL(2.0 * p->M * p->N * p->K)
  for (int64_t task = 0; task < tasks; task++) {
    const int row = (int)(task % down) * rows, column = (int)(task / down) * columns;
    g2z__cpu_task(p, g2z__cpu_mine(&memory), row, G2Z__MIN(rows, p->M - row), column,
                  G2Z__MIN(columns, p->N - column));
  }
  return G2Z_OK;
}

/* ----- sums over tokens ------------------------------------------------- */

#define G2Z__COLUMNS 64 /* columns of a task: four cache lines of each row */

/* out[C] = (or +=) the column sums of y[N,C], or with x those of y * (x - mean) * rstd. */
G2Z__PRIVATE void g2z__cpu_column_sums(g2z_dtype dtype, void *out, g2z_write mode, const void *y,
                                       const void *x, const float *mean, const float *rstd, int N,
                                       int C) {
  G2Z__PARALLEL(6.0 * N * C)
  for (int c = 0; c < C; c += G2Z__COLUMNS) {
    double sums[G2Z__COLUMNS] = {0};
    int width = G2Z__MIN(G2Z__COLUMNS, C - c); /* threads split channels */
    for (int n = 0; n < N; n++) {
      size_t at = (size_t)n * (size_t)C + (size_t)c;
      const float *dy = (const float *)y + at;
      if (!x) {
        for (int j = 0; j < width; j++) sums[j] += (double)dy[j];
        continue;
      }
      const float *from = (const float *)x + at;
      for (int j = 0; j < width; j++)
        sums[j] += (double)(dy[j] * ((from[j] - mean[n]) * rstd[n]));
    }
    for (int j = 0; j < width; j++) {
      float *to = (float *)out + c + j;
      if (mode == G2Z_ACCUMULATE) sums[j] += (double)*to;
      *to = g2z__round(dtype, (float)sums[j]);
    }
  }
}

/* ----- memory and order -------------------------------------------------- */

G2Z__PRIVATE g2z_status g2z__cpu_allocate(g2z_device *device, size_t bytes, void **out) {
  return g2z_allocate(device->services, bytes, 1, out);
}

G2Z__PRIVATE void g2z__cpu_release(g2z_device *device, void *memory) {
  g2z_release(device->services, memory);
}

G2Z__PRIVATE g2z_status g2z__cpu_copy(g2z_device *device, void *to, const void *from,
                                      size_t bytes) {
  (void)device;
  if (bytes) memcpy(to, from, bytes);
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_zero(g2z_device *device, void *memory, size_t bytes) {
  (void)device;
  if (bytes) memset(memory, 0, bytes);
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_event(g2z_device *device, int event) {
  (void)device, (void)event;
  return G2Z_OK; /* an op has finished when it returns */
}

G2Z__PRIVATE g2z_status g2z__cpu_synchronize(g2z_device *device) {
  (void)device;
  return G2Z_OK;
}

G2Z__PRIVATE void g2z__cpu_close(g2z_device *device) {
  g2z__cpu_backend *backend = (g2z__cpu_backend *)device->backend;
  if (backend) g2z_release(device->services, backend->memory);
  g2z_release(device->services, backend);
}

/* ----- casts ------------------------------------------------------------ */

G2Z__PRIVATE g2z_status g2z__cpu_cast_act(g2z_device *device, void *to, const float *from,
                                          size_t n) {
  G2Z__PARALLEL((double)n)
  for (int64_t i = 0; i < (int64_t)n; i++) ((float *)to)[i] = g2z__round(device->dtype, from[i]);
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_cast_grad(g2z_device *device, void *to, const float *from,
                                           size_t n) {
  G2Z__PARALLEL((double)n)
  for (int64_t i = 0; i < (int64_t)n; i++)
    ((float *)to)[i] = g2z__round(device->grad_dtype, from[i]);
  return G2Z_OK;
}

/* ----- embedding -------------------------------------------------------- */

G2Z__PRIVATE g2z_status g2z__cpu_embed_fwd(g2z_device *device, const g2z_embed_fwd *op) {
  const int B = op->B, T = op->T, C = op->C;
  G2Z_ASSERT(g2z__embed_fwd_whole(op));
  G2Z__PARALLEL(2.0 * B * T * C)
  for (int n = 0; n < B * T; n++) {
    float *to = (float *)op->out + (size_t)n * (size_t)C;
    const float *token = (const float *)op->wte + (size_t)op->tokens[n] * (size_t)C;
    const float *position = (const float *)op->wpe + (size_t)(n % T) * (size_t)C;
    for (int c = 0; c < C; c++)
      to[c] = g2z__round(device->dtype, (token[c] + position[c]) *
                                           g2z__cpu_row_factor(&op->dropout, n, c, C));
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_embed_next(g2z_device *device, const g2z_embed_next *op) {
  const int B = op->B, C = op->C;
  G2Z_ASSERT(g2z__embed_next_whole(op));
  for (ptrdiff_t b = 0; b < B; b++) {
    const float *wpe = (const float *)op->wpe + (ptrdiff_t)op->positions[b] * C;
    const g2z_embed_fwd one = {.out = (float *)op->out + b * C, .tokens = op->tokens + b,
                               .wte = op->wte, .wpe = wpe, .B = 1, .T = 1, .C = C};
    g2z__cpu_embed_fwd(device, &one);
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_embed_bwd(g2z_device *device, const g2z_embed_bwd *op) {
  const int B = op->B, T = op->T, C = op->C;
  G2Z_ASSERT(g2z__embed_bwd_whole(op));
  G2Z__PARALLEL(3.0 * B * T * C)
  for (int c = 0; c < C; c++) /* equal tokens share a row of dwte: threads split channels */
    for (int t = 0; t < T; t++) {
      float *to = (float *)op->dwpe + ((size_t)t * (size_t)C + (size_t)c);
      double sum = op->mode == G2Z_ACCUMULATE ? (double)*to : 0.0;
      for (int n = t; n < B * T; n += T) {
        float g = ((const float *)op->dout)[(size_t)n * (size_t)C + (size_t)c] *
                  g2z__cpu_row_factor(&op->dropout, n, c, C);
        sum += (double)g;
        if (op->dwte) op->dwte[(size_t)op->tokens[n] * (size_t)C + (size_t)c] += g;
      }
      *to = g2z__round(device->grad_dtype, (float)sum);
    }
  return G2Z_OK;
}

/* Insertion sort, which keeps the order of equal tokens. */
G2Z__PRIVATE g2z_status g2z__cpu_embed_order(g2z_device *device, int32_t *order,
                                             const int32_t *tokens, int N) {
  (void)device;
  for (int n = 0; n < N; n++) {
    int at = n;
    for (; at > 0 && order[at - 1] > tokens[n]; at--) {
      order[at] = order[at - 1];
      order[N + at] = order[N + at - 1];
    }
    order[at] = tokens[n];
    order[N + at] = n;
  }
  return G2Z_OK;
}

/* The first of equal tokens adds up all their rows, so that threads can split distinct tokens. */
G2Z__PRIVATE g2z_status g2z__cpu_embed_add(g2z_device *device, const g2z_embed_add *op) {
  const int N = op->N, C = op->C;
  G2Z_ASSERT(g2z__embed_add_whole(op));
  G2Z__PARALLEL(2.0 * op->count * N * C)
  for (int first = 0; first < N; first++) {
    if (first && op->order[first - 1] == op->order[first]) continue;
    size_t row = (size_t)op->order[first] * (size_t)C;
    for (const g2z_row_part *part = op->parts; part < op->parts + op->count; part++)
      for (size_t c = 0; c < (size_t)C; c++) {
        if (row + c < part->first || row + c - part->first >= part->elements) continue;
        float sum = 0, *to = (float *)op->grads + part->at + (row + c - part->first);
        for (int n = first; n < N && op->order[n] == op->order[first]; n++)
          sum += ((const float *)op->rows)[(size_t)op->order[N + n] * (size_t)C + c];
        *to = g2z__round(device->grad_dtype, *to + sum);
      }
  }
  return G2Z_OK;
}

/* ----- LayerNorm -------------------------------------------------------- */

G2Z__PRIVATE g2z_status g2z__cpu_layernorm_fwd(g2z_device *device, const g2z_layernorm_fwd *op) {
  const int N = op->N, C = op->C;
  G2Z_ASSERT(g2z__layernorm_fwd_whole(op));
  const float *scale = (const float *)op->w, *shift = (const float *)op->b;
  G2Z__PARALLEL(8.0 * N * C)
  for (int n = 0; n < N; n++) {
    const float *from = (const float *)op->x + (size_t)n * (size_t)C;
    float *to = (float *)op->y + (size_t)n * (size_t)C;
    double sum = 0, squares = 0;
    for (int c = 0; c < C; c++) sum += (double)from[c];
    float m = (float)(sum / C);
    for (int c = 0; c < C; c++) squares += (double)(from[c] - m) * (double)(from[c] - m);
    float r = (float)(1.0 / sqrt(squares / C + (double)G2Z_LAYERNORM_EPS));
    for (int c = 0; c < C; c++)
      to[c] = g2z__round(device->dtype, (from[c] - m) * r * scale[c] + shift[c]);
    op->mean[n] = m;
    op->rstd[n] = r;
  }
  return G2Z_OK;
}

/* With g = dy * w and xhat = (x - mean) * rstd:
 *   dx = rstd * (g - average(g) - xhat * average(g * xhat)),   dres = (or +=) dx,
 *   dropped = dropout'(dres), which starts from the rounded dres.
 * dw = (or +=) the column sums of dy * xhat, db of dy, dbias of dropped. */
G2Z__PRIVATE g2z_status g2z__cpu_layernorm_bwd(g2z_device *device, const g2z_layernorm_bwd *op) {
  const int N = op->N, C = op->C;
  G2Z_ASSERT(g2z__layernorm_bwd_whole(op));
  int drops = op->dropped && g2z__dropout_on(&op->dropout);
  const float *scale = (const float *)op->w;
  G2Z__PARALLEL(12.0 * N * C)
  for (int n = 0; n < N; n++) {
    size_t at = (size_t)n * (size_t)C;
    const float *out = (const float *)op->dy + at, *in = (const float *)op->x + at;
    float *to = (float *)op->dres + at;
    double sum = 0, product = 0;
    for (int c = 0; c < C; c++) {
      float g = out[c] * scale[c];
      sum += (double)g;
      product += (double)(g * ((in[c] - op->mean[n]) * op->rstd[n]));
    }
    float average = (float)(sum / C), slope = (float)(product / C);
    for (int c = 0; c < C; c++) {
      float xhat = (in[c] - op->mean[n]) * op->rstd[n];
      float dx = op->rstd[n] * (out[c] * scale[c] - average - xhat * slope);
      if (op->res_mode == G2Z_ACCUMULATE) dx += to[c];
      to[c] = g2z__round(device->dtype, dx);
    }
    if (!drops) continue;
    float *cut = (float *)op->dropped + at;
    for (int c = 0; c < C; c++)
      cut[c] = g2z__round(device->dtype, to[c] * g2z__cpu_row_factor(&op->dropout, n, c, C));
  }
  g2z__cpu_column_sums(device->grad_dtype, op->dw, op->mode, op->dy, op->x, op->mean, op->rstd, N,
                       C);
  g2z__cpu_column_sums(device->grad_dtype, op->db, op->mode, op->dy, NULL, NULL, NULL, N, C);
  if (op->dbias) {
    const void *below = drops ? op->dropped : op->dres;
    g2z__cpu_column_sums(device->grad_dtype, op->dbias, op->mode, below, NULL, NULL, NULL, N, C);
  }
  return G2Z_OK;
}

/* ----- linear ----------------------------------------------------------- */

/* to[n] = from[n] * scale rounded to e4m3, divided by scale again. Adds the number of elements that
 * became 448 or are NaN to *clamped, unless this is NULL. */
G2Z__PRIVATE void g2z__cpu_e4m3(float *to, const float *from, size_t n, float scale,
                                double *clamped) {
  const float most = 448 / scale; /* exact: scale is a power of two */
  int64_t count = 0;
  G2Z__PARALLEL(10.0 * (double)n)
  for (int64_t i = 0; i < (int64_t)n; i++) to[i] = g2z__round_e4m3(from[i] * scale) / scale;
  if (!clamped) return;
  for (size_t i = 0; i < n; i++) count += !(fabsf(to[i]) < most);
  *clamped += (double)count;
}
/* to[n] = from[n] rounded to e5m2. */
G2Z__PRIVATE void g2z__cpu_e5m2(float *to, const float *from, size_t n) {
  G2Z__PARALLEL(10.0 * (double)n)
  for (int64_t i = 0; i < (int64_t)n; i++) to[i] = g2z__round_e5m2(from[i]);
}

G2Z__PRIVATE g2z_status g2z__cpu_linear_fwd(g2z_device *device, const g2z_linear_fwd *op) {
  const int N = op->N, K = op->K, O = op->O;
  G2Z_ASSERT(g2z__linear_fwd_whole(op));
  size_t n_x = (size_t)N * (size_t)K, n_w = (size_t)K * (size_t)O;
  const void *x = op->x, *w = op->w;
  float *rounded = NULL;
  if (op->narrow_x) {
    G2Z_TRY(G2Z_NEW(device->services, n_x + n_w, &rounded));
    g2z__cpu_e4m3(rounded, (const float *)x, n_x, G2Z__E4M3_X, device->clamped_inputs);
    g2z__cpu_e4m3(rounded + n_x, (const float *)w, n_w, G2Z__E4M3_W, device->clamped_weights);
    x = rounded;
    w = rounded + n_x;
  }
  g2z__cpu_product p = g2z__cpu_product_of(N, O, K, g2z__cpu_rows(x, K), g2z__cpu_rows(w, O));
  p.out = (float *)op->y;
  p.dtype = device->dtype;
  p.bias = (const float *)op->bias;
  p.slope = (float *)op->slope;
  p.residual = (const float *)op->residual;
  p.dropout = &op->dropout;
  const g2z_status status = g2z__cpu_multiply(device, &p);
  g2z_release(device->services, rounded);
  return status;
}

G2Z__PRIVATE g2z_status g2z__cpu_linear_bwd_data(g2z_device *device,
                                                 const g2z_linear_bwd_data *op) {
  const int N = op->N, K = op->K, O = op->O;
  G2Z_ASSERT(g2z__linear_bwd_data_whole(op));
  size_t n_dy = (size_t)N * (size_t)O, n_w = (size_t)K * (size_t)O;
  const void *dy = op->dy, *w = op->w;
  float *rounded = NULL;
  if (op->narrow) {
    G2Z_TRY(G2Z_NEW(device->services, n_dy + n_w, &rounded));
    g2z__cpu_e5m2(rounded, (const float *)dy, n_dy);
    g2z__cpu_e4m3(rounded + n_dy, (const float *)w, n_w, G2Z__E4M3_W, NULL);
    dy = rounded;
    w = rounded + n_dy;
  }
  g2z__cpu_product p =
      g2z__cpu_product_of(N, K, O, g2z__cpu_rows(dy, O), g2z__cpu_transposed(w, O));
  p.out = (float *)op->dx;
  p.dtype = device->dtype;
  p.times = (const float *)op->slope;
  const g2z_status status = g2z__cpu_multiply(device, &p);
  g2z_release(device->services, rounded);
  if (status == G2Z_OK && op->slope)
    g2z__cpu_column_sums(device->grad_dtype, op->dbias, op->mode, op->dx, NULL, NULL, NULL, N, K);
  return status;
}

G2Z__PRIVATE g2z_status g2z__cpu_linear_bwd_weight(g2z_device *device,
                                                   const g2z_linear_bwd_weight *op) {
  const int N = op->N, K = op->K, O = op->O;
  G2Z_ASSERT(g2z__linear_bwd_weight_whole(op));
  const size_t n_x = (size_t)N * (size_t)K, n_dy = (size_t)N * (size_t)O;
  const void *x = op->x, *dy = op->dy;
  float *rounded = NULL;
  if (op->narrow_dy) {
    G2Z_TRY(G2Z_NEW(device->services, n_x + n_dy, &rounded));
    g2z__cpu_e4m3(rounded, (const float *)x, n_x, G2Z__E4M3_X, NULL);
    g2z__cpu_e5m2(rounded + n_x, (const float *)dy, n_dy);
    x = rounded;
    dy = rounded + n_x;
  }
  g2z__cpu_product p =
      g2z__cpu_product_of(K, O, N, g2z__cpu_transposed(x, K), g2z__cpu_rows(dy, O));
  p.out = (float *)op->dw;
  p.dtype = device->grad_dtype;
  p.mode = op->mode;
  const g2z_status status = g2z__cpu_multiply(device, &p);
  g2z_release(device->services, rounded);
  return status;
}

/* ----- attention --------------------------------------------------------
 * A thread takes a block of a head's queries, and all keys up to the last of them. Its scores are a
 * product, and so are the sums over keys; softmax lies between. After softmax a key that comes
 * after its query has weight 0, so a query has the same bits in a block and alone. */

typedef struct g2z__cpu_block {
  const float *q;              /* of the head's token 0 in qkv; its k is C further, its v 2 C */
  int C, HS, first, count;     /* queries first to first + count - 1 */
  const g2z_dropout *dropout;  /* of sequence b */
  int b;
  uint64_t element, row;       /* dropout's element of query 0 and key 0; elements per query */
} g2z__cpu_block;

/* scores[count][keys] = HS^-1/2 q k, where keys = first + count. */
G2Z__PRIVATE void g2z__cpu_scores(const g2z__cpu_block *block, float *scores, float *memory) {
  const int C = block->C, keys = block->first + block->count;
  const float scale = 1.0f / sqrtf((float)block->HS);
  g2z__cpu_product p = g2z__cpu_product_of(
      block->count, keys, block->HS,
      g2z__cpu_rows(block->q + (ptrdiff_t)block->first * 3 * C, 3 * C),
      g2z__cpu_transposed(block->q + C, 3 * C));
  p.out = scores;
  g2z__cpu_multiply_here(&p, memory);
  for (ptrdiff_t i = 0; i < (ptrdiff_t)block->count * keys; i++) scores[i] *= scale;
}

/* With s = the scores, max = the largest of a query and p = exp(s - max): out[count][C] = sum of
 * f v p / sum of p, where f is the dropout factor; lse[count], unless NULL: max + log(sum of p). */
G2Z__PRIVATE void g2z__cpu_attend(g2z_dtype dtype, const g2z__cpu_block *block, float *out,
                                  float *lse, float *memory) {
  const int C = block->C, keys = block->first + block->count;
  float *scores = memory + G2Z__TASK_FLOATS;
  g2z__cpu_scores(block, scores, memory);
  for (int i = 0; i < block->count; i++) {
    const int query = block->first + i, seen = query + 1;
    float *p = scores + (ptrdiff_t)i * keys;
    const float max = g2z__cpu_largest(p, seen);
    g2z__cpu_exps(p, max, seen);
    const double sum = g2z__cpu_sum(p, seen);
    for (int key = 0; key < seen; key++) p[key] /= (float)sum;
    for (int key = seen; key < keys; key++) p[key] = 0;
    g2z__cpu_drop(p, seen, block->dropout, block->b, block->element + (uint64_t)query * block->row);
    if (lse) lse[i] = (float)((double)max + log(sum));
  }
  g2z__cpu_product p = g2z__cpu_product_of(block->count, block->HS, keys,
                                           g2z__cpu_rows(scores, keys),
                                           g2z__cpu_rows(block->q + 2 * C, 3 * C));
  p.out = out;
  p.out_row = C;
  p.dtype = dtype;
  g2z__cpu_multiply_here(&p, memory);
}

G2Z__PRIVATE g2z_status g2z__cpu_attention_fwd(g2z_device *device, const g2z_attention_fwd *op) {
  const int B = op->B, T = op->T, C = op->C, NH = op->NH;
  G2Z_ASSERT(g2z__attention_fwd_whole(op));
  const int HS = C / NH, blocks = (T + G2Z__QUERIES - 1) / G2Z__QUERIES;
  g2z__cpu_memory memory;
  G2Z_TRY(g2z__cpu_reserve(device, (size_t)G2Z__QUERIES * (size_t)T, &memory));
  G2Z__PARALLEL(6.0 * B * T * T * C)
  for (int64_t i = 0; i < (int64_t)B * NH * blocks; i++) {
    const int first = (int)(i % blocks) * G2Z__QUERIES;
    const int h = (int)(i / blocks % NH), b = (int)(i / blocks / NH);
    const g2z__cpu_block block = {
        (const float *)op->qkv + ((ptrdiff_t)b * T * 3 * C + (ptrdiff_t)h * HS), C, HS, first,
        G2Z__MIN(G2Z__QUERIES, T - first), &op->dropout, b, (uint64_t)h * (uint64_t)T * (uint64_t)T,
        (uint64_t)T};
    g2z__cpu_attend(device->dtype, &block,
                    (float *)op->out + (((ptrdiff_t)b * T + first) * C + (ptrdiff_t)h * HS),
                    op->lse + ((ptrdiff_t)b * NH + h) * T + first, g2z__cpu_mine(&memory));
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_attention_next(g2z_device *device, const g2z_attention_next *op) {
  const int B = op->B, T = op->T, C = op->C, NH = op->NH;
  G2Z_ASSERT(g2z__attention_next_whole(op));
  const int HS = C / NH;
  g2z__cpu_memory memory;
  G2Z_TRY(g2z__cpu_reserve(device, (size_t)T, &memory));
  for (ptrdiff_t b = 0; b < B; b++)
    memcpy((float *)op->past + (b * T + op->positions[b]) * 3 * C,
           (const float *)op->rows + b * 3 * C, 3 * (size_t)C * sizeof(float));
  G2Z__PARALLEL(6.0 * B * T * C)
  for (int i = 0; i < B * NH; i++) {
    const ptrdiff_t b = i / NH, h = i % NH;
    const g2z__cpu_block block = {(const float *)op->past + (b * T * 3 * C + h * HS), C, HS,
                                  op->positions[b], 1, NULL, (int)b, 0, 0};
    g2z__cpu_attend(device->dtype, &block, (float *)op->out + (b * C + h * HS), NULL,
                    g2z__cpu_mine(&memory));
  }
  return G2Z_OK;
}

/* The gradients of a block: with p = exp(s - lse), the softmax, and ds = HS^-1/2 p (f dout v -
 * dout out), dq = ds k, dk += ds q and dv += f p dout. dq: of the head's token 0 in dqkv. */
G2Z__PRIVATE void g2z__cpu_attend_bwd(const g2z__cpu_block *block, float *dq, const float *out,
                                      const float *dout, const float *lse, float *memory) {
  const int C = block->C, HS = block->HS, count = block->count, keys = block->first + count;
  const float scale = 1.0f / sqrtf((float)HS), *q = block->q + (ptrdiff_t)block->first * 3 * C;
  float *p = memory + G2Z__TASK_FLOATS, *ds = p + (ptrdiff_t)count * keys;
  g2z__cpu_scores(block, p, memory);
  g2z__cpu_product product = g2z__cpu_product_of(count, keys, HS, g2z__cpu_rows(dout, C),
                                                 g2z__cpu_transposed(block->q + 2 * C, 3 * C));
  product.out = ds;
  g2z__cpu_multiply_here(&product, memory);
  for (int i = 0; i < count; i++) {
    const int query = block->first + i, seen = query + 1;
    const uint64_t element = block->element + (uint64_t)query * block->row;
    float *pi = p + (ptrdiff_t)i * keys, *di = ds + (ptrdiff_t)i * keys;
    const float d = g2z__cpu_dot(dout + (ptrdiff_t)i * C, out + (ptrdiff_t)i * C, HS);
    g2z__cpu_exps(pi, lse[i], seen);
    g2z__cpu_drop(di, seen, block->dropout, block->b, element);
    for (int key = 0; key < seen; key++) di[key] = scale * pi[key] * (di[key] - d);
    g2z__cpu_drop(pi, seen, block->dropout, block->b, element);
    for (int key = seen; key < keys; key++) pi[key] = di[key] = 0;
  }
  product = g2z__cpu_product_of(count, HS, keys, g2z__cpu_rows(ds, keys),
                                g2z__cpu_rows(block->q + C, 3 * C));
  product.out = dq + (ptrdiff_t)block->first * 3 * C;
  product.out_row = 3 * C;
  g2z__cpu_multiply_here(&product, memory);
  product = g2z__cpu_product_of(keys, HS, count, g2z__cpu_transposed(ds, keys),
                                g2z__cpu_rows(q, 3 * C));
  product.out = dq + C;
  product.out_row = 3 * C;
  product.mode = G2Z_ACCUMULATE;
  g2z__cpu_multiply_here(&product, memory);
  product.a = g2z__cpu_transposed(p, keys);
  product.b = g2z__cpu_rows(dout, C);
  product.out = dq + 2 * C;
  g2z__cpu_multiply_here(&product, memory);
}

/* dqkv adds up in fp32 and is rounded at the end; dbias sums the rounded dqkv. */
G2Z__PRIVATE g2z_status g2z__cpu_attention_bwd(g2z_device *device, const g2z_attention_bwd *op) {
  const int B = op->B, T = op->T, C = op->C, NH = op->NH;
  G2Z_ASSERT(g2z__attention_bwd_whole(op));
  const int HS = C / NH, row = 3 * C;
  g2z__cpu_memory memory;
  G2Z_TRY(g2z__cpu_reserve(device, 2 * (size_t)G2Z__QUERIES * (size_t)T, &memory));
  memset(op->dqkv, 0, (size_t)B * (size_t)T * (size_t)row * sizeof(float));
  G2Z__PARALLEL(10.0 * B * T * T * C)
  for (int i = 0; i < B * NH; i++) { /* one thread owns a head's dk and dv */
    const ptrdiff_t h = i % NH, b = i / NH, at = b * T * row + h * HS;
    for (int first = 0; first < T; first += G2Z__QUERIES) {
      const ptrdiff_t to = (b * T + first) * C + h * HS;
      const g2z__cpu_block block = {(const float *)op->qkv + at, C, HS, first,
                                    G2Z__MIN(G2Z__QUERIES, T - first), &op->dropout, (int)b,
                                    (uint64_t)h * (uint64_t)T * (uint64_t)T, (uint64_t)T};
      g2z__cpu_attend_bwd(&block, (float *)op->dqkv + at, (const float *)op->out + to,
                          (const float *)op->dout + to, op->lse + (ptrdiff_t)i * T + first,
                          g2z__cpu_mine(&memory));
    }
  }
  g2z__cpu_cast_act(device, op->dqkv, (const float *)op->dqkv, (size_t)B * (size_t)T * (size_t)row);
  g2z__cpu_column_sums(device->grad_dtype, op->dbias, op->mode, op->dqkv, NULL, NULL, NULL, B * T,
                       row);
  return G2Z_OK;
}

/* ----- LM head ---------------------------------------------------------- */

/* The loss of one token, log(sum of exp(logits)) - logits[target]. Overwrites logits[V] with the
 * rounded gradient: `gradient` * (softmax - 1 at the target, softmax elsewhere). */
G2Z__PRIVATE float g2z__cpu_classify(g2z_dtype dtype, float *logits, int V, int32_t target,
                                     float gradient) {
  if (target < 0) {
    memset(logits, 0, (size_t)V * sizeof *logits);
    return 0;
  }
  const float at_target = logits[target], max = g2z__cpu_largest(logits, V);
  g2z__cpu_exps(logits, max, V);
  const double sum = g2z__cpu_sum(logits, V);
  for (int i = 0; i < V; i++) {
    float p = logits[i] / (float)sum;
    logits[i] = g2z__round(dtype, (i == target ? p - 1.0f : p) * gradient);
  }
  return (float)(log(sum) + ((double)max - (double)at_target));
}

/* logits = h[n,C] wte[V,C]^T. A row of logits has `row` numbers; the first V are written. */
G2Z__PRIVATE g2z_status g2z__cpu_head_multiply(g2z_device *device, g2z_dtype dtype, float *logits,
                                               int row, const float *h, const float *wte, int n,
                                               int C, int V) {
  g2z__cpu_product p =
      g2z__cpu_product_of(n, V, C, g2z__cpu_rows(h, C), g2z__cpu_transposed(wte, C));
  p.out = logits;
  p.out_row = row;
  p.dtype = dtype;
  return g2z__cpu_multiply(device, &p);
}

/* dwte = (or +=) dlogits^T h[n,C] for a chunk, whose first row is `first`. */
G2Z__PRIVATE g2z_status g2z__cpu_head_dwte(g2z_device *device, const g2z_head_loss *op, int first,
                                           int n, const float *h) {
  g2z__cpu_product p = g2z__cpu_product_of(
      op->V, op->C, n, g2z__cpu_transposed(op->logits, op->Vp), g2z__cpu_rows(h, op->C));
  p.out = (float *)op->dwte;
  p.dtype = op->dwte_dtype;
  p.mode = op->mode;
  if (first > 0) p.mode = G2Z_ACCUMULATE;
  return g2z__cpu_multiply(device, &p);
}

/* dh[n,C] = dlogits wte for a chunk. */
G2Z__PRIVATE g2z_status g2z__cpu_head_dh(g2z_device *device, const g2z_head_loss *op,
                                         g2z_dtype dtype, float *dh, int n, const float *wte) {
  g2z__cpu_product p = g2z__cpu_product_of(n, op->C, op->V, g2z__cpu_rows(op->logits, op->Vp),
                                           g2z__cpu_rows(wte, op->C));
  p.out = dh;
  p.dtype = dtype;
  return g2z__cpu_multiply(device, &p);
}

/* From the logits of rows first to first + n - 1: their losses and, if op->dh, their gradients. */
G2Z__PRIVATE g2z_status g2z__cpu_head_plain(g2z_device *device, const g2z_head_loss *op, int first,
                                            int n, float gradient) {
  const size_t at = (size_t)first * (size_t)op->C;
  G2Z__PARALLEL(30.0 * n * op->V)
  for (int i = 0; i < n; i++) {
    float *row = (float *)op->logits + (size_t)i * (size_t)op->Vp;
    op->losses[first + i] =
        g2z__cpu_classify(device->dtype, row, op->V, op->targets[first + i], gradient);
  }
  if (!op->dh) return G2Z_OK;
  G2Z_TRY(g2z__cpu_head_dwte(device, op, first, n, (const float *)op->h + at));
  return g2z__cpu_head_dh(device, op, device->dtype, (float *)op->dh + at, n,
                          (const float *)op->wte);
}

/* The same with products of 8 bits for dwte and dh. dlogits are z * (softmax - 1 at the target) in
 * e5m2, where each row has its own z. So dwte's right operand, h in e4m3, is multiplied by
 * gradient / z. It is stored in dh, which is computed last and multiplied by the same factor.
 * lost[n]: what rounding took from a row's gradient at the target; dh gets it back. */
G2Z__PRIVATE g2z_status g2z__cpu_head_eight(g2z_device *device, const g2z_head_loss *op, int first,
                                            int n, float gradient, const float *wte, float *lost) {
  const int C = op->C, V = op->V;
  const size_t at = (size_t)first * (size_t)C;
  G2Z__PARALLEL(30.0 * n * V)
  for (int i = 0; i < n; i++) {
    const int target = op->targets[first + i];
    const float z = exp2f(8 + g2z__head_part(i)); /* so that rounding is random */
    float *row = (float *)op->logits + (size_t)i * (size_t)op->Vp;
    op->losses[first + i] = g2z__cpu_classify(G2Z_FP32, row, V, target, z);
    lost[i] = 0;
    if (target >= 0) lost[i] = row[target] * G2Z__E5M2_SHRINKS - g2z__round_e5m2(row[target]);
    for (int v = 0; v < V; v++) row[v] = g2z__round_e5m2(row[v]);
    const float *h = (const float *)op->h + at + (size_t)i * (size_t)C;
    float *right = (float *)op->dh + at + (size_t)i * (size_t)C;
    for (int c = 0; c < C; c++)
      right[c] = g2z__round_e4m3(h[c] * (0x1p9f / z)) * (gradient * 0x1p-9f);
  }
  G2Z_TRY(g2z__cpu_head_dwte(device, op, first, n, (const float *)op->dh + at));
  G2Z_TRY(g2z__cpu_head_dh(device, op, G2Z_FP32, (float *)op->dh + at, n, wte));
  for (int i = 0; i < n; i++) {
    const float z = exp2f(8 + g2z__head_part(i));
    const int target = G2Z__MAX(op->targets[first + i], 0); /* without a target lost[i] is 0 */
    const float *w = wte + (size_t)target * (size_t)C;
    float *to = (float *)op->dh + at + (size_t)i * (size_t)C;
    for (int c = 0; c < C; c++)
      to[c] = g2z__round(device->dtype, (to[c] + lost[i] * w[c]) * (gradient / z));
  }
  return G2Z_OK;
}

/* Per chunk: logits = h wte^T; loss, dlogits; dwte = (or +=) dlogits^T h; dh = dlogits wte. With
 * fp8, a pass with gradients computes the logits from e4m3. With G2Z_FP8_ALL it also computes dwte
 * and dh from 8 bits. */
G2Z__PRIVATE g2z_status g2z__cpu_head_loss(g2z_device *device, const g2z_head_loss *op) {
  const int N = op->N, C = op->C, V = op->V, Vp = op->Vp, chunk = op->chunk;
  G2Z_ASSERT(g2z__head_loss_whole(op));
  G2Z_ASSERT(op->dwte_dtype == G2Z_FP32 || (N <= chunk && op->mode == G2Z_OVERWRITE));
  const float *h = (const float *)op->h, *wte = (const float *)op->wte;
  const size_t row = (size_t)C, hs = (size_t)N * row, words = (size_t)V * row;
  float gradient = 0, *narrow = NULL;
  if (op->dh) gradient = op->dloss * op->state->loss_scale;
  if (op->dh && device->fp8) {
    G2Z_TRY(G2Z_NEW(device->services, hs + words + (size_t)N, &narrow));
    for (size_t at = 0; at < hs; at += row) { /* each row of h has its own scale */
      float most = 0;
      for (size_t c = 0; c < row; c++) most = G2Z__MAX(fabsf(h[at + c]), most);
      g2z__cpu_e4m3(narrow + at, h + at, row, g2z__e4m3_scale(most), NULL);
    }
    g2z__cpu_e4m3(narrow + hs, wte, words, G2Z__E4M3_W, device->clamped_weights);
    h = narrow;
    wte = narrow + hs;
  }
  g2z_status status = G2Z_OK;
  for (int first = 0; first < N && status == G2Z_OK; first += chunk) {
    const int n = G2Z__MIN(chunk, N - first);
    status = g2z__cpu_head_multiply(device, device->dtype, (float *)op->logits, Vp,
                                    h + (size_t)first * row, wte, n, C, V);
    if (status != G2Z_OK) break;
    if (op->dh && device->fp8 == G2Z_FP8_ALL)
      status = g2z__cpu_head_eight(device, op, first, n, gradient, wte, narrow + hs + words);
    else
      status = g2z__cpu_head_plain(device, op, first, n, gradient);
  }
  g2z_release(device->services, narrow);
  G2Z_TRY(status);
  for (int i = 0; i < N; i++) *op->loss_sum += (double)op->losses[i];
  if (op->dh && op->mode == G2Z_OVERWRITE)
    memset((float *)op->dwte + words, 0, (size_t)(Vp - V) * row * sizeof(float));
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_head_logits(g2z_device *device, float *logits, const void *h,
                                             const void *wte, int n, int C, int V) {
  return g2z__cpu_head_multiply(device, G2Z_FP32, logits, V, (const float *)h, (const float *)wte,
                                n, C, V);
}

/* ----- optimizer: the arithmetic of an element is in room 08 ------------- */

G2Z__PRIVATE g2z_status g2z__cpu_grad_add(g2z_device *device, void *to, const void *from,
                                          g2z_write mode, size_t n) {
  float *out = (float *)to;
  const float *in = (const float *)from;
  if (mode == G2Z_OVERWRITE) {
    for (size_t i = 0; i < n; i++) out[i] = in[i];
    return G2Z_OK;
  }
  for (size_t i = 0; i < n; i++) out[i] = g2z__round(device->grad_dtype, out[i] + in[i]);
  return G2Z_OK;
}

/* The sum of x[n]^2: element i is added in lane i % 16. */
G2Z__PRIVATE double g2z__cpu_squares(const float *x, size_t n) {
  double lanes[G2Z__LANES] = {0}, sum = 0;
  size_t i = 0;
  for (; i + G2Z__LANES <= n; i += G2Z__LANES)
    for (int j = 0; j < G2Z__LANES; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
  for (; i < n; i++) lanes[i % G2Z__LANES] += (double)x[i] * (double)x[i];
  for (int j = 0; j < G2Z__LANES; j++) sum += lanes[j];
  return sum;
}

#define G2Z__PARTS 64 /* of a range. Threads share them; a fixed number gives one order. */

/* Squares of fp32 cannot overflow a double: the sum is finite if and only if all elements are. */
G2Z__PRIVATE g2z_status g2z__cpu_grad_sumsq(g2z_device *device, double *sum, const void *grads,
                                            const g2z_range *ranges, int count) {
  (void)device;
  for (int i = 0; i < count; i++) {
    const float *from = (const float *)grads + ranges[i].begin;
    const size_t elements = ranges[i].elements, part = elements / G2Z__PARTS + 1;
    double parts[G2Z__PARTS], squares = 0;
    G2Z__PARALLEL(2.0 * (double)elements)
    for (int p = 0; p < G2Z__PARTS; p++) {
      const size_t begin = G2Z__MIN((size_t)p * part, elements);
      parts[p] = g2z__cpu_squares(from + begin, G2Z__MIN(part, elements - begin));
    }
    for (int p = 0; p < G2Z__PARTS; p++) squares += parts[p];
    *sum += squares;
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_decide(g2z_device *device, g2z_step_state *state,
                                        const g2z_verdict *verdict,
                                        const g2z_optimizer_config *config, int64_t tokens) {
  int dynamic = device->dtype == G2Z_FP16 && config->loss_scale_dynamic;
  g2z__decide(state, verdict, config, dynamic, tokens);
  return G2Z_OK;
}

#define G2Z__RUN_OF 512 /* elements of AdamW whose square roots are computed together */

/* g2z__adamw_element for n elements, at most G2Z__RUN_OF; rounded masters become weights. */
G2Z__PRIVATE void g2z__cpu_adamw_run(g2z__adamw_factors factors, g2z_dtype dtype,
                                     float *__restrict__ weights, float *__restrict__ masters,
                                     float *__restrict__ first, float *__restrict__ second,
                                     const float *__restrict__ gradients, int n) {
  float roots[G2Z__RUN_OF];
  for (int e = 0; e < n; e++) g2z__adamw_moments(&factors, first + e, second + e, gradients[e]);
  g2z__cpu_roots(roots, second, n);
  for (int e = 0; e < n; e++)
    masters[e] = g2z__adamw_weight(&factors, masters[e], first[e], roots[e]);
  g2z__cpu_store(dtype, weights, masters, n);
}

G2Z__PRIVATE g2z_status g2z__cpu_adamw(g2z_device *device, const g2z_update *u, size_t begin,
                                       size_t end) {
  if (u->state->skip) return G2Z_OK;
  for (size_t i = begin; i < end; i++) {
    g2z_update_range range = u->host_ranges[i];
    g2z__adamw_factors factors = g2z__adamw_prepare(u->config, u->state, range.decay);
    float *weights = (float *)u->params + range.own_param_at, *masters = u->master + range.shard_at;
    float *first = (float *)u->m + range.shard_at, *second = (float *)u->v + range.v_at;
    const float *gradients = (const float *)u->sums + range.sum_at;
    G2Z__PARALLEL(16.0 * (double)range.elements)
    for (int64_t e = 0; e < (int64_t)range.elements; e += G2Z__RUN_OF) {
      const int n = (int)G2Z__MIN(G2Z__RUN_OF, (int64_t)range.elements - e);
      g2z__cpu_adamw_run(factors, device->dtype, weights + e, masters + e, first + e, second + e,
                         gradients + e, n);
    }
    if (!u->config->moments_bf16) continue;
    const int64_t from = (int64_t)range.canonical, to = from + (int64_t)range.elements;
    G2Z__PARALLEL(16.0 * (double)range.elements)
    for (int64_t group = from / 4; group < (to + 3) / 4; group++) { /* its elements share a draw */
      uint32_t random[4];
      g2z__moments_random(u->state, (uint64_t)group, random);
      for (int64_t k = 4 * group; k < 4 * group + 4; k++) {
        if (k < from || k >= to) continue;
        first[k - from] = g2z__round_random(first[k - from], random[k % 4]);
        second[k - from] = g2z__round_random(second[k - from], random[k % 4] >> 16);
      }
    }
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_momentum(g2z_device *device, void *u, const g2z_update *update,
                                          size_t begin, size_t end) {
  const float beta = update->config->momentum, multiplier = update->state->grad_multiplier;
  (void)device;
  if (update->state->skip) return G2Z_OK;
  for (size_t i = begin; i < end; i++) {
    const g2z_update_range range = update->host_ranges[i];
    const float *gradients = (const float *)update->sums + range.sum_at;
    float *m = (float *)update->m + range.shard_at, *out = (float *)u + range.u_at;
    G2Z__PARALLEL(6.0 * (double)range.elements)
    for (int64_t e = 0; e < (int64_t)range.elements; e++)
      out[e] = g2z__momentum_element(beta, multiplier, m + e, gradients[e]);
  }
  return G2Z_OK;
}

/* One matrix at a time: [rows,columns], whose rows are `row` elements apart. X is [m,n] with m <=
 * n: the matrix, or its transpose. */
G2Z__PRIVATE g2z_status g2z__cpu_orthogonalize(g2z_device *device, void *area,
                                               const g2z_matrices *shapes, int count, void *work,
                                               size_t work_bytes) {
  (void)work_bytes;
  for (const g2z_matrices *shape = shapes; shape < shapes + count; shape++) {
    const int rows = shape->rows, columns = shape->columns / shape->matrices;
    const int m = G2Z__MIN(rows, columns), n = rows + columns - m;
    const ptrdiff_t row = shape->columns;
    ptrdiff_t down = row, right = 1; /* distances of X's rows and columns in the matrix */
    if (rows != m) {
      down = 1;
      right = row;
    }
    const size_t elements = (size_t)m * (size_t)n, square = (size_t)m * (size_t)m;
    float *now = (float *)work, *next = now + elements, *a = next + elements;
    float *polynomial = a + square;
    for (int i = 0; i < shape->weights * shape->matrices; i++) {
      float *x = (float *)area + shape->at +
                 (size_t)(i / shape->matrices) * (size_t)rows * (size_t)row +
                 (size_t)(i % shape->matrices) * (size_t)columns;
      double squares = 0;
      for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
          squares += (double)x[r * row + c] * (double)x[r * row + c];
      const double factor = squares > 0 ? 1.0 / sqrt(squares) : 0;
      for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++)
          now[(size_t)r * (size_t)n + (size_t)c] =
              (float)(factor * (double)x[r * down + c * right]);
      for (int step = 0; step < G2Z_ORTHOGONALIZE_STEPS; step++) {
        g2z__cpu_product p = g2z__cpu_product_of(m, m, n, g2z__cpu_rows(now, n),
                                                 g2z__cpu_transposed(now, n));
        p.out = a;
        G2Z_TRY(g2z__cpu_multiply(device, &p));
        p = g2z__cpu_product_of(m, m, m, g2z__cpu_rows(a, m), g2z__cpu_rows(a, m));
        p.out = polynomial;
        G2Z_TRY(g2z__cpu_multiply(device, &p));
        for (size_t e = 0; e < square; e++)
          polynomial[e] = G2Z_ORTHOGONALIZE_B * a[e] + G2Z_ORTHOGONALIZE_C * polynomial[e];
        p = g2z__cpu_product_of(m, n, m, g2z__cpu_rows(polynomial, m), g2z__cpu_rows(now, n));
        p.out = next;
        G2Z_TRY(g2z__cpu_multiply(device, &p));
        for (size_t e = 0; e < elements; e++) now[e] = G2Z_ORTHOGONALIZE_A * now[e] + next[e];
      }
      for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++)
          x[r * down + c * right] = now[(size_t)r * (size_t)n + (size_t)c];
    }
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__cpu_muon(g2z_device *device, const void *o, const g2z_update *update,
                                      size_t begin, size_t end) {
  if (update->state->skip) return G2Z_OK;
  for (size_t i = begin; i < end; i++) {
    const g2z_update_range range = update->host_ranges[i];
    const g2z__muon_factors factors =
        g2z__muon_prepare(update->config, update->state, range.decay, range.scale);
    float *weights = (float *)update->params + range.own_param_at;
    float *masters = update->master + range.shard_at;
    const float *from = (const float *)o + range.u_at;
    G2Z__PARALLEL(6.0 * (double)range.elements)
    for (int64_t e = 0; e < (int64_t)range.elements; e++) {
      masters[e] = g2z__muon_element(&factors, masters[e], from[e]);
      weights[e] = g2z__round(device->dtype, masters[e]);
    }
  }
  return G2Z_OK;
}

/* ----- a draw ----------------------------------------------------------- */

/* Counts the tokens whose order is at least `cut`; at a temperature above 0, sums their weights. */
G2Z__PRIVATE double g2z__draw_measure(const float *logits, int vocab, uint32_t cut, float best,
                                      float temperature) {
  double sum = 0;
  for (int i = 0; i < vocab; i++)
    if (g2z__draw_order(logits[i]) >= cut)
      sum += temperature > 0 ? (double)g2z__draw_weight(logits[i], best, temperature) : 1;
  return sum;
}

/* The largest cut whose measure reaches `least`. */
G2Z__PRIVATE uint32_t g2z__draw_cut(const float *logits, int vocab, double least, float best,
                                    float temperature) {
  uint32_t cut = 0;
  for (uint32_t bit = UINT32_C(1) << 31; bit; bit >>= 1)
    if (g2z__draw_measure(logits, vocab, cut | bit, best, temperature) >= least) cut |= bit;
  return cut;
}

/* Draws one of the tokens that top_k and top_p keep, in the order of ids. -1: all are NaN. */
G2Z__PRIVATE int g2z__sample(const float *logits, int vocab, const g2z_sampling *sampling,
                             uint32_t index) {
  const float temperature = sampling->temperature;
  uint32_t cut = 0;
  int best = 0;
  for (int i = 1; i < vocab; i++)
    if (g2z__draw_order(logits[i]) > g2z__draw_order(logits[best])) best = i;
  if (isnan(logits[best])) return -1;
  if (!(temperature > 0)) return best;
  const float top = logits[best];
  if (sampling->top_k > 0 && sampling->top_k < vocab)
    cut = g2z__draw_cut(logits, vocab, sampling->top_k, top, 0);
  double sum = g2z__draw_measure(logits, vocab, cut, top, temperature);
  if (sampling->top_p < 1) {
    cut = g2z__draw_cut(logits, vocab, (double)sampling->top_p * sum, top, temperature);
    sum = g2z__draw_measure(logits, vocab, cut, top, temperature);
  }
  double draw = (double)g2z__draw_uniform(sampling->seed, index) * sum;
  for (int i = 0; i < vocab; i++) {
    if (g2z__draw_order(logits[i]) < cut) continue;
    draw -= (double)g2z__draw_weight(logits[i], top, temperature);
    if (draw < 0) return i;
  }
  return best; /* the sum is 0 or NaN, or rounding left draw >= 0 */
}

G2Z__PRIVATE g2z_status g2z__cpu_draw(g2z_device *device, const g2z_draw *op) {
  const int B = op->B, V = op->V, T = op->T;
  G2Z_ASSERT(g2z__draw_whole(op));
  (void)device;
  G2Z__PARALLEL(10.0 * B * V)
  for (int b = 0; b < B; b++) {
    g2z_sampling own = *op->sampling;
    own.seed += (uint64_t)b;
    const uint32_t index = (uint32_t)op->drawn[b]++;
    op->tokens[b] = g2z__sample(op->logits + (size_t)b * (size_t)V, V, &own, index);
    if (op->positions[b] < T - 1) op->positions[b]++;
  }
  return G2Z_OK;
}

/* ----- the table -------------------------------------------------------- */

G2Z__PRIVATE g2z_status g2z__cpu_graph_begin(g2z_device *device) {
  return g2z_fail(device->services, G2Z_UNSUPPORTED,
                  "device cpu has no graphs: use --graph off, or a GPU");
}

G2Z__PRIVATE void g2z__cpu_span_begin(const g2z_device *device, g2z_span span) {
  if (device->timers) device->timers->begun[span] = g2z_seconds();
}

G2Z__PRIVATE void g2z__cpu_span_end(const g2z_device *device, g2z_span span) {
  if (!device->timers) return;
  g2z__timers_add(device->timers, span, g2z_seconds() - device->timers->begun[span]);
}

G2Z__PRIVATE g2z_status g2z__cpu_tuning(g2z_device *device, char **text) {
  return G2Z_NEW(device->services, 1, text);
}

G2Z__PRIVATE g2z_status g2z__cpu_tuning_read(g2z_device *device, const char *text) {
  (void)device, (void)text; /* a CPU has one algorithm for products */
  return G2Z_OK;
}

static const g2z_ops *g2z__cpu_ops(void) {
  /* Device memory is host memory. Without narrow_weights, products round their weights. */
  static const g2z_ops ops = {
      .allocate = g2z__cpu_allocate,
      .release = g2z__cpu_release,
      .allocate_host = g2z__cpu_allocate,
      .release_host = g2z__cpu_release,
      .upload = g2z__cpu_copy,
      .download = g2z__cpu_copy,
      .zero = g2z__cpu_zero,
      .mark = g2z__cpu_event,
      .wait = g2z__cpu_event,
      .synchronize = g2z__cpu_synchronize,
      .close = g2z__cpu_close,
      .graph_begin = g2z__cpu_graph_begin,
      .span_begin = g2z__cpu_span_begin,
      .span_end = g2z__cpu_span_end,
      .timers_open = g2z__cpu_synchronize,
      .timers_settle = g2z__cpu_synchronize,
      .tuning = g2z__cpu_tuning,
      .tuning_read = g2z__cpu_tuning_read,
      .embed_fwd = g2z__cpu_embed_fwd,
      .embed_bwd = g2z__cpu_embed_bwd,
      .embed_add = g2z__cpu_embed_add,
      .embed_next = g2z__cpu_embed_next,
      .layernorm_fwd = g2z__cpu_layernorm_fwd,
      .layernorm_bwd = g2z__cpu_layernorm_bwd,
      .linear_fwd = g2z__cpu_linear_fwd,
      .linear_bwd_data = g2z__cpu_linear_bwd_data,
      .linear_bwd_weight = g2z__cpu_linear_bwd_weight,
      .attention_fwd = g2z__cpu_attention_fwd,
      .attention_bwd = g2z__cpu_attention_bwd,
      .attention_next = g2z__cpu_attention_next,
      .head_loss = g2z__cpu_head_loss,
      .draw = g2z__cpu_draw,
      .embed_order = g2z__cpu_embed_order,
      .head_logits = g2z__cpu_head_logits,
      .cast_act = g2z__cpu_cast_act,
      .cast_grad = g2z__cpu_cast_grad,
      .grad_add = g2z__cpu_grad_add,
      .grad_sumsq = g2z__cpu_grad_sumsq,
      .decide = g2z__cpu_decide,
      .adamw = g2z__cpu_adamw,
      .momentum = g2z__cpu_momentum,
      .orthogonalize = g2z__cpu_orthogonalize,
      .muon = g2z__cpu_muon,
  };
  return &ops;
}

#if defined(G2Z__OPTIMIZES)
#pragma GCC pop_options
#pragma nv_diagnostic pop
#endif

/* ===== >>i10 ranks =======================================================
 * In:  the launcher's variables.
 * Out: a star of connections around rank 0, calls over it, and a fault when a rank dies or hangs.
 * Law: all ranks learn which rank died or hangs, and every wait has a deadline. A connection
 * without the job's token is closed without an answer, and does not disturb the job.
 *
 * Each rank has two connections to rank 0. The thread that calls the library uses `data`. After the
 * meeting only the watcher's thread uses `control`: heartbeats never wait for gradients. */

#define G2Z__RANKS_MAX 4096
#define G2Z__RANKS_PORTS 4       /* ports to try, from the launcher's on, which torchrun occupies */
#define G2Z__RANKS_RECORDS 1024  /* collectives that the flight recorder holds */
#define G2Z__RANKS_CALLERS 16    /* connections at a time that have not sent the token */

/* ----- messages: a head, and the body of its kind ------------------------ */

#define G2Z__ANY SIZE_MAX /* the heading gives the number of bytes */
#define G2Z__KIND_LIST(X)                                                                          \
  /* kind       text           bytes of body           sender, and when it sends */                \
  X(HELLO,      "hello",       sizeof(g2z__hello))  /* a caller, first: its token and names */     \
  X(WELCOME,    "welcome",     sizeof(g2z__welcome)) /* rank 0, after a good HELLO: its token */   \
  X(START,      "start",       sizeof(int32_t))     /* rank 0 to all: every rank is there */       \
  X(FAULT,      "fault",       sizeof(g2z__ending)) /* rank 0 to all: the job ends, and why */     \
  X(BEAT,       "beat",        sizeof(g2z__pulse))  /* each watcher, at least once a second */     \
  X(BROKEN,     "broken",      sizeof(g2z__broken)) /* a rank whose data connection broke */       \
  X(GOODBYE,    "goodbye",     sizeof(g2z__pulse))  /* a rank that leaves; rank 0's answer */      \
  X(GATHER,     "all_gather",  G2Z__ANY)            /* on data: a rank's part, then all parts */   \
  X(BROADCAST,  "broadcast",   G2Z__ANY)            /* on data: the root's bytes */                \
  X(FREE,       "free",        0)                   /* on data: a rank frees what all use */    \
  X(REFUSAL,    "refusal",     G2Z__ANY)            /* on data, rank 0: how the calls differ */

#define X(kind, text, bytes) G2Z__##kind,
typedef enum g2z__kind { G2Z__KIND_LIST(X) G2Z__KIND_COUNT } g2z__kind;
#undef X

typedef struct g2z__heading {
  uint32_t magic, kind;           /* G2Z__MAGIC, g2z__kind */
  int64_t sequence;               /* of a call on data; else 0 */
  uint64_t bytes;                 /* of the body */
} g2z__heading;
#define G2Z__MAGIC 0x525a3247u

typedef struct g2z__hello {
  uint32_t token[4];              /* of the job's members */
  uint64_t process;               /* a rank that tries again is the same process */
  uint64_t build_hash;
  int32_t rank, world, control;   /* control 0: this is the data connection */
  char host[64], device[64], build[128];
} g2z__hello;

typedef struct g2z__welcome {
  uint32_t token[4];              /* of the job's rank 0 */
  char host[64];
} g2z__welcome;

typedef struct g2z__ending {
  int32_t status;
  g2z_fault fault;
} g2z__ending;

typedef struct g2z__pulse {       /* the progress of a rank */
  int64_t step, sequence;         /* sequence: collectives begun; -1: see g2z__ranks_alone */
  uint64_t moves;                 /* number of signs of progress */
  double limit_s;                 /* longest time between two moves; 0: no limit */
  uint32_t progress;              /* collectives that the device has ended */
  char phase[32];
  char trouble[64];               /* an asynchronous error of the transport; "": none */
} g2z__pulse;

typedef struct g2z__broken {      /* a data connection that ended */
  int32_t peer, error;            /* the rank at its other end; errno, 0: it was closed */
} g2z__broken;

typedef struct g2z__packet {      /* a message with a body of fixed size */
  g2z__heading head;
  union {
    g2z__hello hello;
    g2z__welcome welcome;
    int32_t local_world;          /* of START: ranks on the receiver's host */
    g2z__ending ending;
    g2z__pulse pulse;
    g2z__broken broken;
  } body;
} g2z__packet;

typedef struct g2z__link {        /* a connection */
  int socket;                     /* -1: none */
  int ready;                      /* g2z__poll found input */
  size_t got;                     /* bytes of `in` that have arrived */
  g2z__packet in;
} g2z__link;

/* A clock that stops while its process is suspended. If more than step_s passed since the previous
 * reading, it advances by step_s only: the process was suspended, or did not run. */
typedef struct g2z__clock {
  double last, awake, step_s;
} g2z__clock;

typedef struct g2z__peer {        /* a rank, as seen from here */
  g2z__link data, control;
  g2z__hello hello;
  g2z__pulse last;                /* its last heartbeat */
  double heard;                   /* when `last` came, on the watcher's clock */
  double broke;                   /* when its data connection broke, on the same clock; 0: never */
  int error;                      /* errno of the broken connection */
  int left;                       /* 1: it sent GOODBYE; in the meeting: it was sent FAULT */
} g2z__peer;

typedef struct g2z__meeting {     /* on rank 0 */
  int port;
  int present;                    /* ranks with both connections, this one included */
  int told;                       /* ranks that were sent the failure */
  int strangers;                  /* callers with a wrong token */
  unsigned accepted;              /* number of connections so far */
  g2z__ending ending;             /* status G2Z_OK: the meeting may still succeed */
  g2z__link listener;
  g2z__link callers[G2Z__RANKS_CALLERS]; /* after the listener: both are polled as one list */
} g2z__meeting;

typedef struct g2z__flight {      /* a collective in the flight recorder */
  int64_t sequence, step;
  char kind[24];
  int bucket;
  size_t bytes;
  double seconds;                 /* since the ranks met */
} g2z__flight;

struct g2z_ranks {
  g2z_services *services;
  g2z_ranks_config config;
  uint32_t tokens[2][4];          /* of the job's members, and of its rank 0 */
  g2z__peer *peers;               /* on rank 0: all ranks; on others: rank 0 and itself */
  int peer_count, me;             /* me: index of this rank in peers */
  int wake;                       /* a socket: what is written here wakes the watcher */
  struct addrinfo *addresses;     /* of rank 0's host */
  g2z__meeting meeting;
  struct pollfd *polls;           /* scratch of g2z__poll; polled: the link of each entry */
  g2z__link **polled;
  int32_t *votes;                 /* [world]: scratch of agree */
  g2z_status broken;              /* status of all later calls: data connections out of step */
  double began;
  g2z__clock clock;               /* of the meeting, then of the watcher */
  pthread_t watcher;
  int watched;                    /* 1: the watcher runs, and owns the fields up to `lost` */
  int parting;                    /* this rank leaves */
  double beat_s;                  /* between two heartbeats */
  g2z__pulse low;                 /* pulse of the ranks that are last; moves: the sum of theirs */
  double low_since;               /* when `low` changed last */
  int lost;                       /* 1, atomic: `fault` is set, and on_fault has run */
  g2z_fault fault;
  pthread_mutex_t lock;           /* guards all that follows */
  g2z__pulse self;
  double moved;                   /* g2z_seconds() at this rank's last move */
  int64_t sequence;               /* collectives begun */
  const volatile uint32_t *progress;
  const char *(*trouble)(void *user); /* NULL, or what the transport reports; NULL: it is healthy */
  void *trouble_user;
  g2z__flight records[G2Z__RANKS_RECORDS];
};

G2Z__PRIVATE double g2z__awake(g2z__clock *clock) {
  double now = g2z_seconds(), gap = now - clock->last;
  clock->last = now;
  clock->awake += G2Z__MIN(gap, clock->step_s);
  return clock->awake;
}

G2Z__PRIVATE void g2z__clock_start(g2z__clock *clock, double step_s) {
  clock->last = g2z_seconds();
  clock->step_s = step_s;
}

/* ----- place ------------------------------------------------------------- */

/* Environment variables of the launchers, in the order of precedence. NULL: the launcher has no
 * such variable. The ids together are the same on all ranks of a job, and differ between jobs. */
typedef struct g2z__launcher {
  const char *name, *rank, *size, *local_rank, *local_size, *ids[4];
} g2z__launcher;
static const g2z__launcher g2z__launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "WORLD_SIZE"}},
    {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL, NULL}},
    {"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
     {"PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", NULL}},
    {"slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL,
     {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", NULL}}};

/* An environment variable. NULL: it is not set or empty, or `name` is NULL. */
G2Z__PRIVATE const char *g2z__env(const char *name) {
  if (!name) return NULL;
  const char *text = getenv(name);
  if (!text || !*text) return NULL;
  return text;
}

/* An environment variable that must be a whole number; `otherwise` when it is not set. */
G2Z__PRIVATE g2z_status g2z__env_number(g2z_services *services, const char *name, int least,
                                        int most, int otherwise, int *out) {
  const char *text = g2z__env(name);
  *out = otherwise;
  if (!text) return G2Z_OK;
  size_t digits = strspn(text, "0123456789");
  long value = -1;
  if (digits && digits < 10 && !text[digits]) value = strtol(text, NULL, 10);
  if (value < least || value > most)
    G2Z_REFUSE(services, "%s=%.80s: must be a whole number from %d to %d", name, text, least, most);
  *out = (int)value;
  return G2Z_OK;
}

/* Returns 1 if MASTER_ADDR is a loopback address: it names this host. */
G2Z__PRIVATE int g2z__place_is_here(const char *address) {
  return strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0 ||
         strcmp(address, "localhost") == 0;
}

/* Rank, size, local rank and local size. local_rank -1 and local_world 0: not known. */
G2Z__PRIVATE g2z_status g2z__place_numbers(g2z_services *services, const g2z__launcher *launcher,
                                           g2z_place *out) {
  const char *set = launcher->rank, *missing = launcher->size;
  int nodes;
  if (!g2z__env(set)) {
    set = launcher->size;
    missing = launcher->rank;
  }
  if (!g2z__env(missing))
    G2Z_REFUSE(services, "%s=%.80s is set, but %s is not: set both, or neither", set, g2z__env(set),
               missing);
  G2Z_TRY(g2z__env_number(services, launcher->size, 1, G2Z__RANKS_MAX, 1, &out->world));
  G2Z_TRY(g2z__env_number(services, launcher->rank, 0, out->world - 1, 0, &out->rank));
  G2Z_TRY(g2z__env_number(services, launcher->local_size, 1, out->world, 0, &out->local_world));
  G2Z_TRY(g2z__env_number(services, "SLURM_STEP_NUM_NODES", 1, INT_MAX / 2, 0, &nodes));
  if (nodes == 1 && strcmp(launcher->name, "slurm") == 0) out->local_world = out->world;
  if (out->world == 1) out->local_world = 1;
  int last = out->world - 1; /* the largest local rank */
  if (out->local_world) last = out->local_world - 1;
  G2Z_TRY(g2z__env_number(services, launcher->local_rank, 0, last, -1, &out->local_rank));
  if (out->local_rank < 0) /* srun --mpi=pmi2 sets only Slurm's local rank */
    G2Z_TRY(g2z__env_number(services, "SLURM_LOCALID", 0, last, -1, &out->local_rank));
  if (out->world == 1) out->local_rank = 0;
  return G2Z_OK;
}

/* The host of rank 0. Users also set RANK and WORLD_SIZE by hand, without the other variables that
 * torchrun always sets. Without MASTER_ADDR, such ranks are all on this host. */
G2Z__PRIVATE g2z_status g2z__place_host(g2z_services *services, g2z_place *out) {
  const char *address = g2z__env("MASTER_ADDR");
  const int by_hand = strcmp(out->launcher, "torchrun") == 0; /* or by torchrun itself */
  int here = by_hand;
  if (address) here = g2z__place_is_here(address);
  if (here && !out->local_world) out->local_world = out->world;
  const int one_host = out->local_world == out->world;
  if (out->local_rank < 0 && by_hand && one_host) out->local_rank = out->rank;
  if (out->local_rank < 0)
    G2Z_REFUSE(services, "rank %d of %d (%s) does not know which of the ranks on its host it is: "
               "set LOCAL_RANK, together with RANK and WORLD_SIZE", out->rank, out->world,
               out->launcher);
  if (!one_host && !address) {
    const char *how = "";
    if (strcmp(out->launcher, "openmpi") == 0) how = " (mpirun -x MASTER_ADDR=HOST)";
    G2Z_REFUSE(services, "rank %d of %d (%s) cannot know where rank 0 is: set MASTER_ADDR to its "
               "host%s", out->rank, out->world, out->launcher, how);
  }
  if (by_hand && out->world > 1 && !g2z__env("MASTER_PORT"))
    G2Z_REFUSE(services, "RANK=%d and WORLD_SIZE=%d without MASTER_PORT: set it to a number that "
               "is the same for all ranks of this job and for no other job", out->rank, out->world);
  snprintf(out->host, sizeof out->host, "%s", one_host ? "127.0.0.1" : address);
  return G2Z_OK;
}

/* The job's id and secret, and a port that follows from the id. */
G2Z__PRIVATE g2z_status g2z__place_job(g2z_services *services, const g2z__launcher *launcher,
                                       g2z_place *out) {
  const char *id = g2z__env("G2Z_RUN_ID"), *secret = g2z__env("G2Z_SECRET");
  if (secret) snprintf(out->secret, sizeof out->secret, "%s", secret);
  if (id) {
    snprintf(out->job, sizeof out->job, "%s", id);
  } else {
    int used = snprintf(out->job, sizeof out->job, "%s", launcher->name);
    for (int k = 0; k < 4 && launcher->ids[k] && used < (int)sizeof out->job; k++) {
      const char *part = g2z__env(launcher->ids[k]);
      used += snprintf(out->job + used, sizeof out->job - (size_t)used, " %s", part ? part : "-");
    }
  }
  /* 20000: below the ports that systems give to outgoing connections. */
  const uint64_t hash = g2z__hash(G2Z__HASH, out->job, strlen(out->job));
  return g2z__env_number(services, "MASTER_PORT", 1, 65535 - G2Z__RANKS_PORTS,
                         20000 + (int)(hash % 9900), &out->port);
}

G2Z_API g2z_status g2z_place_find(g2z_services *services, g2z_place *out) {
  const g2z__launcher *launcher = g2z__launchers;
  const g2z__launcher *end = launcher + G2Z_COUNT(g2z__launchers);
  int parent;
  memset(out, 0, sizeof *out);
  for (; launcher < end; launcher++) {
    if (g2z__env(launcher->size)) break;
    /* Slurm sets SLURM_PROCID in the batch script, too, which is no job step. */
    if (g2z__env(launcher->rank) && strcmp(launcher->name, "slurm") != 0) break;
  }
  if (launcher == end) { /* no launcher: alone */
    *out = g2z_ranks_config_default().place;
    G2Z_TRY(g2z__env_number(services, "SLURM_NTASKS", 1, INT_MAX / 2, 1, &out->unstarted));
    if (out->unstarted == 1) out->unstarted = 0;
    return G2Z_OK;
  }
  snprintf(out->launcher, sizeof out->launcher, "%s", launcher->name);
  G2Z_TRY(g2z__place_numbers(services, launcher, out));
  G2Z_TRY(g2z__place_host(services, out));
  G2Z_TRY(g2z__place_job(services, launcher, out));
  G2Z_TRY(g2z__env_number(services, "G2Z_RANKS_PARENT", 1, INT_MAX / 4, 0, &parent));
  if (parent == (int)getppid()) snprintf(out->launcher, sizeof out->launcher, "ranks");
  return G2Z_OK;
}

/* ----- connections ------------------------------------------------------- */

/* Prepares every new socket. Data connections become blocking when all ranks have met. */
G2Z__PRIVATE void g2z__socket_prepare(int socket) {
  int on = 1;
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

G2Z__PRIVATE void g2z__socket_close(int *socket) {
  if (*socket >= 0) close(*socket);
  *socket = -1;
}

G2Z__PRIVATE void g2z__peer_close(g2z__peer *peer) {
  g2z__socket_close(&peer->data.socket);
  g2z__socket_close(&peer->control.socket);
}

/* A time for poll(): whole milliseconds, rounded up. */
G2Z__PRIVATE int g2z__poll_ms(double wait_s) {
  if (!(wait_s > 0)) return 0;
  return (int)(wait_s * 1000) + 1;
}

/* Waits for `events` or an error until the clock reaches `until`; 1: one of them came. */
G2Z__PRIVATE int g2z__socket_wait(g2z__clock *clock, int socket, short events, double until) {
  for (;;) {
    struct pollfd entry = {socket, events, 0};
    double left = until - g2z__awake(clock);
    if (left > 0.1) left = 0.1; /* read often: the clock adds at most step_s */
    int ready = poll(&entry, 1, g2z__poll_ms(left));
    if (ready > 0) return 1;
    if ((ready < 0 && errno != EINTR) || left <= 0) return 0;
  }
}

/* Waits up to wait_s for input, and marks the callers and control connections that have some. Only
 * open sockets go to poll(), which refuses more entries than this process may open files. */
G2Z__PRIVATE void g2z__poll(g2z_ranks *ranks, g2z__link *callers, int caller_count, double wait_s) {
  const int links = caller_count + ranks->peer_count;
  nfds_t count = 0;
  for (int i = 0; i < links; i++) {
    g2z__link *link = i < caller_count ? &callers[i] : &ranks->peers[i - caller_count].control;
    link->ready = 0;
    if (link->socket < 0) continue;
    ranks->polls[count].fd = link->socket;
    ranks->polls[count].events = POLLIN;
    ranks->polled[count++] = link;
  }
  if (poll(ranks->polls, count, g2z__poll_ms(wait_s)) <= 0) return;
  for (nfds_t i = 0; i < count; i++) ranks->polled[i]->ready = ranks->polls[i].revents != 0;
}

/* Finds a host's addresses; freeaddrinfo releases them. Returns getaddrinfo's error; 0: found. */
G2Z__PRIVATE int g2z__socket_resolve(const char *host, struct addrinfo **out) {
  struct addrinfo hints;
  memset(&hints, 0, sizeof hints);
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  *out = NULL;
  int error;
  do error = getaddrinfo(host, NULL, &hints, out);
  while (error == EAI_SYSTEM && errno == EINTR);
  return error;
}

/* Creates a socket for an address, whose port it sets. -1: failed, with errno. */
G2Z__PRIVATE int g2z__socket_at(const struct addrinfo *address, int port) {
  if (address->ai_family == AF_INET)
    ((struct sockaddr_in *)(void *)address->ai_addr)->sin_port = htons((uint16_t)port);
  else if (address->ai_family == AF_INET6)
    ((struct sockaddr_in6 *)(void *)address->ai_addr)->sin6_port = htons((uint16_t)port);
  int one = socket(address->ai_family, SOCK_STREAM, 0);
  if (one >= 0) g2z__socket_prepare(one);
  return one;
}

static const struct {
  const char *text;
  size_t bytes;
} g2z__kinds[] = {
#define X(kind, text, bytes) {text, bytes},
    G2Z__KIND_LIST(X)
#undef X
};

/* Sends all bytes, and waits up to a second whenever the socket is full. 0: lost, with errno. */
G2Z__PRIVATE int g2z__send(int socket, const void *bytes, size_t count) {
  for (size_t done = 0; done < count;) {
    struct pollfd entry = {socket, POLLOUT, 0};
    ssize_t put = send(socket, (const char *)bytes + done, count - done, MSG_NOSIGNAL);
    if (put > 0) done += (size_t)put;
    else if (errno != EINTR && (errno != EAGAIN || poll(&entry, 1, 1000) == 0)) return 0;
  }
  return 1;
}

/* Sends a message of fixed size; 0: the connection is lost. */
G2Z__PRIVATE int g2z__say(int socket, g2z__kind kind, const void *body) {
  g2z__packet packet;
  const size_t size = g2z__kinds[kind].bytes;
  memset(&packet, 0, sizeof packet);
  packet.head.magic = G2Z__MAGIC;
  packet.head.kind = kind;
  packet.head.bytes = size;
  memcpy(&packet.body, body, size);
  return g2z__send(socket, &packet, sizeof packet.head + size);
}

/* Reads what has come of a message of fixed size. 1: all; 0: not yet; -1: the connection is lost,
 * or sent no such message. */
G2Z__PRIVATE int g2z__hear(g2z__link *link) {
  const g2z__heading *head = &link->in.head;
  for (;;) {
    size_t want = sizeof *head;
    if (link->got >= sizeof head->magic && head->magic != G2Z__MAGIC) return -1;
    if (link->got >= want) {
      if (head->kind >= G2Z__KIND_COUNT || head->bytes > sizeof link->in.body ||
          head->bytes != g2z__kinds[head->kind].bytes)
        return -1;
      want += (size_t)head->bytes;
    }
    if (link->got == want) {
      link->got = 0;
      return 1;
    }
    ssize_t got = recv(link->socket, (char *)&link->in + link->got, want - link->got, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (got <= 0) return -1;
    link->got += (size_t)got;
  }
}

/* The kind of the next message; -1: the connection has failed, or the clock has reached `until`. */
G2Z__PRIVATE int g2z__await(g2z__clock *clock, g2z__link *link, double until) {
  int heard;
  while ((heard = g2z__hear(link)) == 0)
    if (!g2z__socket_wait(clock, link->socket, POLLIN, until)) return -1;
  if (heard < 0) return -1;
  return (int)link->in.head.kind;
}

/* ----- the meeting: all ranks but 0 --------------------------------------
 * Rank 0 listens. A rank opens control and then data; on each it sends HELLO and waits for WELCOME.
 * Then it waits on control for START, or for FAULT with the reason why the job cannot start. */

#define G2Z__PATIENCE_S 1.5 /* wait for a process that may not be rank 0 */

G2Z__PRIVATE g2z_status g2z__meeting_told(g2z_ranks *ranks, g2z__ending *ending) {
  g2z_status status = G2Z_LOST;
  if (ending->status > 0 && ending->status < G2Z_STATUS_COUNT) status = (g2z_status)ending->status;
  ending->fault.sentence[sizeof ending->fault.sentence - 1] = 0;
  return g2z_fail(ranks->services, status, "%s", ending->fault.sentence);
}

/* Connects a socket, which does not block. 0: it failed, or the clock has reached `until`. */
G2Z__PRIVATE int g2z__socket_connect(g2z__clock *clock, int socket, const struct addrinfo *address,
                                     double until) {
  int error = 0;
  socklen_t bytes = sizeof error;
  if (connect(socket, address->ai_addr, address->ai_addrlen) == 0) return 1;
  if (errno != EINPROGRESS && errno != EINTR) return 0;
  if (!g2z__socket_wait(clock, socket, POLLOUT, until)) return 0;
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0;
}

/* Tries to open control, and then data, at this address. Waits for WELCOME on each, on data until
 * the clock reaches `until`. *found 0: rank 0 is not there yet. If something else listens there,
 * `seen` describes it. A rank that does not fit the job gets FAULT, on control only. */
G2Z__PRIVATE g2z_status g2z__seek(g2z_ranks *ranks, const struct addrinfo *address, int port,
                                  double until, char seen[160], int *found) {
  g2z__peer *zero = &ranks->peers[0];
  g2z__hello *hello = &ranks->peers[ranks->me].hello;
  g2z__clock *clock = &ranks->clock;
  int control = 1;
  for (; control >= 0; control--) {
    const double patience = g2z__awake(clock) + G2Z__PATIENCE_S;
    g2z__link *link = &zero->control;
    double deadline = patience; /* for WELCOME */
    if (!control) {
      link = &zero->data;
      deadline = until;
    }
    const g2z__welcome *welcome = &link->in.body.welcome;
    link->got = 0;
    link->socket = g2z__socket_at(address, port);
    if (link->socket < 0) break;
    if (!g2z__socket_connect(clock, link->socket, address, patience)) break;
    snprintf(seen, 160, "; the listener on port %d is not this job's rank 0: ranks of one job need "
             "the same WORLD_SIZE, MASTER_PORT, --run-id and G2Z_SECRET", port);
    hello->control = control;
    if (!g2z__say(link->socket, G2Z__HELLO, hello)) break;
    if (g2z__await(clock, link, deadline) != G2Z__WELCOME) break;
    if (memcmp(welcome->token, ranks->tokens[1], sizeof welcome->token) != 0) break;
    snprintf(zero->hello.host, sizeof zero->hello.host, "%.63s", welcome->host);
  }
  *found = control < 0;
  if (control == 0 && g2z__await(clock, &zero->control, g2z__awake(clock)) == G2Z__FAULT)
    return g2z__meeting_told(ranks, &zero->control.in.body.ending);
  if (!*found) g2z__peer_close(zero);
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__meet_zero(g2z_ranks *ranks) {
  const g2z_place *place = &ranks->config.place;
  const double until = g2z__awake(&ranks->clock) + ranks->config.join_s;
  const double longest_s = place->local_world == place->world ? 0.1 : 1; /* spares rank 0's host */
  g2z__link *control = &ranks->peers[0].control;
  char seen[160] = "";
  int found = 0;
  for (double pause_s = 0.02;; pause_s = G2Z__MIN(1.5 * pause_s, longest_s)) {
    int error = 0;
    if (!ranks->addresses) error = g2z__socket_resolve(place->host, &ranks->addresses);
    if (error) snprintf(seen, sizeof seen, ": %s", gai_strerror(error));
    for (const struct addrinfo *at = ranks->addresses; at && !found; at = at->ai_next)
      for (int i = 0; i < G2Z__RANKS_PORTS && !found; i++)
        G2Z_TRY(g2z__seek(ranks, at, place->port + i, until, seen, &found));
    if (found || g2z__awake(&ranks->clock) > until) break;
    poll(NULL, 0, (int)(pause_s * 1000));
  }
  if (!found)
    return g2z_fail(ranks->services, G2Z_LOST,
                    "rank %d on %s did not find rank 0 on %.200s, ports %d to %d, within %.3g s%s"
                    "; look at rank 0's own output, and at the firewall", place->rank,
                    ranks->peers[ranks->me].hello.host, place->host, place->port,
                    place->port + G2Z__RANKS_PORTS - 1, ranks->config.join_s, seen);
  /* Rank 0 may have started as late as `until`, and then waits join_s for the others. */
  int kind = g2z__await(&ranks->clock, control, until + ranks->config.join_s + 10);
  if (kind == G2Z__FAULT) return g2z__meeting_told(ranks, &control->in.body.ending);
  if (kind != G2Z__START)
    return g2z_fail(ranks->services, G2Z_LOST,
                    "rank 0 on %s ended, or sends nothing, while rank %d waited for the other "
                    "ranks: look at rank 0's own output", ranks->peers[0].hello.host, place->rank);
  if (!place->local_world) ranks->config.place.local_world = control->in.body.local_world;
  return G2Z_OK;
}

/* ----- the meeting: rank 0 ----------------------------------------------- */

/* The first failure counts. */
G2Z_PRINTF(3, 4)
G2Z__PRIVATE void g2z__meeting_fail(g2z_ranks *ranks, g2z_status status, const char *format, ...) {
  g2z__meeting *meeting = &ranks->meeting;
  if (meeting->ending.status != G2Z_OK) return;
  G2Z__PRINT(meeting->ending.fault.sentence, format);
  meeting->ending.status = (int32_t)status;
}

G2Z__PRIVATE void g2z__meeting_end(g2z_ranks *ranks) {
  g2z__meeting *meeting = &ranks->meeting;
  for (int i = 0; i < G2Z__RANKS_CALLERS; i++) g2z__socket_close(&meeting->callers[i].socket);
  g2z__socket_close(&meeting->listener.socket);
}

G2Z__PRIVATE int g2z__socket_is_loopback(const struct addrinfo *at) {
  if (at->ai_family == AF_INET)
    return ntohl(((struct sockaddr_in *)(void *)at->ai_addr)->sin_addr.s_addr) >> 24 == 127;
  return at->ai_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&((struct sockaddr_in6 *)(void *)at->ai_addr)->sin6_addr);
}

/* Disables loopback addresses, which other hosts cannot reach: Debian's /etc/hosts has 127.0.1.1
 * for a host's own name. If there is no other address, selects all interfaces and returns 1. */
G2Z__PRIVATE int g2z__socket_widen(struct addrinfo *addresses) {
  int wide = 1;
  for (struct addrinfo *at = addresses; at; at = at->ai_next) wide &= g2z__socket_is_loopback(at);
  for (struct addrinfo *at = addresses; at; at = at->ai_next) {
    if (!g2z__socket_is_loopback(at)) continue;
    if (!wide) at->ai_family = AF_UNSPEC; /* disabled: no socket has this family */
    else if (at->ai_family == AF_INET)
      ((struct sockaddr_in *)(void *)at->ai_addr)->sin_addr.s_addr = htonl(INADDR_ANY);
    else ((struct sockaddr_in6 *)(void *)at->ai_addr)->sin6_addr = in6addr_any;
  }
  return wide;
}

G2Z__PRIVATE void g2z__meeting_forget(g2z_ranks *ranks, g2z__peer *peer) {
  ranks->meeting.present -= peer->data.socket >= 0;
  g2z__peer_close(peer);
  memset(&peer->hello, 0, sizeof peer->hello);
}

/* Whether a caller with the job's token gets an answer. If not, it is closed without one. */
G2Z__PRIVATE int g2z__meeting_admits(const g2z_ranks *ranks, const g2z__hello *hello) {
  const int world = ranks->config.place.world;
  if (hello->rank == 0) return 0; /* this process is rank 0 */
  if (hello->rank < 0 || hello->rank >= world) {
    /* Only a rank that was started for another number of ranks may have such a number. It gets an
     * answer, on control, so that it learns why it cannot join. */
    return hello->world != world && hello->control;
  }
  const g2z__peer *peer = &ranks->peers[hello->rank];
  /* The first process that claims a rank keeps it. Another process that claims it must belong to a
   * second job with the same id. */
  if (peer->hello.process && peer->hello.process != hello->process) return 0;
  if (hello->control) return 1;
  /* Data comes after control, and comes once. */
  return peer->control.socket >= 0 && peer->data.socket < 0;
}

/* Fails the meeting if a member's world, build or GPU does not fit. */
G2Z__PRIVATE void g2z__meeting_compare(g2z_ranks *ranks, const g2z__hello *hello) {
  const int world = ranks->config.place.world;
  const g2z__hello *zero = &ranks->peers[0].hello;
  if (hello->world != world)
    g2z__meeting_fail(ranks, G2Z_BAD_ARGUMENT,
                      "rank %d on %s was started for %d ranks, rank 0 on %s for %d: start all with "
                      "the same number", hello->rank, hello->host, hello->world, zero->host, world);
  else if (hello->build_hash != zero->build_hash)
    g2z__meeting_fail(ranks, G2Z_BAD_ARGUMENT,
                      "rank %d on %s runs build %s, rank 0 on %s runs %s: start the same program "
                      "everywhere", hello->rank, hello->host, hello->build, zero->host,
                      zero->build);
  if (!hello->device[0]) return; /* on a CPU */
  for (int r = 0; r < world; r++) {
    const g2z__hello *other = &ranks->peers[r].hello;
    if (r == hello->rank || strcmp(hello->device, other->device) != 0 ||
        strcmp(hello->host, other->host) != 0)
      continue;
    g2z__meeting_fail(ranks, G2Z_BAD_ARGUMENT,
                      "ranks %d and %d on %s share one GPU (%s): start as many ranks as there "
                      "are GPUs, and check LOCAL_RANK and CUDA_VISIBLE_DEVICES",
                      G2Z__MIN(r, hello->rank), G2Z__MAX(r, hello->rank), hello->host,
                      hello->device);
  }
}

/* Sends a rank the failure. */
G2Z__PRIVATE void g2z__meeting_refuse(g2z__meeting *meeting, int socket, g2z__peer *peer) {
  g2z__say(socket, G2Z__FAULT, &meeting->ending);
  if (!peer || peer->left) return;
  peer->left = 1;
  meeting->told++;
}

/* Handles a caller's message. A connection with the token becomes its rank's, or gets FAULT with
 * the reason; any other is closed without an answer. */
G2Z__PRIVATE void g2z__meeting_hear(g2z_ranks *ranks, g2z__link *caller) {
  g2z__meeting *meeting = &ranks->meeting;
  g2z__hello *hello = &caller->in.body.hello;
  const int heard = g2z__hear(caller);
  if (heard == 0) return;
  const int said_hello = heard > 0 && caller->in.head.kind == G2Z__HELLO;
  const int right = memcmp(hello->token, ranks->tokens[0], sizeof hello->token) == 0;
  if (said_hello && !right) meeting->strangers++;
  if (!said_hello || !right || !g2z__meeting_admits(ranks, hello)) {
    g2z__socket_close(&caller->socket);
    return;
  }
  hello->host[sizeof hello->host - 1] = 0;
  hello->device[sizeof hello->device - 1] = 0;
  hello->build[sizeof hello->build - 1] = 0;
  g2z__meeting_compare(ranks, hello);

  const int failed = meeting->ending.status != G2Z_OK;
  g2z__peer *peer = NULL; /* NULL: the rank is outside of this world, and the meeting has failed */
  if (hello->rank > 0 && hello->rank < ranks->config.place.world) peer = &ranks->peers[hello->rank];
  g2z__welcome welcome;
  memset(&welcome, 0, sizeof welcome);
  memcpy(welcome.token, ranks->tokens[1], sizeof welcome.token);
  memcpy(welcome.host, ranks->peers[0].hello.host, sizeof welcome.host);
  const int welcomed = g2z__say(caller->socket, G2Z__WELCOME, &welcome);
  if (welcomed && failed) g2z__meeting_refuse(meeting, caller->socket, peer);
  if (!welcomed || failed) {
    g2z__socket_close(&caller->socket);
    return;
  }
  if (hello->control) {
    g2z__meeting_forget(ranks, peer); /* an earlier try's connections */
    peer->control.socket = caller->socket;
  } else {
    peer->data.socket = caller->socket;
    meeting->present++;
  }
  caller->socket = -1;
  peer->hello = *hello;
}

/* Waits up to a tenth of a second for input, and handles it. */
G2Z__PRIVATE void g2z__meeting_poll(g2z_ranks *ranks) {
  g2z__meeting *meeting = &ranks->meeting;
  const int world = ranks->config.place.world;
  g2z__poll(ranks, &meeting->listener, 1 + G2Z__RANKS_CALLERS, 0.1);
  /* A waiting rank sends nothing: input means that it ended. Before it has `data` it may retry. */
  for (int r = 1; r < world; r++) {
    g2z__peer *peer = &ranks->peers[r];
    if (!peer->control.ready) continue;
    if (peer->data.socket >= 0)
      g2z__meeting_fail(ranks, G2Z_LOST, "rank %d on %s ended while rank 0 waited for the "
                        "others", r, peer->hello.host);
    g2z__meeting_forget(ranks, peer);
  }
  for (int i = 0; i < G2Z__RANKS_CALLERS; i++)
    if (meeting->callers[i].ready) g2z__meeting_hear(ranks, &meeting->callers[i]);
  if (!meeting->listener.ready) return;
  int one = accept(meeting->listener.socket, NULL, NULL);
  if (one < 0 && (errno == EMFILE || errno == ENFILE))
    g2z__meeting_fail(ranks, G2Z_IO,
                      "rank 0 on %s cannot open enough connections for %d ranks: raise the limit "
                      "of open files (ulimit -n) above %d", ranks->peers[0].hello.host, world,
                      2 * world + G2Z__RANKS_CALLERS + 64);
  if (one < 0) return;
  /* With too many callers, the oldest is closed: members send HELLO at once, and retry. */
  g2z__link *caller = &meeting->callers[meeting->accepted++ % G2Z__RANKS_CALLERS];
  g2z__socket_prepare(one);
  g2z__socket_close(&caller->socket);
  caller->socket = one;
  caller->got = 0;
}

/* Listens at MASTER_ADDR, on the first port that is free. */
G2Z__PRIVATE g2z_status g2z__meeting_listen(g2z_ranks *ranks) {
  const g2z_place *place = &ranks->config.place;
  g2z__meeting *meeting = &ranks->meeting;
  int *listener = &meeting->listener.socket;
  int error = g2z__socket_resolve(place->host, &ranks->addresses), on = 1;
  if (error)
    return g2z_fail(ranks->services, G2Z_IO, "rank 0 cannot listen at %s (MASTER_ADDR): %s",
                    place->host, gai_strerror(error));
  if (place->local_world != place->world && !g2z__place_is_here(place->host) &&
      g2z__socket_widen(ranks->addresses))
    g2z_log(ranks->services, G2Z_LOG_WARNING, "MASTER_ADDR=%s is a loopback address on rank 0's "
            "host (see /etc/hosts): rank 0 listens on all interfaces; set MASTER_ADDR to one of "
            "this host's addresses in the network (hostname -I) to listen there alone",
            place->host);
  for (int i = 0; i < G2Z__RANKS_PORTS; i++)
    for (struct addrinfo *at = ranks->addresses; at; at = at->ai_next) {
      if (at->ai_family == AF_UNSPEC) continue;
      meeting->port = place->port + i;
      *listener = g2z__socket_at(at, meeting->port);
      if (*listener >= 0 &&
          setsockopt(*listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
          bind(*listener, at->ai_addr, at->ai_addrlen) == 0 && listen(*listener, 1024) == 0)
        return G2Z_OK;
      error = errno;
      g2z__socket_close(listener);
    }
  const char *remedy = "MASTER_ADDR to the host on which rank 0 runs";
  if (error == EADDRINUSE) remedy = "another MASTER_PORT";
  return g2z_fail(ranks->services, G2Z_IO, "rank 0 cannot listen at %s, ports %d to %d: %s; set "
                  "%s", place->host, place->port, place->port + G2Z__RANKS_PORTS - 1,
                  strerror(error), remedy);
}

/* Fails the meeting with a sentence that names the first missing ranks. */
G2Z__PRIVATE void g2z__meeting_miss(g2z_ranks *ranks) {
  const g2z__meeting *meeting = &ranks->meeting;
  const int world = ranks->config.place.world;
  char list[128] = "", strangers[128] = "";
  size_t used = 0;
  int more = world - meeting->present;
  for (int r = 1; r < world; r++) {
    if (ranks->peers[r].data.socket >= 0 || used > sizeof list - 32) continue;
    used += (size_t)snprintf(list + used, sizeof list - used, used ? ", %d" : "%d", r);
    more--;
  }
  if (more) snprintf(list + used, sizeof list - used, " and %d more", more);
  if (meeting->strangers)
    snprintf(strangers, sizeof strangers, " (%d callers had another WORLD_SIZE, MASTER_PORT, "
             "--run-id or G2Z_SECRET)", meeting->strangers);
  g2z__meeting_fail(ranks, G2Z_LOST, "after %.3g s only %d of %d ranks have met on %s, port "
                    "%d; missing: rank %s%s; look at their output", ranks->config.join_s,
                    meeting->present, world, ranks->peers[0].hello.host, meeting->port, list,
                    strangers);
}

/* Sends FAULT to the ranks that are there. Waits up to 3 s for ranks that still start: they get
 * FAULT now, not at their own deadline. */
G2Z__PRIVATE void g2z__meeting_cancel(g2z_ranks *ranks) {
  g2z__meeting *meeting = &ranks->meeting;
  const int world = ranks->config.place.world;
  for (int r = 1; r < world; r++) {
    g2z__peer *peer = &ranks->peers[r];
    if (peer->control.socket >= 0 && !peer->left)
      g2z__meeting_refuse(meeting, peer->control.socket, peer);
  }
  const double until = g2z__awake(&ranks->clock) + G2Z__MIN(ranks->config.join_s, 3);
  while (meeting->told < world - 1 && g2z__awake(&ranks->clock) < until)
    g2z__meeting_poll(ranks);
}

/* Holds the meeting until all ranks are there, or all that came have been sent the failure. */
G2Z__PRIVATE g2z_status g2z__meet_all(g2z_ranks *ranks) {
  g2z_place *place = &ranks->config.place;
  const int world = place->world;
  const double until = g2z__awake(&ranks->clock) + ranks->config.join_s;
  g2z__meeting *meeting = &ranks->meeting;
  meeting->present = 1;
  G2Z_TRY(g2z__meeting_listen(ranks));
  while (meeting->ending.status == G2Z_OK && meeting->present < world &&
         g2z__awake(&ranks->clock) <= until)
    g2z__meeting_poll(ranks);
  if (meeting->present < world) g2z__meeting_miss(ranks);
  if (meeting->ending.status != G2Z_OK) {
    g2z__meeting_cancel(ranks);
    return g2z__meeting_told(ranks, &meeting->ending);
  }

  /* Send each rank START with the number of ranks on its host. */
  for (int r = 0; r < world; r++) {
    const g2z__peer *peer = &ranks->peers[r];
    int32_t local = 0;
    for (int other = 0; other < world; other++)
      local += strcmp(peer->hello.host, ranks->peers[other].hello.host) == 0;
    if (r > 0) g2z__say(peer->control.socket, G2Z__START, &local);
    else if (!place->local_world) place->local_world = local;
  }
  const char *launcher = place->launcher, *of = " of ";
  if (strcmp(launcher, "ranks") == 0) { /* the program started the ranks itself */
    launcher = "";
    of = "";
  }
  g2z_log(ranks->services, G2Z_LOG_INFO, "%d ranks%s%s have met on %s, port %d", world, of,
          launcher, ranks->peers[0].hello.host, meeting->port);
  g2z__meeting_end(ranks);
  return G2Z_OK;
}

/* ----- the watcher -------------------------------------------------------
 * This thread only handles heartbeats and looks at its clock. It never calls CUDA or NCCL, which
 * may hang, with one exception: the transport's `trouble`, which only reads a state. Rank 0 judges
 * all ranks; the others judge rank 0 and, after it has left, themselves. */

/* Copies this rank's own pulse for the watcher, and returns the clock. */
G2Z__PRIVATE double g2z__watch_look(g2z_ranks *ranks) {
  g2z__pulse *mine = &ranks->peers[ranks->me].last;
  pthread_mutex_lock(&ranks->lock);
  *mine = ranks->self;
  if (ranks->progress) mine->progress = *ranks->progress;
  const char *trouble = NULL;
  if (ranks->trouble) trouble = ranks->trouble(ranks->trouble_user);
  if (trouble) snprintf(mine->trouble, sizeof mine->trouble, "%s", trouble);
  pthread_mutex_unlock(&ranks->lock);
  return g2z__awake(&ranks->clock);
}

/* Sends a message to the other peers. A writable socket takes all of it. patience_s: total wait for
 * sockets that are not writable; at 0 such peers miss a heartbeat. */
G2Z__PRIVATE void g2z__watch_tell(g2z_ranks *ranks, g2z__kind kind, const void *body,
                                  double patience_s) {
  double until = g2z__awake(&ranks->clock) + patience_s;
  for (int i = 0; i < ranks->peer_count; i++) {
    int one = ranks->peers[i].control.socket;
    if (i != ranks->me && one >= 0 && g2z__socket_wait(&ranks->clock, one, POLLOUT, until))
      g2z__say(one, kind, body);
  }
}

G2Z__PRIVATE void g2z__watch_alarm(int signal_number) {
  (void)signal_number;
  _exit(G2Z_EXIT_LOST);
}

/* Ends the process of a rank on a GPU. `sentence` goes to standard error, unless it is NULL. A
 * console that takes no output delays the end by seconds only: an alarm ends a write that hangs.
 * Other threads may hold the lock of stdio, so the line is written without stdio. */
G2Z__PRIVATE void g2z__watch_exit(int rank, const char *sentence) {
  struct pollfd console = {STDERR_FILENO, POLLOUT, 0};
  char line[sizeof(g2z_fault) + 32];
  sigset_t alarms;
  if (sentence) {
    int length = snprintf(line, sizeof line, "rank %d ends: %s\n", rank, sentence);
    for (int i = 0; i < length - 1; i++) /* it may come from another host */
      if ((unsigned char)line[i] < ' ' || line[i] == 127) line[i] = '?';
    signal(SIGALRM, g2z__watch_alarm);
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    pthread_sigmask(SIG_UNBLOCK, &alarms, NULL); /* the library's threads block all signals */
    alarm(4);
    if (poll(&console, 1, 2000) == 1 && write(STDERR_FILENO, line, (size_t)length) < 0)
      _exit(G2Z_EXIT_LOST);
  }
  _exit(G2Z_EXIT_LOST);
}

/* Ends the job, once: rank 0 sends FAULT to the others, and on_fault runs. A rank on a GPU ends
 * here; on a CPU, calls return G2Z_LOST from now on. */
G2Z__PRIVATE void g2z__watch_end(g2z_ranks *ranks, g2z__ending *ending) {
  ending->fault.host[sizeof ending->fault.host - 1] = 0;
  ending->fault.phase[sizeof ending->fault.phase - 1] = 0;
  ending->fault.sentence[sizeof ending->fault.sentence - 1] = 0;
  if (ranks->me == 0) g2z__watch_tell(ranks, G2Z__FAULT, ending, 1);
  const g2z__hello *self = &ranks->peers[ranks->me].hello;
  const int handled = ranks->config.on_fault != NULL;
  if (handled) ranks->config.on_fault(ranks->config.user, &ending->fault);
  if (self->device[0]) g2z__watch_exit(self->rank, handled ? NULL : ending->fault.sentence);
  ranks->fault = ending->fault;
  __atomic_store_n(&ranks->lost, 1, __ATOMIC_RELEASE);
  for (int i = 0; i < ranks->peer_count; i++) /* wakes a thread that waits for data */
    if (ranks->peers[i].data.socket >= 0) shutdown(ranks->peers[i].data.socket, SHUT_RDWR);
}

/* Ends the job with the sentence "rank 2 on node7 WHAT; last heard in phase step of step 12". */
G2Z_PRINTF(3, 4)
G2Z__PRIVATE void g2z__watch_blame(g2z_ranks *ranks, const g2z__peer *peer, const char *format,
                                   ...) {
  char what[256];
  if (ranks->lost || ranks->parting) return; /* a rank blames once, and not while it leaves */
  G2Z__PRINT(what, format);
  g2z__ending ending;
  memset(&ending, 0, sizeof ending);
  ending.status = G2Z_LOST;
  ending.fault.rank = peer->hello.rank;
  ending.fault.step = peer->last.step;
  memcpy(ending.fault.host, peer->hello.host, sizeof ending.fault.host);
  memcpy(ending.fault.phase, peer->last.phase, sizeof ending.fault.phase);
  snprintf(ending.fault.sentence, sizeof ending.fault.sentence,
           "rank %d on %.63s %s; last heard in phase %.31s of step %" PRId64, peer->hello.rank,
           peer->hello.host, what, peer->last.phase, peer->last.step);
  g2z__watch_end(ranks, &ending);
}

/* Waits up to wait_s for messages, and handles them. */
G2Z__PRIVATE void g2z__watch_poll(g2z_ranks *ranks, double wait_s) {
  int heard;
  g2z__poll(ranks, NULL, 0, wait_s);
  for (g2z__peer *peer = ranks->peers; peer < ranks->peers + ranks->peer_count; peer++) {
    const int mine = peer == &ranks->peers[ranks->me];
    if (!peer->control.ready) continue;
    while (!ranks->lost && (heard = g2z__hear(&peer->control)) != 0) {
      g2z__packet *in = &peer->control.in;
      const uint32_t kind = in->head.kind;
      if (heard < 0) {
        g2z__socket_close(&peer->control.socket);
        if (!peer->left)
          g2z__watch_blame(ranks, peer, "died: its connection was lost");
        break;
      }
      if (kind == G2Z__FAULT && ranks->me && !ranks->parting)
        g2z__watch_end(ranks, &in->body.ending);
      if (kind == G2Z__BROKEN && ranks->me) { /* this rank's own data connection, to rank 0 */
        g2z__say(ranks->peers[0].control.socket, G2Z__BROKEN, &in->body.broken);
      } else if (kind == G2Z__BROKEN) {
        g2z__peer *end = mine ? &ranks->peers[in->body.broken.peer] : peer;
        if (end->broke == 0) {
          end->error = in->body.broken.error;
          end->broke = g2z__awake(&ranks->clock);
        }
      }
      if (kind != G2Z__BEAT && kind != G2Z__GOODBYE) continue;
      peer->heard = g2z__awake(&ranks->clock);
      peer->last = in->body.pulse;
      peer->last.phase[sizeof peer->last.phase - 1] = 0;
      peer->last.trouble[sizeof peer->last.trouble - 1] = 0;
      if (kind == G2Z__BEAT || peer->left) continue;
      peer->left = 1;
      if (mine) ranks->parting = 1;
      else if (ranks->me == 0) /* the peer waits for an answer */
        g2z__say(peer->control.socket, G2Z__GOODBYE, &ranks->peers[0].last);
    }
  }
}

/* Why a data connection ended. `error` is errno; 0: its other end closed it. */
G2Z__PRIVATE const char *g2z__broken_why(int error) {
  if (error == 0) return "it was closed";
  return strerror(error);
}

/* How many collectives `other` has begun more than `one`. If they have begun the same number: how
 * many more its device has ended. */
G2Z__PRIVATE int64_t g2z__watch_behind(const g2z__pulse *one, const g2z__pulse *other) {
  if (one->sequence != other->sequence) return other->sequence - one->sequence;
  return (int32_t)(other->progress - one->progress);
}

/* Of the ranks that have not left, the one that is last in collectives. *furthest: the largest
 * number that one of them has begun. */
G2Z__PRIVATE const g2z__peer *g2z__watch_last(const g2z_ranks *ranks, int64_t *furthest) {
  const g2z__peer *last = &ranks->peers[ranks->me];
  *furthest = last->last.sequence;
  for (int i = 0; i < ranks->peer_count; i++) {
    const g2z__peer *peer = &ranks->peers[i];
    if (peer->left) continue;
    *furthest = G2Z__MAX(*furthest, peer->last.sequence);
    if (g2z__watch_behind(&peer->last, &last->last) > 0) last = peer;
  }
  return last;
}

/* Blames a rank that is silent, has lost a connection, or has left early. */
G2Z__PRIVATE void g2z__watch_connections(g2z_ranks *ranks, double now) {
  const double silence_s = ranks->config.silence_s;
  int64_t furthest;
  g2z__watch_last(ranks, &furthest);
  for (int i = 0; i < ranks->peer_count; i++) {
    const g2z__peer *peer = &ranks->peers[i];
    if (peer->left) continue;
    if (i != ranks->me && silence_s > 0 && now - peer->heard > silence_s)
      g2z__watch_blame(ranks, peer, "does not answer: its last heartbeat came %.3g s ago",
                       now - peer->heard);
    if (peer->last.trouble[0] && (ranks->me == 0 || i != ranks->me)) /* rank 0 tells all */
      g2z__watch_blame(ranks, peer, "reports a failed connection between GPUs (NCCL: %s): check "
                       "the network; NCCL_DEBUG=INFO prints details", peer->last.trouble);
    /* A death would have been noticed within this second: both ends are alive. */
    if (peer->broke > 0 && now - peer->broke > 1)
      g2z__watch_blame(ranks, peer,
                       "lost its data connection to rank 0 on %.63s (%.60s): both are alive, "
                       "check the network", ranks->peers[0].hello.host,
                       g2z__broken_why(peer->error));
  }
  for (int i = 0; i < ranks->peer_count; i++)
    if (ranks->peers[i].left && ranks->peers[i].last.sequence < furthest)
      g2z__watch_blame(ranks, &ranks->peers[i],
                       "left early, while other ranks continue (see its own output)");
}

/* Blames a rank that hangs. The ranks that are last hold up the others. One of them must make
 * progress within the longest of their limits. How long the others wait for them does not
 * matter. */
G2Z__PRIVATE void g2z__watch_progress(g2z_ranks *ranks, double now) {
  int64_t furthest;
  const g2z__peer *last = g2z__watch_last(ranks, &furthest);
  double limit_s = 0;
  uint64_t moves = 0;
  int for_ever = 0;
  for (int i = 0; i < ranks->peer_count; i++) {
    const g2z__pulse *pulse = &ranks->peers[i].last;
    if (ranks->peers[i].left || g2z__watch_behind(pulse, &last->last) != 0) continue;
    moves += pulse->moves;
    for_ever |= pulse->limit_s <= 0;
    limit_s = G2Z__MAX(limit_s, pulse->limit_s);
  }
  if (g2z__watch_behind(&last->last, &ranks->low) != 0 || moves != ranks->low.moves) {
    ranks->low = last->last;
    ranks->low.moves = moves;
    ranks->low_since = now;
  }
  if (for_ever || now - ranks->low_since <= limit_s) return;
  if (last->last.sequence < 0)
    g2z__watch_blame(ranks, last, "failed, and does not end: its device may hang");
  else
    g2z__watch_blame(ranks, last,
                     "hangs: no progress for %.3g s, at collective %" PRId64 " of %" PRId64,
                     now - ranks->low_since, last->last.sequence, furthest);
}

/* The watcher's thread. It reads the clock before and after each wait, and judges the ranks only
 * then: while this process was suspended, their silence must not count. */
G2Z__PRIVATE void *g2z__watch(void *user) {
  g2z_ranks *ranks = (g2z_ranks *)user;
  double now = g2z__watch_look(ranks), next = now;
  for (int i = 0; i < ranks->peer_count; i++) ranks->peers[i].heard = now;
  while (!ranks->lost && !ranks->parting) {
    now = g2z__watch_look(ranks);
    if (now >= next) {
      g2z__watch_tell(ranks, G2Z__BEAT, &ranks->peers[ranks->me].last, 0);
      next = now + ranks->beat_s;
    }
    g2z__watch_poll(ranks, G2Z__MIN(next - now, 0.25));
    now = g2z__watch_look(ranks);
    if (ranks->lost || ranks->parting) break;
    g2z__watch_connections(ranks, now);
    if (ranks->me == 0 || ranks->peers[0].left) g2z__watch_progress(ranks, now);
  }
  if (!ranks->parting) return NULL;

  /* Send GOODBYE to all, then wait up to 5 s for theirs: ranks reach each other through rank 0. */
  double until = g2z__watch_look(ranks) + 5;
  g2z__watch_tell(ranks, G2Z__GOODBYE, &ranks->peers[ranks->me].last, 5);
  for (int staying = 1; staying && g2z__awake(&ranks->clock) < until;) {
    staying = 0;
    for (int i = 0; i < ranks->peer_count; i++)
      staying |= ranks->peers[i].control.socket >= 0 && !ranks->peers[i].left;
    if (staying) g2z__watch_poll(ranks, 0.1);
  }
  return NULL;
}

/* ----- join and leave ---------------------------------------------------- */

G2Z_API g2z_ranks_config g2z_ranks_config_default(void) {
  g2z_ranks_config config;
  memset(&config, 0, sizeof config);
  config.place.world = config.place.local_world = 1;
  snprintf(config.place.launcher, sizeof config.place.launcher, "alone");
  snprintf(config.place.host, sizeof config.place.host, "127.0.0.1");
  config.device = config.build = "";
  config.join_s = 120;
  config.silence_s = 30;
  config.hang_s = 600;
  return config;
}

G2Z__PRIVATE void g2z__ranks_move(g2z_ranks *ranks) {
  ranks->self.moves++;
  ranks->moved = g2z_seconds();
}

/* Sets what heartbeats report. A call counts as progress; the next is due in hang_s + extra_s. */
G2Z__PRIVATE void g2z__ranks_phase(g2z_ranks *ranks, const char *phase, int64_t step,
                                   double extra_s) {
  pthread_mutex_lock(&ranks->lock);
  snprintf(ranks->self.phase, sizeof ranks->self.phase, "%s", phase);
  ranks->self.step = step;
  ranks->self.limit_s = ranks->config.hang_s > 0 ? ranks->config.hang_s + extra_s : 0;
  g2z__ranks_move(ranks);
  pthread_mutex_unlock(&ranks->lock);
}

/* Fills this rank's HELLO. */
G2Z__PRIVATE void g2z__ranks_introduce(g2z_ranks *ranks) {
  const g2z_ranks_config *config = &ranks->config;
  g2z__hello *hello = &ranks->peers[ranks->me].hello;
  struct utsname name;
  struct timespec now;
  const char *host = "unknown";
  if (uname(&name) == 0 && name.nodename[0]) host = name.nodename;
  clock_gettime(CLOCK_REALTIME, &now);
  const int64_t process[3] = {getpid(), now.tv_sec, now.tv_nsec};
  hello->process = g2z__hash(g2z__hash(G2Z__HASH, process, sizeof process), host, strlen(host));
  hello->build_hash = g2z__hash(G2Z__HASH, config->build, strlen(config->build));
  hello->rank = config->place.rank;
  hello->world = config->place.world;
  snprintf(hello->host, sizeof hello->host, "%.63s", host);
  snprintf(hello->device, sizeof hello->device, "%s", config->device);
  snprintf(hello->build, sizeof hello->build, "%s", config->build);
  memcpy(hello->token, ranks->tokens[0], sizeof hello->token);
}

/* Starts the watcher. Each limit is at least five heartbeats long. */
G2Z__PRIVATE g2z_status g2z__watch_start(g2z_ranks *ranks) {
  const double silence_s = ranks->config.silence_s, hang_s = ranks->config.hang_s;
  int pair[2];
  ranks->beat_s = 1;
  if (silence_s > 0 && silence_s < 5) ranks->beat_s = silence_s / 5;
  if (hang_s > 0 && hang_s < 5 * ranks->beat_s) ranks->beat_s = hang_s / 5;
  g2z__clock_start(&ranks->clock, 2 * ranks->beat_s);
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
    return g2z_fail(ranks->services, G2Z_IO, "cannot create the watcher's sockets: %s",
                    strerror(errno));
  for (int i = 0; i < 2; i++) g2z__socket_prepare(pair[i]);
  ranks->peers[ranks->me].control.socket = pair[0];
  ranks->wake = pair[1];
  int error = g2z__thread_start(&ranks->watcher, g2z__watch, ranks);
  ranks->watched = error == 0;
  if (!error) return G2Z_OK;
  return g2z_fail(ranks->services, G2Z_NO_MEMORY, "cannot start the watcher's thread: %s",
                  strerror(error));
}

G2Z__PRIVATE g2z_status g2z__ranks_meet(g2z_ranks *ranks) {
  const g2z_ranks_config *config = &ranks->config;
  const g2z_place *place = &config->place;
  g2z_services *services = ranks->services;
  if (place->world < 1 || place->world > G2Z__RANKS_MAX || place->rank < 0 ||
      place->rank >= place->world)
    G2Z_REFUSE(services, "rank %d of %d is not possible: a job has at most %d ranks, from rank 0 "
               "on", place->rank, place->world, G2Z__RANKS_MAX);
  if (place->world == 1) return G2Z_OK;
  if (place->port < 1 || place->port > 65535 - G2Z__RANKS_PORTS)
    G2Z_REFUSE(services, "port %d: must be from 1 to %d", place->port, 65535 - G2Z__RANKS_PORTS);
  int count = place->rank == 0 ? place->world : 2;
  G2Z_TRY(G2Z_NEW(services, (size_t)place->world, &ranks->votes));
  G2Z_TRY(G2Z_NEW(services, (size_t)count + 1 + G2Z__RANKS_CALLERS, &ranks->polls));
  G2Z_TRY(G2Z_NEW(services, (size_t)count + 1 + G2Z__RANKS_CALLERS, &ranks->polled));
  G2Z_TRY(G2Z_NEW(services, (size_t)count, &ranks->peers));
  ranks->peer_count = count;
  ranks->me = place->rank > 0;
  for (int i = 0; i < count; i++) {
    ranks->peers[i].data.socket = ranks->peers[i].control.socket = -1;
    snprintf(ranks->peers[i].last.phase, sizeof ranks->peers[i].last.phase, "start");
  }

  /* The tokens follow from the job's id and secret: a process that knows both is a member. Rank 0
   * has its own token, so that a service that echoes its input is not taken for it. */
  uint64_t key = g2z__hash(G2Z__HASH, place->job, strlen(place->job));
  key = g2z__hash(key, "\n", 1);
  key = g2z__hash(key, place->secret, strlen(place->secret));
  for (uint32_t zero = 0; zero < 2; zero++) {
    const uint32_t counter[4] = {zero, 0, 0, 0};
    g2z_philox(key, G2Z_RANDOM_MEMBER, counter, ranks->tokens[zero]);
  }
  g2z__ranks_introduce(ranks);
  g2z__clock_start(&ranks->clock, config->join_s / 4);
  if (place->rank == 0) G2Z_TRY(g2z__meet_all(ranks));
  else G2Z_TRY(g2z__meet_zero(ranks));
  ranks->began = g2z_seconds(); /* the same moment on all ranks */
  for (int i = 0; i < count; i++) {
    int one = ranks->peers[i].data.socket;
    if (one >= 0) fcntl(one, F_SETFL, fcntl(one, F_GETFL) & ~O_NONBLOCK);
  }
  return g2z__watch_start(ranks);
}

/* Sends a goodbye, so that the others do not report a death. NULL is fine. */
G2Z__PRIVATE void g2z__ranks_leave(g2z_ranks *ranks) {
  if (!ranks) return;
  if (ranks->watched) {
    pthread_mutex_lock(&ranks->lock);
    const g2z__pulse self = ranks->self;
    pthread_mutex_unlock(&ranks->lock);
    g2z__say(ranks->wake, G2Z__GOODBYE, &self);
    pthread_join(ranks->watcher, NULL);
  }
  for (int i = 0; i < ranks->peer_count; i++) g2z__peer_close(&ranks->peers[i]);
  g2z__socket_close(&ranks->wake);
  if (ranks->addresses) freeaddrinfo(ranks->addresses);
  g2z__meeting_end(ranks);
  pthread_mutex_destroy(&ranks->lock);
  g2z_release(ranks->services, ranks->peers);
  g2z_release(ranks->services, ranks->polls);
  g2z_release(ranks->services, ranks->polled);
  g2z_release(ranks->services, ranks->votes);
  g2z_release(ranks->services, ranks);
}

/* Meets the other ranks. If it fails, it fails on every rank, and names the ranks that are missing
 * (G2Z_LOST) or differ (G2Z_BAD_ARGUMENT). */
G2Z__PRIVATE g2z_status g2z__ranks_join(g2z_services *services, const g2z_ranks_config *config,
                                        g2z_ranks **out) {
  g2z_ranks *ranks;
  *out = NULL;
  G2Z_TRY(G2Z_NEW(services, 1, &ranks));
  ranks->services = services;
  ranks->config = *config;
  ranks->wake = ranks->meeting.listener.socket = -1;
  for (int i = 0; i < G2Z__RANKS_CALLERS; i++) ranks->meeting.callers[i].socket = -1;
  pthread_mutex_init(&ranks->lock, NULL);
  ranks->began = g2z_seconds();
  g2z__ranks_phase(ranks, "start", 0, 0);
  g2z_status status = g2z__ranks_meet(ranks);
  if (status != G2Z_OK) g2z__ranks_leave(ranks);
  else *out = ranks;
  return status;
}

G2Z_API const g2z_place *g2z_ranks_place(const g2z_ranks *ranks) { return &ranks->config.place; }

/* ----- progress and the flight recorder ---------------------------------- */

/* Sets what the watcher reads of a transport, even while the host hangs. `word`, in memory that the
 * host can read: the device increments it when a collective ends. `trouble` returns the transport's
 * asynchronous error, without waiting. Each may be NULL. Pass NULL for all three before `word` or
 * `user` is freed. */
G2Z__PRIVATE void g2z__ranks_progress(g2z_ranks *ranks, const volatile uint32_t *word,
                                      const char *(*trouble)(void *user), void *user) {
  pthread_mutex_lock(&ranks->lock);
  ranks->progress = word;
  ranks->trouble = trouble;
  ranks->trouble_user = user;
  pthread_mutex_unlock(&ranks->lock);
}

#define G2Z__ALONE_S 8 /* limit for a rank that others may wait for, although it will not come */

/* Reports that this rank has failed and that no verdict will tell the others. Other devices may
 * wait for its device although it has begun as many collectives as they have. Sequence -1 makes it
 * the last rank, and rank 0 blames the last rank. */
G2Z__PRIVATE void g2z__ranks_alone(g2z_ranks *ranks) {
  pthread_mutex_lock(&ranks->lock);
  ranks->self.sequence = -1;
  ranks->self.limit_s = G2Z__ALONE_S; /* to GOODBYE: a broken device may hang */
  g2z__ranks_move(ranks);
  pthread_mutex_unlock(&ranks->lock);
}

/* Sets the number of the last collective. Ranks with the same number stay in step. */
G2Z__PRIVATE void g2z__ranks_count(g2z_ranks *ranks, int64_t sequence) {
  pthread_mutex_lock(&ranks->lock);
  ranks->sequence = sequence;
  if (ranks->self.sequence >= 0) ranks->self.sequence = sequence;
  pthread_mutex_unlock(&ranks->lock);
}

/* Records a collective that is about to be enqueued; returns its number. */
G2Z__PRIVATE int64_t g2z__ranks_note(g2z_ranks *ranks, const char *kind, int bucket, size_t bytes) {
  pthread_mutex_lock(&ranks->lock);
  int64_t sequence = ++ranks->sequence;
  g2z__flight *record = &ranks->records[sequence % G2Z__RANKS_RECORDS];
  record->sequence = sequence;
  record->step = ranks->self.step;
  record->bucket = bucket;
  record->bytes = bytes;
  if (ranks->self.sequence >= 0) ranks->self.sequence = sequence;
  g2z__ranks_move(ranks);
  record->seconds = ranks->moved - ranks->began;
  snprintf(record->kind, sizeof record->kind, "%s", kind);
  pthread_mutex_unlock(&ranks->lock);
  return sequence;
}

G2Z_API int g2z_ranks_collectives(g2z_ranks *ranks, int64_t step) {
  int count = 0;
  pthread_mutex_lock(&ranks->lock);
  for (int i = 0; i < G2Z__RANKS_RECORDS; i++)
    count += ranks->records[i].sequence > 0 && ranks->records[i].step == step &&
             ranks->records[i].bucket >= 0;
  pthread_mutex_unlock(&ranks->lock);
  return count;
}

G2Z_API g2z_status g2z_ranks_write_flight(g2z_ranks *ranks, g2z_services *services,
                                          const char *path) {
  g2z_writer *writer;
  G2Z_TRY(g2z_writer_create(services, path, &writer));
  g2z_json_out out = {writer, 0, 0, 0};
  pthread_mutex_lock(&ranks->lock);
  const g2z__pulse self = ranks->self;
  const int64_t begun = ranks->sequence;
  const double moved = ranks->moved;
  const uint32_t progress = ranks->progress ? *ranks->progress : 0;
  pthread_mutex_unlock(&ranks->lock);
  g2z_json_begin(&out, NULL, '{');
  g2z_json_put_integer(&out, "rank", ranks->config.place.rank);
  g2z_json_put_integer(&out, "world", ranks->config.place.world);
  if (ranks->peers) g2z_json_put_string(&out, "host", ranks->peers[ranks->me].hello.host);
  g2z_json_put_string(&out, "phase", self.phase);
  g2z_json_put_number(&out, "phase_s", g2z_seconds() - moved);
  g2z_json_put_integer(&out, "step", self.step);
  g2z_json_put_integer(&out, "sequence", begun);
  g2z_json_put_integer(&out, "progress", progress);
  g2z_json_put_number(&out, "seconds", g2z_seconds() - ranks->began);
  g2z_json_end(&out, '}');
  g2z_writer_put(writer, "\n", 1);
  for (int64_t i = G2Z__MAX(begun - G2Z__RANKS_RECORDS + 1, 1); i <= begun; i++) {
    pthread_mutex_lock(&ranks->lock);
    g2z__flight record = ranks->records[i % G2Z__RANKS_RECORDS];
    pthread_mutex_unlock(&ranks->lock);
    if (record.sequence != i) continue; /* overwritten meanwhile */
    g2z_writer_printf(writer,
                      "{\"sequence\": %" PRId64 ", \"step\": %" PRId64 ", \"kind\": \"%s\", "
                      "\"bucket\": %d, \"bytes\": %zu, \"seconds\": %.6f}\n", record.sequence,
                      record.step, record.kind, record.bucket, record.bytes, record.seconds);
  }
  g2z_status status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  return status;
}

/* ----- calls over the data connections ----------------------------------- */

/* A data connection has ended. Waits until the watchers name the rank at fault. They do so at once,
 * or after silence_s if a host is gone. */
G2Z__PRIVATE g2z_status g2z__ranks_lost(g2z_ranks *ranks, int peer, int error) {
  const g2z__broken broken = {peer, error};
  const double until = g2z_seconds() + ranks->config.silence_s + 5;
  ranks->broken = G2Z_LOST;
  g2z__say(ranks->wake, G2Z__BROKEN, &broken);
  while (!__atomic_load_n(&ranks->lost, __ATOMIC_ACQUIRE) && g2z_seconds() < until)
    poll(NULL, 0, 5);
  if (__atomic_load_n(&ranks->lost, __ATOMIC_ACQUIRE))
    return g2z_fail(ranks->services, G2Z_LOST, "%s", ranks->fault.sentence);
  return g2z_fail(ranks->services, G2Z_LOST, "rank %d lost its connection to rank %d: %s",
                  ranks->config.place.rank, peer, g2z__broken_why(error));
}

/* The byte stream between rank 0 and another rank, for the collectives of CPU ranks. `peer` is 0 on
 * every rank except rank 0. Both sides call in the same order. Send returns when the system has all
 * bytes, receive when the caller has them: two ranks that both send much at once wait forever. */
G2Z__PRIVATE g2z_status g2z__ranks_send(g2z_ranks *ranks, int peer, const void *bytes,
                                        size_t count) {
  G2Z_ASSERT(peer >= 0 && peer < ranks->peer_count && ranks->me != peer);
  if (g2z__send(ranks->peers[peer].data.socket, bytes, count)) return G2Z_OK;
  return g2z__ranks_lost(ranks, peer, errno);
}

G2Z__PRIVATE g2z_status g2z__ranks_receive(g2z_ranks *ranks, int peer, void *bytes, size_t count) {
  G2Z_ASSERT(peer >= 0 && peer < ranks->peer_count && ranks->me != peer);
  for (size_t done = 0; done < count;) {
    ssize_t got = recv(ranks->peers[peer].data.socket, (char *)bytes + done, count - done,
                       MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return g2z__ranks_lost(ranks, peer, errno);
    if (got == 0) return g2z__ranks_lost(ranks, peer, 0);
    done += (size_t)got;
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__ranks_put(g2z_ranks *ranks, int peer, g2z__kind kind, int64_t sequence,
                                       const void *bytes, size_t count) {
  g2z__heading head = {G2Z__MAGIC, (uint32_t)kind, sequence, count};
  G2Z_TRY(g2z__ranks_send(ranks, peer, &head, sizeof head));
  return g2z__ranks_send(ranks, peer, bytes, count);
}

/* Receives a peer's message of the same call. If it is in another call, rank 0 sends REFUSAL. */
G2Z__PRIVATE g2z_status g2z__ranks_take(g2z_ranks *ranks, int peer, g2z__kind kind,
                                        int64_t sequence, void *bytes, size_t count) {
  g2z__heading head;
  char sentence[G2Z_ERROR_BYTES];
  memset(sentence, 0, sizeof sentence);
  G2Z_TRY(g2z__ranks_receive(ranks, peer, &head, sizeof head));
  int known = head.magic == G2Z__MAGIC && head.kind < G2Z__KIND_COUNT;
  if (known && head.kind == (uint32_t)kind && head.sequence == sequence && head.bytes == count)
    return g2z__ranks_receive(ranks, peer, bytes, count);
  if (known && head.kind == G2Z__REFUSAL && head.bytes == sizeof sentence) {
    G2Z_TRY(g2z__ranks_receive(ranks, peer, sentence, sizeof sentence - 1));
  } else {
    const char *call = known ? g2z__kinds[head.kind].text : "an unknown call";
    snprintf(sentence, sizeof sentence,
             "rank %d is in %s %" PRId64 " with %" PRIu64 " bytes while rank %d is in %s %" PRId64
             " with %zu: all ranks must make the same calls in the same order",
             ranks->peers[peer].hello.rank, call, head.sequence, head.bytes,
             ranks->config.place.rank, g2z__kinds[kind].text, sequence, count);
  }
  for (int r = 1; ranks->me == 0 && r < ranks->peer_count; r++)
    G2Z_TRY(g2z__ranks_put(ranks, r, G2Z__REFUSAL, 0, sentence, sizeof sentence));
  ranks->broken = g2z_fail(ranks->services, G2Z_BAD_ARGUMENT, "%s", sentence);
  ranks->services->alike = ranks->me == 0 || head.kind == G2Z__REFUSAL;
  return ranks->broken;
}

/* All ranks send to rank 0, and rank 0 sends `all` to every rank. root -1: rank r's `count` bytes
 * are part r of `all`. Otherwise `all` is the root's bytes; the other ranks send only a heading,
 * which shows that they are in the same call. */
G2Z__PRIVATE g2z_status g2z__ranks_call(g2z_ranks *ranks, g2z__kind kind, int root,
                                        const void *mine, void *all, size_t count) {
  const int world = ranks->config.place.world, rank = ranks->config.place.rank;
  const int gathers = root < 0;
  size_t whole = count;
  if (gathers) whole *= (size_t)world;
  if (world == 1) return G2Z_OK;
  if (__atomic_load_n(&ranks->lost, __ATOMIC_ACQUIRE))
    return g2z_fail(ranks->services, G2Z_LOST, "%s", ranks->fault.sentence);
  if (ranks->broken != G2Z_OK) /* connections that are out of step carry nothing more */
    return g2z_fail(ranks->services, ranks->broken,
                    "the ranks are out of step since an earlier failure: leave, and join again");
  int64_t sequence = g2z__ranks_note(ranks, g2z__kinds[kind].text, -1, count);
  if (rank) {
    const size_t sent = gathers || rank == root ? count : 0;
    G2Z_TRY(g2z__ranks_put(ranks, 0, kind, sequence, mine, sent));
    return g2z__ranks_take(ranks, 0, kind, sequence, all, whole);
  }
  for (int r = 1; r < world; r++) {
    const size_t sent = gathers || r == root ? count : 0;
    char *part = (char *)all;
    if (gathers) part += (size_t)r * count;
    G2Z_TRY(g2z__ranks_take(ranks, r, kind, sequence, part, sent));
  }
  for (int r = 1; r < world; r++)
    G2Z_TRY(g2z__ranks_put(ranks, r, kind, sequence, all, whole));
  return G2Z_OK;
}

G2Z_API g2z_status g2z_ranks_all_gather(g2z_ranks *ranks, const void *mine, size_t bytes,
                                        void *all) {
  if (bytes) /* 0: a barrier */
    memmove((char *)all + (size_t)ranks->config.place.rank * bytes, mine, bytes);
  return g2z__ranks_call(ranks, G2Z__GATHER, -1, mine, all, bytes);
}

G2Z_API g2z_status g2z_ranks_broadcast(g2z_ranks *ranks, void *bytes, size_t count) {
  return g2z__ranks_call(ranks, G2Z__BROADCAST, 0, bytes, bytes, count);
}

G2Z_API g2z_status g2z_ranks_agree(g2z_ranks *ranks, g2z_status mine) {
  const int world = ranks->config.place.world;
  char sentence[G2Z_ERROR_BYTES];
  int32_t status = (int32_t)mine;
  int first = 0;
  if (world == 1) return mine;
  memset(sentence, 0, sizeof sentence);
  if (mine != G2Z_OK)
    snprintf(sentence, sizeof sentence, "rank %d: %.740s", ranks->config.place.rank,
             ranks->services->error);
  G2Z_TRY(g2z_ranks_all_gather(ranks, &status, sizeof status, ranks->votes));
  while (first < world && ranks->votes[first] == G2Z_OK) first++;
  if (first == world) return G2Z_OK;
  status = ranks->votes[first];
  G2Z_TRY(g2z__ranks_call(ranks, G2Z__BROADCAST, first, sentence, sentence, sizeof sentence));
  sentence[sizeof sentence - 1] = 0;
  g2z_fail(ranks->services, G2Z_LOST, "%s", sentence);
  ranks->services->alike = 1;
  if (status < 0 || status >= G2Z_STATUS_COUNT) return G2Z_LOST;
  return (g2z_status)status;
}

/* *all: whether `mine` is true on every rank. */
G2Z__PRIVATE g2z_status g2z__ranks_all(g2z_ranks *ranks, int mine, int *all) {
  int32_t yes = mine;
  *all = mine;
  if (ranks->config.place.world == 1) return G2Z_OK;
  g2z_status status = g2z_ranks_all_gather(ranks, &yes, sizeof yes, ranks->votes);
  for (int r = 0; r < ranks->config.place.world; r++) *all = *all && ranks->votes[r];
  return status;
}

/* Meets the other ranks at the end, before this rank frees what they use. If a rank is lost, or
 * this rank failed alone, it returns at once. If a rank comes here while the others continue, it is
 * blamed after G2Z__ALONE_S; if they are in another call of this room, that call fails. */
G2Z__PRIVATE void g2z__ranks_part(g2z_ranks *ranks) {
  pthread_mutex_lock(&ranks->lock);
  const int alone = ranks->self.sequence < 0;
  const int64_t step = ranks->self.step;
  pthread_mutex_unlock(&ranks->lock);
  if (alone || ranks->broken != G2Z_OK) return;
  g2z__ranks_phase(ranks, "free", step, 0);
  pthread_mutex_lock(&ranks->lock);
  ranks->self.limit_s = G2Z__ALONE_S;
  pthread_mutex_unlock(&ranks->lock);
  /* The caller frees even if the call fails. */
  (void)g2z__ranks_call(ranks, G2Z__FREE, -1, NULL, NULL, 0);
  g2z__ranks_phase(ranks, "free", step, 0);
}

/* Broadcasts rank 0's text; NULL is "". The other ranks g2z_release their *copy; on rank 0 it is
 * NULL. */
G2Z__PRIVATE g2z_status g2z__ranks_text(g2z_ranks *ranks, const char *text, char **copy) {
  if (!text) text = "";
  char *at = (char *)text; /* a broadcast does not write to rank 0's */
  uint64_t bytes = strlen(text) + 1;
  g2z_status status = G2Z_OK;
  *copy = NULL;
  G2Z_TRY(g2z_ranks_broadcast(ranks, &bytes, sizeof bytes));
  if (ranks->me > 0) {
    status = G2Z_NEW(ranks->services, (size_t)bytes, copy);
    at = *copy;
  }
  G2Z_TRY(g2z_ranks_agree(ranks, status));
  G2Z_TRY(g2z_ranks_broadcast(ranks, at, (size_t)bytes));
  if (*copy) (*copy)[bytes - 1] = 0;
  return G2Z_OK;
}

G2Z_API g2z_status g2z_ranks_same(g2z_ranks *ranks, const char *what, const char *text) {
  char *zero;
  size_t line = 0; /* the beginning of the first line that differs */
  if (ranks->config.place.world == 1) return G2Z_OK;
  if (!text) text = "";
  g2z_status status = g2z__ranks_text(ranks, text, &zero);
  if (status != G2Z_OK) {
    g2z_release(ranks->services, zero);
    return status;
  }
  if (zero && strcmp(zero, text) != 0) {
    for (size_t i = 0; zero[i] && zero[i] == text[i]; i++)
      if (zero[i] == '\n') line = i + 1;
    const size_t here = strcspn(text + line, "\n"), there = strcspn(zero + line, "\n");
    status = g2z_fail(ranks->services, G2Z_BAD_ARGUMENT, "the %s differs from rank 0's: \"%.*s\" "
                      "there, \"%.*s\" on rank 0; start all ranks with the same settings and "
                      "files", what, (int)G2Z__MIN(here, 200), text + line,
                      (int)G2Z__MIN(there, 200), zero + line);
  }
  g2z_release(ranks->services, zero);
  return g2z_ranks_agree(ranks, status);
}

/* ===== >>i11 collectives =================================================
 * In:  buffers that all ranks hold. Out: their sums and copies.
 * Law: a sum has a fixed order: ranks 0, 1, ..., or the owner, the next rank, ..., around to the
 * rank before the owner. Every rank, also a failed one, enqueues the same calls in the same
 * order. */

/* ----- CPU ranks: through rank 0, which adds up -------------------------- */

#define G2Z__CHUNK_FLOATS (1 << 16)

G2Z__PRIVATE void g2z__star_round(const g2z_comm *comm, float *buffer, size_t n) {
  if (comm->wire != G2Z_FP16 && comm->wire != G2Z_BF16) return;
  for (size_t i = 0; i < n; i++) buffer[i] = g2z__round(comm->wire, buffer[i]);
}

/* Rank 0 sends to each rank r the `bytes` at r * stride of `buffer`. */
G2Z__PRIVATE g2z_status g2z__star_spread(g2z_comm *comm, char *buffer, size_t stride,
                                         size_t bytes) {
  if (comm->rank != 0)
    return g2z__ranks_receive(comm->ranks, 0, buffer + (size_t)comm->rank * stride, bytes);
  for (int peer = 1; peer < comm->world; peer++)
    G2Z_TRY(g2z__ranks_send(comm->ranks, peer, buffer + (size_t)peer * stride, bytes));
  return G2Z_OK;
}

/* Rank 0 adds up all ranks' from[n] in fp32, rounds the sum once, and sends each owner its part. */
G2Z__PRIVATE g2z_status g2z__star_reduce(g2z_comm *comm, const g2z_call *c) {
  float *sum = (float *)c->from;
  size_t slice = c->n / (size_t)comm->world;
  float *mine = sum + (size_t)comm->rank * slice;
  g2z__star_round(comm, sum, c->n);
  if (comm->rank != 0) {
    G2Z_TRY(g2z__ranks_send(comm->ranks, 0, sum, c->n * sizeof(float)));
  } else {
    for (size_t at = 0; at < c->n; at += G2Z__CHUNK_FLOATS) {
      const size_t count = G2Z__MIN(c->n - at, G2Z__CHUNK_FLOATS);
      for (int peer = 1; peer < comm->world; peer++) {
        G2Z_TRY(g2z__ranks_receive(comm->ranks, peer, comm->chunk, count * sizeof(float)));
        for (size_t i = 0; i < count; i++) sum[at + i] += comm->chunk[i];
      }
      g2z__star_round(comm, sum + at, count);
    }
  }
  if (c->owner == G2Z_OWNER_ROOT) return G2Z_OK;
  if (c->owner == G2Z_OWNER_ALL)
    return g2z__star_spread(comm, (char *)sum, 0, c->n * sizeof(float));
  G2Z_TRY(g2z__star_spread(comm, (char *)sum, slice * sizeof(float), slice * sizeof(float)));
  if (mine == c->to) return G2Z_OK;
  return comm->device->ops->grad_add(comm->device, c->to, mine, c->write, slice);
}

/* Each rank sends its row or slice to all others. */
G2Z__PRIVATE g2z_status g2z__star_rows(g2z_comm *comm, const g2z_call *c) {
  size_t bytes = c->n / (size_t)comm->world * sizeof(float);
  if (c->kind == G2Z_CALL_ROWS) bytes = c->n;
  char *mine = (char *)c->to + (size_t)comm->rank * bytes;
  if (c->kind == G2Z_CALL_GATHER && c->owner == G2Z_OWNER_ROOT)
    return g2z__star_spread(comm, (char *)c->to, 0, c->n * sizeof(float));
  if (mine != c->from) memcpy(mine, c->from, bytes);
  if (comm->rank != 0) G2Z_TRY(g2z__ranks_send(comm->ranks, 0, mine, bytes));
  for (int peer = 1; comm->rank == 0 && peer < comm->world; peer++)
    G2Z_TRY(g2z__ranks_receive(comm->ranks, peer, (char *)c->to + (size_t)peer * bytes, bytes));
  return g2z__star_spread(comm, (char *)c->to, 0, bytes * (size_t)comm->world);
}

/* Routes from or to rank 0 are direct; others pass through it. All ranks walk the list in the same
 * order, so the next message that arrives is the one that the receiver waits for. */
G2Z__PRIVATE g2z_status g2z__star_exchange(g2z_comm *comm, const g2z_call *c) {
  const size_t most = G2Z__CHUNK_FLOATS * sizeof(float);
  for (int i = 0; i < c->count; i++) {
    const g2z_route *route = &c->routes[i];
    int sender = route->owner, receiver = route->home;
    size_t from_at = route->owner_at, to_at = route->home_at;
    if (c->back) {
      sender = route->home;
      receiver = route->owner;
      from_at = route->home_at;
      to_at = route->owner_at;
    }
    const char *from = (const char *)c->from + from_at * c->n;
    char *to = (char *)c->to + to_at * c->n;
    const size_t bytes = route->elements * c->n;
    if (sender == receiver) {
      if (sender == comm->rank) memcpy(to, from, bytes);
    } else if (comm->rank == sender) {
      const int next = sender == 0 ? receiver : 0;
      G2Z_TRY(g2z__ranks_send(comm->ranks, next, from, bytes));
    } else if (comm->rank == receiver) {
      const int previous = receiver == 0 ? sender : 0;
      G2Z_TRY(g2z__ranks_receive(comm->ranks, previous, to, bytes));
    } else if (comm->rank == 0) {
      for (size_t at = 0, part; at < bytes; at += part) {
        part = G2Z__MIN(bytes - at, most);
        G2Z_TRY(g2z__ranks_receive(comm->ranks, sender, comm->chunk, part));
        G2Z_TRY(g2z__ranks_send(comm->ranks, receiver, comm->chunk, part));
      }
    }
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_span g2z__call_span(const g2z_call *c) {
  static const g2z_span reduce[] = {G2Z_SPAN_REDUCE_SCATTER, G2Z_SPAN_ALL_REDUCE, G2Z_SPAN_REDUCE};
  static_assert(G2Z_COUNT(reduce) == G2Z_OWNER_COUNT, "a span per owner");
  if (c->kind == G2Z_CALL_ROWS) return c->span;
  if (c->kind == G2Z_CALL_REDUCE) return reduce[c->owner];
  if (c->kind == G2Z_CALL_EXCHANGE) return G2Z_SPAN_EXCHANGE;
  if (c->owner == G2Z_OWNER_ROOT) return G2Z_SPAN_BROADCAST;
  return G2Z_SPAN_ALL_GATHER;
}

/* CPU ranks compute and communicate one after the other: all of a call's time is waiting. A single
 * rank's parameters are already in place, and its sums are its own gradients. */
G2Z__PRIVATE g2z_status g2z__plain_play(g2z_comm *comm, const g2z_call *c) {
  g2z_device *dev = comm->device;
  const int reduces = c->kind == G2Z_CALL_REDUCE, exchanges = c->kind == G2Z_CALL_EXCHANGE;
  const int gathers = c->kind == G2Z_CALL_GATHER || c->kind == G2Z_CALL_ROWS;
  if (c->kind == G2Z_CALL_CAST)
    return dev->ops->cast_grad(dev, c->to, (const float *)c->from, c->n);
  if (comm->world == 1 && reduces && c->to != c->from)
    return dev->ops->grad_add(dev, c->to, c->from, c->write, c->n);
  G2Z_ASSERT(comm->world > 1 || c->to == c->from);
  if (comm->world == 1 || !(reduces || exchanges || gathers)) return G2Z_OK;
  const g2z_span span = g2z__call_span(c);
  dev->ops->span_begin(dev, span);
  const double begin = g2z_seconds();
  g2z_status status;
  if (reduces) status = g2z__star_reduce(comm, c);
  else if (exchanges) status = g2z__star_exchange(comm, c);
  else status = g2z__star_rows(comm, c);
  dev->ops->span_end(dev, span);
  comm->lap_s[comm->lap_now] += g2z_seconds() - begin;
  return status;
}

G2Z__PRIVATE g2z_status g2z__plain_rows_now(g2z_comm *comm, const g2z_call *rows, int *done) {
  *done = 1;
  return comm->ops->play(comm, rows);
}
G2Z__PRIVATE g2z_status g2z__plain_allocate(g2z_comm *comm, size_t bytes, void **out) {
  return comm->device->ops->allocate(comm->device, bytes, out);
}
G2Z__PRIVATE void g2z__plain_release(g2z_comm *comm, void *memory) {
  comm->device->ops->release(comm->device, memory);
}
G2Z__PRIVATE void g2z__plain_lap(g2z_comm *comm, int lap) {
  comm->lap_now = lap;
  comm->lap_s[lap] = 0;
}
G2Z__PRIVATE double g2z__plain_waited(g2z_comm *comm, int lap) { return comm->lap_s[lap] * 1e3; }
G2Z__PRIVATE void g2z__plain_close(g2z_comm *comm) { g2z_release(comm->services, comm->chunk); }

static const g2z_collectives g2z__plain = {
    "connections to rank 0", NULL,           g2z__plain_play,   g2z__plain_rows_now,
    g2z__plain_allocate, g2z__plain_release, g2z__plain_lap,    g2z__plain_waited,
    g2z__plain_close};

/* ----- submit: play a call at once, or record it ------------------------- */

/* A recorded step is a list: graph, calls, WAIT, graph, calls, WAIT, ... g2z__trainer_enqueue (room
 * 14) replays it. A graph holds the device's work between two WAITs. It runs before the calls that
 * were submitted during that work, because these wait for departures in it. Calls are issued again
 * in each replay, outside of graphs: so a step's last transfers overlap the beginning of the next
 * step, and waiting can be timed. In a job of one all calls are the device's work, in one graph. */
G2Z__PRIVATE g2z_status g2z__record_add(g2z_comm *comm, const g2z_call *call) {
  g2z__record *record = comm->record;
  G2Z_TRY(G2Z_GROW(comm->services, &record->calls, &record->capacity, record->count,
                   record->count + 1));
  record->calls[record->count++] = *call;
  return G2Z_OK;
}

/* Ends the graph, and inserts it into the list before the calls that were submitted during it. */
G2Z__PRIVATE g2z_status g2z__record_cut(g2z_comm *comm) {
  g2z__record *record = comm->record;
  g2z_call graph = g2z_call_of(G2Z_CALL_GRAPH, NULL, NULL, 0);
  G2Z_TRY(comm->device->ops->graph_end(comm->device, &graph.graph));
  size_t at = record->meanwhile, later = record->count - at;
  if (graph.graph) {
    g2z_status status = g2z__record_add(comm, &graph);
    if (status != G2Z_OK) {
      comm->device->ops->graph_free(comm->device, graph.graph);
      return status;
    }
    memmove(&record->calls[at + 1], &record->calls[at], later * sizeof graph);
    record->calls[at] = graph;
  }
  record->meanwhile = record->count;
  return G2Z_OK;
}

G2Z_API g2z_call g2z_call_of(g2z_call_kind kind, void *to, const void *from, size_t n) {
  g2z_call call;
  memset(&call, 0, sizeof call);
  call.kind = kind;
  call.to = to;
  call.from = (void *)from;
  call.n = n;
  return call;
}

G2Z_API g2z_status g2z_comm_submit(g2z_comm *comm, const g2z_call *call) {
  g2z_call now = *call;
  if (now.kind == G2Z_CALL_AFTER && comm->ops->depart)
    G2Z_TRY(comm->ops->depart(comm, &now.place));
  if (!comm->record || comm->world == 1) return comm->ops->play(comm, &now); /* CPU: plain_play */
  if (now.kind != G2Z_CALL_WAIT) return g2z__record_add(comm, &now);
  /* A WAIT ends the graph and begins the next, even after a failure: the caller ends that one. */
  g2z_status status = g2z__record_cut(comm);
  if (status == G2Z_OK) status = g2z__record_add(comm, &now);
  comm->record->meanwhile = comm->record->count;
  g2z_status begun = comm->device->ops->graph_begin(comm->device);
  if (status != G2Z_OK) return status;
  return begun;
}

G2Z__PRIVATE void g2z__record_free(g2z_comm *comm, g2z__record *record) {
  for (size_t i = 0; i < record->count; i++)
    comm->device->ops->graph_free(comm->device, record->calls[i].graph);
  g2z_release(comm->services, record->calls);
  memset(record, 0, sizeof *record);
}

/* ----- choosing ---------------------------------------------------------- */

#if defined(__CUDACC__) /* gpt2_zero_kernels.cuh, >>k80 */
static g2z_status g2z__cuda_comm_open(g2z_comm *comm, const g2z_comm_config *wanted);
#else
/* Never called: no device of this kind exists. */
#define g2z__cuda_comm_open(comm, wanted) G2Z_UNSUPPORTED
#endif

G2Z_API g2z_status g2z_comm_create(g2z_ranks *ranks, g2z_device *device,
                                   const g2z_comm_config *config, g2z_comm **out) {
  g2z_comm *comm;
  *out = NULL;
  g2z_status status = g2z_ranks_agree(ranks, G2Z_NEW(device->services, 1, &comm));
  if (status != G2Z_OK) {
    g2z_release(device->services, comm);
    return status;
  }
  comm->services = device->services;
  comm->ranks = ranks;
  comm->device = device;
  comm->wire = config->wire;
  comm->gather = config->gather;
  comm->reduce = config->reduce;
  comm->rank = g2z_ranks_place(ranks)->rank;
  comm->world = g2z_ranks_place(ranks)->world;
  if (comm->world > 1 && device->kind == G2Z_DEVICE_CUDA)
    status = g2z__cuda_comm_open(comm, config);
  else {
    comm->ops = &g2z__plain;
    comm->gather = comm->reduce = G2Z_TRANSPORT_NCCL; /* not COPY, so the log names ops->name */
    if (comm->rank == 0 && comm->world > 1)
      status = G2Z_NEW(comm->services, G2Z__CHUNK_FLOATS, &comm->chunk);
  }
  if (status != G2Z_OK) g2z_comm_free(comm);
  else *out = comm;
  return status;
}

G2Z__PRIVATE const char *g2z__comm_carrier(const g2z_comm *comm, g2z_transport transport) {
  return transport == G2Z_TRANSPORT_COPY ? "copy engines" : comm->ops->name;
}

G2Z_API void g2z_comm_free(g2z_comm *comm) {
  if (!comm) return;
  if (comm->ops) comm->ops->close(comm);
  g2z_release(comm->services, comm);
}

/* ===== >>i12 weights =====================================================
 * In:  model.safetensors, or the files of its index, and config.json of a GPT-2.
 * Out: its sizes, and its weights in fp32 and canonical order. To save a model, this room writes
 * config.json and the header of model.safetensors; the ranks write the elements after it. Law: a
 * header is checked completely before a tensor is read. */

/* ----- safetensors: independent of the model ----- */

#define G2Z__TENSOR_HEADER_MOST 100000000u /* bytes; the limit of the reference implementation */
#define G2Z__TENSOR_RANK 8

enum { G2Z__F64, G2Z__F32, G2Z__F16, G2Z__BF16, G2Z__TENSOR_TYPES = 19 };
static const struct {
  const char *name;
  uint64_t bytes;
} g2z__tensor_types[G2Z__TENSOR_TYPES] = {
    {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, /* the reader converts these to fp32 */
    {"I64", 8}, {"U64", 8}, {"C64", 8}, {"I32", 4}, {"U32", 4}, {"I16", 2}, {"U16", 2}, {"I8", 1},
    {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1},
    {"F8_E5M2FNUZ", 1}};

/* First bytes of other formats that users name model.safetensors. */
static const struct { const char *begin, *what; } g2z__tensor_others[] = {
    {"version https://git-lfs", "a pointer of git-lfs in place of the file: type git lfs pull in "
                                "its directory"},
    {"PK\003\004", "a file of torch.save: save the model with save_pretrained"},
    {"\200\002", "a pickle, as torch.save wrote it: save the model with save_pretrained"},
    {"GGUF", "a GGUF file: take the model's safetensors"},
    {"\211HDF", "an HDF5 file of TensorFlow: take the model's safetensors"},
    {"\306\327\064\001", "weights of llm.c: its dev/eval/export_hf.py makes a directory of them"},
    {"\037\213", "packed by gzip: unpack it"},
    {"<", "a web page: download the file again"}};

typedef struct g2z__tensor_file {
  struct g2z__tensor_file *next;
  char *header;                 /* JSON text; tensor names are unescaped in place */
  char *path;                   /* after the struct, in the same allocation */
  int file;                     /* -1: not open */
} g2z__tensor_file;

typedef struct g2z__safetensor {
  const char *name;
  g2z__tensor_file *in;
  int type;                     /* index into g2z__tensor_types */
  int rank;                     /* dimensions; 0: a scalar */
  uint64_t shape[G2Z__TENSOR_RANK];
  size_t elements;
  uint64_t begin, bytes;        /* byte range in the file */
  int used;                     /* the model has a weight for it */
} g2z__safetensor;

/* The tensors of one file, or of all files of an index. */
typedef struct g2z__safetensors {
  g2z_services *services;
  char *path;                   /* of the file, or of the index; in the same allocation */
  g2z__safetensor *tensors;     /* sorted by name */
  size_t count, capacity;
  g2z__tensor_file *parts;
} g2z__safetensors;

/* ----- reading a header ----- */

/* Reads at most `most` numbers, all >= 0, and returns their count. */
G2Z__PRIVATE int g2z__tensor_parse_list(g2z_json *json, const g2z__safetensor *tensor,
                                        const char *what, uint64_t *out, int most) {
  int count = 0;
  g2z_json_enter(json, '[');
  while (g2z_json_next(json, ']', NULL)) {
    int64_t value = g2z_json_integer(json);
    if (value < 0 || count == most) {
      const char *bad = value < 0 ? "below zero" : "with too many numbers";
      g2z_json_fail(json, "tensor \"%.200s\" has a %s %s: the file is damaged; copy it again",
                    tensor->name, what, bad);
      return 0;
    }
    out[count++] = (uint64_t)value;
  }
  return count;
}

/* Reads one entry of a header. Its type, shape and offsets must agree. `begin` is still relative to
 * the end of the header. */
G2Z__PRIVATE g2z_status g2z__tensor_parse(g2z_json *json, g2z__safetensor *tensor) {
  uint64_t offsets[2] = {0, 0};
  int bounds = 0;
  g2z_json_text key;
  tensor->type = tensor->rank = -1;
  g2z_json_enter(json, '{');
  while (g2z_json_next(json, '}', &key)) {
    if (g2z_json_is(&key, "dtype")) {
      const g2z_json_text text = g2z_json_string(json);
      int type = 0;
      while (type < G2Z__TENSOR_TYPES && !g2z_json_is(&text, g2z__tensor_types[type].name)) type++;
      if (type == G2Z__TENSOR_TYPES)
        g2z_json_fail(json, "tensor \"%.200s\" has dtype %.*s, which is not known: save it as F32",
                      tensor->name, (int)G2Z__MIN(text.bytes, 20), (const char *)text.at);
      tensor->type = type;
    } else if (g2z_json_is(&key, "shape"))
      tensor->rank = g2z__tensor_parse_list(json, tensor, "shape", tensor->shape, G2Z__TENSOR_RANK);
    else if (g2z_json_is(&key, "data_offsets"))
      bounds = g2z__tensor_parse_list(json, tensor, "pair of data_offsets", offsets, 2);
    else g2z_json_skip(json);
  }
  if (json->status != G2Z_OK) return json->status;
  if (tensor->type < 0 || tensor->rank < 0 || bounds != 2)
    return g2z_json_fail(json, "tensor \"%.200s\" lacks its dtype, shape or pair of data_offsets: "
                         "the file is damaged; copy it again", tensor->name);
  tensor->bytes = g2z__tensor_types[tensor->type].bytes;
  for (int i = 0; i < tensor->rank; i++) {
    if (tensor->shape[i] && tensor->bytes > (uint64_t)INT64_MAX / tensor->shape[i])
      return g2z_json_fail(json, "tensor \"%.200s\" has more than 2^63 bytes: the file is damaged; "
                           "copy it again", tensor->name);
    tensor->bytes *= tensor->shape[i];
  }
  tensor->elements = (size_t)(tensor->bytes / g2z__tensor_types[tensor->type].bytes);
  tensor->begin = offsets[0];
  if (offsets[1] >= offsets[0] && offsets[1] - offsets[0] == tensor->bytes) return G2Z_OK;
  return g2z_json_fail(json, "tensor \"%.200s\" has data_offsets from %" PRIu64 " to %" PRIu64
                       ", but its shape takes %" PRIu64 " bytes: the file is damaged; copy it "
                       "again", tensor->name, offsets[0], offsets[1], tensor->bytes);
}

G2Z__PRIVATE int g2z__tensor_by_begin(const void *a, const void *b) {
  const g2z__safetensor *x = (const g2z__safetensor *)a, *y = (const g2z__safetensor *)b;
  const int order = (x->begin > y->begin) - (x->begin < y->begin);
  if (order != 0) return order;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty tensors first */
}

G2Z__PRIVATE int g2z__tensor_by_name(const void *a, const void *b) {
  return strcmp(((const g2z__safetensor *)a)->name, ((const g2z__safetensor *)b)->name);
}

/* Sorts the tensors from `first` on by name. Names must be unique. */
G2Z__PRIVATE g2z_status g2z__safetensors_sort(g2z__safetensors *set, size_t first) {
  if (set->count > first)
    qsort(set->tensors + first, set->count - first, sizeof *set->tensors, g2z__tensor_by_name);
  for (size_t i = first + 1; i < set->count; i++) {
    const g2z__safetensor *a = &set->tensors[i - 1], *b = a + 1;
    if (strcmp(a->name, b->name) != 0) continue;
    const char *path = a->in == b->in ? a->in->path : set->path;
    return g2z_fail(set->services, G2Z_FORMAT, "%s names tensor \"%.200s\" twice: write it with "
                    "each name once", path, a->name);
  }
  return G2Z_OK;
}

/* Reads and checks a file's header (its length, then JSON); adds the file's tensors to the set. */
G2Z__PRIVATE g2z_status g2z__safetensors_add(g2z__safetensors *set, const char *path) {
  g2z_services *services = set->services;
  const size_t first = set->count, path_bytes = strlen(path) + 1;
  struct stat info;
  g2z_json json;
  g2z_json_text key;
  uint64_t length = 0, end = 0;
  g2z__tensor_file *part;
  G2Z_TRY(g2z_allocate(services, 1, sizeof *part + path_bytes, &part));
  part->path = (char *)(part + 1);
  memcpy(part->path, path, path_bytes);
  part->next = set->parts;
  set->parts = part;
  G2Z_TRY(g2z__open_read(services, path, &part->file));
  int64_t got = fstat(part->file, &info);
  if (got == 0) got = g2z__pread(part->file, &length, 8, 0);
  if (got < 0) return g2z_fail_file(services, errno, "read", path);
  const uint64_t bytes = (uint64_t)info.st_size, data = bytes - 8 - length;
  if (got < 8)
    return g2z_fail(services, G2Z_FORMAT, "%s has %" PRIu64 " byte%s, too few for a safetensors "
                    "file: copy it again", path, bytes, G2Z_PLURAL(info.st_size));
  if (length > G2Z__TENSOR_HEADER_MOST || length > bytes - 8) {
    char head[32] = "";
    g2z__pread(part->file, head, sizeof head - 1, 0);
    for (size_t i = 0; i < G2Z_COUNT(g2z__tensor_others); i++)
      if (strncmp(head, g2z__tensor_others[i].begin, strlen(g2z__tensor_others[i].begin)) == 0)
        return g2z_fail(services, G2Z_FORMAT, "%s is %s", path, g2z__tensor_others[i].what);
    return g2z_fail(services, G2Z_FORMAT,
                    "%s promises a header of %" PRIu64 " bytes but has %" PRIu64 " bytes in all: "
                    "it was cut, or it is not a safetensors file; copy it again", path, length,
                    bytes);
  }
  G2Z_TRY(G2Z_NEW(services, (size_t)length, &part->header));
  G2Z_TRY(g2z__read_at(services, part->file, path, part->header, (size_t)length, 8));

  /* The header lists the tensors. */
  const unsigned char *at = (const unsigned char *)part->header, *header_end = at + length;
  for (size_t step = 1; at < header_end; at += step)
    if ((step = g2z_utf8_length(at, header_end)) == 0)
      return g2z_fail(services, G2Z_FORMAT, "%s: byte %zu of the header is not UTF-8: the file is "
                      "damaged; copy it again", path,
                      (size_t)(length - (uint64_t)(header_end - at)));
  g2z_json_open(&json, services, path, part->header, (size_t)length);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    if (g2z_json_is(&key, "__metadata__")) { /* strings or null; ignored */
      if (g2z_json_peek(&json) == 'n') g2z_json_skip(&json);
      else if (g2z_json_enter(&json, '{'))
        while (g2z_json_next(&json, '}', &key)) g2z_json_string(&json);
      continue;
    }
    G2Z_TRY(G2Z_GROW(services, &set->tensors, &set->capacity, set->count, set->count + 1));
    g2z__safetensor *tensor = &set->tensors[set->count++];
    memset(tensor, 0, sizeof *tensor);
    tensor->in = part;
    char *name = part->header + (key.at - json.begin);
    const size_t name_bytes = g2z_json_unescape(&key, (unsigned char *)name);
    name[name_bytes] = 0; /* overwrites at most the closing quote */
    tensor->name = name;
    if (strlen(name) != name_bytes) g2z_json_fail(&json, "a tensor's name contains a NUL");
    g2z__tensor_parse(&json, tensor);
  }
  G2Z_TRY(g2z_json_close(&json));

  /* They must tile the bytes after the header without gaps or overlaps. */
  G2Z_TRY(g2z__safetensors_sort(set, first)); /* first finds names that come twice */
  if (set->count > first)
    qsort(set->tensors + first, set->count - first, sizeof *set->tensors, g2z__tensor_by_begin);
  for (size_t i = first; i < set->count && end <= data; i++) {
    g2z__safetensor *tensor = &set->tensors[i];
    if (tensor->begin != end)
      return g2z_fail(services, G2Z_FORMAT, "%s: tensor \"%.200s\" begins at data offset "
                      "%" PRIu64 ", but the tensors before it end at %" PRIu64 ": the file is "
                      "damaged; copy it again", path, tensor->name, tensor->begin, end);
    end += tensor->bytes; /* is data_offsets[1], so below 2^63 */
    tensor->begin += 8 + length;
  }
  if (end == data) return G2Z_OK;
  const char *least = end > data ? "at least " : ""; /* the loop ends early */
  return g2z_fail(services, G2Z_FORMAT, "%s promises %s%" PRIu64 " bytes of tensors after its "
                  "header but has %" PRIu64 ": it was cut or is unfinished; copy it again", path,
                  least, end, data);
}

/* Adds every file that the index names in its weight_map. They lie in its directory. */
G2Z__PRIVATE g2z_status g2z__safetensors_add_index(g2z__safetensors *set, const char *text,
                                                   size_t bytes) {
  const char *slash = strrchr(set->path, '/');
  int directory = 0; /* bytes of the path up to its last slash */
  if (slash) directory = (int)(slash + 1 - set->path);
  char name[256], path[PATH_MAX + sizeof name];
  g2z_json json;
  g2z_json_text key;
  g2z_json_open(&json, set->services, set->path, text, bytes);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    if (!g2z_json_is(&key, "weight_map")) {
      g2z_json_skip(&json);
      continue;
    }
    g2z_json_enter(&json, '{');
    while (g2z_json_next(&json, '}', &key)) {
      const g2z_json_text file = g2z_json_string(&json);
      if (file.bytes >= sizeof name) g2z_json_fail(&json, "a file name has more than 255 bytes");
      if (json.status != G2Z_OK) break;
      name[g2z_json_unescape(&file, (unsigned char *)name)] = 0;
      snprintf(path, sizeof path, "%.*s%s", directory, set->path, name);
      const g2z__tensor_file *part = set->parts;
      while (part && strcmp(part->path, path) != 0) part = part->next;
      if (!part) json.status = g2z__safetensors_add(set, path);
    }
  }
  G2Z_TRY(g2z_json_close(&json));
  if (set->count) return G2Z_OK;
  return g2z_fail(set->services, G2Z_FORMAT, "%s has no weight_map that names files of tensors: "
                  "copy the model again", set->path);
}

G2Z__PRIVATE void g2z__safetensors_free(g2z__safetensors *set) {
  if (!set) return;
  for (g2z__tensor_file *part = set->parts, *next; part; part = next) {
    next = part->next;
    if (part->file >= 0) close(part->file);
    g2z_release(set->services, part->header);
    g2z_release(set->services, part);
  }
  g2z_release(set->services, set->tensors);
  g2z_release(set->services, set);
}

/* Opens a file of tensors, or all files of an index: a path that ends in ".json". */
G2Z__PRIVATE g2z_status g2z__safetensors_open(g2z_services *services, const char *path,
                                              g2z__safetensors **out) {
  const size_t length = strlen(path);
  g2z__safetensors *set;
  char *text = NULL;
  size_t bytes;
  g2z_status status;
  *out = NULL;
  G2Z_TRY(g2z_allocate(services, 1, sizeof *set + length + 1, &set));
  set->services = services;
  set->path = (char *)(set + 1);
  memcpy(set->path, path, length + 1);
  if (length < 5 || strcmp(path + length - 5, ".json") != 0)
    status = g2z__safetensors_add(set, path);
  else {
    status = g2z_read_file(services, path, G2Z__TENSOR_HEADER_MOST, &text, &bytes);
    if (status == G2Z_OK) status = g2z__safetensors_add_index(set, text, bytes);
    g2z_release(services, text);
  }
  if (status == G2Z_OK) status = g2z__safetensors_sort(set, 0);
  if (status == G2Z_OK) *out = set;
  else g2z__safetensors_free(set);
  return status;
}

/* The position of a tensor, or -1 if the set has no tensor of that name. */
G2Z__PRIVATE int g2z__safetensors_find(const g2z__safetensors *set, const char *name) {
  g2z__safetensor key;
  key.name = name;
  if (set->count == 0) return -1;
  const g2z__safetensor *found = (const g2z__safetensor *)bsearch(
      &key, set->tensors, set->count, sizeof key, g2z__tensor_by_name);
  if (!found) return -1;
  return (int)(found - set->tensors);
}

/* Reads elements [first, first + count) of an F32, F16, BF16 or F64 tensor as fp32. */
G2Z__PRIVATE g2z_status g2z__safetensors_read(g2z__safetensors *set, int index, size_t first,
                                              size_t count, float *out) {
  const g2z__safetensor *tensor = &set->tensors[index];
  const char *path = tensor->in->path;
  const size_t size = (size_t)g2z__tensor_types[tensor->type].bytes;
  unsigned char raw[32768];
  G2Z_ASSERT(count <= tensor->elements && first <= tensor->elements - count);
  if (tensor->type > G2Z__BF16)
    return g2z_fail(set->services, G2Z_UNSUPPORTED, "%s: tensor \"%.200s\" is of type %s, but only "
                    "F32, F16, BF16 and F64 can be read: save it as F32", path, tensor->name,
                    g2z__tensor_types[tensor->type].name);
  for (size_t done = 0, n; done < count; done += n) {
    n = G2Z__MIN(count - done, sizeof raw / size);
    G2Z_TRY(g2z__read_at(set->services, tensor->in->file, path, raw, n * size,
                         tensor->begin + (first + done) * size));
    if (tensor->type == G2Z__F32) {
      memcpy(out + done, raw, n * size);
    } else if (tensor->type == G2Z__F64) {
      for (size_t i = 0; i < n; i++) {
        double wide;
        memcpy(&wide, raw + size * i, sizeof wide);
        out[done + i] = (float)wide;
      }
    } else {
      const g2z_dtype dtype = tensor->type == G2Z__F16 ? G2Z_FP16 : G2Z_BF16;
      for (size_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, raw + size * i, sizeof half);
        out[done + i] = g2z__widen(dtype, half);
      }
    }
  }
  return G2Z_OK;
}

/* ----- writing ----- */

/* Creates a file of F32 tensors at its full length; `tensors` gives name, rank and shape of each.
 * The elements come in this order, from offset writer->written on. As in the reference
 * implementation, spaces after the header make them begin at a multiple of 8. */
G2Z__PRIVATE g2z_status g2z__safetensors_create(g2z_services *services, const char *path,
                                                const g2z__safetensor *tensors, size_t count,
                                                g2z_writer **out) {
  uint64_t length = 0, offset = 0;
  g2z_writer *writer;
  *out = NULL;
  G2Z_TRY(g2z_writer_create(services, path, &writer));
  g2z_writer_put(writer, &length, sizeof length);
  /* transformers refuses a file without this format */
  g2z_writer_printf(writer, "{\"__metadata__\": {\"format\": \"pt\"}");
  for (size_t i = 0; i < count; i++) {
    uint64_t bytes = 4;
    G2Z_ASSERT(tensors[i].rank >= 0 && tensors[i].rank <= G2Z__TENSOR_RANK);
    g2z_writer_put(writer, ", ", 2);
    g2z__json_quote(writer, tensors[i].name);
    g2z_writer_printf(writer, ": {\"dtype\": \"F32\", \"shape\": [");
    for (int k = 0; k < tensors[i].rank; bytes *= tensors[i].shape[k++])
      g2z_writer_printf(writer, "%s%" PRIu64, k ? ", " : "", tensors[i].shape[k]);
    g2z_writer_printf(writer, "], \"data_offsets\": [%" PRIu64 ", %" PRIu64 "]}", offset,
                      offset + bytes);
    offset += bytes;
  }
  g2z_writer_put(writer, "}", 1);
  g2z_writer_put(writer, "       ", (size_t)(-writer->written & 7));
  length = writer->written - sizeof length;
  g2z_status status = g2z__writer_patch(writer, 0, &length, sizeof length);
  if (status == G2Z_OK)
    status = g2z__writer_check(writer, g2z__resize(writer->file, writer->written + offset) == 0,
                               "make room in");
  if (status == G2Z_OK) *out = writer;
  else g2z_writer_free(writer);
  return status;
}

/* ----- GPT-2 in files ----- */

#define G2Z__WEIGHTS_PREFIX "transformer."
#define G2Z__WEIGHTS_PREFIX_BYTES (sizeof G2Z__WEIGHTS_PREFIX - 1)
#define G2Z__WEIGHTS_CHUNK 65536 /* elements copied at a time from file to model */

/* Lists name, rank, shape and number of elements of every tensor of the model in canonical order.
 * The names have the prefix: "transformer.h.0.ln_1.weight". Free the list with g2z_release. */
G2Z__PRIVATE g2z_status g2z__weights_list(g2z_services *services, const g2z_model_config *model,
                                          g2z__safetensor **list, size_t *count) {
  const size_t name_bytes = 64;
  const int layers = model->layers;
  *count = 0;
  const size_t most = (size_t)(layers + 1) * G2Z_PARAM_COUNT;
  G2Z_TRY(g2z_allocate(services, most, sizeof **list + name_bytes, list));
  for (int u = 0; u < layers + 3; u++) {
    const g2z_unit_kind kind = g2z__unit_kind(model, u);
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      const g2z_param_info info = g2z__param_describe(model, (g2z_param)p);
      if (info.unit != kind) continue;
      char block[16] = "", *name = (char *)(*list + most) + name_bytes * *count;
      if (kind == G2Z_UNIT_BLOCK) snprintf(block, sizeof block, "h.%d.", layers - u);
      snprintf(name, name_bytes, G2Z__WEIGHTS_PREFIX "%s%s", block, info.hf_name);
      g2z__safetensor *tensor = &(*list)[(*count)++];
      tensor->name = name;
      tensor->rank = info.rank;
      tensor->shape[0] = info.cols;
      if (info.rank == 2) {
        tensor->shape[0] = info.rows;
        tensor->shape[1] = info.cols;
      }
      tensor->elements = info.elements;
    }
  }
  return G2Z_OK;
}

/* ----- config.json ----- */

/* Sizes in GPT2Config: name, other name, member of g2z_model_config. */
static const struct {
  const char *name, *also;
  size_t at;
} g2z__config_sizes[] = {
    {"n_layer", "num_hidden_layers", offsetof(g2z_model_config, layers)},
    {"n_head", "num_attention_heads", offsetof(g2z_model_config, heads)},
    {"n_embd", "hidden_size", offsetof(g2z_model_config, channels)},
    {"n_positions", "max_position_embeddings", offsetof(g2z_model_config, context)},
    {"vocab_size", "vocab_size", offsetof(g2z_model_config, vocab)}};

/* Members of GPT2Config, and the one or two values, as JSON, that this kit can compute. */
static const struct { const char *name, *value, *also; } g2z__config_values[] = {
    {"model_type", "\"gpt2\"", ""},
    {"activation_function", "\"gelu_new\"", "\"gelu_pytorch_tanh\""},
    {"scale_attn_weights", "true", ""},
    {"scale_attn_by_inverse_layer_idx", "false", ""},
    {"reorder_and_upcast_attn", "false", ""},
    {"add_cross_attention", "false", ""},
    {"tie_word_embeddings", "true", ""}};

G2Z__PRIVATE int *g2z__config_size(g2z_model_config *model, size_t i) {
  return (int *)(void *)((char *)model + g2z__config_sizes[i].at);
}

/* Stores the training dropout, so that training continued in Python uses the same. */
G2Z__PRIVATE g2z_status g2z__weights_put_config(g2z_writer *writer, const g2z_model_config *model,
                                                float dropout) {
  static const char *const dropouts[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop"};
  int eot = model->eot;
  if (eot < 0 || eot >= model->vocab) eot = model->vocab - 1;
  char hash[20];
  g2z_model_config sizes = *model;
  g2z_json_out json = {writer, 2, 0, 0};
  g2z_json_begin(&json, NULL, '{');
  g2z_json_begin(&json, "architectures", '[');
  g2z_json_put_string(&json, NULL, "GPT2LMHeadModel");
  g2z_json_end(&json, ']');
  for (size_t i = 0; i < G2Z_COUNT(g2z__config_values); i++)
    g2z__json_put(&json, g2z__config_values[i].name, g2z__config_values[i].value);
  for (size_t i = 0; i < G2Z_COUNT(g2z__config_sizes); i++)
    g2z_json_put_integer(&json, g2z__config_sizes[i].name, *g2z__config_size(&sizes, i));
  g2z_json_put_integer(&json, "n_ctx", model->context); /* read by transformers before 2021 */
  g2z_json_put_string(&json, "n_inner", NULL);
  g2z_json_put_number(&json, "layer_norm_epsilon", 1e-5);
  g2z_json_put_number(&json, "initializer_range", 0.02);
  for (int i = 0; i < 3; i++) /* writes 0.1, not the float's 0.100000001 */
    g2z_json_put_number(&json, dropouts[i], rint((double)dropout * 1e6) * 1e-6);
  g2z_json_put_integer(&json, "bos_token_id", eot);
  g2z_json_put_integer(&json, "eos_token_id", eot);
  snprintf(hash, sizeof hash, "%016" PRIx64, model->vocab_hash);
  if (model->vocab_hash) g2z_json_put_string(&json, "vocab_hash", hash);
  g2z_json_put_string(&json, "dtype", "float32");
  g2z_json_end(&json, '}');
  return g2z_writer_put(writer, "\n", 1);
}

G2Z__PRIVATE int g2z__config_parse_size(g2z_json *json, const char *name) {
  int64_t value = g2z_json_integer(json);
  if (value >= 0 && value <= INT32_MAX) return (int)value;
  g2z_json_fail(json, "%s=%" PRId64 " must be between 0 and %d", name, value, INT32_MAX);
  return 0;
}

/* Reads the members that the model depends on; skips all others. */
G2Z__PRIVATE g2z_status g2z__config_parse(g2z_services *services, const char *path,
                                          const char *text, size_t bytes, g2z_model_config *model) {
  g2z_json json;
  g2z_json_text key;
  int inner = 0;
  g2z_json_open(&json, services, path, text, bytes);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    size_t size = 0, value = 0;
    while (size < G2Z_COUNT(g2z__config_sizes) &&
           !g2z_json_is(&key, g2z__config_sizes[size].name) &&
           !g2z_json_is(&key, g2z__config_sizes[size].also))
      size++;
    while (value < G2Z_COUNT(g2z__config_values) &&
           !g2z_json_is(&key, g2z__config_values[value].name))
      value++;
    if (size < G2Z_COUNT(g2z__config_sizes))
      *g2z__config_size(model, size) =
          g2z__config_parse_size(&json, g2z__config_sizes[size].name);
    else if (value < G2Z_COUNT(g2z__config_values)) {
      char is[40];
      const char *wanted = g2z__config_values[value].value;
      g2z_json_peek(&json);
      const unsigned char *at = json.at;
      g2z_json_skip(&json);
      snprintf(is, sizeof is, "%.*s", (int)(json.at - at), (const char *)at);
      if (strcmp(is, wanted) != 0 && strcmp(is, g2z__config_values[value].also) != 0)
        g2z_json_fail(&json, "%s is %s, but this kit computes %s: take a GPT-2 as published",
                      g2z__config_values[value].name, is, wanted);
    } else if (g2z_json_is(&key, "eos_token_id") && strchr("0123456789", g2z_json_peek(&json)))
      model->eot = g2z__config_parse_size(&json, "eos_token_id"); /* skips null or a list */
    else if (g2z_json_is(&key, "vocab_hash")) {
      const g2z_json_text digits = g2z_json_string(&json);
      char hash[17] = "";
      if (digits.bytes == 16) memcpy(hash, digits.at, 16);
      if (strspn(hash, "0123456789abcdef") != 16)
        g2z_json_fail(&json, "vocab_hash is not 16 hexadecimal digits: remove it");
      else model->vocab_hash = strtoull(hash, NULL, 16);
    } else if (g2z_json_is(&key, "n_inner") && g2z_json_peek(&json) != 'n')
      inner = g2z__config_parse_size(&json, "n_inner");
    else if (g2z_json_is(&key, "layer_norm_epsilon")) {
      const double eps = g2z_json_number(&json);
      if (!(fabs(eps - 1e-5) < 1e-12))
        g2z_json_fail(&json, "layer_norm_epsilon is %g, not 1e-05: take a GPT-2 as published", eps);
    } else g2z_json_skip(&json);
  }
  G2Z_TRY(g2z_json_close(&json));
  for (size_t i = 0; i < G2Z_COUNT(g2z__config_sizes); i++)
    if (*g2z__config_size(model, i) == 0)
      return g2z_fail(services, G2Z_FORMAT, "%s has no %s, or 0, so it is no config of a GPT-2: "
                      "copy the model's config.json there", path, g2z__config_sizes[i].name);
  if (inner && inner != 4 * (int64_t)model->channels)
    return g2z_fail(services, G2Z_UNSUPPORTED, "%s: n_inner=%d is not 4 * n_embd = %" PRId64 ": "
                    "take a GPT-2 as published", path, inner, 4 * (int64_t)model->channels);
  return g2z__model_config_check(services, model);
}

G2Z_API g2z_status g2z_weights_config(g2z_services *services, const char *directory,
                                      g2z_model_config *out) {
  const g2z_path path = g2z_path_in(directory, "config.json");
  char *text;
  size_t bytes;
  g2z_model_config model;
  memset(out, 0, sizeof *out);
  memset(&model, 0, sizeof model);
  model.eot = G2Z__EOT; /* GPT2Config's default if absent */
  if (!*directory) return g2z_fail_file(services, ENOENT, "open the directory", directory);
  G2Z_TRY(g2z_read_file(services, path.text, 1 << 20, &text, &bytes));
  const g2z_status status = g2z__config_parse(services, path.text, text, bytes, &model);
  g2z_release(services, text);
  if (status == G2Z_OK) *out = model;
  return status;
}

/* ----- reading a model ----- */

/* "[50257, 768]" */
G2Z__PRIVATE const char *g2z__tensor_shape_text(const g2z__safetensor *tensor, char text[200]) {
  size_t length = 0;
  text[length++] = '[';
  for (int i = 0; i < tensor->rank; i++)
    length += (size_t)snprintf(text + length, 200 - length, "%s%" PRIu64, i ? ", " : "",
                               tensor->shape[i]);
  text[length++] = ']';
  text[length] = 0;
  return text;
}

/* The position of a weight, whose name may lack the prefix. wte may be stored only as the head. */
G2Z__PRIVATE int g2z__weights_find(const g2z__safetensors *set, const char *name) {
  int index = g2z__safetensors_find(set, name);
  if (index < 0) index = g2z__safetensors_find(set, name + G2Z__WEIGHTS_PREFIX_BYTES);
  if (index < 0 && strcmp(name, G2Z__WEIGHTS_PREFIX "wte.weight") == 0)
    index = g2z__safetensors_find(set, "lm_head.weight");
  return index;
}

/* Marks tensor `index` of a set as used. It must have the shape that the model needs. */
G2Z__PRIVATE g2z_status g2z__weights_use(g2z__safetensors *set, int index,
                                         const g2z__safetensor *want) {
  g2z__safetensor *got = &set->tensors[index];
  char got_text[200], want_text[200];
  got->used = 1;
  if (got->rank == want->rank &&
      memcmp(got->shape, want->shape, (size_t)want->rank * sizeof want->shape[0]) == 0)
    return G2Z_OK;
  const char *remedy = "take the config.json that belongs to it";
  if (got->rank == 2 && want->rank == 2 && got->shape[0] == want->shape[1] &&
      got->shape[1] == want->shape[0])
    remedy = "transpose it, since GPT-2 stores [in, out]";
  return g2z_fail(set->services, G2Z_FORMAT,
                  "%s: tensor \"%.200s\" has the shape %s, but the model needs %s: %s",
                  got->in->path, got->name, g2z__tensor_shape_text(got, got_text),
                  g2z__tensor_shape_text(want, want_text), remedy);
}

/* Whether this is one of the mask buffers that Hugging Face also stores: h.N.attn.bias and
 * h.N.attn.masked_bias, with or without the prefix. */
G2Z__PRIVATE int g2z__weights_is_mask(const char *name) {
  if (strncmp(name, G2Z__WEIGHTS_PREFIX, G2Z__WEIGHTS_PREFIX_BYTES) == 0)
    name += G2Z__WEIGHTS_PREFIX_BYTES;
  if (strncmp(name, "h.", 2) != 0) return 0;
  const size_t digits = strspn(name + 2, "0123456789");
  const char *rest = name + 2 + digits;
  return digits && (strcmp(rest, ".attn.bias") == 0 || strcmp(rest, ".attn.masked_bias") == 0);
}

/* Checks that the set holds every weight of the list and nothing else. */
G2Z__PRIVATE g2z_status g2z__weights_match(g2z__safetensors *set, int layers,
                                           const g2z__safetensor *list, size_t count) {
  const int head = g2z__safetensors_find(set, "lm_head.weight");
  for (size_t i = 0; i < count; i++) {
    const char *name = list[i].name, *bare = name + G2Z__WEIGHTS_PREFIX_BYTES;
    const int index = g2z__weights_find(set, name);
    if (g2z__safetensors_find(set, name) >= 0 && g2z__safetensors_find(set, bare) >= 0)
      return g2z_fail(set->services, G2Z_FORMAT, "%s has both \"%s\" and \"%s\": it must have one "
                      "of them", set->path, name, bare);
    if (index < 0) {
      const char *its_first = set->count ? set->tensors[0].name : "";
      return g2z_fail(set->services, G2Z_FORMAT, "%s has no tensor \"%s\", which a GPT-2 with "
                      "layers=%d needs (its first is \"%.60s\"): take the config.json that belongs "
                      "to it, or save it as GPT2LMHeadModel", set->path, name, layers, its_first);
    }
    G2Z_TRY(g2z__weights_use(set, index, &list[i]));
  }
  if (head >= 0) G2Z_TRY(g2z__weights_use(set, head, &list[count - 1])); /* wte */
  for (const g2z__safetensor *tensor = set->tensors; tensor < set->tensors + set->count; tensor++)
    if (!tensor->used && !g2z__weights_is_mask(tensor->name))
      return g2z_fail(set->services, G2Z_FORMAT,
                      "%s has a tensor \"%.200s\", which a GPT-2 with layers=%d does not have: "
                      "take the config.json that belongs to it, or save it as GPT2LMHeadModel",
                      tensor->in->path, tensor->name, layers);
  return G2Z_OK;
}

/* Receives elements [canonical, canonical + count). The calls come in canonical order. */
typedef g2z_status (*g2z__weights_take)(void *user, size_t canonical, size_t count,
                                        const float *values);

G2Z__PRIVATE g2z_status g2z__weights_pass(g2z__safetensors *set, const g2z__safetensor *list,
                                          size_t count, float *chunk, g2z__weights_take take,
                                          void *user) {
  const int head = g2z__safetensors_find(set, "lm_head.weight");
  size_t canonical = 0;
  for (size_t i = 0; i < count; i++) {
    const int index = g2z__weights_find(set, list[i].name);
    for (size_t at = 0, n; at < list[i].elements; at += n, canonical += n) {
      n = G2Z__MIN(list[i].elements - at, G2Z__WEIGHTS_CHUNK);
      G2Z_TRY(g2z__safetensors_read(set, index, at, n, chunk));
      if (i == count - 1 && head >= 0) { /* wte is GPT-2's head: a file may have both, if equal */
        G2Z_TRY(g2z__safetensors_read(set, head, at, n, chunk + n));
        if (memcmp(chunk, chunk + n, n * sizeof(float)) != 0)
          return g2z_fail(set->services, G2Z_UNSUPPORTED, "%s: lm_head.weight differs from "
                          "wte.weight, but this kit ties them: save the model with "
                          "tie_word_embeddings", set->path);
      }
      for (size_t k = 0; k < n; k++)
        if (!isfinite(chunk[k]))
          return g2z_fail(set->services, G2Z_FORMAT, "%s: element %zu of tensor \"%s\" is %g in "
                          "fp32, not a finite number: use weights that were saved before training "
                          "diverged, or copy the file again", set->path, at + k,
                          set->tensors[index].name, g2z__nan_unsigned((double)chunk[k]));
      G2Z_TRY(take(user, canonical, n, chunk));
    }
  }
  return G2Z_OK;
}

/* Opens DIRECTORY/model.safetensors, or else the files of its index. */
G2Z__PRIVATE g2z_status g2z__weights_open(g2z_services *services, const char *directory,
                                          g2z__safetensors **out) {
  static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
  int there;
  *out = NULL;
  for (int i = 0; i < 2; i++) {
    const g2z_path path = g2z_path_in(directory, "%s", names[i]);
    G2Z_TRY(g2z_is_there(services, path.text, &there));
    if (there) return g2z__safetensors_open(services, path.text, out);
  }
  G2Z_TRY(g2z_is_there(services, g2z_path_in(directory, "pytorch_model.bin").text, &there));
  if (there)
    return g2z_fail(services, G2Z_UNSUPPORTED, "the weights in %s are a pickle, pytorch_model.bin: "
                    "save them as model.safetensors, with save_pretrained(..., "
                    "safe_serialization=True)", directory);
  return g2z_fail(services, G2Z_IO, "%s has no model.safetensors: name a directory that "
                  "save_pretrained or --save-weights wrote", directory);
}

/* Passes a directory's weights to `take`. Checks all names and shapes before the first call. */
G2Z__PRIVATE g2z_status g2z__weights_read(g2z_services *services, const char *directory,
                                          const g2z_model_config *model, g2z__weights_take take,
                                          void *user) {
  g2z__safetensors *set;
  g2z__safetensor *list = NULL;
  float *chunk = NULL;
  size_t count;
  G2Z_TRY(g2z__weights_open(services, directory, &set));
  g2z_status status = g2z__weights_list(services, model, &list, &count);
  if (status == G2Z_OK) status = g2z__weights_match(set, model->layers, list, count);
  if (status == G2Z_OK) status = G2Z_NEW(services, 2 * G2Z__WEIGHTS_CHUNK, &chunk);
  if (status == G2Z_OK) status = g2z__weights_pass(set, list, count, chunk, take, user);
  g2z_release(services, chunk);
  g2z_release(services, list);
  g2z__safetensors_free(set);
  return status;
}

/* ===== >>i13 context and model ===========================================
 * In:  tokens and the flat buffers. Out: loss, logits, gradients in the order of the plan.
 * Law: the model names ops and parameters, never a device. A tensor lies at its unit's base in the
 *      model's buffer plus the plan's offset. Only dln1, 8-bit copies and a text in the key-value
 *      cache lie inside another tensor. */

#if defined(__CUDACC__)
#define G2Z__COMPILER "nvcc " __VERSION__
#else
#define G2Z__COMPILER __VERSION__
#endif

G2Z_API g2z_context_config g2z_context_config_default(g2z_services *services) {
  g2z_context_config config;
  memset(&config, 0, sizeof config);
  config.services = services;
  config.device = g2z_device_count(G2Z_DEVICE_CUDA) ? G2Z_DEVICE_CUDA : G2Z_DEVICE_CPU;
  config.ranks = g2z_ranks_config_default();
  config.ranks.place.world = 0;
  return config;
}

G2Z_API g2z_status g2z_context_create(const g2z_context_config *config, g2z_context **out) {
  *out = NULL;
  g2z_services *services = config->services;
  g2z_ranks_config ranks = config->ranks;
  char device[64] = "", build[128];
  if (ranks.place.world == 0) G2Z_TRY(g2z_place_find(services, &ranks.place));
  /* A job of one rank keeps the GPU that the program has selected. */
  if (config->device == G2Z_DEVICE_CUDA && ranks.place.world > 1)
    G2Z_TRY(g2z__cuda_select(services, ranks.place.local_rank, device));
  ranks.device = device;
  /* Other code or another compiler may round differently. */
  snprintf(build, sizeof build, "%s%s" G2Z__COMPILER, ranks.build, ranks.build[0] ? " " : "");
  ranks.build = build;
  g2z_context *context;
  G2Z_TRY(G2Z_NEW(services, 1, &context));
  context->services = services;
  context->device = config->device;
  if (config->device == G2Z_DEVICE_CUDA) context->gpu = g2z__cuda_current();
  context->rank = ranks.place.rank;
  context->world = ranks.place.world;
  g2z_status status = g2z__ranks_join(services, &ranks, &context->ranks);
  if (status != G2Z_OK) {
    g2z_context_free(context);
    return status;
  }
#ifdef _OPENMP
  omp_set_num_threads(g2z__plan_threads(g2z_ranks_place(context->ranks)->local_world));
#endif
  *out = context;
  return G2Z_OK;
}

G2Z_API void g2z_context_free(g2z_context *context) {
  if (!context) return;
  g2z__ranks_leave(context->ranks);
  g2z_release(context->services, context);
}

/* Creates a device on the context's GPU. */
G2Z__PRIVATE g2z_status g2z__context_open(const g2z_context *context, g2z_dtype dtype,
                                          g2z_dtype grad_dtype, g2z_device **out) {
  *out = NULL;
  if (context->device == G2Z_DEVICE_CUDA)
    G2Z_TRY(g2z__cuda_use(context->services, context->gpu));
  return g2z_device_create(context->services, context->device, dtype, grad_dtype, out);
}

G2Z__PRIVATE g2z_status g2z__check_ids(g2z_services *services, const char *what,
                                       const int32_t *ids, size_t count, int least, int vocab) {
  for (size_t i = 0; i < count; i++)
    if (ids[i] < least || ids[i] >= vocab)
      G2Z_REFUSE(services, "%s=%d at position %zu must lie between %d and %d, the vocabulary's "
                 "last", what, (int)ids[i], i, least, vocab - 1);
  return G2Z_OK;
}

/* ----- the model: pointers into its buffers ------------------------------- */

G2Z__PRIVATE void *g2z__parameter(const g2z_model *model, int unit, g2z_param param) {
  return g2z__params_at(model, model->plan->unit[unit].param_at + model->plan->offset[param]);
}

G2Z__PRIVATE void *g2z__grad(const g2z_model *model, int unit, g2z_param param) {
  return g2z__grads_at(model, model->plan->unit[unit].grad_at + model->plan->offset[param]);
}

G2Z__PRIVATE void *g2z__activation_at(const g2z_model *model, g2z__activation which, int layer) {
  return model->activations + g2z__activation_offset(model->plan, which, layer);
}

/* Numbers of the places that drop out: 0 for the embedding, then three per layer. The embedding's
 * number is the one that FCPROJ of layer -1 would have. */
enum { G2Z__SITE_EMBED = 0, G2Z__SITE_ATTENTION = 1, G2Z__SITE_ATTPROJ = 2, G2Z__SITE_FCPROJ = 3 };

G2Z__PRIVATE g2z_dropout g2z__dropout_at(const g2z__pass *pass, int layer, int site) {
  g2z_dropout dropout = pass->dropout;
  dropout.site = (uint32_t)(site == G2Z__SITE_EMBED ? 0 : 3 * layer + site);
  return dropout;
}

/* The residual stream that layer `layer` reads; for layer L, the output of the last block. */
G2Z__PRIVATE void *g2z__residual(const g2z_model *model, int layer) {
  if (layer == 0) return g2z__activation_at(model, G2Z__ACT_EMBED, 0);
  return g2z__activation_at(model, G2Z__ACT_RES3, layer - 1);
}

/* Activations (F: in fp32), weights and gradients by name. These macros use the variables `model`,
 * `layer` and `unit` of the function around them. The end of the room undefines them. */
#define G2Z__A(name) g2z__activation_at(model, G2Z__ACT_##name, layer)
#define G2Z__F(name) ((float *)g2z__activation_at(model, G2Z__ACT_##name, layer))
#define G2Z__W(name) g2z__parameter(model, unit, G2Z_##name)
#define G2Z__G(name) g2z__grad(model, unit, G2Z_##name)

/* Where the 8-bit copies of a block's tensors lie. NULL: a tensor has no copy.
 * With fp8=forward all lie in WIDE, which is free while block_activations() runs.
 * With fp8=all only attention's copy lies there. The copies of ln1's, ln2's and GELU's output and
 * of fc's gradient replace these tensors. LNF, which backward does not read, holds the copy of the
 * gradient that fcproj receives, later of the attention projection's. In backward ln2's gradient
 * replaces GELU's output; then the columns of attention's output replace ln2's gradient. The copy
 * of qkv's gradient follows them. */
typedef struct g2z__narrow_places {
  void *ln1, *att, *ln2, *fc, *dproj, *dfc, *dqkv, *att_columns;
} g2z__narrow_places;
G2Z__PRIVATE g2z__narrow_places g2z__narrow_of(const g2z_model *model, const g2z__pass *pass,
                                               int layer) {
  size_t rows = (size_t)pass->B * (size_t)pass->T * (size_t)model->plan->model.channels;
  char *wide = (char *)G2Z__A(WIDE), *fc = (char *)G2Z__A(FC);
  g2z__narrow_places narrow = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
  if (model->device->fp8 < G2Z_FP8_FORWARD) return narrow;
  narrow.att = wide + 4 * rows;
  if (model->device->fp8 == G2Z_FP8_FORWARD) {
    narrow.ln1 = narrow.att;
    narrow.ln2 = narrow.att;
    narrow.fc = wide;
    return narrow;
  }
  narrow.ln1 = G2Z__A(LN1);
  narrow.ln2 = G2Z__A(LN2);
  narrow.fc = fc;
  narrow.dproj = G2Z__A(LNF);
  narrow.dfc = wide;
  narrow.att_columns = fc;
  narrow.dqkv = fc + rows * model->plan->dtype_bytes;
  return narrow;
}

/* Runs a block up to GELU's output, and so makes everything that its backward pass reads. */
G2Z__PRIVATE g2z_status g2z__block_activations(const g2z_model *model, const g2z__pass *pass,
                                               int layer) {
  g2z_device *dev = model->device;
  int unit = model->plan->model.layers - layer;
  int C = model->plan->model.channels, NH = model->plan->model.heads, N = pass->B * pass->T;
  g2z_dropout drop_att = g2z__dropout_at(pass, layer, G2Z__SITE_ATTENTION);
  g2z_dropout drop_attproj = g2z__dropout_at(pass, layer, G2Z__SITE_ATTPROJ);
  const g2z__narrow_places narrow = g2z__narrow_of(model, pass, layer);
  void *res = g2z__residual(model, layer), *qkv = G2Z__A(QKV), *next = G2Z__A(FC);
  qkv = (char *)qkv +
        (size_t)pass->sequence * (size_t)pass->window * 3 * (size_t)C * model->plan->dtype_bytes;

  G2Z__RUN(dev, layernorm_fwd, .y = G2Z__A(LN1), .narrow = narrow.ln1, .mean = G2Z__F(LN1_MEAN),
           .rstd = G2Z__F(LN1_RSTD), .x = res, .w = G2Z__W(LN1W), .b = G2Z__W(LN1B), .N = N,
           .C = C);
  G2Z__RUN(dev, linear_fwd, .y = pass->positions ? next : qkv, .x = G2Z__A(LN1),
           .narrow_x = narrow.ln1, .w = G2Z__W(QKVW), .bias = G2Z__W(QKVB), .N = N, .K = C,
           .O = 3 * C);
  if (pass->positions)
    G2Z__RUN(dev, attention_next, .out = G2Z__A(ATT), .past = qkv, .rows = next,
             .positions = pass->positions, .B = pass->B, .T = pass->window, .C = C, .NH = NH);
  else
    G2Z__RUN(dev, attention_fwd, .out = G2Z__A(ATT), .narrow = narrow.att, .lse = G2Z__F(LSE),
             .qkv = qkv, .dropout = drop_att, .B = pass->B, .T = pass->T, .C = C, .NH = NH);
  G2Z__RUN(dev, linear_fwd, .y = G2Z__A(RES2), .x = G2Z__A(ATT), .narrow_x = narrow.att,
           .w = G2Z__W(ATTPROJW), .bias = G2Z__W(ATTPROJB), .residual = res,
           .dropout = drop_attproj, .N = N, .K = C, .O = C);
  G2Z__RUN(dev, layernorm_fwd, .y = G2Z__A(LN2), .narrow = narrow.ln2, .mean = G2Z__F(LN2_MEAN),
           .rstd = G2Z__F(LN2_RSTD), .x = G2Z__A(RES2), .w = G2Z__W(LN2W), .b = G2Z__W(LN2B),
           .N = N, .C = C);
  G2Z__RUN(dev, linear_fwd, .y = G2Z__A(FC), .narrow_y = narrow.fc, .slope = G2Z__A(FCSLOPE),
           .x = G2Z__A(LN2), .narrow_x = narrow.ln2, .w = G2Z__W(FCW), .bias = G2Z__W(FCB), .N = N,
           .K = C, .O = 4 * C);
  return G2Z_OK;
}

/* Runs a unit's part of the forward pass. wte has none: unit wpe is the embedding, and reads rows
 * of both. Positions that turn q and k instead (RoPE) belong after the product qkv of a block, into
 * attention_bwd before dbias and the 8-bit copy, and into attention_next before a row is stored. */
G2Z__PRIVATE g2z_status g2z__unit_forward(const g2z_model *model, const g2z__pass *pass, int unit) {
  g2z_device *dev = model->device;
  const g2z_plan *plan = model->plan;
  int C = plan->model.channels, L = plan->model.layers, N = pass->B * pass->T, layer = 0;
  const void *wte = g2z__parameter(model, plan->wte, G2Z_WTE);
  g2z_dropout dropout = g2z__dropout_at(pass, 0, G2Z__SITE_EMBED);
  switch (plan->unit[unit].kind) {
    case G2Z_UNIT_WTE: return G2Z_OK;
    case G2Z_UNIT_WPE:
      if (pass->positions)
        G2Z__RUN(dev, embed_next, .out = G2Z__A(EMBED), .tokens = pass->x,
                 .positions = pass->positions, .wte = wte, .wpe = G2Z__W(WPE), .B = pass->B,
                 .C = C);
      else
        G2Z__RUN(dev, embed_fwd, .out = G2Z__A(EMBED), .tokens = pass->x, .wte = wte,
                 .wpe = G2Z__W(WPE), .dropout = dropout, .B = pass->B, .T = pass->T, .C = C);
      return G2Z_OK;
    case G2Z_UNIT_BLOCK:
      layer = L - unit;
      dropout = g2z__dropout_at(pass, layer, G2Z__SITE_FCPROJ);
      G2Z_TRY(g2z__block_activations(model, pass, layer));
      G2Z__RUN(dev, linear_fwd, .y = G2Z__A(RES3), .x = G2Z__A(FC),
               .narrow_x = g2z__narrow_of(model, pass, layer).fc, .w = G2Z__W(FCPROJW),
               .bias = G2Z__W(FCPROJB), .residual = G2Z__A(RES2), .dropout = dropout, .N = N,
               .K = 4 * C, .O = C);
      return G2Z_OK;
    case G2Z_UNIT_LNF: break;
  }
  G2Z__RUN(dev, layernorm_fwd, .y = G2Z__A(LNF), .mean = G2Z__F(LNF_MEAN), .rstd = G2Z__F(LNF_RSTD),
           .x = g2z__residual(model, L), .w = G2Z__W(LNFW), .b = G2Z__W(LNFB), .N = N, .C = C);
  return G2Z_OK;
}

/* Computes the loss of a forward pass. With `state`, it also computes two gradients of the mean
 * loss over the step's tokens on all ranks, times the loss scale: dh, in WIDE, and the head's part
 * of dwte. */
G2Z__PRIVATE g2z_status g2z__head_loss(const g2z_model *model, const g2z__pass *pass,
                                       double *loss_sum, const g2z_step_state *state) {
  const g2z_plan *plan = model->plan;
  const int layer = 0;
  const float dloss = (float)(1.0 / (double)plan->step_tokens);
  void *dh = NULL, *dwte = NULL;
  if (state) {
    dh = G2Z__A(WIDE);
    dwte = model->dwte;
  }
  G2Z__RUN(model->device, head_loss, .losses = G2Z__F(LOSSES), .loss_sum = loss_sum,
           .dh = dh, .dwte = dwte, .dwte_dtype = plan->dwte_dtype, .logits = model->logits,
           .h = G2Z__A(LNF), .wte = g2z__parameter(model, plan->wte, G2Z_WTE), .targets = pass->y,
           .dloss = dloss, .state = state, .mode = pass->write, .N = pass->B * pass->T,
           .C = plan->model.channels, .V = plan->model.vocab, .Vp = plan->vocab_padded,
           .chunk = plan->head_chunk);
  return G2Z_OK;
}

/* The gradient that a projection or the embedding receives: DRES, or its masked copy in LNF. */
G2Z__PRIVATE const void *g2z__dropped(const g2z_model *model, const g2z__pass *pass) {
  return g2z__activation_at(model, pass->dropout.probability > 0 ? G2Z__ACT_LNF : G2Z__ACT_DRES, 0);
}

/* The gradient of ln1's output. It follows qkv's gradient in WIDE. */
G2Z__PRIVATE void *g2z__dln1(const g2z_model *model, const g2z__pass *pass) {
  size_t qkv = (size_t)pass->B * (size_t)pass->T * 3 * (size_t)model->plan->model.channels;
  return (char *)g2z__activation_at(model, G2Z__ACT_WIDE, 0) + qkv * model->plan->dtype_bytes;
}

/* Runs a unit's backward pass, except a block's first LayerNorm and the final one. wte has none:
 * the head writes dwte, and unit wpe adds the embedding's part. In, for a block: DRES, the gradient
 * of the block's output stream, and its copy masked by the projection's dropout. Out: DRES, the
 * gradient of the stream between attention and ln2, and ln1's output gradient. Two buffers are
 * reused when nothing needs their activations any more: LNF for masked gradients, FC for ln2's
 * gradient, and both for 8-bit copies. */
G2Z__PRIVATE g2z_status g2z__unit_backward(const g2z_model *model, const g2z__pass *pass,
                                           int unit) {
  g2z_device *dev = model->device;
  const g2z_plan *plan = model->plan;
  g2z_write mode = pass->write;
  const g2z_unit_kind kind = plan->unit[unit].kind;
  const int layer = kind == G2Z_UNIT_BLOCK ? plan->model.layers - unit : 0;
  int C = plan->model.channels, NH = plan->model.heads, N = pass->B * pass->T;
  if (kind == G2Z_UNIT_WPE) {
    g2z_dropout dropout = g2z__dropout_at(pass, 0, G2Z__SITE_EMBED);
    G2Z__RUN(dev, embed_bwd, .dwte = pass->keep_rows ? NULL : (float *)model->dwte,
             .dwpe = G2Z__G(WPE), .dout = G2Z__A(DRES), .tokens = pass->x, .mode = mode,
             .dropout = dropout, .B = pass->B, .T = pass->T, .C = C);
    return G2Z_OK;
  }
  if (kind != G2Z_UNIT_BLOCK) return G2Z_OK;
  g2z_dropout drop_att = g2z__dropout_at(pass, layer, G2Z__SITE_ATTENTION);
  g2z_dropout drop_attproj = g2z__dropout_at(pass, layer, G2Z__SITE_ATTPROJ);
  void *dres = G2Z__A(DRES), *dropped = G2Z__A(LNF), *dfc = G2Z__A(WIDE), *dln2 = G2Z__A(FC);
  void *dqkv = G2Z__A(WIDE), *datt = g2z__dln1(model, pass);
  void *dln1 = datt; /* dln1 is written only after datt was read */
  const g2z__narrow_places narrow = g2z__narrow_of(model, pass, layer);
  const void *dproj = g2z__dropped(model, pass);

  /* Computes the same bits again. The last block's activations are still there. */
  if (plan->recompute == G2Z_RECOMPUTE_BLOCK && layer < plan->model.layers - 1)
    G2Z_TRY(g2z__block_activations(model, pass, layer));
  G2Z__RUN(dev, linear_bwd_data, .dx = dfc, .dbias = G2Z__G(FCB), .dy = dproj, .w = G2Z__W(FCPROJW),
           .slope = G2Z__A(FCSLOPE), .narrow = narrow.dproj, .mode = mode, .N = N, .K = 4 * C,
           .O = C);
  G2Z__RUN(dev, linear_bwd_weight, .dw = G2Z__G(FCPROJW), .x = G2Z__A(FC), .dy = dproj,
           .narrow_dy = narrow.dproj, .mode = mode, .N = N, .K = 4 * C, .O = C);
  G2Z__RUN(dev, linear_bwd_weight, .dw = G2Z__G(FCW), .x = G2Z__A(LN2), .dy = dfc,
           .narrow_dy = narrow.dfc, .mode = mode, .N = N, .K = C, .O = 4 * C);
  G2Z__RUN(dev, linear_bwd_data, .dx = dln2, .dy = dfc, .w = G2Z__W(FCW), .narrow = narrow.dfc,
           .mode = mode, .N = N, .K = C, .O = 4 * C);
  G2Z__RUN(dev, layernorm_bwd, .dres = dres, .dropped = dropped, .narrow = narrow.dproj,
           .dw = G2Z__G(LN2W), .db = G2Z__G(LN2B), .dbias = G2Z__G(ATTPROJB), .dy = dln2,
           .x = G2Z__A(RES2), .w = G2Z__W(LN2W), .mean = G2Z__F(LN2_MEAN), .rstd = G2Z__F(LN2_RSTD),
           .res_mode = G2Z_ACCUMULATE, .mode = mode, .dropout = drop_attproj, .N = N, .C = C);
  const void *dattproj = g2z__dropped(model, pass);
  G2Z__RUN(dev, linear_bwd_data, .dx = datt, .dy = dattproj, .w = G2Z__W(ATTPROJW),
           .narrow = narrow.dproj, .mode = mode, .N = N, .K = C, .O = C);
  G2Z__RUN(dev, attention_bwd, .dqkv = dqkv, .narrow = narrow.dqkv, .columns = narrow.att_columns,
           .dbias = G2Z__G(QKVB), .dout = datt, .out = G2Z__A(ATT), .lse = G2Z__F(LSE),
           .qkv = G2Z__A(QKV), .mode = mode, .dropout = drop_att, .B = pass->B, .T = pass->T,
           .C = C, .NH = NH);
  G2Z__RUN(dev, linear_bwd_weight, .dw = G2Z__G(ATTPROJW), .x = G2Z__A(ATT), .dy = dattproj,
           .narrow_dy = narrow.dproj, .columns_x = narrow.att_columns, .mode = mode, .N = N, .K = C,
           .O = C);
  G2Z__RUN(dev, linear_bwd_weight, .dw = G2Z__G(QKVW), .x = G2Z__A(LN1), .dy = dqkv,
           .narrow_dy = narrow.dqkv, .mode = mode, .N = N, .K = C, .O = 3 * C);
  G2Z__RUN(dev, linear_bwd_data, .dx = dln1, .dy = dqkv, .w = G2Z__W(QKVW), .narrow = narrow.dqkv,
           .mode = mode, .N = N, .K = C, .O = 3 * C);
  return G2Z_OK;
}

/* Backward of one LayerNorm: a block's first or the final one. Adds to DRES, the gradient of its
 * input stream; the final LayerNorm, which runs first, overwrites DRES. Also writes DRES masked by
 * the dropout of the unit below, and the bias gradient of that unit's projection. */
G2Z__PRIVATE g2z_status g2z__unit_backward_norm(const g2z_model *model, const g2z__pass *pass,
                                                int unit) {
  const g2z_plan *plan = model->plan;
  g2z_device *dev = model->device;
  int C = plan->model.channels, N = pass->B * pass->T, layer = plan->model.layers - unit;
  int final = unit == 0;
  if (!final && plan->unit[unit].kind != G2Z_UNIT_BLOCK) return G2Z_OK;
  g2z_dropout below = g2z__dropout_at(pass, layer - 1, G2Z__SITE_FCPROJ);
  void *bias = NULL, *dropped = NULL, *narrow = NULL;
  if (plan->unit[unit + 1].kind == G2Z_UNIT_BLOCK) bias = g2z__grad(model, unit + 1, G2Z_FCPROJB);
  if (bias || pass->keep_rows) dropped = G2Z__A(LNF); /* keep_rows: gather_rows() sends it */
  if (bias) narrow = g2z__narrow_of(model, pass, layer - 1).dproj;
  void *stream = g2z__residual(model, layer);
  if (final)
    G2Z__RUN(dev, layernorm_bwd, .dres = G2Z__A(DRES), .dropped = dropped, .narrow = narrow,
             .dw = G2Z__G(LNFW), .db = G2Z__G(LNFB), .dbias = bias, .dy = G2Z__A(WIDE),
             .x = stream, .w = G2Z__W(LNFW), .mean = G2Z__F(LNF_MEAN), .rstd = G2Z__F(LNF_RSTD),
             .mode = pass->write, .dropout = below, .N = N, .C = C);
  else
    G2Z__RUN(dev, layernorm_bwd, .dres = G2Z__A(DRES), .dropped = dropped, .narrow = narrow,
             .dw = G2Z__G(LN1W), .db = G2Z__G(LN1B), .dbias = bias, .dy = g2z__dln1(model, pass),
             .x = stream, .w = G2Z__W(LN1W), .mean = G2Z__F(LN1_MEAN), .rstd = G2Z__F(LN1_RSTD),
             .res_mode = G2Z_ACCUMULATE, .mode = pass->write, .dropout = below, .N = N, .C = C);
  return G2Z_OK;
}

#undef G2Z__A
#undef G2Z__F
#undef G2Z__W
#undef G2Z__G

/* ===== >>i14 trainer =====================================================
 * In:  a config, then batches. Out: weights that fit the text, and a report per step.
 * Law: a step only enqueues. All decisions are made on the device from g2z_step_state. The host
 * reads that state one step late, and never to decide about the running step. If a rank fails but
 * its device works, it still enqueues all collectives of the step: the verdict carries its failure,
 * and all ranks return the same status from the same call. */

/* Events that the host may wait for. There are two of each kind, for two steps: the device works
 * on one while the host reads the other. */
enum { G2Z__EVENT_STAGED = 0, G2Z__EVENT_REPORT = 2 };

/* After this many consecutive skipped steps at a loss scale that cannot shrink a run has diverged.
 * A healthy run skips single steps. */
#define G2Z__SKIPS_AT_MINIMUM 50

/* Returns the status. On a failure it first marks this rank as failed alone: no verdict can carry
 * this failure to the other ranks. A stop is no failure, and all ranks receive it. */
G2Z__PRIVATE g2z_status g2z__trainer_alone(g2z_trainer *t, g2z_status status) {
  if (status != G2Z_OK && status != G2Z_STOPPED) g2z__ranks_alone(t->context->ranks);
  return status;
}

/* ----- memory ------------------------------------------------------------- */

/* Allocates a buffer, unless it has 0 bytes. All ranks allocate SHARED memory together, and agree
 * on the result: the others would wait for a rank that fails. */
G2Z__PRIVATE g2z_status g2z__buffer_allocate(g2z_trainer *t, g2z__where where, size_t bytes,
                                             void *address) {
  const g2z_ops *ops = t->device->ops;
  void *memory = NULL;
  g2z_status status = G2Z_OK;
  if (bytes == 0) return G2Z_OK;
  if (where == G2Z__DEVICE) status = ops->allocate(t->device, bytes, &memory);
  else if (where == G2Z__HOST) status = ops->allocate_host(t->device, bytes, &memory);
  else status = t->comm->ops->allocate(t->comm, bytes, &memory);
  memcpy(address, &memory, sizeof memory);
  if (where == G2Z__SHARED) status = g2z_ranks_agree(t->context->ranks, status);
  return status;
}

/* Allocates the buffers that lie `where`. */
G2Z__PRIVATE g2z_status g2z__trainer_allocate(g2z_trainer *t, g2z__where where) {
  const g2z_plan *p = t->plan;
  g2z_model *m = &t->model;
#define X(address, kind, place, bytes) \
  if (where == G2Z__##place) G2Z_TRY(g2z__buffer_allocate(t, where, bytes, &address));
  G2Z__BUFFERS(X)
#undef X
  return G2Z_OK;
}

/* Frees the buffers that lie `where` and were allocated. */
G2Z__PRIVATE void g2z__trainer_release(g2z_trainer *t, g2z__where where) {
  const g2z_ops *ops = t->device->ops;
  const g2z_plan *p = t->plan;
  const g2z_model *m = &t->model;
#define X(address, kind, place, bytes)                                       \
  if (where == G2Z__##place && address && (bytes) > 0) {                     \
    if (where == G2Z__DEVICE) ops->release(t->device, address);              \
    else if (where == G2Z__HOST) ops->release_host(t->device, address);      \
    else t->comm->ops->release(t->comm, address);                            \
  }
  G2Z__BUFFERS(X)
#undef X
}

/* Allocates what no other rank accesses: buffers, and tables in host memory. */
G2Z__PRIVATE g2z_status g2z__trainer_allocate_own(g2z_trainer *t) {
  const g2z_plan *plan = t->plan;
  g2z_model *model = &t->model;
  G2Z_TRY(g2z__trainer_allocate(t, G2Z__DEVICE));
  G2Z_TRY(g2z__trainer_allocate(t, G2Z__HOST));
  model->targets = model->tokens + g2z__plan_tokens(plan);
  if (!plan->by_unit) t->sums = model->grads;
  if (!model->dwte) model->dwte = g2z__grad(model, plan->wte, G2Z_WTE);
  t->verdict.world = plan->world;
  t->verdict.owners = plan->owner == G2Z_OWNER_SLICES ? plan->world : 1;
  /* Tables in host memory: scratch for g2z__square, and this rank's parts of wte. */
  const g2z_unit *wte = &plan->unit[plan->wte];
  G2Z_TRY(G2Z_NEW(t->services, (size_t)plan->buckets, &t->pieces));
  G2Z_TRY(G2Z_NEW(t->services, (size_t)plan->buckets, &t->row_parts));
  for (int k = wte->bucket; k < plan->buckets; k++) {
    const g2z_bucket *b = &plan->bucket[k];
    g2z_row_part part = {b->own_begin - wte->begin, b->own_elements, b->sum_at};
    if (b->own_elements > 0) t->row_parts[t->row_part_count++] = part;
  }
  return G2Z_OK;
}

/* ----- canonical ranges --------------------------------------------------- */

/* Finds the next part of canonical [begin, begin + count) that this rank owns, and returns 1; 0: no
 * part is left. Searches from update range *next on, and moves *next past the part. */
G2Z__PRIVATE int g2z__owned_next(const g2z_plan *plan, size_t begin, size_t count, size_t *next,
                                 g2z_update_range *part) {
  for (; *next < plan->updates; ++*next) {
    *part = plan->update[*next];
    const size_t low = G2Z__MAX(part->canonical, begin);
    const size_t high = G2Z__MIN(part->canonical + part->elements, begin + count);
    if (low >= high) continue;
    const size_t skip = low - part->canonical;
    part->own_param_at += skip;
    part->sum_at += skip;
    part->shard_at += skip;
    part->v_at += skip;
    part->u_at += skip;
    part->canonical = low;
    part->elements = high - low;
    ++*next;
    return 1;
  }
  return 0;
}

G2Z__PRIVATE g2z_status g2z__check_canonical(g2z_trainer *t, size_t begin, size_t count) {
  if (begin <= t->plan->parameters && count <= t->plan->parameters - begin) return G2Z_OK;
  G2Z_REFUSE(t->services, "elements [%zu, %zu) lie outside the model's %zu parameters", begin,
             begin + count, t->plan->parameters);
}

/* The address of a range in its buffer. NULL for v of a range that Muon updates: it has none. */
G2Z__PRIVATE char *g2z__trainer_shard(const g2z_trainer *t, g2z_buffer buffer,
                                      const g2z_update_range *range) {
  const size_t size = t->plan->moment_bytes;
  if (buffer == G2Z_BUFFER_MASTER) return (char *)(t->master + range->shard_at);
  if (buffer == G2Z_BUFFER_M) return t->m + range->shard_at * size;
  if (buffer == G2Z_BUFFER_GRADS) return g2z__sums_at(t, range->sum_at);
  if (range->scale > 0) return NULL;
  return t->v + range->v_at * size;
}

G2Z_API g2z_status g2z_trainer_write(g2z_trainer *t, g2z_buffer buffer, size_t canonical,
                                     size_t count, const float *values) {
  g2z_device *dev = t->device;
  G2Z_TRY(g2z__check_canonical(t, canonical, count));
  if (buffer == G2Z_BUFFER_GRADS)
    G2Z_REFUSE(t->services, "gradients belong to the step: they are read, not written");
  g2z_update_range part;
  for (size_t next = 0; g2z__owned_next(t->plan, canonical, count, &next, &part);) {
    char *to = g2z__trainer_shard(t, buffer, &part);
    const float *from = values + (part.canonical - canonical);
    if (!to) continue;
    if (buffer != G2Z_BUFFER_MASTER && t->config.optimizer.moments_bf16) {
      const size_t size = t->plan->moment_bytes; /* 4 on a CPU, where the lower half is zero */
      char *rounded;
      G2Z_TRY(g2z_allocate(t->services, part.elements, size, &rounded));
      for (size_t i = 0; i < part.elements; i++) {
        const float x = g2z__round_bf16(from[i]);
        memcpy(rounded + i * size, (const char *)&x + sizeof x - size, size);
      }
      g2z_status status = dev->ops->upload(dev, to, rounded, part.elements * size);
      if (status == G2Z_OK) status = dev->ops->synchronize(dev);
      g2z_release(t->services, rounded);
      G2Z_TRY(status);
      continue;
    }
    G2Z_TRY(dev->ops->upload(dev, to, from, part.elements * sizeof(float)));
    if (buffer == G2Z_BUFFER_MASTER)
      G2Z_TRY(dev->ops->cast_act(dev, g2z__params_at(&t->model, part.own_param_at),
                                 (const float *)to, part.elements));
  }
  t->stale = 1;
  t->buffered[0] = t->buffered[1] = 0;
  return dev->ops->synchronize(dev);
}

G2Z_API g2z_status g2z_trainer_read(g2z_trainer *t, g2z_buffer buffer, size_t canonical,
                                    size_t count, float *out) {
  g2z_device *dev = t->device;
  G2Z_TRY(g2z__check_canonical(t, canonical, count));
  size_t size = sizeof(float); /* of an element in the buffer */
  g2z_dtype type = G2Z_BF16;   /* of an element of 2 bytes */
  if (buffer == G2Z_BUFFER_GRADS) {
    size = t->plan->grad_bytes;
    type = t->plan->grad_dtype;
  } else if (buffer != G2Z_BUFFER_MASTER) {
    size = t->plan->moment_bytes;
  }
  g2z_update_range part;
  for (size_t next = 0; g2z__owned_next(t->plan, canonical, count, &next, &part);) {
    float *to = out + (part.canonical - canonical);
    const char *from = g2z__trainer_shard(t, buffer, &part);
    if (!from) {
      memset(to, 0, part.elements * sizeof(float));
      continue;
    }
    /* Numbers of 2 bytes are copied to the end of `to` and widened in place. */
    char *raw = (char *)to + part.elements * (sizeof(float) - size);
    G2Z_TRY(dev->ops->download(dev, raw, from, part.elements * size));
    G2Z_TRY(dev->ops->synchronize(dev));
    for (size_t i = 0; i < part.elements && size < sizeof(float); i++) {
      uint16_t bits;
      memcpy(&bits, raw + i * size, sizeof bits);
      to[i] = g2z__widen(type, bits);
    }
  }
  return dev->ops->synchronize(dev);
}

/* ----- first weights ------------------------------------------------------ */

/* The first weights of wpe, from its element `first` on, with positions=sines. Channels 2 i and
 * 2 i + 1 of position p are sine and cosine of p / 10000^(2 i / C): attention can find the position
 * at any distance by a rotation of each pair. With an amplitude of 0.1, waves are 3.5 times as
 * large as the first embeddings of tokens, whose standard deviation is 0.02. */
G2Z__PRIVATE void g2z__first_positions(size_t channels, size_t first, size_t count, float *out) {
  G2Z__PARALLEL(100.0 * (double)count)
  for (int64_t i = 0; i < (int64_t)count; i++) {
    const size_t at = first + (size_t)i, position = at / channels, channel = at % channels;
    const double pair = (double)(channel / 2 * 2) / (double)channels;
    const double angle = (double)position * pow(10000.0, -pair);
    double wave = sin(angle);
    if (channel % 2) wave = cos(angle);
    out[i] = (float)(0.1 * wave);
  }
}

/* Sets out[count] to the first weights from the canonical index `first` on, all of one parameter.
 * Normal numbers are drawn in quads of elements: each parameter begins at a multiple of 8, because
 * C is one, so no quad straddles two calls. */
G2Z__PRIVATE void g2z__first_weights(const g2z_trainer *t, g2z_init init, size_t first,
                                     size_t count, float *out) {
  if (init == G2Z_INIT_ZEROS || init == G2Z_INIT_ONES) {
    for (size_t i = 0; i < count; i++) out[i] = (float)(init == G2Z_INIT_ONES);
    return;
  }
  if (init == G2Z_INIT_POSITIONS && t->config.positions == G2Z_POSITIONS_SINES) {
    const size_t begin = t->plan->unit[t->plan->wte - 1].canonical; /* of wpe */
    g2z__first_positions((size_t)t->plan->model.channels, first - begin, count, out);
    return;
  }
  double scale = 0.02;
  if (init == G2Z_INIT_RESIDUAL) scale /= sqrt(2.0 * t->plan->model.layers);
  const int64_t quads = (int64_t)(count / 4);
  G2Z__PARALLEL(100.0 * quads)
  for (int64_t quad = 0; quad < quads; quad++) {
    float *four = out + 4 * quad;
    const uint64_t place = first / 4 + (uint64_t)quad;
    const uint32_t counter[4] = {(uint32_t)place, (uint32_t)(place >> 32), 0, 0};
    uint32_t bits[4];
    g2z_philox(t->config.seed, G2Z_RANDOM_INIT, counter, bits);
    /* Box and Muller 1958, in double: the float does not depend on how a libm rounds. */
    for (int k = 0; k < 4; k += 2) {
      const double radius = sqrt(-2.0 * log(1.0 - (double)g2z_uniform(bits[k])));
      const double angle = 6.28318530717958647692 * (double)g2z_uniform(bits[k + 1]);
      four[k] = (float)(scale * (radius * cos(angle)));
      four[k + 1] = (float)(scale * (radius * sin(angle)));
    }
  }
}

/* Writes the first weights, one parameter after the other, in chunks. */
G2Z__PRIVATE g2z_status g2z__trainer_init(g2z_trainer *t) {
  const size_t limit = 1 << 16;
  float *chunk;
  G2Z_TRY(G2Z_NEW(t->services, limit, &chunk));
  g2z_status status = G2Z_OK;
  for (int u = 0; u < t->plan->units; u++)
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      const g2z_param_info info = g2z__param_describe(&t->plan->model, (g2z_param)p);
      if (info.unit != t->plan->unit[u].kind) continue;
      const size_t begin = t->plan->unit[u].canonical + t->plan->offset[p];
      const size_t end = begin + info.elements;
      for (size_t at = begin, n; at < end && status == G2Z_OK; at += n) {
        n = G2Z__MIN(end - at, limit);
        g2z__first_weights(t, info.init, at, n, chunk);
        status = g2z_trainer_write(t, G2Z_BUFFER_MASTER, at, n, chunk);
      }
    }
  g2z_release(t->services, chunk);
  return status;
}

/* A g2z__weights_take, for g2z__weights_read(): writes the masters. `user` is the trainer. */
G2Z__PRIVATE g2z_status g2z__trainer_take(void *user, size_t canonical, size_t count,
                                          const float *values) {
  return g2z_trainer_write((g2z_trainer *)user, G2Z_BUFFER_MASTER, canonical, count, values);
}

/* ----- opening: ranks agree after each phase ------------------------------ */

/* Refuses settings that need a newer GPU. */
G2Z__PRIVATE g2z_status g2z__device_suits(g2z_services *services, const g2z_train_config *config,
                                          const g2z_device *device) {
  const int multiple = device->info.fp8, channels = config->model.channels;
  if (config->fp8 && !multiple)
    return g2z_fail(services, G2Z_UNSUPPORTED,
                    "fp8=%s needs a GPU of compute capability 8.9 or newer (Ada, Hopper, "
                    "Blackwell), and a program that was compiled for it with CUDA 12.1.1 or newer; "
                    "here is %s: take fp8=none", g2z__fp8_texts[config->fp8], device->info.name);
  if (config->fp8 && channels % multiple)
    return g2z_fail(services, G2Z_UNSUPPORTED,
                    "fp8=%s needs channels to be a multiple of %d on %s; they are %d: change "
                    "them, or take fp8=none", g2z__fp8_texts[config->fp8], multiple,
                    device->info.name, channels);
  if (config->optimizer.kind == G2Z_OPTIMIZER_MUON && !device->info.bf16)
    return g2z_fail(services, G2Z_UNSUPPORTED, "optimizer=muon multiplies bf16, which needs sm_80 "
                    "or newer; here is %s: take optimizer=adamw", device->info.name);
  return G2Z_OK;
}

/* The part of opening that needs no other rank: plan, data, device, and a check of its memory. */
G2Z__PRIVATE g2z_status g2z__trainer_open_alone(g2z_trainer *t) {
  const g2z_train_config *config = &t->config;
  G2Z_TRY(g2z_plan_create(t->services, config, t->context->device,
                          t->context->rank, t->context->world,
                          g2z_ranks_place(t->context->ranks)->local_world, &t->plan));
  if (config->train_glob) {
    const g2z_loader_config shards = {
        config->train_glob, config->batch, config->seq, config->accum, t->plan->rank,
        t->plan->world, config->model.vocab, G2Z_ORDER_SHUFFLED, config->seed};
    G2Z_TRY(g2z_loader_create(t->services, &shards, &t->loader));
    G2Z_TRY(g2z__vocab_agree(t->services, &t->plan->model.vocab_hash, t->loader->vocab_hash,
                             t->loader->vocab_shard));
  }
  G2Z_TRY(g2z__context_open(t->context, t->plan->dtype, t->plan->grad_dtype, &t->device));
  G2Z_TRY(g2z__device_suits(t->services, config, t->device));
  t->device->fp8 = config->fp8;
  /* Products take the algorithm that is fastest here, cuBLASLt's first choice, or the choice of an
   * earlier run. */
  t->device->tune = config->tune;
  if (config->tuning) {
    char *text, reason[G2Z_ERROR_BYTES];
    size_t bytes;
    G2Z_TRY(g2z_read_file(t->services, config->tuning, 1 << 24, &text, &bytes));
    g2z_status status = g2z__tuning_read(t->device, text);
    g2z_release(t->services, text);
    memcpy(reason, t->services->error, sizeof reason);
    if (status == G2Z_FORMAT)
      return g2z_fail(t->services, status, "%.300s: %s", config->tuning, reason);
    G2Z_TRY(status);
  }
  t->model.services = t->services;
  t->model.config = t->plan->model;
  t->model.device = t->device;
  t->model.plan = t->plan;
  t->model.trainer = t;
  /* Check that the plan fits, before any rank allocates. CPU ranks share their host's memory. */
  size_t free_bytes, total_bytes;
  int sharing = g2z_ranks_place(t->context->ranks)->local_world;
  if (t->plan->device == G2Z_DEVICE_CUDA || sharing < 1) sharing = 1;
  G2Z_TRY(g2z_device_memory(t->services, t->plan->device, &free_bytes, &total_bytes));
  free_bytes /= (size_t)sharing;
  return g2z_plan_fits(t->services, config, t->plan, free_bytes, sharing);
}

/* Sets what the buffers hold first: operands of the optimizer, step state, addresses of the 8-bit
 * copies, weights. */
G2Z__PRIVATE g2z_status g2z__trainer_first(g2z_trainer *t) {
  const g2z_ops *ops = t->device->ops;
  const g2z_model_config *model = &t->plan->model;
  const char *from = t->config.init_from;
  const int L = model->layers;
  g2z_update update = {t->model.params, t->master, t->m, t->v,
                       t->sums, t->ranges, t->plan->update, &t->config.optimizer, t->state};
  g2z_step_state first;
  g2z_model_config saved;
  t->update = update;
  memset(&first, 0, sizeof first);
  first.loss_scale = t->config.dtype == G2Z_FP16 ? t->config.optimizer.loss_scale : 1.0f;
  first.hysteresis = t->config.optimizer.loss_scale_hysteresis;
  G2Z_TRY(ops->upload(t->device, t->ranges, t->plan->update,
                      t->plan->updates * sizeof(g2z_update_range)));
  G2Z_TRY(ops->upload(t->device, t->state, &first, sizeof first));
  G2Z_TRY(ops->synchronize(t->device));
  /* The blocks' weights, and the addresses of their 8-bit copies. */
  uint8_t *at = t->narrow_at;
  if (at) G2Z_TRY(G2Z_NEW(t->services, (size_t)(4 * L), &t->narrow));
  for (int layer = 0; at && layer < L; layer++)
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      const g2z_param_info w = g2z__param_describe(model, (g2z_param)p);
      if (w.unit != G2Z_UNIT_BLOCK || w.rank != 2) continue;
      uint8_t *rows = at + g2z__align(w.cols * G2Z_NARROW_ROW(w.rows));
      g2z_narrow_weight one = {g2z__parameter(&t->model, L - layer, (g2z_param)p), at, NULL,
                               (int)w.rows, (int)w.cols};
      if (t->config.fp8 >= G2Z_FP8_ALL) one.rows = rows;
      t->narrow[t->device->narrow_count++] = one;
      at = rows + g2z__align(w.rows * G2Z_NARROW_ROW(w.cols));
    }
  t->device->narrow = t->narrow;
  if (!from) return g2z__trainer_init(t);
  /* Weights from files. The reader checks shapes; only config.json has the number of heads. */
  G2Z_TRY(g2z_weights_config(t->services, from, &saved));
  if (saved.channels == model->channels && saved.heads != model->heads)
    G2Z_REFUSE(t->services, "heads=%d, but the weights in %s were trained with %d (n_head of its "
               "config.json): take heads=%d", model->heads, from, saved.heads, saved.heads);
  G2Z_TRY(g2z__vocab_agree(t->services, &t->plan->model.vocab_hash, saved.vocab_hash, from));
  t->model.config.vocab_hash = t->plan->model.vocab_hash;
  return g2z__weights_read(t->services, from, model, g2z__trainer_take, t);
}

/* Each rank runs a phase alone. Then all agree on its result, so that no rank waits for one that
 * has failed. */
G2Z__PRIVATE g2z_status g2z__trainer_open(g2z_trainer *t) {
  char text[4096], value[G2Z__SETTING_BYTES];
  size_t used = 0;
  g2z_ranks *ranks = t->context->ranks;
  G2Z_TRY(g2z_ranks_agree(ranks, g2z__trainer_open_alone(t)));
  const g2z_plan *plan = t->plan;
  for (int i = 0; i < G2Z__SETTINGS; i++) {
    g2z__setting_text(&g2z__settings[i], &t->config, value);
    used += (size_t)snprintf(text + used, sizeof text - used, "%s=%s\n", g2z__settings[i].name,
                             value);
  }
  /* These three are no rows of g2z__settings. */
  snprintf(text + used, sizeof text - used, "device=%s\ntuned=%d\ninit_from=%.1000s\n",
           g2z__device_texts[t->context->device], t->config.tuning != NULL,
           t->config.init_from ? t->config.init_from : "");
  G2Z_TRY(g2z_ranks_same(ranks, "config", text));
  snprintf(text, sizeof text, "hash %016" PRIx64, t->loader ? t->loader->data : (uint64_t)0);
  G2Z_TRY(g2z_ranks_same(ranks, "training data", text));
  G2Z_TRY(g2z_ranks_agree(ranks, g2z__trainer_allocate_own(t)));
  /* The communicator allocates the buffers that other ranks access. */
  const g2z_comm_config config = {G2Z__PLACE_KINDS * plan->buckets, plan->bucket_elements,
                                  plan->wire_dtype, plan->gather, plan->reduce};
  G2Z_TRY(g2z_ranks_agree(ranks, g2z_comm_create(ranks, t->device, &config, &t->comm)));
  G2Z_TRY(g2z__trainer_allocate(t, G2Z__SHARED));
  if (plan->muon_weights && plan->rank == 0)
    g2z_log(t->services, G2Z_LOG_INFO, "optimizer: Muon for the blocks' %d weights, AdamW for the "
            "rest", plan->muon_weights);
  if (plan->world > 1 && plan->rank == 0)
    g2z_log(t->services, G2Z_LOG_INFO,
            "%d ranks: strategy %s, ZeRO stage %d, %d buckets of up to %.1f MiB; gradients travel "
            "by %s, parameters by %s", plan->world, g2z__strategy_texts[plan->strategy],
            plan->zero_stage, plan->buckets,
            (double)(plan->bucket_elements * plan->grad_bytes) / 1048576.0,
            g2z__comm_carrier(t->comm, t->comm->reduce),
            g2z__comm_carrier(t->comm, t->comm->gather));
  return g2z_ranks_agree(ranks, g2z__trainer_first(t));
}

/* Also closes a trainer that was opened halfway. */
G2Z__PRIVATE void g2z__trainer_close(g2z_trainer *t) {
  g2z_loader_free(t->loader);
  if (t->device) {
    t->device->ops->synchronize(t->device);
    if (t->comm) {
      g2z__record_free(t->comm, &t->record);
      g2z__trainer_release(t, G2Z__SHARED);
    }
    g2z__trainer_release(t, G2Z__HOST);
    g2z__trainer_release(t, G2Z__DEVICE);
    g2z_comm_free(t->comm);
  }
  g2z_device_free(t->device);
  g2z_release(t->services, t->pieces);
  g2z_release(t->services, t->row_parts);
  g2z_release(t->services, t->narrow);
  g2z_plan_free(t->plan);
  g2z_release(t->services, t);
}

G2Z_API g2z_status g2z_trainer_create(g2z_context *context, const g2z_train_config *config,
                                      g2z_trainer **out) {
  g2z_trainer *t;
  *out = NULL;
  const int unstarted = g2z_ranks_place(context->ranks)->unstarted;
  if (unstarted)
    G2Z_REFUSE(context->services, "SLURM_NTASKS=%d, but this process is not a task of a step: "
               "start %d ranks with srun or mpirun, or one with srun -n 1", unstarted, unstarted);
  g2z_status status = g2z_ranks_agree(context->ranks, G2Z_NEW(context->services, 1, &t));
  if (status != G2Z_OK) {
    g2z_release(context->services, t);
    return status;
  }
  t->context = context;
  t->services = context->services;
  t->config = *config;
  status = g2z__trainer_open(t);
  if (status != G2Z_OK) g2z__trainer_close(t);
  else *out = t;
  return status;
}

/* Ranks on GPUs meet before they wait for their devices: if one of them still trains, its GPU waits
 * for this rank's. */
G2Z_API void g2z_trainer_free(g2z_trainer *t) {
  if (!t) return;
  if (t->context->device == G2Z_DEVICE_CUDA) g2z__ranks_part(t->context->ranks);
  g2z__trainer_close(t);
}

/* ----- one tuning table for all ranks ------------------------------------- */

G2Z_API g2z_status g2z_trainer_write_tuning(g2z_trainer *t, const char *path) {
  g2z_writer *writer = NULL;
  char *text;
  G2Z_TRY(t->device->ops->tuning(t->device, &text));
  g2z_status status = g2z_writer_create(t->services, path, &writer);
  if (status == G2Z_OK) status = g2z_writer_put(writer, text, strlen(text));
  if (status == G2Z_OK) status = g2z_writer_commit(writer);
  g2z_writer_free(writer);
  g2z_release(t->services, text);
  return status;
}

/* Runs all passes once, so that the device times their matrix products. Forward and backward
 * overwrite the gradients; up to stage 1 later micro-steps add to them, so a second turn does.
 * Then validation's forward runs, which has no 8-bit products. The passes use the tokens and
 * parameters that are on the device. */
G2Z__PRIVATE g2z_status g2z__trainer_rehearse(g2z_trainer *t, char **text) {
  for (int again = 0; again <= (t->plan->accum > 1 && !t->plan->by_unit); again++) {
    t->micro_step = again; /* micro-step 0 makes the weights' 8-bit copies */
    t->pass = g2z__trainer_pass(t, 0);
    t->pass.write = again ? G2Z_ACCUMULATE : G2Z_OVERWRITE;
    t->pass.keep_rows = t->plan->wte_rows;
    for (int unit = t->plan->wte; unit >= 0; unit--) G2Z_TRY(g2z__forward(t, unit));
    G2Z_TRY(g2z__head_loss(&t->model, &t->pass, t->model.sum, t->state));
    for (int unit = 0; unit <= t->plan->wte; unit++) {
      G2Z_TRY(g2z__unit_backward(&t->model, &t->pass, unit));
      G2Z_TRY(g2z__unit_backward_norm(&t->model, &t->pass, unit));
    }
  }
  g2z_status status = G2Z_OK;
  t->device->fp8 = G2Z_FP8_NONE;
  for (int unit = t->plan->wte; unit >= 0 && status == G2Z_OK; unit--)
    status = g2z__unit_forward(&t->model, &t->pass, unit);
  if (status == G2Z_OK) status = g2z__head_loss(&t->model, &t->pass, t->model.sum, NULL);
  t->device->fp8 = t->config.fp8;
  G2Z_TRY(status);
  /* Muon's products, of every shape: other ranks use this table, and are homes of other shapes. */
  for (int p = 0; t->plan->muon_weights && p < G2Z_PARAM_COUNT; p++) {
    const g2z_param_info info = g2z__param_describe(&t->plan->model, (g2z_param)p);
    const int homes = t->plan->routes ? t->plan->world : 1;
    const g2z_matrices shape = {0, G2Z__MAX(t->plan->model.layers / homes, 1), (int)info.rows,
                                (int)info.cols, info.muon};
    if (!info.muon) continue;
    G2Z_TRY(t->device->ops->orthogonalize(t->device, t->model.logits, &shape, 1,
                                          (char *)t->model.logits + t->plan->work_begin,
                                          t->plan->logits_bytes - t->plan->work_begin));
  }
  return t->device->ops->tuning(t->device, text);
}

/* Rank 0 times the products that its tuning table lacks, and all ranks use its choices: an
 * algorithm determines the order of addition. Checkpoints hold the table, and resumes repeat it. A
 * rank whose GPU or cuBLASLt is of another kind cannot use the table, and times for itself. */
G2Z__PRIVATE g2z_status g2z__trainer_share_tuning(g2z_trainer *t) {
  g2z_ranks *ranks = t->context->ranks;
  char *text = NULL, *copy = NULL;
  if (t->plan->device == G2Z_DEVICE_CPU || t->tuned || !t->config.tune) return G2Z_OK;
  g2z__ranks_phase(ranks, "tuning", t->enqueued, 600);
  g2z_status status = g2z__restore(t);
  for (int unit = t->plan->wte; t->plan->gathers && unit >= 0 && status == G2Z_OK; unit--)
    if (!t->plan->unit[unit].gathered || unit >= g2z__trainer_second(t))
      status = g2z__arrive(t, unit); /* wait for all parameters that stay in memory */
  G2Z_TRY(g2z__trainer_alone(t, status)); /* other ranks' devices wait for this rank */
  if (t->plan->rank == 0) status = g2z__trainer_rehearse(t, &text);
  status = g2z_ranks_agree(ranks, status);
  if (status == G2Z_OK) status = g2z__ranks_text(ranks, text, &copy);
  if (status == G2Z_OK && copy) status = g2z__tuning_read(t->device, copy);
  g2z_release(t->services, text);
  g2z_release(t->services, copy);
  text = NULL;
  const int other = status == G2Z_FORMAT;
  int alike = 1;
  if (other) status = g2z__trainer_rehearse(t, &text);
  g2z_release(t->services, text);
  status = g2z_ranks_agree(ranks, status);
  if (status == G2Z_OK) status = g2z__ranks_all(ranks, !other, &alike);
  if (!alike && t->plan->rank == 0)
    g2z_log(t->services, G2Z_LOG_WARNING, "the ranks have different GPUs or versions of cuBLASLt: "
            "ranks unlike rank 0 time their own products, so another start of this job may round "
            "differently. tune=off repeats the same bits, and is slower");
  t->tuned = status == G2Z_OK;
  return status;
}

/* ----- a step: tokens in, a report out ------------------------------------ */

/* Checks the tokens and targets, because the ops use them as indices, and counts the targets of -1.
 * Then enqueues a copy of them. The caller may reuse its memory at once. */
G2Z__PRIVATE g2z_status g2z__trainer_stage(g2z_trainer *t, const int32_t *x, const int32_t *y,
                                           size_t count, int64_t *masked) {
  g2z_device *dev = t->device;
  const int vocab = t->plan->model.vocab;
  *masked = 0;
  G2Z_TRY(g2z__check_ids(t->services, "token", x, count, 0, vocab));
  for (size_t i = 0; i < count; i++) *masked += y[i] == -1;
  G2Z_TRY(g2z__check_ids(t->services, "target", y, count, -1, vocab));
  int slot = (int)(t->stagings++ % 2);
  int32_t *host = t->staged[slot];
  G2Z_TRY(dev->ops->wait(dev, G2Z__EVENT_STAGED + slot));
  size_t bytes = count * sizeof(int32_t);
  memcpy(host, x, bytes);
  memcpy(host + count, y, bytes);
  if (t->model.tokens + count == t->model.targets) { /* one copy: saves 8 us */
    G2Z_TRY(dev->ops->upload(dev, t->model.tokens, host, 2 * bytes));
  } else {
    G2Z_TRY(dev->ops->upload(dev, t->model.tokens, host, bytes));
    G2Z_TRY(dev->ops->upload(dev, t->model.targets, host + count, bytes));
  }
  return dev->ops->mark(dev, G2Z__EVENT_STAGED + slot);
}

/* Records a step: the calls to the communicator and to the device go into the record, and nothing
 * runs. After a failure the trainer is as it was. */
G2Z__PRIVATE g2z_status g2z__trainer_record(g2z_trainer *t) {
  const int joined = t->joined, stale = t->stale;
  const int buffered[2] = {t->buffered[0], t->buffered[1]};
  const int buffered_joined[2] = {t->buffered_joined[0], t->buffered_joined[1]};
  G2Z_TRY(t->device->ops->graph_begin(t->device));
  t->comm->record = &t->record;
  t->record.meanwhile = 0;
  g2z_status status = g2z__zero_step(t, t->plan), cut = g2z__record_cut(t->comm);
  t->comm->record = NULL;
  if (status == G2Z_OK) status = cut;
  if (status == G2Z_OK) return G2Z_OK;
  g2z__record_free(t->comm, &t->record);
  /* Forget what the record would have gathered, and what the device would have waited for. */
  t->joined = joined;
  t->stale = stale;
  memcpy(t->buffered, buffered, sizeof buffered);
  memcpy(t->buffered_joined, buffered_joined, sizeof buffered_joined);
  return status;
}

/* Enqueues a step. If plan->graphed, records one step and replays it from then on. The first step
 * after a start or a load is not recorded: it allocates scratch and chooses algorithms. */
G2Z__PRIVATE g2z_status g2z__trainer_enqueue(g2z_trainer *t) {
  G2Z_TRY(g2z__restore(t));
  g2z_ranks *ranks = t->context->ranks;
  const int64_t begun = ranks->sequence;
  if (!t->plan->graphed || t->enqueued == t->resumed_step) {
    g2z_status status = g2z__zero_step(t, t->plan);
    t->noted = ranks->sequence - begun;
    return status;
  }
  if (!t->record.count) {
    g2z_status status = g2z__trainer_record(t);
    if (status != G2Z_OK && t->config.graph == 2) { /* auto: other ranks may record */
      g2z_log(t->services, G2Z_LOG_WARNING, "steps run without CUDA graphs, as a step cannot be "
              "recorded: %s", t->services->error);
      t->plan->graphed = 0;
      g2z__ranks_count(ranks, begun + t->noted);
      return g2z__zero_step(t, t->plan);
    }
    G2Z_TRY(status);
  }
  /* Count as many collectives as a step without graphs has: another rank may run without. */
  const int64_t played = ranks->sequence;
  g2z__ranks_note(ranks, "graph", -1, 0);
  g2z__ranks_count(ranks, played + t->noted);
  for (size_t i = 0; i < t->record.count; i++) {
    const g2z_call *c = &t->record.calls[i];
    if (c->kind == G2Z_CALL_GRAPH) G2Z_TRY(t->device->ops->graph_run(t->device, c->graph));
    else G2Z_TRY(t->comm->ops->play(t->comm, c));
  }
  return G2Z_OK;
}

/* Reports step `loss_step`. Waits until its state has arrived on the host. */
G2Z__PRIVATE g2z_status g2z__trainer_report(g2z_trainer *t, int64_t loss_step, g2z_report *report) {
  memset(report, 0, sizeof *report);
  report->step = t->enqueued;
  if (loss_step == 0) return G2Z_OK;
  int slot = (int)(loss_step % 2);
  G2Z_TRY(g2z__trainer_alone(t, t->device->ops->wait(t->device, G2Z__EVENT_REPORT + slot)));
  const g2z_step_state *state = t->verdict.reported[slot];
  if (state->stop) t->stop_agreed = 1;
  if (state->status != G2Z_OK) { /* all ranks return the failed rank's status and sentence */
    memcpy(t->services->error, t->failure, sizeof t->failure);
    G2Z_TRY(g2z_ranks_agree(t->context->ranks, t->failed));
    return g2z_fail(t->services, G2Z_LOST,
                    "a rank failed in step %" PRId64 " and does not say why", loss_step);
  }
  report->loss_step = loss_step;
  report->loss = (float)g2z__nan_unsigned((double)state->loss);
  report->counted = state->counted;
  report->clamped_inputs = state->clamped_inputs;
  report->clamped_weights = state->clamped_weights;
  report->grad_norm = (float)g2z__nan_unsigned((double)state->grad_norm);
  report->lr = state->lr;
  report->loss_scale = state->used_loss_scale;
  report->skipped = state->skip;
  report->skipped_total = state->skipped;
  report->spikes = state->spikes;
  report->applied = state->applied;
  report->data_ms = t->data_s[slot] * 1e3;
  report->exposed_comm_ms = t->comm->ops->waited_ms(t->comm, slot);
  if (state->skipped_at_minimum < G2Z__SKIPS_AT_MINIMUM) return G2Z_OK;
  const char *scale = "", *sums = "";
  const char *weights = "lower the learning rate, raise warmup, or go back to an earlier "
                        "checkpoint";
  if (state->used_loss_scale > 1) scale = "lower --loss-scale, which is fixed, or remove it; ";
  if (t->plan->wire_dtype == G2Z_FP16) sums = "give --grad-dtype fp32; ";
  if (!state->applied) /* no learning rate has had an effect */
    weights = "start from other weights, or take dtype=fp32";
  g2z_fail(t->services, G2Z_DIVERGED,
           "%d steps in a row up to step %" PRId64 " had gradients that are not finite at loss "
           "scale %g: %s%s%s", (int)state->skipped_at_minimum, loss_step,
           (double)state->used_loss_scale, scale, sums, weights);
  t->services->alike = 1; /* all ranks have this sentence */
  return G2Z_DIVERGED;
}

G2Z_API void g2z_trainer_fail(g2z_trainer *t, g2z_status status) {
  if (status == G2Z_OK || t->failed != G2Z_OK) return;
  memcpy(t->failure, t->services->error, sizeof t->failure);
  t->failed = status;
}

/* Runs a step. `status` is the reason if there are no tokens. With several ranks the verdict
 * carries a failure to all of them, and the next call returns it there. */
G2Z__PRIVATE g2z_status g2z__run_step(g2z_trainer *t, const int32_t *x, const int32_t *y,
                                      g2z_status status, g2z_report *report) {
  const g2z_plan *plan = t->plan;
  g2z_device *dev = t->device;
  char sentence[G2Z_ERROR_BYTES];
  if (status == G2Z_OK)
    status = g2z__trainer_stage(t, x, y, g2z__plan_tokens(plan), &t->masked);
  if (status != G2Z_OK && plan->world == 1) {
    /* This step is not enqueued, so no later call would report the previous step. */
    memcpy(sentence, t->services->error, sizeof sentence);
    g2z__trainer_report(t, t->enqueued, report);
    memcpy(t->services->error, sentence, sizeof sentence);
    return status;
  }
  g2z_trainer_fail(t, status);
  int64_t step = t->enqueued + 1;
  int slot = (int)(step % 2);
  g2z__ranks_phase(t->context->ranks, "step", step, 0);
  t->comm->ops->lap(t->comm, slot);
  /* This rank's vote goes into the verdict. Only a change is uploaded: an upload costs 8 us. */
  g2z__ballot *ballot = t->ballot[slot];
  ballot->status = (double)t->failed;
  ballot->stop = (double)__atomic_load_n(&t->stop_requested, __ATOMIC_RELAXED);
  ballot->masked = (double)t->masked;
  if (memcmp(ballot, &t->voted, sizeof t->voted) != 0) {
    double *column = g2z__my_verdict(t) + G2Z_VERDICT_STATUS;
    G2Z_TRY(g2z__trainer_alone(t, dev->ops->upload(dev, column, ballot, sizeof t->voted)));
    t->voted = *ballot;
  }
  G2Z_TRY(g2z__trainer_share_tuning(t));
  /* A failed rank also enqueues the step, with an earlier step's tokens: the others wait for its
   * part of each sum. Its vote makes all ranks skip the step. */
  G2Z_TRY(g2z__trainer_alone(t, g2z__trainer_enqueue(t)));
  t->enqueued = step;
  G2Z_TRY(g2z__trainer_alone(t, dev->ops->mark(dev, G2Z__EVENT_REPORT + slot)));
  return g2z__trainer_report(t, step - 1, report);
}

G2Z__PRIVATE g2z_status g2z__trainer_may_step(g2z_trainer *t, g2z_report *report) {
  memset(report, 0, sizeof *report);
  if (!t->stop_agreed) return G2Z_OK;
  return g2z_fail(t->services, G2Z_STOPPED, "a stop was requested: step %" PRId64 " was the last",
                  t->enqueued);
}

G2Z_API g2z_status g2z_trainer_step_batch(g2z_trainer *t, const int32_t *x, const int32_t *y,
                                          g2z_report *report) {
  G2Z_TRY(g2z__trainer_may_step(t, report));
  t->data_s[(t->enqueued + 1) % 2] = 0;
  return g2z__run_step(t, x, y, G2Z_OK, report);
}

G2Z_API g2z_status g2z_trainer_step(g2z_trainer *t, g2z_report *report) {
  const int32_t *x = NULL, *y = NULL;
  G2Z_TRY(g2z__trainer_may_step(t, report));
  if (!t->loader)
    G2Z_REFUSE(t->services, "this trainer has no train_glob: give it one, or call "
               "g2z_trainer_step_batch");
  double begin = g2z_seconds();
  g2z_status status = g2z_loader_next(t->loader, &x, &y);
  t->data_s[(t->enqueued + 1) % 2] = g2z_seconds() - begin;
  return g2z__run_step(t, x, y, status, report);
}

G2Z_API void g2z_trainer_request_stop(g2z_trainer *t) {
  __atomic_store_n(&t->stop_requested, 1, __ATOMIC_RELAXED);
}

G2Z_API g2z_status g2z_trainer_flush(g2z_trainer *t, g2z_report *report) {
  return g2z__trainer_report(t, t->enqueued, report);
}

/* ===== >>i15 model in use =================================================
 * In:  weights and tokens. Out: losses, logits, and the tokens that continue a text.
 * Law: a draw is a pure function of logits, sampling and index; no generator keeps a state. */

G2Z_API g2z_sampling g2z_sampling_default(void) {
  g2z_sampling sampling;
  sampling.temperature = 1.0f;
  sampling.top_k = 0;
  sampling.top_p = 1.0f;
  sampling.seed = 1;
  sampling.stop = -1;
  return sampling;
}

G2Z_API g2z_status g2z_sampling_check(g2z_services *services, const g2z_sampling *sampling) {
  if (!(sampling->temperature >= 0 && sampling->temperature <= 1e6f))
    G2Z_REFUSE(services, "temperature=%g must lie between 0 and 1e+06",
               (double)sampling->temperature);
  G2Z_TRY(g2z_check_range(services, "top_k", sampling->top_k, 0, INT_MAX));
  if (sampling->top_p > 0 && sampling->top_p <= 1) return G2Z_OK;
  G2Z_REFUSE(services, "top_p=%g must be above 0 and at most 1", (double)sampling->top_p);
}

/* ----- a model without a trainer ------------------------------------------- */

/* Frees the buffers, except those of the kind `kept`; G2Z_MEMORY_COUNT: all. */
G2Z__PRIVATE void g2z__model_release(g2z_model *m, g2z_memory kept) {
#define X(address, kind, where, size)                         \
  if (kept != G2Z_MEMORY_##kind && address) {                 \
    m->device->ops->release(m->device, address);              \
    address = NULL;                                           \
  }
  G2Z__MODEL_BUFFERS(X)
#undef X
}

/* Frees the workspace: everything except the weights. */
G2Z__PRIVATE void g2z__model_shrink(g2z_model *m) {
  g2z__model_release(m, G2Z_MEMORY_PARAMS);
  if (m->plan) m->bytes = m->plan->bytes[G2Z_MEMORY_PARAMS];
  g2z_plan_free(m->plan);
  m->plan = NULL;
}

/* Makes a plan for [B,T] tokens and a cache for [cached,T], and allocates the buffers that are not
 * there. After a failure the caller frees what the model got. */
G2Z__PRIVATE g2z_status g2z__model_extend(g2z_model *m, int B, int T, int cached) {
  g2z_train_config config = g2z_train_config_default(m->device->kind);
  config.model = m->config;
  config.batch = B;
  config.seq = T;
  config.dtype = m->device->dtype;
  config.optimizer.warmup = 0;
  G2Z_TRY(g2z_plan_create(m->services, &config, m->device->kind, 0, 1, 1, &m->plan));
  m->plan->forward_only = 1;
  m->plan->cached = cached;
  g2z__plan_batch(m->plan, B);
  const g2z_plan *p = m->plan;
  m->bytes = 0;
#define X(address, kind, where, size)                                    \
  if (!address) {                                                        \
    void *memory;                                                        \
    G2Z_TRY(m->device->ops->allocate(m->device, size, &memory));         \
    memcpy(&address, &memory, sizeof memory);                            \
  }                                                                      \
  m->bytes += size;
  G2Z__MODEL_BUFFERS(X)
#undef X
  m->targets = m->tokens + g2z__plan_tokens(p);
  return G2Z_OK;
}

/* Extends the workspace unless it is large enough. Afterwards the plan and all its memory exist, or
 * neither does. */
G2Z__PRIVATE g2z_status g2z__model_fit(g2z_model *m, int B, int T, int cached) {
  if (m->plan && m->plan->tokens >= (size_t)B * (size_t)T &&
      (size_t)m->plan->cached * (size_t)m->plan->seq >= (size_t)cached * (size_t)T)
    return G2Z_OK;
  g2z__model_shrink(m);
  g2z_status status = g2z__model_extend(m, B, T, cached);
  if (status != G2Z_OK) g2z__model_shrink(m);
  return status;
}

/* A g2z__weights_take, for g2z__weights_read(): uploads weights, and rounds them on the device to
 * the model's type. */
typedef struct g2z__model_loader {
  g2z_model *model;
  float *staged;               /* device, [G2Z__WEIGHTS_CHUNK] */
} g2z__model_loader;
G2Z__PRIVATE g2z_status g2z__model_take(void *user, size_t canonical, size_t count,
                                        const float *values) {
  const g2z__model_loader *loader = (const g2z__model_loader *)user;
  g2z_model *m = loader->model;
  g2z_device *dev = m->device;
  g2z_update_range part;
  for (size_t next = 0; g2z__owned_next(m->plan, canonical, count, &next, &part);) {
    G2Z_TRY(dev->ops->upload(dev, loader->staged, values + (part.canonical - canonical),
                             part.elements * sizeof(float)));
    G2Z_TRY(dev->ops->cast_act(dev, g2z__params_at(m, part.own_param_at), loader->staged,
                               part.elements));
    G2Z_TRY(dev->ops->synchronize(dev));
  }
  return G2Z_OK;
}

G2Z__PRIVATE g2z_status g2z__model_load(g2z_model *m, const char *directory) {
  const g2z_ops *ops = m->device->ops;
  void *memory;
  G2Z_TRY(g2z__model_fit(m, 1, 1, 0));
  G2Z_TRY(ops->allocate(m->device, G2Z__WEIGHTS_CHUNK * sizeof(float), &memory));
  g2z__model_loader loader = {m, (float *)memory};
  g2z_status status = g2z__weights_read(m->services, directory, &m->config, g2z__model_take,
                                        &loader);
  ops->release(m->device, memory);
  return status;
}

G2Z_API g2z_status g2z_model_open(g2z_context *context, const char *directory, g2z_dtype dtype,
                                  g2z_model **out) {
  g2z_services *services = context->services;
  g2z_model_config config;
  g2z_model *m;
  *out = NULL;
  G2Z_TRY(g2z_weights_config(services, directory, &config));
  G2Z_TRY(G2Z_NEW(services, 1, &m));
  m->services = services;
  m->config = config;
  g2z_status status = g2z__context_open(context, dtype, dtype, &m->device);
  if (status == G2Z_OK) {
    m->device->tune = G2Z_TUNE_OFF; /* each length of a text is a new shape: too many to time */
    status = g2z__model_load(m, directory);
  }
  if (status != G2Z_OK) g2z_model_free(m);
  else *out = m;
  return status;
}

G2Z_API void g2z_model_free(g2z_model *m) {
  if (!m) return;
  G2Z_ASSERT(!m->trainer);
  if (m->device) g2z__model_release(m, G2Z_MEMORY_COUNT);
  g2z_plan_free(m->plan);
  g2z_device_free(m->device);
  g2z_release(m->services, m);
}

/* ----- passes ------------------------------------------------------------- */

/* Runs a forward pass without backward. Weights are used in 8 bits in training steps only. */
G2Z__PRIVATE g2z_status g2z__model_forward(g2z_model *m, const g2z__pass *pass) {
  g2z_trainer *t = m->trainer;
  const g2z_fp8 fp8 = m->device->fp8;
  const int wte = m->plan->wte;
  g2z_status status = G2Z_OK;
  m->device->fp8 = G2Z_FP8_NONE;
  for (int unit = wte; unit >= 0 && status == G2Z_OK; unit--) {
    if (t) status = g2z__wait_parameters(t, unit, unit - 1);
    if (status == G2Z_OK) status = g2z__unit_forward(m, pass, unit);
  }
  m->device->fp8 = fp8;
  if (t && status == G2Z_OK) status = g2z__wait_parameters(t, wte, wte);
  return status;
}

/* Runs forward over whole sequences: [B,T] tokens that are on the device, with their targets. */
G2Z__PRIVATE g2z_status g2z__model_run(g2z_model *m, int B, int T, g2z__pass *pass) {
  *pass = g2z__pass_over(m->tokens, B, T);
  pass->y = m->targets;
  return g2z__model_forward(m, pass);
}

/* Computes logits[n,V] from rows [first, first + n) of the last pass. */
G2Z__PRIVATE g2z_status g2z__model_head(const g2z_model *m, float *logits, size_t first, int n) {
  const int C = m->config.channels;
  const char *rows = (const char *)g2z__activation_at(m, G2Z__ACT_LNF, 0);
  return m->device->ops->head_logits(
      m->device, logits, rows + first * (size_t)C * m->plan->dtype_bytes,
      g2z__parameter(m, m->plan->wte, G2Z_WTE), n, C, m->config.vocab);
}

/* Called between two passes: reports the phase, and returns G2Z_STOPPED if any rank was asked to
 * stop. The ranks decide together: if one left alone, others would wait for its parameters. */
G2Z__PRIVATE g2z_status g2z__model_may_go_on(const g2z_model *m, const char *phase) {
  const g2z_trainer *t = m->trainer;
  int go_on;
  if (!t) return G2Z_OK;
  g2z__ranks_phase(t->context->ranks, phase, t->enqueued, 0);
  G2Z_TRY(g2z__ranks_all(t->context->ranks,
                         !__atomic_load_n(&t->stop_requested, __ATOMIC_RELAXED), &go_on));
  if (go_on) return G2Z_OK;
  return g2z_fail(t->services, G2Z_STOPPED, "a stop was requested after step %" PRId64,
                  t->enqueued);
}

/* The longest sequence. wpe's rows limit it and, in a trainer, the activations. */
G2Z__PRIVATE int g2z__model_longest(const g2z_model *m) {
  if (!m->trainer) return m->config.context;
  return G2Z__MIN(m->config.context, (int)m->plan->tokens);
}

G2Z__PRIVATE g2z_status g2z__model_check(const g2z_model *m, const int32_t *tokens, int B, int T) {
  G2Z_TRY(g2z_check_range(m->services, "B", B, 1, INT_MAX / 2));
  G2Z_TRY(g2z_check_range(m->services, "T", T, 1, g2z__model_longest(m)));
  return g2z__check_ids(m->services, "token", tokens, (size_t)B * (size_t)T, 0, m->config.vocab);
}

/* Prepares for passes over [B,T] tokens with a key-value cache for [cached,T]. After them the
 * caller gives their status to g2z__model_end(). A trainer has the memory already, and refreshes
 * its parameters. Tuning is off: a growing text has a new shape per token, too many to time. */
G2Z__PRIVATE g2z_status g2z__model_begin(g2z_model *m, int B, int T, int cached) {
  if (!m->trainer) return g2z__model_fit(m, B, T, cached);
  m->device->tune = G2Z_TUNE_OFF;
  g2z__ranks_phase(m->trainer->context->ranks, "evaluation", m->trainer->enqueued, 0);
  return g2z__refresh(m->trainer);
}
G2Z__PRIVATE g2z_status g2z__model_end(g2z_model *m, g2z_status status) {
  if (!m->trainer) return status;
  m->device->tune = m->trainer->config.tune;
  return g2z__trainer_alone(m->trainer, status);
}

/* ----- scores, logits, validation ------------------------------------------ */

/* One pass. With targets, `out` becomes the losses [B,T]; else the logits [B,T,V]. */
G2Z__PRIVATE g2z_status g2z__model_pass(g2z_model *m, const int32_t *tokens,
                                        const int32_t *targets, int B, int T, float *out) {
  const size_t V = (size_t)m->config.vocab, count = (size_t)B * (size_t)T;
  const size_t most = m->plan->logits_bytes / (V * sizeof(float));
  g2z_device *dev = m->device;
  g2z__pass pass;
  if (targets) G2Z_TRY(g2z__model_may_go_on(m, "evaluation"));
  G2Z_TRY(dev->ops->upload(dev, m->tokens, tokens, count * sizeof *tokens));
  if (targets) G2Z_TRY(dev->ops->upload(dev, m->targets, targets, count * sizeof *targets));
  G2Z_TRY(g2z__model_run(m, B, T, &pass));
  if (targets) {
    G2Z_TRY(g2z__head_loss(m, &pass, m->sum, NULL));
    G2Z_TRY(dev->ops->download(dev, out, g2z__activation_at(m, G2Z__ACT_LOSSES, 0),
                               count * sizeof *out));
    return dev->ops->synchronize(dev);
  }
  for (size_t done = 0, n; done < count; done += n) {
    n = G2Z__MIN(count - done, most);
    G2Z_TRY(g2z__model_head(m, (float *)m->logits, done, (int)n));
    G2Z_TRY(dev->ops->download(dev, out + done * V, m->logits, n * V * sizeof(float)));
    G2Z_TRY(dev->ops->synchronize(dev));
  }
  return G2Z_OK;
}

/* Runs passes over all sequences. A trainer's model takes as many at a time as fit into its
 * activations. Another model takes at most 8192 tokens at a time, so that its workspace is small.
 * No result depends on the number. */
G2Z__PRIVATE g2z_status g2z__model_passes(g2z_model *m, const int32_t *tokens,
                                          const int32_t *targets, int B, int T, float *out) {
  const int most = m->trainer ? (int)m->plan->tokens : 8192;
  const int group = G2Z__MIN(B, G2Z__MAX(most / T, 1));
  const size_t width = targets ? 1 : (size_t)m->config.vocab; /* results per token */
  g2z_status status = g2z__model_begin(m, group, T, 0);
  for (int b = 0, n; b < B && status == G2Z_OK; b += n) {
    n = G2Z__MIN(B - b, group);
    const size_t at = (size_t)b * (size_t)T;
    const int32_t *wanted = targets ? targets + at : NULL;
    status = g2z__model_pass(m, tokens + at, wanted, n, T, out + at * width);
  }
  return g2z__model_end(m, status);
}

G2Z_API g2z_status g2z_model_score(g2z_model *m, const int32_t *tokens, const int32_t *targets,
                                   int B, int T, float *losses, double *mean) {
  const size_t count = (size_t)B * (size_t)T;
  float *own = NULL;
  double sum = 0;
  size_t counted = 0;
  *mean = NAN;
  G2Z_TRY(g2z__model_check(m, tokens, B, T));
  G2Z_TRY(g2z__check_ids(m->services, "target", targets, count, -1, m->config.vocab));
  if (!losses) G2Z_TRY(g2z__model_end(m, G2Z_NEW(m->services, count, &own)));
  if (!losses) losses = own;
  g2z_status status = g2z__model_passes(m, tokens, targets, B, T, losses);
  for (size_t i = 0; i < count && status == G2Z_OK; i++) {
    counted += targets[i] >= 0;
    sum += (double)losses[i];
  }
  g2z_release(m->services, own);
  if (status == G2Z_OK && counted) *mean = sum / (double)counted;
  return status;
}

G2Z_API g2z_status g2z_model_logits(g2z_model *m, const int32_t *tokens, int B, int T,
                                    float *logits) {
  G2Z_TRY(g2z__model_check(m, tokens, B, T));
  return g2z__model_passes(m, tokens, NULL, B, T, logits);
}

/* Sums the losses of this rank's part of `steps` batches and counts their targets. If the loader
 * fails, *trouble is the reason, and the rank continues with an earlier batch, because other ranks
 * may wait for its parameters. A stop ends the loop on all ranks. */
G2Z__PRIVATE g2z_status g2z__validate_batches(g2z_trainer *t, g2z_loader *loader, int64_t steps,
                                              void (*progress)(void *user, double share),
                                              void *user, double *sum, double *counted,
                                              g2z_status *trouble) {
  g2z_device *dev = t->device;
  g2z_model *m = &t->model;
  const size_t tokens = t->plan->tokens;
  G2Z_TRY(g2z__refresh(t));
  G2Z_TRY(dev->ops->zero(dev, m->sum, sizeof *sum));
  for (int64_t step = 0; step < steps; step++) {
    const int32_t *x, *y;
    int64_t masked = 0;
    g2z__pass pass;
    G2Z_TRY(g2z__model_may_go_on(m, "validation"));
    if (progress) progress(user, (double)step / (double)steps);
    if (*trouble == G2Z_OK) *trouble = g2z_loader_next(loader, &x, &y);
    if (*trouble == G2Z_OK) *trouble = g2z__trainer_stage(t, x, y, tokens, &masked);
    *counted += (double)tokens - (double)masked;
    dev->ops->span_begin(dev, G2Z_SPAN_VAL_FORWARD);
    G2Z_TRY(g2z__model_run(m, t->plan->batch, t->plan->seq, &pass));
    G2Z_TRY(g2z__head_loss(m, &pass, m->sum, NULL));
    dev->ops->span_end(dev, G2Z_SPAN_VAL_FORWARD);
  }
  G2Z_TRY(dev->ops->download(dev, sum, m->sum, sizeof *sum));
  return dev->ops->synchronize(dev);
}

G2Z_API g2z_status g2z_trainer_validate(g2z_trainer *t, g2z_loader *loader, int64_t steps,
                                        void (*progress)(void *user, double share), void *user,
                                        double *loss) {
  g2z_ranks *ranks = t->context->ranks;
  double part[2] = {0, 0}, sum = 0, counted = 0; /* part: this rank's losses and targets */
  double *parts;
  *loss = NAN;
  G2Z_ASSERT(loader->rows == t->plan->batch && loader->config.seq == t->plan->seq);
  G2Z_TRY(g2z__trainer_share_tuning(t));
  g2z_status status = G2Z_NEW(t->services, 2 * (size_t)t->plan->world, &parts);
  g2z_status enqueued = g2z__validate_batches(t, loader, steps, progress, user, &part[0], &part[1],
                                              &status);
  if (enqueued != G2Z_OK) g2z_release(t->services, parts);
  G2Z_TRY(g2z__trainer_alone(t, enqueued)); /* other ranks' devices wait for this rank */
  status = g2z_ranks_agree(ranks, status);
  if (status == G2Z_OK) status = g2z_ranks_all_gather(ranks, part, sizeof part, parts);
  for (int rank = 0; rank < t->plan->world && status == G2Z_OK; rank++) {
    sum += parts[2 * rank];
    counted += parts[2 * rank + 1];
  }
  g2z_release(t->services, parts);
  if (counted > 0) *loss = g2z__nan_unsigned(sum / counted);
  g2z__ranks_phase(ranks, "step", t->enqueued, 0);
  if (status == G2Z_OK && counted == 0)
    G2Z_REFUSE(t->services, "no token of the first %" PRId64 " validation batches counts: validate "
               "on more", steps);
  return status;
}

/* ----- generation with a key-value cache ----------------------------------- */

/* Sequences that are generated together. */
typedef struct g2z__continued {
  g2z_model *model;
  const g2z_sampling *sampling;
  int count, window;
  int32_t *ids;                /* [count][capacity] */
  size_t capacity, *lengths;
  int32_t *next, *positions;   /* [count]: the last token drawn, and its place in the window */
  int32_t *drawn;              /* [count]: number of tokens drawn */
  int32_t *going;              /* [count]: 0: the sequence has ended */
  struct {                     /* copies on the device, where positions are below window */
    int32_t *next, *positions, *drawn;
    float *logits;             /* [count,V]; in g2z__prefill [1,V], of its sequence */
  } on;
  g2z_graph *graph;            /* the recorded g2z__step */
} g2z__continued;

/* Computes the logits of rows [row, row + n) of the last pass, and draws the next token of
 * sequences [first, first + n). */
G2Z__PRIVATE g2z_status g2z__draw_next(g2z__continued *g, int first, size_t row, int n) {
  g2z_device *dev = g->model->device;
  g2z_sampling sampling = *g->sampling;
  sampling.seed += (uint64_t)first;
  G2Z_TRY(g2z__model_head(g->model, g->on.logits, row, n));
  G2Z__RUN(dev, draw, .tokens = g->on.next + first, .drawn = g->on.drawn + first,
           .positions = g->on.positions + first, .logits = g->on.logits, .sampling = &sampling,
           .B = n, .V = g->model->config.vocab, .T = g->window);
  return G2Z_OK;
}

/* Runs a sequence's last tokens in one pass, fills its part of the cache, and draws the next token.
 * A full window is cut to its last window / 2 + 1 tokens. */
G2Z__PRIVATE g2z_status g2z__prefill(g2z__continued *g, int i) {
  g2z_model *m = g->model;
  g2z_device *dev = m->device;
  if (g->positions[i] == g->window) g->positions[i] = g->window / 2;
  const size_t kept = (size_t)g->positions[i] + 1;
  const int32_t *from = g->ids + (size_t)i * g->capacity + (g->lengths[i] - kept);
  G2Z_TRY(g2z__model_may_go_on(m, "sample"));
  G2Z_TRY(dev->ops->upload(dev, m->tokens, from, kept * sizeof *from));
  G2Z_TRY(dev->ops->upload(dev, g->on.positions + i, g->positions + i, sizeof *g->positions));
  G2Z_TRY(dev->ops->upload(dev, g->on.drawn + i, g->drawn + i, sizeof *g->drawn));
  g2z__pass pass = g2z__pass_over(m->tokens, 1, (int)kept);
  pass.window = g->window;
  if (!m->trainer) pass.sequence = i; /* a trainer's model has no cache */
  G2Z_TRY(g2z__model_forward(m, &pass));
  G2Z_TRY(g2z__draw_next(g, i, kept - 1, 1));
  G2Z_TRY(dev->ops->synchronize(dev)); /* the host's memory may change only after the uploads */
  g->positions[i]++;                   /* as the draw did on the device */
  return G2Z_OK;
}

/* Adds each sequence's token to the cache and draws the next one. Sequences that have ended, or
 * whose window is full, also run; their results are not read. */
G2Z__PRIVATE g2z_status g2z__step(g2z__continued *g) {
  g2z__pass pass = g2z__pass_over(g->on.next, g->count, 1);
  pass.positions = g->on.positions;
  pass.window = g->window;
  G2Z_TRY(g2z__model_forward(g->model, &pass));
  return g2z__draw_next(g, 0, 0, g->count);
}

G2Z__PRIVATE g2z_status g2z__continue(g2z__continued *g, g2z_each_token each, void *user) {
  g2z_device *dev = g->model->device;
  const size_t bytes = (size_t)g->count * sizeof *g->next;
  const int cached = g->model->trainer == NULL;
  G2Z_TRY(dev->ops->zero(dev, g->on.next, 3 * bytes));
  for (int i = 0; i < g->count; i++)
    if (g->going[i]) G2Z_TRY(g2z__prefill(g, i));
  for (int steps = 0;;) {
    int going = 0, ahead = 0;
    G2Z_TRY(dev->ops->download(dev, g->next, g->on.next, bytes));
    G2Z_TRY(dev->ops->synchronize(dev));
    for (int i = 0; i < g->count; i++)
      if (g->next[i] < 0)
        return g2z_fail(dev->services, G2Z_DIVERGED,
                        "the model gives no token a probability: what it computes does not fit "
                        "dtype %s; take %s", g2z_dtype_text(dev->dtype),
                        dev->dtype == G2Z_FP16 ? "dtype bf16 or fp32" : "earlier weights");
    for (int i = 0; i < g->count; i++) { /* append the drawn tokens */
      if (!g->going[i]) continue;
      const int32_t id = g->ids[(size_t)i * g->capacity + g->lengths[i]++] = g->next[i];
      g->drawn[i]++;
      int ended = each && each(user, i, id);
      g->going[i] = !ended && id != g->sampling->stop && g->lengths[i] < g->capacity;
      going |= g->going[i];
      ahead |= cached && g->going[i] && g->positions[i] < g->window;
    }
    if (!going) return G2Z_OK;
    /* On CUDA the second step is recorded as a graph. From then on the graph is replayed. */
    if (ahead && steps++ == 1 && dev->kind == G2Z_DEVICE_CUDA) {
      G2Z_TRY(dev->ops->graph_begin(dev));
      g2z_status status = g2z__step(g), ended = dev->ops->graph_end(dev, &g->graph);
      G2Z_TRY(status);
      G2Z_TRY(ended);
    }
    if (ahead && g->graph) G2Z_TRY(dev->ops->graph_run(dev, g->graph));
    else if (ahead) G2Z_TRY(g2z__step(g));
    for (int i = 0; i < g->count; i++) {
      if (!g->going[i]) continue;
      if (cached && g->positions[i] < g->window) g->positions[i]++;
      else G2Z_TRY(g2z__prefill(g, i));
    }
  }
}

G2Z_API g2z_status g2z_model_generate(g2z_model *m, int count, int32_t *ids, size_t capacity,
                                      size_t *lengths, const g2z_sampling *sampling,
                                      g2z_each_token each, void *user) {
  const size_t V = (size_t)m->config.vocab;
  g2z_device *dev = m->device;
  g2z__continued g;
  void *device;
  memset(&g, 0, sizeof g);
  G2Z_TRY(g2z_sampling_check(m->services, sampling));
  G2Z_TRY(g2z_check_range(m->services, "count", count, 1, UINT16_MAX));
  for (int i = 0; i < count; i++) {
    if (!lengths[i] || lengths[i] > capacity)
      G2Z_REFUSE(m->services, "sequence %d has %zu tokens, and must have 1 to %zu: begin with the "
                 "end-of-text token", i, lengths[i], capacity);
    G2Z_TRY(g2z__check_ids(m->services, "token", ids + (size_t)i * capacity, lengths[i], 0,
                           m->config.vocab));
  }
  g.model = m;
  g.sampling = sampling;
  g.count = count;
  g.ids = ids;
  g.capacity = capacity;
  g.lengths = lengths;
  g.window = g2z__model_longest(m);
  if (capacity < (size_t)g.window) g.window = (int)capacity;
  G2Z_TRY(g2z__model_end(m, G2Z_NEW(m->services, 4 * (size_t)count, &g.next)));
  g.positions = g.next + count;
  g.drawn = g.positions + count;
  g.going = g.drawn + count;
  for (int i = 0; i < count; i++) {
    g.going[i] = lengths[i] < capacity;
    g.positions[i] = g.window;
    if (lengths[i] <= (size_t)g.window) g.positions[i] = (int32_t)lengths[i] - 1;
  }
  /* One pass runs either one sequence of at most `window` tokens or one token per sequence. */
  g2z_status status = g2z__model_begin(m, (count - 1) / g.window + 1, g.window, count);
  if (status == G2Z_OK)
    status = dev->ops->allocate(dev, (3 + V) * (size_t)count * sizeof(int32_t), &device);
  if (status == G2Z_OK) {
    g.on.logits = (float *)device; /* at the start, because products need an aligned address */
    g.on.next = (int32_t *)(g.on.logits + (size_t)count * V);
    g.on.positions = g.on.next + count;
    g.on.drawn = g.on.positions + count;
    status = g2z__continue(&g, each, user);
    if (g.graph) dev->ops->graph_free(dev, g.graph);
    dev->ops->release(dev, device);
  }
  g2z_release(m->services, g.next);
  return g2z__model_end(m, status);
}

/* ===== >>i16 checkpoints =================================================
 * In:  a trainer on every rank. Out: a directory with its state. Loading is the reverse.
 * Law: a directory gets its final name only when every file in it is whole and on the disk. Loading
 *      checks every byte that it will read before it changes the trainer.
 *
 * The last file is CHECKSUMS: a line "CRC BYTES OFFSET NAME" for each chunk of each other file, and
 * a last line with the checksum of these lines. Ranks divide the chunks, to save and to load. */

#define G2Z__CHECKPOINT_FORMAT "gpt2_zero checkpoint"
#define G2Z__CHECKPOINT_VERSION 4
#define G2Z__SUM_BYTES ((uint64_t)64 << 20)     /* bytes of a file per checksum */
#define G2Z__CHECKPOINT_CHUNK ((size_t)1 << 20) /* elements copied at a time */

/* ----- CRC-32C (Castagnoli), as in iSCSI, RFC 3720 appendix B.4 ----- */

#if defined(__SSE4_2__) && defined(__x86_64__)
G2Z_API uint32_t g2z_crc32c(uint32_t sum, const void *bytes, size_t count) {
  const unsigned char *at = (const unsigned char *)bytes;
  sum = ~sum;
  for (; count >= 8; at += 8, count -= 8) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    sum = (uint32_t)_mm_crc32_u64(sum, word);
  }
  for (; count > 0; at++, count--) sum = _mm_crc32_u8(sum, *at);
  return ~sum;
}
#else
/* Without the instruction: eight bytes per iteration, with a table for each, at about 2 GB/s. */
static uint32_t g2z__crc_table[8][256]; /* [k][b]: sum of byte b and k zero bytes after it */
static pthread_once_t g2z__crc_once = PTHREAD_ONCE_INIT;

G2Z__PRIVATE void g2z__crc_fill(void) {
  uint32_t(*table)[256] = g2z__crc_table;
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1) * 0x82f63b78u;
    table[0][byte] = sum;
  }
  for (int k = 1; k < 8; k++)
    for (int byte = 0; byte < 256; byte++)
      table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 255];
}

G2Z_API uint32_t g2z_crc32c(uint32_t sum, const void *bytes, size_t count) {
  const unsigned char *at = (const unsigned char *)bytes;
  uint32_t(*table)[256] = g2z__crc_table;
  pthread_once(&g2z__crc_once, g2z__crc_fill);
  sum = ~sum;
  for (; count >= 8; at += 8, count -= 8) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    word ^= sum;
    sum = 0;
    for (int k = 0; k < 8; k++) sum ^= table[7 - k][word >> (8 * k) & 255];
  }
  for (; count > 0; at++, count--) sum = sum >> 8 ^ table[0][(sum ^ *at) & 255];
  return ~sum;
}
#endif

/* ----- file names and fields ----- */

G2Z_API int g2z_checkpoint_remove(const char *path) {
  static const char *const names[] = {"model.safetensors", "config.json", "optimizer.state",
                                      "tuning.txt", "trainer_state.json", "note.json", "CHECKSUMS",
                                      "merges.txt", "vocab.json", "tokenizer_config.json",
                                      "generation_config.json"};
  const int directory = g2z__open_file(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  for (size_t i = 0; directory >= 0 && i < G2Z_COUNT(names); i++) {
    char partial[64];
    snprintf(partial, sizeof partial, "%s.partial", names[i]);
    unlinkat(directory, names[i], 0);
    unlinkat(directory, partial, 0);
  }
  if (directory >= 0) close(directory);
  return rmdir(path) == 0 || errno == ENOENT;
}

/* A line of CHECKSUMS. */
typedef struct g2z__sum {
  uint64_t begin, bytes;
  uint32_t crc;
  char name[76];
} g2z__sum;

/* trainer_state.json */
typedef struct g2z__saved {
  int64_t tokens;               /* trained on so far */
  int64_t epoch, epoch_step;    /* the loader's position: its next step */
  int64_t sequences;            /* number in the data; 0: there was no loader */
  int64_t data;                 /* the loader's hash >> 1, to fit JSON's signed integers */
  int64_t mixed;                /* 1: the data is a mixture of sets with weights */
  int64_t world;                /* ranks that saved */
  g2z_step_state state;
  g2z_train_config config;      /* only the settings of the run that saved */
  g2z__sum *sums;               /* CHECKSUMS: the chunks of a file are adjacent */
  size_t sum_count, sum_capacity;
  g2z_path path;                /* the file that was last read */
  char *text;
  size_t bytes;
} g2z__saved;

/* The numbers in trainer_state.json, with bounds. The other members of g2z_step_state hold for one
 * step only. */
#define G2Z__COUNT_MOST ((double)(INT64_C(1) << 60))
static const g2z_setting g2z__saved_numbers[] = {
#define SAVED(name, least, most)                                                                 \
  {#name, G2Z_SETTING_INT64, offsetof(g2z__saved, name), NULL, least, most, NULL, G2Z_RESUME_SAME}
#define STATE(name, kind, most)                                                                  \
  {#name, G2Z_SETTING_##kind, offsetof(g2z__saved, state.name), NULL, 0, most, NULL,             \
   G2Z_RESUME_SAME}
    SAVED(tokens, 0, G2Z__COUNT_MOST),
    SAVED(epoch, 0, 1 << 30),
    SAVED(epoch_step, 0, G2Z__COUNT_MOST),
    SAVED(sequences, 0, G2Z__COUNT_MOST),
    SAVED(data, 0, (double)INT64_MAX),
    SAVED(mixed, 0, 1),
    SAVED(world, 1, 1 << 16),
    STATE(step, INT64, G2Z__COUNT_MOST),
    STATE(applied, INT64, G2Z__COUNT_MOST),
    STATE(skipped, INT64, G2Z__COUNT_MOST),
    STATE(counted, INT64, G2Z__COUNT_MOST),
    STATE(skipped_at_minimum, INT, 1 << 30),
    STATE(good_steps, INT, INT32_MAX),
    STATE(hysteresis, INT, INT32_MAX),
    STATE(skip, INT, 2),
    STATE(loss_scale, FLOAT, 0),
    STATE(grad_multiplier, FLOAT, 0),
    STATE(loss, FLOAT, 0),
    STATE(grad_norm, FLOAT, 0),
    STATE(lr, FLOAT, 0),
    STATE(used_loss_scale, FLOAT, 0),
    STATE(norm_mean, FLOAT, 0),
    STATE(norm_deviation, FLOAT, 0),
    STATE(normed, INT64, G2Z__SPIKE_WINDOW),
    STATE(spikes_in_row, INT, INT32_MAX),
    STATE(spikes, INT, INT32_MAX),
#undef SAVED
#undef STATE
};

G2Z__PRIVATE void g2z__saved_free(g2z_services *services, g2z__saved *saved) {
  g2z_release(services, saved->sums);
  g2z_release(services, saved->text);
}

/* The length of a file, or -1 if CHECKSUMS does not list it. */
G2Z__PRIVATE int64_t g2z__saved_bytes(const g2z__saved *saved, const char *name) {
  int64_t bytes = -1;
  for (size_t i = 0; i < saved->sum_count; i++)
    if (strcmp(saved->sums[i].name, name) == 0)
      bytes = (int64_t)(saved->sums[i].begin + saved->sums[i].bytes);
  return bytes;
}

/* ----- between files and the device ----- */

/* The state of one save or load on this rank. */
typedef struct g2z__transfer {
  g2z_trainer *t;
  g2z_services *services;
  g2z_ranks *ranks;
  char *directory;              /* without slashes at its end; while saving: DIRECTORY.partial */
  g2z__saved saved;
  float *chunk;                 /* [chunk_elements], pinned memory of the device */
  size_t chunk_elements;
  int descriptor;               /* of the open file; -1: none */
  g2z_path path;                /* of the open file, or the last that g2z__transfer_name() made */
  int weights_only;             /* saving: 1: only weights, no checkpoint */
  size_t begin, count;          /* canonical range that this rank looks at: all; but if every rank
                                 * owns all, each saves its own part */
  g2z_writer *model, *moments;  /* saving: rank 0's files, whose elements all ranks write */
  uint64_t first[2];            /* saving: where the elements of model and moments begin. No rank
                                 * reads this in the file: NFS would cache a page, and a write to
                                 * that page would replace other hosts' bytes */
  g2z_writer *config, *sums;    /* saving: config.json, CHECKSUMS */
  DIR *listing;                 /* saving: rank 0 reads the names in the directory */
  g2z_note note;                /* saving: writes the program's note.json */
  g2z_files files;
  void *user;
  uint64_t vocab_hash;          /* loading: the model's hash after the load */
} g2z__transfer;

G2Z__PRIVATE void g2z__transfer_shut(g2z__transfer *x) {
  if (x->descriptor >= 0) close(x->descriptor);
  x->descriptor = -1;
}

G2Z__PRIVATE void g2z__transfer_free(g2z__transfer *x) {
  g2z__transfer_shut(x);
  g2z_writer_free(x->model);
  g2z_writer_free(x->moments);
  g2z_writer_free(x->config);
  g2z_writer_free(x->sums);
  if (x->listing) closedir(x->listing);
  if (x->chunk) x->t->device->ops->release_host(x->t->device, x->chunk);
  g2z_release(x->services, x->directory);
  g2z__saved_free(x->services, &x->saved);
}

/* Removes slashes at the directory's end, so that ".partial" extends its name. */
G2Z__PRIVATE g2z_status g2z__transfer_open(g2z__transfer *x, g2z_trainer *t, const char *directory,
                                           const char *suffix) {
  size_t length = strlen(directory), bytes = length + strlen(suffix) + 1;
  void *memory;
  memset(x, 0, sizeof *x);
  x->t = t;
  x->services = t->services;
  x->ranks = t->context->ranks;
  x->descriptor = -1;
  while (length > 1 && directory[length - 1] == '/') length--;
  G2Z_TRY(G2Z_NEW(t->services, bytes, &x->directory));
  snprintf(x->directory, bytes, "%.*s%s", (int)length, directory, suffix);
  x->chunk_elements = G2Z__MIN(t->plan->parameters, G2Z__CHECKPOINT_CHUNK);
  G2Z_TRY(t->device->ops->allocate_host(t->device, x->chunk_elements * sizeof(float), &memory));
  x->chunk = (float *)memory;
  return G2Z_OK;
}

/* Closes the open file. Returns the path of `name` in the directory, and keeps it in x->path. */
G2Z__PRIVATE const char *g2z__transfer_name(g2z__transfer *x, const char *name) {
  g2z__transfer_shut(x);
  x->path = g2z_path_in(x->directory, "%s", name);
  return x->path.text;
}

/* Closes the open file and opens another, unless it is the same. */
G2Z__PRIVATE g2z_status g2z__transfer_file(g2z__transfer *x, const char *name, int flags) {
  const int rank = x->t->plan->rank;
  if (x->descriptor >= 0 && strcmp(x->path.text + strlen(x->directory) + 1, name) == 0)
    return G2Z_OK;
  g2z__transfer_name(x, name);
  x->descriptor = g2z__open_file(x->path.text, flags | O_NONBLOCK); /* a FIFO must not block */
  if (x->descriptor >= 0) return G2Z_OK;
  if (errno == ENOENT && flags == O_RDONLY)
    return g2z_fail(x->services, G2Z_FORMAT, "%s has no %s, which belongs to it: copy the "
                    "checkpoint again", x->directory, name);
  if (errno == ENOENT && rank > 0)
    return g2z_fail(x->services, G2Z_IO, "rank %d does not see %s, which rank 0 made: choose a "
                    "directory on a file system that all ranks share", rank, x->path.text);
  return g2z_fail_file(x->services, errno, "open", x->path.text);
}

G2Z__PRIVATE g2z_status g2z__transfer_read(g2z__transfer *x, uint64_t begin, void *out,
                                           size_t bytes) {
  return g2z__read_at(x->services, x->descriptor, x->path.text, out, bytes, begin);
}

/* Opens the file with a buffer's elements, all in canonical order: model.safetensors has masters,
 * optimizer.state m and then v. *begin is the first one's index in the file. Saving follows no
 * link. */
G2Z__PRIVATE g2z_status g2z__transfer_buffer(g2z__transfer *x, g2z_buffer buffer, int saving,
                                             uint64_t *begin) {
  const char *name = buffer == G2Z_BUFFER_MASTER ? "model.safetensors" : "optimizer.state";
  if (saving) {
    char partial[40];
    snprintf(partial, sizeof partial, "%s.partial", name);
    G2Z_TRY(g2z__transfer_file(x, partial, O_WRONLY | O_NOFOLLOW));
    *begin = x->first[buffer != G2Z_BUFFER_MASTER];
  } else { /* the length of the header, then the header */
    G2Z_TRY(g2z__transfer_file(x, name, O_RDONLY));
    G2Z_TRY(g2z__transfer_read(x, 0, begin, sizeof *begin));
    *begin += sizeof *begin;
  }
  if (buffer == G2Z_BUFFER_V) *begin += x->t->plan->parameters * sizeof(float);
  return G2Z_OK;
}

/* Saves or loads the elements in x's range that this rank owns. A failure on the device marks this
 * rank as failed alone: other ranks may wait for its parameters and so never come to the agreement
 * that would report the failure. */
G2Z__PRIVATE g2z_status g2z__transfer_elements(g2z__transfer *x, int saving) {
  const int last = x->weights_only ? G2Z_BUFFER_MASTER : G2Z_BUFFER_V;
  for (int b = G2Z_BUFFER_MASTER; b <= last; b++) {
    uint64_t begin;
    g2z_update_range range;
    G2Z_TRY(g2z__transfer_buffer(x, (g2z_buffer)b, saving, &begin));
    for (size_t next = 0; g2z__owned_next(x->t->plan, x->begin, x->count, &next, &range);) {
      if (!g2z__trainer_shard(x->t, (g2z_buffer)b, &range))
        continue; /* v of Muon's weights: the file has zeros */
      for (size_t done = 0, n; done < range.elements; done += n) {
        const size_t canonical = range.canonical + done;
        const uint64_t at = begin + canonical * sizeof(float);
        n = G2Z__MIN(range.elements - done, x->chunk_elements);
        if (saving) {
          g2z_status status = g2z_trainer_read(x->t, (g2z_buffer)b, canonical, n, x->chunk);
          G2Z_TRY(g2z__trainer_alone(x->t, status));
          if (!g2z__pwrite(x->descriptor, x->chunk, n * sizeof(float), (int64_t)at))
            return g2z_fail_file(x->services, errno, "write", x->path.text);
        } else {
          G2Z_TRY(g2z__transfer_read(x, at, x->chunk, n * sizeof(float)));
          G2Z_TRY(g2z_trainer_write(x->t, (g2z_buffer)b, canonical, n, x->chunk));
        }
      }
    }
    if (saving && g2z__sync(x->descriptor) != 0)
      return g2z_fail_file(x->services, errno, "sync", x->path.text);
  }
  g2z__transfer_shut(x);
  return G2Z_OK;
}

/* Computes the checksums of chunks rank, rank + world and so on. `write` 1: stores them; 0:
 * compares them with the stored ones. */
G2Z__PRIVATE g2z_status g2z__transfer_sums(g2z__transfer *x, int write) {
  const size_t world = (size_t)x->t->plan->world;
  const uint64_t most = x->chunk_elements * sizeof(float);
  for (size_t i = (size_t)x->t->plan->rank; i < x->saved.sum_count; i += world) {
    g2z__sum *sum = &x->saved.sums[i];
    const uint64_t whole = (uint64_t)g2z__saved_bytes(&x->saved, sum->name);
    struct stat info;
    uint32_t crc = 0;
    G2Z_TRY(g2z__transfer_file(x, sum->name, O_RDONLY));
    if (fstat(x->descriptor, &info) != 0)
      return g2z_fail_file(x->services, errno, "read", x->path.text);
    if (!S_ISREG(info.st_mode))
      return g2z_fail(x->services, G2Z_FORMAT, "%s is %s: copy the checkpoint again", x->path.text,
                      g2z__kind_of_file(&info));
    if ((uint64_t)info.st_size != whole)
      return g2z_fail(x->services, G2Z_FORMAT,
                      "%s has %" PRIu64 " of %" PRIu64 " bytes: it was cut or replaced; "
                      "copy the checkpoint again", x->path.text, (uint64_t)info.st_size, whole);
    for (uint64_t done = 0, n; done < sum->bytes; done += n) {
      n = G2Z__MIN(sum->bytes - done, most);
      G2Z_TRY(g2z__transfer_read(x, sum->begin + done, x->chunk, (size_t)n));
      crc = g2z_crc32c(crc, x->chunk, (size_t)n);
    }
    if (write) sum->crc = crc;
    else if (sum->crc != crc)
      return g2z_fail(x->services, G2Z_FORMAT,
                      "%s: bytes %" PRIu64 " to %" PRIu64 " have the checksum %08" PRIx32 " and "
                      "must have %08" PRIx32 ": the file is damaged; take an earlier checkpoint",
                      x->path.text, sum->begin, sum->begin + sum->bytes - 1, crc, sum->crc);
  }
  return G2Z_OK;
}

/* ----- saving ----- */

G2Z__PRIVATE g2z_status g2z__saver_own(g2z__transfer *x) {
  const g2z_trainer *t = x->t;
  const g2z_plan *plan = t->plan;
  g2z__saved *saved = &x->saved;
  const g2z_ops *ops = t->device->ops;
  g2z_status status = ops->download(t->device, &saved->state, t->state, sizeof saved->state);
  if (status == G2Z_OK) status = ops->synchronize(t->device);
  G2Z_TRY(g2z__trainer_alone(x->t, status));
  saved->tokens = t->resumed_tokens + (t->enqueued - t->resumed_step) * plan->step_tokens;
  saved->config = t->config;
  if (t->loader) {
    saved->epoch = t->loader->position.epoch;
    saved->epoch_step = t->loader->position.step;
    saved->sequences = t->loader->sequences;
    saved->data = (int64_t)(t->loader->data >> 1);
    saved->mixed = t->loader->mixed;
  }
  return g2z__transfer_elements(x, 1);
}

/* Rank 0 creates the directory, and the files of weights and moments: headers and full length. */
G2Z__PRIVATE g2z_status g2z__saver_begin(g2z__transfer *x, const char *final_name) {
  const g2z_plan *plan = x->t->plan;
  const size_t P = plan->parameters, W = (size_t)plan->world, rank = (size_t)plan->rank;
  g2z__safetensor *list, moments[2];
  struct stat info;
  size_t count;
  int there = 0;
  x->saved.world = plan->world;
  x->count = P;
  if (plan->owner == G2Z_OWNER_ALL) { /* each rank saves an equal part */
    x->begin = P / W * rank + P % W * rank / W;
    x->count = P / W * (rank + 1) + P % W * (rank + 1) / W - x->begin;
  }
  if (rank > 0) return G2Z_OK;
  if (!x->weights_only) {
    G2Z_TRY(g2z_is_there(x->services, final_name, &there));
    if (there) /* never overwrite a whole checkpoint */
      G2Z_REFUSE(x->services, "%s exists already: remove it, or save under another name",
                 final_name);
    g2z_checkpoint_remove(x->directory); /* left by a save that was killed */
    if (lstat(x->directory, &info) == 0 && S_ISLNK(info.st_mode))
      return g2z_fail(x->services, G2Z_IO, "%s is a symbolic link: a checkpoint that is written "
                      "there would overwrite what it leads to; remove the link", x->directory);
  }
  G2Z_TRY(g2z_make_directory(x->services, x->directory));
  G2Z_TRY(g2z__weights_list(x->services, &plan->model, &list, &count));
  const g2z_status status = g2z__safetensors_create(
      x->services, g2z__transfer_name(x, "model.safetensors"), list, count, &x->model);
  g2z_release(x->services, list);
  if (status != G2Z_OK || x->weights_only) return status;
  memset(moments, 0, sizeof moments);
  moments[0].name = "m";
  moments[1].name = "v";
  for (int i = 0; i < 2; i++) {
    moments[i].rank = 1;
    moments[i].shape[0] = P;
  }
  return g2z__safetensors_create(x->services, g2z__transfer_name(x, "optimizer.state"), moments, 2,
                                 &x->moments);
}

G2Z__PRIVATE void g2z__saved_put_table(g2z_json_out *out, const g2z_setting *rows, size_t count,
                                       const void *values) {
  for (const g2z_setting *row = rows; row < rows + count; row++) {
    char text[G2Z__SETTING_BYTES];
    if (row->on_resume == G2Z_RESUME_FREE) continue;
    g2z__setting_text(row, values, text);
    if (row->words) g2z_json_put_string(out, row->name, text);
    else if (isfinite(g2z__setting_number(row, values))) g2z__json_put(out, row->name, text);
    else g2z__json_put(out, row->name, "null");
  }
}

G2Z__PRIVATE void g2z__saved_put(void *user, g2z_json_out *out) {
  const g2z__saved *saved = (const g2z__saved *)user;
  g2z_json_put_string(out, "format", G2Z__CHECKPOINT_FORMAT);
  g2z_json_put_integer(out, "version", G2Z__CHECKPOINT_VERSION);
  g2z__saved_put_table(out, g2z__saved_numbers, G2Z_COUNT(g2z__saved_numbers), saved);
  g2z_json_begin(out, "settings", '{');
  g2z__saved_put_table(out, g2z__settings, G2Z__SETTINGS, &saved->config);
  g2z_json_end(out, '}');
}

G2Z__PRIVATE int g2z__sum_order(const void *a, const void *b) {
  const g2z__sum *x = (const g2z__sum *)a, *y = (const g2z__sum *)b;
  const int names = strcmp(x->name, y->name);
  if (names) return names;
  if (x->begin < y->begin) return -1;
  return x->begin > y->begin;
}

/* Called on rank 0 when all ranks have written their elements. Gives the weights their name. For a
 * checkpoint it also writes the other files and lists the chunks of all. */
G2Z__PRIVATE g2z_status g2z__saver_commit(g2z__transfer *x) {
  g2z__saved *saved = &x->saved;
  int replaces;
  /* The weights and config.json are both on the disk before either gets its name: a full disk
   * leaves the old pair. If the process is killed after the unlink, the directory has a config.json
   * without a model or new weights without a config.json, and does not open. */
  G2Z_TRY(g2z_is_there(x->services, x->model->path, &replaces));
  G2Z_TRY(g2z_writer_create(x->services, g2z__transfer_name(x, "config.json"), &x->config));
  G2Z_TRY(g2z__weights_put_config(x->config, &x->t->plan->model, x->t->config.dropout));
  G2Z_TRY(g2z__writer_finish(x->config, 0));
  if (g2z_unlink(x->path.text) != 0 && errno != ENOENT)
    return g2z_fail_file(x->services, errno, "replace", x->path.text);
  if (!replaces) G2Z_TRY(g2z_writer_commit(x->config));
  G2Z_TRY(g2z_writer_commit(x->model));
  G2Z_TRY(g2z_writer_commit(x->config));
  if (x->weights_only) return G2Z_OK;

  G2Z_TRY(g2z_writer_commit(x->moments));
  G2Z_TRY(g2z_trainer_write_tuning(x->t, g2z__transfer_name(x, "tuning.txt")));
  if (x->files) G2Z_TRY(x->files(x->user, x->directory));
  if (x->note)
    G2Z_TRY(g2z_json_write(x->services, g2z__transfer_name(x, "note.json"), x->note, x->user));
  G2Z_TRY(g2z_json_write(x->services, g2z__transfer_name(x, "trainer_state.json"), g2z__saved_put,
                         saved));

  /* List the chunks of all files. An empty file has one empty chunk. */
  x->listing = opendir(x->directory);
  if (!x->listing) return g2z_fail_file(x->services, errno, "list", x->directory);
  for (struct dirent *entry; (entry = readdir(x->listing)) != NULL;) {
    struct stat info;
    g2z__sum sum;
    memset(&sum, 0, sizeof sum);
    if (fstatat(dirfd(x->listing), entry->d_name, &info, 0) != 0)
      return g2z_fail_file(x->services, errno, "list", x->directory);
    if (!S_ISREG(info.st_mode)) continue;
    if (strlen(entry->d_name) >= sizeof sum.name || strchr(entry->d_name, '\n'))
      G2Z_REFUSE(x->services, "a checkpoint cannot hold %s/%.200s: rename it, to at most %zu bytes "
                 "on one line", x->directory, entry->d_name, sizeof sum.name - 1);
    snprintf(sum.name, sizeof sum.name, "%.75s", entry->d_name);
    do {
      const uint64_t left = (uint64_t)info.st_size - sum.begin;
      sum.bytes = G2Z__MIN(left, G2Z__SUM_BYTES);
      G2Z_TRY(G2Z_GROW(x->services, &saved->sums, &saved->sum_capacity, saved->sum_count,
                       saved->sum_count + 1));
      saved->sums[saved->sum_count++] = sum;
      sum.begin += sum.bytes;
    } while (sum.begin < (uint64_t)info.st_size);
  }
  qsort(saved->sums, saved->sum_count, sizeof(g2z__sum), g2z__sum_order);
  return G2Z_OK;
}

/* Rank 0: writes CHECKSUMS and gives the directory its final name. */
G2Z__PRIVATE g2z_status g2z__saver_publish(g2z__transfer *x, const char *final_name) {
  char line[160];
  uint32_t crc = 0;
  G2Z_TRY(g2z_writer_create(x->services, g2z__transfer_name(x, "CHECKSUMS"), &x->sums));
  for (size_t i = 0; i < x->saved.sum_count; i++) {
    const g2z__sum *sum = &x->saved.sums[i];
    const int bytes = snprintf(line, sizeof line, "%08" PRIx32 " %" PRIu64 " %" PRIu64 " %s\n",
                               sum->crc, sum->bytes, sum->begin, sum->name);
    crc = g2z_crc32c(crc, line, (size_t)bytes);
    g2z_writer_put(x->sums, line, (size_t)bytes);
  }
  g2z_writer_printf(x->sums, "%08" PRIx32 " %zu lines\n", crc, x->saved.sum_count);
  G2Z_TRY(g2z_writer_commit(x->sums));
  /* Open the directory above before the rename, so that after it only the sync can fail. */
  int above = g2z__open_file(g2z__transfer_name(x, ".."), O_RDONLY | O_DIRECTORY);
  int renamed = g2z_rename(x->directory, final_name) == 0, error = errno;
  int unsynced = g2z__sync_directory(above);
  if (!renamed)
    return g2z_fail_file(x->services, error, "rename a complete checkpoint to", final_name);
  if (unsynced) return g2z_fail_file(x->services, unsynced, "sync the directory above", final_name);
  return G2Z_OK;
}

/* As in trainer_open(), each rank runs a phase alone, and then all agree on its result. */
G2Z__PRIVATE g2z_status g2z__saver_run(g2z__transfer *x, const char *final_name) {
  const size_t world = (size_t)x->t->plan->world, rank = (size_t)x->t->plan->rank;
  g2z__saved *saved = &x->saved;
  G2Z_TRY(g2z_ranks_agree(x->ranks, g2z__saver_begin(x, final_name)));
  if (rank == 0) {
    x->first[0] = x->model->written;
    if (x->moments) x->first[1] = x->moments->written;
  }
  G2Z_TRY(g2z_ranks_broadcast(x->ranks, x->first, sizeof x->first));
  G2Z_TRY(g2z_ranks_agree(x->ranks, g2z__saver_own(x)));
  g2z_status status = G2Z_OK;
  if (rank == 0) status = g2z__saver_commit(x);
  G2Z_TRY(g2z_ranks_agree(x->ranks, status));
  if (x->weights_only) return G2Z_OK;
  /* Each rank computes the checksums of its part of the chunks that rank 0 listed. */
  uint64_t count = saved->sum_count;
  G2Z_TRY(g2z_ranks_broadcast(x->ranks, &count, sizeof count));
  G2Z_TRY(g2z_ranks_agree(x->ranks, G2Z_GROW(x->services, &saved->sums, &saved->sum_capacity,
                                             saved->sum_count, (size_t)count + world)));
  G2Z_TRY(g2z_ranks_broadcast(x->ranks, saved->sums, (size_t)count * sizeof(g2z__sum)));
  saved->sum_count = (size_t)count;
  G2Z_TRY(g2z_ranks_agree(x->ranks, g2z__transfer_sums(x, 1)));
  for (size_t i = 0; i < count; i += world)
    G2Z_TRY(g2z_ranks_all_gather(x->ranks, &saved->sums[i + rank], sizeof(g2z__sum),
                                 &saved->sums[i]));
  if (rank == 0) status = g2z__saver_publish(x, final_name);
  return g2z_ranks_agree(x->ranks, status);
}

G2Z__PRIVATE g2z_status g2z__save(g2z_trainer *t, const char *directory, int weights_only,
                                  g2z_note note, g2z_files files, void *user) {
  g2z__transfer x;
  g2z_ranks *ranks = t->context->ranks;
  g2z__ranks_phase(ranks, "save", t->enqueued, 3600);
  g2z_status status = g2z__transfer_open(&x, t, directory, weights_only ? "" : ".partial");
  x.weights_only = weights_only;
  x.note = note;
  x.files = files;
  x.user = user;
  status = g2z_ranks_agree(ranks, status);
  if (status == G2Z_OK) {
    status = g2z__saver_run(&x, directory);
    if (status != G2Z_OK) {
      /* All ranks close their files before rank 0 removes them: NFS keeps a file that is open. */
      g2z__transfer_shut(&x);
      g2z_writer_free(x.model); /* also removes its .partial file */
      g2z_writer_free(x.moments);
      g2z_writer_free(x.config);
      g2z_writer_free(x.sums);
      x.model = x.moments = x.config = x.sums = NULL;
      const g2z_status closed = g2z_ranks_agree(ranks, G2Z_OK);
      if (closed != G2Z_OK) status = closed; /* and services->error has its sentence */
      if (t->plan->rank == 0 && !weights_only) g2z_checkpoint_remove(x.directory);
    }
  }
  g2z__transfer_free(&x);
  g2z__ranks_phase(ranks, "step", t->enqueued, 0);
  return status;
}

G2Z_API g2z_status g2z_trainer_save(g2z_trainer *t, const char *directory) {
  return g2z__save(t, directory, 0, NULL, NULL, NULL);
}

G2Z_API g2z_status g2z_trainer_save_with(g2z_trainer *t, const char *directory, g2z_note note,
                                         g2z_files files, void *user) {
  return g2z__save(t, directory, 0, note, files, user);
}

G2Z_API g2z_status g2z_trainer_save_weights(g2z_trainer *t, const char *directory) {
  return g2z__save(t, directory, 1, NULL, NULL, NULL);
}

/* ----- reading trainer_state.json ----- */

/* Reads a member's value if the table has a row of that name, else skips it. null is NaN. */
G2Z__PRIVATE void g2z__saved_get(g2z_json *json, const g2z_json_text *key, const g2z_setting *rows,
                                 size_t count, void *values) {
  const g2z_setting *row = rows;
  while (row < rows + count && !g2z_json_is(key, row->name)) row++;
  const char first = g2z_json_peek(json);
  const unsigned char *at = json->at;
  g2z_json_skip(json);
  if (row == rows + count || json->status != G2Z_OK) return;
  char text[G2Z__SETTING_BYTES];
  const int quotes = first == '"', bytes = (int)(json->at - at) - 2 * quotes;
  snprintf(text, sizeof text, "%.*s", bytes, (const char *)at + quotes);
  if (row->kind == G2Z_SETTING_FLOAT && first == 'n') *(float *)((char *)values + row->at) = NAN;
  else if (bytes >= (int)sizeof text || !g2z__setting_read(row, values, text))
    g2z_json_fail(json, "%s cannot be \"%s\"", row->name, text);
}

/* Reads the lines of CHECKSUMS. The last line must match the lines before it. */
G2Z__PRIVATE g2z_status g2z__sums_parse(g2z_services *services, g2z__saved *saved) {
  const char *line = saved->text, *end = line + saved->bytes, *next;
  char last[64];
  g2z__sum sum, before;
  memset(&before, 0, sizeof before);
  for (; (next = (const char *)memchr(line, '\n', (size_t)(end - line))) != NULL; line = next + 1) {
    int used = 0;
    memset(&sum, 0, sizeof sum);
    if (next + 1 == end ||
        sscanf(line, "%8" SCNx32 " %" SCNu64 " %" SCNu64 " %75[^/\n]%n", &sum.crc, &sum.bytes,
               &sum.begin, sum.name, &used) != 4 || line + used != next)
      break;
    uint64_t begin = 0;
    if (strcmp(sum.name, before.name) == 0) begin = before.begin + before.bytes;
    if (sum.begin != begin || sum.bytes > INT64_MAX - begin) break;
    G2Z_TRY(G2Z_GROW(services, &saved->sums, &saved->sum_capacity, saved->sum_count,
                     saved->sum_count + 1));
    saved->sums[saved->sum_count++] = before = sum;
  }
  snprintf(last, sizeof last, "%08" PRIx32 " %zu lines\n",
           g2z_crc32c(0, saved->text, (size_t)(line - saved->text)), saved->sum_count);
  if ((size_t)(end - line) == strlen(last) && memcmp(line, last, strlen(last)) == 0) return G2Z_OK;
  return g2z_fail(services, G2Z_FORMAT, "%s is damaged: its lines do not match the checksum in the "
                  "last line; take an earlier checkpoint", saved->path.text);
}

G2Z__PRIVATE g2z_status g2z__saved_parse(g2z_services *services, g2z__saved *saved) {
  g2z_json json;
  g2z_json_text key;
  g2z_json_open(&json, services, saved->path.text, saved->text, saved->bytes);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    if (!g2z_json_is(&key, "settings"))
      g2z__saved_get(&json, &key, g2z__saved_numbers, G2Z_COUNT(g2z__saved_numbers), saved);
    else if (g2z_json_enter(&json, '{'))
      while (g2z_json_next(&json, '}', &key))
        g2z__saved_get(&json, &key, g2z__settings, G2Z__SETTINGS, &saved->config);
  }
  G2Z_TRY(g2z_json_close(&json));
  if (g2z__settings_check(services, g2z__saved_numbers, G2Z_COUNT(g2z__saved_numbers), saved) ==
          G2Z_OK &&
      g2z__settings_check(services, g2z__settings, G2Z__SETTINGS, &saved->config) == G2Z_OK)
    return G2Z_OK;
  return g2z_fail(services, G2Z_FORMAT, "%s lacks a number, or has one out of range: it is "
                  "damaged; take an earlier checkpoint", saved->path.text);
}

G2Z__PRIVATE g2z_status g2z__saved_open(g2z_services *services, const char *directory,
                                        const char *name, g2z__saved *saved) {
  g2z_release(services, saved->text);
  saved->path = g2z_path_in(directory, "%s", name);
  return g2z_read_file(services, saved->path.text, (size_t)1 << 30, &saved->text, &saved->bytes);
}

/* Compares the file in saved->text with its one line in CHECKSUMS. */
G2Z__PRIVATE g2z_status g2z__saved_check(g2z_services *services, const g2z__saved *saved,
                                         const char *name) {
  for (size_t i = 0; i < saved->sum_count; i++)
    if (strcmp(saved->sums[i].name, name) == 0 && saved->sums[i].bytes == saved->bytes &&
        saved->sums[i].crc == g2z_crc32c(0, saved->text, saved->bytes))
      return G2Z_OK;
  return g2z_fail(services, G2Z_FORMAT, "%s does not match its checksum in CHECKSUMS: it is "
                  "damaged; take an earlier checkpoint", saved->path.text);
}

/* The version in saved->text, which may be a trainer_state.json of any version. -1: it is none. */
G2Z__PRIVATE int64_t g2z__saved_version(g2z_services *services, const g2z__saved *saved) {
  g2z_json json;
  g2z_json_text key;
  int64_t version = -1;
  int ours = 0;
  g2z_json_open(&json, services, saved->path.text, saved->text, saved->bytes);
  g2z_json_enter(&json, '{');
  while (g2z_json_next(&json, '}', &key)) {
    if (g2z_json_is(&key, "format")) {
      const g2z_json_text format = g2z_json_string(&json);
      ours = g2z_json_is(&format, G2Z__CHECKPOINT_FORMAT);
    } else if (g2z_json_is(&key, "version")) {
      version = g2z_json_integer(&json);
    } else {
      g2z_json_skip(&json);
    }
  }
  if (g2z_json_close(&json) != G2Z_OK || !ours) return -1;
  return version;
}

/* Reads DIRECTORY/trainer_state.json. If the directory is no checkpoint, fails with the reason. */
G2Z__PRIVATE g2z_status g2z__saved_read(g2z_services *services, const char *directory,
                                        g2z__saved *saved) {
  size_t length = strlen(directory);
  int weights, state, sums;
  struct stat info;
  memset(saved, 0, sizeof *saved);
  if (stat(directory, &info) != 0)
    return g2z_fail_file(services, errno, "open the checkpoint", directory);
  while (length > 1 && directory[length - 1] == '/') length--;
  if (length > 8 && strncmp(directory + length - 8, ".partial", 8) == 0)
    return g2z_fail(services, G2Z_FORMAT, "%s was being written when the run ended and is not "
                    "whole: take an earlier checkpoint", directory);
  G2Z_TRY(g2z_is_there(services, g2z_path_in(directory, "trainer_state.json").text, &state));
  G2Z_TRY(g2z_is_there(services, g2z_path_in(directory, "model.safetensors").text, &weights));
  if (!state && weights)
    return g2z_fail(services, G2Z_FORMAT, "%s has weights but no trainer_state.json, so it is no "
                    "checkpoint: begin a new training from them, --init-from", directory);
  if (!state)
    return g2z_fail(services, G2Z_FORMAT, "%s has no trainer_state.json, so it is no checkpoint: "
                    "name a step-NNNNNN directory of a run", directory);
  G2Z_TRY(g2z_is_there(services, g2z_path_in(directory, "CHECKSUMS").text, &sums));
  if (!sums)
    return g2z_fail(services, G2Z_FORMAT, "%s has no CHECKSUMS, which belongs to it: copy the "
                    "checkpoint again", directory);
  G2Z_TRY(g2z__saved_open(services, directory, "CHECKSUMS", saved));
  G2Z_TRY(g2z__sums_parse(services, saved));

  /* The version is checked first, because the rest depends on it. If the checksum also fails, an
   * unknown version counts as damage, not as another format. */
  G2Z_TRY(g2z__saved_open(services, directory, "trainer_state.json", saved));
  const int64_t version = g2z__saved_version(services, saved);
  if (version < 0)
    return g2z_fail(services, G2Z_FORMAT, "%s does not look like the state of a checkpoint: it is "
                    "damaged, or another kind of file; copy the checkpoint again",
                    saved->path.text);
  g2z_status status = g2z__saved_check(services, saved, "trainer_state.json");
  if (version != G2Z__CHECKPOINT_VERSION) {
    if (status == G2Z_OK) status = G2Z_UNSUPPORTED;
    return g2z_fail(services, status,
                    "%s has version=%" PRId64 " of the format, and this program reads version %d: "
                    "resume with the program that wrote it, or start a new run from its weights "
                    "with --init-from", saved->path.text, version, G2Z__CHECKPOINT_VERSION);
  }
  G2Z_TRY(status);
  return g2z__saved_parse(services, saved);
}

/* ----- loading ----- */

/* Compares the trainer's settings with the saved ones. The trainer's settings apply. */
G2Z__PRIVATE g2z_status g2z__loading_compare(g2z__transfer *x, g2z_on_resume on_resume) {
  for (int i = 0; i < G2Z__SETTINGS; i++) {
    const g2z_setting *setting = &g2z__settings[i];
    char was[G2Z__SETTING_BYTES], is[G2Z__SETTING_BYTES];
    g2z__setting_text(setting, &x->saved.config, was);
    g2z__setting_text(setting, &x->t->config, is);
    if (setting->on_resume != on_resume || strcmp(was, is) == 0) continue;
    if (on_resume == G2Z_RESUME_SAME)
      G2Z_REFUSE(x->services, "%s was saved by a model with %s=%s, and this one has %s=%s: resume "
                 "with the same model", x->directory, setting->name, was, setting->name, is);
    const g2z_log_level level = on_resume == G2Z_RESUME_WARN ? G2Z_LOG_WARNING : G2Z_LOG_INFO;
    const char *effect = "";
    if (strcmp(setting->name, "optimizer") == 0)
      effect = "; the moments of the blocks' weights start at zero";
    if (strcmp(setting->name, "positions") == 0)
      effect = ", without effect: the checkpoint's weights have positions";
    g2z_log(x->services, level, "%s changed since the checkpoint: %s -> %s%s", setting->name, was,
            is, effect);
  }
  return G2Z_OK;
}

/* Checks everything before the trainer changes. */
G2Z__PRIVATE g2z_status g2z__loading_open(g2z__transfer *x, const char *directory) {
  g2z_model_config model;
  x->count = x->t->plan->parameters;
  G2Z_TRY(g2z__saved_read(x->services, directory, &x->saved));
  G2Z_TRY(g2z__loading_compare(x, G2Z_RESUME_SAME));
  G2Z_TRY(g2z__transfer_sums(x, 0));
  G2Z_TRY(g2z_weights_config(x->services, x->directory, &model));
  x->vocab_hash = x->t->plan->model.vocab_hash;
  G2Z_TRY(g2z__vocab_agree(x->services, &x->vocab_hash, model.vocab_hash, x->directory));
  for (int b = G2Z_BUFFER_MASTER; b <= G2Z_BUFFER_V; b++) {
    uint64_t begin;
    G2Z_TRY(g2z__transfer_buffer(x, (g2z_buffer)b, 0, &begin));
    const char *name = x->path.text + strlen(x->directory) + 1;
    const uint64_t end = begin + x->count * sizeof(float);
    if (b != G2Z_BUFFER_M && end != (uint64_t)g2z__saved_bytes(&x->saved, name))
      return g2z_fail(x->services, G2Z_FORMAT, "%s does not hold %zu elements per buffer: the file "
                      "is from another checkpoint; copy all of this one's files again",
                      x->path.text, x->count);
  }
  return G2Z_OK;
}

/* Sequences per step in the run that saved. */
G2Z__PRIVATE int64_t g2z__saved_global(const g2z__saved *saved) {
  return (int64_t)saved->config.batch * saved->config.accum * saved->world;
}

/* Returns 1 if the loader has as many sequences as the checkpoint, of the same length and, if the
 * checkpoint has a hash, with the same contents. */
G2Z__PRIVATE int g2z__saved_same_data(const g2z__saved *saved, const g2z_loader *loader) {
  return saved->sequences == loader->sequences && saved->config.seq == loader->config.seq &&
         (!saved->data || saved->data == (int64_t)(loader->data >> 1));
}

/* The loader's position after a resume. With another global batch, the number of sequences already
 * read is rounded down to whole steps: some are read again, none is left out. With other data, or
 * sequences of another length, the epoch starts over. */
G2Z__PRIVATE g2z_loader_position g2z__saved_position(const g2z__saved *saved,
                                                     const g2z_loader *loader) {
  g2z_loader_position position;
  int64_t before = g2z__saved_global(saved);
  position.epoch = saved->epoch;
  position.step = saved->epoch_step;
  const int64_t most = loader->mixed ? INT64_C(1) << 60 : saved->sequences;
  if (!g2z__saved_same_data(saved, loader) || saved->epoch_step > most / before)
    position.step = 0;
  else if (loader->global != before) position.step = saved->epoch_step * before / loader->global;
  if (position.step > 0 && position.step >= loader->steps_per_epoch) {
    position.step = 0;
    position.epoch++;
  }
  return position;
}

/* A mixture continues exactly or not at all: it has no epoch that could start over. */
G2Z__PRIVATE g2z_status g2z__saved_mixture(g2z_services *services, const char *directory,
                                           const g2z__saved *saved, const g2z_loader *loader) {
  if (!loader || !saved->sequences || (!loader->mixed && !saved->mixed)) return G2Z_OK;
  if (g2z__saved_same_data(saved, loader) && saved->config.seed == loader->config.seed)
    return G2Z_OK;
  G2Z_REFUSE(services, "%.500s was saved with other training shards, weights, sequence length or "
             "seed (%" PRId64 " sequences of %d tokens, seed %" PRIu64 "), and a mixture continues "
             "only with the same: resume with the --train flags, --seq and --seed of that run, or "
             "start a new run from its weights: --init-from %.500s", directory, saved->sequences,
             saved->config.seq, saved->config.seed, directory);
}

/* Loads this rank's elements, the choices of algorithms, and the position in the data. */
G2Z__PRIVATE g2z_status g2z__loading_fill(g2z__transfer *x) {
  g2z_trainer *t = x->t;
  const g2z__saved *saved = &x->saved;
  if (t->plan->device == G2Z_DEVICE_CUDA) { /* a GPU that lacks the algorithms chooses again */
    char *text;
    size_t bytes;
    G2Z_TRY(g2z_read_file(x->services, g2z__transfer_name(x, "tuning.txt"), 1 << 24, &text,
                          &bytes));
    if (bytes > 0 && g2z__tuning_read(t->device, text) != G2Z_OK)
      g2z_log(x->services, G2Z_LOG_WARNING, "%s: this run chooses its algorithms again, so sums "
              "may round differently from the run that saved", x->services->error);
    g2z_release(x->services, text);
  }

  G2Z_TRY(g2z__transfer_elements(x, 0));

  /* If the optimizer has changed, both moments of Muon's weights start at zero: the old m is of no
   * use, and with v = 0 it would make AdamW's first steps 4.5 times too large. */
  const int changed = saved->config.optimizer.kind != t->config.optimizer.kind;
  if (changed) memset(x->chunk, 0, x->chunk_elements * sizeof(float));
  for (int u = 1; changed && u < t->plan->wpe; u++)
    for (int p = 0; p < G2Z_PARAM_COUNT; p++) {
      const g2z_param_info info = g2z__param_describe(&t->plan->model, (g2z_param)p);
      if (!info.muon) continue;
      const size_t begin = t->plan->unit[u].canonical + t->plan->offset[p];
      const size_t end = begin + info.elements;
      for (size_t at = begin, n; at < end; at += n) {
        n = G2Z__MIN(end - at, x->chunk_elements);
        G2Z_TRY(g2z_trainer_write(t, G2Z_BUFFER_M, at, n, x->chunk));
        G2Z_TRY(g2z_trainer_write(t, G2Z_BUFFER_V, at, n, x->chunk));
      }
    }

  if (!t->loader) return G2Z_OK;
  const int64_t global = t->loader->global, before = g2z__saved_global(saved);
  g2z_loader_position position = g2z__saved_position(saved, t->loader);
  const int logs = t->plan->rank == 0 && saved->sequences;
  if (logs && !g2z__saved_same_data(saved, t->loader)) {
    const char *contents = "";
    if (saved->sequences == t->loader->sequences && saved->config.seq == t->plan->seq)
      contents = ", with other contents";
    g2z_log(x->services, G2Z_LOG_WARNING, "the data differs from the checkpoint's: %" PRId64
            " sequences of %d tokens, now %" PRId64 " of %d%s; epoch %" PRId64 " starts over",
            saved->sequences, saved->config.seq, t->loader->sequences, t->plan->seq, contents,
            saved->epoch);
  } else if (logs && global != before) {
    const int64_t read = saved->epoch_step * before;
    const int64_t again = position.step ? read % global : 0;
    g2z_log(x->services, G2Z_LOG_INFO, "sequences per step changed since the checkpoint: %" PRId64
            " -> %" PRId64 "; of the %" PRId64 " sequences read in epoch %" PRId64 ", %" PRId64
            " are read again", before, global, read, saved->epoch, again);
  }
  return g2z_loader_seek(t->loader, position);
}

/* A dynamic fp16 loss scale carries over; otherwise the config's applies. */
G2Z__PRIVATE g2z_status g2z__loading_state(g2z__transfer *x) {
  g2z_trainer *t = x->t;
  const g2z_optimizer_config *o = &t->config.optimizer;
  g2z_step_state state = x->saved.state;
  int fp16 = t->config.dtype == G2Z_FP16;
  const g2z_train_config *was = &x->saved.config;
  int found = was->dtype == G2Z_FP16 && was->optimizer.loss_scale_dynamic;
  if (!fp16 || !found || !o->loss_scale_dynamic) {
    state.loss_scale = fp16 ? o->loss_scale : 1.0f;
    state.skipped_at_minimum = 0;
    if (was->dtype != t->config.dtype || (fp16 && o->loss_scale_dynamic)) {
      /* Good steps and overflows at another scale do not count at this scale. */
      state.good_steps = 0;
      state.hysteresis = o->loss_scale_hysteresis;
    }
  }
  if (state.hysteresis > o->loss_scale_hysteresis) state.hysteresis = o->loss_scale_hysteresis;
  const g2z_ops *ops = t->device->ops;
  G2Z_TRY(ops->upload(t->device, t->state, &state, sizeof state));
  G2Z_TRY(ops->synchronize(t->device));
  t->plan->model.vocab_hash = t->model.config.vocab_hash = x->vocab_hash;
  t->enqueued = t->resumed_step = state.step;
  t->resumed_tokens = x->saved.tokens;
  if (t->stop_agreed) __atomic_store_n(&t->stop_requested, 0, __ATOMIC_RELAXED);
  t->stop_agreed = 0; /* a stop belongs to the steps before the load */
  t->failed = G2Z_OK;
  *t->verdict.reported[state.step % 2] = state;
  g2z__record_free(t->comm, &t->record); /* the loaded tuning may change its algorithms */
  return G2Z_OK;
}

G2Z_API g2z_status g2z_checkpoint_read(g2z_services *services, const char *directory,
                                       const g2z_loader *loader, g2z_checkpoint *out) {
  g2z__saved saved;
  int noted = 0;
  memset(out, 0, sizeof *out);
  g2z_status status = g2z__saved_read(services, directory, &saved);
  if (status == G2Z_OK)
    status = g2z_is_there(services, g2z_path_in(directory, "note.json").text, &noted);
  if (status == G2Z_OK && noted) {
    status = g2z__saved_open(services, directory, "note.json", &saved);
    if (status == G2Z_OK) status = g2z__saved_check(services, &saved, "note.json");
  }
  if (status == G2Z_OK) status = g2z__saved_mixture(services, directory, &saved, loader);
  if (status == G2Z_OK) {
    out->step = saved.state.step;
    out->tokens = saved.tokens;
    out->epoch = saved.epoch;
    out->epoch_step = saved.epoch_step;
    if (loader) out->next = g2z__saved_position(&saved, loader);
    if (noted) {
      out->note = saved.text;
      saved.text = NULL;
    }
  }
  g2z__saved_free(services, &saved);
  return status;
}

G2Z_API g2z_status g2z_trainer_load(g2z_trainer *t, const char *directory) {
  g2z_ranks *ranks = t->context->ranks;
  g2z__transfer x;
  g2z__ranks_phase(ranks, "load", t->enqueued, 3600);
  g2z_status status = g2z__transfer_open(&x, t, directory, "");
  if (status == G2Z_OK) status = t->device->ops->synchronize(t->device);
  if (status == G2Z_OK) status = g2z__loading_open(&x, directory);
  if (status == G2Z_OK) status = g2z__saved_mixture(x.services, directory, &x.saved, t->loader);
  status = g2z_ranks_agree(ranks, status);
  if (status == G2Z_OK) {
    if (t->plan->rank == 0) {
      g2z__loading_compare(&x, G2Z_RESUME_WARN);
      g2z__loading_compare(&x, G2Z_RESUME_ROUNDS);
    }
    t->stale = 1; /* even if this rank owns and writes nothing: other ranks write */
    t->buffered[0] = t->buffered[1] = 0;
    status = g2z_ranks_agree(ranks, g2z__loading_fill(&x));
    if (status == G2Z_OK) status = g2z_ranks_agree(ranks, g2z__loading_state(&x));
    t->tuned = 0;
  }
  g2z__transfer_free(&x);
  g2z__ranks_phase(ranks, "step", t->enqueued, 0);
  return status;
}

#ifdef __cplusplus
}
#endif

#if defined(__CUDACC__)
#include "gpt2_zero_kernels.cuh"
#endif
#if defined(__clang__)
#pragma clang diagnostic pop
#elif defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
#endif /* GPT2_ZERO_IMPLEMENTATION */
