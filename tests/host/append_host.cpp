// The kernel that appends to a paged cache, as a function of the host (tests/host/device). Compiled with KERNEL_FILE,
// its source.
#include <cstddef>

#include "cuda_runtime.h"
#include "fp8cutlass/append/params.h"

namespace fp8cutlass {
alignas(128) uint8_t memory[64 * 1024];
}

#include KERNEL_FILE

using namespace fp8cutlass;

extern "C" size_t params_bytes() { return sizeof(appending::AppendParams); }

// Runs the CTAs of a launch in an order that `seed` chooses; what went wrong, or null.
extern "C" const char* run(const appending::AppendParams* params, int ctas, unsigned seed) {
  device::Cta cta;
  cta.random.seed(seed);
  std::vector<unsigned> order(ctas);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  if (seed != 0) std::shuffle(order.begin(), order.end(), cta.random);
  for (const unsigned block : order) {
    cta.block = block;
    std::memset(memory, 0xff, sizeof(memory));
    if (device::run(cta, appending::kAppendThreads, [&] { append(*params); }) != nullptr) return cta.failure;
  }
  return nullptr;
}
