// Global memory that is read before anything is written to it, for initcheck.
#include "planted.h"

__global__ void copy(int* out, const int* in) { out[threadIdx.x] = in[threadIdx.x]; }

int main(int arguments, char**) {
  int *in, *out;
  cudaMalloc(&in, kThreads * sizeof(int));
  cudaMalloc(&out, kThreads * sizeof(int));
  if (arguments == 1) cudaMemset(in, 0, kThreads * sizeof(int));
  copy<<<1, kThreads>>>(out, in);
  return finish();
}
