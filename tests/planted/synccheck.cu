// A barrier that half of a warp does not reach, for synccheck.
#include "planted.h"

__global__ void meet(int* out, int reaching) {
  if (int(threadIdx.x) % 32 < reaching) __syncthreads();
  out[threadIdx.x] = 1;
}

int main(int arguments, char**) {
  int* out;
  cudaMalloc(&out, kThreads * sizeof(int));
  meet<<<1, kThreads>>>(out, arguments > 1 ? 16 : 32);
  return finish();
}
