// Shared memory read by another warp than the one that wrote it, without a barrier, for racecheck.
#include "planted.h"

template <bool kBroken>
__global__ void reverse(int* out) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = threadIdx.x;
  if (!kBroken) __syncthreads();
  out[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

int main(int arguments, char**) {
  int* out;
  cudaMalloc(&out, kThreads * sizeof(int));
  if (arguments > 1) {
    reverse<true><<<1, kThreads>>>(out);
  } else {
    reverse<false><<<1, kThreads>>>(out);
  }
  return finish();
}
