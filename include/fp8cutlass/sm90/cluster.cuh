// CTAs of a cluster, which wait for each other and read each other's shared memory.
#pragma once

#include <cstdint>

#include "fp8cutlass/delay.cuh"
#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::sm90 {

// Every thread of the cluster that has not left; stores before it are visible after it. (CuTe's has no memory clobber.)
__device__ __forceinline__ void cluster_sync() {
  delay_point(10);
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where another CTA's `here` is, as instructions on the cluster's shared memory name it.
template <class T>
__device__ __forceinline__ uint32_t address_in(const T& here, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(&here)), "r"(rank));
  return there;
}

__device__ __forceinline__ float4 load_from(const float4& here, int rank) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address_in(here, rank))
               : "memory");
  return x;
}

__device__ __forceinline__ uint32_t load_from(const uint32_t& here, int rank) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address_in(here, rank)) : "memory");
  return x;
}

// The largest of the CTAs' numbers, `bits` being the same in all threads of one. Every thread of the cluster comes
// here, once.
template <int kCtas>
__device__ __forceinline__ uint32_t cluster_max(uint32_t bits, uint32_t& own) {
  if (threadIdx.x == 0) own = bits;
  cluster_sync();
#pragma unroll
  for (int rank = 0; rank < kCtas; ++rank) bits = max(bits, load_from(own, rank));
  cluster_sync();  // nobody leaves while others read its memory
  return bits;
}

}  // namespace fp8cutlass::sm90
