// Where a pipeline stands, and synchronisation that C++ has no name for: mbarriers (with memory clobbers, which CuTe's
// wrappers lack), named barriers of two warpgroups, and registers moved between warpgroups.
#pragma once

#include <cstdint>

#include "fp8cutlass/delay.cuh"
#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::sm90 {

using Barrier = uint64_t;

// One of a ring of kSlots slots, and the parity of the barrier phase that fills it.
template <int kSlots>
struct Stage {
  int slot = 0, parity = 0;
  __device__ __forceinline__ Stage next() const {
    return slot + 1 == kSlots ? Stage{0, parity ^ 1} : Stage{slot + 1, parity};
  }
  __device__ __forceinline__ int ring() const { return slot + kSlots * parity; }  // where twice as many are kept
};

__device__ __forceinline__ void init(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Makes ordinary stores to shared memory visible to wgmma and the copy engine.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wait(Barrier& barrier, int parity) {
  delay_point(1);
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// Whether the phase is over, without waiting for it.
__device__ __forceinline__ bool poll(Barrier& barrier, int parity) {
  int done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done;
}

// No jump where it is over.
__device__ __forceinline__ void wait_unless(bool over, Barrier& barrier, int parity) {
  delay_point(2);
  asm volatile(
      "{\n.reg .pred done;\n"
      "setp.ne.s32 done, %2, 0;\n"
      "again: @!done mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
      "r"(parity), "r"(int(over))
      : "memory");
}

__device__ __forceinline__ void arrive(Barrier& barrier) {
  delay_point(3);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// The same where `says` holds; no branch, which would cost the compiler its uniform registers.
__device__ __forceinline__ void arrive_if(Barrier& barrier, bool says) {
  delay_point(4);
  asm volatile(
      "{\n.reg .pred says;\n"
      "setp.ne.s32 says, %1, 0;\n"
      "@says mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(&barrier)),
      "r"(int(says))
      : "memory");
}

// Holds the barrier until the copy engine has written `bytes`.
__device__ __forceinline__ void expect(Barrier& barrier, int bytes) {
  delay_point(5);
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Arrives, and holds the barrier until the copy engine has written `bytes`.
__device__ __forceinline__ void arrive_expect(Barrier& barrier, int bytes) {
  delay_point(6);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Named barriers of two warpgroups, 1 and 2: one waits for its turn, the other passes it on. Barrier 0 is
// __syncthreads.
__device__ __forceinline__ void wait_turn(int warpgroup) {
  delay_point(7);
  asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
  delay_point(8);
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + warpgroup) : "memory");
}

// All warpgroups that compute.
template <int kThreads>
__device__ __forceinline__ void sync_consumers() {
  delay_point(9);
  asm volatile("bar.sync 3, %0;" ::"n"(kThreads) : "memory");
}

// The warps that fetch Q, or those that convert K and V.
template <int kThreads>
__device__ __forceinline__ void sync_fetchers() {
  delay_point(17);
  asm volatile("bar.sync 4, %0;" ::"n"(kThreads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fp8cutlass::sm90
