// How the CTAs of a persistent grid come to their work items, and how they wait for K and V that are handed over.
#pragma once

#include "fp8cutlass/params.h"

namespace fp8cutlass::sm90 {

// The number of a warp's first lane, in all its lanes; of a shuffle the compiler knows that.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Items are drawn from the launch's counter, so that whoever is done first takes the next; every gridDim.x-th is taken
// where the launch has none. Lane 0 of a warp draws; nothing is done with the word until next_item, as the first that
// is done with it waits for memory.
__device__ __forceinline__ unsigned draw_item(const ForwardParams& p, int lane) {
  return p.counters != nullptr && lane == 0 ? atomicAdd(p.counters, 1u) : 0;
}

// The number of the item after `number`, of what draw_item returned. All lanes come here.
__device__ __forceinline__ int next_item(const ForwardParams& p, int number, unsigned drawn) {
  if (p.counters == nullptr) return number + int(gridDim.x);
  const unsigned dealt = p.ready == nullptr ? gridDim.x : 0;
  return int(__shfl_sync(~0u, drawn, 0) + dealt);
}

// The last CTA to leave puts the counters back to zero.
__device__ __forceinline__ void leave_counters(const ForwardParams& p) {
  if (p.counters == nullptr) return;
  __threadfence();  // this CTA's draws come before its leave
  if (atomicAdd(p.counters + 1, 1u) != gridDim.x - 1) return;
  p.counters[0] = p.counters[1] = 0;
}

// ---- where the kernel before hands over its heads while this one runs -----------------------------------------------

// The number of a CTA's first item, for one thread to ask. CTAs begin when they find room, some of them late, and
// perhaps when nothing is left: so that one is drawn, too.
__device__ __forceinline__ int first_item(const ForwardParams& p) {
  return p.ready == nullptr ? int(blockIdx.x) : int(atomicAdd(p.counters, 1u));
}

// Whether K and V of a head are there for this thread and for its copies.
__device__ __forceinline__ bool has_head(const ForwardParams& p, int kv_head) {
  unsigned done;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(p.ready + kv_head) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return done >= unsigned(p.ready_blocks);
}

__device__ __forceinline__ void wait_for_head(const ForwardParams& p, int kv_head) {
  while (!has_head(p, kv_head)) {
  }
}

// leave_counters for a warp, and for the counters of the kernel before, which has ended.
__device__ __forceinline__ void leave_handover(const ForwardParams& p, int lane) {
  unsigned left = 0;
  __threadfence();
  if (lane == 0) left = atomicAdd(p.counters + 1, 1u);
  if (__shfl_sync(~0u, left, 0) != gridDim.x - 1) return;
  __threadfence();
  if (lane < kCounters) p.counters[lane] = 0;
  for (int head = lane; head < p.batch * p.kv_heads; head += 32) p.ready[head] = 0;
}

}  // namespace fp8cutlass::sm90
