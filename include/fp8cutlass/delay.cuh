// Random waits at the places where threads hand memory to one another, for tests: a build with -DFP8CUTLASS_DELAY=1 has
// them, any other has nothing here. A missing barrier that timing hides then shows.
#pragma once

#include <cstdint>

namespace fp8cutlass {

#ifdef FP8CUTLASS_DELAY
// Of four passes three go on at once, the fourth sleeps up to 2 us, and of 64 one up to 16. All lanes of a warp draw
// the same from its clock, its multiprocessor and `site`, which tells the places of a kernel apart: what has to be
// executed by a whole warp still is.
__device__ __forceinline__ void delay_point(uint32_t site) {
  uint32_t clock, sm, warp;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(warp));
  uint32_t x = (clock ^ (sm << 20) ^ (warp / 32 << 12) ^ (site << 27)) * 0x9e3779b9u;
  x = (x ^ (x >> 15)) * 0x85ebca6bu;
  x ^= x >> 13;
  const uint32_t limit = x % 4 != 0 ? 0 : x % 64 != 0 ? 1u << 10 : 1u << 13;  // the instruction may double it
  asm volatile("nanosleep.u32 %0;" ::"r"(limit == 0 ? 0 : (x >> 8) & (limit - 1)));
}
#else
__device__ __forceinline__ void delay_point(uint32_t) {}
#endif

}  // namespace fp8cutlass
