// A store past the end of an allocation, for memcheck.
#include "planted.h"

__global__ void store(int* out, int count) { out[threadIdx.x + count] = 1; }

int main(int arguments, char**) {
  int* out;
  cudaMalloc(&out, kThreads * sizeof(int));
  store<<<1, kThreads>>>(out, arguments > 1 ? 1 : 0);  // the last thread, by one
  return finish();
}
