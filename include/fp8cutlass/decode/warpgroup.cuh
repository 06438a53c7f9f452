// Single instructions of warpgroups, each four warps that multiply together, and of what they get keys by. Host tests
// replace this file by one that does the same on the CPU.
#pragma once

#include "fp8cutlass/decode/rows.h"
#include "fp8cutlass/numeric.cuh"
#include "fp8cutlass/sm90/barrier.cuh"
#include "fp8cutlass/sm90/wgmma.cuh"

namespace fp8cutlass::decode {

using sm90::arrive;
using sm90::Barrier;
using sm90::give_registers;
using sm90::init;
using sm90::take_registers;
using sm90::wait;

// What this thread wrote to shared memory is there for products that are begun after the next barrier.
__device__ __forceinline__ void fence_products() { sm90::fence_async(); }

// The warps of this thread's warpgroup, the first or the second, meet. The number in a register reserves all 16
// barriers, which a kernel of one CTA an SM has.
__device__ __forceinline__ void meet_warpgroup() {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + threadIdx.x / 128) : "memory");
}

// Products that follow use registers as they are now.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int kBlocks>
__device__ __forceinline__ void begin_products(float (&sums)[kBlocks][4]) {
  sm90::fence(sums);
  begin_products();
}
// They are all asked for, and run on.
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until none runs. Registers that they read or write must not be touched before.
template <int kBlocks>
__device__ __forceinline__ void await_products(float (&x)[kBlocks][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  sm90::fence(x);
}

// The matrix descriptor of a panel, so many bytes behind its begin: swizzled in 128 bytes, 8 rows from pattern to
// pattern.
__device__ __forceinline__ uint64_t descriptor(const uint8_t* panel, int bytes) {
  return uint64_t(8 * kPanelPitch / 16 | 1u << 30) << 32 | ((shared_address(panel) >> 4 | 1u << 16) + bytes / 16);
}

// d = a b^T or d += a b^T, 64 rows of Q x 64 keys, both panels: `step` says which 16 columns of them.
__device__ __forceinline__ void multiply_by_keys(float (&d)[8][4], const uint8_t* a, const uint8_t* b, int step,
                                                 bool first) {
  using Atom = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
  sm90::multiply<Atom>(&d[0][0], first, descriptor(a, 32 * step), descriptor(b, 32 * step));
}

// d += a b, 64 rows of P x 64 columns of V from block `block` of d on: `a` is this lane's part of 16 keys of P, `step`
// says which 16 rows of the panel.
template <int kBlocks>
__device__ __forceinline__ void multiply_by_values(float (&d)[kBlocks][4], int block, const uint32_t (&a)[4],
                                                   const uint8_t* panel, int step) {
  using Atom = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;
  sm90::multiply<Atom>(&d[block][0], false, a[0], a[1], a[2], a[3], descriptor(panel, 16 * kPanelPitch * step));
}

}  // namespace fp8cutlass::decode
