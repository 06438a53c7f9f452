// The kernel that plans a ragged batch, as a function of the host (tests/host/device). Compiled where plan.cuh is
// without its instructions of the device.
#include "cuda_runtime.h"

// Of the one CTA that there is.
#undef __shared__
#define __shared__ static

inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) {
  const unsigned long long old = *p;
  *p += x;
  return old;
}

#include "fp8cutlass/walk/plan.cuh"

using namespace fp8cutlass;

extern "C" int params_bytes() { return int(sizeof(planning::PlanParams)); }

// What went wrong, or null.
extern "C" const char* run(const planning::PlanParams* p, int seed) {
  device::Cta cta;
  cta.random.seed(unsigned(seed));
  return device::run(cta, planning::kThreads, [&] { planning::plan(*p); });
}
