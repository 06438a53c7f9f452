// The kernel that chooses sequences with many queries and the one that copies their keys, as functions of the host
// (tests/host/device). Compiled with KERNEL, the name of the latter, KERNEL_FILE and ROUTE_FILE, their sources.
#include "cuda_runtime.h"
#include "fp8cutlass/prefill/params.h"

static unsigned grid = 0;
#define gridDim (device::Index{grid})
#define __ldg(pointer) (*(pointer))

// Of other kernels of the same headers; nothing here calls them.
int __float_as_int(float);
uint32_t __reduce_max_sync(unsigned, uint32_t);

namespace fp8cutlass {
alignas(128) uint8_t memory[1024];
alignas(128) uint8_t stage[64 * 1024];
}  // namespace fp8cutlass

#include KERNEL_FILE
#include ROUTE_FILE

using namespace fp8cutlass;

extern "C" int route_bytes() { return int(sizeof(prefill::RouteParams)); }
extern "C" int gather_bytes() { return int(sizeof(prefill::GatherParams)); }

// What went wrong, or null.
extern "C" const char* run_route(const prefill::RouteParams* p, int seed) {
  device::Cta cta;
  cta.random.seed(unsigned(seed));
  std::memset(memory, 0xff, sizeof(memory));
  return device::run(cta, prefill::kRouteThreads, [&] { route(*p); });
}

// Runs `ctas` CTAs in a random order; what went wrong, or null.
extern "C" const char* run_gather(const prefill::GatherParams* p, int ctas, int seed) {
  grid = unsigned(ctas);
  device::Cta cta;
  cta.random.seed(unsigned(seed));
  std::vector<unsigned> order(grid);
  for (unsigned i = 0; i < grid; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), cta.random);
  for (const unsigned block : order) {
    cta.block = block;
    std::memset(stage, 0xff, sizeof(stage));
    if (device::run(cta, kThreads, [&] { KERNEL(*p); }) != nullptr) return cta.failure;
  }
  return nullptr;
}
