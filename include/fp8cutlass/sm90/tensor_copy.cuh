// The copy engine: boxes of tensors that a tensor map describes, and plain bytes. One lane calls each of these.
// (CuTe's header of them takes 0.5 s to compile, a third of a kernel.) Operands are converted in CuTe's order: in
// another one the assembler would allot other registers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::sm90 {

// How long the L2 cache keeps what is read: createpolicy's words for a whole access.
constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12F0000000000000;

// One lane of the warp gets 1. All lanes come here.
__device__ __forceinline__ uint32_t elect_one_sync() {
  uint32_t elected = 0, lane = 0;
  asm volatile(
      "{\n.reg .b32 first;\n.reg .pred is_first;\n"
      "elect.sync first|is_first, %2;\n"
      "@is_first mov.s32 %1, 1;\n"
      "mov.s32 %0, first;\n}"
      : "+r"(lane), "+r"(elected)
      : "r"(0xFFFFFFFF));
  return elected;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// The box at these coordinates, innermost first, to shared memory; `barrier` counts its bytes.
struct BoxCopy {
  static __device__ __forceinline__ void copy(const CUtensorMap* map, uint64_t* barrier, uint64_t keep, void* to, int x,
                                              int y, int z) {
    const uint64_t place = reinterpret_cast<uint64_t>(map);
    const uint32_t counter = shared_address(barrier), there = shared_address(to);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(there),
        "l"(place), "r"(counter), "r"(x), "r"(y), "r"(z), "l"(keep)
        : "memory");
  }
  static __device__ __forceinline__ void copy(const CUtensorMap* map, uint64_t* barrier, uint64_t keep, void* to, int x,
                                              int y, int z, int w) {
    const uint64_t place = reinterpret_cast<uint64_t>(map);
    const uint32_t counter = shared_address(barrier), there = shared_address(to);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(there),
        "l"(place), "r"(counter), "r"(x), "r"(y), "r"(z), "r"(w), "l"(keep)
        : "memory");
  }
};

// `bytes` neighbouring bytes, a multiple of 16, to shared memory; `barrier` counts them.
__device__ __forceinline__ void copy_bytes(const void* from, uint64_t* barrier, void* to, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// A box of shared memory to global memory, behind the stores of this lane before it.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
// The stores since the last call are a group; then waits until the engine has read what they store.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;"); }
__device__ __forceinline__ void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace fp8cutlass::sm90
