// Host side of a launch: opt in to large shared memory, size the persistent grid, report the status of every call.
#pragma once

#include <cuda_runtime.h>

#include "fp8cutlass/driver.h"
#include "fp8cutlass/params.h"
#include "fp8cutlass/schedule.h"

namespace fp8cutlass {

struct LaunchShape {
  int tile_m, threads, ctas_per_sm, smem_bytes;
};

inline int launch_persistent(void (*kernel)(ForwardParams, int), const LaunchShape& shape, ForwardParams params,
                             CUstream_st* stream) {
  const int64_t items = work_items(params, shape.tile_m);
  if (items == 0) return cudaSuccess;
  const int64_t resident = int64_t(params.sm_count) * shape.ctas_per_sm;
  // Item numbers, and the rows and keys of a tile past the end, are 32-bit in the kernel.
  constexpr int kTilePastEnd = 256;
  if (items + resident > INT32_MAX || params.seqlen_q > INT32_MAX - kTilePastEnd ||
      params.seqlen_k > INT32_MAX - kTilePastEnd)
    return cudaErrorInvalidValue;
  if (shape.smem_bytes > 48 * 1024) {
    const cudaError_t status = opt_in(reinterpret_cast<const void*>(kernel), shape.smem_bytes, context_id());
    if (status != cudaSuccess) return status;
  }
  const unsigned grid = unsigned(items < resident ? items : resident);
  int count = int(items);
  void* arguments[] = {&params, &count};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid), dim3(shape.threads), arguments,
                          shape.smem_bytes, stream);
}

}  // namespace fp8cutlass
