/* A library that replaces cuBLASLt under compute-sanitizer: one plain kernel for the calls that the
 * kit makes. racecheck aborts in cuBLASLt's kernels; with this library it reaches the kit's.
 *
 *     make sanitize-cuda
 *
 * D = alpha op(A) op(B) + beta C, column-major, plus a bias if requested. It is slow, offers one
 * algorithm, and refuses everything that the kit does not use. */
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdlib.h>
#include <string.h>

struct description {
  bool transpose_a, transpose_b;
  int epilogue;                /* cublasLtEpilogue_t */
  const void *bias;            /* [m], of D's type */
  const float *scale;          /* another alpha, on the GPU; or NULL */
};

struct layout {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t ld;
  int count;                   /* matrices of a batch */
  int64_t stride;              /* elements from one to the next */
};

struct matrix {
  void *data;
  cudaDataType type;
  int64_t ld, stride;
};

static __device__ float load(matrix of, int64_t at) {
  at += blockIdx.y * of.stride;
  if (of.type == CUDA_R_16F) return __half2float(((const __half *)of.data)[at]);
  if (of.type == CUDA_R_16BF) return __bfloat162float(((const __nv_bfloat16 *)of.data)[at]);
  if (of.type == CUDA_R_8F_E4M3) return float(((const __nv_fp8_e4m3 *)of.data)[at]);
  if (of.type == CUDA_R_8F_E5M2) return float(((const __nv_fp8_e5m2 *)of.data)[at]);
  return ((const float *)of.data)[at];
}

static __device__ void store(matrix of, int64_t at, float value) {
  at += blockIdx.y * of.stride;
  if (of.type == CUDA_R_16F) ((__half *)of.data)[at] = __float2half(value);
  else if (of.type == CUDA_R_16BF) ((__nv_bfloat16 *)of.data)[at] = __float2bfloat16(value);
  else ((float *)of.data)[at] = value;
}

/* One thread per element; blockIdx.y is the matrix of a batch. Kahan summation: plain long sums would
 * exceed the tests' bounds. */
__global__ void plain_product(description how, int64_t m, int64_t n, int64_t k, float alpha,
                              matrix a, matrix b, float beta, matrix c, matrix d) {
  int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < m * n; at += step) {
    int64_t row = at % m, column = at / m;
    float sum = 0, lost = 0;
    for (int64_t i = 0; i < k; i++) {
      float term = load(a, how.transpose_a ? row * a.ld + i : i * a.ld + row) *
                   load(b, how.transpose_b ? i * b.ld + column : column * b.ld + i);
      float more = term - lost, total = sum + more;
      lost = (total - sum) - more;
      sum = total;
    }
    sum *= how.scale ? alpha * *how.scale : alpha;
    if (beta != 0) sum += beta * load(c, column * c.ld + row);
    if (how.epilogue == CUBLASLT_EPILOGUE_BIAS) sum += load({(void *)how.bias, d.type, 0, 0}, row);
    store(d, column * d.ld + row, sum);
  }
}

static matrix matrix_of(const void *data, cublasLtMatrixLayout_t handle) {
  const layout *is = (const layout *)handle;
  return {(void *)data, is->type, is->ld, is->stride};
}

template <typename T, typename H>
static cublasStatus_t create(H *handle, const T &value) {
  T *made = (T *)malloc(sizeof *made);
  *handle = (H)made;
  if (!made) return CUBLAS_STATUS_ALLOC_FAILED;
  *made = value;
  return CUBLAS_STATUS_SUCCESS;
}

template <typename H>
static cublasStatus_t destroy(H handle) {
  free((void *)handle);
  return CUBLAS_STATUS_SUCCESS;
}

extern "C" {

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char *cublasLtGetStatusString(cublasStatus_t) { return "refused by plain_cublaslt.cu"; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return create(handle, 0); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *handle, cublasComputeType_t,
                                        cudaDataType_t) {
  return create(handle, description());
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) { return destroy(handle); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t) {
  description *how = (description *)handle;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      how->transpose_a = *(const int *)value == CUBLAS_OP_T;
      break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
      how->transpose_b = *(const int *)value == CUBLAS_OP_T;
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      how->epilogue = *(const int *)value;
      break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      how->bias = *(const void *const *)value;
      break;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      how->scale = *(const float *const *)value;
      break;
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *handle, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld) {
  return create(handle, layout{type, rows, columns, ld, 1, 0});
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t) {
  layout *of = (layout *)handle;
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      of->count = *(const int *)value;
      break;
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      of->stride = *(const int64_t *)value;
      break;
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) {
  return destroy(handle);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *handle) {
  return create(handle, 0);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
  return destroy(handle);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *count) {
  memset(results, 0, sizeof *results);
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t *,
                                       cublasLtMatmulHeuristicResult_t *result) {
  memset(result, 0, sizeof *result);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t handle, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t layout_a, const void *b,
                              cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
                              cublasLtMatrixLayout_t layout_c, void *d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t *, void *,
                              size_t, cudaStream_t stream) {
  const description *how = (const description *)handle;
  const layout *of_a = (const layout *)layout_a, *of_d = (const layout *)layout_d;
  if (how->epilogue != CUBLASLT_EPILOGUE_DEFAULT && how->epilogue != CUBLASLT_EPILOGUE_BIAS)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  int64_t m = (int64_t)of_d->rows, n = (int64_t)of_d->columns, blocks = (m * n + 255) / 256;
  int64_t k = (int64_t)(how->transpose_a ? of_a->rows : of_a->columns);
  dim3 grid((unsigned)(blocks < 65535 ? blocks : 65535), (unsigned)of_d->count);
  plain_product<<<grid, 256, 0, stream>>>(
      *how, m, n, k, *(const float *)alpha, matrix_of(a, layout_a), matrix_of(b, layout_b),
      *(const float *)beta, matrix_of(c, layout_c), matrix_of(d, layout_d));
  if (cudaGetLastError() != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  return CUBLAS_STATUS_SUCCESS;
}

} /* extern "C" */
