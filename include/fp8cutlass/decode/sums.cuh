// Sums over the threads of a CTA.
#pragma once

#include "fp8cutlass/decode/instructions.cuh"

namespace fp8cutlass::decode {

// The sum of `x` over the threads before this one; `total` is that of all. `sums` is shared memory, a word a warp,
// which no thread reads any more. Every thread of the CTA comes here.
template <int kThreads>
__device__ __forceinline__ int64_t sum_before(int64_t x, int64_t* sums, int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int64_t before = 0;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  __syncthreads();
  return before + sum - x;
}

}  // namespace fp8cutlass::decode
