// Single instructions of the decode kernels. Host tests replace this file by one that does the same on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::decode {

// Copies 16 bytes to shared memory, of which `bytes` are read and the rest are zeros. The L2 cache gets 64 bytes for
// it: where a row has no more, the others would be another head's.
__device__ __forceinline__ void copy16(uint8_t* to, const uint8_t* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
// From global memory that has 8 bytes there, or 4; else as above.
__device__ __forceinline__ void copy8(void* to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy4(void* to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
// 16 bytes to registers. What asks for them goes on at once.
__device__ __forceinline__ uint4 load16(const uint8_t* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::64B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// What this thread copied since the last call is a group; then waits until `kPending` groups are on their way at most.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where the first kThreads threads of a CTA meet, again and again. An mbarrier, at which each of them arrives:
// racecheck follows it, and not `bar.sync` of some of the threads (docs/lab/decode.md).
template <int kThreads>
class Meeting {
 public:
  __device__ __forceinline__ void begin() {  // by one thread, before the CTA meets
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier_)), "n"(kThreads));
  }
  __device__ __forceinline__ void all() {
    asm volatile(
        "{\n.reg .pred done;\n.reg .b64 phase;\n"
        "mbarrier.arrive.shared::cta.b64 phase, [%0];\n"
        "again: mbarrier.try_wait.shared::cta.b64 done, [%0], phase;\n"
        "@!done bra again;\n}" ::"r"(shared_address(&barrier_))
        : "memory");
  }

 private:
  uint64_t barrier_;
};

// Four matrices of 8 rows of 16 bytes; lane i has the address of row i % 8 of matrix i / 8. Lane (g, t) gets bytes 4t
// to 4t + 3 of row g of each.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const uint8_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
// Transposed, by pairs of bytes: lane (g, t) gets pair g of rows 2t and 2t + 1.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const uint8_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
// A matrix of 8 x 8 halves in registers, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a b, 16 x 8 x 16, f16 in, float32 out.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 bytes to two pairs of halves, exactly.
__device__ __forceinline__ void to_halves(uint32_t& low, uint32_t& high, uint32_t bytes) {
  asm("{\n.reg .b16 lo, hi;\n"
      "mov.b32 {lo, hi}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lo;\n"
      "cvt.rn.f16x2.e4m3x2 %1, hi;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

// Counts an arrival; returns those before. What was written before is there for those who arrive later.
__device__ __forceinline__ unsigned arrive(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Four values that another CTA wrote, past the L1 cache; zeros where they are not there. As a branch, each load would
// wait for the one before.
__device__ __forceinline__ float4 load_result(const float* p, bool there) {
  float4 x;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@there ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "l"(p), "r"(int(there))
      : "memory");
  return x;
}
// A row's largest score and its sum: -inf and 0 where they are not there.
__device__ __forceinline__ float2 load_score(const float* p, bool there) {
  float2 x;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n"
      "mov.b32 %0, 0xff800000;\nmov.b32 %1, 0;\n"
      "@there ld.global.cg.v2.f32 {%0, %1}, [%2];\n}"
      : "=f"(x.x), "=f"(x.y)
      : "l"(p), "r"(int(there))
      : "memory");
  return x;
}

}  // namespace fp8cutlass::decode
