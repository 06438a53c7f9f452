// The kernel that merges partial results, as a function of the host (tests/host/device). Compiled with KERNEL_FILE, its
// source.
#include <cstddef>

#include "cuda_runtime.h"
#include "fp8cutlass/merge/params.h"

#include KERNEL_FILE

using namespace fp8cutlass;

extern "C" size_t params_bytes() { return sizeof(merging::MergeParams); }

// Runs the CTAs of a launch; what went wrong, or null.
extern "C" const char* run(const merging::MergeParams* params, int ctas, unsigned seed) {
  device::Cta cta;
  cta.random.seed(seed);
  for (int block = 0; block < ctas; ++block) {
    cta.block = block;
    if (device::run(cta, merging::kMergeThreads, [&] { merge(*params); }) != nullptr) return cta.failure;
  }
  return nullptr;
}
