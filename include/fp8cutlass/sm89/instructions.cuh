// The instructions of the sm89 family: copies to shared memory, loads of fragments, products of a warp.
#pragma once

#include <cstdint>

#include "fp8cutlass/numeric.cuh"

namespace fp8cutlass::sm89 {

// Copies 16 bytes to shared memory; or zeros, and reads nothing. (CuTe's header of this and of
// ldmatrix takes half a second to compile, a third of a kernel.)
__device__ __forceinline__ void copy16(void* to, const void* from, bool is_there) {
  const uint32_t place = shared_address(to);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place), "l"(from),
               "r"(is_there ? 16 : 0));
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}
// What this thread copied since the last call is a group; then waits until `kPending` groups are on their way at most.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  if constexpr (kPending == 0)
    asm volatile("cp.async.wait_all;");
  else
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// As thread_index(): keeps multiples of a stride out of the main loop's registers.
__device__ __forceinline__ void hide_stride(int64_t& stride) { asm volatile("" : "+l"(stride)); }

// Four matrices of 8 rows of 16 bytes; lane i has the address of row i % 8 of matrix i / 8. Lane (g, t) gets bytes 4t
// to 4t + 3 of row g of each.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const uint8_t* row) {
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// The instructions by their operands, in CuTe's words (its header takes 0.4 s to compile): d += a b, 16 x 8 x 32. Sums
// are float32, or f16 in pairs.
#define FP8CUTLASS_MMA(NAME_A, NAME_B, A, B)                                                                           \
  struct SM89_16x8x32_F32##NAME_A##NAME_B##F32_TN {                                                                    \
    static __device__ __forceinline__ void fma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {      \
      asm("mma.sync.aligned.m16n8k32.row.col.f32." #A "." #B                                                           \
          ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                                        \
          "{%10, %11, %12, %13};"                                                                                      \
          : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                             \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])); \
    }                                                                                                                  \
  };                                                                                                                   \
  struct SM89_16x8x32_F16##NAME_A##NAME_B##F16_TN {                                                                    \
    static __device__ __forceinline__ void fma(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {   \
      asm("mma.sync.aligned.m16n8k32.row.col.f16." #A "." #B ".f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9};"    \
          : "=r"(d[0]), "=r"(d[1])                                                                                     \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(d[0]), "r"(d[1]));                       \
    }                                                                                                                  \
  };
FP8CUTLASS_MMA(E4M3, E4M3, e4m3, e4m3)
FP8CUTLASS_MMA(E4M3, E5M2, e4m3, e5m2)
FP8CUTLASS_MMA(E5M2, E4M3, e5m2, e4m3)
FP8CUTLASS_MMA(E5M2, E5M2, e5m2, e5m2)
#undef FP8CUTLASS_MMA

// 8-bit integers: sums are exact, in s32.
#define FP8CUTLASS_MMA(NAME_A, A)                                                                                      \
  struct SM80_16x8x32_S32##NAME_A##S8S32_TN {                                                                          \
    static __device__ __forceinline__ void fma(uint32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {   \
      asm("mma.sync.aligned.m16n8k32.row.col.s32." #A                                                                  \
          ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                                     \
          "{%10, %11, %12, %13};"                                                                                      \
          : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                             \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])); \
    }                                                                                                                  \
  };
FP8CUTLASS_MMA(S8, s8)
FP8CUTLASS_MMA(U8, u8)
#undef FP8CUTLASS_MMA

}  // namespace fp8cutlass::sm89
