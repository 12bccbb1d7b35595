/* gpt2_zero_kernels.cuh: the CUDA op table of gpt2_zero
 *
 * gpt2_zero.h includes this file inside its implementation when nvcc compiles it. No other file
 * includes it. It fills the op table of room 08 for fp16, bf16, tf32 and fp32, on sm_75 and newer,
 * with products in 8 bits on sm_89 and newer; it is tuned on sm_90a. cuBLASLt computes products, or
 * room k42 if that is faster. All other kernels are written here.
 *
 * CONTENTS, in the order of the forward pass
 *   >>k10 base        errors, the backend, memory and order, graphs, spans, finding a GPU
 *   >>k20 numbers     16-byte packs of numbers, reductions over a warp and a block, dropout
 *   >>k21 columns     column sums: per slab of rows first, then over the slabs
 *   >>k22 embedding   wte[token] + wpe[t]; backward through a sort of the tokens
 *   >>k23 layernorm   a warp or a block per row
 *   >>k24 pointwise   GELU, residual + dropout, casts
 *   >>k30 linear      cuBLASLt: products, timed once per shape, and the ops made of them
 *   >>k40 attention   flash attention on packed qkv
 *   >>k41 attention on Hopper  the same with wgmma and TMA, head size 64
 *   >>k42 products on Hopper   with fused epilogues; an alternative to cuBLASLt
 *   >>k43 8 bits elsewhere     on other GPUs: products by cuBLASLt, passes in place of epilogues
 *   >>k50 head        LM head and cross-entropy, a chunk of tokens at a time
 *   >>k60 optimizer   sum of squares, the verdict, AdamW, Muon
 *   >>k80 collectives NCCL, overlapped with computation
 *   >>k90 table       the ops of each dtype; opening and closing a device
 *
 * NAMES    g2z__cpu_x is the oracle, g2z_k_x the kernel, g2z_cuda_x its launcher, an op of the
 *          table. A is the type of activations and parameters, G of gradients.
 * STREAM   All work of a device runs on one stream, in the order of the calls. Only the first use
 *          of a shape allocates scratch, times products and makes the host wait. So run the same
 *          work once before a graph captures it.
 * ORDER    No atomics on numbers. The order of each sum depends only on the shapes, the number
 *          of the GPU's multiprocessors and the tuning table. */

#ifndef G2Z_KERNELS_INCLUDED
#define G2Z_KERNELS_INCLUDED

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <type_traits>
#include <nvtx3/nvToolsExt.h>
#if !defined(G2Z_NO_NCCL) && __has_include(<nccl.h>)
#include <nccl.h>
#define G2Z__NCCL
#endif

/* ===== >>k10 base ========================================================
 * In:  calls of room 08. Out: memory, copies, events, graphs and times of a device.
 * Law: the function that sees a CUDA error turns it into a sentence. Scratch belongs to the op that
 *      runs. */

#define G2Z__EVENTS 8            /* mark() and wait() take a number below this */
#define G2Z__SCRATCH_BLOCKS 64   /* each is 1.5 times the last: no GPU has room for 64 */
#define G2Z__KERNELS 64          /* kernels whose occupancy is remembered */
#define G2Z__SHARED_UNASKED (32 << 10) /* CUDA's default is 48 KiB, static memory included */
#define G2Z__PRODUCTS 192        /* shapes with an algorithm; a training run uses 20 */
#define G2Z__PRODUCTS_LISTED 160 /* shapes that stay, at most; the other places are reused */
#define G2Z__PRODUCT_WORKSPACE ((size_t)32 << 20) /* a larger one is no faster */

struct g2z__lt_key;                 /* room k30: a shape */
struct g2z__lt_product;             /* room k30: a shape and its algorithm */
struct g2z__product_maps;           /* room k42 */
struct g2z__product_data;
typedef void (*g2z__product_kernel)(struct g2z__product_maps, struct g2z__product_data);
struct g2z__post;                   /* room k80 */
struct g2z__waits;
typedef void (*g2z__meet_kernel)(uint32_t *const *flags, int lane, int rank, struct g2z__post post,
                                 struct g2z__waits *waits, volatile uint64_t *met_ns);

/* The occupancy of a kernel, for one block size and one size of dynamic shared memory. */
typedef struct g2z__kernel {
  const void *function;
  size_t shared;
  int threads;
  int blocks;                    /* resident on a multiprocessor */
} g2z__kernel;

typedef struct g2z__cuda {       /* device->backend */
  g2z_ops ops;
  int ordinal;                   /* CUDA's number of the GPU */
  int sms;                       /* multiprocessors */
  int capability;                /* 90: sm_90 */
  int built_for;                 /* architecture of the code that runs here, such as 90 */
  int shared_limit;              /* bytes of shared memory that a block may ask for */
  unsigned early_launch;         /* 1: a kernel may start while the last one ends */
  char gpu[256];
  cudaStream_t stream;
  cudaEvent_t events[G2Z__EVENTS];
  cudaEvent_t begin, end;        /* around a run that tuning times */
  cublasLtHandle_t lt;
  void *lt_workspace;
  struct g2z__lt_product *products; /* [G2Z__PRODUCTS] */
  int product_count, products_listed, product_victim;
  int hopper;                    /* 1: rooms k41 and k42 were compiled for this GPU */
  /* Room k42's kernel for a product that adds an operand or not; NULL: it has none. */
  g2z__product_kernel (*product_kernel_for)(const struct g2z__lt_key *key, int adds);
  g2z__meet_kernel meet;         /* g2z_k_meet; NULL without NCCL */
  const void *probe;             /* g2z_k_probe, see g2z__cuda_fill */
  size_t slice_bytes;            /* see g2z__slice_rows */
  int *taken;                    /* on the GPU: kernels count work items; 0 between kernels */
  decltype(&cuTensorMapEncodeTiled) encode; /* the driver's; NULL until looked up */
  g2z__kernel kernels[G2Z__KERNELS]; /* known occupancies */
  int kernel_count;
  /* Scratch that is too small for newer ops is kept if a graph may still write to it. */
  void *scratch[G2Z__SCRATCH_BLOCKS];
  size_t scratch_bytes[G2Z__SCRATCH_BLOCKS];
  int scratch_count;
  int captured;                  /* 1: a graph was captured since the last scratch was allocated */
} g2z__cuda;

/* The backend, whose GPU becomes current for the calling thread. All ops pass through here, since a
 * program may use several GPUs, and an object may move to another thread. It costs 20 ns. */
static inline g2z__cuda *g2z__cuda_of(const g2z_device *device) {
  g2z__cuda *cuda = (g2z__cuda *)device->backend;
  int current = -1;
  if (cuda && (cudaGetDevice(&current) != cudaSuccess || current != cuda->ordinal))
    cudaSetDevice(cuda->ordinal); /* if it fails, the op's next call reports it */
  return cuda;
}

static g2z_status g2z__cuda_fail(g2z_services *services, cudaError_t error, const char *what) {
  g2z_status status = G2Z_DEVICE;
  const char *remedy = "see nvidia-smi and dmesg";
  (void)cudaGetLastError(); /* else the next launch would report this error again */
  switch (error) {
    case cudaErrorMemoryAllocation:
      status = G2Z_NO_MEMORY;
      remedy = "lower the batch, or free the GPU of other programs";
      break;
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorUnsupportedPtxVersion:
      remedy = "the driver is older than the CUDA toolkit of this build: update it, or build with "
               "an older toolkit";
      break;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      remedy = "the program was not built for this GPU: build with nvcc -arch=native, or make "
               "ARCH=";
      break;
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      remedy = "a kernel failed: compute-sanitizer on the same command names it";
      break;
    case cudaErrorECCUncorrectable:
      remedy = "the GPU's memory is faulty: take another GPU";
      break;
    default: break;
  }
  return g2z_fail(services, status, "%s: %s; %s", what, cudaGetErrorString(error), remedy);
}

#define G2Z__CUDA(device, call)                                              \
  do {                                                                       \
    cudaError_t cuda_error_ = (call);                                        \
    if (cuda_error_ != cudaSuccess)                                          \
      return g2z__cuda_fail((device)->services, cuda_error_, #call);         \
  } while (0)

/* Reports a launch's error: a bad grid, too much shared memory or an earlier kernel's fault. */
static g2z_status g2z__launched(g2z_device *device, const char *kernel) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return G2Z_OK;
  return g2z__cuda_fail(device->services, error, kernel);
}

/* Programmatic dependent launch, on Hopper and newer. Once all blocks of a kernel have started,
 * blocks of the next kernel may start. They wait here until the first kernel has ended. Every
 * kernel that g2z__launch starts calls this in all threads, before any thread returns or touches
 * memory. A kernel without this wait could end before its predecessor, and its successor would
 * read too early. The trigger comes after the wait, so that at most two kernels run at a time. */
static __device__ inline void g2z__k_begin(void) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/* Allows a kernel's blocks `shared` bytes of dynamic shared memory. *blocks becomes the number of
 * blocks that a multiprocessor holds at a time. CUDA is asked once per kernel and size. */
static g2z_status g2z__occupancy(g2z_device *device, const void *function, int threads,
                                 size_t shared, int *blocks) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  for (int i = 0; i < cuda->kernel_count; i++) {
    const g2z__kernel *known = &cuda->kernels[i];
    *blocks = known->blocks;
    if (known->function == function && known->threads == threads && known->shared == shared)
      return G2Z_OK;
  }
  cudaFuncAttributes attributes;
  G2Z__CUDA(device, cudaFuncGetAttributes(&attributes, function));
  int most = max((int)shared, attributes.maxDynamicSharedSizeBytes); /* never reduce it */
  G2Z__CUDA(device, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         most));
  G2Z__CUDA(device, cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads,
                                                                  shared));
  if (cuda->kernel_count == G2Z__KERNELS) return G2Z_OK;
  g2z__kernel kernel = {function, shared, threads, *blocks};
  cuda->kernels[cuda->kernel_count++] = kernel;
  return G2Z_OK;
}

/* Launches a kernel that calls g2z__k_begin() on the device's stream. Also reports the error of an
 * earlier launch. */
template <typename... P, typename... X>
static g2z_status g2z__launch(g2z_device *device, const char *name, void (*kernel)(P...), dim3 grid,
                              dim3 block, size_t shared, X &&...arguments) {
  cudaLaunchAttribute early = {};
  cudaLaunchConfig_t config = {};
  int blocks;
  if (shared > G2Z__SHARED_UNASKED)
    G2Z_TRY(g2z__occupancy(device, (const void *)kernel, (int)(block.x * block.y * block.z),
                           shared, &blocks));
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = g2z__cuda_of(device)->stream;
  config.attrs = &early;
  config.numAttrs = g2z__cuda_of(device)->early_launch;
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error == cudaSuccess) return G2Z_OK;
  return g2z__cuda_fail(device->services, error, name);
}

/* A driver function in its CUDA 12.0 version, or NULL. It is looked up at run time, so that
 * programs need not link libcuda. */
static void *g2z__driver_function(const char *name) {
  void *function = NULL;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) return function;
  (void)cudaGetLastError();
  return NULL;
}

static int g2z__capturing(const g2z_device *device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(g2z__cuda_of(device)->stream, &status);
  return status != cudaStreamCaptureStatusNone;
}

static inline size_t g2z__blocks(size_t items, size_t per_block) {
  return (items + per_block - 1) / per_block;
}

/* Memory for one op. The next op may get the same memory, because its work follows on the same
 * stream. An op asks once, for all that it needs. */
static g2z_status g2z__scratch(g2z_device *device, size_t bytes, void **out) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  int last = cuda->scratch_count - 1;
  if (last >= 0 && cuda->scratch_bytes[last] >= bytes) {
    *out = cuda->scratch[last];
    return G2Z_OK;
  }
  *out = NULL;
  if (g2z__capturing(device))
    return g2z_fail(device->services, G2Z_DEVICE,
                    "%zu bytes of scratch are wanted while a graph is captured: run the same step "
                    "once before the capture", bytes);
  G2Z_ASSERT(cuda->scratch_count < G2Z__SCRATCH_BLOCKS);
  size_t least = 1 << 20;
  if (last >= 0) least = cuda->scratch_bytes[last] + cuda->scratch_bytes[last] / 2;
  bytes = max(bytes, least);
  if (last >= 0 && !cuda->captured) { /* waits for the op that uses it */
    cudaFree(cuda->scratch[last]);
    cuda->scratch_count--;
  }
  void *memory = NULL;
  G2Z__CUDA(device, cudaMalloc(&memory, bytes));
  cuda->captured = 0;
  cuda->scratch[cuda->scratch_count] = memory;
  cuda->scratch_bytes[cuda->scratch_count++] = bytes;
  /* Only compute-sanitizer needs this: its initcheck does not see cuBLASLt's bulk copies on Hopper
   * and would report the memory that they wrote as never written. */
  G2Z__CUDA(device, cudaMemsetAsync(memory, 0, bytes, cuda->stream));
  *out = memory;
  return G2Z_OK;
}

/* ----- memory and order -------------------------------------------------- */

static g2z_status g2z_cuda_allocate(g2z_device *device, size_t bytes, void **out) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  *out = NULL;
  void *memory = NULL;
  cudaError_t error = cudaMalloc(&memory, max(bytes, (size_t)1));
  if (error == cudaErrorMemoryAllocation) {
    size_t free_bytes = 0, total_bytes = 0;
    (void)cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total_bytes);
    return g2z_fail(device->services, G2Z_NO_MEMORY,
                    "%s has no room for %.1f MiB: %.1f of its %.1f MiB are free; lower the batch",
                    cuda->gpu, (double)bytes / 1048576.0,
                    (double)free_bytes / 1048576.0, (double)total_bytes / 1048576.0);
  }
  if (error != cudaSuccess) return g2z__cuda_fail(device->services, error, "cudaMalloc");
  error = cudaMemsetAsync(memory, 0, max(bytes, (size_t)1), cuda->stream);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return g2z__cuda_fail(device->services, error, "cudaMemsetAsync");
  }
  *out = memory;
  return G2Z_OK;
}

static void g2z_cuda_release(g2z_device *device, void *memory) {
  (void)device;
  cudaFree(memory); /* waits for the work that uses it */
}

static g2z_status g2z_cuda_allocate_host(g2z_device *device, size_t bytes, void **out) {
  g2z__cuda_of(device);
  *out = NULL;
  void *memory = NULL;
  cudaError_t error = cudaMallocHost(&memory, max(bytes, (size_t)1));
  if (error != cudaSuccess)
    return g2z__cuda_fail(device->services, error, "pinned host memory cannot be had");
  memset(memory, 0, bytes);
  *out = memory;
  return G2Z_OK;
}

static void g2z_cuda_release_host(g2z_device *device, void *memory) {
  (void)device;
  cudaFreeHost(memory);
}

/* If host_from is not pinned, CUDA has copied it when the call returns. */
static g2z_status g2z_cuda_upload(g2z_device *device, void *to, const void *host_from,
                                  size_t bytes) {
  G2Z__CUDA(device, cudaMemcpyAsync(to, host_from, bytes, cudaMemcpyHostToDevice,
                                    g2z__cuda_of(device)->stream));
  return G2Z_OK;
}

static g2z_status g2z_cuda_download(g2z_device *device, void *host_to, const void *from,
                                    size_t bytes) {
  G2Z__CUDA(device, cudaMemcpyAsync(host_to, from, bytes, cudaMemcpyDeviceToHost,
                                    g2z__cuda_of(device)->stream));
  return G2Z_OK;
}

static g2z_status g2z_cuda_zero(g2z_device *device, void *memory, size_t bytes) {
  G2Z__CUDA(device, cudaMemsetAsync(memory, 0, bytes, g2z__cuda_of(device)->stream));
  return G2Z_OK;
}

/* During capture the event must be external, so that the host can wait for it: an ordinary event
 * would become an edge of the graph. */
static g2z_status g2z_cuda_mark(g2z_device *device, int event) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  G2Z_ASSERT(event >= 0 && event < G2Z__EVENTS);
  unsigned flags = g2z__capturing(device) ? cudaEventRecordExternal : cudaEventRecordDefault;
  G2Z__CUDA(device, cudaEventRecordWithFlags(cuda->events[event], cuda->stream, flags));
  return G2Z_OK;
}

static g2z_status g2z_cuda_wait(g2z_device *device, int event) {
  G2Z_ASSERT(event >= 0 && event < G2Z__EVENTS);
  G2Z__CUDA(device, cudaEventSynchronize(g2z__cuda_of(device)->events[event]));
  return G2Z_OK;
}

static g2z_status g2z_cuda_synchronize(g2z_device *device) {
  G2Z__CUDA(device, cudaStreamSynchronize(g2z__cuda_of(device)->stream));
  return G2Z_OK;
}

/* ----- graphs ------------------------------------------------------------ */

struct g2z_graph {
  cudaGraphExec_t exec;
};

/* Thread-local: calls of other threads, such as a loader's, stay out of the graph. */
static g2z_status g2z_cuda_graph_begin(g2z_device *device) {
  g2z__cuda_of(device)->captured = 1;
  G2Z__CUDA(device, cudaStreamBeginCapture(g2z__cuda_of(device)->stream,
                                           cudaStreamCaptureModeThreadLocal));
  return G2Z_OK;
}

static g2z_status g2z_cuda_graph_end(g2z_device *device, g2z_graph **out) {
  cudaGraph_t recorded = NULL;
  size_t nodes = 0;
  *out = NULL;
  G2Z__CUDA(device, cudaStreamEndCapture(g2z__cuda_of(device)->stream, &recorded));
  cudaError_t error = cudaGraphGetNodes(recorded, NULL, &nodes);
  g2z_status status = G2Z_OK;
  if (error != cudaSuccess)
    status = g2z__cuda_fail(device->services, error, "cudaGraphGetNodes");
  void *memory = NULL;
  if (status == G2Z_OK && nodes)
    status = g2z_allocate(device->services, 1, sizeof(g2z_graph), &memory);
  g2z_graph *graph = (g2z_graph *)memory;
  if (graph) {
    error = cudaGraphInstantiate(&graph->exec, recorded, 0);
    if (error != cudaSuccess) {
      g2z_release(device->services, graph);
      status = g2z__cuda_fail(device->services, error, "cudaGraphInstantiate");
    }
  }
  cudaGraphDestroy(recorded);
  if (status == G2Z_OK) *out = graph;
  return status;
}

static g2z_status g2z_cuda_graph_run(g2z_device *device, const g2z_graph *graph) {
  G2Z__CUDA(device, cudaGraphLaunch(graph->exec, g2z__cuda_of(device)->stream));
  return G2Z_OK;
}

static void g2z_cuda_graph_free(g2z_device *device, g2z_graph *graph) {
  if (!graph) return;
  cudaStreamSynchronize(g2z__cuda_of(device)->stream);
  cudaGraphExecDestroy(graph->exec);
  g2z_release(device->services, graph);
}

/* ----- spans ------------------------------------------------------------- */

/* The events form a ring. The host is at most one step ahead, so an event has long completed when
 * the ring reuses it. If one step has more spans than the ring, the host waits. */
#define G2Z__SPANS 1024

typedef struct g2z__cuda_spans {     /* device->timers->backend */
  cudaEvent_t begin[G2Z__SPANS], end[G2Z__SPANS];
  g2z_span span[G2Z__SPANS];
  int ended[G2Z__SPANS];             /* 1: ended, but not counted yet */
  int next;
  int open[G2Z_SPAN_COUNT];          /* each span's place in the ring; -1: not open */
} g2z__cuda_spans;

static g2z__cuda_spans *g2z__cuda_spans_of(const g2z_device *device) {
  return device->timers ? (g2z__cuda_spans *)device->timers->backend : NULL;
}

static void g2z__cuda_timers_close(g2z_device *device) {
  g2z__cuda_spans *s = g2z__cuda_spans_of(device);
  for (int i = 0; s && i < G2Z__SPANS; i++) {
    if (s->begin[i]) cudaEventDestroy(s->begin[i]);
    if (s->end[i]) cudaEventDestroy(s->end[i]);
  }
  g2z_release(device->services, s);
}

static g2z_status g2z_cuda_timers_open(g2z_device *device) {
  void *memory;
  G2Z_TRY(g2z_allocate(device->services, 1, sizeof(g2z__cuda_spans), &memory));
  g2z__cuda_spans *s = (g2z__cuda_spans *)memory;
  device->timers->backend = s;
  g2z__cuda_of(device); /* events belong to a GPU */
  cudaError_t error = cudaSuccess;
  for (int i = 0; i < G2Z__SPANS && error == cudaSuccess; i++) {
    error = cudaEventCreate(&s->begin[i]);
    if (error == cudaSuccess) error = cudaEventCreate(&s->end[i]);
  }
  for (int i = 0; i < G2Z_SPAN_COUNT; i++) s->open[i] = -1;
  if (error == cudaSuccess) return G2Z_OK;
  g2z__cuda_timers_close(device);
  return g2z__cuda_fail(device->services, error, "cudaEventCreate");
}

/* Waits for the end of one span and counts it. */
static g2z_status g2z__cuda_span_count(const g2z_device *device, int i) {
  g2z__cuda_spans *s = g2z__cuda_spans_of(device);
  float ms = 0;
  if (!s->ended[i]) return G2Z_OK;
  s->ended[i] = 0;
  G2Z__CUDA(device, cudaEventSynchronize(s->end[i]));
  G2Z__CUDA(device, cudaEventElapsedTime(&ms, s->begin[i], s->end[i]));
  g2z__timers_add(device->timers, s->span[i], (double)ms * 1e-3);
  return G2Z_OK;
}

static g2z_status g2z_cuda_timers_settle(g2z_device *device) {
  for (int i = 0; i < G2Z__SPANS && device->timers->status == G2Z_OK; i++)
    device->timers->status = g2z__cuda_span_count(device, i);
  if (device->timers->status == G2Z_OK) return G2Z_OK;
  return g2z_fail(device->services, device->timers->status,
                  "the events that time spans failed: profile without them");
}

static g2z_status g2z__cuda_span_open(const g2z_device *device, g2z_span span,
                                      cudaStream_t stream) {
  g2z__cuda_spans *s = g2z__cuda_spans_of(device);
  /* The next place in the ring that no open span holds. While one span of a backward pass is open,
   * stage 3 can begin and end more collectives than the ring has places. */
  for (int held = 1; held;) {
    s->next = (s->next + 1) % G2Z__SPANS;
    held = 0;
    for (int other = 0; other < G2Z_SPAN_COUNT; other++) held |= s->open[other] == s->next;
  }
  const int i = s->next;
  G2Z_TRY(g2z__cuda_span_count(device, i));
  s->span[i] = span;
  s->open[span] = i;
  G2Z__CUDA(device, cudaEventRecord(s->begin[i], stream));
  return G2Z_OK;
}

static g2z_status g2z__cuda_span_shut(const g2z_device *device, g2z_span span,
                                      cudaStream_t stream) {
  g2z__cuda_spans *s = g2z__cuda_spans_of(device);
  int i = s->open[span];
  if (i < 0) return G2Z_OK;
  s->open[span] = -1;
  G2Z__CUDA(device, cudaEventRecord(s->end[i], stream));
  s->ended[i] = 1;
  return G2Z_OK;
}

static const char *const g2z__span_texts[] = {G2Z_SPAN_LIST(G2Z_LIST_TEXT)};

/* A failure ends the timing, not the training. g2z_cuda_timers_settle reports it. */
static void g2z__cuda_span_begin_on(const g2z_device *device, g2z_span span, cudaStream_t stream) {
  if (g2z__capturing(device)) return;
  nvtxRangePushA(g2z__span_texts[span]);
  if (device->timers && device->timers->status == G2Z_OK)
    device->timers->status = g2z__cuda_span_open(device, span, stream);
}

static void g2z__cuda_span_end_on(const g2z_device *device, g2z_span span, cudaStream_t stream) {
  if (g2z__capturing(device)) return;
  nvtxRangePop();
  if (device->timers && device->timers->status == G2Z_OK)
    device->timers->status = g2z__cuda_span_shut(device, span, stream);
}

static void g2z_cuda_span_begin(const g2z_device *device, g2z_span span) {
  g2z__cuda_span_begin_on(device, span, g2z__cuda_of(device)->stream);
}

static void g2z_cuda_span_end(const g2z_device *device, g2z_span span) {
  g2z__cuda_span_end_on(device, span, g2z__cuda_of(device)->stream);
}

/* ----- finding a GPU ----------------------------------------------------- */

static int g2z__cuda_count(void) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  (void)cudaGetLastError();
  return count;
}

static g2z_status g2z__cuda_find(g2z_services *services, const char *promise) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  int count = 0, driver = 0, runtime = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return G2Z_OK;
  (void)cudaGetLastError();
  cudaDriverGetVersion(&driver); /* 0: no driver; CUDA's error calls it too old */
  cudaRuntimeGetVersion(&runtime);
  if (!driver)
    return g2z_fail(services, G2Z_DEVICE,
                    "there is no NVIDIA driver%s: install it, start a container with --gpus all "
                    "(docker) or --nv (apptainer), or use --device cpu", promise);
  if (error == cudaErrorInsufficientDriver)
    return g2z_fail(services, G2Z_DEVICE,
                    "the NVIDIA driver is for CUDA %d.%d and this program is for CUDA %d.%d%s: "
                    "update the driver, or build with an older toolkit", driver / 1000,
                    driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, promise);
  if (error != cudaSuccess && error != cudaErrorNoDevice)
    return g2z__cuda_fail(services, error, "no GPU can be used");
  if (visible)
    return g2z_fail(services, G2Z_DEVICE,
                    "the NVIDIA driver shows no GPU to this process: CUDA_VISIBLE_DEVICES=%.60s "
                    "hides all; see nvidia-smi -L, or use --device cpu", visible);
  return g2z_fail(services, G2Z_DEVICE,
                  "the NVIDIA driver is here and shows no GPU%s: see nvidia-smi -L, or use "
                  "--device cpu", promise);
}

static int g2z__cuda_current(void) {
  int current = 0;
  cudaGetDevice(&current);
  return current;
}

static g2z_status g2z__cuda_use(g2z_services *services, int gpu) {
  G2Z_TRY(g2z_device_find_gpu(services));
  const cudaError_t error = cudaSetDevice(gpu);
  if (error == cudaSuccess) return G2Z_OK;
  return g2z__cuda_fail(services, error, "this context's GPU cannot be used");
}

/* Makes GPU number local_rank current for the calling thread. `id` becomes its UUID, as nvidia-smi
 * -L prints it. Some launchers show each rank one GPU only, as number 0: hence the modulo. */
static g2z_status g2z__cuda_select(g2z_services *services, int local_rank, char id[64]) {
  cudaDeviceProp properties;
  G2Z_TRY(g2z_device_find_gpu(services));
  const int ordinal = local_rank % g2z__cuda_count();
  cudaError_t error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) return g2z__cuda_fail(services, error, "no GPU for this rank");
  int used = snprintf(id, 64, "GPU");
  for (int i = 0; i < 16; i++)
    used += snprintf(id + used, 64 - (size_t)used,
                     i == 0 || (i >= 4 && i <= 10 && i % 2 == 0) ? "-%02x" : "%02x",
                     (unsigned)(unsigned char)properties.uuid.bytes[i]);
  return G2Z_OK;
}

static g2z_status g2z__cuda_memory(g2z_services *services, size_t *free_bytes,
                                   size_t *total_bytes) {
  cudaError_t error = cudaMemGetInfo(free_bytes, total_bytes);
  if (error == cudaSuccess) return G2Z_OK;
  return g2z__cuda_fail(services, error, "cudaMemGetInfo");
}

/* ===== >>k20 numbers =====================================================
 * In:  memory of A or G. Out: registers of fp32, and back.
 * Law: numbers are stored in A or G and computed in fp32. A row is read in packs of 16 bytes: rows
 *      are aligned to 16 bytes because C is a multiple of 8. */

#define G2Z__WARP 32u
#define G2Z__ALL_LANES 0xffffffffu

/* Numbers of type A in a pack of 16 bytes. */
template <typename A>
static constexpr int g2z__lanes = 16 / (int)sizeof(A);

static __device__ inline float g2z__to_float(float x) { return x; }
static __device__ inline float g2z__to_float(__half x) { return __half2float(x); }
static __device__ inline float g2z__to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/* Two numbers in fp16 as a word, and back. */
static __device__ inline __half2 g2z__halves(uint32_t bits) {
  __half2 pair;
  memcpy(&pair, &bits, sizeof pair);
  return pair;
}
static __device__ inline uint32_t g2z__bits(__half2 pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

/* One instruction converts two neighbouring numbers. */
template <typename A>
struct g2z__pair_of;
template <>
struct g2z__pair_of<__half> {
  static __device__ inline float2 unpack(uint32_t bits) {
    return __half22float2(g2z__halves(bits));
  }
  static __device__ inline uint32_t pack(float low, float high) {
    return g2z__bits(__floats2half2_rn(low, high));
  }
};
template <>
struct g2z__pair_of<__nv_bfloat16> {
  static __device__ inline float2 unpack(uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
  static __device__ inline uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
  }
};

template <typename A>
static __device__ inline void g2z__unpack(float (&out)[g2z__lanes<A>], uint4 pack) {
  const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
  if constexpr (sizeof(A) == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __uint_as_float(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float2 pair = g2z__pair_of<A>::unpack(words[i]);
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
}

/* The first or second four numbers of a pack of eight. */
template <typename A>
static __device__ inline void g2z__unpack_half(float (&out)[4], uint4 pack, int half) {
  const uint2 words = half ? make_uint2(pack.z, pack.w) : make_uint2(pack.x, pack.y);
  const float2 low = g2z__pair_of<A>::unpack(words.x), high = g2z__pair_of<A>::unpack(words.y);
  out[0] = low.x;
  out[1] = low.y;
  out[2] = high.x;
  out[3] = high.y;
}

/* Rounds to nearest even. */
template <typename A>
static __device__ inline uint4 g2z__pack(const float (&in)[g2z__lanes<A>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(A) == 4) words[i] = __float_as_uint(in[i]);
    else words[i] = g2z__pair_of<A>::pack(in[2 * i], in[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Rounds two or eight numbers times a scale to E, as g2z__round_e4m3 and g2z__round_e5m2 do. */
template <typename E>
static constexpr __nv_fp8_interpretation_t g2z__narrow_type =
    std::is_same<E, __nv_fp8_e5m2>::value ? __NV_E5M2 : __NV_E4M3;
template <typename E>
static __device__ inline uint32_t g2z__pair_8(float2 two, float scale) {
  return __nv_cvt_float2_to_fp8x2(make_float2(two.x * scale, two.y * scale), __NV_SATFINITE,
                                  g2z__narrow_type<E>);
}
template <typename E>
static __device__ inline uint2 g2z__pack_8(const float (&in)[8], float scale) {
  uint32_t two[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    two[i] = g2z__pair_8<E>(make_float2(in[2 * i], in[2 * i + 1]), scale);
  return make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
}

/* Rounds a pair or a pack of A to E: activations, scaled, to e4m3; gradients to e5m2. */
template <typename A, typename E>
static __device__ inline uint32_t g2z__pair_narrow(uint32_t pair) {
  constexpr bool GRADIENT = std::is_same<E, __nv_fp8_e5m2>::value;
  if constexpr (GRADIENT && std::is_same<A, __half>::value) {
    __half2_raw raw;
    raw.x = (unsigned short)pair;
    raw.y = (unsigned short)(pair >> 16);
    return __nv_cvt_halfraw2_to_fp8x2(raw, __NV_SATFINITE, __NV_E5M2);
  } else {
    return g2z__pair_8<E>(g2z__pair_of<A>::unpack(pair), GRADIENT ? 1 : G2Z__E4M3_X);
  }
}
template <typename A, typename E>
static __device__ inline uint2 g2z__pack_narrow(uint4 pack) {
  return make_uint2(
      g2z__pair_narrow<A, E>(pack.x) | g2z__pair_narrow<A, E>(pack.y) << 16,
      g2z__pair_narrow<A, E>(pack.z) | g2z__pair_narrow<A, E>(pack.w) << 16);
}

/* Rounds two pairs of fp16, or of fp32, to four numbers of E. */
template <typename E>
static __device__ inline uint32_t g2z__four_8(__half2 low, __half2 high) {
  uint32_t four;
  if constexpr (std::is_same<E, __nv_fp8_e4m3>::value)
    asm("{\n.reg .b16 a, b;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 a, %1;\ncvt.rn.satfinite.e4m3x2.f16x2 b, %2;\n"
        "mov.b32 %0, {a, b};\n}"
        : "=r"(four)
        : "r"(g2z__bits(low)), "r"(g2z__bits(high)));
  else
    asm("{\n.reg .b16 a, b;\n"
        "cvt.rn.satfinite.e5m2x2.f16x2 a, %1;\ncvt.rn.satfinite.e5m2x2.f16x2 b, %2;\n"
        "mov.b32 %0, {a, b};\n}"
        : "=r"(four)
        : "r"(g2z__bits(low)), "r"(g2z__bits(high)));
  return four;
}

template <typename E>
static __device__ inline uint32_t g2z__four_8(float2 low, float2 high) {
  static_assert(std::is_same<E, __nv_fp8_e5m2>::value, "no other type is needed");
  uint32_t four;
  asm("{\n.reg .b16 a, b;\n"
      "cvt.rn.satfinite.e5m2x2.f32 a, %2, %1;\ncvt.rn.satfinite.e5m2x2.f32 b, %4, %3;\n"
      "mov.b32 %0, {a, b};\n}"
      : "=r"(four)
      : "f"(low.x), "f"(low.y), "f"(high.x), "f"(high.y));
  return four;
}

/* Sets bit 7 of each byte that is 448, e4m3's largest number, or NaN. */
static __device__ inline uint32_t g2z__clamped(uint32_t four) {
  return ((four & 0x7f7f7f7fu) + 0x02020202u) & 0x80808080u;
}
/* Adds the number of such bytes in K packs to *counter, if it is not NULL. They are rare: almost
 * every call returns early. Counts are whole numbers, so the order of additions has no effect. */
template <int K>
static __device__ inline void g2z__count_clamped(double *counter, const uint2 (&eight)[K]) {
  uint32_t some = 0;
  int count = 0;
#pragma unroll
  for (int k = 0; k < K; k++) some |= g2z__clamped(eight[k].x) | g2z__clamped(eight[k].y);
  if (!some || !counter) return;
#pragma unroll
  for (int k = 0; k < K; k++)
    count += __popc(g2z__clamped(eight[k].x)) + __popc(g2z__clamped(eight[k].y));
  atomicAdd(counter, (double)count);
}

/* The token in byte 32 block + 4 g + i of an 8-bit column. A lane of room k42's product holds the
 * four tokens of one g and stores them as a word. */
static __device__ inline int g2z__token_at(int block, int g, int i) {
  return block / 4 * 128 + i / 2 * 64 + block % 4 * 16 + i % 2 * 8 + g;
}

/* Eight warps store 32 tokens of 256 columns from `first` on as 8-bit columns. Warp g holds the
 * tokens g2z__token_at(block, g, 0..3); each lane holds 8 columns of them. */
static __device__ inline void g2z__columns_put(uint8_t *columns, const uint2 (&eight)[4], int block,
                                               int first, int n, int C) {
  __shared__ uint32_t words[8][8][36]; /* [column % 8][g][column / 8]: 4 tokens of a column */
  const int g = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  __syncthreads(); /* all threads have read the previous columns */
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      unsigned pick = pair ? 0x7362 : 0x5140;
      uint32_t low = __byte_perm(eight[0].x, eight[1].x, pick);
      uint32_t high = __byte_perm(eight[2].x, eight[3].x, pick);
      if (half) {
        low = __byte_perm(eight[0].y, eight[1].y, pick);
        high = __byte_perm(eight[2].y, eight[3].y, pick);
      }
      words[half * 4 + pair * 2][g][lane] = __byte_perm(low, high, 0x5410);
      words[half * 4 + pair * 2 + 1][g][lane] = __byte_perm(low, high, 0x7632);
    }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < 2; turn++) { /* two lanes write 32 bytes of a column */
    int pack = turn * 16 + lane / 2, part = lane % 2 * 4, at = first + pack * 8 + g;
    uint4 four = make_uint4(words[g][part][pack], words[g][part + 1][pack],
                            words[g][part + 2][pack], words[g][part + 3][pack]);
    if (at < C)
      *reinterpret_cast<uint4 *>(columns + (size_t)at * (size_t)n + block * 32 + part * 4) = four;
  }
}

/* Pack number `index` of memory that is aligned to 16 bytes. */
template <typename A>
static __device__ inline uint4 g2z__get(const A *from, size_t index) {
  return reinterpret_cast<const uint4 *>(from)[index];
}
template <typename A>
static __device__ inline void g2z__put(A *to, size_t index, uint4 pack) {
  reinterpret_cast<uint4 *>(to)[index] = pack;
}
/* The same for data that is not read again soon: the caches keep other data instead. */
template <typename A>
static __device__ inline uint4 g2z__get_once(const A *from, size_t index) {
  return __ldcs(reinterpret_cast<const uint4 *>(from) + index);
}

/* L floats, 4 or 8, at an address that is aligned to 16 bytes. */
template <int L>
static __device__ inline void g2z__get_floats(float (&out)[L], const float *from) {
#pragma unroll
  for (int i = 0; i < L; i += 4) {
    float4 four = *(const float4 *)(from + i);
    out[i] = four.x;
    out[i + 1] = four.y;
    out[i + 2] = four.z;
    out[i + 3] = four.w;
  }
}
template <int L>
static __device__ inline void g2z__put_floats(float *to, const float (&in)[L]) {
#pragma unroll
  for (int i = 0; i < L; i += 4)
    *(float4 *)(to + i) = make_float4(in[i], in[i + 1], in[i + 2], in[i + 3]);
}

/* *to = value, or *to += value, rounded once. */
template <typename G>
static __device__ inline void g2z__put_number(G *to, float value, g2z_write mode) {
  if (mode == G2Z_ACCUMULATE) value = g2z__to_float(*to) + value;
  *to = (G)value;
}

#define G2Z__LOG2E 1.4426950408889634f

/* 2^x, within 2 units of the last place; a result below 2^-126 becomes 0. */
static __device__ inline float g2z__exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/* 1/sqrt(x) of a normal number; its relative error is at most 2^-22.9. */
static __device__ inline float g2z__rsqrt(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/* ----- reductions: the same tree for every launch ------------------------ */

static __device__ inline float g2z__warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(G2Z__ALL_LANES, x, lanes);
  return x;
}

/* The threads that share one row. */
typedef enum g2z__team { G2Z__TEAM_WARP, G2Z__TEAM_BLOCK } g2z__team;

/* The sum over a team; each of its threads gets it. `shared` has room for 32 floats. A block may
 * reuse it only after another barrier. */
template <g2z__team TEAM>
static __device__ inline float g2z__team_sum(float x, float *shared) {
  x = g2z__warp_sum(x);
  if constexpr (TEAM == G2Z__TEAM_BLOCK) {
    if (threadIdx.x % G2Z__WARP == 0) shared[threadIdx.x / G2Z__WARP] = x;
    __syncthreads();
    x = 0;
    for (unsigned warp = 0; warp < blockDim.x / G2Z__WARP; warp++) x += shared[warp];
  }
  return x;
}

/* ----- dropout ----------------------------------------------------------- */

/* Multiplies pack `index` in row `row` of a tensor [N,C] by its dropout factors, if dropout is on.
 * The step is read once, not once per group of four. The draws of DRAWS groups of four are unrolled
 * and run in parallel. A draw's code is long, so the embedding's backward kernels, which unroll a
 * loop of four rows, take 1. */
template <typename A, int DRAWS>
static __device__ inline void g2z__drop_pack(float (&x)[g2z__lanes<A>], const g2z_dropout &dropout,
                                             size_t row, int index, int C) {
  if (!(dropout.probability > 0)) return;
  uint32_t sequence = (uint32_t)(row / (uint32_t)dropout.seq);
  uint32_t t = (uint32_t)(row % (uint32_t)dropout.seq);
  size_t element = (size_t)t * (size_t)C + (size_t)index * g2z__lanes<A>;
  g2z_step_state state;
  state.step = dropout.state->step;
  g2z_dropout local = dropout;
  local.state = &state;
  uint32_t kept = 0; /* bit i: number i */
#pragma unroll(DRAWS)
  for (int i = 0; i < g2z__lanes<A>; i += 4) {
    float factors[4];
    g2z__dropout_group(&local, dropout.first + sequence * dropout.stride,
                       (uint32_t)((element + (size_t)i) / 4), factors);
#pragma unroll
    for (int j = 0; j < 4; j++) kept |= (factors[j] > 0 ? 1u : 0u) << (i + j);
  }
  const float factor = 1.0f / (1.0f - dropout.probability);
#pragma unroll
  for (int i = 0; i < g2z__lanes<A>; i++) x[i] *= kept >> i & 1 ? factor : 0.0f;
}

/* ===== >>k21 columns =====================================================
 * In:  a tensor of N rows. Out: the sums of its columns, in G.
 * Law: the shape alone determines how rows are cut into slabs. Each slab is summed in fp32; then
 *      the slabs' sums are added in order. */

#define G2Z__SLABS 256           /* most slabs of a column sum: enough blocks for any GPU */
#define G2Z__SLAB_ROWS 32        /* fewest rows of a slab: 4 for each of a block's 8 warps */

static int g2z__slab_rows(int N) {
  int rows = (int)g2z__blocks((size_t)N, G2Z__SLABS);
  return (int)g2z__blocks((size_t)rows, G2Z__SLAB_ROWS) * G2Z__SLAB_ROWS;
}
static int g2z__slabs(int N) { return (int)g2z__blocks((size_t)N, (size_t)g2z__slab_rows(N)); }

/* g2z_k_add_slabs: out_k[c] = or += sum over p of partial[p][k][c].
 *   partial      [P,K,C] f32 in   K = gridDim.y
 *   out0..out2   [C] G out        out_k, k < K
 * Launch  grid (ceil(C/32), K), block (32,32)
 * Cost    4PKC bytes: P=132, K=3, C=768 is 1.2 MB, from L2
 * Order   thread row r adds p = r, r+32, ...; then the 32 rows in order */
template <typename G>
static __global__ void __launch_bounds__(1024)
g2z_k_add_slabs(G *out0, G *out1, G *out2, const float *partial, int P, int C, g2z_write mode) {
  constexpr int BATCH = 8;       /* loads in flight: one wait for memory if P <= 256 */
  __shared__ float rows[32][32];
  int c = (int)(blockIdx.x * 32 + threadIdx.x), K = (int)gridDim.y, k = (int)blockIdx.y;
  const float *at = partial + (size_t)k * (size_t)C + (size_t)c;
  float sum = 0;
  g2z__k_begin();
  for (int first = (int)threadIdx.y; c < C && first < P; first += 32 * BATCH) {
    float value[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      int p = first + 32 * j;
      value[j] = p < P ? at[(size_t)p * (size_t)K * (size_t)C] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) sum += value[j];
  }
  rows[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= C) return;
#pragma unroll
  for (int r = 1; r < 32; r++) sum += rows[r][threadIdx.x];
  G *out;
  if (k == 0) out = out0;
  else if (k == 1) out = out1;
  else out = out2;
  g2z__put_number(out + c, sum, mode);
}

/* Launches g2z_k_add_slabs for up to three outputs. */
template <typename G>
static g2z_status g2z__add_slabs(g2z_device *device, const float *partial, int P, int C,
                                 g2z_write mode, G *out0, G *out1 = NULL, G *out2 = NULL) {
  const unsigned outputs = 1 + (out1 != NULL) + (out2 != NULL);
  dim3 grid((unsigned)g2z__blocks((size_t)C, 32), outputs);
  return g2z__launch(device, "g2z_k_add_slabs", g2z_k_add_slabs<G>, grid, dim3(32, 32), 0, out0,
                     out1, out2, partial, P, C, mode);
}

typedef enum g2z__columns { G2Z__COLUMNS_PLAIN, G2Z__COLUMNS_TIMES } g2z__columns;

/* g2z_k_column_sums: partial[slab][c] = sum over the slab's rows of x[row][c].
 * With TIMES: x *= times first, in place, and sums of what was stored.
 *   x        [N,C] A in (or in place)   C % 8 == 0; 16-byte aligned
 *   times    [N,C] A in                 NULL for PLAIN
 *   partial  [slabs,C] f32 out
 * Launch  grid (ceil(C / 32 packs), slabs), block (32,8): a lane keeps one pack of columns
 * Cost    sizeof(A) NC bytes, three times that with TIMES: N=32768, C=3072, fp16 is 604 MB
 * Order   warp w adds rows w, w+8, ... of its slab; then the 8 warps in order
 * Oracle  g2z__cpu_linear_bwd_data with a slope */
template <typename A, g2z__columns COLUMNS>
static __global__ void __launch_bounds__(256)
g2z_k_column_sums(float *partial, A *x, const A *times, int N, int C, int slab_rows) {
  constexpr int L = g2z__lanes<A>, BATCH = 4;
  __shared__ float sums[8][32 * L];
  int pack = (int)(blockIdx.x * 32 + threadIdx.x), packs = C / L;
  int first = (int)blockIdx.y * slab_rows + (int)threadIdx.y;
  int end = min(N, ((int)blockIdx.y + 1) * slab_rows);
  float sum[L] = {};
  g2z__k_begin();
  for (int row = first; pack < packs && row < end; row += 8 * BATCH) {
    uint4 raw[BATCH], factor[BATCH]; /* loaded together: stores in between delay loads */
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      size_t at = (size_t)min(row + 8 * j, end - 1) * (size_t)packs + (size_t)pack;
      raw[j] = g2z__get(x, at);
      if constexpr (COLUMNS == G2Z__COLUMNS_TIMES)
        factor[j] = g2z__get_once(times, at);
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      if (row + 8 * j >= end) break;
      float value[L];
      g2z__unpack<A>(value, raw[j]);
      if constexpr (COLUMNS == G2Z__COLUMNS_TIMES) {
        float by[L];
        g2z__unpack<A>(by, factor[j]);
#pragma unroll
        for (int i = 0; i < L; i++) value[i] *= by[i];
        uint4 stored = g2z__pack<A>(value);
        g2z__put(x, (size_t)(row + 8 * j) * (size_t)packs + (size_t)pack, stored);
        g2z__unpack<A>(value, stored);
      }
#pragma unroll
      for (int i = 0; i < L; i++) sum[i] += value[i];
    }
  }
#pragma unroll
  for (int i = 0; i < L; i++) sums[threadIdx.y][threadIdx.x * L + (unsigned)i] = sum[i];
  __syncthreads();
  for (unsigned i = threadIdx.y * 32 + threadIdx.x; i < 32 * L; i += 256) {
    int c = (int)(blockIdx.x * 32 * L + i);
    if (c >= C) continue;
    float total = 0;
    for (int warp = 0; warp < 8; warp++) total += sums[warp][i];
    partial[(size_t)blockIdx.y * (size_t)C + (size_t)c] = total;
  }
}

/* The first stage alone: `partial` gets g2z__slabs(N) rows of C floats. */
template <typename A, g2z__columns COLUMNS>
static g2z_status g2z__column_slabs(g2z_device *device, float *partial, A *x, const A *times,
                                    int N, int C) {
  dim3 grid((unsigned)g2z__blocks((size_t)(C / g2z__lanes<A>), 32), (unsigned)g2z__slabs(N));
  return g2z__launch(device, "g2z_k_column_sums", g2z_k_column_sums<A, COLUMNS>, grid, dim3(32, 8),
                     0, partial, x, times, N, C, g2z__slab_rows(N));
}

/* g2z_k_narrow_columns: x's columns in E. With e5m2 also its rows, before the columns.
 *   to  e4m3: C columns of N; e5m2: N rows of C, then the columns; out
 *   x   [N,C] A in   N % 128 == 0, C % 16 == 0; with e5m2 it may be NULL: `to` has the rows
 * Launch  32 rows and 256 columns per block of 256 threads
 * Cost    3 NC bytes in e4m3: N=32768, C=768 is 75 MB; 4 NC in e5m2, 2 NC without x
 * Oracle  g2z__cpu_e4m3, g2z__cpu_e5m2; test cuda_attention */
template <typename A, typename E>
static __global__ void __launch_bounds__(256)
g2z_k_narrow_columns(uint8_t *to, const A *x, int N, int C) {
  constexpr bool ROWS = std::is_same<E, __nv_fp8_e5m2>::value;
  const int g = (int)threadIdx.x / 32, column = (int)blockIdx.y * 256 + (int)threadIdx.x % 32 * 8;
  uint2 eight[4] = {};
  g2z__k_begin();
#pragma unroll
  for (int i = 0; i < 4 && column < C; i++) {
    size_t at = (size_t)g2z__token_at((int)blockIdx.x, g, i) * (size_t)C + (size_t)column;
    uint2 *row = reinterpret_cast<uint2 *>(to + at);
    if (!ROWS) eight[i] = g2z__pack_narrow<A, E>(g2z__get(x, at / 8));
    else {
      if (x) *row = g2z__pack_narrow<A, E>(g2z__get(x, at / 8));
      eight[i] = *row;
    }
  }
  if (ROWS) to += (size_t)N * (size_t)C;
  g2z__columns_put(to, eight, (int)blockIdx.x, (int)blockIdx.y * 256, N, C);
}
template <typename E, typename A>
static g2z_status g2z__narrow_columns(g2z_device *device, void *to, const A *x, int N, int C) {
  G2Z_ASSERT(N % 128 == 0 && C % 16 == 0);
  return g2z__launch(device, "g2z_k_narrow_columns", g2z_k_narrow_columns<A, E>,
                     dim3((unsigned)(N / 32), (unsigned)g2z__blocks((size_t)C, 256)), 256, 0,
                     (uint8_t *)to, x, N, C);
}

/* ===== >>k22 embedding ===================================================
 * In:  tokens[B,T]. Out: rows of the residual stream; backward, the gradients of wte and wpe.
 * Law: backward sorts the positions by token, stably, so that each token's rows are added in the
 *      order of the batch: no atomics, and no token waits for another. */

/* g2z_k_embed_fwd: out = dropout(wte[token] + wpe[t])
 *   tokens   [N] i32 in
 *   positions  [N] i32 in: each t; NULL: t = row % T
 *   wte,wpe  [Vp,C] [T,C] A in
 *   out      [N,C] A out
 * Launch  a warp per row, block (32,8)
 * Cost    3 sizeof(A) NC bytes; wte's frequent rows and wpe come from L2
 * Oracle  g2z__cpu_embed_fwd */
template <typename A>
static __global__ void g2z_k_embed_fwd(A *out, const int32_t *tokens, const int32_t *positions,
                                       const A *wte, const A *wpe, g2z_dropout dropout, int N,
                                       int T, int C) {
  constexpr int L = g2z__lanes<A>;
  int row = (int)(blockIdx.x * blockDim.y + threadIdx.y), packs = C / L;
  g2z__k_begin();
  if (row >= N) return;
  const A *word = wte + (size_t)tokens[row] * (size_t)C;
  const A *where = wpe + (size_t)(positions ? positions[row] : row % T) * (size_t)C;
#pragma unroll 4
  for (int pack = (int)threadIdx.x; pack < packs; pack += 32) {
    float sum[L], position[L];
    g2z__unpack<A>(sum, g2z__get(word, (size_t)pack));
    g2z__unpack<A>(position, g2z__get(where, (size_t)pack));
#pragma unroll
    for (int i = 0; i < L; i++) sum[i] += position[i];
    g2z__drop_pack<A, 2>(sum, dropout, (size_t)row, pack, C);
    g2z__put(out + (size_t)row * (size_t)C, (size_t)pack, g2z__pack<A>(sum));
  }
}

template <typename A>
static g2z_status g2z_cuda_embed_fwd(g2z_device *device, const g2z_embed_fwd *op) {
  const int B = op->B, T = op->T, C = op->C;
  G2Z_ASSERT(g2z__embed_fwd_whole(op));
  int N = B * T;
  return g2z__launch(device, "g2z_k_embed_fwd", g2z_k_embed_fwd<A>,
                     (unsigned)g2z__blocks((size_t)N, 8), dim3(32, 8), 0, (A *)op->out, op->tokens,
                     (const int32_t *)NULL, (const A *)op->wte, (const A *)op->wpe, op->dropout, N,
                     T, C);
}

template <typename A>
static g2z_status g2z_cuda_embed_next(g2z_device *device, const g2z_embed_next *op) {
  const int B = op->B, C = op->C;
  G2Z_ASSERT(g2z__embed_next_whole(op));
  return g2z__launch(device, "g2z_k_embed_fwd", g2z_k_embed_fwd<A>,
                     (unsigned)g2z__blocks((size_t)B, 8), dim3(32, 8), 0, (A *)op->out, op->tokens,
                     op->positions, (const A *)op->wte, (const A *)op->wpe, g2z_dropout(), B, 1,
                     C);
}

/* g2z_k_embed_bwd_wpe: dwpe[t] = or += sum over b of dout[b,t].
 *   dout  [B,T,C] A in
 *   dwpe  [T,C] G out
 * Launch  a thread per pack of dwpe, blocks of 128
 * Cost    sizeof(A) BTC bytes
 * Order   b = 0, 1, ...
 * Oracle  g2z__cpu_embed_bwd */
template <typename A, typename G>
static __global__ void g2z_k_embed_bwd_wpe(G *dwpe, const A *dout, g2z_dropout dropout,
                                           g2z_write mode, int B, int T, int C) {
  constexpr int L = g2z__lanes<A>, GROUP = 4;
  size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x, packs = (size_t)(C / L);
  g2z__k_begin();
  if (at >= (size_t)T * packs) return;
  size_t t = at / packs, pack = at % packs;
  float sum[L] = {};
  for (int group = 0; group < B; group += GROUP) {
    uint4 raw[GROUP];
#pragma unroll
    for (int j = 0; j < GROUP; j++) { /* all loads of a group are in flight together */
      const size_t row = (size_t)min(group + j, B - 1) * (size_t)T + t;
      raw[j] = g2z__get(dout, row * packs + pack);
    }
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      if (group + j >= B) break;
      float value[L];
      g2z__unpack<A>(value, raw[j]);
      g2z__drop_pack<A, 1>(value, dropout, (size_t)(group + j) * (size_t)T + t, (int)pack, C);
#pragma unroll
      for (int i = 0; i < L; i++) sum[i] += value[i];
    }
  }
#pragma unroll
  for (int i = 0; i < L; i++) g2z__put_number(dwpe + at * L + i, sum[i], mode);
}

/* Sorted positions that one warp adds up: few in a small batch, to keep the GPU busy. */
static int g2z__run_rows(const g2z_device *device, int N, int packs) {
  size_t warps = (size_t)g2z__cuda_of(device)->sms * 16;
  size_t rows = (size_t)N * g2z__blocks((size_t)packs, 32) / warps;
  return (int)min(max(rows, (size_t)8), (size_t)32);
}

/* The parts of one launch, passed by value, because the caller's list is in host memory. */
#define G2Z__ROW_PARTS 16
typedef struct g2z__row_parts {
  g2z_row_part part[G2Z__ROW_PARTS];
  int count;
} g2z__row_parts;

/* g2z_k_embed_bwd_runs: dwte[token] += the sum of each run of equal tokens.
 *   sorted  [N] i32 in           tokens in ascending order
 *   order   [N] i32 in           the position of each in the batch
 *   dout    [N,C] A in
 *   dwte    D in place           parts of dwte[Vp,C]: adds runs inside a chunk of run_rows tokens.
 *                                D is fp32, or a type with as many numbers per pack as A
 *   heads   [chunks,C] f32 out   a chunk's part of a run that began in an earlier chunk
 *   tails   [chunks,C] f32 out   a chunk's part of a run that begins in it and continues after it
 * Launch  grid (ceil(chunks/8), ceil(packs/32), parts), block (32,8): a warp per chunk, 32 packs
 *         and part
 * Cost    sizeof(A) NC bytes + 2 sizeof(D) C for each distinct token in the parts. Many warps share
 *         a frequent token
 * Order   the order of the batch
 * Oracle  g2z__cpu_embed_bwd, g2z__cpu_embed_add */
template <typename A, typename D>
static __global__ void __launch_bounds__(256, 2)
g2z_k_embed_bwd_runs(D *dwte, g2z__row_parts parts, float *heads, float *tails,
                     const int32_t *sorted, const int32_t *order, const A *dout,
                     g2z_dropout dropout, int N, int C, int run_rows) {
  constexpr int L = g2z__lanes<A>, GROUP = 4;
  const size_t low = parts.part[blockIdx.z].first, count = parts.part[blockIdx.z].elements;
  dwte += parts.part[blockIdx.z].at;
  int chunk = (int)(blockIdx.x * 8 + threadIdx.y), first = chunk * run_rows;
  int pack = (int)(blockIdx.y * 32 + threadIdx.x), packs = C / L;
  g2z__k_begin();
  if (first >= N || pack >= packs) return;
  int end = min(N, first + run_rows), token = sorted[first];
  size_t column = (size_t)pack * L, width = (size_t)C;
  if (((size_t)sorted[end - 1] + 1) * width <= low || (size_t)token * width >= low + count) return;
  bool began_before = first > 0 && sorted[first - 1] == token;
  float sum[L] = {}, before[L] = {}; /* the run's sum; dwte's old row */
  auto inside = [=](int key) {
    return (size_t)key * width + column - low < count;
  };
  auto write = [&](bool goes_on) { /* called at the end of a run or of the chunk */
    if (!inside(token)) return;
    if (began_before) g2z__put_floats<L>(heads + (size_t)chunk * width + column, sum);
    else if (goes_on) g2z__put_floats<L>(tails + (size_t)chunk * width + column, sum);
    else {
#pragma unroll
      for (int i = 0; i < L; i++) sum[i] += before[i];
      D *to = dwte + ((size_t)token * width + column - low);
      if constexpr (sizeof(D) == 4) g2z__put_floats<L>(to, sum);
      else g2z__put(to, 0, g2z__pack<D>(sum));
    }
  };
  for (int group = first; group < end; group += GROUP) {
    uint4 raw[GROUP];
    float row_before[GROUP][L] = {};
    int keys[GROUP], rows[GROUP];
#pragma unroll
    for (int j = 0; j < GROUP; j++) { /* all loads of a group are in flight together */
      int i = min(group + j, end - 1);
      keys[j] = sorted[i];
      rows[j] = order[i];
      raw[j] = make_uint4(0, 0, 0, 0);
      if (!inside(keys[j])) continue;
      raw[j] = g2z__get(dout, (size_t)rows[j] * (size_t)packs + (size_t)pack);
      const D *from = dwte + ((size_t)keys[j] * width + column - low);
      if constexpr (sizeof(D) == 4) g2z__get_floats<L>(row_before[j], from);
      else g2z__unpack<D>(row_before[j], g2z__get(from, 0));
    }
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      if (group + j >= end) break;
      if (keys[j] != token) {
        write(false);
#pragma unroll
        for (int i = 0; i < L; i++) sum[i] = 0;
        began_before = false;
        token = keys[j];
      }
      float value[L];
      g2z__unpack<A>(value, raw[j]);
      g2z__drop_pack<A, 1>(value, dropout, (size_t)rows[j], pack, C);
#pragma unroll
      for (int i = 0; i < L; i++) {
        sum[i] += value[i];
        before[i] = row_before[j][i];
      }
    }
  }
  write(end < N && sorted[end] == token);
}

/* g2z_k_embed_bwd_seams: dwte[token] += tail + heads, for the runs that cross chunks.
 * Launch  grid (ceil(chunks/8), ceil(C/32), parts), block (32,8): a warp per chunk and part. Only
 *         warps whose chunk's last run begins in it and continues in the next add anything
 * Order   the order of the chunks */
template <typename D>
static __global__ void g2z_k_embed_bwd_seams(D *dwte, g2z__row_parts parts, const float *heads,
                                             const float *tails, const int32_t *sorted, int N,
                                             int C, int run_rows) {
  const size_t low = parts.part[blockIdx.z].first, count = parts.part[blockIdx.z].elements;
  dwte += parts.part[blockIdx.z].at;
  int chunk = (int)(blockIdx.x * 8 + threadIdx.y), first = chunk * run_rows;
  int end = first + run_rows, c = (int)(blockIdx.y * 32 + threadIdx.x);
  g2z__k_begin();
  if (end >= N) return; /* all lanes of a warp return together, here and below */
  int token = sorted[end - 1];
  if (sorted[end] != token) return;
  if (first > 0 && sorted[first - 1] == token) return; /* the run began earlier */
  int last = chunk + 1; /* the last chunk that the run reaches, found 32 chunks at a time */
  for (;; last += 32) {
    int64_t at = (int64_t)(last + 1 + (int)threadIdx.x) * run_rows;
    unsigned ends = __ballot_sync(G2Z__ALL_LANES, at >= N || sorted[at < N ? at : 0] != token);
    if (ends) {
      last += __ffs((int)ends) - 1;
      break;
    }
  }
  size_t at = (size_t)token * (size_t)C + (size_t)c - low;
  if (c >= C || at >= count) return;
  float sum = tails[(size_t)chunk * (size_t)C + (size_t)c];
#pragma unroll 8
  for (int next = chunk + 1; next <= last; next++)
    sum += heads[(size_t)next * (size_t)C + (size_t)c];
  g2z__put_number(dwte + at, sum, G2Z_ACCUMULATE);
}

/* Tokens are sorted in two launches: one sorts segments, the other merges them. CUB's radix sort
 * would take six launches, and its headers 3 s of nvcc's time. */
#define G2Z__RANKED_TOKENS 8192  /* per segment; the last segment may be shorter */

/* g2z_k_embed_rank: sorts each segment. A token's place in its segment is the number of the
 * segment's tokens that sort before it.
 *   tokens         [N] i32 in
 *   sorted, order  [N] i32 out   the tokens of each segment in ascending order; their positions
 * Launch  grid ceil(N/32), block (32,16): a lane per token, and 1/16 of its segment per warp
 * Cost    N min(N, 8192) comparisons; a warp makes 128 of them with 9 instructions. N=32768: 268
 *         million, 48 us on an H200 */
static __global__ void __launch_bounds__(512)
g2z_k_embed_rank(int32_t *sorted, int32_t *order, const int32_t *tokens, int N) {
  __shared__ alignas(16) uint32_t others[16][32];
  __shared__ int ranks[16][32];
  int own = (int)blockIdx.x * 32, i = own + (int)threadIdx.x, rank = 0;
  const int segment = own / G2Z__RANKED_TOKENS * G2Z__RANKED_TOKENS;
  const int end_of_segment = min(N, segment + G2Z__RANKED_TOKENS);
  g2z__k_begin();
  uint32_t token = i < N ? (uint32_t)tokens[i] : 0;
  for (int first = segment + (int)threadIdx.y * 32; first < end_of_segment; first += 512) {
    int j = first + (int)threadIdx.x; /* an empty lane's key sorts last */
    others[threadIdx.y][threadIdx.x] = j < N ? (uint32_t)tokens[j] : 0xffffffffu;
    __syncwarp();
    uint32_t end = token + (first < own); /* equal tokens count if they are earlier */
#pragma unroll
    for (int lane = 0; lane < 32; lane += 4) {
      uint4 four = *(const uint4 *)&others[threadIdx.y][lane];
      rank += (four.x < end) + (four.y < end) + (four.z < end) + (four.w < end);
    }
    __syncwarp();
  }
  if (threadIdx.y == blockIdx.x % 16) /* this warp read the block's own tokens */
    rank += __popc(__match_any_sync(G2Z__ALL_LANES, token) & ((1u << threadIdx.x) - 1));
  ranks[threadIdx.y][threadIdx.x] = rank;
  __syncthreads();
  if (threadIdx.y != 0 || i >= N) return;
#pragma unroll
  for (int warp = 1; warp < 16; warp++) rank += ranks[warp][threadIdx.x];
  sorted[segment + rank] = (int32_t)token;
  order[segment + rank] = i;
}

/* g2z_k_embed_merge: merges the sorted segments. A token's place is its place in its segment plus,
 * for each other segment, the number of tokens there that sort before it.
 *   tokens, positions  [N] i32 in   as g2z_k_embed_rank writes them
 *   sorted, order      [N] i32 out
 * Launch  a thread per token, blocks of 128
 * Cost    14 reads from L2 per token and other segment: N=32768 takes 9 us on an H200 */
static __global__ void g2z_k_embed_merge(int32_t *sorted, int32_t *order, const int32_t *tokens,
                                         const int32_t *positions, int N) {
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  const int own = i / G2Z__RANKED_TOKENS * G2Z__RANKED_TOKENS;
  g2z__k_begin();
  if (i >= N) return;
  const int32_t token = tokens[i];
  int rank = i - own;
  for (int first = 0; first < N; first += G2Z__RANKED_TOKENS) {
    if (first == own) continue;
    const int count = min(G2Z__RANKED_TOKENS, N - first);
    const int32_t end = token + (first < own); /* equal tokens count if they are earlier */
    int before = 0;
#pragma unroll
    for (int step = G2Z__RANKED_TOKENS; step > 0; step /= 2)
      if (before + step <= count && tokens[first + before + step - 1] < end) before += step;
    rank += before;
  }
  sorted[rank] = token;
  order[rank] = positions[i];
}

/* Scratch of embed_bwd and embed_add. */
typedef struct g2z__embed_scratch {
  int32_t *segments;               /* [2 N] the tokens of each sorted segment; their positions */
  int32_t *sorted, *order;         /* [N] all tokens in ascending order; their positions */
  float *heads, *tails;            /* [chunks,C] of g2z_k_embed_bwd_runs */
  int run_rows;                    /* tokens per chunk: 8 to 32 of `sorted` */
} g2z__embed_scratch;

static g2z_status g2z__embed_sort(g2z_device *device, const g2z__embed_scratch *scratch,
                                  const int32_t *tokens, int N) {
  const int whole = N <= G2Z__RANKED_TOKENS; /* one segment */
  int32_t *sorted = scratch->segments, *order = sorted + N;
  if (whole) {
    sorted = scratch->sorted;
    order = scratch->order;
  }
  G2Z_TRY(g2z__launch(device, "g2z_k_embed_rank", g2z_k_embed_rank,
                      (unsigned)g2z__blocks((size_t)N, 32), dim3(32, 16), 0, sorted, order, tokens,
                      N));
  if (whole) return G2Z_OK;
  return g2z__launch(device, "g2z_k_embed_merge", g2z_k_embed_merge,
                     (unsigned)g2z__blocks((size_t)N, 128), 128, 0, scratch->sorted,
                     scratch->order, (const int32_t *)sorted, (const int32_t *)order, N);
}

/* Adds the gradients of equal tokens: first within chunks, then across them. */
template <typename A, typename D>
static g2z_status g2z__embed_runs(g2z_device *device, D *dwte, const g2z__row_parts *parts,
                                  const g2z__embed_scratch *scratch, const A *dout,
                                  g2z_dropout dropout, int N, int C) {
  const int run_rows = scratch->run_rows;
  unsigned packs = (unsigned)g2z__blocks((size_t)(C / g2z__lanes<A>), 32);
  unsigned blocks = (unsigned)g2z__blocks((size_t)N, 8 * (size_t)run_rows); /* of 8 chunks */
  dim3 runs(blocks, packs, (unsigned)parts->count);
  dim3 seams(blocks, (unsigned)g2z__blocks((size_t)C, 32), (unsigned)parts->count);
  G2Z_TRY(g2z__launch(device, "g2z_k_embed_bwd_runs", g2z_k_embed_bwd_runs<A, D>, runs,
                      dim3(32, 8), 0, dwte, *parts, scratch->heads, scratch->tails,
                      scratch->sorted, scratch->order, dout, dropout, N, C, run_rows));
  return g2z__launch(device, "g2z_k_embed_bwd_seams", g2z_k_embed_bwd_seams<D>, seams, dim3(32, 8),
                     0, dwte, *parts, scratch->heads, scratch->tails, scratch->sorted, N, C,
                     run_rows);
}

template <typename A, typename G>
static g2z_status g2z_cuda_embed_bwd(g2z_device *device, const g2z_embed_bwd *op) {
  const int T = op->T, C = op->C, N = op->B * T, packs = C / g2z__lanes<A>;
  const g2z__row_parts whole = {{{0, SIZE_MAX, 0}}, 1};
  const A *dout = (const A *)op->dout;
  G2Z_ASSERT(g2z__embed_bwd_whole(op));
  g2z__embed_scratch scratch;
  memset(&scratch, 0, sizeof scratch);
  G2Z_TRY(g2z__launch(device, "g2z_k_embed_bwd_wpe", g2z_k_embed_bwd_wpe<A, G>,
                      (unsigned)g2z__blocks((size_t)T * (size_t)packs, 128), 128, 0,
                      (G *)op->dwpe, dout, op->dropout, op->mode, op->B, T, C));
  if (!op->dwte) return G2Z_OK;
  scratch.run_rows = g2z__run_rows(device, N, packs);
  size_t list = g2z__align((size_t)N * sizeof(int32_t));
  size_t chunks = g2z__blocks((size_t)N, (size_t)scratch.run_rows);
  size_t buffer = g2z__align(chunks * (size_t)C * sizeof(float));
  void *memory;
  G2Z_TRY(g2z__scratch(device, 4 * list + 2 * buffer, &memory));
  char *lists = (char *)memory, *buffers = lists + 4 * list;
  scratch.sorted = (int32_t *)lists;
  scratch.order = (int32_t *)(lists + list);
  scratch.segments = (int32_t *)(lists + 2 * list);
  scratch.heads = (float *)buffers;
  scratch.tails = (float *)(buffers + buffer);
  G2Z_TRY(g2z__embed_sort(device, &scratch, op->tokens, N));
  return g2z__embed_runs<A, float>(device, op->dwte, &whole, &scratch, dout, op->dropout, N, C);
}

static g2z_status g2z_cuda_embed_order(g2z_device *device, int32_t *order, const int32_t *tokens,
                                       int N) {
  g2z__embed_scratch scratch;
  void *memory;
  memset(&scratch, 0, sizeof scratch);
  G2Z_TRY(g2z__scratch(device, 2 * (size_t)N * sizeof(int32_t), &memory));
  scratch.segments = (int32_t *)memory;
  scratch.sorted = order;
  scratch.order = order + N;
  return g2z__embed_sort(device, &scratch, tokens, N);
}

template <typename A, typename G>
static g2z_status g2z_cuda_embed_add(g2z_device *device, const g2z_embed_add *op) {
  const int N = op->N, C = op->C;
  G2Z_ASSERT(g2z__embed_add_whole(op));
  g2z__embed_scratch scratch;
  void *memory;
  if (op->count == 0) return G2Z_OK;
  memset(&scratch, 0, sizeof scratch);
  scratch.run_rows = g2z__run_rows(device, N, C / g2z__lanes<A>);
  size_t chunks = g2z__blocks((size_t)N, (size_t)scratch.run_rows);
  size_t buffer = g2z__align(chunks * (size_t)C * sizeof(float));
  G2Z_TRY(g2z__scratch(device, 2 * buffer, &memory));
  scratch.heads = (float *)memory;
  scratch.tails = (float *)((char *)memory + buffer);
  scratch.sorted = (int32_t *)op->order; /* only read from here on */
  scratch.order = (int32_t *)op->order + N;
  for (int first = 0; first < op->count; first += G2Z__ROW_PARTS) {
    g2z__row_parts some;
    some.count = min(op->count - first, G2Z__ROW_PARTS);
    memcpy(some.part, op->parts + first, (size_t)some.count * sizeof *op->parts);
    G2Z_TRY((g2z__embed_runs<A, G>(device, (G *)op->grads, &some, &scratch, (const A *)op->rows,
                                   g2z_dropout(), N, C)));
  }
  return G2Z_OK;
}

/* ===== >>k23 layernorm ===================================================
 * In:  rows x[N,C]. Out: normalized rows; backward, the gradients of rows, weight and bias.
 * Law: a row is read from memory once, and is at most 16 KiB wide. In forward a warp holds a row of
 *      up to 4 KiB. A block holds a wider row, or the caches do if y is only in 8 bits. In backward
 *      a thread holds one or two packs of a row, and column sums in registers. Ba et al. 2016,
 *      arXiv:1607.06450. */

#define G2Z__ROW_THREADS 512     /* threads per row at most */
#define G2Z__ROW_WARP_PACKS 8    /* packs per lane at most, if a warp holds the row */

/* Sets *threads, the threads that hold a row (whole warps), and *K, the packs per thread. *K is 1
 * if half of G2Z__ROW_THREADS suffice: so few threads have the registers that backward needs. */
static g2z_status g2z__row_threads(g2z_device *device, int packs, int *threads, int *K) {
  *K = packs <= G2Z__ROW_THREADS / 2 ? 1 : 2;
  *threads = (int)g2z__blocks((size_t)packs, (size_t)(32 * *K)) * 32;
  if (*threads <= G2Z__ROW_THREADS) return G2Z_OK;
  return g2z_fail(device->services, G2Z_UNSUPPORTED,
                  "rows of %zu bytes are wider than the %d that the LayerNorm kernels take: use "
                  "fewer channels, or a 16-bit dtype", (size_t)packs * 16,
                  G2Z__ROW_THREADS * 2 * 16);
}

/* g2z_k_layernorm_fwd: y = (x - mean) * rstd * w + b
 *   x     [N,C] A in    C % 8 == 0; 16-byte aligned
 *   w,b   [C]   A in
 *   y     [N,C] A out
 *   narrow  rows of y in e4m3, out, or NULL
 *   mean  [N]   f32 out for backward
 *   rstd  [N]   f32 out 1/sqrt(variance + eps)
 *   clamped     counts the numbers in narrow; may be NULL
 * Math    f32, two-pass variance
 * Launch  warps: grid ceil(N/8), block (32,8); blocks: grid N, block (threads,1)
 * Cost    2 sizeof(A) NC bytes: N=32768, C=768, fp16 is 100.7 MB
 * Oracle  g2z__cpu_layernorm_fwd */
template <typename A, int K, g2z__team TEAM>
static __global__ void __launch_bounds__(TEAM == G2Z__TEAM_WARP ? 256 : G2Z__ROW_THREADS)
g2z_k_layernorm_fwd(A *y, uint8_t *narrow, float *mean, float *rstd, const A *x, const A *w,
                    const A *b, int N, int C, double *clamped) {
  constexpr int L = g2z__lanes<A>;
  __shared__ float shared[2][32];
  int row = (int)(blockIdx.x * blockDim.y + threadIdx.y), packs = C / L;
  g2z__k_begin();
  if (row >= N) return; /* all threads of a team return */
  size_t first = (size_t)row * (size_t)packs;
  uint4 raw[K];
  float sum = 0, squares = 0;
#pragma unroll
  for (int k = 0; k < K; k++) {
    int pack = k * (int)blockDim.x + (int)threadIdx.x;
    raw[k] = pack < packs ? g2z__get(x, first + (size_t)pack) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int k = 0; k < K; k++) {
    float value[L];
    g2z__unpack<A>(value, raw[k]);
#pragma unroll
    for (int i = 0; i < L; i++) sum += value[i];
  }
  float center = __fdividef(g2z__team_sum<TEAM>(sum, shared[0]), (float)C);
#pragma unroll
  for (int k = 0; k < K; k++) {
    if (k * (int)blockDim.x + (int)threadIdx.x >= packs) continue; /* padding, not data */
    float value[L];
    g2z__unpack<A>(value, raw[k]);
#pragma unroll
    for (int i = 0; i < L; i++) squares += (value[i] - center) * (value[i] - center);
  }
  float variance = __fdividef(g2z__team_sum<TEAM>(squares, shared[1]), (float)C);
  float scale = g2z__rsqrt(variance + G2Z_LAYERNORM_EPS);
#pragma unroll
  for (int k = 0; k < K; k++) {
    int pack = k * (int)blockDim.x + (int)threadIdx.x;
    if (pack >= packs) continue;
    float value[L], weight[L], bias[L];
    g2z__unpack<A>(value, raw[k]);
    g2z__unpack<A>(weight, g2z__get(w, (size_t)pack));
    g2z__unpack<A>(bias, g2z__get(b, (size_t)pack));
#pragma unroll
    for (int i = 0; i < L; i++) value[i] = (value[i] - center) * scale * weight[i] + bias[i];
    uint4 rounded = g2z__pack<A>(value);
    g2z__put(y, first + (size_t)pack, rounded);
    if constexpr (sizeof(A) == 2)
      if (narrow) {
        const uint2 eight = g2z__pack_narrow<A, __nv_fp8_e4m3>(rounded);
        reinterpret_cast<uint2 *>(narrow + (size_t)row * G2Z_NARROW_ROW(C))[pack] = eight;
        g2z__count_clamped(clamped, {eight});
      }
  }
  if (threadIdx.x != 0) return;
  mean[row] = center;
  rstd[row] = scale;
}

/* g2z_k_layernorm_eight: g2z_k_layernorm_fwd with y only in e4m3, as rows and as columns.
 *   y  N rows of C, then C columns of N, out   N % 128 == 0, C % 16 == 0
 * Launch  32 tokens per block of 256 threads. A warp has 4 rows. A lane holds K packs of each row;
 *         with K = 0 it reads them three times, twice from the caches
 * Cost    4 NC bytes: N=32768, C=768 is 101 MB
 * Oracle  g2z__cpu_layernorm_fwd; test cuda_layernorm */
template <typename A, int K>
static __global__ void __launch_bounds__(256, K == 3 ? 3 : 1) /* GPT-2 124M: three blocks */
g2z_k_layernorm_eight(uint8_t *y, float *mean, float *rstd, const A *x, const A *w, const A *b,
                      int C, double *clamped) {
  const int N = (int)gridDim.x * 32, block = (int)blockIdx.x, packs = C / 8;
  const int turns = K ? K : (packs + 31) / 32;
  const int g = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  uint4 raw[4][K ? K : 1];
  float center[4] = {}, scale[4] = {};
  g2z__k_begin();
  const unsigned first = (unsigned)(g2z__token_at(block, g, 0) * packs);
  auto place = [&](int i, int pack) { /* of a pack of this warp's i-th row */
    return (size_t)(first + (unsigned)(g2z__token_at(0, 0, i) * packs + pack));
  };
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (k * 32 + lane < packs) raw[i][k] = g2z__get(x, place(i, k * 32 + lane));
  auto each = [&](auto use) { /* use(i, a number of this lane's i-th row) */
#pragma unroll
    for (int k = 0; k < turns; k++) {
      const int pack = k * 32 + lane;
      if (pack >= packs) break;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float value[8];
        g2z__unpack<A>(value, K ? raw[i][k] : g2z__get(x, place(i, pack)));
#pragma unroll
        for (int j = 0; j < 8; j++) use(i, value[j]);
      }
    }
  };
  each([&](int i, float value) { center[i] += value; });
#pragma unroll
  for (int i = 0; i < 4; i++) center[i] = __fdividef(g2z__warp_sum(center[i]), (float)C);
  each([&](int i, float value) { scale[i] += (value - center[i]) * (value - center[i]); });
#pragma unroll
  for (int i = 0; i < 4; i++) {
    scale[i] = g2z__rsqrt(__fdividef(g2z__warp_sum(scale[i]), (float)C) + G2Z_LAYERNORM_EPS);
    if (lane != 0) continue;
    mean[g2z__token_at(block, g, i)] = center[i];
    rstd[g2z__token_at(block, g, i)] = scale[i];
  }
#pragma unroll
  for (int k = 0; k < turns; k++) {
    uint2 eight[4] = {};
    const int pack = k * 32 + lane;
    if (pack < packs) {
      const uint4 weights = g2z__get(w, (size_t)pack), biases = g2z__get(b, (size_t)pack);
      uint4 row[4];
#pragma unroll
      for (int i = 0; i < 4; i++) row[i] = K ? raw[i][k] : g2z__get(x, place(i, pack));
#pragma unroll
      for (int half = 0; half < 2; half++) { /* four columns at a time: registers are scarce */
        float weight[4], bias[4], value[4];
        g2z__unpack_half<A>(weight, weights, half);
        g2z__unpack_half<A>(bias, biases, half);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          g2z__unpack_half<A>(value, row[i], half);
#pragma unroll
          for (int j = 0; j < 4; j++)
            value[j] = (value[j] - center[i]) * scale[i] * weight[j] + bias[j];
          const uint32_t four =
              g2z__pair_narrow<A, __nv_fp8_e4m3>(g2z__pair_of<A>::pack(value[0], value[1])) |
              g2z__pair_narrow<A, __nv_fp8_e4m3>(g2z__pair_of<A>::pack(value[2], value[3])) << 16;
          if (half) eight[i].y = four;
          else eight[i].x = four;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) reinterpret_cast<uint2 *>(y)[place(i, pack)] = eight[i];
    }
    g2z__count_clamped(clamped, eight);
    g2z__columns_put(y + (size_t)N * (size_t)C, eight, block, k * 256, N, C);
  }
}

template <typename A>
static g2z_status g2z_cuda_layernorm_fwd(g2z_device *device, const g2z_layernorm_fwd *op) {
  const int N = op->N, C = op->C;
  G2Z_ASSERT(g2z__layernorm_fwd_whole(op));
  if constexpr (std::is_same<A, __half>::value)
    if (op->narrow && op->narrow == op->y) {
      auto eight = g2z_k_layernorm_eight<A, 0>;
#define G2Z__HELD(K) g2z_k_layernorm_eight<A, K>
      /* A kernel for each K would take more of nvcc's time; spare packs are not read. */
      static const decltype(eight) held[] = {G2Z__HELD(2), G2Z__HELD(2), G2Z__HELD(3),
                                             G2Z__HELD(4), G2Z__HELD(6), G2Z__HELD(6),
                                             G2Z__HELD(8), G2Z__HELD(8)};
#undef G2Z__HELD
      const int turns = (C / 8 + 31) / 32;
      if (turns <= G2Z__ROW_WARP_PACKS) eight = held[turns - 1];
      G2Z_ASSERT(N % 128 == 0 && C % 16 == 0);
      return g2z__launch(device, "g2z_k_layernorm_eight", eight, (unsigned)(N / 32), 256, 0,
                         (uint8_t *)op->y, op->mean, op->rstd, (const A *)op->x,
                         (const A *)op->w, (const A *)op->b, C, device->clamped_inputs);
    }
  auto kernel = g2z_k_layernorm_fwd<A, 2, G2Z__TEAM_BLOCK>;
#define G2Z__WARPS(A, K) g2z_k_layernorm_fwd<A, K, G2Z__TEAM_WARP>
  static const decltype(kernel) warps[] = {
      G2Z__WARPS(A, 2), G2Z__WARPS(A, 2), G2Z__WARPS(A, 3), G2Z__WARPS(A, 4),
      G2Z__WARPS(A, 6), G2Z__WARPS(A, 6), G2Z__WARPS(A, 8), G2Z__WARPS(A, 8)};
#undef G2Z__WARPS
  static_assert(sizeof warps / sizeof *warps == G2Z__ROW_WARP_PACKS, "a kernel for each width");
  int packs = C / g2z__lanes<A>, threads = 32, K = (packs + 31) / 32;
  unsigned rows = 1; /* per block */
  if (K <= G2Z__ROW_WARP_PACKS) {
    kernel = warps[K - 1];
    rows = 8;
  } else {
    G2Z_TRY(g2z__row_threads(device, packs, &threads, &K));
    G2Z_ASSERT(K == 2);
  }
  return g2z__launch(device, "g2z_k_layernorm_fwd", kernel,
                     (unsigned)g2z__blocks((size_t)N, rows), dim3((unsigned)threads, rows), 0,
                     (A *)op->y, (uint8_t *)op->narrow, op->mean, op->rstd, (const A *)op->x,
                     (const A *)op->w, (const A *)op->b, N, C, device->clamped_inputs);
}

/* Prefetched rows: [stages][3][K][threads of the block] packs of dy, x and dres. A thread reads
 * only what it copied itself, so no barrier is needed. */
extern __shared__ uint4 g2z__row_ring[];

/* Four stages keep enough bytes in flight for Hopper's memory bandwidth. Wide rows have two stages.
 * They fit on every GPU except sm_75: its 64 KiB take rows of up to 10 KiB. */
template <int K>
static constexpr int g2z__row_stages = K == 1 ? 4 : 2;
/* A team has at most this many warps. */
template <int K>
static constexpr int g2z__row_warps = K == 1 ? 8 : 16;
/* Threads of a block, in up to 8 teams: as many as a multiprocessor has registers for. Few large
 * blocks leave few partial sums for the second stage to read. */
template <int K>
static constexpr int g2z__row_block = K == 1 ? 768 : 512;
#define G2Z__ROW_TEAMS 8

/* This thread's place in the ring. */
template <int K>
struct g2z__row_slots {
  uint4 *first;
  int threads;                   /* of the block */
  __device__ inline g2z__row_slots(void)
      : first(g2z__row_ring + threadIdx.y * blockDim.x + threadIdx.x),
        threads((int)(blockDim.x * blockDim.y)) {}
  __device__ inline uint4 *at(int stage, int tensor, int k) const {
    return first + ((stage * 3 + tensor) * K + k) * threads;
  }
};

template <typename A, int K>
static __device__ inline void g2z__row_fetch(const g2z_layernorm_bwd &op,
                                             const g2z__row_slots<K> &slots, int row, int stage) {
  int packs = op.C / g2z__lanes<A>;
  if (row >= op.N) return;
#pragma unroll
  for (int k = 0; k < K; k++) {
    int pack = k * (int)blockDim.x + (int)threadIdx.x;
    if (pack >= packs) continue;
    size_t at = (size_t)row * (unsigned)packs + (unsigned)pack;
    __pipeline_memcpy_async(slots.at(stage, 0, k), (const uint4 *)op.dy + at, 16);
    __pipeline_memcpy_async(slots.at(stage, 1, k), (const uint4 *)op.x + at, 16);
    if (op.res_mode == G2Z_ACCUMULATE)
      __pipeline_memcpy_async(slots.at(stage, 2, k), (const uint4 *)op.dres + at, 16);
  }
}

/* Adds up two values over a team; each of its threads gets both sums. The team has its own barrier;
 * barrier 0 belongs to the block. `parts` has a place for each warp of the widest team; places
 * without a warp are 0. */
template <int WARPS>
static __device__ inline float2 g2z__team_sums(float2 x, float2 *parts) {
  x.x = g2z__warp_sum(x.x);
  x.y = g2z__warp_sum(x.y);
  if (threadIdx.x % G2Z__WARP == 0) parts[threadIdx.x / G2Z__WARP] = x;
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
  x = make_float2(0, 0);
#pragma unroll
  for (int i = 0; i < WARPS; i += 2) {
    float4 two = *reinterpret_cast<const float4 *>(parts + i);
    x.x += two.x + two.z;
    x.y += two.y + two.w;
  }
  return x;
}

/* partial[tensor][c] = the sum over a block's teams, in their order. The ring is large enough: the
 * 3 x K x L floats of a thread take at most the bytes of its packs in two stages. */
template <int K, int L>
static __device__ inline void g2z__layernorm_partial(float *partial, const float (&sums)[3][K][L],
                                                     int tensors, int C) {
  float *shared = (float *)g2z__row_ring; /* [teams][3][width] */
  int width = K * (int)blockDim.x * L, thread = (int)(threadIdx.y * blockDim.x + threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 3 * K; j++)
    g2z__put_floats<L>(shared + ((int)threadIdx.y * 3 + j / K) * width +
                           (j % K * (int)blockDim.x + (int)threadIdx.x) * L, sums[j / K][j % K]);
  __syncthreads();
  for (int at = 4 * thread; at < tensors * C; at += 4 * (int)(blockDim.x * blockDim.y)) {
    const float *from = shared + at / C * width + at % C;
    float total[4] = {};
    for (int team = 0; team < (int)blockDim.y; team++, from += 3 * width) {
      float value[4];
      g2z__get_floats<4>(value, from);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += value[i];
    }
    g2z__put_floats<4>(partial + at, total);
  }
}

/* A thread's part of its current row, and its sums over all its rows. */
template <typename A, int K>
struct g2z__row_work {
  static constexpr int L = g2z__lanes<A>;
  enum { DW, DB, DBIAS };
  float mean, rstd;
  float hat[K][L], g[K][L];      /* xhat; dy w */
  float sums[3][K][L];           /* of columns: DW, DB, DBIAS */
  uint4 w;                       /* if K is 1; wide rows have no registers for it */
};

/* First half of a row: xhat, g, the sums of g and g xhat, and the columns of dw and db. */
template <typename A, int K>
static __device__ inline float2 g2z__layernorm_bwd_sums(g2z__row_work<A, K> &work,
                                                        const g2z__row_slots<K> &slots, int stage,
                                                        const g2z_layernorm_bwd &op) {
  constexpr int L = g2z__lanes<A>;
  float2 sums = make_float2(0, 0);
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int pack = k * (int)blockDim.x + (int)threadIdx.x;
    if (pack >= op.C / L) continue;
    float x[L], dy[L], w[L];
    g2z__unpack<A>(dy, *slots.at(stage, 0, k));
    g2z__unpack<A>(x, *slots.at(stage, 1, k));
    if constexpr (K == 1) {
      uint4 packed = work.w; /* unpacked for each row: w's floats would not stay in registers */
      asm volatile("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
      g2z__unpack<A>(w, packed);
    } else {
      g2z__unpack<A>(w, g2z__get((const A *)op.w, (size_t)pack));
    }
#pragma unroll
    for (int i = 0; i < L; i++) {
      work.hat[k][i] = (x[i] - work.mean) * work.rstd;
      work.g[k][i] = dy[i] * w[i];
      sums.x += work.g[k][i];
      sums.y += work.g[k][i] * work.hat[k][i];
      work.sums[work.DW][k][i] += dy[i] * work.hat[k][i];
      work.sums[work.DB][k][i] += dy[i];
    }
  }
  return sums;
}

/* Second half of a row: dres, dropped, narrow, and the columns of dbias. */
template <typename A, int K>
static __device__ inline void g2z__layernorm_bwd_dres(g2z__row_work<A, K> &work,
                                                      const g2z__row_slots<K> &slots, int stage,
                                                      const g2z_layernorm_bwd &op, int row,
                                                      float2 means) {
  constexpr int L = g2z__lanes<A>;
  int packs = op.C / L;
#pragma unroll
  for (int k = 0; k < K; k++) {
    int pack = k * (int)blockDim.x + (int)threadIdx.x;
    if (pack >= packs) continue;
    size_t at = (size_t)row * (unsigned)packs + (unsigned)pack;
    float out[L] = {};
    if (op.res_mode == G2Z_ACCUMULATE) g2z__unpack<A>(out, *slots.at(stage, 2, k));
#pragma unroll
    for (int i = 0; i < L; i++)
      out[i] += work.rstd * (work.g[k][i] - means.x - work.hat[k][i] * means.y);
    uint4 stored = g2z__pack<A>(out);
    g2z__put((A *)op.dres, at, stored);
    if (op.dropped && op.dropout.probability > 0) {
      g2z__unpack<A>(out, stored);
      g2z__drop_pack<A, 2>(out, op.dropout, (size_t)row, pack, op.C);
      stored = g2z__pack<A>(out);
      if (op.dropped != op.narrow) g2z__put((A *)op.dropped, at, stored);
    }
    if constexpr (std::is_same<A, __half>::value) /* e5m2 has fp16's range */
      if (op.narrow)
        reinterpret_cast<uint2 *>(op.narrow)[at] = g2z__pack_narrow<A, __nv_fp8_e5m2>(stored);
    g2z__unpack<A>(out, stored);
#pragma unroll
    for (int i = 0; i < L; i++) work.sums[work.DBIAS][k][i] += out[i];
  }
}

/* g2z_k_layernorm_bwd: dres = or += dx, and each block's column sums for dw, db and dbias. The
 * tensors are op's, except `partial`.
 *   dy, x      [N,C] A in
 *   w          [C]   A in
 *   mean,rstd  [N]   f32 in
 *   dres       [N,C] A out or in place (res_mode)
 *   dropped    [N,C] A out           dropout'(dres); only with dropout
 *   narrow     rows of dropped or dres in e5m2, out, or NULL. Needs fp16: with another A it is not
 *              written, and nothing is stored if it is also `dropped`. May be `dropped`
 *   partial    [blocks,2 or 3,C] f32 out
 * Math    g = dy w; dx = rstd (g - mean(g) - xhat mean(g xhat)); dw += dy xhat; db += dy;
 *         dbias += the stored dres (with dropout: dropped)
 * Launch  persistent: block (threads, teams); a team takes a row, a thread K packs of it. The next
 *         rows are prefetched to shared memory. No team waits for another
 * Cost    3 sizeof(A) NC bytes, 4 with +=: N=32768, C=768, fp16, += is 201 MB
 * Order   a team adds its rows in ascending order; then the teams in order
 * Oracle  g2z__cpu_layernorm_bwd */
template <typename A, int K>
static __global__ void
__launch_bounds__(g2z__row_block<K>, 1)
g2z_k_layernorm_bwd(g2z_layernorm_bwd op, float *partial) {
  constexpr int L = g2z__lanes<A>, STAGES = g2z__row_stages<K>, WARPS = g2z__row_warps<K>;
  __shared__ alignas(16) float2 shared[2][G2Z__ROW_TEAMS * WARPS]; /* double buffer */
  for (unsigned i = threadIdx.y * blockDim.x + threadIdx.x; i < G2Z__ROW_TEAMS * WARPS;
       i += blockDim.x * blockDim.y)
    shared[0][i] = shared[1][i] = make_float2(0, 0);
  __syncthreads();
  g2z__k_begin();
  const g2z__row_slots<K> slots;
  const int packs = op.C / L, stride = (int)(gridDim.x * blockDim.y);
  const float inverse = 1.0f / (float)op.C;
  int row = (int)(blockIdx.x * blockDim.y + threadIdx.y), stage = 0, half = 0;
  g2z__row_work<A, K> work = {};
  if (K == 1 && (int)threadIdx.x < packs) work.w = g2z__get((const A *)op.w, threadIdx.x);
#pragma unroll
  for (int ahead = 0; ahead < STAGES - 1; ahead++) {
    g2z__row_fetch<A, K>(op, slots, row + ahead * stride, ahead);
    __pipeline_commit();
  }
  if (row < op.N) {
    work.mean = op.mean[row];
    work.rstd = op.rstd[row];
  }
  /* A team without a row in the last round still waits at its barrier: racecheck assumes that all
   * threads of a block meet equally often, and would report races after the block's barriers. */
  for (; row - (int)threadIdx.y < op.N; row += stride) {
    g2z__row_fetch<A, K>(op, slots, row + (STAGES - 1) * stride,
                         stage == 0 ? STAGES - 1 : stage - 1);
    __pipeline_commit();
    float next_mean = 0, next_rstd = 0;
    if (row < op.N - stride) { /* mean and rstd are prefetched, too */
      next_mean = op.mean[row + stride];
      next_rstd = op.rstd[row + stride];
    }
    __pipeline_wait_prior(STAGES - 1);
    /* Rows alternate between the halves of `shared`: a warp may still read the last row's half. */
    float2 means = make_float2(0, 0);
    if (row < op.N) means = g2z__layernorm_bwd_sums<A, K>(work, slots, stage, op);
    means = g2z__team_sums<WARPS>(means, shared[half] + threadIdx.y * WARPS);
    means.x *= inverse;
    means.y *= inverse;
    if (row < op.N) g2z__layernorm_bwd_dres<A, K>(work, slots, stage, op, row, means);
    work.mean = next_mean;
    work.rstd = next_rstd;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    half ^= 1;
  }
  int tensors = 2 + (op.dbias != NULL);
  partial += (size_t)blockIdx.x * (size_t)tensors * (size_t)op.C;
  g2z__layernorm_partial<K, L>(partial, work.sums, tensors, op.C);
}

/* Launches as many blocks as run at once. Shared memory and N limit the teams of a block. Each team
 * has `threads` threads. */
template <typename A, typename G, int K>
static g2z_status g2z__layernorm_bwd_run(g2z_device *device, const g2z_layernorm_bwd *op,
                                         int threads) {
  const g2z__cuda *cuda = g2z__cuda_of(device);
  const size_t N = (size_t)op->N, C = (size_t)op->C;
  auto kernel = g2z_k_layernorm_bwd<A, K>;
  size_t ring = (size_t)(g2z__row_stages<K> * 3 * K * threads) * sizeof(uint4);
  size_t own = sizeof(float2) * 2 * G2Z__ROW_TEAMS * g2z__row_warps<K>; /* the kernel's `shared` */
  int room = (int)(((size_t)cuda->shared_limit - own) / ring), blocks = 0;
  int rows = (int)g2z__blocks(N, (size_t)cuda->sms); /* per multiprocessor */
  int teams = min(g2z__row_block<K> / threads, G2Z__ROW_TEAMS);
  teams = min(teams, min(rows, max(room, 1))); /* if 1 does not fit, CUDA reports it */
  ring *= (size_t)teams;
  G2Z_TRY(g2z__occupancy(device, (const void *)kernel, threads * teams, ring, &blocks));
  blocks = (int)min((size_t)(max(blocks, 1) * cuda->sms), g2z__blocks(N, (size_t)teams));
  const size_t tensors = 2 + (op->dbias != NULL);
  void *memory;
  G2Z_TRY(g2z__scratch(device, (size_t)blocks * tensors * C * sizeof(float), &memory));
  float *partial = (float *)memory;
  G2Z_TRY(g2z__launch(device, "g2z_k_layernorm_bwd", kernel, (unsigned)blocks,
                      dim3((unsigned)threads, (unsigned)teams), ring, *op, partial));
  G2Z_TRY(g2z__add_slabs<G>(device, partial, blocks, op->C, op->mode, (G *)op->dw, (G *)op->db,
                            (G *)op->dbias));
  if constexpr (std::is_same<A, __half>::value) /* the rows are still in L2, at least in part */
    if (op->narrow)
      return g2z__narrow_columns<__nv_fp8_e5m2>(device, op->narrow, (const A *)NULL, op->N, op->C);
  return G2Z_OK;
}

template <typename A, typename G>
static g2z_status g2z_cuda_layernorm_bwd(g2z_device *device, const g2z_layernorm_bwd *op) {
  int threads, K;
  G2Z_ASSERT(g2z__layernorm_bwd_whole(op));
  G2Z_TRY(g2z__row_threads(device, op->C / g2z__lanes<A>, &threads, &K));
  if (K == 1) return g2z__layernorm_bwd_run<A, G, 1>(device, op, threads);
  return g2z__layernorm_bwd_run<A, G, 2>(device, op, threads);
}

/* ===== >>k24 pointwise ===================================================
 * In:  tensors. Out: tensors of the same shape.
 * Law: one launch; each thread takes packs of 16 bytes; no element depends on another. */

/* GELU in its tanh form is 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). It equals x
 * times a gate, the logistic function of 2u. The sum 1 + tanh u would lose the digits of small
 * results; the gate keeps them. The slope is gate + x gate (2u)' (1 - gate). Hendrycks and Gimpel
 * 2016, arXiv:1606.08415. */
static __device__ inline float g2z__k_gelu(float x, float &slope) {
  const float rate = 1.5957691216057308f, power = -rate * G2Z__LOG2E;
  float square = x * x;
  /* exp(-2u) as a power of 2. If it overflows to infinity, the gate is 0. */
  float gate = __fdividef(1.0f, 1.0f + g2z__exp2(x * (power * 0.044715f * square + power)));
  x *= gate;
  slope = gate + x * ((rate * 3.0f * 0.044715f * square + rate) * (1.0f - gate));
  return x;
}

/* g2z_k_gelu_fwd: y = gelu(x); the slope overwrites x
 *   x  [n] A in place  n % 8 == 0; 16-byte aligned
 *   y  [n] A out
 * Launch  a thread per pack, blocks of 256
 * Cost    3 sizeof(A) n bytes: 32768 x 3072 in fp16 is 604 MB
 * Oracle  g2z__cpu_linear_fwd with a slope */
template <typename A>
static __global__ void g2z_k_gelu_fwd(A *y, A *x, size_t packs) {
  constexpr int L = g2z__lanes<A>;
  size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  g2z__k_begin();
  if (at >= packs) return;
  float value[L], slope[L];
  g2z__unpack<A>(value, g2z__get(x, at));
#pragma unroll
  for (int i = 0; i < L; i++) value[i] = g2z__k_gelu(value[i], slope[i]);
  g2z__put(y, at, g2z__pack<A>(value));
  g2z__put(x, at, g2z__pack<A>(slope));
}

/* g2z_k_residual_dropout: y = residual + dropout(x)
 *   x, residual  [N,C] A in
 *   y            [N,C] A out   may be x or residual
 * Launch  a warp per row, block (32,8)
 * Cost    3 sizeof(A) NC bytes
 * Oracle  g2z__cpu_linear_fwd with residual and dropout */
template <typename A>
static __global__ void g2z_k_residual_dropout(A *y, const A *x, const A *residual,
                                              g2z_dropout dropout, int N, int C) {
  constexpr int L = g2z__lanes<A>;
  int row = (int)(blockIdx.x * blockDim.y + threadIdx.y), packs = C / L;
  g2z__k_begin();
  if (row >= N) return;
  for (int pack = (int)threadIdx.x; pack < packs; pack += 32) {
    size_t at = (size_t)row * (size_t)packs + (size_t)pack;
    float value[L], stream[L];
    g2z__unpack<A>(value, g2z__get(x, at));
    g2z__unpack<A>(stream, g2z__get(residual, at));
    g2z__drop_pack<A, 2>(value, dropout, (size_t)row, pack, C);
#pragma unroll
    for (int i = 0; i < L; i++) value[i] += stream[i];
    g2z__put(y, at, g2z__pack<A>(value));
  }
}

/* g2z_k_cast: to[i] = round(from[i])
 *   from  [n] f32 in
 *   to    [n] A out
 * Launch  a thread per pack of `to`; unaligned memory and a partial pack go element by element
 * Cost    (4 + sizeof(A)) n bytes
 * Oracle  g2z__cpu_cast_act, g2z__cpu_cast_grad */
template <typename A>
static __global__ void g2z_k_cast(A *to, const float *from, size_t n, int aligned) {
  constexpr int L = g2z__lanes<A>;
  size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * L;
  g2z__k_begin();
  if (!aligned || first + L > n) {
    for (size_t i = first; i < min(n, first + L); i++) to[i] = (A)from[i];
    return;
  }
  float value[L];
#pragma unroll
  for (int i = 0; i < L; i += 4) {
    float4 four = __ldcs(reinterpret_cast<const float4 *>(from + first + i));
    value[i] = four.x;
    value[i + 1] = four.y;
    value[i + 2] = four.z;
    value[i + 3] = four.w;
  }
  g2z__put(to, first / L, g2z__pack<A>(value));
}

template <typename A>
static g2z_status g2z_cuda_cast(g2z_device *device, void *to, const float *from, size_t n) {
  if (n == 0) return G2Z_OK;
  int aligned = ((uintptr_t)to | (uintptr_t)from) % 16 == 0;
  size_t threads = g2z__blocks(n, (size_t)g2z__lanes<A>);
  return g2z__launch(device, "g2z_k_cast", g2z_k_cast<A>, (unsigned)g2z__blocks(threads, 256), 256,
                     0, (A *)to, from, n, aligned);
}

/* ===== >>k30 linear ======================================================
 * In:  a product's shape, types and epilogue. Out: the product, by an algorithm chosen once.
 * Law: products accumulate in fp32 (in 8 bits see room k42). Split sums stay in fp32, too: schemes
 *      that round partial sums to the output's type are excluded. The algorithm determines the
 *      order of addition, so it is chosen once per shape and saved (ops->tuning, ->tuning_read).
 *
 * cuBLASLt is column-major: our row-major y[N,O] is its y'[O,N]. So row-major products exchange
 * their operands: y' = w' x'. The fastest of its algorithms and room k42's kernel is taken. */

#define G2Z__PRODUCT_ALIGNMENT 16 /* of every operand, in bytes; cuBLASLt relies on it */
#define G2Z__CANDIDATES 24       /* algorithms that are timed per shape, at most */
#define G2Z__TIMED_FLOP 1.6e11   /* per timed round of small products, at most */
#define G2Z__LARGE_FLOP 3e10     /* products of this size or more are timed longer */
#define G2Z__LARGE_CALLS 8
#define G2Z__LARGE_MS 30

typedef struct g2z__lt_key {  /* D[m,n] = op(A)[m,k] op(B)[k,n], column-major, all int32 */
  int32_t m, n, k;
  int32_t transpose_a, transpose_b;
  int32_t ld_a, ld_b, ld_d;
  int32_t type, type_d;            /* cudaDataType_t of A and B; of C and D. 8 bits: narrow_key();
                                    * or G2Z__E4M3_TWICE */
  int32_t compute;                 /* cublasComputeType_t */
  int32_t epilogue;                /* cublasLtEpilogue_t or g2z__epilogue */
  int32_t batched;                 /* 1: a batch, whose size the operands hold */
} g2z__lt_key;
#define G2Z__KEY_FIELDS ((int)(sizeof(g2z__lt_key) / sizeof(int32_t)))

/* The type of a key whose A and B are e4m3 in cuBLASLt, too. */
#define G2Z__E4M3_TWICE (1 << 16)

/* Epilogues that only room k42's kernel has. */
typedef enum g2z__epilogue {
  G2Z__EPILOGUE_GELU = 1 << 16,    /* after the bias; its slope goes to `slope` */
  G2Z__EPILOGUE_TIMES_SLOPE,       /* D times `slope`; column sums per slab go to `sums` */
  G2Z__EPILOGUE_SOFTMAX,           /* exponentials of D, described by `rows`; A, B may be e4m3 */
  /* Results in 8 bits, as rows and columns, replace D. N % 128 == 0: */
  G2Z__EPILOGUE_SOFTMAX_8,         /* e5m2 */
  G2Z__EPILOGUE_GELU_8,            /* e4m3 */
  G2Z__EPILOGUE_TIMES_SLOPE_8      /* e5m2 */
} g2z__epilogue;
static int g2z__epilogue_is_ours(const g2z__lt_key *key) {
  return key->epilogue >= G2Z__EPILOGUE_GELU;
}

/* The implementation of a product, and its name in a tuning table. */
typedef enum g2z__way { G2Z__WAY_CUBLASLT, G2Z__WAY_HOPPER, G2Z__WAYS } g2z__way;
static const char *const g2z__way_names[G2Z__WAYS] = {"cublaslt", "hopper"};

typedef struct g2z__lt_product {
  g2z__lt_key key;
  g2z__way way;                    /* if HOPPER, algo holds cuBLASLt's best */
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t a, b, d;
  cublasLtMatmulAlgo_t algo;
  float us;                        /* as timed; 0: not timed */
  int listed;                      /* 1: stays in the tuning table. 0: chosen without timing, as
                                    * for a score; a training chooses again */
} g2z__lt_product;

/* Arguments and results of a product whose rows become a softmax. Exponents have base 2. */
typedef struct g2z__softmax_rows {
  const float *reference;          /* [n] subtracted from a row's exponents, not from `target` */
  const float *unit;               /* [n] with e4m3: factor from a row's sums to exponents */
  float2 *parts;                   /* [tiles across,n] out: a row's sum, largest exponent */
  const int32_t *targets;          /* [n] a column of each row; -1: column 0 */
  float *target;                   /* [n] out: the exponents of these columns */
  const int4 *again;               /* [tiles down] tiles whose int4 is 0 are skipped; or NULL */
  int words;                       /* real columns; in the padding, exponentials are 0 */
} g2z__softmax_rows;

/* Products of one shape at equal distances, in elements; factors of the product and of C. */
typedef struct g2z__lt_batch {
  int count;
  size_t apart_a, apart_b, apart_d;
  float alpha, beta;
} g2z__lt_batch;

typedef struct g2z__lt_operands {
  void *d;
  const void *a, *b;
  const void *c;                   /* added, of D's layout: NULL, D itself or another */
  const void *bias;                /* [m], with an epilogue that has one */
  /* Below, GELU, TIMES_SLOPE and SOFTMAX include their forms in 8 bits. */
  void *slope;                     /* [m,n] of D's layout, with GELU and TIMES_SLOPE */
  float *sums;                     /* [slabs,m] with TIMES_SLOPE */
  g2z__softmax_rows rows;          /* with SOFTMAX */
  void *narrow;                    /* with GELU: D in e4m3, too; or NULL */
  float factor;                    /* of the product */
  const float *scale;              /* e4m3 in cuBLASLt: a second factor, on the device; or NULL */
  const g2z__lt_batch *batch;      /* with a batched key; else NULL: one product */
  void *slice;                     /* room k43, TIMES_SLOPE_8: memory for part of the product */
} g2z__lt_operands;

/* Room k42: reports whether it has a kernel for a key, and launches it. `on` NULL: nothing is
 * added. Column sums are per slab of G2Z__PRODUCT_ROWS rows. */
#define G2Z__PRODUCT_ROWS 128
static int g2z__hopper_product_fits(const g2z_device *device, const g2z__lt_key *key,
                                    const g2z__lt_operands *on);
static g2z_status g2z__hopper_product_run(g2z_device *device, const g2z__lt_key *key,
                                          const g2z__lt_operands *on);
/* A product with operands in 8 bits: by room k42 on Hopper, by room k43 elsewhere. */
template <typename A>
static g2z_status g2z__narrow_product_run(g2z_device *device, const g2z__lt_key *key,
                                          const g2z__lt_operands *on);
static size_t g2z__slice_bytes(const g2z_device *device, int N, size_t row_bytes);

static g2z_status g2z__lt_fail(g2z_device *device, cublasStatus_t status, const char *what,
                               const g2z__lt_key *key) {
  const int narrow = key->type == CUDA_R_8F_E4M3 || key->type == CUDA_R_8F_E5M2 ||
                     key->type == G2Z__E4M3_TWICE;
  const char *type = g2z_dtype_text(device->dtype), *remedy = "";
  g2z_status kind = G2Z_DEVICE;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) kind = G2Z_NO_MEMORY;
  if (narrow) type = "fp8";
  if (narrow && status == CUBLAS_STATUS_NOT_SUPPORTED)
    remedy = "take fp8=none, or another version of cuBLASLt; ";
  return g2z_fail(device->services, kind,
                  "%s of the product [%d,%d] = [%d,%d] [%d,%d] (epilogue %d, dtype %s): cuBLASLt "
                  "%zu reports %s; %sset CUBLASLT_LOG_LEVEL=2 for details", what, key->n, key->m,
                  key->n, key->k, key->k, key->m, key->epilogue, type, cublasLtGetVersion(),
                  cublasLtGetStatusString(status), remedy);
}

#define G2Z__LT(device, key, call)                                        \
  do {                                                                    \
    cublasStatus_t lt_status_ = (call);                                   \
    if (lt_status_ != CUBLAS_STATUS_SUCCESS)                              \
      return g2z__lt_fail(device, lt_status_, #call, key);                \
  } while (0)

static void g2z__lt_free(g2z__lt_product *product) {
  if (product->desc) cublasLtMatmulDescDestroy(product->desc);
  if (product->a) cublasLtMatrixLayoutDestroy(product->a);
  if (product->b) cublasLtMatrixLayoutDestroy(product->b);
  if (product->d) cublasLtMatrixLayoutDestroy(product->d);
  memset(product, 0, sizeof *product); /* no product has a key of zeros */
}

/* Creates the descriptors of a key. */
static g2z_status g2z__lt_describe(g2z_device *device, g2z__lt_product *product) {
  const g2z__lt_key *key = &product->key;
  cudaDataType_t type = (cudaDataType_t)key->type, type_d = (cudaDataType_t)key->type_d;
  cudaDataType_t type_b = type;
  if (type == CUDA_R_8F_E4M3) type_b = CUDA_R_8F_E5M2;
  if (type == CUDA_R_8F_E5M2) type_b = CUDA_R_8F_E4M3;
  if (key->type == G2Z__E4M3_TWICE) type = type_b = CUDA_R_8F_E4M3;
  uint64_t m = (uint64_t)key->m, n = (uint64_t)key->n, k = (uint64_t)key->k;
  uint64_t rows_a = m, columns_a = k, rows_b = k, columns_b = n;
  cublasOperation_t op_a = CUBLAS_OP_N, op_b = CUBLAS_OP_N;
  if (key->transpose_a) {
    op_a = CUBLAS_OP_T;
    rows_a = k;
    columns_a = m;
  }
  if (key->transpose_b) {
    op_b = CUBLAS_OP_T;
    rows_b = n;
    columns_b = k;
  }
  cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)key->epilogue;
  if (g2z__epilogue_is_ours(key)) epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  G2Z__LT(device, key, cublasLtMatmulDescCreate(&product->desc, (cublasComputeType_t)key->compute,
                                                CUDA_R_32F));
  G2Z__LT(device, key, cublasLtMatmulDescSetAttribute(product->desc, CUBLASLT_MATMUL_DESC_TRANSA,
                                                      &op_a, sizeof op_a));
  G2Z__LT(device, key, cublasLtMatmulDescSetAttribute(product->desc, CUBLASLT_MATMUL_DESC_TRANSB,
                                                      &op_b, sizeof op_b));
  G2Z__LT(device, key, cublasLtMatmulDescSetAttribute(product->desc, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                                      &epilogue, sizeof epilogue));
  G2Z__LT(device, key, cublasLtMatrixLayoutCreate(&product->a, type, rows_a, columns_a, key->ld_a));
  G2Z__LT(device, key, cublasLtMatrixLayoutCreate(&product->b, type_b, rows_b, columns_b,
                                                  key->ld_b));
  G2Z__LT(device, key, cublasLtMatrixLayoutCreate(&product->d, type_d, m, n, key->ld_d));
  return G2Z_OK;
}

/* Sets the parts of the descriptors that no key has: the batch, and addresses of bias and scale. */
static g2z_status g2z__lt_aim(g2z_device *device, const g2z__lt_product *product,
                              const g2z__lt_operands *on) {
  if (on->batch) {
    const cublasLtMatrixLayout_t layouts[3] = {product->a, product->b, product->d};
    const size_t distances[3] = {on->batch->apart_a, on->batch->apart_b, on->batch->apart_d};
    const int32_t count = on->batch->count;
    for (int i = 0; i < 3; i++) {
      cublasLtMatrixLayout_t layout = layouts[i];
      const int64_t apart = (int64_t)distances[i];
      G2Z__LT(device, &product->key,
              cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                               sizeof count));
      G2Z__LT(device, &product->key,
              cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                               &apart, sizeof apart));
    }
  }
  if (on->bias)
    G2Z__LT(device, &product->key,
            cublasLtMatmulDescSetAttribute(product->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                           &on->bias, sizeof on->bias));
  if (product->key.type == CUDA_R_8F_E4M3)
    G2Z__LT(device, &product->key,
            cublasLtMatmulDescSetAttribute(product->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                           &on->scale, sizeof on->scale));
  return G2Z_OK;
}

static cublasStatus_t g2z__lt_run(g2z_device *device, const g2z__lt_product *product,
                                  const g2z__lt_operands *on, const cublasLtMatmulAlgo_t *algo) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  float alpha = on->factor, beta = 1;
  const void *c = on->c;
  if (on->batch) {
    alpha = on->batch->alpha;
    beta = on->batch->beta;
  }
  if (!c) { /* nothing is added */
    beta = 0;
    c = on->d;
  }
  return cublasLtMatmul(cuda->lt, product->desc, &alpha, on->a, product->a, on->b, product->b,
                        &beta, c, product->d, on->d, product->d, algo, cuda->lt_workspace,
                        G2Z__PRODUCT_WORKSPACE, cuda->stream);
}

/* Times one way to compute a product and keeps it if it is the fastest so far. A refused way does
 * not count. A CUDA error is reported here: else a later call would be blamed. */
template <typename F>
static g2z_status g2z__lt_try(g2z_device *device, g2z__lt_product *best,
                              const g2z__lt_operands *on, g2z__way way,
                              const cublasLtMatmulAlgo_t *algo, F run) {
  const g2z__lt_key *key = &best->key;
  const double flop = 2.0 * key->m * key->n * key->k * (on->batch ? on->batch->count : 1);
  g2z__cuda *cuda = g2z__cuda_of(device);
  /* Small: the best of three rounds, after one to warm up. A round has up to 8 calls, because the
   * events around one small product take as long as the product. Large: the mean over G2Z__LARGE_MS
   * after as long a warm-up: under the power limit an algorithm that needs less power may win. */
  const int large = flop >= G2Z__LARGE_FLOP;
  int calls = (int)min(max(G2Z__TIMED_FLOP / flop, 1.0), 8.0);
  if (large) calls = G2Z__LARGE_CALLS;
  float ms, spent_ms = 0, sum_ms = 0, best_ms = INFINITY;
  int counted = 0, more = 1;
  G2Z_TRY(g2z_cuda_synchronize(device)); /* the fault of an earlier kernel is not this product's */
  for (int round = 0; more; round++) {
    cudaError_t error = cudaEventRecord(cuda->begin, cuda->stream);
    int done = 0;
    while (done < calls && run() == 0) done++;
    if (error == cudaSuccess) error = cudaEventRecord(cuda->end, cuda->stream);
    if (error == cudaSuccess) error = cudaEventSynchronize(cuda->end);
    (void)cudaGetLastError(); /* else the next launch would report a refusal */
    if (error == cudaSuccess && done < calls) return G2Z_OK;
    if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, cuda->begin, cuda->end);
    if (error != cudaSuccess) {
      char what[256];
      snprintf(what, sizeof what, "timing the product [%d,%d] = [%d,%d] [%d,%d] (epilogue %d, "
               "dtype %s) by %s", key->n, key->m, key->n, key->k, key->k, key->m, key->epilogue,
               g2z_dtype_text(device->dtype), g2z__way_names[way]);
      return g2z__cuda_fail(device->services, error, what);
    }
    if (large && spent_ms >= G2Z__LARGE_MS) {
      sum_ms += ms;
      counted++;
    }
    if (round > 0 && ms < best_ms) best_ms = ms;
    spent_ms += ms;
    more = round < 3;
    if (large) more = !counted || spent_ms < 2 * G2Z__LARGE_MS;
  }
  float round_ms = best_ms;
  if (large) round_ms = sum_ms / (float)counted;
  const float us = round_ms * 1000 / (float)calls;
  if (us <= 0 || (best->us > 0 && us >= best->us)) return G2Z_OK;
  best->us = us;
  best->way = way;
  if (algo) best->algo = *algo;
  return G2Z_OK;
}

static int g2z__lt_may_time(const g2z_device *device) {
  const g2z__cuda *cuda = g2z__cuda_of(device);
  return device->tune == G2Z_TUNE_ON && cuda->products_listed < G2Z__PRODUCTS_LISTED &&
         !g2z__capturing(device);
}

/* Chooses by timing. If D overwrites C, trials write to separate memory to preserve C. Without room
 * for it, the heuristic's favourite is taken, and listed, so that all ranks take it. */
static g2z_status g2z__lt_tune(g2z_device *device, g2z__lt_product *product,
                               const g2z__lt_operands *on) {
  const g2z__lt_key *key = &product->key;
  const uint64_t workspace = G2Z__PRODUCT_WORKSPACE;
  /* No split sums in a batch: each product would need workspace, and the count may change. */
  const uint32_t schemes = key->batched ? CUBLASLT_REDUCTION_SCHEME_NONE
                                        : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const uint32_t alignment = G2Z__PRODUCT_ALIGNMENT; /* cuBLASLt's default is 256 */
  const struct {
    cublasLtMatmulPreferenceAttributes_t attribute;
    const void *value;
    size_t bytes;
  } wishes[] = {
      {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
      {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, sizeof alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment, sizeof alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment, sizeof alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment, sizeof alignment}};
  cublasLtMatmulHeuristicResult_t candidates[G2Z__CANDIDATES]; /* the heuristic's favourite first */
  cublasLtMatmulPreference_t preference;
  int count = 0;
  G2Z__LT(device, key, cublasLtMatmulPreferenceCreate(&preference));
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  for (int i = 0; i < (int)(sizeof wishes / sizeof *wishes) && status == CUBLAS_STATUS_SUCCESS; i++)
    status = cublasLtMatmulPreferenceSetAttribute(preference, wishes[i].attribute, wishes[i].value,
                                                  wishes[i].bytes);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmulAlgoGetHeuristic(g2z__cuda_of(device)->lt, product->desc, product->a,
                                            product->b, product->d, product->d, preference,
                                            G2Z__CANDIDATES, candidates, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status == CUBLAS_STATUS_SUCCESS && count == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
  if (status != CUBLAS_STATUS_SUCCESS)
    return g2z__lt_fail(device, status, "the choice of an algorithm", key);
  product->algo = candidates[0].algo;
  if (device->tune == G2Z_TUNE_OWN && g2z__hopper_product_fits(device, key, on))
    product->way = G2Z__WAY_HOPPER;
  product->listed = g2z__lt_may_time(device);
  if (!product->listed) return G2Z_OK;
  g2z__lt_operands trial = *on;
  void *elsewhere = NULL;
  if (on->c == on->d) {
    size_t bytes = (size_t)key->ld_d * (size_t)key->n * (key->type_d == CUDA_R_32F ? 4 : 2);
    if (cudaMalloc(&elsewhere, bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      g2z_log(device->services, G2Z_LOG_WARNING,
              "the product [%d,%d] = [%d,%d] [%d,%d] uses cuBLASLt's first choice, because the "
              "%.1f MiB to time others are not free: for full speed lower the batch, then remove "
              "this run's tuning.txt", key->n, key->m, key->n, key->k, key->k, key->m,
              (double)bytes / 1048576.0);
      return G2Z_OK;
    }
    trial.d = elsewhere;
  }
  g2z_status tried = G2Z_OK;
  for (int i = 0; i < count && tried == G2Z_OK; i++)
    if (candidates[i].state == CUBLAS_STATUS_SUCCESS)
      tried = g2z__lt_try(device, product, on, G2Z__WAY_CUBLASLT, &candidates[i].algo, [&] {
        return g2z__lt_run(device, product, &trial, &candidates[i].algo);
      });
  if (tried == G2Z_OK && g2z__hopper_product_fits(device, key, on))
    tried = g2z__lt_try(device, product, on, G2Z__WAY_HOPPER, NULL,
                        [&] { return g2z__hopper_product_run(device, key, &trial); });
  cudaFree(elsewhere);
  return tried;
}

static g2z__lt_product *g2z__lt_find(const g2z_device *device, const g2z__lt_key *key) {
  const g2z__cuda *cuda = g2z__cuda_of(device);
  for (int i = 0; i < cuda->product_count; i++)
    if (memcmp(&cuda->products[i].key, key, sizeof *key) == 0) return &cuda->products[i];
  return NULL;
}

/* The product whose choice still holds for a key; NULL: choose. */
static g2z__lt_product *g2z__lt_chosen(const g2z_device *device, const g2z__lt_key *key) {
  g2z__lt_product *product = g2z__lt_find(device, key);
  if (!product || product->listed || !g2z__lt_may_time(device)) return product;
  g2z__lt_free(product);
  return NULL;
}

/* Adds a shape to the table: in a free row, else in place of the next shape that is not listed. */
static g2z_status g2z__lt_add(g2z_device *device, const g2z__lt_key *key, g2z__lt_product **out) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  int row = cuda->product_count;
  if (row < G2Z__PRODUCTS) cuda->product_count++;
  else {
    do cuda->product_victim = (cuda->product_victim + 1) % G2Z__PRODUCTS;
    while (cuda->products[cuda->product_victim].listed);
    row = cuda->product_victim;
  }
  g2z__lt_product *product = &cuda->products[row];
  g2z__lt_free(product);
  product->key = *key;
  g2z_status status = g2z__lt_describe(device, product);
  if (status != G2Z_OK) g2z__lt_free(product);
  *out = product;
  return status;
}

/* D = op(A) op(B) (+ C), with the epilogue. Row-major callers exchange their operands. */
static g2z_status g2z__lt_multiply(g2z_device *device, const g2z__lt_key *key,
                                   const g2z__lt_operands *on) {
  const uintptr_t addresses = (uintptr_t)on->a | (uintptr_t)on->b | (uintptr_t)on->c |
                              (uintptr_t)on->d;
  G2Z_ASSERT(addresses % G2Z__PRODUCT_ALIGNMENT == 0);
  g2z__lt_product *product = g2z__lt_chosen(device, key);
  int known = product != NULL;
  if (!known) G2Z_TRY(g2z__lt_add(device, key, &product));
  g2z_status status = g2z__lt_aim(device, product, on);
  if (status == G2Z_OK && !known) status = g2z__lt_tune(device, product, on);
  if (status != G2Z_OK) {
    g2z__lt_free(product);
    return status;
  }
  if (!known) g2z__cuda_of(device)->products_listed += product->listed;
  const int ours = product->way == G2Z__WAY_HOPPER || device->tune == G2Z_TUNE_OWN;
  if (ours && g2z__hopper_product_fits(device, key, on))
    return g2z__hopper_product_run(device, key, on);
  cublasStatus_t run = g2z__lt_run(device, product, on, &product->algo);
  if (run == CUBLAS_STATUS_SUCCESS) return G2Z_OK;
  return g2z__lt_fail(device, run, "cublasLtMatmul", key);
}

/* ----- the tuning table as text ------------------------------------------ */

/* The first line names cuBLASLt and the GPU, because algorithms differ between them. */
static void g2z__lt_table_head(const g2z_device *device, char *text, size_t bytes) {
  const g2z__cuda *cuda = g2z__cuda_of(device);
  snprintf(text, bytes, G2Z__TUNING_HEAD "cuBLASLt %zu, %d SMs, %s", cublasLtGetVersion(),
           cuda->sms, cuda->gpu);
}

/* One line per listed product: key, way, algorithm in hexadecimal, microseconds or 0. */
static g2z_status g2z_cuda_tuning(g2z_device *device, char **text) {
  const g2z__cuda *cuda = g2z__cuda_of(device);
  const size_t line = 640; /* the longest line: a product's numbers, names and time */
  size_t room = (size_t)(cuda->product_count + 1) * line, at = 0;
  void *memory;
  G2Z_TRY(g2z_allocate(device->services, room, 1, &memory));
  char *out = *text = (char *)memory;
  g2z__lt_table_head(device, out, 512);
  at = strlen(out);
  at += (size_t)snprintf(out + at, room - at, "\n");
  for (int i = 0; i < cuda->product_count; i++) {
    const g2z__lt_product *product = &cuda->products[i];
    if (!product->listed) continue;
    int32_t fields[G2Z__KEY_FIELDS];
    memcpy(fields, &product->key, sizeof fields);
    for (int f = 0; f < G2Z__KEY_FIELDS; f++)
      at += (size_t)snprintf(out + at, room - at, "%" PRId32 " ", fields[f]);
    at += (size_t)snprintf(out + at, room - at, "%s ", g2z__way_names[product->way]);
    for (size_t word = 0; word < sizeof product->algo.data / sizeof product->algo.data[0]; word++)
      at += (size_t)snprintf(out + at, room - at, "%016" PRIx64 " ", product->algo.data[word]);
    at += (size_t)snprintf(out + at, room - at, "%.2f\n", (double)product->us);
  }
  return G2Z_OK;
}

/* Parses a line after the head as a product; returns 0 if it is none. */
static int g2z__lt_table_parse(const char *line, g2z__lt_key *key, g2z__way *way,
                               cublasLtMatmulAlgo_t *algo, float *us) {
  int32_t fields[G2Z__KEY_FIELDS];
  char *end;
  for (int f = 0; f < G2Z__KEY_FIELDS; f++) {
    long value = strtol(line, &end, 10);
    if (end == line || *end != ' ' || value < INT32_MIN || value > INT32_MAX) return 0;
    fields[f] = (int32_t)value;
    line = end;
  }
  memcpy(key, fields, sizeof fields);
  int named = 0;
  size_t name = strcspn(++line, " \n");
  while (named < G2Z__WAYS && (strlen(g2z__way_names[named]) != name ||
                               strncmp(line, g2z__way_names[named], name) != 0))
    named++;
  if (named == G2Z__WAYS) return 0;
  *way = (g2z__way)named;
  line += name;
  for (size_t word = 0; word < sizeof algo->data / sizeof algo->data[0]; word++) {
    algo->data[word] = strtoull(line, &end, 16);
    if (end == line || *end != ' ') return 0;
    line = end;
  }
  *us = strtof(line, &end);
  return end != line && *end == '\n' && *us >= 0;
}

/* 1 if an algorithm from a file runs here: a damaged one must not be launched. If an epilogue
 * takes two launches, its plain product has a line, too. */
static int g2z__lt_accepts(g2z_device *device, const g2z__lt_product *product, g2z__way way,
                           const cublasLtMatmulAlgo_t *algo) {
  cublasLtMatmulHeuristicResult_t result;
  int ours = g2z__epilogue_is_ours(&product->key);
  if ((ours || way == G2Z__WAY_HOPPER) && !g2z__hopper_product_fits(device, &product->key, NULL))
    return 0;
  if (ours) return 1;
  memset(&result, 0, sizeof result);
  cublasStatus_t status =
      cublasLtMatmulAlgoCheck(g2z__cuda_of(device)->lt, product->desc, product->a, product->b,
                              product->d, product->d, algo, &result);
  return status == CUBLAS_STATUS_SUCCESS && result.state == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= G2Z__PRODUCT_WORKSPACE;
}

/* `text` ends with a NUL. Its choices replace the device's. */
static g2z_status g2z_cuda_tuning_read(g2z_device *device, const char *text) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  char head[512];
  g2z__lt_table_head(device, head, sizeof head);
  size_t length = strlen(head), first = strcspn(text, "\n");
  if (strncmp(text, head, length) != 0 || text[length] != '\n')
    return g2z_fail(device->services, G2Z_FORMAT,
                    "the tuning table begins with \"%.*s\" and not with \"%s\": it was made on "
                    "another GPU or cuBLAS, or by another build; remove it to tune anew",
                    (int)min(first, (size_t)200), text, head);
  int number = 2;
  for (const char *line = text + length + 1; *line; number++) {
    g2z__lt_key key;
    cublasLtMatmulAlgo_t algo;
    g2z__way way;
    float us;
    const char *next = strchr(line, '\n');
    if (!next || !g2z__lt_table_parse(line, &key, &way, &algo, &us))
      return g2z_fail(device->services, G2Z_FORMAT,
                      "line %d of the tuning table is no product: remove the table to tune anew",
                      number);
    line = next + 1;
    g2z__lt_product *product = g2z__lt_find(device, &key);
    if (product) {
      cuda->products_listed -= product->listed;
      g2z__lt_free(product);
    }
    if (cuda->products_listed >= G2Z__PRODUCTS_LISTED) break;
    G2Z_TRY(g2z__lt_add(device, &key, &product));
    if (!g2z__lt_accepts(device, product, way, &algo)) {
      g2z__lt_free(product);
      return g2z_fail(device->services, G2Z_FORMAT,
                      "line %d of the tuning table names an algorithm that this cuBLAS or this "
                      "build does not run: remove the table to tune anew", number);
    }
    product->way = way;
    product->algo = algo;
    product->us = us;
    product->listed = 1;
    cuda->products_listed++;
  }
  return G2Z_OK;
}

/* ----- row-major products ------------------------------------------------ */

template <typename A>
static constexpr cudaDataType_t g2z__cuda_type = CUDA_R_32F;
template <>
constexpr cudaDataType_t g2z__cuda_type<__half> = CUDA_R_16F;
template <>
constexpr cudaDataType_t g2z__cuda_type<__nv_bfloat16> = CUDA_R_16BF;

typedef enum g2z__transposed { G2Z__AS_IT_IS, G2Z__TRANSPOSED } g2z__transposed;

/* The key of rows[n,m] = left[n,k] right[k,m], all row-major; left and right may be transposed. A
 * is the type of left and right, D of the result. `ld` is the result's row length, at least m. */
template <typename A, typename D>
static g2z__lt_key g2z__lt_rows_key(const g2z_device *device, int n, int k, int m,
                                      g2z__transposed left, g2z__transposed right, int ld,
                                      cublasLtEpilogue_t epilogue) {
  g2z__lt_key key;
  memset(&key, 0, sizeof key);
  key.m = m;
  key.n = n;
  key.k = k;
  key.transpose_a = right == G2Z__TRANSPOSED; /* right is cuBLAS's A: the operands are exchanged */
  key.transpose_b = left == G2Z__TRANSPOSED;
  key.ld_a = right == G2Z__TRANSPOSED ? k : m;
  key.ld_b = left == G2Z__TRANSPOSED ? n : k;
  key.ld_d = ld;
  key.type = g2z__cuda_type<A>;
  key.type_d = g2z__cuda_type<D>;
  key.compute = device->dtype == G2Z_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  key.epilogue = epilogue;
  return key;
}

static g2z__lt_operands g2z__lt_rows(void *d, const void *left, const void *right) {
  g2z__lt_operands on;
  memset(&on, 0, sizeof on);
  on.d = d;
  on.a = right;
  on.b = left;
  on.factor = 1;
  return on;
}

/* A product with an epilogue that cuBLASLt lacks. Room k42's kernel needs one launch; apart() runs
 * a plain product and a pass over it. The faster way is chosen once. *fused: 1 for one launch. */
template <typename F>
static g2z_status g2z__lt_fused_or(g2z_device *device, const g2z__lt_key *key,
                                   const g2z__lt_operands *on, F apart, int *fused) {
  *fused = 0;
  if (!g2z__hopper_product_fits(device, key, on)) return apart();
  auto run = [&] {
    return g2z__hopper_product_run(device, key, on);
  };
  const int own = device->tune == G2Z_TUNE_OWN;
  g2z__lt_product *product = g2z__lt_chosen(device, key);
  if (!product) {
    g2z__lt_product best; /* added to the table last: apart() adds its own product first */
    memset(&best, 0, sizeof best);
    best.key = *key;
    best.way = G2Z__WAY_HOPPER;
    if (!own) {
      best.way = G2Z__WAY_CUBLASLT;
      G2Z_TRY(apart()); /* also times its plain product */
    }
    best.listed = g2z__lt_may_time(device);
    if (best.listed) {
      G2Z_TRY(g2z__lt_try(device, &best, on, G2Z__WAY_CUBLASLT, NULL, apart));
      G2Z_TRY(g2z__lt_try(device, &best, on, G2Z__WAY_HOPPER, NULL, run));
    }
    G2Z_TRY(g2z__lt_add(device, key, &product));
    product->way = best.way;
    product->us = best.us;
    product->listed = best.listed;
    g2z__cuda_of(device)->products_listed += best.listed;
  }
  *fused = own || product->way == G2Z__WAY_HOPPER;
  if (*fused) return run();
  return apart();
}

/* g2z_k_narrow: to = x times a scale, rounded to e4m3.
 *   to  rows of I numbers in e4m3, out
 *   x   [N,I] A in        I % 8 == 0
 *   clamped  counts the numbers in `to`; may be NULL
 * Cost    3 N I bytes: N=32768, I=768 is 75 MB
 * Oracle  g2z__cpu_e4m3; tests cuda_linear, cuda_head */
template <typename A>
static __global__ void __launch_bounds__(256)
g2z_k_narrow(uint8_t *to, const A *x, float scale, int N, int I, double *clamped) {
  size_t i = (size_t)blockIdx.x * 256 + threadIdx.x, packs = (size_t)I / 8, row = i / packs;
  float value[8];
  g2z__k_begin();
  if (row >= (size_t)N) return;
  g2z__unpack<A>(value, g2z__get(x, i));
  const uint2 eight = g2z__pack_8<__nv_fp8_e4m3>(value, scale);
  reinterpret_cast<uint2 *>(to + row * G2Z_NARROW_ROW(I))[i % packs] = eight;
  g2z__count_clamped(clamped, {eight});
}
template <typename A>
static g2z_status g2z__narrow(g2z_device *device, void *to, const A *x, float scale, int N, int I,
                              double *clamped) {
  return g2z__launch(device, "g2z_k_narrow", g2z_k_narrow<A>,
                     (unsigned)g2z__blocks((size_t)N * (size_t)(I / 8), 256), 256, 0,
                     (uint8_t *)to, x, scale, N, I, clamped);
}

struct g2z__narrow_list {
  g2z_narrow_weight at[4];
  int count, tiles[4];           /* end of each weight's tiles */
  double *clamped;               /* counts the numbers of all weights; or NULL */
};

/* g2z_k_narrow_weights: columns = w^T, rows = w, both times G2Z__E4M3_W, in e4m3; up to 4 weights.
 *   w        [K,O] A in   K % 8 == 0, O % 8 == 0
 *   columns  rows of K numbers in e4m3, out
 *   rows     rows of O numbers in e4m3, out; or NULL
 * Launch  a block of 256 threads per 64 x 64 numbers
 * Cost    3 or 4 K O bytes: the four weights of a layer of GPT-2 124M are 28 MB
 * Oracle  g2z__cpu_linear_fwd; tests cuda_linear, cuda_fp8 */
template <typename A>
static __global__ void __launch_bounds__(256) g2z_k_narrow_weights(g2z__narrow_list list) {
  __shared__ alignas(16) uint8_t tile[64][80]; /* [o][i]; 16 bytes of padding per row */
  int which = 0, first = 0;
#pragma unroll
  for (int k = 0; k < 3; k++)
    if (k + 1 < list.count && (int)blockIdx.x >= list.tiles[k]) {
      which = k + 1;
      first = list.tiles[k];
    }
  g2z_narrow_weight x = list.at[0]; /* indexing the list would move it to local memory */
#pragma unroll
  for (int k = 1; k < 4; k++)
    if (k == which) x = list.at[k];
  const int I = x.K, O = x.O, across = (O + 63) / 64, ld = (int)G2Z_NARROW_ROW(I);
  const int first_i = ((int)blockIdx.x - first) / across * 64;
  const int first_o = ((int)blockIdx.x - first) % across * 64;
  const A *w = (const A *)x.w;
  g2z__k_begin();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int pack = (int)threadIdx.x % 8, i = half * 32 + (int)threadIdx.x / 8, o = pack * 8;
    float value[8] = {};
    const A *row = w + (size_t)(first_i + i) * (size_t)O + first_o;
    if (first_i + i < I && first_o + o < O) g2z__unpack<A>(value, g2z__get(row, (size_t)pack));
    uint2 eight = g2z__pack_8<__nv_fp8_e4m3>(value, G2Z__E4M3_W);
    if (x.rows && first_i + i < I && first_o + o < O)
      *reinterpret_cast<uint2 *>(x.rows + (size_t)(first_i + i) * G2Z_NARROW_ROW(O) + first_o + o) =
          eight;
    g2z__count_clamped(list.clamped, {eight});
#pragma unroll
    for (int j = 0; j < 8; j++)
      tile[o + j][i] = (uint8_t)((j < 4 ? eight.x : eight.y) >> (j % 4 * 8));
  }
  __syncthreads();
  int o = (int)threadIdx.x / 4, i = (int)threadIdx.x % 4 * 16;
  if (first_o + o < O && first_i + i < ld)
    *reinterpret_cast<uint4 *>(x.columns + (size_t)(first_o + o) * (size_t)ld + first_i + i) =
        *reinterpret_cast<const uint4 *>(&tile[o][i]);
}

template <typename A>
static g2z_status g2z__narrow_launch(g2z_device *device, const g2z_narrow_weight *weights,
                                     int count) {
  g2z__narrow_list list = {};
  int tiles = 0;
  list.clamped = device->clamped_weights;
  for (list.count = 0; list.count < count; list.count++) {
    const g2z_narrow_weight *x = &weights[list.count];
    list.at[list.count] = *x;
    tiles += (int)(g2z__blocks((size_t)x->K, 64) * g2z__blocks((size_t)x->O, 64));
    list.tiles[list.count] = tiles;
  }
  return g2z__launch(device, "g2z_k_narrow_weights", g2z_k_narrow_weights<A>,
                     (unsigned)tiles, 256, 0, list);
}

template <typename A>
static g2z_status g2z_cuda_narrow_weights(g2z_device *device, int first) {
  if constexpr (sizeof(A) == 2) return g2z__narrow_launch<A>(device, device->narrow + first, 4);
  (void)device, (void)first; /* 32-bit types have no 8-bit copies */
  return G2Z_OK;
}

/* The 8-bit copies of a weight, or NULL. */
static const g2z_narrow_weight *g2z__narrow_ready(const g2z_device *device, const void *w) {
  for (int i = 0; i < device->narrow_count; i++)
    if (device->narrow[i].w == w) return &device->narrow[i];
  return NULL;
}

/* Changes a key to operands in 8 bits, whose rows have k numbers. In g2z__narrow_product_run() A is
 * e4m3, and B has `type`. In cuBLASLt A has `type`, e4m3 or e5m2, and B has the other of them; fast
 * accumulation stays off, so that partial sums move to fp32. */
static void g2z__narrow_key(g2z__lt_key *key, cudaDataType_t type) {
  key->type = type;
  key->transpose_a = 1;
  key->transpose_b = 0;
  key->ld_a = key->ld_b = (int32_t)G2Z_NARROW_ROW(key->k);
}

/* y = x w + bias, then gelu or residual. The residual is the product's C, added before rounding;
 * with dropout a separate kernel adds it, and the product goes to scratch if y is the residual.
 * cuBLASLt's GELU saves only its input: the slope in backward would take longer than a product. */
template <typename A>
static g2z_status g2z_cuda_linear_fwd(g2z_device *device, const g2z_linear_fwd *op) {
  const int N = op->N, K = op->K, O = op->O;
  G2Z_ASSERT(g2z__linear_fwd_whole(op));
  int drops = op->residual && g2z__dropout_on(&op->dropout), apart = drops && op->y == op->residual;
  g2z__lt_key key = g2z__lt_rows_key<A, A>(device, N, K, O, G2Z__AS_IT_IS, G2Z__AS_IT_IS, O,
                                           CUBLASLT_EPILOGUE_BIAS);
  g2z__lt_operands on = g2z__lt_rows(op->y, op->x, op->w);
  on.bias = op->bias;
  on.slope = op->slope;
  if (!drops) on.c = op->residual;
  const g2z_narrow_weight *ready = NULL;
  size_t bytes = 0, narrow_w = 0;
  void *memory = NULL;
  if (apart) bytes = g2z__align((size_t)N * (size_t)O * sizeof(A));
  if (op->narrow_x) {
    ready = g2z__narrow_ready(device, op->w);
    if (!ready) narrow_w = (size_t)O * G2Z_NARROW_ROW(K);
  }
  if (bytes + narrow_w) G2Z_TRY(g2z__scratch(device, bytes + narrow_w, &memory));
  if (apart) on.d = memory;
  const g2z__lt_key plain = key;
  if (op->slope) key.epilogue = G2Z__EPILOGUE_GELU;
  if (!op->narrow_x && op->slope) {
    size_t packs = (size_t)N * (size_t)O / g2z__lanes<A>;
    int fused;
    return g2z__lt_fused_or(device, &key, &on, [&] {
      g2z__lt_operands product = g2z__lt_rows(op->slope, op->x, op->w);
      product.bias = op->bias;
      G2Z_TRY(g2z__lt_multiply(device, &plain, &product));
      return g2z__launch(device, "g2z_k_gelu_fwd", g2z_k_gelu_fwd<A>,
                         (unsigned)g2z__blocks(packs, 256), 256, 0, (A *)op->y, (A *)op->slope,
                         packs);
    }, &fused);
  }
  if (!op->narrow_x) G2Z_TRY(g2z__lt_multiply(device, &key, &on));
  else if constexpr (sizeof(A) == 2) {
    const g2z_narrow_weight own = {op->w, (uint8_t *)memory + bytes, NULL, K, O};
    if (!ready) {
      G2Z_TRY(g2z__narrow_launch<A>(device, &own, 1));
      ready = &own;
    }
    if (op->slope && op->narrow_y == op->y) key.epilogue = G2Z__EPILOGUE_GELU_8;
    else if (op->slope) on.narrow = op->narrow_y;
    on.a = ready->columns;
    on.b = op->narrow_x;
    g2z__narrow_key(&key, CUDA_R_8F_E4M3);
    G2Z_TRY(g2z__narrow_product_run<A>(device, &key, &on));
  }
  if (!drops) return G2Z_OK;
  return g2z__launch(device, "g2z_k_residual_dropout", g2z_k_residual_dropout<A>,
                     (unsigned)g2z__blocks((size_t)N, 8), dim3(32, 8), 0, (A *)op->y,
                     (const A *)on.d, (const A *)op->residual, op->dropout, N, O);
}

/* dx = dy w^T. With a slope, dx is multiplied by it, and dbias = or += the column sums of dx. */
template <typename A, typename G>
static g2z_status g2z_cuda_linear_bwd_data(g2z_device *device, const g2z_linear_bwd_data *op) {
  const int N = op->N, K = op->K, O = op->O;
  G2Z_ASSERT(g2z__linear_bwd_data_whole(op));
  const void *narrow = std::is_same<A, __half>::value ? op->narrow : NULL; /* e5m2: fp16's range */
  g2z__lt_key plain = g2z__lt_rows_key<A, A>(device, N, O, K, G2Z__AS_IT_IS, G2Z__TRANSPOSED, K,
                                             CUBLASLT_EPILOGUE_DEFAULT);
  g2z__lt_operands on = g2z__lt_rows(op->dx, op->dy, op->w);
  if (!op->slope && !narrow) return g2z__lt_multiply(device, &plain, &on);
  size_t ours = g2z__blocks((size_t)N, G2Z__PRODUCT_ROWS), slabs = (size_t)g2z__slabs(N);
  const g2z_narrow_weight *ready = NULL;
  size_t sums = 0, narrow_w = 0, slice = 0;
  void *memory = NULL;
  int fused = 1;
  if (op->slope) sums = g2z__align(max(ours, slabs) * (size_t)K * sizeof(float));
  if (narrow) {
    ready = g2z__narrow_ready(device, op->w);
    if (!ready) narrow_w = g2z__align((size_t)K * G2Z_NARROW_ROW(O));
    if (op->slope) slice = g2z__slice_bytes(device, N, (size_t)K * sizeof(A));
  }
  if (sums + narrow_w + slice)
    G2Z_TRY(g2z__scratch(device, sums + narrow_w + slice, &memory));
  on.slope = (void *)op->slope;
  on.sums = (float *)memory;
  on.slice = (char *)memory + sums + narrow_w;
  g2z__lt_key key = plain;
  if (op->slope) key.epilogue = G2Z__EPILOGUE_TIMES_SLOPE;
  if (narrow) {
    if constexpr (std::is_same<A, __half>::value) {
      if (ready) on.a = ready->rows;
      else {
        uint8_t *to = (uint8_t *)memory + sums;
        G2Z_TRY(g2z__narrow(device, to, (const A *)op->w, G2Z__E4M3_W, K, O, NULL));
        on.a = to;
      }
      on.b = narrow;
      if (op->slope) key.epilogue = G2Z__EPILOGUE_TIMES_SLOPE_8;
      g2z__narrow_key(&key, CUDA_R_8F_E5M2);
      G2Z_TRY(g2z__narrow_product_run<A>(device, &key, &on));
    }
  } else
    G2Z_TRY(g2z__lt_fused_or(device, &key, &on, [&] {
      g2z__lt_operands product = g2z__lt_rows(op->dx, op->dy, op->w);
      G2Z_TRY(g2z__lt_multiply(device, &plain, &product));
      return g2z__column_slabs<A, G2Z__COLUMNS_TIMES>(device, on.sums, (A *)op->dx,
                                                      (const A *)op->slope, N, K);
    }, &fused));
  if (!op->slope) return G2Z_OK;
  return g2z__add_slabs<G>(device, on.sums, (int)(fused ? ours : slabs), K, op->mode,
                           (G *)op->dbias);
}

/* dw = or += x^T dy */
template <typename A, typename G>
static g2z_status g2z_cuda_linear_bwd_weight(g2z_device *device, const g2z_linear_bwd_weight *op) {
  const int N = op->N, K = op->K, O = op->O;
  G2Z_ASSERT(g2z__linear_bwd_weight_whole(op));
  G2Z_ASSERT(!op->narrow_dy || N % 128 == 0);
  g2z__lt_key key = g2z__lt_rows_key<A, G>(device, K, N, O, G2Z__TRANSPOSED, G2Z__AS_IT_IS, O,
                                             CUBLASLT_EPILOGUE_DEFAULT);
  g2z__lt_operands on = g2z__lt_rows(op->dw, op->x, op->dy);
  if (op->mode == G2Z_ACCUMULATE) on.c = op->dw;
  if (op->narrow_dy) { /* the columns follow the rows */
    g2z__narrow_key(&key, CUDA_R_8F_E5M2);
    on.factor = 1 / G2Z__E4M3_X;
    on.a = (const uint8_t *)op->narrow_dy + (size_t)N * (size_t)O;
    on.b = op->columns_x;
    if (!op->columns_x) on.b = (const uint8_t *)op->x + (size_t)N * (size_t)K;
  }
  return g2z__lt_multiply(device, &key, &on);
}
/* ===== >>k40 attention ===================================================
 * In:  packed qkv[B,T,3,NH,HS]. Out: out[B,T,NH,HS] and lse; backward dqkv and its column sums.
 * Law: no T x T matrix ever lies in memory; scores, statistics and sums are fp32; every output
 *      element is written by one thread, which adds in the order of the sequence. No atomics.
 *
 * FlashAttention-2 (Dao 2023, arXiv:2307.08691) on mma.sync, cp.async and ldmatrix for fp16 and
 * bf16 on sm_80 and newer; plain fp32 arithmetic for everything else. Hopper has room k41.
 *
 * BLOCKS   A block of threads owns rows of one (b,h): 128 queries in the forward and the dQ kernel,
 *          64 keys in the dK and dV kernel. Its own rows stay in registers from its first to its
 *          last instruction. The other rows stream through a double buffer in shared memory.
 * BACKWARD Scores and their gradients are computed twice, once for dQ and once for dK and dV: 7
 *          products instead of 5. In return no two blocks add to the same number, only the
 *          statistics go through memory, and the probabilities stay in the registers where the
 *          next product reads them.
 * MASK     Key <= query. Blocks beyond the diagonal are never visited. A warp skips steps beyond
 *          the diagonal of its own rows: 64 keys at a time in the forward kernel, 16 keys or
 *          queries in the others. Only the steps of 64 that cross the diagonal compare.
 * HS       Padded with zeros to 64 or 128 on the way into registers and shared memory. */

#define G2Z__ATT_ROWS 128        /* queries per block of a tensor-core kernel */
#define G2Z__ATT_STEP 64         /* rows per load; keys per block of the dK and dV kernel */

/* The number of column sums, one for each `rows` rows of a sequence. */
static size_t g2z__attention_slabs(int B, int T, int rows) {
  return (size_t)B * g2z__blocks((size_t)T, (size_t)rows);
}

/* ----- fragments ---------------------------------------------------------
 * mma.m16n8k16 spreads its operands over a warp. With g = lane / 4 and t = lane % 4, a lane holds
 *   A 16x16  a0 (g, 2t..2t+1)  a1 (g+8, 2t..)  a2 (g, 2t+8..)  a3 (g+8, 2t+8..)
 *   B 16x8   b0 (2t..2t+1, g)  b1 (2t+8.., g)
 *   C 16x8   c0 c1 (g, 2t..2t+1)   c2 c3 (g+8, 2t..)
 * so the C of two neighbouring tiles, rounded, is the A of the next product. */

static __device__ inline int g2z__lane(void) { return (int)(threadIdx.x % G2Z__WARP); }
static __device__ inline int g2z__lane_row(void) { return g2z__lane() / 4; }
static __device__ inline int g2z__lane_column(void) { return g2z__lane() % 4 * 2; }

/* c += a b */
template <typename A>
static __device__ inline void g2z__mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1) {
  if constexpr (std::is_same<A, __half>::value)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A rectangle of qkv, out or their gradients: T rows of HS numbers, `stride` numbers apart. */
template <typename A>
struct g2z__rows {
  A *at;
  size_t stride;
  int T, HS;
  A *base;                       /* the tensor; NULL: only `narrow` is written */
  uint8_t *narrow;               /* a copy in 8 bits, written with the tensor; or NULL */
  double *clamped;               /* counts the numbers in `narrow` if they are e4m3; or NULL */
};

/* Head h of sequence b, in tensors of NH heads of HS numbers. */
struct g2z__head_place {
  int b, h, T, NH, HS;
};

/* Numbers from row to row of a head, in a tensor that holds `parts` rows of C numbers per token. */
static __device__ inline size_t g2z__head_stride(g2z__head_place at, int parts) {
  return (size_t)at.NH * (size_t)at.HS * (size_t)parts;
}

/* Numbers before row 0 of the head, in this part. */
static __device__ inline size_t g2z__head_first(g2z__head_place at, int part, int parts) {
  const size_t tokens = (size_t)at.b * (size_t)at.T, C = (size_t)at.NH * (size_t)at.HS;
  return tokens * g2z__head_stride(at, parts) + (size_t)part * C + (size_t)(at.h * at.HS);
}

/* Rows of `narrow` are contiguous: their length is a multiple of 16. */
template <typename A>
static __device__ inline g2z__rows<A> g2z__rows_of(A *base, g2z__head_place at, int part,
                                                   int parts, uint8_t *narrow = NULL) {
  const size_t stride = g2z__head_stride(at, parts);
  return {base + g2z__head_first(at, part, parts), stride, at.T, at.HS, base, narrow, NULL};
}

/* Writes 8 numbers of a rectangle. E is the type in `narrow`. */
template <typename E, typename A>
static __device__ inline void g2z__rows_put(const g2z__rows<A> &to, A *at, uint4 pack) {
  if (to.base) __stcg(reinterpret_cast<uint4 *>(at), pack);
  if (to.narrow) {
    uint2 *const narrow = reinterpret_cast<uint2 *>(to.narrow + (at - to.base));
    const uint2 eight = g2z__pack_narrow<A, E>(pack);
    __stcg(narrow, eight);
    if constexpr (std::is_same<E, __nv_fp8_e4m3>::value) g2z__count_clamped(to.clamped, {eight});
  }
}

/* 16 rows of a rectangle from row `row` on, as A of a product over HS; zero outside. */
template <int HSP, typename A>
static __device__ inline void g2z__load_a(uint32_t (&a)[HSP / 16][4],
                                          const g2z__rows<const A> &from, int row) {
#pragma unroll
  for (int k = 0; k < HSP / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int y = row + g2z__lane_row() + i % 2 * 8, x = k * 16 + g2z__lane_column() + i / 2 * 8;
      a[k][i] = y < from.T && x < from.HS
                    ? *reinterpret_cast<const uint32_t *>(from.at + (size_t)y * from.stride + x)
                    : 0u;
    }
}

/* Rounds two neighbouring C tiles to one A. */
template <typename A>
static __device__ inline void g2z__as_a(uint32_t (&a)[4], const float (&left)[4],
                                        const float (&right)[4]) {
  a[0] = g2z__pair_of<A>::pack(left[0], left[1]);
  a[1] = g2z__pair_of<A>::pack(left[2], left[3]);
  a[2] = g2z__pair_of<A>::pack(right[0], right[1]);
  a[3] = g2z__pair_of<A>::pack(right[2], right[3]);
}

/* One of two numbers. `condition ? x[i] : x[j]` chooses between two addresses, as an index does:
 * nvcc may then keep all of x in local memory, and with -split-compile it does. */
template <typename T>
static __device__ inline T g2z__choose(bool condition, T yes, T no) {
  return condition ? yes : no;
}

/* Four lanes, STEP and 2 STEP apart, transpose the 4x4 words that they hold: lane i's word k goes
 * to lane k's word i. */
template <int STEP>
static __device__ inline void g2z__transpose(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    int high = g2z__lane() & (bit * STEP);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      uint32_t give = g2z__choose(high, words[i], words[i + bit]);
      uint32_t got = __shfl_xor_sync(G2Z__ALL_LANES, give, bit * STEP);
      words[i] = g2z__choose(high, got, words[i]);
      words[i + bit] = g2z__choose(high, words[i + bit], got);
    }
  }
}

/* Multiplies the 16 rows in `c` by their factors, rounds and writes those inside the rectangle. c
 * keeps the rounded numbers, so that its sums show an overflow of A. The 8-bit copy does not show
 * it: e5m2 clamps. (Only gradients are copied.) Lanes first exchange pairs, so that each writes 16
 * bytes. nvcc splits a plain store of a uint4 into four if its parts come from other lanes; __stcg
 * stays whole. */
template <int HSP, typename A>
static __device__ inline void g2z__store_c(const g2z__rows<A> &to, float (&c)[HSP / 8][4], int row,
                                           float factor_low, float factor_high) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int y = row + g2z__lane_row() + half * 8;
    float factor = half ? factor_high : factor_low;
#pragma unroll
    for (int n = 0; n < HSP / 8; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float *two = c[n + i] + half * 2;
        words[i] = g2z__pair_of<A>::pack(two[0] * factor, two[1] * factor);
        float2 rounded = g2z__pair_of<A>::unpack(words[i]);
        two[0] = rounded.x;
        two[1] = rounded.y;
      }
      g2z__transpose<1>(words);
      int x = n * 8 + g2z__lane() % 4 * 8;
      if (y < to.T && x < to.HS)
        g2z__rows_put<__nv_fp8_e5m2>(to, to.at + (size_t)y * to.stride + x,
                                     make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

/* ----- shared memory -----------------------------------------------------
 * A tile is G2Z__ATT_STEP rows of HSP numbers. Inside each 128 bytes of row r, the 16-byte piece p
 * lies at p ^ (r % 8). ldmatrix reads eight rows of one column at a time: with this swizzle they
 * touch each of the 32 banks once. */

template <int HSP>
static constexpr int g2z__tile_bytes = G2Z__ATT_STEP *HSP * 2;

/* Starts copying rows [row, row + 64) of a rectangle into a tile; zero outside. */
template <int HSP, int THREADS, typename A>
static __device__ inline void g2z__load_tile(uint32_t tile, const g2z__rows<const A> &from,
                                             int row) {
  constexpr int PIECES = HSP / 8, TOGETHER = THREADS / PIECES; /* rows per pass */
  static_assert(TOGETHER % 8 == 0, "a thread's place in its row is the same in all its rows");
  int y = (int)threadIdx.x / PIECES, piece = (int)threadIdx.x % PIECES;
  uint32_t to = tile + (uint32_t)(y * HSP * 2 + ((piece ^ (y % 8)) * 16));
  const A *source = from.at + (size_t)(row + y) * from.stride + piece * 8;
#pragma unroll
  for (int i = 0; i < G2Z__ATT_STEP; i += TOGETHER) {
    int inside = row + y + i < from.T && piece * 8 < from.HS;
    const A *at = inside ? source : from.at;
    const int bytes = inside ? 16 : 0; /* the rest becomes zeros */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     to + (uint32_t)(i * HSP * 2)),
                 "l"(at), "r"(bytes)
                 : "memory");
    source += TOGETHER * from.stride;
  }
}

static __device__ inline void g2z__copies_commit(void) {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
static __device__ inline void g2z__copies_wait(void) {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* A lane's part of an address for ldmatrix.x4, which loads four 8x8 matrices. Each lane addresses
 * one of their 32 rows. */
struct g2z__reader {
  uint32_t row, swizzle; /* bytes */
};

/* B from tile[n][k], for two n-tiles: {b0, b1} of the first, {b0, b1} of the second. */
template <int HSP>
static __device__ inline g2z__reader g2z__reader_b(void) {
  int lane = g2z__lane(), row = lane % 8 + lane / 16 * 8;
  return {(uint32_t)(row * HSP * 2), (uint32_t)((lane / 8 % 2 ^ row % 8) * 16)};
}
/* B from tile[k][n], transposed on the way: the same four registers. */
template <int HSP>
static __device__ inline g2z__reader g2z__reader_b_transposed(void) {
  int lane = g2z__lane(), row = lane % 16;
  return {(uint32_t)(row * HSP * 2), (uint32_t)((lane / 16 ^ row % 8) * 16)};
}

/* Rows from `row`, columns from `column` on, both multiples of 16. */
template <int HSP>
static __device__ inline uint32_t g2z__tile_at(uint32_t tile, g2z__reader reader, int row,
                                               int column) {
  return tile + (uint32_t)(row * HSP * 2) + reader.row + (reader.swizzle ^ (uint32_t)(column * 2));
}

/* A lane's two ways to read a tile. */
template <int HSP>
struct g2z__readers {
  g2z__reader rows, transposed;
  __device__ inline g2z__readers(void)
      : rows(g2z__reader_b<HSP>()), transposed(g2z__reader_b_transposed<HSP>()) {}
};

static __device__ inline void g2z__read_b(uint32_t (&b)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(at)
               : "memory");
}
static __device__ inline void g2z__read_b_transposed(uint32_t (&b)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(at)
               : "memory");
}

/* ----- products of a warp ------------------------------------------------ */

/* c[m][n] += a[m] tile[rows]^T over HS: N / 8 tiles of scores of MT x 16 rows. */
template <typename A, int HSP, int MT, int N>
static __device__ inline void g2z__scores(float (&c)[MT][N / 8][4],
                                          const uint32_t (&a)[MT][HSP / 16][4], uint32_t tile,
                                          g2z__reader reader, int row) {
#pragma unroll
  for (int k = 0; k < HSP / 16; k++)
#pragma unroll
    for (int n = 0; n < N; n += 16) {
      uint32_t b[4];
      g2z__read_b(b, g2z__tile_at<HSP>(tile, reader, row + n, k * 16));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        g2z__mma<A>(c[m][n / 8], a[m][k], b[0], b[1]);
        g2z__mma<A>(c[m][n / 8 + 1], a[m][k], b[2], b[3]);
      }
    }
}

/* c[m] += a[m] tile[row..row+15]: sums over 16 rows of the tile. */
template <typename A, int HSP, int MT>
static __device__ inline void g2z__weighted(float (&c)[MT][HSP / 8][4], const uint32_t (&a)[MT][4],
                                            uint32_t tile, g2z__reader reader, int row) {
#pragma unroll
  for (int n = 0; n < HSP; n += 16) {
    uint32_t b[4];
    g2z__read_b_transposed(b, g2z__tile_at<HSP>(tile, reader, row, n));
#pragma unroll
    for (int m = 0; m < MT; m++) {
      g2z__mma<A>(c[m][n / 8], a[m], b[0], b[1]);
      g2z__mma<A>(c[m][n / 8 + 1], a[m], b[2], b[3]);
    }
  }
}

/* ----- dropout of a tile -------------------------------------------------
 * g2z__dropout_group draws for four elements at once. Here the lanes of a tile share its draws. */

struct g2z__att_drop {
  uint64_t seed, head;   /* head: element of query 0 and key 0 */
  uint32_t sequence, site, step, T;
  uint32_t least;        /* an element is kept if its bits are at least this */
  float kept;            /* 1 / (1 - probability); 0: dropout is off */
};

static __device__ inline g2z__att_drop g2z__att_drop_open(const g2z_dropout &dropout, int b, int h,
                                                          int T) {
  g2z__att_drop drop;
  drop.seed = dropout.seed;
  drop.head = (uint64_t)h * (uint64_t)T * (uint64_t)T;
  drop.sequence = dropout.first + (uint32_t)b * dropout.stride;
  drop.site = dropout.site;
  drop.step = (uint32_t)dropout.state->step;
  drop.T = (uint32_t)T;
  /* A uniform number is the upper 24 of 32 bits as a fraction. The bits are compared instead. */
  drop.least = (uint32_t)ceilf(dropout.probability * 16777216.0f) << 8;
  drop.kept = 1.0f / (1.0f - dropout.probability);
  return drop;
}

static __device__ inline void g2z__att_drop_group(float (&factors)[4], const g2z__att_drop &drop,
                                                  uint32_t group) {
  uint32_t counter[4] = {group, drop.sequence, drop.site, drop.step}, bits[4];
  g2z_philox(drop.seed, G2Z_RANDOM_DROPOUT, counter, bits);
#pragma unroll
  for (int i = 0; i < 4; i++) factors[i] = bits[i] >= drop.least ? drop.kept : 0.0f;
}

static __device__ inline float g2z__att_drop_one(const g2z__att_drop &drop, int query, int key) {
  uint64_t element = drop.head + (uint64_t)(uint32_t)query * drop.T + (uint32_t)key;
  float factors[4];
  g2z__att_drop_group(factors, drop, (uint32_t)(element / 4));
  float low = g2z__choose(element % 2, factors[1], factors[0]);
  float high = g2z__choose(element % 2, factors[3], factors[2]);
  return g2z__choose(element % 4 < 2, low, high);
}

typedef enum g2z__att_side { G2Z__ROWS_ARE_QUERIES, G2Z__ROWS_ARE_KEYS } g2z__att_side;

/* The factors of a C tile whose first element is (row, column). A draw yields the factors of four
 * neighbouring keys, a group. A group lies in one tile, because T is a multiple of 4 here. Lanes
 * that share groups draw one each and exchange. */
template <g2z__att_side SIDE>
static __device__ inline void g2z__att_drop_tile(float (&factors)[4], const g2z__att_drop &drop,
                                                 int row, int column) {
  int g = g2z__lane_row(), t = g2z__lane() % 4;
  uint32_t first = (uint32_t)(drop.head / 4), per_query = drop.T / 4;
  float drawn[4];
  if constexpr (SIDE == G2Z__ROWS_ARE_QUERIES) {
    /* Lanes t and t^1 share two groups: the even lane draws for row g, the odd one for g + 8. */
    uint32_t query = (uint32_t)(row + g + t % 2 * 8), key = (uint32_t)(column + t / 2 * 4);
    g2z__att_drop_group(drawn, drop, first + query * per_query + key / 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float give = g2z__choose(t % 2, drawn[i], drawn[i + 2]);
      float got = __shfl_xor_sync(G2Z__ALL_LANES, give, 1);
      factors[i] = g2z__choose(t % 2, got, drawn[i]);
      factors[i + 2] = g2z__choose(t % 2, drawn[i + 2], got);
    }
  } else {
    /* Four lanes, g % 4 = 0..3, share four groups, one each for c0, c1, c2 and c3. */
    uint32_t query = (uint32_t)(column + t * 2 + g % 2);
    uint32_t key = (uint32_t)(row + g % 4 / 2 * 8 + g / 4 * 4);
    g2z__att_drop_group(drawn, drop, first + query * per_query + key / 4);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = __float_as_uint(drawn[i]);
    g2z__transpose<4>(words);
#pragma unroll
    for (int i = 0; i < 4; i++) factors[i] = __uint_as_float(words[i]);
  }
}

/* Drops elements of a C tile whose rows are queries. */
static __device__ inline void g2z__att_drop_apply(float (&c)[4], const g2z__att_drop &drop, int row,
                                                  int column) {
  float factors[4];
  g2z__att_drop_tile<G2Z__ROWS_ARE_QUERIES>(factors, drop, row, column);
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] *= factors[i];
}

/* ----- kernels for tensor cores ------------------------------------------ */

/* Tiles of 16 rows per warp. With HS up to 64 a warp takes 32 rows, so that each piece it reads
 * from shared memory feeds two products. With a larger HS it takes 16, to save registers. */
template <int HSP>
static constexpr int g2z__att_mt = HSP == 64 ? 2 : 1;
template <int HSP>
static constexpr int g2z__att_threads = G2Z__ATT_ROWS / (16 * g2z__att_mt<HSP>) * 32;

/* One step of online softmax over a warp's rows and 64 keys: scores become probabilities relative
 * to each row's reference, `largest`. While all these probabilities are at most 2^8, the references
 * stay and earlier sums need no change. Otherwise the references become the largest scores and this
 * returns 1: the caller then multiplies its own earlier sums by `shrink`, a factor per row. */
template <int MT>
static __device__ inline int g2z__softmax_step(float (&s)[MT][G2Z__ATT_STEP / 8][4],
                                               float (&largest)[MT][2], float (&sum)[MT][2],
                                               float (&shrink)[MT][2], float scale2) {
  float top[MT][2];
  int grows = 0;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float most = s[m][0][half * 2];
#pragma unroll
      for (int n = 0; n < G2Z__ATT_STEP / 8; n++)
        most = fmaxf(most, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
      most = fmaxf(most, __shfl_xor_sync(G2Z__ALL_LANES, most, 1));
      most = fmaxf(most, __shfl_xor_sync(G2Z__ALL_LANES, most, 2));
      top[m][half] = fmaxf(most, largest[m][half]);
      grows |= (most - largest[m][half]) * scale2 > 8.0f;
    }
  grows = __any_sync(G2Z__ALL_LANES, grows);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (grows) {
        shrink[m][half] = g2z__exp2((largest[m][half] - top[m][half]) * scale2);
        largest[m][half] = top[m][half];
        sum[m][half] *= shrink[m][half];
      }
      float offset = largest[m][half] * scale2, added[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < G2Z__ATT_STEP / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float &p = s[m][n][half * 2 + i];
          p = g2z__exp2(p * scale2 - offset);
          added[i] += p;
        }
      sum[m][half] += added[0] + added[1];
    }
  return grows;
}

template <int HSP, int MT>
static __device__ inline void g2z__shrink(float (&o)[MT][HSP / 8][4],
                                          const float (&shrink)[MT][2]) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < HSP / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[m][n][i] *= shrink[m][i / 2];
}

/* Writes 16 rows of out and lse. */
template <int HSP, typename A>
static __device__ inline void g2z__att_finish(A *out, float *lse, float (&o)[HSP / 8][4],
                                              const float (&largest)[2], const float (&sum)[2],
                                              const g2z__head_place &at, int row, float scale) {
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = sum[half];
    total += __shfl_xor_sync(G2Z__ALL_LANES, total, 1);
    total += __shfl_xor_sync(G2Z__ALL_LANES, total, 2);
    inverse[half] = 1.0f / total;
    int query = row + g2z__lane_row() + half * 8;
    if (g2z__lane() % 4 == 0 && query < at.T)
      lse[(size_t)(at.b * at.NH + at.h) * (size_t)at.T + (size_t)query] =
          largest[half] * scale + logf(total);
  }
  g2z__store_c<HSP>(g2z__rows_of(out, at, 0, 1), o, row, inverse[0], inverse[1]);
}

/* No query sees a later key. */
template <int MT>
static __device__ inline void g2z__att_causal(float (&s)[MT][G2Z__ATT_STEP / 8][4], int row,
                                              int key0) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < G2Z__ATT_STEP / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int query = row + m * 16 + g2z__lane_row() + i / 2 * 8;
        if (key0 + n * 8 + g2z__lane_column() + i % 2 > query) s[m][n][i] = -INFINITY;
      }
}

/* g2z_k_attention_fwd: out = softmax(mask(Q K^T / sqrt(HS))) V, 128 queries of one (b,h) per block.
 *   out     [B,T,NH,HS] A out
 *   lse     [B,NH,T] f32 out   natural log of the sum of exp of the scaled scores
 *   qkv     [B,T,3,NH,HS] A in    HS % 8 == 0, HS <= HSP; 16-byte aligned
 * Math    fp32 scores and sums; exp2 of scores scaled by log2(e); P rounded to A for P V. Keys go
 *         upwards: the first block holds key 0, so no row's maximum is ever -infinity.
 * Launch  grid B*NH*ceil(T/128), the longest rows of a head first; 128 (HSP 64) or 256 threads;
 *         two stages of K and V: 32 or 64 KB of dynamic shared memory
 * Cost    2 * B*NH*T^2*HS flops: B=32, T=1024, NH=12, HS=64 is 51.5 GFLOP
 * Order   keys upwards in blocks of 64; bitwise repeatable
 * Source  FlashAttention-2, arXiv:2307.08691
 * Oracle  g2z__cpu_attention_fwd; test cuda_attention */
template <typename A, int HSP>
static __global__ void __launch_bounds__(g2z__att_threads<HSP>, HSP == 64 ? 2 : 1)
g2z_k_attention_fwd(A *out, float *lse, const A *qkv, g2z_dropout dropout, int T, int NH, int HS,
                    float scale) {
#if __CUDA_ARCH__ >= 800
  constexpr int MT = g2z__att_mt<HSP>, THREADS = g2z__att_threads<HSP>, STEP = G2Z__ATT_STEP;
  extern __shared__ __align__(128) unsigned char g2z__shared[];
  uint32_t tiles = (uint32_t)__cvta_generic_to_shared(g2z__shared);
  int blocks = (T + G2Z__ATT_ROWS - 1) / G2Z__ATT_ROWS, bh = (int)blockIdx.x / blocks;
  int block = blocks - 1 - (int)blockIdx.x % blocks, b = bh / NH, h = bh % NH;
  int row = block * G2Z__ATT_ROWS + (int)(threadIdx.x / G2Z__WARP) * 16 * MT;
  const g2z__head_place head = {b, h, T, NH, HS};
  auto q = g2z__rows_of(qkv, head, 0, 3), k = g2z__rows_of(qkv, head, 1, 3);
  auto v = g2z__rows_of(qkv, head, 2, 3);
  g2z__k_begin();
  g2z__att_drop drop = {};
  if (dropout.probability > 0) drop = g2z__att_drop_open(dropout, b, h, T);
  int steps = (min(T, (block + 1) * G2Z__ATT_ROWS) + STEP - 1) / STEP;
  g2z__load_tile<HSP, THREADS>(tiles, k, 0);
  g2z__load_tile<HSP, THREADS>(tiles + 2 * g2z__tile_bytes<HSP>, v, 0);
  g2z__copies_commit();
  uint32_t qa[MT][HSP / 16][4];
#pragma unroll
  for (int m = 0; m < MT; m++) g2z__load_a<HSP>(qa[m], q, row + m * 16);
  float o[MT][HSP / 8][4] = {}, largest[MT][2], sum[MT][2] = {};
#pragma unroll
  for (int m = 0; m < MT; m++) largest[m][0] = largest[m][1] = -INFINITY;
  g2z__reader reader = g2z__reader_b<HSP>(), transposed = g2z__reader_b_transposed<HSP>();
  for (int step = 0; step < steps; step++) {
    uint32_t k_tile = tiles + (uint32_t)(step % 2 * g2z__tile_bytes<HSP>);
    uint32_t v_tile = k_tile + 2 * g2z__tile_bytes<HSP>;
    g2z__copies_wait();
    __syncthreads(); /* this stage has arrived, and no thread still reads the other */
    if (step + 1 < steps) {
      uint32_t next = tiles + (uint32_t)((step + 1) % 2 * g2z__tile_bytes<HSP>);
      g2z__load_tile<HSP, THREADS>(next, k, (step + 1) * STEP);
      g2z__load_tile<HSP, THREADS>(next + 2 * g2z__tile_bytes<HSP>, v, (step + 1) * STEP);
      g2z__copies_commit();
    }
    int key0 = step * STEP;
    if (key0 >= row + 16 * MT) continue; /* all these keys are beyond this warp's queries */
    float s[MT][STEP / 8][4] = {};
    g2z__scores<A, HSP, MT, STEP>(s, qa, k_tile, reader, 0);
    if (key0 + STEP > row) g2z__att_causal<MT>(s, row, key0);
    float shrink[MT][2];
    if (g2z__softmax_step<MT>(s, largest, sum, shrink, scale * G2Z__LOG2E))
      g2z__shrink<HSP, MT>(o, shrink);
#pragma unroll
    for (int n = 0; n < STEP / 8; n += 2) {
      uint32_t p[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        if (drop.kept > 0) {
          g2z__att_drop_apply(s[m][n], drop, row + m * 16, key0 + n * 8);
          g2z__att_drop_apply(s[m][n + 1], drop, row + m * 16, key0 + n * 8 + 8);
        }
        g2z__as_a<A>(p[m], s[m][n], s[m][n + 1]);
      }
      g2z__weighted<A, HSP, MT>(o, p, v_tile, transposed, n * 8);
    }
  }
#pragma unroll
  for (int m = 0; m < MT; m++)
    g2z__att_finish<HSP>(out, lse, o[m], largest[m], sum[m], head, row + m * 16, scale);
#else
  (void)out, (void)lse, (void)qkv, (void)dropout, (void)T, (void)NH, (void)HS, (void)scale;
#endif
}

/* Adds column sums over the eight lanes that hold the same columns of C tiles. Before, sums[k] is a
 * lane's sum of column k % 2 of tile k / 2. After, each lane keeps N / 8 totals: sums[e] belongs to
 * column g2z__summed_column<N>(e). Each exchange halves the number of sums, which takes 14 shuffles
 * for N = 16 instead of 48. */
template <int N, int HALF = N / 2, int LANES = 16>
static __device__ inline void g2z__sum_lanes(float (&sums)[N]) {
  int high = g2z__lane() & LANES;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    float give = g2z__choose(high, sums[i], sums[i + HALF]);
    float keep = g2z__choose(high, sums[i + HALF], sums[i]);
    sums[i] = keep + __shfl_xor_sync(G2Z__ALL_LANES, give, LANES);
  }
  if constexpr (LANES > 4) g2z__sum_lanes<N, HALF / 2, LANES / 2>(sums);
}
template <int N>
static __device__ inline int g2z__summed_column(int e) {
  int lane = g2z__lane();
  int first = lane / 16 * (N / 2) + lane / 8 % 2 * (N / 4) + lane / 4 % 2 * (N / 8);
  return (first + e) / 2 * 8 + g2z__lane_column() + e % 2;
}

/* Writes column sums of the block's rows, added in the order of its warps. `shared` holds
 * [warps][HSP] floats. */
template <int HSP, int MT, int THREADS>
static __device__ inline void g2z__column_slab(float *to, float *shared,
                                               const float (&c)[MT][HSP / 8][4], int HS) {
  constexpr int WARPS = THREADS / 32, N = HSP / 4;
  float sums[N] = {};
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int m = 0; m < MT; m++) sums[n] += c[m][n / 2][n % 2] + c[m][n / 2][n % 2 + 2];
  g2z__sum_lanes(sums);
  __syncthreads(); /* no thread still reads tiles or the last sums */
#pragma unroll
  for (int e = 0; e < N / 8; e++)
    shared[(int)(threadIdx.x / 32) * HSP + g2z__summed_column<N>(e)] = sums[e];
  __syncthreads();
  for (int x = (int)threadIdx.x; x < HS; x += THREADS) {
    float sum = 0;
    for (int warp = 0; warp < WARPS; warp++) sum += shared[warp * HSP + x];
    to[x] = sum;
  }
}

/* A warp's queries in the dQ kernel: 16 MT rows from `row` on. */
template <int HSP, int MT>
struct g2z__dq_rows {
  uint32_t q[MT][HSP / 16][4], dout[MT][HSP / 16][4];
  float lse2[MT][2], d[MT][2];   /* lse * log2(e); the sum over HS of dout * out */
  float dq[MT][HSP / 8][4];
  int row;
};

/* A warp's step of the dQ kernel: 64 keys, 16 at a time, so that scores take few registers. */
template <typename A, int HSP, int MT>
static __device__ inline void
g2z__dq_step(g2z__dq_rows<HSP, MT> &own, uint32_t k_tile, uint32_t v_tile,
             const g2z__readers<HSP> &readers, const g2z__att_drop &drop, int key0, float scale2) {
  const int row = own.row, causal = key0 + G2Z__ATT_STEP > row;
#pragma unroll 1 /* unrolling takes registers and gains nothing */
  for (int key = 0; key < G2Z__ATT_STEP; key += 16) {
    if (causal && key0 + key >= row + 16 * MT) break;
    float s[MT][2][4] = {}, dp[MT][2][4] = {};
    g2z__scores<A, HSP, MT, 16>(s, own.q, k_tile, readers.rows, key);
    g2z__scores<A, HSP, MT, 16>(dp, own.dout, v_tile, readers.rows, key);
    uint32_t ds[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float factors[4];
        if (drop.kept > 0)
          g2z__att_drop_tile<G2Z__ROWS_ARE_QUERIES>(factors, drop, row + m * 16,
                                                    key0 + key + n * 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int x = key0 + key + n * 8 + g2z__lane_column() + i % 2;
          int y = row + m * 16 + g2z__lane_row() + i / 2 * 8;
          float p = g2z__exp2(s[m][n][i] * scale2 - own.lse2[m][i / 2]);
          if (causal && x > y) p = 0;
          if (drop.kept > 0) dp[m][n][i] *= factors[i];
          s[m][n][i] = p * (dp[m][n][i] - own.d[m][i / 2]);
        }
      }
      g2z__as_a<A>(ds[m], s[m][0], s[m][1]);
    }
    g2z__weighted<A, HSP, MT>(own.dq, ds, k_tile, readers.transposed, key);
  }
}

/* g2z_k_attention_bwd_q: dQ of 128 queries of one (b,h) per block, and the statistics for the next
 * kernel, g2z_k_attention_bwd_kv.
 *   dqkv    [B,T,3,NH,HS] A out   part 0
 *   stats   [B,NH,T] float2 out   {lse * log2(e), sum over HS of dout * out}
 *   sums    [slabs,C] f32 out     columns of part 0; slab = b*ceil(T/128) + block
 * Math    P = exp2(S - lse), dS = P (dP - D) rounded to A, dQ = dS K / sqrt(HS) in fp32
 * Launch  as g2z_k_attention_fwd
 * Cost    three products: 3 * B*NH*T^2*HS flops
 * Order   keys upwards in blocks of 64
 * Oracle  g2z__cpu_attention_bwd; test cuda_attention */
template <typename A, int HSP>
static __global__ void __launch_bounds__(g2z__att_threads<HSP>, HSP == 64 ? 2 : 1)
g2z_k_attention_bwd_q(A *dqkv, float2 *stats, float *sums, const A *dout, const A *out,
                      const float *lse, const A *qkv, g2z_dropout dropout, int T, int NH, int HS,
                      float scale) {
#if __CUDA_ARCH__ >= 800
  constexpr int MT = g2z__att_mt<HSP>, THREADS = g2z__att_threads<HSP>, STEP = G2Z__ATT_STEP;
  extern __shared__ __align__(128) unsigned char g2z__shared[];
  uint32_t tiles = (uint32_t)__cvta_generic_to_shared(g2z__shared);
  int blocks = (T + G2Z__ATT_ROWS - 1) / G2Z__ATT_ROWS, bh = (int)blockIdx.x / blocks;
  int block = blocks - 1 - (int)blockIdx.x % blocks, b = bh / NH, h = bh % NH;
  int row = block * G2Z__ATT_ROWS + (int)(threadIdx.x / G2Z__WARP) * 16 * MT;
  const g2z__head_place head = {b, h, T, NH, HS};
  auto q = g2z__rows_of(qkv, head, 0, 3), k = g2z__rows_of(qkv, head, 1, 3);
  auto v = g2z__rows_of(qkv, head, 2, 3);
  auto o = g2z__rows_of(out, head, 0, 1), g = g2z__rows_of(dout, head, 0, 1);
  g2z__k_begin();
  g2z__att_drop drop = {};
  if (dropout.probability > 0) drop = g2z__att_drop_open(dropout, b, h, T);
  int steps = (min(T, (block + 1) * G2Z__ATT_ROWS) + STEP - 1) / STEP;
  g2z__load_tile<HSP, THREADS>(tiles, k, 0);
  g2z__load_tile<HSP, THREADS>(tiles + 2 * g2z__tile_bytes<HSP>, v, 0);
  g2z__copies_commit();
  g2z__dq_rows<HSP, MT> own = {};
  own.row = row;
#pragma unroll
  for (int m = 0; m < MT; m++) {
    auto &d = own.d[m]; /* for rows g and g + 8 */
    g2z__load_a<HSP>(own.q[m], o, row + m * 16); /* `out` lies there until d is known */
    g2z__load_a<HSP>(own.dout[m], g, row + m * 16);
#pragma unroll
    for (int part = 0; part < HSP / 16; part++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 x = g2z__pair_of<A>::unpack(own.dout[m][part][i]);
        float2 y = g2z__pair_of<A>::unpack(own.q[m][part][i]);
        d[i % 2] += x.x * y.x + x.y * y.y;
      }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      d[half] += __shfl_xor_sync(G2Z__ALL_LANES, d[half], 1);
      d[half] += __shfl_xor_sync(G2Z__ALL_LANES, d[half], 2);
    }
    g2z__load_a<HSP>(own.q[m], q, row + m * 16);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int query = row + m * 16 + g2z__lane_row() + half * 8;
      size_t at = (size_t)bh * (size_t)T + (size_t)query;
      own.lse2[m][half] = query < T ? lse[at] * G2Z__LOG2E : 0.0f;
      if (g2z__lane() % 4 == 0 && query < T) stats[at] = make_float2(own.lse2[m][half], d[half]);
    }
  }
  const g2z__readers<HSP> readers;
  for (int step = 0; step < steps; step++) {
    uint32_t k_tile = tiles + (uint32_t)(step % 2 * g2z__tile_bytes<HSP>);
    uint32_t v_tile = k_tile + 2 * g2z__tile_bytes<HSP>;
    g2z__copies_wait();
    __syncthreads(); /* this stage has arrived, and no thread still reads the other */
    if (step + 1 < steps) {
      uint32_t next = tiles + (uint32_t)((step + 1) % 2 * g2z__tile_bytes<HSP>);
      g2z__load_tile<HSP, THREADS>(next, k, (step + 1) * STEP);
      g2z__load_tile<HSP, THREADS>(next + 2 * g2z__tile_bytes<HSP>, v, (step + 1) * STEP);
      g2z__copies_commit();
    }
    g2z__dq_step<A, HSP>(own, k_tile, v_tile, readers, drop, step * STEP, scale * G2Z__LOG2E);
  }
  auto to = g2z__rows_of(dqkv, head, 0, 3);
#pragma unroll
  for (int m = 0; m < MT; m++) g2z__store_c<HSP>(to, own.dq[m], row + m * 16, scale, scale);
  size_t slab = (size_t)b * (size_t)blocks + (size_t)block;
  g2z__column_slab<HSP, MT, THREADS>(sums + slab * (size_t)(NH * HS) + (size_t)(h * HS),
                                     reinterpret_cast<float *>(g2z__shared), own.dq, HS);
#else
  (void)dqkv, (void)stats, (void)sums, (void)dout, (void)out, (void)lse, (void)qkv;
  (void)dropout, (void)T, (void)NH, (void)HS, (void)scale;
#endif
}

/* 64 queries in shared memory. */
struct g2z__query_tiles {
  uint32_t q, dout;
  const float2 *stats;
};

/* A warp's 16 keys in the dK and dV kernel, from `row` on. */
template <int HSP>
struct g2z__dkv_rows {
  uint32_t k[1][HSP / 16][4], v[1][HSP / 16][4];
  int row;
};

/* A warp's step of the dK and dV kernel: its 16 keys and 64 queries. It computes S^T and dP^T, so
 * that P^T and dS^T already lie in registers as A of the next two products. */
template <typename A, int HSP>
static __device__ inline void
g2z__dkv_step(float (&dk)[1][HSP / 8][4], float (&dv)[1][HSP / 8][4],
              const g2z__dkv_rows<HSP> &keys, g2z__query_tiles tiles,
              const g2z__readers<HSP> &readers, const g2z__att_drop &drop, int query0,
              float scale2) {
  const int row = keys.row, causal = query0 < row + 16;
#pragma unroll 1 /* unrolling takes registers and gains nothing */
  for (int query = 0; query < G2Z__ATT_STEP; query += 16) {
    if (query0 + query < row) continue;
    float s[1][2][4] = {}, dp[1][2][4] = {};
    g2z__scores<A, HSP, 1, 16>(s, keys.k, tiles.q, readers.rows, query);
    g2z__scores<A, HSP, 1, 16>(dp, keys.v, tiles.dout, readers.rows, query);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float2 *stats = tiles.stats + query + n * 8 + g2z__lane_column();
      float4 two = *reinterpret_cast<const float4 *>(stats); /* {lse2, D} of 2t and 2t + 1 */
      float factors[4];
      if (drop.kept > 0)
        g2z__att_drop_tile<G2Z__ROWS_ARE_KEYS>(factors, drop, row, query0 + query + n * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int x = query0 + query + n * 8 + g2z__lane_column() + i % 2;
        int y = row + g2z__lane_row() + i / 2 * 8;
        float p = g2z__exp2(s[0][n][i] * scale2 - (i % 2 ? two.z : two.x));
        if (causal && y > x) p = 0;
        s[0][n][i] = p;
        if (drop.kept > 0) {
          s[0][n][i] *= factors[i];
          dp[0][n][i] *= factors[i];
        }
        dp[0][n][i] = p * (dp[0][n][i] - (i % 2 ? two.w : two.y));
      }
    }
    uint32_t a[1][4];
    g2z__as_a<A>(a[0], s[0][0], s[0][1]);
    g2z__weighted<A, HSP, 1>(dv, a, tiles.dout, readers.transposed, query);
    g2z__as_a<A>(a[0], dp[0][0], dp[0][1]);
    g2z__weighted<A, HSP, 1>(dk, a, tiles.q, readers.transposed, query);
  }
}

/* Starts copying the statistics of 64 queries. They are zero beyond T, as dout is. */
static __device__ inline void g2z__load_stats(float2 *to, const float2 *from, int row, int T) {
  if (threadIdx.x >= G2Z__ATT_STEP) return;
  int y = row + (int)threadIdx.x, bytes = y < T ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(
                   (uint32_t)__cvta_generic_to_shared(to + threadIdx.x)),
               "l"(from + (y < T ? y : 0)), "r"(bytes)
               : "memory");
}

#define G2Z__ATT_KV_THREADS 128  /* 4 warps of 16 keys */

/* g2z_k_attention_bwd_kv: dK and dV of 64 keys of one (b,h) per block.
 *   dqkv    [B,T,3,NH,HS] A out   parts 1 and 2
 *   sums    [slabs,2C] f32 out    columns of parts 1 and 2; slab = b*ceil(T/64) + block
 *   stats   [B,NH,T] float2 in    of g2z_k_attention_bwd_q
 * Math    dV = P^T dout, dK = dS^T Q / sqrt(HS) in fp32; P and dS rounded to A
 * Launch  grid B*NH*ceil(T/64), the longest columns of a head first; 128 threads; two stages of Q,
 *         dout and stats: 33 or 65 KB of dynamic shared memory
 * Cost    four products: 4 * B*NH*T^2*HS flops
 * Order   queries upwards in blocks of 64
 * Oracle  g2z__cpu_attention_bwd; test cuda_attention */
template <typename A, int HSP>
static __global__ void __launch_bounds__(G2Z__ATT_KV_THREADS, HSP == 64 ? 3 : 2)
g2z_k_attention_bwd_kv(A *dqkv, float *sums, const float2 *stats, const A *dout, const A *qkv,
                       g2z_dropout dropout, int T, int NH, int HS, float scale) {
#if __CUDA_ARCH__ >= 800
  constexpr int THREADS = G2Z__ATT_KV_THREADS, STEP = G2Z__ATT_STEP;
  extern __shared__ __align__(128) unsigned char g2z__shared[];
  uint32_t shared = (uint32_t)__cvta_generic_to_shared(g2z__shared);
  float2 *stats_tiles = reinterpret_cast<float2 *>(g2z__shared + 4 * g2z__tile_bytes<HSP>);
  int blocks = (T + STEP - 1) / STEP, bh = (int)blockIdx.x / blocks;
  int block = (int)blockIdx.x % blocks, b = bh / NH, h = bh % NH;
  int row = block * STEP + (int)(threadIdx.x / G2Z__WARP) * 16;
  const g2z__head_place head = {b, h, T, NH, HS};
  auto q = g2z__rows_of(qkv, head, 0, 3), k = g2z__rows_of(qkv, head, 1, 3);
  auto v = g2z__rows_of(qkv, head, 2, 3), g = g2z__rows_of(dout, head, 0, 1);
  stats += (size_t)bh * (size_t)T;
  g2z__k_begin();
  g2z__att_drop drop = {};
  if (dropout.probability > 0) drop = g2z__att_drop_open(dropout, b, h, T);
  g2z__load_tile<HSP, THREADS>(shared, q, block * STEP);
  g2z__load_tile<HSP, THREADS>(shared + 2 * g2z__tile_bytes<HSP>, g, block * STEP);
  g2z__load_stats(stats_tiles, stats, block * STEP, T);
  g2z__copies_commit();
  g2z__dkv_rows<HSP> keys;
  float dk[1][HSP / 8][4] = {}, dv[1][HSP / 8][4] = {};
  keys.row = row;
  g2z__load_a<HSP>(keys.k[0], k, row);
  g2z__load_a<HSP>(keys.v[0], v, row);
  const g2z__readers<HSP> readers;
  for (int step = block; step < blocks; step++) {
    int stage = (step - block) % 2;
    uint32_t q_tile = shared + (uint32_t)(stage * g2z__tile_bytes<HSP>);
    const g2z__query_tiles tiles = {q_tile, q_tile + 2 * g2z__tile_bytes<HSP>,
                                    stats_tiles + stage * STEP};
    g2z__copies_wait();
    __syncthreads(); /* this stage has arrived, and no thread still reads the other */
    if (step + 1 < blocks) {
      uint32_t next = shared + (uint32_t)((1 - stage) * g2z__tile_bytes<HSP>);
      g2z__load_tile<HSP, THREADS>(next, q, (step + 1) * STEP);
      g2z__load_tile<HSP, THREADS>(next + 2 * g2z__tile_bytes<HSP>, g, (step + 1) * STEP);
      g2z__load_stats(stats_tiles + (1 - stage) * STEP, stats, (step + 1) * STEP, T);
      g2z__copies_commit();
    }
    g2z__dkv_step<A, HSP>(dk, dv, keys, tiles, readers, drop, step * STEP, scale * G2Z__LOG2E);
  }
  auto dk_rows = g2z__rows_of(dqkv, head, 1, 3), dv_rows = g2z__rows_of(dqkv, head, 2, 3);
  g2z__store_c<HSP>(dk_rows, dk[0], row, scale, scale);
  g2z__store_c<HSP>(dv_rows, dv[0], row, 1.0f, 1.0f);
  size_t C = (size_t)(NH * HS), slab = (size_t)b * (size_t)blocks + (size_t)block;
  float *to = sums + slab * 2 * C + (size_t)(h * HS);
  float *floats = reinterpret_cast<float *>(g2z__shared);
  g2z__column_slab<HSP, 1, THREADS>(to, floats, dk, HS);
  g2z__column_slab<HSP, 1, THREADS>(to + C, floats, dv, HS);
#else
  (void)dqkv, (void)sums, (void)stats, (void)dout, (void)qkv, (void)dropout, (void)T, (void)NH;
  (void)HS, (void)scale;
#endif
}

/* ----- kernels in plain fp32 ---------------------------------------------
 * For fp32 and tf32, for GPUs before sm_80, and for dropout if T is no multiple of 4. A thread owns
 * one row of one (b,h), a query or a key, in registers, and walks over the others.
 * G2Z__PLAIN_STEP of them lie in shared memory at a time; all threads of a block read the same row
 * at a time. The tensors' type is an argument, because these kernels take nvcc long. */

#define G2Z__PLAIN_ROWS 128      /* rows per block, one thread each */
#define G2Z__PLAIN_STEP 32
#define G2Z__PLAIN_GROUP 8       /* keys per softmax step of a thread */

/* A tensor of numbers of this type. */
struct g2z__plain_tensor {
  void *base;
  cudaDataType_t type;
};

/* A head's rows in a tensor: T rows of HS numbers. */
struct g2z__plain_rows {
  g2z__plain_tensor in;
  size_t first, stride;          /* numbers before row 0; from row to row */
  int T, HS;
};

static __device__ inline g2z__plain_rows g2z__plain_rows_of(g2z__plain_tensor in,
                                                            g2z__head_place at, int part,
                                                            int parts) {
  const size_t stride = g2z__head_stride(at, parts);
  return {in, g2z__head_first(at, part, parts), stride, at.T, at.HS};
}

/* Numbers x to x + 3 of row y; zero outside. */
static __device__ inline float4 g2z__plain_get(const g2z__plain_rows &from, int y, int x) {
  if (y >= from.T || x >= from.HS) return make_float4(0, 0, 0, 0);
  const size_t at = from.first + (size_t)y * from.stride + (size_t)x;
  if (from.in.type == CUDA_R_32F) return *(const float4 *)((const float *)from.in.base + at);
  const uint2 two = *(const uint2 *)((const uint16_t *)from.in.base + at);
  float2 low = g2z__pair_of<__nv_bfloat16>::unpack(two.x);
  float2 high = g2z__pair_of<__nv_bfloat16>::unpack(two.y);
  if (from.in.type == CUDA_R_16F) {
    low = g2z__pair_of<__half>::unpack(two.x);
    high = g2z__pair_of<__half>::unpack(two.y);
  }
  return make_float4(low.x, low.y, high.x, high.y);
}

static __device__ inline void g2z__plain_put(const g2z__plain_rows &to, int y, int x, float4 four) {
  if (y >= to.T || x >= to.HS) return;
  const size_t at = to.first + (size_t)y * to.stride + (size_t)x;
  if (to.in.type == CUDA_R_32F) {
    *(float4 *)((float *)to.in.base + at) = four;
    return;
  }
  uint2 two;
  two.x = g2z__pair_of<__nv_bfloat16>::pack(four.x, four.y);
  two.y = g2z__pair_of<__nv_bfloat16>::pack(four.z, four.w);
  if (to.in.type == CUDA_R_16F) {
    two.x = g2z__pair_of<__half>::pack(four.x, four.y);
    two.y = g2z__pair_of<__half>::pack(four.z, four.w);
  }
  *(uint2 *)((uint16_t *)to.in.base + at) = two;
}

/* Copies rows [y, y + G2Z__PLAIN_STEP) to shared memory. */
template <int HSP>
static __device__ inline void g2z__plain_tile(float (&tile)[G2Z__PLAIN_STEP][HSP],
                                              const g2z__plain_rows &from, int y) {
#pragma unroll 1
  for (int i = (int)threadIdx.x * 4; i < G2Z__PLAIN_STEP * HSP; i += G2Z__PLAIN_ROWS * 4)
    *(float4 *)(tile[0] + i) = g2z__plain_get(from, y + i / HSP, i % HSP);
}

/* Row y + threadIdx.x, through shared memory. */
template <int HSP>
static __device__ inline void g2z__plain_load(float (&row)[HSP],
                                              float (&tile)[G2Z__PLAIN_STEP][HSP],
                                              const g2z__plain_rows &from, int y) {
#pragma unroll 1
  for (int part = 0; part < G2Z__PLAIN_ROWS; part += G2Z__PLAIN_STEP) {
    __syncthreads();
    g2z__plain_tile<HSP>(tile, from, y + part);
    __syncthreads();
    const int mine = (int)threadIdx.x - part;
    if (mine < 0 || mine >= G2Z__PLAIN_STEP) continue;
#pragma unroll
    for (int x = 0; x < HSP; x++) row[x] = tile[mine][x];
  }
}

/* Stores row y + threadIdx.x, multiplied by `factor`, through shared memory. */
template <int HSP>
static __device__ inline void g2z__plain_store(const g2z__plain_rows &to,
                                               float (&tile)[G2Z__PLAIN_STEP][HSP],
                                               const float (&row)[HSP], int y, float factor) {
#pragma unroll 1
  for (int part = 0; part < G2Z__PLAIN_ROWS; part += G2Z__PLAIN_STEP) {
    const int mine = (int)threadIdx.x - part;
    __syncthreads();
    if (mine >= 0 && mine < G2Z__PLAIN_STEP)
#pragma unroll
      for (int x = 0; x < HSP; x++) tile[mine][x] = row[x] * factor;
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < G2Z__PLAIN_STEP * HSP; i += G2Z__PLAIN_ROWS * 4)
      g2z__plain_put(to, y + part + i / HSP, i % HSP, *(const float4 *)(tile[0] + i));
  }
}

/* Four independent sums, so that additions overlap. */
template <int HSP>
static __device__ inline float g2z__plain_dot(const float (&x)[HSP], const float (&y)[HSP]) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int d = 0; d < HSP; d += 4) {
    float4 four = *reinterpret_cast<const float4 *>(&y[d]);
    sum.x += x[d] * four.x;
    sum.y += x[d + 1] * four.y;
    sum.z += x[d + 2] * four.z;
    sum.w += x[d + 3] * four.w;
  }
  return sum.x + sum.y + (sum.z + sum.w);
}

/* to += weight * row */
template <int HSP>
static __device__ inline void g2z__plain_add(float (&to)[HSP], float weight,
                                             const float (&row)[HSP]) {
#pragma unroll
  for (int d = 0; d < HSP; d += 4) {
    float4 four = *reinterpret_cast<const float4 *>(&row[d]);
    to[d] += weight * four.x;
    to[d + 1] += weight * four.y;
    to[d + 2] += weight * four.z;
    to[d + 3] += weight * four.w;
  }
}

/* Bit i is set if dropout keeps key + i, for a group of keys. They share up to three draws. */
static __device__ inline unsigned g2z__plain_kept(const g2z__att_drop &drop, int query, int key) {
  const uint64_t element = drop.head + (uint64_t)(uint32_t)query * drop.T + (uint32_t)key;
  const uint32_t before = (uint32_t)(element % 4);
  unsigned bits = 0;
#pragma unroll 1
  for (uint32_t at = 0; at < before + G2Z__PLAIN_GROUP; at += 4) {
    float factors[4];
    g2z__att_drop_group(factors, drop, (uint32_t)(element / 4) + at / 4);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) bits |= (factors[i] > 0 ? 1u : 0u) << (at + i);
  }
  return bits >> before;
}

/* g2z_k_attention_plain_fwd: g2z_k_attention_fwd in fp32 arithmetic, a query per thread.
 * Launch  grid B*NH*ceil(T/128), the longest rows of a head first; 128 threads
 * Order   keys upwards in groups of 8; P is not rounded
 * Oracle  g2z__cpu_attention_fwd; test cuda_attention */
template <int HSP>
static __global__ void __launch_bounds__(G2Z__PLAIN_ROWS)
g2z_k_attention_plain_fwd(g2z__plain_tensor out, float *lse, g2z__plain_tensor qkv,
                          g2z_dropout dropout, int T, int NH, int HS, float scale) {
  constexpr int STEP = G2Z__PLAIN_STEP, GROUP = G2Z__PLAIN_GROUP;
  __shared__ alignas(16) float k_tile[STEP][HSP], v_tile[STEP][HSP];
  int blocks = (T + G2Z__PLAIN_ROWS - 1) / G2Z__PLAIN_ROWS, bh = (int)blockIdx.x / blocks;
  int first = (blocks - 1 - (int)blockIdx.x % blocks) * G2Z__PLAIN_ROWS, b = bh / NH, h = bh % NH;
  int query = first + (int)threadIdx.x;
  const g2z__head_place head = {b, h, T, NH, HS};
  const g2z__plain_rows k = g2z__plain_rows_of(qkv, head, 1, 3);
  const g2z__plain_rows v = g2z__plain_rows_of(qkv, head, 2, 3);
  g2z__k_begin();
  g2z__att_drop drop;
  if (dropout.probability > 0) drop = g2z__att_drop_open(dropout, b, h, T);
  float q[HSP], o[HSP] = {}, largest = -INFINITY, sum = 0;
  g2z__plain_load<HSP>(q, k_tile, g2z__plain_rows_of(qkv, head, 0, 3), first);
  for (int key0 = 0; key0 < min(T, first + G2Z__PLAIN_ROWS); key0 += STEP) {
    __syncthreads(); /* all threads have read the last tiles */
    g2z__plain_tile<HSP>(k_tile, k, key0);
    g2z__plain_tile<HSP>(v_tile, v, key0);
    __syncthreads();
    for (int j = 0; j < STEP && key0 + j <= query; j += GROUP) { /* no group is fully masked */
      float s[GROUP], top = largest;
      unsigned kept = 0;
      if (dropout.probability > 0) kept = g2z__plain_kept(drop, query, key0 + j);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        s[i] = g2z__plain_dot<HSP>(q, k_tile[j + i]) * scale;
        if (key0 + j + i > query) s[i] = -INFINITY;
        top = fmaxf(top, s[i]);
      }
      float shrink = expf(largest - top);
      largest = top;
      sum *= shrink;
#pragma unroll
      for (int d = 0; d < HSP; d++) o[d] *= shrink;
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        float p = expf(s[i] - top);
        sum += p;
        if (dropout.probability > 0) p *= kept >> i & 1 ? drop.kept : 0.0f;
        g2z__plain_add<HSP>(o, p, v_tile[j + i]);
      }
    }
  }
  if (query < T) lse[(size_t)bh * (size_t)T + (size_t)query] = largest + logf(sum);
  g2z__plain_store<HSP>(g2z__plain_rows_of(out, head, 0, 1), k_tile, o, first, 1.0f / sum);
}

typedef enum g2z__plain_part { G2Z__PLAIN_DQ, G2Z__PLAIN_DK, G2Z__PLAIN_DV } g2z__plain_part;

/* g2z_k_attention_plain_bwd: one part of dqkv. DQ runs first, with a query per thread, and leaves
 * stats {lse, sum of dout * out}; DK and DV read them, with a key per thread.
 * Math    P = exp(S - lse), dS = P (dP - D): dQ = dS K, dK = dS^T Q, dV = P^T dout, in fp32
 * Launch  grid B*NH*ceil(T/128), 128 threads
 * Cost    three products for DQ and DK each, two for DV
 * Order   keys, or queries, upwards
 * Oracle  g2z__cpu_attention_bwd; test cuda_attention */
template <int HSP, g2z__plain_part PART>
static __global__ void __launch_bounds__(G2Z__PLAIN_ROWS)
g2z_k_attention_plain_bwd(g2z__plain_tensor dqkv, float2 *stats, g2z__plain_tensor dout,
                          g2z__plain_tensor out, const float *lse, g2z__plain_tensor qkv,
                          g2z_dropout dropout, int T, int NH, int HS, float scale) {
  constexpr int STEP = G2Z__PLAIN_STEP;
  constexpr bool QUERIES = PART == G2Z__PLAIN_DQ; /* a thread owns a query; else a key */
  __shared__ alignas(16) float x_tile[STEP][HSP], y_tile[STEP][HSP];
  __shared__ float2 stats_tile[STEP];
  int blocks = (T + G2Z__PLAIN_ROWS - 1) / G2Z__PLAIN_ROWS, bh = (int)blockIdx.x / blocks;
  int first = (int)blockIdx.x % blocks * G2Z__PLAIN_ROWS, row = first + (int)threadIdx.x;
  int b = bh / NH, h = bh % NH;
  const g2z__head_place head = {b, h, T, NH, HS};
  const g2z__plain_rows q = g2z__plain_rows_of(qkv, head, 0, 3);
  const g2z__plain_rows k = g2z__plain_rows_of(qkv, head, 1, 3);
  const g2z__plain_rows v = g2z__plain_rows_of(qkv, head, 2, 3);
  const g2z__plain_rows g = g2z__plain_rows_of(dout, head, 0, 1);
  stats += (size_t)bh * (size_t)T;
  g2z__k_begin();
  g2z__att_drop drop;
  if (dropout.probability > 0) drop = g2z__att_drop_open(dropout, b, h, T);
  float x[HSP], y[HSP], sum[HSP];
  float2 own = make_float2(0, 0);
  g2z__plain_load<HSP>(x, x_tile, QUERIES ? q : k, first);
  if (PART != G2Z__PLAIN_DV) g2z__plain_load<HSP>(y, x_tile, QUERIES ? g : v, first);
  if (QUERIES) {
    g2z__plain_load<HSP>(sum, x_tile, g2z__plain_rows_of(out, head, 0, 1), first);
    if (row < T) {
      own = make_float2(lse[(size_t)bh * (size_t)T + (size_t)row], g2z__plain_dot<HSP>(y, sum));
      stats[row] = own;
    }
  }
#pragma unroll
  for (int d = 0; d < HSP; d++) sum[d] = 0;
  int begin = first, end = T; /* queries that may see the block's keys */
  if (QUERIES) { /* keys that the block's queries may see */
    begin = 0;
    end = min(T, first + G2Z__PLAIN_ROWS);
  }
  for (int at = begin; at < end; at += STEP) {
    __syncthreads(); /* all threads have read the last tiles */
    g2z__plain_tile<HSP>(x_tile, QUERIES ? k : q, at);
    g2z__plain_tile<HSP>(y_tile, QUERIES ? v : g, at);
    if (!QUERIES && threadIdx.x < STEP)
      stats_tile[threadIdx.x] =
          at + (int)threadIdx.x < T ? stats[at + (int)threadIdx.x] : make_float2(0, 0);
    __syncthreads();
#pragma unroll 2
    for (int j = 0; j < STEP; j++) {
      int query = at + j, key = row;
      if (QUERIES) {
        query = row;
        key = at + j;
      }
      if (key > query) continue;
      float2 stat = QUERIES ? own : stats_tile[j];
      float weight = expf(g2z__plain_dot<HSP>(x, x_tile[j]) * scale - stat.x);
      float factor = dropout.probability > 0 ? g2z__att_drop_one(drop, query, key) : 1.0f;
      if constexpr (PART == G2Z__PLAIN_DV) {
        g2z__plain_add<HSP>(sum, weight * factor, y_tile[j]);
      } else {
        weight *= g2z__plain_dot<HSP>(y, y_tile[j]) * factor - stat.y;
        g2z__plain_add<HSP>(sum, weight, x_tile[j]);
      }
    }
  }
  g2z__plain_store<HSP>(g2z__plain_rows_of(dqkv, head, (int)PART, 3), x_tile, sum, first,
                        PART == G2Z__PLAIN_DV ? 1.0f : scale);
}

/* ===== >>k41 attention on Hopper =========================================
 * In:  room k40's arguments, with HS = 64, no dropout, fp16 or bf16, on sm_90a.
 * Out: room k40's results within the same error bounds; only the order of the sums differs.
 * Law: a tile is 64 rows of 128 bytes. The TMA's 128-byte swizzle is the swizzle of room k40: piece
 *      p of row r lies at p ^ (r % 8). wgmma's accumulators lie in registers as mma.sync's C does.
 *
 * wgmma runs while its warps do something else, and one tile in shared memory feeds a whole
 * warpgroup. Tiles come by TMA straight from the packed tensors; rows beyond T arrive as zeros.
 * Each stage has two mbarriers, "full" (its bytes have landed) and "empty" (all its readers are
 * done). The n-th use of a stage waits for phase n.
 *
 * HAZARD   A branch, a shortage of registers, or zeros written to accumulators between two products
 *          make ptxas wait for each product: the kernels then take twice as long. ptxas reports
 *          it: nvcc -Xptxas -v must print no C7510 to C7520 for these kernels. */

#define G2Z__TILE_BYTES 8192     /* 64 rows of 64 numbers of 2 bytes */
static_assert(G2Z__TILE_BYTES == g2z__tile_bytes<64>, "room k40's readers read these tiles too");

/* Without wgmma the kernels below are empty and allow one warp per block. g2z_k_probe has the same
 * limit, which g2z__cuda_open_gpu reads. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define G2Z__HOPPER_THREADS(threads) threads
#else
#define G2Z__HOPPER_THREADS(threads) 32
#endif

/* ----- barriers and copies ----------------------------------------------- */

static __device__ inline uint32_t g2z__shared_at(const void *at) {
  return (uint32_t)__cvta_generic_to_shared(at);
}
static __device__ inline void g2z__barrier_init(const uint64_t *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(g2z__shared_at(barrier)),
               "r"(arrivals)
               : "memory");
}
static __device__ inline void g2z__barrier_arrive(const uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(g2z__shared_at(barrier))
               : "memory");
}
/* One arrival per warp, after all its lanes. */
static __device__ inline void g2z__barrier_arrive_warp(const uint64_t *barrier) {
  __syncwarp();
  if (g2z__lane() == 0) g2z__barrier_arrive(barrier);
}
static __device__ inline void g2z__barrier_expect(const uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   g2z__shared_at(barrier)),
               "r"(bytes)
               : "memory");
}
static __device__ inline void g2z__barrier_wait(const uint64_t *barrier, uint32_t parity) {
  uint32_t at = g2z__shared_at(barrier), done;
  do {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
  } while (!done);
}

/* The shuffle shows the compiler that a warpgroup does not diverge, so wgmma may stay in flight
 * across branches. */
static __device__ inline int g2z__warpgroup(void) {
  return __shfl_sync(G2Z__ALL_LANES, (int)(threadIdx.x / 128), 0);
}

/* Waits, then brings the lanes together: the warp's next instruction may need all of them. */
static __device__ inline void g2z__barrier_wait_warp(const uint64_t *barrier, uint32_t parity) {
  g2z__barrier_wait(barrier, parity);
  __syncwarp();
}
/* A barrier for one warpgroup alone. */
static __device__ inline void g2z__barrier_group(void) {
  __syncwarp();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + g2z__warpgroup()) : "memory");
}

/* The stage of a stream's current tile, and the phase of that stage's barriers. */
template <int STAGES>
struct g2z__ring {
  int stage;
  uint32_t phase;
  __device__ inline void next() {
    if (++stage < STAGES) return;
    stage = 0;
    phase ^= 1;
  }
};

/* Cache hints for L2: createpolicy's encodings, as in CUTLASS. Backward uses 100 MB at a time, more
 * than fits. dQ's scratch has priority, then a head's last queries, which most keys read. */
#define G2Z__EVICT_NORMAL 0x1000000000000000ull
#define G2Z__EVICT_FIRST 0x12f0000000000000ull
#define G2Z__EVICT_LAST 0x14f0000000000000ull

/* Copies 64 rows from `row` on of sequence `b`; `head` counts all heads of a token. */
static __device__ inline void g2z__copy_tile(uint32_t to, const CUtensorMap *map, int head, int row,
                                             int b, const uint64_t *full, uint64_t keep) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {0, %2, %3, %4}], [%5], %6;" ::"r"(to),
               "l"(map), "r"(head), "r"(row), "r"(b), "r"(g2z__shared_at(full)),
               "l"(keep)
               : "memory");
}

/* Copies a box of a matrix. */
static __device__ inline void g2z__copy_box(uint32_t to, const CUtensorMap *map, int column,
                                            int row, const uint64_t *full) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(map), "r"(column), "r"(row), "r"(g2z__shared_at(full))
               : "memory");
}

/* ----- wgmma -------------------------------------------------------------
 * A tile as an operand is read by rows if its rows are m or n and the sum runs over its columns; by
 * columns if the sum runs over its rows. Groups of 8 rows are 1024 bytes apart both ways. 16 terms
 * of the sum are 32 bytes of a row, or 16 rows. */

static __device__ inline uint64_t g2z__operand(uint32_t tile, int bytes) {
  uint32_t low = ((tile & 0x3ffffu) >> 4 | 1024u >> 4 << 16) + (uint32_t)(bytes / 16);
  return (uint64_t)(1u << 30 | 1024u >> 4) << 32 | low;
}

static __device__ inline void g2z__wgmma_fence(void) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ inline void g2z__wgmma_commit(void) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most PENDING groups are in flight; c must not be read before. */
template <int PENDING>
static __device__ inline void g2z__wgmma_wait(void) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/* The compiler does not know that wgmma still writes c. This keeps reads of c after the wait. */
static __device__ inline void g2z__settled(float (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}

#define G2Z__C_TEXT                                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define G2Z__C_TILE(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define G2Z__C_LIST(c)                                                                       \
  G2Z__C_TILE(c[0]), G2Z__C_TILE(c[1]), G2Z__C_TILE(c[2]), G2Z__C_TILE(c[3]),                 \
      G2Z__C_TILE(c[4]), G2Z__C_TILE(c[5]), G2Z__C_TILE(c[6]), G2Z__C_TILE(c[7])

/* How wgmma reads an operand's tile, see above. By columns, it transposes the tile. */
typedef enum g2z__by { G2Z__BY_ROWS, G2Z__BY_COLUMNS } g2z__by;

/* c[64,64] = a[64,16] b[16,64], or += with `adds`; `a` lies in registers. With `=`, wgmma ignores
 * the old c. Zeros written to c would make ptxas wait for the products that run. */
#define G2Z__WGMMA_REGISTERS(type, c, a, b, by, adds)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %38, 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " G2Z__C_TEXT \
               ", {%32, %33, %34, %35}, %36, p, 1, 1, %37;\n}"                             \
               : G2Z__C_LIST(c)                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)(by)), "r"(adds))
template <typename A, g2z__by BY>
static __device__ inline void g2z__wgmma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b,
                                         int adds) {
  if constexpr (std::is_same<A, __half>::value) G2Z__WGMMA_REGISTERS("f16", c, a, b, BY, adds);
  else G2Z__WGMMA_REGISTERS("bf16", c, a, b, BY, adds);
}

/* The same, but `a` lies in shared memory. */
#define G2Z__WGMMA_SHARED(type, c, a, b, by, adds)                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %35, 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " G2Z__C_TEXT \
               ", %32, %33, p, 1, 1, %34, %34;\n}"                                         \
               : G2Z__C_LIST(c)                                                            \
               : "l"(a), "l"(b), "n"((int)(by)), "r"(adds))
template <typename A, g2z__by BY>
static __device__ inline void g2z__wgmma_shared(float (&c)[8][4], uint64_t a, uint64_t b,
                                                int adds) {
  if constexpr (std::is_same<A, __half>::value) G2Z__WGMMA_SHARED("f16", c, a, b, BY, adds);
  else G2Z__WGMMA_SHARED("bf16", c, a, b, BY, adds);
}

/* c = a tile^T, summed over 64 columns; `a` is a tile, too. */
template <typename A>
static __device__ inline void g2z__wgmma_scores_shared(float (&c)[8][4], uint32_t a,
                                                       uint32_t tile) {
  g2z__wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    g2z__wgmma_shared<A, G2Z__BY_ROWS>(c, g2z__operand(a, k * 32), g2z__operand(tile, k * 32),
                                       k > 0);
  g2z__wgmma_commit();
}
/* c = a tile, or += with `adds`, summed over the tile's 64 rows; `a` lies in registers. */
template <typename A>
static __device__ inline void g2z__wgmma_weighted(float (&c)[8][4], const uint32_t (&a)[4][4],
                                                  uint32_t tile, int adds) {
  g2z__wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    g2z__wgmma<A, G2Z__BY_COLUMNS>(c, a[k], g2z__operand(tile, k * 2048), adds || k > 0);
  g2z__wgmma_commit();
}

/* ----- items and rows ---------------------------------------------------- */

/* Worker n starts with item n, then takes the next free item. *taken counts the takes. There are
 * `items` of them, because each worker's last take finds no item. The last one resets *taken. */
static __device__ inline int g2z__hopper_take(int *taken, int items, int workers) {
  int number = atomicAdd(taken, 1);
  if (number == items - 1) *taken = 0;
  return workers + number;
}

/* Writes 16 rows, as wgmma's A operand, to a tile from row `row` on. */
static __device__ inline void g2z__write_a(uint32_t tile, int row, const uint32_t (&a)[4][4]) {
  g2z__reader reader = g2z__reader_b_transposed<64>();
#pragma unroll
  for (int k = 0; k < 4; k++)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     g2z__tile_at<64>(tile, reader, row, k * 16)),
                 "r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3])
                 : "memory");
}

/* 16 bytes of shared memory. */
static __device__ inline uint4 g2z__tile_get(uint32_t at) {
  uint4 pack;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
               : "r"(at)
               : "memory");
  return pack;
}

/* Orders a thread's accesses to shared memory before accesses of TMA or wgmma after a barrier. */
static __device__ inline void g2z__fence_async(void) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Stores a warp's 16 rows of c into a rectangle, from row `row` on. `low` scales the upper 8 rows,
 * `high` the lower 8. The rows pass through a tile, from row `tile_row` on, so that 8 lanes write
 * 128 bytes at once; TMA may write the tile next. `packs` returns what this lane stored: 8 columns
 * from lane % 8 * 8 on. */
template <typename E, typename A>
static __device__ inline void g2z__hopper_store(uint4 (&packs)[4], const g2z__rows<A> &to,
                                                float (&c)[8][4], int row, float low, float high,
                                                uint32_t tile, int tile_row) {
  int y = g2z__lane() / 8, piece = g2z__lane() % 8;
  const int from_row = tile_row + y; /* this lane's 16-byte piece of it, swizzled: */
  uint32_t a[4][4], from = tile + (uint32_t)(from_row * 128 + (piece ^ from_row % 8) * 16);
  A *at = to.at + (size_t)(row + y) * to.stride + piece * 8;
#pragma unroll
  for (int n = 0; n < 32; n++) c[n / 4][n % 4] *= n % 4 < 2 ? low : high;
#pragma unroll
  for (int k = 0; k < 4; k++) g2z__as_a<A>(a[k], c[2 * k], c[2 * k + 1]);
  g2z__write_a(tile, tile_row, a);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) /* from row y to y + 4 the swizzle flips bit 2 of the piece */
    packs[i] = g2z__tile_get((from + (uint32_t)(i * 512)) ^ (uint32_t)(i % 2 * 64));
  g2z__fence_async();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (row + y + i * 4 < to.T) g2z__rows_put<E>(to, at, packs[i]);
    at += to.stride * 4;
  }
}

/* ----- forward ----------------------------------------------------------- */

/* An item: a block of 128 queries, and the number of 64-key tiles that they see. A count of 0 ends
 * the items. */
struct g2z__hopper_queries {
  int b, h, block, count;
};

/* Shared memory, from an address that is a multiple of 1024. */
struct g2z__hopper_fwd_shared {
  enum {
    STAGES = 4,
    TILE = G2Z__TILE_BYTES,
    Q = 0,                             /* two stages of 128 queries */
    KV = Q + 4 * TILE,                 /* STAGES of 64 keys and their V */
    BYTES = KV + STAGES * 2 * TILE     /* per pair of warpgroups */
  };
};
struct g2z__hopper_fwd_barriers {
  uint64_t q_full[2], q_empty[2];
  uint64_t full[g2z__hopper_fwd_shared::STAGES], empty[g2z__hopper_fwd_shared::STAGES];
  g2z__hopper_queries item[2]; /* the items whose queries q_full announces */
};
#define G2Z__HOPPER_FWD_BYTES \
  (2 * (g2z__hopper_fwd_shared::BYTES + (int)sizeof(g2z__hopper_fwd_barriers)))

/* Masks the scores of queries `row` ... `row` + 15 and 64 keys from `key` on: no query sees a later
 * key. */
static __device__ inline void g2z__hopper_mask(float (&s)[8][4], int key, int row) {
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (key + n * 8 + g2z__lane_column() + i % 2 > row + g2z__lane_row() + i / 2 * 8)
        s[n][i] = -INFINITY;
}

/* The forward kernel's arguments. */
template <typename A>
struct g2z__hopper_fwd {
  A *out;
  uint8_t *narrow;     /* out in e4m3, or NULL */
  float *lse;
  int *taken;          /* g2z__hopper_take's counter */
  int items, T, NH;
  float scale;
  double *clamped;     /* counts the numbers in narrow; or NULL */
};

#define G2Z__HOPPER_FWD_LAST 528 /* items of the last heads: 2 rounds on 132 multiprocessors */

/* One thread loads all tiles, as far ahead as the stages allow.
 * The order of items: a head's items are neighbours, so that its K and V stay in L2, and its
 * longest rows come first. The last heads are mixed, the longest rows of all of them first: short
 * items then end the launch, and no multiprocessor waits long for another. */
template <typename A>
static __device__ inline void g2z__hopper_fwd_load(const g2z__hopper_fwd<A> &x,
                                                   const CUtensorMap *qkv, uint32_t shared,
                                                   g2z__hopper_fwd_barriers *barriers, int pair) {
  typedef g2z__hopper_fwd_shared S;
  g2z__ring<2> q = {0, 0};
  g2z__ring<S::STAGES> kv = {0, 0};
  for (int index = (int)(blockIdx.x + gridDim.x * pair); index < x.items;
       index = g2z__hopper_take(x.taken, x.items, 2 * (int)gridDim.x)) {
    int blocks = (x.T + 127) / 128, heads = x.items / blocks;
    int last = min(heads, (G2Z__HOPPER_FWD_LAST + blocks - 1) / blocks), first = heads - last;
    int head = index / blocks, block = index % blocks, mixed = index - first * blocks;
    if (mixed >= 0) {
      head = first + mixed % last;
      block = mixed / last;
    }
    block = blocks - 1 - block;
    g2z__hopper_queries item = {head / x.NH, head % x.NH, block,
                                min((x.T + 63) / 64, block * 2 + 2)};
    g2z__barrier_wait(barriers->q_empty + q.stage, q.phase ^ 1);
    barriers->item[q.stage] = item;
    g2z__barrier_expect(barriers->q_full + q.stage, 2 * S::TILE);
    for (int half = 0; half < 2; half++)
      g2z__copy_tile(shared + (uint32_t)(S::Q + (q.stage * 2 + half) * S::TILE), qkv, item.h,
                     item.block * 128 + half * 64, item.b, barriers->q_full + q.stage,
                     G2Z__EVICT_FIRST);
    q.next();
    for (int n = 0; n < item.count; n++) {
      uint32_t to = shared + (uint32_t)(S::KV + kv.stage * 2 * S::TILE);
      const uint64_t *full = barriers->full + kv.stage;
      g2z__barrier_wait(barriers->empty + kv.stage, kv.phase ^ 1);
      g2z__barrier_expect(full, 2 * S::TILE);
      for (int part = 1; part <= 2; part++) /* K, V */
        g2z__copy_tile(to + (uint32_t)((part - 1) * S::TILE), qkv, part * x.NH + item.h, n * 64,
                       item.b, full, G2Z__EVICT_NORMAL);
      kv.next();
    }
  }
  g2z__barrier_wait(barriers->q_empty + q.stage, q.phase ^ 1);
  barriers->item[q.stage].count = 0;
  g2z__barrier_arrive(barriers->q_full + q.stage);
}

/* Writes 16 rows of out and lse. */
template <typename A>
static __device__ inline void
g2z__hopper_finish(const g2z__hopper_fwd<A> &x, float (&o)[8][4], const float (&largest)[2],
                   float (&sum)[2], const g2z__hopper_queries &item, int row, uint32_t tile,
                   int tile_row) {
  float *lse = x.lse + (size_t)(item.b * x.NH + item.h) * (size_t)x.T;
  uint4 packs[4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int query = row + g2z__lane_row() + half * 8;
    sum[half] += __shfl_xor_sync(G2Z__ALL_LANES, sum[half], 1);
    sum[half] += __shfl_xor_sync(G2Z__ALL_LANES, sum[half], 2);
    if (g2z__lane() % 4 == 0 && query < x.T) lse[query] = largest[half] * x.scale + logf(sum[half]);
  }
  auto out = g2z__rows_of(x.out, {item.b, item.h, x.T, x.NH, 64}, 0, 1, x.narrow);
  out.clamped = x.clamped;
  g2z__hopper_store<__nv_fp8_e4m3>(packs, out, o, row, 1.0f / sum[0], 1.0f / sum[1], tile,
                                   tile_row);
}

/* Each of two warpgroups owns 64 queries. A tile's P V is issued after the next tile's scores. */
template <typename A>
static __device__ inline void g2z__hopper_fwd_rows(const g2z__hopper_fwd<A> &x, uint32_t shared,
                                                   g2z__hopper_fwd_barriers *barriers, int group) {
  typedef g2z__hopper_fwd_shared S;
  g2z__ring<2> q = {0, 0};
  g2z__ring<S::STAGES> kv = {0, 0};
  int tile_row = (int)threadIdx.x % 128 / 32 * 16;
  float scale2 = x.scale * G2Z__LOG2E;
  for (;;) {
    g2z__barrier_wait_warp(barriers->q_full + q.stage, q.phase);
    g2z__hopper_queries item = barriers->item[q.stage];
    item.block = __shfl_sync(G2Z__ALL_LANES, item.block, 0); /* warp-uniform, for wgmma */
    item.count = __shfl_sync(G2Z__ALL_LANES, item.count, 0);
    if (item.count == 0) return;
    int row = item.block * 128 + group * 64 + tile_row;
    int mine = min(item.count, item.block * 2 + group + 1), last = 0;
    uint32_t q_tile = shared + (uint32_t)(S::Q + (q.stage * 2 + group) * S::TILE);
    uint32_t kv_tiles = shared + S::KV, p[4][4];
    float s[1][8][4], o[1][8][4], shrink[1][2], sum[1][2] = {};
    float largest[1][2] = {{-INFINITY, -INFINITY}};
    for (int n = 0; n < mine; n++) {
      g2z__barrier_wait_warp(barriers->full + kv.stage, kv.phase);
      g2z__wgmma_scores_shared<A>(s[0], q_tile, kv_tiles + (uint32_t)(kv.stage * 2 * S::TILE));
      if (n > 0)
        g2z__wgmma_weighted<A>(o[0], p, kv_tiles + (uint32_t)((last * 2 + 1) * S::TILE), n > 1);
      g2z__wgmma_wait<0>();
      g2z__settled(s[0]);
      g2z__settled(o[0]);
      if (n > 0) g2z__barrier_arrive_warp(barriers->empty + last);
      if (n + 1 == mine) g2z__hopper_mask(s[0], n * 64, row);
      if (g2z__softmax_step<1>(s, largest, sum, shrink, scale2) && n > 0)
        g2z__shrink<64, 1>(o, shrink);
#pragma unroll
      for (int k = 0; k < 4; k++) g2z__as_a<A>(p[k], s[0][2 * k], s[0][2 * k + 1]);
      last = kv.stage;
      kv.next();
    }
    g2z__wgmma_weighted<A>(o[0], p, kv_tiles + (uint32_t)((last * 2 + 1) * S::TILE), mine > 1);
    g2z__wgmma_wait<0>();
    g2z__settled(o[0]);
    g2z__barrier_arrive_warp(barriers->empty + last);
    for (int n = mine; n < item.count; n++) { /* tiles that only the other warpgroup sees */
      g2z__barrier_wait(barriers->full + kv.stage, kv.phase);
      g2z__barrier_arrive_warp(barriers->empty + kv.stage);
      kv.next();
    }
    /* Q has been read: its tile now stages O, until q_empty lets TMA write the next Q. */
    g2z__barrier_group();
    g2z__hopper_finish(x, o[0], largest[0], sum[0], item, row, q_tile, tile_row);
    g2z__barrier_arrive_warp(barriers->q_empty + q.stage);
    q.next();
  }
}

/* g2z_k_attention_hopper_fwd: g2z_k_attention_fwd with wgmma; an item is 128 queries of a head.
 *   x        g2z__hopper_fwd; *x.taken is 0 before and after
 *   qkv_map  qkv as {64, 3 NH, T, B}
 * Math    as g2z_k_attention_fwd
 * Launch  grid at most one block per multiprocessor, 640 threads: two pairs of warpgroups. Each
 *         pair has its own items, half of the 193 KB of shared memory, and one loading thread in
 *         the fifth warpgroup. A warpgroup's softmax runs during the products of the other three
 * Cost    2 * B*NH*T^2*HS flops: B=32, T=1024, NH=12 is 51.5 GFLOP; and B*NH*T^2/2 exponentials, of
 *         which a multiprocessor computes 16 per clock: about as long as the products take
 * Order   keys upwards in blocks of 64; bitwise repeatable, whichever block takes an item
 * Source  FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) for the use of wgmma and TMA
 * Oracle  g2z__cpu_attention_fwd; test cuda_attention */
template <typename A>
static __global__ void __launch_bounds__(G2Z__HOPPER_THREADS(640), 1)
g2z_k_attention_hopper_fwd(const __grid_constant__ g2z__hopper_fwd<A> x,
                           const __grid_constant__ CUtensorMap qkv_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  typedef g2z__hopper_fwd_shared S;
  extern __shared__ __align__(1024) unsigned char g2z__shared_tiles[]; /* TMA's swizzle */
  g2z__hopper_fwd_barriers *barriers =
      reinterpret_cast<g2z__hopper_fwd_barriers *>(g2z__shared_tiles + 2 * S::BYTES);
  if (threadIdx.x == 0) {
    for (int pair = 0; pair < 2; pair++) {
      for (int i = 0; i < 2; i++) {
        g2z__barrier_init(barriers[pair].q_full + i, 1);
        g2z__barrier_init(barriers[pair].q_empty + i, 8);
      }
      for (int i = 0; i < S::STAGES; i++) {
        g2z__barrier_init(barriers[pair].full + i, 1);
        g2z__barrier_init(barriers[pair].empty + i, 8);
      }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  g2z__k_begin();
  __syncthreads();
  uint32_t shared = g2z__shared_at(g2z__shared_tiles);
  int group = g2z__warpgroup();
  if (group < 4) {
    int pair = group / 2;
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    g2z__hopper_fwd_rows<A>(x, shared + (uint32_t)(pair * S::BYTES), barriers + pair, group % 2);
  } else {
    int pair = (int)threadIdx.x / 32 % 4;
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (pair < 2 && g2z__lane() == 0)
      g2z__hopper_fwd_load<A>(x, &qkv_map, shared + (uint32_t)(pair * S::BYTES), barriers + pair,
                              pair);
  }
#else
  (void)x, (void)qkv_map;
#endif
}

/* ----- backward ---------------------------------------------------------- */

#define G2Z__HOPPER_STATS_BYTES 512 /* per 64 queries */
#define G2Z__HOPPER_L2_TILES 17   /* tiles of dQ, or of Q with dout, that L2 keeps per block */

/* Rows of statistics are padded to a multiple of 64, because they are copied 64 at a time. */
static inline __host__ __device__ int g2z__hopper_pitch(int T) { return (T + 63) / 64 * 64; }

/* A plan that cuts heads into items. An item is a whole head or a part of one: some of its blocks
 * of 128 keys, and all queries that see them. Whole heads come first. The other heads are all cut
 * in the same way; their parts follow, the longest first. */
struct g2z__hopper_cut {
  int heads, whole;                  /* B*NH; the first `whole` of them are not cut */
  int splits, left;                  /* parts of a cut head; tiles of dQ that they write in all */
  int first[G2Z__HOPPER_SPLITS + 1]; /* each part's first block of keys; then the block count */
  int base[G2Z__HOPPER_SPLITS];      /* a part's tile i, from 2 first on, is number base + i */
  int longest[G2Z__HOPPER_SPLITS];   /* the parts, the longest first */
};

struct g2z__hopper_item {
  int head, part, parts; /* parts of this head; 1: it is whole */
  int begin, end;        /* blocks of keys */
};
static inline __host__ __device__ g2z__hopper_item g2z__hopper_item_at(const g2z__hopper_cut &cut,
                                                                       int index) {
  if (index < cut.whole) return {index, 0, 1, 0, cut.first[G2Z__HOPPER_SPLITS]};
  int heads = cut.heads - cut.whole, part = cut.longest[(index - cut.whole) / heads];
  return {cut.whole + (index - cut.whole) % heads, part, cut.splits, cut.first[part],
          cut.first[part + 1]};
}

/* The backward kernels' arguments. The dQ of a whole head needs only its block's scratch. Each part
 * of a cut head writes a dQ of its own, and g2z_k_attention_hopper_dq adds them. */
template <typename A>
struct g2z__hopper_bwd {
  A *dqkv;             /* [B,T,3,NH,64] out; NULL: only `narrow` is wanted */
  uint8_t *narrow;     /* dqkv in e5m2, or NULL */
  float *sums;         /* [B,slabs,3C] out: columns of dqkv */
  float4 *dq;          /* [min(whole, gridDim.x)][tiles] of [8][128]: dQ of whole heads */
  float4 *parts;       /* [cut heads][left] of [8][128]: dQ of parts */
  int *taken;          /* g2z__hopper_take's counter */
  int items, B, T, NH;
  int slabs;           /* two for each part of a head */
  int kept;            /* a head's last tiles of queries: this many fit L2 */
  float scale;
  g2z__hopper_cut cut;
};

/* The rows of a head in one of dqkv's three tensors. Sizes are widened as unsigned numbers, because
 * backward has no register left for a sign extension. */
template <typename A>
static __device__ inline g2z__rows<A> g2z__hopper_rows(const g2z__hopper_bwd<A> &x, int head,
                                                       int tensor) {
  size_t C = (unsigned)(x.NH * 64);
  size_t first = (unsigned)(head / x.NH * x.T) * 3 * C + (unsigned)tensor * C;
  return {x.dqkv + first + (unsigned)(head % x.NH * 64), 3 * C, x.T, 64, x.dqkv, x.narrow,
          NULL};
}

/* Stores a column's sum of one of dqkv's three tensors. */
template <typename A>
static __device__ inline void g2z__hopper_leave_sum(const g2z__hopper_bwd<A> &x, int head, int slab,
                                                    int tensor, int column, float sum) {
  size_t row = (unsigned)((head / x.NH * x.slabs + slab) * 3 + tensor);
  x.sums[(row * (unsigned)x.NH + (unsigned)(head % x.NH)) * 64 + (unsigned)column] = sum;
}

/* g2z_k_attention_hopper_stats: backward's two statistics per query: lse * log2(e), and minus the
 * sum over HS of dout * out. Both are zero in a row's padding, where dout is zero, too.
 *   stats     [B*NH,2,pitch] f32 out: within 16 queries, the 4 that a lane needs are neighbours
 *   dout,out  [B,T,NH,64] A in
 *   x         x.sums is set to zero
 * Launch  grid B*pitch*NH/32, 256 threads: 8 threads take a row of 64 numbers
 * Cost    256 B*T*NH bytes: B=32, T=1024, NH=12 is 101 MB */
template <typename A>
static __global__ void __launch_bounds__(256)
g2z_k_attention_hopper_stats(const __grid_constant__ g2z__hopper_bwd<A> x, float *stats,
                             const A *dout, const A *out, const float *lse) {
  g2z__k_begin();
  int pitch = g2z__hopper_pitch(x.T), blocks = pitch / 32 * x.NH; /* per sequence */
  int b = (int)blockIdx.x / blocks, item = (int)blockIdx.x % blocks * 32 + (int)threadIdx.x / 8;
  int t = item / x.NH, h = item % x.NH;
  size_t thread = (size_t)blockIdx.x * 256 + threadIdx.x;
  float sum = 0, d[8], y[8];
  if (thread < (size_t)x.B * (size_t)x.slabs * 3 * (size_t)x.NH * 64) x.sums[thread] = 0;
  if (t < x.T) {
    size_t row = ((size_t)b * (size_t)x.T + (size_t)t) * (size_t)x.NH + (size_t)h;
    size_t at = row * 8 + threadIdx.x % 8;
    g2z__unpack<A>(d, g2z__get_once(dout, at));
    g2z__unpack<A>(y, g2z__get_once(out, at));
#pragma unroll
    for (int i = 0; i < 8; i++) sum += d[i] * y[i];
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(G2Z__ALL_LANES, sum, lanes);
  if (threadIdx.x % 8) return;
  size_t head = (size_t)(b * x.NH + h);
  int at = t / 16 * 16 + t % 8 / 2 * 4 + t % 16 / 8 * 2 + t % 2;
  size_t to = head * 2 * (size_t)pitch + (size_t)at;
  stats[to] = t < x.T ? lse[head * (size_t)x.T + (size_t)t] * G2Z__LOG2E : 0.0f;
  stats[to + (size_t)pitch] = -sum;
}

/* g2z_k_attention_hopper_stats_eight: the same without padding (T % 64 == 0), and out's columns.
 *   columns  C columns of N = B*T numbers in e4m3, out   N % 128 == 0
 * Launch  32 tokens and 256 columns per block of 256 threads: 8 lanes take a row of 64 numbers
 * Cost    5 NC bytes: B=32, T=1024, NH=12 is 126 MB */
template <typename A>
static __global__ void __launch_bounds__(256)
g2z_k_attention_hopper_stats_eight(const __grid_constant__ g2z__hopper_bwd<A> x, float *stats,
                                   const A *dout, const A *out, const float *lse,
                                   uint8_t *columns) {
  const int g = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, C = x.NH * 64;
  const int first = (int)blockIdx.y * 256, column = first + lane * 8, h = column / 64;
  uint2 eight[4] = {};
  g2z__k_begin();
  for (size_t i = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x;
       i < (size_t)x.B * (size_t)x.slabs * 3 * (size_t)C; i += (size_t)gridDim.x * gridDim.y * 256)
    x.sums[i] = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = g2z__token_at((int)blockIdx.x, g, i), b = n / x.T, t = n % x.T;
    float sum = 0, d[8], y[8];
    if (column < C) {
      const size_t at = ((size_t)n * (size_t)C + (size_t)column) / 8;
      const uint4 raw = g2z__get_once(out, at);
      g2z__unpack<A>(d, g2z__get_once(dout, at));
      g2z__unpack<A>(y, raw);
      eight[i] = g2z__pack_narrow<A, __nv_fp8_e4m3>(raw);
#pragma unroll
      for (int j = 0; j < 8; j++) sum += d[j] * y[j];
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(G2Z__ALL_LANES, sum, lanes);
    if (lane % 8 || column >= C) continue;
    const size_t head = (size_t)(b * x.NH + h);
    const size_t to = head * 2 * (size_t)x.T +
                      (size_t)(t / 16 * 16 + t % 8 / 2 * 4 + t % 16 / 8 * 2 + t % 2);
    stats[to] = lse[head * (size_t)x.T + (size_t)t] * G2Z__LOG2E;
    stats[to + (size_t)x.T] = -sum;
  }
  g2z__columns_put(columns, eight, (int)blockIdx.x, first, (int)gridDim.x * 32, C);
}

/* Shared memory, from an address that is a multiple of 1024. */
struct g2z__hopper_shared {
  enum {
    STAGES = 4, DS_STAGES = 3,
    TILE = G2Z__TILE_BYTES,
    K = 0, V = K + 4 * TILE,           /* two stages of 128 keys */
    Q = V + 4 * TILE,                  /* STAGES of 64 queries */
    DOUT = Q + STAGES * TILE,
    DS = DOUT + STAGES * TILE,         /* DS_STAGES of dS^T, 128 keys by 64 queries */
    STATS = DS + DS_STAGES * 2 * TILE, /* STAGES of [2][64] floats */
    DQ_TILES = 3,
    DQ = STATS + STAGES * G2Z__HOPPER_STATS_BYTES, /* the last tiles of dQ, in fp32 */
    BARRIERS = DQ + DQ_TILES * 2 * TILE
  };
};

struct g2z__hopper_barriers {
  uint64_t kv_full[2], kv_empty[2];
  uint64_t q_full[g2z__hopper_shared::STAGES], q_empty[g2z__hopper_shared::STAGES];
  uint64_t ds_full[g2z__hopper_shared::DS_STAGES], ds_empty[g2z__hopper_shared::DS_STAGES];
  int item[2]; /* the item whose keys kv_full announces; -1: no more items */
};
#define G2Z__HOPPER_BWD_BYTES (g2z__hopper_shared::BARRIERS + (int)sizeof(g2z__hopper_barriers))

/* All warpgroups of a thread block process the same items in three nested loops: items; an item's
 * blocks of 128 keys; the tiles of 64 queries, from the first tile that sees one of the keys. Long
 * items go first, so that all thread blocks end at about the same time. An item's results depend
 * only on the item. The loading thread takes items (g2z__hopper_take); the others read the item's
 * number when its first keys arrive. */
static __device__ inline int g2z__hopper_next(const g2z__hopper_barriers *barriers,
                                              const g2z__ring<2> &kv) {
  g2z__barrier_wait_warp(barriers->kv_full + kv.stage, kv.phase);
  int item = 0;
  if (g2z__lane() == 0) item = barriers->item[kv.stage];
  return __shfl_sync(G2Z__ALL_LANES, item, 0);
}

/* One thread loads all tiles, as far ahead as the stages allow. It takes an item once it has
 * requested all tiles of the last item. The atomic's latency is hidden: this thread is four tiles
 * ahead of the others. */
template <typename A>
static __device__ inline void
g2z__hopper_load(const g2z__hopper_bwd<A> &x, const CUtensorMap *qkv, const CUtensorMap *dout,
                 const CUtensorMap *stats, uint32_t shared, g2z__hopper_barriers *barriers) {
  typedef g2z__hopper_shared S;
  g2z__ring<2> kv = {0, 0};
  g2z__ring<S::STAGES> q = {0, 0};
  for (int index = (int)blockIdx.x; index < x.items;
       index = g2z__hopper_take(x.taken, x.items, (int)gridDim.x)) {
    g2z__hopper_item item = g2z__hopper_item_at(x.cut, index);
    int b = item.head / x.NH, h = item.head % x.NH;
    for (int j = item.begin; j < item.end; j++) {
      g2z__barrier_wait(barriers->kv_empty + kv.stage, kv.phase ^ 1);
      const uint64_t *full = barriers->kv_full + kv.stage;
      barriers->item[kv.stage] = index;
      g2z__barrier_expect(full, 4 * S::TILE);
      for (int half = 0; half < 2; half++) {
        uint32_t to = shared + (uint32_t)((kv.stage * 2 + half) * S::TILE);
        int row = j * 128 + half * 64;
        g2z__copy_tile(to + S::K, qkv, x.NH + h, row, b, full, G2Z__EVICT_FIRST);
        g2z__copy_tile(to + S::V, qkv, 2 * x.NH + h, row, b, full, G2Z__EVICT_FIRST);
      }
      kv.next();
      for (int i = 2 * j; i * 64 < x.T; i++) {
        uint32_t to = shared + (uint32_t)(q.stage * S::TILE);
        uint64_t keep = (i + x.kept) * 64 >= x.T ? G2Z__EVICT_NORMAL : G2Z__EVICT_FIRST;
        g2z__barrier_wait(barriers->q_empty + q.stage, q.phase ^ 1);
        full = barriers->q_full + q.stage;
        g2z__barrier_expect(full, 2 * S::TILE + G2Z__HOPPER_STATS_BYTES);
        g2z__copy_tile(to + S::Q, qkv, h, i * 64, b, full, keep);
        g2z__copy_tile(to + S::DOUT, dout, h, i * 64, b, full, keep);
        g2z__copy_box(shared + (uint32_t)(S::STATS + q.stage * G2Z__HOPPER_STATS_BYTES), stats,
                      i * 64, item.head * 2, full); /* both statistics of 64 queries */
        q.next();
      }
    }
  }
  g2z__barrier_wait(barriers->kv_empty + kv.stage, kv.phase ^ 1);
  barriers->item[kv.stage] = -1;
  g2z__barrier_arrive(barriers->kv_full + kv.stage);
}

/* A thread's part of a tile of dQ: 8 packs, 128 packs apart. */
static __device__ inline void g2z__dq_get(float (&dq)[8][4], const float4 *from) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    float4 four = from[n * 128];
    dq[n][0] = four.x;
    dq[n][1] = four.y;
    dq[n][2] = four.z;
    dq[n][3] = four.w;
  }
}
static __device__ inline void g2z__dq_put(float4 *to, const float (&dq)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; n++)
    to[n * 128] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
}
/* Stores to device memory with a hint to keep the tile in L2: it is read again soon. */
static __device__ inline void g2z__dq_leave(float4 *to, const float (&dq)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; n++)
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to + n * 128),
                 "f"(dq[n][0]), "f"(dq[n][1]), "f"(dq[n][2]), "f"(dq[n][3]), "l"(G2Z__EVICT_LAST)
                 : "memory");
}

/* Adds the columns of a warp's 16 rows to sums. A lane holds columns g2z__summed_column<16>. */
static __device__ inline void g2z__hopper_add_columns(float (&sums)[2], const float (&c)[8][4]) {
  float lanes[16];
#pragma unroll
  for (int n = 0; n < 16; n++) lanes[n] = c[n / 2][n % 2] + c[n / 2][n % 2 + 2];
  g2z__sum_lanes(lanes);
#pragma unroll
  for (int e = 0; e < 2; e++) sums[e] += lanes[e];
}

/* dq += dS K over KEYS keys; dS^T lies in a tile. */
template <typename A, int KEYS>
static __device__ inline void g2z__hopper_dq_tile(float (&dq)[8][4], uint32_t ds_tile,
                                                  uint32_t k_tile) {
  g2z__wgmma_fence();
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++)
    g2z__wgmma_shared<A, G2Z__BY_COLUMNS>(dq, g2z__operand(ds_tile, k * 2048),
                                          g2z__operand(k_tile, k * 2048), 1);
  g2z__wgmma_commit();
}

/* A part's tiles of dQ: tile i lies at i * 1024. Tiles below 2 * first do not exist. */
template <typename A>
static __device__ inline float4 *g2z__hopper_part(const g2z__hopper_bwd<A> &x, int head, int part) {
  int at = (head - x.cut.whole) * x.cut.left + x.cut.base[part];
  return x.parts + (size_t)(unsigned)at * 1024;
}

/* One warpgroup adds up dQ. A tile of dQ is complete after the keys on its diagonal. Until then it
 * is stored in register order, so that each thread reads back its own numbers. The last DQ_TILES
 * tiles of a head, which most keys add to, lie in shared memory; the others lie in device memory.
 * They are fetched while the other warpgroups still compute dS. */
template <typename A>
static __device__ inline void g2z__hopper_dq(const g2z__hopper_bwd<A> &x, uint32_t shared,
                                             float *floats, g2z__hopper_barriers *barriers) {
  typedef g2z__hopper_shared S;
  g2z__ring<2> kv = {0, 0};
  g2z__ring<S::DS_STAGES> ds = {0, 0};
  int thread = (int)threadIdx.x % 128, warp = thread / 32, tiles = (x.T + 63) / 64;
  float4 *kept = reinterpret_cast<float4 *>(floats + S::DQ / 4) + thread;
  float *q_sums = floats + S::DQ / 4; /* [4 warps][64]; reuses the tiles' memory at an item's end */
  for (int index; (index = g2z__hopper_next(barriers, kv)) >= 0;) {
    g2z__hopper_item item = g2z__hopper_item_at(x.cut, index);
    float4 *left = thread + (item.parts == 1
                                 ? x.dq + (size_t)(blockIdx.x * (unsigned)tiles) * 1024
                                 : g2z__hopper_part(x, item.head, item.part));
    float sums[2] = {};
    for (int j = item.begin; j < item.end; j++) {
      g2z__barrier_wait_warp(barriers->kv_full + kv.stage, kv.phase);
      uint32_t k_tile = shared + (uint32_t)(S::K + kv.stage * 2 * S::TILE);
      float dq[8][4], next[8][4] = {};
      auto fetch = [&](int i) {
        int keep = i - (tiles - S::DQ_TILES);
        if (keep >= 0) g2z__dq_get(next, kept + keep * 1024);
        else g2z__dq_get(next, left + (size_t)i * 1024);
      };
      if (j > item.begin) fetch(2 * j);
      for (int i = 2 * j; i < tiles; i++) {
        int keep = i - (tiles - S::DQ_TILES);
#pragma unroll
        for (int n = 0; n < 32; n++) dq[n / 4][n % 4] = next[n / 4][n % 4];
        g2z__barrier_wait_warp(barriers->ds_full + ds.stage, ds.phase);
        uint32_t ds_tile = shared + (uint32_t)(S::DS + ds.stage * 2 * S::TILE);
        if (i == 2 * j) g2z__hopper_dq_tile<A, 64>(dq, ds_tile, k_tile); /* only 64 are visible */
        else g2z__hopper_dq_tile<A, 128>(dq, ds_tile, k_tile);
        if (j > item.begin && i + 1 < tiles) fetch(i + 1);
        g2z__wgmma_wait<0>();
        g2z__settled(dq);
        g2z__barrier_arrive_warp(barriers->ds_empty + ds.stage);
        ds.next();
        if (j < min(i / 2, item.end - 1)) { /* later keys of this item add to this tile */
          if (keep >= 0) g2z__dq_put(kept + keep * 1024, dq);
          else g2z__dq_leave(left + (size_t)i * 1024, dq);
        } else if (item.parts > 1) {
          g2z__dq_leave(left + (size_t)i * 1024, dq);
        } else {
          g2z__store_c<64>(g2z__hopper_rows(x, item.head, 0), dq, i * 64 + warp * 16, x.scale,
                           x.scale);
          g2z__hopper_add_columns(sums, dq);
        }
      }
      g2z__barrier_arrive_warp(barriers->kv_empty + kv.stage);
      kv.next();
    }
    if (item.parts > 1) continue;
    g2z__barrier_group();
    for (int e = 0; e < 2; e++) q_sums[warp * 64 + g2z__summed_column<16>(e)] = sums[e];
    g2z__barrier_group();
    if (thread < 64)
      g2z__hopper_leave_sum(
          x, item.head, 0, 0, thread,
          q_sums[thread] + q_sums[64 + thread] + q_sums[128 + thread] + q_sums[192 + thread]);
    g2z__barrier_group();
  }
}

/* The progress of one warpgroup, which owns half of a block's 128 keys, through the query tiles. */
struct g2z__hopper_keys {
  uint32_t shared;
  g2z__hopper_barriers *barriers;
  g2z__ring<g2z__hopper_shared::STAGES> q;
  g2z__ring<g2z__hopper_shared::DS_STAGES> ds;
  int row;             /* this warp's first row of the 128 */
};

/* Reads one statistic for the columns that a lane holds of a C tile: 2 of every 8. */
static __device__ inline void g2z__hopper_stat_get(float (&stat)[4][4], const float *from) {
#pragma unroll
  for (int k = 0; k < 4; k++) g2z__get_floats<4>(stat[k], from + k * 16);
}

/* One tile of 64 queries: P^T and dV; dS^T in the layout of dK's A operand. The caller has issued
 * the tile's scores and dP after the last tile's dV. `below`: this lane's first key minus its first
 * query, each as a place within a tile. */
template <typename A>
static __device__ inline void
g2z__hopper_tile(float (&s)[8][4], float (&dp)[8][4], float (&dv)[8][4], uint32_t (&ds)[4][4],
                 const float *stats, uint32_t dout_tile, int first, int below, float scale2) {
  float stat[4][4];
  uint32_t p[4][4];
  g2z__hopper_stat_get(stat, stats); /* lse */
  g2z__wgmma_wait<2>();              /* dK and dP may still run */
  g2z__settled(s);
  g2z__settled(dv);
  if (first) /* this tile lies on the diagonal */
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (below + i / 2 * 8 > n * 8 + i % 2) s[n][i] = -INFINITY;
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      s[n][i] = g2z__exp2(s[n][i] * scale2 - stat[n / 2][n % 2 * 2 + i % 2]);
  g2z__hopper_stat_get(stat, stats + 64); /* -D */
#pragma unroll
  for (int k = 0; k < 4; k++) g2z__as_a<A>(p[k], s[2 * k], s[2 * k + 1]);
  g2z__wgmma_weighted<A>(dv, p, dout_tile, !first);
  g2z__wgmma_wait<1>(); /* dV may still run */
  g2z__settled(dp);
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) dp[n][i] = (dp[n][i] + stat[n / 2][n % 2 * 2 + i % 2]) * s[n][i];
#pragma unroll
  for (int k = 0; k < 4; k++) g2z__as_a<A>(ds[k], dp[2 * k], dp[2 * k + 1]);
}

/* Writes dS^T to shared memory, for dQ. Each thread fences its own writes: wgmma reads them. */
static __device__ inline void g2z__hopper_publish(g2z__hopper_keys &keys,
                                                  const uint32_t (&ds)[4][4]) {
  typedef g2z__hopper_shared S;
  g2z__barrier_wait_warp(keys.barriers->ds_empty + keys.ds.stage, keys.ds.phase ^ 1);
  g2z__write_a(keys.shared + (uint32_t)(S::DS + keys.ds.stage * 2 * S::TILE), keys.row, ds);
  g2z__fence_async();
  g2z__barrier_arrive_warp(keys.barriers->ds_full + keys.ds.stage);
  keys.ds.next();
}

/* dK and dV of a warpgroup's 64 keys, over `count` query tiles from the diagonal on. The next
 * tile's scores are needed first, so they are issued first; this tile's dK and the next tile's dP
 * follow. While they run, this tile's dS goes to shared memory. */
template <typename A>
static __device__ inline void g2z__hopper_tiles(float (&dk)[8][4], float (&dv)[8][4],
                                                uint32_t k_tile, uint32_t v_tile,
                                                g2z__hopper_keys &keys, const float *stats,
                                                int count, float scale2) {
  typedef g2z__hopper_shared S;
  float s[8][4], dp[8][4];
  uint32_t ds[4][4], q_tiles = keys.shared + S::Q, dout_tiles = keys.shared + S::DOUT;
  int below = keys.row % 64 + g2z__lane_row() - g2z__lane_column();
  int stage = keys.q.stage, last = 0;
  stats += g2z__lane() % 4 * 4;
  g2z__barrier_wait_warp(keys.barriers->q_full + stage, keys.q.phase);
  g2z__wgmma_scores_shared<A>(s, k_tile, q_tiles + (uint32_t)(stage * S::TILE));
  g2z__wgmma_commit(); /* an empty group stands for the dK that later tiles issue here */
  g2z__wgmma_scores_shared<A>(dp, v_tile, dout_tiles + (uint32_t)(stage * S::TILE));
  for (int i = 0;; i++) {
    g2z__hopper_tile<A>(s, dp, dv, ds, stats + stage * 128,
                        dout_tiles + (uint32_t)(stage * S::TILE), i == 0, below, scale2);
    if (i > 0) {
      g2z__settled(dk);
      g2z__barrier_arrive_warp(keys.barriers->q_empty + last);
    }
    last = stage;
    keys.q.next();
    stage = keys.q.stage;
    if (i + 1 == count) {
      g2z__wgmma_weighted<A>(dk, ds, q_tiles + (uint32_t)(last * S::TILE), count > 1);
      g2z__hopper_publish(keys, ds);
      g2z__wgmma_wait<0>();
      g2z__settled(dk);
      g2z__settled(dv);
      g2z__barrier_arrive_warp(keys.barriers->q_empty + last);
      return;
    }
    g2z__barrier_wait_warp(keys.barriers->q_full + stage, keys.q.phase);
    g2z__wgmma_scores_shared<A>(s, k_tile, q_tiles + (uint32_t)(stage * S::TILE));
    g2z__wgmma_weighted<A>(dk, ds, q_tiles + (uint32_t)(last * S::TILE), i > 0);
    g2z__wgmma_scores_shared<A>(dp, v_tile, dout_tiles + (uint32_t)(stage * S::TILE));
    g2z__hopper_publish(keys, ds);
  }
}

/* Stores a warp's dK or dV and adds its columns to sums. */
template <typename A>
static __device__ inline void g2z__hopper_store_keys(g2z__rows<A> to, float (&sums)[8],
                                                     float (&c)[8][4], int row, float factor,
                                                     uint32_t tile, int tile_row) {
  uint4 packs[4];
  g2z__hopper_store<__nv_fp8_e5m2>(packs, to, c, row, factor, factor, tile, tile_row);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float numbers[8];
    g2z__unpack<A>(numbers, packs[i]);
#pragma unroll
    for (int k = 0; k < 8; k++) sums[k] += numbers[k];
  }
}

/* Stores the column sums of a warpgroup's dK and dV. The warps exchange them through a tile, in
 * which each warp has 16 rows. */
template <typename A>
static __device__ inline void g2z__hopper_leave_keys(const g2z__hopper_bwd<A> &x,
                                                     const g2z__hopper_item &item,
                                                     float (&sums)[2][8], float *tile) {
  int thread = (int)threadIdx.x % 128, lane = g2z__lane();
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float &sum = sums[i / 8][i % 8];
    sum += __shfl_xor_sync(G2Z__ALL_LANES, sum, 8);
    sum += __shfl_xor_sync(G2Z__ALL_LANES, sum, 16);
    if (lane < 8) tile[thread / 32 * 512 + i / 8 * 64 + lane * 8 + i % 8] = sum;
  }
  g2z__barrier_group();
  tile += thread;
  g2z__hopper_leave_sum(x, item.head, item.part * 2 + g2z__warpgroup(), 1 + thread / 64,
                        thread % 64, tile[0] + tile[512] + tile[1024] + tile[1536]);
  g2z__fence_async();
}

/* Each of two warpgroups computes dK and dV of 64 keys. */
template <typename A>
static __device__ inline void g2z__hopper_dkv(const g2z__hopper_bwd<A> &x, uint32_t shared,
                                              float *floats, g2z__hopper_barriers *barriers) {
  typedef g2z__hopper_shared S;
  int group = g2z__warpgroup(), warp = (int)threadIdx.x / 32, tiles = (x.T + 63) / 64;
  g2z__ring<2> kv = {0, 0};
  g2z__hopper_keys keys = {shared, barriers, {0, 0}, {0, 0}, warp * 16};
  for (int index; (index = g2z__hopper_next(barriers, kv)) >= 0;) {
    g2z__hopper_item item = g2z__hopper_item_at(x.cut, index);
    float sums[2][8] = {};
    for (int j = item.begin; j < item.end; j++) {
      g2z__barrier_wait_warp(barriers->kv_full + kv.stage, kv.phase);
      int at = (kv.stage * 2 + group) * S::TILE, count = tiles - (2 * j + group);
      uint32_t k_tile = shared + (uint32_t)(S::K + at), v_tile = shared + (uint32_t)(S::V + at);
      if (group == 1) { /* the first tile's queries see none of the upper 64 keys */
        g2z__barrier_wait(barriers->q_full + keys.q.stage, keys.q.phase);
        g2z__barrier_arrive_warp(barriers->q_empty + keys.q.stage);
        g2z__barrier_wait(barriers->ds_empty + keys.ds.stage, keys.ds.phase ^ 1);
        g2z__barrier_arrive_warp(barriers->ds_full + keys.ds.stage);
        keys.q.next();
        keys.ds.next();
      }
      if (count > 0) { /* else all 64 keys lie beyond T */
        float dk[8][4], dv[8][4];
        int row = j * 128 + keys.row, tile_row = keys.row % 64;
        g2z__hopper_tiles<A>(dk, dv, k_tile, v_tile, keys, floats + S::STATS / 4, count,
                             x.scale * G2Z__LOG2E);
        /* V has been read: its tile now stages the outputs, until kv_empty lets TMA write there. */
        g2z__barrier_group();
        g2z__hopper_store_keys(g2z__hopper_rows(x, item.head, 1), sums[0], dk, row, x.scale,
                               v_tile, tile_row);
        g2z__hopper_store_keys(g2z__hopper_rows(x, item.head, 2), sums[1], dv, row, 1.0f, v_tile,
                               tile_row);
      }
      if (j + 1 == item.end) g2z__hopper_leave_keys(x, item, sums, floats + (S::V + at) / 4);
      g2z__barrier_arrive_warp(barriers->kv_empty + kv.stage);
      kv.next();
    }
  }
}

/* g2z_k_attention_hopper_bwd: dQ, dK and dV; one block computes an item.
 *   x         g2z__hopper_bwd; *x.taken is 0 before and after
 *   qkv_map   qkv as {64, 3 NH, T, B};   dout_map   dout as {64, NH, T, B}
 *   stats_map the output of g2z_k_attention_hopper_stats, as {pitch, 2 B NH}
 * Math    S^T = K Q^T, dP^T = V dout^T, P^T = exp2(S - lse), dS^T = P^T (dP^T - D), dV = P^T dout,
 *         dK = dS^T Q, dQ = dS K: 5 products. P and dS are rounded to A and stay in registers; dS
 *         also goes through shared memory, to be transposed for dQ
 * Launch  grid at most one block per multiprocessor, 512 threads. Warpgroups 0 and 1 own 64 keys
 *         each, warpgroup 2 adds up dQ, one thread of warpgroup 3 loads. 226 KB of shared memory
 * Cost    5 * B*NH*T^2*HS flops: B=32, T=1024, NH=12 is 129 GFLOP. The limit lies within a
 *         multiprocessor: a head takes as long if it runs alone on the GPU. Shared memory is the
 *         busiest unit, because K and V are read again for each tile of queries. dQ's tiles pass
 *         through L2 once per block of keys
 * Order   keys upwards in blocks of 128, queries upwards in tiles of 64; bitwise repeatable: the
 *         cut depends only on the shape and the number of multiprocessors, and an item's bits do
 *         not depend on the block that takes it
 * Source  FlashAttention-3, arXiv:2407.08608
 * Oracle  g2z__cpu_attention_bwd; test cuda_attention */
template <typename A>
static __global__ void __launch_bounds__(G2Z__HOPPER_THREADS(512), 1)
g2z_k_attention_hopper_bwd(const __grid_constant__ g2z__hopper_bwd<A> x,
                           const __grid_constant__ CUtensorMap qkv_map,
                           const __grid_constant__ CUtensorMap dout_map,
                           const __grid_constant__ CUtensorMap stats_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  typedef g2z__hopper_shared S;
  extern __shared__ __align__(1024) unsigned char g2z__shared_tiles[]; /* TMA's swizzle */
  uint32_t shared = g2z__shared_at(g2z__shared_tiles);
  float *floats = reinterpret_cast<float *>(g2z__shared_tiles);
  g2z__hopper_barriers &barriers =
      *reinterpret_cast<g2z__hopper_barriers *>(g2z__shared_tiles + S::BARRIERS);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      g2z__barrier_init(barriers.kv_full + i, 1);
      g2z__barrier_init(barriers.kv_empty + i, 12); /* one arrival per warp of three warpgroups */
    }
    for (int i = 0; i < S::DS_STAGES; i++) {
      g2z__barrier_init(barriers.ds_full + i, 8);
      g2z__barrier_init(barriers.ds_empty + i, 4);
    }
    for (int i = 0; i < S::STAGES; i++) {
      g2z__barrier_init(barriers.q_full + i, 1);
      g2z__barrier_init(barriers.q_empty + i, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  g2z__k_begin();
  __syncthreads();
  int group = g2z__warpgroup();
  if (group < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    g2z__hopper_dkv<A>(x, shared, floats, &barriers);
  } else if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    g2z__hopper_dq<A>(x, shared, floats, &barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 384)
      g2z__hopper_load<A>(x, &qkv_map, &dout_map, &stats_map, shared, &barriers);
  }
#else
  (void)x, (void)qkv_map, (void)dout_map, (void)stats_map;
#endif
}

/* g2z_k_attention_hopper_dq: adds up the dQ of cut heads from their parts.
 *   x       g2z__hopper_bwd; reads x.parts, writes these heads' dQ in x.dqkv and in x.sums
 * Launch  grid cut heads * splits, 256 threads: each half takes every (2 splits)-th tile of a head
 * Cost    16 KB read per tile of a part, 8 KB written per tile of the sum
 * Order   parts upwards, that is, keys upwards */
template <typename A>
static __global__ void __launch_bounds__(256, 2)
g2z_k_attention_hopper_dq(const __grid_constant__ g2z__hopper_bwd<A> x) {
  __shared__ float shared[8 * 64];
  g2z__k_begin();
  int tiles = (x.T + 63) / 64, thread = (int)threadIdx.x % 128, warp = (int)threadIdx.x / 32;
  int splits = max(x.cut.splits, 2), head = x.cut.whole + (int)blockIdx.x / splits;
  int slab = (int)blockIdx.x % splits;
  g2z__rows<A> to = g2z__hopper_rows(x, head, 0);
  float sums[16] = {};
  for (int i = slab * 2 + warp / 4; i < tiles; i += splits * 2) {
    float dq[8][4] = {};
    for (int part = 0; part < splits && 2 * x.cut.first[part] <= i; part++) {
      float more[8][4];
      g2z__dq_get(more, g2z__hopper_part(x, head, part) + (size_t)i * 1024 + thread);
#pragma unroll
      for (int n = 0; n < 32; n++) dq[n / 4][n % 4] += more[n / 4][n % 4];
    }
    g2z__store_c<64>(to, dq, i * 64 + warp % 4 * 16, x.scale, x.scale);
#pragma unroll
    for (int n = 0; n < 16; n++) sums[n] += dq[n / 2][n % 2] + dq[n / 2][n % 2 + 2];
  }
  g2z__sum_lanes(sums);
#pragma unroll
  for (int e = 0; e < 2; e++) shared[warp * 64 + g2z__summed_column<16>(e)] = sums[e];
  __syncthreads();
  if (threadIdx.x >= 64) return;
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += shared[i * 64 + (int)threadIdx.x];
  g2z__hopper_leave_sum(x, head, slab, 0, (int)threadIdx.x, sum);
}

/* ----- launchers --------------------------------------------------------- */

/* A tensor that TMA copies in boxes. Dimensions begin with the innermost. */
struct g2z__tensor {
  const void *at;
  CUtensorMapDataType type;
  int rank;
  cuuint64_t sizes[5];
  cuuint64_t strides[4];         /* bytes; of every dimension except the innermost */
  cuuint32_t box[5];
  CUtensorMapSwizzle swizzle;
};

/* Makes TMA's description of a tensor. */
static g2z_status g2z__tensor_map(g2z_device *device, CUtensorMap *map, const g2z__tensor *x) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUresult result = CUDA_ERROR_NOT_FOUND;
  if (!cuda->encode)
    cuda->encode =
        (decltype(&cuTensorMapEncodeTiled))g2z__driver_function("cuTensorMapEncodeTiled");
  if (cuda->encode)
    result = cuda->encode(map, x->type, (cuuint32_t)x->rank, (void *)x->at, x->sizes, x->strides,
                          x->box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, x->swizzle,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return G2Z_OK;
  return g2z_fail(device->services, G2Z_DEVICE,
                  "the driver refuses a tensor map of rank %d (error %d): update the driver",
                  x->rank, (int)result);
}

/* Maps x[B,T,heads,64] in tiles of 64 rows of one head. */
template <typename A>
static g2z_status g2z__hopper_map(g2z_device *device, CUtensorMap *map, const A *x, int heads,
                                  int T, int B) {
  const cuuint64_t row = (cuuint64_t)heads * 64 * sizeof(A);
  g2z__tensor tensor = {x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                        {64, (cuuint64_t)heads, (cuuint64_t)T, (cuuint64_t)B},
                        {64 * sizeof(A), row, row * (cuuint64_t)T},
                        {64, 1, 64, 1}, CU_TENSOR_MAP_SWIZZLE_128B};
  if (std::is_same<A, __half>::value) tensor.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return g2z__tensor_map(device, map, &tensor);
}

static inline int g2z__hopper_items(const g2z__hopper_cut *cut) {
  return cut->whole + (cut->heads - cut->whole) * cut->splits;
}

/* Estimates the time of blocks begin ... end - 1 of a head, in units of one query tile. A block of
 * 128 keys takes its tiles of 64 queries plus 2. */
static int g2z__hopper_length(int T, int begin, int end) {
  return (end - begin) * ((T + 63) / 64 + 3 - begin - end);
}

/* Cuts all heads, each into `splits` parts of about the same length. */
static void g2z__hopper_cut_into(g2z__hopper_cut *cut, int T, int heads, int splits) {
  int tiles = (T + 63) / 64, blocks = (T + 127) / 128, length[G2Z__HOPPER_SPLITS];
  int total = g2z__hopper_length(T, 0, blocks), part = 0;
  memset(cut, 0, sizeof *cut);
  cut->heads = heads;
  cut->splits = splits;
  for (int j = 0; j < blocks; j++) {
    int done = g2z__hopper_length(T, 0, j);
    /* A part begins when earlier parts are long enough, or if only one block per part is left. */
    if (part < splits && (done * splits >= total * part || blocks - j == splits - part)) {
      cut->first[part] = j;
      cut->base[part] = cut->left - 2 * j;
      cut->left += tiles - 2 * j;
      part++;
    }
  }
  for (part = splits; part <= G2Z__HOPPER_SPLITS; part++) cut->first[part] = blocks;
  for (part = 0; part < splits; part++) {
    int at = part;
    length[part] = g2z__hopper_length(T, cut->first[part], cut->first[part + 1]);
    for (; at > 0 && length[cut->longest[at - 1]] < length[part]; at--)
      cut->longest[at] = cut->longest[at - 1];
    cut->longest[at] = part;
  }
}

/* The time when the last item is done, if each thread block takes the next item as soon as it is
 * free. Thread blocks that become free together form a group. Whole heads make at most two groups.
 * The items of one part go to the earliest groups and add at most one group. */
static int g2z__hopper_end(const g2z__hopper_cut *cut, int T, int multiprocessors) {
  int whole = g2z__hopper_length(T, 0, cut->first[G2Z__HOPPER_SPLITS]);
  int blocks = min(g2z__hopper_items(cut), multiprocessors), rounds = cut->whole / blocks;
  int at[G2Z__HOPPER_SPLITS + 2] = {rounds * whole, (rounds + 1) * whole};
  int count[G2Z__HOPPER_SPLITS + 2] = {blocks - cut->whole % blocks, cut->whole % blocks};
  int groups = count[1] ? 2 : 1, end = 0;
  for (int rank = 0; rank < cut->splits; rank++) {
    int part = cut->longest[rank], items = cut->heads - cut->whole;
    int length = g2z__hopper_length(T, cut->first[part], cut->first[part + 1]);
    while (items > 0) {
      int least = 0;
      for (int i = 1; i < groups; i++)
        if (at[i] < at[least]) least = i;
      if (count[least] > items) { /* only `items` of the group are busy; the others stay free */
        at[groups] = at[least];
        count[groups++] = count[least] - items;
        count[least] = items;
      }
      items -= count[least];
      at[least] += length;
    }
  }
  for (int i = 0; i < groups; i++) end = max(end, at[i]);
  return end;
}

/* Tiles of dQ in scratch: a whole head's tiles per thread block, plus the tiles of all parts. */
static int64_t g2z__hopper_tiles_left(const g2z__hopper_cut *cut, int T, int multiprocessors) {
  return (int64_t)min(cut->whole, multiprocessors) * ((T + 63) / 64) +
         (int64_t)(cut->heads - cut->whole) * cut->left;
}

/* Finds the fastest cut whose tiles of dQ fit the scratch that the plan counts for them. Parts cost
 * 3 units for another launch, and 1 unit per 180 tiles of dQ that are written and added. Example:
 * B=16, T=1024, NH=25 has 400 heads, 35,200 units; 132 multiprocessors need at least 267. Whole
 * heads take 352; 384 whole heads and 16 heads in 8 parts each take 281. */
static void g2z__hopper_best_cut(g2z__hopper_cut *best, int T, int heads, int multiprocessors) {
  int blocks = (T + 127) / 128, whole = g2z__hopper_length(T, 0, blocks);
  int64_t room = (int64_t)G2Z__ATTENTION_PARTS * ((T + 63) / 64);
  double average = (double)heads * whole / multiprocessors; /* no cut is faster */
  g2z__hopper_cut_into(best, T, heads, 1);
  best->whole = heads;
  double least = g2z__hopper_end(best, T, multiprocessors);
  for (int splits = 2; splits <= min(G2Z__HOPPER_SPLITS, blocks); splits++) {
    g2z__hopper_cut cut;
    g2z__hopper_cut_into(&cut, T, heads, splits);
    for (int cuts = 1; cuts <= heads; cuts++) {
      double more = 3 + (double)cut.left * cuts / 180;
      cut.whole = heads - cuts;
      if (average + more >= least || g2z__hopper_tiles_left(&cut, T, multiprocessors) > room) break;
      int rounds = (cut.whole + multiprocessors - 1) / multiprocessors;
      if (rounds * whole + more >= least) continue;
      double cost = more + g2z__hopper_end(&cut, T, multiprocessors);
      if (cost >= least) continue;
      least = cost;
      *best = cut;
    }
  }
}

/* Scratch of backward: statistics; tiles of dQ in fp32; column sums. B=32, T=1024, NH=12 on 132
 * multiprocessors: 3.1 + 34.6 + 0.6 MB. */
template <typename A, typename G>
static g2z_status g2z__hopper_bwd_run(g2z_device *device, const g2z_attention_bwd *op) {
  const int B = op->B, T = op->T, NH = op->NH, sms = g2z__cuda_of(device)->sms;
  G2Z_ASSERT(!op->columns || B * T % 128 == 0);
  size_t pitch = (size_t)g2z__hopper_pitch(T), heads = (size_t)B * (size_t)NH;
  const A *dout = (const A *)op->dout, *out = (const A *)op->out, *qkv = (const A *)op->qkv;
  g2z__hopper_bwd<A> x;
  memset(&x, 0, sizeof x);
  x.taken = g2z__cuda_of(device)->taken;
  if (!op->narrow) x.dqkv = (A *)op->dqkv;
  x.narrow = (uint8_t *)op->narrow;
  x.B = B;
  x.T = T;
  x.NH = NH;
  x.scale = 0.125f;
  x.kept = G2Z__HOPPER_L2_TILES - max(0, (T + 63) / 64 - g2z__hopper_shared::DQ_TILES);
  g2z__hopper_best_cut(&x.cut, T, B * NH, sms);
  x.items = g2z__hopper_items(&x.cut);
  x.slabs = 2 * x.cut.splits;
  size_t tiles = (size_t)g2z__hopper_tiles_left(&x.cut, T, sms);
  int parts = (B * NH - x.cut.whole) * max(x.cut.splits, 2), slabs = B * x.slabs;
  size_t stats_floats = 2 * heads * pitch, sums_floats = (size_t)slabs * 3 * (size_t)(NH * 64);
  void *scratch;
  G2Z_TRY(g2z__scratch(device, (stats_floats + tiles * 4096 + sums_floats) * sizeof(float),
                       &scratch));
  float *stats = (float *)scratch;
  x.dq = (float4 *)(stats + stats_floats);
  x.parts = x.dq + (size_t)min(x.cut.whole, sms) * (((size_t)T + 63) / 64) * 1024;
  x.sums = (float *)(x.dq + tiles * 1024);
  CUtensorMap qkv_map, dout_map, stats_map;
  G2Z_TRY(g2z__hopper_map(device, &qkv_map, qkv, 3 * NH, T, B));
  G2Z_TRY(g2z__hopper_map(device, &dout_map, dout, NH, T, B));
  /* stats[heads,2,pitch] in boxes of 64 queries and both statistics of a head */
  const g2z__tensor stats_tensor = {stats, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, {pitch, 2 * heads},
                                    {pitch * sizeof(float)}, {64, 2}, CU_TENSOR_MAP_SWIZZLE_NONE};
  G2Z_TRY(g2z__tensor_map(device, &stats_map, &stats_tensor));
  if (op->columns && T % 64 == 0)
    G2Z_TRY(g2z__launch(device, "g2z_k_attention_hopper_stats_eight",
                        g2z_k_attention_hopper_stats_eight<A>,
                        dim3((unsigned)(B * T / 32), (unsigned)g2z__blocks((size_t)NH * 64, 256)),
                        256, 0, x, stats, dout, out, op->lse, (uint8_t *)op->columns));
  else {
    G2Z_TRY(g2z__launch(device, "g2z_k_attention_hopper_stats", g2z_k_attention_hopper_stats<A>,
                        (unsigned)(heads * pitch / 32), 256, 0, x, stats, dout, out, op->lse));
    if (op->columns)
      G2Z_TRY(g2z__narrow_columns<__nv_fp8_e4m3>(device, op->columns, out, B * T, NH * 64));
  }
  G2Z_TRY(g2z__launch(device, "g2z_k_attention_hopper_bwd", g2z_k_attention_hopper_bwd<A>,
                      (unsigned)min(x.items, sms), 512, G2Z__HOPPER_BWD_BYTES, x, qkv_map,
                      dout_map, stats_map));
  if (parts > 0)
    G2Z_TRY(g2z__launch(device, "g2z_k_attention_hopper_dq", g2z_k_attention_hopper_dq<A>,
                        (unsigned)parts, 256, 0, x));
  G2Z_TRY(g2z__add_slabs<G>(device, x.sums, slabs, 3 * NH * 64, op->mode, (G *)op->dbias));
  if (!op->narrow) return G2Z_OK;
  return g2z__narrow_columns<__nv_fp8_e5m2>(device, op->narrow, (const A *)NULL, B * T,
                                            3 * NH * 64);
}

/* ----- launchers of room k40, and the ops of both ------------------------ */

static inline unsigned g2z__att_grid(int B, int T, int NH, int rows) {
  return (unsigned)((size_t)B * (size_t)NH * g2z__blocks((size_t)T, (size_t)rows));
}

static inline float g2z__att_scale(int HS) { return 1.0f / sqrtf((float)HS); }

/* Returns 1 if this build has the tensor-core kernels, this GPU runs them, and they can draw this
 * dropout. */
static int g2z__att_tensor(const g2z_device *device, const g2z_dropout *dropout, int T) {
  const g2z__cuda *cuda = g2z__cuda_of(device);
  if (g2z__dropout_on(dropout) && T % 4) return 0;
  return cuda->capability >= 80 && cuda->built_for >= 80;
}

template <typename A, int HSP>
static g2z_status g2z__attention_fwd_run(g2z_device *device, const g2z_attention_fwd *op) {
  constexpr int BYTES = 4 * g2z__tile_bytes<HSP>;
  return g2z__launch(device, "g2z_k_attention_fwd", g2z_k_attention_fwd<A, HSP>,
                     g2z__att_grid(op->B, op->T, op->NH, G2Z__ATT_ROWS), g2z__att_threads<HSP>,
                     BYTES, (A *)op->out, op->lse, (const A *)op->qkv, op->dropout, op->T, op->NH,
                     op->C / op->NH, g2z__att_scale(op->C / op->NH));
}

template <typename A>
static g2z__plain_tensor g2z__plain_tensor_of(const void *base) {
  return {(void *)base, g2z__cuda_type<A>};
}

template <typename A>
static g2z_status g2z__attention_plain_fwd_run(g2z_device *device, const g2z_attention_fwd *op) {
  const int HS = op->C / op->NH;
  auto kernel = g2z_k_attention_plain_fwd<64>;
  if (HS > 64) kernel = g2z_k_attention_plain_fwd<128>;
  return g2z__launch(device, "g2z_k_attention_plain_fwd", kernel,
                     g2z__att_grid(op->B, op->T, op->NH, G2Z__PLAIN_ROWS), G2Z__PLAIN_ROWS, 0,
                     g2z__plain_tensor_of<A>(op->out), op->lse, g2z__plain_tensor_of<A>(op->qkv),
                     op->dropout, op->T, op->NH, HS, g2z__att_scale(HS));
}

template <typename A>
static g2z_status g2z_cuda_attention_fwd(g2z_device *device, const g2z_attention_fwd *op) {
  const int B = op->B, T = op->T, C = op->C, NH = op->NH;
  G2Z_ASSERT(g2z__attention_fwd_whole(op));
  const int HS = C / NH;
  auto run = g2z__attention_plain_fwd_run<A>;
  if constexpr (sizeof(A) == 2) {
    const g2z__cuda *cuda = g2z__cuda_of(device);
    if (HS == 64 && !g2z__dropout_on(&op->dropout) && cuda->hopper) {
      const g2z__hopper_fwd<A> on = {(A *)op->out, (uint8_t *)op->narrow, op->lse, cuda->taken,
                                     B * NH * ((T + 127) / 128), T, NH, 0.125f,
                                     device->clamped_inputs};
      CUtensorMap map;
      G2Z_TRY(g2z__hopper_map(device, &map, (const A *)op->qkv, 3 * NH, T, B));
      return g2z__launch(device, "g2z_k_attention_hopper_fwd", g2z_k_attention_hopper_fwd<A>,
                         (unsigned)min(on.items, cuda->sms), 640, G2Z__HOPPER_FWD_BYTES, on, map);
    }
    if (g2z__att_tensor(device, &op->dropout, T)) {
      run = g2z__attention_fwd_run<A, 64>;
      if (HS > 64) run = g2z__attention_fwd_run<A, 128>;
    }
  }
  G2Z_TRY(run(device, op));
  if constexpr (sizeof(A) == 2)
    if (op->narrow)
      return g2z__narrow(device, op->narrow, (const A *)op->out, G2Z__E4M3_X, B * T, C,
                         device->clamped_inputs);
  return G2Z_OK;
}

/* Scratch of backward: float2 {lse * log2(e), rowsum(dout * out)} per query and head; then column
 * sums of dQ over each 128 rows of a sequence, and of dK and dV over each 64. B=32, T=1024, NH=12,
 * C=768: 3.1 + 0.8 + 3.1 MB. The plain kernels leave the sums to room k21. */
struct g2z__att_scratch {
  float2 *stats;
  float *q_sums, *kv_sums;
};

template <typename A, int HSP>
static g2z_status g2z__attention_bwd_run(g2z_device *device, const g2z_attention_bwd *op,
                                         const g2z__att_scratch &to) {
  constexpr int Q_BYTES = 4 * g2z__tile_bytes<HSP>;
  constexpr int KV_BYTES = Q_BYTES + 2 * G2Z__ATT_STEP * (int)sizeof(float2);
  const A *dout = (const A *)op->dout, *qkv = (const A *)op->qkv;
  const int B = op->B, T = op->T, NH = op->NH, HS = op->C / NH;
  G2Z_TRY(g2z__launch(device, "g2z_k_attention_bwd_q", g2z_k_attention_bwd_q<A, HSP>,
                      g2z__att_grid(B, T, NH, G2Z__ATT_ROWS), g2z__att_threads<HSP>, Q_BYTES,
                      (A *)op->dqkv, to.stats, to.q_sums, dout, (const A *)op->out, op->lse, qkv,
                      op->dropout, T, NH, HS, g2z__att_scale(HS)));
  return g2z__launch(device, "g2z_k_attention_bwd_kv", g2z_k_attention_bwd_kv<A, HSP>,
                     g2z__att_grid(B, T, NH, G2Z__ATT_STEP), G2Z__ATT_KV_THREADS, KV_BYTES,
                     (A *)op->dqkv, to.kv_sums, (const float2 *)to.stats, dout, qkv, op->dropout,
                     T, NH, HS, g2z__att_scale(HS));
}

template <typename A, g2z__plain_part PART>
static g2z_status g2z__attention_plain_part(g2z_device *device, const g2z_attention_bwd *op,
                                            const g2z__att_scratch &to) {
  const int HS = op->C / op->NH;
  auto kernel = g2z_k_attention_plain_bwd<64, PART>;
  if (HS > 64) kernel = g2z_k_attention_plain_bwd<128, PART>;
  return g2z__launch(device, "g2z_k_attention_plain_bwd", kernel,
                     g2z__att_grid(op->B, op->T, op->NH, G2Z__PLAIN_ROWS), G2Z__PLAIN_ROWS, 0,
                     g2z__plain_tensor_of<A>(op->dqkv), to.stats,
                     g2z__plain_tensor_of<A>(op->dout), g2z__plain_tensor_of<A>(op->out), op->lse,
                     g2z__plain_tensor_of<A>(op->qkv), op->dropout, op->T, op->NH, HS,
                     g2z__att_scale(HS));
}
template <typename A>
static g2z_status g2z__attention_plain_bwd_run(g2z_device *device, const g2z_attention_bwd *op,
                                               const g2z__att_scratch &to) {
  G2Z_TRY((g2z__attention_plain_part<A, G2Z__PLAIN_DQ>(device, op, to)));
  G2Z_TRY((g2z__attention_plain_part<A, G2Z__PLAIN_DK>(device, op, to)));
  return g2z__attention_plain_part<A, G2Z__PLAIN_DV>(device, op, to);
}

template <typename A, typename G>
static g2z_status g2z_cuda_attention_bwd(g2z_device *device, const g2z_attention_bwd *op) {
  const int B = op->B, T = op->T, C = op->C, NH = op->NH;
  G2Z_ASSERT(g2z__attention_bwd_whole(op));
  const int HS = C / NH;
  int tensor = 0; /* 1: tensor-core kernels */
  auto run = g2z__attention_plain_bwd_run<A>;
  if constexpr (sizeof(A) == 2) {
    if (HS == 64 && !g2z__dropout_on(&op->dropout) && g2z__cuda_of(device)->hopper)
      return g2z__hopper_bwd_run<A, G>(device, op);
    tensor = g2z__att_tensor(device, &op->dropout, T);
    if (tensor) {
      run = g2z__attention_bwd_run<A, 64>;
      if (HS > 64) run = g2z__attention_bwd_run<A, 128>;
    }
  }
  const size_t q_slabs = g2z__attention_slabs(B, T, G2Z__ATT_ROWS);
  const size_t kv_slabs = g2z__attention_slabs(B, T, G2Z__ATT_STEP);
  const size_t slabs = max(q_slabs + 2 * kv_slabs, 3 * (size_t)g2z__slabs(B * T));
  const size_t queries = (size_t)B * (size_t)T * (size_t)NH;
  const size_t stats = g2z__align(queries * sizeof(float2));
  void *scratch;
  G2Z_TRY(g2z__scratch(device, stats + slabs * (size_t)C * sizeof(float), &scratch));
  g2z__att_scratch to;
  to.stats = (float2 *)scratch;
  to.q_sums = (float *)((char *)scratch + stats);
  to.kv_sums = to.q_sums + q_slabs * (size_t)C;
  G2Z_TRY(run(device, op, to));
  G *dbias = (G *)op->dbias;
  if (tensor) {
    G2Z_TRY(g2z__add_slabs<G>(device, to.q_sums, (int)q_slabs, C, op->mode, dbias));
    G2Z_TRY(g2z__add_slabs<G>(device, to.kv_sums, (int)kv_slabs, 2 * C, op->mode, dbias + C));
  } else {
    G2Z_TRY((g2z__column_slabs<A, G2Z__COLUMNS_PLAIN>(device, to.q_sums, (A *)op->dqkv, NULL,
                                                      B * T, 3 * C)));
    G2Z_TRY(g2z__add_slabs<G>(device, to.q_sums, g2z__slabs(B * T), 3 * C, op->mode, dbias));
  }
  if constexpr (sizeof(A) == 2) {
    if (op->columns)
      G2Z_TRY(g2z__narrow_columns<__nv_fp8_e4m3>(device, op->columns, (const A *)op->out, B * T,
                                                 C));
    if (op->narrow)
      return g2z__narrow_columns<__nv_fp8_e5m2>(device, op->narrow, (const A *)op->dqkv, B * T,
                                                3 * C);
  }
  return G2Z_OK;
}

/* ----- the next token ------------------------------------------------------ */

/* g2z_k_attention_next: stores rows[b] in past[b] at positions[b]; out[b] = its attention over
 * positions 0 ... positions[b].
 *   out   [B,NH,HS] A out
 *   past  [B,T,3,NH,HS] A in and out
 *   rows  [B,3,NH,HS] A in
 * Math    f32; softmax with a running maximum, in base 2
 * Launch  a block of 512 per head and sequence, all in x: there may be more sequences than the
 *         65,535 blocks that y allows. A group of `lanes` threads takes a key, one pack per thread;
 *         `lanes` is a power of two that holds a head's packs
 * Cost    4 sizeof(A) C bytes per token of the past: read once
 * Order   a group adds its keys in order, the groups are added in order: no atomics
 * Oracle  g2z__cpu_attention_next */
template <typename A>
static __global__ void __launch_bounds__(512)
g2z_k_attention_next(A *out, A *past, const A *rows, const int32_t *positions, int T, int C, int NH,
                     int lanes) {
  constexpr int L = g2z__lanes<A>;
  extern __shared__ float shared[]; /* [groups][2 + HS]: maximum, sum, sums of values */
  const int HS = C / NH, packs = HS / L, groups = 512 / lanes, room = 2 + HS;
  const int member = (int)threadIdx.x % lanes, group = (int)threadIdx.x / lanes;
  const size_t row = 3 * (size_t)C, b = blockIdx.x / (unsigned)NH;
  const size_t head = blockIdx.x % (unsigned)NH * (size_t)HS;
  g2z__k_begin();
  const int here = positions[b];
  const A *mine = rows + b * row + head;
  A *first = past + b * (size_t)T * row + head;
  for (int i = (int)threadIdx.x; i < 3 * packs; i += 512) {
    size_t part = (size_t)(i / packs) * (size_t)C, pack = (size_t)(i % packs);
    g2z__put(first + (size_t)here * row + part, pack, g2z__get(mine + part, pack));
  }
  __syncthreads();
  const int has = member < packs;
  const float scale = G2Z__LOG2E * rsqrtf((float)HS);
  float q[L] = {}, sums[L] = {}, max = -INFINITY, total = 0;
  if (has) g2z__unpack<A>(q, g2z__get(mine, (size_t)member));
  for (int begin = 0; begin <= here; begin += groups) { /* all lanes loop: they shuffle */
    const int key = begin + group, valid = key <= here;
    const A *at = first + (size_t)(valid ? key : here) * row + C;
    float k[L] = {}, v[L] = {}, dot = 0;
    if (has) {
      g2z__unpack<A>(k, g2z__get(at, (size_t)member));
      g2z__unpack<A>(v, g2z__get(at + C, (size_t)member));
    }
#pragma unroll
    for (int i = 0; i < L; i++) dot += q[i] * k[i];
    for (int apart = lanes / 2; apart; apart /= 2)
      dot += __shfl_xor_sync(G2Z__ALL_LANES, dot, apart);
    if (!valid) continue;
    float larger = fmaxf(max, dot * scale), p = g2z__exp2(dot * scale - larger);
    float old = g2z__exp2(max - larger);
    total = total * old + p;
#pragma unroll
    for (int i = 0; i < L; i++) sums[i] = sums[i] * old + p * v[i];
    max = larger;
  }
  float *own = shared + group * room;
  if (member == 0) {
    own[0] = max;
    own[1] = total;
  }
#pragma unroll
  for (int i = 0; i < L && has; i++) own[2 + member * L + i] = sums[i];
  __syncthreads();
  const int filled = min(here + 1, groups);
  for (int c = (int)threadIdx.x; c < HS; c += 512) {
    float most = -INFINITY, sum = 0, all = 0;
    for (int g = 0; g < filled; g++) most = fmaxf(most, shared[g * room]);
    for (int g = 0; g < filled; g++) {
      float part = g2z__exp2(shared[g * room] - most);
      all += part * shared[g * room + 1];
      sum += part * shared[g * room + 2 + c];
    }
    out[b * (size_t)C + head + (size_t)c] = (A)(sum / all);
  }
}

template <typename A>
static g2z_status g2z_cuda_attention_next(g2z_device *device, const g2z_attention_next *op) {
  const int B = op->B, T = op->T, C = op->C, NH = op->NH;
  G2Z_ASSERT(g2z__attention_next_whole(op));
  const int HS = C / NH;
  int lanes = 1;
  while (lanes * g2z__lanes<A> < HS) lanes *= 2;
  size_t shared = (size_t)(512 / lanes) * (size_t)(2 + HS) * sizeof(float);
  return g2z__launch(device, "g2z_k_attention_next", g2z_k_attention_next<A>,
                     (unsigned)B * (unsigned)NH, 512, shared, (A *)op->out, (A *)op->past,
                     (const A *)op->rows, op->positions, T, C, NH, lanes);
}

/* A warp's part of a row of logits. A lane has ids begin + lane, begin + lane + 32, ... */
struct g2z__draw_part {
  const float *logits;
  int begin, end;
  double *sums;                  /* shared, [32]: one per warp */
};

/* g2z__draw_measure, by a block of 1024; part.sums keeps each warp's sum. */
static __device__ double g2z__draw_sum(const g2z__draw_part &part, uint32_t cut, float best,
                                       float temperature) {
  double sum = 0;
  for (int i = part.begin + (int)threadIdx.x % 32; i < part.end; i += 32) {
    const float logit = part.logits[i];
    if (g2z__draw_order(logit) >= cut)
      sum += temperature > 0 ? (double)g2z__draw_weight(logit, best, temperature) : 1;
  }
  for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(G2Z__ALL_LANES, sum, apart);
  __syncthreads(); /* all threads have read the last call's sums */
  if (threadIdx.x % 32 == 0) part.sums[threadIdx.x / 32] = sum;
  __syncthreads();
  double all = 0;
  for (int w = 0; w < 32; w++) all += part.sums[w];
  return all;
}

static __device__ uint32_t g2z__draw_least(const g2z__draw_part &part, double least, float best,
                                           float temperature) {
  uint32_t cut = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1)
    if (g2z__draw_sum(part, cut | bit, best, temperature) >= least) cut |= bit;
  return cut;
}

/* The first id at which the running sum of a warp's weights passes `draw`; -1 if none does. */
static __device__ int g2z__draw_walk(const g2z__draw_part &part, double draw, uint32_t cut,
                                     float best, float temperature) {
  const int lane = (int)threadIdx.x % 32;
  for (int at = part.begin; at < part.end; at += 32) {
    const float logit = at + lane < part.end ? part.logits[at + lane] : NAN;
    double sum = 0;
    if (g2z__draw_order(logit) >= cut) sum = (double)g2z__draw_weight(logit, best, temperature);
    for (int apart = 1; apart < 32; apart *= 2) {
      double left = __shfl_up_sync(G2Z__ALL_LANES, sum, apart);
      if (lane >= apart) sum += left;
    }
    unsigned passed = __ballot_sync(G2Z__ALL_LANES, sum > draw);
    if (passed) return at + __ffs((int)passed) - 1;
    draw -= __shfl_sync(G2Z__ALL_LANES, sum, 31);
  }
  return -1;
}

/* g2z_k_draw: draws one token per row of logits; contract: ops->draw.
 *   tokens, drawn, positions  [B] i32: out; in and out; in and out
 *   logits                    [B,V] f32 in
 * Math    weights f32, sums f64; top_k and top_p keep the logits above a cut, found bit by bit
 * Launch  a block of 1024 per row; each warp has 1/32 of the ids
 * Cost    4 V bytes read three times; with top_k or top_p 64 times more, from L2
 * Oracle  g2z__cpu_draw: a draw at the border of two ids may differ: sums round differently */
static __global__ void __launch_bounds__(1024)
g2z_k_draw(int32_t *tokens, int32_t *drawn, int32_t *positions, const float *logits,
           g2z_sampling sampling, int V, int T) {
  __shared__ double sums[32];
  __shared__ unsigned long long likeliest[32];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int own = (V + 1023) / 1024 * 32, b = (int)blockIdx.x;
  const g2z__draw_part part = {logits + (size_t)b * (size_t)V, min(warp * own, V),
                               min((warp + 1) * own, V), sums};
  g2z__k_begin();
  unsigned long long most = 0; /* logit's order, then inverted id: the first of equals wins */
  for (int i = part.begin + lane; i < part.end; i += 32)
    most = max(most, (unsigned long long)g2z__draw_order(part.logits[i]) << 32 | (0x7fffffffu - i));
  for (int apart = 16; apart; apart /= 2)
    most = max(most, __shfl_xor_sync(G2Z__ALL_LANES, most, apart));
  if (lane == 0) likeliest[warp] = most;
  __syncthreads();
  for (int w = 0; w < 32; w++) most = max(most, likeliest[w]);
  int token = (int)(0x7fffffffu - (uint32_t)most), owner = 0; /* the warp that holds the draw */
  const float best = part.logits[token], temperature = sampling.temperature;
  if (temperature > 0) {
    uint32_t cut = 0;
    if (sampling.top_k > 0 && sampling.top_k < V)
      cut = g2z__draw_least(part, sampling.top_k, best, 0);
    double sum = g2z__draw_sum(part, cut, best, temperature);
    if (sampling.top_p < 1) {
      cut = g2z__draw_least(part, (double)sampling.top_p * sum, best, temperature);
      sum = g2z__draw_sum(part, cut, best, temperature);
    }
    double draw = (double)g2z__draw_uniform(sampling.seed + (uint64_t)b, (uint32_t)drawn[b]) * sum;
    while (owner < 31 && draw >= sums[owner]) draw -= sums[owner++];
    int found = warp == owner ? g2z__draw_walk(part, draw, cut, best, temperature) : -1;
    if (found >= 0) token = found;
    __syncthreads(); /* all threads have read drawn[b] */
  }
  if ((int)threadIdx.x != 32 * owner) return;
  tokens[b] = best == best ? token : -1; /* best is NaN if no logit is a number */
  drawn[b]++;
  if (positions[b] < T - 1) positions[b]++;
}

static g2z_status g2z_cuda_draw(g2z_device *device, const g2z_draw *op) {
  const int B = op->B, V = op->V, T = op->T;
  G2Z_ASSERT(g2z__draw_whole(op));
  return g2z__launch(device, "g2z_k_draw", g2z_k_draw, (unsigned)B, 1024, 0, op->tokens, op->drawn,
                     op->positions, op->logits, *op->sampling, V, T);
}

/* ===== >>k42 products on Hopper ==========================================
 * In:  a product of rows as in room k30, fp16, bf16 or 8 bits, and its epilogue.
 * Out: room k30's result within the same bounds, on sm_90a. Tuning takes the faster one.
 *      For room k50 only: exponentials of a product, with each row's sum, its largest exponent and
 *      its target's.
 * Law: every sum runs over k upwards in one warpgroup; columns are summed in slabs of 128 rows,
 *      rows in tiles of 192 columns.
 *
 * cuBLASLt leaves the tensor cores idle while it computes a tile's GELU: with K = 768, for a third
 * of the time. Here two warpgroups alternate: one computes the products of a tile of 128 x 192,
 * whose sums fill 192 registers of each thread, while the other finishes and stores its tile. One
 * thread of a third warpgroup keeps loads of four blocks of 64 terms in flight, of 128 in 8 bits.
 * Tiles have room k41's layout. The right operand is read by columns if it is [K,M], by rows if
 * [M,K]. Clusters of two that share the right operand (multicast) take 1.2 to 1.7 times as long. */

static_assert(G2Z__PRODUCT_ROWS == 128, "a tile is two wgmmas of 64 rows");
#define G2Z__PRODUCT_STAGES 4
#define G2Z__PRODUCT_STRIPE 8    /* tiles down before the next column: operands stay in L2 */
#define G2Z__SOFTMAX_STRIPE 16   /* the same for the LM head, whose right operand is longer */
#define G2Z__PRODUCT_PIECE 2048  /* bytes that a warp stages per copy: 16 rows of 64 numbers */
#define G2Z__PRODUCT_PIECES 4    /* pieces that a warp has room for */

/* The epilogue: what a product stores for its sums. */
typedef enum g2z__finish {
  G2Z__FINISH_PLAIN,             /* the sums */
  G2Z__FINISH_ADD,               /* the sums, plus a bias if there is one, plus `other` if x.adds */
  G2Z__FINISH_GELU,              /* GELU of the sums plus bias; its slope goes to `other` */
  G2Z__FINISH_TIMES,             /* the sums times `other`; also the output's column sums */
  G2Z__FINISH_SOFTMAX,           /* exponentials of the sums; also row sums, largest exponents and
                                  * targets' exponents */
  /* The same in 8 bits, as rows and as columns. N % 128 == 0, M % 64 == 0: */
  G2Z__FINISH_GELU_8,            /* e4m3 */
  G2Z__FINISH_TIMES_8,           /* e5m2 */
  G2Z__FINISH_SOFTMAX_8          /* e5m2 */
} g2z__finish;
template <g2z__finish FINISH, g2z__finish PLAIN> /* PLAIN, or the same in 8 bits */
static constexpr bool g2z__is = FINISH == PLAIN || FINISH == PLAIN + 3;
/* In the 8-bit forms columns are dealt to four lanes: row 8 h + 2 t + b of 64 rows of the right
 * operand's tile is column 16 t + 2 h + b. So lane t holds 16 neighbouring columns, 16 bytes. */
template <g2z__finish FINISH>
static constexpr bool g2z__deals = FINISH >= G2Z__FINISH_GELU_8;
static __device__ inline int g2z__dealt(int row) {
  return row / 64 * 64 + row % 8 / 2 * 16 + row % 64 / 8 * 2 + row % 2;
}
/* Terms in a block, which is 128 bytes of each row. E is the left operand's type. The right operand
 * has the same type, except e4m3 when E is e5m2. */
template <typename E>
static constexpr int g2z__terms = 128 / (int)sizeof(E);
/* The factor of linear products in 8 bits: 1 / (scale of one operand * scale of the other). */
template <typename E>
static constexpr float g2z__product_unit =
    1 / (G2Z__E4M3_W * (std::is_same<E, __nv_fp8_e5m2>::value ? 1 : G2Z__E4M3_X));

typedef struct g2z__product_data {
  const void *bias;              /* [M] A, or NULL */
  float *sums;                   /* [slabs,M] with TIMES */
  g2z__softmax_rows rows;        /* with SOFTMAX */
  int N, K, M, slabs;
  int down, across;              /* tiles per column and per row of the output */
  int stripe;                    /* PRODUCT_STRIPE or SOFTMAX_STRIPE */
  int adds;                      /* with ADD: there is `other` */
  uint8_t *narrow;               /* with GELU [N,M] E or NULL */
  double *clamped;               /* with GELU in e4m3: counts the numbers in narrow; or NULL */
} g2z__product_data;

/* Whether the product loads `other`. With ADD it is what the sums are added to, such as a residual.
 * A product without it stores the sums, plus the bias if there is one. */
template <g2z__finish FINISH>
static __device__ inline bool g2z__reads_other(const g2z__product_data &x) {
  return FINISH == G2Z__FINISH_TIMES || (FINISH == G2Z__FINISH_ADD && x.adds);
}

/* Offsets in dynamic shared memory, and sizes, in bytes. */
struct g2z__product_shared {
  enum {
    LEFT = G2Z__PRODUCT_ROWS * 128,
    STAGE = LEFT + G2Z__PRODUCT_COLUMNS * 128,
    STAGING = G2Z__PRODUCT_STAGES * STAGE,
    WARP = G2Z__PRODUCT_PIECES * G2Z__PRODUCT_PIECE,
    BYTES = STAGING + 8 * WARP + 1024,
    SLOT = 2 * WARP /* of a warpgroup's two, if columns are dealt: 128 rows of 64 numbers of A */
  };
};

typedef struct g2z__product_maps {
  CUtensorMap left, right, out, other;
  CUtensorMap columns;           /* of dealt columns; then `out` has rows of 8-bit numbers */
} g2z__product_maps;

typedef struct g2z__product_barriers {
  uint64_t full[G2Z__PRODUCT_STAGES], empty[G2Z__PRODUCT_STAGES];
  uint64_t other[8][G2Z__PRODUCT_PIECES]; /* per warp: a piece of `other` has landed */
  uint64_t slope[2][2];          /* per warpgroup: a slope has landed in a slot */
} g2z__product_barriers;

/* ----- copies ------------------------------------------------------------ */

/* Copies a box of dealt columns, 64 at a time. */
static __device__ inline void g2z__copy_dealt(uint32_t to, const CUtensorMap *map, int k,
                                              int column, const uint64_t *full) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %4, %4, %4, %3}], [%5];" ::"r"(to),
               "l"(map), "r"(k), "r"(column / 64), "r"(0), "r"(g2z__shared_at(full))
               : "memory");
}
static __device__ inline void g2z__store_dealt(const CUtensorMap *map, int row, int column,
                                               uint32_t from) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
               "[%0, {%1, %3, %3, %3, %2}], [%4];" ::"l"(map),
               "r"(row), "r"(column / 64), "r"(0), "r"(from)
               : "memory");
}
static __device__ inline void g2z__store_box(const CUtensorMap *map, int column, int row,
                                             uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::
                   "l"(map), "r"(column), "r"(row), "r"(from)
               : "memory");
}
static __device__ inline void g2z__stores_commit(void) {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Waits until all but the last PENDING groups of this thread's stores have read shared memory. */
template <int PENDING>
static __device__ inline void g2z__stores_have_read(void) {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
/* Named barriers of `threads` threads: `sync` arrives and waits, `arrive` only arrives. */
static __device__ inline void g2z__named_sync(int id, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ inline void g2z__named_arrive(int id, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The position of tile number t. The last rows come first: most kernels write their first row
 * first, so that the last rows still lie in L2. */
struct g2z__product_place {
  int row, column;
};
static __device__ inline g2z__product_place g2z__product_at(const g2z__product_data &x, int t) {
  t = x.down * x.across - 1 - t;
  int whole = x.stripe * x.across, first = t / whole * x.stripe;
  int down = min(x.stripe, x.down - first), rest = t % whole;
  return {(first + rest % down) * G2Z__PRODUCT_ROWS, rest / down * G2Z__PRODUCT_COLUMNS};
}
static __device__ inline bool g2z__rows_again(const int4 *again, int tile) {
  int4 four = again[tile];
  return (four.x | four.y | four.z | four.w) != 0;
}
template <g2z__finish FINISH>
static __device__ inline bool g2z__product_skips(const g2z__product_data &x,
                                                 g2z__product_place at) {
  if constexpr (!g2z__is<FINISH, G2Z__FINISH_SOFTMAX>) return false;
  else return x.rows.again && !g2z__rows_again(x.rows.again, at.row / G2Z__PRODUCT_ROWS);
}

/* One thread loads all blocks of all tiles of this multiprocessor. */
template <typename E, g2z__finish FINISH, g2z__by BY>
static __device__ inline void g2z__product_load(const g2z__product_data &x, uint32_t shared,
                                                const g2z__product_maps &maps,
                                                const g2z__product_barriers *barriers) {
  typedef g2z__product_shared S;
  g2z__ring<G2Z__PRODUCT_STAGES> ring = {0, 0};
  for (int t = (int)blockIdx.x; t < x.down * x.across; t += (int)gridDim.x) {
    g2z__product_place at = g2z__product_at(x, t);
    if (g2z__product_skips<FINISH>(x, at)) continue;
    for (int k = 0; k < x.K; k += g2z__terms<E>, ring.next()) {
      const uint64_t *full = barriers->full + ring.stage;
      uint32_t to = shared + (uint32_t)(ring.stage * S::STAGE);
      g2z__barrier_wait(barriers->empty + ring.stage, ring.phase ^ 1);
      g2z__barrier_expect(full, S::STAGE);
      g2z__copy_box(to, &maps.left, k, at.row, full);
      to += S::LEFT;
      if (g2z__deals<FINISH>) g2z__copy_dealt(to, &maps.right, k, at.column, full);
      else if (BY == G2Z__BY_ROWS) g2z__copy_box(to, &maps.right, k, at.column, full);
      else
#pragma unroll
        for (int n = 0; n < G2Z__PRODUCT_COLUMNS; n += 64)
          g2z__copy_box(to + (uint32_t)(n / 64 * G2Z__TILE_BYTES), &maps.right, at.column + n, k,
                        full);
    }
  }
}

/* ----- sums -------------------------------------------------------------- */

#define G2Z__C_TEXT_192                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "       \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "        \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "        \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "        \
  "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "        \
  "%87, %88, %89, %90, %91, %92, %93, %94, %95}"
/* c[64,192] = a[64,16] b[16,192], or += with `adds`. */
#define G2Z__C_EIGHT(c, n)                                                                \
  G2Z__C_TILE(c[n]), G2Z__C_TILE(c[n + 1]), G2Z__C_TILE(c[n + 2]), G2Z__C_TILE(c[n + 3]), \
      G2Z__C_TILE(c[n + 4]), G2Z__C_TILE(c[n + 5]), G2Z__C_TILE(c[n + 6]), G2Z__C_TILE(c[n + 7])
#define G2Z__WGMMA_192(type, c, a, b, by, adds)                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %99, 0;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " " G2Z__C_TEXT_192  \
               ", %96, %97, p, 1, 1, 0, %98;\n}"                                                 \
               : G2Z__C_EIGHT(c, 0), G2Z__C_EIGHT(c, 8), G2Z__C_EIGHT(c, 16)                     \
               : "l"(a), "l"(b), "n"((int)(by)), "r"(adds))
/* In 8 bits: 32 terms in 32 bytes, always by rows. */
#define G2Z__WGMMA_192_8(type, c, a, b, adds)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n192k32.f32." type ".e4m3 " G2Z__C_TEXT_192       \
               ", %96, %97, p, 1, 1;\n}"                                                         \
               : G2Z__C_EIGHT(c, 0), G2Z__C_EIGHT(c, 8), G2Z__C_EIGHT(c, 16)                     \
               : "l"(a), "l"(b), "r"(adds))
template <typename A, g2z__by BY>
static __device__ inline void g2z__wgmma_192(float (&c)[24][4], uint64_t a, uint64_t b, int adds) {
  if constexpr (std::is_same<A, __half>::value) G2Z__WGMMA_192("f16", c, a, b, BY, adds);
  else if constexpr (std::is_same<A, __nv_bfloat16>::value)
    G2Z__WGMMA_192("bf16", c, a, b, BY, adds);
  else if constexpr (std::is_same<A, __nv_fp8_e4m3>::value)
    G2Z__WGMMA_192_8("e4m3", c, a, b, adds);
  else G2Z__WGMMA_192_8("e5m2", c, a, b, adds);
}

/* Issues the products of one stage; they still run on return. */
template <typename A, g2z__by BY>
static __device__ inline void g2z__product_step(float (&c)[2][24][4], uint32_t stage, int adds) {
  uint64_t a = g2z__operand(stage, 0);
  uint64_t b = g2z__operand(stage + g2z__product_shared::LEFT, 0);
  if (BY == G2Z__BY_COLUMNS) /* 64 columns every 8192 bytes */
    b += (uint64_t)(G2Z__TILE_BYTES - 1024) >> 4 << 16;
  g2z__wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int m = 0; m < 2; m++)
      g2z__wgmma_192<A, BY>(c[m], a + (uint64_t)((m * G2Z__TILE_BYTES + k * 32) / 16),
                            b + (uint64_t)((BY == G2Z__BY_ROWS ? k * 32 : k * 2048) / 16),
                            adds || k > 0);
  g2z__wgmma_commit();
}

/* ----- the epilogue ------------------------------------------------------ */

/* GELU in pairs of fp16 takes a quarter of its input: z = x / 4. */
template <typename A, g2z__finish FINISH>
static constexpr bool g2z__quarters =
    std::is_same<A, __half>::value && g2z__is<FINISH, G2Z__FINISH_GELU>;

/* FACTOR times GELU of x = 4 z, and its slope, of two numbers at once; FACTOR is a power of two.
 * With t = tanh u (see g2z__k_gelu) GELU is 2 z (1 + t), its slope (1 + t) / 2 + 2 z u' (1 - t^2).
 * u / x and u' keep their values at |x| = 4 for larger x, because z^2 saturates at 1: t is 1 there,
 * or the number before 1, and no product overflows. tanh truncates t, so that t^2 is too small by
 * |t| 2^-11 on average: hence 1 - 2^-11 in place of 1.
 * Error   GELU 2.4e-3, the slope 3e-3 if |x| < 5; test cuda_gelu computes all numbers in fp16 */
template <int FACTOR>
static __device__ inline __half2 g2z__gelu_halves(__half2 z, __half2 &slope) {
  constexpr float RATE = 0.7978845608028654f, CUBE = RATE * 0.044715f;
  const __half2 half = __float2half2_rn(0.5f), twice = __float2half2_rn(2 * FACTOR);
  const __half2 square = __hmul2_sat(z, z); /* x^2 / 16 */
  const __half2 ratio =
      __hfma2(square, __float2half2_rn(64 * CUBE), __float2half2_rn(4 * RATE)); /* u / z */
  uint32_t bits = g2z__bits(__hmul2(z, ratio));
  asm("tanh.approx.f16x2 %0, %0;" : "+r"(bits));
  const __half2 t = g2z__halves(bits);
  const __half2 steep =
      __hfma2(square, __float2half2_rn(96 * CUBE), __float2half2_rn(2 * RATE)); /* 2 u' */
  const __half2 rest = __hfma2_sat(__hneg2(t), t, __float2half2_rn(1 - 0x1p-11f));
  slope = __hfma2(z, __hmul2(steep, rest), __hfma2(t, half, half));
  return __hmul2(z, __hfma2(t, twice, twice));
}

/* Softmax state of two rows of a thread, 8 apart. */
struct g2z__product_two_rows {
  float unit[2], reference[2], sum[2], largest[2];
};

/* A warp's progress. Pieces of `other` are numbered through all tiles. Piece i lies in staging slot
 * i % PIECES, until the output that is computed from it replaces it. */
struct g2z__product_warp {
  uint32_t staging;
  const uint64_t *other;         /* [PIECES] */
  int row, column;               /* 16 rows from `row` and from row + 64; first column */
  uint32_t bias[3];              /* per 64 columns: for columns 2 lane and 2 lane + 1 */
  g2z__product_two_rows rows[2]; /* with SOFTMAX: in the tile's first and last 64 rows */
  uint32_t targets;              /* with SOFTMAX: a byte for each of these rows: the column of its
                                  * target in the tile; 255: another tile has it, or row >= N */
  g2z__ring<G2Z__PRODUCT_PIECES> asked, used;
  /* If columns are dealt: */
  uint32_t slots;                /* the warpgroup's two slots */
  const uint64_t *slope;         /* [2] */
  int first;                     /* 1: this thread starts the warpgroup's copies */
  g2z__ring<2> slot;
};

/* Loads pieces first ... last - 1 of `other`. Pieces 0 and 1 are the upper and lower half of the
 * tile's first 64 columns, and so on. */
static __device__ inline void g2z__product_ask(g2z__product_warp &warp, const CUtensorMap *other,
                                               int first, int last) {
#pragma unroll
  for (int i = first; i < last; i++, warp.asked.next()) {
    if (g2z__lane() != 0) continue;
    g2z__barrier_expect(warp.other + warp.asked.stage, G2Z__PRODUCT_PIECE);
    g2z__copy_box(warp.staging + (uint32_t)(warp.asked.stage * G2Z__PRODUCT_PIECE), other,
                  warp.column + i / 2 * 64, warp.row + i % 2 * 64, warp.other + warp.asked.stage);
  }
}

/* Adds an exponent to the softmax of its row and returns its exponential. */
static __device__ inline float g2z__product_exponential(g2z__product_two_rows &rows, int half,
                                                        float exponent) {
  exponent -= rows.reference[half];
  rows.largest[half] = fmaxf(rows.largest[half], exponent);
  exponent = g2z__exp2(exponent);
  rows.sum[half] += exponent;
  return exponent;
}

/* Finishes 16 rows of 64 columns: group `group` of the tile's three. `other` is input with ADD and
 * TIMES, and the slope with GELU. `out` gets pairs of A. */
template <typename A, typename E, g2z__finish FINISH>
static __device__ __forceinline__ void
g2z__product_piece(uint32_t (&out)[4][4], uint32_t (&other)[4][4], float (&sums)[16],
                   g2z__product_two_rows &rows, const float (&c)[24][4], int group,
                   const g2z__product_warp &warp) {
  typedef g2z__pair_of<A> P;
  constexpr float UNIT =
      (sizeof(E) == 1 ? g2z__product_unit<E> : 1) / (g2z__quarters<A, FINISH> ? 4 : 1);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = c[group * 8 + n][i];
    if constexpr (FINISH == G2Z__FINISH_SOFTMAX) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        v[i] = g2z__product_exponential(rows, i / 2, v[i] * rows.unit[i / 2]);
    } else if constexpr (FINISH == G2Z__FINISH_TIMES) {
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] *= UNIT;
    } else {
      float2 bias =
          P::unpack(__shfl_sync(G2Z__ALL_LANES, warp.bias[group], n * 4 + g2z__lane() % 4));
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = v[i] * UNIT + (i % 2 ? bias.y : bias.x);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) { /* the upper and lower 8 rows: a pair of each */
      float low = v[2 * half], high = v[2 * half + 1];
      uint32_t &more = other[n / 2][n % 2 * 2 + half], &pair = out[n / 2][n % 2 * 2 + half];
      if constexpr (g2z__quarters<A, FINISH>) {
        __half2 slope;
        pair = g2z__bits(g2z__gelu_halves<1>(__floats2half2_rn(low, high), slope));
        more = g2z__bits(slope);
      } else {
        if constexpr (FINISH == G2Z__FINISH_ADD) {
          float2 add = P::unpack(more);
          low += add.x;
          high += add.y;
        } else if constexpr (FINISH == G2Z__FINISH_GELU) {
          float slope_low, slope_high;
          low = g2z__k_gelu(low, slope_low);
          high = g2z__k_gelu(high, slope_high);
          more = P::pack(slope_low, slope_high);
        } else if constexpr (FINISH == G2Z__FINISH_TIMES) {
          float2 by = P::unpack(more);
          low *= by.x;
          high *= by.y;
          sums[2 * n] += low;
          sums[2 * n + 1] += high;
        }
        pair = P::pack(low, high);
      }
    }
  }
}

/* 8 columns of pairs of A in 8 bits: a pair and the pair 8 rows below. */
template <typename A, typename E>
static __device__ inline uint32_t g2z__product_pairs(const uint32_t (&y)[4][4], int n) {
  const uint32_t *two = y[n / 2] + n % 2 * 2;
  return g2z__pair_narrow<A, E>(two[0]) | g2z__pair_narrow<A, E>(two[1]) << 16;
}

/* Stores 16 rows of 64 columns in e4m3 in x.narrow, too. Four lanes exchange their pairs, so that
 * each writes 8 bytes of a row and the four write 32 adjacent bytes. Counts clamped numbers, except
 * in rows beyond N, which hold GELU of the bias. GELU's negative numbers are small, so that adding
 * 2 to a byte sets its bit 7 only if it was 448 or NaN. Two instructions test four numbers. */
template <typename A, typename E>
static __device__ inline void g2z__product_narrow(const g2z__product_data &x,
                                                  const uint32_t (&y)[4][4], int row, int column) {
  if (!x.narrow) return;
  uint32_t fours[8], some = 0;
  row += g2z__lane() / 4;
#pragma unroll
  for (int n = 0; n < 8; n++) {
    fours[n] = g2z__product_pairs<A, E>(y, n);
    some |= (fours[n] + 0x02020202u) & ~fours[n];
  }
  if (some & 0x80808080u) {
    const uint32_t upper = row < x.N ? 0xffffu : 0;
    const uint32_t lower = row + 8 < x.N ? 0xffff0000u : 0;
    const uint32_t stored = upper | lower;
    uint2 eight[4];
#pragma unroll
    for (int n = 0; n < 4; n++)
      eight[n] = make_uint2(fours[2 * n] & stored, fours[2 * n + 1] & stored);
    g2z__count_clamped(x.clamped, eight);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) { /* 32 columns each */
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; n++) words[n] = fours[half * 4 + n];
    g2z__transpose<1>(words);
    int at = column + half * 32 + g2z__lane() % 4 * 8;
#pragma unroll
    for (int below = 0; below < 2; below++) {
      unsigned pick = below ? 0x7632 : 0x5410; /* the upper or lower halves of two words */
      int to = row + below * 8;
      uint2 put = make_uint2(__byte_perm(words[0], words[1], pick),
                             __byte_perm(words[2], words[3], pick));
      if (to < x.N && at < x.M)
        *reinterpret_cast<uint2 *>(x.narrow + (size_t)to * G2Z_NARROW_ROW(x.M) + at) = put;
    }
  }
}

/* Finishes 64 columns of the tile and stores them in `out`. Their stores are issued together,
 * because the fence before them takes as long for one piece as for four. */
template <typename A, typename E, g2z__finish FINISH>
static __device__ __forceinline__ void
g2z__product_columns(const g2z__product_data &x, float (&sums)[16], const float (&c)[2][24][4],
                     int group, g2z__product_warp &warp, const g2z__product_maps &maps) {
  constexpr int READS = FINISH == G2Z__FINISH_ADD || FINISH == G2Z__FINISH_TIMES;
  constexpr int TWO = FINISH == G2Z__FINISH_GELU;
  uint32_t to[2];
  g2z__reader reader = g2z__reader_b_transposed<64>();
#pragma unroll
  for (int m = 0; m < 2; m++) {
    uint32_t y[4][4], z[4][4];
    int slot = (group * 2 + m) % G2Z__PRODUCT_PIECES;
    if (TWO) slot = m * 2;
    if (READS) slot = warp.used.stage;
    to[m] = warp.staging + (uint32_t)(slot * G2Z__PRODUCT_PIECE);
    if constexpr (READS) {
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) z[n][i] = 0;
      if (g2z__reads_other<FINISH>(x)) {
        g2z__barrier_wait_warp(warp.other + slot, warp.used.phase);
#pragma unroll
        for (int n = 0; n < 4; n++)
          g2z__read_b(z[n], g2z__tile_at<64>(to[m], reader, 0, n * 16));
      }
      warp.used.next();
    }
    g2z__product_piece<A, E, FINISH>(y, z, sums, warp.rows[m], c[m], group, warp);
    if constexpr (sizeof(E) == 1 && TWO)
      g2z__product_narrow<A, E>(x, y, warp.row + m * 64, warp.column + group * 64);
    if (READS && m == 0 && group == 1) { /* group 0's stores free the slots for group 2 */
      if (g2z__lane() == 0) g2z__stores_have_read<0>();
      __syncwarp();
      if (g2z__reads_other<FINISH>(x)) g2z__product_ask(warp, &maps.other, 4, 6);
    }
    if (!READS && m == 0) { /* group 0 reuses the slots of the last tile's group 2 */
      if (g2z__lane() == 0) {
        if (TWO || group == 0) g2z__stores_have_read<0>();
        else g2z__stores_have_read<1>();
      }
      __syncwarp();
    }
    g2z__write_a(to[m], 0, y);
    if (TWO) g2z__write_a(to[m] + G2Z__PRODUCT_PIECE, 0, z);
  }
  g2z__fence_async();
  __syncwarp();
  if (g2z__lane() == 0) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      g2z__store_box(&maps.out, warp.column + group * 64, warp.row + m * 64, to[m]);
      if (TWO)
        g2z__store_box(&maps.other, warp.column + group * 64, warp.row + m * 64,
                       to[m] + G2Z__PRODUCT_PIECE);
    }
    g2z__stores_commit();
  }
  __syncwarp();
}

/* ----- the epilogue in 8 bits -------------------------------------------- */

/* 16 bytes from shared memory, 16 bytes to it, 4 bytes to it. */
static __device__ inline void g2z__tile_get(uint32_t *to, uint32_t at) {
  uint4 pack = g2z__tile_get(at);
  to[0] = pack.x;
  to[1] = pack.y;
  to[2] = pack.z;
  to[3] = pack.w;
}
static __device__ inline void g2z__tile_put(uint32_t at, const uint32_t *from) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(from[0]), "r"(from[1]),
               "r"(from[2]), "r"(from[3])
               : "memory");
}
static __device__ inline void g2z__word_put(uint32_t at, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

/* Counts clamped numbers. There are none if `most`, the largest results times G2Z__E4M3_X, is less
 * than 432, which rounds to 448. */
static __device__ inline void g2z__product_count(const g2z__product_data &x, __half2 most,
                                                 const uint32_t (&fours)[2][8]) {
  const float2 two = __half22float2(most);
  if (two.x < 432 && two.y < 432) return;
  uint2 eight[8];
#pragma unroll
  for (int n = 0; n < 8; n++) eight[n] = make_uint2(fours[0][n], fours[1][n]);
  g2z__count_clamped(x.clamped, eight);
}

/* Loads the slope of the tile's 64 columns number `group` into a slot. */
static __device__ inline void g2z__product_ask_slope(const g2z__product_warp &warp,
                                                     const g2z__product_maps &maps, int slot,
                                                     int group) {
  const int row = warp.row / G2Z__PRODUCT_ROWS * G2Z__PRODUCT_ROWS;
  g2z__barrier_expect(warp.slope + slot, g2z__product_shared::SLOT);
  g2z__copy_box(warp.slots + (uint32_t)(slot * g2z__product_shared::SLOT), &maps.other,
                warp.column + group * 64, row, warp.slope + slot);
}

/* Finishes 32 rows of 64 columns. fours[m][n] gets four numbers in 8 bits: a pair from column
 * 16 t + 2 n on of row g, and the pair of row g + 8. slope[2 m + half][n] is the slope of such a
 * pair: in with TIMES_8, out with GELU_8. GELU_8 returns the lane's largest results, or NaN.
 * TIMES_8 adds four rows of a column in fp16, and so finds an overflow, which e5m2 would clamp: the
 * bias gradient is not finite, and the step is skipped. A sum may overflow although no result does;
 * one of its four results is then above 65504 / 4 = 16376. So the loss scale is lower by at most
 * two of the 32 powers of two between e5m2's smallest and largest numbers. */
template <typename E, g2z__finish FINISH>
static __device__ __forceinline__ __half2
g2z__product_fours(uint32_t (&fours)[2][8], uint32_t (&slope)[4][8], float (&sums)[16],
                   const float (&c)[2][24][4], int group, g2z__product_warp &warp,
                   const g2z__product_maps &maps) {
  constexpr int READS = FINISH == G2Z__FINISH_TIMES_8;
  constexpr float UNIT = g2z__product_unit<E> / (READS ? 1 : 4);
  __half2 most = __float2half2_rn(0);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    float2 bias = {0, 0};
    __half2 sum, pair[4];
    if (READS && group == 1 && n == 4 && warp.first) { /* group 0's store has read its slot */
      g2z__stores_have_read<0>();
      g2z__product_ask_slope(warp, maps, warp.slot.stage ^ 1, 2);
    }
    if constexpr (FINISH == G2Z__FINISH_SOFTMAX_8) {
      float2 four[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float *two = c[i / 2][group * 8 + n] + i % 2 * 2;
        g2z__product_two_rows &rows = warp.rows[i / 2];
        four[i].x = g2z__product_exponential(rows, i % 2, two[0] * rows.unit[i % 2]);
        four[i].y = g2z__product_exponential(rows, i % 2, two[1] * rows.unit[i % 2]);
      }
      fours[0][n] = g2z__four_8<__nv_fp8_e5m2>(four[0], four[1]);
      fours[1][n] = g2z__four_8<__nv_fp8_e5m2>(four[2], four[3]);
      continue;
    }
    if (!READS)
      bias = __half22float2(g2z__halves(
          __shfl_sync(G2Z__ALL_LANES, warp.bias[group], g2z__lane() % 4 * 8 + n)));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *two = c[i / 2][group * 8 + n] + i % 2 * 2;
      pair[i] = __floats2half2_rn(two[0] * UNIT + bias.x, two[1] * UNIT + bias.y);
      if constexpr (READS) {
        pair[i] = __hmul2(pair[i], g2z__halves(slope[i][n]));
        sum = i == 0 ? pair[0] : __hadd2(sum, pair[i]);
      } else {
        __half2 out;
        pair[i] = g2z__gelu_halves<(int)G2Z__E4M3_X>(pair[i], out);
        slope[i][n] = g2z__bits(out);
        most = __hmax2_nan(most, pair[i]);
      }
    }
    fours[0][n] = g2z__four_8<E>(pair[0], pair[1]);
    fours[1][n] = g2z__four_8<E>(pair[2], pair[3]);
    if constexpr (READS) {
      sums[2 * n] = __low2float(sum);
      sums[2 * n + 1] = __high2float(sum);
    }
  }
  return most;
}

/* Finishes 64 columns of the tile and stores their rows, columns and, with GELU_8, slope. A warp
 * holds 32 bytes of a column. Through shared memory the stores have 64 adjacent bytes of a row and
 * 128 of a column. Rows and columns take one slot: with TIMES_8 the slope's, with SOFTMAX_8 each in
 * turn. */
template <typename E, g2z__finish FINISH>
static __device__ __forceinline__ void
g2z__product_dealt(const g2z__product_data &x, float (&sums)[16], const float (&c)[2][24][4],
                   int group, g2z__product_warp &warp, const g2z__product_maps &maps) {
  constexpr int READS = FINISH == G2Z__FINISH_TIMES_8, TWO = FINISH == G2Z__FINISH_GELU_8;
  constexpr uint32_t SLOT = g2z__product_shared::SLOT;
  const uint32_t g = (uint32_t)g2z__lane() / 4, t = (uint32_t)g2z__lane() % 4;
  const uint32_t warp4 = threadIdx.x / 32 % 4, row = warp4 * 16 + g;
  const uint32_t first = warp.slots + (TWO ? 0 : (uint32_t)warp.slot.stage * SLOT);
  const uint32_t second = first + (TWO ? SLOT : 0);
  /* This lane's places: pieces 2 t and 2 t + 1 of a row of the slope, swizzled; piece t of an 8-bit
   * row; its four tokens' word in column 2 t of 8, swizzled. */
  const uint32_t at_slope = first + row * 128 + (2 * t ^ g) * 16;
  const uint32_t at_row = second + row * 64 + t * 16;
  const uint32_t at_column =
      second + SLOT / 2 + t * 256 + ((2 * warp4 + g / 4) ^ 2 * t) * 16 + g % 4 * 4;
  uint32_t fours[2][8], slope[4][8];
  if constexpr (READS) {
    g2z__barrier_wait_warp(warp.slope + warp.slot.stage, warp.slot.phase);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t down = (uint32_t)(i / 2 * 64 + i % 2 * 8) * 128;
      g2z__tile_get(&slope[i][0], at_slope + down);
      g2z__tile_get(&slope[i][4], (at_slope ^ 16) + down);
    }
  }
  const __half2 most = g2z__product_fours<E, FINISH>(fours, slope, sums, c, group, warp, maps);
  if (TWO) g2z__product_count(x, most, fours);
  if (!READS && warp.first) g2z__stores_have_read<TWO ? 0 : 1>();
  g2z__named_sync(1 + g2z__warpgroup(), 128); /* all have read the slope, or the slots are free */
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t down = (uint32_t)(i / 2 * 64 + i % 2 * 8), *four = fours[i / 2];
    const unsigned pick = i % 2 ? 0x7632 : 0x5410; /* the upper or lower halves of two words */
    if (TWO) {
      g2z__tile_put(at_slope + down * 128, &slope[i][0]);
      g2z__tile_put((at_slope ^ 16) + down * 128, &slope[i][4]);
    }
    const uint32_t pack[4] = {
        __byte_perm(four[0], four[1], pick), __byte_perm(four[2], four[3], pick),
        __byte_perm(four[4], four[5], pick), __byte_perm(four[6], four[7], pick)};
    g2z__tile_put(at_row + down * 64, pack);
  }
#pragma unroll
  for (uint32_t n = 0; n < 8; n++) {
    g2z__word_put(at_column + n * 1024, __byte_perm(fours[0][n], fours[1][n], 0x6420));
    g2z__word_put((at_column ^ 16) + 128 + n * 1024,
                  __byte_perm(fours[0][n], fours[1][n], 0x7531));
  }
  g2z__fence_async();
  g2z__named_sync(1 + g2z__warpgroup(), 128);
  if (warp.first) {
    const int top = warp.row / G2Z__PRODUCT_ROWS * G2Z__PRODUCT_ROWS;
    const int column = warp.column + group * 64;
    if (TWO) g2z__store_box(&maps.other, column, top, first);
    g2z__store_box(&maps.out, column, top, second);
    g2z__store_dealt(&maps.columns, top, column, second + SLOT / 2);
    g2z__stores_commit();
  }
  if (!TWO) warp.slot.next();
}

/* The row of c[m]'s numbers 0 and 1, or with half = 1 of its numbers 2 and 3. */
static __device__ inline int g2z__product_row_at(const g2z__product_warp &warp, int m, int half) {
  return warp.row + m * 64 + half * 8 + g2z__lane() / 4;
}

/* Prepares a tile: columns after the last word become -infinity, whose exponential is 0. */
template <g2z__finish FINISH>
static __device__ inline void g2z__product_words(const g2z__product_data &x, float (&c)[2][24][4],
                                                 g2z__product_warp &warp) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      warp.rows[m].sum[half] = 0;
      warp.rows[m].largest[half] = -INFINITY;
    }
  if (warp.column + G2Z__PRODUCT_COLUMNS <= x.rows.words) return;
#pragma unroll
  for (int n = 0; n < 24; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int column = n * 8 + g2z__lane_column() + i % 2;
      if (g2z__deals<FINISH>) column = g2z__dealt(column);
      if (warp.column + column >= x.rows.words) c[0][n][i] = c[1][n][i] = -INFINITY;
    }
}

/* Stores the exponents of the targets in this tile. Few tiles have a row's target, so that few
 * warps look for it among the 48 numbers that a lane has of a row. */
template <g2z__finish FINISH>
static __device__ inline void g2z__product_targets(const g2z__product_data &x,
                                                   const float (&c)[2][24][4],
                                                   const g2z__product_warp &warp) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = (int)(warp.targets >> 8 * i & 255);
    int lane = column % 8 / 2, place = column / 8 * 2 + column % 2;
    if (column == 255) continue;
    if (g2z__deals<FINISH>) {
      lane = column % 64 / 16;
      place = column / 64 * 16 + column % 16;
    }
    if (lane != g2z__lane() % 4) continue;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 48; n++)
      if (n == place) sum = c[i / 2][n / 2][i % 2 * 2 + n % 2];
    x.rows.target[g2z__product_row_at(warp, i / 2, i % 2)] = sum * warp.rows[i / 2].unit[i % 2];
  }
}

/* Adds and stores the tile's column sums; a lane holds two of each 64 columns. Each warp puts its
 * sums in a staging slot whose store is done. The next tile's first slope is the next to use it. */
template <g2z__finish FINISH>
static __device__ __forceinline__ void
g2z__product_sums(const g2z__product_data &x, const float (&columns)[6],
                  const g2z__product_warp &warp, unsigned char *staging, int group) {
  constexpr int DEALS = g2z__deals<FINISH>;
  constexpr int PITCH = DEALS ? 256 : (int)g2z__product_shared::WARP / (int)sizeof(float);
  staging += group * 4 * (int)g2z__product_shared::WARP;
  if (DEALS) staging += warp.slot.stage * (int)g2z__product_shared::SLOT;
  else staging += warp.used.stage * G2Z__PRODUCT_PIECE;
  /* The last 64 columns' store may run. */
  if (DEALS ? warp.first : g2z__lane() == 0) g2z__stores_have_read<1>();
  g2z__named_sync(1 + group, 128);
  float *all = reinterpret_cast<float *>(staging);
  float *mine = all + (int)threadIdx.x / 32 % 4 * PITCH;
#pragma unroll
  for (int i = 0; i < 6; i++) {
    int column = g2z__summed_column<16>(i % 2);
    if (DEALS) column = g2z__dealt(column);
    mine[i / 2 * 64 + column] = columns[i];
  }
  g2z__named_sync(1 + group, 128);
  int slab = warp.row / G2Z__PRODUCT_ROWS;
  for (int i = (int)threadIdx.x % 128; i < G2Z__PRODUCT_COLUMNS; i += 128)
    if (slab < x.slabs && warp.column + i < x.M)
      x.sums[(size_t)slab * (size_t)x.M + (size_t)(warp.column + i)] =
          all[i] + all[PITCH + i] + all[2 * PITCH + i] + all[3 * PITCH + i];
  g2z__fence_async();
  g2z__named_sync(1 + group, 128);
}

template <typename A, typename E, g2z__finish FINISH>
static __device__ __forceinline__ void
g2z__product_finish(const g2z__product_data &x, float (&c)[2][24][4], g2z__product_warp &warp,
                    unsigned char *staging, const g2z__product_maps &maps, int group) {
  float columns[6];
  if constexpr (g2z__is<FINISH, G2Z__FINISH_SOFTMAX>) {
    g2z__product_targets<FINISH>(x, c, warp);
    g2z__product_words<FINISH>(x, c, warp);
  }
#pragma unroll
  for (int n = 0; n < 3; n++) {
    float sums[16] = {};
    if constexpr (g2z__deals<FINISH>)
      g2z__product_dealt<E, FINISH>(x, sums, c, n, warp, maps);
    else g2z__product_columns<A, E, FINISH>(x, sums, c, n, warp, maps);
    if constexpr (g2z__is<FINISH, G2Z__FINISH_TIMES>) {
      g2z__sum_lanes(sums);
      columns[2 * n] = sums[0];
      columns[2 * n + 1] = sums[1];
    }
  }
  /* Join each row's sum and largest exponent from four lanes and store them. */
  if constexpr (g2z__is<FINISH, G2Z__FINISH_SOFTMAX>)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float sum = warp.rows[i / 2].sum[i % 2], largest = warp.rows[i / 2].largest[i % 2];
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        sum += __shfl_xor_sync(G2Z__ALL_LANES, sum, lanes);
        largest = fmaxf(largest, __shfl_xor_sync(G2Z__ALL_LANES, largest, lanes));
      }
      int row = g2z__product_row_at(warp, i / 2, i % 2);
      size_t at = (size_t)(warp.column / G2Z__PRODUCT_COLUMNS) * (size_t)x.N + (size_t)row;
      if (g2z__lane() % 4 == 0 && row < x.N) x.rows.parts[at] = make_float2(sum, largest);
    }
  if constexpr (g2z__is<FINISH, G2Z__FINISH_TIMES>)
    g2z__product_sums<FINISH>(x, columns, warp, staging, group);
}

/* ----- a warpgroup's tiles ----------------------------------------------- */

/* Computes the sums of one tile. A stage is released once the next stage's products are issued.
 * `other` is loaded after the first products are issued: they hide the wait for earlier stores. */
template <typename E, g2z__finish FINISH, g2z__by BY>
static __device__ __forceinline__ void
g2z__product_sum(float (&c)[2][24][4], const g2z__product_data &x, uint32_t shared,
                 g2z__ring<G2Z__PRODUCT_STAGES> &ring, g2z__product_warp &warp,
                 const g2z__product_maps &maps, const g2z__product_barriers *barriers) {
  const int blocks = (x.K + g2z__terms<E> - 1) / g2z__terms<E>;
  g2z__barrier_wait_warp(barriers->full + ring.stage, ring.phase);
  g2z__product_step<E, BY>(c, shared + (uint32_t)(ring.stage * g2z__product_shared::STAGE), 0);
  int before = ring.stage;
  ring.next();
  if constexpr (FINISH == G2Z__FINISH_ADD || FINISH == G2Z__FINISH_TIMES) {
    if (g2z__lane() == 0) g2z__stores_have_read<0>();
    __syncwarp();
    if (g2z__reads_other<FINISH>(x)) g2z__product_ask(warp, &maps.other, 0, G2Z__PRODUCT_PIECES);
  } else if constexpr (FINISH == G2Z__FINISH_TIMES_8) {
    if (warp.first) {
      g2z__stores_have_read<0>();
      g2z__product_ask_slope(warp, maps, warp.slot.stage, 0);
      g2z__product_ask_slope(warp, maps, warp.slot.stage ^ 1, 1);
    }
    __syncwarp();
  }
  for (int k = 1; k < blocks; k++) {
    g2z__barrier_wait_warp(barriers->full + ring.stage, ring.phase);
    g2z__product_step<E, BY>(c, shared + (uint32_t)(ring.stage * g2z__product_shared::STAGE), 1);
    g2z__wgmma_wait<1>();
    g2z__barrier_arrive_warp(barriers->empty + before);
    before = ring.stage;
    ring.next();
  }
  g2z__named_arrive(4 - g2z__warpgroup(), 256); /* the next stages hold the other group's tile */
  g2z__wgmma_wait<0>();
  g2z__barrier_arrive_warp(barriers->empty + before);
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 96; n++) asm volatile("" : "+f"(c[m][n / 4][n % 4])::"memory");
}

/* Computes tiles group, group + 2, ... of this multiprocessor. A barrier's phase is one bit, so a
 * warpgroup may wait for its first stage only after the other has received its last stage. */
template <typename A, typename E, g2z__finish FINISH, g2z__by BY>
static __device__ inline void
g2z__product_tiles(const g2z__product_data &x, uint32_t shared, unsigned char *staging,
                   const g2z__product_maps &maps, const g2z__product_barriers *barriers,
                   int group) {
  typedef g2z__product_shared S;
  const int warp8 = __shfl_sync(G2Z__ALL_LANES, (int)threadIdx.x / 32, 0);
  g2z__product_warp warp = {};
  warp.staging = shared + (uint32_t)(S::STAGING + warp8 * S::WARP);
  warp.other = barriers->other[warp8];
  warp.slots = shared + (uint32_t)(S::STAGING + group * 2 * S::SLOT);
  warp.slope = barriers->slope[group];
  warp.first = threadIdx.x % 128 == 0;
  g2z__ring<G2Z__PRODUCT_STAGES> ring = {0, 0};
  float c[2][24][4];
  int turn = group; /* even: the next tile is this warpgroup's */
  if (group == 1) g2z__named_arrive(3, 256);
  for (int t = (int)blockIdx.x; t < x.down * x.across; t += (int)gridDim.x) {
    g2z__product_place at = g2z__product_at(x, t);
    if (g2z__product_skips<FINISH>(x, at)) continue;
    if (turn++ % 2) {
      int stage = ring.stage + (x.K + g2z__terms<E> - 1) / g2z__terms<E>;
      ring.phase ^= (uint32_t)(stage / G2Z__PRODUCT_STAGES) & 1;
      ring.stage = stage % G2Z__PRODUCT_STAGES;
      continue;
    }
    warp.row = at.row + warp8 % 4 * 16;
    warp.column = at.column;
    if constexpr (g2z__is<FINISH, G2Z__FINISH_SOFTMAX>) {
      warp.targets = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int row = g2z__product_row_at(warp, i / 2, i % 2), column = -1;
        float reference = 0, unit = G2Z__LOG2E;
        if (row < x.N) {
          reference = x.rows.reference[row];
          column = max(x.rows.targets[row], 0) - at.column;
          if constexpr (sizeof(E) == 1) unit = x.rows.unit[row];
        }
        if (column < 0 || column >= G2Z__PRODUCT_COLUMNS) column = 255;
        warp.rows[i / 2].reference[i % 2] = reference;
        warp.rows[i / 2].unit[i % 2] = unit;
        warp.targets |= (uint32_t)column << 8 * i;
      }
    } else if (!g2z__is<FINISH, G2Z__FINISH_TIMES> && x.bias)
#pragma unroll
      for (int i = 0; i < 3; i++) {
        int column = at.column + i * 64 + g2z__lane() * 2;
        warp.bias[i] = column < x.M ? __ldg(static_cast<const uint32_t *>(x.bias) + column / 2) : 0;
        if constexpr (g2z__quarters<A, FINISH>)
          warp.bias[i] =
              g2z__bits(__hmul2(g2z__halves(warp.bias[i]), __float2half2_rn(0.25f)));
      }
    g2z__named_sync(3 + group, 256);
    g2z__product_sum<E, FINISH, BY>(c, x, shared, ring, warp, maps, barriers);
    g2z__product_finish<A, E, FINISH>(x, c, warp, staging, maps, group);
  }
  if (g2z__lane() == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* g2z_k_product_hopper: out = finish(left right)
 *   maps   left     [N,K] E in   E is A, e4m3 or e5m2; as tiles of 128 x 128 bytes
 *          right    [K,M] E in   BY_COLUMNS, as tiles of 64 x 64; [M,K] BY_ROWS, as tiles of 192 x
 *                                128 bytes, e4m3 when E is e5m2
 *          out      [N,M] A out  as tiles of 16 x 64; with *_8 [N,M] in 8 bits, of 128 x 64
 *          other    [N,M] A      in with ADD and TIMES, out with GELU; with ADD it may be `out`.
 *                                As tiles of 16 x 64, with *_8 of 128 x 64
 *          columns  [M,N] out    with *_8: `out` by columns, as tiles of 64 x 128
 *   x      sums     f32 out with TIMES, before rounding; with TIMES_8 see g2z__product_fours
 *          rows     in and out with SOFTMAX, see g2z__softmax_rows
 *          narrow   8 bits out with GELU, in addition to `out`
 * Math    f32 accumulation, but 8-bit products keep 14 bits; M and K are multiples of 8
 * Launch  one block of 384 threads per multiprocessor; 225 KB of shared memory. The loading
 *         warpgroup has 24 registers per thread, the others 240
 * Cost    2NKM flops: N=32768, K=768, M=3072 is 155 GFLOP, in 8 bits 94 us of wgmma. Plain products
 *         take about as long as cuBLASLt's. An epilogue runs during the other warpgroup's products.
 *         GELU_8 has 10 instructions per element and takes 88 us alone, the tiles' loads from L2
 *         take 68 and the stores 115: together 175. Stores of 32 bytes and GELU in fp32, 20
 *         instructions, took 250
 * Order   k upwards; bitwise repeatable
 * Oracle  g2z__cpu_linear_fwd, g2z__cpu_linear_bwd_data; tests cuda_products, cuda_linear,
 *         cuda_gelu. SOFTMAX: g2z__cpu_head_loss; test cuda_head */
template <typename A, typename E, g2z__finish FINISH, g2z__by BY>
static __global__ void __launch_bounds__(G2Z__HOPPER_THREADS(384), 1)
g2z_k_product_hopper(const __grid_constant__ g2z__product_maps maps,
                     const __grid_constant__ g2z__product_data x) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char g2z__shared_bytes[];
  __shared__ g2z__product_barriers barriers;
  uint32_t begin = g2z__shared_at(g2z__shared_bytes), shared = (begin + 1023u) & ~1023u;
  unsigned char *staging = g2z__shared_bytes + (shared - begin) + g2z__product_shared::STAGING;
  if (threadIdx.x == 0) {
    for (int i = 0; i < G2Z__PRODUCT_STAGES; i++) {
      g2z__barrier_init(barriers.full + i, 1);
      g2z__barrier_init(barriers.empty + i, 4);
    }
    for (int i = 0; i < 8 * G2Z__PRODUCT_PIECES; i++) g2z__barrier_init(barriers.other[0] + i, 1);
    for (int i = 0; i < 4; i++) g2z__barrier_init(barriers.slope[0] + i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  g2z__k_begin();
  __syncthreads();
  int group = g2z__warpgroup();
  if (group < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    g2z__product_tiles<A, E, FINISH, BY>(x, shared, staging, maps, &barriers, group);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256) g2z__product_load<E, FINISH, BY>(x, shared, maps, &barriers);
  }
#else
  (void)maps, (void)x;
#endif
}

/* ----- launchers --------------------------------------------------------- */

/* The kernel for a key, or NULL. Its left operand is cuBLASLt's B, its right operand A. */
template <typename A>
static g2z__product_kernel g2z__product_kernel_of(const g2z__lt_key *key, int adds) {
  constexpr g2z__by ROWS = G2Z__BY_ROWS;
  int epilogue = key->epilogue, by_rows = key->transpose_a;
  int plain = epilogue == CUBLASLT_EPILOGUE_DEFAULT || epilogue == CUBLASLT_EPILOGUE_BIAS;
  if (key->type == CUDA_R_8F_E4M3) {
    typedef __nv_fp8_e4m3 E;
    if constexpr (std::is_same<A, __half>::value) {
      if (epilogue == G2Z__EPILOGUE_SOFTMAX_8)
        return g2z_k_product_hopper<A, E, G2Z__FINISH_SOFTMAX_8, ROWS>;
      if (epilogue == G2Z__EPILOGUE_GELU_8)
        return g2z_k_product_hopper<A, E, G2Z__FINISH_GELU_8, ROWS>;
    }
    if (epilogue == G2Z__EPILOGUE_SOFTMAX)
      return g2z_k_product_hopper<A, E, G2Z__FINISH_SOFTMAX, ROWS>;
    if (epilogue == G2Z__EPILOGUE_GELU)
      return g2z_k_product_hopper<A, E, G2Z__FINISH_GELU, ROWS>;
    return g2z_k_product_hopper<A, E, G2Z__FINISH_ADD, ROWS>;
  }
  if constexpr (std::is_same<A, __half>::value)
    if (key->type == CUDA_R_8F_E5M2) {
      typedef __nv_fp8_e5m2 E;
      if (epilogue == G2Z__EPILOGUE_TIMES_SLOPE_8)
        return g2z_k_product_hopper<A, E, G2Z__FINISH_TIMES_8, ROWS>;
      return g2z_k_product_hopper<A, E, G2Z__FINISH_PLAIN, ROWS>;
    }
  if (by_rows && epilogue == CUBLASLT_EPILOGUE_DEFAULT && !adds)
    return g2z_k_product_hopper<A, A, G2Z__FINISH_PLAIN, ROWS>;
  if (by_rows && epilogue == G2Z__EPILOGUE_TIMES_SLOPE && !adds)
    return g2z_k_product_hopper<A, A, G2Z__FINISH_TIMES, ROWS>;
  if (by_rows && epilogue == G2Z__EPILOGUE_SOFTMAX && !adds)
    return g2z_k_product_hopper<A, A, G2Z__FINISH_SOFTMAX, ROWS>;
  if (!by_rows && plain) return g2z_k_product_hopper<A, A, G2Z__FINISH_ADD, G2Z__BY_COLUMNS>;
  if (!by_rows && epilogue == G2Z__EPILOGUE_GELU && !adds)
    return g2z_k_product_hopper<A, A, G2Z__FINISH_GELU, G2Z__BY_COLUMNS>;
  return NULL;
}

/* A is the device's type. Muon's products are bf16 on every device. */
template <typename A>
static g2z__product_kernel g2z__product_kernel_for(const g2z__lt_key *key, int adds) {
  if constexpr (std::is_same<A, __half>::value)
    if (key->type_d == CUDA_R_16F) return g2z__product_kernel_of<__half>(key, adds);
  return g2z__product_kernel_of<__nv_bfloat16>(key, adds);
}

static int g2z__hopper_product_fits(const g2z_device *device, const g2z__lt_key *key,
                                    const g2z__lt_operands *on) {
  int multiples = key->m % 8 == 0 && key->k % 8 == 0 && key->ld_a % 8 == 0 &&
                  key->ld_b % 8 == 0 && key->ld_d % 8 == 0;
  int types = (key->type == CUDA_R_16F || key->type == CUDA_R_16BF) && key->type_d == key->type;
  const g2z__cuda *cuda = g2z__cuda_of(device);
  return cuda->hopper && multiples && types && !key->transpose_b && !key->batched &&
         cuda->product_kernel_for(key, on && on->c) != NULL;
}

/* Maps x[rows,columns] of a cudaDataType_t in boxes of 128-byte rows; `ld` numbers per row. */
static g2z_status g2z__product_map(g2z_device *device, CUtensorMap *map, int number,
                                   const void *x, int rows, int columns, int ld, int box_rows) {
  unsigned bytes = 2;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (number == CUDA_R_16F) type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (number == CUDA_R_8F_E4M3 || number == CUDA_R_8F_E5M2) {
    bytes = 1;
    type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
  const g2z__tensor tensor = {x, type, 2, {(cuuint64_t)columns, (cuuint64_t)rows},
                              {(cuuint64_t)ld * bytes}, {128 / bytes, (cuuint32_t)box_rows},
                              CU_TENSOR_MAP_SWIZZLE_128B};
  return g2z__tensor_map(device, map, &tensor);
}

/* Maps x[rows,columns] of 8-bit numbers in boxes of 128 columns of `box_rows` dealt rows. */
static g2z_status g2z__product_map_dealt(g2z_device *device, CUtensorMap *map, const void *x,
                                         int rows, int columns, int ld, int box_rows) {
  const cuuint64_t row = (cuuint64_t)ld, groups = (cuuint64_t)rows / 64;
  const g2z__tensor tensor = {x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5,
                              {(cuuint64_t)columns, 2, 4, 8, groups},
                              {row, 16 * row, 2 * row, 64 * row},
                              {128, 2, 4, 8, (cuuint32_t)box_rows / 64},
                              CU_TENSOR_MAP_SWIZZLE_128B};
  return g2z__tensor_map(device, map, &tensor);
}

/* The maps of a product whose columns are dealt. The 8-bit columns follow the rows. */
static g2z_status g2z__product_maps_dealt(g2z_device *device, g2z__product_maps *maps,
                                          const g2z__lt_key *key, const g2z__lt_operands *on) {
  const int N = key->n, M = key->m;
  const g2z__tensor rows = {on->d, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2,
                            {(cuuint64_t)M, (cuuint64_t)N}, {(cuuint64_t)M}, {64, 128},
                            CU_TENSOR_MAP_SWIZZLE_NONE};
  G2Z_TRY(g2z__product_map_dealt(device, &maps->right, on->a, M, key->k, key->ld_a,
                                 G2Z__PRODUCT_COLUMNS));
  G2Z_TRY(g2z__tensor_map(device, &maps->out, &rows));
  G2Z_TRY(g2z__product_map_dealt(device, &maps->columns, (uint8_t *)on->d + (size_t)N * (size_t)M,
                                 M, N, N, 64));
  if (!on->slope) return G2Z_OK;
  return g2z__product_map(device, &maps->other, key->type_d, on->slope, N, M, key->ld_d,
                          G2Z__PRODUCT_ROWS);
}

static g2z_status g2z__product_maps_plain(g2z_device *device, g2z__product_maps *maps,
                                          const g2z__lt_key *key, const g2z__lt_operands *on) {
  const int N = key->n, K = key->k, M = key->m, type = key->type, type_d = key->type_d;
  const void *beside = on->d;
  if (on->slope) beside = on->slope;
  if (on->c) beside = on->c;
  if (key->transpose_a)
    G2Z_TRY(g2z__product_map(device, &maps->right, type, on->a, M, K, key->ld_a,
                             G2Z__PRODUCT_COLUMNS));
  else G2Z_TRY(g2z__product_map(device, &maps->right, type, on->a, K, M, key->ld_a, 64));
  G2Z_TRY(g2z__product_map(device, &maps->out, type_d, on->d, N, M, key->ld_d, 16));
  return g2z__product_map(device, &maps->other, type_d, beside, N, M, key->ld_d, 16);
}

static g2z_status g2z__hopper_product_run(g2z_device *device, const g2z__lt_key *key,
                                          const g2z__lt_operands *on) {
  g2z__product_kernel kernel = g2z__cuda_of(device)->product_kernel_for(key, on->c != NULL);
  const int N = key->n, K = key->k, M = key->m;
  const int softmax = key->epilogue == G2Z__EPILOGUE_SOFTMAX ||
                      key->epilogue == G2Z__EPILOGUE_SOFTMAX_8;
  const int deals = key->epilogue >= G2Z__EPILOGUE_SOFTMAX_8;
  G2Z_ASSERT(!deals || (N % 128 == 0 && M % 64 == 0));
  g2z__product_maps maps;
  memset(&maps, 0, sizeof maps);
  G2Z_TRY(g2z__product_map(device, &maps.left, key->type, on->b, N, K, key->ld_b,
                           G2Z__PRODUCT_ROWS));
  if (deals) G2Z_TRY(g2z__product_maps_dealt(device, &maps, key, on));
  else G2Z_TRY(g2z__product_maps_plain(device, &maps, key, on));
  g2z__product_data x;
  memset(&x, 0, sizeof x);
  x.bias = on->bias;
  x.sums = on->sums;
  x.rows = on->rows;
  x.narrow = (uint8_t *)on->narrow;
  x.clamped = device->clamped_inputs;
  x.N = N;
  x.K = K;
  x.M = M;
  x.down = x.slabs = (int)g2z__blocks((size_t)N, G2Z__PRODUCT_ROWS);
  x.across = (int)g2z__blocks((size_t)M, G2Z__PRODUCT_COLUMNS);
  x.stripe = softmax ? G2Z__SOFTMAX_STRIPE : G2Z__PRODUCT_STRIPE;
  x.adds = on->c != NULL;
  return g2z__launch(device, "g2z_k_product_hopper", kernel,
                     (unsigned)min(x.down * x.across, g2z__cuda_of(device)->sms), 384,
                     (size_t)g2z__product_shared::BYTES, maps, x);
}

/* ===== >>k43 8 bits elsewhere ============================================
 * In:  room k42's products of 8-bit operands, on a GPU of sm_89 or newer that has no room k42.
 * Out: the same, within the same bounds.
 * Law: cuBLASLt multiplies; K and M are multiples of 16. A pass after the product replaces the
 *      epilogue, and reads the product rounded to A.
 *
 * A product and its pass take a slice of the result's rows at a time. Then the pass finds the slice
 * in L2, and a data gradient needs memory for a slice of the product only. */

/* The rows of a slice: a multiple of 128, few enough for L2. Up to a quarter more slices are taken
 * if all then have the same size: each size is a shape, and each shape needs an algorithm. */
static size_t g2z__slice_most(const g2z_device *device, size_t row_bytes) {
  return max(g2z__cuda_of(device)->slice_bytes / row_bytes / 128 * 128, (size_t)128);
}
static int g2z__slice_rows(const g2z_device *device, int N, size_t row_bytes) {
  const int least = (int)g2z__blocks((size_t)N, g2z__slice_most(device, row_bytes));
  if (least == 1) return N;
  for (int slices = least; slices <= least + least / 4 + 1; slices++)
    if (N % (128 * slices) == 0) return N / slices;
  return (int)g2z__blocks(g2z__blocks((size_t)N, (size_t)least), 128) * 128;
}
/* Bytes of the largest slice of up to N rows; 0 on Hopper, whose kernels need none. */
static size_t g2z__slice_bytes(const g2z_device *device, int N, size_t row_bytes) {
  if (g2z__cuda_of(device)->hopper) return 0;
  return min((size_t)N, g2z__slice_most(device, row_bytes)) * row_bytes;
}

template <typename A>
struct g2z__finish_slice {
  const A *x;                    /* [n,M] the product, with GELU plus the bias; may be `slope` */
  A *y;                          /* [n,M] out with GELU */
  A *slope;                      /* [n,M] in with TIMES_8, else out */
  uint8_t *rows;                 /* [n,M] in 8 bits, out; with GELU it may be NULL */
  uint8_t *columns;              /* with *_8: [M] columns of N numbers, out */
  float *sums;                   /* [blocks,M] out with TIMES_8 */
  double *clamped;               /* counts the numbers in e4m3 `rows`; or NULL */
  int n, N, M;
};

/* g2z_k_finish: the epilogue FINISH of a slice of a product.
 *   x   g2z__finish_slice; n % 128 == 0 with *_8, M % 16 == 0
 * Math    f32; y and the product times slope are rounded to A, then to 8 bits
 * Launch  128 rows and 256 columns per block of 256 threads
 * Cost    GELU_8 and TIMES_8 6 n M bytes, 2 of them from L2: N=32768, M=3072 is 604 MB
 * Order   a warp adds 16 of the 128 rows, 4 at a time; then the 8 warps in order
 * Oracle  g2z__cpu_linear_fwd, g2z__cpu_linear_bwd_data; tests cuda_linear, cuda_fp8 */
template <typename A, g2z__finish FINISH>
static __global__ void __launch_bounds__(256)
g2z_k_finish(const __grid_constant__ g2z__finish_slice<A> x) {
  constexpr bool TIMES = FINISH == G2Z__FINISH_TIMES_8, EIGHT = FINISH != G2Z__FINISH_GELU;
  typedef std::conditional_t<TIMES, __nv_fp8_e5m2, __nv_fp8_e4m3> E;
  __shared__ float shared[TIMES ? 8 : 1][256];
  const int g = (int)threadIdx.x / 32, first = (int)blockIdx.y * 256;
  const int lane = (int)threadIdx.x % 32, column = first + lane * 8;
  float sum[8] = {};
  g2z__k_begin();
  for (int part = 0; part < 4; part++) {
    const int block = (int)blockIdx.x * 4 + part;
    uint4 raw[4] = {}, factor[4] = {};
    uint2 eight[4] = {};
    bool here[4];
    size_t at[4];
#pragma unroll
    for (int i = 0; i < 4; i++) { /* loaded together: stores in between delay loads */
      const int row = g2z__token_at(block, g, i);
      here[i] = row < x.n && column < x.M;
      at[i] = (size_t)row * (size_t)x.M + (size_t)column;
      if (here[i]) raw[i] = g2z__get(x.x, at[i] / 8);
      if (TIMES && here[i]) factor[i] = g2z__get_once(x.slope, at[i] / 8);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float value[8], by[8];
      g2z__unpack<A>(value, raw[i]);
      g2z__unpack<A>(by, factor[i]);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if constexpr (TIMES) value[j] *= by[j];
        else value[j] = g2z__k_gelu(value[j], by[j]);
      }
      const uint4 rounded = g2z__pack<A>(value);
      eight[i] = g2z__pack_narrow<A, E>(rounded);
      if constexpr (TIMES) {
        g2z__unpack<A>(value, rounded);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += value[j];
      }
      if (!here[i]) continue;
      if constexpr (!TIMES) g2z__put(x.slope, at[i] / 8, g2z__pack<A>(by));
      if constexpr (!EIGHT) g2z__put(x.y, at[i] / 8, rounded);
      if (x.rows) *reinterpret_cast<uint2 *>(x.rows + at[i]) = eight[i];
    }
    if constexpr (!TIMES) g2z__count_clamped(x.rows ? x.clamped : NULL, eight);
    if constexpr (EIGHT) g2z__columns_put(x.columns, eight, block, first, x.N, x.M);
  }
  if constexpr (TIMES) {
#pragma unroll
    for (int j = 0; j < 8; j++) shared[g][lane * 8 + j] = sum[j];
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < 8; warp++) total += shared[warp][threadIdx.x];
    if (first + (int)threadIdx.x < x.M)
      x.sums[(size_t)blockIdx.x * (size_t)x.M + (size_t)first + threadIdx.x] = total;
  }
}

template <typename A>
static g2z_status g2z__sliced_product_run(g2z_device *device, const g2z__lt_key *wanted,
                                          const g2z__lt_operands *on) {
  const int N = wanted->n, M = wanted->m, epilogue = wanted->epilogue;
  const int gradient = wanted->type == CUDA_R_8F_E5M2;
  g2z__lt_key key = *wanted;
  g2z__lt_operands product = *on;
  G2Z_ASSERT(key.k % G2Z__FP8_MULTIPLE == 0 && M % G2Z__FP8_MULTIPLE == 0);
  key.type = gradient ? (int32_t)CUDA_R_8F_E4M3 : G2Z__E4M3_TWICE;
  product.factor = gradient ? g2z__product_unit<__nv_fp8_e5m2> : g2z__product_unit<__nv_fp8_e4m3>;
  if (!g2z__epilogue_is_ours(wanted)) return g2z__lt_multiply(device, &key, &product);

  auto kernel = g2z_k_finish<A, G2Z__FINISH_GELU>;
  g2z__finish_slice<A> x = {NULL, (A *)on->d, (A *)on->slope, (uint8_t *)on->narrow, NULL,
                            on->sums, device->clamped_inputs, 0, N, M};
  key.epilogue = on->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  if (epilogue == G2Z__EPILOGUE_GELU_8 || epilogue == G2Z__EPILOGUE_TIMES_SLOPE_8) {
    G2Z_ASSERT(N % 128 == 0);
    x.rows = (uint8_t *)on->d;
    x.columns = x.rows + (size_t)N * (size_t)M;
    kernel = g2z_k_finish<A, G2Z__FINISH_GELU_8>;
    if constexpr (std::is_same<A, __half>::value)
      if (gradient) kernel = g2z_k_finish<A, G2Z__FINISH_TIMES_8>;
  }
  const int rows = g2z__slice_rows(device, N, (size_t)M * sizeof(A));
  for (int first = 0; first < N; first += rows) {
    const size_t numbers = (size_t)rows * (size_t)M;
    key.n = x.n = min(rows, N - first);
    x.x = gradient ? (const A *)on->slice : x.slope;
    product.d = (void *)x.x;
    G2Z_TRY(g2z__lt_multiply(device, &key, &product));
    G2Z_TRY(g2z__launch(device, "g2z_k_finish", kernel,
                        dim3((unsigned)g2z__blocks((size_t)x.n, 128),
                             (unsigned)g2z__blocks((size_t)M, 256)), 256, 0, x));
    product.b = (const uint8_t *)product.b + (size_t)rows * (size_t)key.ld_b;
    x.slope += numbers;
    if (x.y) x.y += numbers;
    if (x.rows) x.rows += numbers;
    if (x.columns) x.columns += rows;
    if (x.sums) x.sums += numbers / 128;
  }
  return G2Z_OK;
}

template <typename A>
static g2z_status g2z__narrow_product_run(g2z_device *device, const g2z__lt_key *key,
                                          const g2z__lt_operands *on) {
  if (g2z__cuda_of(device)->hopper) return g2z__hopper_product_run(device, key, on);
  return g2z__sliced_product_run<A>(device, key, on);
}

/* ===== >>k50 head ========================================================
 * In:  the last hidden rows h[N,C] and targets. Out: losses; dh and dwte.
 * Law: logits exist for `chunk` tokens at a time, in A, and their gradients overwrite them. In
 *      16-bit training on Hopper, if tuning is on, exponentials replace both; with fp8 on all GPUs.
 *      dwte accumulates over the chunks in fp32; with a single chunk it may be rounded at once. */

/* The softmax of some numbers: sum is the sum of exp(x - max). */
typedef struct g2z__softmax {
  float max, sum;
} g2z__softmax;

/* Joins a warp's parts in a tree, for every thread. An empty part has max -infinity and sum 0. */
static __device__ inline g2z__softmax g2z__softmax_warp(g2z__softmax part) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) {
    float max = __shfl_xor_sync(G2Z__ALL_LANES, part.max, lanes);
    float sum = __shfl_xor_sync(G2Z__ALL_LANES, part.sum, lanes), most = fmaxf(part.max, max);
    float shift_a = part.max == most ? 1.0f : g2z__exp2((part.max - most) * G2Z__LOG2E);
    float shift_b = max == most ? 1.0f : g2z__exp2((max - most) * G2Z__LOG2E);
    part.sum = part.sum * shift_a + sum * shift_b;
    part.max = most;
  }
  return part;
}

#define G2Z__ENTROPY_THREADS 1024

/* Adds the first `count` numbers of a pack, times `unit`, to a softmax. */
template <typename A>
static __device__ inline void g2z__softmax_add(g2z__softmax &part, uint4 raw, int count,
                                               float unit = 1) {
  constexpr int L = g2z__lanes<A>;
  float value[L], max = part.max, sum = 0;
  g2z__unpack<A>(value, raw);
#pragma unroll
  for (int j = 0; j < L; j++) {
    value[j] *= unit;
    if (j >= count) value[j] = -INFINITY;
    max = fmaxf(max, value[j]);
  }
  /* x log2(e) - offset is rounded once. The offset's own rounding multiplies the sum by a factor
   * that is 1 to within 2^-24 |max|. */
  float offset = max * G2Z__LOG2E;
#pragma unroll
  for (int j = 0; j < L; j++) sum += g2z__exp2(value[j] * G2Z__LOG2E - offset);
  part.sum = part.sum * g2z__exp2((part.max - max) * G2Z__LOG2E) + sum;
  part.max = max;
}

typedef enum g2z__entropy { G2Z__LOSS_ONLY, G2Z__LOSS_AND_GRADIENT } g2z__entropy;

/* g2z_k_cross_entropy: losses[i] = log sum exp(logits[i]) - logits[i][target], and in place
 * logits = (softmax - onehot) * dloss * loss_scale
 *   logits   [n,Vp] A in (and out)   columns V..Vp-1 are padding: their gradient is 0
 *   losses   [n] f32 out
 *   targets  [n] i32 in   -1: loss 0, gradient 0
 * Math    f32; softmax with a running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867);
 *         scaled before the rounding: small probabilities would otherwise become subnormal
 * Launch  persistent blocks of 1024, one per multiprocessor. Their rows fit L2, where the second
 *         pass finds them. A thread has the same packs in both passes: no barrier between them
 * Cost    4 bytes per fp16 logit: V=50257 is 201 KB per token
 * Oracle  g2z__cpu_head_loss */
template <typename A, g2z__entropy ENTROPY>
static __global__ void __launch_bounds__(G2Z__ENTROPY_THREADS, 1)
g2z_k_cross_entropy(A *logits, float *losses, const int32_t *targets, const g2z_step_state *state,
                    float dloss, int n, int V, int Vp) {
  constexpr int L = g2z__lanes<A>;
  __shared__ g2z__softmax shared[32];
  int packs = Vp / L, full = V / L; /* full: packs without padding */
  float scale = 0;
  g2z__k_begin();
  if constexpr (ENTROPY == G2Z__LOSS_AND_GRADIENT) scale = dloss * state->loss_scale;
  for (int row = (int)blockIdx.x; row < n; row += (int)gridDim.x) {
    A *at = logits + (size_t)row * (size_t)Vp;
    g2z__softmax part = {-INFINITY, 0};
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < full; i += G2Z__ENTROPY_THREADS)
      g2z__softmax_add<A>(part, g2z__get(at, (size_t)i), L);
    if ((int)threadIdx.x == full % G2Z__ENTROPY_THREADS && full * L < V)
      g2z__softmax_add<A>(part, g2z__get(at, (size_t)full), V - full * L);
    part = g2z__softmax_warp(part);
    __syncthreads(); /* all threads have read the last row */
    if (threadIdx.x % G2Z__WARP == 0) shared[threadIdx.x / G2Z__WARP] = part;
    __syncthreads();
    g2z__softmax all = g2z__softmax_warp(shared[threadIdx.x % G2Z__WARP]);
    int target = targets[row]; /* -1: neither loss nor gradient */
    float offset = all.max * G2Z__LOG2E, factor = target < 0 ? 0 : scale / all.sum;
    if ((int)threadIdx.x == max(target, 0) / L % G2Z__ENTROPY_THREADS)
      losses[row] = target < 0 ? 0 : logf(all.sum) + (all.max - g2z__to_float(at[target]));
    int written = ENTROPY == G2Z__LOSS_AND_GRADIENT ? packs : 0;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < written; i += G2Z__ENTROPY_THREADS) {
      float value[L];
      g2z__unpack<A>(value, g2z__get(at, (size_t)i));
#pragma unroll
      for (int j = 0; j < L; j++) value[j] = g2z__exp2(value[j] * G2Z__LOG2E - offset) * factor;
      if (i == target / L || i >= full) { /* the target's pack, or padding: few threads */
#pragma unroll
        for (int j = 0; j < L; j++) {
          if (i * L + j >= V) value[j] = 0;
          if (i * L + j == target) value[j] = (value[j] / factor / all.sum - 1.0f) * scale;
        }
      }
      __stcs(reinterpret_cast<uint4 *>(at) + i, g2z__pack<A>(value));
    }
  }
}

/* g2z_k_add_losses: *sum += all losses, in fp64, by one block.
 * Order  thread t adds losses t, t+1024, ...; then a tree */
static __global__ void __launch_bounds__(1024)
g2z_k_add_losses(double *sum, const float *losses, int n) {
  __shared__ double parts[1024];
  double part = 0;
  g2z__k_begin();
  for (int i = (int)threadIdx.x; i < n; i += 1024) part += (double)losses[i];
  parts[threadIdx.x] = part;
  for (unsigned half = 512; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *sum += parts[0];
}

/* ----- exponentials instead of logits ------------------------------------
 * g2z_k_cross_entropy reads and writes every logit: 6.6 GB in a step of 32 x 1024 tokens. On Hopper
 * the product stores e = exp(l - r) instead, with a reference r per row, and sums the rows. Let z
 * be a row's sum and g = dloss * loss_scale. The gradient of the logits is
 *     (softmax - onehot) g = (e, but -(z - e) at the target) g / z
 * so that dh = (e wte) g / z and dwte = e^T (h g / z): the row's factor g / z is applied to rows of
 * C numbers, not of V.
 *
 * e and h g / z must fit A. In powers of 2, r = log2(s) - BELOW. s is the larger of two sums of
 * exponentials: of the first SAMPLE words, the most frequent ones in a vocabulary like GPT-2's, and
 * of the target alone. So z is at least 16, up to the rounding of logits. A z above MOST would cost
 * h g / z digits in fp16. If z is above MOST or below LEAST, the row's tiles are computed again
 * with an r that makes z 16. If z overflowed or vanished, the new r is ROOM above the row's largest
 * exponent, so that z lies from 1/16 to V/16. In GPT-2's training few tiles have such a row; with
 * 131,072 equally likely words every row is out of bounds.
 *
 * A target's logit in the loss, and its e in z - e, come from the sum that the product makes, so
 * that loss, z and gradients belong to one softmax. Sums of 8-bit products keep 14 bits and are
 * truncated; the exact logit of a target is usually larger. With fp8 the product that makes the
 * exponentials multiplies e4m3.
 * With fp8=all the products that make dh and dwte multiply 8 bits, too. e is e5m2, stored as rows
 * and as columns in the memory of 16-bit logits. z is at least 256, up to the same rounding, so
 * that e's smallest number is about 2^-24 of z; after an overflow z lies from 256 to 256 V. The
 * target has a row's largest number. It may saturate, and dh adds what its rounding lost. dwte is
 * g / 2^9 times the product of e with h 2^9 / z in e4m3, which lies in dh until dh is made. */

#define G2Z__HEAD_SAMPLE 512
#define G2Z__HEAD_ROWS 32        /* rows per block of g2z_k_head_rows */
static_assert(4 * G2Z__HEAD_ROWS == G2Z__PRODUCT_ROWS, "g2z__softmax_rows.again: an int for each");

typedef struct g2z__head_rows {
  float *reference, *target;     /* [n] both in powers of 2: r; the target's logit */
  float *factor;                 /* [n] g / z; fp8=all: also [n] z - e of the target, [1] g / 2^9 */
  int4 *again;                   /* [tiles down] for each 32 rows: 1 if a sum is out of bounds */
  float2 *parts;                 /* [tiles across,n] */
  float *dh;                     /* [n,C] dh before the factor, in the memory of parts */
  /* With fp8: */
  uint8_t *narrow_h, *narrow_wte; /* [n], [Vp] rows of C numbers in e4m3 */
  float *unit;                   /* [n] as in g2z__softmax_rows */
  void *slice;                   /* logits of some rows, in A; unused on Hopper */
} g2z__head_rows;

template <typename A>
struct g2z__head_chunk {
  A *logits;                     /* [n,Vp]; then their exponentials or their gradient */
  A *dh;                         /* [n,C]; NULL: only losses are wanted */
  float *losses;                 /* [n] */
  const A *h, *wte;              /* [n,C]; [Vp,C], 0 from word V on */
  const int32_t *targets;        /* [n] */
  const g2z_step_state *state;
  float dloss;
  int n, C, V, Vp;
};

/* ----- the rows ---------------------------------------------------------- */

/* The products in 8 bits: none; the logits' product; also the gradients' products. */
typedef enum g2z__head_numbers { G2Z__HEAD_ACT, G2Z__HEAD_E4M3, G2Z__HEAD_E5M2 } g2z__head_numbers;

/* Powers of 2 for references, and bounds of z, as explained above. EIGHT: gradients in 8 bits. */
template <g2z__head_numbers NUMBERS>
struct g2z__head_bounds {
  static constexpr bool EIGHT = false;
  static constexpr float BELOW = 4, ROOM = 4;
  static constexpr float LEAST = 1, MOST = 0x1p12f;
  static __device__ inline float below(int) { return BELOW; }
};
template <>
struct g2z__head_bounds<G2Z__HEAD_E5M2> {
  static constexpr bool EIGHT = true;
  static constexpr float BELOW = 8, ROOM = -8;
  static constexpr float LEAST = 0x1p7f, MOST = 0x1p15f;
  static __device__ inline float below(int row) { return BELOW + g2z__head_part(row); }
};

/* g2z_k_head_guess: the rows' references r, in powers of 2.
 *   rows    reference          out
 *           narrow_h, unit     out with E4M3 and E5M2
 *   x       h, wte, targets    in
 *   sample  [n,ld] A in        logits of the first words
 * Math    f32; the target's logit, which serves for r only, is computed from its row of wte; with
 *         E4M3 and E5M2 both rows are rounded first
 * Launch  one warp per row
 * Cost    2 ld + 4 C bytes per row in 16 bits: 8,192 rows of C=768 are 34 MB; C more in 8 bits
 * Order   lane i takes packs i, i + 32, ...; then a tree
 * Oracle  as g2z_k_head_rows */
template <typename A, g2z__head_numbers NUMBERS>
static __global__ void __launch_bounds__(256)
g2z_k_head_guess(g2z__head_rows rows, g2z__head_chunk<A> x, const A *sample, int ld) {
  constexpr int L = g2z__lanes<A>;
  int lane = (int)(threadIdx.x % G2Z__WARP);
  size_t row = (size_t)blockIdx.x * 8 + threadIdx.x / G2Z__WARP;
  g2z__k_begin();
  if (row >= (size_t)x.n) return;
  const A *h = x.h + row * (size_t)x.C;
  const A *word = x.wte + (size_t)max(x.targets[row], 0) * (size_t)x.C; /* -1: any row */
  g2z__softmax part = {-INFINITY, 0};
  float target = 0, scale_h = 1, unit = G2Z__LOG2E;
  if constexpr (NUMBERS != G2Z__HEAD_ACT) {
    float largest = 0, value[L]; /* the row's largest magnitude */
    for (int i = lane; i * L < x.C; i += (int)G2Z__WARP) {
      g2z__unpack<A>(value, g2z__get(h, (size_t)i));
#pragma unroll
      for (int j = 0; j < L; j++) largest = fmaxf(largest, fabsf(value[j]));
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(G2Z__ALL_LANES, largest, lanes));
    scale_h = g2z__e4m3_scale(largest);
    unit = G2Z__LOG2E / scale_h / G2Z__E4M3_W;
    if (lane == 0) rows.unit[row] = unit;
  }
  for (int i = lane; i * L < x.C; i += (int)G2Z__WARP) {
    float a[L], b[L];
    g2z__unpack<A>(a, g2z__get(h, (size_t)i));
    g2z__unpack<A>(b, g2z__get(word, (size_t)i));
    if constexpr (NUMBERS != G2Z__HEAD_ACT) {
#pragma unroll
      for (int j = 0; j < L; j++) {
        a[j] = g2z__round_e4m3(a[j] * scale_h);
        b[j] = g2z__round_e4m3(b[j] * G2Z__E4M3_W);
      }
      reinterpret_cast<uint2 *>(rows.narrow_h + row * G2Z_NARROW_ROW(x.C))[i] =
          g2z__pack_8<__nv_fp8_e4m3>(a, 1);
    }
#pragma unroll
    for (int j = 0; j < L; j++) target += a[j] * b[j];
  }
  target = g2z__warp_sum(target) * unit;
  for (int i = lane; i * L < min(ld, x.V); i += (int)G2Z__WARP)
    g2z__softmax_add<A>(part, g2z__get(sample + row * (size_t)ld, (size_t)i), x.V - i * L);
  part = g2z__softmax_warp(part);
  if (lane > 0) return;
  rows.reference[row] = fmaxf(part.max * G2Z__LOG2E + log2f(part.sum), target) -
                        g2z__head_bounds<NUMBERS>::below((int)row);
}

typedef enum g2z__rows_time { G2Z__ROWS_FIRST, G2Z__ROWS_AGAIN } g2z__rows_time;

/* g2z_k_head_rows: finishes rows after their exponentials: losses, the targets' places in x.logits,
 * factors, and x.dh = x.h times the factors.
 *   rows    parts, target      in
 *           reference          in; FIRST: also out, for rows whose sum is out of bounds
 *           again              FIRST: out; AGAIN: in, tiles without such a row are skipped
 *           factor             out; with E5M2 its three parts, and x.dh becomes 8-bit columns
 *   x       h, targets, state in; losses, dh and the targets' places in logits out
 *   across  tiles of rows.parts
 * Math    f32. If a sum is NaN, or infinite again the second time, dh and dwte become NaN
 * Launch  a block of 256 per 32 rows
 * Cost    8 bytes per row and tile, 4 C per row: 8,192 tokens of 124M are 42 MB
 * Order   each warp adds every 8th tile; then the 8 warps' sums are added in order
 * Oracle  g2z__cpu_head_loss, for all three kernels; test cuda_head */
template <typename A, g2z__head_numbers NUMBERS>
static __global__ void __launch_bounds__(256)
g2z_k_head_rows(g2z__head_rows rows, g2z__head_chunk<A> x, int across, g2z__rows_time time) {
  constexpr int L = g2z__lanes<A>;
  typedef g2z__head_bounds<NUMBERS> Z;
  __shared__ float2 shared[8][G2Z__HEAD_ROWS];
  __shared__ float factors[G2Z__HEAD_ROWS];
  int lane = (int)(threadIdx.x % G2Z__WARP), warp = (int)(threadIdx.x / G2Z__WARP);
  int first = (int)blockIdx.x * G2Z__HEAD_ROWS, row = first + lane;
  if constexpr (Z::EIGHT) row = g2z__token_at((int)blockIdx.x, lane / 4, lane % 4);
  g2z__k_begin();
  if (time == G2Z__ROWS_AGAIN && !g2z__rows_again(rows.again, (int)blockIdx.x / 4)) return;
  float sum = 0, largest = -INFINITY;
  for (int tile = warp; tile < across && row < x.n; tile += 8) {
    float2 part = rows.parts[(size_t)tile * (size_t)x.n + (size_t)row];
    sum += part.x;
    largest = fmaxf(largest, part.y);
  }
  shared[warp][lane] = make_float2(sum, largest);
  __syncthreads();
  if (warp == 0) {
    for (int other = 1; other < 8; other++) {
      sum += shared[other][lane].x;
      largest = fmaxf(largest, shared[other][lane].y);
    }
    bool here = row < x.n, again = here && !(sum >= Z::LEAST && sum <= Z::MOST);
    if (here) {
      float reference = rows.reference[row], target = rows.target[row];
      float others = fmaxf(sum - g2z__exp2(target - reference), 0);
      float loss = (log2f(sum) + (reference - target)) / G2Z__LOG2E;
      const int word = x.targets[row], counts = word >= 0; /* -1: neither loss nor gradient */
      /* A sum in another order may make the loss just less than 0. */
      x.losses[row] = !counts || (loss < 0 && sum > 0) ? 0 : loss;
      if constexpr (Z::EIGHT) {
        uint8_t *e = reinterpret_cast<uint8_t *>(x.logits);
        uint8_t *columns = e + (size_t)x.n * (size_t)x.Vp;
        const float g = x.dloss * x.state->loss_scale;
        if (counts)
          e[(size_t)row * (size_t)x.Vp + (size_t)word] =
              columns[(size_t)word * (size_t)x.n + (size_t)(first + lane)] =
                  (uint8_t)g2z__pair_8<__nv_fp8_e5m2>(make_float2(-others, 0), 1);
        rows.factor[row] = sum < INFINITY ? (float)counts * g / sum : NAN;
        rows.factor[x.n + row] = others;
        if (row == 0) rows.factor[2 * x.n] = g * 0x1p-9f;
        factors[lane] = sum < INFINITY ? (float)counts * 0x1p9f / sum : NAN;
      } else {
        if (counts) x.logits[(size_t)row * (size_t)x.Vp + (size_t)word] = (A)-others;
        factors[lane] = rows.factor[row] =
            sum < INFINITY ? (float)counts * x.dloss * x.state->loss_scale / sum : NAN;
      }
      if (again && time == G2Z__ROWS_FIRST) {
        float shift;
        if (sum > 0 && sum < INFINITY) shift = log2f(sum) - Z::below(row);
        else shift = largest + Z::ROOM;
        rows.reference[row] = reference + shift;
      }
    }
    again = __any_sync(G2Z__ALL_LANES, again);
    if (lane == 0 && time == G2Z__ROWS_FIRST)
      reinterpret_cast<int *>(rows.again)[blockIdx.x] = again;
  }
  __syncthreads();
  if constexpr (Z::EIGHT) {
    for (int column = 0; column < x.C; column += 256) {
      uint2 eight[4] = {};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (column + lane * 8 >= x.C) continue;
        float value[8];
        size_t at = (size_t)g2z__token_at((int)blockIdx.x, warp, i) * (size_t)x.C + (size_t)column;
        g2z__unpack<A>(value, g2z__get(x.h + at, (size_t)lane));
        eight[i] = g2z__pack_8<__nv_fp8_e4m3>(value, factors[4 * warp + i]);
      }
      g2z__columns_put(reinterpret_cast<uint8_t *>(x.dh), eight, (int)blockIdx.x, column, x.n, x.C);
    }
  } else {
    for (int i = warp; i < G2Z__HEAD_ROWS && first + i < x.n; i += 8) {
      size_t at = (size_t)(first + i) * (size_t)x.C;
      for (int pack = lane; pack * L < x.C; pack += (int)G2Z__WARP) {
        float value[L];
        g2z__unpack<A>(value, g2z__get(x.h + at, (size_t)pack));
#pragma unroll
        for (int j = 0; j < L; j++) value[j] *= factors[i];
        g2z__put(x.dh + at, (size_t)pack, g2z__pack<A>(value));
      }
    }
  }
}

/* g2z_k_head_scale: x.dh = rows.dh times the rows' factors. With E5M2 rows.dh is also G2Z__E4M3_W
 * times too large, and G2Z__E5M2_SHRINKS times the exact term replaces the target's rounded one.
 *   rows    dh, factor  in
 *   x       dh          out; with E5M2 targets, wte in
 * Math    f32
 * Launch  one thread per pack
 * Cost    6 C bytes per row in 16 bits: 8,192 tokens of C=768 are 38 MB; with E5M2 2 C more
 * Oracle  as g2z_k_head_rows */
template <typename A, g2z__head_numbers NUMBERS>
static __global__ void __launch_bounds__(256)
g2z_k_head_scale(g2z__head_rows rows, g2z__head_chunk<A> x) {
  constexpr int L = g2z__lanes<A>;
  size_t i = (size_t)blockIdx.x * 256 + threadIdx.x, row = i / (size_t)(x.C / L);
  g2z__k_begin();
  if (row >= (size_t)x.n) return;
  float value[L], factor = rows.factor[row];
  g2z__get_floats<L>(value, rows.dh + i * L);
  if constexpr (NUMBERS == G2Z__HEAD_E5M2) {
    const float others = rows.factor[(size_t)x.n + row];
    const float lost = g2z__round_e5m2(others) - others * G2Z__E5M2_SHRINKS;
    const size_t word = (size_t)max(x.targets[row], 0); /* -1: the factor is 0 */
    float w[L];
    g2z__unpack<A>(w, g2z__get(x.wte + word * (size_t)x.C, i % (size_t)(x.C / L)));
#pragma unroll
    for (int j = 0; j < L; j++) value[j] += lost * g2z__round_e4m3(w[j] * G2Z__E4M3_W);
    factor /= G2Z__E4M3_W;
  }
#pragma unroll
  for (int j = 0; j < L; j++) value[j] *= factor;
  g2z__put(x.dh, i, g2z__pack<A>(value));
}

/* The product that makes exponentials: e[n,Vp] = exp(h wte^T - r). */
template <typename A>
static g2z__lt_key g2z__head_key(const g2z_device *device, int n, int C, int Vp) {
  g2z__lt_key key = g2z__lt_rows_key<A, A>(device, n, C, Vp, G2Z__AS_IT_IS, G2Z__TRANSPOSED, Vp,
                                           CUBLASLT_EPILOGUE_DEFAULT);
  key.epilogue = G2Z__EPILOGUE_SOFTMAX;
  return key;
}
template <typename A>
static int g2z__head_fits(const g2z_device *device, int n, int C, int Vp) {
  g2z__lt_key key = g2z__head_key<A>(device, n, C, Vp);
  return (device->tune != G2Z_TUNE_OFF || device->fp8) &&
         g2z__hopper_product_fits(device, &key, NULL);
}

/* The numbers of gradients in 8 bits, which only fp16 has. */
template <typename A>
static constexpr g2z__head_numbers g2z__head_eight =
    std::is_same<A, __half>::value ? G2Z__HEAD_E5M2 : G2Z__HEAD_ACT;

/* ----- 8 bits without room k42 -------------------------------------------
 * cuBLASLt makes the logits of a slice of rows, in A. A first pass computes each row's sum of
 * exponentials, and from it the reference that makes z exactly 2^BELOW. So no row's product is
 * computed again. A second pass makes the exponentials. Both find the slice in L2. */

/* A sum of C products of two numbers up to 448 fits fp16 if it is divided by 2^shift. */
static int g2z__head_shift(int C) {
  int shift = 0;
  while (ldexp(448.0 * 448.0 * C, -shift) > 65504) shift++;
  return shift;
}

/* g2z_k_head_sums: the rows' references and z, from a slice of logits.
 *   rows    unit in; reference and target out; parts out, as of one tile across
 *   targets [n] i32 in            a target's logit is the slice's, so that loss, z and gradients
 *                                 belong to one softmax
 *   slice   [gridDim.x,Vp] A in   times 2^shift and the row's unit these are exponents of base 2
 *   first   the slice's first row
 * Math    f32
 * Launch  a block of 512 per row
 * Cost    2 Vp bytes per row, from L2
 * Order   thread t takes packs t, t + 512, ...; then two trees
 * Oracle  as g2z_k_head_rows */
template <typename A, g2z__head_numbers NUMBERS>
static __global__ void __launch_bounds__(512)
g2z_k_head_sums(g2z__head_rows rows, const int32_t *targets, const A *slice, float scale,
                int first, int V, int Vp) {
  constexpr int L = g2z__lanes<A>;
  __shared__ g2z__softmax shared[32];
  const int row = first + (int)blockIdx.x, full = V / L;
  const A *at = slice + (size_t)blockIdx.x * (size_t)Vp;
  g2z__softmax part = {-INFINITY, 0};
  g2z__k_begin();
  const float unit = rows.unit[row] * scale / G2Z__LOG2E;
#pragma unroll 4
  for (int i = (int)threadIdx.x; i < full; i += 512)
    g2z__softmax_add<A>(part, g2z__get(at, (size_t)i), L, unit);
  if ((int)threadIdx.x == full % 512 && full * L < V)
    g2z__softmax_add<A>(part, g2z__get(at, (size_t)full), V - full * L, unit);
  part = g2z__softmax_warp(part);
  if (threadIdx.x < 32) shared[threadIdx.x] = {-INFINITY, 0};
  __syncthreads();
  if (threadIdx.x % G2Z__WARP == 0) shared[threadIdx.x / G2Z__WARP] = part;
  __syncthreads();
  part = g2z__softmax_warp(shared[threadIdx.x % G2Z__WARP]);
  if (threadIdx.x > 0) return;
  const float z = part.max * G2Z__LOG2E + log2f(part.sum); /* NaN if the row has one */
  const float reference = z - g2z__head_bounds<NUMBERS>::below(row);
  rows.reference[row] = reference;
  rows.target[row] = g2z__to_float(at[max(targets[row], 0)]) * (unit * G2Z__LOG2E);
  rows.parts[row] = make_float2(g2z__exp2(z - reference), part.max * G2Z__LOG2E);
}

/* g2z_k_head_numbers: e = exp(logit - reference) of a slice of rows.
 *   rows    unit, reference in
 *   slice   [m,Vp] A in           as for g2z_k_head_sums; with E4M3 it may be `e`
 *   e       x's exponentials from row `first` on, in A; with E5M2 rows, and columns of n tokens
 * Math    f32
 * Launch  32 rows and 256 words per block of 256 threads
 * Cost    4 Vp bytes per row, 2 of them from L2
 * Oracle  as g2z_k_head_rows */
template <typename A, g2z__head_numbers NUMBERS>
static __global__ void __launch_bounds__(256)
g2z_k_head_numbers(g2z__head_rows rows, g2z__head_chunk<A> x, const A *slice, float scale,
                   int first, int m) {
  constexpr bool EIGHT = g2z__head_bounds<NUMBERS>::EIGHT;
  const int g = (int)threadIdx.x / 32, block = (int)blockIdx.x;
  const int word = (int)blockIdx.y * 256 + (int)threadIdx.x % 32 * 8;
  const size_t row_size = (size_t)x.Vp;
  uint8_t *e = reinterpret_cast<uint8_t *>(x.logits);
  uint4 raw[4] = {};
  uint2 eight[4] = {};
  g2z__k_begin();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = g2z__token_at(block, g, i);
    if (row >= m || word >= x.Vp) continue;
    const A *at = slice + (size_t)row * row_size;
    raw[i] = g2z__get(at, (size_t)word / 8);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = g2z__token_at(block, g, i);
    if (row >= m || word >= x.Vp) continue;
    const size_t at = (size_t)(first + row) * row_size + (size_t)word;
    const float unit = rows.unit[first + row] * scale, reference = rows.reference[first + row];
    float value[8];
    g2z__unpack<A>(value, raw[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      value[j] = g2z__exp2(value[j] * unit - reference);
      if (word + j >= x.V) value[j] = 0;
    }
    if constexpr (EIGHT) {
      eight[i] = g2z__pack_8<__nv_fp8_e5m2>(value, 1);
      *reinterpret_cast<uint2 *>(e + at) = eight[i];
    } else
      g2z__put(x.logits, at / 8, g2z__pack<A>(value));
  }
  if constexpr (EIGHT)
    g2z__columns_put(e + (size_t)x.n * row_size + first, eight, block, (int)blockIdx.y * 256,
                     x.n, x.Vp);
}

/* As g2z__head_exponentials, with fp8. */
template <typename A>
static g2z_status g2z__head_sliced(g2z_device *device, const g2z__head_chunk<A> *x,
                                   const g2z__head_rows *rows, int narrow) {
  constexpr g2z__head_numbers E4M3 = G2Z__HEAD_E4M3, E5M2 = g2z__head_eight<A>;
  const int n = x->n, Vp = x->Vp, most = g2z__slice_rows(device, n, (size_t)Vp * sizeof(A));
  const float scale = (float)ldexp(1, g2z__head_shift(x->C));
  auto guess = g2z_k_head_guess<A, E4M3>;
  auto sums = g2z_k_head_sums<A, E4M3>;
  auto numbers = g2z_k_head_numbers<A, E4M3>;
  auto finish = g2z_k_head_rows<A, G2Z__HEAD_ACT>;
  if (narrow) {
    guess = g2z_k_head_guess<A, E5M2>;
    sums = g2z_k_head_sums<A, E5M2>;
    numbers = g2z_k_head_numbers<A, E5M2>;
    finish = g2z_k_head_rows<A, E5M2>;
  }
  /* Rounds h. Its references are replaced below. */
  G2Z_TRY(g2z__launch(device, "g2z_k_head_guess", guess, (unsigned)g2z__blocks((size_t)n, 8), 256,
                      0, *rows, *x, (const A *)NULL, 0));
  for (int first = 0; first < n; first += most) {
    const int m = min(most, n - first);
    A *slice = x->logits + (size_t)first * (size_t)Vp;
    if (narrow) slice = (A *)rows->slice;
    g2z__lt_key key = g2z__lt_rows_key<A, A>(device, m, x->C, Vp, G2Z__AS_IT_IS, G2Z__TRANSPOSED,
                                             Vp, CUBLASLT_EPILOGUE_DEFAULT);
    g2z__narrow_key(&key, CUDA_R_8F_E4M3);
    key.type = G2Z__E4M3_TWICE;
    g2z__lt_operands on = g2z__lt_rows(slice, rows->narrow_h + (size_t)first *
                                       G2Z_NARROW_ROW(x->C), rows->narrow_wte);
    on.factor = 1 / scale;
    G2Z_TRY(g2z__lt_multiply(device, &key, &on));
    G2Z_TRY(g2z__launch(device, "g2z_k_head_sums", sums, (unsigned)m, 512, 0, *rows,
                        x->targets, (const A *)slice, scale, first, x->V, Vp));
    G2Z_TRY(g2z__launch(device, "g2z_k_head_numbers", numbers,
                        dim3((unsigned)g2z__blocks((size_t)m, 128) * 4,
                             (unsigned)g2z__blocks((size_t)Vp, 256)), 256, 0, *rows, *x,
                        (const A *)slice, scale, first, m));
  }
  return g2z__launch(device, "g2z_k_head_rows", finish,
                     4 * (unsigned)g2z__blocks((size_t)n, G2Z__PRODUCT_ROWS), 256, 0, *rows, *x, 1,
                     G2Z__ROWS_FIRST);
}

/* A chunk's losses. x->logits become exponentials, x->dh the rows of h times their factors; both in
 * 8 bits if `narrow`. The second round's kernels end at once if no row is out of bounds. */
template <typename A>
static g2z_status g2z__head_exponentials(g2z_device *device, const g2z__head_chunk<A> *x,
                                         const g2z__head_rows *rows, int narrow) {
  if constexpr (sizeof(A) == 2)
    if (device->fp8 && !g2z__cuda_of(device)->hopper)
      return g2z__head_sliced(device, x, rows, narrow);
  const int ld = min(x->Vp, G2Z__HEAD_SAMPLE);
  unsigned down = (unsigned)g2z__blocks((size_t)x->n, G2Z__PRODUCT_ROWS);
  int across = (int)g2z__blocks((size_t)x->Vp, G2Z__PRODUCT_COLUMNS);
  g2z__lt_key key = g2z__lt_rows_key<A, A>(device, x->n, x->C, ld, G2Z__AS_IT_IS, G2Z__TRANSPOSED,
                                           ld, CUBLASLT_EPILOGUE_DEFAULT);
  g2z__lt_operands on = g2z__lt_rows(x->logits, x->h, x->wte);
  G2Z_TRY(g2z__lt_multiply(device, &key, &on));
  constexpr g2z__head_numbers E4M3 = sizeof(A) == 2 ? G2Z__HEAD_E4M3 : G2Z__HEAD_ACT;
  constexpr g2z__head_numbers E5M2 = g2z__head_eight<A>;
  auto guess = g2z_k_head_guess<A, G2Z__HEAD_ACT>;
  auto finish = g2z_k_head_rows<A, G2Z__HEAD_ACT>;
  if (device->fp8) guess = g2z_k_head_guess<A, E4M3>;
  if (narrow) {
    guess = g2z_k_head_guess<A, E5M2>;
    finish = g2z_k_head_rows<A, E5M2>;
  }
  G2Z_TRY(g2z__launch(device, "g2z_k_head_guess", guess, (unsigned)g2z__blocks((size_t)x->n, 8),
                      256, 0, *rows, *x, (const A *)x->logits, ld));
  key = g2z__head_key<A>(device, x->n, x->C, x->Vp);
  if (device->fp8) {
    g2z__narrow_key(&key, CUDA_R_8F_E4M3);
    on.a = rows->narrow_wte;
    on.b = rows->narrow_h;
    on.rows.unit = rows->unit;
    if (narrow) key.epilogue = G2Z__EPILOGUE_SOFTMAX_8;
  }
  on.rows.reference = rows->reference;
  on.rows.parts = rows->parts;
  on.rows.targets = x->targets;
  on.rows.target = rows->target;
  on.rows.words = x->V;
  for (int time = G2Z__ROWS_FIRST; time <= G2Z__ROWS_AGAIN; time++) {
    on.rows.again = time == G2Z__ROWS_AGAIN ? rows->again : NULL;
    G2Z_TRY(g2z__hopper_product_run(device, &key, &on));
    G2Z_TRY(g2z__launch(device, "g2z_k_head_rows", finish, 4 * down, 256, 0, *rows, *x, across,
                        (g2z__rows_time)time));
  }
  return G2Z_OK;
}

template <typename A, typename G>
static g2z_status g2z_cuda_head_loss(g2z_device *device, const g2z_head_loss *op) {
  const int N = op->N, C = op->C, V = op->V, Vp = op->Vp, chunk = op->chunk;
  G2Z_ASSERT(g2z__head_loss_whole(op));
  G2Z_ASSERT(op->dwte_dtype == G2Z_FP32 || (N <= chunk && op->mode == G2Z_OVERWRITE));
  const int sms = g2z__cuda_of(device)->sms;
  const int fused = op->dh && (device->fp8 || g2z__head_fits<A>(device, chunk, C, Vp));
  const int narrow = fused && std::is_same<A, __half>::value && device->fp8 == G2Z_FP8_ALL;
  G2Z_ASSERT(!narrow || (N % 128 == 0 && (N <= chunk || chunk % 128 == 0)));
  g2z__head_rows rows = {};
  uint8_t *words = NULL; /* narrow: C rows of Vp numbers in e4m3 */
  if (fused) {
    const size_t most = (size_t)min(N, chunk), row = most * 4, width = (size_t)C;
    const size_t parts = g2z__blocks((size_t)Vp, G2Z__PRODUCT_COLUMNS) * most * sizeof(float2);
    const size_t sums = most * width * sizeof(float);
    const size_t narrow_row = device->fp8 ? G2Z_NARROW_ROW(C) : 0;
    const struct {
      void *pointer;
      size_t bytes;
    } wanted[] = {
        {&rows.again, g2z__blocks(most, G2Z__PRODUCT_ROWS) * sizeof(int4)}, {&rows.reference, row},
        {&rows.target, row}, {&rows.factor, 2 * row + 4}, {&rows.unit, row},
        {&rows.dh, max(parts, sums)}, {&rows.narrow_h, most * narrow_row},
        {&rows.narrow_wte, (size_t)Vp * narrow_row}, {&words, narrow ? width * (size_t)Vp : 0},
        {&rows.slice, narrow ? g2z__slice_bytes(device, (int)most, (size_t)Vp * sizeof(A)) : 0}};
    size_t bytes = 0;
    void *memory;
    for (const auto &x : wanted) bytes += g2z__align(x.bytes);
    G2Z_TRY(g2z__scratch(device, bytes, &memory));
    char *to = (char *)memory;
    for (const auto &x : wanted) {
      memcpy(x.pointer, &to, sizeof to);
      to += g2z__align(x.bytes);
    }
    rows.parts = (float2 *)rows.dh;
  }
  for (int first = 0; first < N; first += chunk) {
    size_t at = (size_t)first * (size_t)C;
    int n = min(N - first, chunk);
    g2z__head_chunk<A> x = {(A *)op->logits,    op->dh ? (A *)op->dh + at : NULL,
                            op->losses + first, (const A *)op->h + at,
                            (const A *)op->wte, op->targets + first,
                            op->state,          op->dloss,
                            n, C, V, Vp};
    if constexpr (sizeof(A) == 2)
      if (fused && device->fp8 && first == 0) { /* once for all chunks */
        const g2z_narrow_weight both = {op->wte, words, rows.narrow_wte, Vp, C};
        if (narrow) G2Z_TRY(g2z__narrow_launch<A>(device, &both, 1));
        else G2Z_TRY(g2z__narrow(device, rows.narrow_wte, x.wte, G2Z__E4M3_W, Vp, C,
                                 device->clamped_weights));
      }
    if (fused) G2Z_TRY(g2z__head_exponentials(device, &x, &rows, narrow));
    else { /* losses from logits; if dh is wanted, the gradient overwrites the logits */
      g2z__lt_key key = g2z__lt_rows_key<A, A>(device, n, C, Vp, G2Z__AS_IT_IS, G2Z__TRANSPOSED, Vp,
                                               CUBLASLT_EPILOGUE_DEFAULT);
      g2z__lt_operands on = g2z__lt_rows(x.logits, x.h, x.wte);
      G2Z_TRY(g2z__lt_multiply(device, &key, &on));
      auto entropy = g2z_k_cross_entropy<A, G2Z__LOSS_ONLY>;
      if (op->dh) entropy = g2z_k_cross_entropy<A, G2Z__LOSS_AND_GRADIENT>;
      G2Z_TRY(g2z__launch(device, "g2z_k_cross_entropy", entropy, (unsigned)min(n, sms),
                          G2Z__ENTROPY_THREADS, 0, x.logits, x.losses, x.targets, x.state,
                          op->dloss, n, V, Vp));
    }
    if (!op->dh) continue;
    const A *hidden = x.h; /* fused: times each row's factor; dh gets the factor at the end */
    void *dh = x.dh;
    auto weight_key = g2z__lt_rows_key<A, G>, data_key = g2z__lt_rows_key<A, A>;
    if (op->dwte_dtype == G2Z_FP32) weight_key = g2z__lt_rows_key<A, float>;
    if (fused) {
      hidden = x.dh;
      dh = rows.dh;
      data_key = g2z__lt_rows_key<A, float>;
    }
    g2z__lt_key key = weight_key(device, Vp, n, C, G2Z__TRANSPOSED, G2Z__AS_IT_IS, C,
                                 CUBLASLT_EPILOGUE_DEFAULT);
    g2z__lt_operands on = g2z__lt_rows(op->dwte, op->logits, hidden);
    if (first > 0 || op->mode == G2Z_ACCUMULATE) on.c = op->dwte;
    if (narrow) {
      g2z__narrow_key(&key, CUDA_R_8F_E4M3);
      on.b = (uint8_t *)op->logits + (size_t)n * (size_t)Vp;
      on.scale = rows.factor + 2 * n;
    }
    G2Z_TRY(g2z__lt_multiply(device, &key, &on));
    key = data_key(device, n, Vp, C, G2Z__AS_IT_IS, G2Z__AS_IT_IS, C, CUBLASLT_EPILOGUE_DEFAULT);
    on = g2z__lt_rows(dh, op->logits, narrow ? words : op->wte);
    if (narrow) g2z__narrow_key(&key, CUDA_R_8F_E4M3);
    G2Z_TRY(g2z__lt_multiply(device, &key, &on));
    if (!fused) continue;
    size_t packs = (size_t)n * (size_t)(C / g2z__lanes<A>);
    auto scale = g2z_k_head_scale<A, G2Z__HEAD_ACT>;
    if (narrow) scale = g2z_k_head_scale<A, g2z__head_eight<A>>;
    G2Z_TRY(g2z__launch(device, "g2z_k_head_scale", scale, (unsigned)g2z__blocks(packs, 256), 256,
                        0, rows, x));
  }
  return g2z__launch(device, "g2z_k_add_losses", g2z_k_add_losses, 1, 1024, 0, op->loss_sum,
                     op->losses, N);
}

template <typename A>
static g2z_status g2z_cuda_head_logits(g2z_device *device, float *logits, const void *h,
                                       const void *wte, int n, int C, int V) {
  if (n == 0) return G2Z_OK; /* cuBLASLt refuses it */
  g2z__lt_key key = g2z__lt_rows_key<A, float>(device, n, C, V, G2Z__AS_IT_IS, G2Z__TRANSPOSED, V,
                                               CUBLASLT_EPILOGUE_DEFAULT);
  g2z__lt_operands on = g2z__lt_rows(logits, h, wte);
  return g2z__lt_multiply(device, &key, &on);
}

/* ===== >>k60 optimizer ===================================================
 * In:  gradients, masters, m and v. Out: the step's verdict; new masters and parameters.
 * Law: the verdict lies in g2z_step_state, in device memory: the host decides nothing. The
 *      arithmetic is room 08's, shared with the CPU. */

#define G2Z__SUMSQ_BLOCKS 1024   /* partial sums: fixed, so that the order depends only on n */

/* The ranges of one launch, passed by value because the caller's list lies in host memory. */
#define G2Z__PIECES 32
typedef struct g2z__pieces {
  g2z_range range[G2Z__PIECES];
  int count;
} g2z__pieces;

/* g2z_k_sumsq: partial[block] = sum of squares of the block's packs, in fp64.
 *   grads    G in       ranges may start anywhere; unaligned ones are read element by element
 *   partial  [SUMSQ_BLOCKS] f64 out
 * Math    squares of fp16 are exact in fp32; so are squares of bf16 numbers from 1e-19 to 1e19, and
 *         larger ones count as not finite. Eight squares are added in fp32, their sums in fp64.
 *         fp32 numbers are squared in fp64, where they cannot overflow.
 * Launch  SUMSQ_BLOCKS blocks of 256; then g2z_k_sumsq_end
 * Cost    sizeof(G) n bytes: 124M in fp16 is 249 MB
 * Order   a thread adds its packs range by range, in ascending order; then a tree
 * Oracle  g2z__cpu_grad_sumsq */
template <typename G>
static __global__ void __launch_bounds__(256)
g2z_k_sumsq(double *partial, const G *grads, g2z__pieces pieces) {
  constexpr int L = g2z__lanes<G>;
  __shared__ double parts[256];
  double sum = 0;
  size_t stride = (size_t)gridDim.x * 256, thread = (size_t)blockIdx.x * 256 + threadIdx.x;
  g2z__k_begin();
  for (int piece = 0; piece < pieces.count; piece++) {
    const G *from = grads + pieces.range[piece].begin;
    size_t n = pieces.range[piece].elements, packs = (uintptr_t)from % 16 == 0 ? n / L : 0;
#pragma unroll 4
    for (size_t at = thread; at < packs; at += stride) {
      float value[L];
      g2z__unpack<G>(value, g2z__get(from, at));
      if constexpr (sizeof(G) == 4) {
#pragma unroll
        for (int i = 0; i < L; i++) sum += (double)value[i] * (double)value[i];
      } else {
        float eight = 0;
#pragma unroll
        for (int i = 0; i < L; i++) eight += value[i] * value[i];
        sum += (double)eight;
      }
    }
    for (size_t at = packs * L + thread; at < n; at += stride) {
      double value = (double)g2z__to_float(from[at]);
      sum += value * value;
    }
  }
  parts[threadIdx.x] = sum;
  for (unsigned half = 128; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = parts[0];
}

/* g2z_k_sumsq_end: *sum += the sum of the partial sums, by one block. */
static __global__ void __launch_bounds__(G2Z__SUMSQ_BLOCKS)
g2z_k_sumsq_end(double *sum, const double *partial) {
  __shared__ double parts[G2Z__SUMSQ_BLOCKS];
  g2z__k_begin();
  parts[threadIdx.x] = partial[threadIdx.x];
  for (unsigned half = G2Z__SUMSQ_BLOCKS / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *sum += parts[0];
}

template <typename G>
static g2z_status g2z_cuda_grad_sumsq(g2z_device *device, double *sum, const void *grads,
                                      const g2z_range *ranges, int count) {
  void *partial;
  G2Z_TRY(g2z__scratch(device, G2Z__SUMSQ_BLOCKS * sizeof(double), &partial));
  for (int first = 0; first < count; first += G2Z__PIECES) {
    g2z__pieces pieces;
    pieces.count = min(count - first, G2Z__PIECES);
    memcpy(pieces.range, ranges + first, (size_t)pieces.count * sizeof *ranges);
    G2Z_TRY(g2z__launch(device, "g2z_k_sumsq", g2z_k_sumsq<G>, G2Z__SUMSQ_BLOCKS, 256, 0,
                        (double *)partial, (const G *)grads, pieces));
    G2Z_TRY(g2z__launch(device, "g2z_k_sumsq_end", g2z_k_sumsq_end, 1, G2Z__SUMSQ_BLOCKS, 0, sum,
                        (const double *)partial));
  }
  return G2Z_OK;
}

/* g2z_k_decide: one thread computes the step's verdict, with the arithmetic of g2z__cpu_decide. */
static __global__ void g2z_k_decide(g2z_step_state *state, g2z_verdict verdict,
                                    g2z_optimizer_config config, int dynamic, int64_t tokens) {
  g2z__k_begin();
  g2z__decide(state, &verdict, &config, dynamic, tokens);
}

static g2z_status g2z_cuda_decide(g2z_device *device, g2z_step_state *state,
                                  const g2z_verdict *verdict, const g2z_optimizer_config *config,
                                  int64_t tokens) {
  int dynamic = device->dtype == G2Z_FP16 && config->loss_scale_dynamic;
  return g2z__launch(device, "g2z_k_decide", g2z_k_decide, 1, 1, 0, state, *verdict, *config,
                     dynamic, tokens);
}

#define G2Z__ADAMW_CHUNK 2048    /* elements that a block of 256 threads takes at a time */
#define G2Z__ADAMW_BLOCKS 8      /* per multiprocessor: fewer leave the memory bus idle */

/* Read and write four numbers in one access: 16 bytes, or 8 bytes for a 16-bit type. */
template <typename T>
static __device__ inline float4 g2z__get_four(const T *from) {
  if constexpr (sizeof(T) == 4) return __ldcs(reinterpret_cast<const float4 *>(from));
  else {
    uint2 raw = __ldcs(reinterpret_cast<const uint2 *>(from));
    float2 low = g2z__pair_of<T>::unpack(raw.x), high = g2z__pair_of<T>::unpack(raw.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
}
template <typename T>
static __device__ inline void g2z__put_four(T *to, float4 x) {
  if constexpr (sizeof(T) == 4) __stcs(reinterpret_cast<float4 *>(to), x);
  else
    __stcs(reinterpret_cast<uint2 *>(to), make_uint2(g2z__pair_of<T>::pack(x.x, x.y),
                                                     g2z__pair_of<T>::pack(x.z, x.w)));
}

/* g2z_k_grad_add: to = from + rows[0] + rows[1] + ..., or +=, added in fp32; the types may differ
 *   to    [n] T         16-byte aligned, like from; n is a multiple of 4
 *   from  [n] F         may be `to`
 *   rows  [count, n] F
 * Launch  up to 8 blocks of 256 per multiprocessor; a thread takes four numbers at a time
 * Cost    (count + 1) * sizeof(F) + sizeof(T) bytes per element; += reads sizeof(T) more
 * Oracle  g2z__cpu_grad_add without rows */
template <typename T, typename F>
static __global__ void __launch_bounds__(256)
g2z_k_grad_add(T *to, const F *from, const F *rows, int count, int accumulate, size_t fours) {
  for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < fours; i += (size_t)gridDim.x * 256) {
    float4 sum = g2z__get_four(from + 4 * i);
    for (int row = 0; row < count; row++) {
      float4 next = g2z__get_four(rows + 4 * ((size_t)row * fours + i));
      sum = make_float4(sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w);
    }
    if (accumulate) {
      float4 old = g2z__get_four(to + 4 * i);
      sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
    }
    g2z__put_four(to + 4 * i, sum);
  }
}

template <typename T, typename F>
static g2z_status g2z__grad_add_on(g2z_device *device, cudaStream_t stream, void *to,
                                   const void *from, const void *rows, int count, g2z_write mode,
                                   size_t n) {
  size_t fours = n / 4, blocks = g2z__blocks(fours, 256);
  size_t most = (size_t)g2z__cuda_of(device)->sms * 8;
  if (fours == 0) return G2Z_OK;
  g2z_k_grad_add<T, F><<<(unsigned)min(blocks, most), 256, 0, stream>>>(
      (T *)to, (const F *)from, (const F *)rows, count, mode == G2Z_ACCUMULATE, fours);
  return g2z__launched(device, "g2z_k_grad_add");
}

template <typename G>
static g2z_status g2z_cuda_grad_add(g2z_device *device, void *to, const void *from, g2z_write mode,
                                    size_t n) {
  return g2z__grad_add_on<G, G>(device, g2z__cuda_of(device)->stream, to, from, NULL, 0, mode, n);
}

/* Four moments of type M, rounded with the upper or lower halves of random[4]. */
template <typename M>
static __device__ inline void g2z__put_moments(M *to, float4 four, const uint32_t (&random)[4],
                                               int shift) {
  if constexpr (sizeof(M) == 4) g2z__put_four(to, four);
  else
    *reinterpret_cast<uint2 *>(to) = make_uint2(
        __byte_perm(g2z__bits_of(g2z__round_random(four.x, random[0] >> shift)),
                    g2z__bits_of(g2z__round_random(four.y, random[1] >> shift)), 0x7632),
        __byte_perm(g2z__bits_of(g2z__round_random(four.z, random[2] >> shift)),
                    g2z__bits_of(g2z__round_random(four.w, random[3] >> shift)), 0x7632));
}

/* g2z_k_adamw: AdamW on the ranges; does nothing if state->skip.
 *   params       A out   round(master)
 *   master       f32 in place
 *   m,v          M in place  float; or bf16, rounded at random
 *   grads        G in
 * Launch  persistent blocks of 256; each walks all ranges and takes every gridDim-th chunk
 * Cost    26 + sizeof(G) bytes per fp16 parameter: 124M is 3.5 GB; 2.5 GB with bf16
 * Source  Loshchilov and Hutter 2019, arXiv:1711.05101
 * Oracle  g2z__cpu_adamw */
template <typename A, typename G, typename M>
static __global__ void __launch_bounds__(256)
g2z_k_adamw(A *params, float *master, M *m, M *v, const G *grads,
            const g2z_update_range *ranges, size_t count, g2z_optimizer_config config,
            const g2z_step_state *state) {
  __shared__ g2z__adamw_factors factors[2]; /* without and with decay; set once: pow is slow */
  g2z__k_begin();
  if (state->skip) return;
  if (threadIdx.x < 2) factors[threadIdx.x] = g2z__adamw_prepare(&config, state, (int)threadIdx.x);
  __syncthreads();
  size_t next = blockIdx.x; /* this block's next chunk, counted from the range's start */
  for (size_t r = 0; r < count; r++) {
    g2z_update_range range = ranges[r];
    size_t chunks = (range.elements + G2Z__ADAMW_CHUNK - 1) / G2Z__ADAMW_CHUNK;
    bool aligned = range.own_param_at % 4 == 0 && range.shard_at % 4 == 0 && range.v_at % 4 == 0 &&
                   range.sum_at % 4 == 0 && range.canonical % 4 == 0;
    g2z__adamw_factors now = factors[range.decay != 0];
    A *param = params + range.own_param_at;
    float *weights = master + range.shard_at;
    M *means = m + range.shard_at, *squares = v + range.v_at;
    const G *from = grads + range.sum_at;
    for (; next < chunks; next += gridDim.x) {
      size_t first = next * G2Z__ADAMW_CHUNK;
      size_t end = min(first + G2Z__ADAMW_CHUNK, range.elements);
      if (aligned && end - first == G2Z__ADAMW_CHUNK) {
        float4 weight[2], mean[2], square[2], gradient[2];
#pragma unroll
        for (int i = 0; i < 2; i++) { /* eight loads are in flight together */
          size_t at = first + threadIdx.x * 4 + (size_t)i * (G2Z__ADAMW_CHUNK / 2);
          weight[i] = g2z__get_four(weights + at);
          mean[i] = g2z__get_four(means + at);
          square[i] = g2z__get_four(squares + at);
          gradient[i] = g2z__get_four(from + at);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          size_t at = first + threadIdx.x * 4 + (size_t)i * (G2Z__ADAMW_CHUNK / 2);
          float4 &w = weight[i], &a = mean[i], &b = square[i], &g = gradient[i];
          w.x = g2z__adamw_element(&now, w.x, &a.x, &b.x, g.x);
          w.y = g2z__adamw_element(&now, w.y, &a.y, &b.y, g.y);
          w.z = g2z__adamw_element(&now, w.z, &a.z, &b.z, g.z);
          w.w = g2z__adamw_element(&now, w.w, &a.w, &b.w, g.w);
          uint32_t random[4] = {};
          if constexpr (sizeof(M) == 2)
            g2z__moments_random(state, (range.canonical + at) / 4, random);
          g2z__put_four(weights + at, w);
          g2z__put_moments(means + at, a, random, 0);
          g2z__put_moments(squares + at, b, random, 16);
          g2z__put_four(param + at, w);
        }
        continue;
      }
      for (size_t i = first + threadIdx.x; i < end; i += 256) {
        float mean = g2z__to_float(means[i]), square = g2z__to_float(squares[i]);
        weights[i] = g2z__adamw_element(&now, weights[i], &mean, &square, g2z__to_float(from[i]));
        param[i] = (A)weights[i];
        if constexpr (sizeof(M) == 2) {
          uint32_t random[4];
          size_t at = range.canonical + i;
          g2z__moments_random(state, at / 4, random);
          mean = g2z__round_random(mean, random[at % 4]);
          square = g2z__round_random(square, random[at % 4] >> 16);
        }
        means[i] = (M)mean;
        squares[i] = (M)square;
      }
    }
    next -= chunks;
  }
}

/* The block count for ranges [begin, end): one per chunk, but at most as many as run at once. */
static unsigned g2z__update_blocks(const g2z_device *device, const g2z_update *u, size_t begin,
                                   size_t end) {
  size_t chunks = 0, most = (size_t)g2z__cuda_of(device)->sms * G2Z__ADAMW_BLOCKS;
  for (size_t r = begin; r < end; r++)
    chunks += g2z__blocks(u->host_ranges[r].elements, G2Z__ADAMW_CHUNK);
  return (unsigned)min(chunks, most);
}

template <typename A, typename G>
static g2z_status g2z_cuda_adamw(g2z_device *device, const g2z_update *u, size_t begin,
                                 size_t end) {
  unsigned blocks = g2z__update_blocks(device, u, begin, end);
  if (blocks == 0) return G2Z_OK;
  auto run = [&](auto *m, auto *v) {
    typedef std::remove_reference_t<decltype(*m)> M;
    return g2z__launch(device, "g2z_k_adamw", g2z_k_adamw<A, G, M>, blocks, 256, 0, (A *)u->params,
                       u->master, m, v, (const G *)u->sums, u->ranges + begin, end - begin,
                       *u->config, u->state);
  };
  if (u->config->moments_bf16) return run((__nv_bfloat16 *)u->m, (__nv_bfloat16 *)u->v);
  return run((float *)u->m, (float *)u->v);
}

/* ----- Muon --------------------------------------------------------------
 * u and O are bf16, whatever the device's type is. */

/* Calls chunk(range, first, end) for this block's chunks of the ranges. */
template <typename F>
static __device__ inline void g2z__each_chunk(const g2z_update_range *ranges, size_t count,
                                              F chunk) {
  size_t next = blockIdx.x; /* this block's next chunk, counted from the range's start */
  for (size_t r = 0; r < count; r++) {
    g2z_update_range range = ranges[r];
    size_t chunks = (range.elements + G2Z__ADAMW_CHUNK - 1) / G2Z__ADAMW_CHUNK;
    for (; next < chunks; next += gridDim.x) {
      size_t first = next * G2Z__ADAMW_CHUNK;
      chunk(range, first, min(first + G2Z__ADAMW_CHUNK, range.elements));
    }
    next -= chunks;
  }
}

/* g2z_k_momentum: m = beta m + g, u = g + beta m, with g = grads * multiplier; does nothing if
 * state->skip.
 *   u      bf16 out
 *   m      f32 in place
 *   grads  G in
 * Launch  persistent blocks of 256, as g2z_k_adamw
 * Cost    10 + sizeof(G) bytes per element: the 85M of GPT-2 124M are 1 GB in fp16
 * Source  Jordan et al. 2024
 * Oracle  g2z__cpu_momentum; test cuda_muon */
template <typename G>
static __global__ void __launch_bounds__(256)
g2z_k_momentum(__nv_bfloat16 *u, float *m, const G *grads, const g2z_update_range *ranges,
               size_t count, float beta, const g2z_step_state *state) {
  g2z__k_begin();
  if (state->skip) return;
  float multiplier = state->grad_multiplier;
  g2z__each_chunk(ranges, count, [&](const g2z_update_range &range, size_t begin, size_t end) {
    __nv_bfloat16 *to = u + range.u_at;
    float *moment = m + range.shard_at;
    const G *from = grads + range.sum_at;
    if (range.u_at % 4 == 0 && range.shard_at % 4 == 0 && range.sum_at % 4 == 0 &&
        end - begin == G2Z__ADAMW_CHUNK) {
      float4 old[2], g[2], out;
#pragma unroll
      for (int i = 0; i < 2; i++) { /* four loads are in flight together */
        size_t at = begin + threadIdx.x * 4 + (size_t)i * (G2Z__ADAMW_CHUNK / 2);
        old[i] = g2z__get_four(moment + at);
        g[i] = g2z__get_four(from + at);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        size_t at = begin + threadIdx.x * 4 + (size_t)i * (G2Z__ADAMW_CHUNK / 2);
        out.x = g2z__momentum_element(beta, multiplier, &old[i].x, g[i].x);
        out.y = g2z__momentum_element(beta, multiplier, &old[i].y, g[i].y);
        out.z = g2z__momentum_element(beta, multiplier, &old[i].z, g[i].z);
        out.w = g2z__momentum_element(beta, multiplier, &old[i].w, g[i].w);
        g2z__put_four(moment + at, old[i]);
        g2z__put_four(to + at, out);
      }
    } else
      for (size_t at = begin + threadIdx.x; at < end; at += 256)
        to[at] = (__nv_bfloat16)g2z__momentum_element(beta, multiplier, moment + at,
                                                      g2z__to_float(from[at]));
  });
}

template <typename G>
static g2z_status g2z_cuda_momentum(g2z_device *device, void *u, const g2z_update *update,
                                    size_t begin, size_t end) {
  unsigned blocks = g2z__update_blocks(device, update, begin, end);
  if (blocks == 0) return G2Z_OK;
  return g2z__launch(device, "g2z_k_momentum", g2z_k_momentum<G>, blocks, 256, 0,
                     (__nv_bfloat16 *)u, (float *)update->m, (const G *)update->sums,
                     update->ranges + begin, end - begin, update->config->momentum, update->state);
}

/* g2z_k_muon: master -= lr (scale O + decay master), params = round(master); does nothing if
 * state->skip.
 *   params  A out
 *   master  f32 in place
 *   o       bf16 in
 * Launch  persistent blocks of 256, as g2z_k_adamw
 * Cost    10 + sizeof(A) bytes per element: the 85M of GPT-2 124M are 1 GB in fp16
 * Source  Liu et al. 2025, arXiv:2502.16982
 * Oracle  g2z__cpu_muon; test cuda_muon */
template <typename A>
static __global__ void __launch_bounds__(256)
g2z_k_muon(A *params, float *master, const __nv_bfloat16 *o, const g2z_update_range *ranges,
           size_t count, g2z_optimizer_config config, const g2z_step_state *state) {
  g2z__k_begin();
  if (state->skip) return;
  g2z__each_chunk(ranges, count, [&](const g2z_update_range &range, size_t begin, size_t end) {
    g2z__muon_factors now = g2z__muon_prepare(&config, state, range.decay, range.scale);
    A *param = params + range.own_param_at;
    float *weights = master + range.shard_at;
    const __nv_bfloat16 *from = o + range.u_at;
    if (range.u_at % 4 == 0 && range.shard_at % 4 == 0 && range.own_param_at % 4 == 0 &&
        end - begin == G2Z__ADAMW_CHUNK) {
      float4 weight[2], by[2];
#pragma unroll
      for (int i = 0; i < 2; i++) { /* four loads are in flight together */
        size_t at = begin + threadIdx.x * 4 + (size_t)i * (G2Z__ADAMW_CHUNK / 2);
        weight[i] = g2z__get_four(weights + at);
        by[i] = g2z__get_four(from + at);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        size_t at = begin + threadIdx.x * 4 + (size_t)i * (G2Z__ADAMW_CHUNK / 2);
        weight[i].x = g2z__muon_element(&now, weight[i].x, by[i].x);
        weight[i].y = g2z__muon_element(&now, weight[i].y, by[i].y);
        weight[i].z = g2z__muon_element(&now, weight[i].z, by[i].z);
        weight[i].w = g2z__muon_element(&now, weight[i].w, by[i].w);
        g2z__put_four(weights + at, weight[i]);
        g2z__put_four(param + at, weight[i]);
      }
    } else
      for (size_t at = begin + threadIdx.x; at < end; at += 256) {
        weights[at] = g2z__muon_element(&now, weights[at], g2z__to_float(from[at]));
        param[at] = (A)weights[at];
      }
  });
}

template <typename A>
static g2z_status g2z_cuda_muon(g2z_device *device, const void *o, const g2z_update *u,
                                size_t begin, size_t end) {
  unsigned blocks = g2z__update_blocks(device, u, begin, end);
  if (blocks == 0) return G2Z_OK;
  return g2z__launch(device, "g2z_k_muon", g2z_k_muon<A>, blocks, 256, 0, (A *)u->params,
                     u->master, (const __nv_bfloat16 *)o, u->ranges + begin, end - begin,
                     *u->config, u->state);
}

#define G2Z__SQUARE_PARTS 64     /* blocks per matrix: fixed, so that sums have one order */

/* Matrices of one shape inside weights, in the area of g2z_ops.orthogonalize. Blocks of the kernels
 * below work on matrix first + blockIdx.y. */
typedef struct g2z__matrix_list {
  __nv_bfloat16 *weight;         /* the first of the weights */
  int rows, columns;             /* of a weight */
  int matrices;                  /* per weight, next to each other in its rows */
  int first;                     /* number of the first matrix */
} g2z__matrix_list;

/* Calls each(in, at) for this block's packs of a matrix. `in` counts packs from list.weight on;
 * `at` counts from the start of a contiguous copy of the matrix. */
template <typename F>
static __device__ inline void g2z__each_pack(const g2z__matrix_list &list, F each) {
  unsigned width = (unsigned)(list.columns / list.matrices / 8);
  unsigned packs = (unsigned)list.rows * width, matrix = (unsigned)list.first + blockIdx.y;
  size_t across = (size_t)(unsigned)list.columns / 8;
  size_t first = matrix / (unsigned)list.matrices * (unsigned)list.rows * across +
                 matrix % (unsigned)list.matrices * width;
  for (unsigned at = blockIdx.x * 256 + threadIdx.x; at < packs; at += gridDim.x * 256)
    each(first + at / width * across + at % width, at);
}

/* The sum over a block's shared numbers, as a tree. */
template <int N>
static __device__ inline double g2z__tree_sum(double (&parts)[N]) {
  for (unsigned half = N / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  __syncthreads();
  return parts[0];
}

/* g2z_k_squares: partial[matrix][block] = sum of squares of the block's packs, in fp64: neither
 * tiny nor large bf16 numbers lose their squares.
 *   partial  [matrices][SQUARE_PARTS] f64 out
 * Launch  grid (SQUARE_PARTS, matrices), 256 threads; then g2z_k_normalize
 * Cost    2 bytes per element; g2z_k_normalize reads them again, partly from L2
 * Order   a thread adds its packs in ascending order; then trees
 * Oracle  g2z__cpu_orthogonalize */
static __global__ void __launch_bounds__(256)
g2z_k_squares(double *partial, g2z__matrix_list list) {
  __shared__ double parts[256];
  double sum = 0;
  g2z__k_begin();
  g2z__each_pack(list, [&](size_t in, unsigned) {
    float value[8];
    g2z__unpack<__nv_bfloat16>(value, g2z__get(list.weight, in));
#pragma unroll
    for (int i = 0; i < 8; i++) sum += (double)value[i] * (double)value[i];
  });
  parts[threadIdx.x] = sum;
  sum = g2z__tree_sum(parts);
  if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

/* g2z_k_normalize: to = each matrix divided by its Frobenius norm; zero stays zero.
 *   to       [matrices][rows][width] bf16 out
 *   partial  [matrices][SQUARE_PARTS] f64 in
 * Launch  grid (SQUARE_PARTS, matrices), 256 threads
 * Cost    4 bytes per element */
static __global__ void __launch_bounds__(256)
g2z_k_normalize(__nv_bfloat16 *to, const double *partial, g2z__matrix_list list) {
  __shared__ double parts[G2Z__SQUARE_PARTS];
  g2z__k_begin();
  if (threadIdx.x < G2Z__SQUARE_PARTS)
    parts[threadIdx.x] = partial[blockIdx.y * G2Z__SQUARE_PARTS + threadIdx.x];
  double sum = g2z__tree_sum(parts), factor = sum > 0 ? 1 / sqrt(sum) : 0;
  to += (size_t)blockIdx.y * (unsigned)list.rows * (unsigned)(list.columns / list.matrices);
  g2z__each_pack(list, [&](size_t in, unsigned at) {
    float value[8];
    g2z__unpack<__nv_bfloat16>(value, g2z__get(list.weight, in));
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] = (float)((double)value[i] * factor);
    g2z__put(to, at, g2z__pack<__nv_bfloat16>(value));
  });
}

/* g2z_k_put_back: writes contiguous matrices [rows][width] to their places in the weights.
 * Launch  grid (SQUARE_PARTS, matrices), 256 threads
 * Cost    4 bytes per element */
static __global__ void __launch_bounds__(256)
g2z_k_put_back(g2z__matrix_list list, const __nv_bfloat16 *from) {
  g2z__k_begin();
  from += (size_t)blockIdx.y * (unsigned)list.rows * (unsigned)(list.columns / list.matrices);
  g2z__each_pack(list, [&](size_t in, unsigned at) {
    g2z__put(list.weight, in, g2z__get(from, at));
  });
}

/* A batch of row-major products: to = alpha left right + beta add. If `add` is NULL, beta is 0. */
static g2z_status g2z__batch_multiply(g2z_device *device, g2z__lt_key key, g2z__lt_batch batch,
                                      void *to, const void *left, const void *right,
                                      const void *add) {
  g2z__lt_operands on = g2z__lt_rows(to, left, right);
  key.batched = 1;
  key.compute = CUBLAS_COMPUTE_32F; /* the operands are bf16, also on a tf32 device */
  on.c = add;
  on.batch = &batch;
  return g2z__lt_multiply(device, &key, &on);
}

/* Newton-Schulz on `count` matrices of one shape. X is [rows,width] and is never transposed. If
 * rows <= width, A = X X^T and X = a X + P X; else A = X^T X and X = a X + X P. P = b A + c A A is
 * symmetric. Each step swaps x and `other`. The last of the five steps writes `other`, the place of
 * the matrices themselves if they are contiguous. */
static g2z_status g2z__newton_schulz(g2z_device *device, const g2z__matrix_list *list, int count,
                                     void *work) {
  typedef __nv_bfloat16 H;
  const int rows = list->rows, width = list->columns / list->matrices, tall = rows > width;
  const int m = min(rows, width);
  const size_t elements = (size_t)rows * (size_t)width, square = (size_t)m * (size_t)m;
  g2z__transposed left = G2Z__AS_IT_IS, right = G2Z__TRANSPOSED; /* X X^T */
  if (tall) { /* X^T X */
    left = G2Z__TRANSPOSED;
    right = G2Z__AS_IT_IS;
  }
  const g2z__lt_key gram = g2z__lt_rows_key<H, H>(device, m, rows + width - m, m, left, right, m,
                                                  CUBLASLT_EPILOGUE_DEFAULT);
  const g2z__lt_key squared = g2z__lt_rows_key<H, H>(device, m, m, m, G2Z__AS_IT_IS, G2Z__AS_IT_IS,
                                                     m, CUBLASLT_EPILOGUE_DEFAULT);
  const g2z__lt_key next = g2z__lt_rows_key<H, H>(device, rows, m, width, G2Z__AS_IT_IS,
                                                  G2Z__AS_IT_IS, width, CUBLASLT_EPILOGUE_DEFAULT);
  H *x = (H *)work, *other = list->weight + (size_t)list->first * elements;
  H *a = x + (size_t)count * elements;
  if (list->matrices > 1) {
    other = a;
    a += (size_t)count * elements;
  }
  H *p = a + (size_t)count * square;
  const dim3 grid(G2Z__SQUARE_PARTS, (unsigned)count);
  void *partial;
  G2Z_TRY(g2z__scratch(device, (size_t)count * G2Z__SQUARE_PARTS * sizeof(double), &partial));
  G2Z_TRY(g2z__launch(device, "g2z_k_squares", g2z_k_squares, grid, 256, 0, (double *)partial,
                      *list));
  G2Z_TRY(g2z__launch(device, "g2z_k_normalize", g2z_k_normalize, grid, 256, 0, x,
                      (const double *)partial, *list));
  for (int step = 0; step < G2Z_ORTHOGONALIZE_STEPS; step++) {
    G2Z_TRY(g2z__batch_multiply(device, gram, {count, elements, elements, square, 1, 0}, a, x, x,
                                NULL));
    G2Z_TRY(g2z__batch_multiply(device, squared,
                                {count, square, square, square, G2Z_ORTHOGONALIZE_C,
                                  G2Z_ORTHOGONALIZE_B},
                                p, a, a, a));
    if (tall) /* X P */
      G2Z_TRY(g2z__batch_multiply(device, next,
                                  {count, square, elements, elements, 1, G2Z_ORTHOGONALIZE_A},
                                  other, x, p, x));
    else /* P X */
      G2Z_TRY(g2z__batch_multiply(device, next,
                                  {count, elements, square, elements, 1, G2Z_ORTHOGONALIZE_A},
                                  other, p, x, x));
    H *swap = x;
    x = other;
    other = swap;
  }
  if (list->matrices == 1) return G2Z_OK;
  return g2z__launch(device, "g2z_k_put_back", g2z_k_put_back, grid, 256, 0, *list, (const H *)x);
}

/* For each shape: equal groups of matrices, as few groups as the room in `work` allows. */
static g2z_status g2z_cuda_orthogonalize(g2z_device *device, void *area, const g2z_matrices *shapes,
                                         int count, void *work, size_t work_bytes) {
  for (int s = 0; s < count; s++) {
    const g2z_matrices *shape = &shapes[s];
    int width = shape->columns / shape->matrices, total = shape->weights * shape->matrices;
    int m = min(shape->rows, width), n = max(shape->rows, width);
    size_t room = work_bytes / (sizeof(__nv_bfloat16) * G2Z_ORTHOGONALIZE_WORK(m, n));
    G2Z_ASSERT(room > 0);
    int groups = (int)g2z__blocks((size_t)total, room);
    for (int group = 0; group < groups; group++) {
      int first = (int)((int64_t)total * group / groups);
      int end = (int)((int64_t)total * (group + 1) / groups);
      g2z__matrix_list list = {(__nv_bfloat16 *)area + shape->at, shape->rows, shape->columns,
                               shape->matrices, first};
      G2Z_TRY(g2z__newton_schulz(device, &list, end - first, work));
    }
  }
  return G2Z_OK;
}

/* ===== >>k80 collectives =================================================
 * In:  complete gradients, new parameters. Out: their sums and copies over all GPUs.
 * Law: one communicator, one stream of high priority (the queue). The queue and the device's own
 *      stream wait for each other by events; the host waits for neither. Every rank enqueues the
 *      same calls in the same order.
 * With transport COPY a call copies into the other GPUs' memory (CUDA IPC); then the ranks meet.
 * The meeting's kernel itself writes messages of up to 256 bytes, also in the device's own stream.
 * All copies use one stream: in several they would still run one by one, and start later. */

#if defined(G2Z__NCCL)

/* Memory of the same size on every rank, shared with the other ranks. */
typedef struct g2z__region {
  size_t bytes;
  char *mine;
  char **mapped;                 /* [world] each rank's memory as mapped here; NULL: not mapped */
  char **mapped_there;           /* the same list in device memory */
#if NCCL_VERSION_CODE >= 22800
  ncclWindow_t window;           /* NCCL's registration; NULL: none */
#endif
} g2z__region;
#define G2Z__REGIONS 4

/* A join is a wait of the device's stream for the queue. At most 4096 joins of a step are timed;
 * stage 3 has 3 per block and micro-step. */
#define G2Z__JOINS 4096
#define G2Z__TIMED_LAPS 8        /* joins are timed in the first 8 laps and every 8th */

/* Ranks meet in two streams: the queue of collectives, and the device's own. */
enum { G2Z__LANE_QUEUE, G2Z__LANE_DEVICE };

typedef struct g2z__signs {       /* in host memory that the GPU writes */
  volatile uint32_t progress;    /* places that the queue has passed */
  volatile uint64_t met_ns[2];   /* time in the device's meetings, by parity of the lap's number */
} g2z__signs;

/* In device memory. */
typedef struct g2z__waits {
  uint64_t ns;                   /* time in the device's own meetings of this lap */
  uint32_t laps;
} g2z__waits;

typedef struct g2z__nccl {       /* comm->backend */
  ncclComm_t comm;
  cudaStream_t stream;
  cudaEvent_t *departures;       /* [0]: for calls outside graphs; each other event belongs to one
                                  * place in a graph */
  size_t departure_count, departure_capacity;
  cudaEvent_t *places;
  int place_count;
  void *narrow;                  /* [most] a reduction's gradients in the wire's type; NULL if the
                                  * gradients have that type */
  g2z__region regions[G2Z__REGIONS]; /* memory from allocate() that other ranks reach */
  int region_count;
  g2z__region inbox;             /* reduce COPY: two halves, each with a slice per other rank */
  size_t inbox_half;             /* bytes */
  int half;                      /* the half that the next reduction takes: 0 or 1 */
  g2z__region flags;             /* COPY: uint32 [2 lanes, 1 + world]: the number of this rank's
                                  * meetings, then each rank's last meeting; after these [2, world]:
                                  * each rank's test words, written by a copy and by a kernel */
  const char *no_copies;         /* why there are no flags; NULL: they exist, or COPY is not used */
  int pushed;                    /* 1: copies were enqueued since the last meeting */
  decltype(&cuStreamWriteValue32) write_value; /* NULL: the driver lacks it or it fails */
  g2z__signs *signs;
  g2z__waits *waits;
  uint32_t passed;               /* places enqueued so far; signs->progress reaches it later */
  cudaEvent_t begin[2][G2Z__JOINS], end[2][G2Z__JOINS]; /* timing events around joins, by lap */
  int joins[2], timed[2];
  uint64_t laps, number[2];      /* laps begun; the last two laps' numbers, from 1 */
  double joined_ms;              /* time in joins of the last timed lap */
} g2z__nccl;

/* The backend; its device's GPU becomes current. */
static inline g2z__nccl *g2z__nccl_of(const g2z_comm *comm) {
  g2z__cuda_of(comm->device);
  return (g2z__nccl *)comm->backend;
}

static g2z_status g2z__nccl_fail(const g2z_comm *comm, ncclResult_t result, const char *what) {
  return g2z_fail(comm->services, G2Z_DEVICE,
                  "%s: %s (%s); set NCCL_DEBUG=INFO for details", what, ncclGetErrorString(result),
                  ncclGetLastError(g2z__nccl_of(comm)->comm));
}

#define G2Z__NCCL_TRY(owner, call)                                                           \
  do {                                                                                       \
    ncclResult_t nccl_result_ = (call);                                                      \
    if (nccl_result_ != ncclSuccess) return g2z__nccl_fail(owner, nccl_result_, #call);      \
  } while (0)

static ncclDataType_t g2z__nccl_type(g2z_dtype dtype) {
  if (dtype == G2Z_FP16) return ncclFloat16;
  if (dtype == G2Z_BF16) return ncclBfloat16;
  return ncclFloat32;
}

static size_t g2z__nccl_bytes(g2z_dtype dtype) {
  return dtype == G2Z_FP16 || dtype == G2Z_BF16 ? 2 : 4;
}

/* Records a departure. A departure in a graph has its own event, which each run records again. */
static g2z_status g2z__nccl_depart(g2z_comm *comm, int *departure) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  cudaStream_t stream = g2z__cuda_of(comm->device)->stream;
  *departure = 0;
  if (!g2z__capturing(comm->device)) {
    G2Z__CUDA(comm, cudaEventRecord(nccl->departures[0], stream));
    return G2Z_OK;
  }
  size_t number = nccl->departure_count;
  void *events = nccl->departures;
  G2Z_TRY(g2z_grow(comm->services, &events, &nccl->departure_capacity, number, number + 1,
                   sizeof(cudaEvent_t)));
  nccl->departures = (cudaEvent_t *)events;
  G2Z__CUDA(comm, cudaEventCreateWithFlags(&nccl->departures[number], cudaEventDisableTiming));
  nccl->departure_count++;
  *departure = (int)number;
  G2Z__CUDA(comm, cudaEventRecordWithFlags(nccl->departures[number], stream,
                                           cudaEventRecordExternal));
  return G2Z_OK;
}

/* g2z_k_meet: a barrier of all ranks in one lane. After it, all ranks see what this rank's stream
 * wrote before it. One block, one thread per rank.
 *   flags  [world] device pointers to rank r's flags[2, 1 + world], which all ranks can write to
 *   post   a message: `words` words of `from` go to each rank's to[r] + at; words may be 0
 *   waits  NULL, or the time spent here, in ns, is added to it
 *   met_ns NULL, or [2]: the lap ends here, and its sum goes to met_ns[parity of the lap]
 * Cost    a write to each other GPU, and the wait for their writes */
typedef struct g2z__post {
  char *const *to;
  size_t at;
  const uint32_t *from;
  int words;
} g2z__post;
static __global__ void g2z_k_meet(uint32_t *const *flags, int lane, int rank, g2z__post post,
                                  g2z__waits *waits, volatile uint64_t *met_ns) {
  int peer = (int)threadIdx.x, first = lane * ((int)blockDim.x + 1);
  uint64_t begin, end;
  g2z__k_begin();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  uint32_t now = flags[rank][first] + 1;
  __syncthreads(); /* all threads have read it before it changes */
  for (int i = 0; i < post.words; i++)
    ((volatile uint32_t *)(post.to[peer] + post.at))[i] = post.from[i];
  if (peer != rank) {
    volatile uint32_t *theirs = flags[peer] + first + 1 + rank;
    volatile uint32_t *mine = flags[rank] + first + 1 + peer;
    __threadfence_system();
    *theirs = now;
    while ((int32_t)(*mine - now) < 0) {}
    __threadfence_system();
  } else {
    flags[rank][first] = now;
  }
  if (!waits) return;
  __syncthreads();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
  if (peer != rank) return;
  waits->ns += end - begin;
  if (!met_ns) return;
  met_ns[++waits->laps % 2] = waits->ns;
  waits->ns = 0;
}

static g2z_status g2z__nccl_meet(g2z_comm *comm, g2z__post post) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  g2z__cuda_of(comm->device)->meet<<<1, (unsigned)comm->world, 0, nccl->stream>>>(
      (uint32_t *const *)nccl->flags.mapped_there, G2Z__LANE_QUEUE, comm->rank, post, NULL, NULL);
  nccl->pushed = 0;
  return g2z__launched(comm->device, "g2z_k_meet");
}

static const g2z__post g2z__no_post = {NULL, 0, NULL, 0};
static g2z_status g2z__nccl_meet_only(g2z_comm *comm) {
  return g2z__nccl_meet(comm, g2z__no_post);
}

/* Writes the number of places that the queue has passed, for heartbeats and the flight recorder.
 * Places of replayed steps count, too. Not every driver can write from a stream. */
static CUresult g2z__nccl_tell(g2z__nccl *nccl) {
  return nccl->write_value(nccl->stream, (CUdeviceptr)(uintptr_t)&nccl->signs->progress,
                           nccl->passed, CU_STREAM_WRITE_VALUE_DEFAULT);
}

/* ----- memory that all ranks of a host can write to ---------------------- */

/* Frees a region. Memory must not be freed while another rank has it open: if other ranks' parts
 * were opened, all ranks close them and meet before each frees its own. */
static void g2z__region_close(g2z_comm *comm, g2z__region *region) {
  for (int r = 0; region->mapped && r < comm->world; r++)
    if (r != comm->rank && region->mapped[r]) cudaIpcCloseMemHandle(region->mapped[r]);
  if (region->mapped) g2z__ranks_part(comm->ranks);
  cudaFree(region->mine);
  cudaFree(region->mapped_there);
  g2z_release(comm->services, region->mapped);
  memset(region, 0, sizeof *region);
}

/* Makes a region on all ranks, or on none if one rank fails: region->mapped is then NULL. */
static g2z_status g2z__region_open(g2z_comm *comm, size_t bytes, g2z__region *region) {
  const size_t world = (size_t)comm->world, list = world * sizeof(char *);
  cudaStream_t stream = g2z__cuda_of(comm->device)->stream;
  void *mapped = NULL, *memory = NULL, *handles = NULL;
  cudaIpcMemHandle_t handle;
  int all = 0;
  memset(&handle, 0, sizeof handle);
  memset(region, 0, sizeof *region);
  region->bytes = bytes;
  g2z_status status = g2z_allocate(comm->services, world, sizeof(char *), &mapped);
  if (status == G2Z_OK) status = g2z_allocate(comm->services, world, sizeof handle, &handles);
  /* Allocate and zero this rank's part; make the handle that the other ranks open. */
  int mine = status == G2Z_OK && g2z_ranks_place(comm->ranks)->local_world == comm->world &&
             cudaMalloc(&memory, bytes) == cudaSuccess;
  region->mine = (char *)memory;
  mine = mine && cudaMemsetAsync(memory, 0, bytes, stream) == cudaSuccess &&
         cudaStreamSynchronize(stream) == cudaSuccess &&
         cudaMalloc((void **)&region->mapped_there, list) == cudaSuccess &&
         cudaIpcGetMemHandle(&handle, memory) == cudaSuccess;
  status = g2z__ranks_all(comm->ranks, mine, &all);
  if (all && status == G2Z_OK)
    status = g2z_ranks_all_gather(comm->ranks, &handle, sizeof handle, handles);
  if (all && status == G2Z_OK) {
    /* Open the other ranks' parts; put the list of all parts in device memory. */
    region->mapped = (char **)mapped;
    mapped = NULL;
    for (int r = 0; r < comm->world && mine; r++) {
      memory = region->mine;
      if (r != comm->rank)
        mine = cudaIpcOpenMemHandle(&memory, ((cudaIpcMemHandle_t *)handles)[r],
                                    cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
      if (mine) region->mapped[r] = (char *)memory;
    }
    mine = mine && cudaMemcpy(region->mapped_there, region->mapped, list,
                              cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaDeviceSynchronize() == cudaSuccess; /* cudaMemcpy may return before it is done */
    status = g2z__ranks_all(comm->ranks, mine, &all);
  }
  if (!mine) (void)cudaGetLastError();
  g2z_release(comm->services, handles);
  g2z_release(comm->services, mapped);
  if (!all || status != G2Z_OK) g2z__region_close(comm, region);
  return status;
}

/* Writes rank + 1 to each rank's flags. One block, one thread per rank. */
static __global__ void g2z_k_try(uint32_t *const *flags, size_t at, int rank) {
  *(volatile uint32_t *)(flags[threadIdx.x] + at) = (uint32_t)rank + 1;
  __threadfence_system();
}

static const char g2z__peers_off[] =
    "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL limits access to other GPUs' memory";

/* Whether NCCL_P2P_LEVEL lets all GPUs of a host reach each other: SYS does, and so do the old
 * numbers from 4 on. Every other level is a limit on distances, which only NCCL measures. */
static int g2z__peers_allowed(const char *level) {
  const int number = level[0] >= '0' && level[0] <= '9';
  return number ? atoi(level) >= 4 : strcmp(level, "SYS") == 0;
}

/* Makes the flags of meetings, one set for all regions. There are none if the environment forbids
 * peer access (NCCL has copied nccl.conf into the environment), or if a test write is lost. */
static g2z_status g2z__nccl_open_flags(g2z_comm *comm) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  const char *disable = getenv("NCCL_P2P_DISABLE"), *level = getenv("NCCL_P2P_LEVEL");
  const size_t world = (size_t)comm->world, rank = (size_t)comm->rank;
  const size_t copied = 2 * (world + 1), written = copied + world; /* where the test words lie */
  const int off = (disable && atoi(disable)) || (level && !g2z__peers_allowed(level));
  uint32_t words[2 * 1024];
  int all = 0, lost = -1, from = -1, to = -1, lost_at[1024];
  if (nccl->flags.mapped || nccl->no_copies || comm->world > 1024) return G2Z_OK;
  G2Z_TRY(g2z__ranks_all(comm->ranks, !off, &all));
  if (all) G2Z_TRY(g2z__region_open(comm, (written + world) * sizeof *words, &nccl->flags));
  if (!nccl->flags.mapped) {
    nccl->no_copies = all ? "not all GPUs can write to each other's memory" : g2z__peers_off;
    return G2Z_OK;
  }
  /* Check that each rank's writes arrive at every other rank. Some platforms map a peer's memory
   * and then drop the writes; a meeting would wait forever. Nothing waits for a write here: ranks
   * check after all have written. `lost` is the first rank whose write is missing here, or -1. */
  uint32_t *mine = (uint32_t *)nccl->flags.mine;
  g2z_k_try<<<1, (unsigned)world, 0, nccl->stream>>>((uint32_t *const *)nccl->flags.mapped_there,
                                                     written + rank, comm->rank);
  cudaError_t error = cudaGetLastError();
  for (size_t r = 0; r < world && error == cudaSuccess; r++)
    error = cudaMemcpyAsync((uint32_t *)nccl->flags.mapped[r] + copied + rank,
                            mine + written + rank, sizeof *mine, cudaMemcpyDeviceToDevice,
                            nccl->stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(nccl->stream);
  G2Z_TRY(g2z__ranks_all(comm->ranks, error == cudaSuccess, &all));
  if (all)
    error = cudaMemcpy(words, mine + copied, 2 * world * sizeof *words, cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (!all || error != cudaSuccess) lost = comm->rank;
  for (int i = 0; i < 2 * comm->world && lost < 0; i++)
    if (words[i] != (uint32_t)(i % comm->world) + 1) lost = i % comm->world;
  G2Z_TRY(g2z_ranks_all_gather(comm->ranks, &lost, sizeof lost, lost_at));
  for (int r = 0; r < comm->world; r++)
    if (lost_at[r] >= 0) {
      from = lost_at[r];
      to = r;
    }
  if (to < 0) return G2Z_OK;
  nccl->no_copies = "a GPU's writes to another do not arrive";
  g2z__region_close(comm, &nccl->flags);
  if (comm->rank == 0)
    g2z_log(comm->services, G2Z_LOG_WARNING, "rank %d's GPU may write to rank %d's memory, but "
            "nothing arrives there: often PCIe ACS or the IOMMU does that. If NCCL hangs too, set "
            "NCCL_P2P_DISABLE=1", from, to);
  return G2Z_OK;
}

/* The region that contains `at` if parameters travel by copies; else NULL. */
static const g2z__region *g2z__region_of(const g2z_comm *comm, const void *at) {
  const g2z__nccl *nccl = g2z__nccl_of(comm);
  if (comm->gather != G2Z_TRANSPORT_COPY) return NULL;
  for (int i = 0; i < nccl->region_count; i++) {
    const g2z__region *region = &nccl->regions[i];
    if ((const char *)at >= region->mine && (const char *)at < region->mine + region->bytes)
      return region;
  }
  return NULL;
}

/* ----- gradients --------------------------------------------------------- */

/* The launcher of g2z_k_grad_add for two types. One of them is fp32, or both are the same. */
static auto g2z__grad_adder(g2z_dtype to_type, g2z_dtype from_type) {
  ncclDataType_t t = g2z__nccl_type(to_type), f = g2z__nccl_type(from_type);
  auto add = g2z__grad_add_on<__nv_bfloat16, __nv_bfloat16>;
  if (t == ncclFloat32 && f == ncclFloat32) add = g2z__grad_add_on<float, float>;
  else if (t == ncclFloat32 && f == ncclFloat16) add = g2z__grad_add_on<float, __half>;
  else if (t == ncclFloat32) add = g2z__grad_add_on<float, __nv_bfloat16>;
  else if (f == ncclFloat32 && t == ncclFloat16) add = g2z__grad_add_on<__half, float>;
  else if (f == ncclFloat32) add = g2z__grad_add_on<__nv_bfloat16, float>;
  else if (t == ncclFloat16) add = g2z__grad_add_on<__half, __half>;
  return add;
}

/* to = from, or +=, in the queue. */
static g2z_status g2z__nccl_convert(g2z_comm *comm, void *to, g2z_dtype to_type, const void *from,
                                    g2z_dtype from_type, g2z_write mode, size_t n) {
  auto add = g2z__grad_adder(to_type, from_type);
  return add(comm->device, g2z__nccl_of(comm)->stream, to, from, NULL, 0, mode, n);
}

/* Copies each rank's slice into its inbox; after a meeting each rank adds up its inbox. Reduction i
 * needs no lock for its half of the inbox. Reduction i - 2 used this half last, and each rank adds
 * that reduction up before it comes to the meeting of reduction i - 1. */
static g2z_status g2z__nccl_push(g2z_comm *comm, void *out, const char *from, g2z_write mode,
                                 size_t slice) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  g2z_dtype dtype = comm->device->grad_dtype;
  size_t bytes = slice * g2z__nccl_bytes(dtype), inbox = (size_t)nccl->half * nccl->inbox_half;
  int world = comm->world;
  nccl->half ^= 1;
  for (int i = 1; i < world; i++) {
    int peer = (comm->rank + i) % world; /* rank = peer + (world - i): inbox row world - i - 1 */
    char *to = nccl->inbox.mapped[peer] + inbox + (size_t)(world - i - 1) * bytes;
    G2Z__CUDA(comm, cudaMemcpyAsync(to, from + (size_t)peer * bytes, bytes,
                                    cudaMemcpyDeviceToDevice, nccl->stream));
  }
  G2Z_TRY(g2z__nccl_meet_only(comm));
  auto add = g2z__grad_adder(dtype, dtype);
  return add(comm->device, nccl->stream, out, from + (size_t)comm->rank * bytes,
             nccl->inbox.mine + inbox, world - 1, mode, slice);
}

/* REDUCE through NCCL: summed in the wire's type, then converted to the gradients' type. */
static g2z_status g2z__nccl_sum(g2z_comm *comm, const g2z_call *c) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  ncclDataType_t type = g2z__nccl_type(comm->wire);
  int slices = c->owner == G2Z_OWNER_SLICES, mine_too = c->owner != G2Z_OWNER_ROOT || !comm->rank;
  const g2z_dtype dtype = comm->device->grad_dtype;
  char *wire = (char *)c->from;
  if (type != g2z__nccl_type(dtype)) {
    wire = (char *)nccl->narrow;
    G2Z_TRY(g2z__nccl_convert(comm, wire, comm->wire, c->from, dtype, G2Z_OVERWRITE, c->n));
  }
  char *mine = wire; /* this rank's n elements of the sum */
  size_t n = c->n;
  if (slices) {
    n /= (size_t)comm->world;
    mine += (size_t)comm->rank * n * g2z__nccl_bytes(comm->wire);
  }
  void *to = mine;
  if (c->write == G2Z_OVERWRITE && wire == (char *)c->from) to = c->to;
  if (slices)
    G2Z__NCCL_TRY(comm, ncclReduceScatter(wire, to, n, type, ncclSum, nccl->comm, nccl->stream));
  else if (c->owner == G2Z_OWNER_ALL)
    G2Z__NCCL_TRY(comm, ncclAllReduce(wire, to, n, type, ncclSum, nccl->comm, nccl->stream));
  else
    G2Z__NCCL_TRY(comm, ncclReduce(wire, to, n, type, ncclSum, 0, nccl->comm, nccl->stream));
  if (to == c->to || !mine_too) return G2Z_OK;
  return g2z__nccl_convert(comm, c->to, dtype, mine, comm->wire, c->write, n);
}

/* ----- parameters, and rows of wte --------------------------------------- */

/* Zeroed memory that NCCL's own kernels reach on all ranks. If one rank fails, no rank has it:
 * region->mine is then NULL. */
static g2z_status g2z__nccl_window(g2z_comm *comm, size_t bytes, g2z__region *region) {
  memset(region, 0, sizeof *region);
#if NCCL_VERSION_CODE >= 22800
  g2z__nccl *nccl = g2z__nccl_of(comm);
  void *memory = NULL;
  int all = 0;
  bytes = (bytes + NCCL_WIN_REQUIRED_ALIGNMENT - 1) / NCCL_WIN_REQUIRED_ALIGNMENT *
          NCCL_WIN_REQUIRED_ALIGNMENT;
  int mine = ncclMemAlloc(&memory, bytes) == ncclSuccess &&
             cudaMemsetAsync(memory, 0, bytes, g2z__cuda_of(comm->device)->stream) == cudaSuccess;
  G2Z_TRY(g2z__ranks_all(comm->ranks, mine, &all));
  if (all) {
    ncclResult_t result = ncclCommWindowRegister(nccl->comm, memory, bytes, &region->window,
                                                 NCCL_WIN_COLL_SYMMETRIC);
    G2Z_TRY(g2z__ranks_all(comm->ranks, result == ncclSuccess && region->window, &all));
  }
  if (all) {
    region->mine = (char *)memory;
    region->bytes = bytes;
    return G2Z_OK;
  }
  if (region->window) ncclCommWindowDeregister(nccl->comm, region->window);
  memset(region, 0, sizeof *region);
  if (memory) ncclMemFree(memory);
#else
  (void)comm, (void)bytes;
#endif
  return G2Z_OK;
}

/* Logs that NCCL replaces copies. Between hosts, or if the user forbade peer access, this is
 * expected; otherwise it is a warning. */
static void g2z__nccl_no_peers(g2z_comm *comm, const char *what) {
  const int together = g2z_ranks_place(comm->ranks)->local_world == comm->world;
  const char *why = g2z__nccl_of(comm)->no_copies;
  g2z_log_level level = G2Z_LOG_INFO;
  if (together && why != g2z__peers_off) level = G2Z_LOG_WARNING;
  if (!why) why = "a GPU has no room for what others write";
  if (comm->rank == 0) g2z_log(comm->services, level, "%s: %s by NCCL", why, what);
}

static g2z_status g2z__nccl_allocate(g2z_comm *comm, size_t bytes, void **out) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  g2z__region region;
  *out = NULL;
  memset(&region, 0, sizeof region);
  G2Z_ASSERT(nccl->region_count < G2Z__REGIONS);
  if (comm->gather == G2Z_TRANSPORT_COPY) {
    G2Z_TRY(g2z__nccl_open_flags(comm));
    if (nccl->flags.mapped) G2Z_TRY(g2z__region_open(comm, bytes, &region));
    if (!region.mine) {
      comm->gather = G2Z_TRANSPORT_NCCL;
      g2z__nccl_no_peers(comm, "parameters are gathered");
    }
  }
  if (!region.mine) G2Z_TRY(g2z__nccl_window(comm, bytes, &region));
  if (!region.mine) return comm->device->ops->allocate(comm->device, bytes, out);
  *out = region.mine;
  nccl->regions[nccl->region_count++] = region;
  return G2Z_OK;
}

static void g2z__nccl_release(g2z_comm *comm, void *memory) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  for (int i = 0; i < nccl->region_count; i++) {
    g2z__region region = nccl->regions[i];
    if (region.mine != memory) continue;
    cudaStreamSynchronize(nccl->stream);
    nccl->regions[i] = nccl->regions[--nccl->region_count];
    if (region.mapped) {
      g2z__region_close(comm, &region);
      return;
    }
#if NCCL_VERSION_CODE >= 22800
    ncclCommWindowDeregister(nccl->comm, region.window);
    ncclMemFree(memory);
#endif
    return;
  }
  comm->device->ops->release(comm->device, memory);
}

/* Returns 1 if a meeting's kernel can write the message itself. */
static int g2z__nccl_is_post(size_t bytes) { return bytes <= 256 && bytes % 4 == 0; }

/* Gathers all ranks' from[bytes] into to[world][bytes]. With transport COPY this rank writes its
 * bytes to the same place in all ranks' memory. They are there after the next meeting; a small
 * message is its own meeting. */
static g2z_status g2z__nccl_collect(g2z_comm *comm, void *to, const void *from, size_t bytes) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  const g2z__region *region = g2z__region_of(comm, to);
  if (!region) {
    G2Z__NCCL_TRY(comm, ncclAllGather(from, to, bytes, ncclUint8, nccl->comm, nccl->stream));
    return G2Z_OK;
  }
  size_t at = (size_t)((char *)to - region->mine) + (size_t)comm->rank * bytes;
  if (g2z__nccl_is_post(bytes)) {
    g2z__post post = {region->mapped_there, at, (const uint32_t *)from, (int)(bytes / 4)};
    return g2z__nccl_meet(comm, post);
  }
  nccl->pushed = 1;
  for (int i = 1; i <= comm->world; i++) { /* this rank's own copy comes last */
    char *there = region->mapped[(comm->rank + i) % comm->world] + at;
    if (there == (const char *)from) continue;
    G2Z__CUDA(comm, cudaMemcpyAsync(there, from, bytes, cudaMemcpyDeviceToDevice, nccl->stream));
  }
  return G2Z_OK;
}

/* Plays EXCHANGE through NCCL with either transport: copies would spare multiprocessors for a
 * backward pass, but none runs now. NCCL pairs two ranks' messages in the order of the list. */
static g2z_status g2z__nccl_routes(g2z_comm *comm, const g2z_call *c) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  ncclResult_t result = ncclGroupStart();
  cudaError_t copied = cudaSuccess;
  for (int i = 0; i < c->count && result == ncclSuccess && copied == cudaSuccess; i++) {
    const g2z_route *route = &c->routes[i];
    int sender = route->owner, receiver = route->home;
    size_t from_at = route->owner_at, to_at = route->home_at, bytes = route->elements * c->n;
    if (c->back) {
      sender = route->home;
      receiver = route->owner;
      from_at = route->home_at;
      to_at = route->owner_at;
    }
    const char *from = (const char *)c->from + from_at * c->n;
    char *to = (char *)c->to + to_at * c->n;
    if (sender == receiver) {
      if (sender == comm->rank)
        copied = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nccl->stream);
    } else if (sender == comm->rank)
      result = ncclSend(from, bytes, ncclUint8, receiver, nccl->comm, nccl->stream);
    else if (receiver == comm->rank)
      result = ncclRecv(to, bytes, ncclUint8, sender, nccl->comm, nccl->stream);
  }
  ncclResult_t ended = ncclGroupEnd(); /* also after a failure: each start needs an end */
  G2Z__NCCL_TRY(comm, result == ncclSuccess ? ended : result);
  G2Z__CUDA(comm, copied);
  return G2Z_OK;
}

static g2z_status g2z__nccl_play(g2z_comm *comm, const g2z_call *c) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  const g2z_dtype dtype = comm->device->dtype, grad_dtype = comm->device->grad_dtype;
  const int slices = c->owner == G2Z_OWNER_SLICES, lap = comm->lap_now, place = c->place;
  const size_t slice = c->n / (size_t)comm->world;
  switch (c->kind) {
    case G2Z_CALL_AFTER: /* the queue waits for a departure */
      G2Z_ASSERT(place >= 0 && (size_t)place < nccl->departure_count);
      G2Z__CUDA(comm, cudaStreamWaitEvent(nccl->stream, nccl->departures[place], 0));
      /* With `all` and transport COPY the ranks meet, too; NCCL's calls wait for all ranks. */
      if (c->all && comm->gather == G2Z_TRANSPORT_COPY) return g2z__nccl_meet_only(comm);
      return G2Z_OK;
    case G2Z_CALL_MARK: {
      G2Z_ASSERT(place >= 0 && place < nccl->place_count);
      if (nccl->pushed) G2Z_TRY(g2z__nccl_meet_only(comm));
      G2Z__CUDA(comm, cudaEventRecord(nccl->places[place], nccl->stream));
      if (!nccl->write_value) return G2Z_OK;
      nccl->passed++;
      CUresult told = g2z__nccl_tell(nccl);
      if (told == CUDA_SUCCESS) return G2Z_OK;
      return g2z_fail(comm->services, G2Z_DEVICE, "cuStreamWriteValue32: error %d", (int)told);
    }
    case G2Z_CALL_WAIT: { /* the device's stream waits for the queue: a join, which may be timed */
      cudaStream_t stream = g2z__cuda_of(comm->device)->stream;
      int *joins = &nccl->joins[lap], timed = nccl->timed[lap] && *joins < G2Z__JOINS;
      G2Z_ASSERT(place >= 0 && place < nccl->place_count);
      if (timed && !nccl->begin[lap][*joins]) {
        G2Z__CUDA(comm, cudaEventCreate(&nccl->begin[lap][*joins]));
        G2Z__CUDA(comm, cudaEventCreate(&nccl->end[lap][*joins]));
      }
      if (timed) G2Z__CUDA(comm, cudaEventRecord(nccl->begin[lap][*joins], stream));
      G2Z__CUDA(comm, cudaStreamWaitEvent(stream, nccl->places[place], 0));
      if (timed) G2Z__CUDA(comm, cudaEventRecord(nccl->end[lap][(*joins)++], stream));
      return G2Z_OK;
    }
    case G2Z_CALL_CAST:
      return g2z__nccl_convert(comm, c->to, grad_dtype, c->from, G2Z_FP32, G2Z_OVERWRITE, c->n);
    case G2Z_CALL_GRAPH: /* never comes here: a record launches its graphs itself */
    case G2Z_CALL_REDUCE:
    case G2Z_CALL_GATHER:
    case G2Z_CALL_ROWS:
    case G2Z_CALL_EXCHANGE: break;
  }
  g2z__cuda_span_begin_on(comm->device, g2z__call_span(c), nccl->stream);
  if (c->kind == G2Z_CALL_REDUCE && slices && comm->reduce == G2Z_TRANSPORT_COPY)
    G2Z_TRY(g2z__nccl_push(comm, c->to, (const char *)c->from, c->write, slice));
  else if (c->kind == G2Z_CALL_REDUCE) G2Z_TRY(g2z__nccl_sum(comm, c));
  else if (c->kind == G2Z_CALL_EXCHANGE) G2Z_TRY(g2z__nccl_routes(comm, c));
  else if (c->kind == G2Z_CALL_ROWS) G2Z_TRY(g2z__nccl_collect(comm, c->to, c->from, c->n));
  else if (slices)
    G2Z_TRY(g2z__nccl_collect(comm, c->to, c->from, slice * g2z__nccl_bytes(dtype)));
  else
    G2Z__NCCL_TRY(comm, ncclBroadcast(c->to, c->to, c->n, g2z__nccl_type(dtype), 0, nccl->comm,
                                      nccl->stream));
  g2z__cuda_span_end_on(comm->device, g2z__call_span(c), nccl->stream);
  return G2Z_OK;
}

/* Sends small ROWS with a meeting in the device's own stream, which a graph can record. */
static g2z_status g2z__nccl_rows_now(g2z_comm *comm, const g2z_call *rows, int *done) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  const g2z__region *region = g2z__region_of(comm, rows->to);
  *done = region && g2z__nccl_is_post(rows->n);
  if (!*done) return G2Z_OK;
  size_t at = (size_t)((char *)rows->to - region->mine) + (size_t)comm->rank * rows->n;
  g2z__post post = {region->mapped_there, at, (const uint32_t *)rows->from, (int)(rows->n / 4)};
  comm->device->ops->span_begin(comm->device, rows->span);
  G2Z_TRY(g2z__launch(comm->device, "g2z_k_meet", g2z__cuda_of(comm->device)->meet, 1,
                      (unsigned)comm->world, 0, (uint32_t *const *)nccl->flags.mapped_there,
                      G2Z__LANE_DEVICE, comm->rank, post, nccl->waits, nccl->signs->met_ns));
  comm->device->ops->span_end(comm->device, rows->span);
  return G2Z_OK;
}

/* ----- waiting times; closing, opening ----------------------------------- */

static void g2z__nccl_lap(g2z_comm *comm, int lap) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  comm->lap_now = lap;
  nccl->joins[lap] = 0;
  nccl->timed[lap] = nccl->laps < G2Z__TIMED_LAPS || nccl->laps % G2Z__TIMED_LAPS == 0;
  nccl->number[lap] = ++nccl->laps;
}

/* A lap's time in joins and in the device's own meetings. Meetings are timed in every lap. If this
 * lap's joins were not timed, the join time of the last timed lap stands in. */
static double g2z__nccl_waited_ms(g2z_comm *comm, int lap) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  if (nccl->timed[lap]) nccl->joined_ms = 0;
  for (int i = 0; nccl->timed[lap] && i < nccl->joins[lap]; i++) {
    float ms = 0;
    if (cudaEventElapsedTime(&ms, nccl->begin[lap][i], nccl->end[lap][i]) != cudaSuccess) {
      (void)cudaGetLastError();
      return nccl->joined_ms = NAN;
    }
    nccl->joined_ms += (double)ms;
  }
  return nccl->joined_ms + (double)nccl->signs->met_ns[nccl->number[lap] % 2] * 1e-6;
}

/* Also closes half-open communicators. */
static void g2z__nccl_close(g2z_comm *comm) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  if (!nccl) return;
  g2z__ranks_progress(comm->ranks, NULL, NULL, NULL);
  if (nccl->stream) cudaStreamSynchronize(nccl->stream);
  if (nccl->comm) ncclCommDestroy(nccl->comm);
  for (int i = 0; i < nccl->place_count; i++)
    if (nccl->places[i]) cudaEventDestroy(nccl->places[i]);
  for (int lap = 0; lap < 2; lap++)
    for (int i = 0; i < G2Z__JOINS && nccl->begin[lap][i]; i++) {
      cudaEventDestroy(nccl->begin[lap][i]);
      if (nccl->end[lap][i]) cudaEventDestroy(nccl->end[lap][i]);
    }
  cudaFree(nccl->waits);
  cudaFree(nccl->narrow);
  g2z__region_close(comm, &nccl->flags);
  g2z__region_close(comm, &nccl->inbox);
  if (nccl->signs) cudaFreeHost(nccl->signs);
  for (size_t i = 0; i < nccl->departure_count; i++) cudaEventDestroy(nccl->departures[i]);
  if (nccl->stream) cudaStreamDestroy(nccl->stream);
  g2z_release(comm->services, nccl->departures);
  g2z_release(comm->services, nccl->places);
  g2z_release(comm->services, nccl);
  comm->backend = NULL;
}

static const g2z_collectives g2z__nccl_collectives = {
    "NCCL",              g2z__nccl_depart,  g2z__nccl_play, g2z__nccl_rows_now,
    g2z__nccl_allocate, g2z__nccl_release, g2z__nccl_lap,  g2z__nccl_waited_ms,
    g2z__nccl_close};

/* Opens the buffers of reductions; the largest reduction has `most` elements. */
static g2z_status g2z__nccl_open_buffers(g2z_comm *comm, size_t most) {
  g2z__nccl *nccl = g2z__nccl_of(comm);
  size_t world = (size_t)comm->world, grad_bytes = g2z__nccl_bytes(comm->device->grad_dtype);
  nccl->inbox_half = most / world * (world - 1) * grad_bytes;
  if (comm->reduce == G2Z_TRANSPORT_COPY) {
    G2Z_TRY(g2z__nccl_open_flags(comm));
    if (nccl->flags.mapped)
      G2Z_TRY(g2z__region_open(comm, 2 * nccl->inbox_half, &nccl->inbox));
    if (!nccl->inbox.mapped) {
      comm->reduce = G2Z_TRANSPORT_NCCL;
      g2z__nccl_no_peers(comm, "gradients are reduced");
    }
  }
  if (comm->reduce == G2Z_TRANSPORT_COPY) comm->wire = comm->device->grad_dtype;
  if (g2z__nccl_type(comm->wire) != g2z__nccl_type(comm->device->grad_dtype))
    G2Z__CUDA(comm, cudaMalloc(&nccl->narrow, most * g2z__nccl_bytes(comm->wire)));
  return G2Z_OK;
}

/* Opens everything that needs no other rank: the backend, its stream, events and memory. */
static g2z_status g2z__nccl_open_alone(g2z_comm *comm, const g2z_comm_config *wanted) {
  int least = 0, greatest = 0;
  void *memory;
  G2Z_TRY(g2z_allocate(comm->services, 1, sizeof(g2z__nccl), &memory));
  g2z__nccl *nccl = (g2z__nccl *)memory;
  comm->backend = nccl;
  g2z__cuda_of(comm->device); /* its GPU becomes current */
  G2Z_TRY(g2z_allocate(comm->services, (size_t)wanted->places, sizeof(cudaEvent_t), &memory));
  nccl->places = (cudaEvent_t *)memory;
  nccl->place_count = wanted->places;
  for (int i = 0; i < wanted->places; i++)
    G2Z__CUDA(comm, cudaEventCreateWithFlags(&nccl->places[i], cudaEventDisableTiming));
  G2Z__CUDA(comm, cudaHostAlloc((void **)&nccl->signs, sizeof *nccl->signs, cudaHostAllocMapped));
  nccl->signs->progress = 0;
  nccl->signs->met_ns[0] = nccl->signs->met_ns[1] = 0;
  G2Z__CUDA(comm, cudaDeviceGetStreamPriorityRange(&least, &greatest));
  G2Z__CUDA(comm, cudaStreamCreateWithPriority(&nccl->stream, cudaStreamNonBlocking, greatest));
  G2Z__CUDA(comm, cudaMalloc((void **)&nccl->waits, sizeof *nccl->waits));
  G2Z__CUDA(comm, cudaMemset(nccl->waits, 0, sizeof *nccl->waits));
  nccl->write_value = (decltype(&cuStreamWriteValue32))g2z__driver_function("cuStreamWriteValue32");
  if (nccl->write_value && g2z__nccl_tell(nccl) != CUDA_SUCCESS) nccl->write_value = NULL;
  void *first;
  G2Z_TRY(g2z_allocate(comm->services, 1, sizeof(cudaEvent_t), &first));
  nccl->departures = (cudaEvent_t *)first;
  nccl->departure_capacity = 1;
  G2Z__CUDA(comm, cudaEventCreateWithFlags(nccl->departures, cudaEventDisableTiming));
  nccl->departure_count = 1;
  return G2Z_OK;
}

/* NCCL's asynchronous error, such as a link that broke; NULL: none. Only reads a state. */
static const char *g2z__nccl_trouble(void *communicator) {
  ncclResult_t result = ncclSuccess;
  ncclResult_t asked = ncclCommGetAsyncError((ncclComm_t)communicator, &result);
  if (asked != ncclSuccess || result == ncclSuccess || result == ncclInProgress) return NULL;
  return ncclGetErrorString(result);
}

/* Ranks agree before they open the communicator, so that none waits inside NCCL for a rank that
 * failed. */
static g2z_status g2z__cuda_comm_open(g2z_comm *comm, const g2z_comm_config *wanted) {
  struct {
    ncclUniqueId id;
    ncclResult_t result;
  } meeting;
  memset(&meeting, 0, sizeof meeting);
  comm->ops = &g2z__nccl_collectives;
  G2Z_TRY(g2z_ranks_agree(comm->ranks, g2z__nccl_open_alone(comm, wanted)));
  g2z__nccl *nccl = g2z__nccl_of(comm);
  if (comm->rank == 0) meeting.result = ncclGetUniqueId(&meeting.id);
  G2Z_TRY(g2z_ranks_broadcast(comm->ranks, &meeting, sizeof meeting));
  G2Z__NCCL_TRY(comm, meeting.result); /* rank 0's result: if it failed, all ranks fail */
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclResult_t opened =
      ncclCommInitRankConfig(&nccl->comm, comm->world, meeting.id, comm->rank, &config);
  g2z_status status = G2Z_OK;
  if (opened != ncclSuccess) status = g2z__nccl_fail(comm, opened, "ncclCommInitRankConfig");
  G2Z_TRY(g2z_ranks_agree(comm->ranks, status));
  g2z__ranks_progress(comm->ranks, nccl->write_value ? &nccl->signs->progress : NULL,
                      g2z__nccl_trouble, nccl->comm);
  return g2z_ranks_agree(comm->ranks, g2z__nccl_open_buffers(comm, wanted->most));
}

#else

static g2z_status g2z__cuda_comm_open(g2z_comm *comm, const g2z_comm_config *wanted) {
  (void)wanted;
  return g2z_fail(comm->services, G2Z_UNSUPPORTED,
                  "%d ranks need NCCL, and this program was built without <nccl.h>: install NCCL "
                  "and build it again", comm->world);
}

#endif

/* ===== >>k90 table =======================================================
 * In:  g2z_device_create for CUDA. Out: a device whose backend is a g2z__cuda, with the ops of its
 *      types.
 * Law: types are chosen only here. tf32 uses fp32's ops: only products look at the dtype. */

/* Also closes a device whose opening failed halfway. */
static void g2z_cuda_close(g2z_device *device) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  if (!cuda) return;
  if (cuda->stream) cudaStreamSynchronize(cuda->stream);
  g2z__cuda_timers_close(device);
  for (int i = 0; i < cuda->product_count; i++) g2z__lt_free(&cuda->products[i]);
  g2z_release(device->services, cuda->products);
  if (cuda->lt) cublasLtDestroy(cuda->lt);
  cudaFree(cuda->lt_workspace);
  for (int i = 0; i < cuda->scratch_count; i++) cudaFree(cuda->scratch[i]);
  cudaFree(cuda->taken);
  for (int i = 0; i < G2Z__EVENTS; i++)
    if (cuda->events[i]) cudaEventDestroy(cuda->events[i]);
  if (cuda->begin) cudaEventDestroy(cuda->begin);
  if (cuda->end) cudaEventDestroy(cuda->end);
  if (cuda->stream) cudaStreamDestroy(cuda->stream);
  g2z_release(device->services, cuda);
  device->backend = NULL;
}

/* The attributes of this kernel name the architecture of the code that the driver loads. With rooms
 * k41 and k42 a block may have more than 32 threads. */
static __global__ void __launch_bounds__(G2Z__HOPPER_THREADS(64)) g2z_k_probe(void) {}

/* The bytes of the structs that the kernels' object and a program share. */
template <typename... T>
static constexpr size_t g2z__bytes_of = (sizeof(T) + ...);
static constexpr size_t g2z__shared_structs =
    g2z__bytes_of<g2z__cuda, g2z_device, g2z_services, g2z_dropout, g2z_step_state,
                  g2z_optimizer_config, g2z_verdict, g2z_narrow_weight, g2z_matrices,
                  g2z_embed_fwd, g2z_embed_bwd, g2z_embed_add, g2z_embed_next, g2z_attention_next,
                  g2z_layernorm_fwd, g2z_layernorm_bwd, g2z_linear_fwd, g2z_linear_bwd_data,
                  g2z_linear_bwd_weight, g2z_attention_fwd, g2z_attention_bwd, g2z_head_loss,
                  g2z_draw>;

/* With G2Z_KERNELS this function is compiled for each pair of types in one object, which several
 * programs share. All kernels that g2z__launch starts are in that object, as only this function
 * leads to them; the probe tells for which architecture they were built. STRUCTS is part of the
 * symbol: a program does not link with kernels whose structs have other sizes. */
#if defined(G2Z_KERNELS)
#define G2Z__FILL
#else
#define G2Z__FILL static
#endif

template <typename A, typename G, size_t STRUCTS = g2z__shared_structs>
G2Z__FILL void g2z__cuda_fill(g2z__cuda *cuda) {
  g2z_ops *ops = &cuda->ops;
  cuda->probe = (const void *)g2z_k_probe;
  cuda->product_kernel_for = g2z__product_kernel_for<A>;
#if defined(G2Z__NCCL)
  cuda->meet = g2z_k_meet;
#endif
  ops->allocate = g2z_cuda_allocate;
  ops->release = g2z_cuda_release;
  ops->allocate_host = g2z_cuda_allocate_host;
  ops->release_host = g2z_cuda_release_host;
  ops->upload = g2z_cuda_upload;
  ops->download = g2z_cuda_download;
  ops->zero = g2z_cuda_zero;
  ops->mark = g2z_cuda_mark;
  ops->wait = g2z_cuda_wait;
  ops->synchronize = g2z_cuda_synchronize;
  ops->close = g2z_cuda_close;
  ops->graph_begin = g2z_cuda_graph_begin;
  ops->graph_end = g2z_cuda_graph_end;
  ops->graph_run = g2z_cuda_graph_run;
  ops->graph_free = g2z_cuda_graph_free;
  ops->span_begin = g2z_cuda_span_begin;
  ops->span_end = g2z_cuda_span_end;
  ops->timers_open = g2z_cuda_timers_open;
  ops->timers_settle = g2z_cuda_timers_settle;
  ops->tuning = g2z_cuda_tuning;
  ops->tuning_read = g2z_cuda_tuning_read;
  ops->embed_fwd = g2z_cuda_embed_fwd<A>;
  ops->embed_bwd = g2z_cuda_embed_bwd<A, G>;
  ops->embed_next = g2z_cuda_embed_next<A>;
  ops->attention_next = g2z_cuda_attention_next<A>;
  ops->embed_order = g2z_cuda_embed_order;
  ops->embed_add = g2z_cuda_embed_add<A, G>;
  ops->layernorm_fwd = g2z_cuda_layernorm_fwd<A>;
  ops->layernorm_bwd = g2z_cuda_layernorm_bwd<A, G>;
  ops->linear_fwd = g2z_cuda_linear_fwd<A>;
  ops->linear_bwd_data = g2z_cuda_linear_bwd_data<A, G>;
  ops->linear_bwd_weight = g2z_cuda_linear_bwd_weight<A, G>;
  ops->narrow_weights = g2z_cuda_narrow_weights<A>;
  ops->attention_fwd = g2z_cuda_attention_fwd<A>;
  ops->attention_bwd = g2z_cuda_attention_bwd<A, G>;
  ops->head_loss = g2z_cuda_head_loss<A, G>;
  ops->head_logits = g2z_cuda_head_logits<A>;
  ops->draw = g2z_cuda_draw;
  ops->cast_act = g2z_cuda_cast<A>;
  ops->cast_grad = g2z_cuda_cast<G>;
  ops->grad_add = g2z_cuda_grad_add<G>;
  ops->grad_sumsq = g2z_cuda_grad_sumsq<G>;
  ops->decide = g2z_cuda_decide;
  ops->adamw = g2z_cuda_adamw<A, G>;
  ops->momentum = g2z_cuda_momentum<G>;
  ops->orthogonalize = g2z_cuda_orthogonalize;
  ops->muon = g2z_cuda_muon<A>;
}

#if defined(G2Z_KERNELS)
G2Z_KERNELS template void g2z__cuda_fill<float, float>(g2z__cuda *cuda);
G2Z_KERNELS template void g2z__cuda_fill<__half, float>(g2z__cuda *cuda);
G2Z_KERNELS template void g2z__cuda_fill<__half, __half>(g2z__cuda *cuda);
G2Z_KERNELS template void g2z__cuda_fill<__nv_bfloat16, float>(g2z__cuda *cuda);
G2Z_KERNELS template void g2z__cuda_fill<__nv_bfloat16, __nv_bfloat16>(g2z__cuda *cuda);
#endif

static g2z_status g2z__cuda_open_gpu(g2z_device *device) {
  g2z__cuda *cuda = g2z__cuda_of(device);
  g2z_device_info *info = &device->info;
  cudaDeviceProp properties;
  cudaFuncAttributes attributes;
  int driver = 0, runtime = 0, khz = 0;
  size_t free_bytes = 0, total_bytes = 0;
  const size_t lt = cublasLtGetVersion();
  void *memory;
  G2Z__CUDA(device, cudaGetDeviceProperties(&properties, cuda->ordinal));
  cuda->sms = properties.multiProcessorCount;
  cuda->capability = properties.major * 10 + properties.minor;
  info->bf16 = cuda->capability >= 80;
  cuda->shared_limit = (int)properties.sharedMemPerBlockOptin;
  snprintf(cuda->gpu, sizeof cuda->gpu, "%s", properties.name);
  int known = cudaFuncGetAttributes(&attributes, cuda->probe) == cudaSuccess;
  (void)cudaGetLastError();
  cuda->built_for = known ? attributes.ptxVersion : 0;
  const char *features = cuda->capability == 90 ? "a" : ""; /* of -arch=sm_90a */
  if (!cuda->built_for)
    return g2z_fail(device->services, G2Z_UNSUPPORTED,
                    "this program has no code for %s (sm_%d): build with nvcc -arch=sm_%d%s, or "
                    "make", cuda->gpu, cuda->capability, cuda->capability, features);
  /* Rooms k41 and k42 have bodies only in a build for sm_90a. */
  cuda->hopper = cuda->capability == 90 && attributes.maxThreadsPerBlock > 32;
  cuda->slice_bytes = G2Z__SLICE_BYTES;
  /* Code for sm_80 would run on a newer GPU, but converts to 8 bits without an instruction.
   * cuBLASLt 12.1.3 is the first with products in 8 bits for Ada. */
  if (cuda->capability >= 89 && cuda->built_for >= 89 && lt >= 120103)
    info->fp8 = G2Z__FP8_MULTIPLE;
  if (cuda->hopper) info->fp8 = 1;
  /* Graphs support programmatic launches since CUDA 12.3. */
  G2Z__CUDA(device, cudaDriverGetVersion(&driver));
  cuda->early_launch = cuda->capability >= 90 && cuda->built_for >= 90 && driver >= 12030 &&
                       CUDART_VERSION >= 12030;
  /* Not the default stream, which waits for other streams and cannot be captured. */
  G2Z__CUDA(device, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking));
  G2Z__CUDA(device, cudaMalloc((void **)&cuda->taken, sizeof *cuda->taken));
  G2Z__CUDA(device, cudaMemsetAsync(cuda->taken, 0, sizeof *cuda->taken, cuda->stream));
  for (int i = 0; i < G2Z__EVENTS; i++)
    G2Z__CUDA(device, cudaEventCreateWithFlags(&cuda->events[i], cudaEventDisableTiming));
  G2Z__CUDA(device, cudaEventCreate(&cuda->begin));
  G2Z__CUDA(device, cudaEventCreate(&cuda->end));
  /* cuBLASLt and the tuning table */
  G2Z_TRY(g2z_allocate(device->services, G2Z__PRODUCTS, sizeof(g2z__lt_product), &memory));
  cuda->products = (g2z__lt_product *)memory;
  cublasStatus_t started = cublasLtCreate(&cuda->lt);
  if (started != CUBLAS_STATUS_SUCCESS)
    return g2z_fail(device->services, G2Z_DEVICE,
                    "cuBLASLt %zu does not start: %s; check that it fits the driver", lt,
                    cublasLtGetStatusString(started));
  G2Z__CUDA(device, cudaMalloc(&cuda->lt_workspace, G2Z__PRODUCT_WORKSPACE));
  /* The device's description */
  cudaRuntimeGetVersion(&runtime);
  snprintf(info->name, sizeof info->name, "%.127s", cuda->gpu);
  snprintf(info->runtime, sizeof info->runtime, "%d.%d", runtime / 1000, runtime % 1000 / 10);
  if (cudaGetDeviceCount(&info->count) != cudaSuccess) info->count = 0;
  /* From sm_75 to sm_100, a multiprocessor computes 16 exponentials per clock. */
  if (cuda->capability <= 100 &&
      cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, cuda->ordinal) == cudaSuccess)
    info->exponentials_per_s = 16.0 * cuda->sms * khz * 1e3;
#if defined(G2Z__NCCL)
  int nccl = 0;
  if (ncclGetVersion(&nccl) == ncclSuccess)
    snprintf(info->collectives, sizeof info->collectives, "%d.%d.%d", nccl / 10000,
             nccl / 100 % 100, nccl % 100);
#endif
  /* Log the GPU, the versions and the types in one line. */
  cudaMemGetInfo(&free_bytes, &total_bytes);
  g2z_log(device->services, G2Z_LOG_INFO,
          "%s: sm_%d, built for sm_%d; %d SMs, %.1f of %.1f GiB free; CUDA %d.%d, driver for "
          "%d.%d, cuBLASLt %zu.%zu.%zu, NCCL %s; %s, gradients %s", cuda->gpu, cuda->capability,
          cuda->built_for, cuda->sms, (double)free_bytes / 1073741824.0,
          (double)total_bytes / 1073741824.0, runtime / 1000, runtime % 1000 / 10, driver / 1000,
          driver % 1000 / 10, lt / 10000, lt / 100 % 100, lt % 100,
          info->collectives[0] ? info->collectives : "none", g2z_dtype_text(device->dtype),
          g2z_dtype_text(device->grad_dtype));
  if (cuda->built_for < cuda->capability || (features[0] && !cuda->hopper))
    g2z_log(device->services, G2Z_LOG_WARNING,
            "this program was built for sm_%d and runs on sm_%d: build with nvcc -arch=sm_%d%s, "
            "or make, for full speed", cuda->built_for, cuda->capability, cuda->capability,
            features);
  return G2Z_OK;
}

/* Opens the current GPU for a device whose services, dtype and grad_dtype are set. */
static g2z_status g2z__cuda_open(g2z_device *device) {
  void *memory;
  G2Z_TRY(g2z_device_find_gpu(device->services));
  G2Z_TRY(g2z_allocate(device->services, 1, sizeof(g2z__cuda), &memory));
  g2z__cuda *cuda = (g2z__cuda *)memory;
  cuda->ordinal = g2z__cuda_current();
  device->backend = cuda;
  const int wide = device->grad_dtype == G2Z_FP32;
  auto fill = g2z__cuda_fill<float, float>;
  if (device->dtype == G2Z_FP16)
    fill = wide ? g2z__cuda_fill<__half, float> : g2z__cuda_fill<__half, __half>;
  if (device->dtype == G2Z_BF16)
    fill = wide ? g2z__cuda_fill<__nv_bfloat16, float>
                : g2z__cuda_fill<__nv_bfloat16, __nv_bfloat16>;
  fill(cuda);
  g2z_status status = g2z__cuda_open_gpu(device);
  if (status == G2Z_OK) device->ops = &cuda->ops;
  else g2z_cuda_close(device);
  return status;
}

#endif /* G2Z_KERNELS_INCLUDED */
